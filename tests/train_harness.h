/* train_harness.h: trains a small Llama for a few steps under any layout and says what happened.

   Include after the headers, with their implementation:

       th_options o = th_options_default();
       o.dp = 4;
       o.stage = 3;
       th_result *r = th_run(&o);       (malloc'd: th_free)
       if (r->status != FT_OK) ... r->error

   The global batch of a step is `samples` rows of T tokens, each a function of (step, sample)
   alone; sample (m dp + rank) B + b is row b of micro-batch m of `rank`, B = samples / (dp
   micro_batches).
   So the data do not depend on the layout, and neither do the weights at the start.

   th_rank_main(ctx, th_job *) is the program of one rank, for ft_launch and ft_sac_fit. */

#ifndef TRAIN_HARNESS_H
#define TRAIN_HARNESS_H

#include <stdlib.h>
#include <string.h>

#define TH_RANKS 8
#define TH_STEPS 32

typedef enum th_moment {
    TH_CREATED,      /* model and tape exist, no step yet */
    TH_STEP_BEGUN,   /* after ft_zero_step_begin */
    TH_FORWARD_DONE, /* of a micro-batch; its tape has ended */
    TH_BACKWARD_DONE,
    TH_STEP_ENDING,  /* before ft_zero_step_end: reduced gradients are there */
    TH_STEP_DONE,
    TH_END           /* after the last step; what the run itself reads comes afterwards */
} th_moment;

typedef struct th_job th_job;

typedef struct th_rank { /* what a hook sees */
    ft_ctx *ctx;
    ft_zero *zero;
    ft_llama *model;
    ft_tape *tape;
    ft_tensor *tokens, *labels, *scale, *loss; /* of the micro-batch; loss lives until its end */
    const th_job *job;
    int rank, step, micro_batch;
} th_rank;

typedef ft_status (*th_hook_fn)(th_rank *r, th_moment moment, void *user);
/* tokens[T], labels[T] of a sample. */
typedef void (*th_data_fn)(void *user, int step, int sample, int64_t T, int32_t *tokens,
                           int32_t *labels);

typedef struct th_options {
    ft_llama_config model;   /* default: the tests' tiny model */
    int64_t T;
    int samples;             /* a multiple of dp * micro_batches */
    int micro_batches, steps;
    uint64_t seed;           /* of the weights */
    double lr;
    int dp;
    ft_zero_config zero;     /* stage, dtype, prefetch, reduce_overlap, decay, clip, ... */
    const ft_sac *sac;       /* [layers], NULL: none */
    ft_config launch;        /* device, async, delay_us, timeline, ...; world is set to dp */
    th_data_fn data;         /* NULL: th_data */
    th_hook_fn hook;         /* may be NULL; each rank calls it at every moment */
    void *user;              /* of data and hook */
    int report_every;        /* 1: losses and norms of each step; 0: of the last one alone, and no
                                host synchronisation before it */
    int keep_weights;        /* 1: all masters, in canonical order, in result.weights */
    int split;               /* 1: ft_backward_inputs, then ft_backward_weights */
    int no_hash;             /* 1: leave the hash (and its traffic and memory) out */
} th_options;

typedef struct th_result {
    ft_status status;
    char error[1024];
    double loss[TH_STEPS], norm[TH_STEPS];
    int64_t updates, skipped;
    uint64_t hash;
    int64_t n_weights;
    float *weights;
    /* By rank. From the end of ft_llama_create to the last step, the hash left out. */
    ft_mem_stats created[TH_RANKS];   /* before the first step */
    ft_mem_stats mem[TH_RANKS];       /* after the last one; the peak is since launch */
    int64_t gather_sent[TH_RANKS], reduce_sent[TH_RANKS], replica_sent[TH_RANKS];
    int64_t scalars_sent[TH_RANKS];
    ft_zero_formula formula[TH_RANKS]; /* for these micro_batches and this model's tie */
    ft_flops flops[TH_RANKS];
} th_result;

struct th_job {
    const th_options *options;
    th_result *result; /* may be NULL */
};

static inline th_options th_options_default(void)
{
    th_options o;
    memset(&o, 0, sizeof o);
    o.model = ft_llama_config_default();
    o.model.vocab = 97;
    o.model.hidden = 64;
    o.model.layers = 4;
    o.model.heads = 4;
    o.model.kv_heads = 2;
    o.model.intermediate = 128;
    o.T = 32;
    o.samples = 24;
    o.micro_batches = 1;
    o.steps = 5;
    o.seed = 42;
    o.lr = 1e-3;
    o.dp = 1;
    o.zero = ft_zero_config_default();
    o.zero.weight_decay = 0.1;
    o.zero.grad_clip = 1.0;
    o.launch = ft_config_default();
    o.report_every = 1;
    return o;
}

static inline uint64_t th_mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Token i of a sample's text, i = 0..T: the label of position t is token t + 1. */
static inline int32_t th_token(int step, int sample, int64_t i)
{
    return (int32_t)(th_mix(((uint64_t)step << 40) ^ ((uint64_t)sample << 20) ^ (uint64_t)i) % 97);
}

static inline void th_data(void *user, int step, int sample, int64_t T, int32_t *tokens,
                           int32_t *labels)
{
    (void)user;
    for (int64_t t = 0; t < T; t++) {
        tokens[t] = th_token(step, sample, t);
        labels[t] = th_token(step, sample, t + 1);
    }
}

/* sac[layers] = the same policy for each. */
static inline const ft_sac *th_policy(ft_sac *sac, int64_t layers, ft_sac_kind kind, uint64_t mask)
{
    for (int64_t i = 0; i < layers; i++) {
        sac[i].kind = kind;
        sac[i].mask = mask;
    }
    return sac;
}

static inline ft_status th_call_hook(th_rank *r, th_moment moment)
{
    const th_options *o = r->job->options;
    return o->hook ? o->hook(r, moment, o->user) : FT_OK;
}

/* This rank's rows of the step, micro-batch after micro-batch; returns the labels that count. */
static inline int64_t th_fill(const th_rank *r, int64_t B, int32_t *tokens, int32_t *labels)
{
    const th_options *o = r->job->options;
    int64_t at = 0, counted = 0;
    for (int m = 0; m < o->micro_batches; m++)
        for (int b = 0; b < (int)B; b++, at += o->T)
            (o->data ? o->data : th_data)(o->user, r->step, (m * o->dp + r->rank) * (int)B + b,
                                          o->T, tokens + at, labels + at);
    for (int64_t i = 0; i < at; i++) counted += labels[i] != -100;
    return counted;
}

static inline ft_status th_micro_batch(th_rank *r, const int32_t *tokens, const int32_t *labels)
{
    FT_TRY(ft_upload(r->tokens, tokens));
    FT_TRY(ft_upload(r->labels, labels));
    FT_TRY(ft_tape_begin(r->tape));
    FT_TRY(ft_llama_loss(r->model, r->tokens, r->labels, r->scale, r->job->options->sac, &r->loss));
    FT_TRY(ft_tape_end(r->tape));
    FT_TRY(th_call_hook(r, TH_FORWARD_DONE));
    if (r->job->options->split) {
        FT_TRY(ft_backward_inputs(r->tape, r->loss, NULL));
        FT_TRY(ft_backward_weights(r->tape));
    } else {
        FT_TRY(ft_backward(r->tape, r->loss, NULL));
    }
    FT_TRY(ft_zero_add_loss(r->zero, r->loss));
    FT_TRY(th_call_hook(r, TH_BACKWARD_DONE));
    ft_tensor_free(r->loss);
    r->loss = NULL;
    return FT_OK;
}

static inline ft_status th_step(th_rank *r, int64_t B, int32_t *tokens, int32_t *labels)
{
    const th_options *o = r->job->options;
    int64_t counted = th_fill(r, B, tokens, labels);
    FT_TRY(ft_zero_step_begin(r->zero, o->micro_batches, counted, &r->scale));
    FT_TRY(th_call_hook(r, TH_STEP_BEGUN));
    for (r->micro_batch = 0; r->micro_batch < o->micro_batches; r->micro_batch++)
        FT_TRY(th_micro_batch(r, tokens + r->micro_batch * B * o->T,
                              labels + r->micro_batch * B * o->T));
    r->micro_batch = 0;
    FT_TRY(th_call_hook(r, TH_STEP_ENDING));
    FT_TRY(ft_zero_step_end(r->zero, o->lr));
    return th_call_hook(r, TH_STEP_DONE);
}

static inline ft_status th_report(th_rank *r)
{
    ft_zero_report report;
    th_result *out = r->job->result;
    FT_TRY(ft_zero_report_get(r->zero, &report));
    if (!out || r->rank != 0) return FT_OK;
    if (r->step < TH_STEPS) {
        out->loss[r->step] = report.loss;
        out->norm[r->step] = report.grad_norm;
    }
    out->updates = report.updates;
    out->skipped = report.skipped;
    return FT_OK;
}

/* Adds `sign` times what each of zero's groups has sent so far. */
static inline void th_traffic(const th_rank *r, int sign)
{
    ft_traffic rows[16];
    th_result *out = r->job->result;
    int n = ft_traffic_get(r->ctx, 16, rows);
    for (int i = 0; i < n && i < 16; i++)
        for (int k = 0; k < FT_COLLECTIVE_COUNT; k++) {
            int64_t sent = sign * rows[i].sent_bytes[k];
            if (!strcmp(rows[i].group, "zero gather")) out->gather_sent[r->rank] += sent;
            if (!strcmp(rows[i].group, "zero reduce")) out->reduce_sent[r->rank] += sent;
            if (!strcmp(rows[i].group, "zero replicas")) out->replica_sent[r->rank] += sent;
            if (!strcmp(rows[i].group, "zero scalars")) out->scalars_sent[r->rank] += sent;
        }
}

static inline ft_status th_create(th_rank *r, int64_t B)
{
    const th_options *o = r->job->options;
    ft_mesh mesh;
    int64_t shape[2];
    shape[0] = B;
    shape[1] = o->T;
    FT_TRY(ft_mesh_create(r->ctx, o->dp, 1, 1, &mesh));
    FT_TRY(ft_zero_create(r->ctx, &o->zero, &mesh, &r->zero));
    FT_TRY(ft_llama_create(r->ctx, r->zero, &o->model, o->T, o->seed, &r->model));
    FT_TRY(ft_tensor_create(r->ctx, &r->tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(r->ctx, &r->labels, FT_I32, 2, shape, FT_TAG_OTHER));
    return ft_tape_create(r->ctx, &r->tape);
}

/* All masters in canonical order; a collective call, kept by rank 0. */
static inline ft_status th_weights(th_rank *r)
{
    th_result *out = r->job->result;
    int64_t at = 0, total = ft_llama_param_total(&r->job->options->model);
    float *values = r->rank == 0 ? (float *)malloc((size_t)total * sizeof *values) : NULL;
    if (r->rank == 0) {
        out->weights = values;
        out->n_weights = total;
        if (!values) return ft_error(FT_ERR_OOM, "no memory for %lld weights", (long long)total);
    }
    for (int i = 0; i < ft_llama_param_count(r->model); i++) {
        const ft_llama_param *p = ft_llama_param_at(r->model, i);
        FT_TRY(ft_llama_export(r->model, p, values ? values + at : NULL));
        at += p->shape[0] * p->shape[1];
    }
    return FT_OK;
}

static inline ft_status th_finish(th_rank *r)
{
    const th_options *o = r->job->options;
    th_result *out = r->job->result;
    uint64_t hash;
    r->step = o->steps ? o->steps - 1 : 0;
    if (!out) return FT_OK;
    if (!o->report_every) FT_TRY(th_report(r));
    ft_mem_get(r->ctx, &out->mem[r->rank]);
    th_traffic(r, 1);
    ft_flops_get(r->ctx, &out->flops[r->rank]);
    ft_zero_use use;
    memset(&use, 0, sizeof use);
    use.micro_batches = o->micro_batches;
    use.tied = o->model.tie_embeddings;
    FT_TRY(ft_zero_formula_get(r->zero, &use, &out->formula[r->rank]));
    if (o->keep_weights) FT_TRY(th_weights(r));
    if (o->no_hash) return FT_OK;
    FT_TRY(ft_llama_hash(r->model, &hash));
    if (r->rank == 0) out->hash = hash;
    return FT_OK;
}

static inline ft_status th_steps(th_rank *r, int64_t B, int32_t *tokens, int32_t *labels)
{
    const th_options *o = r->job->options;
    for (r->step = 0; r->step < o->steps; r->step++) {
        FT_TRY(th_step(r, B, tokens, labels));
        if (o->report_every) FT_TRY(th_report(r));
    }
    r->step = o->steps;
    FT_TRY(th_call_hook(r, TH_END));
    return th_finish(r);
}

static inline ft_status th_rank_main(ft_ctx *ctx, void *user)
{
    th_rank r;
    memset(&r, 0, sizeof r);
    r.job = (const th_job *)user;
    const th_options *o = r.job->options;
    int64_t B = o->samples / (o->dp * o->micro_batches);
    if (B < 1 || B * o->dp * o->micro_batches != o->samples || o->dp > TH_RANKS)
        return ft_error(FT_ERR_ARG, "harness: %d samples on %d ranks in %d micro-batches",
                        o->samples, o->dp, o->micro_batches);
    r.ctx = ctx;
    r.rank = ft_rank(ctx);
    size_t bytes = (size_t)(o->micro_batches * B * o->T) * sizeof(int32_t);
    int32_t *data = (int32_t *)ft_host_alloc(ctx, 2 * bytes); /* goes with the context */
    if (!data) return FT_ERR_OOM;
    FT_TRY(th_create(&r, B));
    if (r.job->result) {
        ft_mem_get(ctx, &r.job->result->created[r.rank]);
        th_traffic(&r, -1);
    }
    FT_TRY(th_call_hook(&r, TH_CREATED));
    return th_steps(&r, B, data, data + bytes / sizeof(int32_t));
}

static inline th_result *th_run(const th_options *options)
{
    th_job job;
    ft_config launch = options->launch;
    th_result *result = (th_result *)calloc(1, sizeof *result);
    if (!result) abort();
    job.options = options;
    job.result = result;
    launch.world = options->dp;
    result->status = ft_launch(&launch, th_rank_main, &job);
    if (result->status != FT_OK)
        snprintf(result->error, sizeof result->error, "%s", ft_last_error());
    return result;
}

static inline void th_free(th_result *result)
{
    if (result) free(result->weights);
    free(result);
}

#endif
