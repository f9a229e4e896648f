/* mesh_harness.h: a small Llama on any mesh, trained step by step, for tests of what outlives a run.

   Include after the headers, with their implementation:

       mh_layout l = mh_default();
       l.dp = 2; l.tp = 2; l.stage = 3;
       config.world = mh_world(&l);         (then, in each rank's program)
       mh_rank r;
       mh_create(ctx, &l, &r);
       mh_step(&r, step, &report);

   The global batch of a step is `samples` rows of T tokens, each a function of (step, sample)
   alone, and so are the labels that count: data do not depend on the layout.

   License: MIT, see LICENSE. */

#ifndef MESH_HARNESS_H
#define MESH_HARNESS_H

#include <stdlib.h>
#include <string.h>

enum { MH_LAYERS = 4, MH_HIDDEN = 32, MH_HEADS = 4, MH_FEED = 64, MH_VOCAB = 97, MH_T = 8 };

typedef struct mh_layout {
    int dp, tp, pp, sp, M, stage, shard_ranks;
    int chunks;                /* of layers a stage has, in an interleaved pipeline */
    ft_dtype dtype;
    int tied, biased;          /* biased: all biases, and norms of the heads */
    int sgd;                   /* 1: SGD with momentum, 2: without; 0: AdamW */
    int samples;
    uint64_t seed;             /* of the initial weights */
} mh_layout;

typedef struct mh_rank {
    ft_ctx *ctx;
    const mh_layout *l;
    ft_mesh mesh;
    ft_tp *tp;
    ft_zero *zero;
    ft_llama *model;
    ft_pp *pp;
    ft_pp_program program;
    ft_tensor *scale;
    int64_t first_layer[MH_LAYERS + 1];
    int64_t step;
} mh_rank;

static inline mh_layout mh_default(void)
{
    mh_layout l;
    memset(&l, 0, sizeof l);
    l.dp = l.tp = l.pp = l.M = l.chunks = 1;
    l.samples = 24;
    l.seed = 42;
    return l;
}

static inline mh_layout mh_make(int dp, int tp, int pp, int stage)
{
    mh_layout l = mh_default();
    l.dp = dp;
    l.tp = tp;
    l.pp = pp;
    l.stage = stage;
    return l;
}

static inline int mh_world(const mh_layout *l) { return l->dp * l->tp * l->pp; }

static inline const char *mh_text(const mh_layout *l)
{
    static char text[160];
    snprintf(text, sizeof text, "dp %d tp %d pp %d x %d sp %d M %d stage %d (%d share) %s%s%s%s",
             l->dp, l->tp, l->pp, l->chunks, l->sp, l->M, l->stage, l->shard_ranks,
             ft_dtype_name(l->dtype), l->tied ? " tied" : "", l->biased ? " biased" : "",
             l->sgd ? " sgd" : "");
    return text;
}

static inline uint64_t mh_mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static inline int32_t mh_token(int64_t step, int sample, int64_t i)
{
    return (int32_t)(mh_mix(((uint64_t)step << 40) ^ ((uint64_t)sample << 20) ^ (uint64_t)i) %
                     MH_VOCAB);
}

static inline int mh_rows(const mh_layout *l) { return l->samples / (l->dp * l->M); }

static inline int mh_sample(const mh_rank *r, int m, int b)
{
    return (m * r->l->dp + r->mesh.coord[FT_AXIS_DP]) * mh_rows(r->l) + b;
}

static inline int mh_counts(int sample, int64_t i) { return i >= sample % 3; }

static inline ft_status mh_forward(void *user, int chunk, int m, ft_tensor *x, ft_tensor **out)
{
    mh_rank *r = (mh_rank *)user;
    int32_t host[2][32 * MH_T];
    int64_t shape[2], at = 0;
    ft_tensor *tokens, *labels;
    shape[0] = mh_rows(r->l);
    shape[1] = MH_T;
    for (int b = 0; b < mh_rows(r->l); b++)
        for (int64_t i = 0; i < MH_T; i++, at++) {
            int s = mh_sample(r, m, b);
            host[0][at] = mh_token(r->step, s, i);
            host[1][at] = mh_counts(s, i) ? mh_token(r->step, s, i + 1) : -100;
        }
    FT_TRY(ft_tensor_create(r->ctx, &tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(r->ctx, &labels, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_upload(tokens, host[0]));
    FT_TRY(ft_upload(labels, host[1]));
    FT_TRY(ft_llama_chunk(r->model, chunk, tokens, labels, r->scale, NULL, x, out));
    ft_tensor_free(tokens);
    ft_tensor_free(labels);
    return FT_OK;
}

static inline ft_status mh_add_loss(void *user, int m, ft_tensor *loss)
{
    (void)m;
    return ft_zero_add_loss(((mh_rank *)user)->zero, loss);
}

static inline ft_llama_config mh_model(const mh_layout *l)
{
    ft_llama_config c = ft_llama_config_default();
    c.vocab = MH_VOCAB;
    c.hidden = MH_HIDDEN;
    c.layers = MH_LAYERS;
    c.heads = c.kv_heads = MH_HEADS;
    c.intermediate = MH_FEED;
    c.tie_embeddings = l->tied;
    c.qkv_bias = c.o_bias = c.mlp_bias = c.qk_norm = l->biased;
    return c;
}

static inline ft_status mh_create(ft_ctx *ctx, const mh_layout *l, mh_rank *r)
{
    ft_zero_config zero = ft_zero_config_default();
    ft_pp_config pipeline = ft_pp_config_default();
    ft_llama_config config = mh_model(l);
    ft_llama_layout part;
    memset(r, 0, sizeof *r);
    r->ctx = ctx;
    r->l = l;
    FT_TRY(ft_mesh_create(ctx, l->dp, l->tp, l->pp, &r->mesh));
    FT_TRY(ft_pp_layers_uniform(MH_LAYERS, l->pp * l->chunks, r->first_layer));
    if (l->tp > 1) FT_TRY(ft_tp_create(ctx, &r->mesh, l->sp, &r->tp));
    zero.stage = l->stage;
    zero.dtype = l->dtype;
    zero.shard_ranks = l->shard_ranks;
    zero.weight_decay = 0.1;
    zero.grad_clip = 0.5;
    if (l->sgd) zero.optimizer = ft_zero_sgd(l->sgd == 1 ? 0.9 : 0, 0);
    FT_TRY(ft_zero_create(ctx, &zero, &r->mesh, &r->zero));
    memset(&part, 0, sizeof part);
    part.mesh = r->mesh;
    part.tp = r->tp;
    part.chunks = l->chunks;
    part.first_layer = r->first_layer;
    FT_TRY(ft_llama_create_part(ctx, r->zero, &config, &part, MH_T, l->seed, &r->model));
    pipeline.kind = l->chunks > 1 ? FT_PP_INTERLEAVED : FT_PP_1F1B;
    pipeline.ranks = l->pp;
    pipeline.chunks = l->chunks;
    pipeline.micro_batches = l->M;
    FT_TRY(ft_pp_create(ctx, &r->mesh, &pipeline, &r->pp));
    r->program.forward = mh_forward;
    r->program.loss = mh_add_loss;
    r->program.user = r;
    r->program.dtype = l->dtype;
    return ft_llama_boundary(r->model, mh_rows(l), MH_T, &r->program.ndim, r->program.shape);
}

static inline ft_status mh_step(mh_rank *r, int64_t step, ft_zero_report *report)
{
    int64_t counted = 0;
    for (int m = 0; m < r->l->M; m++)
        for (int b = 0; b < mh_rows(r->l); b++)
            for (int64_t i = 0; i < MH_T; i++) counted += mh_counts(mh_sample(r, m, b), i);
    r->step = step;
    FT_TRY(ft_zero_step_begin(r->zero, r->l->M, counted, &r->scale));
    FT_TRY(ft_pp_run(r->pp, &r->program));
    FT_TRY(ft_zero_step_end(r->zero, 1e-2));
    return ft_zero_report_get(r->zero, report);
}

#endif /* MESH_HARNESS_H */
