/* The built-in GEMM beside OpenBLAS, one thread each, in one run. Build and run from the top:

       cc -std=c11 -O3 -march=native -I. tests/bench_gemm.c -o build/bench_gemm \
          -lopenblas -lm -lpthread
       build/bench_gemm [seconds for each figure, default 0.2]

   Prints GFLOP/s, the best of the repetitions that fit, and the ratio built-in / OpenBLAS. bf16 rows
   compare with OpenBLAS in fp32. Fails if the two disagree. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"

#include <cblas.h>

extern void openblas_set_num_threads(int threads);

typedef struct bench_shape {
    int64_t m, n, k;
    int ta, tb;     /* operand is stored transposed */
    ft_dtype dtype; /* of all three, for the built-in */
    const char *what;
} bench_shape;

/* The letters of the headers: N tokens, C hidden, F feed-forward, V vocabulary. */
static const bench_shape shapes[] = {
    {512, 512, 512, 0, 0, FT_F32, "square"},
    {512, 512, 512, 0, 1, FT_F32, "square, B^T"},
    {512, 512, 512, 1, 0, FT_F32, "square, A^T"},
    {1024, 768, 256, 0, 1, FT_F32, "qkv: y[N,O] = x w^T"},
    {1024, 256, 768, 0, 0, FT_F32, "qkv: dx[N,C] = dy w"},
    {768, 256, 1024, 1, 0, FT_F32, "qkv: dw[O,C] = dy^T x"},
    {1024, 1024, 256, 0, 1, FT_F32, "gate/up: y[N,2F]"},
    {256, 4096, 256, 0, 1, FT_F32, "head: logits[N,V]"},
    {256, 256, 4096, 0, 0, FT_F32, "head: dx[N,C]"},
    {4096, 256, 256, 1, 0, FT_F32, "head: dw[V,C]"},
    {256, 192, 64, 0, 1, FT_F32, "small"},
    {33, 65, 129, 0, 1, FT_F32, "odd"},
    {1, 768, 256, 0, 1, FT_F32, "one token"},
    {4, 768, 256, 0, 1, FT_F32, "four tokens"},
    {1024, 768, 256, 0, 1, FT_BF16, "bf16: y[N,O] = x w^T"},
    {768, 256, 1024, 1, 0, FT_BF16, "bf16: dw[O,C] = dy^T x"},
};

static double now(void)
{
    struct timespec t;
    (void)timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct bench_data {
    float *a, *b, *c, *c_blas;
    void *a_in, *b_in, *c_out, *workspace; /* of the built-in, in its dtype */
} bench_data;

static void run_builtin(const bench_shape *s, const bench_data *d)
{
    ft__gemm(s->m, s->n, s->k, d->a_in, s->dtype, s->ta ? 1 : s->k, s->ta ? s->m : 1, d->b_in,
             s->dtype, s->tb ? 1 : s->n, s->tb ? s->k : 1, d->c_out, s->dtype, s->n, 0,
             d->workspace);
}

static void run_blas(const bench_shape *s, const bench_data *d)
{
    cblas_sgemm(CblasRowMajor, s->ta ? CblasTrans : CblasNoTrans, s->tb ? CblasTrans : CblasNoTrans,
                (int)s->m, (int)s->n, (int)s->k, 1.0f, d->a, (int)(s->ta ? s->m : s->k), d->b,
                (int)(s->tb ? s->k : s->n), 0.0f, d->c_blas, (int)s->n);
}

static double gflops(const bench_shape *s, const bench_data *d, double seconds,
                     void (*run)(const bench_shape *, const bench_data *))
{
    double best = 1e30, end = now() + seconds;
    double flops = 2.0 * (double)s->m * (double)s->n * (double)s->k;
    int64_t times = 1 + (int64_t)(2e6 / flops); /* short ones in groups, for the clock's sake */
    run(s, d);
    do {
        double start = now();
        for (int64_t i = 0; i < times; i++) run(s, d);
        double t = (now() - start) / (double)times;
        if (t < best) best = t;
    } while (now() < end);
    return flops / best * 1e-9;
}

/* Room for n elements; fp32 values that bf16 holds exactly, so that both sides see the same. */
static void fill(float **f32, void **typed, int64_t n, ft_dtype dtype, unsigned seed)
{
    *f32 = (float *)malloc((size_t)n * sizeof **f32);
    *typed = malloc((size_t)n * ft_dtype_bytes(dtype));
    if (!*f32 || !*typed) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        (*f32)[i] = (float)(seed >> 25) / 64.0f - 1.0f;
    }
    ft__store_row(*typed, dtype, 0, n, *f32, 0);
}

static double relative_error(const bench_shape *s, const bench_data *d)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < s->m * s->n; i++) {
        double e = (double)ft__load(d->c_out, s->dtype, i) - (double)d->c_blas[i];
        diff += e * e;
        norm += (double)d->c_blas[i] * (double)d->c_blas[i];
    }
    return sqrt(diff / norm);
}

static int bench(const bench_shape *s, double seconds)
{
    bench_data d;
    size_t bytes = ft__gemm_workspace_bytes(s->m, s->n, s->k, s->dtype, s->dtype, s->dtype);
    fill(&d.a, &d.a_in, s->m * s->k, s->dtype, 1);
    fill(&d.b, &d.b_in, s->k * s->n, s->dtype, 2);
    fill(&d.c, &d.c_out, s->m * s->n, s->dtype, 3);
    fill(&d.c_blas, &d.workspace, s->m * s->n + (int64_t)bytes / 2, s->dtype, 4);
    double ours = gflops(s, &d, seconds, run_builtin), blas = gflops(s, &d, seconds, run_blas);
    double error = relative_error(s, &d), limit = s->dtype == FT_BF16 ? 4e-3 : 1e-5;
    printf("%5lld %5lld %5lld  %c%c  %-24s %8.1f %8.1f %7.2f  %.0e%s\n", (long long)s->m,
           (long long)s->n, (long long)s->k, s->ta ? 'T' : 'N', s->tb ? 'T' : 'N', s->what, ours,
           blas, ours / blas, error, error < limit ? "" : "  WRONG");
    free(d.a);
    free(d.b);
    free(d.c);
    free(d.c_blas);
    free(d.a_in);
    free(d.b_in);
    free(d.c_out);
    free(d.workspace);
    return error < limit;
}

int main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 0.2;
    int right = 1;
    openblas_set_num_threads(1);
    printf("    m     n     k  AB  %-24s built-in OpenBLAS   ratio  difference\n", "GFLOP/s");
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        right = bench(&shapes[i], seconds) && right;
    return right ? 0 : 1;
}
