/* femtotron_tp.h: cut layers against whole ones, traffic, memory, recomputation, what is refused.

   cc -std=c11 -I. tests/test_tp.c -lcmocka -lm -lpthread

   The reference of every op is the unsharded op of femtotron.h on the same global data, in a launch
   of one rank; which part of it a rank must have is worked out here, row by row, without the
   header's slices. Ranks are threads and cmocka's assertions are for the main thread: a rank
   reports what does not hold as an error, and the main thread asserts that the launch succeeded. */

#ifndef FT_TEST_LINKED /* make compiles the implementation once for many tests */
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"
#include "femtotron_tp.h"
#include "check.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* ------------------------------------------------------------------------------------- helpers */

/* The same in the main thread. */
#define ASSERT_REFUSED(call, status, part)                                                         \
    do {                                                                                           \
        assert_int_equal(call, status);                                                            \
        if (!strstr(ft_last_error(), part)) fail_msg("\"%s\" is not in: %s", part,                 \
                                                     ft_last_error());                             \
    } while (0)

enum { MAX_T = 4, MAX_ELEMS = 4096 };

static float value_at(int seed, int64_t i) /* in -1..1, no pattern that a cut could repeat */
{
    uint64_t z = (uint64_t)(seed * 1000003 + 17) * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)i;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (float)((double)(z >> 40) / 8388608.0 - 1.0);
}

static void fill(float *to, int64_t n, int seed, float scale)
{
    for (int64_t i = 0; i < n; i++) to[i] = scale * value_at(seed, i);
}

/* The part of a global [rows, cols] that a rank has. */
typedef enum part { WHOLE, ROWS, COLS, VOCAB } part;

static int64_t part_rows(part p, int64_t rows, int t)
{
    return p == ROWS ? rows / t : p == VOCAB ? (rows + t - 1) / t : rows;
}

static int64_t part_cols(part p, int64_t cols, int t) { return p == COLS ? cols / t : cols; }

/* The global element behind element (i, j) of rank r's part, -1 for padding. */
static int64_t part_elem(part p, int64_t rows, int64_t cols, int t, int r, int64_t i, int64_t j)
{
    if (p == ROWS || p == VOCAB) i += part_rows(p, rows, t) * r;
    if (p == COLS) j += cols / t * r;
    return i < rows ? i * cols + j : -1;
}

/* A tensor that holds a rank's part; padding is NaN. */
static ft_status part_create(ft_ctx *ctx, part p, const float *whole, int64_t rows, int64_t cols,
                             int t, int r, ft_dtype dtype, int ndim, const int64_t *shape,
                             ft_tensor **out)
{
    static const float nan_value = NAN;
    int64_t lr = part_rows(p, rows, t), lc = part_cols(p, cols, t);
    float *values = (float *)ft_host_alloc(ctx, (size_t)(lr * lc) * sizeof *values);
    for (int64_t i = 0; i < lr; i++)
        for (int64_t j = 0; j < lc; j++) {
            int64_t e = part_elem(p, rows, cols, t, r, i, j);
            values[i * lc + j] = e < 0 ? nan_value : whole[e];
        }
    FT_TRY(ft_tensor_create(ctx, out, dtype, ndim, shape, FT_TAG_PARAM));
    if (dtype == FT_BF16) {
        uint16_t *bits = (uint16_t *)ft_host_alloc(ctx, (size_t)(lr * lc) * sizeof *bits);
        for (int64_t i = 0; i < lr * lc; i++) bits[i] = ft_bf16_from_f32(values[i]);
        FT_TRY(ft_upload(*out, bits));
        ft_host_free(ctx, bits);
    } else {
        FT_TRY(ft_upload(*out, values));
    }
    ft_host_free(ctx, values);
    return FT_OK;
}

static ft_status create2(ft_ctx *ctx, part p, const float *whole, int64_t rows, int64_t cols,
                         const ft_tp *tp, ft_tensor **out)
{
    int t = tp ? tp->size : 1, r = tp ? tp->rank : 0;
    int64_t shape[2];
    shape[0] = part_rows(p, rows, t);
    shape[1] = part_cols(p, cols, t);
    FT_TRY(part_create(ctx, p, whole, rows, cols, t, r, FT_F32, 2, shape, out));
    (*out)->requires_grad = 1;
    return FT_OK;
}

static ft_status create1(ft_ctx *ctx, part p, const float *whole, int64_t n, const ft_tp *tp,
                         ft_tensor **out)
{
    int t = tp ? tp->size : 1, r = tp ? tp->rank : 0;
    int64_t shape = part_rows(p, n, t);
    FT_TRY(part_create(ctx, p, whole, n, 1, t, r, FT_F32, 1, &shape, out));
    (*out)->requires_grad = 1;
    return FT_OK;
}

/* "By tokens": [B,T,cols], or this rank's [N/t,cols]. */
static ft_status create_tokens(ft_ctx *ctx, const float *whole, int64_t B, int64_t T, int64_t cols,
                               const ft_tp *tp, ft_tensor **out)
{
    int64_t shape[3];
    if (tp && tp->sequence_parallel) return create2(ctx, ROWS, whole, B * T, cols, tp, out);
    shape[0] = B;
    shape[1] = T;
    shape[2] = cols;
    FT_TRY(part_create(ctx, WHOLE, whole, B * T, cols, 1, 0, FT_F32, 3, shape, out));
    (*out)->requires_grad = 1;
    return FT_OK;
}

static ft_status create_ints(ft_ctx *ctx, const int32_t *values, int64_t B, int64_t T,
                             ft_tensor **out)
{
    int64_t shape[2];
    shape[0] = B;
    shape[1] = T;
    FT_TRY(ft_tensor_create(ctx, out, FT_I32, 2, shape, FT_TAG_OTHER));
    return ft_upload(*out, values);
}

/* As fp32. */
static ft_status read_values(const ft_tensor *t, float *values)
{
    uint16_t bits[MAX_ELEMS];
    CHECK(ft_numel(t) <= MAX_ELEMS);
    if (t->dtype != FT_BF16) return ft_download(t, values);
    FT_TRY(ft_download(t, bits));
    for (int64_t i = 0; i < ft_numel(t); i++) values[i] = ft_f32_from_bf16(bits[i]);
    return FT_OK;
}

/* The tensor is rank r's part of the whole, to `tolerance` of its largest element; padding is 0. */
static ft_status near_part(const ft_tensor *t, part p, const float *whole, int64_t rows,
                           int64_t cols, int size, int r, double tolerance, const char *what)
{
    float got[MAX_ELEMS];
    double most = 1e-30;
    int64_t lr = part_rows(p, rows, size), lc = part_cols(p, cols, size);
    CHECK(t != NULL && ft_numel(t) == lr * lc);
    FT_TRY(read_values(t, got));
    for (int64_t i = 0; i < rows * cols; i++) most = fmax(most, fabs((double)whole[i]));
    for (int64_t i = 0; i < lr; i++)
        for (int64_t j = 0; j < lc; j++) {
            int64_t e = part_elem(p, rows, cols, size, r, i, j);
            double want = e < 0 ? 0 : (double)whole[e], is = (double)got[i * lc + j];
            if (!(fabs(is - want) <= (e < 0 ? 0 : tolerance * most)))
                return ft_error(FT_ERR_DATA, "%s: element (%lld,%lld) is %.9g, not %.9g", what,
                                (long long)i, (long long)j, is, want);
        }
    return FT_OK;
}

static const double close_enough = 1e-5;

typedef struct setup { /* of a launch */
    int t, dp, sp;
    ft_device device;
    ft_switch async;
    int delay_us;
} setup;

static setup setup_make(int t, int sp)
{
    setup s;
    memset(&s, 0, sizeof s);
    s.t = t;
    s.dp = 1;
    s.sp = sp;
    return s;
}

static ft_status launch(const setup *s, ft_rank_fn fn, void *user)
{
    ft_config config = ft_config_default();
    config.world = s->t * s->dp;
    config.device = s->device;
    config.async = s->async;
    config.delay_us = s->delay_us;
    config.timeout_s = 60;
    return ft_launch(&config, fn, user);
}

static void launch_ok(const setup *s, ft_rank_fn fn, void *user, const char *what)
{
    ft_status status = launch(s, fn, user);
    if (status != FT_OK)
        fail_msg("%s, tp %d%s on %s: %s: %s", what, s->t, s->sp ? " sp" : "",
                 s->device == FT_META ? "meta" : "cpu", ft_status_name(status), ft_last_error());
}

static ft_status tp_begin(ft_ctx *ctx, const setup *s, ft_tp **tp)
{
    ft_mesh mesh;
    FT_TRY(ft_mesh_create(ctx, s->dp, s->t, 1, &mesh));
    return ft_tp_create(ctx, &mesh, s->sp, tp);
}

/* Bytes sent on the tp group so far. */
static int64_t sent_bytes(const ft_ctx *ctx)
{
    ft_traffic rows[16];
    int64_t sum = 0;
    int n = ft_traffic_get(ctx, 16, rows);
    for (int i = 0; i < n && i < 16; i++)
        for (int k = 0; k < FT_COLLECTIVE_COUNT && !strcmp(rows[i].group, "tp"); k++)
            sum += rows[i].sent_bytes[k];
    return sum;
}

static const int sizes[] = {1, 2, 4};

/* -------------------------------------------------------------------------------- column, row */

enum { LB = 2, LT = 6, LI = 12, LO = 20, LN = LB * LT };

typedef enum layer { COLUMN, ROW, ENTER, LEAVE } layer;

typedef struct linear_case {
    setup s;
    layer kind;
    int with_bias;
    float x[LN * LI], w[LO * LI], b[LO], dy[LN * LO];
    float y[LN * LO], dx[LN * LI], dw[LO * LI], db[LO]; /* the reference's */
    float db_rank[MAX_T][LO];                           /* partial sums */
} linear_case;

static ft_status linear_reference(ft_ctx *ctx, void *user)
{
    linear_case *c = (linear_case *)user;
    ft_tensor *x, *w, *b = NULL, *y, *dy;
    ft_tape *tape;
    FT_TRY(create_tokens(ctx, c->x, LB, LT, LI, NULL, &x));
    FT_TRY(create2(ctx, WHOLE, c->w, LO, LI, NULL, &w));
    if (c->with_bias) FT_TRY(create1(ctx, WHOLE, c->b, LO, NULL, &b));
    FT_TRY(create_tokens(ctx, c->dy, LB, LT, LO, NULL, &dy));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_linear(ctx, &y, x, w, b));
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_download(y, c->y));
    FT_TRY(ft_backward(tape, y, dy));
    FT_TRY(ft_download(x->grad, c->dx));
    FT_TRY(ft_download(w->grad, c->dw));
    return b ? ft_download(b->grad, c->db) : FT_OK;
}

/* What a layer of this kind, of `elems` whole elements at its boundary, sends. */
static int64_t boundary_bytes(const setup *s, layer kind, int backward)
{
    int64_t in = LN * LI * 4 * (s->t - 1) / s->t, out = LN * LO * 4 * (s->t - 1) / s->t;
    if (kind == COLUMN) return s->sp ? (backward ? 2 : 1) * in : (backward ? 2 : 0) * in;
    if (kind == ROW) return s->sp ? out : (backward ? 0 : 2) * out;
    if (kind == ENTER) return s->sp ? in : (backward ? 2 : 0) * in;
    return s->sp ? out : (backward ? 0 : 2) * out;
}

static ft_status linear_apply(ft_ctx *ctx, const linear_case *c, ft_tp *tp, ft_tensor **y,
                              ft_tensor *x, ft_tensor *w, ft_tensor *b)
{
    ft_tensor *mid;
    if (c->kind == COLUMN) return ft_tp_column_linear(tp, y, x, w, b, LB, LT);
    if (c->kind == ROW) return ft_tp_row_linear(tp, y, x, w, b);
    if (c->kind == ENTER) {
        FT_TRY(ft_tp_enter(tp, &mid, x, LB, LT));
        FT_TRY(ft_linear(ctx, y, mid, w, b));
        ft_tensor_free(mid);
        return FT_OK;
    }
    FT_TRY(ft_linear(ctx, &mid, x, w, NULL));
    FT_TRY(ft_tp_leave(tp, y, mid));
    if (c->s.sp) ft_tensor_free(mid);
    else REFUSED(ft_scale(ctx, &x, mid, 2), FT_ERR_STATE, "in-place");
    return FT_OK;
}

static ft_status linear_rank(ft_ctx *ctx, void *user)
{
    linear_case *c = (linear_case *)user;
    int columns = c->kind == COLUMN || c->kind == ENTER;
    ft_tensor *x, *w, *b = NULL, *y, *dy;
    ft_tape *tape;
    ft_tp *tp;
    int64_t shape[3];
    FT_TRY(tp_begin(ctx, &c->s, &tp));
    int t = tp->size, r = tp->rank, sp = c->s.sp;
    shape[0] = LB;
    shape[1] = LT;
    shape[2] = columns ? LO / t : LI / t;
    if (columns) {
        FT_TRY(create_tokens(ctx, c->x, LB, LT, LI, tp, &x));
        FT_TRY(part_create(ctx, COLS, c->dy, LN, LO, t, r, FT_F32, 3, shape, &dy));
    } else {
        FT_TRY(part_create(ctx, COLS, c->x, LN, LI, t, r, FT_F32, 3, shape, &x));
        FT_TRY(create_tokens(ctx, c->dy, LB, LT, LO, tp, &dy));
    }
    x->requires_grad = 1;
    FT_TRY(create2(ctx, columns ? ROWS : COLS, c->w, LO, LI, tp, &w));
    if (c->with_bias) FT_TRY(create1(ctx, columns ? ROWS : WHOLE, c->b, LO, tp, &b));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(linear_apply(ctx, c, tp, &y, x, w, b));
    FT_TRY(ft_tape_end(tape));
    CHECK(sent_bytes(ctx) == boundary_bytes(&c->s, c->kind, 0));
    CHECK(y->ndim == (!columns && sp ? 2 : 3));
    FT_TRY(near_part(y, columns ? COLS : sp ? ROWS : WHOLE, c->y, LN, LO, t, r, close_enough, "y"));
    FT_TRY(ft_backward(tape, y, dy));
    CHECK(sent_bytes(ctx) ==
          boundary_bytes(&c->s, c->kind, 0) + boundary_bytes(&c->s, c->kind, 1));
    FT_TRY(near_part(x->grad, !columns ? COLS : sp ? ROWS : WHOLE, c->dx, LN, LI, t, r,
                     close_enough, "dx"));
    FT_TRY(near_part(w->grad, columns ? ROWS : COLS, c->dw, LO, LI, t, r, close_enough, "dw"));
    if (b && columns) FT_TRY(near_part(b->grad, ROWS, c->db, LO, 1, t, r, close_enough, "db"));
    if (b && !columns) FT_TRY(ft_download(b->grad, c->db_rank[r]));
    return FT_OK;
}

/* Without sp each rank has the bias's whole gradient, with sp that of its tokens [S3]. */
static void check_row_bias(const linear_case *c)
{
    for (int o = 0; o < LO; o++) {
        double sum = 0;
        for (int r = 0; r < c->s.t; r++) {
            sum += (double)c->db_rank[r][o];
            if (!c->s.sp) assert_memory_equal(&c->db_rank[r][o], &c->db_rank[0][o], 4);
        }
        if (!c->s.sp) sum /= c->s.t;
        assert_true(fabs(sum - (double)c->db[o]) <= 1e-4);
    }
}

static void run_linear(layer kind, const char *what)
{
    linear_case *c = (linear_case *)calloc(1, sizeof *c);
    setup one = setup_make(1, 0);
    c->kind = kind;
    fill(c->x, LN * LI, 1, 1);
    fill(c->w, LO * LI, 2, 1);
    fill(c->b, LO, 3, 1);
    fill(c->dy, LN * LO, 4, 1);
    for (int k = 0; k < 12; k++) {
        c->s = setup_make(sizes[k % 3], k / 3 % 2);
        c->with_bias = k / 6 && kind != LEAVE;
        launch_ok(&one, linear_reference, c, "reference");
        launch_ok(&c->s, linear_rank, c, what);
        if (c->with_bias && kind == ROW) check_row_bias(c);
    }
    free(c);
}

static void test_column(void **state)
{
    (void)state;
    run_linear(COLUMN, "column");
}

static void test_row(void **state)
{
    (void)state;
    run_linear(ROW, "row");
}

static void test_operators_alone(void **state)
{
    (void)state;
    run_linear(ENTER, "enter");
    run_linear(LEAVE, "leave");
}

/* Backward with the weight, or the input, frozen: what is not wanted is neither made nor sent. */
static ft_status frozen_rank(ft_ctx *ctx, void *user)
{
    linear_case *c = (linear_case *)user;
    ft_tensor *x, *w, *y, *dy;
    ft_tape *tape;
    ft_tp *tp;
    int64_t shape[3];
    FT_TRY(tp_begin(ctx, &c->s, &tp));
    int t = tp->size, r = tp->rank, sp = c->s.sp;
    shape[0] = LB;
    shape[1] = LT;
    shape[2] = LO / t;
    FT_TRY(ft_tape_create(ctx, &tape));
    for (int frozen_w = 0; frozen_w < 2; frozen_w++) {
        FT_TRY(create_tokens(ctx, c->x, LB, LT, LI, tp, &x));
        FT_TRY(create2(ctx, ROWS, c->w, LO, LI, tp, &w));
        FT_TRY(part_create(ctx, COLS, c->dy, LN, LO, t, r, FT_F32, 3, shape, &dy));
        x->requires_grad = frozen_w;
        w->requires_grad = !frozen_w;
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(ft_tp_column_linear(tp, &y, x, w, NULL, LB, LT));
        FT_TRY(ft_tape_end(tape));
        int64_t before = sent_bytes(ctx), part_bytes = boundary_bytes(&c->s, COLUMN, 1);
        FT_TRY(ft_backward(tape, y, dy));
        CHECK(sent_bytes(ctx) - before == (sp ? part_bytes / 2 : frozen_w ? part_bytes : 0));
        CHECK((x->grad != NULL) == frozen_w && (w->grad != NULL) == !frozen_w);
        if (frozen_w) FT_TRY(near_part(x->grad, sp ? ROWS : WHOLE, c->dx, LN, LI, t, r,
                                       close_enough, "dx"));
        else FT_TRY(near_part(w->grad, ROWS, c->dw, LO, LI, t, r, close_enough, "dw"));
    }
    return FT_OK;
}

static void test_frozen(void **state)
{
    linear_case *c = (linear_case *)calloc(1, sizeof *c);
    setup one = setup_make(1, 0);
    (void)state;
    fill(c->x, LN * LI, 1, 1);
    fill(c->w, LO * LI, 2, 1);
    fill(c->dy, LN * LO, 4, 1);
    launch_ok(&one, linear_reference, c, "reference");
    for (int sp = 0; sp < 2; sp++) {
        c->s = setup_make(2, sp);
        launch_ok(&c->s, frozen_rank, c, "frozen");
    }
    free(c);
}

/* ----------------------------------------------------------------------------------- embedding */

enum { EB = 2, ET = 8, EN = EB * ET, EC = 6, EV = 13 };

typedef struct embedding_case {
    setup s;
    int64_t V;
    int32_t tokens[EN];
    float table[EV * EC], dy[EN * EC], y[EN * EC], dtable[EV * EC];
} embedding_case;

static ft_status embedding_reference(ft_ctx *ctx, void *user)
{
    embedding_case *c = (embedding_case *)user;
    ft_tensor *tokens, *table, *y, *dy;
    ft_tape *tape;
    FT_TRY(create_ints(ctx, c->tokens, EB, ET, &tokens));
    FT_TRY(create2(ctx, WHOLE, c->table, c->V, EC, NULL, &table));
    FT_TRY(create_tokens(ctx, c->dy, EB, ET, EC, NULL, &dy));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_embedding(ctx, &y, tokens, table));
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_download(y, c->y));
    FT_TRY(ft_backward(tape, y, dy));
    return ft_download(table->grad, c->dtable);
}

static ft_status embedding_rank(ft_ctx *ctx, void *user)
{
    embedding_case *c = (embedding_case *)user;
    ft_tensor *tokens, *table, *y, *dy;
    ft_tape *tape;
    ft_tp *tp;
    FT_TRY(tp_begin(ctx, &c->s, &tp));
    int t = tp->size, r = tp->rank, sp = c->s.sp;
    int64_t bytes = EN * EC * 4 * (t - 1) / t;
    FT_TRY(create_ints(ctx, c->tokens, EB, ET, &tokens));
    FT_TRY(create2(ctx, VOCAB, c->table, c->V, EC, tp, &table));
    FT_TRY(ft_tape_create(ctx, &tape));
    for (int pass = 0; pass < 2; pass++) { /* the second adds to the first's gradient */
        int64_t before = sent_bytes(ctx);
        FT_TRY(create_tokens(ctx, c->dy, EB, ET, EC, tp, &dy));
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(ft_tp_embedding(tp, &y, tokens, table, c->V));
        FT_TRY(ft_tape_end(tape));
        CHECK(sent_bytes(ctx) - before == (sp ? 1 : 2) * bytes);
        FT_TRY(near_part(y, sp ? ROWS : WHOLE, c->y, EN, EC, t, r, 0, "y"));
        FT_TRY(ft_backward(tape, y, dy));
        CHECK(sent_bytes(ctx) - before == 2 * bytes);
        if (pass == 0)
            FT_TRY(near_part(table->grad, VOCAB, c->dtable, c->V, EC, t, r, 0, "dtable"));
        ft_tensor_free(y);
    }
    float twice[EV * EC];
    for (int64_t i = 0; i < c->V * EC; i++) twice[i] = 2 * c->dtable[i];
    return near_part(table->grad, VOCAB, twice, c->V, EC, t, r, 1e-6, "dtable, twice");
}

/* Vocabularies that t does not divide: 13 rows on 4 ranks are 4, 4, 4, 1; 5 are 2, 2, 1, 0. */
static void test_embedding(void **state)
{
    static const int64_t vocabularies[] = {13, 12, 5, 2};
    embedding_case *c = (embedding_case *)calloc(1, sizeof *c);
    setup one = setup_make(1, 0);
    (void)state;
    fill(c->table, EV * EC, 5, 1);
    fill(c->dy, EN * EC, 6, 1);
    for (int k = 0; k < 24; k++) {
        c->s = setup_make(sizes[k % 3], k / 3 % 2);
        c->V = vocabularies[k / 6];
        for (int i = 0; i < EN; i++) c->tokens[i] = (int32_t)(i * 7 % c->V);
        c->tokens[3] = 0; /* some twice, in a row of its own */
        c->tokens[4] = (int32_t)c->V - 1;
        launch_ok(&one, embedding_reference, c, "reference");
        launch_ok(&c->s, embedding_rank, c, "embedding");
    }
    for (int sp = 0; sp < 2; sp++) {
        c->s = setup_make(2, sp);
        c->V = 13;
        c->tokens[9] = 13;
        ASSERT_REFUSED(launch(&c->s, embedding_rank, c), FT_ERR_DATA,
                       "token 13 at position 9 of 16 is outside 0..12");
        c->tokens[9] = -1;
        ASSERT_REFUSED(launch(&c->s, embedding_rank, c), FT_ERR_DATA, "token -1 at position 9");
        c->tokens[9] = 0;
    }
    free(c);
}

/* ---------------------------------------------------------------------------------------- loss */

enum { SB = 2, ST = 10, SN = SB * ST, SC = 8, SV = 13 };

typedef struct loss_case {
    setup s;
    int64_t V, chunk;
    int with_scale;
    int read_first; /* the loss before backward, which is then not deferred */
    int32_t labels[SN];
    float x[SN * SC], w[SV * SC], scale;
    float loss, dx[SN * SC], dw[SV * SC];
    uint32_t bits[2][MAX_T]; /* [deferred or not][rank]: of the loss */
    float rank_dx[2][MAX_T][SN * SC], rank_dw[2][MAX_T][SV * SC];
} loss_case;

static ft_status loss_scale(ft_ctx *ctx, const loss_case *c, ft_tensor **scale)
{
    int64_t one = 1;
    *scale = NULL;
    if (!c->with_scale) return FT_OK;
    FT_TRY(ft_tensor_create(ctx, scale, FT_F32, 1, &one, FT_TAG_OTHER));
    return ft_upload(*scale, &c->scale);
}

static ft_status loss_reference(ft_ctx *ctx, void *user)
{
    loss_case *c = (loss_case *)user;
    ft_tensor *x, *w, *labels, *scale, *loss;
    ft_tape *tape;
    FT_TRY(create_ints(ctx, c->labels, SB, ST, &labels));
    FT_TRY(create_tokens(ctx, c->x, SB, ST, SC, NULL, &x));
    FT_TRY(create2(ctx, WHOLE, c->w, c->V, SC, NULL, &w));
    FT_TRY(loss_scale(ctx, c, &scale));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_linear_cross_entropy(ctx, &loss, x, w, labels, scale, 0));
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_backward(tape, loss, NULL));
    FT_TRY(ft_download(loss, &c->loss));
    FT_TRY(ft_download(x->grad, c->dx));
    return ft_download(w->grad, c->dw);
}

static ft_status loss_rank(ft_ctx *ctx, void *user)
{
    loss_case *c = (loss_case *)user;
    ft_tensor *x, *w, *labels, *scale, *loss;
    ft_tape *tape;
    ft_tp *tp;
    float value;
    FT_TRY(tp_begin(ctx, &c->s, &tp));
    int t = tp->size, r = tp->rank, sp = c->s.sp, f = c->read_first;
    int64_t stats = 12 * SN * (t - 1), rows = SN * SC * 4 * (t - 1) / t;
    FT_TRY(create_ints(ctx, c->labels, SB, ST, &labels));
    FT_TRY(create_tokens(ctx, c->x, SB, ST, SC, tp, &x));
    FT_TRY(create2(ctx, VOCAB, c->w, c->V, SC, tp, &w));
    FT_TRY(loss_scale(ctx, c, &scale));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_tp_linear_cross_entropy(tp, &loss, x, w, labels, scale, c->chunk, c->V));
    FT_TRY(ft_tape_end(tape));
    CHECK(sent_bytes(ctx) == 0);
    if (c->read_first) {
        FT_TRY(ft_download(loss, &value));
        memcpy(&c->bits[1][r], &value, 4);
        CHECK(sent_bytes(ctx) == stats + (sp ? rows : 0));
    }
    int64_t before = sent_bytes(ctx);
    FT_TRY(ft_backward(tape, loss, NULL));
    CHECK(sent_bytes(ctx) - before == stats + 2 * rows);
    ft_flops flops; /* of this rank's part of the head: forward once, whether deferred or not */
    int64_t per = (c->V + t - 1) / t, own = c->V - r * per; /* the padding costs nothing */
    double product = 2.0 * SN * SC * (double)(own < 0 ? 0 : own < per ? own : per);
    ft_flops_get(ctx, &flops);
    CHECK(flops.forward == product && flops.backward == 2 * product && flops.replay == 0);
    FT_TRY(ft_download(loss, &value));
    memcpy(&c->bits[f][r], &value, 4);
    if (!(fabs((double)value - (double)c->loss) <= 1e-5 * fabs((double)c->loss)))
        return ft_error(FT_ERR_DATA, "loss is %.9g, not %.9g", (double)value, (double)c->loss);
    FT_TRY(near_part(x->grad, sp ? ROWS : WHOLE, c->dx, SN, SC, t, r, close_enough, "dx"));
    FT_TRY(near_part(w->grad, VOCAB, c->dw, c->V, SC, t, r, close_enough, "dw"));
    FT_TRY(ft_download(x->grad, c->rank_dx[f][r]));
    return ft_download(w->grad, c->rank_dw[f][r]);
}

static void run_loss(loss_case *c)
{
    setup one = setup_make(1, 0);
    launch_ok(&one, loss_reference, c, "reference");
    memset(c->rank_dx, 0, sizeof c->rank_dx);
    memset(c->rank_dw, 0, sizeof c->rank_dw);
    for (c->read_first = 0; c->read_first < 2; c->read_first++)
        launch_ok(&c->s, loss_rank, c, "loss");
    for (int r = 0; r < c->s.t; r++) {
        assert_int_equal(c->bits[0][r], c->bits[0][0]);
        assert_int_equal(c->bits[1][r], c->bits[0][0]);
    }
    assert_memory_equal(c->rank_dx[0], c->rank_dx[1], sizeof c->rank_dx[0]);
    assert_memory_equal(c->rank_dw[0], c->rank_dw[1], sizeof c->rank_dw[0]);
}

static loss_case *loss_case_new(void)
{
    loss_case *c = (loss_case *)calloc(1, sizeof *c);
    fill(c->x, SN * SC, 7, 1);
    fill(c->w, SV * SC, 8, 1);
    c->V = SV;
    c->scale = 0.37f;
    for (int i = 0; i < SN; i++) c->labels[i] = i % 5 == 2 ? -100 : (int32_t)(i * 11 % SV);
    return c;
}

static void test_loss(void **state)
{
    static const int64_t chunks[] = {0, 1, 3, 8, 20, 1000};
    loss_case *c = loss_case_new();
    (void)state;
    for (int k = 0; k < 36; k++) {
        c->s = setup_make(sizes[k % 3], k / 3 % 2);
        c->chunk = chunks[k / 6];
        c->with_scale = k % 2;
        run_loss(c);
    }
    free(c);
}

/* Vocabularies that t does not divide; some leave a rank nothing but padding (NaN here). */
static void test_loss_vocabulary(void **state)
{
    static const int64_t vocabularies[] = {12, 9, 5, 2, 1};
    loss_case *c = loss_case_new();
    (void)state;
    for (int k = 0; k < 20; k++) {
        c->s = setup_make(k % 2 ? 4 : 2, k / 2 % 2);
        c->V = vocabularies[k / 4];
        c->chunk = 7;
        for (int i = 0; i < SN; i++) c->labels[i] = (int32_t)(i % c->V);
        run_loss(c);
    }
    free(c);
}

/* Logits of hundreds: the maximum may be on another rank than the label. */
static void test_loss_large_logits(void **state)
{
    loss_case *c = loss_case_new();
    (void)state;
    fill(c->x, SN * SC, 7, 20);
    fill(c->w, SV * SC, 8, 20);
    for (int k = 0; k < 4; k++) {
        c->s = setup_make(k % 2 ? 4 : 2, k / 2);
        run_loss(c);
        assert_true(c->loss > 50 && isfinite(c->loss));
    }
    free(c);
}

static void test_loss_ignored(void **state)
{
    loss_case *c = loss_case_new();
    (void)state;
    for (int i = 0; i < SN; i++) c->labels[i] = -100;
    for (int k = 0; k < 8; k++) {
        c->s = setup_make(k % 2 ? 4 : 2, k / 2 % 2);
        c->with_scale = k / 4;
        run_loss(c);
        assert_true(c->loss == 0);
        for (int i = 0; i < SN * SC; i++) assert_true(c->rank_dx[0][0][i] == 0);
    }
    for (int i = 0; i < SN; i++) c->labels[i] = i == 13 ? 6 : -100; /* one counts */
    for (int k = 0; k < 4; k++) {
        c->s = setup_make(k % 2 ? 4 : 2, k / 2 % 2);
        run_loss(c);
        assert_true(c->loss != 0);
    }
    free(c);
}

typedef struct label_case {
    loss_case *c;
    int all; /* ranks that saw the error themselves */
    ft_status status[MAX_T];
    char text[MAX_T][256];
} label_case;

/* Each rank keeps what it saw: the launch reports but the first. */
static ft_status label_rank(ft_ctx *ctx, void *user)
{
    label_case *l = (label_case *)user;
    int r = ft_rank(ctx);
    l->status[r] = loss_rank(ctx, l->c);
    snprintf(l->text[r], sizeof l->text[r], "%.200s", l->status[r] ? ft_last_error() : "");
    return l->status[r];
}

static void test_loss_labels_refused(void **state)
{
    label_case l;
    (void)state;
    memset(&l, 0, sizeof l);
    l.c = loss_case_new();
    for (int k = 0; k < 8; k++) {
        l.c->s = setup_make(k % 2 ? 4 : 2, k / 2 % 2);
        l.c->labels[17] = k / 4 ? -1 : SV; /* 13 would be in the padding of the last of 4 ranks */
        ASSERT_REFUSED(launch(&l.c->s, label_rank, &l), FT_ERR_DATA,
                       "at position 17 of 20 is outside the vocabulary 0..12");
        for (int r = 0; r < l.c->s.t; r++)
            if (l.status[r] != FT_ERR_DATA || !strstr(l.text[r], "position 17"))
                fail_msg("rank %d of %d: %s: %s", r, l.c->s.t, ft_status_name(l.status[r]),
                         l.text[r]);
    }
    free(l.c);
}

/* ------------------------------------------------------------------------------------- mixed */

enum { MB = 1, MT = 8, MN = MB * MT, MC = 8, MF = 16, MV = 11 };

/* bf16 weights whose gradients collect in fp32, twice: sinks are obeyed by every op. */
typedef struct sink { ft_tensor *buffer; int fresh; } sink;

static ft_status sink_get(void *user, ft_tensor *param, ft_tensor **grad, int *accumulate)
{
    sink *s = (sink *)user;
    (void)param;
    *grad = s->buffer;
    *accumulate = !s->fresh;
    s->fresh = 0;
    return FT_OK;
}

typedef struct mixed_case {
    setup s;
    int plain; /* 1: the ops of femtotron.h */
    ft_dtype grads;
    int64_t chunk;
    int32_t tokens[MN], labels[MN];
    float table[MV * MC], w1[MF * MC], b1[MF], w2[MC * MF], head[MV * MC];
    float loss, dtable[MV * MC], dw1[MF * MC], db1[MF], dw2[MC * MF], dhead[MV * MC];
} mixed_case;

static ft_status mixed_param(ft_ctx *ctx, const mixed_case *c, part p, const float *whole,
                             int64_t rows, int64_t cols, int t, int r, sink *s, ft_tensor **out)
{
    int64_t shape[2];
    int ndim = cols == 1 ? 1 : 2;
    shape[0] = part_rows(p, rows, t);
    shape[1] = part_cols(p, cols, t);
    FT_TRY(part_create(ctx, p, whole, rows, cols, t, r, FT_BF16, ndim, shape, out));
    FT_TRY(ft_tensor_create(ctx, &s->buffer, c->grads, ndim, shape, FT_TAG_GRAD));
    FT_TRY(ft_fill(s->buffer, NAN, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    s->fresh = 1;
    (*out)->requires_grad = 1;
    (*out)->sink.get = sink_get;
    (*out)->sink.user = s;
    return FT_OK;
}

static ft_status mixed_forward(ft_ctx *ctx, const mixed_case *c, ft_tp *tp, ft_tensor *tokens,
                               ft_tensor *labels, ft_tensor **p, ft_tensor **loss)
{
    ft_tensor *x, *h, *g, *y;
    if (c->plain) {
        FT_TRY(ft_embedding(ctx, &x, tokens, p[0]));
        FT_TRY(ft_linear(ctx, &h, x, p[1], p[2]));
        FT_TRY(ft_gelu(ctx, &g, h));
        FT_TRY(ft_linear(ctx, &y, g, p[3], NULL));
        FT_TRY(ft_linear_cross_entropy(ctx, loss, y, p[4], labels, NULL, c->chunk));
    } else {
        FT_TRY(ft_tp_embedding(tp, &x, tokens, p[0], MV));
        FT_TRY(ft_tp_column_linear(tp, &h, x, p[1], p[2], MB, MT));
        FT_TRY(ft_gelu(ctx, &g, h));
        FT_TRY(ft_tp_row_linear(tp, &y, g, p[3], NULL));
        FT_TRY(ft_tp_linear_cross_entropy(tp, loss, y, p[4], labels, NULL, c->chunk, MV));
    }
    ft_tensor_free(x);
    ft_tensor_free(h);
    ft_tensor_free(g);
    ft_tensor_free(y);
    return FT_OK;
}

static ft_status mixed_rank(ft_ctx *ctx, void *user)
{
    mixed_case *c = (mixed_case *)user;
    ft_tensor *p[5], *tokens, *labels, *loss;
    sink s[5];
    ft_tape *tape;
    ft_tp *tp = NULL;
    float value;
    if (!c->plain) FT_TRY(tp_begin(ctx, &c->s, &tp));
    int t = tp ? tp->size : 1, r = tp ? tp->rank : 0;
    FT_TRY(create_ints(ctx, c->tokens, MB, MT, &tokens));
    FT_TRY(create_ints(ctx, c->labels, MB, MT, &labels));
    FT_TRY(mixed_param(ctx, c, VOCAB, c->table, MV, MC, t, r, &s[0], &p[0]));
    FT_TRY(mixed_param(ctx, c, ROWS, c->w1, MF, MC, t, r, &s[1], &p[1]));
    FT_TRY(mixed_param(ctx, c, ROWS, c->b1, MF, 1, t, r, &s[2], &p[2]));
    FT_TRY(mixed_param(ctx, c, COLS, c->w2, MC, MF, t, r, &s[3], &p[3]));
    FT_TRY(mixed_param(ctx, c, VOCAB, c->head, MV, MC, t, r, &s[4], &p[4]));
    FT_TRY(ft_tape_create(ctx, &tape));
    for (int pass = 0; pass < 2; pass++) {
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(mixed_forward(ctx, c, tp, tokens, labels, p, &loss));
        FT_TRY(ft_tape_end(tape));
        FT_TRY(ft_backward(tape, loss, NULL));
        FT_TRY(ft_download(loss, &value));
        ft_tensor_free(loss);
    }
    if (c->plain) {
        c->loss = value;
        FT_TRY(read_values(s[0].buffer, c->dtable));
        FT_TRY(read_values(s[1].buffer, c->dw1));
        FT_TRY(read_values(s[2].buffer, c->db1));
        FT_TRY(read_values(s[3].buffer, c->dw2));
        return read_values(s[4].buffer, c->dhead);
    }
    CHECK(fabs((double)(value - c->loss)) <= 0.01 * (double)c->loss);
    FT_TRY(near_part(s[0].buffer, VOCAB, c->dtable, MV, MC, t, r, 0.03, "dtable"));
    FT_TRY(near_part(s[1].buffer, ROWS, c->dw1, MF, MC, t, r, 0.03, "dw1"));
    FT_TRY(near_part(s[2].buffer, ROWS, c->db1, MF, 1, t, r, 0.03, "db1"));
    FT_TRY(near_part(s[3].buffer, COLS, c->dw2, MC, MF, t, r, 0.03, "dw2"));
    return near_part(s[4].buffer, VOCAB, c->dhead, MV, MC, t, r, 0.03, "dhead");
}

/* Activations in bf16 have 8 bits, so values agree to a few of 1/256; what must be exact is that
   the second pass adds and the first does not (buffers begin as NaN). */
static void test_bf16_sinks(void **state)
{
    mixed_case *c = (mixed_case *)calloc(1, sizeof *c);
    setup one = setup_make(1, 0);
    (void)state;
    fill(c->table, MV * MC, 11, 1);
    fill(c->w1, MF * MC, 12, 0.5f);
    fill(c->b1, MF, 13, 0.5f);
    fill(c->w2, MC * MF, 14, 0.5f);
    fill(c->head, MV * MC, 15, 0.5f);
    for (int i = 0; i < MN; i++) {
        c->tokens[i] = i * 3 % MV;
        c->labels[i] = i % 4 == 1 ? -100 : i * 5 % MV;
    }
    for (int k = 0; k < 24; k++) {
        c->s = setup_make(sizes[k % 3], k / 3 % 2);
        c->grads = k / 6 % 2 ? FT_BF16 : FT_F32;
        c->chunk = k / 12 ? 4 : 0;
        c->plain = 1;
        launch_ok(&one, mixed_rank, c, "reference");
        c->plain = 0;
        launch_ok(&c->s, mixed_rank, c, "bf16");
    }
    free(c);
}

/* ------------------------------------------------------------------------------------ training */

enum { TB = 2, TT = 8, TN = TB * TT, TC = 16, TF = 32, TV = 19, STEPS = 4, PARAMS = 7 };

typedef struct param_desc { part cut; int rows, cols, sums; } param_desc; /* sums: [S3] */

static const param_desc train_params[PARAMS] = {
    {VOCAB, TV, TC, 0}, /* embedding */
    {WHOLE, TC, 1, 1},  /* norm */
    {ROWS, TF, TC, 0},  /* column */
    {ROWS, TF, 1, 0},   /* its bias */
    {COLS, TC, TF, 0},  /* row */
    {WHOLE, TC, 1, 1},  /* its bias */
    {VOCAB, TV, TC, 0}  /* head */
};

typedef enum halves { WHOLE_BACKWARD, TWO_HALVES } halves;

typedef struct train_case {
    setup s;
    int plain;
    ft_sac sac;
    halves halves;
    int64_t chunk;
    float lr;
    int steps;
    float start[PARAMS][TV * TF];
    /* Results. */
    float loss[2][STEPS];             /* of the data-parallel replicas */
    float end[2][PARAMS][TV * TF];    /* global weights, put together */
    ft_mem_stats mem[8];
    int64_t sent[8];                  /* by forward and backward of a step */
    double replayed[8];
} train_case;

static ft_status train_forward(ft_ctx *ctx, const train_case *c, ft_tp *tp, ft_tensor *tokens,
                               ft_tensor *labels, ft_tensor **p, ft_tensor **loss)
{
    ft_tensor *x, *n, *h, *g, *d, *y;
    if (c->plain) FT_TRY(ft_embedding(ctx, &x, tokens, p[0]));
    else FT_TRY(ft_tp_embedding(tp, &x, tokens, p[0], TV));
    FT_TRY(ft_segment_begin(ctx, "block", c->sac));
    FT_TRY(ft_rmsnorm(ctx, &n, x, p[1], 1e-5));
    if (c->plain) FT_TRY(ft_linear(ctx, &h, n, p[2], p[3]));
    else FT_TRY(ft_tp_column_linear(tp, &h, n, p[2], p[3], TB, TT));
    ft_tensor_free(n);
    FT_TRY(ft_gelu(ctx, &g, h));
    ft_tensor_free(h);
    if (c->plain) FT_TRY(ft_linear(ctx, &d, g, p[4], p[5]));
    else FT_TRY(ft_tp_row_linear(tp, &d, g, p[4], p[5]));
    ft_tensor_free(g);
    FT_TRY(ft_add(ctx, &y, d, x));
    ft_tensor_free(d);
    ft_tensor_free(x);
    FT_TRY(ft_segment_end(ctx, 1, &y));
    if (c->plain) FT_TRY(ft_linear_cross_entropy(ctx, loss, y, p[6], labels, NULL, c->chunk));
    else FT_TRY(ft_tp_linear_cross_entropy(tp, loss, y, p[6], labels, NULL, c->chunk, TV));
    ft_tensor_free(y);
    return FT_OK;
}

/* w -= lr dw on the host; replicated parameters' partial sums are added up first. */
static ft_status train_update(ft_ctx *ctx, const train_case *c, ft_tp *tp, ft_tensor **p)
{
    float w[MAX_ELEMS], g[MAX_ELEMS];
    for (int i = 0; i < PARAMS; i++) {
        if (tp && tp->sequence_parallel && train_params[i].sums)
            FT_TRY(ft_all_reduce(tp->group, ft_stream_get(ctx, FT_STREAM_COMPUTE), p[i]->grad));
        FT_TRY(ft_download(p[i], w));
        FT_TRY(ft_download(p[i]->grad, g));
        for (int64_t k = 0; k < ft_numel(p[i]); k++) w[k] -= c->lr * g[k];
        FT_TRY(ft_upload(p[i], w));
        ft_tensor_free(p[i]->grad);
        p[i]->grad = NULL;
    }
    return FT_OK;
}

static ft_status train_collect(train_case *c, int replica, const ft_tp *tp, ft_tensor **p)
{
    float w[MAX_ELEMS];
    int t = tp ? tp->size : 1, r = tp ? tp->rank : 0;
    for (int k = 0; k < PARAMS; k++) {
        const param_desc *d = &train_params[k];
        int64_t lr = part_rows(d->cut, d->rows, t), lc = part_cols(d->cut, d->cols, t);
        FT_TRY(ft_download(p[k], w));
        for (int64_t i = 0; i < lr; i++)
            for (int64_t j = 0; j < lc; j++) {
                int64_t e = part_elem(d->cut, d->rows, d->cols, t, r, i, j);
                if (e >= 0 && (d->cut != WHOLE || r == 0)) c->end[replica][k][e] = w[i * lc + j];
            }
    }
    return FT_OK;
}

static ft_status train_backward(const train_case *c, ft_tape *tape, ft_tensor *loss)
{
    if (c->halves == WHOLE_BACKWARD) return ft_backward(tape, loss, NULL);
    FT_TRY(ft_backward_inputs(tape, loss, NULL));
    return ft_backward_weights(tape);
}

static ft_status train_rank(ft_ctx *ctx, void *user)
{
    train_case *c = (train_case *)user;
    ft_tensor *p[PARAMS], *tokens, *labels, *loss;
    int32_t token[TN], label[TN];
    ft_tape *tape;
    ft_flops flops;
    ft_tp *tp = NULL;
    if (!c->plain) FT_TRY(tp_begin(ctx, &c->s, &tp));
    int replica = ft_rank(ctx) / c->s.t;
    for (int i = 0; i < TN; i++) {
        token[i] = (i * 5 + 7 * replica) % TV;
        label[i] = i % 6 == 4 ? -100 : (i * 3 + replica) % TV;
    }
    FT_TRY(create_ints(ctx, token, TB, TT, &tokens));
    FT_TRY(create_ints(ctx, label, TB, TT, &labels));
    for (int i = 0; i < PARAMS; i++) {
        const param_desc *d = &train_params[i];
        if (d->cols == 1) FT_TRY(create1(ctx, d->cut, c->start[i], d->rows, tp, &p[i]));
        else FT_TRY(create2(ctx, d->cut, c->start[i], d->rows, d->cols, tp, &p[i]));
    }
    FT_TRY(ft_tape_create(ctx, &tape));
    for (int step = 0; step < c->steps; step++) {
        float value;
        int64_t before = sent_bytes(ctx);
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(train_forward(ctx, c, tp, tokens, labels, p, &loss));
        FT_TRY(ft_tape_end(tape));
        FT_TRY(train_backward(c, tape, loss));
        c->sent[ft_rank(ctx)] = sent_bytes(ctx) - before;
        FT_TRY(ft_download(loss, &value));
        if (!tp || tp->rank == 0) c->loss[replica][step] = value;
        ft_tensor_free(loss);
        FT_TRY(train_update(ctx, c, tp, p));
    }
    ft_mem_get(ctx, &c->mem[ft_rank(ctx)]);
    CHECK(c->mem[ft_rank(ctx)].live[FT_TAG_COMM] == 0);
    CHECK(c->mem[ft_rank(ctx)].live[FT_TAG_ACT] == 0);
    ft_flops_get(ctx, &flops);
    c->replayed[ft_rank(ctx)] = flops.replay;
    return train_collect(c, replica, tp, p);
}

static train_case *train_case_new(void)
{
    train_case *c = (train_case *)calloc(1, sizeof *c);
    c->steps = STEPS;
    c->lr = 0.5f;
    for (int i = 0; i < PARAMS; i++)
        fill(c->start[i], train_params[i].rows * train_params[i].cols, 20 + i, 0.5f);
    for (int i = 0; i < TC; i++) c->start[1][i] += 1;
    return c;
}

static void compare_training(const train_case *c, const train_case *reference, int replica)
{
    for (int i = 0; i < c->steps; i++)
        assert_true(fabs((double)(c->loss[replica][i] - reference->loss[replica][i])) <=
                    1e-5 * (double)reference->loss[replica][i]);
    for (int k = 0; k < PARAMS; k++)
        for (int e = 0; e < train_params[k].rows * train_params[k].cols; e++)
            assert_true(fabs((double)(c->end[replica][k][e] - reference->end[replica][k][e])) <=
                        1e-5);
}

static void assert_same_training(const train_case *a, const train_case *b)
{
    assert_memory_equal(a->loss, b->loss, sizeof a->loss);
    assert_memory_equal(a->end, b->end, sizeof a->end);
}

/* Embedding, norm, column, gelu, row, residual, head and loss, for a few steps, equal one rank. The
   residual is where the gradient of a column layer's input adds to another. */
static void test_training(void **state)
{
    train_case *one = train_case_new(), *c = train_case_new();
    (void)state;
    one->plain = 1;
    one->s = setup_make(1, 0);
    launch_ok(&one->s, train_rank, one, "reference");
    assert_true((double)one->loss[0][STEPS - 1] < 0.9 * (double)one->loss[0][0]);
    for (int k = 0; k < 12; k++) {
        c->s = setup_make(sizes[k % 3], k / 3 % 2);
        c->chunk = k / 6 ? 6 : 0;
        launch_ok(&c->s, train_rank, c, "training");
        compare_training(c, one, 0);
    }
    free(one);
    free(c);
}

/* dp 2 x tp 2: two independent replicas, on data of their own. */
static void test_mesh(void **state)
{
    train_case *one = train_case_new(), *c = train_case_new();
    (void)state;
    one->plain = 1;
    one->s = setup_make(1, 0);
    one->s.dp = 2;
    launch_ok(&one->s, train_rank, one, "reference");
    for (int sp = 0; sp < 2; sp++) {
        c->s = setup_make(2, sp);
        c->s.dp = 2;
        launch_ok(&c->s, train_rank, c, "mesh");
        compare_training(c, one, 0);
        compare_training(c, one, 1);
    }
    free(one);
    free(c);
}

/* What a step sends: embedding, column, row, head; a recomputed column gathers once more. */
static int64_t train_bytes(const train_case *c)
{
    int64_t q = TN * TC * 4 * (c->s.t - 1) / c->s.t, stats = 12 * TN * (c->s.t - 1);
    int64_t sum = c->s.sp ? 2 * q + 3 * q + 2 * q + 2 * q : 2 * q + 2 * q + 2 * q + 2 * q;
    if (c->sac.kind == FT_SAC_FULL && c->s.sp) sum += q;
    if (c->halves == TWO_HALVES && c->s.sp) sum += q;
    return sum + stats;
}

/* Recomputation on or off, backward whole or in halves: the same bits, and the traffic of COSTS. */
static void test_recompute(void **state)
{
    static const ft_sac_kind kinds[] = {FT_SAC_NONE, FT_SAC_SELECTIVE, FT_SAC_FULL};
    train_case *first = train_case_new(), *c = train_case_new();
    (void)state;
    for (int k = 0; k < 6; k++) {
        first->s = c->s = setup_make(sizes[k % 3], k / 3);
        first->chunk = c->chunk = 6;
        launch_ok(&first->s, train_rank, first, "no recomputation");
        for (int r = 0; r < c->s.t; r++) assert_int_equal(first->sent[r], train_bytes(first));
        for (int s = 0; s < 6; s++) {
            c->sac.kind = kinds[s % 3];
            c->halves = s < 3 ? WHOLE_BACKWARD : TWO_HALVES;
            launch_ok(&c->s, train_rank, c, "recomputation");
            assert_same_training(c, first);
            for (int r = 0; r < c->s.t; r++) {
                assert_int_equal(c->sent[r], train_bytes(c));
                if (c->sac.kind == FT_SAC_FULL) assert_true(c->replayed[r] > 0);
            }
        }
    }
    free(first);
    free(c);
}

/* Streams as threads, random delays: the same bits. */
static void test_async(void **state)
{
    train_case *first = train_case_new(), *c = train_case_new();
    (void)state;
    for (int k = 0; k < 4; k++) {
        first->s = setup_make(k % 2 ? 4 : 2, k / 2);
        first->s.async = FT_OFF;
        first->chunk = c->chunk = 6;
        c->sac.kind = FT_SAC_FULL;
        launch_ok(&first->s, train_rank, first, "at once");
        c->s = first->s;
        c->s.async = FT_ON;
        c->s.delay_us = 100;
        launch_ok(&c->s, train_rank, c, "async");
        assert_same_training(c, first);
    }
    free(first);
    free(c);
}

/* The plan on meta is the run, to the byte and by tag, for every rank; and traffic too. */
static void test_plan(void **state)
{
    static const ft_sac_kind kinds[] = {FT_SAC_NONE, FT_SAC_SELECTIVE, FT_SAC_FULL};
    train_case *run = train_case_new(), *plan = train_case_new();
    (void)state;
    run->steps = plan->steps = 2;
    for (int k = 0; k < 36; k++) {
        run->s = plan->s = setup_make(sizes[k % 3], k / 3 % 2);
        run->sac.kind = plan->sac.kind = kinds[k / 6 % 3];
        run->chunk = plan->chunk = k / 18 ? 6 : 0;
        plan->s.device = FT_META;
        launch_ok(&run->s, train_rank, run, "run");
        launch_ok(&plan->s, train_rank, plan, "plan");
        for (int r = 0; r < run->s.t; r++) {
            assert_int_equal(run->mem[r].peak_bytes, plan->mem[r].peak_bytes);
            assert_int_equal(run->mem[r].live_bytes, plan->mem[r].live_bytes);
            assert_memory_equal(run->mem[r].at_peak, plan->mem[r].at_peak,
                                sizeof run->mem[r].at_peak);
            assert_memory_equal(run->mem[r].highest, plan->mem[r].highest,
                                sizeof run->mem[r].highest);
            assert_int_equal(run->sent[r], plan->sent[r]);
        }
    }
    free(run);
    free(plan);
}

/* -------------------------------------------------------------------------------------- memory */

/* Sizes at which nothing is hidden by rounding to 256 bytes. */
enum { GB = 2, GT = 64, GN = GB * GT, GC = 64, GF = 256, GV = 130, GCHUNK = 32 };

static ft_status zeros(ft_ctx *ctx, int64_t a, int64_t b, int64_t c, ft_tensor **out)
{
    int64_t shape[3];
    shape[0] = a;
    shape[1] = b;
    shape[2] = c;
    FT_TRY(ft_tensor_create(ctx, out, FT_F32, c ? 3 : 2, shape, FT_TAG_OTHER));
    return ft_fill(*out, 0, ft_stream_get(ctx, FT_STREAM_COMPUTE));
}

static size_t fp32_bytes(int64_t elems) { return ft_accounted_bytes((size_t)elems * 4); }

/* Since ft_mem_reset_peak, which must have found no live bytes of this tag. */
static size_t highest(const ft_ctx *ctx, ft_tag tag)
{
    ft_mem_stats stats;
    ft_mem_get(ctx, &stats);
    return stats.highest[tag];
}

static size_t live(const ft_ctx *ctx, ft_tag tag)
{
    ft_mem_stats stats;
    ft_mem_get(ctx, &stats);
    return stats.live[tag];
}

/* Ops that record nothing: the temporaries of COSTS, and nothing else of these tags. */
static ft_status memory_temporaries(ft_ctx *ctx, ft_tp *tp, ft_tensor *x, ft_tensor *w1,
                                    ft_tensor *w2, ft_tensor *head, ft_tensor *labels)
{
    ft_tensor *h, *y, *loss;
    int cut = tp->sequence_parallel && tp->size > 1;
    int64_t t = tp->size, each = (GV + t - 1) / t;
    int64_t rows = each < GV - each * tp->rank ? each : GV - each * tp->rank;
    ft_mem_reset_peak(ctx);
    FT_TRY(ft_tp_column_linear(tp, &h, x, w1, NULL, GB, GT));
    CHECK(highest(ctx, FT_TAG_COMM) == (cut ? fp32_bytes(GN * GC) : 0));
    CHECK(highest(ctx, FT_TAG_ACT) == fp32_bytes(GN * GF / t));
    FT_TRY(ft_tp_row_linear(tp, &y, h, w2, NULL));
    CHECK(highest(ctx, FT_TAG_COMM) == (cut ? fp32_bytes(GN * GC) : 0));
    ft_tensor_free(h);
    ft_tensor_free(y);
    CHECK(live(ctx, FT_TAG_COMM) == 0 && live(ctx, FT_TAG_ACT) == 0);
    ft_mem_reset_peak(ctx);
    FT_TRY(ft_tp_linear_cross_entropy(tp, &loss, x, head, labels, NULL, GCHUNK, GV));
    CHECK(highest(ctx, FT_TAG_COMM) ==
          fp32_bytes(3 * GCHUNK * t) + (cut ? fp32_bytes(GCHUNK * GC) : 0));
    CHECK(highest(ctx, FT_TAG_ACT) == fp32_bytes(GCHUNK * rows) + 2 * FT_ALIGN_BYTES);
    ft_tensor_free(loss);
    return FT_OK;
}

/* On a tape: [S1] the shard of x stays, not what was gathered; and backward of a column layer needs
   one whole activation at a time, for the gathered x or for dx. */
static ft_status memory_saved(ft_ctx *ctx, ft_tp *tp, ft_tensor *x, ft_tensor *w1)
{
    ft_tensor *v, *h, *dh;
    ft_tape *tape;
    int cut = tp->sequence_parallel && tp->size > 1;
    x->requires_grad = w1->requires_grad = 1;
    FT_TRY(zeros(ctx, GB, GT, GF / tp->size, &dh));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_scale(ctx, &v, x, 2));
    FT_TRY(ft_tp_column_linear(tp, &h, v, w1, NULL, GB, GT));
    ft_tensor_free(v);
    FT_TRY(ft_tape_end(tape));
    CHECK(live(ctx, FT_TAG_ACT) == fp32_bytes(ft_numel(x)) + fp32_bytes(ft_numel(dh)));
    CHECK(live(ctx, FT_TAG_COMM) == 0);
    ft_mem_reset_peak(ctx);
    FT_TRY(ft_backward(tape, h, dh));
    CHECK(highest(ctx, FT_TAG_COMM) == (cut ? fp32_bytes(GN * GC) : 0));
    CHECK(live(ctx, FT_TAG_COMM) == 0);
    return FT_OK;
}

static ft_status memory_rank(ft_ctx *ctx, void *user)
{
    const setup *s = (const setup *)user;
    ft_tensor *x, *w1, *w2, *head, *labels;
    int32_t values[GN];
    ft_tp *tp;
    FT_TRY(tp_begin(ctx, s, &tp));
    int64_t t = tp->size;
    for (int i = 0; i < GN; i++) values[i] = i % GV;
    if (s->sp) FT_TRY(zeros(ctx, GN / t, GC, 0, &x));
    else FT_TRY(zeros(ctx, GB, GT, GC, &x));
    FT_TRY(zeros(ctx, GF / t, GC, 0, &w1));
    FT_TRY(zeros(ctx, GC, GF / t, 0, &w2));
    FT_TRY(zeros(ctx, (GV + t - 1) / t, GC, 0, &head));
    FT_TRY(create_ints(ctx, values, GB, GT, &labels));
    FT_TRY(memory_temporaries(ctx, tp, x, w1, w2, head, labels));
    return memory_saved(ctx, tp, x, w1);
}

static void test_memory(void **state)
{
    (void)state;
    for (int k = 0; k < 12; k++) {
        setup s = setup_make(sizes[k % 3], k / 3 % 2);
        s.device = k / 6 ? FT_META : FT_CPU;
        launch_ok(&s, memory_rank, &s, "memory");
    }
}

/* -------------------------------------------------------------------------------------- slices */

static void check_slice(ft_tp_cut cut, int qkv, int t, int64_t rows, int64_t cols)
{
    float *whole = (float *)malloc((size_t)(rows * cols) * sizeof *whole);
    float *back = (float *)calloc((size_t)(rows * cols), sizeof *back);
    int *owners = (int *)calloc((size_t)(rows * cols), sizeof *owners);
    for (int64_t i = 0; i < rows * cols; i++) whole[i] = (float)(i + 1);
    for (int r = 0; r < t; r++) {
        ft_tp_slice s;
        if (qkv) assert_int_equal(ft_tp_slice_qkv(t, r, 4, 4, rows / 12, cols, &s), FT_OK);
        else assert_int_equal(ft_tp_slice_make(cut, t, r, "weight", rows, cols, &s), FT_OK);
        int64_t local = s.local_rows * s.local_cols, padding = 0;
        float *own = (float *)malloc((size_t)local * sizeof *own);
        ft_tp_slice_cut(&s, sizeof *own, whole, own);
        for (int64_t e = 0; e < local; e++) {
            int64_t g = ft_tp_global_elem(&s, e);
            padding += g < 0;
            assert_true(own[e] == (g < 0 ? 0.0f : whole[g]));
            if (g < 0) continue;
            owners[g]++;
            assert_int_equal(ft_tp_local_elem(&s, g), e);
            assert_int_equal(ft_tp_global_row(&s, e / s.local_cols), g / cols);
            assert_int_equal(ft_tp_local_row(&s, g / cols), e / s.local_cols);
        }
        assert_true(padding == 0 || cut == FT_TP_VOCAB);
        assert_int_equal(ft_tp_global_elem(&s, local), -1);
        assert_int_equal(ft_tp_local_elem(&s, rows * cols), -1);
        assert_int_equal(ft_tp_global_row(&s, -1), -1);
        assert_int_equal(ft_tp_local_row(&s, -1), -1);
        ft_tp_slice_paste(&s, sizeof *own, own, back);
        free(own);
    }
    for (int64_t i = 0; i < rows * cols; i++)
        assert_int_equal(owners[i], !qkv && cut == FT_TP_WHOLE ? t : 1);
    assert_memory_equal(whole, back, (size_t)(rows * cols) * sizeof *whole);
    free(whole);
    free(back);
    free(owners);
}

/* Every element is on one rank (on all, if it is not cut), maps there and back, and the parts make
   the whole again. */
static void test_slices(void **state)
{
    (void)state;
    for (int k = 0; k < 3; k++) {
        int t = sizes[k];
        check_slice(FT_TP_WHOLE, 0, t, 5, 3);
        check_slice(FT_TP_ROWS, 0, t, 8, 3);
        check_slice(FT_TP_ROWS, 0, t, 8, 1);
        check_slice(FT_TP_COLUMNS, 0, t, 3, 8);
        check_slice(FT_TP_GATE_UP, 0, t, 16, 3);
        check_slice(FT_TP_WHOLE, 1, t, 24, 3);
        for (int64_t v = 1; v < 10; v++) check_slice(FT_TP_VOCAB, 0, t, v, 3);
    }
}

enum { QB = 2, QT = 5, QH = 4, QK = 2, QD = 4, QF = 12 };

/* Columns of the activation [B*T, whole] that the slice's rows of the weight make. */
static ft_status packed_columns(ft_ctx *ctx, const float *whole, const ft_tp_slice *s,
                                ft_tensor **out)
{
    float values[MAX_ELEMS];
    int64_t shape[3];
    for (int64_t i = 0; i < QB * QT; i++)
        for (int64_t j = 0; j < s->local_rows; j++)
            values[i * s->local_rows + j] = whole[i * s->rows + ft_tp_global_row(s, j)];
    shape[0] = QB;
    shape[1] = QT;
    shape[2] = s->local_rows;
    FT_TRY(ft_tensor_create(ctx, out, FT_F32, 3, shape, FT_TAG_OTHER));
    return ft_upload(*out, values);
}

static ft_status packed_same(const float *whole, int64_t cols, int64_t first, ft_tensor *own)
{
    float got[MAX_ELEMS];
    int64_t width = own->shape[2];
    FT_TRY(ft_download(own, got));
    for (int64_t i = 0; i < QB * QT; i++)
        CHECK(!memcmp(whole + i * cols + first, got + i * width, (size_t)width * 4));
    return FT_OK;
}

/* The slice of packed weights is the packed weight of a smaller model: attention over H/t and K/t
   heads, SwiGLU over F/t, make the columns of the whole that a row layer's slice reads. */
static ft_status packed_rank(ft_ctx *ctx, void *user)
{
    int t = *(const int *)user;
    float qkv[QB * QT * (QH + 2 * QK) * QD], gu[QB * QT * 2 * QF];
    float o[QB * QT * QH * QD], act[QB * QT * QF];
    ft_tensor *in, *out;
    ft_tp_slice s;
    fill(qkv, QB * QT * (QH + 2 * QK) * QD, 31, 2);
    fill(gu, QB * QT * 2 * QF, 32, 2);
    for (int r = -1; r < t; r++) { /* -1: the whole */
        int n = r < 0 ? 1 : t, at = r < 0 ? 0 : r;
        FT_TRY(ft_tp_slice_qkv(n, at, QH, QK, QD, 3, &s));
        CHECK(s.local_rows == (QH + 2 * QK) / n * QD);
        FT_TRY(packed_columns(ctx, qkv, &s, &in));
        FT_TRY(ft_attention(ctx, &out, in, QH / n, QK / n, QD));
        if (r < 0) FT_TRY(ft_download(out, o));
        FT_TRY(packed_same(o, QH * QD, at * QH / n * QD, out));
        FT_TRY(ft_tp_slice_make(FT_TP_GATE_UP, n, at, "gate_up", 2 * QF, 3, &s));
        FT_TRY(packed_columns(ctx, gu, &s, &in));
        FT_TRY(ft_swiglu(ctx, &out, in));
        if (r < 0) FT_TRY(ft_download(out, act));
        FT_TRY(packed_same(act, QF, at * QF / n, out));
    }
    return FT_OK;
}

static void test_packed(void **state)
{
    setup one = setup_make(1, 0);
    int t = 2;
    ft_tp_slice s;
    (void)state;
    launch_ok(&one, packed_rank, &t, "packed");
    /* By hand: 4 query heads and 2 kv heads of 2 rows; rank 1 of 2. */
    static const int64_t rows[] = {4, 5, 6, 7, 10, 11, 14, 15};
    assert_int_equal(ft_tp_slice_qkv(2, 1, 4, 2, 2, 1, &s), FT_OK);
    assert_int_equal(s.local_rows, 8);
    for (int i = 0; i < 8; i++) assert_int_equal(ft_tp_global_row(&s, i), rows[i]);
}

/* -------------------------------------------------------------------------------------- errors */

static void test_sizes_refused(void **state)
{
    ft_tp_slice s;
    (void)state;
    assert_int_equal(ft_tp_check(4, 1, 8, 4, 32, 3, 8), FT_OK);
    assert_int_equal(ft_tp_check(4, 0, 8, 4, 32, 3, 5), FT_OK);
    assert_int_equal(ft_tp_check(3, 1, 0, 0, 0, 0, 0), FT_OK);
    assert_int_equal(ft_tp_check(4, 1, 8, 4, 32, 2, 6), FT_OK);
    ASSERT_REFUSED(ft_tp_check(4, 0, 6, 2, 32, 1, 8), FT_ERR_UNSUPPORTED,
                   "heads 6 cannot be cut in equal parts by tp 4; nearest that work: 4 or 8; "
                   "nearest tp: 3 or 6");
    ASSERT_REFUSED(ft_tp_check(4, 0, 8, 2, 32, 1, 8), FT_ERR_UNSUPPORTED,
                   "kv_heads 2 cannot be cut in equal parts by tp 4; nearest that work: 4; "
                   "nearest tp: 2");
    ASSERT_REFUSED(ft_tp_check(4, 0, 8, 4, 30, 1, 8), FT_ERR_UNSUPPORTED,
                   "intermediate 30 cannot be cut in equal parts by tp 4; nearest that work: 28 or "
                   "32; nearest tp: 3 or 5");
    ASSERT_REFUSED(ft_tp_check(4, 1, 8, 4, 32, 3, 5), FT_ERR_UNSUPPORTED,
                   "B 3 x T 5 = 15 tokens in equal parts by tp 4; nearest T: 4 or 8; nearest tp: 3 "
                   "or 5");
    ASSERT_REFUSED(ft_tp_check(4, 1, 8, 4, 32, 2, 5), FT_ERR_UNSUPPORTED, "nearest T: 4 or 6");
    ASSERT_REFUSED(ft_tp_check(0, 0, 8, 4, 32, 1, 8), FT_ERR_ARG, "0 ranks");
    ASSERT_REFUSED(ft_tp_check(2, 0, -8, 4, 32, 1, 8), FT_ERR_ARG, "heads is -8");
    ASSERT_REFUSED(ft_tp_slice_qkv(4, 0, 4, 2, 8, 16, &s), FT_ERR_UNSUPPORTED, "kv_heads 2");
    ASSERT_REFUSED(ft_tp_slice_qkv(2, 0, 4, 3, 8, 16, &s), FT_ERR_ARG, "3 kv heads");
    ASSERT_REFUSED(ft_tp_slice_make(FT_TP_ROWS, 4, 0, "w1", 6, 8, &s), FT_ERR_UNSUPPORTED,
                   "rows of w1 6");
    ASSERT_REFUSED(ft_tp_slice_make(FT_TP_COLUMNS, 4, 0, "w2", 8, 6, &s), FT_ERR_UNSUPPORTED,
                   "columns of w2 6");
    ASSERT_REFUSED(ft_tp_slice_make(FT_TP_GATE_UP, 4, 0, "gu", 12, 8, &s), FT_ERR_UNSUPPORTED,
                   "intermediate (half of the rows of gu) 6");
    ASSERT_REFUSED(ft_tp_slice_make(FT_TP_GATE_UP, 4, 0, "gu", 13, 8, &s), FT_ERR_ARG, "13 rows");
    ASSERT_REFUSED(ft_tp_slice_make(FT_TP_ROWS, 4, 4, "w1", 8, 8, &s), FT_ERR_ARG, "rank 4 of 4");
    ASSERT_REFUSED(ft_tp_slice_make(FT_TP_ROWS, 4, 0, "w1", 0, 8, &s), FT_ERR_ARG, "0 x 8");
    ASSERT_REFUSED(ft_tp_slice_make((ft_tp_cut)9, 4, 0, "w1", 8, 8, &s), FT_ERR_ARG, "cut 9");
}

static ft_status refused_rank(ft_ctx *ctx, void *user)
{
    const setup *s = (const setup *)user;
    ft_tensor *x, *w, *narrow, *out, *tokens, *labels;
    ft_tp *tp;
    int32_t values[6] = {0};
    float numbers[64] = {0};
    FT_TRY(tp_begin(ctx, s, &tp));
    REFUSED(ft_tp_create(ctx, NULL, 0, &tp), FT_ERR_ARG, "mesh");
    FT_TRY(tp_begin(ctx, s, &tp));
    FT_TRY(create_tokens(ctx, numbers, 2, 3, 4, tp, &x));
    FT_TRY(create2(ctx, WHOLE, numbers, 5, 4, NULL, &w));
    FT_TRY(create2(ctx, WHOLE, numbers, 5, 3, NULL, &narrow));
    FT_TRY(create_ints(ctx, values, 2, 3, &tokens));
    FT_TRY(create_ints(ctx, values, 1, 5, &labels));
    REFUSED(ft_tp_column_linear(tp, &out, x, narrow, NULL, 2, 3), FT_ERR_SHAPE, "[5,3] fp32");
    REFUSED(ft_tp_column_linear(tp, &out, x, w, x, 2, 3), FT_ERR_SHAPE, "b [O/tp]");
    REFUSED(ft_tp_column_linear(tp, &out, x, w, NULL, 2, 4), FT_ERR_SHAPE, s->sp ? "[B*T/tp,I]"
                                                                                 : "[B,T,I]");
    REFUSED(ft_tp_row_linear(tp, &out, x, narrow, NULL), FT_ERR_SHAPE, "x [B,T,I/tp]");
    REFUSED(ft_tp_enter(tp, &out, x, 2, 4), FT_ERR_SHAPE, "tp_enter over tp 2");
    REFUSED(ft_tp_leave(tp, &out, tokens), FT_ERR_SHAPE, "tp_leave over tp 2");
    REFUSED(ft_tp_embedding(tp, &out, tokens, w, 11), FT_ERR_SHAPE,
            "a vocabulary of 11 is 6 rows a rank");
    REFUSED(ft_tp_embedding(tp, &out, x, w, 10), FT_ERR_SHAPE, "int32 tokens");
    REFUSED(ft_tp_linear_cross_entropy(tp, &out, x, w, tokens, NULL, 0, 8), FT_ERR_SHAPE,
            "a vocabulary of 8 is 4 rows a rank");
    REFUSED(ft_tp_linear_cross_entropy(tp, &out, x, w, tokens, NULL, -1, 10), FT_ERR_ARG,
            "chunk_tokens -1");
    REFUSED(ft_tp_linear_cross_entropy(tp, &out, x, w, tokens, x, 0, 10), FT_ERR_SHAPE, "scale");
    if (!s->sp) {
        REFUSED(ft_tp_linear_cross_entropy(tp, &out, x, w, labels, NULL, 0, 10), FT_ERR_SHAPE,
                "labels [B,T]");
        return FT_OK;
    }
    REFUSED(ft_tp_column_linear(tp, &out, x, w, NULL, 1, 5), FT_ERR_UNSUPPORTED, "B 1 x T 5");
    REFUSED(ft_tp_embedding(tp, &out, labels, w, 10), FT_ERR_UNSUPPORTED, "nearest T: 4 or 6");
    REFUSED(ft_tp_linear_cross_entropy(tp, &out, x, w, labels, NULL, 0, 10), FT_ERR_UNSUPPORTED,
            "by tp 2");
    return FT_OK;
}

static ft_status differ_rank(ft_ctx *ctx, void *user)
{
    setup s = *(const setup *)user;
    ft_tp *tp;
    s.sp = ft_rank(ctx) == 1;
    return tp_begin(ctx, &s, &tp);
}

static void test_ops_refused(void **state)
{
    (void)state;
    for (int sp = 0; sp < 2; sp++) {
        setup s = setup_make(2, sp);
        launch_ok(&s, refused_rank, &s, "refused");
        s.device = FT_META;
        launch_ok(&s, refused_rank, &s, "refused");
    }
    setup s = setup_make(2, 0);
    ASSERT_REFUSED(launch(&s, differ_rank, &s), FT_ERR_COMM, "sequence_parallel");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_column),
        cmocka_unit_test(test_row),
        cmocka_unit_test(test_operators_alone),
        cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_loss_vocabulary),
        cmocka_unit_test(test_loss_large_logits),
        cmocka_unit_test(test_loss_ignored),
        cmocka_unit_test(test_loss_labels_refused),
        cmocka_unit_test(test_bf16_sinks),
        cmocka_unit_test(test_training),
        cmocka_unit_test(test_mesh),
        cmocka_unit_test(test_recompute),
        cmocka_unit_test(test_async),
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_sizes_refused),
        cmocka_unit_test(test_ops_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
