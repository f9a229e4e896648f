/* 07_recompute.c: recomputation made visible: the memory timeline of a step, drawn as text.

   Build:  cc -std=c11 -O2 -I. examples/07_recompute.c -o build/07_recompute -lm -lpthread
   Run:    build/07_recompute

      none: replays 0% of forward
      forward  layer 0   pppppppppaaaaaaaaaww 656
      forward  layer 1   pppppppppaaaaaaaaaaaaaaaaaww 912
      forward  layer 2   pppppppppaaaaaaaaaaaaaaaaaaaaaaaaaww 1168
      backward layer 2   pppppppppgggaaaaaaaaaaaaaaaaaaaaaaaawwwww 1313 peak
      backward layer 1   pppppppppggggggaaaaaaaaaaaaaaaawwwww 1153
      backward layer 0   pppppppppgggggggaaaaaaaaaaawww 962
      selective: replays 2% of forward
      forward  layer 0   pppppppppaaaaaaaaaww 656
      forward  layer 1   pppppppppaaaaaaaaaaaaaaww 816
      forward  layer 2   pppppppppaaaaaaaaaaaaaaaaaaaww 976
      backward layer 2 * pppppppppgggaaaaaaaaaaaaaaaaaawwwww 1121 peak
      backward layer 1 * pppppppppggggggaaaaaaaaaaaaawwwww 1057
      backward layer 0 * pppppppppgggggggggaaaaaaawwwww 961
      full: replays 67% of forward
      forward  layer 0   pppppppppaaaaaaaaaww 656
      forward  layer 1   pppppppppaaaaaaaaaaww 688
      forward  layer 2   pppppppppaaaaaaaaaaaww 720
      backward layer 2 * pppppppppgggaaaaaaaaaawwwww 865
      backward layer 1 * pppppppppggggggaaaaaaaaawwwww 929
      backward layer 0 * pppppppppgggggggaaaaaaaaaaawww 962 peak
      the gradient is the same under each policy, bit for bit

   What to learn. ZeRO shares out state; act, what forward keeps for backward, is the other half. A
   letter is 32 KiB of param, grad, act or workspace; then KiB in all. Selective drops what is cheap
   to rebuild, full all but each layer's input: backward replays it, marked *, bitwise, a layer at
   a time. (Not all of forward: no backward reads what the last product of a layer makes.)

   LETTERS  N tokens, C hidden, F feed-forward, L layers.
   License: MIT, see LICENSE. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"

enum { N = 128, C = 64, F = 128, L = 3, BYTES_A_LETTER = 32 * 1024 };

typedef struct layer { ft_tensor *norm, *gate_up, *down; } layer; /* [C], [2F,C], [C,F] */

static const char *const policy[3] = { "none", "selective", "full" }; /* by ft_sac_kind */
static float gradient[3][2 * F * C]; /* that each policy gave layer 0's gate_up */

/* t [rows,columns], or [rows] if columns is 0. */
static ft_status create(ft_ctx *ctx, ft_tensor **t, ft_tag tag, int64_t rows, int64_t columns)
{
    float values[2 * F * C];
    int64_t shape[2] = { rows, columns };
    for (int i = 0; i < 2 * F * C; i++) /* sin(i^2) jumps about as a random number does */
        values[i] = columns ? (float)(0.2 * sin(pow(i, 2))) : 1.0f;
    FT_TRY(ft_tensor_create(ctx, t, FT_F32, columns ? 2 : 1, shape, tag));
    (*t)->requires_grad = tag == FT_TAG_PARAM;
    return ft_upload(*t, values);
}

/* The feed-forward half of a Llama layer, as a segment. *x [N,C] is used up and replaced. */
static ft_status layer_forward(ft_ctx *ctx, const layer *l, ft_sac sac, ft_tensor **x)
{
    ft_tensor *y, *gu, *p, *d, *next;
    FT_TRY(ft_segment_begin(ctx, "layer", sac));
    FT_TRY(ft_rmsnorm(ctx, &y, *x, l->norm, 1e-5));   /* y [N,C]: cheap, so selective drops it */
    FT_TRY(ft_linear(ctx, &gu, y, l->gate_up, NULL)); /* gu [N,2F] */
    FT_TRY(ft_swiglu(ctx, &p, gu));                   /* p [N,F]: cheap as well */
    FT_TRY(ft_linear(ctx, &d, p, l->down, NULL));     /* d [N,C] */
    FT_TRY(ft_add_inplace(ctx, &next, d, *x));        /* x + d, written over d */
    ft_tensor_free(*x);
    *x = next;
    return ft_segment_end(ctx, 1, &next); /* frees the handles y, gu, p: now the policy decides */
}

/* A row for each stretch of the step: what was live, by tag, at its fullest moment, and KiB. */
static void draw(const ft_ctx *ctx)
{
    static const char letter[] = "pgoaGcwx"; /* by tag */
    const ft_mem_event *e;
    ft_mem_stats m;
    int64_t n = ft_mem_timeline(ctx, &e), live[FT_TAG_COUNT] = { 0 };
    ft_mem_get(ctx, &m);
    for (int64_t i = 0, begin = 0; i < n; begin = i) {
        int64_t most[FT_TAG_COUNT] = { 0 };
        size_t top = 0;
        int replay = 0, s = e[begin].segment;
        for (; i < n && e[i].segment == s; i++) {
            live[e[i].tag] += e[i].delta_bytes;
            replay |= e[i].phase[0] == 'r';
            if (e[i].delta_bytes < 0 || e[i].live_bytes <= top) continue;
            top = e[i].live_bytes;
            memcpy(most, live, sizeof most);
        }
        if (s < 0) continue; /* outside the layers: making the weights, the loss */
        printf("%-8s layer %d %c ", e[begin].phase[0] == 'f' ? "forward" : "backward", s,
               replay ? '*' : ' ');
        for (int tag = 0; tag < FT_TAG_COUNT; tag++)
            for (int64_t k = BYTES_A_LETTER / 2; k < most[tag]; k += BYTES_A_LETTER)
                putchar(letter[tag]);
        printf(" %zu%s\n", top / 1024, top == m.peak_bytes ? " peak" : "");
    }
}

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    const ft_sac *sac = user;
    layer layers[L];
    ft_tensor *x, *square, *loss; /* [N,C], [N,C], [1] */
    ft_tape *tape;
    ft_flops flops;
    for (int l = 0; l < L; l++) {
        FT_TRY(create(ctx, &layers[l].norm, FT_TAG_PARAM, C, 0));
        FT_TRY(create(ctx, &layers[l].gate_up, FT_TAG_PARAM, 2 * F, C));
        FT_TRY(create(ctx, &layers[l].down, FT_TAG_PARAM, C, F));
    }
    FT_TRY(create(ctx, &x, FT_TAG_ACT, N, C));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    for (int l = 0; l < L; l++) FT_TRY(layer_forward(ctx, &layers[l], *sac, &x));
    FT_TRY(ft_mul(ctx, &square, x, x));
    FT_TRY(ft_mean(ctx, &loss, square));
    ft_tensor_free(x);
    ft_tensor_free(square);
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_backward(tape, loss, NULL));
    FT_TRY(ft_download(layers[0].gate_up->grad, gradient[sac->kind]));
    if (memcmp(gradient[sac->kind], gradient[0], sizeof gradient[0]) != 0)
        return ft_error(FT_ERR_DATA, "policy %s changed a gradient", policy[sac->kind]);
    ft_flops_get(ctx, &flops);
    printf("%s: replays %.0f%% of forward\n", policy[sac->kind],
           100 * flops.replay / flops.forward);
    draw(ctx);
    return FT_OK;
}

int main(void)
{
    ft_config config = ft_config_default();
    config.timeline = 1;
    for (int kind = FT_SAC_NONE; kind <= FT_SAC_FULL; kind++) {
        ft_sac sac = { .kind = (ft_sac_kind)kind };
        if (ft_launch(&config, rank_main, &sac) != FT_OK) {
            fprintf(stderr, "error: %s\n", ft_last_error());
            return 1;
        }
    }
    puts("the gradient is the same under each policy, bit for bit");
    return 0;
}
