/* memory_tables.c: peak memory of ZeRO-0 to 3, with and without recomputation, in 48 cells, beside
   the figures of a measurement log and a floor.

   Build:  cc -std=c11 -O2 -I. examples/memory_tables.c -o build/memory_tables -lm -lpthread
   Run:    build/memory_tables                     three tables, planned on meta in a second
           build/memory_tables --csv               the first table's cells, one a line
           build/memory_tables --device cpu --cells 1-16    plan, then run: to the byte?
   GPUs:   built as the trainer is (make build/memory_tables_cuda), --device cuda runs a cell's 8
           ranks on one GPU, on several (--gpus N), or each on its own as processes over NCCL:
           torchrun --no-python --nproc-per-node 8 build/memory_tables_cuda --device cuda

   No formula for memory is in this file: a cell is a command line of the trainer, whose own step
   runs on meta (or on the CPU). An op that saved one more tensor would change the tables unaided.

   THE LOG    Peak MiB of a rank that a PyTorch program of another author measured on GPUs: bf16
              weights and gradients, fp32 master and moments, AdamW. "+ AC": activation
              checkpointing, here --sac full.
   THE FLOOR  The larger of two lower bounds, counting only bytes that must be live at once. At the
              optimizer step: weights, gradients, master and moments as the stage shards them, and
              one unit's gradients in stages 2 and 3 (one gathered unit too in stage 3). At the
              start of backward: weights, master and moments, the activations of all micro-batches
              in flight, the logits, one unit's gradients. A unit is a layer.
   OURS       The fullest rank, tag `workspace` apart: that is scratch of the backend's kernels.

   License: MIT, see LICENSE. */

#define TRAIN_LLAMA_MAIN train_llama_main /* the trainer, whole */
#include "train_llama.c"

typedef struct cell {
    int table, layers, seq, stage, full; /* full: the log's AC */
    int log_mib, floor_mib;
} cell;

/* What both are measured against: the log's peak and the floor. */
static const cell cells[] = {
    {1, 8, 16, 0, 0, 1653, 1120},    {1, 8, 16, 0, 1, 1653, 1120},
    {1, 8, 16, 1, 0, 460, 385},      {1, 8, 16, 1, 1, 460, 385},
    {1, 8, 16, 2, 0, 443, 287},      {1, 8, 16, 2, 1, 443, 280},
    {1, 8, 16, 3, 0, 384, 182},      {1, 8, 16, 3, 1, 261, 174},
    {1, 8, 32, 0, 0, 1653, 1120},    {1, 8, 32, 0, 1, 1653, 1120},
    {1, 8, 32, 1, 0, 471, 385},      {1, 8, 32, 1, 1, 460, 385},
    {1, 8, 32, 2, 0, 444, 313},      {1, 8, 32, 2, 1, 444, 280},
    {1, 8, 32, 3, 0, 419, 207},      {1, 8, 32, 3, 1, 261, 174},
    {1, 8, 1024, 0, 0, 3631, 2613},  {1, 8, 1024, 0, 1, 1669, 1341},
    {1, 8, 1024, 1, 0, 2913, 1878},  {1, 8, 1024, 1, 1, 901, 606},
    {1, 8, 1024, 2, 0, 2776, 1878},  {1, 8, 1024, 2, 1, 765, 606},
    {1, 8, 1024, 3, 0, 2840, 1773},  {1, 8, 1024, 3, 1, 711, 501},
    {2, 8, 32, 0, 0, 3601, 2496},    {2, 8, 32, 0, 1, 3601, 2496},
    {2, 8, 32, 1, 0, 2136, 1560},    {2, 8, 32, 1, 1, 2136, 1560},
    {2, 8, 32, 2, 0, 2044, 1462},    {2, 8, 32, 2, 1, 2044, 1462},
    {2, 8, 32, 3, 0, 2233, 1364},    {2, 8, 32, 3, 1, 2216, 1364},
    {2, 32, 32, 0, 0, 12558, 8065},  {2, 32, 32, 0, 1, 11954, 8065},
    {2, 32, 32, 1, 0, 9534, 5041},   {2, 32, 32, 1, 1, 6993, 5041},
    {2, 32, 32, 2, 0, 9030, 4595},   {2, 32, 32, 2, 1, 6569, 4595},
    {2, 32, 32, 3, 0, 10808, 4149},  {2, 32, 32, 3, 1, 6417, 4149},
    {2, 64, 32, 0, 0, 24404, 15490}, {2, 64, 32, 0, 1, 23091, 15490},
    {2, 64, 32, 1, 0, 18595, 9681},  {2, 64, 32, 1, 1, 13490, 9681},
    {2, 64, 32, 2, 0, 17627, 8771},  {2, 64, 32, 2, 1, 12602, 8771},
    {2, 64, 32, 3, 0, 20829, 7861},  {2, 64, 32, 3, 1, 12018, 7861},
};

enum { CELLS = (int)(sizeof cells / sizeof cells[0]) };

typedef enum variant { LEANEST = 0, DEFAULTS, SELECTIVE, VARIANTS } variant;

static const char *const variant_title[VARIANTS] = {
    "prefetch 1, reduce-overlap 0",
    "default settings (prefetch 1, reduce-overlap 1)",
    "selective recomputation where the log had no AC (prefetch 1, reduce-overlap 0)"
};

/* The cells of a table differ in layers, seq, stage and recomputation alone. */
static const char *table_flags(int table) {
    return table == 1 ? "--dp 8 --hidden 1024 --intermediate 2048 --heads 16 --kv-heads 4 "
                        "--vocab 1024 --micro-batch-size 8 --dtype bf16 --prefetch 1"
                      : "--dp 2 --tp 2 --pp 2 --hidden 2048 --intermediate 8192 --heads 32 "
                        "--kv-heads 8 --vocab 40960 --micro-batch-size 2 --micro-batches 4 "
                        "--dtype bf16 --prefetch 1";
}

enum { MAX_WORDS = 64, LINE_BYTES = 512 };

/* The trainer's command line for a cell, cut into words in `line`. */
static int cell_words(const cell *c, variant how, char *line, char **words) {
    char rest[160];
    int n = 0;
    snprintf(rest, sizeof rest, " --layers %d --seq-len %d --zero-stage %d --sac %s%s", c->layers,
             c->seq, c->stage, c->full ? "full" : how == SELECTIVE ? "selective" : "none",
             how == DEFAULTS ? "" : " --reduce-overlap 0");
    snprintf(line, LINE_BYTES, "train_llama %s%s", table_flags(c->table), rest);
    for (char *at = line; *at && n < MAX_WORDS - 2;) {
        words[n++] = at;
        while (*at && *at != ' ') at++;
        if (*at) *at++ = '\0';
    }
    return n;
}

typedef struct place { /* where a cell runs */
    ft_device device;
    int gpus, transport; /* of threads; 0 gpus: processes with a GPU each */
} place;

typedef struct outcome { /* of a cell */
    ft_mem_stats fullest;  /* of the rank with the highest tensor_peak_bytes */
    size_t sum_bytes, most_bytes; /* peaks of all ranks, the highest of one */
    double seconds;
    int64_t difference;    /* the largest between plan and run, of any rank's peaks; -1: not run */
} outcome;

static double cell_mib(const outcome *o) { return mib(o->fullest.tensor_peak_bytes); }

static void keep_fullest(const rank_result *ranks, int n, outcome *out) {
    out->sum_bytes = out->most_bytes = 0;
    for (int r = 0; r < n; r++) {
        const ft_mem_stats *m = &ranks[r].memory;
        if (r == 0 || m->tensor_peak_bytes > out->fullest.tensor_peak_bytes) out->fullest = *m;
        out->sum_bytes += m->peak_bytes;
        if (m->peak_bytes > out->most_bytes) out->most_bytes = m->peak_bytes;
    }
}

static int64_t apart(size_t a, size_t b) { return a > b ? (int64_t)(a - b) : (int64_t)(b - a); }

static int64_t largest_difference(const rank_result *plan, const rank_result *run, int n) {
    int64_t most = 0;
    for (int r = 0; r < n; r++) {
        const ft_mem_stats *a = &plan[r].memory, *b = &run[r].memory;
        int64_t d = apart(a->peak_bytes, b->peak_bytes), e;
        e = apart(a->tensor_peak_bytes, b->tensor_peak_bytes);
        if (e > d) d = e;
        for (int t = 0; t < FT_TAG_COUNT; t++) {
            e = apart(a->at_peak[t], b->at_peak[t]);
            if (e > d) d = e;
        }
        if (d > most) most = d;
    }
    return most;
}

/* Bytes that the machine can still give: of its memory, and of the limit of this container. */
static double machine_bytes(void) {
    double most = (double)sysconf(_SC_PAGESIZE), limit, used;
    char line[128];
    long long kib;
    FILE *f = fopen("/proc/meminfo", "r");
    most *= (double)sysconf(_SC_PHYS_PAGES);
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %lld", &kib) == 1) most = 1024.0 * (double)kib;
    if (f) fclose(f);
    limit = used = -1;
    f = fopen("/sys/fs/cgroup/memory.max", "r");
    if (f && fscanf(f, "%lf", &limit) != 1) limit = -1;
    if (f) fclose(f);
    f = fopen("/sys/fs/cgroup/memory.current", "r");
    if (f && fscanf(f, "%lf", &used) != 1) used = -1;
    if (f) fclose(f);
    return limit > 0 && used >= 0 && limit - used < most ? limit - used : most;
}

/* Whether the ranks fit where they run. Processes, of which each sees its own GPU, must all decide
   alike: by its size, less what CUDA and the libraries take. */
static ft_status fits(const place *at, int ranks, const outcome *planned, int *yes) {
    const double libraries = 3e9;
    size_t free_bytes, total_bytes;
    double need = (double)planned->most_bytes, have;
    if (at->device == FT_CPU || at->gpus == 1) need = (double)planned->sum_bytes;
    else if (at->gpus) need *= (ranks + at->gpus - 1) / at->gpus;
    if (at->device == FT_CPU) {
        have = machine_bytes() / 1.05;
    } else if (at->gpus) {
        FT_TRY(gpu_least_free(at->gpus, &free_bytes));
        have = (double)free_bytes;
    } else {
        FT_TRY(ft_gpu_memory(0, &free_bytes, &total_bytes));
        have = (double)total_bytes - libraries;
    }
    *yes = need <= have;
    return FT_OK;
}

/* One step of the trainer for a cell: on meta, then on the device that is asked for, if it fits
   there. On a GPU the ranks have an arena each: 8 of them shall fill it to the brim. */
static ft_status run_program_of(program *p, const place *at, outcome *out) {
    double begin = now_s();
    int ranks = rank_count(&p->set), gpu = at->device == FT_GPU, yes;
    p->set.device = at->device;
    if (gpu) p->set.gpus = at->gpus;
    p->set.transport = at->transport;
    if (gpu) p->set.allocator = FT_ALLOC_ARENA;
    FT_TRY(open_inputs(p));
    if (gpu) FT_TRY(ft_mem_plan_create(ranks, &p->mem_plan));
    job plan = job_create(p);
    FT_TRY(choose_recompute(p, &plan));
    FT_TRY(launch(&plan, FT_META));
    keep_fullest(p->plan, ranks, out);
    if (p->mem_plan) FT_TRY(ft_mem_plan_place(p->mem_plan));
    out->seconds = now_s() - begin;
    out->difference = -1;
    if (at->device == FT_META) return FT_OK;
    FT_TRY(fits(at, ranks, out, &yes));
    if (!yes) return FT_OK;
    job work = job_create(p);
    work.sampler = &p->sampler;
    work.results = p->run;
    work.quiet = 1;
    begin = now_s();
    FT_TRY(launch(&work, at->device));
    out->seconds = now_s() - begin;
    out->difference = largest_difference(p->plan, p->run, ranks);
    keep_fullest(p->run, ranks, out);
    return FT_OK;
}

static ft_status run_cell(const cell *c, variant how, const place *at, char *data, outcome *out) {
    char line[LINE_BYTES], *words[MAX_WORDS], flag[] = "--data";
    int n = cell_words(c, how, line, words);
    program p;
    memset(&p, 0, sizeof p);
    memset(out, 0, sizeof *out);
    if (data) {
        words[n++] = flag;
        words[n++] = data;
    }
    if (!parse_options(n, words, &p.set)) return ft_error(FT_ERR_ARG, "a cell's flags are wrong");
    return close_program(&p, run_program_of(&p, at, out));
}

static const char *cell_name(const cell *c) {
    static const char *const names[4][2] = {{"ZeRO-0", "ZeRO-0 + AC"}, {"ZeRO-1", "ZeRO-1 + AC"},
                                            {"ZeRO-2", "ZeRO-2 + AC"}, {"ZeRO-3", "ZeRO-3 + AC"}};
    return names[c->stage][c->full];
}

typedef struct request { /* the command line of this program */
    place at;
    int csv, first, last; /* cells, from 0 */
    char *data;           /* a file of random bytes for the CPU */
} request;

static void print_head(const cell *c) {
    if (c->table == 1)
        printf("\n  dp 8: hidden 1024, feed-forward 2048, 16 heads (4 kv), vocabulary 1024, "
               "%d layers, seq %d, batch 8\n", c->layers, c->seq);
    else
        printf("\n  dp 2 x tp 2 x pp 2: hidden 2048, feed-forward 8192, 32 heads (8 kv), "
               "vocabulary 40960, %d layers,\n  seq %d, batch 8 in 4 micro-batches, 1F1B\n",
               c->layers, c->seq);
    printf("  %-12s %8s %8s %9s %9s %11s %10s  %s\n", "", "log", "floor", "ours", "ours/log",
           "ours/floor", "workspace", "ours is reached in");
}

typedef struct tally { int n, below, within, skipped; double logs; int64_t difference; } tally;

static void print_cell(const cell *c, const outcome *o, ft_device device, tally *t) {
    double ours = cell_mib(o);
    if (device != FT_META && o->difference < 0) {
        printf("  %-12s %8d %8d  does not fit\n", cell_name(c), c->log_mib, c->floor_mib);
        t->skipped++;
        return;
    }
    printf("  %-12s %8d %8d %9.1f %9.2f %11.2f %10.1f  %s", cell_name(c), c->log_mib, c->floor_mib,
           ours, ours / c->log_mib, ours / c->floor_mib,
           mib(o->fullest.highest[FT_TAG_WORKSPACE]), o->fullest.tensor_peak_where);
    if (o->difference >= 0) printf(" | plan - run %lld", (long long)o->difference);
    putchar('\n');
    fflush(stdout);
    t->n++;
    t->below += ours < c->log_mib;
    t->within += ours <= 1.10 * c->floor_mib + 8;
    t->logs += log(ours / c->log_mib);
    if (o->difference > t->difference) t->difference = o->difference;
}

static ft_status print_table(const request *ask, variant how) {
    tally t;
    memset(&t, 0, sizeof t);
    printf("%s%s: MiB of the fullest rank\n", how ? "\n" : "", variant_title[how]);
    for (int i = ask->first; i <= ask->last; i++) {
        const cell *c = &cells[i], *before = c - 1;
        outcome o;
        if (i == ask->first || c->table != before->table || c->layers != before->layers ||
            c->seq != before->seq)
            print_head(c);
        if (how == SELECTIVE && c->full) continue;
        FT_TRY(run_cell(c, how, &ask->at, ask->data, &o));
        print_cell(c, &o, ask->at.device, &t);
    }
    if (!t.n) return FT_OK;
    printf("\n  below the log: %d of %d; at most 1.10 floor + 8: %d of %d; geometric mean of "
           "ours/log: %.3f\n", t.below, t.n, t.within, t.n, exp(t.logs / t.n));
    if (ask->at.device != FT_META)
        printf("  largest difference between plan and run: %lld bytes; %d cells do not fit\n",
               (long long)t.difference, t.skipped);
    return FT_OK;
}

static ft_status print_csv(const request *ask) {
    int64_t most = -1;
    puts("table,config,dp,tp,pp,layers,hidden,intermediate,heads,kv_heads,vocab,seq,"
         "batch_per_dp_rank,micro_batches,zero_stage,recompute,published_mib,floor_mib,peak_mib,"
         "workspace_mib");
    for (int i = ask->first; i <= ask->last; i++) {
        const cell *c = &cells[i];
        outcome o;
        FT_TRY(run_cell(c, LEANEST, &ask->at, ask->data, &o));
        printf("%d,%s,%s,%d,%s,%d,8,%d,%d,%s,%d,%d,", c->table, cell_name(c),
               c->table == 1 ? "8,1,1" : "2,2,2", c->layers,
               c->table == 1 ? "1024,2048,16,4,1024" : "2048,8192,32,8,40960", c->seq,
               c->table == 1 ? 1 : 4, c->stage, c->full ? "full" : "none", c->log_mib,
               c->floor_mib);
        if (ask->at.device != FT_META && o.difference < 0) puts("does not fit,");
        else printf("%.1f,%.1f\n", cell_mib(&o), mib(o.fullest.highest[FT_TAG_WORKSPACE]));
        fflush(stdout);
        if (o.difference > most) most = o.difference;
    }
    if (most >= 0 && ft_env_rank() <= 0)
        fprintf(stderr, "largest difference between plan and run: %lld bytes\n", (long long)most);
    return most <= 0 ? FT_OK : ft_error(FT_ERR_DATA, "a run is not as planned");
}

/* Training needs tokens; memory does not depend on which. */
static ft_status make_data(request *ask, char *path) {
    unsigned char bytes[4096];
    uint64_t state = 1;
    int file = mkstemp(path), wrong;
    if (file < 0) return ft_error(FT_ERR_IO, "%s: %s", path, strerror(errno));
    ask->data = path;
    for (int block = 0; block < 32; block++) {
        for (int i = 0; i < (int)sizeof bytes; i++)
            bytes[i] = (unsigned char)(256.0 * uniform(&state));
        wrong = write(file, bytes, sizeof bytes) != (ssize_t)sizeof bytes;
        if (wrong) break;
    }
    if (close(file) != 0) wrong = 1;
    return wrong ? ft_error(FT_ERR_IO, "%s: %s", path, strerror(errno)) : FT_OK;
}

static int parse_request(int argc, char **argv, request *ask) {
    int given = 0; /* --gpus or --transport */
    memset(ask, 0, sizeof *ask);
    ask->at.device = FT_META;
    if (ft_env_rank() < 0) ask->at.gpus = 1;
    ask->last = CELLS - 1;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--csv") == 0) {
            ask->csv = 1;
        } else if (strcmp(argv[i], "--device") == 0) {
            int device = word_index("cpu|meta|cuda", value); /* as ft_device has them */
            if (device < 0) return bad("--device %s: must be one of meta|cpu|cuda", value);
            ask->at.device = (ft_device)device;
            i++;
        } else if (strcmp(argv[i], "--cells") == 0) {
            int n = sscanf(value, "%d-%d", &ask->first, &ask->last);
            if (n == 1) ask->last = ask->first;
            if (n < 1 || ask->first < 1 || ask->last < ask->first || ask->last > CELLS)
                return bad("--cells %s: must be FIRST-LAST within 1-%d", value, CELLS);
            ask->first--;
            ask->last--;
            i++;
        } else if (strcmp(argv[i], "--gpus") == 0) {
            char *end;
            long n = strtol(value, &end, 10);
            if (n < 1 || n > 8 || *end) return bad("--gpus %s: must be 1 to 8", value);
            ask->at.gpus = (int)n;
            given = 1;
            i++;
        } else if (strcmp(argv[i], "--transport") == 0) {
            ask->at.transport = word_index("local|nccl", value); /* as ft_transport has them */
            if (ask->at.transport < 0) return bad("--transport %s: must be local or nccl", value);
            given = 1;
            i++;
        } else if (strcmp(argv[i], "--help") == 0) {
            printf(
                "usage: memory_tables [--device meta|cpu|cuda] [--csv] [--cells FIRST-LAST]\n"
                "                     [--gpus N] [--transport local|nccl]\n\n"
                "Peak memory of %d cells beside a log's figures and a floor. On cpu and cuda a\n"
                "cell is planned, and run if its 8 ranks fit: on the CPU minutes a cell; on GPUs\n"
                "seconds (build it with nvcc as the trainer). There the ranks are threads on N\n"
                "GPUs, 1 if nothing is said, 8 for NCCL; or, under a launcher, 8 processes.\n",
                CELLS);
            exit(EXIT_SUCCESS);
        } else {
            return bad("%s: unknown flag", argv[i]);
        }
    }
    if (ask->at.device != FT_GPU && given)
        return bad("--gpus and --transport need --device cuda");
    if (ask->at.device == FT_CPU && ft_env_rank() >= 0)
        return bad("processes talk over NCCL, between GPUs: --device cpu is one process");
    if (given && ft_env_rank() >= 0)
        return bad("under a launcher each process has one GPU, and NCCL connects them: without "
                   "--gpus and --transport");
    return 1;
}

#ifndef MEMORY_TABLES_MAIN
#define MEMORY_TABLES_MAIN main
#endif

int MEMORY_TABLES_MAIN(int argc, char **argv) {
    char path[] = "/tmp/memory_tables.XXXXXX";
    request ask;
    ft_status status = FT_OK;
    keep_freed_memory();
    if (ft_env_rank() > 0 && !freopen("/dev/null", "w", stdout)) return EXIT_FAILURE;
    if (!parse_request(argc, argv, &ask)) return EXIT_USAGE;
    if (ask.at.device != FT_META) status = make_data(&ask, path);
    if (status == FT_OK && ask.csv) status = print_csv(&ask);
    for (int how = 0; status == FT_OK && !ask.csv && how < VARIANTS; how++)
        status = print_table(&ask, (variant)how);
    if (ask.data) unlink(path);
    return status == FT_OK && output_written() ? EXIT_SUCCESS : EXIT_FAILURE;
}
