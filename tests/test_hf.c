/* Models of Hugging Face in and out: what a directory says is what every rank of any mesh trains
   on, and what an export says is what it has; everything else is refused in one line that names the
   file and the reason.

   cc -std=c11 -I. -DFT_CJSON tests/test_hf.c -lcmocka -lcjson -lm -lpthread

   Models are made here: config.json spelled by hand in the families' own words, weights from a
   function of (name, element). References: those weights; transformers' logits in the golden files;
   arithmetic in float64. */

#if !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#define _DEFAULT_SOURCE 1 /* mkdtemp, symlink, truncate */
#define _POSIX_C_SOURCE 200809L
#endif

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* The system call number `faults_at` of those that write fails, or kills; -1: none does. */
static int faults_at = -1, fault_calls, fault_kills;

static int disk_fault(const char *call)
{
    (void)call;
    if (fault_calls++ != faults_at) return 0;
    if (fault_kills) raise(SIGKILL);
    return ENOSPC;
}

#include "temp_files.h"
#define FT_IO_FAULT(call) disk_fault(call)
#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"
#include "femtotron_io.h"
#include "assert_status.h"
#include "check.h"

#ifdef FT_CJSON

/* ------------------------------------------------------------------------ directories of models */

static void remove_tree(const char *path)
{
    DIR *dir = opendir(path);
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        char inner[700];
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        snprintf(inner, sizeof inner, "%s/%s", path, e->d_name);
        if (unlink(inner) != 0) remove_tree(inner);
    }
    if (dir != NULL) closedir(dir);
    rmdir(path);
}

/* DIR/NAME, one of eight at a time. */
static const char *inside(const char *dir, const char *name)
{
    static char paths[8][700];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    return path;
}

static int clean_trees(void **state)
{
    (void)state;
    DIR *dir = opendir(temp_directory);
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;)
        if (e->d_name[0] != '.') {
            const char *path = inside(temp_directory, e->d_name);
            if (unlink(path) != 0) remove_tree(path);
        }
    if (dir != NULL) closedir(dir);
    return 0;
}

static const char *make_dir(const char *name)
{
    const char *path = in_directory(name);
    assert_true(mkdir(path, 0777) == 0 || errno == EEXIST);
    return path;
}

static void put_text(const char *dir, const char *name, const char *text)
{
    FILE *f = fopen(inside(dir, name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
    assert_int_equal(fclose(f), 0);
}

static char *get_text(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    *n = (size_t)ftell(f);
    rewind(f);
    char *text = (char *)malloc(*n + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, *n, f), *n);
    text[*n] = 0;
    fclose(f);
    return text;
}

static int is_there(const char *dir, const char *name)
{
    return access(inside(dir, name), F_OK) == 0;
}

static int count_in(const char *path)
{
    int n = 0;
    DIR *dir = opendir(path);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir)) != NULL;)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(dir);
    return n;
}

/* A family's model: its config.json, and the shapes that transformers gives its tensors. */
typedef struct family {
    const char *name, *config;
    int64_t V, C, L, H, K, D, F;
    int tied, qkv_bias, o_bias, mlp_bias, qk_norm;
} family;

#define SIZES(V, C, L, H, K, F)                                                                    \
    "\"vocab_size\":" #V ",\"hidden_size\":" #C ",\"num_hidden_layers\":" #L                       \
    ",\"num_attention_heads\":" #H ",\"num_key_value_heads\":" #K ",\"intermediate_size\":" #F

static const family families[] = {
    {"llama", "{\"model_type\":\"llama\"," SIZES(97, 32, 4, 4, 4, 48)
              ",\"rms_norm_eps\":1e-5,\"torch_dtype\":\"float32\"}",
     97, 32, 4, 4, 4, 8, 48, 0, 0, 0, 0, 0},
    {"llama3.1", "{\"model_type\":\"llama\"," SIZES(97, 32, 4, 4, 2, 48)
                 ",\"rms_norm_eps\":1e-5,\"rope_theta\":500000.0,\"rope_scaling\":{\"factor\":8.0,"
                 "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
                 "\"original_max_position_embeddings\":16,\"rope_type\":\"llama3\"},"
                 "\"bos_token_id\":1,\"eos_token_id\":[2,3],\"max_position_embeddings\":128}",
     97, 32, 4, 4, 2, 8, 48, 0, 0, 0, 0, 0},
    {"llama tied", "{\"model_type\":\"llama\"," SIZES(101, 32, 4, 4, 2, 48)
                   ",\"head_dim\":16,\"tie_word_embeddings\":true,\"dtype\":\"bfloat16\","
                   "\"rope_parameters\":{\"rope_theta\":1e5,\"rope_type\":\"default\"}}",
     101, 32, 4, 4, 2, 16, 48, 1, 0, 0, 0, 0},
    {"llama biases", "{\"model_type\":\"llama\"," SIZES(97, 32, 4, 4, 2, 48)
                     ",\"attention_bias\":true,\"mlp_bias\":true}",
     97, 32, 4, 4, 2, 8, 48, 0, 1, 1, 1, 0},
    {"mistral", "{\"model_type\":\"mistral\"," SIZES(97, 32, 4, 4, 2, 48)
                ",\"rope_theta\":1e6,\"sliding_window\":64,\"head_dim\":null}",
     97, 32, 4, 4, 2, 8, 48, 0, 0, 0, 0, 0},
    {"qwen2", "{\"model_type\":\"qwen2\"," SIZES(97, 32, 4, 4, 2, 48)
              ",\"rope_theta\":1e6,\"tie_word_embeddings\":true,\"use_sliding_window\":false,"
              "\"sliding_window\":8,\"max_window_layers\":4}",
     97, 32, 4, 4, 2, 8, 48, 1, 1, 0, 0, 0},
    {"qwen3", "{\"model_type\":\"qwen3\"," SIZES(97, 48, 4, 4, 2, 48)
              ",\"rope_theta\":1e6,\"head_dim\":16,\"use_sliding_window\":true,"
              "\"sliding_window\":64,\"max_window_layers\":1}",
     97, 48, 4, 4, 2, 16, 48, 0, 0, 0, 0, 1},
};
enum { FAMILIES = (int)(sizeof families / sizeof *families), T_TEST = 32 };

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* A weight: about +-0.25 with all 24 bits in use, and 1 more in norms. */
static float weight_of(const char *name, int64_t i)
{
    uint64_t h = 5381;
    for (const char *c = name; *c; c++) h = h * 33 + (unsigned char)*c;
    const double u = (double)(mix(h ^ mix((uint64_t)i)) >> 40) / 16777216.0 - 0.5;
    return (float)(u * 0.5 + (strstr(name, "norm") ? 1 : 0));
}

typedef struct listed { char name[96]; int ndim; int64_t shape[2]; } listed;

static int list_add(listed *list, int n, int has, const char *prefix, const char *name,
                    int64_t rows, int64_t cols)
{
    if (!has) return n;
    snprintf(list[n].name, sizeof list[n].name, "%s%s", prefix, name);
    list[n].ndim = cols ? 2 : 1;
    list[n].shape[0] = rows;
    list[n].shape[1] = cols ? cols : 1;
    return n + 1;
}

static int list_weights(const family *f, listed *list)
{
    int n = list_add(list, 0, 1, "", "model.embed_tokens.weight", f->V, f->C);
    for (int64_t i = 0; i < f->L; i++) {
        char at[40];
        snprintf(at, sizeof at, "model.layers.%lld.", (long long)i);
        n = list_add(list, n, 1, at, "self_attn.q_proj.weight", f->H * f->D, f->C);
        n = list_add(list, n, 1, at, "self_attn.k_proj.weight", f->K * f->D, f->C);
        n = list_add(list, n, 1, at, "self_attn.v_proj.weight", f->K * f->D, f->C);
        n = list_add(list, n, 1, at, "self_attn.o_proj.weight", f->C, f->H * f->D);
        n = list_add(list, n, f->qkv_bias, at, "self_attn.q_proj.bias", f->H * f->D, 0);
        n = list_add(list, n, f->qkv_bias, at, "self_attn.k_proj.bias", f->K * f->D, 0);
        n = list_add(list, n, f->qkv_bias, at, "self_attn.v_proj.bias", f->K * f->D, 0);
        n = list_add(list, n, f->o_bias, at, "self_attn.o_proj.bias", f->C, 0);
        n = list_add(list, n, f->qk_norm, at, "self_attn.q_norm.weight", f->D, 0);
        n = list_add(list, n, f->qk_norm, at, "self_attn.k_norm.weight", f->D, 0);
        n = list_add(list, n, 1, at, "mlp.gate_proj.weight", f->F, f->C);
        n = list_add(list, n, 1, at, "mlp.up_proj.weight", f->F, f->C);
        n = list_add(list, n, 1, at, "mlp.down_proj.weight", f->C, f->F);
        n = list_add(list, n, f->mlp_bias, at, "mlp.gate_proj.bias", f->F, 0);
        n = list_add(list, n, f->mlp_bias, at, "mlp.up_proj.bias", f->F, 0);
        n = list_add(list, n, f->mlp_bias, at, "mlp.down_proj.bias", f->C, 0);
        n = list_add(list, n, 1, at, "input_layernorm.weight", f->C, 0);
        n = list_add(list, n, 1, at, "post_attention_layernorm.weight", f->C, 0);
    }
    n = list_add(list, n, 1, "", "model.norm.weight", f->C, 0);
    return list_add(list, n, !f->tied, "", "lm_head.weight", f->V, f->C);
}

/* The bits of value in a 16-bit format with `exponent` bits of exponent, by truncation: the sources
   hold what they hold, and these are what a reader must give back exactly. */
static uint16_t half_bits(float value, int f16)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (!f16) return (uint16_t)(bits >> 16);
    int e = 0;
    const double m = frexp(fabs((double)value), &e); /* m in [0.5, 1) */
    if (value == 0 || e < -13) return (uint16_t)(bits >> 31 << 15); /* flushed, of no interest */
    return (uint16_t)((bits >> 31 << 15) | (uint32_t)((e + 14) << 10) |
                      ((uint32_t)(m * 2048) & 1023u));
}

/* What 16 bits mean, from the definition of the format. */
static double half_value(uint16_t bits, int f16)
{
    const int eb = f16 ? 5 : 8, mb = 15 - eb, bias = (1 << (eb - 1)) - 1;
    const int e = bits >> mb & ((1 << eb) - 1), m = bits & ((1 << mb) - 1);
    const double sign = bits >> 15 ? -1 : 1;
    if (e == (1 << eb) - 1) return m ? NAN : sign * INFINITY;
    return sign * (e ? ldexp(1 + m / (double)(1 << mb), e - bias)
                     : ldexp(m / (double)(1 << mb), 1 - bias));
}

static size_t width_of(ft_io_dtype dtype) { return (size_t)ft_io_dtype_bits(dtype) / 8; }

static void *weight_bytes(const listed *w, ft_io_dtype dtype)
{
    const int64_t n = w->shape[0] * w->shape[1];
    char *bytes = (char *)malloc((size_t)n * width_of(dtype));
    assert_non_null(bytes);
    for (int64_t i = 0; i < n; i++) {
        const float value = weight_of(w->name, i);
        const double wide = (double)value;
        const uint16_t half = half_bits(value, dtype == FT_IO_F16);
        const void *from = dtype == FT_IO_F32 ? (const void *)&value
                           : dtype == FT_IO_F64 ? (const void *)&wide : (const void *)&half;
        memcpy(bytes + (size_t)i * width_of(dtype), from, width_of(dtype));
    }
    return bytes;
}

/* What a reader must make of element i of a source of this dtype. */
static float expected_weight(const char *name, int64_t i, ft_io_dtype dtype)
{
    const float value = weight_of(name, i);
    if (dtype == FT_IO_F32 || dtype == FT_IO_F64) return value;
    return (float)half_value(half_bits(value, dtype == FT_IO_F16), dtype == FT_IO_F16);
}

static void write_weights(const char *dir, const char *file, const listed *list, int first, int end,
                          ft_io_dtype dtype)
{
    ft_io_safetensors_writer *w;
    void *bytes[100];
    assert_true(end - first <= 100);
    assert_ok(ft_io_safetensors_create(inside(dir, file), &w));
    for (int i = first; i < end; i++) {
        bytes[i - first] = weight_bytes(&list[i], dtype);
        assert_ok(ft_io_safetensors_add(w, list[i].name, dtype, list[i].ndim, list[i].shape,
                                        bytes[i - first]));
    }
    assert_ok(ft_io_safetensors_finish(w));
    for (int i = first; i < end; i++) free(bytes[i - first]);
}

static const char *write_model(const char *name, const family *f, ft_io_dtype dtype)
{
    listed list[100];
    const char *dir = make_dir(name);
    put_text(dir, "config.json", f->config);
    write_weights(dir, "model.safetensors", list, 0, list_weights(f, list), dtype);
    return dir;
}

/* ---------------------------------------------------------------------------------------- a run */

typedef struct layout { int dp, tp, pp, sp, stage, shard_ranks; ft_dtype dtype; } layout;

/* Loads `source` (unless NULL), takes `steps` steps, exports to `target` (unless NULL), and says
   the loss of the batch at first and at last. */
typedef struct run {
    layout l;
    const ft_io_model *source;
    const char *target;
    ft_io_export options;
    ft_llama_config config;
    double lr;
    int steps, sgd_free;
    double loss[4];
    uint64_t hash, loaded_hash;
    float *logits;           /* [B T V] of rank 0, or NULL */
    const int32_t *tokens;   /* [B,T], or NULL: a function of the position */
    int64_t B, T;
} run;

typedef struct runner {
    run *r;
    ft_ctx *ctx;
    ft_mesh mesh;
    ft_tp *tp;
    ft_zero *zero;
    ft_llama *model;
    ft_pp *pp;
    ft_pp_program program;
    ft_tensor *scale;
    int64_t first_layer[32];
} runner;

static ft_status runner_forward(void *user, int chunk, int m, ft_tensor *x, ft_tensor **out)
{
    runner *w = (runner *)user;
    const run *r = w->r;
    const int64_t B = r->B / r->l.dp, n = B * r->T;
    int64_t shape[2];
    ft_tensor *tokens, *labels;
    int32_t *host = (int32_t *)ft_host_alloc(w->ctx, (size_t)n * 2 * sizeof *host);
    (void)m;
    CHECK(host != NULL);
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = w->mesh.coord[FT_AXIS_DP] * n + i;
        host[i] = (int32_t)(mix((uint64_t)at) % (uint64_t)r->config.vocab);
        host[n + i] = (int32_t)(mix((uint64_t)at + 1) % (uint64_t)r->config.vocab);
    }
    shape[0] = B;
    shape[1] = r->T;
    FT_TRY(ft_tensor_create(w->ctx, &tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(w->ctx, &labels, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_upload(tokens, host));
    FT_TRY(ft_upload(labels, host + n));
    FT_TRY(ft_llama_chunk(w->model, chunk, tokens, labels, w->scale, NULL, x, out));
    ft_tensor_free(tokens);
    ft_tensor_free(labels);
    ft_host_free(w->ctx, host);
    return FT_OK;
}

static ft_status runner_loss(void *user, int m, ft_tensor *loss)
{
    (void)m;
    return ft_zero_add_loss(((runner *)user)->zero, loss);
}

static ft_status runner_create(runner *w)
{
    const run *r = w->r;
    const layout *l = &r->l;
    ft_zero_config zero = ft_zero_config_default();
    ft_pp_config pipeline = ft_pp_config_default();
    ft_llama_layout part;
    FT_TRY(ft_mesh_create(w->ctx, l->dp, l->tp, l->pp, &w->mesh));
    FT_TRY(ft_pp_layers_uniform((int)r->config.layers, l->pp, w->first_layer));
    if (l->tp > 1) FT_TRY(ft_tp_create(w->ctx, &w->mesh, l->sp, &w->tp));
    zero.stage = l->stage;
    zero.dtype = l->dtype;
    zero.shard_ranks = l->shard_ranks;
    FT_TRY(ft_zero_create(w->ctx, &zero, &w->mesh, &w->zero));
    memset(&part, 0, sizeof part);
    part.mesh = w->mesh;
    part.tp = w->tp;
    part.chunks = 1;
    part.first_layer = w->first_layer;
    FT_TRY(ft_llama_create_part(w->ctx, w->zero, &r->config, &part, r->T, 7, &w->model));
    pipeline.ranks = l->pp;
    FT_TRY(ft_pp_create(w->ctx, &w->mesh, &pipeline, &w->pp));
    w->program.forward = runner_forward;
    w->program.loss = runner_loss;
    w->program.user = w;
    w->program.dtype = l->dtype;
    return ft_llama_boundary(w->model, r->B / l->dp, r->T, &w->program.ndim, w->program.shape);
}

static ft_status runner_logits(runner *w)
{
    run *r = w->r;
    int64_t shape[2];
    ft_tensor *tokens, *logits;
    shape[0] = r->B;
    shape[1] = r->T;
    FT_TRY(ft_tensor_create(w->ctx, &tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_upload(tokens, r->tokens));
    FT_TRY(ft_llama_logits(w->model, tokens, 0, &logits));
    if (ft_rank(w->ctx) == 0) FT_TRY(ft_download(logits, r->logits));
    ft_tensor_free(logits);
    ft_tensor_free(tokens);
    return FT_OK;
}

static ft_status run_rank(ft_ctx *ctx, void *user)
{
    runner *w = (runner *)ft_host_alloc(ctx, sizeof *w);
    run *r = (run *)user;
    uint64_t hash;
    CHECK(w != NULL);
    w->r = r;
    w->ctx = ctx;
    FT_TRY(runner_create(w));
    if (r->source) FT_TRY(ft_io_llama_load(ctx, w->zero, w->model, r->source));
    FT_TRY(ft_llama_hash(w->model, &hash));
    if (ft_rank(ctx) == 0) r->loaded_hash = hash;
    if (r->logits) FT_TRY(runner_logits(w));
    for (int s = 0; s < r->steps; s++) {
        ft_zero_report report;
        FT_TRY(ft_zero_step_begin(w->zero, 1, r->B / r->l.dp * r->T, &w->scale));
        FT_TRY(ft_pp_run(w->pp, &w->program));
        FT_TRY(ft_zero_step_end(w->zero, r->lr));
        FT_TRY(ft_zero_report_get(w->zero, &report));
        if (ft_rank(ctx) == 0) r->loss[s] = report.loss;
    }
    FT_TRY(ft_llama_hash(w->model, &hash));
    if (ft_rank(ctx) == 0) r->hash = hash;
    return r->target ? ft_io_llama_export(ctx, w->zero, w->model, r->target, &r->options) : FT_OK;
}

static run run_default(const ft_io_model *source)
{
    run r;
    memset(&r, 0, sizeof r);
    r.l.dp = r.l.tp = r.l.pp = 1;
    r.source = source;
    r.options = ft_io_export_default();
    r.lr = 1e-2;
    r.B = 6;
    r.T = T_TEST;
    if (source) {
        assert_ok(ft_io_llama_config(ft_io_model_config(source), "test", r.T, &r.config));
        r.options.like = ft_io_model_config(source);
    }
    return r;
}

static ft_status run_launch(run *r)
{
    ft_config config = ft_config_default();
    config.world = r->l.dp * r->l.tp * r->l.pp;
    return ft_launch(&config, run_rank, r);
}

static ft_io_model *open_model(const char *dir)
{
    ft_io_model *model = NULL;
    assert_ok(ft_io_model_open(dir, &model));
    return model;
}

/* Every tensor of the family is there, and nothing else; values as the source's dtype has them. */
static void assert_same_weights(const char *dir, const family *f, ft_io_dtype source)
{
    listed list[100];
    const int n = list_weights(f, list);
    ft_io_model *model = open_model(dir);
    assert_int_equal(ft_io_model_count(model), n);
    for (int k = 0; k < n; k++) {
        const ft_io_tensor *t = ft_io_model_find(model, list[k].name);
        assert_non_null(t);
        assert_int_equal(t->ndim, list[k].ndim);
        assert_int_equal(t->shape[0], list[k].shape[0]);
        if (t->ndim == 2) assert_int_equal(t->shape[1], list[k].shape[1]);
        for (int64_t i = 0; i < t->elems; i++) {
            float value, wanted = expected_weight(list[k].name, i, source);
            assert_ok(ft_io_read_float(t, i, 1, &value));
            if (memcmp(&value, &wanted, 4) != 0)
                fail_msg("%s[%lld] of %s is %.9g, not %.9g", t->name, (long long)i, f->name,
                         (double)value, (double)wanted);
        }
    }
    ft_io_model_close(model);
}

/* ---------------------------------------------------------------------------------------- tests */

/* Out of a directory, into a model, into another directory: the same tensors under the same names,
   also after a step; the config means the same; the next loss is the same to the bit. */
static void every_family_goes_in_and_out(void **state)
{
    (void)state;
    for (int k = 0; k < FAMILIES; k++) {
        const family *f = &families[k];
        ft_io_model *source = open_model(write_model("source", f, FT_IO_F32));
        run r = run_default(source), again;
        r.target = in_directory("out");
        assert_ok(run_launch(&r));
        assert_same_weights(r.target, f, FT_IO_F32);
        ft_io_hf_config c = *ft_io_model_config(source), d;
        assert_ok(ft_io_hf_config_read(r.target, &d));
        assert_string_equal(d.dtype, "float32");
        memcpy(c.dtype, d.dtype, sizeof c.dtype);
        if (c.init_std == 0) c.init_std = d.init_std;
        assert_memory_equal(&c, &d, sizeof c);
        assert_false(is_there(r.target, "model.safetensors.index.json"));

        r.steps = 2; /* the export replaces its own files */
        assert_ok(run_launch(&r));
        assert_true(r.hash != r.loaded_hash && r.loss[0] != r.loss[1]);
        ft_io_model *trained = open_model(r.target);
        again = run_default(trained);
        again.steps = 1;
        again.lr = 0;
        assert_ok(run_launch(&again));
        assert_true(again.loaded_hash == r.hash);
        r.target = NULL;
        r.steps = 3;
        assert_ok(run_launch(&r));
        if (again.loss[0] != r.loss[2])
            fail_msg("%s: loss %.9g, not %.9g", f->name, again.loss[0], r.loss[2]);
        ft_io_model_close(trained);
        ft_io_model_close(source);
        clean_trees(NULL);
    }
}

/* Any mesh has the weights of one rank, and exports them again; odd vocabularies are padded, tied
   tables are on two stages. */
static void every_mesh_loads_the_same(void **state)
{
    (void)state;
    static const layout layouts[] = {
        {3, 1, 1, 0, 0, 0, FT_F32}, {3, 1, 1, 0, 1, 0, FT_F32}, {3, 1, 1, 0, 2, 0, FT_F32},
        {3, 1, 1, 0, 3, 0, FT_F32}, {2, 1, 1, 0, 3, 1, FT_F32}, {1, 2, 1, 0, 0, 0, FT_F32},
        {1, 2, 1, 1, 3, 0, FT_F32}, {1, 1, 2, 0, 0, 0, FT_F32}, {1, 1, 4, 0, 1, 0, FT_F32},
        {2, 2, 2, 1, 3, 0, FT_F32}, {2, 2, 2, 0, 1, 0, FT_F32}};
    for (int k = 0; k < FAMILIES; k++) {
        const family *f = &families[k];
        ft_io_model *source = open_model(write_model("source", f, FT_IO_F32));
        run one = run_default(source);
        one.steps = 2;
        assert_ok(run_launch(&one));
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            if (k > 1 && (i + (size_t)k) % 4 != 0 && i != 9) continue; /* the rest by turns */
            run r = run_default(source);
            r.l = layouts[i];
            r.steps = 2;
            assert_ok(run_launch(&r));
            if (r.loaded_hash != one.loaded_hash || fabs(r.loss[0] / one.loss[0] - 1) > 1e-6 ||
                fabs(r.loss[1] / one.loss[1] - 1) > 1e-5)
                fail_msg("%s on dp %d tp %d pp %d stage %d: hash %llx, losses %.9g %.9g; one rank "
                         "has %llx, %.9g %.9g", f->name, r.l.dp, r.l.tp, r.l.pp, r.l.stage,
                         (unsigned long long)r.loaded_hash, r.loss[0], r.loss[1],
                         (unsigned long long)one.loaded_hash, one.loss[0], one.loss[1]);
            r.steps = 0;
            r.target = in_directory("out");
            r.options.max_shard_bytes = 60000;
            assert_ok(run_launch(&r));
            assert_same_weights(r.target, f, FT_IO_F32);
            clean_trees(NULL);
            write_model("source", f, FT_IO_F32);
        }
        ft_io_model_close(source);
        clean_trees(NULL);
    }
}

/* bf16 runs: masters have the files' values, parameters are these rounded. */
static void masters_are_exact_in_bf16_too(void **state)
{
    (void)state;
    ft_io_model *source = open_model(write_model("source", &families[2], FT_IO_F32));
    run one = run_default(source), two;
    one.l.dtype = FT_BF16;
    one.steps = 1;
    one.target = in_directory("out");
    one.lr = 0;
    assert_ok(run_launch(&one));
    assert_same_weights(one.target, &families[2], FT_IO_F32);
    two = one;
    two.target = NULL;
    for (int stage = 1; stage < 4; stage++) {
        two.l.dp = 2;
        two.l.stage = stage;
        assert_ok(run_launch(&two));
        assert_true(two.loaded_hash == one.loaded_hash);
        assert_true(fabs(two.loss[0] - one.loss[0]) < 1e-2 * one.loss[0]);
    }
    ft_io_model_close(source);
}

/* Weights are what the 16 or 64 bits say; files may be of any of them. */
static void sources_of_every_float_are_exact(void **state)
{
    (void)state;
    static const ft_io_dtype dtypes[] = {FT_IO_BF16, FT_IO_F16, FT_IO_F64};
    static const layout cut = {1, 2, 2, 0, 0, 0, FT_F32};
    for (int i = 0; i < 3; i++) {
        ft_io_model *source = open_model(write_model("source", &families[1], dtypes[i]));
        run r = run_default(source);
        r.target = in_directory("out");
        assert_ok(run_launch(&r));
        assert_same_weights(r.target, &families[1], dtypes[i]);
        r.l = cut;
        assert_ok(run_launch(&r));
        assert_same_weights(r.target, &families[1], dtypes[i]);
        ft_io_model_close(source);
        clean_trees(NULL);
    }
}

/* All 65536 patterns of both 16-bit formats, from their definitions; NaNs stay NaNs. */
static void every_half_means_what_it_is(void **state)
{
    (void)state;
    static uint16_t all[65536];
    static float values[65536];
    ft_io_tensor t;
    for (int i = 0; i < 65536; i++) all[i] = (uint16_t)i;
    memset(&t, 0, sizeof t);
    t.name = "all";
    t.elems = 65536;
    t.data = all;
    for (int f16 = 0; f16 < 2; f16++) {
        t.dtype = f16 ? FT_IO_F16 : FT_IO_BF16;
        assert_ok(ft_io_read_float(&t, 0, 65536, values));
        for (int i = 0; i < 65536; i++) {
            const double wanted = half_value((uint16_t)i, f16);
            if (isnan(wanted) ? !isnan(values[i])
                              : (double)values[i] != wanted ||
                                    (signbit(values[i]) != 0) != (i >> 15 != 0))
                fail_msg("%s %04x is %g, not %g", ft_io_dtype_name(t.dtype), (unsigned)i,
                         (double)values[i], wanted);
        }
    }
}

/* The nearest of the two neighbours, and of two equally near the one whose last bit is 0. */
static void bf16_exports_are_rounded_to_nearest_even(void **state)
{
    (void)state;
    const family *f = &families[0];
    listed list[100];
    const char *dir = make_dir("source");
    const int n = list_weights(f, list);
    put_text(dir, "config.json", f->config);
    write_weights(dir, "model.safetensors", list, 0, n, FT_IO_F32);
    ft_io_model *source = open_model(dir);
    /* Exactly halfway, above and below: in the file, at the beginning of the embedding. */
    static const uint32_t bits[] = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f817fff, 0xbf808000,
                                    0x00000000, 0x80000000, 0x7f7fffff, 0x00008000, 0x7f800000};
    const ft_io_tensor *table = ft_io_model_find(source, list[0].name);
    size_t bytes;
    char *file = get_text(inside(dir, "model.safetensors"), &bytes);
    const size_t at = (size_t)((const char *)table->data -
                               (const char *)ft_io_model_at(source, 0)->data);
    ft_io_model_close(source);
    (void)at;
    /* The embedding was added first: its data are the first of the file. */
    memcpy(file + 8 + (size_t)(unsigned char)file[0] + 256 * (size_t)(unsigned char)file[1], bits,
           sizeof bits);
    FILE *out = fopen(inside(dir, "model.safetensors"), "wb");
    assert_int_equal(fwrite(file, 1, bytes, out), bytes);
    fclose(out);
    free(file);
    source = open_model(dir);
    run r = run_default(source);
    r.target = in_directory("out");
    r.options.dtype = FT_IO_BF16;
    assert_ok(run_launch(&r));
    ft_io_model *result = open_model(r.target);
    assert_string_equal(ft_io_model_config(result)->dtype, "bfloat16");
    for (int k = 0; k < n; k++) {
        const ft_io_tensor *from = ft_io_model_find(source, list[k].name);
        const ft_io_tensor *to = ft_io_model_find(result, list[k].name);
        assert_int_equal(to->dtype, FT_IO_BF16);
        for (int64_t i = 0; i < from->elems; i++) {
            uint32_t exact;
            uint16_t got, down;
            memcpy(&exact, (const char *)from->data + 4 * i, 4);
            memcpy(&got, (const char *)to->data + 2 * i, 2);
            down = (uint16_t)(exact >> 16);
            float x;
            memcpy(&x, &exact, 4);
            const double a = half_value(down, 0), b = half_value((uint16_t)(down + 1), 0);
            const double da = fabs((double)x - a), db = fabs((double)x - b);
            uint16_t wanted = down;
            if (!isinf(x) && (isinf(b) ? (exact & 0xffff) >= 0x8000
                                       : db < da || (db == da && (down & 1))))
                wanted = (uint16_t)(down + 1);
            if (got != wanted)
                fail_msg("%s[%lld] %08x became %04x, not %04x", list[k].name, (long long)i,
                         (unsigned)exact, (unsigned)got, (unsigned)wanted);
        }
    }
    ft_io_model_close(result);
    ft_io_model_close(source);
}

/* An export in several files: each at most as large as asked (or of one tensor), together each
   tensor once; the index says where, and how many bytes. */
static void shards_are_cut_and_indexed(void **state)
{
    (void)state;
    const family *f = &families[1];
    ft_io_model *source = open_model(write_model("source", f, FT_IO_F32));
    run r = run_default(source);
    r.target = in_directory("out");
    r.options.max_shard_bytes = 20000;
    assert_ok(run_launch(&r));
    assert_false(is_there(r.target, "model.safetensors"));
    size_t n, total = 0, last = 0;
    char *text = get_text(inside(r.target, "model.safetensors.index.json"), &n);
    ft_io_hf_index *index;
    assert_ok(ft_io_hf_index_parse(text, n, "index", &index));
    listed list[100];
    assert_int_equal(ft_io_hf_index_count(index), list_weights(f, list));
    const int N = count_in(r.target) - 3; /* index, config, list */
    assert_in_range(N, 4, 20);
    for (int k = 1; k <= N; k++) {
        char name[64];
        ft_io_safetensors *shard;
        size_t bytes = 0;
        snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", k, N);
        assert_ok(ft_io_safetensors_open(inside(r.target, name), &shard));
        assert_string_equal(ft_io_safetensors_metadata(shard, "format"), "pt");
        for (int64_t i = 0; i < ft_io_safetensors_count(shard); i++)
            bytes += ft_io_safetensors_at(shard, i)->bytes;
        assert_true(bytes <= 20000 || ft_io_safetensors_count(shard) == 1);
        /* The next tensor would not have fit. */
        if (k > 1) assert_true(last + ft_io_safetensors_at(shard, 0)->bytes > 20000);
        last = bytes;
        total += bytes;
        ft_io_safetensors_close(shard);
    }
    char wanted[64];
    snprintf(wanted, sizeof wanted, "\"total_size\": %zu", total);
    assert_non_null(strstr(text, wanted));
    ft_io_hf_index_free(index);
    free(text);
    assert_same_weights(r.target, f, FT_IO_F32);
    ft_io_model_close(source);
}

/* The golden files' models as directories: the logits are transformers', also beyond position 20,
   in what is loaded and in what is exported and loaded. */
static void golden_logits(const char *path)
{
    ft_io_safetensors *file;
    ft_io_safetensors_writer *w;
    assert_ok(ft_io_safetensors_open(path, &file));
    const char *dir = make_dir("golden");
    put_text(dir, "config.json", ft_io_safetensors_metadata(file, "config"));
    assert_ok(ft_io_safetensors_create(inside(dir, "model.safetensors"), &w));
    for (int64_t i = 0; i < ft_io_safetensors_count(file); i++) {
        const ft_io_tensor *t = ft_io_safetensors_at(file, i);
        if (strncmp(t->name, "w/", 2) == 0)
            assert_ok(ft_io_safetensors_add(w, t->name + 2, t->dtype, t->ndim, t->shape, t->data));
    }
    assert_ok(ft_io_safetensors_finish(w));
    const ft_io_tensor *ids = ft_io_safetensors_find(file, "input_ids");
    const ft_io_tensor *logits = ft_io_safetensors_find(file, "logits");
    int32_t *tokens = (int32_t *)calloc((size_t)ids->elems, 4);
    float *theirs = (float *)calloc((size_t)logits->elems, 4);
    float *mine = (float *)calloc((size_t)logits->elems, 4);
    for (int64_t i = 0; i < ids->elems; i++) {
        int64_t id;
        assert_ok(ft_io_read_int(ids, i, 1, &id));
        tokens[i] = (int32_t)id;
    }
    assert_ok(ft_io_read_float(logits, 0, logits->elems, theirs));
    ft_io_model *source = open_model(dir);
    for (int pass = 0; pass < 2; pass++) {
        run r = run_default(source);
        r.logits = mine;
        r.tokens = tokens;
        r.B = ids->shape[0];
        r.T = ids->shape[1];
        r.target = in_directory("out");
        assert_ok(run_launch(&r));
        double difference = 0, norm = 0;
        for (int64_t i = 0; i < logits->elems; i++) {
            const int64_t position = i / logits->shape[2] % logits->shape[1];
            if (position < 20 && logits->shape[1] > 20) continue;
            const double d = (double)mine[i] - (double)theirs[i];
            difference += d * d;
            norm += (double)theirs[i] * (double)theirs[i];
        }
        if (!(sqrt(difference / norm) < 1e-5))
            fail_msg("%s, pass %d: logits differ by %g", path, pass, sqrt(difference / norm));
        ft_io_model_close(source);
        source = open_model(r.target); /* and once more from the export */
    }
    ft_io_model_close(source);
    free(tokens);
    free(theirs);
    free(mine);
    ft_io_safetensors_close(file);
    clean_trees(NULL);
}

static void logits_are_those_of_transformers(void **state)
{
    (void)state;
    static const char *const folders[] = {"tests/golden", "../shared/golden"};
    int found = 0;
    for (int k = 0; k < 2; k++) {
        DIR *dir = opendir(folders[k]);
        if (!dir) continue;
        for (struct dirent *e; (e = readdir(dir)) != NULL;) {
            if (strstr(e->d_name, ".safetensors") == NULL) continue;
            golden_logits(inside(folders[k], e->d_name));
            found++;
        }
        closedir(dir);
    }
    if (found == 0) skip();
}

/* ---- what a directory must not be ---- */

typedef struct damage {
    const char *file, *text; /* written into the directory; NULL text: removed */
    ft_status status;
    const char *where, *reason;
} damage;

#define MAP(entries) "{\"metadata\":{\"total_size\":1},\"weight_map\":{" entries "}}"

static void malformed_indexes_are_refused(void **state)
{
    (void)state;
    static const struct { const char *text; const char *reason; } cases[] = {
        {"", "not JSON"},
        {"{", "not JSON"},
        {"{\"weight_map\":{\"a\":\"b.safetensors\"}} x", "not JSON"},
        {"[]", "not a JSON object"},
        {"7", "not a JSON object"},
        {"{}", "\"weight_map\" is missing"},
        {"{\"metadata\":{}}", "\"weight_map\" is missing"},
        {"{\"weight_map\":null}", "\"weight_map\" is missing"},
        {"{\"weight_map\":[]}", "\"weight_map\" must be an object"},
        {"{\"weight_map\":\"model.safetensors\"}", "\"weight_map\" must be an object"},
        {"{\"weight_map\":{}}", "a tensor or more"},
        {"{\"weight_map\":{\"a\":\"x.safetensors\"},\"weight_map\":{\"b\":\"x.safetensors\"}}",
         "\"weight_map\" is there twice"},
        {MAP("\"a\":1"), "the file of \"a\" must be a string"},
        {MAP("\"a\":null"), "the file of \"a\" must be a string"},
        {MAP("\"a\":[\"x.safetensors\"]"), "the file of \"a\" must be a string"},
        {MAP("\"a\":{}"), "must be a string"},
        {MAP("\"a\":\"\""), "no .safetensors file"},
        {MAP("\"a\":\".safetensors\""), "no .safetensors file"},
        {MAP("\"a\":\"x.bin\""), "\"x.bin\", is no .safetensors file"},
        {MAP("\"a\":\"x.safetensors/\""), "no .safetensors file"},
        {MAP("\"a\":\"/etc/x.safetensors\""), "leaves the directory"},
        {MAP("\"a\":\"../x.safetensors\""), "begins with a dot"},
        {MAP("\"a\":\"./x.safetensors\""), "begins with a dot"},
        {MAP("\"a\":\"sub/x.safetensors\""), "leaves the directory"},
        {MAP("\"a\":\"sub/../../x.safetensors\""), "leaves the directory"},
        {MAP("\"a\":\"sub\\\\x.safetensors\""), "leaves the directory"},
        {MAP("\"a\":\"\\u002e\\u002e/x.safetensors\""), "begins with a dot"},
        {MAP("\"a\":\"x\\n.safetensors\""), "control character"},
        {MAP("\"a\":\"x.safetensors\",\"b\":\"x.safetensors\",\"a\":\"y.safetensors\""),
         "has \"a\" twice"},
        {MAP("\"a\":\"x.safetensors\",\"\\u0061\":\"x.safetensors\""), "has \"a\" twice"},
        {MAP("\"model.embed_tokens.weight\":\"absent.safetensors\""), "absent.safetensors"},
        {MAP("\"nothing\":\"x.safetensors\""), "which does not have it"},
    };
    listed list[100];
    const family *f = &families[0];
    const char *dir = make_dir("m");
    put_text(dir, "config.json", f->config);
    write_weights(dir, "x.safetensors", list, 0, list_weights(f, list), FT_IO_F32);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ft_io_model *model;
        ft_io_hf_index *index = NULL;
        put_text(dir, "model.safetensors.index.json", cases[i].text);
        const ft_status status = ft_io_model_open(dir, &model);
        assert_error(status, strstr(cases[i].reason, "absent") ? FT_ERR_IO : FT_ERR_DATA, dir,
                     cases[i].reason);
        assert_null(model);
        if (i + 2 >= sizeof cases / sizeof *cases) continue; /* well formed, but wrong here */
        char *exact = (char *)malloc(strlen(cases[i].text)); /* its end is the end of memory */
        memcpy(exact, cases[i].text, strlen(cases[i].text));
        assert_int_equal(ft_io_hf_index_parse(exact, strlen(cases[i].text), "x", &index),
                         FT_ERR_DATA);
        free(exact);
        assert_null(index);
    }
    ft_io_hf_index *index;
    assert_error(ft_io_hf_index_parse("{}\0{}", 5, "x", &index), FT_ERR_DATA, "x", "is zero");
    char *huge = (char *)calloc(1, (16 << 20) + 1);
    memset(huge, ' ', (16 << 20) + 1);
    assert_error(ft_io_hf_index_parse(huge, (16 << 20) + 1, "x", &index), FT_ERR_DATA, "x",
                 "more than the 16777216");
    /* Nested deeper than any stack: refused, not followed. */
    memset(huge, '[', 1 << 20);
    memcpy(huge, "{\"a\":", 5);
    assert_error(ft_io_hf_index_parse(huge, 1 << 20, "x", &index), FT_ERR_DATA, "x", "not JSON");
    free(huge);
    char *name = (char *)malloc(400);
    snprintf(name, 400, MAP("\"a\":\"%0*d.safetensors\""), 250, 1);
    assert_error(ft_io_hf_index_parse(name, strlen(name), "x", &index), FT_ERR_DATA, "x",
                 "longer than 255");
    free(name);
    assert_error(ft_io_hf_index_parse(NULL, 0, "x", &index), FT_ERR_ARG, "index_parse", "NULL");
    assert_int_equal(ft_io_hf_index_count(NULL), 0);
    ft_io_hf_index_free(NULL);
}

/* The weights of a family but for one that `change` makes other. */
typedef enum kind { DROP, RENAME, RESHAPE, FLATTEN, RETYPE, ADD, ADD_TYPED } kind;

typedef struct change {
    kind what;
    const char *name, *other;
    ft_io_dtype dtype;
    ft_status status;
    const char *reason;
} change;

static void write_changed(const char *dir, const family *f, const change *c)
{
    listed list[101];
    int n = list_weights(f, list);
    ft_io_safetensors_writer *w;
    static char zeros[1 << 18];
    if (c->what == ADD || c->what == ADD_TYPED)
        n = list_add(list, n, 1, "", c->name, f->V, f->C);
    assert_ok(ft_io_safetensors_create(inside(dir, "model.safetensors"), &w));
    for (int i = 0; i < n; i++) {
        const int hit = strcmp(list[i].name, c->name) == 0;
        ft_io_dtype dtype = FT_IO_F32;
        if (hit && c->what == DROP) continue;
        if (hit && c->what == RENAME) snprintf(list[i].name, sizeof list[i].name, "%s", c->other);
        if (hit && c->what == RESHAPE) list[i].shape[0]++;
        if (hit && c->what == FLATTEN) {
            list[i].ndim = 1;
            list[i].shape[0] *= list[i].shape[1];
            list[i].shape[1] = 1;
        }
        if (hit && (c->what == RETYPE || c->what == ADD_TYPED)) dtype = c->dtype;
        assert_true(list[i].shape[0] * list[i].shape[1] * 8 <= (int64_t)sizeof zeros);
        assert_ok(ft_io_safetensors_add(w, list[i].name, dtype, list[i].ndim, list[i].shape,
                                        zeros));
    }
    assert_ok(ft_io_safetensors_finish(w));
}

static void other_weights_are_refused_by_name(void **state)
{
    (void)state;
    static const change cases[] = {
        {DROP, "model.embed_tokens.weight", 0, FT_IO_F32, FT_ERR_DATA,
         "\"model.embed_tokens.weight\" is missing"},
        {DROP, "model.layers.3.mlp.down_proj.weight", 0, FT_IO_F32, FT_ERR_DATA,
         "\"model.layers.3.mlp.down_proj.weight\" is missing"},
        {DROP, "model.norm.weight", 0, FT_IO_F32, FT_ERR_DATA, "\"model.norm.weight\" is missing"},
        {DROP, "lm_head.weight", 0, FT_IO_F32, FT_ERR_DATA,
         "\"lm_head.weight\" is missing, and"},
        {RENAME, "model.norm.weight", "norm.weight", FT_IO_F32, FT_ERR_DATA,
         "\"model.norm.weight\" is missing"},
        {RESHAPE, "model.layers.0.self_attn.q_proj.weight", 0, FT_IO_F32, FT_ERR_DATA,
         "\"model.layers.0.self_attn.q_proj.weight\" is [33,32]; "},
        {RESHAPE, "model.norm.weight", 0, FT_IO_F32, FT_ERR_DATA, "says [32]"},
        {FLATTEN, "model.layers.1.mlp.up_proj.weight", 0, FT_IO_F32, FT_ERR_DATA,
         "is [1536]; "},
        {FLATTEN, "lm_head.weight", 0, FT_IO_F32, FT_ERR_DATA, "says [97,32]"},
        {RETYPE, "model.layers.2.mlp.gate_proj.weight", 0, FT_IO_I8, FT_ERR_UNSUPPORTED,
         "\"model.layers.2.mlp.gate_proj.weight\" is I8; quantized"},
        {RETYPE, "model.embed_tokens.weight", 0, FT_IO_F8_E4M3, FT_ERR_UNSUPPORTED,
         "F8_E4M3; quantized"},
        {ADD, "model.layers.4.input_layernorm.weight", 0, FT_IO_F32, FT_ERR_UNSUPPORTED,
         "\"model.layers.4.input_layernorm.weight\" is none of the model's"},
        {ADD, "model.layers.0.self_attn.q_proj.bias", 0, FT_IO_F32, FT_ERR_UNSUPPORTED,
         "q_proj.bias\" is none"},
        {ADD, "model.layers.0.self_attn.q_norm.weight", 0, FT_IO_F32, FT_ERR_UNSUPPORTED,
         "q_norm.weight\" is none"},
        {ADD, "model.layers.0.mlp.experts.0.w1.weight", 0, FT_IO_F32, FT_ERR_UNSUPPORTED,
         "experts.0.w1.weight\" is none"},
        {ADD_TYPED, "model.layers.0.mlp.up_proj.qweight", 0, FT_IO_I32, FT_ERR_UNSUPPORTED,
         "up_proj.qweight\" is none"},
        {ADD, "inv_freq", 0, FT_IO_F32, FT_ERR_UNSUPPORTED, "\"inv_freq\" is none"},
    };
    const char *dir = make_dir("m");
    ft_io_model *model;
    put_text(dir, "config.json", families[0].config);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_changed(dir, &families[0], &cases[i]);
        assert_error(ft_io_model_open(dir, &model), cases[i].status, dir, cases[i].reason);
        assert_null(model);
    }
    /* Known to be of no use: ignored. */
    static const change old = {ADD, "model.layers.0.self_attn.rotary_emb.inv_freq", 0, FT_IO_F32,
                               FT_OK, ""};
    write_changed(dir, &families[0], &old);
    model = open_model(dir);
    assert_null(ft_io_model_find(model, old.name));
    assert_int_equal(ft_io_model_count(model), 4 * 9 + 3);
    ft_io_model_close(model);
}

/* A tied head may be in the file, if it is the table; it is never written. */
static void tied_heads_are_one_table(void **state)
{
    (void)state;
    const family *f = &families[2];
    listed list[101], head;
    const char *dir = make_dir("m");
    const int n = list_weights(f, list);
    put_text(dir, "config.json", f->config);
    for (int pass = 0; pass < 3; pass++) { /* equal; equal, in other bits; not equal */
        ft_io_safetensors_writer *w;
        void *bytes[100];
        const ft_io_dtype other = pass == 1 ? FT_IO_F64 : FT_IO_F32;
        assert_ok(ft_io_safetensors_create(inside(dir, "model.safetensors"), &w));
        for (int i = 0; i < n; i++) {
            bytes[i] = weight_bytes(&list[i], FT_IO_F32);
            assert_ok(ft_io_safetensors_add(w, list[i].name, FT_IO_F32, list[i].ndim, list[i].shape,
                                            bytes[i]));
        }
        head = list[0];
        bytes[n] = weight_bytes(&head, other);
        if (pass == 2) ((float *)bytes[n])[f->V * f->C - 1] += 1;
        assert_ok(ft_io_safetensors_add(w, "lm_head.weight", other, 2, head.shape, bytes[n]));
        assert_ok(ft_io_safetensors_finish(w));
        for (int i = 0; i <= n; i++) free(bytes[i]);
        ft_io_model *model;
        if (pass == 2) {
            assert_error(ft_io_model_open(dir, &model), FT_ERR_DATA, dir, "is not the embedding");
            continue;
        }
        model = open_model(dir);
        assert_null(ft_io_model_find(model, "lm_head.weight"));
        run r = run_default(model);
        r.target = in_directory("out");
        r.l.pp = 2; /* on two stages: still once in the file */
        assert_ok(run_launch(&r));
        assert_same_weights(r.target, f, FT_IO_F32);
        ft_io_model_close(model);
    }
}

static void other_directories_are_refused(void **state)
{
    (void)state;
    const family *f = &families[0];
    listed list[100];
    const int n = list_weights(f, list);
    ft_io_model *model;
    ft_io_hf_config config;
    assert_error(ft_io_model_open(in_directory("absent"), &model), FT_ERR_IO, "absent",
                 "no directory");
    const char *dir = make_dir("m");
    assert_error(ft_io_model_open(dir, &model), FT_ERR_IO, "config.json", "cannot open");
    assert_error(ft_io_model_open(NULL, &model), FT_ERR_ARG, "directory", "NULL");
    put_text(dir, "config.json", "");
    assert_error(ft_io_model_open(dir, &model), FT_ERR_DATA, "config.json", "not JSON");
    put_text(dir, "config.json", "{\"model_type\":\"mixtral\"}");
    assert_error(ft_io_model_open(dir, &model), FT_ERR_UNSUPPORTED, "config.json", "mixtral");
    put_text(dir, "config.json", f->config);
    assert_error(ft_io_model_open(dir, &model), FT_ERR_IO, dir, "neither model.safetensors nor");
    assert_error(ft_io_model_open(inside(dir, "config.json"), &model), FT_ERR_IO, "config.json",
                 "no directory");
    put_text(dir, "model.safetensors", "short");
    assert_error(ft_io_model_open(dir, &model), FT_ERR_DATA, "model.safetensors", "shorter");
    write_weights(dir, "model.safetensors", list, 0, n, FT_IO_F32);
    struct stat info;
    assert_int_equal(stat(inside(dir, "model.safetensors"), &info), 0);
    assert_int_equal(truncate(inside(dir, "model.safetensors"), info.st_size - 1), 0);
    assert_error(ft_io_model_open(dir, &model), FT_ERR_DATA, "model.safetensors", "cut short");

    /* In two files: the whole is the model; a tensor in both, or not where the index says, is not;
       links are followed, as a hub's cache has them. */
    unlink(inside(dir, "model.safetensors"));
    char index[8000];
    int at = snprintf(index, sizeof index, "{\"weight_map\":{");
    for (int i = 0; i < n; i++)
        at += snprintf(index + at, sizeof index - (size_t)at, "%s\"%s\":\"%s.safetensors\"",
                       i ? "," : "", list[i].name, i < 10 ? "a" : "b");
    snprintf(index + at, sizeof index - (size_t)at, "}}");
    put_text(dir, "model.safetensors.index.json", index);
    write_weights(make_dir("blobs"), "a.safetensors", list, 0, 10, FT_IO_F32);
    assert_int_equal(symlink("../blobs/a.safetensors", inside(dir, "a.safetensors")), 0);
    write_weights(dir, "b.safetensors", list, 10, n, FT_IO_BF16);
    model = open_model(dir);
    assert_int_equal(ft_io_model_count(model), n);
    assert_int_equal(ft_io_model_find(model, list[9].name)->dtype, FT_IO_F32);
    assert_int_equal(ft_io_model_find(model, list[10].name)->dtype, FT_IO_BF16);
    assert_string_equal(ft_io_model_directory(model), dir);
    ft_io_model_close(model);
    write_weights(dir, "b.safetensors", list, 9, n, FT_IO_F32);
    assert_error(ft_io_model_open(dir, &model), FT_ERR_DATA, ".safetensors", "is also in");
    write_weights(dir, "b.safetensors", list, 11, n, FT_IO_F32);
    assert_error(ft_io_model_open(dir, &model), FT_ERR_DATA, list[10].name,
                 "in b.safetensors, which does not have it");
    assert_error(ft_io_hf_config_read(in_directory("absent"), &config), FT_ERR_IO, "absent",
                 "cannot open");
    ft_io_model_close(NULL);
    assert_null(ft_io_model_config(NULL));
    assert_null(ft_io_model_directory(NULL));
    assert_null(ft_io_model_at(NULL, 0));
    assert_int_equal(ft_io_model_count(NULL), 0);
}

/* A model of another shape than the source; a window shorter than the sequences. */
static void contradicting_models_are_refused(void **state)
{
    (void)state;
    ft_io_model *source = open_model(write_model("source", &families[0], FT_IO_F32));
    run r = run_default(source);
    r.config.intermediate = 64;
    assert_error(run_launch(&r), FT_ERR_DATA, "gate_proj.weight", "is [48,32], the model's is "
                                                                  "[64,32]");
    r = run_default(source);
    r.config.layers = 3;
    assert_error(run_launch(&r), FT_ERR_DATA, "model.layers.3.", "is none of the model's");
    r.config.layers = 5;
    assert_error(run_launch(&r), FT_ERR_DATA, "model.layers.4.", "which the model has");
    r = run_default(source);
    r.config.qkv_bias = 1;
    assert_error(run_launch(&r), FT_ERR_DATA, "q_proj.bias", "which the model has");
    ft_io_hf_config c = ft_io_hf_config_default();
    c.sliding_window = 8;
    assert_error(ft_io_llama_config(&c, "some/config.json", 9, &r.config), FT_ERR_UNSUPPORTED,
                 "some/config.json", "sliding_window");
    /* A file that is cut short after it was opened is an error, not a signal. */
    r = run_default(source);
    assert_int_equal(truncate(in_directory("source/model.safetensors"), 5000), 0);
    assert_error(run_launch(&r), FT_ERR_IO, "model.safetensors", "has become shorter");
    ft_io_model_close(source);
}

/* ---- configs ---- */

static void a_config_comes_back_from_its_text(void **state)
{
    (void)state;
    const char *path = in_directory("config.json");
    for (int k = 0; k < FAMILIES; k++) {
        ft_io_hf_config a, b;
        assert_ok(ft_io_hf_config_parse(families[k].config, "x", &a));
        a.norm_eps = 1.1e-5 / 3; /* 17 digits */
        a.init_std = 0.1;
        assert_ok(ft_io_hf_config_write(&a, path));
        assert_ok(ft_io_hf_config_read(path, &b));
        assert_memory_equal(&a, &b, sizeof a);
    }
    size_t n;
    char *text;
    ft_io_hf_config c;
    assert_ok(ft_io_hf_config_parse(families[1].config, "x", &c));
    assert_ok(ft_io_hf_config_write(&c, path));
    text = get_text(path, &n);
    /* Spellings that both old and new transformers read; floats are floats in Python. */
    assert_non_null(strstr(text, "\"architectures\": [\"LlamaForCausalLM\"]"));
    assert_non_null(strstr(text, "\"rope_theta\": 5e+05"));
    assert_non_null(strstr(text, "\"factor\": 8.0,"));
    assert_non_null(strstr(text, "\"rms_norm_eps\": 1e-05"));
    assert_non_null(strstr(text, "\"eos_token_id\": [2,3]"));
    free(text);
}

static void configs_that_nobody_reads_are_not_written(void **state)
{
    (void)state;
    const char *path = in_directory("config.json");
    ft_io_hf_config good, c;
    assert_ok(ft_io_hf_config_parse(families[0].config, "x", &good));
#define BAD(change, status, reason)                                                                \
    do {                                                                                           \
        c = good;                                                                                  \
        change;                                                                                    \
        assert_error(ft_io_hf_config_write(&c, path), status, path, reason);                       \
    } while (0)
    BAD(c.vocab = 0, FT_ERR_ARG, "sizes of 1 and more");
    BAD(c.norm_eps = 0, FT_ERR_ARG, "sizes of 1 and more");
    BAD(c.n_eos = 9, FT_ERR_ARG, "9 ends");
    BAD(strcpy(c.model_type, "gpt2"), FT_ERR_UNSUPPORTED, "gpt2");
    BAD(c.qk_norm = 1, FT_ERR_UNSUPPORTED, "norms of query and key heads");
    BAD(c.qkv_bias = 1, FT_ERR_UNSUPPORTED, "go with one on o");
    BAD(c.heads = 3, FT_ERR_UNSUPPORTED, "no multiple of its heads");
    BAD(c.sliding_window = 8, FT_ERR_UNSUPPORTED, "llama has no sliding window");
    BAD(strcpy(c.model_type, "qwen2"), FT_ERR_UNSUPPORTED, "qwen2 has biases");
    BAD((strcpy(c.model_type, "qwen2"), c.qkv_bias = c.o_bias = 1), FT_ERR_UNSUPPORTED,
        "no bias on o");
    BAD(strcpy(c.model_type, "qwen3"), FT_ERR_UNSUPPORTED, "are not off");
    BAD((strcpy(c.model_type, "qwen3"), c.qk_norm = c.mlp_bias = 1), FT_ERR_UNSUPPORTED,
        "feed-forward");
    BAD((strcpy(c.model_type, "mistral"), c.qkv_bias = c.o_bias = 1), FT_ERR_UNSUPPORTED,
        "mistral has no biases");
    BAD((strcpy(c.model_type, "mistral"), c.sliding_window = 8, c.full_layers = 1),
        FT_ERR_UNSUPPORTED, "of all layers");
#undef BAD
    assert_false(is_there(temp_directory, "config.json"));
    assert_error(ft_io_hf_config_write(NULL, path), FT_ERR_ARG, "config", "NULL");
    assert_error(ft_io_hf_config_write(&good, in_directory("no/where")), FT_ERR_IO, "no/where",
                 "cannot create");

    /* Without a family to follow, the first that can say it. */
    ft_llama_config m = ft_llama_config_default();
    assert_ok(ft_llama_check(&m));
    assert_ok(ft_io_llama_hf_config(&m, NULL, &c));
    assert_string_equal(c.model_type, "llama");
    m.qkv_bias = 1;
    assert_ok(ft_io_llama_hf_config(&m, NULL, &c));
    assert_string_equal(c.model_type, "qwen2");
    m.qkv_bias = 0;
    m.qk_norm = 1;
    assert_ok(ft_io_llama_hf_config(&m, NULL, &c));
    assert_string_equal(c.model_type, "qwen3");
    m.qkv_bias = 1;
    assert_error(ft_io_llama_hf_config(&m, NULL, &c), FT_ERR_UNSUPPORTED, "the model", "on o");
    m.heads = 0;
    assert_error(ft_io_llama_hf_config(&m, NULL, &c), FT_ERR_ARG, "heads", "0");
}

/* ---- where exports go ---- */

static void exports_replace_their_own_files_alone(void **state)
{
    (void)state;
    ft_io_model *source = open_model(write_model("source", &families[0], FT_IO_F32));
    const char *from = in_directory("source");
    put_text(from, "tokenizer.json", "{\"tokens\": []}");
    put_text(from, "generation_config.json", "{}");
    put_text(from, "README.md", "not ours");
    run r = run_default(source);
    char target[400];
    snprintf(target, sizeof target, "%s/", in_directory("out"));
    r.target = target;
    r.options.copy_from = from;
    r.options.max_shard_bytes = 20000;
    assert_ok(ft_io_export_check(target));
    assert_ok(run_launch(&r));
    size_t n;
    char *text = get_text(inside(target, "tokenizer.json"), &n);
    assert_string_equal(text, "{\"tokens\": []}");
    free(text);
    assert_true(is_there(target, "generation_config.json") && !is_there(target, "README.md"));
    assert_false(is_there(target, "model.safetensors"));
    assert_true(is_there(target, "model.safetensors.index.json"));
    /* Again, as one file: what is no longer written is gone, and nothing is left beside it. */
    r.options.max_shard_bytes = 0;
    r.options.copy_from = NULL;
    assert_ok(ft_io_export_check(target));
    assert_ok(run_launch(&r));
    assert_int_equal(count_in(target), 3);
    assert_int_equal(count_in(temp_directory), 2);
    /* Somebody's file is in it: refused before and after training, nothing is touched. */
    put_text(target, "notes.txt", "mine");
    assert_error(ft_io_export_check(target), FT_ERR_IO, "notes.txt", "no export wrote");
    assert_error(run_launch(&r), FT_ERR_IO, "notes.txt", "no export wrote");
    assert_int_equal(count_in(target), 4);
    assert_int_equal(count_in(temp_directory), 2);
    assert_error(ft_io_export_check(from), FT_ERR_IO, from, "is no earlier export");
    unlink(inside(target, "notes.txt"));
    put_text(target, "femtotron_export.txt", "something else\nmodel.safetensors\n");
    assert_error(ft_io_export_check(target), FT_ERR_IO, "out", "is no earlier export");
    /* An empty directory is taken; a file, or a place that is not there, is not. */
    r.target = make_dir("empty");
    assert_ok(run_launch(&r));
    assert_same_weights(r.target, &families[0], FT_IO_F32);
    assert_error(ft_io_export_check(inside(r.target, "config.json")), FT_ERR_IO, "config.json",
                 "is a file");
    r.target = in_directory("no/where");
    assert_error(run_launch(&r), FT_ERR_IO, "no/where", "cannot create a directory");
    assert_error(ft_io_export_check(""), FT_ERR_ARG, "export", "name");
    ft_io_model_close(source);
}

/* A disk that is full at any call: an error of one line, the earlier export whole, nothing beside
   it. (The first rename may fail: that is how a directory with files in it shows.) */
static void a_failed_export_leaves_the_old_one(void **state)
{
    (void)state;
    ft_io_model *source = open_model(write_model("source", &families[0], FT_IO_F32));
    put_text(in_directory("source"), "tokenizer.json", "{}");
    run r = run_default(source);
    int failures = 0, k;
    r.target = in_directory("out");
    r.options.max_shard_bytes = 60000;
    r.options.copy_from = in_directory("source");
    assert_ok(run_launch(&r));
    const int files = count_in(r.target);
    for (k = 0; k < 400; k++) {
        faults_at = k;
        fault_calls = 0;
        const ft_status status = run_launch(&r);
        faults_at = -1;
        if (status != FT_OK) {
            assert_error(status, FT_ERR_IO, "out", "No space left");
            failures++;
        }
        assert_int_equal(count_in(temp_directory), 2);
        assert_int_equal(count_in(r.target), files);
        if (k % 8 == 0 || k > fault_calls - 4)
            assert_same_weights(r.target, &families[0], FT_IO_F32);
        if (fault_calls <= k) break;
    }
    assert_in_range(failures, 20, 390);
    assert_in_range(k - failures, 0, 2);
    /* The same where nothing was. */
    r.target = in_directory("new");
    faults_at = 5;
    fault_calls = 0;
    assert_error(run_launch(&r), FT_ERR_IO, "new", "No space left");
    faults_at = -1;
    assert_false(is_there(temp_directory, "new"));
    assert_int_equal(count_in(temp_directory), 2);
    ft_io_model_close(source);
}

/* In a process of its own, number *pid, which call number k kills; false if it ends before. */
static int killed_export(run *r, int k, pid_t *pid)
{
    int ended;
    fflush(stdout);
    *pid = fork();
    if (*pid == 0) {
        faults_at = k;
        fault_kills = 1;
        fault_calls = 0;
        _exit(run_launch(r) == FT_OK ? 0 : 1);
    }
    assert_int_equal(waitpid(*pid, &ended, 0), *pid);
    assert_true(WIFSIGNALED(ended) || (WIFEXITED(ended) && WEXITSTATUS(ended) == 0));
    return WIFSIGNALED(ended) != 0;
}

/* An export that dies at any call: the next one to the same place leaves itself alone. Between the
   two renames nothing has the name: then what is whole stays until the next one has it. */
static void exports_remove_what_killed_ones_left(void **state)
{
    (void)state;
    ft_io_model *source = open_model(write_model("source", &families[0], FT_IO_F32));
    run r = run_default(source);
    int k, left = 0, nameless = 0;
    char name[64], target[320];
    pid_t pid = 0;
    snprintf(target, sizeof target, "%s", in_directory("out"));
    r.target = target;
    r.options.max_shard_bytes = 60000;
    assert_ok(run_launch(&r));
    const int files = count_in(r.target);
    for (k = 0; k < 400 && killed_export(&r, k, &pid); k++) {
        const int there = count_in(temp_directory);
        left += there > 2;
        if (!is_there(temp_directory, "out")) {
            nameless++;
            assert_int_equal(there, 3); /* the source, the old one, the new one */
            faults_at = 8;
            fault_calls = 0;
            assert_error(run_launch(&r), FT_ERR_IO, "out", "No space left");
            faults_at = -1;
            assert_int_equal(count_in(temp_directory), 3);
        }
        assert_ok(run_launch(&r));
        assert_int_equal(count_in(temp_directory), 2);
        assert_int_equal(count_in(r.target), files);
    }
    assert_in_range(k, 20, 390);
    assert_in_range(left, 20, k);
    assert_true(nameless > 0);
    /* A process that lives keeps its own; another host's, and a link, stay; and so does a file that
       somebody has put into what an export left. */
    snprintf(name, sizeof name, "out.tmp-%08x-%d-0", (unsigned)ft__io_host(), (int)getppid());
    put_text(make_dir(name), "model.safetensors", "x");
    snprintf(name, sizeof name, "out.tmp-%08x-%d-0", (unsigned)ft__io_host() ^ 1u, (int)pid);
    put_text(make_dir(name), "model.safetensors", "x");
    snprintf(name, sizeof name, "out.tmp-%08x-%d-0", (unsigned)ft__io_host(), (int)pid);
    assert_int_equal(symlink("source", in_directory(name)), 0);
    snprintf(name, sizeof name, "out.old-%08x-%d-0", (unsigned)ft__io_host(), (int)pid);
    put_text(make_dir(name), "notes.txt", "mine");
    put_text(in_directory(name), "femtotron_export.txt",
             "The files of an export, which another one may replace:\nmodel.safetensors\n");
    put_text(in_directory(name), "model.safetensors", "x");
    assert_ok(run_launch(&r));
    assert_int_equal(count_in(temp_directory), 6);
    assert_true(is_there(in_directory(name), "notes.txt"));
    assert_false(is_there(in_directory(name), "model.safetensors"));
    assert_true(is_there(in_directory("source"), "config.json"));
    ft_io_model_close(source);
}

static void wrong_exports_are_refused(void **state)
{
    (void)state;
    ft_io_model *source = open_model(write_model("source", &families[3], FT_IO_F32));
    run r = run_default(source);
    r.target = in_directory("out");
    r.options.dtype = FT_IO_F16;
    assert_error(run_launch(&r), FT_ERR_ARG, "F16", "F32 or BF16");
    r.options = ft_io_export_default();
    r.options.max_shard_bytes = -1;
    assert_error(run_launch(&r), FT_ERR_ARG, "-1 bytes", "or more");
    r.options = ft_io_export_default();
    ft_io_hf_config like;
    assert_ok(ft_io_hf_config_parse(families[4].config, "x", &like));
    r.options.like = &like; /* mistral has no biases */
    assert_error(run_launch(&r), FT_ERR_UNSUPPORTED, "mistral", "no biases");
    assert_false(is_there(temp_directory, "out"));
    ft_io_model_close(source);
}

/* ---- memory ---- */

#ifdef __linux__
static long status_kib(const char *key)
{
    char line[200];
    long kib = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0) kib = strtol(line + strlen(key), NULL, 10);
    if (f) fclose(f);
    return kib;
}

typedef struct measured { const ft_io_model *source; ft_llama_config config; long before, after;
                          long mapped; } measured;

static ft_status measure_rank(ft_ctx *ctx, void *user)
{
    measured *m = (measured *)user;
    ft_zero_config config = ft_zero_config_default();
    ft_mesh mesh;
    ft_zero *zero;
    ft_llama *model;
    FT_TRY(ft_mesh_create(ctx, 1, 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &config, &mesh, &zero));
    FT_TRY(ft_llama_create(ctx, zero, &m->config, 8, 1, &model));
    m->before = status_kib("VmRSS:"); /* with all of the model's buffers */
    FT_TRY(ft_io_llama_load(ctx, zero, model, m->source));
    m->after = status_kib("VmHWM:");
    m->mapped = status_kib("RssFile:");
    return FT_OK;
}

/* In a process of its own, whose peak is not that of other tests. */
static int measure(const char *dir, measured *m, long kib_of_largest)
{
    ft_config config = ft_config_default();
    ft_io_model *source = NULL;
    long mapped_before = status_kib("RssFile:");
    if (ft_io_model_open(dir, &source) != FT_OK) return 2;
    m->source = source;
    if (ft_io_llama_config(ft_io_model_config(source), "x", 8, &m->config) != FT_OK) return 3;
    config.world = 1;
    if (ft_launch(&config, measure_rank, m) != FT_OK) return 4;
    printf("loading took %ld KiB beyond the model's own %ld, the largest tensor has %ld KiB\n",
           m->after - m->before, m->before, kib_of_largest);
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    return 77; /* shadow memory is counted too */
#endif
    if (m->before < 0) return 77;
    if (m->mapped >= 0 && m->mapped - mapped_before > kib_of_largest / 4) return 5;
    return m->after - m->before > 2 * kib_of_largest || m->after - m->before > 8192 ? 6 : 0;
}
#endif

/* A model of 80 MB: loading takes pieces, not tensors, and leaves no pages of the file behind. */
static void loading_takes_little_memory(void **state)
{
    (void)state;
#ifdef __linux__
    static const family big = {
        "big", "{\"model_type\":\"llama\"," SIZES(40000, 128, 2, 4, 2, 4096)
               ",\"tie_word_embeddings\":true}",
        40000, 128, 2, 4, 2, 32, 4096, 1, 0, 0, 0, 0};
    listed list[101];
    measured m;
    const int n = list_weights(&big, list);
    static char zeros[40000 * 128 * 4];
    ft_io_safetensors_writer *w;
    const char *dir = make_dir("big");
    put_text(dir, "config.json", big.config);
    assert_ok(ft_io_safetensors_create(inside(dir, "model.safetensors"), &w));
    for (int i = 0; i < n; i++)
        assert_ok(ft_io_safetensors_add(w, list[i].name, i % 2 ? FT_IO_F32 : FT_IO_BF16,
                                        list[i].ndim, list[i].shape, zeros));
    assert_ok(ft_io_safetensors_add(w, "lm_head.weight", FT_IO_F32, 2, list[0].shape, zeros));
    assert_ok(ft_io_safetensors_finish(w));
    memset(&m, 0, sizeof m);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        const int status = measure(dir, &m, 40000L * 128 * 4 / 1024);
        fflush(stdout);
        _exit(status);
    }
    int status = 0;
    assert_true(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) skip();
    assert_int_equal(WEXITSTATUS(status), 0);
#else
    skip();
#endif
}

/* Without memory, at each allocation in turn: an error of one line, and nothing is lost. */
static void runs_out_of_memory_in_good_order(void **state)
{
    (void)state;
    listed list[100];
    const family *f = &families[0];
    const char *dir = make_dir("m");
    const int n = list_weights(f, list);
    put_text(dir, "config.json", f->config);
    char index[8000];
    int at = snprintf(index, sizeof index, "{\"weight_map\":{");
    for (int i = 0; i < n; i++)
        at += snprintf(index + at, sizeof index - (size_t)at, "%s\"%s\":\"%s.safetensors\"",
                       i ? "," : "", list[i].name, i < 10 ? "a" : "b");
    snprintf(index + at, sizeof index - (size_t)at, "}}");
    put_text(dir, "model.safetensors.index.json", index);
    write_weights(dir, "a.safetensors", list, 0, 10, FT_IO_F32);
    write_weights(dir, "b.safetensors", list, 10, n, FT_IO_F32);
    int failures = 0;
    for (int k = 0; k < 1000; k++) {
        ft_io_model *model;
        allocations_left = k;
        const ft_status status = ft_io_model_open(dir, &model);
        allocations_left = -1;
        if (status == FT_OK) {
            ft_io_model_close(model);
            break;
        }
        assert_error(status, FT_ERR_OOM, "m", "no memory");
        failures++;
    }
    assert_in_range(failures, 10, 900);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, NULL, clean_trees)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(loading_takes_little_memory),
        TEST(every_family_goes_in_and_out),
        TEST(every_mesh_loads_the_same),
        TEST(masters_are_exact_in_bf16_too),
        TEST(sources_of_every_float_are_exact),
        TEST(every_half_means_what_it_is),
        TEST(bf16_exports_are_rounded_to_nearest_even),
        TEST(shards_are_cut_and_indexed),
        TEST(logits_are_those_of_transformers),
        TEST(malformed_indexes_are_refused),
        TEST(other_weights_are_refused_by_name),
        TEST(tied_heads_are_one_table),
        TEST(other_directories_are_refused),
        TEST(contradicting_models_are_refused),
        TEST(a_config_comes_back_from_its_text),
        TEST(configs_that_nobody_reads_are_not_written),
        TEST(exports_replace_their_own_files_alone),
        TEST(a_failed_export_leaves_the_old_one),
        TEST(exports_remove_what_killed_ones_left),
        TEST(wrong_exports_are_refused),
        TEST(runs_out_of_memory_in_good_order),
    };
    (void)clean_directory; /* of temp_files.h, for flat files */
    (void)write_file;
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}

#else

static void models_need_a_parser(void **state)
{
    (void)state;
    print_message("models need cJSON (-DFT_CJSON, -lcjson): not checked\n");
    skip();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(models_need_a_parser)};
    (void)faults_at;
    (void)make_directory;
    (void)clean_directory;
    (void)remove_directory;
    (void)write_file;
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
