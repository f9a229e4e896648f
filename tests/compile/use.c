/* A program that uses every header and implements none: linked by tests/compile/check.sh with an
   implementation compiled as C, C++ or CUDA, to show that they are one library.

   It plans two ranks of a small Llama on the meta device and trains nothing. */
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"
#include "femtotron_io.h"

typedef struct use_result {
    size_t peak_bytes[2];
} use_result;

static ft_status use_rank(ft_ctx *ctx, void *user) {
    use_result *result = (use_result *)user;
    ft_mesh mesh;
    ft_zero *zero;
    ft_llama *model;
    ft_mem_stats stats;
    ft_zero_config zero_config = ft_zero_config_default();
    ft_llama_config config = ft_llama_config_default();
    zero_config.stage = 3;
    FT_TRY(ft_llama_check(&config));
    FT_TRY(ft_mesh_create(ctx, 2, 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &zero_config, &mesh, &zero));
    FT_TRY(ft_llama_create(ctx, zero, &config, 16, 1, &model));
    ft_mem_get(ctx, &stats);
    result->peak_bytes[ft_rank(ctx)] = stats.peak_bytes;
    return FT_OK;
}

int main(void) {
    use_result result = {{0, 0}};
    ft_config config = ft_config_default();
    config.world = 2;
    config.device = FT_META;
    if (ft_launch(&config, use_rank, &result) != FT_OK) {
        fprintf(stderr, "%s\n", ft_last_error());
        return 1;
    }
    if (result.peak_bytes[0] == 0 || result.peak_bytes[1] == 0) return 1;
    /* An error's text crosses the units as well. */
    if (ft_error(FT_ERR_ARG, "%d ranks", 3) != FT_ERR_ARG) return 1;
    return ft_last_error()[0] == '3' ? 0 : 1;
}
