/* memplan.c: what training would take, without a GPU: memory of every rank, traffic, what fits.

   Build:  cc -std=c11 -O2 -I. examples/memplan.c -o build/memplan -lm -lpthread
   Run:    build/memplan --model llama-3-8b --dp 8 --zero-stage 3 --sac selective --seq-len 8192 \
               --micro-batch-size 1
           build/memplan --model llama-3-8b --dp 8 --zero-stage 3 --seq-len 4096 --explain
           build/memplan --model llama-3-70b --sweep --gpus 64 --gpu-mem 80GiB --seq-len 4096 \
               --micro-batch-size 1 --micro-batches 16 --dp 16
   Flags:  the trainer's (build/train_llama --help), and those that --help lists here.

   No formula for memory is in this file: every figure is a run of the trainer's own step on meta.
   Ranks of a pipeline stage are alike, so one of each stage is run.

   License: MIT, see LICENSE. */

#define TRAIN_LLAMA_MAIN train_llama_main /* the trainer, whole */
#include "train_llama.c"

typedef struct request { /* this program's own flags */
    int json, sweep, explain, gpus, node, seconds;
    int64_t gpu_mem;
    double tflops, link_gbs, net_gbs;
} request;

enum { MAX_WORDS = 160 };

typedef struct words { /* the command line that the trainer's parser gets */
    char *word[MAX_WORDS];
    int n;
} words;

static int has_word(const words *w, const char *flag) {
    for (int i = 0; i < w->n; i++)
        if (strcmp(w->word[i], flag) == 0) return 1;
    return 0;
}

/* --------------------------------------------------------------------------------- command line */

static void print_memplan_help(void) {
    puts("usage: memplan [--model NAME|config.json] [trainer's flags] [--json]\n"
         "       memplan ... --explain\n"
         "       memplan ... --sweep --gpus N --gpu-mem BYTES\n\n"
         "Plans a step of training on meta. --device is not needed; train_llama --help has the\n"
         "trainer's flags. A model sets sizes and bf16; flags beside it go before it.\n\n"
         "--model NAME\n      the trainer's; NAME is one of:");
    for (int i = 0; i < PRESETS; i++) printf("      %s\n", presets[i].name);
    puts("--json\n      every rank's peak and tags at that moment, as the trainer's --memory-json\n"
         "--explain\n      what ZeRO-3 saves here, and what its transient block costs, against"
         " ZeRO-2\n"
         "--sweep\n      meshes of --gpus ranks, stages and policies that fit --gpu-mem, cheapest "
         "first\n      by a cost model that is printed; the batch is that of the command line\n"
         "--gpus N\n      ranks of --sweep (default: dp x tp x pp)\n"
         "--gpu-mem BYTES\n      memory of each (default 80GiB)\n"
         "--gpu-tflops X\n      what a GPU achieves (default 400)\n"
         "--link-gbs X, --net-gbs X\n      GB/s a GPU sends within a node, and between nodes "
         "(default 300, 40)\n"
         "--node N\n      GPUs of a node (default 8)\n"
         "--seconds N\n      when --sweep stops (default 120)");
}

/* Own flags go to `ask`, all others to `w`. */
static int split_flags(int argc, char **argv, request *ask, words *w) {
    static char limit[] = "--gpu-mem", dtype[] = "--dtype", bf16[] = "bf16";
    option bytes, number, real;
    memset(ask, 0, sizeof *ask);
    memset(w, 0, sizeof *w);
    memset(&bytes, 0, sizeof bytes);
    bytes.name = limit;
    number = bytes;
    number.low = 1;
    number.high = 4096;
    real = bytes;
    real.high = 1000000;
    ask->gpu_mem = (int64_t)80 << 30;
    ask->node = 8;
    ask->seconds = 120;
    ask->tflops = 400;
    ask->link_gbs = 300;
    ask->net_gbs = 40;
    w->word[w->n++] = argv[0];
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        int64_t n;
        int ok = 1, took = 1;
        number.name = real.name = flag;
        if (strcmp(flag, "--gpu-mem") == 0)
            ok = parse_bytes(&bytes, value, value, "memory", &ask->gpu_mem);
        else if (strcmp(flag, "--gpus") == 0 || strcmp(flag, "--node") == 0 ||
                 strcmp(flag, "--seconds") == 0) {
            ok = parse_int(&number, value, &n);
            if (ok) *(flag[2] == 'g' ? &ask->gpus : flag[2] == 'n' ? &ask->node : &ask->seconds) =
                (int)n;
        } else if (strcmp(flag, "--gpu-tflops") == 0) ok = parse_real(&real, value, &ask->tflops);
        else if (strcmp(flag, "--link-gbs") == 0) ok = parse_real(&real, value, &ask->link_gbs);
        else if (strcmp(flag, "--net-gbs") == 0) ok = parse_real(&real, value, &ask->net_gbs);
        else {
            took = 0;
            if (strcmp(flag, "--json") == 0) ask->json = 1;
            else if (strcmp(flag, "--sweep") == 0) ask->sweep = 1;
            else if (strcmp(flag, "--explain") == 0) ask->explain = 1;
            else if (w->n < MAX_WORDS - 40) w->word[w->n++] = argv[i];
            else return bad("%d words are too many", argc);
        }
        if (!ok) return 0;
        i += took;
    }
    if (ask->tflops <= 0 || ask->link_gbs <= 0 || ask->net_gbs <= 0)
        return bad("--gpu-tflops, --link-gbs and --net-gbs must be positive");
    if (has_word(w, "--model") && !has_word(w, "--dtype")) { /* a model is planned in bf16 */
        w->word[w->n++] = dtype;
        w->word[w->n++] = bf16;
    }
    return 1;
}

/* ----------------------------------------------------------------------------------------- plan */

static void print_stage_traffic(const program *p) {
    static const char *const names[SENDERS] = {"ZeRO", "tensor parallel", "pipeline", "other"};
    int64_t *values = (int64_t *)malloc((size_t)p->set.pp * SENDERS * sizeof *values);
    int each = rank_count(&p->set) / (int)p->set.pp;
    if (!values) return;
    for (int s = 0; s < (int)p->set.pp; s++)
        for (int k = 0; k < SENDERS; k++)
            values[s * SENDERS + k] = p->plan[s * each].sent_by[k];
    print_ranks((int)p->set.pp, SENDERS, names, values);
    free(values);
}

/* Where each stage's peak is. */
static void print_moments(const program *p) {
    int each = rank_count(&p->set) / (int)p->set.pp;
    for (int s = 0; s < (int)p->set.pp; s++) {
        const ft_mem_stats *m = &p->plan[s * each].memory;
        printf("  ranks %d-%d: %s%s%s\n", s * each, (s + 1) * each - 1, m->peak_action,
               m->peak_action[0] ? ": " : "", m->peak_where);
    }
}

/* One rank of each stage is run; the others of the stage have its figures. */
static ft_status plan_all_ranks(program *p, trial *t) {
    int each = rank_count(&p->set) / (int)p->set.pp;
    FT_TRY(plan_stages(p, t));
    for (int r = 0; r < rank_count(&p->set); r++) p->plan[r] = p->plan[r / each * each];
    return FT_OK;
}

static ft_status print_plan(program *p, const request *ask) {
    trial t;
    ft_io_json *json;
    char text[32], sum[32];
    double begin = now_s();
    memset(&t, 0, sizeof t);
    FT_TRY(open_inputs(p));
    if (!ask->json) print_settings(p);
    if (!ask->json && p->set.verbose) FT_TRY(print_layout(p));
    FT_TRY(plan_all_ranks(p, &t));
    if (ask->json) {
        FT_TRY(ft_io_json_create(stdout, "standard output", &json));
        write_memory_json(json, rank_count(&p->set), p->plan);
        return ft_io_json_finish(json);
    }
    printf("\nbytes of each rank at its peak (one step on meta, a rank of each stage, %.2f s)\n",
           now_s() - begin);
    FT_TRY(print_memory(rank_count(&p->set), p->plan));
    puts("\nwhere each peak is: action, op, unit");
    print_moments(p);
    puts("\nbytes sent by each rank of a pipeline stage in a step");
    print_stage_traffic(p);
    printf("\n%.4g flops a step on the busiest rank, %.1f%% of them recomputed\n", t.flops,
           100 * t.replay / t.flops);
    if (p->set.memory_limit) return check_fit(p);
    printf("%s weights on %d rank%s; the fullest needs %s bytes\n",
           thousands(ft_llama_param_total(&p->model), text), rank_count(&p->set),
           s_of(rank_count(&p->set)), thousands((int64_t)t.peak_bytes, sum));
    return FT_OK;
}

/* -------------------------------------------------------------------------------------- explain */

typedef struct explained { trial t; ft_mem_stats fullest; } explained;

static ft_status explain_stage(const settings *set, int stage, explained *out) {
    program p;
    ft_status status;
    int each;
    memset(&p, 0, sizeof p);
    memset(out, 0, sizeof *out);
    p.set = *set;
    p.set.zero_stage = stage;
    each = rank_count(&p.set) / (int)p.set.pp;
    status = open_inputs(&p);
    if (status == FT_OK) status = plan_stages(&p, &out->t);
    for (int s = 0; status == FT_OK && s < (int)p.set.pp; s++)
        if (p.plan[s * each].memory.peak_bytes > out->fullest.peak_bytes)
            out->fullest = p.plan[s * each].memory;
    free_program(&p);
    return status;
}

static void explain_line(const char *what, int64_t bytes) {
    char text[32];
    printf("  %-58s %18s\n", what, thousands(bytes, text));
}

static ft_status explain(const settings *set) {
    explained two, three;
    int64_t saved, gathered, rest, peak;
    if (set->dp == 1)
        return ft_error(FT_ERR_ARG, "--explain compares ZeRO-3 with ZeRO-2: it needs --dp 2 or "
                        "more");
    FT_TRY(explain_stage(set, 2, &two));
    FT_TRY(explain_stage(set, 3, &three));
    saved = (int64_t)two.fullest.at_peak[FT_TAG_PARAM] -
            (int64_t)three.fullest.at_peak[FT_TAG_PARAM];
    gathered = (int64_t)three.fullest.at_peak[FT_TAG_GATHER];
    peak = (int64_t)three.fullest.peak_bytes - (int64_t)two.fullest.peak_bytes;
    rest = peak + saved - gathered;
    printf("\nZeRO-3 beside ZeRO-2, dp %lld, bytes of the fullest rank (two runs on meta)\n",
           (long long)set->dp);
    explain_line("peak of ZeRO-2", (int64_t)two.fullest.peak_bytes);
    explain_line("sharding the weights saves", -saved);
    explain_line("the transient block, gathered weights at the peak, costs", gathered);
    explain_line("all else (the peak is at another moment)", rest);
    explain_line("peak of ZeRO-3", (int64_t)three.fullest.peak_bytes);
    printf("  ZeRO-2 peaks in %s: %s\n", two.fullest.peak_action, two.fullest.peak_where);
    printf("  ZeRO-3 peaks in %s: %s\n", three.fullest.peak_action, three.fullest.peak_where);
    explain_line("most that is gathered at any time",
                 (int64_t)three.fullest.highest[FT_TAG_GATHER]);
    explain_line("sent more in a step", three.t.sent - two.t.sent);
    if (peak < 0)
        puts("  ZeRO-3 needs less: what it saves is more than the block it has for a moment.");
    else
        puts("  ZeRO-3 needs no less here: with more layers what it saves grows, the block does "
             "not.");
    return FT_OK;
}

/* ---------------------------------------------------------------------------------------- sweep */

typedef struct option_found { trial t; double seconds; } option_found;

/* Seconds of a step; what is printed above the list says how. */
static ft_status step_seconds(const request *ask, const trial *t, double *seconds) {
    const settings *set = &t->set;
    ft_pp_config config = pipeline_config(set);
    ft_pp_schedule *schedule;
    ft_pp_simulation *simulation;
    ft_status status;
    double zero_gbs = set->dp * set->tp <= ask->node ? ask->link_gbs : ask->net_gbs;
    double tp_gbs = set->tp <= ask->node ? ask->link_gbs : ask->net_gbs;
    double pp_gbs = rank_count(set) <= ask->node ? ask->link_gbs : ask->net_gbs;
    double compute = t->flops / (ask->tflops * 1e12);
    double work = compute + (double)t->sent_by[SENT_TP] / (tp_gbs * 1e9);
    double zero = (double)t->sent_by[SENT_ZERO] / (zero_gbs * 1e9);
    FT_TRY(ft_pp_schedule_create(&config, &schedule));
    status = ft_pp_simulate(schedule, NULL, &simulation);
    ft_pp_schedule_free(schedule);
    FT_TRY(status);
    if (zero > work) work = zero;
    work += (double)t->sent_by[SENT_PP] / (pp_gbs * 1e9);
    *seconds = work / (1 - simulation->bubble);
    ft_pp_simulation_free(simulation);
    return FT_OK;
}

static int found_cmp(const void *a, const void *b) {
    const option_found *x = (const option_found *)a, *y = (const option_found *)b;
    if (x->seconds != y->seconds) return x->seconds < y->seconds ? -1 : 1;
    return x->t.peak_bytes < y->t.peak_bytes ? -1 : x->t.peak_bytes > y->t.peak_bytes;
}

typedef struct sweep {
    const request *ask;
    option_found *found;
    int n, most, planned, cut_short;
    double until;
} sweep;

/* Fewer micro-batches never need more memory: what does not fit with one for each stage is not
   planned in full. *possible 0: the model cannot be cut so. */
static ft_status sweep_trial(sweep *s, trial *t, int *possible) {
    trial few = *t;
    if (t->set.micro_batches > t->set.pp) few.set.micro_batches = t->set.pp;
    *possible = plan_trial(&few) == FT_OK;
    s->planned++;
    if (!*possible || few.peak_bytes > (size_t)s->ask->gpu_mem) return FT_OK;
    FT_TRY(plan_trial(t));
    t->fits = t->peak_bytes <= (size_t)s->ask->gpu_mem;
    return FT_OK;
}

/* The stages and policies of a mesh: a policy that recomputes more is of no use once one fits, nor
   is a higher stage once one fits without recomputation. */
static ft_status sweep_mesh(sweep *s, const settings *set) {
    for (int64_t stage = 0; stage <= (set->dp > 1 ? 3 : 0); stage++)
        for (int64_t sac = FT_SAC_NONE; sac <= FT_SAC_FULL; sac++) {
            option_found o;
            int possible;
            memset(&o, 0, sizeof o);
            o.t.set = *set;
            o.t.set.zero_stage = stage;
            o.t.set.sac = sac;
            if (s->n == s->most || now_s() > s->until) s->cut_short = 1;
            if (s->cut_short) return FT_OK;
            FT_TRY(sweep_trial(s, &o.t, &possible));
            if (!possible) return FT_OK;
            if (!o.t.fits) continue;
            FT_TRY(step_seconds(s->ask, &o.t, &o.seconds));
            s->found[s->n++] = o;
            if (sac == FT_SAC_NONE) return FT_OK;
            break;
        }
    return FT_OK;
}

static ft_status sweep_meshes(sweep *s, const settings *base) {
    int64_t sequences = base->dp * base->micro_batch_size * base->micro_batches;
    int64_t gpus = s->ask->gpus ? s->ask->gpus : rank_count(base);
    for (int64_t tp = 1; tp <= gpus && tp <= s->ask->node; tp *= 2)
        for (int64_t pp = 1; tp * pp <= gpus && pp <= base->layers; pp *= 2)
            for (int64_t b = 8; b >= 1; b /= 2) {
                settings set = *base;
                int before = s->n;
                set.tp = tp;
                set.pp = pp;
                set.dp = gpus / (tp * pp);
                if (set.dp * tp * pp != gpus || set.dp > 1024 || sequences % (set.dp * b)) continue;
                set.micro_batch_size = b;
                set.micro_batches = sequences / (set.dp * b);
                set.sequence_parallel = tp > 1 && set.seq_len % tp == 0;
                if (pp == 1) set.schedule = FT_PP_1F1B;
                FT_TRY(sweep_mesh(s, &set));
                /* Without a bubble smaller micro-batches only send more. */
                if (pp == 1 && s->n > before && s->found[s->n - 1].t.set.sac == FT_SAC_NONE) break;
            }
    return FT_OK;
}

static void print_sweep(const sweep *s, const settings *base) {
    static const char *const policy[] = {"none", "selective", "full"};
    char text[32];
    const request *ask = s->ask;
    printf("\n%lld sequences of %lld tokens a step, %d GPUs of %.1f GiB: %d layouts tried, %d fit\n"
           "cost of a step: (max(flops / %.0f TFLOP/s + tp bytes / %.0f GB/s, ZeRO bytes / L) + pp "
           "bytes / L) / (1 - bubble);\n"
           "L %.0f GB/s within a node of %d, %.0f between nodes; flops and bytes of the busiest "
           "rank\n\n",
           (long long)(base->dp * base->micro_batch_size * base->micro_batches),
           (long long)base->seq_len, ask->gpus ? ask->gpus : rank_count(base),
           (double)ask->gpu_mem / (double)(1 << 30), s->planned, s->n, ask->tflops, ask->link_gbs,
           ask->link_gbs, ask->node, ask->net_gbs);
    printf("  %9s  %4s %4s %4s  %5s  %-9s  %11s  %9s  %17s\n", "s/step", "dp", "tp", "pp", "stage",
           "recompute", "micro-batch", "peak GiB", "sent");
    for (int i = 0; i < s->n && i < 20; i++) {
        const trial *t = &s->found[i].t;
        printf("  %9.3f  %4lld %4lld %4lld  %5lld  %-9s  %4lld x %-4lld  %9.2f  %17s\n",
               s->found[i].seconds, (long long)t->set.dp, (long long)t->set.tp,
               (long long)t->set.pp, (long long)t->set.zero_stage, policy[t->set.sac],
               (long long)t->set.micro_batch_size, (long long)t->set.micro_batches,
               (double)t->peak_bytes / (double)(1 << 30), thousands(t->sent, text));
    }
    if (s->n > 20) printf("  ... and %d more\n", s->n - 20);
    if (s->cut_short)
        printf("  not all was tried: stopped after %d s (--seconds)\n", s->ask->seconds);
}

static ft_status run_sweep(const settings *base, const request *ask) {
    sweep s;
    ft_status status;
    memset(&s, 0, sizeof s);
    s.ask = ask;
    s.most = 1024;
    s.until = now_s() + ask->seconds;
    s.found = (option_found *)calloc((size_t)s.most, sizeof *s.found);
    if (!s.found) return ft_error(FT_ERR_OOM, "no memory for a sweep");
    status = sweep_meshes(&s, base);
    if (status == FT_OK && s.n) {
        qsort(s.found, (size_t)s.n, sizeof *s.found, found_cmp);
        print_sweep(&s, base);
    } else if (status == FT_OK) {
        status = ft_error(FT_ERR_OOM, "none of %d layouts fits", s.planned);
    }
    free(s.found);
    return status;
}

/* ----------------------------------------------------------------------------------------- main */

#ifndef MEMPLAN_MAIN
#define MEMPLAN_MAIN main
#endif

int MEMPLAN_MAIN(int argc, char **argv) {
    static words w;
    request ask;
    program p;
    ft_status status;
    memset(&p, 0, sizeof p);
    if (!split_flags(argc, argv, &ask, &w)) return EXIT_USAGE;
    if (has_word(&w, "--help")) {
        print_memplan_help();
        return output_written() ? EXIT_SUCCESS : EXIT_FAILURE;
    }
    if (!parse_options(w.n, w.word, &p.set)) {
        free_settings(&p.set);
        return EXIT_USAGE;
    }
    p.set.device = FT_META;
    if (p.set.print_config) {
        print_config(&p.set);
        free_settings(&p.set);
        return output_written() ? EXIT_SUCCESS : EXIT_FAILURE;
    }
    p.set.data.n = p.set.eval_data.n = 0;
    if (ask.sweep) status = run_sweep(&p.set, &ask);
    else if (ask.explain) status = explain(&p.set);
    else status = print_plan(&p, &ask);
    if (ask.sweep || ask.explain) {
        if (status != FT_OK) fprintf(stderr, "error: %s\n", ft_last_error());
        free_program(&p);
    } else {
        status = close_program(&p, status);
    }
    free_settings(&p.set);
    return status == FT_OK && output_written() ? EXIT_SUCCESS : EXIT_FAILURE;
}
