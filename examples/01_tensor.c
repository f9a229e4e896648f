/* 01_tensor.c: a tensor and its gradient.

   Build:  cc -std=c11 -O2 -I. examples/01_tensor.c -o build/01_tensor -lm -lpthread
   Run:    build/01_tensor

      live bytes before forward: param 256  grad 0  act 0  other 256
      live bytes after forward:  param 256  grad 0  act 512  other 256
      live bytes after backward: param 256  grad 256  act 256  other 256
      loss             42.375
      dloss/dw         17.000    0.000  -22.500
      by differences   17.000    0.000  -22.500

   What to learn. An op makes a tensor and, while a tape records, leaves a node behind; ft_backward
   walks the nodes back and leaves the gradient of what asked for one (requires_grad) in ->grad. The
   two uses of y in y * y add up by themselves. A tensor lives for as long as somebody needs it: the
   caller, until ft_tensor_free, or a backward to come. So y outlives its handle and the squares do
   not, and after backward only w, its gradient, x and the loss are left. Every allocation counts in
   multiples of 256 bytes, and has a tag that says what it is for. The next rung, 02_mlp.c, does the
   same with nine weights and walks down the gradients.

   License: MIT, see LICENSE. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"

/* loss [1] = mean(y y), y [2,3] = x [2,3] * w [3], row by row. */
static ft_status loss_of(ft_ctx *ctx, ft_tensor *x, ft_tensor *w, ft_tensor **loss)
{
    ft_tensor *y, *square;
    FT_TRY(ft_mul(ctx, &y, x, w));      /* [2,3]; backward will read x */
    FT_TRY(ft_mul(ctx, &square, y, y)); /* [2,3]; backward will read y */
    ft_tensor_free(y);                  /* not by us: y stays as long as backward needs it */
    FT_TRY(ft_mean(ctx, loss, square)); /* [1];   backward will read nothing */
    ft_tensor_free(square);             /* so this one goes at once */
    return FT_OK;
}

static void print_live(const ft_ctx *ctx, const char *when)
{
    ft_mem_stats m;
    ft_mem_get(ctx, &m);
    printf("live bytes %-15s param %zu  grad %zu  act %zu  other %zu\n", when,
           m.live[FT_TAG_PARAM], m.live[FT_TAG_GRAD], m.live[FT_TAG_ACT], m.live[FT_TAG_OTHER]);
}

/* (loss(w + e) - loss(w - e)) / 2e for element i of w: exact here, the loss being quadratic. */
static ft_status difference(ft_ctx *ctx, ft_tensor *x, ft_tensor *w, int i, float *slope)
{
    const float e = 0.5f;
    float values[3], keep, side[2];
    FT_TRY(ft_download(w, values));
    keep = values[i];
    for (int s = 0; s < 2; s++) {
        ft_tensor *loss;
        values[i] = keep + (s ? e : -e);
        FT_TRY(ft_upload(w, values));
        FT_TRY(loss_of(ctx, x, w, &loss)); /* no tape records: nothing is kept for a backward */
        FT_TRY(ft_download(loss, &side[s]));
        ft_tensor_free(loss);
    }
    values[i] = keep;
    *slope = (side[1] - side[0]) / (2 * e);
    return ft_upload(w, values);
}

/* What one rank does. Everything it makes belongs to ctx and ends with it, errors or not. */
static ft_status rank_main(ft_ctx *ctx, void *user)
{
    const float x_values[6] = { 1, 2, 3, 4, 5, 6 }, w_values[3] = { 3, 0, -1.5f };
    const int64_t shape[2] = { 2, 3 };
    ft_tensor *x, *w, *loss; /* [2,3], [3], [1] */
    ft_tape *tape;
    float value, dw[3], slope[3];
    (void)user;
    FT_TRY(ft_tensor_create(ctx, &x, FT_F32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(ctx, &w, FT_F32, 1, shape + 1, FT_TAG_PARAM));
    FT_TRY(ft_upload(x, x_values));
    FT_TRY(ft_upload(w, w_values));
    w->requires_grad = 1;
    print_live(ctx, "before forward:");
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(loss_of(ctx, x, w, &loss));
    FT_TRY(ft_tape_end(tape));
    print_live(ctx, "after forward:");
    FT_TRY(ft_backward(tape, loss, NULL));
    print_live(ctx, "after backward:");
    FT_TRY(ft_download(loss, &value));
    FT_TRY(ft_download(w->grad, dw)); /* [3] */
    for (int i = 0; i < 3; i++) FT_TRY(difference(ctx, x, w, i, &slope[i]));
    printf("loss           %8.3f\n", value);
    printf("dloss/dw       %8.3f %8.3f %8.3f\n", dw[0], dw[1], dw[2]);
    printf("by differences %8.3f %8.3f %8.3f\n", slope[0], slope[1], slope[2]);
    return FT_OK;
}

int main(void)
{
    ft_config config = ft_config_default(); /* one rank, on the CPU */
    if (ft_launch(&config, rank_main, NULL) == FT_OK) return 0;
    fprintf(stderr, "error: %s\n", ft_last_error());
    return 1;
}
