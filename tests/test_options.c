/* Options of training: optimizers, learning-rate schedules, the dtypes in which gradients are added
   and travel, hybrid sharding. Each does what its description says, costs the bytes that it says,
   and leaves the stages in agreement.

   cc -std=c11 -I. tests/test_options.c -lcmocka -lm -lpthread

   The model is made so that its gradients are known beforehand: a sample s adds, for each parameter
   w, sum(c_s w) + pull / 2 sum(w^2) to the loss, so that the gradient of a step is the sum over
   samples of c_s, plus samples * pull * w. References are float64 arithmetic on these, closed
   forms, and bytes counted by hand. Fresh memory holds NaN. */

#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <string.h>

static void *nan_malloc(size_t bytes)
{
    void *memory = malloc(bytes);
    if (memory) memset(memory, 0xff, bytes);
    return memory;
}

#define FT_MALLOC(n) nan_malloc(n)
#define FT_FREE(p) free(p)
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

/* -------------------------------------------------------------------------------- the schedules */

typedef struct times { int64_t warmup, decay, total; } times; /* decay fits into all of them */

static const times plans[] = {
    {0, 5, 20}, {1, 5, 20}, {4, 16, 20}, {4, 0, 20}, {4, 1, 20}, {20, 0, 20}, {0, 0, 0}, {0, 1, 1},
    {1, 0, 1}, {0, 20, 20}, {19, 1, 20}, {3, 997, 1000}
};
#define PLANS ((int)(sizeof plans / sizeof *plans))

static ft_lr lr_make(int schedule, const times *t, double peak, double floor_lr)
{
    ft_lr lr;
    memset(&lr, 0, sizeof lr);
    lr.schedule = (ft_schedule)schedule;
    lr.peak = peak;
    lr.floor = floor_lr;
    lr.warmup = t->warmup;
    lr.decay = t->decay;
    lr.total = t->total;
    return lr;
}

/* The manual's closed forms. A run that is all warm-up ends at the peak, and stays there. */
static double lr_expected(const ft_lr *lr, int64_t step)
{
    if (step < lr->warmup) return lr->peak / (double)lr->warmup * (double)(step + 1);
    if (lr->schedule == FT_LR_CONSTANT || lr->warmup == lr->total) return lr->peak;
    double s = (double)(step < lr->total ? step : lr->total), total = (double)lr->total;
    double way = (s - (double)lr->warmup) / (total - (double)lr->warmup);
    if (lr->schedule == FT_LR_LINEAR) return (1 - way) * lr->peak + way * lr->floor;
    if (lr->schedule == FT_LR_COSINE) /* 1 + cos 2a = 2 cos^2 a */
        return lr->floor + (lr->peak - lr->floor) * pow(cos(acos(-1.0) * way / 2), 2);
    double begin = total - (double)lr->decay;
    if (s <= begin) return lr->peak;
    way = (s - begin) / (double)lr->decay;
    return (1 - way) * lr->peak + way * lr->floor;
}

static void check_schedule(const ft_lr *lr)
{
    double last = 0, least = lr->peak < lr->floor ? lr->peak : lr->floor;
    assert_int_equal(ft_lr_check(lr), FT_OK);
    for (int64_t step = 0; step < lr->total + 10; step++) {
        double now = ft_lr_at(lr, step), expected = lr_expected(lr, step);
        if (!(fabs(now - expected) <= 1e-14 * lr->peak))
            fail_msg("schedule %d, warm-up %lld, decay %lld, total %lld, step %lld: %.17g, "
                     "expected %.17g", (int)lr->schedule, (long long)lr->warmup,
                     (long long)lr->decay, (long long)lr->total, (long long)step, now, expected);
        if (step < lr->warmup) assert_true(now > last && now <= lr->peak);
        else {
            assert_true(now >= least && now <= lr->peak);
            if (step > lr->warmup) assert_true(now <= last);
        }
        last = now;
    }
    assert_true(ft_lr_at(lr, lr->total + 10) == ft_lr_at(lr, INT64_C(1) << 40));
    assert_true(ft_lr_at(lr, lr->total) == ft_lr_at(lr, INT64_MAX));
}

static void test_schedules(void **state)
{
    (void)state;
    for (int schedule = FT_LR_CONSTANT; schedule <= FT_LR_WSD; schedule++)
        for (int i = 0; i < PLANS; i++)
            for (int k = 0; k < 3; k++) {
                ft_lr lr = lr_make(schedule, &plans[i], 3e-4, k == 0 ? 0 : k == 1 ? 3e-5 : 3e-4);
                check_schedule(&lr);
            }
    times t = {2, 2, 10};
    ft_lr lr = lr_make(FT_LR_COSINE, &t, 1, 0); /* values anyone knows */
    static const double cosine[] = {0.5, 1, 1, 0.96193976625564337, 0.85355339059327379};
    for (int i = 0; i < 5; i++) assert_true(fabs(ft_lr_at(&lr, i) - cosine[i]) < 1e-15);
    assert_true(fabs(ft_lr_at(&lr, 6) - 0.5) < 1e-15);
    assert_true(fabs(ft_lr_at(&lr, 10)) < 1e-15);
    lr.schedule = FT_LR_WSD;
    assert_true(ft_lr_at(&lr, 8) == 1 && ft_lr_at(&lr, 9) == 0.5 && ft_lr_at(&lr, 10) == 0);
    lr = lr_make(FT_LR_CONSTANT, &t, 2, 1);
    lr.total = 0; /* constant needs no end */
    assert_int_equal(ft_lr_check(&lr), FT_OK);
    assert_true(ft_lr_at(&lr, 0) == 1 && ft_lr_at(&lr, 1) == 2 && ft_lr_at(&lr, 1000) == 2);
}

static void lr_refused(ft_lr lr, const char *what)
{
    if (ft_lr_check(&lr) != FT_ERR_ARG) fail_msg("%s was not refused", what);
    assert_true(strlen(ft_last_error()) > 20);
}

static void test_schedule_refusals(void **state)
{
    times t = {4, 5, 24};
    (void)state;
    for (int schedule = FT_LR_CONSTANT; schedule <= FT_LR_WSD; schedule++) {
        const ft_lr good = lr_make(schedule, &t, 1, 0.1);
        ft_lr lr = good;
        lr.peak = -1;
        lr_refused(lr, "a negative peak");
        lr.peak = NAN;
        lr_refused(lr, "a peak that is no number");
        lr.peak = INFINITY;
        lr_refused(lr, "an infinite peak");
        lr = good;
        lr.floor = -0.1;
        lr_refused(lr, "a negative floor");
        lr.floor = 1.5;
        lr_refused(lr, "a floor above the peak");
        lr.floor = NAN;
        lr_refused(lr, "a floor that is no number");
        lr = good;
        lr.warmup = -1;
        lr_refused(lr, "a negative warm-up");
        lr = good;
        lr.decay = -1;
        lr_refused(lr, "a negative decay");
        lr = good;
        lr.total = -1;
        lr_refused(lr, "a negative total");
        if (schedule == FT_LR_CONSTANT) continue;
        lr = good;
        lr.warmup = 25;
        lr_refused(lr, "a warm-up longer than the run");
        lr.warmup = INT64_MAX;
        lr.decay = INT64_MAX;
        lr_refused(lr, "steps beyond 64 bits");
        lr = good;
        lr.warmup = 20;
        assert_int_equal(ft_lr_check(&lr), schedule == FT_LR_WSD ? FT_ERR_ARG : FT_OK);
    }
    lr_refused(lr_make(-1, &t, 1, 0), "schedule -1");
    lr_refused(lr_make(FT_LR_WSD + 1, &t, 1, 0), "a schedule that is not there");
}

/* ------------------------------------------------------------------------------------ the model */

typedef struct part { int unit; int64_t n; int flags; } part;

/* Shards cut parameters, decayed and not, in the middle; unit 1 has a frozen part. */
static const part parts[] = {
    {0, 700, FT_ZERO_DECAY}, {0, 300, 0},
    {1, 1100, FT_ZERO_DECAY}, {1, 210, FT_ZERO_FROZEN}, {1, 90, 0},
    {2, 450, FT_ZERO_DECAY}
};
#define PARTS ((int)(sizeof parts / sizeof *parts))
#define UNITS 3
#define TOTAL 2850
#define STEPS 10

static const int64_t unit_elems[UNITS] = {1000, 1190, 450}; /* trained */
static const int64_t frozen_elems[UNITS] = {0, 210, 0};

typedef enum numbers {
    EXACT,      /* odd eighths below 1: every sum of 24 of them is exact in bf16 */
    ROUGH,      /* fp32 numbers in [-1, 1) */
    MANY_SMALL, /* 1 in the first micro-batch, then 1 to 3 1024ths: bf16 cannot add them to it */
    CASE_6      /* 256 on the first rank, 1 on the others */
} numbers;

typedef struct run {
    ft_zero_config zero;
    ft_config launch;
    ft_lr lr;
    int dp, micro_batches, steps, samples;
    numbers data;
    double pull;
    int twice;  /* 1: each parameter is used twice in a forward, by half a sample each time */
    int quiet;  /* 1: no exports, which take memory and traffic of their own */
} run;

typedef struct outcome {
    ft_status status;
    char error[1024];
    float weights[STEPS + 1][TOTAL]; /* masters: at the start, after each step */
    float grads[STEPS][TOTAL];       /* reduced, not clipped; 0 where frozen */
    double loss[STEPS], norm[STEPS];
    ft_mem_stats mem[TH_RANKS];      /* highest ones since the first step began */
    int64_t gather_sent[TH_RANKS], reduce_sent[TH_RANKS], replica_sent[TH_RANKS];
    ft_zero_formula formula[TH_RANKS];
} outcome;

typedef struct rank_state {
    ft_ctx *ctx;
    ft_zero *zero;
    ft_tape *tape;
    const run *spec;
    outcome *out;
    ft_tensor *weight[PARTS], *c[PARTS], *zero_loss;
    int rank, step, micro_batch, B;
} rank_state;

static double uniform(uint64_t key) /* in [-1, 1) */
{
    return (double)(th_mix(key) >> 11) / 4503599627370496.0 - 1.0;
}

static double weight_at(int p, int64_t i)
{
    return (double)(float)(0.5 * uniform(((uint64_t)p << 32) + (uint64_t)i + 77));
}

/* c of one sample; sample / (dp B) is its micro-batch, in MANY_SMALL and CASE_6 with B = 1. */
static double c_at(const run *s, int step, int sample, int p, int64_t i)
{
    uint64_t key = ((uint64_t)step << 48) + ((uint64_t)sample << 32) + ((uint64_t)p << 24) +
                   (uint64_t)i;
    if (s->data == EXACT) return (double)(2 * (int)(th_mix(key) % 8) - 7) / 8;
    if (s->data == ROUGH) return (double)(float)uniform(key);
    if (s->data == CASE_6) return sample % s->dp == 0 ? 256 : 1;
    return sample < s->dp ? 1 : (double)(1 + th_mix(key) % 3) / 1024;
}

static ft_status init_weights(void *user, const char *name, int64_t first, int64_t n, float *values)
{
    (void)user;
    for (int64_t i = 0; i < n; i++) values[i] = (float)weight_at(name[1] - '0', first + i);
    return FT_OK;
}

/* ------------------------------------------------------------------------ its op: loss + c w + w^2

   y[1] = x[1] + sum(c w) + f[0] / 2 sum(w^2); dw = dy (c + f[0] w). Row 0 leaves the square out,
   and its backward reads no weights, as an embedding's. */

static ft_op sum_rows[2];

static float value_of(const ft_view *v, int64_t i)
{
    return v->dtype == FT_BF16 ? ft_f32_from_bf16(((const uint16_t *)v->data)[i])
                               : ((const float *)v->data)[i];
}

static ft_status sum_infer(ft_op_call *call)
{
    call->out[0].present = 1;
    call->out[0].dtype = FT_F32;
    call->out[0].ndim = 1;
    call->out[0].shape[0] = 1;
    return FT_OK;
}

static void sum_cost(const ft_op_call *call, double *flops, double *bytes)
{
    *flops = 4.0 * (double)call->in[1].shape[0];
    *bytes = 8.0 * (double)call->in[1].shape[0];
}

static ft_status sum_forward(const ft_op_call *call)
{
    double sum = (double)value_of(&call->in[0], 0), pull = call->attr.f[0];
    for (int64_t i = 0; i < call->in[1].shape[0]; i++) {
        double w = (double)value_of(&call->in[1], i);
        sum += (double)value_of(&call->in[2], i) * w + pull / 2 * w * w;
    }
    ((float *)call->out[0].data)[0] = (float)sum;
    return FT_OK;
}

/* Computed in double and rounded once to the gradient's dtype, as GEMMs do from fp32. */
static ft_status sum_backward(const ft_op_call *call)
{
    const ft_view *dw = &call->din[1];
    double dy = (double)value_of(&call->dout[0], 0), pull = call->attr.f[0];
    if (call->din[0].present) ((float *)call->din[0].data)[0] = (float)dy;
    for (int64_t i = 0; dw->present && i < dw->shape[0]; i++) {
        double g = dy * (double)value_of(&call->in[2], i);
        if (call->op == &sum_rows[1]) g += dy * pull * (double)value_of(&call->in[1], i);
        if (call->accumulate[1]) g += (double)value_of(dw, i);
        if (dw->dtype == FT_BF16) ((uint16_t *)dw->data)[i] = ft_bf16_from_f32((float)g);
        else ((float *)dw->data)[i] = (float)g;
    }
    return FT_OK;
}

static int make_rows(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        sum_rows[k] = ft_op_default();
        sum_rows[k].name = k ? "own sum and square" : "own sum";
        sum_rows[k].n_in = 3;
        sum_rows[k].n_out = 1;
        sum_rows[k].grads = FT_IN(0) | FT_IN(1);
        sum_rows[k].accumulates = FT_IN(1);
        sum_rows[k].saves[1] = k ? FT_IN(1) | FT_IN(2) : FT_IN(2);
        sum_rows[k].infer = sum_infer;
        sum_rows[k].cost = sum_cost;
        sum_rows[k].forward = sum_forward;
        sum_rows[k].backward = sum_backward;
    }
    return 0;
}

/* --------------------------------------------------------------------------------- its training */

static ft_status describe_units(rank_state *r)
{
    for (int p = 0, unit = -1; p < PARTS; p++) {
        char name[8];
        snprintf(name, sizeof name, "w%d", p);
        while (unit < parts[p].unit) FT_TRY(ft_zero_unit(r->zero, name, &unit));
        FT_TRY(ft_zero_param(r->zero, name, 1, &parts[p].n, parts[p].flags, &r->weight[p]));
        FT_TRY(ft_tensor_create(r->ctx, &r->c[p], FT_F32, 1, &parts[p].n, FT_TAG_OTHER));
    }
    return ft_zero_commit(r->zero, init_weights, NULL);
}

/* c of the micro-batch: over its B samples, or for each half of them. */
static ft_status upload_c(rank_state *r)
{
    const run *s = r->spec;
    float c[TOTAL];
    for (int p = 0; p < PARTS; p++) {
        for (int64_t i = 0; i < parts[p].n; i++) {
            double sum = 0;
            for (int b = 0; b < r->B; b++)
                sum += c_at(s, r->step, (r->micro_batch * s->dp + r->rank) * r->B + b, p, i);
            c[i] = (float)(s->twice ? sum / 2 : sum);
        }
        FT_TRY(ft_upload(r->c[p], c));
    }
    return FT_OK;
}

static ft_status forward(rank_state *r, ft_tensor **loss)
{
    ft_tensor *h = r->zero_loss, *in[3], *y;
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    for (int p = 0; p < PARTS; p++) {
        int unit = parts[p].unit;
        if (p == 0 || parts[p - 1].unit != unit)
            FT_TRY(ft_zero_enter(r->zero, unit, unit == UNITS - 1 ? FT_ZERO_KEEP : 0));
        for (int k = 0; k <= r->spec->twice; k++) {
            attr.f[0] = unit == 0 ? 0 : r->spec->pull * r->B / (1 + r->spec->twice);
            in[0] = h;
            in[1] = r->weight[p];
            in[2] = r->c[p];
            FT_TRY(ft_apply(r->ctx, &sum_rows[unit == 0 ? 0 : 1], in, &attr, &y));
            if (h != r->zero_loss) ft_tensor_free(h);
            h = y;
        }
        if (p == PARTS - 1 || parts[p + 1].unit != unit) FT_TRY(ft_zero_leave(r->zero, unit));
    }
    *loss = h;
    return FT_OK;
}

static ft_status micro_batch(rank_state *r)
{
    ft_tensor *loss;
    FT_TRY(upload_c(r));
    FT_TRY(ft_tape_begin(r->tape));
    FT_TRY(forward(r, &loss));
    FT_TRY(ft_tape_end(r->tape));
    FT_TRY(ft_backward(r->tape, loss, NULL));
    FT_TRY(ft_zero_add_loss(r->zero, loss));
    ft_tensor_free(loss);
    return FT_OK;
}

/* All parameters, or their reduced gradients; a collective call, kept by rank 0. */
static ft_status look(rank_state *r, int grads, float *values)
{
    for (int p = 0; p < PARTS; p++) {
        float *to = r->rank == 0 ? values : NULL;
        if (!grads) FT_TRY(ft_zero_export(r->zero, r->weight[p], 0, parts[p].n, to));
        else if (!(parts[p].flags & FT_ZERO_FROZEN))
            FT_TRY(ft_zero_export_grad(r->zero, r->weight[p], 0, parts[p].n, to));
        values += parts[p].n;
    }
    return FT_OK;
}

static uint64_t hash_of(const ft_tensor *t, int64_t elems)
{
    const unsigned char *bytes = (const unsigned char *)ft_data(t);
    uint64_t hash = UINT64_C(1469598103934665603);
    size_t n = (size_t)elems * ft_dtype_bytes(t->dtype);
    for (size_t i = 0; i < n; i++) hash = (hash ^ bytes[i]) * UINT64_C(1099511628211);
    return hash;
}

/* [H1] The copies hold the same bits: the gradient's shard before the update, then weights, master
   and optimizer state. Padding left out. */
static ft_status copies_agree(rank_state *r, int ending)
{
    ft_zero *z = r->zero;
    if (!z->replicas || ft_ctx_device(r->ctx) == FT_META || r->spec->quiet) return FT_OK;
    for (int u = 0; u < UNITS; u++) {
        const ft__zero_flat *f = &z->units[u].flat[0];
        int64_t mine = f->elems - z->rank * f->shard;
        if (mine > f->shard) mine = f->shard;
        if (mine < 1) continue;
        int64_t state = z->config.stage == 0 ? f->elems : mine;
        FT_TRY(ft_sync(r->ctx));
        if (ending) {
            FT_TRY(ft_agree(z->replicas, "gradients", hash_of(f->grad_mine, mine)));
            continue;
        }
        FT_TRY(ft_agree(z->replicas, "weights", hash_of(f->mine, mine)));
        if (f->master) FT_TRY(ft_agree(z->replicas, "masters", hash_of(f->master, state)));
        for (int k = 0; k < z->config.optimizer.n_state; k++)
            FT_TRY(ft_agree(z->replicas, "state", hash_of(f->state[k], state)));
    }
    return FT_OK;
}

static ft_status train_step(rank_state *r)
{
    const run *s = r->spec;
    ft_zero_report report;
    ft_tensor *scale;
    FT_TRY(ft_zero_step_begin(r->zero, s->micro_batches, 1, &scale));
    for (r->micro_batch = 0; r->micro_batch < s->micro_batches; r->micro_batch++)
        FT_TRY(micro_batch(r));
    FT_TRY(copies_agree(r, 1));
    if (!s->quiet) FT_TRY(look(r, 1, r->out->grads[r->step]));
    FT_TRY(ft_zero_step_end(r->zero, ft_lr_at(&s->lr, r->step)));
    if (s->quiet) return FT_OK;
    FT_TRY(copies_agree(r, 0));
    FT_TRY(look(r, 0, r->out->weights[r->step + 1]));
    FT_TRY(ft_zero_report_get(r->zero, &report));
    if (ft_ctx_device(r->ctx) == FT_CPU) CHECK(report.updates == r->step + 1 && !report.skipped);
    if (r->rank) return FT_OK;
    r->out->loss[r->step] = report.loss;
    r->out->norm[r->step] = report.grad_norm;
    return FT_OK;
}

static void count_traffic(rank_state *r)
{
    ft_traffic rows[16];
    int n = ft_traffic_get(r->ctx, 16, rows);
    for (int i = 0; i < n && i < 16; i++)
        for (int k = 0; k < FT_COLLECTIVE_COUNT; k++) {
            int64_t sent = rows[i].sent_bytes[k];
            if (!strcmp(rows[i].group, "zero gather")) r->out->gather_sent[r->rank] += sent;
            if (!strcmp(rows[i].group, "zero reduce")) r->out->reduce_sent[r->rank] += sent;
            if (!strcmp(rows[i].group, "zero replicas")) r->out->replica_sent[r->rank] += sent;
        }
}

typedef struct job { const run *spec; outcome *out; } job;

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    const job *j = (const job *)user;
    const run *s = j->spec;
    rank_state r;
    ft_mesh mesh;
    int64_t one = 1;
    memset(&r, 0, sizeof r);
    r.ctx = ctx;
    r.spec = s;
    r.out = j->out;
    r.rank = ft_rank(ctx);
    r.B = s->samples / (s->dp * s->micro_batches);
    CHECK(r.B * s->dp * s->micro_batches == s->samples && s->steps <= STEPS);
    FT_TRY(ft_mesh_create(ctx, s->dp, 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &s->zero, &mesh, &r.zero));
    FT_TRY(describe_units(&r));
    for (int k = 0; k < 2; k++) FT_TRY(ft_op_register(ctx, &sum_rows[k]));
    FT_TRY(ft_tensor_create(ctx, &r.zero_loss, FT_F32, 1, &one, FT_TAG_OTHER));
    FT_TRY(ft_fill(r.zero_loss, 0, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(ft_tape_create(ctx, &r.tape));
    if (!s->quiet) FT_TRY(look(&r, 0, j->out->weights[0]));
    ft_mem_reset_peak(ctx);
    for (r.step = 0; r.step < s->steps; r.step++) FT_TRY(train_step(&r));
    FT_TRY(ft_sync(ctx));
    ft_mem_get(ctx, &j->out->mem[r.rank]);
    count_traffic(&r);
    ft_zero_use use = {s->micro_batches, 0, 0};
    return ft_zero_formula_get(r.zero, &use, &j->out->formula[r.rank]);
}

static char described[200];

static const char *describe(const run *s)
{
    snprintf(described, sizeof described, "%s, dp %d, shard_ranks %d, stage %d, %s, "
             "%d micro-batches, %s, accumulate %d, reduce %d, prefetch %d, overlap %d, keep %d",
             s->launch.device == FT_META ? "meta" : "cpu", s->dp, s->zero.shard_ranks,
             s->zero.stage, ft_dtype_name(s->zero.dtype), s->micro_batches, s->zero.optimizer.name,
             (int)s->zero.accumulate_dtype, (int)s->zero.reduce_dtype, s->zero.prefetch,
             (int)s->zero.reduce_overlap, s->zero.keep_gathered);
    return described;
}

static outcome *train(const run *s)
{
    outcome *out = (outcome *)calloc(1, sizeof *out);
    ft_config launch = s->launch;
    job j;
    if (!out) abort();
    j.spec = s;
    j.out = out;
    launch.world = s->dp;
    out->status = ft_launch(&launch, rank_main, &j);
    if (out->status != FT_OK) snprintf(out->error, sizeof out->error, "%s", ft_last_error());
    return out;
}

static outcome *train_ok(const run *s)
{
    outcome *out = train(s);
    if (out->status != FT_OK)
        fail_msg("%s: %s: %s", describe(s), ft_status_name(out->status), out->error);
    return out;
}

static run run_default(void)
{
    run s;
    memset(&s, 0, sizeof s);
    s.zero = ft_zero_config_default();
    s.launch = ft_config_default();
    s.lr.peak = 0.01;
    s.dp = 4;
    s.micro_batches = 1;
    s.steps = 3;
    s.samples = 24;
    s.data = ROUGH;
    s.pull = 1.0 / 24;
    return s;
}

static int is_same(const outcome *a, const outcome *b)
{
    return !memcmp(a->weights, b->weights, sizeof a->weights) &&
           !memcmp(a->grads, b->grads, sizeof a->grads) &&
           !memcmp(a->norm, b->norm, sizeof a->norm) && !memcmp(a->loss, b->loss, sizeof a->loss);
}

static void same_bits(const run *s, const outcome *a, const outcome *b)
{
    if (!is_same(a, b)) fail_msg("%s: other bits", describe(s));
}

/* |a - b| / |a| in the 2-norm. */
static double distance(const float *a, const float *b)
{
    double square = 0, off = 0;
    for (int i = 0; i < TOTAL; i++) {
        square += (double)a[i] * (double)a[i];
        off += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    }
    return sqrt(off / square);
}

/* ----------------------------------------------------------------------------------- optimizers */

/* A user's own, in three lines of arithmetic: Lion (Chen et al. 2023, algorithm 2). Its constants
   sit in the first and the last place. */
static void lion_update(const ft_zero_update *u)
{
    for (int64_t i = 0; i < u->n; i++) {
        float g = u->grad[i], m = u->state[0][i], w = u->weight[i];
        float c = (float)u->hyper[0] * m + (float)(1 - u->hyper[0]) * g;
        u->weight[i] = w - (float)u->lr * ((float)((c > 0) - (c < 0)) + (float)u->decay * w);
        u->state[0][i] = (float)u->hyper[5] * m + (float)(1 - u->hyper[5]) * g;
        if (u->state[1]) u->weight[i] = NAN;
    }
}

/* Another: two states that count, to see what the interface promises. */
static void counting_update(const ft_zero_update *u)
{
    for (int64_t i = 0; i < u->n; i++) {
        u->state[0][i] += 1;
        u->state[1][i] += u->state[0][i];
        int64_t n = u->step;
        if (u->state[0][i] != (float)n || u->state[1][i] != (float)(n * (n + 1) / 2))
            u->weight[i] = NAN;
        u->weight[i] -= (float)u->lr * (u->grad[i] + (float)u->decay * u->weight[i]);
    }
}

static ft_zero_optimizer own_optimizer(const char *name, ft_zero_update_fn update, int n_state)
{
    ft_zero_optimizer o;
    memset(&o, 0, sizeof o);
    o.name = name;
    o.update = update;
    o.n_state = n_state;
    o.hyper[0] = 0.87;
    o.hyper[5] = 0.983;
    return o;
}

enum { SGD, MOMENTUM, NESTEROV, ADAMW, LION, COUNTING, OPTIMIZERS };

static ft_zero_optimizer optimizer_of(int kind)
{
    switch (kind) {
    case SGD: return ft_zero_sgd(0, 0);
    case MOMENTUM: return ft_zero_sgd(0.9, 0);
    case NESTEROV: return ft_zero_sgd(0.8, 1);
    case ADAMW: return ft_zero_adamw(0.8, 0.99, 1e-3);
    case LION: return own_optimizer("lion", lion_update, 1);
    default: return own_optimizer("counting", counting_update, 2);
    }
}

static const int states_of[OPTIMIZERS] = {0, 1, 1, 2, 1, 2};

/* One element's update in float64. */
static double update(int kind, double w, double g, double lr, double decay, int step, double *m,
                     double *v)
{
    if (kind == ADAMW) {
        *m = 0.8 * *m + 0.2 * g;
        *v = 0.99 * *v + 0.01 * g * g;
        return w - lr * decay * w - lr * (*m / (1 - pow(0.8, step))) /
               (sqrt(*v / (1 - pow(0.99, step))) + 1e-3);
    }
    if (kind == LION) {
        double c = 0.87 * *m + 0.13 * g;
        assert_true(fabs(c) > 1e-6 || c == 0); /* between them rounding would decide the sign */
        *m = 0.983 * *m + 0.017 * g;
        return w - lr * ((c > 0) - (c < 0) + decay * w);
    }
    double d = g + decay * w, mu = kind == MOMENTUM ? 0.9 : kind == NESTEROV ? 0.8 : 0;
    *v = mu * *v + d;
    return w - lr * (kind == NESTEROV ? d + mu * *v : *v);
}

/* The learning rates of wsd with peak 0.06, floor 0.02, warm-up 3, decay 4, total 10, by hand. */
static const double rates[STEPS] = {0.02, 0.04, 0.06, 0.06, 0.06, 0.06, 0.06, 0.05, 0.04, 0.03};

/* Ten steps in float64, from nothing but the data; EXACT gradients do not depend on the weights. */
static void check_against_float64(const run *s, const outcome *out, int kind)
{
    static double w[TOTAL], m[TOTAL], v[TOTAL], g[TOTAL];
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    for (int t = 0; t < s->steps; t++) {
        double square = 0, coef = 1;
        for (int p = 0, at = 0; p < PARTS; p++)
            for (int64_t i = 0; i < parts[p].n; i++, at++) {
                g[at] = 0;
                if (t == 0) w[at] = weight_at(p, i);
                if (parts[p].flags & FT_ZERO_FROZEN && s->zero.dtype == FT_BF16) /* no master */
                    w[at] = (double)ft_f32_from_bf16(ft_bf16_from_f32((float)w[at]));
                for (int k = 0; k < s->samples && !(parts[p].flags & FT_ZERO_FROZEN); k++)
                    g[at] += c_at(s, t, k, p, i);
                square += g[at] * g[at];
                if (out->grads[t][at] != (float)g[at])
                    fail_msg("%s, step %d: gradient %d is %g, not %g", describe(s), t, at,
                             (double)out->grads[t][at], g[at]);
            }
        if (s->zero.grad_clip > 0) coef = s->zero.grad_clip / (sqrt(square) + 1e-6);
        if (coef > 1) coef = 1;
        assert_true(fabs(out->norm[t] - sqrt(square)) <= 1e-6 * sqrt(square));
        for (int p = 0, at = 0; p < PARTS; p++)
            for (int64_t i = 0; i < parts[p].n; i++, at++) {
                double decay = parts[p].flags & FT_ZERO_DECAY ? s->zero.weight_decay : 0;
                if (!(parts[p].flags & FT_ZERO_FROZEN))
                    w[at] = update(kind, w[at], coef * g[at], rates[t], decay, t + 1, &m[at],
                                   &v[at]);
                double off = fabs((double)out->weights[t + 1][at] - w[at]);
                if (!(off <= 3e-6 * (1 + fabs(w[at]))))
                    fail_msg("%s, step %d: weight %d is %.9g, expected %.9g", describe(s), t, at,
                             (double)out->weights[t + 1][at], w[at]);
            }
    }
}

static int64_t up_to(int64_t n, int64_t by) { return (n + by - 1) / by * by; }
static int64_t accounted(int64_t bytes) { return up_to(bytes, 256); }
static int64_t shard_of(int64_t elems, int D) { return up_to((elems + D - 1) / D, 8); }

static int copy_ranks(const run *s) { return s->zero.shard_ranks ? s->zero.shard_ranks : s->dp; }

static int64_t hand_optim(const run *s)
{
    int64_t bytes = 0, D = copy_ranks(s);
    for (int u = 0; u < UNITS; u++)
        bytes += accounted(4 * shard_of(unit_elems[u], (int)D) * (s->zero.stage == 0 ? D : 1));
    return bytes * (s->zero.optimizer.n_state + (s->zero.dtype == FT_BF16));
}

static void bytes_are(const run *s, const char *what, int64_t real, int64_t formula, int64_t hand)
{
    if (real != hand || formula != hand)
        fail_msg("%s: %s: %lld bytes, the formula says %lld, by hand it is %lld", describe(s), what,
                 (long long)real, (long long)formula, (long long)hand);
}

static void check_optim_bytes(const run *s, const outcome *out)
{
    for (int rank = 0; rank < s->dp; rank++) {
        int64_t formula = (int64_t)out->formula[rank].optim, hand = hand_optim(s);
        bytes_are(s, "optim", (int64_t)out->mem[rank].live[FT_TAG_OPTIM], formula, hand);
        bytes_are(s, "optim", (int64_t)out->mem[rank].highest[FT_TAG_OPTIM], formula, hand);
    }
}

static void test_optimizers(void **state)
{
    (void)state;
    for (int i = 0; i < OPTIMIZERS * 2 * 2; i++) {
        outcome *first = NULL;
        int kind = i % OPTIMIZERS;
        for (int stage = 0; stage < 4; stage++) {
            run s = run_default();
            times t = {3, 4, 10};
            s.dp = i / OPTIMIZERS % 2 ? 4 : 3;
            s.micro_batches = i / OPTIMIZERS % 2 + 1;
            s.steps = STEPS;
            s.lr = lr_make(FT_LR_WSD, &t, 0.06, 0.02);
            s.data = EXACT;
            s.pull = 0;
            s.zero.stage = stage;
            s.zero.dtype = i / OPTIMIZERS / 2 ? FT_BF16 : FT_F32;
            s.zero.optimizer = optimizer_of(kind);
            s.zero.weight_decay = 0.3;
            s.zero.grad_clip = i % 2 ? 0 : 30; /* norms: (24 * 2640)^(1/2) * 0.57 = 144 */
            assert_int_equal(s.zero.optimizer.n_state, states_of[kind]);
            outcome *out = train_ok(&s);
            check_against_float64(&s, out, kind);
            check_optim_bytes(&s, out);
            if (!first) first = out;
            same_bits(&s, first, out);
            if (out != first) free(out);
        }
        free(first);
    }
}

static void test_optimizer_refusals(void **state)
{
    (void)state;
    for (int i = 0; i < 9; i++) {
        run s = run_default();
        ft_zero_optimizer *o = &s.zero.optimizer;
        s.dp = 1;
        if (i == 0) *o = own_optimizer("no function", NULL, 1);
        if (i == 1) *o = own_optimizer(NULL, lion_update, 1);
        if (i == 2) *o = own_optimizer("three states", lion_update, FT_ZERO_MAX_STATE + 1);
        if (i == 3) *o = own_optimizer("fewer than none", lion_update, -1);
        if (i == 4) *o = ft_zero_sgd(1, 0);
        if (i == 5) *o = ft_zero_sgd(-0.1, 0);
        if (i == 6) *o = ft_zero_sgd(NAN, 1);
        if (i == 7) *o = ft_zero_adamw(0.9, 1, 1e-8);
        if (i == 8) memset(o, 0, sizeof *o);
        outcome *out = train(&s);
        if (out->status != FT_ERR_ARG || strlen(out->error) < 20)
            fail_msg("optimizer %d: '%s': %s", i, ft_status_name(out->status), out->error);
        free(out);
    }
}

/* ------------------------------------------------------------------------------- bytes, by hand */

static int64_t width_of(const run *s, ft_zero_dtype dtype)
{
    return dtype == FT_ZERO_F32 || (dtype == FT_ZERO_SAME && s->zero.dtype == FT_F32) ? 4 : 2;
}

/* Shards kept for all units (one micro-batch: for those that backward has been to), the unit at
   work in the dtype of the wire, and with overlap its predecessor; after the last unit comes the
   first one's next micro-batch. */
static int64_t hand_grad(const run *s)
{
    int D = copy_ranks(s), sharded = s->zero.stage >= 2 && D > 1, M = s->micro_batches;
    int64_t kept = width_of(s, s->zero.accumulate_dtype), work = width_of(s, s->zero.reduce_dtype);
    int64_t whole = 0, shards[UNITS], full[UNITS], all = 0, most = 0, sum = 0;
    for (int u = 0; u < UNITS; u++) {
        shards[u] = accounted(kept * shard_of(unit_elems[u], D));
        full[u] = accounted(work * D * shard_of(unit_elems[u], D));
        whole += accounted(kept * D * shard_of(unit_elems[u], D));
        all += shards[u];
    }
    if (!sharded) return whole;
    for (int u = UNITS - 1; u >= 0; u--) {
        int before = u + 1 < UNITS ? u + 1 : M > 1 ? 0 : -1;
        sum += shards[u];
        int64_t now = (M > 1 ? all : sum) + full[u];
        if (s->zero.reduce_overlap != FT_OFF && before >= 0) now += full[before];
        if (now > most) most = now;
    }
    return most;
}

/* The largest buffer between unlike dtypes, or between a micro-batch's sum and the shard. */
static int64_t hand_comm(const run *s)
{
    int D = copy_ranks(s), sharded = s->zero.stage >= 2 && D > 1;
    int64_t wire = width_of(s, s->zero.reduce_dtype), most = 0;
    int unlike = wire != width_of(s, s->zero.accumulate_dtype);
    if (s->dp == 1 || (!unlike && !(sharded && s->micro_batches > 1))) return 0;
    for (int u = 0; u < UNITS; u++) {
        int64_t bytes = accounted(wire * shard_of(unit_elems[u], D) * (sharded ? 1 : D));
        if (bytes > most) most = bytes;
    }
    return most;
}

typedef struct traffic { int64_t gather, reduce, replicas; } traffic;

/* A step's. The first unit is gathered once a micro-batch, as its backward reads nothing; the last
   too, as it stays; those in between twice. */
static traffic hand_traffic(const run *s)
{
    int D = copy_ranks(s), stage = s->zero.stage;
    int64_t e = width_of(s, FT_ZERO_SAME), wire = width_of(s, s->zero.reduce_dtype), M;
    int64_t trained = 0, all = 0, middle, copies = s->dp / D;
    traffic t;
    M = s->micro_batches;
    for (int u = 0; u < UNITS; u++) {
        trained += shard_of(unit_elems[u], D);
        all += shard_of(unit_elems[u], D) + (frozen_elems[u] ? shard_of(frozen_elems[u], D) : 0);
    }
    middle = shard_of(unit_elems[1], D) + shard_of(frozen_elems[1], D);
    t.gather = stage == 0 ? 0 : trained * (D - 1) * e;
    if (stage == 3) t.gather = (s->zero.keep_gathered ? all : M * (all + middle)) * (D - 1) * e;
    t.reduce = trained * (D - 1) * wire * (stage == 0 ? 2 : stage == 1 ? 1 : M);
    if (stage >= 2 && D > 1) wire = width_of(s, s->zero.accumulate_dtype);
    t.replicas = 2 * trained * wire * (copies - 1) / copies;
    return t;
}

static int64_t hand_param(const run *s)
{
    int64_t D = copy_ranks(s), here = s->zero.stage == 3 ? 1 : D;
    int64_t bytes = 0, e = width_of(s, FT_ZERO_SAME);
    for (int u = 0; u < UNITS; u++) {
        bytes += accounted(e * here * shard_of(unit_elems[u], (int)D));
        bytes += accounted(e * here * (frozen_elems[u] ? shard_of(frozen_elems[u], (int)D) : 0));
    }
    return bytes;
}

/* Real = formula = by hand, on every rank and per tag; and meta does as the CPU does. */
static void check_costs(run s)
{
    traffic t = hand_traffic(&s);
    s.quiet = 1;
    s.steps = 2;
    outcome *real = train_ok(&s);
    s.launch.device = FT_META;
    outcome *plan = train_ok(&s);
    s.launch.device = FT_CPU;
    for (int rank = 0; rank < s.dp; rank++) {
        const ft_mem_stats *m = &real->mem[rank], *n = &plan->mem[rank];
        const ft_zero_formula *f = &real->formula[rank];
        const size_t *high = m->highest;
        bytes_are(&s, "param", (int64_t)high[FT_TAG_PARAM], (int64_t)f->param, hand_param(&s));
        bytes_are(&s, "optim", (int64_t)high[FT_TAG_OPTIM], (int64_t)f->optim, hand_optim(&s));
        bytes_are(&s, "grad", (int64_t)high[FT_TAG_GRAD], (int64_t)f->grad_max, hand_grad(&s));
        bytes_are(&s, "comm", (int64_t)high[FT_TAG_COMM], (int64_t)f->comm_max, hand_comm(&s));
        bytes_are(&s, "gather", (int64_t)high[FT_TAG_GATHER], (int64_t)f->gather_max,
                  (int64_t)f->gather_max);
        bytes_are(&s, "sent to gather", real->gather_sent[rank], 2 * f->gather_sent, 2 * t.gather);
        bytes_are(&s, "sent to reduce", real->reduce_sent[rank], 2 * f->reduce_sent, 2 * t.reduce);
        bytes_are(&s, "sent to replicas", real->replica_sent[rank], 2 * f->replica_sent,
                  2 * t.replicas);
        for (int tag = 0; tag < FT_TAG_COUNT; tag++)
            if (m->live[tag] != n->live[tag] || m->highest[tag] != n->highest[tag] ||
                m->at_peak[tag] != n->at_peak[tag])
                fail_msg("%s, rank %d: meta has other bytes of %s", describe(&s), rank,
                         ft_tag_name((ft_tag)tag));
        assert_int_equal(m->peak_bytes, n->peak_bytes);
        assert_int_equal(real->gather_sent[rank], plan->gather_sent[rank]);
        assert_int_equal(real->reduce_sent[rank], plan->reduce_sent[rank]);
        assert_int_equal(real->replica_sent[rank], plan->replica_sent[rank]);
    }
    free(real);
    free(plan);
}

static void test_costs(void **state)
{
    static const int layout[][2] = {{4, 0}, {4, 2}, {4, 1}, {8, 4}, {1, 0}}; /* dp, shard_ranks */
    (void)state;
    for (int i = 0; i < 5 * 4 * 2 * 2 * 3; i++) {
        run s = run_default();
        s.dp = layout[i % 5][0];
        s.zero.shard_ranks = layout[i % 5][1];
        s.zero.stage = i / 5 % 4;
        s.micro_batches = i / 20 % 2 ? 3 : 1;
        s.zero.dtype = i / 40 % 2 ? FT_BF16 : FT_F32;
        s.zero.reduce_dtype = (ft_zero_dtype)(i / 80);
        s.zero.accumulate_dtype = (i / 3 + i / 40) % 2 ? FT_ZERO_F32 : FT_ZERO_SAME;
        s.zero.reduce_overlap = i / 7 % 2 ? FT_OFF : FT_ON;
        s.zero.prefetch = i % 3;
        s.zero.keep_gathered = i % 4 == 3;
        s.zero.optimizer = optimizer_of(i % OPTIMIZERS);
        check_costs(s);
    }
}

/* ------------------------------------------------------------------------- accumulation in fp32 */

static double worst_grad(const outcome *exact, const outcome *out)
{
    double worst = 0;
    for (int i = 0; i < TOTAL; i++) {
        double off = fabs((double)out->grads[0][i] - (double)exact->grads[0][i]);
        if (exact->grads[0][i] > 0 && off / (double)exact->grads[0][i] > worst)
            worst = off / (double)exact->grads[0][i];
    }
    return worst;
}

/* Micro-batch 0 gives 1 on each of 4 ranks, 7 more give 1/1024 to 3/1024 each: fp32 holds every sum
   exactly. Added in bf16, whose neighbours near 1 are 1/128 apart, all of the small ones are lost,
   up to 4 * 7 * 3 / 1024 of 4; what is left of that with fp32 is a rounding or two to the wire. */
static void test_accumulate_dtype(void **state)
{
    (void)state;
    run s = run_default();
    s.micro_batches = 8;
    s.samples = 32;
    s.steps = 2;
    s.data = MANY_SMALL;
    s.pull = 0;
    s.zero.optimizer = ft_zero_sgd(0, 0);
    s.zero.grad_clip = 0;
    outcome *exact = train_ok(&s);
    s.zero.dtype = FT_BF16;
    for (s.zero.stage = 0; s.zero.stage < 4; s.zero.stage++) {
        outcome *out[3]; /* bf16; fp32 kept, bf16 sent; fp32 both */
        for (int k = 0; k < 3; k++) {
            s.zero.accumulate_dtype = k ? FT_ZERO_F32 : FT_ZERO_SAME;
            s.zero.reduce_dtype = k == 2 ? FT_ZERO_F32 : FT_ZERO_SAME;
            out[k] = train_ok(&s);
        }
        double lost = worst_grad(exact, out[0]), kept = worst_grad(exact, out[1]);
        double lost_w = distance(exact->weights[2], out[0]->weights[2]);
        double kept_w = distance(exact->weights[2], out[1]->weights[2]);
        assert_true(lost > 0.015 && worst_grad(exact, out[2]) == 0);
        if (!(kept <= 1.0 / 128 && kept < lost / 2 && kept_w < lost_w / 2))
            fail_msg("%s: gradients off by %.3g, with bf16 by %.3g; weights %.3g, %.3g",
                     describe(&s), kept, lost, kept_w, lost_w);
        if (s.zero.stage >= 2) assert_true(kept == 0); /* each micro-batch's sum fits bf16 */
        for (int k = 0; k < 3; k++) free(out[k]);
    }
    free(exact);
}

/* "2 bytes more for each gradient kept": whole in stages 0 and 1, shards in 2 and 3. */
static void test_accumulate_bytes(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        int64_t grad[2], more = 0;
        run s = run_default();
        s.micro_batches = 8;
        s.samples = 32;
        s.steps = 1;
        s.quiet = 1;
        s.zero.stage = stage;
        s.zero.dtype = FT_BF16;
        for (int k = 0; k < 2; k++) {
            s.zero.accumulate_dtype = k ? FT_ZERO_F32 : FT_ZERO_SAME;
            outcome *out = train_ok(&s);
            grad[k] = (int64_t)out->mem[0].highest[FT_TAG_GRAD];
            free(out);
        }
        for (int u = 0; u < UNITS; u++) {
            int64_t n = shard_of(unit_elems[u], 4) * (stage < 2 ? 4 : 1);
            more += accounted(4 * n) - accounted(2 * n);
        }
        assert_int_equal(grad[1] - grad[0], more);
    }
}

/* ------------------------------------------------------------------------ the dtype of the wire */

/* 256 + 7 * 1. In bf16 numbers above 256 are 2 apart and ties go to even: 263 is 264. Where the
   wire is bf16 in hybrid sharding, a copy's sum is rounded before the copies are added: 4 + 4 ranks
   give 260 + 4, 2 + 2 + 2 + 2 give 256 + 6. So also where a copy's fp32 sum goes into a bf16 shard
   (stages 2 and 3) before the copies add theirs. */
static double case_6(const run *s)
{
    int wide = width_of(s, s->zero.reduce_dtype) == 4;
    int kept = width_of(s, s->zero.accumulate_dtype) == 4;
    int shards = s->zero.stage >= 2 && s->zero.shard_ranks != 1;
    if (wide && kept) return 263;
    if (s->zero.shard_ranks == 2 && (!wide || shards)) return 262;
    return 264;
}

static void test_case_6(void **state)
{
    static const int shard_ranks[] = {0, 8, 4, 2, 1};
    (void)state;
    for (int i = 0; i < 4 * 2 * 3 * 2 * 5; i++) {
        run s = run_default();
        s.dp = s.samples = 8;
        s.steps = 1;
        s.data = CASE_6;
        s.pull = 0;
        s.zero.stage = i % 4;
        s.zero.dtype = i / 4 % 2 ? FT_BF16 : FT_F32;
        s.zero.reduce_dtype = (ft_zero_dtype)(i / 8 % 3);
        s.zero.accumulate_dtype = i / 24 % 2 ? FT_ZERO_F32 : FT_ZERO_SAME;
        s.zero.shard_ranks = shard_ranks[i / 48];
        outcome *out = train_ok(&s);
        for (int p = 0, at = 0; p < PARTS; at += (int)parts[p].n, p++)
            for (int k = 0; k < parts[p].n && !(parts[p].flags & FT_ZERO_FROZEN); k++)
                if ((double)out->grads[0][at + k] != case_6(&s))
                    fail_msg("%s: 256 and seven times 1 are %g, expected %g", describe(&s),
                             (double)out->grads[0][at + k], case_6(&s));
        free(out);
    }
}

/* fp32 on the wire doubles bf16's traffic of reductions, bf16 halves fp32's; gathers stay. */
static void test_reduce_traffic(void **state)
{
    (void)state;
    for (int i = 0; i < 4 * 2 * 2; i++) {
        outcome *out[3];
        run s = run_default();
        s.steps = 1;
        s.quiet = 1;
        s.zero.stage = i % 4;
        s.micro_batches = i / 4 % 2 == 0 ? 1 : s.dp == 3 ? 2 : 3;
        s.zero.dtype = i / 8 ? FT_BF16 : FT_F32;
        for (int k = 0; k < 3; k++) {
            s.zero.reduce_dtype = (ft_zero_dtype)k;
            out[k] = train_ok(&s);
            assert_int_equal(out[k]->gather_sent[3], out[0]->gather_sent[3]);
            assert_int_equal(out[k]->reduce_sent[3], hand_traffic(&s).reduce);
        }
        assert_true(out[FT_ZERO_BF16]->reduce_sent[3] > 0);
        assert_int_equal(out[FT_ZERO_F32]->reduce_sent[3], 2 * out[FT_ZERO_BF16]->reduce_sent[3]);
        assert_int_equal(out[FT_ZERO_SAME]->reduce_sent[3],
                         out[i / 8 ? FT_ZERO_BF16 : FT_ZERO_F32]->reduce_sent[3]);
        for (int k = 0; k < 3; k++) free(out[k]);
    }
}

/* Numbers that need rounding, parameters used once and twice. Stages 0 and 1 have always the same
   bits, 2 and 3 too; all four with one micro-batch, where gradients are added and sent in one
   dtype. Elsewhere a gradient is rounded to bf16 at another point: by up to 2^-8 of itself, a few
   times. */
static void test_stages_agree(void **state)
{
    static const int layout[][2] = {{4, 0}, {3, 0}, {4, 2}, {4, 1}, {8, 4}};
    (void)state;
    for (int i = 0; i < 5 * 2 * 3 * 2 * 2; i++) {
        outcome *out[4];
        run s = run_default();
        s.dp = layout[i % 5][0];
        s.zero.shard_ranks = layout[i % 5][1];
        s.zero.dtype = i / 5 % 2 ? FT_BF16 : FT_F32;
        s.zero.reduce_dtype = (ft_zero_dtype)(i / 10 % 3);
        s.zero.accumulate_dtype = i / 30 % 2 ? FT_ZERO_F32 : FT_ZERO_SAME;
        s.zero.optimizer = ft_zero_sgd(0.9, 0);
        s.lr.peak = 1e-3;
        s.twice = i / 60;
        s.micro_batches = i / 4 % 2 == 0 ? 1 : s.dp == 3 ? 2 : 3;
        int one = width_of(&s, s.zero.reduce_dtype) == width_of(&s, s.zero.accumulate_dtype);
        for (s.zero.stage = 0; s.zero.stage < 4; s.zero.stage++) out[s.zero.stage] = train_ok(&s);
        s.zero.stage = 1;
        same_bits(&s, out[0], out[1]);
        s.zero.stage = 3;
        same_bits(&s, out[2], out[3]);
        if (one && s.micro_batches == 1) same_bits(&s, out[0], out[3]);
        double off = distance(out[0]->grads[0], out[2]->grads[0]);
        if (!(off <= 0.01))
            fail_msg("%s: gradients of stages 0 and 2 differ by %g", describe(&s), off);
        for (int k = 0; k < 4; k++) free(out[k]);
    }
}

/* ------------------------------------------------------------------------------ hybrid sharding */

static void is_close(const run *s, const outcome *a, const outcome *b, double bound)
{
    for (int t = 0; t < s->steps; t++) {
        double w = distance(a->weights[t + 1], b->weights[t + 1]);
        double loss = fabs(a->loss[t] - b->loss[t]) / fabs(a->loss[t]);
        double norm = fabs(a->norm[t] - b->norm[t]) / a->norm[t];
        double g = distance(a->grads[t], b->grads[t]);
        if (!(w <= bound && loss <= bound && norm <= bound && g <= bound))
            fail_msg("%s, step %d: weights off by %.3g, loss by %.3g, norm by %.3g, gradients by "
                     "%.3g", describe(s), t, w, loss, norm, g);
    }
}

/* dp, shard_ranks: 2 copies on 2 ranks each, 4 on 1, 2 on 4, 4 on 2, and 1 copy said explicitly. */
static const int hybrids[][2] = {{4, 2}, {4, 1}, {8, 4}, {8, 2}, {4, 4}};

/* A hybrid is a layout: it trains as 4 ranks with one copy do, whenever gathers and reductions
   run. */
static void test_hybrid(void **state)
{
    (void)state;
    for (int i = 0; i < 2 * 2 * 5; i++) {
        run s = run_default();
        s.steps = 5;
        s.zero.weight_decay = 0.1;
        s.zero.grad_clip = 50;
        s.zero.optimizer = i % 2 ? ft_zero_sgd(0.9, 1) : ft_zero_adamw(0.9, 0.95, 1e-8);
        s.lr.peak = 1e-3;
        outcome *flat = train_ok(&s);
        s.dp = hybrids[i / 4][0];
        s.zero.shard_ranks = hybrids[i / 4][1];
        s.micro_batches = i / 2 % 2 ? 3 : 1;
        for (s.zero.stage = 0; s.zero.stage < 4; s.zero.stage++) {
            outcome *first = NULL;
            for (int k = 0; k < 4; k++) { /* when they run changes no bit */
                if ((s.zero.stage < 3 && k > 1) || (s.zero.stage < 2 && k)) continue;
                s.zero.prefetch = k;
                s.zero.reduce_overlap = k % 2 ? FT_OFF : FT_ON;
                s.zero.keep_gathered = k == 2;
                outcome *out = train_ok(&s);
                is_close(&s, flat, out, 1e-6);
                if (!first) first = out;
                same_bits(&s, first, out);
                if (out != first) free(out);
            }
            free(first);
        }
        free(flat);
    }
}

/* The same in bf16, with gradients that bf16 holds. The loss is one of rounded weights, which flip
   where masters differ by a rounding: it is left out. */
static void test_hybrid_bf16(void **state)
{
    (void)state;
    for (int i = 0; i < 4 * 4; i++) {
        run s = run_default();
        s.data = EXACT;
        s.pull = 0;
        s.steps = 4;
        s.zero.dtype = FT_BF16;
        s.zero.grad_clip = 50;
        s.zero.weight_decay = 0.1;
        s.micro_batches = 3;
        outcome *flat = train_ok(&s);
        s.dp = hybrids[i / 4][0];
        s.zero.shard_ranks = hybrids[i / 4][1];
        s.zero.stage = i % 4;
        outcome *out = train_ok(&s);
        for (int t = 0; t < s.steps; t++) {
            double w = distance(flat->weights[t + 1], out->weights[t + 1]);
            if (memcmp(flat->grads[t], out->grads[t], sizeof flat->grads[t]) || !(w <= 1e-6))
                fail_msg("%s, step %d: weights off by %.3g", describe(&s), t, w);
        }
        free(flat);
        free(out);
    }
}

static void test_hybrid_llama(void **state)
{
    (void)state;
    th_options o = th_options_default();
    o.model.hidden = 32;
    o.model.intermediate = 48;
    o.T = 4;
    o.dp = 4;
    o.steps = 3;
    o.keep_weights = 1;
    th_result *flat = th_run(&o);
    assert_int_equal(flat->status, FT_OK);
    for (int i = 0; i < 3 * 4 * 2; i++) {
        o.dp = hybrids[i % 3][0];
        o.zero.shard_ranks = hybrids[i % 3][1];
        o.zero.stage = i / 3 % 4;
        o.micro_batches = i / 12 ? 3 : 1;
        th_result *r = th_run(&o);
        if (r->status != FT_OK) fail_msg("dp %d, stage %d: %s", o.dp, o.zero.stage, r->error);
        double square = 0, off = 0;
        for (int64_t k = 0; k < flat->n_weights; k++) {
            double a = (double)flat->weights[k], d = a - (double)r->weights[k];
            square += a * a;
            off += d * d;
        }
        for (int t = 0; t < o.steps; t++)
            if (!(fabs(flat->loss[t] - r->loss[t]) <= 1e-6 * flat->loss[t]) ||
                !(sqrt(off / square) <= 1e-6))
                fail_msg("dp %d, shard_ranks %d, stage %d, %d micro-batches, step %d: loss %.9g, "
                         "expected %.9g; weights off by %.3g", o.dp, o.zero.shard_ranks,
                         o.zero.stage, o.micro_batches, t, r->loss[t], flat->loss[t],
                         sqrt(off / square));
        th_free(r);
    }
    th_free(flat);
}

/* Rank 0 wants other shards than its peers. */
static ft_status shards_of_its_own(ft_ctx *ctx, void *user)
{
    const run *s = (const run *)user;
    ft_zero_config config = s->zero;
    rank_state r;
    ft_mesh mesh;
    memset(&r, 0, sizeof r);
    r.ctx = ctx;
    if (ft_rank(ctx) == 0) config.shard_ranks = 4;
    FT_TRY(ft_mesh_create(ctx, s->dp, 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &config, &mesh, &r.zero));
    return describe_units(&r);
}

static void test_shard_ranks_refusals(void **state)
{
    static const int bad[][2] = {{4, -1}, {4, 3}, {4, 5}, {4, 8}, {3, 2}, {1, 2}, {8, 6}};
    (void)state;
    for (int i = 0; i < 7 * 2; i++) {
        run s = run_default();
        s.dp = bad[i % 7][0];
        s.zero.shard_ranks = bad[i % 7][1];
        s.zero.stage = i % 4;
        s.launch.device = i / 7 ? FT_META : FT_CPU;
        outcome *out = train(&s);
        if (out->status != FT_ERR_ARG || !strstr(out->error, "shard_ranks"))
            fail_msg("%s: '%s': %s", describe(&s), ft_status_name(out->status), out->error);
        free(out);
    }
    for (int ranks = 1; ranks <= 2; ranks++) {
        run s = run_default();
        s.zero.shard_ranks = ranks;
        s.launch.world = 4;
        s.launch.timeout_s = 20;
        ft_status status = ft_launch(&s.launch, shards_of_its_own, &s);
        if (status != FT_ERR_COMM) fail_msg("'%s': %s", ft_status_name(status), ft_last_error());
    }
}

/* -------------------------------------------------------------- streams as threads, with delays */

static void test_async(void **state)
{
    (void)state;
    for (int i = 0; i < 4 * 3 * 2; i++) {
        run s = run_default();
        s.zero.stage = i % 4;
        s.zero.shard_ranks = i / 4 % 3; /* 1-D, 4 x 1, 2 x 2 */
        s.zero.dtype = i / 12 ? FT_BF16 : FT_F32;
        s.zero.reduce_dtype = i / 12 ? FT_ZERO_F32 : FT_ZERO_BF16;
        s.zero.accumulate_dtype = FT_ZERO_F32;
        s.zero.optimizer = optimizer_of(i % OPTIMIZERS);
        s.zero.keep_gathered = i % 3 == 2;
        s.micro_batches = 2;
        s.launch.async = FT_OFF;
        outcome *still = train_ok(&s);
        s.launch.async = FT_ON;
        s.launch.delay_us = 200;
        outcome *busy = train_ok(&s);
        same_bits(&s, still, busy);
        free(still);
        free(busy);
    }
}

/* A model of one unit has no next and no earlier one: in stage 3 it is gathered once a micro-batch. */
static ft_status one_unit(ft_ctx *ctx, void *user)
{
    int keep = *(const int *)user, M = 3, unit, groups;
    int64_t shape[2] = {16, 16}, wire = 16 * 16 * 4 / 2;
    ft_zero_config config = ft_zero_config_default();
    ft_zero_formula formula;
    ft_traffic rows[8];
    ft_tensor *w, *x, *y, *loss;
    ft_tape *tape;
    ft_mesh mesh;
    ft_zero *zero;
    config.stage = 3;
    config.keep_gathered = keep;
    FT_TRY(ft_mesh_create(ctx, 2, 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &config, &mesh, &zero));
    FT_TRY(ft_zero_unit(zero, "only", &unit));
    FT_TRY(ft_zero_param(zero, "w", 2, shape, 0, &w));
    FT_TRY(ft_zero_commit(zero, NULL, NULL));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tensor_create(ctx, &x, FT_F32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_fill(x, 0, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(ft_zero_step_begin(zero, M, 1, NULL));
    for (int m = 0; m < M; m++) {
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(ft_zero_enter(zero, unit, FT_ZERO_KEEP));
        FT_TRY(ft_linear(ctx, &y, x, w, NULL));
        FT_TRY(ft_mean(ctx, &loss, y));
        FT_TRY(ft_zero_leave(zero, unit));
        FT_TRY(ft_tape_end(tape));
        FT_TRY(ft_backward(tape, loss, NULL));
        ft_tensor_free(loss);
    }
    FT_TRY(ft_zero_step_end(zero, 0));
    ft_zero_use use = {M, 0, 0};
    FT_TRY(ft_zero_formula_get(zero, &use, &formula));
    groups = ft_traffic_get(ctx, 8, rows);
    for (int g = 0; g < groups; g++)
        if (!strcmp(rows[g].group, "zero gather"))
            CHECK(rows[g].sent_bytes[FT_ALL_GATHER] == (keep ? 1 : M) * wire);
    CHECK(formula.gather_sent == (keep ? 1 : M) * wire);
    return FT_OK;
}

static void test_one_unit(void **state)
{
    (void)state;
    for (int keep = 0; keep < 2; keep++) {
        ft_config config = ft_config_default();
        config.world = 2;
        if (ft_launch(&config, one_unit, &keep) != FT_OK) fail_msg("keep %d: %s", keep, ft_last_error());
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_schedules),
        cmocka_unit_test(test_schedule_refusals),
        cmocka_unit_test(test_optimizers),
        cmocka_unit_test(test_optimizer_refusals),
        cmocka_unit_test(test_costs),
        cmocka_unit_test(test_accumulate_dtype),
        cmocka_unit_test(test_accumulate_bytes),
        cmocka_unit_test(test_case_6),
        cmocka_unit_test(test_reduce_traffic),
        cmocka_unit_test(test_stages_agree),
        cmocka_unit_test(test_hybrid),
        cmocka_unit_test(test_hybrid_bf16),
        cmocka_unit_test(test_hybrid_llama),
        cmocka_unit_test(test_shard_ranks_refusals),
        cmocka_unit_test(test_async),
        cmocka_unit_test(test_one_unit),
    };
    return cmocka_run_group_tests(tests, make_rows, NULL);
}
