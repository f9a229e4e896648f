/* nccl_mismatch.c: two GPUs over NCCL, whose ranks do not ask for the same.

   usage: nccl_mismatch late|again|size|dtype|kind|turn|less|more|alone
     late     rank 1 comes after half the time-out: nothing is wrong
     again    nothing is wrong, in three launches one after the other
     size     rank 1 gathers more elements than rank 0
     dtype    rank 1 gathers as many, of another type
     kind     rank 1 sums where rank 0 gathers
     turn     after both sizes were seen, rank 1 takes the other one
     less     rank 0 sends less than rank 1 wants
     more     rank 0 sends more than rank 1 wants
     alone    rank 1 does not come at all
   Ranks are threads, or, where a launcher's variables are set, processes.

   Prints the error of the launch, and exits 1 if there is one. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

typedef struct pair { ft_tensor *shard, *full; } pair;

static ft_status pair_create(ft_ctx *ctx, int64_t elems, ft_dtype dtype, pair *p)
{
    int64_t whole = 2 * elems;
    FT_TRY(ft_tensor_create(ctx, &p->shard, dtype, 1, &elems, FT_TAG_PARAM));
    FT_TRY(ft_tensor_create(ctx, &p->full, dtype, 1, &whole, FT_TAG_GATHER));
    FT_TRY(ft_fill(p->full, 1, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    return ft_fill(p->shard, 1, ft_stream_get(ctx, FT_STREAM_COMPUTE));
}

static ft_status ask(ft_ctx *ctx, void *user)
{
    const char *what = (const char *)user;
    const int odd = ft_rank(ctx) == 1; /* the one that differs */
    ft_stream *gather = ft_stream_get(ctx, FT_STREAM_GATHER);
    ft_group *everyone;
    pair small, large, other;
    FT_TRY(ft_group_strided(ctx, "everyone", 0, 1, 2, &everyone));
    FT_TRY(pair_create(ctx, 1 << 20, FT_F32, &small));
    FT_TRY(pair_create(ctx, 1 << 22, FT_F32, &large));
    FT_TRY(pair_create(ctx, 1 << 20, FT_BF16, &other));
    FT_TRY(ft_sync(ctx));
    if (odd && !strcmp(what, "late")) {
        struct timespec half = {2, 500000000};
        nanosleep(&half, NULL);
    }
    if (odd && !strcmp(what, "alone")) return ft_sync(ctx);
    if (!strcmp(what, "less") || !strcmp(what, "more")) {
        const int is_large = odd == !strcmp(what, "less");
        const ft_p2p op = {!odd, !odd, is_large ? large.full : small.full};
        FT_TRY(ft_exchange(everyone, gather, 1, &op));
        return ft_sync(ctx);
    }
    if (!strcmp(what, "turn")) {
        for (int i = 0; i < 300; i++) {
            pair *p = (i + (odd && i == 20)) % 2 ? &large : &small;
            FT_TRY(ft_all_gather(everyone, gather, p->shard, p->full));
        }
        return ft_sync(ctx);
    }
    if (odd && !strcmp(what, "kind"))
        FT_TRY(ft_reduce_scatter(everyone, gather, small.full, small.shard));
    pair *p = odd && !strcmp(what, "size") ? &large : odd && !strcmp(what, "dtype") ? &other : &small;
    FT_TRY(ft_all_gather(everyone, gather, p->shard, p->full));
    return ft_sync(ctx);
}

int main(int argc, char **argv)
{
    static const char *const all = " late again size dtype kind turn less more alone ";
    const char *what = argc > 1 ? argv[1] : "";
    ft_config config = ft_config_default();
    ft_status status = FT_OK;
    char word[16];
    snprintf(word, sizeof word, " %s ", what);
    if (!*what || !strstr(all, word)) {
        fprintf(stderr, "usage: nccl_mismatch, and one of%s\n", all);
        return 2;
    }
    config.world = 2;
    config.device = FT_GPU;
    config.gpus = 2;
    config.transport = FT_TRANSPORT_NCCL;
    config.timeout_s = 5;
    for (int i = 0; status == FT_OK && i < (strcmp(what, "again") ? 1 : 3); i++)
        status = ft_env_rank() < 0 ? ft_launch(&config, ask, (void *)what)
                                   : ft_launch_env(&config, ask, (void *)what);
    if (status != FT_OK) printf("error: %s\n", ft_last_error());
    return status != FT_OK;
}
