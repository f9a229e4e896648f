/* test_state.c: what each rank holds of a weight, for files.

   Properties: over the world every element of every parameter is stored once, whatever the mesh,
   the ZeRO stage, copies, ties and padding; what a rank reads of its own are the values that the
   collective export gives; a state that is written on another mesh continues as the run that it
   came from; what a rank does not own is refused.

   License: MIT, see LICENSE. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include <stdio.h> /* before femtotron.h: _POSIX_C_SOURCE is set above */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "mesh_harness.h"

enum { ARRAYS = 3, MAX_PARAMS = 100 };

/* All of a model's state, in canonical order, as the ranks of a run store it together. */
typedef struct whole {
    int64_t elems, at[MAX_PARAMS + 1]; /* of each parameter */
    float *array[ARRAYS];
    int *stored, *owned;               /* how often each element is */
    int64_t updates, skipped;
} whole;

typedef struct job {
    const mh_layout *l;
    whole *w;
    pthread_mutex_t lock;
    int restore;       /* 1: begin with what is in w */
    int64_t step, steps; /* first step, and how many */
    int keep;          /* 1: put what the ranks store in w at the end */
    double loss[16];
    uint64_t hash;
} job;

static void whole_make(whole *w)
{
    int64_t most = 2 * MH_VOCAB * MH_HIDDEN + MH_LAYERS * (8 * MH_HIDDEN * MH_HIDDEN +
                   3 * MH_HIDDEN * MH_FEED + 1024) + 1024;
    memset(w, 0, sizeof *w);
    for (int k = 0; k < ARRAYS; k++) w->array[k] = (float *)calloc((size_t)most, sizeof(float));
    w->stored = (int *)calloc((size_t)most, sizeof(int));
    w->owned = (int *)calloc((size_t)most, sizeof(int));
    assert_true(w->array[0] && w->array[1] && w->array[2] && w->stored && w->owned);
    w->elems = most;
}

static void whole_drop(whole *w)
{
    for (int k = 0; k < ARRAYS; k++) free(w->array[k]);
    free(w->stored);
    free(w->owned);
}

static ft_status whole_places(const ft_llama *model, whole *w)
{
    int n = ft_llama_param_count(model);
    CHECK(n <= MAX_PARAMS);
    for (int i = 0; i < n; i++) {
        const ft_llama_param *p = ft_llama_param_at(model, i);
        w->at[i + 1] = w->at[i] + p->shape[0] * p->shape[1];
    }
    CHECK(w->at[n] <= w->elems);
    return FT_OK;
}

/* Element i of a piece, in the whole parameter; -1 past its runs. */
static int64_t piece_elem(const ft_llama_piece *piece, int64_t i)
{
    for (int k = 0; k < piece->n_runs; k++) {
        const ft_llama_run *run = &piece->run[k];
        if (i < run->n * run->count) return run->first + i / run->n * run->stride + i % run->n;
        i -= run->n * run->count;
    }
    return -1;
}

/* The piece's runs ascend, are as many elements as it has, and lie where tp's slice has them. */
static ft_status check_piece(const ft_llama_param *p, const ft_llama_piece *piece)
{
    int64_t before = -1, pack_first = piece->tensor == p->pack ? p->first_elem : 0;
    CHECK(piece->n_runs <= FT_LLAMA_MAX_RUNS);
    CHECK((piece->elems > 0) == (piece->n_runs > 0));
    for (int64_t i = 0; i < piece->elems; i++) {
        int64_t e = piece_elem(piece, i);
        CHECK(e > before && e < p->shape[0] * p->shape[1]);
        CHECK(e == ft_tp_global_elem(&p->slice, piece->first - pack_first + i));
        before = e;
    }
    CHECK(piece_elem(piece, piece->elems) == -1);
    return FT_OK;
}

static ft_status mark(const ft_llama_param *p, const ft_llama_piece *piece, int *times)
{
    FT_TRY(check_piece(p, piece));
    for (int64_t i = 0; i < piece->elems; i++) times[piece_elem(piece, i)]++;
    return FT_OK;
}

/* Counts what this rank owns and stores, and puts what it stores into the whole. */
static ft_status keep_param(mh_rank *r, job *j, int i)
{
    const ft_llama_param *p = ft_llama_param_at(r->model, i);
    ft_llama_piece owned, stored;
    float *values;
    FT_TRY(ft_llama_owned(r->model, p, &owned));
    FT_TRY(ft_llama_stored(r->model, p, &stored));
    FT_TRY(mark(p, &owned, j->w->owned + j->w->at[i]));
    FT_TRY(mark(p, &stored, j->w->stored + j->w->at[i]));
    if (!stored.elems) return FT_OK;
    CHECK(values = (float *)ft_host_alloc(r->ctx, (size_t)stored.elems * sizeof *values));
    for (int k = 0; k <= ft_zero_state_count(r->zero); k++) {
        FT_TRY(ft_zero_state_read(r->zero, stored.tensor, k, stored.first, stored.elems, values));
        for (int64_t e = 0; e < stored.elems; e++)
            j->w->array[k][j->w->at[i] + piece_elem(&stored, e)] = values[e];
    }
    ft_host_free(r->ctx, values);
    return FT_OK;
}

static ft_status keep_all(mh_rank *r, job *j)
{
    ft_status status = FT_OK;
    int64_t updates = 0, skipped = 0;
    FT_TRY(ft_zero_progress_get(r->zero, &updates, &skipped));
    pthread_mutex_lock(&j->lock);
    status = whole_places(r->model, j->w);
    for (int i = 0; i < ft_llama_param_count(r->model) && status == FT_OK; i++)
        status = keep_param(r, j, i);
    j->w->updates = updates;
    j->w->skipped = skipped;
    pthread_mutex_unlock(&j->lock);
    return status;
}

/* Every rank writes all that it owns, piece by piece in odd sizes. */
static ft_status restore_all(mh_rank *r, const whole *w)
{
    for (int i = 0; i < ft_llama_param_count(r->model); i++) {
        const ft_llama_param *p = ft_llama_param_at(r->model, i);
        ft_llama_piece owned;
        float values[613];
        FT_TRY(ft_llama_owned(r->model, p, &owned));
        for (int k = 0; k <= ft_zero_state_count(r->zero); k++)
            for (int64_t at = 0; at < owned.elems; at += 613) {
                int64_t n = owned.elems - at < 613 ? owned.elems - at : 613;
                for (int64_t e = 0; e < n; e++)
                    values[e] = w->array[k][w->at[i] + piece_elem(&owned, at + e)];
                FT_TRY(ft_zero_state_write(r->zero, owned.tensor, k, owned.first + at, n, values));
            }
    }
    FT_TRY(ft_zero_progress_set(r->zero, w->updates, w->skipped));
    return ft_zero_state_commit(r->zero);
}

/* The masters are what the collective export gives. */
static ft_status compare_export(mh_rank *r, const whole *w)
{
    for (int i = 0; i < ft_llama_param_count(r->model); i++) {
        const ft_llama_param *p = ft_llama_param_at(r->model, i);
        int64_t n = p->shape[0] * p->shape[1];
        float *values = (float *)ft_host_alloc(r->ctx, (size_t)n * sizeof *values);
        CHECK(values);
        FT_TRY(ft_llama_export(r->model, p, values));
        if (memcmp(values, w->array[0] + w->at[i], (size_t)n * sizeof *values) != 0)
            return ft_error(FT_ERR_DATA, "%s: %s is not as exported", mh_text(r->l), p->name);
        ft_host_free(r->ctx, values);
    }
    return FT_OK;
}

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    job *j = (job *)user;
    mh_rank r;
    FT_TRY(mh_create(ctx, j->l, &r));
    if (j->restore) {
        pthread_mutex_lock(&j->lock);
        ft_status status = whole_places(r.model, j->w);
        pthread_mutex_unlock(&j->lock);
        FT_TRY(status);
        FT_TRY(restore_all(&r, j->w));
    }
    for (int64_t s = 0; s < j->steps; s++) {
        ft_zero_report report;
        FT_TRY(mh_step(&r, j->step + s, &report));
        if (ft_rank(ctx) == 0) j->loss[s] = report.loss;
    }
    ft_group *all;
    uint64_t hash;
    FT_TRY(ft_group_strided(ctx, "test", 0, 1, ft_world(ctx), &all));
    if (j->keep) FT_TRY(keep_all(&r, j));
    FT_TRY(ft_barrier(all, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(ft_sync(ctx)); /* all have stored */
    FT_TRY(ft_llama_hash(r.model, &hash));
    if (ft_rank(ctx) == 0) j->hash = hash;
    return j->keep ? compare_export(&r, j->w) : FT_OK;
}

static void run(const mh_layout *l, job *j)
{
    ft_config config = ft_config_default();
    config.world = mh_world(l);
    j->l = l;
    pthread_mutex_init(&j->lock, NULL);
    if (ft_launch(&config, rank_main, j) != FT_OK) fail_msg("%s: %s", mh_text(l), ft_last_error());
    pthread_mutex_destroy(&j->lock);
}

static job make_job(whole *w, int restore, int64_t step, int64_t steps, int keep)
{
    job j;
    memset(&j, 0, sizeof j);
    j.w = w;
    j.restore = restore;
    j.step = step;
    j.steps = steps;
    j.keep = keep;
    return j;
}

/* ---------------------------------------------------------------------------------- coverage */

/* How many ranks own an element of parameter i: a closed form. */
static int owners(const mh_layout *l, const char *name)
{
    int D = l->shard_ranks ? l->shard_ranks : l->dp;
    int copies = l->stage == 0 ? l->dp : l->dp / D;
    int norm = strstr(name, "norm") || strstr(name, "o_proj.bias") ||
               strstr(name, "down_proj.bias");
    int stages = l->tied && l->pp > 1 && strstr(name, "embed_tokens") ? 2 : 1;
    return copies * (norm ? l->tp : 1) * stages;
}

static ft_status names_rank(ft_ctx *ctx, void *user)
{
    mh_rank r;
    char(*names)[80] = (char(*)[80])user;
    mh_layout l = mh_default();
    l.tied = names[0][0] == 't';
    l.biased = names[0][1] == 'b';
    FT_TRY(mh_create(ctx, &l, &r));
    for (int i = 0; i < ft_llama_param_count(r.model); i++)
        memcpy(names[i], ft_llama_param_at(r.model, i)->name, 80);
    return FT_OK;
}

static void cover(const mh_layout *l)
{
    static char names[MAX_PARAMS][80];
    ft_config config = ft_config_default();
    whole w;
    whole_make(&w);
    job j = make_job(&w, 0, 0, 1, 1);
    memset(names, 0, sizeof names);
    names[0][0] = l->tied ? 't' : 'u';
    names[0][1] = l->biased ? 'b' : 'n';
    assert_int_equal(ft_launch(&config, names_rank, names), FT_OK);
    run(l, &j);
    for (int i = 0; i < MAX_PARAMS && names[i][0]; i++)
        for (int64_t e = w.at[i]; e < w.at[i + 1]; e++) {
            if (w.stored[e] != 1)
                fail_msg("%s: element %lld of %s is stored %d times", mh_text(l),
                         (long long)(e - w.at[i]), names[i], w.stored[e]);
            if (w.owned[e] != owners(l, names[i]))
                fail_msg("%s: element %lld of %s has %d owners, not %d", mh_text(l),
                         (long long)(e - w.at[i]), names[i], w.owned[e], owners(l, names[i]));
        }
    whole_drop(&w);
}

static void every_element_is_stored_once_on_dp_and_copies(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int share = 0; share < 3; share++) { /* 4 shards; 2 copies of 2; 4 of 1 */
            mh_layout l = mh_make(4, 1, 1, stage);
            l.shard_ranks = share == 0 ? 0 : share == 1 ? 2 : 1;
            l.tied = stage % 2;
            l.dtype = share == 1 ? FT_BF16 : FT_F32;
            cover(&l);
        }
}

static void every_element_is_stored_once_on_meshes(void **state)
{
    (void)state;
    static const int mesh[][4] = { /* dp, tp, pp, stage */
        {1, 1, 1, 0}, {1, 4, 1, 0}, {1, 2, 1, 2}, {1, 1, 4, 1}, {2, 2, 2, 3}, {2, 2, 2, 0},
        {3, 2, 1, 2}, {3, 1, 2, 3}, {2, 1, 2, 1}, {2, 4, 1, 3}};
    for (size_t i = 0; i < sizeof mesh / sizeof mesh[0]; i++)
        for (int k = 0; k < 2; k++) {
            mh_layout l = mh_make(mesh[i][0], mesh[i][1], mesh[i][2], mesh[i][3]);
            l.tied = k;
            l.biased = k ^ (int)(i & 1);
            l.sp = l.tp > 1 && l.samples / l.dp * MH_T % l.tp == 0 && i % 2;
            cover(&l);
        }
    mh_layout l = mh_make(2, 1, 2, 3); /* two chunks a stage, copies, a table on two stages */
    l.chunks = 2;
    l.M = 2;
    l.tied = 1;
    cover(&l);
    l.shard_ranks = 1;
    l.pp = 1;
    cover(&l);
}

/* ------------------------------------------------------------------------------- continuation */

/* Another seed gives other weights: all that is equal later was restored. */
static void continues(const mh_layout *from, const mh_layout *to, double tolerance)
{
    whole w;
    mh_layout other = *to;
    whole_make(&w);
    job begin = make_job(&w, 0, 0, 2, 1), end = make_job(&w, 0, 0, 4, 0);
    run(from, &begin);
    run(from, &end);
    other.seed = 7;
    job after = make_job(&w, 1, 2, 2, 0);
    run(&other, &after);
    for (int s = 0; s < 2; s++)
        if (!(fabs(after.loss[s] - end.loss[2 + s]) <= tolerance))
            fail_msg("step %d after %s: loss %.9g, uninterrupted %.9g", 2 + s, mh_text(&other),
                     after.loss[s], end.loss[2 + s]);
    if (tolerance == 0 && after.hash != end.hash)
        fail_msg("%s: hash %016llx, uninterrupted %016llx", mh_text(&other),
                 (unsigned long long)after.hash, (unsigned long long)end.hash);
    whole_drop(&w);
}

static void the_same_mesh_continues_with_the_same_bits(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int k = 0; k < 3; k++) {
            mh_layout l = mh_make(k == 1 ? 3 : 2, k == 2 ? 2 : 1, k == 2 ? 2 : 1, stage);
            l.dtype = k == 0 ? FT_BF16 : FT_F32;
            l.tied = k == 2;
            l.sgd = stage == 1 ? 1 : stage == 2 && k == 1 ? 2 : 0;
            l.M = k == 1 ? 2 : 1;
            continues(&l, &l, 0);
        }
}

static void another_mesh_continues_alike(void **state)
{
    (void)state;
    mh_layout a = mh_make(2, 2, 2, 3), b = mh_make(3, 2, 1, 2), c = mh_make(1, 1, 4, 0);
    mh_layout d = mh_make(8, 1, 1, 1);
    d.shard_ranks = 4;
    a.tied = b.tied = c.tied = d.tied = 1;
    continues(&a, &b, 1e-6);
    continues(&b, &c, 1e-6);
    continues(&c, &d, 1e-6);
    continues(&d, &a, 1e-6);
}

/* ------------------------------------------------------------------------------ frozen and bf16 */

static ft_status ramp(void *user, const char *name, int64_t first, int64_t n, float *values)
{
    (void)user;
    for (int64_t i = 0; i < n; i++)
        values[i] = (float)(name[0] == 'f' ? -1 : 1) * (float)(first + i);
    return FT_OK;
}

/* Frozen weights have the dtype and no optimizer arrays; each element has one owner a copy, who
   writes it, and the commit brings it to all. */
static ft_status frozen_rank(ft_ctx *ctx, void *user)
{
    ft_zero_config config = ft_zero_config_default();
    ft_mesh mesh;
    ft_zero *z;
    ft_tensor *free_one, *frozen;
    int64_t n = 301, first, elems, updates, skipped;
    int unit, index, count;
    float values[301], want;
    config.stage = *(int *)user;
    config.dtype = FT_BF16;
    FT_TRY(ft_mesh_create(ctx, ft_world(ctx), 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &config, &mesh, &z));
    FT_TRY(ft_zero_unit(z, "unit", &unit));
    FT_TRY(ft_zero_param(z, "trained", 1, &n, 0, &free_one));
    FT_TRY(ft_zero_param(z, "frozen", 1, &n, FT_ZERO_FROZEN, &frozen));
    REFUSED(ft_zero_owned(z, frozen, &first, &elems), FT_ERR_ARG, "not committed");
    REFUSED(ft_zero_progress_get(z, &updates, &skipped), FT_ERR_STATE, "before ft_zero_commit");
    REFUSED(ft_zero_state_commit(z), FT_ERR_STATE, "before ft_zero_commit");
    FT_TRY(ft_zero_commit(z, ramp, NULL));
    ft_zero_replica(z, &index, &count);
    CHECK(count == (config.stage ? 1 : ft_world(ctx)) && index < count);
    for (int k = 0; k < 2; k++) {
        ft_tensor *t = k ? frozen : free_one;
        FT_TRY(ft_zero_owned(z, t, &first, &elems));
        CHECK(config.stage ? elems <= 104 : elems == n);
        if (!elems) continue;
        FT_TRY(ft_zero_state_read(z, t, 0, first, elems, values));
        for (int64_t i = 0; i < elems; i++) {
            want = (float)(k ? -1 : 1) * (float)(first + i);
            CHECK(values[i] == (k ? ft_f32_from_bf16(ft_bf16_from_f32(want)) : want));
        }
        for (int64_t i = 0; i < elems; i++) values[i] = (float)(first + i) + 0.125f;
        FT_TRY(ft_zero_state_write(z, t, 0, first, elems, values));
        if (k) REFUSED(ft_zero_state_read(z, t, 1, first, 1, values), FT_ERR_ARG, "frozen");
        else FT_TRY(ft_zero_state_read(z, t, 2, first, elems, values));
    }
    FT_TRY(ft_zero_state_commit(z));
    for (int k = 0; k < 2; k++) { /* the weights themselves, gathered */
        uint16_t bits[301];
        FT_TRY(ft_zero_gather(z, unit));
        FT_TRY(ft_download(k ? frozen : free_one, bits));
        for (int i = 0; i < 301; i++)
            CHECK(bits[i] == ft_bf16_from_f32((float)i + 0.125f));
        if (k && config.stage == 3)
            REFUSED(ft_zero_state_commit(z), FT_ERR_STATE, "is gathered");
        FT_TRY(ft_zero_release(z, unit));
    }
    return FT_OK;
}

static void frozen_weights_and_masters_of_bf16(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        ft_config config = ft_config_default();
        config.world = 3;
        if (ft_launch(&config, frozen_rank, &stage) != FT_OK)
            fail_msg("stage %d: %s", stage, ft_last_error());
    }
}

/* ------------------------------------------------------------------------------------ refusals */

static ft_status refusing_rank(ft_ctx *ctx, void *user)
{
    mh_layout l = mh_make(2, 1, 1, 2);
    mh_rank r;
    ft_llama_piece piece;
    ft_llama_param foreign;
    ft_tensor *stranger;
    float value = 0;
    int64_t first, n;
    (void)user;
    FT_TRY(mh_create(ctx, &l, &r));
    const ft_llama_param *p = ft_llama_param_at(r.model, 0);
    FT_TRY(ft_llama_owned(r.model, p, &piece));
    CHECK(piece.elems > 0 && piece.elems < MH_VOCAB * MH_HIDDEN);
    int64_t outside = ft_rank(ctx) == 0 ? piece.elems : 0;
    REFUSED(ft_zero_state_read(r.zero, piece.tensor, 0, outside, 1, &value), FT_ERR_ARG, "owns");
    REFUSED(ft_zero_state_write(r.zero, piece.tensor, 1, outside, 1, &value), FT_ERR_ARG, "owns");
    REFUSED(ft_zero_state_read(r.zero, piece.tensor, 0, piece.first, piece.elems + 1, &value),
            FT_ERR_ARG, "owns");
    REFUSED(ft_zero_state_read(r.zero, piece.tensor, 0, piece.first, 0, &value), FT_ERR_ARG,
            "owns");
    REFUSED(ft_zero_state_read(r.zero, piece.tensor, 0, piece.first, INT64_MAX, &value),
            FT_ERR_ARG, "owns");
    REFUSED(ft_zero_state_read(r.zero, piece.tensor, 3, piece.first, 1, &value), FT_ERR_ARG,
            "arrays 0 to 2 (adamw), not 3");
    REFUSED(ft_zero_state_read(r.zero, piece.tensor, -1, piece.first, 1, &value), FT_ERR_ARG,
            "not -1");
    n = 3;
    FT_TRY(ft_tensor_empty(ctx, &stranger, FT_F32, 1, &n));
    REFUSED(ft_zero_owned(r.zero, stranger, &first, &n), FT_ERR_ARG, "is not a parameter");
    REFUSED(ft_llama_owned(r.model, NULL, &piece), FT_ERR_ARG, "param is NULL");
    foreign = *p;
    foreign.first_elem = 1;
    REFUSED(ft_llama_stored(r.model, &foreign, &piece), FT_ERR_ARG, "not an entry");
    REFUSED(ft_zero_progress_set(r.zero, -1, 0), FT_ERR_ARG, "-1 updates");
    REFUSED(ft_zero_progress_set(r.zero, 0, (int64_t)INT32_MAX + 1), FT_ERR_ARG, "2147483648");
    FT_TRY(ft_zero_progress_set(r.zero, 5, 1));
    FT_TRY(ft_zero_progress_get(r.zero, &first, &n));
    CHECK(first == 5 && n == 1);
    FT_TRY(ft_zero_progress_set(r.zero, 5, ft_rank(ctx)));
    return ft_zero_state_commit(r.zero);
}

static ft_status in_step_rank(ft_ctx *ctx, void *user)
{
    mh_layout l = mh_make(1, 1, 1, 0);
    mh_rank r;
    ft_llama_piece piece;
    float value = 0;
    (void)user;
    FT_TRY(mh_create(ctx, &l, &r));
    FT_TRY(ft_llama_owned(r.model, ft_llama_param_at(r.model, 0), &piece));
    FT_TRY(ft_zero_step_begin(r.zero, 1, 1, &r.scale));
    REFUSED(ft_zero_state_read(r.zero, piece.tensor, 0, 0, 1, &value), FT_ERR_STATE,
            "between steps");
    REFUSED(ft_zero_state_write(r.zero, piece.tensor, 0, 0, 1, &value), FT_ERR_STATE,
            "between steps");
    REFUSED(ft_zero_progress_set(r.zero, 1, 0), FT_ERR_STATE, "within a step");
    REFUSED(ft_zero_state_commit(r.zero), FT_ERR_STATE, "within a step");
    return FT_OK;
}

static void what_is_not_owned_is_refused(void **state)
{
    ft_config config = ft_config_default();
    (void)state;
    if (ft_launch(&config, in_step_rank, NULL) != FT_OK) fail_msg("%s", ft_last_error());
    config.world = 2;
    assert_int_equal(ft_launch(&config, refusing_rank, NULL), FT_ERR_COMM);
    if (!strstr(ft_last_error(), "rank 1: ft_agree \"ZeRO: progress of 5 updates, 1 skipped"))
        fail_msg("%s", ft_last_error());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_element_is_stored_once_on_dp_and_copies),
        cmocka_unit_test(every_element_is_stored_once_on_meshes),
        cmocka_unit_test(the_same_mesh_continues_with_the_same_bits),
        cmocka_unit_test(another_mesh_continues_alike),
        cmocka_unit_test(frozen_weights_and_masters_of_bf16),
        cmocka_unit_test(what_is_not_owned_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
