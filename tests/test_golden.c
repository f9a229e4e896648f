/* Femtotron against Hugging Face transformers, from golden files (tests/golden/README.md).

   usage: test_golden FILE.safetensors...   checks these; one line a file, non-zero if any fails
          test_golden                       the same for tests/golden/ and, where there is one, a
                                            folder of more files beside the repository; also the
                                            refusal of damaged files

   A file is complete in itself: config, weights, batch, optimizer settings, and what comes out. The
   model is built from it in fp32 on one CPU rank; as a test also cut over two, by tp, by tp with
   sequence parallelism and by pp (without logits, and without the loss before training), where the
   shape allows. Compared, as relative errors (L2 over a tensor):

       logits, loss, every gradient                                1e-5
       losses of the AdamW steps (same batch each time)            1e-5
       norms of the gradient in these steps, before clipping       2e-4
       weights after the last step: layer 0 and all norms          1e-4
       the same for biases of key projections                      1e-3
   Key biases: softmax nearly ignores them, so their gradients are several times smaller than those
   of q and v. They are as exact as the others at first, but Adam divides by their size. */

#ifndef FT_TEST_LINKED /* make compiles the implementation once for many tests */
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"
#include "femtotron_io.h"

#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#ifdef FT_CJSON
#include <cjson/cJSON.h>

typedef enum golden_kind {
    GOLDEN_LOGITS = 0, GOLDEN_LOSS, GOLDEN_GRADS, GOLDEN_LOSSES, GOLDEN_NORMS, GOLDEN_FINAL,
    GOLDEN_KEY_BIASES, GOLDEN_KINDS
} golden_kind;

static const char *const golden_names[GOLDEN_KINDS] = {"logits", "loss", "grads", "losses", "norms",
                                                       "final", "key biases"};
static const double golden_limits[GOLDEN_KINDS] = {1e-5, 1e-5, 1e-5, 1e-5, 2e-4, 1e-4, 1e-3};

typedef struct golden_train {
    double lr, beta1, beta2, eps, decay, clip;
    int64_t steps;
} golden_train;

typedef struct golden {
    const char *path;
    int tp, sp, pp;       /* how the model is cut */
    ft_io_safetensors *file;
    ft_llama_config config;
    golden_train train;
    int64_t B, T;
    int32_t *tokens, *labels;
    int64_t counted, most; /* labels that count; elements of the longest tensor */
    float *mine, *theirs; /* [most] of each rank its own */
    /* Results. */
    int checked[GOLDEN_KINDS];
    double worst[GOLDEN_KINDS];
    char where[GOLDEN_KINDS][96];
} golden;

/* ---- reading a file ---- */

static ft_status golden_find(const golden *g, const char *name, int ndim, const int64_t *shape,
                             ft_io_dtype dtype, const ft_io_tensor **out)
{
    const ft_io_tensor *t = ft_io_safetensors_find(g->file, name);
    if (!t) return ft_error(FT_ERR_DATA, "tensor %s is missing", name);
    int same = t->ndim == ndim && t->dtype == dtype;
    for (int i = 0; same && i < ndim; i++) same = t->shape[i] == shape[i];
    if (!same)
        return ft_error(FT_ERR_DATA, "tensor %s: expected %d dimensions [%lld,%lld,%lld] of %s, "
                        "found %d [%lld,%lld,%lld] of %s", name, ndim, (long long)shape[0],
                        (long long)(ndim > 1 ? shape[1] : 0), (long long)(ndim > 2 ? shape[2] : 0),
                        ft_io_dtype_name(dtype), t->ndim, (long long)t->shape[0],
                        (long long)t->shape[1], (long long)t->shape[2], ft_io_dtype_name(t->dtype));
    *out = t;
    return FT_OK;
}

static ft_status golden_floats(const golden *g, const char *name, int ndim, const int64_t *shape,
                               float *values)
{
    const ft_io_tensor *t;
    FT_TRY(golden_find(g, name, ndim, shape, FT_IO_F32, &t));
    return ft_io_read_float(t, 0, t->elems, values);
}

static ft_status golden_text(const cJSON *object, const char *key, const char *expected)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(object, key);
    if (cJSON_IsString(v) && strcmp(v->valuestring, expected) == 0) return FT_OK;
    return ft_error(FT_ERR_UNSUPPORTED, "train: %s must be \"%s\", not %s", key, expected,
                    cJSON_IsString(v) ? v->valuestring : "something else");
}

static ft_status golden_number(const cJSON *v, const char *key, double *value)
{
    if (!cJSON_IsNumber(v)) return ft_error(FT_ERR_DATA, "train: %s is no number", key);
    *value = v->valuedouble;
    return FT_OK;
}

static ft_status golden_train_values(const cJSON *json, golden_train *t)
{
    const cJSON *betas = cJSON_GetObjectItemCaseSensitive(json, "betas");
    double steps = 0;
    FT_TRY(golden_text(json, "optimizer", "AdamW"));
    FT_TRY(golden_text(json, "schedule", "constant"));
    FT_TRY(golden_text(json, "decayed", "tensors of 2 dimensions or more"));
    FT_TRY(golden_number(cJSON_GetObjectItemCaseSensitive(json, "lr"), "lr", &t->lr));
    FT_TRY(golden_number(cJSON_GetArrayItem(betas, 0), "betas[0]", &t->beta1));
    FT_TRY(golden_number(cJSON_GetArrayItem(betas, 1), "betas[1]", &t->beta2));
    FT_TRY(golden_number(cJSON_GetObjectItemCaseSensitive(json, "eps"), "eps", &t->eps));
    FT_TRY(golden_number(cJSON_GetObjectItemCaseSensitive(json, "weight_decay"), "weight_decay",
                         &t->decay));
    FT_TRY(golden_number(cJSON_GetObjectItemCaseSensitive(json, "clip_grad_norm"),
                         "clip_grad_norm", &t->clip));
    FT_TRY(golden_number(cJSON_GetObjectItemCaseSensitive(json, "steps"), "steps", &steps));
    if (!(steps >= 1 && steps <= 100000))
        return ft_error(FT_ERR_DATA, "train: %g steps", steps);
    t->steps = (int64_t)steps;
    return FT_OK;
}

static ft_status golden_read_train(golden *g)
{
    const char *text = ft_io_safetensors_metadata(g->file, "train");
    if (!text) return ft_error(FT_ERR_DATA, "__metadata__ has no `train`");
    cJSON *json = cJSON_Parse(text);
    if (!json) return ft_error(FT_ERR_DATA, "__metadata__: `train` is not JSON");
    ft_status status = golden_train_values(json, &g->train);
    cJSON_Delete(json);
    return status;
}

static ft_status golden_read_config(golden *g)
{
    const char *text = ft_io_safetensors_metadata(g->file, "config");
    ft_io_hf_config hf;
    ft_llama_config *c = &g->config;
    if (!text) return ft_error(FT_ERR_DATA, "__metadata__ has no `config`");
    FT_TRY(ft_io_hf_config_parse(text, g->path, &hf));
    *c = ft_llama_config_default();
    c->vocab = hf.vocab;
    c->hidden = hf.hidden;
    c->layers = hf.layers;
    c->heads = hf.heads;
    c->kv_heads = hf.kv_heads;
    c->head_dim = hf.head_dim;
    c->intermediate = hf.intermediate;
    c->tie_embeddings = hf.tie_embeddings;
    c->qkv_bias = hf.qkv_bias;
    c->o_bias = hf.o_bias;
    c->mlp_bias = hf.mlp_bias;
    c->qk_norm = hf.qk_norm;
    c->norm_eps = hf.norm_eps;
    c->rope_theta = hf.rope_theta;
    c->rope_scaling = hf.rope_scaling;
    c->loss_chunk_tokens = 24; /* several chunks, the last one uneven */
    return ft_llama_check(c);
}

/* int64 in the file, int32 in the model: what does not fit must not wrap into a valid token. */
static ft_status golden_read_ids(const golden *g, const char *name, int64_t least, int32_t *values)
{
    const ft_io_tensor *t;
    int64_t shape[2], id;
    shape[0] = g->B;
    shape[1] = g->T;
    FT_TRY(golden_find(g, name, 2, shape, FT_IO_I64, &t));
    for (int64_t i = 0; i < t->elems; i++) {
        FT_TRY(ft_io_read_int(t, i, 1, &id));
        if (id < least || id >= g->config.vocab)
            return ft_error(FT_ERR_DATA, "%s[%lld] is %lld, the vocabulary has %lld", name,
                            (long long)i, (long long)id, (long long)g->config.vocab);
        values[i] = (int32_t)id;
    }
    return FT_OK;
}

static ft_status golden_read_batch(golden *g)
{
    const ft_io_tensor *ids = ft_io_safetensors_find(g->file, "input_ids");
    if (!ids || ids->ndim != 2 || ids->elems < 1)
        return ft_error(FT_ERR_DATA, "tensor input_ids [B,T] is missing, empty or misshapen");
    g->B = ids->shape[0];
    g->T = ids->shape[1];
    g->tokens = (int32_t *)calloc((size_t)ids->elems, sizeof(int32_t));
    g->labels = (int32_t *)calloc((size_t)ids->elems, sizeof(int32_t));
    if (!g->tokens || !g->labels) return ft_error(FT_ERR_OOM, "no memory for the batch");
    FT_TRY(golden_read_ids(g, "input_ids", 0, g->tokens));
    FT_TRY(golden_read_ids(g, "labels", -100, g->labels));
    for (int64_t i = 0; i < ids->elems; i++) g->counted += g->labels[i] != -100;
    return FT_OK;
}

static ft_status golden_open(golden *g)
{
    g->most = 1;
    FT_TRY(ft_io_safetensors_open(g->path, &g->file));
    FT_TRY(golden_read_config(g));
    FT_TRY(golden_read_train(g));
    FT_TRY(golden_read_batch(g));
    for (int64_t i = 0; i < ft_io_safetensors_count(g->file); i++) {
        const ft_io_tensor *t = ft_io_safetensors_at(g->file, i);
        if (t->elems > g->most) g->most = t->elems;
    }
    return FT_OK;
}

/* ---- comparing ---- */

static double golden_norm(const float *a, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)a[i] * (double)a[i];
    return sqrt(sum);
}

static double golden_distance(const float *a, const float *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)a[i] - (double)b[i];
        sum += d * d;
    }
    return sqrt(sum);
}

/* The worst stays; a NaN is worse than anything and stays, too. */
static void golden_note(golden *g, golden_kind kind, double error, const char *where)
{
    int first = g->checked[kind]++ == 0;
    if (!first && !(error > g->worst[kind]) && error == error) return;
    if (!first && g->worst[kind] != g->worst[kind]) return;
    g->worst[kind] = error;
    snprintf(g->where[kind], sizeof g->where[kind], "%s", where);
}

static void golden_compare(golden *g, golden_kind kind, int64_t n, const char *where)
{
    double error = golden_distance(g->mine, g->theirs, n);
    if (error != 0) error /= golden_norm(g->theirs, n); /* against zeros: infinite */
    golden_note(g, kind, error, where);
}

static void golden_key(const char *prefix, const ft_llama_param *p, char *key, size_t key_bytes)
{
    snprintf(key, key_bytes, "%s%s", prefix, p->name);
}

/* Every tensor with this prefix is a parameter; with `all`, every parameter has such a tensor. */
static ft_status golden_match(const golden *g, const ft_llama *model, const char *prefix, int all)
{
    char key[96];
    for (int64_t i = 0; i < ft_io_safetensors_count(g->file); i++) {
        const char *name = ft_io_safetensors_at(g->file, i)->name;
        if (strncmp(name, prefix, strlen(prefix)) == 0 &&
            !ft_llama_param_find(model, name + strlen(prefix)))
            return ft_error(FT_ERR_DATA, "tensor %s is none of the model's parameters", name);
    }
    for (int i = 0; all && i < ft_llama_param_count(model); i++) {
        golden_key(prefix, ft_llama_param_at(model, i), key, sizeof key);
        if (!ft_io_safetensors_find(g->file, key))
            return ft_error(FT_ERR_DATA, "tensor %s is missing", key);
    }
    return FT_OK;
}

static ft_status golden_import(const golden *g, ft_llama *model)
{
    char key[96];
    for (int i = 0; i < ft_llama_param_count(model); i++) {
        const ft_llama_param *p = ft_llama_param_at(model, i);
        golden_key("w/", p, key, sizeof key);
        FT_TRY(golden_floats(g, key, p->ndim, p->shape, g->theirs));
        FT_TRY(ft_llama_import(model, p, g->theirs));
    }
    return FT_OK;
}

static ft_status golden_upload(ft_ctx *ctx, const golden *g, ft_tensor **tokens, ft_tensor **labels)
{
    int64_t shape[2];
    shape[0] = g->B;
    shape[1] = g->T;
    FT_TRY(ft_tensor_create(ctx, tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(ctx, labels, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_upload(*tokens, g->tokens));
    return ft_upload(*labels, g->labels);
}

static ft_status golden_forward(golden *g, ft_llama *model, ft_tensor *tokens, ft_tensor *labels)
{
    ft_tensor *logits, *loss;
    int64_t shape[3], one = 1;
    shape[0] = g->B;
    shape[1] = g->T;
    shape[2] = g->config.vocab;
    FT_TRY(golden_floats(g, "logits", 3, shape, g->theirs));
    FT_TRY(ft_llama_logits(model, tokens, 0, &logits));
    FT_TRY(ft_download(logits, g->mine));
    golden_compare(g, GOLDEN_LOGITS, ft_numel(logits), "logits");
    ft_tensor_free(logits);

    FT_TRY(golden_floats(g, "loss", 1, &one, g->theirs));
    FT_TRY(ft_llama_loss(model, tokens, labels, NULL, NULL, &loss));
    FT_TRY(ft_download(loss, g->mine));
    golden_compare(g, GOLDEN_LOSS, 1, "loss");
    ft_tensor_free(loss);
    return FT_OK;
}

static int golden_is_key_bias(const char *name)
{
    return strstr(name, ".k_proj.bias") != NULL;
}

static ft_status golden_grads(golden *g, ft_llama *model)
{
    char key[96];
    for (int i = 0; i < ft_llama_param_count(model); i++) {
        const ft_llama_param *p = ft_llama_param_at(model, i);
        golden_key("g/", p, key, sizeof key);
        FT_TRY(golden_floats(g, key, p->ndim, p->shape, g->theirs));
        FT_TRY(ft_llama_export_grad(model, p, g->mine));
        golden_compare(g, GOLDEN_GRADS, p->shape[0] * p->shape[1], p->name);
    }
    return FT_OK;
}

typedef struct golden_run_state { /* of a rank */
    ft_llama *model;
    ft_zero *zero;
    ft_pp *pp;
    ft_pp_program program;
    ft_tensor *tokens, *labels, *scale;
} golden_run_state;

static ft_status golden_chunk(void *user, int chunk, int m, ft_tensor *x, ft_tensor **out)
{
    golden_run_state *r = (golden_run_state *)user;
    (void)m;
    return ft_llama_chunk(r->model, chunk, r->tokens, r->labels, r->scale, NULL, x, out);
}

static ft_status golden_add_loss(void *user, int m, ft_tensor *loss)
{
    (void)m;
    return ft_zero_add_loss(((golden_run_state *)user)->zero, loss);
}

/* One training step; the gradients of the first are compared before the update. */
static ft_status golden_step(golden *g, golden_run_state *r, int64_t step)
{
    ft_zero_report report;
    char where[32];
    FT_TRY(ft_zero_step_begin(r->zero, 1, g->counted, &r->scale));
    FT_TRY(ft_pp_run(r->pp, &r->program));
    if (step == 0) FT_TRY(golden_grads(g, r->model));
    FT_TRY(ft_zero_step_end(r->zero, g->train.lr));
    FT_TRY(ft_zero_report_get(r->zero, &report));

    snprintf(where, sizeof where, "step %lld", (long long)step);
    FT_TRY(golden_floats(g, "losses", 1, &g->train.steps, g->theirs));
    golden_note(g, GOLDEN_LOSSES, fabs(report.loss / (double)g->theirs[step] - 1), where);
    FT_TRY(golden_floats(g, "grad_norms", 1, &g->train.steps, g->theirs));
    golden_note(g, GOLDEN_NORMS, fabs(report.grad_norm / (double)g->theirs[step] - 1), where);
    if (report.updates != step + 1 || report.skipped)
        return ft_error(FT_ERR_STATE, "step %lld: %lld updates, %lld skipped", (long long)step,
                        (long long)report.updates, (long long)report.skipped);
    return FT_OK;
}

static ft_status golden_final(golden *g, ft_llama *model)
{
    char key[96];
    for (int i = 0; i < ft_llama_param_count(model); i++) {
        const ft_llama_param *p = ft_llama_param_at(model, i);
        golden_kind kind = golden_is_key_bias(p->name) ? GOLDEN_KEY_BIASES : GOLDEN_FINAL;
        golden_key("final/", p, key, sizeof key);
        int must = strstr(p->name, "layers.0.") || strstr(p->name, "norm.weight");
        if (!must && !ft_io_safetensors_find(g->file, key)) continue;
        FT_TRY(golden_floats(g, key, p->ndim, p->shape, g->theirs));
        FT_TRY(ft_llama_export(model, p, g->mine));
        golden_compare(g, kind, p->shape[0] * p->shape[1], p->name);
    }
    return FT_OK;
}

static ft_status golden_verdict(const golden *g)
{
    for (int k = 0; k < GOLDEN_KINDS; k++) {
        int whole = g->tp * g->pp == 1; /* a cut model has no logits, and its loss in steps */
        if (!g->checked[k] && k != GOLDEN_KEY_BIASES && (whole || k > GOLDEN_LOSS))
            return ft_error(FT_ERR_DATA, "no %s were compared", golden_names[k]);
        if (g->checked[k] && !(g->worst[k] <= golden_limits[k]))
            return ft_error(FT_ERR_DATA, "%s: error %.2e in %s is above %.0e", golden_names[k],
                            g->worst[k], g->where[k], golden_limits[k]);
    }
    return FT_OK;
}

static ft_status golden_create(const golden *g, ft_ctx *ctx, golden_run_state *r)
{
    ft_zero_config config = ft_zero_config_default();
    ft_pp_config pipeline = ft_pp_config_default();
    ft_llama_layout layout;
    int64_t first_layer[3];
    memset(&layout, 0, sizeof layout);
    config.optimizer = ft_zero_adamw(g->train.beta1, g->train.beta2, g->train.eps);
    config.weight_decay = g->train.decay;
    config.grad_clip = g->train.clip;
    pipeline.ranks = g->pp;
    FT_TRY(ft_mesh_create(ctx, 1, g->tp, g->pp, &layout.mesh));
    FT_TRY(ft_tp_check(g->tp, g->sp, g->config.heads, g->config.kv_heads, g->config.intermediate,
                       g->B, g->T));
    FT_TRY(ft_pp_layers_uniform(g->config.layers, g->pp, first_layer));
    if (g->tp > 1) FT_TRY(ft_tp_create(ctx, &layout.mesh, g->sp, &layout.tp));
    layout.first_layer = first_layer;
    FT_TRY(ft_zero_create(ctx, &config, &layout.mesh, &r->zero));
    FT_TRY(ft_llama_create_part(ctx, r->zero, &g->config, &layout, g->T, 1, &r->model));
    FT_TRY(ft_pp_create(ctx, &layout.mesh, &pipeline, &r->pp));
    r->program.forward = golden_chunk;
    r->program.loss = golden_add_loss;
    r->program.user = r;
    return ft_llama_boundary(r->model, g->B, g->T, &r->program.ndim, r->program.shape);
}

/* Each rank compares for itself, with arrays of its own. */
static ft_status golden_train_rank(golden *g, ft_ctx *ctx)
{
    golden_run_state r;
    memset(&r, 0, sizeof r);
    FT_TRY(golden_create(g, ctx, &r));
    FT_TRY(golden_match(g, r.model, "w/", 1));
    FT_TRY(golden_match(g, r.model, "g/", 1));
    FT_TRY(golden_match(g, r.model, "final/", 0));
    FT_TRY(golden_import(g, r.model));
    FT_TRY(golden_upload(ctx, g, &r.tokens, &r.labels));
    if (ft_world(ctx) == 1) FT_TRY(golden_forward(g, r.model, r.tokens, r.labels));
    for (int64_t step = 0; step < g->train.steps; step++) FT_TRY(golden_step(g, &r, step));
    return golden_final(g, r.model);
}

static ft_status golden_rank(ft_ctx *ctx, void *user)
{
    golden own = *(golden *)user;
    own.mine = (float *)ft_host_alloc(ctx, (size_t)own.most * sizeof(float));
    own.theirs = (float *)ft_host_alloc(ctx, (size_t)own.most * sizeof(float));
    if (!own.mine || !own.theirs) return FT_ERR_OOM;
    FT_TRY(golden_train_rank(&own, ctx));
    own.mine = own.theirs = NULL;
    FT_TRY(golden_verdict(&own));
    if (ft_rank(ctx) == 0) *(golden *)user = own;
    return FT_OK;
}

/* ---- one file ---- */

static const char *golden_base(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static ft_status golden_run(golden *g)
{
    ft_config config = ft_config_default();
    FT_TRY(golden_open(g));
    config.world = g->tp * g->pp;
    config.device = FT_CPU;
    return ft_launch(&config, golden_rank, g);
}

static void golden_print(const golden *g, ft_status status)
{
    printf("%-28s %s", golden_base(g->path), status == FT_OK ? "ok  " : "FAIL");
    if (g->tp * g->pp > 1) printf("  %s %d", g->pp > 1 ? "pp" : g->sp ? "sp" : "tp", g->tp * g->pp);
    for (int k = 0; k < GOLDEN_KINDS; k++) {
        if (g->checked[k]) printf("  %s %.1e", golden_names[k], g->worst[k]);
    }
    if (status != FT_OK) printf("  [%s: %s]", ft_status_name(status), ft_last_error());
    printf("\n");
    fflush(stdout);
}

static void golden_close(golden *g)
{
    ft_io_safetensors_close(g->file);
    free(g->tokens);
    free(g->labels);
}

static ft_status golden_check(const char *path, int print)
{
    golden g;
    memset(&g, 0, sizeof g);
    g.path = path;
    g.tp = g.pp = 1;
    ft_status status = golden_run(&g);
    if (print) golden_print(&g, status);
    golden_close(&g);
    return status;
}

/* What does not let this file be cut so; NULL: it can be. */
static const char *golden_obstacle(const golden *g)
{
    if (g->config.heads % g->tp) return "heads";
    if (g->config.kv_heads % g->tp) return "kv_heads";
    if (g->config.intermediate % g->tp) return "intermediate";
    if (g->sp && g->B * g->T % g->tp) return "tokens";
    return g->config.layers < g->pp ? "layers" : NULL;
}

/* Cut over two ranks: passes as on one, or is refused by the name of what does not divide. */
static int golden_check_cut(const char *path, int tp, int sp, int pp)
{
    golden g;
    memset(&g, 0, sizeof g);
    g.path = path;
    g.tp = tp;
    g.sp = sp;
    g.pp = pp;
    ft_status status = golden_run(&g);
    const char *obstacle = golden_obstacle(&g);
    int good = obstacle ? status != FT_OK && strstr(ft_last_error(), obstacle) : status == FT_OK;
    if (!obstacle || !good) golden_print(&g, status);
    else printf("%-28s refused  %s %d: %s\n", golden_base(path), pp > 1 ? "pp" : sp ? "sp" : "tp",
                tp * pp, obstacle);
    golden_close(&g);
    return good;
}

/* ---- as a test ---- */

static int golden_is_file(const char *name)
{
    size_t n = strlen(name);
    return n > 12 && strcmp(name + n - 12, ".safetensors") == 0;
}

/* All files of a folder; -1 if it is not there. */
static int golden_check_folder(const char *folder, int *failed)
{
    DIR *dir = opendir(folder);
    char path[512];
    int n = 0;
    if (!dir) return -1;
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) {
        if (!golden_is_file(e->d_name)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        *failed += golden_check(path, 1) != FT_OK;
        *failed += !golden_check_cut(path, 2, 0, 1);
        *failed += !golden_check_cut(path, 2, 1, 1);
        *failed += !golden_check_cut(path, 1, 0, 2);
        n++;
    }
    closedir(dir);
    return n;
}

static void test_files_of_the_repository(void **state)
{
    int failed = 0;
    (void)state;
    assert_true(golden_check_folder("tests/golden", &failed) >= 5);
    assert_int_equal(failed, 0);
}

static void test_files_beside_the_repository(void **state)
{
    int failed = 0;
    (void)state;
    int n = golden_check_folder("../shared/golden", &failed);
    if (n < 0) skip();
    assert_true(n > 0);
    assert_int_equal(failed, 0);
}

typedef struct golden_damage { /* how the copy of a good file differs; NULLs: it does not */
    const char *drop;           /* this tensor is left out */
    const char *add;            /* this one is added, a copy of w/model.norm.weight */
    const char *change;         /* the first element of this one grows by a hundredth */
    const char *config;         /* replaces the config */
    const char *train;          /* replaces the train settings */
    const char *says;           /* what the message must contain */
} golden_damage;

static const char *golden_copy_metadata(const ft_io_safetensors *from, const char *key,
                                        const golden_damage *d)
{
    if (d->config && strcmp(key, "config") == 0) return d->config;
    if (d->train && strcmp(key, "train") == 0) return d->train;
    return ft_io_safetensors_metadata(from, key);
}

static ft_status golden_copy(const ft_io_safetensors *from, const char *path,
                             const golden_damage *d, float *changed)
{
    ft_io_safetensors_writer *w;
    const ft_io_tensor *norm = ft_io_safetensors_find(from, "w/model.norm.weight");
    FT_TRY(ft_io_safetensors_create(path, &w));
    for (int64_t i = 0; i < ft_io_safetensors_count(from); i++) {
        const ft_io_tensor *t = ft_io_safetensors_at(from, i);
        const void *data = t->data;
        if (d->drop && strcmp(t->name, d->drop) == 0) continue;
        if (d->change && strcmp(t->name, d->change) == 0) {
            FT_TRY(ft_io_read_float(t, 0, t->elems, changed));
            changed[0] *= 1.01f;
            data = changed;
        }
        FT_TRY(ft_io_safetensors_add(w, t->name, t->dtype, t->ndim, t->shape, data));
    }
    if (d->add)
        FT_TRY(ft_io_safetensors_add(w, d->add, norm->dtype, norm->ndim, norm->shape, norm->data));
    FT_TRY(ft_io_safetensors_set_metadata(w, "config", golden_copy_metadata(from, "config", d)));
    FT_TRY(ft_io_safetensors_set_metadata(w, "train", golden_copy_metadata(from, "train", d)));
    return ft_io_safetensors_finish(w);
}

/* A copy of a good file, damaged in one place, is refused, and the message says where. */
static void golden_refuses(const golden_damage *d)
{
    char path[64];
    ft_io_safetensors *from;
    float changed[4096];
    snprintf(path, sizeof path, "/tmp/ft_golden_%ld.safetensors", (long)getpid());
    assert_int_equal(ft_io_safetensors_open("tests/golden/llama_gqa.safetensors", &from), FT_OK);
    ft_status made = golden_copy(from, path, d, changed);
    if (made != FT_OK) print_error("%s\n", ft_last_error());
    ft_io_safetensors_close(from);
    assert_int_equal(made, FT_OK);
    ft_status status = golden_check(path, 0);
    remove(path);
    if (d->says) {
        assert_int_not_equal(status, FT_OK);
        if (!strstr(ft_last_error(), d->says))
            fail_msg("expected \"%s\" in \"%s\"", d->says, ft_last_error());
    } else {
        assert_int_equal(status, FT_OK);
    }
}

static void test_damaged_files_are_refused(void **state)
{
    static const golden_damage damages[] = {
        {NULL, NULL, NULL, NULL, NULL, NULL}, /* a true copy passes: the damage is what fails */
        {"w/model.layers.1.mlp.up_proj.weight", NULL, NULL, NULL, NULL,
         "w/model.layers.1.mlp.up_proj.weight is missing"},
        {"g/lm_head.weight", NULL, NULL, NULL, NULL, "g/lm_head.weight is missing"},
        {"final/model.norm.weight", NULL, NULL, NULL, NULL, "final/model.norm.weight is missing"},
        {"labels", NULL, NULL, NULL, NULL, "labels is missing"},
        {"logits", NULL, NULL, NULL, NULL, "logits is missing"},
        {"grad_norms", NULL, NULL, NULL, NULL, "grad_norms is missing"},
        {NULL, "w/model.layers.0.self_attn.q_proj.bias", NULL, NULL, NULL, "none of the model's"},
        {NULL, "final/model.layers.7.mlp.up_proj.weight", NULL, NULL, NULL, "none of the model's"},
        {NULL, NULL, "losses", NULL, NULL, "losses: error"},
        {NULL, NULL, "grad_norms", NULL, NULL, "norms: error"},
        {NULL, NULL, "g/model.norm.weight", NULL, NULL, "grads: error"},
        {NULL, NULL, "final/model.norm.weight", NULL, NULL, "final: error"},
        {NULL, NULL, NULL, "{\"model_type\": \"gpt2\"}", NULL, "gpt2"},
        {NULL, NULL, NULL, "{", NULL, "JSON"},
        {NULL, NULL, NULL, NULL, "{\"optimizer\": \"SGD\"}", "optimizer"}
    };
    (void)state;
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) golden_refuses(&damages[i]);
}

static void test_no_file_is_refused(void **state)
{
    (void)state;
    assert_int_equal(golden_check("/nonexistent/file.safetensors", 0), FT_ERR_IO);
}

static int golden_main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_files_of_the_repository),
        cmocka_unit_test(test_files_beside_the_repository),
        cmocka_unit_test(test_damaged_files_are_refused),
        cmocka_unit_test(test_no_file_is_refused),
    };
    int failed = 0;
    if (argc < 2) return cmocka_run_group_tests(tests, NULL, NULL);
    for (int i = 1; i < argc; i++) failed += golden_check(argv[i], 1) != FT_OK;
    return failed ? 1 : 0;
}

#else /* the config of a file is JSON: nothing can be checked without a parser */

static void test_golden_files(void **state)
{
    (void)state;
    print_message("golden files need cJSON (-DFT_CJSON, -lcjson): not checked\n");
    skip();
}

static int golden_main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden_files)};
    if (argc < 2) return cmocka_run_group_tests(tests, NULL, NULL);
    for (int i = 1; i < argc; i++)
        printf("%s FAIL  [built without cJSON: define FT_CJSON and link -lcjson]\n", argv[i]);
    return 1;
}

#endif

int main(int argc, char **argv) { return golden_main(argc, argv); }
