/* femtotron.h: tensors, a tape, recomputation and collectives for training across ranks, in C.

   Do this, in ONE C or C++ file of your program:

       #define FEMTOTRON_IMPLEMENTATION
       #include "femtotron.h"

   and include it without the macro wherever else you need it. Build with `cc file.c -lm -lpthread`;
   for GPUs with `nvcc -arch=native -DFT_CUDA file.c femtotron_kernels.cu -lcublasLt`.

   WHAT IT DOES NOT DO
     No networking of its own: ranks are threads of one process, or processes that NCCL connects. No
     automatic mixed precision inside an op, no convolutions, no views with strides: every tensor is
     contiguous and row-major. No global state but one thread-local error string.

   CONTENTS  (find a part by searching for its mark)
     Declarations                               Implementation
       >>status      errors                       >>status.impl
       >>launch      ranks as threads             >>launch.impl
       >>streams     order of work                >>streams.impl
       >>memory      the accounting allocator,    >>memory.impl (the books), >>plan.impl (what an
                     what happened when           arena holds where), >>serving.impl (memory)
       >>tensors     storage with a shape         >>tensors.impl
       >>groups      collectives                  >>groups.impl (the local transport), >>nccl.impl
       >>optable     what an op is                >>optable.impl
       >>ops         the built-in ops             >>kernels.impl (CPU code), >>ops.impl (the rows)
       >>tape        backward, recomputation      >>tape.impl, >>sac.impl
       >>gpu         kernels of the device        femtotron_kernels.cu; >>gpu.impl (around them)

   OPTIONS  (define before the include that has FEMTOTRON_IMPLEMENTATION)
     FT_CBLAS      GEMMs call cblas_sgemm instead of the built-in loops. Default off. Set it where
                   OpenBLAS or another CBLAS is installed; link it. Single-threaded BLAS is asked
                   for, because every rank is a thread already.
     FT_CUDA       the device FT_GPU exists. Default off. Needs the CUDA Toolkit; link cudart,
                   cuBLASLt and femtotron_kernels.cu.
     FT_NCCL       with FT_CUDA: ranks as processes (ft_launch_env), and FT_TRANSPORT_NCCL. Default
                   off; link NCCL (2.18 or later).
     FT_MALLOC(n), FT_FREE(p)   host memory and the CPU device's storage. Default malloc and free.
                   Called by many threads at once; NULL from FT_MALLOC becomes FT_ERR_OOM, and
                   FT_FREE takes NULL.
     FT_API        linkage of public functions. Default: extern "C" where C++ is in use.

   ENVIRONMENT
     FT_CPU_ASYNC=1   every stream of a CPU rank becomes a thread of its own. Slower; it makes a
                      missing ft_stream_wait visible, as a GPU would. Default off: work runs at
                      once.
     FT_ALLOCATOR=system|caching   what FT_ALLOC_DEFAULT means; see >>memory. Default:
                      system on the CPU, caching on a GPU.
     FT_DELAY_US=N    sleep up to N microseconds, at random, before every collective and every copy.
                      For tests of the same kind. Default 0.

   CONCEPTS
     context   Everything a rank owns hangs off one ft_ctx; ending the context ends all of it. Error
               paths therefore need no clean-up: return the status, and the launch frees the rest.
     device    `cpu` stores and computes. `meta` runs the same program with no storage and no
               kernels: every allocation, free and collective is counted and nothing else happens.
               The peak of a meta run is the peak of the real run, to the byte and per tag, because
               both are made by the same sequence of calls.
               FT_GPU, in a build with FT_CUDA, is an NVIDIA GPU that any number of ranks may share:
               the same calls in the same order, so the same plan (made with plan_for = FT_GPU, as
               kernels' workspace differs).
     stream    Work is queued on a stream and runs in its order; two streams are ordered only by
               events. The host runs ahead: a function returning FT_OK means "queued and valid".
     tag       Each allocation says what it is for: param grad optim act gather comm workspace
               other.
     tape      Ops run eagerly and leave a node behind; a tape belongs to one micro-batch.
     segment   A stretch of a tape (one layer) in which saved tensors may be dropped and rebuilt.
     timeline  With config.timeline a context keeps events (each allocation and free), spans
               (stretches of the program that it names) and works (what each stream did), with
               their times: femtotron_io.h makes reports and traces from them.

   OWNERSHIP, THREADS, ERRORS
     A tensor that an op returns is a handle. ft_tensor_free() says that *the caller* will not use
     it again; its storage goes as soon as no backward needs it. Handles recorded on a tape die with
     it. A context belongs to one thread. Nothing here exits, prints, or changes a request silently.
     Fallible functions return ft_status; ft_last_error() has the sentence, for the calling thread.

   LETTERS  B batch, T tokens of a sequence, C hidden, H query heads, K kv heads, D head size,
            F feed-forward, V vocabulary, R ranks of a group. [B,T,C] is row-major, C contiguous.

   License: MIT, see LICENSE. */

/* The implementation uses POSIX clocks and threads; -std=c11 hides them unless asked. */
#if (defined(FEMTOTRON_IMPLEMENTATION) || defined(FEMTOTRON_CORE_IMPLEMENTATION)) && \
    defined(__STRICT_ANSI__) && !defined(_POSIX_C_SOURCE) && !defined(_XOPEN_SOURCE) && \
    !defined(_GNU_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif

#ifndef FEMTOTRON_H
#define FEMTOTRON_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifndef FT_API
#ifdef __cplusplus
#define FT_API extern "C"
#else
#define FT_API extern
#endif
#endif

/* ------------------------------------------------------------------------------------ >>status */

typedef enum ft_status {
    FT_OK = 0,
    FT_ERR_ARG,         /* a value out of its range, or a NULL where something must be */
    FT_ERR_SHAPE,       /* shapes or dtypes that do not fit together */
    FT_ERR_STATE,       /* right call, wrong time: not gathered, freed, overwritten, no tape */
    FT_ERR_DATA,        /* a value inside a tensor or file that cannot be: a label >= V */
    FT_ERR_OOM,         /* memory, or the limit given at launch, is exhausted */
    FT_ERR_IO,          /* a file or directory */
    FT_ERR_COMM,        /* ranks disagree about a collective */
    FT_ERR_PEER,        /* another rank failed; the message names it */
    FT_ERR_TIMEOUT,     /* a peer did not arrive in time */
    FT_ERR_UNSUPPORTED  /* refused: the message says why and what to do */
} ft_status;

FT_API const char *ft_status_name(ft_status status);
/* "ok", "bad argument", ...; never NULL. */

FT_API const char *ft_last_error(void);
/* The calling thread's latest error: what, where, which rank, which sizes, what to do. "" if none.
   Valid until the next error in this thread. */

FT_API ft_status ft_error(ft_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
/* Sets the calling thread's error text and returns `status`: `return ft_error(FT_ERR_ARG, ...)`. */

#define FT_TRY(call)                                                                               \
    do {                                                                                           \
        ft_status ft__try_status = (call);                                                         \
        if (ft__try_status != FT_OK) return ft__try_status;                                        \
    } while (0)

/* ------------------------------------------------------------------------------------ >>launch */

typedef struct ft_ctx ft_ctx;

typedef enum ft_device { FT_CPU = 0, FT_META, FT_GPU } ft_device; /* FT_GPU: built with FT_CUDA */

typedef enum ft_transport {
    FT_TRANSPORT_LOCAL = 0, /* copies and kernels within a process; any number of ranks a GPU */
    FT_TRANSPORT_NCCL       /* one rank a GPU; built with FT_NCCL */
} ft_transport;

typedef enum ft_switch { FT_DEFAULT = 0, FT_ON, FT_OFF } ft_switch;

typedef enum ft_allocator { /* how storage is served; see >>memory */
    FT_ALLOC_DEFAULT = 0, FT_ALLOC_SYSTEM, FT_ALLOC_CACHING, FT_ALLOC_ARENA
} ft_allocator;

typedef struct ft_mem_plan ft_mem_plan;

typedef struct ft_config {
    int world;            /* ranks; 0 means 1 */
    ft_device device;     /* FT_CPU, FT_META or FT_GPU */
    ft_device plan_for;   /* meta: whose workspace to count, FT_CPU (default) or FT_GPU */
    int only_rank;        /* meta: run this rank alone; -1 (ft_config_default) runs every rank */
    int gpus;             /* FT_GPU: how many to use; 0: all that are visible */
    int ranks_per_gpu;    /* FT_GPU: the most ranks that share one; 0: as many as it takes */
    ft_transport transport; /* FT_GPU: who carries the traffic of ft_launch's ranks */
    const char *gemm_table; /* FT_GPU: a file of GEMM algorithms by chip, library version and shape.
                             Shapes that it lacks are timed once and added, so that later runs take
                             the same and give the same bits. NULL: cuBLASLt's first advice */
    size_t memory_limit;  /* bytes of device memory per rank, accounted; 0: no limit */
    ft_allocator allocator; /* FT_ALLOC_DEFAULT asks FT_ALLOCATOR */
    ft_mem_plan *mem_plan;  /* meta: records allocations here, unless it is placed already;
                               FT_ALLOC_ARENA: places them so. NULL: none */
    int timeline;         /* 1: keep allocations, frees (56 bytes each) and spans */
    ft_switch async;      /* threads for streams; FT_DEFAULT asks FT_CPU_ASYNC */
    int delay_us;         /* random delay before collectives and copies; 0 asks FT_DELAY_US */
    double timeout_s;     /* how long a collective waits for its peers; 0 means 120 */
    struct ft__probe *probe; /* private: NULL (ft_sac_fit's measurements) */
} ft_config;

FT_API ft_config ft_config_default(void);
/* One rank on the CPU, only_rank -1, all else 0. */

typedef ft_status (*ft_rank_fn)(ft_ctx *ctx, void *user);

FT_API ft_status ft_launch(const ft_config *config, ft_rank_fn fn, void *user);
/* Runs fn(ctx, user) once for each rank, each in a thread of its own, and returns when all ended.
   The status and message of the rank that failed first become the caller's, after "rank N: ". A
   rank that fails wakes its peers, whose pending and later collectives return FT_ERR_PEER naming
   it. An error of a stream's work fails its rank, whatever fn returns. On meta ranks never wait for
   each other: a few threads run them in turn, and of those that fail the lowest is reported.
   Streams are drained and all that a context owns is freed before the return. */

FT_API ft_status ft_launch_env(const ft_config *config, ft_rank_fn fn, void *user);
/* This process is one rank of many: torchrun, mpirun or srun started them, and their variables say
   which and of how many (RANK WORLD_SIZE LOCAL_RANK; OMPI_COMM_WORLD_RANK ...; PMI_RANK ...;
   SLURM_PROCID SLURM_STEP_NUM_TASKS ...). config.device is FT_GPU, the GPU is that of the local
   rank, NCCL carries the traffic. The processes meet at NCCL_COMM_ID=host:port, a free port of rank
   0's host; where it is not set, at the port after MASTER_PORT of MASTER_ADDR, or, all on one host,
   at 127.0.0.1:29517. Returns when this rank has ended, as ft_launch does; NCCL_COMM_ID is then
   unset, and remembered: the processes may launch again, all of them as often. Collectives that do
   not end within config.timeout_s fail the rank, with a line that names operation, group and sizes.
   FT_ERR_ARG where no launcher's variables are set. */
FT_API int ft_env_rank(void);
FT_API int ft_env_local_rank(void);
/* The rank that such variables give this process, and its rank among those of its host; -1 where
   there are none. */

FT_API ft_status ft_gpu_count(int *gpus);
/* How many GPUs are visible; 0 in a build without FT_CUDA, or where there is no driver. */
#define FT_GPU_NAME_BYTES 256
FT_API ft_status ft_gpu_name(int gpu, char name[FT_GPU_NAME_BYTES]);
/* What the driver calls it: "NVIDIA H200". */
FT_API ft_status ft_gpu_memory(int gpu, size_t *free_bytes, size_t *total_bytes);
/* Its memory, and what of it nobody uses now. */

FT_API int ft_rank(const ft_ctx *ctx);
FT_API int ft_world(const ft_ctx *ctx);
FT_API ft_device ft_ctx_device(const ft_ctx *ctx);
/* This rank, how many there are, and what they run on. */
FT_API int ft_ctx_gpu(const ft_ctx *ctx);
/* The number of the GPU that this rank runs on, as ft_gpu_name and ft_gpu_memory count them in this
   process; -1 on another device. */

FT_API void *ft_host_alloc(ft_ctx *ctx, size_t bytes);
/* Zeroed host memory owned by the context; NULL with an error set when there is none. */
FT_API void ft_host_free(ft_ctx *ctx, void *memory);
/* Gives it back before the context ends. NULL is allowed. */

/* ----------------------------------------------------------------------------------- >>streams */

typedef struct ft_stream ft_stream;

typedef enum ft_stream_kind {
    FT_STREAM_COMPUTE = 0, /* every op */
    FT_STREAM_GATHER,      /* parameters on their way in */
    FT_STREAM_REDUCE,      /* gradients on their way out */
    FT_STREAM_PIPE,        /* what pipeline stages pass on, beside compute (ft_pp_config.overlap) */
    FT_STREAM_COUNT
} ft_stream_kind;

typedef struct ft_event { /* a point in a stream's order; a plain value, nothing to free */
    ft_stream *stream;
    uint64_t sequence;
} ft_event;

FT_API ft_stream *ft_stream_get(ft_ctx *ctx, ft_stream_kind kind);
/* The rank's stream of that kind; NULL with an error set for a kind that does not exist. */
FT_API ft_event ft_event_record(ft_stream *stream);
/* The point after all work queued so far. */
FT_API ft_status ft_stream_wait(ft_stream *stream, ft_event event);
/* Work queued on `stream` from now on starts after `event`. Never blocks the host. An event of the
   same stream, or a zeroed one, is a no-op. */
FT_API ft_status ft_stream_sync(ft_stream *stream);
/* Blocks the host until the stream is empty; returns the first error of its work. */
FT_API ft_status ft_sync(ft_ctx *ctx);
/* The same for all streams of the rank. */

typedef ft_status (*ft_task_fn)(void *arg);
FT_API ft_status ft_stream_run(ft_stream *stream, ft_task_fn fn, const void *arg, size_t arg_bytes);
/* Queues fn on a copy of arg. Not called on meta. An error it returns sticks to the stream. On
   FT_GPU fn runs on the host at once, and is to launch its work on ft_stream_native(stream). */
FT_API void *ft_stream_native(ft_stream *stream);
/* The cudaStream_t on FT_GPU, NULL elsewhere. */

/* ------------------------------------------------------------------------------------ >>memory */

typedef enum ft_tag {
    FT_TAG_PARAM = 0, FT_TAG_GRAD, FT_TAG_OPTIM, FT_TAG_ACT, FT_TAG_GATHER, FT_TAG_COMM,
    FT_TAG_WORKSPACE, FT_TAG_OTHER, FT_TAG_COUNT
} ft_tag;

FT_API const char *ft_tag_name(ft_tag tag);
/* "param", "grad", ...; "?" for any other value. */

#define FT_ALIGN_BYTES 256 /* every allocation counts, and is placed, in multiples of this */

FT_API size_t ft_accounted_bytes(size_t bytes);
/* `bytes` rounded up to FT_ALIGN_BYTES: what an allocation of `bytes` adds to its tag. */

typedef struct ft_mem_stats {
    size_t live_bytes, peak_bytes;
    size_t reserved_bytes;         /* the most that caching or arena held of the device; else 0 */
    size_t live[FT_TAG_COUNT];     /* by tag, now */
    size_t at_peak[FT_TAG_COUNT];  /* by tag, at the moment of peak_bytes: they add up to it */
    size_t highest[FT_TAG_COUNT];  /* each tag's own highest, at whatever moment */
    int64_t peak_moment;           /* index of the allocation that made the peak */
    char peak_where[96];           /* what ran then: "backward swiglu in layer.3" */
    char peak_action[48];          /* in which span: "backward of micro-batch 2" */
    /* The same without workspace, which belongs to a backend: what can be compared across devices.
       The two peaks may fall at different moments. */
    size_t tensor_peak_bytes;      /* the most that all tags but workspace had together */
    size_t at_tensor_peak[FT_TAG_COUNT]; /* by tag then: they add up to it; workspace is 0 here */
    char tensor_peak_where[96], tensor_peak_action[48];
} ft_mem_stats;

FT_API void ft_mem_get(const ft_ctx *ctx, ft_mem_stats *stats);
/* The books as they stand, in the order of the program: no synchronisation. */
FT_API void ft_mem_reset_peak(ft_ctx *ctx);
/* Both peaks become what is live now. */

typedef struct ft_mem_event {
    int64_t delta_bytes;    /* accounted: + an allocation, - a free */
    size_t live_bytes;      /* of the rank, after it */
    size_t request_bytes;   /* as asked for, before rounding */
    double time_s;          /* of the host, since the rank began */
    ft_tag tag;
    int segment;            /* ordinal of the open segment, -1 outside */
    const char *op;         /* the op, verb or unit at work; a static or context-owned string */
    const char *phase;      /* "forward", "backward", "replay", "" */
} ft_mem_event;

FT_API int64_t ft_mem_timeline(const ft_ctx *ctx, const ft_mem_event **events);
/* The events kept since launch (config.timeline); their number is returned, 0 when off. */
FT_API void ft_mem_timeline_clear(ft_ctx *ctx);
/* Forgets events, spans and works so far: to keep the last step alone. Open spans begin here. With
   config.timeline the host waits: on FT_GPU for the compute stream, as the device's clock is set by
   the host's; with FT_CPU_ASYNC for all streams, whose threads may be writing works. */

typedef struct ft_span { /* a stretch of the program: a pipeline's action, the optimizer's step */
    const char *name;
    int micro_batch, chunk;          /* -1: none */
    double begin_s, end_s;           /* of the host, since the rank began */
    int64_t begin_event, end_event;  /* events of the timeline before its begin, before its end */
} ft_span;

FT_API ft_status ft_span_begin(ft_ctx *ctx, const char *name, int micro_batch, int chunk);
FT_API void ft_span_end(ft_ctx *ctx);
/* What the program does from here to there. The innermost one (of at most 8) says where a peak was;
   all are kept with config.timeline. `name` is a static string. On a stream the work may end
   later: a span is the time of the host, which on the CPU without FT_CPU_ASYNC is the same. */
FT_API int64_t ft_spans(const ft_ctx *ctx, const ft_span **spans);
/* Those that have ended, in the order of their ends; their number is returned. */

typedef struct ft_work { /* what a stream did: one kernel of the op table, or a collective */
    const char *name;       /* the op's or the collective's */
    const char *phase;      /* of an op "forward", "backward", "replay"; "" outside a tape's */
    char group[24];         /* of a collective; "" of an op */
    ft_stream_kind stream;
    double begin_s, end_s;  /* since the rank began; on FT_GPU as the device ran it */
} ft_work;

FT_API ft_status ft_works(ft_ctx *ctx, const ft_work **works, int64_t *n);
/* With config.timeline, all work since ft_mem_timeline_clear, in the order of queueing; without it,
   and on meta, none. Waits for all streams. A work begins when its stream comes to it, so a
   collective's time has the wait for its peers in it. On FT_GPU two CUDA events a work tell the
   time. The array is the context's, and good until the next call. 160 bytes of host memory a work,
   kept. */

/* Where the bytes come from. What is live, and when, is the program's doing and the same in all
   three; so are results.
     system    each allocation from the system, and back. The CPU's default: sanitizers see every
               byte.
     caching   from big chunks that are kept, best fit. A block that was freed remembers on which
               stream it was used last, and an event after that use; on another stream the next
               owner's work waits for the event, and the host for nothing. Where a block lies
               depends on the sequence of calls alone. For programs whose shapes vary.
     arena     one allocation, in which every buffer has had its place since before the run: a run
               of the same program on meta says what will be asked for and when it will be freed
               (config.mem_plan), and ft_mem_plan_place finds the offsets. Fixed addresses; held
               bytes within a few percent of the peak.
   An arena's program says where its repeating parts begin and end (ft_mem_phase_begin, _end):
   "step", "eval". What comes before the first phase is the set-up; what that leaves live stays
   where it is, and phases share the rest, because they run one at a time. Each phase needs to be
   recorded once, however often it runs. Outside phases, after the set-up, the caching allocator
   serves.

     ft_mem_plan_create(world, &plan);
     config.device = FT_META; config.mem_plan = plan; ft_launch(&config, program, user);
     ft_mem_plan_place(plan);
     config.device = FT_CPU; config.allocator = FT_ALLOC_ARENA;
     ft_launch(&config, program, user); */

FT_API ft_status ft_mem_phase_begin(ft_ctx *ctx, const char *name);
FT_API ft_status ft_mem_phase_end(ft_ctx *ctx);
/* A part of the program that repeats: it frees all that it allocates and nothing else, which is
   checked where a plan is recorded or used. Phases do not nest. With a plan, the k-th allocation of
   a phase is the k-th that was recorded, of the same size: FT_ERR_STATE otherwise, naming both. */

FT_API ft_status ft_mem_plan_create(int world, ft_mem_plan **out);
FT_API void ft_mem_plan_free(ft_mem_plan *plan);
/* After the launches that use it. NULL is allowed. Host memory: 64 to 128 bytes an allocation
   and rank, ranks that are alike counted once after placing. */
FT_API ft_status ft_mem_plan_place(ft_mem_plan *plan);
/* After a launch on meta that recorded: finds an offset for every allocation. Dynamic storage
   allocation is NP-hard (Garey and Johnson 1979, SR2); this places by best or first fit in several
   orders (Sekiyama et al. 2018, "Profile-guided memory optimization for deep neural networks") and
   keeps the lowest top. n log n, and c log c for each of n, c the buffers that live meanwhile. */

typedef struct ft_mem_plan_info { /* of a rank; all 0 if it was not recorded */
    size_t peak_bytes;       /* the most that is live at once */
    size_t reserved_bytes;   /* what the arena takes: reserved / peak - 1 is fragmentation */
    size_t persistent_bytes; /* what the set-up leaves live */
    int64_t allocations;     /* recorded ones: the set-up's, and each phase's once */
    int phases;              /* the set-up not counted */
} ft_mem_plan_info;

FT_API ft_status ft_mem_plan_get(const ft_mem_plan *plan, int rank, ft_mem_plan_info *info);
/* FT_ERR_STATE before ft_mem_plan_place. */

/* ----------------------------------------------------------------------------------- >>tensors */

typedef enum ft_dtype { FT_F32 = 0, FT_BF16, FT_I32, FT_DTYPE_COUNT } ft_dtype;

FT_API size_t ft_dtype_bytes(ft_dtype dtype);
FT_API const char *ft_dtype_name(ft_dtype dtype);
/* Bytes of an element; "fp32", "bf16", "int32". */
FT_API uint16_t ft_bf16_from_f32(float value);
/* Round to nearest, ties to even; NaN stays NaN. */
FT_API float ft_f32_from_bf16(uint16_t bits);
/* Exact. */

#define FT_MAX_DIMS 6

typedef struct ft_storage ft_storage;
typedef struct ft_tensor ft_tensor;
typedef struct ft_tape ft_tape;

/* Where the gradient of a parameter goes. `get` gives the buffer for the parameter's gradient, and
   *accumulate = 0 if this is the first contribution (the buffer may hold anything). */
typedef struct ft_grad_sink {
    ft_status (*get)(void *user, ft_tensor *param, ft_tensor **grad, int *accumulate);
    void *user;
} ft_grad_sink;

struct ft_tensor {
    /* To read. */
    ft_dtype dtype;
    int ndim;
    int64_t shape[FT_MAX_DIMS];
    int requires_grad;
    const char *name;          /* may be NULL; of parameters it appears in messages */
    /* To set, on a tensor of one's own, before it is used in an op. */
    ft_grad_sink sink;         /* sink.get == NULL: the gradient collects in ->grad */
    ft_tensor *grad;           /* after backward, for tensors with requires_grad and no producer */
    /* Private. */
    ft_ctx *ctx;
    ft_storage *storage;       /* NULL while dropped, freed, or not gathered */
    ft_tensor *base;           /* a view's tensor, NULL otherwise */
    int64_t offset_elems;      /* of a view in its base */
    ft_tape *tape;             /* that recorded it, NULL for a tensor of one's own */
    int producer;              /* node on the tape, -1 for a leaf */
    int out_index;             /* which output of that node */
    int held;                  /* the caller's handle is alive */
    int keep;                  /* 0: dropped when not held, rebuilt on demand */
    int consumed;              /* an in-place op took its storage */
    int need;                  /* backwards and replays to come that read it */
    int uses;                  /* nodes that refer to it, for a tensor of one's own */
    int in_segment;            /* made in the open segment */
    uint64_t version;          /* how often it was written from outside the tape */
    ft_tensor *prev, *next;    /* the context's list */
};

FT_API int64_t ft_numel(const ft_tensor *tensor);
FT_API size_t ft_bytes(const ft_tensor *tensor);
/* Elements, and the bytes they take; whether it has storage or not. */

FT_API ft_status ft_tensor_create(ft_ctx *ctx, ft_tensor **out, ft_dtype dtype, int ndim,
                                  const int64_t *shape, ft_tag tag);
/* A tensor of one's own, storage uninitialised. Dimensions must be positive. Freed by
   ft_tensor_free or with the context. */
FT_API ft_status ft_tensor_empty(ft_ctx *ctx, ft_tensor **out, ft_dtype dtype, int ndim,
                                 const int64_t *shape);
/* The same without storage: for bases whose storage comes and goes (ft_tensor_attach). */
FT_API ft_status ft_tensor_view(ft_tensor *base, ft_tensor **out, int64_t offset_elems, int ndim,
                                const int64_t *shape);
/* A contiguous part of base under a shape of its own. No memory. It has storage whenever base has;
   base must outlive it. A view of a recorded tensor is for ft_op_run and collectives alone. */
FT_API ft_status ft_tensor_bind(ft_tensor *tensor, ft_tensor *base, int64_t offset_elems);
/* Makes a tensor that has no storage a view of base: for handles given out before the base is
   made. */
FT_API ft_status ft_tensor_attach(ft_tensor *tensor, ft_tag tag, ft_stream *home);
/* Allocates storage for a tensor that has none, to be used first on stream `home`. */
FT_API ft_status ft_tensor_detach(ft_tensor *tensor, ft_stream *last);
/* Frees the storage and keeps the tensor. Memory goes back after the work now queued on `last`. */
FT_API int ft_tensor_present(const ft_tensor *tensor);
/* 1 if it has storage now (on meta too). */
FT_API int ft_tensor_need(const ft_tensor *tensor);
/* How many backwards and replays that are still to come will read it, or, of a base, its views. */
FT_API void ft_tensor_free(ft_tensor *tensor);
/* The caller will not use this handle again. NULL is allowed. */
FT_API void *ft_data(const ft_tensor *tensor);
/* Address of element 0 in device memory; NULL on meta or when not present. Synchronise first. */

FT_API ft_status ft_upload(ft_tensor *tensor, const void *host);
/* Copies ft_bytes(tensor) from host memory, on the compute stream; `host` may be reused at once. */
FT_API ft_status ft_download(const ft_tensor *tensor, void *host);
/* Synchronises the compute stream, then copies to host memory. Zeros on meta. */
FT_API ft_status ft_fill(ft_tensor *tensor, double value, ft_stream *stream);
/* Every element = value, rounded to the dtype. */
FT_API ft_status ft_copy(ft_tensor *to, const ft_tensor *from, ft_stream *stream);
/* Same number of elements; converts between fp32 and bf16. */
FT_API ft_status ft_accumulate(ft_tensor *to, const ft_tensor *from, ft_stream *stream);
/* to += from; same number of elements, fp32 or bf16 each; added in fp32 and rounded once. */
FT_API ft_status ft_matmul(ft_tensor *c, const ft_tensor *a, int transpose_a, const ft_tensor *b,
                           int transpose_b, int accumulate, ft_stream *stream);
/* c[m,n] = or += A B, unrecorded, for composite ops. A [m,k] is a, or a^T from a[k,m]; B [k,n] is
   b, or b^T from b[n,k]. a, b, c have two dimensions or more: leading ones count as rows. fp32 or
   bf16 each, products summed in fp32 and rounded once. 2 m n k flops; GEMM workspace. */

/* ------------------------------------------------------------------------------------ >>groups */

typedef struct ft_group ft_group;

typedef enum ft_collective {
    FT_ALL_GATHER = 0, FT_REDUCE_SCATTER, FT_ALL_REDUCE, FT_BROADCAST, FT_SEND, FT_BARRIER,
    FT_COLLECTIVE_COUNT
} ft_collective;

FT_API const char *ft_collective_name(ft_collective kind);
/* "all-gather", ...; "?" for any other value. */

FT_API ft_status ft_group_create(ft_ctx *ctx, const char *name, int n, const int *ranks,
                                 ft_group **out);
/* A communicator of `n` ranks (of the world, ascending, this rank among them). Every member calls
   it with the same name and ranks. Two groups over the same ranks are independent: give traffic on
   different streams groups of its own. Owned by the context. */
FT_API ft_status ft_group_strided(ft_ctx *ctx, const char *name, int first, int stride, int n,
                                  ft_group **out);
/* The same for ranks first, first + stride, ...: 0, 1, ft_world(ctx) is the whole world. */
FT_API int ft_group_size(const ft_group *group);
FT_API int ft_group_rank(const ft_group *group);
FT_API const char *ft_group_name(const ft_group *group);
/* R, this rank's place in 0..R-1, and the name it was made with. */

typedef enum ft_axis { FT_AXIS_DP = 0, FT_AXIS_TP, FT_AXIS_PP, FT_AXIS_COUNT } ft_axis;

typedef struct ft_mesh { /* rank = (pp * n_dp + dp) * n_tp + tp: tp neighbours are adjacent */
    int size[FT_AXIS_COUNT];
    int coord[FT_AXIS_COUNT];
} ft_mesh;

FT_API ft_status ft_mesh_create(ft_ctx *ctx, int dp, int tp, int pp, ft_mesh *mesh);
/* Fails unless dp * tp * pp is the world. */
FT_API ft_status ft_mesh_group(ft_ctx *ctx, const ft_mesh *mesh, ft_axis axis, const char *name,
                               ft_group **out);
/* The ranks that differ from this one in `axis` only. */

/* Collectives. All run on `stream`, in the stream's order; all members must queue the same sequence
   with the same sizes and dtypes: otherwise every member gets FT_ERR_COMM naming ranks and sizes. A
   collective is over on a stream only when the peers have read this rank's buffers. Sums add in
   rank order in fp32 and round once to the dtype. (Over NCCL sums are its own, which agree to the
   bit for two ranks, and a disagreement is told later, by a watchdog or where a stream is waited
   for: of kinds and sizes that are new to the group's members, at once; of others at the group's
   next 256th call, or in FT_ERR_TIMEOUT where NCCL hangs and nothing moves on any group. Telling it
   takes a gather of 32 bytes a member before such a call, which `sent` leaves out.) `sent` = bytes
   this rank puts on the wire, with N = bytes of the whole tensor; it is counted per group and
   kind. */
FT_API ft_status ft_all_gather(ft_group *group, ft_stream *stream, const ft_tensor *shard,
                               ft_tensor *full);
/* full[R * n] = the members' shard[n] in group order. In place if shard is a view of full at this
   rank's offset. Sent: N (R-1)/R. */
FT_API ft_status ft_reduce_scatter(ft_group *group, ft_stream *stream, const ft_tensor *full,
                                   ft_tensor *shard);
/* shard[n] = this rank's n of the sum of the members' full[R * n]. In place likewise; the rest of
   full keeps its values. Sent: N (R-1)/R. */
FT_API ft_status ft_all_reduce(ft_group *group, ft_stream *stream, ft_tensor *tensor);
/* In place; a reduce-scatter and an all-gather of chunks. Sent: 2 N (R-1)/R; where R does not
   divide the elements, the first (elements mod R) ranks own a longer chunk, and each sends 2 (N -
   own). */
FT_API ft_status ft_broadcast(ft_group *group, ft_stream *stream, ft_tensor *tensor, int root);
/* In place. Sent: N (R-1) by the root (group rank), 0 by others. */
FT_API ft_status ft_barrier(ft_group *group, ft_stream *stream);
/* Later work of `stream` starts when all members have come here. Sent: nothing. */

typedef struct ft_p2p {
    int peer;            /* rank in the group */
    int is_send;
    ft_tensor *tensor;
} ft_p2p;

FT_API ft_status ft_exchange(ft_group *group, ft_stream *stream, int n, const ft_p2p *ops);
/* Sends and receives as one: none waits for another, so that no order of ops deadlocks. Between two
   ranks messages match in order. A send counts as one call; sent: N, to oneself 0. Over NCCL only
   the receiver is told of another size, and only where that is new between the two: where it wants
   more than is sent, after most of timeout_s. Where a size that is new is sent to one who wants a
   smaller, known one, the receiver takes 32 bytes of an announcement for data, and the sender ends
   in FT_ERR_TIMEOUT; two sizes that were both seen before are not compared. */

FT_API ft_status ft_agree(ft_group *group, const char *what, uint64_t value);
/* Host-side check: FT_ERR_COMM on every member, naming ranks and values, unless all pass the same
   value. Synchronises the host. Always FT_OK on meta. */

typedef struct ft_traffic {
    const char *group;
    int64_t calls[FT_COLLECTIVE_COUNT];
    int64_t sent_bytes[FT_COLLECTIVE_COUNT];
} ft_traffic;

FT_API int ft_traffic_get(const ft_ctx *ctx, int max, ft_traffic *out);
/* Fills up to `max` rows, one for each group of this rank, and returns how many groups there
   are. */

/* ----------------------------------------------------------------------------------- >>optable */

#define FT_OP_MAX_IN 8
#define FT_OP_MAX_OUT 4
#define FT_IN(i) (1u << (i))         /* in masks: input i */
#define FT_OUT(i) (1u << (16 + (i))) /* in masks: output i */

typedef struct ft_attr { /* an op's constants; what each means is the op's affair */
    int64_t i[6];
    double f[4];
    const void *user; /* must outlive the tape */
} ft_attr;

typedef struct ft_view { /* a tensor as a kernel sees it */
    int present;         /* 0: not given, or not asked for */
    ft_dtype dtype;
    int ndim;
    int64_t shape[FT_MAX_DIMS];
    void *data;
} ft_view;

typedef struct ft_op ft_op;

typedef struct ft_op_call {
    const ft_op *op;
    ft_attr attr;
    int backward;          /* 0 forward or replay, 1 backward */
    int deferred;          /* backward of an FT_OP_DEFERRED op whose forward has not run */
    ft_view in[FT_OP_MAX_IN], out[FT_OP_MAX_OUT];
    ft_view dout[FT_OP_MAX_OUT];  /* backward: gradients of the outputs; absent means zero */
    ft_view din[FT_OP_MAX_IN];    /* backward: gradients wanted; absent ones are not computed */
    int accumulate[FT_OP_MAX_IN]; /* 1: din[i] += contribution, 0: din[i] = contribution */
    size_t scratch_bytes, workspace_bytes;
    void *scratch, *workspace;    /* uninitialised; bytes as the row's `scratch` asked for */
    ft_device device;             /* FT_CPU or FT_GPU: whose kernel this call is, or is to be */
    ft_ctx *ctx;
    void *stream;                 /* FT_GPU: the cudaStream_t to launch on */
    uint64_t *fault;              /* FT_GPU: see >>gpu */
} ft_op_call;

typedef struct ft_gpu_kernels {
    ft_status (*forward)(const ft_op_call *call);
    ft_status (*backward)(const ft_op_call *call);
    ft_status (*replay)(const ft_op_call *call);
} ft_gpu_kernels;

enum { /* ft_op.flags */
    FT_OP_INPLACE = 1,         /* output 0 takes over the storage of input 0, which is then gone */
    FT_OP_DEFERRED = 2,        /* on a tape forward waits until the output is read, or until
                                  backward, which then computes both in one pass */
    FT_OP_GRAD_OVER_IN = 4,    /* din[0] may be written over in[0] */
    FT_OP_GRAD_OVER_DOUT = 8,  /* din[0] may be written over dout[0] */
    FT_OP_GRAD_SAME_01 = 16,   /* the gradient of input 1 equals that of input 0: one buffer */
    FT_OP_GRAD_PASS = 32,      /* the gradient of each input is dout[0] itself: no kernel */
    FT_OP_SPLIT = 64           /* the gradients of parameters are worth putting off to
                                  ft_backward_weights: a GEMM of their own */
};

struct ft_op {
    const char *name;
    int n_in, n_out;
    unsigned optional;              /* FT_IN mask: inputs that may be NULL */
    unsigned grads;                 /* FT_IN mask: inputs that can receive a gradient */
    unsigned accumulates;           /* FT_IN mask: inputs for which backward obeys accumulate[i];
                                       for the others the tape adds through a temporary */
    unsigned saves[FT_OP_MAX_IN];   /* FT_IN | FT_OUT mask of what the kernel of din[i] reads */
    unsigned cheap;                 /* FT_OUT mask: outputs that SAC `selective` drops */
    unsigned replay_from;           /* FT_IN | FT_OUT mask: `replay` reads only these, and rebuilds
                                       the outputs outside the mask */
    unsigned flags;
    /* Checks in[] and attr; sets dtype, ndim, shape of every out[] (present = 0: no such output in
       this call). Errors name the op and the shapes. Runs on the host, before any allocation. */
    ft_status (*infer)(ft_op_call *call);
    /* Floating-point operations and bytes moved by forward (also those of a replay). */
    void (*cost)(const ft_op_call *call, double *flops, double *bytes);
    /* Scratch of a phase: call->backward says which; sets scratch_bytes (tag act: part of the
       algorithm) and workspace_bytes (tag workspace: the backend's). NULL: none. */
    void (*scratch)(ft_op_call *call);
    /* Kernels. They see memory only through the call and run on the stream. */
    ft_status (*forward)(const ft_op_call *call);
    ft_status (*backward)(const ft_op_call *call);
    ft_status (*replay)(const ft_op_call *call);
    /* Composite ops: called on the host instead of the kernels, on meta too. They queue work
       themselves (collectives, ft_op_run) on tensors in[], out[], dout[], din[]. */
    ft_status (*forward_host)(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in, ft_tensor **out);
    ft_status (*backward_host)(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in, ft_tensor **out,
                               ft_tensor **dout, ft_tensor **din);
    /* The same kernels for FT_GPU, where data is device memory: each launches on call->stream and
       returns. A row without them cannot run there: FT_ERR_UNSUPPORTED. */
    ft_gpu_kernels gpu;
};

FT_API ft_op ft_op_default(void);
/* All zero, to be filled in. */
FT_API ft_status ft_op_register(ft_ctx *ctx, const ft_op *row);
/* Checks the row (masks within n_in and n_out, kernels present where grads ask for them) and admits
   it to this context. The row must outlive the context. Registering it again is fine. */
FT_API ft_status ft_apply(ft_ctx *ctx, const ft_op *row, ft_tensor *const *in, const ft_attr *attr,
                          ft_tensor **out);
/* Runs an op forward and, while a tape records, records it there, also where no input requires a
   gradient (its outputs then belong to the tape, and backward passes it by). in[n_in] (NULL for
   absent optional ones), out[n_out] is filled. attr may be NULL. */
FT_API ft_status ft_op_run(ft_stream *stream, const ft_op *row, ft_tensor *const *in,
                           ft_tensor *const *out, const ft_attr *attr);
/* Runs an op's forward kernel into tensors that exist, on any stream, unrecorded. Optimizers and
   other in-place updates are ops of this kind: an output may be one of the inputs. */

/* --------------------------------------------------------------------------------------- >>ops */

/* Every op: inputs are fp32 or all bf16 (computed in fp32), indices are int32, statistics fp32.
   Outputs are new tensors unless "in place" is said. [...] stands for any leading dimensions,
   N for their product. "Saved" is what a tape keeps for backward. */

FT_API ft_status ft_embedding(ft_ctx *ctx, ft_tensor **y, ft_tensor *tokens, ft_tensor *table);
/* y[...,C] = table[tokens[...], :], table [V,C]. Saved: tokens. A token outside 0..V-1: FT_ERR_DATA
   naming its position. Gradient rows are summed in token order. */

FT_API ft_status ft_rmsnorm(ft_ctx *ctx, ft_tensor **y, ft_tensor *x, ft_tensor *w, double eps);
/* y[...,C] = x / sqrt(mean(x^2) + eps) * w[C] (Zhang and Sennrich 2019, eq. 4). Saved: x. */

FT_API ft_status ft_add_rmsnorm(ft_ctx *ctx, ft_tensor **sum, ft_tensor **y, ft_tensor *x,
                                ft_tensor *delta, ft_tensor *w, double eps);
/* sum = x + delta; y = rmsnorm(sum). Saved: sum. Replays y from sum alone. The gradients of x and
   delta are one buffer. */

FT_API ft_status ft_linear(ft_ctx *ctx, ft_tensor **y, ft_tensor *x, ft_tensor *w, ft_tensor *b);
/* y[...,O] = x[...,I] w[O,I]^T + b[O]; b may be NULL. 2 N O I flops. Saved: x if w has a gradient,
   w if x has one. */

typedef struct ft_rope_scaling { /* llama3 frequency scaling; factor 0 or 1: none */
    double factor, low_freq_factor, high_freq_factor;
    int64_t original_context;
} ft_rope_scaling;

FT_API ft_status ft_rope_table(ft_ctx *ctx, ft_tensor **table, int64_t T, int64_t D, double theta,
                               const ft_rope_scaling *scaling);
/* fp32 [T, D/2, 2] of (cos, sin)(t * f_i), f_i = theta^(-2i/D) (Su et al. 2021, eq. 15), scaled as
   Llama 3 does where asked. Tag other; a tensor of one's own. */

FT_API ft_status ft_rope(ft_ctx *ctx, ft_tensor **y, ft_tensor *qkv, ft_tensor *table, int64_t H,
                         int64_t K, int64_t D);
/* Rotates the H query and K key heads of packed qkv[B,T,(H+2K)*D], position = index in T; pairs are
   (i, i + D/2), the Hugging Face layout. In place: qkv is gone. Saved: nothing. */

FT_API ft_status ft_head_norm(ft_ctx *ctx, ft_tensor **y, ft_tensor *qkv, ft_tensor *wq,
                              ft_tensor *wk, int64_t H, int64_t K, int64_t D, double eps);
/* RMSNorm over D of each query head (wq[D]) and key head (wk[D]) of packed qkv; values pass.
   Saved: qkv. */

FT_API ft_status ft_attention(ft_ctx *ctx, ft_tensor **o, ft_tensor *qkv, int64_t H, int64_t K,
                              int64_t D);
/* Causal softmax(q k^T / sqrt(D)) v with grouped kv heads (query head h reads kv head h / (H/K)):
   o[B,T,H*D] from packed qkv[B,T,(H+2K)*D]. Streaming softmax (Milakov and Gimelshein 2018; Dao
   2023, alg. 1): no T x T matrix exists. Saved: qkv, o and the row log-sum-exp fp32 [B,H,T].
   Flops: 2 B H T^2 D forward (half of the square), 2.5 times that backward. */
FT_API ft_status ft_attention_docs(ft_ctx *ctx, ft_tensor **o, ft_tensor *qkv, ft_tensor *doc_start,
                                   int64_t H, int64_t K, int64_t D);
/* The same for rows of several documents: token t of row b attends to s with doc_start[b,t] <= s <=
   t, doc_start int32 [B,T] without a gradient, or NULL: ft_attention, to the bit, as is a doc_start
   of zeros. Each document gives what it gives alone in a row: RoPE (ft_rope) makes scores depend on
   distances only, so positions need not restart with a document. In a row doc_start must not
   decrease, and doc_start[b,t] be in 0..t: FT_ERR_DATA, naming the position (on FT_GPU at the next
   synchronisation). Saved: doc_start too. Keys before a document are skipped by blocks, while the
   flops counted are those of ft_attention: a cost knows shapes, not values. */

FT_API ft_status ft_swiglu(ft_ctx *ctx, ft_tensor **y, ft_tensor *gu);
/* y[...,F] = silu(gate) * up, packed gu[...,2F] = (gate, up) (Shazeer 2020, eq. 6). Saved: gu, over
   which backward writes the gradient. */

FT_API ft_status ft_linear_cross_entropy(ft_ctx *ctx, ft_tensor **loss, ft_tensor *x, ft_tensor *w,
                                         ft_tensor *labels, ft_tensor *scale, int64_t chunk_tokens);
/* loss fp32 [1] = scale * sum over tokens with label != -100 of -log softmax(x w^T)[label].
   x [...,C], w [V,C], labels int32 [...], scale fp32 [1] (no gradient) or NULL: 1 / (number of
   counted labels), 0 if none. Logits exist for chunk_tokens tokens at a time (0: 2048), in x's
   dtype: chunk * V elements of act. On a tape the forward is deferred to backward, which makes
   loss, dx and dw from one pass: 6 N V C flops, none recomputed; dx is written over x where no one
   else reads it. If the loss is read or used before, backward recomputes the logits. More than one
   chunk and a bf16 dw need an fp32 [V,C] accumulator (workspace).
   A label outside 0..V-1 and not -100: FT_ERR_DATA naming its position. */

FT_API ft_status ft_add(ft_ctx *ctx, ft_tensor **y, ft_tensor *a, ft_tensor *b);
/* y = a + b; b's shape is a's or a trailing part of it (then its gradient is summed). */
FT_API ft_status ft_add_inplace(ft_ctx *ctx, ft_tensor **y, ft_tensor *a, ft_tensor *b);
/* The same, same shapes only, written over a: a is gone. */
FT_API ft_status ft_mul(ft_ctx *ctx, ft_tensor **y, ft_tensor *a, ft_tensor *b);
/* y = a * b, shapes as ft_add. Saved: both. */
FT_API ft_status ft_scale(ft_ctx *ctx, ft_tensor **y, ft_tensor *x, double factor);
/* y = factor x. Saved: nothing. */
FT_API ft_status ft_gelu(ft_ctx *ctx, ft_tensor **y, ft_tensor *x);
/* x Phi(x), exact (Hendrycks and Gimpel 2016). Saved: x. */
FT_API ft_status ft_silu(ft_ctx *ctx, ft_tensor **y, ft_tensor *x);
/* x sigmoid(x). Saved: x. */
FT_API ft_status ft_softmax(ft_ctx *ctx, ft_tensor **y, ft_tensor *x);
/* Over the last dimension. Saved: y. */
FT_API ft_status ft_layer_norm(ft_ctx *ctx, ft_tensor **y, ft_tensor *x, ft_tensor *w, ft_tensor *b,
                               double eps);
/* (x - mean) / sqrt(var + eps) * w[C] + b[C] over the last dimension (Ba et al. 2016). Saved: x. */
FT_API ft_status ft_mean(ft_ctx *ctx, ft_tensor **y, ft_tensor *x);
/* fp32 [1]: the mean over all elements. */

/* -------------------------------------------------------------------------------------- >>tape */

FT_API ft_status ft_tape_create(ft_ctx *ctx, ft_tape **out);
/* An empty tape, owned by the context. */
FT_API void ft_tape_free(ft_tape *tape);
/* ft_tape_reset, and the tape itself goes, before its context does. NULL is allowed. */
FT_API ft_status ft_tape_begin(ft_tape *tape);
/* Ops of this context record here from now on. One tape records at a time; several may be alive. */
FT_API ft_status ft_tape_end(ft_tape *tape);
/* Stops recording. FT_ERR_STATE if another tape records, or a segment is open. */
FT_API ft_status ft_backward(ft_tape *tape, ft_tensor *root, ft_tensor *droot);
/* Gradients of root ([1] if droot is NULL, which then means 1; otherwise droot has root's shape)
   with respect to all that requires one. Walks the nodes once, last to first: rebuilds what was
   dropped, runs the kernel, frees each saved tensor and each gradient after its last use. Leaves
   collect in
   ->grad (tag grad; act if the leaf is of tag act, a stage's input), parameters with a sink in the
   sink's buffer. droot is consumed, and with it root need not be held. The tape must have ended,
   and is empty afterwards: its tensors are gone, but root, which becomes a tensor of one's own.
   FT_ERR_STATE if a saved tensor was written since it was read. */
FT_API ft_status ft_tape_reset(ft_tape *tape);
/* Drops what was recorded, without a backward, and tells its marks so (FT_PHASE_DROPPED): a region
   of ft_zero_enter ends, also one that is still open. After ft_backward_inputs what the first half
   has given stays. */

FT_API ft_status ft_backward_inputs(ft_tape *tape, ft_tensor *root, ft_tensor *droot);
/* The first half of ft_backward: all gradients but those of parameters (leaves) in ops flagged
   FT_OP_SPLIT (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", B without W). What those still
   need stays alive: for each linear layer its input and the gradient of its output, N (I + O)
   elements. */
FT_API ft_status ft_backward_weights(ft_tape *tape);
/* The second half, any time later: makes the gradients that were put off. Nothing is replayed, and
   no weight is read. The tape is empty afterwards, as after ft_backward. */

typedef enum ft_phase {
    FT_PHASE_WHOLE = 0, FT_PHASE_INPUTS, FT_PHASE_WEIGHTS, FT_PHASE_DROPPED
} ft_phase;

typedef ft_status (*ft_mark_fn)(ft_ctx *ctx, void *user, ft_phase phase);
FT_API ft_status ft_tape_mark(ft_ctx *ctx, ft_mark_fn fn, void *user);
/* Backward calls fn(ctx, user, phase) when it passes this point, coming from later ops: once, or
   once for each half. Where that call, or that of the second half, has not come when the tape is
   reset or freed, the last call is with FT_PHASE_DROPPED, later marks first. None comes when the
   context ends. No-op without a current tape. */
FT_API ft_tape *ft_tape_current(const ft_ctx *ctx);
/* The tape that records, NULL if none does. */

/* Recomputation (SAC). Within a segment the policy says for each tensor that is produced: keep, or
   drop and rebuild on demand by replaying its op, bitwise as the forward did.
     none       keep everything that backward reads
     selective  drop what is cheap to rebuild (norm outputs, the SwiGLU product): rows' `cheap`
     full       drop everything; the segment's inputs remain
     mask       drop the tensors whose bit is set: bit k is the k-th output recorded in the segment
   Costs for a Llama layer, bytes a token of bf16 activations kept: none 8C + 4(H+K)D + 6F,
   selective 4C + 4(H+K)D + 4F, full 2C; plus 4H for the log-sum-exp but under full. */
typedef enum ft_sac_kind {
    FT_SAC_NONE = 0, FT_SAC_SELECTIVE, FT_SAC_FULL, FT_SAC_MASK
} ft_sac_kind;

typedef struct ft_sac {
    ft_sac_kind kind;
    uint64_t mask; /* FT_SAC_MASK: at most 64 tensors a segment are droppable */
    int segment;   /* private: ft_sac_fit's number of the segment, from 1; 0: none */
} ft_sac;

FT_API ft_status ft_segment_begin(ft_ctx *ctx, const char *name, ft_sac sac);
/* Segments do not nest. `name` must outlive the tape. Without a current tape only the freeing of
   ft_segment_end is done. */
FT_API ft_status ft_segment_end(ft_ctx *ctx, int n, ft_tensor *const *results);
/* Frees the handles of all tensors made in the segment but `results`, which are always kept. */

/* Budget: the policy per segment that fits a number of bytes at the least recomputation.
   `step` is the program: it is launched on meta with the policies to try, and must give
   ft_segment_begin the element of sac that belongs to the segment, as it is. A segment may be run
   by some ranks only (layers of a pipeline), on any tape, for any number of micro-batches, of which
   several may be in flight. Ranks that run the same segments (over dp and tp) make a stage; the
   fullest rank of each must fit. */
typedef struct ft_sac_budget {
    int segments;           /* of the model: over all ranks, of one micro-batch */
    size_t budget_bytes;    /* for the fullest rank's peak_bytes */
    ft_config config;       /* device is set to FT_META */
    ft_rank_fn step;        /* one whole training step */
    void *user;
    ft_sac *sac;            /* [segments]: read by step, holds the answer at the end */
    /* Results. */
    size_t peak_bytes;      /* planned, with the answer */
    double recompute_flops; /* a step and rank, with the answer */
    int optimal;            /* 1: no stage has a policy that fits with less recomputation */
    int runs;               /* meta runs it took */
} ft_sac_budget;

FT_API ft_status ft_sac_fit(ft_sac_budget *budget);
/* The answer is found by measuring and verified by a run: it fits. It is also the best (optimal =
   1), given that a mask changes live bytes in the forward and the backward of its own segment, and
   by what it keeps in between, and that segments alike (same ops, same sizes) do so alike.
   optimal = 0, and a cheaper answer may exist: where that run was over the budget, so that the
   search went on for less; where a segment has more than 12 tensors that are worth dropping (then
   only subsets of the 12 that free most are tried, and all of them together); or where the search
   was cut short, at 8192 undominated sums over a stage's first segments, or at 512 passes (one
   micro-batch at a time needs one pass, several in flight some).
   FT_ERR_OOM, naming the least that any policy needs (of those tried), when nothing fits; the
   results are then those of that policy. */

typedef struct ft_flops {
    double forward, backward, replay; /* since launch; backward counted as twice the forward */
    double replay_bytes;
} ft_flops;

FT_API void ft_flops_get(const ft_ctx *ctx, ft_flops *flops);
/* By the ops' cost functions. Each op counts once in `forward` and, if its backward runs a kernel,
   twice as much in `backward`: their sum is the model's work, whatever is recomputed. A forward
   that was deferred to backward counts in `forward` all the same. Not counted: the logits that
   backward computes once more for a loss that was read before it. */

/* ---------------------------------------------------------------------------------------- >>gpu

   Device kernels: femtotron_kernels.cu, which the whole program is linked with when FT_CUDA is
   defined. A launcher queues its kernels on call->stream and returns; it never synchronises and
   never allocates: what it needs beside its operands is call->scratch and call->workspace, sized by
   the row's `scratch`, which branches on call->device. Those sizes depend on shapes and dtypes
   alone, so that a plan made without a GPU is exact. Every sum has an order that the shapes fix:
   no atomic addition of floating-point numbers anywhere.

   A value that cannot be (a token >= V) is found on the device. The kernel then leaves its output
   for that element zero, and notes the fault for the host, which reports the first by position as
   FT_ERR_DATA at the next synchronisation: fault[3k] = the least of (position << 32 | value),
   fault[3k+1] = V, fault[3k+2] = the number of positions, with k below. */

enum { FTK_SUM_MOST = 256 };   /* the most ranks that read each other's memory: see ftk_sum */
enum { FTK_CHUNK = 1024, FTK_PIECE = 32 }; /* rows, positions of a part: see ftk_lookup_bytes */

FT_API size_t ftk_rows_sum_bytes(int64_t n, int64_t o);
/* Workspace of a sum of n rows of o elements (ftk_rows_sum); in every build, for plans. */
FT_API size_t ftk_lookup_bytes(int64_t rows, int64_t n, int64_t C);
/* Workspace of the gradient of a table of rows x C from n tokens; in every build too. */

enum { FTK_FAULT_EMBEDDING = 0, FTK_FAULT_CE, FTK_FAULT_TP_EMBEDDING, FTK_FAULT_TP_CE,
       FTK_FAULT_DOCUMENT, FTK_FAULTS };

#ifdef FT_CUDA
#define FT_GPU_KERNELS(forward, backward, replay) { forward, backward, replay }

/* One launcher for each kernel of a row; what it computes stands at the row's CPU kernel. */
#define FTK_DECLARE(name) FT_API ft_status ftk_##name(const ft_op_call *call)
FTK_DECLARE(fill_forward); FTK_DECLARE(copy_forward); FTK_DECLARE(accumulate_forward);
FTK_DECLARE(embedding_forward); FTK_DECLARE(embedding_backward);
FTK_DECLARE(rmsnorm_forward); FTK_DECLARE(rmsnorm_backward);
FTK_DECLARE(add_rmsnorm_forward); FTK_DECLARE(add_rmsnorm_backward);
FTK_DECLARE(add_rmsnorm_replay);
FTK_DECLARE(rope_forward); FTK_DECLARE(rope_backward);
FTK_DECLARE(head_norm_forward); FTK_DECLARE(head_norm_backward);
FTK_DECLARE(attention_forward); FTK_DECLARE(attention_backward);
FTK_DECLARE(swiglu_forward); FTK_DECLARE(swiglu_backward);
FTK_DECLARE(add_forward); FTK_DECLARE(add_backward);
FTK_DECLARE(mul_forward); FTK_DECLARE(mul_backward);
FTK_DECLARE(scale_forward); FTK_DECLARE(scale_backward);
FTK_DECLARE(gelu_forward); FTK_DECLARE(gelu_backward);
FTK_DECLARE(silu_forward); FTK_DECLARE(silu_backward);
FTK_DECLARE(softmax_forward); FTK_DECLARE(softmax_backward);
FTK_DECLARE(layer_norm_forward); FTK_DECLARE(layer_norm_backward);
FTK_DECLARE(mean_forward); FTK_DECLARE(mean_backward);
FTK_DECLARE(zero_sumsq); FTK_DECLARE(zero_local); FTK_DECLARE(zero_control);
FTK_DECLARE(zero_scale); FTK_DECLARE(zero_adamw); FTK_DECLARE(zero_sgd);
FTK_DECLARE(tp_bias); FTK_DECLARE(tp_bias_grad); FTK_DECLARE(tp_lookup);
FTK_DECLARE(tp_lookup_grad); FTK_DECLARE(tp_loss_begin); FTK_DECLARE(tp_loss_stats);
FTK_DECLARE(tp_loss_add); FTK_DECLARE(tp_loss_grad); FTK_DECLARE(tp_loss_end);

/* Parts of linear and linear_cross_entropy around their GEMMs, which are cuBLASLt's. */
FT_API ft_status ftk_rows_fill(void *stream, void *y, const void *b, ft_dtype dtype, int64_t n,
                               int64_t o);
/* Every row of y[n,o] = b[o]. */
FT_API ft_status ftk_rows_sum(void *stream, void *to, ft_dtype to_dtype, const void *dy,
                              ft_dtype dtype, int64_t n, int64_t o, int accumulate,
                              void *workspace);
/* to[o] = or += the sum of the rows of dy[n,o], in fp32, rounded once; ftk_rows_sum_bytes of
   workspace. */

typedef struct ftk_ce_state { /* device memory; what the kernels of one pass share */
    double by;        /* what the sum of the losses is multiplied by */
    float factor;     /* of the logits' gradients: by * dloss */
    int32_t counted;  /* labels that are not -100 */
} ftk_ce_state;

FT_API ft_status ftk_ce_begin(void *stream, ftk_ce_state *state, const int32_t *labels, int64_t n,
                              int64_t V, const float *scale, const float *dloss, uint64_t *fault);
/* Checks and counts labels[n]; by = *scale, or 1 / counted where scale is NULL, 0 if nothing is
   counted; factor = by * *dloss, 0 where dloss is NULL. */
FT_API ft_status ftk_ce_tokens(void *stream, void *z, ft_dtype dtype, const int32_t *labels,
                               int64_t c, int64_t V, const ftk_ce_state *state, float *losses,
                               int grads);
/* losses[c] = log sum exp(z) - z[label] of each row of z[c,V], 0 where the label is -100 or cannot
   be; with grads z = factor (softmax(z) - onehot(label)), zero rows likewise. */
FT_API ft_status ftk_ce_end(void *stream, const float *losses, int64_t n,
                            const ftk_ce_state *state, float *loss);
/* *loss = by * sum of losses[n] in a fixed order, in double. */

FT_API ft_status ftk_sum(void *stream, void *out, ft_dtype dtype, int n, const void *const *in,
                         int64_t count);
/* out[i] = sum over r of in[r][i], in that order in fp32, rounded once; out may be one of in[].
   n <= FTK_SUM_MOST pointers, of this or of peer devices. */
#else
#define FT_GPU_KERNELS(forward, backward, replay) { NULL, NULL, NULL }
#endif

#endif /* FEMTOTRON_H */

#if defined(FEMTOTRON_IMPLEMENTATION) || defined(FEMTOTRON_CORE_IMPLEMENTATION)
#ifndef FEMTOTRON_IMPLEMENTATION_DONE
#define FEMTOTRON_IMPLEMENTATION_DONE

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef CLOCK_MONOTONIC
#error "femtotron.h needs POSIX clocks: include it before any system header, or compile with \
-std=gnu11 or -D_POSIX_C_SOURCE=200809L"
#endif

/* Timed waits follow a clock that nobody sets back; macOS cannot choose one for conditions. */
#if defined(__APPLE__)
#define FT__CLOCK CLOCK_REALTIME
#else
#define FT__CLOCK CLOCK_MONOTONIC
#endif

#ifndef FT_MALLOC
#define FT_MALLOC(n) malloc(n)
#define FT_FREE(p) free(p)
#endif

#if defined(__cplusplus)
#define FT__THREAD thread_local
#elif defined(__GNUC__)
#define FT__THREAD __thread
#else
#define FT__THREAD _Thread_local
#endif

enum { FT__TEXT_BYTES = 1024 }; /* longest error text, with its zero */

typedef struct ft__task ft__task;

struct ft_stream {
    ft_ctx *ctx;
    ft_stream_kind kind;
    int ready;                /* lock and changed exist */
    int threaded;             /* its thread exists; host only */
    pthread_t thread;
    pthread_mutex_t lock;     /* everything below */
    pthread_cond_t changed;
    ft__task *head, *tail;    /* queued, oldest first */
    uint64_t queued;          /* tasks so far; an event is a value of this counter */
    uint64_t completed;
    int stop;                 /* the thread ends once the queue is empty; later work runs at once */
    ft_status failed;         /* first error of its work: sticks */
    char text[FT__TEXT_BYTES];
    struct ft__gpu_stream *gpu; /* FT_GPU: gpu.impl */
};

typedef struct ft__gpu_table ft__gpu_table;    /* gpu.impl: GEMM algorithms by shape */
typedef struct ft__world ft__world;            /* launch.impl: what the ranks of one launch share */
typedef struct ft__memory ft__memory;          /* memory.impl: the allocator's books */
typedef struct ft__host_block ft__host_block;  /* launch.impl: ft_host_alloc's list */

struct ft_ctx {
    int rank;
    ft_device device;
    ft_config config;        /* with defaults filled in: timeout_s, delay_us, async resolved */
    ft__world *world;
    ft_stream streams[FT_STREAM_COUNT];
    ft_group *groups;        /* list of this rank's handles */
    ft__host_block *host;
    ft__memory *memory;      /* created by ft__memory_begin(ctx), ended by ft__memory_end(ctx) */
    ft_tensor *tensors;
    ft_storage *storages;
    ft_tape *tapes, *tape;   /* all; the recording one */
    const ft_op **ops;       /* registered rows */
    int n_ops;
    const char *where_op, *where_phase; /* for messages and the timeline */
    const char *where_segment_name;
    int where_segment;
    int segment_open;
    int composite;           /* a composite op's host code runs: the tape's values are its own */
    ft_flops flops;
    uint64_t random;         /* state of ft__delay; under the world's lock */
    struct ft__probe_rank *probe; /* NULL unless ft_sac_fit measures */
    struct ft__gpu *gpu;     /* FT_GPU: gpu.impl */
    struct ft__nccl_rank *nccl; /* with that transport: nccl.impl */
};

/* Parts that call each other across the order of this file. */
static ft_status ft__stream_run_always(ft_stream *s, ft_task_fn fn, const void *arg, size_t bytes);
static ft_status ft__plan_check(const ft_config *config);
static void ft__delay(ft_ctx *ctx);
static int ft__async(const ft_ctx *ctx);
static ft_status ft__memory_begin(ft_ctx *ctx);
static void ft__memory_end(ft_ctx *ctx);
typedef struct ft__work ft__work;
static ft_status ft__work_new(const ft_stream *stream, const char *name, const char *group,
                              ft__work **out);
static void ft__work_begin(ft_stream *stream, ft__work *work);
static void ft__work_end(ft_stream *stream, ft__work *work);
static ft_status ft__deferred_run(ft_tensor *t);
static ft_status ft__rebuild(ft_tensor *t);
static ft_status ft__readable(ft_tensor *t, const char *reader);
static void ft__touch(ft_tensor *t);
static void ft__settle(ft_tensor *t);
static void ft__tape_destroy(ft_tape *tape);
static void ft__probe_attach(ft_ctx *ctx);
static void ft__probe_finish(ft_ctx *ctx);
static void ft__probe_live(ft_ctx *ctx);
static void ft__probe_begin(ft_ctx *ctx, const ft_tape *tape);
static void ft__probe_end(ft_ctx *ctx, const ft_tape *tape);
static void ft__probe_replay(ft_ctx *ctx, const ft_tape *tape, int segment, double flops);
static void ft__probe_backward(ft_ctx *ctx, const ft_tape *tape, int from, int to, ft_phase phase);
static void ft__blas_begin(void);

/* What the parts above the device ask of gpu.impl. Memory is device memory, work is queued on the
   stream, and none of them waits, but sync and download. */
enum { FT__NCCL_ID_BYTES = 128, FT__NCCL_GROUPS = 64 };
enum { FT__NCCL_WORDS = 8195 }; /* a pair of this rank's, 4096 pairs, and one for barriers */
enum { FT__READY = 0, FT__HALF, FT__DONE, FT__SIGNALS }; /* moments of a collective, events here */
static ft_status ft__gpu_check(ft_config *config);
static ft_status ft__nccl_begin(ft_ctx *ctx);
static void ft__nccl_end(ft_ctx *ctx);
static ft_status ft__nccl_id(void *id, size_t id_bytes);
static ft_status ft__nccl_check(const ft_config *config, int own_rank);
static ft_status ft__gpu_table_open(const ft_config *config, ft__gpu_table **out);
static ft_status ft__gpu_table_close(ft__gpu_table *table, int own);
static ft_status ft__gpu_begin(ft_ctx *ctx);
static void ft__gpu_end(ft_ctx *ctx);
static uint64_t ft__gpu_record(ft_stream *s);
static ft_status ft__gpu_wait(ft_stream *s, ft_event event);
static ft_status ft__gpu_sync(ft_stream *s);
static ft_status ft__gpu_alloc(ft_ctx *ctx, size_t bytes, void **out);
static void ft__gpu_free(ft_ctx *ctx, void *block);
static ft_status ft__gpu_upload(ft_stream *s, void *to, const void *host, size_t bytes);
static ft_status ft__gpu_download(ft_stream *s, void *host, const void *from, size_t bytes);
static ft_status ft__gpu_copy(ft_stream *s, void *to, const void *from, size_t bytes);
static void ft__gpu_call_begin(ft_stream *s, ft_op_call *call);
static void ft__gpu_call_end(ft_ctx *ctx);
static void ft__gpu_stamp(ft_stream *s, void **event);
static void ft__gpu_stamp_wait(void *event);
static void ft__gpu_stamp_free(void *event);
static ft_status ft__gpu_stamp_time(void *from, void *event, double *seconds);
static ft_status ft__gpu_sum(ft_stream *s, void *out, ft_dtype dtype, int n, const void *const *in,
                             int64_t count);
static ft_status ft__gpu_signals_begin(ft_ctx *ctx, void *signals[FT__SIGNALS]);
static void ft__gpu_signals_end(void *signals[FT__SIGNALS]);
static ft_status ft__gpu_signal(ft_stream *s, void *signal);
static ft_status ft__gpu_await(ft_stream *s, void *signal);
#ifdef FT_CUDA
static ft_status ft__gpu_matmul_forward(const ft_op_call *call);
static ft_status ft__gpu_linear_forward(const ft_op_call *call);
static ft_status ft__gpu_linear_backward(const ft_op_call *call);
static ft_status ft__gpu_ce_run(const ft_op_call *call);
#endif

/* ------------------------------------------------------------------------------- >>status.impl */

static FT__THREAD char ft__error_text[FT__TEXT_BYTES];

const char *ft_status_name(ft_status status)
{
    switch (status) {
    case FT_OK: return "ok";
    case FT_ERR_ARG: return "bad argument";
    case FT_ERR_SHAPE: return "shapes do not fit";
    case FT_ERR_STATE: return "wrong state";
    case FT_ERR_DATA: return "bad data";
    case FT_ERR_OOM: return "out of memory";
    case FT_ERR_IO: return "input or output failed";
    case FT_ERR_COMM: return "ranks disagree";
    case FT_ERR_PEER: return "another rank failed";
    case FT_ERR_TIMEOUT: return "timed out";
    case FT_ERR_UNSUPPORTED: return "unsupported";
    }
    return "unknown status";
}

const char *ft_last_error(void) { return ft__error_text; }

/* The text goes through a buffer of its own, because ft_last_error() may be among the arguments. */
ft_status ft_error(ft_status status, const char *format, ...)
{
    char text[FT__TEXT_BYTES];
    va_list args;
    va_start(args, format);
    if (vsnprintf(text, sizeof text, format, args) < 0) text[0] = 0;
    va_end(args);
    memcpy(ft__error_text, text, strlen(text) + 1);
    return status;
}

static void ft__append(char *text, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;

/* Adds to a text of FT__TEXT_BYTES; what does not fit is cut off. */
static void ft__append(char *text, const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    if (vsnprintf(text + used, FT__TEXT_BYTES - used, format, args) < 0) text[used] = 0;
    va_end(args);
}

/* ------------------------------------------------------------------------------- >>launch.impl */

typedef struct ft__comm ft__comm;

/* One lock guards what ranks share: it is held for bookkeeping only, never while data moves. Each
   ft__comm has a condition of its own under it. */
struct ft__world {
    ft_config config;
    ft_rank_fn fn;
    void *user;
    pthread_mutex_t lock;
    int next;                 /* meta: the next rank to run */
    unsigned char *ended;     /* [world]: streams drained, so it joins no further collective */
    ft__comm *comms;
    ft__gpu_table *table; /* FT_GPU with gemm_table: gpu.impl */
    int own_rank, local_rank; /* ft_launch_env: this process's, and its GPU; -1 in ft_launch */
    void *nccl_id;            /* ranks of one process over NCCL: where they meet */
    int aborted;              /* never goes back to 0 */
    int failed_rank;
    ft_status failed_status;
    char failed_text[FT__TEXT_BYTES];
};

/* On meta ranks need no rendezvous, so a few threads take turns: 4096 threads buy nothing. */
enum { FT__META_WORKERS = 8, FT__MAX_WORLD = 4096, FT__STACK_BYTES = 1 << 20 };

static void ft__comms_wake(ft__world *world);
static void ft__comms_free(ft__world *world);
static void ft__groups_free(ft_ctx *ctx);
static ft_status ft__stream_begin(ft_ctx *ctx, ft_stream_kind kind);
static void ft__stream_end(ft_stream *s);

typedef struct ft__post ft__post;
typedef struct ft__message ft__message;
static ft_status ft__nccl_group(ft_group *g, const int *ranks);
static ft_status ft__nccl_collective(ft_group *g, ft_stream *s, const ft__post *own);
static ft_status ft__nccl_exchange(ft_group *g, ft_stream *s, const ft__message *m, int64_t n);
static ft_status ft__nccl_agree(ft_group *g, ft_stream *s, const ft__post *own);

ft_config ft_config_default(void)
{
    ft_config config;
    memset(&config, 0, sizeof config);
    config.world = 1;
    config.only_rank = -1;
    return config;
}

int ft_rank(const ft_ctx *ctx) { return ctx->rank; }
int ft_world(const ft_ctx *ctx) { return ctx->config.world; }
ft_device ft_ctx_device(const ft_ctx *ctx) { return ctx->device; }

static int ft__async(const ft_ctx *ctx)
{
    return ctx->device == FT_CPU && ctx->config.async == FT_ON;
}

/* The block's list node stands in front of it; 64 bytes keep the alignment of malloc. */
struct ft__host_block {
    ft__host_block *prev, *next;
};
enum { FT__HOST_HEADER = 64 };

void *ft_host_alloc(ft_ctx *ctx, size_t bytes)
{
    ft__host_block *block = NULL;
    if (bytes <= SIZE_MAX - FT__HOST_HEADER - 1) {
        block = (ft__host_block *)FT_MALLOC(FT__HOST_HEADER + bytes + 1);
    }
    if (!block) {
        ft_error(FT_ERR_OOM, "ft_host_alloc: no %zu bytes of host memory", bytes);
        return NULL;
    }
    memset(block, 0, FT__HOST_HEADER + bytes);
    block->next = ctx->host;
    if (ctx->host) ctx->host->prev = block;
    ctx->host = block;
    return (char *)block + FT__HOST_HEADER;
}

void ft_host_free(ft_ctx *ctx, void *memory)
{
    if (!memory) return;
    ft__host_block *block = (ft__host_block *)(void *)((char *)memory - FT__HOST_HEADER);
    if (block->prev) block->prev->next = block->next;
    else ctx->host = block->next;
    if (block->next) block->next->prev = block->prev;
    FT_FREE(block);
}

/* Aborts the world, with the world locked. The first failure is the cause, later ones follow from
   it. On meta ranks are independent and the lowest rank that fails is reported: that one is the
   same in every run. */
static void ft__fail_locked(ft__world *world, int rank, ft_status status, const char *text)
{
    int lower = world->config.device == FT_META && rank < world->failed_rank;
    if (world->aborted && !lower) return;
    world->aborted = 1;
    world->failed_rank = rank;
    world->failed_status = status;
    world->failed_text[0] = 0;
    ft__append(world->failed_text, "%s", text[0] ? text : ft_status_name(status));
    ft__comms_wake(world);
}

static void ft__fail(ft__world *world, int rank, ft_status status, const char *text)
{
    pthread_mutex_lock(&world->lock);
    ft__fail_locked(world, rank, status, text);
    pthread_mutex_unlock(&world->lock);
}

/* The error of a rank that meets the abort, with the world locked. */
static ft_status ft__abort_error(const ft__world *world, int rank)
{
    if (world->failed_rank == rank) {
        return ft_error(world->failed_status, "%s", world->failed_text);
    }
    return ft_error(FT_ERR_PEER, "rank %d failed: %s", world->failed_rank, world->failed_text);
}

/* Sleeps up to config.delay_us, by a generator of the rank's own (splitmix64). */
static void ft__delay(ft_ctx *ctx)
{
    if (ctx->device == FT_META || ctx->config.delay_us <= 0) return;
    pthread_mutex_lock(&ctx->world->lock);
    ctx->random += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t z = ctx->random;
    pthread_mutex_unlock(&ctx->world->lock);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    z = (z ^ (z >> 31)) % ((uint64_t)ctx->config.delay_us + 1);
    struct timespec pause;
    pause.tv_sec = (time_t)(z / 1000000);
    pause.tv_nsec = (long)(z % 1000000) * 1000;
    nanosleep(&pause, NULL);
}

/* A decimal integer in 0..most from the environment; *value is left alone when it is not set. */
static ft_status ft__env_int(const char *name, int most, int *value)
{
    const char *text = getenv(name);
    if (!text) return FT_OK;
    int64_t number = 0;
    int digits = 0;
    while (text[digits] >= '0' && text[digits] <= '9' && digits < 10) {
        number = number * 10 + (text[digits] - '0');
        digits++;
    }
    if (digits == 0 || text[digits] || number > most) {
        return ft_error(FT_ERR_ARG, "environment variable %s is \"%.60s\": it must be an integer "
                        "from 0 to %d, or not be set", name, text, most);
    }
    *value = (int)number;
    return FT_OK;
}

static ft_status ft__config_check(const ft_config *c)
{
    if (c->world < 1 || c->world > FT__MAX_WORLD) {
        return ft_error(FT_ERR_ARG, "ft_launch: world is %d, it must be 1 to %d", c->world,
                        FT__MAX_WORLD);
    }
    if (c->device != FT_CPU && c->device != FT_META && c->device != FT_GPU) {
        return ft_error(FT_ERR_ARG, "ft_launch: device %d is none of FT_CPU, FT_META and FT_GPU",
                        (int)c->device);
    }
    if (c->plan_for != FT_CPU && c->plan_for != FT_GPU) {
        return ft_error(FT_ERR_ARG, "ft_launch: plan_for is %d, it must be FT_CPU or FT_GPU",
                        (int)c->plan_for);
    }
    if (c->transport != FT_TRANSPORT_LOCAL && c->transport != FT_TRANSPORT_NCCL) {
        return ft_error(FT_ERR_ARG, "ft_launch: transport is %d, it must be FT_TRANSPORT_LOCAL or "
                        "FT_TRANSPORT_NCCL", (int)c->transport);
    }
    if (c->transport == FT_TRANSPORT_NCCL && c->device == FT_CPU) {
        return ft_error(FT_ERR_UNSUPPORTED, "ft_launch: NCCL connects GPUs; ranks on FT_CPU need "
                        "FT_TRANSPORT_LOCAL");
    }
    if (c->gpus < 0 || c->ranks_per_gpu < 0) {
        return ft_error(FT_ERR_ARG, "ft_launch: gpus is %d and ranks_per_gpu %d, neither can be "
                        "negative", c->gpus, c->ranks_per_gpu);
    }
    if (c->only_rank < -1 || c->only_rank >= c->world) {
        return ft_error(FT_ERR_ARG, "ft_launch: only_rank is %d, it must be a rank of the world of "
                        "%d, or -1 for all", c->only_rank, c->world);
    }
    if (c->only_rank >= 0 && c->device != FT_META && c->world > 1) {
        return ft_error(FT_ERR_ARG, "ft_launch: only_rank %d of a world of %d can run alone on "
                        "FT_META only; set only_rank to -1", c->only_rank, c->world);
    }
    if (c->async != FT_DEFAULT && c->async != FT_ON && c->async != FT_OFF) {
        return ft_error(FT_ERR_ARG, "ft_launch: async is %d, it must be FT_DEFAULT, FT_ON or "
                        "FT_OFF", (int)c->async);
    }
    if ((unsigned)c->allocator > FT_ALLOC_ARENA) {
        return ft_error(FT_ERR_ARG, "ft_launch: allocator %d does not exist", (int)c->allocator);
    }
    if (c->mem_plan || c->allocator == FT_ALLOC_ARENA) FT_TRY(ft__plan_check(c));
    if (c->timeline != 0 && c->timeline != 1) {
        return ft_error(FT_ERR_ARG, "ft_launch: timeline is %d, it must be 0 or 1", c->timeline);
    }
    if (c->delay_us < 0 || c->delay_us > 60000000) {
        return ft_error(FT_ERR_ARG, "ft_launch: delay_us is %d, it must be 0 to 60000000",
                        c->delay_us);
    }
    if (!(c->timeout_s >= 0) || c->timeout_s > 1e8) {
        return ft_error(FT_ERR_ARG, "ft_launch: timeout_s is %g, it must be 0 (120 seconds) to 1e8",
                        c->timeout_s);
    }
    return FT_OK;
}

/* What FT_ALLOC_DEFAULT means on this device. On meta nothing is served unless it is asked for. */
static ft_status ft__allocator_resolve(ft_config *c)
{
    const char *text = getenv("FT_ALLOCATOR");
    if (c->allocator != FT_ALLOC_DEFAULT) return FT_OK;
    c->allocator = c->device == FT_GPU ? FT_ALLOC_CACHING : FT_ALLOC_SYSTEM;
    if (!text || c->device == FT_META) return FT_OK;
    if (strcmp(text, "caching") == 0) c->allocator = FT_ALLOC_CACHING;
    else if (strcmp(text, "system") == 0) c->allocator = FT_ALLOC_SYSTEM;
    else
        return ft_error(FT_ERR_ARG, "environment variable FT_ALLOCATOR is \"%.60s\": it must be "
                        "system or caching, or not be set", text);
    return FT_OK;
}

/* Checks the caller's config and fills in what it leaves to defaults and to the environment. */
static ft_status ft__config_resolve(const ft_config *given, ft_config *c)
{
    *c = *given;
    if (c->world == 0) c->world = 1;
    FT_TRY(ft__config_check(c));
    if (c->device == FT_GPU) FT_TRY(ft__gpu_check(c));
    FT_TRY(ft__allocator_resolve(c));
    if (c->timeout_s == 0) c->timeout_s = 120;
    if (c->delay_us == 0) FT_TRY(ft__env_int("FT_DELAY_US", 60000000, &c->delay_us));
    if (c->async == FT_DEFAULT) {
        int on = 0;
        FT_TRY(ft__env_int("FT_CPU_ASYNC", 1, &on));
        c->async = on ? FT_ON : FT_OFF;
    }
    return FT_OK;
}

/* Starts a thread whose stack is the system's default, but at least 1 MiB. Returns 0 or errno. */
static int ft__thread_start(pthread_t *thread, void *(*fn)(void *), void *arg)
{
    pthread_attr_t attr;
    size_t bytes = 0;
    int error = pthread_attr_init(&attr);
    if (error) return error;
    if (pthread_attr_getstacksize(&attr, &bytes) != 0 || bytes < FT__STACK_BYTES) {
        error = pthread_attr_setstacksize(&attr, FT__STACK_BYTES);
    }
    if (!error) error = pthread_create(thread, &attr, fn, arg);
    pthread_attr_destroy(&attr);
    return error;
}

/* A condition whose timed waits follow FT__CLOCK. Returns 0 or errno. */
static int ft__cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    int error = pthread_condattr_init(&attr);
    if (error) return error;
#if !defined(__APPLE__)
    error = pthread_condattr_setclock(&attr, FT__CLOCK);
#endif
    if (!error) error = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return error;
}

static int ft__over_nccl(const ft_ctx *ctx)
{
    return ctx->device == FT_GPU && ctx->config.transport == FT_TRANSPORT_NCCL;
}

/* Ends a context as far as it was made. Its streams must be drained. */
static void ft__ctx_end(ft_ctx *ctx, int has_memory)
{
    for (int k = 0; k < FT_STREAM_COUNT; k++) ft__stream_end(&ctx->streams[k]);
    if (has_memory) ft__memory_end(ctx);
    ft__nccl_end(ctx);
    if (ctx->device == FT_GPU) ft__gpu_end(ctx);
    for (int k = 0; k < FT_STREAM_COUNT; k++) {
        if (!ctx->streams[k].ready) continue;
        pthread_cond_destroy(&ctx->streams[k].changed);
        pthread_mutex_destroy(&ctx->streams[k].lock);
    }
    ft__groups_free(ctx);
    while (ctx->host) ft_host_free(ctx, (char *)ctx->host + FT__HOST_HEADER);
    FT_FREE(ctx);
}

static ft_status ft__ctx_begin(ft__world *world, int rank, ft_ctx **out)
{
    ft_ctx *ctx = (ft_ctx *)FT_MALLOC(sizeof *ctx);
    if (!ctx) return ft_error(FT_ERR_OOM, "no %zu bytes for the rank's context", sizeof *ctx);
    memset(ctx, 0, sizeof *ctx);
    ctx->rank = rank;
    ctx->device = world->config.device;
    ctx->config = world->config;
    ctx->world = world;
    ctx->random = (uint64_t)rank << 32;
    ctx->where_op = ctx->where_phase = "";
    ctx->where_segment = -1;
    ft_status status = FT_OK;
    for (int k = 0; k < FT_STREAM_COUNT && status == FT_OK; k++) {
        status = ft__stream_begin(ctx, (ft_stream_kind)k);
    }
    if (status == FT_OK && ctx->device == FT_GPU) status = ft__gpu_begin(ctx);
    if (status == FT_OK && ft__over_nccl(ctx)) status = ft__nccl_begin(ctx);
    if (status == FT_OK) status = ft__memory_begin(ctx);
    if (status != FT_OK) {
        ft__ctx_end(ctx, 0);
        return status;
    }
    *out = ctx;
    return FT_OK;
}

/* One rank from begin to end. Errors go to the world. The rank's own error is told before its
   streams are drained, because they may be waiting for peers that wait for this rank. */
static void ft__rank_run(ft__world *world, int rank)
{
    ft_ctx *ctx = NULL;
    ft__error_text[0] = 0;
    ft_status status = ft__ctx_begin(world, rank, &ctx);
    if (status == FT_OK) status = world->fn(ctx, world->user);
    if (status != FT_OK) ft__fail(world, rank, status, ft_last_error());
    if (ctx) {
        status = ft_sync(ctx);
        if (status != FT_OK) ft__fail(world, rank, status, ft_last_error());
    }
    pthread_mutex_lock(&world->lock);
    world->ended[rank] = 1;
    ft__comms_wake(world);
    pthread_mutex_unlock(&world->lock);
    if (ctx) ft__ctx_end(ctx, 1);
}

typedef struct ft__worker {
    ft__world *world;
    int rank;         /* the rank to run; -1: whatever comes next, until none is left */
    pthread_t thread;
} ft__worker;

/* The next rank to run, -1 when there is none or when one has failed: the ranks below it were all
   taken before, so the lowest failing rank is among those that run. */
static int ft__rank_next(ft__world *world)
{
    int rank = -1;
    pthread_mutex_lock(&world->lock);
    if (!world->aborted && world->next < world->config.world) rank = world->next++;
    pthread_mutex_unlock(&world->lock);
    return rank;
}

static void *ft__worker_main(void *arg)
{
    ft__worker *worker = (ft__worker *)arg;
    if (worker->rank >= 0) {
        ft__rank_run(worker->world, worker->rank);
        return NULL;
    }
    for (;;) {
        int rank = ft__rank_next(worker->world);
        if (rank < 0) return NULL;
        ft__rank_run(worker->world, rank);
    }
}

/* Starts `n` workers and waits for them. On the CPU every rank needs a thread, so one that cannot
   be started fails the launch; on meta the others do its work. */
static void ft__workers_run(ft__world *world, ft__worker *workers, int n)
{
    int meta = world->config.device == FT_META, started = 0;
    for (; started < n; started++) {
        ft__worker *w = &workers[started];
        w->world = world;
        w->rank = world->own_rank >= 0 ? world->own_rank
                : world->config.only_rank >= 0 ? world->config.only_rank : meta ? -1 : started;
        int error = ft__thread_start(&w->thread, ft__worker_main, w);
        if (!error) continue;
        if (!meta || started == 0) {
            char text[FT__TEXT_BYTES] = "";
            ft__append(text, "cannot start a thread for this rank (error %d): lower the world of "
                       "%d or raise the limits on threads and memory", error, world->config.world);
            ft__fail(world, w->rank >= 0 ? w->rank : 0, FT_ERR_OOM, text);
        }
        break;
    }
    for (int i = 0; i < started; i++) pthread_join(workers[i].thread, NULL);
}

static ft_status ft__world_run(ft__world *world)
{
    int n = world->config.world;
    if (world->config.only_rank >= 0 || world->own_rank >= 0) n = 1;
    else if (world->config.device == FT_META && n > FT__META_WORKERS) n = FT__META_WORKERS;
    ft__worker *workers = (ft__worker *)FT_MALLOC((size_t)n * sizeof *workers);
    world->ended = (unsigned char *)FT_MALLOC((size_t)world->config.world);
    if (workers && world->ended) {
        memset(world->ended, 0, (size_t)world->config.world);
        ft__workers_run(world, workers, n);
    } else {
        ft__fail(world, 0, FT_ERR_OOM, "ft_launch: no host memory for the list of ranks");
    }
    FT_FREE(workers);
    ft__comms_free(world);
    FT_FREE(world->ended);
    if (!world->aborted) return FT_OK;
    return ft_error(world->failed_status, "rank %d: %s", world->failed_rank, world->failed_text);
}

static ft_status ft__launch(const ft_config *config, ft_rank_fn fn, void *user, int own_rank,
                            int local_rank)
{
    ft__world world;
    char id[FT__NCCL_ID_BYTES];
    memset(&world, 0, sizeof world);
    world.own_rank = own_rank;
    world.local_rank = local_rank;
    if (!config || !fn) {
        return ft_error(FT_ERR_ARG, "ft_launch: %s is NULL", config ? "fn" : "config");
    }
    FT_TRY(ft__config_resolve(config, &world.config));
    world.fn = fn;
    world.user = user;
    if (world.config.device == FT_GPU && world.config.transport == FT_TRANSPORT_NCCL) {
        FT_TRY(ft__nccl_check(&world.config, own_rank));
        if (own_rank < 0) {
            FT_TRY(ft__nccl_id(id, sizeof id));
            world.nccl_id = id;
        }
    }
    if (pthread_mutex_init(&world.lock, NULL) != 0) {
        return ft_error(FT_ERR_OOM, "ft_launch: the system has no mutex left");
    }
    ft__blas_begin();
    ft_status status = ft__gpu_table_open(&world.config, &world.table);
    if (status == FT_OK) status = ft__world_run(&world);
    if (status == FT_OK) status = ft__gpu_table_close(world.table, own_rank <= 0);
    else (void)ft__gpu_table_close(world.table, own_rank <= 0);
    pthread_mutex_destroy(&world.lock);
    return status;
}

ft_status ft_launch(const ft_config *config, ft_rank_fn fn, void *user)
{
    return ft__launch(config, fn, user, -1, -1);
}

/* What a launcher sets; the first whose rank and size are there is taken. */
typedef struct ft__launcher { const char *rank, *world, *local, *locals; } ft__launcher;

static const ft__launcher ft__launchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL} /* srun's own, not a batch's */
};

static const ft__launcher *ft__launcher_find(void)
{
    for (size_t i = 0; i < sizeof ft__launchers / sizeof ft__launchers[0]; i++)
        if (getenv(ft__launchers[i].rank) && getenv(ft__launchers[i].world))
            return &ft__launchers[i];
    return NULL;
}

int ft_env_local_rank(void)
{
    int local = 0;
    const ft__launcher *from = ft__launcher_find();
    return from && getenv(from->local) &&
           ft__env_int(from->local, FT__MAX_WORLD - 1, &local) == FT_OK ? local : -1;
}

int ft_env_rank(void)
{
    int rank = 0;
    const ft__launcher *from = ft__launcher_find();
    return from && ft__env_int(from->rank, FT__MAX_WORLD - 1, &rank) == FT_OK ? rank : -1;
}

/* Where the processes meet, in NCCL_COMM_ID, which NCCL reads. It is unset once they have met, for
   groups meet elsewhere: the next launch finds it in `met`. */
static ft_status ft__env_meeting(int world, int locals)
{
    static char met[512];
    const char *address = getenv("MASTER_ADDR"), *given = getenv("NCCL_COMM_ID");
    int port = 0;
    if (given) {
        if (strlen(given) >= sizeof met)
            return ft_error(FT_ERR_ARG, "NCCL_COMM_ID is longer than %zu", sizeof met - 1);
        memcpy(met, given, strlen(given) + 1);
        return FT_OK;
    }
    FT_TRY(ft__env_int("MASTER_PORT", 65534, &port));
    if (!met[0] && address && strlen(address) < 400 && port > 0)
        snprintf(met, sizeof met, "%s:%d", address, port + 1);
    else if (!met[0] && world == locals)
        snprintf(met, sizeof met, "127.0.0.1:29517");
    else if (!met[0])
        return ft_error(FT_ERR_ARG, "%d processes on several hosts do not know where to meet: set "
                        "NCCL_COMM_ID=HOST:PORT, a free port of rank 0's host, the same for all",
                        world);
    if (setenv("NCCL_COMM_ID", met, 1) != 0)
        return ft_error(FT_ERR_OOM, "the environment has no room for NCCL_COMM_ID");
    return FT_OK;
}

ft_status ft_launch_env(const ft_config *config, ft_rank_fn fn, void *user)
{
    ft_config c;
    int rank = 0, world = 0, local = 0, locals = 0;
    const ft__launcher *from = ft__launcher_find();
    if (!config) return ft_error(FT_ERR_ARG, "ft_launch_env: config is NULL");
    if (!from)
        return ft_error(FT_ERR_ARG, "ft_launch_env: neither torchrun nor mpirun nor srun has "
                        "started this process: RANK and WORLD_SIZE are not set; ft_launch "
                        "runs ranks as threads");
    FT_TRY(ft__env_int(from->rank, FT__MAX_WORLD - 1, &rank));
    FT_TRY(ft__env_int(from->world, FT__MAX_WORLD, &world));
    if (!getenv(from->local))
        return ft_error(FT_ERR_ARG, "ft_launch_env: %s is set but not %s, which says which GPU of "
                        "the host is this process's", from->rank, from->local);
    FT_TRY(ft__env_int(from->local, FT__MAX_WORLD - 1, &local));
    if (from->locals) FT_TRY(ft__env_int(from->locals, FT__MAX_WORLD, &locals));
    else {
        int nodes = 0;
        FT_TRY(ft__env_int("SLURM_STEP_NUM_NODES", FT__MAX_WORLD, &nodes));
        locals = nodes == 1 ? world : 0;
    }
    if (rank >= world)
        return ft_error(FT_ERR_ARG, "ft_launch_env: %s is %d and %s is %d", from->rank, rank,
                        from->world, world);
    c = *config;
    if (c.world && c.world != world)
        return ft_error(FT_ERR_ARG, "ft_launch_env: the program is for %d ranks, %s says %d",
                        c.world, from->world, world);
    if (c.device != FT_GPU)
        return ft_error(FT_ERR_UNSUPPORTED, "ft_launch_env: processes talk over NCCL, between "
                        "GPUs: set config.device to FT_GPU, or use ft_launch");
    c.world = world;
    c.transport = FT_TRANSPORT_NCCL;
    FT_TRY(ft__env_meeting(world, locals));
    return ft__launch(&c, fn, user, rank, local);
}

/* ------------------------------------------------------------------------------ >>streams.impl */

/* A queued call; a copy of its argument follows the header, aligned as malloc aligns. */
struct ft__task {
    ft__task *next;
    ft_task_fn fn;
    int always;        /* 0, or why it runs even after an error */
};
/* A free must not get lost, nor a wait that a free relies on. Without memory to queue it a free is
   done at once all the same; a wait is too, but that is an error. */
enum { FT__FREES = 1, FT__WAITS };
enum { FT__TASK_HEADER = 64, FT__TASK_LOCAL = 4096 };

static const char *ft__stream_name(const ft_stream *s)
{
    static const char *const names[FT_STREAM_COUNT] = {"compute", "gather", "reduce", "pipe"};
    return names[s->kind];
}

static ft_status ft__stream_begin(ft_ctx *ctx, ft_stream_kind kind)
{
    ft_stream *s = &ctx->streams[kind];
    s->ctx = ctx;
    s->kind = kind;
    if (pthread_mutex_init(&s->lock, NULL) == 0) {
        if (ft__cond_init(&s->changed) == 0) {
            s->ready = 1;
            return FT_OK;
        }
        pthread_mutex_destroy(&s->lock);
    }
    return ft_error(FT_ERR_OOM, "the system has no mutex left for stream %s", ft__stream_name(s));
}

/* Lets the thread finish its queue and joins it. Work pushed afterwards runs at once. */
static void ft__stream_end(ft_stream *s)
{
    if (!s->ready) return;
    pthread_mutex_lock(&s->lock);
    s->stop = 1;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    if (s->threaded) pthread_join(s->thread, NULL);
    s->threaded = 0;
}

/* The error that sticks to the stream, now also the calling thread's. */
static ft_status ft__stream_error(ft_stream *s)
{
    pthread_mutex_lock(&s->lock);
    ft_status status = s->failed;
    if (status != FT_OK) ft_error(status, "%s", s->text);
    pthread_mutex_unlock(&s->lock);
    return status;
}

/* Makes the calling thread's error stick to the stream, and tells the peers at once: they may wait
   for work that this stream now skips. */
static ft_status ft__stream_fail(ft_stream *s, ft_status status)
{
    pthread_mutex_lock(&s->lock);
    if (s->failed == FT_OK) {
        s->failed = status;
        memcpy(s->text, ft__error_text, sizeof s->text);
    }
    pthread_mutex_unlock(&s->lock);
    ft__fail(s->ctx->world, s->ctx->rank, status, ft_last_error());
    return status;
}

/* Calls fn. An error that it returns without a text gets one; a success leaves the thread's latest
   error as it was. */
static ft_status ft__task_call(ft_stream *s, ft_task_fn fn, void *arg)
{
    char first = ft__error_text[0];
    ft__error_text[0] = 0;
    ft_status status = fn(arg);
    if (ft__error_text[0] == 0) ft__error_text[0] = first;
    else first = 0;
    if (status == FT_OK) return FT_OK;
    if (first || ft__error_text[0] == 0) {
        ft_error(status, "a task on stream %s failed without a message: %s", ft__stream_name(s),
                 ft_status_name(status));
    }
    return ft__stream_fail(s, status);
}

/* Runs fn on a copy of arg in the calling thread. */
static ft_status ft__stream_now(ft_stream *s, ft_task_fn fn, const void *arg, size_t bytes)
{
    union {
        char bytes[FT__TASK_LOCAL];
        long double align_number;
        void *align_pointer;
    } local;
    void *copy = local.bytes;
    if (bytes > sizeof local) copy = FT_MALLOC(bytes);
    if (!copy) {
        ft_error(FT_ERR_OOM, "stream %s: no %zu bytes for a task's argument", ft__stream_name(s),
                 bytes);
        return ft__stream_fail(s, FT_ERR_OOM);
    }
    if (bytes) memcpy(copy, arg, bytes);
    ft_status status = ft__task_call(s, fn, copy);
    if (copy != (void *)local.bytes) FT_FREE(copy);
    return status;
}

/* The thread of an asynchronous stream. A task that is skipped after an error counts as completed,
   so that nobody waits for its event for ever. */
static void *ft__stream_main(void *arg)
{
    ft_stream *s = (ft_stream *)arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->head && !s->stop) pthread_cond_wait(&s->changed, &s->lock);
        ft__task *task = s->head;
        if (!task) break;
        s->head = task->next;
        if (!s->head) s->tail = NULL;
        int skip = s->failed != FT_OK && !task->always;
        pthread_mutex_unlock(&s->lock);
        if (!skip) (void)ft__task_call(s, task->fn, (char *)task + FT__TASK_HEADER);
        FT_FREE(task);
        pthread_mutex_lock(&s->lock);
        s->completed++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* Appends a task for the stream's thread; 0 when there is no memory or no thread for it. */
static int ft__stream_enqueue(ft_stream *s, ft_task_fn fn, const void *arg, size_t bytes,
                              int always)
{
    if (bytes > SIZE_MAX - FT__TASK_HEADER) return 0;
    if (!s->threaded) s->threaded = ft__thread_start(&s->thread, ft__stream_main, s) == 0;
    if (!s->threaded) return 0;
    ft__task *task = (ft__task *)FT_MALLOC(FT__TASK_HEADER + bytes);
    if (!task) return 0;
    task->next = NULL;
    task->fn = fn;
    task->always = always;
    if (bytes) memcpy((char *)task + FT__TASK_HEADER, arg, bytes);
    pthread_mutex_lock(&s->lock);
    if (s->tail) s->tail->next = task;
    else s->head = task;
    s->tail = task;
    s->queued++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return 1;
}

static void ft__stream_drain(ft_stream *s)
{
    if (s->ctx->device == FT_GPU) {
        (void)ft__gpu_sync(s);
        return;
    }
    pthread_mutex_lock(&s->lock);
    while (s->completed != s->queued) pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

static ft_status ft__stream_push(ft_stream *s, ft_task_fn fn, const void *arg, size_t bytes,
                                 int always)
{
    if (!s || !fn || (!arg && bytes)) {
        return ft_error(FT_ERR_ARG, "ft_stream_run: %s is NULL",
                        !s ? "stream" : !fn ? "fn" : "arg");
    }
    if (s->ctx->device == FT_META) return FT_OK;
    if (!always) FT_TRY(ft__stream_error(s));
    if (!ft__async(s->ctx) || s->stop) return ft__stream_now(s, fn, arg, bytes);
    if (ft__stream_enqueue(s, fn, arg, bytes, always)) return FT_OK;
    if (always != FT__FREES) {
        ft_error(FT_ERR_OOM, "stream %s: no thread, or no %zu bytes of host memory, for its work",
                 ft__stream_name(s), FT__TASK_HEADER + bytes);
        (void)ft__stream_fail(s, FT_ERR_OOM);
        if (!always) return FT_ERR_OOM;
    }
    ft__stream_drain(s);
    ft_status status = ft__stream_now(s, fn, arg, bytes);
    return always == FT__FREES ? status : ft__stream_error(s);
}

static ft_status ft__stream_run_always(ft_stream *s, ft_task_fn fn, const void *arg,
                                       size_t bytes)
{
    return ft__stream_push(s, fn, arg, bytes, FT__FREES);
}

ft_status ft_stream_run(ft_stream *stream, ft_task_fn fn, const void *arg, size_t arg_bytes)
{
    return ft__stream_push(stream, fn, arg, arg_bytes, 0);
}

ft_stream *ft_stream_get(ft_ctx *ctx, ft_stream_kind kind)
{
    if (!ctx || (int)kind < 0 || kind >= FT_STREAM_COUNT) {
        ft_error(FT_ERR_ARG, "ft_stream_get: there is no stream of kind %d", (int)kind);
        return NULL;
    }
    return &ctx->streams[kind];
}

void *ft_stream_native(ft_stream *stream)
{
    return stream && stream->gpu ? *(void **)stream->gpu : NULL;
}

ft_event ft_event_record(ft_stream *stream)
{
    ft_event event;
    event.stream = stream;
    event.sequence = 0;
    if (!stream) return event;
    if (stream->ctx->device == FT_GPU) {
        event.sequence = ft__gpu_record(stream);
        return event;
    }
    pthread_mutex_lock(&stream->lock);
    event.sequence = stream->queued;
    pthread_mutex_unlock(&stream->lock);
    return event;
}

/* Waits on the thread that calls it. This ends in any case: a stream's tasks wait only for events
   recorded before them, so there is no cycle, and collectives end on abort and on timeout. What
   comes after the wait needs the other stream's results, so its error becomes this stream's. A
   stream that has failed waits too: what it frees next the other stream may still be using. */
static ft_status ft__wait_task(void *arg)
{
    ft_event event = *(ft_event *)arg;
    ft_stream *s = event.stream;
    pthread_mutex_lock(&s->lock);
    while (s->completed < event.sequence) pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return ft__stream_error(s);
}

ft_status ft_stream_wait(ft_stream *stream, ft_event event)
{
    if (!stream) return ft_error(FT_ERR_ARG, "ft_stream_wait: stream is NULL");
    if (!event.stream || event.stream == stream) return FT_OK;
    if (event.stream->ctx != stream->ctx) {
        return ft_error(FT_ERR_ARG, "ft_stream_wait: the event belongs to rank %d, the stream to "
                        "rank %d; ranks are ordered by collectives", event.stream->ctx->rank,
                        stream->ctx->rank);
    }
    if (stream->ctx->device == FT_GPU) {
        if (ft__gpu_wait(stream, event) != FT_OK) return ft__stream_fail(stream, FT_ERR_STATE);
        return ft__stream_error(stream);
    }
    FT_TRY(ft__stream_push(stream, ft__wait_task, &event, sizeof event, FT__WAITS));
    return ft__stream_error(stream);
}

ft_status ft_stream_sync(ft_stream *stream)
{
    if (!stream) return ft_error(FT_ERR_ARG, "ft_stream_sync: stream is NULL");
    ft__stream_drain(stream);
    return ft__stream_error(stream);
}

ft_status ft_sync(ft_ctx *ctx)
{
    if (!ctx) return ft_error(FT_ERR_ARG, "ft_sync: ctx is NULL");
    for (int k = 0; k < FT_STREAM_COUNT; k++) ft__stream_drain(&ctx->streams[k]);
    for (int k = 0; k < FT_STREAM_COUNT; k++) FT_TRY(ft__stream_error(&ctx->streams[k]));
    return FT_OK;
}

/* ------------------------------------------------------------------------------- >>groups.impl */

/* The local transport. Members of a group share an ft__comm. A collective is

     meet   every member posts what it wants and where its buffers are. The last to arrive compares
            the posts. All agree: all go on. Otherwise, or on abort, on timeout, or when a member
            has ended: all fail, and nobody has touched a buffer.
     move   members read each other's buffers, each writing its own only.
     pass   nobody leaves before all have read.

   After `meet` nothing can fail and nobody waits for anything but copies, so move and pass heed
   neither abort nor timeout; this is what makes it safe to free a buffer on every error path.

   On FT_GPU the hosts meet and pass in the same way, without waiting for their devices: a member
   signals READY on its stream before it meets, and its stream awaits the others' READY before it
   reads and their DONE after they have. Every event that a stream waits for was recorded before the
   wait was queued, so the order of issue is an order in which the devices can do the work. */

enum { FT__AGREE = FT_COLLECTIVE_COUNT }; /* ft_agree's kind among posts */

struct ft__post {
    int kind;           /* ft_collective or FT__AGREE */
    ft_dtype dtype;
    int64_t elems;      /* of the whole tensor */
    int root;           /* broadcast: rank in the group */
    const char *what;   /* agree: the name and the value to agree on */
    uint64_t value;
    const char *in;     /* what peers read */
    char *out;
};

typedef enum ft__message_state { FT__UNREAD = 0, FT__READING, FT__READ } ft__message_state;

/* One op of an exchange. A send is linked into its receiver's inbox; it lives in the sender's task,
   which does not end before the message was read or withdrawn. */
struct ft__message {
    struct ft__message *next;
    int from, to;       /* ranks in the group */
    int is_send;
    ft__message_state state;
    ft_dtype dtype;
    int64_t elems;
    char *data;
    void *signal;       /* FT_GPU: of a send READY of the sender, then DONE of the receiver */
};

struct ft__comm {
    ft__comm *next;
    char *name;
    int n;
    int *ranks;               /* [n] of the world, ascending */
    unsigned char *joined;    /* [n] the member has its handle */
    unsigned char *busy;      /* [n] the member is inside a collective or an exchange */
    unsigned char *arrived;   /* [n] the member waits in `meet` */
    ft__post *posts;          /* [n] stable from meet to pass */
    ft__message **inbox;      /* [n] unread messages, oldest first */
    void *(*signals)[FT__SIGNALS]; /* [n] FT_GPU: each member's events, from its joining on */
    int n_arrived, n_passed;
    int exchanging;           /* members inside an exchange */
    uint64_t meets, passes;   /* completed */
    pthread_cond_t wake;
    ft_status failed;         /* sticks; every member gets this status and text */
    char text[FT__TEXT_BYTES];
};

struct ft_group {
    ft_group *next;
    ft_ctx *ctx;
    char *name;
    int n, rank;
    ft__comm *comm;           /* local transport; NULL on meta and over NCCL */
    struct ft__nccl *nccl;    /* over NCCL */
    ft_stream *last;          /* where the latest collective was queued */
    ft_traffic traffic;
};

const char *ft_collective_name(ft_collective kind)
{
    static const char *const names[FT_COLLECTIVE_COUNT] = {
        "all-gather", "reduce-scatter", "all-reduce", "broadcast", "send", "barrier"};
    return (int)kind >= 0 && kind < FT_COLLECTIVE_COUNT ? names[kind] : "unknown collective";
}

int ft_group_size(const ft_group *group) { return group->n; }
int ft_group_rank(const ft_group *group) { return group->rank; }
const char *ft_group_name(const ft_group *group) { return group->name; }

/* Wakes everyone who waits in a collective, with the world locked. */
static void ft__comms_wake(ft__world *world)
{
    for (ft__comm *c = world->comms; c; c = c->next) pthread_cond_broadcast(&c->wake);
}

static void ft__comm_free(ft__comm *c)
{
    for (int i = 0; c->signals && i < c->n; i++) ft__gpu_signals_end(c->signals[i]);
    FT_FREE(c->signals);
    FT_FREE(c->name);
    FT_FREE(c->ranks);
    FT_FREE(c->joined);
    FT_FREE(c->busy);
    FT_FREE(c->arrived);
    FT_FREE(c->posts);
    FT_FREE(c->inbox);
    FT_FREE(c);
}

static void ft__comms_free(ft__world *world)
{
    while (world->comms) {
        ft__comm *c = world->comms;
        world->comms = c->next;
        pthread_cond_destroy(&c->wake);
        ft__comm_free(c);
    }
}

static void ft__groups_free(ft_ctx *ctx)
{
    while (ctx->groups) {
        ft_group *g = ctx->groups;
        ctx->groups = g->next;
        FT_FREE(g->name);
        FT_FREE(g);
    }
}

static void *ft__zalloc(size_t bytes)
{
    void *memory = FT_MALLOC(bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static char *ft__strdup(const char *text)
{
    char *copy = (char *)FT_MALLOC(strlen(text) + 1);
    if (copy) memcpy(copy, text, strlen(text) + 1);
    return copy;
}

/* NULL when memory is out. */
static ft__comm *ft__comm_create(const char *name, int n, const int *ranks)
{
    size_t count = (size_t)n;
    ft__comm *c = (ft__comm *)ft__zalloc(sizeof *c);
    if (!c) return NULL;
    c->n = n;
    c->name = ft__strdup(name);
    c->ranks = (int *)FT_MALLOC(count * sizeof *c->ranks);
    c->joined = (unsigned char *)ft__zalloc(count);
    c->busy = (unsigned char *)ft__zalloc(count);
    c->arrived = (unsigned char *)ft__zalloc(count);
    c->posts = (ft__post *)ft__zalloc(count * sizeof *c->posts);
    c->inbox = (ft__message **)ft__zalloc(count * sizeof *c->inbox);
    c->signals = (void *(*)[FT__SIGNALS])ft__zalloc(count * sizeof *c->signals);
    if (!c->name || !c->ranks || !c->joined || !c->busy || !c->arrived || !c->posts ||
        !c->inbox || !c->signals || ft__cond_init(&c->wake) != 0) {
        ft__comm_free(c);
        return NULL;
    }
    memcpy(c->ranks, ranks, count * sizeof *c->ranks);
    return c;
}

/* The shared state for this member's next handle on (name, ranks), made by whoever comes first.
   The k-th handle of one member meets the k-th of the others. NULL when memory is out. */
static ft__comm *ft__comm_join(ft__world *world, const char *name, int n, const int *ranks,
                               int member)
{
    pthread_mutex_lock(&world->lock);
    ft__comm **at = &world->comms;
    for (; *at; at = &(*at)->next) {
        ft__comm *c = *at;
        if (c->n == n && !c->joined[member] && strcmp(c->name, name) == 0 &&
            memcmp(c->ranks, ranks, (size_t)n * sizeof *ranks) == 0) break;
    }
    if (!*at) *at = ft__comm_create(name, n, ranks);
    ft__comm *found = *at;
    if (found) found->joined[member] = 1;
    pthread_mutex_unlock(&world->lock);
    return found;
}

/* Checks the list of ranks and finds this rank in it. */
static ft_status ft__group_check(const ft_ctx *ctx, const char *name, int n, const int *ranks,
                                 int *member)
{
    *member = -1;
    if (n < 1 || n > ctx->config.world) {
        return ft_error(FT_ERR_ARG, "group \"%s\": %d ranks in a world of %d", name, n,
                        ctx->config.world);
    }
    for (int i = 0; i < n; i++) {
        if (ranks[i] < 0 || ranks[i] >= ctx->config.world) {
            return ft_error(FT_ERR_ARG, "group \"%s\": rank %d (entry %d) is outside the world "
                            "of %d", name, ranks[i], i, ctx->config.world);
        }
        if (i > 0 && ranks[i] <= ranks[i - 1]) {
            return ft_error(FT_ERR_ARG, "group \"%s\": ranks must ascend, but entry %d is %d "
                            "after %d", name, i, ranks[i], ranks[i - 1]);
        }
        if (ranks[i] == ctx->rank) *member = i;
    }
    if (*member >= 0) return FT_OK;
    return ft_error(FT_ERR_ARG, "group \"%s\": rank %d makes it but is not among its %d ranks; "
                    "only members call ft_group_create", name, ctx->rank, n);
}

ft_status ft_group_create(ft_ctx *ctx, const char *name, int n, const int *ranks,
                          ft_group **out)
{
    int member;
    if (!ctx || !name || !name[0] || !ranks || !out) {
        return ft_error(FT_ERR_ARG, "ft_group_create: ctx, a name, ranks and out must be given");
    }
    *out = NULL;
    FT_TRY(ft__group_check(ctx, name, n, ranks, &member));
    if (ctx->device == FT_GPU && !ft__over_nccl(ctx) && n > FTK_SUM_MOST)
        return ft_error(FT_ERR_UNSUPPORTED, "group \"%s\": %d ranks; on FT_GPU a group has at most "
                        "%d", name, n, FTK_SUM_MOST);
    ft_group *g = (ft_group *)ft__zalloc(sizeof *g);
    char *copy = ft__strdup(name);
    ft__comm *comm = NULL;
    int meta = ctx->device == FT_META || ft__over_nccl(ctx); /* no shared state between ranks */
    if (g && copy && !meta) comm = ft__comm_join(ctx->world, name, n, ranks, member);
    if (!g || !copy || (!meta && !comm)) {
        FT_FREE(g);
        FT_FREE(copy);
        return ft_error(FT_ERR_OOM, "group \"%s\": no host memory for its %d ranks", name, n);
    }
    g->ctx = ctx;
    g->name = copy;
    g->n = n;
    g->rank = member;
    g->comm = comm;
    g->traffic.group = copy;
    ft_group **at = &ctx->groups;
    while (*at) at = &(*at)->next;
    *at = g;
    *out = g;
    if (ft__over_nccl(ctx)) return ft__nccl_group(g, ranks);
    return ctx->device == FT_GPU ? ft__gpu_signals_begin(ctx, comm->signals[member]) : FT_OK;
}

ft_status ft_group_strided(ft_ctx *ctx, const char *name, int first, int stride, int n,
                           ft_group **out)
{
    if (!ctx || n < 1 || n > FT__MAX_WORLD || first < 0 || stride < 1 || stride > FT__MAX_WORLD)
        return ft_error(FT_ERR_ARG, "ft_group_strided: %d ranks from %d on, %d apart, or no ctx", n,
                        first, stride);
    int *ranks = (int *)FT_MALLOC((size_t)n * sizeof *ranks);
    if (!ranks) return ft_error(FT_ERR_OOM, "ft_group_strided: no host memory for %d ranks", n);
    for (int i = 0; i < n; i++) ranks[i] = first + i * stride;
    ft_status status = ft_group_create(ctx, name, n, ranks, out);
    FT_FREE(ranks);
    return status;
}

ft_status ft_mesh_create(ft_ctx *ctx, int dp, int tp, int pp, ft_mesh *mesh)
{
    if (!ctx || !mesh) return ft_error(FT_ERR_ARG, "ft_mesh_create: ctx or mesh is NULL");
    memset(mesh, 0, sizeof *mesh);
    int world = ctx->config.world;
    if (dp < 1 || tp < 1 || pp < 1 || dp > world || tp > world || pp > world ||
        (int64_t)dp * tp * pp != world) {
        return ft_error(FT_ERR_ARG, "mesh: dp %d x tp %d x pp %d must multiply to the world of %d",
                        dp, tp, pp, world);
    }
    mesh->size[FT_AXIS_DP] = dp;
    mesh->size[FT_AXIS_TP] = tp;
    mesh->size[FT_AXIS_PP] = pp;
    mesh->coord[FT_AXIS_TP] = ctx->rank % tp;
    mesh->coord[FT_AXIS_DP] = ctx->rank / tp % dp;
    mesh->coord[FT_AXIS_PP] = ctx->rank / tp / dp;
    return FT_OK;
}

ft_status ft_mesh_group(ft_ctx *ctx, const ft_mesh *mesh, ft_axis axis, const char *name,
                        ft_group **out)
{
    if (!ctx || !mesh || (int)axis < 0 || axis >= FT_AXIS_COUNT) {
        return ft_error(FT_ERR_ARG, "ft_mesh_group: %s", !ctx || !mesh ? "ctx or mesh is NULL"
                        : "the axis must be FT_AXIS_DP, FT_AXIS_TP or FT_AXIS_PP");
    }
    ft_mesh own;
    FT_TRY(ft_mesh_create(ctx, mesh->size[FT_AXIS_DP], mesh->size[FT_AXIS_TP],
                          mesh->size[FT_AXIS_PP], &own));
    if (memcmp(own.coord, mesh->coord, sizeof own.coord) != 0) {
        return ft_error(FT_ERR_ARG, "ft_mesh_group: the mesh has the coordinates of another rank "
                        "than %d; make it with ft_mesh_create on this rank", ctx->rank);
    }
    int n = own.size[axis], stride = 1;
    if (axis == FT_AXIS_DP) stride = own.size[FT_AXIS_TP];
    if (axis == FT_AXIS_PP) stride = own.size[FT_AXIS_TP] * own.size[FT_AXIS_DP];
    return ft_group_strided(ctx, name, ctx->rank - own.coord[axis] * stride, stride, n, out);
}

int ft_traffic_get(const ft_ctx *ctx, int max, ft_traffic *out)
{
    int n = 0;
    for (const ft_group *g = ctx->groups; g; g = g->next, n++) {
        if (n < max) out[n] = g->traffic;
    }
    return n;
}

/* -- meet and pass -- */

static void ft__post_text(char *text, const ft__post *post)
{
    if (post->kind == FT__AGREE) {
        ft__append(text, "ft_agree \"%s\" = %llu", post->what, (unsigned long long)post->value);
        return;
    }
    ft__append(text, "%s", ft_collective_name((ft_collective)post->kind));
    if (post->kind == FT_BARRIER) return;
    ft__append(text, " of %lld %s elements", (long long)post->elems, ft_dtype_name(post->dtype));
    if (post->kind == FT_BROADCAST) ft__append(text, " from group rank %d", post->root);
}

static int ft__post_same(const ft__post *a, const ft__post *b)
{
    if (a->kind != b->kind || a->dtype != b->dtype || a->elems != b->elems) return 0;
    if (a->kind == FT__AGREE) return a->value == b->value && strcmp(a->what, b->what) == 0;
    return a->root == b->root;
}

/* "; ranks 0, 1, 3: all-reduce of 8 fp32 elements; rank 2: ..." */
static void ft__posts_text(char *text, const ft__comm *c)
{
    for (int i = 0; i < c->n; i++) {
        int first = 1, several = 0;
        for (int j = 0; j < i; j++) first = first && !ft__post_same(&c->posts[j], &c->posts[i]);
        if (!first) continue;
        for (int j = i + 1; j < c->n; j++) {
            several = several || ft__post_same(&c->posts[j], &c->posts[i]);
        }
        ft__append(text, "; rank%s %d", several ? "s" : "", c->ranks[i]);
        for (int j = i + 1; j < c->n; j++) {
            if (ft__post_same(&c->posts[j], &c->posts[i])) ft__append(text, ", %d", c->ranks[j]);
        }
        ft__append(text, ": ");
        ft__post_text(text, &c->posts[i]);
    }
}

static ft_status ft__comm_error(const ft__comm *c) { return ft_error(c->failed, "%s", c->text); }

/* Fails the group, of which `g` is a handle, and the world with it. World locked. */
static ft_status ft__comm_fail(const ft_group *g, ft_status status, const char *text)
{
    ft__comm *c = g->comm;
    if (c->failed == FT_OK) {
        c->failed = status;
        c->text[0] = 0;
        ft__append(c->text, "group \"%s\": %s", c->name, text);
    }
    ft__fail_locked(g->ctx->world, g->ctx->rank, c->failed, c->text);
    pthread_cond_broadcast(&c->wake);
    return ft__comm_error(c);
}

/* World locked. */
static ft_status ft__comm_enter(ft_group *g)
{
    ft__comm *c = g->comm;
    if (c->failed != FT_OK) return ft__comm_error(c);
    if (g->ctx->world->aborted) return ft__abort_error(g->ctx->world, g->ctx->rank);
    if (c->busy[g->rank]) {
        return ft_error(FT_ERR_STATE, "group \"%s\": two collectives of rank %d at once, on "
                        "different streams; give each stream a group of its own, or order them by "
                        "an event", c->name, g->ctx->rank);
    }
    c->busy[g->rank] = 1;
    return FT_OK;
}

static void ft__comm_leave(ft_group *g)
{
    pthread_mutex_lock(&g->ctx->world->lock);
    g->comm->busy[g->rank] = 0;
    pthread_mutex_unlock(&g->ctx->world->lock);
}

static struct timespec ft__deadline(double seconds)
{
    struct timespec at;
    clock_gettime(FT__CLOCK, &at);
    time_t whole = (time_t)seconds;
    at.tv_sec += whole;
    at.tv_nsec += (long)((seconds - (double)whole) * 1e9);
    if (at.tv_nsec >= 1000000000L) {
        at.tv_nsec -= 1000000000L;
        at.tv_sec++;
    }
    return at;
}

/* The failure of a `meet` in which members are missing: those that ended, or, once the time is
   over, those that did not come. FT_OK: keep waiting. World locked. */
static ft_status ft__meet_missing(const ft_group *g, const ft__post *post, int expired)
{
    const ft__comm *c = g->comm;
    const unsigned char *ended = g->ctx->world->ended;
    char text[FT__TEXT_BYTES] = "";
    int gone = 0, missing = 0;
    for (int i = 0; i < c->n; i++) gone += !c->arrived[i] && ended[c->ranks[i]];
    if (!gone && !expired) return FT_OK;
    for (int i = 0; i < c->n; i++) {
        if (c->arrived[i] || (gone && !ended[c->ranks[i]])) continue;
        ft__append(text, "%s%d", missing++ ? ", " : "rank ", c->ranks[i]);
    }
    ft__append(text, gone ? " ended without joining " : " did not arrive at ");
    ft__post_text(text, post);
    if (gone) {
        ft__append(text, "; every member must make the same calls");
        return ft__comm_fail(g, FT_ERR_COMM, text);
    }
    ft__append(text, " within %g s; it is stuck, slower than timeout_s, or has skipped this call",
               g->ctx->config.timeout_s);
    return ft__comm_fail(g, FT_ERR_TIMEOUT, text);
}

/* Waits for the rest. Completion comes before every failure, so that all members see the same. */
static ft_status ft__meet_wait(ft_group *g, const ft__post *post)
{
    ft__comm *c = g->comm;
    ft__world *world = g->ctx->world;
    uint64_t meets = c->meets;
    struct timespec deadline = ft__deadline(g->ctx->config.timeout_s);
    int expired = 0;
    for (;;) {
        if (c->meets != meets) return FT_OK;
        if (c->failed != FT_OK) return ft__comm_error(c);
        if (world->aborted) return ft__abort_error(world, g->ctx->rank);
        FT_TRY(ft__meet_missing(g, post, expired));
        expired = pthread_cond_timedwait(&c->wake, &world->lock, &deadline) == ETIMEDOUT;
    }
}

/* The last to arrive compares the posts and lets all go on. */
static ft_status ft__meet_complete(ft_group *g)
{
    ft__comm *c = g->comm;
    for (int i = 1; i < c->n; i++) {
        if (ft__post_same(&c->posts[0], &c->posts[i])) continue;
        char text[FT__TEXT_BYTES] = "ranks disagree";
        ft__posts_text(text, c);
        return ft__comm_fail(g, FT_ERR_COMM, text);
    }
    memset(c->arrived, 0, (size_t)c->n);
    c->n_arrived = 0;
    c->meets++;
    pthread_cond_broadcast(&c->wake);
    return FT_OK;
}

static ft_status ft__meet_locked(ft_group *g, const ft__post *post)
{
    ft__comm *c = g->comm;
    FT_TRY(ft__comm_enter(g));
    c->posts[g->rank] = *post;
    c->arrived[g->rank] = 1;
    c->n_arrived++;
    if (c->exchanging) pthread_cond_broadcast(&c->wake);
    ft_status status = c->n_arrived == c->n ? ft__meet_complete(g) : ft__meet_wait(g, post);
    if (status == FT_OK) return FT_OK;
    c->arrived[g->rank] = 0;
    c->n_arrived--;
    c->busy[g->rank] = 0;
    return status;
}

/* On FT_OK the group is this member's until ft__comm_leave. */
static ft_status ft__meet(ft_group *g, const ft__post *post)
{
    pthread_mutex_lock(&g->ctx->world->lock);
    ft_status status = ft__meet_locked(g, post);
    pthread_mutex_unlock(&g->ctx->world->lock);
    return status;
}

static void ft__pass(ft_group *g)
{
    ft__comm *c = g->comm;
    pthread_mutex_lock(&g->ctx->world->lock);
    uint64_t passes = c->passes;
    if (++c->n_passed == c->n) {
        c->n_passed = 0;
        c->passes++;
        pthread_cond_broadcast(&c->wake);
    }
    while (c->passes == passes) pthread_cond_wait(&c->wake, &g->ctx->world->lock);
    pthread_mutex_unlock(&g->ctx->world->lock);
}

/* -- move: posts are read without the lock, because they stand still between meet and pass -- */

#define FT__SUM_BLOCK 512

static void ft__sum_add(float *sum, const char *in, ft_dtype dtype, int64_t n)
{
    if (dtype == FT_F32) {
        const float *x = (const float *)(const void *)in;
        for (int64_t i = 0; i < n; i++) sum[i] += x[i];
    } else {
        const uint16_t *x = (const uint16_t *)(const void *)in;
        for (int64_t i = 0; i < n; i++) sum[i] += ft_f32_from_bf16(x[i]);
    }
}

static void ft__sum_store(char *out, const float *sum, ft_dtype dtype, int64_t n)
{
    if (dtype == FT_F32) {
        memcpy(out, sum, (size_t)n * sizeof *sum);
    } else {
        uint16_t *y = (uint16_t *)(void *)out;
        for (int64_t i = 0; i < n; i++) y[i] = ft_bf16_from_f32(sum[i]);
    }
}

/* out[count] = the sum over members of elements first..first+count-1 of what they posted: in rank
   order, in fp32, rounded once. out may be this member's own part: a block is read before it is
   written. */
static ft_status ft__sum(const ft_group *g, ft_stream *s, int64_t first, int64_t count, char *out)
{
    float sum[FT__SUM_BLOCK];
    ft_dtype dtype = g->comm->posts[g->rank].dtype;
    int64_t width = (int64_t)ft_dtype_bytes(dtype);
    if (g->ctx->device == FT_GPU) {
        const void *in[FTK_SUM_MOST];
        for (int r = 0; r < g->n; r++) in[r] = g->comm->posts[r].in + first * width;
        return ft__gpu_sum(s, out, dtype, g->n, in, count);
    }
    for (int64_t at = 0; at < count; at += FT__SUM_BLOCK) {
        int64_t n = count - at < FT__SUM_BLOCK ? count - at : FT__SUM_BLOCK;
        memset(sum, 0, (size_t)n * sizeof *sum);
        for (int r = 0; r < g->n; r++) {
            ft__sum_add(sum, g->comm->posts[r].in + (first + at) * width, dtype, n);
        }
        ft__sum_store(out + at * width, sum, dtype, n);
    }
    return FT_OK;
}

/* The part of `elems` that member r reduces in an all-reduce. They need not divide evenly: the
   first elems % R members have one element more. */
static void ft__chunk(int64_t elems, int n, int r, int64_t *first, int64_t *count)
{
    int64_t each = elems / n, more = elems % n;
    *first = each * r + (r < more ? r : more);
    *count = each + (r < more ? 1 : 0);
}

static ft_status ft__move(ft_stream *s, char *to, const char *from, size_t bytes)
{
    if (to == from || bytes == 0) return FT_OK;
    if (s->ctx->device == FT_GPU) return ft__gpu_copy(s, to, from, bytes);
    memcpy(to, from, bytes);
    return FT_OK;
}

static ft_status ft__move_all_gather(const ft_group *g, ft_stream *s, const ft__post *own)
{
    size_t slot = (size_t)(own->elems / g->n) * ft_dtype_bytes(own->dtype);
    for (int r = 0; r < g->n; r++)
        FT_TRY(ft__move(s, own->out + (size_t)r * slot, g->comm->posts[r].in, slot));
    return FT_OK;
}

/* A member tells the others' streams that its own has come to this point. */
static ft_status ft__signal(const ft_group *g, ft_stream *s, int moment)
{
    if (s->ctx->device != FT_GPU) return FT_OK;
    return ft__gpu_signal(s, g->comm->signals[g->rank][moment]);
}

static ft_status ft__await(const ft_group *g, ft_stream *s, int moment)
{
    if (s->ctx->device != FT_GPU) return FT_OK;
    for (int r = 0; r < g->n; r++)
        if (r != g->rank) FT_TRY(ft__gpu_await(s, g->comm->signals[r][moment]));
    return FT_OK;
}

/* Each member sums its chunk in place; the others take it from there. */
static ft_status ft__move_all_reduce(ft_group *g, ft_stream *s, const ft__post *own)
{
    int64_t width = (int64_t)ft_dtype_bytes(own->dtype), first, count;
    ft__chunk(own->elems, g->n, g->rank, &first, &count);
    ft_status status = ft__sum(g, s, first, count, own->out + first * width);
    if (status == FT_OK) status = ft__signal(g, s, FT__HALF);
    ft__pass(g);
    if (status == FT_OK) status = ft__await(g, s, FT__HALF);
    for (int r = 0; r < g->n && status == FT_OK; r++) {
        ft__chunk(own->elems, g->n, r, &first, &count);
        if (r == g->rank) continue;
        status = ft__move(s, own->out + first * width, g->comm->posts[r].in + first * width,
                          (size_t)(count * width));
    }
    return status;
}

/* A group of one: its only slot is the whole. */
static ft_status ft__move_alone(ft_stream *s, const ft__post *own)
{
    if (own->kind != FT_ALL_GATHER && own->kind != FT_REDUCE_SCATTER) return FT_OK;
    return ft__move(s, own->out, own->in, (size_t)own->elems * ft_dtype_bytes(own->dtype));
}

static ft_status ft__move_kind(ft_group *g, ft_stream *s, const ft__post *own)
{
    int64_t count = own->elems / g->n;
    if (own->kind == FT_ALL_GATHER) return ft__move_all_gather(g, s, own);
    if (own->kind == FT_REDUCE_SCATTER) return ft__sum(g, s, count * g->rank, count, own->out);
    if (own->kind == FT_ALL_REDUCE) return ft__move_all_reduce(g, s, own);
    if (own->kind == FT_BROADCAST && g->rank != own->root)
        return ft__move(s, own->out, g->comm->posts[own->root].in,
                        (size_t)own->elems * ft_dtype_bytes(own->dtype));
    return FT_OK;
}

typedef struct ft__job {
    ft_group *group;
    ft_stream *stream;
    ft__work *work;
    ft__post post;
} ft__job;

/* Whatever becomes of the moving, all pass. */
static ft_status ft__collective_run(const ft__job *job)
{
    ft_group *g = job->group;
    ft_stream *s = job->stream;
    const ft__post *own = &job->post;
    ft__delay(g->ctx);
    if (g->n == 1) return ft__move_alone(s, own);
    if (g->nccl) return ft__nccl_collective(g, s, own);
    FT_TRY(ft__signal(g, s, FT__READY));
    FT_TRY(ft__meet(g, own));
    ft_status status = ft__await(g, s, FT__READY);
    if (status == FT_OK || own->kind == FT_ALL_REDUCE) {
        ft_status moved = ft__move_kind(g, s, own);
        if (status == FT_OK) status = moved;
    }
    if (status == FT_OK) status = ft__signal(g, s, FT__DONE);
    ft__pass(g);
    if (status == FT_OK) status = ft__await(g, s, FT__DONE);
    ft__comm_leave(g);
    return status;
}

/* A collective, on its stream's thread. */
static ft_status ft__collective_task(void *arg)
{
    ft__job *job = (ft__job *)arg;
    ft__work_begin(job->stream, job->work);
    ft_status status = ft__collective_run(job);
    ft__work_end(job->stream, job->work);
    return status;
}

/* -- calls: checked and counted on the host, on meta too -- */

static ft_status ft__collective_check(const ft_group *g, const ft_stream *stream,
                                      ft_collective kind)
{
    if (!g) return ft_error(FT_ERR_ARG, "%s: group is NULL", ft_collective_name(kind));
    if (stream && stream->ctx == g->ctx) return FT_OK;
    return ft_error(FT_ERR_ARG, "%s on group \"%s\": the stream %s", ft_collective_name(kind),
                    g->name, stream ? "belongs to another rank" : "is NULL");
}

static ft_status ft__operand_check(const ft_group *g, ft_collective kind, const char *role,
                                   const ft_tensor *t)
{
    const char *op = ft_collective_name(kind);
    char reader[128];
    if (!t) return ft_error(FT_ERR_ARG, "%s on group \"%s\": %s is NULL", op, g->name, role);
    if (t->ctx != g->ctx) {
        return ft_error(FT_ERR_ARG, "%s on group \"%s\": %s belongs to another rank", op, g->name,
                        role);
    }
    snprintf(reader, sizeof reader, "%s on group \"%.60s\" (%s)", op, g->name, role);
    return ft__readable((ft_tensor *)(uintptr_t)t, reader);
}

static ft_status ft__sum_check(const ft_group *g, ft_collective kind, ft_dtype dtype)
{
    if (dtype == FT_F32 || dtype == FT_BF16) return FT_OK;
    return ft_error(FT_ERR_UNSUPPORTED, "%s on group \"%s\": sums of %s are not defined; use fp32 "
                    "or bf16", ft_collective_name(kind), g->name, ft_dtype_name(dtype));
}

/* The tensor at the bottom of a view and the element of it at which the view begins. They tell on
   every device, also without storage, whether two tensors share memory. */
static const ft_tensor *ft__view_root(const ft_tensor *t, int64_t *first)
{
    *first = 0;
    for (; t->base; t = t->base) *first += t->offset_elems;
    return t;
}

/* The elements by which b begins after a in shared memory; 0 as the result when they share none. */
static int ft__overlap(const ft_tensor *a, const ft_tensor *b, int64_t *distance)
{
    int64_t first_a, first_b;
    if (ft__view_root(a, &first_a) != ft__view_root(b, &first_b)) return 0;
    *distance = first_b - first_a;
    return first_b < first_a + ft_numel(a) && first_a < first_b + ft_numel(b);
}

/* full holds R shards; where the two share memory, shard is exactly this rank's slot. */
static ft_status ft__shard_check(const ft_group *g, ft_collective kind, const ft_tensor *full,
                                 const ft_tensor *shard)
{
    const char *op = ft_collective_name(kind);
    int64_t n = ft_numel(shard), distance = 0;
    FT_TRY(ft__operand_check(g, kind, "full", full));
    if (full->dtype != shard->dtype) {
        return ft_error(FT_ERR_SHAPE, "%s on group \"%s\": full is %s, shard is %s; they must be "
                        "of one dtype", op, g->name, ft_dtype_name(full->dtype),
                        ft_dtype_name(shard->dtype));
    }
    if (ft_numel(full) % g->n != 0 || ft_numel(full) / g->n != n) {
        return ft_error(FT_ERR_SHAPE, "%s on group \"%s\": full has %lld elements, it must have "
                        "%d ranks x %lld of the shard", op, g->name, (long long)ft_numel(full),
                        g->n, (long long)n);
    }
    if (!ft__overlap(full, shard, &distance) || distance == n * g->rank) return FT_OK;
    return ft_error(FT_ERR_ARG, "%s on group \"%s\": shard overlaps full at element %lld; in "
                    "place it must be the slot of group rank %d, which begins at %lld", op,
                    g->name, (long long)distance, g->rank, (long long)(n * g->rank));
}

static ft_status ft__collective(ft_group *g, ft_stream *stream, const ft__post *post,
                                int64_t sent_bytes)
{
    ft__job job;
    job.group = g;
    job.stream = stream;
    job.post = *post;
    FT_TRY(ft__work_new(stream, ft_collective_name((ft_collective)post->kind), g->name,
                        &job.work));
    g->last = stream;
    g->traffic.calls[post->kind]++;
    g->traffic.sent_bytes[post->kind] += sent_bytes;
    return ft_stream_run(stream, ft__collective_task, &job, sizeof job);
}

static ft__post ft__post_make(ft_collective kind, const ft_tensor *whole, const ft_tensor *in,
                              const ft_tensor *out)
{
    ft__post post;
    memset(&post, 0, sizeof post);
    post.kind = (int)kind;
    post.dtype = whole->dtype;
    post.elems = ft_numel(whole);
    post.in = (const char *)ft_data(in);
    post.out = (char *)ft_data(out);
    return post;
}

/* Unlike the other collectives this one does not count as a write to tapes that saved `full` or a
   part of it: gathering released weights again brings back the values that they had. */
ft_status ft_all_gather(ft_group *group, ft_stream *stream, const ft_tensor *shard,
                        ft_tensor *full)
{
    FT_TRY(ft__collective_check(group, stream, FT_ALL_GATHER));
    FT_TRY(ft__operand_check(group, FT_ALL_GATHER, "shard", shard));
    FT_TRY(ft__shard_check(group, FT_ALL_GATHER, full, shard));
    ft__post post = ft__post_make(FT_ALL_GATHER, full, shard, full);
    return ft__collective(group, stream, &post, (int64_t)ft_bytes(shard) * (group->n - 1));
}

ft_status ft_reduce_scatter(ft_group *group, ft_stream *stream, const ft_tensor *full,
                            ft_tensor *shard)
{
    FT_TRY(ft__collective_check(group, stream, FT_REDUCE_SCATTER));
    FT_TRY(ft__operand_check(group, FT_REDUCE_SCATTER, "shard", shard));
    FT_TRY(ft__shard_check(group, FT_REDUCE_SCATTER, full, shard));
    FT_TRY(ft__sum_check(group, FT_REDUCE_SCATTER, full->dtype));
    ft__touch(shard);
    ft__post post = ft__post_make(FT_REDUCE_SCATTER, full, full, shard);
    return ft__collective(group, stream, &post, (int64_t)ft_bytes(shard) * (group->n - 1));
}

/* Counted as sent: each of the two passes moves every chunk but this rank's own past it, so
   2 (N - own chunk) bytes. That is 2 N (R-1)/R where R divides the elements, and in any case
   2 N (R-1) over all ranks together. */
ft_status ft_all_reduce(ft_group *group, ft_stream *stream, ft_tensor *tensor)
{
    FT_TRY(ft__collective_check(group, stream, FT_ALL_REDUCE));
    FT_TRY(ft__operand_check(group, FT_ALL_REDUCE, "tensor", tensor));
    FT_TRY(ft__sum_check(group, FT_ALL_REDUCE, tensor->dtype));
    ft__touch(tensor);
    ft__post post = ft__post_make(FT_ALL_REDUCE, tensor, tensor, tensor);
    int64_t first, count;
    ft__chunk(post.elems, group->n, group->rank, &first, &count);
    return ft__collective(group, stream, &post,
                          2 * (post.elems - count) * (int64_t)ft_dtype_bytes(post.dtype));
}

ft_status ft_broadcast(ft_group *group, ft_stream *stream, ft_tensor *tensor, int root)
{
    FT_TRY(ft__collective_check(group, stream, FT_BROADCAST));
    FT_TRY(ft__operand_check(group, FT_BROADCAST, "tensor", tensor));
    if (root < 0 || root >= group->n) {
        return ft_error(FT_ERR_ARG, "broadcast on group \"%s\": root %d is outside its %d ranks",
                        group->name, root, group->n);
    }
    if (group->rank != root) ft__touch(tensor);
    ft__post post = ft__post_make(FT_BROADCAST, tensor, tensor, tensor);
    post.root = root;
    int64_t sent = group->rank == root ? (int64_t)ft_bytes(tensor) * (group->n - 1) : 0;
    return ft__collective(group, stream, &post, sent);
}

ft_status ft_barrier(ft_group *group, ft_stream *stream)
{
    FT_TRY(ft__collective_check(group, stream, FT_BARRIER));
    ft__post post;
    memset(&post, 0, sizeof post);
    post.kind = FT_BARRIER;
    return ft__collective(group, stream, &post, 0);
}

/* Runs in the caller's thread. The group's earlier work is waited for, so that its order holds. */
ft_status ft_agree(ft_group *group, const char *what, uint64_t value)
{
    if (!group || !what) {
        return ft_error(FT_ERR_ARG, "ft_agree: %s is NULL", group ? "what" : "group");
    }
    if (group->ctx->device == FT_META) return FT_OK;
    FT_TRY(ft_stream_sync(ft_stream_get(group->ctx, FT_STREAM_COMPUTE)));
    if (group->last) FT_TRY(ft_stream_sync(group->last));
    if (group->n == 1) return FT_OK;
    ft__post post;
    memset(&post, 0, sizeof post);
    post.kind = FT__AGREE;
    post.what = what;
    post.value = value;
    ft__delay(group->ctx);
    if (group->nccl)
        return ft__nccl_agree(group, ft_stream_get(group->ctx, FT_STREAM_COMPUTE), &post);
    FT_TRY(ft__meet(group, &post));
    ft__comm_leave(group);
    return FT_OK;
}

/* -- exchange: sends go to the receivers' inboxes, and receives take them out -- */

typedef struct ft__exchange { /* its messages follow */
    ft_group *group;
    ft_stream *stream;
    ft__work *work;
    int64_t n;
} ft__exchange;

static void ft__message_text(char *text, const ft__comm *c, const ft__message *m)
{
    int own = m->is_send ? m->from : m->to, peer = m->is_send ? m->to : m->from;
    ft__append(text, "rank %d %s %lld %s elements %s rank %d", c->ranks[own],
               m->is_send ? "sends" : "receives", (long long)m->elems, ft_dtype_name(m->dtype),
               m->is_send ? "to" : "from", c->ranks[peer]);
}

/* One wait for the peer of `m`, or the reason why waiting is in vain. World locked. A peer that
   waits in `meet` waits for this member too, in another call: neither would ever go on. */
static ft_status ft__exchange_wait(ft_group *g, const ft__message *m,
                                   const struct timespec *deadline, int *expired)
{
    ft__comm *c = g->comm;
    ft__world *world = g->ctx->world;
    int peer = m->is_send ? m->to : m->from;
    char text[FT__TEXT_BYTES] = "";
    if (c->failed != FT_OK) return ft__comm_error(c);
    if (world->aborted) return ft__abort_error(world, g->ctx->rank);
    if (!c->arrived[peer] && !world->ended[c->ranks[peer]] && !*expired) {
        *expired = pthread_cond_timedwait(&c->wake, &world->lock, deadline) == ETIMEDOUT;
        return FT_OK;
    }
    ft__message_text(text, c, m);
    if (c->arrived[peer]) {
        ft__append(text, ", which is in ");
        ft__post_text(text, &c->posts[peer]);
        ft__append(text, "; every member must make the same calls");
        return ft__comm_fail(g, FT_ERR_COMM, text);
    }
    if (world->ended[c->ranks[peer]]) {
        ft__append(text, ", but rank %d ended without joining the exchange", c->ranks[peer]);
        return ft__comm_fail(g, FT_ERR_COMM, text);
    }
    ft__append(text, ", which did not %s within %g s; it is stuck, slower than timeout_s, or has "
               "skipped this call", m->is_send ? "receive" : "send", g->ctx->config.timeout_s);
    return ft__comm_fail(g, FT_ERR_TIMEOUT, text);
}

static void ft__message_post(ft__comm *c, ft__message *m)
{
    ft__message **at = &c->inbox[m->to];
    while (*at) at = &(*at)->next;
    m->next = NULL;
    *at = m;
}

/* Takes m out of its inbox, if it is there. */
static void ft__message_unlink(ft__comm *c, ft__message *m)
{
    ft__message **at = &c->inbox[m->to];
    while (*at && *at != m) at = &(*at)->next;
    if (*at) *at = m->next;
}

/* Where the oldest message for `m` is. */
static ft__message *ft__message_find(const ft__comm *c, const ft__message *m)
{
    ft__message *found = c->inbox[m->to];
    while (found && found->from != m->from) found = found->next;
    return found;
}

/* The data of `sent` into m. Afterwards the sender finds in it what its stream is to await. */
static ft_status ft__message_move(ft_group *g, ft_stream *s, ft__message *m, ft__message *sent)
{
    if (s->ctx->device == FT_GPU) FT_TRY(ft__gpu_await(s, sent->signal));
    FT_TRY(ft__move(s, m->data, sent->data, (size_t)m->elems * ft_dtype_bytes(m->dtype)));
    sent->signal = g->comm->signals[g->rank][FT__DONE];
    return ft__signal(g, s, FT__DONE);
}

/* Receives m. World locked, but not while the data moves: the sender cannot withdraw a message that
   is being read. */
static ft_status ft__message_receive(ft_group *g, ft_stream *s, ft__message *m)
{
    ft__comm *c = g->comm;
    struct timespec deadline = ft__deadline(g->ctx->config.timeout_s);
    int expired = 0;
    ft__message *sent;
    while (!(sent = ft__message_find(c, m))) {
        FT_TRY(ft__exchange_wait(g, m, &deadline, &expired));
    }
    if (sent->elems != m->elems || sent->dtype != m->dtype) {
        char text[FT__TEXT_BYTES] = "ranks disagree; ";
        ft__message_text(text, c, sent);
        ft__append(text, "; ");
        ft__message_text(text, c, m);
        return ft__comm_fail(g, FT_ERR_COMM, text);
    }
    ft__message_unlink(c, sent);
    sent->state = FT__READING;
    pthread_mutex_unlock(&g->ctx->world->lock);
    ft_status status = ft__message_move(g, s, m, sent);
    pthread_mutex_lock(&g->ctx->world->lock);
    sent->state = FT__READ;
    pthread_cond_broadcast(&c->wake);
    return status;
}

/* Waits until a message of ours was read. After a failure the unread ones are taken back. */
static ft_status ft__message_finish(ft_group *g, ft_stream *s, ft__message *m, ft_status status)
{
    ft__comm *c = g->comm;
    struct timespec deadline = ft__deadline(g->ctx->config.timeout_s);
    int expired = 0;
    while (m->state == FT__UNREAD && status == FT_OK) {
        status = ft__exchange_wait(g, m, &deadline, &expired);
    }
    if (m->state == FT__UNREAD) ft__message_unlink(c, m);
    while (m->state == FT__READING) pthread_cond_wait(&c->wake, &g->ctx->world->lock);
    if (m->state == FT__READ && s->ctx->device == FT_GPU) { /* the copy is queued */
        ft_status waited = ft__gpu_await(s, m->signal);
        if (status == FT_OK) status = waited;
    }
    return status;
}

static ft_status ft__exchange_locked(ft_group *g, ft_stream *s, ft__message *messages, int64_t n)
{
    ft__comm *c = g->comm;
    FT_TRY(ft__comm_enter(g));
    c->exchanging++;
    for (int64_t i = 0; i < n; i++) {
        messages[i].signal = c->signals[g->rank][FT__READY];
        if (messages[i].is_send) ft__message_post(c, &messages[i]);
    }
    pthread_cond_broadcast(&c->wake);
    ft_status status = FT_OK;
    for (int64_t i = 0; i < n && status == FT_OK; i++) {
        if (!messages[i].is_send) status = ft__message_receive(g, s, &messages[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        if (messages[i].is_send) status = ft__message_finish(g, s, &messages[i], status);
    }
    c->exchanging--;
    c->busy[g->rank] = 0;
    return status;
}

static ft_status ft__exchange_run(ft__exchange *x)
{
    ft_group *g = x->group;
    ft__delay(g->ctx);
    if (g->nccl) return ft__nccl_exchange(g, x->stream, (ft__message *)(void *)(x + 1), x->n);
    FT_TRY(ft__signal(g, x->stream, FT__READY));
    pthread_mutex_lock(&g->ctx->world->lock);
    ft_status status = ft__exchange_locked(g, x->stream, (ft__message *)(void *)(x + 1), x->n);
    pthread_mutex_unlock(&g->ctx->world->lock);
    return status;
}

static ft_status ft__exchange_task(void *arg)
{
    ft__exchange *x = (ft__exchange *)arg;
    ft__work_begin(x->stream, x->work);
    ft_status status = ft__exchange_run(x);
    ft__work_end(x->stream, x->work);
    return status;
}

/* Each op's peer and tensor; no receive may overlap another op's tensor; a rank's messages to
   itself must find their receives in the same call. */
static ft_status ft__exchange_check(const ft_group *g, int n, const ft_p2p *ops)
{
    int to_self = 0;
    int64_t distance;
    if (n < 0 || (n > 0 && !ops)) {
        return ft_error(FT_ERR_ARG, "exchange on group \"%s\": %d ops%s", g->name, n,
                        ops ? "" : ", ops is NULL");
    }
    for (int i = 0; i < n; i++) {
        if (ops[i].peer < 0 || ops[i].peer >= g->n) {
            return ft_error(FT_ERR_ARG, "exchange on group \"%s\": op %d has peer %d, outside its "
                            "%d ranks", g->name, i, ops[i].peer, g->n);
        }
        FT_TRY(ft__operand_check(g, FT_SEND, ops[i].is_send ? "sent tensor" : "received tensor",
                                 ops[i].tensor));
        if (ops[i].peer == g->rank) to_self += ops[i].is_send ? 1 : -1;
        for (int j = 0; j < i; j++) {
            if (ops[i].is_send && ops[j].is_send) continue;
            if (!ft__overlap(ops[i].tensor, ops[j].tensor, &distance)) continue;
            return ft_error(FT_ERR_ARG, "exchange on group \"%s\": the tensors of ops %d and %d "
                            "overlap, and one of them is received", g->name, j, i);
        }
    }
    if (to_self == 0) return FT_OK;
    return ft_error(FT_ERR_ARG, "exchange on group \"%s\": this rank's sends to itself and "
                    "receives from itself differ in number by %d", g->name, to_self);
}

/* Fills in the messages and counts the sends. What a rank sends itself is on no wire: 0 bytes. */
static void ft__exchange_fill(ft_group *g, int n, const ft_p2p *ops, ft__message *messages)
{
    for (int i = 0; i < n; i++) {
        ft__message *m = &messages[i];
        m->is_send = ops[i].is_send != 0;
        m->from = m->is_send ? g->rank : ops[i].peer;
        m->to = m->is_send ? ops[i].peer : g->rank;
        m->dtype = ops[i].tensor->dtype;
        m->elems = ft_numel(ops[i].tensor);
        m->data = (char *)ft_data(ops[i].tensor);
        if (!m->is_send) {
            ft__touch(ops[i].tensor);
            continue;
        }
        g->traffic.calls[FT_SEND]++;
        if (m->to != g->rank) g->traffic.sent_bytes[FT_SEND] += (int64_t)ft_bytes(ops[i].tensor);
    }
}

ft_status ft_exchange(ft_group *group, ft_stream *stream, int n, const ft_p2p *ops)
{
    FT_TRY(ft__collective_check(group, stream, FT_SEND));
    FT_TRY(ft__exchange_check(group, n, ops));
    size_t bytes = sizeof(ft__exchange) + (size_t)n * sizeof(ft__message);
    ft__exchange *x = (ft__exchange *)ft__zalloc(bytes);
    if (!x) {
        return ft_error(FT_ERR_OOM, "exchange on group \"%s\": no %zu bytes of host memory",
                        group->name, bytes);
    }
    x->group = group;
    x->stream = stream;
    x->n = n;
    ft__exchange_fill(group, n, ops, (ft__message *)(void *)(x + 1));
    group->last = stream;
    ft_status status = ft__work_new(stream, "exchange", group->name, &x->work);
    if (status == FT_OK) status = ft_stream_run(stream, ft__exchange_task, x, bytes);
    FT_FREE(x);
    return status;
}

/* ------------------------------------------------------------------------------- >>memory.impl */

typedef struct ft__slab ft__slab;
typedef struct ft__block ft__block;
typedef struct ft__phase ft__phase;

struct ft_storage {
    ft_ctx *ctx;
    void *data;            /* aligned to 64; NULL on meta */
    void *raw;             /* system: what ft__raw_free takes back */
    ft__block *block;      /* caching */
    ft__phase *phase;      /* of the plan that it is an allocation of, or NULL */
    int64_t item;          /* which one */
    size_t request_bytes, accounted_bytes;
    ft_tag tag;
    int refs;              /* tensors that share it: gradients passed through, storage taken over */
    ft_storage *prev, *next;
};

typedef struct ft__used { /* bytes of the arena that were freed, and may still be in use */
    size_t begin, end;
    ft_event last;
    uint64_t order;        /* of two events of a stream the later one has the higher number */
} ft__used;

struct ft__work {
    ft_work told;
    void *stamp[2];        /* FT_GPU: events before and after; kept for the next work here */
};

typedef struct ft__works { /* blocks stay where they are: streams' threads write into them */
    struct ft__works *next;
    int n;
    ft__work item[256];
} ft__works;

struct ft__memory {
    ft_mem_stats stats;
    int64_t moments;       /* allocations so far */
    int64_t n_live;        /* storages booked now */
    ft_mem_event *events;
    int64_t n_events, cap_events;
    ft_span *spans;        /* that have ended */
    int64_t n_spans, cap_spans;
    ft_span open[8];
    int n_open;
    double begin_s;        /* when the rank began */
    ft__works *works, *works_at; /* the first block; the one that is being filled */
    ft_work *told;         /* what ft_works gave last */
    int64_t cap_told;
    void *clock;           /* FT_GPU: an event, and when on the host it was */
    double clock_s;
    /* Plan: being recorded, or obeyed. */
    struct ft__rank_plan *plan; /* NULL: none */
    ft__phase *phase;      /* that is open; the set-up until the first one begins; or NULL */
    int recording;         /* the open phase for the first time; else it is compared */
    int64_t item, moment, n_items_live; /* of the open phase */
    char stray[96];        /* what it did that a phase must not; "" */
    /* Arena. */
    char *arena;
    size_t arena_bytes;
    int has_arena;
    ft__used *used;        /* ascending, disjoint */
    int64_t n_used, cap_used;
    uint64_t frees;        /* so far: the order of events */
    /* Caching. */
    ft__slab *chunks;
    int64_t n_chunks, n_blocks;
    ft__block **free_blocks; /* by pool, bytes, chunk, offset */
    int64_t n_free, cap_free;
    size_t chunk_bytes;    /* of all chunks, now */
};

static const char *const ft__tag_names[FT_TAG_COUNT] = {
    "param", "grad", "optim", "act", "gather", "comm", "workspace", "other"
};

FT_API const char *ft_tag_name(ft_tag tag)
{
    return (unsigned)tag < FT_TAG_COUNT ? ft__tag_names[tag] : "?";
}

FT_API size_t ft_accounted_bytes(size_t bytes)
{
    if (bytes > SIZE_MAX - FT_ALIGN_BYTES) return SIZE_MAX / FT_ALIGN_BYTES * FT_ALIGN_BYTES;
    return (bytes + FT_ALIGN_BYTES - 1) / FT_ALIGN_BYTES * FT_ALIGN_BYTES;
}

static double ft__now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static ft_status ft__serving_begin(ft_ctx *ctx);

/* From here the device's clock is read as the host's. */
static void ft__clock_set(ft_ctx *ctx)
{
    ft__memory *m = ctx->memory;
    if (!ctx->config.timeline || ctx->device != FT_GPU) return;
    ft__gpu_stamp(&ctx->streams[FT_STREAM_COMPUTE], &m->clock);
    ft__gpu_stamp_wait(m->clock);
    m->clock_s = ft__now_s() - m->begin_s;
}

static ft_status ft__memory_begin(ft_ctx *ctx)
{
    ctx->memory = (ft__memory *)FT_MALLOC(sizeof *ctx->memory);
    if (!ctx->memory) return ft_error(FT_ERR_OOM, "no host memory for the allocator's books");
    memset(ctx->memory, 0, sizeof *ctx->memory);
    ctx->memory->begin_s = ft__now_s();
    ctx->where_segment = -1;
    ft__clock_set(ctx);
    if (ctx->config.probe) ft__probe_attach(ctx);
    ft_status status = ft__serving_begin(ctx);
    if (status != FT_OK) {
        FT_FREE(ctx->memory);
        ctx->memory = NULL;
    }
    return status;
}

FT_API void ft_mem_get(const ft_ctx *ctx, ft_mem_stats *stats) { *stats = ctx->memory->stats; }

FT_API void ft_mem_reset_peak(ft_ctx *ctx)
{
    ft_mem_stats *s = &ctx->memory->stats;
    s->peak_bytes = s->live_bytes;
    s->reserved_bytes = ctx->memory->chunk_bytes + ctx->memory->arena_bytes;
    memcpy(s->at_peak, s->live, sizeof s->live);
    memcpy(s->highest, s->live, sizeof s->live);
    s->peak_moment = ctx->memory->moments;
    s->peak_where[0] = s->tensor_peak_where[0] = 0;
    s->peak_action[0] = s->tensor_peak_action[0] = 0;
    s->tensor_peak_bytes = s->live_bytes - s->live[FT_TAG_WORKSPACE];
    memcpy(s->at_tensor_peak, s->live, sizeof s->live);
    s->at_tensor_peak[FT_TAG_WORKSPACE] = 0;
}

FT_API int64_t ft_mem_timeline(const ft_ctx *ctx, const ft_mem_event **events)
{
    *events = ctx->memory->events;
    return ctx->memory->n_events;
}

FT_API void ft_mem_timeline_clear(ft_ctx *ctx)
{
    ft__memory *m = ctx->memory;
    m->n_events = m->n_spans = 0;
    for (int i = 0; i < m->n_open; i++) m->open[i].begin_event = 0;
    for (int k = 0; k < FT_STREAM_COUNT && m->works && ft__async(ctx); k++)
        ft__stream_drain(&ctx->streams[k]); /* their threads write into the works */
    for (ft__works *b = m->works; b; b = b->next) b->n = 0;
    m->works_at = m->works;
    ft__clock_set(ctx);
}

/* Room in an array for `need` elements of `each` bytes, `first` of them to begin with; who asks in
   time never fails in a free. `what` it holds is for messages. */
static ft_status ft__array_reserve(void **array, int64_t used, int64_t need, int64_t *cap,
                                   int64_t first, size_t each, const char *what)
{
    int64_t more = *cap ? *cap : first;
    if (need <= *cap) return FT_OK;
    while (more < need) more *= 2;
    void *grown = FT_MALLOC((size_t)more * each);
    if (!grown)
        return ft_error(FT_ERR_OOM, "no host memory for %lld %s", (long long)more, what);
    if (used) memcpy(grown, *array, (size_t)used * each);
    FT_FREE(*array);
    *array = grown;
    *cap = more;
    return FT_OK;
}

/* Room for an allocation, for its free, and for those of all that lives: no free is ever lost. */
static ft_status ft__timeline_reserve(ft__memory *m)
{
    void *array = m->events;
    FT_TRY(ft__array_reserve(&array, m->n_events, m->n_events + m->n_live + 2, &m->cap_events, 1024,
                             sizeof *m->events, "events of the timeline"));
    m->events = (ft_mem_event *)array;
    return FT_OK;
}

static void ft__timeline_add(ft_ctx *ctx, const ft_storage *st, int64_t delta)
{
    ft__memory *m = ctx->memory;
    ft_mem_event *e = &m->events[m->n_events++];
    e->delta_bytes = delta;
    e->live_bytes = m->stats.live_bytes;
    e->request_bytes = st->request_bytes;
    e->time_s = ft__now_s() - m->begin_s;
    e->tag = st->tag;
    e->segment = ctx->where_segment;
    e->op = ctx->where_op ? ctx->where_op : "";
    e->phase = ctx->where_phase ? ctx->where_phase : "";
}

/* "backward swiglu in layer.3" */
static void ft__where_sentence(const ft_ctx *ctx, char *text, size_t text_bytes)
{
    const char *phase = ctx->where_phase ? ctx->where_phase : "";
    const char *segment = ctx->where_segment_name;
    snprintf(text, text_bytes, "%s%s%s%s%s", phase, *phase ? " " : "",
             ctx->where_op ? ctx->where_op : "", segment ? " in " : "", segment ? segment : "");
}

/* "backward of micro-batch 2, chunk 1" */
static void ft__action_print(const ft__memory *m, char *text, size_t text_bytes)
{
    const ft_span *span = m->n_open ? &m->open[m->n_open - 1] : NULL;
    text[0] = 0;
    if (!span) return;
    int at = snprintf(text, text_bytes, "%s", span->name);
    if (span->micro_batch >= 0 && at < (int)text_bytes)
        at += snprintf(text + at, text_bytes - (size_t)at, " of micro-batch %d",
                       span->micro_batch);
    if (span->chunk > 0 && at < (int)text_bytes)
        snprintf(text + at, text_bytes - (size_t)at, ", chunk %d", span->chunk);
}

FT_API ft_status ft_span_begin(ft_ctx *ctx, const char *name, int micro_batch, int chunk)
{
    ft__memory *m = ctx->memory;
    if (m->n_open == (int)(sizeof m->open / sizeof m->open[0]))
        return ft_error(FT_ERR_STATE, "span %s is inside %d others: that is the most", name,
                        m->n_open);
    if (ctx->config.timeline) {
        void *array = m->spans;
        FT_TRY(ft__array_reserve(&array, m->n_spans, m->n_spans + m->n_open + 1, &m->cap_spans,
                                 64, sizeof *m->spans, "spans of the timeline"));
        m->spans = (ft_span *)array;
    }
    ft_span *span = &m->open[m->n_open++];
    memset(span, 0, sizeof *span);
    span->name = name;
    span->micro_batch = micro_batch;
    span->chunk = chunk;
    span->begin_event = m->n_events;
    if (ctx->config.timeline) span->begin_s = ft__now_s() - m->begin_s;
    return FT_OK;
}

FT_API void ft_span_end(ft_ctx *ctx)
{
    ft__memory *m = ctx->memory;
    if (m->n_open == 0) return;
    ft_span *span = &m->open[--m->n_open];
    if (!ctx->config.timeline) return;
    span->end_event = m->n_events;
    span->end_s = ft__now_s() - m->begin_s;
    m->spans[m->n_spans++] = *span;
}

FT_API int64_t ft_spans(const ft_ctx *ctx, const ft_span **spans)
{
    *spans = ctx->memory->spans;
    return ctx->memory->n_spans;
}

/* A place for what is about to be queued; NULL where nobody asked. */
static ft_status ft__work_new(const ft_stream *stream, const char *name, const char *group,
                              ft__work **out)
{
    ft_ctx *ctx = stream->ctx;
    ft__memory *m = ctx->memory;
    *out = NULL;
    if (!ctx->config.timeline || ctx->device == FT_META || !m) return FT_OK;
    if (!m->works_at || m->works_at->n == (int)(sizeof m->works_at->item / sizeof **out)) {
        ft__works *next = m->works_at ? m->works_at->next : m->works;
        if (!next) {
            next = (ft__works *)ft__zalloc(sizeof *next);
            if (!next) return ft_error(FT_ERR_OOM, "no host memory for the timeline's works");
            if (m->works_at) m->works_at->next = next;
            else m->works = next;
        }
        m->works_at = next;
    }
    *out = &m->works_at->item[m->works_at->n++];
    (*out)->told.name = name;
    (*out)->told.phase = group ? "" : ctx->where_phase;
    (*out)->told.stream = stream->kind;
    (*out)->told.begin_s = (*out)->told.end_s = 0;
    snprintf((*out)->told.group, sizeof(*out)->told.group, "%s", group ? group : "");
    return FT_OK;
}

/* Where it runs: on the stream's thread; on a GPU as it is queued. */
static void ft__work_begin(ft_stream *stream, ft__work *work)
{
    if (!work) return;
    if (stream->ctx->device == FT_GPU) ft__gpu_stamp(stream, &work->stamp[0]);
    else work->told.begin_s = ft__now_s() - stream->ctx->memory->begin_s;
}

static void ft__work_end(ft_stream *stream, ft__work *work)
{
    if (!work) return;
    if (stream->ctx->device == FT_GPU) ft__gpu_stamp(stream, &work->stamp[1]);
    else work->told.end_s = ft__now_s() - stream->ctx->memory->begin_s;
}

static void ft__works_free(ft__memory *m)
{
    while (m->works) {
        ft__works *block = m->works;
        for (int i = 0; i < (int)(sizeof block->item / sizeof block->item[0]); i++) {
            ft__gpu_stamp_free(block->item[i].stamp[0]);
            ft__gpu_stamp_free(block->item[i].stamp[1]);
        }
        m->works = block->next;
        FT_FREE(block);
    }
    ft__gpu_stamp_free(m->clock);
    FT_FREE(m->told);
}

FT_API ft_status ft_works(ft_ctx *ctx, const ft_work **works, int64_t *n)
{
    ft__memory *m = ctx->memory;
    int64_t need = 0;
    void *array = m->told;
    *works = NULL;
    *n = 0;
    for (ft__works *b = m->works; b; b = b->next) need += b->n;
    if (need == 0) return FT_OK;
    FT_TRY(ft_sync(ctx));
    FT_TRY(ft__array_reserve(&array, 0, need, &m->cap_told, 1024, sizeof *m->told, "works"));
    m->told = (ft_work *)array;
    for (ft__works *b = m->works; b; b = b->next)
        for (int i = 0; i < b->n; i++) {
            ft_work *told = &m->told[(*n)++];
            *told = b->item[i].told;
            if (ctx->device != FT_GPU) continue;
            FT_TRY(ft__gpu_stamp_time(m->clock, b->item[i].stamp[0], &told->begin_s));
            FT_TRY(ft__gpu_stamp_time(m->clock, b->item[i].stamp[1], &told->end_s));
            told->begin_s += m->clock_s;
            told->end_s += m->clock_s;
        }
    *works = m->told;
    return FT_OK;
}

static void ft__account_peak(ft_ctx *ctx)
{
    ft_mem_stats *s = &ctx->memory->stats;
    size_t tensors = s->live_bytes - s->live[FT_TAG_WORKSPACE];
    if (s->live_bytes > s->peak_bytes) {
        s->peak_bytes = s->live_bytes;
        memcpy(s->at_peak, s->live, sizeof s->live);
        s->peak_moment = ctx->memory->moments;
        ft__where_sentence(ctx, s->peak_where, sizeof s->peak_where);
        ft__action_print(ctx->memory, s->peak_action, sizeof s->peak_action);
    }
    if (tensors > s->tensor_peak_bytes) {
        s->tensor_peak_bytes = tensors;
        memcpy(s->at_tensor_peak, s->live, sizeof s->live);
        s->at_tensor_peak[FT_TAG_WORKSPACE] = 0;
        ft__where_sentence(ctx, s->tensor_peak_where, sizeof s->tensor_peak_where);
        ft__action_print(ctx->memory, s->tensor_peak_action, sizeof s->tensor_peak_action);
    }
}

static const char *ft__where_text(const ft_ctx *ctx)
{
    return ctx->where_op && *ctx->where_op ? ctx->where_op : "a tensor";
}

/* The limit is checked on the accounted size, before the machine is asked: what a plan says fits,
   fits, and what does not fit is refused alike on every device. */
static ft_status ft__account_check(const ft_ctx *ctx, const ft_storage *st)
{
    const ft_mem_stats *s = &ctx->memory->stats;
    size_t limit = ctx->config.memory_limit;
    if (st->accounted_bytes > SIZE_MAX / 2 - s->live_bytes ||
        (limit && s->live_bytes + st->accounted_bytes > limit))
        return ft_error(
            FT_ERR_OOM,
            "%zu bytes (%s, for %s) do not fit: %zu live of a limit of %zu; "
            "a smaller micro-batch, more recomputation or a higher ZeRO stage would help",
            st->accounted_bytes, ft_tag_name(st->tag), ft__where_text(ctx), s->live_bytes, limit);
    return FT_OK;
}

/* Books an allocation that the check has let pass. */
static ft_status ft__account_alloc(ft_ctx *ctx, ft_storage *st)
{
    ft_mem_stats *s = &ctx->memory->stats;
    if (ctx->config.timeline) FT_TRY(ft__timeline_reserve(ctx->memory));
    s->live_bytes += st->accounted_bytes;
    s->live[st->tag] += st->accounted_bytes;
    if (s->live[st->tag] > s->highest[st->tag]) s->highest[st->tag] = s->live[st->tag];
    ctx->memory->moments++;
    ctx->memory->n_live++;
    ft__account_peak(ctx);
    if (ctx->probe) ft__probe_live(ctx);
    if (ctx->config.timeline) ft__timeline_add(ctx, st, (int64_t)st->accounted_bytes);
    return FT_OK;
}

/* -------------------------------------------------------------------------------- >>plan.impl

   What a run on meta asked for, phase by phase, and where an arena will hold it. Phase 0 is the
   set-up. Within a phase time is counted in allocations and frees, so item k lives from `begin` up
   to `end`, and items are in the order of `begin`. */

enum { FT__MAX_PHASES = 16 };

typedef struct ft__item { /* an allocation */
    size_t bytes;         /* accounted */
    size_t offset;        /* in the arena, once placed */
    int64_t begin, end;   /* INT64_MAX: outlives the phase (the set-up alone may) */
    ft_tag tag;
    char op[28];          /* what asked for it, for messages */
} ft__item;

struct ft__phase {
    char name[32];
    ft__item *items;
    int64_t n, cap;
    int recorded;
};

typedef struct ft__rank_plan {
    ft__phase phases[FT__MAX_PHASES];
    int n_phases;                /* 0: this rank did not run */
    int same_as;                 /* a lower rank whose phases, the same as these, stand for both */
    ft_mem_plan_info info;
} ft__rank_plan;

struct ft_mem_plan {
    int world, placed;
    ft__rank_plan *ranks;        /* [world] */
};

FT_API ft_status ft_mem_plan_create(int world, ft_mem_plan **out)
{
    if (world < 1 || world > FT__MAX_WORLD)
        return ft_error(FT_ERR_ARG, "ft_mem_plan_create: world is %d, it must be 1 to %d", world,
                        FT__MAX_WORLD);
    size_t bytes = (size_t)world * sizeof(ft__rank_plan);
    ft_mem_plan *plan = (ft_mem_plan *)FT_MALLOC(sizeof *plan);
    ft__rank_plan *ranks = plan ? (ft__rank_plan *)FT_MALLOC(bytes) : NULL;
    if (!ranks) {
        FT_FREE(plan);
        return ft_error(FT_ERR_OOM, "no host memory for a plan of %d ranks", world);
    }
    memset(plan, 0, sizeof *plan);
    memset(ranks, 0, bytes);
    plan->world = world;
    plan->ranks = ranks;
    for (int r = 0; r < world; r++) ranks[r].same_as = r;
    *out = plan;
    return FT_OK;
}

static void ft__rank_plan_clear(ft__rank_plan *rank)
{
    for (int i = 0; i < rank->n_phases; i++) {
        FT_FREE(rank->phases[i].items);
        rank->phases[i].items = NULL;
    }
    rank->n_phases = 0;
}

FT_API void ft_mem_plan_free(ft_mem_plan *plan)
{
    if (!plan) return;
    for (int r = 0; r < plan->world; r++) ft__rank_plan_clear(&plan->ranks[r]);
    FT_FREE(plan->ranks);
    FT_FREE(plan);
}

FT_API ft_status ft_mem_plan_get(const ft_mem_plan *plan, int rank, ft_mem_plan_info *info)
{
    if (rank < 0 || rank >= plan->world)
        return ft_error(FT_ERR_ARG, "ft_mem_plan_get: rank %d of a plan for %d", rank, plan->world);
    if (!plan->placed)
        return ft_error(FT_ERR_STATE, "ft_mem_plan_get: the plan is not placed yet: call "
                        "ft_mem_plan_place after the run on meta");
    *info = plan->ranks[plan->ranks[rank].same_as].info;
    return FT_OK;
}

static ft_status ft__plan_check(const ft_config *c)
{
    const ft_mem_plan *plan = c->mem_plan;
    if (!plan)
        return ft_error(FT_ERR_ARG, "ft_launch: FT_ALLOC_ARENA needs a plan in config.mem_plan");
    if (plan->world != c->world)
        return ft_error(FT_ERR_ARG, "ft_launch: the memory plan is for %d ranks, the world is %d",
                        plan->world, c->world);
    if (c->device != FT_META && c->allocator == FT_ALLOC_ARENA && !plan->placed)
        return ft_error(FT_ERR_STATE, "ft_launch: the memory plan has no places yet: launch on "
                        "FT_META, then call ft_mem_plan_place");
    return FT_OK;
}

static ft_status ft__phase_new(ft__rank_plan *rank, const char *name, ft__phase **out)
{
    if (rank->n_phases == FT__MAX_PHASES)
        return ft_error(FT_ERR_UNSUPPORTED, "phase %s: a plan has at most %d phases", name,
                        FT__MAX_PHASES - 1);
    ft__phase *phase = &rank->phases[rank->n_phases++];
    memset(phase, 0, sizeof *phase);
    snprintf(phase->name, sizeof phase->name, "%s", name);
    *out = phase;
    return FT_OK;
}

static ft_status ft__phase_grow(ft__phase *phase)
{
    void *array = phase->items;
    FT_TRY(ft__array_reserve(&array, phase->n, phase->n + 1, &phase->cap, 256, sizeof *phase->items,
                             "allocations of the plan"));
    phase->items = (ft__item *)array;
    return FT_OK;
}

/* The allocation that comes must be the one that was planned. */
static ft_status ft__item_check(const ft_ctx *ctx, const ft__phase *phase, int64_t k,
                                const ft_storage *st)
{
    if (k >= phase->n)
        return ft_error(FT_ERR_STATE, "%s: %zu bytes (%s, for %s) are allocation %lld, but only "
                        "%lld were planned: plan the same program, or take the caching allocator",
                        phase->name, st->accounted_bytes, ft_tag_name(st->tag),
                        ft__where_text(ctx), (long long)k + 1, (long long)phase->n);
    const ft__item *item = &phase->items[k];
    if (item->bytes == st->accounted_bytes && item->tag == st->tag) {
        if (item->begin == ctx->memory->moment) return FT_OK;
        return ft_error(FT_ERR_STATE, "%s: before allocation %lld (%s, for %s) %lld buffers were "
                        "freed, and %lld were planned: what lives longer than planned would be "
                        "written over; plan the same program, or take the caching allocator",
                        phase->name, (long long)k + 1, ft_tag_name(st->tag), ft__where_text(ctx),
                        (long long)(ctx->memory->moment - k), (long long)(item->begin - k));
    }
    return ft_error(FT_ERR_STATE, "%s: allocation %lld was planned as %zu bytes (%s, for %s), and "
                    "comes as %zu (%s, for %s): plan the same program, or take the caching "
                    "allocator", phase->name, (long long)k + 1, item->bytes,
                    ft_tag_name(item->tag), item->op, st->accounted_bytes, ft_tag_name(st->tag),
                    ft__where_text(ctx));
}

/* Enters an allocation into the open phase, or compares it with what the plan has there. */
static ft_status ft__plan_alloc(ft_ctx *ctx, ft_storage *st)
{
    ft__memory *m = ctx->memory;
    ft__phase *phase = m->phase;
    if (!phase) return FT_OK;
    if (m->recording) {
        FT_TRY(ft__phase_grow(phase));
        ft__item *item = &phase->items[phase->n++];
        memset(item, 0, sizeof *item);
        item->bytes = st->accounted_bytes;
        item->begin = m->moment;
        item->end = INT64_MAX;
        item->tag = st->tag;
        snprintf(item->op, sizeof item->op, "%.*s", (int)sizeof item->op - 1, ft__where_text(ctx));
    } else {
        FT_TRY(ft__item_check(ctx, phase, m->item, st));
    }
    st->phase = phase;
    st->item = m->item++;
    m->moment++;
    m->n_items_live++;
    return FT_OK;
}

static void ft__plan_release(ft_ctx *ctx, const ft_storage *st)
{
    ft__memory *m = ctx->memory;
    if (!m->plan || !m->phase) return;
    if (st->phase == m->phase) {
        if (m->recording) st->phase->items[st->item].end = m->moment;
        m->moment++;
        m->n_items_live--;
    } else if (!m->stray[0]) {
        snprintf(m->stray, sizeof m->stray, "it freed %zu bytes (%s) that were there before it",
                 st->accounted_bytes, ft_tag_name(st->tag));
    }
}

static ft_status ft__phase_whole(const ft__memory *m)
{
    const ft__phase *phase = m->phase;
    if (m->recording || m->item == phase->n) return FT_OK;
    return ft_error(FT_ERR_STATE, "%s ended after %lld of %lld planned allocations: plan the same "
                    "program, or take the caching allocator", phase->name, (long long)m->item,
                    (long long)phase->n);
}

FT_API ft_status ft_mem_phase_begin(ft_ctx *ctx, const char *name)
{
    ft__memory *m = ctx->memory;
    ft__rank_plan *plan = m->plan;
    ft__phase *phase = NULL;
    if (!plan) return FT_OK;
    if (m->phase && m->phase != &plan->phases[0])
        return ft_error(FT_ERR_STATE, "phase %s begins inside phase %s: phases do not nest", name,
                        m->phase->name);
    if (m->phase) FT_TRY(ft__phase_whole(m)); /* the set-up */
    if (m->phase && m->recording) m->phase->recorded = 1;
    m->phase = NULL;
    for (int i = 1; i < plan->n_phases; i++)
        if (strncmp(plan->phases[i].name, name, sizeof phase->name - 1) == 0)
            phase = &plan->phases[i];
    if (!phase && ctx->config.mem_plan->placed)
        return ft_error(FT_ERR_STATE, "phase %s is not in the memory plan: the run on meta must "
                        "pass through it once", name);
    if (!phase) FT_TRY(ft__phase_new(plan, name, &phase));
    m->phase = phase;
    m->recording = !phase->recorded;
    m->item = m->moment = m->n_items_live = 0;
    m->stray[0] = 0;
    return FT_OK;
}

FT_API ft_status ft_mem_phase_end(ft_ctx *ctx)
{
    ft__memory *m = ctx->memory;
    if (!m->plan) return FT_OK;
    if (!m->phase || m->phase == &m->plan->phases[0])
        return ft_error(FT_ERR_STATE, "ft_mem_phase_end: no phase has begun");
    FT_TRY(ft__phase_whole(m));
    if (m->n_items_live || m->stray[0])
        return ft_error(FT_ERR_STATE, "phase %s does not end as it began: %lld of its allocations "
                        "are still live%s%s", m->phase->name, (long long)m->n_items_live,
                        m->stray[0] ? "; " : "", m->stray);
    if (m->recording) m->phase->recorded = 1; /* a placed plan is shared, and only read */
    m->phase = NULL;
    return FT_OK;
}

/* Placement. Buffers are rectangles, time by bytes, that must not overlap; each is put, in some
   order, into a gap between those placed before it that live at the same time. Which order is best
   depends on the program, so several are tried; then, while it helps, the buffer that made the top
   goes first. */

typedef struct ft__rank_of { double key; int64_t item; } ft__rank_of;
typedef struct ft__range { size_t begin, end; } ft__range;

typedef struct ft__placer {
    ft__item *items;
    int64_t n, leaves;
    int64_t *latest;       /* [2 leaves] tree over items: the latest end of those that are placed */
    ft__rank_of *order;    /* [n] */
    size_t *best;          /* [n] offsets of the best placement so far */
    ft__range *found;      /* [n] */
    int64_t n_found;
    size_t base;           /* lowest offset of what moves */
    size_t bound;          /* no placement has a lower top */
    size_t top, best_top;
    int64_t highest;       /* the item that made the top */
} ft__placer;

static int ft__rank_of_cmp(const void *a, const void *b)
{
    const ft__rank_of *x = (const ft__rank_of *)a, *y = (const ft__rank_of *)b;
    if (x->key != y->key) return x->key > y->key ? -1 : 1;
    return x->item < y->item ? -1 : x->item > y->item;
}

static int ft__range_cmp(const void *a, const void *b)
{
    const ft__range *x = (const ft__range *)a, *y = (const ft__range *)b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static void ft__placer_put(ft__placer *p, int64_t item)
{
    int64_t end = p->items[item].end;
    for (int64_t node = p->leaves + item; node >= 1 && p->latest[node] < end; node /= 2)
        p->latest[node] = end;
    size_t top = p->items[item].offset + p->items[item].bytes;
    if (top <= p->top) return;
    p->top = top;
    p->highest = item;
}

/* Ranges of the placed items below `most` that end after `begin`. */
static void ft__placer_find(ft__placer *p, int64_t node, int64_t first, int64_t width, int64_t most,
                            int64_t begin)
{
    if (first >= most || p->latest[node] <= begin) return;
    if (width == 1) {
        ft__range *r = &p->found[p->n_found++];
        r->begin = p->items[first].offset;
        r->end = r->begin + p->items[first].bytes;
        return;
    }
    ft__placer_find(p, 2 * node, first, width / 2, most, begin);
    ft__placer_find(p, 2 * node + 1, first + width / 2, width / 2, most, begin);
}

/* Items that begin before `moment`: they are in the order of their begin. */
static int64_t ft__placer_before(const ft__placer *p, int64_t moment)
{
    int64_t low = 0, high = p->n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (p->items[middle].begin < moment) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The lowest gap that is large enough, or the smallest such; above everything if there is none. */
static size_t ft__placer_gap(ft__placer *p, size_t bytes, int best_fit)
{
    size_t at = p->base, best = SIZE_MAX, smallest = SIZE_MAX;
    qsort(p->found, (size_t)p->n_found, sizeof *p->found, ft__range_cmp);
    for (int64_t i = 0; i < p->n_found; i++) {
        const ft__range *r = &p->found[i];
        size_t gap = r->begin > at ? r->begin - at : 0;
        if (gap >= bytes && gap < smallest) {
            smallest = gap;
            best = at;
            if (!best_fit) return best;
        }
        if (r->end > at) at = r->end;
    }
    return best != SIZE_MAX ? best : at;
}

/* Places all in the order of p->order; those that outlive the phase lie at the bottom already. */
static void ft__placer_run(ft__placer *p, int best_fit)
{
    memset(p->latest, 0, (size_t)(2 * p->leaves) * sizeof *p->latest);
    p->top = 0;
    p->highest = -1;
    for (int64_t i = 0; i < p->n; i++)
        if (p->items[i].end == INT64_MAX) ft__placer_put(p, i);
    for (int64_t i = 0; i < p->n; i++) {
        int64_t k = p->order[i].item;
        ft__item *item = &p->items[k];
        if (item->end == INT64_MAX) continue;
        p->n_found = 0;
        ft__placer_find(p, 1, 0, p->leaves, ft__placer_before(p, item->end), item->begin);
        item->offset = ft__placer_gap(p, item->bytes, best_fit);
        ft__placer_put(p, k);
    }
    if (p->top >= p->best_top) return;
    p->best_top = p->top;
    for (int64_t i = 0; i < p->n; i++) p->best[i] = p->items[i].offset;
}

static double ft__placer_key(const ft__item *item, int which)
{
    double life = item->end == INT64_MAX ? 0 : (double)(item->end - item->begin);
    switch (which) {
    case 0: return (double)item->bytes;
    case 1: return (double)item->bytes * life;
    case 2: return life;
    default: return -(double)item->begin;
    }
}

/* Within 1 / `part` of the bound, or so long a list that another try would take seconds. */
static int ft__placer_done(const ft__placer *p, int tries, size_t part)
{
    return p->best_top <= p->bound + p->bound / part || (tries && (double)p->n * tries > 3e5);
}

static void ft__placer_search(ft__placer *p)
{
    int tries = 0, order = 0, fit = 0;
    for (int k = 0; k < 8 && !ft__placer_done(p, tries, 500); k++, tries++) {
        size_t before = p->best_top;
        for (int64_t i = 0; i < p->n; i++) {
            p->order[i].item = i;
            p->order[i].key = ft__placer_key(&p->items[i], k / 2);
        }
        qsort(p->order, (size_t)p->n, sizeof *p->order, ft__rank_of_cmp);
        ft__placer_run(p, k % 2);
        if (p->best_top < before) order = k / 2, fit = k % 2;
    }
    for (int64_t i = 0; i < p->n; i++) {
        p->order[i].item = i;
        p->order[i].key = ft__placer_key(&p->items[i], order);
    }
    qsort(p->order, (size_t)p->n, sizeof *p->order, ft__rank_of_cmp);
    for (int k = 0; k < 64 && !ft__placer_done(p, tries, 100); k++, tries++) {
        ft__placer_run(p, fit);
        int64_t i = 0, top = p->highest;
        while (i < p->n && p->order[i].item != top) i++;
        if (i == p->n) return; /* what outlives the phase makes the top */
        for (; i > 0; i--) p->order[i] = p->order[i - 1];
        p->order[0].item = top;
    }
}

static void *ft__placer_array(int64_t n, size_t each, ft_status *status)
{
    void *memory = *status == FT_OK ? FT_MALLOC((size_t)n * each) : NULL;
    if (!memory && *status == FT_OK)
        *status = ft_error(FT_ERR_OOM, "no host memory to place %lld allocations", (long long)n);
    return memory;
}

/* The most that is live at once, of one phase, and of what outlives it. */
static void ft__phase_peak(const ft__phase *phase, size_t *peak, size_t *stays)
{
    /* Items by begin; frees at the moments that no allocation has. */
    size_t live = 0;
    int64_t k = 0, moments = 0;
    *peak = *stays = 0;
    for (int64_t i = 0; i < phase->n; i++) {
        const ft__item *item = &phase->items[i];
        if (item->end == INT64_MAX) *stays += item->bytes;
        if (item->begin + 1 > moments) moments = item->begin + 1;
        if (item->end != INT64_MAX && item->end + 1 > moments) moments = item->end + 1;
    }
    size_t *freed = (size_t *)FT_MALLOC((size_t)(moments + 1) * sizeof *freed);
    if (!freed) return; /* then the bound is 0 and the search takes all its tries */
    memset(freed, 0, (size_t)(moments + 1) * sizeof *freed);
    for (int64_t i = 0; i < phase->n; i++)
        if (phase->items[i].end != INT64_MAX)
            freed[phase->items[i].end] = phase->items[i].bytes;
    for (int64_t t = 0; t < moments; t++) {
        if (k < phase->n && phase->items[k].begin == t) live += phase->items[k++].bytes;
        else live -= freed[t];
        if (live > *peak) *peak = live;
    }
    FT_FREE(freed);
}

/* Sets the items' offsets, from `base` up, and *top. */
static ft_status ft__phase_place(ft__phase *phase, size_t base, size_t *top)
{
    ft_status status = FT_OK;
    size_t peak, stays, at = base;
    ft__placer p;
    *top = base;
    if (phase->n == 0) return FT_OK;
    ft__phase_peak(phase, &peak, &stays);
    memset(&p, 0, sizeof p);
    p.items = phase->items;
    p.n = phase->n;
    for (p.leaves = 1; p.leaves < p.n;) p.leaves *= 2;
    p.base = base;
    p.bound = base + peak;
    p.best_top = SIZE_MAX;
    p.latest = (int64_t *)ft__placer_array(2 * p.leaves, sizeof *p.latest, &status);
    p.order = (ft__rank_of *)ft__placer_array(p.n, sizeof *p.order, &status);
    p.best = (size_t *)ft__placer_array(p.n, sizeof *p.best, &status);
    p.found = (ft__range *)ft__placer_array(p.n, sizeof *p.found, &status);
    if (status == FT_OK) {
        for (int64_t i = 0; i < p.n; i++) {
            if (p.items[i].end != INT64_MAX) continue;
            p.items[i].offset = at;
            at += p.items[i].bytes;
        }
        ft__placer_search(&p);
        for (int64_t i = 0; i < p.n; i++) p.items[i].offset = p.best[i];
        *top = p.best_top;
    }
    FT_FREE(p.latest);
    FT_FREE(p.order);
    FT_FREE(p.best);
    FT_FREE(p.found);
    return status;
}

static ft_status ft__rank_place(ft__rank_plan *rank)
{
    ft_mem_plan_info *info = &rank->info;
    memset(info, 0, sizeof *info);
    for (int i = 0; i < rank->n_phases; i++) {
        ft__phase *phase = &rank->phases[i];
        size_t peak, stays, top;
        ft__phase_peak(phase, &peak, &stays);
        if (i == 0) info->persistent_bytes = stays;
        else peak += info->persistent_bytes;
        FT_TRY(ft__phase_place(phase, i ? info->persistent_bytes : 0, &top));
        if (peak > info->peak_bytes) info->peak_bytes = peak;
        if (top > info->reserved_bytes) info->reserved_bytes = top;
        info->allocations += phase->n;
    }
    info->phases = rank->n_phases ? rank->n_phases - 1 : 0;
    return FT_OK;
}

static int ft__rank_plans_equal(const ft__rank_plan *a, const ft__rank_plan *b)
{
    if (a->n_phases != b->n_phases) return 0;
    for (int i = 0; i < a->n_phases; i++) {
        const ft__phase *x = &a->phases[i], *y = &b->phases[i];
        if (strcmp(x->name, y->name) != 0 || x->n != y->n) return 0;
        for (int64_t k = 0; k < x->n; k++)
            if (x->items[k].bytes != y->items[k].bytes || x->items[k].end != y->items[k].end ||
                x->items[k].begin != y->items[k].begin || x->items[k].tag != y->items[k].tag)
                return 0;
    }
    return 1;
}

FT_API ft_status ft_mem_plan_place(ft_mem_plan *plan)
{
    if (plan->placed)
        return ft_error(FT_ERR_STATE, "ft_mem_plan_place: the plan is placed already");
    for (int r = 0; r < plan->world; r++) {
        ft__rank_plan *rank = &plan->ranks[r];
        for (int q = 0; q < r && rank->n_phases; q++) {
            const ft__rank_plan *other = &plan->ranks[q];
            if (other->same_as != q || !ft__rank_plans_equal(rank, other)) continue;
            rank->same_as = q;
            ft__rank_plan_clear(rank);
        }
        if (rank->n_phases) FT_TRY(ft__rank_place(rank));
    }
    plan->placed = 1;
    return FT_OK;
}

/* ------------------------------------------------------------------------------ >>serving.impl

   Where memory comes from. All ordering is by events: the same on every device. */

/* Memory of the device itself, aligned to 64 (on FT_GPU to 256). */
static ft_status ft__raw_alloc(ft_ctx *ctx, size_t bytes, void **out)
{
    *out = NULL;
    if (ctx->device == FT_META) return FT_OK;
    if (ctx->device == FT_GPU) return ft__gpu_alloc(ctx, bytes, out);
    unsigned char *block = bytes <= SIZE_MAX - 64 ? (unsigned char *)FT_MALLOC(bytes + 64) : NULL;
    if (!block)
        return ft_error(FT_ERR_OOM, "the machine has no %zu bytes for %s", bytes,
                        ft__where_text(ctx));
    size_t shift = 64 - (size_t)((uintptr_t)block % 64); /* 1..64, noted in the byte before */
    block[shift - 1] = (unsigned char)shift;
    *out = block + shift;
    return FT_OK;
}

/* Gives it back. On any thread; NULL is allowed. */
static void ft__raw_free(ft_ctx *ctx, void *memory)
{
    if (memory && ctx->device == FT_GPU) ft__gpu_free(ctx, memory);
    else if (memory) FT_FREE((unsigned char *)memory - ((unsigned char *)memory)[-1]);
}

static void ft__reserved_note(ft__memory *m)
{
    size_t bytes = m->chunk_bytes + m->arena_bytes;
    if (bytes > m->stats.reserved_bytes) m->stats.reserved_bytes = bytes;
}

/* Caching. Chunks are cut in blocks; free neighbours become one. Requests up to FT__SMALL have a
   pool of chunks of their own, so that they do not nibble at what large ones need. */

struct ft__slab {
    void *base;
    size_t bytes;
    int64_t id;
    int small;
    ft__slab *next;
};

struct ft__block {
    ft__slab *chunk;
    size_t offset, bytes;
    int is_free;
    ft_event last[FT_STREAM_COUNT]; /* of a free block: its latest use on each stream, if any */
    uint64_t order[FT_STREAM_COUNT];
    ft__block *prev, *next;         /* neighbours in the chunk */
};

enum { FT__SMALL = 1 << 20, FT__SMALL_CHUNK = 4 << 20, FT__LARGE_CHUNK = 32 << 20,
       FT__CHUNK_ROUND = 2 << 20 };

static int ft__block_cmp(const ft__block *a, const ft__block *b)
{
    if (a->chunk->small != b->chunk->small) return a->chunk->small ? -1 : 1;
    if (a->bytes != b->bytes) return a->bytes < b->bytes ? -1 : 1;
    if (a->chunk->id != b->chunk->id) return a->chunk->id < b->chunk->id ? -1 : 1;
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

/* Position of the first free block that does not come before `b`. */
static int64_t ft__free_position(const ft__memory *m, const ft__block *b)
{
    int64_t low = 0, high = m->n_free;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (ft__block_cmp(m->free_blocks[middle], b) < 0) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void ft__free_insert(ft__memory *m, ft__block *b)
{
    int64_t at = ft__free_position(m, b);
    memmove(m->free_blocks + at + 1, m->free_blocks + at,
            (size_t)(m->n_free - at) * sizeof *m->free_blocks);
    m->free_blocks[at] = b;
    m->n_free++;
    b->is_free = 1;
}

static void ft__free_remove(ft__memory *m, ft__block *b)
{
    int64_t at = ft__free_position(m, b);
    m->n_free--;
    memmove(m->free_blocks + at, m->free_blocks + at + 1,
            (size_t)(m->n_free - at) * sizeof *m->free_blocks);
    b->is_free = 0;
}

/* A block's record, and a place for it among the free ones. */
static ft_status ft__block_new(ft__memory *m, ft__block **out)
{
    void *array = m->free_blocks;
    FT_TRY(ft__array_reserve(&array, m->n_free, m->n_blocks + 1, &m->cap_free, 64,
                             sizeof *m->free_blocks, "blocks of the caching allocator"));
    m->free_blocks = (ft__block **)array;
    ft__block *b = (ft__block *)FT_MALLOC(sizeof *b);
    if (!b) return ft_error(FT_ERR_OOM, "no host memory for a block of the caching allocator");
    memset(b, 0, sizeof *b);
    m->n_blocks++;
    *out = b;
    return FT_OK;
}

static ft_status ft__slab_new(ft_ctx *ctx, size_t bytes, int small)
{
    ft__memory *m = ctx->memory;
    ft__block *b = NULL;
    ft__slab *c = (ft__slab *)FT_MALLOC(sizeof *c);
    ft_status status = c ? ft__block_new(m, &b)
                         : ft_error(FT_ERR_OOM, "no host memory for a chunk's record");
    if (status == FT_OK) {
        memset(c, 0, sizeof *c);
        c->bytes = bytes;
        c->small = small;
        status = ft__raw_alloc(ctx, bytes, &c->base);
    }
    if (status != FT_OK) {
        if (b) m->n_blocks--;
        FT_FREE(b);
        FT_FREE(c);
        return status;
    }
    c->id = m->n_chunks++;
    c->next = m->chunks;
    m->chunks = c;
    m->chunk_bytes += bytes;
    ft__reserved_note(m);
    b->chunk = c;
    b->bytes = bytes;
    ft__free_insert(m, b);
    return FT_OK;
}

/* Gives back chunks that are free as a whole: only where the device has no more. The error of the
   caller stays. */
static ft_status ft__cache_trim(ft_ctx *ctx)
{
    ft__memory *m = ctx->memory;
    FT_TRY(ft_sync(ctx));
    for (int64_t i = m->n_free - 1; i >= 0; i--) {
        ft__block *b = m->free_blocks[i];
        if (b->bytes != b->chunk->bytes) continue;
        ft__slab *c = b->chunk, **at = &m->chunks;
        while (*at != c) at = &(*at)->next;
        *at = c->next;
        ft__free_remove(m, b);
        m->chunk_bytes -= c->bytes;
        m->n_blocks--;
        ft__raw_free(ctx, c->base);
        FT_FREE(b);
        FT_FREE(c);
    }
    return FT_OK;
}

/* The smallest free block that holds `bytes`; among equals the one in the oldest chunk. */
static ft__block *ft__cache_find(const ft__memory *m, size_t bytes)
{
    ft__slab pool;
    ft__block want;
    memset(&pool, 0, sizeof pool);
    memset(&want, 0, sizeof want);
    pool.small = bytes <= FT__SMALL;
    pool.id = -1;
    want.chunk = &pool;
    want.bytes = bytes;
    int64_t at = ft__free_position(m, &want);
    if (at == m->n_free || m->free_blocks[at]->chunk->small != pool.small) return NULL;
    return m->free_blocks[at];
}

/* Cuts what is beyond `bytes` off a free block that is not in the list. */
static ft_status ft__block_split(ft__memory *m, ft__block *b, size_t bytes)
{
    ft__block *rest = NULL;
    if (b->bytes == bytes) return FT_OK;
    FT_TRY(ft__block_new(m, &rest));
    *rest = *b;
    rest->offset += bytes;
    rest->bytes -= bytes;
    rest->prev = b;
    if (rest->next) rest->next->prev = rest;
    b->next = rest;
    b->bytes = bytes;
    ft__free_insert(m, rest);
    return FT_OK;
}

static ft_status ft__cache_take(ft_ctx *ctx, ft_storage *st, ft_stream *home)
{
    ft__memory *m = ctx->memory;
    size_t bytes = st->accounted_bytes;
    int small = bytes <= FT__SMALL;
    ft__block *b = ft__cache_find(m, bytes);
    if (!b) {
        size_t chunk = small ? (size_t)FT__SMALL_CHUNK : (size_t)FT__LARGE_CHUNK;
        if (bytes > chunk / 2)
            chunk = (bytes + FT__CHUNK_ROUND - 1) / FT__CHUNK_ROUND * FT__CHUNK_ROUND;
        size_t held = m->chunk_bytes;
        ft_status status = ft__slab_new(ctx, chunk, small);
        if (status == FT_ERR_OOM) FT_TRY(ft__cache_trim(ctx));
        if (m->chunk_bytes < held) status = ft__slab_new(ctx, chunk, small);
        FT_TRY(status);
        b = ft__cache_find(m, bytes);
    }
    for (int k = 0; k < FT_STREAM_COUNT; k++)
        if (b->last[k].stream) FT_TRY(ft_stream_wait(home, b->last[k]));
    ft__free_remove(m, b);
    ft_status status = ft__block_split(m, b, bytes);
    if (status != FT_OK) {
        ft__free_insert(m, b);
        return status;
    }
    memset(b->last, 0, sizeof b->last);
    memset(b->order, 0, sizeof b->order);
    st->block = b;
    if (b->chunk->base) st->data = (char *)b->chunk->base + b->offset;
    return FT_OK;
}

/* b takes in its right neighbour, and the later of the uses of both. */
static void ft__block_merge(ft__memory *m, ft__block *b)
{
    ft__block *right = b->next;
    b->bytes += right->bytes;
    b->next = right->next;
    if (b->next) b->next->prev = b;
    for (int k = 0; k < FT_STREAM_COUNT; k++)
        if (right->order[k] > b->order[k]) {
            b->order[k] = right->order[k];
            b->last[k] = right->last[k];
        }
    m->n_blocks--;
    FT_FREE(right);
}

static void ft__cache_give(ft__memory *m, ft__block *b, ft_stream *last)
{
    b->last[last->kind] = ft_event_record(last);
    b->order[last->kind] = ++m->frees;
    if (b->next && b->next->is_free) {
        ft__free_remove(m, b->next);
        ft__block_merge(m, b);
    }
    if (b->prev && b->prev->is_free) {
        b = b->prev;
        ft__free_remove(m, b);
        ft__block_merge(m, b);
    }
    ft__free_insert(m, b);
}

static void ft__cache_end(ft_ctx *ctx)
{
    ft__memory *m = ctx->memory;
    for (int64_t i = 0; i < m->n_free; i++) FT_FREE(m->free_blocks[i]); /* one a chunk by now */
    FT_FREE(m->free_blocks);
    while (m->chunks) {
        ft__slab *c = m->chunks;
        m->chunks = c->next;
        ft__raw_free(ctx, c->base);
        FT_FREE(c);
    }
}

/* Arena. The plan says where; `used` says who used those bytes last, and on which stream. */

/* The first of them that ends after `at`. */
static int64_t ft__used_after(const ft__memory *m, size_t at)
{
    int64_t low = 0, high = m->n_used;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (m->used[middle].end <= at) low = middle + 1;
        else high = middle;
    }
    return low;
}

static ft_status ft__arena_take(ft_ctx *ctx, ft_storage *st, ft_stream *home)
{
    ft__memory *m = ctx->memory;
    size_t begin = st->phase->items[st->item].offset, end = begin + st->accounted_bytes;
    ft_event last[FT_STREAM_COUNT];
    uint64_t order[FT_STREAM_COUNT];
    void *array = m->used;
    FT_TRY(ft__array_reserve(&array, m->n_used, m->n_used + 2 * m->n_live + 4, &m->cap_used, 64,
                             sizeof *m->used, "ranges of the arena"));
    m->used = (ft__used *)array;
    memset(last, 0, sizeof last);
    memset(order, 0, sizeof order);
    for (int64_t i = ft__used_after(m, begin); i < m->n_used && m->used[i].begin < end; i++) {
        int k = (int)m->used[i].last.stream->kind;
        if (m->used[i].order <= order[k]) continue;
        order[k] = m->used[i].order;
        last[k] = m->used[i].last;
    }
    for (int k = 0; k < FT_STREAM_COUNT; k++)
        if (last[k].stream) FT_TRY(ft_stream_wait(home, last[k]));
    if (m->arena) st->data = m->arena + begin;
    return FT_OK;
}

/* Its bytes were used last on `last`; what was noted there before is over: whoever got the bytes
   waited for it. */
static void ft__arena_give(ft__memory *m, const ft_storage *st, ft_stream *last)
{
    size_t begin = st->phase->items[st->item].offset, end = begin + st->accounted_bytes;
    int64_t i = ft__used_after(m, begin), j = i, n = 0;
    ft__used with[3];
    while (j < m->n_used && m->used[j].begin < end) j++;
    if (i < j && m->used[i].begin < begin) {
        with[n] = m->used[i];
        with[n++].end = begin;
    }
    with[n].begin = begin;
    with[n].end = end;
    with[n].last = ft_event_record(last);
    with[n++].order = ++m->frees;
    if (i < j && m->used[j - 1].end > end) {
        with[n] = m->used[j - 1];
        with[n++].begin = end;
    }
    memmove(m->used + i + n, m->used + j, (size_t)(m->n_used - j) * sizeof *m->used);
    memcpy(m->used + i, with, (size_t)n * sizeof *m->used);
    m->n_used += n - (j - i);
}

static ft_status ft__arena_begin(ft_ctx *ctx)
{
    ft__memory *m = ctx->memory;
    void *memory;
    size_t bytes = m->plan->info.reserved_bytes, limit = ctx->config.memory_limit;
    if (m->plan->n_phases == 0)
        return ft_error(FT_ERR_STATE, "the memory plan has no record of rank %d: the run on meta "
                        "must include it", ctx->rank);
    if (limit && bytes > limit)
        return ft_error(FT_ERR_OOM, "the arena takes %zu bytes (its peak: %zu), and the limit is "
                        "%zu; a smaller micro-batch, more recomputation or a higher ZeRO stage "
                        "would help", bytes, m->plan->info.peak_bytes, limit);
    ctx->where_op = "the arena";
    FT_TRY(ft__raw_alloc(ctx, bytes, &memory));
    ctx->where_op = "";
    m->arena = (char *)memory;
    m->arena_bytes = bytes;
    m->has_arena = 1;
    ft__reserved_note(m);
    return FT_OK;
}

static ft_status ft__serving_begin(ft_ctx *ctx)
{
    ft__memory *m = ctx->memory;
    ft_mem_plan *plan = ctx->config.mem_plan;
    int record = plan && ctx->device == FT_META && !plan->placed;
    if (!record && (!plan || ctx->config.allocator != FT_ALLOC_ARENA)) return FT_OK;
    m->plan = &plan->ranks[plan->ranks[ctx->rank].same_as];
    if (record) {
        if (m->plan->n_phases)
            return ft_error(FT_ERR_STATE, "the memory plan has a record of rank %d already",
                            ctx->rank);
        FT_TRY(ft__phase_new(m->plan, "the set-up", &m->phase));
    } else {
        FT_TRY(ft__arena_begin(ctx));
        m->phase = &m->plan->phases[0];
    }
    m->recording = record;
    return FT_OK;
}

static void ft__serving_end(ft_ctx *ctx)
{
    ft__cache_end(ctx);
    ft__raw_free(ctx, ctx->memory->arena);
    FT_FREE(ctx->memory->used);
}

static ft_status ft__serve(ft_ctx *ctx, ft_storage *st, ft_stream *home)
{
    ft__memory *m = ctx->memory;
    ft_allocator allocator = ctx->config.allocator;
    if (m->has_arena && st->phase) return ft__arena_take(ctx, st, home);
    if (m->has_arena || allocator == FT_ALLOC_CACHING) return ft__cache_take(ctx, st, home);
    FT_TRY(ft__raw_alloc(ctx, st->request_bytes, &st->raw));
    st->data = st->raw;
    return FT_OK;
}

typedef struct ft__free_task {
    ft_ctx *ctx;
    void *raw, *data;
    size_t bytes;
    int poison;
} ft__free_task;

/* With streams as threads freed memory is overwritten first: whoever reads it without having waited
   finds NaN, not the old value. */
static ft_status ft__free_run(void *arg)
{
    ft__free_task *task = (ft__free_task *)arg;
    if (task->poison) memset(task->data, 0xff, task->bytes);
    ft__raw_free(task->ctx, task->raw);
    return FT_OK;
}

/* Memory goes back: raw memory to the system after the work queued on `last`; a block or a range at
   once, with the event that its next user waits for. */
static void ft__give_back(ft_storage *st, ft_stream *last)
{
    ft_ctx *ctx = st->ctx;
    ft__free_task task;
    task.ctx = ctx;
    task.raw = st->raw;
    task.data = st->data;
    task.bytes = st->request_bytes;
    task.poison = st->data && ft__async(ctx);
    if ((task.raw || task.poison) &&
        ft__stream_run_always(last, ft__free_run, &task, sizeof task) != FT_OK) {
        (void)ft_stream_sync(last); /* no memory to queue the free: wait, then free here */
        (void)ft__free_run(&task);
    }
    if (st->block) ft__cache_give(ctx->memory, st->block, last);
    else if (ctx->memory->has_arena && st->phase) ft__arena_give(ctx->memory, st, last);
}

static ft_status ft__storage_create(ft_ctx *ctx, size_t bytes, ft_tag tag, ft_stream *home,
                                    ft_storage **out)
{
    ft_storage *st = (ft_storage *)FT_MALLOC(sizeof *st);
    if (!st)
        return ft_error(FT_ERR_OOM, "no host memory for the record of %zu bytes for %s (%s)", bytes,
                        ft__where_text(ctx), ft_tag_name(tag));
    memset(st, 0, sizeof *st);
    st->ctx = ctx;
    st->request_bytes = bytes;
    st->accounted_bytes = ft_accounted_bytes(bytes);
    st->tag = tag;
    st->refs = 1;
    ft_status status = ft__account_check(ctx, st);
    if (status == FT_OK) status = ft__plan_alloc(ctx, st);
    if (status == FT_OK) status = ft__serve(ctx, st, home);
    if (status == FT_OK) {
        status = ft__account_alloc(ctx, st);
        if (status != FT_OK) ft__give_back(st, home);
    }
    if (status != FT_OK) {
        FT_FREE(st);
        return status;
    }
    st->next = ctx->storages;
    if (st->next) st->next->prev = st;
    ctx->storages = st;
    *out = st;
    return FT_OK;
}

/* One reference less. The last one gives the bytes back: in the books at once, because the program
   decided it; in memory after the work that is queued on `last`, because that may still read it. */
static void ft__storage_release(ft_storage *st, ft_stream *last)
{
    ft_ctx *ctx = st->ctx;
    if (--st->refs > 0) return;
    ft_mem_stats *s = &ctx->memory->stats;
    s->live_bytes -= st->accounted_bytes;
    s->live[st->tag] -= st->accounted_bytes;
    ctx->memory->n_live--;
    if (ctx->config.timeline) ft__timeline_add(ctx, st, -(int64_t)st->accounted_bytes);
    ft__plan_release(ctx, st);
    ft__give_back(st, last);
    if (st->prev) st->prev->next = st->next; else ctx->storages = st->next;
    if (st->next) st->next->prev = st->prev;
    FT_FREE(st);
}

/* ------------------------------------------------------------------------------ >>kernels.impl */

/* CPU code. Elements are loaded to fp32, computed in fp32 and rounded once where they are stored.
   Loops over a row are plain, so that compilers vectorise them. */

static float ft__load(const void *data, ft_dtype t, int64_t i)
{
    return t == FT_BF16 ? ft_f32_from_bf16(((const uint16_t *)data)[i]) : ((const float *)data)[i];
}

/* accumulate: adds to what is there, in fp32, with one rounding of the sum. */
static void ft__store(void *data, ft_dtype t, int64_t i, float value, int accumulate)
{
    if (accumulate) value += ft__load(data, t, i);
    if (t == FT_BF16) ((uint16_t *)data)[i] = ft_bf16_from_f32(value);
    else ((float *)data)[i] = value;
}

static void ft__load_row(float *to, const void *data, ft_dtype t, int64_t first, int64_t n)
{
    if (t == FT_BF16) {
        const uint16_t *from = (const uint16_t *)data + first;
        for (int64_t i = 0; i < n; i++) to[i] = ft_f32_from_bf16(from[i]);
    } else {
        memcpy(to, (const float *)data + first, (size_t)n * sizeof *to);
    }
}

static void ft__store_row(void *data, ft_dtype t, int64_t first, int64_t n, const float *from,
                          int accumulate)
{
    if (t == FT_BF16) {
        uint16_t *to = (uint16_t *)data + first;
        if (accumulate)
            for (int64_t i = 0; i < n; i++)
                to[i] = ft_bf16_from_f32(ft_f32_from_bf16(to[i]) + from[i]);
        else
            for (int64_t i = 0; i < n; i++) to[i] = ft_bf16_from_f32(from[i]);
    } else {
        float *to = (float *)data + first;
        if (accumulate)
            for (int64_t i = 0; i < n; i++) to[i] += from[i];
        else
            memmove(to, from, (size_t)n * sizeof *to);
    }
}

/* e^x without a branch, so that a loop over it vectorises. x = n ln 2 + r with |r| <= ln 2 / 2; a
   polynomial gives e^r; 2^n is applied in two factors, so that results reach down to denormals and
   up to infinity. Relative error about 1e-7; NaN stays NaN. */
static float ft__exp_limit(float x) /* beyond these it is 0 and infinity */
{
    float t = x < -104.0f ? -104.0f : x;
    return t > 89.0f ? 89.0f : t;
}

static float ft__exp_core(float t)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds; the low bits count */
    float z = t * 1.44269504f + magic;
    float n = z - magic;
    float r = (t - n * 0.693145752f) - n * 1.42860682e-6f; /* ln 2 in two parts, the first exact */
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    uint32_t bits, half_bits, rest_bits;
    float half, rest;
    memcpy(&bits, &z, 4);
    uint32_t k = bits - 0x4b400000u;                      /* n, modulo 2^32 */
    uint32_t h = ((k + 512u) >> 1) - 256u;                /* floor(n / 2) */
    half_bits = (h + 127u) << 23;
    rest_bits = (k - h + 127u) << 23;
    memcpy(&half, &half_bits, 4);
    memcpy(&rest, &rest_bits, 4);
    return p * half * rest;
}

static float ft__expf(float x) { return ft__exp_core(ft__exp_limit(x)); }

/* Two loops, the same values: gcc turns the limits inside one into branches, and stops
   vectorising. */
static void ft__exp_row(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = ft__exp_limit(x[i]);
    for (int64_t i = 0; i < n; i++) x[i] = ft__exp_core(x[i]);
}

/* Elements, rows (the product of all dimensions but the last) and columns (the last). */
static int64_t ft__view_elems(const ft_view *v)
{
    int64_t n = 1;
    for (int i = 0; i < v->ndim; i++) n *= v->shape[i];
    return n;
}

static int64_t ft__view_rows(const ft_view *v)
{
    int64_t n = 1;
    for (int i = 0; i + 1 < v->ndim; i++) n *= v->shape[i];
    return n;
}

static int64_t ft__view_cols(const ft_view *v)
{
    return v->ndim > 0 ? v->shape[v->ndim - 1] : 1;
}

/* "bf16 [2,3]" for messages; "absent" where there is none. Returns text. */
static const char *ft__view_text(const ft_view *v, char *text, size_t n)
{
    if (!v->present) {
        (void)snprintf(text, n, "absent");
        return text;
    }
    int used = snprintf(text, n, "%s [", ft_dtype_name(v->dtype));
    for (int i = 0; i < v->ndim && used > 0 && (size_t)used < n; i++) {
        int more = snprintf(text + used, n - (size_t)used, i ? ",%lld" : "%lld",
                            (long long)v->shape[i]);
        if (more < 0) break;
        used += more;
    }
    if (used > 0 && (size_t)used < n) (void)snprintf(text + used, n - (size_t)used, "]");
    return text;
}

static void *ft__at(void *data, ft_dtype t, int64_t i)
{
    return (char *)data + i * (int64_t)ft_dtype_bytes(t);
}

static const void *ft__at_const(const void *data, ft_dtype t, int64_t i)
{
    return (const char *)data + i * (int64_t)ft_dtype_bytes(t);
}

static int64_t ft__min(int64_t a, int64_t b) { return a < b ? a : b; }

/* GEMM: C[m,n] = A[m,k] B[k,n], or C += A B. Operands are fp32 or bf16, sums fp32; a bf16 C is
   rounded once, after all of k. A's element (i, p) is a[i * a_rs + p * a_cs], B's (p, j) is
   b[p * b_rs + j * b_cs]; one stride of each is 1, so that transposes cost nothing. Rows of C are
   contiguous, ldc elements apart. The order of additions depends on the shapes alone. */

#define FT__GEMM_M 512 /* rows and columns of C for which fp32 sums are kept when C is bf16 */
#define FT__GEMM_N 512

#ifdef FT_CBLAS

#ifndef FORCE_OPENBLAS_COMPLEX_STRUCT
#define FORCE_OPENBLAS_COMPLEX_STRUCT /* else OpenBLAS brings in <complex.h> and its macro I */
#endif
#include <cblas.h>

#if defined(__GNUC__) && defined(__ELF__)
#ifdef __cplusplus
extern "C" void openblas_set_num_threads(int threads) __attribute__((weak));
#else
extern void openblas_set_num_threads(int threads) __attribute__((weak));
#endif
#define FT__BLAS_THREADS 1
#endif

/* Every rank is a thread already. Weak, because a CBLAS need not be OpenBLAS. */
static void ft__blas_begin(void)
{
#ifdef FT__BLAS_THREADS
    if (openblas_set_num_threads) openblas_set_num_threads(1);
#endif
}

#define FT__GEMM_K 1024 /* of k converted at a time */

/* Workspace: an fp32 block of each operand that is bf16, and the sums of a block of C. */
static void ft__gemm_parts(int64_t m, int64_t n, int64_t k, ft_dtype ta, ft_dtype tb, ft_dtype tc,
                           size_t part[3])
{
    size_t bm = (size_t)ft__min(m, FT__GEMM_M), bn = (size_t)ft__min(n, FT__GEMM_N);
    size_t bk = (size_t)ft__min(k, FT__GEMM_K);
    part[0] = ta == FT_BF16 ? (bm * bk * 4 + 63) / 64 * 64 : 0;
    part[1] = tb == FT_BF16 ? (bk * bn * 4 + 63) / 64 * 64 : 0;
    part[2] = tc == FT_BF16 ? (bm * bn * 4 + 63) / 64 * 64 : 0;
}

static size_t ft__gemm_workspace_bytes(int64_t m, int64_t n, int64_t k, ft_dtype ta, ft_dtype tb,
                                       ft_dtype tc)
{
    size_t part[3];
    ft__gemm_parts(m, n, k, ta, tb, tc, part);
    return part[0] + part[1] + part[2];
}

/* An operand's block [rows, cols] as fp32 for cblas. */
typedef struct ft__blas_block {
    const float *data;
    CBLAS_TRANSPOSE transpose;
    int64_t ld;
} ft__blas_block;

static ft__blas_block ft__blas_take(const void *data, ft_dtype t, int64_t at, int64_t rows,
                                    int64_t cols, int64_t rs, int64_t cs, void *room)
{
    ft__blas_block block;
    int plain = cs == 1;
    int64_t lines = plain ? rows : cols, length = plain ? cols : rows, ld = plain ? rs : cs;
    block.transpose = plain ? CblasNoTrans : CblasTrans;
    if (t == FT_BF16) {
        float *to = (float *)room;
        for (int64_t i = 0; i < lines; i++)
            ft__load_row(to + i * length, data, t, at + i * ld, length);
        block.data = to;
        block.ld = length;
    } else {
        block.data = (const float *)data + at;
        block.ld = lines > 1 ? ld : length; /* cblas wants ld >= length even for one line */
    }
    return block;
}

static void ft__blas_call(int64_t m, int64_t n, int64_t k, ft__blas_block a, ft__blas_block b,
                          float *c, int64_t ldc, int accumulate)
{
    cblas_sgemm(CblasRowMajor, a.transpose, b.transpose, (int)m, (int)n, (int)k, 1.0f, a.data,
                (int)a.ld, b.data, (int)b.ld, accumulate ? 1.0f : 0.0f, c, (int)ldc);
}

static void ft__gemm(int64_t m, int64_t n, int64_t k, const void *a, ft_dtype ta, int64_t a_rs,
                     int64_t a_cs, const void *b, ft_dtype tb, int64_t b_rs, int64_t b_cs, void *c,
                     ft_dtype tc, int64_t ldc, int accumulate, void *workspace)
{
    size_t part[3];
    int all_f32 = ta == FT_F32 && tb == FT_F32 && tc == FT_F32;
    int64_t bm = all_f32 ? m : FT__GEMM_M, bn = all_f32 ? n : FT__GEMM_N;
    int64_t bk = all_f32 ? k : FT__GEMM_K;
    ft__gemm_parts(m, n, k, ta, tb, tc, part);
    char *room_a = (char *)workspace, *room_b = room_a + part[0];
    float *sums = (float *)(void *)(room_b + part[1]);
    for (int64_t i = 0; i < m; i += bm)
        for (int64_t j = 0; j < n; j += bn) {
            int64_t mi = ft__min(m - i, bm), nj = ft__min(n - j, bn), at = i * ldc + j;
            float *to = tc == FT_BF16 ? sums : (float *)c + at;
            int64_t ld = tc == FT_BF16 ? nj : ldc;
            for (int64_t p = 0; p < k; p += bk) {
                int64_t kp = ft__min(k - p, bk);
                int64_t at_a = i * a_rs + p * a_cs, at_b = p * b_rs + j * b_cs;
                ft__blas_block x = ft__blas_take(a, ta, at_a, mi, kp, a_rs, a_cs, room_a);
                ft__blas_block y = ft__blas_take(b, tb, at_b, kp, nj, b_rs, b_cs, room_b);
                ft__blas_call(mi, nj, kp, x, y, to, ld, p > 0 || (tc != FT_BF16 && accumulate));
            }
            if (tc != FT_BF16) continue;
            for (int64_t r = 0; r < mi; r++)
                ft__store_row(c, tc, at + r * ldc, nj, sums + r * nj, accumulate);
        }
}

#else /* no CBLAS */

static void ft__blas_begin(void) {}

/* Blocks of A and B are packed into panels that the inner kernel reads in order, and stay in cache
   while they are reused (Goto and van de Geijn 2008): a B panel of K x NR in L1, a block of A of
   M_PACK x K in L2, a block of B of K x N beyond. The kernel keeps MR x NR sums in registers: NR is
   two vectors, MR as many as registers allow. */
#if defined(__GNUC__) && defined(__AVX512F__)
#define FT__LANES 16
#define FT__MR 12
#elif defined(__GNUC__) && defined(__AVX__)
#define FT__LANES 8
#define FT__MR 6
#elif defined(__GNUC__) && defined(__aarch64__)
#define FT__LANES 4
#define FT__MR 12
#elif defined(__GNUC__)
#define FT__LANES 4
#define FT__MR 6
#else
#define FT__LANES 4
#define FT__MR 4
#endif
#define FT__NR (2 * FT__LANES)
#define FT__GEMM_K 256
#define FT__GEMM_M_PACK 96
#define FT__GEMM_THIN 3 /* up to so many rows packing does not pay */

/* c[MR, NR] = or += packed a[k, MR]^T packed b[k, NR]. */
#if defined(__GNUC__)

typedef float ft__vec __attribute__((vector_size(4 * FT__LANES)));

/* ISO modes of gcc do not contract a * b + c by themselves. */
#if defined(__AVX512F__) && !defined(__CUDACC__)
#include <immintrin.h>
#define FT__MADD(c, s, b) (c) = _mm512_fmadd_ps(_mm512_set1_ps(s), (b), (c))
#elif defined(__FMA__) && defined(__AVX__) && !defined(__CUDACC__)
#include <immintrin.h>
#define FT__MADD(c, s, b) (c) = _mm256_fmadd_ps(_mm256_set1_ps(s), (b), (c))
#else
#define FT__MADD(c, s, b) (c) += (s) * (b)
#endif

#if FT__MR == 12
#define FT__ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#else
#define FT__ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
#endif
#define FT__ROW_ZERO(i) ft__vec p##i = {0}, q##i = {0};
#define FT__ROW_MADD(i) FT__MADD(p##i, a[i], x); FT__MADD(q##i, a[i], y);
#define FT__ROW_STORE(i)                                                                           \
    if (add) {                                                                                     \
        memcpy(&x, c + (i) * ldc, sizeof x);                                                       \
        memcpy(&y, c + (i) * ldc + FT__LANES, sizeof y);                                           \
        p##i += x;                                                                                 \
        q##i += y;                                                                                 \
    }                                                                                              \
    memcpy(c + (i) * ldc, &p##i, sizeof p##i);                                                     \
    memcpy(c + (i) * ldc + FT__LANES, &q##i, sizeof q##i);

/* Rows are named variables: arrays would not stay in registers at every level of optimisation. */
static void ft__gemm_micro(int64_t k, const float *a, const float *b, float *c, int64_t ldc,
                           int add)
{
    ft__vec x, y;
    FT__ROWS(FT__ROW_ZERO)
    for (int64_t p = 0; p < k; p++, a += FT__MR, b += FT__NR) {
        memcpy(&x, b, sizeof x);
        memcpy(&y, b + FT__LANES, sizeof y);
        FT__ROWS(FT__ROW_MADD)
    }
    FT__ROWS(FT__ROW_STORE)
}

#else

static void ft__gemm_micro(int64_t k, const float *a, const float *b, float *c, int64_t ldc,
                           int add)
{
    float sum[FT__MR * FT__NR];
    memset(sum, 0, sizeof sum);
    for (int64_t p = 0; p < k; p++, a += FT__MR, b += FT__NR)
        for (int i = 0; i < FT__MR; i++)
            for (int j = 0; j < FT__NR; j++) sum[i * FT__NR + j] += a[i] * b[j];
    for (int i = 0; i < FT__MR; i++)
        ft__store_row(c, FT_F32, i * ldc, FT__NR, sum + i * FT__NR, add);
}

#endif

/* One line of a panel: `width` elements that lie together. The two usual widths as constants. */
static void ft__gemm_line(float *to, const void *from, ft_dtype t, int64_t at, int64_t width)
{
    const float *whole = (const float *)from + at;
    const uint16_t *half = (const uint16_t *)from + at;
    if (width == FT__NR && t == FT_F32) memcpy(to, whole, FT__NR * sizeof *to);
    else if (width == FT__MR && t == FT_F32) memcpy(to, whole, FT__MR * sizeof *to);
    else if (width == FT__NR && t == FT_BF16)
        for (int i = 0; i < FT__NR; i++) to[i] = ft_f32_from_bf16(half[i]);
    else if (width == FT__MR && t == FT_BF16)
        for (int i = 0; i < FT__MR; i++) to[i] = ft_f32_from_bf16(half[i]);
    else ft__load_row(to, from, t, at, width);
}

/* Packs n x k elements (n_stride, k_stride apart, from `at`) as panels [k, width],
   zeros beyond n. */
static void ft__gemm_pack(float *to, const void *from, ft_dtype t, int64_t at, int64_t n, int64_t k,
                          int64_t n_stride, int64_t k_stride, int64_t width)
{
    for (int64_t first = 0; first < n; first += width, to += k * width) {
        int64_t w = ft__min(width, n - first), start = at + first * n_stride;
        if (w < width) memset(to, 0, (size_t)(k * width) * sizeof *to);
        if (n_stride == 1) {
            for (int64_t p = 0; p < k; p++)
                ft__gemm_line(to + p * width, from, t, start + p * k_stride, w);
        } else if (t == FT_F32) {
            for (int64_t i = 0; i < w; i++) {
                const float *line = (const float *)from + start + i * n_stride;
                for (int64_t p = 0; p < k; p++) to[p * width + i] = line[p * k_stride];
            }
        } else {
            for (int64_t i = 0; i < w; i++) {
                const uint16_t *line = (const uint16_t *)from + start + i * n_stride;
                for (int64_t p = 0; p < k; p++)
                    to[p * width + i] = ft_f32_from_bf16(line[p * k_stride]);
            }
        }
    }
}

/* c[m,n] from packed a and b; whole fp32 tiles are written straight, others through a copy. */
static void ft__gemm_block(int64_t m, int64_t n, int64_t k, const float *a, const float *b, void *c,
                           ft_dtype tc, int64_t ldc, int add)
{
    float tile[FT__MR * FT__NR];
    for (int64_t j = 0; j < n; j += FT__NR)
        for (int64_t i = 0; i < m; i += FT__MR) {
            int64_t rows = ft__min(FT__MR, m - i), cols = ft__min(FT__NR, n - j);
            int64_t at = i * ldc + j;
            if (tc == FT_F32 && rows == FT__MR && cols == FT__NR) {
                ft__gemm_micro(k, a + i * k, b + j * k, (float *)c + at, ldc, add);
                continue;
            }
            ft__gemm_micro(k, a + i * k, b + j * k, tile, FT__NR, 0);
            for (int64_t r = 0; r < rows; r++)
                ft__store_row(c, tc, at + r * ldc, cols, tile + r * FT__NR, add);
        }
}

/* Workspace: packed A, packed B, and fp32 sums where a bf16 C takes more than one pass over k. */
static void ft__gemm_parts(int64_t m, int64_t n, int64_t k, ft_dtype tc, size_t part[3])
{
    int64_t bm = ft__min(m, FT__GEMM_M_PACK), bn = ft__min(n, FT__GEMM_N);
    int64_t bk = ft__min(k, FT__GEMM_K);
    part[0] = (size_t)((bm + FT__MR - 1) / FT__MR * FT__MR * bk * 4 + 63) / 64 * 64;
    part[1] = (size_t)((bn + FT__NR - 1) / FT__NR * FT__NR * bk * 4 + 63) / 64 * 64;
    part[2] = tc == FT_BF16 && k > FT__GEMM_K ? (size_t)(ft__min(m, FT__GEMM_M) * bn * 4) : 0;
    if (m <= FT__GEMM_THIN) part[0] = part[1] = part[2] = 0;
}

static size_t ft__gemm_workspace_bytes(int64_t m, int64_t n, int64_t k, ft_dtype ta, ft_dtype tb,
                                       ft_dtype tc)
{
    size_t part[3];
    (void)ta;
    (void)tb;
    ft__gemm_parts(m, n, k, tc, part);
    return part[0] + part[1] + part[2];
}

/* sum += a[NR] * b[NR], lane by lane. */
static void ft__dot_step(float *sum, const float *a, const float *b)
{
    for (int l = 0; l < FT__NR; l++) sum[l] += a[l] * b[l];
}

static float ft__dot(const float *a, const void *b, ft_dtype t, int64_t at, int64_t n)
{
    float sum[FT__NR], row[FT__NR];
    int64_t i = 0;
    memset(sum, 0, sizeof sum);
    if (t == FT_F32) {
        const float *line = (const float *)b + at;
        for (; i + FT__NR <= n; i += FT__NR) ft__dot_step(sum, a + i, line + i);
    } else {
        for (; i + FT__NR <= n; i += FT__NR) {
            ft__gemm_line(row, b, t, at + i, FT__NR);
            ft__dot_step(sum, a + i, row);
        }
    }
    for (int l = 0; i < n; i++, l++) sum[l] += a[i] * ft__load(b, t, at + i);
    for (int width = FT__LANES; width; width /= 2)
        for (int l = 0; l < width; l++) sum[l] += sum[l + width];
    return sum[0];
}

static void ft__axpy(float *to, float factor, const void *b, ft_dtype t, int64_t at, int64_t n)
{
    if (t == FT_F32) {
        const float *row = (const float *)b + at;
        for (int64_t i = 0; i < n; i++) to[i] += factor * row[i];
    } else {
        const uint16_t *row = (const uint16_t *)b + at;
        for (int64_t i = 0; i < n; i++) to[i] += factor * ft_f32_from_bf16(row[i]);
    }
}

/* A few rows: B is read where it lies, once for each of them. */
static void ft__gemm_thin(int64_t m, int64_t n, int64_t k, const void *a, ft_dtype ta, int64_t a_rs,
                          int64_t a_cs, const void *b, ft_dtype tb, int64_t b_rs, int64_t b_cs,
                          void *c, ft_dtype tc, int64_t ldc, int accumulate)
{
    float sum[FT__GEMM_N], row[FT__GEMM_K];
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j += FT__GEMM_N) {
            int64_t nj = ft__min(n - j, FT__GEMM_N);
            memset(sum, 0, sizeof sum);
            for (int64_t p = 0; p < k; p += FT__GEMM_K) {
                int64_t kp = ft__min(k - p, FT__GEMM_K);
                for (int64_t q = 0; q < kp; q++)
                    row[q] = ft__load(a, ta, i * a_rs + (p + q) * a_cs);
                if (b_cs == 1)
                    for (int64_t q = 0; q < kp; q++)
                        ft__axpy(sum, row[q], b, tb, (p + q) * b_rs + j, nj);
                else
                    for (int64_t q = 0; q < nj; q++)
                        sum[q] += ft__dot(row, b, tb, p + (j + q) * b_cs, kp);
            }
            ft__store_row(c, tc, i * ldc + j, nj, sum, accumulate);
        }
}

static void ft__gemm(int64_t m, int64_t n, int64_t k, const void *a, ft_dtype ta, int64_t a_rs,
                     int64_t a_cs, const void *b, ft_dtype tb, int64_t b_rs, int64_t b_cs, void *c,
                     ft_dtype tc, int64_t ldc, int accumulate, void *workspace)
{
    if (m <= FT__GEMM_THIN) {
        ft__gemm_thin(m, n, k, a, ta, a_rs, a_cs, b, tb, b_rs, b_cs, c, tc, ldc, accumulate);
        return;
    }
    size_t part[3];
    ft__gemm_parts(m, n, k, tc, part);
    char *room = (char *)workspace;
    float *pa = (float *)(void *)room, *pb = (float *)(void *)(room + part[0]);
    float *sums = part[2] ? (float *)(void *)(room + part[0] + part[1]) : NULL;
    int64_t bm = sums ? FT__GEMM_M : m;
    for (int64_t i = 0; i < m; i += bm)
        for (int64_t j = 0; j < n; j += FT__GEMM_N) {
            int64_t mi = ft__min(m - i, bm), nj = ft__min(n - j, FT__GEMM_N), at = i * ldc + j;
            void *to = sums ? (void *)sums : ft__at(c, tc, at);
            ft_dtype tt = sums ? FT_F32 : tc;
            int64_t ld = sums ? nj : ldc;
            for (int64_t p = 0; p < k; p += FT__GEMM_K) {
                int64_t kp = ft__min(k - p, FT__GEMM_K);
                int add = p > 0 || (!sums && accumulate);
                ft__gemm_pack(pb, b, tb, p * b_rs + j * b_cs, nj, kp, b_cs, b_rs, FT__NR);
                for (int64_t r = 0; r < mi; r += FT__GEMM_M_PACK) {
                    int64_t mr = ft__min(mi - r, FT__GEMM_M_PACK);
                    int64_t at_a = (i + r) * a_rs + p * a_cs;
                    ft__gemm_pack(pa, a, ta, at_a, mr, kp, a_rs, a_cs, FT__MR);
                    ft__gemm_block(mr, nj, kp, pa, pb, ft__at(to, tt, r * ld), tt, ld, add);
                }
            }
            for (int64_t r = 0; sums && r < mi; r++)
                ft__store_row(c, tc, at + r * ldc, nj, sums + r * nj, accumulate);
        }
}

#endif /* FT_CBLAS */

static double ft__view_bytes(const ft_view *v)
{
    return v->present ? (double)ft__view_elems(v) * (double)ft_dtype_bytes(v->dtype) : 0;
}

static void ft__max_bytes(size_t *most, size_t bytes)
{
    if (bytes > *most) *most = bytes;
}

static int ft__is_float(ft_dtype t) { return t == FT_F32 || t == FT_BF16; }

/* ---- linear: y[N,O] = x[N,I] w[O,I]^T + b[O] */

static ft_status ft__linear_infer(ft_op_call *call)
{
    const ft_view *x = &call->in[0], *w = &call->in[1], *b = &call->in[2];
    ft_view *y = &call->out[0];
    char tx[96], tw[96], tb[96];
    int fits = ft__is_float(x->dtype) && w->dtype == x->dtype && x->ndim >= 1 && w->ndim == 2 &&
               ft__view_cols(x) == ft__view_cols(w);
    if (fits && b->present)
        fits = b->dtype == x->dtype && b->ndim == 1 && b->shape[0] == w->shape[0];
    if (!fits)
        return ft_error(FT_ERR_SHAPE, "linear: x %s, w %s, b %s: needs x [...,I], w [O,I] and "
                        "b [O] or none, all fp32 or all bf16", ft__view_text(x, tx, sizeof tx),
                        ft__view_text(w, tw, sizeof tw), ft__view_text(b, tb, sizeof tb));
    y->present = 1;
    y->dtype = x->dtype;
    y->ndim = x->ndim;
    for (int i = 0; i + 1 < x->ndim; i++) y->shape[i] = x->shape[i];
    y->shape[x->ndim - 1] = w->shape[0];
    return FT_OK;
}

static void ft__linear_cost(const ft_op_call *call, double *flops, double *bytes)
{
    const ft_view *x = &call->in[0], *w = &call->in[1];
    *flops = 2.0 * (double)ft__view_elems(x) * (double)w->shape[0];
    *bytes = ft__view_bytes(x) + ft__view_bytes(w) + ft__view_bytes(&call->in[2]) +
             (double)ft__view_rows(x) * (double)w->shape[0] * (double)ft_dtype_bytes(x->dtype);
}

/* On FT_GPU a product may use this much, cuBLASLt's advice for Hopper: the same whatever the shape
   and chip, so that the heuristic's choice depends on nothing else. */
#define FT__GPU_GEMM_BYTES ((size_t)32 << 20)

/* And C in fp32, where cuBLASLt will not round it: bf16 from fp32 factors. */
static size_t ft__gpu_gemm_bytes(int64_t m, int64_t n, ft_dtype ta, ft_dtype tc)
{
    int wide = ta == FT_F32 && tc == FT_BF16;
    return FT__GPU_GEMM_BYTES + (wide ? (size_t)(m * n) * sizeof(float) : 0);
}

static void ft__linear_scratch(ft_op_call *call)
{
    const ft_view *x = &call->in[0], *w = &call->in[1], *dy = &call->dout[0];
    int64_t n = ft__view_rows(x), i = w->shape[1], o = w->shape[0];
    size_t *most = &call->workspace_bytes;
    if (call->device == FT_GPU) {
        *most = FT__GPU_GEMM_BYTES;
        if (call->backward && call->din[0].present)
            ft__max_bytes(most, ft__gpu_gemm_bytes(n, i, dy->dtype, call->din[0].dtype));
        if (call->backward && call->din[1].present)
            ft__max_bytes(most, ft__gpu_gemm_bytes(o, i, dy->dtype, call->din[1].dtype));
        if (call->backward && call->din[2].present) ft__max_bytes(most, ftk_rows_sum_bytes(n, o));
        return;
    }
    if (!call->backward)
        ft__max_bytes(most, ft__gemm_workspace_bytes(n, o, i, x->dtype, w->dtype, x->dtype));
    if (call->backward && call->din[0].present)
        ft__max_bytes(most, ft__gemm_workspace_bytes(n, i, o, dy->dtype, w->dtype,
                                                     call->din[0].dtype));
    if (call->backward && call->din[1].present)
        ft__max_bytes(most, ft__gemm_workspace_bytes(o, i, n, dy->dtype, x->dtype,
                                                     call->din[1].dtype));
}

/* The bias is what the product is added to, so that a bf16 y is rounded once. */
static ft_status ft__linear_forward(const ft_op_call *call)
{
    const ft_view *x = &call->in[0], *w = &call->in[1], *b = &call->in[2], *y = &call->out[0];
    int64_t n = ft__view_rows(x), i = w->shape[1], o = w->shape[0];
    size_t row_bytes = (size_t)o * ft_dtype_bytes(y->dtype);
    for (int64_t r = 0; b->present && r < n; r++)
        memcpy(ft__at(y->data, y->dtype, r * o), b->data, row_bytes);
    ft__gemm(n, o, i, x->data, x->dtype, i, 1, w->data, w->dtype, 1, i, y->data, y->dtype, o,
             b->present, call->workspace);
    return FT_OK;
}

/* to[O] = or += the sum of the rows of dy[N,O], in row order in fp32. */
static void ft__sum_rows(const ft_view *to, const ft_view *dy, int64_t n, int accumulate)
{
    float sum[256], row[256];
    int64_t o = ft__view_elems(to);
    for (int64_t first = 0; first < o; first += 256) {
        int64_t width = ft__min(256, o - first);
        memset(sum, 0, sizeof sum);
        for (int64_t r = 0; r < n; r++) {
            ft__load_row(row, dy->data, dy->dtype, r * o + first, width);
            for (int64_t j = 0; j < width; j++) sum[j] += row[j];
        }
        ft__store_row(to->data, to->dtype, first, width, sum, accumulate);
    }
}

/* An absent gradient of the output is zero. */
static void ft__zero_grads(const ft_op_call *call)
{
    for (int i = 0; i < call->op->n_in; i++) {
        const ft_view *d = &call->din[i];
        if (d->present && !call->accumulate[i])
            memset(d->data, 0, (size_t)ft__view_elems(d) * ft_dtype_bytes(d->dtype));
    }
}

static ft_status ft__linear_backward(const ft_op_call *call)
{
    const ft_view *x = &call->in[0], *w = &call->in[1], *dy = &call->dout[0];
    const ft_view *dx = &call->din[0], *dw = &call->din[1], *db = &call->din[2];
    int64_t n = ft__view_rows(x), i = w->shape[1], o = w->shape[0];
    if (!dy->present) {
        ft__zero_grads(call);
        return FT_OK;
    }
    if (dw->present)
        ft__gemm(o, i, n, dy->data, dy->dtype, 1, o, x->data, x->dtype, i, 1, dw->data, dw->dtype,
                 i, call->accumulate[1], call->workspace);
    if (db->present) ft__sum_rows(db, dy, n, call->accumulate[2]);
    if (dx->present)
        ft__gemm(n, i, o, dy->data, dy->dtype, o, 1, w->data, w->dtype, i, 1, dx->data, dx->dtype,
                 i, call->accumulate[0], call->workspace);
    return FT_OK;
}

/* ---- matmul: unrecorded; i[0], i[1] transpose a, b; i[2] accumulates */

typedef struct ft__mat { int64_t rows, cols, rs, cs; } ft__mat;

static ft__mat ft__mat_of(const ft_view *v, int transpose)
{
    ft__mat m;
    m.rows = transpose ? ft__view_cols(v) : ft__view_rows(v);
    m.cols = transpose ? ft__view_rows(v) : ft__view_cols(v);
    m.rs = transpose ? 1 : m.cols;
    m.cs = transpose ? m.rows : 1;
    return m;
}

static ft_status ft__matmul_infer(ft_op_call *call)
{
    const ft_view *a = &call->in[0], *b = &call->in[1], *c = &call->out[0];
    char ta[96], tb[96], tc[96];
    ft__mat A = ft__mat_of(a, call->attr.i[0] != 0), B = ft__mat_of(b, call->attr.i[1] != 0);
    if (ft__is_float(a->dtype) && ft__is_float(b->dtype) && ft__is_float(c->dtype) &&
        a->ndim >= 2 && b->ndim >= 2 && c->ndim >= 2 && A.cols == B.rows &&
        ft__view_rows(c) == A.rows && ft__view_cols(c) == B.cols)
        return FT_OK;
    return ft_error(FT_ERR_SHAPE,
                    "matmul: a %s%s, b %s%s, c %s: needs [m,k] [k,n] [m,n], fp32 or bf16",
                    ft__view_text(a, ta, sizeof ta), call->attr.i[0] ? " transposed" : "",
                    ft__view_text(b, tb, sizeof tb), call->attr.i[1] ? " transposed" : "",
                    ft__view_text(c, tc, sizeof tc));
}

static void ft__matmul_cost(const ft_op_call *call, double *flops, double *bytes)
{
    const ft_view *c = &call->out[0];
    *flops = 2.0 * (double)ft__view_elems(c) *
             (double)ft__mat_of(&call->in[0], call->attr.i[0] != 0).cols;
    *bytes = ft__view_bytes(&call->in[0]) + ft__view_bytes(&call->in[1]) + ft__view_bytes(c);
}

static void ft__matmul_scratch(ft_op_call *call)
{
    ft__mat A = ft__mat_of(&call->in[0], call->attr.i[0] != 0);
    if (call->device == FT_GPU) {
        call->workspace_bytes = ft__gpu_gemm_bytes(A.rows, ft__view_cols(&call->out[0]),
                                                   call->in[0].dtype, call->out[0].dtype);
        return;
    }
    call->workspace_bytes = ft__gemm_workspace_bytes(A.rows, ft__view_cols(&call->out[0]), A.cols,
                                                     call->in[0].dtype, call->in[1].dtype,
                                                     call->out[0].dtype);
}

static ft_status ft__matmul_forward(const ft_op_call *call)
{
    const ft_view *a = &call->in[0], *b = &call->in[1], *c = &call->out[0];
    ft__mat A = ft__mat_of(a, call->attr.i[0] != 0), B = ft__mat_of(b, call->attr.i[1] != 0);
    ft__gemm(A.rows, B.cols, A.cols, a->data, a->dtype, A.rs, A.cs, b->data, b->dtype, B.rs, B.cs,
             c->data, c->dtype, B.cols, call->attr.i[2] != 0, call->workspace);
    return FT_OK;
}

static const ft_op ft__op_matmul = {
    "matmul", 2, 1, 0, 0, 0, {0, 0, 0, 0, 0, 0, 0, 0}, 0, 0, 0,
    ft__matmul_infer, ft__matmul_cost, ft__matmul_scratch, ft__matmul_forward, NULL, NULL,
    NULL, NULL,
    FT_GPU_KERNELS(ft__gpu_matmul_forward, NULL, NULL)
};

FT_API ft_status ft_matmul(ft_tensor *c, const ft_tensor *a, int transpose_a, const ft_tensor *b,
                           int transpose_b, int accumulate, ft_stream *stream)
{
    ft_tensor *in[2];
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    in[0] = (ft_tensor *)(uintptr_t)a;
    in[1] = (ft_tensor *)(uintptr_t)b;
    attr.i[0] = transpose_a;
    attr.i[1] = transpose_b;
    attr.i[2] = accumulate;
    return ft_op_run(stream, &ft__op_matmul, in, &c, &attr);
}

static const ft_op ft__op_linear = {
    "linear", 3, 1,
    FT_IN(2),                       /* optional: b */
    FT_IN(0) | FT_IN(1) | FT_IN(2), /* grads */
    FT_IN(0) | FT_IN(1) | FT_IN(2), /* accumulates */
    {FT_IN(1), FT_IN(0), 0, 0, 0, 0, 0, 0},
    0, 0, FT_OP_SPLIT, /* cheap, replay_from, flags */
    ft__linear_infer, ft__linear_cost, ft__linear_scratch,
    ft__linear_forward, ft__linear_backward, NULL,
    NULL, NULL,
    FT_GPU_KERNELS(ft__gpu_linear_forward, ft__gpu_linear_backward, NULL)
};

FT_API ft_status ft_linear(ft_ctx *ctx, ft_tensor **y, ft_tensor *x, ft_tensor *w, ft_tensor *b)
{
    ft_tensor *in[3];
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    in[0] = x;
    in[1] = w;
    in[2] = b;
    return ft_apply(ctx, &ft__op_linear, in, &attr, y);
}

/* ---- linear_cross_entropy: loss = scale * sum over counted tokens of -log softmax(x w^T)[label]

   For a chunk of c tokens: logits z[c,V] = x w^T; with p = softmax(z) a token adds
   log sum exp(z - max) + max - z[label] to the loss, and its
   dz = scale * dloss * (p - onehot(label)) is written over z. Then dw += dz^T x and dx = dz w, the
   latter last, as it may lie over x. */

#define FT__IGNORE (-100)

static int64_t ft__ce_chunk(const ft_op_call *call)
{
    int64_t chunk = call->attr.i[0] > 0 ? call->attr.i[0] : 2048;
    return ft__min(chunk, ft__view_rows(&call->in[0]));
}

static ft_status ft__ce_infer(ft_op_call *call)
{
    const ft_view *x = &call->in[0], *w = &call->in[1], *labels = &call->in[2], *s = &call->in[3];
    ft_view *loss = &call->out[0];
    char tx[96], tw[96], tl[96], ts[96];
    int fits = ft__is_float(x->dtype) && w->dtype == x->dtype && x->ndim >= 1 && w->ndim == 2 &&
               ft__view_cols(x) == ft__view_cols(w) && labels->dtype == FT_I32 &&
               ft__view_elems(labels) == ft__view_rows(x);
    if (fits && labels->ndim == x->ndim - 1)
        for (int i = 0; i < labels->ndim; i++) fits = fits && labels->shape[i] == x->shape[i];
    else fits = fits && labels->ndim == 1; /* flat */
    if (fits && s->present) fits = s->dtype == FT_F32 && ft__view_elems(s) == 1;
    if (!fits)
        return ft_error(FT_ERR_SHAPE,
                        "linear_cross_entropy: x %s, w %s, labels %s, scale %s: needs x [...,C] "
                        "and w [V,C], both fp32 or both bf16, int32 labels [...], and scale fp32 "
                        "[1] or none",
                        ft__view_text(x, tx, sizeof tx), ft__view_text(w, tw, sizeof tw),
                        ft__view_text(labels, tl, sizeof tl), ft__view_text(s, ts, sizeof ts));
    if (call->attr.i[0] < 0)
        return ft_error(FT_ERR_ARG, "linear_cross_entropy: chunk_tokens %lld: needs a positive "
                        "number, or 0 for 2048", (long long)call->attr.i[0]);
    loss->present = 1;
    loss->dtype = FT_F32;
    loss->ndim = 1;
    loss->shape[0] = 1;
    return FT_OK;
}

static void ft__ce_cost(const ft_op_call *call, double *flops, double *bytes)
{
    const ft_view *x = &call->in[0], *w = &call->in[1];
    double logits = (double)ft__view_rows(x) * (double)w->shape[0];
    int64_t chunk = ft__ce_chunk(call), chunks = (ft__view_rows(x) + chunk - 1) / chunk;
    *flops = 2.0 * logits * (double)w->shape[1];
    *bytes = ft__view_bytes(x) + (double)chunks * ft__view_bytes(w) +
             3.0 * logits * (double)ft_dtype_bytes(x->dtype) + ft__view_bytes(&call->in[2]);
}

/* Workspace parts: fp32 dw over chunks where its own dtype would round after each; one row of
   logits in fp32 where they are bf16; the GEMMs. */
typedef struct ft__ce_parts { size_t dw, row, gemm; } ft__ce_parts;

static ft__ce_parts ft__ce_layout(const ft_op_call *call)
{
    const ft_view *x = &call->in[0], *w = &call->in[1], *dx = &call->din[0], *dw = &call->din[1];
    int64_t c = ft__ce_chunk(call), V = w->shape[0], C = w->shape[1];
    ft_dtype t = x->dtype;
    ft__ce_parts part;
    part.dw = part.row = 0;
    part.gemm = ft__gemm_workspace_bytes(c, V, C, t, t, t);
    if (t == FT_BF16) part.row = (size_t)(V * 4 + 63) / 64 * 64;
    if (!call->backward) return part;
    if (dw->present && dw->dtype == FT_BF16 && c < ft__view_rows(x))
        part.dw = (size_t)(V * C * 4 + 63) / 64 * 64;
    if (dw->present)
        ft__max_bytes(&part.gemm, ft__gemm_workspace_bytes(V, C, c, t, t,
                                                           part.dw ? FT_F32 : dw->dtype));
    if (dx->present) ft__max_bytes(&part.gemm, ft__gemm_workspace_bytes(c, C, V, t, t, dx->dtype));
    return part;
}

/* The same on FT_GPU: what the kernels share, a loss for each token, fp32 dw, the GEMMs. */
typedef struct ft__ce_gpu_parts { size_t state, losses, dw, gemm; } ft__ce_gpu_parts;

static ft__ce_gpu_parts ft__ce_gpu_layout(const ft_op_call *call)
{
    ft__ce_gpu_parts part;
    int64_t rows = ft__view_rows(&call->in[0]);
    const ft_view *dx = &call->din[0], *dw = &call->din[1];
    part.state = FT_ALIGN_BYTES;
    part.losses = ft_accounted_bytes((size_t)rows * sizeof(float));
    part.dw = 0;
    if (call->backward && dw->present && dw->dtype == FT_BF16 && ft__ce_chunk(call) < rows)
        part.dw = ft_accounted_bytes((size_t)ft__view_elems(dw) * sizeof(float));
    part.gemm = FT__GPU_GEMM_BYTES;
    if (call->backward && dw->present && !part.dw)
        ft__max_bytes(&part.gemm, ft__gpu_gemm_bytes(dw->shape[0], dw->shape[1],
                                                     call->in[0].dtype, dw->dtype));
    if (call->backward && dx->present)
        ft__max_bytes(&part.gemm, ft__gpu_gemm_bytes(ft__ce_chunk(call), ft__view_cols(dx),
                                                     call->in[0].dtype, dx->dtype));
    return part;
}

static void ft__ce_scratch(ft_op_call *call)
{
    const ft_view *x = &call->in[0], *w = &call->in[1];
    call->scratch_bytes = (size_t)(ft__ce_chunk(call) * w->shape[0]) * ft_dtype_bytes(x->dtype);
    if (call->device == FT_GPU) {
        ft__ce_gpu_parts gpu = ft__ce_gpu_layout(call);
        call->workspace_bytes = gpu.state + gpu.losses + gpu.dw + gpu.gemm;
        return;
    }
    ft__ce_parts part = ft__ce_layout(call);
    call->workspace_bytes = part.dw + part.row + part.gemm;
}

/* Checks every label before anything is written, and counts those that are not ignored. */
static ft_status ft__ce_count(const ft_op_call *call, int64_t *counted)
{
    const int32_t *label = (const int32_t *)call->in[2].data;
    int64_t n = ft__view_elems(&call->in[2]), V = call->in[1].shape[0];
    *counted = 0;
    for (int64_t i = 0; i < n; i++) {
        if (label[i] == FT__IGNORE) continue;
        if (label[i] < 0 || label[i] >= V)
            return ft_error(FT_ERR_DATA, "linear_cross_entropy: label %d at position %lld of %lld "
                            "is outside the vocabulary 0..%lld; -100 marks a token to ignore",
                            (int)label[i], (long long)i, (long long)n, (long long)(V - 1));
        ++*counted;
    }
    return FT_OK;
}

static float ft__row_max(const float *x, int64_t n)
{
    float part[16], most = x[0];
    int64_t i = 0;
    for (int l = 0; l < 16; l++) part[l] = x[0];
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; l++) part[l] = x[i + l] > part[l] ? x[i + l] : part[l];
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int l = 0; l < 16; l++) most = part[l] > most ? part[l] : most;
    return most;
}

/* x = exp(x - most). Returns the sum: 16 fp32 lanes over 256 elements, double beyond. */
static double ft__row_exp_sum(float *x, int64_t n, float most)
{
    double sum = 0;
    for (int64_t first = 0; first < n; first += 256) {
        float part[16], *at = x + first;
        int64_t width = ft__min(256, n - first), i = 0;
        memset(part, 0, sizeof part);
        for (int64_t j = 0; j < width; j++) at[j] -= most;
        ft__exp_row(at, width);
        for (; i + 16 <= width; i += 16)
            for (int l = 0; l < 16; l++) part[l] += at[i + l];
        for (int l = 0; i < width; i++, l++) part[l] += at[i];
        for (int l = 0; l < 16; l++) sum += (double)part[l];
    }
    return sum;
}

typedef struct ft__ce { /* a pass over the chunks */
    const ft_op_call *call;
    int64_t n, V, C;
    ft_dtype t;
    int grads;        /* dz is wanted */
    float factor;     /* of dz: scale * dloss */
    double total;     /* of -log p over counted tokens, in token order */
    float *dw, *row;  /* parts of the workspace, NULL without */
    void *gemm;
} ft__ce;

/* One token: adds to the loss; with grads dz replaces z, otherwise z is lost. */
static void ft__ce_token(ft__ce *ce, void *z, int32_t label)
{
    float *row = ce->row ? ce->row : (float *)z;
    if (label == FT__IGNORE) {
        if (ce->grads) memset(z, 0, (size_t)ce->V * ft_dtype_bytes(ce->t));
        return;
    }
    if (ce->row) ft__load_row(row, z, ce->t, 0, ce->V);
    float at_label = row[label], most = ft__row_max(row, ce->V);
    double sum = ft__row_exp_sum(row, ce->V, most);
    ce->total += log(sum) + ((double)most - (double)at_label);
    if (!ce->grads) return;
    float over = (float)((double)ce->factor / sum);
    for (int64_t j = 0; j < ce->V; j++) row[j] *= over;
    row[label] -= ce->factor;
    if (ce->row) ft__store_row(z, ce->t, 0, ce->V, row, 0);
}

static void ft__ce_chunk_grads(ft__ce *ce, int64_t first, int64_t c)
{
    const ft_op_call *call = ce->call;
    const ft_view *x = &call->in[0], *w = &call->in[1], *dx = &call->din[0], *dw = &call->din[1];
    int64_t V = ce->V, C = ce->C;
    if (dw->present)
        ft__gemm(V, C, c, call->scratch, ce->t, 1, V, ft__at_const(x->data, ce->t, first * C),
                 ce->t, C, 1, ce->dw ? (void *)ce->dw : dw->data, ce->dw ? FT_F32 : dw->dtype, C,
                 first > 0 || (!ce->dw && call->accumulate[1]), ce->gemm);
    if (dx->present)
        ft__gemm(c, C, V, call->scratch, ce->t, V, 1, w->data, ce->t, C, 1,
                 ft__at(dx->data, dx->dtype, first * C), dx->dtype, C, call->accumulate[0],
                 ce->gemm);
}

static void ft__ce_chunks(ft__ce *ce)
{
    const ft_op_call *call = ce->call;
    const int32_t *labels = (const int32_t *)call->in[2].data;
    int64_t chunk = ft__ce_chunk(call), V = ce->V, C = ce->C;
    for (int64_t first = 0; first < ce->n; first += chunk) {
        int64_t c = ft__min(chunk, ce->n - first);
        ft__gemm(c, V, C, ft__at_const(call->in[0].data, ce->t, first * C), ce->t, C, 1,
                 call->in[1].data, ce->t, 1, C, call->scratch, ce->t, V, 0, ce->gemm);
        for (int64_t i = 0; i < c; i++)
            ft__ce_token(ce, ft__at(call->scratch, ce->t, i * V), labels[first + i]);
        if (ce->grads) ft__ce_chunk_grads(ce, first, c);
    }
    if (ce->dw)
        ft__store_row(call->din[1].data, FT_BF16, 0, V * C, ce->dw, call->accumulate[1]);
}

/* Forward, backward, and both in one pass: the same code, hence the same bits. */
static ft_status ft__ce_run(const ft_op_call *call)
{
    const ft_view *x = &call->in[0], *scale = &call->in[3], *dloss = &call->dout[0];
    ft__ce_parts part = ft__ce_layout(call);
    char *room = (char *)call->workspace;
    int64_t counted;
    ft__ce ce;
    FT_TRY(ft__ce_count(call, &counted));
    memset(&ce, 0, sizeof ce);
    ce.call = call;
    ce.n = ft__view_rows(x);
    ce.V = call->in[1].shape[0];
    ce.C = call->in[1].shape[1];
    ce.t = x->dtype;
    ce.grads = call->backward && (call->din[0].present || call->din[1].present);
    ce.dw = part.dw ? (float *)(void *)room : NULL;
    ce.row = part.row ? (float *)(void *)(room + part.dw) : NULL;
    ce.gemm = part.gemm ? room + part.dw + part.row : NULL;
    double by = counted ? 1.0 / (double)counted : 0;
    if (scale->present && counted) by = (double)ft__load(scale->data, FT_F32, 0);
    if (ce.grads && dloss->present)
        ce.factor = (float)(by * (double)ft__load(dloss->data, FT_F32, 0));
    int want_loss = !call->backward || call->deferred;
    if (counted && (want_loss || ce.grads)) ft__ce_chunks(&ce);
    else ft__zero_grads(call);
    if (want_loss) ft__store(call->out[0].data, FT_F32, 0, (float)(by * ce.total), 0);
    return FT_OK;
}

static const ft_op ft__op_linear_cross_entropy = {
    "linear_cross_entropy", 4, 1,
    FT_IN(3),            /* optional: scale */
    FT_IN(0) | FT_IN(1), /* grads */
    FT_IN(0) | FT_IN(1), /* accumulates */
    {FT_IN(0) | FT_IN(1) | FT_IN(2) | FT_IN(3), FT_IN(0) | FT_IN(1) | FT_IN(2) | FT_IN(3),
     0, 0, 0, 0, 0, 0},
    0, 0,                /* cheap, replay_from */
    FT_OP_DEFERRED | FT_OP_GRAD_OVER_IN,
    ft__ce_infer, ft__ce_cost, ft__ce_scratch,
    ft__ce_run, ft__ce_run, NULL,
    NULL, NULL,
    FT_GPU_KERNELS(ft__gpu_ce_run, ft__gpu_ce_run, NULL)
};

FT_API ft_status ft_linear_cross_entropy(ft_ctx *ctx, ft_tensor **loss, ft_tensor *x, ft_tensor *w,
                                         ft_tensor *labels, ft_tensor *scale, int64_t chunk_tokens)
{
    ft_tensor *in[4];
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.i[0] = chunk_tokens;
    in[0] = x;
    in[1] = w;
    in[2] = labels;
    in[3] = scale;
    return ft_apply(ctx, &ft__op_linear_cross_entropy, in, &attr, loss);
}

/* ---------------------------------------------------------------------------------- >>ops.impl

   A kernel works on blocks of FT__BLOCK elements of a row, in fp32 on the stack, whatever the
   storage is: one code path for fp32 and bf16, and every result is rounded once. Sums run in 16
   explicit lanes, so that they vectorise without leave to reorder, in an order that the length
   alone fixes. Where a gradient may be written over an input or over dout, a kernel has read an
   element's operands before it writes that element. Weight gradients collect in fp32 over all
   tokens and are rounded, or added, once. */

#define FT__BLOCK 256
#define FT__SUMS 16

static int64_t ft__span(int64_t n, int64_t at) { return n - at < FT__BLOCK ? n - at : FT__BLOCK; }

/* The lanes in double: the last few additions are where a long sum loses most. */
static double ft__lanes_sum(const float *lane)
{
    double sum = 0;
    for (int j = 0; j < FT__SUMS; j++) sum += (double)lane[j];
    return sum;
}

static double ft__row_dot(const float *a, const float *b, int64_t n)
{
    float lane[FT__SUMS];
    int64_t i = 0;
    for (int j = 0; j < FT__SUMS; j++) lane[j] = 0;
    for (; i + FT__SUMS <= n; i += FT__SUMS)
        for (int j = 0; j < FT__SUMS; j++) lane[j] += a[i + j] * b[i + j];
    for (int64_t j = 0; i + j < n; j++) lane[j] += a[i + j] * b[i + j];
    return ft__lanes_sum(lane);
}

static double ft__row_sum(const float *a, int64_t n)
{
    float lane[FT__SUMS];
    int64_t i = 0;
    for (int j = 0; j < FT__SUMS; j++) lane[j] = 0;
    for (; i + FT__SUMS <= n; i += FT__SUMS)
        for (int j = 0; j < FT__SUMS; j++) lane[j] += a[i + j];
    for (int64_t j = 0; i + j < n; j++) lane[j] += a[i + j];
    return ft__lanes_sum(lane);
}

static float ft__row_top(const float *a, int64_t n, float start)
{
    float lane[FT__SUMS];
    int64_t i = 0;
    for (int j = 0; j < FT__SUMS; j++) lane[j] = start;
    for (; i + FT__SUMS <= n; i += FT__SUMS)
        for (int j = 0; j < FT__SUMS; j++) lane[j] = a[i + j] > lane[j] ? a[i + j] : lane[j];
    for (int64_t j = 0; i + j < n; j++) lane[j] = a[i + j] > lane[j] ? a[i + j] : lane[j];
    for (int j = 0; j < FT__SUMS; j++) start = lane[j] > start ? lane[j] : start;
    return start;
}

/* s = 1 / (1 + exp(-x)) */
static void ft__sigmoid_row(float *s, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) s[i] = -x[i];
    ft__exp_row(s, n);
    for (int64_t i = 0; i < n; i++) s[i] = 1.0f / (1.0f + s[i]);
}

static void ft__get(float *to, const ft_view *v, int64_t first, int64_t n)
{
    ft__load_row(to, v->data, v->dtype, first, n);
}

/* A gradient that is absent is zero. */
static void ft__get_grad(float *to, const ft_view *v, int64_t first, int64_t n)
{
    if (v->present) ft__load_row(to, v->data, v->dtype, first, n);
    else memset(to, 0, (size_t)n * sizeof *to);
}

static void ft__put(const ft_view *v, int64_t first, int64_t n, const float *from, int accumulate)
{
    ft__store_row(v->data, v->dtype, first, n, from, accumulate);
}

static size_t ft__bytes_of(const ft_view *v)
{
    return v->present ? (size_t)ft__view_elems(v) * ft_dtype_bytes(v->dtype) : 0;
}

/* ---- workspace of the device kernels ----

   They take the number of their parts from the workspace that they are given, so these formulas are
   the only ones. Shapes alone decide: never the chip. */

enum { FT__GPU_NORM_PARTS = 264, FT__GPU_SUM_PARTS = 1056 };

/* A norm's gradients of its weights: one fp32 row of C for each block and each of `sets` weights;
   at least four rows a block. */
static size_t ft__gpu_norm_bytes(int64_t rows, int64_t C, int64_t sets)
{
    return (size_t)(ft__min((rows + 3) / 4, FT__GPU_NORM_PARTS) * sets * C) * sizeof(float);
}

/* The sum of n rows of o elements: parts of at least 64 rows, enough to fill a chip. */
size_t ftk_rows_sum_bytes(int64_t n, int64_t o)
{
    int64_t width = o % 8 ? 32 : 256, parts = FT__GPU_SUM_PARTS / ((o + width - 1) / width);
    parts = ft__min(ft__min(parts, 256), (n + 63) / 64);
    return parts > 1 ? (size_t)(parts * o) * sizeof(float) : 0;
}

/* Two fp32 rows of C for each 32 tokens; a count and an end for each row, a total for each 1024
   rows and for all, a position for each token. */
size_t ftk_lookup_bytes(int64_t rows, int64_t n, int64_t C)
{
    int64_t pieces = (n + FTK_PIECE - 1) / FTK_PIECE, chunks = (rows + FTK_CHUNK - 1) / FTK_CHUNK;
    return (size_t)(pieces * 2 * C + 2 * rows + chunks + 1 + n) * 4;
}

/* The sum of n elements: one double for each block, at least 4096 elements a block. */
static size_t ft__gpu_sum_bytes(int64_t n)
{
    return (size_t)ft__min((n + 4095) / 4096, FT__GPU_SUM_PARTS) * sizeof(double);
}

/* ---- checks ---- */

static ft_status ft__want_float(const ft_op_call *call, int i)
{
    if (call->in[i].dtype == FT_F32 || call->in[i].dtype == FT_BF16) return FT_OK;
    return ft_error(FT_ERR_SHAPE, "%s: input %d is %s, it must be fp32 or bf16", call->op->name, i,
                    ft_dtype_name(call->in[i].dtype));
}

/* Inputs 0..n-1 are fp32, or all bf16. */
static ft_status ft__want_floats(const ft_op_call *call, int n)
{
    for (int i = 0; i < n; i++) {
        FT_TRY(ft__want_float(call, i));
        if (call->in[i].dtype != call->in[0].dtype)
            return ft_error(FT_ERR_SHAPE, "%s: input %d is %s, input 0 is %s: convert one with "
                            "ft_copy", call->op->name, i, ft_dtype_name(call->in[i].dtype),
                            ft_dtype_name(call->in[0].dtype));
    }
    return FT_OK;
}

static int ft__same_shape(const ft_view *a, const ft_view *b)
{
    if (a->ndim != b->ndim) return 0;
    for (int d = 0; d < a->ndim; d++)
        if (a->shape[d] != b->shape[d]) return 0;
    return 1;
}

/* b's shape is the last b->ndim dimensions of a's. */
static int ft__trailing(const ft_view *a, const ft_view *b)
{
    int skip = a->ndim - b->ndim;
    if (skip < 0) return 0;
    for (int d = 0; d < b->ndim; d++)
        if (a->shape[skip + d] != b->shape[d]) return 0;
    return 1;
}

static ft_status ft__shape_error(const ft_op_call *call, int a, int b, const char *rule)
{
    char first[160], second[160];
    return ft_error(FT_ERR_SHAPE, "%s: input %d is %s, input %d is %s: %s", call->op->name, a,
                    ft__view_text(&call->in[a], first, sizeof first), b,
                    ft__view_text(&call->in[b], second, sizeof second), rule);
}

/* Input i is one weight for each element of input 0's last dimension. */
static ft_status ft__want_weight(const ft_op_call *call, int i)
{
    if (call->in[i].ndim == 1 && call->in[i].shape[0] == ft__view_cols(&call->in[0])) return FT_OK;
    return ft__shape_error(call, 0, i, "the weight must be [C], C the last dimension of input 0");
}

static void ft__out_like(ft_op_call *call, int o, const ft_view *like)
{
    call->out[o] = *like;
    call->out[o].present = 1;
    call->out[o].data = NULL;
}

static ft_status ft__want_eps(const ft_op_call *call)
{
    if (call->attr.f[0] >= 0 && call->attr.f[0] < 1e30) return FT_OK;
    return ft_error(FT_ERR_ARG, "%s: eps %g must be finite and not negative", call->op->name,
                    call->attr.f[0]);
}

/* ---- costs: flops an element of output 0, bytes of all inputs and outputs once ---- */

static void ft__cost_elems(const ft_op_call *call, double each, double *flops, double *bytes)
{
    *flops = each * (double)ft__view_elems(&call->out[0]);
    *bytes = 0;
    for (int i = 0; i < call->op->n_in; i++) *bytes += (double)ft__bytes_of(&call->in[i]);
    for (int i = 0; i < call->op->n_out; i++) *bytes += (double)ft__bytes_of(&call->out[i]);
}

static void ft__cost_move(const ft_op_call *call, double *flops, double *bytes)
{
    ft__cost_elems(call, 0, flops, bytes);
}

static void ft__cost_one(const ft_op_call *call, double *flops, double *bytes)
{
    ft__cost_elems(call, 1, flops, bytes);
}

static void ft__cost_few(const ft_op_call *call, double *flops, double *bytes)
{
    ft__cost_elems(call, 5, flops, bytes);
}

static void ft__cost_norm(const ft_op_call *call, double *flops, double *bytes)
{
    ft__cost_elems(call, 4, flops, bytes);
}

static void ft__cost_sum(const ft_op_call *call, double *flops, double *bytes)
{
    ft__cost_elems(call, 0, flops, bytes);
    *flops = (double)ft__view_elems(&call->in[0]);
}

/* ---- fill, copy, accumulate: into tensors that exist, without a tape ---- */

static ft_status ft__fill_infer(ft_op_call *call)
{
    double value = call->attr.f[0];
    if (call->in[0].dtype != FT_I32) return FT_OK;
    if (value >= -2147483648.0 && value <= 2147483647.0 && (double)(int32_t)value == value)
        return FT_OK;
    return ft_error(FT_ERR_ARG, "fill: an int32 tensor cannot hold %g", value);
}

static ft_status ft__fill_forward(const ft_op_call *call)
{
    const ft_view *y = &call->out[0];
    int64_t n = ft__view_elems(y);
    if (y->dtype == FT_I32) {
        int32_t *to = (int32_t *)y->data, value = (int32_t)call->attr.f[0];
        for (int64_t i = 0; i < n; i++) to[i] = value;
        return FT_OK;
    }
    float block[FT__BLOCK];
    for (int i = 0; i < FT__BLOCK; i++) block[i] = (float)call->attr.f[0];
    for (int64_t at = 0; at < n; at += FT__BLOCK) ft__put(y, at, ft__span(n, at), block, 0);
    return FT_OK;
}

static ft_status ft__copy_infer(ft_op_call *call)
{
    char from[160], to[160];
    const ft_view *x = &call->in[0], *y = &call->out[0];
    int same = x->dtype == y->dtype, converts = x->dtype != FT_I32 && y->dtype != FT_I32;
    if (ft__view_elems(x) == ft__view_elems(y) && (same || converts)) return FT_OK;
    return ft_error(FT_ERR_SHAPE, "copy: %s into %s: the number of elements must agree, and int32 "
                    "copies to int32 only", ft__view_text(x, from, sizeof from),
                    ft__view_text(y, to, sizeof to));
}

static ft_status ft__copy_forward(const ft_op_call *call)
{
    const ft_view *x = &call->in[0], *y = &call->out[0];
    int64_t n = ft__view_elems(x);
    float block[FT__BLOCK];
    if (x->dtype == y->dtype) {
        memmove(y->data, x->data, ft__bytes_of(x));
        return FT_OK;
    }
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        ft__get(block, x, at, ft__span(n, at));
        ft__put(y, at, ft__span(n, at), block, 0);
    }
    return FT_OK;
}

static ft_status ft__accumulate_infer(ft_op_call *call)
{
    FT_TRY(ft__want_float(call, 0));
    FT_TRY(ft__want_float(call, 1));
    if (ft__view_elems(&call->in[0]) == ft__view_elems(&call->in[1]) &&
        call->in[1].dtype == call->out[0].dtype) return FT_OK;
    return ft__shape_error(call, 0, 1, "the number of elements must agree");
}

/* out[0], which is in[1] as well, += in[0] */
static ft_status ft__accumulate_forward(const ft_op_call *call)
{
    int64_t n = ft__view_elems(&call->in[0]);
    float block[FT__BLOCK];
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        ft__get(block, &call->in[0], at, ft__span(n, at));
        ft__put(&call->out[0], at, ft__span(n, at), block, 1);
    }
    return FT_OK;
}

static const ft_op ft__op_fill = {
    "fill", 1, 1, 0, 0, 0, { 0 }, 0, 0, 0,
    ft__fill_infer, ft__cost_move, NULL, ft__fill_forward, NULL, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_fill_forward, NULL, NULL)
};

static const ft_op ft__op_copy = {
    "copy", 1, 1, 0, 0, 0, { 0 }, 0, 0, 0,
    ft__copy_infer, ft__cost_move, NULL, ft__copy_forward, NULL, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_copy_forward, NULL, NULL)
};

static const ft_op ft__op_accumulate = {
    "accumulate", 2, 1, 0, 0, 0, { 0 }, 0, 0, 0,
    ft__accumulate_infer, ft__cost_one, NULL, ft__accumulate_forward, NULL, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_accumulate_forward, NULL, NULL)
};

/* ---- embedding ---- */

static ft_status ft__embedding_infer(ft_op_call *call)
{
    const ft_view *tokens = &call->in[0], *table = &call->in[1];
    if (tokens->dtype != FT_I32 || table->ndim != 2 || tokens->ndim >= FT_MAX_DIMS)
        return ft__shape_error(call, 0, 1, "tokens must be int32 with at most 5 dimensions, the "
                               "table [V,C]");
    FT_TRY(ft__want_float(call, 1));
    ft__out_like(call, 0, tokens);
    call->out[0].dtype = table->dtype;
    call->out[0].shape[call->out[0].ndim++] = table->shape[1];
    return FT_OK;
}

static ft_status ft__token_check(const ft_op_call *call, int64_t at)
{
    int32_t token = ((const int32_t *)call->in[0].data)[at];
    int64_t V = call->in[1].shape[0];
    char text[160];
    if (token >= 0 && token < V) return FT_OK;
    return ft_error(FT_ERR_DATA, "%s: token %d at position %lld of %s is outside 0..%lld",
                    call->op->name, (int)token, (long long)at,
                    ft__view_text(&call->in[0], text, sizeof text), (long long)(V - 1));
}

static ft_status ft__embedding_forward(const ft_op_call *call)
{
    const ft_view *table = &call->in[1];
    const int32_t *tokens = (const int32_t *)call->in[0].data;
    int64_t n = ft__view_elems(&call->in[0]);
    size_t row_bytes = (size_t)table->shape[1] * ft_dtype_bytes(table->dtype);
    for (int64_t i = 0; i < n; i++) {
        FT_TRY(ft__token_check(call, i));
        memcpy((char *)call->out[0].data + (size_t)i * row_bytes,
               (const char *)table->data + (size_t)tokens[i] * row_bytes, row_bytes);
    }
    return FT_OK;
}

/* A list of positions for each row of the table: the head [V], the next position [N]. It lets each
   row be summed in fp32 and rounded once, in 4 (V + N) bytes whatever C is. */
static void ft__embedding_scratch(ft_op_call *call)
{
    int64_t V = call->in[1].shape[0], n = ft__view_elems(&call->in[0]);
    if (!call->backward) return;
    call->workspace_bytes = (size_t)(V + n) * 4;
    if (call->device == FT_GPU)
        call->workspace_bytes = ftk_lookup_bytes(V, n, call->in[1].shape[1]);
}

static ft_status ft__embedding_backward(const ft_op_call *call)
{
    const int32_t *tokens = (const int32_t *)call->in[0].data;
    int64_t n = ft__view_elems(&call->in[0]), V = call->in[1].shape[0], C = call->in[1].shape[1];
    int32_t *head = (int32_t *)call->workspace, *next = head + V;
    float sum[FT__BLOCK], g[FT__BLOCK];
    if (!call->din[1].present) return FT_OK;
    if (n > INT32_MAX)
        return ft_error(FT_ERR_SHAPE, "embedding: %lld tokens in one call, at most 2^31 - 1",
                        (long long)n);
    for (int64_t v = 0; v < V; v++) head[v] = -1;
    for (int64_t i = n - 1; i >= 0; i--) {
        FT_TRY(ft__token_check(call, i));
        next[i] = head[tokens[i]];
        head[tokens[i]] = (int32_t)i;
    }
    for (int64_t v = 0; v < V; v++) {
        if (head[v] < 0 && call->accumulate[1]) continue;
        for (int64_t at = 0; at < C; at += FT__BLOCK) {
            int64_t m = ft__span(C, at);
            memset(sum, 0, sizeof sum);
            for (int64_t i = head[v]; i >= 0; i = next[i]) {
                ft__get_grad(g, &call->dout[0], i * C + at, m);
                for (int64_t j = 0; j < m; j++) sum[j] += g[j];
            }
            ft__put(&call->din[1], v * C + at, m, sum, call->accumulate[1]);
        }
    }
    return FT_OK;
}

static const ft_op ft__op_embedding = {
    "embedding", 2, 1, 0, FT_IN(1), FT_IN(1), { 0, FT_IN(0) }, 0, 0, 0,
    ft__embedding_infer, ft__cost_move, ft__embedding_scratch, ft__embedding_forward,
    ft__embedding_backward, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_embedding_forward, ftk_embedding_backward, NULL)
};

FT_API ft_status ft_embedding(ft_ctx *ctx, ft_tensor **y, ft_tensor *tokens, ft_tensor *table)
{
    ft_tensor *in[2];
    in[0] = tokens;
    in[1] = table;
    return ft_apply(ctx, &ft__op_embedding, in, NULL, y);
}

/* ---- RMSNorm: y = x r w, r = 1 / sqrt(mean(x^2) + eps); r is recomputed in backward ---- */

static float ft__rms_scale(const ft_view *x, int64_t first, int64_t n, double eps)
{
    float xs[FT__BLOCK];
    double sum = 0;
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        int64_t m = ft__span(n, at);
        ft__get(xs, x, first + at, m);
        sum += ft__row_dot(xs, xs, m);
    }
    return (float)(1.0 / sqrt(sum / (double)n + eps));
}

/* One row of n elements from `first`; y may be x. */
static void ft__rms_row(const ft_view *y, const ft_view *x, const ft_view *w, int64_t first,
                        int64_t n, double eps)
{
    float xs[FT__BLOCK], ws[FT__BLOCK];
    float r = ft__rms_scale(x, first, n, eps);
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        int64_t m = ft__span(n, at);
        ft__get(xs, x, first + at, m);
        ft__get(ws, w, at, m);
        for (int64_t j = 0; j < m; j++) xs[j] = xs[j] * r * ws[j];
        ft__put(y, first + at, m, xs, 0);
    }
}

/* What one row of backward reads and writes. */
typedef struct ft__rms_grads {
    const ft_view *x, *dy;
    const ft_view *pass;   /* NULL, or a gradient that is added to dx; dx may lie over it, or dy */
    const ft_view *dx;     /* NULL: not wanted */
    int accumulate;
    double eps;
} ft__rms_grads;

/* g = dy w, u = x r:  dx = r (g - u mean(g u)),  dw += dy u (fp32 sums; NULL: not wanted) */
static void ft__rms_row_backward(const ft__rms_grads *a, const ft_view *w, float *dw, int64_t first,
                                 int64_t n)
{
    float xs[FT__BLOCK], ws[FT__BLOCK], g[FT__BLOCK];
    float r = ft__rms_scale(a->x, first, n, a->eps);
    double sum = 0;
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        int64_t m = ft__span(n, at);
        ft__get(xs, a->x, first + at, m);
        ft__get_grad(g, a->dy, first + at, m);
        for (int64_t j = 0; j < m; j++) xs[j] *= r;
        if (dw)
            for (int64_t j = 0; j < m; j++) dw[at + j] += g[j] * xs[j];
        if (!a->dx) continue;
        ft__get(ws, w, at, m);
        for (int64_t j = 0; j < m; j++) g[j] *= ws[j];
        sum += ft__row_dot(g, xs, m);
    }
    if (!a->dx) return;
    float c = (float)(sum / (double)n);
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        int64_t m = ft__span(n, at);
        ft__get(xs, a->x, first + at, m);
        ft__get_grad(g, a->dy, first + at, m);
        ft__get(ws, w, at, m);
        for (int64_t j = 0; j < m; j++) g[j] = r * (g[j] * ws[j] - xs[j] * r * c);
        if (a->pass) {
            ft__get_grad(xs, a->pass, first + at, m);
            for (int64_t j = 0; j < m; j++) g[j] += xs[j];
        }
        ft__put(a->dx, first + at, m, g, a->accumulate);
    }
}

static ft_status ft__rmsnorm_infer(ft_op_call *call)
{
    FT_TRY(ft__want_floats(call, 2));
    FT_TRY(ft__want_weight(call, 1));
    FT_TRY(ft__want_eps(call));
    ft__out_like(call, 0, &call->in[0]);
    return FT_OK;
}

static ft_status ft__rmsnorm_forward(const ft_op_call *call)
{
    int64_t n = ft__view_rows(&call->in[0]), C = ft__view_cols(&call->in[0]);
    for (int64_t i = 0; i < n; i++)
        ft__rms_row(&call->out[0], &call->in[0], &call->in[1], i * C, C, call->attr.f[0]);
    return FT_OK;
}

static void ft__rmsnorm_scratch(ft_op_call *call)
{
    int64_t n = ft__view_rows(&call->in[0]), C = ft__view_cols(&call->in[0]);
    if (!call->backward || !call->din[1].present) return;
    call->workspace_bytes = (size_t)C * sizeof(float);
    if (call->device == FT_GPU) call->workspace_bytes = ft__gpu_norm_bytes(n, C, 1);
}

static ft_status ft__rmsnorm_backward(const ft_op_call *call)
{
    int64_t n = ft__view_rows(&call->in[0]), C = ft__view_cols(&call->in[0]);
    float *dw = call->din[1].present ? (float *)call->workspace : NULL;
    ft__rms_grads a;
    a.x = &call->in[0];
    a.dy = &call->dout[0];
    a.pass = NULL;
    a.dx = call->din[0].present ? &call->din[0] : NULL;
    a.accumulate = call->accumulate[0];
    a.eps = call->attr.f[0];
    if (dw) memset(dw, 0, (size_t)C * sizeof(float));
    for (int64_t i = 0; i < n; i++) ft__rms_row_backward(&a, &call->in[1], dw, i * C, C);
    if (dw) ft__put(&call->din[1], 0, C, dw, call->accumulate[1]);
    return FT_OK;
}

static const ft_op ft__op_rmsnorm = {
    "rmsnorm", 2, 1, 0, FT_IN(0) | FT_IN(1), FT_IN(0) | FT_IN(1),
    { FT_IN(0) | FT_IN(1), FT_IN(0) }, FT_OUT(0), 0, FT_OP_GRAD_OVER_DOUT,
    ft__rmsnorm_infer, ft__cost_norm, ft__rmsnorm_scratch, ft__rmsnorm_forward,
    ft__rmsnorm_backward, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_rmsnorm_forward, ftk_rmsnorm_backward, NULL)
};

FT_API ft_status ft_rmsnorm(ft_ctx *ctx, ft_tensor **y, ft_tensor *x, ft_tensor *w, double eps)
{
    ft_tensor *in[2];
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.f[0] = eps;
    in[0] = x;
    in[1] = w;
    return ft_apply(ctx, &ft__op_rmsnorm, in, &attr, y);
}

/* ---- residual + RMSNorm ---- */

static ft_status ft__add_rmsnorm_infer(ft_op_call *call)
{
    FT_TRY(ft__want_floats(call, 3));
    FT_TRY(ft__want_eps(call));
    if (!ft__same_shape(&call->in[0], &call->in[1]))
        return ft__shape_error(call, 0, 1, "x and delta must have one shape");
    FT_TRY(ft__want_weight(call, 2));
    ft__out_like(call, 0, &call->in[0]);
    ft__out_like(call, 1, &call->in[0]);
    return FT_OK;
}

static void ft__add_row(const ft_view *y, const ft_view *a, const ft_view *b, int64_t first,
                        int64_t n)
{
    float xs[FT__BLOCK], ds[FT__BLOCK];
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        int64_t m = ft__span(n, at);
        ft__get(xs, a, first + at, m);
        ft__get(ds, b, first + at, m);
        for (int64_t j = 0; j < m; j++) xs[j] += ds[j];
        ft__put(y, first + at, m, xs, 0);
    }
}

/* The norm reads the sum as it is stored, so that a replay from the sum gives the same bits. */
static ft_status ft__add_rmsnorm_rows(const ft_op_call *call, int add)
{
    int64_t n = ft__view_rows(&call->out[0]), C = ft__view_cols(&call->out[0]);
    for (int64_t i = 0; i < n; i++) {
        if (add) ft__add_row(&call->out[0], &call->in[0], &call->in[1], i * C, C);
        ft__rms_row(&call->out[1], &call->out[0], &call->in[2], i * C, C, call->attr.f[0]);
    }
    return FT_OK;
}

static ft_status ft__add_rmsnorm_forward(const ft_op_call *call)
{
    return ft__add_rmsnorm_rows(call, 1);
}

static ft_status ft__add_rmsnorm_replay(const ft_op_call *call)
{
    return ft__add_rmsnorm_rows(call, 0);
}

static void ft__add_rmsnorm_scratch(ft_op_call *call)
{
    int64_t n = ft__view_rows(&call->out[0]), C = ft__view_cols(&call->out[0]);
    if (!call->backward || !call->din[2].present) return;
    call->workspace_bytes = (size_t)C * sizeof(float);
    if (call->device == FT_GPU) call->workspace_bytes = ft__gpu_norm_bytes(n, C, 1);
}

static ft_status ft__add_rmsnorm_backward(const ft_op_call *call)
{
    int64_t n = ft__view_rows(&call->out[0]), C = ft__view_cols(&call->out[0]);
    int to = call->din[0].present ? 0 : 1; /* one buffer holds the gradient of both */
    float *dw = call->din[2].present ? (float *)call->workspace : NULL;
    ft__rms_grads a;
    a.x = &call->out[0];
    a.dy = &call->dout[1];
    a.pass = &call->dout[0];
    a.dx = call->din[to].present ? &call->din[to] : NULL;
    a.accumulate = call->accumulate[to];
    a.eps = call->attr.f[0];
    if (dw) memset(dw, 0, (size_t)C * sizeof(float));
    for (int64_t i = 0; i < n; i++) ft__rms_row_backward(&a, &call->in[2], dw, i * C, C);
    if (dw) ft__put(&call->din[2], 0, C, dw, call->accumulate[2]);
    return FT_OK;
}

static const ft_op ft__op_add_rmsnorm = {
    "add_rmsnorm", 3, 2, 0, FT_IN(0) | FT_IN(1) | FT_IN(2), FT_IN(0) | FT_IN(1) | FT_IN(2),
    { FT_OUT(0) | FT_IN(2), FT_OUT(0) | FT_IN(2), FT_OUT(0) }, FT_OUT(1), FT_OUT(0) | FT_IN(2),
    FT_OP_GRAD_OVER_DOUT | FT_OP_GRAD_SAME_01,
    ft__add_rmsnorm_infer, ft__cost_few, ft__add_rmsnorm_scratch, ft__add_rmsnorm_forward,
    ft__add_rmsnorm_backward, ft__add_rmsnorm_replay, NULL, NULL,
    FT_GPU_KERNELS(ftk_add_rmsnorm_forward, ftk_add_rmsnorm_backward, ftk_add_rmsnorm_replay)
};

FT_API ft_status ft_add_rmsnorm(ft_ctx *ctx, ft_tensor **sum, ft_tensor **y, ft_tensor *x,
                                ft_tensor *delta, ft_tensor *w, double eps)
{
    ft_tensor *in[3], *out[2];
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.f[0] = eps;
    in[0] = x;
    in[1] = delta;
    in[2] = w;
    FT_TRY(ft_apply(ctx, &ft__op_add_rmsnorm, in, &attr, out));
    *sum = out[0];
    *y = out[1];
    return FT_OK;
}

/* ---- packed heads: qkv[B,T,(H+2K)*D], attr.i = H, K, D ---- */

static ft_status ft__want_heads(const ft_op_call *call)
{
    const int64_t H = call->attr.i[0], K = call->attr.i[1], D = call->attr.i[2];
    const int64_t most = (int64_t)1 << 24;
    char text[160];
    if (H < 1 || K < 1 || D < 1 || H > most || K > most || D > most || H % K != 0)
        return ft_error(FT_ERR_ARG, "%s: %lld query heads, %lld kv heads of size %lld: all must be "
                        "positive, and the query heads a multiple of the kv heads", call->op->name,
                        (long long)H, (long long)K, (long long)D);
    FT_TRY(ft__want_float(call, 0));
    if (call->in[0].ndim == 3 && call->in[0].shape[2] / D == H + 2 * K &&
        call->in[0].shape[2] % D == 0) return FT_OK;
    return ft_error(FT_ERR_SHAPE, "%s: qkv is %s, it must be [B,T,(H+2K)*D] with H %lld, K %lld, "
                    "D %lld", call->op->name, ft__view_text(&call->in[0], text, sizeof text),
                    (long long)H, (long long)K, (long long)D);
}

static void ft__heads_attr(ft_attr *attr, int64_t H, int64_t K, int64_t D, double eps)
{
    memset(attr, 0, sizeof *attr);
    attr->i[0] = H;
    attr->i[1] = K;
    attr->i[2] = D;
    attr->f[0] = eps;
}

/* n elements from `first` go over as they are; nothing to do where both are the same memory. */
static void ft__span_copy(const ft_view *to, const ft_view *from, int64_t first, int64_t n, int add)
{
    float block[FT__BLOCK];
    if (from->present && to->data == from->data) return;
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        ft__get_grad(block, from, first + at, ft__span(n, at));
        ft__put(to, first + at, ft__span(n, at), block, add);
    }
}

/* ---- RoPE ---- */

static ft_status ft__rope_infer(ft_op_call *call)
{
    const ft_view *table = &call->in[1];
    int64_t D = call->attr.i[2];
    FT_TRY(ft__want_heads(call));
    if (D % 2)
        return ft_error(FT_ERR_ARG, "rope: head size %lld is odd; pairs are rotated", (long long)D);
    if (table->dtype != FT_F32 || table->ndim != 3 || table->shape[0] < call->in[0].shape[1] ||
        table->shape[1] != D / 2 || table->shape[2] != 2)
        return ft__shape_error(call, 0, 1, "the table must be fp32 [at least T, D/2, 2], from "
                               "ft_rope_table");
    ft__out_like(call, 0, &call->in[0]);
    return FT_OK;
}

/* Pairs i..i+m of one head by m angles: (x, y) -> (x cos - y sin, x sin + y cos). */
static void ft__rope_pairs(const ft_view *to, const ft_view *from, int64_t x, int64_t y, int64_t m,
                           const float *c, const float *s, int add)
{
    float xs[FT__BLOCK], ys[FT__BLOCK];
    ft__get_grad(xs, from, x, m);
    ft__get_grad(ys, from, y, m);
    for (int64_t j = 0; j < m; j++) {
        float left = xs[j] * c[j] - ys[j] * s[j], right = xs[j] * s[j] + ys[j] * c[j];
        xs[j] = left;
        ys[j] = right;
    }
    ft__put(to, x, m, xs, add);
    ft__put(to, y, m, ys, add);
}

/* sign 1 rotates, -1 rotates back (the transpose, hence backward). `to` may be `from`. */
static void ft__rope_run(const ft_op_call *call, const ft_view *to, const ft_view *from, float sign,
                         int add)
{
    const ft_view *qkv = &call->in[0];
    const float *table = (const float *)call->in[1].data;
    const int64_t H = call->attr.i[0], K = call->attr.i[1], D = call->attr.i[2], half = D / 2;
    const int64_t B = qkv->shape[0], T = qkv->shape[1], W = qkv->shape[2];
    float c[FT__BLOCK], s[FT__BLOCK];
    for (int64_t row = 0; row < B * T; row++) {
        const float *angles = table + row % T * D;
        for (int64_t at = 0; at < half; at += FT__BLOCK) {
            int64_t m = ft__span(half, at);
            for (int64_t j = 0; j < m; j++) {
                c[j] = angles[2 * (at + j)];
                s[j] = sign * angles[2 * (at + j) + 1];
            }
            for (int64_t h = 0; h < H + K; h++) {
                int64_t x = row * W + h * D + at;
                ft__rope_pairs(to, from, x, x + half, m, c, s, add);
            }
        }
        ft__span_copy(to, from, row * W + (H + K) * D, K * D, add);
    }
}

static ft_status ft__rope_forward(const ft_op_call *call)
{
    ft__rope_run(call, &call->out[0], &call->in[0], 1.0f, 0);
    return FT_OK;
}

static ft_status ft__rope_backward(const ft_op_call *call)
{
    if (call->din[0].present)
        ft__rope_run(call, &call->din[0], &call->dout[0], -1.0f, call->accumulate[0]);
    return FT_OK;
}

static const ft_op ft__op_rope = {
    "rope", 2, 1, 0, FT_IN(0), FT_IN(0), { FT_IN(1) }, 0, 0,
    FT_OP_INPLACE | FT_OP_GRAD_OVER_DOUT,
    ft__rope_infer, ft__cost_few, NULL, ft__rope_forward, ft__rope_backward, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_rope_forward, ftk_rope_backward, NULL)
};

FT_API ft_status ft_rope(ft_ctx *ctx, ft_tensor **y, ft_tensor *qkv, ft_tensor *table, int64_t H,
                         int64_t K, int64_t D)
{
    ft_tensor *in[2];
    ft_attr attr;
    ft__heads_attr(&attr, H, K, D, 0);
    in[0] = qkv;
    in[1] = table;
    return ft_apply(ctx, &ft__op_rope, in, &attr, y);
}

/* Llama 3's scaling: short wavelengths stay, long ones are stretched by `factor`, those between are
   interpolated. In fp32 step by step, as the reference implementation computes it: angles at far
   positions magnify the last bit of a frequency. */
static float ft__rope_scaled(float f, const ft_rope_scaling *scaling)
{
    float context = (float)scaling->original_context, factor = (float)scaling->factor;
    float low = (float)scaling->low_freq_factor, high = (float)scaling->high_freq_factor;
    float wavelength = 6.28318530717958647692f / f;
    if (wavelength > context / low) return f / factor;
    if (wavelength < context / high) return f;
    float smooth = (context / wavelength - low) / (high - low);
    return (1.0f - smooth) * f / factor + smooth * f;
}

static void ft__rope_fill(float *table, int64_t T, int64_t D, double theta,
                          const ft_rope_scaling *scaling)
{
    for (int64_t i = 0; i < D / 2; i++) {
        float exponent = (float)(2 * i) / (float)D;
        float f = 1.0f / (float)pow(theta, (double)exponent);
        if (scaling) f = ft__rope_scaled(f, scaling);
        for (int64_t t = 0; t < T; t++) {
            float angle = (float)t * f;
            table[t * D + 2 * i] = (float)cos((double)angle);
            table[t * D + 2 * i + 1] = (float)sin((double)angle);
        }
    }
}

FT_API ft_status ft_rope_table(ft_ctx *ctx, ft_tensor **table, int64_t T, int64_t D, double theta,
                               const ft_rope_scaling *scaling)
{
    int64_t shape[3];
    ft_tensor *made;
    if (scaling && (scaling->factor == 0 || scaling->factor == 1)) scaling = NULL;
    if (T < 1 || D < 2 || D % 2 || !(theta > 0) || T > INT64_MAX / 16 / D)
        return ft_error(FT_ERR_ARG, "ft_rope_table: T %lld, D %lld, theta %g: T and theta must be "
                        "positive, D positive and even", (long long)T, (long long)D, theta);
    if (scaling && (!(scaling->factor > 0) || !(scaling->low_freq_factor > 0) ||
                    !(scaling->high_freq_factor > scaling->low_freq_factor) ||
                    scaling->original_context < 1))
        return ft_error(FT_ERR_ARG, "ft_rope_table: scaling factor %g, frequency factors %g and "
                        "%g, context %lld: all must be positive, the low factor below the high one",
                        scaling->factor, scaling->low_freq_factor, scaling->high_freq_factor,
                        (long long)scaling->original_context);
    shape[0] = T;
    shape[1] = D / 2;
    shape[2] = 2;
    FT_TRY(ft_tensor_create(ctx, &made, FT_F32, 3, shape, FT_TAG_OTHER));
    *table = made;
    if (ft_ctx_device(ctx) == FT_META) return FT_OK;
    float *values = (float *)FT_MALLOC(ft_bytes(made));
    if (!values)
        return ft_error(FT_ERR_OOM, "ft_rope_table: no host memory for %zu bytes", ft_bytes(made));
    ft__rope_fill(values, T, D, theta, scaling);
    ft_status status = ft_upload(made, values);
    FT_FREE(values);
    return status;
}

/* ---- norm of each query and key head ---- */

static ft_status ft__head_norm_infer(ft_op_call *call)
{
    FT_TRY(ft__want_heads(call));
    FT_TRY(ft__want_floats(call, 3));
    FT_TRY(ft__want_eps(call));
    for (int i = 1; i < 3; i++)
        if (call->in[i].ndim != 1 || call->in[i].shape[0] != call->attr.i[2])
            return ft__shape_error(call, 0, i, "a head's norm weight must be [D]");
    ft__out_like(call, 0, &call->in[0]);
    return FT_OK;
}

static ft_status ft__head_norm_forward(const ft_op_call *call)
{
    const int64_t H = call->attr.i[0], K = call->attr.i[1], D = call->attr.i[2];
    const int64_t n = ft__view_rows(&call->in[0]), W = ft__view_cols(&call->in[0]);
    for (int64_t row = 0; row < n; row++) {
        for (int64_t h = 0; h < H + K; h++)
            ft__rms_row(&call->out[0], &call->in[0], &call->in[h < H ? 1 : 2], row * W + h * D, D,
                        call->attr.f[0]);
        ft__span_copy(&call->out[0], &call->in[0], row * W + (H + K) * D, K * D, 0);
    }
    return FT_OK;
}

static void ft__head_norm_scratch(ft_op_call *call)
{
    int64_t n = ft__view_rows(&call->in[0]) * (call->attr.i[0] + call->attr.i[1]);
    int64_t D = call->attr.i[2];
    if (!call->backward || (!call->din[1].present && !call->din[2].present)) return;
    call->workspace_bytes = (size_t)D * 2 * sizeof(float);
    if (call->device == FT_GPU) call->workspace_bytes = ft__gpu_norm_bytes(n, D, 2);
}

static ft_status ft__head_norm_backward(const ft_op_call *call)
{
    const int64_t H = call->attr.i[0], K = call->attr.i[1], D = call->attr.i[2];
    const int64_t n = ft__view_rows(&call->in[0]), W = ft__view_cols(&call->in[0]);
    ft__rms_grads a;
    float *dw[2];
    a.x = &call->in[0];
    a.dy = &call->dout[0];
    a.pass = NULL;
    a.dx = call->din[0].present ? &call->din[0] : NULL;
    a.accumulate = call->accumulate[0];
    a.eps = call->attr.f[0];
    for (int k = 0; k < 2; k++) {
        dw[k] = call->din[1 + k].present ? (float *)call->workspace + k * D : NULL;
        if (dw[k]) memset(dw[k], 0, (size_t)D * sizeof(float));
    }
    for (int64_t row = 0; row < n; row++) {
        for (int64_t h = 0; h < H + K; h++) {
            int k = h >= H;
            if (a.dx || dw[k])
                ft__rms_row_backward(&a, &call->in[1 + k], dw[k], row * W + h * D, D);
        }
        if (a.dx)
            ft__span_copy(a.dx, &call->dout[0], row * W + (H + K) * D, K * D, a.accumulate);
    }
    for (int k = 0; k < 2; k++)
        if (dw[k]) ft__put(&call->din[1 + k], 0, D, dw[k], call->accumulate[1 + k]);
    return FT_OK;
}

static const ft_op ft__op_head_norm = {
    "head_norm", 3, 1, 0, FT_IN(0) | FT_IN(1) | FT_IN(2), FT_IN(0) | FT_IN(1) | FT_IN(2),
    { FT_IN(0) | FT_IN(1) | FT_IN(2), FT_IN(0), FT_IN(0) }, FT_OUT(0), 0, FT_OP_GRAD_OVER_DOUT,
    ft__head_norm_infer, ft__cost_norm, ft__head_norm_scratch, ft__head_norm_forward,
    ft__head_norm_backward, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_head_norm_forward, ftk_head_norm_backward, NULL)
};

FT_API ft_status ft_head_norm(ft_ctx *ctx, ft_tensor **y, ft_tensor *qkv, ft_tensor *wq,
                              ft_tensor *wk, int64_t H, int64_t K, int64_t D, double eps)
{
    ft_tensor *in[3];
    ft_attr attr;
    ft__heads_attr(&attr, H, K, D, eps);
    in[0] = qkv;
    in[1] = wq;
    in[2] = wk;
    return ft_apply(ctx, &ft__op_head_norm, in, &attr, y);
}

/* ---- attention ----

   For each sequence b and kv head k the keys and values go, in fp32, into blocks of FT__KEYS keys
   padded with zeros; FT__TILE query rows of a head at a time meet them block by block, with the
   running maximum and sum of the streaming softmax. All inner products are one small kernel,
   ft__tile_gemm, whose 4 x 16 results stay in registers. Backward forms the probabilities again
   from the saved log-sum-exp, and gathers dk and dv of a kv head in fp32 over its query heads.
   Workspace, in floats, P = T rounded up to FT__KEYS, E = D rounded up to FT__SUMS: 2 P E forward,
   5 P E backward, and a few tiles.
   With documents a tile ends where its document ends, so all of its rows begin at the same key:
   blocks before that are not visited, nor, in the block in which it lies, the keys before it. So
   nothing of another document, not even a NaN, comes into play. */

#define FT__KEYS 64
#define FT__TILE 4

/* c[4,n] (+)= a[4,k] b[k,n], n a multiple of 16. */
static void ft__tile_gemm(float *c, int64_t ldc, const float *a, int64_t lda, const float *b,
                          int64_t ldb, int64_t n, int64_t k, int add)
{
    for (int64_t at = 0; at < n; at += FT__SUMS) {
        float s0[FT__SUMS], s1[FT__SUMS], s2[FT__SUMS], s3[FT__SUMS];
        for (int j = 0; j < FT__SUMS; j++) s0[j] = s1[j] = s2[j] = s3[j] = 0;
        for (int64_t i = 0; i < k; i++) {
            const float *row = b + i * ldb + at;
            float a0 = a[i], a1 = a[lda + i], a2 = a[2 * lda + i], a3 = a[3 * lda + i];
            for (int j = 0; j < FT__SUMS; j++) {
                s0[j] += a0 * row[j];
                s1[j] += a1 * row[j];
                s2[j] += a2 * row[j];
                s3[j] += a3 * row[j];
            }
        }
        float *to = c + at;
        for (int j = 0; j < FT__SUMS; j++) {
            to[j] = add ? to[j] + s0[j] : s0[j];
            to[ldc + j] = add ? to[ldc + j] + s1[j] : s1[j];
            to[2 * ldc + j] = add ? to[2 * ldc + j] + s2[j] : s2[j];
            to[3 * ldc + j] = add ? to[3 * ldc + j] + s3[j] : s3[j];
        }
    }
}

/* c[rows,n] += p[4,rows]^T a[4,n], n a multiple of 16; p's rows are FT__KEYS apart. */
static void ft__tile_outer(float *c, const float *p, const float *a, int64_t rows, int64_t n)
{
    for (int64_t i = 0; i < rows; i++) {
        float p0 = p[i], p1 = p[FT__KEYS + i], p2 = p[2 * FT__KEYS + i], p3 = p[3 * FT__KEYS + i];
        for (int64_t at = 0; at < n; at += FT__SUMS) {
            float *to = c + i * n + at;
            const float *from = a + at;
            float sum[FT__SUMS];
            for (int j = 0; j < FT__SUMS; j++)
                sum[j] = to[j] + p0 * from[j] + p1 * from[n + j] + p2 * from[2 * n + j] +
                         p3 * from[3 * n + j];
            for (int j = 0; j < FT__SUMS; j++) to[j] = sum[j];
        }
    }
}

typedef struct ft__att { /* sizes and workspace of one call */
    int64_t B, T, H, K, D, W, P, E;
    float scale;
    const int32_t *doc;     /* doc_start [B,T], or NULL */
    float *k, *kt, *v, *vt; /* k, v [P,E]; kt, vt [P/64][E][64]; which exist depends on the phase */
    float *dk, *dv;         /* [P,E] */
    float *q, *o, *g;       /* tiles [4,E]: queries, outputs or their gradients, gradients of q */
    float *s, *ds;          /* tiles [4,64] */
} ft__att;

static int64_t ft__round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static void ft__att_sizes(ft__att *a, const ft_op_call *call)
{
    memset(a, 0, sizeof *a);
    a->B = call->in[0].shape[0];
    a->T = call->in[0].shape[1];
    a->W = call->in[0].shape[2];
    a->H = call->attr.i[0];
    a->K = call->attr.i[1];
    a->D = call->attr.i[2];
    a->doc = call->in[1].present ? (const int32_t *)call->in[1].data : NULL;
    a->P = ft__round_up(a->T, FT__KEYS);
    a->E = ft__round_up(a->D, FT__SUMS);
    a->scale = (float)(1.0 / sqrt((double)a->D));
}

static void ft__att_begin(ft__att *a, const ft_op_call *call)
{
    ft__att_sizes(a, call);
    int64_t pe = a->P * a->E, te = FT__TILE * a->E;
    float *at = (float *)call->workspace;
    a->kt = at;
    at += pe;
    if (call->backward) {
        a->k = at;
        a->vt = at + pe;
        a->dk = at + 2 * pe;
        a->dv = at + 3 * pe;
        at += 4 * pe;
    } else {
        a->v = at;
        at += pe;
    }
    a->q = at;
    a->o = at + te;
    a->g = at + 2 * te;
    a->s = at + 3 * te;
    a->ds = a->s + FT__TILE * FT__KEYS;
    memset(a->q, 0, (size_t)(3 * te) * sizeof(float));
}

static void ft__attention_scratch(ft_op_call *call)
{
    ft__att a;
    ft__att_sizes(&a, call);
    if (call->device == FT_GPU) { /* backward: lse and delta, fp32 [B,H, T rounded up to 256] */
        if (call->backward)
            call->workspace_bytes = (size_t)(2 * a.B * a.H * ft__round_up(a.T, 256)) *
                                    sizeof(float);
        return;
    }
    int64_t floats = a.P * a.E * (call->backward ? 5 : 2) + 3 * FT__TILE * a.E +
                     2 * FT__TILE * FT__KEYS;
    call->workspace_bytes = (size_t)floats * sizeof(float);
}

/* Rows of sequence b, D elements at column `col` of qkv, to rows[P,E] and, transposed by blocks of
   keys, to cols[P/64][E][64]; either may be NULL. */
static void ft__att_load(const ft__att *a, const ft_view *qkv, int64_t b, int64_t col, float *rows,
                         float *cols)
{
    float *tile = a->q; /* one row, before the queries need the place */
    for (int64_t t = 0; t < a->P; t++) {
        float *row = rows ? rows + t * a->E : tile;
        memset(row, 0, (size_t)a->E * sizeof(float));
        if (t < a->T) ft__get(row, qkv, (b * a->T + t) * a->W + col, a->D);
        if (!cols) continue;
        float *to = cols + t / FT__KEYS * FT__KEYS * a->E + t % FT__KEYS;
        for (int64_t d = 0; d < a->E; d++) to[d * FT__KEYS] = row[d];
    }
}

/* Four rows of `from` (row length `width`) at column col, from position t; zero from `last` on. */
static void ft__att_tile(const ft__att *a, float *tile, const ft_view *from, int64_t width,
                         int64_t b, int64_t t, int64_t last, int64_t col)
{
    for (int64_t r = 0; r < FT__TILE; r++) {
        float *row = tile + r * a->E;
        if (t + r < last) ft__get_grad(row, from, (b * a->T + t + r) * width + col, a->D);
        else memset(row, 0, (size_t)a->D * sizeof(float));
    }
}

static int64_t ft__att_seen(int64_t t, int64_t key) /* keys of the block that position t sees */
{
    int64_t n = t + 1 - key;
    return n < 0 ? 0 : n < FT__KEYS ? n : FT__KEYS;
}

/* The first key that position t of row b sees. */
static int64_t ft__att_first(const ft__att *a, int64_t b, int64_t t)
{
    return a->doc ? a->doc[b * a->T + t] : 0;
}

/* Where the tile that begins at position t ends. */
static int64_t ft__att_last(const ft__att *a, int64_t b, int64_t t)
{
    int64_t last = t + 1;
    const int64_t first = ft__att_first(a, b, t);
    while (last < t + FT__TILE && last < a->T && ft__att_first(a, b, last) == first) last++;
    return last;
}

/* How many of a block's n keys lie before `first`. */
static int64_t ft__att_before(int64_t first, int64_t key, int64_t n)
{
    int64_t before = first - key;
    return before < 0 ? 0 : before < n ? before : n;
}

/* Streaming softmax of one row over keys low..n-1 of a block: p = exp(s - m), 0 behind them, older
   sums scaled to the new m. */
static void ft__att_softmax(float *p, int64_t low, int64_t n, float *o, int64_t E, float *m,
                            float *sum)
{
    float *own = p + low;
    int64_t count = n - low;
    float top = ft__row_top(own, count, *m), old = *sum > 0 ? ft__expf(*m - top) : 0.0f;
    for (int64_t j = 0; j < count; j++) own[j] -= top;
    ft__exp_row(own, count);
    for (int64_t j = n; j < FT__KEYS; j++) p[j] = 0;
    *sum = *sum * old + (float)ft__row_sum(own, count);
    *m = top;
    if (old == 1.0f) return;
    for (int64_t d = 0; d < E; d++) o[d] *= old;
}

static void ft__att_forward_tile(const ft__att *a, const ft_op_call *call, int64_t b, int64_t h,
                                 int64_t t)
{
    float m[FT__TILE], sum[FT__TILE], *lse = (float *)call->out[1].data;
    int64_t last = ft__att_last(a, b, t), first = ft__att_first(a, b, t);
    ft__att_tile(a, a->q, &call->in[0], a->W, b, t, last, h * a->D);
    for (int64_t i = 0; i < FT__TILE * a->E; i++) a->q[i] *= a->scale;
    memset(a->o, 0, (size_t)(FT__TILE * a->E) * sizeof(float));
    for (int r = 0; r < FT__TILE; r++) {
        m[r] = -3.0e38f;
        sum[r] = 0;
    }
    for (int64_t key = first / FT__KEYS * FT__KEYS; key < last; key += FT__KEYS) {
        int64_t n = ft__att_seen(last - 1, key), skip = ft__att_before(first, key, n);
        int64_t at = skip / FT__SUMS * FT__SUMS;
        ft__tile_gemm(a->s + at, FT__KEYS, a->q, a->E, a->kt + key * a->E + at, FT__KEYS,
                      ft__round_up(n, FT__SUMS) - at, a->D, 0);
        for (int r = 0; r < FT__TILE; r++) {
            int64_t seen = t + r < last ? ft__att_seen(t + r, key) : 0;
            int64_t low = ft__att_before(first, key, seen);
            ft__att_softmax(a->s + r * FT__KEYS, low, seen, a->o + r * a->E, a->E, &m[r], &sum[r]);
        }
        ft__tile_gemm(a->o, a->E, a->s + skip, FT__KEYS, a->v + (key + skip) * a->E, a->E, a->E,
                      n - skip, 1);
    }
    for (int64_t r = 0; t + r < last; r++) {
        float *row = a->o + r * a->E, inverse = 1.0f / sum[r];
        for (int64_t d = 0; d < a->D; d++) row[d] *= inverse;
        ft__put(&call->out[0], ((b * a->T + t + r) * a->H + h) * a->D, a->D, row, 0);
        lse[(b * a->H + h) * a->T + t + r] = m[r] + logf(sum[r]);
    }
}

static ft_status ft__att_check_docs(const ft__att *a)
{
    for (int64_t b = 0; b < a->B && a->doc; b++)
        for (int64_t t = 0; t < a->T; t++) {
            int64_t first = ft__att_first(a, b, t), least = t ? ft__att_first(a, b, t - 1) : 0;
            if (first >= least && first <= t) continue;
            return ft_error(FT_ERR_DATA, "attention: doc_start %lld at position [%lld,%lld] of "
                            "[%lld,%lld] is outside %lld..%lld: the first token of a document is "
                            "not behind its tokens, nor before that of the token to the left",
                            (long long)first, (long long)b, (long long)t, (long long)a->B,
                            (long long)a->T, (long long)least, (long long)t);
        }
    return FT_OK;
}

static ft_status ft__attention_forward(const ft_op_call *call)
{
    ft__att a;
    ft__att_begin(&a, call);
    FT_TRY(ft__att_check_docs(&a));
    const int64_t H = a.H, K = a.K, D = a.D;
    for (int64_t b = 0; b < a.B; b++)
        for (int64_t k = 0; k < K; k++) {
            ft__att_load(&a, &call->in[0], b, (H + k) * D, NULL, a.kt);
            ft__att_load(&a, &call->in[0], b, (H + K + k) * D, a.v, NULL);
            for (int64_t h = k * (H / K); h < (k + 1) * (H / K); h++)
                for (int64_t t = 0; t < a.T; t = ft__att_last(&a, b, t))
                    ft__att_forward_tile(&a, call, b, h, t);
        }
    return FT_OK;
}

/* p = exp(s - lse), ds = p (dp - delta) of keys low..n-1, 0 behind them; on entry s holds q k^T, ds
   holds dp = do v^T. */
static void ft__att_unsoftmax(float *s, float *ds, int64_t low, int64_t n, float lse, float delta,
                              float scale)
{
    for (int64_t j = low; j < n; j++) s[j] = s[j] * scale - lse;
    ft__exp_row(s + low, n - low);
    for (int64_t j = low; j < n; j++) ds[j] = s[j] * (ds[j] - delta) * scale;
    for (int64_t j = n; j < FT__KEYS; j++) s[j] = ds[j] = 0;
}

/* delta of a row is the dot product of o and do (Dao 2023, section 3.1). */
static void ft__att_backward_tile(const ft__att *a, const ft_op_call *call, int64_t b, int64_t h,
                                  int64_t t)
{
    float delta[FT__TILE];
    const float *lse = (const float *)call->out[1].data + (b * a->H + h) * a->T;
    int64_t last = ft__att_last(a, b, t), first = ft__att_first(a, b, t), width = a->H * a->D;
    ft__att_tile(a, a->o, &call->dout[0], width, b, t, last, h * a->D);
    ft__att_tile(a, a->q, &call->out[0], width, b, t, last, h * a->D);
    for (int r = 0; r < FT__TILE; r++)
        delta[r] = (float)ft__row_dot(a->o + r * a->E, a->q + r * a->E, a->D);
    ft__att_tile(a, a->q, &call->in[0], a->W, b, t, last, h * a->D);
    memset(a->g, 0, (size_t)(FT__TILE * a->E) * sizeof(float));
    for (int64_t key = first / FT__KEYS * FT__KEYS; key < last; key += FT__KEYS) {
        int64_t n = ft__att_seen(last - 1, key), skip = ft__att_before(first, key, n);
        int64_t at = skip / FT__SUMS * FT__SUMS, wide = ft__round_up(n, FT__SUMS) - at;
        int64_t block = key * a->E + at, from = (key + skip) * a->E;
        ft__tile_gemm(a->s + at, FT__KEYS, a->q, a->E, a->kt + block, FT__KEYS, wide, a->D, 0);
        ft__tile_gemm(a->ds + at, FT__KEYS, a->o, a->E, a->vt + block, FT__KEYS, wide, a->D, 0);
        for (int r = 0; r < FT__TILE; r++) {
            int64_t seen = t + r < last ? ft__att_seen(t + r, key) : 0;
            int64_t low = ft__att_before(first, key, seen);
            ft__att_unsoftmax(a->s + r * FT__KEYS, a->ds + r * FT__KEYS, low, seen,
                              seen ? lse[t + r] : 0.0f, delta[r], a->scale);
        }
        ft__tile_gemm(a->g, a->E, a->ds + skip, FT__KEYS, a->k + from, a->E, a->E, n - skip, 1);
        ft__tile_outer(a->dv + from, a->s + skip, a->o, n - skip, a->E);
        ft__tile_outer(a->dk + from, a->ds + skip, a->q, n - skip, a->E);
    }
    for (int64_t r = 0; t + r < last; r++)
        ft__put(&call->din[0], (b * a->T + t + r) * a->W + h * a->D, a->D, a->g + r * a->E,
                call->accumulate[0]);
}

static ft_status ft__attention_backward(const ft_op_call *call)
{
    ft__att a;
    if (!call->din[0].present) return FT_OK;
    ft__att_begin(&a, call);
    const int64_t H = a.H, K = a.K, D = a.D;
    for (int64_t b = 0; b < a.B; b++)
        for (int64_t k = 0; k < K; k++) {
            int64_t key_col = (H + k) * D, value_col = (H + K + k) * D;
            ft__att_load(&a, &call->in[0], b, key_col, a.k, a.kt);
            ft__att_load(&a, &call->in[0], b, value_col, NULL, a.vt);
            memset(a.dk, 0, (size_t)(2 * a.P * a.E) * sizeof(float)); /* and dv behind it */
            for (int64_t h = k * (H / K); h < (k + 1) * (H / K); h++)
                for (int64_t t = 0; t < a.T; t = ft__att_last(&a, b, t))
                    ft__att_backward_tile(&a, call, b, h, t);
            for (int64_t t = 0; t < a.T; t++) {
                int64_t row = (b * a.T + t) * a.W;
                ft__put(&call->din[0], row + key_col, D, a.dk + t * a.E, call->accumulate[0]);
                ft__put(&call->din[0], row + value_col, D, a.dv + t * a.E, call->accumulate[0]);
            }
        }
    return FT_OK;
}

static ft_status ft__attention_infer(ft_op_call *call)
{
    FT_TRY(ft__want_heads(call));
    const ft_view *doc = &call->in[1];
    if (doc->present && (doc->dtype != FT_I32 || doc->ndim != 2 ||
                         doc->shape[0] != call->in[0].shape[0] ||
                         doc->shape[1] != call->in[0].shape[1]))
        return ft__shape_error(call, 0, 1, "doc_start must be int32 [B,T] as qkv's");
    ft__out_like(call, 0, &call->in[0]);
    call->out[0].shape[2] = call->attr.i[0] * call->attr.i[2];
    ft__out_like(call, 1, &call->in[0]);
    call->out[1].dtype = FT_F32;
    call->out[1].shape[1] = call->attr.i[0];
    call->out[1].shape[2] = call->in[0].shape[1];
    return FT_OK;
}

/* 2 B H T^2 D: two products over the half of the square that causality leaves. */
static void ft__attention_cost(const ft_op_call *call, double *flops, double *bytes)
{
    ft__cost_elems(call, 2.0 * (double)call->in[0].shape[1], flops, bytes);
}

static const ft_op ft__op_attention = {
    "attention", 2, 2, FT_IN(1), FT_IN(0), FT_IN(0),
    { FT_IN(0) | FT_IN(1) | FT_OUT(0) | FT_OUT(1) }, 0, 0, 0,
    ft__attention_infer, ft__attention_cost, ft__attention_scratch, ft__attention_forward,
    ft__attention_backward, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_attention_forward, ftk_attention_backward, NULL)
};

FT_API ft_status ft_attention_docs(ft_ctx *ctx, ft_tensor **o, ft_tensor *qkv, ft_tensor *doc_start,
                                   int64_t H, int64_t K, int64_t D)
{
    ft_tensor *in[2], *out[2];
    ft_attr attr;
    ft__heads_attr(&attr, H, K, D, 0);
    in[0] = qkv;
    in[1] = doc_start;
    FT_TRY(ft_apply(ctx, &ft__op_attention, in, &attr, out));
    ft_tensor_free(out[1]);
    *o = out[0];
    return FT_OK;
}

FT_API ft_status ft_attention(ft_ctx *ctx, ft_tensor **o, ft_tensor *qkv, int64_t H, int64_t K,
                              int64_t D)
{
    return ft_attention_docs(ctx, o, qkv, NULL, H, K, D);
}

/* ---- SwiGLU: y = silu(gate) up, packed (gate, up) ---- */

static ft_status ft__swiglu_infer(ft_op_call *call)
{
    char text[160];
    FT_TRY(ft__want_float(call, 0));
    if (ft__view_cols(&call->in[0]) % 2)
        return ft_error(FT_ERR_SHAPE, "swiglu: gu is %s; its last dimension must be 2F",
                        ft__view_text(&call->in[0], text, sizeof text));
    ft__out_like(call, 0, &call->in[0]);
    call->out[0].shape[call->out[0].ndim - 1] /= 2;
    return FT_OK;
}

static ft_status ft__swiglu_forward(const ft_op_call *call)
{
    int64_t n = ft__view_rows(&call->out[0]), F = ft__view_cols(&call->out[0]);
    float g[FT__BLOCK], u[FT__BLOCK], s[FT__BLOCK];
    for (int64_t i = 0; i < n; i++)
        for (int64_t at = 0; at < F; at += FT__BLOCK) {
            int64_t m = ft__span(F, at);
            ft__get(g, &call->in[0], i * 2 * F + at, m);
            ft__get(u, &call->in[0], i * 2 * F + F + at, m);
            ft__sigmoid_row(s, g, m);
            for (int64_t j = 0; j < m; j++) s[j] = g[j] * s[j] * u[j];
            ft__put(&call->out[0], i * F + at, m, s, 0);
        }
    return FT_OK;
}

/* dgate = dy up s (1 + gate (1 - s)), dup = dy gate s, s = sigmoid(gate). din may be in. */
static ft_status ft__swiglu_backward(const ft_op_call *call)
{
    int64_t n = ft__view_rows(&call->out[0]), F = ft__view_cols(&call->out[0]);
    float g[FT__BLOCK], u[FT__BLOCK], s[FT__BLOCK], dy[FT__BLOCK];
    if (!call->din[0].present) return FT_OK;
    for (int64_t i = 0; i < n; i++)
        for (int64_t at = 0; at < F; at += FT__BLOCK) {
            int64_t m = ft__span(F, at), gate = i * 2 * F + at;
            ft__get(g, &call->in[0], gate, m);
            ft__get(u, &call->in[0], gate + F, m);
            ft__get_grad(dy, &call->dout[0], i * F + at, m);
            ft__sigmoid_row(s, g, m);
            for (int64_t j = 0; j < m; j++) {
                float dup = dy[j] * g[j] * s[j];
                g[j] = dy[j] * u[j] * s[j] * (1.0f + g[j] * (1.0f - s[j]));
                u[j] = dup;
            }
            ft__put(&call->din[0], gate, m, g, call->accumulate[0]);
            ft__put(&call->din[0], gate + F, m, u, call->accumulate[0]);
        }
    return FT_OK;
}

static const ft_op ft__op_swiglu = {
    "swiglu", 1, 1, 0, FT_IN(0), FT_IN(0), { FT_IN(0) }, FT_OUT(0), 0, FT_OP_GRAD_OVER_IN,
    ft__swiglu_infer, ft__cost_few, NULL, ft__swiglu_forward, ft__swiglu_backward, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_swiglu_forward, ftk_swiglu_backward, NULL)
};

FT_API ft_status ft_swiglu(ft_ctx *ctx, ft_tensor **y, ft_tensor *gu)
{
    return ft_apply(ctx, &ft__op_swiglu, &gu, NULL, y);
}

/* ---- add and mul: b is a's shape, or a trailing part of it, repeated ---- */

static ft_status ft__equal_infer(ft_op_call *call)
{
    FT_TRY(ft__want_floats(call, 2));
    if (!ft__same_shape(&call->in[0], &call->in[1]))
        return ft__shape_error(call, 0, 1, "the shapes must be equal");
    ft__out_like(call, 0, &call->in[0]);
    return FT_OK;
}

static ft_status ft__trailing_infer(ft_op_call *call)
{
    FT_TRY(ft__want_floats(call, 2));
    if (!ft__trailing(&call->in[0], &call->in[1]))
        return ft__shape_error(call, 0, 1, "input 1 must have input 0's shape, or its last "
                               "dimensions");
    ft__out_like(call, 0, &call->in[0]);
    return FT_OK;
}

static ft_status ft__binary(const ft_op_call *call, int product)
{
    int64_t n = ft__view_elems(&call->in[1]), rows = ft__view_elems(&call->in[0]) / n;
    float a[FT__BLOCK], b[FT__BLOCK];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t at = 0; at < n; at += FT__BLOCK) {
            int64_t m = ft__span(n, at);
            ft__get(a, &call->in[0], i * n + at, m);
            ft__get(b, &call->in[1], at, m);
            if (product) for (int64_t j = 0; j < m; j++) a[j] *= b[j];
            else for (int64_t j = 0; j < m; j++) a[j] += b[j];
            ft__put(&call->out[0], i * n + at, m, a, 0);
        }
    return FT_OK;
}

static ft_status ft__add_forward(const ft_op_call *call) { return ft__binary(call, 0); }
static ft_status ft__mul_forward(const ft_op_call *call) { return ft__binary(call, 1); }

/* db: a block of columns at a time over all rows, so that its sum needs no memory. Before da, which
   may lie over dout. */
static void ft__binary_db(const ft_op_call *call, int product)
{
    int64_t n = ft__view_elems(&call->in[1]), rows = ft__view_elems(&call->in[0]) / n;
    float sum[FT__BLOCK], g[FT__BLOCK], a[FT__BLOCK];
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        int64_t m = ft__span(n, at);
        memset(sum, 0, sizeof sum);
        for (int64_t i = 0; i < rows; i++) {
            ft__get_grad(g, &call->dout[0], i * n + at, m);
            if (product) {
                ft__get(a, &call->in[0], i * n + at, m);
                for (int64_t j = 0; j < m; j++) g[j] *= a[j];
            }
            for (int64_t j = 0; j < m; j++) sum[j] += g[j];
        }
        ft__put(&call->din[1], at, m, sum, call->accumulate[1]);
    }
}

/* The device sums b's gradient in parts. */
static void ft__binary_scratch(ft_op_call *call)
{
    int64_t o = ft__view_elems(&call->in[1]), n = ft__view_elems(&call->in[0]) / o;
    if (call->device == FT_GPU && call->backward && call->din[1].present)
        call->workspace_bytes = ftk_rows_sum_bytes(n, o);
}

static ft_status ft__add_backward(const ft_op_call *call)
{
    if (call->din[1].present) ft__binary_db(call, 0);
    if (call->din[0].present)
        ft__span_copy(&call->din[0], &call->dout[0], 0, ft__view_elems(&call->in[0]),
                 call->accumulate[0]);
    return FT_OK;
}

static ft_status ft__mul_backward(const ft_op_call *call)
{
    int64_t n = ft__view_elems(&call->in[1]), rows = ft__view_elems(&call->in[0]) / n;
    float g[FT__BLOCK], b[FT__BLOCK];
    if (call->din[1].present) ft__binary_db(call, 1);
    if (!call->din[0].present) return FT_OK;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t at = 0; at < n; at += FT__BLOCK) {
            int64_t m = ft__span(n, at);
            ft__get_grad(g, &call->dout[0], i * n + at, m);
            ft__get(b, &call->in[1], at, m);
            for (int64_t j = 0; j < m; j++) g[j] *= b[j];
            ft__put(&call->din[0], i * n + at, m, g, call->accumulate[0]);
        }
    return FT_OK;
}

static const ft_op ft__op_add = {
    "add", 2, 1, 0, FT_IN(0) | FT_IN(1), FT_IN(0) | FT_IN(1), { 0 }, 0, 0, FT_OP_GRAD_PASS,
    ft__equal_infer, ft__cost_one, NULL, ft__add_forward, NULL, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_add_forward, NULL, NULL)
};

static const ft_op ft__op_add_trailing = {
    "add", 2, 1, 0, FT_IN(0) | FT_IN(1), FT_IN(0) | FT_IN(1), { 0 }, 0, 0, FT_OP_GRAD_OVER_DOUT,
    ft__trailing_infer, ft__cost_one, ft__binary_scratch, ft__add_forward, ft__add_backward, NULL,
    NULL, NULL,
    FT_GPU_KERNELS(ftk_add_forward, ftk_add_backward, NULL)
};

static const ft_op ft__op_add_inplace = {
    "add_inplace", 2, 1, 0, FT_IN(0) | FT_IN(1), FT_IN(0) | FT_IN(1), { 0 }, 0, 0,
    FT_OP_INPLACE | FT_OP_GRAD_PASS,
    ft__equal_infer, ft__cost_one, NULL, ft__add_forward, NULL, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_add_forward, NULL, NULL)
};

static const ft_op ft__op_mul = {
    "mul", 2, 1, 0, FT_IN(0) | FT_IN(1), FT_IN(0) | FT_IN(1), { FT_IN(1), FT_IN(0) }, FT_OUT(0), 0,
    FT_OP_GRAD_OVER_DOUT,
    ft__trailing_infer, ft__cost_one, ft__binary_scratch, ft__mul_forward, ft__mul_backward, NULL,
    NULL, NULL,
    FT_GPU_KERNELS(ftk_mul_forward, ftk_mul_backward, NULL)
};

FT_API ft_status ft_add(ft_ctx *ctx, ft_tensor **y, ft_tensor *a, ft_tensor *b)
{
    ft_tensor *in[2];
    in[0] = a;
    in[1] = b;
    int trailing = a && b && ft_numel(a) != ft_numel(b);
    return ft_apply(ctx, trailing ? &ft__op_add_trailing : &ft__op_add, in, NULL, y);
}

FT_API ft_status ft_add_inplace(ft_ctx *ctx, ft_tensor **y, ft_tensor *a, ft_tensor *b)
{
    ft_tensor *in[2];
    in[0] = a;
    in[1] = b;
    return ft_apply(ctx, &ft__op_add_inplace, in, NULL, y);
}

FT_API ft_status ft_mul(ft_ctx *ctx, ft_tensor **y, ft_tensor *a, ft_tensor *b)
{
    ft_tensor *in[2];
    in[0] = a;
    in[1] = b;
    return ft_apply(ctx, &ft__op_mul, in, NULL, y);
}

/* ---- one input, element by element ---- */

static ft_status ft__unary_infer(ft_op_call *call)
{
    FT_TRY(ft__want_float(call, 0));
    ft__out_like(call, 0, &call->in[0]);
    return FT_OK;
}

typedef enum ft__unary_kind { FT__SCALE = 0, FT__GELU, FT__SILU } ft__unary_kind;

/* x becomes f(x). */
static void ft__unary_value(ft__unary_kind kind, float factor, float *x, int64_t n)
{
    float s[FT__BLOCK];
    switch (kind) {
    case FT__SCALE:
        for (int64_t j = 0; j < n; j++) x[j] *= factor;
        return;
    case FT__GELU: /* Phi(x) = erfc(-x / sqrt 2) / 2 keeps its digits for negative x */
        for (int64_t j = 0; j < n; j++) x[j] *= 0.5f * erfcf(-0.70710678118654752f * x[j]);
        return;
    case FT__SILU:
        ft__sigmoid_row(s, x, n);
        for (int64_t j = 0; j < n; j++) x[j] *= s[j];
        return;
    }
}

/* g becomes g f'(x). gelu' = Phi(x) + x phi(x); silu' = s (1 + x (1 - s)). */
static void ft__unary_slope(ft__unary_kind kind, float factor, float *g, const float *x, int64_t n)
{
    float s[FT__BLOCK];
    switch (kind) {
    case FT__SCALE:
        for (int64_t j = 0; j < n; j++) g[j] *= factor;
        return;
    case FT__GELU:
        for (int64_t j = 0; j < n; j++) s[j] = -0.5f * x[j] * x[j];
        ft__exp_row(s, n);
        for (int64_t j = 0; j < n; j++)
            g[j] *= 0.5f * erfcf(-0.70710678118654752f * x[j]) +
                    0.39894228040143268f * x[j] * s[j];
        return;
    case FT__SILU:
        ft__sigmoid_row(s, x, n);
        for (int64_t j = 0; j < n; j++) g[j] *= s[j] * (1.0f + x[j] * (1.0f - s[j]));
        return;
    }
}

static ft_status ft__unary_forward(const ft_op_call *call, ft__unary_kind kind)
{
    int64_t n = ft__view_elems(&call->in[0]);
    float x[FT__BLOCK];
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        int64_t m = ft__span(n, at);
        ft__get(x, &call->in[0], at, m);
        ft__unary_value(kind, (float)call->attr.f[0], x, m);
        ft__put(&call->out[0], at, m, x, 0);
    }
    return FT_OK;
}

static ft_status ft__unary_backward(const ft_op_call *call, ft__unary_kind kind)
{
    int64_t n = ft__view_elems(&call->in[0]);
    float x[FT__BLOCK], g[FT__BLOCK];
    if (!call->din[0].present) return FT_OK;
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        int64_t m = ft__span(n, at);
        if (kind != FT__SCALE) ft__get(x, &call->in[0], at, m);
        ft__get_grad(g, &call->dout[0], at, m);
        ft__unary_slope(kind, (float)call->attr.f[0], g, x, m);
        ft__put(&call->din[0], at, m, g, call->accumulate[0]);
    }
    return FT_OK;
}

static ft_status ft__scale_forward(const ft_op_call *c) { return ft__unary_forward(c, FT__SCALE); }
static ft_status ft__scale_backward(const ft_op_call *c)
{
    return ft__unary_backward(c, FT__SCALE);
}
static ft_status ft__gelu_forward(const ft_op_call *c) { return ft__unary_forward(c, FT__GELU); }
static ft_status ft__gelu_backward(const ft_op_call *c) { return ft__unary_backward(c, FT__GELU); }
static ft_status ft__silu_forward(const ft_op_call *c) { return ft__unary_forward(c, FT__SILU); }
static ft_status ft__silu_backward(const ft_op_call *c) { return ft__unary_backward(c, FT__SILU); }

static const ft_op ft__op_scale = {
    "scale", 1, 1, 0, FT_IN(0), FT_IN(0), { 0 }, FT_OUT(0), 0, FT_OP_GRAD_OVER_DOUT,
    ft__unary_infer, ft__cost_one, NULL, ft__scale_forward, ft__scale_backward, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_scale_forward, ftk_scale_backward, NULL)
};

static const ft_op ft__op_gelu = {
    "gelu", 1, 1, 0, FT_IN(0), FT_IN(0), { FT_IN(0) }, FT_OUT(0), 0, FT_OP_GRAD_OVER_DOUT,
    ft__unary_infer, ft__cost_few, NULL, ft__gelu_forward, ft__gelu_backward, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_gelu_forward, ftk_gelu_backward, NULL)
};

static const ft_op ft__op_silu = {
    "silu", 1, 1, 0, FT_IN(0), FT_IN(0), { FT_IN(0) }, FT_OUT(0), 0, FT_OP_GRAD_OVER_DOUT,
    ft__unary_infer, ft__cost_few, NULL, ft__silu_forward, ft__silu_backward, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_silu_forward, ftk_silu_backward, NULL)
};

FT_API ft_status ft_scale(ft_ctx *ctx, ft_tensor **y, ft_tensor *x, double factor)
{
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.f[0] = factor;
    return ft_apply(ctx, &ft__op_scale, &x, &attr, y);
}

FT_API ft_status ft_gelu(ft_ctx *ctx, ft_tensor **y, ft_tensor *x)
{
    return ft_apply(ctx, &ft__op_gelu, &x, NULL, y);
}

FT_API ft_status ft_silu(ft_ctx *ctx, ft_tensor **y, ft_tensor *x)
{
    return ft_apply(ctx, &ft__op_silu, &x, NULL, y);
}

/* ---- softmax over the last dimension ---- */

static void ft__softmax_row(const ft_view *y, const ft_view *x, int64_t first, int64_t n)
{
    float e[FT__BLOCK], top = -INFINITY;
    double sum = 0;
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        ft__get(e, x, first + at, ft__span(n, at));
        top = ft__row_top(e, ft__span(n, at), top);
    }
    for (int pass = 0; pass < 2; pass++) {
        float inverse = pass ? (float)(1.0 / sum) : 1.0f;
        for (int64_t at = 0; at < n; at += FT__BLOCK) {
            int64_t m = ft__span(n, at);
            ft__get(e, x, first + at, m);
            for (int64_t j = 0; j < m; j++) e[j] -= top;
            ft__exp_row(e, m);
            if (!pass) {
                sum += ft__row_sum(e, m);
                continue;
            }
            for (int64_t j = 0; j < m; j++) e[j] *= inverse;
            ft__put(y, first + at, m, e, 0);
        }
    }
}

static ft_status ft__softmax_forward(const ft_op_call *call)
{
    int64_t rows = ft__view_rows(&call->in[0]), n = ft__view_cols(&call->in[0]);
    for (int64_t i = 0; i < rows; i++) ft__softmax_row(&call->out[0], &call->in[0], i * n, n);
    return FT_OK;
}

/* dx = y (dy - sum(dy y)) */
static ft_status ft__softmax_backward(const ft_op_call *call)
{
    int64_t rows = ft__view_rows(&call->out[0]), n = ft__view_cols(&call->out[0]);
    float y[FT__BLOCK], g[FT__BLOCK];
    if (!call->din[0].present) return FT_OK;
    for (int64_t i = 0; i < rows; i++) {
        double sum = 0;
        for (int64_t at = 0; at < n; at += FT__BLOCK) {
            ft__get(y, &call->out[0], i * n + at, ft__span(n, at));
            ft__get_grad(g, &call->dout[0], i * n + at, ft__span(n, at));
            sum += ft__row_dot(g, y, ft__span(n, at));
        }
        for (int64_t at = 0; at < n; at += FT__BLOCK) {
            int64_t m = ft__span(n, at);
            ft__get(y, &call->out[0], i * n + at, m);
            ft__get_grad(g, &call->dout[0], i * n + at, m);
            for (int64_t j = 0; j < m; j++) g[j] = y[j] * (g[j] - (float)sum);
            ft__put(&call->din[0], i * n + at, m, g, call->accumulate[0]);
        }
    }
    return FT_OK;
}

static const ft_op ft__op_softmax = {
    "softmax", 1, 1, 0, FT_IN(0), FT_IN(0), { FT_OUT(0) }, FT_OUT(0), 0, FT_OP_GRAD_OVER_DOUT,
    ft__unary_infer, ft__cost_few, NULL, ft__softmax_forward, ft__softmax_backward, NULL, NULL,
    NULL,
    FT_GPU_KERNELS(ftk_softmax_forward, ftk_softmax_backward, NULL)
};

FT_API ft_status ft_softmax(ft_ctx *ctx, ft_tensor **y, ft_tensor *x)
{
    return ft_apply(ctx, &ft__op_softmax, &x, NULL, y);
}

/* ---- layer norm: y = (x - mean) r w + b; mean and r are recomputed in backward ---- */

static ft_status ft__layer_norm_infer(ft_op_call *call)
{
    FT_TRY(ft__want_floats(call, 3));
    FT_TRY(ft__want_weight(call, 1));
    FT_TRY(ft__want_weight(call, 2));
    FT_TRY(ft__want_eps(call));
    ft__out_like(call, 0, &call->in[0]);
    return FT_OK;
}

/* Two passes: the variance of the differences from the mean, which does not cancel. */
static void ft__layer_stats(const ft_view *x, int64_t first, int64_t n, double eps, float *mean,
                            float *r)
{
    float xs[FT__BLOCK];
    double sum = 0, square = 0;
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        ft__get(xs, x, first + at, ft__span(n, at));
        sum += ft__row_sum(xs, ft__span(n, at));
    }
    *mean = (float)(sum / (double)n);
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        int64_t m = ft__span(n, at);
        ft__get(xs, x, first + at, m);
        for (int64_t j = 0; j < m; j++) xs[j] -= *mean;
        square += ft__row_dot(xs, xs, m);
    }
    *r = (float)(1.0 / sqrt(square / (double)n + eps));
}

static ft_status ft__layer_norm_forward(const ft_op_call *call)
{
    int64_t rows = ft__view_rows(&call->in[0]), C = ft__view_cols(&call->in[0]);
    float xs[FT__BLOCK], ws[FT__BLOCK], bs[FT__BLOCK], mean, r;
    for (int64_t i = 0; i < rows; i++) {
        ft__layer_stats(&call->in[0], i * C, C, call->attr.f[0], &mean, &r);
        for (int64_t at = 0; at < C; at += FT__BLOCK) {
            int64_t m = ft__span(C, at);
            ft__get(xs, &call->in[0], i * C + at, m);
            ft__get(ws, &call->in[1], at, m);
            ft__get(bs, &call->in[2], at, m);
            for (int64_t j = 0; j < m; j++) xs[j] = (xs[j] - mean) * r * ws[j] + bs[j];
            ft__put(&call->out[0], i * C + at, m, xs, 0);
        }
    }
    return FT_OK;
}

static void ft__layer_norm_scratch(ft_op_call *call)
{
    int64_t n = ft__view_rows(&call->in[0]), C = ft__view_cols(&call->in[0]);
    if (!call->backward || (!call->din[1].present && !call->din[2].present)) return;
    call->workspace_bytes = (size_t)C * 2 * sizeof(float);
    if (call->device == FT_GPU) call->workspace_bytes = ft__gpu_norm_bytes(n, C, 2);
}

/* db += dy, for which x is not needed */
static void ft__layer_db(const ft_op_call *call, int64_t first, int64_t C, float *db)
{
    float g[FT__BLOCK];
    for (int64_t at = 0; at < C; at += FT__BLOCK) {
        int64_t m = ft__span(C, at);
        ft__get_grad(g, &call->dout[0], first + at, m);
        for (int64_t j = 0; j < m; j++) db[at + j] += g[j];
    }
}

/* u = (x - mean) r, g = dy w:  dx = r (g - mean(g) - u mean(g u)),  dw += dy u */
static void ft__layer_row_backward(const ft_op_call *call, int64_t first, int64_t C, float *dw)
{
    float u[FT__BLOCK], g[FT__BLOCK], ws[FT__BLOCK], mean, r;
    double sum = 0, dot = 0;
    ft__layer_stats(&call->in[0], first, C, call->attr.f[0], &mean, &r);
    for (int64_t at = 0; at < C; at += FT__BLOCK) {
        int64_t m = ft__span(C, at);
        ft__get(u, &call->in[0], first + at, m);
        ft__get_grad(g, &call->dout[0], first + at, m);
        for (int64_t j = 0; j < m; j++) u[j] = (u[j] - mean) * r;
        if (dw)
            for (int64_t j = 0; j < m; j++) dw[at + j] += g[j] * u[j];
        if (!call->din[0].present) continue;
        ft__get(ws, &call->in[1], at, m);
        for (int64_t j = 0; j < m; j++) g[j] *= ws[j];
        sum += ft__row_sum(g, m);
        dot += ft__row_dot(g, u, m);
    }
    if (!call->din[0].present) return;
    float g_mean = (float)(sum / (double)C), gu_mean = (float)(dot / (double)C);
    for (int64_t at = 0; at < C; at += FT__BLOCK) {
        int64_t m = ft__span(C, at);
        ft__get(u, &call->in[0], first + at, m);
        ft__get_grad(g, &call->dout[0], first + at, m);
        ft__get(ws, &call->in[1], at, m);
        for (int64_t j = 0; j < m; j++)
            g[j] = r * (g[j] * ws[j] - g_mean - (u[j] - mean) * r * gu_mean);
        ft__put(&call->din[0], first + at, m, g, call->accumulate[0]);
    }
}

static ft_status ft__layer_norm_backward(const ft_op_call *call)
{
    int64_t rows = ft__view_rows(&call->in[0]), C = ft__view_cols(&call->in[0]);
    float *sums = (float *)call->workspace;
    float *dw = call->din[1].present ? sums : NULL;
    float *db = call->din[2].present ? sums + C : NULL;
    if (dw || db) memset(sums, 0, (size_t)(2 * C) * sizeof(float));
    for (int64_t i = 0; i < rows; i++) {
        if (db) ft__layer_db(call, i * C, C, db);
        if (dw || call->din[0].present) ft__layer_row_backward(call, i * C, C, dw);
    }
    if (dw) ft__put(&call->din[1], 0, C, dw, call->accumulate[1]);
    if (db) ft__put(&call->din[2], 0, C, db, call->accumulate[2]);
    return FT_OK;
}

static const ft_op ft__op_layer_norm = {
    "layer_norm", 3, 1, 0, FT_IN(0) | FT_IN(1) | FT_IN(2), FT_IN(0) | FT_IN(1) | FT_IN(2),
    { FT_IN(0) | FT_IN(1), FT_IN(0), 0 }, FT_OUT(0), 0, FT_OP_GRAD_OVER_DOUT,
    ft__layer_norm_infer, ft__cost_few, ft__layer_norm_scratch, ft__layer_norm_forward,
    ft__layer_norm_backward, NULL, NULL, NULL,
    FT_GPU_KERNELS(ftk_layer_norm_forward, ftk_layer_norm_backward, NULL)
};

FT_API ft_status ft_layer_norm(ft_ctx *ctx, ft_tensor **y, ft_tensor *x, ft_tensor *w, ft_tensor *b,
                               double eps)
{
    ft_tensor *in[3];
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.f[0] = eps;
    in[0] = x;
    in[1] = w;
    in[2] = b;
    return ft_apply(ctx, &ft__op_layer_norm, in, &attr, y);
}

/* ---- mean ---- */

static ft_status ft__mean_infer(ft_op_call *call)
{
    FT_TRY(ft__want_float(call, 0));
    memset(&call->out[0], 0, sizeof call->out[0]);
    call->out[0].present = 1;
    call->out[0].dtype = FT_F32;
    call->out[0].ndim = 1;
    call->out[0].shape[0] = 1;
    return FT_OK;
}

static ft_status ft__mean_forward(const ft_op_call *call)
{
    int64_t n = ft__view_elems(&call->in[0]);
    float x[FT__BLOCK];
    double sum = 0;
    for (int64_t at = 0; at < n; at += FT__BLOCK) {
        ft__get(x, &call->in[0], at, ft__span(n, at));
        sum += ft__row_sum(x, ft__span(n, at));
    }
    ft__store(call->out[0].data, FT_F32, 0, (float)(sum / (double)n), 0);
    return FT_OK;
}

static void ft__mean_scratch(ft_op_call *call)
{
    if (call->device == FT_GPU && !call->backward)
        call->workspace_bytes = ft__gpu_sum_bytes(ft__view_elems(&call->in[0]));
}

static ft_status ft__mean_backward(const ft_op_call *call)
{
    int64_t n = ft__view_elems(&call->in[0]);
    float g[FT__BLOCK], dout;
    if (!call->din[0].present) return FT_OK;
    ft__get_grad(&dout, &call->dout[0], 0, 1);
    for (int j = 0; j < FT__BLOCK; j++) g[j] = (float)((double)dout / (double)n);
    for (int64_t at = 0; at < n; at += FT__BLOCK)
        ft__put(&call->din[0], at, ft__span(n, at), g, call->accumulate[0]);
    return FT_OK;
}

static const ft_op ft__op_mean = {
    "mean", 1, 1, 0, FT_IN(0), FT_IN(0), { 0 }, 0, 0, 0,
    ft__mean_infer, ft__cost_sum, ft__mean_scratch, ft__mean_forward, ft__mean_backward, NULL, NULL,
    NULL,
    FT_GPU_KERNELS(ftk_mean_forward, ftk_mean_backward, NULL)
};

FT_API ft_status ft_mean(ft_ctx *ctx, ft_tensor **y, ft_tensor *x)
{
    return ft_apply(ctx, &ft__op_mean, &x, NULL, y);
}

/* Known in every context, without ft_op_register. */
static const ft_op *const ft__builtin_ops[] = {
    &ft__op_embedding, &ft__op_rmsnorm, &ft__op_add_rmsnorm, &ft__op_linear, &ft__op_rope,
    &ft__op_head_norm, &ft__op_attention, &ft__op_swiglu, &ft__op_linear_cross_entropy,
    &ft__op_add, &ft__op_add_trailing, &ft__op_add_inplace, &ft__op_mul, &ft__op_scale,
    &ft__op_gelu, &ft__op_silu, &ft__op_softmax, &ft__op_layer_norm, &ft__op_mean,
    &ft__op_matmul, &ft__op_fill, &ft__op_copy, &ft__op_accumulate, NULL
};

/* ------------------------------------------------------------------------------ >>tensors.impl */

FT_API size_t ft_dtype_bytes(ft_dtype dtype) { return dtype == FT_BF16 ? 2 : 4; }

FT_API const char *ft_dtype_name(ft_dtype dtype)
{
    return dtype == FT_F32 ? "fp32" : dtype == FT_BF16 ? "bf16" : dtype == FT_I32 ? "int32" : "?";
}

FT_API uint16_t ft_bf16_from_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

FT_API float ft_f32_from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static ft_tensor *ft__root(const ft_tensor *t)
{
    while (t->base) t = t->base;
    return (ft_tensor *)(uintptr_t)t;
}

static ft_stream *ft__compute(ft_ctx *ctx) { return &ctx->streams[FT_STREAM_COMPUTE]; }

FT_API int64_t ft_numel(const ft_tensor *tensor)
{
    int64_t n = 1;
    for (int i = 0; i < tensor->ndim; i++) n *= tensor->shape[i];
    return n;
}

FT_API size_t ft_bytes(const ft_tensor *tensor)
{
    return (size_t)ft_numel(tensor) * ft_dtype_bytes(tensor->dtype);
}

/* Shape as text for messages, in the caller's buffer. */
static const char *ft__shape_text(int ndim, const int64_t *shape, char *text, size_t text_bytes)
{
    size_t at = 0;
    text[0] = 0;
    for (int i = 0; i < ndim && at + 24 < text_bytes; i++)
        at += (size_t)snprintf(text + at, text_bytes - at, "%s%lld", i ? "," : "[",
                               (long long)shape[i]);
    snprintf(text + at, text_bytes - at, "%s", ndim ? "]" : "[]");
    return text;
}

static ft_status ft__shape_check(int ndim, const int64_t *shape)
{
    char text[160];
    if (ndim < 1 || ndim > FT_MAX_DIMS)
        return ft_error(FT_ERR_SHAPE, "a tensor has 1 to %d dimensions, not %d", FT_MAX_DIMS, ndim);
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 1)
            return ft_error(FT_ERR_SHAPE, "dimension %d of %s is not positive", i,
                            ft__shape_text(ndim, shape, text, sizeof text));
        if (shape[i] > INT64_MAX / 16 / n)
            return ft_error(FT_ERR_SHAPE, "the elements of %s overflow 64 bits",
                            ft__shape_text(ndim, shape, text, sizeof text));
        n *= shape[i];
    }
    return FT_OK;
}

static ft_status ft__tensor_new(ft_ctx *ctx, ft_dtype dtype, int ndim, const int64_t *shape,
                                ft_tensor **out)
{
    char text[160];
    FT_TRY(ft__shape_check(ndim, shape));
    if ((unsigned)dtype >= FT_DTYPE_COUNT)
        return ft_error(FT_ERR_ARG, "unknown dtype %d", (int)dtype);
    ft_tensor *t = (ft_tensor *)FT_MALLOC(sizeof *t);
    if (!t)
        return ft_error(FT_ERR_OOM, "%s%sno host memory for the record of a %s tensor %s",
                        ctx->where_op, *ctx->where_op ? ": " : "", ft_dtype_name(dtype),
                        ft__shape_text(ndim, shape, text, sizeof text));
    memset(t, 0, sizeof *t);
    t->ctx = ctx;
    t->dtype = dtype;
    t->ndim = ndim;
    for (int i = 0; i < ndim; i++) t->shape[i] = shape[i];
    t->producer = -1;
    t->held = 1;
    t->keep = 1;
    t->next = ctx->tensors;
    if (t->next) t->next->prev = t;
    ctx->tensors = t;
    *out = t;
    return FT_OK;
}

static void ft__tensor_drop_storage(ft_tensor *t)
{
    if (!t->storage) return;
    ft__storage_release(t->storage, ft__compute(t->ctx));
    t->storage = NULL;
}

static void ft__tensor_destroy(ft_tensor *t)
{
    if (t->grad) ft__tensor_destroy(t->grad);
    ft__tensor_drop_storage(t);
    if (t->prev) t->prev->next = t->next; else t->ctx->tensors = t->next;
    if (t->next) t->next->prev = t->prev;
    FT_FREE(t);
}

FT_API ft_status ft_tensor_empty(ft_ctx *ctx, ft_tensor **out, ft_dtype dtype, int ndim,
                                 const int64_t *shape)
{
    return ft__tensor_new(ctx, dtype, ndim, shape, out);
}

FT_API ft_status ft_tensor_create(ft_ctx *ctx, ft_tensor **out, ft_dtype dtype, int ndim,
                                  const int64_t *shape, ft_tag tag)
{
    ft_tensor *t = NULL;
    FT_TRY(ft__tensor_new(ctx, dtype, ndim, shape, &t));
    ft_status status = ft_tensor_attach(t, tag, ft__compute(ctx));
    if (status != FT_OK) {
        ft__tensor_destroy(t);
        return status;
    }
    *out = t;
    return FT_OK;
}

FT_API ft_status ft_tensor_view(ft_tensor *base, ft_tensor **out, int64_t offset_elems, int ndim,
                                const int64_t *shape)
{
    ft_tensor *t;
    FT_TRY(ft__tensor_new(base->ctx, base->dtype, ndim, shape, &t));
    ft_status status = ft_tensor_bind(t, base, offset_elems);
    if (status != FT_OK) ft__tensor_destroy(t);
    else *out = t;
    return status;
}

FT_API ft_status ft_tensor_bind(ft_tensor *tensor, ft_tensor *base, int64_t offset_elems)
{
    char text[160];
    if (tensor->base || tensor->storage || tensor->tape)
        return ft_error(FT_ERR_STATE, "%s cannot become a view: it has storage or a base already",
                        tensor->name ? tensor->name : "the tensor");
    if (tensor->dtype != base->dtype || offset_elems < 0 ||
        offset_elems > ft_numel(base) - ft_numel(tensor))
        return ft_error(FT_ERR_SHAPE, "a %s view %s at element %lld leaves its %s base of %lld",
                        ft_dtype_name(tensor->dtype),
                        ft__shape_text(tensor->ndim, tensor->shape, text, sizeof text),
                        (long long)offset_elems, ft_dtype_name(base->dtype),
                        (long long)ft_numel(base));
    tensor->base = base;
    tensor->offset_elems = offset_elems;
    return FT_OK;
}

FT_API int ft_tensor_need(const ft_tensor *tensor) { return tensor->need; }

FT_API ft_status ft_tensor_attach(ft_tensor *tensor, ft_tag tag, ft_stream *home)
{
    if (tensor->base || tensor->storage)
        return ft_error(FT_ERR_STATE, "%s cannot get storage: %s",
                        tensor->name ? tensor->name : "the tensor",
                        tensor->base ? "it is a view; attach to its base" : "it has some already");
    if ((unsigned)tag >= FT_TAG_COUNT || !home)
        return ft_error(FT_ERR_ARG, "ft_tensor_attach: tag %d, stream %p", (int)tag, (void *)home);
    return ft__storage_create(tensor->ctx, ft_bytes(tensor), tag, home, &tensor->storage);
}

FT_API ft_status ft_tensor_detach(ft_tensor *tensor, ft_stream *last)
{
    if (!tensor->storage || !last)
        return ft_error(FT_ERR_STATE, "%s has no storage of its own to free",
                        tensor->name ? tensor->name : "the tensor");
    ft__storage_release(tensor->storage, last);
    tensor->storage = NULL;
    return FT_OK;
}

FT_API int ft_tensor_present(const ft_tensor *tensor) { return ft__root(tensor)->storage != NULL; }

FT_API void *ft_data(const ft_tensor *tensor)
{
    const ft_tensor *root = ft__root(tensor);
    if (!root->storage || !root->storage->data) return NULL;
    int64_t offset = 0;
    for (const ft_tensor *t = tensor; t->base; t = t->base) offset += t->offset_elems;
    return (char *)root->storage->data + (size_t)offset * ft_dtype_bytes(tensor->dtype);
}

static ft_view ft__view(const ft_tensor *t)
{
    ft_view v;
    memset(&v, 0, sizeof v);
    if (!t) return v;
    v.present = 1;
    v.dtype = t->dtype;
    v.ndim = t->ndim;
    memcpy(v.shape, t->shape, sizeof v.shape);
    v.data = ft_data(t);
    return v;
}

static const char *ft__tensor_label(const ft_tensor *t, char *text, size_t text_bytes)
{
    char shape[128];
    snprintf(text, text_bytes, "%s %s %s", t->name ? t->name : "tensor", ft_dtype_name(t->dtype),
             ft__shape_text(t->ndim, t->shape, shape, sizeof shape));
    return text;
}

/* What an op or a copy is about to read must be there. A deferred output is computed now. */
static ft_status ft__readable(ft_tensor *t, const char *reader)
{
    char text[224];
    int own = t->ctx->composite && t->storage; /* its inputs may be given up by all others */
    if (t->consumed && !own)
        return ft_error(FT_ERR_STATE, "%s reads %s, which an in-place op took over", reader,
                        ft__tensor_label(t, text, sizeof text));
    if (t->tape && !t->held && !own)
        return ft_error(FT_ERR_STATE,
                        "%s reads %s after it was freed (by ft_tensor_free, or at the "
                        "end of its segment: list it among the results of ft_segment_end)",
                        reader, ft__tensor_label(t, text, sizeof text));
    if (t->tape && !t->storage) FT_TRY(ft__deferred_run(t));
    if (!ft_tensor_present(t))
        return ft_error(FT_ERR_STATE, "%s reads %s, which has no storage now (a parameter must be "
                        "gathered first)", reader, ft__tensor_label(t, text, sizeof text));
    return FT_OK;
}

/* A write from outside the tape: tapes that saved the old value will refuse to use the new one.
   What a composite op writes into values of a tape is its forward or replay, not a change. */
static void ft__touch(ft_tensor *t)
{
    t = ft__root(t);
    if (!t->tape || !t->ctx->composite) t->version++;
}

typedef struct ft__copy_task { ft_ctx *ctx; void *to; size_t bytes; } ft__copy_task;

static ft_status ft__upload_run(void *arg)
{
    ft__copy_task task;
    memcpy(&task, arg, sizeof task);
    ft__delay(task.ctx);
    memcpy(task.to, (char *)arg + sizeof task, task.bytes);
    return FT_OK;
}

FT_API ft_status ft_upload(ft_tensor *tensor, const void *host)
{
    ft_ctx *ctx = tensor->ctx;
    FT_TRY(ft__readable(tensor, "ft_upload"));
    ft__touch(tensor);
    if (ctx->device == FT_META) return FT_OK;
    ft__copy_task task;
    task.ctx = ctx;
    task.to = ft_data(tensor);
    task.bytes = ft_bytes(tensor);
    if (ctx->device == FT_GPU) return ft__gpu_upload(ft__compute(ctx), task.to, host, task.bytes);
    if (!ft__async(ctx)) { /* runs at once: no copy of the bytes to queue */
        ft__delay(ctx);
        memcpy(task.to, host, task.bytes);
        return FT_OK;
    }
    char *packet = (char *)FT_MALLOC(sizeof task + task.bytes);
    if (!packet) return ft_error(FT_ERR_OOM, "no host memory to queue %zu bytes", task.bytes);
    memcpy(packet, &task, sizeof task);
    memcpy(packet + sizeof task, host, task.bytes);
    ft_status status = ft_stream_run(ft__compute(ctx), ft__upload_run, packet,
                                     sizeof task + task.bytes);
    FT_FREE(packet);
    return status;
}

FT_API ft_status ft_download(const ft_tensor *tensor, void *host)
{
    ft_ctx *ctx = tensor->ctx;
    FT_TRY(ft__readable((ft_tensor *)(uintptr_t)tensor, "ft_download"));
    FT_TRY(ft_stream_sync(ft__compute(ctx)));
    if (ctx->device == FT_META) memset(host, 0, ft_bytes(tensor));
    else if (ctx->device == FT_GPU)
        return ft__gpu_download(ft__compute(ctx), host, ft_data(tensor), ft_bytes(tensor));
    else memcpy(host, ft_data(tensor), ft_bytes(tensor));
    return FT_OK;
}

FT_API ft_status ft_fill(ft_tensor *tensor, double value, ft_stream *stream)
{
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.f[0] = value;
    return ft_op_run(stream, &ft__op_fill, &tensor, &tensor, &attr);
}

FT_API ft_status ft_copy(ft_tensor *to, const ft_tensor *from, ft_stream *stream)
{
    ft_tensor *in = (ft_tensor *)(uintptr_t)from;
    if (ft_numel(to) != ft_numel(from))
        return ft_error(FT_ERR_SHAPE, "ft_copy: %lld elements into %lld", (long long)ft_numel(from),
                        (long long)ft_numel(to));
    return ft_op_run(stream, &ft__op_copy, &in, &to, NULL);
}

FT_API ft_status ft_accumulate(ft_tensor *to, const ft_tensor *from, ft_stream *stream)
{
    ft_tensor *in[2];
    in[0] = (ft_tensor *)(uintptr_t)from;
    in[1] = to;
    return ft_op_run(stream, &ft__op_accumulate, in, &to, NULL);
}

static void ft__memory_end(ft_ctx *ctx)
{
    if (ctx->probe) ft__probe_finish(ctx);
    ctx->probe = NULL;
    while (ctx->tapes) ft__tape_destroy(ctx->tapes);
    /* Gradients are in the list themselves. */
    for (ft_tensor *t = ctx->tensors; t; t = t->next) t->grad = NULL;
    while (ctx->tensors) ft__tensor_destroy(ctx->tensors);
    while (ctx->storages) {
        ctx->storages->refs = 1;
        ft__storage_release(ctx->storages, ft__compute(ctx));
    }
    if (ctx->ops) FT_FREE((void *)(uintptr_t)ctx->ops);
    ctx->ops = NULL;
    if (ctx->memory) {
        ft__serving_end(ctx);
        if (ctx->memory->events) FT_FREE(ctx->memory->events);
        FT_FREE(ctx->memory->spans);
        ft__works_free(ctx->memory);
        FT_FREE(ctx->memory);
    }
    ctx->memory = NULL;
}

/* ------------------------------------------------------------------------------ >>optable.impl */

typedef ft_status (*ft__kernel)(const ft_op_call *call);

typedef struct ft__call_task {
    ft__kernel kernel;
    ft_stream *stream;
    ft__work *work;
    ft_op_call call;
} ft__call_task;

static ft_status ft__call_run(void *arg)
{
    ft__call_task *task = (ft__call_task *)arg;
    ft__work_begin(task->stream, task->work);
    ft_status status = task->kernel(&task->call);
    ft__work_end(task->stream, task->work);
    return status;
}

enum { FT__FORWARD = 0, FT__BACKWARD, FT__REPLAY }; /* which of a row's kernels */

static ft_status ft__kernel_of(const ft_op *row, ft_device device, int which, ft__kernel *out)
{
    if (device == FT_GPU)
        *out = which == FT__FORWARD ? row->gpu.forward
             : which == FT__BACKWARD ? row->gpu.backward : row->gpu.replay;
    else
        *out = which == FT__FORWARD ? row->forward
             : which == FT__BACKWARD ? row->backward : row->replay;
    if (*out) return FT_OK;
    return ft_error(FT_ERR_UNSUPPORTED, "op %s has no %s kernel for this device: set the row's "
                    "`gpu`, or run it on FT_CPU", row->name, which == FT__FORWARD ? "forward"
                    : which == FT__BACKWARD ? "backward" : "replay");
}

/* Queues one kernel with its scratch, which lives for this call alone. */
static ft_status ft__exec(ft_ctx *ctx, ft_stream *stream, ft_op_call *call, int which)
{
    ft_storage *scratch = NULL, *workspace = NULL;
    ft_status status = FT_OK;
    ft__call_task task;
    call->scratch_bytes = call->workspace_bytes = 0;
    call->ctx = ctx;
    call->device = ctx->device == FT_META ? ctx->config.plan_for : ctx->device;
    memset(&task, 0, sizeof task);
    if (ctx->device != FT_META)
        FT_TRY(ft__kernel_of(call->op, ctx->device, which, &task.kernel));
    if (call->op->scratch) call->op->scratch(call);
    if (call->scratch_bytes)
        FT_TRY(ft__storage_create(ctx, call->scratch_bytes, FT_TAG_ACT, stream, &scratch));
    if (call->workspace_bytes)
        status = ft__storage_create(ctx, call->workspace_bytes, FT_TAG_WORKSPACE, stream,
                                    &workspace);
    if (status == FT_OK && ctx->device != FT_META) {
        task.call = *call;
        task.call.scratch = scratch ? scratch->data : NULL;
        task.call.workspace = workspace ? workspace->data : NULL;
        task.stream = stream;
        status = ft__work_new(stream, call->op->name, NULL, &task.work);
        ft__gpu_call_begin(stream, &task.call);
        if (status == FT_OK) status = ft_stream_run(stream, ft__call_run, &task, sizeof task);
        ft__gpu_call_end(ctx);
    }
    if (workspace) ft__storage_release(workspace, stream);
    if (scratch) ft__storage_release(scratch, stream);
    return status;
}

FT_API ft_op ft_op_default(void)
{
    ft_op row;
    memset(&row, 0, sizeof row);
    return row;
}

static int ft__op_known(const ft_ctx *ctx, const ft_op *row)
{
    for (int i = 0; ft__builtin_ops[i]; i++)
        if (ft__builtin_ops[i] == row) return 1;
    for (int i = 0; i < ctx->n_ops; i++)
        if (ctx->ops[i] == row) return 1;
    return 0;
}

static ft_status ft__op_check(const ft_op *row)
{
    const char *name = row->name ? row->name : "(no name)";
    if (row->n_in < 0 || row->n_in > FT_OP_MAX_IN || row->n_out < 1 || row->n_out > FT_OP_MAX_OUT)
        return ft_error(FT_ERR_ARG, "op %s: %d inputs (0..%d), %d outputs (1..%d)", name, row->n_in,
                        FT_OP_MAX_IN, row->n_out, FT_OP_MAX_OUT);
    unsigned ins = FT_IN(row->n_in) - 1, outs = (FT_IN(row->n_out) - 1) << 16, all = ins | outs;
    unsigned saves = 0;
    for (int i = 0; i < FT_OP_MAX_IN; i++) saves |= row->saves[i];
    if (!row->name || !row->infer || (!row->forward && !row->forward_host && !row->gpu.forward))
        return ft_error(FT_ERR_ARG, "op %s needs a name, infer, and forward or forward_host", name);
    if (((row->optional | row->grads | row->accumulates) & ~ins) || (row->cheap & ~outs) ||
        ((row->replay_from | saves) & ~all))
        return ft_error(FT_ERR_ARG, "op %s: a mask names an input or output it does not have",
                        name);
    if ((row->flags & FT_OP_SPLIT) && (row->flags & ~(unsigned)FT_OP_SPLIT))
        return ft_error(FT_ERR_ARG, "op %s: FT_OP_SPLIT goes with no other flag", name);
    if (row->grads && !row->backward && !row->backward_host && !row->gpu.backward &&
        !(row->flags & FT_OP_GRAD_PASS))
        return ft_error(FT_ERR_ARG, "op %s has gradients but no backward", name);
    if ((row->replay != NULL) != (row->replay_from != 0))
        return ft_error(FT_ERR_ARG, "op %s: replay and replay_from go together", name);
    if ((row->flags & FT_OP_DEFERRED) && (row->flags & FT_OP_INPLACE))
        return ft_error(FT_ERR_ARG, "op %s cannot be deferred and in place", name);
    if ((row->flags & FT_OP_INPLACE) && (!(ins & 1u) || ((row->optional | saves) & 1u)))
        return ft_error(FT_ERR_ARG, "op %s is in place: it needs input 0, and no gradient can save "
                        "it, because forward writes over the input", name);
    if ((row->flags & FT_OP_GRAD_SAME_01) && (row->grads & 3u) != 3u)
        return ft_error(FT_ERR_ARG,
                        "op %s: inputs 0 and 1 share a gradient, but input 0 or input 1 "
                        "has none",
                        name);
    if ((row->flags & FT_OP_GRAD_PASS) && row->n_out != 1)
        return ft_error(FT_ERR_ARG, "op %s passes the gradient of one output, but it has %d", name,
                        row->n_out);
    return FT_OK;
}

FT_API ft_status ft_op_register(ft_ctx *ctx, const ft_op *row)
{
    FT_TRY(ft__op_check(row));
    if (ft__op_known(ctx, row)) return FT_OK;
    const ft_op **grown = (const ft_op **)FT_MALLOC((size_t)(ctx->n_ops + 1) * sizeof *grown);
    if (!grown) return ft_error(FT_ERR_OOM, "no host memory to register op %s", row->name);
    if (ctx->n_ops) memcpy(grown, ctx->ops, (size_t)ctx->n_ops * sizeof *grown);
    grown[ctx->n_ops++] = row;
    if (ctx->ops) FT_FREE((void *)(uintptr_t)ctx->ops);
    ctx->ops = grown;
    return FT_OK;
}

typedef struct ft__where { const char *op, *phase, *segment_name; int segment; } ft__where;

static ft__where ft__where_set(ft_ctx *ctx, const char *phase, const char *op)
{
    ft__where old;
    old.op = ctx->where_op;
    old.phase = ctx->where_phase;
    old.segment_name = ctx->where_segment_name;
    old.segment = ctx->where_segment;
    ctx->where_phase = phase;
    ctx->where_op = op;
    return old;
}

static void ft__where_restore(ft_ctx *ctx, ft__where old)
{
    ctx->where_op = old.op;
    ctx->where_phase = old.phase;
    ctx->where_segment_name = old.segment_name;
    ctx->where_segment = old.segment;
}

/* Views of the inputs, after checking that each can be read. */
static ft_status ft__call_begin(ft_op_call *call, const ft_op *row, ft_tensor *const *in,
                                const ft_attr *attr)
{
    memset(call, 0, sizeof *call);
    call->op = row;
    if (attr) call->attr = *attr;
    for (int i = 0; i < row->n_in; i++) {
        if (!in[i] && !(row->optional & FT_IN(i)))
            return ft_error(FT_ERR_ARG, "%s: input %d is missing", row->name, i);
        if (in[i]) FT_TRY(ft__readable(in[i], row->name));
        call->in[i] = ft__view(in[i]);
    }
    return FT_OK;
}

FT_API ft_status ft_op_run(ft_stream *stream, const ft_op *row, ft_tensor *const *in,
                           ft_tensor *const *out, const ft_attr *attr)
{
    ft_ctx *ctx = stream->ctx;
    ft_op_call call;
    ft_view given[FT_OP_MAX_OUT];
    if (!ft__op_known(ctx, row) || (!row->forward && !row->gpu.forward))
        return ft_error(FT_ERR_ARG, "op %s is not registered here, or has no forward kernel",
                        row->name ? row->name : "?");
    FT_TRY(ft__call_begin(&call, row, in, attr));
    for (int i = 0; i < row->n_out; i++) {
        FT_TRY(ft__readable(out[i], row->name));
        call.out[i] = given[i] = ft__view(out[i]);
        ft__touch(out[i]);
    }
    FT_TRY(row->infer(&call));
    for (int i = 0; i < row->n_out; i++) {
        int64_t want = 1, have = 1;
        for (int d = 0; d < call.out[i].ndim; d++) want *= call.out[i].shape[d];
        for (int d = 0; d < given[i].ndim; d++) have *= given[i].shape[d];
        if (want != have || call.out[i].dtype != given[i].dtype)
            return ft_error(FT_ERR_SHAPE, "%s: output %d holds %lld %s, the op makes %lld %s",
                            row->name, i, (long long)have, ft_dtype_name(given[i].dtype),
                            (long long)want, ft_dtype_name(call.out[i].dtype));
        call.out[i] = given[i];
    }
    ft__where old = ft__where_set(ctx, "", row->name);
    ft_status status = ft__exec(ctx, stream, &call, FT__FORWARD);
    ft__where_restore(ctx, old);
    return status;
}

/* --------------------------------------------------------------------------------- >>tape.impl

   A tape is an array of nodes in the order of forward. The tensors its ops made are values: they
   belong to the tape, and their storage follows four facts about each of them:

       held   the caller may still use the handle
       need   how many backwards (and replays, by pins) will read it
       keep   the policy lets it stay; 0 means it can be rebuilt
       storage

   [T1] A value's storage is freed as soon as it is not held and (need is 0, or keep is 0).
   [T2] A node with a dropped output pins what its replay reads: one need on each. So the roots of
        every possible replay are alive, or can be rebuilt themselves, and nothing else is.
   [T3] A rebuilt value is kept (keep = 1) until its need is 0: no op is replayed twice.
   [T4] Pins end when no output of the node can need a replay any more: each is dead or kept. Ending
        a pin may end a need, which frees storage (T1), which may end pins further up.
   [T5] Backward of node n: rebuild what it reads, run, free the gradients of its outputs, end its
        needs. A gradient that only passes through an op shares storage; who wants to add to a
        shared one copies it first.
   [T6] A split backward walks twice. The first walk leaves the weight gradients of FT_OP_SPLIT ops,
        and keeps for them the ops' inputs and the gradients of their outputs; the second makes
        them. */

typedef struct ft__node {
    const ft_op *row;             /* NULL: a mark */
    ft_attr attr;
    ft_tensor *in[FT_OP_MAX_IN], *out[FT_OP_MAX_OUT];
    uint64_t version[16 + FT_OP_MAX_OUT]; /* by bit: of inputs and outputs when recorded */
    unsigned want;                /* FT_IN mask: gradients that backward makes */
    unsigned later;               /* FT_IN mask: those of `want` left for the second half */
    unsigned saved;               /* FT_IN | FT_OUT mask: one need each, until backward is done */
    unsigned pinned;              /* FT_IN | FT_OUT mask: one need each, while a replay may come */
    int deferred;                 /* forward has not run yet */
    int segment;
    ft_mark_fn mark;
    void *user;
} ft__node;

typedef struct ft__segment {
    const char *name;
    ft_sac sac;
    int outputs;
    int number;                   /* among all of the model's: ft_sac_fit's, or the ordinal */
} ft__segment;

struct ft_tape {
    ft_ctx *ctx;
    ft__node *nodes;
    int n, cap;
    ft__segment *segments;
    int n_segments, cap_segments;
    int open;                     /* a segment is open: the last */
    int in_backward;
    ft_tensor *root;              /* between the halves of a split backward */
    ft_tape *next;
};

/* Grows *array (of `item` bytes each, n used) so that one more fits. */
static ft_status ft__grow(void **array, int *cap, int n, size_t item)
{
    if (n < *cap) return FT_OK;
    int more = *cap ? 2 * *cap : 64;
    void *grown = FT_MALLOC((size_t)more * item);
    if (!grown) return ft_error(FT_ERR_OOM, "no host memory for %d tape records", more);
    if (*array) {
        memcpy(grown, *array, (size_t)n * item);
        FT_FREE(*array);
    }
    *array = grown;
    *cap = more;
    return FT_OK;
}

static void ft__node_unpin(ft__node *node);

/* [T1], and on to [T4] for the node that made it. */
static void ft__settle(ft_tensor *t)
{
    if (!t->tape) { /* a tensor of one's own */
        if (t->held) return;
        if (t->uses == 0) ft__tensor_destroy(t);
        else if (t->need == 0 && !t->base) ft__tensor_drop_storage(t);
        return;
    }
    if (t->held) return;
    if (t->need == 0 || !t->keep) ft__tensor_drop_storage(t);
    if (t->need == 0) ft__node_unpin(&t->tape->nodes[t->producer]);
}

static void ft__need(ft_tensor *t, int change)
{
    t->need += change;
    if (t->base) ft__root(t)->need += change;
    if (change < 0) ft__settle(t);
}

static ft_tensor *ft__node_tensor(ft__node *node, int bit)
{
    return bit < 16 ? node->in[bit] : node->out[bit - 16];
}

static void ft__node_need(ft__node *node, unsigned mask, int change)
{
    for (int bit = 0; bit < 16 + FT_OP_MAX_OUT; bit++)
        if (mask >> bit & 1u) ft__need(ft__node_tensor(node, bit), change);
}

/* [T4] Ends the node's pins if none of its outputs can need a replay. */
static void ft__node_unpin(ft__node *node)
{
    unsigned pins = node->pinned;
    if (!pins) return;
    for (int i = 0; i < node->row->n_out; i++) {
        ft_tensor *o = node->out[i];
        int self = o && (pins & FT_OUT(i)) ? 1 : 0; /* replay reads this output: its own pin */
        if (o && !o->keep && (o->held || o->need > self)) return;
    }
    node->pinned = 0;
    ft__node_need(node, pins, -1);
}

/* What a replay of the node reads: the cheap way where the outputs it starts from are kept. */
static int ft__replay_cheap(const ft__node *node)
{
    if (!node->row->replay) return 0;
    for (int i = 0; i < node->row->n_out; i++)
        if ((node->row->replay_from & FT_OUT(i)) && !(node->out[i] && node->out[i]->keep)) return 0;
    return 1;
}

static unsigned ft__replay_reads(const ft__node *node)
{
    if (ft__replay_cheap(node)) return node->row->replay_from;
    unsigned mask = 0;
    for (int i = 0; i < node->row->n_in; i++)
        if (node->in[i]) mask |= FT_IN(i);
    return mask;
}

static int ft__policy_keeps(ft_tape *tape, const ft_op *row, int out)
{
    if (!tape->open) return 1;
    ft__segment *s = &tape->segments[tape->n_segments - 1];
    int ordinal = s->outputs++;
    switch (s->sac.kind) {
    case FT_SAC_SELECTIVE: return !(row->cheap & FT_OUT(out));
    case FT_SAC_FULL: return 0;
    case FT_SAC_MASK: return ordinal >= 64 || !(s->sac.mask >> ordinal & 1u);
    default: return 1;
    }
}

/* Decides keep for each output, then books the needs of backward and the pins of replay [T2]. */
static void ft__record_needs(ft_tape *tape, ft__node *node)
{
    const ft_op *row = node->row;
    int dropped = 0;
    for (int i = 0; i < row->n_out; i++) {
        int keep = ft__policy_keeps(tape, row, i);
        if (!node->out[i]) continue;
        if (row->flags & FT_OP_DEFERRED) keep = 1;
        /* What is written over a kept tensor is kept: rebuilding it would rebuild that one too. */
        if (i == 0 && (row->flags & FT_OP_INPLACE)) keep = node->in[0]->keep;
        node->out[i]->keep = keep;
        dropped |= !keep;
    }
    for (int i = 0; i < row->n_in; i++)
        if (node->want & FT_IN(i)) node->saved |= row->saves[i];
    for (int i = 0; i < row->n_in; i++)
        if (!node->in[i]) node->saved &= ~FT_IN(i);
    for (int i = 0; i < row->n_out; i++)
        if (!node->out[i]) node->saved &= ~FT_OUT(i);
    ft__node_need(node, node->saved, 1);
    if (!dropped) return;
    node->pinned = ft__replay_reads(node);
    ft__node_need(node, node->pinned, 1);
}

static ft_status ft__record(ft_tape *tape, const ft_op_call *call, ft_tensor *const *in,
                            ft_tensor **out, int deferred)
{
    FT_TRY(ft__grow((void **)&tape->nodes, &tape->cap, tape->n, sizeof *tape->nodes));
    ft__node *node = &tape->nodes[tape->n];
    const ft_op *row = call->op;
    memset(node, 0, sizeof *node);
    node->row = row;
    node->attr = call->attr;
    node->deferred = deferred;
    node->segment = tape->open ? tape->n_segments - 1 : -1;
    for (int i = 0; i < row->n_in; i++) {
        node->in[i] = in[i];
        if (!in[i]) continue;
        node->version[i] = ft__root(in[i])->version;
        if (!in[i]->tape) in[i]->uses++;
        if ((row->grads & FT_IN(i)) && in[i]->requires_grad) node->want |= FT_IN(i);
    }
    for (int i = 0; i < row->n_out; i++) {
        node->out[i] = out[i];
        if (!out[i]) continue;
        node->version[16 + i] = out[i]->version;
        out[i]->tape = tape;
        out[i]->producer = tape->n;
        out[i]->out_index = i;
        out[i]->requires_grad = node->want != 0;
    }
    tape->n++;
    ft__record_needs(tape, node);
    return FT_OK;
}

/* Input 0 gives its storage to output 0 and is gone. */
static ft_status ft__consume_check(const ft_op *row, ft_tensor *in, const ft_tape *tape)
{
    char text[224];
    const char *why = NULL;
    if (in->base) why = "it is a view";
    else if (tape && in->tape != tape) why = "it is not on the current tape, and would be lost";
    else if (!in->tape && in->uses > 0) why = "a tape refers to it";
    else if (!tape && in->tape) why = "it belongs to a tape that is not recording";
    else if (in->need > 0 && in->keep) why = "a backward will read it";
    else if (in->storage && in->storage->refs > 1) why = "its storage is shared";
    if (!why) return FT_OK;
    return ft_error(FT_ERR_STATE, "%s would write over %s: %s", row->name,
                    ft__tensor_label(in, text, sizeof text), why);
}

/* On a tape the record of the consumed handle stays; elsewhere nothing refers to it any more. */
static void ft__consume(ft_tensor *in, ft_tensor *out)
{
    out->storage = in->storage;
    in->storage = NULL;
    in->consumed = 1;
    in->held = 0;
    if (in->tape) ft__settle(in);
    else ft__tensor_destroy(in);
}

static ft_status ft__outputs_create(ft_ctx *ctx, const ft_op_call *call, ft_tensor **out)
{
    for (int i = 0; i < call->op->n_out; i++) out[i] = NULL;
    for (int i = 0; i < call->op->n_out; i++) {
        const ft_view *v = &call->out[i];
        if (!v->present) continue;
        FT_TRY(ft__tensor_new(ctx, v->dtype, v->ndim, v->shape, &out[i]));
        out[i]->name = call->op->name;
        out[i]->in_segment = ctx->segment_open;
    }
    return FT_OK;
}

static void ft__cost_add(const ft_op_call *call, double *flops, double *bytes)
{
    double f = 0, b = 0;
    if (call->op->cost) call->op->cost(call, &f, &b);
    *flops += f;
    if (bytes) *bytes += b;
}

static ft_status ft__forward_host(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                  ft_tensor **out)
{
    ctx->composite++;
    ft_status status = call->op->forward_host(ctx, call, in, out);
    ctx->composite--;
    return status;
}

static ft_status ft__forward(ft_ctx *ctx, ft_op_call *call, ft_tensor **in, ft_tensor **out)
{
    const ft_op *row = call->op;
    for (int i = 0; i < row->n_out; i++)
        if (out[i]) call->out[i] = ft__view(out[i]);
    ft__cost_add(call, &ctx->flops.forward, NULL);
    if (row->forward_host) return ft__forward_host(ctx, call, in, out);
    return ft__exec(ctx, ft__compute(ctx), call, FT__FORWARD);
}

static ft_status ft__apply(ft_ctx *ctx, ft_op_call *call, ft_tensor *const *in, ft_tensor **out)
{
    const ft_op *row = call->op;
    ft_tape *tape = ctx->tape;
    int wants = 0, inplace = (row->flags & FT_OP_INPLACE) != 0;
    ft_tensor *ins[FT_OP_MAX_IN];
    FT_TRY(row->infer(call));
    if (inplace) FT_TRY(ft__consume_check(row, in[0], tape));
    FT_TRY(ft__outputs_create(ctx, call, out));
    for (int i = 0; i < row->n_in; i++) {
        ins[i] = in[i];
        if (in[i] && (row->grads & FT_IN(i)) && in[i]->requires_grad) wants = 1;
        if (tape && in[i] && in[i]->tape && in[i]->tape != tape)
            return ft_error(FT_ERR_STATE, "%s: input %d belongs to another tape", row->name, i);
        if (tape && in[i] && in[i]->base && ft__root(in[i])->tape)
            return ft_error(FT_ERR_STATE,
                            "%s: input %d is a view of a recorded tensor; only ops that "
                            "are not recorded (ft_op_run) can use it",
                            row->name, i);
    }
    int deferred = tape && wants && (row->flags & FT_OP_DEFERRED);
    for (int i = inplace; i < row->n_out && !deferred; i++)
        if (out[i]) FT_TRY(ft_tensor_attach(out[i], FT_TAG_ACT, ft__compute(ctx)));
    if (tape) FT_TRY(ft__record(tape, call, in, out, deferred));
    if (deferred) return FT_OK;
    if (inplace) ft__consume(ins[0], out[0]);
    if (inplace && !tape) ins[0] = NULL; /* destroyed; its data is in call->in[0], and out[0]'s */
    return ft__forward(ctx, call, ins, out);
}

FT_API ft_status ft_apply(ft_ctx *ctx, const ft_op *row, ft_tensor *const *in, const ft_attr *attr,
                          ft_tensor **out)
{
    ft_op_call call;
    if (!ft__op_known(ctx, row))
        return ft_error(FT_ERR_ARG, "op %s is not registered in this context: call ft_op_register",
                        row->name ? row->name : "(no name)");
    if (ctx->composite)
        return ft_error(FT_ERR_STATE, "%s: ft_apply inside a composite op, which is recorded as a "
                        "whole: call ft_op_run", row->name);
    ft__where old = ft__where_set(ctx, "forward", row->name);
    ft_status status = ft__call_begin(&call, row, in, attr);
    if (status == FT_OK) status = ft__apply(ctx, &call, in, out);
    ft__where_restore(ctx, old);
    return status;
}

FT_API void ft_tensor_free(ft_tensor *tensor)
{
    if (!tensor || (tensor->tape && !tensor->held)) return;
    tensor->held = 0;
    ft__settle(tensor);
}

FT_API ft_status ft_tape_create(ft_ctx *ctx, ft_tape **out)
{
    *out = NULL;
    ft_tape *tape = (ft_tape *)FT_MALLOC(sizeof *tape);
    if (!tape) return ft_error(FT_ERR_OOM, "no host memory for a tape");
    memset(tape, 0, sizeof *tape);
    tape->ctx = ctx;
    tape->next = ctx->tapes;
    ctx->tapes = tape;
    *out = tape;
    return FT_OK;
}

FT_API ft_tape *ft_tape_current(const ft_ctx *ctx) { return ctx->tape; }

FT_API ft_status ft_tape_begin(ft_tape *tape)
{
    ft_ctx *ctx = tape->ctx;
    if (ctx->tape) return ft_error(FT_ERR_STATE, "a tape is recording already: end it first");
    if (ctx->segment_open) return ft_error(FT_ERR_STATE, "a segment is open: end it first");
    if (tape->n) return ft_error(FT_ERR_STATE, "the tape holds %d nodes: run ft_backward or "
                                 "ft_tape_reset first", tape->n);
    ctx->tape = tape;
    return FT_OK;
}

FT_API ft_status ft_tape_end(ft_tape *tape)
{
    ft_ctx *ctx = tape->ctx;
    if (ctx->tape != tape) return ft_error(FT_ERR_STATE, "this tape is not the one recording");
    if (tape->open) return ft_error(FT_ERR_STATE, "segment %s is still open",
                                    tape->segments[tape->n_segments - 1].name);
    ctx->tape = NULL;
    return FT_OK;
}

/* The node refers to tensors of the caller's no longer; those that he gave up go with it. */
static void ft__node_forget(ft__node *node)
{
    for (int i = 0; i < FT_OP_MAX_IN; i++) {
        ft_tensor *t = node->in[i];
        if (!t || t->tape) continue;
        node->in[i] = NULL;
        t->uses--;
        ft__settle(t);
    }
}

/* Ends what the tape's nodes still hold of tensors that are not the tape's. */
static void ft__tape_let_go(ft_tape *tape)
{
    for (int n = 0; n < tape->n; n++) {
        ft__node *node = &tape->nodes[n];
        for (int i = 0; i < FT_OP_MAX_IN; i++) {
            ft_tensor *t = node->in[i];
            if (!t || t->tape) {
                node->in[i] = NULL;
                continue;
            }
            int needs = (int)(node->saved >> i & 1u) + (int)(node->pinned >> i & 1u);
            t->need -= needs;
            if (t->base) ft__root(t)->need -= needs;
        }
    }
}

/* Marks whose last call has not come get it, in the order of backward, up to one that fails. */
static ft_status ft__tape_drop_marks(ft_tape *tape)
{
    ft_status status = FT_OK;
    tape->in_backward = 1; /* a mark does not reset the tape */
    for (int n = tape->n - 1; n >= 0 && status == FT_OK; n--) {
        ft_mark_fn mark = tape->nodes[n].mark;
        tape->nodes[n].mark = NULL;
        if (mark) status = mark(tape->ctx, tape->nodes[n].user, FT_PHASE_DROPPED);
    }
    tape->in_backward = 0;
    return status;
}

static void ft__tape_empty(ft_tape *tape)
{
    ft_ctx *ctx = tape->ctx;
    if (ctx->tape == tape) ctx->tape = NULL;
    if (tape->open) {
        ctx->segment_open = 0;
        ctx->where_segment = -1;
        ctx->where_segment_name = NULL;
    }
    ft__tape_let_go(tape);
    for (int n = tape->n - 1; n >= 0; n--)
        for (int i = 0; i < FT_OP_MAX_OUT; i++)
            if (tape->nodes[n].out[i]) ft__tensor_destroy(tape->nodes[n].out[i]);
    for (int n = 0; n < tape->n; n++) ft__node_forget(&tape->nodes[n]);
    tape->n = tape->n_segments = tape->open = 0;
    tape->root = NULL;
}

FT_API ft_status ft_tape_reset(ft_tape *tape)
{
    if (tape->in_backward) return ft_error(FT_ERR_STATE, "ft_tape_reset inside ft_backward");
    ft_status status = ft__tape_drop_marks(tape);
    ft__tape_empty(tape);
    return status;
}

static void ft__tape_destroy(ft_tape *tape)
{
    ft__tape_empty(tape);
    ft_tape **link = &tape->ctx->tapes;
    while (*link != tape) link = &(*link)->next;
    *link = tape->next;
    if (tape->nodes) FT_FREE(tape->nodes);
    if (tape->segments) FT_FREE(tape->segments);
    FT_FREE(tape);
}

FT_API void ft_tape_free(ft_tape *tape)
{
    if (!tape) return;
    (void)ft__tape_drop_marks(tape);
    ft__tape_destroy(tape);
}

FT_API ft_status ft_tape_mark(ft_ctx *ctx, ft_mark_fn fn, void *user)
{
    ft_tape *tape = ctx->tape;
    if (!tape) return FT_OK;
    FT_TRY(ft__grow((void **)&tape->nodes, &tape->cap, tape->n, sizeof *tape->nodes));
    ft__node *node = &tape->nodes[tape->n++];
    memset(node, 0, sizeof *node);
    node->mark = fn;
    node->user = user;
    node->segment = -1;
    return FT_OK;
}

FT_API ft_status ft_segment_begin(ft_ctx *ctx, const char *name, ft_sac sac)
{
    ft_tape *tape = ctx->tape;
    if (ctx->segment_open) return ft_error(FT_ERR_STATE, "segment %s begins inside another", name);
    if ((unsigned)sac.kind > FT_SAC_MASK)
        return ft_error(FT_ERR_ARG, "segment %s: unknown recomputation policy %d", name,
                        (int)sac.kind);
    if (tape)
        FT_TRY(ft__grow((void **)&tape->segments, &tape->cap_segments, tape->n_segments,
                        sizeof *tape->segments));
    ctx->segment_open = 1;
    ctx->where_segment_name = name;
    ctx->where_segment = tape ? tape->n_segments : -1;
    if (!tape) return FT_OK;
    ft__segment *s = &tape->segments[tape->n_segments++];
    s->name = name;
    s->sac = sac;
    s->outputs = 0;
    s->number = sac.segment > 0 ? sac.segment - 1 : tape->n_segments - 1;
    tape->open = 1;
    if (ctx->probe) ft__probe_begin(ctx, tape);
    return FT_OK;
}

static int ft__is_result(const ft_tensor *t, int n, ft_tensor *const *results)
{
    for (int i = 0; i < n; i++)
        if (results[i] == t) return 1;
    return 0;
}

FT_API ft_status ft_segment_end(ft_ctx *ctx, int n, ft_tensor *const *results)
{
    ft_tape *tape = ctx->tape;
    if (!ctx->segment_open) return ft_error(FT_ERR_STATE, "no segment is open");
    for (int i = 0; i < n; i++) {
        FT_TRY(ft__readable(results[i], "ft_segment_end"));
        results[i]->in_segment = 0;
        results[i]->keep = 1; /* the next segment's replays start from it */
        if (results[i]->tape)
            ft__node_unpin(&results[i]->tape->nodes[results[i]->producer]);
    }
    for (ft_tensor *t = ctx->tensors, *next; t; t = next) {
        next = t->next;
        if (!t->in_segment || ft__is_result(t, n, results)) continue;
        t->in_segment = 0;
        ft_tensor_free(t);
    }
    ctx->segment_open = 0;
    if (tape) tape->open = 0;
    if (tape && ctx->probe) ft__probe_end(ctx, tape);
    ctx->where_segment_name = NULL;
    ctx->where_segment = -1;
    return FT_OK;
}

FT_API void ft_flops_get(const ft_ctx *ctx, ft_flops *flops) { *flops = ctx->flops; }

/* What a backward or a replay is about to read: bit of a node. */
static ft_status ft__node_read(ft__node *node, int bit)
{
    ft_tensor *t = ft__node_tensor(node, bit);
    char text[224];
    if (ft__root(t)->version != node->version[bit])
        return ft_error(FT_ERR_STATE,
                        "backward of %s reads %s, which was written after the forward",
                        node->row->name, ft__tensor_label(t, text, sizeof text));
    if (ft_tensor_present(t)) return FT_OK;
    if (t->tape) return ft__rebuild(t);
    return ft_error(FT_ERR_STATE, "backward of %s reads %s, which has no storage now (a parameter "
                    "must be gathered; its region ends too early)", node->row->name,
                    ft__tensor_label(t, text, sizeof text));
}

static ft_status ft__node_read_all(ft__node *node, unsigned mask)
{
    for (int bit = 0; bit < 16 + FT_OP_MAX_OUT; bit++)
        if (mask >> bit & 1u) FT_TRY(ft__node_read(node, bit));
    return FT_OK;
}

/* An in-place op takes over input 0 again, or a copy of it if someone else is going to read it. */
static ft_status ft__replay_inplace(ft_ctx *ctx, ft_tensor *first, ft_tensor *o)
{
    ft_op_call copy;
    if (first->need == 1) {
        o->storage = first->storage;
        first->storage = NULL;
        return FT_OK;
    }
    FT_TRY(ft_tensor_attach(o, FT_TAG_ACT, ft__compute(ctx)));
    memset(&copy, 0, sizeof copy);
    copy.op = &ft__op_copy;
    copy.in[0] = ft__view(first);
    copy.out[0] = ft__view(o);
    return ft__exec(ctx, ft__compute(ctx), &copy, FT__FORWARD);
}

/* Storage for the outputs that are absent. */
static ft_status ft__replay_outputs(ft_ctx *ctx, ft__node *node, ft_op_call *call)
{
    for (int i = 0; i < node->row->n_out; i++) {
        ft_tensor *o = node->out[i];
        if (!o) continue;
        if (!o->storage && i == 0 && (node->row->flags & FT_OP_INPLACE))
            FT_TRY(ft__replay_inplace(ctx, node->in[0], o));
        if (!o->storage) FT_TRY(ft_tensor_attach(o, FT_TAG_ACT, ft__compute(ctx)));
        call->out[i] = ft__view(o);
    }
    return FT_OK;
}

/* Runs a node's forward (or its cheaper replay) once more: [T2] [T3] [T4]. */
static ft_status ft__replay(ft_tape *tape, ft__node *node)
{
    ft_ctx *ctx = tape->ctx;
    const ft_op *row = node->row;
    ft_op_call call;
    unsigned reads = node->pinned;
    if (!reads && ft__replay_reads(node))
        return ft_error(FT_ERR_STATE, "the output of %s is gone and nothing to replay it from was "
                        "kept", row->name);
    int cheap = (reads >> 16) != 0 || (row->replay && reads == row->replay_from);
    FT_TRY(ft__node_read_all(node, reads));
    memset(&call, 0, sizeof call);
    call.op = row;
    call.attr = node->attr;
    for (int i = 0; i < row->n_in; i++) call.in[i] = ft__view(node->in[i]);
    FT_TRY(ft__replay_outputs(ctx, node, &call));
    double flops = 0;
    ft__cost_add(&call, &flops, &ctx->flops.replay_bytes);
    ctx->flops.replay += flops;
    if (ctx->probe) ft__probe_replay(ctx, tape, node->segment, flops);
    if (row->forward_host) FT_TRY(ft__forward_host(ctx, &call, node->in, node->out));
    else FT_TRY(ft__exec(ctx, ft__compute(ctx), &call, cheap ? FT__REPLAY : FT__FORWARD));
    for (int i = 0; i < row->n_out; i++)
        if (node->out[i]) node->out[i]->keep = 1;
    for (int i = 0; i < row->n_out; i++)
        if (node->out[i]) ft__settle(node->out[i]);
    ft__node_unpin(node);
    return FT_OK;
}

static ft_status ft__rebuild(ft_tensor *t)
{
    ft_ctx *ctx = t->ctx;
    ft__node *node = &t->tape->nodes[t->producer];
    if (node->deferred) return ft__deferred_run(t);
    ft__where old = ft__where_set(ctx, "replay", node->row->name);
    ft_status status = ft__replay(t->tape, node);
    ft__where_restore(ctx, old);
    if (status == FT_OK && !t->storage)
        return ft_error(FT_ERR_STATE, "replay of %s did not bring its output back",
                        node->row->name);
    return status;
}

/* The forward that was put off, because somebody reads its output before backward. */
static ft_status ft__deferred_run(ft_tensor *t)
{
    ft_ctx *ctx = t->ctx;
    ft__node *node = &t->tape->nodes[t->producer];
    ft_op_call call;
    if (!node->deferred) return FT_OK;
    ft__where old = ft__where_set(ctx, "forward", node->row->name);
    memset(&call, 0, sizeof call);
    call.op = node->row;
    call.attr = node->attr;
    ft_status status = FT_OK;
    for (int i = 0; i < node->row->n_in && status == FT_OK; i++) {
        if (node->in[i]) status = ft__node_read(node, i);
        if (node->in[i]) call.in[i] = ft__view(node->in[i]);
    }
    for (int i = 0; i < node->row->n_out && status == FT_OK; i++)
        if (node->out[i]) status = ft_tensor_attach(node->out[i], FT_TAG_ACT, ft__compute(ctx));
    if (status == FT_OK) status = ft__forward(ctx, &call, node->in, node->out);
    node->deferred = 0;
    ft__where_restore(ctx, old);
    return status;
}

/* ---- gradients of values ---- */

/* *out, often a tensor's ->grad, is set only when all went well. */
static ft_status ft__grad_new(ft_tensor *like, ft_tag tag, ft_tensor **out)
{
    ft_tensor *grad;
    FT_TRY(ft__tensor_new(like->ctx, like->dtype, like->ndim, like->shape, &grad));
    grad->name = "gradient";
    ft_status status = ft_tensor_attach(grad, tag, ft__compute(like->ctx));
    if (status != FT_OK) ft__tensor_destroy(grad);
    else *out = grad;
    return status;
}

/* A gradient of `like` in storage that exists. */
static ft_status ft__grad_alias(ft_tensor *like, ft_storage *storage, ft_tensor **out)
{
    FT_TRY(ft__tensor_new(like->ctx, like->dtype, like->ndim, like->shape, out));
    (*out)->name = "gradient";
    (*out)->storage = storage;
    storage->refs++;
    return FT_OK;
}

/* Before adding to a gradient whose storage others share: a copy of one's own. */
static ft_status ft__grad_own(ft_tensor *grad)
{
    ft_storage *shared = grad->storage;
    ft_ctx *ctx = grad->ctx;
    if (shared->refs == 1) return FT_OK;
    ft_tensor *copy;
    FT_TRY(ft__grad_new(grad, shared->tag, &copy));
    FT_TRY(ft_copy(copy, grad, ft__compute(ctx)));
    ft__storage_release(shared, ft__compute(ctx));
    grad->storage = copy->storage;
    copy->storage = NULL;
    ft__tensor_destroy(copy);
    return FT_OK;
}

/* Gradients of values pass through and share storage; so do those of a leaf of tag act, which is
   the value of some other tape. Parameters get theirs in a buffer of their own. */
static int ft__is_value(const ft_tensor *t)
{
    return !t->sink.get && (t->tape || (t->storage && t->storage->tag == FT_TAG_ACT));
}

/* Where the gradient of t is to be written, and whether it adds. */
static ft_status ft__grad_target(ft_tensor *t, ft_tensor **target, int *accumulate)
{
    if (t->sink.get) return t->sink.get(t->sink.user, t, target, accumulate);
    *accumulate = t->grad != NULL;
    if (t->grad) FT_TRY(ft__grad_own(t->grad));
    else FT_TRY(ft__grad_new(t, ft__is_value(t) ? FT_TAG_ACT : FT_TAG_GRAD, &t->grad));
    *target = t->grad;
    return FT_OK;
}

/* A finished contribution `from` becomes (part of) the gradient of t. Values share its storage. */
static ft_status ft__grad_give(ft_tensor *t, ft_tensor *from)
{
    ft_tensor *target;
    int accumulate;
    if (ft__is_value(t) && !t->grad) return ft__grad_alias(t, from->storage, &t->grad);
    FT_TRY(ft__grad_target(t, &target, &accumulate));
    if (accumulate) return ft_accumulate(target, from, ft__compute(t->ctx));
    return ft_copy(target, from, ft__compute(t->ctx));
}

/* The storage that the gradient of input 0 may be written over, NULL if there is none. */
static ft_storage *ft__grad_over(const ft__node *node)
{
    ft_tensor *in = node->in[0], *dout = node->out[0] ? node->out[0]->grad : NULL;
    size_t bytes = ft_bytes(in);
    if ((node->row->flags & FT_OP_GRAD_OVER_DOUT) && dout && dout->dtype == in->dtype &&
        dout->storage->refs == 1 && ft_bytes(dout) == bytes)
        return dout->storage;
    if ((node->row->flags & FT_OP_GRAD_OVER_IN) && in->tape && !in->held && in->storage &&
        in->storage->refs == 1 && in->need == (int)(node->saved & 1u))
        return in->storage;
    return NULL;
}

typedef struct ft__grads { /* what one backward call writes */
    ft_tensor *target[FT_OP_MAX_IN];
    int temporary[FT_OP_MAX_IN]; /* to be given to the input, then destroyed */
} ft__grads;

/* Chooses a target for din[i]. A temporary where the kernel cannot add, where input i stands twice,
   or where two inputs get the same gradient. */
static ft_status ft__grads_plan(ft__node *node, int i, ft_op_call *call, ft__grads *g)
{
    ft_tensor *t = node->in[i];
    const ft_op *row = node->row;
    int same = (row->flags & FT_OP_GRAD_SAME_01) && i == 0;
    int twice = 0;
    for (int j = 0; j < i; j++) twice |= node->in[j] == t && g->target[j] != NULL;
    ft_storage *over = i == 0 ? ft__grad_over(node) : NULL;
    int value = ft__is_value(t);
    if (same || (over && value && !t->grad)) {
        if (over) FT_TRY(ft__grad_alias(t, over, &g->target[i]));
        else FT_TRY(ft__grad_new(t, FT_TAG_ACT, &g->target[i]));
        if (same) g->temporary[i] = 1;
        else t->grad = g->target[i];
    } else if (twice || (!(row->accumulates & FT_IN(i)) && (t->sink.get || t->grad))) {
        FT_TRY(ft__grad_new(t, FT_TAG_ACT, &g->target[i]));
        g->temporary[i] = 1;
    } else {
        FT_TRY(ft__grad_target(t, &g->target[i], &call->accumulate[i]));
    }
    call->din[i] = ft__view(g->target[i]);
    return FT_OK;
}

static ft_status ft__grads_finish(ft__node *node, unsigned want, ft__grads *g)
{
    int same = (node->row->flags & FT_OP_GRAD_SAME_01) != 0;
    for (int i = 0; i < node->row->n_in; i++) {
        if (!g->temporary[i]) continue;
        if (want & FT_IN(i)) FT_TRY(ft__grad_give(node->in[i], g->target[i]));
        if (same && i == 0 && (want & FT_IN(1)))
            FT_TRY(ft__grad_give(node->in[1], g->target[i]));
        ft__tensor_destroy(g->target[i]);
    }
    return FT_OK;
}

static ft_status ft__backward_kernel(ft_ctx *ctx, ft__node *node, unsigned given)
{
    const ft_op *row = node->row;
    ft_op_call call;
    ft__grads g;
    ft_tensor *dout[FT_OP_MAX_OUT];
    memset(&call, 0, sizeof call);
    memset(&g, 0, sizeof g);
    call.op = row;
    call.attr = node->attr;
    call.backward = 1;
    call.deferred = node->deferred;
    /* Shapes of all, data of those that are there: a kernel reads only what its row says. */
    for (int i = 0; i < row->n_in; i++) call.in[i] = ft__view(node->in[i]);
    for (int i = 0; i < row->n_out; i++) {
        ft_tensor *o = node->out[i];
        if (o && node->deferred) FT_TRY(ft_tensor_attach(o, FT_TAG_ACT, ft__compute(ctx)));
        call.out[i] = ft__view(o);
        dout[i] = o ? o->grad : NULL;
        call.dout[i] = ft__view(dout[i]);
    }
    unsigned want = given;
    if ((row->flags & FT_OP_GRAD_SAME_01) && (want & 3u)) want = (want & ~2u) | 1u;
    for (int i = 0; i < row->n_in; i++)
        if (want & FT_IN(i)) FT_TRY(ft__grads_plan(node, i, &call, &g));
    double flops = 0;
    ft__cost_add(&call, &flops, NULL);
    if (!node->later || given != node->later) ctx->flops.backward += 2 * flops;
    if (node->deferred) ctx->flops.forward += flops; /* this call is its forward too */
    ft_status status;
    if (row->backward_host) {
        ctx->composite++;
        status = row->backward_host(ctx, &call, node->in, node->out, dout, g.target);
        ctx->composite--;
    } else status = ft__exec(ctx, ft__compute(ctx), &call, FT__BACKWARD);
    FT_TRY(status);
    node->deferred = 0;
    return ft__grads_finish(node, given, &g);
}

static ft_status ft__backward_node(ft_ctx *ctx, ft__node *node, unsigned want)
{
    ft_tensor *first = node->out[0];
    FT_TRY(ft__node_read_all(node, node->saved));
    if (!(node->row->flags & FT_OP_GRAD_PASS)) return ft__backward_kernel(ctx, node, want);
    for (int i = 0; i < node->row->n_in; i++)
        if (want & FT_IN(i)) FT_TRY(ft__grad_give(node->in[i], first->grad));
    return FT_OK;
}

/* [T5] The node is done: its outputs' gradients, its needs and its pins end. */
static void ft__node_done(ft__node *node)
{
    unsigned saved = node->saved, pinned = node->pinned;
    for (int i = 0; i < node->row->n_out; i++) {
        ft_tensor *o = node->out[i];
        if (!o || !o->grad) continue;
        ft__tensor_destroy(o->grad);
        o->grad = NULL;
    }
    node->saved = node->pinned = node->want = node->later = 0;
    ft__node_need(node, saved, -1);
    ft__node_need(node, pinned, -1);
    ft__node_forget(node);
}

/* What the kernels of those gradients read, of all that the node saved. */
static unsigned ft__node_saved_for(const ft__node *node, unsigned grads)
{
    unsigned reads = 0;
    for (int i = 0; i < node->row->n_in; i++)
        if (grads & FT_IN(i)) reads |= node->row->saves[i];
    return reads & node->saved;
}

/* [T6] The first half leaves a node for later with what the second half reads: the gradients of its
   outputs, and of what it saved the inputs of those kernels. Everything else ends now. */
static void ft__node_half_done(ft__node *node)
{
    unsigned saved = node->saved, pinned = node->pinned;
    unsigned want = node->later, keep = ft__node_saved_for(node, want);
    if (node->want == want) node->later = 0; /* all of it is left, and counts in the second half */
    node->saved = keep;
    node->pinned = 0;
    node->want = want;
    ft__node_need(node, saved & ~keep, -1);
    ft__node_need(node, pinned, -1);
}

/* The gradients that the first half leaves out: of leaves, where the op says that it pays. */
static unsigned ft__node_later(const ft__node *node)
{
    unsigned later = 0;
    if (!(node->row->flags & FT_OP_SPLIT) || node->deferred) return 0;
    for (int i = 0; i < node->row->n_in; i++)
        if ((node->want & FT_IN(i)) && !ft__is_value(node->in[i])) later |= FT_IN(i);
    return later;
}

static ft_status ft__backward_visit(ft_ctx *ctx, ft__node *node, ft_phase phase)
{
    int wanted = 0;
    for (int i = 0; i < node->row->n_out; i++)
        wanted |= node->out[i] && node->out[i]->grad;
    if (phase == FT_PHASE_INPUTS && wanted) node->later = ft__node_later(node);
    unsigned want = phase == FT_PHASE_INPUTS ? node->want & ~node->later : node->want;
    if (wanted && want) FT_TRY(ft__backward_node(ctx, node, want));
    else if (node->later && phase == FT_PHASE_INPUTS) /* nothing is rebuilt in the second half */
        FT_TRY(ft__node_read_all(node, ft__node_saved_for(node, node->later)));
    if (phase == FT_PHASE_INPUTS && node->later) ft__node_half_done(node);
    else ft__node_done(node);
    return FT_OK;
}

static ft_status ft__backward_walk(ft_tape *tape, ft_phase phase)
{
    ft_ctx *ctx = tape->ctx;
    int segment = -1;
    for (int n = tape->n - 1; n >= 0; n--) {
        ft__node *node = &tape->nodes[n];
        ctx->where_segment = node->segment;
        ctx->where_segment_name = node->segment >= 0 ? tape->segments[node->segment].name : NULL;
        if (ctx->probe && node->segment != segment)
            ft__probe_backward(ctx, tape, segment, node->segment, phase);
        segment = node->segment;
        if (!node->row) {
            ft_mark_fn mark = node->mark;
            (void)ft__where_set(ctx, "backward", "a region's end");
            if (phase != FT_PHASE_INPUTS) node->mark = NULL; /* its last call */
            FT_TRY(mark(ctx, node->user, phase));
            continue;
        }
        (void)ft__where_set(ctx, "backward", node->row->name);
        FT_TRY(ft__backward_visit(ctx, node, phase));
    }
    if (ctx->probe && segment >= 0) ft__probe_backward(ctx, tape, segment, -1, phase);
    return FT_OK;
}

/* The gradient that backward starts from: ones, or the caller's, which is consumed. */
static ft_status ft__backward_seed(ft_tape *tape, ft_tensor *root, ft_tensor *droot)
{
    char text[224];
    if (tape->ctx->tape == tape)
        return ft_error(FT_ERR_STATE, "the tape is still recording: call ft_tape_end");
    if (tape->root)
        return ft_error(FT_ERR_STATE, "the tape waits for ft_backward_weights");
    if (root->tape != tape || (!root->held && !droot))
        return ft_error(FT_ERR_STATE, "the root %s is not a live tensor of this tape",
                        ft__tensor_label(root, text, sizeof text));
    if (!root->requires_grad)
        return ft_error(FT_ERR_STATE, "the root %s depends on nothing that requires a gradient",
                        ft__tensor_label(root, text, sizeof text));
    if (!droot) {
        if (ft_numel(root) != 1)
            return ft_error(FT_ERR_SHAPE, "the root %s is not a scalar: pass its gradient",
                            ft__tensor_label(root, text, sizeof text));
        FT_TRY(ft__grad_new(root, FT_TAG_ACT, &root->grad));
        return ft_fill(root->grad, 1.0, ft__compute(tape->ctx));
    }
    if (ft_numel(droot) != ft_numel(root) || droot->dtype != root->dtype || droot->tape ||
        droot->uses || droot->base || !droot->storage)
        return ft_error(FT_ERR_SHAPE, "the gradient given is not of the root's kind, %s, or is no "
                        "tensor of one's own", ft__tensor_label(root, text, sizeof text));
    root->grad = droot;
    return FT_OK;
}

static ft_status ft__backward_run(ft_tape *tape, ft_phase phase)
{
    ft_ctx *ctx = tape->ctx;
    ft__where old = ft__where_set(ctx, "backward", "");
    tape->in_backward = 1;
    ft_status status = ft__backward_walk(tape, phase);
    tape->in_backward = 0;
    ft__where_restore(ctx, old);
    return status;
}

/* The answer stays: a tensor of the caller's, once the tape has forgotten who read it. */
static ft_status ft__backward_end(ft_tape *tape, ft_tensor *root)
{
    if (!root->storage || !root->held) return ft_tape_reset(tape);
    tape->nodes[root->producer].out[root->out_index] = NULL;
    FT_TRY(ft_tape_reset(tape));
    root->tape = NULL;
    root->producer = -1;
    root->requires_grad = 0;
    root->need = 0;
    return FT_OK;
}

FT_API ft_status ft_backward(ft_tape *tape, ft_tensor *root, ft_tensor *droot)
{
    FT_TRY(ft__backward_seed(tape, root, droot));
    FT_TRY(ft__backward_run(tape, FT_PHASE_WHOLE));
    return ft__backward_end(tape, root);
}

FT_API ft_status ft_backward_inputs(ft_tape *tape, ft_tensor *root, ft_tensor *droot)
{
    FT_TRY(ft__backward_seed(tape, root, droot));
    FT_TRY(ft__backward_run(tape, FT_PHASE_INPUTS));
    tape->root = root;
    return FT_OK;
}

FT_API ft_status ft_backward_weights(ft_tape *tape)
{
    ft_tensor *root = tape->root;
    if (!root)
        return ft_error(FT_ERR_STATE,
                        "ft_backward_weights: call ft_backward_inputs on the tape first");
    FT_TRY(ft__backward_run(tape, FT_PHASE_WEIGHTS));
    tape->root = NULL;
    return ft__backward_end(tape, root);
}

/* ---------------------------------------------------------------------------------- >>sac.impl

   ft_sac_fit contains no memory formula. It measures: meta runs of the caller's own step, with
   trial masks, tell for every segment what a mask keeps, replays, and needs for a moment. The
   measurements make a small exact optimisation, whose answer is run once more; if that run is over
   the budget after all, the target shrinks by the excess.

   [B1] A rank's step is a row of moments: a stretch in the forward of a segment, in its backward,
        or outside. At a moment n[s] micro-batches have left the forward of segment s and not yet
        its backward. A mask that saves v[s] bytes of what s keeps takes the sum of n[s] v[s] off
        the live bytes of the run without recomputation; inside of s, forward and backward of s
        itself need what was measured on top of their start.
   [B2] Segments that lie on a tape one after another are a chunk. Of a chunk j micro-batches are
        whole, and at most one more has its first p segments: n[s] = j + (s < p). So a moment's
        bytes are a constant, less the sum over chunks of j times all that the chunk saves, less
        what its first p segments save.
   [B3] Given all that each chunk saves, its segments one after another make a dynamic program over
        (saved so far, flops): of two ways that save alike only the cheaper stays.
   [B4] What each chunk saves is guessed between bounds. With the upper bound in all moments the
        program's answer is no dearer than any between the bounds, with the lower one it fits in any
        case. If the former does not fit, the bounds are halved. With one micro-batch at a time all
        j are 0, and the first answer is the best. */

typedef struct ft__probe ft__probe;
typedef struct ft__probe_rank ft__probe_rank;

typedef struct ft__probe_segment {
    int used;                     /* this rank runs it */
    int chunk, order;             /* the first segment of its tape, its place on it */
    int outputs;                  /* droppable tensors: bits of a mask */
    int forwards, backwards;      /* so far */
    int alive;                    /* n[s] */
    uint64_t shape_hash;          /* segments with equal hashes are alike */
    size_t kept_bytes;            /* of tensors made in it, at its end */
    double replay_flops;
} ft__probe_segment;

typedef struct ft__moment { /* [B1] */
    int segment, backward;        /* segment -1: outside */
    int occurrence;               /* how many forwards (backwards) of the segment came before */
    size_t start, peak;           /* live bytes of the rank */
} ft__moment;

struct ft__probe_rank {
    int n;
    ft__probe_segment *segment;   /* [n] */
    int record;                   /* 1: moments, 2: with n[s] */
    ft__moment *moment;
    int *alive;                   /* [moments, n] */
    int n_moments, cap_moments, cap_alive;
    ft_status status;
    size_t peak_bytes;
    double replay_flops;
};

struct ft__probe { int world, n; ft__probe_rank *rank; };

static void ft__probe_attach(ft_ctx *ctx) { ctx->probe = &ctx->config.probe->rank[ctx->rank]; }

static void ft__probe_finish(ft_ctx *ctx)
{
    ctx->probe->peak_bytes = ctx->memory->stats.peak_bytes;
    ctx->probe->replay_flops = ctx->flops.replay;
}

/* Another moment begins. */
static void ft__probe_move(ft_ctx *ctx, int segment, int backward, int occurrence)
{
    ft__probe_rank *p = ctx->probe;
    if (!p->record || p->status != FT_OK) return;
    p->status = ft__grow((void **)&p->moment, &p->cap_moments, p->n_moments, sizeof *p->moment);
    if (p->status == FT_OK && p->record > 1)
        p->status = ft__grow((void **)&p->alive, &p->cap_alive, p->n_moments,
                             (size_t)p->n * sizeof *p->alive);
    if (p->status != FT_OK) return;
    if (p->record > 1)
        for (int s = 0; s < p->n; s++)
            p->alive[(size_t)p->n_moments * (size_t)p->n + (size_t)s] = p->segment[s].alive;
    ft__moment *m = &p->moment[p->n_moments++];
    m->segment = segment;
    m->backward = backward;
    m->occurrence = occurrence;
    m->start = m->peak = ctx->memory->stats.live_bytes;
}

static void ft__probe_live(ft_ctx *ctx)
{
    ft__probe_rank *p = ctx->probe;
    size_t live = ctx->memory->stats.live_bytes;
    if (!p->n_moments) ft__probe_move(ctx, -1, 0, 0);
    if (p->n_moments && live > p->moment[p->n_moments - 1].peak)
        p->moment[p->n_moments - 1].peak = live;
}

/* Which of the budget's segments a tape's is; NULL: none. */
static ft__probe_segment *ft__probe_find(ft_ctx *ctx, const ft_tape *tape, int segment,
                                         int *number)
{
    *number = segment < 0 ? -1 : tape->segments[segment].number;
    if (*number >= ctx->probe->n) *number = -1;
    return *number < 0 ? NULL : &ctx->probe->segment[*number];
}

static void ft__probe_begin(ft_ctx *ctx, const ft_tape *tape)
{
    int number;
    ft__probe_segment *s = ft__probe_find(ctx, tape, tape->n_segments - 1, &number);
    if (!s) return;
    if (!s->used) {
        s->used = 1;
        s->chunk = tape->segments[0].number;
        s->order = tape->n_segments - 1;
    }
    ft__probe_move(ctx, number, 0, s->forwards++);
}

static uint64_t ft__hash_mix(uint64_t hash, uint64_t value)
{
    return (hash ^ value) * 1099511628211u;
}

/* Equal for nodes that keep, replay and cost the same: the op, its constants, the sizes of what it
   reads and makes, and which gradients it has (a frozen weight saves nothing). */
static uint64_t ft__probe_node(uint64_t hash, const ft__node *node)
{
    const ft_op *row = node->row;
    hash = ft__hash_mix(hash, (uint64_t)(uintptr_t)row);
    hash = ft__hash_mix(hash, node->want);
    for (int i = 0; i < 6; i++) hash = ft__hash_mix(hash, (uint64_t)node->attr.i[i]);
    for (int i = 0; i < row->n_in; i++)
        hash = ft__hash_mix(hash, node->in[i] ? (uint64_t)ft_bytes(node->in[i]) : 0);
    for (int i = 0; i < row->n_out; i++)
        hash = ft__hash_mix(hash, node->out[i] ? (uint64_t)ft_bytes(node->out[i]) : 0);
    return hash;
}

/* What the segment leaves behind. */
static void ft__probe_end(ft_ctx *ctx, const ft_tape *tape)
{
    int number, last = tape->n_segments - 1;
    ft__probe_segment *seg = ft__probe_find(ctx, tape, last, &number);
    uint64_t hash = 1469598103934665603u;
    size_t kept = 0;
    if (!seg) return;
    for (int n = 0; n < tape->n; n++) {
        const ft__node *node = &tape->nodes[n];
        if (!node->row || node->segment != last) continue;
        hash = ft__probe_node(hash, node);
        for (int i = 0; i < node->row->n_out; i++) {
            const ft_tensor *o = node->out[i];
            if (o && o->storage && (o->need > 0 || o->held)) kept += o->storage->accounted_bytes;
        }
    }
    seg->shape_hash = hash;
    seg->outputs = tape->segments[last].outputs;
    seg->kept_bytes = kept;
    seg->alive++;
    ft__probe_move(ctx, -1, 0, 0);
}

static void ft__probe_replay(ft_ctx *ctx, const ft_tape *tape, int segment, double flops)
{
    int number;
    ft__probe_segment *s = ft__probe_find(ctx, tape, segment, &number);
    if (s) s->replay_flops += flops;
}

/* Backward goes from one segment to another (-1: to what lies between). The second half of a split
   one reads nothing that a mask decides: it lies outside. */
static void ft__probe_backward(ft_ctx *ctx, const ft_tape *tape, int from, int to, ft_phase phase)
{
    int number;
    if (phase == FT_PHASE_WEIGHTS) return;
    ft__probe_segment *s = ft__probe_find(ctx, tape, from, &number);
    if (s) s->alive--;
    s = ft__probe_find(ctx, tape, to, &number);
    ft__probe_move(ctx, number, 1, s ? s->backwards++ : 0);
}

static ft_status ft__probe_create(int world, int n, ft__probe *probe)
{
    memset(probe, 0, sizeof *probe);
    size_t bytes = (size_t)world * (sizeof(ft__probe_rank) + (size_t)n * sizeof(ft__probe_segment));
    probe->rank = (ft__probe_rank *)FT_MALLOC(bytes);
    if (!probe->rank) return ft_error(FT_ERR_OOM, "no host memory to measure %d segments", n);
    memset(probe->rank, 0, bytes);
    probe->world = world;
    probe->n = n;
    ft__probe_segment *segments = (ft__probe_segment *)(void *)(probe->rank + world);
    for (int r = 0; r < world; r++) {
        probe->rank[r].n = n;
        probe->rank[r].segment = segments + (size_t)r * (size_t)n;
    }
    return FT_OK;
}

static void ft__probe_free(ft__probe *probe)
{
    for (int r = 0; r < probe->world; r++) {
        if (probe->rank[r].moment) FT_FREE(probe->rank[r].moment);
        if (probe->rank[r].alive) FT_FREE(probe->rank[r].alive);
    }
    if (probe->rank) FT_FREE(probe->rank);
}

/* One meta run with budget->sac as it stands; rank -1 runs all, else moments are recorded. */
static ft_status ft__probe_run(ft_sac_budget *budget, ft__probe *probe, int rank, int record)
{
    ft_config config = budget->config;
    config.device = FT_META;
    config.only_rank = rank;
    config.memory_limit = 0;
    config.timeline = 0;
    config.probe = probe;
    for (int r = 0; r < probe->world; r++) {
        ft__probe_rank *p = &probe->rank[r];
        memset(p->segment, 0, (size_t)p->n * sizeof *p->segment);
        p->n_moments = 0;
        p->record = r == rank ? record : 0;
        p->peak_bytes = 0;
        p->replay_flops = 0;
    }
    budget->runs++;
    FT_TRY(ft_launch(&config, budget->step, budget->user));
    budget->peak_bytes = 0;
    budget->recompute_flops = 0;
    for (int r = 0; r < probe->world; r++) {
        const ft__probe_rank *p = &probe->rank[r];
        if (p->status != FT_OK) return ft_error(p->status, "no host memory for a step's moments");
        if (p->peak_bytes > budget->peak_bytes) budget->peak_bytes = p->peak_bytes;
        if (p->replay_flops > budget->recompute_flops) budget->recompute_flops = p->replay_flops;
    }
    return FT_OK;
}

/* ---- what masks do ---- */

enum { FT__SAC_BITS = 12, FT__SAC_LABELS = 8192, FT__SAC_PASSES = 512 };
#define FT__SAC_NEVER (INT64_MIN / 4) /* bytes of a moment that does not exist */

typedef struct ft__choice { /* a mask, measured in one segment */
    uint64_t mask;
    int64_t saved;
    double flops;
} ft__choice;

typedef struct ft__class { /* segments that are alike share their choices */
    uint64_t hash;
    int n, cap, cap_extra;
    int times;                /* micro-batches */
    ft__choice *choice;       /* [n] */
    int64_t *extra;           /* [n, 2, times] of the peak over the start, forward and backward */
} ft__class;

typedef struct ft__limit { /* a moment, as [B2] has it */
    int segment, backward, occurrence; /* segment: of the stage's list, -1 outside */
    int chunk, prefix;                 /* chunk -1: none has a prefix */
    int64_t bytes;                     /* start of a segment's, peak of others, without savings */
    int *whole;                        /* [chunks] j */
} ft__limit;

typedef struct ft__stage { /* ranks with the same segments */
    int rank;                 /* the fullest */
    int n, chunks;
    int *number;              /* [n] of the budget's segments: chunk after chunk */
    int *first;               /* [chunks + 1] in number */
    int *class_of;            /* [n] */
    ft__class *classes;       /* [n] */
    int n_classes;
    ft__limit *limits;
    int n_limits;
    int *wholes;              /* [n_limits, chunks]: the limits' */
    size_t peak_bytes;        /* without recomputation */
} ft__stage;

static void *ft__sac_alloc(size_t n, size_t item)
{
    void *memory = FT_MALLOC((n ? n : 1) * item);
    if (memory) memset(memory, 0, (n ? n : 1) * item);
    else (void)ft_error(FT_ERR_OOM, "no host memory to search recomputation policies");
    return memory;
}

static int64_t *ft__class_extra(const ft__class *c, int choice)
{
    return c->extra + (size_t)choice * 2 * (size_t)c->times;
}

static int ft__choice_worse(const ft__class *c, const ft__choice *a, const int64_t *extra,
                            const ft__choice *b, const int64_t *extra_b)
{
    if (b->saved < a->saved || b->flops > a->flops) return 0;
    for (int i = 0; i < 2 * c->times; i++)
        if (extra_b[i] > extra[i]) return 0;
    return 1;
}

/* Keeps only choices that no other one beats in every respect. */
static ft_status ft__class_add(ft__class *c, const ft__choice *choice, const int64_t *extra)
{
    size_t row = 2 * (size_t)c->times * sizeof *extra;
    int n = 0;
    for (int i = 0; i < c->n; i++)
        if (ft__choice_worse(c, choice, extra, &c->choice[i], ft__class_extra(c, i))) return FT_OK;
    for (int i = 0; i < c->n; i++) {
        if (ft__choice_worse(c, &c->choice[i], ft__class_extra(c, i), choice, extra)) continue;
        if (n < i) {
            c->choice[n] = c->choice[i];
            memcpy(ft__class_extra(c, n), ft__class_extra(c, i), row);
        }
        n++;
    }
    c->n = n;
    FT_TRY(ft__grow((void **)&c->choice, &c->cap, n, sizeof *c->choice));
    FT_TRY(ft__grow((void **)&c->extra, &c->cap_extra, n, row));
    c->choice[n] = *choice;
    memcpy(ft__class_extra(c, n), extra, row);
    c->n = n + 1;
    return FT_OK;
}

/* What the run just made says of a segment under its mask. `extra` may be NULL. */
static ft__choice ft__choice_measured(const ft__probe_rank *p, int number, uint64_t mask,
                                      size_t kept, int times, int64_t *extra)
{
    ft__choice c;
    c.mask = mask;
    c.saved = (int64_t)kept - (int64_t)p->segment[number].kept_bytes;
    c.flops = p->segment[number].replay_flops;
    if (extra) memset(extra, 0, 2 * (size_t)times * sizeof *extra);
    for (int i = 0; i < p->n_moments && extra; i++) {
        const ft__moment *m = &p->moment[i];
        if (m->segment != number || m->occurrence >= times) continue;
        extra[m->backward * times + m->occurrence] = (int64_t)(m->peak - m->start);
    }
    return c;
}

/* The bits that matter: dropping that one tensor alone, or all but it, changes what is kept or
   replayed. Of more than FT__SAC_BITS those that free most. *all: the mask that drops every one. */
static ft_status ft__droppable(ft_sac_budget *budget, ft__probe *probe, int rank, int number,
                               const ft__probe_segment *reference, uint64_t *bits, uint64_t *all)
{
    size_t freed[64];
    uint64_t every = reference->outputs >= 64 ? ~(uint64_t)0 :
                     ((uint64_t)1 << reference->outputs) - 1;
    const ft__probe_segment *s = &probe->rank[rank].segment[number];
    ft_sac *sac = &budget->sac[number];
    int n = 0;
    *bits = 0;
    memset(freed, 0, sizeof freed);
    sac->mask = every;
    FT_TRY(ft__probe_run(budget, probe, rank, 0));
    ft__probe_segment dropped = *s;
    for (int b = 0; b < reference->outputs && b < 64; b++) {
        uint64_t bit = (uint64_t)1 << b;
        sac->mask = bit;
        FT_TRY(ft__probe_run(budget, probe, rank, 0));
        int matters = s->kept_bytes != reference->kept_bytes ||
                      s->replay_flops > reference->replay_flops;
        if (s->kept_bytes < reference->kept_bytes) freed[b] = reference->kept_bytes - s->kept_bytes;
        sac->mask = every & ~bit; /* it may matter only where others are dropped */
        FT_TRY(ft__probe_run(budget, probe, rank, 0));
        if (matters || s->kept_bytes != dropped.kept_bytes ||
            s->replay_flops < dropped.replay_flops || s->replay_flops > dropped.replay_flops) {
            *bits |= bit;
            n++;
        }
    }
    sac->mask = 0;
    *all = *bits;
    for (; n > FT__SAC_BITS; n--) {
        int least = -1;
        for (int b = 0; b < 64; b++)
            if ((*bits >> b & 1u) && (least < 0 || freed[b] < freed[least])) least = b;
        *bits &= ~((uint64_t)1 << least);
        budget->optimal = 0;
    }
    return FT_OK;
}

/* The k-th subset of `bits`. */
static uint64_t ft__subset(uint64_t bits, uint64_t k)
{
    uint64_t mask = 0;
    for (int b = 0; b < 64; b++) {
        if (!(bits >> b & 1u)) continue;
        if (k & 1u) mask |= (uint64_t)1 << b;
        k >>= 1;
    }
    return mask;
}

/* Measures the subsets of the droppable tensors of one class: every segment of the class tries
   another one in the same run. The last one is `all`. */
static ft_status ft__class_measure(ft_sac_budget *budget, ft__probe *probe, const ft__stage *st,
                                   int which, uint64_t bits, uint64_t all, size_t kept)
{
    ft__class *c = &st->classes[which];
    ft_status status = FT_OK;
    uint64_t total = 2;
    for (uint64_t b = bits; b; b &= b - 1) total *= 2;
    total = total / 2 + (all != bits);
    int64_t *extra = (int64_t *)ft__sac_alloc(2 * (size_t)c->times, sizeof *extra);
    if (!extra) return FT_ERR_OOM;
    for (uint64_t k = 0; k < total && status == FT_OK;) {
        uint64_t first = k;
        for (int i = 0; i < st->n; i++) {
            if (st->class_of[i] != which) continue;
            budget->sac[st->number[i]].mask = k >= total ? 0
                : all != bits && k == total - 1 ? all : ft__subset(bits, k);
            k++;
        }
        status = ft__probe_run(budget, probe, st->rank, 1);
        for (int i = 0; i < st->n && first < total && status == FT_OK; i++) {
            if (st->class_of[i] != which) continue;
            int number = st->number[i];
            ft__choice choice = ft__choice_measured(&probe->rank[st->rank], number,
                                                    budget->sac[number].mask, kept, c->times,
                                                    extra);
            if (choice.saved >= 0) status = ft__class_add(c, &choice, extra);
            first++;
        }
    }
    for (int i = 0; i < st->n; i++) budget->sac[st->number[i]].mask = 0;
    FT_FREE(extra);
    return status;
}

/* ---- stages ---- */

/* [B2] How many micro-batches of a chunk are whole, if its first p segments have one more; counts
   that are not of this form are taken as fewer, which is safe: less is saved then. */
static int ft__stage_whole(const ft__stage *st, const int *alive, int chunk, int p)
{
    int whole = -1;
    for (int i = st->first[chunk]; i < st->first[chunk + 1]; i++) {
        int n = alive[st->number[i]] - (i - st->first[chunk] < p);
        if (whole < 0 || n < whole) whole = n;
    }
    return whole < 0 ? 0 : whole;
}

static int ft__stage_chunk_of(const ft__stage *st, int i)
{
    int c = 0;
    while (i >= st->first[c + 1]) c++;
    return c;
}

/* The longest prefix of a chunk that has one more than the rest; all of it, where all are alike. */
static int ft__stage_prefix(const ft__stage *st, const int *alive, int chunk)
{
    int first = st->first[chunk], n = st->first[chunk + 1] - first, p = 0;
    int least = ft__stage_whole(st, alive, chunk, 0);
    while (p < n && alive[st->number[first + p]] > least) p++;
    return p == 0 && least > 0 ? n : p;
}

static ft_status ft__stage_limits(ft__stage *st, const ft__probe_rank *p)
{
    size_t n = (size_t)p->n_moments, chunks = (size_t)st->chunks;
    st->limits = (ft__limit *)ft__sac_alloc(n, sizeof *st->limits);
    st->wholes = (int *)ft__sac_alloc(n * chunks, sizeof *st->wholes);
    if (!st->limits || !st->wholes) return FT_ERR_OOM;
    st->n_limits = p->n_moments;
    for (int k = 0; k < p->n_moments; k++) {
        const ft__moment *m = &p->moment[k];
        const int *alive = p->alive + (size_t)k * (size_t)p->n;
        ft__limit *l = &st->limits[k];
        l->segment = l->chunk = -1;
        l->backward = m->backward;
        l->occurrence = m->occurrence;
        l->whole = st->wholes + (size_t)k * chunks;
        for (int i = 0; i < st->n && m->segment >= 0; i++)
            if (st->number[i] == m->segment) l->segment = i;
        l->bytes = (int64_t)(l->segment >= 0 ? m->start : m->peak);
        if (l->segment >= 0) {
            l->chunk = ft__stage_chunk_of(st, l->segment);
            l->prefix = l->segment - st->first[l->chunk] + m->backward;
        }
        for (int c = 0; c < st->chunks && l->segment < 0 && l->chunk < 0; c++) {
            l->prefix = ft__stage_prefix(st, alive, c);
            if (l->prefix) l->chunk = c;
        }
        for (int c = 0; c < st->chunks; c++)
            l->whole[c] = ft__stage_whole(st, alive, c, c == l->chunk ? l->prefix : 0);
    }
    return FT_OK;
}

/* The stage's segments, sorted by chunk and order. */
static ft_status ft__stage_segments(ft__stage *st, const ft__probe_rank *p)
{
    st->number = (int *)ft__sac_alloc((size_t)p->n, sizeof *st->number);
    st->class_of = (int *)ft__sac_alloc((size_t)p->n, sizeof *st->class_of);
    st->first = (int *)ft__sac_alloc((size_t)p->n + 1, sizeof *st->first);
    st->classes = (ft__class *)ft__sac_alloc((size_t)p->n, sizeof *st->classes);
    if (!st->number || !st->class_of || !st->first || !st->classes) return FT_ERR_OOM;
    for (int s = 0; s < p->n; s++) {
        const ft__probe_segment *seg = &p->segment[s];
        if (!seg->used) continue;
        int at = st->n++;
        for (; at > 0; at--) {
            const ft__probe_segment *b = &p->segment[st->number[at - 1]];
            if (b->chunk < seg->chunk || (b->chunk == seg->chunk && b->order <= seg->order)) break;
            st->number[at] = st->number[at - 1];
        }
        st->number[at] = s;
    }
    for (int i = 0; i < st->n; i++)
        if (!i || p->segment[st->number[i]].chunk != p->segment[st->number[i - 1]].chunk)
            st->first[st->chunks++] = i;
    st->first[st->chunks] = st->n;
    return FT_OK;
}

static ft_status ft__stage_measure(ft_sac_budget *budget, ft__probe *probe, ft__stage *st)
{
    ft__probe_rank *p = &probe->rank[st->rank];
    for (int s = 0; s < budget->segments; s++) {
        budget->sac[s].kind = FT_SAC_MASK;
        budget->sac[s].mask = 0;
    }
    FT_TRY(ft__probe_run(budget, probe, st->rank, 2));
    st->peak_bytes = p->peak_bytes;
    FT_TRY(ft__stage_segments(st, p));
    FT_TRY(ft__stage_limits(st, p));
    ft__probe_segment *reference = (ft__probe_segment *)ft__sac_alloc((size_t)p->n,
                                                                      sizeof *reference);
    if (!reference) return FT_ERR_OOM;
    memcpy(reference, p->segment, (size_t)p->n * sizeof *reference);
    ft_status status = FT_OK;
    for (int i = 0; i < st->n && status == FT_OK; i++) {
        const ft__probe_segment *seg = &reference[st->number[i]];
        int c = 0;
        while (c < st->n_classes && st->classes[c].hash != seg->shape_hash) c++;
        st->class_of[i] = c;
        if (c == st->n_classes) st->n_classes++;
        st->classes[c].hash = seg->shape_hash;
        if (seg->forwards > st->classes[c].times) st->classes[c].times = seg->forwards;
    }
    for (int c = 0; c < st->n_classes && status == FT_OK; c++) {
        uint64_t bits = 0, all = 0;
        int first = 0;
        while (st->class_of[first] != c) first++;
        const ft__probe_segment *seg = &reference[st->number[first]];
        status = ft__droppable(budget, probe, st->rank, st->number[first], seg, &bits, &all);
        if (status == FT_OK)
            status = ft__class_measure(budget, probe, st, c, bits, all, seg->kept_bytes);
    }
    FT_FREE(reference);
    return status;
}

static void ft__stage_free(ft__stage *st)
{
    for (int c = 0; c < st->n_classes; c++) {
        if (st->classes[c].choice) FT_FREE(st->classes[c].choice);
        if (st->classes[c].extra) FT_FREE(st->classes[c].extra);
    }
    if (st->number) FT_FREE(st->number);
    if (st->class_of) FT_FREE(st->class_of);
    if (st->first) FT_FREE(st->first);
    if (st->classes) FT_FREE(st->classes);
    if (st->limits) FT_FREE(st->limits);
    if (st->wholes) FT_FREE(st->wholes);
}

/* ---- the search ---- */

typedef struct ft__label { int64_t saved; double flops; int before, choice; } ft__label;

typedef struct ft__solver {
    const ft__stage *st;
    int64_t target;
    int64_t *fixed;           /* [2, most choices] need of a choice, forward and backward */
    int64_t *outside;         /* [n + 1] outside, by how many segments of the list save */
    int64_t none;             /* outside, where no prefix saves */
    ft__label **labels;       /* [n + 1] */
    int *n_labels;
    ft__label *work[2], *add; /* two of twice a level's size, one of one */
    int *pick, *best;         /* [n] choices */
    int64_t *saved;           /* [chunks] of pick */
    double flops, best_flops; /* best_flops < 0: none yet */
    int any;                  /* 1: whatever fits will do */
    int passes, cut_short;
} ft__solver;

static const ft__class *ft__solver_class(const ft__solver *v, int i)
{
    return &v->st->classes[v->st->class_of[i]];
}

static int64_t ft__limit_bytes(const ft__solver *v, const ft__limit *l, const int64_t *guess)
{
    int64_t bytes = l->bytes;
    for (int c = 0; c < v->st->chunks; c++) bytes -= l->whole[c] * guess[c];
    return bytes;
}

/* What moments outside of segments need, under a guess. */
static void ft__solver_outside(ft__solver *v, const int64_t *guess)
{
    const ft__stage *st = v->st;
    v->none = FT__SAC_NEVER;
    for (int i = 0; i <= st->n; i++) v->outside[i] = FT__SAC_NEVER;
    for (int k = 0; k < st->n_limits; k++) {
        const ft__limit *l = &st->limits[k];
        if (l->segment >= 0) continue;
        int64_t bytes = ft__limit_bytes(v, l, guess);
        int64_t *slot = l->chunk < 0 ? &v->none : &v->outside[st->first[l->chunk] + l->prefix - 1];
        if (bytes > *slot) *slot = bytes;
    }
}

/* What each choice of a segment needs in its own moments, before what the prefix saves. */
static void ft__solver_fixed(ft__solver *v, int i, const int64_t *guess)
{
    const ft__class *c = ft__solver_class(v, i);
    for (int k = 0; k < 2 * c->n; k++) v->fixed[k] = FT__SAC_NEVER;
    for (int m = 0; m < v->st->n_limits; m++) {
        const ft__limit *l = &v->st->limits[m];
        if (l->segment != i) continue;
        int64_t bytes = ft__limit_bytes(v, l, guess);
        for (int k = 0; k < c->n; k++) {
            int64_t need = bytes + ft__class_extra(c, k)[l->backward * c->times + l->occurrence];
            if (need > v->fixed[2 * k + l->backward]) v->fixed[2 * k + l->backward] = need;
        }
    }
}

/* Two lists, each with saved ascending and flops too, into one such list. */
static int ft__labels_merge(const ft__label *a, int n, const ft__label *b, int m, ft__label *out)
{
    int at = n + m, end = n + m;
    double least = 0;
    while (n || m) { /* the most saved first: one that saves less must cost less */
        const ft__label *l;
        if (!m || (n && (a[n - 1].saved > b[m - 1].saved ||
                         (a[n - 1].saved == b[m - 1].saved && a[n - 1].flops <= b[m - 1].flops))))
            l = &a[--n];
        else l = &b[--m];
        if (at < end && l->flops >= least) continue;
        least = l->flops;
        out[--at] = *l;
    }
    memmove(out, out + at, (size_t)(end - at) * sizeof *out);
    return end - at;
}

/* Every second label goes; the one that saves most stays. */
static int ft__labels_thin(ft__solver *v, ft__label *labels, int n)
{
    int m = 0;
    for (int l = (n - 1) & 1; l < n; l += 2) labels[m++] = labels[l];
    v->cut_short = 1;
    return m;
}

/* [B3] One segment more: the labels of `from`, each with each choice that fits. */
static ft_status ft__solver_level(ft__solver *v, int i, const ft__label *from, int n)
{
    const ft__class *c = ft__solver_class(v, i);
    int count = 0, now = 0;
    for (int k = 0; k < c->n; k++) {
        int added = 0;
        for (int l = 0; l < n; l++) {
            int64_t saved = from[l].saved + c->choice[k].saved;
            if (v->fixed[2 * k] - from[l].saved > v->target) continue;
            if (v->fixed[2 * k + 1] - saved > v->target) continue;
            if (v->outside[i] - saved > v->target) continue;
            v->add[added].saved = saved;
            v->add[added].flops = from[l].flops + c->choice[k].flops;
            v->add[added].before = l;
            v->add[added++].choice = k;
        }
        count = ft__labels_merge(v->work[now], count, v->add, added, v->work[!now]);
        now = !now;
        while (count > FT__SAC_LABELS) count = ft__labels_thin(v, v->work[now], count);
    }
    if (v->labels[i + 1]) FT_FREE(v->labels[i + 1]);
    v->labels[i + 1] = (ft__label *)ft__sac_alloc((size_t)count, sizeof **v->labels);
    if (!v->labels[i + 1]) return FT_ERR_OOM;
    memcpy(v->labels[i + 1], v->work[now], (size_t)count * sizeof **v->labels);
    v->n_labels[i + 1] = count;
    return FT_OK;
}

/* The cheapest choices of a chunk that save at least `least`, in v->pick; *found = 0: none. */
static ft_status ft__solver_chunk(ft__solver *v, int chunk, const int64_t *guess, int64_t least,
                                  int *found)
{
    const ft__stage *st = v->st;
    ft__label start;
    int first = st->first[chunk], end = st->first[chunk + 1], at = 0;
    memset(&start, 0, sizeof start);
    *found = 0;
    for (int i = first; i < end; i++) {
        const ft__label *from = i > first ? v->labels[i] : &start;
        ft__solver_fixed(v, i, guess);
        FT_TRY(ft__solver_level(v, i, from, i > first ? v->n_labels[i] : 1));
        if (!v->n_labels[i + 1]) return FT_OK;
    }
    while (at < v->n_labels[end] && v->labels[end][at].saved < least) at++;
    if (at == v->n_labels[end]) return FT_OK;
    v->saved[chunk] = v->labels[end][at].saved;
    v->flops += v->labels[end][at].flops;
    for (int i = end - 1; i >= first; i--) {
        v->pick[i] = v->labels[i + 1][at].choice;
        at = v->labels[i + 1][at].before;
    }
    *found = 1;
    return FT_OK;
}

/* All chunks, under a guess of what each saves. */
static ft_status ft__solver_pass(ft__solver *v, const int64_t *guess, const int64_t *least,
                                 int *found)
{
    v->passes++;
    v->flops = 0;
    ft__solver_outside(v, guess);
    *found = v->none <= v->target;
    for (int c = 0; c < v->st->chunks && *found; c++)
        FT_TRY(ft__solver_chunk(v, c, guess, least[c], found));
    return FT_OK;
}

/* Whether v->pick fits, with what it really saves. */
static int ft__solver_fits(const ft__solver *v)
{
    const ft__stage *st = v->st;
    for (int m = 0; m < st->n_limits; m++) {
        const ft__limit *l = &st->limits[m];
        int64_t bytes = ft__limit_bytes(v, l, v->saved);
        for (int p = 0; p < l->prefix && l->chunk >= 0; p++) {
            int i = st->first[l->chunk] + p;
            bytes -= ft__solver_class(v, i)->choice[v->pick[i]].saved;
        }
        if (l->segment >= 0) {
            const ft__class *c = ft__solver_class(v, l->segment);
            bytes += ft__class_extra(c, v->pick[l->segment])[l->backward * c->times +
                                                             l->occurrence];
        }
        if (bytes > v->target) return 0;
    }
    return 1;
}

static void ft__solver_keep(ft__solver *v)
{
    if (v->best_flops >= 0 && v->flops >= v->best_flops) return;
    v->best_flops = v->flops;
    memcpy(v->best, v->pick, (size_t)v->st->n * sizeof *v->best);
}

/* The chunk whose bounds are worth halving: widest, times how many of it are whole; -1: none. */
static int ft__solver_widest(const ft__solver *v, const int64_t *low, const int64_t *high)
{
    int widest = -1;
    int64_t most = 0;
    for (int c = 0; c < v->st->chunks; c++) {
        int whole = 0;
        for (int m = 0; m < v->st->n_limits; m++)
            if (v->st->limits[m].whole[c] > whole) whole = v->st->limits[m].whole[c];
        if ((high[c] - low[c]) * whole <= most) continue;
        most = (high[c] - low[c]) * whole;
        widest = c;
    }
    return widest;
}

/* [B4] The best that saves between low and high of each chunk; both are this call's to change. */
static ft_status ft__solver_box(ft__solver *v, int64_t *low, int64_t *high)
{
    int found, chunks = v->st->chunks;
    if (v->any && v->best_flops >= 0) return FT_OK;
    if (v->passes >= FT__SAC_PASSES) {
        v->cut_short = 1;
        return FT_OK;
    }
    FT_TRY(ft__solver_pass(v, high, low, &found));
    if (!found || (v->best_flops >= 0 && v->flops >= v->best_flops)) return FT_OK;
    if (ft__solver_fits(v)) {
        ft__solver_keep(v);
        return FT_OK;
    }
    int c = ft__solver_widest(v, low, high);
    if (c < 0) return FT_OK;
    FT_TRY(ft__solver_pass(v, low, low, &found));
    if (found && ft__solver_fits(v)) ft__solver_keep(v);
    int64_t *bounds = (int64_t *)ft__sac_alloc(2 * (size_t)chunks, sizeof *bounds);
    if (!bounds) return FT_ERR_OOM;
    int64_t middle = low[c] + (high[c] - low[c]) / (2 * FT_ALIGN_BYTES) * FT_ALIGN_BYTES;
    ft_status status = FT_OK;
    for (int half = 0; half < 2 && status == FT_OK; half++) { /* who saves more fits sooner */
        memcpy(bounds, low, (size_t)chunks * sizeof *low);
        memcpy(bounds + chunks, high, (size_t)chunks * sizeof *high);
        if (half) bounds[chunks + c] = middle;
        else bounds[c] = middle + FT_ALIGN_BYTES;
        status = ft__solver_box(v, bounds, bounds + chunks);
    }
    FT_FREE(bounds);
    return status;
}

/* The least flops under which every moment is within `target`: v->best, if best_flops >= 0. */
static ft_status ft__solver_solve(ft__solver *v, int64_t target, int any)
{
    const ft__stage *st = v->st;
    int64_t *bounds = (int64_t *)ft__sac_alloc(2 * (size_t)st->chunks, sizeof *bounds);
    if (!bounds) return FT_ERR_OOM;
    v->target = target;
    v->any = any;
    v->best_flops = -1;
    v->passes = v->cut_short = 0;
    for (int c = 0; c < st->chunks; c++)
        for (int i = st->first[c]; i < st->first[c + 1]; i++) {
            const ft__class *k = ft__solver_class(v, i);
            int64_t most = 0;
            for (int n = 0; n < k->n; n++)
                if (k->choice[n].saved > most) most = k->choice[n].saved;
            bounds[st->chunks + c] += most;
        }
    ft_status status = ft__solver_box(v, bounds, bounds + st->chunks);
    FT_FREE(bounds);
    return status;
}

static void ft__solver_free(ft__solver *v)
{
    for (int i = 0; v->labels && i <= v->st->n; i++)
        if (v->labels[i]) FT_FREE(v->labels[i]);
    if (v->labels) FT_FREE(v->labels);
    if (v->n_labels) FT_FREE(v->n_labels);
    if (v->work[0]) FT_FREE(v->work[0]);
    if (v->fixed) FT_FREE(v->fixed);
    if (v->outside) FT_FREE(v->outside);
    if (v->pick) FT_FREE(v->pick);
    if (v->saved) FT_FREE(v->saved);
}

static ft_status ft__solver_create(ft__solver *v, const ft__stage *st)
{
    size_t n = (size_t)st->n, most = 1;
    memset(v, 0, sizeof *v);
    v->st = st;
    for (int c = 0; c < st->n_classes; c++)
        if ((size_t)st->classes[c].n > most) most = (size_t)st->classes[c].n;
    v->fixed = (int64_t *)ft__sac_alloc(2 * most, sizeof *v->fixed);
    v->outside = (int64_t *)ft__sac_alloc(n + 1, sizeof *v->outside);
    v->labels = (ft__label **)ft__sac_alloc(n + 1, sizeof *v->labels);
    v->n_labels = (int *)ft__sac_alloc(n + 1, sizeof *v->n_labels);
    v->work[0] = (ft__label *)ft__sac_alloc(5 * FT__SAC_LABELS, sizeof *v->work[0]);
    v->pick = (int *)ft__sac_alloc(2 * n, sizeof *v->pick);
    v->saved = (int64_t *)ft__sac_alloc((size_t)st->chunks, sizeof *v->saved);
    if (!v->fixed || !v->outside || !v->labels || !v->n_labels || !v->work[0] || !v->pick ||
        !v->saved)
        return FT_ERR_OOM;
    v->work[1] = v->work[0] + 2 * FT__SAC_LABELS;
    v->add = v->work[0] + 4 * FT__SAC_LABELS;
    v->best = v->pick + n;
    return FT_OK;
}

/* ---- the fit ---- */

static void ft__stage_choose(ft_sac_budget *budget, const ft__solver *v)
{
    for (int i = 0; i < v->st->n; i++)
        budget->sac[v->st->number[i]].mask = ft__solver_class(v, i)->choice[v->best[i]].mask;
}

/* Solve, run the stage's rank, and shrink the target while the run is over the budget. */
static ft_status ft__stage_within(ft_sac_budget *budget, ft__probe *probe, ft__solver *v,
                                  int *found)
{
    size_t bytes = budget->budget_bytes, target = bytes;
    *found = 0;
    for (int turn = 0; turn < 32 && target < INT64_MAX; turn++) {
        FT_TRY(ft__solver_solve(v, (int64_t)target, 0));
        if (v->cut_short || turn) budget->optimal = 0;
        if (v->best_flops < 0) return FT_OK;
        ft__stage_choose(budget, v);
        FT_TRY(ft__probe_run(budget, probe, v->st->rank, 0));
        *found = budget->peak_bytes <= bytes;
        if (*found || budget->peak_bytes - bytes >= target) return FT_OK;
        target -= budget->peak_bytes - bytes;
    }
    return FT_OK;
}

/* Nothing was found: halves in on the smallest target with a solution, whose run names the
   least. */
static ft_status ft__stage_least(ft_sac_budget *budget, ft__solver *v)
{
    int64_t none = 0, some = (int64_t)v->st->peak_bytes;
    while (some - none > FT_ALIGN_BYTES) {
        int64_t middle = none + (some - none) / 2;
        FT_TRY(ft__solver_solve(v, middle, 1));
        if (v->best_flops >= 0) some = middle;
        else none = middle;
    }
    FT_TRY(ft__solver_solve(v, some, 0));
    if (v->best_flops >= 0) ft__stage_choose(budget, v);
    return FT_OK;
}

/* The policies of one stage: within the budget if any is, else those that need least. */
static ft_status ft__stage_fit(ft_sac_budget *budget, ft__probe *probe, int rank)
{
    ft__stage st;
    ft__solver v;
    memset(&st, 0, sizeof st);
    memset(&v, 0, sizeof v);
    st.rank = rank;
    int found = 0;
    ft_status status = ft__stage_measure(budget, probe, &st);
    if (status == FT_OK && st.n) { /* else nothing can go */
        status = ft__solver_create(&v, &st);
        if (status == FT_OK) status = ft__stage_within(budget, probe, &v, &found);
        if (status == FT_OK && !found) status = ft__stage_least(budget, &v);
        ft__solver_free(&v);
    }
    ft__stage_free(&st);
    return status;
}

static int ft__probe_same(const ft__probe *probe, int a, int b)
{
    for (int s = 0; s < probe->n; s++)
        if (probe->rank[a].segment[s].used != probe->rank[b].segment[s].used) return 0;
    return 1;
}

/* leader[r]: the fullest rank of r's stage, where that is over the budget; -1 elsewhere. */
static void ft__sac_leaders(const ft__probe *probe, size_t bytes, int *leader)
{
    for (int r = 0; r < probe->world; r++) {
        int other = 0;
        leader[r] = r;
        while (other < r && !(leader[other] >= 0 && ft__probe_same(probe, other, r))) other++;
        if (other == r) continue;
        if (probe->rank[r].peak_bytes > probe->rank[other].peak_bytes) leader[other] = -1;
        else leader[r] = -1;
    }
    for (int r = 0; r < probe->world; r++)
        if (probe->rank[r].peak_bytes <= bytes) leader[r] = -1;
}

static ft_status ft__sac_fit(ft_sac_budget *budget, ft__probe *probe, int *leader, ft_sac *answer)
{
    int S = budget->segments;
    size_t wanted = budget->budget_bytes;
    for (int s = 0; s < S; s++) {
        memset(&budget->sac[s], 0, sizeof budget->sac[s]);
        budget->sac[s].segment = s + 1;
        answer[s] = budget->sac[s];
    }
    FT_TRY(ft__probe_run(budget, probe, -1, 0));
    if (budget->peak_bytes <= wanted) return FT_OK; /* nothing needs to go */
    ft__sac_leaders(probe, wanted, leader);
    ft_status status = FT_OK;
    for (int r = 0; r < probe->world && status == FT_OK; r++) {
        if (leader[r] < 0) continue;
        status = ft__stage_fit(budget, probe, r);
        for (int s = 0; s < S && status == FT_OK; s++)
            if (probe->rank[r].segment[s].used) answer[s] = budget->sac[s];
    }
    memcpy(budget->sac, answer, (size_t)S * sizeof *answer);
    if (status == FT_OK) status = ft__probe_run(budget, probe, -1, 0);
    if (status != FT_OK || budget->peak_bytes <= wanted) return status;
    return ft_error(FT_ERR_OOM, "no recomputation policy fits %zu bytes a rank: the least that any "
                    "needs is %zu; take a smaller micro-batch, a higher ZeRO stage or a larger "
                    "budget", wanted, budget->peak_bytes);
}

FT_API ft_status ft_sac_fit(ft_sac_budget *budget)
{
    ft__probe probe;
    int world = budget->config.world > 0 ? budget->config.world : 1;
    if (budget->segments < 1 || !budget->step || !budget->sac)
        return ft_error(FT_ERR_ARG, "ft_sac_fit needs segments > 0, step and sac");
    budget->runs = 0;
    budget->optimal = 1;
    FT_TRY(ft__probe_create(world, budget->segments, &probe));
    int *leader = (int *)ft__sac_alloc((size_t)world, sizeof *leader);
    ft_sac *answer = (ft_sac *)ft__sac_alloc((size_t)budget->segments, sizeof *answer);
    ft_status status = leader && answer ? ft__sac_fit(budget, &probe, leader, answer) : FT_ERR_OOM;
    if (leader) FT_FREE(leader);
    if (answer) FT_FREE(answer);
    ft__probe_free(&probe);
    return status;
}

/* ---------------------------------------------------------------------------------- >>gpu.impl

   FT_GPU: what the parts above ask of the device, and the ops whose work is a GEMM. A rank has a
   stream for each ft_stream, one cuBLASLt handle, a ring of pinned host memory for uploads, and a
   few words in which kernels note faults. Ranks that share a GPU share its context and nothing
   else. */

#ifdef FT_CUDA

#include <cuda_runtime.h>
#include <cublasLt.h>
#include <nvtx3/nvToolsExt.h>
#include <unistd.h>

/* The ring of pinned memory for uploads; the events of a stream that can be told apart. */
enum { FT__GPU_SLOTS = 32, FT__GPU_SLOT_BYTES = 256 << 10, FT__GPU_EVENTS = 256 };

struct ft__gpu_stream {
    cudaStream_t native;                  /* first: ft_stream_native */
    cudaEvent_t events[FT__GPU_EVENTS];   /* of sequence q in [(q - 1) % FT__GPU_EVENTS] */
    uint64_t recorded;
};

/* A choice of algorithm, kept for each kind of product that a rank meets. */
typedef struct ft__gpu_key {
    int64_t m, n, k, lda, ldb, ldc;
    int32_t ta, tb, tc, trans_a, trans_b, align_a, align_b, align_c;
} ft__gpu_key;

typedef struct ft__gpu_plan {
    struct ft__gpu_plan *next;
    ft__gpu_key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
} ft__gpu_plan;

enum { FT__GPU_BUCKETS = 256 };

struct ft__gpu {
    int device;
    struct ft__gpu_stream streams[FT_STREAM_COUNT];
    cublasLtHandle_t blas;
    ft__gpu_plan *plans[FT__GPU_BUCKETS];
    char *slots[FT__GPU_SLOTS];           /* pinned; made when first used */
    cudaEvent_t slot_events[FT__GPU_SLOTS];
    int slot;                             /* the next to use */
    uint64_t *fault, *fault_host;         /* [3 FTK_FAULTS] device, pinned */
};

static ft_status ft__gpu_error(cudaError_t error, const char *what)
{
    return ft_error(error == cudaErrorMemoryAllocation ? FT_ERR_OOM : FT_ERR_STATE,
                    "%s failed on the GPU: %s (%s)", what, cudaGetErrorString(error),
                    cudaGetErrorName(error));
}

#define FT__CUDA(call)                                                                             \
    do {                                                                                           \
        cudaError_t ft__cuda_error = (call);                                                       \
        if (ft__cuda_error != cudaSuccess) return ft__gpu_error(ft__cuda_error, #call);            \
    } while (0)

static cudaStream_t ft__native(const ft_stream *s) { return s->gpu->native; }

FT_API int ft_ctx_gpu(const ft_ctx *ctx) { return ctx->gpu ? ctx->gpu->device : -1; }

ft_status ft_gpu_count(int *gpus)
{
    *gpus = 0;
    cudaError_t error = cudaGetDeviceCount(gpus);
    if (error == cudaSuccess) return FT_OK;
    *gpus = 0;
    (void)cudaGetLastError();
    if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) return FT_OK;
    return ft__gpu_error(error, "cudaGetDeviceCount");
}

ft_status ft_gpu_name(int gpu, char name[FT_GPU_NAME_BYTES])
{
    struct cudaDeviceProp properties;
    FT__CUDA(cudaGetDeviceProperties(&properties, gpu));
    snprintf(name, FT_GPU_NAME_BYTES, "%s", properties.name);
    return FT_OK;
}

ft_status ft_gpu_memory(int gpu, size_t *free_bytes, size_t *total_bytes)
{
    int before = 0;
    FT__CUDA(cudaGetDevice(&before));
    FT__CUDA(cudaSetDevice(gpu));
    FT__CUDA(cudaMemGetInfo(free_bytes, total_bytes));
    FT__CUDA(cudaSetDevice(before));
    return FT_OK;
}

/* How many GPUs a launch uses, and whether its ranks find room on them. */
static ft_status ft__gpu_check(ft_config *c)
{
    int have = 0;
    FT_TRY(ft_gpu_count(&have));
    if (have == 0)
        return ft_error(FT_ERR_UNSUPPORTED, "ft_launch: no GPU is visible (driver missing or too "
                        "old, or CUDA_VISIBLE_DEVICES is empty); FT_CPU runs the same program");
    if (c->gpus > have)
        return ft_error(FT_ERR_ARG, "ft_launch: %d GPUs asked for, %d visible", c->gpus, have);
    if (c->gpus == 0) c->gpus = have < c->world ? have : c->world;
    if (c->transport == FT_TRANSPORT_NCCL) return FT_OK; /* one rank a GPU: ft__nccl_check */
    int each = (c->world + c->gpus - 1) / c->gpus;
    if (c->ranks_per_gpu && each > c->ranks_per_gpu)
        return ft_error(FT_ERR_ARG, "ft_launch: %d ranks on %d GPUs are %d on one, more than "
                        "ranks_per_gpu %d", c->world, c->gpus, each, c->ranks_per_gpu);
    return FT_OK;
}

/* Ranks in blocks: neighbours share a GPU before they spread. */
static int ft__gpu_of(const ft_config *c, int rank)
{
    return (int)((int64_t)rank * c->gpus / c->world);
}

/* The local transport reads peers' buffers where they are. */
static ft_status ft__gpu_peers(const ft_config *c, int device)
{
    for (int other = 0; other < c->gpus; other++) {
        int can = 0;
        if (other == device) continue;
        FT__CUDA(cudaDeviceCanAccessPeer(&can, device, other));
        if (!can)
            return ft_error(FT_ERR_UNSUPPORTED, "GPU %d cannot read the memory of GPU %d: ranks of "
                            "one process need peer access; use one GPU", device, other);
        cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled) (void)cudaGetLastError();
        else FT__CUDA(error);
    }
    return FT_OK;
}

static ft_status ft__gpu_stream_begin(ft_ctx *ctx, int kind, int priority)
{
    struct ft__gpu_stream *s = &ctx->gpu->streams[kind];
    FT__CUDA(cudaStreamCreateWithPriority(&s->native, cudaStreamNonBlocking, priority));
    for (int i = 0; i < FT__GPU_EVENTS; i++)
        FT__CUDA(cudaEventCreateWithFlags(&s->events[i], cudaEventDisableTiming));
    ctx->streams[kind].gpu = s;
    return FT_OK;
}

/* Traffic goes before compute: what others wait for should not queue behind what they do not. */
static ft_status ft__gpu_begin(ft_ctx *ctx)
{
    int least, greatest;
    size_t fault_bytes = 3 * FTK_FAULTS * sizeof(uint64_t);
    struct ft__gpu *g = (struct ft__gpu *)ft_host_alloc(ctx, sizeof *g);
    if (!g) return FT_ERR_OOM;
    ctx->gpu = g;
    g->device = ft__gpu_of(&ctx->config, ctx->rank);
    if (ctx->world->local_rank >= 0) { /* a launcher may show each process its own GPU alone */
        int have = 0;
        FT_TRY(ft_gpu_count(&have));
        g->device = have == 1 ? 0 : ctx->world->local_rank;
    }
    FT__CUDA(cudaSetDevice(g->device));
    if (!ft__over_nccl(ctx)) FT_TRY(ft__gpu_peers(&ctx->config, g->device));
    FT__CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    for (int k = 0; k < FT_STREAM_COUNT; k++)
        FT_TRY(ft__gpu_stream_begin(ctx, k, k == FT_STREAM_COMPUTE ? least : greatest));
    if (cublasLtCreate(&g->blas) != CUBLAS_STATUS_SUCCESS)
        return ft_error(FT_ERR_UNSUPPORTED, "cublasLtCreate failed: is this GPU supported by the "
                        "installed cuBLASLt?");
    FT__CUDA(cudaMalloc((void **)&g->fault, fault_bytes));
    FT__CUDA(cudaMallocHost((void **)&g->fault_host, fault_bytes));
    memset(g->fault_host, 0xff, fault_bytes);
    FT__CUDA(cudaMemset(g->fault, 0xff, fault_bytes));
    FT__CUDA(cudaDeviceSynchronize()); /* before streams that do not wait for the default one */
    return FT_OK;
}

static void ft__gpu_plan_free(ft__gpu_plan *p)
{
    if (p->desc) cublasLtMatmulDescDestroy(p->desc);
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
    FT_FREE(p);
}

static void ft__gpu_end(ft_ctx *ctx)
{
    struct ft__gpu *g = ctx->gpu;
    if (!g) return;
    for (int k = 0; k < FT_STREAM_COUNT; k++) {
        for (int i = 0; i < FT__GPU_EVENTS; i++)
            if (g->streams[k].events[i]) cudaEventDestroy(g->streams[k].events[i]);
        if (g->streams[k].native) cudaStreamDestroy(g->streams[k].native);
    }
    for (int i = 0; i < FT__GPU_BUCKETS; i++)
        while (g->plans[i]) {
            ft__gpu_plan *p = g->plans[i];
            g->plans[i] = p->next;
            ft__gpu_plan_free(p);
        }
    for (int i = 0; i < FT__GPU_SLOTS; i++) {
        if (g->slot_events[i]) cudaEventDestroy(g->slot_events[i]);
        if (g->slots[i]) cudaFreeHost(g->slots[i]);
    }
    if (g->blas) cublasLtDestroy(g->blas);
    if (g->fault) cudaFree(g->fault);
    if (g->fault_host) cudaFreeHost(g->fault_host);
    ctx->gpu = NULL;
}

/* ---- order */

/* An error here shows at the next synchronisation: the stream then is of no use anyway. */
static uint64_t ft__gpu_record(ft_stream *s)
{
    uint64_t sequence = ++s->gpu->recorded;
    (void)cudaEventRecord(s->gpu->events[(sequence - 1) % FT__GPU_EVENTS], ft__native(s));
    return sequence;
}

/* An event that has left the ring is waited for through the oldest that is still in it. */
static ft_status ft__gpu_wait(ft_stream *s, ft_event event)
{
    struct ft__gpu_stream *of = event.stream->gpu;
    uint64_t sequence = event.sequence;
    if (sequence == 0) return FT_OK;
    if (of->recorded >= FT__GPU_EVENTS && sequence <= of->recorded - FT__GPU_EVENTS)
        sequence = of->recorded - FT__GPU_EVENTS + 1;
    FT__CUDA(cudaStreamWaitEvent(ft__native(s), of->events[(sequence - 1) % FT__GPU_EVENTS], 0));
    return FT_OK;
}

/* The sentences of the CPU's kernels. */
static ft_status ft__gpu_fault(const struct ft__gpu *g)
{
    static const char *const of[FTK_FAULTS][3] = {
        {"embedding: token", "", ""},
        {"linear_cross_entropy: label", "the vocabulary ", "; -100 marks a token to ignore"},
        {"tp_embedding: token", "", ""},
        {"tp_linear_cross_entropy: label", "the vocabulary ", "; -100 marks a token to ignore"},
        {"attention: doc_start", "",
         ", or less than that of the token to the left: the first token of a document is not "
         "behind its tokens, nor before that of the token to the left"}};
    for (int k = 0; k < FTK_FAULTS; k++) {
        const uint64_t *at = g->fault_host + 3 * k;
        if (at[0] == UINT64_MAX) continue;
        return ft_error(FT_ERR_DATA, "%s %d at position %lld of %lld is outside %s0..%lld%s",
                        of[k][0], (int)(int32_t)(uint32_t)at[0], (long long)(at[0] >> 32),
                        (long long)at[2],
                        of[k][1], (long long)at[1] - 1, of[k][2]);
    }
    return FT_OK;
}

static ft_status ft__nccl_heard(ft_ctx *ctx); /* what the peers say that they ask for */

static ft_status ft__world_ok(const ft_ctx *ctx)
{
    ft_status status = FT_OK;
    pthread_mutex_lock(&ctx->world->lock);
    if (ctx->world->aborted) status = ft__abort_error(ctx->world, ctx->rank);
    pthread_mutex_unlock(&ctx->world->lock);
    return status;
}

/* Work that a failure cut short ends as if nothing had happened: its results are none. */
static ft_status ft__gpu_aborted(const ft_stream *s)
{
    return ft__over_nccl(s->ctx) ? ft__world_ok(s->ctx) : FT_OK;
}

static ft_status ft__gpu_sync_run(ft_stream *s)
{
    struct ft__gpu *g = s->ctx->gpu;
    FT__CUDA(cudaMemcpyAsync(g->fault_host, g->fault, 3 * FTK_FAULTS * sizeof(uint64_t),
                             cudaMemcpyDeviceToHost, ft__native(s)));
    FT__CUDA(cudaStreamSynchronize(ft__native(s)));
    FT_TRY(ft__nccl_heard(s->ctx)); /* first: what the watchdog heard before has failed the world */
    FT_TRY(ft__gpu_aborted(s));
    return ft__gpu_fault(g);
}

static ft_status ft__gpu_sync(ft_stream *s)
{
    ft_status status = s->gpu && s->ctx->gpu->fault_host ? ft__gpu_sync_run(s) : FT_OK;
    return status == FT_OK ? FT_OK : ft__stream_fail(s, status);
}

/* Each op is an NVTX range, "backward swiglu in layer.3", for whoever profiles the program. */
static void ft__gpu_call_begin(ft_stream *s, ft_op_call *call)
{
    char text[128];
    if (!s->gpu) return;
    call->stream = (void *)ft__native(s);
    call->fault = s->ctx->gpu->fault;
    ft__where_sentence(s->ctx, text, sizeof text);
    (void)nvtxRangePushA(text);
}

static void ft__gpu_call_end(ft_ctx *ctx)
{
    if (ctx->gpu) (void)nvtxRangePop();
}

/* ---- time: events that are made when first used. An error shows when the time is read. */

static void ft__gpu_stamp(ft_stream *s, void **event)
{
    cudaEvent_t made;
    if (!*event && cudaEventCreate(&made) == cudaSuccess) *event = (void *)made;
    if (*event) (void)cudaEventRecord((cudaEvent_t)*event, ft__native(s));
}

static void ft__gpu_stamp_wait(void *event)
{
    if (event) (void)cudaEventSynchronize((cudaEvent_t)event);
}

static void ft__gpu_stamp_free(void *event)
{
    if (event) (void)cudaEventDestroy((cudaEvent_t)event);
}

static ft_status ft__gpu_stamp_time(void *from, void *event, double *seconds)
{
    float ms = 0;
    if (!from || !event) return ft_error(FT_ERR_OOM, "no CUDA events for the timeline");
    FT__CUDA(cudaEventElapsedTime(&ms, (cudaEvent_t)from, (cudaEvent_t)event));
    *seconds = (double)ms * 1e-3;
    return FT_OK;
}

/* ---- memory and copies */

static ft_status ft__gpu_alloc(ft_ctx *ctx, size_t bytes, void **out)
{
    size_t free_bytes = 0, total_bytes = 0;
    cudaError_t error = cudaMalloc(out, bytes);
    if (error == cudaSuccess) return FT_OK;
    (void)cudaGetLastError();
    *out = NULL;
    if (error != cudaErrorMemoryAllocation) return ft__gpu_error(error, "cudaMalloc");
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    return ft_error(FT_ERR_OOM, "GPU %d has no %zu bytes for %s: %zu free of %zu",
                    ctx->gpu->device, bytes, ft__where_text(ctx), free_bytes, total_bytes);
}

static void ft__gpu_free(ft_ctx *ctx, void *block)
{
    (void)ctx;
    (void)cudaFree(block);
}

static ft_status ft__gpu_copy(ft_stream *s, void *to, const void *from, size_t bytes)
{
    FT__CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, ft__native(s)));
    return FT_OK;
}

/* The next slot of the ring, once the copy that used it last is over. */
static ft_status ft__gpu_slot(struct ft__gpu *g, int *slot)
{
    *slot = g->slot;
    g->slot = (g->slot + 1) % FT__GPU_SLOTS;
    if (g->slots[*slot]) {
        FT__CUDA(cudaEventSynchronize(g->slot_events[*slot]));
        return FT_OK;
    }
    FT__CUDA(cudaMallocHost((void **)&g->slots[*slot], FT__GPU_SLOT_BYTES));
    FT__CUDA(cudaEventCreateWithFlags(&g->slot_events[*slot], cudaEventDisableTiming));
    return FT_OK;
}

/* Through pinned memory: `host` is free at once, and the host waits only for a slot that is still
   in flight, FT__GPU_SLOTS uploads ago. */
static ft_status ft__gpu_upload(ft_stream *s, void *to, const void *host, size_t bytes)
{
    struct ft__gpu *g = s->ctx->gpu;
    FT_TRY(ft__stream_error(s));
    ft__delay(s->ctx);
    for (size_t at = 0; at < bytes; at += FT__GPU_SLOT_BYTES) {
        size_t part = bytes - at, most = FT__GPU_SLOT_BYTES;
        if (part > most) part = most;
        int slot;
        FT_TRY(ft__gpu_slot(g, &slot));
        memcpy(g->slots[slot], (const char *)host + at, part);
        FT__CUDA(cudaMemcpyAsync((char *)to + at, g->slots[slot], part, cudaMemcpyHostToDevice,
                                 ft__native(s)));
        FT__CUDA(cudaEventRecord(g->slot_events[slot], ft__native(s)));
    }
    return FT_OK;
}

static ft_status ft__gpu_download(ft_stream *s, void *host, const void *from, size_t bytes)
{
    FT__CUDA(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, ft__native(s)));
    FT__CUDA(cudaStreamSynchronize(ft__native(s)));
    return ft__gpu_aborted(s);
}

static ft_status ft__gpu_sum(ft_stream *s, void *out, ft_dtype dtype, int n, const void *const *in,
                             int64_t count)
{
    return count ? ftk_sum(ft__native(s), out, dtype, n, in, count) : FT_OK;
}

static ft_status ft__gpu_signals_begin(ft_ctx *ctx, void *signals[FT__SIGNALS])
{
    (void)ctx;
    for (int i = 0; i < FT__SIGNALS; i++) {
        cudaEvent_t event = NULL;
        FT__CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        signals[i] = event;
    }
    return FT_OK;
}

static void ft__gpu_signals_end(void *signals[FT__SIGNALS])
{
    for (int i = 0; i < FT__SIGNALS; i++)
        if (signals[i]) cudaEventDestroy((cudaEvent_t)signals[i]);
}

static ft_status ft__gpu_signal(ft_stream *s, void *signal)
{
    FT__CUDA(cudaEventRecord((cudaEvent_t)signal, ft__native(s)));
    return FT_OK;
}

static ft_status ft__gpu_await(ft_stream *s, void *signal)
{
    FT__CUDA(cudaStreamWaitEvent(ft__native(s), (cudaEvent_t)signal, 0));
    return FT_OK;
}

/* ---- GEMM

   cuBLASLt counts in columns: a row-major X[r,c] is its X^T. So C[m,n] = A B is asked for as
   C^T = B^T A^T, with B as its first operand. An operand whose columns lie together (cs = 1) then
   goes in as it is, one whose rows do (rs = 1) transposed. */

static ft_status ft__blas_error(cublasStatus_t status, const char *what, const ft__gpu_key *key)
{
    return ft_error(FT_ERR_UNSUPPORTED, "%s: cuBLASLt says %s for m %lld, n %lld, k %lld, %s x %s "
                    "-> %s", what, cublasLtGetStatusString(status), (long long)key->m,
                    (long long)key->n, (long long)key->k, ft_dtype_name((ft_dtype)key->ta),
                    ft_dtype_name((ft_dtype)key->tb), ft_dtype_name((ft_dtype)key->tc));
}

#define FT__BLAS(call, key)                                                                        \
    do {                                                                                           \
        cublasStatus_t ft__blas_status = (call);                                                   \
        if (ft__blas_status != CUBLAS_STATUS_SUCCESS)                                              \
            return ft__blas_error(ft__blas_status, #call, key);                                    \
    } while (0)

static int32_t ft__gpu_align(const void *address, int64_t ld, ft_dtype t)
{
    uintptr_t bits = (uintptr_t)address | (uintptr_t)(ld * (int64_t)ft_dtype_bytes(t)) | 256u;
    return (int32_t)(bits & (~bits + 1u));
}

static cudaDataType_t ft__gpu_type(int32_t t) { return t == FT_BF16 ? CUDA_R_16BF : CUDA_R_32F; }

static ft_status ft__gpu_layouts(ft__gpu_plan *p)
{
    const ft__gpu_key *q = &p->key;
    cublasOperation_t ta = q->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t tb = q->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    uint64_t m = (uint64_t)q->m, n = (uint64_t)q->n, k = (uint64_t)q->k;
    FT__BLAS(cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), q);
    FT__BLAS(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &tb, sizeof tb),
             q);
    FT__BLAS(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &ta, sizeof ta),
             q);
    FT__BLAS(cublasLtMatrixLayoutCreate(&p->b, ft__gpu_type(q->tb), q->trans_b ? k : n,
                                        q->trans_b ? n : k, q->ldb), q);
    FT__BLAS(cublasLtMatrixLayoutCreate(&p->a, ft__gpu_type(q->ta), q->trans_a ? m : k,
                                        q->trans_a ? k : m, q->lda), q);
    FT__BLAS(cublasLtMatrixLayoutCreate(&p->c, ft__gpu_type(q->tc), n, m, q->ldc), q);
    return FT_OK;
}

/* Up to `most` candidates, best first as the library sees it: the same for the same shape, chip and
   library. */
static ft_status ft__gpu_candidates(struct ft__gpu *g, const ft__gpu_plan *p, int most,
                                    cublasLtMatmulHeuristicResult_t *found, int *found_n)
{
    const ft__gpu_key *q = &p->key;
    cublasLtMatmulPreference_t want = NULL;
    uint64_t bytes = FT__GPU_GEMM_BYTES;
    uint32_t align[3];
    int n = 0;
    align[0] = (uint32_t)q->align_b;
    align[1] = (uint32_t)q->align_a;
    align[2] = (uint32_t)q->align_c;
    FT__BLAS(cublasLtMatmulPreferenceCreate(&want), q);
    (void)cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &bytes, sizeof bytes);
    (void)cublasLtMatmulPreferenceSetAttribute(
        want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align[0], 4);
    (void)cublasLtMatmulPreferenceSetAttribute(
        want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align[1], 4);
    (void)cublasLtMatmulPreferenceSetAttribute(
        want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align[2], 4);
    (void)cublasLtMatmulPreferenceSetAttribute(
        want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align[2], 4);
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(g->blas, p->desc, p->b, p->a, p->c, p->c,
                                                           want, most, found, &n);
    (void)cublasLtMatmulPreferenceDestroy(want);
    if (status == CUBLAS_STATUS_SUCCESS && n == 0) status = CUBLAS_STATUS_NOT_SUPPORTED;
    FT__BLAS(status, q);
    *found_n = n;
    return FT_OK;
}

/* -- the table of algorithms: one line a shape, shared by the ranks of a launch */

enum { FT__GPU_CANDIDATES = 16, FT__GPU_TRIES = 5, FT__GPU_LINE = 1024 };

typedef struct ft__gpu_entry {
    struct ft__gpu_entry *next;
    char chip[FT_GPU_NAME_BYTES];
    uint64_t version;
    ft__gpu_key key;
    cublasLtMatmulAlgo_t algo;
} ft__gpu_entry;

struct ft__gpu_table {
    const char *path;
    pthread_mutex_t lock;   /* everything below */
    ft__gpu_entry *entries;
    int changed;
};

static ft__gpu_entry *ft__gpu_entry_new(ft__gpu_table *t)
{
    ft__gpu_entry *e = (ft__gpu_entry *)ft__zalloc(sizeof *e);
    if (!e) return NULL;
    e->next = t->entries;
    t->entries = e;
    return e;
}

/* chip, tab, version, the 14 numbers of the key, the algorithm as 8 words in hexadecimal. */
static int ft__gpu_entry_read(const char *line, ft__gpu_entry *e)
{
    const char *tab = strchr(line, '\t');
    unsigned long long version, w[8];
    long long v[6];
    ft__gpu_key *q = &e->key;
    if (!tab || (size_t)(tab - line) >= sizeof e->chip) return 0;
    memcpy(e->chip, line, (size_t)(tab - line));
    int n = sscanf(tab + 1, "%llu %lld %lld %lld %lld %lld %lld %d %d %d %d %d %d %d %d %llx %llx "
                   "%llx %llx %llx %llx %llx %llx", &version, &v[0], &v[1], &v[2], &v[3], &v[4],
                   &v[5], &q->ta, &q->tb, &q->tc, &q->trans_a, &q->trans_b, &q->align_a,
                   &q->align_b, &q->align_c, &w[0], &w[1], &w[2], &w[3], &w[4], &w[5], &w[6],
                   &w[7]);
    if (n != 23) return 0;
    e->version = version;
    q->m = v[0];
    q->n = v[1];
    q->k = v[2];
    q->lda = v[3];
    q->ldb = v[4];
    q->ldc = v[5];
    for (int i = 0; i < 8; i++) e->algo.data[i] = w[i];
    return 1;
}

static void ft__gpu_entry_write(FILE *file, const ft__gpu_entry *e)
{
    const ft__gpu_key *q = &e->key;
    fprintf(file, "%s\t%llu %lld %lld %lld %lld %lld %lld %d %d %d %d %d %d %d %d", e->chip,
            (unsigned long long)e->version, (long long)q->m, (long long)q->n, (long long)q->k,
            (long long)q->lda, (long long)q->ldb, (long long)q->ldc, q->ta, q->tb, q->tc,
            q->trans_a, q->trans_b, q->align_a, q->align_b, q->align_c);
    for (int i = 0; i < 8; i++) fprintf(file, " %llx", (unsigned long long)e->algo.data[i]);
    fputc('\n', file);
}

static ft_status ft__gpu_table_read(ft__gpu_table *t)
{
    char line[FT__GPU_LINE];
    FILE *file = fopen(t->path, "r");
    ft_status status = FT_OK;
    if (!file && errno == ENOENT) return FT_OK; /* to be made */
    if (!file) return ft_error(FT_ERR_IO, "%s: %s", t->path, strerror(errno));
    for (int n = 1; status == FT_OK && fgets(line, sizeof line, file); n++) {
        ft__gpu_entry *e = ft__gpu_entry_new(t);
        if (!e) status = ft_error(FT_ERR_OOM, "%s: no host memory for line %d", t->path, n);
        else if (!ft__gpu_entry_read(line, e))
            status = ft_error(FT_ERR_DATA, "%s: line %d is not an entry of a GEMM table; delete "
                              "the file to have it made again", t->path, n);
    }
    fclose(file);
    return status;
}

static ft_status ft__gpu_table_open(const ft_config *c, ft__gpu_table **out)
{
    if (c->device != FT_GPU || !c->gemm_table) return FT_OK;
    ft__gpu_table *t = (ft__gpu_table *)ft__zalloc(sizeof *t);
    if (!t || pthread_mutex_init(&t->lock, NULL) != 0) {
        FT_FREE(t);
        return ft_error(FT_ERR_OOM, "no host memory for the GEMM table %s", c->gemm_table);
    }
    t->path = c->gemm_table;
    *out = t;
    return ft__gpu_table_read(t);
}

/* Written beside and renamed, so that the file is always whole. */
static ft_status ft__gpu_table_write(const ft__gpu_table *t)
{
    char beside[FT__GPU_LINE];
    int n = snprintf(beside, sizeof beside, "%s.%ld.new", t->path, (long)getpid());
    FILE *file = n > 0 && n < FT__GPU_LINE ? fopen(beside, "w") : NULL;
    if (!file) return ft_error(FT_ERR_IO, "%s: the GEMM table cannot be written", t->path);
    for (const ft__gpu_entry *e = t->entries; e; e = e->next) ft__gpu_entry_write(file, e);
    int wrong = ferror(file);
    if (fclose(file) != 0 || wrong || rename(beside, t->path) != 0)
        return ft_error(FT_ERR_IO, "%s: the GEMM table cannot be written: %s", t->path,
                        strerror(errno));
    return FT_OK;
}

/* Of the processes of a launcher rank 0 writes: `own`. */
static ft_status ft__gpu_table_close(ft__gpu_table *t, int own)
{
    if (!t) return FT_OK;
    ft_status status = t->changed && own ? ft__gpu_table_write(t) : FT_OK;
    while (t->entries) {
        ft__gpu_entry *e = t->entries;
        t->entries = e->next;
        FT_FREE(e);
    }
    pthread_mutex_destroy(&t->lock);
    FT_FREE(t);
    return status;
}

/* The milliseconds of the fastest of a few runs; negative where the algorithm fails. */
static float ft__gpu_time(struct ft__gpu *g, const ft__gpu_plan *p,
                          const cublasLtMatmulAlgo_t *algo, const void *a, const void *b, void *c,
                          void *workspace, cudaEvent_t from, cudaEvent_t to, cudaStream_t stream)
{
    float one = 1, zero = 0, best = -1;
    for (int i = 0; i < FT__GPU_TRIES; i++) {
        float ms = 0;
        (void)cudaEventRecord(from, stream);
        if (cublasLtMatmul(g->blas, p->desc, &one, b, p->b, a, p->a, &zero, c, p->c, c, p->c, algo,
                           workspace, FT__GPU_GEMM_BYTES, stream) != CUBLAS_STATUS_SUCCESS)
            return -1;
        (void)cudaEventRecord(to, stream);
        if (cudaEventSynchronize(to) != cudaSuccess) return -1;
        if (cudaEventElapsedTime(&ms, from, to) != cudaSuccess) return -1;
        if (i > 0 && (best < 0 || ms < best)) best = ms;
    }
    return best;
}

/* Times the candidates on the operands at hand, into a result of its own, which no plan counts.
   Where there is no memory for one the library's first candidate is taken. */
static ft_status ft__gpu_tune(struct ft__gpu *g, ft__gpu_plan *p, const void *a, const void *b,
                              void *workspace, cudaStream_t stream)
{
    cublasLtMatmulHeuristicResult_t found[FT__GPU_CANDIDATES];
    cudaEvent_t from = NULL, to = NULL;
    void *c = NULL;
    float best = -1;
    int n = 0;
    FT_TRY(ft__gpu_candidates(g, p, FT__GPU_CANDIDATES, found, &n));
    p->algo = found[0].algo;
    size_t bytes = (size_t)(p->key.m * p->key.ldc) * ft_dtype_bytes((ft_dtype)p->key.tc);
    int ready = cudaMalloc(&c, bytes) == cudaSuccess && cudaEventCreate(&from) == cudaSuccess &&
                cudaEventCreate(&to) == cudaSuccess;
    for (int i = 0; i < n && ready; i++) {
        float ms = ft__gpu_time(g, p, &found[i].algo, a, b, c, workspace, from, to, stream);
        if (ms < 0 || (best >= 0 && ms >= best)) continue;
        best = ms;
        p->algo = found[i].algo;
    }
    if (!ready) (void)cudaGetLastError();
    if (from) (void)cudaEventDestroy(from);
    if (to) (void)cudaEventDestroy(to);
    if (c) (void)cudaFree(c);
    return FT_OK;
}

/* Lock held. NULL where the table has no such shape of this chip and library. */
static const ft__gpu_entry *ft__gpu_table_find(const ft__gpu_table *t, const ft__gpu_key *key,
                                               const char *chip, uint64_t version)
{
    for (const ft__gpu_entry *e = t->entries; e; e = e->next)
        if (e->version == version && memcmp(&e->key, key, sizeof *key) == 0 &&
            strcmp(e->chip, chip) == 0) return e;
    return NULL;
}

/* Lock held. */
static ft_status ft__gpu_table_add(ft__gpu_table *t, const ft__gpu_plan *p, const char *chip,
                                   uint64_t version)
{
    ft__gpu_entry *e = ft__gpu_entry_new(t);
    if (!e) return ft_error(FT_ERR_OOM, "no host memory for an entry of the GEMM table");
    memcpy(e->chip, chip, strlen(chip) + 1);
    e->version = version;
    e->key = p->key;
    e->algo = p->algo;
    t->changed = 1;
    return FT_OK;
}

/* What the table says. A shape that it lacks is timed, without the lock: the stream may stand
   behind a collective that waits for a rank that wants it. Of two ranks that time it at once both
   take what the first wrote. */
static ft_status ft__gpu_choose(const ft_op_call *call, ft__gpu_plan *p, const void *a,
                                const void *b, void *workspace)
{
    struct ft__gpu *g = call->ctx->gpu;
    ft__gpu_table *t = call->ctx->world->table;
    cublasLtMatmulHeuristicResult_t found;
    char chip[FT_GPU_NAME_BYTES];
    uint64_t version = cublasLtGetVersion();
    ft_status status = FT_OK;
    int n = 0;
    if (!t) {
        FT_TRY(ft__gpu_candidates(g, p, 1, &found, &n));
        p->algo = found.algo;
        return FT_OK;
    }
    FT_TRY(ft_gpu_name(g->device, chip));
    for (int tuned = 0; tuned < 2; tuned++) {
        pthread_mutex_lock(&t->lock);
        const ft__gpu_entry *e = ft__gpu_table_find(t, &p->key, chip, version);
        if (e) p->algo = e->algo;
        else if (tuned) status = ft__gpu_table_add(t, p, chip, version);
        pthread_mutex_unlock(&t->lock);
        if (e || tuned) return status;
        FT_TRY(ft__gpu_tune(g, p, a, b, workspace, (cudaStream_t)call->stream));
    }
    return status;
}

static ft_status ft__gpu_plan_get(const ft_op_call *call, const ft__gpu_key *key, const void *a,
                                  const void *b, void *workspace, ft__gpu_plan **out)
{
    struct ft__gpu *g = call->ctx->gpu;
    const unsigned char *byte = (const unsigned char *)key;
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < sizeof *key; i++) hash = (hash ^ byte[i]) * 16777619u;
    ft__gpu_plan **at = &g->plans[hash % FT__GPU_BUCKETS];
    for (ft__gpu_plan *p = *at; p; p = p->next)
        if (memcmp(&p->key, key, sizeof *key) == 0) {
            *out = p;
            return FT_OK;
        }
    ft__gpu_plan *p = (ft__gpu_plan *)ft__zalloc(sizeof *p);
    if (!p) return ft_error(FT_ERR_OOM, "no host memory for a GEMM's plan");
    p->key = *key;
    ft_status status = ft__gpu_layouts(p);
    if (status == FT_OK) status = ft__gpu_choose(call, p, a, b, workspace);
    if (status != FT_OK) {
        ft__gpu_plan_free(p);
        return status;
    }
    p->next = *at;
    *out = *at = p;
    return FT_OK;
}

/* to (dense) = or += from, elementwise: the kernels of copy and accumulate do it. */
static ft_status ft__gpu_give(const ft_op_call *call, void *to, ft_dtype to_dtype, void *from,
                              int64_t n, int accumulate)
{
    ft_op_call give = *call;
    ft_view *v = &give.in[0];
    memset(v, 0, sizeof *v);
    v->present = 1;
    v->ndim = 1;
    v->shape[0] = n;
    v->dtype = FT_F32;
    v->data = from;
    give.in[1] = *v;
    give.in[1].dtype = to_dtype;
    give.in[1].data = to;
    give.out[0] = give.in[1];
    return accumulate ? ftk_accumulate_forward(&give) : ftk_copy_forward(&give);
}

/* C[m,n] = or += A[m,k] B[k,n], with the strides of ft__gemm; ft__gpu_gemm_bytes of workspace. */
static ft_status ft__gpu_gemm(const ft_op_call *call, int64_t m, int64_t n, int64_t k,
                              const void *a, ft_dtype ta, int64_t a_rs, int64_t a_cs,
                              const void *b, ft_dtype tb, int64_t b_rs, int64_t b_cs, void *c,
                              ft_dtype tc, int64_t ldc, int accumulate, void *workspace)
{
    float one = 1, beta = accumulate ? 1.0f : 0.0f;
    ft__gpu_plan *p = NULL;
    ft__gpu_key key;
    if (ta != tb)
        return ft_error(FT_ERR_UNSUPPORTED, "%s: a product %s x %s: on FT_GPU both factors have "
                        "one dtype; convert one with ft_copy", call->op->name, ft_dtype_name(ta),
                        ft_dtype_name(tb));
    if (ta == FT_F32 && tc == FT_BF16) {
        void *wide = (char *)workspace + FT__GPU_GEMM_BYTES;
        FT_TRY(ft__gpu_gemm(call, m, n, k, a, ta, a_rs, a_cs, b, tb, b_rs, b_cs, wide, FT_F32, n, 0,
                            workspace));
        return ft__gpu_give(call, c, tc, wide, m * n, accumulate);
    }
    memset(&key, 0, sizeof key);
    key.m = m;
    key.n = n;
    key.k = k;
    key.trans_a = a_cs != 1;
    key.trans_b = b_cs != 1;
    key.lda = key.trans_a ? (k > 1 ? a_cs : m) : (m > 1 ? a_rs : k);
    key.ldb = key.trans_b ? (n > 1 ? b_cs : k) : (k > 1 ? b_rs : n);
    key.ldc = m > 1 ? ldc : n;
    key.ta = (int32_t)ta;
    key.tb = (int32_t)tb;
    key.tc = (int32_t)tc;
    key.align_a = ft__gpu_align(a, key.lda, ta);
    key.align_b = ft__gpu_align(b, key.ldb, tb);
    key.align_c = ft__gpu_align(c, key.ldc, tc);
    FT_TRY(ft__gpu_plan_get(call, &key, a, b, workspace, &p));
    FT__BLAS(cublasLtMatmul(call->ctx->gpu->blas, p->desc, &one, b, p->b, a, p->a, &beta, c, p->c,
                            c, p->c, &p->algo, workspace, FT__GPU_GEMM_BYTES,
                            (cudaStream_t)call->stream), &key);
    return FT_OK;
}

static ft_status ft__gpu_matmul_forward(const ft_op_call *call)
{
    const ft_view *a = &call->in[0], *b = &call->in[1], *c = &call->out[0];
    ft__mat A = ft__mat_of(a, call->attr.i[0] != 0), B = ft__mat_of(b, call->attr.i[1] != 0);
    return ft__gpu_gemm(call, A.rows, B.cols, A.cols, a->data, a->dtype, A.rs, A.cs, b->data,
                        b->dtype, B.rs, B.cs, c->data, c->dtype, B.cols, call->attr.i[2] != 0,
                        call->workspace);
}

static ft_status ft__gpu_linear_forward(const ft_op_call *call)
{
    const ft_view *x = &call->in[0], *w = &call->in[1], *b = &call->in[2], *y = &call->out[0];
    int64_t n = ft__view_rows(x), i = w->shape[1], o = w->shape[0];
    if (b->present) FT_TRY(ftk_rows_fill(call->stream, y->data, b->data, y->dtype, n, o));
    return ft__gpu_gemm(call, n, o, i, x->data, x->dtype, i, 1, w->data, w->dtype, 1, i, y->data,
                        y->dtype, o, b->present, call->workspace);
}

static ft_status ft__gpu_zero_grads(const ft_op_call *call)
{
    for (int i = 0; i < call->op->n_in; i++) {
        const ft_view *d = &call->din[i];
        if (d->present && !call->accumulate[i])
            FT__CUDA(cudaMemsetAsync(d->data, 0, (size_t)ft__view_elems(d) *
                                     ft_dtype_bytes(d->dtype), (cudaStream_t)call->stream));
    }
    return FT_OK;
}

static ft_status ft__gpu_linear_backward(const ft_op_call *call)
{
    const ft_view *x = &call->in[0], *w = &call->in[1], *dy = &call->dout[0];
    const ft_view *dx = &call->din[0], *dw = &call->din[1], *db = &call->din[2];
    int64_t n = ft__view_rows(x), i = w->shape[1], o = w->shape[0];
    if (!dy->present) return ft__gpu_zero_grads(call);
    if (dw->present)
        FT_TRY(ft__gpu_gemm(call, o, i, n, dy->data, dy->dtype, 1, o, x->data, x->dtype, i, 1,
                            dw->data, dw->dtype, i, call->accumulate[1], call->workspace));
    if (db->present)
        FT_TRY(ftk_rows_sum(call->stream, db->data, db->dtype, dy->data, dy->dtype, n, o,
                            call->accumulate[2], call->workspace));
    if (dx->present)
        FT_TRY(ft__gpu_gemm(call, n, i, o, dy->data, dy->dtype, o, 1, w->data, w->dtype, i, 1,
                            dx->data, dx->dtype, i, call->accumulate[0], call->workspace));
    return FT_OK;
}

/* ---- linear_cross_entropy: the chunks of ft__ce_chunks, with scalars that stay on the device */

typedef struct ft__gpu_ce { /* its workspace, part by part */
    ftk_ce_state *state;
    float *losses;          /* [N] */
    float *dw;              /* [V,C] fp32, NULL where din[1] is summed into directly */
    void *gemm;
} ft__gpu_ce;

static ft_status ft__gpu_ce_chunk(const ft_op_call *call, const ft__gpu_ce *ce, int64_t first,
                                  int64_t c, int grads)
{
    const ft_view *x = &call->in[0], *w = &call->in[1], *dx = &call->din[0], *dw = &call->din[1];
    int64_t V = w->shape[0], C = w->shape[1];
    ft_dtype t = x->dtype;
    const void *rows = ft__at_const(x->data, t, first * C);
    void *z = call->scratch;
    FT_TRY(ft__gpu_gemm(call, c, V, C, rows, t, C, 1, w->data, t, 1, C, z, t, V, 0, ce->gemm));
    FT_TRY(ftk_ce_tokens(call->stream, z, t, (const int32_t *)call->in[2].data + first, c, V,
                         ce->state, ce->losses + first, grads));
    if (grads && dw->present)
        FT_TRY(ft__gpu_gemm(call, V, C, c, z, t, 1, V, rows, t, C, 1,
                            ce->dw ? (void *)ce->dw : dw->data, ce->dw ? FT_F32 : dw->dtype, C,
                            first > 0 || (!ce->dw && call->accumulate[1]), ce->gemm));
    if (grads && dx->present)
        FT_TRY(ft__gpu_gemm(call, c, C, V, z, t, V, 1, w->data, t, C, 1,
                            ft__at(dx->data, dx->dtype, first * C), dx->dtype, C,
                            call->accumulate[0], ce->gemm));
    return FT_OK;
}

static ft_status ft__gpu_ce_run(const ft_op_call *call)
{
    const ft_view *x = &call->in[0], *labels = &call->in[2], *scale = &call->in[3];
    const ft_view *dloss = &call->dout[0];
    int64_t n = ft__view_rows(x), V = call->in[1].shape[0], chunk = ft__ce_chunk(call);
    int grads = call->backward && (call->din[0].present || call->din[1].present);
    char *room = (char *)call->workspace;
    ft__ce_gpu_parts part = ft__ce_gpu_layout(call);
    ft__gpu_ce ce;
    ce.state = (ftk_ce_state *)(void *)room;
    ce.losses = (float *)(void *)(room + part.state);
    ce.dw = part.dw ? (float *)(void *)(room + part.state + part.losses) : NULL;
    ce.gemm = room + part.state + part.losses + part.dw;
    FT_TRY(ftk_ce_begin(call->stream, ce.state, (const int32_t *)labels->data, n, V,
                        scale->present ? (const float *)scale->data : NULL,
                        dloss->present ? (const float *)dloss->data : NULL, call->fault));
    for (int64_t first = 0; first < n; first += chunk)
        FT_TRY(ft__gpu_ce_chunk(call, &ce, first, ft__min(chunk, n - first), grads));
    if (ce.dw)
        FT_TRY(ft__gpu_give(call, call->din[1].data, call->din[1].dtype, ce.dw,
                            ft__view_elems(&call->din[1]), call->accumulate[1]));
    if (call->backward && !call->deferred) return FT_OK;
    return ftk_ce_end(call->stream, ce.losses, n, ce.state, (float *)call->out[0].data);
}

#else /* no FT_CUDA: ft_launch refuses the device, and nothing below is reached */

static ft_status ft__gpu_none(void)
{
    return ft_error(FT_ERR_UNSUPPORTED, "this program was built without FT_CUDA: build it with "
                    "nvcc -DFT_CUDA and link femtotron_kernels.cu, or use FT_CPU");
}

ft_status ft_gpu_count(int *gpus)
{
    *gpus = 0;
    return FT_OK;
}

ft_status ft_gpu_name(int gpu, char name[FT_GPU_NAME_BYTES])
{
    (void)gpu;
    name[0] = 0;
    return ft__gpu_none();
}

ft_status ft_gpu_memory(int gpu, size_t *free_bytes, size_t *total_bytes)
{
    (void)gpu;
    *free_bytes = *total_bytes = 0;
    return ft__gpu_none();
}

static ft_status ft__gpu_check(ft_config *c) { (void)c; return ft__gpu_none(); }
static ft_status ft__gpu_begin(ft_ctx *ctx) { (void)ctx; return ft__gpu_none(); }

static ft_status ft__gpu_table_open(const ft_config *config, ft__gpu_table **out)
{
    (void)config;
    *out = NULL;
    return FT_OK;
}

static ft_status ft__gpu_table_close(ft__gpu_table *table, int own)
{
    (void)table;
    (void)own;
    return FT_OK;
}

static void ft__gpu_end(ft_ctx *ctx) { (void)ctx; }
static uint64_t ft__gpu_record(ft_stream *s) { (void)s; return 0; }
FT_API int ft_ctx_gpu(const ft_ctx *ctx) { (void)ctx; return -1; }
static ft_status ft__gpu_sync(ft_stream *s) { (void)s; return ft__gpu_none(); }
static void ft__gpu_free(ft_ctx *ctx, void *block) { (void)ctx; (void)block; }
static void ft__gpu_call_begin(ft_stream *s, ft_op_call *call) { (void)s; (void)call; }
static void ft__gpu_call_end(ft_ctx *ctx) { (void)ctx; }
static void ft__gpu_stamp(ft_stream *s, void **event) { (void)s; (void)event; }
static void ft__gpu_stamp_wait(void *event) { (void)event; }
static void ft__gpu_stamp_free(void *event) { (void)event; }
static ft_status ft__gpu_stamp_time(void *from, void *event, double *seconds)
{
    (void)from;
    (void)event;
    *seconds = 0;
    return ft__gpu_none();
}
static void ft__gpu_signals_end(void *signals[FT__SIGNALS]) { (void)signals; }

static ft_status ft__gpu_wait(ft_stream *s, ft_event event)
{
    (void)s;
    (void)event;
    return ft__gpu_none();
}

static ft_status ft__gpu_alloc(ft_ctx *ctx, size_t bytes, void **out)
{
    (void)ctx;
    (void)bytes;
    (void)out;
    return ft__gpu_none();
}

static ft_status ft__gpu_copy(ft_stream *s, void *to, const void *from, size_t bytes)
{
    (void)s;
    (void)to;
    (void)from;
    (void)bytes;
    return ft__gpu_none();
}

static ft_status ft__gpu_upload(ft_stream *s, void *to, const void *host, size_t bytes)
{
    return ft__gpu_copy(s, to, host, bytes);
}

static ft_status ft__gpu_download(ft_stream *s, void *host, const void *from, size_t bytes)
{
    return ft__gpu_copy(s, host, from, bytes);
}

static ft_status ft__gpu_sum(ft_stream *s, void *out, ft_dtype dtype, int n, const void *const *in,
                             int64_t count)
{
    (void)dtype;
    (void)n;
    return ft__gpu_copy(s, out, in, (size_t)count);
}

static ft_status ft__gpu_signals_begin(ft_ctx *ctx, void *signals[FT__SIGNALS])
{
    (void)ctx;
    (void)signals;
    return ft__gpu_none();
}

static ft_status ft__gpu_signal(ft_stream *s, void *signal)
{
    return ft__gpu_copy(s, signal, NULL, 0);
}

static ft_status ft__gpu_await(ft_stream *s, void *signal)
{
    return ft__gpu_copy(s, signal, NULL, 0);
}

#endif /* FT_CUDA */

/* --------------------------------------------------------------------------------- >>nccl.impl

   The second transport: NCCL between GPUs, one rank a GPU. Every group has a communicator of its
   own, so that parameters, gradients, tensor and pipeline parallelism never queue behind each
   other. The first communicator is the world's; through it the first member of a group hands the
   others the id of theirs, so that only members take part.

   Communicators are non-blocking, and a watchdog looks at them and at the work that is queued: if
   NCCL reports an error, or nothing moves for timeout_s while something is outstanding, it fails
   the launch with a line that says what was outstanding, and aborts all communicators, whose
   kernels then end. So a peer that died or hangs ends this rank too.

   NCCL itself does not compare what its members ask for: calls of other sizes may hang, or end well
   and leave wrong numbers. So a call of a kind and size that is new on its group is announced, in a
   gather of 32 bytes a member, and every 256th call is, with a hash of all calls before; a message
   is announced to its receiver the first time that it has its size, by 32 bytes before it. No host
   waits for that: the watchdog compares, and so does whoever waits for a stream. A receiver that
   wants more than is sent hangs with the announcement already in its memory: so where nothing has
   moved for three quarters of timeout_s the watchdog looks there, on a stream of its own. What is
   there in two looks, one tick after the other, has come whole. */

#if defined(FT_NCCL) && !defined(FT_CUDA)
#error "FT_NCCL needs FT_CUDA: nvcc -DFT_CUDA -DFT_NCCL ... -lcublasLt -lnccl"
#endif

#ifdef FT_NCCL

#include <nccl.h>

enum { FT__NCCL_PERIOD = 256, FT__NCCL_MARKS = 256, FT__NCCL_NOTICES = 8 };

typedef struct ft__nccl_sign { /* what a member asks for, as it is sent: 32 bytes */
    uint64_t magic;            /* what lies elsewhere came from another call */
    uint64_t order;            /* hash of all its calls before */
    int64_t elems;
    int32_t root;
    int16_t kind, dtype;
} ft__nccl_sign;

#define FT__NCCL_MAGIC UINT64_C(0x66656d746f6e6363)

typedef struct ft__nccl_notice ft__nccl_notice;
struct ft__nccl_notice {
    ft__nccl_notice *next;
    cudaEvent_t come;          /* what others ask for is in `signs` */
    int n, room, busy;         /* pairs of signs: used, allocated; busy: not compared yet */
    ft__nccl_sign *signs;      /* [4 room] pinned: what is expected, what came, two looks at it */
    ft__nccl_sign *on_gpu;     /* [2 room] */
    int looking, looks;        /* one is under way; how many there were, of the present use */
    int *peers;                /* [room] members that are to ask for the same; -1: none, a send */
};

typedef struct ft__nccl_mark { /* behind a call */
    cudaEvent_t done;
    char what[FT__TEXT_BYTES / 4]; /* "all-gather of 1048576 bf16 elements on group ..." */
} ft__nccl_mark;

struct ft__nccl { /* of a group */
    ncclComm_t comm;
    ft__nccl_mark *marks[FT__NCCL_MARKS + 1]; /* `out` outstanding, oldest first; free ones; last
                                                 the newest call's, where that has none of these */
    int out, newest_out, stride, skipped; /* a mark stands behind every `stride`th call */
    char what[FT__TEXT_BYTES / 4]; /* of the call that is being queued */
    ft__nccl_notice *notices;  /* FT__NCCL_NOTICES made with the group, more where those are busy */
    int busy;                  /* of them */
    uint64_t *seen, order;     /* seen: a hash table of kinds and sizes */
    size_t seen_room, n_seen;
    int64_t asked;
};

struct ft__nccl_rank { /* of a context */
    ft_ctx *ctx;
    ncclComm_t world;
    void *words;               /* device memory: barriers, agreements */
    pthread_mutex_t lock;      /* everything below */
    pthread_cond_t changed;
    pthread_t watchdog;
    cudaStream_t look;         /* the watchdog's */
    int watching, stop, aborted, looking;
    ft_group *groups[FT__NCCL_GROUPS];
    int n_groups;
    pthread_t aborts[FT__NCCL_GROUPS + 1];
    int n_aborts;
    ncclComm_t unaborted[FT__NCCL_GROUPS + 1]; /* for want of a thread */
    int n_unaborted;
    struct timespec moved;     /* when anything was last seen to end, or to be queued from idle */
};

static ft_status ft__nccl_error(ncclResult_t result, const char *what)
{
    return ft_error(FT_ERR_COMM, "%s: NCCL says %s", what, ncclGetErrorString(result));
}

static int ft__nccl_taken(ncclResult_t result)
{
    return result == ncclSuccess || result == ncclInProgress;
}

static int ft__nccl_world_aborted(const ft_ctx *ctx)
{
    pthread_mutex_lock(&ctx->world->lock);
    int aborted = ctx->world->aborted;
    pthread_mutex_unlock(&ctx->world->lock);
    return aborted;
}

/* Non-blocking calls answer "in progress" until they are through. */
static ft_status ft__nccl_settle(const ft_ctx *ctx, ncclComm_t comm, ncclResult_t result,
                                 const char *what)
{
    struct timespec deadline = ft__deadline(ctx->config.timeout_s), now, pause;
    struct ft__nccl_rank *r = ctx->nccl;
    memset(&pause, 0, sizeof pause);
    pause.tv_nsec = 50000;
    while (result == ncclInProgress || result == ncclSuccess) {
        ncclResult_t state = ncclSuccess;
        pthread_mutex_lock(&r->lock); /* the watchdog aborts under it, and then there is no comm */
        int aborted = r->aborted;
        if (!aborted) result = ncclCommGetAsyncError(comm, &state);
        pthread_mutex_unlock(&r->lock);
        if (aborted) return ft_error(FT_ERR_PEER, "%s: given up, as another call failed", what);
        if (result == ncclSuccess) result = state;
        if (result == ncclSuccess) return FT_OK;
        if (result != ncclInProgress) break;
        FT_TRY(ft__world_ok(ctx));
        clock_gettime(FT__CLOCK, &now);
        if (now.tv_sec > deadline.tv_sec)
            return ft_error(FT_ERR_TIMEOUT, "%s: not done within %g s; a peer is missing, or is "
                            "in another call", what, ctx->config.timeout_s);
        nanosleep(&pause, NULL);
    }
    return ft__nccl_error(result, what);
}

#define FT__NCCL(call)                                                                             \
    do {                                                                                           \
        ncclResult_t ft__nccl_result = (call);                                                     \
        if (!ft__nccl_taken(ft__nccl_result))                                                      \
            return ft__nccl_error(ft__nccl_result, #call);                                         \
    } while (0)

static ft_status ft__nccl_comm(const ft_ctx *ctx, const ncclUniqueId *id, int n, int rank,
                               const char *name, ncclComm_t *out)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    *out = NULL;
    ncclResult_t result = ncclCommInitRankConfig(out, n, *id, rank, &config);
    if (!*out) return ft__nccl_error(result, name);
    ft_status status = ft__nccl_settle(ctx, *out, result, name);
    if (status == FT_OK) return FT_OK;
    (void)ncclCommAbort(*out);
    *out = NULL;
    return status;
}

/* -- the watchdog */

static double ft__nccl_since(const struct timespec *then)
{
    struct timespec now;
    clock_gettime(FT__CLOCK, &now);
    return (double)(now.tv_sec - then->tv_sec) + 1e-9 * (double)(now.tv_nsec - then->tv_nsec);
}

/* Notes what has ended. Lock held. The text of the first marked call that has not, NULL if none is
   out. */
static const char *ft__nccl_done(struct ft__nccl_rank *n)
{
    const char *waits = NULL;
    for (int i = 0; i < n->n_groups; i++) {
        struct ft__nccl *c = n->groups[i]->nccl;
        ft__nccl_mark *newest = c->marks[FT__NCCL_MARKS];
        while (c->out && cudaEventQuery(c->marks[0]->done) != cudaErrorNotReady) {
            ft__nccl_mark *over = c->marks[0];
            memmove(c->marks, c->marks + 1, (FT__NCCL_MARKS - 1) * sizeof *c->marks);
            c->marks[FT__NCCL_MARKS - 1] = over;
            c->out--;
            clock_gettime(FT__CLOCK, &n->moved);
        }
        if (!c->out && c->newest_out && cudaEventQuery(newest->done) != cudaErrorNotReady) {
            c->newest_out = 0;
            clock_gettime(FT__CLOCK, &n->moved);
        }
        if (!waits && (c->out || c->newest_out)) waits = (c->out ? c->marks[0] : newest)->what;
    }
    return waits;
}

static ncclResult_t ft__nccl_state(const struct ft__nccl_rank *n)
{
    ncclResult_t world = ncclSuccess;
    if (n->world && ncclCommGetAsyncError(n->world, &world) == ncclSuccess &&
        world != ncclSuccess && world != ncclInProgress) return world;
    for (int i = 0; i < n->n_groups; i++) {
        ncclResult_t state = ncclSuccess, result = ncclSuccess;
        if (n->groups[i]->nccl->comm)
            result = ncclCommGetAsyncError(n->groups[i]->nccl->comm, &state);
        if (result == ncclSuccess) result = state;
        if (result != ncclSuccess && result != ncclInProgress) return result;
    }
    return ncclSuccess;
}

static void *ft__nccl_abort_one(void *comm)
{
    (void)ncclCommAbort((ncclComm_t)comm);
    return NULL;
}

/* An abort waits for the communicator's own kernels, and those may stand in a stream behind
   another's: so all are aborted at once, by a thread each. One that cannot have a thread is aborted
   last, when the others are under way. */
static void ft__nccl_abort_start(struct ft__nccl_rank *n, ncclComm_t comm)
{
    if (!comm) return;
    if (n->n_aborts < FT__NCCL_GROUPS + 1 &&
        ft__thread_start(&n->aborts[n->n_aborts], ft__nccl_abort_one, comm) == 0) n->n_aborts++;
    else n->unaborted[n->n_unaborted++] = comm;
}

/* Lock held. Kernels of an aborted communicator end, and with them what waits for them. */
static void ft__nccl_abort(struct ft__nccl_rank *n)
{
    if (n->aborted) return;
    n->aborted = 1;
    for (int i = 0; i < n->n_groups; i++) ft__nccl_abort_start(n, n->groups[i]->nccl->comm);
    ft__nccl_abort_start(n, n->world);
    for (int i = 0; i < n->n_unaborted; i++) (void)ncclCommAbort(n->unaborted[i]);
    n->world = NULL;
    for (int i = 0; i < n->n_groups; i++) n->groups[i]->nccl->comm = NULL;
}

static int ft__nccl_sign_is(const ft__nccl_sign *sign) { return sign->magic == FT__NCCL_MAGIC; }

static void ft__nccl_message_text(char *text, int is_send, int64_t elems, ft_dtype dtype)
{
    ft__append(text, "%s of %lld %s elements", is_send ? "send" : "receive", (long long)elems,
               ft_dtype_name(dtype));
}

static void ft__nccl_sign_text(char *text, const ft__nccl_sign *sign, int is_own)
{
    ft__post post;
    if (sign->kind == FT_SEND) { /* only receivers compare */
        ft__nccl_message_text(text, !is_own, sign->elems, (ft_dtype)sign->dtype);
        return;
    }
    memset(&post, 0, sizeof post);
    post.kind = sign->kind;
    post.dtype = (ft_dtype)sign->dtype;
    post.elems = sign->elems;
    post.root = sign->root;
    ft__post_text(text, &post);
}

/* What a look finds of one that has not come whole is left out. */
static int ft__nccl_sign_comes(const ft__nccl_sign *last, const ft__nccl_sign *now)
{
    static const char nothing[sizeof *now] = {0};
    return memcmp(now, nothing, sizeof *now) == 0 || memcmp(now, last, sizeof *now) != 0;
}

static ft_status ft__nccl_compare(const ft_group *g, const ft__nccl_notice *notice, int is_look)
{
    for (int i = 0; i < notice->n; i++) {
        const ft__nccl_sign *own = &notice->signs[i];
        const ft__nccl_sign *other = own + (is_look ? 3 : 1) * notice->room;
        char text[FT__TEXT_BYTES] = "ranks disagree";
        if (notice->peers[i] < 0 || memcmp(own, other, sizeof *own) == 0) continue;
        if (is_look && ft__nccl_sign_comes(own + 2 * notice->room, other)) continue;
        ft__append(text, " on group \"%.60s\" of %d: rank %d of it asks for ", g->name, g->n,
                   g->rank);
        ft__nccl_sign_text(text, own, 1);
        if (ft__nccl_sign_is(other)) {
            ft__append(text, ", rank %d for ", notice->peers[i]);
            ft__nccl_sign_text(text, other, 0);
            if (own->order != other->order) ft__append(text, ", after other calls");
        } else {
            ft__append(text, ", rank %d is in another call", notice->peers[i]);
        }
        return ft_error(FT_ERR_COMM, "%s", text);
    }
    return FT_OK;
}

/* Compares what has come. Lock held. */
static ft_status ft__nccl_compare_all(struct ft__nccl_rank *n)
{
    for (int i = 0; i < n->n_groups; i++) {
        struct ft__nccl *of = n->groups[i]->nccl;
        for (ft__nccl_notice *c = of->busy ? of->notices : NULL; c; c = c->next) {
            cudaError_t come = c->busy ? cudaEventQuery(c->come) : cudaErrorNotReady;
            if (come == cudaErrorNotReady) continue;
            c->busy = 0;
            of->busy--;
            if (come != cudaSuccess || ft__nccl_world_aborted(n->ctx)) continue;
            FT_TRY(ft__nccl_compare(n->groups[i], c, 0));
        }
    }
    return FT_OK;
}

static ft_status ft__nccl_heard(ft_ctx *ctx)
{
    ft_status status = FT_OK;
    if (!ctx->nccl) return FT_OK;
    pthread_mutex_lock(&ctx->nccl->lock);
    status = ft__nccl_compare_all(ctx->nccl);
    pthread_mutex_unlock(&ctx->nccl->lock);
    return status;
}

/* Looks at what came so far of announcements whose calls do not end. The copy may be slow to end,
   as streams may share a queue: it is not waited for. Lock held. */
static void ft__nccl_look_begin(struct ft__nccl_rank *n)
{
    for (int i = 0; i < n->n_groups; i++)
        for (ft__nccl_notice *c = n->groups[i]->nccl->notices; c; c = c->next) {
            if (!c->busy) continue;
            c->looking = cudaMemcpyAsync(c->signs + 3 * c->room, c->on_gpu + c->room,
                                         (size_t)c->n * sizeof *c->signs, cudaMemcpyDefault,
                                         n->look) == cudaSuccess;
            n->looking |= c->looking;
        }
}

static ft_status ft__nccl_look_end(struct ft__nccl_rank *n)
{
    ft_status status = FT_OK;
    if (!n->looking || cudaStreamQuery(n->look) != cudaSuccess) return FT_OK;
    n->looking = 0;
    for (int i = 0; i < n->n_groups; i++)
        for (ft__nccl_notice *c = n->groups[i]->nccl->notices; c; c = c->next) {
            if (!c->busy || !c->looking) continue;
            if (c->looks++ && status == FT_OK) status = ft__nccl_compare(n->groups[i], c, 1);
            memcpy(c->signs + 2 * c->room, c->signs + 3 * c->room, (size_t)c->n * sizeof *c->signs);
            c->looking = 0;
        }
    return status;
}

/* Lock held. */
static void ft__nccl_watch(struct ft__nccl_rank *n)
{
    const char *waits = ft__nccl_done(n);
    ncclResult_t state = ft__nccl_state(n);
    const double limit = n->ctx->config.timeout_s, still = waits ? ft__nccl_since(&n->moved) : 0;
    ft_status status = ft__nccl_compare_all(n);
    if (status == FT_OK) status = ft__nccl_look_end(n);
    if (still > 0.75 * limit && !n->looking) ft__nccl_look_begin(n);
    if (ft__nccl_world_aborted(n->ctx)) {
        ft__nccl_abort(n);
        return;
    }
    if (status != FT_OK) {
        /* The message stands. */
    } else if (state != ncclSuccess) {
        status = ft_error(FT_ERR_PEER, "%s: NCCL says %s; a peer died or the network failed",
                 waits ? waits : "between collectives", ncclGetErrorString(state));
    } else if (still > limit) {
        status = ft_error(FT_ERR_TIMEOUT, "%s: nothing moved for %g s; a peer has died, is stuck, "
                          "or asked for other sizes", waits, limit);
    } else {
        return;
    }
    ft__fail(n->ctx->world, n->ctx->rank, status, ft_last_error());
    ft__nccl_abort(n);
}

static void *ft__nccl_watchdog(void *arg)
{
    struct ft__nccl_rank *n = (struct ft__nccl_rank *)arg;
    (void)cudaSetDevice(n->ctx->gpu->device);
    pthread_mutex_lock(&n->lock);
    while (!n->stop) {
        struct timespec next = ft__deadline(0.1);
        (void)pthread_cond_timedwait(&n->changed, &n->lock, &next);
        if (!n->stop) ft__nccl_watch(n);
    }
    pthread_mutex_unlock(&n->lock);
    return NULL;
}

static void ft__nccl_free(struct ft__nccl *c)
{
    for (int k = 0; k <= FT__NCCL_MARKS; k++) {
        if (c->marks[k] && c->marks[k]->done) (void)cudaEventDestroy(c->marks[k]->done);
        FT_FREE(c->marks[k]);
    }
    while (c->notices) {
        ft__nccl_notice *notice = c->notices;
        c->notices = notice->next;
        if (notice->come) (void)cudaEventDestroy(notice->come);
        if (notice->on_gpu) (void)cudaFree(notice->on_gpu);
        if (notice->signs) (void)cudaFreeHost(notice->signs);
        FT_FREE(notice->peers);
        FT_FREE(notice);
    }
    FT_FREE(c->seen);
    FT_FREE(c);
}

/* -- a rank's begin and end */

static ft_status ft__nccl_begin(ft_ctx *ctx)
{
    struct ft__nccl_rank *n = (struct ft__nccl_rank *)ft_host_alloc(ctx, sizeof *n);
    ncclUniqueId id;
    if (!n) return FT_ERR_OOM;
    n->ctx = ctx;
    if (pthread_mutex_init(&n->lock, NULL) != 0 || ft__cond_init(&n->changed) != 0)
        return ft_error(FT_ERR_OOM, "the system has no mutex left for NCCL's watchdog");
    ctx->nccl = n;
    FT__CUDA(cudaMalloc(&n->words, FT__NCCL_WORDS * sizeof(uint64_t)));
    FT__CUDA(cudaMemset(n->words, 0, FT__NCCL_WORDS * sizeof(uint64_t)));
    FT__CUDA(cudaDeviceSynchronize());
    FT__CUDA(cudaStreamCreateWithPriority(&n->look, cudaStreamNonBlocking, 0));
    if (ctx->world->nccl_id) memcpy(&id, ctx->world->nccl_id, sizeof id);
    else FT__NCCL(ncclGetUniqueId(&id)); /* of NCCL_COMM_ID: the same on every rank */
    FT_TRY(ft__nccl_comm(ctx, &id, ctx->config.world, ctx->rank, "joining the world", &n->world));
    if (!ctx->world->nccl_id) (void)unsetenv("NCCL_COMM_ID"); /* groups meet elsewhere */
    clock_gettime(FT__CLOCK, &n->moved);
    if (ft__thread_start(&n->watchdog, ft__nccl_watchdog, n) != 0)
        return ft_error(FT_ERR_OOM, "cannot start NCCL's watchdog thread");
    n->watching = 1;
    return FT_OK;
}

/* Whoever does not come to leave is not waited for. */
static void ft__nccl_leave(const ft_ctx *ctx, ncclComm_t comm, const char *what)
{
    ncclResult_t result = ncclCommFinalize(comm);
    if (ft__nccl_settle(ctx, comm, result, what) == FT_OK) (void)ncclCommDestroy(comm);
    else (void)ncclCommAbort(comm);
}

static void ft__nccl_end(ft_ctx *ctx)
{
    struct ft__nccl_rank *n = ctx->nccl;
    if (!n) return;
    pthread_mutex_lock(&n->lock);
    n->stop = 1;
    pthread_cond_signal(&n->changed);
    pthread_mutex_unlock(&n->lock);
    if (n->watching) pthread_join(n->watchdog, NULL);
    if (ft__nccl_world_aborted(ctx)) ft__nccl_abort(n);
    for (int i = 0; i < n->n_aborts; i++) pthread_join(n->aborts[i], NULL);
    if (n->look) (void)cudaStreamDestroy(n->look);
    for (int i = 0; i < n->n_groups; i++) {
        struct ft__nccl *c = n->groups[i]->nccl;
        if (c->comm) {
            ft__nccl_leave(ctx, c->comm, "leaving a group");
        }
        ft__nccl_free(c);
        n->groups[i]->nccl = NULL;
    }
    if (n->world) {
        ft__nccl_leave(ctx, n->world, "leaving the world");
    }
    if (n->words) (void)cudaFree(n->words);
    pthread_cond_destroy(&n->changed);
    pthread_mutex_destroy(&n->lock);
    ctx->nccl = NULL;
}

/* -- groups: the first member makes the id, and sends it to the others over the world */

/* Waits for a stream, but no longer than for a peer. */
static ft_status ft__nccl_over(const ft_ctx *ctx, cudaStream_t stream)
{
    struct timespec begin, pause;
    clock_gettime(FT__CLOCK, &begin);
    memset(&pause, 0, sizeof pause);
    pause.tv_nsec = 50000;
    for (;;) {
        cudaError_t error = cudaStreamQuery(stream);
        if (error == cudaSuccess) return FT_OK;
        if (error != cudaErrorNotReady) return ft__gpu_error(error, "making a group");
        FT_TRY(ft__world_ok(ctx));
        if (ft__nccl_since(&begin) > ctx->config.timeout_s)
            return ft_error(FT_ERR_TIMEOUT, "making a group: a member did not come within %g s",
                            ctx->config.timeout_s);
        nanosleep(&pause, NULL);
    }
}

static ft_status ft__nccl_share_id(ft_ctx *ctx, int n, const int *ranks, int member,
                                   ncclUniqueId *id)
{
    struct ft__nccl_rank *r = ctx->nccl;
    cudaStream_t stream = ft__native(&ctx->streams[FT_STREAM_COMPUTE]);
    if (member == 0) {
        FT__NCCL(ncclGetUniqueId(id));
        FT__CUDA(cudaMemcpyAsync(r->words, id, sizeof *id, cudaMemcpyHostToDevice, stream));
    }
    ncclResult_t result = ncclInvalidUsage, ended = ncclSuccess;
    pthread_mutex_lock(&r->lock);
    ncclComm_t world = r->world; /* NULL once aborted */
    if (world) result = ncclGroupStart();
    for (int i = 1; i < n && member == 0 && ft__nccl_taken(result); i++)
        result = ncclSend(r->words, sizeof *id, ncclUint8, ranks[i], world, stream);
    if (member > 0 && ft__nccl_taken(result))
        result = ncclRecv(r->words, sizeof *id, ncclUint8, ranks[0], world, stream);
    if (world) ended = ncclGroupEnd();
    pthread_mutex_unlock(&r->lock);
    if (!world) return ft_error(FT_ERR_PEER, "making a group: given up, as another call failed");
    FT_TRY(ft__nccl_settle(ctx, world, ft__nccl_taken(result) ? ended : result,
                           "sharing a group's id"));
    FT_TRY(ft__nccl_over(ctx, stream));
    FT__CUDA(cudaMemcpy(id, r->words, sizeof *id, cudaMemcpyDeviceToHost));
    return FT_OK;
}

/* A notice with room for n pairs of signs, 16 at the least; the watchdog does not look at it before
   it is busy. */
static ft_status ft__nccl_notice_create(ft_group *g, int n)
{
    if (n < 16) n = 16;
    const size_t bytes = (size_t)n * sizeof(ft__nccl_sign);
    ft__nccl_notice *c = (ft__nccl_notice *)ft__zalloc(sizeof *c);
    if (!c) return ft_error(FT_ERR_OOM, "group \"%s\": no host memory", g->name);
    pthread_mutex_lock(&g->ctx->nccl->lock); /* from here on it is freed with the group */
    c->next = g->nccl->notices;
    g->nccl->notices = c;
    pthread_mutex_unlock(&g->ctx->nccl->lock);
    c->peers = (int *)ft__zalloc((size_t)n * sizeof *c->peers);
    if (!c->peers) return ft_error(FT_ERR_OOM, "group \"%s\": no host memory", g->name);
    FT__CUDA(cudaEventCreateWithFlags(&c->come, cudaEventDisableTiming));
    FT__CUDA(cudaMallocHost((void **)&c->signs, 4 * bytes));
    FT__CUDA(cudaMalloc((void **)&c->on_gpu, 2 * bytes));
    memset(c->signs, 0, 4 * bytes);
    FT__CUDA(cudaMemcpy(c->on_gpu, c->signs, 2 * bytes, cudaMemcpyHostToDevice));
    c->room = n;
    return FT_OK;
}

/* All but the communicator, into g->nccl. */
static ft_status ft__nccl_create(ft_group *g)
{
    struct ft__nccl *c = g->nccl = (struct ft__nccl *)ft__zalloc(sizeof *c);
    if (!c) return ft_error(FT_ERR_OOM, "group \"%s\": no host memory", g->name);
    for (int k = 0; k <= FT__NCCL_MARKS; k++) {
        c->marks[k] = (ft__nccl_mark *)ft__zalloc(sizeof **c->marks);
        if (!c->marks[k]) return ft_error(FT_ERR_OOM, "group \"%s\": no host memory", g->name);
        FT__CUDA(cudaEventCreateWithFlags(&c->marks[k]->done, cudaEventDisableTiming));
    }
    for (int k = 0; k < FT__NCCL_NOTICES && g->n > 1; k++)
        FT_TRY(ft__nccl_notice_create(g, g->n));
    return FT_OK;
}

static ft_status ft__nccl_group(ft_group *g, const int *ranks)
{
    ft_ctx *ctx = g->ctx;
    struct ft__nccl_rank *r = ctx->nccl;
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    if (r->n_groups == FT__NCCL_GROUPS)
        return ft_error(FT_ERR_UNSUPPORTED, "group \"%s\": more than %d groups over NCCL", g->name,
                        FT__NCCL_GROUPS);
    ft_status status = ft__nccl_create(g);
    if (status != FT_OK) {
        if (g->nccl) ft__nccl_free(g->nccl);
        g->nccl = NULL;
        return status;
    }
    pthread_mutex_lock(&r->lock);
    r->groups[r->n_groups++] = g;
    pthread_mutex_unlock(&r->lock);
    if (g->n > 1) {
        FT_TRY(ft__nccl_share_id(ctx, g->n, ranks, g->rank, &id));
        FT_TRY(ft__nccl_comm(ctx, &id, g->n, g->rank, g->name, &comm));
    }
    pthread_mutex_lock(&r->lock);
    g->nccl->comm = comm;
    pthread_mutex_unlock(&r->lock);
    return FT_OK;
}

/* -- collectives */

static ncclDataType_t ft__nccl_type(ft_dtype t)
{
    return t == FT_BF16 ? ncclBfloat16 : t == FT_I32 ? ncclInt32 : ncclFloat32;
}

static ncclResult_t ft__nccl_call(ft_group *g, cudaStream_t stream, const ft__post *own)
{
    ncclDataType_t type = ft__nccl_type(own->dtype);
    size_t elems = (size_t)own->elems, each = elems / (size_t)g->n;
    ncclComm_t comm = g->nccl->comm;
    uint64_t *word = (uint64_t *)g->ctx->nccl->words + FT__NCCL_WORDS - 1;
    switch (own->kind) {
    case FT_ALL_GATHER: return ncclAllGather(own->in, own->out, each, type, comm, stream);
    case FT_REDUCE_SCATTER:
        return ncclReduceScatter(own->in, own->out, each, type, ncclSum, comm, stream);
    case FT_ALL_REDUCE:
        return ncclAllReduce(own->in, own->out, elems, type, ncclSum, comm, stream);
    case FT_BROADCAST:
        return ncclBroadcast(own->in, own->out, elems, type, own->root, comm, stream);
    default: return ncclAllReduce(word, word, 1, ncclUint64, ncclSum, comm, stream);
    }
}

/* A mark for the call that was queued, not yet out. A host that runs far ahead leaves them all
   along the way: where all are out every second one is given up, and fewer calls get one. Lock
   held. */
static ft__nccl_mark *ft__nccl_mark_next(struct ft__nccl *c)
{
    ft__nccl_mark *given_up[FT__NCCL_MARKS / 2];
    if (!c->out && !c->newest_out) c->stride = 1;
    if (c->out < FT__NCCL_MARKS / 4 && c->stride > 1) c->stride /= 2;
    if (++c->skipped < c->stride) return c->marks[FT__NCCL_MARKS];
    c->skipped = 0;
    if (c->out == FT__NCCL_MARKS) {
        for (int k = 0; k < FT__NCCL_MARKS / 2; k++) {
            given_up[k] = c->marks[2 * k + 1];
            c->marks[k] = c->marks[2 * k];
        }
        memcpy(c->marks + FT__NCCL_MARKS / 2, given_up, sizeof given_up);
        c->out = FT__NCCL_MARKS / 2;
        c->stride *= 2;
    }
    return c->marks[c->out];
}

/* Waits until a call that was made is taken. */
static ft_status ft__nccl_settle_group(ft_group *g, ncclResult_t result)
{
    pthread_mutex_lock(&g->ctx->nccl->lock);
    ncclComm_t comm = g->nccl->comm; /* NULL once aborted, which is then seen first */
    pthread_mutex_unlock(&g->ctx->nccl->lock);
    return ft__nccl_settle(g->ctx, comm, result, g->nccl->what);
}

/* Tells the watchdog of what was queued. */
static ft_status ft__nccl_queued(ft_group *g, ft_stream *s, ncclResult_t result)
{
    struct ft__nccl_rank *r = g->ctx->nccl;
    struct ft__nccl *c = g->nccl;
    FT_TRY(ft__nccl_settle_group(g, result));
    pthread_mutex_lock(&r->lock);
    ft__nccl_mark *mark = ft__nccl_mark_next(c);
    const int is_newest = mark == c->marks[FT__NCCL_MARKS];
    memcpy(mark->what, c->what, sizeof mark->what);
    pthread_mutex_unlock(&r->lock);
    cudaError_t error = cudaEventRecord(mark->done, ft__native(s)); /* may wait: no lock */
    if (error != cudaSuccess) return ft__gpu_error(error, mark->what);
    pthread_mutex_lock(&r->lock);
    int idle = 1;
    for (int i = 0; i < r->n_groups; i++)
        idle = idle && !r->groups[i]->nccl->out && !r->groups[i]->nccl->newest_out;
    if (idle) clock_gettime(FT__CLOCK, &r->moved);
    c->newest_out = is_newest;
    if (!is_newest) c->out++; /* marks that came meanwhile moved this one along */
    pthread_mutex_unlock(&r->lock);
    return FT_OK;
}

static ft_status ft__nccl_ready(ft_group *g)
{
    FT_TRY(ft__world_ok(g->ctx));
    pthread_mutex_lock(&g->ctx->nccl->lock);
    int there = g->nccl->comm != NULL;
    pthread_mutex_unlock(&g->ctx->nccl->lock);
    if (there) return FT_OK;
    return ft_error(FT_ERR_STATE, "group \"%s\": its communicator was aborted", g->name);
}

/* Notes, under the lock, what is about to be queued. */
static void ft__nccl_note(ft_group *g, const char *text)
{
    snprintf(g->nccl->what, sizeof g->nccl->what, "%.150s on group \"%.60s\" (rank %d of %d)", text,
             g->name, g->rank, g->n);
}

/* -- what is asked for, announced */

/* A hash table of keys other than 0, at most half full. */
static ft_status ft__nccl_seen_grow(ft_group *g)
{
    struct ft__nccl *c = g->nccl;
    const size_t room = c->seen_room ? 2 * c->seen_room : 64;
    uint64_t *seen = (uint64_t *)ft__zalloc(room * sizeof *seen);
    if (!seen) return ft_error(FT_ERR_OOM, "group \"%s\": no host memory", g->name);
    for (size_t i = 0; i < c->seen_room; i++) {
        size_t at = (size_t)(c->seen[i] >> 32) % room;
        if (!c->seen[i]) continue;
        while (seen[at]) at = (at + 1) % room;
        seen[at] = c->seen[i];
    }
    FT_FREE(c->seen);
    c->seen = seen;
    c->seen_room = room;
    return FT_OK;
}

/* Whether a kind and size is new on the group (of a message: new between these two); from now on it
   is not. */
static ft_status ft__nccl_is_new(ft_group *g, const ft__nccl_sign *sign, int peer, int is_send,
                                 int *is_new)
{
    struct ft__nccl *c = g->nccl;
    uint64_t key = UINT64_C(0xcbf29ce484222325);
    key = ft__hash_mix(key, (uint64_t)sign->kind);
    key = ft__hash_mix(key, (uint64_t)sign->dtype);
    key = ft__hash_mix(key, (uint64_t)sign->root);
    key = ft__hash_mix(key, (uint64_t)sign->elems);
    key = ft__hash_mix(key, (uint64_t)(peer + 1));
    key = ft__hash_mix(key, (uint64_t)is_send) | 1;
    if (2 * c->n_seen >= c->seen_room) FT_TRY(ft__nccl_seen_grow(g));
    size_t at = (size_t)(key >> 32) % c->seen_room;
    while (c->seen[at] && c->seen[at] != key) at = (at + 1) % c->seen_room;
    *is_new = !c->seen[at];
    c->n_seen += !c->seen[at];
    c->seen[at] = key;
    return FT_OK;
}

/* A notice with room for n pairs that is not under way; one more where there is none, since waiting
   could be for what this rank is yet to do. */
static ft_status ft__nccl_notice_get(ft_group *g, int n, ft__nccl_notice **out)
{
    struct ft__nccl_rank *r = g->ctx->nccl;
    ft__nccl_notice *c;
    pthread_mutex_lock(&r->lock);
    for (c = g->nccl->notices; c && (c->busy || c->room < n); c = c->next) {}
    pthread_mutex_unlock(&r->lock);
    if (!c) {
        FT_TRY(ft__nccl_notice_create(g, n));
        c = g->nccl->notices; /* only this thread adds any */
    }
    c->n = n;
    *out = c;
    return FT_OK;
}

static ft_status ft__nccl_notice_begin(const ft__nccl_notice *c, int n, cudaStream_t stream)
{
    FT__CUDA(cudaMemcpyAsync(c->on_gpu, c->signs, (size_t)n * sizeof *c->signs,
                             cudaMemcpyHostToDevice, stream));
    return FT_OK;
}

/* What others ask for comes to the host when the stream gets there, and is gone from the GPU, so
   that a look finds only what came of the present use. */
static ft_status ft__nccl_notice_end(ft_group *g, ft__nccl_notice *c, cudaStream_t stream)
{
    FT__CUDA(cudaMemcpyAsync(c->signs + c->room, c->on_gpu + c->room,
                             (size_t)c->n * sizeof *c->signs, cudaMemcpyDeviceToHost, stream));
    FT__CUDA(cudaMemsetAsync(c->on_gpu + c->room, 0, (size_t)c->n * sizeof *c->signs, stream));
    FT__CUDA(cudaEventRecord(c->come, stream));
    pthread_mutex_lock(&g->ctx->nccl->lock);
    c->busy = 1;
    c->looking = c->looks = 0;
    g->nccl->busy++;
    pthread_mutex_unlock(&g->ctx->nccl->lock);
    return FT_OK;
}

static ft__nccl_sign ft__nccl_sign_make(int kind, ft_dtype dtype, int64_t elems, int root)
{
    ft__nccl_sign sign = { FT__NCCL_MAGIC, 0, elems, root, (int16_t)kind, (int16_t)dtype };
    return sign;
}

/* Of a collective: every member gathers what the others ask for. */
static ft_status ft__nccl_announce(ft_group *g, ft_stream *s, const ft__post *own)
{
    struct ft__nccl *c = g->nccl;
    ft__nccl_notice *notice;
    ft__nccl_sign sign = ft__nccl_sign_make(own->kind, own->dtype, own->elems, own->root);
    ncclResult_t result = ncclInvalidUsage;
    int is_new;
    FT_TRY(ft__nccl_is_new(g, &sign, -1, 0, &is_new));
    sign.order = c->order;
    c->order = ft__hash_mix(c->order, (uint64_t)own->elems);
    c->order = ft__hash_mix(c->order, (uint64_t)(own->kind * 8 + (int)own->dtype));
    c->order = ft__hash_mix(c->order, (uint64_t)own->root);
    if (++c->asked % FT__NCCL_PERIOD && !is_new) return FT_OK;
    FT_TRY(ft__nccl_notice_get(g, g->n, &notice));
    for (int i = 0; i < g->n; i++) {
        notice->signs[i] = sign;
        notice->peers[i] = i;
    }
    FT_TRY(ft__nccl_notice_begin(notice, 1, ft__native(s)));
    pthread_mutex_lock(&g->ctx->nccl->lock);
    if (c->comm)
        result = ncclAllGather(notice->on_gpu, notice->on_gpu + notice->room, sizeof sign,
                               ncclUint8, c->comm, ft__native(s));
    pthread_mutex_unlock(&g->ctx->nccl->lock);
    FT_TRY(ft__nccl_settle_group(g, result));
    return ft__nccl_notice_end(g, notice, ft__native(s));
}

/* Calls stand under the lock, so that no communicator is aborted while one is in it. */
static ft_status ft__nccl_collective(ft_group *g, ft_stream *s, const ft__post *own)
{
    ncclResult_t result = ncclInvalidUsage;
    char text[FT__TEXT_BYTES] = "";
    FT_TRY(ft__nccl_ready(g));
    ft__post_text(text, own);
    pthread_mutex_lock(&g->ctx->nccl->lock);
    ft__nccl_note(g, text);
    pthread_mutex_unlock(&g->ctx->nccl->lock);
    FT_TRY(ft__nccl_announce(g, s, own));
    pthread_mutex_lock(&g->ctx->nccl->lock);
    if (g->nccl->comm) result = ft__nccl_call(g, ft__native(s), own);
    pthread_mutex_unlock(&g->ctx->nccl->lock);
    return ft__nccl_queued(g, s, result);
}

/* A group of one has no communicator: its k-th receive takes its k-th send. */
static ft_status ft__nccl_to_self(ft_group *g, ft_stream *s, const ft__message *m, int64_t n)
{
    int64_t from = 0;
    for (int64_t i = 0; i < n; i++) {
        if (m[i].is_send) continue;
        while (from < n && !m[from].is_send) from++;
        if (from == n || m[from].elems != m[i].elems || m[from].dtype != m[i].dtype)
            return ft_error(FT_ERR_COMM, "exchange on group \"%s\": this rank's messages to itself "
                            "differ in size or number", g->name);
        FT_TRY(ft__move(s, m[i].data, m[from].data,
                        (size_t)m[i].elems * ft_dtype_bytes(m[i].dtype)));
        from++;
    }
    return FT_OK;
}

/* Those that are announced have their sign before them, from sender to receiver: messages of one
   direction keep their order, whatever exchanges the two ranks pair them in. */
static ncclResult_t ft__nccl_call_messages(ft_group *g, cudaStream_t stream, const ft__message *m,
                                           int64_t n, const ft__nccl_notice *notice)
{
    ncclComm_t comm = g->nccl->comm;
    ncclResult_t result = ncclSuccess;
    for (int64_t i = 0; i < n && ft__nccl_taken(result); i++) {
        const ncclDataType_t type = ft__nccl_type(m[i].dtype);
        const size_t count = (size_t)m[i].elems, bytes = sizeof(ft__nccl_sign);
        const int announced = notice && notice->signs[i].magic;
        const int peer = m[i].is_send ? m[i].to : m[i].from;
        if (announced && m[i].is_send)
            result = ncclSend(notice->on_gpu + i, bytes, ncclUint8, peer, comm, stream);
        else if (announced)
            result = ncclRecv(notice->on_gpu + notice->room + i, bytes, ncclUint8, peer, comm,
                              stream);
        if (!ft__nccl_taken(result)) break;
        result = m[i].is_send ? ncclSend(m[i].data, count, type, peer, comm, stream)
                              : ncclRecv(m[i].data, count, type, peer, comm, stream);
    }
    return result;
}

/* A notice where a message is new between its ranks, which both know, since both see the same go
   from one to the other; NULL where none is. */
static ft_status ft__nccl_announce_messages(ft_group *g, ft_stream *s, const ft__message *m,
                                            int64_t n, ft__nccl_notice **out)
{
    ft__nccl_notice *notice = NULL;
    *out = NULL;
    for (int64_t i = 0; i < n; i++) {
        ft__nccl_sign sign = ft__nccl_sign_make(FT_SEND, m[i].dtype, m[i].elems, 0);
        int is_new;
        FT_TRY(ft__nccl_is_new(g, &sign, m[i].is_send ? m[i].to : m[i].from, m[i].is_send,
                               &is_new));
        if (!is_new) continue;
        if (!notice) {
            FT_TRY(ft__nccl_notice_get(g, (int)n, &notice));
            memset(notice->signs, 0, (size_t)n * sizeof *notice->signs); /* none is announced */
            for (int64_t k = 0; k < n; k++) notice->peers[k] = -1;
        }
        notice->signs[i] = sign;
        if (!m[i].is_send) notice->peers[i] = m[i].from;
    }
    if (!notice) return FT_OK;
    FT_TRY(ft__nccl_notice_begin(notice, (int)n, ft__native(s)));
    *out = notice;
    return FT_OK;
}

/* "exchange of 2 messages: send of 8 fp32 elements to 1, receive of 8 fp32 elements from 1"; of
   many the first two. */
static void ft__nccl_messages_text(char *text, const ft__message *m, int64_t n)
{
    ft__append(text, "exchange of %lld message%s", (long long)n, n == 1 ? "" : "s");
    for (int64_t i = 0; i < n && i < 2; i++) {
        ft__append(text, i ? ", " : ": ");
        ft__nccl_message_text(text, m[i].is_send, m[i].elems, m[i].dtype);
        if (m[i].is_send) ft__append(text, " to %d", m[i].to);
        else ft__append(text, " from %d", m[i].from);
    }
    if (n > 2) ft__append(text, ", ...");
}

static ft_status ft__nccl_exchange(ft_group *g, ft_stream *s, const ft__message *m, int64_t n)
{
    ncclResult_t result = ncclInvalidUsage, ended = ncclSuccess;
    ft__nccl_notice *notice;
    char text[FT__TEXT_BYTES] = "";
    if (g->n == 1) return ft__nccl_to_self(g, s, m, n);
    FT_TRY(ft__nccl_ready(g));
    FT_TRY(ft__nccl_announce_messages(g, s, m, n, &notice));
    ft__nccl_messages_text(text, m, n);
    pthread_mutex_lock(&g->ctx->nccl->lock);
    ft__nccl_note(g, text);
    if (g->nccl->comm) {
        result = ncclGroupStart();
        if (ft__nccl_taken(result))
            result = ft__nccl_call_messages(g, ft__native(s), m, n, notice);
        ended = ncclGroupEnd();
    }
    pthread_mutex_unlock(&g->ctx->nccl->lock);
    FT_TRY(ft__nccl_queued(g, s, ft__nccl_taken(result) ? ended : result));
    return notice ? ft__nccl_notice_end(g, notice, ft__native(s)) : FT_OK;
}

/* All values beside each other; every member compares the same list. */
static ft_status ft__nccl_agree(ft_group *g, ft_stream *s, const ft__post *own)
{
    uint64_t all[FT__NCCL_WORDS], pair[2];
    char *words = (char *)g->ctx->nccl->words;
    char text[FT__TEXT_BYTES] = "";
    ncclResult_t result = ncclInvalidUsage;
    int same = 1;
    if (2 * g->n + 3 > FT__NCCL_WORDS)
        return ft_error(FT_ERR_UNSUPPORTED, "group \"%s\": agreements over NCCL are for at most %d "
                        "ranks", g->name, (FT__NCCL_WORDS - 3) / 2);
    pair[0] = own->value;
    pair[1] = UINT64_C(0xcbf29ce484222325); /* FNV-1a of the name: another call is told apart */
    for (const char *c = own->what; *c; c++)
        pair[1] = (pair[1] ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
    FT_TRY(ft__nccl_ready(g));
    FT__CUDA(cudaMemcpyAsync(words, pair, sizeof pair, cudaMemcpyHostToDevice, ft__native(s)));
    ft__append(text, "ft_agree \"%.100s\"", own->what);
    pthread_mutex_lock(&g->ctx->nccl->lock);
    ft__nccl_note(g, text);
    if (g->nccl->comm)
        result = ncclAllGather(words, words + sizeof pair, 2, ncclUint64, g->nccl->comm,
                               ft__native(s));
    pthread_mutex_unlock(&g->ctx->nccl->lock);
    FT_TRY(ft__nccl_queued(g, s, result));
    FT__CUDA(cudaMemcpyAsync(all, words + sizeof pair, (size_t)g->n * sizeof pair,
                             cudaMemcpyDeviceToHost, ft__native(s)));
    FT__CUDA(cudaStreamSynchronize(ft__native(s)));
    FT_TRY(ft__nccl_ready(g));
    for (int i = 0; i < g->n; i++) same = same && memcmp(all + 2 * i, pair, sizeof pair) == 0;
    if (same) return FT_OK;
    text[0] = '\0';
    ft__append(text, "ranks disagree about %s on group \"%s\":", own->what, g->name);
    for (int i = 0; i < g->n; i++) {
        if (all[2 * i + 1] != pair[1]) ft__append(text, " %d (another question)", i);
        else ft__append(text, " %d has %llu%s", i, (unsigned long long)all[2 * i],
                        i + 1 < g->n ? "," : "");
    }
    return ft_error(FT_ERR_COMM, "%s (ranks of the group)", text);
}

static ft_status ft__nccl_id(void *id, size_t id_bytes)
{
    ncclUniqueId own;
    if (id_bytes < sizeof own) return ft_error(FT_ERR_UNSUPPORTED, "NCCL's ids are too long");
    FT__NCCL(ncclGetUniqueId(&own));
    memcpy(id, &own, sizeof own);
    return FT_OK;
}

static ft_status ft__nccl_check(const ft_config *c, int own_rank)
{
    if (own_rank < 0 && c->world > c->gpus)
        return ft_error(FT_ERR_UNSUPPORTED, "ft_launch: NCCL wants a GPU for each rank, and there "
                        "are %d ranks on %d; FT_TRANSPORT_LOCAL lets ranks share", c->world,
                        c->gpus);
    return FT_OK;
}

#else /* no FT_NCCL: the transport is refused, and nothing else below is reached */

static ft_status ft__nccl_id(void *id, size_t id_bytes)
{
    (void)id;
    (void)id_bytes;
    return FT_OK;
}

static ft_status ft__nccl_check(const ft_config *c, int own_rank)
{
    (void)c;
    (void)own_rank;
    return ft_error(FT_ERR_UNSUPPORTED, "this program was built without NCCL: build it with "
                    "-DFT_CUDA -DFT_NCCL ... -lnccl, or use FT_TRANSPORT_LOCAL");
}

static ft_status ft__nccl_begin(ft_ctx *ctx) { (void)ctx; return FT_OK; }
static void ft__nccl_end(ft_ctx *ctx) { (void)ctx; }
#ifdef FT_CUDA
static ft_status ft__nccl_heard(ft_ctx *ctx) { (void)ctx; return FT_OK; }
#endif

static ft_status ft__nccl_group(ft_group *g, const int *ranks)
{
    (void)g;
    (void)ranks;
    return FT_OK;
}

static ft_status ft__nccl_collective(ft_group *g, ft_stream *s, const ft__post *own)
{
    (void)g;
    (void)s;
    (void)own;
    return FT_OK;
}

static ft_status ft__nccl_agree(ft_group *g, ft_stream *s, const ft__post *own)
{
    return ft__nccl_collective(g, s, own);
}

static ft_status ft__nccl_exchange(ft_group *g, ft_stream *s, const ft__message *m, int64_t n)
{
    (void)m;
    (void)n;
    return ft__nccl_collective(g, s, NULL);
}

#endif /* FT_NCCL */

#endif /* FEMTOTRON_IMPLEMENTATION_DONE */
#endif /* FEMTOTRON_IMPLEMENTATION */
