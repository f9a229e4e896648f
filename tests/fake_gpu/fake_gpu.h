/* fake_gpu.h: GPUs, cuBLASLt and NCCL that are threads of this machine's CPU, so that the code
   around them is tested, and looked at by sanitizers, where no GPU is.

   Compile with -Itests/fake_gpu -DFT_CUDA -DFT_NCCL, and include this after the headers with their
   implementation, in the same file:

       #define FEMTOTRON_IMPLEMENTATION
       #include "femtotron.h"
       ...
       #include "tests/fake_gpu/fake_gpu.h"

   GPUs     FAKE_GPUS of them (16), with FAKE_GPU_BYTES each (4 GiB). A stream is a thread that
            works off a queue: what is queued runs later, unless an event or a wait orders it, so a
            missing wait is a data race that ThreadSanitizer reports. Memory begins with NaNs when
            it is given, and is freed when all streams of the device are idle, as CUDA does it.
   kernels  A ftk_ launcher queues the CPU kernel of the call's row.
   NCCL     Between threads. As the real one it does not compare what members ask for: where sizes
            differ the smaller one is moved, and all is well; where the calls are different ones
            nobody returns until the communicator is aborted, nor does a receiver that wants more
            than is sent, while the messages before that one are there. Communicators are
            non-blocking. Every call takes FAKE_SLOW_US (0).
   What is not here: graphs, peers without access, cuBLASLt's choice of algorithms. */

#ifndef FAKE_GPU_H
#define FAKE_GPU_H

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* One lock for everything that is not a stream's queue. */
static pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;

/* ------------------------------------------------------------------------------------- devices */

enum { FAKE_FILL = 1 << 18 }; /* of what is given, at most */

typedef struct fake_block fake_block;
struct fake_block { fake_block *next; char *at; size_t bytes; int device; /* -1: pinned */ };

static fake_block *fake_blocks;
static _Thread_local int fake_device;
static cudaError_t fake_failure; /* of a kernel: it sticks */

static long long fake_setting(const char *name, long long otherwise)
{
    const char *text = getenv(name);
    return text ? atoll(text) : otherwise;
}

static inline const char *fake_error_name(cudaError_t error)
{
    return error == cudaSuccess ? "cudaSuccess"
         : error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
         : error == cudaErrorNotReady ? "cudaErrorNotReady"
         : error == cudaErrorLaunchFailure ? "cudaErrorLaunchFailure" : "cudaErrorInvalidValue";
}

const char *cudaGetErrorName(cudaError_t error) { return fake_error_name(error); }
const char *cudaGetErrorString(cudaError_t error) { return fake_error_name(error); }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = (int)fake_setting("FAKE_GPUS", 16);
    return *n > 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    snprintf(properties->name, sizeof properties->name, "fake GPU %d", device >= 0 ? 0 : device);
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = fake_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    int n;
    if (cudaGetDeviceCount(&n) != cudaSuccess || device < 0 || device >= n)
        return cudaErrorInvalidDevice;
    fake_device = device;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    *total_bytes = (size_t)fake_setting("FAKE_GPU_BYTES", 4ll << 30);
    *free_bytes = *total_bytes;
    pthread_mutex_lock(&fake_lock);
    for (fake_block *b = fake_blocks; b; b = b->next)
        if (b->device == fake_device)
            *free_bytes -= b->bytes < *free_bytes ? b->bytes : *free_bytes;
    pthread_mutex_unlock(&fake_lock);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    (void)peer;
    (void)flags;
    return cudaSuccess;
}

/* ------------------------------------------------------------------------------------- streams */

typedef void fake_work(void *argument);
typedef struct fake_task fake_task;
struct fake_task { fake_task *next; fake_work *work; max_align_t argument[]; };

struct fake_stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    fake_task *first, **last;
    int busy, stop, device;
    int references;           /* fake_lock */
    struct fake_stream *next; /* of all */
};

struct fake_event {
    long long recorded, done; /* fake_lock */
    int references;
    pthread_cond_t changed;
    struct timespec time;
};

static struct fake_stream *fake_streams;

static void *fake_stream_main(void *argument)
{
    struct fake_stream *s = (struct fake_stream *)argument;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        fake_task *task = s->first;
        if (!task) {
            if (s->stop) break;
            pthread_cond_wait(&s->changed, &s->lock);
            continue;
        }
        s->first = task->next;
        if (!s->first) s->last = &s->first;
        s->busy = 1;
        pthread_mutex_unlock(&s->lock);
        task->work(task->argument);
        free(task);
        pthread_mutex_lock(&s->lock);
        s->busy = 0;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* Queues work with a copy of its argument. */
static cudaError_t fake_queue(cudaStream_t s, fake_work *work, const void *argument, size_t bytes)
{
    fake_task *task = (fake_task *)malloc(sizeof *task + bytes);
    if (!task) return cudaErrorMemoryAllocation;
    task->next = NULL;
    task->work = work;
    memcpy(task->argument, argument, bytes);
    pthread_mutex_lock(&s->lock);
    *s->last = task;
    s->last = &task->next;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return cudaSuccess;
}

static cudaError_t fake_state(void)
{
    pthread_mutex_lock(&fake_lock);
    cudaError_t error = fake_failure;
    pthread_mutex_unlock(&fake_lock);
    return error;
}

static void fake_drain(struct fake_stream *s)
{
    pthread_mutex_lock(&s->lock);
    while (s->first || s->busy) pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    struct fake_stream *s = (struct fake_stream *)calloc(1, sizeof *s);
    (void)flags;
    (void)priority;
    if (!s) return cudaErrorMemoryAllocation;
    s->last = &s->first;
    s->device = fake_device;
    s->references = 1;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (pthread_create(&s->thread, NULL, fake_stream_main, s) != 0) {
        free(s);
        return cudaErrorMemoryAllocation;
    }
    pthread_mutex_lock(&fake_lock);
    s->next = fake_streams;
    fake_streams = s;
    pthread_mutex_unlock(&fake_lock);
    *stream = s;
    return cudaSuccess;
}

static void fake_stream_drop(struct fake_stream *s)
{
    pthread_mutex_lock(&fake_lock);
    int last = --s->references == 0;
    pthread_mutex_unlock(&fake_lock);
    if (!last) return;
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    pthread_mutex_lock(&fake_lock);
    for (struct fake_stream **at = &fake_streams; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    pthread_mutex_unlock(&fake_lock);
    pthread_mutex_lock(&s->lock);
    s->stop = 1;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    fake_stream_drop(s);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t s)
{
    pthread_mutex_lock(&s->lock);
    int over = !s->first && !s->busy;
    pthread_mutex_unlock(&s->lock);
    return over ? fake_state() : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    fake_drain(s);
    return fake_state();
}

/* Streams of other ranks may come and go meanwhile. */
static void fake_drain_device(int device)
{
    struct fake_stream *held[256], *s;
    int n = 0;
    pthread_mutex_lock(&fake_lock);
    for (s = fake_streams; s && n < 256; s = s->next)
        if (s->device == device) {
            s->references++;
            held[n++] = s;
        }
    pthread_mutex_unlock(&fake_lock);
    for (int i = 0; i < n; i++) {
        fake_drain(held[i]);
        fake_stream_drop(held[i]);
    }
}

cudaError_t cudaDeviceSynchronize(void)
{
    fake_drain_device(fake_device);
    return fake_state();
}

/* -------------------------------------------------------------------------------------- events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    (void)flags;
    *event = (cudaEvent_t)calloc(1, sizeof **event);
    if (!*event) return cudaErrorMemoryAllocation;
    (*event)->references = 1;
    pthread_cond_init(&(*event)->changed, NULL);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

/* Locked. */
static void fake_event_drop(cudaEvent_t event)
{
    if (--event->references) return;
    pthread_cond_destroy(&event->changed);
    free(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    pthread_mutex_lock(&fake_lock);
    fake_event_drop(event);
    pthread_mutex_unlock(&fake_lock);
    return cudaSuccess;
}

typedef struct fake_mark { cudaEvent_t event; long long count; } fake_mark;

static void fake_event_reached(void *argument)
{
    const fake_mark *mark = (const fake_mark *)argument;
    pthread_mutex_lock(&fake_lock);
    if (mark->event->done < mark->count) mark->event->done = mark->count;
    clock_gettime(CLOCK_MONOTONIC, &mark->event->time);
    pthread_cond_broadcast(&mark->event->changed);
    fake_event_drop(mark->event);
    pthread_mutex_unlock(&fake_lock);
}

static void fake_event_awaited(void *argument)
{
    const fake_mark *mark = (const fake_mark *)argument;
    pthread_mutex_lock(&fake_lock);
    while (mark->event->done < mark->count)
        pthread_cond_wait(&mark->event->changed, &fake_lock);
    fake_event_drop(mark->event);
    pthread_mutex_unlock(&fake_lock);
}

static fake_mark fake_event_mark(cudaEvent_t event, int record)
{
    fake_mark mark;
    pthread_mutex_lock(&fake_lock);
    event->references++;
    event->recorded += record;
    mark.event = event;
    mark.count = event->recorded;
    pthread_mutex_unlock(&fake_lock);
    return mark;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    fake_mark mark = fake_event_mark(event, 1);
    return fake_queue(stream, fake_event_reached, &mark, sizeof mark);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    fake_mark mark = fake_event_mark(event, 0);
    (void)flags;
    return fake_queue(stream, fake_event_awaited, &mark, sizeof mark);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    pthread_mutex_lock(&fake_lock);
    int over = event->done >= event->recorded;
    pthread_mutex_unlock(&fake_lock);
    return over ? fake_state() : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    pthread_mutex_lock(&fake_lock);
    while (event->done < event->recorded) pthread_cond_wait(&event->changed, &fake_lock);
    pthread_mutex_unlock(&fake_lock);
    return fake_state();
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    pthread_mutex_lock(&fake_lock);
    *ms = (float)(1e3 * (double)(to->time.tv_sec - from->time.tv_sec) +
                  1e-6 * (double)(to->time.tv_nsec - from->time.tv_nsec));
    pthread_mutex_unlock(&fake_lock);
    return cudaSuccess;
}

/* -------------------------------------------------------------------------------------- memory */

static cudaError_t fake_alloc(void **out, size_t bytes, int device)
{
    fake_block *b = (fake_block *)malloc(sizeof *b);
    size_t free_bytes = 0, total_bytes;
    *out = NULL;
    if (device >= 0) (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    if (b) b->at = device >= 0 && bytes > free_bytes ? NULL : (char *)malloc(bytes ? bytes : 1);
    if (!b || !b->at) {
        free(b);
        return cudaErrorMemoryAllocation;
    }
    memset(b->at, 0xff, bytes < FAKE_FILL ? bytes : FAKE_FILL);
    b->bytes = bytes;
    b->device = device;
    pthread_mutex_lock(&fake_lock);
    b->next = fake_blocks;
    fake_blocks = b;
    pthread_mutex_unlock(&fake_lock);
    *out = b->at;
    return cudaSuccess;
}

static cudaError_t fake_release(void *at)
{
    fake_block *b = NULL;
    if (!at) return cudaSuccess;
    pthread_mutex_lock(&fake_lock);
    for (fake_block **to = &fake_blocks; *to && !b; to = &(*to)->next)
        if ((*to)->at == at) {
            b = *to;
            *to = b->next;
            break;
        }
    pthread_mutex_unlock(&fake_lock);
    if (!b) return cudaErrorInvalidValue;
    free(b->at);
    free(b);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **block, size_t bytes) { return fake_alloc(block, bytes, fake_device); }
cudaError_t cudaMallocHost(void **block, size_t bytes) { return fake_alloc(block, bytes, -1); }

cudaError_t cudaFree(void *block)
{
    fake_drain_device(fake_device);
    return fake_release(block);
}

cudaError_t cudaFreeHost(void *block) { return fake_release(block); }

static int fake_is_pageable(const void *at)
{
    int known = 0;
    pthread_mutex_lock(&fake_lock);
    for (fake_block *b = fake_blocks; b && !known; b = b->next)
        known = (const char *)at >= b->at && (const char *)at < b->at + b->bytes;
    pthread_mutex_unlock(&fake_lock);
    return !known;
}

typedef struct fake_copy { void *to; const void *from; size_t bytes; int value, owned; } fake_copy;

static void fake_copy_run(void *argument)
{
    const fake_copy *c = (const fake_copy *)argument;
    if (!c->from) memset(c->to, c->value, c->bytes);
    else memmove(c->to, c->from, c->bytes);
    if (c->owned) free((void *)(size_t)c->from);
}

/* A look at what others may be writing, which is no race: of kind cudaMemcpyDefault. */
static __attribute__((no_sanitize_thread)) void fake_look_run(void *argument)
{
    const fake_copy *c = (const fake_copy *)argument;
    const volatile char *from = (const volatile char *)c->from;
    volatile char *to = (volatile char *)c->to;
    for (size_t i = 0; i < c->bytes; i++) to[i] = from[i];
}

/* Pageable memory: what comes from there is taken before the call returns, what goes there has
   arrived. */
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    fake_copy c = { to, from, bytes, 0, 0 };
    if (bytes == 0) return cudaSuccess;
    if (kind == cudaMemcpyHostToDevice && fake_is_pageable(from)) {
        void *taken = malloc(bytes);
        if (!taken) return cudaErrorMemoryAllocation;
        c.from = memcpy(taken, from, bytes);
        c.owned = 1;
    }
    fake_work *work = kind == cudaMemcpyDefault ? fake_look_run : fake_copy_run;
    cudaError_t error = fake_queue(stream, work, &c, sizeof c);
    if (error == cudaSuccess && kind == cudaMemcpyDeviceToHost && fake_is_pageable(to))
        return cudaStreamSynchronize(stream);
    return error;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    fake_copy c = { to, NULL, bytes, value, 0 };
    return fake_queue(stream, fake_copy_run, &c, sizeof c);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    (void)kind;
    memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    memset(to, value, bytes);
    return cudaSuccess;
}

/* ------------------------------------------------------------------------------------ cuBLASLt */

size_t cublasLtGetVersion(void) { return 1; }

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_SUCCESS ? "success" : "a failure";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = NULL;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    (void)handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    (void)compute;
    (void)scale;
    *desc = (cublasLtMatmulDesc_t)calloc(1, sizeof **desc);
    return *desc ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    free(desc);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t which,
                                              const void *value, size_t bytes)
{
    memcpy(&desc->trans[which - CUBLASLT_MATMUL_DESC_TRANSA], value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    *layout = (cublasLtMatrixLayout_t)calloc(1, sizeof **layout);
    if (!*layout) return CUBLAS_STATUS_ALLOC_FAILED;
    (*layout)->type = type;
    (*layout)->rows = (int64_t)rows;
    (*layout)->cols = (int64_t)cols;
    (*layout)->ld = ld;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *want)
{
    *want = NULL;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t want)
{
    (void)want;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t want,
                                                    cublasLtMatmulPreferenceAttributes_t which,
                                                    const void *value, size_t bytes)
{
    (void)want;
    (void)which;
    (void)value;
    (void)bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t want, int most,
                                              cublasLtMatmulHeuristicResult_t *found, int *n)
{
    (void)handle;
    (void)desc;
    (void)a;
    (void)b;
    (void)c;
    (void)d;
    (void)want;
    (void)most;
    memset(found, 0, sizeof *found);
    *n = 1;
    return CUBLAS_STATUS_SUCCESS;
}

typedef struct fake_product {
    struct fake_desc desc;
    struct fake_layout la, lb, ld;
    const void *a, *b;
    void *d;
    float beta;
} fake_product;

static ft_dtype fake_dtype(cudaDataType_t type) { return type == CUDA_R_16BF ? FT_BF16 : FT_F32; }

/* D = op(A) op(B) + beta D in columns is D^T = op(B)^T op(A)^T in rows. */
static void fake_product_run(void *argument)
{
    const fake_product *p = (const fake_product *)argument;
    const int ta = p->desc.trans[0], tb = p->desc.trans[1];
    const int64_t m = p->ld.cols, n = p->ld.rows, k = ta ? p->la.rows : p->la.cols;
    const ft_dtype at = fake_dtype(p->la.type), bt = fake_dtype(p->lb.type);
    const ft_dtype dt = fake_dtype(p->ld.type);
    void *room = malloc(ft__gemm_workspace_bytes(m, n, k, bt, at, dt) + 1);
    ft__gemm(m, n, k, p->b, bt, tb ? 1 : p->lb.ld, tb ? p->lb.ld : 1, p->a, at, ta ? 1 : p->la.ld,
             ta ? p->la.ld : 1, p->d, dt, p->ld.ld, p->beta != 0, room);
    free(room);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t la, const void *b,
                              cublasLtMatrixLayout_t lb, const void *beta, const void *c,
                              cublasLtMatrixLayout_t lc, void *d, cublasLtMatrixLayout_t ld,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes,
                              cudaStream_t stream)
{
    fake_product p;
    (void)handle;
    (void)alpha;
    (void)lc;
    (void)algo;
    (void)workspace;
    (void)bytes;
    if (c != d) return CUBLAS_STATUS_NOT_SUPPORTED;
    p.desc = *desc;
    p.la = *la;
    p.lb = *lb;
    p.ld = *ld;
    p.a = a;
    p.b = b;
    p.d = d;
    memcpy(&p.beta, beta, sizeof p.beta);
    return fake_queue(stream, fake_product_run, &p, sizeof p) == cudaSuccess
        ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

/* ------------------------------------------------------------------------------------- kernels */

static void fake_fails(const char *what, const char *why)
{
    fprintf(stderr, "fake GPU: %s: %s\n", what, why);
    pthread_mutex_lock(&fake_lock);
    fake_failure = cudaErrorLaunchFailure;
    pthread_mutex_unlock(&fake_lock);
}

typedef struct fake_launch {
    ft_op_call call;
    ft_status (*kernel)(const ft_op_call *call);
} fake_launch;

/* What the CPU's kernel needs beside its operands is its own. */
static void fake_launch_run(void *argument)
{
    fake_launch *l = (fake_launch *)argument;
    ft_op_call *c = &l->call;
    c->device = FT_CPU;
    c->scratch_bytes = c->workspace_bytes = 0;
    if (c->op->scratch) c->op->scratch(c);
    char *room = (char *)malloc(c->scratch_bytes + c->workspace_bytes + 64);
    c->scratch = room;
    c->workspace = room ? room + (c->scratch_bytes + 63) / 64 * 64 : NULL;
    if (!room) fake_fails(c->op->name, "no memory");
    else if (l->kernel(c) != FT_OK) fake_fails(c->op->name, ft_last_error());
    free(room);
}

static ft_status fake_launch_kernel(const ft_op_call *call, const ft_op *op,
                                    ft_status (*kernel)(const ft_op_call *call))
{
    fake_launch l;
    l.call = *call;
    l.call.op = op;
    l.kernel = kernel;
    if (fake_queue((cudaStream_t)call->stream, fake_launch_run, &l, sizeof l) == cudaSuccess)
        return FT_OK;
    return ft_error(FT_ERR_OOM, "no memory for a launch");
}

#define FAKE_KERNEL(name, kind)                                                                    \
    FT_API ft_status ftk_##name(const ft_op_call *call)                                            \
    {                                                                                              \
        return fake_launch_kernel(call, call->op, call->op->kind);                                 \
    }
#define FAKE_FORWARD(name) FAKE_KERNEL(name##_forward, forward)
#define FAKE_BOTH(name) FAKE_FORWARD(name) FAKE_KERNEL(name##_backward, backward)

FAKE_FORWARD(fill)
FAKE_BOTH(embedding)
FAKE_BOTH(rmsnorm)
FAKE_BOTH(add_rmsnorm)
FAKE_KERNEL(add_rmsnorm_replay, replay)
FAKE_BOTH(rope)
FAKE_BOTH(head_norm)
FAKE_BOTH(attention)
FAKE_BOTH(swiglu)
FAKE_BOTH(add)
FAKE_BOTH(mul)
FAKE_BOTH(scale)
FAKE_BOTH(gelu)
FAKE_BOTH(silu)
FAKE_BOTH(softmax)
FAKE_BOTH(layer_norm)
FAKE_BOTH(mean)
FAKE_KERNEL(zero_sumsq, forward)
FAKE_KERNEL(zero_local, forward)
FAKE_KERNEL(zero_control, forward)
FAKE_KERNEL(zero_scale, forward)
FAKE_KERNEL(zero_adamw, forward)
FAKE_KERNEL(zero_sgd, forward)
FAKE_KERNEL(tp_bias, forward)
FAKE_KERNEL(tp_bias_grad, forward)
FAKE_KERNEL(tp_lookup, forward)
FAKE_KERNEL(tp_lookup_grad, forward)
FAKE_KERNEL(tp_loss_begin, forward)
FAKE_KERNEL(tp_loss_stats, forward)
FAKE_KERNEL(tp_loss_add, forward)
FAKE_KERNEL(tp_loss_grad, forward)
FAKE_KERNEL(tp_loss_end, forward)

/* Parts of other rows use these two. */
FT_API ft_status ftk_copy_forward(const ft_op_call *call)
{
    return fake_launch_kernel(call, &ft__op_copy, ft__op_copy.forward);
}

FT_API ft_status ftk_accumulate_forward(const ft_op_call *call)
{
    return fake_launch_kernel(call, &ft__op_accumulate, ft__op_accumulate.forward);
}

static float fake_get(const void *at, ft_dtype t, int64_t i)
{
    return t == FT_BF16 ? ft_f32_from_bf16(((const uint16_t *)at)[i]) : ((const float *)at)[i];
}

static void fake_put(void *at, ft_dtype t, int64_t i, float value)
{
    if (t == FT_BF16) ((uint16_t *)at)[i] = ft_bf16_from_f32(value);
    else ((float *)at)[i] = value;
}

typedef struct fake_rows {
    void *to;
    const void *from;
    ft_dtype to_dtype, dtype;
    int64_t n, o;
    int accumulate;
} fake_rows;

static void fake_rows_fill_run(void *argument)
{
    const fake_rows *r = (const fake_rows *)argument;
    for (int64_t i = 0; i < r->n; i++)
        for (int64_t j = 0; j < r->o; j++)
            fake_put(r->to, r->dtype, i * r->o + j, fake_get(r->from, r->dtype, j));
}

static void fake_rows_sum_run(void *argument)
{
    const fake_rows *r = (const fake_rows *)argument;
    for (int64_t j = 0; j < r->o; j++) {
        float sum = r->accumulate ? fake_get(r->to, r->to_dtype, j) : 0;
        for (int64_t i = 0; i < r->n; i++) sum += fake_get(r->from, r->dtype, i * r->o + j);
        fake_put(r->to, r->to_dtype, j, sum);
    }
}

FT_API ft_status ftk_rows_fill(void *stream, void *y, const void *b, ft_dtype dtype, int64_t n,
                               int64_t o)
{
    fake_rows r = { y, b, dtype, dtype, n, o, 0 };
    (void)fake_queue((cudaStream_t)stream, fake_rows_fill_run, &r, sizeof r);
    return FT_OK;
}

FT_API ft_status ftk_rows_sum(void *stream, void *to, ft_dtype to_dtype, const void *dy,
                              ft_dtype dtype, int64_t n, int64_t o, int accumulate, void *workspace)
{
    fake_rows r = { to, dy, to_dtype, dtype, n, o, accumulate };
    (void)workspace;
    (void)fake_queue((cudaStream_t)stream, fake_rows_sum_run, &r, sizeof r);
    return FT_OK;
}

typedef struct fake_sum {
    const void *in[FTK_SUM_MOST];
    void *out;
    ft_dtype dtype;
    int n;
    int64_t count;
} fake_sum;

static void fake_sum_run(void *argument)
{
    const fake_sum *s = (const fake_sum *)argument;
    for (int64_t i = 0; i < s->count; i++) {
        float sum = fake_get(s->in[0], s->dtype, i);
        for (int r = 1; r < s->n; r++) sum += fake_get(s->in[r], s->dtype, i);
        fake_put(s->out, s->dtype, i, sum);
    }
}

FT_API ft_status ftk_sum(void *stream, void *out, ft_dtype dtype, int n, const void *const *in,
                         int64_t count)
{
    fake_sum s;
    memset(&s, 0, sizeof s);
    memcpy(s.in, in, (size_t)n * sizeof *in);
    s.out = out;
    s.dtype = dtype;
    s.n = n;
    s.count = count;
    (void)fake_queue((cudaStream_t)stream, fake_sum_run, &s, sizeof s);
    return FT_OK;
}

/* The parts of linear_cross_entropy, as femtotron.h states them. */
typedef struct fake_ce {
    ftk_ce_state *state;
    const ftk_ce_state *known;
    const int32_t *labels;
    const float *scale, *dloss;
    void *z;
    float *losses, *loss;
    uint64_t *fault;
    ft_dtype dtype;
    int64_t n, V;
    int grads;
} fake_ce;

static void fake_ce_begin_run(void *argument)
{
    const fake_ce *c = (const fake_ce *)argument;
    c->state->counted = 0;
    for (int64_t i = 0; i < c->n; i++) {
        const int32_t label = c->labels[i];
        c->state->counted += label != -100;
        if (label == -100 || (label >= 0 && label < c->V)) continue;
        uint64_t *at = c->fault + 3 * FTK_FAULT_CE, word = (uint64_t)i << 32 | (uint32_t)label;
        if (word >= at[0]) continue;
        at[0] = word;
        at[1] = (uint64_t)c->V;
        at[2] = (uint64_t)c->n;
    }
    c->state->by = c->scale ? *c->scale : c->state->counted ? 1.0 / c->state->counted : 0;
    c->state->factor = c->dloss ? (float)(c->state->by * *c->dloss) : 0;
}

static void fake_ce_tokens_run(void *argument)
{
    const fake_ce *c = (const fake_ce *)argument;
    for (int64_t i = 0; i < c->n; i++) {
        const int32_t label = c->labels[i];
        const int counts = label >= 0 && label < c->V;
        float most = -INFINITY, sum = 0;
        for (int64_t v = 0; v < c->V; v++) {
            const float z = fake_get(c->z, c->dtype, i * c->V + v);
            if (z > most) most = z;
        }
        for (int64_t v = 0; v < c->V; v++)
            sum += expf(fake_get(c->z, c->dtype, i * c->V + v) - most);
        c->losses[i] = counts ? logf(sum) + most - fake_get(c->z, c->dtype, i * c->V + label) : 0;
        for (int64_t v = 0; c->grads && v < c->V; v++) {
            const float p = expf(fake_get(c->z, c->dtype, i * c->V + v) - most) / sum;
            fake_put(c->z, c->dtype, i * c->V + v,
                     counts ? c->known->factor * (p - (v == label ? 1.0f : 0.0f)) : 0);
        }
    }
}

static void fake_ce_end_run(void *argument)
{
    const fake_ce *c = (const fake_ce *)argument;
    double sum = 0;
    for (int64_t i = 0; i < c->n; i++) sum += c->losses[i];
    *c->loss = (float)(c->known->by * sum);
}

static ft_status fake_ce_queue(void *stream, fake_work *work, const fake_ce *c)
{
    (void)fake_queue((cudaStream_t)stream, work, c, sizeof *c);
    return FT_OK;
}

FT_API ft_status ftk_ce_begin(void *stream, ftk_ce_state *state, const int32_t *labels, int64_t n,
                              int64_t V, const float *scale, const float *dloss, uint64_t *fault)
{
    fake_ce c;
    memset(&c, 0, sizeof c);
    c.state = state;
    c.labels = labels;
    c.n = n;
    c.V = V;
    c.scale = scale;
    c.dloss = dloss;
    c.fault = fault;
    return fake_ce_queue(stream, fake_ce_begin_run, &c);
}

FT_API ft_status ftk_ce_tokens(void *stream, void *z, ft_dtype dtype, const int32_t *labels,
                               int64_t n, int64_t V, const ftk_ce_state *state, float *losses,
                               int grads)
{
    fake_ce c;
    memset(&c, 0, sizeof c);
    c.z = z;
    c.dtype = dtype;
    c.labels = labels;
    c.n = n;
    c.V = V;
    c.known = state;
    c.losses = losses;
    c.grads = grads;
    return fake_ce_queue(stream, fake_ce_tokens_run, &c);
}

FT_API ft_status ftk_ce_end(void *stream, const float *losses, int64_t n,
                            const ftk_ce_state *state, float *loss)
{
    fake_ce c;
    memset(&c, 0, sizeof c);
    c.losses = (float *)(size_t)losses;
    c.n = n;
    c.known = state;
    c.loss = loss;
    return fake_ce_queue(stream, fake_ce_end_run, &c);
}

/* ---------------------------------------------------------------------------------------- NCCL */

enum { FAKE_MEMBERS = 64 };

typedef struct fake_call {
    ncclComm_t comm;
    int kind, root;         /* kind: 'g' gather, 's' scatter of sums, 'r' sum, 'b' broadcast */
    const char *in;
    char *out;
    size_t count;
    ncclDataType_t type;
    long long number;       /* of the communicator's calls */
} fake_call;

typedef struct fake_round fake_round;
struct fake_round {         /* the members' calls of one number */
    fake_round *next;
    long long number;
    int here, read, left;
    fake_call calls[FAKE_MEMBERS];
};

typedef struct fake_letter fake_letter;
struct fake_letter { fake_letter *next; int from, to, taken; const void *data; size_t bytes; };

typedef struct fake_clique fake_clique;
struct fake_clique {        /* the communicators of one id */
    fake_clique *next;
    ncclUniqueId id;
    int n, joined, left;
    pthread_cond_t changed;
    fake_round *rounds;
    fake_letter *letters;
};

struct fake_comm { fake_clique *clique; int rank, aborted, references; long long number; };

static fake_clique *fake_cliques;
static unsigned long long fake_ids;

const char *ncclGetErrorString(ncclResult_t result)
{
    return result == ncclSuccess ? "no error" : result == ncclInProgress ? "in progress"
         : result == ncclInvalidUsage ? "invalid usage" : "an error";
}

/* The next so many ids are one, as of processes that meet where NCCL_COMM_ID says. */
static int fake_meeting;

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    memset(id, 0, sizeof *id);
    pthread_mutex_lock(&fake_lock);
    if (fake_meeting == 0) fake_ids++;
    else fake_meeting--;
    memcpy(id->internal, &fake_ids, sizeof fake_ids);
    pthread_mutex_unlock(&fake_lock);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    fake_clique *q;
    (void)config;
    if (n > FAKE_MEMBERS || rank < 0 || rank >= n) return ncclInvalidArgument;
    *comm = (ncclComm_t)calloc(1, sizeof **comm);
    if (!*comm) return ncclSystemError;
    pthread_mutex_lock(&fake_lock);
    for (q = fake_cliques; q; q = q->next)
        if (memcmp(&q->id, &id, sizeof id) == 0) break;
    if (!q) {
        q = (fake_clique *)calloc(1, sizeof *q);
        if (!q) abort();
        q->id = id;
        q->n = n;
        pthread_cond_init(&q->changed, NULL);
        q->next = fake_cliques;
        fake_cliques = q;
    }
    q->joined++;
    (*comm)->clique = q;
    (*comm)->rank = rank;
    (*comm)->references = 1;
    pthread_mutex_unlock(&fake_lock);
    return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state)
{
    pthread_mutex_lock(&fake_lock);
    *state = comm->clique->joined < comm->clique->n ? ncclInProgress : ncclSuccess;
    pthread_mutex_unlock(&fake_lock);
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    (void)comm;
    return ncclSuccess;
}

/* Locked. The last to go clears up. */
static void fake_comm_drop(ncclComm_t comm)
{
    fake_clique *q = comm->clique;
    if (--comm->references) return;
    free(comm);
    if (++q->left < q->joined) return;
    for (fake_clique **at = &fake_cliques; *at; at = &(*at)->next)
        if (*at == q) {
            *at = q->next;
            break;
        }
    while (q->rounds) {
        fake_round *r = q->rounds;
        q->rounds = r->next;
        free(r);
    }
    while (q->letters) {
        fake_letter *l = q->letters;
        q->letters = l->next;
        free(l);
    }
    pthread_cond_destroy(&q->changed);
    free(q);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    pthread_mutex_lock(&fake_lock);
    fake_comm_drop(comm);
    pthread_mutex_unlock(&fake_lock);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    pthread_mutex_lock(&fake_lock);
    comm->aborted = 1;
    pthread_cond_broadcast(&comm->clique->changed);
    fake_comm_drop(comm);
    pthread_mutex_unlock(&fake_lock);
    return ncclSuccess;
}

static size_t fake_bytes(ncclDataType_t type)
{
    return type == ncclUint8 ? 1 : type == ncclBfloat16 ? 2 : type == ncclUint64 ? 8 : 4;
}

static void fake_add(char *to, const char *from, size_t count, ncclDataType_t type)
{
    for (size_t i = 0; i < count; i++) {
        const ft_dtype t = type == ncclBfloat16 ? FT_BF16 : FT_F32;
        const int64_t at = (int64_t)i;
        uint64_t words[2];
        if (type == ncclUint64) {
            memcpy(&words[0], to + 8 * i, 8);
            memcpy(&words[1], from + 8 * i, 8);
            words[0] += words[1];
            memcpy(to + 8 * i, &words[0], 8);
        } else {
            fake_put(to, t, at, fake_get(to, t, at) + fake_get(from, t, at));
        }
    }
}

static size_t fake_least(size_t a, size_t b) { return a < b ? a : b; }

/* What this member's call yields, from what all members brought. */
static void fake_round_result(const fake_round *r, int n, const fake_call *own, char *result)
{
    const size_t size = fake_bytes(own->type), bytes = own->count * size;
    for (int i = 0; i < n; i++) {
        const fake_call *c = &r->calls[i];
        const size_t theirs = fake_least(c->count * fake_bytes(c->type), bytes);
        const char *from = c->in + (own->kind == 's' ? (size_t)own->comm->rank * theirs : 0);
        if (own->kind == 'g') memcpy(result + (size_t)i * bytes, from, theirs);
        else if (own->kind == 'b' && i == own->root) memcpy(result, from, theirs);
        else if (own->kind != 'b' && i == 0) memcpy(result, from, theirs);
        else if (own->kind != 'b') fake_add(result, from, theirs / size, own->type);
    }
}

/* Waits, locked, until *count is n; 0 if the communicator is aborted before. */
static int fake_all(const fake_call *own, const int *count, int n)
{
    while (*count < n && !own->comm->aborted)
        pthread_cond_wait(&own->comm->clique->changed, &fake_lock);
    return !own->comm->aborted;
}

static void fake_call_run(void *argument)
{
    const fake_call *own = (const fake_call *)argument;
    fake_clique *q = own->comm->clique;
    const int n = q->n;
    const size_t bytes = own->count * fake_bytes(own->type) * (own->kind == 'g' ? (size_t)n : 1);
    char *result = (char *)calloc(1, bytes + 1);
    fake_round **at, *r;
    pthread_mutex_lock(&fake_lock);
    for (at = &q->rounds; *at && (*at)->number != own->number; at = &(*at)->next) {}
    if (!*at) {
        *at = (fake_round *)calloc(1, sizeof **at);
        if (!*at || !result) abort();
        (*at)->number = own->number;
    }
    r = *at;
    r->calls[own->comm->rank] = *own;
    r->here++;
    pthread_cond_broadcast(&q->changed);
    int whole = fake_all(own, &r->here, n);
    for (int i = 0; i < n && whole; i++)
        if (r->calls[i].kind != own->kind) whole = fake_all(own, &r->here, n + 1); /* never */
    if (whole) {
        const struct timespec slow = { 0, 1000 * (long)fake_setting("FAKE_SLOW_US", 0) };
        pthread_mutex_unlock(&fake_lock);
        if (slow.tv_nsec) nanosleep(&slow, NULL);
        fake_round_result(r, n, own, result);
        pthread_mutex_lock(&fake_lock);
    }
    r->read++;
    pthread_cond_broadcast(&q->changed);
    while (whole && r->read < n) pthread_cond_wait(&q->changed, &fake_lock); /* peers read */
    if (whole && !own->comm->aborted) memcpy(own->out, result, bytes);
    if (++r->left == n) {
        for (at = &q->rounds; *at != r; at = &(*at)->next) {}
        *at = r->next;
        free(r);
    }
    fake_comm_drop(own->comm);
    pthread_mutex_unlock(&fake_lock);
    free(result);
}

static ncclResult_t fake_call_queue(int kind, const void *in, void *out, size_t count,
                                    ncclDataType_t type, int root, ncclComm_t comm,
                                    cudaStream_t stream)
{
    fake_call c = { comm, kind, root, (const char *)in, (char *)out, count, type, 0 };
    pthread_mutex_lock(&fake_lock);
    c.number = comm->number++;
    comm->references++;
    pthread_mutex_unlock(&fake_lock);
    return fake_queue(stream, fake_call_run, &c, sizeof c) == cudaSuccess ? ncclSuccess
                                                                        : ncclSystemError;
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t each, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    return fake_call_queue('g', in, out, each, type, 0, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *in, void *out, size_t each, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    (void)op;
    return fake_call_queue('s', in, out, each, type, 0, comm, stream);
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    (void)op;
    return fake_call_queue('r', in, out, count, type, 0, comm, stream);
}

ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream)
{
    return fake_call_queue('b', in, out, count, type, root, comm, stream);
}

/* -- messages: a group is one piece of work, in which all of them are under way at once */

enum { FAKE_GROUP = 512 };

typedef struct fake_message { int is_send, peer; char *data; size_t bytes; } fake_message;

typedef struct fake_group {
    ncclComm_t comm;
    cudaStream_t stream;
    int open, n;
    fake_message m[FAKE_GROUP];
} fake_group;

static _Thread_local fake_group *fake_own;

static fake_letter **fake_letter_find(fake_clique *q, int from, int to)
{
    fake_letter **at = &q->letters;
    while (*at && ((*at)->from != from || (*at)->to != to || (*at)->taken)) at = &(*at)->next;
    return *at ? at : NULL;
}

static void fake_group_run(void *argument)
{
    const fake_group *g = (const fake_group *)argument;
    fake_clique *q = g->comm->clique;
    const int rank = g->comm->rank;
    fake_letter **end, *sent[FAKE_GROUP];
    int n = 0;
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < g->n; i++) {
        if (!g->m[i].is_send) continue;
        fake_letter *l = (fake_letter *)calloc(1, sizeof *l);
        if (!l) abort();
        l->from = rank;
        l->to = g->m[i].peer;
        l->data = g->m[i].data;
        l->bytes = g->m[i].bytes;
        for (end = &q->letters; *end; end = &(*end)->next) {}
        *end = sent[n++] = l;
    }
    pthread_cond_broadcast(&q->changed);
    for (int i = 0; i < g->n && !g->comm->aborted; i++) {
        fake_letter **at = NULL;
        if (g->m[i].is_send) continue;
        while (!g->comm->aborted && !(at = fake_letter_find(q, g->m[i].peer, rank)))
            pthread_cond_wait(&q->changed, &fake_lock);
        if (!at) break;
        const int more = g->m[i].bytes > (*at)->bytes;
        memcpy(g->m[i].data, (*at)->data, fake_least((*at)->bytes, g->m[i].bytes));
        (*at)->taken = 1;
        pthread_cond_broadcast(&q->changed);
        while (more && !g->comm->aborted) pthread_cond_wait(&q->changed, &fake_lock);
    }
    for (int i = 0; i < n; i++) {
        while (!sent[i]->taken && !g->comm->aborted) pthread_cond_wait(&q->changed, &fake_lock);
        for (end = &q->letters; *end != sent[i]; end = &(*end)->next) {}
        *end = sent[i]->next;
        free(sent[i]);
    }
    fake_comm_drop(g->comm);
    pthread_mutex_unlock(&fake_lock);
}

ncclResult_t ncclGroupStart(void)
{
    if (!fake_own) fake_own = (fake_group *)calloc(1, sizeof *fake_own);
    if (!fake_own) return ncclSystemError;
    fake_own->open++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    fake_group *g = fake_own;
    ncclResult_t result = ncclSuccess;
    if (!g || --g->open > 0) return g ? ncclSuccess : ncclInvalidUsage;
    if (g->n) {
        pthread_mutex_lock(&fake_lock);
        g->comm->references++;
        pthread_mutex_unlock(&fake_lock);
        if (fake_queue(g->stream, fake_group_run, g, sizeof *g) != cudaSuccess)
            result = ncclSystemError;
    }
    free(g);
    fake_own = NULL;
    return result;
}

static ncclResult_t fake_message_add(int is_send, void *data, size_t bytes, int peer,
                                     ncclComm_t comm, cudaStream_t stream)
{
    ncclResult_t result = ncclGroupStart();
    fake_group *g = fake_own;
    if (result != ncclSuccess) return result;
    if (g->n == FAKE_GROUP || (g->n && (g->comm != comm || g->stream != stream)))
        result = ncclInvalidUsage;
    else {
        fake_message m = { is_send, peer, (char *)data, bytes };
        g->comm = comm;
        g->stream = stream;
        g->m[g->n++] = m;
    }
    ncclResult_t ended = ncclGroupEnd();
    return result == ncclSuccess ? ended : result;
}

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return fake_message_add(1, (void *)(size_t)data, count * fake_bytes(type), peer, comm, stream);
}

ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return fake_message_add(0, data, count * fake_bytes(type), peer, comm, stream);
}

#endif /* FAKE_GPU_H */
