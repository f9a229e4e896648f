/* Where a training step's time goes, as ratios measured in one run:

     GEMM share       of a step at hidden 512, 4 layers, T 256, one rank, spent inside the GEMM calls
     ZeRO-3 / ZeRO-0  time of a step at DP 2
     accounting       time of the same step on meta, which allocates, frees, records, counts and does
                      nothing else, as a share of the step on the CPU

   cc -std=c11 -O3 -march=native -DFT_CBLAS -I. -Itests tests/bench_step.c -o build/bench_step -lopenblas -lm
   -lpthread; without FT_CBLAS the GEMM share is left out. `make bench` runs it. */

#define _POSIX_C_SOURCE 200809L
#include <time.h>

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Every GEMM of the implementation below goes through a stopwatch; for one rank only. */
static double gemm_s;
#ifdef FT_CBLAS
#include <cblas.h>
static void timed_sgemm(CBLAS_ORDER order, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k,
                        float alpha, const float *a, int lda, const float *b, int ldb, float beta,
                        float *c, int ldc)
{
    double begin = now_s();
    cblas_sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    gemm_s += now_s() - begin;
}
#define cblas_sgemm timed_sgemm
#endif

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_llama.h"
#include "train_harness.h"

#include <stdio.h>

typedef struct stopwatch { double begin, gemm_begin, seconds, gemm; } stopwatch;

/* The clock runs from the end of the first step, which faults memory in, to the last one's. */
static ft_status watch(th_rank *r, th_moment moment, void *user)
{
    stopwatch *w = (stopwatch *)user;
    if (r->rank != 0 || moment != TH_STEP_DONE) return FT_OK;
    FT_TRY(ft_sync(r->ctx));
    if (r->step == 0) {
        w->begin = now_s();
        w->gemm_begin = gemm_s;
    }
    w->seconds = now_s() - w->begin;
    w->gemm = gemm_s - w->gemm_begin;
    return FT_OK;
}

static int step_time(th_options o, stopwatch *w)
{
    o.hook = watch;
    o.user = w;
    o.no_hash = 1;
    o.report_every = 0;
    th_result *r = th_run(&o);
    int failed = r->status != FT_OK;
    if (failed) fprintf(stderr, "error: %s\n", r->error);
    th_free(r);
    w->seconds /= o.steps - 1;
    w->gemm /= o.steps - 1;
    return failed;
}

int main(void)
{
    th_options o = th_options_default();
    stopwatch one, meta, zero[4];
    o.model.vocab = 256;
    o.model.hidden = 512;
    o.model.heads = 8;
    o.model.kv_heads = 4;
    o.model.intermediate = 1408;
    o.T = 256;
    o.samples = 4;
    o.steps = 4;
    if (step_time(o, &one)) return 1;
    o.launch.device = FT_META;
    if (step_time(o, &meta)) return 1;
    o.launch.device = FT_CPU;
    o.dp = 2;
    for (int round = 0; round < 2; round++) /* the second round counts: the machine is warm */
        for (int stage = 0; stage <= 3; stage += 3) {
            o.zero.stage = stage;
            if (step_time(o, &zero[stage])) return 1;
        }
#ifdef FT_CBLAS
    printf("GEMM share of a step       %.2f   (%.0f of %.0f ms; aim: at least 0.60)\n",
           one.gemm / one.seconds, 1e3 * one.gemm, 1e3 * one.seconds);
#endif
    printf("ZeRO-3 / ZeRO-0 at DP 2    %.2f   (%.0f and %.0f ms; aim: at most 1.15)\n",
           zero[3].seconds / zero[0].seconds, 1e3 * zero[3].seconds, 1e3 * zero[0].seconds);
    printf("accounting of a step       %.2f%%  (%.2f of %.0f ms; aim: under 1%%)\n",
           100 * meta.seconds / one.seconds, 1e3 * meta.seconds, 1e3 * one.seconds);
    return 0;
}
