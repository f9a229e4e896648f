/* femtotron_io.h: safetensors, token data and its sampler, metrics, reports and JSON, for
   femtotron.h.

   Do this, in ONE C or C++ file of your program (elsewhere without the macro):

       #define FEMTOTRON_IMPLEMENTATION
       #include "femtotron.h"
       #include "femtotron_io.h"

   Then, to read a tensor (error checks left out):

       ft_io_safetensors_open("model.safetensors", &file);
       const ft_io_tensor *t = ft_io_safetensors_find(file, "model.norm.weight");
       ft_io_read_float(t, 0, t->elems, values);

   WHAT IT DOES NOT DO
     No tokenizer, no downloads, no models split over several safetensors files, no big-endian host.
     It writes no token shards and no training checkpoints, and reads no compressed data.
     JSON is written by the emitter here; of JSON read, the safetensors header needs no library, a
     Hugging Face config.json needs cJSON.

   CONTENTS  (find a part by searching for its mark)
     Declarations                                    Implementation
       >>dtypes       element types of files           >>dtypes.impl
       >>safetensors  read and write tensor files      >>files.impl, >>utf8.impl, >>header.impl,
                                                       >>safetensors.impl, >>writer.impl
       >>hf           config.json of Hugging Face      >>hf.impl
       >>data         files as one stream of tokens    >>data.impl
       >>sampler      which tokens a step sees         >>sampler.impl
       >>eval         which ones an evaluation sees    >>eval.impl
       >>json         an emitter for nested JSON       >>json.impl
       >>log          metrics as JSON lines            >>log.impl
       >>tensorboard  metrics for TensorBoard          >>tensorboard.impl
       >>record       what a rank did in a step        >>record.impl
       >>trace        it, for Chrome and Perfetto      >>trace.impl
       >>report       it, as a page to read            >>report.impl

   OPTIONS  (define before the include that has the implementation)
     FEMTOTRON_IO_IMPLEMENTATION   the implementation of this header alone. Default: off;
                   FEMTOTRON_IMPLEMENTATION switches on that of every header.
     FT_CJSON      adds >>hf, which parses with cJSON (<cjson/cJSON.h>, link -lcjson). Default off.
                   Set it, in every file that calls >>hf, where the library is installed.

   CONCEPTS AND COSTS
     mapping   Safetensors files and data are mapped, not read: opening costs page tables, and bytes
               come from the page cache when they are touched. All threads of the process share
               them. A file that another process cuts short while it is mapped kills the process
               (SIGBUS).
     stream    Data files are one sequence of tokens, in the order given: token p of the stream is
               in the file whose range holds p. Files end nowhere in particular: samples run across.
     shard     A file of tokens of 16 or 32 bits, little-endian: nothing else (raw, as nanoGPT
               writes it), or after a header of 256 int32 (as llm.c does). All files of a stream are
               of one width; raw ones and ones with a header mix.
     position  of a token in its file: counted in tokens, from 0, without the header.
     window    A sample is T + 1 tokens: T inputs, and T labels that are the same tokens one later.
               Windows start every T tokens, so each token is a label once (the first never, and at
               the end up to T - 1 tokens are left over). Window w reads tokens w*T .. w*T + T.
     order     Step s takes positions s*G .. s*G + G-1 of an endless sequence: epoch 0's permutation
               of all windows, then epoch 1's, and so on. A batch may span the end of an epoch;
               nothing is dropped or seen twice. The sequence depends on (seed, number of windows)
               alone, so a run continues identically on another number of ranks, and needs no state
               but the step. An evaluation takes windows 0, 1, 2, ... as they lie, each once.

       operation                      memory                        time
       ft_io_safetensors_open         header + 150 B a tensor       n log n in the tensors
       ft_io_safetensors_finish       header + 1 MiB                one pass over the data
       ft_io_data_open                100 B a file                  none for the data
       ft_io_data_check_vocab         0                             one pass; none where vocab takes
                                                                    all tokens of 8 or 16 bits
       ft_io_data_set_vocab           0                             a comparison a token, when read
       ft_io_sampler_index            0                             at most 48 hashes in the mean
       ft_io_tb_scalar                43 B and its tag, until       8 shifts a byte, twice
                                      _flush

   OWNERSHIP, THREADS, ERRORS
     What _open or _create gives, the matching _close, _finish or _abandon takes back; pointers into
     it die with it. Files opened for reading may be used by any number of threads at once; a
     writer, an emitter or a log (of either kind) by one at a time. Paths, names and keys that are
     passed in are copied. Fallible functions return ft_status, and ft_last_error() names the file,
     what is wrong, and where.

   LETTERS  B batch of a rank, T tokens of a sequence, G samples of the global batch, N windows,
            R ranks, M micro-batches.

   License: MIT, see LICENSE. */

#ifndef FEMTOTRON_IO_H
#define FEMTOTRON_IO_H

#ifndef FEMTOTRON_H
#error "femtotron_io.h builds on femtotron.h: include femtotron.h first"
#endif

/* ------------------------------------------------------------------------------------ >>dtypes */

typedef enum ft_io_dtype { /* the element types of safetensors, by their names there */
    FT_IO_F32 = 0, FT_IO_BF16, FT_IO_F16, FT_IO_F64, FT_IO_I64, FT_IO_I32, FT_IO_I16, FT_IO_I8,
    FT_IO_U64, FT_IO_U32, FT_IO_U16, FT_IO_U8, FT_IO_BOOL, FT_IO_C64, FT_IO_F8_E4M3,
    FT_IO_F8_E5M2, FT_IO_F8_E8M0, FT_IO_F8_E4M3FNUZ, FT_IO_F8_E5M2FNUZ, FT_IO_F6_E2M3,
    FT_IO_F6_E3M2, FT_IO_F4, FT_IO_DTYPE_COUNT
} ft_io_dtype;

FT_API const char *ft_io_dtype_name(ft_io_dtype dtype);
/* As in the file: "F32", "BF16", ...; "?" for a value outside the enum. */
FT_API int ft_io_dtype_bits(ft_io_dtype dtype);
/* Bits of an element: 64, 32, 16, 8, or 6 and 4 (packed). 0 for a value outside the enum. */
FT_API ft_io_dtype ft_io_dtype_of(ft_dtype dtype);
/* The file's type of a tensor's: FT_F32, FT_BF16, FT_I32; FT_IO_DTYPE_COUNT for any other value. */

/* ------------------------------------------------------------------------------- >>safetensors */

#define FT_IO_MAX_DIMS 8

typedef struct ft_io_tensor { /* one tensor of an open file */
    const char *name;
    ft_io_dtype dtype;
    int ndim;                      /* 0: a scalar, one element */
    int64_t shape[FT_IO_MAX_DIMS]; /* a dimension may be 0 */
    int64_t elems;
    size_t bytes;
    const void *data;              /* in the mapping, little-endian; aligned only as the file is, so
                                      copy elements out with memcpy or the readers below */
} ft_io_tensor;

typedef struct ft_io_safetensors ft_io_safetensors;

FT_API ft_status ft_io_safetensors_open(const char *path, ft_io_safetensors **out);
/* Maps the file and checks all of its header: a tensor that is found has its bytes. Layout: 8 bytes
   of header length, little-endian; the header, a JSON object of name -> {dtype, shape,
   data_offsets}; the data, without gaps (https://github.com/huggingface/safetensors, "Format").
   FT_ERR_IO: it cannot be opened, or is no regular file.
   FT_ERR_DATA: anything in it breaks the format.
   FT_ERR_UNSUPPORTED: a dtype that is not listed above, or more than FT_IO_MAX_DIMS dimensions. */
FT_API void ft_io_safetensors_close(ft_io_safetensors *file);
/* NULL is allowed. Tensors, names and metadata of the file are gone. */

FT_API int64_t ft_io_safetensors_count(const ft_io_safetensors *file);
FT_API const ft_io_tensor *ft_io_safetensors_at(const ft_io_safetensors *file, int64_t index);
/* In the order of the data. NULL outside 0..count-1. */
FT_API const ft_io_tensor *ft_io_safetensors_find(const ft_io_safetensors *file, const char *name);
/* NULL if there is none (no error is set). Binary search. */

FT_API const char *ft_io_safetensors_metadata(const ft_io_safetensors *file, const char *key);
/* The string under `key` in __metadata__; NULL if there is none (no error is set). */
FT_API int64_t ft_io_safetensors_metadata_count(const ft_io_safetensors *file);
FT_API const char *ft_io_safetensors_metadata_at(const ft_io_safetensors *file, int64_t index,
                                                 const char **value);
/* Key number `index` (sorted by bytes) and, unless NULL, its value; NULL outside 0..count-1. */

FT_API ft_status ft_io_read_float(const ft_io_tensor *tensor, int64_t first, int64_t n,
                                  float *values);
/* values[n] = elements first..first+n-1 of a tensor of F32, BF16, F16 (all exact) or F64 (rounded
   to nearest; beyond the range of float: infinity). FT_ERR_UNSUPPORTED for other dtypes. */
FT_API ft_status ft_io_read_int(const ft_io_tensor *tensor, int64_t first, int64_t n,
                                int64_t *values);
/* The same for I64, I32, I16, I8, U64, U32, U16, U8 and BOOL. FT_ERR_DATA, naming the element, for
   a U64 above 2^63 - 1. */

typedef struct ft_io_safetensors_writer ft_io_safetensors_writer;

typedef ft_status (*ft_io_fill_fn)(void *user, const char *name, size_t offset, size_t bytes,
                                   void *buffer);
/* Produces bytes offset..offset+bytes-1 of tensor `name`. Called in order, from offset 0, with
   pieces of at most 1 MiB that hold whole elements (of 8 bits and more). */

FT_API ft_status ft_io_safetensors_create(const char *path, ft_io_safetensors_writer **out);
/* Starts a description; the file system is not touched before _finish. */
FT_API ft_status ft_io_safetensors_add(ft_io_safetensors_writer *writer, const char *name,
                                       ft_io_dtype dtype, int ndim, const int64_t *shape,
                                       const void *data);
/* Adds a tensor whose little-endian bytes are at `data`, which must live until _finish. Tensors lie
   in the file in the order of adding, without padding: add wide dtypes first where readers need
   aligned data. Errors leave the writer as it was. */
FT_API ft_status ft_io_safetensors_add_fill(ft_io_safetensors_writer *writer, const char *name,
                                            ft_io_dtype dtype, int ndim, const int64_t *shape,
                                            ft_io_fill_fn fill, void *user);
/* The same for a tensor that does not exist in one piece: _finish asks `fill` for it. */
FT_API ft_status ft_io_safetensors_set_metadata(ft_io_safetensors_writer *writer, const char *key,
                                                const char *value);
/* Keys must differ. Both are UTF-8. */
FT_API ft_status ft_io_safetensors_finish(ft_io_safetensors_writer *writer);
/* Writes `path`: first a temporary file beside it, PATH.tmp-PID-N, which is synced to the disk and
   then renamed over it. So path holds the old file or the new one, whole, whenever the process
   dies. On an error the temporary file is removed and path is as before (only when syncing the
   directory fails is the new file in place already). Frees the writer in any case. The header is
   padded with blanks so that data starts at a multiple of 8. A symbolic link is replaced, not
   followed. FT_ERR_ARG for names given twice; FT_ERR_IO for everything that the system refuses. */
FT_API void ft_io_safetensors_abandon(ft_io_safetensors_writer *writer);
/* Frees it without writing. NULL is allowed. */

/* ---------------------------------------------------------------------------------------- >>hf */

#ifdef FT_CJSON

typedef struct ft_io_hf_config {
    char model_type[16];       /* "llama", "mistral", "qwen2" or "qwen3" */
    int64_t vocab, hidden, layers, heads, kv_heads, head_dim, intermediate;
    int64_t max_positions;     /* 0: the text does not say */
    int tie_embeddings;        /* 1: the head is the embedding table */
    int qkv_bias, o_bias, mlp_bias;
    int qk_norm;               /* RMSNorm of each query and key head */
    double norm_eps;
    double rope_theta;
    ft_rope_scaling rope_scaling; /* llama3; all 0: none */
} ft_io_hf_config;

FT_API ft_status ft_io_hf_config_parse(const char *json_text, const char *where,
                                       ft_io_hf_config *config);
/* Reads the text of a Hugging Face config.json; `where` (a file's name) begins the messages. What
   the families mean by the same keys:
     llama     attention_bias: q, k, v and o; mlp_bias
     mistral   no biases; sliding_window must be there and null (absent, it means 4096)
     qwen2     q, k and v always have a bias, o never
     qwen3     attention_bias: q, k, v and o; q and k norms; head_dim 128 unless given
   Elsewhere an absent head_dim is hidden / heads, an absent rms_norm_eps 1e-6. An absent number of
   kv heads (= heads) and an absent rope_theta (10000) are taken from llama alone; others must say
   them. Both layouts of rotary settings are read: rope_theta with rope_scaling, and
   rope_parameters.
   FT_ERR_DATA, naming the key: not JSON, a key twice, a value missing, of the wrong type or out of
   range. FT_ERR_UNSUPPORTED, by name: other model types, rope types but default and llama3, sliding
   windows, experts, quantization, dropout, activations but silu.
   cJSON keeps its last error in a global variable: call this from one thread at a time. */

#endif /* FT_CJSON */

/* -------------------------------------------------------------------------------------- >>data */

typedef enum ft_io_token { /* how a token is stored */
    FT_IO_TOKEN_BYTE = 0,  /* any file: each byte is a token, vocabulary 256 */
    FT_IO_TOKEN_U16,       /* shards of uint16 */
    FT_IO_TOKEN_U32,       /* shards of uint32; tokens above 2^31 - 1 are refused when read */
    FT_IO_TOKEN_COUNT
} ft_io_token;

FT_API const char *ft_io_token_name(ft_io_token token);
/* "bytes", "uint16" or "uint32"; "?" for a value outside the enum. */
FT_API ft_status ft_io_token_parse(const char *name, ft_io_token *token);
/* The other way. FT_ERR_ARG, listing the names, for any other name. */

typedef struct ft_io_data ft_io_data;

FT_API ft_status ft_io_data_open(const char *const *paths, int n_paths, ft_io_token token,
                                 ft_io_data **out);
/* The files in this order as one stream. A file whose first int32 is a magic number below has a
   header of 256 int32 - magic, version, number of tokens, 253 not used - before its tokens (llm.c,
   dev/data/data_common.py):
     20240520  version 1  uint16
     20240801  version 7  uint32
   Raw tokens would have to begin with 55432, 308 or 55713, 308 to be taken for one.
   FT_ERR_IO: a file cannot be opened, or is no regular file.
   FT_ERR_DATA: a file is empty; a raw one is no whole number of tokens; a header is cut off, of an
   unknown version, of another width than `token` (a shard with a header is not read as bytes
   either), counts no tokens, or counts more or fewer than follow it.
   All name the file, and the sizes in question. */
FT_API void ft_io_data_close(ft_io_data *data);
/* NULL is allowed. */
FT_API int64_t ft_io_data_tokens(const ft_io_data *data);
FT_API int64_t ft_io_data_vocab(const ft_io_data *data);
/* One more than the largest token that can be read: 256, 65536, or 2^31 (tokens become int32). */
FT_API ft_status ft_io_data_set_vocab(ft_io_data *data, int64_t vocab);
/* Whatever reads tokens from here on - _read, samplers, evaluations - refuses those >= vocab, as
   _check_vocab does. For data too large for a pass before training. Not while threads read. */
FT_API ft_status ft_io_data_check_vocab(const ft_io_data *data, int64_t vocab);
/* FT_ERR_DATA, naming the file, the position in it and the value, if any token is >= vocab. */
FT_API ft_status ft_io_data_read(const ft_io_data *data, int64_t position, int64_t n,
                                 int32_t *tokens);
/* tokens[n] = tokens position..position+n-1 of the stream, across files. FT_ERR_DATA, as above, for
   one outside the vocabulary. */
FT_API const char *ft_io_data_locate(const ft_io_data *data, int64_t position, int64_t *in_file);
/* The path of the file that holds the position and, unless NULL, the token's position in that file.
   NULL outside the stream. */

/* ----------------------------------------------------------------------------------- >>sampler */

typedef struct ft_io_sampler { /* a plain value: nothing to free; `data` must outlive it */
    const ft_io_data *data;
    int64_t seq_len;           /* T */
    int64_t windows;           /* N = (tokens - 1) / T */
    int64_t global_batch;      /* G */
    uint64_t seed;
} ft_io_sampler;

FT_API ft_status ft_io_sampler_init(ft_io_sampler *sampler, const ft_io_data *data, int64_t seq_len,
                                    int64_t global_batch, uint64_t seed);
/* FT_ERR_DATA, naming both sizes, if the stream is shorter than one sample (T + 1 tokens). */

FT_API ft_status ft_io_sampler_index(const ft_io_sampler *sampler, int64_t step, int64_t position,
                                     int64_t *window, int64_t *epoch);
/* The window at `position` (0..G-1) of the global batch of step `step` (from 0), and the epoch it
   belongs to. Either pointer may be NULL. */

FT_API ft_status ft_io_sampler_read(const ft_io_sampler *sampler, int64_t step, int64_t position,
                                    int64_t n, int32_t *tokens, int32_t *labels);
/* tokens[n,T], labels[n,T]: the n samples from `position` on of the step's global batch.
   labels[b,t] is the token after tokens[b,t]; rows do not run into one another. */

FT_API ft_status ft_io_sampler_fill(const ft_io_sampler *sampler, int64_t step, int rank, int ranks,
                                    int micro_batch, int micro_batches, int32_t *tokens,
                                    int32_t *labels);
/* tokens[B,T], labels[B,T] of one rank and micro-batch, B = G / (R M), which must divide: positions
   (micro_batch * R + rank) * B onwards. Together they are the global batch, once. */

FT_API int64_t ft_io_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t i);
/* Element i of epoch `epoch`'s permutation of 0..n-1, in O(1) memory: a Feistel network over the
   next power of four, keyed by seed and epoch (Luby and Rackoff 1988), walked along its cycle until
   the result is below n (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Requires
   0 <= i < n; otherwise -1. */

/* -------------------------------------------------------------------------------------- >>eval */

typedef struct ft_io_eval { /* a plain value: nothing to free; `data` must outlive it */
    const ft_io_data *data;
    int64_t seq_len;           /* T */
    int64_t batch;             /* B */
    int ranks;                 /* R */
    int64_t windows;           /* N, the windows that an evaluation sees: 0..N-1 */
    int64_t batches;           /* N / (R B), rounded up: forward passes of every rank */
} ft_io_eval;

FT_API ft_status ft_io_eval_init(ft_io_eval *eval, const ft_io_data *data, int64_t seq_len,
                                 int64_t batch, int ranks, int64_t max_windows);
/* An evaluation of at most max_windows windows from the beginning of the data, 0: all. FT_ERR_DATA,
   naming both sizes, if the stream is shorter than one (T + 1 tokens). */
FT_API ft_status ft_io_eval_fill(const ft_io_eval *eval, int64_t index, int rank, int32_t *tokens,
                                 int32_t *labels, int64_t *counted);
/* tokens[B,T], labels[B,T] of one rank in evaluation batch `index` (0..batches-1): row b is window
   (index * R + rank) * B + b. Past the last window, rows have tokens 0 and labels -100, which no
   loss counts: all ranks make the same number of passes, as collectives need, and each window
   counts once, for every R and B. *counted, unless NULL, = the number of labels other than -100. So
   the loss is the sum of counted * (mean over counted labels) over batches and ranks, over N T. */

/* -------------------------------------------------------------------------------------- >>json */

/* An emitter: what is called is written, with commas and escapes where they belong. Calls do not
   fail; the first error (of writing, or a call that breaks JSON: a value in an object without a
   key, an end that does not match, more than 64 levels, a second top-level value) sticks, what
   follows it is ignored, and the error comes out at the end. A NULL emitter is allowed and does
   nothing. */
typedef struct ft_io_json ft_io_json;

FT_API ft_status ft_io_json_create(FILE *file, const char *name, ft_io_json **out);
/* Emits into an open file, which stays the caller's; `name` stands for it in messages. */
FT_API ft_status ft_io_json_open(const char *path, ft_io_json **out);
/* Emits into a new file. */
FT_API void ft_io_json_begin_object(ft_io_json *json);
FT_API void ft_io_json_end_object(ft_io_json *json);
FT_API void ft_io_json_begin_array(ft_io_json *json);
FT_API void ft_io_json_end_array(ft_io_json *json);
FT_API void ft_io_json_key(ft_io_json *json, const char *key);
FT_API void ft_io_json_int(ft_io_json *json, int64_t value);
FT_API void ft_io_json_float(ft_io_json *json, double value);
/* %.9g, which keeps every float; NaN and infinities, which JSON lacks, become null. */
FT_API void ft_io_json_double(ft_io_json *json, double value);
/* The same with as many digits, 9 to 17, as keep this double: for times since 1970. */
FT_API void ft_io_json_bool(ft_io_json *json, int value);
FT_API void ft_io_json_null(ft_io_json *json);
FT_API void ft_io_json_string(ft_io_json *json, const char *value);
/* UTF-8; each byte that is not part of it becomes U+FFFD. */
FT_API ft_status ft_io_json_finish(ft_io_json *json);
/* Checks that all is closed, ends the line, flushes, closes the file if _open opened it, frees the
   emitter, and returns the first error. */

/* --------------------------------------------------------------------------------------- >>log */

typedef struct ft_io_log ft_io_log;

FT_API ft_status ft_io_log_open(const char *path, int append, ft_io_log **out);
/* A file of one JSON object a line. append 0: it is emptied; 1: rows are added, after a line break
   if the last row was cut off. */
/* Between begin and end each function adds a key with its value. In all of them a NULL log is
   allowed and does nothing: a program that was not asked for a log need not ask. */
FT_API void ft_io_log_begin(ft_io_log *log);
FT_API void ft_io_log_int(ft_io_log *log, const char *key, int64_t value);
FT_API void ft_io_log_float(ft_io_log *log, const char *key, double value);
FT_API void ft_io_log_double(ft_io_log *log, const char *key, double value);
FT_API void ft_io_log_string(ft_io_log *log, const char *key, const char *value);
FT_API ft_io_json *ft_io_log_json(ft_io_log *log);
/* The emitter of the open row, for nested values: ft_io_json_key, then the value. */
FT_API ft_status ft_io_log_end(ft_io_log *log);
/* Writes the row with its line break in one write, so that a reader never waits for the rest of a
   row. The first error of the row, or of its writing; the next row starts afresh, on a line of its
   own. */
FT_API ft_status ft_io_log_close(ft_io_log *log);
/* FT_ERR_STATE if a row is open; it is not written. NULL is allowed. */

/* ------------------------------------------------------------------------------- >>tensorboard */

/* Event files of TensorBoard: a directory is a run, and all event files in it are read as one, so a
   run that goes on opens a new file with its further steps. A file is a sequence of records,

       length uint64 | masked CRC-32C of the length | payload | masked CRC-32C of the payload

   (TFRecord; a mask is a rotation by 15 bits to the right, and + 0xa282ead8), and each payload is a
   protocol buffer, Event (tensorboard/compat/proto/event.proto, summary.proto):

       1 wall_time double | 2 step int64 | 3 file_version string, or 5 summary of
                                                                  1 value of 1 tag string and
                                                                             2 simple_value float */
typedef struct ft_io_tb ft_io_tb;

FT_API ft_status ft_io_tb_open(const char *directory, double wall_time, ft_io_tb **out);
/* Makes the directory, and those above it, where they are missing, and in it a new file,
   events.out.tfevents.SECONDS.HOST.PID.N, with N the first that is free. It begins with an event of
   the version, "brain.Event:2". wall_time counts seconds since 1970, here and below.
   FT_ERR_IO, naming the path: the directory or the file cannot be made or written. */
FT_API void ft_io_tb_scalar(ft_io_tb *log, const char *tag, int64_t step, double wall_time,
                            double value);
/* An event, kept in memory until _flush. `tag` (UTF-8, not empty) names the chart. The value is
   stored as a float, as TensorBoard's own writers do; NaN and infinities are values. A NULL log is
   allowed and does nothing. An event that cannot be made (a bad tag, no memory) is left out, and
   the next _flush says so. */
FT_API ft_status ft_io_tb_flush(ft_io_tb *log);
/* Writes the events since the last time in one write, so that a reader sees whole steps. The first
   error since then. What could not be written goes before the next events at the next _flush. */
FT_API ft_status ft_io_tb_close(ft_io_tb *log);
/* Flushes first. NULL is allowed. */

FT_API uint32_t ft_io_crc32c(const void *bytes, size_t n);
/* CRC-32C (Castagnoli), as in iSCSI (RFC 3720, 12.1 and B.4): polynomial 0x1EDC6F41, reflected,
   begun with and ended by an inversion. 0 for no bytes. */

/* ------------------------------------------------------------------------------------ >>record */

/* Memory and spans of a rank, copied out of its context before that ends (config.timeline). */
typedef struct ft_io_point { /* after an event of the timeline; the first is before them all */
    double time_s;
    int64_t event;
    size_t live[FT_TAG_COUNT];
} ft_io_point;

typedef struct ft_io_sent {
    char group[32];
    int64_t bytes, calls;
} ft_io_sent;

enum { FT_IO_MAX_GROUPS = 16 };

typedef struct ft_io_record {
    int rank;
    int64_t n_points, n_spans;
    ft_io_point *points;
    ft_span *spans;
    int64_t peak;               /* the point with most bytes */
    char peak_where[160];       /* of the rank's peak since launch: its span, op and unit */
    int n_sent;
    ft_io_sent sent[FT_IO_MAX_GROUPS]; /* by group, since launch */
} ft_io_record;

FT_API ft_status ft_io_record_take(const ft_ctx *ctx, ft_io_record *record);
/* Copies what the timeline has kept; see ft_mem_timeline_clear. 80 bytes an event. */
FT_API void ft_io_record_free(ft_io_record *record);

/* ------------------------------------------------------------------------------------- >>trace */

FT_API ft_status ft_io_trace_write(const char *path, int n, const ft_io_record *records);
/* Trace Event Format (JSON) for chrome://tracing and ui.perfetto.dev: a process a rank, its spans
   as slices, its bytes by tag as a counter. Times in microseconds. */

/* ------------------------------------------------------------------------------------ >>report */

typedef struct ft_io_report {
    const char *title;
    const char *settings;        /* lines of plain text */
    const char *time_unit;       /* of the records' times: "s", or what a plan counts in */
    int n;
    const ft_io_record *records; /* [n] by rank; neighbours whose memory is alike share a drawing */
    int n_rows;
    const int *rows;             /* [n_rows] records whose spans are drawn, a row each */
    int64_t n_steps;
    const double *losses;        /* [n_steps], or NULL */
} ft_io_report;

FT_API ft_status ft_io_report_write(const char *path, const ft_io_report *report);
/* One HTML page that needs nothing else: drawings are SVG inside it, and read without JavaScript,
   which only adds figures under the pointer. Memory over time, stacked by tag, with the peak and
   what made it; spans as a Gantt drawing, in which what is empty is bubble; traffic; losses. */

#endif /* FEMTOTRON_IO_H */

/* =========================================================================== implementation === */

#if (defined(FEMTOTRON_IO_IMPLEMENTATION) || defined(FEMTOTRON_IMPLEMENTATION)) &&                 \
    !defined(FEMTOTRON_IO_IMPLEMENTED)
#define FEMTOTRON_IO_IMPLEMENTED

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/utsname.h>
#include <unistd.h>

#if defined(__BYTE_ORDER__) && defined(__ORDER_BIG_ENDIAN__)
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "femtotron_io.h maps little-endian files as they are: build it for a little-endian host"
#endif
#endif

#ifndef __cplusplus
/* The one POSIX function used here that <unistd.h> hides under -std=c11; C++ compilers show it. */
int fsync(int fd);
#endif

#ifndef FT_MALLOC
#define FT_MALLOC(n) malloc(n)
#endif
#ifndef FT_FREE
#define FT_FREE(p) free(p)
#endif

/* ------------------------------------------------------------------------------- >>dtypes.impl */

typedef struct ft__io_dtype_row {
    const char *name;
    int bits;
} ft__io_dtype_row;

/* In the order of the enum. The names are those of the safetensors crate's Dtype. */
static const ft__io_dtype_row ft__io_dtypes[FT_IO_DTYPE_COUNT] = {
    {"F32", 32},    {"BF16", 16},   {"F16", 16},        {"F64", 64},        {"I64", 64},
    {"I32", 32},    {"I16", 16},    {"I8", 8},          {"U64", 64},        {"U32", 32},
    {"U16", 16},    {"U8", 8},      {"BOOL", 8},        {"C64", 64},        {"F8_E4M3", 8},
    {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6},
    {"F6_E3M2", 6}, {"F4", 4}};

static int ft__io_dtype_valid(ft_io_dtype dtype)
{
    return (int)dtype >= 0 && (int)dtype < (int)FT_IO_DTYPE_COUNT;
}

FT_API const char *ft_io_dtype_name(ft_io_dtype dtype)
{
    return ft__io_dtype_valid(dtype) ? ft__io_dtypes[dtype].name : "?";
}

FT_API int ft_io_dtype_bits(ft_io_dtype dtype)
{
    return ft__io_dtype_valid(dtype) ? ft__io_dtypes[dtype].bits : 0;
}

FT_API ft_io_dtype ft_io_dtype_of(ft_dtype dtype)
{
    if (dtype == FT_F32) return FT_IO_F32;
    if (dtype == FT_BF16) return FT_IO_BF16;
    if (dtype == FT_I32) return FT_IO_I32;
    return FT_IO_DTYPE_COUNT;
}

static ft_io_dtype ft__io_dtype_named(const char *name)
{
    int i = 0;
    while (i < (int)FT_IO_DTYPE_COUNT && strcmp(name, ft__io_dtypes[i].name) != 0) i++;
    return (ft_io_dtype)i;
}

/* Elements and bytes of a shape without negative dimensions. Returns NULL, or what is wrong. */
static const char *ft__io_extent(ft_io_dtype dtype, int ndim, const int64_t *shape, int64_t *elems,
                                 size_t *bytes)
{
    int64_t n = 1, nonzero = 1;
    const int64_t bits = ft_io_dtype_bits(dtype);
    for (int i = 0; i < ndim; i++) {
        /* Zeros stay out of the product that is checked, so that no order of dimensions hides an
           overflow from readers who multiply in another. */
        const int64_t d = shape[i] > 0 ? shape[i] : 1;
        if (nonzero > INT64_MAX / d) return "the number of elements overflows 63 bits";
        nonzero *= d;
        if (shape[i] == 0) n = 0;
    }
    if (nonzero > INT64_MAX / bits) return "the number of bits overflows 63 bits";
    if (n != 0) n = nonzero;
    if (n * bits % 8 != 0) return "the packed elements do not fill whole bytes";
    *elems = n;
    *bytes = (size_t)(n * bits / 8);
    return NULL;
}

static float ft__io_float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float ft__io_float_of_f16(uint16_t bits)
{
    const uint32_t sign = (uint32_t)(bits >> 15) << 31;
    const uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 1023u;
    if (exponent == 31) return ft__io_float_of_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent > 0) return ft__io_float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    /* Subnormal, or zero with its sign: mantissa * 2^-24, exact in fp32. */
    return (sign != 0 ? -1.0f : 1.0f) * ((float)mantissa * (1.0f / 16777216.0f));
}

static ft_status ft__io_check_range(const char *function, const ft_io_tensor *tensor, int64_t first,
                                    int64_t n, const void *values)
{
    if (tensor == NULL || (values == NULL && n != 0))
        return ft_error(FT_ERR_ARG, "%s: tensor and values must not be NULL", function);
    if (first < 0 || n < 0 || first > tensor->elems || n > tensor->elems - first)
        return ft_error(
            FT_ERR_ARG, "%s: %lld elements from element %lld are outside tensor \"%s\" of %lld",
            function, (long long)n, (long long)first, tensor->name, (long long)tensor->elems);
    return FT_OK;
}

FT_API ft_status ft_io_read_float(const ft_io_tensor *tensor, int64_t first, int64_t n,
                                  float *values)
{
    FT_TRY(ft__io_check_range("ft_io_read_float", tensor, first, n, values));
    const size_t width = (size_t)ft_io_dtype_bits(tensor->dtype) / 8;
    const ft_io_dtype dtype = tensor->dtype;
    if (dtype != FT_IO_F32 && dtype != FT_IO_BF16 && dtype != FT_IO_F16 && dtype != FT_IO_F64)
        return ft_error(FT_ERR_UNSUPPORTED,
                        "ft_io_read_float: tensor \"%s\" is %s; F32, BF16, F16 and F64 become "
                        "float",
                        tensor->name, ft_io_dtype_name(dtype));
    if (n == 0) return FT_OK;
    const unsigned char *from = (const unsigned char *)tensor->data + (size_t)first * width;
    if (dtype == FT_IO_F32) {
        memcpy(values, from, (size_t)n * width);
        return FT_OK;
    }
    for (int64_t i = 0; i < n; i++, from += width) {
        uint16_t bits;
        double wide;
        if (dtype == FT_IO_F64) {
            memcpy(&wide, from, sizeof wide);
            values[i] = (float)wide;
        } else {
            memcpy(&bits, from, sizeof bits);
            values[i] = dtype == FT_IO_BF16 ? ft__io_float_of_bits((uint32_t)bits << 16)
                                            : ft__io_float_of_f16(bits);
        }
    }
    return FT_OK;
}

/* One little-endian integer of 1, 2, 4 or 8 bytes, zero-extended. */
static uint64_t ft__io_load(const unsigned char *from, size_t width)
{
    uint64_t value = 0;
    memcpy(&value, from, width);
    return value;
}

FT_API ft_status ft_io_read_int(const ft_io_tensor *tensor, int64_t first, int64_t n,
                                int64_t *values)
{
    FT_TRY(ft__io_check_range("ft_io_read_int", tensor, first, n, values));
    const size_t width = (size_t)ft_io_dtype_bits(tensor->dtype) / 8;
    const int is_signed = tensor->dtype == FT_IO_I64 || tensor->dtype == FT_IO_I32 ||
                          tensor->dtype == FT_IO_I16 || tensor->dtype == FT_IO_I8;
    if (!is_signed && tensor->dtype != FT_IO_U64 && tensor->dtype != FT_IO_U32 &&
        tensor->dtype != FT_IO_U16 && tensor->dtype != FT_IO_U8 && tensor->dtype != FT_IO_BOOL)
        return ft_error(FT_ERR_UNSUPPORTED, "ft_io_read_int: tensor \"%s\" is %s, not of integers",
                        tensor->name, ft_io_dtype_name(tensor->dtype));
    if (n == 0) return FT_OK;
    const unsigned char *from = (const unsigned char *)tensor->data + (size_t)first * width;
    for (int64_t i = 0; i < n; i++, from += width) {
        uint64_t bits = ft__io_load(from, width);
        const uint64_t top = (uint64_t)1 << (8 * width - 1);
        if (is_signed) bits = (bits ^ top) - top; /* extends the sign bit over the upper bytes */
        else if (bits > (uint64_t)INT64_MAX)
            return ft_error(FT_ERR_DATA,
                            "ft_io_read_int: element %lld of tensor \"%s\" is above 2^63 - 1",
                            (long long)(first + i), tensor->name);
        memcpy(&values[i], &bits, sizeof bits);
    }
    return FT_OK;
}

/* -------------------------------------------------------------------------------- >>files.impl */

static char *ft__io_copy(const char *string)
{
    const size_t n = strlen(string) + 1;
    char *copy = (char *)FT_MALLOC(n);
    if (copy != NULL) memcpy(copy, string, n);
    return copy;
}

static ft_status ft__io_oom(const char *path, size_t bytes)
{
    return ft_error(FT_ERR_OOM, "%s: no memory for %zu bytes", path, bytes);
}

/* The array with room for one more element: itself, or a copy twice as large, so that n additions
   move less than 2n elements. NULL, and the array as it was, when there is no memory. */
static void *ft__io_grow(void *array, size_t n, size_t *capacity, size_t elem_bytes)
{
    if (n < *capacity) return array;
    const size_t more = *capacity == 0 ? 16 : *capacity * 2;
    void *grown = FT_MALLOC(more * elem_bytes);
    if (grown == NULL) return NULL;
    if (n > 0) memcpy(grown, array, n * elem_bytes);
    FT_FREE(array);
    *capacity = more;
    return grown;
}

typedef struct ft__io_map {
    void *base;   /* NULL for an empty file, which cannot be mapped */
    size_t bytes;
} ft__io_map;

static ft_status ft__io_map_fd(int fd, const char *path, ft__io_map *map)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return ft_error(FT_ERR_IO, "%s: cannot ask for its size: %s", path, strerror(errno));
    if (S_ISDIR(info.st_mode)) return ft_error(FT_ERR_IO, "%s: is a directory, not a file", path);
    if (!S_ISREG(info.st_mode))
        return ft_error(FT_ERR_IO, "%s: not a regular file; pipes and devices cannot be mapped",
                        path);
    if ((uint64_t)info.st_size > (uint64_t)(SIZE_MAX / 2))
        return ft_error(FT_ERR_IO, "%s: %lld bytes exceed the address space", path,
                        (long long)info.st_size);
    if (info.st_size == 0) return FT_OK;
    void *base = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return ft_error(FT_ERR_IO, "%s: cannot map its %lld bytes: %s", path,
                        (long long)info.st_size, strerror(errno));
    map->base = base;
    map->bytes = (size_t)info.st_size;
    return FT_OK;
}

static int ft__io_open_fd(const char *path, int flags)
{
#ifdef O_CLOEXEC
    flags |= O_CLOEXEC;
#endif
    int fd;
    do fd = open(path, flags, 0666);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* Maps a whole file for reading. The descriptor is closed: the mapping lives without it. */
static ft_status ft__io_map_open(const char *path, ft__io_map *map)
{
    map->base = NULL;
    map->bytes = 0;
    /* Without O_NONBLOCK, opening a pipe waits for a writer before it can be refused. */
    const int fd = ft__io_open_fd(path, O_RDONLY | O_NONBLOCK);
    if (fd < 0) return ft_error(FT_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
    const ft_status status = ft__io_map_fd(fd, path, map);
    close(fd);
    return status;
}

static void ft__io_map_close(ft__io_map *map)
{
    if (map->base != NULL) munmap(map->base, map->bytes);
    map->base = NULL;
}

/* Writes all bytes, however the system splits them; *written tells how far it came. 0, or errno. */
static int ft__io_write(int fd, const void *from, size_t bytes, size_t *written)
{
    size_t done = 0;
    int error = 0;
    while (done < bytes && error == 0) {
        const ssize_t n = write(fd, (const char *)from + done, bytes - done);
        if (n > 0) done += (size_t)n;
        else if (n == 0) error = EIO; /* POSIX forbids it; looping would not end */
        else if (errno != EINTR) error = errno;
    }
    if (written != NULL) *written = done;
    return error;
}

/* -------------------------------------------------------------------------------- >>utf8.impl */

/* Bytes of the UTF-8 character at s (n bytes are left): 1 to 4; 0 if there is none. Overlong forms,
   surrogates and values above U+10FFFF are none (Unicode 15, table 3-7). */
static size_t ft__io_utf8(const char *string, size_t n)
{
    const unsigned char *s = (const unsigned char *)string;
    if (n == 0) return 0;
    if (s[0] < 0x80) return 1;
    const size_t length = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || n < length) return 0;
    for (size_t i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if (s[0] == 0xe0 && s[1] < 0xa0) return 0;
    if (s[0] == 0xed && s[1] > 0x9f) return 0;
    if (s[0] == 0xf0 && s[1] < 0x90) return 0;
    if (s[0] == 0xf4 && s[1] > 0x8f) return 0;
    return length;
}

static int ft__io_utf8_valid(const char *string)
{
    const size_t n = strlen(string);
    size_t at = 0, length = 1;
    while (at < n && length > 0) at += (length = ft__io_utf8(string + at, n - at));
    return at == n;
}

/* A string from a file, fit for a message of one line: control characters and stray bytes become
   '?', a long one is cut. */
typedef struct ft__io_shown {
    char text[84];
} ft__io_shown;

static ft__io_shown ft__io_show(const char *string)
{
    ft__io_shown shown;
    const size_t n = strlen(string);
    size_t from = 0, to = 0;
    while (from < n && to + 4 < 80) {
        const size_t length = ft__io_utf8(string + from, n - from);
        if (length == 0 || (unsigned char)string[from] < 0x20 || string[from] == 0x7f) {
            shown.text[to++] = '?';
            from++;
        } else {
            memcpy(shown.text + to, string + from, length);
            to += length;
            from += length;
        }
    }
    memcpy(shown.text + to, from < n ? "..." : "", from < n ? 4 : 1);
    return shown;
}

/* --------------------------------------------------------------------------------- >>json.impl */

typedef struct ft__io_text { /* a growing string, not terminated */
    char *bytes;
    size_t n, capacity;
} ft__io_text;

enum { FT__IO_DEPTH = 64, FT__IO_SPILL = 65536 };

struct ft_io_json {
    ft__io_text text;
    FILE *file;               /* NULL: everything stays in `text` */
    int owns_file;
    char *name;
    int depth;
    char close[FT__IO_DEPTH]; /* what ends each open level: '}' or ']' */
    int filled;               /* the innermost level (or the top) has a value: a comma comes next */
    int keyed;                /* a key was written and waits for its value */
    ft_status status;         /* the first error, and its text */
    char message[320];
};

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static void ft__io_json_fail(ft_io_json *json, ft_status status, const char *format, ...)
{
    if (json->status != FT_OK) return;
    va_list list;
    va_start(list, format);
    vsnprintf(json->message, sizeof json->message, format, list);
    va_end(list);
    json->status = status;
}

static void ft__io_json_spill(ft_io_json *json)
{
    if (json->file == NULL || json->status != FT_OK) return;
    errno = 0;
    if (fwrite(json->text.bytes, 1, json->text.n, json->file) != json->text.n)
        ft__io_json_fail(json, FT_ERR_IO, "cannot write: %s", strerror(errno));
    json->text.n = 0;
}

/* 0 if there is no memory; the text is as it was then. */
static int ft__io_text_put(ft__io_text *text, const void *bytes, size_t n)
{
    if (n > text->capacity - text->n) {
        const size_t more = (text->n + n) * 2 + 256;
        char *grown = (char *)FT_MALLOC(more);
        if (grown == NULL) return 0;
        if (text->n > 0) memcpy(grown, text->bytes, text->n);
        FT_FREE(text->bytes);
        text->bytes = grown;
        text->capacity = more;
    }
    memcpy(text->bytes + text->n, bytes, n);
    text->n += n;
    return 1;
}

static void ft__io_json_put(ft_io_json *json, const char *bytes, size_t n)
{
    if (json->status != FT_OK) return;
    if (!ft__io_text_put(&json->text, bytes, n))
        ft__io_json_fail(json, FT_ERR_OOM, "no memory for %zu bytes of JSON", json->text.n + n);
    else if (json->text.n >= FT__IO_SPILL) ft__io_json_spill(json);
}

static void ft__io_json_escape(ft_io_json *json, const char *string)
{
    const size_t n = strlen(string);
    size_t length;
    ft__io_json_put(json, "\"", 1);
    for (size_t at = 0; at < n; at += length) {
        const char c = string[at];
        char escape[8];
        length = ft__io_utf8(string + at, n - at);
        if (length == 0) {
            ft__io_json_put(json, "\\ufffd", 6);
            length = 1;
        } else if (c == '"' || c == '\\') {
            escape[0] = '\\';
            escape[1] = c;
            ft__io_json_put(json, escape, 2);
        } else if ((unsigned char)c < 0x20) {
            snprintf(escape, sizeof escape, "\\u%04x", (unsigned)c);
            ft__io_json_put(json, escape, 6);
        } else {
            ft__io_json_put(json, string + at, length);
        }
    }
    ft__io_json_put(json, "\"", 1);
}

/* 1 if a value may stand here; writes the comma before it. */
static int ft__io_json_value(ft_io_json *json)
{
    if (json == NULL || json->status != FT_OK) return 0;
    if (json->depth == 0 && json->filled)
        ft__io_json_fail(json, FT_ERR_STATE, "a second value after the first has ended");
    else if (json->depth > 0 && json->close[json->depth - 1] == '}' && !json->keyed)
        ft__io_json_fail(json, FT_ERR_STATE, "a value in an object without a key");
    else if (json->filled && !json->keyed) ft__io_json_put(json, ",", 1);
    json->filled = 1;
    json->keyed = 0;
    return json->status == FT_OK;
}

static void ft__io_json_begin(ft_io_json *json, char open, char close)
{
    if (!ft__io_json_value(json)) return;
    if (json->depth == FT__IO_DEPTH) {
        ft__io_json_fail(json, FT_ERR_STATE, "more than %d levels of nesting", (int)FT__IO_DEPTH);
        return;
    }
    ft__io_json_put(json, &open, 1);
    json->close[json->depth++] = close;
    json->filled = 0;
}

static void ft__io_json_end(ft_io_json *json, char close)
{
    if (json == NULL || json->status != FT_OK) return;
    if (json->depth == 0 || json->close[json->depth - 1] != close || json->keyed) {
        ft__io_json_fail(json, FT_ERR_STATE, "'%c' without its beginning, or after a key", close);
        return;
    }
    json->depth--;
    json->filled = 1;
    ft__io_json_put(json, &close, 1);
}

FT_API void ft_io_json_begin_object(ft_io_json *json)
{
    ft__io_json_begin(json, '{', '}');
}

FT_API void ft_io_json_end_object(ft_io_json *json)
{
    ft__io_json_end(json, '}');
}

FT_API void ft_io_json_begin_array(ft_io_json *json)
{
    ft__io_json_begin(json, '[', ']');
}

FT_API void ft_io_json_end_array(ft_io_json *json)
{
    ft__io_json_end(json, ']');
}

FT_API void ft_io_json_key(ft_io_json *json, const char *key)
{
    if (json == NULL || json->status != FT_OK) return;
    if (key == NULL || json->keyed || json->depth == 0 || json->close[json->depth - 1] != '}') {
        ft__io_json_fail(json, FT_ERR_STATE, "key \"%s\" outside an object, or after a key",
                         key != NULL ? ft__io_show(key).text : "(NULL)");
        return;
    }
    if (json->filled) ft__io_json_put(json, ",", 1);
    ft__io_json_escape(json, key);
    ft__io_json_put(json, ":", 1);
    json->filled = 1;
    json->keyed = 1;
}

FT_API void ft_io_json_int(ft_io_json *json, int64_t value)
{
    char text[32];
    if (!ft__io_json_value(json)) return;
    const int n = snprintf(text, sizeof text, "%lld", (long long)value);
    ft__io_json_put(json, text, (size_t)n);
}

static void ft__io_json_number(ft_io_json *json, double value, int digits)
{
    char text[40], clean[40];
    int n = 0;
    if (!isfinite(value)) {
        ft_io_json_null(json);
        return;
    }
    if (!ft__io_json_value(json)) return;
    snprintf(text, sizeof text, "%.*g", digits, value);
    /* Whatever is neither digit, sign nor exponent is the decimal point of the program's locale,
       which may be a comma, or several bytes; JSON's is a dot. */
    for (const char *c = text; *c != 0; c++) {
        const int plain = (*c >= '0' && *c <= '9') || *c == '-' || *c == '+' || *c == 'e';
        if (plain || n == 0 || clean[n - 1] != '.') clean[n++] = plain ? *c : '.';
    }
    ft__io_json_put(json, clean, (size_t)n);
}

FT_API void ft_io_json_float(ft_io_json *json, double value)
{
    ft__io_json_number(json, value, 9);
}

FT_API void ft_io_json_double(ft_io_json *json, double value)
{
    char text[40];
    int digits = 9;
    for (; digits < 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        const double read = strtod(text, NULL);
        if (read <= value && read >= value) break;
    }
    ft__io_json_number(json, value, digits);
}

FT_API void ft_io_json_bool(ft_io_json *json, int value)
{
    if (ft__io_json_value(json)) ft__io_json_put(json, value ? "true" : "false", value ? 4 : 5);
}

FT_API void ft_io_json_null(ft_io_json *json)
{
    if (ft__io_json_value(json)) ft__io_json_put(json, "null", 4);
}

FT_API void ft_io_json_string(ft_io_json *json, const char *value)
{
    if (json == NULL || json->status != FT_OK) return;
    if (value == NULL) ft__io_json_fail(json, FT_ERR_ARG, "a string is NULL");
    else if (ft__io_json_value(json)) ft__io_json_escape(json, value);
}

/* The first error as this thread's; without one, whether the text is whole. */
static ft_status ft__io_json_status(ft_io_json *json)
{
    if (json->depth > 0)
        ft__io_json_fail(json, FT_ERR_STATE, "%d objects or arrays are not ended", json->depth);
    else if (!json->filled) ft__io_json_fail(json, FT_ERR_STATE, "no value was written");
    if (json->status == FT_OK) return FT_OK;
    return ft_error(json->status, "%s: JSON: %s", json->name, json->message);
}

FT_API ft_status ft_io_json_create(FILE *file, const char *name, ft_io_json **out)
{
    if (file == NULL || name == NULL || out == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_json_create: file, name and out must not be NULL");
    ft_io_json *json = (ft_io_json *)FT_MALLOC(sizeof *json);
    char *copy = ft__io_copy(name);
    *out = NULL;
    if (json == NULL || copy == NULL) {
        FT_FREE(json);
        FT_FREE(copy);
        return ft__io_oom(name, sizeof *json);
    }
    memset(json, 0, sizeof *json);
    json->file = file;
    json->name = copy;
    *out = json;
    return FT_OK;
}

FT_API ft_status ft_io_json_open(const char *path, ft_io_json **out)
{
    if (path == NULL || out == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_json_open: path and out must not be NULL");
    *out = NULL;
    FILE *file = fopen(path, "w");
    if (file == NULL)
        return ft_error(FT_ERR_IO, "%s: cannot open for writing: %s", path, strerror(errno));
    const ft_status status = ft_io_json_create(file, path, out);
    if (status != FT_OK) fclose(file);
    else (*out)->owns_file = 1;
    return status;
}

FT_API ft_status ft_io_json_finish(ft_io_json *json)
{
    if (json == NULL) return FT_OK;
    ft__io_json_put(json, "\n", 1);
    ft__io_json_spill(json);
    if (fflush(json->file) != 0)
        ft__io_json_fail(json, FT_ERR_IO, "cannot write: %s", strerror(errno));
    if (json->owns_file && fclose(json->file) != 0)
        ft__io_json_fail(json, FT_ERR_IO, "cannot close: %s", strerror(errno));
    const ft_status status = ft__io_json_status(json);
    FT_FREE(json->text.bytes);
    FT_FREE(json->name);
    FT_FREE(json);
    return status;
}

/* ------------------------------------------------------------------------------- >>header.impl */

/* The header of a safetensors file is JSON of one shape:

     { "__metadata__": {"key": "string", ...},
       "tensor": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ... }

   so this parser knows that shape and nothing else. Its functions follow the grammar, each
   consuming one construct at `at`; no construct contains itself, so depth is bounded by the code.
   Numbers are integers that are not negative. Strings are decoded where they stand (an escape is
   never shorter than what it means, and the closing quote leaves room for the terminator), so all
   names are pointers into one copy of the header. */
typedef struct ft__io_header {
    const char *path;
    char *text;
    size_t n, at;
    const char *tensor; /* being parsed, for messages; NULL outside */
} ft__io_header;

typedef struct ft__io_entry {
    ft_io_tensor tensor;
    uint64_t begin, end;  /* in the data */
    int64_t ordinal;      /* in the header: makes the order total */
} ft__io_entry;

typedef struct ft__io_pair {
    const char *key, *value;
} ft__io_pair;

struct ft_io_safetensors {
    ft__io_map map;
    char *text;
    ft__io_entry *entries;      /* in the order of the data */
    const ft_io_tensor **named; /* the same tensors by name */
    ft__io_pair *pairs;         /* by key */
    size_t n_entries, n_pairs, entry_capacity, pair_capacity;
    int has_metadata;
};

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static ft_status ft__io_header_error(const ft__io_header *h, ft_status status, const char *format,
                                     ...)
{
    char reason[256];
    va_list list;
    va_start(list, format);
    vsnprintf(reason, sizeof reason, format, list);
    va_end(list);
    if (h->tensor == NULL)
        return ft_error(status, "%s: safetensors header, byte %zu: %s", h->path, h->at, reason);
    return ft_error(status, "%s: safetensors header, byte %zu, tensor \"%s\": %s", h->path, h->at,
                    ft__io_show(h->tensor).text, reason);
}

static int ft__io_peek(ft__io_header *h)
{
    while (h->at < h->n && strchr(" \t\n\r", h->text[h->at]) != NULL && h->text[h->at] != 0)
        h->at++;
    return h->at < h->n ? (unsigned char)h->text[h->at] : -1;
}

static ft_status ft__io_unexpected(const ft__io_header *h, const char *wanted)
{
    if (h->at >= h->n)
        return ft__io_header_error(h, FT_ERR_DATA, "expected %s, found the header's end", wanted);
    const unsigned char c = (unsigned char)h->text[h->at];
    if (c > 0x20 && c < 0x7f)
        return ft__io_header_error(h, FT_ERR_DATA, "expected %s, found '%c'", wanted, c);
    return ft__io_header_error(h, FT_ERR_DATA, "expected %s, found byte 0x%02x", wanted,
                               (unsigned)c);
}

static ft_status ft__io_expect(ft__io_header *h, char c, const char *wanted)
{
    if (ft__io_peek(h) != (unsigned char)c) return ft__io_unexpected(h, wanted);
    h->at++;
    return FT_OK;
}

/* Between the elements of an object or array: *more = 1 if another follows. */
static ft_status ft__io_next(ft__io_header *h, char close, int first, int *more)
{
    const int c = ft__io_peek(h);
    *more = 1;
    if (c == (unsigned char)close) {
        h->at++;
        *more = 0;
    } else if (!first) {
        if (c != ',') return ft__io_unexpected(h, close == '}' ? "',' or '}'" : "',' or ']'");
        h->at++;
    }
    return FT_OK;
}

static ft_status ft__io_parse_hex4(ft__io_header *h, uint32_t *value)
{
    *value = 0;
    for (int i = 0; i < 4; i++, h->at++) {
        static const char digits[] = "0123456789abcdef";
        const char c = h->at < h->n ? h->text[h->at] : 0;
        const char *digit = strchr(digits, c >= 'A' && c <= 'F' ? c + ('a' - 'A') : c);
        if (c == 0 || digit == NULL)
            return ft__io_unexpected(h, "four hexadecimal digits after \\u");
        *value = *value << 4 | (uint32_t)(digit - digits);
    }
    return FT_OK;
}

/* After "\u": one code point, from two escapes where the first is a high surrogate, as UTF-8. */
static ft_status ft__io_parse_unicode(ft__io_header *h, char **write)
{
    uint32_t code, low;
    FT_TRY(ft__io_parse_hex4(h, &code));
    if (code == 0)
        return ft__io_header_error(h, FT_ERR_DATA,
                                   "\\u0000 in a string: names and metadata are C strings");
    if (code >= 0xd800 && code <= 0xdfff) {
        int paired = code <= 0xdbff && h->n - h->at >= 2 && memcmp(h->text + h->at, "\\u", 2) == 0;
        if (paired) {
            h->at += 2;
            FT_TRY(ft__io_parse_hex4(h, &low));
            paired = low >= 0xdc00 && low <= 0xdfff;
            code = 0x10000 + ((code - 0xd800) << 10) + ((low - 0xdc00) & 0x3ff);
        }
        if (!paired)
            return ft__io_header_error(h, FT_ERR_DATA, "half of a surrogate pair in a string");
    }
    char *w = *write;
    if (code < 0x80) {
        *w++ = (char)code;
    } else if (code < 0x800) {
        *w++ = (char)(0xc0 | code >> 6);
        *w++ = (char)(0x80 | (code & 63));
    } else {
        if (code < 0x10000) {
            *w++ = (char)(0xe0 | code >> 12);
        } else {
            *w++ = (char)(0xf0 | code >> 18);
            *w++ = (char)(0x80 | (code >> 12 & 63));
        }
        *w++ = (char)(0x80 | (code >> 6 & 63));
        *w++ = (char)(0x80 | (code & 63));
    }
    *write = w;
    return FT_OK;
}

/* After a backslash. */
static ft_status ft__io_parse_escape(ft__io_header *h, char **write)
{
    static const char names[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    const char c = h->at < h->n ? h->text[h->at] : 0;
    const char *name = strchr(names, c);
    if (c == 'u') {
        h->at++;
        return ft__io_parse_unicode(h, write);
    }
    if (c == 0 || name == NULL) return ft__io_unexpected(h, "an escape of JSON after '\\'");
    *(*write)++ = meanings[name - names];
    h->at++;
    return FT_OK;
}

static ft_status ft__io_parse_string(ft__io_header *h, char **string, const char *wanted)
{
    FT_TRY(ft__io_expect(h, '"', wanted));
    char *write = h->text + h->at;
    *string = write;
    for (;;) {
        if (h->at >= h->n) return ft__io_unexpected(h, "'\"' at the end of a string");
        const unsigned char c = (unsigned char)h->text[h->at];
        if (c == '"') break;
        if (c == '\\') {
            h->at++;
            FT_TRY(ft__io_parse_escape(h, &write));
            continue;
        }
        const size_t length = ft__io_utf8(h->text + h->at, h->n - h->at);
        if (c < 0x20)
            return ft__io_header_error(h, FT_ERR_DATA, "control character 0x%02x in a string",
                                       (unsigned)c);
        if (length == 0)
            return ft__io_header_error(h, FT_ERR_DATA, "byte 0x%02x in a string is not UTF-8",
                                       (unsigned)c);
        memmove(write, h->text + h->at, length);
        write += length;
        h->at += length;
    }
    h->at++;
    *write = 0;
    return FT_OK;
}

static ft_status ft__io_parse_integer(ft__io_header *h, const char *wanted, int64_t *value)
{
    int c = ft__io_peek(h);
    if (c == '-')
        return ft__io_header_error(h, FT_ERR_DATA, "a negative number where %s belongs", wanted);
    if (c < '0' || c > '9') return ft__io_unexpected(h, wanted);
    const int zero = c == '0';
    *value = 0;
    for (int digits = 0; c >= '0' && c <= '9'; digits++) {
        if (zero && digits > 0)
            return ft__io_header_error(h, FT_ERR_DATA, "a number with a leading zero");
        if (*value > (INT64_MAX - (c - '0')) / 10)
            return ft__io_header_error(h, FT_ERR_DATA, "a number above 2^63 - 1");
        *value = *value * 10 + (c - '0');
        h->at++;
        c = h->at < h->n ? (unsigned char)h->text[h->at] : -1;
    }
    if (c == '.' || c == 'e' || c == 'E')
        return ft__io_header_error(h, FT_ERR_DATA, "a fraction where %s belongs", wanted);
    return FT_OK;
}

static ft_status ft__io_parse_shape(ft__io_header *h, ft_io_tensor *tensor)
{
    int more;
    FT_TRY(ft__io_expect(h, '[', "'[' of the shape"));
    for (tensor->ndim = 0;; tensor->ndim++) {
        int64_t dimension;
        FT_TRY(ft__io_next(h, ']', tensor->ndim == 0, &more));
        if (!more) return FT_OK;
        FT_TRY(ft__io_parse_integer(h, "a dimension", &dimension));
        if (tensor->ndim == FT_IO_MAX_DIMS)
            return ft__io_header_error(h, FT_ERR_UNSUPPORTED, "more than %d dimensions",
                                       (int)FT_IO_MAX_DIMS);
        tensor->shape[tensor->ndim] = dimension;
    }
}

static ft_status ft__io_parse_offsets(ft__io_header *h, ft__io_entry *entry)
{
    int64_t begin, end;
    FT_TRY(ft__io_expect(h, '[', "'[' of data_offsets"));
    FT_TRY(ft__io_parse_integer(h, "the first of two offsets", &begin));
    FT_TRY(ft__io_expect(h, ',', "',' between two offsets"));
    FT_TRY(ft__io_parse_integer(h, "the second of two offsets", &end));
    FT_TRY(ft__io_expect(h, ']', "']' after two offsets"));
    entry->begin = (uint64_t)begin;
    entry->end = (uint64_t)end;
    return FT_OK;
}

static ft_status ft__io_parse_dtype(ft__io_header *h, ft_io_tensor *tensor)
{
    char *name;
    FT_TRY(ft__io_parse_string(h, &name, "a string as dtype"));
    tensor->dtype = ft__io_dtype_named(name);
    if (tensor->dtype == FT_IO_DTYPE_COUNT)
        return ft__io_header_error(h, FT_ERR_UNSUPPORTED, "unknown dtype \"%s\"",
                                   ft__io_show(name).text);
    return FT_OK;
}

static ft_status ft__io_parse_tensor(ft__io_header *h, ft__io_entry *entry)
{
    static const char *const keys[3] = {"dtype", "shape", "data_offsets"};
    int seen[3] = {0, 0, 0}, more;
    FT_TRY(ft__io_expect(h, '{', "'{' of the tensor's description"));
    for (int first = 1;; first = 0) {
        char *key;
        int k = 0;
        FT_TRY(ft__io_next(h, '}', first, &more));
        if (!more) break;
        FT_TRY(ft__io_parse_string(h, &key, "a key"));
        while (k < 3 && strcmp(key, keys[k]) != 0) k++;
        if (k == 3)
            return ft__io_header_error(h, FT_ERR_DATA, "unknown key \"%s\"", ft__io_show(key).text);
        if (seen[k]++) return ft__io_header_error(h, FT_ERR_DATA, "key \"%s\" twice", keys[k]);
        FT_TRY(ft__io_expect(h, ':', "':' after a key"));
        if (k == 0) FT_TRY(ft__io_parse_dtype(h, &entry->tensor));
        if (k == 1) FT_TRY(ft__io_parse_shape(h, &entry->tensor));
        if (k == 2) FT_TRY(ft__io_parse_offsets(h, entry));
    }
    for (int k = 0; k < 3; k++)
        if (!seen[k]) return ft__io_header_error(h, FT_ERR_DATA, "key \"%s\" is missing", keys[k]);
    return FT_OK;
}

static ft_status ft__io_parse_metadata(ft__io_header *h, ft_io_safetensors *file)
{
    int more;
    if (file->has_metadata) return ft__io_header_error(h, FT_ERR_DATA, "__metadata__ twice");
    file->has_metadata = 1;
    FT_TRY(ft__io_expect(h, '{', "'{' of __metadata__"));
    for (int first = 1;; first = 0) {
        char *key, *value;
        FT_TRY(ft__io_next(h, '}', first, &more));
        if (!more) return FT_OK;
        FT_TRY(ft__io_parse_string(h, &key, "a key"));
        FT_TRY(ft__io_expect(h, ':', "':' after a key"));
        FT_TRY(ft__io_parse_string(h, &value, "a string as value in __metadata__"));
        void *grown =
            ft__io_grow(file->pairs, file->n_pairs, &file->pair_capacity, sizeof *file->pairs);
        if (grown == NULL) return ft__io_oom(h->path, file->n_pairs * 2 * sizeof *file->pairs);
        file->pairs = (ft__io_pair *)grown;
        file->pairs[file->n_pairs].key = key;
        file->pairs[file->n_pairs++].value = value;
    }
}

static ft_status ft__io_parse_header(ft__io_header *h, ft_io_safetensors *file)
{
    int more;
    if (h->n == 0 || h->text[0] != '{')
        return ft__io_unexpected(h, "'{' as its first byte: the header is a JSON object");
    h->at = 1;
    for (int first = 1;; first = 0) {
        char *name;
        FT_TRY(ft__io_next(h, '}', first, &more));
        if (!more) break;
        FT_TRY(ft__io_parse_string(h, &name, "a tensor's name"));
        FT_TRY(ft__io_expect(h, ':', "':' after a name"));
        if (strcmp(name, "__metadata__") == 0) {
            FT_TRY(ft__io_parse_metadata(h, file));
            continue;
        }
        void *grown = ft__io_grow(file->entries, file->n_entries, &file->entry_capacity,
                                  sizeof *file->entries);
        if (grown == NULL) return ft__io_oom(h->path, file->n_entries * 2 * sizeof *file->entries);
        file->entries = (ft__io_entry *)grown;
        ft__io_entry *entry = &file->entries[file->n_entries];
        memset(entry, 0, sizeof *entry);
        entry->tensor.name = name;
        entry->ordinal = (int64_t)file->n_entries++;
        h->tensor = name;
        FT_TRY(ft__io_parse_tensor(h, entry));
        h->tensor = NULL;
    }
    if (ft__io_peek(h) >= 0) return ft__io_unexpected(h, "nothing but blanks after the object");
    return FT_OK;
}

/* -------------------------------------------------------------------------- >>safetensors.impl */

#define FT__IO_MAX_HEADER 100000000u /* as the format's reference implementation limits it */

static int ft__io_by_offset(const void *a, const void *b)
{
    const ft__io_entry *x = (const ft__io_entry *)a, *y = (const ft__io_entry *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return x->ordinal < y->ordinal ? -1 : x->ordinal > y->ordinal;
}

static int ft__io_by_name(const void *a, const void *b)
{
    return strcmp((*(const ft_io_tensor *const *)a)->name, (*(const ft_io_tensor *const *)b)->name);
}

static int ft__io_by_key(const void *a, const void *b)
{
    return strcmp(((const ft__io_pair *)a)->key, ((const ft__io_pair *)b)->key);
}

/* One tensor against its own numbers and the bytes that the file has for data. */
static ft_status ft__io_check_entry(const char *path, ft__io_entry *entry, uint64_t data_bytes)
{
    ft_io_tensor *t = &entry->tensor;
    const unsigned long long begin = entry->begin, end = entry->end;
    const char *wrong = ft__io_extent(t->dtype, t->ndim, t->shape, &t->elems, &t->bytes);
    if (wrong != NULL)
        return ft_error(FT_ERR_DATA, "%s: safetensors tensor \"%s\": bad shape: %s", path,
                        ft__io_show(t->name).text, wrong);
    if (begin > end)
        return ft_error(FT_ERR_DATA,
                        "%s: safetensors tensor \"%s\": data_offsets [%llu, %llu] run backwards",
                        path, ft__io_show(t->name).text, begin, end);
    if (end > data_bytes)
        return ft_error(FT_ERR_DATA,
                        "%s: safetensors tensor \"%s\": data_offsets [%llu, %llu] lie outside the "
                        "file, which has %llu bytes of data (is it cut short?)",
                        path, ft__io_show(t->name).text, begin, end,
                        (unsigned long long)data_bytes);
    if (end - begin != t->bytes)
        return ft_error(FT_ERR_DATA,
                        "%s: safetensors tensor \"%s\": data_offsets [%llu, %llu] give %llu bytes, "
                        "but its shape of %lld elements in %s needs %zu",
                        path, ft__io_show(t->name).text, begin, end, end - begin,
                        (long long)t->elems, ft_io_dtype_name(t->dtype), t->bytes);
    return FT_OK;
}

/* All tensors together: sorted, they tile the data without overlap or gap. Sets their pointers. */
static ft_status ft__io_check_layout(const char *path, ft_io_safetensors *file, uint64_t data_start)
{
    const uint64_t data_bytes = file->map.bytes - data_start;
    uint64_t at = 0;
    if (file->n_entries > 1)
        qsort(file->entries, file->n_entries, sizeof *file->entries, ft__io_by_offset);
    for (size_t i = 0; i < file->n_entries; i++) {
        ft__io_entry *entry = &file->entries[i];
        const char *before = i > 0 ? entry[-1].tensor.name : "";
        if (entry->begin < at)
            return ft_error(FT_ERR_DATA,
                            "%s: safetensors tensor \"%s\" begins at data byte %llu and overlaps "
                            "\"%s\", which ends at %llu",
                            path, ft__io_show(entry->tensor.name).text,
                            (unsigned long long)entry->begin, ft__io_show(before).text,
                            (unsigned long long)at);
        if (entry->begin > at)
            return ft_error(FT_ERR_DATA,
                            "%s: safetensors data has a hole of %llu bytes before tensor \"%s\" at "
                            "%llu",
                            path, (unsigned long long)(entry->begin - at),
                            ft__io_show(entry->tensor.name).text, (unsigned long long)entry->begin);
        at = entry->end;
        entry->tensor.data = (const char *)file->map.base + data_start + entry->begin;
    }
    if (at != data_bytes)
        return ft_error(FT_ERR_DATA,
                        "%s: safetensors data has %llu bytes beyond the last tensor's end at %llu",
                        path, (unsigned long long)(data_bytes - at), (unsigned long long)at);
    return FT_OK;
}

/* Sorts names and keys for the searches, which also shows those that come twice. */
static ft_status ft__io_index(const char *path, ft_io_safetensors *file)
{
    const size_t n = file->n_entries, bytes = (n + 1) * sizeof *file->named;
    file->named = (const ft_io_tensor **)FT_MALLOC(bytes);
    if (file->named == NULL) return ft__io_oom(path, bytes);
    for (size_t i = 0; i < n; i++) file->named[i] = &file->entries[i].tensor;
    if (n > 1) qsort((void *)file->named, n, sizeof *file->named, ft__io_by_name);
    for (size_t i = 1; i < n; i++)
        if (strcmp(file->named[i - 1]->name, file->named[i]->name) == 0)
            return ft_error(FT_ERR_DATA, "%s: safetensors header names tensor \"%s\" twice", path,
                            ft__io_show(file->named[i]->name).text);
    if (file->n_pairs > 1) qsort(file->pairs, file->n_pairs, sizeof *file->pairs, ft__io_by_key);
    for (size_t i = 1; i < file->n_pairs; i++)
        if (strcmp(file->pairs[i - 1].key, file->pairs[i].key) == 0)
            return ft_error(FT_ERR_DATA, "%s: safetensors __metadata__ has key \"%s\" twice", path,
                            ft__io_show(file->pairs[i].key).text);
    return FT_OK;
}

static ft_status ft__io_safetensors_load(const char *path, ft_io_safetensors *file)
{
    FT_TRY(ft__io_map_open(path, &file->map));
    const size_t n = file->map.bytes;
    if (n == 0) return ft_error(FT_ERR_DATA, "%s: safetensors file is empty", path);
    if (n < 8)
        return ft_error(FT_ERR_DATA,
                        "%s: safetensors file of %zu bytes is shorter than the 8 bytes of its "
                        "header length",
                        path, n);
    const uint64_t header = ft__io_load((const unsigned char *)file->map.base, 8);
    if (header > FT__IO_MAX_HEADER)
        return ft_error(FT_ERR_DATA,
                        "%s: safetensors header length %llu is above the limit of %u bytes", path,
                        (unsigned long long)header, FT__IO_MAX_HEADER);
    if (header > n - 8)
        return ft_error(FT_ERR_DATA,
                        "%s: safetensors header length %llu runs past the end of the file, which "
                        "has %zu bytes after it",
                        path, (unsigned long long)header, n - 8);
    file->text = (char *)FT_MALLOC((size_t)header + 1);
    if (file->text == NULL) return ft__io_oom(path, (size_t)header + 1);
    memcpy(file->text, (const char *)file->map.base + 8, (size_t)header);
    ft__io_header h;
    memset(&h, 0, sizeof h);
    h.path = path;
    h.text = file->text;
    h.n = (size_t)header;
    FT_TRY(ft__io_parse_header(&h, file));
    for (size_t i = 0; i < file->n_entries; i++)
        FT_TRY(ft__io_check_entry(path, &file->entries[i], n - 8 - header));
    FT_TRY(ft__io_check_layout(path, file, 8 + header));
    return ft__io_index(path, file);
}

FT_API ft_status ft_io_safetensors_open(const char *path, ft_io_safetensors **out)
{
    if (path == NULL || out == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_safetensors_open: path and out must not be NULL");
    *out = NULL;
    ft_io_safetensors *file = (ft_io_safetensors *)FT_MALLOC(sizeof *file);
    if (file == NULL) return ft__io_oom(path, sizeof *file);
    memset(file, 0, sizeof *file);
    const ft_status status = ft__io_safetensors_load(path, file);
    if (status == FT_OK) *out = file;
    else ft_io_safetensors_close(file);
    return status;
}

FT_API void ft_io_safetensors_close(ft_io_safetensors *file)
{
    if (file == NULL) return;
    ft__io_map_close(&file->map);
    FT_FREE(file->text);
    FT_FREE(file->entries);
    FT_FREE((void *)file->named);
    FT_FREE(file->pairs);
    FT_FREE(file);
}

FT_API int64_t ft_io_safetensors_count(const ft_io_safetensors *file)
{
    return file == NULL ? 0 : (int64_t)file->n_entries;
}

FT_API const ft_io_tensor *ft_io_safetensors_at(const ft_io_safetensors *file, int64_t index)
{
    if (index < 0 || index >= ft_io_safetensors_count(file)) return NULL;
    return &file->entries[index].tensor;
}

FT_API const ft_io_tensor *ft_io_safetensors_find(const ft_io_safetensors *file, const char *name)
{
    size_t low = 0, high = (size_t)ft_io_safetensors_count(file);
    if (name == NULL) return NULL;
    while (low < high) { /* the name, if there, is in low..high-1 */
        const size_t middle = low + (high - low) / 2;
        const int order = strcmp(name, file->named[middle]->name);
        if (order == 0) return file->named[middle];
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

FT_API int64_t ft_io_safetensors_metadata_count(const ft_io_safetensors *file)
{
    return file == NULL ? 0 : (int64_t)file->n_pairs;
}

FT_API const char *ft_io_safetensors_metadata_at(const ft_io_safetensors *file, int64_t index,
                                                 const char **value)
{
    if (index < 0 || index >= ft_io_safetensors_metadata_count(file)) return NULL;
    if (value != NULL) *value = file->pairs[index].value;
    return file->pairs[index].key;
}

FT_API const char *ft_io_safetensors_metadata(const ft_io_safetensors *file, const char *key)
{
    const int64_t n = ft_io_safetensors_metadata_count(file);
    if (key == NULL) return NULL;
    for (int64_t i = 0; i < n; i++)
        if (strcmp(file->pairs[i].key, key) == 0) return file->pairs[i].value;
    return NULL;
}

/* ------------------------------------------------------------------------------- >>writer.impl */

typedef struct ft__io_item {
    char *name;
    ft_io_dtype dtype;
    int ndim;
    int64_t shape[FT_IO_MAX_DIMS];
    size_t bytes;
    const void *data;    /* or, if NULL and fill is not: */
    ft_io_fill_fn fill;
    void *user;
} ft__io_item;

struct ft_io_safetensors_writer {
    char *path;
    ft__io_item *items;
    size_t n_items, item_capacity;
    char **strings;      /* key, value, key, value, ... */
    size_t n_strings, string_capacity;
    uint64_t data_bytes;
};

#define FT__IO_PIECE ((size_t)1 << 20)

FT_API ft_status ft_io_safetensors_create(const char *path, ft_io_safetensors_writer **out)
{
    if (path == NULL || path[0] == 0 || out == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_safetensors_create: path must be a file's name and out "
                                    "not NULL");
    ft_io_safetensors_writer *writer = (ft_io_safetensors_writer *)FT_MALLOC(sizeof *writer);
    char *copy = ft__io_copy(path);
    *out = NULL;
    if (writer == NULL || copy == NULL) {
        FT_FREE(writer);
        FT_FREE(copy);
        return ft__io_oom(path, sizeof *writer);
    }
    memset(writer, 0, sizeof *writer);
    writer->path = copy;
    *out = writer;
    return FT_OK;
}

FT_API void ft_io_safetensors_abandon(ft_io_safetensors_writer *writer)
{
    if (writer == NULL) return;
    for (size_t i = 0; i < writer->n_items; i++) FT_FREE(writer->items[i].name);
    for (size_t i = 0; i < writer->n_strings; i++) FT_FREE(writer->strings[i]);
    FT_FREE(writer->items);
    FT_FREE((void *)writer->strings);
    FT_FREE(writer->path);
    FT_FREE(writer);
}

static ft_status ft__io_check_item(const ft_io_safetensors_writer *writer, const char *name,
                                   ft_io_dtype dtype, int ndim, const int64_t *shape)
{
    if (writer == NULL || name == NULL || (shape == NULL && ndim != 0))
        return ft_error(FT_ERR_ARG, "ft_io_safetensors_add: writer, name and shape must not be "
                                    "NULL");
    const char *path = writer->path;
    if (!ft__io_utf8_valid(name) || strcmp(name, "__metadata__") == 0)
        return ft_error(FT_ERR_ARG, "%s: tensor name \"%s\" %s", path, ft__io_show(name).text,
                        name[0] == '_' ? "is reserved by the format" : "is not UTF-8");
    if (!ft__io_dtype_valid(dtype))
        return ft_error(FT_ERR_ARG, "%s: tensor \"%s\": dtype %d is none of ft_io_dtype", path,
                        ft__io_show(name).text, (int)dtype);
    if (ndim < 0 || ndim > FT_IO_MAX_DIMS)
        return ft_error(FT_ERR_SHAPE, "%s: tensor \"%s\": %d dimensions; 0 to %d are possible",
                        path, ft__io_show(name).text, ndim, (int)FT_IO_MAX_DIMS);
    for (int i = 0; i < ndim; i++)
        if (shape[i] < 0)
            return ft_error(FT_ERR_SHAPE, "%s: tensor \"%s\": dimension %d is %lld", path,
                            ft__io_show(name).text, i, (long long)shape[i]);
    return FT_OK;
}

static ft_status ft__io_add(ft_io_safetensors_writer *writer, const char *name, ft_io_dtype dtype,
                            int ndim, const int64_t *shape, const void *data, ft_io_fill_fn fill,
                            void *user)
{
    ft__io_item item;
    int64_t elems;
    FT_TRY(ft__io_check_item(writer, name, dtype, ndim, shape));
    memset(&item, 0, sizeof item);
    const char *wrong = ft__io_extent(dtype, ndim, shape, &elems, &item.bytes);
    if (wrong == NULL && item.bytes > (uint64_t)INT64_MAX - writer->data_bytes)
        wrong = "the file would exceed 2^63 bytes";
    if (wrong != NULL)
        return ft_error(FT_ERR_SHAPE, "%s: tensor \"%s\": %s", writer->path, ft__io_show(name).text,
                        wrong);
    if (data == NULL && fill == NULL && item.bytes > 0)
        return ft_error(FT_ERR_ARG, "%s: tensor \"%s\": no data for its %zu bytes", writer->path,
                        ft__io_show(name).text, item.bytes);
    void *grown = ft__io_grow(writer->items, writer->n_items, &writer->item_capacity, sizeof item);
    if (grown == NULL) return ft__io_oom(writer->path, writer->n_items * 2 * sizeof item);
    writer->items = (ft__io_item *)grown;
    item.name = ft__io_copy(name);
    if (item.name == NULL) return ft__io_oom(writer->path, strlen(name) + 1);
    item.dtype = dtype;
    item.ndim = ndim;
    if (ndim > 0) memcpy(item.shape, shape, (size_t)ndim * sizeof *shape);
    item.data = data;
    item.fill = fill;
    item.user = user;
    writer->data_bytes += item.bytes;
    writer->items[writer->n_items++] = item;
    return FT_OK;
}

FT_API ft_status ft_io_safetensors_add(ft_io_safetensors_writer *writer, const char *name,
                                       ft_io_dtype dtype, int ndim, const int64_t *shape,
                                       const void *data)
{
    return ft__io_add(writer, name, dtype, ndim, shape, data, NULL, NULL);
}

FT_API ft_status ft_io_safetensors_add_fill(ft_io_safetensors_writer *writer, const char *name,
                                            ft_io_dtype dtype, int ndim, const int64_t *shape,
                                            ft_io_fill_fn fill, void *user)
{
    if (fill == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_safetensors_add_fill: fill must not be NULL");
    return ft__io_add(writer, name, dtype, ndim, shape, NULL, fill, user);
}

FT_API ft_status ft_io_safetensors_set_metadata(ft_io_safetensors_writer *writer, const char *key,
                                                const char *value)
{
    if (writer == NULL || key == NULL || value == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_safetensors_set_metadata: no argument may be NULL");
    if (!ft__io_utf8_valid(key) || !ft__io_utf8_valid(value))
        return ft_error(FT_ERR_ARG, "%s: metadata \"%s\": key or value is not UTF-8", writer->path,
                        ft__io_show(key).text);
    /* Room for two: the capacity is even, so there is none or enough. */
    void *grown = ft__io_grow((void *)writer->strings, writer->n_strings, &writer->string_capacity,
                              sizeof *writer->strings);
    if (grown == NULL)
        return ft__io_oom(writer->path, writer->n_strings * 2 * sizeof *writer->strings);
    writer->strings = (char **)grown;
    char *key_copy = ft__io_copy(key), *value_copy = ft__io_copy(value);
    if (key_copy == NULL || value_copy == NULL) {
        FT_FREE(key_copy);
        FT_FREE(value_copy);
        return ft__io_oom(writer->path, strlen(key) + strlen(value) + 2);
    }
    writer->strings[writer->n_strings++] = key_copy;
    writer->strings[writer->n_strings++] = value_copy;
    return FT_OK;
}

static int ft__io_by_string(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The n strings at `first`, `stride` bytes apart, must differ. Sorting keeps this below n^2. */
static ft_status ft__io_check_distinct(const char *path, const char *what, const void *first,
                                       size_t n, size_t stride)
{
    ft_status status = FT_OK;
    const char **sorted = (const char **)FT_MALLOC((n + 1) * sizeof *sorted);
    if (sorted == NULL) return ft__io_oom(path, (n + 1) * sizeof *sorted);
    for (size_t i = 0; i < n; i++)
        sorted[i] = *(char *const *)(const void *)((const char *)first + i * stride);
    if (n > 1) qsort((void *)sorted, n, sizeof *sorted, ft__io_by_string);
    for (size_t i = 1; i < n && status == FT_OK; i++)
        if (strcmp(sorted[i - 1], sorted[i]) == 0)
            status = ft_error(FT_ERR_ARG, "%s: %s \"%s\" was added twice", path, what,
                              ft__io_show(sorted[i]).text);
    FT_FREE((void *)sorted);
    return status;
}

static void ft__io_emit_header(const ft_io_safetensors_writer *writer, ft_io_json *json)
{
    uint64_t at = 0;
    ft_io_json_begin_object(json);
    if (writer->n_strings > 0) {
        ft_io_json_key(json, "__metadata__");
        ft_io_json_begin_object(json);
        for (size_t i = 0; i < writer->n_strings; i += 2) {
            ft_io_json_key(json, writer->strings[i]);
            ft_io_json_string(json, writer->strings[i + 1]);
        }
        ft_io_json_end_object(json);
    }
    for (size_t i = 0; i < writer->n_items; i++) {
        const ft__io_item *item = &writer->items[i];
        ft_io_json_key(json, item->name);
        ft_io_json_begin_object(json);
        ft_io_json_key(json, "dtype");
        ft_io_json_string(json, ft_io_dtype_name(item->dtype));
        ft_io_json_key(json, "shape");
        ft_io_json_begin_array(json);
        for (int k = 0; k < item->ndim; k++) ft_io_json_int(json, item->shape[k]);
        ft_io_json_end_array(json);
        ft_io_json_key(json, "data_offsets");
        ft_io_json_begin_array(json);
        ft_io_json_int(json, (int64_t)at);
        ft_io_json_int(json, (int64_t)(at += item->bytes));
        ft_io_json_end_array(json);
        ft_io_json_end_object(json);
    }
    ft_io_json_end_object(json);
}

static ft_status ft__io_write_error(const ft_io_safetensors_writer *writer, int error)
{
    return ft_error(FT_ERR_IO, "%s: cannot write its temporary file: %s", writer->path,
                    strerror(error));
}

static ft_status ft__io_write_header(const ft_io_safetensors_writer *writer, int fd)
{
    ft_io_json json;
    unsigned char length[8];
    memset(&json, 0, sizeof json);
    json.name = writer->path;
    ft__io_emit_header(writer, &json);
    while (json.status == FT_OK && json.text.n % 8 != 0) ft__io_json_put(&json, " ", 1);
    ft_status status = ft__io_json_status(&json);
    if (status == FT_OK && json.text.n > FT__IO_MAX_HEADER)
        status = ft_error(FT_ERR_UNSUPPORTED,
                          "%s: the header of %zu bytes is above the format's limit of %u bytes; "
                          "split the tensors over several files",
                          writer->path, json.text.n, FT__IO_MAX_HEADER);
    if (status == FT_OK) {
        for (int i = 0; i < 8; i++) length[i] = (unsigned char)((uint64_t)json.text.n >> 8 * i);
        int error = ft__io_write(fd, length, 8, NULL);
        if (error == 0) error = ft__io_write(fd, json.text.bytes, json.text.n, NULL);
        if (error != 0) status = ft__io_write_error(writer, error);
    }
    FT_FREE(json.text.bytes);
    return status;
}

static ft_status ft__io_write_filled(const ft_io_safetensors_writer *writer,
                                     const ft__io_item *item, int fd, void *piece)
{
    for (size_t at = 0, n; at < item->bytes; at += n) {
        n = item->bytes - at < FT__IO_PIECE ? item->bytes - at : FT__IO_PIECE;
        FT_TRY(item->fill(item->user, item->name, at, n, piece));
        const int error = ft__io_write(fd, piece, n, NULL);
        if (error != 0) return ft__io_write_error(writer, error);
    }
    return FT_OK;
}

static ft_status ft__io_write_data(const ft_io_safetensors_writer *writer, int fd)
{
    ft_status status = FT_OK;
    void *piece = FT_MALLOC(FT__IO_PIECE);
    if (piece == NULL) return ft__io_oom(writer->path, FT__IO_PIECE);
    for (size_t i = 0; i < writer->n_items && status == FT_OK; i++) {
        const ft__io_item *item = &writer->items[i];
        if (item->fill != NULL) {
            status = ft__io_write_filled(writer, item, fd, piece);
        } else if (item->bytes > 0) {
            const int error = ft__io_write(fd, item->data, item->bytes, NULL);
            if (error != 0) status = ft__io_write_error(writer, error);
        }
    }
    FT_FREE(piece);
    return status;
}

/* Creates PATH.tmp-PID-N, with the first N that is free: a file left by a killed process is not in
   the way, whatever its number. */
static ft_status ft__io_open_temporary(const char *path, char **temporary, int *fd)
{
    const size_t room = strlen(path) + 48;
    char *name = (char *)FT_MALLOC(room);
    if (name == NULL) return ft__io_oom(path, room);
    *fd = -1;
    errno = EEXIST;
    for (int i = 0; *fd < 0 && errno == EEXIST && i < 10000; i++) {
        snprintf(name, room, "%s.tmp-%ld-%d", path, (long)getpid(), i);
        *fd = ft__io_open_fd(name, O_WRONLY | O_CREAT | O_EXCL);
    }
    if (*fd < 0) {
        const ft_status status = ft_error(
            FT_ERR_IO, "%s: cannot create a temporary file beside it: %s", path, strerror(errno));
        FT_FREE(name);
        return status;
    }
    *temporary = name;
    return FT_OK;
}

/* Opens the directory of `path`, to be synced after the rename, which then lasts through a power
   failure. *fd = -1 for one that may not be read; that is left to the system. */
static ft_status ft__io_open_directory(const char *path, int *fd)
{
    char *directory = ft__io_copy(path);
    if (directory == NULL) return ft__io_oom(path, strlen(path) + 1);
    char *slash = strrchr(directory, '/');
    if (slash != NULL) slash[slash == directory ? 1 : 0] = 0;
    *fd = ft__io_open_fd(slash != NULL ? directory : ".", O_RDONLY);
    FT_FREE(directory);
    return FT_OK;
}

/* A file system that does not sync directories says EINVAL: that too is left to the system. */
static ft_status ft__io_sync_directory(const char *path, int fd)
{
    if (fd < 0 || fsync(fd) == 0 || errno == EINVAL) return FT_OK;
    return ft_error(FT_ERR_IO, "%s: written, but its directory cannot be synced: %s", path,
                    strerror(errno));
}

/* rename() would put a file in the place of a device or fail late on a directory. */
static ft_status ft__io_check_target(const char *path)
{
    struct stat info;
    if (stat(path, &info) != 0) return FT_OK; /* new; other reasons show at creation */
    if (S_ISDIR(info.st_mode)) return ft_error(FT_ERR_IO, "%s: is a directory, not a file", path);
    if (!S_ISREG(info.st_mode))
        return ft_error(FT_ERR_IO, "%s: not a regular file; it would be replaced", path);
    return FT_OK;
}

/* Writes the temporary file and puts it in the place of `path`. After the rename nothing can fail
   but the sync of the directory. */
static ft_status ft__io_replace(const ft_io_safetensors_writer *writer, int directory)
{
    char *temporary = NULL;
    int fd = -1;
    FT_TRY(ft__io_open_temporary(writer->path, &temporary, &fd));
    ft_status status = ft__io_write_header(writer, fd);
    if (status == FT_OK) status = ft__io_write_data(writer, fd);
    if (status == FT_OK && fsync(fd) != 0) status = ft__io_write_error(writer, errno);
    if (close(fd) != 0 && status == FT_OK) status = ft__io_write_error(writer, errno);
    if (status == FT_OK && rename(temporary, writer->path) != 0)
        status = ft_error(FT_ERR_IO, "%s: cannot rename its temporary file: %s", writer->path,
                          strerror(errno));
    if (status != FT_OK) unlink(temporary);
    else status = ft__io_sync_directory(writer->path, directory);
    FT_FREE(temporary);
    return status;
}

static ft_status ft__io_commit(const ft_io_safetensors_writer *writer)
{
    int directory = -1;
    FT_TRY(ft__io_check_distinct(writer->path, "tensor",
                                 writer->n_items > 0 ? &writer->items[0].name : NULL,
                                 writer->n_items, sizeof *writer->items));
    FT_TRY(ft__io_check_distinct(writer->path, "metadata key", (const void *)writer->strings,
                                 writer->n_strings / 2, 2 * sizeof *writer->strings));
    FT_TRY(ft__io_check_target(writer->path));
    FT_TRY(ft__io_open_directory(writer->path, &directory));
    const ft_status status = ft__io_replace(writer, directory);
    if (directory >= 0) close(directory);
    return status;
}

FT_API ft_status ft_io_safetensors_finish(ft_io_safetensors_writer *writer)
{
    if (writer == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_safetensors_finish: writer must not be NULL");
    const ft_status status = ft__io_commit(writer);
    ft_io_safetensors_abandon(writer);
    return status;
}

/* ----------------------------------------------------------------------------------- >>hf.impl */

#ifdef FT_CJSON

#include <cjson/cJSON.h>

typedef struct ft__io_hf { /* one object of the text, and how messages call it */
    const char *where;     /* the file */
    const char *inside;    /* "" or "rope_parameters." */
    const cJSON *object;
} ft__io_hf;

static ft_status ft__io_hf_bad(const ft__io_hf *hf, const char *key, const char *wanted)
{
    return ft_error(FT_ERR_DATA, "%s: \"%s%s\" must be %s", hf->where, hf->inside, key, wanted);
}

/* *item is the key's value: NULL if absent, an item of type null if null. cJSON keeps every copy of
   a key that is given more than once, so they are counted. */
static ft_status ft__io_hf_get(const ft__io_hf *hf, const char *key, const cJSON **item)
{
    *item = NULL;
    for (const cJSON *child = hf->object->child; child != NULL; child = child->next) {
        if (strcmp(child->string, key) != 0) continue;
        if (*item != NULL)
            return ft_error(FT_ERR_DATA, "%s: \"%s%s\" is there twice", hf->where, hf->inside, key);
        *item = child;
    }
    return FT_OK;
}

/* The same for keys to which null means absent. */
static ft_status ft__io_hf_value(const ft__io_hf *hf, const char *key, const cJSON **item)
{
    FT_TRY(ft__io_hf_get(hf, key, item));
    if (cJSON_IsNull(*item)) *item = NULL;
    return FT_OK;
}

/* A count from 1 to 2^31 - 1; *value stays as it is if the key is absent. */
static ft_status ft__io_hf_count(const ft__io_hf *hf, const char *key, int64_t *value)
{
    const cJSON *item;
    FT_TRY(ft__io_hf_value(hf, key, &item));
    if (item == NULL) return FT_OK;
    const double x = item->valuedouble;
    if (!cJSON_IsNumber(item) || !(x >= 1 && x <= 2147483647.0) || x > (double)(int64_t)x)
        return ft__io_hf_bad(hf, key, "an integer from 1 to 2147483647");
    *value = (int64_t)x;
    return FT_OK;
}

/* A finite number above 0; *value stays as it is if the key is absent. */
static ft_status ft__io_hf_positive(const ft__io_hf *hf, const char *key, double *value)
{
    const cJSON *item;
    FT_TRY(ft__io_hf_value(hf, key, &item));
    if (item == NULL) return FT_OK;
    if (!cJSON_IsNumber(item) || !(item->valuedouble > 0) || !isfinite(item->valuedouble))
        return ft__io_hf_bad(hf, key, "a number above 0");
    *value = item->valuedouble;
    return FT_OK;
}

static ft_status ft__io_hf_flag(const ft__io_hf *hf, const char *key, int *value)
{
    const cJSON *item;
    FT_TRY(ft__io_hf_value(hf, key, &item));
    if (item == NULL) return FT_OK;
    if (!cJSON_IsBool(item)) return ft__io_hf_bad(hf, key, "true or false");
    *value = cJSON_IsTrue(item) != 0;
    return FT_OK;
}

static ft_status ft__io_hf_string(const ft__io_hf *hf, const char *key, const char **value)
{
    const cJSON *item;
    FT_TRY(ft__io_hf_value(hf, key, &item));
    if (item == NULL) return FT_OK;
    if (!cJSON_IsString(item)) return ft__io_hf_bad(hf, key, "a string");
    *value = item->valuestring;
    return FT_OK;
}

static ft_status ft__io_hf_missing(const ft__io_hf *hf, const char *key)
{
    return ft_error(FT_ERR_DATA, "%s: \"%s%s\" is missing", hf->where, hf->inside, key);
}

static ft_status ft__io_hf_refuse(const ft__io_hf *hf, const char *key, const char *why)
{
    return ft_error(FT_ERR_UNSUPPORTED, "%s: \"%s%s\": %s", hf->where, hf->inside, key, why);
}

/* Keys that ask for something a plain dense model with full attention does not do. */
static ft_status ft__io_hf_refusals(const ft__io_hf *hf)
{
    static const char *const experts[] = {"num_experts",         "num_local_experts",
                                          "num_experts_per_tok", "n_routed_experts",
                                          "n_shared_experts",    "moe_intermediate_size"};
    static const char *const zero[] = {"attention_dropout", "hidden_dropout", "resid_pdrop",
                                       "embd_pdrop"};
    const cJSON *item;
    const char *activation = "silu";
    for (size_t i = 0; i < sizeof experts / sizeof *experts; i++) {
        FT_TRY(ft__io_hf_value(hf, experts[i], &item));
        if (item != NULL)
            return ft__io_hf_refuse(hf, experts[i], "mixtures of experts are not supported");
    }
    for (size_t i = 0; i < sizeof zero / sizeof *zero; i++) {
        FT_TRY(ft__io_hf_value(hf, zero[i], &item));
        if (item == NULL) continue;
        if (!cJSON_IsNumber(item)) return ft__io_hf_bad(hf, zero[i], "a number");
        if (item->valuedouble > 0 || item->valuedouble < 0)
            return ft__io_hf_refuse(hf, zero[i], "dropout is not supported; set it to 0");
    }
    FT_TRY(ft__io_hf_value(hf, "quantization_config", &item));
    if (item != NULL)
        return ft__io_hf_refuse(hf, "quantization_config", "quantized weights are not supported");
    FT_TRY(ft__io_hf_string(hf, "hidden_act", &activation));
    if (strcmp(activation, "silu") != 0)
        return ft_error(FT_ERR_UNSUPPORTED, "%s: \"hidden_act\" is \"%s\"; only silu is supported",
                        hf->where, ft__io_show(activation).text);
    return FT_OK;
}

static ft_status ft__io_hf_windows(const ft__io_hf *hf, const ft_io_hf_config *config)
{
    const cJSON *window, *types, *type;
    const int mistral = strcmp(config->model_type, "mistral") == 0;
    const int qwen = strncmp(config->model_type, "qwen", 4) == 0;
    int use = 0;
    int64_t n = 0;
    FT_TRY(ft__io_hf_flag(hf, "use_sliding_window", &use));
    if (use) return ft__io_hf_refuse(hf, "use_sliding_window", "sliding windows are not supported");
    FT_TRY(ft__io_hf_get(hf, "sliding_window", &window));
    if (mistral && window == NULL)
        return ft__io_hf_refuse(hf, "sliding_window",
                                "absent, it means a window of 4096 tokens; sliding windows are not "
                                "supported, null turns them off");
    /* The Qwen families obey the number only where use_sliding_window is true. */
    if (!qwen && window != NULL && !cJSON_IsNull(window))
        return ft__io_hf_refuse(hf, "sliding_window", "sliding windows are not supported");
    FT_TRY(ft__io_hf_value(hf, "layer_types", &types));
    if (types == NULL) return FT_OK;
    if (!cJSON_IsArray(types)) return ft__io_hf_bad(hf, "layer_types", "an array of strings");
    for (type = types->child; type != NULL; type = type->next, n++) {
        if (!cJSON_IsString(type)) return ft__io_hf_bad(hf, "layer_types", "an array of strings");
        if (strcmp(type->valuestring, "full_attention") != 0)
            return ft_error(FT_ERR_UNSUPPORTED,
                            "%s: \"layer_types\" has \"%s\"; only full_attention is supported",
                            hf->where, ft__io_show(type->valuestring).text);
    }
    if (n != config->layers)
        return ft_error(FT_ERR_DATA, "%s: \"layer_types\" has %lld entries for %lld layers",
                        hf->where, (long long)n, (long long)config->layers);
    return FT_OK;
}

static ft_status ft__io_hf_sizes(const ft__io_hf *hf, ft_io_hf_config *config)
{
    const int llama = strcmp(config->model_type, "llama") == 0;
    FT_TRY(ft__io_hf_count(hf, "vocab_size", &config->vocab));
    FT_TRY(ft__io_hf_count(hf, "hidden_size", &config->hidden));
    FT_TRY(ft__io_hf_count(hf, "num_hidden_layers", &config->layers));
    FT_TRY(ft__io_hf_count(hf, "num_attention_heads", &config->heads));
    FT_TRY(ft__io_hf_count(hf, "intermediate_size", &config->intermediate));
    FT_TRY(ft__io_hf_count(hf, "num_key_value_heads", &config->kv_heads));
    FT_TRY(ft__io_hf_count(hf, "head_dim", &config->head_dim));
    FT_TRY(ft__io_hf_count(hf, "max_position_embeddings", &config->max_positions));
    if (config->vocab == 0) return ft__io_hf_missing(hf, "vocab_size");
    if (config->hidden == 0) return ft__io_hf_missing(hf, "hidden_size");
    if (config->layers == 0) return ft__io_hf_missing(hf, "num_hidden_layers");
    if (config->heads == 0) return ft__io_hf_missing(hf, "num_attention_heads");
    if (config->intermediate == 0) return ft__io_hf_missing(hf, "intermediate_size");
    if (config->kv_heads == 0) {
        if (!llama) return ft__io_hf_missing(hf, "num_key_value_heads");
        config->kv_heads = config->heads;
    }
    if (config->heads % config->kv_heads != 0)
        return ft_error(FT_ERR_DATA,
                        "%s: \"num_attention_heads\" %lld is not a multiple of "
                        "\"num_key_value_heads\" %lld",
                        hf->where, (long long)config->heads, (long long)config->kv_heads);
    if (config->head_dim == 0 && strcmp(config->model_type, "qwen3") == 0) config->head_dim = 128;
    if (config->head_dim == 0) {
        if (config->hidden % config->heads != 0)
            return ft_error(FT_ERR_DATA,
                            "%s: \"hidden_size\" %lld is not a multiple of \"num_attention_heads\" "
                            "%lld, and there is no \"head_dim\"",
                            hf->where, (long long)config->hidden, (long long)config->heads);
        config->head_dim = config->hidden / config->heads;
    }
    if (config->head_dim % 2 != 0)
        return ft_error(FT_ERR_DATA, "%s: a head size of %lld is odd; rotary embedding takes pairs",
                        hf->where, (long long)config->head_dim);
    return FT_OK;
}

static ft_status ft__io_hf_biases(const ft__io_hf *hf, ft_io_hf_config *config)
{
    const int llama = strcmp(config->model_type, "llama") == 0;
    const int qwen3 = strcmp(config->model_type, "qwen3") == 0;
    const int qwen2 = strcmp(config->model_type, "qwen2") == 0;
    int attention = 0, mlp = 0;
    FT_TRY(ft__io_hf_flag(hf, "attention_bias", &attention));
    FT_TRY(ft__io_hf_flag(hf, "mlp_bias", &mlp));
    if (attention && !llama && !qwen3)
        return ft__io_hf_refuse(hf, "attention_bias", "this model type has no such switch");
    if (mlp && !llama)
        return ft__io_hf_refuse(hf, "mlp_bias", "this model type has no such switch");
    config->qkv_bias = attention || qwen2;
    config->o_bias = attention;
    config->mlp_bias = mlp;
    config->qk_norm = qwen3;
    return FT_OK;
}

/* Only keys with a known meaning: one that is passed over would change every angle. */
static ft_status ft__io_hf_rope_keys(const ft__io_hf *rope, int llama3)
{
    static const char *const keys[] = {"rope_theta", "rope_type", "type", "partial_rotary_factor",
                                       /* llama3 only: */ "factor", "low_freq_factor",
                                       "high_freq_factor", "original_max_position_embeddings"};
    const size_t n = llama3 ? 8 : 4;
    for (const cJSON *child = rope->object->child; child != NULL; child = child->next) {
        size_t i = 0;
        if (cJSON_IsNull(child)) continue;
        while (i < n && strcmp(child->string, keys[i]) != 0) i++;
        if (i == n)
            return ft_error(FT_ERR_UNSUPPORTED,
                            "%s: \"%s%s\" has no known meaning for rope type %s", rope->where,
                            rope->inside, ft__io_show(child->string).text,
                            llama3 ? "llama3" : "default");
    }
    return FT_OK;
}

static ft_status ft__io_hf_llama3(const ft__io_hf *rope, ft_rope_scaling *scaling)
{
    FT_TRY(ft__io_hf_positive(rope, "factor", &scaling->factor));
    FT_TRY(ft__io_hf_positive(rope, "low_freq_factor", &scaling->low_freq_factor));
    FT_TRY(ft__io_hf_positive(rope, "high_freq_factor", &scaling->high_freq_factor));
    FT_TRY(ft__io_hf_count(rope, "original_max_position_embeddings", &scaling->original_context));
    if (!(scaling->factor > 0)) return ft__io_hf_missing(rope, "factor");
    if (!(scaling->low_freq_factor > 0)) return ft__io_hf_missing(rope, "low_freq_factor");
    if (!(scaling->high_freq_factor > 0)) return ft__io_hf_missing(rope, "high_freq_factor");
    if (scaling->original_context == 0)
        return ft__io_hf_missing(rope, "original_max_position_embeddings");
    if (scaling->factor < 1) return ft__io_hf_bad(rope, "factor", "at least 1");
    if (scaling->high_freq_factor <= scaling->low_freq_factor)
        return ft__io_hf_bad(rope, "high_freq_factor", "above low_freq_factor");
    return FT_OK;
}

/* rope_scaling (the older layout, theta beside it) or rope_parameters (theta inside). */
static ft_status ft__io_hf_rope_object(const ft__io_hf *rope, int new_layout, double *theta,
                                       ft_rope_scaling *scaling)
{
    const char *type = NULL, *old_type = NULL;
    double partial = 1;
    FT_TRY(ft__io_hf_string(rope, "rope_type", &type));
    FT_TRY(ft__io_hf_string(rope, "type", &old_type));
    if (type != NULL && old_type != NULL && strcmp(type, old_type) != 0)
        return ft_error(FT_ERR_DATA, "%s: \"%srope_type\" is \"%s\" but \"type\" is \"%s\"",
                        rope->where, rope->inside, ft__io_show(type).text,
                        ft__io_show(old_type).text);
    if (type == NULL) type = old_type;
    if (type == NULL && !new_layout) return ft__io_hf_missing(rope, "rope_type");
    const int llama3 = type != NULL && strcmp(type, "llama3") == 0;
    if (type != NULL && !llama3 && strcmp(type, "default") != 0)
        return ft_error(FT_ERR_UNSUPPORTED,
                        "%s: rope type \"%s\" in \"%srope_type\"; default and llama3 are supported",
                        rope->where, ft__io_show(type).text, rope->inside);
    FT_TRY(ft__io_hf_rope_keys(rope, llama3));
    FT_TRY(ft__io_hf_positive(rope, "partial_rotary_factor", &partial));
    if (partial > 1 || partial < 1)
        return ft__io_hf_refuse(rope, "partial_rotary_factor", "only 1 is supported");
    FT_TRY(ft__io_hf_positive(rope, "rope_theta", theta));
    return llama3 ? ft__io_hf_llama3(rope, scaling) : FT_OK;
}

static ft_status ft__io_hf_rope(const ft__io_hf *hf, ft_io_hf_config *config)
{
    const cJSON *scaling, *parameters;
    ft__io_hf rope = *hf;
    double partial = 1, inner = 0;
    FT_TRY(ft__io_hf_positive(hf, "rope_theta", &config->rope_theta));
    FT_TRY(ft__io_hf_positive(hf, "partial_rotary_factor", &partial));
    if (partial > 1 || partial < 1)
        return ft__io_hf_refuse(hf, "partial_rotary_factor", "only 1 is supported");
    FT_TRY(ft__io_hf_value(hf, "rope_scaling", &scaling));
    FT_TRY(ft__io_hf_value(hf, "rope_parameters", &parameters));
    if (scaling != NULL && parameters != NULL)
        return ft_error(FT_ERR_DATA, "%s: both \"rope_scaling\" and \"rope_parameters\"; keep one",
                        hf->where);
    rope.object = parameters != NULL ? parameters : scaling;
    if (rope.object != NULL) {
        rope.inside = parameters != NULL ? "rope_parameters." : "rope_scaling.";
        if (!cJSON_IsObject(rope.object))
            return ft__io_hf_bad(hf, parameters != NULL ? "rope_parameters" : "rope_scaling",
                                 "an object or null");
        FT_TRY(ft__io_hf_rope_object(&rope, parameters != NULL, &inner, &config->rope_scaling));
    }
    if (inner > 0 && config->rope_theta > 0 &&
        (inner > config->rope_theta || inner < config->rope_theta))
        return ft_error(FT_ERR_DATA, "%s: \"rope_theta\" is %g but \"%srope_theta\" is %g",
                        hf->where, config->rope_theta, rope.inside, inner);
    if (inner > 0) config->rope_theta = inner;
    if (config->rope_theta > 0) return FT_OK;
    if (strcmp(config->model_type, "llama") != 0) return ft__io_hf_missing(hf, "rope_theta");
    config->rope_theta = 10000;
    return FT_OK;
}

static ft_status ft__io_hf_read(const ft__io_hf *hf, ft_io_hf_config *config)
{
    static const char *const types[] = {"llama", "mistral", "qwen2", "qwen3"};
    const char *type = NULL;
    size_t i = 0;
    FT_TRY(ft__io_hf_string(hf, "model_type", &type));
    if (type == NULL) return ft__io_hf_missing(hf, "model_type");
    while (i < 4 && strcmp(type, types[i]) != 0) i++;
    if (i == 4)
        return ft_error(FT_ERR_UNSUPPORTED,
                        "%s: \"model_type\" is \"%s\"; llama, mistral, qwen2 and qwen3 are "
                        "supported",
                        hf->where, ft__io_show(type).text);
    snprintf(config->model_type, sizeof config->model_type, "%s", types[i]);
    config->norm_eps = 1e-6;
    FT_TRY(ft__io_hf_refusals(hf));
    FT_TRY(ft__io_hf_sizes(hf, config));
    FT_TRY(ft__io_hf_windows(hf, config));
    FT_TRY(ft__io_hf_biases(hf, config));
    FT_TRY(ft__io_hf_flag(hf, "tie_word_embeddings", &config->tie_embeddings));
    FT_TRY(ft__io_hf_positive(hf, "rms_norm_eps", &config->norm_eps));
    return ft__io_hf_rope(hf, config);
}

FT_API ft_status ft_io_hf_config_parse(const char *json_text, const char *where,
                                       ft_io_hf_config *config)
{
    const char *end = NULL;
    ft__io_hf hf;
    if (json_text == NULL || where == NULL || config == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_hf_config_parse: no argument may be NULL");
    memset(config, 0, sizeof *config);
    cJSON *root = cJSON_ParseWithOpts(json_text, &end, 1);
    if (root == NULL)
        return ft_error(FT_ERR_DATA, "%s: not JSON, at byte %lld", where,
                        end == NULL ? 0LL : (long long)(end - json_text));
    hf.where = where;
    hf.inside = "";
    hf.object = root;
    const ft_status status = cJSON_IsObject(root)
                                 ? ft__io_hf_read(&hf, config)
                                 : ft_error(FT_ERR_DATA, "%s: not a JSON object", where);
    cJSON_Delete(root);
    return status;
}

#endif /* FT_CJSON */

/* --------------------------------------------------------------------------------- >>data.impl */

typedef struct ft__io_token_row {
    const char *name;
    size_t bytes;
    int64_t largest; /* what the format holds */
} ft__io_token_row;

/* In the order of the enum. */
static const ft__io_token_row ft__io_tokens[FT_IO_TOKEN_COUNT] = {
    {"bytes", 1, 255}, {"uint16", 2, 65535}, {"uint32", 4, 4294967295}};

static int ft__io_token_valid(ft_io_token token)
{
    return (int)token >= 0 && (int)token < (int)FT_IO_TOKEN_COUNT;
}

FT_API const char *ft_io_token_name(ft_io_token token)
{
    return ft__io_token_valid(token) ? ft__io_tokens[token].name : "?";
}

FT_API ft_status ft_io_token_parse(const char *name, ft_io_token *token)
{
    if (name == NULL || token == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_token_parse: name and token must not be NULL");
    for (int i = 0; i < (int)FT_IO_TOKEN_COUNT; i++) {
        if (strcmp(name, ft__io_tokens[i].name) != 0) continue;
        *token = (ft_io_token)i;
        return FT_OK;
    }
    return ft_error(FT_ERR_ARG, "\"%s\" is no type of tokens; there are bytes, uint16 and uint32",
                    ft__io_show(name).text);
}

typedef struct ft__io_shard_row {
    uint32_t magic;
    int32_t version;
    ft_io_token token;
} ft__io_shard_row;

/* The headers of llm.c, HEADERS_INFO in dev/data/data_common.py. */
static const ft__io_shard_row ft__io_shards[2] = {{20240520, 1, FT_IO_TOKEN_U16},
                                                  {20240801, 7, FT_IO_TOKEN_U32}};

enum { FT__IO_SHARD_HEADER = 1024 };

/* Everything a header says against what was asked for and what is there. */
static ft_status ft__io_shard_check(const char *path, const ft__io_map *map,
                                    const ft__io_shard_row *shard, ft_io_token token)
{
    const char *name = ft_io_token_name(shard->token);
    int32_t header[3];
    if (token != shard->token)
        return ft_error(FT_ERR_DATA,
                        "%s: its header (magic %u) says %s tokens, but it is read as %s; give %s "
                        "as the type of tokens",
                        path, shard->magic, name, ft_io_token_name(token), name);
    if (map->bytes < FT__IO_SHARD_HEADER)
        return ft_error(FT_ERR_DATA,
                        "%s: truncated: it has %zu bytes, its header (magic %u) alone takes %d",
                        path, map->bytes, shard->magic, (int)FT__IO_SHARD_HEADER);
    memcpy(header, map->base, sizeof header);
    if (header[1] != shard->version)
        return ft_error(FT_ERR_DATA, "%s: its header (magic %u) has version %d; %d is supported",
                        path, shard->magic, header[1], shard->version);
    if (header[2] < 1)
        return ft_error(FT_ERR_DATA, "%s: its header counts %d tokens; it takes at least one", path,
                        header[2]);
    const int64_t there = (int64_t)map->bytes - FT__IO_SHARD_HEADER;
    const int64_t wanted = header[2] * (int64_t)ft__io_tokens[token].bytes;
    if (there < wanted)
        return ft_error(FT_ERR_DATA,
                        "%s: truncated: its header counts %d %s tokens, %lld bytes, but %lld "
                        "follow",
                        path, header[2], name, (long long)wanted, (long long)there);
    if (there > wanted)
        return ft_error(FT_ERR_DATA,
                        "%s: %lld bytes too many: its header counts %d %s tokens, %lld bytes, but "
                        "%lld follow",
                        path, (long long)(there - wanted), header[2], name, (long long)wanted,
                        (long long)there);
    return FT_OK;
}

typedef struct ft__io_part { /* one file's stretch of the stream */
    ft__io_map map;
    char *path;
    const void *data;        /* its tokens in the mapping, aligned: the header is 1024 bytes */
    int64_t first, tokens;   /* it holds tokens first..first+tokens-1 */
} ft__io_part;

struct ft_io_data {
    ft__io_part *parts;
    int n_parts;
    ft_io_token token;
    int64_t tokens;
    int64_t vocab;           /* of the format */
    int64_t limit;           /* tokens >= limit are refused: 1..vocab */
};

static ft_status ft__io_part_open(const char *path, ft_io_token token, int64_t first,
                                  ft__io_part *part)
{
    const size_t width = ft__io_tokens[token].bytes;
    size_t header = 0;
    if (path == NULL) return ft_error(FT_ERR_ARG, "ft_io_data_open: a path is NULL");
    part->path = ft__io_copy(path);
    if (part->path == NULL) return ft__io_oom(path, strlen(path) + 1);
    FT_TRY(ft__io_map_open(path, &part->map));
    const size_t bytes = part->map.bytes;
    if (bytes == 0) return ft_error(FT_ERR_DATA, "%s: the data file is empty", path);
    for (int i = 0; i < 2; i++) {
        uint32_t magic = 0;
        if (bytes >= sizeof magic) memcpy(&magic, part->map.base, sizeof magic);
        if (magic != ft__io_shards[i].magic) continue;
        FT_TRY(ft__io_shard_check(path, &part->map, &ft__io_shards[i], token));
        header = FT__IO_SHARD_HEADER;
    }
    if ((bytes - header) % width != 0)
        return ft_error(FT_ERR_DATA,
                        "%s: %zu bytes are no whole number of %s tokens of %zu bytes: truncated, "
                        "or not a file of such tokens",
                        path, bytes, ft_io_token_name(token), width);
    part->data = (const char *)part->map.base + header;
    part->first = first;
    part->tokens = (int64_t)((bytes - header) / width);
    if (part->tokens > INT64_MAX - first)
        return ft_error(FT_ERR_DATA, "%s: the stream would exceed 2^63 tokens", path);
    return FT_OK;
}

FT_API ft_status ft_io_data_open(const char *const *paths, int n_paths, ft_io_token token,
                                 ft_io_data **out)
{
    if (paths == NULL || n_paths < 1 || out == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_data_open: %d paths; at least one is needed", n_paths);
    *out = NULL;
    if (!ft__io_token_valid(token))
        return ft_error(FT_ERR_UNSUPPORTED,
                        "ft_io_data_open: token format %d is none of ft_io_token", (int)token);
    const size_t bytes = (size_t)n_paths * sizeof(ft__io_part);
    ft_io_data *data = (ft_io_data *)FT_MALLOC(sizeof *data);
    ft__io_part *parts = (ft__io_part *)FT_MALLOC(bytes);
    if (data == NULL || parts == NULL) {
        FT_FREE(data);
        FT_FREE(parts);
        return ft__io_oom("ft_io_data_open", bytes);
    }
    memset(data, 0, sizeof *data);
    memset(parts, 0, bytes);
    data->parts = parts;
    data->token = token;
    data->vocab = ft__io_tokens[token].largest + 1;
    if (data->vocab > (int64_t)INT32_MAX + 1) data->vocab = (int64_t)INT32_MAX + 1;
    data->limit = data->vocab;
    ft_status status = FT_OK;
    while (status == FT_OK && data->n_parts < n_paths) {
        ft__io_part *part = &parts[data->n_parts];
        status = ft__io_part_open(paths[data->n_parts++], token, data->tokens, part);
        if (status == FT_OK) data->tokens += part->tokens;
    }
    if (status == FT_OK) *out = data;
    else ft_io_data_close(data);
    return status;
}

FT_API void ft_io_data_close(ft_io_data *data)
{
    if (data == NULL) return;
    for (int i = 0; i < data->n_parts; i++) {
        ft__io_map_close(&data->parts[i].map);
        FT_FREE(data->parts[i].path);
    }
    FT_FREE(data->parts);
    FT_FREE(data);
}

FT_API int64_t ft_io_data_tokens(const ft_io_data *data)
{
    return data == NULL ? 0 : data->tokens;
}

FT_API int64_t ft_io_data_vocab(const ft_io_data *data)
{
    return data == NULL ? 0 : data->vocab;
}

/* The part that holds a position of the stream, 0 <= position < tokens. */
static const ft__io_part *ft__io_part_at(const ft_io_data *data, int64_t position)
{
    int low = 0, high = data->n_parts - 1;
    while (low < high) { /* it is in low..high */
        const int middle = low + (high - low + 1) / 2;
        if (data->parts[middle].first <= position) low = middle;
        else high = middle - 1;
    }
    return &data->parts[low];
}

/* The first of stored tokens from..to-1 that is >= limit; `to` if there is none. */
static int64_t ft__io_first_outside(ft_io_token token, const void *data, int64_t from, int64_t to,
                                    uint32_t limit)
{
    const uint8_t *bytes = (const uint8_t *)data;
    const uint16_t *halves = (const uint16_t *)data;
    const uint32_t *words = (const uint32_t *)data;
    int64_t i = from;
    switch (token) {
    case FT_IO_TOKEN_BYTE: while (i < to && bytes[i] < limit) i++; break;
    case FT_IO_TOKEN_U16: while (i < to && halves[i] < limit) i++; break;
    case FT_IO_TOKEN_U32: while (i < to && words[i] < limit) i++; break;
    case FT_IO_TOKEN_COUNT: break;
    }
    return i;
}

/* limit is the vocabulary, or less where the format or int32 ends before it. */
static ft_status ft__io_check_tokens(const ft_io_data *data, const ft__io_part *part, int64_t from,
                                     int64_t to, int64_t limit)
{
    uint32_t value = 0;
    if (limit > ft__io_tokens[data->token].largest) return FT_OK;
    const int64_t at = ft__io_first_outside(data->token, part->data, from, to, (uint32_t)limit);
    if (at == to) return FT_OK;
    /* Little-endian: the low bytes come first. */
    const size_t width = ft__io_tokens[data->token].bytes;
    memcpy(&value, (const char *)part->data + (size_t)at * width, width);
    if (data->token == FT_IO_TOKEN_U32)
        return ft_error(FT_ERR_DATA,
                        "%s: token %lld at position %lld is outside the vocabulary of %lld; check "
                        "that the file holds uint32, not uint16",
                        part->path, (long long)value, (long long)at, (long long)limit);
    return ft_error(FT_ERR_DATA,
                    "%s: token %lld at position %lld is outside the vocabulary of %lld; a "
                    "vocabulary of %lld takes any token of this format",
                    part->path, (long long)value, (long long)at, (long long)limit,
                    (long long)data->vocab);
}

static ft_status ft__io_check_vocab_arg(const char *function, const ft_io_data *data, int64_t vocab)
{
    if (data != NULL && vocab > 0) return FT_OK;
    return ft_error(FT_ERR_ARG, "%s: vocabulary %lld; it must be positive, and data not NULL",
                    function, (long long)vocab);
}

FT_API ft_status ft_io_data_set_vocab(ft_io_data *data, int64_t vocab)
{
    FT_TRY(ft__io_check_vocab_arg("ft_io_data_set_vocab", data, vocab));
    data->limit = vocab < data->vocab ? vocab : data->vocab;
    return FT_OK;
}

FT_API ft_status ft_io_data_check_vocab(const ft_io_data *data, int64_t vocab)
{
    FT_TRY(ft__io_check_vocab_arg("ft_io_data_check_vocab", data, vocab));
    const int64_t limit = vocab < data->vocab ? vocab : data->vocab;
    for (int i = 0; i < data->n_parts; i++)
        FT_TRY(ft__io_check_tokens(data, &data->parts[i], 0, data->parts[i].tokens, limit));
    return FT_OK;
}

/* Tokens below 2^31. */
static void ft__io_decode(ft_io_token token, const void *data, int64_t from, int64_t n,
                          int32_t *tokens)
{
    const uint8_t *bytes = (const uint8_t *)data + from;
    const uint16_t *halves = (const uint16_t *)data + from;
    switch (token) {
    case FT_IO_TOKEN_BYTE: for (int64_t i = 0; i < n; i++) tokens[i] = bytes[i]; break;
    case FT_IO_TOKEN_U16: for (int64_t i = 0; i < n; i++) tokens[i] = halves[i]; break;
    case FT_IO_TOKEN_U32:
        memcpy(tokens, (const uint32_t *)data + from, (size_t)n * sizeof *tokens);
        break;
    case FT_IO_TOKEN_COUNT: break;
    }
}

FT_API ft_status ft_io_data_read(const ft_io_data *data, int64_t position, int64_t n,
                                 int32_t *tokens)
{
    if (data == NULL || (tokens == NULL && n != 0))
        return ft_error(FT_ERR_ARG, "ft_io_data_read: data and tokens must not be NULL");
    if (position < 0 || n < 0 || position > data->tokens || n > data->tokens - position)
        return ft_error(FT_ERR_ARG,
                        "ft_io_data_read: %lld tokens from position %lld are outside the stream of "
                        "%lld",
                        (long long)n, (long long)position, (long long)data->tokens);
    while (n > 0) {
        const ft__io_part *part = ft__io_part_at(data, position);
        const int64_t from = position - part->first;
        const int64_t here = n < part->tokens - from ? n : part->tokens - from;
        FT_TRY(ft__io_check_tokens(data, part, from, from + here, data->limit));
        ft__io_decode(data->token, part->data, from, here, tokens);
        position += here;
        tokens += here;
        n -= here;
    }
    return FT_OK;
}

FT_API const char *ft_io_data_locate(const ft_io_data *data, int64_t position, int64_t *in_file)
{
    if (position < 0 || position >= ft_io_data_tokens(data)) return NULL;
    const ft__io_part *part = ft__io_part_at(data, position);
    if (in_file != NULL) *in_file = position - part->first;
    return part->path;
}

/* ------------------------------------------------------------------------------ >>sampler.impl */

/* The finalizer of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64 bits in which every
   bit of the argument moves every bit of the result. */
static uint64_t ft__io_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

FT_API int64_t ft_io_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t i)
{
    /* 4 rounds are enough for large n. With a handful of windows 6 rounds still favour some places
       by 13%; 12 pass a chi-squared test over 20000 epochs at every n from 2 to 40. */
    enum { ROUNDS = 12 };
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    const uint64_t key = ft__io_mix(ft__io_mix(seed + golden) ^ (uint64_t)epoch);
    int side = 1; /* bits of each side: the least with 4^side >= n */
    if (i < 0 || i >= n) return -1;
    while (side < 32 && (uint64_t)1 << 2 * side < (uint64_t)n) side++;
    const uint64_t mask = ((uint64_t)1 << side) - 1;
    uint64_t x = (uint64_t)i;
    /* A round is a bijection of the pair whatever its hash, so the network permutes 0..4^side - 1.
       The cycle through i comes back to i < n at the latest, so the walk ends; and following cycles
       until they re-enter 0..n-1 is again a bijection. 4^side <= 4n: 4 steps or fewer in the mean.
    */
    do {
        uint64_t left = x >> side, right = x & mask;
        for (uint64_t round = 1; round <= ROUNDS; round++) {
            const uint64_t next = left ^ (ft__io_mix(right ^ (key + round * golden)) & mask);
            left = right;
            right = next;
        }
        x = left << side | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

static ft_status ft__io_windows(const ft_io_data *data, int64_t seq_len, int64_t *windows)
{
    if (data->tokens - 1 < seq_len)
        return ft_error(FT_ERR_DATA,
                        "%s%s: %lld tokens of data are shorter than one sample: sequence length "
                        "%lld + 1; give more data or shorter sequences",
                        data->parts[0].path, data->n_parts > 1 ? " and the files after it" : "",
                        (long long)data->tokens, (long long)seq_len);
    *windows = (data->tokens - 1) / seq_len;
    return FT_OK;
}

/* tokens[T], labels[T] of one window. */
static ft_status ft__io_window_read(const ft_io_data *data, int64_t T, int64_t window,
                                    int32_t *tokens, int32_t *labels)
{
    const int64_t first = window * T;
    FT_TRY(ft_io_data_read(data, first, T, tokens));
    memcpy(labels, tokens + 1, (size_t)(T - 1) * sizeof *tokens);
    return ft_io_data_read(data, first + T, 1, labels + T - 1);
}

FT_API ft_status ft_io_sampler_init(ft_io_sampler *sampler, const ft_io_data *data, int64_t seq_len,
                                    int64_t global_batch, uint64_t seed)
{
    if (sampler == NULL || data == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_sampler_init: sampler and data must not be NULL");
    memset(sampler, 0, sizeof *sampler);
    if (seq_len < 1 || global_batch < 1)
        return ft_error(FT_ERR_ARG,
                        "ft_io_sampler_init: sequence length %lld and global batch %lld must be "
                        "positive",
                        (long long)seq_len, (long long)global_batch);
    FT_TRY(ft__io_windows(data, seq_len, &sampler->windows));
    sampler->data = data;
    sampler->seq_len = seq_len;
    sampler->global_batch = global_batch;
    sampler->seed = seed;
    return FT_OK;
}

FT_API ft_status ft_io_sampler_index(const ft_io_sampler *sampler, int64_t step, int64_t position,
                                     int64_t *window, int64_t *epoch)
{
    if (sampler == NULL || sampler->data == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_sampler_index: the sampler is not initialised");
    const int64_t batch = sampler->global_batch;
    if (step < 0 || position < 0 || position >= batch || step > (INT64_MAX - position) / batch)
        return ft_error(FT_ERR_ARG,
                        "ft_io_sampler_index: step %lld, position %lld of a global batch of %lld",
                        (long long)step, (long long)position, (long long)batch);
    const int64_t at = step * batch + position;
    if (epoch != NULL) *epoch = at / sampler->windows;
    if (window != NULL)
        *window = ft_io_permute(sampler->seed, at / sampler->windows, sampler->windows,
                                at % sampler->windows);
    return FT_OK;
}

FT_API ft_status ft_io_sampler_read(const ft_io_sampler *sampler, int64_t step, int64_t position,
                                    int64_t n, int32_t *tokens, int32_t *labels)
{
    if (tokens == NULL || labels == NULL || n < 0)
        return ft_error(FT_ERR_ARG,
                        "ft_io_sampler_read: %lld samples; tokens and labels must not be NULL",
                        (long long)n);
    for (int64_t b = 0; b < n; b++) {
        int64_t window = 0;
        FT_TRY(ft_io_sampler_index(sampler, step, position + b, &window, NULL));
        const int64_t T = sampler->seq_len;
        FT_TRY(ft__io_window_read(sampler->data, T, window, tokens + b * T, labels + b * T));
    }
    return FT_OK;
}

FT_API ft_status ft_io_sampler_fill(const ft_io_sampler *sampler, int64_t step, int rank, int ranks,
                                    int micro_batch, int micro_batches, int32_t *tokens,
                                    int32_t *labels)
{
    if (sampler == NULL || sampler->data == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_sampler_fill: the sampler is not initialised");
    if (rank < 0 || rank >= ranks || micro_batch < 0 || micro_batch >= micro_batches)
        return ft_error(FT_ERR_ARG, "ft_io_sampler_fill: rank %d of %d, micro-batch %d of %d", rank,
                        ranks, micro_batch, micro_batches);
    const int64_t shares = (int64_t)ranks * micro_batches;
    if (sampler->global_batch % shares != 0)
        return ft_error(FT_ERR_ARG,
                        "ft_io_sampler_fill: a global batch of %lld does not divide into %d ranks "
                        "x %d micro-batches",
                        (long long)sampler->global_batch, ranks, micro_batches);
    const int64_t B = sampler->global_batch / shares;
    return ft_io_sampler_read(sampler, step, ((int64_t)micro_batch * ranks + rank) * B, B, tokens,
                              labels);
}

/* --------------------------------------------------------------------------------- >>eval.impl */

FT_API ft_status ft_io_eval_init(ft_io_eval *eval, const ft_io_data *data, int64_t seq_len,
                                 int64_t batch, int ranks, int64_t max_windows)
{
    if (eval == NULL || data == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_eval_init: eval and data must not be NULL");
    memset(eval, 0, sizeof *eval);
    if (seq_len < 1 || batch < 1 || ranks < 1 || batch > INT64_MAX / ranks)
        return ft_error(FT_ERR_ARG,
                        "ft_io_eval_init: sequence length %lld, batch %lld and %d ranks must be "
                        "positive, and batch x ranks fit 63 bits",
                        (long long)seq_len, (long long)batch, ranks);
    if (max_windows < 0)
        return ft_error(FT_ERR_ARG, "ft_io_eval_init: at most %lld windows; 0 means all",
                        (long long)max_windows);
    FT_TRY(ft__io_windows(data, seq_len, &eval->windows));
    if (max_windows > 0 && max_windows < eval->windows) eval->windows = max_windows;
    eval->data = data;
    eval->seq_len = seq_len;
    eval->batch = batch;
    eval->ranks = ranks;
    eval->batches = (eval->windows - 1) / (batch * ranks) + 1;
    return FT_OK;
}

FT_API ft_status ft_io_eval_fill(const ft_io_eval *eval, int64_t index, int rank, int32_t *tokens,
                                 int32_t *labels, int64_t *counted)
{
    if (eval == NULL || eval->data == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_eval_fill: the evaluation is not initialised");
    if (tokens == NULL || labels == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_eval_fill: tokens and labels must not be NULL");
    if (index < 0 || index >= eval->batches || rank < 0 || rank >= eval->ranks)
        return ft_error(FT_ERR_ARG, "ft_io_eval_fill: batch %lld of %lld, rank %d of %d",
                        (long long)index, (long long)eval->batches, rank, eval->ranks);
    const int64_t T = eval->seq_len, B = eval->batch;
    const int64_t first = index * (B * eval->ranks) + rank * B;
    int64_t rows = eval->windows - first; /* of windows; rows after them are filled up */
    if (rows < 0) rows = 0;
    if (rows > B) rows = B;
    for (int64_t b = 0; b < rows; b++)
        FT_TRY(ft__io_window_read(eval->data, T, first + b, tokens + b * T, labels + b * T));
    for (int64_t i = rows * T; i < B * T; i++) {
        tokens[i] = 0;
        labels[i] = -100;
    }
    if (counted != NULL) *counted = rows * T;
    return FT_OK;
}

/* ---------------------------------------------------------------------------------- >>log.impl */

struct ft_io_log {
    ft_io_json json; /* the row, in memory */
    int fd;
    int open_row;
    int torn;        /* the file ends inside a row: the next one begins with a line break */
};

static int ft__io_log_file(const char *path, int append, ft_io_log *log)
{
    /* Reading is needed to see how the file ends. */
    log->fd = ft__io_open_fd(path, O_CREAT | O_APPEND | (append ? O_RDWR : O_WRONLY | O_TRUNC));
    if (log->fd < 0) return errno;
    char last = '\n';
    if (append && lseek(log->fd, -1, SEEK_END) >= 0 && read(log->fd, &last, 1) < 0) return errno;
    log->torn = last != '\n';
    return 0;
}

FT_API ft_status ft_io_log_open(const char *path, int append, ft_io_log **out)
{
    if (path == NULL || out == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_log_open: path and out must not be NULL");
    *out = NULL;
    ft_io_log *log = (ft_io_log *)FT_MALLOC(sizeof *log);
    char *copy = ft__io_copy(path);
    if (log == NULL || copy == NULL) {
        FT_FREE(log);
        FT_FREE(copy);
        return ft__io_oom(path, sizeof *log);
    }
    memset(log, 0, sizeof *log);
    log->json.name = copy;
    const int error = ft__io_log_file(path, append, log);
    if (error != 0) {
        if (log->fd >= 0) close(log->fd);
        FT_FREE(log);
        FT_FREE(copy);
        return ft_error(FT_ERR_IO, "%s: cannot open for writing: %s", path, strerror(error));
    }
    *out = log;
    return FT_OK;
}

FT_API void ft_io_log_begin(ft_io_log *log)
{
    if (log == NULL) return;
    ft_io_json *json = &log->json;
    if (log->open_row) {
        ft__io_json_fail(json, FT_ERR_STATE, "a row begins inside another");
        return;
    }
    log->open_row = 1;
    if (log->torn) ft__io_json_put(json, "\n", 1);
    ft_io_json_begin_object(json);
}

/* A call between rows is an error too, which waits for the next end, or for the close. */
FT_API ft_io_json *ft_io_log_json(ft_io_log *log)
{
    if (log == NULL) return NULL;
    if (!log->open_row) ft__io_json_fail(&log->json, FT_ERR_STATE, "a value outside a row");
    return &log->json;
}

FT_API void ft_io_log_int(ft_io_log *log, const char *key, int64_t value)
{
    ft_io_json *json = ft_io_log_json(log);
    ft_io_json_key(json, key);
    ft_io_json_int(json, value);
}

FT_API void ft_io_log_float(ft_io_log *log, const char *key, double value)
{
    ft_io_json *json = ft_io_log_json(log);
    ft_io_json_key(json, key);
    ft_io_json_float(json, value);
}

FT_API void ft_io_log_double(ft_io_log *log, const char *key, double value)
{
    ft_io_json *json = ft_io_log_json(log);
    ft_io_json_key(json, key);
    ft_io_json_double(json, value);
}

FT_API void ft_io_log_string(ft_io_log *log, const char *key, const char *value)
{
    ft_io_json *json = ft_io_log_json(log);
    ft_io_json_key(json, key);
    ft_io_json_string(json, value);
}

static ft_status ft__io_log_write(ft_io_log *log)
{
    ft_io_json *json = &log->json;
    size_t written;
    FT_TRY(ft__io_json_status(json));
    const int error = ft__io_write(log->fd, json->text.bytes, json->text.n, &written);
    if (error == 0) log->torn = 0;
    else if (written > 0) log->torn = 1;
    if (error == 0) return FT_OK;
    return ft_error(FT_ERR_IO, "%s: cannot write a row of %zu bytes: %s", json->name, json->text.n,
                    strerror(error));
}

FT_API ft_status ft_io_log_end(ft_io_log *log)
{
    if (log == NULL) return FT_OK;
    ft_io_json *json = &log->json;
    if (!log->open_row) ft__io_json_fail(json, FT_ERR_STATE, "a row ends that has not begun");
    ft_io_json_end_object(json);
    ft__io_json_put(json, "\n", 1);
    const ft_status status = ft__io_log_write(log);
    log->open_row = 0;
    json->status = FT_OK;
    json->text.n = 0;
    json->depth = json->filled = json->keyed = 0;
    return status;
}

FT_API ft_status ft_io_log_close(ft_io_log *log)
{
    if (log == NULL) return FT_OK;
    ft_status status = FT_OK;
    if (log->open_row)
        status =
            ft_error(FT_ERR_STATE, "%s: closed inside a row, which is not written", log->json.name);
    else if (log->json.status != FT_OK) status = ft__io_json_status(&log->json);
    if (close(log->fd) != 0 && status == FT_OK)
        status = ft_error(FT_ERR_IO, "%s: cannot close: %s", log->json.name, strerror(errno));
    FT_FREE(log->json.text.bytes);
    FT_FREE(log->json.name);
    FT_FREE(log);
    return status;
}

/* -------------------------------------------------------------------------- >>tensorboard.impl */

/* Bit by bit: a step's few hundred bytes are not worth a table that threads would share. */
FT_API uint32_t ft_io_crc32c(const void *bytes, size_t n)
{
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < n; i++) {
        crc ^= ((const unsigned char *)bytes)[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0x82f63b78u & (0u - (crc & 1u)));
    }
    return ~crc;
}

struct ft_io_tb {
    ft__io_text text;  /* events that are not in the file yet */
    int fd;
    char *path;
    int no_memory;     /* for the event at work */
    ft_status status;  /* the first error since the last flush, and its text */
    const char *wrong;
};

static void ft__io_tb_fail(ft_io_tb *log, ft_status status, const char *wrong)
{
    if (log->status != FT_OK) return;
    log->status = status;
    log->wrong = wrong;
}

static void ft__io_tb_put(ft_io_tb *log, const void *bytes, size_t n)
{
    if (!log->no_memory && !ft__io_text_put(&log->text, bytes, n)) log->no_memory = 1;
}

static void ft__io_tb_le(ft_io_tb *log, uint64_t value, int bytes)
{
    unsigned char at[8];
    for (int i = 0; i < bytes; i++) at[i] = (unsigned char)(value >> 8 * i);
    ft__io_tb_put(log, at, (size_t)bytes);
}

/* Seven bits a byte, the lowest first; all but the last have the top bit. */
static void ft__io_tb_varint(ft_io_tb *log, uint64_t value)
{
    for (; value > 127; value >>= 7) ft__io_tb_le(log, (value & 127) | 128, 1);
    ft__io_tb_le(log, value, 1);
}

static size_t ft__io_tb_varint_bytes(uint64_t value)
{
    size_t n = 1;
    for (; value > 127; value >>= 7) n++;
    return n;
}

/* The CRC of what follows the first `from` bytes, rotated and shifted so that a CRC over data that
   holds CRCs stays a good one. */
static void ft__io_tb_crc(ft_io_tb *log, size_t from)
{
    if (log->no_memory) return;
    const uint32_t crc = ft_io_crc32c(log->text.bytes + from, log->text.n - from);
    ft__io_tb_le(log, (uint32_t)((crc >> 15 | crc << 17) + 0xa282ead8u), 4);
}

/* A field of a known number of bytes that follow: its number, wire type 2, the length. */
static void ft__io_tb_field(ft_io_tb *log, int field, size_t bytes)
{
    ft__io_tb_le(log, (uint64_t)field << 3 | 2, 1);
    ft__io_tb_varint(log, bytes);
}

static size_t ft__io_tb_field_bytes(size_t bytes)
{
    return 1 + ft__io_tb_varint_bytes(bytes) + bytes;
}

static uint64_t ft__io_tb_double_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The record's length and the event's first two fields; `rest` bytes of the event follow. A step 0
   is not written, as protocol buffers have it. Returns where the payload begins. */
static size_t ft__io_tb_begin(ft_io_tb *log, double wall_time, int64_t step, size_t rest)
{
    const size_t begin = log->text.n;
    const size_t step_bytes = step == 0 ? 0 : 1 + ft__io_tb_varint_bytes((uint64_t)step);
    log->no_memory = 0;
    ft__io_tb_le(log, 1 + 8 + step_bytes + rest, 8);
    ft__io_tb_crc(log, begin);
    const size_t payload = log->text.n;
    ft__io_tb_le(log, 1 << 3 | 1, 1);
    ft__io_tb_le(log, ft__io_tb_double_bits(wall_time), 8);
    if (step != 0) ft__io_tb_le(log, 2 << 3 | 0, 1);
    if (step != 0) ft__io_tb_varint(log, (uint64_t)step);
    return payload;
}

/* The record that began at `begin` ends, or is taken out again if there was no memory for it. */
static void ft__io_tb_end(ft_io_tb *log, size_t begin, size_t payload)
{
    ft__io_tb_crc(log, payload);
    if (!log->no_memory) return;
    log->text.n = begin;
    ft__io_tb_fail(log, FT_ERR_OOM, "no memory for an event");
}

static void ft__io_tb_version(ft_io_tb *log, double wall_time)
{
    const char *version = "brain.Event:2";
    const size_t n = strlen(version);
    const size_t payload = ft__io_tb_begin(log, wall_time, 0, ft__io_tb_field_bytes(n));
    ft__io_tb_field(log, 3, n);
    ft__io_tb_put(log, version, n);
    ft__io_tb_end(log, 0, payload);
}

FT_API void ft_io_tb_scalar(ft_io_tb *log, const char *tag, int64_t step, double wall_time,
                            double value)
{
    if (log == NULL) return;
    if (tag == NULL || tag[0] == 0 || !ft__io_utf8_valid(tag)) {
        ft__io_tb_fail(log, FT_ERR_ARG, "a tag must be UTF-8, and not empty");
        return;
    }
    const size_t begin = log->text.n, n = strlen(tag);
    const size_t value_bytes = ft__io_tb_field_bytes(n) + 5;
    const size_t summary_bytes = ft__io_tb_field_bytes(value_bytes);
    const float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    const size_t payload =
        ft__io_tb_begin(log, wall_time, step, ft__io_tb_field_bytes(summary_bytes));
    ft__io_tb_field(log, 5, summary_bytes);
    ft__io_tb_field(log, 1, value_bytes);
    ft__io_tb_field(log, 1, n);
    ft__io_tb_put(log, tag, n);
    ft__io_tb_le(log, 2 << 3 | 5, 1);
    ft__io_tb_le(log, bits, 4);
    ft__io_tb_end(log, begin, payload);
}

FT_API ft_status ft_io_tb_flush(ft_io_tb *log)
{
    if (log == NULL) return FT_OK;
    size_t written;
    const ft_status status = log->status;
    const int error = ft__io_write(log->fd, log->text.bytes, log->text.n, &written);
    log->text.n -= written;
    if (written > 0 && log->text.n > 0)
        memmove(log->text.bytes, log->text.bytes + written, log->text.n);
    log->status = FT_OK;
    if (status != FT_OK) return ft_error(status, "%s: %s", log->path, log->wrong);
    if (error == 0) return FT_OK;
    return ft_error(FT_ERR_IO, "%s: cannot write events, %zu bytes are left: %s", log->path,
                    log->text.n, strerror(error));
}

static void ft__io_tb_free(ft_io_tb *log)
{
    FT_FREE(log->text.bytes);
    FT_FREE(log->path);
    FT_FREE(log);
}

FT_API ft_status ft_io_tb_close(ft_io_tb *log)
{
    if (log == NULL) return FT_OK;
    ft_status status = ft_io_tb_flush(log);
    if (close(log->fd) != 0 && status == FT_OK)
        status = ft_error(FT_ERR_IO, "%s: cannot close: %s", log->path, strerror(errno));
    ft__io_tb_free(log);
    return status;
}

/* Makes the directory `path`, which is changed on the way and restored. */
static ft_status ft__io_tb_directory(char *path)
{
    struct stat info;
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        (void)mkdir(path, 0777); /* what is wrong shows at the last one */
        *slash = '/';
    }
    if (mkdir(path, 0777) == 0) return FT_OK;
    const int error = errno;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) return FT_OK;
    return ft_error(FT_ERR_IO, "%s: cannot make the directory: %s", path, strerror(error));
}

/* Opens DIRECTORY/events.out.tfevents.SECONDS.HOST.PID.N; the path has room for it. */
static ft_status ft__io_tb_create(ft_io_tb *log, size_t n, size_t room, double wall_time)
{
    struct utsname host;
    if (uname(&host) != 0) snprintf(host.nodename, sizeof host.nodename, "host");
    for (char *c = host.nodename; *c != 0; c++)
        if (*c == '/') *c = '_';
    for (int i = 0; i < 10000; i++) {
        snprintf(log->path + n, room - n, "/events.out.tfevents.%010lld.%s.%lld.%d",
                 (long long)wall_time, host.nodename, (long long)getpid(), i);
        log->fd = ft__io_open_fd(log->path, O_CREAT | O_EXCL | O_APPEND | O_WRONLY);
        if (log->fd >= 0 || errno != EEXIST) break;
    }
    if (log->fd >= 0) return FT_OK;
    return ft_error(FT_ERR_IO, "%s: cannot open for writing: %s", log->path, strerror(errno));
}

FT_API ft_status ft_io_tb_open(const char *directory, double wall_time, ft_io_tb **out)
{
    enum { NAME = 21 + 20 + (int)sizeof(((struct utsname *)0)->nodename) + 20 + 12 };
    if (directory == NULL || directory[0] == 0 || out == NULL)
        return ft_error(FT_ERR_ARG, "ft_io_tb_open: directory and out must not be NULL or empty");
    *out = NULL;
    if (!(wall_time >= 0 && wall_time < 1e15))
        return ft_error(FT_ERR_ARG, "ft_io_tb_open: wall_time is %g, not seconds since 1970",
                        wall_time);
    const size_t n = strlen(directory), room = n + NAME;
    ft_io_tb *log = (ft_io_tb *)FT_MALLOC(sizeof *log);
    if (log == NULL) return ft__io_oom(directory, sizeof *log);
    memset(log, 0, sizeof *log);
    log->fd = -1;
    log->path = (char *)FT_MALLOC(room);
    ft_status status = FT_OK;
    if (log->path == NULL) status = ft__io_oom(directory, room);
    if (status == FT_OK) {
        memcpy(log->path, directory, n + 1);
        status = ft__io_tb_directory(log->path);
    }
    if (status == FT_OK) status = ft__io_tb_create(log, n, room, wall_time);
    if (status == FT_OK) {
        ft__io_tb_version(log, wall_time);
        status = ft_io_tb_flush(log);
    }
    if (status == FT_OK) {
        *out = log;
        return FT_OK;
    }
    if (log->fd >= 0) close(log->fd);
    ft__io_tb_free(log);
    return status;
}

/* ------------------------------------------------------------------------------- >>record.impl */

static ft_status ft__io_record_points(const ft_ctx *ctx, ft_io_record *record)
{
    const ft_mem_event *events;
    const int64_t n = ft_mem_timeline(ctx, &events);
    ft_mem_stats stats;
    ft_mem_get(ctx, &stats);
    record->points = (ft_io_point *)FT_MALLOC((size_t)(n + 1) * sizeof *record->points);
    if (record->points == NULL) return ft__io_oom("a record", (size_t)n * sizeof *record->points);
    memset(record->points, 0, (size_t)(n + 1) * sizeof *record->points);
    record->n_points = n + 1;
    /* What was live before the first event: what is live now, less all changes since. */
    ft_io_point *p = record->points;
    for (int t = 0; t < FT_TAG_COUNT; t++) p[0].live[t] = stats.live[t];
    for (int64_t i = 0; i < n; i++) p[0].live[events[i].tag] -= (size_t)events[i].delta_bytes;
    p[0].time_s = n > 0 ? events[0].time_s : 0;
    size_t most = 0;
    for (int64_t i = 0; i <= n; i++) {
        size_t sum = 0;
        if (i > 0) {
            p[i] = p[i - 1];
            p[i].live[events[i - 1].tag] += (size_t)events[i - 1].delta_bytes;
            p[i].time_s = events[i - 1].time_s;
            p[i].event = i;
        }
        for (int t = 0; t < FT_TAG_COUNT; t++) sum += p[i].live[t];
        if (sum <= most) continue;
        most = sum;
        record->peak = i;
    }
    snprintf(record->peak_where, sizeof record->peak_where, "%s%s%s", stats.peak_action,
             stats.peak_action[0] ? ": " : "", stats.peak_where);
    return FT_OK;
}

FT_API ft_status ft_io_record_take(const ft_ctx *ctx, ft_io_record *record)
{
    ft_traffic traffic[FT_IO_MAX_GROUPS];
    const ft_span *spans;
    memset(record, 0, sizeof *record);
    record->rank = ft_rank(ctx);
    FT_TRY(ft__io_record_points(ctx, record));
    record->n_spans = ft_spans(ctx, &spans);
    const size_t bytes = (size_t)record->n_spans * sizeof *spans;
    record->spans = (ft_span *)FT_MALLOC(bytes + 1);
    if (record->spans == NULL) return ft__io_oom("a record", bytes);
    if (bytes > 0) memcpy(record->spans, spans, bytes);
    const int groups = ft_traffic_get(ctx, FT_IO_MAX_GROUPS, traffic);
    for (int g = 0; g < groups && g < FT_IO_MAX_GROUPS; g++) {
        ft_io_sent *sent = &record->sent[record->n_sent];
        snprintf(sent->group, sizeof sent->group, "%s", traffic[g].group);
        for (int k = 0; k < FT_COLLECTIVE_COUNT; k++) {
            sent->bytes += traffic[g].sent_bytes[k];
            sent->calls += traffic[g].calls[k];
        }
        record->n_sent += sent->calls > 0;
        if (sent->calls == 0) memset(sent, 0, sizeof *sent);
    }
    return FT_OK;
}

FT_API void ft_io_record_free(ft_io_record *record)
{
    if (record == NULL) return;
    FT_FREE(record->points);
    FT_FREE(record->spans);
    record->points = NULL;
    record->spans = NULL;
    record->n_points = record->n_spans = 0;
}

static size_t ft__io_point_sum(const ft_io_point *p)
{
    size_t sum = 0;
    for (int t = 0; t < FT_TAG_COUNT; t++) sum += p->live[t];
    return sum;
}

/* -------------------------------------------------------------------------------- >>trace.impl */

static void ft__io_trace_begin(ft_io_json *json, const char *name, const char *phase, int rank,
                               double time_s)
{
    ft_io_json_begin_object(json);
    ft_io_json_key(json, "name");
    ft_io_json_string(json, name);
    ft_io_json_key(json, "ph");
    ft_io_json_string(json, phase);
    ft_io_json_key(json, "pid");
    ft_io_json_int(json, rank);
    ft_io_json_key(json, "tid");
    ft_io_json_int(json, 0);
    ft_io_json_key(json, "ts");
    ft_io_json_float(json, time_s * 1e6);
}

static void ft__io_trace_spans(ft_io_json *json, const ft_io_record *r)
{
    for (int64_t i = 0; i < r->n_spans; i++) {
        const ft_span *span = &r->spans[i];
        ft__io_trace_begin(json, span->name, "X", r->rank, span->begin_s);
        ft_io_json_key(json, "dur");
        ft_io_json_float(json, (span->end_s - span->begin_s) * 1e6);
        ft_io_json_key(json, "args");
        ft_io_json_begin_object(json);
        if (span->micro_batch >= 0) {
            ft_io_json_key(json, "micro_batch");
            ft_io_json_int(json, span->micro_batch);
            ft_io_json_key(json, "chunk");
            ft_io_json_int(json, span->chunk);
        }
        ft_io_json_end_object(json);
        ft_io_json_end_object(json);
    }
}

static void ft__io_trace_memory(ft_io_json *json, const ft_io_record *r)
{
    for (int64_t i = 0; i < r->n_points; i++) {
        ft__io_trace_begin(json, "memory", "C", r->rank, r->points[i].time_s);
        ft_io_json_key(json, "args");
        ft_io_json_begin_object(json);
        for (int t = 0; t < FT_TAG_COUNT; t++) {
            ft_io_json_key(json, ft_tag_name((ft_tag)t));
            ft_io_json_int(json, (int64_t)r->points[i].live[t]);
        }
        ft_io_json_end_object(json);
        ft_io_json_end_object(json);
    }
}

FT_API ft_status ft_io_trace_write(const char *path, int n, const ft_io_record *records)
{
    ft_io_json *json;
    FT_TRY(ft_io_json_open(path, &json));
    ft_io_json_begin_object(json);
    ft_io_json_key(json, "displayTimeUnit");
    ft_io_json_string(json, "ms");
    ft_io_json_key(json, "traceEvents");
    ft_io_json_begin_array(json);
    for (int r = 0; r < n; r++) {
        char name[32];
        snprintf(name, sizeof name, "rank %d", records[r].rank);
        ft__io_trace_begin(json, "process_name", "M", records[r].rank, 0);
        ft_io_json_key(json, "args");
        ft_io_json_begin_object(json);
        ft_io_json_key(json, "name");
        ft_io_json_string(json, name);
        ft_io_json_end_object(json);
        ft_io_json_end_object(json);
        ft__io_trace_spans(json, &records[r]);
        ft__io_trace_memory(json, &records[r]);
    }
    ft_io_json_end_array(json);
    ft_io_json_end_object(json);
    return ft_io_json_finish(json);
}

/* ------------------------------------------------------------------------------- >>report.impl

   Drawings are FT__IO_WIDE units wide and scale with the page; on a narrow screen they scroll in
   their frame, so that text stays legible. Numbers are written by ft__io_num, whose point is a dot
   in every locale. */

enum { FT__IO_WIDE = 900, FT__IO_LEFT = 80, FT__IO_RIGHT = 10, FT__IO_AREA = 260,
       FT__IO_COLUMNS = 400 };

/* Where time goes. */
static const double ft__io_left = FT__IO_LEFT;
static const double ft__io_drawn = FT__IO_WIDE - FT__IO_LEFT - FT__IO_RIGHT;

static const char *const ft__io_colours[FT_TAG_COUNT] = { /* by tag; they differ in grey too */
    "#1f4e79", "#c55a11", "#548235", "#9dc3e6", "#7030a0", "#f4b183", "#a5a5a5", "#404040"
};

/* The number that a text has, in units of 1/100: no decimal point of a locale. */
static void ft__io_num(FILE *f, double value)
{
    long long hundredths = (long long)(value * 100 + (value < 0 ? -0.5 : 0.5));
    long long whole = hundredths / 100, part = hundredths % 100;
    if (part < 0) part = -part;
    fprintf(f, "%s%lld.%02lld", hundredths < 0 && whole == 0 ? "-" : "", whole, part);
}

static void ft__io_attr(FILE *f, const char *name, double value)
{
    fprintf(f, " %s=\"", name);
    ft__io_num(f, value);
    fputc('"', f);
}

static void ft__io_escape_html(FILE *f, const char *text)
{
    for (; *text; text++) {
        switch (*text) {
        case '&': fputs("&amp;", f); break;
        case '<': fputs("&lt;", f); break;
        case '>': fputs("&gt;", f); break;
        case '"': fputs("&quot;", f); break;
        default: fputc(*text, f);
        }
    }
}

static void ft__io_bytes_text(FILE *f, double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int k = 0;
    while (k < 4 && bytes >= 1024) {
        bytes /= 1024;
        k++;
    }
    ft__io_num(f, bytes);
    fprintf(f, " %s", units[k]);
}

static void ft__io_svg_begin(FILE *f, const char *kind, double high)
{
    fprintf(f, "<div class=frame><svg class=\"%s\" role=img viewBox=\"0 0 %d ", kind, FT__IO_WIDE);
    ft__io_num(f, high);
    fputs("\">\n", f);
}

static void ft__io_svg_text(FILE *f, double x, double y, const char *anchor)
{
    fputs("<text", f);
    ft__io_attr(f, "x", x);
    ft__io_attr(f, "y", y);
    fprintf(f, " text-anchor=%s>", anchor);
}

static void ft__io_rect(FILE *f, double x, double y, double wide, double high, const char *fill)
{
    fputs("<rect", f);
    ft__io_attr(f, "x", x);
    ft__io_attr(f, "y", y);
    ft__io_attr(f, "width", wide);
    ft__io_attr(f, "height", high);
    fprintf(f, " fill=\"%s\">", fill);
}

typedef struct ft__io_axis { double from, to; } ft__io_axis; /* of time */

static double ft__io_x(const ft__io_axis *a, double time)
{
    if (a->to <= a->from) return ft__io_left;
    return ft__io_left + (time - a->from) / (a->to - a->from) * ft__io_drawn;
}

static ft__io_axis ft__io_axis_of(const ft_io_report *report)
{
    ft__io_axis a;
    int any = 0;
    a.from = a.to = 0;
    for (int r = 0; r < report->n; r++) {
        const ft_io_record *rec = &report->records[r];
        for (int64_t i = 0; i < rec->n_spans; i++) {
            if (!any || rec->spans[i].begin_s < a.from) a.from = rec->spans[i].begin_s;
            if (!any || rec->spans[i].end_s > a.to) a.to = rec->spans[i].end_s;
            any = 1;
        }
        for (int64_t i = 0; i < rec->n_points; i++) {
            if (!any || rec->points[i].time_s < a.from) a.from = rec->points[i].time_s;
            if (!any || rec->points[i].time_s > a.to) a.to = rec->points[i].time_s;
            any = 1;
        }
    }
    return a;
}

static void ft__io_time_axis(FILE *f, const ft__io_axis *a, double y, const char *unit)
{
    for (int i = 0; i <= 5; i++) {
        const double t = a->from + (a->to - a->from) * i / 5;
        ft__io_svg_text(f, ft__io_x(a, t), y, i == 0 ? "start" : i == 5 ? "end" : "middle");
        ft__io_num(f, t - a->from);
        fprintf(f, " %s</text>\n", unit);
    }
}

/* Of the points in a column of the drawing the highest stands for all: a peak is never lost. */
static int64_t ft__io_thin(const ft_io_record *r, const ft__io_axis *a, int64_t *kept)
{
    int64_t n = 0;
    int column = -1;
    for (int64_t i = 0; i < r->n_points; i++) {
        const double at = (ft__io_x(a, r->points[i].time_s) - ft__io_left) / ft__io_drawn;
        const int here = (int)(at * (double)FT__IO_COLUMNS);
        if (here != column && n <= FT__IO_COLUMNS) {
            kept[n++] = i;
            column = here;
        } else if (ft__io_point_sum(&r->points[i]) > ft__io_point_sum(&r->points[kept[n - 1]])) {
            kept[n - 1] = i;
        }
    }
    return n;
}

/* Steps of one tag over those below it. */
static void ft__io_layer(FILE *f, const ft_io_record *r, const ft__io_axis *a, const int64_t *kept,
                         int64_t n, int tag, double scale)
{
    double below, above, y0 = 10 + FT__IO_AREA;
    size_t any = 0;
    for (int64_t i = 0; i < n; i++) any |= r->points[kept[i]].live[tag];
    if (any == 0) return;
    fprintf(f, "<path fill=\"%s\" d=\"", ft__io_colours[tag]);
    for (int side = 0; side < 2; side++) /* the upper edge to the right, the lower one back */
        for (int64_t k = 0; k < n; k++) {
            const int64_t i = side ? n - 1 - k : k;
            const ft_io_point *p = &r->points[kept[i]];
            const double x = ft__io_x(a, p->time_s);
            const double next = i + 1 < n ? ft__io_x(a, r->points[kept[i + 1]].time_s)
                                          : FT__IO_WIDE - FT__IO_RIGHT;
            below = 0;
            for (int t = 0; t < tag; t++) below += (double)p->live[t];
            above = below + (double)p->live[tag];
            const double y = y0 - (side ? below : above) * scale;
            fputc(k == 0 && side == 0 ? 'M' : 'L', f);
            ft__io_num(f, side ? next : x);
            fputc(' ', f);
            ft__io_num(f, y);
            fputc('H', f);
            ft__io_num(f, side ? x : next);
        }
    fprintf(f, "Z\"><title>%s</title></path>\n", ft_tag_name((ft_tag)tag));
}

static void ft__io_peak_mark(FILE *f, const ft_io_record *r, const ft__io_axis *a, double scale)
{
    const ft_io_point *p = &r->points[r->peak];
    const double x = ft__io_x(a, p->time_s);
    const double y = 10 + (double)FT__IO_AREA - (double)ft__io_point_sum(p) * scale;
    fputs("<line class=peak", f);
    ft__io_attr(f, "x1", x);
    ft__io_attr(f, "x2", x);
    ft__io_attr(f, "y1", y);
    fprintf(f, " y2=\"%d\"/>\n", 10 + FT__IO_AREA);
    const int right = x < FT__IO_WIDE / 2;
    ft__io_svg_text(f, right ? x + 4 : x - 4, y - 6 > 12 ? y - 6 : 22, right ? "start" : "end");
    fputs("peak ", f);
    ft__io_bytes_text(f, (double)ft__io_point_sum(p));
    fputs("</text>\n", f);
}

static void ft__io_breakdown(FILE *f, const ft_io_record *r)
{
    const ft_io_point *p = &r->points[r->peak];
    const double sum = (double)ft__io_point_sum(p);
    fputs("<p class=legend>At the peak (", f);
    ft__io_escape_html(f, r->peak_where[0] ? r->peak_where : "no span");
    fputs("):", f);
    for (int t = 0; t < FT_TAG_COUNT; t++) {
        if (p->live[t] == 0) continue;
        fprintf(f, " <span><i style=\"background:%s\"></i>%s ", ft__io_colours[t],
                ft_tag_name((ft_tag)t));
        ft__io_bytes_text(f, (double)p->live[t]);
        fprintf(f, " (%d%%)</span>", (int)(100 * (double)p->live[t] / sum + 0.5));
    }
    fputs("</p>\n", f);
}

static void ft__io_memory_chart(FILE *f, const ft_io_record *r, const ft__io_axis *a,
                                const char *unit, int64_t *kept)
{
    const double most = (double)ft__io_point_sum(&r->points[r->peak]);
    const double scale = most > 0 ? (double)(FT__IO_AREA - 10) / most : 0;
    const int64_t n = ft__io_thin(r, a, kept);
    ft__io_svg_begin(f, "memory", FT__IO_AREA + 36);
    for (int i = 0; i <= 4; i++) {
        const double y = 10 + FT__IO_AREA - most * i / 4 * scale;
        fputs("<line class=grid", f);
        fprintf(f, " x1=\"%d\" x2=\"%d\"", FT__IO_LEFT, FT__IO_WIDE - FT__IO_RIGHT);
        ft__io_attr(f, "y1", y);
        ft__io_attr(f, "y2", y);
        fputs("/>\n", f);
        ft__io_svg_text(f, FT__IO_LEFT - 4, y + 4, "end");
        ft__io_bytes_text(f, most * i / 4);
        fputs("</text>\n", f);
    }
    for (int t = 0; t < FT_TAG_COUNT; t++) ft__io_layer(f, r, a, kept, n, t, scale);
    ft__io_peak_mark(f, r, a, scale);
    ft__io_time_axis(f, a, FT__IO_AREA + 30, unit);
    fputs("</svg></div>\n", f);
}

/* The same bytes in the same order: their drawings would differ in nothing but time. */
static int ft__io_alike(const ft_io_record *a, const ft_io_record *b)
{
    if (a->n_points != b->n_points) return 0;
    for (int64_t i = 0; i < a->n_points; i++)
        if (memcmp(a->points[i].live, b->points[i].live, sizeof a->points[i].live) != 0) return 0;
    return 1;
}

static void ft__io_report_memory(FILE *f, const ft_io_report *report, const ft__io_axis *a,
                                 int64_t *kept)
{
    fputs("<h2>Memory over time</h2>\n", f);
    for (int first = 0, last; first < report->n; first = last + 1) {
        const ft_io_record *r = &report->records[first];
        for (last = first; last + 1 < report->n; last++)
            if (!ft__io_alike(r, &report->records[last + 1])) break;
        if (first == last) fprintf(f, "<h3>Rank %d</h3>\n", r->rank);
        else fprintf(f, "<h3>Ranks %d to %d</h3>\n", r->rank, report->records[last].rank);
        ft__io_memory_chart(f, r, a, report->time_unit, kept);
        ft__io_breakdown(f, r);
    }
}

static const char *ft__io_span_colour(const char *name)
{
    if (strcmp(name, "forward") == 0) return "#9dc3e6";
    if (strcmp(name, "backward") == 0) return "#f4b183";
    if (strcmp(name, "input gradients") == 0) return "#ffd966";
    if (strcmp(name, "weight gradients") == 0) return "#a9d18e";
    if (strcmp(name, "exchange") == 0) return "#d9d9d9";
    return "#8faadc";
}

static double ft__io_row_busy(const ft_io_record *r)
{
    double busy = 0;
    for (int64_t i = 0; i < r->n_spans; i++)
        if (strcmp(r->spans[i].name, "exchange") != 0)
            busy += r->spans[i].end_s - r->spans[i].begin_s;
    return busy;
}

static void ft__io_gantt_row(FILE *f, const ft_io_record *r, const ft__io_axis *a, double y,
                             const char *unit)
{
    ft__io_svg_text(f, FT__IO_LEFT - 4, y + 16, "end");
    fprintf(f, "rank %d</text>\n", r->rank);
    for (int64_t i = 0; i < r->n_spans; i++) {
        const ft_span *s = &r->spans[i];
        const double x = ft__io_x(a, s->begin_s), wide = ft__io_x(a, s->end_s) - x;
        ft__io_rect(f, x, y, wide, 22, ft__io_span_colour(s->name));
        fprintf(f, "<title>%s", s->name);
        if (s->micro_batch >= 0)
            fprintf(f, " of micro-batch %d, chunk %d", s->micro_batch, s->chunk);
        fputs(", ", f);
        ft__io_num(f, s->end_s - s->begin_s);
        fprintf(f, " %s</title></rect>\n", unit);
        if (s->micro_batch < 0 || wide < 14) continue;
        ft__io_svg_text(f, x + wide / 2, y + 15, "middle");
        fprintf(f, "%d</text>\n", s->micro_batch);
    }
}

static void ft__io_report_gantt(FILE *f, const ft_io_report *report, const ft__io_axis *a)
{
    static const char *const names[] = {"forward", "backward", "input gradients",
                                        "weight gradients", "exchange", "optimizer"};
    double busy = 0;
    const double high = 28.0 * report->n_rows;
    fputs("<h2>Who does what when</h2>\n", f);
    ft__io_svg_begin(f, "gantt", high + 30);
    fprintf(f, "<rect class=idle x=\"%d\" y=\"0\" width=\"%d\"", FT__IO_LEFT,
            FT__IO_WIDE - FT__IO_LEFT - FT__IO_RIGHT);
    ft__io_attr(f, "height", high);
    fputs("/>\n", f);
    for (int i = 0; i < report->n_rows; i++) {
        const ft_io_record *r = &report->records[report->rows[i]];
        busy += ft__io_row_busy(r);
        ft__io_gantt_row(f, r, a, 28.0 * i + 3, report->time_unit);
    }
    ft__io_time_axis(f, a, high + 20, report->time_unit);
    fputs("</svg></div>\n<p class=legend>", f);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        fprintf(f, "<span><i style=\"background:%s\"></i>%s</span> ", ft__io_span_colour(names[i]),
                names[i]);
    fputs("Numbers are micro-batches; what is empty, or waits in an exchange, is bubble: ", f);
    const double all = (a->to - a->from) * report->n_rows;
    ft__io_num(f, all > 0 ? 100 * (1 - busy / all) : 0);
    fputs("% of the time shown.</p>\n", f);
}

static void ft__io_report_traffic(FILE *f, const ft_io_report *report)
{
    fputs("<h2>Traffic</h2>\n<div class=frame><table class=traffic><tr><th>rank<th>group<th>calls"
          "<th>bytes sent<th></tr>\n", f);
    double most = 1;
    for (int i = 0; i < report->n_rows; i++)
        for (int g = 0; g < report->records[report->rows[i]].n_sent; g++)
            if ((double)report->records[report->rows[i]].sent[g].bytes > most)
                most = (double)report->records[report->rows[i]].sent[g].bytes;
    for (int i = 0; i < report->n_rows; i++) {
        const ft_io_record *r = &report->records[report->rows[i]];
        for (int g = 0; g < r->n_sent; g++) {
            fprintf(f, "<tr><td>%d<td>", r->rank);
            ft__io_escape_html(f, r->sent[g].group);
            fprintf(f, "<td>%lld<td>%lld<td><b class=bar style=\"width:",
                    (long long)r->sent[g].calls, (long long)r->sent[g].bytes);
            ft__io_num(f, 120 * (double)r->sent[g].bytes / most);
            fputs("px\"></b></tr>\n", f);
        }
    }
    fputs("</table></div>\n", f);
}

static void ft__io_report_losses(FILE *f, const ft_io_report *report)
{
    const int64_t n = report->n_steps;
    double low, high;
    if (n < 1 || report->losses == NULL) return;
    low = high = report->losses[0];
    for (int64_t i = 1; i < n; i++) {
        if (report->losses[i] < low) low = report->losses[i];
        if (report->losses[i] > high) high = report->losses[i];
    }
    fputs("<h2>Loss</h2>\n", f);
    ft__io_svg_begin(f, "loss", FT__IO_AREA + 36);
    fputs("<polyline class=loss points=\"", f);
    for (int64_t i = 0; i < n; i++) {
        if (n > 4000 && i % (n / 2000) != 0 && i != n - 1) continue;
        ft__io_num(f, ft__io_left + (n > 1 ? ft__io_drawn * (double)i / (double)(n - 1) : 0));
        fputc(',', f);
        ft__io_num(f, 10 + (FT__IO_AREA - 10) *
                      (high > low ? (high - report->losses[i]) / (high - low) : 0.5));
        fputc(' ', f);
    }
    fputs("\"/>\n", f);
    for (int i = 0; i <= 4; i++) {
        ft__io_svg_text(f, FT__IO_LEFT - 4, 14 + (FT__IO_AREA - 10) * (4 - i) / 4.0, "end");
        ft__io_num(f, low + (high - low) * i / 4);
        fputs("</text>\n", f);
    }
    ft__io_svg_text(f, FT__IO_LEFT, FT__IO_AREA + 30, "start");
    fputs("step 1</text>\n", f);
    ft__io_svg_text(f, FT__IO_WIDE - FT__IO_RIGHT, FT__IO_AREA + 30, "end");
    fprintf(f, "step %lld</text>\n</svg></div>\n", (long long)n);
}

static void ft__io_report_head(FILE *f, const ft_io_report *report)
{
    fputs("<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>\n"
          "<meta name=viewport content=\"width=device-width, initial-scale=1\">\n<title>", f);
    ft__io_escape_html(f, report->title);
    fputs("</title>\n<style>\n"
          "body{font:16px/1.45 system-ui,sans-serif;max-width:960px;margin:0 auto;padding:0 12px;"
          "color:#222;background:#fff}\n"
          "pre{background:#f4f4f4;padding:8px;white-space:pre-wrap;font-size:13px}\n"
          ".frame{overflow-x:auto}\n"
          "svg{display:block;width:100%;min-width:640px;height:auto;background:#fff}\n"
          "svg text{font:12px system-ui,sans-serif;fill:#222}\n"
          ".grid{stroke:#ddd}.peak{stroke:#c00;stroke-width:2;stroke-dasharray:5 3}\n"
          ".idle{fill:#f4f4f4}.gantt rect{stroke:#fff;stroke-width:.5}\n"
          ".loss polyline{fill:none;stroke:#1f4e79;stroke-width:1.5}\n"
          ".legend span{white-space:nowrap;margin-right:10px}\n"
          ".legend i{display:inline-block;width:12px;height:12px;margin-right:4px}\n"
          "table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right;"
          "white-space:nowrap}tr{border-bottom:1px solid #ddd}\n"
          ".bar{display:inline-block;height:12px;background:#1f4e79}\n"
          "@media print{body{max-width:none}svg{min-width:0;break-inside:avoid}"
          "h2,h3{break-after:avoid}*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}\n"
          "</style></head><body>\n<h1>", f);
    ft__io_escape_html(f, report->title);
    fputs("</h1>\n<pre>", f);
    ft__io_escape_html(f, report->settings ? report->settings : "");
    fputs("</pre>\n", f);
}

/* A line under each memory drawing that says what is under the pointer; and what a test asks. */
static void ft__io_report_script(FILE *f)
{
    fputs("<script>\n"
          "for (const p of document.querySelectorAll('svg.memory path,svg.gantt rect'))\n"
          "  p.addEventListener('pointerenter', () => {\n"
          "    for (const q of document.querySelectorAll('.at')) q.remove();\n"
          "    const title = p.querySelector('title');\n"
          "    if (!title) return;\n"
          "    const at = document.createElement('p');\n"
          "    at.className = 'at';\n"
          "    at.textContent = title.textContent;\n"
          "    p.closest('.frame').after(at);\n"
          "  });\n"
          "const page = document.documentElement;\n"
          "page.dataset.charts = document.querySelectorAll('svg').length;\n"
          "page.dataset.overflow = Math.max(0, page.scrollWidth - page.clientWidth);\n"
          "</script>\n</body></html>\n", f);
}

FT_API ft_status ft_io_report_write(const char *path, const ft_io_report *report)
{
    FILE *f = fopen(path, "w");
    if (f == NULL)
        return ft_error(FT_ERR_IO, "%s: cannot open for writing: %s", path, strerror(errno));
    int64_t *kept = (int64_t *)FT_MALLOC((FT__IO_COLUMNS + 2) * sizeof *kept);
    if (kept == NULL) {
        fclose(f);
        return ft__io_oom(path, FT__IO_COLUMNS * sizeof *kept);
    }
    const ft__io_axis axis = ft__io_axis_of(report);
    ft__io_report_head(f, report);
    ft__io_report_memory(f, report, &axis, kept);
    ft__io_report_gantt(f, report, &axis);
    ft__io_report_traffic(f, report);
    ft__io_report_losses(f, report);
    ft__io_report_script(f);
    FT_FREE(kept);
    const int wrong = ferror(f);
    if (fclose(f) != 0 || wrong)
        return ft_error(FT_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
    return FT_OK;
}

#endif /* implementation */
