/* 02_mlp.c: a multi-layer perceptron learns three spirals, on one rank.

   Build:  cc -std=c11 -O2 -I. examples/02_mlp.c -o build/02_mlp -lm -lpthread
   Run:    build/02_mlp

      step   1  loss 1.1058
      step  50  loss 0.2256
      step 100  loss 0.0105
      peak       476160 bytes in backward linear; the most of each tag:
      param      116224
      grad       116224
      optim      116224
      act        197888
      workspace   28672
      other        1024

   What to learn. Training is 01_tensor.c in a loop: forward on a tape, backward, an update. What it
   costs: a gradient (grad) and a momentum (optim) for each weight (param), so three times the 29056
   numbers of 4 bytes; activations (act), which grow with N instead; scratch of the matrix products
   (workspace). The peak is less than the sum, because backward frees the activations of a layer as
   it makes the gradients of that layer: at its end gradients are whole and activations are gone.

   LETTERS  N points, I inputs, C hidden, V classes, L layers.
   License: MIT, see LICENSE. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"

enum { N = 48, I = 3, C = 64, V = 3, L = 8, STEPS = 100 };
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

/* loss [1] = the mean over all points of -log softmax(w[L] h)[label]. */
static ft_status forward(ft_ctx *ctx, ft_tensor **w, ft_tensor *x,
                         ft_tensor *labels, ft_tensor **loss)
{
    ft_tensor *h = x, *z;
    for (int l = 0; l < L; l++) {
        FT_TRY(ft_linear(ctx, &z, h, w[l], NULL)); /* z [N,C] */
        if (l > 0) ft_tensor_free(h);
        FT_TRY(ft_gelu(ctx, &h, z));               /* h [N,C] */
        ft_tensor_free(z);
    }
    FT_TRY(ft_linear_cross_entropy(ctx, loss, h, w[L], labels, NULL, 0));
    ft_tensor_free(h);
    return FT_OK;
}

/* v = momentum v + dw; w -= lr v; then dw is no longer needed. */
static void sgd(ft_tensor *weight, ft_tensor *velocity)
{
    float *w = ft_data(weight), *v = ft_data(velocity), *dw = ft_data(weight->grad);
    for (int64_t i = 0; i < ft_numel(weight); i++) {
        v[i] = (float)momentum * v[i] + dw[i];
        w[i] -= (float)lr * v[i];
    }
    ft_tensor_free(weight->grad);
    weight->grad = NULL;
}

static void print_costs(const ft_ctx *ctx)
{
    ft_mem_stats m;
    ft_mem_get(ctx, &m);
    printf("peak      %7zu bytes in %s; the most of each tag:\n", m.peak_bytes, m.peak_where);
    for (int tag = 0; tag < FT_TAG_COUNT; tag++)
        if (m.highest[tag]) printf("%-9s %7zu\n", ft_tag_name((ft_tag)tag), m.highest[tag]);
}

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    ft_tensor *w[L + 1], *v[L + 1]; /* w[0] [C,I], then [C,C], the head w[L] [V,C]; v the same */
    ft_tensor *x, *labels, *loss;   /* [N,I], [N], [1] */
    ft_stream *stream = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    ft_tape *tape;
    float values[C * C];
    (void)user;
    for (int l = 0; l <= L; l++) {
        int64_t shape[2] = { l < L ? C : V, l > 0 ? C : I };
        for (int64_t i = 0, k = l * C * C; i < C * C; i++, k++) /* sin(k^2): as good as random */
            values[i] = (float)(sqrt(4.0 / (l > 0 ? C : I)) * sin((double)(k * k)));
        FT_TRY(ft_tensor_create(ctx, &w[l], FT_F32, 2, shape, FT_TAG_PARAM));
        FT_TRY(ft_tensor_create(ctx, &v[l], FT_F32, 2, shape, FT_TAG_OPTIM));
        FT_TRY(ft_upload(w[l], values));
        FT_TRY(ft_fill(v[l], 0.0, stream));
        w[l]->requires_grad = 1;
    }
    FT_TRY(spirals(ctx, 0, N, &x, &labels));
    FT_TRY(ft_tape_create(ctx, &tape));
    for (int step = 1; step <= STEPS; step++) {
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(forward(ctx, w, x, labels, &loss));
        FT_TRY(ft_tape_end(tape));
        FT_TRY(ft_backward(tape, loss, NULL));
        FT_TRY(ft_download(loss, values)); /* also waits for backward: sgd reads on the host */
        ft_tensor_free(loss);
        for (int l = 0; l <= L; l++) sgd(w[l], v[l]);
        if (step % 50 == 0 || step == 1) printf("step %3d  loss %.4f\n", step, values[0]);
    }
    print_costs(ctx);
    return FT_OK;
}

int main(void)
{
    ft_config config = ft_config_default();
    if (ft_launch(&config, rank_main, NULL) == FT_OK) return 0;
    fprintf(stderr, "error: %s\n", ft_last_error());
    return 1;
}
