/* nccl_mismatch.c: two GPUs over NCCL, whose ranks do not ask for the same.

   usage: nccl_mismatch size|late|alone|again
     size   rank 1 gathers more elements than rank 0
     late   rank 1 comes after half the time-out: nothing is wrong
     alone  rank 1 does not come at all
     again  nothing is wrong, in three launches one after the other
   Ranks are threads, or, where a launcher's variables are set, processes.

   Prints the error of the launch, and exits 1 if there is one. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static ft_status ask(ft_ctx *ctx, void *user)
{
    const char *what = (const char *)user;
    int64_t part = 1 << 20, whole;
    ft_tensor *shard, *full;
    ft_group *world;
    ft_stream *gather = ft_stream_get(ctx, FT_STREAM_GATHER);
    if (ft_rank(ctx) == 1 && !strcmp(what, "size")) part *= 4;
    whole = 2 * part;
    FT_TRY(ft_group_strided(ctx, "everyone", 0, 1, 2, &world));
    FT_TRY(ft_tensor_create(ctx, &shard, FT_F32, 1, &part, FT_TAG_PARAM));
    FT_TRY(ft_tensor_create(ctx, &full, FT_F32, 1, &whole, FT_TAG_GATHER));
    FT_TRY(ft_fill(shard, 1, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(ft_sync(ctx));
    if (ft_rank(ctx) == 1 && !strcmp(what, "late")) {
        struct timespec half = {2, 500000000};
        nanosleep(&half, NULL);
    }
    if (ft_rank(ctx) == 0 || strcmp(what, "alone")) {
        FT_TRY(ft_all_gather(world, gather, shard, full));
        /* Of another size the first may go through piece by piece; the next cannot. */
        if (!strcmp(what, "size")) FT_TRY(ft_all_gather(world, gather, shard, full));
    }
    return ft_sync(ctx);
}

int main(int argc, char **argv)
{
    ft_config config = ft_config_default();
    config.world = 2;
    config.device = FT_GPU;
    config.gpus = 2;
    config.transport = FT_TRANSPORT_NCCL;
    config.timeout_s = 5;
    const char *what = argc > 1 ? argv[1] : "late";
    ft_status status = FT_OK;
    for (int i = 0; status == FT_OK && i < (strcmp(what, "again") ? 1 : 3); i++)
        status = ft_env_rank() < 0 ? ft_launch(&config, ask, (void *)what)
                                   : ft_launch_env(&config, ask, (void *)what);
    if (status != FT_OK) printf("error: %s\n", ft_last_error());
    return status != FT_OK;
}
