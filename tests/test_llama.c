/* femtotron_llama.h: configs and what is refused, parameter names and totals, initialisation, hash,
   logits and gradients against a float64 model written here, causality, the life of activations.

   The float64 model follows the published definition (Touvron et al. 2023; rotary pairs are (i, i +
   D/2), as Hugging Face has them) one head and one position at a time, on unpacked weights under
   their Hugging Face names. It shares no code with the header. */

#ifndef FT_TEST_LINKED /* make compiles the implementation once for many tests */
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_llama.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* Ranks are threads, from which cmocka's assertions cannot jump: there, failures are statuses. */
#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return ft_error(FT_ERR_STATE, "line %d does not hold: %s", __LINE__, #condition);      \
    } while (0)

/* ---- running a model ---- */

typedef struct bench bench;
typedef ft_status (*bench_fn)(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b);

struct bench {
    int world, stage;
    ft_dtype dtype;
    ft_device device;
    ft_llama_config config;
    int64_t max_tokens;
    uint64_t seed;
    int seed_per_rank;
    bench_fn body;
    void *user;
};

/* The model of most tests: grouped kv heads, a vocabulary that nothing divides. */
static ft_llama_config tiny_config(void)
{
    ft_llama_config c = ft_llama_config_default();
    c.vocab = 97;
    c.hidden = 32;
    c.layers = 2;
    c.heads = 4;
    c.kv_heads = 2;
    c.intermediate = 48;
    return c;
}

static bench bench_default(bench_fn body)
{
    bench b;
    memset(&b, 0, sizeof b);
    b.world = 1;
    b.config = tiny_config();
    b.max_tokens = 64;
    b.seed = 1234;
    b.body = body;
    return b;
}

static ft_status bench_rank(ft_ctx *ctx, void *user)
{
    bench *b = (bench *)user;
    ft_zero_config config = ft_zero_config_default();
    ft_mesh mesh;
    ft_zero *zero;
    ft_llama *model;
    uint64_t seed = b->seed + (uint64_t)(b->seed_per_rank ? ft_rank(ctx) : 0);
    config.stage = b->stage;
    config.dtype = b->dtype;
    FT_TRY(ft_mesh_create(ctx, ft_world(ctx), 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &config, &mesh, &zero));
    FT_TRY(ft_llama_create(ctx, zero, &b->config, b->max_tokens, seed, &model));
    return b->body(ctx, zero, model, b);
}

static ft_status bench_launch(bench *b)
{
    ft_config config = ft_config_default();
    config.world = b->world;
    config.device = b->device;
    return ft_launch(&config, bench_rank, b);
}

static void bench_run(bench *b)
{
    ft_status status = bench_launch(b);
    if (status != FT_OK) print_error("%s: %s\n", ft_status_name(status), ft_last_error());
    assert_int_equal(status, FT_OK);
}

/* Numbers for weights and tokens that owe nothing to the header's generator. */
static uint32_t lcg_state;

static double lcg_uniform(void)
{
    lcg_state = lcg_state * 1664525u + 1013904223u;
    return (double)(lcg_state >> 8) / 16777216.0;
}

static int64_t param_elems(const ft_llama_param *p) { return p->shape[0] * p->shape[1]; }

static ft_status upload_tokens(ft_ctx *ctx, int64_t B, int64_t T, const int32_t *values,
                               ft_tensor **out)
{
    int64_t shape[2];
    shape[0] = B;
    shape[1] = T;
    FT_TRY(ft_tensor_create(ctx, out, FT_I32, 2, shape, FT_TAG_OTHER));
    return ft_upload(*out, values);
}

/* ---- configs ---- */

static void test_config_defaults(void **state)
{
    ft_llama_config c = ft_llama_config_default();
    (void)state;
    assert_int_equal(ft_llama_check(&c), FT_OK);
    assert_int_equal(c.vocab, 256);
    assert_int_equal(c.hidden, 128);
    assert_int_equal(c.layers, 4);
    assert_int_equal(c.heads, 4);
    assert_int_equal(c.kv_heads, 4);
    assert_int_equal(c.head_dim, 32);
    assert_int_equal(c.intermediate, 352); /* 8/3 of 128 is 341.3 */
    assert_true(c.norm_eps == 1e-5 && c.rope_theta == 10000.0 && c.init_std == 0.02);
    assert_int_equal(c.tie_embeddings + c.qkv_bias + c.o_bias + c.mlp_bias + c.qk_norm, 0);

    c = ft_llama_config_default();
    c.kv_heads = c.intermediate = 0;
    c.heads = 8;
    c.hidden = 96;
    c.norm_eps = c.rope_theta = 0;
    assert_int_equal(ft_llama_check(&c), FT_OK);
    assert_int_equal(c.kv_heads, 8);
    assert_int_equal(c.head_dim, 12);
    assert_int_equal(c.intermediate, 256); /* exactly 8/3 of 96, a multiple of 32 already */
    assert_true(c.norm_eps == 1e-5 && c.rope_theta == 10000.0);

    c.hidden = 100; /* no multiple of 8 heads: fine where head_dim is given */
    c.head_dim = 24;
    assert_int_equal(ft_llama_check(&c), FT_OK);
    assert_int_equal(c.head_dim, 24);
}

typedef struct refusal { /* -1 in a size: leave it */
    int64_t vocab, hidden, layers, heads, kv_heads, head_dim, intermediate;
    const char *says[3];
} refusal;

static void set_size(int64_t *size, int64_t value)
{
    if (value != -1) *size = value;
}

static void test_config_sizes_that_are_refused(void **state)
{
    static const int64_t big = INT64_C(1) << 31, most = INT64_MAX, least = INT64_MIN;
    const refusal refusals[] = {
        {0, -1, -1, -1, -1, -1, -1, {"vocab", "is 0", NULL}},
        {-5, -1, -1, -1, -1, -1, -1, {"vocab", "-5", NULL}},
        {-1, 0, -1, -1, -1, -1, -1, {"hidden", "is 0", NULL}},
        {-1, -1, 0, -1, -1, -1, -1, {"layers", "is 0", NULL}},
        {-1, -1, -1, 0, -1, -1, -1, {"heads", "is 0", NULL}},
        {-1, -1, -1, -1, -2, -1, -1, {"kv_heads", "-2", NULL}},
        {-1, -1, -1, -1, -1, -4, -1, {"head_dim", "-4", NULL}},
        {-1, -1, -1, -1, -1, -1, -8, {"intermediate", "-8", NULL}},
        {big, -1, -1, -1, -1, -1, -1, {"vocab", "2147483648", NULL}},
        {-1, most, -1, -1, -1, -1, -1, {"hidden", "9223372036854775807", NULL}},
        {-1, -1, least, -1, -1, -1, -1, {"layers", "-9223372036854775808", NULL}},
        {-1, -1, -1, -1, -1, most, -1, {"head_dim", "9223372036854775807", NULL}},
        {-1, -1, -1, 4, 3, -1, -1, {"4 heads", "3 kv heads", NULL}},
        {-1, -1, -1, 4, 8, -1, -1, {"4 heads", "8 kv heads", NULL}},
        {-1, 100, -1, 3, 3, -1, -1, {"hidden 100", "3 heads", "head_dim"}},
        {-1, -1, -1, -1, -1, 7, -1, {"head_dim 7", "odd", NULL}},
        {-1, 36, -1, 4, 2, -1, -1, {"head_dim 9", "hidden 36", "odd"}},
        {big - 1, big - 2, -1, 1, 1, -1, -1, {"too large", "2147483647", "2147483646"}},
        {-1, 1 << 30, 1 << 20, 1, 1, -1, 1 << 30, {"too large", "1048576 layers", NULL}},
        {-1, 2, big - 1, 1, 1, 2, 1, {"too large", "2147483647 layers", NULL}},
        {-1, -1, -1, big - 1, big - 1, big - 2, -1, {"too large", "2147483647 heads", NULL}}
    };
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const refusal *r = &refusals[i];
        ft_llama_config c = ft_llama_config_default();
        set_size(&c.vocab, r->vocab);
        set_size(&c.hidden, r->hidden);
        set_size(&c.layers, r->layers);
        set_size(&c.heads, r->heads);
        set_size(&c.kv_heads, r->kv_heads);
        set_size(&c.head_dim, r->head_dim);
        set_size(&c.intermediate, r->intermediate);
        assert_int_equal(ft_llama_param_total(&c), 0);
        assert_int_equal(ft_llama_check(&c), FT_ERR_ARG);
        for (int k = 0; k < 3 && r->says[k]; k++)
            if (!strstr(ft_last_error(), r->says[k]))
                fail_msg("case %d: expected \"%s\" in \"%s\"", (int)i, r->says[k],
                         ft_last_error());
    }
}

static void refuse_setting(ft_llama_config c, const char *says)
{
    assert_int_equal(ft_llama_check(&c), FT_ERR_ARG);
    if (!strstr(ft_last_error(), says))
        fail_msg("expected \"%s\" in \"%s\"", says, ft_last_error());
}

static void test_config_settings_that_are_refused(void **state)
{
    ft_llama_config c;
    (void)state;
    c = tiny_config(); c.norm_eps = -1e-5; refuse_setting(c, "norm_eps");
    c = tiny_config(); c.norm_eps = (double)NAN; refuse_setting(c, "norm_eps");
    c = tiny_config(); c.rope_theta = 0.5; refuse_setting(c, "rope_theta");
    c = tiny_config(); c.rope_theta = (double)INFINITY; refuse_setting(c, "rope_theta");
    c = tiny_config(); c.init_std = -0.02; refuse_setting(c, "init_std");
    c = tiny_config(); c.init_std = (double)NAN; refuse_setting(c, "init_std");
    c = tiny_config(); c.loss_chunk_tokens = -1; refuse_setting(c, "loss_chunk_tokens");
    c = tiny_config(); c.rope_scaling.factor = 8; refuse_setting(c, "rope_scaling");
    c.rope_scaling.low_freq_factor = 4;
    c.rope_scaling.high_freq_factor = 1;
    c.rope_scaling.original_context = 8192;
    refuse_setting(c, "low < high");
    c.rope_scaling.low_freq_factor = 1;
    c.rope_scaling.high_freq_factor = 4;
    assert_int_equal(ft_llama_check(&c), FT_OK);
    c.rope_scaling.factor = -8;
    refuse_setting(c, "factor -8");
    assert_int_equal(ft_llama_check(NULL), FT_ERR_ARG);
    assert_int_equal(ft_llama_param_total(NULL), 0);
}

/* The counts that the publishers of these models give. */
static void test_totals_of_known_models(void **state)
{
    ft_llama_config c = ft_llama_config_default();
    (void)state;
    c.vocab = 128256; c.hidden = 2048; c.layers = 16; c.heads = 32; c.kv_heads = 8;
    c.intermediate = 8192; c.tie_embeddings = 1;
    assert_int_equal(ft_llama_param_total(&c), INT64_C(1235814400)); /* Llama 3.2 1B */
    c.hidden = 4096; c.layers = 32; c.intermediate = 14336; c.tie_embeddings = 0;
    assert_int_equal(ft_llama_param_total(&c), INT64_C(8030261248)); /* Llama 3.1 8B */
    c = ft_llama_config_default();
    c.vocab = 151936; c.hidden = 896; c.layers = 24; c.heads = 14; c.kv_heads = 2;
    c.intermediate = 4864; c.tie_embeddings = 1; c.qkv_bias = 1;
    assert_int_equal(ft_llama_param_total(&c), INT64_C(494032768)); /* Qwen2.5 0.5B */
    c.hidden = 1024; c.layers = 28; c.heads = 16; c.kv_heads = 8; c.head_dim = 128;
    c.intermediate = 3072; c.qkv_bias = 0; c.qk_norm = 1;
    assert_int_equal(ft_llama_param_total(&c), INT64_C(596049920)); /* Qwen3 0.6B */
}

/* ---- parameters ---- */

static const char *const all_names[] = { /* one layer with every switch on */
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.self_attn.k_proj.bias",
    "model.layers.0.self_attn.v_proj.bias",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.self_attn.k_norm.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.self_attn.o_proj.bias",
    "model.layers.0.post_attention_layernorm.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.gate_proj.bias",
    "model.layers.0.mlp.up_proj.bias",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.down_proj.bias",
    "model.norm.weight",
    "lm_head.weight"
};

static ft_status check_all_names(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    int n = (int)(sizeof all_names / sizeof *all_names);
    (void)ctx;
    (void)zero;
    (void)b;
    REQUIRE(ft_llama_param_count(model) == n);
    for (int i = 0; i < n; i++)
        REQUIRE(strcmp(ft_llama_param_at(model, i)->name, all_names[i]) == 0);
    REQUIRE(ft_llama_param_at(model, -1) == NULL && ft_llama_param_at(model, n) == NULL);

    const ft_llama_param *k = ft_llama_param_find(model, "model.layers.0.self_attn.k_proj.weight");
    REQUIRE(k->ndim == 2 && k->shape[0] == 2 * 10 && k->shape[1] == 32); /* K = 2, D = 10, C = 32 */
    const ft_llama_param *o = ft_llama_param_find(model, "model.layers.0.self_attn.o_proj.weight");
    REQUIRE(o->ndim == 2 && o->shape[0] == 32 && o->shape[1] == 4 * 10);
    const ft_llama_param *v = ft_llama_param_find(model, "model.layers.0.self_attn.v_proj.bias");
    REQUIRE(v->ndim == 1 && v->shape[0] == 20 && v->shape[1] == 1);
    const ft_llama_param *q = ft_llama_param_find(model, "model.layers.0.self_attn.q_norm.weight");
    REQUIRE(q->ndim == 1 && q->shape[0] == 10);
    const ft_llama_param *d = ft_llama_param_find(model, "model.layers.0.mlp.down_proj.weight");
    REQUIRE(d->shape[0] == 32 && d->shape[1] == 48);
    return FT_OK;
}

static ft_llama_config full_config(void)
{
    ft_llama_config c = tiny_config();
    c.head_dim = 10;
    c.qkv_bias = c.o_bias = c.mlp_bias = c.qk_norm = 1;
    return c;
}

static void test_names_and_shapes(void **state)
{
    bench b = bench_default(check_all_names);
    (void)state;
    b.config = full_config();
    b.config.layers = 1;
    bench_run(&b);
}

/* Entries tile their packs: none overlaps, nothing is left over, and all add up to the total. */
static ft_status check_tiling(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    int64_t total = 0;
    (void)ctx;
    (void)zero;
    for (int i = 0; i < ft_llama_param_count(model); i++) {
        const ft_llama_param *p = ft_llama_param_at(model, i);
        int64_t in_pack = 0;
        total += param_elems(p);
        REQUIRE(ft_llama_param_find(model, p->name) == p);
        REQUIRE(p->first_elem >= 0 && p->first_elem + param_elems(p) <= ft_numel(p->pack));
        for (int j = 0; j < ft_llama_param_count(model); j++) {
            const ft_llama_param *o = ft_llama_param_at(model, j);
            if (o->pack != p->pack) continue;
            in_pack += param_elems(o);
            REQUIRE(o == p || o->first_elem + param_elems(o) <= p->first_elem ||
                    p->first_elem + param_elems(p) <= o->first_elem);
        }
        REQUIRE(in_pack == ft_numel(p->pack));
    }
    REQUIRE(total == ft_llama_param_total(&b->config));
    int untied = ft_llama_param_find(model, "lm_head.weight") != NULL;
    REQUIRE(untied == !b->config.tie_embeddings);
    REQUIRE(!ft_llama_param_find(model, NULL) && !ft_llama_param_find(model, "") &&
            !ft_llama_param_find(model, "model.layers.99.mlp.up_proj.weight"));
    REQUIRE(ft_llama_param_find(model, "model.layers.11.mlp.up_proj.weight"));
    return FT_OK;
}

static void test_list_tiles_the_model(void **state)
{
    bench b = bench_default(check_tiling);
    (void)state;
    for (int i = 0; i < 64; i++) { /* every combination of switches */
        b.config = tiny_config();
        b.config.layers = 12;
        b.config.head_dim = i & 32 ? 6 : 0;
        b.config.tie_embeddings = i & 1;
        b.config.qkv_bias = i >> 1 & 1;
        b.config.o_bias = i >> 2 & 1;
        b.config.mlp_bias = i >> 3 & 1;
        b.config.qk_norm = i >> 4 & 1;
        b.device = FT_META;
        bench_run(&b);
    }
}

/* ---- initial weights and the hash ---- */

static uint64_t reference_mix(uint64_t z)
{
    z ^= z >> 30;
    z *= UINT64_C(0xbf58476d1ce4e5b9);
    z ^= z >> 27;
    z *= UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static uint64_t reference_fnv(uint64_t hash, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        hash ^= ((const unsigned char *)bytes)[i];
        hash *= UINT64_C(1099511628211);
    }
    return hash;
}

#define FNV_BASIS UINT64_C(14695981039346656037)

/* The formula of the header's section on initialisation. */
static double reference_weight(uint64_t seed, const char *name, int64_t i, double std)
{
    uint64_t g = UINT64_C(0x9e3779b97f4a7c15), n = (uint64_t)i;
    uint64_t key = reference_mix(seed ^ reference_fnv(FNV_BASIS, name, strlen(name)));
    double sum = 0;
    for (uint64_t k = 1; k <= 2; k++) {
        uint64_t bits = reference_mix(key + (2 * n + k) * g);
        for (int part = 0; part < 4; part++, bits >>= 16) sum += (double)(bits & 0xffff) - 32767.5;
    }
    return std * sum / 53509.919921450082;
}

static int ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* Elements against the formula, or 1 in norms, 0 in biases; mean and deviation; the hash. */
static ft_status check_init(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    uint64_t hash, expected = FNV_BASIS;
    (void)zero;
    for (int i = 0; i < ft_llama_param_count(model); i++) {
        const ft_llama_param *p = ft_llama_param_at(model, i);
        int64_t n = param_elems(p);
        float *w = (float *)ft_host_alloc(ctx, (size_t)n * sizeof(float));
        double std = 0.02, sum = 0, squares = 0;
        if (ends_with(p->name, "o_proj.weight") || ends_with(p->name, "down_proj.weight"))
            std = 0.02 / sqrt(2.0 * (double)b->config.layers);
        FT_TRY(ft_llama_export(model, p, w));
        expected = reference_fnv(expected, w, (size_t)n * sizeof(float));
        for (int64_t k = 0; k < n; k++) {
            double x = (double)w[k];
            if (p->ndim == 2) REQUIRE(fabs(x - reference_weight(b->seed, p->name, k, std)) < 1e-8);
            else REQUIRE(x == (ends_with(p->name, ".bias") ? 0.0 : 1.0));
            sum += x;
            squares += x * x;
        }
        double sigma = 1 / sqrt((double)n);
        if (p->ndim == 2) {
            REQUIRE(fabs(sum / (double)n) < 4 * sigma * std);
            REQUIRE(fabs(sqrt(squares / (double)n) / std - 1) < 4 * sigma);
        }
        ft_host_free(ctx, w);
    }
    FT_TRY(ft_llama_hash(model, &hash));
    REQUIRE(hash == expected); /* this machine is little-endian, as all that run the tests */
    *(uint64_t *)b->user = hash;
    return FT_OK;
}

static void test_initial_weights(void **state)
{
    uint64_t hash = 0;
    bench b = bench_default(check_init);
    (void)state;
    b.config = full_config();
    b.user = &hash;
    bench_run(&b);
}

typedef struct hashes { uint64_t rank[8]; } hashes;

static ft_status take_hash(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    (void)zero;
    return ft_llama_hash(model, &((hashes *)b->user)->rank[ft_rank(ctx)]);
}

/* The same weights for every number of ranks and every stage; each rank sees the same hash. bf16
   models start from the same fp32 masters. */
static void test_initial_weights_do_not_depend_on_the_layout(void **state)
{
    hashes first, h;
    bench b = bench_default(take_hash);
    (void)state;
    memset(&first, 0, sizeof first);
    b.config = full_config();
    b.user = &first;
    bench_run(&b);
    b.user = &h;
    for (b.world = 1; b.world <= 5; b.world++)
        for (b.stage = 0; b.stage <= 3; b.stage++)
            for (int bf16 = 0; bf16 <= 1; bf16++) {
                b.dtype = bf16 ? FT_BF16 : FT_F32;
                memset(&h, 0, sizeof h);
                bench_run(&b);
                for (int r = 0; r < b.world; r++) assert_true(h.rank[r] == first.rank[0]);
            }
    b.world = 1;
    b.stage = 0;
    b.seed++;
    bench_run(&b);
    assert_true(h.rank[0] != first.rank[0]);
}

/* Replicas with seeds of their own would drift apart unseen. */
static void test_seeds_that_differ_are_refused(void **state)
{
    hashes h;
    bench b = bench_default(take_hash);
    (void)state;
    b.user = &h;
    b.world = 3;
    b.seed_per_rank = 1;
    assert_int_equal(bench_launch(&b), FT_ERR_COMM);
    assert_non_null(strstr(ft_last_error(), "seed"));
}

static ft_status check_hash_changes(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    uint64_t before, after;
    (void)zero;
    (void)b;
    FT_TRY(ft_llama_hash(model, &before));
    for (int i = 0; i < ft_llama_param_count(model); i++) {
        const ft_llama_param *p = ft_llama_param_at(model, i);
        int64_t n = param_elems(p), k = (7 * i) % n;
        float *w = (float *)ft_host_alloc(ctx, (size_t)n * sizeof(float)), old;
        FT_TRY(ft_llama_export(model, p, w));
        old = w[k];
        w[k] = nextafterf(old, 2.0f); /* one bit of one weight */
        FT_TRY(ft_llama_import(model, p, w));
        FT_TRY(ft_llama_hash(model, &after));
        REQUIRE(after != before);
        w[k] = old;
        FT_TRY(ft_llama_import(model, p, w));
        FT_TRY(ft_llama_hash(model, &after));
        REQUIRE(after == before);
        ft_host_free(ctx, w);
    }
    return FT_OK;
}

static void test_hash_sees_every_weight(void **state)
{
    bench b = bench_default(check_hash_changes);
    (void)state;
    b.config = full_config();
    bench_run(&b);
    b.world = 3;
    b.stage = 3;
    b.dtype = FT_BF16; /* the master keeps what bf16 cannot */
    bench_run(&b);
}

static ft_status check_entries(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    const ft_llama_param *p = ft_llama_param_at(model, 2);
    ft_llama_param copy = *p, stranger = *p;
    int64_t n = param_elems(p);
    float *w = (float *)ft_host_alloc(ctx, (size_t)n * sizeof(float));
    (void)zero;
    (void)b;
    FT_TRY(ft_llama_export(model, &copy, ft_rank(ctx) == 0 ? w : NULL)); /* not all want it */
    REQUIRE(ft_rank(ctx) != 0 || (w[0] != 0 && w[n - 1] != 0));
    stranger.first_elem++;
    REQUIRE(ft_llama_export(model, &stranger, w) == FT_ERR_ARG);
    REQUIRE(strstr(ft_last_error(), p->name));
    REQUIRE(ft_llama_export(model, NULL, w) == FT_ERR_ARG);
    REQUIRE(ft_llama_import(model, NULL, w) == FT_ERR_ARG);
    REQUIRE(ft_llama_import(model, p, NULL) == FT_ERR_ARG);
    REQUIRE(ft_llama_export_grad(model, NULL, w) == FT_ERR_ARG);
    return FT_OK;
}

static void test_entries_are_checked(void **state)
{
    bench b = bench_default(check_entries);
    (void)state;
    bench_run(&b);
    b.world = 2;
    b.stage = 3;
    bench_run(&b);
}

/* ---- the float64 model ---- */

enum { REF_PARAMS = 64 };

typedef struct ref_model {
    ft_llama_config c;
    int n;
    char name[REF_PARAMS][80];
    double *w[REF_PARAMS];
} ref_model;

static double *ref_get(const ref_model *m, int layer, const char *name)
{
    char full[96];
    if (layer < 0) snprintf(full, sizeof full, "%s", name);
    else snprintf(full, sizeof full, "model.layers.%d.%s", layer, name);
    for (int i = 0; i < m->n; i++)
        if (strcmp(m->name[i], full) == 0) return m->w[i];
    return NULL;
}

static void ref_norm(const double *x, const double *w, int64_t n, double eps, double *y)
{
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
    double scale = 1 / sqrt(squares / (double)n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * w[i];
}

/* y[out] = w[out,in] x[in] + bias */
static void ref_linear(const double *x, const double *w, const double *bias, int64_t in,
                       int64_t out, double *y)
{
    for (int64_t o = 0; o < out; o++) {
        y[o] = bias ? bias[o] : 0;
        for (int64_t i = 0; i < in; i++) y[o] += w[o * in + i] * x[i];
    }
}

static double ref_frequency(const ft_llama_config *c, int64_t i)
{
    const double pi = 3.14159265358979323846;
    const ft_rope_scaling *s = &c->rope_scaling;
    double f = pow(c->rope_theta, -2.0 * (double)i / (double)c->head_dim);
    if (s->factor == 0) return f;
    double turns = (double)s->original_context * f / (2 * pi); /* in the original context */
    if (turns < s->low_freq_factor) return f / s->factor;
    if (turns > s->high_freq_factor) return f;
    double share = (turns - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
    return (1 - share) * f / s->factor + share * f;
}

/* One head's vector at position t: norm if there is one, then the rotation. */
static void ref_head(const ft_llama_config *c, double *q, const double *norm, int64_t t)
{
    int64_t half = c->head_dim / 2;
    if (norm) ref_norm(q, norm, c->head_dim, c->norm_eps, q);
    for (int64_t i = 0; i < half; i++) {
        double angle = (double)t * ref_frequency(c, i), a = q[i], b = q[i + half];
        q[i] = a * cos(angle) - b * sin(angle);
        q[i + half] = b * cos(angle) + a * sin(angle);
    }
}

/* o[D] of one query head at position t over keys and values k, v [T, K*D] of kv head `kv`. */
static void ref_attend(const ft_llama_config *c, const double *q, const double *k, const double *v,
                       int64_t kv, int64_t t, double *p, double *o)
{
    int64_t D = c->head_dim, row = c->kv_heads * D;
    double most = -INFINITY, sum = 0;
    for (int64_t s = 0; s <= t; s++) {
        p[s] = 0;
        for (int64_t i = 0; i < D; i++) p[s] += q[i] * k[s * row + kv * D + i];
        p[s] /= sqrt((double)D);
        if (p[s] > most) most = p[s];
    }
    for (int64_t s = 0; s <= t; s++) sum += p[s] = exp(p[s] - most);
    for (int64_t i = 0; i < D; i++) {
        o[i] = 0;
        for (int64_t s = 0; s <= t; s++) o[i] += p[s] / sum * v[s * row + kv * D + i];
    }
}

static void ref_attention(const ref_model *m, int l, int64_t T, double *x)
{
    const ft_llama_config *c = &m->c;
    int64_t C = c->hidden, D = c->head_dim, Q = c->heads * D, KV = c->kv_heads * D;
    double *y = (double *)calloc((size_t)(C + T), sizeof(double)), *p = y + C;
    double *q = (double *)calloc((size_t)(T * (2 * Q + 2 * KV)), sizeof(double));
    double *k = q + T * Q, *v = k + T * KV, *o = v + T * KV;
    for (int64_t t = 0; t < T; t++) {
        ref_norm(x + t * C, ref_get(m, l, "input_layernorm.weight"), C, c->norm_eps, y);
        ref_linear(y, ref_get(m, l, "self_attn.q_proj.weight"),
                   ref_get(m, l, "self_attn.q_proj.bias"), C, Q, q + t * Q);
        ref_linear(y, ref_get(m, l, "self_attn.k_proj.weight"),
                   ref_get(m, l, "self_attn.k_proj.bias"), C, KV, k + t * KV);
        ref_linear(y, ref_get(m, l, "self_attn.v_proj.weight"),
                   ref_get(m, l, "self_attn.v_proj.bias"), C, KV, v + t * KV);
        for (int64_t h = 0; h < c->heads; h++)
            ref_head(c, q + t * Q + h * D, ref_get(m, l, "self_attn.q_norm.weight"), t);
        for (int64_t h = 0; h < c->kv_heads; h++)
            ref_head(c, k + t * KV + h * D, ref_get(m, l, "self_attn.k_norm.weight"), t);
        for (int64_t h = 0; h < c->heads; h++)
            ref_attend(c, q + t * Q + h * D, k, v, h / (c->heads / c->kv_heads), t, p,
                       o + t * Q + h * D);
        ref_linear(o + t * Q, ref_get(m, l, "self_attn.o_proj.weight"),
                   ref_get(m, l, "self_attn.o_proj.bias"), Q, C, y);
        for (int64_t i = 0; i < C; i++) x[t * C + i] += y[i];
    }
    free(y);
    free(q);
}

static void ref_mlp(const ref_model *m, int l, double *x)
{
    const ft_llama_config *c = &m->c;
    int64_t C = c->hidden, F = c->intermediate;
    double *y = (double *)calloc((size_t)(C + 2 * F), sizeof(double)), *g = y + C, *u = g + F;
    ref_norm(x, ref_get(m, l, "post_attention_layernorm.weight"), C, c->norm_eps, y);
    ref_linear(y, ref_get(m, l, "mlp.gate_proj.weight"), ref_get(m, l, "mlp.gate_proj.bias"), C, F,
               g);
    ref_linear(y, ref_get(m, l, "mlp.up_proj.weight"), ref_get(m, l, "mlp.up_proj.bias"), C, F, u);
    for (int64_t i = 0; i < F; i++) g[i] = g[i] / (1 + exp(-g[i])) * u[i];
    ref_linear(g, ref_get(m, l, "mlp.down_proj.weight"), ref_get(m, l, "mlp.down_proj.bias"), F, C,
               y);
    for (int64_t i = 0; i < C; i++) x[i] += y[i];
    free(y);
}

/* logits[T,V] of one row of tokens */
static void ref_logits(const ref_model *m, const int32_t *tokens, int64_t T, double *logits)
{
    int64_t C = m->c.hidden, V = m->c.vocab;
    const double *table = ref_get(m, -1, "model.embed_tokens.weight");
    const double *head = m->c.tie_embeddings ? table : ref_get(m, -1, "lm_head.weight");
    double *x = (double *)calloc((size_t)(T * C), sizeof(double));
    for (int64_t t = 0; t < T; t++)
        memcpy(x + t * C, table + tokens[t] * C, (size_t)C * sizeof(double));
    for (int l = 0; l < (int)m->c.layers; l++) {
        ref_attention(m, l, T, x);
        for (int64_t t = 0; t < T; t++) ref_mlp(m, l, x + t * C);
    }
    for (int64_t t = 0; t < T; t++) {
        ref_norm(x + t * C, ref_get(m, -1, "model.norm.weight"), C, m->c.norm_eps, x + t * C);
        ref_linear(x + t * C, head, NULL, C, V, logits + t * V);
    }
    free(x);
}

/* Mean of -log p(label) over labels that are not -100. */
static double ref_loss(const ref_model *m, const int32_t *tokens, const int32_t *labels, int64_t B,
                       int64_t T)
{
    int64_t V = m->c.vocab, counted = 0;
    double *logits = (double *)calloc((size_t)(T * V), sizeof(double)), total = 0;
    for (int64_t b = 0; b < B; b++) {
        ref_logits(m, tokens + b * T, T, logits);
        for (int64_t t = 0; t < T; t++) {
            const double *z = logits + t * V;
            double most = z[0], sum = 0;
            if (labels[b * T + t] == -100) continue;
            for (int64_t i = 0; i < V; i++) most = z[i] > most ? z[i] : most;
            for (int64_t i = 0; i < V; i++) sum += exp(z[i] - most);
            total += most + log(sum) - z[labels[b * T + t]];
            counted++;
        }
    }
    free(logits);
    return counted ? total / (double)counted : 0;
}

/* ---- model against reference ---- */

enum { CHECK_B = 2, CHECK_T = 40 };

typedef struct check_data { /* made before the launch, read by every rank */
    ref_model ref;
    int32_t tokens[CHECK_B * CHECK_T], labels[CHECK_B * CHECK_T];
    int64_t counted;
} check_data;

static void fill_tokens(check_data *d, int64_t vocab)
{
    d->counted = 0;
    for (int i = 0; i < CHECK_B * CHECK_T; i++) {
        d->tokens[i] = (int32_t)(lcg_uniform() * (double)vocab);
        d->labels[i] = i % 7 == 3 ? -100 : (int32_t)(lcg_uniform() * (double)vocab);
        d->counted += d->labels[i] != -100;
    }
}

/* Random weights with visible norms and biases, the reference's and, imported, all ranks'. */
static ft_status share_weights(ft_ctx *ctx, ft_llama *model, check_data *d)
{
    for (int i = 0; i < ft_llama_param_count(model); i++) {
        const ft_llama_param *p = ft_llama_param_at(model, i);
        int64_t n = param_elems(p);
        float *w = (float *)ft_host_alloc(ctx, (size_t)n * sizeof(float));
        uint32_t noise = 99u + (uint32_t)i;
        REQUIRE(w != NULL && i < REF_PARAMS);
        for (int64_t k = 0; k < n; k++) {
            noise = noise * 1664525u + 1013904223u;
            double x = ((double)(noise >> 8) / 16777216.0 - 0.5) * (p->ndim == 2 ? 0.6 : 0.4);
            w[k] = (float)(p->ndim == 1 && !ends_with(p->name, ".bias") ? 1 + x : x);
        }
        FT_TRY(ft_llama_import(model, p, w));
        if (ft_rank(ctx) == 0) {
            snprintf(d->ref.name[i], sizeof d->ref.name[i], "%s", p->name);
            d->ref.w[i] = (double *)calloc((size_t)n, sizeof(double));
            for (int64_t k = 0; k < n; k++) d->ref.w[i][k] = (double)w[k];
            d->ref.n = i + 1;
        }
        ft_host_free(ctx, w);
    }
    return FT_OK;
}

static void free_reference(check_data *d)
{
    for (int i = 0; i < d->ref.n; i++) free(d->ref.w[i]);
    d->ref.n = 0;
}

/* Every position counts: a wrong rotary layout is right at position 0 and shows beyond 20. */
static ft_status compare_logits(const check_data *d, const float *logits)
{
    int64_t V = d->ref.c.vocab;
    double *expected = (double *)calloc((size_t)(CHECK_T * V), sizeof(double));
    double worst = 0;
    for (int b = 0; b < CHECK_B; b++) {
        ref_logits(&d->ref, d->tokens + b * CHECK_T, CHECK_T, expected);
        for (int64_t t = 0; t < CHECK_T; t++) {
            double error = 0, norm = 0;
            for (int64_t i = 0; i < V; i++) {
                double e = expected[t * V + i];
                double x = (double)logits[(b * CHECK_T + t) * V + i] - e;
                error += x * x;
                norm += e * e;
            }
            error = sqrt(error / norm);
            if (!(error <= worst)) worst = error;
        }
    }
    free(expected);
    REQUIRE(worst < 1e-5);
    return FT_OK;
}

/* The directional derivative of the float64 loss along a random direction in one parameter, against
   the gradient's product with it. */
static ft_status compare_grad(check_data *d, int index, const float *grad, int64_t n)
{
    double *w = d->ref.w[index], *saved, *direction, dot = 0, norm = 0, h = 1e-4, side[2];
    saved = (double *)calloc((size_t)(2 * n), sizeof(double));
    direction = saved + n;
    memcpy(saved, w, (size_t)n * sizeof(double));
    for (int64_t k = 0; k < n; k++) {
        direction[k] = lcg_uniform() < 0.5 ? -1 : 1;
        dot += direction[k] * (double)grad[k];
        norm += (double)grad[k] * (double)grad[k];
    }
    for (int s = 0; s < 2; s++) {
        for (int64_t k = 0; k < n; k++) w[k] = saved[k] + (s ? h : -h) * direction[k];
        side[s] = ref_loss(&d->ref, d->tokens, d->labels, CHECK_B, CHECK_T);
    }
    memcpy(w, saved, (size_t)n * sizeof(double));
    free(saved);
    double expected = (side[1] - side[0]) / (2 * h);
    if (fabs(dot - expected) <= 1e-4 * sqrt(norm) + 1e-8) return FT_OK;
    return ft_error(FT_ERR_STATE, "gradient of %s: along a direction %.9g, expected %.9g",
                    d->ref.name[index], dot, expected);
}

static ft_status check_against_reference(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    check_data *d = (check_data *)b->user;
    ft_tensor *tokens, *labels, *logits, *loss, *scale;
    ft_tape *tape = NULL;
    float *values = (float *)ft_host_alloc(ctx, (size_t)(CHECK_B * CHECK_T * b->config.vocab) * 4);
    float value;
    int first = ft_rank(ctx) == 0;
    REQUIRE(values != NULL);
    FT_TRY(share_weights(ctx, model, d));
    FT_TRY(upload_tokens(ctx, CHECK_B, CHECK_T, d->tokens, &tokens));
    FT_TRY(upload_tokens(ctx, CHECK_B, CHECK_T, d->labels, &labels));
    FT_TRY(ft_llama_logits(model, tokens, 0, &logits));
    REQUIRE(logits->ndim == 3 && logits->shape[0] == CHECK_B && logits->shape[1] == CHECK_T &&
            logits->shape[2] == b->config.vocab);
    FT_TRY(ft_download(logits, values));
    ft_tensor_free(logits);
    if (first) FT_TRY(compare_logits(d, values));

    /* All ranks train on the same rows: the sum over ranks, divided by the count of all, is the
       reference's mean. */
    FT_TRY(ft_zero_step_begin(zero, 1, d->counted, &scale));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_llama_loss(model, tokens, labels, scale, NULL, &loss));
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_backward(tape, loss, NULL));
    FT_TRY(ft_download(loss, &value));
    double expected = first ? ref_loss(&d->ref, d->tokens, d->labels, CHECK_B, CHECK_T) : 0;
    REQUIRE(!first || fabs((double)value * ft_world(ctx) / expected - 1) < 1e-5);
    for (int i = 0; i < ft_llama_param_count(model); i++) {
        const ft_llama_param *p = ft_llama_param_at(model, i);
        FT_TRY(ft_llama_export_grad(model, p, values));
        if (first) FT_TRY(compare_grad(d, i, values, param_elems(p)));
    }
    FT_TRY(ft_zero_add_loss(zero, loss));
    ft_tensor_free(loss);
    return ft_zero_step_end(zero, 0.0);
}

static void run_against_reference(ft_llama_config config, int world, int stage)
{
    check_data *d = (check_data *)calloc(1, sizeof *d);
    bench b = bench_default(check_against_reference);
    lcg_state = 20240607u;
    assert_non_null(d);
    b.config = config;
    b.world = world;
    b.stage = stage;
    b.user = d;
    assert_int_equal(ft_llama_check(&config), FT_OK);
    d->ref.c = config;
    fill_tokens(d, config.vocab);
    ft_status status = bench_launch(&b);
    if (status != FT_OK) print_error("%s\n", ft_last_error());
    free_reference(d);
    free(d);
    assert_int_equal(status, FT_OK);
}

/* Small sizes: every gradient costs two runs of the reference. */
static ft_llama_config small_config(void)
{
    ft_llama_config c = tiny_config();
    c.vocab = 29;
    c.hidden = 16;
    c.intermediate = 20;
    c.heads = 4;
    c.kv_heads = 2;
    return c;
}

static void test_grouped_heads_against_float64(void **state)
{
    (void)state;
    run_against_reference(small_config(), 1, 0);
}

static void test_gathered_weights_against_float64(void **state)
{
    (void)state;
    run_against_reference(small_config(), 2, 3);
}

static void test_every_switch_against_float64(void **state)
{
    ft_llama_config c = small_config();
    (void)state;
    c.qkv_bias = c.o_bias = c.mlp_bias = c.qk_norm = c.tie_embeddings = 1;
    c.head_dim = 6;
    c.kv_heads = 1;
    c.loss_chunk_tokens = 7;
    run_against_reference(c, 1, 0);
}

static void test_llama3_frequencies_against_float64(void **state)
{
    ft_llama_config c = small_config();
    (void)state;
    c.rope_theta = 500.0;
    c.heads = 2;
    c.head_dim = 16;
    c.rope_scaling.factor = 8;
    c.rope_scaling.low_freq_factor = 1;
    c.rope_scaling.high_freq_factor = 4;
    c.rope_scaling.original_context = 32;
    run_against_reference(c, 1, 0);
}

/* ---- logits ---- */

static ft_status get_logits(ft_ctx *ctx, ft_llama *model, int64_t B, int64_t T,
                            const int32_t *values, int last_only, float *out)
{
    ft_tensor *tokens, *logits;
    FT_TRY(upload_tokens(ctx, B, T, values, &tokens));
    FT_TRY(ft_llama_logits(model, tokens, last_only, &logits));
    REQUIRE(logits->shape[0] == B && logits->shape[1] == (last_only ? 1 : T));
    FT_TRY(ft_download(logits, out));
    ft_tensor_free(logits);
    ft_tensor_free(tokens);
    return FT_OK;
}

enum { ROWS = 3, LENGTH = 20 };

static ft_status check_last_only(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    int64_t V = b->config.vocab;
    int32_t tokens[ROWS * LENGTH];
    float *all = (float *)ft_host_alloc(ctx, (size_t)(ROWS * LENGTH * V) * sizeof(float));
    float *last = (float *)ft_host_alloc(ctx, (size_t)(ROWS * V) * sizeof(float));
    (void)zero;
    REQUIRE(all && last);
    for (int i = 0; i < ROWS * LENGTH; i++) tokens[i] = (int32_t)((i * i * 31 + 5 * i) % V);
    for (int64_t T = 1; T <= LENGTH; T += LENGTH - 1) { /* one token, and many */
        double norm = 0, error = 0;
        FT_TRY(get_logits(ctx, model, ROWS, T, tokens, 0, all));
        FT_TRY(get_logits(ctx, model, ROWS, T, tokens, 1, last));
        for (int64_t r = 0; r < ROWS; r++)
            for (int64_t i = 0; i < V; i++) {
                double x = (double)all[(r * T + T - 1) * V + i];
                double e = (double)last[r * V + i] - x;
                norm += x * x;
                error += e * e;
            }
        /* GEMMs of other shapes may add in another order. */
        REQUIRE(norm > 0 && sqrt(error / norm) < 1e-6);
    }
    return FT_OK;
}

static void test_logits_of_the_last_token(void **state)
{
    bench b = bench_default(check_last_only);
    (void)state;
    bench_run(&b);
    b.config.tie_embeddings = 1;
    b.world = 2;
    b.stage = 3;
    bench_run(&b);
}

/* A token shows in the logits from its own position on, in its own row only. */
static ft_status check_causality(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    int64_t V = b->config.vocab, n = ROWS * LENGTH * V;
    int32_t tokens[ROWS * LENGTH];
    float *before = (float *)ft_host_alloc(ctx, (size_t)n * sizeof(float));
    float *after = (float *)ft_host_alloc(ctx, (size_t)n * sizeof(float));
    (void)zero;
    REQUIRE(before && after);
    for (int i = 0; i < ROWS * LENGTH; i++) tokens[i] = (int32_t)((i * i * 17 + 3 * i) % V);
    FT_TRY(get_logits(ctx, model, ROWS, LENGTH, tokens, 0, before));
    for (int64_t t = 0; t < LENGTH; t++) {
        int32_t *changed = &tokens[LENGTH + t], old = *changed;
        *changed = (int32_t)((old + 11) % V);
        FT_TRY(get_logits(ctx, model, ROWS, LENGTH, tokens, 0, after));
        *changed = old;
        for (int64_t at = 0; at < ROWS * LENGTH; at++) {
            size_t bytes = (size_t)V * sizeof(float);
            int same = memcmp(before + at * V, after + at * V, bytes) == 0;
            int seen = at >= LENGTH + t && at < 2 * LENGTH;
            REQUIRE(same == !seen);
        }
    }
    return FT_OK;
}

static void test_logits_are_causal(void **state)
{
    bench b = bench_default(check_causality);
    (void)state;
    b.config.init_std = 0.2; /* so that far tokens show in fp32 */
    bench_run(&b);
}

/* ---- what is refused ---- */

static ft_status check_refusals(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    int32_t values[2 * 17];
    int64_t shape[2];
    ft_tensor *ok, *large, *other, *floats, *out;
    ft_tape *tape = NULL;
    (void)zero;
    (void)b;
    memset(values, 0, sizeof values);
    FT_TRY(upload_tokens(ctx, 2, 16, values, &ok));
    FT_TRY(upload_tokens(ctx, 2, 17, values, &large));
    FT_TRY(upload_tokens(ctx, 1, 16, values, &other));
    shape[0] = 2;
    shape[1] = 16;
    FT_TRY(ft_tensor_create(ctx, &floats, FT_F32, 2, shape, FT_TAG_OTHER));
    REQUIRE(ft_llama_loss(model, large, large, NULL, NULL, &out) == FT_ERR_SHAPE);
    REQUIRE(strstr(ft_last_error(), "[2,17]") && strstr(ft_last_error(), "at most 16 tokens"));
    REQUIRE(ft_llama_logits(model, large, 1, &out) == FT_ERR_SHAPE);
    REQUIRE(ft_llama_loss(model, ok, other, NULL, NULL, &out) == FT_ERR_SHAPE);
    REQUIRE(strstr(ft_last_error(), "[1,16]"));
    REQUIRE(ft_llama_loss(model, floats, ok, NULL, NULL, &out) == FT_ERR_SHAPE);
    REQUIRE(ft_llama_loss(model, ok, floats, NULL, NULL, &out) == FT_ERR_SHAPE);
    REQUIRE(ft_llama_loss(model, NULL, ok, NULL, NULL, &out) == FT_ERR_ARG);
    REQUIRE(ft_llama_logits(model, NULL, 0, &out) == FT_ERR_ARG);
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    REQUIRE(ft_llama_logits(model, ok, 0, &out) == FT_ERR_STATE);
    REQUIRE(strstr(ft_last_error(), "tape"));
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_llama_logits(model, ok, 0, &out)); /* nothing was left half done */
    ft_tensor_free(out);
    return FT_OK;
}

static void test_bad_calls_are_refused(void **state)
{
    bench b = bench_default(check_refusals);
    (void)state;
    b.max_tokens = 16;
    bench_run(&b);
}

static ft_status never(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    (void)ctx; (void)zero; (void)model; (void)b;
    return ft_error(FT_ERR_STATE, "a model was made of a bad config");
}

static void test_create_checks_its_config(void **state)
{
    bench b = bench_default(never);
    (void)state;
    b.config.kv_heads = 3;
    assert_int_equal(bench_launch(&b), FT_ERR_ARG);
    assert_non_null(strstr(ft_last_error(), "3 kv heads"));
    b = bench_default(never);
    b.max_tokens = 0;
    assert_int_equal(bench_launch(&b), FT_ERR_ARG);
    assert_non_null(strstr(ft_last_error(), "max_tokens"));
    b.max_tokens = INT64_C(1) << 40;
    assert_int_equal(bench_launch(&b), FT_ERR_ARG);
}

/* ---- the life of activations ---- */

static size_t floats(int64_t n) { return ft_accounted_bytes((size_t)n * sizeof(float)); }

static size_t live_act(const ft_ctx *ctx)
{
    ft_mem_stats stats;
    ft_mem_get(ctx, &stats);
    return stats.live[FT_TAG_ACT];
}

/* Bytes of fp32 activations that a layer keeps for backward, by what the policy leaves. */
static size_t layer_act(const ft_llama_config *c, int64_t N, ft_sac_kind sac)
{
    int64_t C = c->hidden, D = c->head_dim, F = c->intermediate;
    size_t x = floats(N * C), qkv = floats(N * (c->heads + 2 * c->kv_heads) * D);
    size_t o = floats(N * c->heads * D), lse = floats(N * c->heads);
    size_t kept = 2 * x + qkv + o + lse + floats(N * 2 * F); /* x, r, qkv, o, gu */
    if (sac == FT_SAC_FULL) return x;
    if (sac == FT_SAC_SELECTIVE) return kept;
    return kept + 2 * x + floats(N * F) + (c->qk_norm ? qkv : 0); /* y, y2, p */
}

static ft_status check_boundary(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    enum { B = 3, T = 10 };
    int64_t N = B * T;
    int32_t values[B * T];
    ft_tensor *tokens, *loss, *scale;
    ft_tape *tape = NULL;
    ft_sac sac[2];
    ft_llama_config c = b->config;
    FT_TRY(ft_llama_check(&c));
    memset(values, 0, sizeof values);
    memset(sac, 0, sizeof sac);
    sac[0].kind = sac[1].kind = *(ft_sac_kind *)b->user;
    FT_TRY(upload_tokens(ctx, B, T, values, &tokens));
    FT_TRY(ft_tape_create(ctx, &tape));
    for (int step = 0; step < 2; step++) {
        REQUIRE(live_act(ctx) == 0);
        FT_TRY(ft_zero_step_begin(zero, 1, N, &scale));
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(ft_llama_loss(model, tokens, tokens, scale, sac, &loss));
        FT_TRY(ft_tape_end(tape));
        /* The layers', and the input and output of the final norm. */
        size_t expected = 2 * layer_act(&c, N, sac[0].kind) + 2 * floats(N * c.hidden);
        if (live_act(ctx) != expected)
            return ft_error(FT_ERR_STATE, "%zu bytes of act at the boundary, expected %zu (policy "
                            "%d)", live_act(ctx), expected, (int)sac[0].kind);
        FT_TRY(ft_backward(tape, loss, NULL));
        FT_TRY(ft_zero_add_loss(zero, loss));
        ft_tensor_free(loss);
        REQUIRE(live_act(ctx) == 0);
        FT_TRY(ft_zero_step_end(zero, 1e-3));
    }
    return FT_OK;
}

static void test_activations_between_forward_and_backward(void **state)
{
    static ft_sac_kind kinds[] = {FT_SAC_NONE, FT_SAC_SELECTIVE, FT_SAC_FULL};
    bench b = bench_default(check_boundary);
    (void)state;
    for (int i = 0; i < 3; i++)
        for (int meta = 0; meta <= 1; meta++) {
            b.config = tiny_config();
            b.device = meta ? FT_META : FT_CPU;
            b.user = &kinds[i];
            bench_run(&b);
            b.config.qk_norm = 1;
            if (kinds[i] != FT_SAC_SELECTIVE) bench_run(&b);
        }
}

/* Without a tape nothing is kept at all. Where the feed-forward is widest, r, gu and p are alive
   and nothing else; logits of the last token never cost those of all. */
static ft_status check_evaluation(ft_ctx *ctx, ft_zero *zero, ft_llama *model, bench *b)
{
    enum { B = 3, T = 10 };
    int64_t N = B * T, C = b->config.hidden, F = b->config.intermediate, V = b->config.vocab;
    int32_t values[B * T];
    ft_tensor *tokens, *out;
    ft_mem_stats stats;
    (void)zero;
    memset(values, 0, sizeof values);
    FT_TRY(upload_tokens(ctx, B, T, values, &tokens));
    FT_TRY(ft_llama_logits(model, tokens, 1, &out));
    REQUIRE(live_act(ctx) == floats(B * V));
    ft_tensor_free(out);
    ft_mem_get(ctx, &stats);
    REQUIRE(stats.highest[FT_TAG_ACT] == floats(N * C) + floats(N * 2 * F) + floats(N * F));
    FT_TRY(ft_llama_loss(model, tokens, tokens, NULL, NULL, &out));
    REQUIRE(live_act(ctx) == floats(1));
    ft_tensor_free(out);
    REQUIRE(live_act(ctx) == 0);
    FT_TRY(ft_llama_logits(model, tokens, 0, &out));
    REQUIRE(live_act(ctx) == floats(N * V));
    ft_tensor_free(out);
    REQUIRE(live_act(ctx) == 0);
    return FT_OK;
}

static void test_evaluation_keeps_nothing(void **state)
{
    bench b = bench_default(check_evaluation);
    (void)state;
    b.config.intermediate = 8 * b.config.hidden;
    for (int meta = 0; meta <= 1; meta++) {
        b.device = meta ? FT_META : FT_CPU;
        b.config.qk_norm = meta;
        bench_run(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config_defaults),
        cmocka_unit_test(test_config_sizes_that_are_refused),
        cmocka_unit_test(test_config_settings_that_are_refused),
        cmocka_unit_test(test_totals_of_known_models),
        cmocka_unit_test(test_names_and_shapes),
        cmocka_unit_test(test_list_tiles_the_model),
        cmocka_unit_test(test_initial_weights),
        cmocka_unit_test(test_initial_weights_do_not_depend_on_the_layout),
        cmocka_unit_test(test_seeds_that_differ_are_refused),
        cmocka_unit_test(test_hash_sees_every_weight),
        cmocka_unit_test(test_entries_are_checked),
        cmocka_unit_test(test_grouped_heads_against_float64),
        cmocka_unit_test(test_gathered_weights_against_float64),
        cmocka_unit_test(test_every_switch_against_float64),
        cmocka_unit_test(test_llama3_frequencies_against_float64),
        cmocka_unit_test(test_logits_of_the_last_token),
        cmocka_unit_test(test_logits_are_causal),
        cmocka_unit_test(test_bad_calls_are_refused),
        cmocka_unit_test(test_create_checks_its_config),
        cmocka_unit_test(test_activations_between_forward_and_backward),
        cmocka_unit_test(test_evaluation_keeps_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
