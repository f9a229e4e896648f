/* femtotron_pp.h: pipeline parallelism: schedules as data, their simulation, drawing and runner,
   and the cut of layers into stages.

   Do this, after #include "femtotron.h":

       #define FEMTOTRON_PP_IMPLEMENTATION   (FEMTOTRON_IMPLEMENTATION turns on all headers)
       #include "femtotron_pp.h"

   Then, to see what 4 ranks do with 8 micro-batches (error checks left out):

       ft_pp_config config = ft_pp_config_default();
       config.ranks = 4, config.micro_batches = 8;
       ft_pp_schedule_create(&config, &schedule);
       ft_pp_draw_file(schedule, NULL, 0, stdout);
       ft_pp_schedule_free(schedule);

   WHAT IT DOES NOT DO
     A schedule does not adapt: its order is fixed beforehand, whatever the stages turn out to cost.
     None receives ahead of need to hide the wire (an input arrives right before its use, which
     keeps memory lowest), none splits a micro-batch, and none works with old weights: a step ends
     when all its micro-batches have, so that its result is that of one rank.

   CONTENTS   >>schedule >>simulate >>draw >>layers >>run, then the implementation:
     >>text.impl >>order.impl >>clock.impl >>rounds.impl >>schedule.impl >>validate.impl
     >>simulate.impl >>draw.impl >>layers.impl >>run.impl

   OPTIONS  (define before the include that has the implementation)
     FEMTOTRON_PP_IMPLEMENTATION   the implementation of this header alone. Default: off;
                   FEMTOTRON_IMPLEMENTATION switches on that of every header.
     FT_MALLOC(n), FT_FREE(p)      host memory, as in femtotron.h. Default malloc and free.
     All else is in ft_pp_config and ft_pp_cost.

   THE IDEA
     The layers are cut in stages, one after another, and each rank holds one. It runs its part of a
     micro-batch's forward, sends the activation to the next rank and turns to the next micro-batch;
     later the gradient comes back the same way. A rank idles until the first micro-batch reaches it
     and after the last one has left it: the bubble. More micro-batches make it small beside the
     work; but each keeps its activations from its forward to its backward. Schedules are orders of
     the same work, and trade bubble, memory and messages against each other.

   THE SCHEDULES  as ft_pp_draw shows them: a row a rank, a column a unit of time. 3 is the forward
     of micro-batch 3, [3 ] its backward, which takes twice as long; dots are the bubble.

     gpipe: all forwards, then all backwards (Huang et al. 2019, figure 2).

       0 | 0 1 2 3 . . . . . . . . .[0 ][1 ][2 ][3 ]
       1 | . 0 1 2 3 . . . . . .[0 ][1 ][2 ][3 ] . .
       2 | . . 0 1 2 3 . . .[0 ][1 ][2 ][3 ] . . . .
       3 | . . . 0 1 2 3[0 ][1 ][2 ][3 ] . . . . . .

     1f1b, the default: a backward as soon as it can run, then a forward, in turns. The bubble is
     the same, but no more micro-batches are alive than stages (Narayanan et al. 2019, section 3.2,
     with the flush of Narayanan et al. 2021, section 2.2).

       0 | 0 1 2 3 . . . . . .[0 ] 4[1 ] 5[2 ] 6[3 ] 7[4 ] .[5 ] .[6 ] .[7 ]
       1 | . 0 1 2 . . . .[0 ] 3[1 ] 4[2 ] 5[3 ] 6[4 ] 7[5 ] .[6 ] .[7 ] . .
       2 | . . 0 1 . .[0 ] 2[1 ] 3[2 ] 4[3 ] 5[4 ] 6[5 ] 7[6 ] .[7 ] . . . .
       3 | . . . 0[0 ] 1[1 ] 2[2 ] 3[3 ] 4[4 ] 5[5 ] 6[6 ] 7[7 ] . . . . . .

     interleaved: a rank holds V chunks, each 1/V of a stage, and a micro-batch goes round the ranks
     V times. All waits are V times shorter, messages V times more (Narayanan et al. 2021, section
     2.2). Here V = 2, a column is half a unit, and b3 is micro-batch 3 in the second chunk.

       0 |a0a1a2a3b0b1b2b3 . . . . . .[b0] .[b1] .[b2] .[b3][a0][a1][a2][a3]
       1 | .a0a1a2a3b0b1b2b3 . . .[b0] .[b1] .[b2] .[b3][a0][a1][a2][a3] . .
       2 | . .a0a1a2a3b0b1b2 .[b0]b3[b1] .[b2] .[b3][a0][a1][a2][a3] . . . .
       3 | . . .a0a1a2a3b0[b0]b1[b1]b2[b2]b3[b3][a0][a1][a2][a3] . . . . . .

     zb-h1: backward in two halves. i3 makes the gradient of the stage's input, for which the rank
     before waits; w3 makes those of the weights, for which nobody waits, and fills what was bubble
     (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2).

       0 | 0 1 2 3 . . .[0 ] 4[1 ] 5[2 ] 6[3 ] 7[4 ][5 ][6 ][7 ]
       1 | . 0 1 2 . .i0 3i1w0 4i2w1 5i3w2 6i4w3 7i5w4i6w5i7w6w7
       2 | . . 0 1 .i0 2i1 3i2w0 4i3w1 5i4w2 6i5w3 7i6w4i7w5w6w7
       3 | . . . 0i0 1i1 2i2 3i3w0 4i4w1 5i5w2 6i6w3 7i7w4w5w6w7

   THE COST  of a step on rank p. Unit: one stage's forward; its backward 2, i and w 1 each.

                        makespan           bubble, of all time   in flight
       gpipe            3 (M + P - 1)      (P-1) / (M+P-1)       M
       1f1b             3 (M + P - 1)      (P-1) / (M+P-1)       min(P-p, M)
       interleaved      3 M + 3 (P-1)/V    (P-1) / (V M+P-1)     min(2(P-1-p) + (V-1)P + 1, M V)
       zb-h1, M >= P    3 M + P - 1        (P-1) / (3 M+P-1)     P
       zb-h1, M < P     2 (M + P) - 1      1 - 3 M / makespan    M

     In flight: micro-batches whose activations are alive (interleaved: chunks, 1/V as large each).
     In zb-h1 at most min(P-p, M) of them are whole; the others, at most p + 1 at once (rank 0:
     none), wait for their w. Forward only: M + P - 1 (interleaved M + (P-1)/V), and nothing in
     flight but what runs.

     On the way: beside these, boundary tensors that are made and not sent, or received and not
     used, at most 2 at once on a rank (interleaved: 4).

     Traffic: with N bytes of a boundary tensor (batch, tokens, hidden), rank p sends M V N forward
     (rank P-1: M (V-1) N) and M V N backward (rank 0: M (V-1) N). At P = 1 nothing.

     From i to w stay x and dy of each linear layer y = x W^T (FT_OP_SPLIT of femtotron.h), and
     nothing else of the micro-batch. A Llama layer in bf16, bytes a token: x 2 (2C + H D + F), dy
     2 (2C + (H+2K) D + 2F), together 8C + 4 (H+K) D + 6F: as much as forward keeps without
     recomputation, and with it no less, for what i has rebuilt stays. W reads no weights: where
     they are sharded, nothing is gathered for it.

   THE CASES
     [P1]   Chunk c of rank p is virtual stage s = c P + p. The activation of s goes to s + 1, on
            the next rank (after the last comes rank 0), the gradient of s to s - 1.
     [P2]   gpipe: M forwards, then M backwards in the same order.
     [P3]   1f1b: [P3.1] warm-up, P - 1 - p forwards; [P3.2] pairs of a forward and a backward,
            while there are forwards; [P3.3] cool-down, the backwards that are left.
     [P4]   interleaved: [P4.1] as [P3], with (V-1) P + 2 (P-1-p) forwards of warm-up: the former
            bring the first micro-batches into the last chunk, the latter are twice those of [P3],
            so that what goes round the ring arrives in time. [P4.2] P micro-batches pass a chunk
            before the next chunk has its turn: M must be divisible by P.
     [P5]   zb-h1: [P5.1] F and BI as F and B of [P3]. [P5.2] Rank p runs W of micro-batch m after
            BI of m + p: the later in the pipeline, the longer W waits, until all ranks have min(P,
            M) micro-batches in flight, as many as rank 0 has in [P3]. Rank 0's BI has nobody
            waiting, and its W would follow at once: it runs a whole B, which keeps nothing in
            between. [P5.3] The W that are left come last.
     [P6]   Exchanges. Each transfer gets a round, a time on a logical clock on which F takes 1, B
            2, BI and W 1, and every rank runs its work as soon as the inputs are made.
     [P6.1] All transfers of a rank in round t are one exchange, posted before the work that starts
            at t or later and after all that started earlier; within it, in an order that is the
            same on both ends. A transfer's both ends have the same round, so an exchange of round t
            waits for nothing but exchanges of earlier rounds and work that started earlier, and
            that work for nothing but exchanges of rounds up to its start. No cycle can close: no
            deadlock, also where the next and the previous rank are the same, and whether or not the
            ranks keep to the clock.
     [P6.2] A transfer's round is the latest time, from when it is made to when it is used, at which
            neither end is in the midst of something; if there is none, the time of its use. So
            ranks that keep to the clock lose nothing by exchanges, even if they do one thing at a
            time.
     [P6.3] But in interleaved with P = 2, 5, 8, ... the ring does not close in step (backward moves
            back by 2 units a rank, in a period of 3), and there would be no such time in any
            period. There backwards start one unit a rank later on the clock, in time that is bubble
            anyway. With P = 5, 8, ... ranks that do one thing at a time still lose a chunk's
            forward a step; ranks whose exchanges run beside compute lose nothing.
     [P7]   Forward only: M V forwards in the same order; M need not be divisible by P.
     [P8]   Layers by cost: a dynamic program over (stage, first layer of it).
     [P9]   Each chunk runs its backwards (B, or BI, and W) in order of micro-batches, whatever the
            schedule: gradients are added in the same order in all of them, and a chunk's are
            complete after B or W of micro-batch M - 1.

   OWNERSHIP, THREADS, ERRORS  A runner belongs to its context and that one's thread. All else needs
     no context: a schedule and a simulation are one block of host memory each, freed by their
     _free; functions keep no state, so any thread may call them. Errors are ft_status, with the
     sentence in ft_last_error().

   LETTERS  P ranks of the pipeline, p one of them; V chunks a rank, c one of them; S = P V virtual
            stages, s one of them; M micro-batches, m one of them. Of a layer: C hidden, H query
            heads, K kv heads, D head size, F feed-forward.

   License: MIT, see LICENSE. */

#ifndef FEMTOTRON_PP_H
#define FEMTOTRON_PP_H

#ifndef FEMTOTRON_H
#error "femtotron_pp.h builds on femtotron.h: include femtotron.h first"
#endif

/* ---------------------------------------------------------------------------------- >>schedule */

typedef enum ft_pp_kind {
    FT_PP_1F1B = 0, FT_PP_GPIPE, FT_PP_INTERLEAVED, FT_PP_ZB_H1, FT_PP_KIND_COUNT
} ft_pp_kind;

FT_API const char *ft_pp_kind_name(ft_pp_kind kind);
/* "1f1b", "gpipe", "interleaved", "zb-h1"; "?" for any other value. */
FT_API ft_status ft_pp_kind_parse(const char *name, ft_pp_kind *kind);
/* The reverse. FT_ERR_ARG, listing the names, for any other text. */

#define FT_PP_MAX_WORK (1 << 22) /* P V M: all ranks' lists are built at once, 600 bytes each */
#define FT_PP_MAX_CHUNKS 26 /* V: a letter each in drawings */

typedef struct ft_pp_config {
    ft_pp_kind kind;
    int ranks;              /* P, of the pipeline */
    int chunks;             /* V, chunks of layers a rank; above 1 with FT_PP_INTERLEAVED only */
    int micro_batches;      /* M, of a step */
    int forward_only;       /* 1: no backward, for validation; interleaved then takes any M */
    int overlap;            /* 1: exchanges run beside compute, see ft_pp_run; default 0 */
} ft_pp_config;

FT_API ft_pp_config ft_pp_config_default(void);
/* 1f1b of 1 rank, 1 chunk, 1 micro-batch. */
FT_API ft_status ft_pp_check(const ft_pp_config *config);
/* FT_ERR_ARG, naming what would do, for what has no schedule. */

typedef enum ft_pp_act {
    FT_PP_F = 0,            /* forward of one chunk */
    FT_PP_B,                /* its backward, whole */
    FT_PP_BI,               /* its backward, gradients of activations: weights stay for a W */
    FT_PP_W,                /* the rest of that backward: gradients of weights */
    FT_PP_EXCHANGE,         /* sends and receives as one, for ft_exchange */
    FT_PP_ACT_COUNT
} ft_pp_act;

typedef enum ft_pp_cargo { FT_PP_ACTIVATION = 0, FT_PP_GRADIENT } ft_pp_cargo;

typedef struct ft_pp_transfer { /* between two ranks they are in the same order on both */
    int peer;               /* rank in the pipeline */
    int is_send;
    ft_pp_cargo cargo;
    int micro_batch;
    int chunk;              /* this rank's: whose output is sent, or whose input is received */
    int peer_chunk;         /* the peer's, likewise */
} ft_pp_transfer;

enum { FT_PP_NOBODY = -1 };

typedef struct ft_pp_action {
    ft_pp_act act;
    int micro_batch, chunk; /* of F, B, BI, W; 0 in an exchange */
    int from, to;           /* F, B, BI: ranks that its input comes from and its output goes to.
                             Another rank: an exchange before has received it, one after sends it.
                             This rank (P = 1): the neighbouring chunk has made it, or takes it.
                             FT_PP_NOBODY: the input is tokens (F) or the loss (B, BI), the output
                             is the loss (F) or ends here (B, BI). In W, exchanges: FT_PP_NOBODY */
    int n;                  /* transfers of an exchange, at least 1; 0 in all others */
    ft_pp_transfer *transfers;
} ft_pp_action;

typedef struct ft_pp_list {
    int n;
    ft_pp_action *actions;
} ft_pp_list;

typedef struct ft_pp_schedule {
    ft_pp_config config;
    ft_pp_list *ranks;      /* [P] what each rank does, in order */
} ft_pp_schedule;

FT_API ft_status ft_pp_schedule_create(const ft_pp_config *config, ft_pp_schedule **out);
/* A pure function of config: every rank of a run computes the same lists and obeys its own. Host
   memory, one block; ft_pp_schedule_free gives it back. A schedule of your own is the same struct,
   filled in by you: ft_pp_simulate says whether it is one. */
FT_API void ft_pp_schedule_free(ft_pp_schedule *schedule);
/* NULL is allowed. */

FT_API ft_status ft_pp_print(const ft_pp_schedule *schedule, int rank, FILE *file);
/* A rank's list, one action a line. */

/* ---------------------------------------------------------------------------------- >>simulate */

typedef struct ft_pp_cost { /* any unit of time */
    double f, b, bi, w;     /* of a whole stage: a chunk costs 1/V of it */
    double transfer;        /* of an exchange, from when the last of its peers has come */
    const double *stage;    /* [P V] factor of each virtual stage's f, b, bi, w; NULL: all 1 */
    int blocking;           /* 0: exchanges run beside compute and wait for what they send, compute
                             waits for what it uses. 1: a rank does one thing at a time, in the
                             list's order, as ft_pp_run does */
} ft_pp_cost;

FT_API ft_pp_cost ft_pp_cost_default(void);
/* f 1, b 2, bi 1, w 1, transfer 0. */

typedef struct ft_pp_rank_times {
    double busy;            /* time spent in F, B, BI, W */
    int in_flight;          /* most pairs of micro-batch and chunk at once whose F has begun and
                             whose backward (B or W) has not ended */
    int deferred;           /* most of them between BI and W */
    int boundary;           /* most boundary tensors at once that are received and not yet used, or
                             made and not yet sent */
    double *start, *end;    /* [n] of each action of the rank's list */
} ft_pp_rank_times;

typedef struct ft_pp_simulation {
    double makespan;
    double bubble;          /* idle share: 1 - sum of busy / (P makespan) */
    ft_pp_rank_times *ranks; /* [P] */
} ft_pp_simulation;

FT_API ft_status ft_pp_simulate(const ft_pp_schedule *schedule, const ft_pp_cost *cost,
                                ft_pp_simulation **out);
/* Runs the lists without data, each exchange ending when all its transfers have met their peers'
   (the k-th that one rank sends another is the k-th that the other receives from it). cost NULL:
   the default. FT_ERR_STATE, naming rank and action, where an input does not exist when it is
   used, work is missing or done twice, or a transfer meets another one; naming the ranks and
   what they wait for, where exchanges deadlock. One block of host memory, given back by
   ft_pp_simulation_free. */
FT_API void ft_pp_simulation_free(ft_pp_simulation *simulation);
/* NULL is allowed. */

/* -------------------------------------------------------------------------------------- >>draw */

FT_API ft_status ft_pp_draw(const ft_pp_schedule *schedule, const ft_pp_cost *cost, double column,
                            char *text, size_t bytes, size_t *needed);
/* The simulated schedule as text: a line of figures, a row a rank, a legend. `column` is the
   time of a column; 0: a chunk's forward, f / V. Starts and ends are rounded to columns. *needed
   (unless NULL) = bytes with the final zero; with text NULL that is all that is done.
   FT_ERR_ARG, naming the bytes, if they are too few. */
FT_API ft_status ft_pp_draw_file(const ft_pp_schedule *schedule, const ft_pp_cost *cost,
                                 double column, FILE *file);

/* ------------------------------------------------------------------------------------ >>layers */

/* Which layers each of `stages` = P V virtual stages has: stage s those from first_layer[s] to
   first_layer[s + 1] - 1, where first_layer[stages + 1] ascends from 0 to `layers`. Each gets at
   least one: FT_ERR_ARG where there are more stages than layers. The embedding belongs to the first
   stage and the head to the last, beside their layers. */
#define FT_PP_MAX_LAYERS 4096

FT_API ft_status ft_pp_layers_uniform(int64_t layers, int stages, int64_t *first_layer);
/* The same number each; what remains goes, one each, to the earliest. */
FT_API ft_status ft_pp_layers_parse(const char *text, int64_t layers, int stages,
                                    int64_t *first_layer);
/* By hand: "9,9,8,6". FT_ERR_ARG unless there are `stages` numbers that add up to `layers`. */
FT_API ft_status ft_pp_layers_balance(int64_t layers, const double *cost, double embedding,
                                      double head, int stages, int64_t *first_layer);
/* By cost: cost[layers], embedding and head in any one unit (flops, bytes, seconds). Exact: the
   least cost of the dearest stage; of all cuts that have it, the least sum of squares (so that the
   other stages are even too); of these, more layers in earlier stages. Sums that differ by less
   than 1e-12 of the total count as equal. O(stages layers^2) time, O(stages layers) host memory. */

/* --------------------------------------------------------------------------------------- >>run */

/* What the runner needs to know of a rank's program. */
typedef struct ft_pp_program {
    /* Forward of one chunk for one micro-batch; records on the current tape, if there is one. x:
       the output of the virtual stage before, NULL for the first; *out: what goes on, or the loss
       ([1]). x stays the runner's. */
    ft_status (*forward)(void *user, int chunk, int micro_batch, ft_tensor *x, ft_tensor **out);
    /* The loss of a micro-batch, on the rank of the last virtual stage, once backward (or a
       forward-only schedule) has it. The runner frees it afterwards. May be NULL. */
    ft_status (*loss)(void *user, int micro_batch, ft_tensor *loss);
    void *user;
    ft_dtype dtype;              /* of the tensor that travels between stages */
    int ndim;
    int64_t shape[FT_MAX_DIMS];
} ft_pp_program;

typedef struct ft_pp ft_pp;

FT_API ft_status ft_pp_create(ft_ctx *ctx, const ft_mesh *mesh, const ft_pp_config *config,
                              ft_pp **out);
/* A runner for this rank of the mesh's pp axis, with a group named "pp" (and one over the world,
   "pp world", that sends nothing). config->ranks must be the mesh's pp. Owned by the context. A
   collective call: FT_ERR_COMM on every rank, naming ranks and values, unless the whole world
   passes the same config. */
FT_API ft_status ft_pp_run(ft_pp *pp, const ft_pp_program *program);
/* Obeys this rank's list once: a step's forwards and backwards. [R1] Exchanges run on the compute
   stream, so that an input has come and an output has gone when the next action starts. [R2] A
   received activation lives until its backward has made the gradient that is sent back; what was
   sent is freed at once, if no backward of its own needs it. Memory of a micro-batch in flight:
   what its tape keeps, and one boundary tensor of N C elements. Traffic, group "pp", M
   micro-batches, S bytes of the boundary tensor: V M S forward and V M S backward for an inner
   rank, less what the first virtual stage does not send back and the last does not send on.
   [R3] With config.overlap an exchange runs on FT_STREAM_PIPE once what it sends is made, and
   compute waits where it uses what has come. Its cargo is freed before the next exchange, and so
   lives for one action more: at most what one exchange sends, S bytes a transfer. Results are the
   same bits. It hides what links take; with the exchanges of a node that is little, and the leaner
   default keeps up. */

#endif /* FEMTOTRON_PP_H */

#if defined(FEMTOTRON_IMPLEMENTATION) || defined(FEMTOTRON_PP_IMPLEMENTATION)
#ifndef FT__PP_IMPLEMENTED
#define FT__PP_IMPLEMENTED

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#ifndef FT_MALLOC
#define FT_MALLOC(n) malloc(n)
#define FT_FREE(p) free(p)
#endif

/* -------------------------------------------------------------------------------- >>text.impl */

/* A text that grows past its buffer without writing there: `used` says what it would take. */
typedef struct ft__pp_text {
    char *text;
    size_t bytes, used;
} ft__pp_text;

static void ft__pp_put(ft__pp_text *t, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;

static void ft__pp_put(ft__pp_text *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int fits = t->used < t->bytes;
    int n = vsnprintf(fits ? t->text + t->used : NULL, fits ? t->bytes - t->used : 0, format, args);
    va_end(args);
    if (n > 0) t->used += (size_t)n;
}

static void *ft__pp_alloc(const char *what, size_t bytes)
{
    void *memory = FT_MALLOC(bytes ? bytes : 1);
    if (memory) return memset(memory, 0, bytes);
    ft_error(FT_ERR_OOM, "pipeline: no %zu bytes of host memory for %s", bytes, what);
    return NULL;
}

static const char *const ft__pp_kind_names[FT_PP_KIND_COUNT] = {
    "1f1b", "gpipe", "interleaved", "zb-h1"
};
static const char *const ft__pp_act_names[FT_PP_ACT_COUNT] = {"F", "B", "BI", "W", "exchange"};
static const char *const ft__pp_cargo_names[2] = {"activation", "gradient"};

FT_API const char *ft_pp_kind_name(ft_pp_kind kind)
{
    return (unsigned)kind < FT_PP_KIND_COUNT ? ft__pp_kind_names[kind] : "?";
}

FT_API ft_status ft_pp_kind_parse(const char *name, ft_pp_kind *kind)
{
    for (int k = 0; name && k < FT_PP_KIND_COUNT; k++) {
        if (strcmp(name, ft__pp_kind_names[k]) != 0) continue;
        *kind = (ft_pp_kind)k;
        return FT_OK;
    }
    return ft_error(FT_ERR_ARG, "pipeline: no schedule is called \"%.40s\"; there are 1f1b, gpipe, "
                    "interleaved and zb-h1", name ? name : "(NULL)");
}

static void ft__pp_put_transfer(ft__pp_text *t, const ft_pp_transfer *x)
{
    ft__pp_put(t, "%s %s of micro-batch %d (chunk %d) %s rank %d", x->is_send ? "send" : "receive",
               ft__pp_cargo_names[x->cargo == FT_PP_GRADIENT], x->micro_batch, x->chunk,
               x->is_send ? "to" : "from", x->peer);
}

static void ft__pp_put_action(ft__pp_text *t, const ft_pp_action *a)
{
    ft__pp_put(t, "%s", (unsigned)a->act < FT_PP_ACT_COUNT ? ft__pp_act_names[a->act] : "?");
    if (a->act != FT_PP_EXCHANGE) ft__pp_put(t, " %d (chunk %d)", a->micro_batch, a->chunk);
    for (int i = 0; i < a->n; i++) {
        ft__pp_put(t, "%s", i ? ", " : ": ");
        ft__pp_put_transfer(t, &a->transfers[i]);
    }
}

static ft_status ft__pp_print_action(FILE *file, const ft_pp_action *a)
{
    ft__pp_text measure = {NULL, 0, 0};
    ft__pp_put_action(&measure, a);
    char *line = (char *)ft__pp_alloc("a line", measure.used + 1);
    if (!line) return FT_ERR_OOM;
    ft__pp_text t = {line, measure.used + 1, 0};
    ft__pp_put_action(&t, a);
    int written = fprintf(file, "%s\n", line);
    FT_FREE(line);
    return written > 0 ? FT_OK : ft_error(FT_ERR_IO, "ft_pp_print: a line was not written");
}

FT_API ft_status ft_pp_print(const ft_pp_schedule *schedule, int rank, FILE *file)
{
    if (!schedule || !file || rank < 0 || rank >= schedule->config.ranks) {
        return ft_error(FT_ERR_ARG, "ft_pp_print: rank %d of %d%s%s", rank,
                        schedule ? schedule->config.ranks : 0, schedule ? "" : ", schedule is NULL",
                        file ? "" : ", file is NULL");
    }
    const ft_pp_list *list = &schedule->ranks[rank];
    for (int i = 0; i < list->n; i++) {
        FT_TRY(ft__pp_print_action(file, &list->actions[i]));
    }
    return FT_OK;
}

/* ------------------------------------------------------------------------------- >>order.impl */

FT_API ft_pp_config ft_pp_config_default(void)
{
    ft_pp_config c;
    memset(&c, 0, sizeof c);
    c.ranks = c.chunks = c.micro_batches = 1;
    return c;
}

static ft_status ft__pp_check_divisible(const ft_pp_config *c)
{
    int below = c->micro_batches / c->ranks * c->ranks, above = below + c->ranks;
    if (c->kind != FT_PP_INTERLEAVED || c->forward_only || below == c->micro_batches) return FT_OK;
    if (below == 0) {
        return ft_error(FT_ERR_ARG, "pipeline: interleaved needs a number of micro-batches "
                        "divisible by its %d ranks, and %d is not: use %d, or schedule 1f1b",
                        c->ranks, c->micro_batches, above);
    }
    return ft_error(FT_ERR_ARG, "pipeline: interleaved needs a number of micro-batches divisible "
                    "by its %d ranks, and %d is not: use %d or %d, or schedule 1f1b", c->ranks,
                    c->micro_batches, below, above);
}

FT_API ft_status ft_pp_check(const ft_pp_config *c)
{
    if (!c) return ft_error(FT_ERR_ARG, "pipeline: config is NULL");
    if ((unsigned)c->kind >= FT_PP_KIND_COUNT)
        return ft_error(FT_ERR_ARG, "pipeline: kind %d is none of ft_pp_kind", (int)c->kind);
    if (c->ranks < 1 || c->micro_batches < 1)
        return ft_error(FT_ERR_ARG, "pipeline: %d ranks and %d micro-batches; both must be at "
                        "least 1", c->ranks, c->micro_batches);
    if (c->chunks < 1 || c->chunks > FT_PP_MAX_CHUNKS)
        return ft_error(FT_ERR_ARG, "pipeline: %d chunks a rank; it must be 1 to %d", c->chunks,
                        FT_PP_MAX_CHUNKS);
    if (c->chunks > 1 && c->kind != FT_PP_INTERLEAVED)
        return ft_error(FT_ERR_ARG, "pipeline: %s has one chunk a rank, not %d: set chunks to 1, "
                        "or schedule interleaved", ft_pp_kind_name(c->kind), c->chunks);
    if (c->forward_only != 0 && c->forward_only != 1)
        return ft_error(FT_ERR_ARG, "pipeline: forward_only is %d, it must be 0 or 1",
                        c->forward_only);
    if ((double)c->ranks * c->chunks * c->micro_batches > FT_PP_MAX_WORK)
        return ft_error(FT_ERR_ARG, "pipeline: %d ranks x %d chunks x %d micro-batches are more "
                        "than %d: use fewer micro-batches", c->ranks, c->chunks, c->micro_batches,
                        FT_PP_MAX_WORK);
    return ft__pp_check_divisible(c);
}

/* An F, B, BI or W and when it runs on the logical clock. */
typedef struct ft__pp_work {
    ft_pp_act act;
    int chunk, micro_batch;
    int64_t start, end;
} ft__pp_work;

/* A boundary tensor on its way from the rank that makes it to the one that uses it. */
typedef struct ft__pp_message {
    int64_t round;
    ft_pp_cargo cargo;
    int stage;            /* the lower one of the two virtual stages that it travels between */
    int micro_batch;
} ft__pp_message;

typedef struct ft__pp_builder {
    const ft_pp_config *config;
    int P, V, M, S;       /* S = P V virtual stages */
    ft__pp_work *work;    /* of rank p: first[p] to first[p + 1] - 1, in its order */
    int *first;           /* [P + 1] */
    int *at;              /* [P] scratch: a cursor for each rank */
    int64_t *f_end;       /* [S * M] on the logical clock; -1: not yet */
    int64_t *b_end;       /* [S * M] of B or BI */
    ft__pp_message *messages;
    int n_messages;
} ft__pp_builder;

/* [P4.2] The k-th forward: P micro-batches go through chunk 0, then through chunk 1, ..., then
   come the next P (fewer in the last group, if M is no multiple). With one chunk: micro-batch k.
   Backward has the same micro-batches and the chunks in reverse. */
static void ft__pp_nth(const ft__pp_builder *b, int k, int *chunk, int *micro_batch)
{
    int group = k / (b->P * b->V), in_group = k % (b->P * b->V);
    int size = b->M - group * b->P < b->P ? b->M - group * b->P : b->P;
    *chunk = in_group / size;
    *micro_batch = group * b->P + in_group % size;
}

/* Forwards before the first pair of forward and backward. */
static int ft__pp_warmup(const ft__pp_builder *b, int p)
{
    int all = b->M * b->V, n = b->P - 1 - p; /* [P3.1], [P5.1] */
    if (b->config->kind == FT_PP_INTERLEAVED) n = 2 * n + (b->V - 1) * b->P; /* [P4.1] */
    if (b->config->kind == FT_PP_GPIPE || b->config->forward_only) n = all; /* [P2], [P7] */
    return n < all ? n : all;
}

static void ft__pp_add(ft__pp_builder *b, int p, ft_pp_act act, int chunk, int micro_batch)
{
    ft__pp_work *w = &b->work[b->first[p + 1]++];
    w->act = act;
    w->chunk = chunk;
    w->micro_batch = micro_batch;
}

static void ft__pp_add_forward(ft__pp_builder *b, int p, int k)
{
    int chunk, micro_batch;
    ft__pp_nth(b, k, &chunk, &micro_batch);
    ft__pp_add(b, p, FT_PP_F, chunk, micro_batch);
}

/* [P5.2] Rank p's W is p micro-batches late; rank 0 runs both as one B. */
static void ft__pp_add_backward(ft__pp_builder *b, int p, int k)
{
    int chunk, micro_batch;
    ft__pp_nth(b, k, &chunk, &micro_batch);
    if (b->config->kind != FT_PP_ZB_H1 || p == 0) {
        ft__pp_add(b, p, FT_PP_B, b->V - 1 - chunk, micro_batch);
        return;
    }
    ft__pp_add(b, p, FT_PP_BI, 0, k);
    if (k >= p) ft__pp_add(b, p, FT_PP_W, 0, k - p);
}

/* All schedules are one loop: warm-up, pairs [P3.2], cool-down [P3.3]. */
static void ft__pp_order(ft__pp_builder *b, int p)
{
    int all = b->M * b->V, warmup = ft__pp_warmup(b, p);
    b->first[p + 1] = b->first[p];
    for (int k = 0; k < warmup; k++) ft__pp_add_forward(b, p, k);
    if (b->config->forward_only) return;
    for (int k = 0; k < all; k++) {
        if (warmup + k < all) ft__pp_add_forward(b, p, warmup + k);
        ft__pp_add_backward(b, p, k);
    }
    if (b->config->kind != FT_PP_ZB_H1 || p == 0) return;
    for (int k = b->M > p ? b->M - p : 0; k < b->M; k++) { /* [P5.3] */
        ft__pp_add(b, p, FT_PP_W, 0, k);
    }
}

/* ------------------------------------------------------------------------------- >>clock.impl */

static const int ft__pp_units[FT_PP_ACT_COUNT] = {1, 2, 1, 1, 0}; /* on the logical clock */

/* When the input of `w` is made; -1: not yet. */
static int64_t ft__pp_input_made(const ft__pp_builder *b, int p, const ft__pp_work *w)
{
    int stage = w->chunk * b->P + p;
    if (w->act == FT_PP_F) return stage > 0 ? b->f_end[(stage - 1) * b->M + w->micro_batch] : 0;
    if (w->act == FT_PP_W || stage == b->S - 1) return 0;
    return b->b_end[(stage + 1) * b->M + w->micro_batch];
}

/* [P6.3] The earliest start of backward on rank p. */
static int64_t ft__pp_hold(const ft__pp_builder *b, int p)
{
    if (b->config->kind != FT_PP_INTERLEAVED || b->V == 1) return 0;
    if (b->P % 3 != 2 || b->M == b->P) return 0;
    return (int64_t)b->P * b->V + 3 * (b->P - 1 - p);
}

/* Runs rank p's work as far as its inputs are made. */
static int ft__pp_clock_rank(ft__pp_builder *b, int p)
{
    int begun = b->at[p];
    for (; b->first[p] + b->at[p] < b->first[p + 1]; b->at[p]++) {
        ft__pp_work *w = &b->work[b->first[p] + b->at[p]];
        int64_t made = ft__pp_input_made(b, p, w), hold = ft__pp_hold(b, p);
        if (made < 0) break;
        w->start = b->at[p] > 0 && w[-1].end > made ? w[-1].end : made;
        if (w->act == FT_PP_B && w->start < hold) w->start = hold;
        w->end = w->start + ft__pp_units[w->act];
        int64_t slot = (int64_t)(w->chunk * b->P + p) * b->M + w->micro_batch;
        if (w->act == FT_PP_F) b->f_end[slot] = w->end;
        if (w->act == FT_PP_B || w->act == FT_PP_BI) b->b_end[slot] = w->end;
    }
    return b->at[p] - begun;
}

static void ft__pp_clock(ft__pp_builder *b)
{
    int ran = 1;
    memset(b->at, 0, (size_t)b->P * sizeof *b->at);
    for (int i = 0; i < b->S * b->M; i++) b->f_end[i] = b->b_end[i] = -1;
    while (ran > 0) {
        ran = 0;
        for (int p = 0; p < b->P; p++) ran += ft__pp_clock_rank(b, p);
    }
}

/* ------------------------------------------------------------------------------ >>rounds.impl */

/* The latest time up to t at which rank p is not in the midst of something. */
static int64_t ft__pp_between(const ft__pp_builder *b, int p, int64_t t)
{
    int low = b->first[p], high = b->first[p + 1];
    while (low < high) { /* the first that starts at t or later */
        int middle = low + (high - low) / 2;
        if (b->work[middle].start < t) low = middle + 1;
        else high = middle;
    }
    if (low == b->first[p] || b->work[low - 1].end <= t) return t;
    return b->work[low - 1].start;
}

/* [P6.2] */
static int64_t ft__pp_round(const ft__pp_builder *b, int from, int to, int64_t made, int64_t used)
{
    int64_t t = used;
    while (t >= made) {
        int64_t earlier = ft__pp_between(b, from, ft__pp_between(b, to, t));
        if (earlier == t) return t;
        t = earlier;
    }
    return used;
}

static void ft__pp_add_message(ft__pp_builder *b, int p, const ft__pp_work *w)
{
    int stage = w->chunk * b->P + p;
    int peer_stage = w->act == FT_PP_F ? stage - 1 : stage + 1;
    if (w->act == FT_PP_W || peer_stage < 0 || peer_stage == b->S) return;
    ft__pp_message *x = &b->messages[b->n_messages++];
    x->cargo = w->act == FT_PP_F ? FT_PP_ACTIVATION : FT_PP_GRADIENT;
    x->stage = stage < peer_stage ? stage : peer_stage;
    x->micro_batch = w->micro_batch;
    x->round = ft__pp_round(b, peer_stage % b->P, p, ft__pp_input_made(b, p, w), w->start);
}

/* A total order, so that qsort has no choice. */
static int ft__pp_compare(const void *one, const void *two)
{
    const ft__pp_message *a = (const ft__pp_message *)one, *b = (const ft__pp_message *)two;
    if (a->round != b->round) return a->round < b->round ? -1 : 1;
    if (a->cargo != b->cargo) return a->cargo < b->cargo ? -1 : 1;
    if (a->stage != b->stage) return a->stage < b->stage ? -1 : 1;
    return a->micro_batch < b->micro_batch ? -1 : a->micro_batch > b->micro_batch;
}

static void ft__pp_rounds(ft__pp_builder *b)
{
    for (int p = 0; b->P > 1 && p < b->P; p++) {
        for (int i = b->first[p]; i < b->first[p + 1]; i++) ft__pp_add_message(b, p, &b->work[i]);
    }
    qsort(b->messages, (size_t)b->n_messages, sizeof *b->messages, ft__pp_compare);
}

/* ---------------------------------------------------------------------------- >>schedule.impl */

/* The end of message `x` that is on the lower (0) or on the upper (1) of its two stages. */
static int ft__pp_message_end(const ft__pp_builder *b, const ft__pp_message *x, int upper,
                              ft_pp_transfer *end)
{
    int stage = x->stage + upper, peer_stage = x->stage + 1 - upper;
    end->peer = peer_stage % b->P;
    end->is_send = (x->cargo == FT_PP_ACTIVATION) != upper;
    end->cargo = x->cargo;
    end->micro_batch = x->micro_batch;
    end->chunk = stage / b->P;
    end->peer_chunk = peer_stage / b->P;
    return stage % b->P;
}

/* Where in the schedule's block a rank's actions and transfers are, and how far they are filled. */
typedef struct ft__pp_place {
    int actions, transfers;      /* their number */
    int64_t last;                /* round of the last message */
    int64_t *rounds;             /* [transfers] */
    ft_pp_transfer *transfer;
} ft__pp_place;

static void ft__pp_count(const ft__pp_builder *b, ft__pp_place *place)
{
    ft_pp_transfer end;
    for (int p = 0; p < b->P; p++) {
        place[p].actions = b->first[p + 1] - b->first[p];
        place[p].last = -1;
    }
    for (int i = 0; i < 2 * b->n_messages; i++) {
        const ft__pp_message *x = &b->messages[i / 2];
        ft__pp_place *at = &place[ft__pp_message_end(b, x, i % 2, &end)];
        at->transfers++;
        at->actions += x->round != at->last;
        at->last = x->round;
    }
}

/* Deals the sorted messages out to their two ranks. */
static void ft__pp_deal(const ft__pp_builder *b, ft__pp_place *place, ft_pp_transfer *transfers,
                        int64_t *rounds)
{
    for (int p = 0; p < b->P; p++) {
        place[p].transfer = transfers;
        place[p].rounds = rounds;
        transfers += place[p].transfers;
        rounds += place[p].transfers;
        place[p].transfers = 0;
    }
    for (int i = 0; i < 2 * b->n_messages; i++) {
        const ft__pp_message *x = &b->messages[i / 2];
        ft_pp_transfer end;
        ft__pp_place *at = &place[ft__pp_message_end(b, x, i % 2, &end)];
        at->rounds[at->transfers] = x->round;
        at->transfer[at->transfers++] = end;
    }
}

static void ft__pp_neighbours(const ft__pp_builder *b, int p, ft_pp_action *a)
{
    int stage = a->chunk * b->P + p;
    int below = stage > 0 ? (stage - 1) % b->P : FT_PP_NOBODY;
    int above = stage < b->S - 1 ? (stage + 1) % b->P : FT_PP_NOBODY;
    a->from = a->act == FT_PP_F ? below : above;
    a->to = a->act == FT_PP_F ? above : below;
    if (a->act == FT_PP_W || a->act == FT_PP_EXCHANGE) a->from = a->to = FT_PP_NOBODY;
}

/* [P6.1] Merges a rank's work with its exchanges: round t before work that starts at t. */
static void ft__pp_merge(const ft__pp_builder *b, int p, const ft__pp_place *place,
                         ft_pp_list *list)
{
    int x = 0;
    list->n = 0;
    for (int i = b->first[p]; i <= b->first[p + 1]; i++) {
        const ft__pp_work *w = i < b->first[p + 1] ? &b->work[i] : NULL;
        while (x < place->transfers && (!w || place->rounds[x] <= w->start)) {
            ft_pp_action *a = &list->actions[list->n++];
            a->act = FT_PP_EXCHANGE;
            a->transfers = &place->transfer[x];
            for (int64_t t = place->rounds[x]; x < place->transfers && place->rounds[x] == t; x++) {
                a->n++;
            }
            ft__pp_neighbours(b, p, a);
        }
        if (!w) break;
        ft_pp_action *a = &list->actions[list->n++];
        a->act = w->act;
        a->chunk = w->chunk;
        a->micro_batch = w->micro_batch;
        ft__pp_neighbours(b, p, a);
    }
}

static ft_pp_schedule *ft__pp_assemble(const ft__pp_builder *b, ft__pp_place *place,
                                       int64_t *rounds)
{
    size_t actions = 0, P = (size_t)b->P;
    ft__pp_count(b, place);
    for (int p = 0; p < b->P; p++) actions += (size_t)place[p].actions;
    ft_pp_schedule *s = (ft_pp_schedule *)ft__pp_alloc("a schedule", sizeof *s +
        P * sizeof(ft_pp_list) + actions * sizeof(ft_pp_action) +
        2 * (size_t)b->n_messages * sizeof(ft_pp_transfer));
    if (!s) return NULL;
    s->config = *b->config;
    s->ranks = (ft_pp_list *)(void *)(s + 1);
    ft_pp_action *action = (ft_pp_action *)(void *)(s->ranks + P);
    ft__pp_deal(b, place, (ft_pp_transfer *)(void *)(action + actions), rounds);
    for (int p = 0; p < b->P; p++) {
        s->ranks[p].actions = action;
        ft__pp_merge(b, p, &place[p], &s->ranks[p]);
        action += place[p].actions;
    }
    return s;
}

/* Scratch of a builder, carved from one block that is NULL when only its size is asked for. */
static size_t ft__pp_carve(ft__pp_builder *b, char *block, ft__pp_place **place, int64_t **rounds)
{
    size_t slots = (size_t)b->S * (size_t)b->M, P = (size_t)b->P, used = 0;
    size_t messages = b->P > 1 ? 2 * slots : 0;
#define FT__PP_CARVE(to, type, n)                                                                  \
    (to = block ? (type *)(void *)(block + used) : NULL, used += (n) * sizeof(type))
    FT__PP_CARVE(b->f_end, int64_t, slots);
    FT__PP_CARVE(b->b_end, int64_t, slots);
    FT__PP_CARVE(*rounds, int64_t, 2 * messages);
    FT__PP_CARVE(*place, ft__pp_place, P);
    FT__PP_CARVE(b->work, ft__pp_work, 3 * slots);
    FT__PP_CARVE(b->messages, ft__pp_message, messages);
    FT__PP_CARVE(b->first, int, P + 1);
    FT__PP_CARVE(b->at, int, P);
#undef FT__PP_CARVE
    return used;
}

FT_API ft_status ft_pp_schedule_create(const ft_pp_config *config, ft_pp_schedule **out)
{
    ft__pp_builder b;
    ft__pp_place *place;
    int64_t *rounds;
    FT_TRY(ft_pp_check(config));
    if (!out) return ft_error(FT_ERR_ARG, "ft_pp_schedule_create: out is NULL");
    memset(&b, 0, sizeof b);
    b.config = config;
    b.P = config->ranks;
    b.V = config->chunks;
    b.M = config->micro_batches;
    b.S = b.P * b.V;
    size_t bytes = ft__pp_carve(&b, NULL, &place, &rounds);
    char *block = (char *)ft__pp_alloc("building a schedule", bytes);
    if (!block) return FT_ERR_OOM;
    ft__pp_carve(&b, block, &place, &rounds);
    for (int p = 0; p < b.P; p++) ft__pp_order(&b, p);
    ft__pp_clock(&b);
    ft__pp_rounds(&b);
    *out = ft__pp_assemble(&b, place, rounds);
    FT_FREE(block);
    return *out ? FT_OK : FT_ERR_OOM;
}

FT_API void ft_pp_schedule_free(ft_pp_schedule *schedule) { FT_FREE(schedule); }

/* ---------------------------------------------------------------------------- >>validate.impl

   A rank's list by itself, walked in its order: whatever an action reads has been made or received
   before it, and each piece of work is done once. Whether exchanges meet their peers is for the
   simulation. */

enum {
    FT__PP_HAS_X = 1,     /* the chunk's input activation was received */
    FT__PP_HAS_DY = 2,    /* the gradient of its output was received */
    FT__PP_DID_F = 4,
    FT__PP_DID_BI = 8,    /* the gradient of its input is made */
    FT__PP_DID_W = 16,    /* and those of its weights: backward is over */
    FT__PP_SENT_Y = 32,
    FT__PP_SENT_DX = 64
};

typedef struct ft__pp_walk {
    const ft_pp_schedule *schedule;
    int P, V, M, S, p;
    unsigned char *did;   /* [V * M] of this rank */
    ft_pp_rank_times *times; /* its counts are filled in */
    int in_flight, deferred, boundary; /* at this point */
} ft__pp_walk;

static ft_status ft__pp_wrong(const ft__pp_walk *w, int i, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

static ft_status ft__pp_wrong(const ft__pp_walk *w, int i, const char *format, ...)
{
    char why[256], what[512];
    ft__pp_text t = {what, sizeof what, 0};
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    ft__pp_put_action(&t, &w->schedule->ranks[w->p].actions[i]);
    return ft_error(FT_ERR_STATE, "pipeline: action %d of rank %d (%s): %s", i, w->p, what, why);
}

static unsigned char *ft__pp_did(const ft__pp_walk *w, int chunk, int micro_batch)
{
    return &w->did[(size_t)chunk * (size_t)w->M + (size_t)micro_batch];
}

static void ft__pp_note(int *count, int change, int *most)
{
    *count += change;
    if (*count > *most) *most = *count;
}

/* The input of F (from the stage below) or of B, BI (from the one above) is there. */
static ft_status ft__pp_walk_input(ft__pp_walk *w, int i, const ft_pp_action *a, int peer_stage)
{
    int forward = a->act == FT_PP_F, has = forward ? FT__PP_HAS_X : FT__PP_HAS_DY;
    if (peer_stage < 0 || peer_stage == w->S) return FT_OK;
    if (peer_stage % w->P != w->p) {
        if (!(*ft__pp_did(w, a->chunk, a->micro_batch) & has))
            return ft__pp_wrong(w, i, "its input was not received from rank %d before",
                                peer_stage % w->P);
        ft__pp_note(&w->boundary, -1, &w->times->boundary);
        return FT_OK;
    }
    has = forward ? FT__PP_DID_F : FT__PP_DID_BI;
    if (*ft__pp_did(w, peer_stage / w->P, a->micro_batch) & has) return FT_OK;
    return ft__pp_wrong(w, i, "its input was not made by chunk %d before", peer_stage / w->P);
}

static int ft__pp_stage_rank(const ft__pp_walk *w, int stage)
{
    return stage < 0 || stage >= w->S ? FT_PP_NOBODY : stage % w->P;
}

static ft_status ft__pp_walk_compute(ft__pp_walk *w, int i, const ft_pp_action *a)
{
    unsigned char *did = ft__pp_did(w, a->chunk, a->micro_batch);
    int forward = a->act == FT_PP_F, stage = a->chunk * w->P + w->p;
    int from = forward ? stage - 1 : stage + 1, to = forward ? stage + 1 : stage - 1;
    if (w->schedule->config.forward_only && !forward)
        return ft__pp_wrong(w, i, "the schedule is forward-only");
    if (*did & (forward ? FT__PP_DID_F : FT__PP_DID_BI))
        return ft__pp_wrong(w, i, "it was done before");
    if (!forward && !(*did & FT__PP_DID_F)) return ft__pp_wrong(w, i, "its F was not done before");
    if (a->from != ft__pp_stage_rank(w, from) || a->to != ft__pp_stage_rank(w, to))
        return ft__pp_wrong(w, i, "it is from rank %d to rank %d, and must be from %d to %d (-1: "
                            "nobody)", a->from, a->to, ft__pp_stage_rank(w, from),
                            ft__pp_stage_rank(w, to));
    FT_TRY(ft__pp_walk_input(w, i, a, from));
    if (forward) ft__pp_note(&w->in_flight, 1, &w->times->in_flight);
    if (a->act == FT_PP_BI) ft__pp_note(&w->deferred, 1, &w->times->deferred);
    if (a->act == FT_PP_B || (forward && w->schedule->config.forward_only)) w->in_flight--;
    if (to >= 0 && to < w->S && to % w->P != w->p) {
        ft__pp_note(&w->boundary, 1, &w->times->boundary);
    }
    *did = (unsigned char)(*did | (forward ? FT__PP_DID_F : FT__PP_DID_BI));
    if (a->act == FT_PP_B) *did |= FT__PP_DID_W;
    return FT_OK;
}

static ft_status ft__pp_walk_weights(ft__pp_walk *w, int i, const ft_pp_action *a)
{
    unsigned char *did = ft__pp_did(w, a->chunk, a->micro_batch);
    if (*did & FT__PP_DID_W) return ft__pp_wrong(w, i, "it was done before");
    if (!(*did & FT__PP_DID_BI)) return ft__pp_wrong(w, i, "its BI was not done before");
    *did |= FT__PP_DID_W;
    w->deferred--;
    w->in_flight--;
    return FT_OK;
}

static ft_status ft__pp_walk_transfer(ft__pp_walk *w, int i, const ft_pp_transfer *x)
{
    if (x->chunk < 0 || x->chunk >= w->V || x->micro_batch < 0 || x->micro_batch >= w->M)
        return ft__pp_wrong(w, i, "there are %d chunks and %d micro-batches", w->V, w->M);
    int up = (x->cargo == FT_PP_ACTIVATION) == (x->is_send != 0); /* the peer's stage is above */
    int stage = x->chunk * w->P + w->p, peer_stage = up ? stage + 1 : stage - 1;
    unsigned char *did = ft__pp_did(w, x->chunk, x->micro_batch);
    if (peer_stage < 0 || peer_stage >= w->S)
        return ft__pp_wrong(w, i, "chunk %d is the %s of the pipeline", x->chunk,
                            up ? "end" : "beginning");
    if (x->peer != peer_stage % w->P || x->peer_chunk != peer_stage / w->P || x->peer == w->p)
        return ft__pp_wrong(w, i, "the peer of micro-batch %d is rank %d, chunk %d, and must be "
                            "rank %d, chunk %d", x->micro_batch, x->peer, x->peer_chunk,
                            peer_stage % w->P, peer_stage / w->P);
    int forward = x->cargo == FT_PP_ACTIVATION;
    int bit = x->is_send ? (forward ? FT__PP_SENT_Y : FT__PP_SENT_DX)
                         : (forward ? FT__PP_HAS_X : FT__PP_HAS_DY);
    if (*did & bit)
        return ft__pp_wrong(w, i, "micro-batch %d was %s before", x->micro_batch,
                            x->is_send ? "sent" : "received");
    if (x->is_send && !(*did & (forward ? FT__PP_DID_F : FT__PP_DID_BI)))
        return ft__pp_wrong(w, i, "what it sends of micro-batch %d was not made before",
                            x->micro_batch);
    *did = (unsigned char)(*did | bit);
    if (!x->is_send) ft__pp_note(&w->boundary, 1, &w->times->boundary);
    return FT_OK;
}

static ft_status ft__pp_walk_action(ft__pp_walk *w, int i, const ft_pp_action *a)
{
    int sends = 0;
    if ((unsigned)a->act >= FT_PP_ACT_COUNT || (a->act == FT_PP_EXCHANGE) != (a->n > 0))
        return ft__pp_wrong(w, i, "act %d with %d transfers", (int)a->act, a->n);
    if (a->chunk < 0 || a->chunk >= w->V || a->micro_batch < 0 || a->micro_batch >= w->M)
        return ft__pp_wrong(w, i, "there are %d chunks and %d micro-batches", w->V, w->M);
    if (a->act == FT_PP_W) return ft__pp_walk_weights(w, i, a);
    if (a->act != FT_PP_EXCHANGE) return ft__pp_walk_compute(w, i, a);
    for (int k = 0; k < a->n; k++) { /* received tensors come into being before sent ones go */
        FT_TRY(ft__pp_walk_transfer(w, i, &a->transfers[k]));
        sends += a->transfers[k].is_send != 0;
    }
    w->boundary -= sends;
    return FT_OK;
}

static ft_status ft__pp_walk_rank(ft__pp_walk *w)
{
    const ft_pp_list *list = &w->schedule->ranks[w->p];
    int want = FT__PP_DID_F | (w->schedule->config.forward_only ? 0 : FT__PP_DID_W);
    memset(w->did, 0, (size_t)w->V * (size_t)w->M);
    w->in_flight = w->deferred = w->boundary = 0;
    for (int i = 0; i < list->n; i++) FT_TRY(ft__pp_walk_action(w, i, &list->actions[i]));
    for (int k = 0; k < w->V * w->M; k++) {
        if ((w->did[k] & want) == want) continue;
        return ft_error(FT_ERR_STATE, "pipeline: rank %d's list ends without the %s of micro-batch "
                        "%d (chunk %d)", w->p, w->did[k] & FT__PP_DID_F ? "backward" : "forward",
                        k % w->M, k / w->M);
    }
    return FT_OK;
}

static ft_status ft__pp_validate(const ft_pp_schedule *s, ft_pp_rank_times *times)
{
    ft__pp_walk w;
    memset(&w, 0, sizeof w);
    w.schedule = s;
    w.P = s->config.ranks;
    w.V = s->config.chunks;
    w.M = s->config.micro_batches;
    w.S = w.P * w.V;
    w.did = (unsigned char *)ft__pp_alloc("checking a schedule", (size_t)w.V * (size_t)w.M);
    if (!w.did) return FT_ERR_OOM;
    ft_status status = FT_OK;
    for (w.p = 0; w.p < w.P && status == FT_OK; w.p++) {
        w.times = &times[w.p];
        status = ft__pp_walk_rank(&w);
    }
    FT_FREE(w.did);
    return status;
}

/* ---------------------------------------------------------------------------- >>simulate.impl */

FT_API ft_pp_cost ft_pp_cost_default(void)
{
    ft_pp_cost c;
    memset(&c, 0, sizeof c);
    c.f = c.bi = c.w = 1;
    c.b = 2;
    return c;
}

/* Compute and exchanges of a rank, each in the order of its list. */
typedef struct ft__pp_runner {
    int compute, exchange;       /* the next action of either kind; the list's n: there is none */
    double compute_free, exchange_free; /* since when nothing of that kind runs */
    int posted;                  /* `exchange` waits for its peers */
    int unmet;                   /* transfers of it that have not met theirs */
    double latest;               /* when the last peer that it met had come */
    unsigned char *met;          /* [transfers of the largest exchange] */
} ft__pp_runner;

typedef struct ft__pp_sim {
    const ft_pp_schedule *schedule;
    const ft_pp_cost *cost;
    int P, V, M, S;
    ft_pp_rank_times *times;
    ft__pp_runner *runners;      /* [P] */
    double *made[2];             /* [S * M] when F and B or BI ended, by cargo; -1: not yet */
    double *here[2];             /* [S * M] when a stage's input arrived from its peer, by cargo */
} ft__pp_sim;

static int ft__pp_next(const ft_pp_list *list, int i, int exchange)
{
    while (i < list->n && (list->actions[i].act == FT_PP_EXCHANGE) != exchange) i++;
    return i;
}

static double ft__pp_max(double a, double b) { return a > b ? a : b; }

static double ft__pp_duration(const ft__pp_sim *s, int p, const ft_pp_action *a)
{
    const ft_pp_cost *c = s->cost;
    double whole = a->act == FT_PP_F ? c->f : a->act == FT_PP_B ? c->b : a->act == FT_PP_BI ? c->bi
                 : c->w;
    return whole / s->V * (c->stage ? c->stage[a->chunk * s->P + p] : 1);
}

/* When the input of `a` is there; -1: not yet. */
static double ft__pp_ready(const ft__pp_sim *s, int p, const ft_pp_action *a)
{
    int stage = a->chunk * s->P + p, cargo = a->act == FT_PP_F ? FT_PP_ACTIVATION : FT_PP_GRADIENT;
    int below = a->act == FT_PP_F ? stage - 1 : stage + 1; /* where the input is made */
    if (a->act == FT_PP_W || a->from == FT_PP_NOBODY) return 0;
    if (a->from == p) return s->made[cargo][below * s->M + a->micro_batch];
    return s->here[cargo][stage * s->M + a->micro_batch];
}

static int ft__pp_step_compute(ft__pp_sim *s, int p)
{
    ft__pp_runner *r = &s->runners[p];
    const ft_pp_list *list = &s->schedule->ranks[p];
    int i = r->compute, blocking = s->cost->blocking;
    if (i == list->n || (blocking && r->exchange < i)) return 0;
    const ft_pp_action *a = &list->actions[i];
    double ready = ft__pp_ready(s, p, a), duration = ft__pp_duration(s, p, a);
    if (ready < 0) return 0;
    double start = ft__pp_max(r->compute_free, ready);
    if (blocking) start = ft__pp_max(start, r->exchange_free);
    int slot = (a->chunk * s->P + p) * s->M + a->micro_batch;
    r->compute_free = start + duration;
    if (a->act != FT_PP_W) s->made[a->act == FT_PP_F ? FT_PP_ACTIVATION : FT_PP_GRADIENT][slot] =
        r->compute_free;
    s->times[p].start[i] = start;
    s->times[p].end[i] = r->compute_free;
    s->times[p].busy += duration;
    r->compute = ft__pp_next(list, i + 1, 0);
    return 1;
}

/* The next exchange is posted when what it sends is made. */
static int ft__pp_post(ft__pp_sim *s, int p)
{
    ft__pp_runner *r = &s->runners[p];
    int i = r->exchange;
    const ft_pp_action *a = &s->schedule->ranks[p].actions[i];
    double start = r->exchange_free;
    if (s->cost->blocking && r->compute < i) return 0;
    if (s->cost->blocking) start = ft__pp_max(start, r->compute_free);
    for (int k = 0; k < a->n; k++) {
        const ft_pp_transfer *x = &a->transfers[k];
        if (!x->is_send) continue;
        double made = s->made[x->cargo][(x->chunk * s->P + p) * s->M + x->micro_batch];
        if (made < 0) return 0;
        start = ft__pp_max(start, made);
    }
    memset(r->met, 0, (size_t)a->n);
    r->posted = 1;
    r->unmet = a->n;
    r->latest = start;
    s->times[p].start[i] = start;
    return 1;
}

/* The first transfer of p's posted exchange that has not met its peer, from or to that peer;
   NULL if there is none. */
static const ft_pp_transfer *ft__pp_unmet(const ft__pp_sim *s, int p, int peer, int is_send, int *k)
{
    const ft__pp_runner *r = &s->runners[p];
    if (!r->posted) return NULL;
    const ft_pp_action *a = &s->schedule->ranks[p].actions[r->exchange];
    for (*k = 0; *k < a->n; ++*k) {
        const ft_pp_transfer *x = &a->transfers[*k];
        if (!r->met[*k] && x->peer == peer && (x->is_send != 0) == is_send) return x;
    }
    return NULL;
}

static ft_status ft__pp_mismatch(const ft__pp_sim *s, int p, const ft_pp_transfer *x, int q,
                                 const ft_pp_transfer *y)
{
    char text[512];
    ft__pp_text t = {text, sizeof text, 0};
    ft__pp_put(&t, "action %d of rank %d is to ", s->runners[p].exchange, p);
    ft__pp_put_transfer(&t, x);
    ft__pp_put(&t, ", and meets action %d of rank %d, to ", s->runners[q].exchange, q);
    ft__pp_put_transfer(&t, y);
    return ft_error(FT_ERR_STATE, "pipeline: %s: both ranks must have the transfers between them "
                    "in the same order", text);
}

/* Transfer k of p's exchange meets its peer's, if that is posted and no earlier one is in the
   way. */
static ft_status ft__pp_meet(ft__pp_sim *s, int p, int k)
{
    ft__pp_runner *r = &s->runners[p];
    const ft_pp_transfer *x = &s->schedule->ranks[p].actions[r->exchange].transfers[k];
    int first, peer_k, is_send = x->is_send != 0;
    ft__pp_unmet(s, p, x->peer, is_send, &first);
    const ft_pp_transfer *y = ft__pp_unmet(s, x->peer, p, !is_send, &peer_k);
    if (first != k || !y) return FT_OK;
    if (y->cargo != x->cargo || y->micro_batch != x->micro_batch || y->chunk != x->peer_chunk) {
        return ft__pp_mismatch(s, p, x, x->peer, y);
    }
    ft__pp_runner *q = &s->runners[x->peer];
    double both = ft__pp_max(s->times[p].start[r->exchange], s->times[x->peer].start[q->exchange]);
    r->met[k] = q->met[peer_k] = 1;
    r->unmet--;
    q->unmet--;
    r->latest = ft__pp_max(r->latest, both);
    q->latest = ft__pp_max(q->latest, both);
    return FT_OK;
}

static void ft__pp_finish(ft__pp_sim *s, int p)
{
    ft__pp_runner *r = &s->runners[p];
    const ft_pp_list *list = &s->schedule->ranks[p];
    const ft_pp_action *a = &list->actions[r->exchange];
    r->exchange_free = r->latest + s->cost->transfer;
    s->times[p].end[r->exchange] = r->exchange_free;
    for (int k = 0; k < a->n; k++) {
        const ft_pp_transfer *x = &a->transfers[k];
        int slot = (x->chunk * s->P + p) * s->M + x->micro_batch;
        if (!x->is_send) s->here[x->cargo][slot] = r->exchange_free;
    }
    r->posted = 0;
    r->exchange = ft__pp_next(list, r->exchange + 1, 1);
}

/* Runs what rank p can run; *ran counts it. */
static ft_status ft__pp_step(ft__pp_sim *s, int p, int *ran)
{
    ft__pp_runner *r = &s->runners[p];
    const ft_pp_list *list = &s->schedule->ranks[p];
    for (int more = 1; more; *ran += more) {
        more = ft__pp_step_compute(s, p);
        if (r->exchange == list->n) continue;
        if (!r->posted) more += ft__pp_post(s, p);
        if (!r->posted) continue;
        int before = r->unmet;
        for (int k = 0; r->unmet > 0 && k < list->actions[r->exchange].n; k++) {
            if (!r->met[k]) FT_TRY(ft__pp_meet(s, p, k));
        }
        more += before - r->unmet;
        if (r->unmet > 0) continue;
        ft__pp_finish(s, p);
        more++;
    }
    return FT_OK;
}

/* What is left when nothing can run: the ranks that wait, each with what it waits for. Follows the
   waits from rank p on, so that those of a cycle stand one after another. */
static ft_status ft__pp_deadlock(const ft__pp_sim *s, int p)
{
    char text[800];
    ft__pp_text t = {text, sizeof text, 0};
    for (int n = 0; n < s->P && n < 6; n++) {
        const ft__pp_runner *r = &s->runners[p];
        const ft_pp_list *list = &s->schedule->ranks[p];
        ft__pp_put(&t, "%srank %d ", n ? "; " : "", p);
        if (r->exchange == list->n) {
            ft__pp_put(&t, "has no exchange left");
            break;
        }
        const ft_pp_action *a = &list->actions[r->exchange];
        int k = 0;
        while (k < a->n - 1 && r->met[k]) k++;
        ft__pp_put(&t, "(action %d) waits to ", r->exchange);
        ft__pp_put_transfer(&t, &a->transfers[k]);
        p = a->transfers[k].peer;
    }
    return ft_error(FT_ERR_STATE, "pipeline: the exchanges deadlock: %s", text);
}

static ft_status ft__pp_run(ft__pp_sim *s)
{
    for (int ran = 1; ran > 0;) {
        ran = 0;
        for (int p = 0; p < s->P; p++) FT_TRY(ft__pp_step(s, p, &ran));
    }
    for (int p = 0; p < s->P; p++) {
        if (s->runners[p].exchange < s->schedule->ranks[p].n) return ft__pp_deadlock(s, p);
    }
    return FT_OK;
}

static int ft__pp_cost_ok(double x) { return x >= 0 && x <= 1e100; } /* false for NaN too */

static ft_status ft__pp_check_cost(const ft_pp_config *config, const ft_pp_cost *c)
{
    if (!ft__pp_cost_ok(c->f) || !ft__pp_cost_ok(c->b) || !ft__pp_cost_ok(c->bi) ||
        !ft__pp_cost_ok(c->w) || !ft__pp_cost_ok(c->transfer))
        return ft_error(FT_ERR_ARG, "pipeline: costs f %g, b %g, bi %g, w %g, transfer %g; each "
                        "must be 0 or more and finite", c->f, c->b, c->bi, c->w, c->transfer);
    if (c->blocking != 0 && c->blocking != 1)
        return ft_error(FT_ERR_ARG, "pipeline: blocking is %d, it must be 0 or 1", c->blocking);
    for (int i = 0; c->stage && i < config->ranks * config->chunks; i++) {
        if (ft__pp_cost_ok(c->stage[i])) continue;
        return ft_error(FT_ERR_ARG, "pipeline: cost factor of virtual stage %d is %g; it must be 0 "
                        "or more and finite", i, c->stage[i]);
    }
    return FT_OK;
}

/* All ranks' results and what they point to, in one block. */
static ft_pp_simulation *ft__pp_results(const ft_pp_schedule *s)
{
    size_t actions = 0, P = (size_t)s->config.ranks;
    for (size_t p = 0; p < P; p++) actions += (size_t)s->ranks[p].n;
    ft_pp_simulation *r = (ft_pp_simulation *)ft__pp_alloc("a simulation", sizeof *r +
        P * sizeof(ft_pp_rank_times) + 2 * actions * sizeof(double));
    if (!r) return NULL;
    r->ranks = (ft_pp_rank_times *)(void *)(r + 1);
    double *at = (double *)(void *)(r->ranks + P);
    for (size_t p = 0; p < P; p++) {
        r->ranks[p].start = at;
        r->ranks[p].end = at + s->ranks[p].n;
        at += 2 * s->ranks[p].n;
    }
    return r;
}

/* Scratch of a simulation: `block` is NULL when only its size is asked for. */
static size_t ft__pp_sim_carve(ft__pp_sim *s, char *block)
{
    size_t slots = (size_t)s->S * (size_t)s->M, used = 0, most = 0;
    for (int p = 0; p < s->P; p++) {
        const ft_pp_list *list = &s->schedule->ranks[p];
        for (int i = 0; i < list->n; i++) {
            if ((size_t)list->actions[i].n > most) most = (size_t)list->actions[i].n;
        }
    }
    for (int k = 0; k < 2; k++, used += 2 * slots * sizeof(double)) {
        double *at = block ? (double *)(void *)(block + used) : NULL;
        s->made[k] = at;
        s->here[k] = at ? at + slots : NULL;
        for (size_t i = 0; at && i < 2 * slots; i++) at[i] = -1;
    }
    if (block) s->runners = (ft__pp_runner *)(void *)(block + used);
    used += (size_t)s->P * sizeof(ft__pp_runner);
    for (int p = 0; p < s->P; p++, used += most) {
        if (!block) continue;
        s->runners[p].compute = ft__pp_next(&s->schedule->ranks[p], 0, 0);
        s->runners[p].exchange = ft__pp_next(&s->schedule->ranks[p], 0, 1);
        s->runners[p].met = (unsigned char *)block + used;
    }
    return used;
}

static void ft__pp_sum_up(const ft__pp_sim *s, ft_pp_simulation *r)
{
    double busy = 0;
    for (int p = 0; p < s->P; p++) {
        busy += r->ranks[p].busy;
        r->makespan = ft__pp_max(r->makespan, s->runners[p].compute_free);
        r->makespan = ft__pp_max(r->makespan, s->runners[p].exchange_free);
    }
    if (r->makespan > 0) r->bubble = 1 - busy / (s->P * r->makespan);
}

static ft_status ft__pp_simulate(ft__pp_sim *s, ft_pp_simulation *r)
{
    FT_TRY(ft__pp_validate(s->schedule, r->ranks));
    char *block = (char *)ft__pp_alloc("a simulation", ft__pp_sim_carve(s, NULL));
    if (!block) return FT_ERR_OOM;
    ft__pp_sim_carve(s, block);
    s->times = r->ranks;
    ft_status status = ft__pp_run(s);
    ft__pp_sum_up(s, r);
    FT_FREE(block);
    return status;
}

FT_API ft_status ft_pp_simulate(const ft_pp_schedule *schedule, const ft_pp_cost *cost,
                                ft_pp_simulation **out)
{
    ft_pp_cost units = ft_pp_cost_default();
    ft__pp_sim s;
    if (!schedule || !schedule->ranks || !out)
        return ft_error(FT_ERR_ARG, "ft_pp_simulate: %s is NULL",
                        !schedule ? "schedule" : out ? "schedule->ranks" : "out");
    FT_TRY(ft_pp_check(&schedule->config));
    FT_TRY(ft__pp_check_cost(&schedule->config, cost ? cost : &units));
    memset(&s, 0, sizeof s);
    s.schedule = schedule;
    s.cost = cost ? cost : &units;
    s.P = schedule->config.ranks;
    s.V = schedule->config.chunks;
    s.M = schedule->config.micro_batches;
    s.S = s.P * s.V;
    ft_pp_simulation *r = ft__pp_results(schedule);
    if (!r) return FT_ERR_OOM;
    ft_status status = ft__pp_simulate(&s, r);
    if (status != FT_OK) {
        FT_FREE(r);
        return status;
    }
    *out = r;
    return FT_OK;
}

FT_API void ft_pp_simulation_free(ft_pp_simulation *simulation) { FT_FREE(simulation); }

/* ------------------------------------------------------------------------------- >>draw.impl */

enum { FT__PP_MAX_COLUMNS = 100000 };

typedef struct ft__pp_canvas {
    const ft_pp_schedule *schedule;
    const ft_pp_simulation *simulation;
    double column;         /* time of a column */
    int columns, width;    /* characters of a column */
    int used;              /* bit for each ft_pp_act that occurs */
} ft__pp_canvas;

static int ft__pp_column(const ft__pp_canvas *c, double time)
{
    return (int)(time / c->column + 0.5);
}

static void ft__pp_label(const ft__pp_canvas *c, const ft_pp_action *a, char *label, size_t bytes)
{
    ft__pp_text t = {label, bytes, 0};
    const char *mark = a->act == FT_PP_BI ? "i" : a->act == FT_PP_W ? "w" : "";
    ft__pp_put(&t, "%s", mark);
    if (c->schedule->config.chunks > 1) ft__pp_put(&t, "%c", 'a' + a->chunk);
    ft__pp_put(&t, "%d", a->micro_batch);
}

/* Characters that an action needs: a whole backward stands in brackets, and a number without a
   letter needs a blank before it. */
static int ft__pp_need(const ft__pp_canvas *c, const ft_pp_action *a)
{
    char label[32];
    ft__pp_label(c, a, label, sizeof label);
    int blank = a->act == FT_PP_F && c->schedule->config.chunks == 1;
    return (int)strlen(label) + (a->act == FT_PP_B ? 2 : blank);
}

/* The narrowest column in which every action fits. */
static void ft__pp_measure(ft__pp_canvas *c)
{
    c->width = 2;
    c->used = 0;
    c->columns = ft__pp_column(c, c->simulation->makespan);
    for (int p = 0; p < c->schedule->config.ranks; p++) {
        const ft_pp_list *list = &c->schedule->ranks[p];
        const ft_pp_rank_times *times = &c->simulation->ranks[p];
        for (int i = 0; i < list->n; i++) {
            int span = ft__pp_column(c, times->end[i]) - ft__pp_column(c, times->start[i]);
            if (list->actions[i].act == FT_PP_EXCHANGE || span == 0) continue;
            int need = (ft__pp_need(c, &list->actions[i]) + span - 1) / span;
            c->used |= 1 << list->actions[i].act;
            if (need > c->width) c->width = need;
        }
    }
}

static void ft__pp_put_head(ft__pp_text *t, const ft__pp_canvas *c)
{
    const ft_pp_config *g = &c->schedule->config;
    ft__pp_put(t, "%s%s, %d rank%s", ft_pp_kind_name(g->kind), g->forward_only ? " forward" : "",
               g->ranks, g->ranks == 1 ? "" : "s");
    if (g->chunks > 1) ft__pp_put(t, " of %d chunks", g->chunks);
    ft__pp_put(t, ", %d micro-batch%s: %g units, bubble %.1f%%, in flight", g->micro_batches,
               g->micro_batches == 1 ? "" : "es", c->simulation->makespan,
               100 * c->simulation->bubble);
    for (int p = 0; p < g->ranks; p++) ft__pp_put(t, " %d", c->simulation->ranks[p].in_flight);
    ft__pp_put(t, "\n");
}

static void ft__pp_put_idle(ft__pp_text *t, const ft__pp_canvas *c, int columns)
{
    for (; columns > 0; columns--) ft__pp_put(t, "%*s", c->width, ".");
}

static void ft__pp_put_work(ft__pp_text *t, const ft__pp_canvas *c, const ft_pp_action *a,
                            int columns)
{
    char label[32];
    ft__pp_label(c, a, label, sizeof label);
    if (a->act == FT_PP_B) ft__pp_put(t, "[%-*s]", c->width * columns - 2, label);
    else ft__pp_put(t, "%*s%*s", c->width, label, c->width * (columns - 1), "");
}

static void ft__pp_put_row(ft__pp_text *t, const ft__pp_canvas *c, int p)
{
    const ft_pp_list *list = &c->schedule->ranks[p];
    const ft_pp_rank_times *times = &c->simulation->ranks[p];
    int at = 0, digits = snprintf(NULL, 0, "%d", c->schedule->config.ranks - 1);
    ft__pp_put(t, "%*d |", digits, p);
    for (int i = 0; i < list->n; i++) {
        int start = ft__pp_column(c, times->start[i]), end = ft__pp_column(c, times->end[i]);
        if (list->actions[i].act == FT_PP_EXCHANGE || start == end) continue;
        ft__pp_put_idle(t, c, start - at);
        ft__pp_put_work(t, c, &list->actions[i], end - start);
        at = end;
    }
    ft__pp_put_idle(t, c, c->columns - at);
    ft__pp_put(t, "\n");
}

static void ft__pp_put_legend(ft__pp_text *t, const ft__pp_canvas *c)
{
    int letters = c->schedule->config.chunks > 1;
    const char *mark = letters ? "a" : "";
    ft__pp_put(t, "%s3 forward of micro-batch 3%s", mark, letters ? " in chunk a" : "");
    if (c->used & 1 << FT_PP_B) ft__pp_put(t, ", [%s3] backward", mark);
    if (c->used & 1 << FT_PP_BI) ft__pp_put(t, ", i%s3 gradient of its input", mark);
    if (c->used & 1 << FT_PP_W) ft__pp_put(t, ", w%s3 of its weights", mark);
    ft__pp_put(t, ", . idle\n");
}

static ft_status ft__pp_draw(ft__pp_canvas *c, ft__pp_text *t)
{
    if (!(c->simulation->makespan / c->column < (double)FT__PP_MAX_COLUMNS))
        return ft_error(FT_ERR_ARG, "pipeline: a drawing of %g units in columns of %g is wider "
                        "than %d columns: give columns more time", c->simulation->makespan,
                        c->column, FT__PP_MAX_COLUMNS);
    ft__pp_measure(c);
    ft__pp_put_head(t, c);
    for (int p = 0; p < c->schedule->config.ranks; p++) ft__pp_put_row(t, c, p);
    ft__pp_put_legend(t, c);
    return FT_OK;
}

FT_API ft_status ft_pp_draw(const ft_pp_schedule *schedule, const ft_pp_cost *cost, double column,
                            char *text, size_t bytes, size_t *needed)
{
    ft_pp_simulation *simulation;
    ft__pp_canvas c;
    ft__pp_text t = {text, text ? bytes : 0, 0};
    FT_TRY(ft_pp_simulate(schedule, cost, &simulation));
    memset(&c, 0, sizeof c);
    c.schedule = schedule;
    c.simulation = simulation;
    c.column = column != 0 ? column : (cost ? cost->f : 1) / schedule->config.chunks;
    ft_status status = c.column > 0 ? ft__pp_draw(&c, &t) :
        ft_error(FT_ERR_ARG, "pipeline: a column of a drawing is %g units, it must be more than 0",
                 c.column);
    ft_pp_simulation_free(simulation);
    FT_TRY(status);
    if (needed) *needed = t.used + 1;
    if (!text || t.used < bytes) return FT_OK;
    return ft_error(FT_ERR_ARG, "ft_pp_draw: the drawing needs %zu bytes, the buffer has %zu",
                    t.used + 1, bytes);
}

FT_API ft_status ft_pp_draw_file(const ft_pp_schedule *schedule, const ft_pp_cost *cost,
                                 double column, FILE *file)
{
    size_t bytes;
    if (!file) return ft_error(FT_ERR_ARG, "ft_pp_draw_file: file is NULL");
    FT_TRY(ft_pp_draw(schedule, cost, column, NULL, 0, &bytes));
    char *text = (char *)ft__pp_alloc("a drawing", bytes);
    if (!text) return FT_ERR_OOM;
    ft_status status = ft_pp_draw(schedule, cost, column, text, bytes, NULL);
    if (status == FT_OK && fputs(text, file) < 0) {
        status = ft_error(FT_ERR_IO, "ft_pp_draw_file: %zu bytes were not written", bytes - 1);
    }
    FT_FREE(text);
    return status;
}

/* ------------------------------------------------------------------------------ >>layers.impl */

static ft_status ft__pp_check_layers(int64_t layers, int stages, const int64_t *first_layer)
{
    if (!first_layer) return ft_error(FT_ERR_ARG, "pipeline layers: first_layer is NULL");
    if (layers < 1 || layers > FT_PP_MAX_LAYERS || stages < 1)
        return ft_error(FT_ERR_ARG, "pipeline layers: %lld layers in %d stages; there must be 1 to "
                        "%d layers and at least 1 stage", (long long)layers, stages,
                        FT_PP_MAX_LAYERS);
    if (stages > layers)
        return ft_error(FT_ERR_ARG, "pipeline layers: %d layers cannot fill %d stages (ranks x "
                        "chunks) with at least one each: use at most %d", (int)layers, stages,
                        (int)layers);
    return FT_OK;
}

FT_API ft_status ft_pp_layers_uniform(int64_t layers, int stages, int64_t *first_layer)
{
    FT_TRY(ft__pp_check_layers(layers, stages, first_layer));
    first_layer[0] = 0;
    for (int s = 0; s < stages; s++) {
        first_layer[s + 1] = first_layer[s] + layers / stages + (s < layers % stages);
    }
    return FT_OK;
}

/* Reads a number of at least 1 and what ends it; 0 if there is none. Values stop at 10 000 000. */
static int ft__pp_number(const char **text)
{
    int value = 0;
    const char *at = *text;
    for (; *at >= '0' && *at <= '9'; at++) {
        if (value < 1000000) value = 10 * value + (*at - '0');
    }
    *text = at;
    return value;
}

FT_API ft_status ft_pp_layers_parse(const char *text, int64_t layers, int stages,
                                    int64_t *first_layer)
{
    FT_TRY(ft__pp_check_layers(layers, stages, first_layer));
    if (!text) return ft_error(FT_ERR_ARG, "pipeline layers: text is NULL");
    const char *at = text;
    int n = 0;
    int64_t sum = first_layer[0] = 0;
    for (;; at++) {
        int value = ft__pp_number(&at);
        if (value == 0 || (*at != ',' && *at))
            return ft_error(FT_ERR_ARG, "pipeline layers: \"%.80s\", at character %d: it must be "
                            "numbers of layers, at least 1 each, with commas between, such as "
                            "\"9,9,8,6\"", text, (int)(at - text) + 1);
        sum += value;
        if (n++ < stages) first_layer[n] = sum;
        if (!*at) break;
    }
    if (n != stages)
        return ft_error(FT_ERR_ARG, "pipeline layers: \"%.80s\" has %d numbers, and there are %d "
                        "stages (ranks x chunks)", text, n, stages);
    if (sum != layers)
        return ft_error(FT_ERR_ARG, "pipeline layers: \"%.80s\" adds up to %lld layers, and the "
                        "model has %lld", text, (long long)sum, (long long)layers);
    return FT_OK;
}

/* [P8] Cuts of a row of layers in consecutive pieces, found from the last piece backwards. */
typedef struct ft__pp_cuts {
    int layers, stages;
    double *sum;           /* [layers + 1] sum[i] = cost of the layers before i */
    double embedding, head, total;
    double *best, *below;  /* [layers + 1] of layers i.. in pieces s.., in those after piece s */
    int *take;             /* [stages, layers + 1] layers of piece s if it starts at layer i */
} ft__pp_cuts;

enum { FT__PP_DEAREST, FT__PP_SQUARES };
#define FT__PP_SLACK 1e-12 /* of the total: sums this close are equal */

static double ft__pp_piece(const ft__pp_cuts *c, int s, int i, int j)
{
    return c->sum[j] - c->sum[i] + (s == 0 ? c->embedding : 0) +
           (s == c->stages - 1 ? c->head : 0);
}

/* Piece s from layer i on: longer ones are tried first and kept on ties. -1 if none costs at most
   `limit`. */
static double ft__pp_cut(ft__pp_cuts *c, int goal, double limit, int s, int i)
{
    int after = c->stages - 1 - s, *take = &c->take[s * (c->layers + 1) + i];
    double best = -1, slack = FT__PP_SLACK * c->total;
    for (int j = c->layers - after; j > (after ? i : c->layers - 1); j--) {
        double piece = ft__pp_piece(c, s, i, j), rest = after ? c->below[j] : 0;
        if (rest < 0 || piece > limit + slack) continue;
        double value = goal == FT__PP_DEAREST ? ft__pp_max(piece, rest) : piece * piece + rest;
        double close = goal == FT__PP_DEAREST ? slack : slack * c->total;
        if (best >= 0 && value >= best - close) continue;
        best = value;
        *take = j - i;
    }
    return best;
}

/* The least that the goal can be over all cuts whose pieces cost at most `limit`. */
static double ft__pp_cut_all(ft__pp_cuts *c, int goal, double limit)
{
    for (int s = c->stages - 1; s >= 0; s--) {
        int most = s == 0 ? 0 : c->layers - (c->stages - s);
        double *swap = c->below;
        for (int i = s; i <= most; i++) c->best[i] = ft__pp_cut(c, goal, limit, s, i);
        c->below = c->best;
        c->best = swap;
    }
    return c->below[0];
}

static ft_status ft__pp_check_costs(int64_t layers, const double *cost, double embedding,
                                    double head)
{
    if (!cost) return ft_error(FT_ERR_ARG, "pipeline layers: cost is NULL");
    if (!ft__pp_cost_ok(embedding) || !ft__pp_cost_ok(head))
        return ft_error(FT_ERR_ARG, "pipeline layers: embedding costs %g and head %g; both must be "
                        "0 or more and finite", embedding, head);
    for (int i = 0; i < layers; i++) {
        if (ft__pp_cost_ok(cost[i])) continue;
        return ft_error(FT_ERR_ARG, "pipeline layers: layer %d costs %g; it must be 0 or more and "
                        "finite", i, cost[i]);
    }
    return FT_OK;
}

FT_API ft_status ft_pp_layers_balance(int64_t layers, const double *cost, double embedding,
                                      double head, int stages, int64_t *first_layer)
{
    ft__pp_cuts c;
    FT_TRY(ft__pp_check_layers(layers, stages, first_layer));
    FT_TRY(ft__pp_check_costs(layers, cost, embedding, head));
    size_t row = (size_t)layers + 1;
    c.layers = (int)layers;
    c.stages = stages;
    c.embedding = embedding;
    c.head = head;
    c.sum = (double *)ft__pp_alloc("cutting layers", 3 * row * sizeof(double) +
                                   (size_t)stages * row * sizeof(int));
    if (!c.sum) return FT_ERR_OOM;
    c.best = c.sum + row;
    c.below = c.best + row;
    c.take = (int *)(void *)(c.below + row);
    for (int i = 0; i < layers; i++) c.sum[i + 1] = c.sum[i] + cost[i];
    c.total = c.sum[layers] + embedding + head;
    double dearest = ft__pp_cut_all(&c, FT__PP_DEAREST, c.total);
    ft__pp_cut_all(&c, FT__PP_SQUARES, dearest);
    first_layer[0] = 0;
    for (int s = 0; s < stages; s++) {
        first_layer[s + 1] = first_layer[s] + c.take[(int64_t)s * (layers + 1) + first_layer[s]];
    }
    FT_FREE(c.sum);
    return FT_OK;
}

/* ----------------------------------------------------------------------------------- >>run.impl */

typedef struct ft__pp_slot { /* a micro-batch in a chunk */
    ft_tape *tape;
    ft_tensor *x;      /* input: a leaf, whose gradient goes back */
    ft_tensor *out;    /* handle on the output until it has gone on */
    ft_tensor *root;   /* the same tensor, as backward knows it */
    ft_tensor *dout;   /* gradient of the output, as received */
    ft_event x_here, dout_here; /* [R3] when they have come */
} ft__pp_slot;

typedef struct ft__pp_tape { ft_tape *tape; struct ft__pp_tape *next; } ft__pp_tape;

struct ft_pp {
    ft_ctx *ctx;
    ft_group *group;
    ft_pp_config config;
    ft_pp_list list;        /* what this rank does, in the context's memory */
    int rank;
    ft__pp_slot *slots;     /* [M V] */
    ft__pp_tape *idle;      /* tapes between two uses */
    ft_p2p *p2p;            /* room for the largest exchange */
    const ft_pp_action *going; /* [R3] the exchange whose cargo has not been freed, or NULL */
    ft_event gone;          /* when it is over */
};

/* Stages of another schedule would wait for messages that never come, and dp ranks of one for
   reductions: the whole world must have the same. The text says all, the value is its hash. */
static ft_status ft__pp_agree(ft_ctx *ctx, const ft_pp_config *c)
{
    ft_group *world;
    char text[160];
    uint64_t hash = 1469598103934665603u;
    snprintf(text, sizeof text, "the pipeline: %s, %d ranks of %d chunks, %d micro-batches%s%s",
             ft_pp_kind_name(c->kind), c->ranks, c->chunks, c->micro_batches,
             c->forward_only ? ", forward only" : "",
             c->overlap ? ", exchanges beside compute" : "");
    for (const char *at = text; *at; at++)
        hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    FT_TRY(ft_group_strided(ctx, "pp world", 0, 1, ft_world(ctx), &world));
    return ft_agree(world, text, hash);
}

/* This rank's list is copied into the context's memory, so that it ends with it on every path. */
static ft_status ft__pp_own_list(ft_pp *pp, const ft_pp_list *list)
{
    size_t transfers = 0, most = 1, at = 0;
    for (int i = 0; i < list->n; i++) {
        transfers += (size_t)list->actions[i].n;
        if ((size_t)list->actions[i].n > most) most = (size_t)list->actions[i].n;
    }
    pp->list.n = list->n;
    pp->list.actions = (ft_pp_action *)ft_host_alloc(pp->ctx, (size_t)list->n *
                                                     sizeof *pp->list.actions);
    ft_pp_transfer *room = (ft_pp_transfer *)ft_host_alloc(pp->ctx, (transfers + 1) * sizeof *room);
    pp->p2p = (ft_p2p *)ft_host_alloc(pp->ctx, most * sizeof *pp->p2p);
    if (!pp->list.actions || !room || !pp->p2p) return FT_ERR_OOM;
    for (int i = 0; i < list->n; i++) {
        ft_pp_action *a = &pp->list.actions[i];
        *a = list->actions[i];
        if (!a->n) continue;
        a->transfers = &room[at];
        memcpy(a->transfers, list->actions[i].transfers, (size_t)a->n * sizeof *room);
        at += (size_t)a->n;
    }
    return FT_OK;
}

FT_API ft_status ft_pp_create(ft_ctx *ctx, const ft_mesh *mesh, const ft_pp_config *config,
                              ft_pp **out)
{
    FT_TRY(ft_pp_check(config));
    if (config->ranks != mesh->size[FT_AXIS_PP])
        return ft_error(FT_ERR_ARG, "ft_pp_create: a schedule for %d ranks, a mesh with pp %d",
                        config->ranks, mesh->size[FT_AXIS_PP]);
    ft_pp *pp = (ft_pp *)ft_host_alloc(ctx, sizeof *pp);
    if (!pp) return FT_ERR_OOM;
    pp->ctx = ctx;
    pp->config = *config;
    pp->rank = mesh->coord[FT_AXIS_PP];
    FT_TRY(ft__pp_agree(ctx, config));
    FT_TRY(ft_mesh_group(ctx, mesh, FT_AXIS_PP, "pp", &pp->group));
    ft_pp_schedule *schedule;
    FT_TRY(ft_pp_schedule_create(config, &schedule));
    ft_status status = ft__pp_own_list(pp, &schedule->ranks[pp->rank]);
    ft_pp_schedule_free(schedule);
    FT_TRY(status);
    pp->slots = (ft__pp_slot *)ft_host_alloc(ctx, (size_t)config->micro_batches *
                                             (size_t)config->chunks * sizeof *pp->slots);
    *out = pp;
    return pp->slots ? FT_OK : FT_ERR_OOM;
}

static ft__pp_slot *ft__pp_slot_of(ft_pp *pp, int micro_batch, int chunk)
{
    return &pp->slots[micro_batch * pp->config.chunks + chunk];
}

static ft_status ft__pp_tape_take(ft_pp *pp, ft_tape **tape)
{
    ft__pp_tape *t = pp->idle;
    if (!t) return ft_tape_create(pp->ctx, tape);
    pp->idle = t->next;
    *tape = t->tape;
    ft_host_free(pp->ctx, t);
    return FT_OK;
}

static ft_status ft__pp_tape_give(ft_pp *pp, ft__pp_slot *s)
{
    ft__pp_tape *t = (ft__pp_tape *)ft_host_alloc(pp->ctx, sizeof *t);
    if (!t) return FT_ERR_OOM;
    t->tape = s->tape;
    t->next = pp->idle;
    pp->idle = t;
    s->tape = NULL;
    return FT_OK;
}

/* A tensor that is to be received: an input of a chunk, or the gradient of its output. */
static ft_status ft__pp_receive(ft_pp *pp, const ft_pp_program *p, ft_tensor **out)
{
    return ft_tensor_create(pp->ctx, out, p->dtype, p->ndim, p->shape, FT_TAG_ACT);
}

/* At P = 1 the next chunk is here too: its input is a copy, being a leaf of another tape. */
static ft_status ft__pp_pass_on(ft_pp *pp, const ft_pp_program *p, ft__pp_slot *from,
                                ft__pp_slot *to)
{
    FT_TRY(ft__pp_receive(pp, p, &to->x));
    FT_TRY(ft_copy(to->x, from->out, ft_stream_get(pp->ctx, FT_STREAM_COMPUTE)));
    ft_tensor_free(from->out);
    from->out = NULL;
    return FT_OK;
}

static ft_status ft__pp_loss(const ft_pp_program *p, int micro_batch, ft__pp_slot *s)
{
    if (p->loss) FT_TRY(p->loss(p->user, micro_batch, s->out));
    ft_tensor_free(s->out);
    s->out = NULL;
    return FT_OK;
}

/* [R3] Compute goes on once the event has been. */
static ft_status ft__pp_await(ft_pp *pp, ft_event event)
{
    return ft_stream_wait(ft_stream_get(pp->ctx, FT_STREAM_COMPUTE), event);
}

static ft_status ft__pp_forward(ft_pp *pp, const ft_pp_program *p, const ft_pp_action *a)
{
    ft__pp_slot *s = ft__pp_slot_of(pp, a->micro_batch, a->chunk);
    int training = !pp->config.forward_only;
    FT_TRY(ft__pp_await(pp, s->x_here));
    if (a->from == pp->rank)
        FT_TRY(ft__pp_pass_on(pp, p, ft__pp_slot_of(pp, a->micro_batch, a->chunk - 1), s));
    if (training) {
        if (s->x) s->x->requires_grad = 1;
        FT_TRY(ft__pp_tape_take(pp, &s->tape));
        FT_TRY(ft_tape_begin(s->tape));
    }
    FT_TRY(p->forward(p->user, a->chunk, a->micro_batch, s->x, &s->out));
    if (training) {
        s->root = s->out;
        return ft_tape_end(s->tape);
    }
    ft_tensor_free(s->x);
    s->x = NULL;
    return a->to == FT_PP_NOBODY ? ft__pp_loss(p, a->micro_batch, s) : FT_OK;
}

/* The gradient of the input is there: it waits for its exchange, or is the next chunk's here. */
static ft_status ft__pp_input_gradient(ft_pp *pp, const ft_pp_action *a, ft__pp_slot *s)
{
    if (a->to != pp->rank) return FT_OK;
    ft__pp_slot *before = ft__pp_slot_of(pp, a->micro_batch, a->chunk - 1);
    before->dout = s->x->grad;
    s->x->grad = NULL;
    ft_tensor_free(s->x);
    s->x = NULL;
    return FT_OK;
}

static ft_status ft__pp_backward(ft_pp *pp, const ft_pp_program *p, const ft_pp_action *a)
{
    ft__pp_slot *s = ft__pp_slot_of(pp, a->micro_batch, a->chunk);
    ft_tensor *dout = s->dout;
    s->dout = NULL;
    FT_TRY(ft__pp_await(pp, s->dout_here));
    if (a->act == FT_PP_BI) FT_TRY(ft_backward_inputs(s->tape, s->root, dout));
    else FT_TRY(ft_backward(s->tape, s->root, dout));
    if (a->from == FT_PP_NOBODY) FT_TRY(ft__pp_loss(p, a->micro_batch, s));
    FT_TRY(ft__pp_input_gradient(pp, a, s));
    return a->act == FT_PP_BI ? FT_OK : ft__pp_tape_give(pp, s);
}

static ft_status ft__pp_weights(ft_pp *pp, const ft_pp_action *a)
{
    ft__pp_slot *s = ft__pp_slot_of(pp, a->micro_batch, a->chunk);
    FT_TRY(ft_backward_weights(s->tape));
    return ft__pp_tape_give(pp, s);
}

/* The tensor of a transfer; one that comes in is made. */
static ft_status ft__pp_cargo(ft_pp *pp, const ft_pp_program *p, const ft_pp_transfer *t,
                              ft_tensor **tensor)
{
    ft__pp_slot *s = ft__pp_slot_of(pp, t->micro_batch, t->chunk);
    if (t->is_send) {
        *tensor = t->cargo == FT_PP_ACTIVATION ? s->out : s->x ? s->x->grad : NULL;
        if (*tensor && ft_numel(*tensor) > 0) return FT_OK;
        return ft_error(FT_ERR_STATE, "pipeline rank %d has no %s of micro-batch %d, chunk %d to "
                        "send (an input without a gradient?)", pp->rank,
                        t->cargo == FT_PP_ACTIVATION ? "activation" : "gradient", t->micro_batch,
                        t->chunk);
    }
    ft_tensor **slot = t->cargo == FT_PP_ACTIVATION ? &s->x : &s->dout;
    FT_TRY(ft__pp_receive(pp, p, slot));
    *tensor = *slot;
    return FT_OK;
}

/* [R2] What has gone is freed: an output, or a gradient with the input that it belongs to. */
static void ft__pp_sent(ft_pp *pp, const ft_pp_transfer *t)
{
    ft__pp_slot *s = ft__pp_slot_of(pp, t->micro_batch, t->chunk);
    if (t->cargo == FT_PP_ACTIVATION) {
        ft_tensor_free(s->out);
        s->out = NULL;
        return;
    }
    ft_tensor_free(s->x->grad);
    s->x->grad = NULL;
    ft_tensor_free(s->x);
    s->x = NULL;
}

static void ft__pp_all_sent(ft_pp *pp, const ft_pp_action *a)
{
    for (int i = 0; i < a->n; i++)
        if (a->transfers[i].is_send) ft__pp_sent(pp, &a->transfers[i]);
}

/* [R3] Before the next exchange, and at the end: by now the last one should be over. */
static ft_status ft__pp_settle(ft_pp *pp)
{
    if (!pp->going) return FT_OK;
    FT_TRY(ft__pp_await(pp, pp->gone));
    ft__pp_all_sent(pp, pp->going);
    pp->going = NULL;
    return FT_OK;
}

/* [R3] The stream waits for what compute has made so far, and for the memory that arrivals take. */
static ft_status ft__pp_exchange_beside(ft_pp *pp, const ft_pp_action *a)
{
    ft_stream *stream = ft_stream_get(pp->ctx, FT_STREAM_PIPE);
    FT_TRY(ft_stream_wait(stream,
                          ft_event_record(ft_stream_get(pp->ctx, FT_STREAM_COMPUTE))));
    FT_TRY(ft_exchange(pp->group, stream, a->n, pp->p2p));
    pp->gone = ft_event_record(stream);
    pp->going = a;
    for (int i = 0; i < a->n; i++) {
        const ft_pp_transfer *t = &a->transfers[i];
        if (t->is_send) continue;
        ft__pp_slot *s = ft__pp_slot_of(pp, t->micro_batch, t->chunk);
        *(t->cargo == FT_PP_ACTIVATION ? &s->x_here : &s->dout_here) = pp->gone;
    }
    return FT_OK;
}

static ft_status ft__pp_exchange(ft_pp *pp, const ft_pp_program *p, const ft_pp_action *a)
{
    FT_TRY(ft__pp_settle(pp));
    for (int i = 0; i < a->n; i++) {
        pp->p2p[i].peer = a->transfers[i].peer;
        pp->p2p[i].is_send = a->transfers[i].is_send;
        FT_TRY(ft__pp_cargo(pp, p, &a->transfers[i], &pp->p2p[i].tensor));
    }
    if (pp->config.overlap) return ft__pp_exchange_beside(pp, a);
    ft_stream *stream = ft_stream_get(pp->ctx, FT_STREAM_COMPUTE); /* [R1] */
    FT_TRY(ft_exchange(pp->group, stream, a->n, pp->p2p));
    ft__pp_all_sent(pp, a);
    return FT_OK;
}

static ft_status ft__pp_act(ft_pp *pp, const ft_pp_program *program, const ft_pp_action *a)
{
    switch (a->act) {
    case FT_PP_F: return ft__pp_forward(pp, program, a);
    case FT_PP_B:
    case FT_PP_BI: return ft__pp_backward(pp, program, a);
    case FT_PP_W: return ft__pp_weights(pp, a);
    case FT_PP_EXCHANGE: return ft__pp_exchange(pp, program, a);
    default: return ft_error(FT_ERR_STATE, "unknown pipeline action %d", (int)a->act);
    }
}

static const char *ft__pp_span_name(ft_pp_act act)
{
    static const char *const names[FT_PP_ACT_COUNT] = {
        "forward", "backward", "input gradients", "weight gradients", "exchange"
    };
    return (unsigned)act < FT_PP_ACT_COUNT ? names[act] : "?";
}

FT_API ft_status ft_pp_run(ft_pp *pp, const ft_pp_program *program)
{
    const ft_pp_list *list = &pp->list;
    if (!program || !program->forward)
        return ft_error(FT_ERR_ARG, "ft_pp_run: the program has no forward");
    for (int i = 0; i < list->n; i++) {
        const ft_pp_action *a = &list->actions[i];
        int moves = a->act == FT_PP_EXCHANGE;
        FT_TRY(ft_span_begin(pp->ctx, ft__pp_span_name(a->act), moves ? -1 : a->micro_batch,
                             moves ? -1 : a->chunk));
        ft_status status = ft__pp_act(pp, program, a);
        ft_span_end(pp->ctx);
        FT_TRY(status);
    }
    return ft__pp_settle(pp);
}

#endif /* FT__PP_IMPLEMENTED */
#endif /* implementation */
