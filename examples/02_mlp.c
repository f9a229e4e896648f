/* 02_mlp.c: a multi-layer perceptron learns three spirals, on one rank.

   Build:  cc -std=c11 -O2 -I. examples/02_mlp.c -o build/02_mlp -lm -lpthread
   Run:    build/02_mlp

@OUTPUT@
   LETTERS  N points, I inputs of a point, C hidden, V classes, L layers below the head.

   License: MIT, see LICENSE. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"

enum { N = 48, I = 3, C = 64, V = 3, L = 8, STEPS = 100 };
static const double lr = 0.01, momentum = 0.9;

/* values[n] = elements first..first+n-1 of weight "w0", "w1", ...: a function of these alone, so that
   all ranks begin alike. Variance 2 / fan-in (He et al. 2015), random numbers from splitmix64. */
static ft_status init(void *user, const char *name, int64_t first, int64_t n, float *values)
{
    int layer = name[1] - '0';
    double limit = sqrt(6.0 / (layer == 0 ? I : C));
    (void)user;
    for (int64_t i = 0; i < n; i++) {
        uint64_t z = (uint64_t)(layer * C * C + first + i + 1) * 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        values[i] = (float)(limit * ((double)((z ^ z >> 31) >> 11) / 4503599627370496.0 - 1.0));
    }
    return FT_OK;
}

/* Points first..first+n-1 on V spiral arms, x [n,I], and the arm of each, labels [n]. */
static ft_status data(ft_ctx *ctx, int64_t first, int64_t n, ft_tensor **x, ft_tensor **labels)
{
    float point[N][I];
    int32_t arm[N];
    int64_t shape[2] = { n, I };
    for (int64_t i = 0; i < n; i++) {
        arm[i] = (int32_t)((first + i) % V);
        double radius = (double)((first + i) / V + 1) / (N / V);
        double angle = 6.2831853 * arm[i] / V + 4.0 * radius;
        point[i][0] = (float)(radius * cos(angle));
        point[i][1] = (float)(radius * sin(angle));
        point[i][2] = 1.0f; /* in place of a bias */
    }
    FT_TRY(ft_tensor_create(ctx, x, FT_F32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(ctx, labels, FT_I32, 1, shape, FT_TAG_OTHER));
    FT_TRY(ft_upload(*x, point));
    return ft_upload(*labels, arm);
}

/* loss [1] = mean over points of -log softmax(logits)[label]. */
static ft_status forward(ft_ctx *ctx, ft_tensor **w, ft_tensor *x, ft_tensor *labels,
                         ft_tensor **loss)
{
    ft_tensor *h = x, *z;
    for (int l = 0; l < L; l++) {
        FT_TRY(ft_linear(ctx, &z, h, w[l], NULL)); /* z [n,C] */
        if (l > 0) ft_tensor_free(h);
        FT_TRY(ft_gelu(ctx, &h, z));               /* h [n,C] */
        ft_tensor_free(z);
    }
    FT_TRY(ft_linear_cross_entropy(ctx, loss, h, w[L], labels, NULL, 0));
    ft_tensor_free(h);
    return FT_OK;
}

/* v = momentum v + dw; w -= lr v. */
static void sgd(ft_tensor *weight, ft_tensor *velocity)
{
    float *w = ft_data(weight), *v = ft_data(velocity), *dw = ft_data(weight->grad);
    for (int64_t i = 0; i < ft_numel(weight); i++) {
        v[i] = (float)momentum * v[i] + dw[i];
        w[i] -= (float)lr * v[i];
    }
}

/* Bytes of this rank: at the moment of the peak, and the highest of each tag at whatever moment. */
static void print_costs(const ft_ctx *ctx)
{
    ft_mem_stats m;
    ft_mem_get(ctx, &m);
    printf("%-9s %8s %8s\n", "bytes", "at peak", "highest");
    for (int tag = 0; tag < FT_TAG_COUNT; tag++)
        if (m.highest[tag])
            printf("%-9s %8zu %8zu\n", ft_tag_name((ft_tag)tag), m.at_peak[tag], m.highest[tag]);
    printf("%-9s %8zu in %s\n", "all", m.peak_bytes, m.peak_where);
}

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    ft_tensor *w[L + 1], *v[L + 1]; /* w[0] [C,I], then [C,C], the head w[L] [V,C]; v like w */
    ft_tensor *x, *labels, *loss;   /* [N,I], [N], [1] */
    ft_stream *stream = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    ft_tape *tape;
    float values[C * C], value;
    (void)user;
    for (int l = 0; l <= L; l++) {
        char name[3] = { 'w', (char)('0' + l), 0 };
        int64_t shape[2] = { l < L ? C : V, l > 0 ? C : I };
        FT_TRY(ft_tensor_create(ctx, &w[l], FT_F32, 2, shape, FT_TAG_PARAM));
        FT_TRY(ft_tensor_create(ctx, &v[l], FT_F32, 2, shape, FT_TAG_OPTIM));
        FT_TRY(init(NULL, name, 0, ft_numel(w[l]), values));
        FT_TRY(ft_upload(w[l], values));
        FT_TRY(ft_fill(v[l], 0.0, stream));
        w[l]->requires_grad = 1;
    }
    FT_TRY(data(ctx, 0, N, &x, &labels));
    FT_TRY(ft_tape_create(ctx, &tape));
    for (int step = 1; step <= STEPS; step++) {
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(forward(ctx, w, x, labels, &loss));
        FT_TRY(ft_tape_end(tape));
        FT_TRY(ft_backward(tape, loss, NULL));
        FT_TRY(ft_download(loss, &value)); /* waits for the stream: sgd reads from the host */
        ft_tensor_free(loss);
        for (int l = 0; l <= L; l++) {
            sgd(w[l], v[l]);
            ft_tensor_free(w[l]->grad);
            w[l]->grad = NULL;
        }
        if (step % 20 == 0 || step == 1) printf("step %3d  loss %.4f\n", step, value);
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
