/* Recomputation under a budget of bytes: ft_sac_fit against an exhaustive search.

   cc -std=c11 -I. tests/test_sac.c -lcmocka -lm -lpthread

   The search. A layer of the Llama has 12 outputs, so 4096 masks, and three layers have 4096^3
   choices. All are searched, without running them all, because a mask acts in three places only: it
   changes what live bytes do in the forward of its own layer, what they do in the backward of its
   own layer, and by how much all moments in between are raised. So for layer s and mask m four
   numbers, read off the timeline of a run, say everything:

       keep      live bytes at the end of the layer's forward, less those at its start
       forward   the most in the layer's forward, less those at its start
       backward  the most in the layer's backward, less those at its start
       flops     replayed

   and the peak of any choice is the largest of: the forward of each layer, on top of what those
   below keep; the backward of each, on top of what those below and itself keep; and what lies
   outside of layers. That claim is a test of its own here: the peaks that it gives are compared
   with those of runs with masks drawn at random, and must be equal. A mask that is no better in any
   of the four numbers than another one of the same layer then need not be looked at; all
   combinations of the others are. */

#ifndef FT_TEST_LINKED /* make compiles the implementation once for many tests */
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "train_harness.h"

#define LAYERS 3
#define MASKS 4096

/* What a run did, read off its timeline: live bytes around and inside each layer. */
typedef struct reading {
    size_t forward_start[LAYERS], forward_most[LAYERS], forward_end[LAYERS];
    size_t backward_start[LAYERS], backward_most[LAYERS];
    size_t outside[LAYERS + 1]; /* most outside of layers while that many are kept */
    size_t peak;
    double flops;
} reading;

typedef struct trial {
    th_options o;
    ft_sac sac[LAYERS];
    int one_rank;  /* on meta: rank 0 alone */
    reading read;  /* of rank 0 */
} trial;

static void more(size_t *most, size_t bytes)
{
    if (bytes > *most) *most = bytes;
}

/* Within a micro-batch layers come in the order 0 1 2, then (in backward) 2 1 0. Events that a
   layer's end frees have its segment and no phase. */
static void read_timeline(const ft_mem_event *e, int64_t n, reading *r)
{
    int kept = 0, inside = -1, back = 0;
    size_t before = 0; /* live before the event */
    memset(r, 0, sizeof *r);
    for (int64_t i = 0; i < n; before = e[i++].live_bytes) {
        int s = e[i].segment;
        if (s != inside) {
            if (inside >= 0 && !back) r->forward_end[inside] = before;
            if (inside >= 0) kept = back ? inside : inside + 1;
            back = s >= 0 && strcmp(e[i].phase, "forward") != 0;
            if (s >= 0 && back) r->backward_start[s] = r->backward_most[s] = before;
            if (s >= 0 && !back) r->forward_start[s] = r->forward_most[s] = before;
            inside = s;
        }
        if (s < 0) more(&r->outside[kept], e[i].live_bytes);
        else more(back ? &r->backward_most[s] : &r->forward_most[s], e[i].live_bytes);
        more(&r->peak, e[i].live_bytes);
    }
}

static ft_status trial_hook(th_rank *r, th_moment moment, void *user)
{
    trial *t = (trial *)user;
    const ft_mem_event *e;
    ft_flops flops;
    if (moment != TH_END || r->rank != 0) return FT_OK;
    ft_flops_get(r->ctx, &flops);
    if (r->job->options->launch.timeline) {
        int64_t n = ft_mem_timeline(r->ctx, &e);
        read_timeline(e, n, &t->read);
    }
    t->read.flops = flops.replay;
    return FT_OK;
}

/* One step of the tests' tiny model, three layers of it. Activations dominate. */
static void trial_default(trial *t)
{
    memset(t, 0, sizeof *t);
    t->o = th_options_default();
    t->o.model.layers = LAYERS;
    t->o.model.hidden = 32;
    t->o.model.head_dim = 16;
    t->o.model.intermediate = 80;
    t->o.model.loss_chunk_tokens = 64;
    t->o.samples = 8;
    t->o.steps = 1;
    t->o.report_every = 0;
    t->o.sac = t->sac;
    t->o.hook = trial_hook;
    t->o.user = t;
}

static th_result *trial_run(trial *t, ft_device device)
{
    t->o.launch.device = device;
    t->o.launch.timeline = device == FT_META && t->o.hook != NULL;
    t->o.launch.only_rank = device == FT_META && t->one_rank ? 0 : -1;
    th_result *result = th_run(&t->o);
    if (result->status != FT_OK) fail_msg("%s", result->error);
    return result;
}

static size_t fullest(const th_result *r, int world)
{
    size_t most = 0;
    for (int i = 0; i < world; i++) more(&most, r->mem[i].peak_bytes);
    return most;
}

/* ---------------------------------------------------------------------- the exhaustive search */

typedef struct option { size_t keep, forward, backward; double flops; uint64_t mask; } option;

typedef struct search {
    reading none;                   /* without recomputation */
    option all[LAYERS][MASKS];      /* every mask, measured */
    option best[LAYERS][MASKS];     /* those that no other one beats everywhere */
    int n[LAYERS];
} search;

static size_t kept(const reading *r, int layer)
{
    return r->forward_end[layer] - r->forward_start[layer];
}

/* All layers have the mask in one run. Flops of a layer: three layers alike replay alike, which the
   comparison with random runs confirms. */
static void measure(search *s, trial *t)
{
    for (int l = 0; l < LAYERS; l++) t->sac[l].kind = FT_SAC_NONE;
    th_free(trial_run(t, FT_META));
    s->none = t->read;
    for (uint64_t m = 0; m < MASKS; m++) {
        for (int l = 0; l < LAYERS; l++) {
            t->sac[l].kind = FT_SAC_MASK;
            t->sac[l].mask = m;
        }
        th_free(trial_run(t, FT_META));
        const reading *r = &t->read;
        for (int l = 0; l < LAYERS; l++) {
            option *o = &s->all[l][m];
            o->mask = m;
            o->keep = kept(r, l);
            o->forward = r->forward_most[l] - r->forward_start[l];
            o->backward = r->backward_most[l] - r->backward_start[l];
            o->flops = r->flops / LAYERS;
        }
    }
}

static int no_better(const option *a, const option *b)
{
    return a->keep >= b->keep && a->forward >= b->forward && a->backward >= b->backward &&
           a->flops >= b->flops;
}

static void prune(search *s)
{
    for (int l = 0; l < LAYERS; l++) {
        s->n[l] = 0;
        for (int m = 0; m < MASKS; m++) {
            const option *o = &s->all[l][m];
            int beaten = 0, n = 0;
            for (int k = 0; k < s->n[l] && !beaten; k++) beaten = no_better(o, &s->best[l][k]);
            if (beaten) continue;
            for (int k = 0; k < s->n[l]; k++)
                if (!no_better(&s->best[l][k], o)) s->best[l][n++] = s->best[l][k];
            s->best[l][n++] = *o;
            s->n[l] = n;
        }
    }
}

/* 0 bytes: there is no such moment. */
static void moment(int64_t *most, size_t bytes, int64_t shift)
{
    if (bytes && (int64_t)bytes + shift > *most) *most = (int64_t)bytes + shift;
}

/* The peak of a choice: every moment of the run without recomputation, shifted by what is kept. */
static size_t peak_of(const search *s, const option *const *choice)
{
    const reading *r = &s->none;
    int64_t most = (int64_t)r->outside[0], shift = 0;
    for (int l = 0; l < LAYERS; l++) {
        moment(&most, r->forward_start[l] + choice[l]->forward, shift);
        shift += (int64_t)choice[l]->keep - (int64_t)kept(r, l);
        moment(&most, r->backward_start[l] + choice[l]->backward, shift);
        moment(&most, r->outside[l + 1], shift);
    }
    return (size_t)most;
}

/* The least flops within the budget, over all combinations; -1 if none fits. *least: of peaks. */
static double exhaust(const search *s, size_t budget, size_t *least)
{
    double best = -1;
    const option *c[LAYERS];
    for (int i = 0; i < s->n[0]; i++)
        for (int j = 0; j < s->n[1]; j++)
            for (int k = 0; k < s->n[2]; k++) {
                c[0] = &s->best[0][i];
                c[1] = &s->best[1][j];
                c[2] = &s->best[2][k];
                double flops = c[0]->flops + c[1]->flops + c[2]->flops;
                if (!least && best >= 0 && flops >= best) continue;
                size_t peak = peak_of(s, c);
                if (least && peak < *least) *least = peak;
                if (peak <= budget && (best < 0 || flops < best)) best = flops;
            }
    return best;
}

/* The claim on which the search rests. */
static void check_claim(const search *s, trial *t)
{
    for (uint64_t k = 0; k < 400; k++) {
        const option *c[LAYERS];
        double flops = 0;
        for (int l = 0; l < LAYERS; l++) {
            uint64_t any = th_mix(k * LAYERS + (uint64_t)l);
            t->sac[l].kind = FT_SAC_MASK;
            t->sac[l].mask = k & 1 ? s->best[l][any % (uint64_t)s->n[l]].mask : any % MASKS;
            c[l] = &s->all[l][t->sac[l].mask];
            flops += c[l]->flops;
        }
        th_result *result = trial_run(t, FT_META);
        if (result->mem[0].peak_bytes != peak_of(s, c))
            fail_msg("masks %llx %llx %llx: peak %zu, by the four numbers %zu",
                     (unsigned long long)c[0]->mask, (unsigned long long)c[1]->mask,
                     (unsigned long long)c[2]->mask, result->mem[0].peak_bytes, peak_of(s, c));
        assert_true(result->flops[0].replay > flops - 1 && result->flops[0].replay < flops + 1);
        th_free(result);
    }
}

/* ----------------------------------------------------------------------------- the fit itself */

static ft_sac_budget fit_of(trial *t, th_job *job, size_t bytes)
{
    ft_sac_budget b;
    memset(&b, 0, sizeof b);
    memset(job, 0, sizeof *job);
    job->options = &t->o;
    b.segments = LAYERS;
    b.budget_bytes = bytes;
    b.config = ft_config_default();
    b.config.world = t->o.dp;
    b.step = th_rank_main;
    b.user = job;
    b.sac = t->sac;
    t->o.launch.timeline = 0;
    return b;
}

/* At 8 budgets from the least that is possible up to (not including) what keeping all needs. */
static void check_budgets(trial *t)
{
    search *s = (search *)malloc(sizeof *s);
    size_t least = SIZE_MAX;
    float *weights = NULL;
    int64_t n_weights = 0;
    assert_non_null(s);
    t->one_rank = 1;
    measure(s, t);
    prune(s);
    check_claim(s, t);
    t->one_rank = 0;
    (void)exhaust(s, 0, &least);
    for (int l = 0; l < LAYERS; l++) t->sac[l].kind = FT_SAC_NONE;
    t->o.keep_weights = 1;
    th_result *none = trial_run(t, FT_CPU);
    assert_int_equal(fullest(none, t->o.dp), s->none.peak);
    weights = none->weights;
    n_weights = none->n_weights;
    for (size_t i = 0; i < 8; i++) {
        size_t bytes = least + (s->none.peak - least) * i / 8;
        double best = exhaust(s, bytes, NULL);
        th_job job;
        ft_sac_budget b = fit_of(t, &job, bytes);
        ft_status status = ft_sac_fit(&b);
        if (status != FT_OK)
            fail_msg("budget %zu (%zu to %zu): %s", bytes, least, s->none.peak, ft_last_error());
        th_result *run = trial_run(t, FT_CPU);
        assert_int_equal(fullest(run, t->o.dp), b.peak_bytes);
        assert_true(b.peak_bytes <= bytes);
        assert_true(best >= 0);
        assert_true(t->read.flops == b.recompute_flops);
        assert_true(b.optimal && b.recompute_flops <= best + 0.5);
        /* Recomputation changes no bit. */
        assert_int_equal(run->n_weights, n_weights);
        assert_memory_equal(run->weights, weights, (size_t)n_weights * sizeof *weights);
        assert_true(run->loss[0] == none->loss[0] && run->norm[0] == none->norm[0]);
        th_free(run);
    }
    th_free(none);
    free(s);
}

/* On one rank nothing can race, so ThreadSanitizer is spared it. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#if !defined(__SANITIZE_THREAD__) && !defined(UNDER_TSAN)
#define ONE_RANK 1
static void eight_budgets(void **state)
{
    trial t;
    (void)state;
    trial_default(&t);
    check_budgets(&t);
}
#endif

/* And with a head so large that for many choices the loss makes the peak, outside of all layers. */
static void eight_budgets_of_two_ranks_in_stage_3(void **state)
{
    trial t;
    (void)state;
    trial_default(&t);
    t.o.model.vocab = 600;
    t.o.model.loss_chunk_tokens = 24;
    t.o.dp = 2;
    t.o.zero.stage = 3;
    t.o.zero.dtype = FT_BF16;
    t.o.micro_batches = 2;
    check_budgets(&t);
}

/* ------------------------------------------------------------ layers that differ, searched by runs

   Four layers of x + W2 silu(W1 norm(x)); their widths differ, and two that look alike differ in
   that one's weights are frozen, so that it saves less. Of a layer's outputs (norm, W1, silu, W2,
   sum) the first three are worth dropping: 8 masks a layer, 4096 choices, and each one is run. The
   last layer also adds something wide that has no gradient, so that its forward makes the peak. */

enum { STACK = 4, STACK_N = 24, STACK_C = 20, STACK_WIDE = 400 };

typedef struct stack {
    ft_sac sac[STACK];
    ft_mem_stats mem;
    ft_flops flops;
    float grads[STACK][STACK_C]; /* of the norms' weights */
} stack;

static const int64_t stack_width[STACK] = { 16, 48, 48, 96 };
static const int stack_frozen[STACK] = { 0, 0, 1, 0 };

static ft_status stack_tensor(ft_ctx *ctx, int64_t rows, int64_t cols, int requires_grad, int seed,
                              ft_tensor **out)
{
    int64_t shape[2];
    float values[STACK_N * STACK_WIDE];
    shape[0] = rows;
    shape[1] = cols;
    for (int64_t i = 0; i < rows * cols; i++)
        values[i] = (float)(int)(th_mix((uint64_t)(seed * 100000 + i)) % 2001) / 4000 - 0.25f;
    FT_TRY(rows == 1 ? ft_tensor_create(ctx, out, FT_F32, 1, &shape[1], FT_TAG_PARAM)
                     : ft_tensor_create(ctx, out, FT_F32, 2, shape, FT_TAG_PARAM));
    (*out)->requires_grad = requires_grad;
    return ft_upload(*out, values);
}

/* x += side w, by way of something as wide as side. */
static ft_status stack_side(ft_ctx *ctx, ft_tensor **x, ft_tensor *side, ft_tensor *w)
{
    ft_tensor *z, *q, *next;
    FT_TRY(ft_scale(ctx, &z, side, 0.5));
    FT_TRY(ft_linear(ctx, &q, z, w, NULL));
    ft_tensor_free(z);
    FT_TRY(ft_add(ctx, &next, *x, q));
    ft_tensor_free(q);
    ft_tensor_free(*x);
    *x = next;
    return FT_OK;
}

static ft_status stack_layer(ft_ctx *ctx, ft_tensor **x, ft_tensor **w, ft_tensor **side,
                             ft_sac sac)
{
    ft_tensor *y, *h, *g, *d, *next;
    FT_TRY(ft_segment_begin(ctx, "layer", sac));
    FT_TRY(ft_rmsnorm(ctx, &y, *x, w[0], 1e-5));
    FT_TRY(ft_linear(ctx, &h, y, w[1], NULL));
    ft_tensor_free(y);
    FT_TRY(ft_silu(ctx, &g, h));
    ft_tensor_free(h);
    FT_TRY(ft_linear(ctx, &d, g, w[2], NULL));
    ft_tensor_free(g);
    FT_TRY(ft_add(ctx, &next, *x, d));
    ft_tensor_free(d);
    ft_tensor_free(*x);
    if (side) FT_TRY(stack_side(ctx, &next, side[0], side[1]));
    FT_TRY(ft_segment_end(ctx, 1, &next));
    *x = next;
    return FT_OK;
}

static ft_status stack_rank(ft_ctx *ctx, void *user)
{
    stack *s = (stack *)user;
    ft_tensor *x, *in, *loss, *w[STACK][3], *side[2];
    ft_tape *tape;
    for (int i = 0; i < STACK; i++) {
        int grad = !stack_frozen[i];
        FT_TRY(stack_tensor(ctx, 1, STACK_C, grad, 0, &w[i][0]));
        FT_TRY(stack_tensor(ctx, stack_width[i], STACK_C, grad, 2 * i + 1, &w[i][1]));
        FT_TRY(stack_tensor(ctx, STACK_C, stack_width[i], grad, 2 * i + 2, &w[i][2]));
    }
    FT_TRY(stack_tensor(ctx, STACK_N, STACK_C, 1, 99, &in));
    FT_TRY(stack_tensor(ctx, STACK_N, STACK_WIDE, 0, 98, &side[0]));
    FT_TRY(stack_tensor(ctx, STACK_C, STACK_WIDE, 0, 97, &side[1]));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_scale(ctx, &x, in, 2));
    for (int i = 0; i < STACK; i++)
        FT_TRY(stack_layer(ctx, &x, w[i], i == STACK - 1 ? side : NULL, s->sac[i]));
    FT_TRY(ft_mean(ctx, &loss, x));
    ft_tensor_free(x);
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_backward(tape, loss, NULL));
    ft_tensor_free(loss);
    for (int i = 0; i < STACK; i++)
        if (w[i][0]->grad) FT_TRY(ft_download(w[i][0]->grad, s->grads[i]));
    ft_mem_get(ctx, &s->mem);
    ft_flops_get(ctx, &s->flops);
    return FT_OK;
}

static void stack_run(stack *s, ft_device device)
{
    ft_config config = ft_config_default();
    config.device = device;
    if (ft_launch(&config, stack_rank, s) != FT_OK) fail_msg("%s", ft_last_error());
}

static void layers_that_differ(void **state)
{
    static size_t peak[4096];
    static double flops[4096];
    stack s, none;
    size_t least = SIZE_MAX, most;
    (void)state;
    memset(&s, 0, sizeof s);
    none = s;
    for (int k = 0; k < 4096; k++) {
        for (int i = 0; i < STACK; i++) {
            s.sac[i].kind = FT_SAC_MASK;
            s.sac[i].mask = (uint64_t)(k >> 3 * i & 7);
        }
        stack_run(&s, FT_META);
        peak[k] = s.mem.peak_bytes;
        flops[k] = s.flops.replay;
        if (peak[k] < least) least = peak[k];
    }
    most = peak[0];
    stack_run(&none, FT_CPU);
    assert_int_equal(none.mem.peak_bytes, most);
    for (size_t i = 0; i <= 8; i++) {
        ft_sac_budget b;
        double best = -1;
        memset(&b, 0, sizeof b);
        b.segments = STACK;
        b.budget_bytes = least + (most - least) * i / 8;
        b.config = ft_config_default();
        b.step = stack_rank;
        b.user = &s;
        b.sac = s.sac;
        if (ft_sac_fit(&b) != FT_OK) fail_msg("budget %zu: %s", b.budget_bytes, ft_last_error());
        stack_run(&s, FT_CPU);
        for (int k = 0; k < 4096; k++)
            if (peak[k] <= b.budget_bytes && (best < 0 || flops[k] < best)) best = flops[k];
        assert_int_equal(s.mem.peak_bytes, b.peak_bytes);
        assert_true(s.mem.peak_bytes <= b.budget_bytes);
        assert_true(s.flops.replay == b.recompute_flops && b.recompute_flops == best);
        assert_true(b.optimal);
        assert_memory_equal(s.grads, none.grads, sizeof s.grads);
    }
}

/* ------------------------------------------------------- several micro-batches, several stages

   The four layers over P ranks under each schedule, every choice of masks run. A rank's peak and
   flops depend on its own layers alone, so runs in which all ranks change their masks together say
   for each rank which choices fit and what the cheapest of them costs. */

enum { PIPE_RANKS = 2 };

typedef struct pipe {
    ft_pp_config config;
    int replicas;                    /* dp */
    ft_sac sac[STACK];
    size_t peak[2 * PIPE_RANKS];
    double flops[2 * PIPE_RANKS];
} pipe;

typedef struct pipe_rank {
    ft_ctx *ctx;
    pipe *p;
    int stage;
    ft_tensor *w[STACK][3], *in;
} pipe_rank;

static int pipe_layers(const pipe *p) { return STACK / (p->config.ranks * p->config.chunks); }

/* The rank that has a layer. */
static int pipe_stage_of(const pipe *p, int layer)
{
    return layer / pipe_layers(p) % p->config.ranks;
}

static ft_status pipe_forward(void *user, int chunk, int m, ft_tensor *x, ft_tensor **out)
{
    pipe_rank *r = (pipe_rank *)user;
    int n = pipe_layers(r->p), first = (chunk * r->p->config.ranks + r->stage) * n;
    ft_tensor *y;
    (void)m;
    FT_TRY(ft_scale(r->ctx, &y, x ? x : r->in, 2)); /* x stays the runner's */
    for (int i = first; i < first + n; i++)
        FT_TRY(stack_layer(r->ctx, &y, r->w[i], NULL, r->p->sac[i]));
    *out = y;
    if (first + n < STACK) return FT_OK;
    FT_TRY(ft_mean(r->ctx, out, y));
    ft_tensor_free(y);
    return FT_OK;
}

static ft_status pipe_rank_main(ft_ctx *ctx, void *user)
{
    pipe_rank r;
    ft_pp_program program;
    ft_mem_stats mem;
    ft_flops flops;
    ft_mesh mesh;
    ft_pp *pp;
    memset(&r, 0, sizeof r);
    memset(&program, 0, sizeof program);
    r.ctx = ctx;
    r.p = (pipe *)user;
    FT_TRY(ft_mesh_create(ctx, r.p->replicas, 1, r.p->config.ranks, &mesh));
    r.stage = mesh.coord[FT_AXIS_PP];
    for (int i = 0; i < STACK; i++) {
        if (pipe_stage_of(r.p, i) != r.stage) continue;
        FT_TRY(stack_tensor(ctx, 1, STACK_C, 1, 0, &r.w[i][0]));
        FT_TRY(stack_tensor(ctx, stack_width[i], STACK_C, 1, 2 * i + 1, &r.w[i][1]));
        FT_TRY(stack_tensor(ctx, STACK_C, stack_width[i], 1, 2 * i + 2, &r.w[i][2]));
    }
    FT_TRY(stack_tensor(ctx, STACK_N, STACK_C, 1, 99, &r.in));
    program.forward = pipe_forward;
    program.user = &r;
    program.ndim = 2;
    program.shape[0] = STACK_N;
    program.shape[1] = STACK_C;
    FT_TRY(ft_pp_create(ctx, &mesh, &r.p->config, &pp));
    FT_TRY(ft_pp_run(pp, &program));
    ft_mem_get(ctx, &mem);
    ft_flops_get(ctx, &flops);
    r.p->peak[ft_rank(ctx)] = mem.peak_bytes;
    r.p->flops[ft_rank(ctx)] = flops.replay;
    return FT_OK;
}

static void pipe_run(pipe *p, ft_device device)
{
    ft_config config = ft_config_default();
    config.device = device;
    config.world = p->replicas * p->config.ranks;
    if (ft_launch(&config, pipe_rank_main, p) != FT_OK) fail_msg("%s", ft_last_error());
}

/* Peak and flops of each stage under each choice of its layers' masks: 3 bits a layer. */
typedef struct pipe_search { size_t peak[PIPE_RANKS][4096]; double flops[PIPE_RANKS][4096]; int n; }
    pipe_search;

static void pipe_measure(pipe *p, pipe_search *s)
{
    s->n = p->config.ranks == 1 ? 4096 : 64;
    for (int k = 0; k < s->n; k++) {
        int used[PIPE_RANKS] = {0};
        for (int i = 0; i < STACK; i++) {
            p->sac[i].kind = FT_SAC_MASK;
            p->sac[i].mask = (uint64_t)(k >> 3 * used[pipe_stage_of(p, i)]++ & 7);
        }
        pipe_run(p, FT_META);
        for (int r = 0; r < p->config.ranks; r++) {
            s->peak[r][k] = p->peak[r * p->replicas];
            s->flops[r][k] = p->flops[r * p->replicas];
        }
    }
}

/* The fit is the cheapest choice of every stage, from the least bytes that all stages can do with
   up to what they take without recomputation; one byte less than the least is refused. */
static void pipe_check(pipe *p)
{
    static pipe_search s;
    size_t least = 0, most = 0;
    char least_text[32];
    pipe_measure(p, &s);
    for (int r = 0; r < p->config.ranks; r++) {
        size_t own = SIZE_MAX;
        for (int k = 0; k < s.n; k++)
            if (s.peak[r][k] < own) own = s.peak[r][k];
        more(&least, own);
        more(&most, s.peak[r][0]);
    }
    for (size_t i = 0; i <= 12; i++) {
        ft_sac_budget b;
        memset(&b, 0, sizeof b);
        b.segments = STACK;
        b.budget_bytes = i ? least + (most - least) * (i - 1) / 11 : least - 1;
        b.config = ft_config_default();
        b.config.world = p->replicas * p->config.ranks;
        b.step = pipe_rank_main;
        b.user = p;
        b.sac = p->sac;
        ft_status status = ft_sac_fit(&b);
        if (status != (i ? FT_OK : FT_ERR_OOM))
            fail_msg("%s, P %d, budget %zu of %zu to %zu: %s", ft_pp_kind_name(p->config.kind),
                     p->config.ranks, b.budget_bytes, least, most, ft_last_error());
        snprintf(least_text, sizeof least_text, " %zu;", least);
        if (!i) assert_non_null(strstr(ft_last_error(), least_text));
        pipe_run(p, i % 4 == 1 ? FT_CPU : FT_META);
        for (int r = 0; r < p->config.ranks && i; r++) {
            double best = -1;
            for (int k = 0; k < s.n; k++)
                if (s.peak[r][k] <= b.budget_bytes && (best < 0 || s.flops[r][k] < best))
                    best = s.flops[r][k];
            if (p->flops[r * p->replicas] != best || p->peak[r * p->replicas] > b.budget_bytes)
                fail_msg("%s, P %d, budget %zu of %zu to %zu: stage %d replays %g flops within %zu "
                         "bytes, %g is possible", ft_pp_kind_name(p->config.kind), p->config.ranks,
                         b.budget_bytes, least, most, r, p->flops[r * p->replicas],
                         p->peak[r * p->replicas], best);
        }
        assert_true(!i || b.optimal);
    }
}

static void stages_and_micro_batches(void **state)
{
    (void)state;
    for (int i = 0; i < FT_PP_KIND_COUNT * 2; i++) {
        pipe p;
        memset(&p, 0, sizeof p);
        p.config = ft_pp_config_default();
        p.config.kind = (ft_pp_kind)(i / 2);
        p.config.ranks = 1 + i % 2;
        p.config.chunks = p.config.kind == FT_PP_INTERLEAVED ? 2 : 1;
        p.config.micro_batches = 4;
        p.replicas = 1 + (i == 1);
        pipe_check(&p);
    }
}

/* ------------------------------------- a segment with more tensors than subsets are tried of */

enum { CHAIN = 8 };

typedef struct chain { ft_sac sac[2]; ft_mem_stats mem; ft_flops flops; } chain;

/* Two segments of CHAIN times x = silu(W x): 2 CHAIN tensors each. */
static ft_status chain_rank(ft_ctx *ctx, void *user)
{
    chain *c = (chain *)user;
    ft_tensor *w, *in, *x, *y, *loss;
    ft_tape *tape;
    FT_TRY(stack_tensor(ctx, STACK_C, STACK_C, 1, 1, &w));
    FT_TRY(stack_tensor(ctx, STACK_N, STACK_C, 1, 2, &in));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_scale(ctx, &x, in, 2));
    for (int s = 0; s < 2; s++) {
        FT_TRY(ft_segment_begin(ctx, "chain", c->sac[s]));
        for (int i = 0; i < CHAIN; i++) {
            FT_TRY(ft_linear(ctx, &y, x, w, NULL));
            ft_tensor_free(x);
            FT_TRY(ft_silu(ctx, &x, y));
            ft_tensor_free(y);
        }
        FT_TRY(ft_segment_end(ctx, 1, &x));
    }
    FT_TRY(ft_mean(ctx, &loss, x));
    ft_tensor_free(x);
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_backward(tape, loss, NULL));
    ft_tensor_free(loss);
    ft_mem_get(ctx, &c->mem);
    ft_flops_get(ctx, &c->flops);
    return FT_OK;
}

static void chain_run(chain *c, ft_device device)
{
    ft_config config = ft_config_default();
    config.device = device;
    if (ft_launch(&config, chain_rank, c) != FT_OK) fail_msg("%s", ft_last_error());
}

/* No error: an answer that fits, down to what dropping all of a segment needs; and it does not
   claim to be the best. */
static void more_tensors_than_are_tried(void **state)
{
    chain c, all;
    (void)state;
    memset(&c, 0, sizeof c);
    chain_run(&c, FT_META);
    size_t most = c.mem.peak_bytes;
    all = c;
    all.sac[0].kind = all.sac[1].kind = FT_SAC_FULL;
    chain_run(&all, FT_META);
    double last = all.flops.replay + 1;
    assert_true(all.mem.peak_bytes < most);
    for (size_t i = 0; i <= 6; i++) {
        ft_sac_budget b;
        memset(&b, 0, sizeof b);
        b.segments = 2;
        b.budget_bytes = all.mem.peak_bytes + (most - all.mem.peak_bytes) * i / 6;
        b.config = ft_config_default();
        b.step = chain_rank;
        b.user = &c;
        b.sac = c.sac;
        if (ft_sac_fit(&b) != FT_OK) fail_msg("budget %zu: %s", b.budget_bytes, ft_last_error());
        chain_run(&c, FT_CPU);
        assert_int_equal(c.mem.peak_bytes, b.peak_bytes);
        assert_true(b.peak_bytes <= b.budget_bytes && c.flops.replay == b.recompute_flops);
        assert_true(b.recompute_flops <= last);
        assert_int_equal(b.optimal, i == 6);
        last = b.recompute_flops;
    }
}

/* ------------------------------------------------------------------------ nothing fits, or all */

static void budget_that_nothing_meets(void **state)
{
    for (int which = 0; which < 2; which++) {
        trial t;
        th_job job;
        char text[64];
        size_t least;
        (void)state;
        trial_default(&t);
        if (which) {
            t.o.dp = 2;
            t.o.zero.stage = 2;
        }
        ft_sac_budget b = fit_of(&t, &job, 1);
        assert_int_equal(ft_sac_fit(&b), FT_ERR_OOM);
        /* The message names the least; that is enough, and one byte less is not. */
        least = b.peak_bytes;
        snprintf(text, sizeof text, " %zu", least);
        assert_non_null(strstr(ft_last_error(), text));
        b = fit_of(&t, &job, least);
        if (ft_sac_fit(&b) != FT_OK) fail_msg("%s", ft_last_error());
        assert_int_equal(b.peak_bytes, least);
        th_result *run = trial_run(&t, FT_CPU);
        assert_int_equal(fullest(run, t.o.dp), least);
        th_free(run);
        b = fit_of(&t, &job, least - 1);
        assert_int_equal(ft_sac_fit(&b), FT_ERR_OOM);
        assert_non_null(strstr(ft_last_error(), text));
        for (int l = 0; l < LAYERS; l++) t.sac[l].kind = FT_SAC_FULL;
        run = trial_run(&t, FT_META);
        assert_true(fullest(run, t.o.dp) >= least);
        th_free(run);
    }
}

static void large_budget_recomputes_nothing(void **state)
{
    trial t;
    th_job job;
    (void)state;
    trial_default(&t);
    th_result *none = trial_run(&t, FT_META);
    for (int which = 0; which < 2; which++) {
        for (int l = 0; l < LAYERS; l++) t.sac[l].kind = FT_SAC_FULL;
        ft_sac_budget b = fit_of(&t, &job, which ? SIZE_MAX : none->mem[0].peak_bytes);
        assert_int_equal(ft_sac_fit(&b), FT_OK);
        for (int l = 0; l < LAYERS; l++) assert_int_equal(t.sac[l].kind, FT_SAC_NONE);
        assert_int_equal(b.peak_bytes, none->mem[0].peak_bytes);
        assert_true(b.recompute_flops == 0);
        assert_int_equal(b.runs, 1);
    }
    th_free(none);
}

static ft_status failing_step(ft_ctx *ctx, void *user)
{
    (void)ctx;
    (void)user;
    return ft_error(FT_ERR_UNSUPPORTED, "the step refuses");
}

static void fit_refusals(void **state)
{
    trial t;
    th_job job;
    ft_sac_budget b;
    (void)state;
    trial_default(&t);
    b = fit_of(&t, &job, 1000000);
    b.segments = 0;
    assert_int_equal(ft_sac_fit(&b), FT_ERR_ARG);
    b = fit_of(&t, &job, 1000000);
    b.step = NULL;
    assert_int_equal(ft_sac_fit(&b), FT_ERR_ARG);
    b = fit_of(&t, &job, 1000000);
    b.sac = NULL;
    assert_int_equal(ft_sac_fit(&b), FT_ERR_ARG);
    b = fit_of(&t, &job, 1000000);
    b.step = failing_step;
    assert_int_equal(ft_sac_fit(&b), FT_ERR_UNSUPPORTED);
    assert_non_null(strstr(ft_last_error(), "the step refuses"));
}

/* A model of one segment, and one of many. */
static void one_layer_and_many(void **state)
{
    (void)state;
    for (int which = 0; which < 2; which++) {
        static ft_sac sac[24];
        trial t;
        th_job job;
        trial_default(&t);
        t.o.model.layers = which ? 24 : 1;
        t.o.sac = sac;
        t.o.hook = NULL;
        memset(sac, 0, sizeof sac);
        th_result *none = trial_run(&t, FT_META);
        for (int l = 0; l < 24; l++) sac[l].kind = FT_SAC_FULL;
        th_result *full = trial_run(&t, FT_META);
        size_t a = full->mem[0].peak_bytes, z = none->mem[0].peak_bytes;
        double last = -1;
        for (size_t i = 0; i < 4; i++) {
            ft_sac_budget b = fit_of(&t, &job, a + (z - a) * i / 4);
            b.segments = (int)t.o.model.layers;
            b.sac = sac;
            if (ft_sac_fit(&b) != FT_OK) fail_msg("%s", ft_last_error());
            assert_true(b.peak_bytes <= b.budget_bytes);
            assert_true(b.recompute_flops <= full->flops[0].replay);
            assert_true(last < 0 || b.recompute_flops <= last); /* more bytes, less work */
            last = b.recompute_flops;
            th_result *run = trial_run(&t, FT_META);
            assert_int_equal(run->mem[0].peak_bytes, b.peak_bytes);
            assert_true(run->flops[0].replay == b.recompute_flops);
            th_free(run);
        }
        th_free(none);
        th_free(full);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#ifdef ONE_RANK
        cmocka_unit_test(eight_budgets),
#endif
        cmocka_unit_test(eight_budgets_of_two_ranks_in_stage_3),
        cmocka_unit_test(layers_that_differ),
        cmocka_unit_test(stages_and_micro_batches),
        cmocka_unit_test(more_tensors_than_are_tried),
        cmocka_unit_test(budget_that_nothing_meets),
        cmocka_unit_test(large_budget_recomputes_nothing),
        cmocka_unit_test(fit_refusals),
        cmocka_unit_test(one_layer_and_many),
    };
    return cmocka_run_group_tests_name("sac", tests, NULL, NULL);
}
