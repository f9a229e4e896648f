/* femtotron_llama.h: Llama-family language models out of Femtotron's ops and ZeRO units.

   Do this, in ONE C or C++ file of your program (elsewhere without the macro):

       #define FEMTOTRON_IMPLEMENTATION
       #include "femtotron.h"
       #include "femtotron_zero.h"
       #include "femtotron_llama.h"

   Then, on every rank, a model and a training step (error checks left out):

       ft_llama_config config = ft_llama_config_default();
       ft_llama_create(ctx, zero, &config, 1024, 42, &model);

       ft_zero_step_begin(zero, 1, counted, &scale);
       ft_tape_begin(tape);
       ft_llama_loss(model, tokens, labels, scale, NULL, &loss);
       ft_tape_end(tape);
       ft_backward(tape, loss, NULL);
       ft_zero_add_loss(zero, loss);
       ft_tensor_free(loss);
       ft_zero_step_end(zero, lr);

   WHAT IT DOES NOT DO
     No dropout, no sliding window, no mixture of experts, no padding mask (ignore a token by its
     label, -100), no documents packed in a row with masks between them, no key-value cache: each
     call of ft_llama_logits computes all of its tokens. It reads and writes no files: see
     femtotron_io.h. One rank holds or gathers whole layers; the weights are not cut by head or
     column.

   CONTENTS  (find a part by searching for its mark)
     Declarations                            Implementation
       >>config    sizes and switches          >>config.impl
       >>model     create, loss, logits        >>describe.impl, >>init.impl, >>forward.impl
       >>params    Hugging Face names, hash    >>params.impl

   OPTIONS  (define before the include that has the implementation)
     FEMTOTRON_LLAMA_IMPLEMENTATION   the implementation of this header alone. Default: off;
                   FEMTOTRON_IMPLEMENTATION switches on that of every header.
     All else is in ft_llama_config.

   CONCEPTS
     model     Touvron et al. 2023 (Llama), with grouped kv heads (Ainslie et al. 2023). Pre-norm
               blocks, x + attention(norm(x)), then x + mlp(norm(x)); RMSNorm, RoPE, SwiGLU. The
               switches add what relatives have: biases on q, k, v (Qwen2), RMSNorm of each query
               and key head (Qwen3), Llama 3.1's scaled frequencies, a head tied to the embedding.
     unit      What ZeRO gathers and reduces at a time. In the order of forward: "embedding";
               "layer.0", "layer.1", ...; "final" (the last norm and, if untied, the head).
     pack      Weights that one GEMM reads lie in one tensor: q, k, v rows in `qkv`; gate and up
               rows in `gate_up`. Hugging Face's tensors are runs of rows of it (ft_llama_param).
     decay     Tensors of two dimensions decay, norms and biases do not. In a unit the former come
               first, so that each shard has few borders between the two.

       pack, under "model.layers.N."             shape             Hugging Face's, by rows
       self_attn.qkv_proj.weight                 [(H+2K)D, C]      q_proj, k_proj, v_proj
       self_attn.o_proj.weight                   [C, HD]           itself
       mlp.gate_up_proj.weight                   [2F, C]           gate_proj, up_proj
       mlp.down_proj.weight                      [C, F]            itself
       input_layernorm.weight                    [C]               itself
       self_attn.qkv_proj.bias                   [(H+2K)D]         q_proj, k_proj, v_proj
       self_attn.{q,k}_norm.weight               [D]               itself
       self_attn.o_proj.bias                     [C]               itself
       post_attention_layernorm.weight           [C]               itself
       mlp.gate_up_proj.bias, mlp.down_proj.bias [2F], [C]         gate_proj, up_proj; itself

   A LAYER'S FORWARD, and the life of every tensor
     A handle is freed at its last use, so that what backward does not read is gone at once. `x` is
     the residual stream. Each line: op, shape, and what frees it. On a tape, tensors that backward
     reads (marked *) stay until then, unless the recompute policy drops them at the segment's end.

       x                                   [B,T,C]   *  from the layer below
       y   = rmsnorm(x)                    [B,T,C]   *  dies at qkv
       qkv = y Wqkv^T (+ bias)        [B,T,(H+2K)D]     rope takes its storage over
       [qkv2 = head_norm(qkv)              the same     with qk_norm: in between; then qkv is a *]
       qkv = rope(qkv), in place           the same  *  dies at o
       o   = attention(qkv)               [B,T,HD]   *  dies at a; and 4 bytes a head and token
       a   = o Wo^T (+ bias)               [B,T,C]      dies at r
       r, y2 = x + a, rmsnorm(r)         2 x [B,T,C] *  x and a die here; y2 at gu
       gu  = y2 Wgate_up^T (+ bias)       [B,T,2F]   *  dies at p
       p   = swiglu(gu)                    [B,T,F]   *  dies at d
       d   = p Wdown^T (+ bias)            [B,T,C]      x' takes its storage over
       x'  = d + r, in place               [B,T,C]      to the layer above; r dies here

   COSTS
     Weights    V C (2 V C untied) + C + L (2 (H+K) D C + 3 C F + 2 C), plus biases and head norms:
                ft_llama_param_total.
     Flops      2 for each weight of two dimensions but the embedding, a token and forward; backward
                twice that. Attention 2 B H T^2 D a layer forward, 5 B H T^2 D backward.
     Memory     Of bf16 activations kept for backward, a layer: 8C + 4(H+K)D + 6F + 4H bytes a
                token; qk_norm adds 2(H+2K)D. What a recompute policy leaves: ft_segment_begin.
                Logits exist for loss_chunk_tokens tokens at a time. The RoPE table is
                4 max_tokens D bytes (tag other), one a model.
     Traffic    That of femtotron_zero.h; a tied head makes ZeRO-3 gather the embedding once more.

   INITIALISATION
     Tensors of two dimensions: normal with mean 0 and deviation init_std. Residual-output
     projections (o_proj and down_proj, 2L of them write to the residual stream) have init_std /
     sqrt(2L) instead (Radford et al. 2019, section 2.3). Norms are 1, biases 0. Element i of a
     tensor is a function of (seed, Hugging Face name, i) alone: no generator is advanced, so
     neither ranks, stages, packing nor order change a weight.
       key = mix(seed XOR fnv1a(name));  u1, u2 = uniform(mix(key + (2i+1) g)), uniform(mix(key +
       (2i+2) g));  weight = std sqrt(-2 ln u1) cos(2 pi u2)
     with mix and the odd number g of SplitMix64 (Steele, Lea and Flood 2014), Box and Muller 1958.

   OWNERSHIP, THREADS, ERRORS
     The model belongs to the context and goes with it, and so do ft_llama_param entries; one thread
     uses both. Functions marked collective must be called alike by all ranks. On an error nothing
     is cleaned up: return the status, and the launch frees the rest.

   LETTERS  B batch, T tokens of a sequence, C hidden, H query heads, K kv heads, D head size,
            F feed-forward (intermediate), V vocabulary, L layers.

   License: MIT, see LICENSE. */

#ifndef FEMTOTRON_LLAMA_H
#define FEMTOTRON_LLAMA_H

#ifndef FEMTOTRON_ZERO_H
#error "femtotron_llama.h builds on two headers: include femtotron.h, femtotron_zero.h first"
#endif

/* ------------------------------------------------------------------------------------ >>config */

typedef struct ft_llama_config {
    int64_t vocab, hidden, layers, heads, kv_heads, head_dim, intermediate;
    int tie_embeddings;        /* 1: the head is the embedding table */
    int qkv_bias, o_bias, mlp_bias;
    int qk_norm;               /* RMSNorm of each query and key head before RoPE (Qwen3) */
    double norm_eps;           /* default 1e-5 */
    double rope_theta;         /* default 10000 */
    ft_rope_scaling rope_scaling;
    double init_std;           /* default 0.02; 0: weights of two dimensions start at 0 */
    int64_t loss_chunk_tokens; /* 0: ft_linear_cross_entropy's default */
} ft_llama_config;

FT_API ft_llama_config ft_llama_config_default(void);
/* vocab 256, hidden 128, 4 layers, 4 heads, 4 kv heads; 0 in head_dim: hidden / heads; 0 in
   kv_heads: heads; 0 in intermediate: 8/3 hidden rounded up to a multiple of 32. */
FT_API ft_status ft_llama_check(ft_llama_config *config);
/* Fills in those zeros (and the defaults for 0 in norm_eps and rope_theta) and refuses what cannot
   be built, naming the sizes: a size that is not in 1 .. 2^31 - 1, heads that are no multiple of
   kv_heads, an odd head_dim, hidden that is no multiple of heads where head_dim is not given, more
   than 2^57 weights, settings that are not finite or out of range. */
FT_API int64_t ft_llama_param_total(const ft_llama_config *config);
/* Number of weights of the model, a tied head counted once; 0, with the error set, for a config
   that ft_llama_check refuses. */

/* ------------------------------------------------------------------------------------- >>model */

typedef struct ft_llama ft_llama;

FT_API ft_status ft_llama_create(ft_ctx *ctx, ft_zero *zero, const ft_llama_config *config,
                                 int64_t max_tokens, uint64_t seed, ft_llama **out);
/* Describes the model to `zero` (units: embedding; each layer; final norm + head, the head only if
   untied), commits it, and initialises: a function of (seed, name, element index). max_tokens
   bounds the T of later calls. Collective over the world (group "llama", no traffic): FT_ERR_COMM
   unless all ranks pass the same seed, config and max_tokens. `zero` must have no units yet. */

FT_API ft_status ft_llama_loss(ft_llama *model, ft_tensor *tokens, ft_tensor *labels,
                               ft_tensor *scale, const ft_sac *sac, ft_tensor **loss);
/* tokens, labels int32 [B,T], T <= max_tokens: labels[b,t] is the token that follows tokens[b,t],
   or -100 where none counts. sac[layers] is the recompute policy of each layer, NULL for none.
   *loss fp32 [1] = scale * sum of -log p(label); scale [1] as ft_zero_step_begin gives it, NULL:
   1 / (number of counted labels). Records on the current tape, one segment a layer; without a tape
   it only evaluates. A collective call in ZeRO-3, which gathers. */
FT_API ft_status ft_llama_logits(ft_llama *model, ft_tensor *tokens, int last_only,
                                 ft_tensor **logits);
/* [B,T,V], or [B,1,V] of the last token only, in the model's dtype; the caller frees it. For
   evaluation: FT_ERR_STATE while a tape records. Whole logits are B T V elements of act. A
   collective call in ZeRO-3. */

/* ------------------------------------------------------------------------------------ >>params */

/* A parameter under its Hugging Face name: rows of a packed tensor. */
typedef struct ft_llama_param {
    char name[80];         /* "model.layers.0.self_attn.q_proj.weight" */
    int ndim;
    int64_t shape[2];      /* shape[1] is 1 where ndim is 1 */
    ft_tensor *pack;       /* the tensor that holds it */
    int64_t first_elem;    /* where it starts in the pack */
} ft_llama_param;

FT_API int ft_llama_param_count(const ft_llama *model);
FT_API const ft_llama_param *ft_llama_param_at(const ft_llama *model, int index);
/* In canonical order: embedding, layers from 0, norm, head; a tied head is not listed. In a layer:
   input norm; q, k, v weights; their biases; q, k norms; o weight, bias; post-attention norm; gate,
   up weights; their biases; down weight, bias. NULL outside 0..count-1. */
FT_API const ft_llama_param *ft_llama_param_find(const ft_llama *model, const char *name);
/* NULL if the model has none of that name (no error is set). Linear in the parameters. */

FT_API ft_status ft_llama_export(ft_llama *model, const ft_llama_param *param, float *values);
/* values[shape] = fp32 master weights, on every rank; NULL on ranks that do not want them. A
   collective call. */
FT_API ft_status ft_llama_import(ft_llama *model, const ft_llama_param *param, const float *values);
/* Sets master and parameter; the same values on all ranks. Optimizer state is untouched. A
   collective call. */
FT_API ft_status ft_llama_export_grad(ft_llama *model, const ft_llama_param *param, float *values);
/* The reduced gradient, between the last backward of a step and ft_zero_step_end. A collective
   call. */
FT_API ft_status ft_llama_hash(ft_llama *model, uint64_t *hash);
/* FNV-1a, 64 bit, over the little-endian bytes of the fp32 master weights in canonical order, so
   independent of the layout. Streamed: 256 KiB of host memory. A collective call. On meta, where no
   weight has a value, that of zeros. */

#endif /* FEMTOTRON_LLAMA_H */

#if defined(FEMTOTRON_IMPLEMENTATION) || defined(FEMTOTRON_LLAMA_IMPLEMENTATION)
#ifndef FT__LLAMA_IMPLEMENTED
#define FT__LLAMA_IMPLEMENTED

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------------------------- >>config.impl */

FT_API ft_llama_config ft_llama_config_default(void)
{
    ft_llama_config c;
    memset(&c, 0, sizeof c);
    c.vocab = 256;
    c.hidden = 128;
    c.layers = 4;
    c.heads = 4;
    c.kv_heads = 4;
    c.norm_eps = 1e-5;
    c.rope_theta = 10000.0;
    c.init_std = 0.02;
    return c;
}

/* Without `zero_ok` a size must be given; INT32_MAX keeps sums of a few sizes far from overflow. */
static ft_status ft__llama_size(const char *name, int64_t value, int zero_ok)
{
    if (value >= !zero_ok && value <= INT32_MAX) return FT_OK;
    return ft_error(FT_ERR_ARG, "llama: %s is %lld; it must be %s1 to %d", name, (long long)value,
                    zero_ok ? "0 (then a default is taken) or " : "", INT32_MAX);
}

/* false for NaN too */
static int ft__llama_within(double value, double least, double most)
{
    return value >= least && value <= most;
}

static ft_status ft__llama_check_settings(ft_llama_config *c)
{
    const ft_rope_scaling *s = &c->rope_scaling;
    if (c->norm_eps == 0) c->norm_eps = 1e-5;
    if (c->rope_theta == 0) c->rope_theta = 10000.0;
    if (!ft__llama_within(c->norm_eps, 0, 1))
        return ft_error(FT_ERR_ARG, "llama: norm_eps is %g; it must be in 0..1", c->norm_eps);
    if (!ft__llama_within(c->rope_theta, 1, 1e30))
        return ft_error(FT_ERR_ARG, "llama: rope_theta is %g; it must be at least 1 and finite",
                        c->rope_theta);
    if (!ft__llama_within(c->init_std, 0, 1e6))
        return ft_error(FT_ERR_ARG, "llama: init_std is %g; it must be 0 or more and finite",
                        c->init_std);
    if (c->loss_chunk_tokens < 0)
        return ft_error(FT_ERR_ARG, "llama: loss_chunk_tokens is %lld; it must be 0 (the default) "
                        "or more", (long long)c->loss_chunk_tokens);
    if (s->factor == 0 || s->factor == 1) return FT_OK;
    if (ft__llama_within(s->factor, 1, 1e9) && ft__llama_within(s->low_freq_factor, 1e-9, 1e9) &&
        ft__llama_within(s->high_freq_factor, 1e-9, 1e9) &&
        s->high_freq_factor > s->low_freq_factor && s->original_context > 0)
        return FT_OK;
    return ft_error(FT_ERR_ARG, "llama: rope_scaling has factor %g, low_freq_factor %g, "
                    "high_freq_factor %g, original_context %lld; it needs factor >= 1, 0 < low < "
                    "high, and a positive context (factor 0: no scaling)", s->factor,
                    s->low_freq_factor, s->high_freq_factor, (long long)s->original_context);
}

static ft_status ft__llama_fill_sizes(ft_llama_config *c)
{
    if (c->kv_heads == 0) c->kv_heads = c->heads;
    if (c->heads % c->kv_heads)
        return ft_error(FT_ERR_ARG, "llama: %lld heads are not divisible by %lld kv heads; each kv "
                        "head serves the same number of query heads", (long long)c->heads,
                        (long long)c->kv_heads);
    if (c->head_dim == 0) {
        if (c->hidden % c->heads)
            return ft_error(FT_ERR_ARG, "llama: hidden %lld is not divisible by %lld heads; change "
                            "one of them, or give head_dim", (long long)c->hidden,
                            (long long)c->heads);
        c->head_dim = c->hidden / c->heads;
    }
    if (c->head_dim % 2)
        return ft_error(FT_ERR_ARG, "llama: head_dim %lld is odd (hidden %lld, %lld heads); RoPE "
                        "rotates pairs, so it must be even", (long long)c->head_dim,
                        (long long)c->hidden, (long long)c->heads);
    if (c->intermediate == 0) c->intermediate = ((8 * c->hidden + 2) / 3 + 31) / 32 * 32;
    return FT_OK;
}

/* The weights, counted in T: in double to see whether the count fits, then exactly. */
#define FT__LLAMA_TOTAL(T, c)                                                                      \
    ((T)(c)->vocab * (T)(c)->hidden * (T)((c)->tie_embeddings ? 1 : 2) + (T)(c)->hidden +          \
     (T)(c)->layers *                                                                              \
         ((T)((c)->heads + 2 * (c)->kv_heads) * (T)(c)->head_dim *                                 \
              (T)((c)->hidden + ((c)->qkv_bias ? 1 : 0)) +                                         \
          (T)(c)->hidden * ((T)(c)->heads * (T)(c)->head_dim + (T)((c)->o_bias ? 1 : 0)) +         \
          (T)3 * (T)(c)->hidden * (T)(c)->intermediate +                                           \
          (T)((c)->mlp_bias ? 2 * (c)->intermediate + (c)->hidden : 0) +                           \
          (T)2 * (T)(c)->hidden + (T)((c)->qk_norm ? 2 * (c)->head_dim : 0)))

FT_API ft_status ft_llama_check(ft_llama_config *c)
{
    if (!c) return ft_error(FT_ERR_ARG, "ft_llama_check: config is NULL");
    FT_TRY(ft__llama_size("vocab", c->vocab, 0));
    FT_TRY(ft__llama_size("hidden", c->hidden, 0));
    FT_TRY(ft__llama_size("layers", c->layers, 0));
    FT_TRY(ft__llama_size("heads", c->heads, 0));
    FT_TRY(ft__llama_size("kv_heads", c->kv_heads, 1));
    FT_TRY(ft__llama_size("head_dim", c->head_dim, 1));
    FT_TRY(ft__llama_size("intermediate", c->intermediate, 1));
    FT_TRY(ft__llama_fill_sizes(c));
    FT_TRY(ft__llama_check_settings(c));
    /* A double cannot wrap, and every product below is smaller than the whole: when the whole fits,
       no product of these sizes overflows 64 bits, not even in bytes. */
    if (FT__LLAMA_TOTAL(double, c) <= 144115188075855872.0 /* 2^57 */ &&
        c->layers <= (INT32_MAX - 3) / 16) /* parameters are counted in an int */
        return FT_OK;
    return ft_error(FT_ERR_ARG, "llama: too large: %.3g weights in %lld layers (vocab %lld, hidden "
                    "%lld, %lld heads, %lld kv heads, head_dim %lld, intermediate %lld)",
                    FT__LLAMA_TOTAL(double, c), (long long)c->layers, (long long)c->vocab,
                    (long long)c->hidden, (long long)c->heads, (long long)c->kv_heads,
                    (long long)c->head_dim, (long long)c->intermediate);
}

FT_API int64_t ft_llama_param_total(const ft_llama_config *config)
{
    ft_llama_config c;
    if (!config) {
        (void)ft_error(FT_ERR_ARG, "ft_llama_param_total: config is NULL");
        return 0;
    }
    c = *config;
    if (ft_llama_check(&c) != FT_OK) return 0;
    return FT__LLAMA_TOTAL(int64_t, &c);
}

/* ----------------------------------------------------------------------------- >>describe.impl */

typedef struct ft__llama_pack { /* one parameter of ZeRO */
    char name[80];
    ft_tensor *tensor;
    int normal;   /* 1: normal values with deviation `value`; 0: all are `value` */
    double value;
} ft__llama_pack;

typedef struct ft__llama_layer { /* absent ones are NULL, which is what ops take for "no bias" */
    char name[32];
    int unit;
    ft_tensor *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias;
    ft_tensor *post_norm, *gate_up, *gate_up_bias, *down, *down_bias;
} ft__llama_layer;

struct ft_llama {
    ft_ctx *ctx;
    ft_zero *zero;
    ft_llama_config config; /* checked: no zeros left */
    int64_t max_tokens;
    uint64_t seed;
    ft_tensor *rope;        /* [max_tokens, D/2, 2] */
    int embedding_unit, final_unit;
    ft_tensor *embedding, *norm, *head; /* head: the embedding, if tied */
    ft__llama_layer *layers;
    ft__llama_pack *packs;
    int n_packs;
    ft_llama_param *params;
    int n_params;
};

/* Adds a parameter to the open unit. cols 0: one dimension, which is not decayed. */
static ft_status ft__llama_add(ft_llama *m, const char *prefix, const char *name, int64_t rows,
                               int64_t cols, int normal, double value, ft_tensor **out)
{
    ft__llama_pack *pack = &m->packs[m->n_packs++];
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    snprintf(pack->name, sizeof pack->name, "%s%s", prefix, name);
    pack->normal = normal;
    pack->value = value;
    FT_TRY(ft_zero_param(m->zero, pack->name, cols ? 2 : 1, shape, cols ? FT_ZERO_DECAY : 0,
                         &pack->tensor));
    *out = pack->tensor;
    return FT_OK;
}

static ft_status ft__llama_matrix(ft_llama *m, const char *prefix, const char *name, int64_t rows,
                                  int64_t cols, double std, ft_tensor **out)
{
    return ft__llama_add(m, prefix, name, rows, cols, 1, std, out);
}

static ft_status ft__llama_vector(ft_llama *m, const char *prefix, const char *name, int64_t rows,
                                  double value, ft_tensor **out)
{
    return ft__llama_add(m, prefix, name, rows, 0, 0, value, out);
}

static ft_status ft__llama_describe_layer(ft_llama *m, int64_t index)
{
    const ft_llama_config *c = &m->config;
    ft__llama_layer *l = &m->layers[index];
    int64_t C = c->hidden, HD = c->heads * c->head_dim, F = c->intermediate;
    int64_t rows = HD + 2 * c->kv_heads * c->head_dim;
    double std = c->init_std, std_out = std / sqrt(2.0 * (double)c->layers);
    char at[48];
    snprintf(l->name, sizeof l->name, "layer.%lld", (long long)index);
    snprintf(at, sizeof at, "model.layers.%lld.", (long long)index);
    FT_TRY(ft_zero_unit(m->zero, l->name, &l->unit));
    FT_TRY(ft__llama_matrix(m, at, "self_attn.qkv_proj.weight", rows, C, std, &l->qkv));
    FT_TRY(ft__llama_matrix(m, at, "self_attn.o_proj.weight", C, HD, std_out, &l->o));
    FT_TRY(ft__llama_matrix(m, at, "mlp.gate_up_proj.weight", 2 * F, C, std, &l->gate_up));
    FT_TRY(ft__llama_matrix(m, at, "mlp.down_proj.weight", C, F, std_out, &l->down));
    FT_TRY(ft__llama_vector(m, at, "input_layernorm.weight", C, 1, &l->input_norm));
    FT_TRY(ft__llama_vector(m, at, "post_attention_layernorm.weight", C, 1, &l->post_norm));
    if (c->qkv_bias)
        FT_TRY(ft__llama_vector(m, at, "self_attn.qkv_proj.bias", rows, 0, &l->qkv_bias));
    if (c->qk_norm) {
        FT_TRY(ft__llama_vector(m, at, "self_attn.q_norm.weight", c->head_dim, 1, &l->q_norm));
        FT_TRY(ft__llama_vector(m, at, "self_attn.k_norm.weight", c->head_dim, 1, &l->k_norm));
    }
    if (c->o_bias) FT_TRY(ft__llama_vector(m, at, "self_attn.o_proj.bias", C, 0, &l->o_bias));
    if (!c->mlp_bias) return FT_OK;
    FT_TRY(ft__llama_vector(m, at, "mlp.gate_up_proj.bias", 2 * F, 0, &l->gate_up_bias));
    return ft__llama_vector(m, at, "mlp.down_proj.bias", C, 0, &l->down_bias);
}

/* Lists a Hugging Face tensor: rows first_row.. of a pack. A pack that is absent has none. */
static void ft__llama_list(ft_llama *m, const char *prefix, const char *name, ft_tensor *pack,
                           int64_t first_row, int64_t rows)
{
    if (!pack) return;
    ft_llama_param *p = &m->params[m->n_params++];
    snprintf(p->name, sizeof p->name, "%s%s", prefix, name);
    p->ndim = pack->ndim;
    p->shape[0] = rows;
    p->shape[1] = pack->ndim == 2 ? pack->shape[1] : 1;
    p->pack = pack;
    p->first_elem = first_row * p->shape[1];
}

static void ft__llama_list_layer(ft_llama *m, int64_t index)
{
    const ft_llama_config *c = &m->config;
    const ft__llama_layer *l = &m->layers[index];
    int64_t C = c->hidden, Q = c->heads * c->head_dim, KV = c->kv_heads * c->head_dim;
    int64_t D = c->head_dim, F = c->intermediate;
    char at[48];
    snprintf(at, sizeof at, "model.layers.%lld.", (long long)index);
    ft__llama_list(m, at, "input_layernorm.weight", l->input_norm, 0, C);
    ft__llama_list(m, at, "self_attn.q_proj.weight", l->qkv, 0, Q);
    ft__llama_list(m, at, "self_attn.k_proj.weight", l->qkv, Q, KV);
    ft__llama_list(m, at, "self_attn.v_proj.weight", l->qkv, Q + KV, KV);
    ft__llama_list(m, at, "self_attn.q_proj.bias", l->qkv_bias, 0, Q);
    ft__llama_list(m, at, "self_attn.k_proj.bias", l->qkv_bias, Q, KV);
    ft__llama_list(m, at, "self_attn.v_proj.bias", l->qkv_bias, Q + KV, KV);
    ft__llama_list(m, at, "self_attn.q_norm.weight", l->q_norm, 0, D);
    ft__llama_list(m, at, "self_attn.k_norm.weight", l->k_norm, 0, D);
    ft__llama_list(m, at, "self_attn.o_proj.weight", l->o, 0, C);
    ft__llama_list(m, at, "self_attn.o_proj.bias", l->o_bias, 0, C);
    ft__llama_list(m, at, "post_attention_layernorm.weight", l->post_norm, 0, C);
    ft__llama_list(m, at, "mlp.gate_proj.weight", l->gate_up, 0, F);
    ft__llama_list(m, at, "mlp.up_proj.weight", l->gate_up, F, F);
    ft__llama_list(m, at, "mlp.gate_proj.bias", l->gate_up_bias, 0, F);
    ft__llama_list(m, at, "mlp.up_proj.bias", l->gate_up_bias, F, F);
    ft__llama_list(m, at, "mlp.down_proj.weight", l->down, 0, C);
    ft__llama_list(m, at, "mlp.down_proj.bias", l->down_bias, 0, C);
}

/* Units and parameters in the order of forward, matrices before vectors. */
static ft_status ft__llama_describe(ft_llama *m)
{
    const ft_llama_config *c = &m->config;
    double std = c->init_std;
    FT_TRY(ft_zero_unit(m->zero, "embedding", &m->embedding_unit));
    FT_TRY(ft__llama_matrix(m, "model.", "embed_tokens.weight", c->vocab, c->hidden, std,
                            &m->embedding));
    for (int64_t i = 0; i < c->layers; i++) FT_TRY(ft__llama_describe_layer(m, i));
    FT_TRY(ft_zero_unit(m->zero, "final", &m->final_unit));
    m->head = m->embedding;
    if (!c->tie_embeddings)
        FT_TRY(ft__llama_matrix(m, "", "lm_head.weight", c->vocab, c->hidden, std, &m->head));
    FT_TRY(ft__llama_vector(m, "model.", "norm.weight", c->hidden, 1, &m->norm));

    ft__llama_list(m, "model.", "embed_tokens.weight", m->embedding, 0, c->vocab);
    for (int64_t i = 0; i < c->layers; i++) ft__llama_list_layer(m, i);
    ft__llama_list(m, "model.", "norm.weight", m->norm, 0, c->hidden);
    if (!c->tie_embeddings) ft__llama_list(m, "", "lm_head.weight", m->head, 0, c->vocab);
    return FT_OK;
}

/* --------------------------------------------------------------------------------- >>init.impl */

static uint64_t ft__llama_fnv(uint64_t hash, const void *bytes, size_t n)
{
    const unsigned char *p = (const unsigned char *)bytes;
    for (size_t i = 0; i < n; i++) hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static uint64_t ft__llama_fnv_begin(void) { return UINT64_C(0xcbf29ce484222325); }

static uint64_t ft__llama_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* In (0, 1]: 53 bits of a double, and never 0, of which there is no logarithm. */
static double ft__llama_uniform(uint64_t bits)
{
    return ((double)(bits >> 11) + 0.5) / 9007199254740992.0;
}

static float ft__llama_normal(uint64_t key, uint64_t element, double std)
{
    const uint64_t g = UINT64_C(0x9e3779b97f4a7c15);
    double u1 = ft__llama_uniform(ft__llama_mix(key + (2 * element + 1) * g));
    double u2 = ft__llama_uniform(ft__llama_mix(key + (2 * element + 2) * g));
    return (float)(std * sqrt(-2.0 * log(u1)) * cos(6.283185307179586 * u2));
}

/* The part of a pack's elements first..first+n-1 that belongs to one Hugging Face tensor. */
static void ft__llama_init_part(const ft_llama *m, const ft_llama_param *p, double std,
                                int64_t first, int64_t n, float *values)
{
    int64_t begin = p->first_elem, end = begin + p->shape[0] * p->shape[1];
    uint64_t key = ft__llama_fnv(ft__llama_fnv_begin(), p->name, strlen(p->name));
    key = ft__llama_mix(m->seed ^ key);
    if (begin < first) begin = first;
    if (end > first + n) end = first + n;
    for (int64_t i = begin; i < end; i++)
        values[i - first] = ft__llama_normal(key, (uint64_t)(i - p->first_elem), std);
}

static ft_status ft__llama_init(void *user, const char *name, int64_t first, int64_t n,
                                float *values)
{
    const ft_llama *m = (const ft_llama *)user;
    const ft__llama_pack *pack = NULL;
    for (int i = 0; i < m->n_packs && !pack; i++)
        if (strcmp(m->packs[i].name, name) == 0) pack = &m->packs[i];
    if (!pack)
        return ft_error(FT_ERR_STATE, "llama: asked to initialise %s, which is no parameter of the "
                        "model: give ft_llama_create a zero without units", name);
    if (!pack->normal || pack->value == 0) { /* a deviation of 0 gives zeros, without -0 */
        for (int64_t i = 0; i < n; i++) values[i] = (float)pack->value;
        return FT_OK;
    }
    for (int i = 0; i < m->n_params; i++)
        if (m->params[i].pack == pack->tensor)
            ft__llama_init_part(m, &m->params[i], pack->value, first, n, values);
    return FT_OK;
}

static uint64_t ft__llama_fnv_double(uint64_t hash, double value)
{
    return ft__llama_fnv(hash, &value, sizeof value);
}

/* Of all that replicas must share, field by field: structs have holes. */
static uint64_t ft__llama_config_hash(const ft_llama_config *c, int64_t max_tokens)
{
    int64_t sizes[15];
    uint64_t hash;
    sizes[0] = c->vocab; sizes[1] = c->hidden; sizes[2] = c->layers; sizes[3] = c->heads;
    sizes[4] = c->kv_heads; sizes[5] = c->head_dim; sizes[6] = c->intermediate;
    sizes[7] = c->tie_embeddings != 0; sizes[8] = c->qkv_bias != 0; sizes[9] = c->o_bias != 0;
    sizes[10] = c->mlp_bias != 0; sizes[11] = c->qk_norm != 0; sizes[12] = c->loss_chunk_tokens;
    sizes[13] = c->rope_scaling.original_context; sizes[14] = max_tokens;
    hash = ft__llama_fnv(ft__llama_fnv_begin(), sizes, sizeof sizes);
    hash = ft__llama_fnv_double(hash, c->norm_eps);
    hash = ft__llama_fnv_double(hash, c->rope_theta);
    hash = ft__llama_fnv_double(hash, c->rope_scaling.factor);
    hash = ft__llama_fnv_double(hash, c->rope_scaling.low_freq_factor);
    hash = ft__llama_fnv_double(hash, c->rope_scaling.high_freq_factor);
    return ft__llama_fnv_double(hash, c->init_std);
}

/* Replicas that start from different seeds would train on as if nothing were wrong. */
static ft_status ft__llama_agree(ft_ctx *ctx, const ft_llama *m)
{
    int world = ft_world(ctx);
    ft_group *group;
    int *ranks = (int *)ft_host_alloc(ctx, (size_t)world * sizeof *ranks);
    if (!ranks) return FT_ERR_OOM;
    for (int i = 0; i < world; i++) ranks[i] = i;
    FT_TRY(ft_group_create(ctx, "llama", world, ranks, &group));
    ft_host_free(ctx, ranks);
    FT_TRY(ft_agree(group, "seed of ft_llama_create", m->seed));
    return ft_agree(group, "config of ft_llama_create (a hash of all its fields and max_tokens)",
                    ft__llama_config_hash(&m->config, m->max_tokens));
}

static ft_status ft__llama_alloc(ft_ctx *ctx, ft_llama *m)
{
    size_t L = (size_t)m->config.layers;
    m->layers = (ft__llama_layer *)ft_host_alloc(ctx, L * sizeof *m->layers);
    if (!m->layers) return FT_ERR_OOM;
    m->packs = (ft__llama_pack *)ft_host_alloc(ctx, (12 * L + 3) * sizeof *m->packs);
    if (!m->packs) return FT_ERR_OOM;
    m->params = (ft_llama_param *)ft_host_alloc(ctx, (18 * L + 3) * sizeof *m->params);
    return m->params ? FT_OK : FT_ERR_OOM;
}

FT_API ft_status ft_llama_create(ft_ctx *ctx, ft_zero *zero, const ft_llama_config *config,
                                 int64_t max_tokens, uint64_t seed, ft_llama **out)
{
    if (!ctx || !zero || !config || !out)
        return ft_error(FT_ERR_ARG, "ft_llama_create: ctx, zero, config or out is NULL");
    ft_llama_config checked = *config;
    FT_TRY(ft_llama_check(&checked));
    FT_TRY(ft__llama_size("max_tokens", max_tokens, 0));
    ft_llama *m = (ft_llama *)ft_host_alloc(ctx, sizeof *m);
    if (!m) return FT_ERR_OOM;
    m->ctx = ctx;
    m->zero = zero;
    m->config = checked;
    m->max_tokens = max_tokens;
    m->seed = seed;
    FT_TRY(ft__llama_agree(ctx, m));
    FT_TRY(ft__llama_alloc(ctx, m));
    FT_TRY(ft__llama_describe(m));
    FT_TRY(ft_zero_commit(zero, ft__llama_init, m));
    FT_TRY(ft_rope_table(ctx, &m->rope, max_tokens, checked.head_dim, checked.rope_theta,
                         &checked.rope_scaling));
    *out = m;
    return FT_OK;
}

/* ------------------------------------------------------------------------------ >>forward.impl */

static ft_status ft__llama_check_tokens(const ft_llama *m, const char *who, const char *what,
                                        const ft_tensor *t)
{
    if (!t) return ft_error(FT_ERR_ARG, "%s: %s is NULL", who, what);
    if (t->dtype != FT_I32 || t->ndim != 2)
        return ft_error(FT_ERR_SHAPE, "%s: %s must be int32 [B,T]; it is %s with %d dimensions",
                        who, what, ft_dtype_name(t->dtype), t->ndim);
    if (t->shape[1] > m->max_tokens)
        return ft_error(FT_ERR_SHAPE, "%s: %s is [%lld,%lld], but the model was created for at "
                        "most %lld tokens a row: pass a larger max_tokens to ft_llama_create, or "
                        "shorter rows", who, what, (long long)t->shape[0], (long long)t->shape[1],
                        (long long)m->max_tokens);
    return FT_OK;
}

/* a = attention's contribution to the residual stream x, which stays the caller's. [B,T,C] both. */
static ft_status ft__llama_attention(const ft_llama *m, const ft__llama_layer *l, ft_tensor *x,
                                     ft_tensor **a)
{
    const ft_llama_config *c = &m->config;
    ft_ctx *ctx = m->ctx;
    ft_tensor *y, *qkv, *o;
    FT_TRY(ft_rmsnorm(ctx, &y, x, l->input_norm, c->norm_eps));
    FT_TRY(ft_linear(ctx, &qkv, y, l->qkv, l->qkv_bias));
    ft_tensor_free(y);
    if (c->qk_norm) {
        ft_tensor *raw = qkv;
        FT_TRY(ft_head_norm(ctx, &qkv, raw, l->q_norm, l->k_norm, c->heads, c->kv_heads,
                            c->head_dim, c->norm_eps));
        ft_tensor_free(raw);
    }
    ft_tensor *rotated;
    FT_TRY(ft_rope(ctx, &rotated, qkv, m->rope, c->heads, c->kv_heads, c->head_dim));
    FT_TRY(ft_attention(ctx, &o, rotated, c->heads, c->kv_heads, c->head_dim));
    ft_tensor_free(rotated);
    FT_TRY(ft_linear(ctx, a, o, l->o, l->o_bias));
    ft_tensor_free(o);
    return FT_OK;
}

/* *d = down(swiglu(gate_up(y))); y [B,T,C] is used up. */
static ft_status ft__llama_mlp(const ft_llama *m, const ft__llama_layer *l, ft_tensor *y,
                               ft_tensor **d)
{
    ft_tensor *gu, *p;
    FT_TRY(ft_linear(m->ctx, &gu, y, l->gate_up, l->gate_up_bias));
    ft_tensor_free(y);
    FT_TRY(ft_swiglu(m->ctx, &p, gu));
    ft_tensor_free(gu);
    FT_TRY(ft_linear(m->ctx, d, p, l->down, l->down_bias));
    ft_tensor_free(p);
    return FT_OK;
}

/* One layer: *x [B,T,C] is used up and replaced. */
static ft_status ft__llama_layer_forward(const ft_llama *m, const ft__llama_layer *l, ft_sac sac,
                                         ft_tensor **x)
{
    ft_ctx *ctx = m->ctx;
    ft_tensor *a, *r, *y, *d, *next;
    FT_TRY(ft_zero_enter(m->zero, l->unit, 0));
    FT_TRY(ft_segment_begin(ctx, l->name, sac));
    FT_TRY(ft__llama_attention(m, l, *x, &a));
    FT_TRY(ft_add_rmsnorm(ctx, &r, &y, *x, a, l->post_norm, m->config.norm_eps));
    ft_tensor_free(*x);
    ft_tensor_free(a);
    FT_TRY(ft__llama_mlp(m, l, y, &d));
    FT_TRY(ft_add_inplace(ctx, &next, d, r)); /* over d; r's last use */
    ft_tensor_free(r);
    FT_TRY(ft_segment_end(ctx, 1, &next));
    FT_TRY(ft_zero_leave(m->zero, l->unit));
    *x = next;
    return FT_OK;
}

/* Embedding and layers: tokens [B,T] -> *x [B,T,C], not yet normed. */
static ft_status ft__llama_stack(const ft_llama *m, ft_tensor *tokens, const ft_sac *sac,
                                 ft_tensor **x)
{
    ft_sac none;
    memset(&none, 0, sizeof none);
    FT_TRY(ft_zero_enter(m->zero, m->embedding_unit, 0));
    FT_TRY(ft_embedding(m->ctx, x, tokens, m->embedding));
    FT_TRY(ft_zero_leave(m->zero, m->embedding_unit));
    for (int64_t i = 0; i < m->config.layers; i++)
        FT_TRY(ft__llama_layer_forward(m, &m->layers[i], sac ? sac[i] : none, x));
    return FT_OK;
}

/* Final norm: *y [B,T,C] = rmsnorm(x); x is used up. Leaves the final unit entered, and for a tied
   head the embedding's: ft__llama_head_leave ends both. On a tape backward follows at once, and
   needs both first. */
static ft_status ft__llama_head_enter(const ft_llama *m, ft_tensor *x, ft_tensor **y)
{
    FT_TRY(ft_zero_enter(m->zero, m->final_unit, FT_ZERO_KEEP));
    FT_TRY(ft_rmsnorm(m->ctx, y, x, m->norm, m->config.norm_eps));
    ft_tensor_free(x);
    return m->config.tie_embeddings ? ft_zero_enter(m->zero, m->embedding_unit, FT_ZERO_KEEP) : FT_OK;
}

static ft_status ft__llama_head_leave(const ft_llama *m)
{
    if (m->config.tie_embeddings) FT_TRY(ft_zero_leave(m->zero, m->embedding_unit));
    return ft_zero_leave(m->zero, m->final_unit);
}

FT_API ft_status ft_llama_loss(ft_llama *m, ft_tensor *tokens, ft_tensor *labels, ft_tensor *scale,
                               const ft_sac *sac, ft_tensor **loss)
{
    ft_tensor *x, *y;
    if (!m || !loss) return ft_error(FT_ERR_ARG, "ft_llama_loss: model or loss is NULL");
    FT_TRY(ft__llama_check_tokens(m, "ft_llama_loss", "tokens", tokens));
    FT_TRY(ft__llama_check_tokens(m, "ft_llama_loss", "labels", labels));
    if (tokens->shape[0] != labels->shape[0] || tokens->shape[1] != labels->shape[1])
        return ft_error(FT_ERR_SHAPE, "ft_llama_loss: tokens [%lld,%lld] and labels [%lld,%lld] "
                        "differ", (long long)tokens->shape[0], (long long)tokens->shape[1],
                        (long long)labels->shape[0], (long long)labels->shape[1]);
    FT_TRY(ft__llama_stack(m, tokens, sac, &x));
    FT_TRY(ft__llama_head_enter(m, x, &y));
    FT_TRY(ft_linear_cross_entropy(m->ctx, loss, y, m->head, labels, scale,
                                   m->config.loss_chunk_tokens));
    ft_tensor_free(y);
    return ft__llama_head_leave(m);
}

/* *last [B,1,C] = the rows of the last token; x [B,T,C] is used up. */
static ft_status ft__llama_last(const ft_llama *m, ft_tensor *x, ft_tensor **last)
{
    int64_t B = x->shape[0], T = x->shape[1], C = x->shape[2], shape[3];
    shape[0] = B;
    shape[1] = 1;
    shape[2] = C;
    FT_TRY(ft_tensor_create(m->ctx, last, x->dtype, 3, shape, FT_TAG_ACT));
    for (int64_t b = 0; b < B; b++) {
        ft_tensor *from, *to;
        FT_TRY(ft_tensor_view(x, &from, (b * T + T - 1) * C, 1, &C));
        FT_TRY(ft_tensor_view(*last, &to, b * C, 1, &C));
        FT_TRY(ft_copy(to, from, ft_stream_get(m->ctx, FT_STREAM_COMPUTE)));
        ft_tensor_free(to);
        ft_tensor_free(from);
    }
    ft_tensor_free(x);
    return FT_OK;
}

FT_API ft_status ft_llama_logits(ft_llama *m, ft_tensor *tokens, int last_only, ft_tensor **logits)
{
    ft_tensor *x, *y;
    if (!m || !logits) return ft_error(FT_ERR_ARG, "ft_llama_logits: model or logits is NULL");
    FT_TRY(ft__llama_check_tokens(m, "ft_llama_logits", "tokens", tokens));
    if (ft_tape_current(m->ctx))
        return ft_error(FT_ERR_STATE, "ft_llama_logits: a tape is recording; logits are for "
                        "evaluation: call ft_tape_end first, or ft_llama_loss to train");
    FT_TRY(ft__llama_stack(m, tokens, NULL, &x));
    if (last_only && x->shape[1] > 1) {
        ft_tensor *whole = x;
        FT_TRY(ft__llama_last(m, whole, &x));
    }
    FT_TRY(ft__llama_head_enter(m, x, &y));
    FT_TRY(ft_linear(m->ctx, logits, y, m->head, NULL));
    ft_tensor_free(y);
    return ft__llama_head_leave(m);
}

/* ------------------------------------------------------------------------------- >>params.impl */

FT_API int ft_llama_param_count(const ft_llama *m) { return m ? m->n_params : 0; }

FT_API const ft_llama_param *ft_llama_param_at(const ft_llama *m, int index)
{
    return m && index >= 0 && index < m->n_params ? &m->params[index] : NULL;
}

FT_API const ft_llama_param *ft_llama_param_find(const ft_llama *m, const char *name)
{
    for (int i = 0; m && name && i < m->n_params; i++)
        if (strcmp(m->params[i].name, name) == 0) return &m->params[i];
    return NULL;
}

/* An entry that a failed look-up left NULL, or one of another model, is refused. */
static ft_status ft__llama_check_param(const ft_llama *m, const char *who, const ft_llama_param *p)
{
    if (!m || !p)
        return ft_error(FT_ERR_ARG, "%s: %s is NULL (ft_llama_param_find gives NULL for a name "
                        "that the model does not have)", who, m ? "param" : "model");
    const ft_llama_param *own = ft_llama_param_find(m, p->name);
    if (own && own->pack == p->pack && own->first_elem == p->first_elem) return FT_OK;
    return ft_error(FT_ERR_ARG, "%s: %s is not an entry of this model's parameter list", who,
                    p->name);
}

FT_API ft_status ft_llama_export(ft_llama *m, const ft_llama_param *p, float *values)
{
    FT_TRY(ft__llama_check_param(m, "ft_llama_export", p));
    return ft_zero_export(m->zero, p->pack, p->first_elem, p->shape[0] * p->shape[1], values);
}

FT_API ft_status ft_llama_import(ft_llama *m, const ft_llama_param *p, const float *values)
{
    FT_TRY(ft__llama_check_param(m, "ft_llama_import", p));
    if (!values) return ft_error(FT_ERR_ARG, "ft_llama_import: %s: values is NULL", p->name);
    return ft_zero_import(m->zero, p->pack, p->first_elem, p->shape[0] * p->shape[1], values);
}

FT_API ft_status ft_llama_export_grad(ft_llama *m, const ft_llama_param *p, float *values)
{
    FT_TRY(ft__llama_check_param(m, "ft_llama_export_grad", p));
    return ft_zero_export_grad(m->zero, p->pack, p->first_elem, p->shape[0] * p->shape[1], values);
}

static uint64_t ft__llama_fnv_floats(uint64_t hash, const float *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        unsigned char bytes[4];
        memcpy(&bits, &values[i], 4);
        for (int k = 0; k < 4; k++) bytes[k] = (unsigned char)(bits >> (8 * k) & 255u);
        hash = ft__llama_fnv(hash, bytes, 4);
    }
    return hash;
}

FT_API ft_status ft_llama_hash(ft_llama *m, uint64_t *hash)
{
    const int64_t most = 65536; /* elements at a time, the same on all ranks */
    if (!m || !hash) return ft_error(FT_ERR_ARG, "ft_llama_hash: model or hash is NULL");
    float *values = (float *)ft_host_alloc(m->ctx, (size_t)most * sizeof *values);
    if (!values) return FT_ERR_OOM;
    uint64_t h = ft__llama_fnv_begin();
    for (int i = 0; i < m->n_params; i++) {
        const ft_llama_param *p = &m->params[i];
        int64_t total = p->shape[0] * p->shape[1];
        for (int64_t at = 0; at < total; at += most) {
            int64_t n = total - at < most ? total - at : most;
            FT_TRY(ft_zero_export(m->zero, p->pack, p->first_elem + at, n, values));
            h = ft__llama_fnv_floats(h, values, n);
        }
    }
    ft_host_free(m->ctx, values);
    *hash = h;
    return FT_OK;
}

#undef FT__LLAMA_TOTAL

#endif /* FT__LLAMA_IMPLEMENTED */
#endif /* implementation */
