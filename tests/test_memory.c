/* Memory: the plan is the run, to the byte; what is live follows from closed formulas.

   cc -std=c11 -I. tests/test_memory.c -lcmocka -lm -lpthread

   A small Llama trains on cpu and on meta under many layouts. Both must make the same allocations
   in the same order; parameters, optimizer state, gradients, gathered weights and communication
   buffers must take what the manual's layout says (computed here from the model's sizes); so must
   activations between forward and backward. The timeline shows what never exists: T x T scores,
   whole logits, a second copy of gradients, more gathered units than run or come next. */

#ifndef FT_TEST_LINKED /* make compiles the implementation once for many tests */
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_llama.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "train_harness.h"
#include "check.h"

/* ThreadSanitizer looks for races, which do not differ between layouts as bytes do, and slows runs
   down twenty times: it sees every seventh layout. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(UNDER_TSAN)
enum { EVERY = 7 };
#else
enum { EVERY = 1 };
#endif

static size_t up256(int64_t bytes) { return (size_t)(bytes + 255) / 256 * 256; }

/* ---------------------------------------------------------------------------- one training run */

typedef struct run { /* the options of a run, and what its ranks noted */
    th_options o;
    ft_sac sac[8];
    size_t boundary[TH_RANKS];  /* act between forward and backward; the same each time */
    uint64_t events[TH_RANKS];  /* a hash over the whole timeline */
    int64_t n_events[TH_RANKS];
    ft_status (*more)(th_rank *r, struct run *run); /* further checks at the end, or NULL */
} run;

static const char *run_text(const run *r)
{
    static char text[256];
    const ft_zero_config *z = &r->o.zero;
    snprintf(text, sizeof text, "%s stage %d dp %d %s policy %d mask %llx tied %d micro-batches %d "
             "prefetch %d overlap %d accumulate %d reduce %d shard %d",
             r->o.launch.device == FT_META ? "meta" : "cpu", z->stage, r->o.dp,
             ft_dtype_name(z->dtype), (int)r->sac[0].kind, (unsigned long long)r->sac[0].mask,
             r->o.model.tie_embeddings, r->o.micro_batches, z->prefetch, (int)z->reduce_overlap,
             (int)z->accumulate_dtype, (int)z->reduce_dtype, z->shard_ranks);
    return text;
}

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * UINT64_C(1099511628211);
    return hash;
}

static uint64_t hash_timeline(const ft_mem_event *e, int64_t n)
{
    uint64_t hash = UINT64_C(1469598103934665603);
    for (int64_t i = 0; i < n; i++) {
        hash = hash_bytes(hash, &e[i].delta_bytes, sizeof e[i].delta_bytes);
        hash = hash_bytes(hash, &e[i].live_bytes, sizeof e[i].live_bytes);
        hash = hash_bytes(hash, &e[i].request_bytes, sizeof e[i].request_bytes);
        hash = hash_bytes(hash, &e[i].tag, sizeof e[i].tag);
        hash = hash_bytes(hash, &e[i].segment, sizeof e[i].segment);
        hash = hash_bytes(hash, e[i].op, strlen(e[i].op));
        hash = hash_bytes(hash, e[i].phase, strlen(e[i].phase));
    }
    return hash;
}

/* The timeline tells the same story as the counters. */
static ft_status check_timeline(const ft_mem_event *e, int64_t n, const ft_mem_stats *now)
{
    int64_t live = 0, by_tag[FT_TAG_COUNT];
    memset(by_tag, 0, sizeof by_tag);
    CHECK(n > 0);
    for (int64_t i = 0; i < n; i++) {
        int64_t size = e[i].delta_bytes < 0 ? -e[i].delta_bytes : e[i].delta_bytes;
        CHECK((size_t)size == up256((int64_t)e[i].request_bytes) && size > 0);
        live += e[i].delta_bytes;
        by_tag[e[i].tag] += e[i].delta_bytes;
        CHECK(by_tag[e[i].tag] >= 0 && (int64_t)e[i].live_bytes == live);
    }
    for (int t = 0; t < FT_TAG_COUNT; t++) CHECK(by_tag[t] == (int64_t)now->live[t]);
    return FT_OK;
}

static ft_status note(th_rank *r, th_moment moment, void *user)
{
    run *u = (run *)user;
    ft_mem_stats s;
    const ft_mem_event *events;
    ft_mem_get(r->ctx, &s);
    if (moment == TH_CREATED) ft_mem_reset_peak(r->ctx);
    if (moment == TH_FORWARD_DONE) {
        int first = r->step == 0 && r->micro_batch == 0;
        if (first) u->boundary[r->rank] = s.live[FT_TAG_ACT];
        CHECK(u->boundary[r->rank] == s.live[FT_TAG_ACT]);
    }
    if (moment == TH_STEP_DONE) { /* live bytes are back where they were, tag by tag */
        const ft_mem_stats *before = &r->job->result->created[r->rank];
        for (int t = 0; t < FT_TAG_COUNT; t++)
            if (s.live[t] != before->live[t])
                return ft_error(FT_ERR_DATA, "step %d: %zu bytes of %s before, %zu after", r->step,
                                before->live[t], ft_tag_name((ft_tag)t), s.live[t]);
    }
    if (moment == TH_END) {
        int64_t n = ft_mem_timeline(r->ctx, &events);
        FT_TRY(check_timeline(events, n, &s));
        u->n_events[r->rank] = n;
        u->events[r->rank] = hash_timeline(events, n);
        if (u->more) FT_TRY(u->more(r, u));
    }
    return FT_OK;
}

/* Small, so that hundreds of runs are quick; sizes that are no multiples of 256 bytes. */
static run run_default(void)
{
    run r;
    memset(&r, 0, sizeof r);
    r.o = th_options_default();
    r.o.model.hidden = 24;
    r.o.model.layers = 3;
    r.o.model.heads = 3;
    r.o.model.kv_heads = 1;
    r.o.model.head_dim = 8;
    r.o.model.intermediate = 40;
    r.o.model.loss_chunk_tokens = 10;
    r.o.T = 10;
    r.o.steps = 2;
    r.o.report_every = 0;
    r.o.no_hash = 1;
    r.o.launch.timeline = 1;
    r.o.hook = note;
    return r;
}

static th_result *run_on(run *r, ft_device device)
{
    r->o.launch.device = device;
    r->o.sac = r->sac;
    r->o.user = r;
    th_result *result = th_run(&r->o);
    if (result->status != FT_OK) fail_msg("%s: %s", run_text(r), result->error);
    return result;
}

static void all_layers(run *r, ft_sac_kind kind, uint64_t mask)
{
    for (int i = 0; i < 8; i++) {
        r->sac[i].kind = kind;
        r->sac[i].mask = mask;
    }
}

/* ---------------------------------------------------------------- formulas, from the sizes */

#define MAX_UNITS 12

typedef struct layout { /* flat units, cut in D shards of a multiple of 8 elements */
    int n;
    int64_t shard[MAX_UNITS], padded[MAX_UNITS]; /* elements */
} layout;

static void layout_add(layout *l, int64_t elems, int D)
{
    int64_t shard = (elems + D - 1) / D;
    l->shard[l->n] = (shard + 7) / 8 * 8;
    l->padded[l->n] = l->shard[l->n] * D;
    l->n++;
}

static layout layout_of(const th_options *o)
{
    const ft_llama_config *c = &o->model;
    layout l;
    int64_t C = c->hidden, F = c->intermediate, D = c->head_dim ? c->head_dim : C / c->heads;
    int64_t HD = c->heads * D, QKV = HD + 2 * c->kv_heads * D;
    int64_t layer = QKV * C + C * HD + 3 * F * C + 2 * C + (c->qkv_bias ? QKV : 0) +
                    (c->o_bias ? C : 0) + (c->mlp_bias ? 2 * F + C : 0) + (c->qk_norm ? 2 * D : 0);
    memset(&l, 0, sizeof l);
    layout_add(&l, c->vocab * C, o->dp);
    for (int64_t i = 0; i < c->layers; i++) layout_add(&l, layer, o->dp);
    layout_add(&l, C + (c->tie_embeddings ? 0 : c->vocab * C), o->dp);
    return l;
}

/* Gradients of stages 2 and 3, buffer by buffer: what is there while each unit's backward runs. */
static size_t most_gradients(const layout *l, const th_options *o, int64_t e)
{
    size_t most = 0;
    int overlap = o->zero.reduce_overlap != FT_OFF, last = l->n - 1, waiting = -1;
    int shard[MAX_UNITS], full[MAX_UNITS];
    memset(shard, 0, sizeof shard);
    memset(full, 0, sizeof full);
    for (int m = 0; m < o->micro_batches; m++)
        for (int u = last; u >= 0; u--) {
            if (o->model.tie_embeddings && u == last && waiting == 0) {
                full[0] = 0; /* the head begins with the embedding's gradient: the old one goes */
                waiting = -1;
            }
            if (o->model.tie_embeddings && u == last) full[0] = 1;
            full[u] = 1;
            shard[u] = 1; /* made when the reduction is queued, before anything is freed */
            size_t now = 0;
            for (int i = 0; i < l->n; i++)
                now += (size_t)shard[i] * up256(l->shard[i] * e) +
                       (size_t)full[i] * up256(l->padded[i] * e);
            if (now > most) most = now;
            if (waiting >= 0) full[waiting] = 0;
            waiting = overlap ? u : -1;
            if (!overlap) full[u] = 0;
        }
    return most;
}

/* Gathered units of stage 3: a window of 1 + prefetch in forward; a tied head has the embedding and
   the last unit, and backward's first units are on their way. */
static size_t most_gathered(const layout *l, const th_options *o, int64_t e)
{
    size_t most = 0, head = up256(l->padded[0] * e);
    for (int u = 0; u < l->n; u++) {
        size_t now = 0;
        for (int i = u; i < l->n && i <= u + o->zero.prefetch; i++) now += up256(l->padded[i] * e);
        if (now > most) most = now;
    }
    for (int i = 0; i <= o->zero.prefetch && l->n - 1 - i > 0; i++)
        head += up256(l->padded[l->n - 1 - i] * e);
    return o->model.tie_embeddings && head > most ? head : most;
}

static void check_formulas(const run *r, const th_result *result)
{
    const th_options *o = &r->o;
    layout l = layout_of(o);
    int64_t e = o->zero.dtype == FT_BF16 ? 2 : 4;
    int stage = o->zero.stage, many = o->dp > 1;
    size_t param = 0, optim = 0, grad = 0, gather = 0, comm = 0;
    for (int u = 0; u < l.n; u++) {
        param += up256((stage == 3 ? l.shard[u] : l.padded[u]) * e);
        optim += up256((stage == 0 ? l.padded[u] : l.shard[u]) * 4) * (e == 2 ? 3 : 2);
        grad += up256(l.padded[u] * e);
        if (many && stage >= 2 && o->micro_batches > 1 && up256(l.shard[u] * e) > comm)
            comm = up256(l.shard[u] * e);
    }
    if (many && stage >= 2) grad = most_gradients(&l, o, e);
    if (many && stage == 3) gather = most_gathered(&l, o, e);
    for (int rank = 0; rank < o->dp; rank++) {
        const ft_mem_stats *s = &result->mem[rank];
        const ft_zero_formula *f = &result->formula[rank];
        size_t have[5], want[5], stated[5];
        static const char *const names[5] = { "param", "optim", "grad", "gather", "comm" };
        have[0] = s->highest[FT_TAG_PARAM];
        have[1] = s->highest[FT_TAG_OPTIM];
        have[2] = s->highest[FT_TAG_GRAD];
        have[3] = s->highest[FT_TAG_GATHER];
        have[4] = s->highest[FT_TAG_COMM];
        want[0] = param; want[1] = optim; want[2] = grad; want[3] = gather; want[4] = comm;
        stated[0] = f->param; stated[1] = f->optim; stated[2] = f->grad_max;
        stated[3] = f->gather_max; stated[4] = f->comm_max;
        for (int i = 0; i < 5; i++)
            if (have[i] != want[i] || have[i] != stated[i])
                fail_msg("%s: rank %d: %zu bytes of %s, by the layout %zu, by ft_zero_formula_get "
                         "%zu", run_text(r), rank, have[i], names[i], want[i], stated[i]);
        assert_int_equal(s->live[FT_TAG_PARAM], param);
        assert_int_equal(s->live[FT_TAG_OPTIM], optim);
    }
}

/* Activations between forward and backward. Outputs of a layer in their order, as bits of a mask:
   y qkv rope o lse a r y2 gu p d x'. */
enum { B_Y = 1, B_QKV = 2, B_ROPE = 4, B_O = 8, B_LSE = 16, B_A = 32, B_R = 64, B_Y2 = 128,
       B_GU = 256, B_P = 512, B_D = 1024, B_NEXT = 2048 };

static uint64_t mask_of(ft_sac sac)
{
    switch (sac.kind) {
    case FT_SAC_SELECTIVE: return B_Y | B_Y2 | B_P;
    case FT_SAC_FULL: return ~(uint64_t)0;
    case FT_SAC_MASK: return sac.mask;
    default: return 0;
    }
}

static size_t layer_activations(const ft_llama_config *c, ft_sac sac, int64_t tokens, int64_t e)
{
    int64_t D = c->head_dim ? c->head_dim : c->hidden / c->heads;
    int64_t QKV = (c->heads + 2 * c->kv_heads) * D;
    uint64_t drop = mask_of(sac);
    size_t C = up256(tokens * c->hidden * e), bytes = C; /* x: the segment's input */
    if (!(drop & B_Y)) bytes += C;
    if (c->qk_norm) { /* bits: y qkv head_norm rope ...; only used with named policies */
        if (sac.kind != FT_SAC_FULL) bytes += up256(tokens * QKV * e);
        if (sac.kind == FT_SAC_NONE) bytes += up256(tokens * QKV * e);
    } else if (!(drop & B_QKV)) bytes += up256(tokens * QKV * e); /* rope is written over it */
    if (!(drop & B_O)) bytes += up256(tokens * c->heads * D * e);
    if (!(drop & B_LSE)) bytes += up256(tokens * c->heads * 4);
    if (!(drop & B_R)) bytes += C;
    if ((drop & B_R) && !(drop & B_A)) bytes += C; /* r = x + a is rebuilt from a */
    if (!(drop & B_Y2)) bytes += C;
    if (!(drop & B_GU)) bytes += up256(tokens * 2 * c->intermediate * e);
    if (!(drop & B_P)) bytes += up256(tokens * c->intermediate * e);
    return bytes;
}

static void check_boundary(const run *r)
{
    const th_options *o = &r->o;
    int64_t e = o->zero.dtype == FT_BF16 ? 2 : 4;
    int64_t tokens = o->samples / (o->dp * o->micro_batches) * o->T;
    size_t bytes = 2 * up256(tokens * o->model.hidden * e); /* the last x', and its norm */
    for (int64_t i = 0; i < o->model.layers; i++)
        bytes += layer_activations(&o->model, r->sac[i], tokens, e);
    for (int rank = 0; rank < o->dp; rank++)
        if (r->boundary[rank] != bytes)
            fail_msg("%s: rank %d keeps %zu bytes of act, by the formula %zu", run_text(r), rank,
                     r->boundary[rank], bytes);
}

/* -------------------------------------------------------------------------------- plan and run */

static void check_same(const run *cpu, const th_result *a, const run *meta, const th_result *b)
{
    for (int rank = 0; rank < cpu->o.dp; rank++) {
        const ft_mem_stats *x = &a->mem[rank], *y = &b->mem[rank];
        int same = x->peak_bytes == y->peak_bytes && x->live_bytes == y->live_bytes &&
                   x->peak_moment == y->peak_moment && !strcmp(x->peak_where, y->peak_where) &&
                   !memcmp(x->at_peak, y->at_peak, sizeof x->at_peak) &&
                   !memcmp(x->highest, y->highest, sizeof x->highest) &&
                   !memcmp(x->live, y->live, sizeof x->live);
        if (!same || cpu->n_events[rank] != meta->n_events[rank] ||
            cpu->events[rank] != meta->events[rank] || cpu->boundary[rank] != meta->boundary[rank])
            fail_msg("%s: rank %d: peak %zu (%s), planned %zu (%s); %lld allocations and frees, "
                     "planned %lld", run_text(cpu), rank, x->peak_bytes, x->peak_where,
                     y->peak_bytes, y->peak_where, (long long)cpu->n_events[rank],
                     (long long)meta->n_events[rank]);
        size_t sum = 0;
        for (int t = 0; t < FT_TAG_COUNT; t++) sum += x->at_peak[t];
        assert_int_equal(sum, x->peak_bytes);
        assert_true(x->peak_where[0] != 0);
        assert_int_equal(a->gather_sent[rank], b->gather_sent[rank]);
        assert_int_equal(a->reduce_sent[rank], b->reduce_sent[rank]);
        assert_int_equal(a->scalars_sent[rank], b->scalars_sent[rank]);
    }
}

static void check_run(const run *options)
{
    static int layouts;
    if (layouts++ % EVERY) return;
    run *cpu = (run *)malloc(sizeof *cpu), *meta = (run *)malloc(sizeof *meta);
    assert_true(cpu && meta);
    *cpu = *meta = *options;
    th_result *a = run_on(cpu, FT_CPU), *b = run_on(meta, FT_META);
    check_same(cpu, a, meta, b);
    check_boundary(cpu);
    int same_dtypes = cpu->o.zero.accumulate_dtype == FT_ZERO_SAME &&
                      cpu->o.zero.reduce_dtype == FT_ZERO_SAME && !cpu->o.zero.shard_ranks;
    if (same_dtypes) check_formulas(cpu, a);
    for (int rank = 0; rank < cpu->o.dp && !same_dtypes; rank++) {
        assert_int_equal(a->mem[rank].highest[FT_TAG_PARAM], a->formula[rank].param);
        assert_int_equal(a->mem[rank].highest[FT_TAG_OPTIM], a->formula[rank].optim);
        assert_int_equal(a->mem[rank].highest[FT_TAG_GRAD], a->formula[rank].grad_max);
        assert_int_equal(a->mem[rank].highest[FT_TAG_GATHER], a->formula[rank].gather_max);
        assert_int_equal(a->mem[rank].highest[FT_TAG_COMM], a->formula[rank].comm_max);
    }
    th_free(a);
    th_free(b);
    free(cpu);
    free(meta);
}

static const int worlds[5] = { 1, 2, 3, 4, 8 };

/* Policy 0..4; 3 and 4 are masks that differ between layers. */
static void policy(run *r, int which, uint64_t salt)
{
    all_layers(r, which < 3 ? (ft_sac_kind)which : FT_SAC_MASK, 0);
    for (int i = 0; which >= 3 && i < 8; i++)
        r->sac[i].mask = th_mix(salt * 8 + (uint64_t)i) &
                         (which == 3 ? 0xfff : th_mix(salt) | 0x249);
}

/* Every stage, number of ranks, dtype, number of micro-batches and policy with each other; the rest
   by turns, so that any two values of any two options meet. */
static void plan_is_run(void **state)
{
    uint64_t turn = 0;
    (void)state;
    for (int w = 0; w < 5; w++)
        for (int stage = 0; stage < 4; stage++)
            for (int half = 0; half < 2; half++)
                for (int m = 1; m <= 3; m += 2)
                    for (int p = 0; p < 5; p++, turn++) {
                        run r = run_default();
                        uint64_t any = th_mix(turn);
                        r.o.dp = worlds[w];
                        r.o.zero.stage = stage;
                        r.o.zero.dtype = half ? FT_BF16 : FT_F32;
                        r.o.micro_batches = m;
                        r.o.samples = worlds[w] * m * (1 + (int)(turn % 3));
                        r.o.model.tie_embeddings = (int)(any & 1);
                        r.o.zero.prefetch = (int)((any >> 1) % 3);
                        r.o.zero.reduce_overlap = any >> 8 & 1 ? FT_OFF : FT_DEFAULT;
                        r.o.launch.async = any % 7 == 0 ? FT_ON : FT_DEFAULT;
                        policy(&r, p, turn);
                        check_run(&r);
                    }
}

/* The model of the other tests, under the layouts that they train it with. */
static void plan_is_run_for_the_tiny_model(void **state)
{
    (void)state;
    for (int w = 0; w < 5; w++)
        for (int stage = 0; stage < 4; stage++) {
            run r = run_default();
            int turn = w + stage;
            th_options tiny = th_options_default();
            r.o.model = tiny.model;
            r.o.T = tiny.T;
            r.o.steps = 1;
            r.o.dp = worlds[w];
            r.o.zero.stage = stage;
            r.o.zero.dtype = turn & 1 ? FT_BF16 : FT_F32;
            r.o.micro_batches = turn & 2 ? 3 : 1;
            if (r.o.dp == 3) r.o.samples = 27;
            r.o.model.tie_embeddings = turn % 3 == 0;
            policy(&r, (w + 2 * stage) % 4, (uint64_t)turn);
            check_run(&r);
        }
}

/* Biases, norms of heads, other heads, odd sizes; more layers than prefetch; steps from 1 on. */
static void plan_is_run_for_other_models(void **state)
{
    (void)state;
    for (int which = 0; which < 12; which++) {
        run r = run_default();
        r.o.dp = which % 3 + 1;
        r.o.samples = 6;
        r.o.micro_batches = which & 1 ? 1 : 2;
        if (r.o.dp == 2 && !(which & 1)) r.o.samples = 8;
        if (r.o.dp == 3 && !(which & 1)) r.o.samples = 12;
        r.o.zero.stage = 3 - which % 4;
        r.o.model.layers = which % 2 ? 1 : 5;
        r.o.model.qkv_bias = r.o.model.o_bias = r.o.model.mlp_bias = which & 1;
        r.o.model.qk_norm = which >= 6;
        r.o.model.heads = 2;
        r.o.model.kv_heads = which & 2 ? 2 : 1;
        r.o.model.head_dim = 10;
        r.o.model.loss_chunk_tokens = which & 4 ? 0 : 7;
        r.o.zero.prefetch = which % 5;
        r.o.T = 13;
        policy(&r, which % 3, 0);
        check_run(&r);
    }
}

/* Gradients that travel or collect in another dtype, and shards over a part of the ranks. */
static void plan_is_run_with_other_gradients(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int which = 0; which < 8; which++) {
            run r = run_default();
            r.o.dp = which & 1 ? 4 : 2;
            r.o.micro_batches = which & 2 ? 3 : 1;
            r.o.zero.stage = stage;
            r.o.zero.dtype = which & 4 ? FT_F32 : FT_BF16;
            r.o.zero.accumulate_dtype = which % 3 ? FT_ZERO_F32 : FT_ZERO_SAME;
            r.o.zero.reduce_dtype = (ft_zero_dtype)((which + stage) % 3);
            r.o.zero.shard_ranks = which & 1 ? 2 : 0;
            r.o.model.tie_embeddings = which == 5;
            policy(&r, 1, 0);
            check_run(&r);
        }
}

/* A rank planned alone has the figures that it has among the others. */
static void one_rank_planned_alone(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        run all = run_default(), one = run_default();
        all.o.dp = one.o.dp = 4;
        all.o.zero.stage = one.o.zero.stage = stage;
        th_result *a = run_on(&all, FT_META);
        for (int rank = 0; rank < 4; rank++) {
            one.o.launch.only_rank = rank;
            th_result *b = run_on(&one, FT_META);
            assert_memory_equal(&a->mem[rank], &b->mem[rank], sizeof a->mem[rank]);
            assert_int_equal(all.events[rank], one.events[rank]);
            th_free(b);
        }
        th_free(a);
    }
}

/* ----------------------------------------------------------- what the timeline never shows */

typedef struct seen { int64_t max_request, max_act, logits; int n_logits; } seen;

static seen look; /* of rank 0 */

static ft_status find_large(th_rank *r, run *u)
{
    const ft_mem_event *e;
    int64_t n = ft_mem_timeline(r->ctx, &e);
    (void)u;
    for (int64_t i = 0; i < n && r->rank == 0; i++) {
        if (e[i].delta_bytes < 0) continue;
        if ((int64_t)e[i].request_bytes > look.max_request)
            look.max_request = (int64_t)e[i].request_bytes;
        if (e[i].tag == FT_TAG_ACT && (int64_t)e[i].request_bytes > look.max_act)
            look.max_act = (int64_t)e[i].request_bytes;
        if ((int64_t)e[i].request_bytes == look.logits && e[i].tag == FT_TAG_ACT &&
            !strcmp(e[i].op, "linear_cross_entropy"))
            look.n_logits++;
    }
    return FT_OK;
}

/* T is so long that one head's T x T scores, in two bytes each, would be the largest buffer. */
static void no_scores(void **state)
{
    (void)state;
    for (int half = 0; half < 2; half++)
        for (int p = 0; p < 3; p++) {
            run r = run_default();
            r.more = find_large;
            r.o.T = 300;
            r.o.samples = 1;
            r.o.steps = 1;
            r.o.model.hidden = 8;
            r.o.model.heads = 2;
            r.o.model.head_dim = 4;
            r.o.model.intermediate = 8;
            r.o.zero.dtype = half ? FT_BF16 : FT_F32;
            policy(&r, p, 0);
            memset(&look, 0, sizeof look);
            check_run(&r);
            if (!look.max_request) continue; /* left out */
            assert_true(look.max_request >= 300 * 8 * 2);
            assert_true(look.max_request < 300 * 300 * 2);
        }
}

/* V is so large that B T V logits would be the largest buffer; a chunk's exist, once a step. */
static void no_whole_logits(void **state)
{
    (void)state;
    for (int half = 0; half < 2; half++)
        for (int tied = 0; tied < 2; tied++) {
            run r = run_default();
            int64_t e = half ? 2 : 4;
            r.more = find_large;
            r.o.T = 64;
            r.o.samples = 2;
            r.o.steps = 1;
            r.o.model.vocab = 1000;
            r.o.model.hidden = 8;
            r.o.model.heads = 2;
            r.o.model.head_dim = 4;
            r.o.model.loss_chunk_tokens = 16;
            r.o.model.tie_embeddings = tied;
            r.o.zero.dtype = half ? FT_BF16 : FT_F32;
            memset(&look, 0, sizeof look);
            look.logits = 16 * 1000 * e;
            check_run(&r);
            if (!look.max_request) continue; /* left out */
            assert_int_equal(look.n_logits, 2); /* on cpu and on meta */
            assert_true(look.max_request < 2 * 64 * 1000 * 2);
            assert_int_equal(look.max_act, 16 * 1000 * e);
        }
}

/* At any time at most `most` buffers of a layer's whole gradient are live, and what has that size
   is weights, gradients, optimizer state or gathered weights: no copy under another name. */
static ft_status count_gradients(th_rank *r, run *u)
{
    const ft_mem_event *e;
    int64_t n = ft_mem_timeline(r->ctx, &e), bytes = u->o.zero.dtype == FT_BF16 ? 2 : 4;
    layout l = layout_of(&u->o);
    int layers = (int)u->o.model.layers, live = 0, optim = 0;
    int most = u->o.zero.stage < 2 || u->o.dp == 1 ? layers :
               u->o.zero.reduce_overlap == FT_OFF ? 1 : 2;
    for (int64_t i = 0; i < n; i++) {
        int change = e[i].delta_bytes > 0 ? 1 : -1;
        if ((int64_t)e[i].request_bytes != l.padded[1] * bytes) continue;
        if (e[i].tag == FT_TAG_GRAD) live += change;
        if (e[i].tag == FT_TAG_OPTIM) optim += change;
        CHECK(e[i].tag == FT_TAG_GRAD || e[i].tag == FT_TAG_PARAM || e[i].tag == FT_TAG_GATHER ||
              e[i].tag == FT_TAG_OPTIM);
        CHECK(live >= 0 && live <= most);
        CHECK(optim <= (u->o.zero.stage == 0 || u->o.dp == 1 ? 2 * layers : 0));
    }
    return FT_OK;
}

static void no_second_copy_of_gradients(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int which = 0; which < 8; which++) {
            run r = run_default();
            r.more = count_gradients;
            r.o.dp = which & 1 ? 3 : 2;
            r.o.micro_batches = which & 2 ? 3 : 1;
            if (r.o.dp == 3 && r.o.micro_batches == 3) r.o.samples = 27;
            r.o.zero.stage = stage;
            r.o.zero.reduce_overlap = which & 4 ? FT_OFF : FT_ON;
            check_run(&r);
        }
}

/* While an op of layer i runs, gathered are its unit and the `prefetch` next ones: those above in
   forward, those below in backward, the embedding (whose backward reads nothing) excepted. */
static ft_status watch_gathers(th_rank *r, run *u)
{
    const ft_mem_event *e;
    int64_t n = ft_mem_timeline(r->ctx, &e), bytes = u->o.zero.dtype == FT_BF16 ? 2 : 4, live = 0;
    layout l = layout_of(&u->o);
    int p = u->o.zero.prefetch, seen_forward = 0, seen_backward = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t want = 0;
        int unit = e[i].segment + 1;
        if (e[i].tag == FT_TAG_GATHER) live += e[i].delta_bytes;
        if (e[i].segment < 0 || e[i].tag == FT_TAG_GATHER || !e[i].phase[0]) continue;
        if (!strcmp(e[i].phase, "forward")) {
            for (int k = unit; k <= unit + p && k < l.n; k++)
                want += (int64_t)up256(l.padded[k] * bytes);
            seen_forward++;
        } else {
            for (int k = unit; k >= unit - p && k > 0; k--)
                want += (int64_t)up256(l.padded[k] * bytes);
            seen_backward++;
        }
        if (live != want)
            return ft_error(FT_ERR_DATA, "%s of %s in layer %d: %lld bytes are gathered, not %lld",
                            e[i].phase, e[i].op, e[i].segment, (long long)live, (long long)want);
    }
    CHECK(seen_forward > 0 && seen_backward > 0);
    return FT_OK;
}

static void gathered_are_the_running_unit_and_the_next(void **state)
{
    (void)state;
    for (int prefetch = 0; prefetch < 4; prefetch++)
        for (int which = 0; which < 12; which++) {
            run r = run_default();
            r.more = watch_gathers;
            r.o.dp = which & 1 ? 3 : 2;
            r.o.micro_batches = which & 2 ? 2 : 1;
            r.o.zero.stage = 3;
            r.o.zero.prefetch = prefetch;
            r.o.zero.dtype = which & 1 ? FT_BF16 : FT_F32;
            r.o.model.tie_embeddings = which & 1;
            policy(&r, which / 4, 0);
            check_run(&r);
        }
}

/* Each policy needs less than the one before, and stages 1 and 3 less than 0 and 2. (Stage 2
   differs from 1 where gradients, not activations, make the peak.) */
static void more_recomputation_and_sharding_need_less(void **state)
{
    size_t peak[4][3];
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int p = 0; p < 3; p++) {
            run r = run_default();
            r.o.model = th_options_default().model;
            r.o.T = 64;
            r.o.dp = 4;
            r.o.zero.stage = stage;
            policy(&r, p, 0);
            th_result *result = run_on(&r, FT_META);
            peak[stage][p] = result->mem[0].peak_bytes;
            th_free(result);
            if (p) assert_true(peak[stage][p] < peak[stage][p - 1]);
            if (stage & 1) assert_true(peak[stage][p] < peak[stage - 1][p]);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plan_is_run),
        cmocka_unit_test(plan_is_run_for_the_tiny_model),
        cmocka_unit_test(plan_is_run_for_other_models),
        cmocka_unit_test(plan_is_run_with_other_gradients),
        cmocka_unit_test(one_rank_planned_alone),
        cmocka_unit_test(no_scores),
        cmocka_unit_test(no_whole_logits),
        cmocka_unit_test(no_second_copy_of_gradients),
        cmocka_unit_test(gathered_are_the_running_unit_and_the_next),
        cmocka_unit_test(more_recomputation_and_sharding_need_less),
    };
    return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}
