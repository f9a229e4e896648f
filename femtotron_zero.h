/* femtotron_zero.h: training state, sharded over data-parallel ranks (ZeRO stages 0 to 3).

   Do this, after #include "femtotron.h":

       #define FEMTOTRON_ZERO_IMPLEMENTATION   (FEMTOTRON_IMPLEMENTATION turns on all headers)
       #include "femtotron_zero.h"

   This file is written to be read from top to bottom: the drawing, the table, the numbered cases;
   then the code, which cites the cases where it does them.

   WHAT IT DOES NOT DO
     It does not know models: it shards what it is told are parameters. It does not offload to the
     host, and does not compress what it sends. It shards over dp only.

   THE IDEA  (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
   Parameter Models")
     In plain data parallelism every rank keeps everything: weights, gradients, optimizer state. All
     ranks keep the same numbers, so D - 1 of the D copies are waste. ZeRO gives each rank one shard
     to own, and fetches the rest when it is used.

     The model is cut in units (embedding; each layer; final norm and head). A unit is one flat,
     padded buffer, its parameters one after another, cut in D equal shards. Rank 1 of 4 owns '#':

                      weights          gradients         master, m, v
       stage 0     [################] [################] [################]
       stage 1     [################] [################] [....####........]
       stage 2     [################] [....####........] [....####........]
       stage 3     [....####........] [....####........] [....####........]

     What a rank does not own it has for as long as it works with it: in stage 2 the whole gradient
     of the unit that backward is in; in stage 3 also the whole weights of the unit that runs.

   THE COST  of N parameters in bf16 (fp32: the parameter is its own master: 4, 4 and 8 bytes)

     bytes a parameter   weights            gradients        master, m, v   sent a step and rank
       stage 0           2                  2                12             2 P
       stage 1           2                  2                12/D           2 P
       stage 2           2                  2/D + one unit   12/D           (M + 1) P
       stage 3           2/D + <= 2 units   2/D + one unit   12/D           M (3 P - P_last - P_emb)

     P = bytes of all padded units in the dtype that travels, times (D-1)/D; M micro-batches. With
     `reduce_overlap` (default on) "one unit" of gradients is two; with `prefetch` p (default 1) the
     gathered units are at most 1 + p. A head tied to the embedding gathers that unit a second time:
     M (3 P - P_last) then. In a pipeline P counts the rank's own units, P_emb is the first rank's
     alone and P_last the last one's (with a tied table both the last unit and the table's copy);
     gpipe keeps the last ones from the first forward to the last backward: once a step, not M
     times. Scalars (token counts, norm, loss) travel apart, 12 (W - 1) bytes a step and rank of a
     world of W ranks. ft_zero_formula_get computes these to the byte, buffers rounded up to 256.

   THE CASES
     [Z0]   All state on every rank. Backward writes into whole gradients.
     [Z0.1] After the last backward of a unit: reduce-scatter, then all-gather of the sums. Every
            rank updates every parameter, with the same numbers, so that copies stay equal.
     [Z1]   Optimizer state of the own shard only. Gradients are whole; after the reduce-scatter
            only the own shard of them matters.
     [Z1.1] The own shard is updated, then all-gathered into everyone's weights, unit by unit; the
            next forward waits for a unit's gather only when it enters the unit.
     [Z2]   As [Z1], but the whole gradient of a unit exists only while backward is in it:
     [Z2.1] after each micro-batch it is reduce-scattered into the shard, and freed.
     [Z2.2] With overlap the reduction runs under the next unit's backward, so two buffers exist.
     [Z2.3] The weights' gather is [Z1.1]'s.
     [Z2.4] The most that gradients take is reached in the last unit of backward: all shards, its
            whole gradient, and with overlap that of the unit before.
     [Z3]   Weights too are kept as shards. A region of forward (ft_zero_enter, ft_zero_leave) is
            the stretch in which a unit's ops run.
     [Z3.1] Entering queues the unit's all-gather unless it is under way; leaving frees the buffer.
     [Z3.2] In forward the next `prefetch` units in order are fetched ahead,
     [Z3.3] in backward those of the regions before, if their backward or a replay reads weights: an
            embedding's does not, so it is not gathered again.
     [Z3.4] The last region (FT_ZERO_KEEP) is not freed between forward and the backward that
            follows.
     [Z3.5] So at most 1 + prefetch units are gathered, and the one that a tied head shares; where
            all forwards come before the backwards (gpipe), those kept [Z3.4] beside them.
     [Z3.6] With keep_gathered a unit stays from its first gather of a step to the end of the step.
     [G1]   The first contribution to a parameter's gradient overwrites, later ones add.
     [G2]   A parameter without a contribution is zero at the reduction; a frozen one has no
            gradient, no optimizer state, and travels only as a weight.
     [N1]   The norm is summed per (unit, own shard), in a fixed order, padding left out, and over
            ranks in rank order; one clip coefficient follows for all. A norm that is not finite
            skips the update everywhere, by the same number on every rank.
     [P1]   A split backward (ft_backward_inputs, _weights): the first half gathers and releases,
            the second only makes gradients, and reduces. Stages 2, 3: what the first half has of
            vectors (norm weights) waits apart, in the dtype of gradients, and goes into the next
            reduction, which may be an earlier micro-batch's: equal to a whole backward up to
            rounding (one micro-batch: bitwise). A matrix whose op does not split (a head) has its
            unit's whole gradient wait.
     [P2]   A unit with copies in other stages (ft_zero_share) is summed over them at the end of the
            step.
     [P3]   Gradients of which each tp rank has a part (FT_ZERO_PARTIAL) are summed over tp first.
     [H1]   Hybrid sharding: D = shard_ranks < dp ranks share one copy of the state; the dp / D
            copies are equal. Gathers and reduce-scatters stay inside a copy (a node),
     [H2]   and once a step, after a unit's last reduction, the shard is all-reduced across copies:
            2 P_shard (R-1)/R bytes, R = dp / D. The norm is summed inside a copy.
     [O1]   Weight decay holds per parameter, also where a shard's boundary cuts one.
     At D = 1 no stage sends anything, and a gather is an alias: stage 3 has no gather buffers.

   WHY THE STAGES AGREE
     All stages reduce by the same per-unit reduce-scatter, sum the norm over the same shards, and
     update elementwise. With one micro-batch they therefore give the same bits. With more, stages 0
     and 1 add the micro-batches before they sum over ranks, stages 2 and 3 after: equal up to
     rounding. So also where accumulate_dtype and reduce_dtype differ: stages 0 and 1 add up a
     unit's gradient in the first and the copies' [H2] in the second, stages 2 and 3 the other way
     round. Stages 0 and 1 have always the same bits, and so have 2 and 3.

   STREAMS AND EVENTS  Ops run on the compute stream, gathers and reductions on one of their own.
     [E1] gathers wait for the update of the shards they send
     [E2] compute waits for the gather of the unit it enters
     [E3] a reduction waits for the backward that wrote the gradients
     [E4] compute waits for a reduction before it frees, sums or uses what that reads or writes
     [E5] the update waits for gathers that may still send the shard it changes
     A buffer is freed after the work queued on the stream that used it last; nothing blocks the
     host.

   WHAT A RANK OWNS  (>>state), for who stores training state and brings it back
     A rank reads and writes the elements that it owns without the others: in stage 0 all, else its
     shard '#' of the drawing (of frozen weights too, also where stages 1 and 2 keep them whole). So
     the ranks that share one copy of the state own each element once; dp ranks of stage 0 and the
     copies of hybrid sharding [H1] own the same. Each element has n_state + 1 fp32 numbers: its
     master, then the optimizer's; a frozen one its value alone.

   CONTENTS   >>config >>units >>verbs >>step >>weights >>state, then the implementation:
     >>structures.impl >>zero kernels.impl >>schedule.impl >>describe.impl >>weights.impl
     >>state.impl >>verbs.impl >>regions.impl >>step.impl >>formula.impl

   OWNERSHIP, THREADS, ERRORS  All is owned by the context. A ft_zero belongs to its rank's thread.
     Each verb checks the unit's state and refuses a wrong order with FT_ERR_STATE.

   License: MIT, see LICENSE. */

#ifndef FEMTOTRON_ZERO_H
#define FEMTOTRON_ZERO_H

#ifndef FEMTOTRON_H
#error "femtotron_zero.h builds on femtotron.h: include femtotron.h first"
#endif

/* ------------------------------------------------------------------------------------ >>config */

typedef struct ft_zero ft_zero;

/* An optimizer is an elementwise update of fp32 weights: it sees n neighbouring elements that one
   rank owns, and neither stages nor units. To add one, write the function and fill in the
   struct. */
#define FT_ZERO_MAX_STATE 2
#define FT_ZERO_MAX_HYPER 6

typedef struct ft_zero_update {
    int64_t n;
    const float *grad;       /* [n] already clipped */
    float *weight;           /* [n] fp32 (the master, where weights are bf16): to be updated */
    float *state[FT_ZERO_MAX_STATE]; /* [n] each, zero at first; those beyond n_state are NULL */
    double lr, decay;        /* decay: of these n elements, 0 where there is none */
    int64_t step;            /* updates so far, this one included: from 1; skipped ones not */
    const double *hyper;     /* the optimizer's constants */
} ft_zero_update;

typedef void (*ft_zero_update_fn)(const ft_zero_update *update);

typedef struct ft_zero_optimizer {
    const char *name;
    ft_zero_update_fn update;
    int n_state;             /* fp32 numbers kept for each parameter, master not counted */
    double hyper[FT_ZERO_MAX_HYPER];
    /* The same on FT_GPU, for all elements of a span at once. call: in = gradient, control (fp32
       [4]; [1] the clip coefficient, [2] zero: leave everything as it is), updates (int32 [1],
       step); out = weight, the states, and the fp32 master where the weight is bf16 (then it is the
       master that is updated, and the weight its rounding); f = lr, decay; user = this struct.
       NULL: the optimizer cannot run there. */
    ft_status (*gpu)(const ft_op_call *call);
} ft_zero_optimizer;

FT_API ft_zero_optimizer ft_zero_adamw(double beta1, double beta2, double eps);
/* AdamW (Loshchilov and Hutter 2019, algorithm 2): state m, v; 28 bytes moved an element in
   bf16. */
FT_API ft_zero_optimizer ft_zero_sgd(double momentum, int nesterov);
/* v = momentum v + g + decay w; w -= lr (nesterov: g + decay w + momentum v, else v) (Sutskever et
   al. 2013). State v, none where momentum is 0. */

typedef enum ft_zero_dtype { FT_ZERO_SAME = 0, FT_ZERO_F32, FT_ZERO_BF16 } ft_zero_dtype;

typedef struct ft_zero_config {
    int stage;              /* 0, 1, 2 or 3 */
    ft_dtype dtype;         /* of parameters and activations: FT_F32 or FT_BF16 */
    int prefetch;           /* stage 3: units gathered ahead of the running one; default 1 */
    ft_switch reduce_overlap; /* reduce a unit under the next one's backward; default on; costs
                               one more unit of gradients in stages 2 and 3. Off: compute waits for
                               each */
    int keep_gathered;      /* stage 3: 1 keeps a unit from its first gather of a step to the
                               step's end: one gather of P a step instead of up to 2 a micro-batch,
                               for the memory of all gathered units (stage 2's). For pipelines with
                               many micro-batches */
    ft_zero_dtype accumulate_dtype; /* of gradients from the first micro-batch to the update: SAME
                               as dtype, or F32. Set it with bf16 and many micro-batches: 2 bytes
                               more for each gradient kept (whole in stages 0, 1; shards in 2, 3) */
    ft_zero_dtype reduce_dtype; /* of gradients on the wire: SAME as dtype, F32 (twice the traffic
                               of bf16; sums of many ranks lose nothing) or BF16 (half that of
                               fp32). Stages 2, 3: also of the unit at work; copies of hybrid
                               sharding add up in accumulate_dtype. Stages 0, 1: where the two
                               differ a unit passes through a buffer of tag comm */
    int shard_ranks;        /* hybrid sharding: shards over groups of so many neighbouring dp ranks
                               (a node), replicates across groups; 0: over all of dp */
    ft_zero_optimizer optimizer; /* default ft_zero_adamw(0.9, 0.95, 1e-8) */
    double weight_decay;    /* of parameters added with FT_ZERO_DECAY; 0 means none */
    double grad_clip;       /* largest global norm; 0 means no clipping */
} ft_zero_config;

FT_API ft_zero_config ft_zero_config_default(void);
/* Stage 0, fp32, prefetch 1, AdamW, neither decay nor clipping. */

/* The learning rate of a step. Every schedule warms up linearly over `warmup` steps: step s of them
   has peak (s + 1) / warmup. Then, at x = (s - warmup) / (total - warmup) of the way:
     constant   peak
     linear     from peak to floor
     cosine     floor + (peak - floor) (1 + cos(pi x)) / 2 (Loshchilov and Hutter 2017, eq. 5)
     wsd        peak, and over the last `decay` steps linearly to floor (warm-up,
                stable, decay: Hu et al. 2024)
   Steps from `total` on keep the last value. */
typedef enum ft_schedule { FT_LR_CONSTANT = 0, FT_LR_LINEAR, FT_LR_COSINE, FT_LR_WSD } ft_schedule;

typedef struct ft_lr {
    ft_schedule schedule;
    double peak, floor;           /* learning rates */
    int64_t warmup, decay, total; /* steps */
} ft_lr;

FT_API ft_status ft_lr_check(const ft_lr *lr);
/* FT_ERR_ARG for a floor above the peak, negative or not finite rates, more warm-up and decay than
   steps. */
FT_API double ft_lr_at(const ft_lr *lr, int64_t step);
/* A pure function; `step` from 0. */

/* ------------------------------------------------------------------------------------- >>units */

FT_API ft_status ft_zero_create(ft_ctx *ctx, const ft_zero_config *config, const ft_mesh *mesh,
                                ft_zero **out);
/* Makes the groups "zero gather", "zero reduce" and "zero weights" (exports) over dp, "zero
   replicas" across copies, "zero tp" over tp, and "zero scalars" over the world, as far as they
   have members. A collective call: FT_ERR_COMM on every rank, naming ranks and values, unless all
   ranks of the world pass the same mesh and options (an optimizer's name and numbers stand for
   it). */

typedef ft_status (*ft_zero_init_fn)(void *user, const char *name, int64_t first, int64_t n,
                                     float *values);
/* Fills values[n] with elements first..first+n-1 of parameter `name`: a function of these alone, so
   that initial weights do not depend on the layout. */

enum { /* flags of a parameter */
    FT_ZERO_DECAY = 1,
    FT_ZERO_FROZEN = 2,
    FT_ZERO_REPLICATED = 4, /* the same on all tp ranks, with the same gradient: counted once in the
                               norm (a norm weight) */
    FT_ZERO_PARTIAL = 8     /* the same on all tp ranks, each of which has a part of the gradient:
                               summed over tp before the reduction (a norm weight under sequence
                               parallelism) */
};

FT_API ft_status ft_zero_unit(ft_zero *zero, const char *name, int *unit);
/* Opens a new unit; parameters added from now on belong to it. Units are numbered 0, 1, ... in the
   order of forward. */
FT_API ft_status ft_zero_param(ft_zero *zero, const char *name, int ndim, const int64_t *shape,
                               int flags, ft_tensor **param);
/* Adds a parameter to the open unit. The tensor is a view into the unit: usable in ops while the
   unit is gathered. */
FT_API ft_status ft_zero_break(ft_zero *zero);
/* The units so far are one stretch of forward (a pipeline stage's chunk): nothing is fetched ahead
   from one stretch into the next. */
FT_API ft_status ft_zero_share(ft_zero *zero, int unit, ft_group *group);
/* The unit exists on every rank of `group` (the stages that hold a tied embedding): its gradients
   are summed over the group once a step, in ft_zero_step_end, so that the copies stay equal; the
   group's first rank counts it in the norm. Sent: 2 P_shard (R-1)/R, stage 0: 2 P_unit (R-1)/R. */
FT_API ft_status ft_zero_tapes(ft_zero *zero, int unit, int tapes);
/* The unit is entered on so many tapes of each micro-batch (chunks of one rank that share a table):
   its gradients are complete after as many backwards. Default 1. */
FT_API ft_status ft_zero_commit(ft_zero *zero, ft_zero_init_fn init, void *user);
/* Ends the description: checks that what others have too was described alike, allocates parameters
   (or shards) and optimizer state, and initialises this rank's part from `init`. A collective call.
   FT_ERR_COMM on every rank, naming ranks and values, unless all dp ranks have the same units
   (names, parameters with shapes and flags, breaks, tapes, sharing), all tp ranks the same
   FT_ZERO_PARTIAL parameters, and all ranks of a shared unit's group the same parameters in it. */

/* ------------------------------------------------------------------------------------ >>verbs */

/* Weights. Stages 0-2 hold them always; there gather and release only check the order. */
FT_API ft_status ft_zero_gather(ft_zero *zero, int unit);
/* Queues the all-gather unless it was prefetched, and makes the compute stream wait for it.
   Counted: each gather is to be released once. Stage 3 sent: P_unit (D-1)/D. */
FT_API ft_status ft_zero_get(ft_zero *zero, ft_tensor *param);
/* FT_ERR_STATE unless param's unit is gathered. */
FT_API ft_status ft_zero_release(ft_zero *zero, int unit);
/* Gives one gather back; the last one frees the buffer after the compute queued now (but see
   keep_gathered). FT_ERR_STATE if the unit is not gathered. */

/* Gradients. */
FT_API ft_status ft_zero_get_full(ft_zero *zero, int unit);
/* The unit's full gradient buffer exists from here to the reduction. */
FT_API ft_status ft_zero_reduce(ft_zero *zero, int unit);
/* Queues the reduce-scatter of the unit's gradients into this rank's shard; parameters without a
   contribution count as zero. */
FT_API ft_status ft_zero_get_shard(ft_zero *zero, int unit, ft_tensor **shard);
/* This rank's part of the reduced gradient; FT_ERR_STATE before the reduction. */

/* What a model calls: a region is the stretch of forward in which a unit's ops run. Backward of the
   same stretch gathers (if a backward or replay in it reads weights), releases and reduces. */
enum { FT_ZERO_KEEP = 1 }; /* backward follows at once: do not release in between */
FT_API ft_status ft_zero_enter(ft_zero *zero, int unit, int flags);
FT_API ft_status ft_zero_leave(ft_zero *zero, int unit);

/* -------------------------------------------------------------------------------------- >>step */

FT_API ft_status ft_zero_step_begin(ft_zero *zero, int micro_batches, int64_t counted_tokens,
                                    ft_tensor **scale);
/* counted_tokens: labels != -100 of this rank in the step, all micro-batches. *scale [1] becomes
   1 / (their sum over dp), for ft_linear_cross_entropy; 0 when nobody counts any. Owned by zero. */
FT_API ft_status ft_zero_add_loss(ft_zero *zero, ft_tensor *loss);
/* Adds a micro-batch's (scaled) loss to the step's. */
FT_API ft_status ft_zero_step_end(ft_zero *zero, double lr);
/* Waits for reductions, takes the global norm, clips, updates, and gathers parameters in stages 1
   and 2. Skips the update on all ranks alike where the norm is not finite. No host sync. */

typedef struct ft_zero_report {
    double loss;        /* of the last step: over all dp ranks and micro-batches */
    double grad_norm;   /* before clipping */
    int64_t updates;    /* steps that changed weights */
    int64_t skipped;    /* steps whose norm was not finite */
} ft_zero_report;

FT_API ft_status ft_zero_report_get(ft_zero *zero, ft_zero_report *report);
/* Synchronises the host. Zeros on meta. */

/* ----------------------------------------------------------------------------------- >>weights */

FT_API ft_status ft_zero_export(ft_zero *zero, ft_tensor *param, int64_t first, int64_t n,
                                float *values);
/* values[n] = elements first..first+n-1 of param's fp32 master, on every dp rank (a collective
   call: all must make it alike). values may be NULL on ranks that do not want it. */
FT_API ft_status ft_zero_import(ft_zero *zero, ft_tensor *param, int64_t first, int64_t n,
                                const float *values);
/* The reverse: sets master and parameter. A collective call, with the same values on all ranks.
   Optimizer state is untouched. */
FT_API ft_status ft_zero_export_grad(ft_zero *zero, ft_tensor *param, int64_t first, int64_t n,
                                     float *values);
/* values[n] = the reduced gradient of param; between the last backward and step_end. A collective
   call. */

/* ------------------------------------------------------------------------------------- >>state */

FT_API const ft_zero_config *ft_zero_options(const ft_zero *zero);
/* What it was made with. */
FT_API int ft_zero_state_count(const ft_zero *zero);
/* fp32 numbers that the optimizer keeps of each element beside the master: AdamW 2 (m, v), SGD 1,
   or 0 without momentum. */
FT_API ft_status ft_zero_owned(ft_zero *zero, const ft_tensor *param, int64_t *first, int64_t *n);
/* Elements first..first+n-1 of param (this rank's tensor, which tp may have cut) are this rank's
   own; n = 0: none. See WHAT A RANK OWNS. */
FT_API void ft_zero_replica(const ft_zero *zero, int *index, int *count);
/* `count` ranks own what this rank owns, with the same bits; it is number `index` of them: to share
   the work of storing it. tp and pp are not counted: they are the model's. */
FT_API ft_status ft_zero_state_read(ft_zero *zero, const ft_tensor *param, int array, int64_t first,
                                    int64_t n, float *values);
/* values[n] = elements first..first+n-1 of param's array: 0 the fp32 master (where there is none
   the weight, widened), 1 .. ft_zero_state_count the optimizer's. Local: no traffic, no memory of
   the device; waits for the compute stream. Between steps; FT_ERR_ARG, naming both ranges, for what
   the rank does not own. Zeros on meta. */
FT_API ft_status ft_zero_state_write(ft_zero *zero, ft_tensor *param, int array, int64_t first,
                                     int64_t n, const float *values);
/* The reverse. The weights that ops read are not changed (or not all of them) before
   ft_zero_state_commit. Replicas must be given the same values. */
FT_API ft_status ft_zero_progress_get(ft_zero *zero, int64_t *updates, int64_t *skipped);
FT_API ft_status ft_zero_progress_set(ft_zero *zero, int64_t updates, int64_t skipped);
/* Steps that changed weights, on which AdamW's bias correction depends, and those that did not.
   Local; 0 .. 2^31 - 1, the same on all ranks. */
FT_API ft_status ft_zero_state_commit(ft_zero *zero);
/* After writes: the weights become the masters, rounded to the dtype, and are gathered as at the
   end of a step, so that all is as if it had been trained up to here. A collective call, between
   steps: FT_ERR_COMM on every rank, naming ranks and values, unless all have the same progress.
   Sent: in stages 1 and 2 P (D-1)/D, else nothing. */

/* How a step uses the units. The formulas hold for units entered one after another, each once a
   micro-batch, and for a model whose first unit's backward reads no weights (an embedding), and
   whose last unit is entered with FT_ZERO_KEEP. In a pipeline the first rank of the mesh's pp has
   that first unit, the last rank the last. */
typedef struct ft_zero_use {
    int micro_batches;
    int tied;           /* 1: for the head the first unit is entered a second time, or, where the
                           last rank of a pipeline is another one, its copy after the last unit,
                           both with FT_ZERO_KEEP */
    int forwards_first; /* 1: all forwards of a step come before its first backward (gpipe) */
} ft_zero_use;

/* The closed formulas of this manual, in accounted bytes (each buffer rounded up to FT_ALIGN_BYTES)
   and in bytes sent by this rank in a step. */
typedef struct ft_zero_formula {
    size_t param, optim;          /* always */
    size_t grad_max, gather_max, comm_max; /* the most at once, within a step; grad_max without what
                                              backwards in two halves leave waiting [P1] */
    int64_t gather_sent, reduce_sent;      /* groups "zero gather" and "zero reduce" */
    int64_t replica_sent;                  /* group "zero replicas"; exact where dp / D divides 8 */
} ft_zero_formula;

FT_API ft_status ft_zero_formula_get(const ft_zero *zero, const ft_zero_use *use,
                                     ft_zero_formula *out);

#endif /* FEMTOTRON_ZERO_H */

#if defined(FEMTOTRON_IMPLEMENTATION) || defined(FEMTOTRON_ZERO_IMPLEMENTATION)
#ifndef FEMTOTRON_ZERO_IMPLEMENTATION_DONE
#define FEMTOTRON_ZERO_IMPLEMENTATION_DONE

#include <math.h>
#include <stdio.h>
#include <string.h>

/* -------------------------------------------------------------------------- >>structures.impl */

/* One flat buffer, cut in D equal shards: rank r owns elements [r * shard, (r + 1) * shard). */
typedef struct ft__zero_flat {
    int64_t elems;        /* of parameters, one after another in the order they were added */
    int64_t shard;        /* ceil(elems / D), rounded up to FT__ZERO_ALIGN */
    int64_t padded;       /* shard * D; from `elems` on it is padding: never read for a result */
    ft_tensor *full;      /* [padded] the weights; present always, or [Z3] while gathered */
    ft_tensor *mine;      /* [shard] this rank's weights: a view of full, or [Z3] all it keeps */
    ft_tensor *grad;      /* [padded] gradients, present from the first contribution on */
    ft_tensor *grad_mine; /* [shard] reduced: a view of grad, or [Z2, Z3] a tensor of its own */
    ft_tensor *master;    /* fp32 [shard], stage 0 [padded]; only where weights are bf16 */
    ft_tensor *state[FT_ZERO_MAX_STATE]; /* fp32, as master; those of the optimizer */
} ft__zero_flat;

typedef struct ft__zero_param {
    ft_zero *zero;
    ft_tensor *weight;    /* view of a flat's full */
    ft_tensor *grad;      /* view of the same place in grad; NULL if frozen */
    int unit, flags;
    int64_t offset;       /* in its flat */
    ft_tensor *early;     /* [P1] contributions of first halves that wait for the second; or NULL */
    int fresh;            /* no contribution to the gradient yet */
    struct ft__zero_param *next;
} ft__zero_param;

typedef struct ft__zero_unit {
    char name[64];
    ft__zero_flat flat[2];     /* [0] trainable, [1] frozen: no gradients, no optimizer state */
    int gathered;         /* gathers not yet released */
    int resident;         /* weights are here or on their way */
    int tapes;            /* of a micro-batch that enter this unit */
    int backwards;        /* tapes whose backward of this unit is over, in this step */
    int reduced;          /* reductions queued in this step */
    int shared;           /* [H2] the replicas' sum is queued */
    int last;             /* of its stretch (ft_zero_break) */
    ft_group *share;      /* [P2] ranks of other stages with a copy of this unit; NULL: none */
    ft_event gather_done, reduce_done;
} ft__zero_unit;

/* A stretch of forward under a unit, on a tape that waits for backward. */
typedef struct ft__region {
    ft_zero *zero;
    ft_tape *tape;
    int unit, keep, reads; /* reads: backward or a replay will read weights */
    int need_before;
    int holds;             /* a gather is the region's own: while open, kept, or in backward */
    int halved;            /* the first half of a split backward is in it */
    struct ft__region *older;
} ft__region;

typedef struct ft__zero_span { /* neighbouring elements of a shard under one weight decay */
    ft_tensor *weight, *grad, *master, *state[FT_ZERO_MAX_STATE];
    double decay;
    struct ft__zero_span *next;
} ft__zero_span;

struct ft_zero {
    ft_ctx *ctx;
    ft_zero_config config;
    int D, rank;                /* ranks that share one copy of the state; which of them this is */
    int dp, dp_rank;            /* all data-parallel ranks; dp / D replicas of the state */
    ft_dtype accumulate_dtype, reduce_dtype; /* resolved */
    int shards_weights;         /* stage 3 and D > 1: at D = 1 a gather is an alias */
    int shards_grads;           /* stage >= 2 and D > 1 */
    ft_group *gather, *reduce;  /* over D */
    ft_group *replicas;         /* the ranks with this shard; NULL without hybrid sharding */
    ft_group *weights;          /* over dp: exports */
    ft_group *tp;               /* NULL without tensor parallelism */
    ft_group *scalars;          /* over the world */
    int pp, pp_rank;            /* stages of the pipeline, and which of them this is */
    int tp_rank, counts_tokens; /* the rank whose tokens and loss stand for its tp and pp peers' */
    ft_op update_rows[2];       /* the optimizer's: [0] fp32 weights, [1] with a master */
    ft_stream *compute, *gather_stream, *reduce_stream;
    ft__zero_unit *units;
    int n_units, cap_units;
    ft__zero_param *params, **params_end;
    ft__zero_span *spans, **spans_end;
    ft__zero_span *norm_spans, **norm_end; /* what this rank adds to the norm; only `grad` is set */
    int n_norm_spans;
    int committed, in_step, micro_batches;
    int first_halves;           /* [P1] regions that the first half of a split backward is in */
    int open[8], n_open;        /* units entered and not left, innermost last */
    ft__region *open_region[8];
    ft__region *regions;        /* closed, youngest first */
    int unfreed;                /* unit whose reduction may still run, -1: none */
    ft_event weights_ready;     /* the last change of this rank's weights */
    ft_tensor *counts, *all_counts, *scale;       /* int32 [1], int32 [world], fp32 [1] */
    ft_tensor *partial, *local, *all, *loss;      /* fp32 [spans], [2], [2 world], [1] */
    ft_tensor *control, *updates;                 /* fp32 [FT__CONTROL], int32 [2] */
};

#define FT__ZERO_ALIGN 8 /* elements: shards start at 16 bytes in bf16 too */

static ft_status ft__region_passed(ft_ctx *ctx, void *user, ft_phase phase);
static ft_status ft__reduce_replicas(ft_zero *z, ft__zero_unit *u);
static ft_status ft__region_reached(ft_ctx *ctx, void *user, ft_phase phase);

enum { FT__NORM = 0, FT__COEF, FT__GO, FT__LOSS, FT__CONTROL };

/* --------------------------------------------------------------------------- >>zero kernels.impl

   Five small ops that run unrecorded. They read scalars from device memory, so that no step has to
   wait for the host. */

static int64_t ft__zero_numel(const ft_view *v)
{
    int64_t n = 1;
    for (int i = 0; i < v->ndim; i++) n *= v->shape[i];
    return n;
}

static float ft__zero_load(const ft_view *v, int64_t i)
{
    return v->dtype == FT_BF16 ? ft_f32_from_bf16(((const uint16_t *)v->data)[i])
                               : ((const float *)v->data)[i];
}

/* These rows write into tensors that exist, and infer leaves their shapes as they are, so ft_op_run
   finds nothing to compare: nobody checks these sizes, and they hold because ft_zero_commit makes
   all of these tensors to measure. */
static ft_status ft__zero_infer(ft_op_call *call)
{
    (void)call;
    return FT_OK;
}

/* out[0][slot] = sum of squares of the first n elements of in[0]; slot = i[0], n = i[1]. Blocks of
   1024 in fp32, 8 lanes, added up in double: a fixed order. */
static ft_status ft__zero_sumsq_run(const ft_op_call *call)
{
    const ft_view *g = &call->in[0];
    double total = 0;
    for (int64_t at = 0; at < call->attr.i[1]; at += 1024) {
        float lane[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        int64_t n = call->attr.i[1] - at < 1024 ? call->attr.i[1] - at : 1024;
        for (int64_t i = 0; i < n; i++) {
            float x = ft__zero_load(g, at + i);
            lane[i & 7] += x * x;
        }
        for (int k = 0; k < 8; k++) total += (double)lane[k];
    }
    ((float *)call->out[0].data)[call->attr.i[0]] = (float)total;
    return FT_OK;
}

/* The device adds in blocks of at least 4096 elements, one double each. */
static void ft__zero_sumsq_scratch(ft_op_call *call)
{
    int64_t blocks = (call->attr.i[1] + 4095) / 4096;
    if (call->device == FT_GPU)
        call->workspace_bytes = (size_t)(blocks < 1056 ? blocks : 1056) * sizeof(double);
}

/* out[0] = {sum of in[0] in order, in[1][0] if f[0] is set}: what this rank contributes to norm and
   loss. */
static ft_status ft__zero_local_run(const ft_op_call *call)
{
    float sum = 0, *out = (float *)call->out[0].data;
    for (int64_t i = 0; i < ft__zero_numel(&call->in[0]); i++)
        sum += ((const float *)call->in[0].data)[i];
    out[0] = sum;
    out[1] = call->attr.f[0] > 0 ? ((const float *)call->in[1].data)[0] : 0.0f;
    return FT_OK;
}

/* in[0] = {sum of squares, loss} of each rank, added in rank order. out[0] = control, out[1] =
   {updates, skipped}. f[0] = largest norm (0: any). The clip coefficient is min(1, max_norm / (norm
   + 1e-6)); a norm that is not finite clears `go`, on every rank alike, because all have the same
   numbers. */
static ft_status ft__zero_control_run(const ft_op_call *call)
{
    const float *all = (const float *)call->in[0].data;
    float *control = (float *)call->out[0].data, squares = 0, loss = 0;
    int32_t *count = (int32_t *)call->out[1].data;
    for (int64_t r = 0; r < ft__zero_numel(&call->in[0]) / 2; r++) {
        squares += all[2 * r];
        loss += all[2 * r + 1];
    }
    float norm = sqrtf(squares);
    int go = isfinite(norm) != 0;
    double limit = call->attr.f[0], coef = 1;
    if (limit > 0 && go && limit / ((double)norm + 1e-6) < 1) coef = limit / ((double)norm + 1e-6);
    count[go ? 0 : 1]++;
    control[FT__NORM] = norm;
    control[FT__COEF] = (float)coef;
    control[FT__GO] = (float)go;
    control[FT__LOSS] = loss;
    return FT_OK;
}

/* out[0][0] = 1 / sum of the int32 counts in[0]; 0 if nobody counts anything. */
static ft_status ft__zero_scale_run(const ft_op_call *call)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < ft__zero_numel(&call->in[0]); i++)
        sum += ((const int32_t *)call->in[0].data)[i];
    ((float *)call->out[0].data)[0] = sum > 0 ? (float)(1.0 / (double)sum) : 0.0f;
    return FT_OK;
}

/* AdamW. Bias corrections in double: beta2^t is close to 1 for long. */
static void ft__adamw_update(const ft_zero_update *u)
{
    float b1 = (float)u->hyper[0], b2 = (float)u->hyper[1], eps = (float)u->hyper[2];
    float shrink = (float)(1 - u->lr * u->decay);
    float rate = (float)(u->lr / (1 - pow(u->hyper[0], (double)u->step)));
    float root = (float)(1 / sqrt(1 - pow(u->hyper[1], (double)u->step)));
    float *p = u->weight, *m = u->state[0], *v = u->state[1];
    for (int64_t i = 0; i < u->n; i++) {
        float g = u->grad[i];
        m[i] = b1 * m[i] + (1 - b1) * g;
        v[i] = b2 * v[i] + (1 - b2) * g * g;
        p[i] = p[i] * shrink - rate * m[i] / (sqrtf(v[i]) * root + eps);
    }
}

static void ft__sgd_update(const ft_zero_update *u)
{
    float momentum = (float)u->hyper[0], lr = (float)u->lr, decay = (float)u->decay;
    float *p = u->weight, *v = u->state[0];
    int nesterov = u->hyper[1] > 0;
    for (int64_t i = 0; i < u->n; i++) {
        float g = u->grad[i] + decay * p[i];
        if (v) v[i] = momentum * v[i] + g;
        p[i] -= lr * (!v ? g : nesterov ? g + momentum * v[i] : v[i]);
    }
}

FT_API ft_zero_optimizer ft_zero_adamw(double beta1, double beta2, double eps)
{
    ft_zero_optimizer o;
    memset(&o, 0, sizeof o);
    o.name = "adamw";
    o.update = ft__adamw_update;
    o.n_state = 2;
    o.hyper[0] = beta1;
    o.hyper[1] = beta2;
    o.hyper[2] = eps;
#ifdef FT_CUDA
    o.gpu = ftk_zero_adamw;
#endif
    return o;
}

FT_API ft_zero_optimizer ft_zero_sgd(double momentum, int nesterov)
{
    ft_zero_optimizer o;
    memset(&o, 0, sizeof o);
    o.name = "sgd";
    o.update = ft__sgd_update;
    o.n_state = momentum > 0 ? 1 : 0;
    o.hyper[0] = momentum;
    o.hyper[1] = nesterov;
#ifdef FT_CUDA
    o.gpu = ftk_zero_sgd;
#endif
    return o;
}

/* Runs the optimizer on blocks of clipped fp32 gradients. in = gradient, control, updates; out =
   weight, the states, and the master if the weight is not fp32. f = lr, decay; user = optimizer. */
static ft_status ft__zero_update_run(const ft_op_call *call)
{
    const ft_zero_optimizer *o = (const ft_zero_optimizer *)call->attr.user;
    const float *control = (const float *)call->in[1].data;
    const ft_view *w = &call->out[0];
    int has_master = call->op->n_out == o->n_state + 2;
    float *weight = (float *)(has_master ? call->out[o->n_state + 1].data : w->data), block[256];
    if (control[FT__GO] == 0.0f) return FT_OK;
    for (int64_t at = 0, n = ft__zero_numel(w); at < n; at += 256) {
        ft_zero_update u;
        memset(&u, 0, sizeof u);
        u.n = n - at < 256 ? n - at : 256;
        for (int64_t i = 0; i < u.n; i++)
            block[i] = ft__zero_load(&call->in[0], at + i) * control[FT__COEF];
        u.grad = block;
        u.weight = weight + at;
        for (int k = 0; k < o->n_state; k++) u.state[k] = (float *)call->out[1 + k].data + at;
        u.lr = call->attr.f[0];
        u.decay = call->attr.f[1];
        u.step = ((const int32_t *)call->in[2].data)[0];
        u.hyper = o->hyper;
        o->update(&u);
        for (int64_t i = 0; has_master && i < u.n; i++)
            ((uint16_t *)w->data)[at + i] = ft_bf16_from_f32(weight[at + i]);
    }
    return FT_OK;
}

#define FT__ZERO_ROW(name, n_in, n_out, scratch, run, gpu)                                         \
    { name, n_in, n_out, 0, 0, 0, {0, 0, 0, 0, 0, 0, 0, 0}, 0, 0, 0, ft__zero_infer, NULL,         \
      scratch, run, NULL, NULL, NULL, NULL, FT_GPU_KERNELS(gpu, NULL, NULL) }

static const ft_op ft__zero_rows[] = {
    FT__ZERO_ROW("zero sum of squares", 1, 1, ft__zero_sumsq_scratch, ft__zero_sumsq_run,
                 ftk_zero_sumsq),
    FT__ZERO_ROW("zero local scalars", 2, 1, NULL, ft__zero_local_run,
                 ftk_zero_local),
    FT__ZERO_ROW("zero control", 1, 2, NULL, ft__zero_control_run,
                 ftk_zero_control),
    FT__ZERO_ROW("zero loss scale", 1, 1, NULL, ft__zero_scale_run,
                 ftk_zero_scale)
};

enum { FT__ROW_SUMSQ = 0, FT__ROW_LOCAL, FT__ROW_CONTROL, FT__ROW_SCALE, FT__ROWS };

/* ---------------------------------------------------------------------------- >>schedule.impl */

FT_API ft_status ft_lr_check(const ft_lr *lr)
{
    if ((unsigned)lr->schedule > FT_LR_WSD)
        return ft_error(FT_ERR_ARG, "unknown learning-rate schedule %d", (int)lr->schedule);
    if (!(lr->peak >= 0 && lr->floor >= 0 && lr->floor <= lr->peak && isfinite(lr->peak)))
        return ft_error(FT_ERR_ARG,
                        "a learning rate wants 0 <= floor <= peak, both finite, not floor "
                        "%g, peak %g",
                        lr->floor, lr->peak);
    if (lr->warmup < 0 || lr->decay < 0 || lr->total < 0)
        return ft_error(FT_ERR_ARG,
                        "a schedule wants steps >= 0, not warm-up %lld, decay %lld, total "
                        "%lld",
                        (long long)lr->warmup, (long long)lr->decay, (long long)lr->total);
    int64_t decay = lr->schedule == FT_LR_WSD ? lr->decay : 0;
    if (lr->schedule != FT_LR_CONSTANT && lr->warmup > lr->total - decay)
        return ft_error(FT_ERR_ARG,
                        "a warm-up of %lld steps and a decay of %lld are more than the %lld "
                        "of the run",
                        (long long)lr->warmup, (long long)decay, (long long)lr->total);
    return FT_OK;
}

FT_API double ft_lr_at(const ft_lr *lr, int64_t step)
{
    double span = lr->peak - lr->floor;
    if (step < lr->warmup) return lr->peak * (double)(step + 1) / (double)lr->warmup;
    if (lr->schedule == FT_LR_CONSTANT || lr->total <= lr->warmup) return lr->peak;
    if (step > lr->total) step = lr->total;
    double x = (double)(step - lr->warmup) / (double)(lr->total - lr->warmup);
    if (lr->schedule == FT_LR_LINEAR) return lr->peak - span * x;
    if (lr->schedule == FT_LR_COSINE)
        return lr->floor + span * 0.5 * (1 + cos(3.14159265358979323846 * x));
    int64_t left = lr->total - step; /* wsd */
    if (left >= lr->decay) return lr->peak;
    return lr->floor + span * (double)left / (double)lr->decay;
}

/* ------------------------------------------------------------------------------ >>describe.impl */

FT_API ft_zero_config ft_zero_config_default(void)
{
    ft_zero_config config;
    memset(&config, 0, sizeof config);
    config.prefetch = 1;
    config.optimizer = ft_zero_adamw(0.9, 0.95, 1e-8);
    return config;
}

static ft_status ft__zero_config_check(const ft_zero_config *c)
{
    if (c->stage < 0 || c->stage > 3)
        return ft_error(FT_ERR_ARG, "ZeRO stage %d: there are 0, 1, 2 and 3", c->stage);
    if (c->dtype != FT_F32 && c->dtype != FT_BF16)
        return ft_error(FT_ERR_ARG, "weights are fp32 or bf16, not %s", ft_dtype_name(c->dtype));
    if (c->prefetch < 0 || c->prefetch > 1024)
        return ft_error(FT_ERR_ARG, "prefetch %d: 0 to 1024 units", c->prefetch);
    const ft_zero_optimizer *o = &c->optimizer;
    if (!o->update || !o->name || o->n_state < 0 || o->n_state > FT_OP_MAX_OUT - 2)
        return ft_error(FT_ERR_ARG,
                        "the optimizer %s needs an update function and 0 to %d states, not "
                        "%d",
                        o->name ? o->name : "(no name)", FT_OP_MAX_OUT - 2, o->n_state);
    if (o->update == ft__adamw_update &&
        !(o->hyper[0] >= 0 && o->hyper[0] < 1 && o->hyper[1] >= 0 && o->hyper[1] < 1 &&
          (float)o->hyper[2] > 0))
        return ft_error(FT_ERR_ARG,
                        "AdamW wants betas in [0, 1) and an eps that fp32 can hold, not %g %g %g",
                        o->hyper[0], o->hyper[1], o->hyper[2]);
    if (o->update == ft__sgd_update && !(o->hyper[0] >= 0 && o->hyper[0] < 1))
        return ft_error(FT_ERR_ARG, "SGD wants a momentum in [0, 1), not %g", o->hyper[0]);
    if ((unsigned)c->accumulate_dtype > FT_ZERO_BF16 || (unsigned)c->reduce_dtype > FT_ZERO_BF16)
        return ft_error(FT_ERR_ARG, "accumulate_dtype %d, reduce_dtype %d: see ft_zero_dtype",
                        (int)c->accumulate_dtype, (int)c->reduce_dtype);
    if (c->accumulate_dtype == FT_ZERO_BF16 && c->dtype == FT_F32)
        return ft_error(FT_ERR_UNSUPPORTED,
                        "gradients of fp32 weights are not accumulated in bf16: it "
                        "would lose them; reduce_dtype bf16 halves the traffic instead");
    if (!(c->weight_decay >= 0 && c->grad_clip >= 0))
        return ft_error(FT_ERR_ARG, "weight decay %g and gradient clip %g must not be negative",
                        c->weight_decay, c->grad_clip);
    return FT_OK;
}

static ft_dtype ft__zero_resolve(ft_zero_dtype wanted, ft_dtype dtype)
{
    return wanted == FT_ZERO_F32 ? FT_F32 : wanted == FT_ZERO_BF16 ? FT_BF16 : dtype;
}

static uint64_t ft__zero_mix(uint64_t hash, uint64_t value)
{
    return (hash ^ value) * 1099511628211u;
}

static uint64_t ft__zero_mix_bytes(uint64_t hash, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) hash = ft__zero_mix(hash, ((const unsigned char *)bytes)[i]);
    return hash;
}

/* What must be equal is said in the text, which a refusal shows for every rank, and hashed in the
   value, with all digits. */
static ft_status ft__zero_agree(ft_group *group, const char *text, uint64_t hash)
{
    return ft_agree(group, text, ft__zero_mix_bytes(hash, text, strlen(text)));
}

/* The whole world must share them: replicas that clip, decay or update differently drift apart, and
   stages that reduce differently wait for each other. */
static ft_status ft__zero_agree_options(const ft_zero *z, const ft_mesh *mesh)
{
    const ft_zero_config *c = &z->config;
    const ft_zero_optimizer *o = &c->optimizer;
    uint64_t hash = 1469598103934665603u;
    char text[512];
    hash = ft__zero_mix_bytes(hash, &c->weight_decay, sizeof c->weight_decay);
    hash = ft__zero_mix_bytes(hash, &c->grad_clip, sizeof c->grad_clip);
    hash = ft__zero_mix_bytes(hash, o->hyper, sizeof o->hyper);
    snprintf(text, sizeof text,
             "ZeRO: dp %d x tp %d x pp %d, stage %d, %s, prefetch %d, reduce_overlap %s, "
             "keep_gathered %d, accumulate %s, reduce %s, %d ranks share a state, %s (%d states; "
             "%g, %g, %g, %g, %g, %g), weight_decay %g, grad_clip %g", mesh->size[FT_AXIS_DP],
             mesh->size[FT_AXIS_TP], mesh->size[FT_AXIS_PP], c->stage, ft_dtype_name(c->dtype),
             c->prefetch, c->reduce_overlap == FT_OFF ? "off" : "on", c->keep_gathered != 0,
             ft_dtype_name(z->accumulate_dtype), ft_dtype_name(z->reduce_dtype), z->D, o->name,
             o->n_state, o->hyper[0], o->hyper[1], o->hyper[2], o->hyper[3], o->hyper[4],
             o->hyper[5], c->weight_decay, c->grad_clip);
    return ft__zero_agree(z->scalars, text, hash);
}

/* dp ranks first, first + stride, ... (n of them) as a group. */
static ft_status ft__zero_subgroup(ft_zero *z, const ft_mesh *mesh, const char *name, int first,
                                   int stride, int n, ft_group **out)
{
    int tp = mesh->size[FT_AXIS_TP];
    int rank = (mesh->coord[FT_AXIS_PP] * mesh->size[FT_AXIS_DP] + first) * tp;
    return ft_group_strided(z->ctx, name, rank + mesh->coord[FT_AXIS_TP], stride * tp, n, out);
}

/* [H1] Shards over `D` neighbours, replicas across: rank d of dp has shard d % D of copy d / D. */
static ft_status ft__zero_groups(ft_zero *z, const ft_mesh *mesh)
{
    int dp = mesh->size[FT_AXIS_DP], d = mesh->coord[FT_AXIS_DP];
    int D = z->config.shard_ranks ? z->config.shard_ranks : dp;
    if (D < 1 || dp % D)
        return ft_error(FT_ERR_ARG, "shard_ranks %d does not divide the %d data-parallel ranks", D,
                        dp);
    z->D = D;
    z->rank = d % D;
    z->dp = dp;
    z->dp_rank = d;
    FT_TRY(ft_group_strided(z->ctx, "zero scalars", 0, 1, ft_world(z->ctx), &z->scalars));
    FT_TRY(ft__zero_agree_options(z, mesh)); /* before groups that the mesh decides */
    FT_TRY(ft__zero_subgroup(z, mesh, "zero gather", d - d % D, 1, D, &z->gather));
    FT_TRY(ft__zero_subgroup(z, mesh, "zero reduce", d - d % D, 1, D, &z->reduce));
    if (D < dp) FT_TRY(ft__zero_subgroup(z, mesh, "zero replicas", d % D, D, dp / D, &z->replicas));
    FT_TRY(ft_mesh_group(z->ctx, mesh, FT_AXIS_DP, "zero weights", &z->weights));
    if (mesh->size[FT_AXIS_TP] > 1)
        FT_TRY(ft_mesh_group(z->ctx, mesh, FT_AXIS_TP, "zero tp", &z->tp));
    z->tp_rank = mesh->coord[FT_AXIS_TP];
    z->pp = mesh->size[FT_AXIS_PP];
    z->pp_rank = mesh->coord[FT_AXIS_PP];
    z->counts_tokens = z->tp_rank == 0 && mesh->coord[FT_AXIS_PP] == 0;
    return FT_OK;
}

static void ft__zero_update_rows(ft_zero *z)
{
    for (int k = 0; k < 2; k++) {
        ft_op *row = &z->update_rows[k];
        *row = ft_op_default();
        row->name = z->config.optimizer.name;
        row->n_in = 3;
        row->n_out = 1 + z->config.optimizer.n_state + k;
        row->infer = ft__zero_infer;
        row->forward = ft__zero_update_run;
        row->gpu.forward = z->config.optimizer.gpu;
    }
}

FT_API ft_status ft_zero_create(ft_ctx *ctx, const ft_zero_config *config, const ft_mesh *mesh,
                                ft_zero **out)
{
    FT_TRY(ft__zero_config_check(config));
    ft_zero *z = (ft_zero *)ft_host_alloc(ctx, sizeof *z);
    if (!z) return FT_ERR_OOM;
    z->ctx = ctx;
    z->config = *config;
    if (z->config.reduce_overlap == FT_DEFAULT) z->config.reduce_overlap = FT_ON;
    z->accumulate_dtype = ft__zero_resolve(config->accumulate_dtype, config->dtype);
    z->reduce_dtype = ft__zero_resolve(config->reduce_dtype, config->dtype);
    FT_TRY(ft__zero_groups(z, mesh));
    z->shards_weights = config->stage == 3 && z->D > 1;
    z->shards_grads = config->stage >= 2 && z->D > 1;
    z->compute = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    z->gather_stream = ft_stream_get(ctx, FT_STREAM_GATHER);
    z->reduce_stream = ft_stream_get(ctx, FT_STREAM_REDUCE);
    z->params_end = &z->params;
    z->spans_end = &z->spans;
    z->norm_end = &z->norm_spans;
    z->unfreed = -1;
    ft__zero_update_rows(z);
    for (int k = 0; k < 2; k++) FT_TRY(ft_op_register(ctx, &z->update_rows[k]));
    for (int i = 0; i < FT__ROWS; i++) FT_TRY(ft_op_register(ctx, &ft__zero_rows[i]));
    *out = z;
    return FT_OK;
}

FT_API ft_status ft_zero_unit(ft_zero *zero, const char *name, int *unit)
{
    if (zero->committed) return ft_error(FT_ERR_STATE, "unit %s comes after ft_zero_commit", name);
    if (zero->n_units == zero->cap_units) {
        int cap = zero->cap_units ? 2 * zero->cap_units : 16;
        ft__zero_unit *grown = (ft__zero_unit *)ft_host_alloc(zero->ctx,
                                                              (size_t)cap * sizeof *grown);
        if (!grown) return FT_ERR_OOM;
        if (zero->units) memcpy(grown, zero->units, (size_t)zero->n_units * sizeof *grown);
        ft_host_free(zero->ctx, zero->units);
        zero->units = grown;
        zero->cap_units = cap;
    }
    ft__zero_unit *u = &zero->units[zero->n_units];
    memset(u, 0, sizeof *u);
    strncpy(u->name, name, sizeof u->name - 1);
    u->tapes = 1;
    *unit = zero->n_units++;
    return FT_OK;
}

FT_API ft_status ft_zero_break(ft_zero *zero)
{
    if (zero->committed || !zero->n_units)
        return ft_error(FT_ERR_STATE, "ft_zero_break comes after a unit and before ft_zero_commit");
    zero->units[zero->n_units - 1].last = 1;
    return FT_OK;
}

FT_API ft_status ft_zero_share(ft_zero *zero, int unit, ft_group *group)
{
    if (zero->committed || unit < 0 || unit >= zero->n_units || !group)
        return ft_error(FT_ERR_STATE,
                        "ft_zero_share: unit %d of %d, before ft_zero_commit, with a group", unit,
                        zero->n_units);
    if (ft_group_size(group) > 1) zero->units[unit].share = group;
    return FT_OK;
}

FT_API ft_status ft_zero_tapes(ft_zero *zero, int unit, int tapes)
{
    if (zero->committed || unit < 0 || unit >= zero->n_units || tapes < 1)
        return ft_error(FT_ERR_STATE,
                        "ft_zero_tapes: unit %d of %d on %d tapes, before ft_zero_commit", unit,
                        zero->n_units, tapes);
    zero->units[unit].tapes = tapes;
    return FT_OK;
}

/* Views are made before their flat is known in size: the weight's base is filled in at commit. */
FT_API ft_status ft_zero_param(ft_zero *zero, const char *name, int ndim, const int64_t *shape,
                               int flags, ft_tensor **param)
{
    if (zero->committed || !zero->n_units)
        return ft_error(FT_ERR_STATE, "parameter %s comes %s", name,
                        zero->committed ? "after ft_zero_commit" : "before the first ft_zero_unit");
    size_t bytes = strlen(name) + 1;
    ft__zero_param *p = (ft__zero_param *)ft_host_alloc(zero->ctx, sizeof *p + bytes);
    if (!p) return FT_ERR_OOM;
    FT_TRY(ft_tensor_empty(zero->ctx, &p->weight, zero->config.dtype, ndim, shape));
    memcpy(p + 1, name, bytes);
    p->weight->name = (const char *)(p + 1);
    p->zero = zero;
    p->unit = zero->n_units - 1;
    p->flags = flags;
    p->fresh = 1;
    ft__zero_flat *flat = &zero->units[p->unit].flat[flags & FT_ZERO_FROZEN ? 1 : 0];
    p->offset = flat->elems;
    flat->elems += ft_numel(p->weight);
    *zero->params_end = p;
    zero->params_end = &p->next;
    *param = p->weight;
    return FT_OK;
}

static ft_status ft__zero_sink_get(void *user, ft_tensor *param, ft_tensor **grad, int *accumulate);
static ft_status ft__zero_initialise(ft_zero *zero, ft__zero_param *p, ft_zero_init_fn init,
                                     void *user);

static ft_tensor *ft__shape1(ft_zero *z, ft_dtype dtype, int64_t n, ft_tag tag, ft_status *status)
{
    ft_tensor *t = NULL;
    if (*status == FT_OK) *status = ft_tensor_create(z->ctx, &t, dtype, 1, &n, tag);
    return t;
}

/* Weights: [Z0-Z2] the whole flat on every rank, [Z3] a shard, and a base without storage that the
   gather fills. */
static ft_status ft__flat_weights(ft_zero *z, ft__zero_flat *f)
{
    ft_status status = FT_OK;
    f->shard = (f->elems + z->D - 1) / z->D;
    f->shard = (f->shard + FT__ZERO_ALIGN - 1) / FT__ZERO_ALIGN * FT__ZERO_ALIGN;
    f->padded = f->shard * z->D;
    if (z->shards_weights) {
        FT_TRY(ft_tensor_empty(z->ctx, &f->full, z->config.dtype, 1, &f->padded));
        f->mine = ft__shape1(z, z->config.dtype, f->shard, FT_TAG_PARAM, &status);
        return status;
    }
    f->full = ft__shape1(z, z->config.dtype, f->padded, FT_TAG_PARAM, &status);
    FT_TRY(status);
    return ft_tensor_view(f->full, &f->mine, z->rank * f->shard, 1, &f->shard);
}

/* Whole gradients: [Z0, Z1] stay until the update, [Z2, Z3] only until they travel. */
static ft_dtype ft__zero_full_dtype(const ft_zero *z)
{
    return z->shards_grads ? z->reduce_dtype : z->accumulate_dtype;
}

/* Gradients get storage when they are needed; optimizer state has it always: [Z0] of the whole
   flat, [Z1-Z3] of the shard. */
static ft_status ft__flat_training(ft_zero *z, ft__zero_flat *f)
{
    ft_status status = FT_OK;
    int64_t n = z->config.stage == 0 ? f->padded : f->shard;
    FT_TRY(ft_tensor_empty(z->ctx, &f->grad, ft__zero_full_dtype(z), 1, &f->padded));
    if (z->shards_grads)
        FT_TRY(ft_tensor_empty(z->ctx, &f->grad_mine, z->accumulate_dtype, 1, &f->shard));
    else FT_TRY(ft_tensor_view(f->grad, &f->grad_mine, z->rank * f->shard, 1, &f->shard));
    if (z->config.dtype != FT_F32) f->master = ft__shape1(z, FT_F32, n, FT_TAG_OPTIM, &status);
    for (int k = 0; k < z->config.optimizer.n_state; k++) {
        f->state[k] = ft__shape1(z, FT_F32, n, FT_TAG_OPTIM, &status);
        FT_TRY(status);
        FT_TRY(ft_fill(f->state[k], 0, z->compute));
    }
    return status;
}

static ft_status ft__zero_bind(ft_zero *z, ft__zero_param *p)
{
    ft__zero_flat *f = &z->units[p->unit].flat[p->flags & FT_ZERO_FROZEN ? 1 : 0];
    ft_tensor *w = p->weight;
    FT_TRY(ft_tensor_bind(w, f->full, p->offset));
    if (p->flags & FT_ZERO_FROZEN) return FT_OK;
    FT_TRY(ft_tensor_view(f->grad, &p->grad, p->offset, w->ndim, w->shape));
    w->requires_grad = 1;
    w->sink.get = ft__zero_sink_get;
    w->sink.user = p;
    return FT_OK;
}

/* What the optimizer updates in one launch: the part of [first, first + n) of the flat that lies in
   [a, b), as views of this rank's buffers. The master and the states start at `first`. */
static ft_status ft__zero_span_add(ft_zero *z, ft__zero_flat *f, int64_t a, int64_t b, double decay)
{
    int whole = z->config.stage == 0;
    int64_t first = whole ? 0 : z->rank * f->shard, last = first + (whole ? f->padded : f->shard);
    if (a < first) a = first;
    if (b > last) b = last;
    if (a >= b) return FT_OK;
    ft__zero_span *s = (ft__zero_span *)ft_host_alloc(z->ctx, sizeof *s);
    if (!s) return FT_ERR_OOM;
    int64_t n = b - a, at = a - first;
    s->decay = decay;
    FT_TRY(ft_tensor_view(whole ? f->full : f->mine, &s->weight, at, 1, &n));
    FT_TRY(ft_tensor_view(whole ? f->grad : f->grad_mine, &s->grad, at, 1, &n));
    if (f->master) FT_TRY(ft_tensor_view(f->master, &s->master, at, 1, &n));
    for (int k = 0; k < z->config.optimizer.n_state; k++)
        FT_TRY(ft_tensor_view(f->state[k], &s->state[k], at, 1, &n));
    *z->spans_end = s;
    z->spans_end = &s->next;
    return FT_OK;
}

/* [O1] Decay holds per parameter, also where a shard boundary cuts one: neighbours of equal decay
   make one span, and a span is cut at the shard's ends, never the other way round. */
static ft_status ft__zero_make_spans(ft_zero *z)
{
    const ft__zero_param *p = z->params;
    while (p) {
        if (p->flags & FT_ZERO_FROZEN) {
            p = p->next;
            continue;
        }
        int64_t a = p->offset, b = a;
        int unit = p->unit, decayed = p->flags & FT_ZERO_DECAY;
        for (; p && p->unit == unit && (p->flags & FT_ZERO_DECAY) == decayed; p = p->next)
            if (!(p->flags & FT_ZERO_FROZEN)) b = p->offset + ft_numel(p->weight);
        FT_TRY(ft__zero_span_add(z, &z->units[unit].flat[0], a, b,
                            decayed ? z->config.weight_decay : 0.0));
    }
    return FT_OK;
}

/* Whether this rank counts a parameter in the norm: of equal copies one does. */
static int ft__zero_counted(const ft_zero *z, const ft__zero_param *p)
{
    const ft__zero_unit *u = &z->units[p->unit];
    if (p->flags & FT_ZERO_FROZEN || z->dp_rank >= z->D) return 0;
    if (u->share && ft_group_rank(u->share) != 0) return 0;
    return z->tp_rank == 0 || !(p->flags & (FT_ZERO_REPLICATED | FT_ZERO_PARTIAL));
}

/* [N1] Runs of counted parameters, cut to this rank's shard: one sum of squares each. */
static ft_status ft__zero_norm_spans(ft_zero *z)
{
    const ft__zero_param *p = z->params;
    while (p) {
        int unit = p->unit;
        ft__zero_flat *f = &z->units[unit].flat[0];
        int64_t a = p->offset, b = a, first = z->rank * f->shard;
        if (!ft__zero_counted(z, p)) {
            p = p->next;
            continue;
        }
        for (; p && p->unit == unit && ((p->flags & FT_ZERO_FROZEN) || ft__zero_counted(z, p));
             p = p->next)
            if (!(p->flags & FT_ZERO_FROZEN)) b = p->offset + ft_numel(p->weight);
        if (a < first) a = first;
        if (b > first + f->shard) b = first + f->shard;
        if (a >= b) continue; /* nothing of it, or only padding, is here */
        ft__zero_span *s = (ft__zero_span *)ft_host_alloc(z->ctx, sizeof *s);
        if (!s) return FT_ERR_OOM;
        int64_t n = b - a;
        FT_TRY(ft_tensor_view(f->grad_mine, &s->grad, a - first, 1, &n));
        *z->norm_end = s;
        z->norm_end = &s->next;
        z->n_norm_spans++;
    }
    return FT_OK;
}

static ft_status ft__zero_scalars(ft_zero *z)
{
    int world = ft_world(z->ctx);
    ft_status status = FT_OK;
    z->counts = ft__shape1(z, FT_I32, 1, FT_TAG_OTHER, &status);
    z->all_counts = ft__shape1(z, FT_I32, world, FT_TAG_OTHER, &status);
    z->scale = ft__shape1(z, FT_F32, 1, FT_TAG_OTHER, &status);
    z->partial =
        ft__shape1(z, FT_F32, z->n_norm_spans ? z->n_norm_spans : 1, FT_TAG_OTHER, &status);
    z->local = ft__shape1(z, FT_F32, 2, FT_TAG_OTHER, &status);
    z->all = ft__shape1(z, FT_F32, 2 * world, FT_TAG_OTHER, &status);
    z->loss = ft__shape1(z, FT_F32, 1, FT_TAG_OTHER, &status);
    z->control = ft__shape1(z, FT_F32, FT__CONTROL, FT_TAG_OTHER, &status);
    z->updates = ft__shape1(z, FT_I32, 2, FT_TAG_OTHER, &status);
    FT_TRY(status);
    FT_TRY(ft_fill(z->partial, 0, z->compute));
    FT_TRY(ft_fill(z->control, 0, z->compute));
    return ft_fill(z->updates, 0, z->compute);
}

/* Parameters of a unit (-1: of all), those whose flags have one of `flags` (0: all): how many, how
   many elements, and a number that differs where names, shapes or flags do. */
static uint64_t ft__zero_params_hash(const ft_zero *z, int unit, int flags, int *n, int64_t *elems)
{
    uint64_t hash = 1469598103934665603u;
    *n = 0;
    *elems = 0;
    for (const ft__zero_param *p = z->params; p; p = p->next) {
        if ((unit >= 0 && p->unit != unit) || (flags && !(p->flags & flags))) continue;
        hash = ft__zero_mix(hash, (uint64_t)p->flags);
        hash = ft__zero_mix_bytes(hash, p->weight->name, strlen(p->weight->name) + 1);
        hash = ft__zero_mix_bytes(hash, p->weight->shape, sizeof p->weight->shape);
        *elems += ft_numel(p->weight);
        ++*n;
    }
    return hash;
}

static ft_status ft__zero_agree_unit(const ft_zero *z, int unit)
{
    const ft__zero_unit *u = &z->units[unit];
    char text[256];
    int n;
    int64_t elems;
    uint64_t hash = ft__zero_params_hash(z, unit, 0, &n, &elems);
    snprintf(text, sizeof text, "ZeRO unit %d, %s: %d parameters of %lld elements, %lld of them "
             "frozen, on %d tapes%s, shared by %d ranks; hash of names, shapes, flags", unit,
             u->name, n, (long long)elems, (long long)u->flat[1].elems, u->tapes,
             u->last ? ", a break after it" : "", u->share ? ft_group_size(u->share) : 1);
    return ft__zero_agree(z->weights, text, hash);
}

/* What is reduced together is described alike: units over dp, parts over tp, copies over stages. */
static ft_status ft__zero_agree_units(const ft_zero *z)
{
    char text[256];
    int n;
    int64_t elems;
    uint64_t hash;
    snprintf(text, sizeof text, "ZeRO: number of units %d", z->n_units);
    FT_TRY(ft__zero_agree(z->weights, text, 0));
    for (int u = 0; u < z->n_units; u++) FT_TRY(ft__zero_agree_unit(z, u));
    if (z->tp) {
        hash = ft__zero_params_hash(z, -1, FT_ZERO_PARTIAL, &n, &elems);
        snprintf(text, sizeof text, "ZeRO: parameters of which tp ranks have parts: %d of %lld "
                 "elements; hash of names, shapes, flags", n, (long long)elems);
        FT_TRY(ft__zero_agree(z->tp, text, hash));
    }
    for (int u = 0; u < z->n_units; u++) {
        if (!z->units[u].share) continue;
        hash = ft__zero_params_hash(z, u, 0, &n, &elems);
        snprintf(text, sizeof text, "ZeRO: a shared unit of %d parameters of %lld elements; hash "
                 "of names, shapes, flags", n, (long long)elems);
        FT_TRY(ft__zero_agree(z->units[u].share, text, hash));
    }
    return FT_OK;
}

FT_API ft_status ft_zero_commit(ft_zero *zero, ft_zero_init_fn init, void *user)
{
    if (zero->committed || !zero->params)
        return ft_error(FT_ERR_STATE, "ft_zero_commit: %s", zero->committed ? "done already" :
                        "no parameters were added");
    FT_TRY(ft__zero_agree_units(zero));
    for (int u = 0; u < zero->n_units; u++)
        for (int k = 0; k < 2; k++) {
            ft__zero_flat *f = &zero->units[u].flat[k];
            if (!f->elems) continue;
            FT_TRY(ft__flat_weights(zero, f));
            if (k == 0) FT_TRY(ft__flat_training(zero, f));
        }
    for (ft__zero_param *p = zero->params; p; p = p->next) FT_TRY(ft__zero_bind(zero, p));
    FT_TRY(ft__zero_make_spans(zero));
    FT_TRY(ft__zero_norm_spans(zero));
    FT_TRY(ft__zero_scalars(zero));
    zero->committed = 1;
    for (int u = 0; u < zero->n_units; u++) zero->units[u].resident = !zero->shards_weights;
    for (ft__zero_param *p = zero->params; p && init; p = p->next)
        FT_TRY(ft__zero_initialise(zero, p, init, user));
    zero->weights_ready = ft_event_record(zero->compute);
    return FT_OK;
}

/* ------------------------------------------------------------------------------ >>weights.impl */

static ft__zero_param *ft__zero_find(ft_zero *z, const ft_tensor *param)
{
    for (ft__zero_param *p = z->params; p; p = p->next)
        if (p->weight == param) return p;
    return NULL;
}

static ft_status ft__zero_range(ft_zero *z, const ft_tensor *param, int64_t first, int64_t n,
                                ft__zero_param **out)
{
    *out = ft__zero_find(z, param);
    if (!*out || !z->committed)
        return ft_error(FT_ERR_ARG, "%s is not a parameter of this ft_zero, or it is not committed",
                        param->name ? param->name : "the tensor");
    if (first < 0 || n < 1 || n > ft_numel(param) - first)
        return ft_error(FT_ERR_ARG, "%s has %lld elements, not %lld from %lld on", param->name,
                        (long long)ft_numel(param), (long long)n, (long long)first);
    return FT_OK;
}

/* to[at..] = from[n], through a view of `to` (or the other way round): fp32 <-> the dtype. */
static ft_status ft__copy_part(ft_zero *z, ft_tensor *flat, int64_t at, int64_t n, ft_tensor *part,
                               int into_flat)
{
    ft_tensor *view;
    FT_TRY(ft_tensor_view(flat, &view, at, 1, &n));
    ft_status status = into_flat ? ft_copy(view, part, z->compute)
                                 : ft_copy(part, view, z->compute);
    ft_tensor_free(view);
    return status;
}

/* [first, first + n) of a flat, as far as a buffer that starts at element `start` and holds `len`
   has it: the common part, relative to both. */
static int64_t ft__zero_common(int64_t first, int64_t n, int64_t start, int64_t len,
                               int64_t *in_part, int64_t *in_buffer)
{
    int64_t a = first > start ? first : start;
    int64_t b = first + n < start + len ? first + n : start + len;
    *in_part = a - first;
    *in_buffer = a - start;
    return b - a;
}

/* Stores fp32 values (device tensor `part`, elements first..first+n of flat f) wherever this rank
   keeps them: whole weights (in stage 3, if they are gathered or fetched ahead), the shard, and the
   master if there is one. */
static ft_status ft__flat_store(ft_zero *z, ft__zero_flat *f, int64_t first, ft_tensor *part)
{
    ft_tensor *to[3];
    int64_t start[3], len[3], n = ft_numel(part);
    to[0] = ft_tensor_present(f->full) ? f->full : NULL;
    start[0] = 0;
    to[1] = z->shards_weights ? f->mine : NULL;
    start[1] = z->rank * f->shard;
    to[2] = f->master;
    start[2] = z->config.stage == 0 ? 0 : z->rank * f->shard;
    for (int k = 0; k < 3; k++) {
        int64_t in_part, in_buffer;
        if (!to[k]) continue;
        len[k] = ft_numel(to[k]);
        int64_t common = ft__zero_common(first, n, start[k], len[k], &in_part, &in_buffer);
        if (common < 1) continue;
        ft_tensor *source;
        FT_TRY(ft_tensor_view(part, &source, in_part, 1, &common));
        FT_TRY(ft__copy_part(z, to[k], in_buffer, common, source, 1));
        ft_tensor_free(source);
    }
    z->weights_ready = ft_event_record(z->compute);
    return FT_OK;
}

#define FT__CHUNK_ELEMS (1 << 18) /* weights pass through host and comm buffers in such pieces */

FT_API ft_status ft_zero_import(ft_zero *zero, ft_tensor *param, int64_t first, int64_t n,
                                const float *values)
{
    ft__zero_param *p;
    FT_TRY(ft__zero_range(zero, param, first, n, &p));
    ft__zero_unit *u = &zero->units[p->unit];
    ft__zero_flat *f = &u->flat[p->flags & FT_ZERO_FROZEN ? 1 : 0];
    FT_TRY(ft_stream_wait(zero->compute, u->gather_done)); /* [E2] [E5] gathers read and write it */
    for (int64_t at = 0; at < n; at += FT__CHUNK_ELEMS) {
        int64_t piece = n - at < FT__CHUNK_ELEMS ? n - at : FT__CHUNK_ELEMS;
        ft_tensor *part;
        FT_TRY(ft_tensor_create(zero->ctx, &part, FT_F32, 1, &piece, FT_TAG_COMM));
        FT_TRY(ft_upload(part, values + at));
        FT_TRY(ft__flat_store(zero, f, p->offset + first + at, part));
        ft_tensor_free(part);
    }
    return FT_OK;
}

/* Initial values: only what this rank keeps is asked for. */
static ft_status ft__zero_initialise(ft_zero *zero, ft__zero_param *p, ft_zero_init_fn init,
                                     void *user)
{
    int64_t n = ft_numel(p->weight), at = 0, end = n, in_buffer;
    ft__zero_flat *f = &zero->units[p->unit].flat[p->flags & FT_ZERO_FROZEN ? 1 : 0];
    if (zero->shards_weights) {
        int64_t common = ft__zero_common(p->offset, n, zero->rank * f->shard, f->shard, &at,
                                     &in_buffer);
        end = at + common;
    }
    int64_t most = end - at < FT__CHUNK_ELEMS ? end - at : FT__CHUNK_ELEMS;
    if (most < 1) return FT_OK; /* all of it lies in other shards */
    float *values = (float *)ft_host_alloc(zero->ctx, (size_t)most * sizeof *values);
    if (!values) return FT_ERR_OOM;
    for (; at < end; at += most) {
        int64_t piece = end - at < most ? end - at : most;
        if (ft_ctx_device(zero->ctx) != FT_META)
            FT_TRY(init(user, p->weight->name, at, piece, values));
        FT_TRY(ft_zero_import(zero, p->weight, at, piece, values));
    }
    ft_host_free(zero->ctx, values);
    return FT_OK;
}

/* values[n] on every rank. Each of the first copy's D ranks that has a part of the range puts it
   into a buffer of the range's size and broadcasts it: n (dp-1) elements travel, and no rank ever
   holds a whole unit for it. */
static ft_status ft__zero_collect(ft_zero *z, ft_tensor *whole, ft_tensor *mine, int64_t shard,
                                  int64_t first, int64_t n, float *values)
{
    ft_tensor *part;
    FT_TRY(ft_tensor_create(z->ctx, &part, FT_F32, 1, &n, FT_TAG_COMM));
    if (whole) FT_TRY(ft__copy_part(z, whole, first, n, part, 0));
    for (int r = 0; r < z->D && !whole; r++) {
        int64_t in_part, in_shard;
        int64_t common = ft__zero_common(first, n, r * shard, shard, &in_part, &in_shard);
        ft_tensor *piece;
        if (common < 1) continue;
        FT_TRY(ft_tensor_view(part, &piece, in_part, 1, &common));
        if (r == z->dp_rank) FT_TRY(ft__copy_part(z, mine, in_shard, common, piece, 0));
        FT_TRY(ft_broadcast(z->weights, z->compute, piece, r));
        ft_tensor_free(piece);
    }
    if (values) FT_TRY(ft_download(part, values));
    ft_tensor_free(part);
    return FT_OK;
}

static ft_status ft__zero_collect_all(ft_zero *z, ft_tensor *whole, ft_tensor *mine, int64_t shard,
                                      int64_t first, int64_t n, float *values)
{
    for (int64_t at = 0; at < n; at += FT__CHUNK_ELEMS) {
        int64_t piece = n - at < FT__CHUNK_ELEMS ? n - at : FT__CHUNK_ELEMS;
        FT_TRY(ft__zero_collect(z, whole, mine, shard, first + at, piece,
                                values ? values + at : NULL));
    }
    return FT_OK;
}

FT_API ft_status ft_zero_export(ft_zero *zero, ft_tensor *param, int64_t first, int64_t n,
                                float *values)
{
    ft__zero_param *p;
    FT_TRY(ft__zero_range(zero, param, first, n, &p));
    ft__zero_unit *u = &zero->units[p->unit];
    ft__zero_flat *f = &u->flat[p->flags & FT_ZERO_FROZEN ? 1 : 0];
    FT_TRY(ft_stream_wait(zero->compute, u->gather_done)); /* [E2] the stage 1, 2 gather */
    ft_tensor *whole = f->master ? NULL : zero->shards_weights ? NULL : f->full;
    if (f->master && zero->config.stage == 0) whole = f->master;
    return ft__zero_collect_all(zero, whole, f->master ? f->master : f->mine, f->shard,
                                p->offset + first, n, values);
}

FT_API ft_status ft_zero_export_grad(ft_zero *zero, ft_tensor *param, int64_t first, int64_t n,
                                     float *values)
{
    ft__zero_param *p;
    FT_TRY(ft__zero_range(zero, param, first, n, &p));
    if (p->flags & FT_ZERO_FROZEN)
        return ft_error(FT_ERR_STATE, "%s is frozen: it has no gradient", param->name);
    ft__zero_unit *u = &zero->units[p->unit];
    ft_tensor *shard = NULL;
    FT_TRY(ft_zero_get_shard(zero, p->unit, &shard));
    FT_TRY(ft__reduce_replicas(zero, u)); /* a unit idle in the last micro-batch */
    FT_TRY(ft_stream_wait(zero->compute, u->reduce_done)); /* [E4] */
    ft_tensor *whole = zero->config.stage == 0 ? u->flat[0].grad : NULL;
    return ft__zero_collect_all(zero, whole, shard, u->flat[0].shard, p->offset + first, n, values);
}

/* -------------------------------------------------------------------------------- >>state.impl */

FT_API const ft_zero_config *ft_zero_options(const ft_zero *zero) { return &zero->config; }

FT_API int ft_zero_state_count(const ft_zero *zero) { return zero->config.optimizer.n_state; }

FT_API void ft_zero_replica(const ft_zero *zero, int *index, int *count)
{
    int whole = zero->config.stage == 0;
    *index = whole ? zero->dp_rank : zero->dp_rank / zero->D;
    *count = whole ? zero->dp : zero->dp / zero->D;
}

static ft__zero_flat *ft__zero_flat_of(ft_zero *z, const ft__zero_param *p)
{
    return &z->units[p->unit].flat[p->flags & FT_ZERO_FROZEN ? 1 : 0];
}

/* Which elements of its flat this rank's buffers hold: [0] all of it, else the shard. */
static void ft__zero_held(const ft_zero *z, const ft__zero_flat *f, int64_t *start, int64_t *len)
{
    *start = z->config.stage == 0 ? 0 : z->rank * f->shard;
    *len = z->config.stage == 0 ? f->padded : f->shard;
}

static ft_status ft__zero_owned_part(ft_zero *z, const ft_tensor *param, ft__zero_param **p,
                                     int64_t *first, int64_t *n)
{
    int64_t start, len, in_buffer;
    *p = ft__zero_find(z, param);
    if (!*p || !z->committed)
        return ft_error(FT_ERR_ARG, "%s is not a parameter of this ft_zero, or it is not committed",
                        param->name ? param->name : "the tensor");
    ft__zero_held(z, ft__zero_flat_of(z, *p), &start, &len);
    *n = ft__zero_common((*p)->offset, ft_numel(param), start, len, first, &in_buffer);
    if (*n < 1) *first = *n = 0;
    return FT_OK;
}

FT_API ft_status ft_zero_owned(ft_zero *zero, const ft_tensor *param, int64_t *first, int64_t *n)
{
    ft__zero_param *p;
    return ft__zero_owned_part(zero, param, &p, first, n);
}

/* A view of the elements in this rank's buffer of the array. */
static ft_status ft__zero_state_view(ft_zero *z, const ft_tensor *param, int array, int64_t first,
                                     int64_t n, ft_tensor **view)
{
    ft__zero_param *p;
    int64_t own, owned, start, len;
    FT_TRY(ft__zero_owned_part(z, param, &p, &own, &owned));
    int frozen = p->flags & FT_ZERO_FROZEN, most = frozen ? 0 : ft_zero_state_count(z);
    if (z->in_step)
        return ft_error(FT_ERR_STATE, "the state of %s is read and written between steps: call "
                        "ft_zero_step_end first", param->name);
    if (array < 0 || array > most)
        return ft_error(FT_ERR_ARG, "%s has the arrays 0 to %d (%s), not %d", param->name, most,
                        frozen ? "frozen" : z->config.optimizer.name, array);
    if (n < 1 || first < own || n > owned || first - own > owned - n)
        return ft_error(FT_ERR_ARG, "%s: this rank owns %lld elements from %lld on, not %lld from "
                        "%lld on", param->name, (long long)owned, (long long)own, (long long)n,
                        (long long)first);
    ft__zero_flat *f = ft__zero_flat_of(z, p);
    ft__zero_held(z, f, &start, &len);
    ft_tensor *buffer = array ? f->state[array - 1] : f->master;
    if (!buffer) buffer = z->config.stage == 0 ? f->full : f->mine;
    FT_TRY(ft_stream_wait(z->compute, z->units[p->unit].gather_done)); /* [E2] [E5] */
    return ft_tensor_view(buffer, view, p->offset + first - start, 1, &n);
}

/* Of bf16 the values' second half takes the bits, which are then widened from the front. */
FT_API ft_status ft_zero_state_read(ft_zero *zero, const ft_tensor *param, int array, int64_t first,
                                    int64_t n, float *values)
{
    ft_tensor *view;
    FT_TRY(ft__zero_state_view(zero, param, array, first, n, &view));
    int narrow = view->dtype == FT_BF16;
    char *bits = (char *)values + (narrow ? (size_t)n * sizeof(uint16_t) : 0);
    ft_status status = ft_download(view, bits);
    ft_tensor_free(view);
    for (int64_t i = 0; narrow && i < n && status == FT_OK; i++) {
        uint16_t narrow_value;
        memcpy(&narrow_value, bits + (size_t)i * sizeof narrow_value, sizeof narrow_value);
        values[i] = ft_f32_from_bf16(narrow_value);
    }
    return status;
}

/* Rounds on the host, in pieces. */
static ft_status ft__zero_write_bf16(ft_tensor *to, int64_t n, const float *values)
{
    uint16_t bits[2048];
    for (int64_t at = 0; at < n; at += 2048) {
        int64_t piece = n - at < 2048 ? n - at : 2048;
        ft_tensor *view;
        for (int64_t i = 0; i < piece; i++) bits[i] = ft_bf16_from_f32(values[at + i]);
        FT_TRY(ft_tensor_view(to, &view, at, 1, &piece));
        FT_TRY(ft_upload(view, bits));
        ft_tensor_free(view);
    }
    return FT_OK;
}

FT_API ft_status ft_zero_state_write(ft_zero *zero, ft_tensor *param, int array, int64_t first,
                                     int64_t n, const float *values)
{
    ft_tensor *view;
    FT_TRY(ft__zero_state_view(zero, param, array, first, n, &view));
    ft_status status = view->dtype == FT_BF16 ? ft__zero_write_bf16(view, n, values)
                                              : ft_upload(view, values);
    ft_tensor_free(view);
    zero->weights_ready = ft_event_record(zero->compute);
    return status;
}

FT_API ft_status ft_zero_progress_get(ft_zero *zero, int64_t *updates, int64_t *skipped)
{
    int32_t count[2];
    if (!zero->committed)
        return ft_error(FT_ERR_STATE, "ft_zero_progress_get before ft_zero_commit");
    FT_TRY(ft_download(zero->updates, count));
    *updates = count[0];
    *skipped = count[1];
    return FT_OK;
}

FT_API ft_status ft_zero_progress_set(ft_zero *zero, int64_t updates, int64_t skipped)
{
    int32_t count[2];
    if (!zero->committed || zero->in_step)
        return ft_error(FT_ERR_STATE, "ft_zero_progress_set %s", zero->in_step ?
                        "within a step" : "before ft_zero_commit");
    if (updates < 0 || skipped < 0 || updates > INT32_MAX || skipped > INT32_MAX)
        return ft_error(FT_ERR_ARG, "%lld updates and %lld skipped ones: 0 to %d each",
                        (long long)updates, (long long)skipped, INT32_MAX);
    count[0] = (int32_t)updates;
    count[1] = (int32_t)skipped;
    return ft_upload(zero->updates, count);
}

static ft_status ft__zero_agree_progress(ft_zero *z)
{
    char text[96];
    int64_t updates, skipped;
    FT_TRY(ft_zero_progress_get(z, &updates, &skipped));
    snprintf(text, sizeof text, "ZeRO: progress of %lld updates, %lld skipped", (long long)updates,
             (long long)skipped);
    return ft__zero_agree(z->scalars, text, 0);
}

static ft_status ft__unit_evict(ft_zero *z, int unit);

FT_API ft_status ft_zero_state_commit(ft_zero *zero)
{
    int gathers = zero->D > 1 && (zero->config.stage == 1 || zero->config.stage == 2);
    if (!zero->committed || zero->in_step)
        return ft_error(FT_ERR_STATE, "ft_zero_state_commit %s", zero->in_step ?
                        "within a step" : "before ft_zero_commit");
    FT_TRY(ft__zero_agree_progress(zero));
    for (ft__zero_span *s = zero->spans; s; s = s->next)
        if (s->master) FT_TRY(ft_copy(s->weight, s->master, zero->compute));
    zero->weights_ready = ft_event_record(zero->compute);
    if (gathers) FT_TRY(ft_stream_wait(zero->gather_stream, zero->weights_ready)); /* [E1] */
    for (int u = 0; u < zero->n_units; u++) {
        ft__zero_unit *unit = &zero->units[u];
        if (zero->shards_weights && unit->gathered)
            return ft_error(FT_ERR_STATE, "ft_zero_state_commit while unit %s is gathered: release "
                            "it first", unit->name);
        FT_TRY(ft__unit_evict(zero, u)); /* fetched ahead: the old weights */
        for (int k = 0; k < 2 && gathers; k++)
            if (unit->flat[k].elems)
                FT_TRY(ft_all_gather(zero->gather, zero->gather_stream, unit->flat[k].mine,
                                     unit->flat[k].full));
        if (gathers) unit->gather_done = ft_event_record(zero->gather_stream);
    }
    return FT_OK;
}

/* -------------------------------------------------------------------------------- >>verbs.impl */

static ft_status ft__unit_check(ft_zero *z, int unit, const char *verb)
{
    if (!z->committed) return ft_error(FT_ERR_STATE, "%s before ft_zero_commit", verb);
    if (unit < 0 || unit >= z->n_units)
        return ft_error(FT_ERR_ARG, "%s: unit %d of %d", verb, unit, z->n_units);
    return FT_OK;
}

/* [Z3.1] Starts the all-gather of a unit that is not here. The gather stream first waits for the
   last change of this rank's weights [E1]; nobody waits for the gather yet. */
static ft_status ft__unit_fetch(ft_zero *z, int unit)
{
    ft__zero_unit *u = &z->units[unit];
    if (u->resident) return FT_OK;
    FT_TRY(ft_stream_wait(z->gather_stream, z->weights_ready)); /* [E1] */
    for (int k = 0; k < 2; k++) {
        ft__zero_flat *f = &u->flat[k];
        if (!f->elems) continue;
        FT_TRY(ft_tensor_attach(f->full, FT_TAG_GATHER, z->gather_stream));
        FT_TRY(ft_all_gather(z->gather, z->gather_stream, f->mine, f->full));
    }
    u->gather_done = ft_event_record(z->gather_stream);
    u->resident = 1;
    return FT_OK;
}

FT_API ft_status ft_zero_gather(ft_zero *zero, int unit)
{
    FT_TRY(ft__unit_check(zero, unit, "ft_zero_gather"));
    FT_TRY(ft__unit_fetch(zero, unit));
    FT_TRY(ft_stream_wait(zero->compute, zero->units[unit].gather_done)); /* [E2] */
    zero->units[unit].gathered++;
    return FT_OK;
}

FT_API ft_status ft_zero_get(ft_zero *zero, ft_tensor *param)
{
    ft__zero_param *p = ft__zero_find(zero, param);
    if (!p) return ft_error(FT_ERR_ARG, "ft_zero_get: not a parameter of this ft_zero");
    if (zero->units[p->unit].gathered < 1)
        return ft_error(FT_ERR_STATE, "%s: its unit %s is not gathered; call ft_zero_gather first",
                        param->name, zero->units[p->unit].name);
    return FT_OK;
}

/* Gives the gathered weights back, after the compute that is queued now. */
static ft_status ft__unit_evict(ft_zero *z, int unit)
{
    ft__zero_unit *u = &z->units[unit];
    if (!z->shards_weights || !u->resident) return FT_OK;
    for (int k = 0; k < 2; k++)
        if (u->flat[k].elems) FT_TRY(ft_tensor_detach(u->flat[k].full, z->compute));
    u->resident = 0;
    return FT_OK;
}

FT_API ft_status ft_zero_release(ft_zero *zero, int unit)
{
    FT_TRY(ft__unit_check(zero, unit, "ft_zero_release"));
    ft__zero_unit *u = &zero->units[unit];
    if (u->gathered < 1)
        return ft_error(FT_ERR_STATE, "unit %s is released but not gathered", u->name);
    if (--u->gathered > 0) return FT_OK;
    if (zero->config.keep_gathered && zero->in_step) return FT_OK; /* [Z3.6] */
    return ft__unit_evict(zero, unit);
}

/* Frees the full gradients of a unit whose reduction is queued: compute waits for it first [E4]. */
static ft_status ft__unit_free_grad(ft_zero *z, int unit)
{
    ft__zero_unit *u = &z->units[unit];
    FT_TRY(ft_stream_wait(z->compute, u->reduce_done)); /* [E4] */
    return ft_tensor_detach(u->flat[0].grad, z->compute);
}

FT_API ft_status ft_zero_get_full(ft_zero *zero, int unit)
{
    FT_TRY(ft__unit_check(zero, unit, "ft_zero_get_full"));
    ft__zero_unit *u = &zero->units[unit];
    if (!u->flat[0].elems)
        return ft_error(FT_ERR_STATE, "unit %s is frozen: it has no gradients", u->name);
    if (!zero->in_step)
        return ft_error(FT_ERR_STATE, "gradients of unit %s outside ft_zero_step_begin and _end",
                        u->name);
    if (u->reduced >= (zero->shards_grads ? zero->micro_batches : 1))
        return ft_error(FT_ERR_STATE,
                        "unit %s was reduced already in this step of %d micro-batches: "
                        "what came now would be lost or counted twice",
                        u->name, zero->micro_batches);
    if (zero->unfreed == unit) { /* the last micro-batch's, whose reduction may still run */
        zero->unfreed = -1;
        FT_TRY(ft__unit_free_grad(zero, unit));
    }
    if (ft_tensor_present(u->flat[0].grad)) return FT_OK;
    for (ft__zero_param *p = zero->params; p; p = p->next)
        if (p->unit == unit) p->fresh = 1;
    return ft_tensor_attach(u->flat[0].grad, FT_TAG_GRAD, zero->compute);
}

/* [P1] Between the halves of a split backward only vectors have gradients: they wait in buffers of
   their own, so that no unit's whole gradient waits with them. */
static ft_status ft__zero_early_get(ft__zero_param *p, ft_tensor **grad, int *accumulate)
{
    *accumulate = p->early != NULL;
    if (!p->early)
        FT_TRY(ft_tensor_create(p->zero->ctx, &p->early, p->grad->dtype, p->weight->ndim,
                                p->weight->shape, FT_TAG_GRAD));
    *grad = p->early;
    return FT_OK;
}

static ft_status ft__unit_settle_early(ft_zero *z, int unit)
{
    for (ft__zero_param *p = z->params; p; p = p->next) {
        if (p->unit != unit || !p->early) continue;
        if (p->fresh) FT_TRY(ft_copy(p->grad, p->early, z->compute));
        else FT_TRY(ft_accumulate(p->grad, p->early, z->compute));
        ft_tensor_free(p->early);
        p->early = NULL;
        p->fresh = 0;
    }
    return FT_OK;
}

/* [G1] The first contribution overwrites, later ones add: no pass to zero the buffer. */
static ft_status ft__zero_sink_get(void *user, ft_tensor *param, ft_tensor **grad, int *accumulate)
{
    ft__zero_param *p = (ft__zero_param *)user;
    (void)param;
    if (p->zero->shards_grads && p->zero->first_halves && p->weight->ndim == 1)
        return ft__zero_early_get(p, grad, accumulate);
    FT_TRY(ft_zero_get_full(p->zero, p->unit));
    *grad = p->grad;
    *accumulate = !p->fresh;
    p->fresh = 0;
    return FT_OK;
}

/* [G2] Who got no contribution is zero at the reduction, never stale. */
static ft_status ft__unit_settle_fresh(ft_zero *z, int unit)
{
    for (ft__zero_param *p = z->params; p; p = p->next) {
        if (p->unit != unit || !p->fresh || !p->grad) continue;
        FT_TRY(ft_fill(p->grad, 0, z->compute));
        p->fresh = 0;
    }
    return FT_OK;
}

static ft_status ft__comm_buffer(ft_zero *z, ft_dtype dtype, int64_t n, ft_tensor **out)
{
    FT_TRY(ft_tensor_empty(z->ctx, out, dtype, 1, &n));
    return ft_tensor_attach(*out, FT_TAG_COMM, z->reduce_stream);
}

static ft_status ft__comm_buffer_free(ft_zero *z, ft_tensor *buffer)
{
    FT_TRY(ft_tensor_detach(buffer, z->reduce_stream));
    ft_tensor_free(buffer);
    return FT_OK;
}

/* [Z2.1] The unit's gradients go into this rank's shard: the first micro-batch's straight, if the
   dtypes agree; else through a buffer of the shard's size, and a conversion or an addition. */
static ft_status ft__reduce_into_shard(ft_zero *z, ft__zero_flat *f)
{
    ft_tensor *part;
    int first = !ft_tensor_present(f->grad_mine);
    if (first) FT_TRY(ft_tensor_attach(f->grad_mine, FT_TAG_GRAD, z->reduce_stream));
    if (first && f->grad->dtype == f->grad_mine->dtype)
        return ft_reduce_scatter(z->reduce, z->reduce_stream, f->grad, f->grad_mine);
    FT_TRY(ft__comm_buffer(z, f->grad->dtype, f->shard, &part));
    FT_TRY(ft_reduce_scatter(z->reduce, z->reduce_stream, f->grad, part));
    if (first) FT_TRY(ft_copy(f->grad_mine, part, z->reduce_stream));
    else FT_TRY(ft_accumulate(f->grad_mine, part, z->reduce_stream));
    return ft__comm_buffer_free(z, part);
}

/* [Z0, Z1] In place: this rank's part of the whole gradient becomes the sum; in stage 0 all of
   it. */
static ft_status ft__reduce_in_place(ft_zero *z, ft__zero_flat *f, ft_tensor *full, ft_tensor *mine)
{
    FT_TRY(ft_reduce_scatter(z->reduce, z->reduce_stream, full, mine));
    if (z->replicas) FT_TRY(ft_all_reduce(z->replicas, z->reduce_stream, mine)); /* [H2] */
    if (z->config.stage == 0) /* [Z0.1] everyone updates everything */
        FT_TRY(ft_all_gather(z->reduce, z->reduce_stream, mine, full));
    if (full == f->grad) return FT_OK;
    if (z->config.stage == 0) return ft_copy(f->grad, full, z->reduce_stream);
    return ft_copy(f->grad_mine, mine, z->reduce_stream);
}

/* The same where the wire has another dtype: a copy of the unit travels. */
static ft_status ft__reduce_whole(ft_zero *z, ft__zero_flat *f)
{
    ft_tensor *wire, *mine;
    if (z->dp == 1) return FT_OK;
    if (z->reduce_dtype == f->grad->dtype) return ft__reduce_in_place(z, f, f->grad, f->grad_mine);
    FT_TRY(ft__comm_buffer(z, z->reduce_dtype, f->padded, &wire));
    FT_TRY(ft_tensor_view(wire, &mine, z->rank * f->shard, 1, &f->shard));
    FT_TRY(ft_copy(wire, f->grad, z->reduce_stream));
    FT_TRY(ft__reduce_in_place(z, f, wire, mine));
    ft_tensor_free(mine);
    return ft__comm_buffer_free(z, wire);
}

/* [H2] After the unit's last reduction of the step the replicas add up their shards. */
static ft_status ft__reduce_replicas(ft_zero *z, ft__zero_unit *u)
{
    if (!z->replicas || !z->shards_grads || u->shared) return FT_OK;
    u->shared = 1;
    FT_TRY(ft_all_reduce(z->replicas, z->reduce_stream, u->flat[0].grad_mine));
    u->reduce_done = ft_event_record(z->reduce_stream);
    return FT_OK;
}

/* [P3] Each tp rank saw a part of the tokens: the parts are added before dp adds its own. */
static ft_status ft__reduce_partial(ft_zero *z, int unit)
{
    for (ft__zero_param *p = z->params; p && z->tp; p = p->next)
        if (p->unit == unit && p->grad && (p->flags & FT_ZERO_PARTIAL))
            FT_TRY(ft_all_reduce(z->tp, z->reduce_stream, p->grad));
    return FT_OK;
}

/* [P2] Copies of a unit in other stages add up, when all backwards are over: earlier, a stage would
   wait for one that still waits for its gradients. */
static ft_status ft__reduce_shared(ft_zero *z, ft__zero_unit *u)
{
    ft__zero_flat *f = &u->flat[0];
    if (!u->share || !f->elems) return FT_OK;
    FT_TRY(
        ft_all_reduce(u->share, z->reduce_stream, z->config.stage == 0 ? f->grad : f->grad_mine));
    u->reduce_done = ft_event_record(z->reduce_stream);
    return FT_OK;
}

FT_API ft_status ft_zero_reduce(ft_zero *zero, int unit)
{
    FT_TRY(ft__unit_check(zero, unit, "ft_zero_reduce"));
    ft__zero_unit *u = &zero->units[unit];
    FT_TRY(ft_zero_get_full(zero, unit));
    FT_TRY(ft__unit_settle_early(zero, unit));
    FT_TRY(ft__unit_settle_fresh(zero, unit));
    FT_TRY(ft_stream_wait(zero->reduce_stream, ft_event_record(zero->compute))); /* [E3] */
    FT_TRY(ft__reduce_partial(zero, unit));
    if (zero->shards_grads) FT_TRY(ft__reduce_into_shard(zero, &u->flat[0]));
    else FT_TRY(ft__reduce_whole(zero, &u->flat[0]));
    u->reduce_done = ft_event_record(zero->reduce_stream);
    u->reduced++;
    if (u->reduced == zero->micro_batches) FT_TRY(ft__reduce_replicas(zero, u));
    if (zero->config.reduce_overlap == FT_OFF)
        FT_TRY(ft_stream_wait(zero->compute, u->reduce_done)); /* [E4] at once */
    if (!zero->shards_grads) return FT_OK;
    if (zero->config.reduce_overlap == FT_OFF) return ft__unit_free_grad(zero, unit);
    /* [Z2.2] With overlap the buffer stays until the next unit's reduction is queued. */
    int before = zero->unfreed;
    zero->unfreed = unit;
    return before >= 0 ? ft__unit_free_grad(zero, before) : FT_OK;
}

FT_API ft_status ft_zero_get_shard(ft_zero *zero, int unit, ft_tensor **shard)
{
    FT_TRY(ft__unit_check(zero, unit, "ft_zero_get_shard"));
    if (!zero->units[unit].reduced || !ft_tensor_present(zero->units[unit].flat[0].grad_mine))
        return ft_error(FT_ERR_STATE, "unit %s has no reduced gradient: it is there from the last "
                        "backward of a step to its ft_zero_step_end", zero->units[unit].name);
    *shard = zero->units[unit].flat[0].grad_mine;
    return FT_OK;
}

/* ------------------------------------------------------------------------------ >>regions.impl */

/* How many backwards and replays to come will read the unit's weights, on all tapes. */
static int ft__unit_need(const ft__zero_unit *u)
{
    int need = 0;
    for (int k = 0; k < 2; k++)
        if (u->flat[k].elems) need += ft_tensor_need(u->flat[k].full);
    return need;
}

/* [Z3.2] In forward the units to come are the next ones in order. */
static ft_status ft__prefetch_forward(ft_zero *z, int unit)
{
    if (!z->shards_weights) return FT_OK;
    for (int i = 1; i <= z->config.prefetch && unit + i < z->n_units; i++) {
        if (z->units[unit + i - 1].last) break;
        FT_TRY(ft__unit_fetch(z, unit + i));
    }
    return FT_OK;
}

/* [Z3.3] In backward they are those of the regions before this one that read weights. */
static ft_status ft__prefetch_backward(ft_zero *z, const ft__region *region)
{
    int ahead = z->config.prefetch;
    if (!z->shards_weights) return FT_OK;
    for (const ft__region *r = region->older; r && ahead > 0; r = r->older) {
        if (r->tape != region->tape || !r->reads || r->keep) continue;
        FT_TRY(ft__unit_fetch(z, r->unit));
        ahead--;
    }
    return FT_OK;
}

FT_API ft_status ft_zero_enter(ft_zero *zero, int unit, int flags)
{
    FT_TRY(ft__unit_check(zero, unit, "ft_zero_enter"));
    if (zero->n_open == 8)
        return ft_error(FT_ERR_STATE, "unit %s would be the ninth entered at once",
                        zero->units[unit].name);
    if (ft_tape_current(zero->ctx) && !zero->in_step)
        return ft_error(FT_ERR_STATE, "unit %s is entered on a tape outside a step: call "
                        "ft_zero_step_begin first, or end the tape to evaluate",
                        zero->units[unit].name);
    FT_TRY(ft_zero_gather(zero, unit));
    if (!(flags & FT_ZERO_KEEP)) FT_TRY(ft__prefetch_forward(zero, unit));
    zero->open[zero->n_open] = unit;
    zero->open_region[zero->n_open] = NULL;
    if (ft_tape_current(zero->ctx)) {
        ft__region *r = (ft__region *)ft_host_alloc(zero->ctx, sizeof *r);
        if (!r) return FT_ERR_OOM;
        r->zero = zero;
        r->tape = ft_tape_current(zero->ctx);
        r->unit = unit;
        r->keep = flags & FT_ZERO_KEEP;
        r->holds = 1;
        r->need_before = ft__unit_need(&zero->units[unit]);
        FT_TRY(ft_tape_mark(zero->ctx, ft__region_passed, r));
        zero->open_region[zero->n_open] = r;
    }
    zero->n_open++;
    return FT_OK;
}

FT_API ft_status ft_zero_leave(ft_zero *zero, int unit)
{
    FT_TRY(ft__unit_check(zero, unit, "ft_zero_leave"));
    if (!zero->n_open || zero->open[zero->n_open - 1] != unit)
        return ft_error(FT_ERR_STATE, "unit %s is left, but the last one entered is %s",
                        zero->units[unit].name, zero->n_open ?
                        zero->units[zero->open[zero->n_open - 1]].name : "none");
    ft__region *r = zero->open_region[--zero->n_open];
    if (r) {
        r->reads = ft__unit_need(&zero->units[unit]) > r->need_before;
        r->older = zero->regions;
        zero->regions = r;
        FT_TRY(ft_tape_mark(zero->ctx, ft__region_reached, r));
        if (r->keep) return FT_OK; /* [Z3.4] the backward that follows takes it over */
        r->holds = 0;
    }
    return ft_zero_release(zero, unit);
}

/* Backward comes to the end of the region, from later ops. [P1] In a split backward the first half
   reads weights, the second none. */
static ft_status ft__region_reached(ft_ctx *ctx, void *user, ft_phase phase)
{
    ft__region *r = (ft__region *)user;
    (void)ctx;
    if (phase == FT_PHASE_WEIGHTS || phase == FT_PHASE_DROPPED) return FT_OK;
    if (phase == FT_PHASE_INPUTS) {
        r->zero->first_halves++;
        r->halved = 1;
    }
    if (r->reads && !r->holds) {
        FT_TRY(ft_zero_gather(r->zero, r->unit));
        r->holds = 1;
    }
    return ft__prefetch_backward(r->zero, r);
}

/* Takes a closed region off the list. */
static void ft__region_unlink(ft__region *r)
{
    ft__region **link = &r->zero->regions;
    while (*link && *link != r) link = &(*link)->older;
    if (*link) *link = r->older;
}

/* The tape was emptied without this region's backward, whether it was left or is open still. */
static ft_status ft__region_dropped(ft_ctx *ctx, ft__region *r)
{
    ft_zero *z = r->zero;
    int unit = r->unit, holds = r->holds, at = 0;
    while (at < z->n_open && z->open_region[at] != r) at++;
    if (at < z->n_open) z->n_open--;
    for (; at < z->n_open; at++) {
        z->open[at] = z->open[at + 1];
        z->open_region[at] = z->open_region[at + 1];
    }
    z->first_halves -= r->halved;
    ft__region_unlink(r);
    ft_host_free(ctx, r);
    return holds ? ft_zero_release(z, unit) : FT_OK;
}

/* The region's last gradients are there. The unit's backward is over when no other region of it
   waits on this tape; then they are reduced: [Z2, Z3] each time, [Z0, Z1] after the last
   micro-batch. */
static ft_status ft__region_over(ft_ctx *ctx, ft__region *r)
{
    ft_zero *z = r->zero;
    int unit = r->unit, waiting = 0;
    ft__region_unlink(r);
    for (ft__region *other = z->regions; other; other = other->older)
        waiting |= other->tape == r->tape && other->unit == unit;
    ft_host_free(ctx, r);
    if (waiting || !z->units[unit].flat[0].elems) return FT_OK;
    int tapes = z->units[unit].tapes;
    if (!z->in_step || z->units[unit].backwards == z->micro_batches * tapes)
        return ft_error(FT_ERR_STATE, "unit %s: more backwards than the %d micro-batches announced "
                        "to ft_zero_step_begin", z->units[unit].name, z->micro_batches);
    z->units[unit].backwards++;
    if (z->units[unit].backwards % tapes) return FT_OK;
    if (!z->shards_grads && z->units[unit].backwards < z->micro_batches * tapes) return FT_OK;
    return ft_zero_reduce(z, unit);
}

/* Backward leaves the region: its weights are no longer needed, and, but after the first half of a
   split backward, its gradients are complete. */
static ft_status ft__region_passed(ft_ctx *ctx, void *user, ft_phase phase)
{
    ft__region *r = (ft__region *)user;
    if (phase == FT_PHASE_DROPPED) return ft__region_dropped(ctx, r);
    if (r->holds) FT_TRY(ft_zero_release(r->zero, r->unit));
    r->holds = 0;
    if (phase == FT_PHASE_INPUTS) {
        r->zero->first_halves--;
        r->halved = r->keep = 0;
        return FT_OK;
    }
    return ft__region_over(ctx, r);
}

/* ---------------------------------------------------------------------------------- >>step.impl */

FT_API ft_status ft_zero_step_begin(ft_zero *zero, int micro_batches, int64_t counted_tokens,
                                    ft_tensor **scale)
{
    if (!zero->committed || zero->in_step)
        return ft_error(FT_ERR_STATE, "ft_zero_step_begin: %s", zero->in_step ?
                        "a step is open already" : "call ft_zero_commit first");
    if (micro_batches < 1 || counted_tokens < 0 || counted_tokens > INT32_MAX)
        return ft_error(FT_ERR_ARG, "a step of %d micro-batches and %lld counted tokens",
                        micro_batches, (long long)counted_tokens);
    zero->in_step = 1;
    zero->micro_batches = micro_batches;
    for (int u = 0; u < zero->n_units; u++)
        zero->units[u].backwards = zero->units[u].reduced = zero->units[u].shared = 0;
    int32_t count = zero->counts_tokens ? (int32_t)counted_tokens : 0;
    FT_TRY(ft_upload(zero->counts, &count));
    FT_TRY(ft_all_gather(zero->scalars, zero->compute, zero->counts, zero->all_counts));
    FT_TRY(ft_fill(zero->loss, 0, zero->compute));
    if (scale) *scale = zero->scale;
    return ft_op_run(zero->compute, &ft__zero_rows[FT__ROW_SCALE], &zero->all_counts, &zero->scale,
                     NULL);
}

FT_API ft_status ft_zero_add_loss(ft_zero *zero, ft_tensor *loss)
{
    if (!zero->in_step)
        return ft_error(FT_ERR_STATE, "ft_zero_add_loss outside ft_zero_step_begin and _end");
    return ft_accumulate(zero->loss, loss, zero->compute);
}

/* Reduces what no backward reduced (a unit without ops in this step has zero gradients, on every
   rank alike), then lets compute wait for all reductions and unused gathers. */
static ft_status ft__step_settle(ft_zero *z)
{
    for (int u = 0; u < z->n_units; u++) {
        if (!z->units[u].flat[0].elems) continue;
        int left = z->shards_grads && u != z->unfreed &&
                   ft_tensor_present(z->units[u].flat[0].grad);
        if (!z->units[u].reduced || left) FT_TRY(ft_zero_reduce(z, u));
        FT_TRY(ft__reduce_replicas(z, &z->units[u])); /* idle in the last micro-batch */
    }
    for (int u = 0; u < z->n_units; u++) FT_TRY(ft__reduce_shared(z, &z->units[u]));
    if (z->unfreed >= 0) FT_TRY(ft__unit_free_grad(z, z->unfreed));
    z->unfreed = -1;
    for (int u = 0; u < z->n_units; u++) {
        FT_TRY(ft_stream_wait(z->compute, z->units[u].reduce_done)); /* [E4] */
        FT_TRY(ft_stream_wait(z->compute, z->units[u].gather_done)); /* [E5] peers read mine */
        if (z->units[u].gathered)
            return ft_error(FT_ERR_STATE, "unit %s is still gathered at the end of the step",
                            z->units[u].name);
        FT_TRY(ft__unit_evict(z, u)); /* fetched ahead, never used */
    }
    return FT_OK;
}

/* [N1] The global norm. Each rank sums over its spans, padding left out and of equal copies one
   counted; the ranks' sums are added in rank order. The same numbers in every stage. */
static ft_status ft__step_norm(ft_zero *z)
{
    ft_tensor *in[2], *out[2];
    ft_attr attr;
    memset(&attr, 0, sizeof attr);
    for (ft__zero_span *s = z->norm_spans; s; s = s->next, attr.i[0]++) {
        attr.i[1] = ft_numel(s->grad);
        FT_TRY(ft_op_run(z->compute, &ft__zero_rows[FT__ROW_SUMSQ], &s->grad, &z->partial, &attr));
    }
    in[0] = z->partial;
    in[1] = z->loss;
    attr.f[0] = z->tp_rank == 0; /* tp peers have the same loss */
    FT_TRY(ft_op_run(z->compute, &ft__zero_rows[FT__ROW_LOCAL], in, &z->local, &attr));
    FT_TRY(ft_all_gather(z->scalars, z->compute, z->local, z->all));
    attr.f[0] = z->config.grad_clip;
    out[0] = z->control;
    out[1] = z->updates;
    return ft_op_run(z->compute, &ft__zero_rows[FT__ROW_CONTROL], &z->all, out, &attr);
}

static ft_status ft__step_update(ft_zero *z, double lr)
{
    int n_state = z->config.optimizer.n_state;
    for (ft__zero_span *s = z->spans; s; s = s->next) {
        ft_tensor *in[3], *out[FT_OP_MAX_OUT];
        ft_attr attr;
        memset(&attr, 0, sizeof attr);
        attr.f[0] = lr;
        attr.f[1] = s->decay;
        attr.user = &z->config.optimizer;
        in[0] = s->grad;
        in[1] = z->control;
        in[2] = z->updates;
        out[0] = s->weight;
        for (int k = 0; k < n_state; k++) out[1 + k] = s->state[k];
        out[1 + n_state] = s->master; /* read only by the row that has a master */
        FT_TRY(ft_op_run(z->compute, &z->update_rows[s->master ? 1 : 0], in, out, &attr));
    }
    z->weights_ready = ft_event_record(z->compute);
    return FT_OK;
}

/* Gradients end here. [Z1.1, Z2.3] The updated shards are gathered into the weights, unit by unit,
   so that the next forward starts when its first unit is there. */
static ft_status ft__step_finish(ft_zero *z)
{
    int gathers = z->D > 1 && (z->config.stage == 1 || z->config.stage == 2);
    for (int u = 0; u < z->n_units; u++) {
        ft__zero_flat *f = &z->units[u].flat[0];
        if (!f->elems) continue;
        if (ft_tensor_present(f->grad)) FT_TRY(ft_tensor_detach(f->grad, z->compute));
        if (z->shards_grads) FT_TRY(ft_tensor_detach(f->grad_mine, z->compute));
    }
    if (gathers) FT_TRY(ft_stream_wait(z->gather_stream, z->weights_ready)); /* [E1] */
    for (int u = 0; u < z->n_units && gathers; u++) {
        ft__zero_flat *f = &z->units[u].flat[0];
        if (!f->elems) continue;
        FT_TRY(ft_all_gather(z->gather, z->gather_stream, f->mine, f->full));
        z->units[u].gather_done = ft_event_record(z->gather_stream);
    }
    return FT_OK;
}

FT_API ft_status ft_zero_step_end(ft_zero *zero, double lr)
{
    if (!zero->in_step) return ft_error(FT_ERR_STATE, "ft_zero_step_end without a step");
    if (zero->regions || zero->n_open)
        return ft_error(FT_ERR_STATE, "ft_zero_step_end while a forward still waits for its "
                        "backward (unit %s)", zero->units[zero->n_open ?
                        zero->open[0] : zero->regions->unit].name);
    FT_TRY(ft__step_settle(zero));
    FT_TRY(ft__step_norm(zero));
    FT_TRY(ft__step_update(zero, lr));
    zero->in_step = 0;
    return ft__step_finish(zero);
}

FT_API ft_status ft_zero_report_get(ft_zero *zero, ft_zero_report *report)
{
    float control[FT__CONTROL];
    int32_t updates[2];
    FT_TRY(ft_download(zero->control, control));
    FT_TRY(ft_download(zero->updates, updates));
    report->loss = (double)control[FT__LOSS];
    report->grad_norm = (double)control[FT__NORM];
    report->updates = updates[0];
    report->skipped = updates[1];
    return FT_OK;
}

/* ------------------------------------------------------------------------------- >>formula.impl */

static size_t ft__unit_full_bytes(const ft_zero *z, int unit)
{
    size_t bytes = 0, e = ft_dtype_bytes(z->config.dtype);
    if (unit < 0 || unit >= z->n_units) return 0;
    for (int k = 0; k < 2; k++)
        bytes += ft_accounted_bytes((size_t)z->units[unit].flat[k].padded * e);
    return bytes;
}

static int64_t ft__unit_wire(const ft_zero *z, int unit)
{
    const ft__zero_unit *u = &z->units[unit];
    return (u->flat[0].shard + u->flat[1].shard) * (z->D - 1) *
           (int64_t)ft_dtype_bytes(z->config.dtype);
}

/* [Z3.4] The head's units, which stay from forward to backward: the last one, and a tied table's
   copy after it or, without a pipeline, the first unit. */
static int ft__formula_kept(const ft_zero *z, const ft_zero_use *use, int unit)
{
    int copy = use->tied && z->pp > 1, last = z->n_units - 1;
    if (z->pp_rank < z->pp - 1) return 0;
    return unit == last || (copy && unit == last - 1) || (use->tied && !copy && unit == 0);
}

/* The kept units that are not in first..last, and those that are. */
static size_t ft__formula_window(const ft_zero *z, const ft_zero_use *use, int kept, int first,
                                 int last)
{
    size_t bytes = 0;
    for (int u = 0; u < z->n_units; u++)
        if ((u >= first && u <= last) || (kept && ft__formula_kept(z, use, u)))
            bytes += ft__unit_full_bytes(z, u);
    return bytes;
}

/* [Z3.5] The fullest window of 1 + prefetch units in a row, in one stretch; and the head, with what
   is prefetched for backward. Where micro-batches wait at the head, its units beside all. */
static size_t ft__formula_gather(const ft_zero *z, const ft_zero_use *use)
{
    size_t most = 0;
    int wait = use->forwards_first && use->micro_batches > 1, last = z->n_units - 1, top = last;
    if (!z->shards_weights) return 0;
    if (z->config.keep_gathered) return ft__formula_window(z, use, 0, 0, last);
    for (int u = 0; u <= last; u++) {
        int end = u;
        while (end < last && end - u < z->config.prefetch && !z->units[end].last) end++;
        size_t window = ft__formula_window(z, use, wait, u, end);
        if (window > most) most = window;
    }
    while (top > 0 && ft__formula_kept(z, use, top - 1) && top - 1 > 0) top--;
    int low = top; /* in backward: those before it that read weights, up to a break */
    while (top - low < z->config.prefetch && low > 0 && !z->units[low - 1].last &&
           !(low == 1 && z->pp_rank == 0)) low--;
    size_t head = z->pp_rank == z->pp - 1 ? ft__formula_window(z, use, 1, low, last) : 0;
    return head > most ? head : most;
}

/* Gathers of a unit in a step of stage 3. */
static int64_t ft__formula_gathers(const ft_zero *z, const ft_zero_use *use, int unit)
{
    int64_t M = use->micro_batches, head = use->forwards_first ? 1 : M;
    int embedding = unit == 0 && z->pp_rank == 0, kept = ft__formula_kept(z, use, unit);
    if (z->config.keep_gathered) return 1; /* [Z3.6] */
    if (!kept) return embedding ? M : 2 * M;
    if (!embedding || z->n_units == 1) return head;
    /* Tied: gathered for the embedding, and again for the head, which, kept, serves both later. */
    return use->forwards_first ? 2 : 2 * M;
}

/* [Z2.4] Shards collect while backward goes down the units; on top come the unit at work and, with
   overlap, the one above it. */
static size_t ft__formula_grad(const ft_zero *z, int micro_batches, int tied)
{
    size_t shards = 0, all_shards = 0, fulls = 0, most = 0;
    size_t e = ft_dtype_bytes(ft__zero_full_dtype(z)), es = ft_dtype_bytes(z->accumulate_dtype);
    int above = -1, lowest = -1;
    for (int u = z->n_units - 1; u >= 0; u--) {
        if (!z->units[u].flat[0].elems) continue;
        all_shards += ft_accounted_bytes((size_t)z->units[u].flat[0].shard * es);
        fulls += ft_accounted_bytes((size_t)z->units[u].flat[0].padded * e);
        lowest = u;
    }
    if (!z->shards_grads) return fulls;
    if (micro_batches > 1 && !tied) above = lowest; /* the micro-batch before left its last unit */
    for (int u = z->n_units - 1; u >= 0; u--) {
        const ft__zero_flat *f = &z->units[u].flat[0];
        if (!f->elems) continue;
        shards += ft_accounted_bytes((size_t)f->shard * es);
        size_t now = micro_batches > 1 ? all_shards : shards;
        now += ft_accounted_bytes((size_t)f->padded * e);
        if (z->config.reduce_overlap != FT_OFF && above >= 0 && above != u)
            now += ft_accounted_bytes((size_t)z->units[above].flat[0].padded * e);
        if (tied && u > 0) now += ft_accounted_bytes((size_t)z->units[0].flat[0].padded * e);
        if (now > most) most = now;
        above = u;
    }
    return most;
}

/* The buffers between unlike dtypes, and [Z2.1] between micro-batches. */
static size_t ft__formula_comm(const ft_zero *z, const ft__zero_flat *f, int micro_batches)
{
    size_t e = ft_dtype_bytes(z->reduce_dtype);
    int unlike = z->reduce_dtype != z->accumulate_dtype;
    if (!f->elems || z->dp == 1) return 0;
    if (!z->shards_grads) return unlike ? ft_accounted_bytes((size_t)f->padded * e) : 0;
    return unlike || micro_batches > 1 ? ft_accounted_bytes((size_t)f->shard * e) : 0;
}

FT_API ft_status ft_zero_formula_get(const ft_zero *zero, const ft_zero_use *use,
                                     ft_zero_formula *out)
{
    size_t e = ft_dtype_bytes(zero->config.dtype);
    int stage = zero->config.stage;
    int states = zero->config.optimizer.n_state + (zero->config.dtype == FT_F32 ? 0 : 1);
    int64_t trained = 0, reduced = 0, copies = zero->dp / zero->D, M = use->micro_batches;
    int64_t er = (int64_t)ft_dtype_bytes(zero->reduce_dtype);
    if (!zero->committed) return ft_error(FT_ERR_STATE, "formulas exist after ft_zero_commit");
    memset(out, 0, sizeof *out);
    for (int u = 0; u < zero->n_units; u++) {
        const ft__zero_flat *f = zero->units[u].flat;
        size_t comm = ft__formula_comm(zero, &f[0], use->micro_batches);
        int64_t state = stage == 0 ? f[0].padded : f[0].shard;
        for (int k = 0; k < 2; k++)
            out->param += ft_accounted_bytes((size_t)(zero->shards_weights ? f[k].shard
                                                                           : f[k].padded) * e);
        out->optim += ft_accounted_bytes((size_t)state * 4) * (size_t)states;
        if (comm > out->comm_max) out->comm_max = comm;
        if (stage == 3)
            out->gather_sent += ft__formula_gathers(zero, use, u) * ft__unit_wire(zero, u);
        trained += f[0].shard * (zero->D - 1) * (int64_t)e;
        reduced += f[0].shard * (zero->D - 1) * er;
        out->replica_sent += 2 * f[0].shard * (copies - 1) / copies *
                             (zero->shards_grads ? (int64_t)ft_dtype_bytes(zero->accumulate_dtype)
                                                 : er);
    }
    out->gather_max = ft__formula_gather(zero, use);
    out->grad_max = ft__formula_grad(zero, use->micro_batches, use->tied && zero->pp == 1);
    out->reduce_sent = stage == 0 ? 2 * reduced : stage == 1 ? reduced : M * reduced;
    if (stage == 1 || stage == 2) out->gather_sent = trained;
    return FT_OK;
}

#endif /* FEMTOTRON_ZERO_IMPLEMENTATION_DONE */
#endif
