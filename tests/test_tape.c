/* The tape: gradients, the life of every buffer, recomputation, and what is refused.

   cc -std=c11 -I. tests/test_tape.c -lcmocka -lm -lpthread

   Two references, both written here. Gradients: the rules of calculus on doubles. Bytes and
   replays: `model`, a second bookkeeping made from the manual's sentences alone. It counts no
   references and follows no events: what is alive is concluded from the state of the whole graph,
   afresh for each comparison.

   Most graphs are made of ops that this file registers itself, one for each thing that a row can
   say (in place, deferred, composite, two outputs, shared gradient, cheap replay, ...). They count
   their runs. Ranks are threads and cmocka's assertions are for the main thread: a rank reports
   what does not hold as an error, and the main thread asserts that the launch succeeded. */

#ifndef FT_TEST_LINKED /* make compiles the implementation once for many tests */
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"
#include "check.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* ------------------------------------------------------------------------------------- helpers */

static void run_with(const ft_config *config, ft_rank_fn fn, void *user)
{
    ft_status status = ft_launch(config, fn, user);
    if (status != FT_OK)
        fail_msg("on %s: %s: %s", config->device == FT_META ? "meta" : "cpu",
                 ft_status_name(status), ft_last_error());
}

static void run_on(ft_device device, ft_rank_fn fn, void *user)
{
    ft_config config = ft_config_default();
    config.device = device;
    run_with(&config, fn, user);
}

#define N 70      /* elements of the small tensors: 280 bytes ... */
#define BUF 512   /* ... which count as two times 256 */

static size_t live(const ft_ctx *ctx)
{
    ft_mem_stats s;
    ft_mem_get(ctx, &s);
    return s.live_bytes;
}

static int on_cpu(const ft_ctx *ctx) { return ft_ctx_device(ctx) == FT_CPU; }

static uint64_t random_state;

static uint64_t random_next(void) /* xorshift64* (Vigna 2016) */
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * UINT64_C(2685821657736338717);
}

static int random_below(int n) { return (int)(random_next() >> 33) % n; }

static float leaf_value(int leaf, int i) /* in [-1, 1], without a zero */
{
    return (float)(sin(1.7 * leaf + 0.9 * i) * 0.9 + (i % 2 ? 0.05 : -0.05));
}

static ft_status leaf_create(ft_ctx *ctx, int leaf, int requires_grad, ft_tag tag,
                             ft_tensor **out)
{
    float values[N];
    int64_t n = N;
    for (int i = 0; i < N; i++) values[i] = leaf_value(leaf, i);
    FT_TRY(ft_tensor_create(ctx, out, FT_F32, 1, &n, tag));
    (*out)->requires_grad = requires_grad;
    return ft_upload(*out, values);
}

/* Compares a tensor of N elements with doubles; passes on meta. */
static ft_status same_values(const ft_tensor *t, const double *want)
{
    float got[N];
    double most = 1;
    if (!on_cpu(t->ctx)) return FT_OK;
    FT_TRY(ft_download(t, got));
    for (int i = 0; i < N; i++) most = fmax(most, fabs(want[i]));
    for (int i = 0; i < N; i++)
        if (!(fabs((double)got[i] - want[i]) <= 1e-5 * most))
            return ft_error(FT_ERR_DATA, "element %d is %.9g, not %.9g", i, (double)got[i],
                            want[i]);
    return FT_OK;
}

/* ------------------------------------------------------------------------------------ own ops */

typedef enum kind {
    SQUARE,  /* x^2/2. Saves x; adds to its gradient; cheap */
    MUL,     /* a b. Saves both; does not add: the tape does, through a temporary */
    AVERAGE, /* (a + b)/2. Saves nothing; adds; may write over dout */
    SHIFT,   /* x + 1/4. The gradient passes through */
    ADD,     /* a + b. Both gradients pass through */
    SPLIT,   /* (x^2/2, -x). Two outputs; saves x; adds */
    PAIR,    /* s = (a + b)/2, s^2/2. Saves s; equal gradients; replays the second from the first */
    RELU,    /* max(x, 0). Saves its output */
    SCALE,   /* -3/4 x. In place; may write over dout */
    EAT,     /* x^2/2. Saves x and writes the gradient over it */
    LATE,    /* x^2/2. Deferred; saves x and may write over it */
    CUBE,    /* x^3/2. Composite: queues SQUARE and MUL itself; saves x */
    WEIGH,   /* a b. Saves both; parameters' gradients may be put off */
    KINDS
} kind;

typedef struct counts { int forward[64], backward[64], replay[64]; } counts;

static ft_op rows[KINDS];

static float *floats(const ft_view *v) { return (float *)v->data; }

static void give(const ft_op_call *call, int input, int64_t i, float value)
{
    float *to = floats(&call->din[input]);
    if (!call->din[input].present) return;
    if (call->accumulate[input]) to[i] += value;
    else to[i] = value;
}

static kind kind_of(const ft_op_call *call) { return (kind)(call->op - rows); }

static int *count_of(const ft_op_call *call, int which)
{
    static int unused[3];
    counts *c = (counts *)(uintptr_t)call->attr.user;
    if (!c) return &unused[which];
    return which == 0 ? &c->forward[call->attr.i[0]] :
           which == 1 ? &c->backward[call->attr.i[0]] : &c->replay[call->attr.i[0]];
}

static ft_status own_infer(ft_op_call *call)
{
    for (int i = 0; i < call->op->n_in; i++)
        if (call->in[i].dtype != FT_F32 || call->in[i].ndim != 1 ||
            call->in[i].shape[0] != call->in[0].shape[0])
            return ft_error(FT_ERR_SHAPE, "%s: fp32 vectors of one length", call->op->name);
    for (int i = 0; i < call->op->n_out; i++) {
        call->out[i].present = 1;
        call->out[i].dtype = FT_F32;
        call->out[i].ndim = 1;
        call->out[i].shape[0] = call->in[0].shape[0];
    }
    return FT_OK;
}

static double kind_flops(kind k) { return 100.0 + (1 << k); } /* any sum tells its terms */

static void own_cost(const ft_op_call *call, double *flops, double *bytes)
{
    *flops = kind_flops(kind_of(call));
    *bytes = 10;
}

static ft_status own_forward(const ft_op_call *call)
{
    float *x = floats(&call->in[0]), *b = floats(&call->in[1]);
    float *y = floats(&call->out[0]), *z = floats(&call->out[1]);
    if (call->attr.i[1] == 0) (*count_of(call, 0))++; /* 1: part of a composite */
    for (int64_t i = 0; i < call->in[0].shape[0]; i++)
        switch (kind_of(call)) {
        case SQUARE: case EAT: case LATE: y[i] = x[i] * x[i] * 0.5f; break;
        case MUL: case WEIGH: y[i] = x[i] * b[i]; break;
        case AVERAGE: y[i] = (x[i] + b[i]) * 0.5f; break;
        case SHIFT: y[i] = x[i] + 0.25f; break;
        case ADD: y[i] = x[i] + b[i]; break;
        case SPLIT: { float t = x[i]; y[i] = t * t * 0.5f; z[i] = -t; break; }
        case PAIR: y[i] = (x[i] + b[i]) * 0.5f; z[i] = y[i] * y[i] * 0.5f; break;
        case RELU: y[i] = x[i] > 0 ? x[i] : 0; break;
        case SCALE: y[i] = -0.75f * x[i]; break;
        default: return ft_error(FT_ERR_ARG, "no such kernel");
        }
    return FT_OK;
}

static ft_status own_replay(const ft_op_call *call) /* of PAIR: from its first output alone */
{
    float *y = floats(&call->out[0]), *z = floats(&call->out[1]);
    (*count_of(call, 2))++;
    for (int64_t i = 0; i < call->out[0].shape[0]; i++) z[i] = y[i] * y[i] * 0.5f;
    return FT_OK;
}

static ft_status own_backward(const ft_op_call *call)
{
    const float *x = floats(&call->in[0]), *b = floats(&call->in[1]), *y = floats(&call->out[0]);
    const float *dy = floats(&call->dout[0]), *dz = floats(&call->dout[1]);
    int has_y = call->dout[0].present, has_z = call->dout[1].present;
    (*count_of(call, 1))++;
    for (int64_t i = 0; i < call->in[0].shape[0]; i++) {
        float g = has_y ? dy[i] : 0, h = has_z ? dz[i] : 0;
        switch (kind_of(call)) {
        case LATE:
            if (call->deferred) floats(&call->out[0])[i] = x[i] * x[i] * 0.5f;
            give(call, 0, i, g * x[i]);
            break;
        case SQUARE: case EAT: give(call, 0, i, g * x[i]); break;
        case MUL:
            if (call->accumulate[0] || call->accumulate[1])
                return ft_error(FT_ERR_STATE, "asked to add, which the row does not offer");
            if (call->din[0].present) give(call, 0, i, g * b[i]);
            if (call->din[1].present) give(call, 1, i, g * x[i]);
            break;
        case WEIGH:
            if (call->din[0].present) give(call, 0, i, g * b[i]);
            if (call->din[1].present) give(call, 1, i, g * x[i]);
            break;
        case AVERAGE: give(call, 1, i, g * 0.5f); give(call, 0, i, g * 0.5f); break;
        case SPLIT: give(call, 0, i, g * x[i] - h); break;
        case PAIR: give(call, 0, i, (g + h * y[i]) * 0.5f); break;
        case RELU: give(call, 0, i, y[i] > 0 ? g : 0); break;
        case SCALE: give(call, 0, i, -0.75f * g); break;
        default: return ft_error(FT_ERR_ARG, "no such kernel");
        }
    }
    return FT_OK;
}

/* The plain kernels, unrecorded, into tensors that exist. */
static ft_status queue(ft_ctx *ctx, kind k, ft_tensor *a, ft_tensor *b, ft_tensor *y)
{
    ft_tensor *in[2];
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.i[1] = 1;
    in[0] = a;
    in[1] = b;
    return ft_op_run(ft_stream_get(ctx, FT_STREAM_COMPUTE), &rows[k], in, &y, &attr);
}

static ft_status cube_forward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in, ft_tensor **out)
{
    ft_tensor *half;
    (*count_of(call, 0))++;
    FT_TRY(ft_tensor_create(ctx, &half, FT_F32, 1, in[0]->shape, FT_TAG_ACT));
    FT_TRY(queue(ctx, SQUARE, in[0], NULL, half));
    FT_TRY(queue(ctx, MUL, half, in[0], out[0]));
    ft_tensor_free(half);
    return FT_OK;
}

static ft_status cube_backward(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in, ft_tensor **out,
                               ft_tensor **dout, ft_tensor **din) /* dx = dy (x^2/2) 3 */
{
    ft_tensor *half, *three;
    (void)out;
    (*count_of(call, 1))++;
    FT_TRY(ft_tensor_create(ctx, &half, FT_F32, 1, in[0]->shape, FT_TAG_ACT));
    FT_TRY(ft_tensor_create(ctx, &three, FT_F32, 1, in[0]->shape, FT_TAG_ACT));
    FT_TRY(ft_fill(three, 3, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(queue(ctx, SQUARE, in[0], NULL, half));
    FT_TRY(queue(ctx, MUL, half, three, half));
    FT_TRY(queue(ctx, MUL, half, dout[0], din[0]));
    ft_tensor_free(three);
    ft_tensor_free(half);
    return FT_OK;
}

static ft_op row_make(const char *name, int n_in, int n_out)
{
    ft_op row = ft_op_default();
    row.name = name;
    row.n_in = n_in;
    row.n_out = n_out;
    row.grads = FT_IN(n_in) - 1;
    row.accumulates = row.grads;
    row.infer = own_infer;
    row.cost = own_cost;
    row.forward = own_forward;
    row.backward = own_backward;
    return row;
}

static int rows_make(void **state)
{
    (void)state;
    rows[SQUARE] = row_make("own square", 1, 1);
    rows[SQUARE].saves[0] = FT_IN(0);
    rows[SQUARE].cheap = FT_OUT(0);
    rows[MUL] = row_make("own mul", 2, 1);
    rows[MUL].saves[0] = FT_IN(1);
    rows[MUL].saves[1] = FT_IN(0);
    rows[MUL].accumulates = 0;
    rows[AVERAGE] = row_make("own average", 2, 1);
    rows[AVERAGE].flags = FT_OP_GRAD_OVER_DOUT;
    rows[SHIFT] = row_make("own shift", 1, 1);
    rows[SHIFT].flags = FT_OP_GRAD_PASS;
    rows[SHIFT].backward = NULL;
    rows[SHIFT].cheap = FT_OUT(0);
    rows[ADD] = row_make("own add", 2, 1);
    rows[ADD].flags = FT_OP_GRAD_PASS;
    rows[ADD].backward = NULL;
    rows[SPLIT] = row_make("own split", 1, 2);
    rows[SPLIT].saves[0] = FT_IN(0);
    rows[SPLIT].cheap = FT_OUT(1);
    rows[PAIR] = row_make("own pair", 2, 2);
    rows[PAIR].saves[0] = rows[PAIR].saves[1] = FT_OUT(0);
    rows[PAIR].cheap = FT_OUT(1);
    rows[PAIR].replay_from = FT_OUT(0);
    rows[PAIR].replay = own_replay;
    rows[PAIR].flags = FT_OP_GRAD_SAME_01 | FT_OP_GRAD_OVER_DOUT;
    rows[RELU] = row_make("own relu", 1, 1);
    rows[RELU].saves[0] = FT_OUT(0);
    rows[SCALE] = row_make("own scale", 1, 1);
    rows[SCALE].flags = FT_OP_INPLACE | FT_OP_GRAD_OVER_DOUT;
    rows[EAT] = row_make("own eat", 1, 1);
    rows[EAT].saves[0] = FT_IN(0);
    rows[EAT].flags = FT_OP_GRAD_OVER_IN;
    rows[EAT].cheap = FT_OUT(0);
    rows[LATE] = row_make("own late", 1, 1);
    rows[LATE].saves[0] = FT_IN(0);
    rows[LATE].flags = FT_OP_DEFERRED | FT_OP_GRAD_OVER_IN;
    rows[WEIGH] = row_make("own weigh", 2, 1);
    rows[WEIGH].saves[0] = FT_IN(1);
    rows[WEIGH].saves[1] = FT_IN(0);
    rows[WEIGH].flags = FT_OP_SPLIT;
    rows[CUBE] = row_make("own cube", 1, 1);
    rows[CUBE].saves[0] = FT_IN(0);
    rows[CUBE].accumulates = 0;
    rows[CUBE].forward = NULL;
    rows[CUBE].backward = NULL;
    rows[CUBE].forward_host = cube_forward;
    rows[CUBE].backward_host = cube_backward;
    return 0;
}

static ft_status register_rows(ft_ctx *ctx)
{
    for (int k = 0; k < KINDS; k++) FT_TRY(ft_op_register(ctx, &rows[k]));
    return ft_op_register(ctx, &rows[0]); /* again is fine */
}

/* y (and z) = op of a (and b), counted under `node` where c is given. */
static ft_status apply(ft_ctx *ctx, kind k, ft_tensor *a, ft_tensor *b, ft_tensor **y,
                       ft_tensor **z, counts *c, int node)
{
    ft_tensor *in[2], *out[2];
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.user = c;
    attr.i[0] = node;
    in[0] = a;
    in[1] = b;
    FT_TRY(ft_apply(ctx, &rows[k], in, &attr, out));
    *y = out[0];
    if (z) *z = out[1];
    return FT_OK;
}

static ft_status unary(ft_ctx *ctx, kind k, ft_tensor *x, ft_tensor **y)
{
    return apply(ctx, k, x, NULL, y, NULL, NULL, 0);
}

static ft_status binary(ft_ctx *ctx, kind k, ft_tensor *a, ft_tensor *b, ft_tensor **y)
{
    return apply(ctx, k, a, b, y, NULL, NULL, 0);
}

/* ------------------------------------------------------------------------------- a second book

   Values and nodes of one tape. Facts are set by record, free, demand and backward; `alive` and
   `settle` draw the conclusions from them. */

#define MOST 64

typedef struct value {
    int node, out;       /* node -1: a tensor of the caller's, always there */
    size_t bytes;
    int requires_grad, held, keep, computed, consumed, rebuilt;
    int stage_input;     /* a tensor of the caller's that is some other tape's value */
    int grad;            /* number of the buffer that its gradient is in, 0: none */
} value;

typedef struct entry {
    const ft_op *row;
    int in[3], out[2];
    unsigned want, saved, pins; /* saved and pins: FT_IN, FT_OUT bits still in force */
    int segment, deferred, done, replays, cheap_replays, forwards, backwards;
    int late;            /* its forward ran inside its backward */
    int costs;           /* backwards that count flops: the halves of a split one count once */
    double flops;
} entry;

typedef struct model {
    value values[MOST];
    entry nodes[MOST];
    int n_values, n_nodes;
    ft_sac sac;
    int segment, n_segments, ordinal;
    int buffers;         /* gradient buffers made so far */
} model;

static int model_value(model *m, int n, size_t bytes)
{
    value *v = &m->values[m->n_values];
    memset(v, 0, sizeof *v);
    v->node = n;
    v->bytes = bytes;
    v->held = v->keep = v->computed = 1;
    return m->n_values++;
}

static void model_begin(model *m)
{
    memset(m, 0, sizeof *m);
    m->segment = -1;
}

/* Backwards and replays to come that read v. */
static int model_need(const model *m, int v)
{
    int need = 0;
    for (int n = 0; n < m->n_nodes; n++) {
        const entry *d = &m->nodes[n];
        for (int i = 0; i < d->row->n_in; i++)
            if (d->in[i] == v) need += !!(d->saved & FT_IN(i)) + !!(d->pins & FT_IN(i));
        for (int i = 0; i < d->row->n_out; i++)
            if (d->out[i] == v) need += !!(d->saved & FT_OUT(i)) + !!(d->pins & FT_OUT(i));
    }
    return need;
}

static int model_alive(const model *m, int v)
{
    const value *x = &m->values[v];
    if (x->node < 0) return 1;
    if (!x->computed || (x->consumed && !x->rebuilt)) return 0;
    return x->held || (x->keep && model_need(m, v) > 0);
}

/* A replay may come only while an output that was dropped is held or will be read. */
static void model_settle(model *m)
{
    for (int again = 1; again;) {
        again = 0;
        for (int n = 0; n < m->n_nodes; n++) {
            entry *d = &m->nodes[n];
            int wanted = 0;
            if (!d->pins) continue;
            for (int i = 0; i < d->row->n_out; i++) {
                const value *o = &m->values[d->out[i]];
                int self = (d->pins & FT_OUT(i)) != 0;
                wanted |= !o->keep && (o->held || model_need(m, d->out[i]) > self);
            }
            if (wanted) continue;
            d->pins = 0;
            again = 1;
        }
    }
}

static int model_keeps(model *m, const ft_op *row, int out)
{
    if (m->segment < 0) return 1;
    int ordinal = m->ordinal++;
    switch (m->sac.kind) {
    case FT_SAC_SELECTIVE: return !(row->cheap & FT_OUT(out));
    case FT_SAC_FULL: return 0;
    case FT_SAC_MASK: return !(m->sac.mask >> ordinal & 1u);
    default: return 1;
    }
}

static void model_demand(model *m, int v);

static int model_record(model *m, const ft_op *row, const int *in, size_t out_bytes, double flops)
{
    int n = m->n_nodes++, dropped = 0;
    entry *d = &m->nodes[n];
    memset(d, 0, sizeof *d);
    d->row = row;
    d->segment = m->segment;
    d->flops = flops;
    for (int i = 0; i < row->n_in; i++) {
        d->in[i] = in[i];
        model_demand(m, in[i]);
        if ((row->grads & FT_IN(i)) && m->values[in[i]].requires_grad) d->want |= FT_IN(i);
    }
    d->deferred = d->want && (row->flags & FT_OP_DEFERRED);
    d->forwards = !d->deferred;
    for (int i = 0; i < row->n_in; i++)
        if (d->want & FT_IN(i)) d->saved |= row->saves[i];
    for (int i = 0; i < row->n_out; i++) {
        int keep = model_keeps(m, row, i);
        d->out[i] = model_value(m, n, out_bytes);
        value *o = &m->values[d->out[i]];
        if (row->flags & FT_OP_DEFERRED) keep = 1;
        if (row->flags & FT_OP_INPLACE) keep = m->values[in[0]].keep;
        o->out = i;
        o->keep = keep;
        o->computed = !d->deferred;
        o->requires_grad = d->want != 0;
        dropped |= !keep;
    }
    int cheap = row->replay != NULL;
    for (int i = 0; i < row->n_out; i++)
        if ((row->replay_from & FT_OUT(i)) && !m->values[d->out[i]].keep) cheap = 0;
    if (dropped) d->pins = cheap ? row->replay_from : FT_IN(row->n_in) - 1;
    if (row->flags & FT_OP_INPLACE) {
        m->values[in[0]].consumed = 1;
        m->values[in[0]].held = 0;
    }
    model_settle(m);
    return n;
}

static void model_free(model *m, int v)
{
    m->values[v].held = 0;
    model_settle(m);
}

static void model_segment_begin(model *m, ft_sac sac)
{
    m->segment = m->n_segments++;
    m->sac = sac;
    m->ordinal = 0;
}

static void model_segment_end(model *m, int n, const int *results)
{
    for (int i = 0; i < n; i++) model_demand(m, results[i]); /* listing it reads it */
    for (int v = 0; v < m->n_values; v++) {
        value *x = &m->values[v];
        int result = 0;
        for (int i = 0; i < n; i++) result |= results[i] == v;
        if (result) x->keep = 1;
        else if (x->node >= 0 && m->nodes[x->node].segment == m->segment) x->held = 0;
    }
    m->segment = -1;
    model_settle(m);
}

/* Somebody reads v now. */
static void model_demand(model *m, int v)
{
    if (model_alive(m, v)) return;
    entry *d = &m->nodes[m->values[v].node];
    if (d->deferred) {
        for (int i = 0; i < d->row->n_in; i++) model_demand(m, d->in[i]);
        d->deferred = 0;
        d->forwards++;
        for (int i = 0; i < d->row->n_out; i++) m->values[d->out[i]].computed = 1;
        return;
    }
    unsigned reads = d->pins;
    for (int i = 0; i < d->row->n_in; i++)
        if (reads & FT_IN(i)) model_demand(m, d->in[i]);
    for (int i = 0; i < d->row->n_out; i++)
        if (reads & FT_OUT(i)) model_demand(m, d->out[i]);
    if (d->row->replay && reads == d->row->replay_from) d->cheap_replays++;
    else d->replays++;
    for (int i = 0; i < d->row->n_out; i++)
        m->values[d->out[i]].keep = m->values[d->out[i]].rebuilt = 1;
    d->pins = 0;
    model_settle(m);
}

static int model_sharers(const model *m, int buffer)
{
    int n = 0;
    for (int v = 0; v < m->n_values; v++) n += m->values[v].grad == buffer;
    return n;
}

/* v gets a contribution: in a buffer of its own, or in `shared`, where another gradient is too. */
static void model_contribute(model *m, int v, int shared)
{
    value *x = &m->values[v];
    int a_value = x->node >= 0 || x->stage_input;
    if (!x->grad) x->grad = shared && a_value ? shared : ++m->buffers;
    else if (model_sharers(m, x->grad) > 1) x->grad = ++m->buffers;
}

/* What the node's backward reads is there; gradients of `want` get their contributions. */
static void model_gradients(model *m, entry *d, unsigned want)
{
    int shared = d->row->flags & FT_OP_GRAD_PASS ? m->values[d->out[0]].grad : 0;
    for (int i = 0; i < d->row->n_in; i++)
        if (d->saved & FT_IN(i)) model_demand(m, d->in[i]);
    for (int i = 0; i < d->row->n_out; i++)
        if (d->saved & FT_OUT(i)) model_demand(m, d->out[i]);
    if (!want) return;
    if (d->deferred)
        for (int i = 0; i < d->row->n_out; i++) m->values[d->out[i]].computed = 1;
    d->late = d->deferred;
    d->deferred = 0;
    if (d->row->flags & FT_OP_GRAD_SAME_01) shared = ++m->buffers;
    d->backwards += !(d->row->flags & FT_OP_GRAD_PASS);
    for (int i = 0; i < d->row->n_in; i++)
        if (want & FT_IN(i)) model_contribute(m, d->in[i], shared);
}

/* Parameters whose gradients the first half puts off, and what stays saved for them. */
static unsigned model_later(const model *m, const entry *d, unsigned *stay)
{
    unsigned later = 0;
    *stay = 0;
    if (!(d->row->flags & FT_OP_SPLIT)) return 0;
    for (int i = 0; i < d->row->n_in; i++) {
        const value *x = &m->values[d->in[i]];
        if (!(d->want & FT_IN(i)) || x->node >= 0 || x->stage_input) continue;
        later |= FT_IN(i);
        *stay |= d->row->saves[i];
    }
    return later;
}

static void model_backward_node(model *m, int n, ft_phase phase)
{
    entry *d = &m->nodes[n];
    unsigned stay, later = 0;
    int wanted = 0;
    for (int i = 0; i < d->row->n_out; i++) wanted |= m->values[d->out[i]].grad != 0;
    if (phase == FT_PHASE_INPUTS && wanted) later = model_later(m, d, &stay);
    if (wanted && d->want) {
        int before = d->backwards;
        if (later == d->want) d->saved &= stay; /* nothing runs now, but nothing is rebuilt later */
        model_gradients(m, d, d->want & ~later);
        if (!d->costs) d->costs = d->backwards > before;
    }
    d->pins = 0;
    d->want = later;
    if (later) {
        d->saved &= stay;
    } else {
        for (int i = 0; i < d->row->n_out; i++) m->values[d->out[i]].grad = 0;
        d->saved = 0;
    }
    d->done = !later;
    model_settle(m);
}

/* Bytes of all values that are alive and of all gradients. */
static size_t model_live(const model *m)
{
    size_t bytes = 0;
    for (int v = 0; v < m->n_values; v++) {
        int first = m->values[v].grad != 0;
        for (int u = 0; u < v; u++) first &= m->values[u].grad != m->values[v].grad;
        bytes += (size_t)(model_alive(m, v) + first) * m->values[v].bytes;
    }
    return bytes;
}

static double model_flops(const model *m, int replay)
{
    double flops = 0;
    for (int n = 0; n < m->n_nodes; n++) {
        const entry *d = &m->nodes[n];
        flops += d->flops * (replay ? d->replays + d->cheap_replays : d->forwards + d->late);
    }
    return flops;
}

/* ------------------------------------------------------------------ random graphs of own ops */

typedef enum action { OP, FREE, BEGIN, END } action;

typedef struct step {
    action act;
    kind kind;
    int in[2];               /* OP; FREE: in[0] */
    int n_results, results[MOST];
} step;

typedef struct program {
    step steps[256];
    int n_steps, n_ops, n_values, n_segments, root;
    int op_in[MOST][2], op_out[MOST][2];
    kind op_kind[MOST];
    int held[MOST], used[MOST], op_of[MOST], segment_of[MOST], differs[MOST]; /* by value */
    double at[MOST][N], grad[MOST][N];
} program;

/* 2 wants no gradient; 3, of tag act, is the input of a stage: the value of some other tape. */
#define LEAVES 4

static double kind_value(kind k, int out, double a, double b)
{
    switch (k) {
    case SQUARE: case EAT: case LATE: return a * a / 2;
    case MUL: case WEIGH: return a * b;
    case AVERAGE: return (a + b) / 2;
    case SHIFT: return a + 0.25;
    case ADD: return a + b;
    case SPLIT: return out ? -a : a * a / 2;
    case PAIR: return out ? (a + b) * (a + b) / 8 : (a + b) / 2;
    case RELU: return a > 0 ? a : 0;
    case SCALE: return -0.75 * a;
    default: return a * a * a / 2;
    }
}

static double kind_slope(kind k, int out, int input, double a, double b)
{
    switch (k) {
    case SQUARE: case EAT: case LATE: return a;
    case MUL: case WEIGH: return input ? a : b;
    case AVERAGE: return 0.5;
    case SHIFT: case ADD: return 1;
    case SPLIT: return out ? -1 : a;
    case PAIR: return out ? (a + b) / 4 : 0.5;
    case RELU: return a > 0;
    case SCALE: return -0.75;
    default: return 1.5 * a * a;
    }
}

static step *program_step(program *p, action act)
{
    step *s = &p->steps[p->n_steps++];
    s->act = act;
    return s;
}

/* In place is for a value that nobody reads, whose producer does not keep it for itself. */
static int program_may_overwrite(const program *p, int v)
{
    if (v < LEAVES || p->used[v]) return 0;
    kind k = p->op_kind[p->op_of[v]];
    return k != RELU && !(k == PAIR && v == p->op_out[p->op_of[v]][0]);
}

static int program_pick(const program *p)
{
    for (;;) {
        int v = random_below(2) ? p->n_values - 1 - random_below(3) : random_below(p->n_values);
        if (v >= 0 && p->held[v]) return v;
    }
}

static void program_op(program *p, int segment)
{
    kind k = (kind)random_below(KINDS);
    int a = program_pick(p), b = program_pick(p), n = p->n_ops;
    double most = 0;
    if (k == SCALE && !program_may_overwrite(p, a)) return;
    for (int out = 0; out < rows[k].n_out; out++)
        for (int i = 0; i < N; i++) {
            double y = kind_value(k, out, p->at[a][i], p->at[b][i]);
            p->at[p->n_values + out][i] = y;
            most = fmax(most, fabs(y));
        }
    if (most > 4) return;
    step *s = program_step(p, OP);
    s->kind = p->op_kind[n] = k;
    s->in[0] = p->op_in[n][0] = a;
    s->in[1] = p->op_in[n][1] = b;
    p->used[a] = 1;
    if (rows[k].n_in == 2) p->used[b] = 1;
    if (k == SCALE) p->held[a] = 0;
    for (int out = 0; out < rows[k].n_out; out++) {
        int v = p->n_values++;
        p->op_out[n][out] = v;
        p->op_of[v] = n;
        p->held[v] = 1;
        p->segment_of[v] = segment;
        p->differs[v] = p->differs[a] || (rows[k].n_in == 2 && p->differs[b]);
    }
    p->n_ops++;
}

static void program_free_some(program *p)
{
    for (int v = LEAVES; v < p->n_values; v++) {
        if (!p->held[v] || v == p->n_values - 1 || random_below(4)) continue;
        program_step(p, FREE)->in[0] = v;
        p->held[v] = 0;
    }
}

static void program_end(program *p, int segment)
{
    step *s = program_step(p, END);
    int last = -1;
    for (int v = LEAVES; v < p->n_values; v++)
        if (p->held[v] && p->segment_of[v] == segment) last = v;
    for (int v = LEAVES; v < p->n_values; v++) {
        if (!p->held[v] || p->segment_of[v] != segment) continue;
        if (v == last || random_below(2)) s->results[s->n_results++] = v;
        else p->held[v] = 0;
    }
}

static void program_reference(program *p)
{
    memset(p->grad, 0, sizeof p->grad);
    for (int i = 0; i < N; i++) p->grad[p->root][i] = cos(0.3 * i);
    for (int n = p->n_ops - 1; n >= 0; n--)
        for (int out = 0; out < rows[p->op_kind[n]].n_out; out++)
            for (int input = 0; input < rows[p->op_kind[n]].n_in; input++)
                for (int i = 0; i < N; i++)
                    p->grad[p->op_in[n][input]][i] += p->grad[p->op_out[n][out]][i] *
                        kind_slope(p->op_kind[n], out, input, p->at[p->op_in[n][0]][i],
                                   p->at[p->op_in[n][1]][i]);
}

/* 0 if no value that is left has a gradient. */
static int program_make(program *p, uint64_t seed)
{
    memset(p, 0, sizeof *p);
    random_state = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    p->n_values = LEAVES;
    for (int v = 0; v < LEAVES; v++) {
        p->held[v] = 1;
        p->differs[v] = v != 2;
        for (int i = 0; i < N; i++) p->at[v][i] = (double)leaf_value(v, i);
    }
    int segment = -1, ops = 2 + random_below(12);
    while (p->n_ops < ops) {
        if (segment < 0 && !random_below(3)) {
            segment = p->n_segments++;
            program_step(p, BEGIN);
        }
        program_op(p, segment);
        program_free_some(p);
        if (segment >= 0 && !random_below(4)) {
            program_end(p, segment);
            segment = -1;
        }
    }
    if (segment >= 0) program_end(p, segment);
    p->root = -1;
    for (int v = LEAVES; v < p->n_values; v++)
        if (p->held[v] && p->differs[v]) p->root = v;
    if (p->root < 0) return 0;
    for (int v = LEAVES; v < p->n_values; v++)
        if (p->held[v] && v != p->root && random_below(5)) program_step(p, FREE)->in[0] = v;
    program_reference(p);
    return 1;
}

/* A backward, one in two halves, one that ends after the first half, or none. */
typedef enum manner { WHOLE, SPLIT_IN_TWO, HALF, DROPPED } manner;

typedef struct execution execution;

typedef struct mark_at { execution *x; int node; } mark_at; /* stands after this node */

struct execution {
    ft_ctx *ctx;
    ft_tape *tape;
    const program *p;
    model m;
    counts counts;
    size_t base;
    ft_tensor *t[MOST];
    mark_at marks[MOST];
    int passed, dropped; /* marks that backward came to; that a reset told */
    int reached;         /* in this walk of backward: the lowest node that is done */
    ft_mem_stats mem;
    ft_flops before;
    float grads[LEAVES][N];
};

typedef struct fuzz {
    int programs;
    ft_mem_stats *mem;   /* of the runs, in their order: cpu writes, meta compares */
    int n_mem;
} fuzz;

static ft_status execution_check(execution *x)
{
    size_t want = x->base + model_live(&x->m), have = live(x->ctx);
    if (have == want) return FT_OK;
    return ft_error(FT_ERR_DATA, "%zu bytes live, the second book says %zu", have - x->base,
                    want - x->base);
}

/* The second book comes to where backward is: all nodes after `node` are done. */
static void execution_advance(execution *x, int node, ft_phase phase)
{
    while (x->reached > node + 1) model_backward_node(&x->m, --x->reached, phase);
}

/* What is alive at a mark is known exactly. */
static ft_status execution_mark(ft_ctx *ctx, void *user, ft_phase phase)
{
    const mark_at *at = (const mark_at *)user;
    execution *x = at->x;
    (void)ctx;
    if (phase == FT_PHASE_DROPPED) {
        x->dropped++;
        return FT_OK;
    }
    execution_advance(x, at->node, phase);
    x->passed++;
    ft_status status = execution_check(x);
    if (status == FT_OK) return status;
    char text[1024];
    snprintf(text, sizeof text, "%s", ft_last_error());
    return ft_error(FT_ERR_DATA, "in backward after node %d (%s): %s", at->node + 1,
                    at->node + 1 < x->m.n_nodes ? x->m.nodes[at->node + 1].row->name : "-", text);
}

static ft_status execution_op(execution *x, const step *s)
{
    int n = x->m.n_nodes;
    const ft_op *row = &rows[s->kind];
    ft_tensor *y, *z = NULL;
    FT_TRY(apply(x->ctx, s->kind, x->t[s->in[0]], x->t[s->in[1]], &y, row->n_out > 1 ? &z : NULL,
                 &x->counts, n));
    model_record(&x->m, row, s->in, BUF, kind_flops(s->kind));
    x->t[x->p->op_out[n][0]] = y;
    if (row->n_out > 1) x->t[x->p->op_out[n][1]] = z;
    x->marks[n].x = x;
    x->marks[n].node = n;
    return ft_tape_mark(x->ctx, execution_mark, &x->marks[n]);
}

static ft_status execution_forward(execution *x, const ft_sac *sac)
{
    const program *p = x->p;
    int segment = 0;
    for (int i = 0; i < p->n_steps; i++) {
        const step *s = &p->steps[i];
        ft_tensor *results[MOST];
        if (s->act == OP) FT_TRY(execution_op(x, s));
        if (s->act == FREE) {
            ft_tensor_free(x->t[s->in[0]]);
            model_free(&x->m, s->in[0]);
        }
        if (s->act == BEGIN) {
            FT_TRY(ft_segment_begin(x->ctx, "a segment", sac[segment]));
            model_segment_begin(&x->m, sac[segment++]);
        }
        if (s->act == END) {
            for (int k = 0; k < s->n_results; k++) results[k] = x->t[s->results[k]];
            FT_TRY(ft_segment_end(x->ctx, s->n_results, results));
            model_segment_end(&x->m, s->n_results, s->results);
        }
        FT_TRY(execution_check(x));
    }
    return FT_OK;
}

static ft_status execution_counts(execution *x)
{
    ft_flops flops;
    double backward = 0;
    ft_flops_get(x->ctx, &flops);
    for (int n = 0; n < x->m.n_nodes; n++) {
        const entry *d = &x->m.nodes[n];
        backward += 2 * d->flops * d->costs;
        CHECK(d->replays <= 1 && d->cheap_replays <= 1 && d->replays + d->cheap_replays <= 1);
        if (!on_cpu(x->ctx)) continue;
        CHECK(x->counts.forward[n] == d->forwards + d->replays);
        CHECK(x->counts.replay[n] == d->cheap_replays);
        CHECK(x->counts.backward[n] == d->backwards);
    }
    CHECK(flops.forward - x->before.forward == model_flops(&x->m, 0));
    CHECK(flops.replay - x->before.replay == model_flops(&x->m, 1));
    CHECK(flops.backward - x->before.backward == backward);
    return FT_OK;
}

static ft_status execution_gradients(execution *x, ft_tensor *root)
{
    const program *p = x->p;
    size_t grads = 0;
    for (int v = 0; v < LEAVES; v++) {
        CHECK((x->t[v]->grad != NULL) == (x->m.values[v].grad != 0) && x->t[v]->held);
        grads += x->t[v]->grad ? BUF : 0;
    }
    CHECK(live(x->ctx) == x->base + LEAVES * BUF + grads + BUF);
    CHECK(x->t[2]->grad == NULL && root->held);
    FT_TRY(same_values(root, p->at[p->root]));
    ft_tensor_free(root);
    CHECK(live(x->ctx) == x->base + LEAVES * BUF + grads);
    for (int v = 0; v < LEAVES; v++) {
        if (!x->t[v]->grad) continue;
        FT_TRY(same_values(x->t[v]->grad, p->grad[v]));
        FT_TRY(ft_download(x->t[v]->grad, x->grads[v]));
    }
    return FT_OK;
}

static ft_status execution_backward(execution *x, manner how)
{
    const program *p = x->p;
    ft_tensor *droot, *root = x->t[p->root];
    float seed[N];
    int64_t n = N;
    for (int i = 0; i < N; i++) seed[i] = (float)cos(0.3 * i);
    FT_TRY(ft_tensor_create(x->ctx, &droot, FT_F32, 1, &n, FT_TAG_ACT));
    FT_TRY(ft_upload(droot, seed));
    x->m.values[p->root].grad = ++x->m.buffers;
    FT_TRY(execution_check(x));
    x->reached = x->m.n_nodes;
    if (how == WHOLE) {
        FT_TRY(ft_backward(x->tape, root, droot));
        execution_advance(x, -1, FT_PHASE_WHOLE);
    } else {
        FT_TRY(ft_backward_inputs(x->tape, root, droot));
        execution_advance(x, -1, FT_PHASE_INPUTS);
        FT_TRY(execution_check(x));
        if (how == HALF) {
            FT_TRY(ft_tape_reset(x->tape));
            CHECK(x->passed == p->n_ops && x->dropped == p->n_ops);
            return FT_OK;
        }
        x->reached = x->m.n_nodes;
        FT_TRY(ft_backward_weights(x->tape));
        execution_advance(x, -1, FT_PHASE_WEIGHTS);
    }
    CHECK(x->passed == (how == WHOLE ? 1 : 2) * p->n_ops && x->dropped == 0);
    return execution_gradients(x, root);
}

/* The program once, under one policy a segment, from leaves to gradients (or dropped halfway). */
static ft_status execution_run(execution *x, const ft_sac *sac, manner how)
{
    x->base = live(x->ctx);
    model_begin(&x->m);
    ft_flops_get(x->ctx, &x->before);
    ft_mem_reset_peak(x->ctx);
    for (int v = 0; v < LEAVES; v++) {
        FT_TRY(leaf_create(x->ctx, v, v != 2, v == 3 ? FT_TAG_ACT : FT_TAG_PARAM, &x->t[v]));
        x->m.values[model_value(&x->m, -1, BUF)].requires_grad = v != 2;
        x->m.values[v].stage_input = v == 3;
    }
    FT_TRY(ft_tape_create(x->ctx, &x->tape));
    FT_TRY(ft_tape_begin(x->tape));
    FT_TRY(execution_forward(x, sac));
    FT_TRY(ft_tape_end(x->tape));
    if (how != DROPPED) FT_TRY(execution_backward(x, how));
    if (how == WHOLE || how == SPLIT_IN_TWO) FT_TRY(execution_counts(x));
    if (how == DROPPED) FT_TRY(ft_tape_reset(x->tape));
    if (how == DROPPED) CHECK(x->passed == 0 && x->dropped == x->p->n_ops);
    ft_tape_free(x->tape);
    for (int v = 0; v < LEAVES; v++) ft_tensor_free(x->t[v]);
    CHECK(live(x->ctx) == x->base);
    ft_mem_get(x->ctx, &x->mem);
    return ft_sync(x->ctx);
}

enum { POLICIES = 9, RUNS = 2 * POLICIES }; /* each in a whole and in two halves */

static void policy_make(int policy, uint64_t seed, int n, ft_sac *sac)
{
    random_state = seed * 31 + (uint64_t)policy + 7;
    for (int s = 0; s < n; s++) {
        sac[s].kind = policy < 3 ? (ft_sac_kind)policy : FT_SAC_MASK;
        sac[s].mask = policy < 3 ? 0 : random_next() & random_next();
        if (policy >= 6) sac[s].mask |= random_next();
    }
}

static ft_status fuzz_policy(ft_ctx *ctx, fuzz *f, const program *p, int seed, int number,
                             float first[2][LEAVES][N])
{
    ft_sac sac[MOST];
    int policy = number / 2, split = number % 2;
    manner how = policy == 5 ? (split ? HALF : DROPPED) : (split ? SPLIT_IN_TWO : WHOLE);
    execution *x = (execution *)ft_host_alloc(ctx, sizeof *x);
    if (!x) return FT_ERR_OOM;
    x->ctx = ctx;
    x->p = p;
    policy_make(policy, (uint64_t)seed, p->n_segments, sac);
    FT_TRY(execution_run(x, sac, how));
    if (policy == 0) memcpy(first[split], x->grads, sizeof x->grads);
    CHECK(policy == 5 || memcmp(first[split], x->grads, sizeof x->grads) == 0);
    if (on_cpu(ctx)) f->mem[f->n_mem] = x->mem;
    CHECK(f->mem[f->n_mem].peak_bytes == x->mem.peak_bytes);
    CHECK(memcmp(f->mem[f->n_mem].at_peak, x->mem.at_peak, sizeof x->mem.at_peak) == 0);
    CHECK(memcmp(f->mem[f->n_mem].highest, x->mem.highest, sizeof x->mem.highest) == 0);
    f->n_mem++;
    ft_host_free(ctx, x);
    return FT_OK;
}

static ft_status fuzz_rank(ft_ctx *ctx, void *user)
{
    fuzz *f = (fuzz *)user;
    float first[2][LEAVES][N];
    program *p = (program *)ft_host_alloc(ctx, sizeof *p);
    if (!p) return FT_ERR_OOM;
    FT_TRY(register_rows(ctx));
    f->n_mem = 0;
    for (int seed = 1, made = 0; made < f->programs; seed++) {
        if (!program_make(p, (uint64_t)seed)) continue;
        made++;
        for (int number = 0; number < RUNS; number++) {
            if (fuzz_policy(ctx, f, p, seed, number, first) == FT_OK) continue;
            char text[1024];
            snprintf(text, sizeof text, "%s", ft_last_error());
            return ft_error(FT_ERR_DATA, "program %d, policy %d%s: %s", seed, number / 2,
                            number % 2 ? ", in two halves" : "", text);
        }
    }
    return FT_OK;
}

/* Gradients are right and bitwise equal under every policy; after every call of forward and every
   node of backward exactly those bytes are live that somebody still needs; every op is replayed at
   most once, and only where it must be; meta does the same. */
static void random_graphs(void **state)
{
    fuzz f;
    (void)state;
    f.programs = 1200;
    f.mem = (ft_mem_stats *)malloc((size_t)f.programs * RUNS * sizeof *f.mem);
    assert_non_null(f.mem);
    run_on(FT_CPU, fuzz_rank, &f);
    run_on(FT_META, fuzz_rank, &f);
    free(f.mem);
}

/* ---------------------------------------------------------------------------- rows of one's own */

static ft_op good_row(void)
{
    ft_op row = row_make("a row", 2, 2);
    row.saves[0] = FT_IN(1) | FT_OUT(1);
    row.cheap = FT_OUT(1);
    row.replay_from = FT_OUT(0);
    row.replay = own_replay;
    return row;
}

static ft_status rows_rank(ft_ctx *ctx, void *user)
{
    ft_op row = good_row(), fine = good_row();
    (void)user;
    FT_TRY(ft_op_register(ctx, &fine));
    row.name = NULL;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "needs a name");
    row = good_row();
    row.infer = NULL;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "a row needs a name, infer");
    row = good_row();
    row.forward = NULL;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "forward");
    row = good_row();
    row.backward = NULL;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "no backward");
    row.grads = row.accumulates = row.saves[0] = 0;
    FT_TRY(ft_op_register(ctx, &row));
    row = good_row();
    row.n_in = FT_OP_MAX_IN + 1;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "9 inputs");
    row = good_row();
    row.n_in = -1;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "-1 inputs");
    row = good_row();
    row.n_out = 0;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "0 outputs");
    row = good_row();
    row.n_out = FT_OP_MAX_OUT + 1;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "5 outputs");
    for (int which = 0; which < 8; which++) {
        row = good_row();
        if (which == 0) row.grads |= FT_IN(2);
        if (which == 1) row.optional |= FT_IN(2);
        if (which == 2) row.accumulates |= FT_OUT(0);
        if (which == 3) row.cheap |= FT_OUT(2);
        if (which == 4) row.cheap |= FT_IN(0);
        if (which == 5) row.saves[1] |= FT_OUT(2);
        if (which == 6) row.saves[0] |= FT_IN(2);
        if (which == 7) row.replay_from |= FT_IN(3);
        REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "a mask names");
    }
    row = good_row();
    row.replay = NULL;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "replay and replay_from go together");
    row = good_row();
    row.replay_from = 0;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "replay and replay_from go together");
    row = good_row();
    row.flags = FT_OP_DEFERRED | FT_OP_INPLACE;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "deferred and in place");
    row = good_row();
    row.flags = FT_OP_INPLACE;
    row.saves[1] = FT_IN(0);
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "writes over the input");
    row = row_make("a row", 0, 1);
    row.flags = FT_OP_INPLACE;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "input 0");
    row = row_make("a row", 1, 1);
    row.flags = FT_OP_GRAD_SAME_01;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "input 1");
    row = row_make("a row", 1, 2);
    row.flags = FT_OP_GRAD_PASS;
    REFUSED(ft_op_register(ctx, &row), FT_ERR_ARG, "one output");
    return FT_OK;
}

/* A row that cannot mean anything is refused when it is registered, not when it runs. */
static void row_validation(void **state)
{
    (void)state;
    run_on(FT_CPU, rows_rank, NULL);
    run_on(FT_META, rows_rank, NULL);
}

static ft_status applying_host(ft_ctx *ctx, const ft_op_call *call, ft_tensor **in, ft_tensor **out)
{
    ft_tensor *y;
    (void)call;
    (void)out;
    return unary(ctx, SQUARE, in[0], &y);
}

static ft_status apply_rank(ft_ctx *ctx, void *user)
{
    ft_tensor *x, *y, *in[2];
    ft_op unknown = row_make("unknown", 1, 1), nested = rows[CUBE];
    (void)user;
    nested.forward_host = applying_host;
    nested.cost = NULL;
    FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
    in[0] = x;
    in[1] = NULL;
    REFUSED(ft_apply(ctx, &unknown, in, NULL, &y), FT_ERR_ARG, "unknown is not registered");
    REFUSED(ft_op_run(ft_stream_get(ctx, FT_STREAM_COMPUTE), &unknown, in, &x, NULL), FT_ERR_ARG,
            "unknown is not registered");
    FT_TRY(register_rows(ctx));
    FT_TRY(ft_op_register(ctx, &nested));
    REFUSED(ft_apply(ctx, &rows[MUL], in, NULL, &y), FT_ERR_ARG, "own mul: input 1 is missing");
    REFUSED(ft_apply(ctx, &nested, in, NULL, &y), FT_ERR_STATE, "inside a composite op");
    REFUSED(ft_op_run(ft_stream_get(ctx, FT_STREAM_COMPUTE), &rows[CUBE], in, &x, NULL), FT_ERR_ARG,
            "no forward kernel");
    return FT_OK;
}

static void apply_refusals(void **state)
{
    (void)state;
    run_on(FT_CPU, apply_rank, NULL);
    run_on(FT_META, apply_rank, NULL);
}

/* --------------------------------------------------------------------------- order of the calls */

static ft_status order_rank(ft_ctx *ctx, void *user)
{
    ft_tape *a, *b;
    ft_tensor *x, *frozen, *y, *z, *own, *small;
    ft_sac none, odd;
    int64_t n = N, one = 1;
    (void)user;
    memset(&none, 0, sizeof none);
    odd = none;
    odd.kind = (ft_sac_kind)(FT_SAC_MASK + 1);
    FT_TRY(register_rows(ctx));
    FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
    FT_TRY(leaf_create(ctx, 1, 0, FT_TAG_PARAM, &frozen));
    FT_TRY(ft_tape_create(ctx, &a));
    FT_TRY(ft_tape_create(ctx, &b));
    REFUSED(ft_tape_end(a), FT_ERR_STATE, "not the one recording");
    FT_TRY(ft_tape_begin(a));
    CHECK(ft_tape_current(ctx) == a);
    REFUSED(ft_tape_begin(b), FT_ERR_STATE, "recording already");
    REFUSED(ft_tape_end(b), FT_ERR_STATE, "not the one recording");
    FT_TRY(unary(ctx, SQUARE, x, &y));
    REFUSED(ft_backward(a, y, NULL), FT_ERR_STATE, "still recording");
    REFUSED(ft_segment_end(ctx, 0, NULL), FT_ERR_STATE, "no segment is open");
    REFUSED(ft_segment_begin(ctx, "s", odd), FT_ERR_ARG, "unknown recomputation policy");
    FT_TRY(ft_segment_begin(ctx, "first", none));
    REFUSED(ft_segment_begin(ctx, "second", none), FT_ERR_STATE, "second begins inside another");
    REFUSED(ft_tape_end(a), FT_ERR_STATE, "segment first is still open");
    FT_TRY(ft_segment_end(ctx, 0, NULL));
    FT_TRY(ft_tape_end(a));
    CHECK(ft_tape_current(ctx) == NULL);
    REFUSED(ft_tape_begin(a), FT_ERR_STATE, "holds 1 nodes");
    FT_TRY(ft_segment_begin(ctx, "loose", none));
    REFUSED(ft_tape_begin(b), FT_ERR_STATE, "a segment is open");
    FT_TRY(ft_segment_end(ctx, 0, NULL));

    FT_TRY(ft_tape_begin(b));
    REFUSED(unary(ctx, SQUARE, y, &z), FT_ERR_STATE, "belongs to another tape");
    FT_TRY(unary(ctx, SQUARE, frozen, &z));
    FT_TRY(ft_tape_end(b));
    REFUSED(ft_backward(b, y, NULL), FT_ERR_STATE, "not a live tensor of this tape");
    REFUSED(ft_backward(b, z, NULL), FT_ERR_STATE, "nothing that requires a gradient");
    REFUSED(ft_backward(a, x, NULL), FT_ERR_STATE, "not a live tensor of this tape");
    REFUSED(ft_backward(a, y, NULL), FT_ERR_SHAPE, "not a scalar");
    FT_TRY(ft_tensor_create(ctx, &small, FT_F32, 1, &one, FT_TAG_ACT));
    REFUSED(ft_backward(a, y, small), FT_ERR_SHAPE, "not of the root's kind");
    FT_TRY(ft_tensor_create(ctx, &own, FT_BF16, 1, &n, FT_TAG_ACT));
    REFUSED(ft_backward(a, y, own), FT_ERR_SHAPE, "not of the root's kind");
    REFUSED(ft_backward(a, y, z), FT_ERR_SHAPE, "no tensor of one's own");
    ft_tensor_free(own);
    FT_TRY(ft_tensor_empty(ctx, &own, FT_F32, 1, &n));
    REFUSED(ft_backward(a, y, own), FT_ERR_SHAPE, "no tensor of one's own");
    /* What was refused left no trace: the same backward works. */
    FT_TRY(ft_tensor_attach(own, FT_TAG_ACT, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(ft_fill(own, 1, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(ft_backward(a, y, own));
    CHECK(x->grad != NULL);
    ft_tensor_free(small);
    ft_tape_free(b);
    ft_tape_free(a);
    ft_tape_free(NULL);
    ft_tensor_free(y);
    ft_tensor_free(NULL);
    CHECK(live(ctx) == 3 * BUF); /* x, frozen, x's gradient */
    return FT_OK;
}

static void order_of_calls(void **state)
{
    (void)state;
    run_on(FT_CPU, order_rank, NULL);
    run_on(FT_META, order_rank, NULL);
}

/* ------------------------------------------------------------------------------------- versions */

enum { BY_UPLOAD, BY_FILL, BY_COPY, BY_ACCUMULATE, BY_OP, BY_ALL_REDUCE, BY_REDUCE_SCATTER, BY_VIEW,
       WRITES };

static ft_status write_by(ft_ctx *ctx, int how, ft_tensor *t)
{
    ft_stream *stream = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    float values[N];
    ft_tensor *other, *view;
    ft_group *group;
    int64_t two = 2;
    int rank0 = 0;
    static int groups;
    char name[32];
    memset(values, 0, sizeof values);
    FT_TRY(leaf_create(ctx, 5, 0, FT_TAG_PARAM, &other));
    if (how == BY_UPLOAD) FT_TRY(ft_upload(t, values));
    if (how == BY_FILL) FT_TRY(ft_fill(t, 0.5, stream));
    if (how == BY_COPY) FT_TRY(ft_copy(t, other, stream));
    if (how == BY_ACCUMULATE) FT_TRY(ft_accumulate(t, other, stream));
    if (how == BY_OP) FT_TRY(queue(ctx, SQUARE, other, NULL, t));
    if (how == BY_ALL_REDUCE || how == BY_REDUCE_SCATTER) {
        snprintf(name, sizeof name, "group %d", groups++);
        FT_TRY(ft_group_create(ctx, name, 1, &rank0, &group));
        FT_TRY(how == BY_ALL_REDUCE ? ft_all_reduce(group, stream, t)
                                    : ft_reduce_scatter(group, stream, other, t));
    }
    if (how == BY_VIEW) {
        FT_TRY(ft_tensor_view(t, &view, 3, 1, &two));
        FT_TRY(ft_fill(view, 7, stream));
        ft_tensor_free(view);
    }
    ft_tensor_free(other);
    return FT_OK;
}

enum { LEAF_SAVED, VALUE_SAVED, OUTPUT_SAVED, REPLAY_READS, NOT_SAVED, BEFORE_USE, PLACES };

/* One write at one place between forward and backward; *refused says what must happen. */
static ft_status version_case(ft_ctx *ctx, int how, int where, int *refused)
{
    ft_tape *tape;
    ft_tensor *x, *h, *y, *z, *d;
    ft_sac full;
    size_t before = live(ctx);
    kind reader = where == NOT_SAVED ? SHIFT : where == OUTPUT_SAVED ? RELU : SQUARE;
    memset(&full, 0, sizeof full);
    full.kind = FT_SAC_FULL;
    FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(unary(ctx, SHIFT, x, &h));
    if (where == BEFORE_USE) FT_TRY(write_by(ctx, how, h));
    if (where == REPLAY_READS) {
        FT_TRY(ft_segment_begin(ctx, "s", full));
        FT_TRY(unary(ctx, SHIFT, h, &y));
        FT_TRY(unary(ctx, SQUARE, y, &z));
        FT_TRY(ft_segment_end(ctx, 1, &z));
    } else {
        FT_TRY(unary(ctx, reader, where == LEAF_SAVED ? x : h, &y));
        FT_TRY(unary(ctx, SHIFT, y, &z));
    }
    FT_TRY(ft_tape_end(tape));
    if (where == LEAF_SAVED) FT_TRY(write_by(ctx, how, x));
    if (where == VALUE_SAVED || where == REPLAY_READS || where == NOT_SAVED)
        FT_TRY(write_by(ctx, how, h));
    if (where == OUTPUT_SAVED) FT_TRY(write_by(ctx, how, y));
    FT_TRY(leaf_create(ctx, 3, 0, FT_TAG_PARAM, &d));
    ft_status status = ft_backward(tape, z, d);
    *refused = status == FT_ERR_STATE && strstr(ft_last_error(), "written after") != NULL;
    CHECK(*refused || status == FT_OK);
    FT_TRY(ft_tape_reset(tape));
    ft_tape_free(tape);
    if (status == FT_OK) ft_tensor_free(z);
    ft_tensor_free(x);
    CHECK(live(ctx) == before);
    return FT_OK;
}

static ft_status version_rank(ft_ctx *ctx, void *user)
{
    (void)user;
    FT_TRY(register_rows(ctx));
    for (int how = 0; how < WRITES; how++)
        for (int where = 0; where < PLACES; where++) {
            int refused, must = where != NOT_SAVED && where != BEFORE_USE;
            if (how == BY_VIEW && where != LEAF_SAVED) continue; /* values have no views */
            FT_TRY(version_case(ctx, how, where, &refused));
            if (refused != must)
                return ft_error(FT_ERR_DATA, "write %d at place %d: refused %d", how, where,
                                refused);
        }
    return FT_OK;
}

/* Backward refuses values that were written, in whatever way, after forward read or made them; what
   nobody reads may be written, and so may what is read later. */
static void versions(void **state)
{
    (void)state;
    run_on(FT_CPU, version_rank, NULL);
    run_on(FT_META, version_rank, NULL);
}
/* ------------------------------------------------------------------------ in place, freed, gone */

static ft_status in_place_rank(ft_ctx *ctx, void *user)
{
    ft_tape *tape, *other;
    ft_tensor *x, *h, *y, *z, *view;
    ft_sac sac;
    int64_t n = N;
    (void)user;
    memset(&sac, 0, sizeof sac);
    FT_TRY(register_rows(ctx));
    FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
    FT_TRY(ft_tensor_view(x, &view, 0, 1, &n));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_create(ctx, &other));

    /* Without a tape it is a plain overwrite: the handle is gone, the bytes stay. */
    FT_TRY(leaf_create(ctx, 1, 0, FT_TAG_PARAM, &h));
    size_t before = live(ctx);
    FT_TRY(unary(ctx, SCALE, h, &y));
    CHECK(live(ctx) == before);
    double scaled[N];
    for (int i = 0; i < N; i++) scaled[i] = -0.75 * (double)leaf_value(1, i);
    FT_TRY(same_values(y, scaled));
    ft_tensor_free(y);
    REFUSED(unary(ctx, SCALE, view, &y), FT_ERR_STATE, "it is a view");

    FT_TRY(ft_tape_begin(tape));
    REFUSED(unary(ctx, SCALE, x, &y), FT_ERR_STATE, "would be lost");
    FT_TRY(unary(ctx, SHIFT, x, &h));
    FT_TRY(unary(ctx, SQUARE, h, &y));
    REFUSED(unary(ctx, SCALE, h, &z), FT_ERR_STATE, "own scale would write over own shift");
    CHECK(strstr(ft_last_error(), "a backward will read it"));
    FT_TRY(unary(ctx, RELU, x, &h));
    REFUSED(unary(ctx, SCALE, h, &z), FT_ERR_STATE, "a backward will read it"); /* its producer's */
    FT_TRY(unary(ctx, SHIFT, x, &h));
    sac.kind = FT_SAC_MASK;
    sac.mask = 1;
    FT_TRY(ft_segment_begin(ctx, "s", sac));
    FT_TRY(unary(ctx, SHIFT, h, &y)); /* dropped: its replay reads h */
    FT_TRY(unary(ctx, SQUARE, y, &z));
    REFUSED(unary(ctx, SCALE, h, &z), FT_ERR_STATE, "a backward will read it");
    FT_TRY(ft_segment_end(ctx, 0, NULL));
    FT_TRY(unary(ctx, SHIFT, x, &h));
    FT_TRY(unary(ctx, SCALE, h, &y));
    REFUSED(unary(ctx, SQUARE, h, &z), FT_ERR_STATE, "which an in-place op took over");
    REFUSED(unary(ctx, SCALE, h, &z), FT_ERR_STATE, "which an in-place op took over");
    REFUSED(ft_fill(h, 0, ft_stream_get(ctx, FT_STREAM_COMPUTE)), FT_ERR_STATE, "took over");
    FT_TRY(ft_tape_end(tape));
    REFUSED(unary(ctx, SCALE, y, &z), FT_ERR_STATE, "a tape that is not recording");
    FT_TRY(ft_tape_begin(other));
    REFUSED(unary(ctx, SCALE, y, &z), FT_ERR_STATE, "not on the current tape");
    FT_TRY(ft_tape_end(other));
    return FT_OK;
}

static void in_place(void **state)
{
    (void)state;
    run_on(FT_CPU, in_place_rank, NULL);
    run_on(FT_META, in_place_rank, NULL);
}

/* Writes out[0] where it stands: right only if output 0 holds input 0's values when it starts. */
static ft_status over_itself(const ft_op_call *call)
{
    for (int64_t i = 0; i < call->out[0].shape[0]; i++) floats(&call->out[0])[i] *= -0.75f;
    return FT_OK;
}

static ft_status over_itself_backward(const ft_op_call *call)
{
    for (int64_t i = 0; i < call->in[0].shape[0]; i++)
        give(call, 0, i, -0.75f * floats(&call->dout[0])[i]);
    return FT_OK;
}

/* h is dropped, read by a square, and overwritten: h and what is written over it both come back. */
static ft_status in_place_replay_rank(ft_ctx *ctx, void *user)
{
    ft_op row = row_make("over itself", 1, 1);
    ft_tape *tape;
    ft_tensor *x, *h, *s, *o, *q, *y, *d;
    ft_sac full;
    double want[N];
    (void)user;
    memset(&full, 0, sizeof full);
    full.kind = FT_SAC_FULL;
    row.flags = FT_OP_INPLACE;
    row.forward = over_itself;
    row.backward = over_itself_backward;
    row.cost = NULL;
    FT_TRY(register_rows(ctx));
    FT_TRY(ft_op_register(ctx, &row));
    FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
    FT_TRY(leaf_create(ctx, 3, 0, FT_TAG_PARAM, &d));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_segment_begin(ctx, "s", full));
    FT_TRY(unary(ctx, SHIFT, x, &h));
    FT_TRY(unary(ctx, SQUARE, h, &s));
    FT_TRY(ft_apply(ctx, &row, &h, NULL, &o));
    FT_TRY(unary(ctx, SQUARE, o, &q));
    FT_TRY(binary(ctx, ADD, s, q, &y));
    FT_TRY(ft_segment_end(ctx, 1, &y));
    FT_TRY(ft_tape_end(tape));
    CHECK(live(ctx) == 3 * BUF); /* x, d, y: h and o went at the segment's end */
    FT_TRY(ft_backward(tape, y, d));
    for (int i = 0; i < N; i++) { /* y = h^2/2 + (3/4 h)^2/2 */
        double a = (double)leaf_value(0, i) + 0.25;
        want[i] = (double)leaf_value(3, i) * (a + 0.5625 * a);
    }
    FT_TRY(same_values(x->grad, want));
    ft_flops f;
    ft_flops_get(ctx, &f);
    CHECK(f.replay == kind_flops(SHIFT)); /* h once, and the in-place op, which costs 0 here */
    ft_tape_free(tape);
    return ft_sync(ctx);
}

static void in_place_op_is_replayed_while_its_input_is_needed(void **state)
{
    (void)state;
    run_on(FT_CPU, in_place_replay_rank, NULL);
    run_on(FT_META, in_place_replay_rank, NULL);
}

static ft_status gone_rank(ft_ctx *ctx, void *user)
{
    ft_tape *tape;
    ft_tensor *x, *h, *y, *kept, *z, *results[2];
    ft_sac none;
    int64_t one = 1;
    float values[N];
    (void)user;
    memset(&none, 0, sizeof none);
    FT_TRY(register_rows(ctx));
    FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(unary(ctx, SHIFT, x, &h));
    FT_TRY(unary(ctx, SQUARE, h, &y));
    ft_tensor_free(h); /* saved by the square: the bytes stay, the handle does not */
    CHECK(live(ctx) == 3 * BUF && ft_tensor_need(h) == 1);
    REFUSED(unary(ctx, SQUARE, h, &z), FT_ERR_STATE, "after it was freed");
    REFUSED(ft_download(h, values), FT_ERR_STATE, "after it was freed");
    REFUSED(ft_upload(h, values), FT_ERR_STATE, "after it was freed");
    ft_tensor_free(h); /* a second time is harmless on a tape */
    FT_TRY(ft_tensor_view(y, &z, 0, 1, &one));
    REFUSED(unary(ctx, SQUARE, z, &kept), FT_ERR_STATE, "a view of a recorded tensor");
    ft_tensor_free(z);
    FT_TRY(ft_segment_begin(ctx, "layer", none));
    FT_TRY(unary(ctx, SHIFT, y, &h));
    FT_TRY(unary(ctx, SQUARE, h, &kept));
    results[0] = y; /* made outside: fine, and it stays the caller's */
    results[1] = kept;
    FT_TRY(ft_segment_end(ctx, 2, results));
    REFUSED(unary(ctx, SQUARE, h, &z), FT_ERR_STATE, "list it among the results of ft_segment_end");
    FT_TRY(unary(ctx, SQUARE, kept, &z));
    FT_TRY(unary(ctx, SQUARE, y, &z));
    FT_TRY(ft_segment_begin(ctx, "layer", none));
    FT_TRY(unary(ctx, SHIFT, y, &h));
    ft_tensor_free(h);
    REFUSED(ft_segment_end(ctx, 1, &h), FT_ERR_STATE, "ft_segment_end reads");
    FT_TRY(ft_segment_end(ctx, 0, NULL));
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_tape_reset(tape));
    CHECK(live(ctx) == BUF);

    /* Without a tape a segment only frees. */
    FT_TRY(ft_segment_begin(ctx, "layer", none));
    FT_TRY(unary(ctx, SHIFT, x, &h));
    FT_TRY(unary(ctx, SQUARE, h, &kept));
    CHECK(live(ctx) == 3 * BUF);
    FT_TRY(ft_segment_end(ctx, 1, &kept));
    CHECK(live(ctx) == 2 * BUF);
    ft_tensor_free(kept);
    CHECK(live(ctx) == BUF);
    return FT_OK;
}

static void handles_that_are_gone(void **state)
{
    (void)state;
    run_on(FT_CPU, gone_rank, NULL);
    run_on(FT_META, gone_rank, NULL);
}

/* ------------------------------------------------------------------------- gradients of leaves */

static ft_status backward_of(ft_ctx *ctx, ft_tape *tape, ft_tensor *y)
{
    ft_tensor *d;
    FT_TRY(leaf_create(ctx, 3, 0, FT_TAG_PARAM, &d));
    return ft_backward(tape, y, d);
}

static ft_status leaves_rank(ft_ctx *ctx, void *user)
{
    ft_tape *tape;
    ft_tensor *x, *w, *h, *y, *s;
    double want[N];
    (void)user;
    FT_TRY(register_rows(ctx));
    FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
    FT_TRY(leaf_create(ctx, 1, 1, FT_TAG_PARAM, &w));
    FT_TRY(ft_tape_create(ctx, &tape));
    for (int round = 1; round <= 3; round++) { /* y = x w + x^2: d/dx = w + 2 x, d/dw = x */
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(binary(ctx, MUL, x, w, &h));
        FT_TRY(binary(ctx, MUL, x, x, &s));
        FT_TRY(binary(ctx, ADD, h, s, &y));
        ft_tensor_free(h);
        ft_tensor_free(s);
        FT_TRY(ft_tape_end(tape));
        FT_TRY(backward_of(ctx, tape, y));
        for (int i = 0; i < N; i++)
            want[i] = round * (double)leaf_value(3, i) *
                      ((double)leaf_value(1, i) + 2 * (double)leaf_value(0, i));
        FT_TRY(same_values(x->grad, want));
        for (int i = 0; i < N; i++)
            want[i] = round * (double)leaf_value(3, i) * (double)leaf_value(0, i);
        FT_TRY(same_values(w->grad, want));
        /* The root is a tensor of the caller's now: a value, usable, to be freed by him. */
        for (int i = 0; i < N; i++)
            want[i] = (double)leaf_value(0, i) * ((double)leaf_value(1, i) +
                                                  (double)leaf_value(0, i));
        FT_TRY(same_values(y, want));
        CHECK(!y->requires_grad && live(ctx) == 5 * BUF);
        ft_mem_stats mem;
        ft_mem_get(ctx, &mem);
        CHECK(mem.live[FT_TAG_GRAD] == 2 * BUF && mem.live[FT_TAG_PARAM] == 2 * BUF);
        ft_tensor_free(y);
        CHECK(live(ctx) == 4 * BUF);
    }
    /* Giving the gradient back starts anew. */
    ft_tensor_free(x->grad);
    x->grad = NULL;
    CHECK(live(ctx) == 3 * BUF);
    ft_tape_free(tape);
    ft_tensor_free(x);
    ft_tensor_free(w);
    CHECK(live(ctx) == 0);
    return ft_sync(ctx);
}

static void leaves_add_up_over_backwards(void **state)
{
    (void)state;
    run_on(FT_CPU, leaves_rank, NULL);
    run_on(FT_META, leaves_rank, NULL);
}

typedef struct sink { ft_tensor *buffer; int calls, fail; } sink;

static ft_status sink_get(void *user, ft_tensor *param, ft_tensor **grad, int *accumulate)
{
    sink *s = (sink *)user;
    (void)param;
    if (s->fail) return ft_error(FT_ERR_STATE, "the sink is closed");
    *grad = s->buffer;
    *accumulate = s->calls++ > 0;
    return FT_OK;
}

static ft_status sink_rank(ft_ctx *ctx, void *user)
{
    ft_tape *tape;
    ft_tensor *x, *h, *y, *z;
    sink s;
    double want[N];
    (void)user;
    FT_TRY(register_rows(ctx));
    FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
    /* It holds anything: the first write must not add. */
    FT_TRY(leaf_create(ctx, 4, 0, FT_TAG_PARAM, &s.buffer));
    s.calls = s.fail = 0;
    x->sink.get = sink_get;
    x->sink.user = &s;
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(unary(ctx, SHIFT, x, &h));    /* passes: copied into the buffer, or added */
    FT_TRY(binary(ctx, MUL, x, h, &y));  /* does not add: through a temporary */
    FT_TRY(binary(ctx, AVERAGE, y, x, &z)); /* adds by itself */
    ft_tensor_free(h);
    ft_tensor_free(y);
    FT_TRY(ft_tape_end(tape));
    size_t before = live(ctx);
    FT_TRY(backward_of(ctx, tape, z));
    CHECK(s.calls == 3 && x->grad == NULL);
    CHECK(live(ctx) == before - BUF); /* h, which the product had saved */
    for (int i = 0; i < N; i++)       /* z = (x (x + 1/4) + x) / 2 */
        want[i] = (double)leaf_value(3, i) * (2 * (double)leaf_value(0, i) + 1.25) / 2;
    FT_TRY(same_values(s.buffer, want));
    ft_tensor_free(z);
    s.fail = 1;
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(unary(ctx, SQUARE, x, &y));
    FT_TRY(ft_tape_end(tape));
    REFUSED(backward_of(ctx, tape, y), FT_ERR_STATE, "the sink is closed");
    FT_TRY(ft_tape_reset(tape));
    CHECK(live(ctx) == 2 * BUF);
    return ft_sync(ctx);
}

static void sinks(void **state)
{
    (void)state;
    run_on(FT_CPU, sink_rank, NULL);
    run_on(FT_META, sink_rank, NULL);
}

/* --------------------------------------------------------------------------- frozen weights */

enum { ROWS_ = 24, IN_ = 40, OUT_ = 56 }; /* x [24,40] 3840 bytes, w [56,40] 8960, y [24,56] 5376 */

static ft_status matrix(ft_ctx *ctx, int64_t a, int64_t b, int requires_grad, ft_tensor **out)
{
    int64_t shape[2];
    shape[0] = a;
    shape[1] = b;
    FT_TRY(ft_tensor_create(ctx, out, FT_F32, 2, shape, FT_TAG_PARAM));
    (*out)->requires_grad = requires_grad;
    return ft_fill(*out, 0.125, ft_stream_get(ctx, FT_STREAM_COMPUTE));
}

static size_t act(const ft_ctx *ctx)
{
    ft_mem_stats s;
    ft_mem_get(ctx, &s);
    return s.live[FT_TAG_ACT];
}

/* h = scale(x0), y = h w^T; the handle of h is freed. kept: what stays of h. */
static ft_status frozen_case(ft_ctx *ctx, int x_grad, int w_grad, size_t kept)
{
    ft_tape *tape;
    ft_tensor *x, *w, *h, *y, *loss;
    FT_TRY(matrix(ctx, ROWS_, IN_, x_grad, &x));
    FT_TRY(matrix(ctx, OUT_, IN_, w_grad, &w));
    size_t before = live(ctx);
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_scale(ctx, &h, x, 2));
    FT_TRY(ft_linear(ctx, &y, h, w, NULL));
    ft_tensor_free(h);
    CHECK(act(ctx) == kept + 5376);
    CHECK(ft_tensor_need(w) == x_grad);
    CHECK(y->requires_grad == (x_grad || w_grad));
    FT_TRY(ft_mean(ctx, &loss, y));
    ft_tensor_free(y);
    CHECK(act(ctx) == kept + 256);
    FT_TRY(ft_tape_end(tape));
    if (x_grad || w_grad) FT_TRY(ft_backward(tape, loss, NULL));
    else REFUSED(ft_backward(tape, loss, NULL), FT_ERR_STATE, "nothing that requires a gradient");
    if (x_grad || w_grad) ft_tensor_free(loss);
    CHECK((x->grad != NULL) == x_grad && (w->grad != NULL) == w_grad);
    ft_tape_free(tape);
    CHECK(act(ctx) == 0);
    CHECK(live(ctx) == before + (size_t)(3840 * x_grad + 8960 * w_grad));
    ft_tensor_free(x);
    ft_tensor_free(w);
    return FT_OK;
}

static ft_status frozen_rank(ft_ctx *ctx, void *user)
{
    (void)user;
    FT_TRY(frozen_case(ctx, 1, 1, 3840)); /* dw reads h, dx reads w */
    FT_TRY(frozen_case(ctx, 1, 0, 0));    /* only dx: h is gone when its handle is */
    FT_TRY(frozen_case(ctx, 0, 1, 3840));
    FT_TRY(frozen_case(ctx, 0, 0, 0));
    CHECK(live(ctx) == 0);
    return FT_OK;
}

static void frozen_weights_save_nothing(void **state)
{
    (void)state;
    run_on(FT_CPU, frozen_rank, NULL);
    run_on(FT_META, frozen_rank, NULL);
}

/* ------------------------------------------------------------------------ backward in two halves

   Two linear layers: between the halves each holds its input and the gradient of its output, under
   every policy; the weights are not read in the second half. */

static ft_status halves_case(ft_ctx *ctx, ft_sac_kind policy, float grads[2][OUT_ * IN_])
{
    ft_tape *tape;
    ft_tensor *x, *w1, *w2, *h, *y, *s, *z, *loss;
    ft_sac sac;
    memset(&sac, 0, sizeof sac);
    sac.kind = policy;
    FT_TRY(matrix(ctx, ROWS_, IN_, 0, &x));
    FT_TRY(matrix(ctx, OUT_, IN_, 1, &w1));
    FT_TRY(matrix(ctx, IN_, OUT_, 1, &w2));
    FT_TRY(ft_tape_create(ctx, &tape));
    REFUSED(ft_backward_weights(tape), FT_ERR_STATE, "ft_backward_inputs");
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_segment_begin(ctx, "s", sac));
    FT_TRY(ft_scale(ctx, &h, x, 2));
    FT_TRY(ft_linear(ctx, &y, h, w1, NULL));
    FT_TRY(ft_silu(ctx, &s, y));
    FT_TRY(ft_linear(ctx, &z, s, w2, NULL));
    FT_TRY(ft_segment_end(ctx, 1, &z));
    FT_TRY(ft_mean(ctx, &loss, z));
    ft_tensor_free(z);
    FT_TRY(ft_tape_end(tape));
    FT_TRY(ft_backward_inputs(tape, loss, NULL));
    CHECK(act(ctx) == 256 + (3840 + 5376) + (5376 + 3840));
    CHECK(w1->grad == NULL && w2->grad == NULL);
    CHECK(ft_tensor_need(w1) == 0 && ft_tensor_need(w2) == 0);
    REFUSED(ft_backward(tape, loss, NULL), FT_ERR_STATE, "waits for ft_backward_weights");
    REFUSED(ft_backward_inputs(tape, loss, NULL), FT_ERR_STATE, "waits for ft_backward_weights");
    FT_TRY(ft_fill(w1, 0, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(ft_fill(w2, 0, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    FT_TRY(ft_backward_weights(tape));
    CHECK(act(ctx) == 256);
    REFUSED(ft_backward_weights(tape), FT_ERR_STATE, "ft_backward_inputs");
    ft_tensor_free(loss);
    FT_TRY(ft_download(w1->grad, grads[0]));
    FT_TRY(ft_download(w2->grad, grads[1]));
    ft_tape_free(tape);
    ft_tensor_free(x);
    ft_tensor_free(w1);
    ft_tensor_free(w2);
    CHECK(live(ctx) == 0);
    return FT_OK;
}

static ft_status halves_rank(ft_ctx *ctx, void *user)
{
    typedef float pair[2][OUT_ * IN_];
    pair *grads = (pair *)ft_host_alloc(ctx, 2 * sizeof *grads);
    double half = 0.25 * 0.125 * IN_, g = 1.0 / (ROWS_ * IN_), slope, sigmoid;
    (void)user;
    if (!grads) return FT_ERR_OOM;
    for (int policy = 0; policy < 3; policy++) {
        FT_TRY(halves_case(ctx, (ft_sac_kind)policy, grads[policy > 0]));
        CHECK(policy == 0 || memcmp(grads[0], grads[1], sizeof *grads) == 0);
    }
    if (!on_cpu(ctx)) return FT_OK;
    /* All weights are 1/8 and all of h is 1/4, so all of y is `half`. */
    sigmoid = 1 / (1 + exp(-half));
    slope = sigmoid * (1 + half * (1 - sigmoid));
    for (int i = 0; i < OUT_ * IN_; i++) {
        double dw1 = ROWS_ * 0.25 * slope * 0.125 * IN_ * g, dw2 = ROWS_ * half * sigmoid * g;
        CHECK(fabs((double)grads[0][0][i] - dw1) < 1e-5 * dw1);
        CHECK(fabs((double)grads[0][1][i] - dw2) < 1e-5 * dw2);
    }
    return FT_OK;
}

static void backward_in_two_halves(void **state)
{
    (void)state;
    run_on(FT_CPU, halves_rank, NULL);
    run_on(FT_META, halves_rank, NULL);
}

/* ----------------------------------------------------------------- roots, outputs, tapes, marks */

/* The root stands in the middle of the tape: what was recorded after it gets no gradient. */
static ft_status root_rank(ft_ctx *ctx, void *user)
{
    ft_tape *tape;
    ft_tensor *x, *w, *h, *after, *p, *q;
    counts c;
    double want[N];
    (void)user;
    memset(&c, 0, sizeof c);
    FT_TRY(register_rows(ctx));
    FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
    FT_TRY(leaf_create(ctx, 1, 1, FT_TAG_PARAM, &w));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(apply(ctx, SQUARE, x, NULL, &h, NULL, &c, 0));
    FT_TRY(apply(ctx, MUL, h, w, &after, NULL, &c, 1));
    FT_TRY(ft_tape_end(tape));
    FT_TRY(backward_of(ctx, tape, h));
    FT_TRY(ft_sync(ctx));
    CHECK(c.backward[1] == 0 && w->grad == NULL);
    for (int i = 0; i < N; i++) want[i] = (double)leaf_value(3, i) * (double)leaf_value(0, i);
    FT_TRY(same_values(x->grad, want));
    CHECK(live(ctx) == 4 * BUF); /* x, w, x's gradient, the root: `after` went with the tape */

    /* The root is input like any other tensor, also of the same tape. */
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(apply(ctx, MUL, h, w, &after, NULL, &c, 1));
    ft_tensor_free(h);
    CHECK(live(ctx) == 5 * BUF); /* saved for w's gradient */
    FT_TRY(ft_tape_end(tape));
    FT_TRY(backward_of(ctx, tape, after));
    CHECK(live(ctx) == 5 * BUF); /* h went, w's gradient came */
    for (int i = 0; i < N; i++)
        want[i] = (double)leaf_value(3, i) * pow((double)leaf_value(0, i), 2) / 2;
    FT_TRY(same_values(w->grad, want));
    ft_tensor_free(after);

    /* One output of two is used: the other's gradient is absent, which means zero. */
    for (int which = 0; which < 2; which++) {
        ft_tensor_free(x->grad);
        x->grad = NULL;
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(apply(ctx, SPLIT, x, NULL, &p, &q, NULL, 0));
        ft_tensor_free(which ? p : q);
        FT_TRY(ft_tape_end(tape));
        FT_TRY(backward_of(ctx, tape, which ? q : p));
        for (int i = 0; i < N; i++)
            want[i] = (double)leaf_value(3, i) * (which ? -1 : (double)leaf_value(0, i));
        FT_TRY(same_values(x->grad, want));
        ft_tensor_free(which ? q : p);
    }
    CHECK(live(ctx) == 4 * BUF);

    /* With a gradient given, the root's handle may be gone; then its value goes too. */
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(unary(ctx, SQUARE, x, &h));
    ft_tensor_free(h);
    CHECK(live(ctx) == 4 * BUF);
    FT_TRY(ft_tape_end(tape));
    REFUSED(ft_backward(tape, h, NULL), FT_ERR_STATE, "not a live tensor");
    FT_TRY(backward_of(ctx, tape, h));
    CHECK(live(ctx) == 4 * BUF);
    return ft_sync(ctx);
}

static void roots_and_unused_outputs(void **state)
{
    (void)state;
    run_on(FT_CPU, root_rank, NULL);
    run_on(FT_META, root_rank, NULL);
}

/* Micro-batches in flight: two tapes over the same leaves, backward in either order. */
static ft_status two_tapes_rank(ft_ctx *ctx, void *user)
{
    ft_sac full;
    (void)user;
    memset(&full, 0, sizeof full);
    full.kind = FT_SAC_FULL;
    FT_TRY(register_rows(ctx));
    for (int first = 0; first < 2; first++) {
        ft_tape *tape[2];
        ft_tensor *x, *w, *h, *y[2];
        double want[N];
        FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
        FT_TRY(leaf_create(ctx, 1, 1, FT_TAG_PARAM, &w));
        for (int k = 0; k < 2; k++) {
            FT_TRY(ft_tape_create(ctx, &tape[k]));
            FT_TRY(ft_tape_begin(tape[k]));
            FT_TRY(ft_segment_begin(ctx, "s", full));
            FT_TRY(unary(ctx, k ? SQUARE : SHIFT, x, &h));
            FT_TRY(binary(ctx, MUL, h, w, &y[k]));
            FT_TRY(ft_segment_end(ctx, 1, &y[k]));
            FT_TRY(ft_tape_end(tape[k]));
            CHECK(live(ctx) == (size_t)(3 + k) * BUF);
        }
        FT_TRY(backward_of(ctx, tape[first], y[first]));
        CHECK(live(ctx) == 6 * BUF); /* x, w, two roots, two gradients */
        ft_tensor_free(y[first]);
        ft_tape_free(tape[first]);
        FT_TRY(backward_of(ctx, tape[!first], y[!first]));
        ft_tensor_free(y[!first]);
        ft_tape_free(tape[!first]);
        for (int i = 0; i < N; i++)
            want[i] = (double)leaf_value(3, i) * (double)leaf_value(1, i) *
                      (1 + (double)leaf_value(0, i));
        FT_TRY(same_values(x->grad, want));
        ft_tensor_free(x);
        ft_tensor_free(w);
        CHECK(live(ctx) == 0);
    }
    return ft_sync(ctx);
}

static void two_tapes(void **state)
{
    (void)state;
    run_on(FT_CPU, two_tapes_rank, NULL);
    run_on(FT_META, two_tapes_rank, NULL);
}

typedef struct passes {
    int order[8], n, fail_at;
    ft_phase phase[8];
    ft_tensor *w;
    int w_need[8];
} passes;
typedef struct pass { passes *all; int number; } pass;

static ft_status pass_mark(ft_ctx *ctx, void *user, ft_phase phase)
{
    const pass *p = (const pass *)user;
    (void)ctx;
    p->all->phase[p->all->n] = phase;
    if (p->number == p->all->fail_at) return ft_error(FT_ERR_STATE, "mark %d fails", p->number);
    p->all->w_need[p->all->n] = ft_tensor_need(p->all->w);
    p->all->order[p->all->n++] = p->number;
    return FT_OK;
}

/* A reset tells all marks, the last one first, while it records too; but not past one that fails,
   which leaves the tape empty all the same. */
static ft_status drop_marks(ft_ctx *ctx, pass *p, int fail_at)
{
    ft_tape *tape;
    ft_tensor *x, *y;
    passes *all = p[0].all;
    FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
    FT_TRY(ft_tape_create(ctx, &tape));
    memset(all, 0, sizeof *all);
    all->w = x;
    all->fail_at = fail_at;
    FT_TRY(ft_tape_begin(tape));
    for (int i = 0; i < 3; i++) FT_TRY(ft_tape_mark(ctx, pass_mark, &p[i]));
    FT_TRY(binary(ctx, MUL, x, x, &y));
    if (fail_at == 1) REFUSED(ft_tape_reset(tape), FT_ERR_STATE, "mark 1 fails");
    else FT_TRY(ft_tape_reset(tape));
    CHECK(all->n == (fail_at == 1 ? 1 : 3) && !ft_tape_current(ctx) && ft_tensor_need(x) == 0);
    for (int i = 0; i < all->n; i++)
        CHECK(all->order[i] == 2 - i && all->phase[i] == FT_PHASE_DROPPED);
    FT_TRY(ft_tape_reset(tape)); /* nothing is left to tell */
    CHECK(all->n == (fail_at == 1 ? 1 : 3));
    ft_tape_free(tape);
    ft_tensor_free(x);
    return FT_OK;
}

static ft_status marks_rank(ft_ctx *ctx, void *user)
{
    ft_tape *tape;
    ft_tensor *x, *h, *y;
    passes all;
    pass p[4];
    (void)user;
    FT_TRY(register_rows(ctx));
    for (int i = 0; i < 4; i++) {
        p[i].all = &all;
        p[i].number = i;
    }
    for (int fail_at = 9; fail_at >= 1; fail_at -= 8) {
        memset(&all, 0, sizeof all);
        all.fail_at = fail_at;
        FT_TRY(ft_tape_mark(ctx, pass_mark, &p[3])); /* nothing records: nothing happens */
        FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
        all.w = x;
        FT_TRY(ft_tape_create(ctx, &tape));
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(ft_tape_mark(ctx, pass_mark, &p[0]));
        FT_TRY(binary(ctx, MUL, x, x, &h));
        FT_TRY(ft_tape_mark(ctx, pass_mark, &p[1]));
        FT_TRY(binary(ctx, MUL, h, x, &y));
        FT_TRY(ft_tape_mark(ctx, pass_mark, &p[2]));
        CHECK(ft_tensor_need(x) == 3);
        FT_TRY(ft_tape_end(tape));
        CHECK(all.n == 0);
        if (fail_at == 1) REFUSED(backward_of(ctx, tape, y), FT_ERR_STATE, "mark 1 fails");
        else FT_TRY(backward_of(ctx, tape, y));
        CHECK(all.n == (fail_at == 1 ? 1 : 3));
        CHECK(all.order[0] == 2 && all.w_need[0] == 3);
        CHECK(fail_at == 1 || (all.order[1] == 1 && all.w_need[1] == 2));
        CHECK(fail_at == 1 || (all.order[2] == 0 && all.w_need[2] == 0));
        ft_tape_free(tape); /* mark 0 has not heard of a backward */
        CHECK(ft_tensor_need(x) == 0 && all.phase[0] == FT_PHASE_WHOLE);
        CHECK(all.n == (fail_at == 1 ? 2 : 3) && all.order[all.n - 1] == 0);
        CHECK(all.phase[all.n - 1] == (fail_at == 1 ? FT_PHASE_DROPPED : FT_PHASE_WHOLE));
    }
    FT_TRY(drop_marks(ctx, p, 9));
    FT_TRY(drop_marks(ctx, p, 1));
    /* The context's end calls none: these would be refused, and the launch with them. */
    all.fail_at = 0;
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    return ft_tape_mark(ctx, pass_mark, &p[0]);
}

static void marks(void **state)
{
    (void)state;
    run_on(FT_CPU, marks_rank, NULL);
    run_on(FT_META, marks_rank, NULL);
}

/* ------------------------------------------------------------------------ deferred, no inputs */

static ft_status deferred_case(ft_ctx *ctx, int read, int frozen, counts *c)
{
    ft_tape *tape;
    ft_tensor *x, *h, *y;
    double want[N];
    float values[N];
    ft_flops before, now;
    memset(c, 0, sizeof *c);
    ft_flops_get(ctx, &before);
    FT_TRY(leaf_create(ctx, 0, !frozen, FT_TAG_PARAM, &x));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(unary(ctx, SHIFT, x, &h));
    FT_TRY(apply(ctx, LATE, h, NULL, &y, NULL, c, 0));
    ft_tensor_free(h);
    FT_TRY(ft_tape_end(tape));
    /* Put off: h waits, y has no bytes yet. Read, or without a gradient to wait for: y is there. */
    CHECK(live(ctx) == 2 * BUF && ft_tensor_present(y) == frozen);
    if (read) FT_TRY(ft_download(y, values));
    CHECK(live(ctx) == (size_t)(2 + (read && !frozen)) * BUF);
    FT_TRY(ft_sync(ctx));
    if (on_cpu(ctx)) CHECK(c->forward[0] == (read || frozen));
    if (frozen) {
        ft_tape_free(tape);
        ft_tensor_free(x);
        return FT_OK;
    }
    FT_TRY(backward_of(ctx, tape, y));
    FT_TRY(ft_sync(ctx));
    if (on_cpu(ctx)) CHECK(c->forward[0] == read && c->backward[0] == 1);
    /* One forward and one backward each, whichever kernel did them; SHIFT's has none to run. */
    double both = kind_flops(SHIFT) + kind_flops(LATE);
    ft_flops_get(ctx, &now);
    CHECK(now.forward - before.forward == both);
    CHECK(now.backward - before.backward == 2 * kind_flops(LATE));
    CHECK(now.replay == before.replay);
    for (int i = 0; i < N; i++) {
        double a = (double)leaf_value(0, i) + 0.25;
        want[i] = a * a / 2;
    }
    FT_TRY(same_values(y, want));
    for (int i = 0; i < N; i++)
        want[i] = (double)leaf_value(3, i) * ((double)leaf_value(0, i) + 0.25);
    FT_TRY(same_values(x->grad, want));
    ft_tape_free(tape);
    ft_tensor_free(y);
    ft_tensor_free(x);
    CHECK(live(ctx) == 0);
    return FT_OK;
}

static ft_status deferred_rank(ft_ctx *ctx, void *user)
{
    counts *c = (counts *)ft_host_alloc(ctx, sizeof *c);
    (void)user;
    if (!c) return FT_ERR_OOM;
    FT_TRY(register_rows(ctx));
    for (int read = 0; read < 2; read++)
        for (int frozen = 0; frozen < 2; frozen++) FT_TRY(deferred_case(ctx, read, frozen, c));
    return FT_OK;
}

static void deferred_ops(void **state)
{
    (void)state;
    run_on(FT_CPU, deferred_rank, NULL);
    run_on(FT_META, deferred_rank, NULL);
}

static ft_status source_infer(ft_op_call *call)
{
    call->out[0].present = 1;
    call->out[0].dtype = FT_F32;
    call->out[0].ndim = 1;
    call->out[0].shape[0] = N;
    return FT_OK;
}

static ft_status source_forward(const ft_op_call *call) /* a mask, say: a function of its seed */
{
    for (int i = 0; i < N; i++) floats(&call->out[0])[i] = (float)((i * 7 + call->attr.i[1]) % 3);
    return FT_OK;
}

static ft_status source_rank(ft_ctx *ctx, void *user)
{
    ft_op row = row_make("source", 0, 1);
    ft_tape *tape;
    ft_tensor *x, *mask, *y, *none = NULL;
    ft_attr attr;
    ft_sac full;
    double want[N];
    (void)user;
    memset(&attr, 0, sizeof attr);
    memset(&full, 0, sizeof full);
    attr.i[1] = 5;
    full.kind = FT_SAC_FULL;
    row.infer = source_infer;
    row.forward = source_forward;
    row.backward = NULL;
    row.cost = NULL;
    FT_TRY(register_rows(ctx));
    FT_TRY(ft_op_register(ctx, &row));
    FT_TRY(leaf_create(ctx, 0, 1, FT_TAG_PARAM, &x));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_tape_begin(tape));
    FT_TRY(ft_segment_begin(ctx, "s", full));
    FT_TRY(ft_apply(ctx, &row, &none, &attr, &mask));
    FT_TRY(binary(ctx, MUL, x, mask, &y));
    FT_TRY(ft_segment_end(ctx, 1, &y));
    FT_TRY(ft_tape_end(tape));
    CHECK(live(ctx) == 2 * BUF); /* the mask was dropped */
    FT_TRY(backward_of(ctx, tape, y));
    for (int i = 0; i < N; i++) want[i] = (double)leaf_value(3, i) * ((i * 7 + 5) % 3);
    FT_TRY(same_values(x->grad, want));
    ft_tape_free(tape);
    return ft_sync(ctx);
}

static void ops_without_inputs_are_replayed(void **state)
{
    (void)state;
    run_on(FT_CPU, source_rank, NULL);
    run_on(FT_META, source_rank, NULL);
}

/* -------------------------------------------------------------------- a Llama layer, every mask

   The built-in ops' rows as the manual states them: what each saves, what it replays from. x comes
   from an op outside the segment, the result x' is the root. */

enum { LB = 1, LT = 9, LC = 16, LH = 2, LK = 1, LD = 8, LF = 24, LQKV = (LH + 2 * LK) * LD };
enum { RMS, LINEAR, ROPE, ATTENTION, ADD_RMS, SWIGLU, ADD_OVER, TIMES, LLAMA_ROWS };

static ft_op llama_rows[LLAMA_ROWS];

static void llama_row(int which, int n_in, int n_out, unsigned saves0, unsigned saves1,
                      unsigned cheap, unsigned replay_from, unsigned flags)
{
    ft_op *row = &llama_rows[which];
    *row = row_make("built in", n_in, n_out);
    row->saves[0] = saves0;
    row->saves[1] = saves1;
    row->cheap = cheap;
    row->replay_from = replay_from;
    row->replay = replay_from ? own_replay : NULL;
    row->flags = flags;
}

static void llama_rows_make(void)
{
    unsigned x = FT_IN(0), w = FT_IN(1);
    llama_row(RMS, 2, 1, x | w, x, FT_OUT(0), 0, 0);
    llama_row(LINEAR, 2, 1, w, x, 0, 0, 0);
    llama_row(ROPE, 2, 1, w, 0, FT_OUT(0), 0, FT_OP_INPLACE);
    llama_rows[ROPE].grads = FT_IN(0);
    llama_row(ATTENTION, 1, 2, x | FT_OUT(0) | FT_OUT(1), 0, 0, 0, 0);
    llama_row(ADD_RMS, 3, 2, FT_OUT(0) | FT_IN(2), FT_OUT(0) | FT_IN(2), FT_OUT(1),
              FT_OUT(0) | FT_IN(2), FT_OP_GRAD_SAME_01);
    llama_rows[ADD_RMS].saves[2] = FT_OUT(0);
    llama_row(SWIGLU, 1, 1, x, 0, FT_OUT(0), 0, 0);
    llama_row(ADD_OVER, 2, 1, 0, 0, 0, 0, FT_OP_INPLACE | FT_OP_GRAD_PASS);
    llama_row(TIMES, 1, 1, 0, 0, FT_OUT(0), 0, 0);
}

enum { W_X, W_IN, W_QKV, W_ROPE, W_O, W_POST, W_GU, W_DOWN, WEIGHTS };

typedef struct layer layer;

typedef struct layer_at { layer *layer; int node; } layer_at; /* a mark after this node */

struct layer {
    ft_ctx *ctx;
    ft_dtype dtype;
    ft_tape *tape;
    model m;
    size_t base;
    ft_flops before;
    ft_tensor *w[WEIGHTS], *t[MOST]; /* t: by number in the second book */
    layer_at marks[MOST];
};

static size_t layer_bytes(const layer *l, int64_t n)
{
    size_t bytes = (size_t)n * (l->dtype == FT_BF16 ? 2 : 4);
    return (bytes + 255) / 256 * 256;
}

static ft_status layer_check(layer *l)
{
    size_t want = l->base + model_live(&l->m), have = live(l->ctx);
    if (have == want) return FT_OK;
    return ft_error(FT_ERR_DATA, "%zu bytes live, the second book says %zu", have - l->base,
                    want - l->base);
}

static ft_status layer_mark(ft_ctx *ctx, void *user, ft_phase phase)
{
    const layer_at *at = (const layer_at *)user;
    layer *l = at->layer;
    (void)ctx;
    for (int n = l->m.n_nodes - 1; n > at->node; n--)
        if (!l->m.nodes[n].done) model_backward_node(&l->m, n, phase);
    return layer_check(l);
}

/* Books an op that has just run with inputs `in` (numbers) and outputs y, z. */
static ft_status layer_op(layer *l, int row, const int *in, int64_t n, ft_tensor *y, int64_t nz,
                          ft_tensor *z)
{
    ft_flops now;
    ft_flops_get(l->ctx, &now);
    int k = model_record(&l->m, &llama_rows[row], in, layer_bytes(l, n),
                         now.forward - l->before.forward);
    int out = l->m.nodes[k].out[0];
    l->before = now;
    l->t[out] = y;
    if (llama_rows[row].n_out > 1) {
        l->t[out + 1] = z;
        l->m.values[out + 1].bytes = nz < 0 ? ((size_t)-nz * 4 + 255) / 256 * 256
                                            : layer_bytes(l, nz); /* < 0: fp32 whatever the dtype */
        if (!z) model_free(&l->m, out + 1);
    }
    l->marks[k].layer = l;
    l->marks[k].node = k;
    FT_TRY(ft_tape_mark(l->ctx, layer_mark, &l->marks[k]));
    return layer_check(l);
}

static void layer_free(layer *l, int number)
{
    ft_tensor_free(l->t[number]);
    model_free(&l->m, number);
}

enum { X0 = WEIGHTS, Y1, QKV_RAW, QKV, O, LSE, A, R, Y2, GU, P_, DN, X1 }; /* in the second book */

static ft_status layer_attention(layer *l)
{
    ft_ctx *ctx = l->ctx;
    ft_tensor *t, *z;
    int64_t c = LT * LC, q = LT * LQKV;
    FT_TRY(ft_rmsnorm(ctx, &t, l->t[X0], l->w[W_IN], 1e-5));
    { int in[3] = { X0, W_IN, 0 }; FT_TRY(layer_op(l, RMS, in, c, t, 0, NULL)); }
    FT_TRY(ft_linear(ctx, &t, l->t[Y1], l->w[W_QKV], NULL));
    { int in[3] = { Y1, W_QKV, 0 }; FT_TRY(layer_op(l, LINEAR, in, q, t, 0, NULL)); }
    layer_free(l, Y1);
    FT_TRY(ft_rope(ctx, &t, l->t[QKV_RAW], l->w[W_ROPE], LH, LK, LD));
    { int in[3] = { QKV_RAW, W_ROPE, 0 }; FT_TRY(layer_op(l, ROPE, in, q, t, 0, NULL)); }
    FT_TRY(ft_attention(ctx, &t, l->t[QKV], LH, LK, LD));
    { int in[3] = { QKV, 0, 0 };
      FT_TRY(layer_op(l, ATTENTION, in, LT * LH * LD, t, -LH * LT, NULL)); }
    layer_free(l, QKV);
    FT_TRY(ft_linear(ctx, &t, l->t[O], l->w[W_O], NULL));
    { int in[3] = { O, W_O, 0 }; FT_TRY(layer_op(l, LINEAR, in, c, t, 0, NULL)); }
    layer_free(l, O);
    FT_TRY(ft_add_rmsnorm(ctx, &t, &z, l->t[X0], l->t[A], l->w[W_POST], 1e-5));
    { int in[3] = { X0, A, W_POST }; FT_TRY(layer_op(l, ADD_RMS, in, c, t, c, z)); }
    layer_free(l, X0);
    layer_free(l, A);
    return FT_OK;
}

static ft_status layer_mlp(layer *l)
{
    ft_ctx *ctx = l->ctx;
    ft_tensor *t;
    int64_t c = LT * LC;
    FT_TRY(ft_linear(ctx, &t, l->t[Y2], l->w[W_GU], NULL));
    { int in[3] = { Y2, W_GU, 0 }; FT_TRY(layer_op(l, LINEAR, in, LT * 2 * LF, t, 0, NULL)); }
    layer_free(l, Y2);
    FT_TRY(ft_swiglu(ctx, &t, l->t[GU]));
    { int in[3] = { GU, 0, 0 }; FT_TRY(layer_op(l, SWIGLU, in, LT * LF, t, 0, NULL)); }
    layer_free(l, GU);
    FT_TRY(ft_linear(ctx, &t, l->t[P_], l->w[W_DOWN], NULL));
    { int in[3] = { P_, W_DOWN, 0 }; FT_TRY(layer_op(l, LINEAR, in, c, t, 0, NULL)); }
    layer_free(l, P_);
    FT_TRY(ft_add_inplace(ctx, &t, l->t[DN], l->t[R]));
    { int in[3] = { DN, R, 0 }; FT_TRY(layer_op(l, ADD_OVER, in, c, t, 0, NULL)); }
    layer_free(l, R);
    return FT_OK;
}

static ft_status layer_weight(layer *l, int which, int ndim, int64_t a, int64_t b)
{
    int64_t shape[3];
    float values[2 * LF * LC + LT * LC];
    ft_tensor *fp32;
    ft_stream *stream = ft_stream_get(l->ctx, FT_STREAM_COMPUTE);
    shape[0] = which == W_X ? LB : a;
    shape[1] = which == W_X ? a : b;
    shape[2] = b;
    for (int64_t i = 0; i < a * (ndim > 1 ? b : 1); i++)
        values[i] = (float)(sin(0.37 * (double)(i + 11 * which)) * (which == W_X ? 1 : 0.4)) +
                    (which == W_IN || which == W_POST ? 1.0f : 0.0f);
    FT_TRY(ft_tensor_create(l->ctx, &l->w[which], l->dtype, ndim, shape, FT_TAG_PARAM));
    FT_TRY(ft_tensor_create(l->ctx, &fp32, FT_F32, ndim, shape, FT_TAG_OTHER));
    FT_TRY(ft_upload(fp32, values));
    FT_TRY(ft_copy(l->w[which], fp32, stream));
    ft_tensor_free(fp32);
    l->w[which]->requires_grad = 1;
    return FT_OK;
}

static ft_status layer_create(layer *l, ft_ctx *ctx, ft_dtype dtype)
{
    l->ctx = ctx;
    l->dtype = dtype;
    l->base = live(ctx);
    FT_TRY(layer_weight(l, W_X, 3, LT, LC));
    FT_TRY(layer_weight(l, W_IN, 1, LC, 1));
    FT_TRY(layer_weight(l, W_QKV, 2, LQKV, LC));
    FT_TRY(ft_rope_table(ctx, &l->w[W_ROPE], LT, LD, 10000, NULL));
    FT_TRY(layer_weight(l, W_O, 2, LC, LH * LD));
    FT_TRY(layer_weight(l, W_POST, 1, LC, 1));
    FT_TRY(layer_weight(l, W_GU, 2, 2 * LF, LC));
    FT_TRY(layer_weight(l, W_DOWN, 2, LC, LF));
    return ft_tape_create(ctx, &l->tape);
}

static void layer_book(layer *l)
{
    model_begin(&l->m);
    for (int i = 0; i < WEIGHTS; i++) {
        size_t bytes = (ft_bytes(l->w[i]) + 255) / 256 * 256;
        l->m.values[model_value(&l->m, -1, bytes)].requires_grad = l->w[i]->requires_grad;
        l->t[i] = l->w[i];
    }
}

/* Forward under the policy, backward, and the checks; the layer is as before afterwards. */
static ft_status layer_run(layer *l, ft_sac sac, ft_flops *spent)
{
    ft_ctx *ctx = l->ctx;
    ft_tensor *x, *d;
    ft_flops begin, end;
    int in[3] = { W_X, 0, 0 }, result = X1;
    layer_book(l);
    ft_flops_get(ctx, &begin);
    l->before = begin;
    FT_TRY(ft_tape_begin(l->tape));
    FT_TRY(ft_scale(ctx, &x, l->w[W_X], 0.5));
    FT_TRY(layer_op(l, TIMES, in, LT * LC, x, 0, NULL));
    FT_TRY(ft_segment_begin(ctx, "layer", sac));
    model_segment_begin(&l->m, sac);
    FT_TRY(layer_attention(l));
    FT_TRY(layer_mlp(l));
    FT_TRY(ft_segment_end(ctx, 1, &l->t[X1]));
    model_segment_end(&l->m, 1, &result);
    FT_TRY(layer_check(l));
    FT_TRY(ft_tape_end(l->tape));
    FT_TRY(ft_tensor_create(ctx, &d, l->dtype, 3, x->shape, FT_TAG_ACT));
    FT_TRY(ft_fill(d, 0.25, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
    l->m.values[X1].grad = ++l->m.buffers;
    FT_TRY(ft_backward(l->tape, l->t[X1], d));
    for (int n = l->m.n_nodes - 1; n >= 0; n--)
        if (!l->m.nodes[n].done) model_backward_node(&l->m, n, FT_PHASE_WHOLE);
    FT_TRY(layer_check(l));
    ft_tensor_free(l->t[X1]);
    ft_flops_get(ctx, &end);
    spent->forward = end.forward - begin.forward;
    spent->backward = end.backward - begin.backward;
    spent->replay = end.replay - begin.replay;
    CHECK(spent->replay == model_flops(&l->m, 1));
    return FT_OK;
}

static ft_status layer_gradients(layer *l, char *bytes, size_t *n)
{
    *n = 0;
    for (int i = 0; i < WEIGHTS; i++) {
        if (i == W_ROPE) continue;
        CHECK(l->w[i]->grad != NULL);
        FT_TRY(ft_download(l->w[i]->grad, bytes + *n));
        *n += ft_bytes(l->w[i]->grad);
        ft_tensor_free(l->w[i]->grad);
        l->w[i]->grad = NULL;
    }
    return FT_OK;
}

static ft_status layer_rank(ft_ctx *ctx, void *user)
{
    ft_dtype dtype = *(ft_dtype *)user;
    layer *l = (layer *)ft_host_alloc(ctx, sizeof *l);
    char *first = (char *)ft_host_alloc(ctx, 1 << 16), *now = (char *)ft_host_alloc(ctx, 1 << 16);
    ft_flops spent, none;
    size_t n;
    if (!l || !first || !now) return FT_ERR_OOM;
    memset(&none, 0, sizeof none);
    FT_TRY(layer_create(l, ctx, dtype));
    for (int k = -3; k < 4096; k += k >= 0 && dtype == FT_BF16 ? 7 : 1) {
        ft_sac sac;
        sac.kind = k < 0 ? (ft_sac_kind)(k + 3) : FT_SAC_MASK;
        sac.mask = (uint64_t)(k < 0 ? 0 : k);
        ft_status status = layer_run(l, sac, &spent);
        if (status == FT_OK) status = layer_gradients(l, k == -3 ? first : now, &n);
        if (status == FT_OK && k > -3 && memcmp(first, now, n))
            status = ft_error(FT_ERR_DATA, "other gradients than without recomputation");
        if (k == -3) none = spent;
        if (status == FT_OK && (spent.forward != none.forward || spent.backward != none.backward))
            status = ft_error(FT_ERR_DATA, "forward or backward cost other flops");
        if (status == FT_OK) continue;
        char text[1024];
        snprintf(text, sizeof text, "%s", ft_last_error());
        return ft_error(FT_ERR_DATA, "policy %d, mask %x: %s", (int)sac.kind, k < 0 ? 0 : k, text);
    }
    return FT_OK;
}

/* Under each of the 4096 masks of a layer's 12 outputs, and the named policies: the gradients' bits
   are those without recomputation; the bytes live after every call of forward and every node of
   backward, and the flops replayed, are those of the second book. */
static void layer_under_every_mask(void **state)
{
    ft_dtype dtype;
    (void)state;
    llama_rows_make();
    for (int k = 0; k < 2; k++) {
        dtype = k ? FT_BF16 : FT_F32;
        run_on(FT_CPU, layer_rank, &dtype);
        run_on(FT_META, layer_rank, &dtype);
    }
}

/* Flops of the replays, by the formulas of the ops: full recomputes all but the down projection. */
static ft_status replay_flops_rank(ft_ctx *ctx, void *user)
{
    layer *l = (layer *)ft_host_alloc(ctx, sizeof *l);
    ft_flops none, full;
    ft_sac sac;
    size_t n;
    char *bytes = (char *)ft_host_alloc(ctx, 1 << 16);
    double gemms = 2.0 * LT * LC * (LQKV + LH * LD + 2 * LF);
    double attention = 2.0 * LB * LH * LT * LT * LD;
    (void)user;
    if (!l || !bytes) return FT_ERR_OOM;
    FT_TRY(layer_create(l, ctx, FT_F32));
    memset(&sac, 0, sizeof sac);
    FT_TRY(layer_run(l, sac, &none));
    FT_TRY(layer_gradients(l, bytes, &n));
    CHECK(none.replay == 0);
    sac.kind = FT_SAC_FULL;
    FT_TRY(layer_run(l, sac, &full));
    CHECK(full.replay > gemms + attention && full.replay < gemms + attention + 60 * LT * LF);
    CHECK(none.forward > gemms + attention + 2.0 * LT * LC * LF);
    return FT_OK;
}

static void replay_costs_the_closed_formula(void **state)
{
    (void)state;
    llama_rows_make();
    run_on(FT_META, replay_flops_rank, NULL);
}

/* ---------------------------------------------------------------------------- a limit on memory */

typedef struct limited { ft_sac sac; ft_mem_stats mem; } limited;

static ft_status limited_rank(ft_ctx *ctx, void *user)
{
    limited *u = (limited *)user;
    ft_flops spent;
    layer *l = (layer *)ft_host_alloc(ctx, sizeof *l);
    if (!l) return FT_ERR_OOM;
    FT_TRY(layer_create(l, ctx, FT_F32));
    FT_TRY(layer_run(l, u->sac, &spent));
    ft_mem_get(ctx, &u->mem);
    return FT_OK;
}

/* What a plan says fits, fits, and one byte less does not, on both devices. */
static void memory_limit(void **state)
{
    (void)state;
    llama_rows_make();
    for (int policy = 0; policy < 3; policy++)
        for (int device = 0; device < 2; device++) {
            limited plan, run;
            char limit[64];
            ft_config config = ft_config_default();
            memset(&plan, 0, sizeof plan);
            plan.sac.kind = (ft_sac_kind)policy;
            run = plan;
            run_on(FT_META, limited_rank, &plan);
            config.device = device ? FT_META : FT_CPU;
            config.memory_limit = plan.mem.peak_bytes;
            run_with(&config, limited_rank, &run);
            assert_int_equal(run.mem.peak_bytes, plan.mem.peak_bytes);
            assert_memory_equal(run.mem.at_peak, plan.mem.at_peak, sizeof run.mem.at_peak);
            assert_string_equal(run.mem.peak_where, plan.mem.peak_where);
            config.memory_limit--;
            assert_int_equal(ft_launch(&config, limited_rank, &run), FT_ERR_OOM);
            snprintf(limit, sizeof limit, "live of a limit of %zu", config.memory_limit);
            assert_non_null(strstr(ft_last_error(), limit));
            assert_non_null(strstr(ft_last_error(), " bytes ("));
        }
}

/* The message tells the tag, who asked, and the sizes. */
static ft_status oom_rank(ft_ctx *ctx, void *user)
{
    ft_tensor *a, *b;
    int64_t n = 250;
    (void)user;
    FT_TRY(ft_tensor_create(ctx, &a, FT_F32, 1, &n, FT_TAG_PARAM)); /* 1024 of 1500 */
    REFUSED(ft_tensor_create(ctx, &b, FT_BF16, 1, &n, FT_TAG_COMM), FT_ERR_OOM,
            "512 bytes (comm, for a tensor) do not fit: 1024 live of a limit of 1500");
    CHECK(live(ctx) == 1024);
    n = 125;
    REFUSED(ft_scale(ctx, &b, a, 2), FT_ERR_OOM,
            "1024 bytes (act, for scale) do not fit: 1024 live of a limit of 1500");
    FT_TRY(ft_tensor_create(ctx, &b, FT_BF16, 1, &n, FT_TAG_COMM)); /* 250 bytes count 256 */
    CHECK(live(ctx) == 1280);
    n = INT64_MAX / 64;
    REFUSED(ft_tensor_create(ctx, &b, FT_F32, 1, &n, FT_TAG_OTHER), FT_ERR_OOM, "(other");
    return FT_OK;
}

static void out_of_memory(void **state)
{
    (void)state;
    for (int device = 0; device < 2; device++) {
        ft_config config = ft_config_default();
        config.device = device ? FT_META : FT_CPU;
        config.memory_limit = 1500;
        run_with(&config, oom_rank, NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_graphs),
        cmocka_unit_test(row_validation),
        cmocka_unit_test(apply_refusals),
        cmocka_unit_test(order_of_calls),
        cmocka_unit_test(versions),
        cmocka_unit_test(in_place),
        cmocka_unit_test(in_place_op_is_replayed_while_its_input_is_needed),
        cmocka_unit_test(handles_that_are_gone),
        cmocka_unit_test(leaves_add_up_over_backwards),
        cmocka_unit_test(sinks),
        cmocka_unit_test(frozen_weights_save_nothing),
        cmocka_unit_test(backward_in_two_halves),
        cmocka_unit_test(roots_and_unused_outputs),
        cmocka_unit_test(two_tapes),
        cmocka_unit_test(marks),
        cmocka_unit_test(deferred_ops),
        cmocka_unit_test(ops_without_inputs_are_replayed),
        cmocka_unit_test(layer_under_every_mask),
        cmocka_unit_test(replay_costs_the_closed_formula),
        cmocka_unit_test(memory_limit),
        cmocka_unit_test(out_of_memory),
    };
    return cmocka_run_group_tests_name("tape", tests, rows_make, NULL);
}
