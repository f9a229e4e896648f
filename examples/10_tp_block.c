/* 10_tp_block.c: feed-forward blocks whose weights no rank holds whole: tensor parallelism.

   Build:  cc -std=c11 -O2 -I. examples/10_tp_block.c -o build/10_tp_block -lm -lpthread
   Run:    build/10_tp_block

      tp 1     param 73216  act 205056  comm   768  sent     0  loss 3.746 to 0.895
      tp 2     param 36864  act 123136  comm  1536  sent 49920  loss 3.746 to 0.895
      tp 4     param 18944  act  82176  comm  3072  sent 76032  loss 3.746 to 0.895
      tp 2 sp  param 36864  act 102656  comm  9728  sent 58368  loss 3.746 to 0.895
      tp 4 sp  param 18944  act  51456  comm 11264  sent 88704  loss 3.746 to 0.895

   What to learn. 09_mlp_pipeline.c cuts between layers, this through them: w1 by outputs, w2 by
   inputs, so that a block needs one sum over ranks forward and one backward (sent: bytes of rank 0
   a step). What lies between blocks (norm, sum, x) is on every rank, so act shrinks less than
   param. With sequence parallelism (sp) each rank has 1/t of those tokens: both sums become a
   reduce-scatter and an all-gather; whole tokens are in comm for a moment. See femtotron_tp.h.

   LETTERS  B batch, T tokens of a row, N = B T, C hidden, F feed-forward, V vocabulary, L blocks,
            t tp ranks.
   License: MIT, see LICENSE. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_tp.h"

enum { B = 4, T = 16, C = 32, F = 128, V = 27, L = 2, STEPS = 60, WEIGHTS = 3 * L + 2 };

typedef struct layout { int t, sequence_parallel; } layout;

static const char text[] = "she sells sea shells on the sea shore the shells she sells are sea "
                           "shells i am sure";

/* Weight 0: the embedding [V,C], 1: the head [V,C]; then each block's norm [C], w1 [F,C], w2 [C,F].
   What tp cuts is in memory only as this rank's part. */
static ft_status create(ft_ctx *ctx, const ft_tp *tp, int k, ft_tensor **w)
{
    static const ft_tp_cut cut[3] = { FT_TP_WHOLE, FT_TP_ROWS, FT_TP_COLUMNS };
    int kind = k < 2 ? 3 : (k - 2) % 3;
    int64_t rows = kind == 3 ? V : kind == 1 ? F : C, columns = kind == 0 ? 1 : kind == 2 ? F : C;
    float whole[F * C], part[F * C];
    ft_tp_slice slice;
    for (int i = 0; i < rows * columns; i++) /* sin(i^2): as good as random */
        whole[i] = kind ? 0.25f * (float)sin(pow(i + k, 2)) : 1.0f;
    FT_TRY(ft_tp_slice_make(kind == 3 ? FT_TP_VOCAB : cut[kind], tp->size, tp->rank, "a weight",
                            rows, columns, &slice));
    ft_tp_slice_cut(&slice, sizeof *whole, whole, part);
    int64_t shape[2] = { slice.local_rows, slice.local_cols };
    FT_TRY(ft_tensor_create(ctx, w, FT_F32, kind ? 2 : 1, shape, FT_TAG_PARAM));
    (*w)->requires_grad = 1;
    return ft_upload(*w, part);
}

/* *x += w2 gelu(w1 norm(*x)). Norm and sum are on all N tokens alike, or on N/t of this rank. */
static ft_status block(ft_ctx *ctx, ft_tp *tp, ft_tensor **w, ft_tensor **x)
{
    ft_tensor *y, *h, *g, *d, *next;
    FT_TRY(ft_rmsnorm(ctx, &y, *x, w[0], 1e-5));                   /* y [N,C] or [N/t,C] */
    FT_TRY(ft_tp_column_linear(tp, &h, y, w[1], NULL, B, T));      /* h [B,T,F/t], all tokens */
    ft_tensor_free(y);
    FT_TRY(ft_gelu(ctx, &g, h));                                   /* elementwise: of a part */
    ft_tensor_free(h);
    FT_TRY(ft_tp_row_linear(tp, &d, g, w[2], NULL));               /* d as x: sum over ranks */
    ft_tensor_free(g);
    FT_TRY(ft_add_inplace(ctx, &next, d, *x));
    ft_tensor_free(*x);
    *x = next;
    return FT_OK;
}

static ft_status forward(ft_ctx *ctx, ft_tp *tp, ft_tensor **w, ft_tensor *tokens,
                         ft_tensor *labels, ft_tensor **loss)
{
    ft_tensor *x;
    FT_TRY(ft_tp_embedding(tp, &x, tokens, w[0], V));
    for (int l = 0; l < L; l++) FT_TRY(block(ctx, tp, w + 2 + 3 * l, &x));
    FT_TRY(ft_tp_linear_cross_entropy(tp, loss, x, w[1], labels, NULL, 0, V));
    ft_tensor_free(x);
    return FT_OK;
}

/* w -= lr dw. With sp a norm saw this rank's tokens alone: the parts of the gradient are added. */
static ft_status update(ft_ctx *ctx, const ft_tp *tp, ft_tensor *w)
{
    ft_stream *stream = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    if (tp->sequence_parallel && w->ndim == 1) FT_TRY(ft_all_reduce(tp->group, stream, w->grad));
    FT_TRY(ft_sync(ctx));
    float *weight = ft_data(w), *dw = ft_data(w->grad);
    for (int64_t i = 0; i < ft_numel(w); i++) weight[i] -= 0.3f * dw[i];
    ft_tensor_free(w->grad);
    w->grad = NULL;
    return FT_OK;
}

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    const layout *l = user;
    int64_t shape[2] = { B, T };
    int32_t letters[B * T + 1];
    ft_tensor *w[WEIGHTS], *tokens, *labels, *loss;
    float first, last;
    ft_mem_stats m;
    ft_traffic sent;
    ft_tape *tape;
    ft_mesh mesh;
    ft_tp *tp;
    FT_TRY(ft_mesh_create(ctx, 1, l->t, 1, &mesh));
    FT_TRY(ft_tp_create(ctx, &mesh, l->sequence_parallel, &tp));
    for (int k = 0; k < WEIGHTS; k++) FT_TRY(create(ctx, tp, k, &w[k]));
    for (int i = 0; i <= B * T; i++) letters[i] = text[i] == ' ' ? 26 : text[i] - 'a';
    FT_TRY(ft_tensor_create(ctx, &tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(ctx, &labels, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_upload(tokens, letters));
    FT_TRY(ft_upload(labels, letters + 1)); /* of each letter the next one */
    FT_TRY(ft_tape_create(ctx, &tape));
    for (int step = 1; step <= STEPS; step++) {
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(forward(ctx, tp, w, tokens, labels, &loss));
        FT_TRY(ft_tape_end(tape));
        FT_TRY(ft_backward(tape, loss, NULL));
        FT_TRY(ft_download(loss, step == 1 ? &first : &last));
        ft_tensor_free(loss);
        for (int k = 0; k < WEIGHTS; k++) FT_TRY(update(ctx, tp, w[k]));
    }
    ft_mem_get(ctx, &m);
    (void)ft_traffic_get(ctx, 1, &sent);
    int64_t bytes = 0;
    for (int c = 0; c < FT_COLLECTIVE_COUNT; c++) bytes += sent.sent_bytes[c];
    if (ft_rank(ctx) == 0)
        printf("tp %d%s  param %5zu  act %6zu  comm %5zu  sent %5lld  loss %.3f to %.3f\n", l->t,
               l->sequence_parallel ? " sp" : "   ", m.highest[FT_TAG_PARAM],
               m.highest[FT_TAG_ACT], m.highest[FT_TAG_COMM], (long long)bytes / STEPS, first,
               last);
    return FT_OK;
}

int main(void)
{
    static const layout layouts[] = { { 1, 0 }, { 2, 0 }, { 4, 0 }, { 2, 1 }, { 4, 1 } };
    for (int i = 0; i < 5; i++) {
        ft_config config = ft_config_default();
        config.world = layouts[i].t;
        if (ft_launch(&config, rank_main, (void *)(uintptr_t)&layouts[i]) != FT_OK) {
            fprintf(stderr, "error: %s\n", ft_last_error());
            return 1;
        }
    }
    return 0;
}
