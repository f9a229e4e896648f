/* The NCCL transport and the host's side of the GPU, on fake GPUs (tests/fake_gpu/fake_gpu.h):
   values of every collective, ranks that disagree, come late or not at all, a host far ahead of its
   GPU, and training that gives what the CPU and the local transport give.

   cc -std=c11 -I. -Itests/fake_gpu tests/test_nccl.c -lcmocka -lm -lpthread

   What ranks do is checked by the ranks; the main thread asserts what the launch says. */

#define FT_CUDA
#define FT_NCCL
#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"
#include "tests/fake_gpu/fake_gpu.h"
#include "check.h"
#include "mesh_harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <cmocka.h>

enum { MAX_WORLD = 8 };

static ft_config over_nccl(int world, double timeout_s)
{
    ft_config config = ft_config_default();
    config.world = world;
    config.device = FT_GPU;
    config.gpus = world;
    config.transport = FT_TRANSPORT_NCCL;
    config.timeout_s = timeout_s;
    return config;
}

static void run(int world, ft_rank_fn fn, void *user)
{
    ft_config config = over_nccl(world, 30);
    if (ft_launch(&config, fn, user) != FT_OK) fail_msg("%s", ft_last_error());
}

/* Ranks that know of each other through NCCL alone, as processes do. */

typedef struct apart {
    const ft_config *config;
    ft_rank_fn fn;
    void *user;
    int rank;
    ft_status status;
    char text[FT__TEXT_BYTES];
} apart;

static void *apart_main(void *argument)
{
    apart *a = (apart *)argument;
    a->status = ft__launch(a->config, a->fn, a->user, a->rank, a->rank);
    snprintf(a->text, sizeof a->text, "%s", a->status == FT_OK ? "" : ft_last_error());
    return NULL;
}

static void launch_apart(const ft_config *config, ft_rank_fn fn, void *user, apart ranks[MAX_WORLD])
{
    pthread_t threads[MAX_WORLD];
    ncclUniqueId another;
    (void)ncclGetUniqueId(&another);
    fake_meeting = config->world;
    for (int r = 0; r < config->world; r++) {
        memset(&ranks[r], 0, sizeof ranks[r]);
        ranks[r].config = config;
        ranks[r].fn = fn;
        ranks[r].user = user;
        ranks[r].rank = r;
        assert_int_equal(pthread_create(&threads[r], NULL, apart_main, &ranks[r]), 0);
    }
    for (int r = 0; r < config->world; r++) pthread_join(threads[r], NULL);
}

/* --------------------------------------------------------------------------------- collectives */

static ft_status make(ft_ctx *ctx, int64_t n, ft_dtype dtype, float first, float step,
                      ft_tensor **t)
{
    float values[1024];
    uint16_t halves[1024];
    int32_t ints[1024];
    for (int64_t i = 0; i < n; i++) {
        values[i] = first + step * (float)i;
        halves[i] = ft_bf16_from_f32(values[i]);
        ints[i] = (int32_t)values[i];
    }
    FT_TRY(ft_tensor_create(ctx, t, dtype, 1, &n, FT_TAG_PARAM));
    return ft_upload(*t, dtype == FT_F32 ? (void *)values : dtype == FT_BF16 ? (void *)halves
                                                                            : (void *)ints);
}

/* Element from + i of t must be first + step * i; sums in bf16 are rounded. */
static ft_status expect(ft_tensor *t, int64_t from, int64_t n, float first, float step)
{
    union { float f[1024]; uint16_t h[1024]; int32_t i[1024]; } got;
    FT_TRY(ft_download(t, &got));
    for (int64_t i = 0; i < n; i++) {
        const float want = first + step * (float)i;
        const float is = t->dtype == FT_F32 ? got.f[from + i] : t->dtype == FT_BF16
            ? ft_f32_from_bf16(got.h[from + i]) : (float)got.i[from + i];
        if (fabsf(is - want) > (t->dtype == FT_BF16 ? fabsf(want) / 100 : 0))
            return ft_error(FT_ERR_DATA, "element %d is %g, not %g", (int)(from + i), (double)is,
                            (double)want);
    }
    return FT_OK;
}

static ft_status collectives_of(ft_ctx *ctx, ft_group *g, int n, int me, ft_dtype dtype)
{
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    const float sum = (float)(n * (n - 1) / 2);
    ft_tensor *part, *whole, *other;
    for (int64_t each = 1; each <= 17; each += 8) {
        FT_TRY(make(ctx, each, dtype, 10 * (float)me, 1, &part));
        FT_TRY(make(ctx, n * each, dtype, 100, 0, &whole));
        FT_TRY(ft_all_gather(g, s, part, whole));
        for (int r = 0; r < n; r++) FT_TRY(expect(whole, r * each, each, 10 * (float)r, 1));
        FT_TRY(make(ctx, each, dtype, (float)me, 2, &other));
        FT_TRY(ft_broadcast(g, s, other, n - 1));
        FT_TRY(expect(other, 0, each, (float)(n - 1), 2));
        if (dtype != FT_I32) {
            FT_TRY(ft_all_reduce(g, s, part));
            FT_TRY(expect(part, 0, each, 10 * sum, (float)n));
            FT_TRY(make(ctx, n * each, dtype, (float)me, 1, &whole));
            FT_TRY(ft_reduce_scatter(g, s, whole, part));
            FT_TRY(expect(part, 0, each, sum + (float)(n * me * each), (float)n));
        }
    }
    return ft_barrier(g, s);
}

static ft_status collectives(ft_ctx *ctx, void *user)
{
    const int rank = ft_rank(ctx), world = ft_world(ctx);
    ft_group *all, *pair, *alone;
    (void)user;
    FT_TRY(ft_group_strided(ctx, "all", 0, 1, world, &all));
    FT_TRY(ft_group_strided(ctx, "pair", rank % 2, 2, world / 2, &pair));
    FT_TRY(ft_group_strided(ctx, "alone", rank, 1, 1, &alone));
    for (int t = 0; t < 3; t++) {
        const ft_dtype dtype = t == 0 ? FT_F32 : t == 1 ? FT_BF16 : FT_I32;
        FT_TRY(collectives_of(ctx, all, world, rank, dtype));
        FT_TRY(collectives_of(ctx, pair, world / 2, rank / 2, dtype));
        FT_TRY(collectives_of(ctx, alone, 1, 0, dtype));
    }
    FT_TRY(ft_agree(all, "the answer", 42));
    return ft_sync(ctx);
}

static void collectives_have_their_values(void **state)
{
    (void)state;
    run(2, collectives, NULL);
    run(6, collectives, NULL);
}

/* Both ways between neighbours in a ring, in orders of ops that differ from rank to rank, and of
   sizes that come again and are new in turn. */
static ft_status ring(ft_ctx *ctx, void *user)
{
    const int n = ft_world(ctx), me = ft_rank(ctx), next = (me + 1) % n, last = (me + n - 1) % n;
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_PIPE);
    ft_group *g;
    (void)user;
    FT_TRY(ft_group_strided(ctx, "ring", 0, 1, n, &g));
    for (int i = 0; i < 24; i++) {
        const int64_t right = 1 + i % 7, left = 100 + i % 5;
        ft_tensor *to_next, *to_last, *from_last, *from_next;
        ft_p2p ops[4], turned[4];
        FT_TRY(make(ctx, right, FT_F32, (float)(1000 * me + i), 1, &to_next));
        FT_TRY(make(ctx, left, FT_F32, (float)(2000 * me + i), 1, &to_last));
        FT_TRY(make(ctx, right, FT_F32, -1, 0, &from_last));
        FT_TRY(make(ctx, left, FT_F32, -1, 0, &from_next));
        FT_TRY(ft_sync(ctx));
        ops[0] = (ft_p2p){next, 1, to_next};
        ops[1] = (ft_p2p){last, 1, to_last};
        ops[2] = (ft_p2p){last, 0, from_last};
        ops[3] = (ft_p2p){next, 0, from_next};
        for (int k = 0; k < 4; k++) turned[k] = ops[(k + me + i) % 4];
        FT_TRY(ft_exchange(g, s, 4, turned));
        FT_TRY(ft_sync(ctx));
        FT_TRY(expect(from_last, 0, right, (float)(1000 * last + i), 1));
        FT_TRY(expect(from_next, 0, left, (float)(2000 * next + i), 1));
    }
    return FT_OK;
}

/* One exchange here meets two there, and the other way round, with sizes that are new. */
static ft_status pairings(ft_ctx *ctx, void *user)
{
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    const int me = ft_rank(ctx);
    ft_group *g;
    (void)user;
    FT_TRY(ft_group_strided(ctx, "two", 0, 1, 2, &g));
    for (int64_t n = 1; n <= 20; n++) {
        const int twice = me == n % 2;
        ft_tensor *out, *in;
        FT_TRY(make(ctx, n, FT_F32, (float)me, 1, &out));
        FT_TRY(make(ctx, n, FT_F32, -1, 0, &in));
        FT_TRY(ft_sync(ctx));
        const ft_p2p ops[2] = {{!me, twice ? 0 : 1, twice ? in : out},
                               {!me, twice ? 1 : 0, twice ? out : in}};
        FT_TRY(ft_exchange(g, s, twice ? 1 : 2, ops));
        if (twice) FT_TRY(ft_exchange(g, s, 1, ops + 1));
        FT_TRY(ft_sync(ctx));
        FT_TRY(expect(in, 0, n, (float)!me, 1));
    }
    return FT_OK;
}

static ft_status many_messages(ft_ctx *ctx, void *user)
{
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    const int me = ft_rank(ctx);
    ft_tensor *t[40];
    ft_p2p ops[40];
    ft_group *g;
    (void)user;
    FT_TRY(ft_group_strided(ctx, "two", 0, 1, 2, &g));
    for (int i = 0; i < 40; i++) {
        FT_TRY(make(ctx, 1 + i, FT_F32, me ? -1 : (float)i, me ? 0 : 1, &t[i]));
        ops[i] = (ft_p2p){!me, !me, t[i]};
    }
    FT_TRY(ft_sync(ctx));
    FT_TRY(ft_exchange(g, s, 40, ops));
    FT_TRY(ft_sync(ctx));
    for (int i = 0; i < 40; i++) FT_TRY(expect(t[i], 0, 1 + i, (float)i, 1));
    return FT_OK;
}

/* Rank 0's messages in one group wait for what it does afterwards in another. */
static ft_status crossed(ft_ctx *ctx, void *user)
{
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_PIPE);
    ft_stream *other = ft_stream_get(ctx, FT_STREAM_GATHER);
    const int me = ft_rank(ctx);
    ft_group *g, *h;
    ft_tensor *go, *t[30];
    (void)user;
    FT_TRY(ft_group_strided(ctx, "first", 0, 1, 2, &g));
    FT_TRY(ft_group_strided(ctx, "second", 0, 1, 2, &h));
    FT_TRY(make(ctx, 3, FT_F32, 1, 0, &go));
    for (int i = 0; i < 30; i++) FT_TRY(make(ctx, 1 + i, FT_F32, (float)me, 0, &t[i]));
    FT_TRY(ft_sync(ctx));
    const ft_p2p then = {!me, !me, go};
    if (me == 1) {
        FT_TRY(ft_exchange(h, other, 1, &then));
        FT_TRY(ft_sync(ctx));
    }
    for (int i = 0; i < 30; i++) {
        const ft_p2p op = {!me, me, t[i]};
        FT_TRY(ft_exchange(g, s, 1, &op));
    }
    if (me == 0) FT_TRY(ft_exchange(h, other, 1, &then));
    return ft_sync(ctx);
}

static void messages_arrive(void **state)
{
    (void)state;
    run(3, ring, NULL);
    run(5, ring, NULL);
    run(2, pairings, NULL);
    run(2, many_messages, NULL);
    run(2, crossed, NULL);
}

static void processes_launch_again_and_again(void **state)
{
    ft_config config = over_nccl(4, 30);
    apart ranks[MAX_WORLD];
    (void)state;
    for (int i = 0; i < 3; i++) {
        launch_apart(&config, i == 1 ? ring : collectives, NULL, ranks);
        for (int r = 0; r < 4; r++)
            if (ranks[r].status != FT_OK) fail_msg("%s", ranks[r].text);
    }
}

static ft_status many_sizes(ft_ctx *ctx, void *user)
{
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_GATHER);
    ft_group *g;
    (void)user;
    FT_TRY(ft_group_strided(ctx, "all", 0, 1, ft_world(ctx), &g));
    for (int64_t n = 1; n <= 400; n++) {
        ft_tensor *t;
        FT_TRY(make(ctx, n, FT_F32, 1, 0, &t));
        FT_TRY(ft_sync(ctx));
        FT_TRY(ft_all_reduce(g, s, t));
        FT_TRY(ft_sync(ctx));
        FT_TRY(expect(t, 0, n, (float)ft_world(ctx), 0));
        ft_tensor_free(t);
    }
    return FT_OK;
}

static void any_number_of_sizes(void **state)
{
    (void)state;
    run(2, many_sizes, NULL);
}

/* ------------------------------------------------------------------------------- disagreements */

typedef struct quarrel {
    const char *what;
    ft_status status[MAX_WORLD];         /* of each rank's own program */
    char text[MAX_WORLD][FT__TEXT_BYTES];
} quarrel;

/* Calls of so many sizes that all places for announcements were used. */
static ft_status others(ft_ctx *ctx, ft_group *g)
{
    const int n = ft_world(ctx), next = (ft_rank(ctx) + 1) % n, last = (ft_rank(ctx) + n - 1) % n;
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_GATHER);
    for (int64_t i = 20; i < 40; i++) {
        ft_tensor *own, *other;
        FT_TRY(make(ctx, i, FT_F32, 1, 0, &own));
        FT_TRY(make(ctx, i, FT_F32, 1, 0, &other));
        FT_TRY(ft_sync(ctx));
        const ft_p2p ops[2] = {{next, 1, own}, {last, 0, other}};
        FT_TRY(ft_exchange(g, s, 2, ops));
        FT_TRY(ft_all_reduce(g, s, own));
    }
    return ft_sync(ctx);
}

/* The last rank is the odd one. */
static ft_status quarrel_run(ft_ctx *ctx, const char *what)
{
    const int n = ft_world(ctx), me = ft_rank(ctx), odd = me == n - 1;
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_GATHER);
    ft_tensor *small, *smalls, *large, *larges, *half, *halves;
    ft_group *g;
    FT_TRY(ft_group_strided(ctx, "everyone", 0, 1, n, &g));
    FT_TRY(make(ctx, 8, FT_F32, 1, 0, &small));
    FT_TRY(make(ctx, 8 * n, FT_F32, 1, 0, &smalls));
    FT_TRY(make(ctx, 16, FT_F32, 1, 0, &large));
    FT_TRY(make(ctx, 16 * n, FT_F32, 1, 0, &larges));
    FT_TRY(make(ctx, 8, FT_BF16, 1, 0, &half));
    FT_TRY(make(ctx, 8 * n, FT_BF16, 1, 0, &halves));
    FT_TRY(ft_sync(ctx));
    if (!strcmp(what, "alone after others")) FT_TRY(others(ctx, g));
    if (!strncmp(what, "alone", 5) && odd) return FT_OK;
    if (!strcmp(what, "fails") && odd) return ft_error(FT_ERR_DATA, "of its own");
    if (!strcmp(what, "late") && odd) {
        const struct timespec while_ = {1, 0};
        nanosleep(&while_, NULL);
    }
    if (!strcmp(what, "turn")) {
        for (int i = 0; i < 300; i++) {
            const int other = (i + (odd && i == 20)) % 2;
            FT_TRY(ft_all_gather(g, s, other ? large : small, other ? larges : smalls));
        }
    } else if (!strcmp(what, "turn of roots")) {
        for (int i = 0; i < 300; i++)
            FT_TRY(ft_broadcast(g, s, small, (i + (odd && (i == 20 || i == 21))) % 2));
    } else if (!strcmp(what, "new and old")) { /* what is new here was seen there, and goes on */
        FT_TRY(ft_all_gather(g, s, half, halves));
        for (int i = 0; i < 2; i++)
            FT_TRY(ft_all_gather(g, s, odd ? half : small, odd ? halves : smalls));
    } else if (!strcmp(what, "message, third")) { /* of five only this one differs */
        ft_tensor *parts[5];
        ft_p2p ops[5];
        for (int i = 0; i < 5; i++) {
            FT_TRY(make(ctx, 40 + i + (odd && i == 2 ? 60 : 0), FT_F32, 1, 0, &parts[i]));
            ops[i] = (ft_p2p){!me, !me, parts[i]};
        }
        FT_TRY(ft_sync(ctx));
        FT_TRY(ft_exchange(g, s, 5, ops));
    } else if (!strcmp(what, "message, new and old")) { /* sent what is known, wanted what is new */
        for (int i = 0; i < 2; i++) {
            const ft_p2p op = {!me, !me, odd && i ? large : small};
            FT_TRY(ft_exchange(g, s, 1, &op));
        }
    } else if (!strncmp(what, "message", 7)) {
        const int more = !strcmp(what, "message, more");
        const ft_p2p send = {n - 1, 1, more ? large : small};
        const ft_p2p receive = {0, 0, more ? small : large};
        if (me == 0) FT_TRY(ft_exchange(g, s, 1, &send));
        if (odd) FT_TRY(ft_exchange(g, s, 1, &receive));
    } else if (!strcmp(what, "alone with a message")) {
        const ft_p2p ops[2] = {{1, 1, small}, {1, 0, large}};
        FT_TRY(ft_exchange(g, s, 2, ops));
    } else if (!strcmp(what, "root")) {
        FT_TRY(ft_broadcast(g, s, small, odd));
    } else if (!strcmp(what, "kind") && odd) {
        FT_TRY(ft_reduce_scatter(g, s, smalls, small));
    } else if (!strcmp(what, "size") && odd) {
        FT_TRY(ft_all_gather(g, s, large, larges));
    } else if (!strcmp(what, "dtype") && odd) {
        FT_TRY(ft_all_gather(g, s, half, halves));
    } else {
        FT_TRY(ft_all_gather(g, s, small, smalls));
    }
    return ft_sync(ctx);
}

static ft_status quarrel_rank(ft_ctx *ctx, void *user)
{
    quarrel *q = (quarrel *)user;
    const int me = ft_rank(ctx);
    q->status[me] = quarrel_run(ctx, q->what);
    if (q->status[me] == FT_OK) return FT_OK;
    snprintf(q->text[me], sizeof q->text[me], "%s", ft_last_error());
    return q->status[me];
}

/* The launch's status; what it says in `says`. */
static ft_status quarrel_of(const char *what, int world, quarrel *q, char says[FT__TEXT_BYTES])
{
    ft_config config = over_nccl(world, 2);
    memset(q, 0, sizeof *q);
    q->what = what;
    ft_status status = ft_launch(&config, quarrel_rank, q);
    snprintf(says, FT__TEXT_BYTES, "%s", status == FT_OK ? "" : ft_last_error());
    return status;
}

/* What is asked for, and by the odd one; both must be in the message. */
static const char *const quarrels[][3] = {
    {"size", "all-gather of 16 fp32", "all-gather of 32 fp32"},
    {"dtype", "all-gather of 16 fp32", "all-gather of 16 bf16"},
    {"kind", "all-gather of 16 fp32", "reduce-scatter of 16 fp32"},
    {"root", "broadcast of 8 fp32 elements from group rank 0", "from group rank 1"},
    {"message, less", "receive of 16 fp32", "send of 8 fp32"},
    {"message, more", "receive of 8 fp32", "send of 16 fp32"},
    {"message, third", "receive of 102 fp32", "send of 42 fp32"},
    {"message, new and old", "receive of 16 fp32", "rank 0 is in another call"},
    {"turn", "all-gather of", "after other calls"},
    {"turn of roots", "broadcast of 8 fp32 elements from group rank", "after other calls"},
    {"new and old", "all-gather of 16 fp32", "rank 1 is in another call"},
};

/* Of a message the sender, rank 0, may be through before anyone finds out; and so may be who has
   taken another's announcement for the gather that it asked for. */
static int is_certain(size_t i, int rank)
{
    if (!strncmp(quarrels[i][0], "message", 7)) return rank == 1;
    return rank == 0 || strcmp(quarrels[i][0], "new and old") != 0;
}

static void is_told(const char *const one[3], ft_status status, const char *says)
{
    if (status != FT_ERR_COMM) fail_msg("%s: %s: %s", one[0], ft_status_name(status), says);
    for (int k = 1; k < 3; k++)
        if (!strstr(says, one[k])) fail_msg("%s: %s", one[0], says);
    if (!strstr(says, "\"everyone\"")) fail_msg("%s: %s", one[0], says);
}

static void ranks_that_disagree_are_told(void **state)
{
    quarrel q;
    char says[FT__TEXT_BYTES];
    (void)state;
    for (size_t i = 0; i < sizeof quarrels / sizeof quarrels[0]; i++) {
        ft_status status = quarrel_of(quarrels[i][0], 2, &q, says);
        is_told(quarrels[i], status, says);
        for (int r = 0; r < 2; r++) /* nobody went on as if nothing had been */
            if (is_certain(i, r) && q.status[r] == FT_OK)
                fail_msg("%s: rank %d ends well", quarrels[i][0], r);
    }
    assert_int_equal(quarrel_of("size", 5, &q, says), FT_ERR_COMM);
    assert_non_null(strstr(says, "\"everyone\""));
}

/* Every one finds out by itself. */
static void processes_that_disagree_are_told(void **state)
{
    ft_config config = over_nccl(2, 2);
    apart ranks[MAX_WORLD];
    quarrel q;
    (void)state;
    for (size_t i = 0; i < sizeof quarrels / sizeof quarrels[0]; i++) {
        memset(&q, 0, sizeof q);
        q.what = quarrels[i][0];
        launch_apart(&config, quarrel_rank, &q, ranks);
        for (int r = 0; r < 2; r++)
            if (is_certain(i, r)) is_told(quarrels[i], ranks[r].status, ranks[r].text);
    }
}

static void who_does_not_come_is_missed(void **state)
{
    ft_config config = over_nccl(3, 2);
    apart ranks[MAX_WORLD];
    quarrel q;
    char says[FT__TEXT_BYTES];
    (void)state;
    assert_int_equal(quarrel_of("late", 3, &q, says), FT_OK);
    assert_int_equal(quarrel_of("alone", 3, &q, says), FT_ERR_TIMEOUT);
    assert_non_null(strstr(says, "all-gather of 24 fp32 elements on group \"everyone\""));
    assert_non_null(strstr(says, "nothing moved for 2 s"));
    assert_int_equal(quarrel_of("alone after others", 3, &q, says), FT_ERR_TIMEOUT);
    assert_non_null(strstr(says, "all-gather of 24 fp32 elements on group \"everyone\""));
    assert_int_equal(quarrel_of("alone with a message", 2, &q, says), FT_ERR_TIMEOUT);
    assert_non_null(strstr(says, "exchange of 2 messages: send of 8 fp32 elements to 1, receive of "
                           "16 fp32 elements from 1 on group \"everyone\" (rank 0 of 2)"));
    assert_int_equal(quarrel_of("fails", 3, &q, says), FT_ERR_DATA);
    assert_non_null(strstr(says, "rank 2: of its own"));
    for (int r = 0; r < 2; r++) assert_int_equal(q.status[r], FT_ERR_PEER);
    q.what = "fails";
    launch_apart(&config, quarrel_rank, &q, ranks);
    for (int r = 0; r < 2; r++) assert_int_equal(ranks[r].status, FT_ERR_TIMEOUT);
    assert_int_equal(ranks[2].status, FT_ERR_DATA);
}

/* The last rank fails while the others make groups. */
static ft_status fails_among_groups(ft_ctx *ctx, void *user)
{
    const int n = ft_world(ctx);
    (void)user;
    if (ft_rank(ctx) == n - 1) {
        const struct timespec while_ = {0, 20000000};
        nanosleep(&while_, NULL);
        return ft_error(FT_ERR_DATA, "of its own");
    }
    for (int i = 0; i < 60; i++) {
        char name[16];
        ft_group *g;
        snprintf(name, sizeof name, "group %d", i);
        FT_TRY(ft_group_strided(ctx, name, 0, 1, n - 1, &g));
    }
    return ft_sync(ctx);
}

static void a_rank_may_fail_while_groups_are_made(void **state)
{
    ft_config config = over_nccl(3, 5);
    (void)state;
    for (int i = 0; i < 20; i++) {
        assert_int_equal(ft_launch(&config, fails_among_groups, NULL), FT_ERR_DATA);
        assert_non_null(strstr(ft_last_error(), "rank 2: of its own"));
    }
}

/* Many calls are queued at once, with a time-out of a second: the GPU is slow, not stuck. */
static ft_status run_ahead(ft_ctx *ctx, void *user)
{
    ft_stream *s = ft_stream_get(ctx, FT_STREAM_REDUCE);
    const int *calls = (const int *)user;
    ft_group *g;
    ft_tensor *t;
    FT_TRY(ft_group_strided(ctx, "all", 0, 1, 2, &g));
    FT_TRY(make(ctx, 4, FT_F32, 0, 0, &t));
    FT_TRY(ft_sync(ctx));
    for (int i = 0; i < *calls; i++) FT_TRY(ft_all_reduce(g, s, t));
    return ft_sync(ctx);
}

static void a_host_far_ahead_is_not_stuck(void **state)
{
    static const int calls[] = {60, 700};
    ft_config config = over_nccl(2, 1);
    (void)state;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(setenv("FAKE_SLOW_US", i ? "5000" : "40000", 1), 0);
        ft_status status = ft_launch(&config, run_ahead, (void *)(size_t)&calls[i]);
        assert_int_equal(unsetenv("FAKE_SLOW_US"), 0);
        if (status != FT_OK) fail_msg("%d calls: %s", calls[i], ft_last_error());
    }
}

/* ------------------------------------------------------------------------------------ refusals */

static ft_status nothing(ft_ctx *ctx, void *user)
{
    (void)user;
    return ft_sync(ctx);
}

static void what_cannot_be_is_refused(void **state)
{
    ft_config config = over_nccl(4, 5);
    (void)state;
    config.gpus = 2;
    assert_int_equal(ft_launch(&config, nothing, NULL), FT_ERR_UNSUPPORTED);
    assert_non_null(strstr(ft_last_error(), "a GPU for each rank"));
    config = over_nccl(4, 5);
    config.gpus = 99;
    assert_int_equal(ft_launch(&config, nothing, NULL), FT_ERR_ARG);
    assert_non_null(strstr(ft_last_error(), "99 GPUs asked for, 16 visible"));
    assert_int_equal(setenv("FAKE_GPUS", "0", 1), 0);
    assert_int_equal(ft_launch(&config, nothing, NULL), FT_ERR_UNSUPPORTED);
    assert_non_null(strstr(ft_last_error(), "no GPU is visible"));
    assert_int_equal(unsetenv("FAKE_GPUS"), 0);
}

/* ------------------------------------------------------------------------------------ training */

typedef struct training {
    mh_layout layout;
    double losses[3];
    uint64_t hash;
} training;

static ft_status train(ft_ctx *ctx, void *user)
{
    training *t = (training *)user;
    ft_zero_report report;
    uint64_t hash;
    mh_rank r;
    FT_TRY(mh_create(ctx, &t->layout, &r));
    for (int step = 0; step < 3; step++) {
        FT_TRY(mh_step(&r, step, &report));
        if (ft_rank(ctx) == 0) t->losses[step] = report.loss;
    }
    FT_TRY(ft_llama_hash(r.model, &hash));
    if (ft_rank(ctx) == 0) t->hash = hash;
    return FT_OK;
}

static void train_on(training *t, ft_device device, ft_transport transport, int gpus)
{
    ft_config config = ft_config_default();
    config.world = mh_world(&t->layout);
    config.device = device;
    config.transport = transport;
    config.gpus = gpus;
    config.timeout_s = 60;
    if (ft_launch(&config, train, t) != FT_OK)
        fail_msg("%s: %s", mh_text(&t->layout), ft_last_error());
}

static void training_is_the_same(void **state)
{
    static const int meshes[][4] = { /* dp, tp, pp, stage */
        {1, 1, 1, 0}, {2, 1, 1, 1}, {2, 1, 1, 2}, {2, 1, 1, 3}, {4, 1, 1, 3},
        {1, 2, 1, 0}, {1, 1, 2, 1}, {2, 2, 2, 3}
    };
    (void)state;
    for (size_t i = 0; i < sizeof meshes / sizeof meshes[0]; i++) {
        const int *m = meshes[i];
        training cpu, nccl, local;
        memset(&cpu, 0, sizeof cpu);
        cpu.layout = mh_make(m[0], m[1], m[2], m[3]);
        cpu.layout.M = m[2] > 1 ? 3 : 1;
        cpu.layout.sp = m[1] > 1;
        nccl = local = cpu;
        train_on(&cpu, FT_CPU, FT_TRANSPORT_LOCAL, 0);
        train_on(&nccl, FT_GPU, FT_TRANSPORT_NCCL, mh_world(&cpu.layout));
        train_on(&local, FT_GPU, FT_TRANSPORT_LOCAL, mh_world(&cpu.layout) > 1 ? 2 : 1);
        if (nccl.hash != local.hash) fail_msg("%s: hashes differ", mh_text(&cpu.layout));
        for (int step = 0; step < 3; step++)
            if (!(fabs(nccl.losses[step] - cpu.losses[step]) < 1e-5))
                fail_msg("%s: step %d: %.7f, on the CPU %.7f", mh_text(&cpu.layout), step,
                         nccl.losses[step], cpu.losses[step]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collectives_have_their_values),
        cmocka_unit_test(messages_arrive),
        cmocka_unit_test(processes_launch_again_and_again),
        cmocka_unit_test(any_number_of_sizes),
        cmocka_unit_test(ranks_that_disagree_are_told),
        cmocka_unit_test(processes_that_disagree_are_told),
        cmocka_unit_test(who_does_not_come_is_missed),
        cmocka_unit_test(a_rank_may_fail_while_groups_are_made),
        cmocka_unit_test(a_host_far_ahead_is_not_stuck),
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(training_is_the_same),
    };
    return cmocka_run_group_tests_name("nccl", tests, NULL, NULL);
}
