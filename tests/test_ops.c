/* test_ops.c: every op's values and gradients.

   The reference is a second forward, written here in float64; its central differences are the
   expected gradients. Each case runs in fp32 and bf16, with every subset of one input asking for a
   gradient, with and without gradients written over other tensors, and accumulating. Then the
   properties that are no single op's: recomputation, the two ways of the loss, bad input. */

#ifndef FT_TEST_LINKED /* make compiles the implementation once for many tests */
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* Assertions of cmocka may not leave a rank's thread: there a failed check is an error. */
#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) return ft_error(FT_ERR_STATE, __VA_ARGS__);                              \
    } while (0)

static void launch_ok(ft_rank_fn fn, void *user)
{
    ft_config config = ft_config_default();
    ft_status status = ft_launch(&config, fn, user);
    if (status != FT_OK) fail_msg("%s", ft_last_error());
}

static uint64_t random_state = 1;

static double uniform(void) /* -1 .. 1 */
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(random_state >> 11) / 4503599627370496.0 - 1.0;
}

static double rounded(double value, ft_dtype dtype)
{
    if (dtype == FT_BF16) return (double)ft_f32_from_bf16(ft_bf16_from_f32((float)value));
    return dtype == FT_F32 ? (double)(float)value : value;
}

static ft_status make(ft_ctx *ctx, ft_tensor **out, ft_dtype dtype, int ndim, const int64_t *shape,
                      const double *values)
{
    FT_TRY(ft_tensor_create(ctx, out, dtype, ndim, shape, FT_TAG_PARAM));
    int64_t n = ft_numel(*out);
    char *host = (char *)malloc(ft_bytes(*out));
    for (int64_t i = 0; i < n; i++) {
        if (dtype == FT_BF16) ((uint16_t *)host)[i] = ft_bf16_from_f32((float)values[i]);
        else if (dtype == FT_F32) ((float *)host)[i] = (float)values[i];
        else ((int32_t *)host)[i] = (int32_t)values[i];
    }
    ft_status status = ft_upload(*out, host);
    free(host);
    return status;
}

static ft_status make1(ft_ctx *ctx, ft_tensor **out, ft_dtype dtype, int64_t n, double value)
{
    double *values = (double *)malloc((size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = value;
    ft_status status = make(ctx, out, dtype, 1, &n, values);
    free(values);
    return status;
}

static ft_status fetch(ft_tensor *t, double *values)
{
    char *host = (char *)malloc(ft_bytes(t));
    ft_status status = ft_download(t, host);
    for (int64_t i = 0; i < ft_numel(t); i++) {
        if (t->dtype == FT_BF16) values[i] = (double)ft_f32_from_bf16(((uint16_t *)host)[i]);
        else if (t->dtype == FT_F32) values[i] = (double)((float *)host)[i];
        else values[i] = (double)((int32_t *)host)[i];
    }
    free(host);
    return status;
}

/* ---- the cases ---- */

enum { MAX_IN = 5, MAX_OUT = 2 };

typedef struct input_spec {
    int ndim;
    int64_t shape[4];
    int kind;         /* 0 values, 1 indices below `limit`, 2 labels: some are -100 */
    int64_t limit;
} input_spec;

typedef struct op_case op_case;
struct op_case {
    const char *name;
    int n_in, n_out;
    input_spec in[MAX_IN];
    int inplace;                  /* input 0 must be made on the tape */
    int64_t p[4];                 /* the case's own: H, K, D; or a chunk */
    ft_status (*build)(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out);
    void (*reference)(const op_case *c, double *const *in, double *const *out);
};

static const double EPS = 1e-5, THETA = 10000.0, FACTOR = -1.75, LOSS_SCALE = 0.375;

static int64_t elems(const input_spec *s)
{
    int64_t n = 1;
    for (int i = 0; i < s->ndim; i++) n *= s->shape[i];
    return n;
}

static int64_t cols(const input_spec *s) { return s->shape[s->ndim - 1]; }

/* References. [n,C] of input 0 unless said otherwise. */

static void ref_embedding(const op_case *c, double *const *in, double *const *out)
{
    int64_t n = elems(&c->in[0]), C = c->in[1].shape[1];
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < C; j++) out[0][i * C + j] = in[1][(int64_t)in[0][i] * C + j];
}

static ft_status do_embedding(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_embedding(ctx, out, in[0], in[1]);
}

static void rms(double *y, const double *x, const double *w, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    for (int64_t i = 0; i < n; i++) y[i] = x[i] / sqrt(sum / (double)n + EPS) * w[i];
}

static void ref_rmsnorm(const op_case *c, double *const *in, double *const *out)
{
    int64_t C = cols(&c->in[0]), n = elems(&c->in[0]) / C;
    for (int64_t i = 0; i < n; i++) rms(out[0] + i * C, in[0] + i * C, in[1], C);
}

static ft_status do_rmsnorm(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_rmsnorm(ctx, out, in[0], in[1], EPS);
}

static void ref_add_rmsnorm(const op_case *c, double *const *in, double *const *out)
{
    int64_t C = cols(&c->in[0]), n = elems(&c->in[0]) / C;
    for (int64_t i = 0; i < n * C; i++) out[0][i] = in[0][i] + in[1][i];
    for (int64_t i = 0; i < n; i++) rms(out[1] + i * C, out[0] + i * C, in[2], C);
}

static ft_status do_add_rmsnorm(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_add_rmsnorm(ctx, &out[0], &out[1], in[0], in[1], in[2], EPS);
}

/* Only one of its outputs is used: the other's gradient is absent. */
static void ref_add_rmsnorm_sum(const op_case *c, double *const *in, double *const *out)
{
    for (int64_t i = 0; i < elems(&c->in[0]); i++) out[0][i] = in[0][i] + in[1][i];
}

static ft_status do_add_rmsnorm_sum(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    ft_tensor *y;
    (void)c;
    FT_TRY(ft_add_rmsnorm(ctx, &out[0], &y, in[0], in[1], in[2], EPS));
    ft_tensor_free(y);
    return FT_OK;
}

static void ref_add_rmsnorm_y(const op_case *c, double *const *in, double *const *out)
{
    int64_t C = cols(&c->in[0]), n = elems(&c->in[0]) / C;
    double row[64];
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < C; j++) row[j] = in[0][i * C + j] + in[1][i * C + j];
        rms(out[0] + i * C, row, in[2], C);
    }
}

static ft_status do_add_rmsnorm_y(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    ft_tensor *sum;
    (void)c;
    FT_TRY(ft_add_rmsnorm(ctx, &sum, &out[0], in[0], in[1], in[2], EPS));
    ft_tensor_free(sum);
    return FT_OK;
}

static void ref_linear(const op_case *c, double *const *in, double *const *out)
{
    int64_t I = c->in[1].shape[1], O = c->in[1].shape[0], n = elems(&c->in[0]) / I;
    for (int64_t i = 0; i < n; i++)
        for (int64_t o = 0; o < O; o++) {
            double sum = c->n_in == 3 ? in[2][o] : 0;
            for (int64_t j = 0; j < I; j++) sum += in[0][i * I + j] * in[1][o * I + j];
            out[0][i * O + o] = sum;
        }
}

static ft_status do_linear(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    return ft_linear(ctx, out, in[0], in[1], c->n_in == 3 ? in[2] : NULL);
}

static const ft_rope_scaling SCALING = { 8.0, 1.0, 4.0, 16 };

static double rope_frequency(const op_case *c, int64_t i)
{
    double f = pow(THETA, -2.0 * (double)i / (double)c->p[2]);
    if (!c->p[3]) return f;
    double wavelength = 2 * 3.14159265358979323846 / f, context = (double)SCALING.original_context;
    double smooth = (context / wavelength - SCALING.low_freq_factor) /
                    (SCALING.high_freq_factor - SCALING.low_freq_factor);
    if (smooth < 0) smooth = 0;
    if (smooth > 1) smooth = 1;
    return (1 - smooth) * f / SCALING.factor + smooth * f;
}

static void ref_rope(const op_case *c, double *const *in, double *const *out)
{
    int64_t H = c->p[0], K = c->p[1], D = c->p[2], W = (H + 2 * K) * D;
    int64_t T = c->in[0].shape[1], n = elems(&c->in[0]) / W;
    memcpy(out[0], in[0], (size_t)(n * W) * sizeof(double));
    for (int64_t row = 0; row < n; row++)
        for (int64_t h = 0; h < H + K; h++)
            for (int64_t i = 0; i < D / 2; i++) {
                double angle = (double)(row % T) * rope_frequency(c, i);
                const double *x = in[0] + row * W + h * D + i;
                double *y = out[0] + row * W + h * D + i;
                y[0] = x[0] * cos(angle) - x[D / 2] * sin(angle);
                y[D / 2] = x[D / 2] * cos(angle) + x[0] * sin(angle);
            }
}

static ft_status do_rope(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    ft_tensor *table;
    FT_TRY(ft_rope_table(ctx, &table, c->in[0].shape[1] + 3, c->p[2], THETA,
                         c->p[3] ? &SCALING : NULL));
    FT_TRY(ft_rope(ctx, out, in[0], table, c->p[0], c->p[1], c->p[2]));
    ft_tensor_free(table);
    return FT_OK;
}

static void ref_head_norm(const op_case *c, double *const *in, double *const *out)
{
    int64_t H = c->p[0], K = c->p[1], D = c->p[2], W = (H + 2 * K) * D;
    int64_t n = elems(&c->in[0]) / W;
    memcpy(out[0], in[0], (size_t)(n * W) * sizeof(double));
    for (int64_t row = 0; row < n; row++)
        for (int64_t h = 0; h < H + K; h++)
            rms(out[0] + row * W + h * D, in[0] + row * W + h * D, in[h < H ? 1 : 2], D);
}

static ft_status do_head_norm(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    return ft_head_norm(ctx, out, in[0], in[1], in[2], c->p[0], c->p[1], c->p[2], EPS);
}

static void ref_attention(const op_case *c, double *const *in, double *const *out)
{
    int64_t H = c->p[0], K = c->p[1], D = c->p[2], W = (H + 2 * K) * D;
    int64_t T = c->in[0].shape[1], n = elems(&c->in[0]) / W;
    double p[256];
    for (int64_t row = 0; row < n; row++)
        for (int64_t h = 0; h < H; h++) {
            int64_t first = row / T * T, seen = row % T + 1, kv = H + h / (H / K);
            const double *q = in[0] + row * W + h * D;
            double *o = out[0] + (row * H + h) * D, sum = 0;
            for (int64_t s = 0; s < seen; s++) {
                const double *k = in[0] + (first + s) * W + kv * D;
                double dot = 0;
                for (int64_t d = 0; d < D; d++) dot += q[d] * k[d];
                sum += p[s] = exp(dot / sqrt((double)D));
            }
            for (int64_t d = 0; d < D; d++) o[d] = 0;
            for (int64_t s = 0; s < seen; s++)
                for (int64_t d = 0; d < D; d++)
                    o[d] += p[s] / sum * in[0][(first + s) * W + (kv + K) * D + d];
        }
}

static ft_status do_attention(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    return ft_attention(ctx, out, in[0], c->p[0], c->p[1], c->p[2]);
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static void ref_swiglu(const op_case *c, double *const *in, double *const *out)
{
    int64_t F = cols(&c->in[0]) / 2, n = elems(&c->in[0]) / (2 * F);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < F; j++) {
            double g = in[0][i * 2 * F + j], u = in[0][i * 2 * F + F + j];
            out[0][i * F + j] = g * sigmoid(g) * u;
        }
}

static ft_status do_swiglu(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_swiglu(ctx, out, in[0]);
}

/* in: x, w, labels; p: chunk, and 1 for a scale of one's own */
static void ref_loss(const op_case *c, double *const *in, double *const *out)
{
    int64_t V = c->in[1].shape[0], C = c->in[1].shape[1], n = elems(&c->in[2]), count = 0;
    double total = 0;
    for (int64_t i = 0; i < n; i++) {
        double sum = 0, mine = 0;
        if (in[2][i] < 0) continue;
        count++;
        for (int64_t v = 0; v < V; v++) {
            double logit = 0;
            for (int64_t j = 0; j < C; j++) logit += in[0][i * C + j] * in[1][v * C + j];
            sum += exp(logit);
            if (v == (int64_t)in[2][i]) mine = logit;
        }
        total += log(sum) - mine;
    }
    out[0][0] = total * (c->p[1] ? LOSS_SCALE : count ? 1.0 / (double)count : 0.0);
}

static ft_status do_loss(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    ft_tensor *scale = NULL;
    if (c->p[1]) FT_TRY(make1(ctx, &scale, FT_F32, 1, LOSS_SCALE));
    FT_TRY(ft_linear_cross_entropy(ctx, out, in[0], in[1], in[2], scale, c->p[0]));
    ft_tensor_free(scale);
    return FT_OK;
}

static void ref_add(const op_case *c, double *const *in, double *const *out)
{
    int64_t n = elems(&c->in[0]), m = elems(&c->in[1]);
    for (int64_t i = 0; i < n; i++) out[0][i] = in[0][i] + in[1][i % m];
}

static ft_status do_add(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    return (c->inplace ? ft_add_inplace : ft_add)(ctx, out, in[0], in[1]);
}

static void ref_mul(const op_case *c, double *const *in, double *const *out)
{
    int64_t n = elems(&c->in[0]), m = elems(&c->in[1]);
    for (int64_t i = 0; i < n; i++) out[0][i] = in[0][i] * in[1][i % m];
}

static ft_status do_mul(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_mul(ctx, out, in[0], in[1]);
}

static void ref_square(const op_case *c, double *const *in, double *const *out)
{
    for (int64_t i = 0; i < elems(&c->in[0]); i++) out[0][i] = in[0][i] * in[0][i];
}

static ft_status do_square(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_mul(ctx, out, in[0], in[0]);
}

static void ref_scale(const op_case *c, double *const *in, double *const *out)
{
    for (int64_t i = 0; i < elems(&c->in[0]); i++) out[0][i] = in[0][i] * FACTOR;
}

static ft_status do_scale(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_scale(ctx, out, in[0], FACTOR);
}

static void ref_gelu(const op_case *c, double *const *in, double *const *out)
{
    for (int64_t i = 0; i < elems(&c->in[0]); i++)
        out[0][i] = in[0][i] * 0.5 * (1 + erf(in[0][i] / sqrt(2.0)));
}

static ft_status do_gelu(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_gelu(ctx, out, in[0]);
}

static void ref_silu(const op_case *c, double *const *in, double *const *out)
{
    for (int64_t i = 0; i < elems(&c->in[0]); i++) out[0][i] = in[0][i] * sigmoid(in[0][i]);
}

static ft_status do_silu(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_silu(ctx, out, in[0]);
}

static void ref_softmax(const op_case *c, double *const *in, double *const *out)
{
    int64_t C = cols(&c->in[0]), n = elems(&c->in[0]) / C;
    for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        for (int64_t j = 0; j < C; j++) sum += exp(in[0][i * C + j]);
        for (int64_t j = 0; j < C; j++) out[0][i * C + j] = exp(in[0][i * C + j]) / sum;
    }
}

static ft_status do_softmax(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_softmax(ctx, out, in[0]);
}

static void ref_layer_norm(const op_case *c, double *const *in, double *const *out)
{
    int64_t C = cols(&c->in[0]), n = elems(&c->in[0]) / C;
    for (int64_t i = 0; i < n; i++) {
        const double *x = in[0] + i * C;
        double mean = 0, variance = 0;
        for (int64_t j = 0; j < C; j++) mean += x[j] / (double)C;
        for (int64_t j = 0; j < C; j++) variance += (x[j] - mean) * (x[j] - mean) / (double)C;
        for (int64_t j = 0; j < C; j++)
            out[0][i * C + j] = (x[j] - mean) / sqrt(variance + EPS) * in[1][j] + in[2][j];
    }
}

static ft_status do_layer_norm(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_layer_norm(ctx, out, in[0], in[1], in[2], EPS);
}

static void ref_mean(const op_case *c, double *const *in, double *const *out)
{
    out[0][0] = 0;
    for (int64_t i = 0; i < elems(&c->in[0]); i++)
        out[0][0] += in[0][i] / (double)elems(&c->in[0]);
}

static ft_status do_mean(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **out)
{
    (void)c;
    return ft_mean(ctx, out, in[0]);
}

#define S1(a) { 1, { a, 0, 0, 0 }, 0, 0 }
#define S2(a, b) { 2, { a, b, 0, 0 }, 0, 0 }
#define S3(a, b, c) { 3, { a, b, c, 0 }, 0, 0 }
#define TOKENS(a, b, limit) { 2, { a, b, 0, 0 }, 1, limit }
#define LABELS(a, b, limit) { 2, { a, b, 0, 0 }, 2, limit }
#define NO_P { 0, 0, 0, 0 }

static const op_case CASES[] = {
    { "embedding", 2, 1, { TOKENS(2, 13, 97), S2(97, 7) }, 0, NO_P, do_embedding, ref_embedding },
    { "embedding, wide, few rows", 2, 1, { TOKENS(2, 13, 3), S2(5, 301) }, 0, NO_P, do_embedding,
      ref_embedding },
    { "embedding, one token", 2, 1, { TOKENS(1, 1, 3), S2(3, 1) }, 0, NO_P, do_embedding,
      ref_embedding },
    { "rmsnorm", 2, 1, { S3(2, 13, 7), S1(7) }, 0, NO_P, do_rmsnorm, ref_rmsnorm },
    { "rmsnorm, wide", 2, 1, { S2(3, 531), S1(531) }, 0, NO_P, do_rmsnorm, ref_rmsnorm },
    { "rmsnorm, one row", 2, 1, { S1(33), S1(33) }, 0, NO_P, do_rmsnorm, ref_rmsnorm },
    { "add_rmsnorm", 3, 2, { S3(2, 13, 7), S3(2, 13, 7), S1(7) }, 0, NO_P, do_add_rmsnorm,
      ref_add_rmsnorm },
    { "add_rmsnorm, sum only", 3, 1, { S2(5, 33), S2(5, 33), S1(33) }, 0, NO_P, do_add_rmsnorm_sum,
      ref_add_rmsnorm_sum },
    { "add_rmsnorm, y only", 3, 1, { S2(5, 33), S2(5, 33), S1(33) }, 0, NO_P, do_add_rmsnorm_y,
      ref_add_rmsnorm_y },
    { "linear", 2, 1, { S3(2, 13, 7), S2(11, 7) }, 0, NO_P, do_linear, ref_linear },
    { "linear with bias", 3, 1, { S3(2, 13, 7), S2(11, 7), S1(11) }, 0, NO_P, do_linear,
      ref_linear },
    { "linear, larger", 3, 1, { S2(37, 65), S2(51, 65), S1(51) }, 0, NO_P, do_linear, ref_linear },
    { "linear, one of each", 3, 1, { S2(1, 1), S2(1, 1), S1(1) }, 0, NO_P, do_linear, ref_linear },
    { "rope", 1, 1, { S3(2, 13, 100) }, 1, { 6, 2, 10, 0 }, do_rope, ref_rope },
    { "rope beyond position 20", 1, 1, { S3(1, 41, 40) }, 1, { 2, 1, 10, 0 }, do_rope, ref_rope },
    { "rope, scaled", 1, 1, { S3(1, 41, 64) }, 1, { 2, 1, 16, 1 }, do_rope, ref_rope },
    { "rope, one token", 1, 1, { S3(1, 1, 6) }, 1, { 1, 1, 2, 0 }, do_rope, ref_rope },
    { "head_norm", 3, 1, { S3(2, 13, 100), S1(10), S1(10) }, 0, { 6, 2, 10, 0 }, do_head_norm,
      ref_head_norm },
    { "head_norm, D 1", 3, 1, { S3(1, 2, 4), S1(1), S1(1) }, 0, { 2, 1, 1, 0 }, do_head_norm,
      ref_head_norm },
    { "attention", 1, 1, { S3(2, 13, 100) }, 0, { 6, 2, 10, 0 }, do_attention, ref_attention },
    { "attention, several key blocks", 1, 1, { S3(1, 131, 20) }, 0, { 2, 1, 5, 0 }, do_attention,
      ref_attention },
    { "attention, exact blocks", 1, 1, { S3(1, 64, 48) }, 0, { 1, 1, 16, 0 }, do_attention,
      ref_attention },
    { "attention, D 33", 1, 1, { S3(1, 9, 99) }, 0, { 1, 1, 33, 0 }, do_attention, ref_attention },
    { "attention, one token", 1, 1, { S3(3, 1, 6) }, 0, { 2, 2, 1, 0 }, do_attention,
      ref_attention },
    { "swiglu", 1, 1, { S3(2, 13, 14) }, 0, NO_P, do_swiglu, ref_swiglu },
    { "swiglu, wide", 1, 1, { S2(2, 602) }, 0, NO_P, do_swiglu, ref_swiglu },
    { "linear_cross_entropy", 3, 1, { S3(2, 13, 7), S2(97, 7), LABELS(2, 13, 97) }, 0, NO_P,
      do_loss, ref_loss },
    { "linear_cross_entropy, chunks", 3, 1, { S3(2, 13, 7), S2(97, 7), LABELS(2, 13, 97) }, 0,
      { 5, 0, 0, 0 }, do_loss, ref_loss },
    { "linear_cross_entropy, scaled", 3, 1, { S3(2, 13, 7), S2(97, 7), LABELS(2, 13, 97) }, 0,
      { 8, 1, 0, 0 }, do_loss, ref_loss },
    { "linear_cross_entropy, chunks of 1", 3, 1, { S3(1, 6, 7), S2(19, 7), LABELS(1, 6, 19) }, 0,
      { 1, 0, 0, 0 }, do_loss, ref_loss },
    { "linear_cross_entropy, one token", 3, 1, { S3(1, 1, 7), S2(97, 7), TOKENS(1, 1, 97) }, 0,
      NO_P, do_loss, ref_loss },
    { "add", 2, 1, { S3(2, 13, 7), S3(2, 13, 7) }, 0, NO_P, do_add, ref_add },
    { "add, trailing", 2, 1, { S3(2, 13, 7), S1(7) }, 0, NO_P, do_add, ref_add },
    { "add, trailing, wide", 2, 1, { S3(3, 2, 301), S2(2, 301) }, 0, NO_P, do_add, ref_add },
    { "add_inplace", 2, 1, { S3(2, 13, 7), S3(2, 13, 7) }, 1, NO_P, do_add, ref_add },
    { "mul", 2, 1, { S3(2, 13, 7), S3(2, 13, 7) }, 0, NO_P, do_mul, ref_mul },
    { "mul, trailing", 2, 1, { S3(2, 13, 7), S2(13, 7) }, 0, NO_P, do_mul, ref_mul },
    { "mul, trailing, wide", 2, 1, { S3(2, 3, 301), S1(301) }, 0, NO_P, do_mul, ref_mul },
    { "mul by itself", 1, 1, { S2(13, 7) }, 0, NO_P, do_square, ref_square },
    { "scale", 1, 1, { S2(13, 27) }, 0, NO_P, do_scale, ref_scale },
    { "gelu", 1, 1, { S2(13, 27) }, 0, NO_P, do_gelu, ref_gelu },
    { "silu", 1, 1, { S2(13, 27) }, 0, NO_P, do_silu, ref_silu },
    { "softmax", 1, 1, { S3(2, 13, 7) }, 0, NO_P, do_softmax, ref_softmax },
    { "softmax, wide", 1, 1, { S2(2, 301) }, 0, NO_P, do_softmax, ref_softmax },
    { "layer_norm", 3, 1, { S3(2, 13, 7), S1(7), S1(7) }, 0, NO_P, do_layer_norm, ref_layer_norm },
    { "layer_norm, wide", 3, 1, { S2(3, 301), S1(301), S1(301) }, 0, NO_P, do_layer_norm,
      ref_layer_norm },
    { "mean", 1, 1, { S3(2, 13, 27) }, 0, NO_P, do_mean, ref_mean },
};

enum { CASE_COUNT = sizeof CASES / sizeof CASES[0] };

/* ---- running a case ---- */

typedef struct run_data {
    const op_case *c;
    ft_dtype dtype;
    double *in[MAX_IN];          /* as stored */
    double *weight[MAX_OUT];     /* the scalar is sum weight * out; as stored */
    double *value[MAX_OUT];      /* outputs of the op */
    int64_t out_elems[MAX_OUT];
    double *want[MAX_IN];        /* expected gradients, at every step[i]-th element */
    int64_t step[MAX_IN];
} run_data;

static double loss64(run_data *r, double *const *out)
{
    double sum = 0;
    r->c->reference(r->c, r->in, out);
    for (int o = 0; o < r->c->n_out; o++)
        for (int64_t i = 0; i < r->out_elems[o]; i++) sum += r->weight[o][i] * out[o][i];
    return sum;
}

static void expect(run_data *r)
{
    double *out[MAX_OUT];
    for (int o = 0; o < r->c->n_out; o++)
        out[o] = (double *)malloc((size_t)r->out_elems[o] * sizeof(double));
    for (int k = 0; k < r->c->n_in; k++) {
        int64_t n = elems(&r->c->in[k]);
        if (r->c->in[k].kind) continue;
        r->step[k] = n > 1500 ? 7 : 1;
        r->want[k] = (double *)calloc((size_t)n, sizeof(double));
        for (int64_t i = 0; i < n; i += r->step[k]) {
            const double h = 1e-5, x = r->in[k][i];
            r->in[k][i] = x + h;
            double up = loss64(r, out);
            r->in[k][i] = x - h;
            r->want[k][i] = (up - loss64(r, out)) / (2 * h);
            r->in[k][i] = x;
        }
    }
    for (int o = 0; o < r->c->n_out; o++) free(out[o]);
}

static double relative(const double *have, const double *want, int64_t n, int64_t step,
                       double factor)
{
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i += step) {
        double d = have[i] - factor * want[i];
        if (!(fabs(d) < 1e30)) return INFINITY;
        difference += d * d;
        size += factor * factor * want[i] * want[i];
    }
    return sqrt(difference / (size > 0 ? size : 1));
}

static ft_status make_input(ft_ctx *ctx, const run_data *r, int k, ft_tensor **out)
{
    const input_spec *s = &r->c->in[k];
    return make(ctx, out, s->kind ? FT_I32 : r->dtype, s->ndim, s->shape, r->in[k]);
}

/* Two outputs are joined by products and a sum, so that each has a gradient of its own. */
static ft_status join(ft_ctx *ctx, const run_data *r, ft_tensor **out, ft_tensor **root,
                      ft_tensor **droot)
{
    ft_tensor *product[2];
    int64_t n = r->out_elems[0];
    double *ones;
    ft_status status;
    if (r->c->n_out == 1) {
        *root = out[0];
        return make(ctx, droot, out[0]->dtype, out[0]->ndim, out[0]->shape, r->weight[0]);
    }
    for (int o = 0; o < 2; o++) {
        ft_tensor *w;
        FT_TRY(make(ctx, &w, r->dtype, out[o]->ndim, out[o]->shape, r->weight[o]));
        FT_TRY(ft_mul(ctx, &product[o], out[o], w));
    }
    FT_TRY(ft_add(ctx, root, product[0], product[1]));
    ones = (double *)malloc((size_t)n * sizeof(double));
    for (int64_t i = 0; i < n; i++) ones[i] = 1;
    status = make(ctx, droot, r->dtype, out[0]->ndim, out[0]->shape, ones);
    free(ones);
    ft_tensor_free(product[0]);
    ft_tensor_free(product[1]);
    ft_tensor_free(out[0]);
    ft_tensor_free(out[1]);
    return status;
}

/* Zeros whose gradient is the same storage as that of a sum they are added to, and as old as the
   tape: the other summand's op must not write over it. */
static ft_status make_sharer(ft_ctx *ctx, const run_data *r, ft_tensor **out)
{
    ft_tensor *zeros;
    FT_TRY(ft_tensor_create(ctx, &zeros, r->dtype, r->c->in[0].ndim, r->c->in[0].shape,
                            FT_TAG_PARAM));
    FT_TRY(ft_fill(zeros, 0.0, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    zeros->requires_grad = 1;
    return ft_scale(ctx, out, zeros, 1.0);
}

/* One tape over leaf[]. With `through`, inputs pass through an op first and their handles are given
   up, so that backward may write gradients over them and over dout. */
static ft_status one_tape(ft_ctx *ctx, const run_data *r, ft_tensor **leaf, int through)
{
    ft_tensor *in[MAX_IN], *out[MAX_OUT], *root, *droot, *sharer = NULL;
    ft_tape *tape;
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    if (r->c->inplace && !through) FT_TRY(make_sharer(ctx, r, &sharer));
    for (int k = 0; k < r->c->n_in; k++) {
        in[k] = leaf[k];
        if (!r->c->in[k].kind && (through || (r->c->inplace && k == 0)))
            FT_TRY(ft_scale(ctx, &in[k], leaf[k], 1.0));
    }
    FT_TRY(r->c->build(r->c, ctx, in, out));
    for (int k = 0; k < r->c->n_in; k++)
        if (in[k] != leaf[k]) ft_tensor_free(in[k]);
    if (sharer) FT_TRY(ft_add(ctx, &out[0], out[0], sharer));
    FT_TRY(join(ctx, r, out, &root, &droot));
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_backward(tape, root, droot));
    ft_tensor_free(root);
    ft_tape_free(tape);
    return FT_OK;
}

/* Gradients for the inputs in `mask`, after `times` backward passes, to grad[]. */
static ft_status gradients(ft_ctx *ctx, const run_data *r, unsigned mask, int through, int times,
                           double **grad)
{
    ft_tensor *leaf[MAX_IN];
    for (int k = 0; k < r->c->n_in; k++) {
        FT_TRY(make_input(ctx, r, k, &leaf[k]));
        leaf[k]->requires_grad = (int)(mask >> k & 1u);
    }
    for (int i = 0; i < times; i++) FT_TRY(one_tape(ctx, r, leaf, through));
    FT_TRY(ft_sync(ctx));
    for (int k = 0; k < r->c->n_in; k++) {
        grad[k] = NULL;
        CHECK(leaf[k]->requires_grad == (leaf[k]->grad != NULL), "%s: input %d %s a gradient",
              r->c->name, k, leaf[k]->grad ? "is frozen and got" : "got no");
        if (!leaf[k]->grad) continue;
        grad[k] = (double *)malloc((size_t)ft_numel(leaf[k]) * sizeof(double));
        FT_TRY(fetch(leaf[k]->grad, grad[k]));
    }
    for (int k = 0; k < r->c->n_in; k++) {
        if (leaf[k]->grad) {
            ft_tensor_free(leaf[k]->grad);
            leaf[k]->grad = NULL;
        }
        ft_tensor_free(leaf[k]);
    }
    return FT_OK;
}

static void release(double **arrays, int n)
{
    for (int k = 0; k < n; k++) {
        free(arrays[k]);
        arrays[k] = NULL;
    }
}

static ft_status values(ft_ctx *ctx, run_data *r)
{
    ft_tensor *in[MAX_IN], *out[MAX_OUT];
    for (int k = 0; k < r->c->n_in; k++) FT_TRY(make_input(ctx, r, k, &in[k]));
    FT_TRY(r->c->build(r->c, ctx, in, out));
    for (int o = 0; o < r->c->n_out; o++) {
        r->out_elems[o] = ft_numel(out[o]);
        r->value[o] = (double *)malloc((size_t)r->out_elems[o] * sizeof(double));
        r->weight[o] = (double *)malloc((size_t)r->out_elems[o] * sizeof(double));
        FT_TRY(fetch(out[o], r->value[o]));
        for (int64_t i = 0; i < r->out_elems[o]; i++)
            r->weight[o][i] = rounded(uniform() + 0.25, out[o]->dtype);
        ft_tensor_free(out[o]);
    }
    for (int k = r->c->inplace; k < r->c->n_in; k++) ft_tensor_free(in[k]);
    return FT_OK;
}

static ft_status check_values(run_data *r, double tolerance)
{
    double *want[MAX_OUT] = { NULL, NULL };
    double worst = 0;
    for (int o = 0; o < r->c->n_out; o++)
        want[o] = (double *)malloc((size_t)r->out_elems[o] * sizeof(double));
    r->c->reference(r->c, r->in, want);
    for (int o = 0; o < r->c->n_out; o++) {
        double error = relative(r->value[o], want[o], r->out_elems[o], 1, 1);
        worst = error > worst ? error : worst;
    }
    release(want, r->c->n_out);
    CHECK(worst <= tolerance, "%s, %s: values off by %g", r->c->name, ft_dtype_name(r->dtype),
          worst);
    return FT_OK;
}

static ft_status check_gradients(ft_ctx *ctx, run_data *r, double tolerance)
{
    const int n_in = r->c->n_in;
    double *whole[MAX_IN], *other[MAX_IN];
    unsigned all = 0;
    for (int k = 0; k < n_in; k++)
        if (!r->c->in[k].kind) all |= 1u << k;
    FT_TRY(gradients(ctx, r, all, 0, 1, whole));
    for (int k = 0; k < n_in; k++) {
        if (!whole[k]) continue;
        double error = relative(whole[k], r->want[k], elems(&r->c->in[k]), r->step[k], 1);
        CHECK(error <= tolerance, "%s, %s: gradient of input %d off by %g", r->c->name,
              ft_dtype_name(r->dtype), k, error);
    }
    FT_TRY(gradients(ctx, r, all, 0, 2, other)); /* accumulated */
    for (int k = 0; k < n_in; k++) {
        if (!whole[k]) continue;
        double error = relative(other[k], whole[k], elems(&r->c->in[k]), 1, 2);
        CHECK(error <= tolerance, "%s, %s: twice the gradient of input %d off by %g", r->c->name,
              ft_dtype_name(r->dtype), k, error);
    }
    release(other, n_in);
    FT_TRY(gradients(ctx, r, all, 1, 1, other)); /* written over other tensors */
    for (int k = 0; k < n_in; k++)
        CHECK(!whole[k] ||
              !memcmp(whole[k], other[k], (size_t)elems(&r->c->in[k]) * sizeof(double)),
              "%s, %s: gradient of input %d differs when it is written over another tensor",
              r->c->name, ft_dtype_name(r->dtype), k);
    release(other, n_in);
    for (int only = 0; only < n_in; only++) { /* all others frozen */
        if (!whole[only]) continue;
        for (int through = 0; through < 2; through++) {
            FT_TRY(gradients(ctx, r, 1u << only, through, 1, other));
            CHECK(!memcmp(whole[only], other[only],
                          (size_t)elems(&r->c->in[only]) * sizeof(double)),
                  "%s, %s: gradient of input %d differs when the others are frozen", r->c->name,
                  ft_dtype_name(r->dtype), only);
            release(other, n_in);
        }
    }
    release(whole, n_in);
    return FT_OK;
}

static ft_status run_case(ft_ctx *ctx, void *user)
{
    run_data *r = (run_data *)user;
    double tolerance = r->dtype == FT_F32 ? 1e-5 : 1e-2;
    for (int k = 0; k < r->c->n_in; k++) {
        const input_spec *s = &r->c->in[k];
        int64_t n = elems(s);
        r->in[k] = (double *)malloc((size_t)n * sizeof(double));
        for (int64_t i = 0; i < n; i++) {
            double index = floor((uniform() + 1) / 2 * (double)s->limit);
            if (!s->kind) r->in[k][i] = rounded(2 * uniform(), r->dtype);
            else r->in[k][i] = s->kind == 2 && i % 4 == 1 ? -100 : index;
        }
    }
    FT_TRY(values(ctx, r));
    FT_TRY(check_values(r, tolerance));
    expect(r);
    return check_gradients(ctx, r, tolerance);
}

static void test_gradients(void **state)
{
    (void)state;
    for (int i = 0; i < CASE_COUNT; i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            run_data r;
            memset(&r, 0, sizeof r);
            r.c = &CASES[i];
            r.dtype = bf16 ? FT_BF16 : FT_F32;
            random_state = (uint64_t)i + 1;
            launch_ok(run_case, &r);
            release(r.in, MAX_IN);
            release(r.want, MAX_IN);
            release(r.weight, MAX_OUT);
            release(r.value, MAX_OUT);
        }
}

/* ---- recomputation: a segment with every op, dropped and rebuilt ---- */

enum { B = 2, T = 13, C = 24, H = 6, K = 2, D = 4, F = 10, V = 29, QKV = (H + 2 * K) * D };

enum {
    W_TABLE, W_NORM1, W_QKV, W_BQKV, W_Q, W_K, W_O, W_NORM2, W_GU, W_DOWN, W_LN, W_LNB, W_GAIN,
    W_BIAS, W_NORM3, W_HEAD, W_COUNT
};

static const int64_t W_SHAPES[W_COUNT][2] = {
    { V, C }, { C, 0 }, { QKV, C }, { QKV, 0 }, { D, 0 }, { D, 0 }, { C, H * D }, { C, 0 },
    { 2 * F, C }, { C, F }, { C, 0 }, { C, 0 }, { C, 0 }, { C, 0 }, { C, 0 }, { V, C }
};

typedef struct model {
    ft_tensor *w[W_COUNT], *tokens, *labels, *rope;
} model;

typedef struct replay_data {
    ft_dtype dtype;
    ft_sac sac;
    double *grad[W_COUNT];
    double loss;
    double replay_flops;
} replay_data;

static ft_status model_make(ft_ctx *ctx, model *m, ft_dtype dtype)
{
    double values[V * C + QKV * C];
    int64_t shape[2] = { B, T };
    random_state = 77;
    for (int i = 0; i < W_COUNT; i++) {
        int ndim = W_SHAPES[i][1] ? 2 : 1;
        int64_t n = W_SHAPES[i][0] * (ndim == 2 ? W_SHAPES[i][1] : 1);
        for (int64_t j = 0; j < n; j++) values[j] = uniform() * (ndim == 2 ? 0.5 : 1.0);
        FT_TRY(make(ctx, &m->w[i], dtype, ndim, W_SHAPES[i], values));
        m->w[i]->requires_grad = 1;
    }
    for (int j = 0; j < B * T; j++) values[j] = (j * 7 + 3) % V;
    FT_TRY(make(ctx, &m->tokens, FT_I32, 2, shape, values));
    for (int j = 0; j < B * T; j++) values[j] = j % 5 == 4 ? -100 : (j * 11 + 5) % V;
    FT_TRY(make(ctx, &m->labels, FT_I32, 2, shape, values));
    return ft_rope_table(ctx, &m->rope, T, D, THETA, NULL);
}

static ft_status model_layer(ft_ctx *ctx, model *m, ft_tensor *x, ft_sac sac, ft_tensor **out)
{
    ft_tensor **w = m->w, *h, *q, *sum, *y, *a, *b;
    FT_TRY(ft_segment_begin(ctx, "layer", sac));
    FT_TRY(ft_rmsnorm(ctx, &h, x, w[W_NORM1], EPS));
    FT_TRY(ft_linear(ctx, &q, h, w[W_QKV], w[W_BQKV]));
    FT_TRY(ft_head_norm(ctx, &q, q, w[W_Q], w[W_K], H, K, D, EPS));
    FT_TRY(ft_rope(ctx, &q, q, m->rope, H, K, D));
    FT_TRY(ft_attention(ctx, &h, q, H, K, D));
    FT_TRY(ft_linear(ctx, &h, h, w[W_O], NULL));
    FT_TRY(ft_add_rmsnorm(ctx, &sum, &y, x, h, w[W_NORM2], EPS));
    FT_TRY(ft_linear(ctx, &h, y, w[W_GU], NULL));
    FT_TRY(ft_swiglu(ctx, &h, h));
    FT_TRY(ft_linear(ctx, &h, h, w[W_DOWN], NULL));
    FT_TRY(ft_add_inplace(ctx, &h, h, sum));
    FT_TRY(ft_layer_norm(ctx, &a, h, w[W_LN], w[W_LNB], EPS));
    FT_TRY(ft_gelu(ctx, &b, a));
    FT_TRY(ft_silu(ctx, &a, a));
    FT_TRY(ft_mul(ctx, &a, a, b));
    FT_TRY(ft_mul(ctx, &a, a, w[W_GAIN]));
    FT_TRY(ft_softmax(ctx, &a, a));
    FT_TRY(ft_add(ctx, &a, a, w[W_BIAS]));
    FT_TRY(ft_scale(ctx, &a, a, 0.5));
    FT_TRY(ft_add(ctx, out, h, a));
    return ft_segment_end(ctx, 1, out);
}

static ft_status replay_run(ft_ctx *ctx, void *user)
{
    replay_data *r = (replay_data *)user;
    model m;
    ft_tape *tape;
    ft_tensor *x, *y, *loss;
    ft_flops flops;
    FT_TRY(model_make(ctx, &m, r->dtype));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_embedding(ctx, &x, m.tokens, m.w[W_TABLE]));
    for (int layer = 0; layer < 2; layer++) {
        FT_TRY(model_layer(ctx, &m, x, r->sac, &y));
        ft_tensor_free(x);
        x = y;
    }
    FT_TRY(ft_rmsnorm(ctx, &y, x, m.w[W_NORM3], EPS));
    ft_tensor_free(x);
    FT_TRY(ft_linear_cross_entropy(ctx, &loss, y, m.w[W_HEAD], m.labels, NULL, 8));
    ft_tensor_free(y);
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_backward(tape, loss, NULL));
    FT_TRY(fetch(loss, &r->loss));
    for (int i = 0; i < W_COUNT; i++) {
        CHECK(m.w[i]->grad, "weight %d got no gradient", i);
        r->grad[i] = (double *)malloc((size_t)ft_numel(m.w[i]) * sizeof(double));
        FT_TRY(fetch(m.w[i]->grad, r->grad[i]));
    }
    ft_flops_get(ctx, &flops);
    r->replay_flops = flops.replay;
    return FT_OK;
}

static void test_replay(void **state)
{
    (void)state;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        replay_data first, other;
        memset(&first, 0, sizeof first);
        first.dtype = bf16 ? FT_BF16 : FT_F32;
        launch_ok(replay_run, &first);
        assert_true(first.replay_flops == 0);
        for (int kind = FT_SAC_SELECTIVE; kind <= FT_SAC_MASK; kind++)
            for (int bit = 0; bit < (kind == FT_SAC_MASK ? 24 : 1); bit++) {
                memset(&other, 0, sizeof other);
                other.dtype = first.dtype;
                other.sac.kind = (ft_sac_kind)kind;
                other.sac.mask = (uint64_t)1 << bit;
                launch_ok(replay_run, &other);
                if (kind != FT_SAC_MASK) assert_true(other.replay_flops > 0);
                assert_memory_equal(&other.loss, &first.loss, sizeof(double));
                for (int i = 0; i < W_COUNT; i++) {
                    int64_t n = W_SHAPES[i][0] * (W_SHAPES[i][1] ? W_SHAPES[i][1] : 1);
                    assert_memory_equal(other.grad[i], first.grad[i], (size_t)n * sizeof(double));
                }
                release(other.grad, W_COUNT);
            }
        release(first.grad, W_COUNT);
    }
}

/* A dropped tensor that an in-place op took, and that another backward reads: its replay may not be
   in place. Without recomputation the in-place op has a copy of its own. */
typedef struct beside_data { ft_dtype dtype; int full; double grad[2][B * T * QKV]; } beside_data;

static ft_status beside_run(ft_ctx *ctx, void *user)
{
    beside_data *r = (beside_data *)user;
    static double values[B * T * QKV];
    int64_t shape[3] = { B, T, QKV };
    ft_tensor *x[2], *q, *s, *a, *copy, *rope, *out;
    ft_tape *tape;
    ft_sac sac;
    memset(&sac, 0, sizeof sac);
    sac.kind = r->full ? FT_SAC_FULL : FT_SAC_NONE;
    random_state = 3;
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < B * T * QKV; i++) values[i] = uniform();
        FT_TRY(make(ctx, &x[k], r->dtype, 3, shape, values));
        x[k]->requires_grad = 1;
    }
    FT_TRY(ft_rope_table(ctx, &rope, T, D, THETA, NULL));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_segment_begin(ctx, "beside", sac));
    FT_TRY(ft_scale(ctx, &q, x[0], 0.75));
    FT_TRY(ft_silu(ctx, &s, q));
    copy = q;
    if (!r->full) FT_TRY(ft_scale(ctx, &copy, q, 1.0));
    FT_TRY(ft_rope(ctx, &q, copy, rope, H, K, D));
    FT_TRY(ft_silu(ctx, &a, q));
    copy = q;
    if (!r->full) FT_TRY(ft_scale(ctx, &copy, q, 1.0));
    FT_TRY(ft_add_inplace(ctx, &q, copy, x[1]));
    FT_TRY(ft_gelu(ctx, &q, q));
    FT_TRY(ft_mul(ctx, &a, a, s));
    FT_TRY(ft_mul(ctx, &a, a, q));
    FT_TRY(ft_mean(ctx, &out, a));
    FT_TRY(ft_segment_end(ctx, 1, &out));
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_backward(tape, out, NULL));
    for (int k = 0; k < 2; k++) FT_TRY(fetch(x[k]->grad, r->grad[k]));
    return FT_OK;
}

static void test_replay_beside(void **state)
{
    static beside_data runs[2];
    (void)state;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        for (int full = 0; full < 2; full++) {
            runs[full].dtype = bf16 ? FT_BF16 : FT_F32;
            runs[full].full = full;
            launch_ok(beside_run, &runs[full]);
        }
        assert_memory_equal(runs[0].grad, runs[1].grad, sizeof runs[0].grad);
    }
}

/* ---- the loss: its two ways, and labels that do not count ---- */

enum { N = 13, LC = 7, LV = 97 };

typedef struct loss_run { /* of one backward */
    double loss, dx[N * LC], dw[LV * LC];
} loss_run;

static ft_status loss_backward(ft_ctx *ctx, ft_dtype dtype, const double *labels, int read_first,
                               loss_run *run)
{
    double values[LV * LC];
    int64_t xs[2] = { N, LC }, ws[2] = { LV, LC }, ls[1] = { N };
    ft_tensor *x, *through, *w, *l, *loss;
    ft_tape *tape;
    random_state = 5;
    for (int i = 0; i < N * LC; i++) values[i] = uniform();
    FT_TRY(make(ctx, &x, dtype, 2, xs, values));
    for (int i = 0; i < LV * LC; i++) values[i] = uniform();
    FT_TRY(make(ctx, &w, dtype, 2, ws, values));
    FT_TRY(make(ctx, &l, FT_I32, 1, ls, labels));
    x->requires_grad = w->requires_grad = 1;
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_scale(ctx, &through, x, 1.0));
    FT_TRY(ft_linear_cross_entropy(ctx, &loss, through, w, l, NULL, 5));
    ft_tensor_free(through);
    FT_TRY(ft_tape_end(tape));
    if (read_first) FT_TRY(fetch(loss, &run->loss));
    FT_TRY(ft_backward(tape, loss, NULL));
    if (!read_first) FT_TRY(fetch(loss, &run->loss));
    FT_TRY(fetch(x->grad, run->dx));
    return fetch(w->grad, run->dw);
}

static ft_status loss_two_ways(ft_ctx *ctx, void *user)
{
    static loss_run runs[2];
    ft_dtype dtype = *(ft_dtype *)user;
    double labels[N];
    for (int i = 0; i < N; i++) labels[i] = i % 4 == 2 ? -100 : (i * 31) % LV;
    for (int way = 0; way < 2; way++) FT_TRY(loss_backward(ctx, dtype, labels, way, &runs[way]));
    CHECK(!memcmp(&runs[0], &runs[1], sizeof runs[0]), "%s: loss or gradients differ when the loss "
          "is read before backward: %.9g, %.9g", ft_dtype_name(dtype), runs[0].loss, runs[1].loss);
    return FT_OK;
}

static ft_status loss_all_ignored(ft_ctx *ctx, void *user)
{
    static loss_run run;
    double labels[N];
    for (int i = 0; i < N; i++) labels[i] = -100;
    for (int way = 0; way < 2; way++) {
        FT_TRY(loss_backward(ctx, *(ft_dtype *)user, labels, way, &run));
        CHECK(run.loss == 0, "the loss of no tokens is %g", run.loss);
        for (int i = 0; i < N * LC; i++) CHECK(run.dx[i] == 0, "dx[%d] is %g", i, run.dx[i]);
        for (int i = 0; i < LV * LC; i++) CHECK(run.dw[i] == 0, "dw[%d] is %g", i, run.dw[i]);
    }
    return FT_OK;
}

static void test_loss(void **state)
{
    (void)state;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        ft_dtype dtype = bf16 ? FT_BF16 : FT_F32;
        launch_ok(loss_two_ways, &dtype);
        launch_ok(loss_all_ignored, &dtype);
    }
}

/* ---- bad input ---- */

typedef struct bad_data { int labels; double value; int position; int on_tape; } bad_data;

static ft_status bad_index(ft_ctx *ctx, void *user)
{
    bad_data *bad = (bad_data *)user;
    double indices[N];
    for (int i = 0; i < N; i++) indices[i] = i == bad->position ? bad->value : i;
    if (bad->labels) {
        static loss_run run;
        int64_t xs[2] = { N, LC }, ws[2] = { LV, LC }, ls[1] = { N };
        ft_tensor *x, *w, *l, *loss;
        if (bad->on_tape) return loss_backward(ctx, FT_F32, indices, 0, &run);
        FT_TRY(ft_tensor_create(ctx, &x, FT_F32, 2, xs, FT_TAG_ACT));
        FT_TRY(ft_tensor_create(ctx, &w, FT_F32, 2, ws, FT_TAG_ACT));
        FT_TRY(ft_fill(x, 0.5, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
        FT_TRY(ft_fill(w, 0.5, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
        FT_TRY(make(ctx, &l, FT_I32, 1, ls, indices));
        FT_TRY(ft_linear_cross_entropy(ctx, &loss, x, w, l, NULL, 5));
    } else {
        int64_t ts[1] = { N }, ws[2] = { LV, LC };
        ft_tensor *tokens, *table, *y;
        FT_TRY(make(ctx, &tokens, FT_I32, 1, ts, indices));
        FT_TRY(ft_tensor_create(ctx, &table, FT_F32, 2, ws, FT_TAG_PARAM));
        FT_TRY(ft_fill(table, 0.5, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
        FT_TRY(ft_embedding(ctx, &y, tokens, table));
    }
    return ft_sync(ctx);
}

static void test_bad_index(void **state)
{
    static const double values[] = { LV, -1, -99, 2147483647.0, -2147483648.0 };
    (void)state;
    for (int labels = 0; labels < 2; labels++)
        for (int on_tape = 0; on_tape <= labels; on_tape++)
            for (int i = 0; i < 5; i++) {
                bad_data bad = { labels, values[i], 11, on_tape };
                ft_config config = ft_config_default();
                char value[32];
                snprintf(value, sizeof value, "%.0f", values[i]);
                assert_int_equal(ft_launch(&config, bad_index, &bad), FT_ERR_DATA);
                assert_non_null(strstr(ft_last_error(), "11"));
                assert_non_null(strstr(ft_last_error(), value));
            }
}

#define REFUSED(call, wanted, word)                                                                \
    do {                                                                                           \
        ft_status refused = (call);                                                                \
        CHECK(refused == (wanted) && strstr(ft_last_error(), word), "%s: %s, \"%s\"", #call,       \
              ft_status_name(refused), ft_last_error());                                           \
    } while (0)

static ft_status bad_shapes(ft_ctx *ctx, void *user)
{
    ft_tensor *a, *b, *h, *w, *i, *qkv, *t, *y, *z;
    int64_t s[3] = { 2, 3, 5 }, q[3] = { 2, 3, 20 };
    ft_rope_scaling scaling = { 8, 4, 4, 16 };
    (void)user;
    FT_TRY(ft_tensor_create(ctx, &a, FT_F32, 3, s, FT_TAG_ACT));
    FT_TRY(ft_tensor_create(ctx, &b, FT_F32, 2, s, FT_TAG_ACT));
    FT_TRY(ft_tensor_create(ctx, &h, FT_BF16, 3, s, FT_TAG_ACT));
    FT_TRY(ft_tensor_create(ctx, &w, FT_F32, 1, s + 2, FT_TAG_ACT));
    FT_TRY(ft_tensor_create(ctx, &i, FT_I32, 3, s, FT_TAG_ACT));
    FT_TRY(ft_tensor_create(ctx, &qkv, FT_F32, 3, q, FT_TAG_ACT));
    FT_TRY(ft_rope_table(ctx, &t, 2, 4, THETA, NULL));
    REFUSED(ft_embedding(ctx, &y, a, b), FT_ERR_SHAPE, "embedding");
    REFUSED(ft_embedding(ctx, &y, i, w), FT_ERR_SHAPE, "[2,3,5]");
    REFUSED(ft_rmsnorm(ctx, &y, a, b, EPS), FT_ERR_SHAPE, "rmsnorm");
    REFUSED(ft_rmsnorm(ctx, &y, h, w, EPS), FT_ERR_SHAPE, "bf16");
    REFUSED(ft_rmsnorm(ctx, &y, a, w, -1), FT_ERR_ARG, "eps");
    REFUSED(ft_rmsnorm(ctx, &y, i, w, EPS), FT_ERR_SHAPE, "int32");
    REFUSED(ft_add_rmsnorm(ctx, &y, &z, a, b, w, EPS), FT_ERR_SHAPE, "add_rmsnorm");
    REFUSED(ft_linear(ctx, &y, a, qkv, NULL), FT_ERR_SHAPE, "linear");
    REFUSED(ft_attention(ctx, &y, qkv, 3, 2, 4), FT_ERR_ARG, "multiple");
    REFUSED(ft_attention(ctx, &y, qkv, 3, 1, 5), FT_ERR_SHAPE, "attention");
    REFUSED(ft_attention(ctx, &y, qkv, 0, 1, 5), FT_ERR_ARG, "attention");
    REFUSED(ft_rope(ctx, &y, qkv, t, 2, 1, 5), FT_ERR_ARG, "odd");
    REFUSED(ft_rope(ctx, &y, qkv, t, 3, 1, 4), FT_ERR_SHAPE, "rope"); /* table shorter than T */
    REFUSED(ft_head_norm(ctx, &y, qkv, w, w, 3, 1, 4, EPS), FT_ERR_SHAPE, "head_norm");
    REFUSED(ft_swiglu(ctx, &y, a), FT_ERR_SHAPE, "swiglu");
    REFUSED(ft_add(ctx, &y, w, a), FT_ERR_SHAPE, "add");
    REFUSED(ft_add(ctx, &y, a, b), FT_ERR_SHAPE, "add");
    REFUSED(ft_add_inplace(ctx, &y, a, w), FT_ERR_SHAPE, "add_inplace");
    REFUSED(ft_mul(ctx, &y, a, b), FT_ERR_SHAPE, "mul");
    REFUSED(ft_layer_norm(ctx, &y, a, w, b, EPS), FT_ERR_SHAPE, "layer_norm");
    REFUSED(ft_gelu(ctx, &y, NULL), FT_ERR_ARG, "gelu");
    REFUSED(ft_rope_table(ctx, &y, 4, 3, THETA, NULL), FT_ERR_ARG, "ft_rope_table");
    REFUSED(ft_rope_table(ctx, &y, 4, 4, THETA, &scaling), FT_ERR_ARG, "factor");
    REFUSED(ft_fill(i, 0.5, ft_stream_get(ctx, FT_STREAM_COMPUTE)), FT_ERR_ARG, "0.5");
    REFUSED(ft_copy(i, a, ft_stream_get(ctx, FT_STREAM_COMPUTE)), FT_ERR_SHAPE, "int32");
    return FT_OK;
}

static void test_bad_shapes(void **state)
{
    (void)state;
    launch_ok(bad_shapes, NULL);
}

/* ---- fill and copy ---- */

static ft_status fill_and_copy(ft_ctx *ctx, void *user)
{
    ft_stream *stream = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    ft_tensor *wide, *narrow, *back, *index, *other;
    int64_t n = 1003;
    double in[1003], out[1003];
    (void)user;
    for (int64_t i = 0; i < n; i++) in[i] = uniform() * 100;
    FT_TRY(make(ctx, &wide, FT_F32, 1, &n, in));
    FT_TRY(ft_tensor_create(ctx, &narrow, FT_BF16, 1, &n, FT_TAG_ACT));
    FT_TRY(ft_tensor_create(ctx, &back, FT_F32, 1, &n, FT_TAG_ACT));
    FT_TRY(ft_tensor_create(ctx, &index, FT_I32, 1, &n, FT_TAG_ACT));
    FT_TRY(ft_tensor_create(ctx, &other, FT_I32, 1, &n, FT_TAG_ACT));
    FT_TRY(ft_copy(narrow, wide, stream));
    FT_TRY(ft_copy(back, narrow, stream));
    FT_TRY(fetch(back, out));
    for (int64_t i = 0; i < n; i++) CHECK(out[i] == rounded(in[i], FT_BF16), "bf16 of %g", in[i]);
    FT_TRY(ft_copy(back, wide, stream));
    FT_TRY(fetch(back, out));
    for (int64_t i = 0; i < n; i++) CHECK(out[i] == rounded(in[i], FT_F32), "copy of %g", in[i]);
    FT_TRY(ft_fill(narrow, 3.0, stream));
    FT_TRY(ft_fill(index, -100, stream));
    FT_TRY(ft_copy(other, index, stream));
    FT_TRY(fetch(narrow, in));
    FT_TRY(fetch(other, out));
    for (int64_t i = 0; i < n; i++)
        CHECK(in[i] == 3 && out[i] == -100, "fill: %g, %g", in[i], out[i]);
    return FT_OK;
}

static void test_fill_and_copy(void **state)
{
    (void)state;
    launch_ok(fill_and_copy, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_replay),
        cmocka_unit_test(test_replay_beside),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_bad_index),
        cmocka_unit_test(test_bad_shapes),
        cmocka_unit_test(test_fill_and_copy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
