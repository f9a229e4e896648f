/* 11_llama_3d.c: a small Llama on one rank, and on dp 2 x tp 2 x pp 2: the same losses.

   Build:  cc -std=c11 -O2 -I. examples/11_llama_3d.c -o build/11_llama_3d -lm -lpthread
   Run:    build/11_llama_3d

      step 10  loss 3.257  norm 1.899
      step 20  loss 1.452  norm 1.409
      peak 5296384: param 985344 grad 985344 optim 1970688 act 1217024
      step 10  loss 3.257  norm 1.899
      step 20  loss 1.452  norm 1.409
      peak 1147136: param 123392 grad 337408 optim 246784 act 226304 gather 214016
      360448 bytes sent a step: tp
          84 bytes sent a step: zero scalars
      921600 bytes sent a step: zero gather
      493568 bytes sent a step: zero reduce
        4096 bytes sent a step: zero tp
       16384 bytes sent a step: pp

   What to learn. Everything at once, and the losses are those of one rank. The costs are rank 0's,
   the most of each tag in bytes. Its stage has half of the layers and the embedding (pp), each
   weight cut in two (tp), each cut weight's state in two (dp, ZeRO-3: a shard is kept, a unit
   gathered while it runs); and selective recomputation keeps less of each layer. Each group sends
   what its header's formula says. Next: train_llama.c, where all of this is options.

   LETTERS  B sequences of a micro-batch, T tokens of each, M micro-batches, L layers.
   License: MIT, see LICENSE. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"

enum { T = 32, M = 4, L = 4, SEQUENCES = 8, STEPS = 20 }; /* SEQUENCES of a step, of all ranks */

typedef struct layout { int dp, tp, pp, stage; ft_sac_kind sac; } layout;

typedef struct replica { /* this rank's part of one */
    ft_ctx *ctx;
    ft_zero *zero;
    ft_llama *llama;
    ft_tensor *scale; /* [1] */
    ft_sac sac[L];
    ft_mesh mesh;
    int B, step;
} replica;

/* What this stage does of a micro-batch; x comes from the stage before, *out goes to the next. */
static ft_status forward(void *user, int chunk, int micro_batch, ft_tensor *x, ft_tensor **out)
{
    static const char text[] = "the quick brown fox jumps over the lazy dog; ";
    replica *r = user;
    ft_tensor *tokens, *labels; /* [B,T] */
    int32_t values[2][SEQUENCES * T];
    int64_t shape[2] = { r->B, T };
    int64_t first = (micro_batch * r->mesh.size[FT_AXIS_DP] + r->mesh.coord[FT_AXIS_DP]) * r->B;
    for (int64_t i = 0; i < r->B * T; i++) { /* sequence n of a step starts at letter 7 n */
        int64_t at = 7 * (first + i / T) + i % T;
        values[0][i] = text[at % (int64_t)strlen(text)];
        values[1][i] = text[(at + 1) % (int64_t)strlen(text)];
    }
    FT_TRY(ft_tensor_create(r->ctx, &tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(r->ctx, &labels, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_upload(tokens, values[0]));
    FT_TRY(ft_upload(labels, values[1]));
    FT_TRY(ft_llama_chunk(r->llama, chunk, tokens, labels, r->scale, r->sac, x, out));
    ft_tensor_free(tokens); /* backward still has them */
    ft_tensor_free(labels);
    return FT_OK;
}

static ft_status add_loss(void *user, int micro_batch, ft_tensor *loss)
{
    (void)micro_batch;
    return ft_zero_add_loss(((replica *)user)->zero, loss);
}

/* The model as this rank has it: layers of its stage, a slice of each for its tp rank, and of the
   slices' state a shard for its dp rank. */
static ft_status create(replica *r, const layout *l, ft_pp **pp, ft_pp_program *program)
{
    ft_zero_config zero = ft_zero_config_default();
    ft_llama_config config = ft_llama_config_default();
    ft_pp_config pipeline = { FT_PP_1F1B, l->pp, 1, M, 0, 0 };
    int64_t first_layer[L + 1]; /* of each stage, and the end */
    ft_tp *tp = NULL;
    r->B = SEQUENCES / M / l->dp;
    for (int i = 0; i < L; i++) r->sac[i].kind = l->sac;
    FT_TRY(ft_mesh_create(r->ctx, l->dp, l->tp, l->pp, &r->mesh));
    FT_TRY(ft_pp_layers_uniform(L, l->pp, first_layer));
    if (l->tp > 1) FT_TRY(ft_tp_create(r->ctx, &r->mesh, 1, &tp)); /* sequence parallel too */
    ft_llama_layout part = { r->mesh, tp, 1, first_layer };
    zero.stage = l->stage;
    zero.grad_clip = 1;
    FT_TRY(ft_zero_create(r->ctx, &zero, &r->mesh, &r->zero));
    config.hidden = 64;
    FT_TRY(ft_llama_create_part(r->ctx, r->zero, &config, &part, T, 42, &r->llama));
    FT_TRY(ft_pp_create(r->ctx, &r->mesh, &pipeline, pp));
    return ft_llama_boundary(r->llama, r->B, T, &program->ndim, program->shape);
}

static void print_costs(const ft_ctx *ctx)
{
    ft_mem_stats m;
    ft_traffic t[16];
    ft_mem_get(ctx, &m);
    printf("peak %zu:", m.peak_bytes);
    for (int tag = 0; tag <= FT_TAG_GATHER; tag++)
        if (m.highest[tag]) printf(" %s %zu", ft_tag_name((ft_tag)tag), m.highest[tag]);
    for (int g = 0, n = ft_traffic_get(ctx, 16, t); g < n; g++) {
        int64_t bytes = 0;
        for (int c = 0; c < FT_COLLECTIVE_COUNT; c++) bytes += t[g].sent_bytes[c];
        if (bytes) printf("\n%6lld bytes sent a step: %s", (long long)bytes / STEPS, t[g].group);
    }
    putchar('\n');
}

static ft_status rank_main(ft_ctx *ctx, void *user)
{
    const layout *l = user;
    replica r = { .ctx = ctx };
    ft_pp_program program = { forward, add_loss, &r, FT_F32, 0, { 0 } };
    ft_zero_report report;
    ft_pp *pp;
    FT_TRY(create(&r, l, &pp, &program));
    ft_mem_reset_peak(ctx);
    for (; r.step < STEPS; r.step++) {
        FT_TRY(ft_zero_step_begin(r.zero, M, M * r.B * T, &r.scale));
        FT_TRY(ft_pp_run(pp, &program)); /* all forwards and backwards of the step */
        FT_TRY(ft_zero_step_end(r.zero, 0.003));
        FT_TRY(ft_zero_report_get(r.zero, &report)); /* the same on every rank */
        if (ft_rank(ctx) == 0 && r.step % 10 == 9)
            printf("step %d  loss %.3f  norm %.3f\n", r.step + 1, report.loss, report.grad_norm);
    }
    if (ft_rank(ctx) == 0) print_costs(ctx);
    return FT_OK;
}

int main(void)
{
    layout layouts[] = { { 1, 1, 1, 0, FT_SAC_NONE }, { 2, 2, 2, 3, FT_SAC_SELECTIVE } };
    for (int i = 0; i < 2; i++) {
        ft_config config = ft_config_default();
        config.world = layouts[i].dp * layouts[i].tp * layouts[i].pp;
        if (ft_launch(&config, rank_main, &layouts[i]) != FT_OK)
            return fprintf(stderr, "error: %s\n", ft_last_error()), 1;
    }
    return 0;
}
