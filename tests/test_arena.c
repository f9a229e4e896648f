/* Three allocators, one program: what system, caching and arena must have in common, and where an
   arena puts things.

   cc -std=c11 -I. tests/test_arena.c -lcmocka -lm -lpthread

   The trainer's step gives the same weights and the same books under each, also with streams as
   threads, random delays and freed memory overwritten; no two buffers share bytes at one time; a
   plan that does not fit the program is an error that names what came instead; and the arena is at
   most 1.05 times the peak, in these runs and in the 48 cells of the memory tables. */

#define MEMORY_TABLES_MAIN memory_tables_main
#include "examples/memory_tables.c"

#include <setjmp.h>
#include <cmocka.h>

#include "check.h"

/* ThreadSanitizer slows runs down twenty times; which layout it sees does not matter much, and
   placing has no threads. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(UNDER_TSAN)
enum { EVERY = 7, SEEDS = 2, LAST_CELL = 8 };
#else
enum { EVERY = 1, SEEDS = 12, LAST_CELL = CELLS };
#endif

static struct { double worst, sum; int n; } arenas; /* reserved / peak of every one that is made */

static void note_arena(const ft_mem_plan *plan, int world)
{
    for (int r = 0; r < world; r++) {
        ft_mem_plan_info info;
        assert_int_equal(ft_mem_plan_get(plan, r, &info), FT_OK);
        assert_true(info.peak_bytes > 0 && info.reserved_bytes >= info.peak_bytes);
        double ratio = (double)info.reserved_bytes / (double)info.peak_bytes;
        if (!(ratio <= 1.05))
            fail_msg("rank %d: %zu bytes reserved for a peak of %zu", r, info.reserved_bytes,
                     info.peak_bytes);
        if (ratio > arenas.worst) arenas.worst = ratio;
        arenas.sum += ratio;
        arenas.n++;
    }
}

/* No two of a phase's items overlap in time and in place; none touches what the set-up left. */
static void check_places(const ft_mem_plan *plan, int world)
{
    for (int r = 0; r < world; r++) {
        const ft__rank_plan *rank = &plan->ranks[r];
        for (int f = 0; f < rank->n_phases; f++) {
            const ft__phase *phase = &rank->phases[f];
            for (int64_t i = 0; i < phase->n; i++) {
                const ft__item *a = &phase->items[i];
                assert_int_equal(a->offset % FT_ALIGN_BYTES, 0);
                assert_true(a->offset + a->bytes <= rank->info.reserved_bytes);
                if (f) assert_true(a->offset >= rank->info.persistent_bytes);
                if (f) assert_true(a->end != INT64_MAX);
                for (int64_t j = i + 1; j < phase->n && phase->items[j].begin < a->end; j++) {
                    const ft__item *b = &phase->items[j];
                    if (a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes)
                        fail_msg("%s: allocations %lld and %lld overlap", phase->name, (long long)i,
                                 (long long)j);
                }
            }
        }
    }
}

/* ------------------------------------------------------------------------------- the trainer */

typedef struct trained {
    uint64_t hash;
    double loss, eval_loss;
    int ranks;
    rank_result *results; /* [ranks] */
} trained;

static ft_status train_with(program *p, ft_allocator allocator, trained *out)
{
    int ranks;
    p->set.allocator = allocator;
    FT_TRY(open_inputs(p));
    ranks = rank_count(&p->set);
    if (allocator == FT_ALLOC_ARENA) FT_TRY(ft_mem_plan_create(ranks, &p->mem_plan));
    job plan = job_create(p);
    FT_TRY(choose_recompute(p, &plan));
    FT_TRY(launch(&plan, FT_META));
    if (p->mem_plan) {
        FT_TRY(ft_mem_plan_place(p->mem_plan));
        note_arena(p->mem_plan, ranks);
        check_places(p->mem_plan, ranks);
    }
    job work = job_create(p);
    work.sampler = &p->sampler;
    work.steps = p->set.steps;
    work.results = p->run;
    work.quiet = 1;
    FT_TRY(launch(&work, FT_CPU));
    out->hash = work.hash;
    out->loss = work.report.loss;
    out->eval_loss = work.eval_loss;
    out->ranks = ranks;
    out->results = p->run;
    p->run = NULL;
    if (planned_wrong(ranks, p->plan, out->results))
        return ft_error(FT_ERR_DATA, "the run is not as planned");
    return FT_OK;
}

static trained train_flags(const char *flags, ft_allocator allocator)
{
    char line[LINE_BYTES], *words[MAX_WORDS];
    int n = 0;
    program p;
    trained out;
    memset(&p, 0, sizeof p);
    memset(&out, 0, sizeof out);
    snprintf(line, sizeof line, "train_llama --data LICENSE --steps 3 --hidden 32 --layers 3 "
             "--heads 4 --kv-heads 2 --intermediate 48 --seq-len 16 --hash --vocab 131 %s", flags);
    for (char *at = strtok(line, " "); at; at = strtok(NULL, " ")) words[n++] = at;
    assert_true(parse_options(n, words, &p.set));
    ft_status status = train_with(&p, allocator, &out);
    char text[1024];
    snprintf(text, sizeof text, "%s", ft_last_error());
    free_program(&p);
    if (status != FT_OK) fail_msg("%s, allocator %d: %s", flags, (int)allocator, text);
    return out;
}

static void check_same(const char *flags, const trained *a, const trained *b)
{
    if (a->hash != b->hash || a->loss != b->loss || a->eval_loss != b->eval_loss)
        fail_msg("%s: other results: %016llx and %016llx", flags, (unsigned long long)a->hash,
                 (unsigned long long)b->hash);
    for (int r = 0; r < a->ranks; r++) {
        const ft_mem_stats *x = &a->results[r].memory, *y = &b->results[r].memory;
        assert_int_equal(x->peak_bytes, y->peak_bytes);
        assert_int_equal(x->live_bytes, y->live_bytes);
        assert_memory_equal(x->at_peak, y->at_peak, sizeof x->at_peak);
        assert_memory_equal(x->highest, y->highest, sizeof x->highest);
        assert_int_equal(x->peak_moment, y->peak_moment);
    }
}

static void same_under_all(const char *flags)
{
    trained base = train_flags(flags, FT_ALLOC_SYSTEM);
    for (int k = FT_ALLOC_CACHING; k <= FT_ALLOC_ARENA; k++) {
        trained other = train_flags(flags, (ft_allocator)k);
        check_same(flags, &base, &other);
        for (int r = 0; r < other.ranks; r++) {
            assert_int_equal(base.results[r].memory.reserved_bytes, 0);
            assert_true(other.results[r].memory.reserved_bytes >=
                        other.results[r].memory.peak_bytes);
        }
        free(other.results);
    }
    free(base.results);
}

static const char *const layouts[] = {
    "",
    "--sac full",
    "--dp 2",
    "--dp 3 --zero-stage 1 --sac selective",
    "--dp 2 --zero-stage 2 --micro-batch-size 2 --micro-batches 3",
    "--dp 4 --zero-stage 3 --sac full --eval-data Makefile",
    "--dp 2 --zero-stage 3 --prefetch 2 --reduce-overlap 0 --micro-batch-size 2 --micro-batches 2",
    "--dp 2 --zero-stage 3 --tie-embeddings --dtype bf16 --sac selective",
    "--dp 4 --zero-stage 2 --shard-ranks 2 --accumulate-dtype fp32 --dtype bf16 --micro-batches 2",
    "--dp 2 --zero-stage 3 --keep-gathered 1 --micro-batch-size 2 --micro-batches 2",
    "--tp 2 --sp --zero-stage 1",
    "--pp 3 --micro-batch-size 2 --micro-batches 4 --eval-data Makefile --eval-every 1",
    "--dp 2 --pp 3 --zero-stage 3 --micro-batch-size 2 --micro-batches 4 --schedule zb-h1",
    "--pp 3 --zero-stage 2 --dp 2 --micro-batch-size 1 --micro-batches 6 --schedule gpipe",
    "--dp 2 --tp 2 --pp 2 --zero-stage 3 --sac full --sp --micro-batch-size 2 --micro-batches 2",
    "--dp 2 --sac budget=600000 --zero-stage 1",
};

enum { LAYOUTS = (int)(sizeof layouts / sizeof layouts[0]) };

static void results_and_books_are_the_same(void **state)
{
    (void)state;
    for (int i = 0; i < LAYOUTS; i += EVERY) same_under_all(layouts[i]);
}

/* Streams as threads, random delays, freed memory poisoned: a missing wait would show. */
static void the_same_with_streams_as_threads(void **state)
{
    (void)state;
    assert_int_equal(setenv("FT_CPU_ASYNC", "1", 1), 0);
    assert_int_equal(setenv("FT_DELAY_US", "200", 1), 0);
    for (int i = 2; i < LAYOUTS; i += 2 * EVERY) same_under_all(layouts[i]);
    unsetenv("FT_CPU_ASYNC");
    unsetenv("FT_DELAY_US");
}

static void the_48_cells(void **state)
{
    (void)state;
    for (int how = LEANEST; how <= DEFAULTS; how++)
        for (int i = 0; i < LAST_CELL; i++) {
            char line[LINE_BYTES], *words[MAX_WORDS];
            program p;
            memset(&p, 0, sizeof p);
            assert_true(parse_options(cell_words(&cells[i], (variant)how, line, words), words,
                                      &p.set));
            assert_int_equal(open_inputs(&p), FT_OK);
            assert_int_equal(ft_mem_plan_create(8, &p.mem_plan), FT_OK);
            job plan = job_create(&p);
            assert_int_equal(choose_recompute(&p, &plan), FT_OK);
            if (launch(&plan, FT_META) != FT_OK) fail_msg("cell %d: %s", i + 1, ft_last_error());
            assert_int_equal(ft_mem_plan_place(p.mem_plan), FT_OK);
            note_arena(p.mem_plan, 8);
            for (int r = 0; r < 8; r++) {
                ft_mem_plan_info info;
                assert_int_equal(ft_mem_plan_get(p.mem_plan, r, &info), FT_OK);
                assert_int_equal(info.peak_bytes, p.plan[r].memory.peak_bytes);
            }
            if (how == LEANEST && cells[i].layers < 64) check_places(p.mem_plan, 8);
            free_program(&p);
        }
}

/* --------------------------------------------------------------------------- order of streams */

static ft_status slow(void *arg)
{
    struct timespec pause;
    pause.tv_sec = 0;
    pause.tv_nsec = *(long *)arg;
    nanosleep(&pause, NULL);
    return FT_OK;
}

/* Memory goes from a slow stream to a quick one, and back: the second owner's value must not be
   overwritten by what the first one's stream still has to do (its poison comes last). */
static ft_status hand_over(ft_ctx *ctx, void *user)
{
    ft_stream *a = ft_stream_get(ctx, FT_STREAM_COMPUTE), *b = ft_stream_get(ctx, FT_STREAM_GATHER);
    long pause = 20000000;
    int64_t n = 5000, part = 2000;
    float values[5000];
    ft_tensor *x, *y, *z;
    (void)user;
    FT_TRY(ft_tensor_empty(ctx, &x, FT_F32, 1, &n));
    FT_TRY(ft_tensor_empty(ctx, &y, FT_F32, 1, &n));
    FT_TRY(ft_tensor_empty(ctx, &z, FT_F32, 1, &part));
    FT_TRY(ft_mem_phase_begin(ctx, "hand over"));
    for (int i = 0; i < 4; i++) {
        ft_stream *from = i & 1 ? b : a, *to = i & 1 ? a : b;
        FT_TRY(ft_tensor_attach(x, FT_TAG_ACT, from));
        FT_TRY(ft_stream_run(from, slow, &pause, sizeof pause));
        FT_TRY(ft_fill(x, 1, from));
        FT_TRY(ft_tensor_detach(x, from));
        if (i < 2) { /* as a whole, or a part of what was freed */
            FT_TRY(ft_tensor_attach(y, FT_TAG_ACT, to));
            FT_TRY(ft_fill(y, 2 + i, to));
            FT_TRY(ft_sync(ctx));
            FT_TRY(ft_download(y, values));
            if (ft_ctx_device(ctx) != FT_META)
                for (int k = 0; k < n; k++) CHECK(values[k] == (float)(2 + i));
            FT_TRY(ft_tensor_detach(y, to));
        } else {
            FT_TRY(ft_tensor_attach(z, FT_TAG_ACT, to));
            FT_TRY(ft_fill(z, 2 + i, to));
            FT_TRY(ft_sync(ctx));
            FT_TRY(ft_download(z, values));
            if (ft_ctx_device(ctx) != FT_META)
                for (int k = 0; k < part; k++) CHECK(values[k] == (float)(2 + i));
            FT_TRY(ft_tensor_detach(z, to));
        }
    }
    return ft_mem_phase_end(ctx);
}

static ft_status run_under(ft_allocator allocator, ft_switch async, ft_rank_fn planned,
                           ft_rank_fn run, void *user)
{
    ft_config config = ft_config_default();
    ft_status status = FT_OK;
    ft_mem_plan *plan = NULL;
    if (allocator == FT_ALLOC_ARENA) {
        assert_int_equal(ft_mem_plan_create(1, &plan), FT_OK);
        config.device = FT_META;
        config.mem_plan = plan;
        status = ft_launch(&config, planned, user);
        if (status == FT_OK) status = ft_mem_plan_place(plan);
    }
    config.device = FT_CPU;
    config.allocator = allocator;
    config.async = async;
    if (status == FT_OK) status = ft_launch(&config, run, user);
    ft_mem_plan_free(plan);
    return status;
}

static void the_next_owner_waits_for_the_last_one(void **state)
{
    (void)state;
    for (int k = FT_ALLOC_SYSTEM; k <= FT_ALLOC_ARENA; k++)
        for (int async = FT_ON; async <= FT_OFF; async++)
            if (run_under((ft_allocator)k, (ft_switch)async, hand_over, hand_over, NULL) != FT_OK)
                fail_msg("allocator %d, async %d: %s", k, async, ft_last_error());
}

/* ---------------------------------------------------------------------------------- deviations */

typedef enum deviation {
    NONE, LARGER, OTHER_TAG, MORE, FEWER, OTHER_PHASE, LEFT_LIVE, FREED_OLDER, NESTED, NO_BEGIN,
    SETUP_LARGER, SOONER, OUTSIDE
} deviation;

static ft_status deviate(ft_ctx *ctx, deviation how)
{
    int64_t n = 100, more = 200, set = how == SETUP_LARGER ? 300 : 50;
    ft_tensor *kept, *x, *y;
    FT_TRY(ft_tensor_create(ctx, &kept, FT_F32, 1, &set, FT_TAG_PARAM));
    if (how == NO_BEGIN) FT_TRY(ft_mem_phase_end(ctx));
    for (int i = 0; i < 3; i++) {
        if (how == OUTSIDE && i == 1) { /* served by chunks, whatever its size */
            FT_TRY(ft_tensor_create(ctx, &x, FT_F32, 1, &more, FT_TAG_ACT));
            FT_TRY(ft_fill(x, 1, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
            ft_tensor_free(x);
        }
        FT_TRY(ft_mem_phase_begin(ctx, how == OTHER_PHASE && i == 2 ? "elsewhere" : "step"));
        FT_TRY(ft_tensor_create(ctx, &x, FT_F32, 1, how == LARGER ? &more : &n,
                                how == OTHER_TAG ? FT_TAG_COMM : FT_TAG_ACT));
        FT_TRY(ft_fill(x, 1, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
        if (how == NESTED) FT_TRY(ft_mem_phase_begin(ctx, "inner"));
        if (how == FREED_OLDER && i == 0) ft_tensor_free(kept);
        if (how == SOONER) ft_tensor_free(x);
        if (how != FEWER) {
            FT_TRY(ft_tensor_create(ctx, &y, FT_F32, 1, &more, FT_TAG_ACT));
            ft_tensor_free(y);
        }
        if (how == MORE) FT_TRY(ft_tensor_create(ctx, &y, FT_F32, 1, &n, FT_TAG_ACT));
        if (how != LEFT_LIVE && how != SOONER) ft_tensor_free(x);
        FT_TRY(ft_mem_phase_end(ctx));
    }
    return FT_OK;
}

static ft_status as_planned(ft_ctx *ctx, void *user)
{
    (void)user;
    return deviate(ctx, NONE);
}

static ft_status otherwise(ft_ctx *ctx, void *user) { return deviate(ctx, *(deviation *)user); }

static void a_deviation_is_named(void **state)
{
    static const struct { deviation how; const char *says; } cases[] = {
        {LARGER, "step: allocation 1 was planned as 512 bytes (act, for a tensor), and comes as "
                 "1024 (act, for a tensor)"},
        {OTHER_TAG, "was planned as 512 bytes (act, for a tensor), and comes as 512 (comm"},
        {MORE, "step: 512 bytes (act, for a tensor) are allocation 3, but only 2 were planned"},
        {FEWER, "step ended after 1 of 2 planned allocations"},
        {OTHER_PHASE, "phase elsewhere is not in the memory plan"},
        {LEFT_LIVE, "phase step does not end as it began: 1 of its allocations are still live"},
        {FREED_OLDER, "it freed 256 bytes (param) that were there before it"},
        {NESTED, "phase inner begins inside phase step"},
        {NO_BEGIN, "no phase has begun"},
        {SETUP_LARGER, "the set-up: allocation 1 was planned as 256 bytes (param, for a tensor), "
                       "and comes as 1280"},
        {SOONER, "step: before allocation 2 (act, for a tensor) 1 buffers were freed, and 0 were "
                 "planned"},
    };
    (void)state;
    assert_int_equal(run_under(FT_ALLOC_ARENA, FT_OFF, as_planned, as_planned, NULL), FT_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        deviation how = cases[i].how;
        assert_int_equal(run_under(FT_ALLOC_ARENA, FT_OFF, as_planned, otherwise, &how),
                         FT_ERR_STATE);
        if (!strstr(ft_last_error(), cases[i].says)) fail_msg("%s", ft_last_error());
    }
    deviation outside = OUTSIDE;
    assert_int_equal(run_under(FT_ALLOC_ARENA, FT_ON, as_planned, otherwise, &outside), FT_OK);
}

static void a_phase_must_be_closed_where_it_is_recorded(void **state)
{
    static const deviation open_ones[] = {LEFT_LIVE, FREED_OLDER, NESTED, NO_BEGIN};
    (void)state;
    for (size_t i = 0; i < sizeof open_ones / sizeof open_ones[0]; i++) {
        deviation how = open_ones[i];
        assert_int_equal(run_under(FT_ALLOC_ARENA, FT_OFF, otherwise, otherwise, &how),
                         FT_ERR_STATE);
    }
}

static void launches_that_cannot_be(void **state)
{
    ft_config config = ft_config_default();
    ft_mem_plan *plan;
    ft_mem_plan_info info;
    (void)state;
    config.allocator = FT_ALLOC_ARENA;
    assert_int_equal(ft_launch(&config, as_planned, NULL), FT_ERR_ARG); /* no plan */
    assert_int_equal(ft_mem_plan_create(0, &plan), FT_ERR_ARG);
    assert_int_equal(ft_mem_plan_create(2, &plan), FT_OK);
    config.mem_plan = plan;
    assert_int_equal(ft_launch(&config, as_planned, NULL), FT_ERR_ARG); /* of another world */
    config.world = 2;
    assert_int_equal(ft_launch(&config, as_planned, NULL), FT_ERR_STATE); /* not placed */
    assert_int_equal(ft_mem_plan_get(plan, 0, &info), FT_ERR_STATE);
    config.device = FT_META;
    config.only_rank = 1;
    assert_int_equal(ft_launch(&config, as_planned, NULL), FT_OK);
    assert_int_equal(ft_launch(&config, as_planned, NULL), FT_ERR_STATE); /* recorded already */
    assert_int_equal(ft_mem_plan_place(plan), FT_OK);
    assert_int_equal(ft_mem_plan_place(plan), FT_ERR_STATE);
    assert_int_equal(ft_mem_plan_get(plan, 2, &info), FT_ERR_ARG);
    config.device = FT_CPU;
    config.only_rank = -1;
    assert_int_equal(ft_launch(&config, as_planned, NULL), FT_ERR_STATE); /* rank 0 has no record */
    assert_non_null(strstr(ft_last_error(), "no record of rank 0"));
    config.memory_limit = 1000;
    config.device = FT_META; /* a placed plan can be tried there, too */
    config.only_rank = 1;
    assert_int_equal(ft_launch(&config, as_planned, NULL), FT_ERR_OOM);
    ft_mem_plan_free(plan);
    ft_mem_plan_free(NULL);
    config = ft_config_default();
    config.allocator = (ft_allocator)9;
    assert_int_equal(ft_launch(&config, as_planned, NULL), FT_ERR_ARG);
    setenv("FT_ALLOCATOR", "arena", 1);
    config.allocator = FT_ALLOC_DEFAULT;
    assert_int_equal(ft_launch(&config, as_planned, NULL), FT_ERR_ARG);
    unsetenv("FT_ALLOCATOR");
}

/* ------------------------------------------------------------------------------ random programs */

typedef struct churn { uint64_t seed; int64_t steps; size_t reserved, peak; } churn;

static uint64_t churn_next(uint64_t *state, uint64_t below)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (*state >> 33) % below;
}

/* Allocates and frees at random, sizes from 4 bytes to megabytes, on all streams; each buffer is
   filled with its own number, which is read back before it is freed. */
static ft_status churn_run(ft_ctx *ctx, void *user)
{
    enum { SLOTS = 40 };
    churn *c = (churn *)user;
    uint64_t state = c->seed;
    ft_tensor *held[SLOTS];
    ft_stream *home[SLOTS];
    float first;
    ft_mem_stats stats;
    memset(held, 0, sizeof held);
    FT_TRY(ft_mem_phase_begin(ctx, "churn"));
    for (int64_t i = 0; i < c->steps + SLOTS; i++) {
        int k = i < c->steps ? (int)churn_next(&state, SLOTS) : (int)(i - c->steps);
        if (held[k]) {
            ft_tensor *view;
            int64_t one = 1;
            FT_TRY(ft_sync(ctx));
            FT_TRY(ft_tensor_view(held[k], &view, ft_numel(held[k]) - 1, 1, &one));
            FT_TRY(ft_download(view, &first));
            if (ft_ctx_device(ctx) != FT_META) CHECK(first == (float)k);
            ft_tensor_free(view);
            FT_TRY(ft_tensor_detach(held[k], home[k]));
            ft_tensor_free(held[k]);
            held[k] = NULL;
        } else if (i < c->steps) {
            uint64_t most = (uint64_t)1 << (4 + churn_next(&state, 15));
            int64_t n = (int64_t)(1 + churn_next(&state, most));
            home[k] = ft_stream_get(ctx, (ft_stream_kind)churn_next(&state, FT_STREAM_COUNT));
            FT_TRY(ft_tensor_empty(ctx, &held[k], FT_F32, 1, &n));
            FT_TRY(ft_tensor_attach(held[k], FT_TAG_ACT, home[k]));
            FT_TRY(ft_fill(held[k], k, home[k]));
        }
    }
    FT_TRY(ft_mem_phase_end(ctx));
    ft_mem_get(ctx, &stats);
    c->reserved = stats.reserved_bytes;
    c->peak = stats.peak_bytes;
    return FT_OK;
}

static void random_programs(void **state)
{
    double worst[FT_ALLOC_ARENA + 1] = {0, 0, 0, 0};
    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++)
        for (int k = FT_ALLOC_CACHING; k <= FT_ALLOC_ARENA; k++)
            for (int async = FT_ON; async <= FT_OFF; async++) {
                churn c;
                memset(&c, 0, sizeof c);
                c.seed = seed;
                c.steps = 400;
                if (run_under((ft_allocator)k, (ft_switch)async, churn_run, churn_run, &c) != FT_OK)
                    fail_msg("seed %d, allocator %d: %s", (int)seed, k, ft_last_error());
                double ratio = (double)c.reserved / (double)c.peak;
                if (ratio > worst[k]) worst[k] = ratio;
            }
    printf("random programs: reserved / peak at worst %.3f with an arena, %.3f caching\n",
           worst[FT_ALLOC_ARENA], worst[FT_ALLOC_CACHING]);
    assert_true(worst[FT_ALLOC_ARENA] <= 1.05);
}

/* What caching reserves follows from the calls: the same on meta, with threads, and with delays. */
static void caching_is_the_same_everywhere(void **state)
{
    size_t reserved = 0;
    (void)state;
    for (int how = 0; how < 3; how++) {
        ft_config config = ft_config_default();
        churn c;
        memset(&c, 0, sizeof c);
        c.seed = 5;
        c.steps = 300;
        config.device = how == 0 ? FT_META : FT_CPU;
        config.allocator = FT_ALLOC_CACHING;
        config.async = how == 2 ? FT_ON : FT_OFF;
        config.delay_us = how == 2 ? 100 : 0;
        assert_int_equal(ft_launch(&config, churn_run, &c), FT_OK);
        if (how) assert_int_equal(c.reserved, reserved);
        reserved = c.reserved;
        assert_true(reserved >= c.peak);
    }
}

static int report_arenas(void **state)
{
    (void)state;
    printf("%d arenas: reserved / peak at worst %.4f, in the mean %.4f\n", arenas.n, arenas.worst,
           arenas.sum / arenas.n);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_next_owner_waits_for_the_last_one),
        cmocka_unit_test(a_deviation_is_named),
        cmocka_unit_test(a_phase_must_be_closed_where_it_is_recorded),
        cmocka_unit_test(launches_that_cannot_be),
        cmocka_unit_test(random_programs),
        cmocka_unit_test(caching_is_the_same_everywhere),
        cmocka_unit_test(results_and_books_are_the_same),
        cmocka_unit_test(the_same_with_streams_as_threads),
        cmocka_unit_test(the_48_cells),
    };
    return cmocka_run_group_tests_name("arena", tests, NULL, report_arenas);
}
