/* 08_own_op.c: an op of your own: registered, its gradients checked, and trained.

   Build:  cc -std=c11 -O2 -I. examples/08_own_op.c -o build/08_own_op -lm -lpthread
   Run:    build/08_own_op

      64 gradients agree with differences of the loss
      step    1  loss 1.1837
      step 1000  loss 0.1236

   What to learn. An op is a row: shapes, kernels, what its gradients read. So the tape can free for
   it, replay it (07_recompute.c), plan it on meta. All of train_llama.c is made of such rows.

   LETTERS  N points, C hidden, V classes.
   License: MIT, see LICENSE. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"

enum { N = 64, C = 16, V = 2, STEPS = 1000 };

/* snake: y [N,C] = x + sin(a x)^2 / a, a [C] learned (Ziyin et al. 2020). */
static ft_status snake_infer(ft_op_call *call)
{
    const ft_view *x = &call->in[0], *a = &call->in[1];
    if (x->dtype != FT_F32 || a->dtype != FT_F32 || x->ndim != 2 || a->ndim != 1 ||
        a->shape[0] != x->shape[1])
        return ft_error(FT_ERR_SHAPE, "snake wants fp32 x [N,C] and a [C], one for each channel");
    call->out[0] = *x; /* y is there, and has the dtype and shape of x */
    return FT_OK;
}

static void snake_cost(const ft_op_call *call, double *flops, double *bytes)
{
    *bytes = 8.0 * (double)(call->in[0].shape[0] * call->in[0].shape[1]); /* x read, y written */
    *flops = *bytes; /* and about 8 flops an element */
}

static ft_status snake_forward(const ft_op_call *call)
{
    const float *x = call->in[0].data, *a = call->in[1].data;
    float *y = call->out[0].data;
    int64_t width = call->in[0].shape[1], n = call->in[0].shape[0] * width;
    for (int64_t i = 0; i < n; i++) {
        float ac = a[i % width], s = sinf(ac * x[i]);
        y[i] = x[i] + s * s / ac;
    }
    return FT_OK;
}

/* dx = dy (1 + sin 2ax); da = the sum over rows of dy (x sin 2ax - sin(ax)^2 / a) / a. */
static ft_status snake_backward(const ft_op_call *call)
{
    const float *x = call->in[0].data, *a = call->in[1].data, *dy = call->dout[0].data;
    float *dx = call->din[0].data, *da = call->din[1].data; /* NULL: not wanted */
    int64_t width = call->in[0].shape[1], n = call->in[0].shape[0] * width;
    if (da) memset(da, 0, (size_t)width * sizeof *da);
    for (int64_t i = 0; i < n; i++) {
        float ac = a[i % width], s = sinf(ac * x[i]), s2 = sinf(2 * ac * x[i]);
        if (dx) dx[i] = dy[i] * (1 + s2);
        if (da) da[i % width] += dy[i] * (x[i] * s2 - s * s / ac) / ac;
    }
    return FT_OK;
}

static const ft_op snake = {
    .name = "snake", .n_in = 2, .n_out = 1, .grads = FT_IN(0) | FT_IN(1), .cheap = FT_OUT(0),
    .saves = { FT_IN(0) | FT_IN(1), FT_IN(0) | FT_IN(1) }, /* what the kernels of dx and da read */
    .infer = snake_infer, .cost = snake_cost, .forward = snake_forward, .backward = snake_backward
};

/* loss [1] = mean of -log softmax(w2 snake(w1 u, a))[label]; u [N,1], labels [N]. */
static ft_status forward(ft_ctx *ctx, ft_tensor **w, ft_tensor *u, ft_tensor *labels,
                         ft_tensor **loss)
{
    ft_tensor *in[2] = { NULL, w[1] }, *h;
    FT_TRY(ft_linear(ctx, &in[0], u, w[0], NULL)); /* [N,C] */
    FT_TRY(ft_apply(ctx, &snake, in, NULL, &h));   /* [N,C] */
    FT_TRY(ft_linear_cross_entropy(ctx, loss, h, w[2], labels, NULL, 0));
    ft_tensor_free(in[0]);
    ft_tensor_free(h);
    return FT_OK;
}

/* Holds each gradient against (loss(w + e) - loss(w - e)) / 2e; even i: below, odd i: above. */
static ft_status check(ft_ctx *ctx, ft_tensor **w, int k, ft_tensor *u, ft_tensor *labels)
{
    float *wk = ft_data(w[k]), *dw = ft_data(w[k]->grad), e = 0.002f, side[2];
    for (int64_t i = 0; i < 2 * ft_numel(w[k]); i++) {
        ft_tensor *loss;
        float keep = wk[i / 2];
        wk[i / 2] += i % 2 ? e : -e;
        FT_TRY(forward(ctx, w, u, labels, &loss));
        FT_TRY(ft_download(loss, &side[i % 2]));
        ft_tensor_free(loss);
        wk[i / 2] = keep;
        if (i % 2 && fabsf((side[1] - side[0]) / (2 * e) - dw[i / 2]) > 5e-4f) /* of about 1 */
            return ft_error(FT_ERR_DATA, "w[%d]: gradient %d is wrong", k, (int)i / 2);
    }
    return FT_OK;
}

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    const int64_t shape[4][2] = { { C, 1 }, { C, 0 }, { V, C }, { N, 1 } };
    ft_tensor *w[3], *u, *labels, *loss; /* w1 [C,1], a [C], w2 [V,C]; [N,1], [N], [1] */
    ft_tape *tape;
    float values[N];
    int32_t stripe[N];
    (void)user;
    FT_TRY(ft_op_register(ctx, &snake));
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < V * C; i++)
            values[i] = k == 0 ? 0.25f * (float)(i + 1) : k == 1 ? 1 : sinf((float)(i * i));
        FT_TRY(ft_tensor_create(ctx, &w[k], FT_F32, k == 1 ? 1 : 2, shape[k], FT_TAG_PARAM));
        FT_TRY(ft_upload(w[k], values));
        w[k]->requires_grad = 1;
    }
    for (int i = 0; i < N; i++) values[i] = 4.0f * (float)i / N - 2;
    for (int i = 0; i < N; i++) stripe[i] = cosf(5 * values[i]) > 0;
    FT_TRY(ft_tensor_create(ctx, &u, FT_F32, 2, shape[3], FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(ctx, &labels, FT_I32, 1, shape[3], FT_TAG_OTHER));
    FT_TRY(ft_upload(u, values));
    FT_TRY(ft_upload(labels, stripe));
    FT_TRY(ft_tape_create(ctx, &tape));
    for (int step = 1; step <= STEPS; step++) {
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(forward(ctx, w, u, labels, &loss));
        FT_TRY(ft_tape_end(tape));
        FT_TRY(ft_backward(tape, loss, NULL));
        FT_TRY(ft_download(loss, values));
        ft_tensor_free(loss);
        for (int k = 0; k < 3 && step == 1; k++) FT_TRY(check(ctx, w, k, u, labels));
        if (step == 1) printf("%d gradients agree with differences of the loss\n", (2 + V) * C);
        for (int k = 0; k < 3; k++) {
            float *wk = ft_data(w[k]), *dw = ft_data(w[k]->grad);
            for (int64_t i = 0; i < ft_numel(w[k]); i++) wk[i] -= 0.1f * dw[i];
            memset(dw, 0, ft_bytes(w[k])); /* the next backward adds to it */
        }
        if (step == 1 || step == STEPS) printf("step %4d  loss %.4f\n", step, values[0]);
    }
    return FT_OK;
}

int main(void)
{
    ft_config config = ft_config_default();
    if (ft_launch(&config, rank_main, NULL) == FT_OK) return 0;
    fprintf(stderr, "error: %s\n", ft_last_error());
    return 1;
}
