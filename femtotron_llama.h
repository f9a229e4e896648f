/* femtotron_llama.h: Llama-family language models out of Femtotron's ops and ZeRO units.

   Do this, in ONE C or C++ file of your program (elsewhere without the macro):

       #define FEMTOTRON_IMPLEMENTATION
       #include "femtotron.h"
       #include "femtotron_zero.h"
       #include "femtotron_tp.h"
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
     label, -100), no key-value cache: each call of ft_llama_logits computes all of its tokens. It
     reads and writes no files: see femtotron_io.h. Logits and the trainer's sample need a whole
     model on each rank: of one that is cut over tp or pp there is the loss.

   CONTENTS  (find a part by searching for its mark)
     Declarations                            Implementation
       >>config    sizes and switches          >>config.impl
       >>model     create, loss, logits        >>describe.impl, >>init.impl, >>forward.impl
       >>params    Hugging Face names, hash,   >>params.impl
                   what a rank holds of each

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
     document  Several may lie in a row, one after the other. doc_start int32 [B,T] says at which
               token of the row the document of each token begins (0 for one that began before the
               row); attention then stays inside documents: ft_attention_docs. Each pipeline stage
               is given the same doc_start, as it is given the tokens; tp ranks have some heads of
               all tokens, so doc_start is whole, under sequence parallelism too. What crosses the
               end of a document in the loss is the labels' affair: make that label -100.
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
                doc_start is 4 bytes a token, once for all layers. Logits exist for
                loss_chunk_tokens tokens at a time. The RoPE table is 4 max_tokens D bytes (tag
                other), one a model.
     Traffic    That of femtotron_zero.h; a tied head makes ZeRO-3 gather the embedding once more.

   INITIALISATION
     Tensors of two dimensions: normal with mean 0 and deviation init_std. Residual-output
     projections (o_proj and down_proj, 2L of them write to the residual stream) have init_std /
     sqrt(2L) instead (Radford et al. 2019, section 2.3). Norms are 1, biases 0. Element i of a
     tensor is a function of (seed, Hugging Face name, i) alone: no generator is advanced, so
     neither ranks, stages, packing nor order change a weight.
       key = mix(seed XOR fnv1a(name));  a, b = mix(key + (2i+1) g), mix(key + (2i+2) g)
       weight = std (sum of the eight 16-bit parts of a and b - 8 * 32767.5) / 53509.92
     with mix and the odd number g of SplitMix64 (Steele, Lea and Flood 2014). A sum of eight
     uniform numbers is normal but for its tails, which end at 4.9 deviations (Irwin 1927, Hall
     1927). It needs integers and one rounding, no logarithm: the same bits on every machine, and
     fast.

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
#error "femtotron_llama.h builds on femtotron.h and femtotron_zero.h: include those first"
#endif
#ifndef FEMTOTRON_TP_H
#error "femtotron_llama.h builds on femtotron_tp.h: include it after femtotron.h"
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
   on every rank, naming ranks and values, unless all pass the same seed, config and max_tokens.
   `zero` must have no units yet. */

/* Which part of the model a rank has. Stage p of P with V chunks runs virtual stages p, P + p, 2P +
   p, ...: virtual stage v runs layers first_layer[v] .. first_layer[v + 1] - 1; the first one also
   has the embedding, the last one the final norm and the head. Over tp every weight is cut as
   femtotron_tp.h says; a vocabulary that tp does not divide is padded inside. */
typedef struct ft_llama_layout {
    ft_mesh mesh;
    ft_tp *tp;                  /* NULL where the mesh's tp is 1 */
    int chunks;                 /* V; 0 means 1 */
    const int64_t *first_layer; /* [P V + 1], ascending from 0 to layers; NULL where P V = 1 */
} ft_llama_layout;

FT_API ft_status ft_llama_create_part(ft_ctx *ctx, ft_zero *zero, const ft_llama_config *config,
                                      const ft_llama_layout *layout, int64_t max_tokens,
                                      uint64_t seed, ft_llama **out);
/* ft_llama_create for a rank of a mesh; all ranks must pass the same sizes of the mesh, chunks,
   first_layer and sequence parallelism too. The weights are those of the whole model on one rank. A
   tied embedding on two stages is one unit on each, with gradients summed (ft_zero_share). Norms
   and biases of row layers count once (or, under sequence parallelism, are summed) over tp.
   FT_ERR_UNSUPPORTED where heads, kv heads or intermediate do not divide by tp. */
FT_API ft_status ft_llama_chunk(ft_llama *model, int chunk, ft_tensor *tokens, ft_tensor *labels,
                                ft_tensor *scale, const ft_sac *sac, ft_tensor *x, ft_tensor **out);
/* Forward of one chunk. tokens, labels int32 [B,T] on every stage (B and T are theirs). x: the
   output of the virtual stage before, a tensor of the caller's own, NULL for the first; out: the
   residual stream [B,T,C] (sequence parallelism: [B T/t, C]) or, of the last virtual stage, the
   loss. sac[layers of the model] or NULL. Records on the current tape. */
FT_API ft_status ft_llama_boundary(const ft_llama *model, int64_t B, int64_t T, int *ndim,
                                   int64_t shape[3]);
/* The shape of what travels between stages; its dtype is the model's. */
FT_API ft_status ft_llama_chunk_docs(ft_llama *model, int chunk, ft_tensor *tokens,
                                     ft_tensor *labels, ft_tensor *doc_start, ft_tensor *scale,
                                     const ft_sac *sac, ft_tensor *x, ft_tensor **out);
/* ft_llama_chunk for rows of several documents: doc_start int32 [B,T], the same on every stage and
   tp rank, or NULL, which is ft_llama_chunk. A tape keeps it as long as an attention's backward
   needs it. Other shapes: FT_ERR_SHAPE. Values, and devices: ft_attention_docs. */

FT_API const ft_llama_config *ft_llama_config_get(const ft_llama *model);
/* What it was made from, with its zeros filled in. NULL for NULL. */
FT_API ft_status ft_llama_loss(ft_llama *model, ft_tensor *tokens, ft_tensor *labels,
                               ft_tensor *scale, const ft_sac *sac, ft_tensor **loss);
/* tokens, labels int32 [B,T], T <= max_tokens: labels[b,t] is the token that follows tokens[b,t],
   or -100 where none counts. sac[layers] is the recompute policy of each layer, NULL for none.
   *loss fp32 [1] = scale * sum of -log p(label); scale [1] as ft_zero_step_begin gives it, NULL:
   1 / (number of counted labels). Records on the current tape, one segment a layer; without a tape
   it only evaluates. A collective call in ZeRO-3, which gathers. */
FT_API ft_status ft_llama_loss_docs(ft_llama *model, ft_tensor *tokens, ft_tensor *labels,
                                    ft_tensor *doc_start, ft_tensor *scale, const ft_sac *sac,
                                    ft_tensor **loss);
/* The same for rows of several documents, as ft_llama_chunk_docs. */
FT_API ft_status ft_llama_logits(ft_llama *model, ft_tensor *tokens, int last_only,
                                 ft_tensor **logits);
/* [B,T,V], or [B,1,V] of the last token only, in the model's dtype; the caller frees it. For
   evaluation: FT_ERR_STATE while a tape records. Whole logits are B T V elements of act. A
   collective call in ZeRO-3. */
FT_API ft_status ft_llama_logits_docs(ft_llama *model, ft_tensor *tokens, ft_tensor *doc_start,
                                      int last_only, ft_tensor **logits);
/* The same for rows of several documents, as ft_llama_chunk_docs. */

/* ------------------------------------------------------------------------------------ >>params */

/* A parameter under its Hugging Face name: rows of a packed tensor. */
typedef struct ft_llama_param {
    char name[80];         /* "model.layers.0.self_attn.q_proj.weight" */
    int ndim;
    int64_t shape[2];      /* shape[1] is 1 where ndim is 1 */
    ft_tensor *pack;       /* the tensor that holds it, or its slice; NULL: on another stage */
    int64_t first_elem;    /* where it starts in the pack */
    ft_tp_cut cut;         /* how tp cuts it */
    ft_tp_slice slice;     /* this rank's part */
    int stage;             /* pipeline stage that has it (of a tied embedding the first) */
    ft_tensor *twin;       /* private: the copy of a tied embedding on the last stage */
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
/* What a rank holds of a parameter, for files. Elements are counted in the whole parameter,
   row-major: `count` runs of n elements, the first at `first`, each `stride` after the one before
   (count 1: stride is n). A slice of columns is a run for each row. */
typedef struct ft_llama_run { int64_t first, n, stride, count; } ft_llama_run;

enum { FT_LLAMA_MAX_RUNS = 3 };

typedef struct ft_llama_piece {
    ft_tensor *tensor;     /* ft_zero's, to be read and written by ft_zero_state_read and _write: */
    int64_t first, elems;  /* elements first..first+elems-1 of it; elems 0: nothing is here */
    int n_runs;            /* the same elements, in the same order, which is ascending */
    ft_llama_run run[FT_LLAMA_MAX_RUNS];
} ft_llama_piece;

FT_API ft_status ft_llama_owned(ft_llama *model, const ft_llama_param *param,
                                ft_llama_piece *piece);
/* All that this rank owns of it (ft_zero_owned): of the stage that has it, of the tp slice, of the
   ZeRO shard; rows that pad a vocabulary are left out, and a tied table is owned on both stages.
   Local. Whoever loads a parameter writes it on every rank that owns it. */
FT_API ft_status ft_llama_stored(ft_llama *model, const ft_llama_param *param,
                                 ft_llama_piece *piece);
/* The part of it that this rank stores, so that over the world each element is stored once: what
   several ranks own (dp replicas; a weight that tp does not cut) is dealt out in equal parts in the
   order of (tp, replica), and of a tied table on two stages the first stores. Local. */
FT_API ft_status ft_llama_hash(ft_llama *model, uint64_t *hash);
/* FNV-1a, 64 bit, over the little-endian bytes of the fp32 master weights in canonical order, so
   independent of the layout. Streamed, 256 KiB (cut over tp or pp: the largest tensor and two
   slices of it) of host memory. A collective call. On meta, where no weight has a value, that of
   zeros. */

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
    int unit, stage, last;  /* pipeline stage that runs it; last: of its chunk */
    ft_tensor *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias;
    ft_tensor *post_norm, *gate_up, *gate_up_bias, *down, *down_bias;
} ft__llama_layer;

struct ft_llama {
    ft_ctx *ctx;
    ft_zero *zero;
    ft_llama_config config; /* checked: no zeros left */
    ft_mesh mesh;
    ft_tp *tp;
    int tp_size, tp_rank, P, stage, V;
    int64_t *first_layer;   /* [P V + 1] */
    int has_embedding, has_head;
    ft_group *world, *tied; /* tied: the two stages that share the embedding; NULL elsewhere */
    int64_t max_tokens;
    uint64_t seed;
    ft_tensor *rope;        /* [max_tokens, D/2, 2] */
    int embedding_unit, final_unit, head_unit; /* head_unit: of the tied table, to be entered too */
    ft_tensor *embedding, *norm, *head; /* head: the embedding, if tied */
    ft__llama_layer *layers;
    ft__llama_pack *packs;
    int n_packs;
    ft_llama_param *params;
    int n_params;
};

/* Adds a parameter to the open unit. cols 0: one dimension, which is not decayed. */
static ft_status ft__llama_add(ft_llama *m, const char *prefix, const char *name, int64_t rows,
                               int64_t cols, int normal, double value, int flags, ft_tensor **out)
{
    ft__llama_pack *pack = &m->packs[m->n_packs++];
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    snprintf(pack->name, sizeof pack->name, "%s%s", prefix, name);
    pack->normal = normal;
    pack->value = value;
    FT_TRY(ft_zero_param(m->zero, pack->name, cols ? 2 : 1, shape,
                         flags | (cols ? FT_ZERO_DECAY : 0), &pack->tensor));
    *out = pack->tensor;
    return FT_OK;
}

static ft_status ft__llama_matrix(ft_llama *m, const char *prefix, const char *name, int64_t rows,
                                  int64_t cols, double std, ft_tensor **out)
{
    return ft__llama_add(m, prefix, name, rows, cols, 1, std, 0, out);
}

static ft_status ft__llama_vector(ft_llama *m, const char *prefix, const char *name, int64_t rows,
                                  double value, int flags, ft_tensor **out)
{
    return ft__llama_add(m, prefix, name, rows, 0, 0, value, flags, out);
}

/* What every tp rank has whole works on all tokens and has its whole gradient, or, under sequence
   parallelism, works on the rank's tokens and has a part. */
static int ft__llama_whole_flags(const ft_llama *m)
{
    if (m->tp_size == 1) return 0;
    return m->tp->sequence_parallel ? FT_ZERO_PARTIAL : FT_ZERO_REPLICATED;
}

static ft_status ft__llama_describe_layer(ft_llama *m, int64_t index)
{
    const ft_llama_config *c = &m->config;
    ft__llama_layer *l = &m->layers[index];
    int64_t t = m->tp_size, C = c->hidden, HD = c->heads * c->head_dim / t, F = c->intermediate / t;
    int64_t rows = HD + 2 * c->kv_heads * c->head_dim / t;
    double std = c->init_std, std_out = std / sqrt(2.0 * (double)c->layers);
    int whole = ft__llama_whole_flags(m);
    int heads = t > 1 ? FT_ZERO_PARTIAL : 0; /* of head norms each rank sees its own heads */
    char at[48];
    snprintf(at, sizeof at, "model.layers.%lld.", (long long)index);
    FT_TRY(ft_zero_unit(m->zero, l->name, &l->unit));
    FT_TRY(ft__llama_matrix(m, at, "self_attn.qkv_proj.weight", rows, C, std, &l->qkv));
    FT_TRY(ft__llama_matrix(m, at, "self_attn.o_proj.weight", C, HD, std_out, &l->o));
    FT_TRY(ft__llama_matrix(m, at, "mlp.gate_up_proj.weight", 2 * F, C, std, &l->gate_up));
    FT_TRY(ft__llama_matrix(m, at, "mlp.down_proj.weight", C, F, std_out, &l->down));
    FT_TRY(ft__llama_vector(m, at, "input_layernorm.weight", C, 1, whole, &l->input_norm));
    FT_TRY(ft__llama_vector(m, at, "post_attention_layernorm.weight", C, 1, whole, &l->post_norm));
    if (c->qkv_bias)
        FT_TRY(ft__llama_vector(m, at, "self_attn.qkv_proj.bias", rows, 0, 0, &l->qkv_bias));
    if (c->qk_norm) {
        FT_TRY(ft__llama_vector(m, at, "self_attn.q_norm.weight", c->head_dim, 1, heads,
                                &l->q_norm));
        FT_TRY(ft__llama_vector(m, at, "self_attn.k_norm.weight", c->head_dim, 1, heads,
                                &l->k_norm));
    }
    if (c->o_bias)
        FT_TRY(ft__llama_vector(m, at, "self_attn.o_proj.bias", C, 0, whole, &l->o_bias));
    if (!c->mlp_bias) return FT_OK;
    FT_TRY(ft__llama_vector(m, at, "mlp.gate_up_proj.bias", 2 * F, 0, 0, &l->gate_up_bias));
    return ft__llama_vector(m, at, "mlp.down_proj.bias", C, 0, whole, &l->down_bias);
}

/* Lists a Hugging Face tensor of [rows, cols], a run of rows of a pack from local element `*at` on,
   which it moves past itself. `has`: the config has it; the pack is NULL on other stages. */
static ft_status ft__llama_list(ft_llama *m, int has, const char *prefix, const char *name,
                                int stage, ft_tensor *pack, ft_tp_cut cut, int64_t rows,
                                int64_t cols, int64_t *at)
{
    int64_t zero = 0;
    if (!has) return FT_OK;
    if (!at) at = &zero;
    ft_llama_param *p = &m->params[m->n_params++];
    snprintf(p->name, sizeof p->name, "%s%s", prefix, name);
    p->ndim = cols ? 2 : 1;
    p->shape[0] = rows;
    p->shape[1] = cols ? cols : 1;
    p->stage = stage;
    p->cut = cut;
    p->pack = pack;
    p->first_elem = *at;
    FT_TRY(ft_tp_slice_make(cut, m->tp_size, m->tp_rank, p->name, rows, p->shape[1], &p->slice));
    *at += p->slice.local_rows * p->slice.local_cols;
    return FT_OK;
}

static ft_status ft__llama_list_layer(ft_llama *m, int64_t index)
{
    const ft_llama_config *c = &m->config;
    const ft__llama_layer *l = &m->layers[index];
    int64_t C = c->hidden, Q = c->heads * c->head_dim, KV = c->kv_heads * c->head_dim;
    int64_t D = c->head_dim, F = c->intermediate, qkv = 0, qkv_bias = 0, gu = 0, gu_bias = 0;
    int s = l->stage;
    char p[48];
    snprintf(p, sizeof p, "model.layers.%lld.", (long long)index);
    FT_TRY(ft__llama_list(m, 1, p, "input_layernorm.weight", s, l->input_norm, FT_TP_WHOLE, C, 0,
                          NULL));
    FT_TRY(ft__llama_list(m, 1, p, "self_attn.q_proj.weight", s, l->qkv, FT_TP_ROWS, Q, C, &qkv));
    FT_TRY(ft__llama_list(m, 1, p, "self_attn.k_proj.weight", s, l->qkv, FT_TP_ROWS, KV, C, &qkv));
    FT_TRY(ft__llama_list(m, 1, p, "self_attn.v_proj.weight", s, l->qkv, FT_TP_ROWS, KV, C, &qkv));
    FT_TRY(ft__llama_list(m, c->qkv_bias, p, "self_attn.q_proj.bias", s, l->qkv_bias, FT_TP_ROWS, Q,
                          0, &qkv_bias));
    FT_TRY(ft__llama_list(m, c->qkv_bias, p, "self_attn.k_proj.bias", s, l->qkv_bias, FT_TP_ROWS,
                          KV, 0, &qkv_bias));
    FT_TRY(ft__llama_list(m, c->qkv_bias, p, "self_attn.v_proj.bias", s, l->qkv_bias, FT_TP_ROWS,
                          KV, 0, &qkv_bias));
    FT_TRY(ft__llama_list(m, c->qk_norm, p, "self_attn.q_norm.weight", s, l->q_norm, FT_TP_WHOLE, D,
                          0, NULL));
    FT_TRY(ft__llama_list(m, c->qk_norm, p, "self_attn.k_norm.weight", s, l->k_norm, FT_TP_WHOLE, D,
                          0, NULL));
    FT_TRY(ft__llama_list(m, 1, p, "self_attn.o_proj.weight", s, l->o, FT_TP_COLUMNS, C, Q, NULL));
    FT_TRY(ft__llama_list(m, c->o_bias, p, "self_attn.o_proj.bias", s, l->o_bias, FT_TP_WHOLE, C, 0,
                          NULL));
    FT_TRY(ft__llama_list(m, 1, p, "post_attention_layernorm.weight", s, l->post_norm, FT_TP_WHOLE,
                          C, 0, NULL));
    FT_TRY(ft__llama_list(m, 1, p, "mlp.gate_proj.weight", s, l->gate_up, FT_TP_ROWS, F, C, &gu));
    FT_TRY(ft__llama_list(m, 1, p, "mlp.up_proj.weight", s, l->gate_up, FT_TP_ROWS, F, C, &gu));
    FT_TRY(ft__llama_list(m, c->mlp_bias, p, "mlp.gate_proj.bias", s, l->gate_up_bias, FT_TP_ROWS,
                          F, 0, &gu_bias));
    FT_TRY(ft__llama_list(m, c->mlp_bias, p, "mlp.up_proj.bias", s, l->gate_up_bias, FT_TP_ROWS, F,
                          0, &gu_bias));
    FT_TRY(ft__llama_list(m, 1, p, "mlp.down_proj.weight", s, l->down, FT_TP_COLUMNS, C, F, NULL));
    return ft__llama_list(m, c->mlp_bias, p, "mlp.down_proj.bias", s, l->down_bias, FT_TP_WHOLE, C,
                          0, NULL);
}

/* Final norm and head. A tied head on a stage without the embedding has a unit of its own with a
   copy of the table, whose gradients both stages add. */
static ft_status ft__llama_describe_final(ft_llama *m, int64_t vocab_rows)
{
    const ft_llama_config *c = &m->config;
    FT_TRY(ft_zero_unit(m->zero, "final", &m->final_unit));
    if (!c->tie_embeddings)
        FT_TRY(ft__llama_matrix(m, "", "lm_head.weight", vocab_rows, c->hidden, c->init_std,
                                &m->head));
    FT_TRY(ft__llama_vector(m, "model.", "norm.weight", c->hidden, 1, ft__llama_whole_flags(m),
                            &m->norm));
    m->head_unit = m->embedding_unit;
    if (!c->tie_embeddings) return FT_OK;
    m->head = m->embedding;
    if (m->has_embedding) return FT_OK;
    FT_TRY(ft_zero_unit(m->zero, "tied head", &m->head_unit));
    FT_TRY(ft__llama_matrix(m, "model.", "embed_tokens.weight", vocab_rows, c->hidden, c->init_std,
                            &m->head));
    return ft_zero_share(m->zero, m->head_unit, m->tied);
}

/* Units and parameters in the order of forward, matrices before vectors. */
static ft_status ft__llama_describe_units(ft_llama *m)
{
    const ft_llama_config *c = &m->config;
    int64_t vocab_rows = (c->vocab + m->tp_size - 1) / m->tp_size;
    for (int k = 0; k < m->V; k++) {
        int v = k * m->P + m->stage;
        if (v == 0) {
            FT_TRY(ft_zero_unit(m->zero, "embedding", &m->embedding_unit));
            FT_TRY(ft__llama_matrix(m, "model.", "embed_tokens.weight", vocab_rows, c->hidden,
                                    c->init_std, &m->embedding));
            if (m->tied) FT_TRY(ft_zero_share(m->zero, m->embedding_unit, m->tied));
            if (c->tie_embeddings && m->P == 1 && m->V > 1) /* head and embedding: two chunks */
                FT_TRY(ft_zero_tapes(m->zero, m->embedding_unit, 2));
        }
        for (int64_t i = m->first_layer[v]; i < m->first_layer[v + 1]; i++)
            FT_TRY(ft__llama_describe_layer(m, i));
        if (v == m->P * m->V - 1) FT_TRY(ft__llama_describe_final(m, vocab_rows));
        FT_TRY(ft_zero_break(m->zero));
    }
    return FT_OK;
}

static ft_status ft__llama_describe(ft_llama *m)
{
    const ft_llama_config *c = &m->config;
    int last = m->P - 1;
    for (int v = 0; v < m->P * m->V; v++)
        for (int64_t i = m->first_layer[v]; i < m->first_layer[v + 1]; i++) {
            m->layers[i].stage = v % m->P;
            snprintf(m->layers[i].name, sizeof m->layers[i].name, "layer.%lld", (long long)i);
        }
    FT_TRY(ft__llama_describe_units(m));
    FT_TRY(ft__llama_list(m, 1, "model.", "embed_tokens.weight", 0, m->embedding, FT_TP_VOCAB,
                          c->vocab, c->hidden, NULL));
    if (c->tie_embeddings && m->has_head && !m->has_embedding) m->params[0].twin = m->head;
    for (int64_t i = 0; i < c->layers; i++) FT_TRY(ft__llama_list_layer(m, i));
    FT_TRY(ft__llama_list(m, 1, "model.", "norm.weight", last, m->norm, FT_TP_WHOLE, c->hidden, 0,
                          NULL));
    return ft__llama_list(m, !c->tie_embeddings, "", "lm_head.weight", last, m->head, FT_TP_VOCAB,
                          c->vocab, c->hidden, NULL);
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

static int32_t ft__llama_parts(uint64_t bits)
{
    return (int32_t)(bits & 0xffff) + (int32_t)(bits >> 16 & 0xffff) +
           (int32_t)(bits >> 32 & 0xffff) + (int32_t)(bits >> 48);
}

/* `each`: the deviation over that of the sum, which has the variance 8 (2^32 - 1) / 12. */
static float ft__llama_normal(uint64_t key, uint64_t element, double each)
{
    const uint64_t g = UINT64_C(0x9e3779b97f4a7c15);
    int32_t sum = ft__llama_parts(ft__llama_mix(key + (2 * element + 1) * g)) +
                  ft__llama_parts(ft__llama_mix(key + (2 * element + 2) * g));
    return (float)((double)(sum - 4 * 65535) * each);
}

/* The part of a pack's elements first..first+n-1 that belongs to one Hugging Face tensor. */
static void ft__llama_init_part(const ft_llama *m, const ft_llama_param *p, double std,
                                int64_t first, int64_t n, float *values)
{
    int64_t begin = p->first_elem, end = begin + p->slice.local_rows * p->slice.local_cols;
    uint64_t key = ft__llama_fnv(ft__llama_fnv_begin(), p->name, strlen(p->name));
    double each = std / sqrt(8 * 4294967295.0 / 12);
    key = ft__llama_mix(m->seed ^ key);
    if (begin < first) begin = first;
    if (end > first + n) end = first + n;
    for (int64_t i = begin; i < end;) { /* by rows, which lie together in the whole tensor too */
        int64_t col = (i - p->first_elem) % p->slice.local_cols;
        int64_t n_row = p->slice.local_cols - col < end - i ? p->slice.local_cols - col : end - i;
        int64_t element = ft_tp_global_elem(&p->slice, i - p->first_elem);
        float *row = values + (i - first);
        for (int64_t j = 0; j < n_row; j++)
            row[j] = element < 0 ? 0.0f : ft__llama_normal(key, (uint64_t)(element + j), each);
        i += n_row;
    }
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
        if (m->params[i].pack == pack->tensor || m->params[i].twin == pack->tensor)
            ft__llama_init_part(m, &m->params[i], pack->value, first, n, values);
    return FT_OK;
}

static uint64_t ft__llama_fnv_double(uint64_t hash, double value)
{
    return ft__llama_fnv(hash, &value, sizeof value);
}

/* Of all that ranks must share, field by field: structs have holes. */
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

static ft_status ft__llama_agree_config(ft_llama *m)
{
    const ft_llama_config *c = &m->config;
    const ft_rope_scaling *s = &c->rope_scaling;
    char text[512];
    snprintf(text, sizeof text,
             "llama config: vocab %lld, hidden %lld, %lld layers, %lld heads, %lld kv, head_dim "
             "%lld, intermediate %lld, tied %d, biases %d %d %d, qk_norm %d, eps %g, theta %g, "
             "rope %g %g %g %lld, init_std %g, loss chunk %lld, max_tokens %lld; hash",
             (long long)c->vocab, (long long)c->hidden, (long long)c->layers, (long long)c->heads,
             (long long)c->kv_heads, (long long)c->head_dim, (long long)c->intermediate,
             c->tie_embeddings != 0, c->qkv_bias != 0, c->o_bias != 0, c->mlp_bias != 0,
             c->qk_norm != 0, c->norm_eps, c->rope_theta, s->factor, s->low_freq_factor,
             s->high_freq_factor, (long long)s->original_context, c->init_std,
             (long long)c->loss_chunk_tokens, (long long)m->max_tokens);
    return ft_agree(m->world, text, ft__llama_config_hash(c, m->max_tokens));
}

/* The layout: stages that cut the layers differently would have some twice and some never. */
static ft_status ft__llama_agree_layout(ft_llama *m)
{
    char text[400];
    int n = m->P * m->V, sp = m->tp_size > 1 && m->tp->sequence_parallel, at;
    uint64_t hash = ft__llama_fnv(ft__llama_fnv_begin(), m->first_layer,
                                  (size_t)(n + 1) * sizeof *m->first_layer);
    at = snprintf(text, sizeof text, "llama layout: dp %d x tp %d x pp %d, %d chunks, sequence "
                  "parallelism %d, layers from", m->mesh.size[FT_AXIS_DP], m->tp_size, m->P, m->V,
                  sp);
    for (int v = 0; v < n && at < 380; v++) /* the first ones; the hash has all */
        at += snprintf(text + at, sizeof text - (size_t)at, " %lld", (long long)m->first_layer[v]);
    hash = ft__llama_fnv(hash, text, strlen(text));
    return ft_agree(m->world, text, hash);
}

/* Replicas that start from different seeds would train on as if nothing were wrong. */
static ft_status ft__llama_agree(ft_ctx *ctx, ft_llama *m)
{
    FT_TRY(ft_group_strided(ctx, "llama", 0, 1, ft_world(ctx), &m->world));
    FT_TRY(ft_agree(m->world, "seed of ft_llama_create", m->seed));
    FT_TRY(ft__llama_agree_config(m));
    return ft__llama_agree_layout(m);
}

static ft_status ft__llama_alloc(ft_ctx *ctx, ft_llama *m)
{
    size_t L = (size_t)m->config.layers;
    m->layers = (ft__llama_layer *)ft_host_alloc(ctx, L * sizeof *m->layers);
    if (!m->layers) return FT_ERR_OOM;
    m->packs = (ft__llama_pack *)ft_host_alloc(ctx, (12 * L + 4) * sizeof *m->packs);
    if (!m->packs) return FT_ERR_OOM;
    m->params = (ft_llama_param *)ft_host_alloc(ctx, (18 * L + 3) * sizeof *m->params);
    return m->params ? FT_OK : FT_ERR_OOM;
}

/* Copies and checks the layout: the partition ascends from 0 to all layers, each virtual stage has
   a layer, and tp divides what it cuts. */
static ft_status ft__llama_place(ft_llama *m, const ft_llama_layout *layout)
{
    const ft_llama_config *c = &m->config;
    int n;
    m->mesh = layout->mesh;
    m->tp_size = layout->mesh.size[FT_AXIS_TP];
    m->tp_rank = layout->mesh.coord[FT_AXIS_TP];
    m->P = layout->mesh.size[FT_AXIS_PP];
    m->stage = layout->mesh.coord[FT_AXIS_PP];
    m->V = layout->chunks > 0 ? layout->chunks : 1;
    m->tp = layout->tp;
    n = m->P * m->V;
    if ((m->tp_size > 1 && !m->tp) || (n > 1 && !layout->first_layer))
        return ft_error(FT_ERR_ARG,
                        "llama: a layout of tp %d needs an ft_tp, one of %d stages x %d "
                        "chunks first_layer",
                        m->tp_size, m->P, m->V);
    if (m->tp_size > 1)
        FT_TRY(ft_tp_check(m->tp_size, m->tp->sequence_parallel, c->heads, c->kv_heads,
                           c->intermediate, 0, 0));
    if (n > c->layers)
        return ft_error(FT_ERR_UNSUPPORTED,
                        "llama: %d stages x %d chunks for %lld layers: each needs "
                        "one layer at least",
                        m->P, m->V, (long long)c->layers);
    m->first_layer = (int64_t *)ft_host_alloc(m->ctx, (size_t)(n + 1) * sizeof *m->first_layer);
    if (!m->first_layer) return FT_ERR_OOM;
    for (int v = 0; v <= n; v++)
        m->first_layer[v] = n > 1 ? layout->first_layer[v] : v * c->layers;
    for (int v = 0; v < n; v++)
        if (m->first_layer[0] != 0 || m->first_layer[n] != c->layers ||
            m->first_layer[v] >= m->first_layer[v + 1])
            return ft_error(FT_ERR_ARG, "llama: first_layer must ascend from 0 to %lld; at virtual "
                            "stage %d it is %lld, then %lld", (long long)c->layers, v,
                            (long long)m->first_layer[v], (long long)m->first_layer[v + 1]);
    m->has_embedding = m->stage == 0;
    m->has_head = m->stage == m->P - 1;
    return FT_OK;
}

/* The first and the last stage share a tied embedding, rank by rank. */
static ft_status ft__llama_tied_group(ft_llama *m)
{
    int rest = m->mesh.coord[FT_AXIS_DP] * m->tp_size + m->tp_rank;
    int stage_ranks = m->mesh.size[FT_AXIS_DP] * m->tp_size;
    if (!m->config.tie_embeddings || m->P == 1 || (!m->has_embedding && !m->has_head)) return FT_OK;
    return ft_group_strided(m->ctx, "tied embedding", rest, (m->P - 1) * stage_ranks, 2, &m->tied);
}

FT_API ft_status ft_llama_create_part(ft_ctx *ctx, ft_zero *zero, const ft_llama_config *config,
                                      const ft_llama_layout *layout, int64_t max_tokens,
                                      uint64_t seed, ft_llama **out)
{
    if (!ctx || !zero || !config || !layout || !out)
        return ft_error(FT_ERR_ARG, "ft_llama_create: ctx, zero, config, layout or out is NULL");
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
    FT_TRY(ft__llama_place(m, layout));
    FT_TRY(ft__llama_agree(ctx, m));
    FT_TRY(ft__llama_tied_group(m));
    FT_TRY(ft__llama_alloc(ctx, m));
    FT_TRY(ft__llama_describe(m));
    FT_TRY(ft_zero_commit(zero, ft__llama_init, m));
    FT_TRY(ft_rope_table(ctx, &m->rope, max_tokens, checked.head_dim, checked.rope_theta,
                         &checked.rope_scaling));
    *out = m;
    return FT_OK;
}

FT_API ft_status ft_llama_create(ft_ctx *ctx, ft_zero *zero, const ft_llama_config *config,
                                 int64_t max_tokens, uint64_t seed, ft_llama **out)
{
    ft_llama_layout whole;
    if (!ctx) return ft_error(FT_ERR_ARG, "ft_llama_create: ctx is NULL");
    memset(&whole, 0, sizeof whole);
    FT_TRY(ft_mesh_create(ctx, ft_world(ctx), 1, 1, &whole.mesh));
    return ft_llama_create_part(ctx, zero, config, &whole, max_tokens, seed, out);
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

/* The linear layers of a block: cut over tp where there is any. */
static ft_status ft__llama_column(const ft_llama *m, ft_tensor **y, ft_tensor *x, ft_tensor *w,
                                  ft_tensor *b, int64_t B, int64_t T)
{
    if (m->tp_size == 1) return ft_linear(m->ctx, y, x, w, b);
    return ft_tp_column_linear(m->tp, y, x, w, b, B, T);
}

static ft_status ft__llama_row(const ft_llama *m, ft_tensor **y, ft_tensor *x, ft_tensor *w,
                               ft_tensor *b)
{
    if (m->tp_size == 1) return ft_linear(m->ctx, y, x, w, b);
    return ft_tp_row_linear(m->tp, y, x, w, b);
}

/* a = attention's contribution to the residual stream x, which stays the caller's. [B,T,C] both, or
   this tp rank's tokens of it. */
static ft_status ft__llama_attention(const ft_llama *m, const ft__llama_layer *l, int64_t B,
                                     int64_t T, ft_tensor *docs, ft_tensor *x, ft_tensor **a)
{
    const ft_llama_config *c = &m->config;
    ft_ctx *ctx = m->ctx;
    ft_tensor *y, *qkv, *o;
    int64_t H = c->heads / m->tp_size, K = c->kv_heads / m->tp_size;
    FT_TRY(ft_rmsnorm(ctx, &y, x, l->input_norm, c->norm_eps));
    FT_TRY(ft__llama_column(m, &qkv, y, l->qkv, l->qkv_bias, B, T));
    ft_tensor_free(y);
    if (c->qk_norm) {
        ft_tensor *raw = qkv;
        FT_TRY(ft_head_norm(ctx, &qkv, raw, l->q_norm, l->k_norm, H, K, c->head_dim,
                            c->norm_eps));
        ft_tensor_free(raw);
    }
    ft_tensor *rotated;
    FT_TRY(ft_rope(ctx, &rotated, qkv, m->rope, H, K, c->head_dim));
    FT_TRY(ft_attention_docs(ctx, &o, rotated, docs, H, K, c->head_dim));
    ft_tensor_free(rotated);
    FT_TRY(ft__llama_row(m, a, o, l->o, l->o_bias));
    ft_tensor_free(o);
    return FT_OK;
}

/* *d = down(swiglu(gate_up(y))); y [B,T,C] is used up. */
static ft_status ft__llama_mlp(const ft_llama *m, const ft__llama_layer *l, int64_t B, int64_t T,
                               ft_tensor *y, ft_tensor **d)
{
    ft_tensor *gu, *p;
    FT_TRY(ft__llama_column(m, &gu, y, l->gate_up, l->gate_up_bias, B, T));
    ft_tensor_free(y);
    FT_TRY(ft_swiglu(m->ctx, &p, gu));
    ft_tensor_free(gu);
    FT_TRY(ft__llama_row(m, d, p, l->down, l->down_bias));
    ft_tensor_free(p);
    return FT_OK;
}

/* One layer: *x is replaced. `given`: it is the caller's, who keeps it; else it is used up. */
static ft_status ft__llama_layer_forward(const ft_llama *m, const ft__llama_layer *l, ft_sac sac,
                                         int64_t B, int64_t T, ft_tensor *docs, int given,
                                         ft_tensor **x)
{
    ft_ctx *ctx = m->ctx;
    ft_tensor *a, *r, *y, *d, *next;
    FT_TRY(ft_zero_enter(m->zero, l->unit, 0));
    FT_TRY(ft_segment_begin(ctx, l->name, sac));
    FT_TRY(ft__llama_attention(m, l, B, T, docs, *x, &a));
    FT_TRY(ft_add_rmsnorm(ctx, &r, &y, *x, a, l->post_norm, m->config.norm_eps));
    if (!given) ft_tensor_free(*x);
    ft_tensor_free(a);
    FT_TRY(ft__llama_mlp(m, l, B, T, y, &d));
    FT_TRY(ft_add_inplace(ctx, &next, d, r)); /* over d; r's last use */
    ft_tensor_free(r);
    FT_TRY(ft_segment_end(ctx, 1, &next));
    FT_TRY(ft_zero_leave(m->zero, l->unit));
    *x = next;
    return FT_OK;
}

static ft_status ft__llama_embed(const ft_llama *m, ft_tensor *tokens, ft_tensor **x)
{
    FT_TRY(ft_zero_enter(m->zero, m->embedding_unit, 0));
    if (m->tp_size == 1) FT_TRY(ft_embedding(m->ctx, x, tokens, m->embedding));
    else FT_TRY(ft_tp_embedding(m->tp, x, tokens, m->embedding, m->config.vocab));
    return ft_zero_leave(m->zero, m->embedding_unit);
}

/* Embedding (of virtual stage 0) and layers of virtual stage v: *x, not yet normed. */
static ft_status ft__llama_stack(const ft_llama *m, int v, ft_tensor *tokens, ft_tensor *docs,
                                 const ft_sac *sac, ft_tensor **x)
{
    ft_sac none;
    int given = v > 0;
    memset(&none, 0, sizeof none);
    if (v == 0) FT_TRY(ft__llama_embed(m, tokens, x));
    for (int64_t i = m->first_layer[v]; i < m->first_layer[v + 1]; i++) {
        FT_TRY(ft__llama_layer_forward(m, &m->layers[i], sac ? sac[i] : none, tokens->shape[0],
                                       tokens->shape[1], docs, given, x));
        given = 0;
    }
    return FT_OK;
}

/* Final norm: *y = rmsnorm(x); x is used up. Leaves the final unit entered, and for a tied head the
   table's: ft__llama_head_leave ends both. On a tape backward follows at once, and needs both
   first. */
static ft_status ft__llama_head_enter(const ft_llama *m, ft_tensor *x, ft_tensor **y)
{
    FT_TRY(ft_zero_enter(m->zero, m->final_unit, FT_ZERO_KEEP));
    FT_TRY(ft_rmsnorm(m->ctx, y, x, m->norm, m->config.norm_eps));
    ft_tensor_free(x);
    return m->config.tie_embeddings ? ft_zero_enter(m->zero, m->head_unit, FT_ZERO_KEEP) : FT_OK;
}

static ft_status ft__llama_head_leave(const ft_llama *m)
{
    if (m->config.tie_embeddings) FT_TRY(ft_zero_leave(m->zero, m->head_unit));
    return ft_zero_leave(m->zero, m->final_unit);
}

static ft_status ft__llama_head_loss(const ft_llama *m, ft_tensor *x, ft_tensor *labels,
                                     ft_tensor *scale, ft_tensor **loss)
{
    ft_tensor *y;
    int64_t chunk = m->config.loss_chunk_tokens;
    FT_TRY(ft__llama_head_enter(m, x, &y));
    if (m->tp_size == 1)
        FT_TRY(ft_linear_cross_entropy(m->ctx, loss, y, m->head, labels, scale, chunk));
    else
        FT_TRY(ft_tp_linear_cross_entropy(m->tp, loss, y, m->head, labels, scale, chunk,
                                          m->config.vocab));
    ft_tensor_free(y);
    return ft__llama_head_leave(m);
}

/* int32 [B,T] as the tokens, which are checked. */
static ft_status ft__llama_check_like(const ft_llama *m, const char *who, const ft_tensor *tokens,
                                      const char *what, const ft_tensor *t)
{
    FT_TRY(ft__llama_check_tokens(m, who, what, t));
    if (tokens->shape[0] == t->shape[0] && tokens->shape[1] == t->shape[1]) return FT_OK;
    return ft_error(FT_ERR_SHAPE, "%s: tokens [%lld,%lld] and %s [%lld,%lld] differ", who,
                    (long long)tokens->shape[0], (long long)tokens->shape[1], what,
                    (long long)t->shape[0], (long long)t->shape[1]);
}

static ft_status ft__llama_check_batch(const ft_llama *m, const char *who, const ft_tensor *tokens,
                                       const ft_tensor *labels, const ft_tensor *docs)
{
    FT_TRY(ft__llama_check_tokens(m, who, "tokens", tokens));
    FT_TRY(ft__llama_check_like(m, who, tokens, "labels", labels));
    if (docs) FT_TRY(ft__llama_check_like(m, who, tokens, "doc_start", docs));
    if (m->tp_size == 1) return FT_OK;
    return ft_tp_check(m->tp_size, m->tp->sequence_parallel, 0, 0, 0, tokens->shape[0],
                       tokens->shape[1]);
}

FT_API ft_status ft_llama_chunk_docs(ft_llama *m, int chunk, ft_tensor *tokens, ft_tensor *labels,
                                     ft_tensor *doc_start, ft_tensor *scale, const ft_sac *sac,
                                     ft_tensor *x, ft_tensor **out)
{
    if (!m || !out) return ft_error(FT_ERR_ARG, "ft_llama_chunk: model or out is NULL");
    if (chunk < 0 || chunk >= m->V)
        return ft_error(FT_ERR_ARG, "ft_llama_chunk: chunk %d of %d", chunk, m->V);
    int v = chunk * m->P + m->stage;
    if ((v == 0) != (x == NULL))
        return ft_error(FT_ERR_ARG, "ft_llama_chunk: virtual stage %d %s an input", v,
                        v ? "needs" : "takes no");
    FT_TRY(ft__llama_check_batch(m, "ft_llama_chunk", tokens, labels, doc_start));
    FT_TRY(ft__llama_stack(m, v, tokens, doc_start, sac, &x));
    *out = x;
    if (v < m->P * m->V - 1) return FT_OK;
    return ft__llama_head_loss(m, x, labels, scale, out);
}

FT_API ft_status ft_llama_chunk(ft_llama *m, int chunk, ft_tensor *tokens, ft_tensor *labels,
                                ft_tensor *scale, const ft_sac *sac, ft_tensor *x, ft_tensor **out)
{
    return ft_llama_chunk_docs(m, chunk, tokens, labels, NULL, scale, sac, x, out);
}

FT_API ft_status ft_llama_boundary(const ft_llama *m, int64_t B, int64_t T, int *ndim,
                                   int64_t shape[3])
{
    int cut = m->tp_size > 1 && m->tp->sequence_parallel;
    *ndim = cut ? 2 : 3;
    shape[0] = cut ? B * T / m->tp_size : B;
    shape[1] = cut ? m->config.hidden : T;
    shape[2] = m->config.hidden;
    return cut ? ft_tp_check(m->tp_size, 1, 0, 0, 0, B, T) : FT_OK;
}

FT_API const ft_llama_config *ft_llama_config_get(const ft_llama *m)
{
    return m ? &m->config : NULL;
}

FT_API ft_status ft_llama_loss_docs(ft_llama *m, ft_tensor *tokens, ft_tensor *labels,
                                    ft_tensor *doc_start, ft_tensor *scale, const ft_sac *sac,
                                    ft_tensor **loss)
{
    if (!m || !loss) return ft_error(FT_ERR_ARG, "ft_llama_loss: model or loss is NULL");
    if (m->P * m->V > 1)
        return ft_error(FT_ERR_UNSUPPORTED,
                        "ft_llama_loss: the model is cut in %d stages x %d chunks; "
                        "run it by ft_llama_chunk, or ft_pp_run",
                        m->P, m->V);
    FT_TRY(ft__llama_check_batch(m, "ft_llama_loss", tokens, labels, doc_start));
    return ft_llama_chunk_docs(m, 0, tokens, labels, doc_start, scale, sac, NULL, loss);
}

FT_API ft_status ft_llama_loss(ft_llama *m, ft_tensor *tokens, ft_tensor *labels, ft_tensor *scale,
                               const ft_sac *sac, ft_tensor **loss)
{
    return ft_llama_loss_docs(m, tokens, labels, NULL, scale, sac, loss);
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

FT_API ft_status ft_llama_logits_docs(ft_llama *m, ft_tensor *tokens, ft_tensor *doc_start,
                                      int last_only, ft_tensor **logits)
{
    ft_tensor *x, *y;
    if (!m || !logits) return ft_error(FT_ERR_ARG, "ft_llama_logits: model or logits is NULL");
    FT_TRY(ft__llama_check_tokens(m, "ft_llama_logits", "tokens", tokens));
    if (doc_start)
        FT_TRY(ft__llama_check_like(m, "ft_llama_logits", tokens, "doc_start", doc_start));
    if (ft_tape_current(m->ctx))
        return ft_error(FT_ERR_STATE, "ft_llama_logits: a tape is recording; logits are for "
                        "evaluation: call ft_tape_end first, or ft_llama_loss to train");
    if (m->tp_size * m->P * m->V > 1)
        return ft_error(FT_ERR_UNSUPPORTED,
                        "ft_llama_logits: the model is cut over tp %d, pp %d; logits "
                        "need a whole one on each rank",
                        m->tp_size, m->P);
    FT_TRY(ft__llama_stack(m, 0, tokens, doc_start, NULL, &x));
    if (last_only && x->shape[1] > 1) {
        ft_tensor *whole = x;
        FT_TRY(ft__llama_last(m, whole, &x));
    }
    FT_TRY(ft__llama_head_enter(m, x, &y));
    FT_TRY(ft_linear(m->ctx, logits, y, m->head, NULL));
    ft_tensor_free(y);
    return ft__llama_head_leave(m);
}

FT_API ft_status ft_llama_logits(ft_llama *m, ft_tensor *tokens, int last_only, ft_tensor **logits)
{
    return ft_llama_logits_docs(m, tokens, NULL, last_only, logits);
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

typedef ft_status (*ft__llama_export_fn)(ft_zero *zero, ft_tensor *param, int64_t first, int64_t n,
                                         float *values);

/* A host array of the root's, to every rank of the world, in pieces. */
static ft_status ft__llama_broadcast(ft_llama *m, int root, int64_t n, float *values)
{
    const int64_t most = 1 << 18;
    ft_stream *stream = ft_stream_get(m->ctx, FT_STREAM_COMPUTE);
    for (int64_t at = 0; at < n; at += most) {
        int64_t piece = n - at < most ? n - at : most;
        ft_tensor *part;
        FT_TRY(ft_tensor_create(m->ctx, &part, FT_F32, 1, &piece, FT_TAG_COMM));
        if (ft_rank(m->ctx) == root) FT_TRY(ft_upload(part, values + at));
        FT_TRY(ft_broadcast(m->world, stream, part, root));
        FT_TRY(ft_download(part, values + at));
        ft_tensor_free(part);
    }
    return FT_OK;
}

/* The global tensor on every rank: the ranks of `stage` export their slices (over dp) of `pack`,
   then each tp rank's slice goes to everyone and is pasted into place. */
static ft_status ft__llama_collect_from(ft_llama *m, const ft_llama_param *p, int stage,
                                        ft_tensor *pack, ft__llama_export_fn export_part,
                                        float *values)
{
    int dp = m->mesh.size[FT_AXIS_DP];
    int64_t n = p->slice.local_rows * p->slice.local_cols;
    if (m->tp_size == 1 && m->P == 1) return export_part(m->zero, pack, p->first_elem, n, values);
    float *local = (float *)ft_host_alloc(m->ctx, (size_t)n * sizeof *local);
    float *part = (float *)ft_host_alloc(m->ctx, (size_t)n * sizeof *part);
    if (!local || !part) return FT_ERR_OOM;
    if (m->stage == stage) FT_TRY(export_part(m->zero, pack, p->first_elem, n, local));
    for (int t = 0; t < (p->cut == FT_TP_WHOLE ? 1 : m->tp_size); t++) {
        ft_tp_slice slice;
        FT_TRY(ft_tp_slice_make(p->cut, m->tp_size, t, p->name, p->shape[0], p->shape[1], &slice));
        memcpy(part, local, (size_t)n * sizeof *part);
        FT_TRY(ft__llama_broadcast(m, stage * dp * m->tp_size + t, n, part));
        if (values) ft_tp_slice_paste(&slice, sizeof *values, part, values);
    }
    ft_host_free(m->ctx, part);
    ft_host_free(m->ctx, local);
    return FT_OK;
}

static ft_status ft__llama_collect(ft_llama *m, const ft_llama_param *p,
                                   ft__llama_export_fn export_part, float *values)
{
    return ft__llama_collect_from(m, p, p->stage, p->pack, export_part, values);
}

FT_API ft_status ft_llama_export(ft_llama *m, const ft_llama_param *p, float *values)
{
    FT_TRY(ft__llama_check_param(m, "ft_llama_export", p));
    return ft__llama_collect(m, p, ft_zero_export, values);
}

FT_API ft_status ft_llama_export_grad(ft_llama *m, const ft_llama_param *p, float *values)
{
    FT_TRY(ft__llama_check_param(m, "ft_llama_export_grad", p));
    FT_TRY(ft__llama_collect(m, p, ft_zero_export_grad, values));
    if (!m->config.tie_embeddings || m->P == 1 || strcmp(p->name, m->params[0].name) != 0)
        return FT_OK;
    /* A tied table on two stages: before ft_zero_step_end each has its own part of the gradient. */
    int64_t n = p->shape[0] * p->shape[1];
    float *head = (float *)ft_host_alloc(m->ctx, (size_t)n * sizeof *head);
    if (!head) return FT_ERR_OOM;
    FT_TRY(ft__llama_collect_from(m, p, m->P - 1, p->twin, ft_zero_export_grad, head));
    for (int64_t i = 0; i < n && values; i++) values[i] += head[i];
    ft_host_free(m->ctx, head);
    return FT_OK;
}

FT_API ft_status ft_llama_import(ft_llama *m, const ft_llama_param *p, const float *values)
{
    FT_TRY(ft__llama_check_param(m, "ft_llama_import", p));
    if (!values) return ft_error(FT_ERR_ARG, "ft_llama_import: %s: values is NULL", p->name);
    int64_t n = p->slice.local_rows * p->slice.local_cols;
    ft_tensor *to[2];
    to[0] = p->pack;
    to[1] = p->twin;
    float *local = (float *)ft_host_alloc(m->ctx, (size_t)n * sizeof *local);
    if (!local) return FT_ERR_OOM;
    ft_tp_slice_cut(&p->slice, sizeof *local, values, local);
    for (int k = 0; k < 2; k++)
        if (to[k]) FT_TRY(ft_zero_import(m->zero, to[k], k ? 0 : p->first_elem, n, local));
    ft_host_free(m->ctx, local);
    return FT_OK;
}

/* Elements a..b-1 of this rank's slice (row-major, no padding among them) as runs of the whole. Of
   cut columns: the end of a row, whole rows of the slice, the beginning of a row. */
static void ft__llama_runs(const ft_tp_slice *slice, int64_t a, int64_t b, ft_llama_piece *piece)
{
    int64_t cols = slice->local_cols;
    int cut = cols != slice->cols;
    while (a < b) {
        ft_llama_run *run = &piece->run[piece->n_runs++];
        int64_t left = cut ? cols - a % cols : b - a; /* of the row */
        run->first = ft_tp_global_elem(slice, a);
        run->n = run->stride = left < b - a ? left : b - a;
        run->count = 1;
        if (cut && a % cols == 0 && b - a >= 2 * cols) {
            run->stride = slice->cols;
            run->count = (b - a) / cols;
        }
        a += run->n * run->count;
    }
}

/* Part `index` of `count` equal ones of what the rank owns. */
static ft_status ft__llama_piece_of(ft_llama *m, const ft_llama_param *p, ft_tensor *tensor,
                                    int64_t pack_first, int index, int count,
                                    ft_llama_piece *piece)
{
    int64_t first, n, real = p->slice.local_rows * p->slice.local_cols;
    FT_TRY(ft_zero_owned(m->zero, tensor, &first, &n));
    if (p->cut == FT_TP_VOCAB) { /* the last rows may be padding */
        int64_t row = ft_tp_global_row(&p->slice, 0), rows = row < 0 ? 0 : p->shape[0] - row;
        if (rows < p->slice.local_rows) real = rows * p->slice.local_cols;
    }
    int64_t a = first > pack_first ? first - pack_first : 0, b = first + n - pack_first;
    if (b > real) b = real;
    if (a >= b) return FT_OK;
    n = b - a;
    b = a + n / count * (index + 1) + n % count * (index + 1) / count;
    a += n / count * index + n % count * index / count;
    if (a >= b) return FT_OK;
    piece->tensor = tensor;
    piece->first = pack_first + a;
    piece->elems = b - a;
    ft__llama_runs(&p->slice, a, b, piece);
    return FT_OK;
}

FT_API ft_status ft_llama_owned(ft_llama *m, const ft_llama_param *p, ft_llama_piece *piece)
{
    memset(piece, 0, sizeof *piece);
    FT_TRY(ft__llama_check_param(m, "ft_llama_owned", p));
    if (p->pack) return ft__llama_piece_of(m, p, p->pack, p->first_elem, 0, 1, piece);
    return p->twin ? ft__llama_piece_of(m, p, p->twin, 0, 0, 1, piece) : FT_OK;
}

FT_API ft_status ft_llama_stored(ft_llama *m, const ft_llama_param *p, ft_llama_piece *piece)
{
    int index, count;
    memset(piece, 0, sizeof *piece);
    FT_TRY(ft__llama_check_param(m, "ft_llama_stored", p));
    if (!p->pack) return FT_OK; /* of another stage, or a tied table's copy */
    ft_zero_replica(m->zero, &index, &count);
    if (p->cut == FT_TP_WHOLE) {
        index += count * m->tp_rank;
        count *= m->tp_size;
    }
    return ft__llama_piece_of(m, p, p->pack, p->first_elem, index, count, piece);
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

/* On one copy of the model pieces of bounded size are exported, elsewhere one tensor at a time. */
FT_API ft_status ft_llama_hash(ft_llama *m, uint64_t *hash)
{
    if (!m || !hash) return ft_error(FT_ERR_ARG, "ft_llama_hash: model or hash is NULL");
    int whole = m->tp_size == 1 && m->P == 1;
    int64_t most = 65536; /* elements at a time, the same on all ranks */
    for (int i = 0; i < m->n_params && !whole; i++)
        if (m->params[i].shape[0] * m->params[i].shape[1] > most)
            most = m->params[i].shape[0] * m->params[i].shape[1];
    float *values = (float *)ft_host_alloc(m->ctx, (size_t)most * sizeof *values);
    if (!values) return FT_ERR_OOM;
    uint64_t h = ft__llama_fnv_begin();
    for (int i = 0; i < m->n_params; i++) {
        const ft_llama_param *p = &m->params[i];
        int64_t total = p->shape[0] * p->shape[1];
        for (int64_t at = 0; at < total; at += most) {
            int64_t n = total - at < most ? total - at : most;
            if (whole) FT_TRY(ft_zero_export(m->zero, p->pack, p->first_elem + at, n, values));
            else FT_TRY(ft__llama_collect(m, p, ft_zero_export, values));
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
