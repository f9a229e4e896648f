/* femtotron_kernels.cu: Femtotron's kernels for NVIDIA GPUs.

   DO THIS
     nvcc -std=c++17 -O3 -DFT_CUDA -gencode=arch=compute_90a,code=sm_90a -c femtotron_kernels.cu
     and link the object with the program whose headers were compiled with -DFT_CUDA.
     Any chip from sm_80 on; never with -use_fast_math: fp32 results are held to 1e-5.

   WHAT IT DOES NOT DO
     No GEMMs (cuBLASLt's, see femtotron.h), no communication, no memory of its own, no waiting.

   CONTENTS  >>elements   loads, stores, sums over threads, launches
             >>moves      fill, copy, accumulate, sum of many, one input, two inputs, SwiGLU
             >>columns    sums of rows: gradients of biases and of whatever is repeated
             >>norms      RMSNorm, residual + RMSNorm, norm of heads, layer norm
             >>rope       rotary positions
             >>softmax    softmax, mean
             >>lookup     embedding, and the vocabulary-parallel one
             >>loss       cross-entropy over chunks of logits, and the vocabulary-parallel one
             >>zero       norm, control and optimizers of the training step
             >>attention  causal attention with grouped kv heads: simple, mma.sync, wgmma

   CONCEPTS
     names      ftk_x is called by the headers and launches ftk__x: profiles and sanitizers tell
                Femtotron's kernels from the libraries' by these three letters.
     element    fp32 or bf16 in memory, fp32 in registers, rounded once where it is stored. The
                gradient of an input may have the other type, and may be added to what is there.
     width      W = 16 / sizeof(T): a thread moves 16 bytes at a time where the length of a row is a
                multiple of W and every address is aligned, single elements elsewhere.
     order      A sum's order follows from shapes alone, never from addresses, the chip or timing:
                row kernels choose their path by shape, and load piecewise what is not aligned.
                Long sums have a number of parts that the workspace fixes, then a second kernel.
     in place   A thread reads all that an element depends on before it writes that element.
     indices    64 bits.

   LETTERS  B batch, T tokens of a sequence, C hidden, H query heads, K kv heads, D head size,
            F feed-forward, V vocabulary, N rows (tokens). As a template's parameter T is the type.

   License: MIT, see LICENSE. */

#ifndef FT_CUDA
#define FT_CUDA
#endif
#include "femtotron.h"
#include "femtotron_zero.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <string.h>

/* ---------------------------------------------------------------------------------- >>elements */

typedef __nv_bfloat16 bf16;

#define FTK_WIDTH(T) ((int)(16 / sizeof(T)))
#define FTK_BLOCKS 1056 /* enough for any chip; loops over more work than that are strided */

/* 16 bytes as they lie; piecewise where `vec` says that addresses are not aligned. */
static __device__ __forceinline__ uint4 take(const bf16 *p, int vec)
{
    if (vec) return *(const uint4 *)p;
    const unsigned short *e = (const unsigned short *)p;
    uint4 r;
    r.x = e[0] | (unsigned)e[1] << 16;
    r.y = e[2] | (unsigned)e[3] << 16;
    r.z = e[4] | (unsigned)e[5] << 16;
    r.w = e[6] | (unsigned)e[7] << 16;
    return r;
}

static __device__ __forceinline__ uint4 take(const float *p, int vec)
{
    if (vec) return *(const uint4 *)p;
    const unsigned *e = (const unsigned *)p;
    return make_uint4(e[0], e[1], e[2], e[3]);
}

static __device__ __forceinline__ void open(float (&v)[4], uint4 r)
{
    v[0] = __uint_as_float(r.x);
    v[1] = __uint_as_float(r.y);
    v[2] = __uint_as_float(r.z);
    v[3] = __uint_as_float(r.w);
}

static __device__ __forceinline__ void open(float (&v)[1], uint4 r) { v[0] = __uint_as_float(r.x); }

static __device__ __forceinline__ void open2(float &low, float &high, unsigned pair)
{
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
}

static __device__ __forceinline__ void open(float (&v)[8], uint4 r)
{
    open2(v[0], v[1], r.x);
    open2(v[2], v[3], r.y);
    open2(v[4], v[5], r.z);
    open2(v[6], v[7], r.w);
}

static __device__ __forceinline__ unsigned pair_of(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return (unsigned)__bfloat16_as_ushort(pair.x) | (unsigned)__bfloat16_as_ushort(pair.y) << 16;
}

/* Back to 16 bytes, rounded. */
static __device__ __forceinline__ uint4 closed(const float (&v)[4])
{
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                      __float_as_uint(v[3]));
}

static __device__ __forceinline__ uint4 closed(const float (&v)[8])
{
    return make_uint4(pair_of(v[0], v[1]), pair_of(v[2], v[3]), pair_of(v[4], v[5]),
                      pair_of(v[6], v[7]));
}

static __device__ __forceinline__ float rounded(float x, const float *) { return x; }
static __device__ __forceinline__ float rounded(float x, const bf16 *)
{
    return __bfloat162float(__float2bfloat16_rn(x));
}

/* get: W elements from p to fp32; put: back. Widths are 1, 4 and 8. */
static __device__ __forceinline__ void get(float (&v)[1], const float *p, int) { v[0] = *p; }
static __device__ __forceinline__ void get(float (&v)[1], const bf16 *p, int)
{
    v[0] = __bfloat162float(*p);
}
static __device__ __forceinline__ void get(float (&v)[4], const float *p, int vec)
{
    open(v, take(p, vec));
}
static __device__ __forceinline__ void get(float (&v)[8], const float *p, int vec)
{
    float low[4], high[4];
    open(low, take(p, vec));
    open(high, take(p + 4, vec));
    for (int j = 0; j < 4; j++) {
        v[j] = low[j];
        v[4 + j] = high[j];
    }
}
static __device__ __forceinline__ void get(float (&v)[4], const bf16 *p, int vec)
{
    if (vec) {
        uint2 r = *(const uint2 *)p;
        open2(v[0], v[1], r.x);
        open2(v[2], v[3], r.y);
    } else {
        for (int j = 0; j < 4; j++) v[j] = __bfloat162float(p[j]);
    }
}
static __device__ __forceinline__ void get(float (&v)[8], const bf16 *p, int vec)
{
    open(v, take(p, vec));
}

/* W elements as 16 bytes; one element as fp32. */
template <int W, typename T>
static __device__ __forceinline__ uint4 item_take(const T *p, int vec)
{
    float one[1];
    if (W > 1) return take(p, vec);
    get(one, p, 1);
    return make_uint4(__float_as_uint(one[0]), 0, 0, 0);
}

static __device__ __forceinline__ void put(float *p, const float (&v)[1], int) { *p = v[0]; }
static __device__ __forceinline__ void put(bf16 *p, const float (&v)[1], int)
{
    *p = __float2bfloat16_rn(v[0]);
}
static __device__ __forceinline__ void put(float *p, const float (&v)[4], int vec)
{
    if (vec) *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
    else
        for (int j = 0; j < 4; j++) p[j] = v[j];
}
static __device__ __forceinline__ void put(float *p, const float (&v)[8], int vec)
{
    if (vec) {
        ((float4 *)p)[0] = make_float4(v[0], v[1], v[2], v[3]);
        ((float4 *)p)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        for (int j = 0; j < 8; j++) p[j] = v[j];
    }
}
static __device__ __forceinline__ void put(bf16 *p, const float (&v)[4], int vec)
{
    if (vec) *(uint2 *)p = make_uint2(pair_of(v[0], v[1]), pair_of(v[2], v[3]));
    else
        for (int j = 0; j < 4; j++) p[j] = __float2bfloat16_rn(v[j]);
}
static __device__ __forceinline__ void put(bf16 *p, const float (&v)[8], int vec)
{
    if (vec)
        *(uint4 *)p = make_uint4(pair_of(v[0], v[1]), pair_of(v[2], v[3]), pair_of(v[4], v[5]),
                                 pair_of(v[6], v[7]));
    else
        for (int j = 0; j < 8; j++) p[j] = __float2bfloat16_rn(v[j]);
}

/* Where a result goes whose type is not the inputs', or that adds: a gradient. */
typedef struct grad_out {
    void *data; /* NULL: not wanted */
    int half;   /* bf16 */
    int add;
} grad_out;

template <int W>
static __device__ __forceinline__ void give(const grad_out &to, int64_t i, float (&v)[W], int vec)
{
    float old[W];
    if (to.half) {
        bf16 *p = (bf16 *)to.data + i;
        if (to.add) {
            get(old, p, vec);
            for (int j = 0; j < W; j++) v[j] += old[j];
        }
        put(p, v, vec);
    } else {
        float *p = (float *)to.data + i;
        if (to.add) {
            get(old, p, vec);
            for (int j = 0; j < W; j++) v[j] += old[j];
        }
        put(p, v, vec);
    }
}

template <int W> static __device__ __forceinline__ void zero(float (&v)[W])
{
    for (int j = 0; j < W; j++) v[j] = 0;
}

/* Absent memory reads as zero. */
template <int W, typename T>
static __device__ __forceinline__ void get_or_zero(float (&v)[W], const T *base, int64_t i, int vec)
{
    if (base) get(v, base + i, vec);
    else zero(v);
}

/* Sums over groups of `lanes` neighbouring threads: a power of two up to 32, or a multiple of 32,
   and at most 15 such groups a block. All threads of a group (of a warp, where that is more) call
   it equally often, each time with a `room` that was not used by the call before; every thread of
   a group gets the same bits. Groups of several warps do not wait for each other: barrier 0 is the
   block's, 1 + g that of group g. */
static __device__ __forceinline__ void group_wait(int lanes)
{
    asm volatile("bar.sync %0, %1;" ::"r"(1 + (int)threadIdx.x / lanes), "r"(lanes) : "memory");
}

static __device__ __forceinline__ float group_sum(float s, int lanes, float *room)
{
    for (int o = (lanes < 32 ? lanes : 32) / 2; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if (lanes <= 32) return s;
    const int warps = lanes / 32, first = (int)threadIdx.x / lanes * warps;
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = s;
    group_wait(lanes);
    s = 0;
    for (int i = 0; i < warps; i++) s += room[first + i];
    return s;
}

/* The same for pairs; but where groups have several warps, all groups of the block come to it
   equally often and wait for each other: a barrier that tools that look for races understand. */
static __device__ __forceinline__ float2 group_sum(float2 s, int lanes, float2 *room)
{
    for (int o = (lanes < 32 ? lanes : 32) / 2; o; o >>= 1) {
        s.x += __shfl_xor_sync(~0u, s.x, o);
        s.y += __shfl_xor_sync(~0u, s.y, o);
    }
    if (lanes <= 32) return s;
    const int warps = lanes / 32, first = (int)threadIdx.x / lanes * warps;
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = s;
    __syncthreads();
    s = make_float2(0, 0);
    for (int i = 0; i < warps; i++) {
        s.x += room[first + i].x;
        s.y += room[first + i].y;
    }
    return s;
}

/* Over the whole block, whose size is a multiple of 32; may be called again at once. */
static __device__ float2 block_sum(float2 s, float2 *room)
{
    __syncthreads();
    return group_sum(s, (int)blockDim.x, room);
}

static __device__ float block_max(float m, float *room)
{
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = m;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x / 32; i++) m = fmaxf(m, room[i]);
    return m;
}

static __device__ double block_sum(double s, double *room)
{
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = s;
    __syncthreads();
    s = 0;
    for (int i = 0; i < (int)blockDim.x / 32; i++) s += room[i];
    return s;
}

/* A value that cannot be, at `position`: the first one is what the host reports. */
static __device__ void note_fault(uint64_t *fault, int kind, int64_t position, int64_t positions,
                                  int32_t value, int64_t V)
{
    if (!fault) return;
    atomicMin((unsigned long long *)fault + 3 * kind,
              (unsigned long long)position << 32 | (unsigned)value);
    fault[3 * kind + 1] = (uint64_t)V;
    fault[3 * kind + 2] = (uint64_t)positions;
}

/* ---- the host's side ---- */

static ft_status launched(const char *name)
{
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) return FT_OK;
    return ft_error(FT_ERR_UNSUPPORTED, "kernel %s was not launched: %s", name,
                    cudaGetErrorString(error));
}

static int64_t elems_of(const ft_view *v)
{
    int64_t n = 1;
    for (int i = 0; i < v->ndim; i++) n *= v->shape[i];
    return n;
}

static int64_t cols_of(const ft_view *v) { return v->ndim ? v->shape[v->ndim - 1] : 1; }

static int64_t rows_of(const ft_view *v)
{
    int64_t n = 1;
    for (int i = 0; i + 1 < v->ndim; i++) n *= v->shape[i];
    return n;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t over(int64_t n, int64_t by) { return (n + by - 1) / by; }

static const void *data_of(const ft_view *v) { return v->present ? v->data : NULL; }

static grad_out grad_of(const ft_view *v, int add)
{
    grad_out g;
    g.data = v->present ? v->data : NULL;
    g.half = v->dtype == FT_BF16;
    g.add = add;
    return g;
}

static int width_of(ft_dtype t) { return t == FT_BF16 ? 8 : 4; }

#define FTK_AT(p) ((uintptr_t)(p))
static int aligned(uintptr_t addresses) { return (addresses & 15) == 0; }

static cudaStream_t stream_of(const ft_op_call *call) { return (cudaStream_t)call->stream; }

/* The gradient of an output has the output's type; the tape sees to it. */
static ft_status check_dout(const ft_op_call *call, int o, ft_dtype t)
{
    if (!call->dout[o].present || call->dout[o].dtype == t) return FT_OK;
    return ft_error(FT_ERR_UNSUPPORTED, "%s: the gradient of output %d is %s, the inputs are %s",
                    call->op->name, o, ft_dtype_name(call->dout[o].dtype), ft_dtype_name(t));
}

/* A plane of rows x items for elementwise kernels: threads x along a row, threads y over rows,
   strided, so that no index needs a division. An item is W elements of a row; the last item of a
   single row may be shorter. */
typedef struct plane {
    dim3 grid, block;
    int64_t rows, cols; /* elements */
    int wide;           /* items of W elements, otherwise of 1 */
} plane;

static plane plane_of(int64_t rows, int64_t cols, ft_dtype t, uintptr_t addresses)
{
    plane p;
    int64_t W = width_of(t), items, x = 1;
    p.rows = rows;
    p.cols = cols;
    p.wide = aligned(addresses) && (rows == 1 || cols % W == 0);
    items = p.wide ? over(cols, W) : cols;
    if (rows == 1) x = 256; /* kernels of one row look at threads x alone */
    while (x < 256 && x < items) x *= 2;
    p.block = dim3((unsigned)x, (unsigned)(256 / x), 1);
    p.grid = dim3((unsigned)over(items, x), (unsigned)least(over(rows, 256 / x), 65535), 1);
    return p;
}

#define FTK_EACH_ROW(row, rows)                                                                    \
    for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < (rows);               \
         row += (int64_t)gridDim.y * blockDim.y)

/* First element of this thread's item. */
template <int W> static __device__ __forceinline__ int64_t item_at(void)
{
    return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
}

/* Launches kernel<T, W> for a plane; call `launched` afterwards. */
#define FTK_PLANE(kernel, dtype, p, stream, ...)                                                   \
    do {                                                                                           \
        if ((dtype) == FT_BF16 && (p).wide)                                                        \
            kernel<bf16, 8><<<(p).grid, (p).block, 0, stream>>>(__VA_ARGS__);                      \
        else if ((dtype) == FT_BF16)                                                               \
            kernel<bf16, 1><<<(p).grid, (p).block, 0, stream>>>(__VA_ARGS__);                      \
        else if ((p).wide)                                                                         \
            kernel<float, 4><<<(p).grid, (p).block, 0, stream>>>(__VA_ARGS__);                     \
        else kernel<float, 1><<<(p).grid, (p).block, 0, stream>>>(__VA_ARGS__);                    \
    } while (0)

/* The same for kernels whose blocks are not a plane's. */
#define FTK_ROWS(kernel, dtype, wide, grid, block, shared, stream, ...)                            \
    do {                                                                                           \
        if ((dtype) == FT_BF16 && (wide))                                                          \
            kernel<bf16, 8><<<grid, block, shared, stream>>>(__VA_ARGS__);                         \
        else if ((dtype) == FT_BF16)                                                               \
            kernel<bf16, 1><<<grid, block, shared, stream>>>(__VA_ARGS__);                         \
        else if (wide)                                                                             \
            kernel<float, 4><<<grid, block, shared, stream>>>(__VA_ARGS__);                        \
        else kernel<float, 1><<<grid, block, shared, stream>>>(__VA_ARGS__);                       \
    } while (0)

/* ------------------------------------------------------------------------------------- >>moves

   Elementwise: one thread an item, every byte once. Bound: the sum of the operands' bytes over the
   memory's bandwidth. */

/* ---- fill: y[n] = value; n elements out. U: the element's bits. ---- */

template <typename U, int W>
static __global__ void ftk__fill(U *y, U bits, int64_t n)
{
    int64_t i = item_at<W>();
    if (W > 1 && i + W <= n) {
        unsigned word = sizeof(U) == 2 ? (unsigned)bits | (unsigned)bits << 16 : (unsigned)bits;
        *(uint4 *)(y + i) = make_uint4(word, word, word, word);
        return;
    }
    for (int j = 0; j < W && i + j < n; j++) y[i + j] = bits;
}

static void fill(void *y, ft_dtype t, uint32_t bits, int64_t n, cudaStream_t stream)
{
    plane p = plane_of(1, n, t, FTK_AT(y));
    if (t == FT_BF16) {
        unsigned short word = (unsigned short)bits;
        if (p.wide)
            ftk__fill<unsigned short, 8><<<p.grid, p.block, 0, stream>>>((unsigned short *)y,
                                                                         word, n);
        else
            ftk__fill<unsigned short, 1><<<p.grid, p.block, 0, stream>>>((unsigned short *)y,
                                                                         word, n);
    } else if (p.wide) {
        ftk__fill<unsigned, 4><<<p.grid, p.block, 0, stream>>>((unsigned *)y, bits, n);
    } else {
        ftk__fill<unsigned, 1><<<p.grid, p.block, 0, stream>>>((unsigned *)y, bits, n);
    }
}

FT_API ft_status ftk_fill_forward(const ft_op_call *call)
{
    const ft_view *y = &call->out[0];
    float value = (float)call->attr.f[0];
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (y->dtype == FT_I32) bits = (uint32_t)(int32_t)call->attr.f[0];
    if (y->dtype == FT_BF16) /* as ft_bf16_from_f32 */
        bits = (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u)
                                                  : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    fill(y->data, y->dtype, bits, elems_of(y), stream_of(call));
    return launched("fill");
}

/* ---- copy and accumulate: to[r, c] = or += from[r, c], rows `stride` elements apart in both;
   absent `from` is zero ---- */

template <typename T, int W>
static __global__ void ftk__move(grad_out to, const T *from, int64_t rows, int64_t cols,
                                 int64_t stride)
{
    int64_t c = item_at<W>();
    if (c >= cols) return;
    FTK_EACH_ROW(row, rows) {
        int64_t i = row * stride + c;
        if (c + W <= cols) {
            float v[W];
            get_or_zero(v, from, i, 1);
            give(to, i, v, 1);
        } else {
            for (int64_t j = 0; j < cols - c; j++) {
                float v[1];
                get_or_zero(v, from, i + j, 1);
                give(to, i + j, v, 1);
            }
        }
    }
}

static ft_status move(const char *name, grad_out to, const void *from, ft_dtype t, int64_t rows,
                      int64_t cols, int64_t stride, cudaStream_t stream)
{
    uintptr_t at = FTK_AT(to.data) | FTK_AT(from);
    if (rows > 1 && stride % width_of(t)) at = 1; /* rows begin anywhere */
    plane p = plane_of(rows, cols, t, at);
    if (t == FT_BF16 && p.wide)
        ftk__move<bf16, 8><<<p.grid, p.block, 0, stream>>>(to, (const bf16 *)from, rows, cols,
                                                           stride);
    else if (t == FT_BF16)
        ftk__move<bf16, 1><<<p.grid, p.block, 0, stream>>>(to, (const bf16 *)from, rows, cols,
                                                           stride);
    else if (p.wide)
        ftk__move<float, 4><<<p.grid, p.block, 0, stream>>>(to, (const float *)from, rows, cols,
                                                            stride);
    else
        ftk__move<float, 1><<<p.grid, p.block, 0, stream>>>(to, (const float *)from, rows, cols,
                                                            stride);
    return launched(name);
}

/* A gradient goes over as it is; nothing to do where both are the same memory. */
static ft_status pass_on(const char *name, const ft_op_call *call, const ft_view *to,
                         const ft_view *from, int64_t n)
{
    ft_dtype t = from->present ? from->dtype : to->dtype;
    if (from->present && to->data == from->data) return FT_OK;
    return move(name, grad_of(to, call->accumulate[0]), data_of(from), t, 1, n, n,
                stream_of(call));
}

FT_API ft_status ftk_copy_forward(const ft_op_call *call)
{
    const ft_view *x = &call->in[0], *y = &call->out[0];
    int64_t n = elems_of(x);
    if (x->dtype != y->dtype)
        return move("copy", grad_of(y, 0), x->data, x->dtype, 1, n, n, stream_of(call));
    if (x->data == y->data) return FT_OK;
    cudaError_t error = cudaMemcpyAsync(y->data, x->data, (size_t)n * ft_dtype_bytes(x->dtype),
                                        cudaMemcpyDeviceToDevice, stream_of(call));
    if (error == cudaSuccess) return FT_OK;
    (void)cudaGetLastError();
    return ft_error(FT_ERR_UNSUPPORTED, "copy of %lld %s: %s", (long long)n,
                    ft_dtype_name(x->dtype), cudaGetErrorString(error));
}

FT_API ft_status ftk_accumulate_forward(const ft_op_call *call)
{
    int64_t n = elems_of(&call->in[0]);
    return move("accumulate", grad_of(&call->out[0], 1), call->in[0].data, call->in[0].dtype, 1, n,
                n, stream_of(call));
}

/* ---- out[i] = sum over r of in[r][i], in that order in fp32, rounded once: n + 1 times the bytes
   of out. The reduction of the local transport: pointers may be a peer's. ---- */

typedef struct sum_args { const void *in[FTK_SUM_MOST]; } sum_args;

template <typename T, int W>
static __device__ __forceinline__ void sum_at(T *out, const sum_args &a, int n, int64_t i)
{
    float s[W], v[W];
    get(s, (const T *)a.in[0] + i, 1);
#pragma unroll 4
    for (int r = 1; r < n; r++) {
        get(v, (const T *)a.in[r] + i, 1);
        for (int j = 0; j < W; j++) s[j] += v[j];
    }
    put(out + i, s, 1);
}

template <typename T, int W>
static __global__ void ftk__sum(void *out, const __grid_constant__ sum_args a, int n,
                                int64_t count)
{
    int64_t i = item_at<W>();
    if (i + W <= count) sum_at<T, W>((T *)out, a, n, i);
    else
        for (; i < count; i++) sum_at<T, 1>((T *)out, a, n, i);
}

FT_API ft_status ftk_sum(void *stream, void *out, ft_dtype dtype, int n, const void *const *in,
                         int64_t count)
{
    sum_args a;
    uintptr_t at = FTK_AT(out);
    if (n < 1 || n > FTK_SUM_MOST || (dtype != FT_F32 && dtype != FT_BF16))
        return ft_error(FT_ERR_UNSUPPORTED, "ftk_sum of %d %s arrays: 1 to %d, fp32 or bf16", n,
                        ft_dtype_name(dtype), (int)FTK_SUM_MOST);
    if (count < 1) return FT_OK;
    memset(&a, 0, sizeof a);
    for (int r = 0; r < n; r++) {
        a.in[r] = in[r];
        at |= FTK_AT(in[r]);
    }
    plane p = plane_of(1, count, dtype, at);
    FTK_PLANE(ftk__sum, dtype, p, (cudaStream_t)stream, out, a, n, count);
    return launched("sum");
}

/* ---- one input: scale, gelu, silu ---- */

enum { UNARY_SCALE = 0, UNARY_GELU, UNARY_SILU };

/* gelu: x Phi(x); Phi(x) = erfc(-x / sqrt 2) / 2 keeps its digits for negative x. */
static __device__ __forceinline__ float unary_value(int kind, float factor, float x)
{
    if (kind == UNARY_SCALE) return x * factor;
    if (kind == UNARY_GELU) return x * (0.5f * erfcf(-0.70710678118654752f * x));
    return x / (1.0f + expf(-x));
}

/* gelu' = Phi(x) + x phi(x); silu' = s (1 + x (1 - s)). */
static __device__ __forceinline__ float unary_slope(int kind, float factor, float x)
{
    if (kind == UNARY_SCALE) return factor;
    if (kind == UNARY_GELU)
        return 0.5f * erfcf(-0.70710678118654752f * x) +
               0.39894228040143268f * x * expf(-0.5f * x * x);
    float s = 1.0f / (1.0f + expf(-x));
    return s * (1.0f + x * (1.0f - s));
}

template <typename T, int W>
static __device__ __forceinline__ void unary_at(T *y, const T *x, int kind, float factor, int64_t i)
{
    float v[W];
    get(v, x + i, 1);
    for (int j = 0; j < W; j++) v[j] = unary_value(kind, factor, v[j]);
    put(y + i, v, 1);
}

template <typename T, int W>
static __global__ void ftk__unary(void *y, const void *x, int kind, float factor, int64_t n)
{
    int64_t i = item_at<W>();
    if (i + W <= n) unary_at<T, W>((T *)y, (const T *)x, kind, factor, i);
    else
        for (; i < n; i++) unary_at<T, 1>((T *)y, (const T *)x, kind, factor, i);
}

template <typename T, int W>
static __device__ __forceinline__ void unary_grad_at(const grad_out &dx, const T *dy, const T *x,
                                                     int kind, float factor, int64_t i)
{
    float g[W], v[W];
    get_or_zero(g, dy, i, 1);
    get_or_zero(v, x, i, 1);
    for (int j = 0; j < W; j++) g[j] *= unary_slope(kind, factor, v[j]);
    give(dx, i, g, 1);
}

template <typename T, int W>
static __global__ void ftk__unary_grad(grad_out dx, const void *dy, const void *x, int kind,
                                       float factor, int64_t n)
{
    int64_t i = item_at<W>();
    if (i + W <= n) unary_grad_at<T, W>(dx, (const T *)dy, (const T *)x, kind, factor, i);
    else
        for (; i < n; i++)
            unary_grad_at<T, 1>(dx, (const T *)dy, (const T *)x, kind, factor, i);
}

static ft_status unary_forward(const ft_op_call *call, int kind)
{
    const ft_view *x = &call->in[0], *y = &call->out[0];
    int64_t n = elems_of(x);
    plane p = plane_of(1, n, x->dtype, FTK_AT(x->data) | FTK_AT(y->data));
    FTK_PLANE(ftk__unary, x->dtype, p, stream_of(call), y->data, x->data, kind,
              (float)call->attr.f[0], n);
    return launched(call->op->name);
}

static ft_status unary_backward(const ft_op_call *call, int kind)
{
    const ft_view *x = &call->in[0], *dx = &call->din[0];
    const void *at = kind == UNARY_SCALE ? NULL : x->data, *dy = data_of(&call->dout[0]);
    int64_t n = elems_of(x);
    if (!dx->present) return FT_OK;
    FT_TRY(check_dout(call, 0, x->dtype));
    plane p = plane_of(1, n, x->dtype, FTK_AT(dx->data) | FTK_AT(at) | FTK_AT(dy));
    FTK_PLANE(ftk__unary_grad, x->dtype, p, stream_of(call), grad_of(dx, call->accumulate[0]), dy,
              at, kind, (float)call->attr.f[0], n);
    return launched(call->op->name);
}

FT_API ft_status ftk_scale_forward(const ft_op_call *c) { return unary_forward(c, UNARY_SCALE); }
FT_API ft_status ftk_scale_backward(const ft_op_call *c) { return unary_backward(c, UNARY_SCALE); }
FT_API ft_status ftk_gelu_forward(const ft_op_call *c) { return unary_forward(c, UNARY_GELU); }
FT_API ft_status ftk_gelu_backward(const ft_op_call *c) { return unary_backward(c, UNARY_GELU); }
FT_API ft_status ftk_silu_forward(const ft_op_call *c) { return unary_forward(c, UNARY_SILU); }
FT_API ft_status ftk_silu_backward(const ft_op_call *c) { return unary_backward(c, UNARY_SILU); }

/* ---- y[rows, n] = a[rows, n] (+ or *) b[n]; y may be a. The same kernel makes mul's da = dy b. */

template <typename T, int W>
static __device__ __forceinline__ void binary_at(const grad_out &y, const T *a, const T *b,
                                                 int product, int64_t i, int64_t c)
{
    float v[W], w[W];
    get_or_zero(v, a, i, 1);
    get(w, b + c, 1);
    for (int j = 0; j < W; j++) v[j] = product ? v[j] * w[j] : v[j] + w[j];
    give(y, i, v, 1);
}

template <typename T, int W>
static __global__ void ftk__binary(grad_out y, const void *a, const void *b, int product,
                                   int64_t rows, int64_t n)
{
    int64_t c = item_at<W>();
    if (c >= n) return;
    FTK_EACH_ROW(row, rows) {
        int64_t i = row * n + c;
        if (c + W <= n) binary_at<T, W>(y, (const T *)a, (const T *)b, product, i, c);
        else
            for (int64_t j = 0; j < n - c; j++)
                binary_at<T, 1>(y, (const T *)a, (const T *)b, product, i + j, c + j);
    }
}

static ft_status binary(const ft_op_call *call, grad_out y, const void *a, int product)
{
    const ft_view *b = &call->in[1];
    int64_t n = elems_of(b), rows = elems_of(&call->in[0]) / n;
    plane p = plane_of(rows, n, b->dtype, FTK_AT(y.data) | FTK_AT(a) | FTK_AT(b->data));
    FTK_PLANE(ftk__binary, b->dtype, p, stream_of(call), y, a, b->data, product, rows, n);
    return launched(call->op->name);
}

FT_API ft_status ftk_add_forward(const ft_op_call *call)
{
    return binary(call, grad_of(&call->out[0], 0), call->in[0].data, 0);
}

FT_API ft_status ftk_mul_forward(const ft_op_call *call)
{
    return binary(call, grad_of(&call->out[0], 0), call->in[0].data, 1);
}

/* ---- SwiGLU: y[N,F] = silu(gate) up, gu[N,2F] = (gate, up); 3 F elements a row forward, 5 F
   backward: dgate = dy up s (1 + gate (1 - s)), dup = dy gate s, s = sigmoid(gate). The gradient
   may lie over gu: a thread has read both halves of its columns before it writes them. ---- */

template <typename T, int W>
static __global__ void ftk__swiglu(void *y_, const void *gu_, int64_t rows, int64_t F)
{
    T *y = (T *)y_;
    const T *gu = (const T *)gu_;
    int64_t c = item_at<W>();
    if (c >= F) return;
    FTK_EACH_ROW(row, rows) {
        float g[W], u[W];
        get(g, gu + row * 2 * F + c, 1);
        get(u, gu + row * 2 * F + F + c, 1);
        for (int j = 0; j < W; j++) g[j] = g[j] / (1.0f + expf(-g[j])) * u[j];
        put(y + row * F + c, g, 1);
    }
}

template <typename T, int W>
static __global__ void ftk__swiglu_grad(grad_out dgu, const void *dy, const void *gu_,
                                        int64_t rows, int64_t F)
{
    const T *gu = (const T *)gu_;
    int64_t c = item_at<W>();
    if (c >= F) return;
    FTK_EACH_ROW(row, rows) {
        const int64_t gate = row * 2 * F + c;
        float g[W], u[W], d[W];
        get(g, gu + gate, 1);
        get(u, gu + gate + F, 1);
        get_or_zero(d, (const T *)dy, row * F + c, 1);
        for (int j = 0; j < W; j++) {
            float s = 1.0f / (1.0f + expf(-g[j])), dup = d[j] * g[j] * s;
            g[j] = d[j] * u[j] * s * (1.0f + g[j] * (1.0f - s));
            u[j] = dup;
        }
        give(dgu, gate, g, 1);
        give(dgu, gate + F, u, 1);
    }
}

/* Rows must be whole items, also a single one: `up` begins behind F elements. */
static plane swiglu_plane(int64_t rows, int64_t F, ft_dtype t, uintptr_t addresses)
{
    return plane_of(rows, F, t, F % width_of(t) ? addresses | 1 : addresses);
}

FT_API ft_status ftk_swiglu_forward(const ft_op_call *call)
{
    const ft_view *gu = &call->in[0], *y = &call->out[0];
    int64_t rows = rows_of(y), F = cols_of(y);
    plane p = swiglu_plane(rows, F, gu->dtype, FTK_AT(gu->data) | FTK_AT(y->data));
    FTK_PLANE(ftk__swiglu, gu->dtype, p, stream_of(call), y->data, gu->data, rows, F);
    return launched("swiglu");
}

FT_API ft_status ftk_swiglu_backward(const ft_op_call *call)
{
    const ft_view *gu = &call->in[0], *dgu = &call->din[0];
    const void *dy = data_of(&call->dout[0]);
    int64_t rows = rows_of(gu), F = cols_of(gu) / 2;
    if (!dgu->present) return FT_OK;
    FT_TRY(check_dout(call, 0, gu->dtype));
    plane p = swiglu_plane(rows, F, gu->dtype, FTK_AT(gu->data) | FTK_AT(dgu->data) | FTK_AT(dy));
    FTK_PLANE(ftk__swiglu_grad, gu->dtype, p, stream_of(call),
              grad_of(dgu, call->accumulate[0]), dy, gu->data, rows, F);
    return launched("swiglu");
}

/* ---- every row of y[n,o] = or += b[o] ---- */

template <typename T, int W>
static __global__ void ftk__rows_fill(grad_out y, const void *b, int64_t rows, int64_t n)
{
    int64_t c = item_at<W>();
    if (c >= n) return;
    FTK_EACH_ROW(row, rows) {
        int64_t i = row * n + c;
        if (c + W <= n) {
            float v[W];
            get(v, (const T *)b + c, 1);
            give(y, i, v, 1);
        } else {
            for (int64_t j = 0; j < n - c; j++) {
                float v[1];
                get(v, (const T *)b + c + j, 1);
                give(y, i + j, v, 1);
            }
        }
    }
}

static ft_status rows_fill(cudaStream_t stream, grad_out y, const void *b, ft_dtype t, int64_t n,
                           int64_t o)
{
    plane p = plane_of(n, o, t, FTK_AT(y.data) | FTK_AT(b));
    FTK_PLANE(ftk__rows_fill, t, p, stream, y, b, n, o);
    return launched("rows_fill");
}

FT_API ft_status ftk_rows_fill(void *stream, void *y, const void *b, ft_dtype dtype, int64_t n,
                               int64_t o)
{
    grad_out to;
    to.data = y;
    to.half = dtype == FT_BF16;
    to.add = 0;
    return rows_fill((cudaStream_t)stream, to, b, dtype, n, o);
}

FT_API ft_status ftk_tp_bias(const ft_op_call *call)
{
    const ft_view *b = &call->in[0], *y = &call->out[0];
    return rows_fill(stream_of(call), grad_of(y, call->attr.i[0] != 0), b->data, b->dtype,
                     elems_of(y) / cols_of(y), cols_of(y));
}

/* ----------------------------------------------------------------------------------- >>columns

   to[o] = or += sum over r of x[r, o] (times f[r, o]), x [n,o]. A block of 32 x 8 threads takes
   32 W columns and, of the rows, one part: thread (x, y) adds rows y, y + 8, ... of W columns, then
   the eight are added in order. Parts are fp32 rows [parts, o] in workspace, which a second kernel
   adds: 32 columns a block, thread (x, y) parts y, y + 32, ..., then those in order. One part needs
   no workspace. Reads n o elements once; the parts are at most 1/64 of that. */

static __global__ void ftk__parts(const float *parts, int64_t n, int64_t stride, int64_t cols,
                                  grad_out to)
{
    __shared__ float room[32][33];
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    float s = 0;
    if (c < cols)
#pragma unroll 8
        for (int64_t p = threadIdx.y; p < n; p += 32) s += parts[p * stride + c];
    room[threadIdx.y][threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.y || c >= cols) return;
    float v[1] = {0};
    for (int p = 0; p < 32; p++) v[0] += room[p][threadIdx.x];
    give(to, c, v, 1);
}

/* to[cols] = or += sum of parts[n][cols], whose rows are `stride` apart. */
static ft_status parts_sum(const char *name, const float *parts, int64_t n, int64_t stride,
                           int64_t cols, grad_out to, cudaStream_t stream)
{
    ftk__parts<<<(unsigned)over(cols, 32), dim3(32, 32), 0, stream>>>(parts, n, stride, cols, to);
    return launched(name);
}

template <typename T, int W>
static __global__ void ftk__rows_sum(const void *x_, const void *f_, int64_t n, int64_t o,
                                     float *parts, grad_out to, int vec)
{
    const T *x = (const T *)x_, *f = (const T *)f_;
    __shared__ float room[8][32 * W];
    const int64_t c = ((int64_t)blockIdx.x * 32 + threadIdx.x) * W;
    const int64_t each = (n + gridDim.y - 1) / gridDim.y, first = blockIdx.y * each;
    const int64_t end = first + each < n ? first + each : n;
    float s[W], v[W], w[W];
    zero(s);
    if (c < o && x)
#pragma unroll 4
        for (int64_t r = first + threadIdx.y; r < end; r += 8) {
            get(v, x + r * o + c, vec);
            if (f) {
                get(w, f + r * o + c, vec);
                for (int j = 0; j < W; j++) v[j] *= w[j];
            }
            for (int j = 0; j < W; j++) s[j] += v[j];
        }
    for (int j = 0; j < W; j++) room[threadIdx.y][threadIdx.x * W + j] = s[j];
    __syncthreads();
    if (threadIdx.y || c >= o) return;
    for (int y = 1; y < 8; y++)
        for (int j = 0; j < W; j++) s[j] += room[y][threadIdx.x * W + j];
    if (parts) put(parts + blockIdx.y * o + c, s, vec);
    else give(to, c, s, vec);
}

/* `bytes` of workspace say how many parts there are. */
static ft_status rows_sum(const char *name, cudaStream_t stream, grad_out to, const void *x,
                          const void *f, ft_dtype t, int64_t n, int64_t o, void *workspace,
                          size_t bytes)
{
    const int W = width_of(t), wide = o % W == 0;
    int64_t n_parts = (int64_t)(bytes / ((size_t)o * sizeof(float)));
    float *parts = n_parts > 1 ? (float *)workspace : NULL;
    int vec = aligned(FTK_AT(to.data) | FTK_AT(x) | FTK_AT(f) | FTK_AT(parts));
    if (!parts) n_parts = 1;
    dim3 grid((unsigned)over(o, wide ? 32 * W : 32), (unsigned)n_parts, 1), block(32, 8, 1);
    FTK_ROWS(ftk__rows_sum, t, wide, grid, block, 0, stream, x, f, n, o, parts, to, vec);
    FT_TRY(launched(name));
    return parts ? parts_sum(name, parts, n_parts, o, o, to, stream) : FT_OK;
}

FT_API ft_status ftk_rows_sum(void *stream, void *to, ft_dtype to_dtype, const void *dy,
                              ft_dtype dtype, int64_t n, int64_t o, int accumulate,
                              void *workspace)
{
    grad_out g;
    g.data = to;
    g.half = to_dtype == FT_BF16;
    g.add = accumulate;
    return rows_sum("rows_sum", (cudaStream_t)stream, g, dy, NULL, dtype, n, o, workspace,
                    ftk_rows_sum_bytes(n, o));
}

FT_API ft_status ftk_tp_bias_grad(const ft_op_call *call)
{
    const ft_view *dy = &call->in[0];
    return rows_sum("tp_bias_grad", stream_of(call),
                    grad_of(&call->out[0], call->attr.i[0] != 0), dy->data, NULL, dy->dtype,
                    elems_of(dy) / cols_of(dy), cols_of(dy), call->workspace,
                    call->workspace_bytes);
}

/* db of add and mul, before da, which may lie over dout. */
static ft_status binary_db(const ft_op_call *call, int product)
{
    int64_t o = elems_of(&call->in[1]), n = elems_of(&call->in[0]) / o;
    return rows_sum(call->op->name, stream_of(call), grad_of(&call->din[1], call->accumulate[1]),
                    data_of(&call->dout[0]), product ? call->in[0].data : NULL, call->in[1].dtype,
                    n, o, call->workspace, call->workspace_bytes);
}

FT_API ft_status ftk_add_backward(const ft_op_call *call)
{
    FT_TRY(check_dout(call, 0, call->in[1].dtype));
    if (call->din[1].present) FT_TRY(binary_db(call, 0));
    if (!call->din[0].present) return FT_OK;
    return pass_on("add", call, &call->din[0], &call->dout[0], elems_of(&call->in[0]));
}

FT_API ft_status ftk_mul_backward(const ft_op_call *call)
{
    FT_TRY(check_dout(call, 0, call->in[1].dtype));
    if (call->din[1].present) FT_TRY(binary_db(call, 1));
    if (!call->din[0].present) return FT_OK;
    return binary(call, grad_of(&call->din[0], call->accumulate[0]), data_of(&call->dout[0]), 1);
}

/* ------------------------------------------------------------------------------------- >>norms

   RMSNorm        y = x r w, r = 1 / sqrt(mean(x^2) + eps). With u = x r and g = dy w:
                  dx = r (g - u mean(g u)), dw = sum over rows of dy u. r is made again in backward.
   + residual     the row that is normed is x + delta, rounded, and is stored; its gradient gains
                  `pass`, the gradient of that sum.
   layer norm     u = (x - mean) r, y = u w + b; dx = r (g - mean(g) - u mean(g u)), db = sum of dy.
   heads          rows of D elements inside the rows of qkv; the first H of a token's H + K have one
                  weight, the others a second: two sets.

   Row i of C elements is head i % per of token i / per; it begins at token * width + head * C.

   Three kernels for each direction; W elements are an item, 16 bytes:
     long    more than 32 items a row. A group of `lanes` threads has a row, as it lies in memory:
             forward FTK_NORM_DEEP items a thread, in registers, so up to 16384 bf16 or 8192 fp32
             of C; backward 2 or 4 items a thread, in a ring in shared memory.
     short   up to 32 items a row, one a thread; `lanes` is a power of two, and a group has
             FTK_NORM_DEEP rows at a time.
     any     every other C and layer norm: a block a row, several passes over it.
   Forward moves 2 C elements a row (4 with the residual), backward 3 (4): the bound is their bytes
   over the bandwidth, and reaching it takes about 32 KB of loads under way on each multiprocessor
   of an H200. So a thread issues all loads of a row before it uses the first; forward has as many
   blocks as rows ask for; backward, whose blocks stay because they keep dw in registers, has the
   next row on its way to the ring (cp.async) while it works on this one. A thread reads only what
   it fetched itself, so the ring needs no barrier. Weights come from the L1 cache. On an H200,
   bf16, C 768 to 8192: forward 0.89 to 0.93 of a copy's bandwidth, with the residual 0.97 to 1.00;
   backward 0.72 to 0.83, with `pass` 0.83 to 0.88.
   dw: parts [blocks, sets, C] fp32, at most 264 blocks, added by ftk__parts. */

enum { FTK_NORM_THREADS = 256, FTK_NORM_MOST = 512 /* of a block */, FTK_NORM_DEEP = 4 };

typedef struct norm_args {
    const void *x, *delta, *dy, *pass; /* T; absent ones NULL */
    const void *w[2], *b;              /* T */
    void *sum, *y;                     /* T */
    grad_out dx;
    float *parts;                      /* NULL: no weight's gradient */
    int64_t rows, C, per, split, width;
    float eps;
    int lanes, sets, layer, vec;
    int stages; /* rows of a group in the ring */
} norm_args;

typedef struct norm_row { int64_t row, token, head; } norm_row;

static __device__ __forceinline__ norm_row norm_row_at(const norm_args &a, int64_t row)
{
    norm_row r;
    r.row = row;
    r.token = row / a.per;
    r.head = row % a.per;
    return r;
}

/* The row `step` further on, whose quotient and remainder by `per` are given. */
static __device__ __forceinline__ norm_row norm_row_next(norm_row r, int64_t step, int64_t tokens,
                                                         int64_t heads, int64_t per)
{
    r.row += step;
    r.token += tokens;
    r.head += heads;
    if (r.head >= per) {
        r.head -= per;
        r.token++;
    }
    return r;
}

/* Its first element. One set: rows lie one after the other, and the rest of norm_row is unused. */
template <int SETS>
static __device__ __forceinline__ int64_t norm_first(const norm_args &a, const norm_row &r)
{
    return SETS > 1 ? r.token * a.width + r.head * a.C : r.row * a.C;
}

/* Long rows. Group g of block b takes row b * groups + g, and every gridDim * groups-th after it;
   item k of a thread begins at element (lane + k * lanes) * W. */
template <typename T>
static __global__ void __launch_bounds__(FTK_NORM_MOST, 2) ftk__norm(norm_args a)
{
    constexpr int W = FTK_WIDTH(T), K = FTK_NORM_DEEP;
    __shared__ float room[2][FTK_NORM_MOST / 32];
    const int lane = (int)threadIdx.x % a.lanes, group = (int)threadIdx.x / a.lanes;
    const int groups = (int)blockDim.x / a.lanes, span = a.lanes * W, C = (int)a.C;
    const int64_t step = (int64_t)gridDim.x * groups;
    const float each = 1.0f / (float)a.C;
    const uint4 none = make_uint4(0, 0, 0, 0);
    int turn = 0;
    for (int64_t row = (int64_t)blockIdx.x * groups + group; row < a.rows; row += step, turn ^= 1) {
        const int64_t first = row * a.C;
        const T *x = (const T *)a.x + first;
        uint4 raw[K];
        float v[W], w[W], s = 0;
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = lane * W + k * span;
            raw[k] = c < C ? take(x + c, a.vec) : none;
        }
        if (a.delta) {
            uint4 more[K];
#pragma unroll
            for (int k = 0; k < K; k++) {
                const int c = lane * W + k * span;
                more[k] = c < C ? take((const T *)a.delta + first + c, a.vec) : none;
            }
#pragma unroll
            for (int k = 0; k < K; k++) {
                const int c = lane * W + k * span;
                open(v, raw[k]);
                open(w, more[k]);
                for (int j = 0; j < W; j++) v[j] = rounded(v[j] + w[j], x);
                raw[k] = closed(v);
                if (c < C) put((T *)a.sum + first + c, v, a.vec);
            }
        }
#pragma unroll
        for (int k = 0; k < K; k++) {
            open(v, raw[k]);
            for (int j = 0; j < W; j++) s += v[j] * v[j];
        }
        s = group_sum(s, a.lanes, room[turn]);
        const float r = rsqrtf(s * each + a.eps);
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = lane * W + k * span;
            if (c >= C) break;
            open(v, raw[k]);
            get(w, (const T *)a.w[0] + c, a.vec);
            for (int j = 0; j < W; j++) v[j] = v[j] * r * w[j];
            put((T *)a.y + first + c, v, a.vec);
        }
    }
}

/* Short rows. Group g of block b takes rows (b * groups + g) * R .. + R, and so on; the weights
   stay packed in registers, 16 bytes a set. */
template <typename T, int SETS>
static __global__ void __launch_bounds__(FTK_NORM_THREADS, 4) ftk__norm_short(norm_args a)
{
    constexpr int W = FTK_WIDTH(T), R = FTK_NORM_DEEP;
    const int lane = (int)threadIdx.x % a.lanes, group = (int)threadIdx.x / a.lanes;
    const int groups = (int)blockDim.x / a.lanes, c = lane * W;
    const int64_t step = (int64_t)gridDim.x * groups * R;
    const int64_t tokens = step / a.per, heads = step % a.per;
    const bool mine = c < a.C;
    const float each = 1.0f / (float)a.C;
    const T *x = (const T *)a.x, *delta = (const T *)a.delta;
    const uint4 none = make_uint4(0, 0, 0, 0);
    uint4 weights[SETS];
    for (int s = 0; s < SETS; s++)
        weights[s] = mine ? take((const T *)a.w[s] + c, a.vec) : none;
    norm_row at = norm_row_at(a, ((int64_t)blockIdx.x * groups + group) * R);
    for (int64_t first = (int64_t)blockIdx.x * groups * R; first < a.rows; first += step) {
        norm_row r = at;
        int64_t place[R];
        bool here[R], second[R];
        uint4 raw[R], more[R];
#pragma unroll
        for (int q = 0; q < R; q++) {
            here[q] = mine && r.row < a.rows;
            second[q] = SETS > 1 && r.head >= a.split;
            place[q] = norm_first<SETS>(a, r) + c;
            raw[q] = here[q] ? take(x + place[q], a.vec) : none;
            if (SETS == 1) more[q] = here[q] && delta ? take(delta + place[q], a.vec) : none;
            r = norm_row_next(r, 1, 0, 1, a.per);
        }
#pragma unroll
        for (int q = 0; q < R; q++) {
            float v[W], w[W], s = 0;
            open(v, raw[q]);
            if (SETS == 1 && delta) {
                open(w, more[q]);
                for (int j = 0; j < W; j++) v[j] = rounded(v[j] + w[j], x);
                if (here[q]) put((T *)a.sum + place[q], v, a.vec);
            }
            for (int j = 0; j < W; j++) s += v[j] * v[j];
            s = group_sum(s, a.lanes, NULL);
            const float by = rsqrtf(s * each + a.eps);
            open(w, second[q] ? weights[SETS - 1] : weights[0]);
            for (int j = 0; j < W; j++) v[j] = v[j] * by * w[j];
            if (here[q]) put((T *)a.y + place[q], v, a.vec);
        }
        at = norm_row_next(at, step, tokens, heads, a.per);
    }
}

/* Sum of the groups' rows sums[groups][slots] of columns 0..C, in order, as this block's part. */
static __device__ void norm_part(float *part, const float *sums, int groups, int slots, int C)
{
    __syncthreads();
    for (int k = (int)threadIdx.x; k < C; k += (int)blockDim.x) {
        float total = 0;
        for (int g = 0; g < groups; g++) total += sums[g * slots + k];
        part[k] = total;
    }
    __syncthreads();
}

/* 16 bytes to shared memory, there when the thread has waited for its group of copies; pieces, and
   zeros where nothing is, go through registers. */
template <typename T>
static __device__ __forceinline__ void norm_fetch(uint4 *slot, const T *base, int64_t i, int vec)
{
    if (base && vec) {
        const unsigned to = (unsigned)__cvta_generic_to_shared(slot);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(base + i)
                     : "memory");
    } else {
        *slot = base ? take(base + i, 0) : make_uint4(0, 0, 0, 0);
    }
}

/* A row's items to a slot of the ring: [x, dy, pass][K][threads]. */
template <typename T, int K, int PASS>
static __device__ __forceinline__ void norm_fetch_row(const norm_args &a, int64_t row, int lane,
                                                      uint4 *slot)
{
    constexpr int W = FTK_WIDTH(T);
    const int n = (int)blockDim.x, span = a.lanes * W, C = (int)a.C;
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = lane * W + k * span;
        const int64_t i = row * a.C + c;
        if (c >= C || row >= a.rows) break;
        norm_fetch(slot + k * n, (const T *)a.x, i, a.vec);
        norm_fetch(slot + (K + k) * n, (const T *)a.dy, i, a.vec);
        if (PASS) norm_fetch(slot + (2 * K + k) * n, (const T *)a.pass, i, a.vec);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Long rows, K items a thread; PASS: whether there is one. Two slots: a row is fetched one turn
   ahead. One: when it is needed. */
template <typename T, int K, int PASS>
static __global__ void __launch_bounds__(FTK_NORM_MOST, 4 / K) ftk__norm_grad(norm_args a)
{
    constexpr int W = FTK_WIDTH(T), SLOT = (2 + PASS) * K;
    __shared__ float2 room[2][FTK_NORM_MOST / 32];
    extern __shared__ __align__(16) uint4 ring[]; /* [stages][SLOT][threads]; at the end
                                                     sums [groups][K * lanes * W] */
    const int lane = (int)threadIdx.x % a.lanes, group = (int)threadIdx.x / a.lanes;
    const int n = (int)blockDim.x, groups = n / a.lanes, span = a.lanes * W, C = (int)a.C;
    const int64_t step = (int64_t)gridDim.x * groups;
    const float each = 1.0f / (float)a.C;
    const T *weights = (const T *)a.w[0];
    int64_t base = (int64_t)blockIdx.x * groups, row = base + group; /* the block's, the group's */
    float dw[K][W];
#pragma unroll
    for (int k = 0; k < K; k++) zero(dw[k]);
    if (a.stages > 1) norm_fetch_row<T, K, PASS>(a, row, lane, ring + threadIdx.x);
    for (int turn = 0; base < a.rows; base += step, row += step, turn ^= 1) {
        const bool here = row < a.rows;
        const uint4 *at = ring + threadIdx.x;
        float v[W], g[W], w[W];
        float2 s = make_float2(0, 0);
        if (a.stages > 1) {
            uint4 *next = ring + (turn ^ 1) * SLOT * n + threadIdx.x;
            at += turn * SLOT * n;
            norm_fetch_row<T, K, PASS>(a, row + step, lane, next);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            norm_fetch_row<T, K, PASS>(a, row, lane, ring + threadIdx.x);
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = lane * W + k * span;
            if (c >= C || !here) break;
            open(v, at[k * n]);
            open(g, at[(K + k) * n]);
            get(w, weights + c, a.vec);
            for (int j = 0; j < W; j++) {
                s.x += v[j] * v[j];
                s.y += v[j] * (g[j] * w[j]);
            }
        }
        s = group_sum(s, a.lanes, room[turn]);
        if (!here) continue;
        const float r = rsqrtf(s.x * each + a.eps), mean = s.y * each * r;
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = lane * W + k * span;
            if (c >= C) break;
            open(v, at[k * n]);
            open(g, at[(K + k) * n]);
            get(w, weights + c, a.vec);
            for (int j = 0; j < W; j++) {
                const float u = v[j] * r;
                dw[k][j] += g[j] * u;
                v[j] = r * (g[j] * w[j] - u * mean);
            }
            if (PASS) {
                open(w, at[(2 * K + k) * n]);
                for (int j = 0; j < W; j++) v[j] += w[j];
            }
            if (a.dx.data) give(a.dx, row * a.C + c, v, a.vec);
        }
    }
    if (!a.parts) return;
    float *part = a.parts + (int64_t)blockIdx.x * a.C, *sums = (float *)ring;
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads(); /* all slots have been read */
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = lane * W + k * span;
        if (groups > 1) put(sums + group * K * span + c, dw[k], 1);
        else if (c < C) put(part + c, dw[k], a.vec);
    }
    if (groups > 1) norm_part(part, sums, groups, K * span, C);
}

template <typename T, int SETS>
static __global__ void __launch_bounds__(FTK_NORM_THREADS, 2) ftk__norm_short_grad(norm_args a)
{
    constexpr int W = FTK_WIDTH(T), R = FTK_NORM_DEEP;
    extern __shared__ __align__(16) float sums[]; /* [groups][lanes * W] */
    const int lane = (int)threadIdx.x % a.lanes, group = (int)threadIdx.x / a.lanes;
    const int groups = (int)blockDim.x / a.lanes, c = lane * W;
    const int64_t step = (int64_t)gridDim.x * groups * R;
    const int64_t tokens = step / a.per, heads = step % a.per;
    const bool mine = c < a.C;
    const float each = 1.0f / (float)a.C;
    const T *x = (const T *)a.x, *dy = (const T *)a.dy, *pass = (const T *)a.pass;
    const uint4 none = make_uint4(0, 0, 0, 0);
    uint4 weights[SETS];
    float dw[SETS][W];
    for (int s = 0; s < SETS; s++) {
        zero(dw[s]);
        weights[s] = mine ? take((const T *)a.w[s] + c, a.vec) : none;
    }
    norm_row at = norm_row_at(a, ((int64_t)blockIdx.x * groups + group) * R);
    for (int64_t first = (int64_t)blockIdx.x * groups * R; first < a.rows; first += step) {
        norm_row next = at;
        int64_t place[R];
        bool here[R], second[R];
        uint4 raw[R], raw_dy[R], raw_pass[R];
#pragma unroll
        for (int q = 0; q < R; q++) {
            here[q] = mine && next.row < a.rows;
            second[q] = SETS > 1 && next.head >= a.split;
            place[q] = norm_first<SETS>(a, next) + c;
            raw[q] = here[q] ? take(x + place[q], a.vec) : none;
            raw_dy[q] = here[q] && dy ? take(dy + place[q], a.vec) : none;
            if (SETS == 1) raw_pass[q] = here[q] && pass ? take(pass + place[q], a.vec) : none;
            next = norm_row_next(next, 1, 0, 1, a.per);
        }
#pragma unroll
        for (int q = 0; q < R; q++) {
            float v[W], g[W], w[W];
            float2 s = make_float2(0, 0);
            open(v, raw[q]);
            open(g, raw_dy[q]);
            open(w, second[q] ? weights[SETS - 1] : weights[0]);
            for (int j = 0; j < W; j++) {
                s.x += v[j] * v[j];
                s.y += v[j] * (g[j] * w[j]);
            }
            s = group_sum(s, a.lanes, NULL);
            if (!here[q]) continue; /* without a row r is infinite where eps is 0 */
            const float r = rsqrtf(s.x * each + a.eps), mean = s.y * each * r;
            for (int j = 0; j < W; j++) {
                const float u = v[j] * r;
                if (second[q]) dw[SETS - 1][j] += g[j] * u;
                else dw[0][j] += g[j] * u;
                v[j] = r * (g[j] * w[j] - u * mean);
            }
            if (SETS == 1 && pass) {
                open(w, raw_pass[q]);
                for (int j = 0; j < W; j++) v[j] += w[j];
            }
            if (a.dx.data) give(a.dx, place[q], v, a.vec);
        }
        at = norm_row_next(at, step, tokens, heads, a.per);
    }
    if (!a.parts) return;
    for (int s = 0; s < SETS; s++) {
        put(sums + group * a.lanes * W + c, dw[s], 1);
        norm_part(a.parts + ((int64_t)blockIdx.x * SETS + s) * a.C, sums, groups, a.lanes * W,
                  (int)a.C);
    }
}

/* Mean (0 unless layer) and r of a row, by the whole block. */
template <typename T, int W>
static __device__ float2 norm_stats(const norm_args &a, const T *x, float2 *room)
{
    float v[W], mean = 0;
    float2 s = make_float2(0, 0);
    if (a.layer) {
        for (int64_t c = threadIdx.x * W; c < a.C; c += blockDim.x * W) {
            get(v, x + c, a.vec);
            for (int j = 0; j < W; j++) s.x += v[j];
        }
        s = block_sum(s, room);
        mean = s.x / (float)a.C;
    }
    s = make_float2(0, 0);
    for (int64_t c = threadIdx.x * W; c < a.C; c += blockDim.x * W) {
        get(v, x + c, a.vec);
        for (int j = 0; j < W; j++) s.x += (v[j] - mean) * (v[j] - mean);
    }
    s = block_sum(s, room);
    return make_float2(mean, rsqrtf(s.x / (float)a.C + a.eps));
}

template <typename T, int W>
static __global__ void __launch_bounds__(FTK_NORM_MOST) ftk__norm_any(norm_args a)
{
    __shared__ float2 room[32];
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const norm_row at = norm_row_at(a, row);
        const int64_t first = at.token * a.width + at.head * a.C;
        const T *x = (const T *)a.x + first, *delta = (const T *)a.delta, *b = (const T *)a.b;
        const T *w = (const T *)(at.head >= a.split ? a.w[1] : a.w[0]);
        float v[W], d[W];
        if (delta) {
            T *sum = (T *)a.sum + first;
            for (int64_t c = threadIdx.x * W; c < a.C; c += blockDim.x * W) {
                get(v, x + c, a.vec);
                get(d, delta + first + c, a.vec);
                for (int j = 0; j < W; j++) v[j] += d[j];
                put(sum + c, v, a.vec);
            }
            x = sum; /* its columns are read by the thread that wrote them */
        }
        const float2 stats = norm_stats<T, W>(a, x, room);
        for (int64_t c = threadIdx.x * W; c < a.C; c += blockDim.x * W) {
            get(v, x + c, a.vec);
            get(d, w + c, a.vec);
            for (int j = 0; j < W; j++) v[j] = (v[j] - stats.x) * stats.y * d[j];
            if (b) {
                get(d, b + c, a.vec);
                for (int j = 0; j < W; j++) v[j] += d[j];
            }
            put((T *)a.y + first + c, v, a.vec);
        }
    }
}

/* Parts are added to in memory: each thread has columns of its own. */
template <typename T, int W>
static __global__ void __launch_bounds__(FTK_NORM_MOST) ftk__norm_any_grad(norm_args a)
{
    __shared__ float2 room[32];
    float *parts = a.parts ? a.parts + (int64_t)blockIdx.x * a.sets * a.C : NULL;
    float v[W], g[W], w[W], old[W];
    grad_out part;
    part.half = 0;
    part.add = 1;
    zero(v);
    for (int s = 0; parts && s < a.sets; s++)
        for (int64_t c = threadIdx.x * W; c < a.C; c += blockDim.x * W)
            put(parts + s * a.C + c, v, a.vec);
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const norm_row at = norm_row_at(a, row);
        const int64_t first = at.token * a.width + at.head * a.C;
        const int second = at.head >= a.split;
        const T *x = (const T *)a.x + first, *dy = (const T *)a.dy, *pass = (const T *)a.pass;
        const float2 stats = norm_stats<T, W>(a, x, room);
        float2 s = make_float2(0, 0);
        for (int64_t c = threadIdx.x * W; c < a.C; c += blockDim.x * W) {
            get(v, x + c, a.vec);
            get_or_zero(g, dy, first + c, a.vec);
            get(w, (const T *)a.w[second] + c, a.vec);
            if (parts && a.layer) {
                for (int j = 0; j < W; j++) old[j] = g[j];
                part.data = parts + a.C;
                give(part, c, old, a.vec);
            }
            for (int j = 0; j < W; j++) {
                v[j] = (v[j] - stats.x) * stats.y;
                old[j] = g[j] * v[j];
                g[j] *= w[j];
                s.x += g[j];
                s.y += g[j] * v[j];
            }
            if (parts) {
                part.data = parts + second * a.C;
                give(part, c, old, a.vec);
            }
        }
        s = block_sum(s, room);
        const float mean = a.layer ? s.x / (float)a.C : 0.0f, dot = s.y / (float)a.C;
        for (int64_t c = threadIdx.x * W; a.dx.data && c < a.C; c += blockDim.x * W) {
            get(v, x + c, a.vec);
            get_or_zero(g, dy, first + c, a.vec);
            get(w, (const T *)a.w[second] + c, a.vec);
            for (int j = 0; j < W; j++) {
                v[j] = (v[j] - stats.x) * stats.y;
                v[j] = stats.y * (g[j] * w[j] - mean - v[j] * dot);
            }
            if (pass) {
                get(g, pass + first + c, a.vec);
                for (int j = 0; j < W; j++) v[j] += g[j];
            }
            give(a.dx, first + c, v, a.vec);
        }
    }
}

/* Threads of a row; 0: the kernel for any C. */
static int norm_lanes(int64_t C, ft_dtype t, const norm_args *a)
{
    int64_t W = width_of(t), n = C / W, lanes = 1;
    if (a->layer || C % W || n > (a->sets > 1 ? 32 : FTK_NORM_DEEP * FTK_NORM_MOST)) return 0;
    if (n > 32) return (int)(over(n, FTK_NORM_DEEP * 32) * 32);
    while (lanes < n) lanes *= 2;
    return (int)lanes;
}

/* Of a block of whole groups, about `wanted`. */
static int norm_threads(int lanes, int wanted)
{
    int groups = (int)least(wanted / lanes, 15);
    return lanes * (groups > 1 ? groups : 1);
}

static norm_args norm_begin(const ft_op_call *call, const ft_view *x, int64_t C)
{
    norm_args a;
    memset(&a, 0, sizeof a);
    a.x = x->data;
    a.C = a.width = C;
    a.rows = elems_of(x) / C;
    a.per = a.split = 1;
    a.sets = 1;
    a.eps = (float)call->attr.f[0];
    return a;
}

static void norm_align(norm_args *a)
{
    a->vec = aligned(FTK_AT(a->x) | FTK_AT(a->delta) | FTK_AT(a->dy) | FTK_AT(a->pass) |
                     FTK_AT(a->w[0]) | FTK_AT(a->w[1]) | FTK_AT(a->b) | FTK_AT(a->sum) |
                     FTK_AT(a->y) | FTK_AT(a->dx.data) | FTK_AT(a->parts));
}

#define FTK_NORM_SHORT(kernel, dtype, a, blocks, shared, stream)                                   \
    do {                                                                                           \
        if ((dtype) == FT_BF16 && (a).sets > 1)                                                    \
            kernel<bf16, 2><<<blocks, FTK_NORM_THREADS, shared, stream>>>(a);                      \
        else if ((dtype) == FT_BF16)                                                               \
            kernel<bf16, 1><<<blocks, FTK_NORM_THREADS, shared, stream>>>(a);                      \
        else if ((a).sets > 1)                                                                     \
            kernel<float, 2><<<blocks, FTK_NORM_THREADS, shared, stream>>>(a);                     \
        else kernel<float, 1><<<blocks, FTK_NORM_THREADS, shared, stream>>>(a);                    \
    } while (0)

static ft_status norm_forward(const ft_op_call *call, norm_args a, ft_dtype t)
{
    cudaStream_t stream = stream_of(call);
    const int64_t W = width_of(t);
    norm_align(&a);
    a.lanes = norm_lanes(a.C, t, &a);
    if (!a.lanes) {
        unsigned blocks = (unsigned)least(a.rows, 8 * FTK_BLOCKS);
        FTK_ROWS(ftk__norm_any, t, a.C % W == 0, blocks, FTK_NORM_THREADS, 0, stream, a);
    } else if (a.C > 32 * W) { /* of smaller blocks too few fit on a multiprocessor */
        unsigned threads = (unsigned)norm_threads(a.lanes, FTK_NORM_THREADS);
        unsigned blocks = (unsigned)least(over(a.rows, threads / a.lanes), 1 << 20);
        if (t == FT_BF16) ftk__norm<bf16><<<blocks, threads, 0, stream>>>(a);
        else ftk__norm<float><<<blocks, threads, 0, stream>>>(a);
    } else {
        int64_t rows = FTK_NORM_THREADS / a.lanes * FTK_NORM_DEEP; /* of a block at a time */
        unsigned blocks = (unsigned)least(over(a.rows, rows), FTK_BLOCKS);
        FTK_NORM_SHORT(ftk__norm_short, t, a, blocks, 0, stream);
    }
    return launched(call->op->name);
}

/* Two rows a group in the ring where the chip has room for them, else one: that is at most 96 KB.
   Ranks of a process share what a kernel may take, so all ask for the same: all that there is. */
template <typename T, int K, int PASS>
static ft_status norm_grad_launch(const char *name, norm_args a, unsigned blocks, unsigned threads,
                                  cudaStream_t stream)
{
    enum { FIXED = 1024 }; /* what the kernel and the system have of a block's shared memory */
    size_t shared = (2 + PASS) * K * threads * sizeof(uint4);
    size_t sums = a.parts ? threads * K * FTK_WIDTH(T) * sizeof(float) : 0;
    int most = 0, device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute((const void *)ftk__norm_grad<T, K, PASS>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, most - FIXED);
    if (error != cudaSuccess)
        return ft_error(FT_ERR_UNSUPPORTED, "kernel %s was not launched: %s", name,
                        cudaGetErrorString(error));
    a.stages = 2 * shared + FIXED <= (size_t)most ? 2 : 1;
    shared *= (size_t)a.stages;
    if (shared < sums) shared = sums;
    ftk__norm_grad<T, K, PASS><<<blocks, threads, shared, stream>>>(a);
    return FT_OK;
}

/* Long rows: 2 items a thread; 4 where 2 would need only one or two warps, or more threads than a
   block has. */
static ft_status norm_grad_start(const char *name, norm_args a, ft_dtype t, int64_t parts,
                                 cudaStream_t stream)
{
    const int64_t items = a.C / width_of(t);
    const int K = items <= 96 || items > 2 * FTK_NORM_MOST ? 4 : 2;
    a.lanes = (int)(over(items, K * 32) * 32);
    unsigned threads = (unsigned)norm_threads(a.lanes, K == 2 ? FTK_NORM_MOST : FTK_NORM_THREADS);
    int64_t groups = threads / a.lanes;
    unsigned blocks = (unsigned)(parts ? parts : least(over(a.rows, groups), FTK_BLOCKS));
    const int pass = a.pass != NULL;
#define FTK_NORM_GRAD(T, K, PASS)                                                                  \
    norm_grad_launch<T, K, PASS>(name, a, blocks, threads, stream)
    if (t == FT_BF16 && K == 2)
        return pass ? FTK_NORM_GRAD(bf16, 2, 1) : FTK_NORM_GRAD(bf16, 2, 0);
    if (t == FT_BF16) return pass ? FTK_NORM_GRAD(bf16, 4, 1) : FTK_NORM_GRAD(bf16, 4, 0);
    if (K == 2) return pass ? FTK_NORM_GRAD(float, 2, 1) : FTK_NORM_GRAD(float, 2, 0);
    return pass ? FTK_NORM_GRAD(float, 4, 1) : FTK_NORM_GRAD(float, 4, 0);
#undef FTK_NORM_GRAD
}

/* The parts are as many as the workspace holds; without a weight's gradient there is none. */
static ft_status norm_backward(const ft_op_call *call, norm_args a, ft_dtype t,
                               const grad_out *dw)
{
    cudaStream_t stream = stream_of(call);
    int wanted = 0;
    int64_t n = 0;
    for (int s = 0; s < a.sets; s++) wanted |= dw[s].data != NULL;
    if (!wanted && !a.dx.data) return FT_OK;
    if (wanted) {
        n = (int64_t)(call->workspace_bytes / ((size_t)a.sets * (size_t)a.C * sizeof(float)));
        a.parts = (float *)call->workspace;
        if (n < 1)
            return ft_error(FT_ERR_UNSUPPORTED, "%s: %zu bytes of workspace", call->op->name,
                            call->workspace_bytes);
    }
    const int64_t W = width_of(t);
    norm_align(&a);
    a.lanes = norm_lanes(a.C, t, &a);
    if (!a.lanes) {
        unsigned blocks = (unsigned)(n ? n : least(a.rows, 8 * FTK_BLOCKS));
        unsigned threads = a.C > FTK_NORM_THREADS * W ? FTK_NORM_MOST : FTK_NORM_THREADS;
        FTK_ROWS(ftk__norm_any_grad, t, a.C % W == 0, blocks, threads, 0, stream, a);
    } else if (a.C > 32 * W) {
        FT_TRY(norm_grad_start(call->op->name, a, t, n, stream));
    } else {
        int64_t rows = FTK_NORM_THREADS / a.lanes * FTK_NORM_DEEP;
        unsigned blocks = (unsigned)(n ? n : least(over(a.rows, rows), FTK_BLOCKS));
        FTK_NORM_SHORT(ftk__norm_short_grad, t, a, blocks,
                       FTK_NORM_THREADS * W * sizeof(float), stream);
    }
    FT_TRY(launched(call->op->name));
    for (int s = 0; s < a.sets; s++)
        if (dw[s].data)
            FT_TRY(parts_sum(call->op->name, a.parts + s * a.C, n, a.sets * a.C, a.C, dw[s],
                             stream));
    return FT_OK;
}

FT_API ft_status ftk_rmsnorm_forward(const ft_op_call *call)
{
    const ft_view *x = &call->in[0];
    norm_args a = norm_begin(call, x, cols_of(x));
    a.w[0] = call->in[1].data;
    a.y = call->out[0].data;
    return norm_forward(call, a, x->dtype);
}

FT_API ft_status ftk_rmsnorm_backward(const ft_op_call *call)
{
    const ft_view *x = &call->in[0];
    norm_args a = norm_begin(call, x, cols_of(x));
    grad_out dw = grad_of(&call->din[1], call->accumulate[1]);
    FT_TRY(check_dout(call, 0, x->dtype));
    a.w[0] = call->in[1].data;
    a.dy = data_of(&call->dout[0]);
    a.dx = grad_of(&call->din[0], call->accumulate[0]);
    return norm_backward(call, a, x->dtype, &dw);
}

FT_API ft_status ftk_add_rmsnorm_forward(const ft_op_call *call)
{
    const ft_view *x = &call->in[0];
    norm_args a = norm_begin(call, x, cols_of(x));
    a.delta = call->in[1].data;
    a.w[0] = call->in[2].data;
    a.sum = call->out[0].data;
    a.y = call->out[1].data;
    return norm_forward(call, a, x->dtype);
}

FT_API ft_status ftk_add_rmsnorm_replay(const ft_op_call *call)
{
    const ft_view *sum = &call->out[0];
    norm_args a = norm_begin(call, sum, cols_of(sum));
    a.w[0] = call->in[2].data;
    a.y = call->out[1].data;
    return norm_forward(call, a, sum->dtype);
}

FT_API ft_status ftk_add_rmsnorm_backward(const ft_op_call *call)
{
    const ft_view *sum = &call->out[0];
    norm_args a = norm_begin(call, sum, cols_of(sum));
    grad_out dw = grad_of(&call->din[2], call->accumulate[2]);
    int to = call->din[0].present ? 0 : 1; /* one buffer holds the gradient of both */
    FT_TRY(check_dout(call, 0, sum->dtype));
    FT_TRY(check_dout(call, 1, sum->dtype));
    a.w[0] = call->in[2].data;
    a.dy = data_of(&call->dout[1]);
    a.pass = data_of(&call->dout[0]);
    a.dx = grad_of(&call->din[to], call->accumulate[to]);
    return norm_backward(call, a, sum->dtype, &dw);
}

static norm_args head_norm_begin(const ft_op_call *call)
{
    const int64_t H = call->attr.i[0], K = call->attr.i[1], D = call->attr.i[2];
    const ft_view *qkv = &call->in[0];
    norm_args a = norm_begin(call, qkv, D);
    a.per = H + K;
    a.split = H;
    a.width = cols_of(qkv);
    a.rows = rows_of(qkv) * a.per;
    a.sets = 2;
    a.w[0] = call->in[1].data;
    a.w[1] = call->in[2].data;
    return a;
}

/* The value heads, K D elements of each row, go over as they are. */
static ft_status head_norm_values(const ft_op_call *call, grad_out to, const void *from)
{
    const int64_t D = call->attr.i[2], width = cols_of(&call->in[0]), K = call->attr.i[1];
    const int64_t first = (call->attr.i[0] + K) * D;
    ft_dtype t = call->in[0].dtype;
    if (to.data == from) return FT_OK;
    to.data = (char *)to.data + first * (to.half ? 2 : 4);
    if (from) from = (const char *)from + first * (int64_t)ft_dtype_bytes(t);
    return move("head_norm", to, from, t, rows_of(&call->in[0]), K * D, width, stream_of(call));
}

FT_API ft_status ftk_head_norm_forward(const ft_op_call *call)
{
    norm_args a = head_norm_begin(call);
    a.y = call->out[0].data;
    FT_TRY(norm_forward(call, a, call->in[0].dtype));
    return head_norm_values(call, grad_of(&call->out[0], 0), call->in[0].data);
}

FT_API ft_status ftk_head_norm_backward(const ft_op_call *call)
{
    norm_args a = head_norm_begin(call);
    grad_out dw[2];
    FT_TRY(check_dout(call, 0, call->in[0].dtype));
    a.dy = data_of(&call->dout[0]);
    a.dx = grad_of(&call->din[0], call->accumulate[0]);
    for (int s = 0; s < 2; s++) dw[s] = grad_of(&call->din[1 + s], call->accumulate[1 + s]);
    FT_TRY(norm_backward(call, a, call->in[0].dtype, dw));
    if (!a.dx.data) return FT_OK;
    return head_norm_values(call, a.dx, a.dy);
}

static norm_args layer_norm_begin(const ft_op_call *call)
{
    norm_args a = norm_begin(call, &call->in[0], cols_of(&call->in[0]));
    a.layer = 1;
    a.w[0] = call->in[1].data;
    a.b = call->in[2].data;
    return a;
}

FT_API ft_status ftk_layer_norm_forward(const ft_op_call *call)
{
    norm_args a = layer_norm_begin(call);
    a.y = call->out[0].data;
    return norm_forward(call, a, call->in[0].dtype);
}

FT_API ft_status ftk_layer_norm_backward(const ft_op_call *call)
{
    norm_args a = layer_norm_begin(call);
    grad_out dw[2]; /* of w and b: both sets belong to every row */
    FT_TRY(check_dout(call, 0, call->in[0].dtype));
    a.sets = 2;
    a.b = NULL;
    a.dy = data_of(&call->dout[0]);
    a.dx = grad_of(&call->din[0], call->accumulate[0]);
    for (int s = 0; s < 2; s++) dw[s] = grad_of(&call->din[1 + s], call->accumulate[1 + s]);
    return norm_backward(call, a, call->in[0].dtype, dw);
}

/* -------------------------------------------------------------------------------------- >>rope

   Heads 0..H+K-1 of a token turn by its angles: (x, y) -> (x cos - y sin, x sin + y cos) for the
   pairs (i, i + D/2); backward with sign -1. table fp32 [T, D/2, 2] of (cos, sin). Threads x take W
   neighbouring pairs, threads y heads; the angles stay in registers. Value heads are copied in the
   same way unless they are in place. Moves 2 B T (H+K) D elements: the bound is their bytes.
   ftk__rope takes any D, a token a block, a head at a time. ftk__rope_wide is for halves of up
   to 32 items of 16 bytes: threads z over tokens, and FTK_TURNED heads of a thread under way at a
   time, which divides what the angles cost by as many. */

enum { FTK_TURNED = 4 };

typedef struct rope_args {
    grad_out to;
    const void *from; /* T; NULL: zero */
    const float *table;
    int64_t rows, T, width, D, turned, heads; /* heads: turned ones, and those only copied */
    float sign;
    int vec;
} rope_args;

template <typename T, int W> static __global__ void ftk__rope(rope_args a)
{
    const T *from = (const T *)a.from;
    const int64_t half = a.D / 2;
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const float *angles = a.table + row % a.T * a.D;
        for (int64_t i = threadIdx.x * W; i < half; i += blockDim.x * W) {
            float cosine[W], sine[W], x[W], y[W];
            for (int j = 0; j < W; j++) {
                float2 angle;
                if (a.vec) angle = ((const float2 *)angles)[i + j];
                else angle = make_float2(angles[2 * (i + j)], angles[2 * (i + j) + 1]);
                cosine[j] = angle.x;
                sine[j] = a.sign * angle.y;
            }
            for (int64_t h = threadIdx.y; h < a.heads; h += blockDim.y) {
                const int64_t at = row * a.width + h * a.D + i;
                get_or_zero(x, from, at, a.vec);
                get_or_zero(y, from, at + half, a.vec);
                if (h < a.turned)
                    for (int j = 0; j < W; j++) {
                        const float left = x[j] * cosine[j] - y[j] * sine[j];
                        y[j] = x[j] * sine[j] + y[j] * cosine[j];
                        x[j] = left;
                    }
                give(a.to, at, x, a.vec);
                give(a.to, at + half, y, a.vec);
            }
        }
    }
}

template <typename T> static __global__ void __launch_bounds__(256, 3) ftk__rope_wide(rope_args a)
{
    constexpr int W = FTK_WIDTH(T), R = FTK_TURNED;
    const T *from = (const T *)a.from;
    const int half = (int)a.D / 2, i = (int)threadIdx.x * W, heads = (int)a.heads;
    const uint4 none = make_uint4(0, 0, 0, 0);
    if (i >= half) return;
    for (int64_t row = (int64_t)blockIdx.x * blockDim.z + threadIdx.z; row < a.rows;
         row += (int64_t)gridDim.x * blockDim.z) {
        const int64_t t = a.rows >> 32 ? row % a.T : (unsigned)row % (unsigned)a.T;
        const int64_t first = row * a.width;
        const float *angles = a.table + t * a.D + 2 * i;
        float cosine[W], sine[W];
#pragma unroll
        for (int j = 0; j < W; j += 2) {
            float both[4];
            get(both, angles + 2 * j, a.vec);
            cosine[j] = both[0];
            sine[j] = a.sign * both[1];
            cosine[j + 1] = both[2];
            sine[j + 1] = a.sign * both[3];
        }
        for (int h = (int)threadIdx.y; h < heads; h += R * (int)blockDim.y) {
            uint4 left[R], right[R];
#pragma unroll
            for (int q = 0; q < R; q++) {
                const int head = h + q * (int)blockDim.y, at = head * 2 * half + i;
                const bool here = head < heads && from;
                left[q] = here ? take(from + first + at, a.vec) : none;
                right[q] = here ? take(from + first + at + half, a.vec) : none;
            }
#pragma unroll
            for (int q = 0; q < R; q++) {
                const int head = h + q * (int)blockDim.y;
                const int64_t at = first + head * 2 * half + i;
                if (head >= heads) break;
                float x[W], y[W];
                open(x, left[q]);
                open(y, right[q]);
                if (head < (int)a.turned)
                    for (int j = 0; j < W; j++) {
                        const float turned = x[j] * cosine[j] - y[j] * sine[j];
                        y[j] = x[j] * sine[j] + y[j] * cosine[j];
                        x[j] = turned;
                    }
                give(a.to, at, x, a.vec);
                give(a.to, at + half, y, a.vec);
            }
        }
    }
}

static ft_status rope(const ft_op_call *call, grad_out to, const ft_view *from, float sign)
{
    const int64_t H = call->attr.i[0], K = call->attr.i[1];
    const ft_view *qkv = &call->in[0];
    ft_dtype t = qkv->dtype;
    rope_args a;
    memset(&a, 0, sizeof a);
    a.to = to;
    a.from = data_of(from);
    a.table = (const float *)call->in[1].data;
    a.rows = rows_of(qkv);
    a.T = qkv->shape[1];
    a.width = cols_of(qkv);
    a.D = call->attr.i[2];
    a.turned = H + K;
    a.heads = a.from && a.from == to.data ? H + K : H + 2 * K;
    a.sign = sign;
    a.vec = aligned(FTK_AT(to.data) | FTK_AT(a.from) | FTK_AT(a.table));
    const int wide = a.D / 2 % width_of(t) == 0;
    int64_t items = a.D / 2 / (wide ? width_of(t) : 1), x = 1;
    while (x < 32 && x < items) x *= 2;
    cudaStream_t stream = stream_of(call);
    if (wide && items <= 32) {
        int64_t y = least(over(a.heads, FTK_TURNED), 256 / x), z = 256 / (x * y);
        dim3 block((unsigned)x, (unsigned)y, (unsigned)least(z, 64));
        unsigned blocks = (unsigned)least(over(a.rows, block.z), 1 << 20);
        if (t == FT_BF16) ftk__rope_wide<bf16><<<blocks, block, 0, stream>>>(a);
        else ftk__rope_wide<float><<<blocks, block, 0, stream>>>(a);
        return launched("rope");
    }
    int64_t turns = over(a.heads, 256 / x); /* of a thread, over heads */
    dim3 block((unsigned)x, (unsigned)over(a.heads, turns), 1);
    unsigned blocks = (unsigned)least(a.rows, 1 << 20);
    FTK_ROWS(ftk__rope, t, wide, blocks, block, 0, stream, a);
    return launched("rope");
}

FT_API ft_status ftk_rope_forward(const ft_op_call *call)
{
    return rope(call, grad_of(&call->out[0], 0), &call->in[0], 1.0f);
}

FT_API ft_status ftk_rope_backward(const ft_op_call *call)
{
    if (!call->din[0].present) return FT_OK;
    FT_TRY(check_dout(call, 0, call->in[0].dtype));
    return rope(call, grad_of(&call->din[0], call->accumulate[0]), &call->dout[0], -1.0f);
}

/* ----------------------------------------------------------------------------------- >>softmax

   y = exp(x - max) / sum, dx = y (dy - sum(dy y)), over the last dimension. A block a row, several
   passes over it. */

template <typename T, int W>
static __global__ void ftk__softmax(void *y_, const void *x_, int64_t rows, int64_t n, int vec)
{
    __shared__ float2 room[32];
    __shared__ float tops[32];
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *x = (const T *)x_ + row * n;
        T *y = (T *)y_ + row * n;
        float v[W], top = -INFINITY;
        for (int64_t i = threadIdx.x * W; i < n; i += blockDim.x * W) {
            get(v, x + i, vec);
            for (int j = 0; j < W; j++) top = fmaxf(top, v[j]);
        }
        top = block_max(top, tops);
        float2 s = make_float2(0, 0);
        for (int64_t i = threadIdx.x * W; i < n; i += blockDim.x * W) {
            get(v, x + i, vec);
            for (int j = 0; j < W; j++) s.x += expf(v[j] - top);
        }
        const float inverse = 1.0f / block_sum(s, room).x;
        for (int64_t i = threadIdx.x * W; i < n; i += blockDim.x * W) {
            get(v, x + i, vec);
            for (int j = 0; j < W; j++) v[j] = expf(v[j] - top) * inverse;
            put(y + i, v, vec);
        }
    }
}

template <typename T, int W>
static __global__ void ftk__softmax_grad(grad_out dx, const void *dy_, const void *y_,
                                         int64_t rows, int64_t n, int vec)
{
    __shared__ float2 room[32];
    const T *dy = (const T *)dy_;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *y = (const T *)y_ + row * n;
        float v[W], g[W];
        float2 s = make_float2(0, 0);
        for (int64_t i = threadIdx.x * W; i < n; i += blockDim.x * W) {
            get(v, y + i, vec);
            get_or_zero(g, dy, row * n + i, vec);
            for (int j = 0; j < W; j++) s.x += v[j] * g[j];
        }
        s = block_sum(s, room);
        for (int64_t i = threadIdx.x * W; i < n; i += blockDim.x * W) {
            get(v, y + i, vec);
            get_or_zero(g, dy, row * n + i, vec);
            for (int j = 0; j < W; j++) v[j] *= g[j] - s.x;
            give(dx, row * n + i, v, vec);
        }
    }
}

static unsigned row_threads(int64_t items) /* of a block that has a row of so many items */
{
    int64_t n = over(items, 32) * 32;
    return (unsigned)least(n, 256);
}

FT_API ft_status ftk_softmax_forward(const ft_op_call *call)
{
    const ft_view *x = &call->in[0], *y = &call->out[0];
    int64_t rows = rows_of(x), n = cols_of(x), W = width_of(x->dtype);
    int wide = n % W == 0, vec = aligned(FTK_AT(x->data) | FTK_AT(y->data));
    unsigned blocks = (unsigned)least(rows, 1 << 20), threads = row_threads(wide ? n / W : n);
    FTK_ROWS(ftk__softmax, x->dtype, wide, blocks, threads, 0, stream_of(call), y->data, x->data,
             rows, n, vec);
    return launched("softmax");
}

FT_API ft_status ftk_softmax_backward(const ft_op_call *call)
{
    const ft_view *y = &call->out[0], *dx = &call->din[0];
    const void *dy = data_of(&call->dout[0]);
    int64_t rows = rows_of(y), n = cols_of(y), W = width_of(y->dtype);
    if (!dx->present) return FT_OK;
    FT_TRY(check_dout(call, 0, y->dtype));
    int wide = n % W == 0, vec = aligned(FTK_AT(y->data) | FTK_AT(dx->data) | FTK_AT(dy));
    unsigned blocks = (unsigned)least(rows, 1 << 20), threads = row_threads(wide ? n / W : n);
    FTK_ROWS(ftk__softmax_grad, y->dtype, wide, blocks, threads, 0, stream_of(call),
             grad_of(dx, call->accumulate[0]), dy, y->data, rows, n, vec);
    return launched("softmax");
}

/* ---- sums of everything: of x (mean) or of x^2 (norm of the gradients)

   Parts of 256 threads, as many as the workspace has doubles; a thread adds 16 bytes in fp32 and
   those sums in double; then one block adds the parts. Reads n elements once. ---- */

template <typename T, int W>
static __device__ __forceinline__ double piece(const T *x, int square, int vec)
{
    float v[W], s = 0;
    get(v, x, vec);
    for (int j = 0; j < W; j++) s += square ? v[j] * v[j] : v[j];
    return (double)s;
}

template <typename T>
static __global__ void __launch_bounds__(256) ftk__total(const void *x_, int64_t n, int square,
                                                         double *parts, int vec)
{
    constexpr int W = FTK_WIDTH(T);
    __shared__ double room[32];
    const T *x = (const T *)x_;
    const int64_t items = n / W, step = (int64_t)gridDim.x * 256;
    const int64_t me = (int64_t)blockIdx.x * 256 + threadIdx.x;
    double s = 0;
#pragma unroll 4
    for (int64_t i = me; i < items; i += step) s += piece<T, W>(x + i * W, square, vec);
    if (me < n - items * W) s += piece<T, 1>(x + items * W + me, square, 1);
    s = block_sum(s, room);
    if (threadIdx.x == 0) parts[blockIdx.x] = s;
}

static __global__ void __launch_bounds__(256) ftk__total_end(const double *parts, int n,
                                                             double by, float *out)
{
    __shared__ double room[32];
    double s = 0;
    for (int i = threadIdx.x; i < n; i += 256) s += parts[i];
    s = block_sum(s, room);
    if (threadIdx.x == 0) *out = (float)(s / by);
}

static ft_status total(const ft_op_call *call, const ft_view *x, int64_t n, int square, double by,
                       float *out)
{
    cudaStream_t stream = stream_of(call);
    double *parts = (double *)call->workspace;
    unsigned blocks = (unsigned)(call->workspace_bytes / sizeof(double));
    int vec = aligned(FTK_AT(x->data));
    if (!blocks)
        return ft_error(FT_ERR_UNSUPPORTED, "%s: no workspace", call->op->name);
    if (x->dtype == FT_BF16)
        ftk__total<bf16><<<blocks, 256, 0, stream>>>(x->data, n, square, parts, vec);
    else ftk__total<float><<<blocks, 256, 0, stream>>>(x->data, n, square, parts, vec);
    FT_TRY(launched(call->op->name));
    ftk__total_end<<<1, 256, 0, stream>>>(parts, (int)blocks, by, out);
    return launched(call->op->name);
}

FT_API ft_status ftk_mean_forward(const ft_op_call *call)
{
    int64_t n = elems_of(&call->in[0]);
    return total(call, &call->in[0], n, 0, (double)n, (float *)call->out[0].data);
}

/* dx[n] = or += dout / n */
template <typename T, int W>
static __global__ void ftk__mean_grad(grad_out dx, const float *dout, int64_t n)
{
    const float each = dout ? (float)((double)*dout / (double)n) : 0.0f;
    int64_t i = item_at<W>();
    if (i + W <= n) {
        float v[W];
        for (int j = 0; j < W; j++) v[j] = each;
        give(dx, i, v, 1);
    } else {
        for (; i < n; i++) {
            float v[1] = {each};
            give(dx, i, v, 1);
        }
    }
}

FT_API ft_status ftk_mean_backward(const ft_op_call *call)
{
    const ft_view *dx = &call->din[0];
    int64_t n = elems_of(&call->in[0]);
    if (!dx->present) return FT_OK;
    FT_TRY(check_dout(call, 0, FT_F32));
    plane p = plane_of(1, n, dx->dtype, FTK_AT(dx->data));
    FTK_PLANE(ftk__mean_grad, dx->dtype, p, stream_of(call), grad_of(dx, call->accumulate[0]),
              (const float *)data_of(&call->dout[0]), n);
    return launched("mean");
}

/* ------------------------------------------------------------------------------------- >>lookup

   Forward: y[N,C] = table[token - first], zero where the row is another rank's or the token cannot
   be. A plane of tokens x items; 2 N C elements.

   Backward: dtable[v] = or += the sum of the rows of dy whose token is v, in fp32, rounded once.
   The positions are sorted by token, those of a token in order, and the sorted list is cut into
   pieces of FTK_PIECE, whatever tokens these hold: one frequent token is as quick as many.
     1. count[v], and total[] of FTK_CHUNK rows each, by integer atomics, one for equal tokens of a
        warp;
     2. end[v] = where the list of v begins, by sums over total and count;
     3. a row that occurs at most FTK_PIECE times: its positions are put into its list in whatever
        order the threads come, which moves end[v] to the list's end, and a warp sorts them; a row
        that occurs more often: a block goes through all tokens and lists those that match;
     4. rows that do not occur are set to zero, unless dtable is added to;
     5. a block a piece adds the rows of dy that it names, in order. A token whose list lies in the
        piece goes to dtable; the piece's first token, if its list began before, leaves a partial
        sum [C] in parts[piece][0], else its last token, if its list goes on, in parts[piece][1];
     6. lists of several pieces: thread y of 16 adds partial sums y, y + 16, ..., then the 16.
   Where lists are cut follows from the counts alone, so the sums' order does not depend on timing.
   Workspace: fp32 parts [N / FTK_PIECE, 2, C]; int32 count [V], total, end [V], positions [N]; see
   ftk_lookup_bytes. Moves the rows of dy once and dtable once (twice where it adds; rows without a
   token are then left alone), and of partial sums at most 4 C elements for each piece. */

/* FTK_PIECE is also the lanes of a warp, which sorts as many. */

typedef struct lookup_args {
    const int32_t *tokens;
    const void *table, *dy; /* T; NULL: none */
    void *y;
    grad_out dtable;
    int64_t n, C, first, rows, V;
    int32_t *count, *end, *total, *order;
    float *parts;
    uint64_t *fault;
    int kind, vec;
} lookup_args;

/* The table's row for the token at position i, -1 for none. */
static __device__ __forceinline__ int64_t lookup_row(const lookup_args &a, int64_t i)
{
    const int64_t token = a.tokens[i], row = token - a.first;
    return row >= 0 && row < a.rows && token < a.V ? row : -1;
}

template <typename T, int W> static __global__ void ftk__lookup(lookup_args a)
{
    const int64_t c = item_at<W>();
    if (c >= a.C) return;
    FTK_EACH_ROW(i, a.n) {
        const int32_t token = a.tokens[i];
        const int64_t row = a.table ? lookup_row(a, i) : -1;
        if (c == 0 && (token < 0 || token >= a.V)) note_fault(a.fault, a.kind, i, a.n, token, a.V);
        float v[W];
        if (row >= 0) get(v, (const T *)a.table + row * a.C + c, 1);
        else zero(v);
        put((T *)a.y + i * a.C + c, v, 1);
    }
}

static __global__ void ftk__lookup_count(lookup_args a)
{
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    const int lane = threadIdx.x & 31;
    for (int64_t first = (int64_t)blockIdx.x * blockDim.x; first < a.n; first += step) {
        const int64_t i = first + threadIdx.x;
        const int32_t token = i < a.n ? a.tokens[i] : 0;
        const int row = i < a.n ? (int)lookup_row(a, i) : -1;
        if (token < 0 || token >= a.V) note_fault(a.fault, a.kind, i, a.n, token, a.V);
        const unsigned equal = __match_any_sync(~0u, row);
        if (row < 0 || lane != __ffs((int)equal) - 1) continue;
        atomicAdd(&a.count[row], __popc(equal));
        atomicAdd(&a.total[row / FTK_CHUNK], __popc(equal));
    }
}

/* Inclusive sums over the threads of a block of FTK_CHUNK; `all`: the whole sum. */
static __device__ int block_upto(int x, int *room, int *all)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int o = 1; o < 32; o *= 2) {
        const int before = __shfl_up_sync(~0u, x, o);
        if (lane >= o) x += before;
    }
    __syncthreads();
    if (lane == 31) room[warp] = x;
    __syncthreads();
    *all = 0;
    for (int w = 0; w < FTK_CHUNK / 32; w++) {
        if (w < warp) x += room[w];
        *all += room[w];
    }
    return x;
}

/* Block b: the chunks before chunk b, then the rows of it. */
static __global__ void __launch_bounds__(FTK_CHUNK) ftk__lookup_room(lookup_args a)
{
    __shared__ int room[32];
    const int64_t v = (int64_t)blockIdx.x * FTK_CHUNK + threadIdx.x;
    const int count = v < a.rows ? a.count[v] : 0;
    int before = 0, base, all;
    for (int64_t k = threadIdx.x; k < blockIdx.x; k += FTK_CHUNK) before += a.total[k];
    block_upto(before, room, &base);
    const int upto = block_upto(count, room, &all);
    if (v < a.rows) a.end[v] = base + upto - count;
    if (threadIdx.x == 0 && blockIdx.x == gridDim.x - 1) a.total[gridDim.x] = base + all;
}

static __global__ void ftk__lookup_place(lookup_args a)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < a.n;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = lookup_row(a, i);
        if (row >= 0 && a.count[row] <= FTK_PIECE)
            a.order[atomicAdd(&a.end[row], 1)] = (int32_t)i;
    }
}

/* Where the list of v begins, once the short ones have been placed. */
static __device__ __forceinline__ int lookup_begin(const lookup_args &a, int64_t v)
{
    const int count = a.count[v];
    return a.end[v] - (count <= FTK_PIECE ? count : 0);
}

/* The positions of v, in order, from `to` on: by a block of 256 threads, 4 of each at a time. */
static __device__ void lookup_scan(const lookup_args &a, int64_t v, int32_t *to, int (*room)[32])
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, count = a.count[v];
    int found = 0, turn = 0;
    for (int64_t base = 0; found < count && base < a.n; base += 1024, turn ^= 1) {
        unsigned hits[4];
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const int64_t i = base + q * 256 + threadIdx.x;
            hits[q] = __ballot_sync(~0u, i < a.n && lookup_row(a, i) == v);
            if (lane == 0) room[turn][q * 8 + warp] = __popc(hits[q]);
        }
        __syncthreads();
#pragma unroll
        for (int q = 0; q < 4; q++)
            for (int w = 0; w < 8; w++) {
                if (w == warp && hits[q] >> lane & 1)
                    to[found + __popc(hits[q] & ((1u << lane) - 1))] =
                        (int32_t)(base + q * 256 + threadIdx.x);
                found += room[turn][q * 8 + w];
            }
    }
    __syncthreads();
}

/* Block b takes rows b, b + gridDim, ..., 256 of them at a time: each warp sorts the short lists of
   its 32, then the block makes the long ones. A position's rank is how many are smaller. */
static __global__ void __launch_bounds__(256) ftk__lookup_order(lookup_args a)
{
    __shared__ int room[2][32], longs;
    __shared__ int64_t list[256];
    const int lane = threadIdx.x & 31;
    for (int64_t first = 0; first * gridDim.x < a.rows; first += 256) {
        const int64_t v = blockIdx.x + (first + threadIdx.x) * gridDim.x;
        const int count = v < a.rows ? a.count[v] : 0;
        const int begin = count > 1 ? lookup_begin(a, v) : 0;
        if (threadIdx.x == 0) longs = 0;
        __syncthreads();
        if (count > FTK_PIECE) list[atomicAdd(&longs, 1)] = v;
        unsigned todo = __ballot_sync(~0u, count > 1 && count <= FTK_PIECE);
        for (; todo; todo &= todo - 1) {
            const int from = __ffs((int)todo) - 1;
            const int n = __shfl_sync(~0u, count, from), at = __shfl_sync(~0u, begin, from);
            const int mine = lane < n ? a.order[at + lane] : 0;
            int rank = 0;
            for (int j = 0; j < n; j++) rank += __shfl_sync(~0u, mine, j) < mine;
            if (lane < n) a.order[at + rank] = mine;
        }
        __syncthreads();
        for (int k = 0; k < longs; k++)
            lookup_scan(a, list[k], a.order + lookup_begin(a, list[k]), room);
        __syncthreads();
    }
}

/* Rows that no token asks for. A plane of rows x items. */
template <typename T, int W> static __global__ void ftk__lookup_clear(lookup_args a)
{
    const int64_t c = item_at<W>();
    if (c >= a.C) return;
    FTK_EACH_ROW(v, a.rows) {
        float none[W];
        zero(none);
        if (a.count[v] == 0) give(a.dtable, v * a.C + c, none, a.vec);
    }
}

/* Block (p, tile): piece p, blockDim * W columns. Eight rows of dy are under way at a time. */
template <typename T, int W>
static __global__ void __launch_bounds__(256) ftk__lookup_sum(lookup_args a)
{
    constexpr int R = 8;
    __shared__ int32_t order[FTK_PIECE], row[FTK_PIECE];
    __shared__ int begins, ends; /* whether the first list begins here, the last one ends here */
    const int64_t chunks = (a.rows + FTK_CHUNK - 1) / FTK_CHUNK;
    const int64_t begin = (int64_t)blockIdx.x * FTK_PIECE;
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * W;
    const int64_t left = a.total[chunks] - begin;
    const int n = (int)(left < FTK_PIECE ? left : FTK_PIECE);
    if (n <= 0) return;
    if ((int)threadIdx.x < n) {
        const int32_t i = a.order[begin + threadIdx.x];
        const int v = (int)lookup_row(a, i);
        order[threadIdx.x] = i;
        row[threadIdx.x] = v;
        if (threadIdx.x == 0) begins = lookup_begin(a, v) >= begin;
        if ((int)threadIdx.x == n - 1) ends = lookup_begin(a, v) + a.count[v] <= begin + n;
    }
    __syncthreads();
    if (c >= a.C) return;
    const T *dy = a.dy ? (const T *)a.dy + c : NULL;
    const uint4 none = make_uint4(0, 0, 0, 0);
    float *parts = a.parts + (int64_t)blockIdx.x * 2 * a.C + c;
    float s[W], v[W];
    int start = 0; /* of the list that s is the sum of */
    zero(s);
    for (int first = 0; first < n; first += R) {
        uint4 raw[R];
#pragma unroll
        for (int q = 0; q < R; q++)
            raw[q] = first + q < n && dy ? item_take<W>(dy + order[first + q] * a.C, a.vec) : none;
#pragma unroll
        for (int q = 0; q < R; q++) {
            const int at = first + q;
            if (at >= n) break;
            open(v, raw[q]);
            for (int j = 0; j < W; j++) s[j] += v[j];
            if (at + 1 < n && row[at + 1] == row[start]) continue;
            if (start == 0 && !begins) put(parts, s, a.vec);
            else if (at == n - 1 && !ends) put(parts + a.C, s, a.vec);
            else give(a.dtable, row[start] * a.C + c, s, a.vec);
            zero(s);
            start = at + 1;
        }
    }
}

/* Block (p, y) of 32 x 16 threads: the list that begins in piece p and ends in a later one, if
   there is one; 32 W columns at a time. Its first partial sum is the second of piece p, the others
   are the first ones of the pieces behind it. */
template <int W> static __global__ void __launch_bounds__(512) ftk__lookup_join(lookup_args a)
{
    __shared__ float room[16][32 * W];
    const int64_t chunks = (a.rows + FTK_CHUNK - 1) / FTK_CHUNK, p = blockIdx.x;
    const int64_t upto = p * FTK_PIECE + FTK_PIECE; /* a list that goes on fills the piece */
    if (a.total[chunks] <= upto) return;
    const int64_t v = lookup_row(a, a.order[upto - 1]), begin = lookup_begin(a, v);
    const int64_t end = begin + a.count[v], n = (end - 1) / FTK_PIECE - p + 1;
    if (begin < upto - FTK_PIECE || end <= upto) return;
    for (int64_t tile = blockIdx.y * 32 * W; tile < a.C; tile += gridDim.y * 32 * W) {
        const int64_t c = tile + threadIdx.x * W;
        const float *parts = a.parts + (p * 2 + 1) * a.C + c; /* k of them: 2 k - 1 rows further */
        float s[W], w[W];
        zero(s);
        if (c < a.C)
#pragma unroll 4
            for (int64_t k = threadIdx.y; k < n; k += 16) {
                get(w, parts + (k ? 2 * k - 1 : 0) * a.C, a.vec);
                for (int j = 0; j < W; j++) s[j] += w[j];
            }
        __syncthreads(); /* the last tile has been added */
        put(&room[threadIdx.y][threadIdx.x * W], s, 0);
        __syncthreads();
        if (threadIdx.y || c >= a.C) continue;
        for (int y = 1; y < 16; y++)
            for (int j = 0; j < W; j++) s[j] += room[y][threadIdx.x * W + j];
        give(a.dtable, v * a.C + c, s, a.vec);
    }
}

static ft_status lookup_forward(const ft_op_call *call, lookup_args a, ft_dtype t)
{
    a.tokens = (const int32_t *)call->in[0].data;
    a.n = elems_of(&call->in[0]);
    a.fault = call->fault;
    a.y = call->out[0].data;
    a.C = cols_of(&call->out[0]);
    uintptr_t at = FTK_AT(a.y) | FTK_AT(a.table);
    if (a.C % width_of(t)) at |= 1; /* rows of the table begin anywhere */
    plane p = plane_of(a.n, a.C, t, at);
    FTK_PLANE(ftk__lookup, t, p, stream_of(call), a);
    return launched(call->op->name);
}

/* Steps 1 to 3. */
static ft_status lookup_sort(const char *name, const lookup_args &a, cudaStream_t stream)
{
    const int64_t chunks = over(a.rows, FTK_CHUNK);
    const unsigned some = (unsigned)least(over(a.n, 256), FTK_BLOCKS);
    cudaError_t error = cudaMemsetAsync(a.count, 0, (size_t)(a.rows + chunks + 1) * 4, stream);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return ft_error(FT_ERR_UNSUPPORTED, "%s: clearing the counts: %s", name,
                        cudaGetErrorString(error));
    }
    ftk__lookup_count<<<some, 256, 0, stream>>>(a);
    FT_TRY(launched(name));
    ftk__lookup_room<<<(unsigned)chunks, FTK_CHUNK, 0, stream>>>(a);
    FT_TRY(launched(name));
    ftk__lookup_place<<<some, 256, 0, stream>>>(a);
    FT_TRY(launched(name));
    ftk__lookup_order<<<(unsigned)least(a.rows, FTK_BLOCKS), 256, 0, stream>>>(a);
    return launched(name);
}

static ft_status lookup_backward(const ft_op_call *call, lookup_args a, ft_dtype t)
{
    const char *name = call->op->name;
    const int W = width_of(t), wide = a.C % W == 0;
    const int64_t chunks = over(a.rows, FTK_CHUNK);
    cudaStream_t stream = stream_of(call);
    a.tokens = (const int32_t *)call->in[0].data;
    a.n = elems_of(&call->in[0]);
    a.fault = call->fault;
    if (a.n > INT32_MAX || ftk_lookup_bytes(a.rows, a.n, a.C) > call->workspace_bytes)
        return ft_error(FT_ERR_SHAPE, "%s: %lld tokens in one call, at most 2^31 - 1, or %zu bytes "
                        "of workspace are too few", name, (long long)a.n, call->workspace_bytes);
    a.parts = (float *)call->workspace; /* first, so that they are aligned as the workspace is */
    a.count = (int32_t *)(a.parts + over(a.n, FTK_PIECE) * 2 * a.C);
    a.total = a.count + a.rows;
    a.end = a.total + chunks + 1;
    a.order = a.end + a.rows;
    a.vec = aligned(FTK_AT(a.dy) | FTK_AT(a.dtable.data) | FTK_AT(a.parts));
    FT_TRY(lookup_sort(name, a, stream));
    if (!a.dtable.add) {
        plane p = plane_of(a.rows, a.C, t, wide ? FTK_AT(a.dtable.data) : 1);
        FTK_PLANE(ftk__lookup_clear, t, p, stream, a);
        FT_TRY(launched(name));
    }
    const unsigned pieces = (unsigned)over(a.n, FTK_PIECE);
    const unsigned threads = row_threads(wide ? a.C / W : a.C);
    dim3 grid(pieces, (unsigned)over(a.C, (int64_t)threads * (wide ? W : 1)), 1);
    FTK_ROWS(ftk__lookup_sum, t, wide, grid, threads, 0, stream, a);
    FT_TRY(launched(name));
    grid.y = (unsigned)least(over(a.C, 128), 4);
    if (a.C % 4 == 0) ftk__lookup_join<4><<<grid, dim3(32, 16, 1), 0, stream>>>(a);
    else ftk__lookup_join<1><<<grid, dim3(32, 16, 1), 0, stream>>>(a);
    return launched(name);
}

FT_API ft_status ftk_embedding_forward(const ft_op_call *call)
{
    const ft_view *table = &call->in[1];
    lookup_args a;
    memset(&a, 0, sizeof a);
    a.table = table->data;
    a.rows = a.V = table->shape[0];
    a.kind = FTK_FAULT_EMBEDDING;
    return lookup_forward(call, a, table->dtype);
}

FT_API ft_status ftk_embedding_backward(const ft_op_call *call)
{
    const ft_view *table = &call->in[1];
    lookup_args a;
    memset(&a, 0, sizeof a);
    if (!call->din[1].present) return FT_OK;
    FT_TRY(check_dout(call, 0, table->dtype));
    a.rows = a.V = table->shape[0];
    a.C = table->shape[1];
    a.kind = FTK_FAULT_EMBEDDING;
    a.dy = data_of(&call->dout[0]);
    a.dtable = grad_of(&call->din[1], call->accumulate[1]);
    return lookup_backward(call, a, table->dtype);
}

FT_API ft_status ftk_tp_lookup(const ft_op_call *call)
{
    const ft_view *table = &call->in[1];
    lookup_args a;
    memset(&a, 0, sizeof a);
    a.table = data_of(table);
    a.first = call->attr.i[0];
    a.rows = table->present ? table->shape[0] : 0;
    a.V = call->attr.i[1];
    a.kind = FTK_FAULT_TP_EMBEDDING;
    return lookup_forward(call, a, call->out[0].dtype);
}

FT_API ft_status ftk_tp_lookup_grad(const ft_op_call *call)
{
    const ft_view *dtable = &call->out[0];
    lookup_args a;
    memset(&a, 0, sizeof a);
    a.first = call->attr.i[0];
    a.rows = dtable->shape[0];
    a.C = dtable->shape[1];
    a.V = call->attr.i[1];
    a.kind = FTK_FAULT_TP_EMBEDDING;
    a.dy = call->in[1].data;
    a.dtable = grad_of(dtable, call->attr.i[2] != 0);
    return lookup_backward(call, a, call->in[1].dtype);
}

/* --------------------------------------------------------------------------------------- >>loss

   Rows z[c,V] of logits: loss = log sum exp(z) - z[label], dz = factor (softmax(z) - onehot). A
   block a row. One pass makes the maximum and the sum together: a thread that meets a new maximum
   scales its sum (Milakov and Gimelshein 2018); a second pass, with grads, writes dz over z. Reads
   V elements twice, the second time out of the L2 cache, and writes them once: 3 V elements, of
   which 2 V go to memory. Rows begin anywhere where V is odd, so what stands before the first and
   behind the last 16-byte boundary is taken singly. exp(x) is ex2(x log2 e): 2 ulp. */

#define FTK_LOG2E 1.4426950408889634f
#define FTK_LEAST (-1.0e38f) /* below all logits; its product with log2 e is still finite */

enum { FTK_IGNORE = -100, FTK_DEEP = 4 /* loads of a thread under way at a time */ };

static __device__ __forceinline__ float exp_2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Elements before the first boundary, and whole items behind it. */
typedef struct row_cut { int64_t head, items; } row_cut;

template <typename T> static __device__ __forceinline__ row_cut cut_row(const T *z, int64_t n)
{
    constexpr int W = FTK_WIDTH(T);
    row_cut cut;
    cut.head = (int64_t)((16 - ((uintptr_t)z & 15)) & 15) / (int64_t)sizeof(T);
    if (cut.head > n) cut.head = n;
    cut.items = (n - cut.head) / W;
    return cut;
}

template <int W>
static __device__ __forceinline__ void online(float &top, float &sum, const float (&v)[W])
{
    float m = v[0];
    for (int j = 1; j < W; j++) m = fmaxf(m, v[j]);
    m = fmaxf(m, top);
    sum *= exp_2((top - m) * FTK_LOG2E);
    top = m;
    const float shift = -top * FTK_LOG2E;
    for (int j = 0; j < W; j++) sum += exp_2(fmaf(v[j], FTK_LOG2E, shift));
}

/* The row's maximum (x) and sum of exp(z - maximum) (y), the same for every thread of the block. */
template <typename T>
static __device__ float2 row_softmax(const T *z, int64_t n, float2 *room, float *tops)
{
    constexpr int W = FTK_WIDTH(T);
    const row_cut cut = cut_row(z, n);
    const T *body = z + cut.head;
    const int64_t rest = n - cut.head - cut.items * W, me = threadIdx.x, step = blockDim.x;
    float top = FTK_LEAST, sum = 0, one[1], v[W];
    if (me < cut.head) {
        get(one, z + me, 1);
        online(top, sum, one);
    }
    for (int64_t i = me; i < cut.items; i += FTK_DEEP * step) {
        uint4 raw[FTK_DEEP];
#pragma unroll
        for (int d = 0; d < FTK_DEEP; d++)
            if (i + d * step < cut.items) raw[d] = take(body + (i + d * step) * W, 1);
#pragma unroll
        for (int d = 0; d < FTK_DEEP; d++) {
            if (i + d * step >= cut.items) break;
            open(v, raw[d]);
            online(top, sum, v);
        }
    }
    if (me < rest) {
        get(one, body + cut.items * W + me, 1);
        online(top, sum, one);
    }
    const float most = block_max(top, tops);
    sum *= exp_2((top - most) * FTK_LOG2E);
    return make_float2(most, block_sum(make_float2(sum, 0), room).x);
}

/* z = exp(z - most) * by; z[at] less `factor`, where `at` is in the row. */
template <typename T>
static __device__ void row_gradient(T *z, int64_t n, float most, float by, int64_t at, float factor)
{
    constexpr int W = FTK_WIDTH(T);
    const row_cut cut = cut_row(z, n);
    T *body = z + cut.head;
    const int64_t rest = n - cut.head - cut.items * W, me = threadIdx.x, step = blockDim.x;
    const float shift = -most * FTK_LOG2E;
    float one[1], v[W];
    if (me < cut.head) {
        get(one, z + me, 1);
        one[0] = exp_2(fmaf(one[0], FTK_LOG2E, shift)) * by - (me == at ? factor : 0.0f);
        put(z + me, one, 1);
    }
    for (int64_t i = me; i < cut.items; i += FTK_DEEP * step) {
        uint4 raw[FTK_DEEP];
#pragma unroll
        for (int d = 0; d < FTK_DEEP; d++)
            if (i + d * step < cut.items) raw[d] = take(body + (i + d * step) * W, 1);
#pragma unroll
        for (int d = 0; d < FTK_DEEP; d++) {
            if (i + d * step >= cut.items) break;
            const int64_t label = at - cut.head - (i + d * step) * W;
            open(v, raw[d]);
            for (int j = 0; j < W; j++)
                v[j] = exp_2(fmaf(v[j], FTK_LOG2E, shift)) * by - (j == label ? factor : 0.0f);
            put(body + (i + d * step) * W, v, 1);
        }
    }
    if (me < rest) {
        const int64_t i = cut.head + cut.items * W + me;
        get(one, z + i, 1);
        one[0] = exp_2(fmaf(one[0], FTK_LOG2E, shift)) * by - (i == at ? factor : 0.0f);
        put(z + i, one, 1);
    }
}

template <typename T> static __device__ void row_clear(T *z, int64_t n)
{
    constexpr int W = FTK_WIDTH(T);
    const row_cut cut = cut_row(z, n);
    const int64_t rest = n - cut.head - cut.items * W, me = threadIdx.x;
    float one[1] = {0}, v[W];
    zero(v);
    if (me < cut.head) put(z + me, one, 1);
    for (int64_t i = me; i < cut.items; i += blockDim.x) put(z + cut.head + i * W, v, 1);
    if (me < rest) put(z + cut.head + cut.items * W + me, one, 1);
}

/* One block a multiprocessor where rows are long: what is read twice shall stay in the L2 cache. */
static unsigned loss_threads(int64_t V)
{
    return V >= 65536 ? 1024 : V >= 8192 ? 512 : V >= 2048 ? 256 : 128;
}

/* Labels that count, all of them, by one block; V is the vocabulary. */
static __device__ int64_t labels_counted(const int32_t *labels, int64_t n, int64_t V,
                                         uint64_t *fault, int kind, double *room)
{
    int counted = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        const int32_t label = labels[i];
        if (label == FTK_IGNORE) continue;
        if (label < 0 || label >= V) note_fault(fault, kind, i, n, label, V);
        else counted++;
    }
    return (int64_t)block_sum((double)counted, room);
}

static __global__ void __launch_bounds__(1024) ftk__ce_begin(ftk_ce_state *state,
                                                             const int32_t *labels, int64_t n,
                                                             int64_t V, const float *scale,
                                                             const float *dloss, uint64_t *fault)
{
    __shared__ double room[32];
    const int64_t counted = labels_counted(labels, n, V, fault, FTK_FAULT_CE, room);
    if (threadIdx.x) return;
    double by = counted ? 1.0 / (double)counted : 0;
    if (scale && counted) by = (double)*scale;
    state->by = by;
    state->factor = dloss ? (float)(by * (double)*dloss) : 0.0f;
    state->counted = (int32_t)counted;
}

FT_API ft_status ftk_ce_begin(void *stream, ftk_ce_state *state, const int32_t *labels, int64_t n,
                              int64_t V, const float *scale, const float *dloss, uint64_t *fault)
{
    ftk__ce_begin<<<1, 1024, 0, (cudaStream_t)stream>>>(state, labels, n, V, scale, dloss, fault);
    return launched("ce_begin");
}

template <typename T>
static __global__ void __launch_bounds__(1024) ftk__ce_tokens(void *z_, const int32_t *labels,
                                                              int64_t c, int64_t V,
                                                              const ftk_ce_state *state,
                                                              float *losses, int grads)
{
    __shared__ float2 room[32];
    __shared__ float tops[32];
    for (int64_t row = blockIdx.x; row < c; row += gridDim.x) {
        T *z = (T *)z_ + row * V;
        const int32_t label = labels[row];
        if (label < 0 || label >= V) { /* ignored, or a fault that ce_begin has noted */
            if (threadIdx.x == 0) losses[row] = 0;
            if (grads) row_clear(z, V);
            continue;
        }
        float at_label[1];
        get(at_label, z + label, 1); /* the sums below wait for all threads before z changes */
        const float2 s = row_softmax(z, V, room, tops);
        if (threadIdx.x == 0)
            losses[row] = (float)(log((double)s.y) + ((double)s.x - (double)at_label[0]));
        if (!grads) continue;
        const float factor = state->factor;
        row_gradient(z, V, s.x, factor / s.y, label, factor);
    }
}

FT_API ft_status ftk_ce_tokens(void *stream, void *z, ft_dtype dtype, const int32_t *labels,
                               int64_t c, int64_t V, const ftk_ce_state *state, float *losses,
                               int grads)
{
    unsigned blocks = (unsigned)least(c, 1 << 30), threads = loss_threads(V);
    cudaStream_t s = (cudaStream_t)stream;
    if (dtype == FT_BF16)
        ftk__ce_tokens<bf16><<<blocks, threads, 0, s>>>(z, labels, c, V, state, losses, grads);
    else ftk__ce_tokens<float><<<blocks, threads, 0, s>>>(z, labels, c, V, state, losses, grads);
    return launched("ce_tokens");
}

static __global__ void __launch_bounds__(1024) ftk__ce_end(const float *losses, int64_t n,
                                                           const ftk_ce_state *state, float *loss)
{
    __shared__ double room[32];
    double s = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) s += (double)losses[i];
    s = block_sum(s, room);
    if (threadIdx.x == 0) *loss = (float)(state->by * s);
}

FT_API ft_status ftk_ce_end(void *stream, const float *losses, int64_t n,
                            const ftk_ce_state *state, float *loss)
{
    ftk__ce_end<<<1, 1024, 0, (cudaStream_t)stream>>>(losses, n, state, loss);
    return launched("ce_end");
}

/* ---- the vocabulary-parallel loss: each rank has some columns of the logits. The statistics
   (maximum, sum of exp, the label's logit) of a row travel, fp32 [t,c,3]; all ranks combine them in
   rank order. What the kernels of a pass share is femtotron_tp.h's ft__tp_sums, whose layout this
   is: 24 bytes in an int32 tensor. ---- */

typedef struct tp_sums {
    double total, by;
    float factor;
    int32_t spare;
} tp_sums;

typedef struct tp_loss_args {
    const int32_t *labels;
    const float *stats;
    int64_t c, ranks, rows;          /* tokens of the chunk, ranks, own columns */
    int64_t token, per, stride, first; /* attr.i[0..3] */
} tp_loss_args;

static tp_loss_args tp_loss_of(const ft_op_call *call)
{
    tp_loss_args a;
    memset(&a, 0, sizeof a);
    a.labels = (const int32_t *)call->in[0].data;
    a.token = call->attr.i[0];
    a.per = call->attr.i[1];
    a.stride = call->attr.i[2];
    a.first = call->attr.i[3];
    return a;
}

/* The label of row k of the chunk, which takes `per` tokens of each run of `stride`. */
static __device__ __forceinline__ int32_t tp_label(const tp_loss_args &a, int64_t k)
{
    return a.labels[k / a.per * a.stride + a.token + k % a.per];
}

static __device__ __forceinline__ int64_t tp_own(const tp_loss_args &a, int32_t label)
{
    const int64_t row = label - a.first;
    return label != FTK_IGNORE && row >= 0 && row < a.rows ? row : -1;
}

typedef struct tp_token { float most; double sum, logit; } tp_token;

static __device__ tp_token tp_token_all(const tp_loss_args &a, int64_t k)
{
    tp_token t;
    t.most = -INFINITY;
    t.sum = t.logit = 0;
    for (int64_t r = 0; r < a.ranks; r++) t.most = fmaxf(t.most, a.stats[(r * a.c + k) * 3]);
    for (int64_t r = 0; r < a.ranks; r++) {
        const float *own = a.stats + (r * a.c + k) * 3;
        t.sum += (double)own[1] * exp((double)own[0] - (double)t.most);
        t.logit += (double)own[2];
    }
    return t;
}

static __global__ void __launch_bounds__(1024) ftk__tp_loss_begin(tp_sums *sums,
                                                                  const int32_t *labels,
                                                                  int64_t n, int64_t V,
                                                                  const float *scale,
                                                                  const float *dloss,
                                                                  uint64_t *fault)
{
    __shared__ double room[32];
    const int64_t counted = labels_counted(labels, n, V, fault, FTK_FAULT_TP_CE, room);
    if (threadIdx.x) return;
    tp_sums s;
    s.total = 0;
    s.by = counted ? 1.0 / (double)counted : 0;
    if (scale && counted) s.by = (double)*scale;
    s.factor = dloss ? (float)(s.by * (double)*dloss) : 0.0f;
    s.spare = 0;
    *sums = s;
}

FT_API ft_status ftk_tp_loss_begin(const ft_op_call *call)
{
    const ft_view *labels = &call->in[0];
    ftk__tp_loss_begin<<<1, 1024, 0, stream_of(call)>>>(
        (tp_sums *)call->out[0].data, (const int32_t *)labels->data, elems_of(labels),
        call->attr.i[0], (const float *)data_of(&call->in[1]),
        (const float *)data_of(&call->in[2]), call->fault);
    return launched("tp_loss_begin");
}

template <typename T>
static __global__ void __launch_bounds__(1024) ftk__tp_loss_stats(float *out, const void *z_,
                                                                  tp_loss_args a)
{
    __shared__ float2 room[32];
    __shared__ float tops[32];
    for (int64_t k = blockIdx.x; k < a.c; k += gridDim.x) {
        const int64_t own = tp_own(a, tp_label(a, k));
        float2 s = make_float2(-INFINITY, 0);
        float logit[1] = {0};
        if (z_) {
            const T *z = (const T *)z_ + k * a.rows;
            s = row_softmax(z, a.rows, room, tops);
            if (own >= 0) get(logit, z + own, 1);
        }
        if (threadIdx.x == 0) {
            out[k * 3] = s.x;
            out[k * 3 + 1] = s.y;
            out[k * 3 + 2] = logit[0];
        }
    }
}

FT_API ft_status ftk_tp_loss_stats(const ft_op_call *call)
{
    const ft_view *z = &call->in[1], *out = &call->out[0];
    tp_loss_args a = tp_loss_of(call);
    a.c = elems_of(out) / 3;
    a.rows = z->present ? cols_of(z) : 0;
    unsigned blocks = (unsigned)least(a.c, 1 << 30), threads = loss_threads(a.rows);
    if (z->dtype == FT_BF16)
        ftk__tp_loss_stats<bf16><<<blocks, threads, 0, stream_of(call)>>>((float *)out->data,
                                                                          data_of(z), a);
    else
        ftk__tp_loss_stats<float><<<blocks, threads, 0, stream_of(call)>>>((float *)out->data,
                                                                           data_of(z), a);
    return launched("tp_loss_stats");
}

static __global__ void __launch_bounds__(1024) ftk__tp_loss_add(tp_sums *sums, tp_loss_args a)
{
    __shared__ double room[32];
    double s = 0;
    for (int64_t k = threadIdx.x; k < a.c; k += blockDim.x) {
        if (tp_label(a, k) == FTK_IGNORE) continue;
        const tp_token t = tp_token_all(a, k);
        s += log(t.sum) + ((double)t.most - t.logit);
    }
    s = block_sum(s, room);
    if (threadIdx.x == 0) sums->total += s;
}

FT_API ft_status ftk_tp_loss_add(const ft_op_call *call)
{
    const ft_view *stats = &call->in[1];
    tp_loss_args a = tp_loss_of(call);
    a.stats = (const float *)stats->data;
    a.ranks = stats->shape[0];
    a.c = stats->shape[1];
    ftk__tp_loss_add<<<1, 1024, 0, stream_of(call)>>>((tp_sums *)call->out[0].data, a);
    return launched("tp_loss_add");
}

template <typename T>
static __global__ void __launch_bounds__(1024) ftk__tp_loss_grad(void *z_, const tp_sums *sums,
                                                                 tp_loss_args a)
{
    __shared__ float most, by;
    const float factor = sums->factor;
    for (int64_t k = blockIdx.x; k < a.c; k += gridDim.x) {
        const int32_t label = tp_label(a, k);
        T *z = (T *)z_ + k * a.rows;
        if (label == FTK_IGNORE) {
            row_clear(z, a.rows);
            continue;
        }
        __syncthreads(); /* the last row's numbers have been read */
        if (threadIdx.x == 0) {
            const tp_token t = tp_token_all(a, k);
            most = t.most;
            by = (float)((double)factor / t.sum);
        }
        __syncthreads();
        row_gradient(z, a.rows, most, by, tp_own(a, label), factor);
    }
}

FT_API ft_status ftk_tp_loss_grad(const ft_op_call *call)
{
    const ft_view *stats = &call->in[1], *z = &call->out[0];
    const tp_sums *sums = (const tp_sums *)call->in[2].data;
    tp_loss_args a = tp_loss_of(call);
    a.stats = (const float *)stats->data;
    a.ranks = stats->shape[0];
    a.c = stats->shape[1];
    a.rows = cols_of(z);
    unsigned blocks = (unsigned)least(elems_of(z) / a.rows, 1 << 30), n = loss_threads(a.rows);
    if (z->dtype == FT_BF16)
        ftk__tp_loss_grad<bf16><<<blocks, n, 0, stream_of(call)>>>(z->data, sums, a);
    else ftk__tp_loss_grad<float><<<blocks, n, 0, stream_of(call)>>>(z->data, sums, a);
    return launched("tp_loss_grad");
}

static __global__ void ftk__tp_loss_end(float *loss, const tp_sums *sums)
{
    *loss = (float)(sums->by * sums->total);
}

FT_API ft_status ftk_tp_loss_end(const ft_op_call *call)
{
    ftk__tp_loss_end<<<1, 1, 0, stream_of(call)>>>((float *)call->out[0].data,
                                                   (const tp_sums *)call->in[0].data);
    return launched("tp_loss_end");
}

/* --------------------------------------------------------------------------------------- >>zero

   The scalars of a step stay on the device: nothing here waits for the host. */

FT_API ft_status ftk_zero_sumsq(const ft_op_call *call)
{
    return total(call, &call->in[0], call->attr.i[1], 1, 1.0,
                 (float *)call->out[0].data + call->attr.i[0]);
}

static __global__ void __launch_bounds__(256) ftk__zero_local(float *out, const float *partial,
                                                              int64_t n, const float *loss)
{
    __shared__ double room[32];
    double s = 0;
    for (int64_t i = threadIdx.x; i < n; i += 256) s += (double)partial[i];
    s = block_sum(s, room);
    if (threadIdx.x) return;
    out[0] = (float)s;
    out[1] = loss ? *loss : 0.0f;
}

FT_API ft_status ftk_zero_local(const ft_op_call *call)
{
    const float *loss = call->attr.f[0] > 0 ? (const float *)call->in[1].data : NULL;
    ftk__zero_local<<<1, 256, 0, stream_of(call)>>>((float *)call->out[0].data,
                                                    (const float *)call->in[0].data,
                                                    elems_of(&call->in[0]), loss);
    return launched("zero_local");
}

/* One thread: every rank adds the same numbers in the same order. */
static __global__ void ftk__zero_control(float *control, int32_t *count, const float *all,
                                         int64_t ranks, double limit)
{
    float squares = 0, loss = 0;
#pragma unroll 8
    for (int64_t r = 0; r < ranks; r++) {
        squares += all[2 * r];
        loss += all[2 * r + 1];
    }
    const float norm = sqrtf(squares);
    const int go = isfinite(norm) != 0;
    double coef = 1;
    if (limit > 0 && go && limit / ((double)norm + 1e-6) < 1) coef = limit / ((double)norm + 1e-6);
    count[go ? 0 : 1]++;
    control[0] = norm;
    control[1] = (float)coef;
    control[2] = (float)go;
    control[3] = loss;
}

FT_API ft_status ftk_zero_control(const ft_op_call *call)
{
    ftk__zero_control<<<1, 1, 0, stream_of(call)>>>(
        (float *)call->out[0].data, (int32_t *)call->out[1].data, (const float *)call->in[0].data,
        elems_of(&call->in[0]) / 2, call->attr.f[0]);
    return launched("zero_control");
}

static __global__ void ftk__zero_scale(float *scale, const int32_t *counts, int64_t n)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += counts[i];
    *scale = sum > 0 ? (float)(1.0 / (double)sum) : 0.0f;
}

FT_API ft_status ftk_zero_scale(const ft_op_call *call)
{
    ftk__zero_scale<<<1, 1, 0, stream_of(call)>>>((float *)call->out[0].data,
                                                  (const int32_t *)call->in[0].data,
                                                  elems_of(&call->in[0]));
    return launched("zero_scale");
}

/* Optimizers: an update of fp32 weights p (the master where weights are bf16), elementwise. The
   step count is on the device, so bias corrections are made there, in double, once a block: beta2^t
   is close to 1 for long. control[2] == 0 leaves everything as it is; control[1] clips.

     AdamW  m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
            p = p (1 - lr decay) - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)
     SGD    g += decay p; v = momentum v + g; p -= lr (nesterov ? g + momentum v : v or g)

   Four elements a thread at a time, 16 bytes of each fp32 array; blocks stride. AdamW moves 28
   bytes an element with bf16 gradient and weight and fp32 master. */

typedef struct update_args {
    const void *grad;
    const float *control;
    const int32_t *step;
    float *p, *m, *v;       /* fp32 weight or master, states; v of SGD is m here */
    bf16 *rounded;          /* NULL: the weight is p */
    int64_t n;
    double b1, b2, lr, decay;
    float eps;
    int grad_half, nesterov, vec;
} update_args;

template <int W>
static __device__ __forceinline__ void update_grad(float (&g)[W], const update_args &a, int64_t i,
                                                   float coef)
{
    if (a.grad_half) get(g, (const bf16 *)a.grad + i, a.vec);
    else get(g, (const float *)a.grad + i, a.vec);
    for (int j = 0; j < W; j++) g[j] *= coef;
}

typedef struct adamw_rates { float shrink, rate, root, coef; } adamw_rates;

template <int W>
static __device__ __forceinline__ void adamw_at(const update_args &a, const adamw_rates &r,
                                                int64_t i)
{
    const float b1 = (float)a.b1, b2 = (float)a.b2;
    float g[W], p[W], m[W], v[W];
    get(p, a.p + i, a.vec);
    get(m, a.m + i, a.vec);
    get(v, a.v + i, a.vec);
    update_grad(g, a, i, r.coef);
    for (int j = 0; j < W; j++) {
        m[j] = b1 * m[j] + (1 - b1) * g[j];
        v[j] = b2 * v[j] + (1 - b2) * g[j] * g[j];
        p[j] = p[j] * r.shrink - r.rate * m[j] / (sqrtf(v[j]) * r.root + a.eps);
    }
    put(a.p + i, p, a.vec);
    put(a.m + i, m, a.vec);
    put(a.v + i, v, a.vec);
    if (a.rounded) put(a.rounded + i, p, a.vec);
}

static __global__ void __launch_bounds__(256) ftk__adamw(update_args a)
{
    __shared__ adamw_rates shared;
    if (a.control[2] == 0.0f) return;
    if (threadIdx.x == 0) {
        const double t = (double)*a.step;
        shared.shrink = (float)(1 - a.lr * a.decay);
        shared.rate = (float)(a.lr / (1 - pow(a.b1, t)));
        shared.root = (float)(1 / sqrt(1 - pow(a.b2, t)));
        shared.coef = a.control[1];
    }
    __syncthreads();
    const adamw_rates r = shared;
    const int64_t items = a.n / 4, step = (int64_t)gridDim.x * 256;
    const int64_t me = (int64_t)blockIdx.x * 256 + threadIdx.x;
    for (int64_t i = me; i < items; i += step) adamw_at<4>(a, r, i * 4);
    if (me < a.n % 4) adamw_at<1>(a, r, items * 4 + me);
}

template <int W> static __device__ __forceinline__ void sgd_at(const update_args &a, int64_t i)
{
    const float momentum = (float)a.b1, lr = (float)a.lr, decay = (float)a.decay;
    float g[W], p[W], v[W];
    get(p, a.p + i, a.vec);
    update_grad(g, a, i, a.control[1]);
    for (int j = 0; j < W; j++) g[j] += decay * p[j];
    if (a.m) {
        get(v, a.m + i, a.vec);
        for (int j = 0; j < W; j++) {
            v[j] = momentum * v[j] + g[j];
            g[j] = a.nesterov ? g[j] + momentum * v[j] : v[j];
        }
        put(a.m + i, v, a.vec);
    }
    for (int j = 0; j < W; j++) p[j] -= lr * g[j];
    put(a.p + i, p, a.vec);
    if (a.rounded) put(a.rounded + i, p, a.vec);
}

static __global__ void __launch_bounds__(256) ftk__sgd(update_args a)
{
    if (a.control[2] == 0.0f) return;
    const int64_t items = a.n / 4, step = (int64_t)gridDim.x * 256;
    const int64_t me = (int64_t)blockIdx.x * 256 + threadIdx.x;
    for (int64_t i = me; i < items; i += step) sgd_at<4>(a, i * 4);
    if (me < a.n % 4) sgd_at<1>(a, items * 4 + me);
}

/* out = weight, the states, and the master if there is one. */
static update_args update_of(const ft_op_call *call)
{
    const ft_zero_optimizer *o = (const ft_zero_optimizer *)call->attr.user;
    const ft_view *weight = &call->out[0];
    int has_master = call->op->n_out == o->n_state + 2;
    update_args a;
    memset(&a, 0, sizeof a);
    a.grad = call->in[0].data;
    a.grad_half = call->in[0].dtype == FT_BF16;
    a.control = (const float *)call->in[1].data;
    a.step = (const int32_t *)call->in[2].data;
    a.p = (float *)(has_master ? call->out[o->n_state + 1].data : weight->data);
    a.rounded = has_master ? (bf16 *)weight->data : NULL;
    a.m = o->n_state > 0 ? (float *)call->out[1].data : NULL;
    a.v = o->n_state > 1 ? (float *)call->out[2].data : NULL;
    a.n = elems_of(weight);
    a.lr = call->attr.f[0];
    a.decay = call->attr.f[1];
    a.vec = aligned(FTK_AT(a.grad) | FTK_AT(a.p) | FTK_AT(a.rounded) | FTK_AT(a.m) | FTK_AT(a.v));
    return a;
}

static unsigned update_blocks(int64_t n) { return (unsigned)least(over(n, 1024), 2 * FTK_BLOCKS); }

FT_API ft_status ftk_zero_adamw(const ft_op_call *call)
{
    const ft_zero_optimizer *o = (const ft_zero_optimizer *)call->attr.user;
    update_args a = update_of(call);
    a.b1 = o->hyper[0];
    a.b2 = o->hyper[1];
    a.eps = (float)o->hyper[2];
    ftk__adamw<<<update_blocks(a.n), 256, 0, stream_of(call)>>>(a);
    return launched("adamw");
}

FT_API ft_status ftk_zero_sgd(const ft_op_call *call)
{
    const ft_zero_optimizer *o = (const ft_zero_optimizer *)call->attr.user;
    update_args a = update_of(call);
    a.b1 = o->hyper[0];
    a.nesterov = o->hyper[1] > 0;
    ftk__sgd<<<update_blocks(a.n), 256, 0, stream_of(call)>>>(a);
    return launched("sgd");
}

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

   Rows of several documents: doc [B,T] says where the document of a position begins, so that t sees
   first(t) = doc[b,t] .. t, and key k is seen by k .. end(k) - 1, the rest of its document; without
   doc 0 and all. doc does not decrease, so end(k) is found by halving, and tiles of keys before
   first of a tile's first row, and of rows from end of its last key on, are left out. A row may see
   nothing of a tile between: its running maximum begins with a finite number, which no exponential
   of -infinity notices. What is left out and masked changes no sum: doc of zeros gives the bits of
   none. In the tiles between, another document's keys and values are multiplied by zero, as are
   those beyond the diagonal: finite ones do nothing.

   Numerics: products of bf16 summed in fp32; the softmax in fp32 with base 2 exponentials, so the
   scale is log2(e) / sqrt(D); probabilities and ds are rounded to bf16 to be factors again.
   Every sum has one order, and no two blocks write the same element. */

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
    const int32_t *doc;          /* NULL: one document */
    uint64_t *fault;             /* where one that is out of order is noted */
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

#define FTK__ATT_LEAST (-1e30f) /* of running maxima, below every score */

/* The first key that row t sees. What is out of order is noted elsewhere; here it stays in 0..t. */
static __device__ __forceinline__ int ftk__att_first(const ftk__att &a, int64_t b, int64_t t)
{
    if (!a.doc || t >= a.T) return 0;
    const int first = a.doc[b * a.T + t];
    return first < 0 ? 0 : first > (int)t ? (int)t : first;
}

/* One more than the last row that sees key k. */
static __device__ __forceinline__ int ftk__att_end(const ftk__att &a, int64_t b, int64_t k)
{
    int low = (int)k + 1, high = (int)a.T;
    if (!a.doc) return INT_MAX;
    while (low < high) { /* rows below low see k, rows from high on do not */
        const int middle = low + (high - low) / 2;
        if (a.doc[b * a.T + middle] > k) high = middle;
        else low = middle + 1;
    }
    return high;
}

/* doc in 0..t, and not below its left neighbour; a thread a position. */
static __global__ void __launch_bounds__(256) ftk__att_check_docs(ftk__att a)
{
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, t = i % a.T;
    if (i >= a.B * a.T) return;
    const int32_t first = a.doc[i], least = t ? a.doc[i - 1] : 0;
    if (first < 0 || first < least || first > t)
        note_fault(a.fault, FTK_FAULT_DOCUMENT, i, a.B * a.T, first, t + 1);
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

/* Streaming softmax over tiles of keys from the left.
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
    float m[2] = { FTK__ATT_LEAST, FTK__ATT_LEAST }, sum[2] = { 0, 0 }, o[2][NC];
    const int seen[2] = { ftk__att_first(a, b, first + 2 * y),
                          ftk__att_first(a, b, first + 2 * y + 1) };
#pragma unroll
    for (int c = 0; c < NC; c++) o[0][c] = o[1][c] = 0;
    ftk__att_simple_load(q, a.qkv, a.f32, base + h * D, a.W, first, a.T, D);
    for (int64_t key = ftk__att_first(a, b, first) / FTK__ATT_S * FTK__ATT_S; key <= first;
         key += FTK__ATT_S) {
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
                if (key + x + 16 * j > first + 2 * y + i || key + x + 16 * j < seen[i])
                    s[i][j] = -INFINITY;
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
    const int64_t end = ftk__att_end(a, b, key + FTK__ATT_S - 1);
    const int seen[2] = { ftk__att_end(a, b, key + 2 * y), ftk__att_end(a, b, key + 2 * y + 1) };
    float dk[2][NC], dv[2][NC];
#pragma unroll
    for (int c = 0; c < NC; c++) dk[0][c] = dk[1][c] = dv[0][c] = dv[1][c] = 0;
    ftk__att_simple_load(k, a.qkv, a.f32, base + (a.H + kv) * D, a.W, key, a.T, D);
    ftk__att_simple_load(v, a.qkv, a.f32, base + (a.H + a.K + kv) * D, a.W, key, a.T, D);
    for (int64_t h = kv * (a.H / a.K); h < (kv + 1) * (a.H / a.K); h++)
        for (int64_t first = key; first < a.T && first < end; first += FTK__ATT_S) {
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
                    ftk__att_unsoftmax(&s[i][j], &dp[i][j], key + 2 * y + i <= t && t < seen[i],
                                       a.lse2[row], a.delta[row], a.scale2);
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
    const int seen[2] = { ftk__att_first(a, b, first + 2 * y),
                          ftk__att_first(a, b, first + 2 * y + 1) };
    float dq[2][NC];
#pragma unroll
    for (int c = 0; c < NC; c++) dq[0][c] = dq[1][c] = 0;
    ftk__att_simple_load(q, a.qkv, a.f32, base + h * D, a.W, first, a.T, D);
    ftk__att_simple_load(g, a.dout, a.dout_f32, (b * a.T * a.H + h) * D, a.H * D, first, a.T, D);
    for (int64_t key = ftk__att_first(a, b, first) / FTK__ATT_S * FTK__ATT_S; key <= first;
         key += FTK__ATT_S) {
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
                int64_t t = first + 2 * y + i, row = bh * a.P + t, k_at = key + x + 16 * j;
                ftk__att_unsoftmax(&s[i][j], &dp[i][j], k_at <= t && k_at >= seen[i], a.lse2[row],
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
   16 MT of them with its o [16 MT, DP] in registers, and meets tiles of BN keys from the left,
   from the one on in which the document of the block's first row begins. Masked are only tiles that
   reach beyond a warp's first row, or begin before the document of its last row; those beyond its
   last row are skipped.
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

    const int begin = ftk__att_first(a, b, first) / BN; /* earlier tiles hold no key of the rows */
    const int begun = ftk__att_first(a, b, row + 16 * MT - 1 < T ? row + 16 * MT - 1 : T - 1);
    float o[MT][DP / 8][4], top[MT][2], sum[MT][2];
    ftk__att_zero<MT, DP>(o);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            top[i][half] = FTK__ATT_LEAST;
            sum[i][half] = 0;
        }

    ftk__att_load<DP, BM, THREADS, VEC>(q, base + h * D, a.W, first, T, D);
    const int start = begin % 2 * BN * PITCH * (STAGES - 1);
    ftk__att_load<DP, BN, THREADS, VEC>(k + start, keys, a.W, begin * BN, T, D);
    if (STAGES == 2)
        ftk__att_load<DP, BN, THREADS, VEC>(v + start, values, a.W, begin * BN, T, D);
    ftk__att_commit();

    for (int j = begin; j < steps; j++) {
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
        if (key < begun) {
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int least = ftk__att_first(a, b, row + i * 16 + half * 8 + g);
#pragma unroll
                    for (int n = 0; n < BN / 8; n++)
#pragma unroll
                        for (int e = 2 * half; e < 2 * half + 2; e++)
                            if (key + n * 8 + 2 * t + e % 2 < least) s[i][n][e] = -INFINITY;
                }
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
    const int end = ftk__att_end(a, b, first + BN - 1 < T ? first + BN - 1 : T - 1);
    const int begin = first / BM; /* tiles that see a key */
    const int count = ((end < T ? end : T) + BM - 1) / BM - begin;
    const int ended = ftk__att_end(a, b, key); /* rows before it see all of the warp's keys */
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
        if (row + BM > ended) {
#pragma unroll
            for (int n = 0; n < BM / 8; n++)
#pragma unroll
                for (int right = 0; right < 2; right++) {
                    const int least = ftk__att_first(a, b, row + n * 8 + 2 * t + right);
#pragma unroll
                    for (int r = 0; r < MT; r++)
#pragma unroll
                        for (int e = right; e < 4; e += 2)
                            if (key + r * 16 + e / 2 * 8 + g < least) s[r][n][e] = 0;
                }
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

    const int begin = ftk__att_first(a, b, first) / BN;
    const int begun = ftk__att_first(a, b, row + 16 * MT - 1 < T ? row + 16 * MT - 1 : T - 1);
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
    for (int j = STAGES == 2 ? begin - 1 : begin, next = begin; j < steps; j++) {
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
        if (j < begin || key > row + 16 * MT - 1) continue;
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
        if (key < begun) {
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int least = ftk__att_first(a, b, row + i * 16 + half * 8 + g);
#pragma unroll
                    for (int n = 0; n < BN / 8; n++)
#pragma unroll
                        for (int e = 2 * half; e < 2 * half + 2; e++)
                            if (key + n * 8 + 2 * t + e % 2 < least) s[i][n][e] = 0;
                }
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
     grid     a block for each (query head, tile of 128 rows), last tile first

   DOCS, here and below: whether there is doc; without it nothing of it is compiled. */
template <int DP, int BN, int DOCS>
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

    const int begin = DOCS ? ftk__att_first(a, b, first) / BN : 0;
    const int group_row = first + group * 64 + 63, seen[2] = {
        DOCS ? ftk__att_first(a, b, row) : 0, DOCS ? ftk__att_first(a, b, row + 8) : 0 };
    const int group_last = DOCS ? ftk__att_first(a, b, group_row < T ? group_row : T - 1) : 0;
    float o[DP / 2], s[BN / 2], top[2] = { FTK__ATT_LEAST, FTK__ATT_LEAST }, sum[2] = { 0, 0 };
    uint32_t p[BN / 4];
#pragma unroll
    for (int i = 0; i < DP / 2; i++) o[i] = 0;

    ftk__att_wg_load<DP, 128>(q, base + h * D, a.W, first, T, D);
    ftk__att_wg_load<DP, BN>(k + begin % 2 * TILE, keys, a.W, begin * BN, T, D);
    ftk__att_commit();

    /* Step j: s of tile j, o of tile j - 1. */
    for (int j = begin; j < steps; j++) {
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
        if (j > begin)
            ftk__att_wg_mix<DP, BN>(o, p, ftk__att_wg_tile(v + (j - 1) % 2 * TILE, BN));
        ftk__att_wg_commit();
        ftk__att_wg_wait<1>();
        ftk__att_wg_hold<BN / 2>(s);
        if (key + BN - 1 > first + group * 64) {
#pragma unroll
            for (int i = 0; i < BN / 2; i++)
                if (key + i / 4 * 8 + 2 * t + i % 2 > row + i % 4 / 2 * 8) s[i] = -INFINITY;
        }
        if (DOCS && key < group_last) {
#pragma unroll
            for (int i = 0; i < BN / 2; i++)
                if (key + i / 4 * 8 + 2 * t + i % 2 < seen[i % 4 / 2]) s[i] = -INFINITY;
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
template <int DP, int BM, int DOCS>
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
    const int last_row = DOCS ? ftk__att_end(a, b, first + 127 < T ? first + 127 : T - 1) : T;
    const int begin = first / BM, end = (last_row + BM - 1) / BM; /* tiles of rows that see a key */
    const int seen[2] = { DOCS ? ftk__att_end(a, b, key) : 0,
                          DOCS ? ftk__att_end(a, b, key + 8) : 0 };
    const int group_first = DOCS ? ftk__att_end(a, b, first + group * 64) : 0;
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
        if (DOCS && row + BM > group_first) {
#pragma unroll
            for (int i = 0; i < BM / 2; i++)
                if (row + i / 4 * 8 + 2 * t + i % 2 >= seen[i % 4 / 2]) s[i] = 0;
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
template <int DP, int BN, int DOCS>
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

    const int begin = DOCS ? ftk__att_first(a, b, first) / BN : 0;
    const int group_row = first + group * 64 + 63, seen[2] = {
        DOCS ? ftk__att_first(a, b, row) : 0, DOCS ? ftk__att_first(a, b, row + 8) : 0 };
    const int group_last = DOCS ? ftk__att_first(a, b, group_row < T ? group_row : T - 1) : 0;
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
    ftk__att_wg_load<DP, BN>(k, keys, a.W, begin * BN, T, D);
    ftk__att_wg_load<DP, BN>(v, values, a.W, begin * BN, T, D);
    ftk__att_commit();

    for (int j = begin, place = 0; j < steps; j++) {
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
        if (DOCS && key < group_last) {
#pragma unroll
            for (int i = 0; i < BN / 2; i++)
                if (key + i / 4 * 8 + 2 * t + i % 2 < seen[i % 4 / 2]) s[i] = 0;
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
    ftk__att_kernel *kernel = a->doc ? ftk__att_wg_forward<DP, BN, 1>
                                     : ftk__att_wg_forward<DP, BN, 0>;
    return ftk__att_start(kernel, a, a->B * a->H, (a->T + 127) / 128, 256,
                          (size_t)(128 + 4 * BN) * DP * 2 + 1024, stream);
}

template <int DP, int BM>
static ft_status ftk__att_start_wg_dkv(const ftk__att *a, void *stream)
{
    ftk__att_kernel *kernel = a->doc ? ftk__att_wg_dkv<DP, BM, 1>
                                     : ftk__att_wg_dkv<DP, BM, 0>;
    return ftk__att_start(kernel, a, a->B * a->K, (a->T + 127) / 128, 256,
                          (size_t)(256 + 6 * BM) * DP * 2 + 24 * BM + 1024, stream);
}

template <int DP, int BN>
static ft_status ftk__att_start_wg_dq(const ftk__att *a, void *stream)
{
    ftk__att_kernel *kernel = a->doc ? ftk__att_wg_dq<DP, BN, 1>
                                     : ftk__att_wg_dq<DP, BN, 0>;
    return ftk__att_start(kernel, a, a->B * a->H, (a->T + 127) / 128, 256,
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
           cudaFuncGetAttributes(&kernel, (const void *)ftk__att_wg_dkv<128, 64, 0>) ==
               cudaSuccess &&
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
    if (a->D <= 64) return ftk__att_start_wg_forward<64, 64>(a, stream);
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
        FT_TRY((ftk__att_start_wg_dkv<64, 128>(a, stream)));
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
    a->doc = call->in[1].present ? (const int32_t *)call->in[1].data : NULL;
    a->fault = call->fault;
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
    if (a.doc)
        FT_TRY(ftk__att_start(ftk__att_check_docs, &a, 1, (a.B * a.T + 255) / 256, 256, 0,
                              call->stream));
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
