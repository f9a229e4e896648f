/* ------------------------------------------------------------------------------------ >>attention

   Causal softmax attention with grouped kv heads, o = softmax(q k^T / sqrt(D)) v, forward and
   backward; what it computes and its layouts stand at the CPU kernel of the row.

     B sequences, T positions, H query heads, K kv heads, D head size, W = (H+2K) D
     qkv [B,T,W]   query head h at column h D, key head k at (H+k) D, value head k at (H+K+k) D
     o [B,T,H D]   lse fp32 [B,H,T], the log of the sum of a row's exponentials
     P             T rounded up to 256: row length of the workspace lse2, delta fp32 [B,H,P]

   Three versions. The simple one takes fp32 and bf16, any D <= 256, computes in fp32, and is what
   the others are tested against. The second is bf16, D <= 128, on mma.sync.m16n8k16 (sm_80 and
   newer), rounded up to a head size of 64, 80, 96 or 128 with zeros in shared memory. The third,
   bf16 on wgmma (sm_90a), takes head sizes up to 64 and from 97 to 128.

   Numerics: products of bf16 summed in fp32; the softmax in fp32 with base 2 exponentials, so the
   scale is log2(e) / sqrt(D); probabilities and ds are rounded to bf16 to be factors again.
   Every sum has one order, and no two blocks write the same element. */

#ifndef FT_CUDA
#define FT_CUDA
#endif
#include "femtotron.h"
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <string.h>

typedef __nv_bfloat16 ftk__bf16;

typedef struct ftk__att { /* one call, as its kernels see it */
    int64_t B, T, H, K, D, W, P;
    int64_t group;          /* heads whose blocks follow one another, see ftk__att_place */
    float scale, scale2;    /* 1 / sqrt(D), and that times log2(e) */
    const void *qkv, *dout;
    void *o, *dqkv;
    float *lse, *lse2, *delta;
    int f32, dout_f32, dqkv_f32; /* dtypes: 1 fp32, 0 bf16; f32 is that of qkv and o */
    int accumulate;              /* dqkv += instead of = */
} ftk__att;

#define FTK__ATT_ROUND 256       /* P is a multiple of this, and of every tile */
#define FTK__ATT_LOG2E 1.4426950408889634f

static __device__ __forceinline__ float ftk__att_get(const void *from, int f32, int64_t i)
{
    return f32 ? ((const float *)from)[i] : __bfloat162float(((const ftk__bf16 *)from)[i]);
}

static __device__ __forceinline__ void ftk__att_put(void *to, int f32, int add, int64_t i, float x)
{
    if (add) x += ftk__att_get(to, f32, i);
    if (f32) ((float *)to)[i] = x;
    else ((ftk__bf16 *)to)[i] = __float2bfloat16(x);
}

/* Two neighbours at once, i even and `to` aligned for it. */
static __device__ __forceinline__ void ftk__att_put2(void *to, int f32, int add, int64_t i, float x,
                                                     float y)
{
    if (add) {
        x += ftk__att_get(to, f32, i);
        y += ftk__att_get(to, f32, i + 1);
    }
    if (f32) *(float2 *)((float *)to + i) = make_float2(x, y);
    else *(__nv_bfloat162 *)((ftk__bf16 *)to + i) = __floats2bfloat162_rn(x, y);
}

/* Block i is tile i / n of head i % n among n = `group` heads (fewer in the last group): the heads
   of a group run together, so that what they read again stays in L2, and tile 0 of each, which
   callers make the one with most work, starts first. */
static __device__ __forceinline__ void ftk__att_place(const ftk__att &a, int64_t heads, int tiles,
                                                      int64_t *head, int *tile)
{
    int64_t i = blockIdx.x, first = i / (a.group * tiles) * a.group;
    int64_t n = heads - first < a.group ? heads - first : a.group;
    i -= first * tiles;
    *head = first + i % n;
    *tile = (int)(i / n);
}

/* ---- before both backwards: delta, and lse in base 2 ----

   delta[b,h,t] = sum over d of o do (Dao 2023, section 3.1), lse2 = lse log2(e). Beyond T lse2 is
   infinite and delta zero, so that such a row's probabilities and gradients are zero.
   Grid: 16 lanes a row of o, 16 rows a block, rows ordered (b, t, h) as o is; t runs to P.
   Moves 2 B T H D elements in, 8 B H P bytes out: bound by memory. */
static __global__ void __launch_bounds__(256) ftk__att_delta(ftk__att a)
{
    int64_t row = (int64_t)blockIdx.x * 16 + threadIdx.x / 16;
    int lane = threadIdx.x % 16;
    int64_t h = row % a.H, t = row / a.H % a.P, b = row / a.H / a.P;
    float sum = 0;
    if (b < a.B && t < a.T) {
        int64_t at = ((b * a.T + t) * a.H + h) * a.D;
        if (!a.f32 && !a.dout_f32 && a.D % 8 == 0 &&
            (((uintptr_t)a.o | (uintptr_t)a.dout) & 15) == 0) {
            for (int64_t d = lane * 8; d < a.D; d += 128) {
                uint4 x = *(const uint4 *)((const ftk__bf16 *)a.o + at + d);
                uint4 y = *(const uint4 *)((const ftk__bf16 *)a.dout + at + d);
                const __nv_bfloat162 *x2 = (const __nv_bfloat162 *)&x;
                const __nv_bfloat162 *y2 = (const __nv_bfloat162 *)&y;
                for (int j = 0; j < 4; j++) {
                    float2 u = __bfloat1622float2(x2[j]), v = __bfloat1622float2(y2[j]);
                    sum += u.x * v.x + u.y * v.y;
                }
            }
        } else {
            for (int64_t d = lane; d < a.D; d += 16)
                sum += ftk__att_get(a.o, a.f32, at + d) * ftk__att_get(a.dout, a.dout_f32, at + d);
        }
    }
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane != 0 || b >= a.B) return;
    float lse = t < a.T ? a.lse[(b * a.H + h) * a.T + t] : 0.0f;
    a.lse2[(b * a.H + h) * a.P + t] = t < a.T ? lse * FTK__ATT_LOG2E : INFINITY;
    a.delta[(b * a.H + h) * a.P + t] = sum;
}

/* ---- the simple version ----

   256 threads as 16 x 16; thread (y, x) has rows 2y, 2y+1 of a tile of 32, of the 32 x 32 products
   columns x and x+16, of a row of D elements those at x + 16 c, c < NC: D <= 16 NC. Tiles lie in
   shared memory in fp32, rows D | 1 apart, so that 16 rows are in 16 banks. */

enum { FTK__ATT_S = 32, FTK__ATT_SP = FTK__ATT_S + 1 };

/* Rows first.. of from[T, stride] (D elements each) to tile[32, D | 1]; zero beyond T. */
static __device__ void ftk__att_simple_load(float *tile, const void *from, int f32, int64_t at,
                                            int64_t stride, int64_t first, int64_t T, int D)
{
    for (int i = threadIdx.x; i < FTK__ATT_S * D; i += 256) {
        int r = i / D, d = i % D;
        tile[r * (D | 1) + d] =
            first + r < T ? ftk__att_get(from, f32, at + (first + r) * stride + d) : 0.0f;
    }
}

/* c[i][j] = sum over d of u[2y+i, d] v[x+16j, d]. */
static __device__ __forceinline__ void ftk__att_simple_dot(float c[2][2], const float *u,
                                                           const float *v, int D)
{
    int x = threadIdx.x % 16, y = threadIdx.x / 16, pitch = D | 1;
    c[0][0] = c[0][1] = c[1][0] = c[1][1] = 0;
    for (int d = 0; d < D; d++) {
        float u0 = u[2 * y * pitch + d], u1 = u[(2 * y + 1) * pitch + d];
        float v0 = v[x * pitch + d], v1 = v[(x + 16) * pitch + d];
        c[0][0] += u0 * v0;
        c[0][1] += u0 * v1;
        c[1][0] += u1 * v0;
        c[1][1] += u1 * v1;
    }
}

/* c[i][k] += sum over j of p[2y+i, j] v[j, x+16k]. */
template <int NC>
static __device__ __forceinline__ void ftk__att_simple_mix(float c[2][NC], const float *p,
                                                           const float *v, int D)
{
    int x = threadIdx.x % 16, y = threadIdx.x / 16, pitch = D | 1;
    for (int j = 0; j < FTK__ATT_S; j++) {
        float p0 = p[2 * y * FTK__ATT_SP + j], p1 = p[(2 * y + 1) * FTK__ATT_SP + j];
#pragma unroll
        for (int k = 0; k < NC; k++) {
            float w = x + 16 * k < D ? v[j * pitch + x + 16 * k] : 0.0f;
            c[0][k] += p0 * w;
            c[1][k] += p1 * w;
        }
    }
}

/* dqkv or o, rows first + 2y + i, elements x + 16k, times `by`. */
template <int NC>
static __device__ void ftk__att_simple_store(void *to, int f32, int add, int64_t at, int64_t stride,
                                             int64_t first, int64_t T, int D, float c[2][NC],
                                             float by0, float by1)
{
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int k = 0; k < NC; k++)
            if (first + 2 * y + i < T && x + 16 * k < D)
                ftk__att_put(to, f32, add, at + (first + 2 * y + i) * stride + x + 16 * k,
                             c[i][k] * (i ? by1 : by0));
}

/* Streaming softmax over tiles of keys from the left: key 0 is seen by every row, so that the
   running maximum m is finite from the first tile on.
   Grid: a block for each (query head, tile of 32 rows). 4 B H T^2 D / 2 flops on fp32 units. */
template <int NC>
static __global__ void __launch_bounds__(256) ftk__att_simple_forward(ftk__att a)
{
    extern __shared__ __align__(16) unsigned char ftk__att_shared[];
    const int D = (int)a.D, tiles = (int)((a.T + FTK__ATT_S - 1) / FTK__ATT_S);
    float *q = (float *)ftk__att_shared;                /* [32, D | 1] */
    float *k = q + FTK__ATT_S * (D | 1);                /* [32, D | 1] */
    float *v = k + FTK__ATT_S * (D | 1);                /* [32, D | 1] */
    float *p = v + FTK__ATT_S * (D | 1);                /* [32, 33] */
    int x = threadIdx.x % 16, y = threadIdx.x / 16, tile;
    int64_t bh;
    ftk__att_place(a, a.B * a.H, tiles, &bh, &tile);
    int64_t b = bh / a.H, h = bh % a.H, kv = h / (a.H / a.K), base = b * a.T * a.W;
    int64_t first = (int64_t)(tiles - 1 - tile) * FTK__ATT_S;
    float m[2] = { -INFINITY, -INFINITY }, sum[2] = { 0, 0 }, o[2][NC];
#pragma unroll
    for (int c = 0; c < NC; c++) o[0][c] = o[1][c] = 0;
    ftk__att_simple_load(q, a.qkv, a.f32, base + h * D, a.W, first, a.T, D);
    for (int64_t key = 0; key <= first; key += FTK__ATT_S) {
        float s[2][2];
        __syncthreads();
        ftk__att_simple_load(k, a.qkv, a.f32, base + (a.H + kv) * D, a.W, key, a.T, D);
        ftk__att_simple_load(v, a.qkv, a.f32, base + (a.H + a.K + kv) * D, a.W, key, a.T, D);
        __syncthreads();
        ftk__att_simple_dot(s, q, k, D);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = m[i], old;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                s[i][j] *= a.scale2;
                if (key + x + 16 * j > first + 2 * y + i) s[i][j] = -INFINITY;
                top = fmaxf(top, s[i][j]);
            }
            for (int step = 8; step > 0; step /= 2)
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            old = exp2f(m[i] - top);
            m[i] = top;
            s[i][0] = exp2f(s[i][0] - top);
            s[i][1] = exp2f(s[i][1] - top);
            sum[i] = sum[i] * old + s[i][0] + s[i][1];
            p[(2 * y + i) * FTK__ATT_SP + x] = s[i][0];
            p[(2 * y + i) * FTK__ATT_SP + x + 16] = s[i][1];
#pragma unroll
            for (int c = 0; c < NC; c++) o[i][c] *= old;
        }
        __syncwarp(); /* a row of p belongs to one warp */
        ftk__att_simple_mix<NC>(o, p, v, D);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        for (int step = 8; step > 0; step /= 2)
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], step);
    ftk__att_simple_store<NC>(a.o, a.f32, 0, (b * a.T * a.H + h) * D, a.H * D, first, a.T, D, o,
                              1 / sum[0], 1 / sum[1]);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (x == 0 && first + 2 * y + i < a.T)
            a.lse[bh * a.T + first + 2 * y + i] = m[i] / FTK__ATT_LOG2E + logf(sum[i]);
}

/* p = exp(s - lse), ds = p (dp - delta) of one element; zero where the row does not see the key. */
static __device__ __forceinline__ void ftk__att_unsoftmax(float *s, float *dp, int seen, float lse2,
                                                          float delta, float scale2)
{
    *s = seen ? exp2f(*s * scale2 - lse2) : 0.0f;
    *dp = *s * (*dp - delta);
}

/* dk = scale sum ds^T q, dv = sum p^T do over the queries that see the keys, in the order (query
   head of the group, position). Grid: a block for each (kv head, tile of 32 keys). */
template <int NC>
static __global__ void __launch_bounds__(256) ftk__att_simple_dkv(ftk__att a)
{
    extern __shared__ __align__(16) unsigned char ftk__att_shared[];
    const int D = (int)a.D, tiles = (int)((a.T + FTK__ATT_S - 1) / FTK__ATT_S);
    float *k = (float *)ftk__att_shared, *v = k + FTK__ATT_S * (D | 1); /* [32, D | 1] each */
    float *q = v + FTK__ATT_S * (D | 1), *g = q + FTK__ATT_S * (D | 1); /* g: do */
    float *p = g + FTK__ATT_S * (D | 1), *ds = p + FTK__ATT_S * FTK__ATT_SP; /* [32, 33] */
    int x = threadIdx.x % 16, y = threadIdx.x / 16, tile;
    int64_t bk;
    ftk__att_place(a, a.B * a.K, tiles, &bk, &tile);
    int64_t b = bk / a.K, kv = bk % a.K, base = b * a.T * a.W, key = (int64_t)tile * FTK__ATT_S;
    float dk[2][NC], dv[2][NC];
#pragma unroll
    for (int c = 0; c < NC; c++) dk[0][c] = dk[1][c] = dv[0][c] = dv[1][c] = 0;
    ftk__att_simple_load(k, a.qkv, a.f32, base + (a.H + kv) * D, a.W, key, a.T, D);
    ftk__att_simple_load(v, a.qkv, a.f32, base + (a.H + a.K + kv) * D, a.W, key, a.T, D);
    for (int64_t h = kv * (a.H / a.K); h < (kv + 1) * (a.H / a.K); h++)
        for (int64_t first = key; first < a.T; first += FTK__ATT_S) {
            float s[2][2], dp[2][2];
            __syncthreads();
            ftk__att_simple_load(q, a.qkv, a.f32, base + h * D, a.W, first, a.T, D);
            ftk__att_simple_load(g, a.dout, a.dout_f32, (b * a.T * a.H + h) * D, a.H * D, first,
                                 a.T, D);
            __syncthreads();
            ftk__att_simple_dot(s, k, q, D);
            ftk__att_simple_dot(dp, v, g, D);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    int64_t t = first + x + 16 * j, row = (b * a.H + h) * a.P + t;
                    ftk__att_unsoftmax(&s[i][j], &dp[i][j], key + 2 * y + i <= t, a.lse2[row],
                                       a.delta[row], a.scale2);
                    p[(2 * y + i) * FTK__ATT_SP + x + 16 * j] = s[i][j];
                    ds[(2 * y + i) * FTK__ATT_SP + x + 16 * j] = dp[i][j];
                }
            __syncwarp();
            ftk__att_simple_mix<NC>(dv, p, g, D);
            ftk__att_simple_mix<NC>(dk, ds, q, D);
        }
    ftk__att_simple_store<NC>(a.dqkv, a.dqkv_f32, a.accumulate, base + (a.H + kv) * D, a.W, key,
                              a.T, D, dk, a.scale, a.scale);
    ftk__att_simple_store<NC>(a.dqkv, a.dqkv_f32, a.accumulate, base + (a.H + a.K + kv) * D, a.W,
                              key, a.T, D, dv, 1, 1);
}

/* dq = scale sum ds k over the keys seen. Grid: a block for each (query head, tile of 32 rows). */
template <int NC>
static __global__ void __launch_bounds__(256) ftk__att_simple_dq(ftk__att a)
{
    extern __shared__ __align__(16) unsigned char ftk__att_shared[];
    const int D = (int)a.D, tiles = (int)((a.T + FTK__ATT_S - 1) / FTK__ATT_S);
    float *k = (float *)ftk__att_shared, *v = k + FTK__ATT_S * (D | 1); /* [32, D | 1] each */
    float *q = v + FTK__ATT_S * (D | 1), *g = q + FTK__ATT_S * (D | 1); /* g: do */
    float *ds = g + FTK__ATT_S * (D | 1);                               /* [32, 33] */
    int x = threadIdx.x % 16, y = threadIdx.x / 16, tile;
    int64_t bh;
    ftk__att_place(a, a.B * a.H, tiles, &bh, &tile);
    int64_t b = bh / a.H, h = bh % a.H, kv = h / (a.H / a.K), base = b * a.T * a.W;
    int64_t first = (int64_t)(tiles - 1 - tile) * FTK__ATT_S;
    float dq[2][NC];
#pragma unroll
    for (int c = 0; c < NC; c++) dq[0][c] = dq[1][c] = 0;
    ftk__att_simple_load(q, a.qkv, a.f32, base + h * D, a.W, first, a.T, D);
    ftk__att_simple_load(g, a.dout, a.dout_f32, (b * a.T * a.H + h) * D, a.H * D, first, a.T, D);
    for (int64_t key = 0; key <= first; key += FTK__ATT_S) {
        float s[2][2], dp[2][2];
        __syncthreads();
        ftk__att_simple_load(k, a.qkv, a.f32, base + (a.H + kv) * D, a.W, key, a.T, D);
        ftk__att_simple_load(v, a.qkv, a.f32, base + (a.H + a.K + kv) * D, a.W, key, a.T, D);
        __syncthreads();
        ftk__att_simple_dot(s, q, k, D);
        ftk__att_simple_dot(dp, g, v, D);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int64_t t = first + 2 * y + i, row = bh * a.P + t;
                ftk__att_unsoftmax(&s[i][j], &dp[i][j], key + x + 16 * j <= t, a.lse2[row],
                                   a.delta[row], a.scale2);
                ds[(2 * y + i) * FTK__ATT_SP + x + 16 * j] = dp[i][j];
            }
        __syncwarp();
        ftk__att_simple_mix<NC>(dq, ds, k, D);
    }
    ftk__att_simple_store<NC>(a.dqkv, a.dqkv_f32, a.accumulate, base + h * D, a.W, first, a.T, D,
                              dq, a.scale, a.scale);
}

/* ---- instructions of the fast version ----

   A warp multiplies C[16,8] += A[16,16] B[16,8]. With g = lane / 4, t = lane % 4 a lane holds
     A: (g, 2t..2t+1), (g+8, 2t..), (g, 2t+8..), (g+8, 2t+8..), two bf16 to a register
     B: (2t..2t+1, g), (2t+8.., g)
     C: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)
   so C of two neighbouring 16 x 8 tiles, rounded to pairs of bf16, is A of a 16 x 16 tile.
   ldmatrix loads four 8 x 8 tiles, tile i from the row addresses in lanes 8i..8i+7. */

static __device__ __forceinline__ uint32_t ftk__att_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* r[i] = (row g, columns 2t, 2t+1) of tile i. */
static __device__ __forceinline__ void ftk__att_ldm(uint32_t r[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

/* r[i] = (rows 2t, 2t+1, column g) of tile i. */
static __device__ __forceinline__ void ftk__att_ldm_trans(uint32_t r[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

static __device__ __forceinline__ void ftk__att_mma(float c[4], const uint32_t a[4], uint32_t b0,
                                                    uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* 16 bytes from global to shared memory, or 16 zero bytes where `valid` is 0. */
static __device__ __forceinline__ void ftk__att_copy16(uint32_t to, const void *from, int valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

static __device__ __forceinline__ void ftk__att_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

static __device__ __forceinline__ void ftk__att_wait(void) /* for all copies of this thread */
{
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

static __device__ __forceinline__ float ftk__att_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ uint32_t ftk__att_pack(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

/* ---- tiles in shared memory ----

   A tile is [rows][DP] bf16, rows DP + 8 apart: an odd number of 16-byte units, so that the eight
   rows of an 8 x 8 tile begin in eight different groups of four banks. */

/* Rows first.. of from[T, stride], D elements each, to tile[ROWS][DP + 8], zeros beyond T and D.
   VEC: rows are 16-byte aligned and D a multiple of 8; otherwise element by element. */
template <int DP, int ROWS, int THREADS, int VEC>
static __device__ __forceinline__ void ftk__att_load(ftk__bf16 *tile, const ftk__bf16 *from,
                                                     int64_t stride, int first, int T, int D)
{
    if (VEC && THREADS % (DP / 8) == 0) { /* a thread stays in its column */
        const int UNITS = DP / 8, STEP = THREADS / UNITS;
        const int r = threadIdx.x / UNITS, c = threadIdx.x % UNITS;
        const int left = c * 8 < D ? T - first - r : 0;
        const ftk__bf16 *at = from + (int64_t)(first + r) * stride + c * 8;
        uint32_t to = ftk__att_address(tile + r * (DP + 8) + c * 8);
#pragma unroll
        for (int i = 0; i < ROWS; i += STEP, at += STEP * stride)
            if (ROWS % STEP == 0 || i + r < ROWS)
                ftk__att_copy16(to + (uint32_t)(i * (DP + 8)) * 2, i < left ? at : from, i < left);
    } else if (VEC) {
        const int UNITS = DP / 8;
        uint32_t to = ftk__att_address(tile);
#pragma unroll
        for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
            int r = i / UNITS, c = i % UNITS, valid = first + r < T && c * 8 < D;
            ftk__att_copy16(to + (uint32_t)(r * (DP + 8) + c * 8) * 2,
                            valid ? from + (first + r) * stride + c * 8 : from, valid);
        }
    } else {
        for (int i = threadIdx.x; i < ROWS * DP; i += THREADS) {
            int r = i / DP, d = i % DP;
            tile[r * (DP + 8) + d] = first + r < T && d < D ? from[(first + r) * stride + d]
                                                            : __float2bfloat16(0.0f);
        }
    }
}

/* Where a lane points ldmatrix, in bytes from the start of a 16 x 16 block of a tile:
     rows      lane % 16, columns 8 (lane / 16): A [m][k] plain, and B stored [k][n] transposed
     columns   rows lane % 8 + 8 (lane / 16), columns 8 (lane / 8 % 2): B stored [n][k] plain
   Either gives B of two neighbouring 16 x 8 tiles: registers 0, 1 and 2, 3. */
static __device__ __forceinline__ uint32_t ftk__att_lane_rows(int lane, int pitch)
{
    return (uint32_t)(lane % 16 * pitch + lane / 16 * 8) * 2;
}

static __device__ __forceinline__ uint32_t ftk__att_lane_columns(int lane, int pitch)
{
    return (uint32_t)((lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8) * 2;
}

/* c[16 MT, N] = u v^T, u [16 MT, DP] and v [N, DP] in shared memory; addresses are the lane's. */
template <int DP, int MT, int N>
static __device__ __forceinline__ void ftk__att_dot(float c[MT][N / 8][4], uint32_t u, uint32_t v)
{
    const int PITCH = DP + 8;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[i][n][e] = 0;
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        uint32_t x[MT][4], y[4];
#pragma unroll
        for (int i = 0; i < MT; i++) ftk__att_ldm(x[i], u + (i * 16 * PITCH + k * 16) * 2);
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            ftk__att_ldm(y, v + (n * 16 * PITCH + k * 16) * 2);
#pragma unroll
            for (int i = 0; i < MT; i++) {
                ftk__att_mma(c[i][2 * n], x[i], y[0], y[1]);
                ftk__att_mma(c[i][2 * n + 1], x[i], y[2], y[3]);
            }
        }
    }
}

/* c[16 MT, DP] += p v, p [16 MT, N] in registers, rounded to bf16, v [N, DP] in shared memory. */
template <int DP, int MT, int N>
static __device__ __forceinline__ void ftk__att_mix(float c[MT][DP / 8][4], float p[MT][N / 8][4],
                                                    uint32_t v)
{
    const int PITCH = DP + 8;
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        uint32_t x[MT][4], y[4];
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float *pair = &p[i][2 * k + e / 2][e % 2 * 2];
                x[i][e] = ftk__att_pack(pair[0], pair[1]);
            }
#pragma unroll
        for (int n = 0; n < DP / 16; n++) {
            ftk__att_ldm_trans(y, v + (k * 16 * PITCH + n * 16) * 2);
#pragma unroll
            for (int i = 0; i < MT; i++) {
                ftk__att_mma(c[i][2 * n], x[i], y[0], y[1]);
                ftk__att_mma(c[i][2 * n + 1], x[i], y[2], y[3]);
            }
        }
    }
}

template <int MT, int N>
static __device__ __forceinline__ void ftk__att_zero(float c[MT][N / 8][4])
{
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[i][n][e] = 0;
}

/* Rows first.. of c to to[T, stride], each times `by`, where they are below T and D. */
template <int DP, int MT, int VEC>
static __device__ __forceinline__ void ftk__att_store(void *to, int f32, int add, int64_t at,
                                                      int64_t stride, int first, int T, int D,
                                                      float c[MT][DP / 8][4],
                                                      const float by[MT][2])
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = first + i * 16 + half * 8 + g;
            if (row >= T) continue;
#pragma unroll
            for (int n = 0; n < DP / 8; n++) {
                int d = n * 8 + 2 * t;
                int64_t place = at + row * stride + d;
                float left = c[i][n][2 * half] * by[i][half];
                float right = c[i][n][2 * half + 1] * by[i][half];
                if (VEC) {
                    if (d < D) ftk__att_put2(to, f32, add, place, left, right);
                } else {
                    if (d < D) ftk__att_put(to, f32, add, place, left);
                    if (d + 1 < D) ftk__att_put(to, f32, add, place + 1, right);
                }
            }
        }
}

/* ---- forward ----

   Dao 2023, algorithm 1. A block of WARPS warps owns BM = 16 MT WARPS query rows of a head, a warp
   16 MT of them with its o [16 MT, DP] in registers, and meets tiles of BN keys from the left: key
   0 is seen by every row, so that the running maximum is finite from the first tile on, and only
   tiles that reach beyond a warp's first row are masked, those beyond its last row skipped.
   STAGES 2: tile j+1 arrives while tile j is computed. STAGES 1: v arrives during q k^T, the next k
   during p v, in half the shared memory.

     shared   q [BM][DP+8]   k [STAGES][BN][DP+8]   v [STAGES][BN][DP+8]
     grid     a block for each (query head, tile of BM rows), last tile first
     bytes    a block reads its rows once and up to T keys and values: 4 D bytes a key
     flops    2 B H T^2 D; a tile moves 2 (BM + 2 WARPS BN) DP bytes from shared memory to
              registers for 4 BM BN DP flops: MT = 2 halves the traffic that bounds MT = 1 */
template <int DP, int MT, int WARPS, int BN, int STAGES, int VEC>
static __global__ void __launch_bounds__(WARPS * 32) ftk__att_forward(ftk__att a)
{
    extern __shared__ __align__(16) unsigned char ftk__att_shared[];
    const int BM = 16 * MT * WARPS, PITCH = DP + 8, THREADS = WARPS * 32;
    ftk__bf16 *q = (ftk__bf16 *)ftk__att_shared;
    ftk__bf16 *k = q + BM * PITCH, *v = k + STAGES * BN * PITCH;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int T = (int)a.T, D = (int)a.D, tiles = (T + BM - 1) / BM;
    int64_t bh;
    int tile;
    ftk__att_place(a, a.B * a.H, tiles, &bh, &tile);
    const int first = (tiles - 1 - tile) * BM, row = first + (int)threadIdx.x / 32 * 16 * MT;
    const int64_t b = bh / a.H, h = bh % a.H, kv = h / (a.H / a.K);
    const ftk__bf16 *base = (const ftk__bf16 *)a.qkv + b * T * a.W;
    const ftk__bf16 *keys = base + (a.H + kv) * D, *values = keys + a.K * D;
    const int last = first + BM < T ? first + BM : T, steps = (last + BN - 1) / BN;

    const uint32_t at_q = ftk__att_address(q + (row - first) * PITCH) +
                          ftk__att_lane_rows(lane, PITCH);
    const uint32_t at_k = ftk__att_address(k) + ftk__att_lane_columns(lane, PITCH);
    const uint32_t at_v = ftk__att_address(v) + ftk__att_lane_rows(lane, PITCH);

    float o[MT][DP / 8][4], top[MT][2], sum[MT][2];
    ftk__att_zero<MT, DP>(o);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            top[i][half] = -INFINITY;
            sum[i][half] = 0;
        }

    ftk__att_load<DP, BM, THREADS, VEC>(q, base + h * D, a.W, first, T, D);
    ftk__att_load<DP, BN, THREADS, VEC>(k, keys, a.W, 0, T, D);
    if (STAGES == 2) ftk__att_load<DP, BN, THREADS, VEC>(v, values, a.W, 0, T, D);
    ftk__att_commit();

    for (int j = 0; j < steps; j++) {
        const int key = j * BN, now = STAGES == 2 ? j % 2 * BN * PITCH : 0;
        const int next = STAGES == 2 ? (j + 1) % 2 * BN * PITCH : 0;
        const bool active = key <= row + 16 * MT - 1;
        float s[MT][BN / 8][4];
        ftk__att_wait();
        __syncthreads(); /* the tile is here, and the one before is no longer read */
        if (STAGES == 2) {
            if (j + 1 < steps) {
                ftk__att_load<DP, BN, THREADS, VEC>(k + next, keys, a.W, key + BN, T, D);
                ftk__att_load<DP, BN, THREADS, VEC>(v + next, values, a.W, key + BN, T, D);
            }
        } else {
            ftk__att_load<DP, BN, THREADS, VEC>(v, values, a.W, key, T, D);
        }
        ftk__att_commit();
        if (active) ftk__att_dot<DP, MT, BN>(s, at_q, at_k + now * 2);
        if (STAGES == 1) {
            ftk__att_wait();
            __syncthreads(); /* v is here, and k no longer read */
            if (j + 1 < steps)
                ftk__att_load<DP, BN, THREADS, VEC>(k, keys, a.W, key + BN, T, D);
            ftk__att_commit();
        }
        if (!active) continue;
        if (key + BN - 1 > row) {
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (key + n * 8 + 2 * t + e % 2 > row + i * 16 + e / 2 * 8 + g)
                            s[i][n][e] = -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) { /* row i * 16 + half * 8 + g, in four lanes */
                float high = top[i][half], add = 0;
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
                    high = fmaxf(high, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
                high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
                high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
                const float old = ftk__att_exp2((top[i][half] - high) * a.scale2);
                const float less = high * a.scale2;
                top[i][half] = high;
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        s[i][n][e] = ftk__att_exp2(s[i][n][e] * a.scale2 - less);
                        add += s[i][n][e];
                    }
                sum[i][half] = sum[i][half] * old + add;
#pragma unroll
                for (int n = 0; n < DP / 8; n++) {
                    o[i][n][2 * half] *= old;
                    o[i][n][2 * half + 1] *= old;
                }
            }
        ftk__att_mix<DP, MT, BN>(o, s, at_v + now * 2);
    }

    float by[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int to = row + i * 16 + half * 8 + g;
            float all = sum[i][half];
            all += __shfl_xor_sync(0xffffffffu, all, 1);
            all += __shfl_xor_sync(0xffffffffu, all, 2);
            by[i][half] = 1 / all;
            if (t == 0 && to < T) a.lse[bh * T + to] = top[i][half] * a.scale + logf(all);
        }
    ftk__att_store<DP, MT, VEC>(a.o, 0, 0, (b * T * a.H + h) * D, a.H * D, row, T, D, o, by);
}

/* ---- backward: dk and dv ----

   A block owns BN = 16 MT WARPS keys of a kv head, a warp 16 MT of them with its dk and dv in
   registers, and meets tiles of BM query rows of each query head of the group in turn:
     s^T = k q^T,  p^T = exp2(scale2 s^T - lse2),  dv += p^T do
     dp^T = v do^T,  ds^T = p^T (dp^T - delta),  dk += ds^T q,  at last times the scale
   p^T and ds^T go from the results of one product to the factors of the next in registers.

     shared   k, v [BN][DP+8]   q, do [STAGES][BM][DP+8]   lse2, delta [STAGES][BM]
     grid     a block for each (kv head, tile of BN keys), tile 0 first: most rows see it
     bytes    a block reads its keys and values once, and 4 D bytes a query row that sees them
     flops    4 of the 5 products of the backward, 4 B H T^2 D */
template <int DP, int MT, int WARPS, int BM, int STAGES, int VEC>
static __global__ void __launch_bounds__(WARPS * 32) ftk__att_dkv(ftk__att a)
{
    extern __shared__ __align__(16) unsigned char ftk__att_shared[];
    const int BN = 16 * MT * WARPS, PITCH = DP + 8, THREADS = WARPS * 32;
    ftk__bf16 *k = (ftk__bf16 *)ftk__att_shared, *v = k + BN * PITCH;
    ftk__bf16 *q = v + BN * PITCH, *dout = q + STAGES * BM * PITCH;
    float *lse2 = (float *)(dout + STAGES * BM * PITCH), *delta = lse2 + STAGES * BM;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int T = (int)a.T, D = (int)a.D;
    int64_t bk;
    int tile;
    ftk__att_place(a, a.B * a.K, (T + BN - 1) / BN, &bk, &tile);
    const int first = tile * BN, key = first + (int)threadIdx.x / 32 * 16 * MT;
    const int64_t b = bk / a.K, kv = bk % a.K, rep = a.H / a.K;
    const ftk__bf16 *base = (const ftk__bf16 *)a.qkv + b * T * a.W;
    const ftk__bf16 *keys = base + (a.H + kv) * D, *grads = (const ftk__bf16 *)a.dout;
    const int begin = first / BM, count = (T + BM - 1) / BM - begin; /* tiles that see a key */
    const int64_t steps = rep * count;

    const uint32_t at_k = ftk__att_address(k + (key - first) * PITCH) +
                          ftk__att_lane_rows(lane, PITCH);
    const uint32_t at_v = at_k + BN * PITCH * 2;
    const uint32_t at_q = ftk__att_address(q), at_do = ftk__att_address(dout);
    const uint32_t columns = ftk__att_lane_columns(lane, PITCH);
    const uint32_t rows = ftk__att_lane_rows(lane, PITCH);

    float dk[MT][DP / 8][4], dv[MT][DP / 8][4];
    ftk__att_zero<MT, DP>(dk);
    ftk__att_zero<MT, DP>(dv);
    ftk__att_load<DP, BN, THREADS, VEC>(k, keys, a.W, first, T, D);
    ftk__att_load<DP, BN, THREADS, VEC>(v, keys + a.K * D, a.W, first, T, D);

    /* Step i, of query head i / count of the group and its tile i % count, is copied at the top of
       step i - 1 (STAGES 2) or of its own (STAGES 1). */
    int m = begin;
    for (int64_t i = STAGES == 2 ? -1 : 0, next = 0; i < steps; i++) {
        ftk__att_wait();
        __syncthreads();
        if (next < steps) {
            const int64_t h = kv * rep + next / count;
            const int stage = STAGES == 2 ? (int)(next % 2) : 0;
            const int from = (begin + (int)(next % count)) * BM;
            const float *stats = a.lse2 + (b * a.H + h) * a.P + from;
            ftk__att_load<DP, BM, THREADS, VEC>(q + stage * BM * PITCH, base + h * D, a.W, from, T,
                                                D);
            ftk__att_load<DP, BM, THREADS, VEC>(dout + stage * BM * PITCH,
                                                grads + (b * T * a.H + h) * D, a.H * D, from, T, D);
            for (int u = threadIdx.x; u < BM / 4; u += THREADS) {
                ftk__att_copy16(ftk__att_address(lse2 + stage * BM + u * 4), stats + u * 4, 1);
                ftk__att_copy16(ftk__att_address(delta + stage * BM + u * 4),
                                stats + (a.delta - a.lse2) + u * 4, 1);
            }
            next++;
        }
        ftk__att_commit();
        if (STAGES == 1) {
            ftk__att_wait();
            __syncthreads();
        }
        if (i < 0) continue;
        const int stage = STAGES == 2 ? (int)(i % 2) : 0, row = m * BM;
        if (++m == begin + count) m = begin;
        if (row + BM - 1 < key) continue; /* no row of this tile sees a key of this warp */
        const uint32_t shift = (uint32_t)(stage * BM * PITCH) * 2;
        const float *row_lse2 = lse2 + stage * BM + 2 * t, *row_delta = delta + stage * BM + 2 * t;
        float s[MT][BM / 8][4], dp[MT][BM / 8][4];
        ftk__att_dot<DP, MT, BM>(s, at_k, at_q + shift + columns);
#pragma unroll
        for (int n = 0; n < BM / 8; n++) {
            const float2 l = *(const float2 *)(row_lse2 + n * 8);
#pragma unroll
            for (int r = 0; r < MT; r++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[r][n][e] = ftk__att_exp2(s[r][n][e] * a.scale2 - (e % 2 ? l.y : l.x));
        }
        if (row < key + 16 * MT - 1) {
#pragma unroll
            for (int r = 0; r < MT; r++)
#pragma unroll
                for (int n = 0; n < BM / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (key + r * 16 + e / 2 * 8 + g > row + n * 8 + 2 * t + e % 2)
                            s[r][n][e] = 0;
        }
        ftk__att_mix<DP, MT, BM>(dv, s, at_do + shift + rows);
        ftk__att_dot<DP, MT, BM>(dp, at_v, at_do + shift + columns);
#pragma unroll
        for (int n = 0; n < BM / 8; n++) {
            const float2 l = *(const float2 *)(row_delta + n * 8);
#pragma unroll
            for (int r = 0; r < MT; r++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[r][n][e] *= dp[r][n][e] - (e % 2 ? l.y : l.x);
        }
        ftk__att_mix<DP, MT, BM>(dk, s, at_q + shift + rows);
    }

    float by[MT][2];
    const int64_t place = b * T * a.W + (a.H + kv) * D;
#pragma unroll
    for (int i = 0; i < MT; i++) by[i][0] = by[i][1] = a.scale;
    ftk__att_store<DP, MT, VEC>(a.dqkv, a.dqkv_f32, a.accumulate, place, a.W, key, T, D, dk, by);
#pragma unroll
    for (int i = 0; i < MT; i++) by[i][0] = by[i][1] = 1;
    ftk__att_store<DP, MT, VEC>(a.dqkv, a.dqkv_f32, a.accumulate, place + a.K * D, a.W, key, T, D,
                                dv, by);
}

/* ---- backward: dq ----

   A block owns BM = 16 MT WARPS query rows, as in forward, and forms s, p and ds a second time:
     s = q k^T,  p = exp2(scale2 s - lse2),  dp = do v^T,  ds = p (dp - delta),  dq += ds k
   Two products more in exchange for a sum over keys that never leaves the registers: no partial
   sums in memory, no order between blocks.

     shared   q, do [BM][DP+8]   k, v [STAGES][BN][DP+8]
     grid     a block for each (query head, tile of BM rows), last tile first
     bytes    as forward     flops   3 B H T^2 D */
template <int DP, int MT, int WARPS, int BN, int STAGES, int VEC>
static __global__ void __launch_bounds__(WARPS * 32) ftk__att_dq(ftk__att a)
{
    extern __shared__ __align__(16) unsigned char ftk__att_shared[];
    const int BM = 16 * MT * WARPS, PITCH = DP + 8, THREADS = WARPS * 32;
    ftk__bf16 *q = (ftk__bf16 *)ftk__att_shared, *dout = q + BM * PITCH;
    ftk__bf16 *k = dout + BM * PITCH, *v = k + STAGES * BN * PITCH;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int T = (int)a.T, D = (int)a.D, tiles = (T + BM - 1) / BM;
    int64_t bh;
    int tile;
    ftk__att_place(a, a.B * a.H, tiles, &bh, &tile);
    const int first = (tiles - 1 - tile) * BM, row = first + (int)threadIdx.x / 32 * 16 * MT;
    const int64_t b = bh / a.H, h = bh % a.H, kv = h / (a.H / a.K);
    const ftk__bf16 *base = (const ftk__bf16 *)a.qkv + b * T * a.W;
    const ftk__bf16 *keys = base + (a.H + kv) * D, *values = keys + a.K * D;
    const int last = first + BM < T ? first + BM : T, steps = (last + BN - 1) / BN;

    const uint32_t at_q = ftk__att_address(q + (row - first) * PITCH) +
                          ftk__att_lane_rows(lane, PITCH);
    const uint32_t at_do = at_q + BM * PITCH * 2;
    const uint32_t at_k = ftk__att_address(k), at_v = ftk__att_address(v);
    const uint32_t columns = ftk__att_lane_columns(lane, PITCH);
    const uint32_t rows = ftk__att_lane_rows(lane, PITCH);

    float dq[MT][DP / 8][4], lse2[MT][2], delta[MT][2];
    ftk__att_zero<MT, DP>(dq);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t place = bh * a.P + row + i * 16 + half * 8 + g;
            lse2[i][half] = a.lse2[place];
            delta[i][half] = a.delta[place];
        }

    ftk__att_load<DP, BM, THREADS, VEC>(q, base + h * D, a.W, first, T, D);
    ftk__att_load<DP, BM, THREADS, VEC>(dout, (const ftk__bf16 *)a.dout + (b * T * a.H + h) * D,
                                        a.H * D, first, T, D);
    for (int j = STAGES == 2 ? -1 : 0, next = 0; j < steps; j++) {
        ftk__att_wait();
        __syncthreads();
        if (next < steps) {
            const int stage = STAGES == 2 ? next % 2 * BN * PITCH : 0;
            ftk__att_load<DP, BN, THREADS, VEC>(k + stage, keys, a.W, next * BN, T, D);
            ftk__att_load<DP, BN, THREADS, VEC>(v + stage, values, a.W, next * BN, T, D);
            next++;
        }
        ftk__att_commit();
        if (STAGES == 1) {
            ftk__att_wait();
            __syncthreads();
        }
        const int key = j * BN;
        if (j < 0 || key > row + 16 * MT - 1) continue;
        const uint32_t shift = STAGES == 2 ? (uint32_t)(j % 2 * BN * PITCH) * 2 : 0;
        float s[MT][BN / 8][4], dp[MT][BN / 8][4];
        ftk__att_dot<DP, MT, BN>(s, at_q, at_k + shift + columns);
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[i][n][e] = ftk__att_exp2(s[i][n][e] * a.scale2 - lse2[i][e / 2]);
        if (key + BN - 1 > row) {
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (key + n * 8 + 2 * t + e % 2 > row + i * 16 + e / 2 * 8 + g)
                            s[i][n][e] = 0;
        }
        ftk__att_dot<DP, MT, BN>(dp, at_do, at_v + shift + columns);
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[i][n][e] *= dp[i][n][e] - delta[i][e / 2];
        ftk__att_mix<DP, MT, BN>(dq, s, at_k + shift + rows);
    }

    float by[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++) by[i][0] = by[i][1] = a.scale;
    ftk__att_store<DP, MT, VEC>(a.dqkv, a.dqkv_f32, a.accumulate, b * T * a.W + h * D, a.W, row, T,
                                D, dq, by);
}

/* ---- Hopper: instructions ----

   wgmma (sm_90a): four warps, the threads of a warpgroup, multiply C[64,N] += A[64,16] B[16,N]
   asynchronously. Warp w has rows 16w.. of C, 8 columns to four registers as C of mma.sync, and of
   A, where A is in registers, as A of mma.sync. A or B in shared memory is named by a descriptor.

   A tile is [DP / 64][rows][64] bf16, aligned to 1024 bytes, rows of 128 bytes in which the 16-byte
   unit c of row r is at place c ^ (r % 8): the 128-byte swizzle. The same tile serves
     [m or n][k], the product over its columns: eight rows to the next eight 1024 bytes;
                  16 columns further are 32 bytes, 64 columns rows * 128
     [k][n],      the product over its rows ("transposed"): 64 columns to the next 64 rows * 128
                  bytes, 8 rows to the next 8 1024 bytes; 16 rows further are 2048 bytes.
   Shared memory written by cp.async is made visible to wgmma by a proxy fence of each writer before
   the barrier. Accumulators are not touched between issue and wait. */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FTK__ATT_WGMMA
#endif

#ifdef FTK__ATT_WGMMA
#define FTK__ATT_C8(i)                                                                             \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]),    \
    "+f"(c[i + 6]), "+f"(c[i + 7])

/* ss: A [m][k] and B [n][k] in shared memory, C = with add 0. rs: A in registers, B [k][n]. */
static __device__ __forceinline__ void ftk__att_wg_ss64(float *c, uint64_t a, uint64_t b, int add)
{
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, p, 1, 1, 0, 0; }\n"
                 : FTK__ATT_C8(0), FTK__ATT_C8(8), FTK__ATT_C8(16), FTK__ATT_C8(24)
                 : "l"(a), "l"(b), "r"(add));
}

static __device__ __forceinline__ void ftk__att_wg_ss128(float *c, uint64_t a, uint64_t b, int add)
{
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, p, 1, 1, 0, 0; }\n"
                 : FTK__ATT_C8(0), FTK__ATT_C8(8), FTK__ATT_C8(16), FTK__ATT_C8(24),
                   FTK__ATT_C8(32), FTK__ATT_C8(40), FTK__ATT_C8(48), FTK__ATT_C8(56)
                 : "l"(a), "l"(b), "r"(add));
}

static __device__ __forceinline__ void ftk__att_wg_rs64(float *c, const uint32_t *a, uint64_t b)
{
    asm volatile("{\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1; }\n"
                 : FTK__ATT_C8(0), FTK__ATT_C8(8), FTK__ATT_C8(16), FTK__ATT_C8(24)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void ftk__att_wg_rs128(float *c, const uint32_t *a, uint64_t b)
{
    asm volatile("{\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1; }\n"
                 : FTK__ATT_C8(0), FTK__ATT_C8(8), FTK__ATT_C8(16), FTK__ATT_C8(24),
                   FTK__ATT_C8(32), FTK__ATT_C8(40), FTK__ATT_C8(48), FTK__ATT_C8(56)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void ftk__att_wg_fence(void) /* registers before an issue */
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void ftk__att_wg_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most PENDING groups run. */
template <int PENDING> static __device__ __forceinline__ void ftk__att_wg_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

/* The compiler moves no use of c across this place. */
template <int N> static __device__ __forceinline__ void ftk__att_wg_hold(float *c)
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i]) :: "memory");
}

static __device__ __forceinline__ void ftk__att_proxy_fence(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- Hopper: tiles ---- */

/* Bits 0-13 address, 16-29 stride between 64 columns, 32-45 between 8 rows, all / 16; 62-63
   swizzle, 1 for 128 bytes. */
static __device__ __forceinline__ uint64_t ftk__att_wg_tile(uint32_t at, int rows)
{
    return (uint64_t)((at & 0x3ffffu) >> 4) | (uint64_t)(rows * 128 / 16) << 16 |
           (uint64_t)(1024 / 16) << 32 | (uint64_t)1 << 62;
}

/* c[64, N] = u v^T over DP columns; u's descriptor at its 64 rows, UROWS and VROWS rows a tile. */
template <int DP, int N, int UROWS, int VROWS>
static __device__ __forceinline__ void ftk__att_wg_dot(float *c, uint64_t u, uint64_t v)
{
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        const uint64_t x = u + (uint64_t)(k / 4 * UROWS * 8 + k % 4 * 2);
        const uint64_t y = v + (uint64_t)(k / 4 * VROWS * 8 + k % 4 * 2);
        if (N == 64) ftk__att_wg_ss64(c, x, y, k);
        else ftk__att_wg_ss128(c, x, y, k);
    }
}

/* c[64, DP] += p v over N rows of v; p as packed by ftk__att_wg_pack. */
template <int DP, int N>
static __device__ __forceinline__ void ftk__att_wg_mix(float *c, const uint32_t *p, uint64_t v)
{
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        if (DP == 64) ftk__att_wg_rs64(c, p + 4 * k, v + (uint64_t)(k * 128));
        else ftk__att_wg_rs128(c, p + 4 * k, v + (uint64_t)(k * 128));
    }
}

/* C of [64, N] to A of N / 16 products: register 4k + e is the pair e of columns 16k.. */
template <int N>
static __device__ __forceinline__ void ftk__att_wg_pack(uint32_t *p, const float *c)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) p[i] = ftk__att_pack(c[2 * i], c[2 * i + 1]);
}

/* Rows first.. of from[T, stride], D elements each, to tile[DP / 64][ROWS][64] by 256 threads,
   zeros beyond T and D. Thread i copies the unit i % (DP / 8) of every 2048 / DP-th row: a multiple
   of 8, so its place in the swizzle stays the same. */
template <int DP, int ROWS>
static __device__ __forceinline__ void ftk__att_wg_load(uint32_t tile, const ftk__bf16 *from,
                                                        int64_t stride, int first, int T, int D)
{
    const int UNITS = DP / 8, STEP = 256 / UNITS;
    const int r = threadIdx.x / UNITS, u = threadIdx.x % UNITS;
    const int left = u * 8 < D ? T - first - r : 0;
    const ftk__bf16 *at = from + (int64_t)(first + r) * stride + u * 8;
    const uint32_t to = tile + (uint32_t)(u / 8 * ROWS * 128 + r * 128 + ((u ^ r) % 8) * 16);
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, at += STEP * stride)
        ftk__att_copy16(to + (uint32_t)(i * 128), i < left ? at : from, i < left);
}

/* All that was copied before is here, for every thread and for wgmma; and every thread has waited
   for the products that it asked for before. */
static __device__ __forceinline__ void ftk__att_wg_arrive(void)
{
    ftk__att_wait();
    ftk__att_proxy_fence();
    __syncthreads();
}

static __device__ __forceinline__ uint32_t ftk__att_wg_shared(const void *shared)
{
    return (ftk__att_address(shared) + 1023u) & ~1023u;
}
#endif /* FTK__ATT_WGMMA */

/* ---- Hopper: forward ----

   As above, 256 threads, a block owns 128 query rows and a warpgroup 64 of them; c of [64, N] has
   element e of columns 8n.. in register 4n + e. Products of one tile run under the softmax of the
   next: in step j s = q k^T of tile j+1 and o += p v of tile j are asked for together, and while
   the second runs, s becomes the next p. o is scaled after it.

     shared   q [128]   k [2][BN]   v [2][BN] rows of DP: 160 KB at 128 x 128
     grid     a block for each (query head, tile of 128 rows), last tile first */
template <int DP, int BN>
static __global__ void __launch_bounds__(256, DP * BN <= 4096 ? 2 : 1)
ftk__att_wg_forward(ftk__att a)
{
#ifdef FTK__ATT_WGMMA
    extern __shared__ __align__(16) unsigned char ftk__att_shared[];
    const uint32_t q = ftk__att_wg_shared(ftk__att_shared), k = q + 128 * DP * 2;
    const uint32_t TILE = BN * DP * 2, v = k + 2 * TILE;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = threadIdx.x / 128;
    const int T = (int)a.T, D = (int)a.D, tiles = (T + 127) / 128;
    int64_t bh;
    int tile;
    ftk__att_place(a, a.B * a.H, tiles, &bh, &tile);
    const int first = (tiles - 1 - tile) * 128;
    const int row = first + (int)threadIdx.x / 32 * 16 + g; /* and row + 8 */
    const int64_t b = bh / a.H, h = bh % a.H, kv = h / (a.H / a.K);
    const ftk__bf16 *base = (const ftk__bf16 *)a.qkv + b * T * a.W;
    const ftk__bf16 *keys = base + (a.H + kv) * D, *values = keys + a.K * D;
    const int last = first + 128 < T ? first + 128 : T, steps = (last + BN - 1) / BN;
    const uint64_t at_q = ftk__att_wg_tile(q + (uint32_t)(group * 64 * 128), 128);

    float o[DP / 2], s[BN / 2], top[2] = { -INFINITY, -INFINITY }, sum[2] = { 0, 0 };
    uint32_t p[BN / 4];
#pragma unroll
    for (int i = 0; i < DP / 2; i++) o[i] = 0;

    ftk__att_wg_load<DP, 128>(q, base + h * D, a.W, first, T, D);
    ftk__att_wg_load<DP, BN>(k, keys, a.W, 0, T, D);
    ftk__att_commit();

    /* Step j: s of tile j, o of tile j - 1. */
    for (int j = 0; j < steps; j++) {
        const int key = j * BN;
        float old[2];
        ftk__att_wg_arrive();
        if (j + 1 < steps)
            ftk__att_wg_load<DP, BN>(k + (j + 1) % 2 * TILE, keys, a.W, key + BN, T, D);
        ftk__att_wg_load<DP, BN>(v + j % 2 * TILE, values, a.W, key, T, D);
        ftk__att_commit();
        ftk__att_wg_hold<BN / 2>(s);
        ftk__att_wg_hold<DP / 2>(o);
        ftk__att_wg_fence();
        ftk__att_wg_dot<DP, BN, 128, BN>(s, at_q, ftk__att_wg_tile(k + j % 2 * TILE, BN));
        ftk__att_wg_commit();
        if (j > 0)
            ftk__att_wg_mix<DP, BN>(o, p, ftk__att_wg_tile(v + (j - 1) % 2 * TILE, BN));
        ftk__att_wg_commit();
        ftk__att_wg_wait<1>();
        ftk__att_wg_hold<BN / 2>(s);
        if (key + BN - 1 > first + group * 64) {
#pragma unroll
            for (int i = 0; i < BN / 2; i++)
                if (key + i / 4 * 8 + 2 * t + i % 2 > row + i % 4 / 2 * 8) s[i] = -INFINITY;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float high = top[half], add = 0;
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
                high = fmaxf(high, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
            const float less = high * a.scale2;
            old[half] = ftk__att_exp2((top[half] - high) * a.scale2);
            top[half] = high;
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
#pragma unroll
                for (int e = 4 * n + 2 * half; e < 4 * n + 2 * half + 2; e++) {
                    s[e] = ftk__att_exp2(s[e] * a.scale2 - less);
                    add += s[e];
                }
            sum[half] = sum[half] * old[half] + add;
        }
        ftk__att_wg_wait<0>();
        ftk__att_wg_hold<DP / 2>(o);
#pragma unroll
        for (int i = 0; i < DP / 2; i++) o[i] *= old[i % 4 / 2];
        ftk__att_wg_pack<BN>(p, s);
    }
    ftk__att_wg_arrive();
    ftk__att_wg_hold<DP / 2>(o);
    ftk__att_wg_fence();
    ftk__att_wg_mix<DP, BN>(o, p, ftk__att_wg_tile(v + (steps - 1) % 2 * TILE, BN));
    ftk__att_wg_commit();
    ftk__att_wg_wait<0>();
    ftk__att_wg_hold<DP / 2>(o);

    float by[1][2], c[1][DP / 8][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float all = sum[half];
        all += __shfl_xor_sync(0xffffffffu, all, 1);
        all += __shfl_xor_sync(0xffffffffu, all, 2);
        by[0][half] = 1 / all;
        if (t == 0 && row + half * 8 < T)
            a.lse[bh * T + row + half * 8] = top[half] * a.scale + logf(all);
    }
#pragma unroll
    for (int i = 0; i < DP / 2; i++) c[0][i / 4][i % 4] = o[i];
    ftk__att_store<DP, 1, 1>(a.o, 0, 0, (b * T * a.H + h) * D, a.H * D, row - g, T, D, c, by);
#endif
}

/* ---- Hopper: dk and dv ----

   As above, 256 threads; a block owns 128 keys and a warpgroup 64 of them. Four products a tile of
   BM rows; the last, dk, runs on into the next step, so that a tile's place is free only two steps
   later: three places, filled one step ahead.

     shared   k, v [128]   q, do [3][BM] rows of DP   lse2, delta [3][BM]: 162 KB at BM 64, DP 128
     grid     a block for each (kv head, tile of 128 keys), tile 0 first */
template <int DP, int BM>
static __global__ void __launch_bounds__(256, 1) ftk__att_wg_dkv(ftk__att a)
{
#ifdef FTK__ATT_WGMMA
    extern __shared__ __align__(16) unsigned char ftk__att_shared[];
    const uint32_t k = ftk__att_wg_shared(ftk__att_shared), v = k + 128 * DP * 2;
    const uint32_t TILE = BM * DP * 2, q = v + 128 * DP * 2, dout = q + 3 * TILE;
    const float *lse2 = (const float *)(ftk__att_shared + (dout + 3 * TILE -
                                                           ftk__att_address(ftk__att_shared)));
    const float *delta = lse2 + 3 * BM;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = threadIdx.x / 128;
    const int T = (int)a.T, D = (int)a.D;
    int64_t bk;
    int tile;
    ftk__att_place(a, a.B * a.K, (T + 127) / 128, &bk, &tile);
    const int first = tile * 128, key = first + (int)threadIdx.x / 32 * 16 + g; /* and key + 8 */
    const int64_t b = bk / a.K, kv = bk % a.K, rep = a.H / a.K;
    const ftk__bf16 *base = (const ftk__bf16 *)a.qkv + b * T * a.W;
    const ftk__bf16 *keys = base + (a.H + kv) * D, *grads = (const ftk__bf16 *)a.dout;
    const int begin = first / BM, end = (T + BM - 1) / BM; /* tiles of rows that see a key */
    const uint64_t at_k = ftk__att_wg_tile(k + (uint32_t)(group * 64 * 128), 128);
    const uint64_t at_v = ftk__att_wg_tile(v + (uint32_t)(group * 64 * 128), 128);

    float dk[DP / 2], dv[DP / 2], s[BM / 2], dp[BM / 2];
    uint32_t p[BM / 4], ds[BM / 4];
#pragma unroll
    for (int i = 0; i < DP / 2; i++) dk[i] = dv[i] = 0;
    ftk__att_wg_load<DP, 128>(k, keys, a.W, first, T, D);
    ftk__att_wg_load<DP, 128>(v, keys + a.K * D, a.W, first, T, D);

    /* Step i is tile m of query head kv rep + r; the tile of step i + 1 is copied in step i, that
       of step 0 before. */
    int64_t r = 0, next_r = 0;
    int m = begin, next_m = begin, place = 0, next_place = 0;
    for (int started = 0; r < rep; started = 1) {
        if (started) ftk__att_wg_arrive();
        if (next_r < rep) {
            const int64_t h = kv * rep + next_r;
            const int from = next_m * BM;
            const float *stats = a.lse2 + (b * a.H + h) * a.P + from;
            ftk__att_wg_load<DP, BM>(q + next_place * TILE, base + h * D, a.W, from, T, D);
            ftk__att_wg_load<DP, BM>(dout + next_place * TILE, grads + (b * T * a.H + h) * D,
                                     a.H * D, from, T, D);
            if (threadIdx.x < BM / 4) {
                const int u = next_place * BM + (int)threadIdx.x * 4;
                ftk__att_copy16(ftk__att_address(lse2 + u), stats + threadIdx.x * 4, 1);
                ftk__att_copy16(ftk__att_address(delta + u),
                                stats + (a.delta - a.lse2) + threadIdx.x * 4, 1);
            }
            next_place = next_place == 2 ? 0 : next_place + 1;
            if (++next_m == end) {
                next_m = begin;
                next_r++;
            }
        }
        ftk__att_commit();
        if (!started) continue;

        const uint64_t at_q = ftk__att_wg_tile(q + place * TILE, BM);
        const uint64_t at_do = ftk__att_wg_tile(dout + place * TILE, BM);
        const float *row_lse2 = lse2 + place * BM + 2 * t, *row_delta = delta + place * BM + 2 * t;
        const int row = m * BM;
        ftk__att_wg_hold<BM / 2>(s);
        ftk__att_wg_hold<BM / 2>(dp);
        ftk__att_wg_fence();
        ftk__att_wg_dot<DP, BM, 128, BM>(s, at_k, at_q);
        ftk__att_wg_commit();
        ftk__att_wg_dot<DP, BM, 128, BM>(dp, at_v, at_do);
        ftk__att_wg_commit();
        ftk__att_wg_wait<1>(); /* s, and dk of the step before */
        ftk__att_wg_hold<BM / 2>(s);
#pragma unroll
        for (int n = 0; n < BM / 8; n++) {
            const float2 l = *(const float2 *)(row_lse2 + n * 8);
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[4 * n + e] = ftk__att_exp2(s[4 * n + e] * a.scale2 - (e % 2 ? l.y : l.x));
        }
        if (row < first + group * 64 + 63) {
#pragma unroll
            for (int i = 0; i < BM / 2; i++)
                if (key + i % 4 / 2 * 8 > row + i / 4 * 8 + 2 * t + i % 2) s[i] = 0;
        }
        ftk__att_wg_pack<BM>(p, s);
        ftk__att_wg_hold<DP / 2>(dv);
        ftk__att_wg_fence();
        ftk__att_wg_mix<DP, BM>(dv, p, at_do);
        ftk__att_wg_commit();
        ftk__att_wg_wait<1>(); /* dp */
        ftk__att_wg_hold<BM / 2>(dp);
#pragma unroll
        for (int n = 0; n < BM / 8; n++) {
            const float2 l = *(const float2 *)(row_delta + n * 8);
#pragma unroll
            for (int e = 0; e < 4; e++) s[4 * n + e] *= dp[4 * n + e] - (e % 2 ? l.y : l.x);
        }
        ftk__att_wg_pack<BM>(ds, s);
        ftk__att_wg_hold<DP / 2>(dk);
        ftk__att_wg_fence();
        ftk__att_wg_mix<DP, BM>(dk, ds, at_q);
        ftk__att_wg_commit();
        ftk__att_wg_wait<1>(); /* dv: p is free, without which registers would not do */
        place = place == 2 ? 0 : place + 1;
        if (++m == end) {
            m = begin;
            r++;
        }
    }
    ftk__att_wg_wait<0>();
    ftk__att_wg_hold<DP / 2>(dk);
    ftk__att_wg_hold<DP / 2>(dv);

    float by[1][2] = { { a.scale, a.scale } }, one[1][2] = { { 1, 1 } }, c[1][DP / 8][4];
    const int64_t to = b * T * a.W + (a.H + kv) * D;
#pragma unroll
    for (int i = 0; i < DP / 2; i++) c[0][i / 4][i % 4] = dk[i];
    ftk__att_store<DP, 1, 1>(a.dqkv, a.dqkv_f32, a.accumulate, to, a.W, key - g, T, D, c, by);
#pragma unroll
    for (int i = 0; i < DP / 2; i++) c[0][i / 4][i % 4] = dv[i];
    ftk__att_store<DP, 1, 1>(a.dqkv, a.dqkv_f32, a.accumulate, to + a.K * D, a.W, key - g, T, D, c,
                             one);
#endif
}

/* ---- Hopper: dq ----

   As above, 256 threads, a block owns 128 query rows and a warpgroup 64. dq += ds k runs under the
   first product of the next tile: three places for tiles of keys, filled one step ahead.

     shared   q, do [128]   k, v [3][BN] rows of DP: 160 KB at BN 64, DP 128
     grid     a block for each (query head, tile of 128 rows), last tile first */
template <int DP, int BN>
static __global__ void __launch_bounds__(256, 1) ftk__att_wg_dq(ftk__att a)
{
#ifdef FTK__ATT_WGMMA
    extern __shared__ __align__(16) unsigned char ftk__att_shared[];
    const uint32_t q = ftk__att_wg_shared(ftk__att_shared), dout = q + 128 * DP * 2;
    const uint32_t TILE = BN * DP * 2, k = dout + 128 * DP * 2, v = k + 3 * TILE;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = threadIdx.x / 128;
    const int T = (int)a.T, D = (int)a.D, tiles = (T + 127) / 128;
    int64_t bh;
    int tile;
    ftk__att_place(a, a.B * a.H, tiles, &bh, &tile);
    const int first = (tiles - 1 - tile) * 128;
    const int row = first + (int)threadIdx.x / 32 * 16 + g; /* and row + 8 */
    const int64_t b = bh / a.H, h = bh % a.H, kv = h / (a.H / a.K);
    const ftk__bf16 *base = (const ftk__bf16 *)a.qkv + b * T * a.W;
    const ftk__bf16 *keys = base + (a.H + kv) * D, *values = keys + a.K * D;
    const int last = first + 128 < T ? first + 128 : T, steps = (last + BN - 1) / BN;
    const uint64_t at_q = ftk__att_wg_tile(q + (uint32_t)(group * 64 * 128), 128);
    const uint64_t at_do = ftk__att_wg_tile(dout + (uint32_t)(group * 64 * 128), 128);

    float dq[DP / 2], s[BN / 2], dp[BN / 2], lse2[2], delta[2];
    uint32_t ds[BN / 4];
#pragma unroll
    for (int i = 0; i < DP / 2; i++) dq[i] = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        lse2[half] = a.lse2[bh * a.P + row + half * 8];
        delta[half] = a.delta[bh * a.P + row + half * 8];
    }
    ftk__att_wg_load<DP, 128>(q, base + h * D, a.W, first, T, D);
    ftk__att_wg_load<DP, 128>(dout, (const ftk__bf16 *)a.dout + (b * T * a.H + h) * D, a.H * D,
                              first, T, D);
    ftk__att_wg_load<DP, BN>(k, keys, a.W, 0, T, D);
    ftk__att_wg_load<DP, BN>(v, values, a.W, 0, T, D);
    ftk__att_commit();

    for (int j = 0, place = 0; j < steps; j++) {
        const int key = j * BN, next = place == 2 ? 0 : place + 1;
        ftk__att_wg_arrive();
        if (j + 1 < steps) {
            ftk__att_wg_load<DP, BN>(k + next * TILE, keys, a.W, key + BN, T, D);
            ftk__att_wg_load<DP, BN>(v + next * TILE, values, a.W, key + BN, T, D);
        }
        ftk__att_commit();
        const uint64_t at_k = ftk__att_wg_tile(k + place * TILE, BN);
        const uint64_t at_v = ftk__att_wg_tile(v + place * TILE, BN);
        ftk__att_wg_hold<BN / 2>(s);
        ftk__att_wg_hold<BN / 2>(dp);
        ftk__att_wg_fence();
        ftk__att_wg_dot<DP, BN, 128, BN>(s, at_q, at_k);
        ftk__att_wg_commit();
        ftk__att_wg_dot<DP, BN, 128, BN>(dp, at_do, at_v);
        ftk__att_wg_commit();
        ftk__att_wg_wait<1>(); /* s, and dq of the step before */
        ftk__att_wg_hold<BN / 2>(s);
#pragma unroll
        for (int i = 0; i < BN / 2; i++)
            s[i] = ftk__att_exp2(s[i] * a.scale2 - lse2[i % 4 / 2]);
        if (key + BN - 1 > first + group * 64) {
#pragma unroll
            for (int i = 0; i < BN / 2; i++)
                if (key + i / 4 * 8 + 2 * t + i % 2 > row + i % 4 / 2 * 8) s[i] = 0;
        }
        ftk__att_wg_wait<0>(); /* dp */
        ftk__att_wg_hold<BN / 2>(dp);
#pragma unroll
        for (int i = 0; i < BN / 2; i++) s[i] *= dp[i] - delta[i % 4 / 2];
        ftk__att_wg_pack<BN>(ds, s);
        ftk__att_wg_hold<DP / 2>(dq);
        ftk__att_wg_fence();
        ftk__att_wg_mix<DP, BN>(dq, ds, at_k);
        ftk__att_wg_commit();
        place = next;
    }
    ftk__att_wg_wait<0>();
    ftk__att_wg_hold<DP / 2>(dq);

    float by[1][2] = { { a.scale, a.scale } }, c[1][DP / 8][4];
#pragma unroll
    for (int i = 0; i < DP / 2; i++) c[0][i / 4][i % 4] = dq[i];
    ftk__att_store<DP, 1, 1>(a.dqkv, a.dqkv_f32, a.accumulate, b * T * a.W + h * D, a.W, row - g,
                             T, D, c, by);
#endif
}

/* ---- launchers ---- */

typedef void ftk__att_kernel(ftk__att a);

static ft_status ftk__att_start(ftk__att_kernel *kernel, const ftk__att *a, int64_t heads,
                                int64_t tiles, int threads, size_t shared_bytes, void *stream)
{
    ftk__att args = *a;
    /* Heads whose rows together take about half of a 50 MB L2. */
    int64_t near = ((int64_t)24 << 20) / (4 * a->T * a->D), rep = a->H / a->K;
    args.group = (near < 1 ? 1 : near) * (heads == a->B * a->K ? 1 : rep);
    cudaError_t error = cudaFuncSetAttribute(
        (const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    if (error == cudaSuccess) {
        kernel<<<(unsigned)(heads * tiles), threads, shared_bytes, (cudaStream_t)stream>>>(args);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess) return FT_OK;
    return ft_error(FT_ERR_STATE, "attention: B %lld, T %lld, H %lld, K %lld, D %lld with %lld "
                    "bytes of shared memory a block: %s", (long long)a->B, (long long)a->T,
                    (long long)a->H, (long long)a->K, (long long)a->D, (long long)shared_bytes,
                    cudaGetErrorString(error));
}

template <int DP, int MT, int WARPS, int BN, int STAGES, int VEC>
static ft_status ftk__att_start_forward(const ftk__att *a, void *stream)
{
    const int BM = 16 * MT * WARPS;
    return ftk__att_start(ftk__att_forward<DP, MT, WARPS, BN, STAGES, VEC>, a, a->B * a->H,
                          (a->T + BM - 1) / BM, WARPS * 32,
                          (size_t)(BM + 2 * STAGES * BN) * (DP + 8) * 2, stream);
}

template <int DP, int MT, int WARPS, int BM, int STAGES, int VEC>
static ft_status ftk__att_start_dkv(const ftk__att *a, void *stream)
{
    const int BN = 16 * MT * WARPS;
    return ftk__att_start(ftk__att_dkv<DP, MT, WARPS, BM, STAGES, VEC>, a, a->B * a->K,
                          (a->T + BN - 1) / BN, WARPS * 32,
                          (size_t)(2 * BN + 2 * STAGES * BM) * (DP + 8) * 2 + 8 * STAGES * BM,
                          stream);
}

template <int DP, int MT, int WARPS, int BN, int STAGES, int VEC>
static ft_status ftk__att_start_dq(const ftk__att *a, void *stream)
{
    const int BM = 16 * MT * WARPS;
    return ftk__att_start(ftk__att_dq<DP, MT, WARPS, BN, STAGES, VEC>, a, a->B * a->H,
                          (a->T + BM - 1) / BM, WARPS * 32,
                          (size_t)(2 * BM + 2 * STAGES * BN) * (DP + 8) * 2, stream);
}

template <int DP, int BN>
static ft_status ftk__att_start_wg_forward(const ftk__att *a, void *stream)
{
    return ftk__att_start(ftk__att_wg_forward<DP, BN>, a, a->B * a->H, (a->T + 127) / 128, 256,
                          (size_t)(128 + 4 * BN) * DP * 2 + 1024, stream);
}

template <int DP, int BM>
static ft_status ftk__att_start_wg_dkv(const ftk__att *a, void *stream)
{
    return ftk__att_start(ftk__att_wg_dkv<DP, BM>, a, a->B * a->K, (a->T + 127) / 128, 256,
                          (size_t)(256 + 6 * BM) * DP * 2 + 24 * BM + 1024, stream);
}

template <int DP, int BN>
static ft_status ftk__att_start_wg_dq(const ftk__att *a, void *stream)
{
    return ftk__att_start(ftk__att_wg_dq<DP, BN>, a, a->B * a->H, (a->T + 127) / 128, 256,
                          (size_t)(256 + 6 * BN) * DP * 2 + 1024, stream);
}

static ft_status ftk__att_start_delta(const ftk__att *a, void *stream)
{
    return ftk__att_start(ftk__att_delta, a, 1, (a->B * a->P * a->H + 15) / 16, 256, 0, stream);
}

/* The simple version of a phase: 0 forward, 1 dk and dv, 2 dq. */
template <int NC>
static ft_status ftk__att_start_simple(const ftk__att *a, int phase, void *stream)
{
    ftk__att_kernel *kernel = phase == 0 ? ftk__att_simple_forward<NC>
                            : phase == 1 ? ftk__att_simple_dkv<NC> : ftk__att_simple_dq<NC>;
    int64_t rows = phase == 0 ? 3 : 4, pairs = phase == 1 ? 2 : 1;
    return ftk__att_start(kernel, a, a->B * (phase == 1 ? a->K : a->H),
                          (a->T + FTK__ATT_S - 1) / FTK__ATT_S, 256,
                          (size_t)(FTK__ATT_S * (rows * (a->D | 1) + pairs * FTK__ATT_SP)) * 4,
                          stream);
}

static ft_status ftk__att_simple(const ftk__att *a, int phase, void *stream)
{
    if (a->D <= 64) return ftk__att_start_simple<4>(a, phase, stream);
    if (a->D <= 128) return ftk__att_start_simple<8>(a, phase, stream);
    return ftk__att_start_simple<16>(a, phase, stream);
}

static ft_status ftk__att_fast_forward(const ftk__att *a, int vec, void *stream)
{
    if (!vec && a->D <= 64) return ftk__att_start_forward<64, 2, 4, 64, 1, 0>(a, stream);
    if (!vec) return ftk__att_start_forward<128, 2, 4, 64, 1, 0>(a, stream);
    if (a->D <= 64) return ftk__att_start_forward<64, 2, 4, 64, 2, 1>(a, stream);
    if (a->D <= 80) return ftk__att_start_forward<80, 2, 4, 64, 1, 1>(a, stream);
    if (a->D <= 96) return ftk__att_start_forward<96, 2, 4, 64, 1, 1>(a, stream);
    return ftk__att_start_forward<128, 2, 4, 64, 1, 1>(a, stream);
}

static ft_status ftk__att_fast_dkv(const ftk__att *a, int vec, void *stream)
{
    if (!vec && a->D <= 64) return ftk__att_start_dkv<64, 1, 4, 64, 1, 0>(a, stream);
    if (!vec) return ftk__att_start_dkv<128, 1, 4, 64, 1, 0>(a, stream);
    if (a->D <= 64) return ftk__att_start_dkv<64, 2, 4, 32, 2, 1>(a, stream);
    if (a->D <= 80) return ftk__att_start_dkv<80, 1, 4, 64, 1, 1>(a, stream);
    if (a->D <= 96) return ftk__att_start_dkv<96, 1, 4, 64, 1, 1>(a, stream);
    return ftk__att_start_dkv<128, 1, 4, 64, 1, 1>(a, stream);
}

static ft_status ftk__att_fast_dq(const ftk__att *a, int vec, void *stream)
{
    if (!vec && a->D <= 64) return ftk__att_start_dq<64, 1, 4, 64, 1, 0>(a, stream);
    if (!vec) return ftk__att_start_dq<128, 1, 4, 64, 1, 0>(a, stream);
    if (a->D <= 64) return ftk__att_start_dq<64, 2, 4, 64, 2, 1>(a, stream);
    if (a->D <= 80) return ftk__att_start_dq<80, 1, 4, 64, 1, 1>(a, stream);
    if (a->D <= 96) return ftk__att_start_dq<96, 1, 4, 64, 1, 1>(a, stream);
    return ftk__att_start_dq<128, 2, 4, 32, 1, 1>(a, stream);
}

/* On a device of capability 9.0, and compiled for sm_90a: elsewhere the kernels for it are empty,
   which shows in their registers. */
static int ftk__att_wgmma(void)
{
    int device = 0, major = 0;
    cudaFuncAttributes kernel;
    memset(&kernel, 0, sizeof kernel);
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
               cudaSuccess && major == 9 &&
           cudaFuncGetAttributes(&kernel, (const void *)ftk__att_wg_dkv<128, 64>) == cudaSuccess &&
           kernel.numRegs > 128;
}

enum { FTK__ATT_SIMPLE = 0, FTK__ATT_ELEMENTS, FTK__ATT_UNITS, FTK__ATT_HOPPER };

/* Which version a call takes: the simple one, on mma.sync with rows copied by elements or by units
   of 16 bytes, on wgmma. The shared memory that mma.sync needs is at most 105 KB from D = 97 (sm_86
   has 99: simple there), 80 KB below. */
static int ftk__att_version(const ftk__att *a)
{
    int device = 0, most = 0;
    uintptr_t places = (uintptr_t)a->qkv | (uintptr_t)a->o | (uintptr_t)a->dout |
                       (uintptr_t)a->dqkv;
    if (a->f32 || a->dout_f32 || a->D > 128) return FTK__ATT_SIMPLE;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
            cudaSuccess) return FTK__ATT_SIMPLE;
    if (most < 112 << 10 && a->D > 96) return FTK__ATT_SIMPLE;
    if (a->D % 8 != 0 || places % 16 != 0) return FTK__ATT_ELEMENTS;
    return (a->D <= 64 || a->D > 96) && ftk__att_wgmma() ? FTK__ATT_HOPPER : FTK__ATT_UNITS;
}

static ft_status ftk__att_run_forward(const ftk__att *a, int version, void *stream)
{
    if (version == FTK__ATT_SIMPLE) return ftk__att_simple(a, 0, stream);
    if (version != FTK__ATT_HOPPER)
        return ftk__att_fast_forward(a, version == FTK__ATT_UNITS, stream);
    if (a->D <= 64) return ftk__att_start_wg_forward<64, 128>(a, stream);
    return ftk__att_start_wg_forward<128, 128>(a, stream);
}

static ft_status ftk__att_run_backward(const ftk__att *a, int version, void *stream)
{
    FT_TRY(ftk__att_start_delta(a, stream));
    if (version == FTK__ATT_SIMPLE) {
        FT_TRY(ftk__att_simple(a, 1, stream));
        return ftk__att_simple(a, 2, stream);
    }
    if (version != FTK__ATT_HOPPER) {
        FT_TRY(ftk__att_fast_dkv(a, version == FTK__ATT_UNITS, stream));
        return ftk__att_fast_dq(a, version == FTK__ATT_UNITS, stream);
    }
    if (a->D <= 64) {
        FT_TRY((ftk__att_start_wg_dkv<64, 64>(a, stream)));
        return ftk__att_start_wg_dq<64, 128>(a, stream);
    }
    FT_TRY((ftk__att_start_wg_dkv<128, 64>(a, stream)));
    return ftk__att_start_wg_dq<128, 64>(a, stream);
}

static ft_status ftk__att_begin(ftk__att *a, const ft_op_call *call)
{
    const ft_view *qkv = &call->in[0];
    a->B = qkv->shape[0];
    a->T = qkv->shape[1];
    a->W = qkv->shape[2];
    a->H = call->attr.i[0];
    a->K = call->attr.i[1];
    a->D = call->attr.i[2];
    a->P = (a->T + FTK__ATT_ROUND - 1) / FTK__ATT_ROUND * FTK__ATT_ROUND;
    a->group = 1;
    a->scale = (float)(1.0 / sqrt((double)a->D));
    a->scale2 = (float)(1.4426950408889634 / sqrt((double)a->D));
    a->qkv = qkv->data;
    a->o = call->out[0].data;
    a->lse = (float *)call->out[1].data;
    a->f32 = qkv->dtype == FT_F32;
    a->dout = call->backward ? call->dout[0].data : NULL;
    a->dout_f32 = call->backward && call->dout[0].dtype == FT_F32;
    a->dqkv = call->backward ? call->din[0].data : NULL;
    a->dqkv_f32 = call->backward && call->din[0].dtype == FT_F32;
    a->accumulate = call->backward && call->accumulate[0];
    a->lse2 = (float *)call->workspace;
    a->delta = call->backward ? a->lse2 + a->B * a->H * a->P : NULL;
    if (a->D <= 256 && a->T < 1 << 30 && a->B * a->P * a->H / 16 < 0x7fffffff) return FT_OK;
    return ft_error(FT_ERR_UNSUPPORTED, "attention: B %lld, T %lld, H %lld, head size %lld: the "
                    "GPU kernels take head sizes up to 256, T < 2^30 and B T H < 2^35; use more "
                    "heads of a smaller size, or the cpu device", (long long)a->B, (long long)a->T,
                    (long long)a->H, (long long)a->D);
}

FT_API ft_status ftk_attention_forward(const ft_op_call *call)
{
    ftk__att a;
    FT_TRY(ftk__att_begin(&a, call));
    return ftk__att_run_forward(&a, ftk__att_version(&a), call->stream);
}

/* A gradient of o that is absent is zero, and so is then that of qkv. */
static ft_status ftk__att_backward_zero(const ftk__att *a, void *stream)
{
    if (a->accumulate) return FT_OK;
    cudaError_t error = cudaMemsetAsync(
        a->dqkv, 0, (size_t)(a->B * a->T * a->W) * (a->dqkv_f32 ? 4 : 2), (cudaStream_t)stream);
    if (error == cudaSuccess) return FT_OK;
    return ft_error(FT_ERR_STATE, "attention: clearing the gradient: %s",
                    cudaGetErrorString(error));
}

FT_API ft_status ftk_attention_backward(const ft_op_call *call)
{
    ftk__att a;
    if (!call->din[0].present) return FT_OK;
    FT_TRY(ftk__att_begin(&a, call));
    if (!call->dout[0].present) return ftk__att_backward_zero(&a, call->stream);
    return ftk__att_run_backward(&a, ftk__att_version(&a), call->stream);
}
