/* femtotron_pp.h: pipeline parallelism: schedules as data, their simulation, drawing, layers per stage.

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
     A schedule does not adapt: its order is fixed beforehand, whatever the stages turn out to cost. No
     schedule receives ahead of need to hide the wire (an input arrives right before its use, which
     keeps memory lowest), none splits one micro-batch, none keeps two versions of the weights: a step
     ends when all its micro-batches have ended, so the result is that of one rank.

   CONTENTS   >>schedule >>simulate >>draw >>layers, then the implementation:
     >>text.impl >>order.impl >>clock.impl >>rounds.impl >>schedule.impl >>validate.impl
     >>simulate.impl >>draw.impl >>layers.impl

   OPTIONS  (define before the include that has the implementation)
     FEMTOTRON_PP_IMPLEMENTATION   the implementation of this header alone. Default: off;
                   FEMTOTRON_IMPLEMENTATION switches on that of every header.
     FT_MALLOC(n), FT_FREE(p)      host memory, as in femtotron.h. Default malloc and free.
     All else is in ft_pp_config and ft_pp_cost.

   THE IDEA
     The layers are cut in stages, one after another, and a rank holds one. It computes its part of a
     micro-batch (F), sends the activation to the next rank and takes the next micro-batch; later the
     gradient comes back and it runs backward (B). Ranks idle while the first micro-batch has not
     reached them and after the last one has left: the bubble. More micro-batches make it relatively
     smaller, but each keeps its activations from F to B. Schedules are orders of the same work that
     trade bubble, memory and messages.

     The drawings are ft_pp_draw's. A row is a rank, a column a unit of time; 3 is the forward of
     micro-batch 3, [3 ] its backward, which takes two units.

     gpipe (Huang et al. 2019, figure 2c): all forwards, then all backwards.

       0 | 0 1 2 3 . . . . . .[0 ][1 ][2 ][3 ]
       1 | . 0 1 2 3 . . . .[0 ][1 ][2 ][3 ] .
       ...

     1f1b (Narayanan et al. 2019; "PipeDream-flush", Narayanan et al. 2021, section 2.2): a rank runs
     backwards as soon as they can run. The bubble is the same, but no more micro-batches are alive
     than there are stages.

     interleaved (Narayanan et al. 2021): a rank holds V chunks of layers, chunk c of rank p being
     virtual stage c P + p, so that a micro-batch goes round the ring V times. The wait for the first one is
     V times shorter, messages V times more. Letters are chunks: b3 is micro-batch 3 in chunk 1.

     zb-h1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2): backward is cut in two. BI
     (i3) makes the gradient of the stage's input, for which the rank before waits; W (w3) makes those
     of the weights, for which nobody waits, and fills what was bubble.

   License: MIT, see LICENSE. */
