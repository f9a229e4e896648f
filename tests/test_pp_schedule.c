/* Pipeline schedules as data: every kind, for P 1-8 ranks, M 1-32 micro-batches and V 1-4 chunks,
   is complete, never uses what does not exist, keeps to the memory and the time that its closed
   form says, and exchanges without deadlock. The simulator accepts a list if and only if the checks
   here do. Layers are cut as brute force cuts them.

   cc -std=c11 -I. tests/test_pp_schedule.c -lcmocka -lm -lpthread

   The checks of lists and of exchanges are written here again, from the definitions, and share
   nothing with the code under test. */

#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <string.h>

/* Memory that is handed out is full of 0xa5; the call that brings `fail_at` from 1 to 0 fails. */
static int fail_at, allocated;

static void *hook_malloc(size_t bytes)
{
    if (fail_at > 0 && --fail_at == 0) return NULL;
    void *memory = malloc(bytes);
    if (memory) memset(memory, 0xa5, bytes);
    allocated += memory != NULL;
    return memory;
}

static void hook_free(void *memory)
{
    allocated -= memory != NULL;
    free(memory);
}

#define FT_MALLOC(n) hook_malloc(n)
#define FT_FREE(p) hook_free(p)
#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_pp.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

/* ------------------------------------------------------------------------------------- helpers */

enum { MAX_P = 8, MAX_V = 4, MAX_M = 32 };

static ft_pp_config config_of(ft_pp_kind kind, int P, int V, int M)
{
    ft_pp_config c = ft_pp_config_default();
    c.kind = kind;
    c.ranks = P;
    c.chunks = V;
    c.micro_batches = M;
    return c;
}

static ft_pp_schedule *schedule_of(const ft_pp_config *c)
{
    ft_pp_schedule *s = NULL;
    if (ft_pp_schedule_create(c, &s) != FT_OK) fail_msg("%s", ft_last_error());
    return s;
}

static ft_pp_simulation *simulation_of(const ft_pp_schedule *s, const ft_pp_cost *cost)
{
    ft_pp_simulation *r = NULL;
    if (ft_pp_simulate(s, cost, &r) != FT_OK) fail_msg("%s", ft_last_error());
    return r;
}

/* Calls fn for each schedule there is within the limits. */
static void for_all(void (*fn)(const ft_pp_schedule *))
{
    for (int kind = 0; kind < FT_PP_KIND_COUNT; kind++) {
        for (int i = 0; i < MAX_P * MAX_V * MAX_M * 2; i++) {
            ft_pp_config c = config_of((ft_pp_kind)kind, i / 2 % MAX_P + 1,
                                       i / 2 / MAX_P % MAX_V + 1, i / 2 / MAX_P / MAX_V + 1);
            c.forward_only = i % 2;
            if (ft_pp_check(&c) != FT_OK) continue; /* its refusals: test_configs */
            ft_pp_schedule *s = schedule_of(&c);
            fn(s);
            ft_pp_schedule_free(s);
        }
    }
    assert_int_equal(allocated, 0);
}

static void say(const ft_pp_schedule *s, const char *why)
{
    const ft_pp_config *c = &s->config;
    fail_msg("%s P %d V %d M %d%s: %s", ft_pp_kind_name(c->kind), c->ranks, c->chunks,
             c->micro_batches, c->forward_only ? " forward only" : "", why);
}

static int min_of(int a, int b) { return a < b ? a : b; }

#define REFUSED(call, status, part)                                                                \
    do {                                                                                           \
        ft_status refused = (call);                                                                \
        if (refused != (status) || !strstr(ft_last_error(), part))                                 \
            fail_msg("%s gave '%s' (%s), not '%s' with \"%s\"", #call, ft_status_name(refused),    \
                     ft_last_error(), ft_status_name(status), part);                               \
    } while (0)

#define NEAR(value, expected) assert_true(fabs((value) - (expected)) < 1e-9)

/* -------------------------------------------------------------------- the definitions once more */

/* What a rank has of (virtual stage, micro-batch). */
typedef struct have {
    char x, dy, y, dx, f, b, w; /* received x, dy; y, dx to be sent; F, B or BI, W done */
} have;

static have has[MAX_P * MAX_V][MAX_M];

static int next_rank(const ft_pp_config *c, int stage)
{
    return stage < 0 || stage >= c->ranks * c->chunks ? -1 : stage % c->ranks;
}

static const char *check_transfer(const ft_pp_config *c, int p, const ft_pp_transfer *x)
{
    int stage = x->chunk * c->ranks + p, peer = x->peer_chunk * c->ranks + x->peer;
    have *h = &has[stage][x->micro_batch];
    int forward = x->cargo == FT_PP_ACTIVATION;
    if (x->peer == p) return "a transfer to oneself";
    if (peer - stage != (forward == (x->is_send != 0) ? 1 : -1)) return "not to the neighbour";
    char *slot = x->is_send ? (forward ? &h->y : &h->dx) : (forward ? &h->x : &h->dy);
    if (*slot != (x->is_send ? 1 : 0)) return x->is_send ? "nothing to send" : "received twice";
    *slot = x->is_send ? 2 : 1;
    return NULL;
}

static const char *check_input(const ft_pp_config *c, int p, int stage, const ft_pp_action *a)
{
    int forward = a->act == FT_PP_F, source = forward ? stage - 1 : stage + 1;
    have *h = &has[stage][a->micro_batch];
    if (a->from != next_rank(c, source)) return "wrong source";
    if (a->to != next_rank(c, forward ? stage + 1 : stage - 1)) return "wrong target";
    if (a->from < 0) return NULL;
    if (a->from == p) {
        have *other = &has[source][a->micro_batch];
        return (forward ? other->f : other->b) ? NULL : "input not made";
    }
    char *slot = forward ? &h->x : &h->dy;
    if (*slot != 1) return "input not received";
    *slot = 2;
    return NULL;
}

static const char *check_action(const ft_pp_config *c, int p, const ft_pp_action *a, int *alive)
{
    int stage = a->chunk * c->ranks + p;
    have *h = &has[stage][a->micro_batch];
    const char *why = NULL;
    switch (a->act) {
    case FT_PP_EXCHANGE:
        if (a->n < 1) return "an empty exchange";
        for (int k = 0; k < a->n && !why; k++) why = check_transfer(c, p, &a->transfers[k]);
        return why;
    case FT_PP_F:
        if (h->f) return "F twice";
        h->f = 1;
        h->y = next_rank(c, stage + 1) >= 0;
        ++*alive;
        return check_input(c, p, stage, a);
    case FT_PP_B:
    case FT_PP_BI:
        if (!h->f || h->b) return h->b ? "backward twice" : "backward before forward";
        h->b = 1;
        h->w = a->act == FT_PP_B;
        h->dx = next_rank(c, stage - 1) >= 0;
        *alive -= h->w;
        return check_input(c, p, stage, a);
    case FT_PP_W:
        if (!h->b || h->w) return h->w ? "W twice" : "W before BI";
        h->w = 1;
        --*alive;
        return NULL;
    case FT_PP_ACT_COUNT: break;
    }
    return "no such act";
}

/* NULL, or what is wrong with the lists by themselves; alive[p] becomes the most in flight. */
static const char *check_lists(const ft_pp_schedule *s, int *alive)
{
    const ft_pp_config *c = &s->config;
    memset(has, 0, sizeof has);
    for (int p = 0; p < c->ranks; p++) {
        int now = 0;
        alive[p] = 0;
        for (int i = 0; i < s->ranks[p].n; i++) {
            const char *why = check_action(c, p, &s->ranks[p].actions[i], &now);
            if (why) return why;
            if (now > alive[p]) alive[p] = now;
            if (c->forward_only) now = 0;
        }
        for (int k = 0; k < c->chunks * c->micro_batches; k++) {
            const have *h = &has[k / c->micro_batches * c->ranks + p][k % c->micro_batches];
            if (!h->f || h->w != !c->forward_only) return "work is missing";
        }
    }
    return NULL;
}

/* Messages from rank to rank, in the order in which either end has posted them. */
static struct { int n, tag[2 * MAX_V * MAX_M]; } posted[2][MAX_P][MAX_P]; /* [is_send][from][to] */

static int tag_of(const ft_pp_config *c, int p, const ft_pp_transfer *x)
{
    int stage = x->chunk * c->ranks + p, peer = x->peer_chunk * c->ranks + x->peer;
    return (min_of(stage, peer) * MAX_M + x->micro_batch) * 2 + (x->cargo == FT_PP_GRADIENT);
}

/* NULL, or what is wrong, where every rank waits in each exchange until all its transfers are done
   and a transfer is done when both ends have posted it. */
static const char *check_rendezvous(const ft_pp_schedule *s)
{
    const ft_pp_config *c = &s->config;
    int at[MAX_P] = {0}, waits[MAX_P] = {0}, moved = 1;
    static int place[MAX_P][2 * MAX_V * MAX_M * 2];
    memset(posted, 0, sizeof posted);
    while (moved) {
        moved = 0;
        for (int p = 0; p < c->ranks; p++) {
            if (at[p] == s->ranks[p].n) continue;
            const ft_pp_action *a = &s->ranks[p].actions[at[p]];
            int done = 1;
            for (int k = 0; k < a->n; k++) {
                const ft_pp_transfer *x = &a->transfers[k];
                int send = x->is_send != 0, from = send ? p : x->peer, to = send ? x->peer : p;
                if (!waits[p]) {
                    place[p][k] = posted[send][from][to].n++;
                    posted[send][from][to].tag[place[p][k]] = tag_of(c, p, x);
                }
                if (posted[!send][from][to].n <= place[p][k]) done = 0;
                else if (posted[!send][from][to].tag[place[p][k]] != tag_of(c, p, x))
                    return "a message meets another one";
            }
            moved |= !waits[p] || done;
            waits[p] = !done;
            at[p] += done;
        }
    }
    for (int p = 0; p < c->ranks; p++) {
        if (at[p] < s->ranks[p].n) return "deadlock";
    }
    return NULL;
}

/* ---------------------------------------------------------------------------- all the schedules */

static int expected_in_flight(const ft_pp_config *c, int p)
{
    int P = c->ranks, V = c->chunks, M = c->micro_batches;
    if (c->forward_only) return 1;
    switch (c->kind) {
    case FT_PP_1F1B: return min_of(P - p, M);
    case FT_PP_GPIPE: return M;
    case FT_PP_INTERLEAVED: return min_of(2 * (P - 1 - p) + (V - 1) * P + 1, M * V);
    default: return min_of(P, M);
    }
}

/* -1 where no figure is known: forward only, interleaved, a last group of fewer micro-batches. */
static double expected_makespan(const ft_pp_config *c)
{
    int P = c->ranks, V = c->chunks, M = c->micro_batches;
    if (c->kind == FT_PP_INTERLEAVED && M % P) return -1;
    if (c->forward_only) return M + (double)(P - 1) / V;
    if (c->kind == FT_PP_INTERLEAVED) return 3 * M + 3.0 * (P - 1) / V;
    if (c->kind == FT_PP_ZB_H1) return M >= P ? 3 * M + P - 1 : 2 * (M + P) - 1;
    return 3 * (M + P - 1);
}

static void complete(const ft_pp_schedule *s)
{
    int alive[MAX_P];
    const char *why = check_lists(s, alive);
    if (why) say(s, why);
    if ((why = check_rendezvous(s)) != NULL) say(s, why);
    for (int p = 0; p < s->config.ranks; p++) {
        if (alive[p] != expected_in_flight(&s->config, p)) say(s, "activations in flight");
    }
}

/* Inputs exist when they are used, each micro-batch has one forward and one backward in each chunk,
   exchanges complete, as many activations are alive as the closed forms say. */
static void test_complete(void **state)
{
    (void)state;
    for_all(complete);
}

static void figures(const ft_pp_schedule *s)
{
    const ft_pp_config *c = &s->config;
    double makespan = expected_makespan(c), work = c->forward_only ? 1 : 3;
    ft_pp_simulation *r = simulation_of(s, NULL);
    if (makespan >= 0 && fabs(r->makespan - makespan) > 1e-9) say(s, "makespan");
    double bubble = 1 - work * c->micro_batches / r->makespan;
    if (fabs(r->bubble - bubble) > 1e-9) say(s, "bubble");
    for (int p = 0; p < c->ranks; p++) {
        if (r->ranks[p].in_flight != expected_in_flight(c, p)) say(s, "simulated in flight");
        if (fabs(r->ranks[p].busy - work * c->micro_batches) > 1e-9) say(s, "busy");
        int late = c->kind == FT_PP_ZB_H1 && p > 0 && !c->forward_only;
        int deferred = late ? min_of(p + 1, c->micro_batches) : 0;
        if (r->ranks[p].deferred != deferred) say(s, "deferred");
        if (r->ranks[p].boundary > (c->kind == FT_PP_INTERLEAVED ? 4 : 2)) say(s, "boundary");
    }
    ft_pp_simulation_free(r);
}

static void test_figures(void **state)
{
    (void)state;
    for_all(figures);
}

/* Where a rank does one thing at a time the figures hold too; interleaved, P = 5, 8: a forward of
   one chunk more at most. */
static void blocking(const ft_pp_schedule *s)
{
    const ft_pp_config *c = &s->config;
    double makespan = expected_makespan(c), more = 0;
    ft_pp_cost cost = ft_pp_cost_default();
    cost.blocking = 1;
    ft_pp_simulation *r = simulation_of(s, &cost);
    if (c->kind == FT_PP_INTERLEAVED && c->ranks % 3 == 2 && c->ranks > 2) more = 1.0 / c->chunks;
    if (makespan >= 0 && (r->makespan < makespan - 1e-9 || r->makespan > makespan + more + 1e-9))
        say(s, "makespan, blocking");
    ft_pp_simulation_free(r);
}

static void test_blocking(void **state)
{
    (void)state;
    for_all(blocking);
}

/* Gradients of a chunk are added in order of micro-batches under every schedule. */
static void in_order(const ft_pp_schedule *s)
{
    for (int p = 0; p < s->config.ranks; p++) {
        int next[FT_PP_ACT_COUNT][MAX_V] = {{0}};
        for (int i = 0; i < s->ranks[p].n; i++) {
            const ft_pp_action *a = &s->ranks[p].actions[i];
            if (a->act != FT_PP_EXCHANGE && a->micro_batch != next[a->act][a->chunk]++)
                say(s, "order of micro-batches");
        }
    }
}

static void test_in_order(void **state)
{
    (void)state;
    for_all(in_order);
}

static double figure(const ft_pp_config *c, double *bubble)
{
    ft_pp_schedule *s = schedule_of(c);
    ft_pp_simulation *r = simulation_of(s, NULL);
    double makespan = r->makespan;
    *bubble = r->bubble;
    ft_pp_simulation_free(r);
    ft_pp_schedule_free(s);
    return makespan;
}

static void test_known(void **state)
{
    (void)state;
    double bubble;
    ft_pp_config c = config_of(FT_PP_1F1B, 4, 1, 8);
    NEAR(figure(&c, &bubble), 33);
    NEAR(bubble, 9.0 / 33);
    c = config_of(FT_PP_GPIPE, 4, 1, 8);
    NEAR(figure(&c, &bubble), 33);
    c = config_of(FT_PP_INTERLEAVED, 4, 2, 8);
    NEAR(figure(&c, &bubble), 28.5);
    NEAR(bubble, 4.5 / 28.5);
    c = config_of(FT_PP_ZB_H1, 4, 1, 8);
    NEAR(figure(&c, &bubble), 27);
    NEAR(bubble, 3.0 / 27);
}

/* ------------------------------------------------------------------------------------ simulator */

static unsigned long long seed;

static int random_below(int n)
{
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    return (int)((seed >> 33) % (unsigned)n);
}

static double random_cost(void) { return 0.25 * (1 + random_below(12)); }

static double duration_of(const ft_pp_schedule *s, const ft_pp_cost *k, int p,
                          const ft_pp_action *a)
{
    double whole[FT_PP_ACT_COUNT] = {k->f, k->b, k->bi, k->w, 0};
    return whole[a->act] * k->stage[a->chunk * s->config.ranks + p] / s->config.chunks;
}

static double f_end[MAX_P * MAX_V][MAX_M], b_end[MAX_P * MAX_V][MAX_M];

static void collect_ends(const ft_pp_schedule *s, const ft_pp_simulation *r)
{
    for (int p = 0; p < s->config.ranks; p++) {
        for (int i = 0; i < s->ranks[p].n; i++) {
            const ft_pp_action *a = &s->ranks[p].actions[i];
            int stage = a->chunk * s->config.ranks + p;
            if (a->act == FT_PP_F) f_end[stage][a->micro_batch] = r->ranks[p].end[i];
            if (a->act == FT_PP_B || a->act == FT_PP_BI)
                b_end[stage][a->micro_batch] = r->ranks[p].end[i];
        }
    }
}

/* Starts and ends are those of something that can happen. */
static void check_times(const ft_pp_schedule *s, const ft_pp_simulation *r, const ft_pp_cost *k)
{
    double most = 0, all_busy = 0;
    int P = s->config.ranks, S = P * s->config.chunks;
    collect_ends(s, r);
    for (int p = 0; p < P; p++) {
        double work = 0, talk = 0, busy = 0;
        for (int i = 0; i < s->ranks[p].n; i++) {
            const ft_pp_action *a = &s->ranks[p].actions[i];
            double start = r->ranks[p].start[i], end = r->ranks[p].end[i], input = 0;
            double *free_at = a->act == FT_PP_EXCHANGE ? &talk : &work;
            int stage = a->chunk * P + p, wire = P > 1;
            if (start < *free_at - 1e-9) say(s, "two things at once");
            if (k->blocking && start < fmax(work, talk) - 1e-9) say(s, "two things, blocking");
            if (a->act == FT_PP_F && stage > 0)
                input = f_end[stage - 1][a->micro_batch] + wire * k->transfer;
            if ((a->act == FT_PP_B || a->act == FT_PP_BI) && stage < S - 1)
                input = b_end[stage + 1][a->micro_batch] + wire * k->transfer;
            if (start < input - 1e-9) say(s, "before its input");
            if (a->act == FT_PP_EXCHANGE ? end < start + k->transfer - 1e-9
                                         : fabs(end - start - duration_of(s, k, p, a)) > 1e-9)
                say(s, "duration");
            *free_at = end;
            most = fmax(most, end);
            busy += duration_of(s, k, p, a);
        }
        all_busy += busy;
        if (fabs(busy - r->ranks[p].busy) > 1e-9) say(s, "busy, uneven");
    }
    if (fabs(most - r->makespan) > 1e-9) say(s, "end");
    if (fabs(1 - all_busy / (P * most) - r->bubble) > 1e-9) say(s, "bubble, uneven");
}

static void uneven(const ft_pp_schedule *s)
{
    double stage[MAX_P * MAX_V];
    ft_pp_cost k = ft_pp_cost_default();
    k.f = random_cost();
    k.b = random_cost();
    k.bi = random_cost();
    k.w = random_cost();
    k.transfer = random_below(3) * 0.25;
    k.stage = stage;
    for (int i = 0; i < s->config.ranks * s->config.chunks; i++) stage[i] = random_cost();
    ft_pp_simulation *beside = simulation_of(s, &k);
    check_times(s, beside, &k);
    k.blocking = 1;
    ft_pp_simulation *alone = simulation_of(s, &k);
    check_times(s, alone, &k);
    if (alone->makespan < beside->makespan - 1e-9) say(s, "blocking is faster");
    ft_pp_simulation_free(alone);
    ft_pp_simulation_free(beside);
}

static void test_uneven(void **state)
{
    (void)state;
    seed = 1;
    for_all(uneven);
}

static double makespan_of(const ft_pp_config *c, const ft_pp_cost *k)
{
    ft_pp_schedule *s = schedule_of(c);
    ft_pp_simulation *r = simulation_of(s, k);
    double makespan = r->makespan;
    ft_pp_simulation_free(r);
    ft_pp_schedule_free(s);
    return makespan;
}

static void test_costs(void **state)
{
    (void)state;
    double factor[4] = {1, 3, 1, 1};
    ft_pp_cost k = ft_pp_cost_default();
    /* One micro-batch goes there and back: 2 F, 2 B and two exchanges. */
    ft_pp_config c = config_of(FT_PP_1F1B, 2, 1, 1);
    k.transfer = 0.5;
    NEAR(makespan_of(&c, &k), 7);
    k.blocking = 1;
    NEAR(makespan_of(&c, &k), 7);
    k = ft_pp_cost_default();
    /* A stage three times as slow sets the pace: 1 before it, then 5 forwards of 3. */
    c = config_of(FT_PP_GPIPE, 2, 1, 5);
    c.forward_only = 1;
    k.stage = factor;
    NEAR(makespan_of(&c, &k), 16);
    /* Chunks of one rank run one after another, each at 1/V of a stage's cost. */
    c = config_of(FT_PP_INTERLEAVED, 1, 2, 1);
    NEAR(makespan_of(&c, &k), 6);
    /* zb-h1 of one rank runs whole backwards. */
    c = config_of(FT_PP_ZB_H1, 1, 1, 4);
    k.stage = NULL;
    k.b = 5;
    NEAR(makespan_of(&c, &k), 24);
    k.f = k.b = k.bi = k.w = 0;
    c = config_of(FT_PP_1F1B, 4, 1, 4);
    NEAR(makespan_of(&c, &k), 0);
    /* Dear transfers: exchanges beside compute hide some of them in the warm-up. */
    k = ft_pp_cost_default();
    k.transfer = 1;
    c = config_of(FT_PP_GPIPE, 2, 1, 8);
    double beside = makespan_of(&c, &k);
    k.blocking = 1;
    assert_true(beside < makespan_of(&c, &k));
}

static void test_pure(void **state)
{
    (void)state;
    ft_pp_config c = config_of(FT_PP_INTERLEAVED, 3, 2, 6);
    ft_pp_schedule *a = schedule_of(&c), *b = schedule_of(&c);
    for (int p = 0; p < 3; p++) {
        assert_int_equal(a->ranks[p].n, b->ranks[p].n);
        for (int i = 0; i < a->ranks[p].n; i++) {
            ft_pp_action x = a->ranks[p].actions[i], y = b->ranks[p].actions[i];
            assert_int_equal(x.n, y.n);
            if (x.n)
                assert_memory_equal(x.transfers, y.transfers, (size_t)x.n * sizeof *x.transfers);
            x.transfers = y.transfers = NULL;
            assert_memory_equal(&x, &y, sizeof x);
        }
    }
    ft_pp_schedule_free(a);
    ft_pp_schedule_free(b);
    ft_pp_schedule_free(NULL);
    ft_pp_simulation_free(NULL);
}

/* ----------------------------------------------------------------------------- broken schedules */

/* A copy that can be changed; transfers are the original's. */
typedef struct copy {
    ft_pp_schedule s;
    ft_pp_list lists[MAX_P];
    ft_pp_action actions[MAX_P][256];
} copy;

static void copy_of(const ft_pp_schedule *s, copy *c)
{
    c->s = *s;
    c->s.ranks = c->lists;
    for (int p = 0; p < s->config.ranks; p++) {
        assert_true(s->ranks[p].n < 250);
        c->lists[p].n = s->ranks[p].n;
        c->lists[p].actions = c->actions[p];
        memcpy(c->actions[p], s->ranks[p].actions, (size_t)s->ranks[p].n * sizeof(ft_pp_action));
    }
}

static void remove_action(copy *c, int p, int i)
{
    for (int k = i + 1; k < c->lists[p].n; k++) c->actions[p][k - 1] = c->actions[p][k];
    c->lists[p].n--;
}

static void insert_action(copy *c, int p, int i, ft_pp_action a)
{
    for (int k = c->lists[p].n++; k > i; k--) c->actions[p][k] = c->actions[p][k - 1];
    c->actions[p][i] = a;
}

/* The simulator's verdict is that of the checks above. */
static void same_verdict(const copy *c)
{
    int alive[MAX_P];
    ft_pp_cost k = ft_pp_cost_default();
    ft_pp_simulation *r = NULL;
    const char *why = check_lists(&c->s, alive);
    if (!why) why = check_rendezvous(&c->s);
    ft_status beside = ft_pp_simulate(&c->s, NULL, &r);
    if (beside == FT_OK) ft_pp_simulation_free(r);
    k.blocking = 1;
    ft_status status = ft_pp_simulate(&c->s, &k, &r);
    if (status == FT_OK) ft_pp_simulation_free(r);
    if (why && status != FT_ERR_STATE) say(&c->s, why);
    if (!why && (status != FT_OK || beside != FT_OK)) say(&c->s, ft_last_error());
}

/* Takes each action away, repeats it, and swaps each two of a rank. */
static void mutate(const ft_pp_config *config)
{
    ft_pp_schedule *s = schedule_of(config);
    static copy c;
    for (int p = 0; p < config->ranks; p++) {
        for (int i = 0; i < s->ranks[p].n; i++) {
            copy_of(s, &c);
            remove_action(&c, p, i);
            same_verdict(&c);
            copy_of(s, &c);
            insert_action(&c, p, i, c.actions[p][i]);
            same_verdict(&c);
            for (int k = 0; k < i; k++) {
                copy_of(s, &c);
                ft_pp_action a = c.actions[p][i];
                c.actions[p][i] = c.actions[p][k];
                c.actions[p][k] = a;
                same_verdict(&c);
            }
        }
    }
    ft_pp_schedule_free(s);
}

static void test_mutations(void **state)
{
    (void)state;
    ft_pp_config c = config_of(FT_PP_1F1B, 3, 1, 4);
    mutate(&c);
    c.forward_only = 1;
    mutate(&c);
    c = config_of(FT_PP_GPIPE, 2, 1, 3);
    mutate(&c);
    c = config_of(FT_PP_ZB_H1, 3, 1, 4);
    mutate(&c);
    c = config_of(FT_PP_INTERLEAVED, 2, 2, 4);
    mutate(&c);
    c = config_of(FT_PP_INTERLEAVED, 3, 2, 3);
    mutate(&c);
    c = config_of(FT_PP_INTERLEAVED, 1, 3, 2);
    mutate(&c);
    assert_int_equal(allocated, 0);
}

/* Index of the n-th action of that kind in rank p's list. */
static int find(const copy *c, int p, ft_pp_act act, int n)
{
    int i = 0;
    while (c->actions[p][i].act != act || n-- > 0) i++;
    return i;
}

/* Sends and receives one after another deadlock where they do not as one: both ranks of 1f1b
   receive first. */
static void test_deadlock(void **state)
{
    (void)state;
    ft_pp_config config = config_of(FT_PP_1F1B, 2, 1, 2);
    ft_pp_schedule *s = schedule_of(&config);
    ft_pp_simulation *r;
    static copy c;
    copy_of(s, &c);
    for (int p = 0; p < 2; p++) {
        int i = 0;
        while (c.actions[p][i].n != 2) i++;
        ft_pp_action first = c.actions[p][i], second = first;
        int sends_first = first.transfers[0].is_send;
        first.n = second.n = 1;
        first.transfers += sends_first;
        second.transfers += !sends_first;
        c.actions[p][i] = first;
        insert_action(&c, p, i + 1, second);
    }
    assert_string_equal(check_rendezvous(&c.s), "deadlock");
    REFUSED(ft_pp_simulate(&c.s, NULL, &r), FT_ERR_STATE,
            "the exchanges deadlock: rank 0 (action 3) waits to receive gradient of micro-batch 0 "
            "(chunk 0) from rank 1; rank 1 (action 3) waits to receive activation of micro-batch 1 "
            "(chunk 0) from rank 0");
    copy_of(s, &c);
    c.lists[0].n = 0;
    REFUSED(ft_pp_simulate(&c.s, NULL, &r), FT_ERR_STATE,
            "rank 0's list ends without the forward of micro-batch 0 (chunk 0)");
    ft_pp_schedule_free(s);
}

static void test_named(void **state)
{
    (void)state;
    ft_pp_config config = config_of(FT_PP_ZB_H1, 2, 1, 3);
    ft_pp_schedule *s = schedule_of(&config);
    ft_pp_simulation *r;
    ft_pp_transfer changed;
    static copy c;
#define BROKEN(change, part)                                                                       \
    do {                                                                                           \
        copy_of(s, &c);                                                                            \
        change;                                                                                    \
        REFUSED(ft_pp_simulate(&c.s, NULL, &r), FT_ERR_STATE, part);                               \
    } while (0)
#define CHANGED(p, n, change, part)                                                                \
    BROKEN(ft_pp_action *a = &c.actions[p][find(&c, p, FT_PP_EXCHANGE, n)];                        \
           changed = a->transfers[0]; a->transfers = &changed; change, part)
    BROKEN(remove_action(&c, 1, 0),
           "action 0 of rank 1 (F 0 (chunk 0)): its input was not received from rank 0");
    BROKEN(remove_action(&c, 1, find(&c, 1, FT_PP_BI, 0)), "what it sends of micro-batch 0 was not "
           "made");
    BROKEN(remove_action(&c, 1, find(&c, 1, FT_PP_W, 2)), "rank 1's list ends without the backward "
           "of micro-batch 2 (chunk 0)");
    BROKEN(c.actions[1][find(&c, 1, FT_PP_W, 0)].micro_batch = 2, "its BI was not done before");
    BROKEN(c.actions[1][find(&c, 1, FT_PP_W, 1)].micro_batch = 0, "it was done before");
    BROKEN(c.actions[0][0].micro_batch = 3, "there are 1 chunks and 3 micro-batches");
    BROKEN(c.actions[0][0].chunk = -1, "there are 1 chunks and 3 micro-batches");
    BROKEN(c.actions[0][0].act = FT_PP_ACT_COUNT, "act 5 with 0 transfers");
    BROKEN(c.actions[0][0].to = 0, "it is from rank -1 to rank 0, and must be from -1 to 1");
    BROKEN(c.s.config.forward_only = 1, "forward-only");
    CHANGED(0, 0, changed.peer = 0,
            "the peer of micro-batch 0 is rank 0, chunk 0, and must be rank 1");
    CHANGED(0, 0, changed.micro_batch = 7, "there are 1 chunks and 3 micro-batches");
    CHANGED(0, 0, changed.cargo = FT_PP_GRADIENT, "chunk 0 is the beginning of the pipeline");
    CHANGED(1, 0, changed.micro_batch = 1, "its input was not received from rank 0");
    /* Both ranks send what they should, in different orders. */
    config = config_of(FT_PP_GPIPE, 2, 1, 2);
    ft_pp_schedule_free(s);
    s = schedule_of(&config);
    BROKEN(ft_pp_action a = c.actions[1][0]; c.actions[1][0] = c.actions[1][2]; c.actions[1][2] = a;
           a = c.actions[1][1]; c.actions[1][1] = c.actions[1][3]; c.actions[1][3] = a,
           "action 0 of rank 1 is to receive activation of micro-batch 1 (chunk 0) from rank 0, "
           "and meets action 1 of rank 0, to send activation of micro-batch 0 (chunk 0) to rank 1");
    ft_pp_schedule_free(s);
    assert_int_equal(allocated, 0);
}

/* ------------------------------------------------------------------------------------- drawings */

static void drawn(ft_pp_kind kind, int P, int V, int M, int forward_only, const char *expected)
{
    char text[4096];
    size_t needed;
    ft_pp_config c = config_of(kind, P, V, M);
    c.forward_only = forward_only;
    ft_pp_schedule *s = schedule_of(&c);
    assert_int_equal(ft_pp_draw(s, NULL, 0, text, sizeof text, &needed), FT_OK);
    assert_string_equal(text, expected);
    assert_int_equal(needed, strlen(text) + 1);
    /* Exactly as many bytes do, one fewer does not; nothing is written beyond. */
    memset(text, '#', sizeof text);
    assert_int_equal(ft_pp_draw(s, NULL, 0, text, needed, NULL), FT_OK);
    assert_string_equal(text, expected);
    assert_int_equal(text[needed], '#');
    REFUSED(ft_pp_draw(s, NULL, 0, text, needed - 1, NULL), FT_ERR_ARG, "the drawing needs");
    needed = 0;
    assert_int_equal(ft_pp_draw(s, NULL, 0, NULL, 0, &needed), FT_OK);
    assert_int_equal(needed, strlen(expected) + 1);
    ft_pp_schedule_free(s);
}

static void test_drawings(void **state)
{
    (void)state;
    drawn(FT_PP_1F1B, 4, 1, 8, 0,
        "1f1b, 4 ranks, 8 micro-batches: 33 units, bubble 27.3%, in flight 4 3 2 1\n"
        "0 | 0 1 2 3 . . . . . .[0 ] 4[1 ] 5[2 ] 6[3 ] 7[4 ] .[5 ] .[6 ] .[7 ]\n"
        "1 | . 0 1 2 . . . .[0 ] 3[1 ] 4[2 ] 5[3 ] 6[4 ] 7[5 ] .[6 ] .[7 ] . .\n"
        "2 | . . 0 1 . .[0 ] 2[1 ] 3[2 ] 4[3 ] 5[4 ] 6[5 ] 7[6 ] .[7 ] . . . .\n"
        "3 | . . . 0[0 ] 1[1 ] 2[2 ] 3[3 ] 4[4 ] 5[5 ] 6[6 ] 7[7 ] . . . . . .\n"
        "3 forward of micro-batch 3, [3] backward, . idle\n");
    drawn(FT_PP_GPIPE, 4, 1, 8, 0,
        "gpipe, 4 ranks, 8 micro-batches: 33 units, bubble 27.3%, in flight 8 8 8 8\n"
        "0 | 0 1 2 3 4 5 6 7 . . . . . . . . .[0 ][1 ][2 ][3 ][4 ][5 ][6 ][7 ]\n"
        "1 | . 0 1 2 3 4 5 6 7 . . . . . .[0 ][1 ][2 ][3 ][4 ][5 ][6 ][7 ] . .\n"
        "2 | . . 0 1 2 3 4 5 6 7 . . .[0 ][1 ][2 ][3 ][4 ][5 ][6 ][7 ] . . . .\n"
        "3 | . . . 0 1 2 3 4 5 6 7[0 ][1 ][2 ][3 ][4 ][5 ][6 ][7 ] . . . . . .\n"
        "3 forward of micro-batch 3, [3] backward, . idle\n");
    drawn(FT_PP_INTERLEAVED, 4, 2, 8, 0,
        "interleaved, 4 ranks of 2 chunks, 8 micro-batches: 28.5 units, bubble 15.8%, in flight 11 "
        "9 7 5\n"
        "0 |a0a1a2a3b0b1b2b3a4a5a6 . . .[b0]a7[b1] .b4[b2]b5[b3]b6[a0]b7[a1][a2] .[a3] .[b4] .[b5]"
        " .[b6] .[b7][a4][a5][a6][a7]\n"
        "1 | .a0a1a2a3b0b1b2b3a4 . .[b0]a5[b1]a6[b2]a7[b3]b4[a0]b5[a1]b6[a2]b7[a3] .[b4] .[b5]"
        " .[b6] .[b7][a4][a5][a6][a7] . .\n"
        "2 | . .a0a1a2a3b0b1b2 .[b0]b3[b1]a4[b2]a5[b3]a6[a0]a7[a1]b4[a2]b5[a3]b6[b4]b7[b5]"
        " .[b6] .[b7][a4][a5][a6][a7] . . . .\n"
        "3 | . . .a0a1a2a3b0[b0]b1[b1]b2[b2]b3[b3]a4[a0]a5[a1]a6[a2]a7[a3]b4[b4]b5[b5]b6[b6]b7[b7]"
        "[a4][a5][a6][a7] . . . . . .\n"
        "a3 forward of micro-batch 3 in chunk a, [a3] backward, . idle\n");
    drawn(FT_PP_ZB_H1, 4, 1, 8, 0,
        "zb-h1, 4 ranks, 8 micro-batches: 27 units, bubble 11.1%, in flight 4 4 4 4\n"
        "0 | 0 1 2 3 . . .[0 ] 4[1 ] 5[2 ] 6[3 ] 7[4 ][5 ][6 ][7 ]\n"
        "1 | . 0 1 2 . .i0 3i1w0 4i2w1 5i3w2 6i4w3 7i5w4i6w5i7w6w7\n"
        "2 | . . 0 1 .i0 2i1 3i2w0 4i3w1 5i4w2 6i5w3 7i6w4i7w5w6w7\n"
        "3 | . . . 0i0 1i1 2i2 3i3w0 4i4w1 5i5w2 6i6w3 7i7w4w5w6w7\n"
        "3 forward of micro-batch 3, [3] backward, i3 gradient of its input, w3 of its weights, "
        ". idle\n");
    drawn(FT_PP_1F1B, 1, 1, 1, 1,
        "1f1b forward, 1 rank, 1 micro-batch: 1 units, bubble 0.0%, in flight 1\n"
        "0 | 0\n"
        "3 forward of micro-batch 3, . idle\n");
}

/* Rows are of one length, and say of each micro-batch as often as its work runs. */
static void rows(const ft_pp_schedule *s)
{
    static char text[1 << 16];
    const ft_pp_config *c = &s->config;
    size_t length = 0;
    if (c->micro_batches % 7 > 2) return; /* a sample */
    if (ft_pp_draw(s, NULL, 0, text, sizeof text, NULL) != FT_OK) say(s, ft_last_error());
    char *line = strchr(text, '\n') + 1;
    for (int p = 0; p < c->ranks; p++, line = strchr(line, '\n') + 1) {
        size_t n = (size_t)(strchr(line, '\n') - line);
        int brackets = 0, runs = 0;
        if (p == 0) length = n;
        if (n != length) say(s, "rows differ in length");
        for (int i = 0; i < s->ranks[p].n; i++) runs += s->ranks[p].actions[i].act == FT_PP_B;
        for (size_t i = 0; i < n; i++) brackets += line[i] == '[';
        if (brackets != runs) say(s, "backwards drawn");
    }
}

static void test_rows(void **state)
{
    (void)state;
    for_all(rows);
}

static void test_drawing_limits(void **state)
{
    (void)state;
    char text[512];
    ft_pp_cost k = ft_pp_cost_default();
    ft_pp_config c = config_of(FT_PP_1F1B, 2, 1, 11);
    c.forward_only = 1;
    ft_pp_schedule *s = schedule_of(&c);
    /* Numbers of two digits widen the columns; a forward may take several. */
    assert_int_equal(ft_pp_draw(s, NULL, 0, text, sizeof text, NULL), FT_OK);
    assert_non_null(strstr(text, "\n0 |  0  1  2  3  4  5  6  7  8  9 10  .\n"
                                 "1 |  .  0  1  2  3  4  5  6  7  8  9 10\n"));
    assert_int_equal(ft_pp_draw(s, NULL, 0.5, text, sizeof text, NULL), FT_OK);
    assert_non_null(strstr(text, "\n0 | 0   1   2   3   4   5   6   7   8   9  10   . .\n"));
    assert_int_equal(ft_pp_draw(s, NULL, 24, text, sizeof text, NULL), FT_OK);
    REFUSED(ft_pp_draw(s, NULL, 1e-9, text, sizeof text, NULL), FT_ERR_ARG, "wider than");
    REFUSED(ft_pp_draw(s, NULL, -1, text, sizeof text, NULL), FT_ERR_ARG, "more than 0");
    REFUSED(ft_pp_draw(s, NULL, NAN, text, sizeof text, NULL), FT_ERR_ARG, "more than 0");
    k.f = 0;
    REFUSED(ft_pp_draw(s, &k, 0, text, sizeof text, NULL), FT_ERR_ARG, "more than 0");
    assert_int_equal(ft_pp_draw(s, &k, 1, text, sizeof text, NULL), FT_OK);
    REFUSED(ft_pp_draw(NULL, &k, 1, text, sizeof text, NULL), FT_ERR_ARG, "schedule is NULL");
    REFUSED(ft_pp_draw_file(s, NULL, 0, NULL), FT_ERR_ARG, "file is NULL");
    ft_pp_schedule_free(s);
}

static void read_back(FILE *file, char *text, size_t bytes)
{
    rewind(file);
    text[fread(text, 1, bytes - 1, file)] = '\0';
    fclose(file);
}

static void test_files(void **state)
{
    (void)state;
    char text[2048], want[2048];
    ft_pp_config c = config_of(FT_PP_ZB_H1, 2, 1, 2);
    ft_pp_schedule *s = schedule_of(&c);
    FILE *file = tmpfile();
    assert_non_null(file);
    assert_int_equal(ft_pp_draw_file(s, NULL, 0, file), FT_OK);
    read_back(file, text, sizeof text);
    assert_int_equal(ft_pp_draw(s, NULL, 0, want, sizeof want, NULL), FT_OK);
    assert_string_equal(text, want);
    assert_non_null(file = tmpfile());
    assert_int_equal(ft_pp_print(s, 1, file), FT_OK);
    read_back(file, text, sizeof text);
    assert_string_equal(text,
        "exchange: receive activation of micro-batch 0 (chunk 0) from rank 0\n"
        "F 0 (chunk 0)\n"
        "BI 0 (chunk 0)\n"
        "exchange: receive activation of micro-batch 1 (chunk 0) from rank 0, send gradient of "
        "micro-batch 0 (chunk 0) to rank 0\n"
        "F 1 (chunk 0)\n"
        "BI 1 (chunk 0)\n"
        "exchange: send gradient of micro-batch 1 (chunk 0) to rank 0\n"
        "W 0 (chunk 0)\n"
        "W 1 (chunk 0)\n");
    REFUSED(ft_pp_print(s, 2, stdout), FT_ERR_ARG, "rank 2 of 2");
    REFUSED(ft_pp_print(s, 0, NULL), FT_ERR_ARG, "file is NULL");
    REFUSED(ft_pp_print(NULL, 0, stdout), FT_ERR_ARG, "schedule is NULL");
    FILE *full = fopen("/dev/full", "w");
    if (full) {
        setvbuf(full, NULL, _IONBF, 0);
        REFUSED(ft_pp_print(s, 1, full), FT_ERR_IO, "not written");
        REFUSED(ft_pp_draw_file(s, NULL, 0, full), FT_ERR_IO, "not written");
        fclose(full);
    }
    ft_pp_schedule_free(s);
    assert_int_equal(allocated, 0);
}

/* --------------------------------------------------------------------------------------- errors */

static void test_configs(void **state)
{
    (void)state;
    ft_pp_schedule *s;
    ft_pp_kind kind;
    ft_pp_config c = ft_pp_config_default();
    assert_int_equal(ft_pp_check(&c), FT_OK);
#define BAD(kind_, P, V, M, part)                                                                  \
    do {                                                                                           \
        c = config_of(kind_, P, V, M);                                                             \
        REFUSED(ft_pp_schedule_create(&c, &s), FT_ERR_ARG, part);                                  \
    } while (0)
    BAD(FT_PP_INTERLEAVED, 4, 2, 6, "4 ranks, and 6 is not: use 4 or 8");
    BAD(FT_PP_INTERLEAVED, 4, 2, 3, "4 ranks, and 3 is not: use 4, or");
    BAD(FT_PP_INTERLEAVED, 4, 0, 4, "0 chunks a rank; it must be 1 to 26");
    BAD(FT_PP_INTERLEAVED, 4, 27, 4, "27 chunks a rank; it must be 1 to 26");
    BAD(FT_PP_1F1B, 4, 2, 4, "1f1b has one chunk a rank, not 2");
    BAD(FT_PP_GPIPE, 4, 2, 4, "gpipe has one chunk a rank, not 2");
    BAD(FT_PP_ZB_H1, 4, 2, 4, "zb-h1 has one chunk a rank, not 2");
    BAD(FT_PP_1F1B, 0, 1, 4, "0 ranks and 4 micro-batches");
    BAD(FT_PP_1F1B, 4, 1, 0, "4 ranks and 0 micro-batches");
    BAD(FT_PP_1F1B, 4, 1, -1, "4 ranks and -1 micro-batches");
    BAD(FT_PP_1F1B, 1 << 20, 1, 1 << 20, "use fewer micro-batches");
    BAD(FT_PP_KIND_COUNT, 1, 1, 1, "kind 4 is none");
    c = ft_pp_config_default();
    c.forward_only = 2;
    REFUSED(ft_pp_check(&c), FT_ERR_ARG, "forward_only is 2");
    REFUSED(ft_pp_check(NULL), FT_ERR_ARG, "config is NULL");
    c.forward_only = 0;
    REFUSED(ft_pp_schedule_create(&c, NULL), FT_ERR_ARG, "out is NULL");
    for (int k = 0; k < FT_PP_KIND_COUNT; k++) {
        assert_int_equal(ft_pp_kind_parse(ft_pp_kind_name((ft_pp_kind)k), &kind), FT_OK);
        assert_int_equal(kind, k);
    }
    assert_string_equal(ft_pp_kind_name(FT_PP_KIND_COUNT), "?");
    REFUSED(ft_pp_kind_parse("1F1B", &kind), FT_ERR_ARG, "\"1F1B\"; there are 1f1b, gpipe");
    REFUSED(ft_pp_kind_parse(NULL, &kind), FT_ERR_ARG, "NULL");
}

static void test_bad_costs(void **state)
{
    (void)state;
    ft_pp_config c = config_of(FT_PP_1F1B, 2, 1, 2);
    ft_pp_schedule *s = schedule_of(&c), empty;
    ft_pp_simulation *r;
    double factor[2] = {1, -1};
    ft_pp_cost k = ft_pp_cost_default();
    k.b = -1;
    REFUSED(ft_pp_simulate(s, &k, &r), FT_ERR_ARG, "b -1");
    k.b = NAN;
    REFUSED(ft_pp_simulate(s, &k, &r), FT_ERR_ARG, "nan");
    k.b = INFINITY;
    REFUSED(ft_pp_simulate(s, &k, &r), FT_ERR_ARG, "inf");
    k = ft_pp_cost_default();
    k.stage = factor;
    REFUSED(ft_pp_simulate(s, &k, &r), FT_ERR_ARG, "virtual stage 1 is -1");
    k.stage = NULL;
    k.blocking = 2;
    REFUSED(ft_pp_simulate(s, &k, &r), FT_ERR_ARG, "blocking is 2");
    REFUSED(ft_pp_simulate(s, NULL, NULL), FT_ERR_ARG, "out is NULL");
    REFUSED(ft_pp_simulate(NULL, NULL, &r), FT_ERR_ARG, "schedule is NULL");
    empty.config = c;
    empty.ranks = NULL;
    REFUSED(ft_pp_simulate(&empty, NULL, &r), FT_ERR_ARG, "ranks is NULL");
    ft_pp_schedule_free(s);
}

static ft_status everything(void)
{
    ft_pp_config c = config_of(FT_PP_INTERLEAVED, 2, 2, 2);
    ft_pp_schedule *s;
    double cost[4] = {1, 1, 1, 1};
    int64_t first[5];
    FT_TRY(ft_pp_layers_balance(4, cost, 0, 0, 4, first));
    FT_TRY(ft_pp_schedule_create(&c, &s));
    FILE *file = tmpfile();
    assert_non_null(file);
    ft_status status = ft_pp_print(s, 0, file);
    if (status == FT_OK) status = ft_pp_draw_file(s, NULL, 0, file);
    fclose(file);
    ft_pp_schedule_free(s);
    return status;
}

/* Every allocation may fail: the error says so, and nothing leaks. */
static void test_out_of_memory(void **state)
{
    (void)state;
    int n = 1;
    for (;; n++) {
        fail_at = n;
        ft_status status = everything();
        int ran_out = fail_at == 0;
        fail_at = 0;
        assert_int_equal(allocated, 0);
        if (!ran_out) {
            assert_int_equal(status, FT_OK);
            break;
        }
        assert_int_equal(status, FT_ERR_OOM);
        assert_non_null(strstr(ft_last_error(), "host memory"));
    }
    assert_true(n > 8);
}

/* --------------------------------------------------------------------------------------- layers */

enum { MAX_L = 10 };

typedef struct cut {
    double dearest, squares;
    int count[MAX_L];
} cut;

static double cut_cost(const double *cost, double embedding, double head, int stages, cut *c)
{
    int at = 0;
    c->dearest = c->squares = 0;
    for (int s = 0; s < stages; s++) {
        double piece = (s == 0 ? embedding : 0) + (s == stages - 1 ? head : 0);
        for (int k = 0; k < c->count[s]; k++) piece += cost[at++];
        c->dearest = fmax(c->dearest, piece);
        c->squares += piece * piece;
    }
    return c->dearest;
}

static int better(const cut *a, const cut *b, int stages)
{
    if (a->dearest != b->dearest) return a->dearest < b->dearest;
    if (a->squares != b->squares) return a->squares < b->squares;
    for (int s = 0; s < stages; s++) {
        if (a->count[s] != b->count[s]) return a->count[s] > b->count[s];
    }
    return 0;
}

/* The best of all cuts: bit i of `after` says that a stage ends after layer i. */
static cut best_cut(const double *cost, double embedding, double head, int layers, int stages)
{
    cut best, c;
    memset(&best, 0, sizeof best);
    best.dearest = INFINITY;
    for (unsigned after = 0; after < 1u << (layers - 1); after++) {
        int s = 0;
        memset(&c, 0, sizeof c);
        for (int i = 0; i < layers; i++) {
            c.count[s]++;
            s += i < layers - 1 && (after >> i & 1);
        }
        if (s != stages - 1) continue;
        cut_cost(cost, embedding, head, stages, &c);
        if (better(&c, &best, stages)) best = c;
    }
    return best;
}

static void same_cut(const cut *c, const int64_t *first, int stages)
{
    assert_int_equal(first[0], 0);
    for (int s = 0; s < stages; s++) assert_int_equal(first[s + 1] - first[s], c->count[s]);
}

/* Whole numbers, so that sums are exact and ties happen; then the same in tenths, where they are
   ties only up to rounding. */
static void test_balance(void **state)
{
    (void)state;
    seed = 7;
    for (int round = 0; round < 1500; round++) {
        double cost[MAX_L], tenths[MAX_L];
        int64_t first[MAX_L + 1];
        int layers = 1 + random_below(MAX_L), stages = 1 + random_below(layers);
        int variety = 1 + random_below(6);
        double embedding = random_below(6), head = random_below(12);
        for (int i = 0; i < layers; i++) cost[i] = random_below(variety) + (variety == 1);
        for (int i = 0; i < layers; i++) tenths[i] = cost[i] * 0.1;
        cut best = best_cut(cost, embedding, head, layers, stages);
        assert_int_equal(ft_pp_layers_balance(layers, cost, embedding, head, stages, first), FT_OK);
        same_cut(&best, first, stages);
        assert_int_equal(ft_pp_layers_balance(layers, tenths, embedding * 0.1, head * 0.1, stages,
                                              first), FT_OK);
        same_cut(&best, first, stages);
    }
}

/* A model's own case: 32 equal layers, a head worth 3 of them and an embedding worth little. */
static void test_balance_model(void **state)
{
    (void)state;
    double cost[32];
    int64_t first[5];
    for (int i = 0; i < 32; i++) cost[i] = 2;
    assert_int_equal(ft_pp_layers_balance(32, cost, 0.5, 6, 4, first), FT_OK);
    /* 70.5 / 4 is 17.6, and layers come in twos: 16.5, 18, 18 and 18 is the best there can be. */
    int64_t want[5] = {0, 8, 17, 26, 32};
    for (int s = 0; s < 5; s++) assert_int_equal(first[s], want[s]);
}

static void test_layers(void **state)
{
    (void)state;
    int64_t first[9], by_hand[5] = {0, 9, 18, 26, 32}, uniform[5] = {0, 3, 6, 8, 10};
    double cost[4] = {1, 2, -1, 1};
    assert_int_equal(ft_pp_layers_parse("9,9,8,6", 32, 4, first), FT_OK);
    for (int s = 0; s < 5; s++) assert_int_equal(first[s], by_hand[s]);
    assert_int_equal(ft_pp_layers_uniform(10, 4, first), FT_OK);
    for (int s = 0; s < 5; s++) assert_int_equal(first[s], uniform[s]);
    assert_int_equal(ft_pp_layers_uniform(8, 8, first), FT_OK);
    for (int s = 0; s < 9; s++) assert_int_equal(first[s], s);
    REFUSED(ft_pp_layers_uniform(3, 4, first), FT_ERR_ARG, "3 layers cannot fill 4 stages");
    REFUSED(ft_pp_layers_parse("1,1,1", 3, 4, first), FT_ERR_ARG, "3 layers cannot fill 4 stages");
    REFUSED(ft_pp_layers_balance(3, cost, 0, 0, 4, first), FT_ERR_ARG, "use at most 3");
    REFUSED(ft_pp_layers_uniform(0, 1, first), FT_ERR_ARG, "0 layers in 1 stages");
    REFUSED(ft_pp_layers_uniform(4, 0, first), FT_ERR_ARG, "4 layers in 0 stages");
    REFUSED(ft_pp_layers_uniform(5000, 4, first), FT_ERR_ARG, "1 to 4096 layers");
    REFUSED(ft_pp_layers_uniform(4, 2, NULL), FT_ERR_ARG, "first_layer is NULL");
    REFUSED(ft_pp_layers_parse(NULL, 4, 2, first), FT_ERR_ARG, "text is NULL");
    REFUSED(ft_pp_layers_parse("9,9,8", 32, 4, first), FT_ERR_ARG, "3 numbers, and there are 4");
    REFUSED(ft_pp_layers_parse("9,9,8,5,1", 32, 4, first), FT_ERR_ARG, "has 5 numbers");
    REFUSED(ft_pp_layers_parse("9,9,8,5", 32, 4, first), FT_ERR_ARG, "adds up to 31 layers");
    REFUSED(ft_pp_layers_parse("99999999999,1", 32, 2, first), FT_ERR_ARG, "adds up to");
    REFUSED(ft_pp_layers_parse("", 4, 2, first), FT_ERR_ARG, "at character 1");
    REFUSED(ft_pp_layers_parse("2,,2", 4, 2, first), FT_ERR_ARG, "at character 3");
    REFUSED(ft_pp_layers_parse("2,2,", 4, 2, first), FT_ERR_ARG, "at character 5");
    REFUSED(ft_pp_layers_parse("4,0", 4, 2, first), FT_ERR_ARG, "at least 1 each");
    REFUSED(ft_pp_layers_parse("3, 1", 4, 2, first), FT_ERR_ARG, "at character 3");
    REFUSED(ft_pp_layers_parse("-1,5", 4, 2, first), FT_ERR_ARG, "at character 1");
    REFUSED(ft_pp_layers_balance(4, cost, 0, 0, 2, first), FT_ERR_ARG, "layer 2 costs -1");
    REFUSED(ft_pp_layers_balance(4, NULL, 0, 0, 2, first), FT_ERR_ARG, "cost is NULL");
    cost[2] = 1;
    REFUSED(ft_pp_layers_balance(4, cost, NAN, 0, 2, first), FT_ERR_ARG, "embedding costs nan");
    REFUSED(ft_pp_layers_balance(4, cost, 0, -2, 2, first), FT_ERR_ARG, "head -2");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_complete),
        cmocka_unit_test(test_figures),
        cmocka_unit_test(test_blocking),
        cmocka_unit_test(test_in_order),
        cmocka_unit_test(test_known),
        cmocka_unit_test(test_uneven),
        cmocka_unit_test(test_costs),
        cmocka_unit_test(test_pure),
        cmocka_unit_test(test_mutations),
        cmocka_unit_test(test_deadlock),
        cmocka_unit_test(test_named),
        cmocka_unit_test(test_drawings),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_drawing_limits),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_configs),
        cmocka_unit_test(test_bad_costs),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_balance),
        cmocka_unit_test(test_balance_model),
        cmocka_unit_test(test_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
