/* femtotron_tp.h: layers cut across ranks (tensor parallelism), and activations cut by tokens
   between them (sequence parallelism).

   Do this, after #include "femtotron.h":

       #define FEMTOTRON_TP_IMPLEMENTATION   (FEMTOTRON_IMPLEMENTATION turns on all headers)
       #include "femtotron_tp.h"

   Then, on every rank, a feed-forward block whose weights no rank holds whole (error checks left
   out):

       ft_tp_create(ctx, &mesh, 0, &tp);
       ft_tp_column_linear(tp, &h, x, w1, NULL, B, T);   x [B,T,C]   w1 [F/t,C]   h [B,T,F/t]
       ft_gelu(ctx, &g, h);
       ft_tp_row_linear(tp, &y, g, w2, NULL);            w2 [C,F/t]               y [B,T,C]

   WHAT IT DOES NOT DO
     It creates no parameters, gives no initial values and does not shard optimizer state: it is
     ops, and a map of which rows of a weight a rank has. It does not overlap its collectives with
     compute: they are on the critical path, which is why tp belongs inside a node. It does not sum
     the gradients of replicated parameters over tp (see [S3]): who owns the gradient buffers does.
     It does not cut a sequence inside attention: there each rank has whole sequences of some heads.

   CONTENTS  (find a part by searching for its mark)
     Declarations                               Implementation
       >>tp        the object                     >>tp.impl
       >>slice     which part is mine             >>slice.impl
       >>linear    boundaries, column and row     >>kernels.impl (rows of kernels), >>linear.impl
       >>vocab     embedding, and head with loss  >>embedding.impl, >>loss.impl

   OPTIONS  (define before the include that has the implementation)
     FEMTOTRON_TP_IMPLEMENTATION   the implementation of this header alone. Default: off;
                   FEMTOTRON_IMPLEMENTATION switches on that of every header.
     sequence_parallel (ft_tp_create)   between the layers each rank has N/t of the tokens, not all.
                   Default 0. Set it wherever t divides B T: it takes activations from S to S/t
                   outside the cut layers, for one more all-gather per column layer in backward.

   TENSOR PARALLELISM  (Shoeybi et al. 2019, "Megatron-LM", section 3)
     y = x W^T is cut in two ways. Weights lie as [outputs, inputs], so what the paper calls a
     column of W is a row in memory. Two ranks, '#' is what rank 0 has:

          column: outputs are cut                    row: inputs are cut

            x         W          y                     x         W          y
          [####]   [####]      [##..]                [##..]   [##..]      [####]  partial sums
          [####]   [####]      [##..]                [##..]   [##..]      [####]  on each rank:
          [####]   [....]      [##..]                [##..]   [##..]      [####]  y = y0 + y1
                   [....]                                     [##..]

     A column layer's outputs are what a row layer takes in, and elementwise functions and attention
     heads work on a part as on the whole. So a block needs two operators at its boundaries, each
     the other's transpose:

          x (all ranks alike)                       forward            backward
              |
             [f]                                    -                  all-reduce dx
            /   \
        W1[0]   W1[1]     column
          |       |
        gelu    gelu
          |       |
        W2[0]   W2[1]     row
            \   /
             [g]                                    all-reduce y       -
              |
          y (all ranks alike)

     [T1] f: x is the same on all ranks; each rank's dx is a sum over its own outputs only, so that
          the whole one is their sum.
     [T2] g: each rank's product is a sum over its own inputs only. A bias is added once, after the
          sum; dy is the same on all ranks, and so is the gradient of that bias.

   SEQUENCE PARALLELISM  (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
   Transformer Models", section 4.2.2)
     An all-reduce is a reduce-scatter and an all-gather. Between the two each rank has N/t
     tokens; whatever works on single tokens (norms, residuals, dropout) can stay there, and what
     backward saves of it is 1/t. Flattened, [B,T,C] is [N,C], and rank r holds tokens r N/t ..
     (r+1) N/t - 1 as a [N/t,C] of two dimensions: a contiguous run, so that collectives move it as
     it lies.

          x, my tokens [N/t,C]                      forward            backward
              |
             [f]                                    all-gather x       reduce-scatter dx
           column ... row
             [g]                                    reduce-scatter y   all-gather dy
              |
          y, my tokens [N/t,C]

     [S1] Column layers save the shard of x, not what they gathered, and gather again when backward
          makes dw: S (t-1)/t more bytes on the wire, S (t-1)/t fewer in memory. The gathered x is
          gone before the buffer of dx begins.
     [S2] Row layers gather dy for dx and dw. The bias is added to the own tokens.
     [S3] What is replicated and sees only the own tokens (norm weights; the bias of a row layer)
          gets the gradient of those tokens alone: a partial sum, to be summed over tp before the
          step.

   THE VOCABULARY
     [V1] Rank r of t holds rows r Vt .. of embedding and head, Vt = ceil(V/t). Rows from V on (at
          the end of the last ranks) are padding: no op reads them, their gradients are written as
          zeros.
     [V2] Embedding: a rank looks up the tokens in its rows, the others' are zero; the sum is exact.
     [V3] Loss: no rank ever holds another's logits. Of each token a rank has its rows' maximum m,
          the sum s of exp(logit - m), and the label's logit z if the row is its own. These three
          numbers travel; then every rank knows M = max m, S = sum of s exp(m - M), the token's loss
          log S + M - z, and the gradient exp(logit - M)/S - [label] of its own logits. All ranks
          compute the loss from the same numbers in the same order: it is bitwise equal on all.
     [V4] That in chunks of c tokens, so that c Vt logits exist. Under sequence parallelism a chunk
          is c/t tokens of each rank, gathered; dx goes back over the same buffer.

   COSTS   t ranks; S = N C e bytes of a whole activation of C columns in a dtype of e bytes; q =
           (t-1)/t. Sent by each rank, in the order forward, backward. Temporary: the largest buffer
           that exists during the op besides inputs, outputs and saved tensors (tag comm).

       op                 sent fwd          sent bwd              temporary      saved for backward
       column             0                 2 S q                 -              x: S
       column, SP         S q               S q (dw) + S q (dx)   S              x: S/t
       row                2 S q             0                     -              x: N I e/t
       row, SP            S q               S q                   S              x: N I e/t
       embedding          2 S q             0                     -              tokens
       embedding, SP      S q               S q                   S              tokens
       head + loss        12 N (t-1)        2 S q + 12 N (t-1)    12 c t         x: S
       head + loss, SP    S q + 12 N (t-1)  2 S q + 12 N (t-1)    c C e, 12 c t  x: S/t
       enter (f)          0                 2 S q                 -              -
       enter, SP          S q               S q                   -              -
       leave (g)          2 S q             0                     -              -
       leave, SP          S q               S q                   -              -

     The loss is deferred to backward, which then sends only its own column; forward's is sent too
     if the loss is read before. Where t does not divide the elements of an all-reduce, the first
     ranks send a little less (ft_all_reduce). A recomputation that replays an op sends its forward
     again; an FT_SAC_SELECTIVE segment keeps the results of collectives. Backward in two halves
     gathers dy of a row layer under SP in both: S q more.
     A Llama layer has two column and two row layers: 8 S q a step, with SP 10 S q; what it keeps of
     its 2 norms and 2 residuals goes from 4 S to 4 S/t.
     Weights, their gradients and flops of cut layers: 1/t. With t = 1 nothing is copied or sent.

   OWNERSHIP, THREADS, ERRORS
     Every op is a collective of the tp group, queued on the compute stream: its ranks call the same
     ops in the same order, replays and backward included. That holds for reading a deferred loss:
     all tp ranks read it, or none. An ft_tp belongs to its context and ends with it. Errors are
     those of femtotron.h; what is wrong with the data (a token, a label) is found by all tp ranks
     alike.

   LETTERS  B batch, T tokens of a sequence, N = B T, C hidden, I inputs, O outputs, H query heads,
            K kv heads, D head size, F feed-forward, V vocabulary, Vt = ceil(V/t), t tp ranks.

   License: MIT, see LICENSE. */

#ifndef FEMTOTRON_TP_H
#define FEMTOTRON_TP_H

#ifndef FEMTOTRON_H
#error "femtotron_tp.h builds on femtotron.h: include femtotron.h first"
#endif

/* ---------------------------------------------------------------------------------------- >>tp */

typedef struct ft_tp { /* to read */
    ft_ctx *ctx;
    ft_group *group;       /* named "tp"; its traffic is that of this header's ops */
    int size, rank;        /* t, and this rank's place in 0..t-1 */
    int sequence_parallel;
} ft_tp;

FT_API ft_status ft_tp_create(ft_ctx *ctx, const ft_mesh *mesh, int sequence_parallel, ft_tp **out);
/* Makes a group over the mesh's tp axis and registers the ops. Owned by the context. FT_ERR_COMM
   unless all tp ranks agree on sequence_parallel. */

FT_API ft_status ft_tp_check(int size, int sequence_parallel, int64_t heads, int64_t kv_heads,
                             int64_t intermediate, int64_t B, int64_t T);
/* Before anything runs: whether t = size divides heads, kv heads and intermediate, and with
   sequence parallelism B T. FT_ERR_UNSUPPORTED names the sizes and the nearest that work. A size of
   0 is not checked. */

/* ------------------------------------------------------------------------------------- >>slice */

/* How a global weight [rows, cols] is cut. A vector has cols 1. */
typedef enum ft_tp_cut {
    FT_TP_WHOLE = 0, /* every rank has all of it: norms, a row layer's bias */
    FT_TP_ROWS,      /* a column layer's weight and bias: rows/t rows each */
    FT_TP_COLUMNS,   /* a row layer's weight: cols/t columns each */
    FT_TP_GATE_UP,   /* rows are F of gate, then F of up: each rank has F/t of both, gate first */
    FT_TP_VOCAB      /* embedding, head: ceil(rows/t) rows each, the last of them padding */
} ft_tp_cut;

typedef struct ft_tp_slice {
    int size, rank;
    int64_t rows, cols;             /* of the global weight */
    int64_t local_rows, local_cols; /* of this rank's, padding included */
    /* Private: rows are n_parts runs, each cut alike (or not at all). */
    int rows_cut, cols_cut, n_parts;
    int64_t part_rows[3], part_local[3];
} ft_tp_slice;

FT_API ft_status ft_tp_slice_make(ft_tp_cut cut, int size, int rank, const char *name, int64_t rows,
                                  int64_t cols, ft_tp_slice *slice);
/* The part of rank `rank` of `size`. `name` appears in messages: FT_ERR_UNSUPPORTED, with the
   nearest sizes that work, where size does not divide. */
FT_API ft_status ft_tp_slice_qkv(int size, int rank, int64_t H, int64_t K, int64_t D, int64_t cols,
                                 ft_tp_slice *slice);
/* Packed [(H+2K)D, cols]: the rows of the rank's H/t query heads, then of its K/t key heads, then
   of their values. Query head h reads kv head h / (H/K), which is on the same rank: the slice is
   the packed weight of a smaller model. FT_ERR_UNSUPPORTED unless size divides H and K. */
FT_API int64_t ft_tp_local_row(const ft_tp_slice *slice, int64_t global_row);
/* Where a global row is on this rank, -1 if it is not here. */
FT_API int64_t ft_tp_global_row(const ft_tp_slice *slice, int64_t local_row);
/* The inverse; -1 for padding. */
FT_API int64_t ft_tp_local_elem(const ft_tp_slice *slice, int64_t global_elem);
FT_API int64_t ft_tp_global_elem(const ft_tp_slice *slice, int64_t local_elem);
/* The same for elements, counted row-major. */
FT_API void ft_tp_slice_cut(const ft_tp_slice *slice, size_t elem_bytes, const void *global,
                            void *local);
/* local = this rank's part of a host array of the global weight; padding is zero. */
FT_API void ft_tp_slice_paste(const ft_tp_slice *slice, size_t elem_bytes, const void *local,
                              void *global);
/* The way back: writes this rank's part of global, and nothing of the padding. */

/* ------------------------------------------------------------------------------------ >>linear */

/* As with the ops of femtotron.h, inputs are fp32 or all bf16, and weight gradients go where their
   sinks say, in the dtype of that buffer. "x by tokens" is [B,T,C] (or other leading dimensions of
   N rows in all), the same on all tp ranks; under sequence parallelism it is this rank's [N/t,C].
   FT_ERR_SHAPE names all shapes; under sequence parallelism also where t does not divide N. */

FT_API ft_status ft_tp_column_linear(ft_tp *tp, ft_tensor **y, ft_tensor *x, ft_tensor *w,
                                     ft_tensor *b, int64_t B, int64_t T);
/* y[B,T,O/t] = x w[O/t,I]^T + b[O/t], x by tokens; b may be NULL. [T1] [S1]. 2 N I O/t flops.
   Saved: x if w has a gradient, w if x has one. In bf16 the ranks' dx are rounded before they are
   added. */
FT_API ft_status ft_tp_row_linear(ft_tp *tp, ft_tensor **y, ft_tensor *x, ft_tensor *w,
                                  ft_tensor *b);
/* y by tokens, O columns = sum over ranks of x[B,T,I/t] w[O,I/t]^T, + b[O]; b may be NULL, and is
   replicated. [T2] [S2] [S3]. 2 N I/t O flops. Saved: x if w has a gradient, w if x has one. In
   bf16 the products are rounded before they are added, and the sum before the bias. */

FT_API ft_status ft_tp_enter(ft_tp *tp, ft_tensor **y, ft_tensor *x, int64_t B, int64_t T);
/* The operator f alone, for ops of one's own: y[B,T,C] = x by tokens; the gradient is summed over
   the ranks. A copy of S bytes: column layers do without. Saved: nothing. */
FT_API ft_status ft_tp_leave(ft_tp *tp, ft_tensor **y, ft_tensor *x);
/* The operator g alone: y by tokens = the ranks' sum of x[B,T,C]. In place: x is gone; not under
   sequence parallelism, where y is another tensor. Saved: nothing. */

/* ------------------------------------------------------------------------------------- >>vocab */

FT_API ft_status ft_tp_embedding(ft_tp *tp, ft_tensor **y, ft_tensor *tokens, ft_tensor *table,
                                 int64_t V);
/* y by tokens = rows of the table of which this rank holds table[Vt,C]; tokens int32 [B,T], the
   same on all tp ranks. [V1] [V2]. Bitwise that of one rank (but -0 becomes 0). Saved: tokens. A
   token outside 0..V-1: FT_ERR_DATA naming its position, on every tp rank. Gradient rows are summed
   in token order; 4 (Vt + N) bytes of workspace. */

FT_API ft_status ft_tp_linear_cross_entropy(ft_tp *tp, ft_tensor **loss, ft_tensor *x, ft_tensor *w,
                                            ft_tensor *labels, ft_tensor *scale,
                                            int64_t chunk_tokens, int64_t V);
/* ft_linear_cross_entropy over a vocabulary cut in t: x by tokens, w [Vt,C], labels int32 [B,T] of
   all tokens, scale fp32 [1] or NULL (1 / counted labels, 0 if none); both the same on all tp
   ranks. The loss, fp32 [1], too. [V1] [V3] [V4]: chunk_tokens (0: 2048) tokens at a time, under
   sequence parallelism rounded down to a multiple of t, but at least t. Memory at the peak: chunk
   Vt logits (act) and the temporaries in COSTS; more than one chunk and a bf16 dw need an fp32
   [Vt,C] accumulator (workspace). 6 N Vt C flops on a tape, if the loss is not read before
   backward. dx is written over x where no one else reads it. A label outside 0..V-1 and not -100:
   FT_ERR_DATA naming its position, on every tp rank. Loss and gradients have the same bits whether
   deferred or not; another chunk_tokens may change the last bits. */

#endif /* FEMTOTRON_TP_H */

#if defined(FEMTOTRON_IMPLEMENTATION) || defined(FEMTOTRON_TP_IMPLEMENTATION)
#ifndef FT__TP_IMPLEMENTED
#define FT__TP_IMPLEMENTED

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ----------------------------------------------------------------------------------- >>tp.impl */

enum { FT__TP_TEXT_BYTES = 224 };

/* The multiples of `step` around n that are at least 1: "4 or 8". */
static void ft__tp_multiples(int64_t n, int64_t step, char *text)
{
    int64_t below = n / step * step;
    if (below > 0)
        snprintf(text, FT__TP_TEXT_BYTES, "%lld or %lld", (long long)below,
                 (long long)(below + step));
    else snprintf(text, FT__TP_TEXT_BYTES, "%lld", (long long)step);
}

/* The divisors of n around t that could be a number of ranks: "2 or 4". */
static void ft__tp_divisors(int64_t n, int64_t t, char *text)
{
    int64_t below = t < n ? t : n, above = t, most = n < 65536 ? n : 65536;
    while (n % below) below--;
    while (above <= most && n % above) above++;
    if (above <= most)
        snprintf(text, FT__TP_TEXT_BYTES, "%lld or %lld", (long long)below, (long long)above);
    else snprintf(text, FT__TP_TEXT_BYTES, "%lld", (long long)below);
}

/* t must divide n, which is called `what`. */
static ft_status ft__tp_divides(const char *what, int64_t n, int t)
{
    char sizes[FT__TP_TEXT_BYTES], ranks[FT__TP_TEXT_BYTES];
    if (n < 1)
        return ft_error(FT_ERR_ARG, "tp: %s is %lld; it must be positive", what, (long long)n);
    if (n % t == 0) return FT_OK;
    ft__tp_multiples(n, t, sizes);
    ft__tp_divisors(n, t, ranks);
    return ft_error(FT_ERR_UNSUPPORTED, "tp: %s %lld cannot be cut in equal parts by tp %d; "
                    "nearest that work: %s; nearest tp: %s", what, (long long)n, t, sizes, ranks);
}

static ft_status ft__tp_divides_tokens(int64_t B, int64_t T, int t)
{
    char sizes[FT__TP_TEXT_BYTES], ranks[FT__TP_TEXT_BYTES];
    if (B < 1 || T < 1)
        return ft_error(FT_ERR_ARG, "tp: B %lld x T %lld tokens: both must be positive",
                        (long long)B, (long long)T);
    if (B * T % t == 0) return FT_OK;
    int64_t a = B, common = t; /* the greatest common divisor of B and t */
    while (a) {
        int64_t rest = common % a;
        common = a;
        a = rest;
    }
    ft__tp_multiples(T, t / common, sizes);
    ft__tp_divisors(B * T, t, ranks);
    return ft_error(FT_ERR_UNSUPPORTED, "tp: sequence parallelism cannot cut B %lld x T %lld = "
                    "%lld tokens in equal parts by tp %d; nearest T: %s; nearest tp: %s; or "
                    "switch sequence parallelism off", (long long)B, (long long)T,
                    (long long)(B * T), t, sizes, ranks);
}

FT_API ft_status ft_tp_check(int size, int sequence_parallel, int64_t heads, int64_t kv_heads,
                             int64_t intermediate, int64_t B, int64_t T)
{
    if (size < 1) return ft_error(FT_ERR_ARG, "tp: %d ranks; it must be at least 1", size);
    if (heads) FT_TRY(ft__tp_divides("heads", heads, size));
    if (kv_heads) FT_TRY(ft__tp_divides("kv_heads", kv_heads, size));
    if (intermediate) FT_TRY(ft__tp_divides("intermediate", intermediate, size));
    if (sequence_parallel && B && T) FT_TRY(ft__tp_divides_tokens(B, T, size));
    return FT_OK;
}

static ft_status ft__tp_register(ft_ctx *ctx);

FT_API ft_status ft_tp_create(ft_ctx *ctx, const ft_mesh *mesh, int sequence_parallel, ft_tp **out)
{
    if (!ctx || !mesh || !out)
        return ft_error(FT_ERR_ARG, "ft_tp_create: ctx, mesh and out must be given");
    *out = NULL;
    ft_tp *tp = (ft_tp *)ft_host_alloc(ctx, sizeof *tp);
    if (!tp) return FT_ERR_OOM;
    tp->ctx = ctx;
    tp->sequence_parallel = sequence_parallel != 0;
    FT_TRY(ft_mesh_group(ctx, mesh, FT_AXIS_TP, "tp", &tp->group));
    tp->size = ft_group_size(tp->group);
    tp->rank = ft_group_rank(tp->group);
    FT_TRY(ft__tp_register(ctx));
    FT_TRY(ft_agree(tp->group, "sequence_parallel of ft_tp_create",
                    (uint64_t)tp->sequence_parallel));
    *out = tp;
    return FT_OK;
}

/* -------------------------------------------------------------------------------- >>slice.impl */

static ft_status ft__tp_slice_begin(int size, int rank, const char *name, int64_t rows,
                                    int64_t cols, ft_tp_slice *slice)
{
    memset(slice, 0, sizeof *slice);
    if (size < 1 || rank < 0 || rank >= size)
        return ft_error(FT_ERR_ARG, "tp: %s: rank %d of %d", name, rank, size);
    if (rows < 1 || cols < 1 || rows > INT64_MAX / cols)
        return ft_error(FT_ERR_ARG, "tp: %s: a weight of %lld x %lld", name, (long long)rows,
                        (long long)cols);
    slice->size = size;
    slice->rank = rank;
    slice->rows = rows;
    slice->cols = slice->local_cols = cols;
    return FT_OK;
}

/* The next run of rows, of which the rank has `local`. */
static void ft__tp_slice_part(ft_tp_slice *slice, int64_t rows, int64_t local)
{
    slice->part_rows[slice->n_parts] = rows;
    slice->part_local[slice->n_parts++] = local;
    slice->local_rows += local;
}

FT_API ft_status ft_tp_slice_make(ft_tp_cut cut, int size, int rank, const char *name, int64_t rows,
                                  int64_t cols, ft_tp_slice *slice)
{
    char what[FT__TP_TEXT_BYTES];
    if (!name) name = "a weight";
    FT_TRY(ft__tp_slice_begin(size, rank, name, rows, cols, slice));
    slice->rows_cut = cut != FT_TP_WHOLE && cut != FT_TP_COLUMNS;
    switch (cut) {
    case FT_TP_WHOLE:
        ft__tp_slice_part(slice, rows, rows);
        return FT_OK;
    case FT_TP_ROWS:
        snprintf(what, sizeof what, "rows of %.80s", name);
        FT_TRY(ft__tp_divides(what, rows, size));
        ft__tp_slice_part(slice, rows, rows / size);
        return FT_OK;
    case FT_TP_COLUMNS:
        snprintf(what, sizeof what, "columns of %.80s", name);
        FT_TRY(ft__tp_divides(what, cols, size));
        ft__tp_slice_part(slice, rows, rows);
        slice->cols_cut = 1;
        slice->local_cols = cols / size;
        return FT_OK;
    case FT_TP_GATE_UP:
        if (rows % 2)
            return ft_error(FT_ERR_ARG, "tp: %s has %lld rows: gate and up have half of them each",
                            name, (long long)rows);
        snprintf(what, sizeof what, "intermediate (half of the rows of %.80s)", name);
        FT_TRY(ft__tp_divides(what, rows / 2, size));
        ft__tp_slice_part(slice, rows / 2, rows / 2 / size);
        ft__tp_slice_part(slice, rows / 2, rows / 2 / size);
        return FT_OK;
    case FT_TP_VOCAB:
        ft__tp_slice_part(slice, rows, rows / size + (rows % size != 0));
        return FT_OK;
    }
    return ft_error(FT_ERR_ARG, "tp: %s: unknown cut %d", name, (int)cut);
}

FT_API ft_status ft_tp_slice_qkv(int size, int rank, int64_t H, int64_t K, int64_t D, int64_t cols,
                                 ft_tp_slice *slice)
{
    if (H < 1 || K < 1 || D < 1 || H % K || H > INT32_MAX || D > INT32_MAX)
        return ft_error(FT_ERR_ARG, "tp: %lld query heads, %lld kv heads of %lld: each kv head "
                        "must serve the same number of query heads", (long long)H, (long long)K,
                        (long long)D);
    FT_TRY(ft__tp_slice_begin(size, rank, "qkv", H * D + 2 * K * D, cols, slice));
    FT_TRY(ft__tp_divides("heads", H, size));
    FT_TRY(ft__tp_divides("kv_heads", K, size));
    slice->rows_cut = 1;
    ft__tp_slice_part(slice, H * D, H / size * D);
    ft__tp_slice_part(slice, K * D, K / size * D);
    ft__tp_slice_part(slice, K * D, K / size * D);
    return FT_OK;
}

FT_API int64_t ft_tp_local_row(const ft_tp_slice *slice, int64_t global_row)
{
    int64_t before = 0, row = global_row;
    if (row < 0) return -1;
    for (int p = 0; p < slice->n_parts; p++) {
        int64_t local = slice->part_local[p];
        if (row < slice->part_rows[p]) {
            if (slice->rows_cut) row -= local * slice->rank;
            return row >= 0 && row < local ? before + row : -1;
        }
        row -= slice->part_rows[p];
        before += local;
    }
    return -1;
}

FT_API int64_t ft_tp_global_row(const ft_tp_slice *slice, int64_t local_row)
{
    int64_t before = 0, row = local_row;
    if (row < 0) return -1;
    for (int p = 0; p < slice->n_parts; p++) {
        int64_t local = slice->part_local[p];
        if (row < local) {
            if (slice->rows_cut) row += local * slice->rank;
            return row < slice->part_rows[p] ? before + row : -1;
        }
        row -= local;
        before += slice->part_rows[p];
    }
    return -1;
}

static int64_t ft__tp_first_col(const ft_tp_slice *slice)
{
    return slice->cols_cut ? slice->local_cols * slice->rank : 0;
}

FT_API int64_t ft_tp_local_elem(const ft_tp_slice *slice, int64_t global_elem)
{
    if (global_elem < 0) return -1;
    int64_t row = ft_tp_local_row(slice, global_elem / slice->cols);
    int64_t col = global_elem % slice->cols - ft__tp_first_col(slice);
    if (row < 0 || col < 0 || col >= slice->local_cols) return -1;
    return row * slice->local_cols + col;
}

FT_API int64_t ft_tp_global_elem(const ft_tp_slice *slice, int64_t local_elem)
{
    if (local_elem < 0) return -1;
    int64_t row = ft_tp_global_row(slice, local_elem / slice->local_cols);
    if (row < 0) return -1;
    return row * slice->cols + ft__tp_first_col(slice) + local_elem % slice->local_cols;
}

FT_API void ft_tp_slice_cut(const ft_tp_slice *slice, size_t elem_bytes, const void *global,
                            void *local)
{
    size_t row_bytes = (size_t)slice->local_cols * elem_bytes;
    for (int64_t r = 0; r < slice->local_rows; r++) {
        char *to = (char *)local + (size_t)r * row_bytes;
        int64_t from = ft_tp_global_elem(slice, r * slice->local_cols);
        if (from < 0) memset(to, 0, row_bytes);
        else memcpy(to, (const char *)global + (size_t)from * elem_bytes, row_bytes);
    }
}

FT_API void ft_tp_slice_paste(const ft_tp_slice *slice, size_t elem_bytes, const void *local,
                              void *global)
{
    size_t row_bytes = (size_t)slice->local_cols * elem_bytes;
    for (int64_t r = 0; r < slice->local_rows; r++) {
        int64_t to = ft_tp_global_elem(slice, r * slice->local_cols);
        if (to < 0) continue;
        memcpy((char *)global + (size_t)to * elem_bytes,
               (const char *)local + (size_t)r * row_bytes, row_bytes);
    }
}

/* ------------------------------------------------------------------------------ >>kernels.impl

   Rows of kernels that the ops below queue by ft_op_run. They are private: their callers have
   checked all shapes. Elements are loaded to fp32, computed in fp32 and rounded once where they are
   stored. */

enum { FT__TP_BLOCK = 256, FT__TP_IGNORE = -100 };

static ft_status ft__tp_given(ft_op_call *call) /* infer: the outputs are as they were given */
{
    (void)call;
    return FT_OK;
}

static int64_t ft__tp_elems(const ft_view *v)
{
    int64_t n = 1;
    for (int i = 0; i < v->ndim; i++) n *= v->shape[i];
    return n;
}

static int64_t ft__tp_cols(const ft_view *v) { return v->shape[v->ndim - 1]; }
static int64_t ft__tp_rows(const ft_view *v) { return ft__tp_elems(v) / ft__tp_cols(v); }

static int64_t ft__tp_span(int64_t n, int64_t at) /* elements of the block that starts at `at` */
{
    int64_t most = FT__TP_BLOCK;
    return n - at < most ? n - at : most;
}

static void ft__tp_get(float *to, const ft_view *v, int64_t first, int64_t n)
{
    if (v->dtype == FT_BF16) {
        const uint16_t *from = (const uint16_t *)v->data + first;
        for (int64_t i = 0; i < n; i++) to[i] = ft_f32_from_bf16(from[i]);
    } else {
        memcpy(to, (const float *)v->data + first, (size_t)n * sizeof *to);
    }
}

static void ft__tp_put(const ft_view *v, int64_t first, int64_t n, const float *from)
{
    if (v->dtype == FT_BF16) {
        uint16_t *to = (uint16_t *)v->data + first;
        for (int64_t i = 0; i < n; i++) to[i] = ft_bf16_from_f32(from[i]);
    } else {
        memcpy((float *)v->data + first, from, (size_t)n * sizeof *from);
    }
}

/* v = or += from, n <= FT__TP_BLOCK; rounded once. */
static void ft__tp_give(const ft_view *v, int64_t first, int64_t n, const float *from, int64_t add)
{
    float sum[FT__TP_BLOCK];
    if (!add) {
        ft__tp_put(v, first, n, from);
        return;
    }
    ft__tp_get(sum, v, first, n);
    for (int64_t i = 0; i < n; i++) sum[i] += from[i];
    ft__tp_put(v, first, n, sum);
}

/* A row of this file that consists of a kernel alone. */
#define FT__TP_KERNEL(name, n_in, optional, scratch, forward, gpu)                                 \
    {name, n_in, 1, optional, 0, 0, {0, 0, 0, 0, 0, 0, 0, 0}, 0, 0, 0, ft__tp_given, NULL,         \
     scratch, forward, NULL, NULL, NULL, NULL, FT_GPU_KERNELS(gpu, NULL, NULL)}

/* Every row of y[n,O] = or += b[O] (attr i[0]: add). Moves n O elements once or twice. */
static ft_status ft__tp_bias_forward(const ft_op_call *call)
{
    const ft_view *b = &call->in[0], *y = &call->out[0];
    int64_t n = ft__tp_rows(y), O = ft__tp_cols(y);
    float block[FT__TP_BLOCK];
    for (int64_t at = 0; at < O; at += FT__TP_BLOCK) {
        ft__tp_get(block, b, at, ft__tp_span(O, at));
        for (int64_t r = 0; r < n; r++)
            ft__tp_give(y, r * O + at, ft__tp_span(O, at), block, call->attr.i[0]);
    }
    return FT_OK;
}

static const ft_op ft__tp_op_bias =
    FT__TP_KERNEL("tp_bias", 1, 0, NULL, ft__tp_bias_forward, ftk_tp_bias);

/* db[O] = or += the sum of the rows of dy[n,O], in row order in fp32 (attr i[0]: add). */
static ft_status ft__tp_bias_grad_forward(const ft_op_call *call)
{
    const ft_view *dy = &call->in[0], *db = &call->out[0];
    int64_t n = ft__tp_rows(dy), O = ft__tp_cols(dy);
    float sum[FT__TP_BLOCK], row[FT__TP_BLOCK];
    for (int64_t at = 0; at < O; at += FT__TP_BLOCK) {
        int64_t m = ft__tp_span(O, at);
        memset(sum, 0, sizeof sum);
        for (int64_t r = 0; r < n; r++) {
            ft__tp_get(row, dy, r * O + at, m);
            for (int64_t j = 0; j < m; j++) sum[j] += row[j];
        }
        ft__tp_give(db, at, m, sum, call->attr.i[0]);
    }
    return FT_OK;
}

static void ft__tp_bias_grad_scratch(ft_op_call *call)
{
    int64_t n = ft__tp_rows(&call->in[0]), O = ft__tp_cols(&call->in[0]);
    if (call->device == FT_GPU) call->workspace_bytes = ftk_rows_sum_bytes(n, O);
}

static const ft_op ft__tp_op_bias_grad =
    FT__TP_KERNEL("tp_bias_grad", 1, 0, ft__tp_bias_grad_scratch, ft__tp_bias_grad_forward,
                  ftk_tp_bias_grad);

static ft_status ft__tp_token_check(int32_t token, int64_t at, int64_t n, int64_t V)
{
    if (token >= 0 && token < V) return FT_OK;
    return ft_error(FT_ERR_DATA, "tp_embedding: token %d at position %lld of %lld is outside "
                    "0..%lld", (int)token, (long long)at, (long long)n, (long long)(V - 1));
}

/* [V2] y[N,C]: the rows of table[Vt,C], the first of which is row i[0] of the whole, that tokens in
   it ask for; zero for the others. in[1] is absent where all of the rank's rows are padding.
   i[1]: V. Moves N C elements out, N C / t of them in. */
static ft_status ft__tp_lookup_forward(const ft_op_call *call)
{
    const ft_view *table = &call->in[1], *y = &call->out[0];
    const int32_t *tokens = (const int32_t *)call->in[0].data;
    int64_t n = ft__tp_elems(&call->in[0]), first = call->attr.i[0];
    int64_t rows = table->present ? table->shape[0] : 0;
    size_t row_bytes = (size_t)ft__tp_cols(y) * ft_dtype_bytes(y->dtype);
    for (int64_t i = 0; i < n; i++) {
        char *to = (char *)y->data + (size_t)i * row_bytes;
        int64_t row = tokens[i] - first;
        FT_TRY(ft__tp_token_check(tokens[i], i, n, call->attr.i[1]));
        if (row < 0 || row >= rows) memset(to, 0, row_bytes);
        else memcpy(to, (const char *)table->data + (size_t)row * row_bytes, row_bytes);
    }
    return FT_OK;
}

static const ft_op ft__tp_op_lookup =
    FT__TP_KERNEL("tp_lookup", 2, FT_IN(1), NULL, ft__tp_lookup_forward, ftk_tp_lookup);

/* A list of positions for each of the table's rows: the head [Vt], the next position [N]. */
static void ft__tp_lookup_grad_scratch(ft_op_call *call)
{
    int64_t rows = call->out[0].shape[0], n = ft__tp_elems(&call->in[0]);
    call->workspace_bytes = (size_t)(rows + n) * 4;
    if (call->device == FT_GPU)
        call->workspace_bytes = ftk_lookup_bytes(rows, n, call->out[0].shape[1]);
}

/* dtable[Vt,C] = or += (i[2]) the rows of dy[N,C] by token, in token order, each row of the table
   summed in fp32 and rounded once. i[0]: first row, i[1]: V. */
static ft_status ft__tp_lookup_grad_forward(const ft_op_call *call)
{
    const int32_t *tokens = (const int32_t *)call->in[0].data;
    const ft_view *dy = &call->in[1], *dtable = &call->out[0];
    int64_t n = ft__tp_elems(&call->in[0]), rows = dtable->shape[0], C = dtable->shape[1];
    int32_t *head = (int32_t *)call->workspace, *next = head + rows;
    float sum[FT__TP_BLOCK], g[FT__TP_BLOCK];
    for (int64_t v = 0; v < rows; v++) head[v] = -1;
    for (int64_t i = n - 1; i >= 0; i--) {
        int64_t row = tokens[i] - call->attr.i[0];
        FT_TRY(ft__tp_token_check(tokens[i], i, n, call->attr.i[1]));
        if (row < 0 || row >= rows) continue;
        next[i] = head[row];
        head[row] = (int32_t)i;
    }
    for (int64_t v = 0; v < rows; v++) {
        for (int64_t at = 0; at < C && (head[v] >= 0 || !call->attr.i[2]); at += FT__TP_BLOCK) {
            int64_t m = ft__tp_span(C, at);
            memset(sum, 0, sizeof sum);
            for (int64_t i = head[v]; i >= 0; i = next[i]) {
                ft__tp_get(g, dy, i * C + at, m);
                for (int64_t j = 0; j < m; j++) sum[j] += g[j];
            }
            ft__tp_give(dtable, v * C + at, m, sum, call->attr.i[2]);
        }
    }
    return FT_OK;
}

static const ft_op ft__tp_op_lookup_grad =
    FT__TP_KERNEL("tp_lookup_grad", 2, 0, ft__tp_lookup_grad_scratch, ft__tp_lookup_grad_forward,
                  ftk_tp_lookup_grad);

/* ---- loss */

typedef struct ft__tp_sums { /* what the kernels of one pass share; lies in an int32 tensor */
    double total;   /* of the tokens' losses */
    double by;      /* what the loss is multiplied by */
    float factor;   /* of the logits' gradients: by * dloss */
    int32_t spare;
} ft__tp_sums;

enum { FT__TP_SUMS_ELEMS = (int)(sizeof(ft__tp_sums) / 4), FT__TP_STATS = 3 };

static ft__tp_sums ft__tp_sums_get(const ft_view *v)
{
    ft__tp_sums sums;
    memcpy(&sums, v->data, sizeof sums);
    return sums;
}

/* sums = 0, by, factor from labels, scale or NULL, dloss or NULL. Checks every label before
   anything depends on one. i[0]: V. */
static ft_status ft__tp_loss_begin_forward(const ft_op_call *call)
{
    const int32_t *labels = (const int32_t *)call->in[0].data;
    const ft_view *scale = &call->in[1], *dloss = &call->in[2];
    int64_t n = ft__tp_elems(&call->in[0]), V = call->attr.i[0], counted = 0;
    ft__tp_sums sums;
    memset(&sums, 0, sizeof sums);
    for (int64_t i = 0; i < n; i++) {
        if (labels[i] == FT__TP_IGNORE) continue;
        if (labels[i] < 0 || labels[i] >= V)
            return ft_error(FT_ERR_DATA, "tp_linear_cross_entropy: label %d at position %lld of "
                            "%lld is outside the vocabulary 0..%lld; -100 marks a token to ignore",
                            (int)labels[i], (long long)i, (long long)n, (long long)(V - 1));
        counted++;
    }
    sums.by = counted ? 1.0 / (double)counted : 0;
    if (scale->present && counted) sums.by = (double)((const float *)scale->data)[0];
    if (dloss->present) sums.factor = (float)(sums.by * (double)((const float *)dloss->data)[0]);
    memcpy(call->out[0].data, &sums, sizeof sums);
    return FT_OK;
}

static const ft_op ft__tp_op_loss_begin =
    FT__TP_KERNEL("tp_loss_begin", 3, FT_IN(1) | FT_IN(2), NULL, ft__tp_loss_begin_forward,
                  ftk_tp_loss_begin);

/* The label of row k of a chunk that begins at token i[0] of each of several runs of i[2] tokens
   and takes i[1] of each. */
static int32_t ft__tp_label(const ft_op_call *call, const ft_view *labels, int64_t k)
{
    int64_t per = call->attr.i[1];
    return ((const int32_t *)labels->data)[k / per * call->attr.i[2] + call->attr.i[0] + k % per];
}

/* The index of a label among the rank's own rows of the head, which begin at i[3]; -1 elsewhere. */
static int64_t ft__tp_own_row(const ft_op_call *call, int32_t label, int64_t rows)
{
    int64_t row = label - call->attr.i[3];
    return label != FT__TP_IGNORE && row >= 0 && row < rows ? row : -1;
}

/* [V3] stats[c,3] = (max, sum of exp, the label's logit) of the own logits[c,rows], which are
   absent where all rows are padding. in: labels, logits. */
static ft_status ft__tp_loss_stats_forward(const ft_op_call *call)
{
    const ft_view *labels = &call->in[0], *z = &call->in[1];
    int64_t c = ft__tp_rows(&call->out[0]), rows = z->present ? ft__tp_cols(z) : 0;
    float block[FT__TP_BLOCK];
    for (int64_t k = 0; k < c; k++) {
        float *stats = (float *)call->out[0].data + k * FT__TP_STATS, most = -INFINITY;
        int64_t own = ft__tp_own_row(call, ft__tp_label(call, labels, k), rows);
        double sum = 0;
        for (int64_t at = 0; at < rows; at += FT__TP_BLOCK) {
            int64_t m = ft__tp_span(rows, at);
            ft__tp_get(block, z, k * rows + at, m);
            for (int64_t j = 0; j < m; j++) most = block[j] > most ? block[j] : most;
        }
        for (int64_t at = 0; at < rows; at += FT__TP_BLOCK) {
            int64_t m = ft__tp_span(rows, at);
            ft__tp_get(block, z, k * rows + at, m);
            for (int64_t j = 0; j < m; j++) sum += (double)expf(block[j] - most);
        }
        stats[0] = most;
        stats[1] = (float)sum;
        stats[2] = 0;
        if (own >= 0) ft__tp_get(&stats[2], z, k * rows + own, 1);
    }
    return FT_OK;
}

static const ft_op ft__tp_op_loss_stats =
    FT__TP_KERNEL("tp_loss_stats", 2, FT_IN(1), NULL, ft__tp_loss_stats_forward, ftk_tp_loss_stats);

typedef struct ft__tp_token { /* [V3] of all ranks together */
    float most;
    double sum, logit;
} ft__tp_token;

/* Row k of stats[t,c,3], added in rank order. Ranks that do not have the label's row sent 0. */
static ft__tp_token ft__tp_token_all(const ft_view *stats, int64_t k)
{
    int64_t t = stats->shape[0], c = stats->shape[1];
    const float *at = (const float *)stats->data + k * FT__TP_STATS;
    ft__tp_token token;
    token.most = -INFINITY;
    token.sum = token.logit = 0;
    for (int64_t r = 0; r < t; r++) {
        float most = at[r * c * FT__TP_STATS];
        token.most = most > token.most ? most : token.most;
    }
    for (int64_t r = 0; r < t; r++) {
        const float *own = at + r * c * FT__TP_STATS;
        token.sum += (double)own[1] * exp((double)own[0] - (double)token.most);
        token.logit += (double)own[2];
    }
    return token;
}

/* sums.total += the losses of a chunk, in its order. in: labels, stats[t,c,3]. */
static ft_status ft__tp_loss_add_forward(const ft_op_call *call)
{
    const ft_view *labels = &call->in[0], *stats = &call->in[1];
    ft__tp_sums sums = ft__tp_sums_get(&call->out[0]);
    for (int64_t k = 0; k < stats->shape[1]; k++) {
        if (ft__tp_label(call, labels, k) == FT__TP_IGNORE) continue;
        ft__tp_token token = ft__tp_token_all(stats, k);
        sums.total += log(token.sum) + ((double)token.most - token.logit);
    }
    memcpy(call->out[0].data, &sums, sizeof sums);
    return FT_OK;
}

static const ft_op ft__tp_op_loss_add =
    FT__TP_KERNEL("tp_loss_add", 2, 0, NULL, ft__tp_loss_add_forward, ftk_tp_loss_add);

/* logits[c,rows] become their gradients, factor (exp(z - M)/S - [label]), zero where the token is
   ignored. in: labels, stats[t,c,3], sums. */
static ft_status ft__tp_loss_grad_forward(const ft_op_call *call)
{
    const ft_view *labels = &call->in[0], *stats = &call->in[1], *z = &call->out[0];
    ft__tp_sums sums = ft__tp_sums_get(&call->in[2]);
    int64_t rows = ft__tp_cols(z);
    float block[FT__TP_BLOCK];
    for (int64_t k = 0; k < ft__tp_rows(z); k++) {
        int32_t label = ft__tp_label(call, labels, k);
        int64_t own = ft__tp_own_row(call, label, rows);
        ft__tp_token token = ft__tp_token_all(stats, k);
        float over = (float)((double)sums.factor / token.sum);
        for (int64_t at = 0; at < rows; at += FT__TP_BLOCK) {
            int64_t m = ft__tp_span(rows, at);
            memset(block, 0, sizeof block);
            if (label != FT__TP_IGNORE) {
                ft__tp_get(block, z, k * rows + at, m);
                for (int64_t j = 0; j < m; j++) block[j] = expf(block[j] - token.most) * over;
                if (own >= at && own < at + m) block[own - at] -= sums.factor;
            }
            ft__tp_put(z, k * rows + at, m, block);
        }
    }
    return FT_OK;
}

static const ft_op ft__tp_op_loss_grad =
    FT__TP_KERNEL("tp_loss_grad", 3, 0, NULL, ft__tp_loss_grad_forward, ftk_tp_loss_grad);

/* loss[1] = by * total. in: sums. */
static ft_status ft__tp_loss_end_forward(const ft_op_call *call)
{
    ft__tp_sums sums = ft__tp_sums_get(&call->in[0]);
    float loss = (float)(sums.by * sums.total);
    memcpy(call->out[0].data, &loss, sizeof loss);
    return FT_OK;
}

static const ft_op ft__tp_op_loss_end =
    FT__TP_KERNEL("tp_loss_end", 1, 0, NULL, ft__tp_loss_end_forward, ftk_tp_loss_end);

/* ------------------------------------------------------------------------------- >>linear.impl */

static ft_tp *ft__tp_of(const ft_op_call *call)
{
    return (ft_tp *)(uintptr_t)call->attr.user;
}

static ft_stream *ft__tp_stream(const ft_tp *tp)
{
    return ft_stream_get(tp->ctx, FT_STREAM_COMPUTE);
}

/* Tokens are in parts between the layers: what enters is gathered, what leaves is scattered. */
static int ft__tp_parts(const ft_tp *tp) { return tp->sequence_parallel && tp->size > 1; }

static const char *ft__tp_text(const ft_view *v, char *text)
{
    size_t used = 0;
    if (!v->present) {
        snprintf(text, FT__TP_TEXT_BYTES, "none");
        return text;
    }
    for (int i = 0; i < v->ndim; i++)
        used += (size_t)snprintf(text + used, FT__TP_TEXT_BYTES - used, "%s%lld",
                                 i ? "," : "[", (long long)v->shape[i]);
    snprintf(text + used, FT__TP_TEXT_BYTES - used, "] %s", ft_dtype_name(v->dtype));
    return text;
}

static ft_status ft__tp_shape_error(const ft_op_call *call, const char *needs)
{
    char x[FT__TP_TEXT_BYTES], w[FT__TP_TEXT_BYTES], b[FT__TP_TEXT_BYTES];
    const ft_tp *tp = ft__tp_of(call);
    return ft_error(FT_ERR_SHAPE, "%s over tp %d%s: inputs %s, %s, %s; needs %s", call->op->name,
                    tp->size, tp->sequence_parallel ? " with sequence parallelism" : "",
                    ft__tp_text(&call->in[0], x),
                    ft__tp_text(&call->in[1], w), ft__tp_text(&call->in[2], b), needs);
}

static int ft__tp_is_float(const ft_view *v) { return v->dtype == FT_F32 || v->dtype == FT_BF16; }

/* x "by tokens" of n tokens in all: on every rank, or this rank's part of them. */
static int ft__tp_by_tokens(const ft_tp *tp, const ft_view *x, int64_t n)
{
    if (!tp->sequence_parallel) return x->ndim >= 2 && ft__tp_rows(x) == n;
    return x->ndim == 2 && n % tp->size == 0 && x->shape[0] == n / tp->size;
}

/* The shape "by tokens" of `like`, which has all n, with `cols` columns. */
static ft_status ft__tp_out_by_tokens(const ft_tp *tp, const ft_view *like, int64_t cols,
                                      ft_view *y)
{
    *y = *like;
    y->shape[y->ndim - 1] = cols;
    if (!tp->sequence_parallel) return FT_OK;
    int64_t n = ft__tp_rows(like), B = like->shape[0];
    FT_TRY(ft__tp_divides_tokens(B, n / B, tp->size));
    y->ndim = 2;
    y->shape[0] = n / tp->size;
    y->shape[1] = cols;
    return FT_OK;
}

static ft_status ft__tp_out_whole(const ft_op_call *call, int64_t cols, ft_view *y)
{
    *y = call->in[0];
    y->ndim = 3;
    y->shape[0] = call->attr.i[0];
    y->shape[1] = call->attr.i[1];
    y->shape[2] = cols;
    return FT_OK;
}

/* [N,cols] of the kind of `like`, a buffer that travels. */
static ft_status ft__tp_temp(ft_tp *tp, const ft_tensor *like, int64_t rows, int64_t cols,
                             ft_tensor **out)
{
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    return ft_tensor_create(tp->ctx, out, like->dtype, 2, shape, FT_TAG_COMM);
}

static int64_t ft__tp_last(const ft_tensor *x) { return x->shape[x->ndim - 1]; }

/* *full = all tokens of x: x itself where it has them. */
static ft_status ft__tp_gather(ft_tp *tp, ft_tensor *x, ft_tensor **full)
{
    *full = x;
    if (!ft__tp_parts(tp)) return FT_OK;
    int64_t cols = ft__tp_last(x);
    FT_TRY(ft__tp_temp(tp, x, ft_numel(x) / cols * tp->size, cols, full));
    return ft_all_gather(tp->group, ft__tp_stream(tp), x, *full);
}

/* Where partial sums of all tokens go that ft__tp_sum is to make y of: y itself if it holds all. */
static ft_status ft__tp_partial(ft_tp *tp, ft_tensor *y, ft_tensor **partial)
{
    *partial = y;
    if (!ft__tp_parts(tp)) return FT_OK;
    int64_t cols = ft__tp_last(y);
    return ft__tp_temp(tp, y, ft_numel(y) / cols * tp->size, cols, partial);
}

static void ft__tp_drop(ft_tensor *temp, const ft_tensor *unless)
{
    if (temp != unless) ft_tensor_free(temp);
}

/* y, by tokens, = the sum of the ranks' partial sums, which are gone. */
static ft_status ft__tp_sum(ft_tp *tp, ft_tensor *partial, ft_tensor *y)
{
    if (tp->size == 1) return FT_OK;
    if (!ft__tp_parts(tp)) return ft_all_reduce(tp->group, ft__tp_stream(tp), y);
    FT_TRY(ft_reduce_scatter(tp->group, ft__tp_stream(tp), partial, y));
    ft_tensor_free(partial);
    return FT_OK;
}

/* y = or += the bias, in every row. */
static ft_status ft__tp_bias(ft_tp *tp, ft_tensor *y, ft_tensor *b, int add)
{
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.i[0] = add;
    return ft_op_run(ft__tp_stream(tp), &ft__tp_op_bias, &b, &y, &attr);
}

static ft_status ft__tp_bias_grad(ft_tp *tp, ft_tensor *db, ft_tensor *dy, int add)
{
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.i[0] = add;
    return ft_op_run(ft__tp_stream(tp), &ft__tp_op_bias_grad, &dy, &db, &attr);
}

/* ---- column */

static int ft__tp_linear_fits(const ft_op_call *call)
{
    const ft_view *x = &call->in[0], *w = &call->in[1], *b = &call->in[2];
    if (!ft__tp_is_float(x) || w->dtype != x->dtype || w->ndim != 2 || x->ndim < 2 ||
        ft__tp_cols(x) != w->shape[1]) return 0;
    return !b->present || (b->dtype == x->dtype && b->ndim == 1 && b->shape[0] == w->shape[0]);
}

static ft_status ft__tp_column_infer(ft_op_call *call)
{
    const ft_tp *tp = ft__tp_of(call);
    int64_t B = call->attr.i[0], T = call->attr.i[1];
    if (tp->sequence_parallel) FT_TRY(ft__tp_divides_tokens(B, T, tp->size));
    if (!ft__tp_linear_fits(call) || !ft__tp_by_tokens(tp, &call->in[0], B * T))
        return ft__tp_shape_error(call, tp->sequence_parallel
            ? "x [B*T/tp,I], w [O/tp,I], b [O/tp] or none, of one dtype"
            : "x [B,T,I], w [O/tp,I], b [O/tp] or none, of one dtype");
    return ft__tp_out_whole(call, call->in[1].shape[0], &call->out[0]);
}

/* Two flops for each of N I O/t products. The parts of a gathered x count once, as they arrive. */
static void ft__tp_column_cost(const ft_op_call *call, double *flops, double *bytes)
{
    const ft_view *w = &call->in[1];
    double n = (double)call->attr.i[0] * (double)call->attr.i[1], wide = (double)ft__tp_elems(w);
    *flops = 2 * n * wide;
    *bytes = (double)ft_dtype_bytes(w->dtype) *
             (wide + n * (double)w->shape[0] + n * (double)w->shape[1]);
}

static ft_status ft__tp_column_forward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                       ft_tensor **out)
{
    ft_tp *tp = ft__tp_of(call);
    ft_tensor *x;
    (void)ctx;
    FT_TRY(ft__tp_gather(tp, in[0], &x));
    if (in[2]) FT_TRY(ft__tp_bias(tp, out[0], in[2], 0));
    FT_TRY(ft_matmul(out[0], x, 0, in[1], 1, in[2] != NULL, ft__tp_stream(tp)));
    ft__tp_drop(x, in[0]);
    return FT_OK;
}

/* [T1] [S1] */
static ft_status ft__tp_column_backward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                        ft_tensor **out, ft_tensor **dout, ft_tensor **din)
{
    ft_tp *tp = ft__tp_of(call);
    ft_stream *stream = ft__tp_stream(tp);
    ft_tensor *x, *dx;
    (void)ctx;
    (void)out;
    if (din[1]) {
        FT_TRY(ft__tp_gather(tp, in[0], &x));
        FT_TRY(ft_matmul(din[1], dout[0], 1, x, 0, call->accumulate[1], stream));
        ft__tp_drop(x, in[0]);
    }
    if (din[2]) FT_TRY(ft__tp_bias_grad(tp, din[2], dout[0], call->accumulate[2]));
    if (!din[0]) return FT_OK;
    FT_TRY(ft__tp_partial(tp, din[0], &dx));
    FT_TRY(ft_matmul(dx, dout[0], 0, in[1], 0, 0, stream));
    return ft__tp_sum(tp, dx, din[0]);
}

/* dx is summed over ranks before it may be added to anything: input 0 does not accumulate. */
static const ft_op ft__tp_op_column = {
    "tp_column_linear", 3, 1,
    FT_IN(2), FT_IN(0) | FT_IN(1) | FT_IN(2), FT_IN(1) | FT_IN(2),
    {FT_IN(1), FT_IN(0), 0, 0, 0, 0, 0, 0},
    0, 0, FT_OP_SPLIT,
    ft__tp_column_infer, ft__tp_column_cost, NULL, NULL, NULL, NULL,
    ft__tp_column_forward, ft__tp_column_backward, FT_GPU_KERNELS(NULL, NULL, NULL)
};

static ft_attr ft__tp_attr(const ft_tp *tp, int64_t a, int64_t b)
{
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.user = tp;
    attr.i[0] = a;
    attr.i[1] = b;
    return attr;
}

FT_API ft_status ft_tp_column_linear(ft_tp *tp, ft_tensor **y, ft_tensor *x, ft_tensor *w,
                                     ft_tensor *b, int64_t B, int64_t T)
{
    ft_attr attr = ft__tp_attr(tp, B, T);
    ft_tensor *in[3];
    in[0] = x;
    in[1] = w;
    in[2] = b;
    return ft_apply(tp->ctx, &ft__tp_op_column, in, &attr, y);
}

/* ---- row */

static ft_status ft__tp_row_infer(ft_op_call *call)
{
    const ft_tp *tp = ft__tp_of(call);
    if (!ft__tp_linear_fits(call))
        return ft__tp_shape_error(call, "x [B,T,I/tp], w [O,I/tp], b [O] or none, of one dtype");
    return ft__tp_out_by_tokens(tp, &call->in[0], call->in[1].shape[0], &call->out[0]);
}

static void ft__tp_row_cost(const ft_op_call *call, double *flops, double *bytes)
{
    const ft_view *w = &call->in[1];
    double n = (double)ft__tp_rows(&call->in[0]), wide = (double)ft__tp_elems(w);
    *flops = 2 * n * wide;
    *bytes = (double)ft_dtype_bytes(w->dtype) *
             (wide + n * (double)w->shape[0] + n * (double)w->shape[1]);
}

/* [T2] */
static ft_status ft__tp_row_forward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                    ft_tensor **out)
{
    ft_tp *tp = ft__tp_of(call);
    ft_tensor *partial;
    (void)ctx;
    FT_TRY(ft__tp_partial(tp, out[0], &partial));
    FT_TRY(ft_matmul(partial, in[0], 0, in[1], 1, 0, ft__tp_stream(tp)));
    FT_TRY(ft__tp_sum(tp, partial, out[0]));
    return in[2] ? ft__tp_bias(tp, out[0], in[2], 1) : FT_OK;
}

/* [T2] [S2] [S3] */
static ft_status ft__tp_row_backward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                     ft_tensor **out, ft_tensor **dout, ft_tensor **din)
{
    ft_tp *tp = ft__tp_of(call);
    ft_stream *stream = ft__tp_stream(tp);
    ft_tensor *dy;
    (void)ctx;
    (void)out;
    if (din[2]) FT_TRY(ft__tp_bias_grad(tp, din[2], dout[0], call->accumulate[2]));
    if (!din[0] && !din[1]) return FT_OK;
    FT_TRY(ft__tp_gather(tp, dout[0], &dy));
    if (din[1]) FT_TRY(ft_matmul(din[1], dy, 1, in[0], 0, call->accumulate[1], stream));
    if (din[0]) FT_TRY(ft_matmul(din[0], dy, 0, in[1], 0, call->accumulate[0], stream));
    ft__tp_drop(dy, dout[0]);
    return FT_OK;
}

static const ft_op ft__tp_op_row = {
    "tp_row_linear", 3, 1,
    FT_IN(2), FT_IN(0) | FT_IN(1) | FT_IN(2), FT_IN(0) | FT_IN(1) | FT_IN(2),
    {FT_IN(1), FT_IN(0), 0, 0, 0, 0, 0, 0},
    0, 0, FT_OP_SPLIT,
    ft__tp_row_infer, ft__tp_row_cost, NULL, NULL, NULL, NULL,
    ft__tp_row_forward, ft__tp_row_backward, FT_GPU_KERNELS(NULL, NULL, NULL)
};

FT_API ft_status ft_tp_row_linear(ft_tp *tp, ft_tensor **y, ft_tensor *x, ft_tensor *w,
                                  ft_tensor *b)
{
    ft_attr attr = ft__tp_attr(tp, 0, 0);
    ft_tensor *in[3];
    in[0] = x;
    in[1] = w;
    in[2] = b;
    return ft_apply(tp->ctx, &ft__tp_op_row, in, &attr, y);
}

/* ---- the operators alone */

static void ft__tp_move_cost(const ft_op_call *call, double *flops, double *bytes)
{
    const ft_view *x = &call->in[0], *y = &call->out[0];
    *flops = 0;
    *bytes = (double)(ft__tp_elems(x) + ft__tp_elems(y)) * (double)ft_dtype_bytes(x->dtype);
}

static ft_status ft__tp_enter_infer(ft_op_call *call)
{
    const ft_tp *tp = ft__tp_of(call);
    int64_t B = call->attr.i[0], T = call->attr.i[1];
    if (tp->sequence_parallel) FT_TRY(ft__tp_divides_tokens(B, T, tp->size));
    if (!ft__tp_is_float(&call->in[0]) || !ft__tp_by_tokens(tp, &call->in[0], B * T))
        return ft__tp_shape_error(call, tp->sequence_parallel ? "x [B*T/tp,C], fp32 or bf16"
                                                              : "x [B,T,C], fp32 or bf16");
    return ft__tp_out_whole(call, ft__tp_cols(&call->in[0]), &call->out[0]);
}

static ft_status ft__tp_enter_forward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                      ft_tensor **out)
{
    ft_tp *tp = ft__tp_of(call);
    (void)ctx;
    if (!ft__tp_parts(tp)) return ft_copy(out[0], in[0], ft__tp_stream(tp));
    return ft_all_gather(tp->group, ft__tp_stream(tp), in[0], out[0]);
}

/* The gradient is summed where it lies if dx took over its storage: then the copy moves nothing. */
static ft_status ft__tp_enter_backward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                       ft_tensor **out, ft_tensor **dout, ft_tensor **din)
{
    ft_tp *tp = ft__tp_of(call);
    (void)ctx;
    (void)in;
    (void)out;
    if (ft__tp_parts(tp))
        return ft_reduce_scatter(tp->group, ft__tp_stream(tp), dout[0], din[0]);
    FT_TRY(ft_copy(din[0], dout[0], ft__tp_stream(tp)));
    return ft__tp_sum(tp, din[0], din[0]);
}

static const ft_op ft__tp_op_enter = {
    "tp_enter", 1, 1, 0, FT_IN(0), 0, {0, 0, 0, 0, 0, 0, 0, 0}, 0, 0, FT_OP_GRAD_OVER_DOUT,
    ft__tp_enter_infer, ft__tp_move_cost, NULL, NULL, NULL, NULL,
    ft__tp_enter_forward, ft__tp_enter_backward, FT_GPU_KERNELS(NULL, NULL, NULL)
};

FT_API ft_status ft_tp_enter(ft_tp *tp, ft_tensor **y, ft_tensor *x, int64_t B, int64_t T)
{
    ft_attr attr = ft__tp_attr(tp, B, T);
    return ft_apply(tp->ctx, &ft__tp_op_enter, &x, &attr, y);
}

static ft_status ft__tp_leave_infer(ft_op_call *call)
{
    const ft_view *x = &call->in[0];
    if (!ft__tp_is_float(x) || x->ndim < 2)
        return ft__tp_shape_error(call, "x [B,T,C], fp32 or bf16");
    return ft__tp_out_by_tokens(ft__tp_of(call), x, ft__tp_cols(x), &call->out[0]);
}

static ft_status ft__tp_leave_forward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                      ft_tensor **out)
{
    (void)ctx;
    (void)in; /* out[0] has its storage */
    return ft__tp_sum(ft__tp_of(call), out[0], out[0]);
}

static const ft_op ft__tp_op_leave = {
    "tp_leave", 1, 1, 0, FT_IN(0), 0, {0, 0, 0, 0, 0, 0, 0, 0}, 0, 0,
    FT_OP_INPLACE | FT_OP_GRAD_PASS,
    ft__tp_leave_infer, ft__tp_move_cost, NULL, NULL, NULL, NULL, ft__tp_leave_forward, NULL,
    FT_GPU_KERNELS(NULL, NULL, NULL)
};

static ft_status ft__tp_scatter_forward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                        ft_tensor **out)
{
    ft_tp *tp = ft__tp_of(call);
    (void)ctx;
    if (tp->size == 1) return ft_copy(out[0], in[0], ft__tp_stream(tp));
    return ft_reduce_scatter(tp->group, ft__tp_stream(tp), in[0], out[0]);
}

static ft_status ft__tp_scatter_backward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                         ft_tensor **out, ft_tensor **dout, ft_tensor **din)
{
    ft_tp *tp = ft__tp_of(call);
    (void)ctx;
    (void)in;
    (void)out;
    if (tp->size == 1) return ft_copy(din[0], dout[0], ft__tp_stream(tp));
    return ft_all_gather(tp->group, ft__tp_stream(tp), dout[0], din[0]);
}

static const ft_op ft__tp_op_scatter = { /* leave, under sequence parallelism */
    "tp_leave", 1, 1, 0, FT_IN(0), 0, {0, 0, 0, 0, 0, 0, 0, 0}, 0, 0, FT_OP_GRAD_OVER_DOUT,
    ft__tp_leave_infer, ft__tp_move_cost, NULL, NULL, NULL, NULL,
    ft__tp_scatter_forward, ft__tp_scatter_backward, FT_GPU_KERNELS(NULL, NULL, NULL)
};

FT_API ft_status ft_tp_leave(ft_tp *tp, ft_tensor **y, ft_tensor *x)
{
    ft_attr attr = ft__tp_attr(tp, 0, 0);
    const ft_op *row = tp->sequence_parallel ? &ft__tp_op_scatter : &ft__tp_op_leave;
    return ft_apply(tp->ctx, row, &x, &attr, y);
}

/* ---------------------------------------------------------------------------- >>embedding.impl */

/* [V1] Rows of the rank: the first in the whole table, and how many are not padding (0 too). */
static void ft__tp_vocab(const ft_tp *tp, int64_t V, int64_t *first, int64_t *rows)
{
    int64_t each = V / tp->size + (V % tp->size != 0), left;
    *first = each * tp->rank;
    left = V - *first;
    *rows = left < 0 ? 0 : left < each ? left : each;
}

static ft_status ft__tp_vocab_error(const ft_op_call *call, int64_t V, const char *needs)
{
    char text[FT__TP_TEXT_BYTES];
    int t = ft__tp_of(call)->size;
    snprintf(text, sizeof text, "%s; a vocabulary of %lld is %lld rows a rank", needs, (long long)V,
             (long long)(V / t + (V % t != 0)));
    return ft__tp_shape_error(call, text);
}

static int ft__tp_vocab_fits(const ft_tp *tp, const ft_view *w, int64_t V)
{
    return V > 0 && w->ndim == 2 && w->shape[0] == V / tp->size + (V % tp->size != 0);
}

/* Rows first .. first + n - 1 of w[..,C], w of two dimensions or more; NULL if n is 0. */
static ft_status ft__tp_view(ft_tensor *w, int64_t first, int64_t n, ft_tensor **out)
{
    int64_t shape[2];
    *out = NULL;
    if (n == 0) return FT_OK;
    shape[0] = n;
    shape[1] = ft__tp_last(w);
    return ft_tensor_view(w, out, first * shape[1], 2, shape);
}

/* The gradient of padding, the rows of dw after the first `rows`: zero, unless zeros are added. */
static ft_status ft__tp_pad_grad(ft_tp *tp, ft_tensor *dw, int64_t rows, int accumulate)
{
    ft_tensor *pad;
    if (accumulate) return FT_OK;
    FT_TRY(ft__tp_view(dw, rows, dw->shape[0] - rows, &pad));
    if (!pad) return FT_OK;
    FT_TRY(ft_fill(pad, 0, ft__tp_stream(tp)));
    ft_tensor_free(pad);
    return FT_OK;
}

static ft_status ft__tp_embedding_infer(ft_op_call *call)
{
    const ft_view *tokens = &call->in[0], *table = &call->in[1];
    ft_view whole = *tokens;
    if (tokens->dtype != FT_I32 || tokens->ndim >= FT_MAX_DIMS || !ft__tp_is_float(table) ||
        !ft__tp_vocab_fits(ft__tp_of(call), table, call->attr.i[0]) ||
        ft__tp_elems(tokens) > INT32_MAX)
        return ft__tp_vocab_error(call, call->attr.i[0], "int32 tokens [B,T], at most 2^31 - 1 of "
                                  "them, and a table [ceil(V/tp),C]");
    whole.dtype = table->dtype;
    whole.shape[whole.ndim++] = table->shape[1];
    return ft__tp_out_by_tokens(ft__tp_of(call), &whole, table->shape[1], &call->out[0]);
}

static void ft__tp_embedding_cost(const ft_op_call *call, double *flops, double *bytes)
{
    *flops = 0;
    *bytes = (double)ft__tp_elems(&call->in[0]) *
             (4.0 + 2.0 * (double)call->in[1].shape[1] * (double)ft_dtype_bytes(call->in[1].dtype));
}

static ft_status ft__tp_embedding_forward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                          ft_tensor **out)
{
    ft_tp *tp = ft__tp_of(call);
    ft_attr attr = ft__tp_attr(tp, 0, call->attr.i[0]);
    ft_tensor *reads[2], *partial;
    int64_t rows;
    (void)ctx;
    ft__tp_vocab(tp, call->attr.i[0], &attr.i[0], &rows);
    reads[0] = in[0];
    FT_TRY(ft__tp_view(in[1], 0, rows, &reads[1]));
    FT_TRY(ft__tp_partial(tp, out[0], &partial));
    FT_TRY(ft_op_run(ft__tp_stream(tp), &ft__tp_op_lookup, reads, &partial, &attr));
    ft_tensor_free(reads[1]);
    return ft__tp_sum(tp, partial, out[0]);
}

static ft_status ft__tp_embedding_backward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                           ft_tensor **out, ft_tensor **dout, ft_tensor **din)
{
    ft_tp *tp = ft__tp_of(call);
    ft_attr attr = ft__tp_attr(tp, 0, call->attr.i[0]);
    ft_tensor *reads[2], *own;
    int64_t rows;
    (void)ctx;
    (void)out;
    ft__tp_vocab(tp, call->attr.i[0], &attr.i[0], &rows);
    attr.i[2] = call->accumulate[1];
    reads[0] = in[0];
    FT_TRY(ft__tp_gather(tp, dout[0], &reads[1]));
    FT_TRY(ft__tp_view(din[1], 0, rows, &own));
    if (own) FT_TRY(ft_op_run(ft__tp_stream(tp), &ft__tp_op_lookup_grad, reads, &own, &attr));
    ft_tensor_free(own);
    ft__tp_drop(reads[1], dout[0]);
    return ft__tp_pad_grad(tp, din[1], rows, call->accumulate[1]);
}

static const ft_op ft__tp_op_embedding = {
    "tp_embedding", 2, 1, 0, FT_IN(1), FT_IN(1), {0, FT_IN(0), 0, 0, 0, 0, 0, 0}, 0, 0, 0,
    ft__tp_embedding_infer, ft__tp_embedding_cost, NULL, NULL, NULL, NULL,
    ft__tp_embedding_forward, ft__tp_embedding_backward, FT_GPU_KERNELS(NULL, NULL, NULL)
};

FT_API ft_status ft_tp_embedding(ft_tp *tp, ft_tensor **y, ft_tensor *tokens, ft_tensor *table,
                                 int64_t V)
{
    ft_attr attr = ft__tp_attr(tp, V, 0);
    ft_tensor *in[2];
    in[0] = tokens;
    in[1] = table;
    return ft_apply(tp->ctx, &ft__tp_op_embedding, in, &attr, y);
}

/* --------------------------------------------------------------------------------- >>loss.impl */

static ft_status ft__tp_loss_infer(ft_op_call *call)
{
    const ft_tp *tp = ft__tp_of(call);
    const ft_view *x = &call->in[0], *w = &call->in[1], *labels = &call->in[2], *s = &call->in[3];
    ft_view *loss = &call->out[0];
    char text[FT__TP_TEXT_BYTES];
    int64_t n = ft__tp_elems(labels);
    if (call->attr.i[0] < 0)
        return ft_error(FT_ERR_ARG, "tp_linear_cross_entropy: chunk_tokens %lld: needs a positive "
                        "number, or 0 for 2048", (long long)call->attr.i[0]);
    if (tp->sequence_parallel)
        FT_TRY(ft__tp_divides_tokens(labels->shape[0], n / labels->shape[0], tp->size));
    if (!ft__tp_is_float(x) || w->dtype != x->dtype || x->ndim < 2 ||
        !ft__tp_vocab_fits(tp, w, call->attr.i[1]) || ft__tp_cols(x) != w->shape[1] ||
        labels->dtype != FT_I32 || !ft__tp_by_tokens(tp, x, n))
        return ft__tp_vocab_error(call, call->attr.i[1], tp->sequence_parallel
            ? "x [B*T/tp,C], w [ceil(V/tp),C] of x's dtype, int32 labels [B,T]"
            : "x [B,T,C], w [ceil(V/tp),C] of x's dtype, int32 labels [B,T]");
    if (s->present && (s->dtype != FT_F32 || ft__tp_elems(s) != 1))
        return ft_error(FT_ERR_SHAPE, "tp_linear_cross_entropy: scale is %s; it must be [1] fp32",
                        ft__tp_text(s, text));
    loss->present = 1;
    loss->dtype = FT_F32;
    loss->ndim = 1;
    loss->shape[0] = 1;
    return FT_OK;
}

/* [V4] Tokens a chunk takes of each run of `stride` tokens: of the rank's own under sequence
   parallelism, of all otherwise. */
static int64_t ft__tp_loss_per(const ft_tp *tp, int64_t chunk_tokens, int64_t stride)
{
    int64_t per = chunk_tokens ? chunk_tokens : 2048;
    if (ft__tp_parts(tp)) per = per / tp->size > 0 ? per / tp->size : 1;
    return per < stride ? per : stride;
}

static void ft__tp_loss_cost(const ft_op_call *call, double *flops, double *bytes)
{
    const ft_tp *tp = ft__tp_of(call);
    const ft_view *x = &call->in[0], *w = &call->in[1];
    int64_t stride = ft__tp_rows(x), per = ft__tp_loss_per(tp, call->attr.i[0], stride);
    int64_t first, rows;
    double n = (double)ft__tp_elems(&call->in[2]), C = (double)w->shape[1];
    double chunks = (double)((stride + per - 1) / per);
    ft__tp_vocab(tp, call->attr.i[1], &first, &rows);
    *flops = 2 * n * (double)rows * C;
    *bytes = (double)ft_dtype_bytes(x->dtype) *
             (n * C + chunks * (double)rows * C + 3 * n * (double)rows) + 4 * n;
}

typedef struct ft__tp_loss { /* a pass over the chunks */
    ft_tp *tp;
    ft_stream *stream;
    ft_tensor *x, *labels;
    ft_tensor *w;             /* the rows that are not padding; NULL if there are none */
    ft_tensor *sums;
    ft_tensor *dx;            /* NULL if not wanted */
    ft_tensor *dw;            /* where w's gradient collects: a view of it, or fp32; or NULL */
    int want_loss, want_grads;
    int adds;                 /* dw += from now on */
    ft_attr attr;             /* of the kernels: i[0..3] token, per, stride, first row */
} ft__tp_loss;

/* The chunk's rows of x: a view, or gathered from all ranks. */
static ft_status ft__tp_loss_rows(ft__tp_loss *p, ft_tensor **xc)
{
    ft_tensor *own;
    FT_TRY(ft__tp_view(p->x, p->attr.i[0], p->attr.i[1], &own));
    FT_TRY(ft__tp_gather(p->tp, own, xc));
    ft__tp_drop(own, *xc);
    return FT_OK;
}

/* *z = the own logits of the chunk, NULL where all rows are padding. */
static ft_status ft__tp_loss_logits(ft__tp_loss *p, ft_tensor *xc, ft_tensor **z)
{
    int64_t shape[2];
    *z = NULL;
    if (!p->w) return FT_OK;
    shape[0] = xc->shape[0];
    shape[1] = p->w->shape[0];
    FT_TRY(ft_tensor_create(p->tp->ctx, z, xc->dtype, 2, shape, FT_TAG_ACT));
    return ft_matmul(*z, xc, 0, p->w, 1, 0, p->stream);
}

/* [V3] The statistics of the chunk, of all ranks: gathered in place. */
static ft_status ft__tp_loss_stats(ft__tp_loss *p, int64_t c, ft_tensor *z, ft_tensor **stats)
{
    ft_tensor *own, *in[2];
    int64_t shape[3];
    shape[0] = p->tp->size;
    shape[1] = c;
    shape[2] = FT__TP_STATS;
    FT_TRY(ft_tensor_create(p->tp->ctx, stats, FT_F32, 3, shape, FT_TAG_COMM));
    FT_TRY(ft__tp_view(*stats, c * p->tp->rank, c, &own));
    in[0] = p->labels;
    in[1] = z;
    FT_TRY(ft_op_run(p->stream, &ft__tp_op_loss_stats, in, &own, &p->attr));
    if (p->tp->size > 1) FT_TRY(ft_all_gather(p->tp->group, p->stream, own, *stats));
    ft_tensor_free(own);
    return FT_OK;
}

/* What the statistics are for: the loss, and z's gradient over z. They are gone. */
static ft_status ft__tp_loss_use(ft__tp_loss *p, ft_tensor *stats, ft_tensor *z)
{
    ft_tensor *in[3];
    in[0] = p->labels;
    in[1] = stats;
    in[2] = p->sums;
    if (p->want_loss)
        FT_TRY(ft_op_run(p->stream, &ft__tp_op_loss_add, in, &p->sums, &p->attr));
    if (p->want_grads && z)
        FT_TRY(ft_op_run(p->stream, &ft__tp_op_loss_grad, in, &z, &p->attr));
    ft_tensor_free(stats);
    return FT_OK;
}

/* dx of the chunk is partial over the vocabulary. [V4] Gathered rows are not read any more: it goes
   over them and is scattered; otherwise it goes to its place, and all of dx is summed later. */
static ft_status ft__tp_loss_dx(ft__tp_loss *p, ft_tensor *dz, ft_tensor *xc)
{
    ft_tensor *own, *to;
    if (!p->dx) return FT_OK;
    FT_TRY(ft__tp_view(p->dx, p->attr.i[0], p->attr.i[1], &own));
    to = ft__tp_parts(p->tp) ? xc : own;
    if (dz) FT_TRY(ft_matmul(to, dz, 0, p->w, 0, 0, p->stream));
    else FT_TRY(ft_fill(to, 0, p->stream));
    if (to == xc) FT_TRY(ft_reduce_scatter(p->tp->group, p->stream, xc, own));
    ft_tensor_free(own);
    return FT_OK;
}

static ft_status ft__tp_loss_chunk(ft__tp_loss *p)
{
    ft_tensor *xc, *z, *stats;
    FT_TRY(ft__tp_loss_rows(p, &xc));
    FT_TRY(ft__tp_loss_logits(p, xc, &z));
    FT_TRY(ft__tp_loss_stats(p, xc->shape[0], z, &stats));
    FT_TRY(ft__tp_loss_use(p, stats, z));
    if (p->dw) FT_TRY(ft_matmul(p->dw, z, 1, xc, 0, p->adds, p->stream));
    p->adds = 1;
    FT_TRY(ft__tp_loss_dx(p, z, xc));
    ft_tensor_free(z);
    ft_tensor_free(xc);
    return FT_OK;
}

/* Chooses where dw collects: over chunks in fp32, because bf16 would be rounded after each. */
static ft_status ft__tp_loss_dw(ft__tp_loss *p, ft_tensor *dw, int accumulate, int64_t stride)
{
    if (!p->w) return FT_OK;
    int64_t shape[2];
    shape[0] = p->w->shape[0];
    shape[1] = p->w->shape[1];
    p->adds = accumulate;
    if (dw->dtype == FT_F32 || p->attr.i[1] == stride)
        return ft__tp_view(dw, 0, shape[0], &p->dw);
    p->adds = 0;
    return ft_tensor_create(p->tp->ctx, &p->dw, FT_F32, 2, shape, FT_TAG_WORKSPACE);
}

/* Brings a collected dw to its place; zeros for the padding. */
static ft_status ft__tp_loss_dw_end(ft__tp_loss *p, ft_tensor *dw, int accumulate)
{
    ft_tensor *own;
    if (p->dw && p->dw->dtype != dw->dtype) {
        FT_TRY(ft__tp_view(dw, 0, p->dw->shape[0], &own));
        if (accumulate) FT_TRY(ft_accumulate(own, p->dw, p->stream));
        else FT_TRY(ft_copy(own, p->dw, p->stream));
        ft_tensor_free(own);
    }
    int64_t rows = p->dw ? p->dw->shape[0] : 0;
    ft_tensor_free(p->dw);
    return ft__tp_pad_grad(p->tp, dw, rows, accumulate);
}

static ft_status ft__tp_loss_begin(ft__tp_loss *p, const ft_op_call *call, ft_tensor **in,
                                   ft_tensor *dloss)
{
    ft_tensor *reads[3];
    ft_attr attr = ft__tp_attr(p->tp, call->attr.i[1], 0);
    int64_t elems = FT__TP_SUMS_ELEMS, rows;
    ft__tp_vocab(p->tp, call->attr.i[1], &p->attr.i[3], &rows);
    FT_TRY(ft__tp_view(in[1], 0, rows, &p->w));
    FT_TRY(ft_tensor_create(p->tp->ctx, &p->sums, FT_I32, 1, &elems, FT_TAG_ACT));
    reads[0] = p->labels = in[2];
    reads[1] = in[3];
    reads[2] = dloss;
    return ft_op_run(p->stream, &ft__tp_op_loss_begin, reads, &p->sums, &attr);
}

/* Forward, backward, and both in one pass: the same code, hence the same bits. `loss` is NULL if
   not wanted, dout and din are in forward. */
static ft_status ft__tp_loss_run(const ft_op_call *call, ft_tensor **in, ft_tensor *loss,
                                 ft_tensor *dloss, ft_tensor **din)
{
    ft__tp_loss pass, *p = &pass;
    memset(p, 0, sizeof *p);
    p->tp = ft__tp_of(call);
    p->stream = ft__tp_stream(p->tp);
    p->x = in[0];
    p->want_loss = loss != NULL;
    p->want_grads = din && (din[0] || din[1]);
    int64_t stride = ft_numel(p->x) / ft__tp_last(p->x);
    int64_t per = ft__tp_loss_per(p->tp, call->attr.i[0], stride);
    FT_TRY(ft__tp_loss_begin(p, call, in, dloss));
    p->attr.i[1] = per;
    p->attr.i[2] = stride;
    if (din) p->dx = din[0];
    if (din && din[1]) FT_TRY(ft__tp_loss_dw(p, din[1], call->accumulate[1], stride));
    for (int64_t at = 0; at < stride; at += per) {
        p->attr.i[0] = at;
        p->attr.i[1] = per < stride - at ? per : stride - at;
        FT_TRY(ft__tp_loss_chunk(p));
    }
    if (din && din[1]) FT_TRY(ft__tp_loss_dw_end(p, din[1], call->accumulate[1]));
    if (p->dx && !ft__tp_parts(p->tp)) FT_TRY(ft__tp_sum(p->tp, p->dx, p->dx));
    if (loss) FT_TRY(ft_op_run(p->stream, &ft__tp_op_loss_end, &p->sums, &loss, NULL));
    ft_tensor_free(p->sums);
    ft_tensor_free(p->w);
    return FT_OK;
}

static ft_status ft__tp_loss_forward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                     ft_tensor **out)
{
    (void)ctx;
    return ft__tp_loss_run(call, in, out[0], NULL, NULL);
}

static ft_status ft__tp_loss_backward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in,
                                      ft_tensor **out, ft_tensor **dout, ft_tensor **din)
{
    (void)ctx;
    return ft__tp_loss_run(call, in, call->deferred ? out[0] : NULL, dout[0], din);
}

static const ft_op ft__tp_op_loss = {
    "tp_linear_cross_entropy", 4, 1,
    FT_IN(3), FT_IN(0) | FT_IN(1), FT_IN(1),
    {FT_IN(0) | FT_IN(1) | FT_IN(2) | FT_IN(3), FT_IN(0) | FT_IN(1) | FT_IN(2) | FT_IN(3),
     0, 0, 0, 0, 0, 0},
    0, 0, FT_OP_DEFERRED | FT_OP_GRAD_OVER_IN,
    ft__tp_loss_infer, ft__tp_loss_cost, NULL, NULL, NULL, NULL,
    ft__tp_loss_forward, ft__tp_loss_backward, FT_GPU_KERNELS(NULL, NULL, NULL)
};

FT_API ft_status ft_tp_linear_cross_entropy(ft_tp *tp, ft_tensor **loss, ft_tensor *x, ft_tensor *w,
                                            ft_tensor *labels, ft_tensor *scale,
                                            int64_t chunk_tokens, int64_t V)
{
    ft_attr attr = ft__tp_attr(tp, chunk_tokens, V);
    ft_tensor *in[4];
    in[0] = x;
    in[1] = w;
    in[2] = labels;
    in[3] = scale;
    return ft_apply(tp->ctx, &ft__tp_op_loss, in, &attr, loss);
}

static ft_status ft__tp_register(ft_ctx *ctx)
{
    static const ft_op *const rows[] = {
        &ft__tp_op_bias, &ft__tp_op_bias_grad, &ft__tp_op_lookup, &ft__tp_op_lookup_grad,
        &ft__tp_op_loss_begin, &ft__tp_op_loss_stats, &ft__tp_op_loss_add, &ft__tp_op_loss_grad,
        &ft__tp_op_loss_end, &ft__tp_op_column, &ft__tp_op_row, &ft__tp_op_enter,
        &ft__tp_op_leave, &ft__tp_op_scatter, &ft__tp_op_embedding, &ft__tp_op_loss
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) FT_TRY(ft_op_register(ctx, rows[i]));
    return FT_OK;
}

#endif /* FT__TP_IMPLEMENTED */
#endif /* FEMTOTRON_IMPLEMENTATION or FEMTOTRON_TP_IMPLEMENTATION */
