/* Launch, streams, groups and collectives of the local transport: values, determinism, errors that
   reach every rank, traffic, and that nothing leaks or hangs on any path.

   cc -std=c11 -I. tests/test_comm.c -lcmocka -lm -lpthread

   Ranks are threads and cmocka's assertions are for the main thread only: a rank reports what is
   wrong as an error of its own, and the main thread asserts that the launch succeeded. */

#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

/* Thread creation and allocation that fail when a test says so: the call that brings the countdown
   from 1 to 0 fails, once. */
static pthread_mutex_t hook_lock = PTHREAD_MUTEX_INITIALIZER;
static int fail_thread, fail_malloc;

static int hook_fails(int *countdown) {
    pthread_mutex_lock(&hook_lock);
    int fails = *countdown == 1;
    if (*countdown > 0) --*countdown;
    pthread_mutex_unlock(&hook_lock);
    return fails;
}

static int hook_pthread_create(pthread_t *thread, const pthread_attr_t *attr,
                               void *(*fn)(void *), void *arg) {
    return hook_fails(&fail_thread) ? EAGAIN : pthread_create(thread, attr, fn, arg);
}

static void *hook_malloc(size_t bytes) { return hook_fails(&fail_malloc) ? NULL : malloc(bytes); }

#define pthread_create hook_pthread_create
#define FT_MALLOC(n) hook_malloc(n)
#define FT_FREE(p) free(p)
#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#undef pthread_create

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

/* ------------------------------------------------------------------------------------- helpers */

#define MAX_WORLD 8

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            return ft_error(FT_ERR_DATA, "line %d: %s (last error: %s)", __LINE__, #condition,     \
                            ft_last_error());                                                      \
        }                                                                                          \
    } while (0)

static ft_config config_of(int world, ft_switch async, int delay_us) {
    ft_config config = ft_config_default();
    config.world = world;
    config.async = async;
    config.delay_us = delay_us;
    config.timeout_s = 60;
    return config;
}

static void launch_ok(const ft_config *config, ft_rank_fn fn, void *user) {
    ft_status status = ft_launch(config, fn, user);
    if (status != FT_OK) fail_msg("%s: %s", ft_status_name(status), ft_last_error());
}

/* Launches what must fail with `status` and a text that contains `part`. */
static void launch_fails(const ft_config *config, ft_rank_fn fn, void *user, ft_status status,
                         const char *part) {
    ft_status got = ft_launch(config, fn, user);
    if (got != status || !strstr(ft_last_error(), part)) {
        fail_msg("expected %s with \"%s\", got %s: %s", ft_status_name(status), part,
                 ft_status_name(got), got ? ft_last_error() : "");
    }
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void sleep_ms(int ms) {
    struct timespec t;
    t.tv_sec = ms / 1000;
    t.tv_nsec = (long)(ms % 1000) * 1000000;
    nanosleep(&t, NULL);
}

static ft_status world_group(ft_ctx *ctx, const char *name, ft_group **group) {
    int ranks[64];
    CHECK(ft_world(ctx) <= 64);
    for (int i = 0; i < ft_world(ctx); i++) ranks[i] = i;
    return ft_group_create(ctx, name, ft_world(ctx), ranks, group);
}

static ft_status vector(ft_ctx *ctx, ft_tensor **out, ft_dtype dtype, int64_t n) {
    return ft_tensor_create(ctx, out, dtype, 1, &n, FT_TAG_OTHER);
}

static ft_status slot_of(ft_tensor *full, ft_tensor **out, int slot, int64_t n) {
    return ft_tensor_view(full, out, slot * n, 1, &n);
}

/* To 8 significant bits, ties to even: bf16 as its definition has it, for normal numbers. */
static double round_bf16(double x) {
    int exponent;
    double mantissa = frexp(x, &exponent);
    return ldexp(nearbyint(ldexp(mantissa, 8)), exponent - 8);
}

static double rounded(ft_dtype dtype, double x) {
    return dtype == FT_BF16 ? round_bf16(x) : (double)(float)x;
}

/* Done when it returns, so that any stream may go on from there. */
static ft_status put(ft_tensor *t, const double *values) {
    int64_t n = ft_numel(t);
    uint32_t *raw = (uint32_t *)malloc((size_t)n * 4);
    if (!raw) return ft_error(FT_ERR_OOM, "put");
    for (int64_t i = 0; i < n; i++) {
        float x = (float)values[i];
        int32_t number = (int32_t)values[i];
        uint16_t half;
        memcpy((char *)raw + 4 * i, t->dtype == FT_I32 ? (void *)&number : (void *)&x, 4);
        if (t->dtype != FT_BF16) continue;
        half = (uint16_t)(raw[i] >> 16); /* the values are bf16 numbers already */
        memcpy((char *)raw + 2 * i, &half, 2);
    }
    ft_status status = ft_upload(t, raw);
    free(raw);
    return status == FT_OK ? ft_sync(t->ctx) : status;
}

static ft_status get(const ft_tensor *t, double *values) {
    int64_t n = ft_numel(t);
    char *raw = (char *)malloc((size_t)n * 4);
    if (!raw) return ft_error(FT_ERR_OOM, "get");
    ft_status status = ft_download(t, raw);
    for (int64_t i = 0; i < n && status == FT_OK; i++) {
        uint16_t half;
        uint32_t bits;
        int32_t number;
        float x;
        memcpy(&half, raw + 2 * i, t->dtype == FT_BF16 ? 2 : 0);
        bits = (uint32_t)half << 16;
        if (t->dtype != FT_BF16) memcpy(&bits, raw + 4 * i, 4);
        memcpy(&x, &bits, 4);
        memcpy(&number, &bits, 4);
        values[i] = t->dtype == FT_I32 ? (double)number : (double)x;
    }
    free(raw);
    return status;
}

/* What rank r holds at element i: a small integer, so that sums are exact. */
static double value_at(int r, int64_t i) { return (double)((r * 37 + i * 11) % 101 - 50); }

/* ---------------------------------------------------------------------------------- the values */

#define MAX_ELEMS 4096

typedef struct values_case {
    ft_dtype dtype;
    int in_place;
    int64_t n; /* of a shard */
} values_case;

static ft_status gather_values(ft_group *g, ft_stream *s, const values_case *c) {
    ft_ctx *ctx = s->ctx;
    int rank = ft_group_rank(g), size = ft_group_size(g);
    double a[MAX_ELEMS];
    ft_tensor *full, *shard;
    FT_TRY(vector(ctx, &full, c->dtype, c->n * size));
    FT_TRY(c->in_place ? slot_of(full, &shard, rank, c->n) : vector(ctx, &shard, c->dtype, c->n));
    for (int64_t i = 0; i < c->n; i++) a[i] = value_at(rank, i);
    FT_TRY(put(shard, a));
    FT_TRY(ft_all_gather(g, s, shard, full));
    FT_TRY(ft_stream_sync(s));
    FT_TRY(get(full, a));
    for (int64_t i = 0; i < c->n * size; i++) {
        CHECK(a[i] == value_at((int)(i / c->n), i % c->n));
    }
    return FT_OK;
}

static double sum_at(int size, int64_t i) {
    double sum = 0;
    for (int r = 0; r < size; r++) sum += value_at(r, i);
    return sum;
}

static ft_status scatter_values(ft_group *g, ft_stream *s, const values_case *c) {
    ft_ctx *ctx = s->ctx;
    int rank = ft_group_rank(g), size = ft_group_size(g);
    double a[MAX_ELEMS];
    ft_tensor *full, *shard;
    FT_TRY(vector(ctx, &full, c->dtype, c->n * size));
    FT_TRY(c->in_place ? slot_of(full, &shard, rank, c->n) : vector(ctx, &shard, c->dtype, c->n));
    for (int64_t i = 0; i < c->n * size; i++) a[i] = value_at(rank, i);
    FT_TRY(put(full, a));
    FT_TRY(ft_reduce_scatter(g, s, full, shard));
    FT_TRY(ft_stream_sync(s));
    FT_TRY(get(shard, a));
    for (int64_t i = 0; i < c->n; i++) {
        CHECK(a[i] == rounded(c->dtype, sum_at(size, rank * c->n + i)));
    }
    FT_TRY(get(full, a)); /* but for the slot in place, the input is as it was */
    for (int64_t i = 0; i < c->n * size; i++) {
        if (c->in_place && i / c->n == rank) continue;
        CHECK(a[i] == value_at(rank, i));
    }
    return FT_OK;
}

static ft_status all_reduce_values(ft_group *g, ft_stream *s, const values_case *c) {
    int rank = ft_group_rank(g), size = ft_group_size(g);
    double a[MAX_ELEMS];
    ft_tensor *t;
    FT_TRY(vector(s->ctx, &t, c->dtype, c->n));
    for (int64_t i = 0; i < c->n; i++) a[i] = value_at(rank, i);
    FT_TRY(put(t, a));
    FT_TRY(ft_all_reduce(g, s, t));
    FT_TRY(ft_stream_sync(s));
    FT_TRY(get(t, a));
    for (int64_t i = 0; i < c->n; i++) CHECK(a[i] == rounded(c->dtype, sum_at(size, i)));
    return FT_OK;
}

static ft_status broadcast_values(ft_group *g, ft_stream *s, const values_case *c) {
    int rank = ft_group_rank(g), size = ft_group_size(g);
    double a[MAX_ELEMS];
    ft_tensor *t;
    FT_TRY(vector(s->ctx, &t, c->dtype, c->n));
    for (int root = 0; root < size; root++) {
        for (int64_t i = 0; i < c->n; i++) a[i] = value_at(rank, i + root);
        FT_TRY(put(t, a));
        FT_TRY(ft_broadcast(g, s, t, root));
        FT_TRY(ft_stream_sync(s));
        FT_TRY(get(t, a));
        for (int64_t i = 0; i < c->n; i++) CHECK(a[i] == value_at(root, i + root));
    }
    return FT_OK;
}

static ft_status values_rank(ft_ctx *ctx, void *user) {
    (void)user;
    ft_group *g;
    static const int64_t sizes[] = {1, 2, 7, 300};
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_REDUCE);
    FT_TRY(world_group(ctx, "values", &g));
    for (int dtype = 0; dtype < FT_DTYPE_COUNT; dtype++) {
        for (int k = 0; k < 8; k++) {
            values_case c;
            c.dtype = (ft_dtype)dtype;
            c.n = sizes[k / 2];
            c.in_place = k % 2;
            FT_TRY(gather_values(g, s, &c));
            FT_TRY(broadcast_values(g, s, &c));
            if (dtype != FT_I32) FT_TRY(scatter_values(g, s, &c));
            if (dtype != FT_I32) FT_TRY(all_reduce_values(g, s, &c));
            FT_TRY(ft_barrier(g, s));
        }
    }
    return FT_OK;
}

static const int worlds[] = {1, 2, 3, 4, 8};

static void test_values(void **state) {
    (void)state;
    for (int k = 0; k < 5; k++) {
        for (int mode = 0; mode < 3; mode++) {
            ft_config config = config_of(worlds[k], mode ? FT_ON : FT_OFF, mode == 1 ? 0 : 40);
            launch_ok(&config, values_rank, NULL);
        }
    }
}

/* Ranks hold 256, 1, 1, ...: added up in bf16 this would stay 256. */
static ft_status small_addends_rank(ft_ctx *ctx, void *user) {
    (void)user;
    ft_group *g;
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    FT_TRY(world_group(ctx, "small", &g));
    for (int dtype = FT_F32; dtype <= FT_BF16; dtype++) {
        double a[8], expected = dtype == FT_F32 ? 263 : 264;
        ft_tensor *all, *full, *shard;
        for (int i = 0; i < 8; i++) a[i] = ft_rank(ctx) == 0 ? 256 : 1;
        FT_TRY(vector(ctx, &all, (ft_dtype)dtype, 1));
        FT_TRY(vector(ctx, &full, (ft_dtype)dtype, 8));
        FT_TRY(vector(ctx, &shard, (ft_dtype)dtype, 1));
        FT_TRY(put(all, a));
        FT_TRY(put(full, a));
        FT_TRY(ft_all_reduce(g, s, all));
        FT_TRY(ft_reduce_scatter(g, s, full, shard));
        FT_TRY(get(all, a));
        CHECK(a[0] == expected);
        FT_TRY(get(shard, a));
        CHECK(a[0] == expected);
    }
    return FT_OK;
}

static void test_small_addends(void **state) {
    (void)state;
    ft_config config = config_of(8, FT_OFF, 0);
    launch_ok(&config, small_addends_rank, NULL);
}

/* Numbers whose sum depends on the order: the result is the sum in rank order, whatever the timing,
   on every rank. */
#define ORDER_N 1021

static float order_value(int r, int i) {
    return (float)ldexp(sin(r * 12.9898 + i * 78.233), (r * 7 + i) % 24 - 12);
}

static ft_status order_rank(ft_ctx *ctx, void *user) {
    (void)user;
    ft_group *g;
    ft_tensor *t;
    float a[ORDER_N];
    FT_TRY(world_group(ctx, "order", &g));
    FT_TRY(vector(ctx, &t, FT_F32, ORDER_N));
    for (int i = 0; i < ORDER_N; i++) a[i] = order_value(ft_rank(ctx), i);
    FT_TRY(ft_upload(t, a));
    FT_TRY(ft_all_reduce(g, ft_stream_get(ctx, FT_STREAM_COMPUTE), t));
    FT_TRY(ft_download(t, a));
    for (int i = 0; i < ORDER_N; i++) {
        volatile float sum = order_value(0, i); /* volatile: rounded at every addition */
        for (int r = 1; r < ft_world(ctx); r++) sum = sum + order_value(r, i);
        CHECK(a[i] == sum);
    }
    return FT_OK;
}

static void test_rank_order(void **state) {
    (void)state;
    for (int run = 0; run < 6; run++) {
        ft_config config = config_of(run % 2 ? 8 : 5, run < 3 ? FT_ON : FT_OFF, 300 * (run % 3));
        launch_ok(&config, order_rank, NULL);
    }
}

/* -------------------------------------------------------------------------------- disagreement */

typedef enum odd_kind {
    ODD_SIZE = 0, ODD_KIND, ODD_DTYPE, ODD_ROOT, ODD_AGREE, ODD_EXCHANGE_SIZE, ODD_EXCHANGE_DTYPE,
    ODD_EXCHANGE_KIND, ODD_FAILS, ODD_STREAM_FAILS, ODD_ENDS, ODD_SLOW, ODD_COUNT
} odd_kind;

typedef enum call_kind {
    CALL_ALL_REDUCE = 0, CALL_BARRIER, CALL_AGREE, CALL_EXCHANGE, CALL_COUNT
} call_kind;

/* One rank does something else than the others. What each rank saw is kept here. */
typedef struct odd_case {
    odd_kind kind;
    call_kind call;
    int odd_rank;
    ft_status seen[MAX_WORLD];
    char text[MAX_WORLD][1024];
} odd_case;

/* A ring: to the next rank, from the previous one. */
static ft_status ring(ft_group *g, ft_stream *s, ft_tensor *out, ft_tensor *in) {
    int n = ft_group_size(g), rank = ft_group_rank(g);
    ft_p2p ops[2];
    ops[0].peer = (rank + n - 1) % n;
    ops[0].is_send = 0;
    ops[0].tensor = in;
    ops[1].peer = (rank + 1) % n;
    ops[1].is_send = 1;
    ops[1].tensor = out;
    return ft_exchange(g, s, 2, ops);
}

static ft_status stream_fails_task(void *arg) {
    (void)arg;
    return ft_error(FT_ERR_DATA, "the odd rank's work failed");
}

static ft_status odd_calls(ft_ctx *ctx, const odd_case *c) {
    int odd = ft_rank(ctx) == c->odd_rank;
    ft_group *g;
    ft_tensor *t, *from, *in;
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    int64_t n = odd && (c->kind == ODD_SIZE || c->kind == ODD_EXCHANGE_SIZE) ? 24 : 12;
    int other_dtype = odd && (c->kind == ODD_DTYPE || c->kind == ODD_EXCHANGE_DTYPE);
    FT_TRY(world_group(ctx, "odd", &g));
    FT_TRY(vector(ctx, &t, other_dtype ? FT_BF16 : FT_F32, n));
    FT_TRY(vector(ctx, &from, other_dtype ? FT_BF16 : FT_F32, n));
    FT_TRY(vector(ctx, &in, FT_F32, 12));
    FT_TRY(ft_fill(t, 1, s));
    FT_TRY(ft_fill(from, 1, s));
    FT_TRY(ft_barrier(g, s));
    if (odd && c->kind == ODD_FAILS) return ft_error(FT_ERR_IO, "the odd rank failed by itself");
    if (odd && c->kind == ODD_STREAM_FAILS) {
        (void)ft_stream_run(s, stream_fails_task, NULL, 0);
        return FT_OK;
    }
    if (odd && c->kind == ODD_ENDS) return FT_OK;
    if (odd && c->kind == ODD_SLOW) {
        FT_TRY(ft_sync(ctx));
        sleep_ms(900);
    }
    if (c->kind == ODD_AGREE) return ft_agree(g, "the answer", odd ? 41 : 42);
    if (c->kind == ODD_ROOT) FT_TRY(ft_broadcast(g, s, t, odd ? 1 : 0));
    else if (odd && c->kind == ODD_KIND) FT_TRY(ft_broadcast(g, s, t, 0));
    else if (odd && c->kind == ODD_EXCHANGE_KIND) FT_TRY(ft_all_reduce(g, s, t));
    else if (c->kind >= ODD_EXCHANGE_SIZE && c->kind <= ODD_EXCHANGE_KIND) {
        FT_TRY(ring(g, s, from, in)); /* a second round: nobody gets through both */
        FT_TRY(ring(g, s, from, in));
    } else if (c->call == CALL_BARRIER) FT_TRY(ft_barrier(g, s));
    else if (c->call == CALL_AGREE) FT_TRY(ft_agree(g, "the answer", 42));
    else if (c->call == CALL_EXCHANGE) FT_TRY(ring(g, s, from, in));
    else FT_TRY(ft_all_reduce(g, s, t));
    return ft_sync(ctx);
}

static ft_status odd_rank(ft_ctx *ctx, void *user) {
    odd_case *c = (odd_case *)user;
    ft_status status = odd_calls(ctx, c);
    if (status == FT_OK) status = ft_sync(ctx);
    c->seen[ft_rank(ctx)] = status;
    memcpy(c->text[ft_rank(ctx)], ft_last_error(), strlen(ft_last_error()) + 1);
    return status;
}

static void expect_seen(const odd_case *c, int rank, ft_status status, const char *part) {
    if (c->seen[rank] != status || (status && !strstr(c->text[rank], part))) {
        fail_msg("case %d, call %d, rank %d: expected %s with \"%s\", got %s: %s", (int)c->kind,
                 (int)c->call, rank, ft_status_name(status), part, ft_status_name(c->seen[rank]),
                 c->text[rank]);
    }
}

/* Every rank gets FT_ERR_COMM and the same text, which names the group, the odd rank and both
   sides' calls; nobody waits for the timeout. */
static void expect_disagreement(const odd_case *c, const char *part) {
    for (int r = 0; r < 4; r++) {
        expect_seen(c, r, FT_ERR_COMM, part);
        expect_seen(c, r, FT_ERR_COMM, "group \"odd\"");
        assert_string_equal(c->text[r], c->text[2]);
    }
}

static void test_disagreement(void **state) {
    (void)state;
    static const char *const parts[][3] = {
        {"all-reduce of 12 fp32", "rank 2: all-reduce of 24 fp32", "ranks 0, 1, 3: "},
        {"all-reduce of 12 fp32", "rank 2: broadcast of 12 fp32", "ranks 0, 1, 3: "},
        {"all-reduce of 12 fp32", "rank 2: all-reduce of 12 bf16", "ranks 0, 1, 3: "},
        {"from group rank 0", "rank 2: broadcast of 12 fp32 elements from group rank 1", "0, 1, 3"},
        {"\"the answer\" = 42", "rank 2: ft_agree \"the answer\" = 41", "ranks 0, 1, 3: "},
        {"rank 2 sends 24 fp32", "rank 3 receives 12 fp32", "\"odd\""},
        {"rank 2 sends 12 bf16", "rank 3 receives 12 fp32", "\"odd\""},
        {"rank 2, which is in all-reduce of 12 fp32", "fp32 elements", "\"odd\""}};
    for (int kind = ODD_SIZE; kind <= ODD_EXCHANGE_KIND; kind++) {
        for (int mode = 0; mode < 2; mode++) {
            ft_config config = config_of(4, mode ? FT_ON : FT_OFF, 100 * mode);
            odd_case c;
            memset(&c, 0, sizeof c);
            c.kind = (odd_kind)kind;
            c.odd_rank = 2;
            double start = now_s();
            for (int part = 0; part < 3; part++) {
                launch_fails(&config, odd_rank, &c, FT_ERR_COMM, parts[kind][part]);
                expect_disagreement(&c, parts[kind][part]);
            }
            assert_true(now_s() - start < 20);
        }
    }
}

/* Peers of a rank that fails learn its number and its message, in whatever call they are; the
   launch gives the cause, not its consequences. */
static void test_failing_rank(void **state) {
    (void)state;
    for (int call = 0; call < CALL_COUNT; call++) {
        for (int mode = 0; mode < 4; mode++) {
            ft_config config = config_of(4, mode & 1 ? FT_ON : FT_OFF, 100 * (mode & 1));
            odd_case c;
            memset(&c, 0, sizeof c);
            c.kind = mode & 2 ? ODD_STREAM_FAILS : ODD_FAILS;
            c.call = (call_kind)call;
            c.odd_rank = 1;
            double start = now_s();
            launch_fails(&config, odd_rank, &c, mode & 2 ? FT_ERR_DATA : FT_ERR_IO,
                         "rank 1: the odd rank");
            assert_true(now_s() - start < 20);
            assert_null(strstr(ft_last_error() + 1, "rank 1:")); /* named once */
            for (int r = 0; r < 4; r++) {
                if (r == 1) expect_seen(&c, r, mode & 2 ? FT_ERR_DATA : FT_ERR_IO, "the odd rank");
                else if (call != CALL_EXCHANGE) {
                    expect_seen(&c, r, FT_ERR_PEER, "rank 1 failed: the odd rank");
                }
            }
            /* In the ring 0 sends to 1 and 2 receives from 1; 3 may have got through. */
            if (call == CALL_EXCHANGE) {
                expect_seen(&c, 0, FT_ERR_PEER, "rank 1 failed: the odd rank");
                expect_seen(&c, 2, FT_ERR_PEER, "rank 1 failed: the odd rank");
            }
        }
    }
}

static void test_rank_that_ends(void **state) {
    (void)state;
    static const char *const parts[CALL_COUNT] = {
        "rank 2 ended without joining all-reduce of 12 fp32 elements",
        "rank 2 ended without joining barrier", "rank 2 ended without joining ft_agree",
        "rank 2 ended without joining the exchange"};
    for (int call = 0; call < CALL_COUNT; call++) {
        for (int mode = 0; mode < 2; mode++) {
            ft_config config = config_of(3, mode ? FT_ON : FT_OFF, 0);
            odd_case c;
            memset(&c, 0, sizeof c);
            c.kind = ODD_ENDS;
            c.call = (call_kind)call;
            c.odd_rank = 2;
            double start = now_s();
            launch_fails(&config, odd_rank, &c, FT_ERR_COMM, parts[call]);
            assert_true(now_s() - start < 20);
            assert_non_null(strstr(ft_last_error(), "group \"odd\""));
            for (int r = 0; r < 2; r++) expect_seen(&c, r, FT_ERR_COMM, parts[call]);
            expect_seen(&c, 2, FT_OK, "");
        }
    }
}

static void test_timeout(void **state) {
    (void)state;
    static const char *const parts[CALL_COUNT] = {
        "rank 1 did not arrive at all-reduce of 12 fp32 elements within 0.2 s",
        "rank 1 did not arrive at barrier within 0.2 s",
        "rank 1 did not arrive at ft_agree \"the answer\" = 42 within 0.2 s", "within 0.2 s"};
    for (int call = 0; call < CALL_COUNT; call++) {
        ft_config config = config_of(3, call % 2 ? FT_ON : FT_OFF, 0);
        odd_case c;
        memset(&c, 0, sizeof c);
        config.timeout_s = 0.2;
        c.kind = ODD_SLOW;
        c.call = (call_kind)call;
        c.odd_rank = 1;
        double start = now_s();
        launch_fails(&config, odd_rank, &c, FT_ERR_TIMEOUT, parts[call]);
        assert_true(now_s() - start >= 0.2);
        for (int r = 0; r < 3; r++) expect_seen(&c, r, FT_ERR_TIMEOUT, "group \"odd\"");
    }
}

/* --------------------------------------------------------------------------------- exchange */

static ft_status ring_rank(ft_ctx *ctx, void *user) {
    (void)user;
    ft_group *g;
    ft_tensor *out, *in;
    double a[64];
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    int rank = ft_rank(ctx), n = ft_world(ctx);
    FT_TRY(world_group(ctx, "ring", &g));
    for (int dtype = 0; dtype < FT_DTYPE_COUNT; dtype++) {
        FT_TRY(vector(ctx, &out, (ft_dtype)dtype, 64));
        FT_TRY(vector(ctx, &in, (ft_dtype)dtype, 64));
        for (int i = 0; i < 64; i++) a[i] = value_at(rank, i);
        FT_TRY(put(out, a));
        for (int hop = 1; hop <= 2 * n; hop++) {
            ft_tensor *swap = in;
            FT_TRY(ring(g, s, out, in));
            in = out;
            out = swap;
            FT_TRY(get(out, a));
            for (int i = 0; i < 64; i++) CHECK(a[i] == value_at((rank + 2 * n - hop) % n, i));
        }
    }
    return FT_OK;
}

static void test_rings(void **state) {
    (void)state;
    for (int k = 0; k < 8; k++) {
        ft_config config = config_of(k / 2 == 3 ? 8 : k / 2 + 1, k % 2 ? FT_ON : FT_OFF, 50);
        launch_ok(&config, ring_rank, NULL);
    }
}

/* Three messages of different sizes to every rank, oneself included, sends before, after and
   between receives: those between two ranks match in order. */
static ft_status order_of_messages_rank(ft_ctx *ctx, void *user) {
    ft_group *g;
    ft_tensor *in[3 * MAX_WORLD], *out[3 * MAX_WORLD];
    ft_p2p ops[6 * MAX_WORLD];
    int rank = ft_rank(ctx), n = ft_world(ctx), layout = *(int *)user, used = 0;
    double a[8];
    FT_TRY(world_group(ctx, "all to all", &g));
    for (int k = 0; k < 3 * n; k++) {
        for (int i = 0; i < 8; i++) a[i] = value_at(rank, k + i);
        FT_TRY(vector(ctx, &in[k], FT_F32, 1 + k / n));
        FT_TRY(vector(ctx, &out[k], FT_F32, 1 + k / n));
        FT_TRY(put(out[k], a));
    }
    for (int k = 0; k < 6 * n; k++) {
        int send = layout == 0 ? k < 3 * n : layout == 1 ? k >= 3 * n : k % 2;
        int index = layout == 2 ? k / 2 : k % (3 * n);
        ops[used].peer = index % n;
        ops[used].is_send = send;
        ops[used++].tensor = send ? out[index] : in[index];
    }
    FT_TRY(ft_exchange(g, ft_stream_get(ctx, FT_STREAM_GATHER), used, ops));
    FT_TRY(ft_exchange(g, ft_stream_get(ctx, FT_STREAM_GATHER), 0, NULL));
    FT_TRY(ft_sync(ctx));
    for (int k = 0; k < 3 * n; k++) {
        FT_TRY(get(in[k], a));
        for (int i = 0; i < 1 + k / n; i++) CHECK(a[i] == value_at(k % n, k / n * n + rank + i));
    }
    return FT_OK;
}

static void test_order_of_messages(void **state) {
    (void)state;
    for (int k = 0; k < 12; k++) {
        int layout = k % 3;
        ft_config config = config_of(k / 3 + 1, k % 2 ? FT_ON : FT_OFF, 50);
        launch_ok(&config, order_of_messages_rank, &layout);
    }
}

/* A send is over only when it was read: the sender may overwrite its tensor at once. */
static ft_status reuse_rank(ft_ctx *ctx, void *user) {
    (void)user;
    ft_group *g;
    ft_tensor *t, *in, *all;
    double a[2 * MAX_WORLD];
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    int n = ft_world(ctx), from = (ft_rank(ctx) + n - 1) % n;
    FT_TRY(world_group(ctx, "reuse", &g));
    FT_TRY(vector(ctx, &t, FT_F32, 2));
    FT_TRY(vector(ctx, &in, FT_F32, 2));
    FT_TRY(vector(ctx, &all, FT_F32, 2 * n));
    for (int round = 0; round < 20; round++) {
        FT_TRY(ft_fill(t, round * 100 + ft_rank(ctx), s));
        FT_TRY(ring(g, s, t, in));
        FT_TRY(ft_fill(t, -1, s));
        FT_TRY(get(in, a));
        CHECK(a[0] == round * 100 + from && a[1] == a[0]);
        FT_TRY(ft_fill(t, round * 100 + ft_rank(ctx), s));
        FT_TRY(ft_all_gather(g, s, t, all));
        FT_TRY(ft_fill(t, -1, s));
        FT_TRY(get(all, a));
        for (int r = 0; r < n; r++) CHECK(a[2 * r] == round * 100 + r && a[2 * r + 1] == a[2 * r]);
    }
    return FT_OK;
}

static void test_buffers_reusable(void **state) {
    (void)state;
    for (int k = 0; k < 4; k++) {
        ft_config config = config_of(k + 1, k % 2 ? FT_ON : FT_OFF, 60);
        launch_ok(&config, reuse_rank, NULL);
    }
}

/* ------------------------------------------------------------------------------------- traffic */

static ft_status traffic_rank(ft_ctx *ctx, void *user) {
    (void)user;
    ft_group *g, *h;
    ft_tensor *full, *shard, *odd, *in;
    ft_traffic rows[3];
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    int64_t n = ft_world(ctx), rank = ft_rank(ctx);
    FT_TRY(world_group(ctx, "first", &g));
    FT_TRY(world_group(ctx, "second", &h));
    FT_TRY(vector(ctx, &full, FT_BF16, 6 * n));
    FT_TRY(vector(ctx, &shard, FT_BF16, 6));
    FT_TRY(vector(ctx, &odd, FT_F32, 13));
    FT_TRY(vector(ctx, &in, FT_BF16, 6));
    FT_TRY(ft_fill(full, 0, s));
    FT_TRY(ft_fill(shard, 0, s));
    FT_TRY(ft_fill(odd, 0, s));
    FT_TRY(ft_all_gather(g, s, shard, full));
    FT_TRY(ft_reduce_scatter(g, s, full, shard));
    FT_TRY(ft_reduce_scatter(g, s, full, shard));
    FT_TRY(ft_all_reduce(g, s, full));
    FT_TRY(ft_all_reduce(h, s, odd));
    FT_TRY(ft_broadcast(g, s, full, (int)n - 1));
    FT_TRY(ft_barrier(g, s));
    FT_TRY(ring(h, s, shard, in));
    FT_TRY(ft_sync(ctx));
    CHECK(ft_traffic_get(ctx, 1, rows) == 2);
    CHECK(ft_traffic_get(ctx, 3, rows) == 2);
    CHECK(strcmp(rows[0].group, "first") == 0 && strcmp(rows[1].group, "second") == 0);
    int64_t bytes = 2 * 6 * n, own = 13 / n + (rank < 13 % n ? 1 : 0);
    CHECK(rows[0].calls[FT_ALL_GATHER] == 1 && rows[0].calls[FT_REDUCE_SCATTER] == 2);
    CHECK(rows[0].calls[FT_ALL_REDUCE] == 1 && rows[0].calls[FT_BROADCAST] == 1);
    CHECK(rows[0].calls[FT_BARRIER] == 1 && rows[0].calls[FT_SEND] == 0);
    CHECK(rows[0].sent_bytes[FT_ALL_GATHER] == bytes * (n - 1) / n);
    CHECK(rows[0].sent_bytes[FT_REDUCE_SCATTER] == 2 * bytes * (n - 1) / n);
    CHECK(rows[0].sent_bytes[FT_ALL_REDUCE] == 2 * bytes * (n - 1) / n);
    CHECK(rows[0].sent_bytes[FT_BROADCAST] == (rank == n - 1 ? bytes * (n - 1) : 0));
    CHECK(rows[0].sent_bytes[FT_BARRIER] == 0);
    CHECK(rows[1].calls[FT_SEND] == 1 && rows[1].calls[FT_ALL_REDUCE] == 1);
    CHECK(rows[1].sent_bytes[FT_SEND] == (n > 1 ? 12 : 0));
    CHECK(rows[1].sent_bytes[FT_ALL_REDUCE] == 2 * 4 * (13 - own));
    return FT_OK;
}

static void test_traffic(void **state) {
    (void)state;
    for (int k = 0; k < 5; k++) {
        ft_config config = config_of(worlds[k], k % 2 ? FT_ON : FT_OFF, 0);
        launch_ok(&config, traffic_rank, NULL);
        config.device = FT_META;
        launch_ok(&config, traffic_rank, NULL);
        config.only_rank = worlds[k] - 1;
        launch_ok(&config, traffic_rank, NULL);
    }
}

/* ---------------------------------------------------------------------------- groups and meshes */

static ft_status mesh_rank(ft_ctx *ctx, void *user) {
    (void)user;
    static const char *const names[] = {"dp", "tp", "pp"};
    int rank = ft_rank(ctx);
    ft_mesh mesh;
    FT_TRY(ft_mesh_create(ctx, 2, 3, 4, &mesh));
    const int *at = mesh.coord;
    CHECK(mesh.size[FT_AXIS_DP] == 2 && mesh.size[FT_AXIS_TP] == 3 && mesh.size[FT_AXIS_PP] == 4);
    CHECK((at[FT_AXIS_PP] * 2 + at[FT_AXIS_DP]) * 3 + at[FT_AXIS_TP] == rank);
    CHECK(at[FT_AXIS_DP] >= 0 && at[FT_AXIS_DP] < 2 && at[FT_AXIS_TP] >= 0 && at[FT_AXIS_TP] < 3);
    for (int axis = 0; axis < FT_AXIS_COUNT; axis++) {
        static const int strides[] = {3, 1, 6};
        ft_group *g;
        ft_tensor *own, *all;
        double a[4];
        int n = mesh.size[axis];
        FT_TRY(ft_mesh_group(ctx, &mesh, (ft_axis)axis, names[axis], &g));
        CHECK(ft_group_size(g) == n && ft_group_rank(g) == at[axis]);
        CHECK(strcmp(ft_group_name(g), names[axis]) == 0);
        FT_TRY(vector(ctx, &own, FT_I32, 1));
        FT_TRY(vector(ctx, &all, FT_I32, n));
        a[0] = rank;
        FT_TRY(put(own, a));
        FT_TRY(ft_all_gather(g, ft_stream_get(ctx, FT_STREAM_COMPUTE), own, all));
        FT_TRY(get(all, a));
        if (ft_ctx_device(ctx) == FT_META) continue;
        for (int i = 0; i < n; i++) CHECK(a[i] == rank + (i - at[axis]) * strides[axis]);
    }
    CHECK(ft_mesh_create(ctx, 2, 3, 5, &mesh) == FT_ERR_ARG);
    CHECK(strstr(ft_last_error(), "dp 2 x tp 3 x pp 5") && strstr(ft_last_error(), "24"));
    CHECK(ft_mesh_create(ctx, 0, 3, 8, &mesh) == FT_ERR_ARG);
    CHECK(ft_mesh_create(ctx, -2, -3, 4, &mesh) == FT_ERR_ARG);
    CHECK(ft_mesh_create(ctx, 65536, 65536, 65536, &mesh) == FT_ERR_ARG);
    return FT_OK;
}

static void test_mesh(void **state) {
    (void)state;
    ft_config config = config_of(24, FT_OFF, 0);
    launch_ok(&config, mesh_rank, NULL);
    config.device = FT_META;
    launch_ok(&config, mesh_rank, NULL);
}

static ft_status group_errors_rank(ft_ctx *ctx, void *user) {
    (void)user;
    static const int down[] = {1, 0}, twice[] = {0, 0}, outside[] = {0, 9}, pair[] = {0, 1, 2};
    int other = ft_rank(ctx) == 0 ? 1 : 0;
    ft_group *g;
    CHECK(ft_group_create(ctx, "g", 2, down, &g) == FT_ERR_ARG);
    CHECK(strstr(ft_last_error(), "ascend"));
    CHECK(ft_group_create(ctx, "g", 2, twice, &g) == FT_ERR_ARG);
    CHECK(ft_group_create(ctx, "g", 2, outside, &g) == FT_ERR_ARG);
    CHECK(strstr(ft_last_error(), "rank 9"));
    CHECK(ft_group_create(ctx, "g", 1, &other, &g) == FT_ERR_ARG);
    CHECK(strstr(ft_last_error(), "not among"));
    CHECK(ft_group_create(ctx, "g", 0, pair, &g) == FT_ERR_ARG);
    CHECK(ft_group_create(ctx, "g", 4, pair, &g) == FT_ERR_ARG);
    CHECK(ft_group_create(ctx, "", 3, pair, &g) == FT_ERR_ARG);
    CHECK(ft_group_create(ctx, NULL, 3, pair, &g) == FT_ERR_ARG);
    CHECK(ft_group_strided(ctx, "g", 0, 1, 0, &g) == FT_ERR_ARG);
    CHECK(ft_group_strided(ctx, "g", 0, 0, 2, &g) == FT_ERR_ARG);
    CHECK(ft_group_strided(ctx, "g", -1, 1, 2, &g) == FT_ERR_ARG);
    CHECK(ft_group_strided(ctx, "g", 0, 9, 2, &g) == FT_ERR_ARG);
    CHECK(strstr(ft_last_error(), "rank 9"));
    return FT_OK;
}

/* Subsets run on their own; equal names and ranks made twice are two groups. */
static ft_status subset_rank(ft_ctx *ctx, void *user) {
    (void)user;
    static const int even[] = {0, 2}, odd[] = {1, 3};
    const int *ranks = ft_rank(ctx) % 2 ? odd : even;
    ft_group *g[2];
    ft_tensor *t[2];
    ft_stream *s[2];
    double a[5];
    for (int k = 0; k < 2; k++) {
        if (k) FT_TRY(ft_group_strided(ctx, "half", ft_rank(ctx) % 2, 2, 2, &g[k]));
        else FT_TRY(ft_group_create(ctx, "half", 2, ranks, &g[k]));
        FT_TRY(vector(ctx, &t[k], FT_F32, 5));
        s[k] = ft_stream_get(ctx, k ? FT_STREAM_GATHER : FT_STREAM_REDUCE);
    }
    for (int round = 0; round < 20; round++) {
        for (int k = 0; k < 2; k++) {
            FT_TRY(ft_fill(t[k], ft_rank(ctx) + 10 * k, s[k]));
            FT_TRY(ft_all_reduce(g[k], s[k], t[k]));
        }
        FT_TRY(ft_sync(ctx));
        for (int k = 0; k < 2; k++) {
            FT_TRY(get(t[k], a));
            CHECK(a[0] == ranks[0] + ranks[1] + 20 * k && a[4] == a[0]);
        }
        if (ft_rank(ctx) % 2) FT_TRY(ft_agree(g[round % 2], "round", (uint64_t)round));
    }
    return FT_OK;
}

static void test_groups(void **state) {
    (void)state;
    ft_config config = config_of(3, FT_OFF, 0);
    launch_ok(&config, group_errors_rank, NULL);
    for (int mode = 0; mode < 2; mode++) {
        config = config_of(4, mode ? FT_ON : FT_OFF, 30);
        launch_ok(&config, subset_rank, NULL);
    }
}

/* Wrong operands are refused on the host, before anything is queued, on cpu and meta alike. */
static ft_status operands_rank(ft_ctx *ctx, void *user) {
    (void)user;
    ft_group *g;
    ft_tensor *full, *shard, *bf16, *wrong, *numbers, *empty, *slot;
    ft_p2p op[2];
    ft_traffic row;
    int64_t four = 4;
    int rank = ft_rank(ctx);
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    FT_TRY(world_group(ctx, "refusals", &g));
    FT_TRY(vector(ctx, &full, FT_F32, 12));
    FT_TRY(vector(ctx, &shard, FT_F32, 4));
    FT_TRY(vector(ctx, &bf16, FT_BF16, 4));
    FT_TRY(vector(ctx, &wrong, FT_F32, 5));
    FT_TRY(vector(ctx, &numbers, FT_I32, 12));
    FT_TRY(ft_tensor_empty(ctx, &empty, FT_F32, 1, &four));
    CHECK(ft_all_gather(g, s, wrong, full) == FT_ERR_SHAPE && strstr(ft_last_error(), "12"));
    CHECK(ft_all_gather(g, s, bf16, full) == FT_ERR_SHAPE && strstr(ft_last_error(), "bf16"));
    CHECK(ft_reduce_scatter(g, s, full, wrong) == FT_ERR_SHAPE);
    CHECK(strstr(ft_last_error(), "reduce-scatter") && strstr(ft_last_error(), "\"refusals\""));
    CHECK(ft_all_gather(g, s, empty, full) == FT_ERR_STATE);
    CHECK(ft_all_gather(g, s, NULL, full) == FT_ERR_ARG);
    CHECK(ft_all_gather(g, NULL, shard, full) == FT_ERR_ARG);
    CHECK(ft_all_gather(NULL, s, shard, full) == FT_ERR_ARG);
    CHECK(ft_all_reduce(g, s, numbers) == FT_ERR_UNSUPPORTED);
    CHECK(ft_broadcast(g, s, full, 3) == FT_ERR_ARG && ft_broadcast(g, s, full, -1) == FT_ERR_ARG);
    for (int k = 0; k < 3; k++) { /* in place: its own slot, no other */
        FT_TRY(slot_of(full, &slot, k, 4));
        if (k == rank) continue;
        CHECK(ft_all_gather(g, s, slot, full) == FT_ERR_ARG);
        CHECK(ft_reduce_scatter(g, s, full, slot) == FT_ERR_ARG);
        CHECK(strstr(ft_last_error(), "overlaps"));
    }
    FT_TRY(ft_tensor_view(full, &slot, rank < 2 ? rank * 4 + 1 : rank * 4 - 1, 1, &four));
    CHECK(ft_all_gather(g, s, slot, full) == FT_ERR_ARG);
    op[0].peer = 3;
    op[0].is_send = 1;
    op[0].tensor = full;
    CHECK(ft_exchange(g, s, 1, op) == FT_ERR_ARG);
    op[0].peer = rank;
    CHECK(ft_exchange(g, s, 1, op) == FT_ERR_ARG && strstr(ft_last_error(), "itself"));
    op[1] = op[0];
    op[1].is_send = 0;
    op[1].tensor = slot;
    CHECK(ft_exchange(g, s, 2, op) == FT_ERR_ARG && strstr(ft_last_error(), "overlap"));
    CHECK(ft_exchange(g, s, -1, op) == FT_ERR_ARG);
    CHECK(ft_traffic_get(ctx, 1, &row) == 1);
    for (int k = 0; k < FT_COLLECTIVE_COUNT; k++) CHECK(!row.calls[k] && !row.sent_bytes[k]);
    return ft_sync(ctx);
}

static void test_operands(void **state) {
    (void)state;
    ft_config config = config_of(3, FT_ON, 0);
    launch_ok(&config, operands_rank, NULL);
    config.device = FT_META;
    launch_ok(&config, operands_rank, NULL);
}

/* ------------------------------------------------------------------------------------- streams */

typedef struct gate { /* closed until somebody opens it */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int open;
} gate;

static void gate_open(gate *g) {
    pthread_mutex_lock(&g->lock);
    g->open = 1;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static ft_status gate_task(void *arg) {
    gate *g = *(gate **)arg;
    pthread_mutex_lock(&g->lock);
    while (!g->open) pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
    return FT_OK;
}

typedef struct event_case {
    int wait;
    double expected;
} event_case;

/* The gather stream is held up by a gate. A consumer on the compute stream that does not wait for
   the gather reads what was there before; one that waits reads what was gathered. */
static ft_status event_rank(ft_ctx *ctx, void *user) {
    const event_case *c = (const event_case *)user;
    ft_stream *compute = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    ft_stream *gather = ft_stream_get(ctx, FT_STREAM_GATHER);
    ft_group *g;
    ft_tensor *shard, *full, *result;
    double a[4];
    gate *barrier = (gate *)ft_host_alloc(ctx, sizeof *barrier);
    CHECK(barrier != NULL);
    pthread_mutex_init(&barrier->lock, NULL);
    pthread_cond_init(&barrier->changed, NULL);
    FT_TRY(world_group(ctx, "events", &g));
    FT_TRY(vector(ctx, &shard, FT_F32, 2));
    FT_TRY(vector(ctx, &full, FT_F32, 4));
    FT_TRY(vector(ctx, &result, FT_F32, 4));
    FT_TRY(ft_fill(shard, 7, compute));
    FT_TRY(ft_fill(full, 1, compute));
    FT_TRY(ft_stream_wait(gather, ft_event_record(compute)));
    FT_TRY(ft_stream_run(gather, gate_task, &barrier, sizeof barrier));
    FT_TRY(ft_all_gather(g, gather, shard, full));
    if (c->wait) FT_TRY(ft_stream_wait(compute, ft_event_record(gather)));
    FT_TRY(ft_copy(result, full, compute));
    if (!c->wait) FT_TRY(ft_stream_sync(compute));
    gate_open(barrier);
    FT_TRY(ft_sync(ctx));
    FT_TRY(get(result, a));
    for (int i = 0; i < 4; i++) CHECK(a[i] == c->expected);
    pthread_cond_destroy(&barrier->changed);
    pthread_mutex_destroy(&barrier->lock);
    return FT_OK;
}

static void test_events(void **state) {
    (void)state;
    ft_config config = config_of(2, FT_ON, 0);
    event_case with = {1, 7}, without = {0, 1};
    for (int run = 0; run < 10; run++) {
        launch_ok(&config, event_rank, &with);
        launch_ok(&config, event_rank, &without);
    }
}

typedef struct log_task {
    int *log, *used;
    int number;
    char ballast[5000]; /* larger than what a stream keeps on the stack */
} log_task;

static ft_status log_run(void *arg) {
    log_task *task = (log_task *)arg;
    task->log[(*task->used)++] = task->number;
    task->number = -1; /* a copy: the caller's argument stays */
    return FT_OK;
}

/* Tasks run in order, on a copy of their argument; streams hand over at events both ways. */
static ft_status order_in_stream_rank(ft_ctx *ctx, void *user) {
    (void)user;
    int log[400], used = 0;
    log_task task;
    ft_event none;
    memset(&none, 0, sizeof none);
    memset(&task, 0, sizeof task);
    task.log = log;
    task.used = &used;
    for (int i = 0; i < 400; i++) {
        ft_stream *s = ft_stream_get(ctx, (ft_stream_kind)(i % FT_STREAM_COUNT));
        int last = (i + FT_STREAM_COUNT - 1) % FT_STREAM_COUNT;
        ft_stream *before = ft_stream_get(ctx, (ft_stream_kind)last);
        task.number = i;
        FT_TRY(ft_stream_wait(s, ft_event_record(before)));
        FT_TRY(ft_stream_wait(s, ft_event_record(s)));
        FT_TRY(ft_stream_wait(s, none));
        FT_TRY(ft_stream_run(s, log_run, &task, i % 2 ? sizeof task : offsetof(log_task, ballast)));
        CHECK(task.number == i);
    }
    FT_TRY(ft_sync(ctx));
    CHECK(used == (ft_ctx_device(ctx) == FT_META ? 0 : 400));
    for (int i = 0; i < used; i++) CHECK(log[i] == i);
    CHECK(ft_stream_get(ctx, FT_STREAM_COUNT) == NULL);
    CHECK(ft_stream_run(ft_stream_get(ctx, FT_STREAM_COMPUTE), NULL, NULL, 0) == FT_ERR_ARG);
    CHECK(ft_stream_run(NULL, log_run, &task, sizeof task) == FT_ERR_ARG);
    return FT_OK;
}

/* An error stays with its stream, reaches streams that wait for it, and stops later work, but what
   was queued still completes: nobody hangs. The launch reports that first error, so the rank tells
   in `user` that it got to its end. */
static ft_status sticky_rank(ft_ctx *ctx, void *user) {
    int log[4], used = 0;
    log_task task;
    ft_stream *compute = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    ft_stream *gather = ft_stream_get(ctx, FT_STREAM_GATHER);
    memset(&task, 0, sizeof task);
    task.log = log;
    task.used = &used;
    ft_status now = ft_stream_run(gather, stream_fails_task, NULL, 0);
    CHECK(now == (ctx->config.async == FT_ON ? FT_OK : FT_ERR_DATA));
    (void)ft_stream_run(gather, log_run, &task, sizeof task);
    (void)ft_stream_wait(compute, ft_event_record(gather));
    (void)ft_stream_run(compute, log_run, &task, sizeof task);
    CHECK(ft_stream_sync(compute) == FT_ERR_DATA);
    CHECK(ft_stream_sync(gather) == FT_ERR_DATA && ft_sync(ctx) == FT_ERR_DATA);
    CHECK(ft_stream_run(gather, log_run, &task, sizeof task) == FT_ERR_DATA);
    CHECK(strcmp(ft_last_error(), "the odd rank's work failed") == 0);
    CHECK(ft_stream_sync(ft_stream_get(ctx, FT_STREAM_REDUCE)) == FT_OK);
    CHECK(used == 0);
    ((int *)user)[ft_rank(ctx)] = 1;
    return FT_OK; /* the launch fails nevertheless */
}

static void test_streams(void **state) {
    (void)state;
    for (int mode = 0; mode < 2; mode++) {
        ft_config config = config_of(2, mode ? FT_ON : FT_OFF, 0);
        launch_ok(&config, order_in_stream_rank, NULL);
        int passed[2] = {0, 0};
        launch_fails(&config, sticky_rank, passed, FT_ERR_DATA, ": the odd rank's work failed");
        assert_true(passed[0] && passed[1]);
        config.device = FT_META;
        launch_ok(&config, order_in_stream_rank, NULL);
    }
}

/* -------------------------------------------------------------------------------------- launch */

static ft_status count_rank(ft_ctx *ctx, void *user) {
    int *runs = (int *)user;
    runs[ft_rank(ctx)]++;
    return FT_OK;
}

static ft_status nothing_rank(ft_ctx *ctx, void *user) {
    (void)ctx;
    (void)user;
    return FT_OK;
}

static void test_config(void **state) {
    (void)state;
    ft_config config = ft_config_default();
    int runs[MAX_WORLD] = {0};
    assert_int_equal(ft_launch(NULL, nothing_rank, NULL), FT_ERR_ARG);
    assert_int_equal(ft_launch(&config, NULL, NULL), FT_ERR_ARG);
    config.world = 4;
    launch_ok(&config, count_rank, runs);
    for (int r = 0; r < MAX_WORLD; r++) assert_int_equal(runs[r], r < 4);
    config.only_rank = 2;
    launch_fails(&config, count_rank, runs, FT_ERR_ARG, "only_rank 2");
    config.device = FT_META;
    launch_ok(&config, count_rank, runs);
    for (int r = 0; r < 4; r++) assert_int_equal(runs[r], 1 + (r == 2));
    config.only_rank = 4;
    launch_fails(&config, count_rank, runs, FT_ERR_ARG, "only_rank is 4");
    config.only_rank = -2;
    launch_fails(&config, count_rank, runs, FT_ERR_ARG, "only_rank is -2");
    config = ft_config_default();
    config.world = 0;
    launch_ok(&config, nothing_rank, NULL);
    config.world = -1;
    launch_fails(&config, nothing_rank, NULL, FT_ERR_ARG, "world is -1");
    config.world = 4097;
    launch_fails(&config, nothing_rank, NULL, FT_ERR_ARG, "world is 4097");
    config = ft_config_default();
    config.delay_us = -1;
    launch_fails(&config, nothing_rank, NULL, FT_ERR_ARG, "delay_us is -1");
    config = ft_config_default();
    config.timeout_s = -0.5;
    launch_fails(&config, nothing_rank, NULL, FT_ERR_ARG, "timeout_s is -0.5");
    config.timeout_s = (double)NAN;
    launch_fails(&config, nothing_rank, NULL, FT_ERR_ARG, "timeout_s");
    config = ft_config_default();
    config.device = (ft_device)7;
    launch_fails(&config, nothing_rank, NULL, FT_ERR_ARG, "device 7");
    config = ft_config_default();
    config.async = (ft_switch)9;
    launch_fails(&config, nothing_rank, NULL, FT_ERR_ARG, "async is 9");
}

static ft_status resolved_rank(ft_ctx *ctx, void *user) {
    const int *expected = (const int *)user;
    CHECK(ctx->config.async == (expected[0] ? FT_ON : FT_OFF));
    CHECK(ctx->config.delay_us == expected[1] && ctx->config.timeout_s == 120);
    return FT_OK;
}

static void set_or_not(const char *name, const char *value) {
    if (value) setenv(name, value, 1);
    else unsetenv(name);
}

static void test_environment(void **state) {
    (void)state;
    static const char *const bad_async[] = {"2", "yes", "", " 1", "1 ", "-1", "+1"};
    static const char *const bad_delay[] = {"1.5", "x", "", "-1", "99999999999999999999",
                                            "60000001"};
    const char *async = getenv("FT_CPU_ASYNC"), *delay = getenv("FT_DELAY_US");
    char *old_async = async ? strdup(async) : NULL, *old_delay = delay ? strdup(delay) : NULL;
    ft_config config = ft_config_default();
    int expected[2] = {1, 25};
    unsetenv("FT_DELAY_US");
    for (int k = 0; k < 7; k++) {
        setenv("FT_CPU_ASYNC", bad_async[k], 1);
        launch_fails(&config, nothing_rank, NULL, FT_ERR_ARG, "FT_CPU_ASYNC");
    }
    setenv("FT_CPU_ASYNC", "1", 1);
    for (int k = 0; k < 6; k++) {
        setenv("FT_DELAY_US", bad_delay[k], 1);
        launch_fails(&config, nothing_rank, NULL, FT_ERR_ARG, "FT_DELAY_US");
    }
    setenv("FT_DELAY_US", "25", 1);
    launch_ok(&config, resolved_rank, expected);
    config.async = FT_OFF; /* the config wins over the environment */
    config.delay_us = 3;
    expected[0] = 0;
    expected[1] = 3;
    launch_ok(&config, resolved_rank, expected);
    unsetenv("FT_CPU_ASYNC");
    unsetenv("FT_DELAY_US");
    config = ft_config_default();
    expected[1] = 0;
    launch_ok(&config, resolved_rank, expected);
    set_or_not("FT_CPU_ASYNC", old_async);
    set_or_not("FT_DELAY_US", old_delay);
    free(old_async);
    free(old_delay);
}

static ft_status meta_many_rank(ft_ctx *ctx, void *user) {
    const int *first_bad = (const int *)user;
    ft_mesh mesh;
    ft_group *g;
    ft_tensor *full, *shard;
    FT_TRY(ft_mesh_create(ctx, 64, 8, 8, &mesh));
    FT_TRY(ft_mesh_group(ctx, &mesh, FT_AXIS_DP, "dp", &g));
    FT_TRY(vector(ctx, &full, FT_BF16, INT64_C(1) << 40));
    FT_TRY(vector(ctx, &shard, FT_BF16, INT64_C(1) << 34));
    FT_TRY(ft_all_gather(g, ft_stream_get(ctx, FT_STREAM_GATHER), shard, full));
    if (ft_rank(ctx) >= *first_bad) return ft_error(FT_ERR_OOM, "this one does not fit");
    return ft_agree(g, "rank", (uint64_t)ft_rank(ctx)); /* passes on meta, without peers */
}

/* 4096 ranks that need no peers; of those that fail the lowest is named, in every run. */
static void test_meta_world(void **state) {
    (void)state;
    ft_config config = config_of(4096, FT_ON, 1000);
    int first_bad = 4096;
    config.device = FT_META;
    launch_ok(&config, meta_many_rank, &first_bad);
    first_bad = 13;
    for (int run = 0; run < 20; run++) {
        launch_fails(&config, meta_many_rank, &first_bad, FT_ERR_OOM, "rank 13: this one");
    }
}

static ft_status host_memory_rank(ft_ctx *ctx, void *user) {
    (void)user;
    char *block[5];
    for (int k = 0; k < 5; k++) {
        block[k] = (char *)ft_host_alloc(ctx, (size_t)k * 1000);
        CHECK(block[k] && (uintptr_t)block[k] % 16 == 0);
        for (int i = 0; i < k * 1000; i++) CHECK(block[k][i] == 0);
        memset(block[k], 7, (size_t)k * 1000);
    }
    ft_host_free(ctx, block[2]); /* from the middle, the ends, and not at all */
    ft_host_free(ctx, block[4]);
    ft_host_free(ctx, block[0]);
    ft_host_free(ctx, NULL);
    CHECK(ft_host_alloc(ctx, SIZE_MAX) == NULL && ft_host_alloc(ctx, SIZE_MAX - 64) == NULL);
    CHECK(strstr(ft_last_error(), "ft_host_alloc"));
    return FT_OK;
}

static void test_host_memory(void **state) {
    (void)state;
    ft_config config = config_of(2, FT_OFF, 0);
    launch_ok(&config, host_memory_rank, NULL);
}

static void test_error_text(void **state) {
    (void)state;
    char longer[3000];
    assert_int_equal(ft_error(FT_ERR_IO, "%d and %s", 5, "six"), FT_ERR_IO);
    assert_string_equal(ft_last_error(), "5 and six");
    ft_error(FT_ERR_IO, "outer: %s", ft_last_error());
    assert_string_equal(ft_last_error(), "outer: 5 and six");
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    ft_error(FT_ERR_IO, "%s", longer);
    assert_int_equal(strlen(ft_last_error()), 1023);
    for (int k = 0; k <= (int)FT_ERR_UNSUPPORTED; k++) {
        for (int j = 0; j < k; j++) {
            assert_string_not_equal(ft_status_name((ft_status)k), ft_status_name((ft_status)j));
        }
    }
    assert_non_null(ft_status_name((ft_status)99));
}

/* ------------------------------------------------------------------------ when things go wrong */

typedef struct chaos_case {
    int victim, step; /* who fails, and before which of its steps */
} chaos_case;

/* A little of everything, with a buffer that comes and goes at every step. At the moment of the
   failure peers may be reading what this rank frees: for the sanitizers to judge. */
static ft_status chaos_rank(ft_ctx *ctx, void *user) {
    const chaos_case *c = (const chaos_case *)user;
    ft_group *g[FT_STREAM_COUNT];
    ft_tensor *full, *shard, *in;
    ft_stream *s[FT_STREAM_COUNT];
    static const char *const names[FT_STREAM_COUNT] = {"a", "b", "c", "d"};
    int n = ft_world(ctx);
    int64_t elems = 3000;
    for (int k = 0; k < FT_STREAM_COUNT; k++) {
        s[k] = ft_stream_get(ctx, (ft_stream_kind)k);
        FT_TRY(world_group(ctx, names[k], &g[k]));
    }
    FT_TRY(vector(ctx, &full, FT_F32, 3000 * n));
    FT_TRY(ft_tensor_empty(ctx, &shard, FT_F32, 1, &elems));
    FT_TRY(vector(ctx, &in, FT_F32, 3000));
    FT_TRY(ft_fill(full, 1, s[0]));
    for (int step = 0; step < 12; step++) {
        int k = step % FT_STREAM_COUNT, last = (step + FT_STREAM_COUNT - 1) % FT_STREAM_COUNT;
        FT_TRY(ft_stream_wait(s[k], ft_event_record(s[last])));
        if (ft_rank(ctx) == c->victim && step == c->step) {
            if (step % 2) return ft_error(FT_ERR_DATA, "chaos");
            FT_TRY(ft_stream_run(s[k], stream_fails_task, NULL, 0));
        }
        FT_TRY(ft_tensor_attach(shard, FT_TAG_OTHER, s[k]));
        FT_TRY(ft_fill(shard, 1, s[k]));
        if (step % 4 == 0) FT_TRY(ft_all_gather(g[k], s[k], shard, full));
        if (step % 4 == 1) FT_TRY(ft_reduce_scatter(g[k], s[k], full, shard));
        if (step % 4 == 2) FT_TRY(ring(g[k], s[k], shard, in));
        if (step % 4 == 3) FT_TRY(ft_all_reduce(g[k], s[k], full));
        FT_TRY(ft_tensor_detach(shard, s[k]));
    }
    return FT_OK;
}

static void test_failures_at_every_step(void **state) {
    (void)state;
    for (int run = 0; run < 48; run++) {
        ft_config config = config_of(4, run % 2 ? FT_ON : FT_OFF, run % 3 * 40);
        chaos_case c;
        c.victim = run % 4;
        c.step = run / 4;
        launch_fails(&config, chaos_rank, &c, FT_ERR_DATA, c.step % 2 ? ": chaos" : "odd rank's");
    }
}

static void test_threads_run_out(void **state) {
    (void)state;
    chaos_case none = {-1, -1};
    for (int k = 1; k <= 4; k++) { /* the threads of ranks */
        ft_config config = config_of(4, FT_OFF, 0);
        char part[40];
        snprintf(part, sizeof part, "rank %d: cannot start a thread", k - 1);
        fail_thread = k;
        launch_fails(&config, chaos_rank, &none, FT_ERR_OOM, part);
        config.device = FT_META;
        fail_thread = k;
        if (k > 1) launch_ok(&config, chaos_rank, &none); /* the others do its work */
        else launch_fails(&config, chaos_rank, &none, FT_ERR_OOM, part);
    }
    for (int k = 5; k <= 16; k++) { /* and the 12 of streams, as they come */
        ft_config config = config_of(4, FT_ON, 0);
        fail_thread = k;
        launch_fails(&config, chaos_rank, &none, FT_ERR_OOM, "thread");
    }
    fail_thread = 0;
}

/* Whichever allocation fails, the launch says so, ends and frees everything. */
static void test_memory_runs_out(void **state) {
    (void)state;
    chaos_case none = {-1, -1};
    for (int mode = 0; mode < 2; mode++) {
        int failures = 0, k = 1;
        for (;; k++) {
            ft_config config = config_of(2, mode ? FT_ON : FT_OFF, 0);
            fail_malloc = k;
            ft_status status = ft_launch(&config, chaos_rank, &none);
            int reached = fail_malloc == 0;
            fail_malloc = 0;
            if (status != FT_OK && status != FT_ERR_OOM) {
                fail_msg("allocation %d: %s: %s", k, ft_status_name(status), ft_last_error());
            }
            if (status == FT_ERR_OOM) failures++;
            if (!reached) break;
            assert_true(k < 2000);
        }
        assert_true(failures > 20);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error_text),
        cmocka_unit_test(test_config),
        cmocka_unit_test(test_environment),
        cmocka_unit_test(test_host_memory),
        cmocka_unit_test(test_meta_world),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_mesh),
        cmocka_unit_test(test_operands),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_small_addends),
        cmocka_unit_test(test_rank_order),
        cmocka_unit_test(test_rings),
        cmocka_unit_test(test_order_of_messages),
        cmocka_unit_test(test_buffers_reusable),
        cmocka_unit_test(test_traffic),
        cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_failing_rank),
        cmocka_unit_test(test_rank_that_ends),
        cmocka_unit_test(test_timeout),
        cmocka_unit_test(test_failures_at_every_step),
        cmocka_unit_test(test_threads_run_out),
        cmocka_unit_test(test_memory_runs_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
