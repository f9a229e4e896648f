/* 06_mlp_zero3.c: the same MLP on 4 ranks, its training state sharded: ZeRO stage 3.

   Build:  cc -std=c11 -O2 -I. examples/06_mlp_zero3.c -o build/06_mlp_zero3 -lm -lpthread
   Run:    build/06_mlp_zero3

      step   1  loss 1.1058
      step  50  loss 0.2256
      step 100  loss 0.0105
      peak       193792 bytes in backward linear; the most of each tag:
      param       29184
      grad        61696
      optim       29184
      act         49920
      gather      32768
      workspace   19456
      other        2816
      sent           36 a step: all-gather, zero scalars
      sent       173184 a step: all-gather, zero gather
      sent        87168 a step: reduce-scatter, zero reduce

   What to learn. Against 05_mlp_zero2.c one line: stage 3. A rank keeps a quarter of the weights
   (param); whole are only the running unit and the next (gather), so it pays where units are many.
   The price: a gather in forward and another in backward, but not of the last unit, which is kept
   in between, nor of the first, which backward does not read. Case by case: femtotron_zero.h.

   LETTERS  N points, n = N / R of a rank, I inputs, C hidden, V classes, L layers, R ranks.
   License: MIT, see LICENSE. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"

enum { N = 48, I = 3, C = 64, V = 3, L = 8, R = 4, STEPS = 100 };
static const double lr = 0.01, momentum = 0.9;

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

/* loss [1] = scale * the sum over this rank's points of -log softmax(w[L] h)[label]. */
static ft_status forward(ft_ctx *ctx, ft_zero *zero, ft_tensor **w, ft_tensor *x,
                         ft_tensor *labels, ft_tensor *scale, ft_tensor **loss)
{
    ft_tensor *h = x, *z;
    for (int l = 0; l < L; l++) {
        FT_TRY(ft_zero_enter(zero, l, 0));
        FT_TRY(ft_linear(ctx, &z, h, w[l], NULL)); /* z [n,C] */
        if (l > 0) ft_tensor_free(h);
        FT_TRY(ft_gelu(ctx, &h, z));               /* h [n,C] */
        ft_tensor_free(z);
        FT_TRY(ft_zero_leave(zero, l));
    }
    FT_TRY(ft_zero_enter(zero, L, FT_ZERO_KEEP)); /* backward comes next */
    FT_TRY(ft_linear_cross_entropy(ctx, loss, h, w[L], labels, scale, 0));
    ft_tensor_free(h);
    return ft_zero_leave(zero, L);
}

/* values[n] = elements first..first+n-1 of weight "w0", "w1", ...; asked for what a rank keeps. */
static ft_status init(void *user, const char *name, int64_t first, int64_t n, float *values)
{
    int l = name[1] - '0';
    (void)user;
    for (int64_t i = 0, k = l * C * C + first; i < n; i++, k++) /* sin(k^2): as good as random */
        values[i] = (float)(sqrt(4.0 / (l > 0 ? C : I)) * sin((double)(k * k)));
    return FT_OK;
}

static void print_costs(const ft_ctx *ctx)
{
    ft_mem_stats m;
    ft_traffic t[8];
    ft_mem_get(ctx, &m);
    printf("peak      %7zu bytes in %s; the most of each tag:\n", m.peak_bytes, m.peak_where);
    for (int tag = 0; tag < FT_TAG_COUNT; tag++)
        if (m.highest[tag]) printf("%-9s %7zu\n", ft_tag_name((ft_tag)tag), m.highest[tag]);
    for (int g = 0; g < ft_traffic_get(ctx, 8, t); g++)
        for (int c = 0; c < FT_COLLECTIVE_COUNT; c++)
            if (t[g].calls[c])
                printf("sent %12lld a step: %s, %s\n", (long long)t[g].sent_bytes[c] / STEPS,
                       ft_collective_name((ft_collective)c), t[g].group);
}

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    ft_tensor *w[L + 1];                  /* w[0] [C,I], then [C,C], the head w[L] [V,C] */
    ft_tensor *x, *labels, *scale, *loss; /* [n,I], [n], [1], [1] */
    int64_t n = N / R;
    ft_zero_config config = ft_zero_config_default();
    ft_zero_report report;
    ft_zero *zero;
    ft_mesh mesh;
    ft_tape *tape;
    (void)user;
    config.stage = 3;
    config.optimizer = ft_zero_sgd(momentum, 0);
    FT_TRY(ft_mesh_create(ctx, R, 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &config, &mesh, &zero));
    for (int l = 0; l <= L; l++) {
        char name[3] = { 'w', (char)('0' + l), 0 };
        int64_t shape[2] = { l < L ? C : V, l > 0 ? C : I };
        int unit;
        FT_TRY(ft_zero_unit(zero, name, &unit)); /* unit l */
        FT_TRY(ft_zero_param(zero, name, 2, shape, 0, &w[l]));
    }
    FT_TRY(ft_zero_commit(zero, init, NULL));
    ft_mem_reset_peak(ctx); /* what making the weights took is not training's */
    FT_TRY(spirals(ctx, ft_rank(ctx) * n, n, &x, &labels));
    FT_TRY(ft_tape_create(ctx, &tape));
    for (int step = 1; step <= STEPS; step++) {
        FT_TRY(ft_zero_step_begin(zero, 1, n, &scale)); /* 1 micro-batch of n points: 1 / N */
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(forward(ctx, zero, w, x, labels, scale, &loss));
        FT_TRY(ft_tape_end(tape));
        FT_TRY(ft_backward(tape, loss, NULL));
        FT_TRY(ft_zero_add_loss(zero, loss));
        ft_tensor_free(loss);
        FT_TRY(ft_zero_step_end(zero, lr));
        FT_TRY(ft_zero_report_get(zero, &report));
        if (ft_rank(ctx) == 0 && (step % 50 == 0 || step == 1))
            printf("step %3d  loss %.4f\n", step, report.loss);
    }
    if (ft_rank(ctx) == 0) print_costs(ctx);
    return FT_OK;
}

int main(void)
{
    ft_config config = ft_config_default();
    config.world = R;
    if (ft_launch(&config, rank_main, NULL) == FT_OK) return 0;
    fprintf(stderr, "error: %s\n", ft_last_error());
    return 1;
}
