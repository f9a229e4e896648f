/* test_megatron.c: data of Megatron-LM, spelled out byte by byte from the format's description:
   what is read of every width, which documents it has, and every way in which an index can lie. */

#if !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#define _DEFAULT_SOURCE 1 /* mkdtemp, truncate */
#define _POSIX_C_SOURCE 200809L
#endif

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "temp_files.h"
#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_io.h"
#include "assert_status.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ------------------------------------------------------------------------------------- helpers */

enum { MOST = 1 << 16 };

typedef struct index_file { /* an .idx in the making */
    unsigned char bytes[MOST];
    size_t n;
} index_file;

static void put_le(unsigned char *at, int64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) at[i] = (unsigned char)((uint64_t)value >> 8 * i);
}

static void add(index_file *f, int64_t value, int bytes)
{
    assert_true(f->n + (size_t)bytes <= MOST);
    put_le(f->bytes + f->n, value, bytes);
    f->n += (size_t)bytes;
}

static int width_of(int code)
{
    static const int widths[9] = {0, 1, 1, 2, 4, 8, 8, 4, 2};
    return widths[code];
}

/* Sequences of lengths[S]; document i begins with sequence starts[i], the last of [N] is S. */
static void make_index(index_file *f, int code, int S, const int *lengths, int N,
                       const int *starts)
{
    int64_t at = 0;
    f->n = 0;
    for (int i = 0; i < 9; i++) add(f, "MMIDIDX\0\0"[i], 1);
    add(f, 1, 8);
    add(f, code, 1);
    add(f, S, 8);
    add(f, N, 8);
    for (int i = 0; i < S; i++) add(f, lengths[i], 4);
    for (int i = 0; i < S; i++) {
        add(f, at, 8);
        at += (int64_t)lengths[i] * width_of(code);
    }
    for (int i = 0; i < N; i++) add(f, starts[i], 8);
}

static void write_named(const char *name, const char *end, const void *bytes, size_t n)
{
    char file[64];
    snprintf(file, sizeof file, "%s%s", name, end);
    write_file(file, bytes, n);
}

/* tokens[n] as NAME.bin, and the index as NAME.idx; gives the path of the prefix. */
static const char *write_pair(const char *name, int code, const int64_t *tokens, int n,
                              const index_file *f)
{
    static unsigned char bytes[8 * 4096];
    assert_true(n <= 4096);
    for (int i = 0; i < n; i++) put_le(bytes + i * width_of(code), tokens[i], width_of(code));
    write_named(name, ".bin", bytes, (size_t)(n * width_of(code)));
    write_named(name, ".idx", f->bytes, f->n);
    return in_directory(name);
}

static ft_status open_as(const char *const *paths, int n, ft_io_format format, ft_io_data **data)
{
    ft_io_data_config config = ft_io_data_config_default();
    config.format = format;
    return ft_io_data_open_files(paths, n, &config, data);
}

static index_file file; /* large: not on the stack */

/* 5 documents of 7 sequences, 24 tokens; sequence 3 is empty, so is document 3 (sequences 4..4). */
enum { SEQUENCES = 7, STARTS = 6, TOKENS = 24 };
static const int the_lengths[SEQUENCES] = {3, 4, 1, 0, 6, 2, 8};
static const int the_starts[STARTS] = {0, 2, 5, 5, 6, 7};
static const int document_at[TOKENS] = {0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7, 7,
                                        7, 7, 14, 14, 16, 16, 16, 16, 16, 16, 16, 16};

static const char *write_the_pair(const char *name, int code)
{
    int64_t tokens[TOKENS];
    for (int i = 0; i < TOKENS; i++) tokens[i] = 100 - i;
    make_index(&file, code, SEQUENCES, the_lengths, STARTS, the_starts);
    return write_pair(name, code, tokens, TOKENS, &file);
}

/* -------------------------------------------------------------------------------------- format */

static void an_index_is_read(void **state)
{
    (void)state;
    ft_io_megatron index;
    make_index(&file, 8, SEQUENCES, the_lengths, STARTS, the_starts);
    assert_int_equal(file.n, 34 + 12 * SEQUENCES + 8 * STARTS);
    assert_ok(ft_io_megatron_parse(file.bytes, file.n, "there", -1, &index));
    assert_int_equal(index.sequences, SEQUENCES);
    assert_int_equal(index.documents, STARTS - 1);
    assert_int_equal(index.tokens, TOKENS);
    assert_int_equal(index.token_bytes, 2);
    assert_string_equal(index.dtype, "uint16");
    assert_ok(ft_io_megatron_parse(file.bytes, file.n, "there", 2 * TOKENS, &index));
    for (int i = 0; i < SEQUENCES; i++) add(&file, 0, 1); /* modes of text */
    assert_ok(ft_io_megatron_parse(file.bytes, file.n, "there", 2 * TOKENS, &index));
    /* Wherever it lies: nothing in it need be aligned. */
    static unsigned char moved[MOST + 8];
    for (int shift = 1; shift < 8; shift++) {
        memcpy(moved + shift, file.bytes, file.n);
        assert_ok(ft_io_megatron_parse(moved + shift, file.n, "there", 2 * TOKENS, &index));
        assert_int_equal(index.tokens, TOKENS);
    }
}

static void every_integer_is_read(void **state)
{
    (void)state;
    static const struct { int code; int64_t vocab, largest; } types[] = {
        {1, 256, 255}, {2, 128, 127}, {3, 32768, 32767}, {4, 2147483648, 2147483647},
        {5, 2147483648, 2147483647}, {8, 65536, 65535}};
    for (size_t k = 0; k < COUNT(types); k++) {
        int64_t tokens[TOKENS];
        int32_t read[TOKENS];
        ft_io_data *data;
        for (int i = 0; i < TOKENS; i++) tokens[i] = i % 2 ? types[k].largest - i : i;
        make_index(&file, types[k].code, SEQUENCES, the_lengths, STARTS, the_starts);
        const char *path = write_pair("typed", types[k].code, tokens, TOKENS, &file);
        assert_ok(open_as(&path, 1, FT_IO_FORMAT_AUTO, &data));
        assert_int_equal(ft_io_data_format(data), FT_IO_FORMAT_MEGATRON);
        assert_int_equal(ft_io_data_vocab(data), types[k].vocab);
        assert_int_equal(ft_io_data_tokens(data), TOKENS);
        assert_ok(ft_io_data_check_vocab(data, types[k].vocab));
        assert_ok(ft_io_data_read(data, 0, TOKENS, read));
        for (int i = 0; i < TOKENS; i++) assert_int_equal(read[i], tokens[i]);
        assert_error(ft_io_data_check_vocab(data, 20), FT_ERR_DATA, "typed.bin",
                     "at position 1 is outside the vocabulary of 20");
        ft_io_data_close(data);
    }
}

static void negative_and_large_tokens_are_refused(void **state)
{
    (void)state;
    static const struct { int code; int64_t value; const char *says; } cases[] = {
        {2, -1, "token -1 at position 9 is negative"},
        {2, -128, "token -128 at position 9 is negative"},
        {3, -1, "token -1 at position 9 is negative"},
        {3, -32768, "token -32768 at position 9 is negative"},
        {4, -2, "token -2 at position 9 is negative"},
        {4, -2147483647 - 1, "token -2147483648 at position 9 is negative"},
        {5, -1, "token -1 at position 9 is negative"},
        {5, INT64_MIN, "token -9223372036854775808 at position 9 is negative"},
        {5, 2147483648, "token 2147483648 at position 9 is outside"},
        {5, 4294967296 + 5, "token 4294967301 at position 9 is outside"},
        {5, INT64_MAX, "token 9223372036854775807 at position 9 is outside"},
        {1, 200, "token 200 at position 9 is outside the vocabulary of 128"},
    };
    for (size_t k = 0; k < COUNT(cases); k++) {
        int64_t tokens[TOKENS] = {0};
        int32_t read[TOKENS];
        ft_io_data *data;
        tokens[9] = cases[k].value;
        make_index(&file, cases[k].code, SEQUENCES, the_lengths, STARTS, the_starts);
        const char *path = write_pair("bad", cases[k].code, tokens, TOKENS, &file);
        assert_ok(open_as(&path, 1, FT_IO_FORMAT_MEGATRON, &data));
        const int64_t vocab = cases[k].code == 1 ? 128 : ft_io_data_vocab(data);
        assert_error(ft_io_data_check_vocab(data, vocab), FT_ERR_DATA, "bad.bin", cases[k].says);
        assert_ok(ft_io_data_set_vocab(data, vocab));
        assert_error(ft_io_data_read(data, 0, TOKENS, read), FT_ERR_DATA, "bad.bin",
                     cases[k].says);
        assert_ok(ft_io_data_read(data, 0, 9, read));
        ft_io_data_close(data);
    }
}

/* A narrow file beside a wide one: the wide one's vocabulary does not let negative tokens by. */
static void each_file_has_its_own_range(void **state)
{
    (void)state;
    static const int codes[3] = {2, 3, 4};
    for (int k = 0; k < 3; k++) {
        int64_t tokens[TOKENS] = {0};
        int32_t read[2 * TOKENS] = {0};
        const char *paths[2];
        ft_io_data *data;
        tokens[5] = -1;
        make_index(&file, codes[k], SEQUENCES, the_lengths, STARTS, the_starts);
        paths[0] = write_pair("narrow", codes[k], tokens, TOKENS, &file);
        paths[1] = write_the_pair("wide", 5);
        assert_ok(open_as(paths, 2, FT_IO_FORMAT_MEGATRON, &data));
        assert_int_equal(ft_io_data_vocab(data), 2147483648);
        assert_error(ft_io_data_check_vocab(data, 1 << 20), FT_ERR_DATA, "narrow.bin",
                     "token -1 at position 5 is negative");
        assert_error(ft_io_data_read(data, 0, 2 * TOKENS, read), FT_ERR_DATA, "narrow.bin",
                     "token -1 at position 5 is negative");
        assert_ok(ft_io_data_read(data, 6, 2 * TOKENS - 6, read));
        assert_int_equal(read[TOKENS - 6], 100);
        ft_io_data_close(data);
    }
}

static void a_path_is_any_of_three(void **state)
{
    (void)state;
    char prefix[320], bin[330], idx[330];
    const char *paths[3];
    int32_t read[TOKENS];
    ft_io_data *data;
    snprintf(prefix, sizeof prefix, "%s", write_the_pair("corpus_text_document", 4));
    snprintf(bin, sizeof bin, "%s.bin", prefix);
    snprintf(idx, sizeof idx, "%s.idx", prefix);
    paths[0] = prefix;
    paths[1] = bin;
    paths[2] = idx;
    for (int k = 0; k < 6; k++) {
        assert_ok(open_as(&paths[k % 3], 1, k < 3 ? FT_IO_FORMAT_AUTO : FT_IO_FORMAT_MEGATRON,
                          &data));
        assert_int_equal(ft_io_data_format(data), FT_IO_FORMAT_MEGATRON);
        assert_ok(ft_io_data_read(data, 0, TOKENS, read));
        for (int i = 0; i < TOKENS; i++) assert_int_equal(read[i], 100 - i);
        assert_string_equal(ft_io_data_file(data, 0), bin);
        assert_string_equal(ft_io_data_file(data, 1), idx);
        assert_null(ft_io_data_file(data, 2));
        assert_null(ft_io_data_file(data, -1));
        ft_io_data_close(data);
    }
    /* A .bin without an index is a file like any other, unless it is said to be Megatron's. */
    assert_int_equal(unlink(idx), 0);
    assert_ok(open_as(&paths[1], 1, FT_IO_FORMAT_AUTO, &data));
    assert_int_equal(ft_io_data_format(data), FT_IO_FORMAT_BYTES);
    ft_io_data_close(data);
    assert_error(open_as(&paths[1], 1, FT_IO_FORMAT_MEGATRON, &data), FT_ERR_IO, idx,
                 "cannot open");
    assert_error(open_as(&paths[0], 1, FT_IO_FORMAT_AUTO, &data), FT_ERR_IO, prefix, "cannot open");
    /* Nor is there a stream of both. */
    write_the_pair("more", 4);
    paths[0] = bin;
    paths[1] = in_directory("more.bin");
    assert_error(open_as(paths, 2, FT_IO_FORMAT_AUTO, &data), FT_ERR_DATA, paths[1],
                 "looks like megatron");
    assert_null(data);
    ft_io_data_config config = ft_io_data_config_default();
    config.eod_token = 3;
    assert_error(ft_io_data_open_files(&paths[1], 1, &config, &data), FT_ERR_ARG, "eod_token 3",
                 "the index of Megatron's data says where documents end");
}

/* ----------------------------------------------------------------------------------- documents */

/* Two files of different widths: the second one's first document begins at token 24. */
static ft_io_data *open_two(void)
{
    const char *paths[2];
    ft_io_data *data;
    paths[0] = write_the_pair("one", 8);
    paths[1] = write_the_pair("two", 5);
    assert_ok(open_as(paths, 2, FT_IO_FORMAT_MEGATRON, &data));
    assert_int_equal(ft_io_data_tokens(data), 2 * TOKENS);
    return data;
}

static int begins(int p) /* a document, at position p of the two files */
{
    return p == TOKENS || (p > 0 && p < 2 * TOKENS && document_at[p % TOKENS] == p % TOKENS);
}

/* Labels, starts and counts of every window of every length. */
static void documents_are_those_of_the_index(void **state)
{
    (void)state;
    ft_io_data *data = open_two();
    assert_true(ft_io_data_has_documents(data));
    for (int T = 1; T < 2 * TOKENS; T++) {
        ft_io_eval eval;
        int64_t all = 0;
        assert_ok(ft_io_eval_init(&eval, data, T, 1, 1, 0));
        for (int w = 0; w < eval.windows; w++) {
            int32_t tokens[2 * TOKENS], labels[2 * TOKENS], first[2 * TOKENS];
            int64_t counted, sum = 0;
            int begin = 0;
            assert_ok(ft_io_eval_fill_docs(&eval, w, 0, tokens, labels, first, &counted));
            for (int t = 0; t < T; t++) {
                const int p = w * T + t;
                if (t > 0 && begins(p)) begin = t;
                assert_int_equal(tokens[t], 100 - p % TOKENS);
                assert_int_equal(labels[t], begins(p + 1) ? -100 : 100 - (p + 1) % TOKENS);
                assert_int_equal(first[t], begin);
                sum += labels[t] != -100;
            }
            assert_int_equal(counted, sum);
            all += sum;
        }
        assert_int_equal(eval.counted, all);
    }
    ft_io_data_close(data);
}

/* A step's counts, by rank and of all, are those of the labels; rows may have none. */
static void counts_are_those_of_the_labels(void **state)
{
    (void)state;
    enum { G = 12 };
    static const int layouts[][2] = {{1, 1}, {2, 3}, {12, 1}, {3, 4}, {1, 12}, {6, 2}};
    /* T = 1: a window's only label may be the next document's. */
    static const int lengths[] = {1, 2, 5, 11};
    ft_io_data *data = open_two();
    int none = 0;
    for (size_t j = 0; j < COUNT(lengths); j++)
        for (size_t k = 0; k < COUNT(layouts); k++) {
            const int T = lengths[j], R = layouts[k][0], M = layouts[k][1], B = G / (R * M);
            ft_io_sampler sampler;
            assert_ok(ft_io_sampler_init(&sampler, data, T, G, 7));
            for (int64_t step = 0; step < 9; step++) {
                int64_t whole, total = 0;
                assert_ok(ft_io_sampler_counted(&sampler, step, 0, 1, 1, &whole));
                for (int r = 0; r < R; r++) {
                    int64_t counted, sum = 0;
                    for (int m = 0; m < M; m++) {
                        int32_t tokens[G * 11], labels[G * 11], first[G * 11];
                        assert_ok(ft_io_sampler_fill_docs(&sampler, step, r, R, m, M, tokens,
                                                          labels, first));
                        for (int i = 0; i < B * T; i++) sum += labels[i] != -100;
                    }
                    assert_ok(ft_io_sampler_counted(&sampler, step, r, R, M, &counted));
                    assert_int_equal(counted, sum);
                    none += sum == 0;
                    total += sum;
                }
                assert_int_equal(total, whole);
            }
        }
    assert_true(none > 0);
    ft_io_sampler sampler;
    int64_t counted;
    assert_ok(ft_io_sampler_init(&sampler, data, 3, G, 7));
    assert_error(ft_io_sampler_counted(&sampler, 0, 5, 5, 1, &counted), FT_ERR_ARG, "rank 5 of 5",
                 "ft_io_sampler_counted");
    assert_error(ft_io_sampler_counted(&sampler, 0, 0, 5, 1, &counted), FT_ERR_ARG,
                 "does not divide into 5 ranks", "ft_io_sampler_counted");
    assert_error(ft_io_sampler_counted(&sampler, 0, 0, 1, 1, NULL), FT_ERR_ARG, "counted", "NULL");
    ft_io_data_close(data);
}

/* ------------------------------------------------------------------------------- broken indices */

typedef struct lie {
    ft_status status;
    const char *says;
    int at, bytes; /* what is written over, -1: not */
    int64_t value;
    int cut;       /* bytes cut off (< 0: added) */
} lie;

/* Offsets: 9 version, 17 dtype, 18 S, 26 N, 34 lengths, 62 pointers, 118 documents, 166 the end. */
static const lie lies[] = {
    {FT_ERR_DATA, "it does not begin with MMIDIDX", 0, 1, 'm', 0},
    {FT_ERR_DATA, "it does not begin with MMIDIDX", 6, 1, 'Y', 0},
    {FT_ERR_DATA, "it does not begin with MMIDIDX", 8, 1, 1, 0},
    {FT_ERR_DATA, "version 0; 1 is supported", 9, 8, 0, 0},
    {FT_ERR_DATA, "version 2; 1 is supported", 9, 8, 2, 0},
    {FT_ERR_DATA, "version 18446744073709551615", 9, 8, -1, 0},
    {FT_ERR_DATA, "dtype 0; there are 1 to 8", 17, 1, 0, 0},
    {FT_ERR_DATA, "dtype 9; there are 1 to 8", 17, 1, 9, 0},
    {FT_ERR_DATA, "dtype 255; there are 1 to 8", 17, 1, 255, 0},
    {FT_ERR_UNSUPPORTED, "dtype 6, float64: tokens are integers", 17, 1, 6, 0},
    {FT_ERR_UNSUPPORTED, "dtype 7, float32: tokens are integers", 17, 1, 7, 0},
    {FT_ERR_DATA, "counts no sequences", 18, 8, 0, 0},
    {FT_ERR_DATA, "fewer than its header counts: 8 sequences", 18, 8, 8, 0},
    {FT_ERR_DATA, "not what its header counts: 6 sequences", 18, 8, 6, 0},
    {FT_ERR_DATA, "fewer than its header counts: 18446744073709551615 sequences", 18, 8, -1, 0},
    {FT_ERR_DATA, "fewer than its header counts: 1537228672809129302 sequences", 18, 8,
     1537228672809129302, 0}, /* 12 S wraps around to 8 */
    {FT_ERR_DATA, "counts 0 document indices", 26, 8, 0, 0},
    {FT_ERR_DATA, "counts 1 document indices", 26, 8, 1, 0},
    {FT_ERR_DATA, "not what its header counts: 7 sequences and 5 document", 26, 8, 5, 0},
    {FT_ERR_DATA, "7 sequences and 7 document", 26, 8, 7, 0},
    {FT_ERR_DATA, "7 sequences and 2305843009213693958 document", 26, 8, 2305843009213693958, 0},
    {FT_ERR_DATA, "sequence 0 has -1 tokens", 34, 4, -1, 0},
    {FT_ERR_DATA, "sequence 2 has -2147483648 tokens", 42, 4, -2147483647 - 1, 0},
    {FT_ERR_DATA, "sequence 2 begins at byte 14, the ones before it end at byte 16", 38, 4, 5, 0},
    {FT_ERR_DATA, "sequence 0 begins at byte 2, the ones before it end at byte 0", 62, 8, 2, 0},
    {FT_ERR_DATA, "sequence 1 begins at byte 7, the ones before it end at byte 6", 70, 8, 7, 0},
    {FT_ERR_DATA, "sequence 6 begins at byte -32, the ones before it end at byte 32", 110, 8, -32,
     0},
    {FT_ERR_DATA, "sequence 6 begins at byte 9223372036854775807", 110, 8, INT64_MAX, 0},
    {FT_ERR_DATA, "document 0 begins with sequence 1; it must be sequence 0", 118, 8, 1, 0},
    {FT_ERR_DATA, "document 0 begins with sequence -1; it must be sequence 0", 118, 8, -1, 0},
    {FT_ERR_DATA, "document index 2 is sequence 1; it must be in 2..7", 134, 8, 1, 0},
    {FT_ERR_DATA, "document index 3 is sequence 8; it must be in 5..7", 142, 8, 8, 0},
    {FT_ERR_DATA, "document index 4 is sequence -5; it must be in 5..7", 150, 8, -5, 0},
    {FT_ERR_DATA, "the last document ends with sequence 6 of 7", 158, 8, 6, 0},
    {FT_ERR_DATA, "document index 5 is sequence 9223372036854775807", 158, 8, INT64_MAX, 0},
    {FT_ERR_DATA, "its 25 uint16 tokens take 50 bytes, but the .bin beside it has 48: truncated",
     58, 4, 9, 0},
    {FT_ERR_DATA, "its 23 uint16 tokens take 46 bytes, but the .bin beside it has 48: too many",
     58, 4, 7, 0},
    {FT_ERR_DATA, "sequence 1 begins at byte 6, the ones before it end at byte 12", 17, 1, 4, 0},
    {FT_ERR_DATA, "truncated: it has 33 bytes, an index's header alone takes 34", -1, 0, 0,
     166 - 33},
    {FT_ERR_DATA, "truncated: it has 0 bytes", -1, 0, 0, 166},
    {FT_ERR_DATA, "truncated: it has 1 bytes", -1, 0, 0, 165},
    {FT_ERR_DATA, "34 bytes are fewer than its header counts", -1, 0, 0, 166 - 34},
    {FT_ERR_DATA, "165 bytes are fewer than its header counts", -1, 0, 0, 1},
    {FT_ERR_DATA, "167 bytes are not what its header counts", -1, 0, 0, -1},
    {FT_ERR_DATA, "174 bytes are not what its header counts", -1, 0, 0, -8},
    {FT_ERR_UNSUPPORTED, "sequence 2 has mode 3: multimodal data", 166 + 2, 1, 3, -7},
    {FT_ERR_UNSUPPORTED, "sequence 6 has mode -1: multimodal data", 166 + 6, 1, -1, -7},
};

static void indices_that_lie_are_refused(void **state)
{
    (void)state;
    const char *prefix = write_the_pair("whole", 8);
    const index_file whole = file;
    ft_io_data *data;
    assert_int_equal(whole.n, 166);
    assert_ok(open_as(&prefix, 1, FT_IO_FORMAT_MEGATRON, &data));
    ft_io_data_close(data);
    for (size_t i = 0; i < COUNT(lies); i++) {
        const lie *l = &lies[i];
        ft_io_megatron index;
        file = whole;
        if (l->cut < 0) memset(file.bytes + file.n, 0, (size_t)-l->cut);
        file.n -= (size_t)l->cut;
        if (l->at >= 0) put_le(file.bytes + l->at, l->value, l->bytes);
        write_named("whole", ".idx", file.bytes, file.n);
        assert_error(open_as(&prefix, 1, FT_IO_FORMAT_MEGATRON, &data), l->status, "whole.idx",
                     l->says);
        assert_null(data);
        /* From memory the same, named as one likes; there may be no .bin. */
        assert_error(ft_io_megatron_parse(file.bytes, file.n, "in memory", 48, &index), l->status,
                     "in memory", l->says);
        if (strstr(l->says, "the .bin") == NULL)
            assert_error(ft_io_megatron_parse(file.bytes, file.n, "in memory", -1, &index),
                         l->status, "in memory", l->says);
    }
    ft_io_megatron index;
    assert_error(ft_io_megatron_parse(NULL, 40, "x", -1, &index), FT_ERR_ARG, "bytes", "NULL");
    assert_error(ft_io_megatron_parse(file.bytes, 40, NULL, -1, &index), FT_ERR_ARG, "where",
                 "NULL");
    assert_error(ft_io_megatron_parse(file.bytes, 40, "x", -1, NULL), FT_ERR_ARG, "index", "NULL");
    static const int zeros[1] = {0}, one[2] = {0, 1};
    make_index(&file, 8, 1, zeros, 2, one);
    assert_error(ft_io_megatron_parse(file.bytes, file.n, "empty", -1, &index), FT_ERR_DATA,
                 "empty", "it has no tokens");
}

static void bins_that_lie_are_refused(void **state)
{
    (void)state;
    static const unsigned char bytes[64];
    ft_io_data *data;
    for (int n = 0; n < 64; n++) {
        char says[96];
        const char *prefix = write_the_pair("pair", 8);
        write_named("pair", ".bin", bytes, (size_t)n);
        snprintf(says, sizeof says, "take 48 bytes, but the .bin beside it has %d", n);
        if (n == 48) {
            assert_ok(open_as(&prefix, 1, FT_IO_FORMAT_MEGATRON, &data));
            ft_io_data_close(data);
        } else {
            assert_error(open_as(&prefix, 1, FT_IO_FORMAT_MEGATRON, &data), FT_ERR_DATA,
                         "pair.idx", says);
        }
    }
    unlink(in_directory("pair.bin"));
    const char *prefix = in_directory("pair");
    assert_error(open_as(&prefix, 1, FT_IO_FORMAT_MEGATRON, &data), FT_ERR_IO, "pair.bin",
                 "cannot open");
}

/* Whatever one byte becomes, the index is refused or means something: no read is out of bounds. */
static void survives_every_damage_of_a_byte(void **state)
{
    (void)state;
    make_index(&file, 8, SEQUENCES, the_lengths, STARTS, the_starts);
    unsigned char *exact = (unsigned char *)malloc(file.n); /* its end is watched by ASan */
    assert_non_null(exact);
    for (size_t at = 0; at < file.n; at++)
        for (int value = 0; value < 256; value++) {
            ft_io_megatron index;
            memcpy(exact, file.bytes, file.n);
            exact[at] = (unsigned char)value;
            const ft_status status = ft_io_megatron_parse(exact, file.n, "damaged", -1, &index);
            if (status == FT_OK) assert_true(index.tokens > 0 && index.documents > 0);
            else assert_non_null(strstr(ft_last_error(), "damaged: "));
        }
    free(exact);
}

static ft_status open_pair(void)
{
    const char *paths[2];
    ft_io_data *data;
    paths[0] = in_directory("one");
    paths[1] = in_directory("two.bin");
    FT_TRY(open_as(paths, 2, FT_IO_FORMAT_AUTO, &data));
    ft_io_data_close(data);
    return FT_OK;
}

static void runs_out_of_memory_in_good_order(void **state)
{
    (void)state;
    ft_io_data_close(open_two());
    ft_status status = FT_ERR_OOM;
    int n = 0;
    for (; status != FT_OK; n++) {
        allocations_left = n;
        status = open_pair();
        allocations_left = -1;
        if (status != FT_OK) assert_error(status, FT_ERR_OOM, "no memory for", "bytes");
    }
    assert_true(n > 8);
}

/* ---------------------------------------------------------------------------------- large files */

/* 3 GB that take no room on the disk: the last document begins beyond 2^31 bytes and tokens. */
static void reads_the_end_of_a_large_file(void **state)
{
    (void)state;
    enum { T = 8 };
    static const int lengths[3] = {1500000000, 1500000000, 5}, starts[4] = {0, 1, 2, 3};
    static const unsigned char last[7] = {3, 4, 5, 6, 7, 8, 9};
    const int64_t tokens = 3000000005;
    const char *prefix = in_directory("large");
    struct stat info;
    int32_t read[T], labels[T], first[T];
    ft_io_data *data;
    make_index(&file, 1, 3, lengths, 4, starts);
    write_named("large", ".idx", file.bytes, file.n);
    const int fd = open(in_directory("large.bin"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    int sparse = sizeof(off_t) >= 8 && ftruncate(fd, (off_t)16 << 20) == 0 &&
                 fstat(fd, &info) == 0 && (int64_t)info.st_blocks * 512 < ((int64_t)1 << 20) &&
                 ftruncate(fd, (off_t)tokens) == 0;
    if (sparse) {
        assert_true(lseek(fd, (off_t)(tokens - 7), SEEK_SET) >= 0);
        assert_int_equal(write(fd, last, 7), 7);
    }
    close(fd);
    if (!sparse) {
        print_message("no sparse file of 3 GB in %s: large files are not tested\n", temp_directory);
        skip();
    }
    assert_ok(open_as(&prefix, 1, FT_IO_FORMAT_AUTO, &data));
    assert_int_equal(ft_io_data_tokens(data), tokens);
    assert_ok(ft_io_data_read(data, tokens - 8, 8, read));
    for (int i = 0; i < 8; i++) assert_int_equal(read[i], i == 0 ? 0 : i + 2);
    ft_io_sampler sampler;
    assert_ok(ft_io_sampler_init(&sampler, data, T, 1, 1));
    assert_int_equal(sampler.windows, tokens / T);
    /* The label behind its last token is number 3000000000, where the document begins. */
    const int64_t window = tokens / T - 1;
    assert_int_equal(window * T, 2999999992);
    for (int64_t step = 0; step < 100; step++) {
        int64_t which, counted;
        assert_ok(ft_io_sampler_index(&sampler, step, 0, &which, NULL));
        assert_ok(ft_io_sampler_fill_docs(&sampler, step, 0, 1, 0, 1, read, labels, first));
        assert_ok(ft_io_sampler_counted(&sampler, step, 0, 1, 1, &counted));
        assert_int_equal(counted, which == window || which == 187499999 ? T - 1 : T);
    }
    ft_io_eval eval; /* by hand: to walk all windows would take a minute */
    memset(&eval, 0, sizeof eval);
    eval.data = data;
    eval.seq_len = T;
    eval.batch = eval.ranks = 1;
    eval.windows = eval.batches = tokens / T;
    int64_t counted;
    assert_ok(ft_io_eval_fill_docs(&eval, window, 0, read, labels, first, &counted));
    assert_int_equal(counted, T - 1);
    assert_int_equal(read[6], 3);
    assert_int_equal(labels[5], 3);
    assert_int_equal(labels[6], 4);
    assert_int_equal(labels[7], -100);
    assert_ok(ft_io_eval_fill_docs(&eval, 187499999, 0, read, labels, first, &counted));
    assert_int_equal(counted, T - 1);
    assert_int_equal(labels[7], -100);
    ft_io_data_close(data);
}

#define TEST(name) cmocka_unit_test_teardown(name, clean_directory)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(an_index_is_read),
        TEST(every_integer_is_read),
        TEST(negative_and_large_tokens_are_refused),
        TEST(each_file_has_its_own_range),
        TEST(a_path_is_any_of_three),
        TEST(documents_are_those_of_the_index),
        TEST(counts_are_those_of_the_labels),
        TEST(indices_that_lie_are_refused),
        TEST(bins_that_lie_are_refused),
        TEST(survives_every_damage_of_a_byte),
        TEST(runs_out_of_memory_in_good_order),
        TEST(reads_the_end_of_a_large_file),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
