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
     It creates no parameters, gives no initial values and does not shard optimizer state: it is ops,
     and a map of which rows of a weight a rank has. It does not overlap its collectives with compute:
     they are on the critical path, which is why tp belongs inside a node. It does not sum the
     gradients of replicated parameters over tp (see [S3]): who owns the gradient buffers does.
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
     y = x W^T is cut in two ways. Weights lie as [outputs, inputs], so what the paper calls a column
     of W is a row in memory. Two ranks, '#' is what rank 0 has:

          column: outputs are cut                    row: inputs are cut

            x         W          y                     x         W          y
          [####]   [####]      [##..]                [##..]   [##..]      [####]  partial sums
          [####]   [####]      [##..]                [##..]   [##..]      [####]  on each rank:
          [####]   [....]      [##..]                [##..]   [##..]      [####]  y = y0 + y1
                   [....]                                     [##..]

     A column layer's outputs are what a row layer takes in, and elementwise functions and attention
     heads work on a part as on the whole. So a block needs two operators at its boundaries, each the
     other's transpose:

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

     [T1] f: x is the same on all ranks; each rank's dx is a sum over its own outputs only, so that the
          whole one is their sum.
     [T2] g: each rank's product is a sum over its own inputs only. A bias is added once, after the
          sum; dy is the same on all ranks, and so is the gradient of that bias.

   SEQUENCE PARALLELISM  (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.2)
     An all-reduce is a reduce-scatter and an all-gather. Between the two each rank has N/t tokens;
     whatever works on single tokens (norms, residuals, dropout) can stay there, and what backward
     saves of it is 1/t. Flattened, [B,T,C] is [N,C], and rank r holds tokens r N/t .. (r+1) N/t - 1 as
     a [N/t,C] of two dimensions: a contiguous run, so that collectives move it as it lies.

          x, my tokens [N/t,C]                      forward            backward
              |
             [f]                                    all-gather x       reduce-scatter dx
           column ... row
             [g]                                    reduce-scatter y   all-gather dy
              |
          y, my tokens [N/t,C]

     [S1] Column layers save the shard of x, not what they gathered, and gather again when backward
          makes dw: S (t-1)/t more bytes on the wire, S (t-1)/t fewer in memory. The gathered x is gone
          before the buffer of dx begins.
     [S2] Row layers gather dy for dx and dw. The bias is added to the own tokens.
     [S3] What is replicated and sees only the own tokens (norm weights; the bias of a row layer) gets
          the gradient of those tokens alone: a partial sum, to be summed over tp before the step.

   THE VOCABULARY
     [V1] Rank r of t holds rows r Vt .. of embedding and head, Vt = ceil(V/t). Rows from V on (at the
          end of the last ranks) are padding: no op reads them, their gradients are written as zeros.
     [V2] Embedding: a rank looks up the tokens in its rows, the others' are zero; the sum is exact.
     [V3] Loss: no rank ever holds another's logits. Of each token a rank has its rows' maximum m, the
          sum s of exp(logit - m), and the label's logit z if the row is its own. These three numbers
          travel; then every rank knows M = max m, S = sum of s exp(m - M), the token's loss
          log S + M - z, and the gradient exp(logit - M)/S - [label] of its own logits. All ranks
          compute the loss from the same numbers in the same order: it is bitwise equal on all.
     [V4] That in chunks of c tokens, so that c Vt logits exist. Under sequence parallelism a chunk is
          c/t tokens of each rank, gathered; dx goes back over the same buffer.

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

     The loss is deferred to backward, which then sends only its own column; forward's is sent too if
     the loss is read before. Where t does not divide the elements of an all-reduce, the first ranks
     send a little less (ft_all_reduce). A recomputation that replays an op sends its forward again; an
     FT_SAC_SELECTIVE segment keeps the results of collectives. ft_backward_weights gathers what it
     needs: for a row layer under SP S q more than ft_backward sends.
     A Llama layer has two column and two row layers: 8 S q a step, with SP 10 S q; what it keeps of
     its 2 norms and 2 residuals goes from 4 S to 4 S/t.
     Weights, their gradients and flops of cut layers: 1/t. With t = 1 nothing is copied or sent.

   OWNERSHIP, THREADS, ERRORS
     Every op is a collective of the tp group, queued on the compute stream: its ranks call the same ops
     in the same order, replays and backward included. That holds for reading a deferred loss: all tp
     ranks read it, or none. An ft_tp belongs to its context and ends with it. Errors are those of
     femtotron.h; what is wrong with the data (a token, a label) is found by all tp ranks alike.

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
/* Before anything runs: whether t = size divides heads, kv heads and intermediate, and with sequence
   parallelism B T. FT_ERR_UNSUPPORTED names the sizes and the nearest that work. A size of 0 is not
   checked. */

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
/* The part of rank `rank` of `size`. `name` appears in messages: FT_ERR_UNSUPPORTED, with the nearest
   sizes that work, where size does not divide. */
FT_API ft_status ft_tp_slice_qkv(int size, int rank, int64_t H, int64_t K, int64_t D, int64_t cols,
                                 ft_tp_slice *slice);
/* Packed [(H+2K)D, cols]: the rows of the rank's H/t query heads, then of its K/t key heads, then of
   their values. Query head h reads kv head h / (H/K), which is on the same rank: the slice is the
   packed weight of a smaller model. FT_ERR_UNSUPPORTED unless size divides H and K. */
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
   sinks say, in the dtype of that buffer. "x by tokens" is [B,T,C] (or other leading dimensions of N
   rows in all), the same on all tp ranks; under sequence parallelism it is this rank's [N/t,C].
   FT_ERR_SHAPE names all shapes; under sequence parallelism also where t does not divide N. */

FT_API ft_status ft_tp_column_linear(ft_tp *tp, ft_tensor **y, ft_tensor *x, ft_tensor *w,
                                     ft_tensor *b, int64_t B, int64_t T);
/* y[B,T,O/t] = x w[O/t,I]^T + b[O/t], x by tokens; b may be NULL. [T1] [S1]. 2 N I O/t flops. Saved:
   x if w has a gradient, w if x has one. In bf16 the ranks' dx are rounded before they are added. */
FT_API ft_status ft_tp_row_linear(ft_tp *tp, ft_tensor **y, ft_tensor *x, ft_tensor *w,
                                  ft_tensor *b);
/* y by tokens, O columns = sum over ranks of x[B,T,I/t] w[O,I/t]^T, + b[O]; b may be NULL, and is
   replicated. [T2] [S2] [S3]. 2 N I/t O flops. Saved: x if w has a gradient, w if x has one. In bf16
   the products are rounded before they are added, and the sum before the bias. */

FT_API ft_status ft_tp_enter(ft_tp *tp, ft_tensor **y, ft_tensor *x, int64_t B, int64_t T);
/* The operator f alone, for ops of one's own: y[B,T,C] = x by tokens; the gradient is summed over the
   ranks. A copy of S bytes: column layers do without. Saved: nothing. */
FT_API ft_status ft_tp_leave(ft_tp *tp, ft_tensor **y, ft_tensor *x);
/* The operator g alone: y by tokens = the ranks' sum of x[B,T,C]. In place: x is gone; not under
   sequence parallelism, where y is another tensor. Saved: nothing. */

/* ------------------------------------------------------------------------------------- >>vocab */

FT_API ft_status ft_tp_embedding(ft_tp *tp, ft_tensor **y, ft_tensor *tokens, ft_tensor *table,
                                 int64_t V);
/* y by tokens = rows of the table of which this rank holds table[Vt,C]; tokens int32 [B,T], the same
   on all tp ranks. [V1] [V2]. Bitwise that of one rank (but -0 becomes 0). Saved: tokens. A token
   outside 0..V-1: FT_ERR_DATA naming its position, on every tp rank. Gradient rows are summed in
   token order; 4 (Vt + N) bytes of workspace. */

FT_API ft_status ft_tp_linear_cross_entropy(ft_tp *tp, ft_tensor **loss, ft_tensor *x, ft_tensor *w,
                                            ft_tensor *labels, ft_tensor *scale,
                                            int64_t chunk_tokens, int64_t V);
/* ft_linear_cross_entropy over a vocabulary cut in t: x by tokens, w [Vt,C], labels int32 [B,T] of all
   tokens, scale fp32 [1] or NULL (1 / counted labels, 0 if none); both the same on all tp ranks. The
   loss, fp32 [1], too. [V1] [V3] [V4]: chunk_tokens (0: 2048) tokens at a time, under sequence
   parallelism rounded down to a multiple of t, but at least t. Memory at the peak: chunk Vt logits
   (act) and the temporaries in COSTS; more than one chunk and a bf16 dw need an fp32 [Vt,C] accumulator
   (workspace). 6 N Vt C flops on a tape, if the loss is not read before backward. dx is written over x
   where no one else reads it. A label outside 0..V-1 and not -100: FT_ERR_DATA naming its position, on
   every tp rank. Loss and gradients have the same bits whether deferred or not; another chunk_tokens
   may change the last bits. */

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

/* The divisors of n around t: "2 or 4". */
static void ft__tp_divisors(int64_t n, int64_t t, char *text)
{
    int64_t below = t < n ? t : n, above = t;
    while (n % below) below--;
    while (above <= n && n % above) above++;
    if (above <= n)
        snprintf(text, FT__TP_TEXT_BYTES, "%lld or %lld", (long long)below, (long long)above);
    else snprintf(text, FT__TP_TEXT_BYTES, "%lld", (long long)below);
}

/* t must divide n, which is called `what`. `unit`: how many of them the message counts as one. */
static ft_status ft__tp_divides(const char *what, int64_t n, int t)
{
    char sizes[FT__TP_TEXT_BYTES], ranks[FT__TP_TEXT_BYTES];
    if (n < 1)
        return ft_error(FT_ERR_ARG, "tp: %s is %lld; it must be positive", what, (long long)n);
    if (n % t == 0) return FT_OK;
    ft__tp_multiples(n, t, sizes);
    ft__tp_divisors(n, t, ranks);
    return ft_error(FT_ERR_UNSUPPORTED, "tp: %s %lld cannot be cut in equal parts by tp %d; nearest "
                    "%s that work: %s; nearest tp: %s", what, (long long)n, t, what, sizes, ranks);
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
    return ft_error(FT_ERR_UNSUPPORTED, "tp: sequence parallelism cannot cut B %lld x T %lld = %lld "
                    "tokens in equal parts by tp %d; nearest T that work: %s; nearest tp: %s; or "
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
        ft__tp_slice_part(slice, rows, (rows + size - 1) / size);
        return FT_OK;
    }
    return ft_error(FT_ERR_ARG, "tp: %s: unknown cut %d", name, (int)cut);
}

FT_API ft_status ft_tp_slice_qkv(int size, int rank, int64_t H, int64_t K, int64_t D, int64_t cols,
                                 ft_tp_slice *slice)
{
    if (H < 1 || K < 1 || D < 1 || H % K || H > INT32_MAX || D > INT32_MAX)
        return ft_error(FT_ERR_ARG, "tp: %lld query heads, %lld kv heads of %lld: each kv head must "
                        "serve the same number of query heads", (long long)H, (long long)K,
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
