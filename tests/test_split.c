/* A backward in two halves, ft_backward_inputs and ft_backward_weights, gives the bits of one
   ft_backward: at every stage, under every recomputation policy, with several tapes in flight; the
   first half gives its memory back, and the second reads no weights.

   cc -std=c11 -I. tests/test_split.c -lcmocka -lm -lpthread */

#ifndef FT_TEST_LINKED /* make compiles the implementation once for many tests */
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_llama.h"
#include "train_harness.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static uint64_t trained(th_options o, double *loss)
{
    th_result *r = th_run(&o);
    if (r->status != FT_OK) fail_msg("stage %d: %s", o.zero.stage, r->error);
    uint64_t hash = r->hash;
    *loss = r->loss[o.steps - 1];
    th_free(r);
    return hash;
}

static void test_bits(void **state)
{
    ft_sac sac[4];
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int kind = FT_SAC_NONE; kind <= FT_SAC_FULL; kind++)
            for (int dtype = FT_F32; dtype <= FT_BF16; dtype++) {
                th_options o = th_options_default();
                double whole, halves;
                memset(sac, 0, sizeof sac);
                for (int i = 0; i < 4; i++) sac[i].kind = (ft_sac_kind)kind;
                o.sac = sac;
                o.dp = 2;
                o.steps = 3;
                o.samples = 4;
                o.T = 8;
                o.micro_batches = dtype ? 2 : 1;
                o.zero.stage = stage;
                o.zero.dtype = (ft_dtype)dtype;
                o.model.tie_embeddings = stage & 1;
                uint64_t expected = trained(o, &whole);
                o.split = 1;
                uint64_t got = trained(o, &halves);
                assert_true(expected == got);
                assert_true(whole == halves);
            }
}

/* Two linear layers on two tapes: what the first half leaves alive is each layer's input and the
   gradient of its output, and nothing of the op between them. */
typedef struct flight { size_t left[2], after; float dw[2][12]; } flight;

static ft_status two_tapes(ft_ctx *ctx, void *user)
{
    flight *f = (flight *)user;
    ft_tensor *x, *w[2], *h[2], *y;
    ft_tape *tape[2];
    int64_t xs[2] = {64, 64}, ws[2] = {64, 64};
    ft_mem_stats before, now;
    FT_TRY(ft_tensor_create(ctx, &x, FT_F32, 2, xs, FT_TAG_OTHER));
    FT_TRY(ft_fill(x, 0.5, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    for (int k = 0; k < 2; k++) {
        FT_TRY(ft_tensor_create(ctx, &w[k], FT_F32, 2, ws, FT_TAG_PARAM));
        FT_TRY(ft_fill(w[k], 0.01 * (k + 1), ft_stream_get(ctx, FT_STREAM_COMPUTE)));
        w[k]->requires_grad = 1;
        FT_TRY(ft_tape_create(ctx, &tape[k]));
    }
    ft_mem_get(ctx, &before);
    for (int k = 0; k < 2; k++) {
        ft_tensor *loss;
        FT_TRY(ft_tape_begin(tape[k]));
        FT_TRY(ft_linear(ctx, &h[0], x, w[0], NULL));
        FT_TRY(ft_silu(ctx, &h[1], h[0]));
        FT_TRY(ft_linear(ctx, &y, h[1], w[1], NULL));
        FT_TRY(ft_mean(ctx, &loss, y));
        ft_tensor_free(h[0]);
        ft_tensor_free(h[1]);
        ft_tensor_free(y);
        FT_TRY(ft_tape_end(tape[k]));
        FT_TRY(ft_backward_inputs(tape[k], loss, NULL));
        ft_tensor_free(loss);
        ft_mem_get(ctx, &now);
        f->left[k] = now.live_bytes - before.live_bytes;
    }
    if (ft_backward_inputs(tape[0], y, NULL) != FT_ERR_STATE) return FT_ERR_DATA;
    FT_TRY(ft_backward_weights(tape[0]));
    FT_TRY(ft_backward_weights(tape[1]));
    if (ft_backward_weights(tape[1]) != FT_ERR_STATE) return FT_ERR_DATA;
    ft_mem_get(ctx, &now);
    f->after = now.live_bytes - before.live_bytes;
    for (int k = 0; k < 2; k++) {
        float all[64 * 64];
        FT_TRY(ft_download(w[k]->grad, all));
        memcpy(f->dw[k], all, sizeof f->dw[k]);
    }
    return FT_OK;
}

static void test_memory(void **state)
{
    (void)state;
    flight f;
    ft_config config = ft_config_default();
    if (ft_launch(&config, two_tapes, &f) != FT_OK) fail_msg("%s", ft_last_error());
    size_t tensor = 64 * 64 * 4;
    /* Per tape: dy of both layers and the second's input; the first's input is the caller's. */
    assert_int_equal(f.left[0], 3 * tensor);
    assert_int_equal(f.left[1], 6 * tensor);
    assert_int_equal(f.after, 2 * tensor); /* the gradients of w */
    double h = 0.5 * 0.01 * 64, silu = h / (1 + exp(-h));
    /* dw1[o,i] = sum over 64 rows of silu / (64 * 64), on each of two tapes */
    assert_true(fabs((double)f.dw[1][0] - 2 * silu / 64) < 1e-6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bits), cmocka_unit_test(test_memory)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
