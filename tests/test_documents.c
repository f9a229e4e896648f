/* test_documents.c: attention that stays inside documents.

   The property: a row of several documents gives, token by token, what each document gives alone;
   its loss and gradients are their sums. The reference of the op is a forward and a backward in
   float64, written here (and itself held against finite differences). Of the model it is the same
   model on rows of one document each. Neither stage, recomputation, pipeline nor schedule changes a
   bit, and a row of one document is the row without a mask, bit by bit. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include <stdio.h>

#define FEMTOTRON_IMPLEMENTATION
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

#include "check.h"

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static float noise(uint64_t at) { return (float)(int64_t)(mix(at) >> 40) / 8388608.0f - 1.0f; }

static void launch_ok(int world, ft_rank_fn fn, void *user)
{
    ft_config config = ft_config_default();
    config.world = world;
    if (ft_launch(&config, fn, user) != FT_OK) fail_msg("%s", ft_last_error());
}

/* ------------------------------------------------------------------------------------- the op */

enum { MOST = 200, MOST_W = 64, MOST_B = 2 };

typedef struct op_run { /* a case, and what came out */
    int64_t B, T, H, K, D;
    int docs;                /* 0: ft_attention */
    int32_t first[MOST_B * MOST];
    float qkv[MOST_B * MOST * MOST_W], dout[MOST_B * MOST * MOST_W];
    float o[MOST_B * MOST * MOST_W], dqkv[MOST_B * MOST * MOST_W];
} op_run;

static int64_t width(const op_run *r) { return (r->H + 2 * r->K) * r->D; }

/* Documents of lengths[n] tokens (the last one takes the rest), shifted by `shift` in each row. */
static void set_docs(op_run *r, const int *lengths, int n, int shift)
{
    for (int64_t b = 0; b < r->B; b++) {
        int64_t at = 0;
        for (int k = 0; k <= n && at < r->T; k++) {
            int64_t end = k < n ? at + lengths[k] + b * shift : r->T;
            for (int64_t t = at; t < end && t < r->T; t++)
                r->first[b * r->T + t] = (int32_t)at;
            at = end;
        }
    }
}

static void fill_case(op_run *r, uint64_t seed)
{
    for (int64_t i = 0; i < r->B * r->T * width(r); i++) r->qkv[i] = noise(seed + (uint64_t)i);
    for (int64_t i = 0; i < r->B * r->T * r->H * r->D; i++)
        r->dout[i] = noise(~seed - (uint64_t)i);
}

/* Forward and backward, with doc_start or without. */
static ft_status run_op(ft_ctx *ctx, void *user)
{
    op_run *r = (op_run *)user;
    int64_t shape[3], out_shape[3], doc_shape[2];
    ft_tensor *qkv, *dout, *doc = NULL, *o;
    ft_tape *tape;
    shape[0] = out_shape[0] = doc_shape[0] = r->B;
    shape[1] = out_shape[1] = doc_shape[1] = r->T;
    shape[2] = width(r);
    out_shape[2] = r->H * r->D;
    FT_TRY(ft_tensor_create(ctx, &qkv, FT_F32, 3, shape, FT_TAG_PARAM));
    FT_TRY(ft_tensor_create(ctx, &dout, FT_F32, 3, out_shape, FT_TAG_ACT));
    FT_TRY(ft_upload(qkv, r->qkv));
    FT_TRY(ft_upload(dout, r->dout));
    qkv->requires_grad = 1;
    if (r->docs) {
        FT_TRY(ft_tensor_create(ctx, &doc, FT_I32, 2, doc_shape, FT_TAG_OTHER));
        FT_TRY(ft_upload(doc, r->first));
    }
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    if (r->docs) FT_TRY(ft_attention_docs(ctx, &o, qkv, doc, r->H, r->K, r->D));
    else FT_TRY(ft_attention(ctx, &o, qkv, r->H, r->K, r->D));
    ft_tensor_free(doc); /* backward needs it still */
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_download(o, r->o));
    FT_TRY(ft_backward(tape, o, dout));
    return ft_download(qkv->grad, r->dqkv);
}

/* In float64: o, and with dout the gradient. Row t of p is the softmax over first[t]..t. */
static void reference(const op_run *r, const double *qkv, const float *dout, double *o,
                      double *dqkv)
{
    const int64_t H = r->H, K = r->K, D = r->D, W = width(r);
    double p[MOST], dp[MOST], scale = 1 / sqrt((double)D);
    for (int64_t i = 0; dqkv && i < r->B * r->T * W; i++) dqkv[i] = 0;
    for (int64_t row = 0; row < r->B * r->T; row++)
        for (int64_t h = 0; h < H; h++) {
            const int64_t t = row % r->T, base = row - t, kv = H + h / (H / K);
            const double *q = qkv + row * W + h * D;
            double sum = 0, delta = 0, *to = o + (row * H + h) * D;
            for (int64_t s = r->first[row]; s <= t; s++) {
                double dot = 0;
                for (int64_t d = 0; d < D; d++) dot += q[d] * qkv[(base + s) * W + kv * D + d];
                sum += p[s] = exp(dot * scale);
            }
            for (int64_t d = 0; d < D; d++) to[d] = 0;
            for (int64_t s = r->first[row]; s <= t; s++) {
                const double *v = qkv + (base + s) * W + (kv + K) * D;
                p[s] /= sum;
                dp[s] = 0;
                for (int64_t d = 0; d < D; d++) to[d] += p[s] * v[d];
                for (int64_t d = 0; dout && d < D; d++)
                    dp[s] += (double)dout[(row * H + h) * D + d] * v[d];
                delta += p[s] * dp[s];
            }
            for (int64_t s = r->first[row]; dqkv && s <= t; s++) {
                double ds = p[s] * (dp[s] - delta) * scale;
                for (int64_t d = 0; d < D; d++) {
                    dqkv[row * W + h * D + d] += ds * qkv[(base + s) * W + kv * D + d];
                    dqkv[(base + s) * W + kv * D + d] += ds * q[d];
                    dqkv[(base + s) * W + (kv + K) * D + d] +=
                        p[s] * (double)dout[(row * H + h) * D + d];
                }
            }
        }
}

static double largest_difference(const float *have, const double *want, int64_t n)
{
    double most = 0, scale = 1e-30;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)have[i] - want[i]);
        if (!(d <= most)) most = d; /* NaN too */
        if (fabs(want[i]) > scale) scale = fabs(want[i]);
    }
    return most / scale;
}

static double q64[MOST_B * MOST * MOST_W], o64[MOST_B * MOST * MOST_W], g64[MOST_B * MOST * MOST_W];

static void set_reference(const op_run *r)
{
    for (int64_t i = 0; i < r->B * r->T * width(r); i++) q64[i] = r->qkv[i];
    reference(r, q64, r->dout, o64, g64);
}

static void assert_as_reference(op_run *r)
{
    launch_ok(1, run_op, r);
    set_reference(r);
    double o = largest_difference(r->o, o64, r->B * r->T * r->H * r->D);
    double g = largest_difference(r->dqkv, g64, r->B * r->T * width(r));
    if (!(o < 1e-6) || !(g < 2e-6))
        fail_msg("T %d, H %d, K %d, D %d: o differs by %g, dqkv by %g", (int)r->T, (int)r->H,
                 (int)r->K, (int)r->D, o, g);
}

/* Borders in every place of a block of 64 keys and of a tile of 4 rows, documents of one token and
   of many blocks. */
static void values_and_gradients_are_the_references(void **state)
{
    (void)state;
    static const int lengths[][6] = {{1, 1, 1, 2, 3, 4}, {63, 1, 1, 63, 2, 0}, {64, 64, 1, 0, 0, 0},
                                     {5, 60, 70, 7, 0, 0}, {129, 3, 30, 1, 1, 0},
                                     {1, 127, 33, 2, 1, 1}};
    static const int64_t sizes[][4] = {{4, 2, 8, 200}, {1, 1, 2, 131}, {2, 2, 10, 64},
                                       {3, 1, 7, 97}, {4, 1, 4, 1}, {2, 1, 16, 66}};
    static op_run r;
    for (int k = 0; k < 6; k++)
        for (int j = 0; j < 6; j++) {
            memset(&r, 0, sizeof r);
            r.B = 2;
            r.H = sizes[j][0];
            r.K = sizes[j][1];
            r.D = sizes[j][2];
            r.T = sizes[j][3];
            r.docs = 1;
            set_docs(&r, lengths[k], 6, 1);
            fill_case(&r, (uint64_t)(1000 * k + j) << 20);
            assert_as_reference(&r);
        }
}

static void reference_is_its_finite_differences(void **state)
{
    (void)state;
    static const int lengths[3] = {3, 1, 4};
    static op_run r;
    static double moved[MOST_B * MOST * MOST_W];
    memset(&r, 0, sizeof r);
    r.B = 1;
    r.T = 11;
    r.H = 2;
    r.K = 1;
    r.D = 4;
    set_docs(&r, lengths, 3, 0);
    fill_case(&r, 77);
    set_reference(&r);
    for (int64_t i = 0; i < r.T * width(&r); i++) {
        double sums[2] = {0, 0};
        for (int side = 0; side < 2; side++) {
            double save = q64[i];
            q64[i] += side ? 1e-5 : -1e-5;
            reference(&r, q64, NULL, moved, NULL);
            q64[i] = save;
            for (int64_t k = 0; k < r.T * r.H * r.D; k++)
                sums[side] += (double)r.dout[k] * moved[k];
        }
        assert_true(fabs((sums[1] - sums[0]) / 2e-5 - g64[i]) < 1e-8);
    }
}

/* Each document as a row of its own, without a mask. */
static void documents_are_as_alone(void **state)
{
    (void)state;
    static const int lengths[4] = {70, 1, 66, 9};
    static op_run r, one;
    memset(&r, 0, sizeof r);
    r.B = 1;
    r.T = 190;
    r.H = 4;
    r.K = 2;
    r.D = 8;
    r.docs = 1;
    set_docs(&r, lengths, 4, 0);
    fill_case(&r, 5);
    launch_ok(1, run_op, &r);
    const int64_t W = width(&r), O = r.H * r.D;
    for (int64_t at = 0, end; at < r.T; at = end) {
        for (end = at + 1; end < r.T && r.first[end] == at;) end++;
        memset(&one, 0, sizeof one);
        one.B = 1;
        one.T = end - at;
        one.H = r.H;
        one.K = r.K;
        one.D = r.D;
        memcpy(one.qkv, r.qkv + at * W, (size_t)(one.T * W) * sizeof(float));
        memcpy(one.dout, r.dout + at * O, (size_t)(one.T * O) * sizeof(float));
        launch_ok(1, run_op, &one);
        for (int64_t i = 0; i < one.T * O; i++)
            assert_true(fabsf(one.o[i] - r.o[at * O + i]) <= 1e-6f);
        for (int64_t i = 0; i < one.T * W; i++)
            assert_true(fabsf(one.dqkv[i] - r.dqkv[at * W + i]) <= 2e-6f);
    }
}

static void one_document_is_no_mask(void **state)
{
    (void)state;
    static op_run plain, zeros, null_docs;
    static const int64_t lengths[] = {1, 5, 64, 131, 200};
    for (int k = 0; k < 5; k++) {
        memset(&plain, 0, sizeof plain);
        plain.B = 2;
        plain.T = lengths[k];
        plain.H = 2;
        plain.K = 1;
        plain.D = 12;
        fill_case(&plain, 9);
        zeros = plain;
        zeros.docs = 1;
        null_docs = plain;
        launch_ok(1, run_op, &plain);
        launch_ok(1, run_op, &zeros);
        launch_ok(1, run_op, &null_docs);
        assert_memory_equal(plain.o, zeros.o, sizeof plain.o);
        assert_memory_equal(plain.dqkv, zeros.dqkv, sizeof plain.dqkv);
        assert_memory_equal(plain.o, null_docs.o, sizeof plain.o);
    }
}

/* Not even what is no number comes over a border, into either direction. A GPU multiplies what it
   masks by zero, which is nothing for numbers. */
#ifdef AS_GPU_H
#define WRONG 1e4f
#else
#define WRONG ((float)NAN)
#endif
static void nothing_leaks(void **state)
{
    (void)state;
    static const int lengths[3] = {30, 45, 50};
    static op_run clean, dirty;
    memset(&clean, 0, sizeof clean);
    clean.B = 1;
    clean.T = 170;
    clean.H = 2;
    clean.K = 2;
    clean.D = 8;
    clean.docs = 1;
    set_docs(&clean, lengths, 3, 0);
    fill_case(&clean, 3);
    launch_ok(1, run_op, &clean);
    dirty = clean;
    const int64_t W = width(&dirty), O = dirty.H * dirty.D;
    for (int64_t i = 0; i < 30 * W; i++) dirty.qkv[i] = WRONG;
    for (int64_t i = 75 * W; i < 125 * W; i++) dirty.qkv[i] = WRONG;
    launch_ok(1, run_op, &dirty);
    assert_true(!(fabsf(dirty.o[0]) < 1e3f) && !(fabsf(dirty.o[80 * O]) < 1e3f));
    assert_true(isnan(WRONG) == !!isnan(dirty.dqkv[80 * W]));
    for (int64_t t = 0; t < clean.T; t++) {
        if (clean.first[t] == 0 || clean.first[t] == 75) continue;
        for (int64_t i = 0; i < O; i++)
            assert_true(fabsf(dirty.o[t * O + i] - clean.o[t * O + i]) <= 1e-6f);
        for (int64_t i = 0; i < W; i++)
            assert_true(fabsf(dirty.dqkv[t * W + i] - clean.dqkv[t * W + i]) <= 2e-6f);
    }
}

/* ------------------------------------------------------------------------------------ refusals */

static ft_status try_docs(ft_ctx *ctx, const int32_t *first, ft_dtype dtype, int ndim, int64_t B,
                          int64_t T)
{
    int64_t shape[3] = {2, 6, 8}, doc_shape[3];
    ft_tensor *qkv, *doc, *o;
    doc_shape[0] = B;
    doc_shape[1] = T;
    doc_shape[2] = 1;
    FT_TRY(ft_tensor_create(ctx, &qkv, FT_F32, 3, shape, FT_TAG_ACT));
    FT_TRY(ft_fill(qkv, 1, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(ft_tensor_create(ctx, &doc, dtype, ndim, doc_shape, FT_TAG_OTHER));
    if (first) FT_TRY(ft_upload(doc, first));
    return ft_attention_docs(ctx, &o, qkv, doc, 2, 1, 2);
}

typedef struct bad_case {
    ft_dtype dtype;
    int ndim;
    int64_t B, T;
    int32_t first[12];
    ft_status status;
    const char *says;
} bad_case;

static ft_status bad_docs(ft_ctx *ctx, void *user)
{
    const bad_case *c = (const bad_case *)user;
    return try_docs(ctx, c->dtype == FT_I32 && c->ndim == 2 && c->T == 6 ? c->first : NULL,
                    c->dtype, c->ndim, c->B, c->T);
}

static void bad_documents_are_refused(void **state)
{
    (void)state;
    static bad_case cases[] = {
        {FT_I32, 2, 2, 6, {0, 1, 2, 3, 4, 5, 0, 0, 0, 3, 3, 3}, FT_OK, ""},
        {FT_I32, 2, 2, 6, {0, 0, 2, 2, 1, 1, 0, 0, 0, 0, 0, 0}, FT_ERR_DATA,
         "doc_start 1 at position [0,4] of [2,6] is outside 2..4"},
        {FT_I32, 2, 2, 6, {0, 1, 2, 3, 4, 5, 0, 0, 3, 3, 3, 3}, FT_ERR_DATA,
         "doc_start 3 at position [1,2] of [2,6] is outside 0..2"},
        {FT_I32, 2, 2, 6, {0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0}, FT_ERR_DATA,
         "doc_start -1 at position [1,0] of [2,6] is outside 0..0"},
        {FT_F32, 2, 2, 6, {0}, FT_ERR_SHAPE, "doc_start must be int32 [B,T]"},
        {FT_I32, 2, 6, 2, {0}, FT_ERR_SHAPE, "doc_start must be int32 [B,T]"},
        {FT_I32, 2, 2, 7, {0}, FT_ERR_SHAPE, "doc_start must be int32 [B,T]"},
        {FT_I32, 3, 2, 6, {0}, FT_ERR_SHAPE, "doc_start must be int32 [B,T]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ft_config config = ft_config_default();
        assert_int_equal(ft_launch(&config, bad_docs, &cases[i]), cases[i].status);
#ifdef AS_GPU_H /* which names the position in all of the rows, and no exact limits */
        if (cases[i].status == FT_ERR_DATA && strstr(ft_last_error(), "attention: doc_start "))
            continue;
#endif
        if (cases[i].status != FT_OK && !strstr(ft_last_error(), cases[i].says))
            fail_msg("\"%s\" does not say: %s", ft_last_error(), cases[i].says);
    }
}

static ft_status planned(ft_ctx *ctx, void *user)
{
    (void)user;
    return try_docs(ctx, NULL, FT_I32, 2, 2, 6);
}

static void plans_count_it(void **state)
{
    (void)state;
    ft_config config = ft_config_default();
    config.device = FT_META;
    assert_int_equal(ft_launch(&config, planned, NULL), FT_OK);
    config.plan_for = FT_GPU;
    assert_int_equal(ft_launch(&config, planned, NULL), FT_OK);
}

/* ----------------------------------------------------------------------------------- the model */

enum { ROWS = 4, T = 48, VOCAB = 97, LAYERS = 4, RANKS = 8 };

/* Documents of a row: lengths that differ from row to row, in all T tokens. */
static int doc_begins(int row, int t)
{
    static const int starts[ROWS][4] = {{0, 17, 18, 40}, {0, 5, 33, 47}, {0, 0, 0, 0},
                                        {0, 1, 2, 24}};
    for (int k = 0; k < 4; k++)
        if (starts[row][k] == t) return 1;
    return 0;
}

static int32_t token_of(int row, int t)
{
    return (int32_t)(mix((uint64_t)(1000 * row + t)) % VOCAB);
}

typedef struct layout {
    int dp, tp, pp, sp, stage, M, alone, unmasked, one_doc;
    ft_sac_kind sac;
    ft_pp_kind kind;
    ft_device device;
} layout;

typedef struct outcome {
    double loss, norm;
    uint64_t hash;
    float grad[4][4096];
    ft_mem_stats mem[RANKS];
} outcome;

typedef struct rank {
    const layout *l;
    outcome *out;
    ft_ctx *ctx;
    ft_zero *zero;
    ft_llama *model;
    ft_mesh mesh;
    ft_tp *tp;
    ft_pp *pipeline;
    ft_pp_program program;
    ft_tensor *scale;
    ft_sac sac[LAYERS];
    int64_t first_layer[9];
} rank;

/* Row b of micro-batch m: tokens, labels that stay inside a document, where documents begin. */
static void fill_row(const layout *l, int row, int32_t *tokens, int32_t *labels, int32_t *first)
{
    int begin = 0;
    for (int t = 0; t < T; t++) {
        if (doc_begins(row, t)) begin = t;
        tokens[t] = token_of(row, t);
        labels[t] = t + 1 == T || doc_begins(row, t + 1) ? -100 : token_of(row, t + 1);
        first[t] = l->one_doc ? 0 : begin;
    }
}

static ft_status upload_rows(rank *r, int64_t B, const int32_t *tokens, const int32_t *labels,
                             const int32_t *first, ft_tensor *to[3])
{
    const int32_t *from[3];
    int64_t shape[2];
    shape[0] = B;
    shape[1] = T;
    from[0] = tokens;
    from[1] = labels;
    from[2] = first;
    for (int k = 0; k < 3; k++) {
        FT_TRY(ft_tensor_create(r->ctx, &to[k], FT_I32, 2, shape, FT_TAG_OTHER));
        FT_TRY(ft_upload(to[k], from[k]));
    }
    return FT_OK;
}

static ft_status forward(void *user, int chunk, int m, ft_tensor *x, ft_tensor **out)
{
    rank *r = (rank *)user;
    const layout *l = r->l;
    const int B = ROWS / (l->dp * l->M);
    int32_t host[3][ROWS * T];
    ft_tensor *in[3];
    for (int b = 0; b < B; b++)
        fill_row(l, (m * l->dp + r->mesh.coord[FT_AXIS_DP]) * B + b, host[0] + b * T,
                 host[1] + b * T, host[2] + b * T);
    FT_TRY(upload_rows(r, B, host[0], host[1], host[2], in));
    if (l->unmasked)
        FT_TRY(ft_llama_chunk(r->model, chunk, in[0], in[1], r->scale, r->sac, x, out));
    else
        FT_TRY(ft_llama_chunk_docs(r->model, chunk, in[0], in[1], in[2], r->scale, r->sac, x,
                                   out));
    for (int k = 0; k < 3; k++) ft_tensor_free(in[k]);
    return FT_OK;
}

static ft_status add_loss(void *user, int m, ft_tensor *loss)
{
    (void)m;
    return ft_zero_add_loss(((rank *)user)->zero, loss);
}

static ft_status create(rank *r)
{
    const layout *l = r->l;
    ft_zero_config zero = ft_zero_config_default();
    ft_llama_config config = ft_llama_config_default();
    ft_pp_config pipeline = ft_pp_config_default();
    ft_llama_layout part;
    int64_t B = ROWS / (l->dp * l->M);
    config.vocab = VOCAB;
    config.hidden = 32;
    config.layers = LAYERS;
    config.heads = 4;
    config.kv_heads = 2;
    config.intermediate = 64;
    config.init_std = 0.3; /* attention that looks at something */
    zero.stage = l->stage;
    zero.grad_clip = 0.5;
    pipeline.kind = l->kind;
    pipeline.ranks = l->pp;
    pipeline.chunks = l->kind == FT_PP_INTERLEAVED ? 2 : 1;
    pipeline.micro_batches = l->M;
    FT_TRY(ft_mesh_create(r->ctx, l->dp, l->tp, l->pp, &r->mesh));
    if (l->tp > 1) FT_TRY(ft_tp_create(r->ctx, &r->mesh, l->sp, &r->tp));
    FT_TRY(ft_zero_create(r->ctx, &zero, &r->mesh, &r->zero));
    FT_TRY(ft_pp_layers_uniform(LAYERS, l->pp * pipeline.chunks, r->first_layer));
    memset(&part, 0, sizeof part);
    part.mesh = r->mesh;
    part.tp = r->tp;
    part.chunks = pipeline.chunks;
    part.first_layer = r->first_layer;
    FT_TRY(ft_llama_create_part(r->ctx, r->zero, &config, &part, T, 42, &r->model));
    for (int i = 0; i < LAYERS; i++) r->sac[i].kind = l->sac;
    FT_TRY(ft_pp_create(r->ctx, &r->mesh, &pipeline, &r->pipeline));
    r->program.forward = forward;
    r->program.loss = add_loss;
    r->program.user = r;
    return ft_llama_boundary(r->model, B, T, &r->program.ndim, r->program.shape);
}

/* Every document as a row of its own, in one step of as many micro-batches as there are documents:
   rows of different lengths. */
static ft_status step_alone(rank *r)
{
    int32_t tokens[T], labels[T], first[T];
    int docs = 0;
    for (int row = 0; row < ROWS; row++)
        for (int t = 0; t < T; t++) docs += doc_begins(row, t);
    int64_t counted = ROWS * T - docs;
    ft_tape *tape;
    FT_TRY(ft_tape_create(r->ctx, &tape));
    FT_TRY(ft_zero_step_begin(r->zero, docs, counted, &r->scale));
    for (int row = 0; row < ROWS; row++) {
        fill_row(r->l, row, tokens, labels, first);
        for (int t = 0, end; t < T; t = end) {
            ft_tensor *in[2], *loss;
            int64_t shape[2];
            for (end = t + 1; end < T && !doc_begins(row, end);) end++;
            shape[0] = 1;
            shape[1] = end - t;
            for (int k = 0; k < 2; k++) {
                FT_TRY(ft_tensor_create(r->ctx, &in[k], FT_I32, 2, shape, FT_TAG_OTHER));
                FT_TRY(ft_upload(in[k], (k ? labels : tokens) + t));
            }
            FT_TRY(ft_tape_begin(tape));
            FT_TRY(ft_llama_loss(r->model, in[0], in[1], r->scale, NULL, &loss));
            FT_TRY(ft_tape_end(tape));
            FT_TRY(ft_backward(tape, loss, NULL));
            FT_TRY(ft_zero_add_loss(r->zero, loss));
            ft_tensor_free(loss);
            for (int k = 0; k < 2; k++) ft_tensor_free(in[k]);
        }
    }
    return FT_OK;
}

static int64_t counted_of(const rank *r)
{
    const layout *l = r->l;
    const int B = ROWS / (l->dp * l->M);
    int64_t counted = 0;
    for (int m = 0; m < l->M; m++)
        for (int b = 0; b < B; b++) {
            int32_t tokens[T], labels[T], first[T];
            fill_row(l, (m * l->dp + r->mesh.coord[FT_AXIS_DP]) * B + b, tokens, labels, first);
            for (int t = 0; t < T; t++) counted += labels[t] != -100;
        }
    return counted;
}

static const char *const watched[4] = {
    "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight", "model.layers.3.self_attn.v_proj.weight"};

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    void **job = (void **)user;
    ft_zero_report report;
    rank r;
    memset(&r, 0, sizeof r);
    r.l = (const layout *)job[0];
    r.out = (outcome *)job[1];
    r.ctx = ctx;
    FT_TRY(create(&r));
    if (r.l->alone) {
        FT_TRY(step_alone(&r));
    } else {
        FT_TRY(ft_zero_step_begin(r.zero, r.l->M, counted_of(&r), &r.scale));
        FT_TRY(ft_pp_run(r.pipeline, &r.program));
    }
    for (int k = 0; k < 4; k++) {
        const ft_llama_param *p = ft_llama_param_find(r.model, watched[k]);
        CHECK(p && p->shape[0] * p->shape[1] <= 4096);
        FT_TRY(ft_llama_export_grad(r.model, p, ft_rank(ctx) == 0 ? r.out->grad[k] : NULL));
    }
    FT_TRY(ft_zero_step_end(r.zero, 1e-2));
    FT_TRY(ft_zero_report_get(r.zero, &report));
    ft_mem_get(ctx, &r.out->mem[ft_rank(ctx)]);
    if (ft_ctx_device(ctx) == FT_META) return FT_OK;
    uint64_t hash;
    FT_TRY(ft_llama_hash(r.model, &hash));
    if (ft_rank(ctx) != 0) return FT_OK;
    r.out->loss = report.loss;
    r.out->norm = report.grad_norm;
    r.out->hash = hash;
    return FT_OK;
}

static layout layout_default(void)
{
    layout l;
    memset(&l, 0, sizeof l);
    l.dp = l.tp = l.pp = l.M = 1;
    return l;
}

static void run(const layout *l, outcome *out)
{
    ft_config config = ft_config_default();
    void *job[2];
    memset(out, 0, sizeof *out);
    job[0] = (void *)(uintptr_t)l;
    job[1] = out;
    config.world = l->dp * l->tp * l->pp;
    config.device = l->device;
    if (ft_launch(&config, rank_main, job) != FT_OK) fail_msg("%s", ft_last_error());
}

static double relative(const float *have, const float *want, int n)
{
    double difference = 0, scale = 0;
    for (int i = 0; i < n; i++) {
        double d = (double)have[i] - (double)want[i];
        difference += d * d;
        scale += (double)want[i] * (double)want[i];
    }
    return sqrt(difference / scale);
}

static outcome base, other;

static void assert_close(double tolerance)
{
    if (!(fabs(other.loss - base.loss) <= tolerance * base.loss) ||
        !(fabs(other.norm - base.norm) <= 10 * tolerance * base.norm))
        fail_msg("loss %.9g instead of %.9g, norm %.9g instead of %.9g", other.loss, base.loss,
                 other.norm, base.norm);
    for (int k = 0; k < 4; k++) {
        double d = relative(other.grad[k], base.grad[k], 4096);
        if (!(d < 10 * tolerance)) fail_msg("%s: gradients differ by %g", watched[k], d);
    }
}

/* Loss and gradients of rows of documents are those of the documents, each alone. */
static void rows_are_their_documents(void **state)
{
    (void)state;
    layout l = layout_default();
    l.alone = 1;
    run(&l, &base);
    l.alone = 0;
    run(&l, &other);
    assert_close(1e-6);
    /* Without the mask it is something else: the test sees it. */
    l.unmasked = 1;
    run(&l, &other);
    assert_true(fabs(other.loss - base.loss) > 1e-3 * base.loss);
    assert_true(relative(other.grad[1], base.grad[1], 1024) > 1e-2);
}

static void one_document_rows_are_unmasked_rows(void **state)
{
    (void)state;
    layout l = layout_default();
    l.one_doc = 1;
    run(&l, &base);
    l.unmasked = 1;
    run(&l, &other);
    assert_true(base.hash == other.hash && base.loss == other.loss && base.norm == other.norm);
}

static void layouts_and_policies_change_nothing(void **state)
{
    (void)state;
    static const struct {
        int dp, tp, pp, sp, stage, M;
        ft_sac_kind sac;
        ft_pp_kind kind;
        int bits;
    } cases[] = {
        {1, 1, 1, 0, 0, 1, FT_SAC_SELECTIVE, FT_PP_1F1B, 1}, /* as one rank, to the bit */
        {1, 1, 1, 0, 3, 1, FT_SAC_FULL, FT_PP_1F1B, 1},
        {1, 1, 2, 0, 0, 1, FT_SAC_FULL, FT_PP_1F1B, 1},
        {1, 1, 4, 0, 2, 1, FT_SAC_NONE, FT_PP_1F1B, 1},
        {1, 1, 2, 0, 3, 4, FT_SAC_FULL, FT_PP_ZB_H1, 0},
        {1, 1, 2, 0, 1, 2, FT_SAC_SELECTIVE, FT_PP_INTERLEAVED, 0},
        {2, 1, 1, 0, 3, 2, FT_SAC_FULL, FT_PP_1F1B, 0},
        {4, 1, 1, 0, 2, 1, FT_SAC_NONE, FT_PP_1F1B, 0},
        {1, 2, 1, 0, 0, 1, FT_SAC_FULL, FT_PP_1F1B, 0},
        {1, 2, 1, 1, 3, 2, FT_SAC_SELECTIVE, FT_PP_1F1B, 0},
        {2, 2, 2, 1, 3, 2, FT_SAC_FULL, FT_PP_ZB_H1, 0},
    };
    layout l = layout_default();
    run(&l, &base);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        l = layout_default();
        l.dp = cases[i].dp;
        l.tp = cases[i].tp;
        l.pp = cases[i].pp;
        l.sp = cases[i].sp;
        l.stage = cases[i].stage;
        l.M = cases[i].M;
        l.sac = cases[i].sac;
        l.kind = cases[i].kind;
        run(&l, &other);
        assert_close(1e-6);
        if (cases[i].bits) assert_true(other.hash == base.hash && other.norm == base.norm);
    }
}

/* Stages and policies of one mesh, to the bit. */
static void stages_agree_to_the_bit(void **state)
{
    (void)state;
    for (int mesh = 0; mesh < 2; mesh++)
        for (int k = 0; k < 4; k++) {
            layout l = layout_default();
            l.dp = 2;
            if (mesh) l.tp = 2;
            if (mesh) l.sp = 1;
            l.stage = k;
            l.sac = k == 0 ? FT_SAC_NONE : k == 2 ? FT_SAC_SELECTIVE : FT_SAC_FULL;
            run(&l, k ? &other : &base);
            if (k) assert_true(other.hash == base.hash && other.loss == base.loss);
        }
}

static void the_plan_is_the_run(void **state)
{
    (void)state;
    for (int k = 0; k < 3; k++) {
        layout l = layout_default();
        l.dp = 2;
        l.tp = k == 1 ? 2 : 1;
        l.sp = k == 1;
        l.pp = k == 2 ? 2 : 1;
        l.M = k == 2 ? 2 : 1;
        l.stage = 3;
        l.sac = k == 0 ? FT_SAC_NONE : FT_SAC_FULL;
        run(&l, &base);
        l.device = FT_META;
        run(&l, &other);
        for (int i = 0; i < l.dp * l.tp * l.pp; i++) {
            assert_int_equal(base.mem[i].peak_bytes, other.mem[i].peak_bytes);
            assert_memory_equal(base.mem[i].at_peak, other.mem[i].at_peak,
                                sizeof base.mem[i].at_peak);
            assert_memory_equal(base.mem[i].live, other.mem[i].live, sizeof base.mem[i].live);
        }
    }
}

/* Logits of a row of documents are those of the documents. */
static ft_status logits_main(ft_ctx *ctx, void *user)
{
    layout l = layout_default();
    static float whole[ROWS * T * VOCAB], alone[T * VOCAB], last[ROWS * VOCAB];
    int32_t host[3][ROWS * T];
    ft_tensor *in[3], *logits, *one, *wrong;
    int64_t shape[2];
    rank r;
    (void)user;
    memset(&r, 0, sizeof r);
    r.l = &l;
    r.ctx = ctx;
    FT_TRY(create(&r));
    for (int row = 0; row < ROWS; row++)
        fill_row(&l, row, host[0] + row * T, host[1] + row * T, host[2] + row * T);
    FT_TRY(upload_rows(&r, ROWS, host[0], host[1], host[2], in));
    FT_TRY(ft_llama_logits_docs(r.model, in[0], in[2], 0, &logits));
    FT_TRY(ft_download(logits, whole));
    ft_tensor_free(logits);
    FT_TRY(ft_llama_logits_docs(r.model, in[0], in[2], 1, &logits));
    FT_TRY(ft_download(logits, last));
    ft_tensor_free(logits);
    for (int row = 0; row < ROWS; row++)
        for (int t = 0, end; t < T; t = end) {
            for (end = t + 1; end < T && !doc_begins(row, end);) end++;
            shape[0] = 1;
            shape[1] = end - t;
            FT_TRY(ft_tensor_create(ctx, &one, FT_I32, 2, shape, FT_TAG_OTHER));
            FT_TRY(ft_upload(one, host[0] + row * T + t));
            FT_TRY(ft_llama_logits(r.model, one, 0, &logits));
            FT_TRY(ft_download(logits, alone));
            for (int i = 0; i < (end - t) * VOCAB; i++)
                CHECK(fabsf(whole[(row * T + t) * VOCAB + i] - alone[i]) < 1e-4f);
            for (int i = 0; end == T && i < VOCAB; i++)
                CHECK(fabsf(last[row * VOCAB + i] - alone[(end - t - 1) * VOCAB + i]) < 1e-4f);
            ft_tensor_free(one);
            ft_tensor_free(logits);
        }
    shape[0] = ROWS;
    shape[1] = T - 1;
    FT_TRY(ft_tensor_create(ctx, &wrong, FT_I32, 2, shape, FT_TAG_OTHER));
    REFUSED(ft_llama_logits_docs(r.model, in[0], wrong, 0, &logits), FT_ERR_SHAPE,
            "tokens [4,48] and doc_start [4,47] differ");
    REFUSED(ft_llama_loss_docs(r.model, in[0], in[1], wrong, NULL, NULL, &logits), FT_ERR_SHAPE,
            "tokens [4,48] and doc_start [4,47] differ");
    REFUSED(ft_llama_chunk_docs(r.model, 0, in[0], in[1], wrong, NULL, NULL, NULL, &logits),
            FT_ERR_SHAPE, "tokens [4,48] and doc_start [4,47] differ");
    FT_TRY(ft_tensor_create(ctx, &wrong, FT_F32, 2, in[0]->shape, FT_TAG_OTHER));
    REFUSED(ft_llama_loss_docs(r.model, in[0], in[1], wrong, NULL, NULL, &logits), FT_ERR_SHAPE,
            "doc_start must be int32 [B,T]");
    FT_TRY(ft_llama_loss_docs(r.model, in[0], in[1], in[2], NULL, NULL, &logits));
    return FT_OK;
}

static void logits_are_those_of_the_documents(void **state)
{
    (void)state;
    launch_ok(1, logits_main, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_and_gradients_are_the_references),
        cmocka_unit_test(reference_is_its_finite_differences),
        cmocka_unit_test(documents_are_as_alone),
        cmocka_unit_test(one_document_is_no_mask),
        cmocka_unit_test(nothing_leaks),
        cmocka_unit_test(bad_documents_are_refused),
        cmocka_unit_test(plans_count_it),
        cmocka_unit_test(rows_are_their_documents),
        cmocka_unit_test(one_document_rows_are_unmasked_rows),
        cmocka_unit_test(layouts_and_policies_change_nothing),
        cmocka_unit_test(stages_agree_to_the_bit),
        cmocka_unit_test(the_plan_is_the_run),
        cmocka_unit_test(logits_are_those_of_the_documents),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
