/* 09_mlp_pipeline.c: the MLP of 02_mlp.c, its layers spread over 4 ranks: a pipeline.

   Build:  cc -std=c11 -O2 -I. examples/09_mlp_pipeline.c -o build/09_mlp_pipeline -lm -lpthread
   Run:    build/09_mlp_pipeline

      1f1b         bubble 27.3%  act  21504  21504  15360   8448
      gpipe        bubble 27.3%  act  38400  50688  50688  62208
      interleaved  bubble 15.8%  act  29184  35328  26112  18432
      zb-h1        bubble 11.1%  act  21504  27648  27648  26880
      step   1  loss 1.1058
      step  50  loss 0.2256
      step 100  loss 0.0105

   What to learn. Each rank has two of the layers of 02_mlp.c, and its losses: the global batch in
   M micro-batches is the same batch. Schedules order the same work. Columns: time idle, if backward
   takes twice as long as forward; the most act bytes of each rank. gpipe keeps all M micro-batches,
   1f1b as many as ranks follow; interleaved and zb-h1 pay memory for time (see femtotron_pp.h).

   LETTERS  N points, M micro-batches, n = N / M, I inputs, C hidden, V classes, L layers, P ranks.
   License: MIT, see LICENSE. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_pp.h"

enum { N = 48, I = 3, C = 64, V = 3, L = 8, P = 4, M = 8, STEPS = 100 };
static const double lr = 0.01, momentum = 0.9;

typedef struct stage { /* what a rank has of the model: weight l is NULL on the others */
    ft_ctx *ctx;
    int layers, step;    /* layers of a chunk */
    float *loss;         /* [STEPS] */
    ft_tensor *w[L + 1]; /* w[0] [C,I], then [C,C], the head w[L] [V,C] */
    float v[L + 1][C * C];
} stage;

static float losses[FT_PP_KIND_COUNT][STEPS]; /* as the last rank sees them */
static ft_mem_stats mem[P];

/* Points first..first+n-1 of N on V spiral arms, x [n,I], and the arm of each, labels [n]. */
static ft_status spirals(ft_ctx *ctx, int64_t first, int64_t n, ft_tensor **x, ft_tensor **labels)
{
    float point[N][I];
    int32_t arm[N];
    int64_t shape[2] = { n, I };
    for (int64_t i = 0; i < n; i++) {
        arm[i] = (int32_t)((first + i) % V);
        double radius = (double)(first + i + 1) / N;
        double angle = 6.2831853 * arm[i] / V + 4.0 * radius;
        point[i][0] = (float)(radius * cos(angle));
        point[i][1] = (float)(radius * sin(angle));
        point[i][2] = 1.0f; /* its weights are the first layer's biases */
    }
    FT_TRY(ft_tensor_create(ctx, x, FT_F32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(ctx, labels, FT_I32, 1, shape, FT_TAG_OTHER));
    FT_TRY(ft_upload(*x, point));
    return ft_upload(*labels, arm);
}

/* A chunk's part: x [n,C] from the rank before, NULL at first; *out [n,C], or at last the loss. */
static ft_status forward(void *user, int chunk, int micro_batch, ft_tensor *x, ft_tensor **out)
{
    stage *s = user;
    int first = (chunk * P + ft_rank(s->ctx)) * s->layers, end = first + s->layers;
    ft_tensor *points, *labels, *z;
    FT_TRY(spirals(s->ctx, micro_batch * (N / M), N / M, &points, &labels));
    for (int l = first; l < end; l++) {
        FT_TRY(ft_linear(s->ctx, &z, l > first ? *out : x ? x : points, s->w[l], NULL));
        if (l > first) ft_tensor_free(*out);
        FT_TRY(ft_gelu(s->ctx, out, z));
        ft_tensor_free(z);
    }
    if (end == L) {
        FT_TRY(ft_linear_cross_entropy(s->ctx, &z, *out, s->w[L], labels, NULL, 0));
        ft_tensor_free(*out);
        *out = z;
    }
    ft_tensor_free(points);
    ft_tensor_free(labels);
    return FT_OK;
}

static ft_status add_loss(void *user, int micro_batch, ft_tensor *loss)
{
    stage *s = user;
    float mean; /* over n points; all M have as many */
    (void)micro_batch;
    FT_TRY(ft_download(loss, &mean));
    s->loss[s->step] += mean / M;
    return FT_OK;
}

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    const ft_pp_config *config = user;
    stage s = { ctx, L / P / config->chunks, 0, losses[config->kind], { NULL }, { { 0 } } };
    ft_pp_program program = { forward, add_loss, &s, FT_F32, 2, { N / M, C } };
    float values[C * C];
    ft_mesh mesh;
    ft_pp *pp;
    for (int l = 0; l <= L; l++) { /* layer l is in virtual stage l / layers, the head at the end */
        int64_t shape[2] = { l < L ? C : V, l > 0 ? C : I };
        if ((l < L ? l / s.layers : P - 1) % P != ft_rank(ctx)) continue;
        for (int64_t i = 0, k = l * C * C; i < C * C; i++, k++) /* sin(k^2): as good as random */
            values[i] = (float)(sqrt(4.0 / (l > 0 ? C : I)) * sin((double)(k * k)));
        FT_TRY(ft_tensor_create(ctx, &s.w[l], FT_F32, 2, shape, FT_TAG_PARAM));
        FT_TRY(ft_upload(s.w[l], values));
        s.w[l]->requires_grad = 1;
    }
    FT_TRY(ft_mesh_create(ctx, 1, 1, P, &mesh));
    FT_TRY(ft_pp_create(ctx, &mesh, config, &pp));
    for (; s.step < STEPS; s.step++) {
        FT_TRY(ft_pp_run(pp, &program)); /* forward and backward of all micro-batches */
        FT_TRY(ft_sync(ctx));
        for (int l = 0; l <= L; l++) {
            if (!s.w[l]) continue;
            float *w = ft_data(s.w[l]), *v = s.v[l], *dw = ft_data(s.w[l]->grad);
            for (int64_t i = 0; i < ft_numel(s.w[l]); i++) {
                v[i] = (float)momentum * v[i] + dw[i] / M;
                w[i] -= (float)lr * v[i];
            }
            memset(dw, 0, ft_bytes(s.w[l])); /* the next backwards add to it */
        }
    }
    ft_mem_get(ctx, &mem[ft_rank(ctx)]);
    return FT_OK;
}

int main(void)
{
    ft_config config = ft_config_default();
    config.world = P;
    for (int kind = 0; kind < FT_PP_KIND_COUNT; kind++) {
        ft_pp_config pipeline = { (ft_pp_kind)kind, P, kind == FT_PP_INTERLEAVED ? 2 : 1, M, 0, 0 };
        ft_pp_schedule *schedule;
        ft_pp_simulation *ideal;
        if (ft_pp_schedule_create(&pipeline, &schedule) != FT_OK ||
            ft_pp_simulate(schedule, NULL, &ideal) != FT_OK ||
            ft_launch(&config, rank_main, &pipeline) != FT_OK)
            return fprintf(stderr, "error: %s\n", ft_last_error()), 1;
        printf("%-11s  bubble %4.1f%%  act", ft_pp_kind_name(pipeline.kind), 100 * ideal->bubble);
        for (int p = 0; p < P; p++) printf(" %6zu", mem[p].highest[FT_TAG_ACT]);
        puts(memcmp(losses[kind], losses[0], sizeof losses[0]) ? "  other losses" : "");
        ft_pp_simulation_free(ideal);
        ft_pp_schedule_free(schedule);
    }
    for (int step = 1; step <= STEPS; step += step == 1 ? 49 : 50)
        printf("step %3d  loss %.4f\n", step, losses[0][step - 1]);
    return 0;
}
