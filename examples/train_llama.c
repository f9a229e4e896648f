/* train_llama.c: trains a Llama on bytes, tokens or examples. Ranks are threads; under torchrun,
   mpirun or srun each is a process with a GPU.

   Build:  cc -std=c11 -O3 -march=native -I. examples/train_llama.c -o train_llama -lm -lpthread
   GPU:    nvcc -O3 -DFT_CUDA -I. examples/train_llama.c femtotron_kernels.cu -o train_llama \
               -arch=native -lcublasLt
   Add     -DFT_CJSON -lcjson                         for --config, --init-from, --model DIR
           -DFT_CJSON -DFT_XXHASH -lcjson -lxxhash    for these and checkpoints
           -DFT_NCCL -lnccl                           to GPU's line, for NCCL and its launchers
           (make build/train_llama and make cuda add what they find)
   Run:    ./train_llama --data *.h --dp 4 --zero-stage 3 --sac selective --steps 300
   NCCL:   torchrun --no-python --nproc-per-node 8 ./train_llama --data *.h --dp 8 --zero-stage 3
   Plan:   ./train_llama --device meta --dp 8 --zero-stage 3 --sac full --model llama-3-8b
   Tune:   ./train_llama --init-from DIR --data *.bin --token-dtype uint16 --export TUNED

   How it is built: one table of options drives parsing, --config and --help. main() checks
   everything that can be checked, plans the memory by running one step on the device `meta`, then
   trains. Plan and run are the same function, rank_main(): only the device differs. Read
   train_step() first. The parts, in this order, each after a line with its name:
           options, options in a file, models, the command line
           what is shared, model and pipeline, stopping in order, a step, what a step says
           checkpoints, the steps, sampling, ranks
           tables, the program, does it fit, plan and run, main
   With --device cuda any number of ranks may share a GPU, as threads.

   SIGTERM and SIGINT end training after the running step, with a checkpoint where there is a
   directory for it: then the exit status is 0, without one 128 + the signal. A second signal ends
   the program at once, and so does the first while ranks meet and weights are made or read.

   LETTERS  B batch (a micro-batch of one dp rank), T tokens of a sequence, V vocabulary, M
   micro-batches of a step, R ranks = dp * tp * pp. A step sees dp * B * M sequences.

   License: MIT, see LICENSE. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* clock_gettime, isatty */
#endif

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"
#include "femtotron_io.h"

#ifdef FT_CJSON
#include <cjson/cJSON.h>
#endif
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

enum { EXIT_USAGE = 2 };

/* -------------------------------------------------------------------------------------- options */

typedef struct paths { const char *const *path; int n; } paths;
typedef struct set_block { struct set_block *next; } set_block; /* memory of settings */

typedef struct settings {
    int64_t device; /* ft_device; DEVICE_AUTO until it is resolved */
    int64_t gpus, ranks_per_gpu, transport, timeout_s, plan_for; /* plan_for: 1 is cuda */
    int64_t dp, tp, pp, sequence_parallel, schedule, virtual_stages;
    int64_t pp_overlap;
    const char *pp_layers; /* NULL: uniform */
    int64_t zero_stage, prefetch, reduce_overlap, keep_gathered, shard_ranks;
    int64_t accumulate_dtype, reduce_dtype; /* ft_zero_dtype */
    int64_t sac;          /* position in the words of --sac; SAC_BUDGET has sac_budget_bytes */
    int64_t sac_budget_bytes;
    int64_t allocator, memory_limit; /* ft_allocator; bytes, 0: none */
    int64_t micro_batch_size, micro_batches, seq_len;
    int64_t steps, warmup, seed;
    int64_t lr_schedule, lr_decay; /* ft_schedule; steps */
    double lr, lr_floor, weight_decay, grad_clip;
    int64_t optimizer;     /* position in the words of --optimizer */
    double beta1, beta2, eps, momentum;
    int64_t dtype; /* ft_dtype */
    int64_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, tie_embeddings;
    int64_t qkv_bias, o_bias, mlp_bias, qk_norm;
    const char *model, *init_from, *export_dir;
    int64_t export_dtype, export_shard; /* 0 fp32, 1 bf16; bytes */
    int has_like;          /* the model began as one that `like` describes */
    ft_io_hf_config like;
    paths data, eval_data;
    int64_t data_format, token_dtype; /* ft_io_format; the second is an older name for some */
    int64_t eod_token, doc_mask;
    int64_t eval_every;
    const char *log_path, *memory_json_path, *report_path, *trace_path, *gemm_table;
    int64_t sample, hash, verbose, help;
    const char *checkpoint_dir, *resume; /* resume: "auto" or a path */
    int64_t checkpoint_every, keep;      /* 0: at the end; all */
    const char *tensorboard, *config_path;
    int64_t print_config;
    set_block *blocks;     /* what --config brought; free_settings() */
} settings;

enum { DEVICE_AUTO = 3 }; /* the words before it are the ft_device of the same value */
enum { SAC_BUDGET = 3 }; /* the words before it are the ft_sac_kind of the same value */

typedef enum option_kind {
    TAKES_INT,   /* low..high */
    TAKES_REAL,  /* low..high */
    TAKES_WORD,  /* one of `value`, separated by |; stored as its position */
    TAKES_SAC,   /* the same, or budget=BYTES */
    TAKES_BYTES, /* a number, with or without KiB, MiB, GiB */
    TAKES_PATH,
    TAKES_TEXT,
    TAKES_PATHS, /* all words up to the next flag */
    TAKES_AUTO,  /* the next word, or "auto" where a flag or nothing follows */
    TAKES_NONE,  /* stored as 1 */
    TAKES_SWITCH /* 1, also without a value */
} option_kind;

typedef struct option {
    const char *name;
    option_kind kind;
    const char *value;   /* how --help names it */
    size_t offset;       /* in settings */
    int64_t low, high;
    const char *initial; /* parsed like a given one; NULL: 0 */
    const char *help;    /* lines separated by \n */
} option;

#define AT(field) offsetof(settings, field)
#define MANY ((int64_t)1 << 24)

static const option options[] = {
    {"--device", TAKES_WORD, "cpu|meta|cuda|auto", AT(device), 0, 0, "auto",
     "cpu and cuda train; auto is cuda where this program was built for it and a GPU is\n"
     "there, cpu elsewhere. meta prints the plan of every rank's memory and traffic: any\n"
     "size of model, without storage, kernels or data"},
    {"--gpus", TAKES_INT, "N", AT(gpus), 0, 1024, "0",
     "GPUs of this machine to use; 0: all, but no more than ranks"},
    {"--ranks-per-gpu", TAKES_INT, "R", AT(ranks_per_gpu), 0, 4096, "0",
     "the most ranks that may share a GPU; 0: as many as it takes"},
    {"--transport", TAKES_WORD, "local|nccl", AT(transport), 0, 0, "local",
     "between the GPUs of this process: copies, or NCCL with a GPU for each rank. Under\n"
     "torchrun, mpirun or srun each process is one rank, and NCCL it is"},
    {"--timeout", TAKES_INT, "SECONDS", AT(timeout_s), 1, 1000000, "120",
     "how long a collective waits for a rank that does not come"},
    {"--gemm-tune", TAKES_PATH, "FILE", AT(gemm_table), 0, 0, NULL,
     "a table of GEMM algorithms: shapes that it lacks are timed and added, and later\n"
     "runs take the same; default: cuBLASLt's first advice"},
    {"--plan-for", TAKES_WORD, "cpu|cuda", AT(plan_for), 0, 0, "cpu",
     "with --device meta: whose kernels' workspace to count"},
    {"--dp", TAKES_INT, "R", AT(dp), 1, 1024, "1", "data-parallel ranks"},
    {"--tp", TAKES_INT, "R", AT(tp), 1, 1024, "1",
     "tensor-parallel ranks that share each layer; must divide heads, kv heads and\n"
     "intermediate"},
    {"--pp", TAKES_INT, "R", AT(pp), 1, 1024, "1",
     "pipeline stages; the run has dp x tp x pp ranks"},
    {"--sp", TAKES_SWITCH, "[0|1]", AT(sequence_parallel), 0, 0, NULL,
     "sequence parallelism: norms and residuals on T/tp tokens of each tp rank"},
    {"--schedule", TAKES_WORD, "1f1b|gpipe|interleaved|zb-h1", AT(schedule), 0, 0, "1f1b",
     "order of the micro-batches' forwards and backwards over the stages"},
    {"--virtual-stages", TAKES_INT, "V", AT(virtual_stages), 1, 26, "1",
     "chunks of layers a stage has, with --schedule interleaved"},
    {"--pp-overlap", TAKES_WORD, "0|1", AT(pp_overlap), 0, 0, "0",
     "1 runs the exchanges between stages beside compute, for what one of them sends in\n"
     "memory"},
    {"--pp-layers", TAKES_TEXT, "N,N,...|balanced", AT(pp_layers), 0, 0, NULL,
     "layers of each of the pp x V (virtual) stages; balanced counts embedding and head;\n"
     "default: uniform"},
    {"--zero-stage", TAKES_INT, "0..3", AT(zero_stage), 0, 3, "0",
     "what the ranks shard: 0 nothing, 1 optimizer state, 2 and gradients,\n"
     "3 and parameters"},
    {"--sac", TAKES_SAC, "none|selective|full|budget=BYTES", AT(sac), 0, 0, "none",
     "recomputation in backward: nothing, what is cheap, all but the layers'\n"
     "inputs, or as little as fits in BYTES a rank (suffix KiB, MiB, GiB)"},
    {"--prefetch", TAKES_INT, "UNITS", AT(prefetch), 0, 1024, "1",
     "stage 3: units gathered ahead of the running one"},
    {"--reduce-overlap", TAKES_WORD, "0|1", AT(reduce_overlap), 0, 0, "1",
     "1 reduces gradients under the next unit's backward and costs one more\n"
     "unit of them in stages 2 and 3"},
    {"--allocator", TAKES_WORD, "default|system|caching|arena", AT(allocator), 0, 0, "default",
     "who serves memory: the system for each request, chunks that are kept, or one\n"
     "arena in which the plan has placed everything; default: FT_ALLOCATOR, or system\n"
     "on the CPU, an arena on a GPU"},
    {"--memory-limit", TAKES_BYTES, "BYTES", AT(memory_limit), 0, 0, NULL,
     "of a rank (suffix KiB, MiB, GiB): a plan that needs more is refused before anything\n"
     "is allocated, with the changes that would make it fit and what each costs"},
    {"--keep-gathered", TAKES_WORD, "0|1", AT(keep_gathered), 0, 0, "0",
     "ZeRO-3: 1 keeps gathered weights until the step ends: less traffic, more memory"},
    {"--shard-ranks", TAKES_INT, "R", AT(shard_ranks), 0, 1024, "0",
     "hybrid sharding: ZeRO shards over groups of R dp ranks and replicates across groups;\n"
     "0: over all of dp"},
    {"--accumulate-dtype", TAKES_WORD, "same|fp32", AT(accumulate_dtype), 0, 0, "same",
     "of gradients between micro-batches; same as --dtype"},
    {"--reduce-dtype", TAKES_WORD, "same|fp32|bf16", AT(reduce_dtype), 0, 0, "same",
     "of gradients on the wire; same as --dtype"},
    {"--micro-batch-size", TAKES_INT, "B", AT(micro_batch_size), 1, MANY, "8",
     "sequences of a rank in a micro-batch"},
    {"--micro-batches", TAKES_INT, "M", AT(micro_batches), 1, 65536, "1",
     "micro-batches of a step; the global batch is R x B x M sequences"},
    {"--seq-len", TAKES_INT, "T", AT(seq_len), 1, MANY, "128", "tokens of a sequence"},
    {"--steps", TAKES_INT, "N", AT(steps), 1, 1000000000, "100", "optimizer steps"},
    {"--lr", TAKES_REAL, "LR", AT(lr), 0, 1000, "0.001", "learning rate after the warm-up"},
    {"--warmup", TAKES_INT, "N", AT(warmup), 0, 1000000000, "0",
     "steps in which the learning rate grows linearly to LR; then constant"},
    {"--lr-schedule", TAKES_WORD, "constant|linear|cosine|wsd", AT(lr_schedule), 0, 0, "constant",
     "what the learning rate does after the warm-up; wsd is constant, then linear"},
    {"--lr-floor", TAKES_REAL, "LR", AT(lr_floor), 0, 1000, "0", "where it ends"},
    {"--lr-decay", TAKES_INT, "N", AT(lr_decay), 0, 1000000000, "0",
     "last steps of wsd, in which it falls to the floor"},
    {"--optimizer", TAKES_WORD, "adamw|sgd", AT(optimizer), 0, 0, "adamw", "the update"},
    {"--beta1", TAKES_REAL, "B", AT(beta1), 0, 1, "0.9", "AdamW's decay of the first moment"},
    {"--beta2", TAKES_REAL, "B", AT(beta2), 0, 1, "0.95", "and of the second"},
    {"--eps", TAKES_REAL, "E", AT(eps), 0, 1, "1e-8", "AdamW's epsilon"},
    {"--momentum", TAKES_REAL, "M", AT(momentum), 0, 1, "0.9", "of SGD"},
    {"--weight-decay", TAKES_REAL, "W", AT(weight_decay), 0, 1000, "0.1",
     "the optimizer\'s decay of matrices (of norms and biases never); 0: none"},
    {"--grad-clip", TAKES_REAL, "C", AT(grad_clip), 0, 1000000000, "1",
     "largest global gradient norm; 0: no clipping"},
    {"--dtype", TAKES_WORD, "fp32|bf16", AT(dtype), 0, 0, "fp32",
     "of parameters, gradients and activations; bf16 keeps fp32 masters"},
    {"--seed", TAKES_INT, "N", AT(seed), 0, INT64_MAX, "0",
     "of initial weights, of the order of the data, and of the sample"},
    {"--data", TAKES_PATHS, "FILE...", AT(data), 0, 0, NULL,
     "what to train on, in this order: the bytes of any files, token shards, prefixes of\n"
     "Megatron-LM's .bin and .idx, or .jsonl examples for fine-tuning"},
    {"--data-format", TAKES_WORD, "auto|bytes|uint16|uint32|megatron|jsonl", AT(data_format), 0, 0,
     "auto", "what the data files hold; auto goes by their names and headers, and takes raw\n"
     "shards of uint16 or uint32 for bytes, so name those"},
    {"--token-dtype", TAKES_WORD, "auto|bytes|uint16|uint32", AT(token_dtype), 0, 0, "auto",
     "the same, by its older name"},
    {"--eod-token", TAKES_INT, "ID", AT(eod_token), -1, INT32_MAX, "-1",
     "the token that ends a document in bytes or shards, or is to end each answer of .jsonl;\n"
     "labels do not cross the end of a known document; -1: none"},
    {"--doc-mask", TAKES_SWITCH, "[0|1]", AT(doc_mask), 0, 0, NULL,
     "attention stays inside documents too"},
    {"--eval-data", TAKES_PATHS, "FILE...", AT(eval_data), 0, 0, NULL,
     "files to validate on, of the same kind as --data"},
    {"--eval-every", TAKES_INT, "N", AT(eval_every), 0, 1000000000, "0",
     "steps between validations; 0: only after the last step. --resume repeats the one that\n"
     "was due at its checkpoint"},
    {"--hidden", TAKES_INT, "C", AT(hidden), 1, MANY, "128", "width of the model"},
    {"--layers", TAKES_INT, "L", AT(layers), 1, 4096, "4", "decoder layers"},
    {"--heads", TAKES_INT, "H", AT(heads), 1, MANY, "4", "query heads"},
    {"--kv-heads", TAKES_INT, "K", AT(kv_heads), 1, MANY, NULL,
     "key and value heads, a divisor of H; default H"},
    {"--head-dim", TAKES_INT, "D", AT(head_dim), 1, MANY, NULL, "size of a head; default C / H"},
    {"--intermediate", TAKES_INT, "F", AT(intermediate), 1, MANY, NULL,
     "width of the feed-forward; default 8/3 C, rounded up to 32"},
    {"--vocab", TAKES_INT, "V", AT(vocab), 1, MANY, "256",
     "vocabulary; below 256 a byte >= V in the data is an error"},
    {"--tie-embeddings", TAKES_SWITCH, "[0|1]", AT(tie_embeddings), 0, 0, NULL,
     "the output head is the embedding table"},
    {"--qkv-bias", TAKES_SWITCH, "[0|1]", AT(qkv_bias), 0, 0, NULL,
     "q, k and v have biases (Qwen2)"},
    {"--o-bias", TAKES_SWITCH, "[0|1]", AT(o_bias), 0, 0, NULL, "attention's output has one"},
    {"--mlp-bias", TAKES_SWITCH, "[0|1]", AT(mlp_bias), 0, 0, NULL, "gate, up and down have"},
    {"--qk-norm", TAKES_SWITCH, "[0|1]", AT(qk_norm), 0, 0, NULL,
     "RMSNorm of each query and key head (Qwen3)"},
    {"--model", TAKES_TEXT, "NAME|DIR", AT(model), 0, 0, NULL,
     "sizes and settings of a model: a name below, or a directory (or its config.json) of\n"
     "Hugging Face; weights stay random; flags of sizes beside it go before it"},
    {"--init-from", TAKES_PATH, "DIR", AT(init_from), 0, 0, NULL,
     "weights to start from: a directory of Hugging Face. Without --model its settings too;\n"
     "no flag may contradict its sizes"},
    {"--export", TAKES_PATH, "DIR", AT(export_dir), 0, 0, NULL,
     "after training, write the model for Hugging Face: config.json, safetensors, and what\n"
     "tokenizer the directory of --init-from or --model has; replaces an earlier export only"},
    {"--export-dtype", TAKES_WORD, "fp32|bf16", AT(export_dtype), 0, 0, "fp32",
     "of the weights in it: the masters, or these rounded"},
    {"--export-shard-bytes", TAKES_BYTES, "BYTES", AT(export_shard), 0, 0, "5000000000",
     "the most in one of its files (suffix KiB, MiB, GiB)"},
    {"--log", TAKES_PATH, "FILE", AT(log_path), 0, 0, NULL,
     "one JSON object a step: step, loss, grad_norm, lr, tokens (so far),\n"
     "tokens_per_s, peak_bytes (of rank 0), step_s, elapsed_s, wall_time (seconds since\n"
     "1970), skipped (updates, so far), on a known GPU mfu; and one a validation: step,\n"
     "eval_loss, elapsed_s, wall_time"},
    {"--tensorboard", TAKES_PATH, "DIR", AT(tensorboard), 0, 0, NULL,
     "a new event file for TensorBoard in this directory: loss, grad_norm, lr,\n"
     "tokens_per_s, peak_bytes, on a known GPU mfu, and eval_loss"},
    {"--memory-json", TAKES_PATH, "FILE", AT(memory_json_path), 0, 0, NULL,
     "every rank's peak bytes, and by tag at that moment, as JSON"},
    {"--report", TAKES_PATH, "FILE", AT(report_path), 0, 0, NULL,
     "a page (HTML) of the last step: memory over time, who does what when, traffic, losses;\n"
     "on meta of the planned step, in the simulated time of its schedule"},
    {"--trace", TAKES_PATH, "FILE", AT(trace_path), 0, 0, NULL,
     "the same step for Chrome's tracing and Perfetto, as JSON"},
    {"--checkpoint-dir", TAKES_PATH, "DIR", AT(checkpoint_dir), 0, 0, NULL,
     "write checkpoints there: after the last step, and when SIGTERM or SIGINT (Ctrl-C)\n"
     "ends the run after the running step, with exit status 0; a second one ends it at once"},
    {"--checkpoint-every", TAKES_INT, "N", AT(checkpoint_every), 1, 1000000000, NULL,
     "and every N steps, while training goes on"},
    {"--keep", TAKES_INT, "N", AT(keep), 1, 1000000000, NULL,
     "keep the N checkpoints that were written last; default: all"},
    {"--resume", TAKES_AUTO, "[auto|CHECKPOINT]", AT(resume), 0, 0, NULL,
     "continue a run, on any mesh, to --steps in all: from the checkpoint, or (auto) from the\n"
     "last one in --checkpoint-dir that loads; where there is none, training begins anew"},
    {"--sample", TAKES_INT, "N", AT(sample), 0, MANY, "0",
     "after training, bytes to generate (temperature 0.8)"},
    {"--hash", TAKES_NONE, "", AT(hash), 0, 0, NULL,
     "print a hash of all fp32 weights, the same for every layout"},
    {"--verbose", TAKES_NONE, "", AT(verbose), 0, 0, NULL,
     "print the mesh, each stage's layers and a drawing of the schedule"},
    {"--config", TAKES_PATH, "FILE.json", AT(config_path), 0, 0, NULL,
     "flags from a JSON object: names without --, numbers, true or false, strings, for lists\n"
     "of files arrays of strings. Flags on the command line win over the file. Names of files\n"
     "in it are relative to the working directory"},
    {"--print-config", TAKES_NONE, "", AT(print_config), 0, 0, NULL,
     "print all settings, defaults too, as such a file, and exit"},
    {"--help", TAKES_NONE, "", AT(help), 0, 0, NULL, "print this and exit"},
};

enum { OPTION_COUNT = (int)(sizeof options / sizeof options[0]) };

static int64_t *int_field(settings *set, size_t offset) {
    return (int64_t *)(void *)((char *)set + offset);
}

static const option *option_at(size_t offset) {
    int i;
    for (i = 0; options[i].offset != offset;) i++;
    return &options[i];
}

/* One line on standard error; returns 0, so that parsers can `return bad(...)`. */
static int bad(const char *format, ...) {
    va_list list;
    va_start(list, format);
    fputs("error: ", stderr);
    vfprintf(stderr, format, list);
    fputs("; see --help\n", stderr);
    va_end(list);
    return 0;
}

/* Digits and a sign and nothing else. An overflow comes out as the nearest int64_t, *over set. */
static int read_int(const char *text, const char **rest, int64_t *value, int *over) {
    char *end;
    long long parsed;
    if (text[0] != '-' && (text[0] < '0' || text[0] > '9')) return 0;
    errno = 0;
    parsed = strtoll(text, &end, 10);
    *over = errno == ERANGE;
    *rest = end;
    *value = (int64_t)parsed;
    return end != text;
}

static int parse_int(const option *opt, const char *text, int64_t *value) {
    const char *rest;
    int over;
    if (!read_int(text, &rest, value, &over) || *rest != '\0')
        return bad("%s %s: not a whole number", opt->name, text);
    if (*value < opt->low)
        return bad("%s %s: must be at least %lld", opt->name, text, (long long)opt->low);
    if (over || *value > opt->high)
        return bad("%s %s: must be at most %lld", opt->name, text, (long long)opt->high);
    return 1;
}

static int parse_real(const option *opt, const char *text, double *value) {
    char *end;
    /* strtod alone would take leading blanks, nan, inf and hexadecimal. */
    if (text[0] == '\0' || strspn(text, "+-.0123456789eE") != strlen(text))
        return bad("%s %s: not a number", opt->name, text);
    *value = strtod(text, &end);
    if (*end != '\0') return bad("%s %s: not a number", opt->name, text);
    if (!(*value >= (double)opt->low && *value <= (double)opt->high))
        return bad("%s %s: must be within %lld..%lld", opt->name, text, (long long)opt->low,
                   (long long)opt->high);
    return 1;
}

/* The position of `text` in "a|b|c", or -1. */
static int word_index(const char *words, const char *text) {
    size_t n = strlen(text);
    int index = 0;
    for (;; index++) {
        size_t here = strcspn(words, "|");
        if (here == n && strncmp(words, text, n) == 0) return index;
        if (words[here] == '\0') return -1;
        words += here + 1;
    }
}

static int parse_word(const option *opt, const char *text, int64_t *value) {
    const char *words = opt->kind == TAKES_SWITCH ? "0|1" : opt->value;
    *value = word_index(words, text);
    return *value >= 0 || bad("%s %s: must be one of %s", opt->name, text, words);
}

/* Bytes with a suffix or without, at least 1. */
static int parse_bytes(const option *opt, const char *text, const char *number, const char *what,
                       int64_t *value) {
    static const char *const suffix[] = {"", "KiB", "MiB", "GiB"};
    const char *rest;
    int64_t bytes;
    int unit, over;
    if (!read_int(number, &rest, &bytes, &over))
        return bad("%s %s: the %s is not a number of bytes", opt->name, text, what);
    for (unit = 0; unit < 4 && strcmp(rest, suffix[unit]) != 0;) unit++;
    if (unit == 4) return bad("%s %s: suffixes are KiB, MiB and GiB", opt->name, text);
    if (bytes < 1) return bad("%s %s: the %s must be at least 1 byte", opt->name, text, what);
    if (over || bytes > (INT64_MAX >> (10 * unit)))
        return bad("%s %s: the %s is too large", opt->name, text, what);
    *value = bytes << (10 * unit);
    return 1;
}

static int parse_sac(const option *opt, const char *text, settings *set) {
    if (strncmp(text, "budget=", 7) != 0) return parse_word(opt, text, &set->sac);
    set->sac = SAC_BUDGET;
    return parse_bytes(opt, text, text + 7, "budget", &set->sac_budget_bytes);
}

static int parse_value(const option *opt, const char *text, settings *set) {
    char *field = (char *)set + opt->offset;
    switch (opt->kind) {
    case TAKES_INT: return parse_int(opt, text, int_field(set, opt->offset));
    case TAKES_REAL: return parse_real(opt, text, (double *)(void *)field);
    case TAKES_WORD: return parse_word(opt, text, int_field(set, opt->offset));
    case TAKES_SAC: return parse_sac(opt, text, set);
    case TAKES_BYTES: return parse_bytes(opt, text, text, "limit", int_field(set, opt->offset));
    case TAKES_TEXT:
        if (text[0] == '\0') return bad("%s needs a value", opt->name);
        *(const char **)(void *)field = text;
        return 1;
    case TAKES_PATH:
    case TAKES_AUTO:
        if (text[0] == '\0') return bad("%s needs a name", opt->name);
        *(const char **)(void *)field = text;
        return 1;
    default: return 0;
    }
}

static int is_flag(const char *word) { return word[0] == '-' && word[1] == '-'; }

/* Reads the values that follow flag `opt`; *next is the first word after them. */
static int parse_option(const option *opt, int argc, char **argv, int *next, settings *set) {
    if (opt->kind == TAKES_NONE || opt->kind == TAKES_SWITCH) {
        int has_value = opt->kind == TAKES_SWITCH && *next < argc && !is_flag(argv[*next]);
        *int_field(set, opt->offset) = 1;
        return has_value ? parse_word(opt, argv[(*next)++], int_field(set, opt->offset)) : 1;
    }
    if (opt->kind == TAKES_AUTO) {
        const char *word = *next < argc && !is_flag(argv[*next]) ? argv[(*next)++] : "auto";
        *(const char **)(void *)((char *)set + opt->offset) = word;
        return word[0] != '\0' || bad("%s needs a name, or none", opt->name);
    }
    if (*next >= argc || is_flag(argv[*next]))
        return bad("%s needs a value: %s", opt->name, opt->value);
    if (opt->kind != TAKES_PATHS) return parse_value(opt, argv[(*next)++], set);
    paths *list = (paths *)(void *)((char *)set + opt->offset);
    list->path = (const char *const *)(argv + *next);
    for (list->n = 0; *next < argc && !is_flag(argv[*next]); (*next)++) list->n++;
    return 1;
}

static const option *find_option(const char *name) {
    int i = 0;
    while (i < OPTION_COUNT && strcmp(options[i].name, name) != 0) i++;
    return i < OPTION_COUNT ? &options[i] : NULL;
}

static int parse_flags(int argc, char **argv, int *given, settings *set) {
    int next = 1;
    memset(given, 0, OPTION_COUNT * sizeof *given);
    while (next < argc) {
        const char *word = argv[next++];
        const option *opt = find_option(word);
        if (!opt) return bad("%s: unknown flag", word);
        if (given[opt - options]++) return bad("%s is given twice", word);
        if (!parse_option(opt, argc, argv, &next, set)) return 0;
    }
    return 1;
}

static int set_defaults(settings *set) {
    int i;
    memset(set, 0, sizeof *set);
    for (i = 0; i < OPTION_COUNT; i++)
        if (options[i].initial && !parse_value(&options[i], options[i].initial, set)) return 0;
    return 1;
}

static void free_settings(settings *set) {
    while (set->blocks) {
        set_block *next = set->blocks->next;
        free(set->blocks);
        set->blocks = next;
    }
}

/* ---------------------------------------------------------------------------- options in a file */

/* From here on JSON's readers may round whole numbers; in a file they are strings. */
#define EXACT_INT ((int64_t)1 << 53)

static int is_boolean(const option *opt) {
    return opt->kind == TAKES_NONE || opt->kind == TAKES_SWITCH ||
           (opt->kind == TAKES_WORD && strcmp(opt->value, "0|1") == 0);
}

/* What would make no sense in a file. */
static int stays_outside(const option *opt) {
    return opt->offset == AT(config_path) || opt->offset == AT(print_config) ||
           opt->offset == AT(help);
}

#ifdef FT_CJSON

static void *keep(settings *set, size_t bytes) {
    set_block *block = (set_block *)malloc(sizeof *block + bytes);
    if (!block) {
        bad("no memory for %zu bytes of --config", bytes);
        return NULL;
    }
    block->next = set->blocks;
    set->blocks = block;
    return block + 1;
}

static const char *keep_text(settings *set, const char *text) {
    size_t bytes = strlen(text) + 1;
    void *copy = keep(set, bytes);
    return copy ? (const char *)memcpy(copy, text, bytes) : NULL;
}

/* The whole file; NULL, after a message, if it cannot be read or is no text. */
static char *read_config_text(settings *set, const char *path) {
    enum { MOST = 1 << 20 };
    FILE *file = fopen(path, "rb");
    char *text = file ? (char *)keep(set, MOST + 1) : NULL;
    size_t n;
    int failed;
    if (!file) bad("--config %s: %s", path, strerror(errno));
    if (!text) {
        if (file) fclose(file);
        return NULL;
    }
    n = fread(text, 1, MOST + 1, file);
    failed = ferror(file) ? errno : 0;
    fclose(file);
    if (failed) return bad("--config %s: %s", path, strerror(failed)) ? text : NULL;
    if (n > MOST) return bad("--config %s: more than %d bytes", path, MOST) ? text : NULL;
    text[n] = '\0';
    if (strlen(text) != n || strstr(text, "\\u0000"))
        return bad("--config %s: a zero byte is no part of a name", path) ? text : NULL;
    return text;
}

/* The names of files in an array, which replace the list. */
static int config_paths(const option *opt, const cJSON *item, settings *set) {
    paths *list = (paths *)(void *)((char *)set + opt->offset);
    const cJSON *child;
    int n = 0;
    for (child = item->child; child; child = child->next, n++)
        if (!cJSON_IsString(child)) break;
    if (!cJSON_IsArray(item) || child || n == 0)
        return bad("%s must be an array of strings", opt->name);
    const char **path = (const char **)keep(set, (size_t)n * sizeof *path);
    if (!path) return 0;
    list->path = path;
    list->n = n;
    for (child = item->child; child; child = child->next)
        if (!(*path++ = keep_text(set, child->valuestring))) return 0;
    return 1;
}

/* A number goes the way of the flag's text. */
static int config_number(const option *opt, const cJSON *item, settings *set) {
    double x = item->valuedouble;
    char text[40];
    if (opt->kind != TAKES_REAL && (x >= (double)EXACT_INT || x <= -(double)EXACT_INT))
        return bad("%s %.17g: from 2^53 on, a whole number must be a string here", opt->name, x);
    snprintf(text, sizeof text, "%.17g", x);
    return parse_value(opt, text, set);
}

static int config_string(const option *opt, const cJSON *item, settings *set) {
    const char *text = keep_text(set, item->valuestring);
    if (!text || !parse_value(opt, text, set)) return 0;
    if (opt->kind != TAKES_INT || *int_field(set, opt->offset) >= EXACT_INT) return 1;
    return bad("%s must be a number", opt->name);
}

static int config_value(const option *opt, const cJSON *item, settings *set) {
    int number = cJSON_IsNumber(item), string = cJSON_IsString(item);
    if (is_boolean(opt)) {
        if (!cJSON_IsBool(item)) return bad("%s must be true or false", opt->name);
        *int_field(set, opt->offset) = cJSON_IsTrue(item) != 0;
        return 1;
    }
    switch (opt->kind) {
    case TAKES_PATHS: return config_paths(opt, item, set);
    case TAKES_REAL:
        return number ? config_number(opt, item, set) : bad("%s must be a number", opt->name);
    case TAKES_INT:
    case TAKES_BYTES:
        if (number) return config_number(opt, item, set);
        if (string) return config_string(opt, item, set);
        return bad("%s must be a number", opt->name);
    default:
        return string ? config_string(opt, item, set) : bad("%s must be a string", opt->name);
    }
}

/* Messages call the option by the file and the key. */
static int config_key(const char *path, const cJSON *item, int *given, settings *set) {
    char flag[64], *name;
    const option *opt;
    option named;
    size_t bytes = strlen(path) + strlen(item->string) + 8;
    snprintf(flag, sizeof flag, "--%s", item->string);
    opt = strlen(item->string) < sizeof flag - 2 ? find_option(flag) : NULL;
    if (!opt) return bad("%s: \"%s\": unknown key", path, item->string);
    if (stays_outside(opt)) return bad("%s: \"%s\" cannot stand in a file", path, item->string);
    if (given[opt - options]++) return bad("%s: \"%s\" is there twice", path, item->string);
    name = (char *)keep(set, bytes);
    if (!name) return 0;
    snprintf(name, bytes, "%s: \"%s\":", path, item->string);
    named = *opt;
    named.name = name;
    return config_value(&named, item, set);
}

static int read_config(const char *path, int *given, settings *set) {
    const char *text = read_config_text(set, path), *end = NULL;
    const cJSON *item;
    cJSON *root;
    int ok = 1;
    if (!text) return 0;
    memset(given, 0, OPTION_COUNT * sizeof *given);
    root = cJSON_ParseWithOpts(text, &end, 1);
    if (!root) return bad("--config %s: not JSON, at byte %lld", path,
                          end ? (long long)(end - text) : 0LL);
    if (!cJSON_IsObject(root)) ok = bad("--config %s: not a JSON object", path);
    for (item = root->child; ok && item; item = item->next)
        ok = config_key(path, item, given, set);
    cJSON_Delete(root);
    return ok;
}

#else

static int read_config(const char *path, int *given, settings *set) {
    (void)given;
    (void)set;
    return bad("--config %s: this program was built without cJSON; install it (libcjson-dev) and "
               "build with -DFT_CJSON ... -lcjson, as make build/train_llama does", path);
}

#endif /* FT_CJSON */

/* -- the other way, --print-config -- */

static void print_json_text(const char *text, size_t n) {
    size_t i;
    putchar('"');
    for (i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c < 32) printf("\\u%04x", c);
        else printf("%s%c", c == '"' || c == '\\' ? "\\" : "", c);
    }
    putchar('"');
}

/* The fewest digits that are read as the same number. */
static const char *real_text(double value, char text[40]) {
    int digits = 6;
    do snprintf(text, 40, "%.*g", digits, value);
    while (strtod(text, NULL) != value && ++digits < 18);
    return text;
}

static void print_real(double value) {
    char text[40];
    fputs(real_text(value, text), stdout);
}

static void print_whole(int64_t value) {
    printf(value >= EXACT_INT ? "\"%lld\"" : "%lld", (long long)value);
}

static const char *word_at(const char *words, int64_t index) { /* ends at the next | or NUL */
    while (index-- > 0) words += strcspn(words, "|") + 1;
    return words;
}

static void print_word(const char *words, int64_t index) {
    words = word_at(words, index);
    print_json_text(words, strcspn(words, "|"));
}

static void print_paths(const paths *list) {
    int i;
    for (i = 0; i < list->n; i++) {
        fputs(i ? ", " : "[", stdout);
        print_json_text(list->path[i], strlen(list->path[i]));
    }
    putchar(']');
}

/* Nothing was given, and no value says so. */
static int is_unset(const option *opt, const settings *set) {
    const char *field = (const char *)set + opt->offset;
    switch (opt->kind) {
    case TAKES_INT: return !opt->initial && *(const int64_t *)(const void *)field == 0;
    case TAKES_BYTES: return *(const int64_t *)(const void *)field == 0;
    case TAKES_PATH:
    case TAKES_AUTO:
    case TAKES_TEXT: return *(const char *const *)(const void *)field == NULL;
    case TAKES_PATHS: return ((const paths *)(const void *)field)->n == 0;
    default: return 0;
    }
}

static void print_setting(const option *opt, const settings *set) {
    const char *field = (const char *)set + opt->offset;
    const int64_t *whole = (const int64_t *)(const void *)field;
    if (is_boolean(opt)) fputs(*whole ? "true" : "false", stdout);
    else switch (opt->kind) {
    case TAKES_REAL: print_real(*(const double *)(const void *)field); break;
    case TAKES_WORD: print_word(opt->value, *whole); break;
    case TAKES_SAC:
        if (*whole != SAC_BUDGET) print_word(opt->value, *whole);
        else printf("\"budget=%lld\"", (long long)set->sac_budget_bytes);
        break;
    case TAKES_PATHS: print_paths((const paths *)(const void *)field); break;
    case TAKES_PATH:
    case TAKES_AUTO:
    case TAKES_TEXT: {
        const char *text = *(const char *const *)(const void *)field;
        print_json_text(text, strlen(text));
        break;
    }
    default: print_whole(*whole);
    }
}

static void print_config(const settings *set) {
    const char *before = "{";
    int i;
    for (i = 0; i < OPTION_COUNT; i++) {
        if (stays_outside(&options[i]) || is_unset(&options[i], set)) continue;
        printf("%s\n  \"%s\": ", before, options[i].name + 2);
        print_setting(&options[i], set);
        before = ",";
    }
    puts("\n}");
}

/* -------------------------------------------------------------------------------------- models */

enum { LLAMA3_NONE = 0, LLAMA3_8 = 8, LLAMA3_32 = 32 }; /* factor of scaled frequencies */

typedef struct preset { /* as the models' config.json has them */
    const char *name, *type;
    int64_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab;
    int tied;
    double eps, theta;
    int rope_factor;
    int64_t positions;
} preset;

static const preset presets[] = {
    {"tiny", "llama", 64, 4, 4, 2, 16, 128, 256, 0, 1e-5, 1e4, 0, 2048},
    {"llama-2-7b", "llama", 4096, 32, 32, 32, 128, 11008, 32000, 0, 1e-5, 1e4, 0, 4096},
    {"llama-2-70b", "llama", 8192, 80, 64, 8, 128, 28672, 32000, 0, 1e-5, 1e4, 0, 4096},
    {"llama-3.2-1b", "llama", 2048, 16, 32, 8, 64, 8192, 128256, 1, 1e-5, 5e5, LLAMA3_32, 131072},
    {"llama-3.2-3b", "llama", 3072, 28, 24, 8, 128, 8192, 128256, 1, 1e-5, 5e5, LLAMA3_32, 131072},
    {"llama-3-8b", "llama", 4096, 32, 32, 8, 128, 14336, 128256, 0, 1e-5, 5e5, 0, 8192},
    {"llama-3-70b", "llama", 8192, 80, 64, 8, 128, 28672, 128256, 0, 1e-5, 5e5, 0, 8192},
    {"llama-3.1-8b", "llama", 4096, 32, 32, 8, 128, 14336, 128256, 0, 1e-5, 5e5, LLAMA3_8, 131072},
    {"llama-3.1-70b", "llama", 8192, 80, 64, 8, 128, 28672, 128256, 0, 1e-5, 5e5, LLAMA3_8, 131072},
    {"llama-3.1-405b", "llama", 16384, 126, 128, 8, 128, 53248, 128256, 0, 1e-5, 5e5, LLAMA3_8,
     131072},
    {"mistral-7b", "mistral", 4096, 32, 32, 8, 128, 14336, 32768, 0, 1e-5, 1e6, 0, 32768},
    {"qwen2.5-0.5b", "qwen2", 896, 24, 14, 2, 64, 4864, 151936, 1, 1e-6, 1e6, 0, 32768},
    {"qwen2.5-1.5b", "qwen2", 1536, 28, 12, 2, 128, 8960, 151936, 1, 1e-6, 1e6, 0, 131072},
    {"qwen2.5-3b", "qwen2", 2048, 36, 16, 2, 128, 11008, 151936, 1, 1e-6, 1e6, 0, 32768},
    {"qwen2.5-7b", "qwen2", 3584, 28, 28, 4, 128, 18944, 152064, 0, 1e-6, 1e6, 0, 131072},
    {"qwen2.5-32b", "qwen2", 5120, 64, 40, 8, 128, 27648, 152064, 0, 1e-5, 1e6, 0, 131072},
    {"qwen2.5-72b", "qwen2", 8192, 80, 64, 8, 128, 29568, 152064, 0, 1e-5, 1e6, 0, 131072},
    {"qwen3-0.6b", "qwen3", 1024, 28, 16, 8, 128, 3072, 151936, 1, 1e-6, 1e6, 0, 40960},
    {"qwen3-8b", "qwen3", 4096, 36, 32, 8, 128, 12288, 151936, 0, 1e-6, 1e6, 0, 40960},
};

enum { PRESETS = (int)(sizeof presets / sizeof presets[0]) };

static void preset_config(const preset *m, ft_io_hf_config *c) {
    *c = ft_io_hf_config_default();
    snprintf(c->model_type, sizeof c->model_type, "%s", m->type);
    c->hidden = m->hidden;
    c->layers = m->layers;
    c->heads = m->heads;
    c->kv_heads = m->kv_heads;
    c->head_dim = m->head_dim;
    c->intermediate = m->intermediate;
    c->vocab = m->vocab;
    c->tie_embeddings = m->tied;
    c->qkv_bias = strcmp(m->type, "qwen2") == 0;
    c->qk_norm = strcmp(m->type, "qwen3") == 0;
    c->norm_eps = m->eps;
    c->rope_theta = m->theta;
    c->max_positions = m->positions;
    if (!m->rope_factor) return;
    c->rope_scaling.factor = m->rope_factor;
    c->rope_scaling.low_freq_factor = 1;
    c->rope_scaling.high_freq_factor = 4;
    c->rope_scaling.original_context = 8192;
}

static int read_model(const char *flag, const char *path, ft_io_hf_config *config) {
#ifdef FT_CJSON
    if (ft_io_hf_config_read(path, config) == FT_OK) return 1;
    return bad("%s: %s", flag, ft_last_error());
#else
    (void)config;
    return bad("%s %s: reading a config.json needs a build with cJSON (make build/train_llama "
               "where it is installed, or -DFT_CJSON and -lcjson)", flag, path);
#endif
}

static int find_config(const settings *set, ft_io_hf_config *config) {
    struct stat info;
    int i;
    if (!set->model) return read_model("--init-from", set->init_from, config);
    for (i = 0; i < PRESETS; i++)
        if (strcmp(presets[i].name, set->model) == 0) {
            preset_config(&presets[i], config);
            return 1;
        }
    if (strchr(set->model, '/') || stat(set->model, &info) == 0)
        return read_model("--model", set->model, config);
    fprintf(stderr, "error: --model %s: is no file or directory, and not one of", set->model);
    for (i = 0; i < PRESETS; i++) fprintf(stderr, " %s", presets[i].name);
    return fputs("; see --help\n", stderr) < 0;
}

/* A size of the model, where no flag gives it; with weights to start from a flag must agree. */
static int take_size(settings *set, const int *given, size_t offset, int64_t value) {
    int64_t *size = int_field(set, offset);
    int i = (int)(option_at(offset) - options);
    if (given[i] && *size != value && set->init_from)
        return bad("%s %lld contradicts %s, which has %lld", options[i].name, (long long)*size,
                   set->init_from, (long long)value);
    if (!given[i]) *size = value;
    return 1;
}

static int apply_model(settings *set, const int *given) {
    ft_io_hf_config *c = &set->like;
    if (!set->model && !set->init_from) return 1;
    if (!find_config(set, c)) return 0;
    set->has_like = 1;
    return take_size(set, given, AT(hidden), c->hidden) &&
           take_size(set, given, AT(layers), c->layers) &&
           take_size(set, given, AT(heads), c->heads) &&
           take_size(set, given, AT(kv_heads), c->kv_heads) &&
           take_size(set, given, AT(head_dim), c->head_dim) &&
           take_size(set, given, AT(intermediate), c->intermediate) &&
           take_size(set, given, AT(vocab), c->vocab) &&
           take_size(set, given, AT(tie_embeddings), c->tie_embeddings) &&
           take_size(set, given, AT(qkv_bias), c->qkv_bias) &&
           take_size(set, given, AT(o_bias), c->o_bias) &&
           take_size(set, given, AT(mlp_bias), c->mlp_bias) &&
           take_size(set, given, AT(qk_norm), c->qk_norm);
}

/* ----------------------------------------------------------------------------- the command line */

/* Defaults, then the file, then the command line: what comes later wins. */
static int parse_options(int argc, char **argv, settings *set) {
    int given[OPTION_COUNT], in_file[OPTION_COUNT];
    const char *path;
    int i;
    if (!set_defaults(set) || !parse_flags(argc, argv, given, set)) return 0;
    if ((path = set->config_path) != NULL) {
        if (!set_defaults(set) || !read_config(path, in_file, set) ||
            !parse_flags(argc, argv, given, set))
            return 0;
        for (i = 0; i < OPTION_COUNT; i++) given[i] |= in_file[i];
    }
    return apply_model(set, given);
}

static void print_help(void) {
    int i, k;
    puts("usage: train_llama --data FILE... [flags]\n"
         "       train_llama --device meta [flags]\n\n"
         "Trains a Llama-family model on bytes, tokens or examples. Ranks are threads, or, under\n"
         "torchrun, mpirun or srun, processes.\n");
    for (i = 0; i < OPTION_COUNT; i++) {
        const char *line = options[i].help;
        printf("%s %s\n", options[i].name, options[i].value);
        while (line) {
            const char *end = strchr(line, '\n');
            int last = end == NULL;
            printf("      %.*s", last ? (int)strlen(line) : (int)(end - line), line);
            if (last && options[i].initial) printf(" (default %s)", options[i].initial);
            putchar('\n');
            line = last ? NULL : end + 1;
        }
        for (k = 0; options[i].offset == AT(model) && k < PRESETS; k++)
            printf("%s%s%s", k % 6 ? " " : "      ", presets[k].name,
                   k % 6 == 5 || k == PRESETS - 1 ? "\n" : "");
    }
}

/* ------------------------------------------------------------------------------- what is shared */

typedef enum sender { SENT_ZERO = 0, SENT_TP, SENT_PP, SENT_OTHER, SENDERS } sender;

typedef struct rank_result { /* written by its own rank, read when all have ended */
    ft_mem_stats memory;
    double step_flops; /* forward and backward of the first step, replays not counted */
    ft_flops flops;                    /* all steps */
    int64_t sent[FT_COLLECTIVE_COUNT]; /* bytes, all groups, all steps */
    int64_t sent_by[SENDERS];          /* the same by who sends */
    int64_t gpu, gpu_used;             /* its GPU, and the bytes in use there; -1: none */
} rank_result;

/* A launch: a plan on meta or a run. The ranks read it. They write their own row of
   `results`; rank 0 alone writes the fields from `text` on. */
typedef struct job {
    const settings *set;
    ft_llama_config model;
    const ft_sac *sac;            /* [layers] */
    const int64_t *first_layer;   /* [pp V + 1] */
    const ft_io_sampler *sampler; /* NULL in a plan: there tokens have no values */
    const ft_io_eval *eval;       /* NULL: no validation */
#ifdef FT_CJSON
    const ft_io_model *source;    /* weights to start from, or NULL */
#endif
    int64_t steps;
    int only_rank;                /* a plan of this rank alone; -1: of all */
    ft_io_record *records;        /* [R] of the last step, or NULL */
    double *losses;               /* [steps], or NULL */
    ft_mem_plan *mem_plan;        /* records the plan, places the run; NULL without an arena */
    rank_result *results;         /* [R] */
    ft_io_log *log;
    ft_io_tb *tb;
    int live;                     /* progress as one line that is written over */
    int quiet;                    /* no line for a step or a validation */
    int32_t *text;                /* [prompt + N]: the prompt, then what the model appends */
    int64_t prompt;
    double step_flops;            /* all ranks' together, as planned */
    double peak_flops;            /* of the GPUs in use, a second; 0: not known */
    int line_open;                /* the live line is not ended yet */
    ft_zero_report report;
    double first_loss, eval_loss, begin, seconds; /* begin: of training, by now_s() */
    uint64_t hash;
    int64_t first_step, steps_done; /* of this run: it began at one, and ended before the other */
    int evaluated;
    int64_t stop_after;           /* step (from 0) after which a signal ends the run; -1: none */
    char saved[512];              /* the last checkpoint */
} job;

typedef struct trainer { /* what a rank has */
    ft_ctx *ctx;
    job *work;
    ft_zero *zero;
    ft_llama *model;
    ft_mesh mesh;
    ft_tp *tp;
    ft_pp *pipeline, *eval_pipeline;
    ft_pp_program program, eval_program;
    ft_tensor *scale;                     /* of the step's loss */
    ft_group *world;
    int32_t *host_tokens, *host_labels, *host_docs; /* [B,T]; docs: with --doc-mask, else NULL */
    int64_t step, eval_batch;             /* at work */
    double eval_sum;                      /* of the losses of this rank's counted tokens */
    int64_t eval_counted;
    ft_io_sampler sampler;                /* the run's, moved to where it resumes */
    int64_t first_step, first_samples;    /* where it does, and what was seen before */
    struct ft_io_checkpoint *checkpoint;  /* NULL: none are written */
    ft_tensor *stop;                      /* fp32 [1], between processes; NULL: ranks are threads */
    ft_group *stops;
} trainer;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double wall_time(void) { /* seconds since 1970 */
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Decimal digits in threes; text[32] holds any int64_t. */
static const char *thousands(int64_t value, char *text) {
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%lld", (long long)value), i, at = 0;
    for (i = 0; i < n; i++) {
        if (i > 0 && (n - i) % 3 == 0 && digits[i - 1] != '-') text[at++] = ',';
        text[at++] = digits[i];
    }
    text[at] = '\0';
    return text;
}

static const char *s_of(int64_t n) { return n == 1 ? "" : "s"; }

static double mib(size_t bytes) { return (double)bytes / (1024.0 * 1024.0); }

static int rank_count(const settings *set) { return (int)(set->dp * set->tp * set->pp); }

static int64_t tokens_of_step(const settings *set) {
    return set->dp * set->micro_batch_size * set->micro_batches * set->seq_len;
}

/* --------------------------------------------------------------------------- model and pipeline */

static ft_zero_config zero_config(const settings *set) {
    ft_zero_config config = ft_zero_config_default();
    config.stage = (int)set->zero_stage;
    config.dtype = (ft_dtype)set->dtype;
    config.prefetch = (int)set->prefetch;
    config.reduce_overlap = set->reduce_overlap ? FT_ON : FT_OFF;
    config.keep_gathered = (int)set->keep_gathered;
    config.shard_ranks = (int)set->shard_ranks;
    config.accumulate_dtype = (ft_zero_dtype)set->accumulate_dtype;
    config.reduce_dtype = (ft_zero_dtype)set->reduce_dtype;
    config.optimizer = set->optimizer ? ft_zero_sgd(set->momentum, 0)
                                      : ft_zero_adamw(set->beta1, set->beta2, set->eps);
    config.weight_decay = set->weight_decay;
    config.grad_clip = set->grad_clip;
    return config;
}

static ft_pp_config pipeline_config(const settings *set) {
    ft_pp_config config = ft_pp_config_default();
    config.kind = (ft_pp_kind)set->schedule;
    config.ranks = (int)set->pp;
    config.chunks = (int)set->virtual_stages;
    config.micro_batches = (int)set->micro_batches;
    config.overlap = (int)set->pp_overlap;
    return config;
}

typedef struct batch_tensors { ft_tensor *tokens, *labels, *docs; } batch_tensors;

/* A batch as device tensors [B,T], from the host arrays; the tape keeps them while it needs. */
static ft_status upload_batch(trainer *t, batch_tensors *in) {
    int64_t shape[2];
    shape[0] = t->work->set->micro_batch_size;
    shape[1] = t->work->set->seq_len;
    in->docs = NULL;
    FT_TRY(ft_tensor_create(t->ctx, &in->tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(t->ctx, &in->labels, FT_I32, 2, shape, FT_TAG_OTHER));
    if (t->work->set->doc_mask)
        FT_TRY(ft_tensor_create(t->ctx, &in->docs, FT_I32, 2, shape, FT_TAG_OTHER));
    if (!t->work->sampler) return FT_OK; /* a plan */
    FT_TRY(ft_upload(in->tokens, t->host_tokens));
    FT_TRY(ft_upload(in->labels, t->host_labels));
    return in->docs ? ft_upload(in->docs, t->host_docs) : FT_OK;
}

static void free_batch(batch_tensors *in) {
    ft_tensor_free(in->tokens);
    ft_tensor_free(in->labels);
    ft_tensor_free(in->docs);
}

/* Forward of one chunk of layers for one micro-batch: what the pipeline's runner calls. */
static ft_status forward(void *user, int chunk, int micro_batch, ft_tensor *x, ft_tensor **out) {
    trainer *t = (trainer *)user;
    const settings *set = t->work->set;
    batch_tensors in;
    if (t->work->sampler)
        FT_TRY(ft_io_sampler_fill_docs(&t->sampler, t->step, t->mesh.coord[FT_AXIS_DP],
                                       (int)set->dp, micro_batch, (int)set->micro_batches,
                                       t->host_tokens, t->host_labels, t->host_docs));
    FT_TRY(upload_batch(t, &in));
    FT_TRY(ft_llama_chunk_docs(t->model, chunk, in.tokens, in.labels, in.docs, t->scale,
                               t->work->sac, x, out));
    free_batch(&in);
    return FT_OK;
}

/* Backward computes the loss together with its gradient: before it, loss has no value. */
static ft_status add_loss(void *user, int micro_batch, ft_tensor *loss) {
    (void)micro_batch;
    return ft_zero_add_loss(((trainer *)user)->zero, loss);
}

static ft_status eval_forward(void *user, int chunk, int micro_batch, ft_tensor *x,
                              ft_tensor **out) {
    trainer *t = (trainer *)user;
    batch_tensors in;
    (void)micro_batch;
    if (t->work->sampler)
        FT_TRY(ft_io_eval_fill_docs(t->work->eval, t->eval_batch, t->mesh.coord[FT_AXIS_DP],
                                    t->host_tokens, t->host_labels, t->host_docs,
                                    &t->eval_counted));
    FT_TRY(upload_batch(t, &in));
    FT_TRY(ft_llama_chunk_docs(t->model, chunk, in.tokens, in.labels, in.docs, NULL, NULL, x,
                               out));
    free_batch(&in);
    return FT_OK;
}

/* tp ranks have the same loss: one of them counts it. */
static ft_status eval_loss(void *user, int micro_batch, ft_tensor *loss) {
    trainer *t = (trainer *)user;
    float mean = 0;
    (void)micro_batch;
    FT_TRY(ft_download(loss, &mean));
    if (t->mesh.coord[FT_AXIS_TP] == 0) t->eval_sum += (double)mean * (double)t->eval_counted;
    return FT_OK;
}

static ft_status pipeline_create(trainer *t) {
    const settings *set = t->work->set;
    ft_pp_config config = pipeline_config(set);
    ft_pp_program *p = &t->program;
    FT_TRY(ft_pp_create(t->ctx, &t->mesh, &config, &t->pipeline));
    p->forward = forward;
    p->loss = add_loss;
    p->user = t;
    p->dtype = (ft_dtype)set->dtype;
    FT_TRY(ft_llama_boundary(t->model, set->micro_batch_size, set->seq_len, &p->ndim, p->shape));
    if (!t->work->eval) return FT_OK;
    t->eval_program = *p;
    t->eval_program.forward = eval_forward;
    t->eval_program.loss = eval_loss;
    config.micro_batches = 1;
    config.forward_only = 1;
    return ft_pp_create(t->ctx, &t->mesh, &config, &t->eval_pipeline);
}

/* ---------------------------------------------------------------------------- stopping in order */

/* The signal that asks for the end; the next one of either kind is deadly. */
static volatile sig_atomic_t stop_signal;

static void on_signal(int number) {
    stop_signal = number;
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
}

static void catch_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

/* After the last checkpoint there is nothing to end in order. */
static void release_signals(void) {
    if (stop_signal) return;
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
}

static ft_status stop_create(trainer *t) {
    int64_t one = 1;
    if (ft_env_rank() < 0) return FT_OK;
    FT_TRY(ft_group_strided(t->ctx, "stop", 0, 1, ft_world(t->ctx), &t->stops));
    return ft_tensor_create(t->ctx, &t->stop, FT_F32, 1, &one, FT_TAG_OTHER);
}

/* All ranks must end after the same step. Threads: rank 0 decides, before its part in the step's
   last collective (the norm's scalars), and the others look after it: they cannot miss it, and one
   that looks early sees the number of a step still to come. Processes: whoever had the signal says
   so in 4 bytes. */
static ft_status stop_ask(trainer *t) {
    float asked = stop_signal != 0;
    if (t->stop) {
        FT_TRY(ft_upload(t->stop, &asked));
        return ft_all_reduce(t->stops, ft_stream_get(t->ctx, FT_STREAM_COMPUTE), t->stop);
    }
    if (asked > 0 && ft_rank(t->ctx) == 0 &&
        __atomic_load_n(&t->work->stop_after, __ATOMIC_RELAXED) < 0)
        __atomic_store_n(&t->work->stop_after, t->step, __ATOMIC_RELEASE);
    return FT_OK;
}

static ft_status stop_answer(trainer *t, int *stop) {
    float asked = 0;
    if (t->stop) {
        FT_TRY(ft_download(t->stop, &asked));
        if (asked > 0) t->work->stop_after = t->step; /* of this process alone */
    }
    int64_t after = __atomic_load_n(&t->work->stop_after, __ATOMIC_ACQUIRE);
    *stop = after >= 0 && t->step >= after;
    return FT_OK;
}

/* --------------------------------------------------------------------------------------- a step */

static ft_status trainer_create(trainer *t) {
    const settings *set = t->work->set;
    ft_zero_config config = zero_config(set);
    ft_llama_layout layout;
    size_t bytes = (size_t)(set->micro_batch_size * set->seq_len) * sizeof(int32_t);
    FT_TRY(ft_mesh_create(t->ctx, (int)set->dp, (int)set->tp, (int)set->pp, &t->mesh));
    if (set->tp > 1)
        FT_TRY(ft_tp_create(t->ctx, &t->mesh, (int)set->sequence_parallel, &t->tp));
    FT_TRY(ft_zero_create(t->ctx, &config, &t->mesh, &t->zero));
    memset(&layout, 0, sizeof layout);
    layout.mesh = t->mesh;
    layout.tp = t->tp;
    layout.chunks = (int)set->virtual_stages;
    layout.first_layer = t->work->first_layer;
    FT_TRY(ft_llama_create_part(t->ctx, t->zero, &t->work->model, &layout, set->seq_len,
                                (uint64_t)set->seed, &t->model));
    FT_TRY(pipeline_create(t));
    FT_TRY(stop_create(t));
    if (!t->work->sampler) return FT_OK;
    t->sampler = *t->work->sampler;
    t->host_tokens = (int32_t *)ft_host_alloc(t->ctx, bytes);
    t->host_labels = (int32_t *)ft_host_alloc(t->ctx, bytes);
    if (set->doc_mask) t->host_docs = (int32_t *)ft_host_alloc(t->ctx, bytes);
    return t->host_tokens && t->host_labels && (t->host_docs || !set->doc_mask) ? FT_OK
                                                                                : FT_ERR_OOM;
}

/* One optimizer step. The number of tokens that count is known before the first forward and scales
   the loss, so gradients are summed over micro-batches and ranks, never averaged. The pipeline runs
   the micro-batches; with one stage that is forward and backward in turn. */
static ft_status train_step(trainer *t, int64_t step, double lr) {
    const settings *set = t->work->set;
    int64_t counted = set->micro_batch_size * set->micro_batches * set->seq_len;
    t->step = step;
    if (t->work->sampler)
        FT_TRY(ft_io_sampler_counted(&t->sampler, step, t->mesh.coord[FT_AXIS_DP],
                                     (int)set->dp, (int)set->micro_batches, &counted));
    FT_TRY(ft_zero_step_begin(t->zero, (int)set->micro_batches, counted, &t->scale));
    FT_TRY(ft_pp_run(t->pipeline, &t->program));
    FT_TRY(stop_ask(t));
    FT_TRY(ft_span_begin(t->ctx, "optimizer", -1, -1));
    FT_TRY(ft_zero_step_end(t->zero, lr));
    ft_span_end(t->ctx);
    return FT_OK;
}

static ft_lr learning_rate(const settings *set) {
    ft_lr lr;
    lr.schedule = (ft_schedule)set->lr_schedule;
    lr.peak = set->lr;
    lr.floor = set->lr_floor;
    lr.warmup = set->warmup;
    lr.decay = set->lr_decay;
    lr.total = set->steps;
    return lr;
}

/* The mean loss over all windows of the validation files, the same on every rank: the sums travel
   as fp32 pairs, one pair a rank. A plan runs one batch. */
static ft_status evaluate(trainer *t, double *loss) {
    int64_t batches = t->work->sampler ? t->work->eval->batches : 1, pair = 2;
    int64_t pairs = 2 * ft_world(t->ctx);
    ft_stream *stream = ft_stream_get(t->ctx, FT_STREAM_COMPUTE);
    ft_tensor *mine, *all;
    float sums[2], *every = (float *)ft_host_alloc(t->ctx, (size_t)pairs * sizeof *every);
    double sum = 0;
    if (!every) return FT_ERR_OOM;
    t->eval_sum = 0;
    for (t->eval_batch = 0; t->eval_batch < batches; t->eval_batch++) {
        FT_TRY(ft_mem_phase_begin(t->ctx, "eval"));
        FT_TRY(ft_pp_run(t->eval_pipeline, &t->eval_program));
        FT_TRY(ft_mem_phase_end(t->ctx));
    }
    FT_TRY(ft_mem_phase_begin(t->ctx, "eval sums"));
    sums[0] = (float)t->eval_sum; /* high and low part: as exact as the double */
    sums[1] = (float)(t->eval_sum - (double)sums[0]);
    FT_TRY(ft_tensor_create(t->ctx, &mine, FT_F32, 1, &pair, FT_TAG_COMM));
    FT_TRY(ft_tensor_create(t->ctx, &all, FT_F32, 1, &pairs, FT_TAG_COMM));
    FT_TRY(ft_upload(mine, sums));
    FT_TRY(ft_all_gather(t->world, stream, mine, all));
    FT_TRY(ft_download(all, every));
    ft_tensor_free(mine);
    ft_tensor_free(all);
    FT_TRY(ft_mem_phase_end(t->ctx));
    for (int64_t i = 0; i < pairs; i++) sum += (double)every[i];
    ft_host_free(t->ctx, every);
    *loss = t->work->sampler ? sum / (double)t->work->eval->counted : 0;
    return FT_OK;
}

/* ----------------------------------------------------------------------------- what a step says */

static void print_bar(const job *work, int64_t step) {
    enum { WIDTH = 20 };
    int done = (int)(step * WIDTH / work->steps);
    printf("\r[%.*s%.*s] ", done, "####################", WIDTH - done, "....................");
}

/* Model FLOPs utilisation (Chowdhery et al. 2022, appendix B): the step's forward and backward over
   what the chips could do; 0 where that is not known. */
static double utilisation(const job *work, double seconds) {
    if (work->set->device != FT_GPU || work->peak_flops <= 0 || seconds <= 0) return 0;
    return work->step_flops / seconds / work->peak_flops;
}

/* "" on the CPU, ? for a chip that the table does not know. */
static const char *utilisation_text(const job *work, double mfu, char text[32]) {
    text[0] = '\0';
    if (work->set->device != FT_GPU) return text;
    if (mfu <= 0) snprintf(text, 32, " | MFU ?");
    else snprintf(text, 32, " | MFU %.1f%%", 100 * mfu);
    return text;
}

/* Sequences of the data that the first `steps` steps have seen, of runs before too. */
static int64_t samples_after(const trainer *t, int64_t steps) {
    const settings *set = t->work->set;
    return t->first_samples +
           (steps - t->first_step) * set->dp * set->micro_batch_size * set->micro_batches;
}

/* A row of the log, and the same figures as an event each. */
static ft_status log_step(job *work, const trainer *t, int64_t step, double lr, double seconds,
                          double rate, size_t peak_bytes) {
    double wall = wall_time(), mfu = utilisation(work, seconds);
    ft_io_log *log = work->log;
    ft_io_tb *tb = work->tb;
    ft_io_log_begin(log);
    ft_io_log_int(log, "step", step);
    ft_io_log_float(log, "loss", work->report.loss);
    ft_io_log_float(log, "grad_norm", work->report.grad_norm);
    ft_io_log_float(log, "lr", lr);
    ft_io_log_int(log, "tokens", samples_after(t, step) * work->set->seq_len);
    ft_io_log_float(log, "tokens_per_s", rate);
    ft_io_log_int(log, "peak_bytes", (int64_t)peak_bytes);
    ft_io_log_float(log, "step_s", seconds);
    ft_io_log_float(log, "elapsed_s", now_s() - work->begin);
    ft_io_log_double(log, "wall_time", wall);
    ft_io_log_int(log, "skipped", work->report.skipped);
    if (mfu > 0) ft_io_log_float(log, "mfu", mfu);
    ft_io_tb_scalar(tb, "loss", step, wall, work->report.loss);
    ft_io_tb_scalar(tb, "grad_norm", step, wall, work->report.grad_norm);
    ft_io_tb_scalar(tb, "lr", step, wall, lr);
    ft_io_tb_scalar(tb, "tokens_per_s", step, wall, rate);
    ft_io_tb_scalar(tb, "peak_bytes", step, wall, (double)peak_bytes);
    if (mfu > 0) ft_io_tb_scalar(tb, "mfu", step, wall, mfu);
    FT_TRY(ft_io_log_end(log));
    return ft_io_tb_flush(tb);
}

static ft_status log_eval(job *work, int64_t step, double loss) {
    double wall = wall_time();
    ft_io_log_begin(work->log);
    ft_io_log_int(work->log, "step", step);
    ft_io_log_float(work->log, "eval_loss", loss);
    ft_io_log_float(work->log, "elapsed_s", now_s() - work->begin);
    ft_io_log_double(work->log, "wall_time", wall);
    ft_io_tb_scalar(work->tb, "eval_loss", step, wall, loss);
    FT_TRY(ft_io_log_end(work->log));
    return ft_io_tb_flush(work->tb);
}

static ft_status report_step(job *work, const trainer *t, int64_t step, double lr, double seconds) {
    char text[32];
    int64_t tokens = tokens_of_step(work->set);
    double rate = (double)tokens / (seconds > 1e-9 ? seconds : 1e-9);
    ft_mem_stats memory;
    ft_mem_get(t->ctx, &memory);
    if (step == t->first_step + 1) work->first_loss = work->report.loss;
    if (work->live) print_bar(work, step);
    if (!work->quiet)
        printf("step %lld/%lld | loss %.4f | norm %.4f | lr %.3g | %.0f tok/s%s | peak %.2f MiB%s",
               (long long)step, (long long)work->steps, work->report.loss, work->report.grad_norm,
               lr, rate, utilisation_text(work, utilisation(work, seconds), text),
               mib(memory.peak_bytes), work->live ? " " : "\n");
    work->line_open = work->live;
    fflush(stdout);
    return log_step(work, t, step, lr, seconds, rate, memory.peak_bytes);
}

static ft_status report_eval(job *work, int64_t step, double loss) {
    work->eval_loss = loss;
    work->evaluated = 1;
    if (work->line_open) putchar('\n');
    work->line_open = 0;
    if (!work->quiet)
        printf("step %lld/%lld | validation loss %.4f\n", (long long)step, (long long)work->steps,
               loss);
    return log_eval(work, step, loss);
}

static int evaluation_is_due(const job *work, int64_t step) {
    int64_t every = work->set->eval_every;
    return work->eval && (step >= work->steps || (every && step % every == 0));
}

static ft_status maybe_evaluate(trainer *t, int64_t step) {
    job *work = t->work;
    double loss;
    if (!evaluation_is_due(work, step)) return FT_OK;
    FT_TRY(evaluate(t, &loss));
    if (!work->sampler || ft_rank(t->ctx) != 0) return FT_OK;
    return report_eval(work, step, loss);
}

/* ---------------------------------------------------------------------------------- checkpoints */

#if defined(FT_CJSON) && defined(FT_XXHASH)
enum { HAS_CHECKPOINTS = 1 };

/* Rank 0 speaks. */
static void say_saved(trainer *t, const ft_io_checkpoint_report *report) {
    job *work = t->work;
    char text[32];
    if (ft_rank(t->ctx) != 0) return;
    snprintf(work->saved, sizeof work->saved, "%s", report->path);
    if (work->line_open) putchar('\n');
    work->line_open = 0;
    if (work->quiet) return;
    printf("checkpoint %s | copied in %.3f s, written in %.3f s | %s bytes%s%s\n", report->path,
           report->copy_s, report->write_s, thousands(report->bytes, text),
           report->warning[0] ? " | " : "", report->warning);
    fflush(stdout);
}

/* What was handed over before: has it been written? */
static ft_status checkpoint_look(trainer *t, int wait) {
    ft_io_checkpoint_report report;
    int done = 0;
    if (!t->checkpoint) return FT_OK;
    if (wait) FT_TRY(ft_io_checkpoint_wait(t->checkpoint, &report, &done));
    else FT_TRY(ft_io_checkpoint_poll(t->checkpoint, &report, &done));
    if (done) say_saved(t, &report);
    return FT_OK;
}

/* Settings that change what is learned, by their keys in a checkpoint. A run that is continued may
   change them, and says so; what it may not change (model, optimizer, data, --seq-len, --seed) is
   refused. Keys that an older checkpoint lacks are nothing to compare with. */
static const struct { const char *key; size_t offset; } learned_by[] = {
    {"train.lr", AT(lr)}, {"train.lr_schedule", AT(lr_schedule)}, {"train.lr_floor", AT(lr_floor)},
    {"train.lr_decay", AT(lr_decay)}, {"train.warmup", AT(warmup)}, {"train.steps", AT(steps)},
    {"train.weight_decay", AT(weight_decay)}, {"train.grad_clip", AT(grad_clip)},
    {"train.doc_mask", AT(doc_mask)}, {"optimizer.beta1", AT(beta1)},
    {"optimizer.beta2", AT(beta2)}, {"optimizer.eps", AT(eps)},
    {"optimizer.momentum", AT(momentum)}, {"zero.dtype", AT(dtype)},
    {"zero.accumulate_dtype", AT(accumulate_dtype)}, {"zero.reduce_dtype", AT(reduce_dtype)}
};

/* As it is stored. */
static const char *setting_text(const settings *set, size_t offset, char text[40]) {
    const option *opt = option_at(offset);
    const void *field = (const char *)set + offset;
    if (opt->kind == TAKES_REAL) {
        snprintf(text, 40, "%.17g", *(const double *)field);
    } else if (opt->kind == TAKES_WORD) {
        const char *word = word_at(opt->value, *(const int64_t *)field);
        snprintf(text, 40, "%.*s", (int)strcspn(word, "|"), word);
    } else {
        snprintf(text, 40, "%lld", (long long)*(const int64_t *)field);
    }
    return text;
}

/* Whether this run makes use of it. */
static int is_in_use(const settings *set, size_t offset) {
    if (offset == AT(steps) || offset == AT(lr_floor))
        return set->lr_schedule != FT_LR_CONSTANT;
    if (offset == AT(lr_decay)) return set->lr_schedule == FT_LR_WSD;
    if (offset == AT(momentum)) return set->optimizer != 0;
    if (offset == AT(beta1) || offset == AT(beta2) || offset == AT(eps)) return set->optimizer == 0;
    return 1;
}

static ft_status checkpoint_settings(trainer *t, int64_t step) {
    const settings *set = t->work->set;
    ft_io_checkpoint *c = t->checkpoint;
    const struct { const char *key; int64_t value; } whole[] = {
        {"mesh.dp", set->dp}, {"mesh.tp", set->tp}, {"mesh.pp", set->pp},
        {"mesh.virtual_stages", set->virtual_stages},
        {"mesh.sequence_parallel", set->sequence_parallel}, {"zero.stage", set->zero_stage},
        {"zero.shard_ranks", set->shard_ranks},
        {"sampler.global_batch", t->sampler.global_batch}, {"random.seed", set->seed}
    };
    ft_io_sampler_state data;
    char text[40];
    size_t i;
    memset(&data, 0, sizeof data); /* a plan has no data */
    if (t->work->sampler) FT_TRY(ft_io_sampler_state_get(&t->sampler, step, &data));
    FT_TRY(ft_io_checkpoint_set(c, "sampler.samples", "%lld", (long long)data.samples));
    FT_TRY(ft_io_checkpoint_set(c, "sampler.seq_len", "%lld", (long long)data.seq_len));
    FT_TRY(ft_io_checkpoint_set(c, "sampler.windows", "%lld", (long long)data.windows));
    FT_TRY(ft_io_checkpoint_set(c, "sampler.tokens", "%lld", (long long)data.tokens));
    FT_TRY(ft_io_checkpoint_set(c, "sampler.data_hash", "%016llx",
                                (unsigned long long)data.data_hash));
    FT_TRY(ft_io_checkpoint_set(c, "sampler.label_hash", "%016llx",
                                (unsigned long long)data.label_hash));
    for (i = 0; i < sizeof whole / sizeof whole[0]; i++)
        FT_TRY(ft_io_checkpoint_set(c, whole[i].key, "%lld", (long long)whole[i].value));
    for (i = 0; i < sizeof learned_by / sizeof learned_by[0]; i++)
        FT_TRY(ft_io_checkpoint_set(c, learned_by[i].key, "%s",
                                    setting_text(set, learned_by[i].offset, text)));
    return FT_OK;
}

/* After `step` steps. Copies this rank's state; a thread writes it. */
static ft_status checkpoint_save(trainer *t, int64_t step) {
    FT_TRY(checkpoint_look(t, 1));
    FT_TRY(ft_io_checkpoint_begin(t->checkpoint, step));
    FT_TRY(checkpoint_settings(t, step));
    FT_TRY(ft_io_llama_stage(t->checkpoint, t->model, &t->work->model, t->zero));
    return ft_io_checkpoint_commit(t->checkpoint);
}

static void say_passed_over(void *user, const char *text) {
    (void)user;
    printf("passed over: %s\n", text);
}

static ft_status manifest_hash(const ft_io_manifest *m, const char *key, uint64_t *hash) {
    const char *text = ft_io_manifest_text(m, key);
    char *end = NULL;
    if (text) *hash = strtoull(text, &end, 16);
    if (text && end != text && !*end) return FT_OK;
    return ft_error(FT_ERR_DATA, "%s: %s is missing, or no hexadecimal number", m->where, key);
}

/* The data must be what it was, and the seed, which the weights of a new run come from too. */
static ft_status resume_data(trainer *t, const ft_io_manifest *m) {
    ft_io_sampler_state was;
    int64_t seed = 0;
    memset(&was, 0, sizeof was);
    FT_TRY(ft_io_manifest_int(m, "random.seed", &seed));
    FT_TRY(ft_io_manifest_int(m, "sampler.samples", &was.samples));
    FT_TRY(ft_io_manifest_int(m, "sampler.seq_len", &was.seq_len));
    FT_TRY(ft_io_manifest_int(m, "sampler.windows", &was.windows));
    FT_TRY(ft_io_manifest_int(m, "sampler.tokens", &was.tokens));
    FT_TRY(manifest_hash(m, "sampler.data_hash", &was.data_hash));
    FT_TRY(manifest_hash(m, "sampler.label_hash", &was.label_hash));
    if (seed != t->work->set->seed)
        return ft_error(FT_ERR_ARG, "%s: random.seed was %lld, here it is %lld: with another "
                        "--seed the data would have another order, and the run not be the same; "
                        "give --seed %lld", m->where, (long long)seed,
                        (long long)t->work->set->seed, (long long)seed);
    was.seed = (uint64_t)seed;
    t->first_samples = was.samples;
    t->first_step = m->step;
    return ft_io_sampler_state_set(&t->sampler, &was, m->step);
}

/* By how its manifest begins. */
static int is_checkpoint(const char *dir) {
    static const char head[] = "{\"format\":\"femtotron checkpoint\"";
    char path[1024], text[sizeof head];
    FILE *file;
    size_t n;
    snprintf(path, sizeof path, "%s/manifest.json", dir);
    file = fopen(path, "rb");
    if (!file) return 0;
    n = fread(text, 1, sizeof head - 1, file);
    fclose(file);
    return n == sizeof head - 1 && memcmp(text, head, n) == 0;
}

/* A directory of checkpoints where one of them is meant, or the reverse. */
static ft_status check_checkpoint_paths(const settings *set) {
    const char *dir = set->checkpoint_dir, *one = set->resume;
    ft_io_entry *entries = NULL;
    ft_status status = FT_OK;
    int64_t n = 0;
    if (dir && is_checkpoint(dir)) {
        size_t end = strlen(dir), above;
        while (end > 1 && dir[end - 1] == '/') end--;
        for (above = end; above > 0 && dir[above - 1] != '/';) above--;
        return ft_error(FT_ERR_ARG, "--checkpoint-dir %s is one checkpoint, not a directory of "
                        "them: give --checkpoint-dir %.*s, and --resume %.*s to continue from it",
                        dir, above > 0 ? (int)above : 1, above > 0 ? dir : ".", (int)end, dir);
    }
    if (!one || strcmp(one, "auto") == 0 || is_checkpoint(one)) return FT_OK;
    FT_TRY(ft_io_checkpoint_list(one, &n, &entries));
    if (n > 0)
        status = ft_error(FT_ERR_ARG, "--resume %s is a directory of checkpoints, not one of them: "
                          "give --checkpoint-dir %s --resume auto, or --resume %s%s%s", one, one,
                          one, one[strlen(one) - 1] == '/' ? "" : "/", entries[0].name);
    ft_io_checkpoint_list_free(entries);
    return status;
}

static void say_changes(const trainer *t, const ft_io_manifest *m) {
    const settings *set = t->work->set;
    char now[40], old[40];
    int64_t batch = 0;
    size_t i;
    for (i = 0; i < sizeof learned_by / sizeof learned_by[0]; i++) {
        const option *opt = option_at(learned_by[i].offset);
        const char *was = ft_io_manifest_text(m, learned_by[i].key);
        setting_text(set, opt->offset, now);
        if (!was || !is_in_use(set, opt->offset) || strcmp(was, now) == 0) continue;
        snprintf(old, sizeof old, "%.39s", was);
        if (opt->kind == TAKES_REAL) {
            real_text(strtod(was, NULL), old);
            real_text(strtod(now, NULL), now);
        }
        printf("resume: %s %s -> %s\n", opt->name, old, now);
    }
    if (ft_io_manifest_text(m, "sampler.global_batch") &&
        ft_io_manifest_int(m, "sampler.global_batch", &batch) == FT_OK &&
        batch != t->sampler.global_batch)
        printf("resume: global batch %lld -> %lld sequences\n", (long long)batch,
               (long long)t->sampler.global_batch);
}

static ft_status checkpoint_resume(trainer *t) {
    const settings *set = t->work->set;
    ft_io_resume from = ft_io_resume_default();
    ft_io_manifest *m;
    ft_status status = FT_OK;
    char text[32];
    from.dir = set->checkpoint_dir;
    if (strcmp(set->resume, "auto") != 0) from.path = set->resume;
    from.note = say_passed_over;
    FT_TRY(ft_io_llama_resume(t->ctx, &from, t->model, &t->work->model, t->zero, &m));
    if (!t->work->sampler) return FT_OK; /* a plan */
    if (m) status = resume_data(t, m);
    if (status == FT_OK && ft_rank(t->ctx) == 0) {
        if (m) printf("resumed from %.*s at step %lld of %lld, after %s sequences\n",
                      (int)(strrchr(m->where, '/') - m->where), m->where, (long long)m->step,
                      (long long)set->steps, thousands(t->first_samples, text));
        else printf("no checkpoint in %s: training begins at step 0\n", set->checkpoint_dir);
        if (m) say_changes(t, m);
        fflush(stdout);
    }
    ft_io_manifest_free(m);
    return status;
}

static ft_status checkpoint_open(trainer *t) {
    const settings *set = t->work->set;
    ft_io_checkpoint_config config = ft_io_checkpoint_config_default();
    config.dir = set->checkpoint_dir;
    config.keep = (int)set->keep;
    if (config.dir) FT_TRY(ft_io_checkpoint_create(t->ctx, &config, &t->checkpoint));
    return set->resume ? checkpoint_resume(t) : FT_OK;
}

static ft_status checkpoint_close(trainer *t, ft_status status) {
    if (status != FT_OK) ft_io_checkpoint_abandon(t->checkpoint);
    else status = ft_io_checkpoint_close(t->checkpoint);
    return status;
}

#else /* main() refuses the flags */
enum { HAS_CHECKPOINTS = 0 };
static ft_status checkpoint_look(trainer *t, int wait) { return (void)t, (void)wait, FT_OK; }
static ft_status check_checkpoint_paths(const settings *set) { return (void)set, FT_OK; }
static ft_status checkpoint_save(trainer *t, int64_t step) { return (void)t, (void)step, FT_OK; }
static ft_status checkpoint_open(trainer *t) { return (void)t, FT_OK; }
static ft_status checkpoint_close(trainer *t, ft_status status) { return (void)t, status; }
#endif

/* Rows of steps that will be run again are cut off the log, and a row that was not finished. So is
   the validation of the step that the checkpoint is of, which comes after it is saved, and may not
   have come: train() repeats it. */
static ft_status log_resume(trainer *t) {
    const char *path = t->work->set->log_path;
    char *row = NULL;
    size_t room = 0;
    struct stat info;
    long keep = 0;
    ssize_t n;
    FILE *file;
    if (!t->work->sampler || !t->work->set->resume || !path || ft_rank(t->ctx) != 0) return FT_OK;
    /* A pipe or a device has nothing to be cut, and may have nothing to be read, ever. */
    file = stat(path, &info) == 0 && S_ISREG(info.st_mode) ? fopen(path, "r") : NULL;
    while (file && (n = getline(&row, &room, file)) > 0 && row[n - 1] == '\n') {
        long long step = 0;
        if (sscanf(row, "{\"step\":%lld", &step) == 1 &&
            (step > t->first_step ||
             (step == t->first_step && step > 0 && evaluation_is_due(t->work, step) &&
              strstr(row, "\"eval_loss\":")))) break;
        keep += (long)n;
    }
    free(row);
    if (file) fclose(file);
    if (file && truncate(path, keep) != 0)
        return ft_error(FT_ERR_IO, "%s: cannot be cut to the rows before step %lld: %s", path,
                        (long long)t->first_step, strerror(errno));
    return ft_io_log_open(path, 1, &t->work->log);
}

/* ------------------------------------------------------------------------------------ the steps */

static ft_status train(trainer *t) {
    job *work = t->work;
    ft_lr schedule = learning_rate(work->set);
    double begin = now_s();
    int64_t step, every = work->set->checkpoint_every;
    int stop = 0;
    if (ft_rank(t->ctx) == 0) work->begin = begin;
    if (t->first_step > 0) FT_TRY(maybe_evaluate(t, t->first_step)); /* see log_resume() */
    for (step = t->first_step; step < work->steps && !stop; step++) {
        double lr = ft_lr_at(&schedule, step), step_begin = now_s();
        ft_zero_report report;
        if (work->records) ft_mem_timeline_clear(t->ctx);
        FT_TRY(ft_mem_phase_begin(t->ctx, "step"));
        FT_TRY(train_step(t, step, lr));
        FT_TRY(ft_zero_report_get(t->zero, &report)); /* waits for the step to be over */
        FT_TRY(stop_answer(t, &stop));
        if (step == t->first_step) {
            ft_flops flops;
            ft_flops_get(t->ctx, &flops);
            work->results[ft_rank(t->ctx)].step_flops = flops.forward + flops.backward;
        }
        FT_TRY(ft_mem_phase_end(t->ctx));
        if (work->records && (stop || step == work->steps - 1))
            FT_TRY(ft_io_record_take(t->ctx, &work->records[ft_rank(t->ctx)]));
        if (work->sampler && ft_rank(t->ctx) == 0) {
            work->report = report;
            if (work->losses) work->losses[step] = report.loss;
            FT_TRY(report_step(work, t, step + 1, lr, now_s() - step_begin));
        }
        FT_TRY(checkpoint_look(t, 0));
        if (t->checkpoint &&
            (stop || step + 1 == work->steps || (every && (step + 1) % every == 0)))
            FT_TRY(checkpoint_save(t, step + 1));
        if (!stop) FT_TRY(maybe_evaluate(t, step + 1));
    }
    if (ft_rank(t->ctx) != 0 && ft_env_rank() < 0) return FT_OK; /* a process has its own job */
    work->seconds = now_s() - begin;
    work->first_step = t->first_step;
    work->steps_done = step;
    return FT_OK;
}

/* By the names that the headers give their groups. */
static sender sender_of(const char *group) {
    if (strncmp(group, "zero tp", 7) == 0) return SENT_TP;
    if (strncmp(group, "zero scalars", 12) == 0) return SENT_OTHER;
    if (strncmp(group, "zero", 4) == 0) return SENT_ZERO;
    if (strncmp(group, "tp", 2) == 0) return SENT_TP;
    return strncmp(group, "pp", 2) == 0 ? SENT_PP : SENT_OTHER;
}

/* What training sends: what was sent before it, to bring the weights, is taken off again. */
static void count_traffic(trainer *t, int sign) {
    enum { MAX_GROUPS = 16 };
    rank_result *result = &t->work->results[ft_rank(t->ctx)];
    if (sign < 0) {
        memset(result->sent, 0, sizeof result->sent);
        memset(result->sent_by, 0, sizeof result->sent_by);
    }
    ft_traffic traffic[MAX_GROUPS];
    int groups = ft_traffic_get(t->ctx, MAX_GROUPS, traffic), g, kind;
    for (g = 0; g < groups && g < MAX_GROUPS; g++)
        for (kind = 0; kind < FT_COLLECTIVE_COUNT; kind++) {
            result->sent[kind] += sign * traffic[g].sent_bytes[kind];
            result->sent_by[sender_of(traffic[g].group)] += sign * traffic[g].sent_bytes[kind];
        }
}

/* Kept before anything but training has run: sampling and hashing are not part of the plan. */
static ft_status keep_result(trainer *t) {
    rank_result *result = &t->work->results[ft_rank(t->ctx)];
    ft_mem_get(t->ctx, &result->memory);
    ft_flops_get(t->ctx, &result->flops);
    count_traffic(t, 1);
    result->gpu = ft_ctx_gpu(t->ctx);
    if (result->gpu >= 0) {
        size_t free_bytes, total_bytes;
        FT_TRY(ft_gpu_memory((int)result->gpu, &free_bytes, &total_bytes));
        result->gpu_used = (int64_t)(total_bytes - free_bytes);
    }
    return FT_OK;
}

/* Under a launcher every process has a rank's result, and rank 0 prints them all. */
static ft_status share_results(trainer *t) {
    int64_t each = (int64_t)(sizeof(rank_result) / sizeof(int32_t)), all = each * ft_world(t->ctx);
    ft_tensor *mine, *others;
    ft_group *world;
    FT_TRY(ft_group_strided(t->ctx, "results", 0, 1, ft_world(t->ctx), &world));
    FT_TRY(ft_tensor_create(t->ctx, &mine, FT_I32, 1, &each, FT_TAG_COMM));
    FT_TRY(ft_tensor_create(t->ctx, &others, FT_I32, 1, &all, FT_TAG_COMM));
    FT_TRY(ft_upload(mine, &t->work->results[ft_rank(t->ctx)]));
    FT_TRY(ft_all_gather(world, ft_stream_get(t->ctx, FT_STREAM_COMPUTE), mine, others));
    FT_TRY(ft_download(others, t->work->results));
    ft_tensor_free(mine);
    ft_tensor_free(others);
    return FT_OK;
}

/* ------------------------------------------------------------------------------------- sampling */

static double uniform(uint64_t *state) { /* splitmix64 (Steele et al. 2014), in [0, 1) */
    uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (double)((z ^ (z >> 31)) >> 11) * (1.0 / 9007199254740992.0);
}

/* Draws from softmax(logits[V] / temperature). */
static int32_t draw(const float *logits, int64_t V, double temperature, uint64_t *state) {
    double top = logits[0], sum = 0, left;
    int64_t v;
    for (v = 1; v < V; v++)
        if (logits[v] > top) top = logits[v];
    for (v = 0; v < V; v++) sum += exp(((double)logits[v] - top) / temperature);
    left = uniform(state) * sum;
    for (v = 0; v < V - 1; v++) {
        left -= exp(((double)logits[v] - top) / temperature);
        if (left < 0) break;
    }
    return (int32_t)v;
}

/* logits[V] after context[n]. Every rank must call it: in stage 3 each holds a part of the weights.
   The memory is not part of the plan. */
static ft_status next_logits(trainer *t, const int32_t *context, int64_t n, float *logits) {
    int64_t shape[2], V = t->work->model.vocab, v;
    ft_tensor *tokens, *out;
    shape[0] = 1;
    shape[1] = n;
    FT_TRY(ft_tensor_create(t->ctx, &tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_upload(tokens, context));
    FT_TRY(ft_llama_logits(t->model, tokens, 1, &out));
    FT_TRY(ft_download(out, logits));
    if (out->dtype == FT_BF16) { /* widened in place, from the end */
        const uint16_t *narrow = (const uint16_t *)(const void *)logits;
        for (v = V - 1; v >= 0; v--) {
            uint16_t bits;
            memcpy(&bits, narrow + v, sizeof bits);
            logits[v] = ft_f32_from_bf16(bits);
        }
    }
    ft_tensor_free(out);
    ft_tensor_free(tokens);
    return FT_OK;
}

/* Appends N tokens to the prompt. Rank 0 draws; the others only bring their part of the weights,
   for which a context of any one token is enough. */
static ft_status sample(trainer *t) {
    const job *work = t->work;
    int64_t T = work->set->seq_len, V = work->model.vocab, n;
    uint64_t state = (uint64_t)work->set->seed;
    int32_t any = 0;
    float *logits = (float *)ft_host_alloc(t->ctx, (size_t)V * sizeof(float));
    if (!logits) return FT_ERR_OOM;
    for (n = work->prompt; n < work->prompt + work->set->sample; n++) {
        int64_t length = n < T ? n : T;
        if (ft_rank(t->ctx) != 0) {
            FT_TRY(next_logits(t, &any, 1, logits));
            continue;
        }
        FT_TRY(next_logits(t, work->text + n - length, length, logits));
        work->text[n] = draw(logits, V, 0.8, &state);
    }
    return FT_OK;
}

static void print_sample(const job *work) {
    int64_t i;
    printf("\nsample: the first %lld bytes of the data, then %lld of the model\n----\n",
           (long long)work->prompt, (long long)work->set->sample);
    for (i = 0; i < work->prompt + work->set->sample; i++) {
        int32_t token = work->text[i];
        if (token == '\n' || token == '\t' || (token >= 32 && token < 127)) putchar((int)token);
        else printf("\\x%02x", (unsigned)token);
    }
    puts("\n----");
}

/* ---------------------------------------------------------------------------------------- ranks */

/* Weights from files, before the first step. A checkpoint that is resumed replaces them. */
static ft_status load_weights(trainer *t) {
#ifdef FT_CJSON
    if (t->work->source) return ft_io_llama_load(t->ctx, t->zero, t->model, t->work->source);
#endif
    (void)t;
    return FT_OK;
}

static ft_status export_model(trainer *t) {
    const settings *set = t->work->set;
    ft_io_export how = ft_io_export_default();
    struct stat info;
    if (!set->export_dir) return FT_OK;
    how.dtype = set->export_dtype ? FT_IO_BF16 : FT_IO_F32;
    how.max_shard_bytes = set->export_shard;
    how.max_positions = set->seq_len;
    if (set->has_like) how.like = &set->like;
    how.copy_from = set->init_from;
    if (!set->init_from && set->model && stat(set->model, &info) == 0 && S_ISDIR(info.st_mode))
        how.copy_from = set->model;
    return ft_io_llama_export(t->ctx, t->zero, t->model, set->export_dir, &how);
}

static ft_status train_from_checkpoint(trainer *t) {
    FT_TRY(checkpoint_open(t));
    FT_TRY(log_resume(t));
    /* Once more: log, events and checkpoints are there now, and may lie where the export goes. */
    if (t->work->sampler && t->work->set->export_dir && ft_rank(t->ctx) == 0)
        FT_TRY(ft_io_export_check(t->work->set->export_dir));
    count_traffic(t, -1);
    FT_TRY(train(t));
    if (t->work->set->resume) { /* without a step left, the set-up ends here */
        FT_TRY(ft_mem_phase_begin(t->ctx, "trained"));
        FT_TRY(ft_mem_phase_end(t->ctx));
    }
    return checkpoint_look(t, 1);
}

static ft_status rank_main(ft_ctx *ctx, void *user) {
    job *work = (job *)user;
    const int speaks = ft_rank(ctx) == 0 || ft_env_rank() >= 0; /* for its process */
    uint64_t hash;
    trainer t;
    memset(&t, 0, sizeof t);
    t.ctx = ctx;
    t.work = work;
    FT_TRY(trainer_create(&t));
    if (work->eval) FT_TRY(ft_group_strided(ctx, "eval", 0, 1, ft_world(ctx), &t.world));
    FT_TRY(load_weights(&t));
    if (work->sampler && speaks) catch_signals();
    FT_TRY(checkpoint_close(&t, train_from_checkpoint(&t)));
    FT_TRY(keep_result(&t));
    if (!work->sampler) return FT_OK;
    if (speaks) release_signals();
    if (ft_env_rank() >= 0) FT_TRY(share_results(&t));
    if (ft_rank(ctx) == 0 && work->line_open) putchar('\n');
    if (ft_rank(ctx) == 0) work->line_open = 0;
    FT_TRY(export_model(&t));
    if (work->set->hash) {
        FT_TRY(ft_llama_hash(t.model, &hash));
        if (ft_rank(ctx) == 0) work->hash = hash;
    }
    return work->set->sample ? sample(&t) : FT_OK;
}

/* A GPU's memory is one arena unless another allocator is asked for. */
static ft_allocator allocator_of(const settings *set) {
    if (set->allocator == FT_ALLOC_DEFAULT && set->device == FT_GPU) return FT_ALLOC_ARENA;
    return (ft_allocator)set->allocator;
}

static ft_status launch(job *work, ft_device device) {
    ft_config config = ft_config_default();
    config.world = rank_count(work->set);
    config.device = device;
    config.plan_for = work->set->device == FT_GPU || work->set->plan_for ? FT_GPU : FT_CPU;
    config.gpus = (int)work->set->gpus;
    config.ranks_per_gpu = (int)work->set->ranks_per_gpu;
    config.gemm_table = work->set->gemm_table;
    config.transport = (ft_transport)work->set->transport;
    config.timeout_s = (double)work->set->timeout_s;
    config.mem_plan = work->mem_plan;
    config.timeline = work->records != NULL;
    if (device == FT_META) {
        config.only_rank = work->only_rank;
    } else {
        config.allocator = allocator_of(work->set);
        config.memory_limit = (size_t)work->set->memory_limit;
    }
    if (device == FT_GPU && ft_env_rank() >= 0) return ft_launch_env(&config, rank_main, work);
    return ft_launch(&config, rank_main, work);
}

/* --------------------------------------------------------------------------------------- tables */

/* Columns a table of values[ranks][columns] needs for column c: 0 if it holds nothing but zeros. */
static int column_width(int ranks, int columns, int c, const char *name, const int64_t *values) {
    char text[32];
    int r, widest = 0;
    for (r = 0; r < ranks; r++) {
        int n = (int)strlen(thousands(values[r * columns + c], text));
        if (values[r * columns + c] != 0 && n > widest) widest = n;
    }
    if (widest > 0 && widest < (int)strlen(name)) widest = (int)strlen(name);
    return widest > 0 ? widest + 2 : 0;
}

/* A row of values[columns] for each rank. Neighbours with equal rows share one, and columns of
   nothing but zeros are left out. */
static void print_ranks(int ranks, int columns, const char *const *names, const int64_t *values) {
    enum { MAX_COLUMNS = 16 };
    int first, last, c, width[MAX_COLUMNS];
    char text[32];
    printf("  %-9s", "rank");
    for (c = 0; c < columns; c++) {
        width[c] = column_width(ranks, columns, c, names[c], values);
        if (width[c]) printf("%*s", width[c], names[c]);
    }
    putchar('\n');
    for (first = 0; first < ranks; first = last + 1) {
        size_t row_bytes = (size_t)columns * sizeof values[0];
        const int64_t *row = values + first * columns;
        for (last = first; last + 1 < ranks; last++)
            if (memcmp(row, values + (last + 1) * columns, row_bytes) != 0) break;
        if (first == last) snprintf(text, sizeof text, "%d", first);
        else snprintf(text, sizeof text, "%d-%d", first, last);
        printf("  %-9s", text);
        for (c = 0; c < columns; c++)
            if (width[c]) printf("%*s", width[c], thousands(row[c], text));
        putchar('\n');
    }
}

static ft_status print_memory(int ranks, const rank_result *results) {
    enum { COLUMNS = FT_TAG_COUNT + 1 };
    const char *names[COLUMNS];
    int64_t *values = (int64_t *)malloc((size_t)ranks * COLUMNS * sizeof *values);
    int r, tag;
    if (!values) return ft_error(FT_ERR_OOM, "no memory for a table of %d ranks", ranks);
    names[0] = "peak";
    for (tag = 0; tag < FT_TAG_COUNT; tag++) names[tag + 1] = ft_tag_name((ft_tag)tag);
    for (r = 0; r < ranks; r++) {
        values[r * COLUMNS] = (int64_t)results[r].memory.peak_bytes;
        for (tag = 0; tag < FT_TAG_COUNT; tag++)
            values[r * COLUMNS + tag + 1] = (int64_t)results[r].memory.at_peak[tag];
    }
    print_ranks(ranks, COLUMNS, names, values);
    free(values);
    printf("  rank 0's peak is at: %s, in %s\n", results[0].memory.peak_where,
           results[0].memory.peak_action[0] ? results[0].memory.peak_action : "the set-up");
    return FT_OK;
}

static ft_status print_traffic(int ranks, const rank_result *results) {
    const char *names[FT_COLLECTIVE_COUNT];
    size_t row_bytes = sizeof results[0].sent;
    int64_t *values = (int64_t *)malloc((size_t)ranks * row_bytes), total = 0;
    int r, kind;
    if (!values) return ft_error(FT_ERR_OOM, "no memory for a table of %d ranks", ranks);
    for (r = 0; r < ranks; r++) {
        memcpy(values + r * FT_COLLECTIVE_COUNT, results[r].sent, row_bytes);
        for (kind = 0; kind < FT_COLLECTIVE_COUNT; kind++) total += results[r].sent[kind];
    }
    for (kind = 0; kind < FT_COLLECTIVE_COUNT; kind++)
        names[kind] = ft_collective_name((ft_collective)kind);
    if (total > 0) print_ranks(ranks, FT_COLLECTIVE_COUNT, names, values);
    else puts("  none");
    free(values);
    return FT_OK;
}

static void write_memory_json(ft_io_json *json, int ranks, const rank_result *results) {
    int r, tag;
    ft_io_json_begin_object(json);
    ft_io_json_key(json, "ranks");
    ft_io_json_begin_array(json);
    for (r = 0; r < ranks; r++) {
        ft_io_json_begin_object(json);
        ft_io_json_key(json, "rank");
        ft_io_json_int(json, r);
        ft_io_json_key(json, "peak_bytes");
        ft_io_json_int(json, (int64_t)results[r].memory.peak_bytes);
        ft_io_json_key(json, "tags");
        ft_io_json_begin_object(json);
        for (tag = 0; tag < FT_TAG_COUNT; tag++) {
            ft_io_json_key(json, ft_tag_name((ft_tag)tag));
            ft_io_json_int(json, (int64_t)results[r].memory.at_peak[tag]);
        }
        ft_io_json_end_object(json);
        ft_io_json_end_object(json);
    }
    ft_io_json_end_array(json);
    ft_io_json_end_object(json);
}

/* The ranks whose peak, or a tag's share of it, is not what was planned. */
static int planned_wrong(int ranks, const rank_result *plan, const rank_result *run) {
    int r, wrong = 0;
    for (r = 0; r < ranks; r++)
        wrong += plan[r].memory.peak_bytes != run[r].memory.peak_bytes ||
                 memcmp(plan[r].memory.at_peak, run[r].memory.at_peak,
                        sizeof run[r].memory.at_peak) != 0;
    return wrong;
}

/* ---------------------------------------------------------------------------------- the program */

typedef struct program { /* what main() opens and must close */
    settings set;
    ft_llama_config model;
    ft_io_data *data, *eval_data;
#ifdef FT_CJSON
    ft_io_model *source;        /* of --init-from */
#endif
    ft_io_sampler sampler;
    ft_io_eval eval;
    int64_t *first_layer;       /* [pp V + 1] */
    ft_sac *sac;                /* [layers] */
    int32_t *text;              /* [prompt + N] */
    int64_t prompt;
    rank_result *plan, *run;    /* [R] */
    ft_io_record *records;      /* [R], for --report and --trace */
    double *losses;             /* [steps] */
    int argc;
    char **argv;
    ft_mem_plan *mem_plan;
    ft_io_log *log;
    ft_io_tb *tb;
    ft_io_json *memory_json;
    double peak_flops;          /* of the GPUs in use; 0: not known, or none */
    int64_t first_step, steps_done; /* of the run */
    int exit_status;            /* of a run that ended without an error */
    int line_open;              /* a live line is to be ended before an error is printed */
} program;

/* Dense peaks of the makers' data sheets in TFLOP/s: bf16 with fp32 sums, and fp32. */
static double chip_peak(const char *name, ft_dtype dtype) {
    static const struct { const char *name; double bf16, fp32; } chips[] = {
        {"H100 PCIe", 756, 51}, {"H100 NVL", 835, 60}, {"H100", 989, 67}, {"H200", 989, 67},
        {"GH200", 989, 67}, {"B200", 2250, 75}, {"A100", 312, 19.5}, {"A800", 312, 19.5},
        {"L40S", 362, 91.6}, {"L4", 121, 30.3}, {"RTX 4090", 165, 82.6},
        {"RTX 3090", 71, 35.6}, {"A10", 125, 31.2}
    };
    size_t i;
    for (i = 0; i < sizeof chips / sizeof chips[0]; i++) {
        const char *at = strstr(name, chips[i].name), *after = at ? at + strlen(chips[i].name) : "";
        if (!at || (*after >= '0' && *after <= '9') || (*after >= 'A' && *after <= 'Z')) continue;
        return 1e12 * (dtype == FT_BF16 ? chips[i].bf16 : chips[i].fp32);
    }
    return 0;
}

/* Free bytes of the fullest of the GPUs in use; of a launcher's process: of its own. */
static ft_status gpu_least_free(int gpus, size_t *least) {
    int local = ft_env_local_rank(), visible, i;
    size_t free_bytes, total_bytes;
    FT_TRY(ft_gpu_count(&visible));
    *least = 0;
    for (i = 0; i < gpus && i < visible; i++) {
        if (local >= 0 && i != (local < visible ? local : 0)) continue;
        FT_TRY(ft_gpu_memory(i, &free_bytes, &total_bytes));
        if (*least == 0 || free_bytes < *least) *least = free_bytes;
    }
    return FT_OK;
}

/* Decides what `auto` is, and says what the run takes. */
static ft_status choose_device(program *p) {
    settings *set = &p->set;
    int gpus = 0, ranks = rank_count(set);
    char name[FT_GPU_NAME_BYTES];
    FT_TRY(ft_gpu_count(&gpus));
    if (set->device == DEVICE_AUTO) set->device = gpus > 0 ? FT_GPU : FT_CPU;
    if (set->device != FT_GPU && (set->gpus || set->ranks_per_gpu || set->gemm_table ||
                                  set->transport))
        return ft_error(FT_ERR_ARG, "--gpus, --ranks-per-gpu, --transport nccl and --gemm-tune "
                        "need --device cuda");
    if (set->plan_for && set->device == FT_CPU)
        return ft_error(FT_ERR_ARG, "--plan-for cuda is for --device meta: a run on the CPU is "
                        "planned for the CPU");
    if (ft_env_rank() >= 0 && (set->gpus || set->ranks_per_gpu || set->report_path ||
                               set->trace_path))
        return ft_error(FT_ERR_UNSUPPORTED, "under a launcher each process has one GPU and the "
                        "record of one rank: --gpus, --ranks-per-gpu, --report and "
                        "--trace are for ranks as threads");
    if (ft_env_rank() >= 0 && set->device == FT_CPU)
        return ft_error(FT_ERR_UNSUPPORTED, "processes talk over NCCL, between GPUs: without them "
                        "start one process, whose ranks are threads");
    if (set->device == FT_CPU)
        printf("device  cpu, %d rank%s as threads%s\n", ranks, s_of(ranks),
               gpus ? "" : ", no GPU in use");
    if (set->device != FT_GPU) return FT_OK;
    if (gpus == 0)
        return ft_error(FT_ERR_UNSUPPORTED, "--device cuda: no GPU is visible to this program; it "
                        "must be built by make cuda, and the driver be there. --device cpu trains "
                        "without");
    FT_TRY(ft_gpu_name(0, name));
    if (set->gpus) gpus = (int)set->gpus;
    if (gpus > ranks || ft_env_rank() >= 0) gpus = ranks; /* a process has one */
    p->peak_flops = gpus * chip_peak(name, (ft_dtype)set->dtype);
    if (!set->memory_limit) { /* what a rank may take, when all that share a GPU take as much */
        size_t least = 0;
        FT_TRY(gpu_least_free(gpus, &least));
        if (ft_env_rank() < 0) least /= (size_t)((ranks + gpus - 1) / gpus);
        set->memory_limit = (int64_t)least;
    }
    printf("device  cuda, %d rank%s as ", ranks, s_of(ranks));
    if (ft_env_rank() >= 0) printf("processes, %s\n", name);
    else printf("threads on %d x %s\n", gpus, name);
    return FT_OK;
}

static void model_config(const settings *set, ft_llama_config *model) {
    *model = ft_llama_config_default();
    model->vocab = set->vocab;
    model->hidden = set->hidden;
    model->layers = set->layers;
    model->heads = set->heads;
    model->kv_heads = set->kv_heads;
    model->head_dim = set->head_dim;
    model->intermediate = set->intermediate;
    model->tie_embeddings = (int)set->tie_embeddings;
    model->qkv_bias = (int)set->qkv_bias;
    model->o_bias = (int)set->o_bias;
    model->mlp_bias = (int)set->mlp_bias;
    model->qk_norm = (int)set->qk_norm;
    if (!set->has_like) return;
    model->norm_eps = set->like.norm_eps;
    model->rope_theta = set->like.rope_theta;
    model->rope_scaling = set->like.rope_scaling;
    if (set->like.init_std > 0) model->init_std = set->like.init_std;
    if (set->init_from) model->init_std = 0; /* weights come from files: none are drawn */
}

#ifdef FT_CJSON
/* --model beside --init-from may change settings, as of RoPE, but no shape. */
static ft_status check_source(const settings *set, const ft_llama_config *m) {
    ft_io_hf_config c;
    FT_TRY(ft_io_hf_config_read(set->init_from, &c));
    if (c.vocab == m->vocab && c.hidden == m->hidden && c.layers == m->layers &&
        c.heads == m->heads && c.kv_heads == m->kv_heads && c.head_dim == m->head_dim &&
        c.intermediate == m->intermediate && c.tie_embeddings == m->tie_embeddings &&
        c.qkv_bias == m->qkv_bias && c.o_bias == m->o_bias && c.mlp_bias == m->mlp_bias &&
        c.qk_norm == m->qk_norm)
        return FT_OK;
    return ft_error(FT_ERR_ARG, "--init-from %s has other sizes than --model %s: %lld layers, "
                    "hidden %lld, %lld heads (%lld kv) of %lld, feed-forward %lld, vocabulary %lld",
                    set->init_from, set->model, (long long)c.layers, (long long)c.hidden,
                    (long long)c.heads, (long long)c.kv_heads, (long long)c.head_dim,
                    (long long)c.intermediate, (long long)c.vocab);
}
#endif

/* A model to read, and whether one can be written: known before the first step. */
static ft_status open_model(program *p) {
    const settings *set = &p->set;
    ft_io_hf_config config;
    if (set->has_like)
        FT_TRY(ft_io_hf_config_check_length(&set->like, set->model ? set->model : set->init_from,
                                            set->seq_len));
#ifdef FT_CJSON
    if (set->init_from && set->model) FT_TRY(check_source(set, &p->model));
#endif
    if (set->device == FT_META) return FT_OK;
    if (set->export_dir) {
        FT_TRY(ft_io_export_check(set->export_dir));
        FT_TRY(ft_io_llama_hf_config(&p->model, set->has_like ? &set->like : NULL, &config));
    }
#ifdef FT_CJSON
    if (set->init_from) FT_TRY(ft_io_model_open(set->init_from, &p->source));
#endif
    return FT_OK;
}

/* The first bytes of the data start the sample. */
static ft_status open_prompt(program *p) {
    const int64_t most = 32;
    int64_t tokens = ft_io_data_tokens(p->data);
    if (!p->set.sample) return FT_OK;
    if (ft_io_data_format(p->data) != FT_IO_FORMAT_BYTES)
        return ft_error(FT_ERR_UNSUPPORTED, "--sample writes bytes: it needs --data-format bytes; "
                        "the data is %s", ft_io_format_name(ft_io_data_format(p->data)));
    p->prompt = tokens < most ? tokens : most;
    p->text = (int32_t *)calloc((size_t)(p->prompt + p->set.sample), sizeof *p->text);
    if (!p->text)
        return ft_error(FT_ERR_OOM, "no memory for %lld sampled bytes", (long long)p->set.sample);
    return ft_io_data_read(p->data, 0, p->prompt, p->text);
}

/* Multiplications of a layer, and of the head, for one token: what stages are balanced by. */
static double layer_cost(const ft_llama_config *m, int64_t T) {
    double C = (double)m->hidden, D = (double)m->head_dim, H = (double)m->heads;
    return (2 * H + 2 * (double)m->kv_heads) * D * C + 3 * C * (double)m->intermediate +
           (double)T * H * D;
}

/* first_layer[pp V + 1] from --pp-layers. */
static ft_status cut_layers(program *p) {
    const settings *set = &p->set;
    int stages = (int)(set->pp * set->virtual_stages), layers = (int)set->layers, i;
    double *cost = (double *)calloc((size_t)layers, sizeof *cost);
    ft_status status;
    p->first_layer = (int64_t *)calloc((size_t)stages + 1, sizeof *p->first_layer);
    if (!cost || !p->first_layer) {
        free(cost);
        return ft_error(FT_ERR_OOM, "no memory to cut %d layers in %d stages", layers, stages);
    }
    for (i = 0; i < layers; i++) cost[i] = layer_cost(&p->model, set->seq_len);
    if (!set->pp_layers) status = ft_pp_layers_uniform(layers, stages, p->first_layer);
    else if (strcmp(set->pp_layers, "balanced") == 0)
        status = ft_pp_layers_balance(layers, cost, 0, (double)p->model.hidden *
                                      (double)p->model.vocab, stages, p->first_layer);
    else status = ft_pp_layers_parse(set->pp_layers, layers, stages, p->first_layer);
    free(cost);
    return status;
}

/* What the mesh can not do is refused before a rank starts. */
static ft_status check_layout(program *p) {
    const settings *set = &p->set;
    ft_pp_config pipeline = pipeline_config(set);
    ft_lr lr = learning_rate(set);
    FT_TRY(ft_lr_check(&lr));
    FT_TRY(ft_pp_check(&pipeline));
    FT_TRY(cut_layers(p));
    if (set->dp * set->tp > 4096 / set->pp)
        return ft_error(FT_ERR_ARG,
                        "dp %lld x tp %lld x pp %lld: at most 4096 ranks in one process",
                        (long long)set->dp, (long long)set->tp, (long long)set->pp);
    if (set->sequence_parallel && set->tp == 1)
        return ft_error(FT_ERR_ARG,
                        "--sp cuts tokens over tensor-parallel ranks: it needs --tp 2 or "
                        "more");
    if (set->sample && set->tp * set->pp > 1)
        return ft_error(FT_ERR_UNSUPPORTED,
                        "--sample needs a whole model on each rank: --tp 1 --pp 1");
    if (set->data_format && set->token_dtype && set->data_format != set->token_dtype)
        return ft_error(FT_ERR_ARG, "--data-format %s and --token-dtype %s say different things: "
                        "leave one out", ft_io_format_name((ft_io_format)set->data_format),
                        ft_io_format_name((ft_io_format)set->token_dtype));
    if (set->sample && (set->token_dtype > FT_IO_FORMAT_BYTES ||
                        set->data_format > FT_IO_FORMAT_BYTES))
        return ft_error(FT_ERR_UNSUPPORTED, "--sample writes bytes: it needs --data-format bytes");
    if ((set->checkpoint_dir || set->resume) && !HAS_CHECKPOINTS)
        return ft_error(FT_ERR_UNSUPPORTED, "this trainer was built without checkpoints, which "
                        "need cJSON and xxHash: install both and make build/train_llama, or "
                        "compile with -DFT_CJSON -DFT_XXHASH and link -lcjson -lxxhash");
    if (!set->checkpoint_dir && (set->checkpoint_every || set->keep))
        return ft_error(FT_ERR_ARG, "%s needs --checkpoint-dir", set->keep ? "--keep"
                                                                           : "--checkpoint-every");
    if (!set->checkpoint_dir && set->resume && strcmp(set->resume, "auto") == 0)
        return ft_error(FT_ERR_ARG, "--resume auto looks in --checkpoint-dir, which is missing");
    if (set->eval_every && !set->eval_data.n)
        return ft_error(FT_ERR_ARG, "--eval-every needs --eval-data");
    return ft_tp_check((int)set->tp, (int)set->sequence_parallel, p->model.heads, p->model.kv_heads,
                       p->model.intermediate, set->micro_batch_size, set->seq_len);
}

/* An output must not be one of the inputs: data are mapped, settings are wanted again. */
static ft_status check_output(const program *p, const char *path) {
    const ft_io_data *inputs[2];
    struct stat out, in;
    const char *file;
    int k, i;
    inputs[0] = p->data;
    inputs[1] = p->eval_data;
    if (!path || stat(path, &out) != 0) return FT_OK; /* none, or a new file */
    for (k = 0; k < 2; k++) {
        file = k ? p->set.gemm_table : p->set.config_path;
        if (file && stat(file, &in) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
            return ft_error(FT_ERR_ARG, "%s would be written over %s %s", path,
                            k ? "--gemm-tune" : "--config", file);
    }
    for (k = 0; k < 2; k++)
        for (i = 0; (file = ft_io_data_file(inputs[k], i)) != NULL; i++)
            if (stat(file, &in) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
                return ft_error(FT_ERR_ARG, "%s would be written over the data in %s", path, file);
    return FT_OK;
}

/* Nor may two outputs be one file. */
static ft_status check_outputs(const program *p) {
    const settings *set = &p->set;
    const char *path[4];
    struct stat a, b;
    int i, k;
    path[0] = set->log_path;
    path[1] = set->memory_json_path;
    path[2] = set->report_path;
    path[3] = set->trace_path;
    for (i = 0; i < 4; i++) {
        FT_TRY(check_output(p, path[i]));
        for (k = 0; k < i && path[i]; k++) {
            if (!path[k]) continue;
            if (strcmp(path[i], path[k]) == 0)
                return ft_error(FT_ERR_ARG, "%s: two outputs name the same file", path[i]);
            if (stat(path[i], &a) == 0 && stat(path[k], &b) == 0 && a.st_dev == b.st_dev &&
                a.st_ino == b.st_ino)
                return ft_error(FT_ERR_ARG, "%s and %s are the same file", path[i], path[k]);
        }
    }
    return FT_OK;
}

static ft_status open_files(const settings *set, const paths *files, ft_io_data **data) {
    ft_io_data_config config = ft_io_data_config_default();
    config.format = (ft_io_format)(set->data_format ? set->data_format : set->token_dtype);
    config.eod_token = set->eod_token;
    config.seq_len = set->seq_len;
    FT_TRY(ft_io_data_open_files(files->path, files->n, &config, data));
    if (set->doc_mask && !ft_io_data_has_documents(*data))
        return ft_error(FT_ERR_ARG, "--doc-mask: %s does not say where documents end: give "
                        "--eod-token, Megatron-LM's data, or .jsonl", files->path[0]);
    if (set->eod_token >= set->vocab)
        return ft_error(FT_ERR_ARG, "--eod-token %lld is outside the vocabulary of %lld",
                        (long long)set->eod_token, (long long)set->vocab);
    return ft_io_data_check_vocab(*data, set->vocab);
}

static ft_status open_data(program *p, int64_t batch) {
    const settings *set = &p->set;
    if (set->data.n > 0) {
        FT_TRY(open_files(set, &set->data, &p->data));
        FT_TRY(ft_io_sampler_init(&p->sampler, p->data, set->seq_len, batch * set->micro_batches,
                                  (uint64_t)set->seed));
        FT_TRY(open_prompt(p));
    }
    if (set->eval_data.n == 0) return FT_OK;
    FT_TRY(open_files(set, &set->eval_data, &p->eval_data));
    return ft_io_eval_init(&p->eval, p->eval_data, set->seq_len, (int)set->micro_batch_size,
                           (int)set->dp, 0);
}

/* All that can be refused before a rank starts. */
static ft_status open_inputs(program *p) {
    const settings *set = &p->set;
    int64_t batch = set->dp * set->micro_batch_size;
    model_config(set, &p->model);
    FT_TRY(ft_llama_check(&p->model));
    FT_TRY(open_model(p));
    if (batch > INT32_MAX / set->micro_batches ||
        set->micro_batch_size * set->micro_batches > INT32_MAX / set->seq_len)
        return ft_error(FT_ERR_ARG, "the batch is too large: %lld ranks x %lld sequences x %lld "
                        "micro-batches of %lld tokens; the sequences of a step, and "
                        "the tokens of a dp rank's step, are at most %d", (long long)set->dp,
                        (long long)set->micro_batch_size, (long long)set->micro_batches,
                        (long long)set->seq_len, INT32_MAX);
    FT_TRY(check_layout(p));
    if (set->device != FT_META) FT_TRY(check_checkpoint_paths(set));
    FT_TRY(open_data(p, batch));
    FT_TRY(check_outputs(p));
    if (set->log_path && set->device != FT_META && ft_env_rank() <= 0)
        FT_TRY(ft_io_log_open(set->log_path, set->resume != NULL, &p->log));
    if (set->resume && p->log) { /* it can be written; rank 0 opens it where the run resumes */
        ft_status closed = ft_io_log_close(p->log);
        p->log = NULL;
        FT_TRY(closed);
    }
    if (set->tensorboard && set->device != FT_META && ft_env_rank() <= 0)
        FT_TRY(ft_io_tb_open(set->tensorboard, wall_time(), &p->tb));
    p->sac = (ft_sac *)calloc((size_t)set->layers, sizeof *p->sac);
    p->plan = (rank_result *)calloc((size_t)rank_count(set), sizeof *p->plan);
    p->run = (rank_result *)calloc((size_t)rank_count(set), sizeof *p->run);
    if (set->report_path || set->trace_path) {
        p->records = (ft_io_record *)calloc((size_t)rank_count(set), sizeof *p->records);
        p->losses = (double *)calloc((size_t)set->steps, sizeof *p->losses);
        if (!p->records || !p->losses)
            return ft_error(FT_ERR_OOM, "no memory for a record of %d ranks", rank_count(set));
    }
    if (!p->sac || !p->plan || !p->run)
        return ft_error(FT_ERR_OOM, "no memory for the results of %d ranks", rank_count(set));
    return FT_OK;
}

/* Mesh, layers of each stage, the schedule. */
static ft_status print_layout(const program *p) {
    const settings *set = &p->set;
    ft_pp_config config = pipeline_config(set);
    ft_pp_schedule *schedule;
    ft_status status;
    int v, stages = (int)(set->pp * set->virtual_stages);
    printf("mesh    rank = (pp %lld x dp + dp %lld) x tp + tp %lld, %d rank%s\n",
           (long long)set->pp, (long long)set->dp, (long long)set->tp, rank_count(set),
           s_of(rank_count(set)));
    for (v = 0; v < stages; v++)
        printf("stage   %d, chunk %d: layers %lld to %lld%s%s\n", v % (int)set->pp,
               v / (int)set->pp, (long long)p->first_layer[v], (long long)p->first_layer[v + 1] - 1,
               v == 0 ? ", embedding" : "", v == stages - 1 ? ", final norm and head" : "");
    FT_TRY(ft_pp_schedule_create(&config, &schedule));
    status = ft_pp_draw_file(schedule, NULL, 0, stdout);
    ft_pp_schedule_free(schedule);
    return status;
}

static void print_data(const program *p) {
    ft_io_format format = ft_io_data_format(p->data);
    char text[32];
    printf("data    %s %s in %d file%s", thousands(ft_io_data_tokens(p->data), text),
           format == FT_IO_FORMAT_BYTES ? "bytes" : "tokens", p->set.data.n, s_of(p->set.data.n));
    if (format != FT_IO_FORMAT_BYTES) printf(", %s", ft_io_format_name(format));
    if (ft_io_data_has_documents(p->data))
        printf(", documents apart in the loss%s", p->set.doc_mask ? " and in attention" : "");
    putchar('\n');
}

static void print_settings(const program *p) {
    const settings *set = &p->set;
    const ft_llama_config *model = &p->model;
    char text[32];
    printf("model   %lld layer%s, hidden %lld, %lld head%s (%lld kv) of %lld, feed-forward %lld, "
           "vocabulary %lld, embeddings %s: %s weights\n", (long long)model->layers,
           s_of(model->layers), (long long)model->hidden, (long long)model->heads,
           s_of(model->heads), (long long)model->kv_heads,
           (long long)model->head_dim, (long long)model->intermediate, (long long)model->vocab,
           model->tie_embeddings ? "tied" : "untied", thousands(ft_llama_param_total(model), text));
    printf("batch   %lld dp rank%s x %lld sequence%s x %lld micro-batch%s x %lld token%s = %s "
           "tokens a step\n", (long long)set->dp, s_of(set->dp), (long long)set->micro_batch_size,
           s_of(set->micro_batch_size), (long long)set->micro_batches,
           set->micro_batches == 1 ? "" : "es", (long long)set->seq_len, s_of(set->seq_len),
           thousands(tokens_of_step(set), text));
    printf("memory  ZeRO-%lld, recompute %s, prefetch %lld, reduce-overlap %s, %s\n",
           (long long)set->zero_stage,
           set->sac == SAC_BUDGET ? "by budget" : set->sac == FT_SAC_FULL ? "full"
           : set->sac == FT_SAC_SELECTIVE ? "selective" : "none", (long long)set->prefetch,
           set->reduce_overlap ? "on" : "off", set->dtype == FT_BF16 ? "bf16" : "fp32");
    printf("%s   %lld step%s, lr %g %s, warm-up %lld, decay %g, clip %g, seed %lld\n",
           set->optimizer ? "sgd  " : "adamw", (long long)set->steps, s_of(set->steps), set->lr,
           set->lr_schedule == FT_LR_LINEAR ? "linear" : set->lr_schedule == FT_LR_COSINE ? "cosine"
           : set->lr_schedule == FT_LR_WSD ? "wsd" : "constant", (long long)set->warmup,
           set->weight_decay, set->grad_clip, (long long)set->seed);
    if (set->init_from) printf("weights %s\n", set->init_from);
    if (p->data) print_data(p);
    if (p->data && ft_io_data_examples(p->data))
        printf("rows    %lld example%s in %lld row%s of %lld tokens\n",
               (long long)ft_io_data_examples(p->data), s_of(ft_io_data_examples(p->data)),
               (long long)p->sampler.windows, s_of(p->sampler.windows),
               (long long)set->seq_len);
}

static job job_create(program *p) {
    job work;
    memset(&work, 0, sizeof work);
    work.set = &p->set;
    work.model = p->model;
    work.sac = p->sac;
    work.first_layer = p->first_layer;
    if (p->set.eval_data.n) work.eval = &p->eval;
    work.steps = 1;
    work.only_rank = -1;
    work.stop_after = -1;
    work.mem_plan = p->mem_plan;
    work.results = p->plan;
    return work;
}

/* Fills sac[layers]: the policy that was asked for, or the one that fits the budget best. */
static ft_status choose_recompute(program *p, job *plan) {
    ft_sac_budget budget;
    char text[32], peak[32];
    int64_t layer;
    if (p->set.sac != SAC_BUDGET) {
        for (layer = 0; layer < p->set.layers; layer++)
            p->sac[layer].kind = (ft_sac_kind)p->set.sac;
        return FT_OK;
    }
    memset(&budget, 0, sizeof budget);
    budget.segments = (int)p->set.layers;
    budget.budget_bytes = (size_t)p->set.sac_budget_bytes;
    budget.config = ft_config_default();
    budget.config.world = rank_count(&p->set);
    budget.step = rank_main;
    budget.user = plan;
    budget.sac = p->sac;
    FT_TRY(ft_sac_fit(&budget));
    printf("budget  %s bytes: peak %s, %.3g flops recomputed a step and rank%s, found in %d runs\n",
           thousands(p->set.sac_budget_bytes, text), thousands((int64_t)budget.peak_bytes, peak),
           budget.recompute_flops, budget.optimal ? "" : " (perhaps not the least)", budget.runs);
    return FT_OK;
}

/* ---------------------------------------------------------------------------------- does it fit */

/* What a configuration takes, found by one step on meta. Ranks of a pipeline stage are alike, so
   one of each stage stands for all. */
typedef struct trial {
    settings set;
    const char *change[8];    /* what differs from what was asked for; NULL after the last */
    size_t peak_bytes;        /* of the fullest rank */
    double flops, replay;     /* of the busiest rank, a step */
    int64_t sent, sent_by[SENDERS]; /* by the rank that sends most, a step */
    int planned, fits;
} trial;

static void free_program(program *p);

static ft_status plan_stages(program *p, trial *t) {
    int stage, stages = (int)p->set.pp, each = rank_count(&p->set) / stages, kind;
    job plan = job_create(p);
    FT_TRY(choose_recompute(p, &plan));
    t->peak_bytes = 0;
    t->flops = t->replay = 0;
    t->sent = 0;
    memset(t->sent_by, 0, sizeof t->sent_by);
    for (stage = 0; stage < stages; stage++) {
        const rank_result *r = &p->plan[stage * each];
        double flops;
        int64_t sent = 0;
        plan.only_rank = stage * each;
        FT_TRY(launch(&plan, FT_META));
        flops = r->flops.forward + r->flops.backward + r->flops.replay;
        for (kind = 0; kind < FT_COLLECTIVE_COUNT; kind++) sent += r->sent[kind];
        if (r->memory.peak_bytes > t->peak_bytes) t->peak_bytes = r->memory.peak_bytes;
        if (flops > t->flops) t->flops = flops;
        if (r->flops.replay > t->replay) t->replay = r->flops.replay;
        if (sent > t->sent) t->sent = sent;
        for (kind = 0; kind < SENDERS; kind++)
            if (r->sent_by[kind] > t->sent_by[kind]) t->sent_by[kind] = r->sent_by[kind];
    }
    t->planned = 1;
    return FT_OK;
}

static ft_status plan_trial(trial *t) {
    program p;
    ft_status status;
    memset(&p, 0, sizeof p);
    p.set = t->set;
    p.set.data.n = p.set.eval_data.n = 0; /* tokens have no values here */
    p.set.device = FT_META;
    p.set.log_path = p.set.memory_json_path = p.set.report_path = p.set.trace_path = NULL;
    p.set.sample = p.set.eval_every = 0;
    p.set.checkpoint_dir = p.set.resume = NULL;
    p.set.checkpoint_every = p.set.keep = 0;
    status = open_inputs(&p);
    if (status == FT_OK) status = plan_stages(&p, t);
    free_program(&p);
    return status;
}

/* The changes that are tried: each returns 0 where it would change nothing. */
static int change_sac(settings *set, int64_t to) {
    if (set->sac == SAC_BUDGET || to <= set->sac) return 0;
    set->sac = to;
    return 1;
}
static int change_selective(settings *set) { return change_sac(set, FT_SAC_SELECTIVE); }
static int change_full(settings *set) { return change_sac(set, FT_SAC_FULL); }
static int change_stage(settings *set, int64_t to) {
    if (set->dp == 1 || to <= set->zero_stage) return 0;
    set->zero_stage = to;
    return 1;
}
static int change_stage_1(settings *set) { return change_stage(set, 1); }
static int change_stage_2(settings *set) { return change_stage(set, 2); }
static int change_stage_3(settings *set) { return change_stage(set, 3); }
static int change_overlap(settings *set) {
    int was = (int)set->reduce_overlap && set->zero_stage >= 2 && set->dp > 1;
    set->reduce_overlap = 0;
    return was;
}
static int change_prefetch(settings *set) {
    int was = set->prefetch > 0 && set->zero_stage == 3 && set->dp > 1;
    set->prefetch = 0;
    return was;
}
static int change_kept(settings *set) {
    int was = (int)set->keep_gathered && set->zero_stage == 3;
    set->keep_gathered = 0;
    return was;
}
static int change_batch(settings *set, int64_t by) {
    if (set->micro_batch_size % by) return 0;
    set->micro_batch_size /= by;
    set->micro_batches *= by;
    return 1;
}
static int change_half(settings *set) { return change_batch(set, 2); }
static int change_quarter(settings *set) { return change_batch(set, 4); }
static int change_eighth(settings *set) { return change_batch(set, 8); }
static int change_sequence(settings *set) {
    int was = set->tp > 1 && !set->sequence_parallel && set->seq_len % set->tp == 0;
    set->sequence_parallel = 1;
    return was;
}

typedef struct change { const char *text; int (*apply)(settings *set); int axis; } change;

static const change changes[] = { /* of an axis at most one at a time */
    {"--sac selective", change_selective, 0},
    {"--sac full", change_full, 0},
    {"--zero-stage 1", change_stage_1, 1},
    {"--zero-stage 2", change_stage_2, 1},
    {"--zero-stage 3", change_stage_3, 1},
    {"half the micro-batch, twice as many", change_half, 2},
    {"a quarter of the micro-batch, four times as many", change_quarter, 2},
    {"an eighth of the micro-batch, eight times as many", change_eighth, 2},
    {"--sp", change_sequence, 3},
    {"--reduce-overlap 0", change_overlap, 4},
    {"--keep-gathered 0", change_kept, 5},
    {"--prefetch 0", change_prefetch, 6},
};

enum { CHANGES = (int)(sizeof changes / sizeof changes[0]), CHANGE_AXES = 7, MAX_TOGETHER = 3 };

/* a then b then c, by position in changes[], those below 0 left out; 0 if one does nothing. */
static int trial_of(const settings *set, const int *which, trial *t) {
    int i, n = 0;
    memset(t, 0, sizeof *t);
    t->set = *set;
    for (i = 0; i < MAX_TOGETHER; i++) {
        if (which[i] < 0) continue;
        if (i && which[i - 1] >= 0 &&
            changes[which[i]].axis <= changes[which[i - 1]].axis) return 0;
        if (!changes[which[i]].apply(&t->set)) return 0;
        t->change[n++] = changes[which[i]].text;
    }
    return n;
}

/* A change that fits alone makes its combinations pointless. */
static int has_fitting_part(const trial *found, int n, const trial *t) {
    int i, a, b, all;
    for (i = 0; i < n; i++) {
        if (!found[i].fits) continue;
        for (all = 1, a = 0; found[i].change[a] && all; a++) {
            for (b = 0; t->change[b] && t->change[b] != found[i].change[a];) b++;
            all = t->change[b] != NULL;
        }
        if (all) return 1;
    }
    return 0;
}

static void print_trial(const trial *t, const trial *asked) {
    char text[32], sent[32];
    int i;
    double more = t->flops / asked->flops - 1;
    printf("  %15s  %+6.1f%%  %18s  ", thousands((int64_t)t->peak_bytes, text), 100 * more,
           thousands(t->sent - asked->sent, sent));
    for (i = 0; t->change[i]; i++) printf("%s%s", i ? ", " : "", t->change[i]);
    putchar('\n');
}

static int trial_cmp(const void *a, const void *b) { /* cheapest first: work, then traffic */
    const trial *x = (const trial *)a, *y = (const trial *)b;
    if (x->fits != y->fits) return y->fits - x->fits;
    if (x->flops != y->flops) return x->flops < y->flops ? -1 : 1;
    if (x->sent != y->sent) return x->sent < y->sent ? -1 : 1;
    return x->peak_bytes < y->peak_bytes ? -1 : x->peak_bytes > y->peak_bytes;
}

/* Single changes, then pairs, then threes, until some fit or the time is up. */
static int find_fits(const program *p, size_t limit, trial *found, int most) {
    int n = 0, fits = 0, together, which[MAX_TOGETHER], a, b, c;
    double begin = now_s();
    for (together = 1; together <= MAX_TOGETHER && (together == 1 || !fits); together++)
        for (a = together > 2 ? 0 : -1; a < (together > 2 ? CHANGES : 0); a++)
            for (b = together > 1 ? 0 : -1; b < (together > 1 ? CHANGES : 0); b++)
                for (c = 0; c < CHANGES; c++) {
                    trial t;
                    which[0] = a;
                    which[1] = b;
                    which[2] = c;
                    if (n == most || now_s() - begin > 20) return n;
                    if (!trial_of(&p->set, which, &t) || has_fitting_part(found, n, &t)) continue;
                    if (plan_trial(&t) != FT_OK) continue; /* a layout that cannot do it */
                    t.fits = t.peak_bytes <= limit;
                    fits += t.fits;
                    found[n++] = t;
                }
    return n;
}

/* Prints what would make it fit. Every line is a run on meta: nothing is allocated. */
static void advise(const program *p, size_t limit) {
    enum { MOST = 512, SHOWN = 12 };
    trial asked, *found = (trial *)calloc(MOST, sizeof *found);
    int n, i, fits = 0, least = -1;
    if (!found) return;
    memset(&asked, 0, sizeof asked);
    asked.set = p->set;
    if (plan_trial(&asked) == FT_OK) {
        n = find_fits(p, limit, found, MOST);
        for (i = 0; i < n; i++) fits += found[i].fits;
        for (i = 0; i < n; i++)
            if (least < 0 || found[i].peak_bytes < found[least].peak_bytes) least = i;
        printf("\n%s\n  %15s  %7s  %18s  change\n",
               fits ? "what would fit, cheapest first (a step of the busiest rank)"
                    : "nothing that was tried fits; the least is", "peak", "flops", "bytes sent");
        if (!fits && least >= 0) print_trial(&found[least], &asked);
        if (fits) qsort(found, (size_t)n, sizeof *found, trial_cmp);
        for (i = 0; i < fits && i < SHOWN; i++) print_trial(&found[i], &asked);
        fflush(stdout);
    }
    free(found);
}

/* Memory that a rank takes of its device: the arena where there is one, else its peak. */
static size_t bytes_needed(const program *p, int rank) {
    ft_mem_plan_info info;
    memset(&info, 0, sizeof info);
    if (p->mem_plan && ft_mem_plan_get(p->mem_plan, rank, &info) == FT_OK)
        return info.reserved_bytes;
    return p->plan[rank].memory.peak_bytes;
}

static ft_status check_fit(const program *p) {
    size_t limit = (size_t)p->set.memory_limit, need = 0;
    char text[32], most[32];
    int r, fullest = 0;
    if (!limit) return FT_OK;
    for (r = 0; r < rank_count(&p->set); r++)
        if (bytes_needed(p, r) > need) need = bytes_needed(p, fullest = r);
    if (need <= limit) {
        printf("  fits in %s bytes\n", thousands((int64_t)limit, text));
        return FT_OK;
    }
    advise(p, limit);
    return ft_error(FT_ERR_OOM, "rank %d needs %s bytes and the limit is %s: nothing was allocated",
                    fullest, thousands((int64_t)need, text), thousands((int64_t)limit, most));
}

/* --------------------------------------------------------------------------------- plan and run */

/* How much more than the peak the fullest rank's arena takes. */
static ft_status print_arena(const program *p) {
    ft_mem_plan_info info, most;
    char text[32], count[32];
    int r;
    memset(&most, 0, sizeof most);
    for (r = 0; r < rank_count(&p->set); r++) {
        FT_TRY(ft_mem_plan_get(p->mem_plan, r, &info));
        if (info.reserved_bytes > most.reserved_bytes) most = info;
    }
    printf("  arena of %s bytes, %.4f times the peak, for %s allocations\n",
           thousands((int64_t)most.reserved_bytes, text),
           (double)most.reserved_bytes / (double)most.peak_bytes,
           thousands(most.allocations, count));
    return FT_OK;
}

/* One step on meta: the same program, no storage. */
static ft_status make_plan(program *p) {
    job plan;
    double begin;
    if (allocator_of(&p->set) == FT_ALLOC_ARENA)
        FT_TRY(ft_mem_plan_create(rank_count(&p->set), &p->mem_plan));
    plan = job_create(p);
    FT_TRY(choose_recompute(p, &plan));
    if (p->set.device == FT_META) plan.records = p->records;
    begin = now_s();
    FT_TRY(launch(&plan, FT_META));
    printf("\nplan: bytes of each rank at its peak (one step on meta, %.2f s)\n", now_s() - begin);
    FT_TRY(print_memory(rank_count(&p->set), p->plan));
    if (p->mem_plan) FT_TRY(ft_mem_plan_place(p->mem_plan));
    if (p->mem_plan) FT_TRY(print_arena(p));
    FT_TRY(check_fit(p));
    fflush(stdout);
    return FT_OK;
}

/* What the allocator held, beside the peak. */
static void print_reserved(int ranks, const rank_result *run) {
    char text[32];
    int r, most = 0;
    for (r = 1; r < ranks; r++)
        if (run[r].memory.reserved_bytes > run[most].memory.reserved_bytes) most = r;
    if (run[most].memory.reserved_bytes)
        printf("  reserved: at most %s bytes, %.4f times the peak\n",
               thousands((int64_t)run[most].memory.reserved_bytes, text),
               (double)run[most].memory.reserved_bytes / (double)run[most].memory.peak_bytes);
}

/* Of the fullest GPU. Under a launcher a process has one rank, and a GPU for it alone. */
static void print_gpu_memory(int ranks, const rank_result *run) {
    char used[32], reserved[32], rest[32];
    int64_t sum = 0;
    int r, most = 0;
    for (r = 1; r < ranks; r++)
        if (run[r].gpu_used > run[most].gpu_used) most = r;
    if (run[most].gpu < 0) return;
    for (r = 0; r < ranks; r++)
        if (r == most || (run[r].gpu == run[most].gpu && ft_env_rank() < 0))
            sum += (int64_t)run[r].memory.reserved_bytes;
    printf("  GPU %lld: %s bytes in use: %s of its ranks, %s of CUDA, its libraries and whoever\n"
           "  else is there\n", (long long)run[most].gpu, thousands(run[most].gpu_used, used),
           thousands(sum, reserved), thousands(run[most].gpu_used - sum, rest));
}

/* A run that a signal ended. What it did is kept, or is lost: that is the difference in the exit
   status. */
static void print_stop(program *p, const job *work) {
    int number = stop_signal ? (int)stop_signal : SIGTERM; /* of another process */
    if (work->stop_after < 0 || work->steps_done == work->steps) return;
    printf("stopped by %s after step %lld of %lld; ", number == SIGINT ? "SIGINT" : "SIGTERM",
           (long long)work->steps_done, (long long)work->steps);
    if (p->set.checkpoint_dir) {
        printf("--resume auto continues from %s\n", work->saved);
        return;
    }
    if (p->set.export_dir) printf("without --checkpoint-dir it cannot be continued\n");
    else printf("without --checkpoint-dir nothing was saved\n");
    p->exit_status = 128 + number;
}

/* What is made of the weights when training is over, or was before. */
static void print_products(const program *p, const job *work) {
    if (p->set.export_dir)
        printf("\nexported %s, %s\n", p->set.export_dir, p->set.export_dtype ? "bf16" : "fp32");
    if (p->set.hash) printf("\nhash %016llx\n", (unsigned long long)work->hash);
    if (p->set.sample) print_sample(work);
}

static ft_status train_for_real(program *p) {
    int ranks = rank_count(&p->set), wrong, r;
    int64_t steps;
    ft_status status;
    job work = job_create(p);
    work.sampler = &p->sampler;
#ifdef FT_CJSON
    work.source = p->source;
#endif
    work.steps = p->set.steps;
    work.results = p->run;
    work.log = p->log;
    work.tb = p->tb;
    work.records = p->records;
    work.losses = p->losses;
    work.text = p->text;
    work.prompt = p->prompt;
    work.live = isatty(STDOUT_FILENO);
    work.peak_flops = p->peak_flops;
    for (r = 0; r < ranks; r++) work.step_flops += p->plan[r].step_flops;
    putchar('\n');
    fflush(stdout);
    status = launch(&work, (ft_device)p->set.device);
    p->line_open = work.line_open;
    p->log = work.log;
    FT_TRY(status);
    p->first_step = work.first_step;
    p->steps_done = work.steps_done;
    steps = work.steps_done - work.first_step;
    if (work.evaluated) printf("\nvalidation loss %.4f\n", work.eval_loss);
    if (steps <= 0) {
        printf("\nnothing to train: the checkpoint is at step %lld of %lld\n",
               (long long)work.first_step, (long long)p->set.steps);
        print_products(p, &work);
        return FT_OK;
    }
    printf("\ntrained %lld step%s in %.1f s, %.0f tok/s: loss %.4f at first, %.4f at last (nats)\n",
           (long long)steps, s_of(steps), work.seconds,
           (double)(tokens_of_step(&p->set) * steps) / work.seconds, work.first_loss,
           work.report.loss);
    print_stop(p, &work);
    if (work.report.skipped > 0)
        printf("skipped %lld update%s whose gradient norm was not finite\n",
               (long long)work.report.skipped, s_of(work.report.skipped));
    puts("\nrun: bytes of each rank at its peak");
    FT_TRY(print_memory(ranks, p->run));
    wrong = planned_wrong(ranks, p->plan, p->run);
    print_reserved(ranks, p->run);
    print_gpu_memory(ranks, p->run);
    if (wrong == 0) puts("  equal to the plan, to the byte, on every rank");
    else printf("  NOT as planned on %d of %d ranks: please report this\n", wrong, ranks);
    printf("\nbytes sent by each rank in %lld step%s\n", (long long)steps, s_of(steps));
    FT_TRY(print_traffic(ranks, p->run));
    print_products(p, &work);
    return FT_OK;
}

static ft_status plan_on_meta(program *p) {
    puts(p->set.eval_data.n ? "\nbytes sent by each rank in a step and a validation batch"
                            : "\nbytes sent by each rank in a step");
    FT_TRY(print_traffic(rank_count(&p->set), p->plan));
    if (p->set.hash || p->set.sample || p->set.log_path || p->set.tensorboard ||
        p->set.checkpoint_dir || p->set.resume || p->set.export_dir)
        puts("\nmeta has no weights and takes no steps: nothing for --hash, --sample, --log, "
             "--tensorboard, --checkpoint-dir, --resume or --export");
    return FT_OK;
}

/* A plan has no times: the schedule's simulation gives them. The k-th span of a stage's rank is the
   k-th action of its list; the optimizer follows, one unit long. */
static void retime(ft_io_record *r, const ft_pp_rank_times *times, int actions, double makespan) {
    int64_t i, k = 0;
    for (i = 0; i < r->n_spans; i++) {
        ft_span *span = &r->spans[i];
        span->begin_s = i < actions ? times->start[i] : makespan + (double)(i - actions);
        span->end_s = i < actions ? times->end[i] : span->begin_s + 1;
    }
    for (i = 0; i < r->n_points; i++) {
        const ft_span *span;
        int64_t event = r->points[i].event, length;
        while (k + 1 < r->n_spans && event > r->spans[k].end_event) k++;
        if (r->n_spans == 0) return;
        span = &r->spans[k];
        length = span->end_event - span->begin_event;
        if (event <= span->begin_event) r->points[i].time_s = span->begin_s;
        else if (event >= span->end_event || length == 0) r->points[i].time_s = span->end_s;
        else r->points[i].time_s = span->begin_s + (span->end_s - span->begin_s) *
                                   (double)(event - span->begin_event) / (double)length;
    }
}

static ft_status retime_plan(program *p) {
    ft_pp_config config = pipeline_config(&p->set);
    ft_pp_cost cost = ft_pp_cost_default();
    ft_pp_schedule *schedule;
    ft_pp_simulation *simulation;
    int r, ranks = rank_count(&p->set), each = ranks / (int)p->set.pp;
    ft_status status;
    cost.blocking = !p->set.pp_overlap;
    FT_TRY(ft_pp_schedule_create(&config, &schedule));
    status = ft_pp_simulate(schedule, &cost, &simulation);
    for (r = 0; status == FT_OK && r < ranks; r++)
        retime(&p->records[r], &simulation->ranks[r / each], schedule->ranks[r / each].n,
               simulation->makespan);
    if (status == FT_OK) ft_pp_simulation_free(simulation);
    ft_pp_schedule_free(schedule);
    return status;
}

/* All ranks in a row each, or one of each stage where there are many. */
static ft_status write_report(const program *p, const char *settings_text) {
    int ranks = rank_count(&p->set), stages = (int)p->set.pp, i;
    int n = ranks <= 16 ? ranks : stages;
    int *rows = (int *)calloc((size_t)n, sizeof *rows);
    ft_io_report report;
    ft_status status;
    if (!rows) return ft_error(FT_ERR_OOM, "no memory for a report of %d rows", n);
    for (i = 0; i < n; i++) rows[i] = i * (ranks / n);
    memset(&report, 0, sizeof report);
    report.title = p->set.device == FT_META ? "A planned step" : "The last step of a run";
    report.settings = settings_text;
    report.time_unit = p->set.device == FT_META ? "forwards" : "s";
    report.n = ranks;
    report.records = p->records;
    report.n_rows = n;
    report.rows = rows;
    report.n_steps = p->steps_done - p->first_step; /* of a plan 0 */
    report.losses = p->losses + p->first_step;
    status = ft_io_report_write(p->set.report_path, &report);
    free(rows);
    return status;
}

/* How much of the last step's traffic beside compute nobody waited for. */
static void print_overlap(const program *p) {
    double traffic = 0, under = 0;
    int r;
    for (r = 0; r < rank_count(&p->set); r++) {
        double a, b;
        ft_io_record_overlap(&p->records[r], &a, &b);
        traffic += a;
        under += b;
    }
    if (traffic > 0)
        printf("overlap: of %.2f ms a rank of gathers%s in the last step %.1f%% lie under "
               "compute\n", 1e3 * traffic / rank_count(&p->set),
               p->set.pp_overlap ? ", reductions and exchanges" : " and reductions",
               100 * under / traffic);
}

static ft_status write_records(program *p) {
    char text[2048];
    size_t at = 0;
    int i;
    if (!p->records) return FT_OK;
    if (p->set.device != FT_META && p->steps_done == p->first_step) return FT_OK; /* no step */
    if (p->set.device == FT_META) FT_TRY(retime_plan(p));
    else print_overlap(p);
    text[0] = '\0';
    for (i = 0; i < p->argc && at + 1 < sizeof text; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%s", i ? " " : "", p->argv[i]);
    if (p->set.report_path) FT_TRY(write_report(p, text));
    if (!p->set.trace_path) return FT_OK;
    return ft_io_trace_write(p->set.trace_path, rank_count(&p->set), p->records);
}

static ft_status run_program(program *p) {
    int meta = p->set.device == FT_META;
    FT_TRY(open_inputs(p));
    FT_TRY(choose_device(p));
    print_settings(p);
    if (p->set.verbose) FT_TRY(print_layout(p));
    FT_TRY(make_plan(p));
    FT_TRY(meta ? plan_on_meta(p) : train_for_real(p));
    FT_TRY(write_records(p));
    if (!p->set.memory_json_path || ft_env_rank() > 0) return FT_OK; /* rank 0 has all results */
    FT_TRY(ft_io_json_open(p->set.memory_json_path, &p->memory_json));
    write_memory_json(p->memory_json, rank_count(&p->set), meta ? p->plan : p->run);
    return FT_OK;
}

static void free_program(program *p) {
    int r;
    for (r = 0; p->records && r < rank_count(&p->set); r++) ft_io_record_free(&p->records[r]);
    free(p->records);
    free(p->losses);
    ft_io_data_close(p->data);
    ft_io_data_close(p->eval_data);
#ifdef FT_CJSON
    ft_io_model_close(p->source);
#endif
    free(p->first_layer);
    free(p->sac);
    free(p->text);
    free(p->plan);
    free(p->run);
    ft_mem_plan_free(p->mem_plan);
}

/* Closes everything; an error of closing counts unless there was one before. */
static ft_status close_program(program *p, ft_status status) {
    ft_status closed = FT_OK;
    if (status != FT_OK) {
        /* The message must survive what closing says. */
        if (p->line_open) putchar('\n');
        fflush(stdout);
        fprintf(stderr, "error: %s\n", ft_last_error());
    }
    if (p->log) closed = ft_io_log_close(p->log);
    if (p->tb) {
        ft_status finished = ft_io_tb_close(p->tb);
        if (closed == FT_OK) closed = finished;
    }
    if (p->memory_json) {
        ft_status finished = ft_io_json_finish(p->memory_json);
        if (closed == FT_OK) closed = finished;
    }
    if (status == FT_OK && closed != FT_OK) fprintf(stderr, "error: %s\n", ft_last_error());
    free_program(p);
    return status != FT_OK ? status : closed;
}

/* ----------------------------------------------------------------------------------------- main */

/* glibc hands freed blocks of 128 KiB and more back to the kernel at once, and every step would
   fault the same pages in again: a fifth of the time of small models. */
static void keep_freed_memory(void) {
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 32 * 1024 * 1024); /* the most that it takes */
    mallopt(M_TRIM_THRESHOLD, 1024 * 1024 * 1024);
#endif
}

/* What was printed must have arrived; a full disk is an error like any other. */
static int output_written(void) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return 1;
    fprintf(stderr, "error: standard output cannot be written\n");
    return 0;
}

/* A program that includes this file, to run the same step, names main() otherwise. */
#ifndef TRAIN_LLAMA_MAIN
#define TRAIN_LLAMA_MAIN main
#endif

int TRAIN_LLAMA_MAIN(int argc, char **argv) {
    program p;
    /* A closed descriptor 1 would become the first file that is opened. */
    if (fcntl(STDOUT_FILENO, F_GETFD) < 0 || fcntl(STDERR_FILENO, F_GETFD) < 0) {
        fprintf(stderr, "error: standard output and standard error must be open\n");
        return EXIT_FAILURE;
    }
    keep_freed_memory();
    /* Of the processes of a launcher one speaks; the errors of all are heard. */
    if (ft_env_rank() > 0 && !freopen("/dev/null", "w", stdout)) return EXIT_FAILURE;
    memset(&p, 0, sizeof p);
    if (!parse_options(argc, argv, &p.set)) {
        free_settings(&p.set);
        return EXIT_USAGE;
    }
    p.argc = argc;
    p.argv = argv;
    if (p.set.help || p.set.print_config) {
        if (p.set.help) print_help();
        else print_config(&p.set);
        free_settings(&p.set);
        return output_written() ? EXIT_SUCCESS : EXIT_FAILURE;
    }
    if (p.set.device != FT_META && p.set.data.n == 0) {
        bad("--data is missing: training needs files");
        free_settings(&p.set);
        return EXIT_USAGE;
    }
    ft_status status = close_program(&p, run_program(&p));
    free_settings(&p.set);
    return status == FT_OK && output_written() ? p.exit_status : EXIT_FAILURE;
}
