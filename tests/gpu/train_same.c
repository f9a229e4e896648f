/* train_same.c: trains a model on given weights and batches, for comparison with another framework.

     train_same WEIGHTS.safetensors BATCHES.bin STEPS B T

   The shape is fixed below, as in torch_peer.py. BATCHES.bin has STEPS x B rows of T + 1 int32:
   tokens, and the same one later as labels. bf16 weights with fp32 masters, AdamW, cosine. Prints
   every loss, then the mean of the last 50. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"
#include "femtotron_io.h"

#include <stdlib.h>

typedef struct same {
    const char *weights, *batches;
    int64_t steps, B, T;
    int32_t *rows;
    double *losses;
} same;

static ft_llama_config same_config(void)
{
    ft_llama_config c = ft_llama_config_default();
    c.vocab = 256;
    c.hidden = 384;
    c.layers = 6;
    c.heads = 6;
    c.kv_heads = 2;
    c.intermediate = 1024;
    c.norm_eps = 1e-5;
    return c;
}

static ft_status same_import(const same *s, ft_ctx *ctx, ft_llama *model)
{
    ft_io_safetensors *file;
    FT_TRY(ft_io_safetensors_open(s->weights, &file));
    for (int i = 0; i < ft_llama_param_count(model); i++) {
        const ft_llama_param *p = ft_llama_param_at(model, i);
        const ft_io_tensor *t = ft_io_safetensors_find(file, p->name);
        if (!t) return ft_error(FT_ERR_DATA, "%s has no %s", s->weights, p->name);
        float *values = (float *)ft_host_alloc(ctx, (size_t)t->elems * sizeof *values);
        if (!values) return FT_ERR_OOM;
        FT_TRY(ft_io_read_float(t, 0, t->elems, values));
        FT_TRY(ft_llama_import(model, p, values));
        ft_host_free(ctx, values);
    }
    ft_io_safetensors_close(file);
    return FT_OK;
}

static ft_status same_step(const same *s, ft_zero *zero, ft_llama *model, ft_tensor *tokens,
                           ft_tensor *labels, ft_tape *tape, int32_t *host, int64_t step)
{
    const int32_t *row = s->rows + step * s->B * (s->T + 1);
    ft_tensor *scale, *loss;
    ft_zero_report report;
    ft_lr lr;
    memset(&lr, 0, sizeof lr);
    lr.schedule = FT_LR_COSINE;
    lr.peak = 1e-3;
    lr.floor = 1e-4;
    lr.warmup = 50;
    lr.total = s->steps;
    for (int shift = 0; shift < 2; shift++) {
        for (int64_t b = 0; b < s->B; b++)
            memcpy(host + b * s->T, row + b * (s->T + 1) + shift, (size_t)s->T * sizeof *host);
        FT_TRY(ft_upload(shift ? labels : tokens, host));
    }
    FT_TRY(ft_zero_step_begin(zero, 1, s->B * s->T, &scale));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_llama_loss(model, tokens, labels, scale, NULL, &loss));
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_backward(tape, loss, NULL));
    FT_TRY(ft_zero_add_loss(zero, loss));
    ft_tensor_free(loss);
    FT_TRY(ft_zero_step_end(zero, ft_lr_at(&lr, step)));
    FT_TRY(ft_zero_report_get(zero, &report));
    s->losses[step] = report.loss;
    return FT_OK;
}

static ft_status same_rank(ft_ctx *ctx, void *user)
{
    const same *s = (const same *)user;
    ft_llama_config c = same_config();
    ft_zero_config config = ft_zero_config_default();
    ft_mesh mesh;
    ft_zero *zero;
    ft_llama *model;
    ft_tape *tape;
    ft_tensor *tokens, *labels;
    int64_t shape[2];
    int32_t *host = (int32_t *)ft_host_alloc(ctx, (size_t)(s->B * s->T) * sizeof *host);
    if (!host) return FT_ERR_OOM;
    shape[0] = s->B;
    shape[1] = s->T;
    config.dtype = FT_BF16;
    config.weight_decay = 0.1;
    config.grad_clip = 1;
    FT_TRY(ft_mesh_create(ctx, 1, 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &config, &mesh, &zero));
    FT_TRY(ft_llama_create(ctx, zero, &c, s->T, 1, &model));
    FT_TRY(same_import(s, ctx, model));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tensor_create(ctx, &tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(ctx, &labels, FT_I32, 2, shape, FT_TAG_OTHER));
    for (int64_t step = 0; step < s->steps; step++)
        FT_TRY(same_step(s, zero, model, tokens, labels, tape, host, step));
    return FT_OK;
}

static int same_read(same *s)
{
    size_t n = (size_t)(s->steps * s->B * (s->T + 1)), got = 0;
    FILE *file = fopen(s->batches, "rb");
    s->rows = (int32_t *)malloc(n * sizeof *s->rows);
    s->losses = (double *)calloc((size_t)s->steps, sizeof *s->losses);
    if (file && s->rows && s->losses) got = fread(s->rows, sizeof *s->rows, n, file);
    if (file) fclose(file);
    return got == n;
}

int main(int argc, char **argv)
{
    same s;
    ft_config config = ft_config_default();
    double mean = 0;
    if (argc != 6) {
        fprintf(stderr, "usage: train_same WEIGHTS BATCHES STEPS B T\n");
        return 2;
    }
    memset(&s, 0, sizeof s);
    s.weights = argv[1];
    s.batches = argv[2];
    s.steps = atoll(argv[3]);
    s.B = atoll(argv[4]);
    s.T = atoll(argv[5]);
    if (s.steps < 50 || s.B < 1 || s.T < 1 || !same_read(&s)) {
        fprintf(stderr, "error: %s does not hold %s steps of at least 50\n", s.batches, argv[3]);
        return 1;
    }
    config.device = FT_GPU;
    if (ft_launch(&config, same_rank, &s) != FT_OK) {
        fprintf(stderr, "error: %s\n", ft_last_error());
        return 1;
    }
    for (int64_t i = 0; i < s.steps; i++) printf("%.5f\n", s.losses[i]);
    for (int64_t i = s.steps - 50; i < s.steps; i++) mean += s.losses[i] / 50;
    printf("mean of the last 50: %.5f\n", mean);
    free(s.rows);
    free(s.losses);
    return 0;
}
