/* What happens when memory, a thread or a collective is refused in the middle of training.

   cc -std=c11 -I. tests/test_failure.c -lcmocka -lm -lpthread

   A program of a few ranks is run once for each thing that can be refused. In a sweep of
   acquisitions run k refuses the k-th of one thread: host memory and the CPU device's storage (both
   come from FT_MALLOC), threads, mutexes and conditions. In a sweep of collectives run k spoils the
   k-th collective of one rank. Each time

     [F1] the launch returns an error, and so does the function of every rank that began;
     [F2] the text names the rank and what it did not get, and peers are told the same;
     [F3] everything acquired is given back: blocks, threads, mutexes, conditions;
     [F4] nobody waits for the timeout: the launch ends long before it.
     [F5] Two refusals may pass, in runs that then have the result of an undisturbed one: the note
          that queues a free on a stream that is a thread (the free is done at once, in its turn),
          and on meta a thread beyond the first (the others do its work).

   FT_FAILURE_STRIDE=N takes every N-th refusal of each sweep; the default is what fits in a minute,
   and is the whole sweep where it says so. A watchdog ends a run that hangs, and names it. */

#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

/* ------------------------------------------------------------------------------- acquisitions */

/* A domain is a thread, because what one thread acquires comes in the same order in every run. What
   is acquired under a lock is shared by the ranks: whoever comes first makes it, in one order. */
enum { D_MAIN, D_SHARED, D_RANK, D_STREAM = D_RANK + 8, DOMAINS };
enum { MAX_LINES = 16384, MAX_RANKS = 8, TEXT_BYTES = 1024 };

static struct {
    pthread_mutex_t lock;
    long count[DOMAINS];     /* acquisitions of this run */
    int fail_domain;         /* which one fails: number fail_at (from 1) of this domain; 0: none */
    long fail_at;
    int stay;                /* and all that follow, in any domain */
    int one_domain;          /* all threads count as D_MAIN: where ranks share their threads */
    int fired, fired_line;
    long blocks, objects;    /* not given back */
    int damaged;             /* a block was freed twice, or while in use */
    const char *in_use;      /* an address that no one may free now */
    int next_rank;
    long first[DOMAINS][MAX_LINES], last[DOMAINS][MAX_LINES]; /* by line: acquisitions there */
} hook = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local int domain = D_MAIN;
static _Thread_local int locks; /* held by this thread */

/* Counts one acquisition; 1 if it is to be refused. */
static int refused(int line, long *live) {
    pthread_mutex_lock(&hook.lock);
    int d = hook.one_domain ? D_MAIN : locks ? D_SHARED : domain;
    long n = ++hook.count[d];
    if (!hook.first[d][line]) hook.first[d][line] = n;
    hook.last[d][line] = n;
    int fails = hook.fail_at && ((d == hook.fail_domain && n == hook.fail_at) ||
                                 (hook.stay && hook.fired));
    if (fails && !hook.fired) {
        hook.fired = 1;
        hook.fired_line = line;
    }
    *live += !fails;
    pthread_mutex_unlock(&hook.lock);
    return fails;
}

static void given_back(long *live) {
    pthread_mutex_lock(&hook.lock);
    --*live;
    pthread_mutex_unlock(&hook.lock);
}

/* Blocks begin with a mark, and hold garbage before and after their life. */
typedef union hook_block {
    struct {
        size_t bytes;
        uint64_t mark;
    } head;
    long double align;
} hook_block;

#define LIVE UINT64_C(0x6c6976656c697665)

static void *hook_malloc(size_t bytes, int line) {
    if (refused(line, &hook.blocks)) return NULL;
    hook_block *b = (hook_block *)malloc(sizeof *b + bytes);
    if (!b) abort();
    b->head.bytes = bytes;
    b->head.mark = LIVE;
    memset(b + 1, 0xa5, bytes);
    return b + 1;
}

static void hook_free(void *memory) {
    if (!memory) return;
    hook_block *b = (hook_block *)memory - 1;
    pthread_mutex_lock(&hook.lock);
    size_t before = hook.in_use ? (size_t)((uintptr_t)hook.in_use - (uintptr_t)memory) : SIZE_MAX;
    int bad = b->head.mark != LIVE || before < b->head.bytes;
    hook.damaged |= bad;
    pthread_mutex_unlock(&hook.lock);
    if (b->head.mark != LIVE) return;
    memset(b + 1, 0x5a, b->head.bytes);
    b->head.mark = 0;
    free(b);
    given_back(&hook.blocks);
}

typedef struct thread_start {
    void *(*fn)(void *);
    void *arg;
    int domain;
} thread_start;

static void *hook_thread_main(void *arg) {
    thread_start start = *(thread_start *)arg;
    free(arg);
    domain = start.domain;
    return start.fn(start.arg);
}

static int hook_thread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *),
                              void *arg, int line) {
    if (refused(line, &hook.objects)) return EAGAIN;
    thread_start *start = (thread_start *)malloc(sizeof *start);
    if (!start) abort();
    start->fn = fn;
    start->arg = arg;
    start->domain = domain == D_MAIN ? D_RANK + hook.next_rank++ % MAX_RANKS : D_STREAM;
    int error = pthread_create(thread, attr, hook_thread_main, start);
    if (error) abort();
    return error;
}

static int hook_thread_join(pthread_t thread) {
    given_back(&hook.objects);
    return pthread_join(thread, NULL);
}

static int hook_mutex_init(pthread_mutex_t *mutex, int line) {
    return refused(line, &hook.objects) ? EAGAIN : pthread_mutex_init(mutex, NULL);
}

static int hook_mutex_destroy(pthread_mutex_t *mutex) {
    given_back(&hook.objects);
    return pthread_mutex_destroy(mutex);
}

static int hook_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attr, int line) {
    return refused(line, &hook.objects) ? EAGAIN : pthread_cond_init(cond, attr);
}

static int hook_cond_destroy(pthread_cond_t *cond) {
    given_back(&hook.objects);
    return pthread_cond_destroy(cond);
}

static int hook_lock(pthread_mutex_t *mutex) {
    locks++;
    return pthread_mutex_lock(mutex);
}

static int hook_unlock(pthread_mutex_t *mutex) {
    locks--;
    return pthread_mutex_unlock(mutex);
}

#define FT_MALLOC(n) hook_malloc(n, __LINE__)
#define FT_FREE(p) hook_free(p)
#define pthread_create(thread, attr, fn, arg) hook_thread_create(thread, attr, fn, arg, __LINE__)
#define pthread_join(thread, result) hook_thread_join(thread)
#define pthread_mutex_init(mutex, attr) hook_mutex_init(mutex, __LINE__)
#define pthread_mutex_destroy(mutex) hook_mutex_destroy(mutex)
#define pthread_cond_init(cond, attr) hook_cond_init(cond, attr, __LINE__)
#define pthread_cond_destroy(cond) hook_cond_destroy(cond)
#define pthread_mutex_lock(mutex) hook_lock(mutex)
#define pthread_mutex_unlock(mutex) hook_unlock(mutex)

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"

#undef pthread_create
#undef pthread_join
#undef pthread_mutex_init
#undef pthread_mutex_destroy
#undef pthread_cond_init
#undef pthread_cond_destroy
#undef pthread_mutex_lock
#undef pthread_mutex_unlock

/* --------------------------------------------------------------------------------- collectives */

/* The headers above the core call collectives by their public names: here these become calls that
   one rank makes badly. */
typedef enum spoil {
    S_REFUSED,  /* the call returns an error */
    S_BROKEN,   /* its work fails on the stream: where that is a thread, after the call returned */
    S_OTHER,    /* the rank asks for another size */
    S_SKIPPED,  /* the rank leaves it out, and goes on */
    SPOILS
} spoil;

static const char *const spoil_names[SPOILS] = {"refused", "broken", "of another size", "skipped"};

static struct {
    int count[MAX_RANKS];    /* collectives of this run, by rank */
    int rank, at;            /* which one is spoilt, at from 1; 0: none */
    spoil how;
    int fired;
    char what[64];
} sabotage;

/* Counts a collective; 1 if it is the one to spoil. Called by the rank's own thread. */
static int spoilt(const ft_group *group, const char *name) {
    int rank = group->ctx->rank;
    if (++sabotage.count[rank] != sabotage.at || rank != sabotage.rank) return 0;
    snprintf(sabotage.what, sizeof sabotage.what, "%s on group %.30s", name, ft_group_name(group));
    sabotage.fired = 1;
    return 1;
}

static ft_status broken_task(void *arg) {
    (void)arg;
    return ft_error(FT_ERR_IO, "the wire broke in %s", sabotage.what);
}

/* The two ways to fail that are the same for every collective, and FT_OK for a skipped one. */
static ft_status spoil_call(ft_stream *stream) {
    if (sabotage.how == S_BROKEN) return ft_stream_run(stream, broken_task, NULL, 0);
    if (sabotage.how == S_REFUSED)
        return ft_error(FT_ERR_IO, "the wire broke in %s", sabotage.what);
    return FT_OK;
}

/* A tensor of another size than any in these programs; it goes with the context. */
static ft_status other_tensor(const ft_group *group, ft_dtype dtype, int64_t n, ft_tensor **out) {
    return ft_tensor_create(group->ctx, out, dtype, 1, &n, FT_TAG_OTHER);
}

static ft_status hook_all_gather(ft_group *group, ft_stream *stream, const ft_tensor *shard,
                                 ft_tensor *full) {
    ft_tensor *small, *large;
    if (!spoilt(group, "all-gather")) return ft_all_gather(group, stream, shard, full);
    if (sabotage.how != S_OTHER) return spoil_call(stream);
    FT_TRY(other_tensor(group, full->dtype, 3, &small));
    FT_TRY(other_tensor(group, full->dtype, 3 * ft_group_size(group), &large));
    return ft_all_gather(group, stream, small, large);
}

static ft_status hook_reduce_scatter(ft_group *group, ft_stream *stream, const ft_tensor *full,
                                     ft_tensor *shard) {
    ft_tensor *small, *large;
    if (!spoilt(group, "reduce-scatter")) return ft_reduce_scatter(group, stream, full, shard);
    if (sabotage.how != S_OTHER) return spoil_call(stream);
    FT_TRY(other_tensor(group, full->dtype, 3, &small));
    FT_TRY(other_tensor(group, full->dtype, 3 * ft_group_size(group), &large));
    return ft_reduce_scatter(group, stream, large, small);
}

static ft_status hook_all_reduce(ft_group *group, ft_stream *stream, ft_tensor *tensor) {
    ft_tensor *other;
    if (!spoilt(group, "all-reduce")) return ft_all_reduce(group, stream, tensor);
    if (sabotage.how != S_OTHER) return spoil_call(stream);
    FT_TRY(other_tensor(group, tensor->dtype, 3, &other));
    return ft_all_reduce(group, stream, other);
}

static ft_status hook_broadcast(ft_group *group, ft_stream *stream, ft_tensor *tensor, int root) {
    ft_tensor *other;
    if (!spoilt(group, "broadcast")) return ft_broadcast(group, stream, tensor, root);
    if (sabotage.how != S_OTHER) return spoil_call(stream);
    FT_TRY(other_tensor(group, tensor->dtype, 3, &other));
    return ft_broadcast(group, stream, other, root);
}

static ft_status hook_barrier(ft_group *group, ft_stream *stream) {
    ft_tensor *other;
    if (!spoilt(group, "barrier")) return ft_barrier(group, stream);
    if (sabotage.how != S_OTHER) return spoil_call(stream);
    FT_TRY(other_tensor(group, FT_F32, 3, &other));
    return ft_all_reduce(group, stream, other);
}

static ft_status hook_exchange(ft_group *group, ft_stream *stream, int n, const ft_p2p *ops) {
    ft_p2p other[4];
    if (!spoilt(group, "exchange") || n > 4) return ft_exchange(group, stream, n, ops);
    if (sabotage.how != S_OTHER) return spoil_call(stream);
    for (int i = 0; i < n; i++) {
        other[i] = ops[i];
        FT_TRY(other_tensor(group, ops[i].tensor->dtype, 3, &other[i].tensor));
    }
    return ft_exchange(group, stream, n, other);
}

static ft_status hook_agree(ft_group *group, const char *what, uint64_t value) {
    if (!spoilt(group, "agree")) return ft_agree(group, what, value);
    if (sabotage.how == S_OTHER) return ft_agree(group, what, value + 1);
    FT_TRY(spoil_call(ft_stream_get(group->ctx, FT_STREAM_COMPUTE)));
    return sabotage.how == S_SKIPPED ? FT_OK : ft_agree(group, what, value);
}

#define ft_all_gather(group, stream, shard, full) hook_all_gather(group, stream, shard, full)
#define ft_reduce_scatter(group, stream, full, shard)                                              \
    hook_reduce_scatter(group, stream, full, shard)
#define ft_all_reduce(group, stream, tensor) hook_all_reduce(group, stream, tensor)
#define ft_broadcast(group, stream, tensor, root) hook_broadcast(group, stream, tensor, root)
#define ft_barrier(group, stream) hook_barrier(group, stream)
#define ft_exchange(group, stream, n, ops) hook_exchange(group, stream, n, ops)
#define ft_agree(group, what, value) hook_agree(group, what, value)

#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_llama.h"
#include "train_harness.h"

/* ------------------------------------------------------------------------------------ programs */

typedef struct program {
    char name[96];
    ft_status (*body)(ft_ctx *ctx, const struct program *program);
    ft_config launch;
    th_options train;
    ft_sac sac[2];
} program;

static struct { /* of the latest run, by rank */
    int began[MAX_RANKS];
    ft_status status[MAX_RANKS];
    char text[MAX_RANKS][TEXT_BYTES];
    uint64_t print[MAX_RANKS];   /* of its results; 0 unless it came to its end */
    size_t peaks[4096];          /* rank 0: live bytes whenever they were a new peak */
    int n_peaks;
} seen;

static uint64_t print_of(uint64_t print, const void *bytes, size_t n) {
    const unsigned char *at = (const unsigned char *)bytes;
    for (size_t i = 0; i < n; i++) print = (print ^ at[i]) * UINT64_C(1099511628211);
    return print;
}

/* What the timeline says of rank 0. */
static void keep_peaks(ft_ctx *ctx) {
    const ft_mem_event *events;
    int64_t n = ft_mem_timeline(ctx, &events);
    size_t peak = 0;
    if (ft_rank(ctx) != 0) return;
    for (int64_t i = 0; i < n && seen.n_peaks < 4096; i++) {
        if (events[i].live_bytes <= peak) continue;
        seen.peaks[seen.n_peaks++] = peak = events[i].live_bytes;
    }
}

/* The last thing that ranks do together: who fails before it fails for all; after it, nobody. */
static ft_status part_together(ft_ctx *ctx) {
    ft_mesh mesh;
    ft_group *group;
    FT_TRY(ft_mesh_create(ctx, ft_world(ctx), 1, 1, &mesh));
    FT_TRY(ft_mesh_group(ctx, &mesh, FT_AXIS_DP, "the end", &group));
    FT_TRY(ft_sync(ctx));
    return ft_agree(group, "the end", 1);
}

static ft_status program_rank(ft_ctx *ctx, void *user) {
    const program *p = (const program *)user;
    int rank = ft_rank(ctx);
    seen.began[rank] = 1;
    ft_status status = p->body(ctx, p);
    if (status == FT_OK) status = part_together(ctx);
    if (status == FT_OK && ft_ctx_device(ctx) != FT_META) keep_peaks(ctx);
    seen.status[rank] = status;
    if (status != FT_OK) snprintf(seen.text[rank], TEXT_BYTES, "%s", ft_last_error());
    return status;
}

/* Small vocabulary: th_token's is the tests' tiny model's. */
static void small_data(void *user, int step, int sample, int64_t T, int32_t *tokens,
                       int32_t *labels) {
    th_data(user, step, sample, T, tokens, labels);
    for (int64_t t = 0; t < T; t++) {
        tokens[t] %= 32;
        labels[t] %= 32;
    }
}

static ft_status keep_print(th_rank *r) {
    float values[2 * 32 * 16];
    uint64_t print = UINT64_C(14695981039346656037);
    for (int i = 0; i < ft_llama_param_count(r->model); i++) {
        const ft_llama_param *p = ft_llama_param_at(r->model, i);
        size_t bytes = (size_t)(p->shape[0] * p->shape[1]) * sizeof *values;
        if (bytes > sizeof values) return ft_error(FT_ERR_ARG, "%s is too large here", p->name);
        FT_TRY(ft_llama_export(r->model, p, values));
        print = print_of(print, values, bytes);
        if (ft_ctx_device(r->ctx) != FT_META) FT_TRY(ft_llama_import(r->model, p, values));
    }
    seen.print[r->rank] = print;
    return FT_OK;
}

/* Beside training: an evaluation, a gradient and all weights taken out, the weights put back. */
static ft_status train_moment(th_rank *r, th_moment moment, void *user) {
    (void)user;
    if (moment == TH_STEP_ENDING) {
        const ft_llama_param *p = ft_llama_param_find(r->model, "model.norm.weight");
        float values[64];
        return ft_llama_export_grad(r->model, p, values);
    }
    if (moment != TH_END) return FT_OK;
    ft_tensor *logits;
    FT_TRY(ft_llama_logits(r->model, r->tokens, 1, &logits));
    ft_tensor_free(logits);
    return keep_print(r);
}

static ft_status train_body(ft_ctx *ctx, const program *p) {
    th_job job;
    job.options = &p->train;
    job.result = NULL;
    return th_rank_main(ctx, &job);
}

/* Two layers, hidden 16, 8 tokens in each of 2 micro-batches, bf16, selective recomputation. */
static program training(int stage, ft_switch async, int steps) {
    program p;
    memset(&p, 0, sizeof p);
    snprintf(p.name, sizeof p.name, "stage %d, %s streams, %d step%s", stage,
             async == FT_ON ? "threads as" : "immediate", steps, steps > 1 ? "s" : "");
    p.body = train_body;
    p.launch = ft_config_default();
    p.launch.world = 2;
    p.launch.async = async;
    p.launch.timeline = 1;
    p.launch.timeout_s = 30;
    p.train = th_options_default();
    p.train.model.vocab = 32;
    p.train.model.hidden = 16;
    p.train.model.layers = 2;
    p.train.model.heads = 2;
    p.train.model.kv_heads = 1;
    p.train.model.intermediate = 32;
    p.train.T = 8;
    p.train.dp = 2;
    p.train.samples = 4;
    p.train.micro_batches = 2;
    p.train.steps = steps;
    p.train.zero.stage = stage;
    p.train.zero.dtype = FT_BF16;
    p.train.data = small_data;
    p.train.hook = train_moment;
    for (int i = 0; i < 2; i++) p.sac[i].kind = FT_SAC_SELECTIVE;
    return p;
}

/* The rest of the options: two copies of two shards, fp32 sums, biases, head norms, a tied head,
   backward in halves, everything recomputed. */
static program training_other(ft_switch async) {
    program p = training(3, async, 1);
    snprintf(p.name, sizeof p.name, "hybrid stage 3, %s streams",
             async == FT_ON ? "threads as" : "immediate");
    p.launch.world = p.train.dp = 4;
    p.train.samples = 8;
    p.train.split = 1;
    p.train.zero.shard_ranks = 2;
    p.train.zero.accumulate_dtype = FT_ZERO_F32;
    p.train.zero.prefetch = 2;
    p.train.zero.reduce_overlap = FT_OFF;
    p.train.model.tie_embeddings = 1;
    p.train.model.qkv_bias = p.train.model.o_bias = p.train.model.mlp_bias = 1;
    p.train.model.qk_norm = 1;
    for (int i = 0; i < 2; i++) p.sac[i].kind = FT_SAC_FULL;
    return p;
}

/* Every kind of collective, once on the compute stream. */
static ft_status kinds_body(ft_ctx *ctx, const program *p) {
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    ft_tensor *full, *shard, *in;
    ft_mesh mesh;
    ft_group *g;
    ft_p2p ops[2];
    float values[16];
    int64_t n = 16, each = 8;
    (void)p;
    FT_TRY(ft_mesh_create(ctx, 2, 1, 1, &mesh));
    FT_TRY(ft_mesh_group(ctx, &mesh, FT_AXIS_DP, "kinds", &g));
    FT_TRY(ft_tensor_create(ctx, &full, FT_F32, 1, &n, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(ctx, &in, FT_F32, 1, &each, FT_TAG_OTHER));
    FT_TRY(ft_tensor_view(full, &shard, ft_group_rank(g) * each, 1, &each));
    FT_TRY(ft_fill(full, 1 + ft_rank(ctx), s));
    FT_TRY(ft_reduce_scatter(g, s, full, shard));
    FT_TRY(ft_all_gather(g, s, shard, full));
    FT_TRY(ft_all_reduce(g, s, full));
    FT_TRY(ft_broadcast(g, s, full, 1));
    FT_TRY(ft_barrier(g, s));
    for (int i = 0; i < 2; i++) {
        ops[i].peer = 1 - ft_group_rank(g);
        ops[i].is_send = i;
        ops[i].tensor = i ? shard : in;
    }
    FT_TRY(ft_exchange(g, s, 2, ops));
    FT_TRY(ft_agree(g, "a value", 7));
    FT_TRY(ft_copy(shard, in, s));
    FT_TRY(ft_download(full, values));
    seen.print[ft_rank(ctx)] = print_of(1, values, sizeof values);
    return FT_OK;
}

static program kinds(ft_switch async) {
    program p = training(0, async, 1);
    snprintf(p.name, sizeof p.name, "every kind of collective, %s streams",
             async == FT_ON ? "threads as" : "immediate");
    p.body = kinds_body;
    return p;
}

/* A timeline of which the 1025th event, more than it has room for at first, is a free. */
static ft_status timeline_body(ft_ctx *ctx, const program *p) {
    enum { ALIVE = 519 };
    static ft_tensor *alive[2][ALIVE];
    ft_tensor **mine = alive[ft_rank(ctx)];
    const ft_mem_event *events;
    ft_mem_stats stats;
    int64_t one = 1, sum = 0;
    (void)p;
    for (int i = 0; i < ALIVE; i++)
        FT_TRY(ft_tensor_create(ctx, &mine[i], FT_F32, 1, &one, FT_TAG_OTHER));
    for (int i = 0; i < ALIVE; i++) ft_tensor_free(mine[i]);
    for (int i = 0; i < ALIVE; i++) {
        FT_TRY(ft_tensor_create(ctx, &mine[i], FT_F32, 1, &one, FT_TAG_OTHER));
        if (i % 3) ft_tensor_free(mine[i]);
    }
    int64_t n = ft_mem_timeline(ctx, &events);
    for (int64_t i = 0; i < n; i++) sum += events[i].delta_bytes;
    ft_mem_get(ctx, &stats);
    if (n != 2 * ALIVE + ALIVE + ALIVE * 2 / 3 || sum != (int64_t)stats.live_bytes)
        return ft_error(FT_ERR_DATA, "%lld events that leave %lld bytes of %zu", (long long)n,
                        (long long)sum, stats.live_bytes);
    seen.print[ft_rank(ctx)] = 1;
    return FT_OK;
}

/* ---------------------------------------------------------------------------------------- runs */

static char watched[256]; /* what the watchdog says */

static void watchdog(int signal_number) {
    (void)signal_number;
    ssize_t written = write(STDERR_FILENO, watched, strlen(watched));
    (void)written;
    _exit(1);
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

typedef struct outcome {
    ft_status status;
    char text[TEXT_BYTES];
    double seconds;
} outcome;

static int runs, problems, passed_over, passed_line;

static void problem(const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 1, 2)))
#endif
    ;

static void problem(const char *format, ...) {
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (++problems <= 20) print_error("%s\n", text);
}

static void forget(void) {
    memset(hook.count, 0, sizeof hook.count);
    hook.fired = hook.fired_line = hook.next_rank = hook.damaged = 0;
    memset(sabotage.count, 0, sizeof sabotage.count);
    sabotage.fired = 0;
    memset(seen.began, 0, sizeof seen.began);
    memset(seen.status, 0, sizeof seen.status);
    memset(seen.text, 0, sizeof seen.text);
    memset(seen.print, 0, sizeof seen.print);
    seen.n_peaks = 0;
}

/* One launch, with whatever hook and sabotage are set to refuse. [F3] holds for each. */
static outcome run(program *p, const char *what) {
    outcome o;
    memset(&o, 0, sizeof o);
    p->train.sac = p->sac;
    forget();
    snprintf(watched, sizeof watched, "\nHANGS: %s: %s\n", p->name, what);
    alarm(240);
    double begin = now_s();
    o.status = ft_launch(&p->launch, program_rank, p);
    o.seconds = now_s() - begin;
    alarm(0);
    runs++;
    if (o.status != FT_OK) snprintf(o.text, sizeof o.text, "%s", ft_last_error());
    if (hook.blocks || hook.objects || hook.damaged) {
        problem("%s: %s: %ld blocks, %ld threads, mutexes and conditions not given back%s (%s)",
                p->name, what, hook.blocks, hook.objects,
                hook.damaged ? "; one was freed twice or in use" : "", o.text);
        hook.blocks = hook.objects = 0;
    }
    return o;
}

/* A run in which nothing is refused. */
static void run_clean(program *p) {
    hook.fail_at = sabotage.at = 0;
    outcome o = run(p, "undisturbed");
    if (o.status != FT_OK) fail_msg("%s: %s", p->name, o.text);
}

/* [F1] [F2] [F4] `rank`: the one that failed, -1 if it may be any. */
static void check_failed(const program *p, const char *what, const outcome *o, int rank) {
    char named[32];
    snprintf(named, sizeof named, "rank %d: ", rank);
    if (o->seconds > p->launch.timeout_s / 2)
        problem("%s: %s: took %.1f s (%s)", p->name, what, o->seconds, o->text);
    if (rank >= 0 && strncmp(o->text, named, strlen(named)) != 0)
        problem("%s: %s: rank %d is not named: %s", p->name, what, rank, o->text);
    for (int r = 0; r < p->launch.world; r++) {
        const char *text = seen.text[r];
        if (!seen.began[r]) continue;
        if (seen.status[r] == FT_OK) problem("%s: %s: rank %d saw no error", p->name, what, r);
        if (seen.status[r] != FT_ERR_PEER) continue;
        snprintf(named, sizeof named, "rank %d failed: ", rank);
        if (rank == r || (rank >= 0 && strncmp(text, named, strlen(named)) != 0))
            problem("%s: %s: rank %d was told %s", p->name, what, r, text);
    }
}

static int names_memory(const char *text) {
    static const char *const words[] = {"memory", " bytes", "mutex", "thread"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strstr(text, words[i])) return 1;
    return 0;
}

/* One refused acquisition; `prints` are the undisturbed results. */
static void refuse(program *p, int d, long k, int stay, const uint64_t *prints) {
    char what[128];
    char whose[32] = "the launch";
    if (d >= D_RANK) snprintf(whose, sizeof whose, "rank %d", d - D_RANK);
    if (d == D_SHARED) snprintf(whose, sizeof whose, "what ranks share");
    snprintf(what, sizeof what, "acquisition %ld of %s%s", k, whose,
             stay ? " and all after it" : "");
    hook.fail_domain = d;
    hook.fail_at = k;
    hook.stay = stay;
    outcome o = run(p, what);
    hook.fail_at = hook.stay = 0;
    size_t used = strlen(what);
    snprintf(what + used, sizeof what - used, " (line %d)", hook.fired_line);
    if (!hook.fired) {
        problem("%s: %s: did not come", p->name, what);
    } else if (o.status != FT_OK) {
        if (o.status != FT_ERR_OOM || !names_memory(o.text))
            problem("%s: %s: %s: %s", p->name, what, ft_status_name(o.status), o.text);
        check_failed(p, what, &o, d >= D_RANK && !stay ? d - D_RANK : -1);
    } else { /* [F5] */
        passed_over++;
        if (p->launch.async != FT_ON || stay)
            problem("%s: %s: the launch succeeded", p->name, what);
        if (memcmp(prints, seen.print, sizeof seen.print) != 0)
            problem("%s: %s: another result", p->name, what);
    }
}

/* --------------------------------------------------------------------------------------- tests */

/* What a sweep takes one of: the environment's, or as many more as a slow build or delays ask. */
static long stride(long wanted) {
    const char *given = getenv("FT_FAILURE_STRIDE");
    const char *delay = getenv("FT_DELAY_US");
    if (given && atol(given) > 0) return atol(given);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    wanted *= 11;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
    wanted *= 11;
#endif
#endif
    if (delay && atol(delay) > 0) wanted *= 3;
    return wanted;
}

static double sweep_begin_s;
static int sweep_begin_runs;

static void sweep_begin(void) {
    sweep_begin_s = now_s();
    sweep_begin_runs = runs;
    problems = passed_over = 0;
}

static void sweep_end(const program *p, const char *what) {
    print_message("%s: %s: %d runs, %d passed over, %.1f s\n", p->name, what,
                  runs - sweep_begin_runs, passed_over, now_s() - sweep_begin_s);
    if (problems) fail_msg("%s: %d problems", p->name, problems);
}

/* Every step-th acquisition of every thread, every stay_step-th with all that follow, and of each
   line that acquires something the first and the last. */
static void sweep_acquisitions(program *p, long step, long stay_step) {
    long count[DOMAINS];
    uint64_t prints[MAX_RANKS];
    memset(hook.first, 0, sizeof hook.first);
    memset(hook.last, 0, sizeof hook.last);
    sweep_begin();
    run_clean(p);
    memcpy(count, hook.count, sizeof count);
    memcpy(prints, seen.print, sizeof prints);
    run_clean(p);
    if (memcmp(count, hook.count, sizeof count) || memcmp(prints, seen.print, sizeof prints))
        fail_msg("%s: two runs differ", p->name);
    assert_int_equal(count[D_STREAM], 0); /* work on a stream needs no memory */
    static long first[DOMAINS][MAX_LINES], last[DOMAINS][MAX_LINES];
    memcpy(first, hook.first, sizeof first);
    memcpy(last, hook.last, sizeof last);
    for (int d = 0; d < D_STREAM; d++) {
        for (long k = 1 + d % step; k <= count[d]; k += step) refuse(p, d, k, 0, prints);
        for (long k = 1 + d % stay_step; k <= count[d]; k += stay_step)
            refuse(p, d, k, 1, prints);
        for (int line = 0; line < MAX_LINES && step > 1; line++) {
            if (first[d][line]) refuse(p, d, first[d][line], 0, prints);
            if (last[d][line] > first[d][line]) refuse(p, d, last[d][line], 0, prints);
        }
    }
    run_clean(p); /* and nothing of all this stays behind */
    if (memcmp(count, hook.count, sizeof count) || memcmp(prints, seen.print, sizeof prints))
        problem("%s: another result after the sweep", p->name);
    sweep_end(p, "acquisitions");
}

static void test_acquisitions_stage3(void **state) {
    program p = training(3, FT_OFF, 1);
    (void)state;
    sweep_acquisitions(&p, stride(1), stride(7)); /* every one */
}

static void test_acquisitions_stages(void **state) {
    (void)state;
    for (int stage = 0; stage < 3; stage++) {
        program p = training(stage, FT_OFF, 1);
        sweep_acquisitions(&p, stride(stage ? 11 : 1), stride(29)); /* stage 0: every one */
    }
    program p = training(3, FT_OFF, 2);
    sweep_acquisitions(&p, stride(13), stride(41));
    p = training_other(FT_OFF);
    sweep_acquisitions(&p, stride(23), stride(97));
}

static void test_acquisitions_async(void **state) {
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        program p = training(stage, FT_ON, 1);
        sweep_acquisitions(&p, stride(stage % 3 ? 47 : 5), stride(53));
    }
    program p = training_other(FT_ON);
    sweep_acquisitions(&p, stride(71), stride(197));
}

static void test_acquisitions_kinds(void **state) {
    (void)state;
    program timeline = training(0, FT_OFF, 1);
    snprintf(timeline.name, sizeof timeline.name, "a long timeline");
    timeline.body = timeline_body;
    sweep_acquisitions(&timeline, stride(67), stride(199));
    for (int async = 0; async < 2; async++) {
        program p = kinds(async ? FT_ON : FT_OFF);
        sweep_acquisitions(&p, 1, 3);
    }
}

/* A stream that fails frees what another stream uses only when that one is done: the wait between
   them holds, whether the failure came before the wait was queued or after it. */
static void sleep_ms(int ms) {
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = ms * 1000000L;
    nanosleep(&t, NULL);
}

static ft_status slow_user(void *arg) {
    (void)arg;
    sleep_ms(30);
    pthread_mutex_lock(&hook.lock);
    hook.in_use = NULL;
    pthread_mutex_unlock(&hook.lock);
    return FT_OK;
}

static ft_status late_failure(void *arg) {
    (void)arg;
    sleep_ms(10);
    return ft_error(FT_ERR_IO, "a stream's work failed");
}

static ft_status failed_stream_body(ft_ctx *ctx, const program *p) {
    ft_stream *compute = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    ft_stream *gather = ft_stream_get(ctx, FT_STREAM_GATHER);
    int64_t n = 1000;
    ft_tensor *t;
    FT_TRY(ft_tensor_create(ctx, &t, FT_F32, 1, &n, FT_TAG_OTHER));
    pthread_mutex_lock(&hook.lock);
    hook.in_use = (const char *)ft_data(t);
    pthread_mutex_unlock(&hook.lock);
    FT_TRY(ft_stream_run(gather, slow_user, NULL, 0));
    FT_TRY(ft_stream_run(compute, late_failure, NULL, 0));
    if (p->train.split) (void)ft_stream_sync(compute); /* it has failed before the wait comes */
    ft_status status = ft_stream_wait(compute, ft_event_record(gather));
    ft_tensor_free(t);
    return p->train.split ? status : ft_sync(ctx);
}

static void test_failed_stream(void **state) {
    (void)state;
    for (int before = 0; before < 2; before++) {
        program p = training(0, FT_ON, 1);
        snprintf(p.name, sizeof p.name, "a failed stream");
        p.body = failed_stream_body;
        p.launch.world = 1;
        p.train.split = before;
        sweep_begin();
        outcome o = run(&p, before ? "failed before the wait" : "failed after the wait");
        assert_string_equal(o.text, "rank 0: a stream's work failed");
        assert_int_equal(o.status, FT_ERR_IO);
        assert_int_equal(seen.status[0], FT_ERR_IO);
        sweep_end(&p, "waits");
    }
}

/* The limit of the device's memory, one byte below each new peak: the allocation that makes the
   peak is the first that does not fit. */
static void sweep_limit(program *p) {
    static size_t peaks[4096];
    int n;
    sweep_begin();
    run_clean(p);
    n = seen.n_peaks;
    assert_true(n > 20);
    memcpy(peaks, seen.peaks, sizeof peaks);
    for (int i = 0; i < n; i += (int)stride(1)) {
        char what[64], live[64];
        snprintf(what, sizeof what, "a limit below peak %d, %zu bytes", i, peaks[i]);
        snprintf(live, sizeof live, "live of a limit of %zu", peaks[i] - 1);
        p->launch.memory_limit = peaks[i] - 1;
        outcome o = run(p, what);
        if (o.status != FT_ERR_OOM || !strstr(o.text, "do not fit") || !strstr(o.text, live))
            problem("%s: %s: %s: %s", p->name, what, ft_status_name(o.status), o.text);
        check_failed(p, what, &o, -1);
    }
    p->launch.memory_limit = peaks[n - 1];
    run_clean(p);
    sweep_end(p, "limits");
}

static void test_limits(void **state) {
    (void)state;
    for (int async = 0; async < 2; async++)
        for (int stage = 0; stage < 4; stage += 3) {
            program p = training(stage, async ? FT_ON : FT_OFF, 1);
            sweep_limit(&p);
        }
}

/* Every step-th collective of each rank, spoilt in one way. */
static void sweep_collectives(program *p, spoil how, int step) {
    int count[MAX_RANKS];
    sweep_begin();
    run_clean(p);
    memcpy(count, sabotage.count, sizeof count);
    sabotage.how = how;
    double timeout_s = p->launch.timeout_s;
    if (how == S_SKIPPED) p->launch.timeout_s = 1; /* peers can only wait for what does not come */
    for (int r = 0; r < p->launch.world; r++) {
        assert_true(count[r] > 5);
        /* Who leaves out the last one has nothing left in which to learn of it. */
        int n = count[r] - (how == S_SKIPPED);
        for (int k = 1 + (step > 1 ? r : 0); k <= n; k += step) {
            char what[192];
            snprintf(what, sizeof what, "collective %d of rank %d %s", k, r, spoil_names[how]);
            sabotage.rank = r;
            sabotage.at = k;
            outcome o = run(p, what);
            size_t used = strlen(what);
            snprintf(what + used, sizeof what - used, " (%s)", sabotage.what);
            int is_named = how >= S_OTHER || strstr(o.text, sabotage.what);
            int is_kind = how < S_OTHER ? o.status == FT_ERR_IO : o.status == FT_ERR_COMM ||
                          (how == S_SKIPPED && o.status == FT_ERR_TIMEOUT);
            if (!sabotage.fired || !is_named || !is_kind)
                problem("%s: %s: %s: %s", p->name, what, ft_status_name(o.status), o.text);
            if (how == S_OTHER && !strstr(o.text, "disagree"))
                problem("%s: %s: %s", p->name, what, o.text);
            if (how == S_SKIPPED) o.seconds -= p->launch.timeout_s;
            check_failed(p, what, &o, how < S_OTHER ? r : -1);
        }
    }
    p->launch.timeout_s = timeout_s;
    sabotage.at = 0;
    run_clean(p);
    sweep_end(p, spoil_names[how]);
}

static void test_collectives(void **state) {
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int async = 0; async < 2; async++) {
            program p = training(stage, async ? FT_ON : FT_OFF, 1);
            for (int how = 0; how < S_SKIPPED; how++)
                sweep_collectives(&p, (spoil)how, (int)stride(stage % 3 ? 5 : 1));
        }
}

static void test_collectives_other(void **state) {
    (void)state;
    for (int async = 0; async < 2; async++) {
        program p = training_other(async ? FT_ON : FT_OFF);
        for (int how = 0; how < S_SKIPPED; how++)
            sweep_collectives(&p, (spoil)how, (int)stride(19));
        p = kinds(async ? FT_ON : FT_OFF);
        for (int how = 0; how < S_SKIPPED; how++) sweep_collectives(&p, (spoil)how, 1);
    }
}

/* A rank that leaves a collective out is found by its peers, at the latest at the timeout. */
static void test_collectives_skipped(void **state) {
    (void)state;
    program p = kinds(FT_OFF);
    sweep_collectives(&p, S_SKIPPED, 3);
    for (int async = 0; async < 2; async++) {
        p = training(3, async ? FT_ON : FT_OFF, 1);
        sweep_collectives(&p, S_SKIPPED, (int)stride(67));
    }
}

/* ft_sac_fit: its own memory, and that of the step which it runs on meta. All of the first run,
   then a few, and the first and the last of each line of its own. */
static ft_status fit(program *p, outcome *o) {
    ft_sac_budget budget;
    memset(&budget, 0, sizeof budget);
    budget.segments = 2;
    budget.config = p->launch;
    budget.step = program_rank;
    budget.user = p;
    budget.sac = p->sac;
    budget.budget_bytes = 1;
    p->train.sac = p->sac;
    memset(o, 0, sizeof *o);
    forget();
    alarm(240);
    double begin = now_s();
    ft_status status = ft_sac_fit(&budget);
    o->seconds = now_s() - begin;
    alarm(0);
    runs++;
    o->status = status;
    if (status != FT_OK) snprintf(o->text, sizeof o->text, "%s", ft_last_error());
    if (hook.blocks || hook.objects || hook.damaged) {
        problem("%s: %ld blocks, %ld objects were not given back (%s)", p->name, hook.blocks,
                hook.objects, o->text);
        hook.blocks = hook.objects = 0;
    }
    return status;
}

/* `undisturbed`: what ft_sac_fit says then. [F5] */
static void refuse_fit(program *p, long k, const char *undisturbed) {
    outcome o;
    snprintf(watched, sizeof watched, "\nHANGS: ft_sac_fit: acquisition %ld\n", k);
    hook.fail_domain = D_MAIN;
    hook.fail_at = k;
    ft_status status = fit(p, &o);
    hook.fail_at = 0;
    if (hook.fired && strcmp(o.text, undisturbed) == 0) {
        if (passed_over++ == 0) passed_line = hook.fired_line;
        if (passed_line == hook.fired_line) return;
    }
    if (!hook.fired || status != FT_ERR_OOM || !names_memory(o.text))
        problem("ft_sac_fit: acquisition %ld (line %d): %s: %s", k, hook.fired_line,
                ft_status_name(status), o.text);
}

static void test_sac_fit(void **state) {
    program p = training(3, FT_OFF, 1);
    static long first[MAX_LINES], last[MAX_LINES];
    outcome o;
    (void)state;
    p.launch.device = FT_META;
    snprintf(p.name, sizeof p.name, "ft_sac_fit");
    hook.one_domain = 1;
    sweep_begin();
    run_clean(&p);
    long one = hook.count[D_MAIN];
    memset(hook.first, 0, sizeof hook.first);
    memset(hook.last, 0, sizeof hook.last);
    assert_int_equal(fit(&p, &o), FT_ERR_OOM); /* a byte is not enough: every part of it ran */
    assert_non_null(strstr(o.text, "no recomputation policy"));
    long all = hook.count[D_MAIN];
    memcpy(first, hook.first[D_MAIN], sizeof first);
    memcpy(last, hook.last[D_MAIN], sizeof last);
    for (long k = 1; k <= one; k += stride(1)) refuse_fit(&p, k, o.text);
    long some = stride(1) > 1 ? 2 : 10; /* each takes many runs */
    for (long k = one; k <= all; k += all / some) refuse_fit(&p, k, o.text);
    for (int line = 0; line < MAX_LINES; line++) {
        if (first[line] <= one) continue; /* a step's */
        refuse_fit(&p, first[line], o.text);
        refuse_fit(&p, last[line], o.text);
    }
    hook.one_domain = 0;
    sweep_end(&p, "acquisitions");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_acquisitions_stage3),
        cmocka_unit_test(test_acquisitions_stages),
        cmocka_unit_test(test_acquisitions_async),
        cmocka_unit_test(test_acquisitions_kinds),
        cmocka_unit_test(test_failed_stream),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_collectives_other),
        cmocka_unit_test(test_collectives_skipped),
        cmocka_unit_test(test_sac_fit),
    };
    signal(SIGALRM, watchdog);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
