/* test_3d.c: dp x tp x pp, ZeRO, recomputation and schedules together.

   The reference is one rank with the same global batch, in fp32: whatever the layout, losses and
   gradient norms are its own to 1e-5, and the plan made on meta is the run. Layouts are a pairwise
   covering array, built here. Bytes come from closed forms in this file, or from formulas of the
   headers.

   LETTERS  B batch (a micro-batch of one dp rank), T tokens, N = B T, C hidden, M micro-batches,
   P stages (p one of them), V chunks a rank, t tp ranks, D dp ranks.

   License: MIT, see LICENSE. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include <stdio.h> /* before femtotron.h: _POSIX_C_SOURCE is set above */

#ifndef FT_TEST_LINKED /* make compiles the implementation once for many tests */
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ------------------------------------------------------------------------------------- harness */

enum { RANKS = 8, STEPS = 64, GROUPS = 16 };
enum { LAYERS = 8, HIDDEN = 32, HEADS = 4, FEED = 64, VOCAB = 97 };

typedef enum variant { UNTIED, TIED, UNTIED_BIAS, TIED_QK_NORM, VARIANTS } variant;

typedef struct layout { /* zero is a one-rank run of one step without recomputation */
    int dp, tp, pp, sp, M, stage;
    ft_sac_kind sac;
    ft_pp_kind kind;
    variant model;
    int keep_gathered, lean; /* lean: no prefetch, no overlap */
    int steps, batch, layers;
    int64_t T;
    ft_device device;
    int async, delay_us;
    int overlap;             /* exchanges beside compute */
    int tables;              /* 1: keep each rank's embedding table */
} layout;

typedef struct sent { char group[32]; int64_t calls[FT_COLLECTIVE_COUNT], bytes; } sent;

typedef struct outcome {
    ft_status status;
    char error[1024];
    double loss[RANKS][STEPS], norm[RANKS][STEPS];
    uint64_t hash;
    ft_mem_stats created[RANKS], mem[RANKS]; /* before the first step, after the last */
    int leaks[RANKS];                        /* steps after which a tag's live bytes had changed */
    sent sent[RANKS][GROUPS];                /* in all steps */
    ft_zero_formula formula[RANKS];
    int units[RANKS];
    size_t after_forward[RANKS];             /* most act bytes at the end of a chunk's forward */
    float *table[RANKS];                     /* embedding or head of a tied model; NULL elsewhere */
    int64_t table_elems[RANKS];
} outcome;

typedef struct rank { /* a rank's program */
    const layout *l;
    outcome *out;
    ft_ctx *ctx;
    ft_zero *zero;
    ft_llama *model;
    ft_tp *tp;
    ft_pp *pp;
    ft_mesh mesh;
    ft_pp_program program;
    ft_tensor *scale;
    ft_sac sac[16];
    int64_t first_layer[17];
    int step, me;
    int shift;               /* of the first cut of the layers */
} rank;

static layout layout_default(void)
{
    layout l;
    memset(&l, 0, sizeof l);
    l.dp = l.tp = l.pp = l.M = 1;
    l.steps = 1;
    l.batch = 8;
    l.layers = LAYERS;
    l.T = 8;
    return l;
}

static int is_tied(const layout *l) { return l->model == TIED || l->model == TIED_QK_NORM; }
static int chunks(const layout *l) { return l->kind == FT_PP_INTERLEAVED ? 2 : 1; }
static int world(const layout *l) { return l->dp * l->tp * l->pp; }
static int rows_of(const layout *l) { return l->batch / (l->dp * l->M); } /* B */

static const char *describe(const layout *l)
{
    static char text[200];
    static const char *const sac[] = {"none", "selective", "full", "mask"};
    static const char *const model[] = {"untied", "tied", "untied+bias", "tied+qk_norm"};
    snprintf(text, sizeof text, "dp %d tp %d pp %d sp %d M %d zero %d sac %s %s %s%s%s", l->dp,
             l->tp, l->pp, l->sp, l->M, l->stage, sac[l->sac], ft_pp_kind_name(l->kind),
             model[l->model], l->keep_gathered ? " keep" : "", l->lean ? " lean" : "");
    return text;
}

static ft_llama_config model_of(const layout *l)
{
    ft_llama_config c = ft_llama_config_default();
    c.vocab = VOCAB;
    c.hidden = HIDDEN;
    c.layers = l->layers;
    c.heads = c.kv_heads = HEADS;
    c.intermediate = FEED;
    c.tie_embeddings = l->model == TIED || l->model == TIED_QK_NORM;
    c.qkv_bias = l->model == UNTIED_BIAS;
    c.qk_norm = l->model == TIED_QK_NORM;
    return c;
}

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Token i of a sample: a function of (step, sample, i), not of the layout. */
static int32_t token_of(int step, int sample, int64_t i)
{
    return (int32_t)(mix(((uint64_t)step << 40) ^ ((uint64_t)sample << 20) ^ (uint64_t)i) % VOCAB);
}

/* Samples have different numbers of labels that count. */
static int counts(int sample, int64_t i) { return i >= sample % 3; }

static int sample_of(const rank *r, int m, int b)
{
    return (m * r->l->dp + r->mesh.coord[FT_AXIS_DP]) * rows_of(r->l) + b;
}

static ft_status batch_of(rank *r, int m, ft_tensor **tokens, ft_tensor **labels)
{
    int32_t host[2][512];
    int64_t T = r->l->T, shape[2], at = 0;
    shape[0] = rows_of(r->l);
    shape[1] = T;
    for (int b = 0; b < rows_of(r->l); b++)
        for (int64_t i = 0; i < T; i++, at++) {
            int s = sample_of(r, m, b);
            host[0][at] = token_of(r->step, s, i);
            host[1][at] = counts(s, i) ? token_of(r->step, s, i + 1) : -100;
        }
    FT_TRY(ft_tensor_create(r->ctx, tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(r->ctx, labels, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_upload(*tokens, host[0]));
    return ft_upload(*labels, host[1]);
}

static ft_status forward(void *user, int chunk, int m, ft_tensor *x, ft_tensor **out)
{
    rank *r = (rank *)user;
    ft_tensor *tokens, *labels;
    ft_mem_stats mem;
    FT_TRY(batch_of(r, m, &tokens, &labels));
    FT_TRY(ft_llama_chunk(r->model, chunk, tokens, labels, r->scale, r->sac, x, out));
    ft_tensor_free(tokens);
    ft_tensor_free(labels);
    ft_mem_get(r->ctx, &mem);
    if (mem.live[FT_TAG_ACT] > r->out->after_forward[r->me])
        r->out->after_forward[r->me] = mem.live[FT_TAG_ACT];
    return FT_OK;
}

static ft_status add_loss(void *user, int m, ft_tensor *loss)
{
    (void)m;
    return ft_zero_add_loss(((rank *)user)->zero, loss);
}

static ft_status create_model(rank *r)
{
    const layout *l = r->l;
    ft_zero_config zero = ft_zero_config_default();
    ft_llama_config config = model_of(l);
    ft_llama_layout part;
    FT_TRY(ft_mesh_create(r->ctx, l->dp, l->tp, l->pp, &r->mesh));
    FT_TRY(ft_tp_check(l->tp, l->sp, config.heads, config.kv_heads, config.intermediate, rows_of(l),
                       l->T));
    FT_TRY(ft_pp_layers_uniform(l->layers, l->pp * chunks(l), r->first_layer));
    r->first_layer[1] += r->shift;
    if (l->tp > 1) FT_TRY(ft_tp_create(r->ctx, &r->mesh, l->sp, &r->tp));
    zero.stage = l->stage;
    zero.weight_decay = 0.1;
    zero.grad_clip = 0.5; /* below every norm here: a wrong coefficient shows later */
    zero.keep_gathered = l->keep_gathered;
    zero.prefetch = l->lean ? 0 : 1;
    zero.reduce_overlap = l->lean ? FT_OFF : FT_ON;
    FT_TRY(ft_zero_create(r->ctx, &zero, &r->mesh, &r->zero));
    memset(&part, 0, sizeof part);
    part.mesh = r->mesh;
    part.tp = r->tp;
    part.chunks = chunks(l);
    part.first_layer = r->first_layer;
    return ft_llama_create_part(r->ctx, r->zero, &config, &part, l->T, 42, &r->model);
}

static ft_status create(rank *r)
{
    const layout *l = r->l;
    ft_pp_config pipeline = ft_pp_config_default();
    pipeline.kind = l->kind;
    pipeline.ranks = l->pp;
    pipeline.chunks = chunks(l);
    pipeline.micro_batches = l->M;
    pipeline.overlap = l->overlap;
    FT_TRY(ft_pp_check(&pipeline));
    FT_TRY(create_model(r));
    for (int i = 0; i < l->layers; i++) r->sac[i].kind = l->sac;
    FT_TRY(ft_pp_create(r->ctx, &r->mesh, &pipeline, &r->pp));
    r->program.forward = forward;
    r->program.loss = add_loss;
    r->program.user = r;
    return ft_llama_boundary(r->model, rows_of(l), l->T, &r->program.ndim, r->program.shape);
}

/* Adds `sign` times what each group has sent so far. */
static void add_traffic(rank *r, int sign)
{
    ft_traffic rows[GROUPS];
    int n = ft_traffic_get(r->ctx, GROUPS, rows);
    for (int i = 0; i < n && i < GROUPS; i++) {
        sent *s = r->out->sent[r->me];
        int g = 0;
        while (g < GROUPS - 1 && s[g].group[0] && strcmp(s[g].group, rows[i].group)) g++;
        snprintf(s[g].group, sizeof s[g].group, "%s", rows[i].group);
        for (int k = 0; k < FT_COLLECTIVE_COUNT; k++) {
            s[g].calls[k] += sign * rows[i].calls[k];
            s[g].bytes += sign * rows[i].sent_bytes[k];
        }
    }
}

static ft_status keep_table(rank *r)
{
    const ft_llama_param *p = ft_llama_param_find(r->model, "model.embed_tokens.weight");
    ft_tensor *table = p->stage == r->mesh.coord[FT_AXIS_PP] ? p->pack : p->twin;
    int64_t n = p->slice.local_rows * p->slice.local_cols;
    if (!table) return FT_OK;
    float *values = (float *)calloc((size_t)n, sizeof *values);
    if (!values) return FT_ERR_OOM;
    r->out->table[r->me] = values;
    r->out->table_elems[r->me] = n;
    return ft_zero_export(r->zero, table, 0, n, values);
}

static ft_status run_step(rank *r)
{
    const layout *l = r->l;
    ft_zero_report report;
    ft_mem_stats mem;
    int64_t counted = 0;
    for (int m = 0; m < l->M; m++)
        for (int b = 0; b < rows_of(l); b++)
            for (int64_t i = 0; i < l->T; i++) counted += counts(sample_of(r, m, b), i);
    FT_TRY(ft_zero_step_begin(r->zero, l->M, counted, &r->scale));
    FT_TRY(ft_pp_run(r->pp, &r->program));
    FT_TRY(ft_zero_step_end(r->zero, 1e-3));
    FT_TRY(ft_zero_report_get(r->zero, &report));
    ft_mem_get(r->ctx, &mem);
    r->out->leaks[r->me] += memcmp(mem.live, r->out->created[r->me].live, sizeof mem.live) != 0;
    r->out->loss[r->me][r->step] = report.loss;
    r->out->norm[r->me][r->step] = report.grad_norm;
    return FT_OK;
}

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    void **job = (void **)user;
    rank r;
    uint64_t hash;
    memset(&r, 0, sizeof r);
    r.l = (const layout *)job[0];
    r.out = (outcome *)job[1];
    r.ctx = ctx;
    r.me = ft_rank(ctx);
    FT_TRY(create(&r));
    ft_mem_get(ctx, &r.out->created[r.me]);
    add_traffic(&r, -1);
    for (r.step = 0; r.step < r.l->steps; r.step++) FT_TRY(run_step(&r));
    FT_TRY(ft_sync(ctx));
    ft_mem_get(ctx, &r.out->mem[r.me]);
    add_traffic(&r, 1);
    ft_zero_use use = {r.l->M, is_tied(r.l), r.l->kind == FT_PP_GPIPE};
    FT_TRY(ft_zero_formula_get(r.zero, &use, &r.out->formula[r.me]));
    if (ft_ctx_device(ctx) == FT_META) return FT_OK;
    if (r.l->tables) FT_TRY(keep_table(&r));
    FT_TRY(ft_llama_hash(r.model, &hash));
    if (r.me == 0) r.out->hash = hash;
    return FT_OK;
}

static outcome *launch(const layout *l)
{
    outcome *out = (outcome *)calloc(1, sizeof *out);
    ft_config config = ft_config_default();
    void *job[2];
    if (!out) abort();
    job[0] = (void *)(uintptr_t)l;
    job[1] = out;
    config.world = world(l);
    config.device = l->device;
    config.async = l->async ? FT_ON : FT_DEFAULT;
    config.delay_us = l->delay_us;
    out->status = ft_launch(&config, rank_main, job);
    if (out->status != FT_OK) snprintf(out->error, sizeof out->error, "%s", ft_last_error());
    return out;
}

static outcome *run(const layout *l)
{
    outcome *out = launch(l);
    if (out->status != FT_OK) fail_msg("%s: %s", describe(l), out->error);
    return out;
}

static outcome *plan(const layout *l)
{
    layout meta = *l;
    meta.device = FT_META;
    return run(&meta);
}

static void drop(outcome *out)
{
    for (int r = 0; r < RANKS; r++) free(out->table[r]);
    free(out);
}

static uint64_t hash_of(const layout *l)
{
    outcome *out = run(l);
    uint64_t hash = out->hash;
    drop(out);
    return hash;
}

static const sent *sent_by(const outcome *out, int r, const char *group)
{
    static const sent nothing;
    for (int g = 0; g < GROUPS; g++)
        if (!strcmp(out->sent[r][g].group, group)) return &out->sent[r][g];
    return &nothing;
}

static int stage_of(const layout *l, int r) { return r / (l->dp * l->tp); }

/* The one-rank run of a model, made once. */
static const outcome *reference(variant model)
{
    static outcome *kept[VARIANTS];
    if (kept[model]) return kept[model];
    layout l = layout_default();
    l.model = model;
    l.steps = 5;
    return kept[model] = run(&l);
}

static void assert_near(const layout *l, const char *what, int step, double got, double want)
{
    if (!(fabs(got - want) <= 1e-5 * fabs(want)))
        fail_msg("%s: %s of step %d is %.9g, one rank has %.9g (%.2g off)", describe(l), what, step,
                 got, want, fabs(got / want - 1));
}

/* Loss and norm of every step are those of one rank, and bitwise the same on all ranks. */
static void assert_like(const layout *l, const outcome *out, const outcome *one)
{
    for (int s = 0; s < l->steps; s++) {
        assert_true(one->norm[0][s] > 0.5); /* clipped */
        assert_near(l, "loss", s, out->loss[0][s], one->loss[0][s]);
        assert_near(l, "norm", s, out->norm[0][s], one->norm[0][s]);
        for (int r = 1; r < world(l); r++)
            if (out->loss[r][s] != out->loss[0][s] || out->norm[r][s] != out->norm[0][s])
                fail_msg("%s: step %d: rank %d has loss %.9g, norm %.9g; rank 0 %.9g, %.9g",
                         describe(l), s, r, out->loss[r][s], out->norm[r][s], out->loss[0][s],
                         out->norm[0][s]);
    }
}

/* Case 17: what a step takes it gives back, tag by tag, on every rank. */
static void assert_baseline(const layout *l, const outcome *out)
{
    for (int r = 0; r < world(l); r++)
        if (out->leaks[r])
            fail_msg("%s: rank %d's live bytes changed in %d steps: %zu at first, %zu at last",
                     describe(l), r, out->leaks[r], out->created[r].live_bytes,
                     out->mem[r].live_bytes);
}

static void assert_planned(const layout *l, const outcome *real)
{
    outcome *meta = plan(l);
    for (int r = 0; r < world(l); r++) {
        const ft_mem_stats *a = &meta->mem[r], *b = &real->mem[r];
        for (int k = 0; k < FT_TAG_COUNT; k++)
            if (a->at_peak[k] != b->at_peak[k] || a->highest[k] != b->highest[k] ||
                a->live[k] != b->live[k])
                fail_msg("%s: rank %d, tag %s: planned %zu at the peak, %zu at most, %zu at the "
                         "end; the run has %zu, %zu, %zu", describe(l), r, ft_tag_name((ft_tag)k),
                         a->at_peak[k], a->highest[k], a->live[k], b->at_peak[k], b->highest[k],
                         b->live[k]);
        if (a->peak_bytes != b->peak_bytes)
            fail_msg("%s: rank %d: planned peak %zu, the run's is %zu", describe(l), r,
                     a->peak_bytes, b->peak_bytes);
        if (memcmp(meta->sent[r], real->sent[r], sizeof real->sent[r]))
            fail_msg("%s: rank %d sent other bytes than planned", describe(l), r);
    }
    drop(meta);
}

/* ------------------------------------------------------------------------------------ pairwise */

enum { FACTORS = 10, LEVELS = 4 };
static const int levels[FACTORS] = {3, 3, 3, 4, 3, 4, 2, VARIANTS, 4, 3};

static layout layout_of(const int *v)
{
    layout l = layout_default();
    l.dp = 1 << v[0];
    l.tp = 1 << v[1];
    l.pp = 1 << v[2];
    l.stage = v[3];
    l.sac = (ft_sac_kind)v[4];
    l.kind = (ft_pp_kind)v[5];
    l.sp = v[6];
    l.model = (variant)v[7];
    l.M = 1 << v[8];
    l.keep_gathered = v[9] == 1;
    l.lean = v[9] == 2;
    l.steps = 5;
    return l;
}

static int feasible(const int *v)
{
    layout l = layout_of(v);
    if (world(&l) > RANKS || l.dp * l.M > l.batch) return 0;
    if (l.sp && l.tp == 1) return 0;
    if (l.keep_gathered && l.stage != 3) return 0;
    return l.kind != FT_PP_INTERLEAVED || l.M % l.pp == 0;
}

static int next_tuple(int *v)
{
    for (int f = 0; f < FACTORS; f++) {
        if (++v[f] < levels[f]) return 1;
        v[f] = 0;
    }
    return 0;
}

typedef unsigned char pair_set[FACTORS * LEVELS][FACTORS * LEVELS];

/* How many pairs of v are in `set`; with `clear`, takes them out. */
static int pairs_in(pair_set set, const int *v, int clear)
{
    int n = 0;
    for (int a = 0; a < FACTORS; a++)
        for (int b = a + 1; b < FACTORS; b++) {
            unsigned char *cell = &set[a * LEVELS + v[a]][b * LEVELS + v[b]];
            n += *cell;
            if (clear) *cell = 0;
        }
    return n;
}

/* Greedy: the feasible tuple with the most pairs that are still missing, until none is. */
static int covering_array(layout *out, int max)
{
    static pair_set missing;
    int n = 0, left = 0, v[FACTORS] = {0};
    do {
        if (!feasible(v)) continue;
        for (int a = 0; a < FACTORS; a++)
            for (int b = a + 1; b < FACTORS; b++)
                missing[a * LEVELS + v[a]][b * LEVELS + v[b]] = 1;
    } while (next_tuple(v));
    for (int a = 0; a < FACTORS * LEVELS; a++)
        for (int b = 0; b < FACTORS * LEVELS; b++) left += missing[a][b];
    while (left > 0) {
        int best[FACTORS] = {0}, most = 0;
        memset(v, 0, sizeof v);
        do {
            if (!feasible(v)) continue;
            int found = pairs_in(missing, v, 0);
            if (found <= most) continue;
            most = found;
            memcpy(best, v, sizeof best);
        } while (next_tuple(v));
        assert_true(most > 0 && n < max);
        left -= pairs_in(missing, best, 1);
        out[n++] = layout_of(best);
    }
    return n;
}

/* Any layout trains as one rank does, within its plan, leaking nothing. */
static void test_pairwise(void **state)
{
    layout all[100];
    int n = covering_array(all, 100);
    (void)state;
    for (int i = 0; i < n; i++) {
        outcome *out = run(&all[i]);
        assert_like(&all[i], out, reference(all[i].model));
        assert_baseline(&all[i], out);
        assert_planned(&all[i], out);
        if (all[i].sac != FT_SAC_NONE) { /* recomputation changes no bit */
            layout kept = all[i];
            kept.sac = FT_SAC_NONE;
            if (hash_of(&kept) != out->hash)
                fail_msg("%s: recompute changed bits", describe(&all[i]));
        }
        drop(out);
    }
    print_message("           %d layouts\n", n);
}

/* With one micro-batch the stages of ZeRO give the same bits, with any options. */
static void test_stages_agree(void **state)
{
    static const int meshes[][4] = {{2, 2, 2, 1}, {4, 1, 2, 0}, {2, 1, 4, 0}, {4, 2, 1, 0},
                                    {2, 4, 1, 1}};
    (void)state;
    for (int i = 0; i < 5; i++)
        for (int kind = 0; kind < FT_PP_KIND_COUNT; kind += 3) {
            layout l = layout_default();
            l.dp = meshes[i][0], l.tp = meshes[i][1], l.pp = meshes[i][2], l.sp = meshes[i][3];
            l.kind = (ft_pp_kind)kind;
            l.model = (variant)(i % VARIANTS);
            l.steps = 3;
            uint64_t hash = hash_of(&l);
            for (l.stage = 1; l.stage < 4; l.stage++) {
                l.lean = (i + l.stage) % 2;
                l.keep_gathered = l.stage == 3 && i % 2;
                if (hash_of(&l) != hash) fail_msg("%s: other bits than stage 0", describe(&l));
            }
        }
}

typedef void (*layout_fn)(const layout *l);

/* Every mesh of at most 8 ranks, with and without sequence parallelism, tied and untied. */
static void each_mesh(layout_fn fn)
{
    for (int i = 0; i < 27; i++)
        for (int model = 0; model < 4; model++) {
            layout l = layout_default();
            l.dp = 1 << i % 3, l.tp = 1 << i / 3 % 3, l.pp = 1 << i / 9;
            l.model = (variant)(model % 2 ? TIED_QK_NORM : UNTIED_BIAS);
            l.sp = model / 2;
            l.stage = (i + model) % 4;
            l.M = l.dp == 4 ? 2 : 4;
            l.kind = l.M % l.pp ? FT_PP_1F1B : (ft_pp_kind)((i + model) % FT_PP_KIND_COUNT);
            if (world(&l) <= RANKS && (!l.sp || l.tp > 1)) fn(&l);
        }
}

static void check_initial(const layout *given)
{
    static uint64_t want[VARIANTS];
    layout l = *given, one = layout_default();
    l.steps = 0;
    one.steps = 0;
    one.model = l.model;
    if (!want[l.model]) want[l.model] = hash_of(&one);
    if (hash_of(&l) != want[l.model]) fail_msg("%s: other initial weights", describe(&l));
}

static void check_norm(const layout *l)
{
    outcome *out = run(l);
    assert_like(l, out, reference(l->model));
    drop(out);
}

static void test_initial_weights(void **state)
{
    (void)state;
    each_mesh(check_initial);
}

static void test_norm_in_every_layout(void **state)
{
    (void)state;
    each_mesh(check_norm);
}

/* ------------------------------------------------------------------------------------ pipeline */

/* The two stages' tables, bit by bit, on every (dp, tp). */
static void assert_tables_equal(const layout *l, const outcome *out)
{
    int apart = (l->pp - 1) * l->dp * l->tp;
    for (int r = 0; r < l->dp * l->tp; r++) {
        const float *first = out->table[r], *last = out->table[r + apart];
        assert_non_null(first);
        assert_non_null(last);
        assert_ptr_not_equal(first, last);
        assert_true(first[0] != 0);
        if (memcmp(first, last, (size_t)out->table_elems[r] * sizeof *first))
            fail_msg("%s: the tied copies of ranks %d and %d differ", describe(l), r, r + apart);
    }
}

static void test_tied_copies(void **state)
{
    (void)state;
    for (int i = 0; i < 12; i++) {
        layout l = layout_default();
        l.pp = i % 2 ? 4 : 2;
        l.dp = l.pp == 2 || i % 4 == 1 ? 2 : 1;
        l.tp = world(&l) < 8 ? 2 : 1;
        l.stage = i / 3;
        l.kind = (ft_pp_kind)(i % FT_PP_KIND_COUNT);
        l.model = TIED;
        l.M = 4;
        l.steps = 10;
        l.tables = 1;
        outcome *out = run(&l);
        assert_tables_equal(&l, out);
        drop(out);
    }
}

/* Fewer micro-batches than stages: some ranks wait most of the time. */
static void test_ranks_without_work(void **state)
{
    static const int rows[] = {0, 8, 8, 6};
    (void)state;
    for (int kind = 0; kind < FT_PP_KIND_COUNT; kind++)
        for (int M = 1; M <= 3; M++) {
            layout l = layout_default(), one;
            if (kind == FT_PP_INTERLEAVED) continue; /* M must be divisible by P: refused */
            l.batch = rows[M];
            l.M = M;
            l.steps = 2;
            one = l;
            one.M = 1;
            l.pp = 4;
            l.kind = (ft_pp_kind)kind;
            l.stage = M; /* 1, 2, 3 */
            outcome *out = run(&l), *want = run(&one);
            assert_like(&l, out, want);
            drop(out);
            drop(want);
        }
}

/* [P9] Gradients are added in the same order in every schedule: the same bits; but in ZeRO-2 and 3
   zb-h1 adds some of them a micro-batch earlier, which is equal to rounding. */
static void test_schedules_agree(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        layout l = layout_default();
        l.pp = i % 2 ? 4 : 2;
        l.dp = 2;
        l.tp = l.pp == 2 ? 2 : 1;
        l.sp = l.tp == 2 && i % 4 == 0;
        l.stage = i / 2;
        l.M = 4;
        l.model = (variant)(i % VARIANTS);
        l.steps = 3;
        outcome *want = run(&l);
        for (int k = 0; k < 3; k++) {
            l.kind = k < 2 ? FT_PP_ZB_H1 : FT_PP_GPIPE;
            l.sac = k == 1 ? FT_SAC_FULL : FT_SAC_NONE;
            outcome *out = run(&l);
            assert_like(&l, out, want);
            if (out->hash != want->hash && (l.stage < 2 || l.kind == FT_PP_GPIPE))
                fail_msg("%s: other bits than 1f1b", describe(&l));
            drop(out);
        }
        drop(want);
    }
}

/* ------------------------------------------------------------------------------------- traffic */

/* Embedding; layers; final norm and head, and the second copy of a tied table. */
static int units_on(const layout *l, int p)
{
    int n = l->layers / l->pp;
    if (p == 0) n++;
    if (p == l->pp - 1) n += 1 + (l->pp > 1 && is_tied(l));
    return n;
}

/* Case 15: in stages 0 and 1 one reduction a unit and step, in 2 and 3 one a micro-batch. */
static void test_reductions(void **state)
{
    (void)state;
    for (int i = 0; i < 16; i++) {
        layout l = layout_default();
        l.dp = 2;
        l.pp = i % 3 == 0 ? 4 : i % 3;
        l.kind = (ft_pp_kind)(i / 4);
        l.stage = i % 4;
        l.M = 4;
        l.steps = 2;
        l.model = (variant)(i % 2);
        outcome *out = plan(&l);
        for (int r = 0; r < world(&l); r++) {
            int64_t calls = sent_by(out, r, "zero reduce")->calls[FT_REDUCE_SCATTER];
            int64_t want = units_on(&l, stage_of(&l, r)) * l.steps * (l.stage < 2 ? 1 : l.M);
            if (calls != want)
                fail_msg("%s: rank %d made %lld reduce-scatters, %lld wanted", describe(&l), r,
                         (long long)calls, (long long)want);
        }
        drop(out);
    }
}

static void assert_sent(const layout *l, const outcome *out, int r, const char *group, int64_t want)
{
    int64_t got = sent_by(out, r, group)->bytes;
    if (got != want * l->steps)
        fail_msg("%s: rank %d sent %lld bytes in group %s, the formula says %lld", describe(l), r,
                 (long long)got, group, (long long)(want * l->steps));
}

/* femtotron_tp.h, COSTS: in units of S q for a layer, fp32. */
static int64_t tp_bytes(const layout *l, int p)
{
    int64_t N = rows_of(l) * l->T, S = N * HIDDEN * 4, t = l->tp, layers = l->layers / l->pp;
    int64_t layer = l->sp ? 10 : 8, sq = 0, scalars = 0;
    int split = l->kind == FT_PP_ZB_H1 && p > 0; /* [P5.2] rank 0 runs whole backwards */
    if (t == 1) return 0;
    if (l->sp && split) layer += 2;              /* both halves gather dy of a row layer */
    if (l->sac == FT_SAC_FULL) layer += l->sp ? 3 : 2; /* replays: a row layer; columns */
    sq = layers * layer;
    if (p == 0) sq += l->sp ? 1 + 1 : 2;         /* embedding; SP: scatter, and gather of dy */
    if (p == l->pp - 1) {
        sq += 2;
        scalars = 12 * N * (t - 1);
    }
    return l->M * (sq * S * (t - 1) / t + scalars);
}

/* femtotron_pp.h, COST. */
static int64_t pp_bytes(const layout *l, int p)
{
    int64_t S = rows_of(l) * l->T * HIDDEN * 4 / (l->sp ? l->tp : 1), V = chunks(l);
    if (l->pp == 1) return 0;
    return l->M * S * ((p == l->pp - 1 ? V - 1 : V) + (p == 0 ? V - 1 : V));
}

/* Norm weights of which tp ranks have parts, at each reduction. */
static int64_t zero_tp_bytes(const layout *l, int p)
{
    int64_t vectors = 2 * (l->layers / l->pp) + (p == l->pp - 1), heads = 0;
    if (l->model == TIED_QK_NORM) heads = 2 * (l->layers / l->pp); /* of own heads: parts */
    int64_t elems = (l->sp ? vectors * HIDDEN : 0) + heads * (HIDDEN / HEADS);
    return elems * 4 * 2 * (l->tp - 1) / l->tp * (l->stage < 2 || l->dp == 1 ? 1 : l->M);
}

/* A tied table's gradient, added over its two stages once a step: in ZeRO-0 whole, else a shard. */
static int64_t tied_bytes(const layout *l, int p)
{
    int64_t rows = (VOCAB + l->tp - 1) / l->tp, shard = (rows * HIDDEN + l->dp - 1) / l->dp;
    shard = (shard + 7) / 8 * 8;
    if (!is_tied(l) || l->pp == 1 || (p > 0 && p < l->pp - 1)) return 0;
    return shard * 4 * (l->stage == 0 ? l->dp : 1);
}

static void check_traffic(const layout *l)
{
    outcome *out = plan(l);
    for (int r = 0; r < world(l); r++) {
        int p = stage_of(l, r);
        assert_sent(l, out, r, "tp", tp_bytes(l, p));
        assert_sent(l, out, r, "pp", pp_bytes(l, p));
        assert_sent(l, out, r, "tied embedding", tied_bytes(l, p));
        assert_sent(l, out, r, "zero tp", zero_tp_bytes(l, p));
        assert_sent(l, out, r, "zero reduce", out->formula[r].reduce_sent);
        assert_sent(l, out, r, "zero scalars", 12 * (world(l) - 1));
        assert_sent(l, out, r, "zero gather", out->formula[r].gather_sent);
    }
    drop(out);
}

static void test_traffic(void **state)
{
    static const int meshes[][4] = {{2, 2, 2, 0}, {2, 2, 2, 1}, {1, 4, 2, 1}, {1, 2, 4, 1},
                                    {4, 1, 2, 0}, {1, 2, 4, 0}, {4, 2, 1, 1}};
    (void)state;
    for (int i = 0; i < 7 * FT_PP_KIND_COUNT; i++)
        for (int sac = 0; sac < 3; sac++) {
            layout l = layout_default();
            l.dp = meshes[i % 7][0], l.tp = meshes[i % 7][1];
            l.pp = meshes[i % 7][2], l.sp = meshes[i % 7][3];
            l.kind = (ft_pp_kind)(i / 7);
            l.stage = (i + sac) % 4;
            l.M = l.dp == 4 ? 2 : 4;
            l.model = (variant)((i + sac) % VARIANTS);
            l.sac = (ft_sac_kind)sac;
            l.steps = 1 + i % 2;
            check_traffic(&l);
        }
}

/* Bytes a unit's weights put on the wire of a gather: 0 embedding, 1 layer, 2 final. */
static int64_t unit_wire(const layout *l, int unit)
{
    int64_t C = HIDDEN, elems = unit == 1 ? 4 * C * C + 3 * C * FEED + 2 * C
                              : unit == 0 ? VOCAB * C : VOCAB * C + C;
    int64_t shard = (elems + l->dp - 1) / l->dp;
    shard = (shard + 7) / 8 * 8; /* shards are equal, in steps of 8 elements */
    return shard * (l->dp - 1) * 4;
}

/* By the manual: a layer is gathered for forward and for backward, the embedding for forward, the
   head's units once for both, which under gpipe is once for all micro-batches; and with
   keep_gathered everything once. Untied, without the formula's help. */
static int64_t gathers_by_hand(const layout *l, int p)
{
    int first = p == 0, last = p == l->pp - 1;
    int64_t layers = l->layers / l->pp * unit_wire(l, 1);
    int64_t head = last ? unit_wire(l, 2) : 0, table = first ? unit_wire(l, 0) : 0;
    if (l->keep_gathered) return layers + head + table;
    return l->M * (2 * layers + table) + (l->kind == FT_PP_GPIPE ? 1 : l->M) * head;
}

/* Every schedule, stage and pipeline, tied and not, kept and not, with and without prefetch and
   replays: the formula is what was sent, and what is gathered at most. */
static void test_gathers(void **state)
{
    int n = 0;
    (void)state;
    for (int i = 0; i < FT_PP_KIND_COUNT * 4 * 3 * 2 * 2 * 2 * 2 * 2; i++) {
        layout l = layout_default();
        int k = i;
        l.kind = (ft_pp_kind)(k % FT_PP_KIND_COUNT), k /= FT_PP_KIND_COUNT;
        l.stage = k % 4, k /= 4;
        l.pp = 1 << k % 3, k /= 3;
        l.keep_gathered = k % 2, k /= 2;
        l.model = k % 2 ? TIED : UNTIED, k /= 2;
        l.M = k % 2 ? 4 : 1, k /= 2;
        l.lean = k % 2, k /= 2;
        l.sac = k % 2 ? FT_SAC_FULL : FT_SAC_NONE;
        l.dp = 2;
        if (l.kind == FT_PP_INTERLEAVED && l.M % l.pp) continue;
        if (l.keep_gathered && l.stage < 3) continue;
        outcome *out = plan(&l);
        for (int r = 0; r < world(&l); r++) {
            const ft_zero_formula *f = &out->formula[r];
            int64_t want = f->gather_sent;
            assert_sent(&l, out, r, "zero gather", want);
            if (l.stage == 3 && !is_tied(&l))
                assert_sent(&l, out, r, "zero gather", gathers_by_hand(&l, stage_of(&l, r)));
            if (out->mem[r].highest[FT_TAG_GATHER] != f->gather_max)
                fail_msg("%s: rank %d gathers %zu bytes at most, the formula says %zu",
                         describe(&l), r, out->mem[r].highest[FT_TAG_GATHER], f->gather_max);
        }
        drop(out);
        n++;
    }
    print_message("           %d layouts\n", n);
}

/* -------------------------------------------------------------------------------------- memory */

static size_t rounded(int64_t elems) { return ft_accounted_bytes((size_t)elems * 4); }

/* What a micro-batch keeps for backward on a stage, fp32, without recomputation: of each layer
   x, y, r, y2; qkv, o, log-sum-exp; gate/up, product. femtotron_llama.h, A LAYER'S FORWARD. */
static size_t kept_bytes(const layout *l)
{
    int64_t N = rows_of(l) * l->T, C = HIDDEN;
    size_t layer = 4 * rounded(N * C) + rounded(N * 3 * C) + rounded(N * C) + rounded(N * HEADS) +
                   rounded(N * 2 * FEED) + rounded(N * FEED);
    return (size_t)(l->layers / l->pp) * layer;
}

/* Under 1f1b stage p has min(P - p, M) micro-batches alive, whatever M is. */
static void test_in_flight(void **state)
{
    const int P = 4;
    size_t one[4] = {0};
    (void)state;
    for (int M = 1; M <= 4 * P; M++) {
        layout l = layout_default();
        l.pp = P;
        l.M = M;
        l.batch = 4 * M; /* B stays */
        l.steps = 2;
        outcome *out = plan(&l);
        for (int p = 0; p < P - 1; p++) {
            size_t alive = (size_t)(P - p < M ? P - p : M), kept = kept_bytes(&l);
            size_t boundary = rounded(rows_of(&l) * l.T * HIDDEN);
            /* Where the last of them has run its forward: what they keep, and its output. */
            if (out->after_forward[p] != alive * kept + boundary)
                fail_msg("stage %d, M %d: %zu act bytes after forward; %zu micro-batches are %zu, "
                         "the output %zu", p, M, out->after_forward[p], alive, alive * kept,
                         boundary);
            /* Beside them only what one backward makes on its way: the same for every M. */
            size_t most = out->mem[p].highest[FT_TAG_ACT];
            if (M == 1) one[p] = most - kept;
            if (most != alive * kept + one[p])
                fail_msg("stage %d, M %d: %zu act bytes at most, %zu wanted", p, M, most,
                         alive * kept + one[p]);
        }
        if (M == 1) one[P - 1] = out->mem[P - 1].highest[FT_TAG_ACT]; /* one alive, always */
        assert_int_equal(out->mem[P - 1].highest[FT_TAG_ACT], one[P - 1]);
        drop(out);
    }
}

/* ZeRO-3 takes no more than ZeRO-2 where the parameters it does not keep are at least what it has
   gathered at once; elsewhere at most the difference more. */
static void check_zero3(const layout *given)
{
    layout l = *given;
    l.stage = 2;
    outcome *two = plan(&l);
    l.stage = 3;
    outcome *three = plan(&l);
    for (int r = 0; r < world(&l); r++) {
        size_t saved = two->formula[r].param - three->formula[r].param;
        size_t gathered = three->mem[r].highest[FT_TAG_GATHER];
        size_t excess = gathered > saved ? gathered - saved : 0;
        if (three->mem[r].peak_bytes > two->mem[r].peak_bytes + excess)
            fail_msg("%s: rank %d: ZeRO-3's peak is %zu (%s), ZeRO-2's %zu; it saves %zu and "
                     "gathers %zu", describe(&l), r, three->mem[r].peak_bytes,
                     three->mem[r].peak_where, two->mem[r].peak_bytes, saved, gathered);
    }
    drop(two);
    drop(three);
}

/* Halves of backwards that wait keep no unit's whole gradient but the head's, which does not split:
   beside the formula only the norms' wait apart. */
static void test_halves_keep_no_units(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        layout l = layout_default();
        l.dp = 2;
        l.pp = 4;
        l.M = 4;
        l.layers = 16;
        l.stage = 2 + i % 2;
        l.lean = i / 2 % 2;
        l.kind = FT_PP_ZB_H1;
        l.model = i / 4 ? UNTIED_BIAS : UNTIED;
        outcome *out = plan(&l);
        for (int r = 0; r < world(&l); r++) {
            int p = stage_of(&l, r);
            size_t norms = (size_t)(2 * l.layers / l.pp + 1) * rounded(HIDDEN);
            size_t head = p == l.pp - 1 ? rounded(unit_wire(&l, 2) / (l.dp - 1) / 4 * l.dp) : 0;
            size_t bound = out->formula[r].grad_max + (p ? norms + head : 0);
            if (out->mem[r].highest[FT_TAG_GRAD] > bound)
                fail_msg("%s: rank %d has %zu bytes of gradients, %zu wanted", describe(&l), r,
                         out->mem[r].highest[FT_TAG_GRAD], bound);
        }
        drop(out);
    }
}

static void test_zero3_does_not_lose(void **state)
{
    (void)state;
    for (int i = 0; i < 48; i++) {
        layout l = layout_default();
        l.dp = i % 2 ? 4 : 2;
        l.pp = l.dp == 4 ? 2 : 1 << i / 2 % 3;
        l.kind = (ft_pp_kind)(i / 12);
        l.sac = (ft_sac_kind)(i / 4 % 3);
        l.layers = 16;
        l.M = 4;
        l.batch = l.dp * l.M;
        l.lean = i / 6 % 2;
        check_zero3(&l);
    }
}

/* -------------------------------------------------------------------------------------- stress */

static void test_ranks_under_stress(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        layout l = layout_default();
        l.dp = l.tp = l.pp = 2;
        l.sp = 1;
        l.stage = 3 - k;
        l.M = 4;
        l.layers = 4;
        l.model = k ? TIED : UNTIED;
        l.sac = k ? FT_SAC_FULL : FT_SAC_SELECTIVE;
        l.kind = k ? FT_PP_INTERLEAVED : FT_PP_ZB_H1;
        l.steps = 25;
        uint64_t hash = hash_of(&l);
        l.async = 1;
        l.delay_us = 30;
        if (hash_of(&l) != hash) fail_msg("%s: delays changed bits", describe(&l));
    }
}

/* Exchanges that run beside compute: the same bits, whatever is late, and as planned. */
static void test_exchanges_beside_compute(void **state)
{
    (void)state;
    for (int k = 0; k < 8; k++) {
        layout l = layout_default();
        l.kind = (ft_pp_kind)(k % FT_PP_KIND_COUNT);
        l.pp = k < 4 ? 2 : 4;
        l.dp = k < 4 ? 2 : 1;
        l.stage = 3 - k % 4;
        l.M = 4;
        l.model = k % 2 ? TIED : UNTIED;
        l.steps = 3;
        uint64_t hash = hash_of(&l);
        l.overlap = 1;
        outcome *out = run(&l);
        assert_planned(&l, out);
        if (out->hash != hash) fail_msg("%s: exchanges beside compute changed bits", describe(&l));
        drop(out);
        l.async = 1;
        l.delay_us = 1000;
        if (hash_of(&l) != hash) fail_msg("%s: delays changed bits", describe(&l));
    }
}

/* ------------------------------------------------------------------------------------ refusals */

static void assert_says(ft_status got, ft_status want, const char *a, const char *b, const char *c)
{
    const char *text = ft_last_error();
    if (got != want || !strstr(text, a) || !strstr(text, b) || !strstr(text, c))
        fail_msg("%s: \"%s\" (wanted: %s, with \"%s\", \"%s\", \"%s\")", ft_status_name(got), text,
                 ft_status_name(want), a, b, c);
}

static void test_refusals(void **state)
{
    int64_t first[17];
    ft_pp_config pipeline = ft_pp_config_default();
    (void)state;
    assert_says(ft_tp_check(4, 0, 6, 4, 64, 1, 8),
                FT_ERR_UNSUPPORTED, "heads 6", "4 or 8", "3 or 6");
    assert_says(ft_tp_check(4, 0, 8, 2, 64, 1, 8),
                FT_ERR_UNSUPPORTED, "kv_heads 2", "4", "nearest tp: 2");
    assert_says(ft_tp_check(4, 0, 8, 4, 66, 1, 8),
                FT_ERR_UNSUPPORTED, "intermediate 66", "64 or 68", "");
    assert_says(ft_tp_check(4, 1, 8, 4, 64, 1, 10),
                FT_ERR_UNSUPPORTED, "T 10", "8 or 12", "tp 4");
    assert_int_equal(ft_tp_check(4, 0, 8, 4, 64, 1, 10), FT_OK);
    assert_says(ft_pp_layers_uniform(4, 8, first), FT_ERR_ARG, "4", "8", "layers");
    assert_says(ft_pp_layers_parse("2,2,5", 8, 3, first), FT_ERR_ARG, "8", "9", "");
    pipeline.kind = FT_PP_INTERLEAVED;
    pipeline.ranks = 4;
    pipeline.chunks = 2;
    pipeline.micro_batches = 6;
    assert_says(ft_pp_check(&pipeline), FT_ERR_ARG, "6", "4", "8");
}

/* A launch that cannot be fails at its creation, before anything has been sent. */
static void assert_refused(const layout *l, ft_status want, const char *a, const char *b)
{
    outcome *out = launch(l);
    if (out->status != want || !strstr(out->error, a) || !strstr(out->error, b))
        fail_msg("%s: %s: \"%s\" (wanted %s, with \"%s\", \"%s\")", describe(l),
                 ft_status_name(out->status), out->error, ft_status_name(want), a, b);
    for (int r = 0; r < RANKS; r++) assert_int_equal(out->created[r].live_bytes, 0);
    drop(out);
}

static ft_status wrong_world(ft_ctx *ctx, void *user)
{
    ft_mesh mesh;
    (void)user;
    return ft_mesh_create(ctx, 2, 2, 2, &mesh);
}

static void test_refused_launches(void **state)
{
    ft_config config = ft_config_default();
    (void)state;
    config.world = 6;
    assert_says(ft_launch(&config, wrong_world, NULL),
                FT_ERR_ARG, "dp 2 x tp 2 x pp 2", "world of 6", "");
    layout l = layout_default();
    l.tp = 8; /* 4 heads */
    assert_refused(&l, FT_ERR_UNSUPPORTED, "heads 4", "tp 8");
    l = layout_default();
    l.tp = 4;
    l.sp = 1;
    l.T = 7;
    l.batch = 1;
    assert_refused(&l, FT_ERR_UNSUPPORTED, "T 7", "4 or 8");
    l = layout_default();
    l.pp = 4;
    l.layers = 3;
    assert_refused(&l, FT_ERR_ARG, "3", "4");
    l = layout_default();
    l.pp = 4;
    l.kind = FT_PP_INTERLEAVED;
    l.M = 2;
    assert_refused(&l, FT_ERR_ARG, "2", "4");
}

/* One rank, or one stage, creates another layout. */
typedef struct odd {
    layout l[2];
    int first, last; /* ranks that have l[1] */
    int shifted;     /* and cut their layers differently */
    ft_status status[RANKS];
    char text[RANKS][1024];
} odd;

static ft_status create_odd(ft_ctx *ctx, void *user)
{
    odd *o = (odd *)user;
    outcome out;
    rank r;
    memset(&r, 0, sizeof r);
    memset(&out, 0, sizeof out);
    r.ctx = ctx;
    r.me = ft_rank(ctx);
    int other = r.me >= o->first && r.me <= o->last;
    r.l = &o->l[other];
    r.out = &out;
    r.shift = o->shifted && other;
    o->status[r.me] = create(&r);
    if (o->status[r.me]) snprintf(o->text[r.me], sizeof o->text[r.me], "%s", ft_last_error());
    return o->status[r.me];
}

static void assert_odd(const odd *given, const char *a, const char *b)
{
    odd o = *given;
    ft_config config = ft_config_default();
    char odds[32];
    config.world = world(&o.l[0]);
    config.timeout_s = 20;
    (void)ft_launch(&config, create_odd, &o);
    if (o.first == o.last) snprintf(odds, sizeof odds, "; rank %d: ", o.first);
    else snprintf(odds, sizeof odds, "; ranks %d, ", o.first);
    for (int r = 0; r < config.world; r++)
        if (o.status[r] != FT_ERR_COMM || !strstr(o.text[r], a) || !strstr(o.text[r], b) ||
            !strstr(o.text[r], odds) || !strstr(o.text[r], "; ranks 0, 1, "))
            fail_msg("rank %d of %s: %s: \"%s\" (wanted \"%s\", \"%s\", \"%s\")", r,
                     describe(&o.l[0]), ft_status_name(o.status[r]), o.text[r], a, b, odds);
}

/* What the whole world must share is compared over the world, and every rank learns who differs. */
static void test_ranks_that_disagree(void **state)
{
    odd o, same;
    (void)state;
    memset(&same, 0, sizeof same);
    same.l[0] = layout_default();
    same.l[0].dp = same.l[0].tp = same.l[0].pp = 2;
    same.l[0].M = 2;
    same.l[1] = same.l[0];
    same.first = same.last = 5;
    o = same;
    o.l[1].kind = FT_PP_GPIPE;
    assert_odd(&o, "1f1b", "gpipe");
    o = same;
    o.l[1].M = 4;
    assert_odd(&o, "2 micro-batches", "4 micro-batches");
    o = same;
    o.l[1].model = UNTIED_BIAS;
    assert_odd(&o, "biases 0 0 0", "biases 1 0 0");
    o = same;
    o.l[1].stage = 1;
    assert_odd(&o, "stage 0", "stage 1");
    o = same;
    o.l[1].kind = FT_PP_INTERLEAVED;
    assert_odd(&o, "1 chunks", "2 chunks");
    o = same;
    o.shifted = 1;
    assert_odd(&o, "layers from 0 4", "layers from 0 5");
    o = same;
    o.first = 4; /* all of stage 1, so that each tp group agrees */
    o.last = 7;
    o.l[1].sp = 1;
    assert_odd(&o, "sequence parallelism 0", "sequence parallelism 1");
}

static ft_status create_undivided(ft_ctx *ctx, void *user)
{
    ft_llama_config config = ft_llama_config_default();
    ft_zero_config zero_config = ft_zero_config_default();
    ft_llama_layout part;
    ft_zero *zero;
    ft_llama *model;
    (void)user;
    config.heads = 8;
    config.kv_heads = 2;
    memset(&part, 0, sizeof part);
    FT_TRY(ft_mesh_create(ctx, 1, 4, 1, &part.mesh));
    FT_TRY(ft_tp_create(ctx, &part.mesh, 0, &part.tp));
    FT_TRY(ft_zero_create(ctx, &zero_config, &part.mesh, &zero));
    return ft_llama_create_part(ctx, zero, &config, &part, 8, 1, &model);
}

/* Also without the check: the model itself refuses kv heads that tp does not divide. */
static void test_model_refuses(void **state)
{
    ft_config config = ft_config_default();
    (void)state;
    config.world = 4;
    assert_says(ft_launch(&config, create_undivided, NULL),
                FT_ERR_UNSUPPORTED, "kv_heads 2", "tp 4", "");
}

/* Under ThreadSanitizer all of this takes ten minutes, and these reach every kind of wait; all the
   same '*' as argument runs them all. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(UNDER_TSAN)
static const char *const unless_asked = "test_ranks_*";
#else
static const char *const unless_asked = "*";
#endif

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_refused_launches),
        cmocka_unit_test(test_model_refuses),
        cmocka_unit_test(test_ranks_that_disagree),
        cmocka_unit_test(test_pairwise),
        cmocka_unit_test(test_stages_agree),
        cmocka_unit_test(test_initial_weights),
        cmocka_unit_test(test_norm_in_every_layout),
        cmocka_unit_test(test_tied_copies),
        cmocka_unit_test(test_ranks_without_work),
        cmocka_unit_test(test_schedules_agree),
        cmocka_unit_test(test_reductions),
        cmocka_unit_test(test_traffic),
        cmocka_unit_test(test_gathers),
        cmocka_unit_test(test_in_flight),
        cmocka_unit_test(test_halves_keep_no_units),
        cmocka_unit_test(test_zero3_does_not_lose),
        cmocka_unit_test(test_ranks_under_stress),
        cmocka_unit_test(test_exchanges_beside_compute),
    };
    cmocka_set_test_filter(argc > 1 ? argv[1] : unless_asked);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
