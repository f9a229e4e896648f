/* The attention kernels alone, called through ft_op_call, without the library around them.

     nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I. \
         tests/gpu/test_attention.cu -o /tmp/test_attention
     /tmp/test_attention            every shape
     /tmp/test_attention --small    those whose reference is computed on the host, T <= 200
     /tmp/test_attention --few      a ninth of these, for sanitizers
     /tmp/test_attention --bench    TFLOP/s, of the default tiles and of other ones

   Properties: o, lse and the three parts of dqkv agree with float64 on the host where T is small,
   and with the simple kernels in fp32 where it is not (they are compared with the host too);
   relative L2 below 1e-5 in fp32, 1e-2 in bf16. Two runs agree to the bit. Nothing is written
   outside the outputs. The same with documents in a row, of lengths from 1 to all of it; a row that
   is one document gives the bits of no documents. */

#ifndef FT_ATTENTION_SOURCE
#define FT_ATTENTION_SOURCE "../../femtotron_kernels.cu"
#endif
#include FT_ATTENTION_SOURCE

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

extern "C" ft_status ft_error(ft_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
    return status;
}

/* The other kernels of the file want these of the library; none of them runs here. */
extern "C" size_t ftk_rows_sum_bytes(int64_t, int64_t) { return 0; }
extern "C" size_t ftk_lookup_bytes(int64_t, int64_t, int64_t) { return 0; }
extern "C" size_t ft_dtype_bytes(ft_dtype dtype) { return dtype == FT_BF16 ? 2 : 4; }
extern "C" const char *ft_dtype_name(ft_dtype dtype) { return dtype == FT_BF16 ? "bf16" : "fp32"; }

static int passed, failed;
static int few;

#define CUDA(call)                                                                                 \
    do {                                                                                           \
        cudaError_t cuda_error = (call);                                                           \
        if (cuda_error != cudaSuccess) {                                                           \
            printf("FAIL %s:%d %s: %s\n", __FILE__, __LINE__, #call,                               \
                   cudaGetErrorString(cuda_error));                                                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

typedef struct shape {
    int64_t B, T, H, K, D;
    int f32, grad_f32; /* dtype of qkv, o, do; of dqkv */
    int skew;          /* elements by which every pointer is off a 256-byte boundary */
    int docs;          /* mean length of documents; 0: none are given; -1: each row is one */
} shape;

enum { GUARD = 1024 }; /* bytes before and after every output that must keep their value */

typedef struct buffer { /* `count` elements between guards */
    char *raw;
    size_t bytes, offset;
    int f32;
    int64_t count;
} buffer;

static buffer make(int64_t count, int f32, int skew)
{
    buffer b;
    b.f32 = f32;
    b.count = count;
    b.bytes = (size_t)count * (f32 ? 4 : 2);
    b.offset = GUARD + (size_t)skew * (f32 ? 4 : 2);
    CUDA(cudaMalloc((void **)&b.raw, b.bytes + 2 * GUARD + 64));
    CUDA(cudaMemset(b.raw, 0xa5, b.bytes + 2 * GUARD + 64));
    return b;
}

static void *data(const buffer *b) { return b->raw + b->offset; }

static std::vector<char> raw(const buffer *b)
{
    std::vector<char> host(b->bytes);
    CUDA(cudaMemcpy(host.data(), data(b), b->bytes, cudaMemcpyDeviceToHost));
    return host;
}

static float widen(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

static uint16_t narrow(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static std::vector<double> values(const buffer *b)
{
    std::vector<char> host = raw(b);
    std::vector<double> out((size_t)b->count);
    for (size_t i = 0; i < out.size(); i++)
        out[i] = b->f32 ? ((float *)host.data())[i] : widen(((uint16_t *)host.data())[i]);
    return out;
}

static void put(const buffer *b, const std::vector<double> &from)
{
    std::vector<char> host(b->bytes);
    for (size_t i = 0; i < from.size(); i++)
        if (b->f32) ((float *)host.data())[i] = (float)from[i];
        else ((uint16_t *)host.data())[i] = narrow((float)from[i]);
    CUDA(cudaMemcpy(data(b), host.data(), b->bytes, cudaMemcpyHostToDevice));
}

static int guards_whole(const buffer *b)
{
    std::vector<unsigned char> host(b->bytes + 2 * GUARD + 64);
    CUDA(cudaMemcpy(host.data(), b->raw, host.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < host.size(); i++)
        if ((i < b->offset || i >= b->offset + b->bytes) && host[i] != 0xa5) return 0;
    return 1;
}

/* Where the document of each position begins. */
static std::vector<int32_t> documents(shape s)
{
    std::vector<int32_t> first((size_t)(s.B * s.T), 0);
    uint64_t seed = 5 + (uint64_t)s.T;
    for (int64_t b = 0; b < s.B && s.docs > 0; b++)
        for (int64_t t = 1; t < s.T; t++) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            first[(size_t)(b * s.T + t)] = seed >> 33 < (1ull << 31) / (uint64_t)s.docs
                                               ? (int32_t)t : first[(size_t)(b * s.T + t - 1)];
        }
    return first;
}

/* Roughly normal numbers, exact in the dtype. */
static std::vector<double> noise(int64_t count, uint64_t seed, int f32, double size)
{
    std::vector<double> out((size_t)count);
    for (size_t i = 0; i < out.size(); i++) {
        double sum = 0;
        for (int j = 0; j < 4; j++) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            sum += (double)(seed >> 40) / (1 << 24) - 0.5;
        }
        float x = (float)(sum * 1.7 * size);
        out[i] = f32 ? x : widen(narrow(x));
    }
    return out;
}

typedef struct problem {
    shape s;
    buffer qkv, o, lse, dout, dqkv, workspace, doc;
    ft_op_call call;
} problem;

static ft_view view(const buffer *b, ft_dtype dtype, int64_t d0, int64_t d1, int64_t d2)
{
    ft_view v;
    memset(&v, 0, sizeof v);
    v.present = 1;
    v.dtype = dtype;
    v.ndim = 3;
    v.shape[0] = d0;
    v.shape[1] = d1;
    v.shape[2] = d2;
    v.data = data(b);
    return v;
}

static problem create(shape s, const std::vector<double> &qkv, const std::vector<double> &dout)
{
    problem p;
    const int64_t W = (s.H + 2 * s.K) * s.D;
    const ft_dtype dtype = s.f32 ? FT_F32 : FT_BF16;
    p.s = s;
    p.qkv = make(s.B * s.T * W, s.f32, s.skew);
    p.o = make(s.B * s.T * s.H * s.D, s.f32, s.skew);
    p.lse = make(s.B * s.H * s.T, 1, 0);
    p.dout = make(s.B * s.T * s.H * s.D, s.f32, s.skew);
    p.dqkv = make(s.B * s.T * W, s.grad_f32, s.skew);
    p.workspace = make(2 * s.B * s.H * ((s.T + 255) / 256 * 256), 1, 0);
    put(&p.qkv, qkv);
    put(&p.dout, dout);
    memset(&p.call, 0, sizeof p.call);
    p.call.attr.i[0] = s.H;
    p.call.attr.i[1] = s.K;
    p.call.attr.i[2] = s.D;
    p.call.device = FT_GPU;
    p.call.in[0] = view(&p.qkv, dtype, s.B, s.T, W);
    p.call.out[0] = view(&p.o, dtype, s.B, s.T, s.H * s.D);
    p.call.out[1] = view(&p.lse, FT_F32, s.B, s.H, s.T);
    p.call.dout[0] = view(&p.dout, dtype, s.B, s.T, s.H * s.D);
    p.call.din[0] = view(&p.dqkv, s.grad_f32 ? FT_F32 : FT_BF16, s.B, s.T, W);
    p.doc = make(s.B * s.T, 1, 0);
    CUDA(cudaMemcpy(data(&p.doc), documents(s).data(), p.doc.bytes, cudaMemcpyHostToDevice));
    if (s.docs) p.call.in[1] = view(&p.doc, FT_I32, s.B, s.T, 1);
    return p;
}

static void destroy(problem *p)
{
    buffer *all[7] = { &p->qkv, &p->o, &p->lse, &p->dout, &p->dqkv, &p->workspace, &p->doc };
    for (int i = 0; i < 7; i++) CUDA(cudaFree(all[i]->raw));
}

enum { BY_SHAPE = -1 }; /* the version that ftk_attention_* chooses */

/* Forward has no workspace, and backward as much as the row asks for. */
static int run(problem *p, int version)
{
    ft_status status;
    ftk__att a;
    p->call.backward = 0;
    p->call.workspace = NULL;
    if (version == BY_SHAPE) {
        status = ftk_attention_forward(&p->call);
    } else {
        status = ftk__att_begin(&a, &p->call);
        if (status == FT_OK) status = ftk__att_run_forward(&a, version, NULL);
    }
    p->call.backward = 1;
    p->call.workspace = data(&p->workspace);
    if (status == FT_OK && version == BY_SHAPE) {
        status = ftk_attention_backward(&p->call);
    } else if (status == FT_OK) {
        status = ftk__att_begin(&a, &p->call);
        if (status == FT_OK) status = ftk__att_run_backward(&a, version, NULL);
    }
    CUDA(cudaDeviceSynchronize());
    return status == FT_OK;
}

typedef struct answer { std::vector<double> o, lse, dqkv; } answer;

static answer read(const problem *p)
{
    answer a;
    a.o = values(&p->o);
    a.lse = values(&p->lse);
    a.dqkv = values(&p->dqkv);
    return a;
}

/* The definition, in float64. */
static answer host(shape s, const std::vector<double> &qkv, const std::vector<double> &dout)
{
    const int64_t B = s.B, T = s.T, H = s.H, K = s.K, D = s.D, W = (H + 2 * K) * D;
    const double scale = 1 / sqrt((double)D);
    answer r;
    r.o.assign((size_t)(B * T * H * D), 0);
    r.lse.assign((size_t)(B * H * T), 0);
    r.dqkv.assign((size_t)(B * T * W), 0);
    std::vector<double> p((size_t)T), dp((size_t)T);
    const std::vector<int32_t> doc = documents(s);
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t t = 0; t < T; t++) {
                const int64_t kv = h / (H / K), row = b * T * W;
                const double *q = &qkv[(size_t)(row + t * W + h * D)];
                const double *g = &dout[(size_t)(((b * T + t) * H + h) * D)];
                double *o = &r.o[(size_t)(((b * T + t) * H + h) * D)];
                double top = -1e300, sum = 0, delta = 0;
                const int64_t first = doc[(size_t)(b * T + t)];
                for (int64_t j = first; j <= t; j++) {
                    const double *k = &qkv[(size_t)(row + j * W + (H + kv) * D)];
                    const double *v = k + K * D;
                    double dot = 0, grad = 0;
                    for (int64_t d = 0; d < D; d++) {
                        dot += q[d] * k[d];
                        grad += g[d] * v[d];
                    }
                    p[(size_t)j] = dot * scale;
                    dp[(size_t)j] = grad;
                    if (p[(size_t)j] > top) top = p[(size_t)j];
                }
                for (int64_t j = first; j <= t; j++) sum += p[(size_t)j] = exp(p[(size_t)j] - top);
                r.lse[(size_t)((b * H + h) * T + t)] = top + log(sum);
                for (int64_t j = first; j <= t; j++) {
                    const double *v = &qkv[(size_t)(row + j * W + (H + K + kv) * D)];
                    p[(size_t)j] /= sum;
                    delta += p[(size_t)j] * dp[(size_t)j];
                    for (int64_t d = 0; d < D; d++) o[d] += p[(size_t)j] * v[d];
                }
                for (int64_t j = first; j <= t; j++) {
                    const size_t at = (size_t)(row + j * W + (H + kv) * D);
                    const double ds = p[(size_t)j] * (dp[(size_t)j] - delta) * scale;
                    double *dq = &r.dqkv[(size_t)(row + t * W + h * D)];
                    double *dk = &r.dqkv[at], *dv = dk + K * D;
                    for (int64_t d = 0; d < D; d++) {
                        dq[d] += ds * qkv[at + (size_t)d];
                        dk[d] += ds * q[d];
                        dv[d] += p[(size_t)j] * g[d];
                    }
                }
            }
    return r;
}

/* ||x - y|| / ||y|| over columns from..to of rows of `width`; ||y|| counts as that of numbers of
   size `least` where it is smaller. */
static double distance(const std::vector<double> &x, const std::vector<double> &y, int64_t width,
                       int64_t from, int64_t to, double least)
{
    double off = 0, all = 0, count = 0;
    for (size_t i = 0; i < x.size(); i++) {
        int64_t column = (int64_t)i % width;
        if (column < from || column >= to) continue;
        off += (x[i] - y[i]) * (x[i] - y[i]);
        all += y[i] * y[i];
        count++;
        if (!(x[i] - x[i] == 0)) return INFINITY; /* NaN or infinite */
    }
    if (all < least * least * count) all = least * least * count;
    return count > 0 ? sqrt(off / all) : 0;
}

static void compare(const char *what, shape s, const answer &x, const answer &y, int whole)
{
    const int64_t W = (s.H + 2 * s.K) * s.D, q = s.H * s.D, k = s.K * s.D;
    const double bound = s.f32 ? 1e-5 : 1e-2;
    /* With one key (as documents of mean length 1 have) ds = p (dp - delta) is zero, with two nearly:
       the rounding of o is what is left, and it is measured against the terms of the difference. */
    const double least = s.T <= 2 || s.docs == 1 ? 1 : 0.01;
    double off[5];
    off[0] = distance(x.o, y.o, 1, 0, 1, 0.01);
    off[1] = distance(x.lse, y.lse, 1, 0, 1, 0.01);
    off[2] = distance(x.dqkv, y.dqkv, W, 0, q, least);
    off[3] = distance(x.dqkv, y.dqkv, W, q, q + k, least);
    off[4] = distance(x.dqkv, y.dqkv, W, q + k, W, 0.01);
    int ok = whole;
    for (int i = 0; i < 5; i++) ok = ok && off[i] < bound;
    printf("%s %s B %lld T %lld H %lld K %lld D %lld %s, gradient %s, skew %d, docs %d: o %.1e "
           "lse %.1e dq %.1e dk %.1e dv %.1e%s\n", ok ? "ok  " : "FAIL", what, (long long)s.B,
           (long long)s.T, (long long)s.H, (long long)s.K, (long long)s.D,
           s.f32 ? "fp32" : "bf16", s.grad_f32 ? "fp32" : "bf16", s.skew, s.docs, off[0], off[1], off[2],
           off[3], off[4], whole ? "" : " (a launch failed, two runs differ, or a guard is gone)");
    if (ok) passed++;
    else failed++;
}

/* Twice: equal to the bit, guards whole. */
static int run_whole(problem *p, int version)
{
    if (!run(p, version)) return 0;
    std::vector<char> o = raw(&p->o), lse = raw(&p->lse), dqkv = raw(&p->dqkv);
    if (!run(p, version)) return 0;
    const buffer *outputs[4] = { &p->o, &p->lse, &p->dqkv, &p->workspace };
    for (int i = 0; i < 4; i++)
        if (!guards_whole(outputs[i])) return 0;
    return o == raw(&p->o) && lse == raw(&p->lse) && dqkv == raw(&p->dqkv);
}

static void check(shape s, int small)
{
    static const char *const names[4] = { "simple  ", "elements", "mma.sync", "wgmma   " };
    const int64_t W = (s.H + 2 * s.K) * s.D;
    std::vector<double> qkv = noise(s.B * s.T * W, 7 + (uint64_t)s.D, s.f32, 1.5);
    std::vector<double> dout = noise(s.B * s.T * s.H * s.D, 11 + (uint64_t)s.T, s.f32, 1.0);
    answer expected;
    if (small) {
        expected = host(s, qkv, dout);
    } else {
        shape wide = s;
        wide.f32 = wide.grad_f32 = 1;
        wide.skew = 0;
        problem r = create(wide, qkv, dout);
        run(&r, FTK__ATT_SIMPLE);
        expected = read(&r);
        destroy(&r);
    }
    problem p = create(s, qkv, dout);
    ftk__att a;
    p.call.backward = 1;
    ftk__att_begin(&a, &p.call);
    const int chosen = ftk__att_version(&a);
    int whole = run_whole(&p, BY_SHAPE);
    compare(names[chosen], s, read(&p), expected, whole);
    for (int other = FTK__ATT_SIMPLE; other < chosen; other++)
        if (other > FTK__ATT_SIMPLE || small) {
            whole = run_whole(&p, other);
            compare(names[other], s, read(&p), expected, whole);
        }
    destroy(&p);
}

/* A row that is one document, said or not. */
static void check_one_document(shape s)
{
    const int64_t W = (s.H + 2 * s.K) * s.D;
    std::vector<double> qkv = noise(s.B * s.T * W, 3, s.f32, 1.5);
    std::vector<double> dout = noise(s.B * s.T * s.H * s.D, 4, s.f32, 1.0);
    std::vector<char> o[2], dqkv[2];
    int ran = 1;
    for (int said = 0; said < 2; said++) {
        s.docs = -said;
        problem p = create(s, qkv, dout);
        ran = ran && run(&p, BY_SHAPE);
        o[said] = raw(&p.o);
        dqkv[said] = raw(&p.dqkv);
        destroy(&p);
    }
    const int ok = ran && o[0] == o[1] && dqkv[0] == dqkv[1];
    printf("%s one document, D %lld %s: the bits of none\n", ok ? "ok  " : "FAIL", (long long)s.D,
           s.f32 ? "fp32" : "bf16");
    if (ok) passed++;
    else failed++;
}

static void check_documents(int only_small)
{
    static const int64_t sizes[] = { 64, 128, 80, 96, 40, 127, 256 };
    static const int64_t small[] = { 1, 2, 33, 65, 200, 300 };
    static const int lengths[] = { 1, 3, 20, 70, 1000 };
    int turn = 0;
    for (size_t d = 0; d < sizeof sizes / sizeof sizes[0]; d++) {
        for (size_t t = 0; t < sizeof small / sizeof small[0]; t++, turn++)
            for (int f32 = 0; f32 < 2; f32++) {
                shape s = { 1 + turn % 2, small[t], 4, 2, sizes[d], f32, f32, 0,
                            lengths[turn % 5] };
                if (!few || turn % 9 == 0) check(s, 1);
            }
        shape one = { 2, 200, 4, 2, sizes[d], 0, 0, 0, 0 };
        check_one_document(one);
        one.f32 = one.grad_f32 = 1;
        check_one_document(one);
    }
    if (only_small) return;
    static const int long_lengths[] = { 30, 200, 700, 4000 };
    for (int i = 0; i < 16; i++) {
        shape s = { 2, i % 2 ? 4096 : 2049, 8, 2, sizes[i / 4], 0, 0, 0, long_lengths[i % 4] };
        check(s, 0);
    }
}

static void check_all(int only_small)
{
    static const int64_t sizes[] = { 64, 128, 80, 96, 8, 16, 40, 72, 100, 127, 3, 160, 256 };
    static const int64_t small[] = { 1, 2, 17, 63, 64, 65, 127, 128, 200 };
    static const int64_t heads[][3] = { { 1, 1, 1 }, { 2, 2, 1 }, { 1, 4, 4 }, { 3, 4, 1 },
                                        { 1, 7, 1 }, { 2, 8, 2 }, { 1, 8, 1 }, { 3, 2, 2 } };
    int turn = 0;
    for (size_t d = 0; d < sizeof sizes / sizeof sizes[0]; d++)
        for (size_t t = 0; t < sizeof small / sizeof small[0]; t++, turn++)
            for (int f32 = 0; f32 < 2; f32++) {
                const int64_t *g = heads[turn % 8];
                shape s = { g[0], small[t], g[1], g[2], sizes[d], f32, f32 ? 1 : turn / 8 % 2, 0, 0 };
                if (!few || turn % 9 == 0) check(s, 1);
            }
    static const shape skewed[] = { { 2, 130, 4, 2, 64, 0, 0, 1 }, { 1, 77, 2, 1, 128, 0, 1, 3 },
                                    { 1, 130, 2, 1, 32, 0, 0, 2 }, { 1, 65, 2, 2, 96, 1, 1, 1 } };
    for (int i = 0; i < 4; i++) check(skewed[i], 1);
    if (only_small) return;
    for (size_t d = 0; d < sizeof sizes / sizeof sizes[0]; d++) {
        shape s = { 2, 1000, 8, 2, sizes[d], 0, 0, 0, 0 };
        check(s, 0);
        s.T = 1024;
        s.grad_f32 = 1;
        check(s, 0);
    }
    static const shape large[] = { { 1, 4096, 8, 2, 128, 0, 0, 0 }, { 2, 4096, 7, 1, 64, 0, 0, 0 },
                                   { 1, 4095, 4, 4, 96, 0, 0, 0 }, { 3, 2049, 8, 8, 80, 0, 1, 0 },
                                   { 1, 40000, 1, 1, 64, 0, 0, 0 },
                                   { 65, 300, 8, 1, 64, 0, 0, 0 } };
    for (int i = 0; i < 6; i++) check(large[i], 0);
}

/* ---- speed ---- */

typedef ft_status starter(const ftk__att *a, void *stream);
typedef struct tiles { int D, phase; const char *name; starter *start; } tiles;

#define FORWARD(D, MT, WARPS, BN, ST)                                                              \
    { D, 0, "forward D " #D ": " #WARPS " warps x 16*" #MT " rows, " #BN " keys, stages " #ST,     \
      ftk__att_start_forward<D, MT, WARPS, BN, ST, 1> }
#define DKV(D, MT, WARPS, BM, ST)                                                                  \
    { D, 1, "dk, dv  D " #D ": " #WARPS " warps x 16*" #MT " keys, " #BM " rows, stages " #ST,     \
      ftk__att_start_dkv<D, MT, WARPS, BM, ST, 1> }
#define DQ(D, MT, WARPS, BN, ST)                                                                   \
    { D, 2, "dq      D " #D ": " #WARPS " warps x 16*" #MT " rows, " #BN " keys, stages " #ST,     \
      ftk__att_start_dq<D, MT, WARPS, BN, ST, 1> }

#define WG(D, N)                                                                                   \
    { D, 0, "forward D " #D ": wgmma, 128 rows, " #N " keys", ftk__att_start_wg_forward<D, N> },   \
    { D, 1, "dk, dv  D " #D ": wgmma, 128 keys, " #N " rows", ftk__att_start_wg_dkv<D, N> },       \
    { D, 2, "dq      D " #D ": wgmma, 128 rows, " #N " keys", ftk__att_start_wg_dq<D, N> }

static const tiles choices[] = {
    { 128, 0, "forward D 128: wgmma, 128 rows, 128 keys", ftk__att_start_wg_forward<128, 128> },
    WG(128, 64), WG(64, 64), WG(64, 128),
#ifndef FT_ATTENTION_DEFAULT_TILES
    FORWARD(128, 2, 4, 64, 1), FORWARD(128, 2, 4, 64, 2), FORWARD(128, 2, 4, 32, 2),
    FORWARD(128, 1, 8, 64, 2), FORWARD(128, 1, 4, 64, 1), FORWARD(128, 1, 8, 128, 1),
    FORWARD(64, 2, 4, 64, 1), FORWARD(64, 2, 4, 64, 2), FORWARD(64, 2, 4, 32, 2),
    FORWARD(64, 1, 8, 64, 2), FORWARD(64, 1, 4, 64, 2), FORWARD(64, 1, 4, 128, 1),
    DKV(128, 1, 4, 64, 1), DKV(128, 1, 4, 64, 2), DKV(128, 1, 4, 32, 2),
    DKV(128, 1, 8, 64, 2), DKV(128, 1, 8, 64, 1), DKV(128, 1, 8, 32, 2),
    DKV(64, 2, 4, 32, 2), DKV(64, 2, 4, 32, 1), DKV(64, 1, 4, 64, 2),
    DKV(64, 1, 8, 64, 2), DKV(64, 1, 4, 64, 1), DKV(64, 2, 8, 32, 2),
    DQ(128, 2, 4, 32, 1), DQ(128, 2, 4, 32, 2), DQ(128, 1, 4, 64, 1),
    DQ(128, 1, 8, 64, 2), DQ(128, 1, 8, 64, 1), DQ(128, 2, 4, 16, 2),
    DQ(64, 2, 4, 64, 2), DQ(64, 2, 4, 32, 2), DQ(64, 2, 4, 32, 1),
    DQ(64, 1, 8, 64, 2), DQ(64, 1, 4, 64, 2), DQ(64, 1, 4, 64, 1),
#endif
    { 0, 0, NULL, NULL }
};

static ft_status delta_alone(const ftk__att *a, void *stream)
{
    return ftk__att_start_delta(a, stream);
}

/* Milliseconds of a call: the mean of ten after three. */
static double time_of(problem *p, starter *start, int backward)
{
    cudaEvent_t from, to;
    float ms = 0;
    ftk__att a;
    CUDA(cudaEventCreate(&from));
    CUDA(cudaEventCreate(&to));
    p->call.backward = 1;
    p->call.workspace = data(&p->workspace);
    ftk__att_begin(&a, &p->call);
    p->call.backward = backward;
    for (int i = 0; i < 13; i++) {
        if (i == 3) CUDA(cudaEventRecord(from, 0));
        ft_status status = start ? start(&a, NULL) : backward ? ftk_attention_backward(&p->call)
                                                              : ftk_attention_forward(&p->call);
        if (status != FT_OK) return 1e9;
    }
    CUDA(cudaEventRecord(to, 0));
    CUDA(cudaEventSynchronize(to));
    CUDA(cudaEventElapsedTime(&ms, from, to));
    CUDA(cudaEventDestroy(from));
    CUDA(cudaEventDestroy(to));
    return ms / 10;
}

static void bench(shape s, int all_tiles)
{
    static const double share[3] = { 1, 2, 1.5 }; /* products of a phase, in units of forward's */
    const double flops = 2.0 * (double)(s.B * s.H) * (double)s.T * (double)(s.T * s.D);
    std::vector<double> qkv = noise(s.B * s.T * (s.H + 2 * s.K) * s.D, 1, 0, 1.5);
    std::vector<double> dout = noise(s.B * s.T * s.H * s.D, 2, 0, 1);
    problem p = create(s, qkv, dout);
    printf("B %lld T %lld H %lld K %lld D %lld bf16\n", (long long)s.B, (long long)s.T,
           (long long)s.H, (long long)s.K, (long long)s.D);
    double ms = time_of(&p, NULL, 0);
    printf("  forward  %8.3f ms %7.1f TFLOP/s\n", ms, flops / ms * 1e-9);
    ms = time_of(&p, NULL, 1);
    printf("  backward %8.3f ms %7.1f TFLOP/s (2.5 of forward's flops)\n", ms,
           2.5 * flops / ms * 1e-9);
    ms = time_of(&p, delta_alone, 1);
    printf("    delta  %8.3f ms\n", ms);
    for (const tiles *c = choices; c->name && all_tiles; c++)
        if (c->D == s.D) {
            ms = time_of(&p, c->start, 1);
            printf("    %s: %.3f ms %.1f TFLOP/s\n", c->name, ms,
                   share[c->phase] * flops / ms * 1e-9);
        }
    fflush(stdout);
    destroy(&p);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* the last line is the one before a crash */
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        static const shape shapes[] = { { 4, 4096, 32, 32, 128, 0, 0, 0 },
                                        { 4, 4096, 32, 8, 64, 0, 0, 0 },
                                        { 8, 1024, 16, 4, 64, 0, 0, 0 },
                                        { 4, 4096, 32, 8, 128, 0, 0, 0 },
                                        { 4, 4096, 16, 4, 96, 0, 0, 0 },
                                        { 4, 4096, 32, 8, 128, 0, 0, 0, 1000 } }; /* documents */
        for (int i = 0; i < 6; i++) bench(shapes[i], i < 3);
        return 0;
    }
    few = argc > 1 && strcmp(argv[1], "--few") == 0;
    const int only_small = few || (argc > 1 && strcmp(argv[1], "--small") == 0);
    check_documents(only_small);
    check_all(only_small);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
