/* test_kernels.c: every device kernel against the CPU kernel of the same row.

   Build and run, on a machine with an NVIDIA GPU:
     nvcc -std=c++17 -O3 -DFT_CUDA -arch=native -I. -c femtotron_kernels.cu -o kernels.o
     cc -std=gnu11 -O2 -DFT_CUDA -I. -I/usr/local/cuda/include tests/gpu/test_kernels.c kernels.o \
        -o test_kernels -L/usr/local/cuda/lib64 -lcudart -lcublasLt -lstdc++ -lm -lpthread
     ./test_kernels [--large] [--short] [--no-bf16-gemm] [--bench] [word]
     word: only the cases whose name contains it; --short: two variants of each op case, for
     sanitizers; --no-bf16-gemm: what multiplies matrices in fp32 alone, since cuBLASLt's bf16
     kernels stop compute-sanitizer's racecheck

   Each case is one program, run by ft_launch on FT_CPU and on FT_GPU from the same bits: forward,
   and backward from a random gradient. Outputs and gradients must agree to a relative L2 distance
   of 1e-5 in fp32 and 1e-2 in bf16, and two runs on the GPU must give the same bits. Variants: all
   inputs ask for a gradient, each one alone, gradients added to what a buffer holds (of the inputs'
   type and fp32), inputs and buffers at odd addresses, and input 0 made on the tape, so that its
   gradient may lie over other tensors. */

#ifndef FT_CUDA
#define FT_CUDA
#endif
#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"

#include <cuda_runtime_api.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static int passed, failed;
static const char *only = "";
static int short_run, no_bf16_gemm;

static void verdict(int good, const char *name, const char *detail)
{
    if (good) passed++;
    else failed++;
    if (!good) printf("FAIL %s: %s\n", name, detail);
    fflush(stdout);
}

/* ---- numbers ---- */

static uint64_t random_state;

static double uniform(void) /* -1 .. 1 */
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(random_state >> 11) / 4503599627370496.0 - 1.0;
}

static double value_of(const void *data, ft_dtype t, int64_t i)
{
    if (t == FT_BF16) return (double)ft_f32_from_bf16(((const uint16_t *)data)[i]);
    if (t == FT_F32) return (double)((const float *)data)[i];
    return (double)((const int32_t *)data)[i];
}

static void value_set(void *data, ft_dtype t, int64_t i, double value)
{
    if (t == FT_BF16) ((uint16_t *)data)[i] = ft_bf16_from_f32((float)value);
    else if (t == FT_F32) ((float *)data)[i] = (float)value;
    else ((int32_t *)data)[i] = (int32_t)value;
}

typedef struct array { /* a tensor's contents on the host */
    char name[24];
    ft_dtype dtype;
    int64_t n;
    void *data;
} array;

static double distance(const array *a, const array *b) /* of b from a, relative */
{
    double d = 0, s = 0;
    if (a->n != b->n || a->dtype != b->dtype) return INFINITY;
    for (int64_t i = 0; i < a->n; i++) {
        double x = value_of(a->data, a->dtype, i), y = value_of(b->data, b->dtype, i);
        if (x == y || (isnan(x) && isnan(y))) { /* infinities too */
            s += isfinite(x) ? x * x : 0;
            continue;
        }
        d += (x - y) * (x - y);
        s += x * x;
    }
    return s > 0 ? sqrt(d / s) : sqrt(d);
}

/* ---- results of a run ---- */

enum { MOST = 12 };
typedef struct results {
    int n;
    array a[MOST];
} results;

static void results_free(results *r)
{
    for (int i = 0; i < r->n; i++) free(r->a[i].data);
    r->n = 0;
}

static ft_status keep(results *r, ft_tensor *t, const char *name)
{
    array *a = &r->a[r->n];
    if (!t) return FT_OK;
    snprintf(a->name, sizeof a->name, "%s", name);
    a->dtype = t->dtype;
    a->n = ft_numel(t);
    a->data = malloc(ft_bytes(t));
    r->n++;
    return ft_download(t, a->data);
}

static void compare(const char *name, const results *cpu, const results *gpu, double limit)
{
    char detail[160] = "different outputs";
    int good = cpu->n == gpu->n;
    for (int i = 0; good && i < cpu->n; i++) {
        double d = distance(&cpu->a[i], &gpu->a[i]);
        if (d < limit) continue;
        snprintf(detail, sizeof detail, "%s is %.2e away (limit %.0e)", cpu->a[i].name, d, limit);
        good = 0;
    }
    verdict(good, name, detail);
}

static void same_bits(const char *name, const results *a, const results *b)
{
    int good = a->n == b->n;
    for (int i = 0; good && i < a->n; i++)
        good = !memcmp(a->a[i].data, b->a[i].data,
                       (size_t)a->a[i].n * ft_dtype_bytes(a->a[i].dtype));
    verdict(good, name, "two runs differ in their bits");
}

/* ---- cases: ops on a tape ---- */

typedef enum op {
    EMBEDDING, RMSNORM, ADD_RMSNORM, ADD_RMSNORM_SUM, ADD_RMSNORM_Y, LINEAR, LINEAR_BIAS, ROPE,
    HEAD_NORM, ATTENTION, SWIGLU, LOSS, LOSS_SCALED, LOSS_READ, ADD, ADD_INPLACE, MUL, SCALE, GELU,
    SILU, SOFTMAX, LAYER_NORM, MEAN
} op;

static const char *const op_names[] = {
    "embedding", "rmsnorm", "add_rmsnorm", "add_rmsnorm (sum)", "add_rmsnorm (y)", "linear",
    "linear + bias", "rope", "head_norm", "attention", "swiglu", "loss", "loss, scaled",
    "loss, read before", "add", "add_inplace", "mul", "scale", "gelu", "silu", "softmax",
    "layer_norm", "mean"
};

typedef struct op_case {
    op op;
    int64_t p[5]; /* see specs() */
} op_case;

static const op_case op_cases[] = {
    /* tokens, V, C, kind: 0 any token, 1 few, 2 mostly one */
    {EMBEDDING, {5, 3, 1, 0, 0}}, {EMBEDDING, {77, 50, 7, 0, 0}},
    {EMBEDDING, {100, 1000, 128, 0, 0}},
    {EMBEDDING, {3000, 100, 24, 2, 0}}, {EMBEDDING, {5000, 40000, 64, 1, 0}},
    {EMBEDDING, {300, 20, 2048, 1, 0}}, {EMBEDDING, {2500, 33, 4097, 2, 0}},
    {EMBEDDING, {1100, 9, 2056, 2, 0}}, {EMBEDDING, {4000, 1, 64, 0, 0}},
    {EMBEDDING, {1500, 2100, 520, 1, 0}}, {EMBEDDING, {3000, 256, 1032, 0, 0}},
    /* rows, C */
    {RMSNORM, {1, 1, 0, 0, 0}}, {RMSNORM, {5, 1, 0, 0, 0}}, {RMSNORM, {7, 3, 0, 0, 0}},
    {RMSNORM, {300, 8, 0, 0, 0}}, {RMSNORM, {9, 127, 0, 0, 0}}, {RMSNORM, {600, 128, 0, 0, 0}},
    {RMSNORM, {2200, 64, 0, 0, 0}}, {RMSNORM, {17, 768, 0, 0, 0}}, {RMSNORM, {19, 1280, 0, 0, 0}},
    {RMSNORM, {2500, 256, 0, 0, 0}}, {RMSNORM, {70, 2048, 0, 0, 0}}, {RMSNORM, {6, 4096, 0, 0, 0}},
    {RMSNORM, {5, 4097, 0, 0, 0}}, {RMSNORM, {3, 8192, 0, 0, 0}}, {RMSNORM, {3, 8200, 0, 0, 0}},
    /* several rows for each group of threads in backward */
    {RMSNORM, {5000, 768, 0, 0, 0}}, {RMSNORM, {2500, 2048, 0, 0, 0}},
    {RMSNORM, {1300, 4096, 0, 0, 0}}, {RMSNORM, {600, 8192, 0, 0, 0}},
    {RMSNORM, {300, 16384, 0, 0, 0}}, {RMSNORM, {70000, 64, 0, 0, 0}},
    {ADD_RMSNORM, {2500, 2048, 0, 0, 0}}, {ADD_RMSNORM, {600, 8192, 0, 0, 0}},
    {ADD_RMSNORM, {7, 3, 0, 0, 0}}, {ADD_RMSNORM, {600, 128, 0, 0, 0}},
    {ADD_RMSNORM, {70, 2048, 0, 0, 0}}, {ADD_RMSNORM, {5, 4097, 0, 0, 0}},
    {ADD_RMSNORM, {3, 16384, 0, 0, 0}}, {ADD_RMSNORM_SUM, {7, 3, 0, 0, 0}},
    {ADD_RMSNORM_SUM, {70, 2048, 0, 0, 0}}, {ADD_RMSNORM_Y, {9, 127, 0, 0, 0}},
    {ADD_RMSNORM_Y, {70, 768, 0, 0, 0}},
    /* rows, in, out */
    {LINEAR, {7, 5, 3, 0, 0}}, {LINEAR, {64, 128, 96, 0, 0}}, {LINEAR, {33, 127, 65, 0, 0}},
    {LINEAR_BIAS, {7, 5, 3, 0, 0}}, {LINEAR_BIAS, {300, 64, 136, 0, 0}},
    {LINEAR_BIAS, {129, 40, 1, 0, 0}},
    /* B, T, H, K, D */
    {ROPE, {1, 5, 2, 1, 2}}, {ROPE, {2, 7, 3, 1, 6}}, {ROPE, {2, 33, 4, 2, 64}},
    {ROPE, {1, 20, 8, 8, 80}}, {ROPE, {1, 9, 32, 8, 128}}, {ROPE, {1, 3, 1, 1, 1024}},
    {ROPE, {1, 6, 80, 2, 256}}, {HEAD_NORM, {2, 4000, 8, 2, 64}},
    {HEAD_NORM, {1, 5, 2, 1, 3}}, {HEAD_NORM, {2, 33, 4, 2, 64}}, {HEAD_NORM, {1, 40, 3, 3, 80}},
    {HEAD_NORM, {1, 300, 5, 1, 128}}, {HEAD_NORM, {1, 3, 2, 1, 2048}},
    {HEAD_NORM, {1, 3, 1, 1, 4096}}, {HEAD_NORM, {1, 9, 2, 2, 127}},
    {ATTENTION, {1, 5, 2, 1, 8}}, {ATTENTION, {2, 67, 4, 2, 64}}, {ATTENTION, {1, 130, 3, 3, 80}},
    {ATTENTION, {1, 200, 4, 1, 128}}, {ATTENTION, {1, 257, 2, 2, 64}},
    {ATTENTION, {1, 1, 1, 1, 32}},
    /* rows, F */
    {SWIGLU, {1, 3, 0, 0, 0}}, {SWIGLU, {3, 1, 0, 0, 0}}, {SWIGLU, {7, 3, 0, 0, 0}},
    {SWIGLU, {33, 128, 0, 0, 0}}, {SWIGLU, {20, 8192, 0, 0, 0}}, {SWIGLU, {9, 4097, 0, 0, 0}},
    {SWIGLU, {300, 24, 0, 0, 0}}, {SWIGLU, {1, 4097, 0, 0, 0}},
    /* rows, C, V, chunk */
    {LOSS, {7, 8, 11, 0, 0}}, {LOSS, {40, 32, 1000, 16, 0}}, {LOSS, {33, 24, 5003, 10, 0}},
    {LOSS, {6, 16, 33000, 4, 0}}, {LOSS_SCALED, {40, 32, 1000, 16, 0}},
    {LOSS_READ, {40, 32, 1001, 16, 0}},
    /* shape of a, trailing dimensions of b: 3 (all), 2, 1 */
    {ADD, {2, 5, 7, 3, 0}}, {ADD, {2, 5, 7, 2, 0}}, {ADD, {3, 50, 128, 1, 0}},
    {ADD, {3, 70, 2048, 1, 0}}, {ADD, {1, 300, 1, 1, 0}}, {ADD, {5, 40, 127, 1, 0}},
    {ADD_INPLACE, {2, 5, 7, 3, 0}}, {ADD_INPLACE, {2, 50, 128, 3, 0}},
    {MUL, {2, 5, 7, 3, 0}}, {MUL, {2, 5, 7, 2, 0}}, {MUL, {3, 50, 128, 1, 0}},
    {MUL, {5, 40, 127, 1, 0}}, {MUL, {2, 40, 768, 3, 0}},
    {SCALE, {1, 1, 0, 0, 0}}, {SCALE, {7, 127, 0, 0, 0}}, {SCALE, {33, 4097, 0, 0, 0}},
    {GELU, {1, 3, 0, 0, 0}}, {GELU, {33, 4097, 0, 0, 0}}, {SILU, {1, 3, 0, 0, 0}},
    {SILU, {33, 4097, 0, 0, 0}},
    {SOFTMAX, {5, 1, 0, 0, 0}}, {SOFTMAX, {7, 127, 0, 0, 0}}, {SOFTMAX, {20, 4097, 0, 0, 0}},
    {SOFTMAX, {300, 64, 0, 0, 0}}, {SOFTMAX, {3, 32768, 0, 0, 0}},
    {LAYER_NORM, {7, 3, 0, 0, 0}}, {LAYER_NORM, {600, 128, 0, 0, 0}},
    {LAYER_NORM, {17, 768, 0, 0, 0}}, {LAYER_NORM, {5, 4097, 0, 0, 0}},
    {MEAN, {1, 1, 0, 0, 0}}, {MEAN, {7, 1000, 0, 0, 0}}, {MEAN, {1, 1000003, 0, 0, 0}}
};

typedef enum kind { FLOATS = 0, TOKENS, FEW_TOKENS, ONE_TOKEN, LABELS, SCALAR } kind;

typedef struct spec { /* an input */
    kind kind;
    int ndim;
    int64_t shape[4], limit;
} spec;

static spec floats(int ndim, int64_t a, int64_t b, int64_t c)
{
    spec s;
    memset(&s, 0, sizeof s);
    s.ndim = ndim;
    s.shape[0] = a;
    s.shape[1] = b;
    s.shape[2] = c;
    return s;
}

static spec indices(kind k, int64_t n, int64_t limit)
{
    spec s = floats(1, n, 0, 0);
    s.kind = k;
    s.limit = limit;
    return s;
}

/* What goes in; returns how many. */
static int specs(const op_case *c, spec *in)
{
    const int64_t *p = c->p;
    switch (c->op) {
    case EMBEDDING:
        in[0] = indices(p[3] == 0 ? TOKENS : p[3] == 1 ? FEW_TOKENS : ONE_TOKEN, p[0], p[1]);
        in[1] = floats(2, p[1], p[2], 0);
        return 2;
    case RMSNORM:
        in[0] = floats(2, p[0], p[1], 0);
        in[1] = floats(1, p[1], 0, 0);
        return 2;
    case ADD_RMSNORM: case ADD_RMSNORM_SUM: case ADD_RMSNORM_Y:
        in[0] = in[1] = floats(2, p[0], p[1], 0);
        in[2] = floats(1, p[1], 0, 0);
        return 3;
    case LINEAR: case LINEAR_BIAS:
        in[0] = floats(2, p[0], p[1], 0);
        in[1] = floats(2, p[2], p[1], 0);
        in[2] = floats(1, p[2], 0, 0);
        return c->op == LINEAR ? 2 : 3;
    case ROPE: case HEAD_NORM: case ATTENTION:
        in[0] = floats(3, p[0], p[1], (p[2] + 2 * p[3]) * p[4]);
        in[1] = in[2] = floats(1, p[4], 0, 0);
        return c->op == HEAD_NORM ? 3 : 1;
    case SWIGLU:
        in[0] = floats(2, p[0], 2 * p[1], 0);
        return 1;
    case LOSS: case LOSS_SCALED: case LOSS_READ:
        in[0] = floats(2, p[0], p[1], 0);
        in[1] = floats(2, p[2], p[1], 0);
        in[2] = indices(LABELS, p[0], p[2]);
        in[3] = indices(SCALAR, 1, 0);
        return c->op == LOSS_SCALED ? 4 : 3;
    case ADD: case ADD_INPLACE: case MUL:
        in[0] = floats(3, p[0], p[1], p[2]);
        in[1] = p[3] == 3 ? in[0] : p[3] == 2 ? floats(2, p[1], p[2], 0) : floats(1, p[2], 0, 0);
        return 2;
    case LAYER_NORM:
        in[0] = floats(2, p[0], p[1], 0);
        in[1] = in[2] = floats(1, p[1], 0, 0);
        return 3;
    default:
        in[0] = floats(2, p[0], p[1], 0);
        return 1;
    }
}

static ft_status apply(const op_case *c, ft_ctx *ctx, ft_tensor **in, ft_tensor **root,
                       ft_tensor **second)
{
    const int64_t *p = c->p;
    ft_tensor *a, *b;
    *second = NULL;
    switch (c->op) {
    case EMBEDDING: return ft_embedding(ctx, root, in[0], in[1]);
    case RMSNORM: /* of one element the gradient is the difference of equals, but for eps */
        return ft_rmsnorm(ctx, root, in[0], in[1], p[1] == 1 ? 0.5 : 1e-5);
    case ADD_RMSNORM: case ADD_RMSNORM_SUM: case ADD_RMSNORM_Y:
        FT_TRY(ft_add_rmsnorm(ctx, &a, &b, in[0], in[1], in[2], 1e-5));
        if (c->op == ADD_RMSNORM_SUM) *root = a;
        else if (c->op == ADD_RMSNORM_Y) *root = b;
        else {
            FT_TRY(ft_mul(ctx, root, a, b));
            *second = a;
            ft_tensor_free(b);
            return FT_OK;
        }
        ft_tensor_free(*root == a ? b : a);
        return FT_OK;
    case LINEAR: return ft_linear(ctx, root, in[0], in[1], NULL);
    case LINEAR_BIAS: return ft_linear(ctx, root, in[0], in[1], in[2]);
    case ROPE:
        FT_TRY(ft_rope_table(ctx, &a, p[1] + 3, p[4], 10000.0, NULL));
        FT_TRY(ft_rope(ctx, root, in[0], a, p[2], p[3], p[4]));
        ft_tensor_free(a);
        return FT_OK;
    case HEAD_NORM:
        return ft_head_norm(ctx, root, in[0], in[1], in[2], p[2], p[3], p[4], 1e-5);
    case ATTENTION: return ft_attention(ctx, root, in[0], p[2], p[3], p[4]);
    case SWIGLU: return ft_swiglu(ctx, root, in[0]);
    case LOSS: return ft_linear_cross_entropy(ctx, root, in[0], in[1], in[2], NULL, p[3]);
    case LOSS_SCALED:
        return ft_linear_cross_entropy(ctx, root, in[0], in[1], in[2], in[3], p[3]);
    case LOSS_READ: {
        float loss;
        FT_TRY(ft_linear_cross_entropy(ctx, root, in[0], in[1], in[2], NULL, p[3]));
        return ft_download(*root, &loss);
    }
    case ADD: return ft_add(ctx, root, in[0], in[1]);
    case ADD_INPLACE: return ft_add_inplace(ctx, root, in[0], in[1]);
    case MUL: return ft_mul(ctx, root, in[0], in[1]);
    case SCALE: return ft_scale(ctx, root, in[0], -1.75);
    case GELU: return ft_gelu(ctx, root, in[0]);
    case SILU: return ft_silu(ctx, root, in[0]);
    case SOFTMAX: return ft_softmax(ctx, root, in[0]);
    case LAYER_NORM: return ft_layer_norm(ctx, root, in[0], in[1], in[2], 1e-5);
    case MEAN: return ft_mean(ctx, root, in[0]);
    }
    return FT_OK;
}

/* ---- one run of a case ---- */

typedef enum variant {
    ALL = 0, ADDS, ADDS_F32, ODD, VALUES, FIRST, SECOND, THIRD, VARIANTS
} variant;

static const char *const variant_names[] = {
    "all", "adds", "adds in fp32", "odd addresses", "values", "only 0", "only 1", "only 2"
};

typedef struct run {
    const op_case *c;
    variant variant;
    ft_dtype dtype;
    ft_tensor *buffer[4]; /* where gradients are added */
    results got;
} run;

static ft_status into_buffer(void *user, ft_tensor *param, ft_tensor **grad, int *accumulate)
{
    (void)param;
    *grad = (ft_tensor *)user;
    *accumulate = 1;
    return FT_OK;
}

static double fresh_value(const spec *s, ft_dtype t)
{
    double u = uniform(), x = (u + 1) / 2;
    int64_t i = (int64_t)(x * (double)s->limit);
    if (i >= s->limit) i = s->limit - 1;
    switch (s->kind) {
    case TOKENS: return (double)i;
    case FEW_TOKENS: return (double)(i % 7 == 0 ? i : i % 5);
    case ONE_TOKEN: return (double)(i % 16 == 0 ? i : s->limit / 2);
    case LABELS: return x < 0.2 ? -100.0 : (double)i;
    case SCALAR: return 0.375;
    case FLOATS: break;
    }
    (void)t;
    return u;
}

/* A tensor of random values, the same for every device; at an odd address if `offset`. */
static ft_status fresh(ft_ctx *ctx, ft_tensor **out, const spec *s, ft_dtype t, int64_t offset)
{
    int64_t n = 1, whole;
    ft_tensor *base;
    if (s->kind != FLOATS) t = s->kind == SCALAR ? FT_F32 : FT_I32;
    for (int i = 0; i < s->ndim; i++) n *= s->shape[i];
    whole = n + offset;
    void *host = calloc((size_t)whole, ft_dtype_bytes(t));
    for (int64_t i = 0; i < n; i++) value_set(host, t, offset + i, fresh_value(s, t));
    ft_status status;
    if (offset) {
        FT_TRY(ft_tensor_create(ctx, &base, t, 1, &whole, FT_TAG_PARAM));
        status = ft_upload(base, host);
        if (status == FT_OK) status = ft_tensor_view(base, out, offset, s->ndim, s->shape);
    } else {
        status = ft_tensor_create(ctx, out, t, s->ndim, s->shape, FT_TAG_PARAM);
        if (status == FT_OK) status = ft_upload(*out, host);
    }
    free(host);
    return status;
}

static ft_status run_inputs(ft_ctx *ctx, run *r, const spec *s, int n, ft_tensor **leaf)
{
    int odd = r->variant == ODD, adds = odd || r->variant == ADDS || r->variant == ADDS_F32;
    for (int i = 0; i < n; i++) {
        FT_TRY(fresh(ctx, &leaf[i], &s[i], r->dtype, odd ? 1 + 2 * i : 0));
        r->buffer[i] = NULL;
        if (s[i].kind != FLOATS) continue;
        leaf[i]->requires_grad = r->variant < FIRST || (int)r->variant - FIRST == i;
        if (!adds) continue;
        FT_TRY(fresh(ctx, &r->buffer[i], &s[i], r->variant == ADDS_F32 ? FT_F32 : r->dtype,
                     odd ? 3 : 0));
        leaf[i]->sink.get = into_buffer;
        leaf[i]->sink.user = r->buffer[i];
    }
    return FT_OK;
}

static ft_status run_rank(ft_ctx *ctx, void *user)
{
    static const char *const grads[] = {"grad 0", "grad 1", "grad 2", "grad 3"};
    run *r = (run *)user;
    const op_case *c = r->c;
    spec s[4];
    ft_tensor *leaf[4], *in[4], *root, *second, *droot;
    ft_tape *tape;
    int n = specs(c, s), inplace = c->op == ROPE || c->op == ADD_INPLACE;
    random_state = (uint64_t)(c->op * 1000 + (int)r->variant) + 1;
    FT_TRY(run_inputs(ctx, r, s, n, leaf));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    for (int i = 0; i < n; i++) in[i] = leaf[i];
    if (inplace || (r->variant == VALUES && s[0].kind == FLOATS))
        FT_TRY(ft_scale(ctx, &in[0], leaf[0], 1.0));
    FT_TRY(apply(c, ctx, in, &root, &second));
    if (in[0] != leaf[0] && !inplace) ft_tensor_free(in[0]);
    FT_TRY(ft_tape_end(tape));
    if (c->op < LOSS || c->op > LOSS_READ) FT_TRY(keep(&r->got, root, "output"));
    FT_TRY(keep(&r->got, second, "output 2"));
    if (second) ft_tensor_free(second);
    spec like = floats(root->ndim, root->shape[0], root->shape[1], root->shape[2]);
    FT_TRY(fresh(ctx, &droot, &like, root->dtype, 0));
    if (!root->requires_grad) return ft_tape_reset(tape);
    FT_TRY(ft_backward(tape, root, droot));
    if (c->op >= LOSS && c->op <= LOSS_READ) FT_TRY(keep(&r->got, root, "loss"));
    for (int i = 0; i < n; i++)
        FT_TRY(keep(&r->got, r->buffer[i] && leaf[i]->requires_grad ? r->buffer[i] : leaf[i]->grad,
                    grads[i]));
    return FT_OK;
}

static int run_on(ft_device device, run *r, const char *name)
{
    ft_config config = ft_config_default();
    config.device = device;
    memset(&r->got, 0, sizeof r->got);
    if (ft_launch(&config, run_rank, r) == FT_OK) return 1;
    verdict(0, name, ft_last_error());
    return 0;
}

static void case_name(char *name, size_t bytes, const run *r)
{
    const int64_t *p = r->c->p;
    snprintf(name, bytes, "%s %lld,%lld,%lld,%lld,%lld %s, %s", op_names[r->c->op], (long long)p[0],
             (long long)p[1], (long long)p[2], (long long)p[3], (long long)p[4],
             ft_dtype_name(r->dtype), variant_names[r->variant]);
}

static int multiplies(op o)
{
    return o == LINEAR || o == LINEAR_BIAS || (o >= LOSS && o <= LOSS_READ);
}

static void test_case(const op_case *c, variant v, ft_dtype dtype)
{
    run cpu, gpu, again;
    char name[160];
    spec s[4];
    int n = specs(c, s);
    memset(&cpu, 0, sizeof cpu);
    cpu.c = c;
    cpu.variant = v;
    cpu.dtype = dtype;
    if (v >= FIRST && ((int)v - FIRST >= n || s[v - FIRST].kind != FLOATS)) return;
    gpu = again = cpu;
    case_name(name, sizeof name, &cpu);
    if (!strstr(name, only)) return;
    const ft_dtype all = no_bf16_gemm && multiplies(c->op) ? FT_F32 : FT_BF16; /* of variant ALL */
    if (all == FT_F32 && dtype != FT_F32) return;
    if (short_run && !(v == ALL && dtype == all) && !(v == ODD && dtype == FT_F32)) return;
    if (run_on(FT_CPU, &cpu, name) && run_on(FT_GPU, &gpu, name)) {
        compare(name, &cpu.got, &gpu.got, dtype == FT_F32 ? 1e-5 : 1e-2);
        if (v == ALL && run_on(FT_GPU, &again, name)) same_bits(name, &gpu.got, &again.got);
    }
    results_free(&cpu.got);
    results_free(&gpu.got);
    results_free(&again.got);
}

static void test_ops(void)
{
    for (int i = 0; i < COUNT(op_cases); i++) {
        int before = failed;
        for (int v = 0; v < VARIANTS; v++)
            for (int t = 0; t < 2; t++) test_case(&op_cases[i], (variant)v, t ? FT_BF16 : FT_F32);
        if (failed == before && !*only)
            printf("ok   %s %lld,%lld,%lld,%lld,%lld\n", op_names[op_cases[i].op],
                   (long long)op_cases[i].p[0], (long long)op_cases[i].p[1],
                   (long long)op_cases[i].p[2], (long long)op_cases[i].p[3],
                   (long long)op_cases[i].p[4]);
    }
}

/* ---- rows without a tape: by ft_op_run into tensors that exist ---- */

typedef struct row_run {
    const char *name;
    const ft_op *row;
    spec in[4], out[4];
    ft_dtype in_dtype[4], out_dtype[4];
    int absent[4];     /* inputs that are not given */
    double fixed[4];   /* inputs and outputs filled with one value instead: not 0 */
    double out_fixed[4];
    ft_attr attr;
    int64_t offset;
    results got;
} row_run;

static ft_status filled(ft_ctx *ctx, ft_tensor **t, const spec *s, ft_dtype dtype, int64_t offset,
                        double fixed)
{
    spec of = *s;
    if (dtype == FT_I32 && of.kind == FLOATS) of.kind = TOKENS;
    FT_TRY(fresh(ctx, t, &of, dtype, offset));
    return fixed != 0 ? ft_fill(*t, fixed, ft_stream_get(ctx, FT_STREAM_COMPUTE)) : FT_OK;
}

static ft_status row_rank(ft_ctx *ctx, void *user)
{
    static const char *const outs[] = {"out 0", "out 1", "out 2", "out 3"};
    row_run *r = (row_run *)user;
    ft_tensor *in[4], *out[4];
    random_state = 7;
    for (int i = 0; i < r->row->n_in; i++) {
        in[i] = NULL;
        if (!r->absent[i])
            FT_TRY(filled(ctx, &in[i], &r->in[i], r->in_dtype[i], r->offset, r->fixed[i]));
    }
    for (int i = 0; i < r->row->n_out; i++)
        FT_TRY(filled(ctx, &out[i], &r->out[i], r->out_dtype[i], r->offset, r->out_fixed[i]));
    FT_TRY(ft_op_register(ctx, r->row));
    FT_TRY(ft_op_run(ft_stream_get(ctx, FT_STREAM_COMPUTE), r->row, in, out, &r->attr));
    for (int i = 0; i < r->row->n_out; i++) FT_TRY(keep(&r->got, out[i], outs[i]));
    return FT_OK;
}

static int row_on(ft_device device, row_run *r)
{
    ft_config config = ft_config_default();
    config.device = device;
    memset(&r->got, 0, sizeof r->got);
    if (ft_launch(&config, row_rank, r) == FT_OK) return 1;
    verdict(0, r->name, ft_last_error());
    return 0;
}

static void test_row(const row_run *r, double limit)
{
    row_run cpu = *r, gpu = *r, again = *r;
    if (!strstr(r->name, only)) return;
    if (row_on(FT_CPU, &cpu) && row_on(FT_GPU, &gpu) && row_on(FT_GPU, &again)) {
        compare(r->name, &cpu.got, &gpu.got, limit);
        same_bits(r->name, &gpu.got, &again.got);
    }
    results_free(&cpu.got);
    results_free(&gpu.got);
    results_free(&again.got);
}

static row_run row_of(const char *name, const ft_op *row)
{
    row_run r;
    memset(&r, 0, sizeof r);
    r.name = name;
    r.row = row;
    return r;
}

static void test_moves(void)
{
    static const int64_t sizes[] = {1, 3, 127, 128, 4097, 100003};
    for (int k = 0; k < COUNT(sizes) * 2; k++)
        for (int a = 0; a < 3; a++)
            for (int b = 0; b < 3; b++) {
                row_run r = row_of("copy", &ft__op_copy);
                r.in[0] = r.in[1] = r.out[0] = floats(1, sizes[k / 2], 0, 0);
                r.in[0].limit = r.out[0].limit = 1000;
                r.offset = k % 2;
                r.in_dtype[0] = (ft_dtype)a;
                r.out_dtype[0] = (ft_dtype)b;
                if ((a == FT_I32) == (b == FT_I32)) test_row(&r, 1e-7);
                r.name = "fill";
                r.row = &ft__op_fill;
                r.in_dtype[0] = r.out_dtype[0];
                r.attr.f[0] = 3.0;
                test_row(&r, 1e-7);
            }
}

/* ft_accumulate: its output is its second input. */
static ft_status accumulate_rank(ft_ctx *ctx, void *user)
{
    row_run *r = (row_run *)user;
    ft_tensor *from, *to;
    random_state = 9;
    FT_TRY(fresh(ctx, &from, &r->in[0], r->in_dtype[0], r->offset));
    FT_TRY(fresh(ctx, &to, &r->in[0], r->out_dtype[0], 0));
    FT_TRY(ft_accumulate(to, from, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    return keep(&r->got, to, "sum");
}

static void test_accumulate(void)
{
    static const int64_t sizes[] = {1, 3, 127, 128, 4097, 100003};
    if (!strstr("accumulate", only)) return;
    for (int k = 0; k < COUNT(sizes) * 8; k++) {
        row_run cpu = row_of("accumulate", NULL), gpu;
        ft_config config = ft_config_default();
        cpu.in[0] = floats(1, sizes[k / 8], 0, 0);
        cpu.in_dtype[0] = k & 1 ? FT_BF16 : FT_F32;
        cpu.out_dtype[0] = k & 2 ? FT_BF16 : FT_F32;
        cpu.offset = k & 4 ? 1 : 0;
        gpu = cpu;
        ft_status status = ft_launch(&config, accumulate_rank, &cpu);
        config.device = FT_GPU;
        if (status == FT_OK) status = ft_launch(&config, accumulate_rank, &gpu);
        if (status != FT_OK) verdict(0, "accumulate", ft_last_error());
        else compare("accumulate", &cpu.got, &gpu.got, 1e-7);
        results_free(&cpu.got);
        results_free(&gpu.got);
    }
}

static void test_zero_scalars(void)
{
    static const int64_t sizes[] = {1, 5, 4096, 100003, 5000000};
    for (int k = 0; k < COUNT(sizes) * 4; k++) {
        row_run r = row_of("zero sum of squares", &ft__zero_rows[FT__ROW_SUMSQ]);
        r.in[0] = floats(1, sizes[k / 4], 0, 0);
        r.in_dtype[0] = k & 1 ? FT_BF16 : FT_F32;
        r.offset = k & 2 ? 1 : 0;
        r.out[0] = floats(1, 4, 0, 0);
        r.attr.i[0] = 2;
        r.attr.i[1] = sizes[k / 4];
        test_row(&r, 1e-6);
    }
    for (int k = 0; k < 8; k++) {
        row_run r = row_of("zero control", &ft__zero_rows[FT__ROW_CONTROL]);
        r.in[0] = floats(1, k & 1 ? 2 : 16, 0, 0);
        r.fixed[0] = k & 4 ? INFINITY : 2.5;
        r.out[0] = floats(1, 4, 0, 0);
        r.out[1] = floats(1, 2, 0, 0);
        r.out[1].limit = 50;
        r.out_dtype[1] = FT_I32;
        r.attr.f[0] = k & 2 ? 1.0 : 0;
        if (k & 4) r.fixed[0] = 3e38; /* its squares' sum is infinite only if there are several */
        test_row(&r, 1e-6);
    }
    row_run r = row_of("zero local scalars", &ft__zero_rows[FT__ROW_LOCAL]);
    r.in[0] = floats(1, 1000, 0, 0);
    r.in[1] = floats(1, 1, 0, 0);
    r.fixed[0] = 0.3;
    r.out[0] = floats(1, 2, 0, 0);
    r.attr.f[0] = 1;
    test_row(&r, 1e-6);
    r = row_of("zero loss scale", &ft__zero_rows[FT__ROW_SCALE]);
    r.in[0] = floats(1, 8, 0, 0);
    r.in[0].limit = 100;
    r.in_dtype[0] = FT_I32;
    r.out[0] = floats(1, 1, 0, 0);
    test_row(&r, 1e-6);
}

/* k: sizes, gradient and weight types, an odd address, and whether the update is skipped. */
static void test_optimizer(const char *name, const ft_zero_optimizer *o)
{
    static const int64_t sizes[] = {1, 7, 4096, 100003};
    for (int k = 0; k < COUNT(sizes) * 16; k++) {
        ft_op row = ft_op_default();
        int master = k >> 1 & 1;
        row.name = name;
        row.n_in = 3;
        row.n_out = 1 + o->n_state + master;
        row.infer = ft__zero_infer;
        row.forward = ft__zero_update_run;
        row.gpu.forward = o->gpu;
        row_run r = row_of(name, &row);
        for (int i = 0; i < 4; i++) {
            r.in[i] = r.out[i] = floats(1, sizes[k / 16], 0, 0);
            r.out_fixed[i] = 0;
        }
        r.in_dtype[0] = k & 1 ? FT_BF16 : FT_F32;
        r.in[1] = floats(1, 4, 0, 0);
        r.fixed[1] = k & 8 ? 1e-30 : 0.5;
        r.in[2] = floats(1, 1, 0, 0);
        r.in_dtype[2] = FT_I32;
        r.in[2].limit = 1;
        r.fixed[2] = 3;
        r.out_dtype[0] = master ? FT_BF16 : FT_F32;
        for (int s = 0; s < o->n_state; s++) r.out_fixed[1 + s] = 0.25;
        r.offset = k & 4 ? 1 : 0;
        r.attr.f[0] = 1e-2;
        r.attr.f[1] = 0.1;
        r.attr.user = o;
        test_row(&r, master ? 5e-5 : 2e-6); /* a rounding that falls the other way */
    }
}

/* control[2] == 0: nothing changes */
static ft_status skip_rank(ft_ctx *ctx, void *user)
{
    const ft_zero_optimizer *o = (const ft_zero_optimizer *)user;
    ft_stream *stream = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    int64_t n = 1000, four = 4, one = 1;
    ft_tensor *in[3], *out[3];
    ft_op row = ft_op_default();
    ft_attr attr;
    float weights[1000];
    memset(&attr, 0, sizeof attr);
    row.name = "skip";
    row.n_in = 3;
    row.n_out = 1 + o->n_state;
    row.infer = ft__zero_infer;
    row.gpu.forward = o->gpu;
    attr.f[0] = 1;
    attr.user = o;
    FT_TRY(ft_tensor_create(ctx, &in[0], FT_F32, 1, &n, FT_TAG_PARAM));
    FT_TRY(ft_tensor_create(ctx, &in[1], FT_F32, 1, &four, FT_TAG_PARAM));
    FT_TRY(ft_tensor_create(ctx, &in[2], FT_I32, 1, &one, FT_TAG_PARAM));
    FT_TRY(ft_fill(in[0], 1, stream));
    FT_TRY(ft_fill(in[1], 0, stream));
    FT_TRY(ft_fill(in[2], 1, stream));
    for (int i = 0; i < row.n_out; i++) {
        FT_TRY(ft_tensor_create(ctx, &out[i], FT_F32, 1, &n, FT_TAG_PARAM));
        FT_TRY(ft_fill(out[i], 0.5, stream));
    }
    FT_TRY(ft_op_register(ctx, &row));
    FT_TRY(ft_op_run(stream, &row, in, out, &attr));
    FT_TRY(ft_download(out[0], weights));
    for (int i = 0; i < 1000; i++)
        if (weights[i] != 0.5f) return ft_error(FT_ERR_DATA, "weight %d changed", i);
    return FT_OK;
}

static void test_optimizers(void)
{
    ft_zero_optimizer adamw = ft_zero_adamw(0.9, 0.95, 1e-8), sgd = ft_zero_sgd(0, 0);
    ft_zero_optimizer momentum = ft_zero_sgd(0.9, 0), nesterov = ft_zero_sgd(0.9, 1);
    ft_config config = ft_config_default();
    test_optimizer("adamw", &adamw);
    test_optimizer("sgd", &sgd);
    test_optimizer("sgd, momentum", &momentum);
    test_optimizer("sgd, nesterov", &nesterov);
    config.device = FT_GPU;
    if (!strstr("skipped update", only)) return;
    ft_status status = ft_launch(&config, skip_rank, &adamw);
    if (status == FT_OK) status = ft_launch(&config, skip_rank, &momentum);
    verdict(status == FT_OK, "skipped update", ft_last_error());
}

static void test_tp_bias(ft_dtype t, int64_t n, int64_t o, int add, int64_t offset)
{
    double limit = t == FT_F32 ? 1e-5 : 1e-2;
    row_run r = row_of("tp_bias", &ft__tp_op_bias);
    r.in[0] = floats(1, o, 0, 0);
    r.out[0] = floats(2, n, o, 0);
    r.in_dtype[0] = r.out_dtype[0] = t;
    r.attr.i[0] = add;
    r.offset = offset;
    test_row(&r, limit);
    r.name = "tp_bias_grad";
    r.row = &ft__tp_op_bias_grad;
    r.in[0] = floats(2, n, o, 0);
    r.out[0] = floats(1, o, 0, 0);
    test_row(&r, limit);
    r.out_dtype[0] = FT_F32;
    test_row(&r, limit);
}

static void test_tp_lookup(ft_dtype t, int64_t n, int64_t V, int64_t C, kind k, int add)
{
    double limit = t == FT_F32 ? 1e-5 : 1e-2;
    int64_t rows = V / 2 + 1, first = V - V / 2; /* the last row is padding */
    row_run r = row_of("tp_lookup", &ft__tp_op_lookup);
    r.in[0] = indices(k, n, V);
    r.in_dtype[0] = FT_I32;
    r.in[1] = floats(2, rows, C, 0);
    r.out[0] = floats(2, n, C, 0);
    r.in_dtype[1] = r.out_dtype[0] = t;
    r.attr.i[0] = first;
    r.attr.i[1] = V;
    test_row(&r, limit);
    r.absent[1] = 1;
    test_row(&r, limit);
    r = row_of("tp_lookup_grad", &ft__tp_op_lookup_grad);
    r.in[0] = indices(k, n, V);
    r.in_dtype[0] = FT_I32;
    r.in[1] = floats(2, n, C, 0);
    r.out[0] = floats(2, rows, C, 0);
    r.in_dtype[1] = t;
    r.out_dtype[0] = add ? FT_F32 : t;
    r.attr.i[0] = first;
    r.attr.i[1] = V;
    r.attr.i[2] = add;
    test_row(&r, limit);
}

/* The five kernels of a pass over one chunk, with the statistics of two ranks; by hand, because
   each reads what the one before it made. */
typedef struct tp_loss_run {
    ft_dtype t;
    int64_t rows;
    results got;
} tp_loss_run;

static ft_status tp_loss_rank(ft_ctx *ctx, void *user)
{
    tp_loss_run *r = (tp_loss_run *)user;
    ft_stream *stream = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    const int64_t c = 20, V = 2 * r->rows;
    spec labels_s = indices(LABELS, 30, V), z_s = floats(2, c, r->rows, 0);
    spec sums_s = indices(TOKENS, FT__TP_SUMS_ELEMS, 1), stats_s = floats(3, 2, c, 3);
    spec one = floats(1, 1, 0, 0);
    ft_tensor *labels, *z[2], *sums, *stats, *own[2], *in[3], *loss, *dloss;
    const ft_op *rows[] = {&ft__tp_op_loss_begin, &ft__tp_op_loss_stats, &ft__tp_op_loss_add,
                           &ft__tp_op_loss_grad, &ft__tp_op_loss_end};
    ft_attr begin, attr;
    random_state = 5;
    for (int i = 0; i < COUNT(rows); i++) FT_TRY(ft_op_register(ctx, rows[i]));
    memset(&begin, 0, sizeof begin);
    memset(&attr, 0, sizeof attr);
    begin.i[0] = V;
    attr.i[0] = 3;  /* tokens 3..12 of each run of 15: two runs */
    attr.i[1] = 10;
    attr.i[2] = 15;
    FT_TRY(fresh(ctx, &labels, &labels_s, FT_I32, 0));
    FT_TRY(fresh(ctx, &sums, &sums_s, FT_I32, 0));
    FT_TRY(fresh(ctx, &stats, &stats_s, FT_F32, 0));
    FT_TRY(fresh(ctx, &loss, &one, FT_F32, 0));
    FT_TRY(fresh(ctx, &dloss, &one, FT_F32, 0));
    in[0] = labels;
    in[1] = NULL;
    in[2] = dloss;
    FT_TRY(ft_op_run(stream, rows[0], in, &sums, &begin));
    for (int k = 0; k < 2; k++) {
        FT_TRY(fresh(ctx, &z[k], &z_s, r->t, 0));
        FT_TRY(ft_tensor_view(stats, &own[k], k * c * 3, 2, &stats_s.shape[1]));
        attr.i[3] = k * r->rows;
        in[1] = z[k];
        FT_TRY(ft_op_run(stream, rows[1], in, &own[k], &attr));
    }
    FT_TRY(keep(&r->got, stats, "stats"));
    in[1] = stats;
    in[2] = sums;
    FT_TRY(ft_op_run(stream, rows[2], in, &sums, &attr));
    for (int k = 0; k < 2; k++) {
        attr.i[3] = k * r->rows;
        FT_TRY(ft_op_run(stream, rows[3], in, &z[k], &attr));
        FT_TRY(keep(&r->got, z[k], k ? "dz 1" : "dz 0"));
    }
    FT_TRY(ft_op_run(stream, rows[4], &sums, &loss, NULL));
    return keep(&r->got, loss, "loss");
}

static void test_tp(void)
{
    static const int64_t sizes[] = {1, 3, 127, 128, 2048, 4097};
    static const int64_t vocabularies[] = {11, 128, 5003, 17000};
    for (int t = 0; t < 2; t++) {
        ft_dtype dtype = t ? FT_BF16 : FT_F32;
        for (int i = 0; i < COUNT(sizes); i++)
            for (int k = 0; k < 4; k++) {
                test_tp_bias(dtype, 5, sizes[i], k & 1, k >> 1);
                test_tp_bias(dtype, 700, sizes[i], k & 1, k >> 1);
            }
        for (int add = 0; add < 2; add++) {
            test_tp_lookup(dtype, 50, 31, 7, TOKENS, add);
            test_tp_lookup(dtype, 3000, 301, 128, ONE_TOKEN, add);
            test_tp_lookup(dtype, 900, 5000, 768, FEW_TOKENS, add);
        }
        for (int i = 0; i < COUNT(vocabularies) && strstr("tp_loss", only); i++) {
            tp_loss_run cpu, gpu;
            ft_config config = ft_config_default();
            memset(&cpu, 0, sizeof cpu);
            cpu.t = dtype;
            cpu.rows = vocabularies[i];
            gpu = cpu;
            ft_status status = ft_launch(&config, tp_loss_rank, &cpu);
            config.device = FT_GPU;
            if (status == FT_OK) status = ft_launch(&config, tp_loss_rank, &gpu);
            if (status != FT_OK) verdict(0, "tp_loss", ft_last_error());
            else compare("tp_loss", &cpu.got, &gpu.got, t ? 1e-2 : 1e-5);
            results_free(&cpu.got);
            results_free(&gpu.got);
        }
    }
}

/* ---- launchers that are no row's: against sums in double on the host ---- */

static ft_status device_done(void)
{
    cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess) return FT_OK;
    return ft_error(FT_ERR_STATE, "%s", cudaGetErrorString(error));
}

#define NEAR(what, have, want, limit)                                                              \
    do {                                                                                           \
        double near_have = (have), near_want = (want);                                             \
        if (!(fabs(near_have - near_want) <= (limit) * (1 + fabs(near_want))))                  \
            return ft_error(FT_ERR_DATA, "line %d: %s: %.9g, not %.9g", __LINE__, what, near_have, \
                            near_want);                                                            \
    } while (0)

/* Sum of `ranks` arrays, the first of which is the output, at an odd address if `offset`. */
static ft_status sum_rank(ft_ctx *ctx, void *user)
{
    (void)user;
    for (int k = 0; k < 8; k++) {
        const int64_t n = k & 1 ? 4097 : 1 << 14, offset = k & 2 ? 1 : 0;
        const ft_dtype t = k & 4 ? FT_BF16 : FT_F32;
        const int ranks = k & 1 ? 256 : 3;
        spec s = floats(1, n, 0, 0);
        ft_tensor *in[3];
        const void *at[256];
        void *host[3];
        for (int r = 0; r < 3; r++) {
            FT_TRY(fresh(ctx, &in[r], &s, t, offset));
            host[r] = calloc((size_t)n, 4);
            FT_TRY(ft_download(in[r], host[r]));
        }
        FT_TRY(ft_sync(ctx));
        for (int r = 0; r < ranks; r++) at[r] = ft_data(in[r < 3 ? r : 2]);
        FT_TRY(ftk_sum(NULL, ft_data(in[0]), t, ranks, at, n));
        FT_TRY(device_done());
        void *got = calloc((size_t)n, 4);
        FT_TRY(ft_download(in[0], got));
        for (int64_t i = 0; i < n; i++) {
            float want = 0;
            for (int r = 0; r < ranks; r++) want += (float)value_of(host[r < 3 ? r : 2], t, i);
            NEAR("ftk_sum", value_of(got, t, i), (double)want, t == FT_F32 ? 1e-6 : 1e-2);
        }
        for (int r = 0; r < 3; r++) free(host[r]);
        free(got);
    }
    return FT_OK;
}

static ft_status rows_rank(ft_ctx *ctx, void *user)
{
    static const int64_t n[] = {1, 5, 700, 3000, 70000}, o[] = {1, 3, 127, 128, 2048};
    (void)user;
    for (int k = 0; k < COUNT(n) * COUNT(o) * 2; k++) {
        const int64_t rows = n[k / 2 % COUNT(n)], cols = o[k / 2 / COUNT(n)];
        if (rows * cols > 4000000) continue;
        const ft_dtype t = k & 1 ? FT_BF16 : FT_F32;
        size_t bytes = ftk_rows_sum_bytes(rows, cols);
        spec y_s = floats(2, rows, cols, 0), b_s = floats(1, cols, 0, 0);
        spec w_s = floats(1, (int64_t)(bytes + 256) / 4, 0, 0);
        ft_tensor *y, *b, *work;
        FT_TRY(fresh(ctx, &y, &y_s, t, 0));
        FT_TRY(fresh(ctx, &b, &b_s, t, 0));
        FT_TRY(fresh(ctx, &work, &w_s, FT_F32, 0));
        FT_TRY(ft_sync(ctx));
        FT_TRY(ftk_rows_sum(NULL, ft_data(b), t, ft_data(y), t, rows, cols, 0, ft_data(work)));
        FT_TRY(device_done());
        void *hy = calloc((size_t)(rows * cols), 4), *hb = calloc((size_t)cols, 4);
        FT_TRY(ft_download(y, hy));
        FT_TRY(ft_download(b, hb));
        for (int64_t j = 0; j < cols; j++) {
            double want = 0, size = 0;
            for (int64_t i = 0; i < rows; i++) {
                double x = value_of(hy, t, i * cols + j);
                want += x;
                size += x * x;
            }
            double limit = (t == FT_F32 ? 1e-5 : 1e-2) * (sqrt(size) + fabs(want));
            if (!(fabs(value_of(hb, t, j) - want) <= limit))
                return ft_error(FT_ERR_DATA, "rows_sum of %lld x %lld: column %lld is %g, not %g",
                                (long long)rows, (long long)cols, (long long)j,
                                value_of(hb, t, j), want);
        }
        FT_TRY(ftk_rows_fill(NULL, ft_data(y), ft_data(b), t, rows, cols));
        FT_TRY(device_done());
        FT_TRY(ft_download(y, hy));
        for (int64_t i = 0; i < rows * cols; i++)
            NEAR("rows_fill", value_of(hy, t, i), value_of(hb, t, i % cols), 0);
        free(hy);
        free(hb);
        ft_tensor_free(y);
        ft_tensor_free(b);
        ft_tensor_free(work);
    }
    return FT_OK;
}

static ft_status ce_check(ft_ctx *ctx, ft_dtype t, int64_t c, int64_t V, int64_t offset)
{
    spec z_s = floats(2, c, V, 0), l_s = indices(LABELS, c, V), s_s = floats(1, 16, 0, 0);
    spec f_s = floats(1, c + 1, 0, 0);
    ft_tensor *z, *labels, *state, *losses, *fault;
    FT_TRY(fresh(ctx, &z, &z_s, t, offset));
    FT_TRY(fresh(ctx, &labels, &l_s, FT_I32, 0));
    FT_TRY(fresh(ctx, &state, &s_s, FT_F32, 0));
    FT_TRY(fresh(ctx, &losses, &f_s, FT_F32, 0));
    FT_TRY(fresh(ctx, &fault, &s_s, FT_F32, 0));
    FT_TRY(ft_fill(losses, 0.5, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    void *hz = calloc((size_t)(c * V), 4), *hd = calloc((size_t)(c * V), 4);
    int32_t *hl = (int32_t *)calloc((size_t)c, 4);
    float *got = (float *)calloc((size_t)c + 1, 4), loss;
    double total = 0, counted = 0, factor, worst = 0, size = 0;
    FT_TRY(ft_download(z, hz));
    FT_TRY(ft_download(labels, hl));
    FT_TRY(ft_sync(ctx));
    ftk_ce_state *at = (ftk_ce_state *)ft_data(state);
    float *lp = (float *)ft_data(losses);
    FT_TRY(ftk_ce_begin(NULL, at, (const int32_t *)ft_data(labels), c, V, NULL, lp + c,
                        (uint64_t *)ft_data(fault)));
    FT_TRY(ftk_ce_tokens(NULL, ft_data(z), t, (const int32_t *)ft_data(labels), c, V, at, lp, 1));
    FT_TRY(ftk_ce_end(NULL, lp, c, at, lp + c));
    FT_TRY(device_done());
    FT_TRY(ft_download(losses, got));
    FT_TRY(ft_download(z, hd));
    loss = got[c];
    for (int64_t i = 0; i < c; i++) counted += hl[i] >= 0;
    factor = counted > 0 ? 0.5 / counted : 0;
    for (int64_t i = 0; i < c; i++) {
        double sum = 0, most = -1e30;
        for (int64_t j = 0; j < V; j++) most = fmax(most, value_of(hz, t, i * V + j));
        for (int64_t j = 0; j < V; j++) sum += exp(value_of(hz, t, i * V + j) - most);
        double want = hl[i] < 0 ? 0 : log(sum) + most - value_of(hz, t, i * V + hl[i]);
        NEAR("a token's loss", (double)got[i], want, 1e-5);
        total += want;
        for (int64_t j = 0; j < V; j++) {
            double p = exp(value_of(hz, t, i * V + j) - most) / sum - (j == hl[i]);
            if (hl[i] < 0) p = 0;
            worst += pow(value_of(hd, t, i * V + j) - factor * p, 2);
            size += factor * factor * p * p;
        }
    }
    NEAR("the loss", (double)loss, counted > 0 ? total / counted : 0, 1e-5);
    free(hz);
    free(hd);
    free(hl);
    free(got);
    if (sqrt(worst) <= (t == FT_F32 ? 1e-5 : 1e-2) * sqrt(size)) return FT_OK;
    return ft_error(FT_ERR_DATA, "dz with V %lld is %.2e away", (long long)V, sqrt(worst / size));
}

static ft_status ce_rank(ft_ctx *ctx, void *user)
{
    static const struct { int64_t c, V; } sizes[] = { /* also several rows for each block */
        {9, 1}, {9, 7}, {3000, 129}, {3000, 1000}, {9, 5003}, {1100, 5003}, {400, 50257},
        {9, 32768}, {200, 70001}, {150, 140000}
    };
    (void)user;
    for (int k = 0; k < COUNT(sizes) * 4; k++)
        FT_TRY(ce_check(ctx, k & 1 ? FT_BF16 : FT_F32, sizes[k / 4].c, sizes[k / 4].V,
                        k & 2 ? 1 : 0));
    return FT_OK;
}

static void test_launchers(void)
{
    static const struct { const char *name; ft_rank_fn fn; } tests[] = {
        {"ftk_sum", sum_rank}, {"ftk_rows_fill and ftk_rows_sum", rows_rank}, {"ftk_ce_*", ce_rank}
    };
    for (int i = 0; i < COUNT(tests); i++) {
        ft_config config = ft_config_default();
        config.device = FT_GPU;
        random_state = 3;
        if (!strstr(tests[i].name, only)) continue;
        verdict(ft_launch(&config, tests[i].fn, NULL) == FT_OK, tests[i].name, ft_last_error());
    }
}

/* ---- faults ---- */

static ft_status fault_rank(ft_ctx *ctx, void *user)
{
    int loss = *(int *)user;
    int64_t n = 20, V = 10, C = 8, table_shape[2], x_shape[2];
    int32_t tokens[20];
    ft_tensor *t, *table, *x, *y;
    table_shape[0] = V;
    table_shape[1] = C;
    x_shape[0] = n;
    x_shape[1] = C;
    for (int i = 0; i < 20; i++) tokens[i] = i % 10;
    tokens[7] = 10;
    tokens[13] = -3;
    FT_TRY(ft_tensor_create(ctx, &t, FT_I32, 1, &n, FT_TAG_ACT));
    FT_TRY(ft_tensor_create(ctx, &table, FT_F32, 2, table_shape, FT_TAG_PARAM));
    FT_TRY(ft_tensor_create(ctx, &x, FT_F32, 2, x_shape, FT_TAG_PARAM));
    FT_TRY(ft_upload(t, tokens));
    FT_TRY(ft_fill(table, 1, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(ft_fill(x, 1, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    if (loss) FT_TRY(ft_linear_cross_entropy(ctx, &y, x, table, t, NULL, 0));
    else FT_TRY(ft_embedding(ctx, &y, t, table));
    return ft_sync(ctx);
}

static void test_faults(void)
{
    for (int loss = 0; loss < 2; loss++) {
        ft_config config = ft_config_default();
        config.device = FT_GPU;
        if (!strstr("fault", only)) continue;
        ft_status status = ft_launch(&config, fault_rank, &loss);
        verdict(status == FT_ERR_DATA && strstr(ft_last_error(), "position 7") != NULL,
                loss ? "fault: label out of range" : "fault: token out of range", ft_last_error());
    }
}

/* ---- more than 2^31 elements in one launch: bf16, checked by samples ---- */

static ft_status large_rank(ft_ctx *ctx, void *user)
{
    const int64_t F = 4096, rows = ((int64_t)1 << 31) / F + 5, shape[2] = {rows, 2 * F};
    const int64_t at[] = {0, 1, F * rows / 2, ((int64_t)1 << 31) - 1, ((int64_t)1 << 31) + 1,
                          F * rows - 1};
    ft_stream *stream = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    ft_tensor *gu, *y, *z, *piece;
    uint16_t bits;
    double want = 1.5 / (1 + exp(-1.5)) * 1.5;
    (void)user;
    FT_TRY(ft_tensor_create(ctx, &gu, FT_BF16, 2, shape, FT_TAG_PARAM));
    FT_TRY(ft_fill(gu, 1.5, stream));
    FT_TRY(ft_swiglu(ctx, &y, gu));
    FT_TRY(ft_scale(ctx, &z, y, 2.0));
    for (int i = 0; i < COUNT(at); i++) {
        int64_t one = 1;
        for (int k = 0; k < 3; k++) {
            ft_tensor *from = k == 0 ? gu : k == 1 ? y : z;
            int64_t where = k == 0 ? 2 * at[i] + 1 : at[i];
            ft_tensor *copy;
            FT_TRY(ft_tensor_view(from, &piece, where, 1, &one));
            FT_TRY(ft_tensor_create(ctx, &copy, FT_BF16, 1, &one, FT_TAG_OTHER));
            FT_TRY(ft_copy(copy, piece, stream));
            FT_TRY(ft_download(copy, &bits));
            NEAR("a large tensor", (double)ft_f32_from_bf16(bits),
                 k == 0 ? 1.5 : k == 1 ? want : 2 * want, 1e-2);
            ft_tensor_free(piece);
            ft_tensor_free(copy);
        }
    }
    return FT_OK;
}

static void test_large(void)
{
    ft_config config = ft_config_default();
    config.device = FT_GPU;
    verdict(ft_launch(&config, large_rank, NULL) == FT_OK, "more than 2^31 elements",
            ft_last_error());
}

/* ---- benchmark: launchers called by hand on calls that are built by hand ---- */

typedef ft_status (*launcher)(const ft_op_call *call);

static ft_view view_of(ft_tensor *t)
{
    ft_view v;
    memset(&v, 0, sizeof v);
    if (!t) return v;
    v.present = 1;
    v.dtype = t->dtype;
    v.ndim = t->ndim;
    for (int i = 0; i < t->ndim; i++) v.shape[i] = t->shape[i];
    v.data = ft_data(t);
    return v;
}

static double copy_rate; /* GB/s, of this run */

static ft_status timed(const char *name, launcher fn, ft_op_call *call, double bytes)
{
    enum { WARM = 3, TIMES = 20 };
    cudaEvent_t begin, end;
    float ms = 0;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int i = 0; i < WARM; i++) FT_TRY(fn(call));
    cudaEventRecord(begin, NULL);
    for (int i = 0; i < TIMES; i++) FT_TRY(fn(call));
    cudaEventRecord(end, NULL);
    FT_TRY(device_done());
    cudaEventElapsedTime(&ms, begin, end);
    double rate = bytes * TIMES / (double)ms / 1e6;
    if (copy_rate == 0) copy_rate = rate;
    printf("bench %-28s %8.1f us  %7.0f GB/s  %.2f of copy\n", name, (double)ms * 1e3 / TIMES, rate,
           rate / copy_rate);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return FT_OK;
}

/* bf16 is random, as constants may move faster: a piece of 1 MiB, then copies of what is there. */
static ft_status bench_random(ft_tensor *t)
{
    size_t have = ft_bytes(t) < (1u << 20) ? ft_bytes(t) : 1u << 20;
    uint16_t *host = (uint16_t *)malloc(have);
    for (size_t i = 0; i < have / 2; i++) host[i] = ft_bf16_from_f32((float)uniform());
    cudaMemcpy(ft_data(t), host, have, cudaMemcpyHostToDevice);
    free(host);
    while (have < ft_bytes(t)) {
        size_t more = ft_bytes(t) - have < have ? ft_bytes(t) - have : have;
        cudaMemcpy((char *)ft_data(t) + have, ft_data(t), more, cudaMemcpyDeviceToDevice);
        have += more;
    }
    return device_done();
}

static ft_status bench_tensor(ft_ctx *ctx, ft_tensor **t, ft_dtype dtype, int64_t a, int64_t b)
{
    int64_t shape[2];
    shape[0] = a;
    shape[1] = b;
    if (!b) FT_TRY(ft_tensor_create(ctx, t, dtype, 1, shape, FT_TAG_PARAM));
    else FT_TRY(ft_tensor_create(ctx, t, dtype, 2, shape, FT_TAG_PARAM));
    if (dtype == FT_BF16) return bench_random(*t);
    return ft_fill(*t, dtype == FT_I32 ? 1 : 0.5, ft_stream_get(ctx, FT_STREAM_COMPUTE));
}

/* A call of `row`, with workspace for it. */
static ft_status bench_call(ft_ctx *ctx, ft_op_call *call, const ft_op *row, int backward)
{
    ft_tensor *work;
    memset(&call->scratch_bytes, 0, sizeof call->scratch_bytes);
    call->op = row;
    call->device = FT_GPU;
    call->backward = backward;
    call->attr.f[0] = 1e-5;
    call->workspace_bytes = 0;
    if (row->scratch) row->scratch(call);
    if (!call->workspace_bytes) return FT_OK;
    FT_TRY(bench_tensor(ctx, &work, FT_F32, (int64_t)(call->workspace_bytes + 3) / 4, 0));
    FT_TRY(ft_sync(ctx));
    call->workspace = ft_data(work);
    return FT_OK;
}

static ft_status bench_norms(ft_ctx *ctx, int64_t N, int64_t C)
{
    double size = (double)(N * C) * 2;
    ft_tensor *x, *y, *z, *u, *w, *dw;
    ft_op_call call;
    char name[64];
    FT_TRY(bench_tensor(ctx, &x, FT_BF16, N, C));
    FT_TRY(bench_tensor(ctx, &y, FT_BF16, N, C));
    FT_TRY(bench_tensor(ctx, &z, FT_BF16, N, C));
    FT_TRY(bench_tensor(ctx, &u, FT_BF16, N, C));
    FT_TRY(bench_tensor(ctx, &w, FT_BF16, C, 0));
    FT_TRY(bench_tensor(ctx, &dw, FT_BF16, C, 0));
    FT_TRY(ft_sync(ctx));
    memset(&call, 0, sizeof call);
    call.in[0] = view_of(x);
    call.in[1] = view_of(w);
    call.out[0] = view_of(y);
    FT_TRY(bench_call(ctx, &call, &ft__op_rmsnorm, 0));
    snprintf(name, sizeof name, "rmsnorm %lldx%lld", (long long)N, (long long)C);
    FT_TRY(timed(name, ftk_rmsnorm_forward, &call, 2 * size));
    call.dout[0] = view_of(y);
    call.din[0] = view_of(y);
    call.din[1] = view_of(dw);
    FT_TRY(bench_call(ctx, &call, &ft__op_rmsnorm, 1));
    FT_TRY(timed("  backward", ftk_rmsnorm_backward, &call, 3 * size));
    memset(&call, 0, sizeof call);
    call.in[0] = view_of(x);
    call.in[1] = view_of(y);
    call.in[2] = view_of(w);
    call.out[0] = view_of(z);
    call.out[1] = view_of(u);
    FT_TRY(bench_call(ctx, &call, &ft__op_add_rmsnorm, 0));
    snprintf(name, sizeof name, "add_rmsnorm %lldx%lld", (long long)N, (long long)C);
    FT_TRY(timed(name, ftk_add_rmsnorm_forward, &call, 4 * size));
    FT_TRY(timed("  replay", ftk_add_rmsnorm_replay, &call, 2 * size));
    call.dout[0] = view_of(x);
    call.dout[1] = view_of(y);
    call.din[0] = view_of(x);
    call.din[2] = view_of(dw);
    FT_TRY(bench_call(ctx, &call, &ft__op_add_rmsnorm, 1));
    FT_TRY(timed("  backward", ftk_add_rmsnorm_backward, &call, 4 * size));
    ft_tensor_free(x);
    ft_tensor_free(y);
    ft_tensor_free(z);
    ft_tensor_free(u);
    return FT_OK;
}

static ft_status bench_swiglu(ft_ctx *ctx, int64_t N, int64_t F)
{
    double size = (double)(N * F) * 2;
    ft_tensor *gu, *y;
    ft_op_call call;
    FT_TRY(bench_tensor(ctx, &gu, FT_BF16, N, 2 * F));
    FT_TRY(bench_tensor(ctx, &y, FT_BF16, N, F));
    FT_TRY(ft_sync(ctx));
    memset(&call, 0, sizeof call);
    call.in[0] = view_of(gu);
    call.out[0] = view_of(y);
    FT_TRY(bench_call(ctx, &call, &ft__op_swiglu, 0));
    FT_TRY(timed("swiglu", ftk_swiglu_forward, &call, 3 * size));
    call.dout[0] = view_of(y);
    call.din[0] = view_of(gu);
    FT_TRY(timed("  backward, in place", ftk_swiglu_backward, &call, 5 * size));
    ft_tensor_free(gu);
    ft_tensor_free(y);
    return FT_OK;
}

static ft_status bench_rope(ft_ctx *ctx, int64_t H, int64_t K, int64_t D)
{
    const int64_t N = 16384, W = (H + 2 * K) * D;
    ft_tensor *qkv, *table, *w, *out;
    ft_op_call call;
    FT_TRY(bench_tensor(ctx, &qkv, FT_BF16, N, W));
    FT_TRY(bench_tensor(ctx, &out, FT_BF16, N, W));
    FT_TRY(bench_tensor(ctx, &w, FT_BF16, D, 0));
    FT_TRY(ft_rope_table(ctx, &table, 4096, D, 10000.0, NULL));
    FT_TRY(ft_sync(ctx));
    memset(&call, 0, sizeof call);
    call.attr.i[0] = H;
    call.attr.i[1] = K;
    call.attr.i[2] = D;
    call.in[0] = view_of(qkv);
    call.in[0].ndim = 3;
    call.in[0].shape[0] = 4;
    call.in[0].shape[1] = 4096;
    call.in[0].shape[2] = W;
    call.out[0] = call.in[0];
    call.in[1] = view_of(table);
    FT_TRY(bench_call(ctx, &call, &ft__op_rope, 0));
    FT_TRY(timed("rope, in place", ftk_rope_forward, &call, 4.0 * (double)(N * (H + K) * D)));
    call.in[1] = call.in[2] = view_of(w);
    call.out[0].data = ft_data(out);
    FT_TRY(bench_call(ctx, &call, &ft__op_head_norm, 0));
    FT_TRY(timed("head_norm", ftk_head_norm_forward, &call, 4.0 * (double)(N * W)));
    call.dout[0] = call.din[0] = call.out[0];
    call.din[1] = view_of(w);
    FT_TRY(bench_call(ctx, &call, &ft__op_head_norm, 1));
    FT_TRY(timed("  backward, in place", ftk_head_norm_backward, &call,
                 6.0 * (double)(N * (H + K) * D)));
    ft_tensor_free(qkv);
    ft_tensor_free(out);
    return FT_OK;
}

static ft_status bench_adamw(ft_ctx *ctx, int64_t n)
{
    ft_zero_optimizer o = ft_zero_adamw(0.9, 0.95, 1e-8);
    ft_op row = ft_op_default();
    ft_tensor *g, *w, *m, *v, *p, *control, *step, *slot;
    ft_op_call call;
    FT_TRY(bench_tensor(ctx, &g, FT_BF16, n, 0));
    FT_TRY(bench_tensor(ctx, &w, FT_BF16, n, 0));
    FT_TRY(bench_tensor(ctx, &m, FT_F32, n, 0));
    FT_TRY(bench_tensor(ctx, &v, FT_F32, n, 0));
    FT_TRY(bench_tensor(ctx, &p, FT_F32, n, 0));
    FT_TRY(bench_tensor(ctx, &control, FT_F32, 4, 0));
    FT_TRY(bench_tensor(ctx, &slot, FT_F32, 4, 0));
    FT_TRY(bench_tensor(ctx, &step, FT_I32, 1, 0));
    FT_TRY(ft_sync(ctx));
    memset(&call, 0, sizeof call);
    row.name = "adamw";
    row.n_in = 3;
    row.n_out = 4;
    call.in[0] = view_of(g);
    call.in[1] = view_of(control);
    call.in[2] = view_of(step);
    call.out[0] = view_of(w);
    call.out[1] = view_of(m);
    call.out[2] = view_of(v);
    call.out[3] = view_of(p);
    FT_TRY(bench_call(ctx, &call, &row, 0));
    call.attr.f[0] = 1e-3;
    call.attr.user = &o;
    FT_TRY(timed("adamw", ftk_zero_adamw, &call, 28.0 * (double)n));
    call.attr.i[1] = n;
    call.out[0] = view_of(slot);
    FT_TRY(bench_call(ctx, &call, &ft__zero_rows[FT__ROW_SUMSQ], 0));
    FT_TRY(timed("sum of squares", ftk_zero_sumsq, &call, 2.0 * (double)n));
    ft_tensor_free(g);
    ft_tensor_free(w);
    ft_tensor_free(m);
    ft_tensor_free(v);
    ft_tensor_free(p);
    return FT_OK;
}

static struct ce_bench {
    void *z;
    const int32_t *labels;
    int64_t c, V;
    ftk_ce_state *state;
    float *losses;
} ce_now;

static ft_status ce_launch(const ft_op_call *call)
{
    (void)call;
    return ftk_ce_tokens(NULL, ce_now.z, FT_BF16, ce_now.labels, ce_now.c, ce_now.V, ce_now.state,
                         ce_now.losses, 1);
}

static ft_status bench_ce(ft_ctx *ctx, int64_t c, int64_t V)
{
    ft_tensor *z, *labels, *state, *losses;
    char name[64];
    FT_TRY(bench_tensor(ctx, &z, FT_BF16, c, V));
    FT_TRY(bench_tensor(ctx, &labels, FT_I32, c, 0));
    FT_TRY(bench_tensor(ctx, &state, FT_F32, 16, 0));
    FT_TRY(bench_tensor(ctx, &losses, FT_F32, c, 0));
    FT_TRY(ft_fill(state, 0, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(ft_sync(ctx));
    ce_now.z = ft_data(z);
    ce_now.labels = (const int32_t *)ft_data(labels);
    ce_now.c = c;
    ce_now.V = V;
    ce_now.state = (ftk_ce_state *)ft_data(state);
    ce_now.losses = (float *)ft_data(losses);
    snprintf(name, sizeof name, "ce tokens %lldx%lld", (long long)c, (long long)V);
    FT_TRY(timed(name, ce_launch, NULL, 4.0 * (double)(c * V)));
    ft_tensor_free(z);
    return FT_OK;
}

static ft_status bench_embedding(ft_ctx *ctx, int64_t N, int64_t V, int64_t C, const char *text,
                                 int kind)
{
    ft_tensor *tokens, *table, *y;
    ft_op_call call;
    int32_t *host = (int32_t *)malloc((size_t)N * sizeof *host);
    random_state = 11;
    for (int64_t i = 0; i < N; i++) {
        double x = (uniform() + 1) / 2;
        host[i] = kind == 2 ? 5 : (int32_t)((kind ? pow(x, 6) : x) * (double)(V - 1));
    }
    FT_TRY(bench_tensor(ctx, &tokens, FT_I32, N, 0));
    FT_TRY(bench_tensor(ctx, &table, FT_BF16, V, C));
    FT_TRY(bench_tensor(ctx, &y, FT_BF16, N, C));
    FT_TRY(ft_upload(tokens, host));
    FT_TRY(ft_sync(ctx));
    free(host);
    memset(&call, 0, sizeof call);
    call.in[0] = view_of(tokens);
    call.in[1] = view_of(table);
    call.out[0] = view_of(y);
    FT_TRY(bench_call(ctx, &call, &ft__op_embedding, 0));
    printf("%s\n", text);
    FT_TRY(timed("embedding", ftk_embedding_forward, &call, 4.0 * (double)(N * C)));
    call.dout[0] = view_of(y);
    call.din[1] = view_of(table);
    FT_TRY(bench_call(ctx, &call, &ft__op_embedding, 1));
    FT_TRY(timed("  backward", ftk_embedding_backward, &call, 2.0 * (double)(N * C + V * C)));
    ft_tensor_free(table);
    ft_tensor_free(y);
    return FT_OK;
}

static ft_status bench_rank(ft_ctx *ctx, void *user)
{
    ft_tensor *a, *b;
    ft_op_call call;
    const int64_t N = 16384;
    (void)user;
    FT_TRY(bench_tensor(ctx, &a, FT_BF16, N, 8192));
    FT_TRY(bench_tensor(ctx, &b, FT_BF16, N, 8192));
    FT_TRY(ft_sync(ctx));
    memset(&call, 0, sizeof call);
    call.in[0] = view_of(a);
    call.out[0] = view_of(b);
    FT_TRY(bench_call(ctx, &call, &ft__op_copy, 0));
    FT_TRY(timed("device copy", ftk_copy_forward, &call, 4.0 * (double)(N * 8192)));
    FT_TRY(timed("silu", ftk_silu_forward, &call, 4.0 * (double)(N * 8192)));
    ft_tensor_free(a);
    ft_tensor_free(b);
    FT_TRY(bench_norms(ctx, N, 768)); /* 25 MB a tensor, some of which the L2 cache keeps */
    FT_TRY(bench_norms(ctx, N, 2048));
    FT_TRY(bench_norms(ctx, 8 * N, 768)); /* from here on 201 to 268 MB, which it does not */
    FT_TRY(bench_norms(ctx, 4 * N, 2048));
    FT_TRY(bench_norms(ctx, 2 * N, 4096));
    FT_TRY(bench_norms(ctx, N, 8192));
    FT_TRY(bench_swiglu(ctx, N, 8192));
    FT_TRY(bench_rope(ctx, 32, 8, 64));
    FT_TRY(bench_rope(ctx, 32, 8, 128));
    FT_TRY(bench_adamw(ctx, (int64_t)256 << 20));
    FT_TRY(bench_ce(ctx, 2048, 32768));
    FT_TRY(bench_ce(ctx, 2048, 128256));
    FT_TRY(bench_ce(ctx, 2048, 50257));
    FT_TRY(bench_embedding(ctx, N, 128256, 2048, "uniform tokens", 0));
    FT_TRY(bench_embedding(ctx, N, 128256, 2048, "skewed tokens", 1));
    FT_TRY(bench_embedding(ctx, N, 256, 2048, "skewed bytes", 1));
    FT_TRY(bench_embedding(ctx, 4 * N, 256, 2048, "skewed bytes, more of them", 1));
    return bench_embedding(ctx, N, 128256, 2048, "one token only", 2);
}

static void bench(void)
{
    ft_config config = ft_config_default();
    config.device = FT_GPU;
    verdict(ft_launch(&config, bench_rank, NULL) == FT_OK, "bench", ft_last_error());
}

int main(int argc, char **argv)
{
    int large = 0, benches = 0;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--large")) large = 1;
        else if (!strcmp(argv[i], "--bench")) benches = 1;
        else if (!strcmp(argv[i], "--short")) short_run = 1;
        else if (!strcmp(argv[i], "--no-bf16-gemm")) no_bf16_gemm = 1;
        else only = argv[i];
    if (benches) bench();
    else {
        test_moves();
        test_accumulate();
        test_launchers();
        test_zero_scalars();
        test_optimizers();
        test_tp();
        test_faults();
        test_ops();
        if (large) test_large();
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
