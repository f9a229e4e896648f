/* ZeRO: every stage, layout, recompute policy and accumulation trains the same model; what travels
   is what the formulas say; padding, frozen and idle parameters, uneven tokens and bad numbers do
   no harm; each verb refuses a wrong order.

   cc -std=c11 -I. tests/test_zero.c -lcmocka -lm -lpthread

   References: one rank, float64 arithmetic on exported values, or a closed form computed here.
   Ranks are threads and cmocka's assertions are for the main thread only: a rank reports what is
   wrong as an error of its own. All memory that is handed out holds NaN, so that whatever is read
   before it is written, padding above all, shows. */

#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Sanitizers look at the code, not at the numbers: up to 3 ranks, and one case in n, will do. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

/* The last blocks that were given back stay unused for a while, all ones: who writes to one, since
   nobody waited for that, is seen. Sanitizers do that, and better. */
static pthread_mutex_t yard_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned char *yard[256];
static unsigned yard_at;
static int late_writes;

#define BLOCK_HEAD 64 /* keeps malloc's alignment, holds the size */

static void *nan_malloc(size_t bytes)
{
    unsigned char *block = (unsigned char *)malloc(BLOCK_HEAD + bytes);
    if (!block) return NULL;
    memcpy(block, &bytes, sizeof bytes);
    memset(block + BLOCK_HEAD, 0xff, bytes);
    return block + BLOCK_HEAD;
}

/* Puts a block into the yard, or nothing, and lets another one go. */
static void yard_swap(unsigned char *block)
{
    size_t bytes;
    pthread_mutex_lock(&yard_lock);
    unsigned char *old = yard[yard_at];
    yard[yard_at] = block;
    yard_at = (yard_at + 1) % (sizeof yard / sizeof *yard);
    if (old) {
        memcpy(&bytes, old, sizeof bytes);
        for (size_t i = 0; i < bytes; i++)
            if (old[BLOCK_HEAD + i] != 0xff) {
                late_writes++;
                break;
            }
    }
    pthread_mutex_unlock(&yard_lock);
    free(old);
}

static void nan_free(void *memory)
{
    size_t bytes;
    if (!memory) return;
    unsigned char *block = (unsigned char *)memory - BLOCK_HEAD;
    memcpy(&bytes, block, sizeof bytes);
    memset(memory, 0xff, bytes);
    if (SANITIZED) free(block);
    else yard_swap(block);
}

/* Teardown of the tests with threads as streams. */
static int no_late_writes(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof yard / sizeof *yard; i++) yard_swap(NULL);
    return late_writes ? -1 : 0;
}

#define FT_MALLOC(n) nan_malloc(n)
#define FT_FREE(p) nan_free(p)
#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_llama.h"
#include "train_harness.h"
#include "check.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

/* ------------------------------------------------------------------------------------- helpers */

/* The call must fail with this status, and say something. */
#define FAILS(call, status)                                                                      \
    do {                                                                                           \
        ft_status refused = (call);                                                                \
        if (refused != (status) || !*ft_last_error())                                              \
            return ft_error(FT_ERR_DATA, "line %d: %s gave '%s', not '%s'", __LINE__, #call,       \
                            ft_status_name(refused), ft_status_name(status));                      \
    } while (0)

static const int layouts[] = {1, 2, 3, 4, 8}; /* sizes of dp: 24 samples divide by each */
#define LAYOUTS ((int)(sizeof layouts / sizeof *layouts))

static int skips(int dp, int i, int n) { return SANITIZED && (dp > 3 || i % n != 0); }

/* The tests' model for sweeps: as many units as tiny, a quarter of its width. */
static th_options small(void)
{
    th_options o = th_options_default();
    o.model.hidden = 32;
    o.model.intermediate = 48;
    o.T = 8;
    if (SANITIZED) o.steps = 2;
    return o;
}

static char described[160];

static const char *describe(const th_options *o)
{
    snprintf(described, sizeof described, "dp %d, stage %d, %s, %d micro-batches, prefetch %d, "
             "overlap %d, sac %d, tied %d, async %d", o->dp, o->zero.stage,
             ft_dtype_name(o->zero.dtype), o->micro_batches, o->zero.prefetch,
             (int)o->zero.reduce_overlap, o->sac ? (int)o->sac[0].kind : 0,
             o->model.tie_embeddings, (int)o->launch.async);
    return described;
}

static th_result *run_ok(const th_options *o)
{
    th_result *r = th_run(o);
    if (r->status != FT_OK)
        fail_msg("%s: %s: %s", describe(o), ft_status_name(r->status), r->error);
    for (int i = 0; i < o->steps && o->report_every && o->launch.device == FT_CPU; i++)
        if (!isfinite(r->loss[i])) fail_msg("%s: loss %d is %g", describe(o), i, r->loss[i]);
    return r;
}

static void same_bits(const th_options *o, const th_result *a, const th_result *b)
{
    if (a->hash != b->hash)
        fail_msg("%s: hash %016llx, expected %016llx", describe(o), (unsigned long long)b->hash,
                 (unsigned long long)a->hash);
    for (int i = 0; i < o->steps; i++)
        if (a->loss[i] != b->loss[i] || a->norm[i] != b->norm[i])
            fail_msg("%s: step %d: loss %.9g, expected %.9g; norm %.9g, expected %.9g", describe(o),
                     i, b->loss[i], a->loss[i], b->norm[i], a->norm[i]);
}

static void close_losses(const th_options *o, const th_result *a, const th_result *b, double bound)
{
    for (int i = 0; i < o->steps; i++)
        if (!(fabs(a->loss[i] - b->loss[i]) <= bound * fabs(a->loss[i])))
            fail_msg("%s: step %d: loss %.9g, expected %.9g: off by %.2g, allowed %.2g",
                     describe(o), i, b->loss[i], a->loss[i],
                     fabs(a->loss[i] - b->loss[i]) / fabs(a->loss[i]), bound);
}

/* |a - b| / |a|, in the 2-norm. */
static double distance(const float *a, const float *b, int64_t n)
{
    double square = 0, difference = 0;
    for (int64_t i = 0; i < n; i++) {
        square += (double)a[i] * a[i];
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    }
    return sqrt(difference) / (sqrt(square) > 0 ? sqrt(square) : 1);
}

static void *zeroed(size_t n, size_t item)
{
    void *memory = calloc(n, item);
    if (!memory) abort();
    return memory;
}

/* ---------------------------------------------------------------------- the stages agree: Llama */

enum { POLICY_NONE, POLICY_SELECTIVE, POLICY_FULL, POLICY_BUDGET, POLICIES };

/* The budget half way between what `full` and what `none` need, of this layout. It comes to a mask
   for each layer. */
static void fit_budget(const th_options *o, ft_sac *sac)
{
    th_options plan = *o;
    ft_sac_budget budget;
    size_t peak[2];
    plan.launch.device = FT_META;
    plan.launch.world = o->dp;
    plan.steps = 1;
    plan.no_hash = 1;
    plan.sac = sac;
    for (int full = 0; full < 2; full++) {
        th_policy(sac, o->model.layers, full ? FT_SAC_FULL : FT_SAC_NONE, 0);
        th_result *r = run_ok(&plan);
        peak[full] = r->mem[0].peak_bytes;
        th_free(r);
    }
    th_job job;
    job.options = &plan;
    job.result = NULL;
    memset(&budget, 0, sizeof budget);
    budget.segments = (int)o->model.layers;
    budget.budget_bytes = (peak[0] + peak[1]) / 2;
    budget.config = plan.launch;
    budget.step = th_rank_main;
    budget.user = &job;
    budget.sac = sac;
    if (ft_sac_fit(&budget) != FT_OK) fail_msg("%s: %s", describe(o), ft_last_error());
    assert_true(budget.peak_bytes <= budget.budget_bytes);
}

static const ft_sac *policy(const th_options *o, ft_sac *sac, int which)
{
    static const ft_sac_kind kinds[] = {FT_SAC_NONE, FT_SAC_SELECTIVE, FT_SAC_FULL};
    if (which < POLICY_BUDGET) return th_policy(sac, o->model.layers, kinds[which], 0);
    if (o->dp <= 2 && o->zero.stage == 3) fit_budget(o, sac);
    else
        for (int64_t i = 0; i < o->model.layers; i++) {
            sac[i].kind = FT_SAC_MASK;
            sac[i].mask = th_mix((uint64_t)(i + 8 * o->zero.stage + 64 * o->dp));
        }
    return sac;
}

/* One micro-batch: the same bits in every stage and under every policy, at each dp. Across dp the
   sum over ranks is taken in other groups: equal to rounding. */
static void check_one_micro_batch(ft_dtype dtype, double bound)
{
    ft_sac sac[8];
    th_result *one = NULL;
    for (int d = 0; d < LAYOUTS; d++) {
        th_options o = small();
        if (skips(layouts[d], 0, 1)) continue;
        o.zero.dtype = dtype;
        o.dp = layouts[d];
        th_result *reference = run_ok(&o);
        if (!one) one = reference;
        close_losses(&o, one, reference, bound);
        for (int stage = 0; stage < 4; stage++)
            for (int which = 0; which < POLICIES; which++) {
                if (stage == 0 && which == POLICY_NONE) continue; /* the reference */
                if (skips(o.dp, 4 * stage + which + d, 5)) continue;
                o.zero.stage = stage;
                o.sac = policy(&o, sac, which);
                th_result *r = run_ok(&o);
                same_bits(&o, reference, r);
                th_free(r);
            }
        if (one != reference) th_free(reference);
    }
    th_free(one);
}

/* Three micro-batches: under each policy the same bits as without recomputation; between stages 0,
   1 and 2, 3, which add in another order, equal to rounding; and equal to one micro-batch's. */
static void check_three_micro_batches(ft_dtype dtype, double bound, double bound_dp)
{
    ft_sac sac[8];
    th_options whole = small();
    whole.samples = SANITIZED ? 18 : 72; /* 3 micro-batches on each layout */
    whole.T = 4;
    whole.zero.dtype = dtype;
    th_result *one = run_ok(&whole);
    for (int d = 0; d < LAYOUTS; d++) {
        th_result *zero = NULL;
        for (int stage = 0; stage < 4; stage++) {
            th_options o = whole;
            o.dp = layouts[d];
            o.micro_batches = 3;
            o.zero.stage = stage;
            if (skips(o.dp, stage + d + (o.dp == 1), 2)) continue;
            th_result *none = run_ok(&o);
            if (!zero) zero = none;
            close_losses(&o, zero, none, bound);
            close_losses(&o, one, none, bound_dp);
            for (int which = 1; which < POLICIES; which++) {
                if (which != 1 + (stage + d) % 3) continue; /* over the layouts each with each */
                o.sac = policy(&o, sac, which);
                th_result *r = run_ok(&o);
                same_bits(&o, none, r);
                th_free(r);
            }
            if (none != zero) th_free(none);
        }
        th_free(zero);
    }
    th_free(one);
}

static void test_one_micro_batch_fp32(void **state)
{
    (void)state;
    check_one_micro_batch(FT_F32, 1e-5);
}

static void test_three_micro_batches_fp32(void **state)
{
    (void)state;
    check_three_micro_batches(FT_F32, 1e-6, 1e-5);
}

/* Stages 0, 1 and 2, 3, and other numbers of ranks, round sums of gradients to bf16 at other
   places: by 2^-9 of a gradient, of which Adam passes such a part of its step on to the weights.
   The losses of these 5 steps then differ by up to 2.4e-5 of themselves, over all cases; thrice
   that is allowed. A micro-batch that is lost shows as 2e-4 in the second step. */
#define BF16_BOUND 8e-5

static void test_one_micro_batch_bf16(void **state)
{
    (void)state;
    check_one_micro_batch(FT_BF16, BF16_BOUND);
}

static void test_three_micro_batches_bf16(void **state)
{
    (void)state;
    check_three_micro_batches(FT_BF16, BF16_BOUND, BF16_BOUND);
}

/* When gathers and reductions run changes no bit: prefetch 0, 1, 3, overlap on and off, units kept
   through the step or not. */
static void test_schedule_changes_nothing(void **state)
{
    static const int ahead[] = {0, 1, 3};
    (void)state;
    for (int tied = 0; tied < 2; tied++)
        for (int M = 1; M <= 3; M += 2)
            for (int stage = 1; stage < 4; stage++) {
                th_options o = small();
                if (skips(1, stage + M / 2 + tied, 3)) continue;
                o.dp = 4;
                o.steps = 3;
                o.micro_batches = M;
                o.zero.stage = stage;
                o.model.tie_embeddings = tied;
                th_result *reference = run_ok(&o);
                for (int i = 0; i < 12; i++) {
                    if (stage < 3 && i / 2 != 1) continue; /* no gathers to prefetch or keep */
                    o.zero.keep_gathered = i / 6;
                    o.zero.prefetch = ahead[i / 2 % 3];
                    o.zero.reduce_overlap = i % 2 ? FT_OFF : FT_ON;
                    th_result *r = run_ok(&o);
                    same_bits(&o, reference, r);
                    th_free(r);
                }
                th_free(reference);
            }
}

/* The model of the fault list, whole: tiny, plain and with all that its relatives have. */
static void test_tiny(void **state)
{
    ft_sac sac[8];
    th_result *reference = NULL;
    (void)state;
    for (int i = 0; i < 8; i++) {
        th_options o = th_options_default();
        int more = i / 4;
        o.model.qkv_bias = o.model.o_bias = o.model.mlp_bias = o.model.qk_norm = more;
        o.model.tie_embeddings = more;
        o.model.loss_chunk_tokens = more ? 100 : 0;
        o.samples = 8;
        o.dp = 4;
        o.steps = SANITIZED ? 1 : 3;
        o.zero.stage = i % 4;
        o.sac = policy(&o, sac, i % 4);
        th_result *r = run_ok(&o);
        if (i % 4 == 0) {
            th_free(reference);
            reference = r;
            continue;
        }
        same_bits(&o, reference, r);
        th_free(r);
    }
    th_free(reference);
}

/* Training does learn: the equalities above are not between runs that stand still. */
static void repeat_data(void *user, int step, int sample, int64_t T, int32_t *tokens,
                        int32_t *labels)
{
    (void)step;
    th_data(user, 0, sample % 2, T, tokens, labels);
}

static void test_training_learns(void **state)
{
    th_options o = small();
    (void)state;
    o.dp = 2;
    o.zero.stage = 3;
    o.steps = 30;
    o.lr = 1e-2;
    o.samples = 8;
    o.data = repeat_data;
    th_result *r = run_ok(&o);
    assert_true(r->loss[0] > 4.4 && r->loss[0] < 4.8); /* ln 97 = 4.57 */
    if (!(r->loss[29] < 0.5)) fail_msg("loss %g after 30 steps on two rows", r->loss[29]);
    th_free(r);
}

/* ------------------------------------------------------------------------------ initial weights */

/* Case 21: the same global weights for every layout, stage and dtype of training, and copies that
   agree, before and after training. */
static ft_status copies_agree(th_rank *r, th_moment moment, void *user)
{
    (void)user;
    if (moment != TH_CREATED && moment != TH_END) return FT_OK;
    FT_TRY(ft_sync(r->ctx));
    for (int u = 0; u < r->zero->n_units; u++) {
        const ft__zero_flat *f = &r->zero->units[u].flat[0];
        if (r->zero->shards_weights) continue;
        uint64_t hash = ft__llama_fnv_begin();
        hash = ft__llama_fnv(hash, ft_data(f->full), (size_t)f->elems *
                             ft_dtype_bytes(r->zero->config.dtype));
        FT_TRY(ft_agree(r->zero->scalars, "weights of a unit", hash));
    }
    return FT_OK;
}

static void test_initial_weights(void **state)
{
    uint64_t hash = 0;
    (void)state;
    for (int d = 0; d < LAYOUTS; d++)
        for (int stage = 0; stage < 4; stage++)
            for (int dtype = 0; dtype < 2; dtype++) {
                th_options o = small();
                o.dp = layouts[d];
                if (skips(o.dp, stage + dtype, 2)) continue;
                o.zero.stage = stage;
                o.zero.dtype = dtype ? FT_BF16 : FT_F32;
                o.steps = 0;
                o.hook = copies_agree;
                th_result *r = run_ok(&o);
                if (!hash) hash = r->hash;
                if (hash != r->hash) fail_msg("%s: other initial weights", describe(&o));
                th_free(r);
                if (o.dp != 4) continue;
                o.steps = 2;
                th_free(run_ok(&o));
            }
    th_options o = small();
    o.steps = 0;
    o.seed++;
    th_result *other = run_ok(&o);
    assert_true(other->hash != hash);
    th_free(other);
}

/* -------------------------------------------------------------------------------------- traffic */

static int64_t up_to(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

static int ranks_of_a_copy(const th_options *o)
{
    return o->zero.shard_ranks ? o->zero.shard_ranks : o->dp;
}

/* Elements of each unit's shard, from the model's sizes alone: embedding, a layer, final. */
typedef struct shards { int64_t emb, layer, final, all; } shards;

static shards unit_shards(const th_options *o)
{
    const ft_llama_config *c = &o->model;
    int64_t C = c->hidden, size = C / c->heads, F = c->intermediate, unit[3];
    int64_t D = ranks_of_a_copy(o);
    unit[0] = c->vocab * C;
    unit[1] = (c->heads + 2 * c->kv_heads) * size * C + C * c->heads * size + 3 * C * F + 2 * C;
    unit[2] = C + (c->tie_embeddings ? 0 : c->vocab * C);
    for (int i = 0; i < 3; i++) unit[i] = up_to((unit[i] + D - 1) / D, 8);
    shards s = {unit[0], unit[1], unit[2], unit[0] + c->layers * unit[1] + unit[2]};
    return s;
}

static int64_t bytes_of(const th_options *o, ft_zero_dtype dtype)
{
    return dtype == FT_ZERO_F32 || (dtype == FT_ZERO_SAME && o->zero.dtype == FT_F32) ? 4 : 2;
}

static void sent_equals(const th_options *o, const char *what, int64_t sent, int64_t formula,
                        int64_t expected)
{
    if (sent != o->steps * expected || formula != expected)
        fail_msg("%s, shard_ranks %d: %s: sent %lld in %d steps, formula %lld, expected %lld a "
                 "step", describe(o), o->zero.shard_ranks, what, (long long)sent, o->steps,
                 (long long)formula, (long long)expected);
}

static void check_traffic(const th_options *o, const th_result *r)
{
    shards s = unit_shards(o);
    int stage = o->zero.stage, tied = o->model.tie_embeddings;
    int64_t M = o->micro_batches, others = ranks_of_a_copy(o) - 1;
    int64_t copies = o->dp / (others + 1), wire = bytes_of(o, o->zero.reduce_dtype);
    int64_t weights = others * bytes_of(o, FT_ZERO_SAME), grads = others * wire * s.all;
    int64_t gather = stage == 0 ? 0 : weights * s.all;
    if (stage == 3 && !o->zero.keep_gathered)
        gather = M * weights * (2 * s.all - s.final - (tied ? 0 : s.emb));
    int64_t reduce = (stage == 0 ? 2 : stage == 1 ? 1 : M) * grads;
    if (stage >= 2 && others) wire = bytes_of(o, o->zero.accumulate_dtype);
    for (int rank = 0; rank < o->dp; rank++) {
        const ft_zero_formula *f = &r->formula[rank];
        sent_equals(o, "gather", r->gather_sent[rank], f->gather_sent, gather);
        sent_equals(o, "reduce", r->reduce_sent[rank], f->reduce_sent, reduce);
        sent_equals(o, "replicas", r->replica_sent[rank], f->replica_sent,
                    2 * s.all * wire * (copies - 1) / copies);
        assert_int_equal(r->scalars_sent[rank], o->steps * 12 * (o->dp - 1));
    }
}

static void bytes_equal(const th_options *o, const char *what, size_t bytes, size_t formula)
{
    if (bytes != formula)
        fail_msg("%s, accumulate %d, reduce %d, shard_ranks %d: %s takes %zu bytes, the formula "
                 "says %zu", describe(o), (int)o->zero.accumulate_dtype,
                 (int)o->zero.reduce_dtype, o->zero.shard_ranks, what, bytes, formula);
}

/* Case 7 is in here: whole gradients kept over micro-batches would show in `highest`. */
static void check_bounds(const th_options *o, const th_result *r)
{
    for (int rank = 0; rank < o->dp; rank++) {
        const ft_zero_formula *f = &r->formula[rank];
        const ft_mem_stats *m = &r->mem[rank];
        bytes_equal(o, "param", m->live[FT_TAG_PARAM], f->param);
        bytes_equal(o, "optim", m->live[FT_TAG_OPTIM], f->optim);
        bytes_equal(o, "grad", m->highest[FT_TAG_GRAD], f->grad_max);
        bytes_equal(o, "gather", m->highest[FT_TAG_GATHER], f->gather_max);
        bytes_equal(o, "comm", m->highest[FT_TAG_COMM], f->comm_max);
        bytes_equal(o, "all after training", m->live_bytes, r->created[rank].live_bytes);
    }
}

static ft_status forget_creation(th_rank *r, th_moment moment, void *user)
{
    (void)user;
    if (moment == TH_CREATED) ft_mem_reset_peak(r->ctx);
    return FT_OK;
}

static void check_costs(th_options *o)
{
    o->no_hash = 1;
    o->hook = forget_creation;
    th_result *r = run_ok(o);
    check_traffic(o, r);
    check_bounds(o, r);
    th_free(r);
}

/* On meta every combination, on the CPU some. */
static void test_traffic(void **state)
{
    static const int sizes[] = {1, 2, 3, 4, 8};
    (void)state;
    for (int i = 0; i < 5 * 4 * 2 * 2 * 2 * 2; i++) {
        ft_sac sac[8];
        th_options o = small();
        o.dp = sizes[i % 5];
        o.zero.stage = i / 5 % 4;
        o.micro_batches = i / 20 % 2 ? 3 : 1;
        o.samples = 72;
        o.T = 2;
        o.model.tie_embeddings = i / 40 % 2;
        o.zero.dtype = i / 80 % 2 ? FT_BF16 : FT_F32;
        o.steps = 2;
        o.launch.device = i / 160 ? FT_CPU : FT_META;
        if (o.launch.device == FT_CPU && (o.zero.dtype == FT_BF16 || o.dp == 3)) continue;
        if (skips(1, i, 3)) continue;
        o.sac = policy(&o, sac, i % 3);
        check_costs(&o);
    }
}

/* The same with gradients in other dtypes, sharding over a part of the ranks, other schedules. */
static void test_traffic_of_options(void **state)
{
    (void)state;
    for (int i = 0; i < 4 * 3 * 3 * 3 * 2 * 2; i++) {
        th_options o = small();
        o.dp = 4;
        o.zero.stage = i % 4;
        o.zero.shard_ranks = 1 << i / 4 % 3;
        o.zero.reduce_dtype = (ft_zero_dtype)(i / 12 % 3);
        o.zero.accumulate_dtype = i / 36 % 3 ? FT_ZERO_F32 : FT_ZERO_SAME;
        o.zero.dtype = i / 36 % 3 == 1 ? FT_F32 : FT_BF16;
        o.zero.prefetch = i % 3;
        o.zero.keep_gathered = i / 4 % 7 == 0;
        o.zero.reduce_overlap = i % 5 ? FT_ON : FT_OFF;
        o.micro_batches = i / 108 % 2 ? 3 : 1;
        o.model.tie_embeddings = i / 216;
        o.samples = 72;
        o.T = 2;
        o.steps = 2;
        o.launch.device = i % 11 ? FT_META : FT_CPU;
        if (skips(1, i, 5)) continue;
        check_costs(&o);
    }
}

/* --------------------------------------------------------------------- a small model of its own */

/* A chain: matrices [rows,cols] (linear, then silu but for the last), norms [cols] (rows 0), in
   units; the last matrix is the head of a cross-entropy. Data are rows of `width` numbers. */
typedef struct toy_param {
    int unit;
    int64_t rows, cols;
    int flags;
} toy_param;

#define TOY_PARAMS 24
#define TOY_STEPS 12
#define TOY_TOTAL 6000

typedef struct toy_rank toy_rank;
typedef ft_status (*toy_hook_fn)(toy_rank *r, th_moment moment, void *user);

typedef struct toy {
    toy_param params[TOY_PARAMS];
    int n_params;
    int64_t width, vocab;
    int dp, micro_batches, steps, samples;
    double lr;
    ft_zero_config zero;
    ft_config launch;
    int (*skips)(int step, int micro_batch, int param); /* 1: not in this forward; NULL: all are */
    toy_hook_fn hook;
    void *user;
} toy;

typedef struct toy_result {
    ft_status status;
    char error[1024];
    double loss[TOY_STEPS], norm[TOY_STEPS], coef[TOY_STEPS];
    int64_t updates[TH_RANKS], skipped[TH_RANKS], total;
    float grads[TOY_STEPS][TOY_TOTAL];       /* reduced, before clipping; frozen ones are 0 */
    float weights[TOY_STEPS + 1][TOY_TOTAL]; /* before the first step and after each */
} toy_result;

struct toy_rank {
    ft_ctx *ctx;
    ft_zero *zero;
    ft_tape *tape;
    const toy *spec;
    toy_result *result;
    ft_tensor *params[TOY_PARAMS];
    ft_tensor *x32, *x, *labels, *scale;
    int rank, step, micro_batch;
};

static double toy_uniform(uint64_t key) /* in [-1, 1) */
{
    return (double)(th_mix(key) >> 11) / 4503599627370496.0 - 1.0;
}

static ft_status toy_init(void *user, const char *name, int64_t first, int64_t n, float *values)
{
    (void)user;
    for (int64_t i = 0; i < n; i++) {
        double x = toy_uniform(((uint64_t)atoi(name + 1) << 32) + (uint64_t)(first + i));
        values[i] = (float)(name[0] == 'n' ? 1 + 0.1 * x : 0.5 * x);
    }
    return FT_OK;
}

static ft_status toy_describe(toy_rank *r)
{
    const toy *s = r->spec;
    for (int i = 0, unit = -1; i < s->n_params; i++) {
        const toy_param *p = &s->params[i];
        char name[16];
        int64_t shape[2];
        int vector = p->rows == 0;
        shape[0] = vector ? p->cols : p->rows;
        shape[1] = p->cols;
        snprintf(name, sizeof name, "%c%d", vector ? 'n' : 'w', i);
        while (unit < p->unit) FT_TRY(ft_zero_unit(r->zero, name, &unit));
        FT_TRY(ft_zero_param(r->zero, name, vector ? 1 : 2, shape, p->flags, &r->params[i]));
    }
    return ft_zero_commit(r->zero, toy_init, NULL);
}

static ft_status toy_data(toy_rank *r, int64_t B)
{
    const toy *s = r->spec;
    float *x = (float *)zeroed((size_t)(B * s->width), sizeof *x);
    int32_t *labels = (int32_t *)zeroed((size_t)B, sizeof *labels);
    for (int64_t b = 0; b < B; b++) {
        int64_t sample = (r->micro_batch * s->dp + r->rank) * B + b;
        uint64_t key = ((uint64_t)(r->step + 1) << 40) + ((uint64_t)sample << 20);
        for (int64_t i = 0; i < s->width; i++)
            x[b * s->width + i] = (float)toy_uniform(key + (uint64_t)i);
        labels[b] = (int32_t)(th_mix(key + (1 << 19)) % (uint64_t)s->vocab);
    }
    ft_status status = ft_upload(r->x32, x);
    if (status == FT_OK) status = ft_upload(r->labels, labels);
    if (status == FT_OK) status = ft_copy(r->x, r->x32, r->zero->compute);
    free(x);
    free(labels);
    return status;
}

static int toy_skips(const toy_rank *r, int param)
{
    return r->spec->skips && r->spec->skips(r->step, r->micro_batch, param);
}

/* One parameter's op; *h is used up, but for the data. */
static ft_status toy_op(toy_rank *r, int i, ft_tensor **h)
{
    const toy_param *p = &r->spec->params[i];
    ft_tensor *y, *z;
    if (i == r->spec->n_params - 1)
        FT_TRY(ft_linear_cross_entropy(r->ctx, &y, *h, r->params[i], r->labels, r->scale, 0));
    else if (p->rows == 0) FT_TRY(ft_rmsnorm(r->ctx, &y, *h, r->params[i], 1e-5));
    else {
        FT_TRY(ft_linear(r->ctx, &z, *h, r->params[i], NULL));
        FT_TRY(ft_silu(r->ctx, &y, z));
        ft_tensor_free(z);
    }
    if (*h != r->x) ft_tensor_free(*h);
    *h = y;
    return FT_OK;
}

/* A unit all of whose parameters are left out is not entered at all. */
static ft_status toy_forward(toy_rank *r, ft_tensor **loss)
{
    const toy *s = r->spec;
    ft_tensor *h = r->x;
    for (int i = 0; i < s->n_params; ) {
        int unit = s->params[i].unit, end = i, used = 0;
        for (; end < s->n_params && s->params[end].unit == unit; end++) used += !toy_skips(r, end);
        if (used) FT_TRY(ft_zero_enter(r->zero, unit, end == s->n_params ? FT_ZERO_KEEP : 0));
        for (; i < end; i++)
            if (!toy_skips(r, i)) FT_TRY(toy_op(r, i, &h));
        if (used) FT_TRY(ft_zero_leave(r->zero, unit));
    }
    *loss = h;
    return FT_OK;
}

static ft_status toy_hook(toy_rank *r, th_moment moment)
{
    return r->spec->hook ? r->spec->hook(r, moment, r->spec->user) : FT_OK;
}

static ft_status toy_micro_batch(toy_rank *r, int64_t B)
{
    ft_tensor *loss = NULL;
    FT_TRY(toy_data(r, B));
    FT_TRY(ft_tape_begin(r->tape));
    FT_TRY(toy_forward(r, &loss));
    FT_TRY(ft_tape_end(r->tape));
    FT_TRY(toy_hook(r, TH_FORWARD_DONE));
    FT_TRY(ft_backward(r->tape, loss, NULL));
    FT_TRY(ft_zero_add_loss(r->zero, loss));
    ft_tensor_free(loss);
    return toy_hook(r, TH_BACKWARD_DONE);
}

/* A unit that was not entered in every micro-batch is reduced at the end of the step, or when asked
   for: here from step 2 on. */
static int toy_reduced(toy_rank *r, int param, ft_status *status)
{
    const ft__zero_unit *u = &r->zero->units[r->spec->params[param].unit];
    if (u->backwards == r->spec->micro_batches) return 1;
    if (r->step >= 2 && !u->reduced) *status = ft_zero_reduce(r->zero, r->spec->params[param].unit);
    return r->step >= 2;
}

/* Every parameter, in order; weights or gradients. Collective; rank 0 keeps them. */
static ft_status toy_export(toy_rank *r, int grads, float *values)
{
    int64_t at = 0;
    ft_status status = FT_OK;
    for (int i = 0; i < r->spec->n_params; i++) {
        int64_t n = ft_numel(r->params[i]);
        float *to = r->rank == 0 ? values + at : NULL;
        CHECK(at + n <= TOY_TOTAL);
        if (!grads) FT_TRY(ft_zero_export(r->zero, r->params[i], 0, n, to));
        else if (!(r->spec->params[i].flags & FT_ZERO_FROZEN) && toy_reduced(r, i, &status))
            FT_TRY(ft_zero_export_grad(r->zero, r->params[i], 0, n, to));
        FT_TRY(status);
        at += n;
    }
    if (r->rank == 0) r->result->total = at;
    return FT_OK;
}

static ft_status toy_step(toy_rank *r, int64_t B)
{
    const toy *s = r->spec;
    toy_result *out = r->result;
    float control[FT__CONTROL];
    ft_zero_report report;
    FT_TRY(ft_zero_step_begin(r->zero, s->micro_batches, B * s->micro_batches, &r->scale));
    FT_TRY(toy_hook(r, TH_STEP_BEGUN));
    for (r->micro_batch = 0; r->micro_batch < s->micro_batches; r->micro_batch++)
        FT_TRY(toy_micro_batch(r, B));
    FT_TRY(toy_hook(r, TH_STEP_ENDING));
    FT_TRY(toy_export(r, 1, out->grads[r->step]));
    FT_TRY(ft_zero_step_end(r->zero, s->lr));
    FT_TRY(toy_export(r, 0, out->weights[r->step + 1]));
    FT_TRY(ft_zero_report_get(r->zero, &report));
    FT_TRY(ft_download(r->zero->control, control));
    out->updates[r->rank] = report.updates;
    out->skipped[r->rank] = report.skipped;
    if (r->rank) return toy_hook(r, TH_STEP_DONE);
    out->loss[r->step] = report.loss;
    out->norm[r->step] = report.grad_norm;
    out->coef[r->step] = (double)control[FT__COEF];
    return toy_hook(r, TH_STEP_DONE);
}

typedef struct toy_job { const toy *spec; toy_result *result; } toy_job;

static ft_status toy_main(ft_ctx *ctx, void *user)
{
    const toy_job *job = (const toy_job *)user;
    const toy *s = job->spec;
    int64_t B = s->samples / (s->dp * s->micro_batches), shape[2];
    toy_rank r;
    ft_mesh mesh;
    memset(&r, 0, sizeof r);
    r.ctx = ctx;
    r.spec = s;
    r.result = job->result;
    r.rank = ft_rank(ctx);
    shape[0] = B;
    shape[1] = s->width;
    CHECK(B * s->dp * s->micro_batches == s->samples && s->steps <= TOY_STEPS);
    FT_TRY(ft_mesh_create(ctx, s->dp, 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &s->zero, &mesh, &r.zero));
    FT_TRY(toy_describe(&r));
    FT_TRY(ft_tensor_create(ctx, &r.x32, FT_F32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(ctx, &r.x, s->zero.dtype, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(ctx, &r.labels, FT_I32, 1, shape, FT_TAG_OTHER));
    FT_TRY(ft_tape_create(ctx, &r.tape));
    FT_TRY(toy_hook(&r, TH_CREATED));
    FT_TRY(toy_export(&r, 0, r.result->weights[0]));
    for (r.step = 0; r.step < s->steps; r.step++) FT_TRY(toy_step(&r, B));
    return toy_hook(&r, TH_END);
}

static toy_result *toy_run(const toy *spec)
{
    toy_result *result = (toy_result *)zeroed(1, sizeof *result);
    toy_job job;
    ft_config launch = spec->launch;
    job.spec = spec;
    job.result = result;
    launch.world = spec->dp;
    result->status = ft_launch(&launch, toy_main, &job);
    if (result->status != FT_OK)
        snprintf(result->error, sizeof result->error, "%s", ft_last_error());
    return result;
}

static toy_result *toy_ok(const toy *spec)
{
    toy_result *r = toy_run(spec);
    if (r->status != FT_OK)
        fail_msg("dp %d, stage %d, %s, %d micro-batches: %s: %s", spec->dp, spec->zero.stage,
                 ft_dtype_name(spec->zero.dtype), spec->micro_batches, ft_status_name(r->status),
                 r->error);
    return r;
}

static void toy_add(toy *s, int unit, int64_t rows, int64_t cols, int flags)
{
    toy_param *p = &s->params[s->n_params++];
    assert_true(s->n_params <= TOY_PARAMS);
    p->unit = unit;
    p->rows = rows;
    p->cols = cols;
    p->flags = flags;
}

static toy toy_default(void)
{
    toy s;
    memset(&s, 0, sizeof s);
    s.width = 10;
    s.vocab = 7;
    s.dp = 1;
    s.micro_batches = 1;
    s.steps = 3;
    s.samples = 48;
    s.lr = 0.01;
    s.zero = ft_zero_config_default();
    s.zero.weight_decay = 0.1;
    s.zero.grad_clip = 0.5;
    s.launch = ft_config_default();
    return s;
}

/* Gradients of each step, losses and weights equal the reference's, to rounding. */
static void toy_close(const toy *s, const toy_result *a, const toy_result *b, double bound)
{
    for (int i = 0; i < s->steps; i++) {
        double grad = distance(a->grads[i], b->grads[i], a->total);
        double weight = distance(a->weights[i + 1], b->weights[i + 1], a->total);
        double loss = fabs(a->loss[i] - b->loss[i]) / a->loss[i];
        double norm = fabs(a->norm[i] - b->norm[i]) / (a->norm[i] > 0 ? a->norm[i] : 1);
        if (!(grad <= bound && weight <= bound && loss <= bound && norm <= bound))
            fail_msg("dp %d, stage %d, %d micro-batches, step %d: gradients off by %.2g, weights "
                     "by %.2g, loss by %.2g, norm by %.2g; allowed %.2g", s->dp, s->zero.stage,
                     s->micro_batches, i, grad, weight, loss, norm, bound);
    }
}

typedef void (*toy_look)(const toy *, const toy_result *);

static void toy_same_bits(const toy *s, const toy_result *a, const toy_result *b)
{
    size_t bytes = (size_t)a->total * sizeof(float);
    for (int i = 0; i < s->steps; i++)
        if (memcmp(a->grads[i], b->grads[i], bytes) || a->loss[i] != b->loss[i] ||
            memcmp(a->weights[i + 1], b->weights[i + 1], bytes) || a->norm[i] != b->norm[i])
            fail_msg("dp %d, stage %d, %s, step %d: not the bits of stage 0", s->dp, s->zero.stage,
                     ft_dtype_name(s->zero.dtype), i);
}

/* Algorithm 2 of Loshchilov and Hutter 2019 (betas 0.9 and 0.95, eps 1e-8) and the clipped norm, in
   float64, from the gradients that were exported. */
static void adamw_reference(const toy *s, const toy_result *r, double bound)
{
    static double w[TOY_TOTAL], m[TOY_TOTAL], v[TOY_TOTAL];
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    for (int64_t k = 0; k < r->total; k++) w[k] = r->weights[0][k];
    for (int t = 0; t < s->steps; t++) {
        double square = 0, worst = 0;
        int64_t k = 0;
        for (int64_t i = 0; i < r->total; i++) square += (double)r->grads[t][i] * r->grads[t][i];
        double norm = sqrt(square), coef = s->zero.grad_clip / (norm + 1e-6);
        if (!(coef < 1) || s->zero.grad_clip == 0) coef = 1;
        assert_true(fabs(r->norm[t] - norm) <= 1e-6 * norm);
        assert_true(fabs(r->coef[t] - coef) <= 2e-6 * coef);
        for (int i = 0; i < s->n_params; i++) {
            const toy_param *p = &s->params[i];
            double decay = p->flags & FT_ZERO_DECAY ? s->zero.weight_decay : 0;
            for (int64_t end = k + p->cols * (p->rows ? p->rows : 1); k < end; k++) {
                double g = coef * r->grads[t][k];
                if (p->flags & FT_ZERO_FROZEN) continue;
                m[k] = 0.9 * m[k] + 0.1 * g;
                v[k] = 0.95 * v[k] + 0.05 * g * g;
                w[k] -= s->lr * decay * w[k];
                w[k] -= s->lr * m[k] / (1 - pow(0.9, t + 1)) /
                        (sqrt(v[k] / (1 - pow(0.95, t + 1))) + 1e-8);
                double off = fabs(r->weights[t + 1][k] - w[k]);
                if (off > worst) worst = off;
            }
        }
        if (!(worst <= bound))
            fail_msg("dp %d, stage %d, %s, step %d: a weight is off by %.3g, allowed %.3g", s->dp,
                     s->zero.stage, ft_dtype_name(s->zero.dtype), t, worst, bound);
    }
}

/* Every stage on `dp` ranks. One micro-batch: the bits of stage 0. `reference`, unless NULL, is
   what all must be close to; `look`, unless NULL, sees each result. The weights are those that
   follow from the gradients, unless some of these are not seen. */
static void toy_stages(toy s, int dp, const toy_result *reference, double bound, toy_look look)
{
    toy_result *zero = NULL;
    s.dp = dp;
    for (s.zero.stage = 0; s.zero.stage < 4; s.zero.stage++) {
        toy_result *r = toy_ok(&s);
        if (!zero) zero = r;
        if (s.micro_batches == 1) toy_same_bits(&s, zero, r);
        if (reference) toy_close(&s, reference, r, bound);
        if (!s.skips) adamw_reference(&s, r, 2e-6);
        if (look) look(&s, r);
        if (r != zero) free(r);
    }
    free(zero);
}

/* Every stage, on 1, 2, 3 and 8 ranks, with 1 and 2 micro-batches, against one rank of stage 0; in
   bf16 with one micro-batch. */
static void toy_everywhere(toy s, double bound, toy_look look)
{
    static const int ranks[] = {1, 2, 3, 8};
    for (int M = 1; M <= 2; M++) {
        s.micro_batches = M;
        toy_result *reference = toy_ok(&s);
        for (int i = 0; i < 4; i++)
            if (!skips(ranks[i], i + M, 2)) toy_stages(s, ranks[i], reference, bound, look);
        free(reference);
    }
    s.micro_batches = 1;
    s.zero.dtype = FT_BF16;
    for (int i = 0; i < 4; i++)
        if (!skips(ranks[i], i, 2)) toy_stages(s, ranks[i], NULL, 0, look);
}

/* ------------------------------------------------------------------------ accumulation, padding */

/* Case 1: four micro-batches of different data, and one of all of them, give the same gradients. */
static void test_accumulation(void **state)
{
    toy s = toy_default();
    (void)state;
    toy_add(&s, 0, 12, 10, FT_ZERO_DECAY);
    toy_add(&s, 1, 12, 12, FT_ZERO_DECAY);
    toy_add(&s, 1, 0, 12, 0);
    toy_add(&s, 2, 7, 12, FT_ZERO_DECAY);
    toy_result *whole = toy_ok(&s);
    for (int dp = 1; dp <= 3; dp++)
        for (int stage = 0; stage < 4; stage++)
            for (int overlap = 0; overlap < 2; overlap++) {
                s.dp = dp;
                s.micro_batches = 4;
                s.zero.stage = stage;
                s.zero.reduce_overlap = overlap ? FT_ON : FT_OFF;
                toy_result *r = toy_ok(&s);
                toy_close(&s, whole, r, 2e-6);
                free(r);
            }
    free(whole);
}

/* One unit alone: its gradients are written again while the last micro-batch's may still be on
   their way. */
static void test_accumulation_in_one_unit(void **state)
{
    toy s = toy_default();
    (void)state;
    toy_add(&s, 0, 10, 10, FT_ZERO_DECAY);
    toy_add(&s, 0, 7, 10, FT_ZERO_DECAY);
    toy_everywhere(s, 2e-6, NULL);
}

/* Case 4: most ranks hold nothing but padding. */
static void test_units_smaller_than_the_ranks(void **state)
{
    toy s = toy_default();
    (void)state;
    toy_add(&s, 0, 0, 10, 0);
    toy_add(&s, 1, 10, 10, FT_ZERO_DECAY);
    toy_add(&s, 2, 0, 10, 0);
    toy_add(&s, 3, 1, 10, FT_ZERO_DECAY);
    toy_add(&s, 3, 10, 1, FT_ZERO_DECAY);
    toy_add(&s, 4, 0, 10, FT_ZERO_DECAY);
    toy_add(&s, 5, 7, 10, 0);
    toy_everywhere(s, 3e-6, NULL);
}

/* Case 5: the same parameters in 1, 2 and 5 units: the same gradients, bit for bit, since each
   element is summed over the ranks by itself. */
static void test_unit_size_changes_nothing(void **state)
{
    static const int split[3][7] = {{0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 1, 1, 1, 1},
                                    {0, 0, 1, 2, 3, 3, 4}};
    (void)state;
    for (int dp = 1; dp <= 3; dp++)
        for (int stage = 0; stage < 4; stage++) {
            toy_result *first = NULL;
            for (int k = 0; k < 3; k++) {
                toy s = toy_default();
                s.dp = dp;
                s.zero.stage = stage;
                s.steps = 1;
                for (int i = 0; i < 6; i++)
                    toy_add(&s, split[k][i], i % 2 ? 10 : 0, 10, i % 2 ? FT_ZERO_DECAY : 0);
                toy_add(&s, split[k][6], 7, 10, FT_ZERO_DECAY);
                toy_result *r = toy_ok(&s);
                if (!first) first = r;
                assert_memory_equal(r->grads[0], first->grads[0], (size_t)r->total * sizeof(float));
                assert_true(fabs(r->norm[0] - first->norm[0]) <= 1e-6 * first->norm[0]);
                if (r != first) free(r);
            }
            free(first);
        }
}

/* Case 3: writes `value` over the padding of a buffer that holds elements first.. of a flat. */
static ft_status pad_with(ft_tensor *t, int64_t first, int64_t elems, double value)
{
    if (!t || !ft_tensor_present(t)) return FT_OK;
    int64_t n = ft_numel(t), from = elems - first < 0 ? 0 : elems - first;
    if (from >= n) return FT_OK;
    int64_t count = n - from;
    ft_tensor *part;
    FT_TRY(ft_tensor_view(t, &part, from, 1, &count));
    FT_TRY(ft_fill(part, value, ft_stream_get(t->ctx, FT_STREAM_COMPUTE)));
    ft_tensor_free(part);
    return FT_OK;
}

static ft_status pad_weights(ft_zero *z, double value)
{
    for (int u = 0; u < z->n_units; u++) {
        ft__zero_flat *f = &z->units[u].flat[0];
        int64_t mine = z->rank * f->shard, state = z->config.stage == 0 ? 0 : mine;
        CHECK(f->padded > f->elems); /* or there is nothing to see */
        FT_TRY(ft_stream_wait(z->compute, z->units[u].gather_done));
        FT_TRY(pad_with(f->full, 0, f->elems, value));
        if (z->shards_weights) FT_TRY(pad_with(f->mine, mine, f->elems, value));
        FT_TRY(pad_with(f->master, state, f->elems, value));
        for (int k = 0; k < z->config.optimizer.n_state; k++)
            FT_TRY(pad_with(f->state[k], state, f->elems, value));
    }
    z->weights_ready = ft_event_record(z->compute);
    return FT_OK;
}

static ft_status pad_grads(ft_zero *z, double value)
{
    for (int u = 0; u < z->n_units; u++) {
        ft__zero_flat *f = &z->units[u].flat[0];
        FT_TRY(ft_zero_get_full(z, u));
        FT_TRY(pad_with(f->grad, 0, f->elems, value));
        if (z->shards_grads) FT_TRY(pad_with(f->grad_mine, z->rank * f->shard, f->elems, value));
    }
    return FT_OK;
}

static ft_status pad_hook(th_rank *r, th_moment moment, void *user)
{
    double value = *(const double *)user;
    if (moment == TH_CREATED || moment == TH_STEP_DONE) return pad_weights(r->zero, value);
    return moment == TH_FORWARD_DONE ? pad_grads(r->zero, value) : FT_OK;
}

static void test_poisoned_padding(void **state)
{
    static double poison = NAN, nothing = 0;
    static const int ranks[] = {3, 8};
    (void)state;
    for (int i = 0; i < 16; i++) {
        th_options o = small();
        o.dp = ranks[i % 2];
        if (skips(o.dp, 0, 1)) continue;
        o.zero.stage = i / 2 % 4;
        o.zero.dtype = i / 8 ? FT_BF16 : FT_F32;
        o.steps = 3;
        o.model.vocab = 103;
        o.model.hidden = 20; /* no unit is a multiple of 3 * 8 or of 8 * 8 elements */
        o.model.intermediate = 30;
        o.model.heads = o.model.kv_heads = 2;
        o.model.qkv_bias = 1;
        o.model.tie_embeddings = i % 2;
        o.hook = pad_hook;
        o.user = &nothing;
        th_result *clean = run_ok(&o);
        o.user = &poison;
        th_result *r = run_ok(&o);
        same_bits(&o, clean, r);
        th_free(r);
        th_free(clean);
    }
}

/* ---------------------------------------------------------------- idle, frozen, large and small */

/* A parameter in step 1, one in the second micro-batch, a unit in step 2, which is not entered. */
static int idle(int step, int micro_batch, int param)
{
    if (param == 2) return step == 1;
    if (param == 3) return micro_batch == 1;
    return (param == 4 || param == 5) && step == 2;
}

/* Idle for a whole step: a gradient of exactly 0, not what was there before. */
static void idle_is_zero(const toy *s, const toy_result *r)
{
    int idle_ones = 0, moved = 0;
    for (int i = 110; i < 210; i++) idle_ones += r->grads[1][i] == 0, moved += r->grads[0][i] != 0;
    for (int i = 310; i < 420; i++) idle_ones += r->grads[2][i] == 0, moved += r->grads[1][i] != 0;
    if (idle_ones != 210 || moved < 200) /* by chance a gradient may be 0, in bf16 */
        fail_msg("dp %d, stage %d, %s, %d micro-batches: %d gradients are 0 where 210 are idle, %d "
                 "are not where 210 are in use", s->dp, s->zero.stage, ft_dtype_name(s->zero.dtype),
                 s->micro_batches, idle_ones, moved);
}

static void test_idle_parameters(void **state)
{
    toy s = toy_default();
    (void)state;
    s.steps = 4;
    s.skips = idle;
    toy_add(&s, 0, 10, 10, FT_ZERO_DECAY); /*   0 */
    toy_add(&s, 0, 0, 10, 0);              /* 100 */
    toy_add(&s, 0, 10, 10, FT_ZERO_DECAY); /* 110 */
    toy_add(&s, 1, 10, 10, FT_ZERO_DECAY); /* 210 */
    toy_add(&s, 2, 0, 10, 0);              /* 310 */
    toy_add(&s, 2, 10, 10, FT_ZERO_DECAY); /* 320 */
    toy_add(&s, 3, 7, 10, FT_ZERO_DECAY);  /* 420 */
    toy_everywhere(s, 3e-6, idle_is_zero);
}

/* Frozen ones keep their bits, the others do not. */
static void frozen_stand_still(const toy *s, const toy_result *r)
{
    int64_t at = 0;
    for (int i = 0; i < s->n_params; i++) {
        const toy_param *p = &s->params[i];
        int64_t n = p->cols * (p->rows ? p->rows : 1);
        for (int64_t k = at; k < at + n; k++) {
            if (p->flags & FT_ZERO_FROZEN) assert_true(r->weights[0][k] == r->weights[s->steps][k]);
            else assert_true(r->weights[0][k] != r->weights[s->steps][k]);
        }
        at += n;
    }
}

static void test_frozen(void **state)
{
    (void)state;
    for (int head = 0; head < 2; head++) {
        toy s = toy_default();
        toy_add(&s, 0, 10, 10, FT_ZERO_DECAY | FT_ZERO_FROZEN); /* nothing below needs a gradient */
        toy_add(&s, 1, 0, 10, FT_ZERO_FROZEN);
        toy_add(&s, 1, 10, 10, FT_ZERO_DECAY);
        toy_add(&s, 1, 10, 10, FT_ZERO_DECAY | FT_ZERO_FROZEN);
        toy_add(&s, 1, 0, 10, 0);
        toy_add(&s, 2, 10, 10, FT_ZERO_FROZEN); /* a whole unit, in the middle */
        toy_add(&s, 2, 0, 10, FT_ZERO_FROZEN);
        toy_add(&s, 3, 0, 10, 0);
        toy_add(&s, 3, 10, 10, FT_ZERO_DECAY | FT_ZERO_FROZEN);
        toy_add(&s, 3, 10, 10, FT_ZERO_DECAY);
        toy_add(&s, 4, 7, 10, head ? FT_ZERO_FROZEN : FT_ZERO_DECAY);
        toy_everywhere(s, 3e-6, frozen_stand_still);
    }
}

/* One unit 54 times the size of the others. */
static void test_large_unit(void **state)
{
    toy s = toy_default();
    (void)state;
    toy_add(&s, 0, 10, 10, FT_ZERO_DECAY);
    toy_add(&s, 1, 270, 10, FT_ZERO_DECAY);
    toy_add(&s, 1, 10, 270, FT_ZERO_DECAY);
    toy_add(&s, 2, 10, 10, FT_ZERO_DECAY);
    toy_add(&s, 3, 10, 10, 0);
    toy_everywhere(s, 5e-6, NULL);
}

/* --------------------------------------------------------------------------- AdamW and the norm */

/* Case 8: on 2, 4 and 8 ranks element 128 of this unit begins a shard, inside the norm: decay goes
   where the flags say, with the norm's and the matrices' flags as usual, and exchanged. */
static void test_adamw(void **state)
{
    static const int ranks[] = {1, 2, 3, 4, 8};
    (void)state;
    for (int i = 0; i < 5 * 4 * 2 * 2; i++) {
        toy s = toy_default();
        int matrix = i / 20 % 2 ? 0 : FT_ZERO_DECAY, norm = FT_ZERO_DECAY - matrix;
        s.width = 8;
        s.steps = 10;
        s.dp = ranks[i % 5];
        if (skips(s.dp, i, 3)) continue;
        s.zero.stage = i / 5 % 4;
        s.zero.dtype = i / 40 ? FT_BF16 : FT_F32;
        s.zero.weight_decay = 0.5;
        s.zero.grad_clip = i % 2 ? 0.3 : 0; /* the norms are around 0.5 */
        toy_add(&s, 0, 15, 8, matrix); /* 0..119 */
        toy_add(&s, 0, 0, 15, norm);   /* 120..134 */
        toy_add(&s, 0, 8, 15, matrix); /* 135..254 */
        toy_add(&s, 1, 0, 8, norm);
        toy_add(&s, 1, 7, 8, matrix);
        if (s.dp == 2 || s.dp == 4 || s.dp == 8)
            assert_int_equal(128 % up_to((255 + s.dp - 1) / s.dp, 8), 0);
        toy_result *r = toy_ok(&s);
        assert_int_equal(r->updates[0], 10);
        /* An update is computed in fp32: about 4 roundings of weights below 2 a step. */
        adamw_reference(&s, r, 2e-6);
        free(r);
    }
}

/* The masters are fp32; the bf16 weights are theirs, rounded, on every rank. */
static ft_status weights_are_rounded_masters(toy_rank *r, th_moment moment, void *user)
{
    float master[TOY_TOTAL];
    uint16_t weight[TOY_TOTAL];
    (void)user;
    if (moment != TH_END) return FT_OK;
    for (int i = 0; i < r->spec->n_params; i++) {
        int64_t n = ft_numel(r->params[i]);
        FT_TRY(ft_zero_export(r->zero, r->params[i], 0, n, master));
        FT_TRY(ft_zero_gather(r->zero, r->spec->params[i].unit));
        FT_TRY(ft_zero_get(r->zero, r->params[i]));
        FT_TRY(ft_download(r->params[i], weight));
        FT_TRY(ft_zero_release(r->zero, r->spec->params[i].unit));
        int between = 0;
        for (int64_t k = 0; k < n; k++) {
            CHECK(weight[k] == ft_bf16_from_f32(master[k]));
            between += ft_f32_from_bf16(weight[k]) != master[k];
        }
        CHECK(between > n / 2); /* the masters do have more digits */
    }
    return FT_OK;
}

static void test_bf16_masters(void **state)
{
    toy s = toy_default();
    (void)state;
    toy_add(&s, 0, 10, 10, FT_ZERO_DECAY);
    toy_add(&s, 0, 0, 10, 0);
    toy_add(&s, 1, 7, 10, FT_ZERO_DECAY);
    s.zero.dtype = FT_BF16;
    s.hook = weights_are_rounded_masters;
    for (int dp = 1; dp <= 4; dp += 3) toy_stages(s, dp, NULL, 0, NULL);
}

/* Rank 1 alone gets a loss that is not finite, in step 1. */
static ft_status one_bad_rank(toy_rank *r, th_moment moment, void *user)
{
    float bad = *(const float *)user;
    if (moment == TH_STEP_BEGUN && r->step == 1 && r->rank == r->spec->dp - 1)
        return ft_upload(r->scale, &bad);
    return FT_OK;
}

/* The update is skipped on every rank alike: no weight changes a bit, moments and the number of
   updates neither: the next step continues as if the bad one had not been. */
static void test_not_finite(void **state)
{
    static float bad[] = {INFINITY, NAN};
    static const int ranks[] = {1, 2, 3, 8};
    (void)state;
    for (int i = 0; i < 32; i++) {
        toy s = toy_default();
        s.steps = 4;
        s.dp = ranks[i % 4];
        if (skips(s.dp, i, 3)) continue;
        s.zero.stage = i / 4 % 4;
        s.zero.dtype = i % 8 ? FT_F32 : FT_BF16;
        s.hook = one_bad_rank;
        s.user = &bad[i / 16];
        toy_add(&s, 0, 10, 10, FT_ZERO_DECAY);
        toy_add(&s, 0, 0, 10, 0);
        toy_add(&s, 1, 7, 10, FT_ZERO_DECAY);
        toy_result *r = toy_ok(&s);
        size_t bytes = (size_t)r->total * sizeof(float);
        assert_true(!isfinite(r->norm[1]) && isfinite(r->norm[2]) && isfinite(r->norm[3]));
        assert_memory_equal(r->weights[1], r->weights[2], bytes);
        assert_memory_not_equal(r->weights[2], r->weights[3], bytes);
        for (int rank = 0; rank < s.dp; rank++) {
            assert_int_equal(r->skipped[rank], 1);
            assert_int_equal(r->updates[rank], 3);
        }
        /* Without the bad step the reference sees the steps that were. */
        memmove(r->grads[1], r->grads[2], 2 * sizeof r->grads[0]);
        memmove(r->weights[2], r->weights[3], 2 * sizeof r->weights[0]);
        memmove(&r->norm[1], &r->norm[2], 2 * sizeof r->norm[0]);
        memmove(&r->coef[1], &r->coef[2], 2 * sizeof r->coef[0]);
        s.steps = 3;
        adamw_reference(&s, r, 2e-6);
        free(r);
    }
}

/* ---------------------------------------------------------------------------- tokens that count */

/* Gradients of a step of a Llama, whole, from rank 0. */
typedef struct capture {
    th_data_fn data;
    float *grads[TH_STEPS];
    int64_t total;
} capture;

static ft_status capture_hook(th_rank *r, th_moment moment, void *user)
{
    capture *c = (capture *)user;
    int64_t at = 0, total = ft_llama_param_total(&r->job->options->model);
    if (moment != TH_STEP_ENDING) return FT_OK;
    if (r->rank == 0) {
        c->total = total;
        c->grads[r->step] = (float *)zeroed((size_t)total, sizeof(float));
    }
    for (int i = 0; i < ft_llama_param_count(r->model); i++) {
        const ft_llama_param *p = ft_llama_param_at(r->model, i);
        FT_TRY(ft_llama_export_grad(r->model, p, r->rank ? NULL : c->grads[r->step] + at));
        at += p->shape[0] * p->shape[1];
    }
    return FT_OK;
}

static void captured_data(void *user, int step, int sample, int64_t T, int32_t *tokens,
                          int32_t *labels)
{
    ((const capture *)user)->data(NULL, step, sample, T, tokens, labels);
}

static th_result *run_captured(th_options *o, th_data_fn data, capture *c)
{
    memset(c, 0, sizeof *c);
    c->data = data;
    o->data = captured_data;
    o->hook = capture_hook;
    o->user = c;
    return run_ok(o);
}

static void capture_free(capture *c)
{
    for (int i = 0; i < TH_STEPS; i++) free(c->grads[i]);
}

/* The data as given, on D ranks in M micro-batches and in every stage: loss and gradients of one
   rank with one batch. */
static void check_split(th_options o, int dp, int M, th_data_fn data)
{
    capture whole, part;
    o.dp = o.micro_batches = 1;
    o.zero.stage = 0;
    th_result *reference = run_captured(&o, data, &whole);
    for (int stage = 0; stage < 4; stage++) {
        o.dp = dp;
        o.micro_batches = M;
        o.zero.stage = stage;
        th_result *r = run_captured(&o, data, &part);
        close_losses(&o, reference, r, 2e-6);
        for (int t = 0; t < o.steps; t++) {
            double off = distance(whole.grads[t], part.grads[t], whole.total);
            double norm = fabs(reference->norm[t] - r->norm[t]);
            if (!(off <= 1e-5 && norm <= 1e-5 * reference->norm[t]))
                fail_msg("%s: step %d: gradients off by %.3g, norm %.9g, expected %.9g",
                         describe(&o), t, off, r->norm[t], reference->norm[t]);
            for (int64_t i = 0; i < part.total; i++) assert_true(isfinite(part.grads[t][i]));
        }
        capture_free(&part);
        th_free(r);
    }
    capture_free(&whole);
    th_free(reference);
}

/* All but the first `valid` labels of a row are ignored. */
static void first_labels(int step, int sample, int64_t T, int32_t *tokens, int32_t *labels,
                         int64_t valid)
{
    th_data(NULL, step, sample, T, tokens, labels);
    for (int64_t t = valid; t < T; t++) labels[t] = -100;
}

static void five_and_one(void *user, int step, int sample, int64_t T, int32_t *tokens,
                         int32_t *labels)
{
    (void)user;
    first_labels(step, sample, T, tokens, labels, sample % 2 ? 1 : 5);
}

static void last_rows_are_ignored(void *user, int step, int sample, int64_t T, int32_t *tokens,
                                  int32_t *labels)
{
    (void)user;
    first_labels(step, sample, T, tokens, labels, sample < 4 ? T : 0);
}

static void nobody_counts(void *user, int step, int sample, int64_t T, int32_t *tokens,
                          int32_t *labels)
{
    (void)user;
    first_labels(step, sample, T, tokens, labels, 0);
}

/* Case 9. Sample m D + rank is the only row of its micro-batch: odd ones are rank 1's with D = 2,
   the second micro-batch's with D = 1 and M = 2. */
static void test_uneven_tokens(void **state)
{
    th_options o = small();
    (void)state;
    o.steps = 2;
    o.samples = 2;
    check_split(o, 2, 1, five_and_one);
    check_split(o, 1, 2, five_and_one);
    o.samples = 12;
    check_split(o, 3, 4, five_and_one);
}

/* Case 10: rows 4..7 are the second rank's with D = 2, M = 1; with M = 2 the last micro-batch's. */
static void test_ignored_rank(void **state)
{
    th_options o = small();
    (void)state;
    o.steps = 2;
    o.samples = 8;
    check_split(o, 2, 1, last_rows_are_ignored);
    check_split(o, 8, 1, last_rows_are_ignored);
    check_split(o, 2, 2, last_rows_are_ignored);
}

static void test_nobody_counts(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        capture c;
        th_options o = small();
        o.dp = 3;
        o.steps = 2;
        o.zero.stage = stage;
        th_result *r = run_captured(&o, nobody_counts, &c);
        for (int t = 0; t < 2; t++) {
            assert_true(r->loss[t] == 0 && r->norm[t] == 0);
            for (int64_t i = 0; i < c.total; i++) assert_true(c.grads[t][i] == 0);
        }
        assert_int_equal(r->skipped, 0);
        capture_free(&c);
        th_free(r);
    }
}

/* Case 2: even samples use the lower half of the vocabulary, odd ones the upper. */
static void halves(void *user, int step, int sample, int64_t T, int32_t *tokens, int32_t *labels)
{
    th_data(user, step, sample, T, tokens, labels);
    for (int64_t t = 0; t < T; t++) {
        tokens[t] = tokens[t] % 48 + sample / 4 * 48;
        labels[t] = labels[t] % 48 + sample / 4 * 48;
    }
}

static void lower_half_later(void *user, int step, int sample, int64_t T, int32_t *tokens,
                             int32_t *labels)
{
    halves(user, step, step == 0 ? sample : sample % 4, T, tokens, labels);
}

/* Whether a token stands in the step's data. */
static int occurs(th_data_fn data, const th_options *o, int step, int token)
{
    int32_t tokens[64], labels[64];
    for (int sample = 0; sample < o->samples; sample++) {
        data(NULL, step, sample, o->T, tokens, labels);
        for (int64_t t = 0; t < o->T; t++)
            if (tokens[t] == token) return 1;
    }
    return 0;
}

/* The embedding has a gradient where a token occurred and exactly 0 elsewhere, also after a step in
   which it did occur. */
static void test_unbalanced_vocabulary(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        capture c;
        th_options o = small();
        o.model.tie_embeddings = stage % 2;
        o.samples = 8;
        o.steps = 2;
        if (stage < 2) check_split(o, 2, 2, halves);
        if (stage < 2) check_split(o, 1, 2, halves);
        if (stage < 2) check_split(o, 2, 2, lower_half_later);
        o.model.tie_embeddings = 0;
        o.dp = 2;
        o.micro_batches = 2;
        o.zero.stage = stage;
        th_free(run_captured(&o, lower_half_later, &c));
        for (int step = 0; step < 2; step++)
            for (int64_t i = 0; i < o.model.vocab * o.model.hidden; i++)
                assert_int_equal(c.grads[step][i] != 0, occurs(lower_half_later, &o, step,
                                                               (int)(i / o.model.hidden)));
        assert_true(occurs(lower_half_later, &o, 0, 50) && !occurs(lower_half_later, &o, 1, 50));
        capture_free(&c);
    }
}

/* Case 12: the norm that clips is that of the gradients exported, whatever the layout. */
static void test_norm(void **state)
{
    double one[2] = {0, 0};
    (void)state;
    for (int i = 0; i < LAYOUTS * 4 * 2; i++) {
        capture c;
        th_options o = small();
        int tied = i / (LAYOUTS * 4);
        o.dp = layouts[i % LAYOUTS];
        if (skips(o.dp, i, 3)) continue;
        o.zero.stage = i / LAYOUTS % 4;
        o.model.tie_embeddings = tied;
        o.steps = 1;
        th_result *r = run_captured(&o, th_data, &c);
        double square = 0;
        for (int64_t k = 0; k < c.total; k++) square += (double)c.grads[0][k] * c.grads[0][k];
        if (one[tied] == 0) one[tied] = sqrt(square);
        if (!(fabs(r->norm[0] - sqrt(square)) <= 1e-6 * sqrt(square) &&
              fabs(r->norm[0] - one[tied]) <= 1e-5 * one[tied]))
            fail_msg("%s: norm %.9g, of the gradients %.9g, on one rank %.9g", describe(&o),
                     r->norm[0], sqrt(square), one[tied]);
        capture_free(&c);
        th_free(r);
    }
}

/* ---------------------------------------------------------------------------- labels and logits */

typedef struct bad_value { int32_t value; int label, sample; int64_t at; } bad_value;

static void bad_data(void *user, int step, int sample, int64_t T, int32_t *tokens, int32_t *labels)
{
    const bad_value *bad = (const bad_value *)user;
    th_data(NULL, step, sample, T, tokens, labels);
    if (sample == bad->sample && step == 1) (bad->label ? labels : tokens)[bad->at] = bad->value;
}

/* Case 11: refused, with the position; a rank's failure ends them all. */
static void test_bad_labels_and_tokens(void **state)
{
    static const int32_t values[] = {97, -1, -99, -101, 2147483647, -2147483647 - 1};
    (void)state;
    for (int i = 0; i < 6 * 2 * 4; i++) {
        th_options o = small();
        bad_value bad = {values[i % 6], i / 6 % 2, 5, 6};
        char position[32];
        if (skips(1, i, 5)) continue;
        o.dp = 4; /* 8 samples: row 1 of rank 2 */
        o.samples = 8;
        o.steps = 2;
        o.zero.stage = i / 12;
        o.data = bad_data;
        o.user = &bad;
        th_result *r = th_run(&o);
        snprintf(position, sizeof position, "%d", 8 + 6);
        if (r->status != FT_ERR_DATA || !strstr(r->error, position))
            fail_msg("%s: %s %d gave '%s': %s", describe(&o), bad.label ? "label" : "token",
                     (int)bad.value, ft_status_name(r->status), r->error);
        th_free(r);
    }
}

/* Case 27. The loss is that of the logits at each position and the label given for it: nothing
   shifts twice; and a logit depends on its own row up to its own position, no further. */
static ft_status logits_of(th_rank *r, float *logits)
{
    ft_tensor *l;
    FT_TRY(ft_llama_logits(r->model, r->tokens, 0, &l));
    FT_TRY(ft_download(l, logits));
    ft_tensor_free(l);
    return FT_OK;
}

static ft_status targets_hook(th_rank *r, th_moment moment, void *user)
{
    enum { B = 3, T = 8, V = 97 };
    static float before[B * T * V], after[B * T * V];
    int32_t tokens[B * T], labels[B * T];
    double sum = 0, counted = 0;
    (void)user;
    if (moment != TH_STEP_BEGUN) return FT_OK;
    for (int b = 0; b < B; b++) th_data(NULL, 0, b, T, tokens + b * T, labels + b * T);
    labels[4] = labels[T + 7] = -100;
    FT_TRY(ft_upload(r->tokens, tokens));
    FT_TRY(ft_upload(r->labels, labels));
    FT_TRY(logits_of(r, before));
    for (int i = 0; i < B * T; i++) {
        double z = 0;
        if (labels[i] == -100) continue;
        for (int v = 0; v < V; v++) z += exp((double)before[i * V + v]);
        sum += log(z) - (double)before[i * V + labels[i]];
        counted++;
    }
    float loss;
    ft_tensor *t;
    FT_TRY(ft_llama_loss(r->model, r->tokens, r->labels, NULL, NULL, &t));
    FT_TRY(ft_download(t, &loss));
    ft_tensor_free(t);
    CHECK(fabs((double)loss - sum / counted) <= 1e-6 * sum / counted);
    tokens[T + 4] = (tokens[T + 4] + 1) % V;
    FT_TRY(ft_upload(r->tokens, tokens));
    FT_TRY(logits_of(r, after));
    for (int i = 0; i < B * T; i++) {
        int changed = memcmp(before + i * V, after + i * V, V * sizeof(float)) != 0;
        CHECK(changed == (i >= T + 4 && i < 2 * T));
    }
    tokens[T + 4] = (tokens[T + 4] + V - 1) % V; /* as before, for the step that follows */
    return ft_upload(r->tokens, tokens);
}

static void test_targets(void **state)
{
    th_options o = small();
    (void)state;
    o.samples = 3;
    o.steps = 1;
    o.model.init_std = 0.3; /* logits that differ */
    o.hook = targets_hook;
    th_free(run_ok(&o));
}

/* ---------------------------------------------------------------------- recompute under stage 3 */

/* Case 19: after a backward nothing is gathered and nobody holds a unit; in between never more than
   the running units and those fetched ahead. */
static ft_status nothing_gathered(th_rank *r, th_moment moment, void *user)
{
    ft_mem_stats m;
    int D = r->job->options->dp;
    (void)user;
    ft_mem_get(r->ctx, &m);
    if (moment == TH_FORWARD_DONE) CHECK((m.live[FT_TAG_GATHER] > 0) == (D > 1)); /* FT_ZERO_KEEP */
    if (moment != TH_BACKWARD_DONE) return FT_OK;
    CHECK(m.live[FT_TAG_GATHER] == 0);
    for (int u = 0; u < r->zero->n_units; u++) {
        CHECK(r->zero->units[u].gathered == 0);
        FAILS(ft_zero_release(r->zero, u), FT_ERR_STATE);
    }
    return FT_OK;
}

static void test_recompute_and_gather(void **state)
{
    (void)state;
    for (int i = 0; i < POLICIES * 3 * 2; i++) {
        ft_sac sac[8];
        th_options o = small();
        if (skips(1, i, 3)) continue;
        o.dp = i / POLICIES % 3 + 1;
        o.micro_batches = 2;
        o.steps = 2;
        o.model.tie_embeddings = i / (POLICIES * 3);
        o.zero.stage = 3;
        th_result *plain = run_ok(&o);
        o.sac = policy(&o, sac, i % POLICIES);
        o.hook = nothing_gathered;
        th_result *r = run_ok(&o);
        same_bits(&o, plain, r);
        assert_true((r->flops[0].replay > 0) == (i % POLICIES != POLICY_NONE));
        th_free(plain);
        th_free(r);
    }
}

/* --------------------------------------------------------------------------------- state errors */

typedef struct bench { /* two units of one matrix each, and what a step needs */
    ft_ctx *ctx;
    ft_zero *zero;
    ft_tape *tape;
    ft_tensor *w[2], *x, *scale;
} bench;

static ft_status bench_begin(bench *b, ft_ctx *ctx, const ft_zero_config *config)
{
    ft_mesh mesh;
    memset(b, 0, sizeof *b);
    b->ctx = ctx;
    FT_TRY(ft_mesh_create(ctx, ft_world(ctx), 1, 1, &mesh));
    return ft_zero_create(ctx, config, &mesh, &b->zero);
}

static ft_status bench_commit_as(bench *b, int second_flags)
{
    static const int64_t shape[2] = {5, 5};
    int unit;
    for (int i = 0; i < 2; i++) {
        FT_TRY(ft_zero_unit(b->zero, i ? "second" : "first", &unit));
        FT_TRY(ft_zero_param(b->zero, i ? "w1" : "w0", 2, shape, i ? second_flags : 0, &b->w[i]));
    }
    FT_TRY(ft_zero_commit(b->zero, toy_init, NULL));
    FT_TRY(ft_tensor_create(b->ctx, &b->x, FT_F32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_fill(b->x, 0.5, b->zero->compute));
    return ft_tape_create(b->ctx, &b->tape);
}

static ft_status bench_commit(bench *b) { return bench_commit_as(b, 0); }

static ft_status bench_forward(bench *b, ft_tensor **loss)
{
    ft_tensor *y, *z;
    FT_TRY(ft_tape_begin(b->tape));
    FT_TRY(ft_zero_enter(b->zero, 0, 0));
    FT_TRY(ft_linear(b->ctx, &y, b->x, b->w[0], NULL));
    FT_TRY(ft_zero_leave(b->zero, 0));
    FT_TRY(ft_zero_enter(b->zero, 1, FT_ZERO_KEEP));
    FT_TRY(ft_linear(b->ctx, &z, y, b->w[1], NULL));
    ft_tensor_free(y);
    FT_TRY(ft_mean(b->ctx, loss, z));
    ft_tensor_free(z);
    FT_TRY(ft_zero_leave(b->zero, 1));
    return ft_tape_end(b->tape);
}

static ft_status bench_backward(bench *b, ft_tensor *loss)
{
    FT_TRY(ft_backward(b->tape, loss, NULL));
    FT_TRY(ft_zero_add_loss(b->zero, loss));
    ft_tensor_free(loss);
    return FT_OK;
}

static ft_status order_of_description(ft_ctx *ctx, void *user)
{
    static const int64_t shape[2] = {5, 5};
    bench b;
    ft_tensor *p;
    ft_zero_formula formula;
    ft_zero_use use = {1, 0, 0};
    int unit;
    FT_TRY(bench_begin(&b, ctx, (const ft_zero_config *)user));
    FAILS(ft_zero_param(b.zero, "early", 2, shape, 0, &p), FT_ERR_STATE);
    FAILS(ft_zero_commit(b.zero, toy_init, NULL), FT_ERR_STATE);
    FAILS(ft_zero_step_begin(b.zero, 1, 5, NULL), FT_ERR_STATE);
    FAILS(ft_zero_gather(b.zero, 0), FT_ERR_STATE);
    FAILS(ft_zero_enter(b.zero, 0, 0), FT_ERR_STATE);
    FAILS(ft_zero_formula_get(b.zero, &use, &formula), FT_ERR_STATE);
    FT_TRY(bench_commit(&b));
    FAILS(ft_zero_unit(b.zero, "late", &unit), FT_ERR_STATE);
    FAILS(ft_zero_param(b.zero, "late", 2, shape, 0, &p), FT_ERR_STATE);
    FAILS(ft_zero_commit(b.zero, toy_init, NULL), FT_ERR_STATE);
    return FT_OK;
}

static ft_status order_of_weights(ft_ctx *ctx, void *user)
{
    bench b;
    FT_TRY(bench_begin(&b, ctx, (const ft_zero_config *)user));
    FT_TRY(bench_commit(&b));
    FAILS(ft_zero_get(b.zero, b.w[0]), FT_ERR_STATE);
    FAILS(ft_zero_get(b.zero, b.x), FT_ERR_ARG);
    FAILS(ft_zero_release(b.zero, 0), FT_ERR_STATE);
    FAILS(ft_zero_gather(b.zero, -1), FT_ERR_ARG);
    FAILS(ft_zero_gather(b.zero, 2), FT_ERR_ARG);
    FT_TRY(ft_zero_gather(b.zero, 0));
    FT_TRY(ft_zero_gather(b.zero, 0));
    FT_TRY(ft_zero_get(b.zero, b.w[0]));
    FAILS(ft_zero_get(b.zero, b.w[1]), FT_ERR_STATE);
    FT_TRY(ft_zero_release(b.zero, 0));
    FT_TRY(ft_zero_get(b.zero, b.w[0])); /* gathered twice, released once */
    CHECK(ft_tensor_present(b.w[0]));
    FT_TRY(ft_zero_release(b.zero, 0));
    FAILS(ft_zero_get(b.zero, b.w[0]), FT_ERR_STATE);
    CHECK(ft_tensor_present(b.w[0]) == !b.zero->shards_weights);
    FAILS(ft_zero_leave(b.zero, 0), FT_ERR_STATE);
    FT_TRY(ft_zero_enter(b.zero, 0, 0));
    FT_TRY(ft_zero_enter(b.zero, 1, 0));
    FAILS(ft_zero_leave(b.zero, 0), FT_ERR_STATE);
    FT_TRY(ft_zero_leave(b.zero, 1));
    FT_TRY(ft_zero_leave(b.zero, 0));
    FAILS(ft_zero_leave(b.zero, 0), FT_ERR_STATE);
    for (int i = 0; i < 8; i++) FT_TRY(ft_zero_enter(b.zero, 0, 0));
    FAILS(ft_zero_enter(b.zero, 0, 0), FT_ERR_STATE);
    for (int i = 0; i < 8; i++) FT_TRY(ft_zero_leave(b.zero, 0));
    FAILS(ft_zero_export(b.zero, b.x, 0, 1, NULL), FT_ERR_ARG);
    FAILS(ft_zero_export(b.zero, b.w[0], -1, 1, NULL), FT_ERR_ARG);
    FAILS(ft_zero_export(b.zero, b.w[0], 20, 6, NULL), FT_ERR_ARG);
    FAILS(ft_zero_export(b.zero, b.w[0], 0, 0, NULL), FT_ERR_ARG);
    FAILS(ft_zero_import(b.zero, b.w[0], 25, 1, NULL), FT_ERR_ARG);
    return FT_OK;
}

static ft_status order_of_gradients(ft_ctx *ctx, void *user)
{
    bench b;
    ft_tensor *shard, *loss;
    FT_TRY(bench_begin(&b, ctx, (const ft_zero_config *)user));
    FT_TRY(bench_commit(&b));
    FAILS(ft_zero_get_full(b.zero, 0), FT_ERR_STATE);
    FAILS(ft_zero_reduce(b.zero, 0), FT_ERR_STATE);
    FAILS(ft_zero_add_loss(b.zero, b.x), FT_ERR_STATE);
    FAILS(ft_zero_step_end(b.zero, 0.1), FT_ERR_STATE);
    FAILS(ft_zero_step_begin(b.zero, 0, 5, NULL), FT_ERR_ARG);
    FAILS(ft_zero_step_begin(b.zero, 1, -1, NULL), FT_ERR_ARG);
    FT_TRY(ft_zero_step_begin(b.zero, 1, 5, &b.scale));
    FAILS(ft_zero_step_begin(b.zero, 1, 5, &b.scale), FT_ERR_STATE);
    FAILS(ft_zero_get_shard(b.zero, 0, &shard), FT_ERR_STATE);
    FAILS(ft_zero_export_grad(b.zero, b.w[0], 0, 25, NULL), FT_ERR_STATE);
    FT_TRY(ft_zero_get_full(b.zero, 0));
    FAILS(ft_zero_get_shard(b.zero, 0, &shard), FT_ERR_STATE);
    FT_TRY(ft_zero_reduce(b.zero, 0));
    FT_TRY(ft_zero_get_shard(b.zero, 0, &shard));
    FAILS(ft_zero_reduce(b.zero, 0), FT_ERR_STATE);   /* the sum of sums */
    FAILS(ft_zero_get_full(b.zero, 0), FT_ERR_STATE); /* it would be lost, or counted twice */
    FT_TRY(ft_zero_gather(b.zero, 1));
    FAILS(ft_zero_step_end(b.zero, 0.1), FT_ERR_STATE);
    FT_TRY(ft_zero_release(b.zero, 1));
    FT_TRY(ft_zero_step_end(b.zero, 0.1));
    FAILS(ft_zero_get_shard(b.zero, 0, &shard), FT_ERR_STATE);
    FAILS(ft_zero_step_end(b.zero, 0.1), FT_ERR_STATE);
    /* After all that a step works. */
    FT_TRY(ft_zero_step_begin(b.zero, 1, 5, &b.scale));
    FT_TRY(bench_forward(&b, &loss));
    FAILS(ft_zero_step_end(b.zero, 0.1), FT_ERR_STATE); /* a forward is open */
    FT_TRY(bench_backward(&b, loss));
    return ft_zero_step_end(b.zero, 0.1);
}

/* The second backward of a step that announced one. */
static ft_status one_backward_too_many(ft_ctx *ctx, void *user)
{
    bench b;
    ft_tensor *loss;
    FT_TRY(bench_begin(&b, ctx, (const ft_zero_config *)user));
    FT_TRY(bench_commit(&b));
    FT_TRY(ft_zero_step_begin(b.zero, 1, 5, &b.scale));
    FT_TRY(bench_forward(&b, &loss));
    FT_TRY(bench_backward(&b, loss));
    FT_TRY(bench_forward(&b, &loss));
    FAILS(ft_backward(b.tape, loss, NULL), FT_ERR_STATE);
    return FT_OK;
}

/* A forward that is to have a backward belongs into a step; without a tape it may be anywhere. */
static ft_status forward_outside_a_step(ft_ctx *ctx, void *user)
{
    bench b;
    FT_TRY(bench_begin(&b, ctx, (const ft_zero_config *)user));
    FT_TRY(bench_commit(&b));
    FT_TRY(ft_zero_enter(b.zero, 0, 0));
    FT_TRY(ft_zero_leave(b.zero, 0));
    FT_TRY(ft_tape_begin(b.tape));
    FAILS(ft_zero_enter(b.zero, 0, 0), FT_ERR_STATE);
    return ft_tape_end(b.tape);
}

enum { GIVE_UP_NONE = 0, GIVE_UP_WHOLE, GIVE_UP_OPEN, GIVE_UP_FREED, GIVE_UPS };

/* A forward whose backward never comes: whole; or broken off inside its units; or with its tape. */
static ft_status give_up(bench *b, int how)
{
    ft_tensor *loss, *y;
    if (how == GIVE_UP_NONE) return FT_OK;
    if (how != GIVE_UP_OPEN) {
        FT_TRY(bench_forward(b, &loss));
        ft_tensor_free(loss);
        FAILS(ft_zero_step_end(b->zero, 0.1), FT_ERR_STATE); /* it might come yet */
        if (how == GIVE_UP_WHOLE) return ft_tape_reset(b->tape);
        ft_tape_free(b->tape);
        return ft_tape_create(b->ctx, &b->tape);
    }
    FT_TRY(ft_tape_begin(b->tape));
    FT_TRY(ft_zero_enter(b->zero, 1, FT_ZERO_KEEP));
    FT_TRY(ft_zero_enter(b->zero, 0, 0));
    FT_TRY(ft_linear(b->ctx, &y, b->x, b->w[0], NULL));
    ft_tensor_free(y);
    FT_TRY(ft_tape_reset(b->tape));
    FAILS(ft_zero_leave(b->zero, 0), FT_ERR_STATE);
    return FT_OK;
}

/* Two micro-batches, before and between which forwards are given up, are as two. */
static ft_status step_with_given_up(bench *b, int how, float *weights)
{
    ft_tensor *loss;
    ft_mem_stats before, after;
    ft_mem_get(b->ctx, &before);
    FT_TRY(ft_zero_step_begin(b->zero, 2, 5, &b->scale));
    for (int m = 0; m < 2; m++) {
        FT_TRY(give_up(b, how));
        FT_TRY(bench_forward(b, &loss));
        FT_TRY(bench_backward(b, loss));
    }
    FT_TRY(give_up(b, how));
    FT_TRY(ft_zero_step_end(b->zero, 0.1));
    FT_TRY(ft_sync(b->ctx));
    ft_mem_get(b->ctx, &after);
    CHECK(memcmp(before.live, after.live, sizeof after.live) == 0);
    for (int u = 0; u < 2; u++)
        FT_TRY(ft_zero_export(b->zero, b->w[u], 0, 25, weights + 25 * u));
    return FT_OK;
}

static ft_status forward_given_up(ft_ctx *ctx, void *user)
{
    float weights[GIVE_UPS][50];
    for (int how = 0; how < GIVE_UPS; how++) {
        bench b;
        FT_TRY(bench_begin(&b, ctx, (const ft_zero_config *)user));
        FT_TRY(bench_commit(&b));
        FT_TRY(step_with_given_up(&b, how, weights[how]));
        CHECK(memcmp(weights[how], weights[0], sizeof weights[0]) == 0);
    }
    return FT_OK;
}

static ft_status no_first_half(ft_ctx *ctx, void *user, ft_phase phase)
{
    (void)ctx;
    (void)user;
    return phase == FT_PHASE_INPUTS ? ft_error(FT_ERR_STATE, "a first half is refused") : FT_OK;
}

/* A first half that fails inside unit 0, which it has gathered. */
static ft_status half_that_fails(bench *b)
{
    ft_tensor *y, *z, *loss;
    FT_TRY(ft_tape_begin(b->tape));
    FT_TRY(ft_zero_enter(b->zero, 1, 0));
    FT_TRY(ft_linear(b->ctx, &y, b->x, b->w[1], NULL));
    FT_TRY(ft_zero_leave(b->zero, 1));
    FT_TRY(ft_zero_enter(b->zero, 0, 0));
    FT_TRY(ft_tape_mark(b->ctx, no_first_half, NULL));
    FT_TRY(ft_linear(b->ctx, &z, y, b->w[0], NULL));
    FT_TRY(ft_zero_leave(b->zero, 0));
    FT_TRY(ft_mean(b->ctx, &loss, z));
    ft_tensor_free(y);
    ft_tensor_free(z);
    FT_TRY(ft_tape_end(b->tape));
    FAILS(ft_backward_inputs(b->tape, loss, NULL), FT_ERR_STATE);
    CHECK(b->zero->first_halves == 1 && b->zero->units[0].gathered == 1);
    ft_tensor_free(loss);
    return ft_tape_reset(b->tape);
}

/* Given up between the halves of its backward: the step can end, and the next is as any. */
static ft_status halves_given_up(ft_ctx *ctx, void *user)
{
    bench b;
    ft_tensor *loss;
    FT_TRY(bench_begin(&b, ctx, (const ft_zero_config *)user));
    FT_TRY(bench_commit(&b));
    for (int step = 0; step < 2; step++) {
        FT_TRY(ft_zero_step_begin(b.zero, 1, 5, &b.scale));
        FT_TRY(half_that_fails(&b));
        FT_TRY(bench_forward(&b, &loss));
        FT_TRY(ft_backward_inputs(b.tape, loss, NULL));
        if (step) FT_TRY(ft_backward_weights(b.tape));
        else FT_TRY(ft_tape_reset(b.tape));
        CHECK(b.zero->first_halves == 0 && !b.zero->regions && !b.zero->units[0].gathered);
        FT_TRY(ft_zero_step_end(b.zero, 0.1));
    }
    return FT_OK;
}

static ft_status frozen_has_no_gradient(ft_ctx *ctx, void *user)
{
    static const int64_t shape[2] = {5, 5};
    bench b;
    ft_tensor *shard;
    int unit;
    FT_TRY(bench_begin(&b, ctx, (const ft_zero_config *)user));
    FT_TRY(ft_zero_unit(b.zero, "ice", &unit));
    FT_TRY(ft_zero_param(b.zero, "w0", 2, shape, FT_ZERO_FROZEN, &b.w[0]));
    FT_TRY(ft_zero_commit(b.zero, toy_init, NULL));
    FT_TRY(ft_zero_step_begin(b.zero, 1, 5, &b.scale));
    FAILS(ft_zero_get_full(b.zero, 0), FT_ERR_STATE);
    FAILS(ft_zero_reduce(b.zero, 0), FT_ERR_STATE);
    FAILS(ft_zero_get_shard(b.zero, 0, &shard), FT_ERR_STATE);
    FAILS(ft_zero_export_grad(b.zero, b.w[0], 0, 25, NULL), FT_ERR_STATE);
    return ft_zero_step_end(b.zero, 0.1);
}

static void test_state_errors(void **state)
{
    static const ft_rank_fn programs[] = {
        order_of_description, order_of_weights, order_of_gradients, one_backward_too_many,
        forward_outside_a_step, forward_given_up, halves_given_up, frozen_has_no_gradient
    };
    const int n = (int)(sizeof programs / sizeof programs[0]);
    (void)state;
    for (int i = 0; i < n * 4 * 3; i++) {
        ft_zero_config config = ft_zero_config_default();
        ft_config launch = ft_config_default();
        config.stage = i / n % 4;
        launch.world = i / n / 4 + 1;
        launch.timeout_s = 20;
        if (ft_launch(&launch, programs[i % n], &config) != FT_OK)
            fail_msg("program %d, dp %d, stage %d: %s", i % n, launch.world, config.stage,
                     ft_last_error());
    }
}

static ft_status create_only(ft_ctx *ctx, void *user)
{
    bench b;
    return bench_begin(&b, ctx, (const ft_zero_config *)user);
}

static void test_config_errors(void **state)
{
    (void)state;
    for (int i = 0; i < 12; i++) {
        ft_zero_config c = ft_zero_config_default();
        ft_config launch = ft_config_default();
        double *const values[] = {&c.optimizer.hyper[0], &c.optimizer.hyper[1],
                                  &c.optimizer.hyper[2], &c.weight_decay, &c.grad_clip};
        if (i == 0) c.stage = 4;
        if (i == 1) c.stage = -1;
        if (i == 2) c.dtype = FT_I32;
        if (i == 3) c.prefetch = -1;
        if (i == 4) c.shard_ranks = -1;
        if (i == 5) c.shard_ranks = 2; /* of one rank */
        if (i > 5 && i < 11) *values[i - 6] = i % 2 ? NAN : -1;
        if (ft_launch(&launch, create_only, &c) != (i == 11 ? FT_OK : FT_ERR_ARG))
            fail_msg("case %d: %s", i, ft_last_error());
    }
}

/* -------------------------------------------------------------------------- ranks that disagree */

enum { SAME = 0,
       /* of the whole world */
       STAGE, DTYPE, PREFETCH, OVERLAP, CLIP, CLIP_A_BIT, DECAY, BETA, OPTIMIZER, ACCUMULATE,
       REDUCE, KEPT, SHARDS, MESH,
       /* of dp; SIZE to NAME also of the ranks that share a unit */
       SIZE, SHAPE, NAME, FLAGS, UNITS, UNIT_NAME, TAPES, BREAK, SHARED, FROZEN,
       /* of tp */
       PARTS, DISAGREEMENTS };

typedef struct disagreement {
    int which;
    ft_axis axis; /* along which four ranks lie */
    ft_status status[4];
    char text[4][1024];
} disagreement;

static void configure_differently(ft_zero_config *c, int which)
{
    if (which == STAGE) c->stage = 1;
    if (which == DTYPE) c->dtype = FT_BF16;
    if (which == PREFETCH) c->prefetch = 2;
    if (which == OVERLAP) c->reduce_overlap = FT_OFF;
    if (which == CLIP) c->grad_clip = 1;
    if (which == CLIP_A_BIT) c->grad_clip = nextafter(0.5, 1);
    if (which == DECAY) c->weight_decay = 0.1;
    if (which == BETA) c->optimizer = ft_zero_adamw(0.9, 0.999, 1e-8);
    if (which == OPTIMIZER) c->optimizer = ft_zero_sgd(0.9, 0);
    if (which == ACCUMULATE) c->accumulate_dtype = FT_ZERO_F32;
    if (which == REDUCE) c->reduce_dtype = FT_ZERO_BF16;
    if (which == KEPT) c->keep_gathered = 1;
    if (which == SHARDS) c->shard_ranks = 1;
}

/* One rank of four, or two of them, describe something else. */
static ft_status describe_as(bench *b, const disagreement *d, int which)
{
    int64_t shape[2] = {6, 4};
    ft_tensor *p;
    ft_group *all;
    int unit, flags = d->which == PARTS ? FT_ZERO_PARTIAL : 0;
    if (which == SIZE) shape[0] = 7;
    if (which == SHAPE) shape[0] = 4, shape[1] = 6;
    FT_TRY(ft_zero_unit(b->zero, which == UNIT_NAME ? "another" : "first", &unit));
    FT_TRY(ft_zero_param(b->zero, which == NAME ? "w3" : "w0", 2, shape,
                         which == FLAGS ? FT_ZERO_DECAY : which == FROZEN ? FT_ZERO_FROZEN
                         : which == PARTS ? 0 : flags, &p));
    if (which == BREAK) FT_TRY(ft_zero_break(b->zero));
    if (which == TAPES) FT_TRY(ft_zero_tapes(b->zero, unit, 2));
    if (which == SHARED || d->axis == FT_AXIS_PP) {
        int first = which == SHARED ? 2 : 0, n = which == SHARED ? 2 : 4;
        FT_TRY(ft_group_strided(b->ctx, "copies", first, 1, n, &all));
        FT_TRY(ft_zero_share(b->zero, unit, all));
    }
    if (which != UNITS) FT_TRY(ft_zero_unit(b->zero, "second", &unit));
    FT_TRY(ft_zero_param(b->zero, "w1", 2, shape, flags, &p));
    return ft_zero_commit(b->zero, toy_init, NULL);
}

static ft_status describe_differently(ft_ctx *ctx, void *user)
{
    disagreement *d = (disagreement *)user;
    int r = ft_rank(ctx), odd = r == 2 || (d->which == SHARED && r == 3);
    ft_zero_config c = ft_zero_config_default();
    ft_mesh mesh;
    bench b;
    memset(&b, 0, sizeof b);
    b.ctx = ctx;
    c.grad_clip = d->which == CLIP ? 0 : 0.5;
    if (d->which == ACCUMULATE) c.dtype = FT_BF16;
    if (odd) configure_differently(&c, d->which);
    int axis = odd && d->which == MESH ? ((int)d->axis + 1) % (int)FT_AXIS_COUNT : (int)d->axis;
    FT_TRY(ft_mesh_create(ctx, axis == FT_AXIS_DP ? 4 : 1, axis == FT_AXIS_TP ? 4 : 1,
                          axis == FT_AXIS_PP ? 4 : 1, &mesh));
    d->status[r] = ft_zero_create(ctx, &c, &mesh, &b.zero);
    if (d->status[r] == FT_OK) d->status[r] = describe_as(&b, d, odd ? d->which : SAME);
    if (d->status[r] != FT_OK) snprintf(d->text[r], sizeof d->text[r], "%s", ft_last_error());
    return d->status[r];
}

/* Every rank is told who has what: words of both sides, after the ranks that have it. */
static void check_disagreement(const disagreement *d)
{
    static const char *const words[DISAGREEMENTS][2] = {
        {NULL, NULL}, {"stage 0", "stage 1"}, {"fp32", "bf16"}, {"prefetch 1", "prefetch 2"},
        {"reduce_overlap on", "reduce_overlap off"}, {"grad_clip 0", "grad_clip 1"},
        {"grad_clip 0.5", "grad_clip 0.5"}, {"weight_decay 0,", "weight_decay 0.1,"},
        {"0.9, 0.95", "0.9, 0.999"}, {"adamw (2 states", "sgd (1 states"},
        {"accumulate bf16", "accumulate fp32"}, {"reduce fp32", "reduce bf16"},
        {"keep_gathered 0", "keep_gathered 1"}, {"4 ranks share", "1 ranks share"}, {"dp", "tp"},
        {"of 24 elements", "of 28 elements"}, {"hash", "hash"}, {"hash", "hash"}, {"hash", "hash"},
        {"units 2", "units 1"}, {"first", "another"}, {"1 tapes", "2 tapes"},
        {"tapes, shared", "tapes, a break after it"}, {"by 1 ranks", "by 2 ranks"},
        {"0 of them frozen", "24 of them frozen"}, {"2 of 48", "1 of 24"}};
    const char *others = d->which == SHARED ? "ranks 0, 1: " : "ranks 0, 1, 3: ";
    const char *odd = d->which == SHARED ? "ranks 2, 3: " : "rank 2: ";
    for (int r = 0; r < 4; r++) {
        const char *a = strstr(d->text[r], others), *b = strstr(d->text[r], odd);
        const char *cut = a && b ? (a < b ? b : a) : NULL;
        const char *in_a = a ? strstr(a, words[d->which][0]) : NULL;
        const char *in_b = b ? strstr(b, words[d->which][1]) : NULL;
        if (a && a < b && in_a && in_a > cut) in_a = NULL;
        if (d->status[r] != FT_ERR_COMM || !in_a || !in_b)
            fail_msg("disagreement %d along axis %d: rank %d got '%s': %s", d->which, (int)d->axis,
                     r, ft_status_name(d->status[r]), d->text[r]);
    }
}

static int may_differ(int which, ft_axis axis)
{
    if (which == SHARDS) return axis != FT_AXIS_DP; /* shard_ranks must divide dp */
    if (which >= STAGE && which <= MESH) return 0;
    if (which == PARTS) return axis != FT_AXIS_TP;
    if (which >= SIZE && which <= NAME && axis == FT_AXIS_PP) return 0;
    return axis != FT_AXIS_DP;
}

static void test_disagreement(void **state)
{
    (void)state;
    for (int i = 0; i < DISAGREEMENTS * FT_AXIS_COUNT; i++) {
        disagreement d;
        ft_config launch = ft_config_default();
        memset(&d, 0, sizeof d);
        d.which = i % DISAGREEMENTS;
        d.axis = (ft_axis)(i / DISAGREEMENTS);
        if (d.which != SAME && may_differ(d.which, d.axis)) continue;
        launch.world = 4;
        launch.timeout_s = 20;
        ft_status status = ft_launch(&launch, describe_differently, &d);
        if (status != (d.which == SAME ? FT_OK : FT_ERR_COMM))
            fail_msg("disagreement %d along axis %d: '%s'", d.which, (int)d.axis,
                     ft_status_name(status));
        if (d.which != SAME) check_disagreement(&d);
    }
}

/* ---------------------------------------------------------------------------- export and import */

static float imported(int param, int64_t i, int round) /* bf16 holds these exactly */
{
    return (float)((param * 37 + (int)i * 5 + round * 11) % 255 - 127) / 64.0f;
}

/* Writes ranges that begin and end anywhere and reads others; after each the whole is as expected
   on every rank, and so are gathered weights. */
static ft_status ranges(toy_rank *r, th_moment moment, void *user)
{
    static const int64_t cuts[][2] = {
        {0, 1}, {0, 100}, {3, 94}, {7, 9}, {31, 2}, {50, 50}, {99, 1}
    };
    float whole[TOY_TOTAL], now[TOY_TOTAL], part[TOY_TOTAL];
    (void)user;
    if (moment != TH_CREATED && moment != TH_STEP_DONE) return FT_OK;
    for (int i = 0; i < r->spec->n_params; i++) {
        int64_t n = ft_numel(r->params[i]);
        FT_TRY(ft_zero_export(r->zero, r->params[i], 0, n, whole));
        for (int c = 0; c < 7; c++) {
            int64_t first = cuts[c][0] % n, count = cuts[c][1];
            if (count > n - first) count = n - first;
            for (int64_t k = 0; k < count; k++)
                part[k] = whole[first + k] = imported(i, first + k, c);
            FT_TRY(ft_zero_import(r->zero, r->params[i], first, count, part));
            FT_TRY(ft_zero_export(r->zero, r->params[i], 0, n, now));
            CHECK(memcmp(now, whole, (size_t)n * sizeof(float)) == 0);
            memset(part, 0, sizeof part);
            FT_TRY(ft_zero_export(r->zero, r->params[i], first, count, r->rank % 2 ? NULL : part));
            CHECK(r->rank % 2 || memcmp(part, whole + first, (size_t)count * sizeof(float)) == 0);
        }
        FT_TRY(ft_zero_gather(r->zero, r->spec->params[i].unit));
        ft_tensor *copy;
        FT_TRY(ft_tensor_create(r->ctx, &copy, FT_F32, 1, &n, FT_TAG_OTHER));
        FT_TRY(ft_copy(copy, r->params[i], r->zero->compute));
        FT_TRY(ft_download(copy, now));
        ft_tensor_free(copy);
        FT_TRY(ft_zero_release(r->zero, r->spec->params[i].unit));
        for (int64_t k = 0; k < n; k++)
            CHECK(now[k] == ft_f32_from_bf16(ft_bf16_from_f32(whole[k])) ||
                  (r->spec->zero.dtype == FT_F32 && now[k] == whole[k]));
    }
    return FT_OK;
}

static void test_export_import(void **state)
{
    (void)state;
    for (int i = 0; i < LAYOUTS * 4 * 2 * 2; i++) {
        toy s = toy_default();
        s.dp = layouts[i % LAYOUTS];
        if (skips(s.dp, i, 3)) continue;
        s.zero.stage = i / LAYOUTS % 4;
        s.zero.dtype = i / (LAYOUTS * 4) % 2 ? FT_BF16 : FT_F32;
        s.launch.async = i / (LAYOUTS * 8) ? FT_ON : FT_OFF;
        s.launch.delay_us = i / (LAYOUTS * 8) ? 100 : 0;
        s.steps = 1;
        s.hook = ranges;
        if (s.launch.async == FT_ON && (s.dp == 1 || s.dp > 3)) continue;
        toy_add(&s, 0, 10, 10, FT_ZERO_DECAY);
        toy_add(&s, 0, 0, 10, FT_ZERO_FROZEN);
        toy_add(&s, 0, 0, 10, 0);
        toy_add(&s, 1, 7, 10, 0);
        free(toy_ok(&s));
    }
}

static ft_status holds(bench *b, int unit, float value)
{
    float now[25];
    FT_TRY(ft_zero_gather(b->zero, unit));
    FT_TRY(ft_download(b->w[unit], now));
    FT_TRY(ft_zero_release(b->zero, unit));
    for (int i = 0; i < 25; i++) CHECK(now[i] == value);
    return FT_OK;
}

static ft_status import_value(bench *b, int unit, float value)
{
    float values[25];
    for (int i = 0; i < 25; i++) values[i] = value;
    return ft_zero_import(b->zero, b->w[unit], 0, 25, values);
}

/* Weights that are gathered, were fetched ahead, or are on their way after a step, do not survive
   an import. */
static ft_status import_wins(ft_ctx *ctx, void *user)
{
    bench b;
    ft_tensor *loss;
    FT_TRY(bench_begin(&b, ctx, (const ft_zero_config *)user));
    FT_TRY(bench_commit(&b));
    FT_TRY(ft_zero_enter(b.zero, 0, 0)); /* fetches unit 1 ahead */
    FT_TRY(import_value(&b, 0, 2));
    FT_TRY(import_value(&b, 1, 3));
    FT_TRY(holds(&b, 0, 2));
    FT_TRY(ft_zero_leave(b.zero, 0));
    FT_TRY(holds(&b, 0, 2));
    FT_TRY(holds(&b, 1, 3));
    FT_TRY(ft_zero_step_begin(b.zero, 1, 5, &b.scale));
    FT_TRY(bench_forward(&b, &loss));
    FT_TRY(bench_backward(&b, loss));
    FT_TRY(ft_zero_step_end(b.zero, 0.1));
    FT_TRY(import_value(&b, 1, 5));
    FT_TRY(import_value(&b, 0, 4));
    FT_TRY(holds(&b, 0, 4));
    return holds(&b, 1, 5);
}

static void test_import_wins(void **state)
{
    (void)state;
    for (int i = 0; i < 4 * 3 * 5; i++) {
        ft_zero_config config = ft_zero_config_default();
        ft_config launch = ft_config_default();
        config.stage = i % 4;
        launch.world = 1 + i / 4 % 3;
        launch.async = i < 12 ? FT_OFF : FT_ON;
        launch.delay_us = i < 12 ? 0 : 500;
        launch.timeout_s = 20;
        if (ft_launch(&launch, import_wins, &config) != FT_OK)
            fail_msg("dp %d, stage %d: %s", launch.world, config.stage, ft_last_error());
    }
}

/* ---------------------------------------------------------------- hybrid sharding, other dtypes */

/* [H1] Copies hold the same bits, shard by shard. */
static ft_status replicas_agree(th_rank *r, th_moment moment, void *user)
{
    (void)user;
    if (moment != TH_END && moment != TH_STEP_ENDING) return FT_OK;
    FT_TRY(ft_sync(r->ctx));
    CHECK(r->zero->replicas);
    for (int u = 0; u < r->zero->n_units; u++) {
        const ft__zero_flat *f = &r->zero->units[u].flat[0];
        ft_tensor *t = moment == TH_END ? f->mine : f->grad_mine;
        int64_t n = f->elems - r->zero->rank * f->shard;
        if (n > f->shard) n = f->shard;
        if (n < 1) continue;
        FT_TRY(ft_agree(r->zero->replicas, "a shard", ft__llama_fnv(ft__llama_fnv_begin(),
                        ft_data(t), (size_t)n * ft_dtype_bytes(t->dtype))));
    }
    return FT_OK;
}

/* Hybrid sharding is a layout: every stage has the same bits, and all are close to one rank's. */
static void test_hybrid(void **state)
{
    static const int layout[][2] = {{2, 1}, {4, 1}, {4, 2}, {8, 2}, {8, 4}}; /* dp, shard_ranks */
    (void)state;
    for (int M = 1; M <= 3; M += 2) {
        th_options one = small();
        one.samples = 72;
        one.T = 4;
        one.steps = 3;
        th_result *alone = run_ok(&one);
        for (int i = 0; i < 5; i++) {
            th_result *zero = NULL;
            for (int stage = 0; stage < 4; stage++) {
                th_options o = one;
                if (skips(layout[i][0] / 2, stage + i, 2)) continue;
                o.dp = layout[i][0];
                o.micro_batches = M;
                o.zero.shard_ranks = layout[i][1];
                o.zero.stage = stage;
                o.hook = replicas_agree;
                th_result *r = run_ok(&o);
                if (!zero) zero = r;
                if (M == 1) same_bits(&o, zero, r);
                close_losses(&o, alone, r, 1e-5);
                for (int t = 0; t < o.steps; t++)
                    assert_true(fabs(r->norm[t] - alone->norm[t]) <= 1e-4 * alone->norm[t]);
                if (r != zero) th_free(r);
            }
            th_free(zero);
        }
        th_free(alone);
    }
}

/* Units that are idle in the last micro-batch, or in the step, are summed over the copies too. */
static void test_hybrid_idle(void **state)
{
    toy s = toy_default();
    (void)state;
    s.steps = 4;
    s.skips = idle;
    toy_add(&s, 0, 10, 10, FT_ZERO_DECAY);
    toy_add(&s, 0, 0, 10, 0);
    toy_add(&s, 0, 10, 10, FT_ZERO_DECAY);
    toy_add(&s, 1, 10, 10, FT_ZERO_DECAY);
    toy_add(&s, 2, 0, 10, 0);
    toy_add(&s, 2, 10, 10, FT_ZERO_DECAY);
    toy_add(&s, 3, 7, 10, FT_ZERO_DECAY);
    for (int i = 0; i < 12; i++) {
        s.micro_batches = i % 3 + 1;
        s.dp = 1;
        s.zero.shard_ranks = 0;
        s.zero.stage = 0;
        toy_result *reference = toy_ok(&s), *r;
        s.dp = 4;
        s.zero.shard_ranks = i % 2 + 1;
        s.zero.stage = i / 3;
        r = toy_ok(&s);
        for (int t = 0; t < s.steps; t++) { /* the idle ones' gradients are not final before */
            double off = distance(reference->weights[t + 1], r->weights[t + 1], r->total);
            double norm = fabs(reference->norm[t] - r->norm[t]);
            if (!(off <= 3e-6 && norm <= 3e-6 * reference->norm[t]))
                fail_msg("stage %d, %d micro-batches, step %d: weights off by %.2g, norm %.9g, "
                         "expected %.9g", s.zero.stage, s.micro_batches, t, off, r->norm[t],
                         reference->norm[t]);
        }
        free(reference);
        free(r);
    }
}

/* Case 6: ranks hold 256, 1, 1, 1, 1, 1, 1, 1. On an fp32 wire that is 263; on a bf16 one 264,
   which is 263 rounded once; never 256. */
typedef struct addends { ft_zero_config config; float expected; } addends;

static ft_status small_addends(ft_ctx *ctx, void *user)
{
    const addends *a = (const addends *)user;
    bench b;
    ft_tensor *grad;
    int accumulate;
    float sums[25];
    FT_TRY(bench_begin(&b, ctx, &a->config));
    FT_TRY(bench_commit(&b));
    FT_TRY(ft_zero_step_begin(b.zero, 1, 1, &b.scale));
    FT_TRY(b.w[0]->sink.get(b.w[0]->sink.user, b.w[0], &grad, &accumulate));
    CHECK(accumulate == 0);
    FT_TRY(ft_fill(grad, ft_rank(ctx) ? 1 : 256, b.zero->compute));
    FT_TRY(ft_zero_reduce(b.zero, 0));
    FT_TRY(ft_zero_export_grad(b.zero, b.w[0], 0, 25, sums));
    for (int i = 0; i < 25; i++) CHECK(sums[i] == a->expected);
    return ft_zero_step_end(b.zero, 0.1);
}

static void test_small_addends(void **state)
{
    (void)state;
    for (int i = 0; i < 4 * 2 * 3 * 2; i++) {
        addends a;
        ft_config launch = ft_config_default();
        a.config = ft_zero_config_default();
        a.config.stage = i % 4;
        a.config.dtype = i / 4 % 2 ? FT_BF16 : FT_F32;
        a.config.reduce_dtype = (ft_zero_dtype)(i / 8 % 3);
        a.config.accumulate_dtype = i / 24 ? FT_ZERO_F32 : FT_ZERO_SAME;
        int bf16 = a.config.dtype == FT_BF16;
        int fp32_wire = a.config.reduce_dtype == FT_ZERO_F32 || (!a.config.reduce_dtype && !bf16);
        /* What was added in fp32 is kept so only where the gradient is. */
        a.expected = fp32_wire && (!bf16 || i / 24) ? 263 : 264;
        launch.world = 8;
        if (ft_launch(&launch, small_addends, &a) != FT_OK)
            fail_msg("stage %d, %s, reduce %d, accumulate %d: %s", a.config.stage,
                     ft_dtype_name(a.config.dtype), (int)a.config.reduce_dtype,
                     (int)a.config.accumulate_dtype, ft_last_error());
    }
}

/* The same over micro-batches: 256, then 1 seven times, on 2 ranks. Added in bf16 the ones are lost
   (256 + 1 rounds to 256, 512 + 2 to 512), in fp32 they are not; where the sum of all of them
   travels in bf16 (stages 0 and 1), 263 becomes 264 on each rank. */
static ft_status small_micro_batches(ft_ctx *ctx, void *user)
{
    const addends *a = (const addends *)user;
    bench b;
    float sums[25];
    FT_TRY(bench_begin(&b, ctx, &a->config));
    FT_TRY(bench_commit(&b));
    FT_TRY(ft_zero_step_begin(b.zero, 8, 1, &b.scale));
    for (int m = 0; m < 8; m++) {
        ft_tensor *grad, *one;
        int accumulate;
        FT_TRY(b.w[0]->sink.get(b.w[0]->sink.user, b.w[0], &grad, &accumulate));
        CHECK(accumulate == (m > 0 && a->config.stage < 2));
        FT_TRY(ft_tensor_create(ctx, &one, grad->dtype, 2, grad->shape, FT_TAG_OTHER));
        FT_TRY(ft_fill(one, 1, b.zero->compute));
        if (!accumulate) FT_TRY(ft_fill(grad, m ? 1 : 256, b.zero->compute));
        else FT_TRY(ft_accumulate(grad, one, b.zero->compute));
        ft_tensor_free(one);
        if (a->config.stage >= 2 || m == 7) FT_TRY(ft_zero_reduce(b.zero, 0));
    }
    FT_TRY(ft_zero_export_grad(b.zero, b.w[0], 0, 25, sums));
    for (int i = 0; i < 25; i++) CHECK(sums[i] == a->expected);
    return ft_zero_step_end(b.zero, 0.1);
}

static void test_small_micro_batches(void **state)
{
    (void)state;
    for (int i = 0; i < 4 * 3; i++) {
        addends a;
        ft_config launch = ft_config_default();
        a.config = ft_zero_config_default();
        a.config.stage = i % 4;
        a.config.dtype = FT_BF16;
        a.config.accumulate_dtype = i / 4 ? FT_ZERO_F32 : FT_ZERO_SAME;
        a.config.reduce_dtype = i / 4 == 2 ? FT_ZERO_F32 : FT_ZERO_SAME;
        a.expected = i / 4 == 0 ? 512 : i / 4 == 1 && a.config.stage < 2 ? 528 : 526;
        launch.world = 2;
        if (ft_launch(&launch, small_micro_batches, &a) != FT_OK)
            fail_msg("stage %d, accumulate %d, reduce %d: %s", a.config.stage,
                     (int)a.config.accumulate_dtype, (int)a.config.reduce_dtype, ft_last_error());
    }
}

/* One micro-batch gives the same bits in every stage, also where gradients are kept in fp32. */
static void test_fp32_accumulation(void **state)
{
    (void)state;
    toy s = toy_default();
    toy_add(&s, 0, 10, 10, FT_ZERO_DECAY);
    toy_add(&s, 0, 0, 10, 0);
    toy_add(&s, 1, 10, 10, FT_ZERO_DECAY);
    toy_add(&s, 2, 7, 10, FT_ZERO_DECAY);
    s.zero.dtype = FT_BF16;
    s.zero.accumulate_dtype = FT_ZERO_F32;
    for (int reduce = 0; reduce < 3; reduce++) {
        s.zero.reduce_dtype = (ft_zero_dtype)reduce;
        toy_stages(s, 3, NULL, 0, NULL);
    }
}

/* ----------------------------------------------------------------------------- other optimizers */

/* A user's own: the sign of the gradient, and the number of updates in its state. */
static void sign_update(const ft_zero_update *u)
{
    for (int64_t i = 0; i < u->n; i++) {
        float g = u->grad[i];
        u->state[0][i] += 1;
        if (u->state[0][i] != (float)u->step || u->state[1]) u->weight[i] = NAN;
        u->weight[i] -= (float)(u->lr * u->hyper[3]) * (float)((g > 0) - (g < 0)) +
                        (float)(u->lr * u->decay) * u->weight[i];
    }
}

typedef struct rule { double momentum; int nesterov, sign; } rule;

static void sgd_reference(const toy *s, const toy_result *r, const rule *by)
{
    static double w[TOY_TOTAL], v[TOY_TOTAL];
    memset(v, 0, sizeof v);
    for (int64_t k = 0; k < r->total; k++) w[k] = r->weights[0][k];
    for (int t = 0; t < s->steps; t++) {
        int64_t k = 0;
        for (int i = 0; i < s->n_params; i++) {
            const toy_param *p = &s->params[i];
            double decay = p->flags & FT_ZERO_DECAY ? s->zero.weight_decay : 0;
            for (int64_t end = k + p->cols * (p->rows ? p->rows : 1); k < end; k++) {
                double g = r->coef[t] * r->grads[t][k] + decay * w[k];
                if (by->sign) {
                    double raw = r->grads[t][k];
                    w[k] -= s->lr * (0.25 * ((raw > 0) - (raw < 0)) + decay * w[k]);
                } else {
                    v[k] = by->momentum * v[k] + g;
                    w[k] -= s->lr * (by->nesterov ? g + by->momentum * v[k] : v[k]);
                }
                if (!(fabs(r->weights[t + 1][k] - w[k]) <= 2e-6))
                    fail_msg("dp %d, stage %d, momentum %g, step %d: weight %.9g, expected %.9g",
                             s->dp, s->zero.stage, by->momentum, t, r->weights[t + 1][k], w[k]);
            }
        }
    }
}

static void test_other_optimizers(void **state)
{
    static const rule rules[] = {{0, 0, 0}, {0, 1, 0}, {0.9, 0, 0}, {0.9, 1, 0}, {0, 0, 1}};
    (void)state;
    for (int i = 0; i < 5 * 4 * 2; i++) {
        toy s = toy_default();
        const rule *by = &rules[i % 5];
        s.dp = 3;
        s.steps = 5;
        s.lr = 0.1;
        s.zero.stage = i / 5 % 4;
        s.zero.dtype = i / 20 ? FT_BF16 : FT_F32;
        s.zero.optimizer = ft_zero_sgd(by->momentum, by->nesterov);
        if (by->sign) {
            memset(&s.zero.optimizer, 0, sizeof s.zero.optimizer);
            s.zero.optimizer.name = "sign";
            s.zero.optimizer.update = sign_update;
            s.zero.optimizer.n_state = 1;
            s.zero.optimizer.hyper[3] = 0.25;
        }
        toy_add(&s, 0, 10, 10, FT_ZERO_DECAY);
        toy_add(&s, 0, 0, 10, 0);
        toy_add(&s, 1, 7, 10, FT_ZERO_DECAY);
        toy_result *r = toy_ok(&s);
        sgd_reference(&s, r, by);
        free(r);
    }
}

static void test_learning_rates(void **state)
{
    ft_lr lr;
    (void)state;
    memset(&lr, 0, sizeof lr);
    lr.peak = 2;
    lr.floor = 0.5;
    lr.warmup = 4;
    lr.decay = 5;
    lr.total = 24;
    for (int kind = FT_LR_CONSTANT; kind <= FT_LR_WSD; kind++) {
        lr.schedule = (ft_schedule)kind;
        assert_int_equal(ft_lr_check(&lr), FT_OK);
        for (int64_t step = 0; step < 40; step++) {
            double at = step < 24 ? (double)step : 24, x = (at - 4) / 20, expected = 2;
            if (kind == FT_LR_LINEAR) expected = 2 - 1.5 * x;
            if (kind == FT_LR_COSINE) expected = 0.5 + 0.75 * (1 + cos(acos(-1.0) * x));
            if (kind == FT_LR_WSD && step > 19) expected = 7.7 - 0.3 * at;
            if (step < 4) expected = 0.5 * (double)(step + 1);
            assert_true(fabs(ft_lr_at(&lr, step) - expected) < 1e-12);
        }
    }
    ft_lr bad[7];
    for (int i = 0; i < 7; i++) bad[i] = lr;
    bad[0].schedule = (ft_schedule)9;
    bad[1].peak = -1;
    bad[2].floor = 3;
    bad[3].peak = NAN;
    bad[4].warmup = -1;
    bad[5].warmup = 20;
    bad[6].total = 3;
    for (int i = 0; i < 7; i++) assert_int_equal(ft_lr_check(&bad[i]), FT_ERR_ARG);
}

/* --------------------------------------------------------------------- streams that are threads */

/* The same for gradients that are read before the step ends. */
static void test_async_gradients(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        toy s = toy_default();
        toy_add(&s, 0, 10, 10, FT_ZERO_DECAY);
        toy_add(&s, 1, 0, 10, 0);
        toy_add(&s, 2, 7, 10, FT_ZERO_DECAY);
        s.dp = 3;
        s.zero.stage = stage;
        toy_result *reference = toy_ok(&s);
        s.launch.async = FT_ON;
        s.launch.delay_us = 1000;
        toy_result *r = toy_ok(&s);
        toy_same_bits(&s, reference, r);
        free(reference);
        free(r);
    }
}

/* A unit that was fetched ahead and is not entered is given back at the end of the step, when its
   gather is over. The unit is frozen: its gather is often the last work of the step. */
static ft_status fetched_for_nothing(ft_ctx *ctx, void *user)
{
    bench b;
    FT_TRY(bench_begin(&b, ctx, (const ft_zero_config *)user));
    FT_TRY(bench_commit_as(&b, FT_ZERO_FROZEN));
    for (int i = 0; i < 300; i++) {
        ft_tensor *y, *loss;
        FT_TRY(ft_zero_step_begin(b.zero, 1, 5, &b.scale));
        FT_TRY(ft_tape_begin(b.tape));
        FT_TRY(ft_zero_enter(b.zero, 0, 0));
        FT_TRY(ft_linear(ctx, &y, b.x, b.w[0], NULL));
        FT_TRY(ft_mean(ctx, &loss, y));
        ft_tensor_free(y);
        FT_TRY(ft_zero_leave(b.zero, 0));
        FT_TRY(ft_tape_end(b.tape));
        FT_TRY(bench_backward(&b, loss));
        FT_TRY(ft_zero_step_end(b.zero, 0.1));
    }
    return FT_OK;
}

static void test_fetched_for_nothing(void **state)
{
    ft_zero_config config = ft_zero_config_default();
    ft_config launch = ft_config_default();
    (void)state;
    config.stage = 3;
    launch.world = 2;
    launch.async = FT_ON;
    launch.delay_us = 500;
    if (ft_launch(&launch, fetched_for_nothing, &config) != FT_OK) fail_msg("%s", ft_last_error());
}

/* Without overlap a unit is reduced before compute goes on: what compute has seen is final. */
static ft_status reduced_at_once(th_rank *r, th_moment moment, void *user)
{
    uint64_t hash[2];
    (void)user;
    if (moment != TH_BACKWARD_DONE) return FT_OK;
    for (int u = 0; u < r->zero->n_units; u++)
        for (int k = 0; k < 2; k++) {
            const ft__zero_flat *f = &r->zero->units[u].flat[0];
            FT_TRY(k ? ft_sync(r->ctx) : ft_stream_sync(r->zero->compute));
            hash[k] = ft__llama_fnv(ft__llama_fnv_begin(), ft_data(f->grad_mine),
                                    (size_t)f->shard * ft_dtype_bytes(f->grad_mine->dtype));
            CHECK(!k || hash[0] == hash[1]);
        }
    return FT_OK;
}

static void test_no_overlap(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4 && !SANITIZED; stage++) { /* it looks where a race would be */
        th_options o = small();
        o.T = 2;
        o.dp = 2;
        o.steps = 2;
        o.zero.stage = stage;
        o.zero.reduce_overlap = FT_OFF;
        o.launch.async = FT_ON;
        o.launch.delay_us = 2000;
        o.hook = reduced_at_once;
        th_free(run_ok(&o));
    }
}

/* Streams as threads, and random delays before every collective and copy: the same bits. The host
   does not wait between the steps, so that one step's work can run into the next one's. */
static void test_async(void **state)
{
    (void)state;
    for (int i = 0; i < 4 * 2 * 2 * 2; i++) {
        ft_sac sac[8];
        th_options o = small();
        if (skips(1, i % 16, 3)) continue;
        o.T = 4;
        o.steps = 3;
        o.dp = i / 16 ? 3 : i % 8 < 4 ? 2 : 4;
        o.zero.shard_ranks = o.dp == 4 ? 2 : 0;
        o.zero.stage = i % 4;
        o.micro_batches = i / 4 % 2 ? 2 : 1;
        o.model.tie_embeddings = i / 8 % 2;
        o.zero.reduce_overlap = i / 16 ? FT_OFF : FT_ON;
        o.zero.prefetch = i / 16 ? 3 : 1;
        o.zero.keep_gathered = i / 4 % 4 == 3;
        o.zero.dtype = i / 16 ? FT_BF16 : FT_F32;
        o.report_every = 0;
        o.launch.async = FT_OFF;
        o.sac = policy(&o, sac, i % 3);
        th_result *reference = run_ok(&o);
        o.launch.async = FT_ON;
        o.launch.delay_us = 300;
        th_result *r = run_ok(&o);
        same_bits(&o, reference, r);
        th_free(r);
        th_free(reference);
    }
}

/* ----------------------------------------------------------------------------------------- main */

/* An argument, such as test_as*, selects tests by name. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_state_errors),
        cmocka_unit_test(test_config_errors),
        cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_traffic),
        cmocka_unit_test(test_traffic_of_options),
        cmocka_unit_test(test_initial_weights),
        cmocka_unit_test(test_one_micro_batch_fp32),
        cmocka_unit_test(test_one_micro_batch_bf16),
        cmocka_unit_test(test_three_micro_batches_fp32),
        cmocka_unit_test(test_three_micro_batches_bf16),
        cmocka_unit_test(test_schedule_changes_nothing),
        cmocka_unit_test(test_tiny),
        cmocka_unit_test(test_training_learns),
        cmocka_unit_test(test_accumulation),
        cmocka_unit_test(test_accumulation_in_one_unit),
        cmocka_unit_test(test_units_smaller_than_the_ranks),
        cmocka_unit_test(test_unit_size_changes_nothing),
        cmocka_unit_test(test_poisoned_padding),
        cmocka_unit_test(test_idle_parameters),
        cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_large_unit),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_bf16_masters),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_uneven_tokens),
        cmocka_unit_test(test_ignored_rank),
        cmocka_unit_test(test_nobody_counts),
        cmocka_unit_test(test_unbalanced_vocabulary),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_bad_labels_and_tokens),
        cmocka_unit_test(test_targets),
        cmocka_unit_test(test_recompute_and_gather),
        cmocka_unit_test(test_export_import),
        cmocka_unit_test(test_import_wins),
        cmocka_unit_test(test_hybrid),
        cmocka_unit_test(test_hybrid_idle),
        cmocka_unit_test(test_small_addends),
        cmocka_unit_test(test_small_micro_batches),
        cmocka_unit_test(test_fp32_accumulation),
        cmocka_unit_test(test_other_optimizers),
        cmocka_unit_test(test_learning_rates),
        cmocka_unit_test(test_no_overlap),
        cmocka_unit_test_teardown(test_async_gradients, no_late_writes),
        cmocka_unit_test_teardown(test_fetched_for_nothing, no_late_writes),
        cmocka_unit_test_teardown(test_async, no_late_writes)
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
