/* Token data: shards of every format spelled out byte by byte, headers that lie, tokens outside the
   vocabulary, and what training and evaluation see of a stream that is cut into files anyhow. */

#if !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#define _DEFAULT_SOURCE 1 /* mkdtemp, truncate */
#define _POSIX_C_SOURCE 200809L
#endif

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "temp_files.h"
#ifdef FT_TEST_LINKED /* make compiles the other headers once for many tests */
#define FEMTOTRON_IO_IMPLEMENTATION
#else
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_llama.h"
#include "femtotron_io.h"
#include "assert_status.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ------------------------------------------------------------------------------------- helpers */

static void put_le(unsigned char *at, int64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) at[i] = (unsigned char)((uint64_t)value >> 8 * i);
}

/* What is known about each kind, from the documentation of the formats. */
static const struct {
    ft_io_token token;
    const char *name;
    int width, magic, version;
    int64_t vocab;
} kinds[3] = {{FT_IO_TOKEN_BYTE, "bytes", 1, 0, 0, 256},
              {FT_IO_TOKEN_U16, "uint16", 2, 20240520, 1, 65536},
              {FT_IO_TOKEN_U32, "uint32", 4, 20240801, 7, 2147483648}};

/* n tokens, raw or after a header. */
static const char *write_shard(const char *name, int kind, int header, const int64_t *tokens, int n)
{
    const int width = kinds[kind].width, start = header ? 1024 : 0;
    const size_t bytes = (size_t)(start + n * width);
    unsigned char *file = (unsigned char *)calloc(bytes, 1);
    assert_non_null(file);
    if (header) {
        put_le(file, kinds[kind].magic, 4);
        put_le(file + 4, kinds[kind].version, 4);
        put_le(file + 8, n, 4);
    }
    for (int i = 0; i < n; i++) put_le(file + start + i * width, tokens[i], width);
    const char *path = write_file(name, file, bytes);
    free(file);
    return path;
}

static ft_io_data *open_files(const char *const *paths, int n, int kind)
{
    ft_io_data *data;
    assert_ok(ft_io_data_open(paths, n, kinds[kind].token, &data));
    return data;
}

static ft_io_data *open_file(const char *path, int kind) { return open_files(&path, 1, kind); }

/* Token p of the streams below: all different, and as large as the kind allows. */
static int64_t token_at(int kind, int64_t p)
{
    return kind == 0 ? p : kind == 1 ? 65535 - p : 2147483647 - 65537 * p;
}

/* A stream of n tokens, n up to 256, cut into `files` files of uneven lengths of which every other
   one has a header (none of bytes). */
static ft_io_data *open_stream(int kind, int n, int files)
{
    char names[64][48];
    const char *paths[64];
    int64_t tokens[256];
    char full[64][320];
    int first = 0;
    assert_true(n <= 256 && files <= 64 && files * (files + 1) / 2 <= n);
    for (int f = 0; f < files; f++) {
        /* 1, 2, 3, ..., and the last file takes the rest. */
        const int here = f == files - 1 ? n - first : f + 1;
        for (int i = 0; i < here; i++) tokens[i] = token_at(kind, first + i);
        snprintf(names[f], sizeof names[f], "stream-%d-%d-%d", kind, files, f);
        snprintf(full[f], sizeof full[f], "%s",
                 write_shard(names[f], kind, kind > 0 && f % 2 == 0, tokens, here));
        paths[f] = full[f];
        first += here;
    }
    ft_io_data *data = open_files(paths, files, kind);
    assert_int_equal(ft_io_data_tokens(data), n);
    return data;
}

/* ------------------------------------------------------------------------------------- formats */

static void kinds_have_names(void **state)
{
    (void)state;
    ft_io_token token;
    for (int kind = 0; kind < 3; kind++) {
        token = FT_IO_TOKEN_COUNT;
        assert_ok(ft_io_token_parse(kinds[kind].name, &token));
        assert_int_equal(token, kinds[kind].token);
        assert_string_equal(ft_io_token_name(token), kinds[kind].name);
    }
    assert_int_equal(FT_IO_TOKEN_COUNT, 3);
    assert_string_equal(ft_io_token_name(FT_IO_TOKEN_COUNT), "?");
    assert_string_equal(ft_io_token_name((ft_io_token)-1), "?");
    static const char *const none[] = {"", "uint8", "uint160", "uint1", "UINT16", "bytes ", "a\nb"};
    for (size_t i = 0; i < COUNT(none); i++)
        assert_error(ft_io_token_parse(none[i], &token), FT_ERR_ARG, "is no type of tokens",
                     "bytes, uint16 and uint32");
    assert_error(ft_io_token_parse(NULL, &token), FT_ERR_ARG, "ft_io_token_parse", "NULL");
    assert_error(ft_io_token_parse("bytes", NULL), FT_ERR_ARG, "ft_io_token_parse", "NULL");
}

static void shards_are_little_endian(void **state)
{
    (void)state;
    static const unsigned char raw16[] = {0, 0, 1, 0, 0, 1, 0x51, 0xc3, 0xff, 0xff};
    static const unsigned char raw32[] = {0,    0, 0,    0,    1,    0,    0,    0,
                                          0x00, 1, 0,    0,    0x51, 0xc3, 0,    0,
                                          0xff, 0xf5, 1, 0,    0xff, 0xff, 0xff, 0x7f};
    static const int32_t values[] = {0, 1, 256, 50001, 65535, 0};
    static const int32_t wide[] = {0, 1, 256, 50001, 128511, INT32_MAX};
    int32_t tokens[6] = {0, 0, 0, 0, 0, 0};
    ft_io_data *data = open_file(write_file("raw16", raw16, sizeof raw16), 1);
    assert_int_equal(ft_io_data_tokens(data), 5);
    assert_int_equal(ft_io_data_vocab(data), 65536);
    assert_ok(ft_io_data_read(data, 0, 5, tokens));
    assert_memory_equal(tokens, values, sizeof values);
    ft_io_data_close(data);
    data = open_file(write_file("raw32", raw32, sizeof raw32), 2);
    assert_int_equal(ft_io_data_tokens(data), 6);
    assert_int_equal(ft_io_data_vocab(data), 2147483648);
    assert_ok(ft_io_data_read(data, 0, 6, tokens));
    assert_memory_equal(tokens, wide, sizeof wide);
    ft_io_data_close(data);
}

static void headers_are_not_data(void **state)
{
    (void)state;
    /* llm.c's two headers, and the bytes of their magic numbers. */
    static const unsigned char magic[2][4] = {{0x88, 0xd8, 0x34, 0x01}, {0xa1, 0xd9, 0x34, 0x01}};
    for (int kind = 1; kind < 3; kind++) {
        const int width = kinds[kind].width;
        unsigned char file[1024 + 8];
        memset(file, 0xee, sizeof file); /* also what of the header has no meaning */
        memcpy(file, magic[kind - 1], 4);
        put_le(file + 4, kinds[kind].version, 4);
        put_le(file + 8, 2, 4);
        put_le(file + 1024, 5, width);
        put_le(file + 1024 + width, 50256, width);
        const char *path = write_file("headed", file, (size_t)(1024 + 2 * width));
        ft_io_data *data = open_file(path, kind);
        int32_t tokens[2];
        int64_t in_file;
        assert_int_equal(ft_io_data_tokens(data), 2);
        assert_int_equal(ft_io_data_vocab(data), kinds[kind].vocab);
        assert_ok(ft_io_data_read(data, 0, 2, tokens));
        assert_int_equal(tokens[0], 5);
        assert_int_equal(tokens[1], 50256);
        assert_string_equal(ft_io_data_locate(data, 1, &in_file), path);
        assert_int_equal(in_file, 1);
        ft_io_data_close(data);
    }
}

/* Raw files that begin almost as a header does, and the shortest ones. */
static void raw_files_stay_raw(void **state)
{
    (void)state;
    static const int64_t almost[] = {55432, 307, 55433, 308, 55713, 309};
    static const int64_t one[] = {55432};
    for (int kind = 1; kind < 3; kind++) {
        ft_io_data *data = open_file(write_shard("almost", kind, 0, almost, 6), kind);
        int32_t tokens[6];
        assert_int_equal(ft_io_data_tokens(data), 6);
        assert_ok(ft_io_data_read(data, 0, 6, tokens));
        for (int i = 0; i < 6; i++) assert_int_equal(tokens[i], almost[i]);
        ft_io_data_close(data);
        data = open_file(write_shard("one", kind, 0, one, 1), kind);
        assert_int_equal(ft_io_data_tokens(data), 1);
        ft_io_data_close(data);
    }
    /* The other magic number as a token is one in the wrong width, never data. */
    ft_io_data *data;
    const int64_t magic = 20240520;
    const char *path = write_shard("magic", 2, 0, &magic, 1);
    assert_error(ft_io_data_open(&path, 1, FT_IO_TOKEN_U32, &data), FT_ERR_DATA, path, "uint16");
    assert_null(data);
}

static void files_of_one_width_are_one_stream(void **state)
{
    (void)state;
    enum { N = 40 };
    for (int kind = 0; kind < 3; kind++) {
        ft_io_data *data = open_stream(kind, N, 6); /* 1, 2, 3, 4, 5, 25 */
        static const int first[7] = {0, 1, 3, 6, 10, 15, N};
        for (int64_t at = 0; at <= N; at++) {
            for (int64_t n = 0; at + n <= N; n++) {
                int32_t tokens[N + 1];
                memset(tokens, 0x77, sizeof tokens);
                assert_ok(ft_io_data_read(data, at, n, tokens));
                for (int64_t i = 0; i < n; i++)
                    assert_int_equal(tokens[i], token_at(kind, at + i));
                assert_int_equal(tokens[n], 0x77777777);
            }
        }
        for (int f = 0; f < 6; f++) {
            char name[48];
            int64_t in_file;
            snprintf(name, sizeof name, "stream-%d-6-%d", kind, f);
            for (int p = first[f]; p < first[f + 1]; p++) {
                assert_string_equal(ft_io_data_locate(data, p, &in_file), in_directory(name));
                assert_int_equal(in_file, p - first[f]);
            }
        }
        assert_null(ft_io_data_locate(data, N, NULL));
        int32_t token;
        assert_error(ft_io_data_read(data, N, 1, &token), FT_ERR_ARG, "position 40",
                     "stream of 40");
        ft_io_data_close(data);
    }
}

static void many_files_are_one_stream(void **state)
{
    (void)state;
    enum { FILES = 1000 };
    static char names[FILES][320];
    static const char *paths[FILES];
    static int32_t tokens[FILES];
    for (int i = 0; i < FILES; i++) {
        char name[48];
        const int64_t token = 60000 - 7 * i;
        snprintf(name, sizeof name, "many-%d", i);
        snprintf(names[i], sizeof names[i], "%s", write_shard(name, 1, i % 3 == 0, &token, 1));
        paths[i] = names[i];
    }
    ft_io_data *data = open_files(paths, FILES, 1);
    assert_int_equal(ft_io_data_tokens(data), FILES);
    assert_ok(ft_io_data_read(data, 0, FILES, tokens));
    for (int i = 0; i < FILES; i++) assert_int_equal(tokens[i], 60000 - 7 * i);
    ft_io_data_close(data);
}

/* -------------------------------------------------------------------------------- broken files */

static void headers_that_lie_are_refused(void **state)
{
    (void)state;
    static const struct {
        int magic, version, count;
        int bytes; /* of the file */
        int kind;  /* as which it is opened */
        const char *reason;
    } cases[] = {
        /* magic, version, count, bytes, kind */
        {20240520, 2, 4, 1032, 1, "version 2; 1 is supported"},
        {20240520, 7, 4, 1032, 1, "version 7; 1 is supported"},
        {20240520, 0, 4, 1032, 1, "version 0; 1 is supported"},
        {20240520, -1, 4, 1032, 1, "version -1; 1 is supported"},
        {20240801, 1, 4, 1040, 2, "version 1; 7 is supported"},
        {20240801, 8, 4, 1040, 2, "version 8; 7 is supported"},
        {20240520, 1, 0, 1024, 1, "counts 0 tokens"},
        {20240520, 1, -4, 1032, 1, "counts -4 tokens"},
        {20240520, 1, -2147483647 - 1, 1032, 1, "counts -2147483648 tokens"},
        {20240801, 7, 0, 1024, 2, "counts 0 tokens"},
        {20240520, 1, 4, 1031, 1, "truncated: its header counts 4 uint16 tokens, 8 bytes, but 7"},
        {20240520, 1, 4, 1024, 1, "truncated: its header counts 4 uint16 tokens, 8 bytes, but 0"},
        {20240520, 1, 2147483647, 1032, 1,
         "truncated: its header counts 2147483647 uint16 tokens, 4294967294 bytes, but 8"},
        {20240801, 7, 4, 1032, 2, "truncated: its header counts 4 uint32 tokens, 16 bytes, but 8"},
        {20240801, 7, 2147483647, 1040, 2,
         "truncated: its header counts 2147483647 uint32 tokens, 8589934588 bytes, but 16"},
        {20240520, 1, 4, 1033, 1, "1 bytes too many: its header counts 4 uint16 tokens, 8 bytes"},
        {20240520, 1, 4, 1040, 1, "8 bytes too many"},
        {20240520, 1, 0, 1032, 1, "counts 0 tokens"},
        {20240801, 7, 4, 1041, 2, "1 bytes too many"},
        {20240801, 7, 2, 1040, 2, "8 bytes too many"},
        {20240520, 1, 4, 1023, 1, "truncated: it has 1023 bytes, its header (magic 20240520)"},
        {20240520, 1, 4, 12, 1, "truncated: it has 12 bytes"},
        {20240520, 1, 4, 4, 1, "truncated: it has 4 bytes"},
        {20240801, 7, 4, 1020, 2, "truncated: it has 1020 bytes, its header (magic 20240801)"},
        {20240801, 7, 4, 4, 2, "truncated: it has 4 bytes"},
        /* Of another width than asked for. */
        {20240520, 1, 4, 1032, 2, "says uint16 tokens, but it is read as uint32; give uint16"},
        {20240801, 7, 4, 1040, 1, "says uint32 tokens, but it is read as uint16; give uint32"},
        {20240520, 1, 4, 1032, 0, "says uint16 tokens, but it is read as bytes; give uint16"},
        {20240801, 7, 4, 1040, 0, "says uint32 tokens, but it is read as bytes; give uint32"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        unsigned char file[1100];
        ft_io_data *data;
        const int64_t good = 1;
        memset(file, 0, sizeof file);
        put_le(file, cases[i].magic, 4);
        put_le(file + 4, cases[i].version, 4);
        put_le(file + 8, cases[i].count, 4);
        const char *paths[2];
        paths[0] = write_shard("good", cases[i].kind, 0, &good, 1);
        paths[1] = write_file("lies", file, (size_t)cases[i].bytes);
        assert_error(ft_io_data_open(paths, 2, kinds[cases[i].kind].token, &data), FT_ERR_DATA,
                     paths[1], cases[i].reason);
        assert_null(data);
    }
}

static void raw_files_hold_whole_tokens(void **state)
{
    (void)state;
    static const struct {
        int kind, bytes;
        const char *reason;
    } cases[] = {
        {1, 1, "1 bytes are no whole number of uint16 tokens of 2 bytes"},
        {1, 7, "7 bytes are no whole number of uint16"},
        {1, 2049, "2049 bytes are no whole number of uint16"},
        {2, 1, "1 bytes are no whole number of uint32 tokens of 4 bytes"},
        {2, 3, "3 bytes are no whole number of uint32"},
        {2, 6, "6 bytes are no whole number of uint32"},
        {0, 0, "is empty"},
        {1, 0, "is empty"},
        {2, 0, "is empty"},
    };
    static const unsigned char zeros[2049];
    for (size_t i = 0; i < COUNT(cases); i++) {
        const char *path = write_file("odd", zeros, (size_t)cases[i].bytes);
        ft_io_data *data;
        assert_error(ft_io_data_open(&path, 1, kinds[cases[i].kind].token, &data), FT_ERR_DATA,
                     path, cases[i].reason);
        assert_null(data);
    }
}

/* Whatever a byte of the header becomes: an error, or, without its magic number, raw data. */
static void survives_every_damage_of_a_header(void **state)
{
    (void)state;
    enum { N = 4 };
    for (int kind = 1; kind < 3; kind++) {
        unsigned char file[1024 + 4 * N];
        const size_t bytes = (size_t)(1024 + kinds[kind].width * N);
        memset(file, 0, sizeof file);
        put_le(file, kinds[kind].magic, 4);
        put_le(file + 4, kinds[kind].version, 4);
        put_le(file + 8, N, 4);
        for (int at = 0; at < 12; at++) {
            const unsigned char whole = file[at];
            for (int value = 0; value < 256; value++) {
                ft_io_data *data;
                file[at] = (unsigned char)value;
                const char *path = write_file("damaged", file, bytes);
                const ft_status status = ft_io_data_open(&path, 1, kinds[kind].token, &data);
                if (value == whole) {
                    assert_ok(status);
                    assert_int_equal(ft_io_data_tokens(data), N);
                } else if (at >= 4) {
                    assert_error(status, FT_ERR_DATA, path, "its header");
                } else {
                    int32_t tokens[512 + N];
                    const int64_t n = (int64_t)bytes / kinds[kind].width;
                    assert_ok(status);
                    assert_int_equal(ft_io_data_tokens(data), n);
                    if (kind == 2 && at == 3 && value >= 128) /* token 0 is now above 2^31 */
                        assert_error(ft_io_data_read(data, 0, n, tokens), FT_ERR_DATA, path,
                                     "at position 0");
                    else assert_ok(ft_io_data_read(data, 0, n, tokens));
                }
                ft_io_data_close(data);
            }
            file[at] = whole;
        }
    }
}

static void refuses_kinds_that_do_not_exist(void **state)
{
    (void)state;
    const char *path = write_file("some", "some", 4);
    ft_io_data *data;
    assert_error(ft_io_data_open(&path, 1, FT_IO_TOKEN_COUNT, &data), FT_ERR_UNSUPPORTED, "3",
                 "ft_io_token");
    assert_null(data);
    assert_error(ft_io_data_open(&path, 1, (ft_io_token)-1, &data), FT_ERR_UNSUPPORTED, "-1",
                 "ft_io_token");
}

static ft_status open_three(void)
{
    const char *paths[3];
    ft_io_data *data;
    paths[0] = in_directory("first");
    paths[1] = in_directory("second");
    paths[2] = paths[0];
    FT_TRY(ft_io_data_open(paths, 3, FT_IO_TOKEN_U16, &data));
    ft_io_data_close(data);
    return FT_OK;
}

static void runs_out_of_memory_in_good_order(void **state)
{
    (void)state;
    static const int64_t tokens[2] = {1, 2};
    write_shard("first", 1, 1, tokens, 2);
    write_shard("second", 1, 0, tokens, 2);
    ft_status status = FT_ERR_OOM;
    int n = 0;
    for (; status != FT_OK; n++) {
        allocations_left = n;
        status = open_three();
        allocations_left = -1;
        if (status != FT_OK) assert_error(status, FT_ERR_OOM, "no memory for", "bytes");
    }
    assert_true(n > 3); /* each file's path at least */
}

/* ---------------------------------------------------------------------------------- large files */

/* A file of `bytes` bytes, all zero but for `last` at its end, that takes no room on the disk. 0,
   with a message, where the file system has no such files. */
static int write_sparse(const char *path, int64_t bytes, const void *head, size_t n_head,
                        const void *last, size_t n_last)
{
    struct stat info;
    const int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, head, n_head), n_head);
    /* A small one first: where holes are filled in, a large one would take minutes. */
    int sparse = ftruncate(fd, (off_t)16 << 20) == 0 && fstat(fd, &info) == 0 &&
                 (int64_t)info.st_blocks * 512 < ((int64_t)1 << 20);
    if (sizeof(off_t) < 8) sparse = 0;
    if (sparse) sparse = ftruncate(fd, (off_t)bytes) == 0;
    if (sparse) {
        assert_true(lseek(fd, (off_t)(bytes - (int64_t)n_last), SEEK_SET) >= 0);
        assert_int_equal(write(fd, last, n_last), n_last);
    } else {
        print_message("no sparse file of %lld bytes in %s: large files are not tested\n",
                      (long long)bytes, temp_directory);
    }
    close(fd);
    return sparse;
}

/* 5 GiB of raw uint16, twice, and a small file: 2^32 tokens and 2^33 bytes are well behind. */
static void reads_beyond_32_bits_of_tokens(void **state)
{
    (void)state;
    enum { T = 5 };
    static const unsigned char last[4] = {7, 0, 0x50, 0xc3};
    static const int64_t tail[2] = {11, 60001};
    const int64_t bytes = (int64_t)5 << 30, each = bytes / 2;
    const char *paths[3];
    paths[0] = paths[1] = in_directory("large");
    if (!write_sparse(paths[0], bytes, "", 0, last, sizeof last)) skip();
    paths[2] = write_shard("tail", 1, 1, tail, 2);
    ft_io_data *data = open_files(paths, 3, 1);
    int32_t tokens[T], labels[T];
    int64_t in_file;
    assert_int_equal(ft_io_data_tokens(data), 2 * each + 2);
    assert_ok(ft_io_data_read(data, each - 3, 4, tokens));
    assert_true(tokens[0] == 0 && tokens[1] == 7 && tokens[2] == 50000 && tokens[3] == 0);
    assert_ok(ft_io_data_read(data, 2 * each - 2, 4, tokens));
    assert_true(tokens[0] == 7 && tokens[1] == 50000 && tokens[2] == 11 && tokens[3] == 60001);
    assert_string_equal(ft_io_data_locate(data, 2 * each - 1, &in_file), paths[1]);
    assert_int_equal(in_file, each - 1);
    assert_string_equal(ft_io_data_locate(data, 2 * each, &in_file), paths[2]);
    assert_int_equal(in_file, 0);
    /* 5 * 2^30 + 2 tokens: the last window ends in the tail's first. */
    ft_io_eval eval;
    assert_ok(ft_io_eval_init(&eval, data, T, 1, 1, 0));
    assert_int_equal(eval.windows, (int64_t)1 << 30);
    assert_ok(ft_io_eval_fill(&eval, eval.batches - 1, 0, tokens, labels, NULL));
    assert_true(tokens[2] == 0 && tokens[3] == 7 && tokens[4] == 50000);
    assert_true(labels[2] == 7 && labels[3] == 50000 && labels[4] == 11);
    ft_io_sampler sampler;
    assert_ok(ft_io_sampler_init(&sampler, data, T, 3, 1));
    assert_int_equal(sampler.windows, (int64_t)1 << 30);
    for (int64_t step = 0; step < 20; step++)
        for (int64_t b = 0; b < 3; b++)
            assert_ok(ft_io_sampler_read(&sampler, step, b, 1, tokens, labels));
    /* The vocabulary is kept at the end too. */
    assert_ok(ft_io_data_set_vocab(data, 50000));
    char where[64];
    snprintf(where, sizeof where, "token 50000 at position %lld", (long long)(each - 1));
    assert_error(ft_io_data_read(data, each - 2, 3, tokens), FT_ERR_DATA, paths[0], where);
    assert_error(ft_io_eval_fill(&eval, eval.batches - 1, 0, tokens, labels, NULL), FT_ERR_DATA,
                 paths[1], where);
    ft_io_data_close(data);
}

/* A header counts up to 2^31 - 1 tokens: 8 GiB of uint32. */
static void reads_the_largest_shard_with_a_header(void **state)
{
    (void)state;
    const int64_t count = 2147483647, bytes = 1024 + 4 * count;
    static const unsigned char last[8] = {0xff, 0xf4, 1, 0, 0xff, 0xf5, 1, 0};
    unsigned char header[12];
    put_le(header, 20240801, 4);
    put_le(header + 4, 7, 4);
    put_le(header + 8, count, 4);
    const char *path = in_directory("largest");
    if (!write_sparse(path, bytes, header, sizeof header, last, sizeof last)) skip();
    ft_io_data *data = open_file(path, 2);
    int32_t tokens[3];
    assert_int_equal(ft_io_data_tokens(data), count);
    assert_ok(ft_io_data_read(data, count - 3, 3, tokens));
    assert_true(tokens[0] == 0 && tokens[1] == 128255 && tokens[2] == 128511);
    assert_ok(ft_io_data_read(data, 0, 3, tokens));
    assert_true(tokens[0] == 0 && tokens[1] == 0 && tokens[2] == 0);
    ft_io_data_close(data);
    /* One byte less, or more, is noticed there too. */
    if (truncate(path, (off_t)(bytes - 1)) != 0) fail_msg("%s", strerror(errno));
    assert_error(ft_io_data_open(&path, 1, FT_IO_TOKEN_U32, &data), FT_ERR_DATA, path,
                 "8589934588 bytes, but 8589934587 follow");
    if (truncate(path, (off_t)(bytes + 1)) != 0) fail_msg("%s", strerror(errno));
    assert_error(ft_io_data_open(&path, 1, FT_IO_TOKEN_U32, &data), FT_ERR_DATA, path,
                 "1 bytes too many");
}

/* ----------------------------------------------------------------------------------- vocabulary */

/* Two files of 9000 tokens, 5 but for two of the second one. */
static ft_io_data *open_with_bad(int kind, int header, int64_t at1, int64_t bad1, int64_t at2,
                                 int64_t bad2, const char **second)
{
    enum { N = 9000 };
    static int64_t tokens[N];
    const char *paths[2];
    for (int i = 0; i < N; i++) tokens[i] = 5;
    paths[0] = write_shard("clean", kind, !header && kind > 0, tokens, N);
    tokens[at1] = bad1;
    tokens[at2] = bad2;
    paths[1] = write_shard("bad", kind, header, tokens, N);
    *second = paths[1];
    return open_files(paths, 2, kind);
}

static void names_the_token_outside_the_vocabulary(void **state)
{
    (void)state;
    for (int kind = 1; kind < 3; kind++) {
        for (int header = 0; header < 2; header++) {
            const char *bad;
            ft_io_data *data = open_with_bad(kind, header, 8000, 50257, 8001, 60000, &bad);
            assert_ok(ft_io_data_check_vocab(data, 60001));
            assert_ok(ft_io_data_check_vocab(data, 65536));
            assert_ok(ft_io_data_check_vocab(data, INT64_MAX));
            assert_error(ft_io_data_check_vocab(data, 60000), FT_ERR_DATA, bad,
                         "token 60000 at position 8001 is outside the vocabulary of 60000");
            assert_error(ft_io_data_check_vocab(data, 50257), FT_ERR_DATA, bad,
                         "token 50257 at position 8000 is outside the vocabulary of 50257");
            assert_error(ft_io_data_check_vocab(data, 5), FT_ERR_DATA, in_directory("clean"),
                         "token 5 at position 0 is");
            assert_error(ft_io_data_check_vocab(data, 0), FT_ERR_ARG, "vocabulary 0", "positive");
            assert_error(ft_io_data_check_vocab(NULL, 5), FT_ERR_ARG, "check_vocab", "NULL");
            ft_io_data_close(data);
        }
    }
}

/* The same token, met by whoever reads it: as an input, as a label only, in an evaluation. */
static void every_window_is_checked(void **state)
{
    (void)state;
    enum { T = 10, N = 1799 }; /* 18000 tokens; token 17000 is in window 1700, and 1699's label */
    for (int kind = 0; kind < 3; kind++) {
        const int64_t vocab = kind == 0 ? 97 : 50257;
        const char *bad;
        ft_io_data *data = open_with_bad(kind, kind == 2, 8000, vocab, 8003, vocab + 1, &bad);
        int32_t tokens[18000], labels[T];
        char first[96], second[96];
        ft_io_sampler sampler;
        ft_io_eval eval;
        int refused = 0;
        assert_ok(ft_io_sampler_init(&sampler, data, T, 1, 3));
        assert_ok(ft_io_eval_init(&eval, data, T, 1, 1, 0));
        assert_int_equal(sampler.windows, N);
        /* Nobody has said yet what the vocabulary is. */
        assert_ok(ft_io_data_read(data, 0, 18000, tokens));
        for (int64_t i = 0; i < N; i++)
            assert_ok(ft_io_eval_fill(&eval, i, 0, tokens, labels, NULL));

        assert_error(ft_io_data_set_vocab(data, 0), FT_ERR_ARG, "vocabulary 0", "positive");
        assert_error(ft_io_data_set_vocab(NULL, 9), FT_ERR_ARG, "set_vocab", "NULL");
        assert_ok(ft_io_data_set_vocab(data, vocab));
        snprintf(first, sizeof first,
                 "token %lld at position 8000 is outside the vocabulary of %lld", (long long)vocab,
                 (long long)vocab);
        snprintf(second, sizeof second, "token %lld at position 8003", (long long)vocab + 1);
        assert_ok(ft_io_data_read(data, 0, 17000, tokens));
        assert_error(ft_io_data_read(data, 0, 17001, tokens), FT_ERR_DATA, bad, first);
        assert_error(ft_io_data_read(data, 17001, 999, tokens), FT_ERR_DATA, bad, second);
        assert_ok(ft_io_data_read(data, 17004, 996, tokens));
        for (int64_t i = 0; i < N; i++) {
            int64_t window;
            ft_status status = ft_io_sampler_fill(&sampler, i, 0, 1, 0, 1, tokens, labels);
            assert_ok(ft_io_sampler_index(&sampler, i, 0, &window, NULL));
            if (window == 1699 || window == 1700) {
                assert_error(status, FT_ERR_DATA, bad, first);
                refused++;
            } else {
                assert_ok(status);
            }
            status = ft_io_eval_fill(&eval, i, 0, tokens, labels, NULL);
            if (i == 1699 || i == 1700) assert_error(status, FT_ERR_DATA, bad, first);
            else assert_ok(status);
        }
        assert_int_equal(refused, 2);
        assert_ok(ft_io_data_set_vocab(data, vocab + 1));
        assert_ok(ft_io_data_read(data, 0, 17003, tokens));
        assert_error(ft_io_data_read(data, 0, 17004, tokens), FT_ERR_DATA, bad, second);
        assert_ok(ft_io_data_set_vocab(data, INT64_MAX));
        assert_ok(ft_io_data_read(data, 0, 18000, tokens));
        ft_io_data_close(data);
    }
}

static void tokens_beyond_int32_are_refused(void **state)
{
    (void)state;
    static const int64_t values[2] = {2147483648, 4294967295};
    for (int i = 0; i < 2; i++) {
        const char *bad;
        char what[64];
        int32_t tokens[2];
        ft_io_data *data = open_with_bad(2, i, 77, values[i], 77, values[i], &bad);
        snprintf(what, sizeof what, "token %lld at position 77 is", (long long)values[i]);
        assert_error(ft_io_data_read(data, 9076, 2, tokens), FT_ERR_DATA, bad, what);
        assert_error(ft_io_data_check_vocab(data, (int64_t)1 << 40), FT_ERR_DATA, bad, what);
        assert_ok(ft_io_data_set_vocab(data, (int64_t)1 << 40));
        assert_error(ft_io_data_read(data, 9077, 1, tokens), FT_ERR_DATA, bad,
                     "uint32, not uint16");
        assert_ok(ft_io_data_read(data, 9078, 2, tokens));
        ft_io_data_close(data);
    }
}

/* -------------------------------------------------------------------------------------- sampler */

/* Which window a row is, told from its tokens alone; labels must be the tokens that follow. */
static int64_t window_of(int kind, int64_t T, int64_t windows, const int32_t *tokens,
                         const int32_t *labels)
{
    for (int64_t w = 0; w < windows; w++) {
        if (tokens[0] != token_at(kind, w * T)) continue;
        for (int64_t t = 0; t < T; t++) {
            assert_int_equal(tokens[t], token_at(kind, w * T + t));
            assert_int_equal(labels[t], token_at(kind, w * T + t + 1));
        }
        return w;
    }
    fail_msg("no window begins with token %d", tokens[0]);
    return -1;
}

enum { ROW = 7, WINDOWS = 29, STREAM = WINDOWS * ROW + 3, BATCH = 12, STEPS = 30 };

/* The windows of steps from..STEPS-1 as R ranks with M micro-batches see them, in the order of the
   global batch. */
static void collect(ft_io_data *data, int kind, int R, int M, int from, int64_t *order)
{
    const int B = BATCH / (R * M);
    ft_io_sampler sampler;
    assert_ok(ft_io_sampler_init(&sampler, data, ROW, BATCH, 11));
    assert_int_equal(sampler.windows, WINDOWS);
    for (int64_t step = from; step < STEPS; step++)
        for (int m = 0; m < M; m++)
            for (int r = 0; r < R; r++) {
                int32_t tokens[BATCH * ROW], labels[BATCH * ROW];
                assert_ok(ft_io_sampler_fill(&sampler, step, r, R, m, M, tokens, labels));
                for (int b = 0; b < B; b++)
                    order[step * BATCH + (m * R + r) * B + b] =
                        window_of(kind, ROW, WINDOWS, tokens + b * ROW, labels + b * ROW);
            }
}

static void each_epoch_has_each_window_once(void **state)
{
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        ft_io_data *data = open_stream(kind, STREAM, 9);
        int64_t order[STEPS * BATCH];
        collect(data, kind, 1, 1, 0, order);
        const int epochs = STEPS * BATCH / WINDOWS; /* 12 whole ones; batches span their ends */
        for (int epoch = 0; epoch < epochs; epoch++) {
            const int64_t *now = order + epoch * WINDOWS;
            int seen[WINDOWS], same = 0, sorted = 0;
            memset(seen, 0, sizeof seen);
            for (int i = 0; i < WINDOWS; i++) seen[now[i]]++;
            for (int w = 0; w < WINDOWS; w++) assert_int_equal(seen[w], 1);
            /* Shuffled, and afresh: 29 places agree once in the mean. */
            for (int i = 0; i < WINDOWS; i++) {
                same += epoch > 0 && now[i] == now[i - WINDOWS];
                sorted += now[i] == i;
            }
            assert_true(same < 8 && sorted < 8);
        }
        ft_io_data_close(data);
    }
}

/* Neither who reads, nor how tokens are stored, nor how they are cut into files is seen. */
static void the_order_is_that_of_the_stream_alone(void **state)
{
    (void)state;
    static const int layouts[][2] = {{1, 1}, {2, 1}, {3, 1}, {4, 3}, {6, 2}, {12, 1}, {1, 12},
                                     {2, 3}, {3, 2}, {1, 4}};
    int64_t reference[STEPS * BATCH], order[STEPS * BATCH];
    ft_io_data *data = open_stream(1, STREAM, 1);
    collect(data, 1, 1, 1, 0, reference);
    ft_io_data_close(data);
    for (int kind = 0; kind < 3; kind++) {
        data = open_stream(kind, STREAM, 3 * kind + 5);
        for (size_t k = 0; k < COUNT(layouts); k++) {
            collect(data, kind, layouts[k][0], layouts[k][1], 0, order);
            assert_memory_equal(order, reference, sizeof order);
        }
        ft_io_data_close(data);
    }
}

/* At every step, in the middle of an epoch and at its end, files opened anew, on other ranks. */
static void continues_identically_at_any_step(void **state)
{
    (void)state;
    static const int layouts[][2] = {{1, 1}, {3, 2}, {4, 1}};
    int64_t reference[STEPS * BATCH], order[STEPS * BATCH];
    ft_io_data *data = open_stream(2, STREAM, 4);
    collect(data, 2, 2, 1, 0, reference);
    ft_io_data_close(data);
    for (int from = 0; from < STEPS; from++) {
        data = open_stream(2, STREAM, 4);
        memcpy(order, reference, sizeof order);
        memset(order + from * BATCH, 0xff, (size_t)(STEPS - from) * BATCH * sizeof *order);
        collect(data, 2, layouts[from % 3][0], layouts[from % 3][1], from, order);
        assert_memory_equal(order, reference, sizeof order);
        ft_io_data_close(data);
    }
}

/* The windows of samples from..to-1 of the sequence, read from step `step` on. */
static void collect_samples(const ft_io_sampler *sampler, int64_t step, int from, int to,
                            int64_t *order)
{
    const int batch = (int)sampler->global_batch;
    for (int at = from; at < to; at += batch, step++)
        for (int b = 0; b < batch && at + b < to; b++)
            assert_ok(ft_io_sampler_index(sampler, step, b, &order[at + b], NULL));
}

/* Kept, and set again with a global batch of another size: the sequence goes on where it was, from
   the middle of an epoch and over its end, and again from there. */
static void a_state_continues_with_any_batch(void **state)
{
    (void)state;
    enum { N = 400 };
    static const int batches[] = {1, 2, 3, 12, 29, 40};
    int64_t reference[N], order[N];
    ft_io_data *data = open_stream(1, STREAM, 4);
    ft_io_sampler sampler, next;
    ft_io_sampler_state kept, again;
    assert_ok(ft_io_sampler_init(&sampler, data, ROW, 1, 11));
    collect_samples(&sampler, 0, 0, N, reference);
    for (size_t i = 0; i < COUNT(batches); i++)
        for (size_t k = 0; k < COUNT(batches); k++)
            for (int64_t step = 0; step < 5; step++) {
                const int used = (int)step * batches[i];
                memset(order, 0xff, sizeof order);
                assert_ok(ft_io_sampler_init(&sampler, data, ROW, batches[i], 11));
                collect_samples(&sampler, 0, 0, used, order);
                assert_ok(ft_io_sampler_state_get(&sampler, step, &kept));
                assert_int_equal(kept.samples, used);
                ft_io_data *other = open_stream(1, STREAM, 1 + (int)k); /* cut otherwise */
                assert_ok(ft_io_sampler_init(&next, other, ROW, batches[k], 999));
                assert_ok(ft_io_sampler_state_set(&next, &kept, 1000));
                collect_samples(&next, 1000, used, used + 100, order);
                assert_memory_equal(order, reference, (size_t)(used + 100) * sizeof *order);
                /* What is kept of the second run is what the first would keep. */
                assert_ok(ft_io_sampler_state_get(&next, 1000, &again));
                assert_memory_equal(&again, &kept, sizeof kept);
                assert_ok(ft_io_sampler_state_get(&next, 1003, &again));
                assert_int_equal(again.samples, used + 3 * batches[k]);
                assert_error(ft_io_sampler_index(&next, 999, 0, NULL, NULL), FT_ERR_ARG,
                             "step 999", "begins with step 1000");
                ft_io_data_close(other);
            }
    ft_io_data_close(data);
}

static void a_state_knows_its_data(void **state)
{
    (void)state;
    static int64_t tokens[STREAM];
    ft_io_sampler sampler, other;
    ft_io_sampler_state kept, bad;
    for (int i = 0; i < STREAM; i++) tokens[i] = token_at(1, i);
    const char *path = write_shard("known", 1, 1, tokens, STREAM);
    ft_io_data *data = open_file(path, 1), *changed;
    assert_ok(ft_io_sampler_init(&sampler, data, ROW, 4, 11));
    assert_ok(ft_io_sampler_state_get(&sampler, 7, &kept));
    assert_int_equal(kept.tokens, STREAM);
    assert_int_equal(kept.windows, WINDOWS);
    assert_ok(ft_io_sampler_init(&other, data, ROW + 1, 4, 11));
    assert_error(ft_io_sampler_state_set(&other, &kept, 7), FT_ERR_DATA, path,
                 "had a sequence length of 7, this one has 8");
    /* One token more, one less, another one; and both numbers are named. */
    for (int k = 0; k < 3; k++) {
        static int64_t more[STREAM + 1];
        memcpy(more, tokens, sizeof tokens);
        more[STREAM] = 3;
        if (k == 2) more[100]++;
        const char *there = write_shard("changed", 1, 0, more, k == 0 ? STREAM + 1 :
                                        k == 1 ? STREAM - 1 : STREAM);
        changed = open_file(there, 1);
        assert_ok(ft_io_sampler_init(&other, changed, ROW, 4, 12));
        assert_error(ft_io_sampler_state_set(&other, &kept, 7), FT_ERR_DATA, there,
                     k == 0 ? "data of 206 tokens in 29 samples, this is 207 tokens in 29 samples"
                     : k == 1 ? "data of 206 tokens in 29 samples, this is 205 tokens in 29 samples"
                              : "other tokens, though as many");
        assert_int_equal(other.seed, 12); /* as before */
        assert_int_equal(other.first_sample, 0);
        ft_io_data_close(changed);
    }
    /* The same tokens, whose documents end nowhere, at one token, at another, and again at this. */
    for (int k = 0; k < 3; k++) {
        ft_io_data_config config = ft_io_data_config_default();
        ft_io_sampler_state apart;
        config.format = FT_IO_FORMAT_U16;
        config.eod_token = tokens[40 + 50 * (k % 2)];
        assert_ok(ft_io_data_open_files(&path, 1, &config, &changed));
        assert_ok(ft_io_sampler_init(&other, changed, ROW, 4, 12));
        assert_error(ft_io_sampler_state_set(&other, &kept, 7), FT_ERR_DATA, path,
                     "documents end elsewhere");
        assert_int_equal(other.seed, 12);
        if (k > 0) {
            const ft_status same = ft_io_sampler_state_set(&other, &bad, 7);
            assert_int_equal(same, k == 2 ? FT_OK : FT_ERR_DATA);
        }
        assert_ok(ft_io_sampler_init(&other, changed, ROW, 4, 11));
        assert_ok(ft_io_sampler_state_get(&other, 7, &apart));
        assert_int_equal(apart.data_hash, kept.data_hash);
        if (k == 0) bad = apart;
        ft_io_data_close(changed);
    }
    bad = kept;
    bad.samples = -1;
    assert_error(ft_io_sampler_state_set(&sampler, &bad, 7), FT_ERR_DATA, path, "used -1 samples");
    bad.samples = INT64_MAX - 4;
    assert_ok(ft_io_sampler_state_set(&sampler, &bad, 7));
    assert_error(ft_io_sampler_index(&sampler, 8, 1, NULL, NULL), FT_ERR_ARG, "step 8", "63 bits");
    assert_ok(ft_io_sampler_index(&sampler, 7, 3, NULL, NULL));
    assert_error(ft_io_sampler_state_set(&sampler, NULL, 7), FT_ERR_ARG, "state_set", "NULL");
    assert_error(ft_io_sampler_state_set(&sampler, &kept, -1), FT_ERR_ARG, "step -1", "");
    assert_error(ft_io_sampler_state_get(&sampler, 3, &kept), FT_ERR_ARG, "step 3",
                 "begins with step 7");
    assert_error(ft_io_sampler_state_get(&sampler, 7, NULL), FT_ERR_ARG, "state_get", "NULL");
    ft_io_data_close(data);
}

/* ----------------------------------------------------------------------------------- evaluation */

static void evaluation_sees_each_window_once(void **state)
{
    (void)state;
    enum { MAX_B = 5, MAX_R = 6, GUARD = 4 };
    static const int64_t limits[] = {0, 1, 2, 7, 12, 28, 29, 30, 1000, INT64_MAX};
    ft_io_data *data = open_stream(1, STREAM, 7);
    for (size_t k = 0; k < COUNT(limits); k++) {
        const int64_t N = limits[k] > 0 && limits[k] < WINDOWS ? limits[k] : WINDOWS;
        for (int R = 1; R <= MAX_R; R++) {
            for (int B = 1; B <= MAX_B; B++) {
                ft_io_eval eval;
                int64_t total = 0, next = 0;
                assert_ok(ft_io_eval_init(&eval, data, ROW, B, R, limits[k]));
                assert_int_equal(eval.windows, N);
                /* As many batches as are needed, and no more. */
                assert_true(eval.batches * R * B >= N && (eval.batches - 1) * R * B < N);
                for (int64_t i = 0; i < eval.batches; i++) {
                    for (int r = 0; r < R; r++) {
                        int32_t tokens[MAX_B * ROW + GUARD], labels[MAX_B * ROW + GUARD];
                        int64_t counted = -1, valid = 0;
                        memset(tokens, 0x77, sizeof tokens);
                        memset(labels, 0x77, sizeof labels);
                        assert_ok(ft_io_eval_fill(&eval, i, r, tokens, labels, &counted));
                        for (int b = 0; b < B; b++) {
                            const int32_t *row = tokens + b * ROW, *targets = labels + b * ROW;
                            if (targets[0] != -100) { /* windows in order, none left out */
                                assert_int_equal(window_of(1, ROW, N, row, targets), next);
                                next++;
                                valid += ROW;
                                continue;
                            }
                            assert_int_equal(next, N); /* only then are rows filled up */
                            for (int t = 0; t < ROW; t++) {
                                assert_int_equal(row[t], 0);
                                assert_int_equal(targets[t], -100);
                            }
                        }
                        assert_int_equal(counted, valid);
                        total += counted;
                        assert_int_equal(tokens[B * ROW], 0x77777777);
                        assert_int_equal(labels[B * ROW], 0x77777777);
                        assert_ok(ft_io_eval_fill(&eval, i, r, tokens, labels, NULL));
                    }
                }
                assert_int_equal(next, N);
                assert_int_equal(total, N * ROW);
            }
        }
    }
    ft_io_data_close(data);
}

static void refuses_bad_evaluations(void **state)
{
    (void)state;
    static const int64_t eight[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    const char *path = write_shard("eight", 1, 1, eight, 8);
    ft_io_data *data = open_file(path, 1);
    ft_io_eval eval;
    int32_t tokens[16], labels[16];
    memset(&eval, 0, sizeof eval);
    assert_error(ft_io_eval_init(&eval, data, 8, 1, 1, 0), FT_ERR_DATA, path,
                 "8 tokens of data are shorter than one sample: sequence length 8 + 1");
    assert_error(ft_io_eval_fill(&eval, 0, 0, tokens, labels, NULL), FT_ERR_ARG, "evaluation",
                 "not initialised");
    assert_error(ft_io_eval_init(&eval, data, 0, 1, 1, 0), FT_ERR_ARG, "length 0", "positive");
    assert_error(ft_io_eval_init(&eval, data, 2, 0, 1, 0), FT_ERR_ARG, "batch 0", "positive");
    assert_error(ft_io_eval_init(&eval, data, 2, 1, 0, 0), FT_ERR_ARG, "0 ranks", "positive");
    assert_error(ft_io_eval_init(&eval, data, 2, INT64_MAX, 2, 0), FT_ERR_ARG, "2 ranks",
                 "63 bits");
    assert_error(ft_io_eval_init(&eval, data, 2, 1, 1, -1), FT_ERR_ARG, "-1 windows",
                 "0 means all");
    assert_error(ft_io_eval_init(&eval, NULL, 2, 1, 1, 0), FT_ERR_ARG, "data", "NULL");
    assert_error(ft_io_eval_init(NULL, data, 2, 1, 1, 0), FT_ERR_ARG, "eval", "NULL");
    assert_ok(ft_io_eval_init(&eval, data, 7, 1, 1, 0)); /* all 8 tokens */
    assert_int_equal(eval.windows, 1);
    assert_ok(ft_io_eval_init(&eval, data, 2, 1, 2, 0));
    assert_int_equal(eval.batches, 2); /* 3 windows */
    assert_error(ft_io_eval_fill(&eval, 2, 0, tokens, labels, NULL), FT_ERR_ARG, "batch 2 of 2",
                 "rank 0 of 2");
    assert_error(ft_io_eval_fill(&eval, -1, 0, tokens, labels, NULL), FT_ERR_ARG, "batch -1 of 2",
                 "");
    assert_error(ft_io_eval_fill(&eval, 0, 2, tokens, labels, NULL), FT_ERR_ARG, "rank 2 of 2", "");
    assert_error(ft_io_eval_fill(&eval, 0, -1, tokens, labels, NULL), FT_ERR_ARG, "rank -1", "");
    assert_error(ft_io_eval_fill(&eval, 0, 0, tokens, NULL, NULL), FT_ERR_ARG, "labels", "NULL");
    assert_error(ft_io_eval_fill(NULL, 0, 0, tokens, labels, NULL), FT_ERR_ARG, "evaluation",
                 "not initialised");
    ft_io_data_close(data);
}

/* The evaluation of a model on R ranks under ZeRO-3, where every forward pass is a collective. */
typedef struct evaluation {
    ft_io_eval eval;
    double sum[8]; /* by rank: of counted * mean loss */
} evaluation;

static ft_status evaluate(ft_ctx *ctx, void *user)
{
    evaluation *work = (evaluation *)user;
    const ft_io_eval *eval = &work->eval;
    const int rank = ft_rank(ctx);
    int64_t shape[2];
    int32_t host[2][5 * ROW];
    ft_zero_config zero_config = ft_zero_config_default();
    ft_llama_config config = ft_llama_config_default();
    ft_mesh mesh;
    ft_zero *zero;
    ft_llama *model;
    ft_tensor *tokens, *labels, *loss;
    zero_config.stage = 3;
    config.vocab = 256;
    config.hidden = 32;
    config.layers = 2;
    shape[0] = eval->batch;
    shape[1] = ROW;
    FT_TRY(ft_mesh_create(ctx, eval->ranks, 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &zero_config, &mesh, &zero));
    FT_TRY(ft_llama_create(ctx, zero, &config, ROW, 5, &model));
    FT_TRY(ft_tensor_create(ctx, &tokens, FT_I32, 2, shape, FT_TAG_OTHER));
    FT_TRY(ft_tensor_create(ctx, &labels, FT_I32, 2, shape, FT_TAG_OTHER));
    for (int64_t i = 0; i < eval->batches; i++) {
        int64_t counted;
        float mean;
        FT_TRY(ft_io_eval_fill(eval, i, rank, host[0], host[1], &counted));
        FT_TRY(ft_upload(tokens, host[0]));
        FT_TRY(ft_upload(labels, host[1]));
        FT_TRY(ft_llama_loss(model, tokens, labels, NULL, NULL, &loss));
        FT_TRY(ft_download(loss, &mean));
        work->sum[rank] += (double)counted * (double)mean;
        ft_tensor_free(loss);
    }
    ft_tensor_free(tokens);
    ft_tensor_free(labels);
    return FT_OK;
}

static void the_loss_of_an_evaluation_is_that_of_its_windows(void **state)
{
    (void)state;
    static const int layouts[][2] = {{1, 1}, {1, 4}, {2, 2}, {3, 1}, {4, 3}, {8, 5}}; /* R, B */
    ft_io_data *data = open_stream(0, 9 * ROW + 1, 3); /* 9 windows: some ranks have none */
    double reference = 0;
    for (size_t k = 0; k < COUNT(layouts); k++) {
        evaluation work;
        double loss = 0;
        ft_config launch = ft_config_default();
        memset(&work, 0, sizeof work);
        launch.world = layouts[k][0];
        assert_ok(ft_io_eval_init(&work.eval, data, ROW, layouts[k][1], layouts[k][0], 0));
        assert_int_equal(work.eval.windows, 9);
        assert_ok(ft_launch(&launch, evaluate, &work));
        for (int r = 0; r < layouts[k][0]; r++) loss += work.sum[r];
        loss /= 9.0 * ROW;
        if (k == 0) reference = loss;
        /* A fresh model knows nothing: about ln 256. */
        assert_true(fabs(loss - log(256.0)) < 0.2);
        assert_true(fabs(loss - reference) < 1e-6 * reference);
    }
    ft_io_data_close(data);
}

/* ------------------------------------------------------------------------------------ documents */

enum { DOC_TOKENS = 120, DOC_EOD = 9 };

/* Documents of 0 to 20 tokens and their end; some ends lie at the end of a file, some windows have
   nothing but ends. */
static int doc_token(int p)
{
    return p % 23 == 11 || p % 31 == 30 || (p >= 60 && p < 78) ? DOC_EOD : 20 + p;
}

static ft_io_data *open_documents(int kind, int files, int64_t eod)
{
    char names[8][340];
    const char *paths[8];
    ft_io_data_config config = ft_io_data_config_default();
    ft_io_data *data;
    config.format = (ft_io_format)(FT_IO_FORMAT_BYTES + kind);
    config.eod_token = eod;
    for (int f = 0; f < files; f++) {
        char name[32];
        int64_t tokens[DOC_TOKENS];
        const int first = f * DOC_TOKENS / files, last = (f + 1) * DOC_TOKENS / files;
        for (int p = first; p < last; p++) tokens[p - first] = doc_token(p);
        snprintf(name, sizeof name, "docs-%d", f);
        snprintf(names[f], sizeof names[f], "%s",
                 write_shard(name, kind, kind > 0 && f % 2, tokens, last - first));
        paths[f] = names[f];
    }
    assert_ok(ft_io_data_open_files(paths, files, &config, &data));
    return data;
}

/* Every window of every length, however tokens are stored and cut into files: a document begins
   behind an end, and nowhere else. */
static void documents_end_with_their_token(void **state)
{
    (void)state;
    int empty = 0;
    for (int kind = 0; kind < 3; kind++)
        for (int files = 1; files <= 5; files += 2) {
            ft_io_data *data = open_documents(kind, files, DOC_EOD);
            assert_true(ft_io_data_has_documents(data));
            assert_int_equal(ft_io_data_format(data), FT_IO_FORMAT_BYTES + kind);
            for (int T = 1; T < DOC_TOKENS; T++) {
                ft_io_eval eval;
                int64_t all = 0;
                assert_ok(ft_io_eval_init(&eval, data, T, 1, 1, 0));
                for (int w = 0; w < eval.windows; w++) {
                    int32_t tokens[DOC_TOKENS], labels[DOC_TOKENS], first[DOC_TOKENS];
                    int64_t counted, sum = 0;
                    int begin = 0;
                    assert_ok(ft_io_eval_fill_docs(&eval, w, 0, tokens, labels, first, &counted));
                    for (int t = 0; t < T; t++) {
                        const int p = w * T + t;
                        if (t > 0 && doc_token(p - 1) == DOC_EOD) begin = t;
                        assert_int_equal(tokens[t], doc_token(p));
                        assert_int_equal(labels[t],
                                         doc_token(p) == DOC_EOD ? -100 : doc_token(p + 1));
                        assert_int_equal(first[t], begin);
                        sum += labels[t] != -100;
                    }
                    assert_int_equal(counted, sum);
                    empty += sum == 0;
                    all += sum;
                }
                assert_int_equal(eval.counted, all);
            }
            ft_io_data_close(data);
            /* Without the token there are no documents, and starts are zeros. */
            data = open_documents(kind, files, -1);
            assert_false(ft_io_data_has_documents(data));
            ft_io_sampler sampler;
            int32_t tokens[40], labels[40], first[40];
            int64_t counted;
            assert_ok(ft_io_sampler_init(&sampler, data, 40, 1, 1));
            memset(first, 0x77, sizeof first);
            assert_ok(ft_io_sampler_fill_docs(&sampler, 0, 0, 1, 0, 1, tokens, labels, first));
            assert_ok(ft_io_sampler_counted(&sampler, 0, 0, 1, 1, &counted));
            assert_int_equal(counted, 40);
            for (int t = 0; t < 40; t++) assert_true(labels[t] != -100 && first[t] == 0);
            ft_io_data_close(data);
        }
    assert_true(empty > 0);
}

static void formats_are_told_by_name_and_header(void **state)
{
    (void)state;
    static const int64_t tokens[4] = {1, 2, 3, 4};
    ft_io_data_config config = ft_io_data_config_default();
    ft_io_data *data;
    const char *paths[2];
    assert_int_equal(config.format, FT_IO_FORMAT_AUTO);
    assert_int_equal(config.eod_token, -1);
    for (int kind = 0; kind < 3; kind++) {
        paths[0] = write_shard("some.bin", kind, kind > 0, tokens, 4);
        assert_ok(ft_io_data_open_files(paths, 1, &config, &data));
        assert_int_equal(ft_io_data_format(data), FT_IO_FORMAT_BYTES + kind);
        assert_int_equal(ft_io_data_tokens(data), 4);
        assert_string_equal(ft_io_data_file(data, 0), paths[0]);
        assert_null(ft_io_data_file(data, 1));
        ft_io_data_close(data);
    }
    paths[1] = write_shard("other.bin", 1, 1, tokens, 4);
    assert_error(ft_io_data_open_files(paths, 2, &config, &data), FT_ERR_DATA, paths[1],
                 "looks like uint16, but");
    static const char *const names[] = {"auto", "bytes", "uint16", "uint32", "megatron", "jsonl",
                                        "?"};
    for (int i = 0; i < 7; i++) assert_string_equal(ft_io_format_name((ft_io_format)i), names[i]);
    assert_string_equal(ft_io_format_name((ft_io_format)-1), "?");
    config.format = FT_IO_FORMAT_COUNT;
    assert_error(ft_io_data_open_files(paths, 1, &config, &data), FT_ERR_UNSUPPORTED, "format 6",
                 "ft_io_format");
    config.format = FT_IO_FORMAT_AUTO;
    assert_error(ft_io_data_open_files(paths, 0, &config, &data), FT_ERR_ARG, "0 paths", "");
    assert_error(ft_io_data_open_files(paths, 1, NULL, &data), FT_ERR_ARG, "1 paths", "");
    paths[0] = NULL;
    assert_error(ft_io_data_open_files(paths, 1, &config, &data), FT_ERR_ARG, "path is NULL", "");
    static const struct { int kind; int64_t eod; const char *says; } bad[] = {
        {0, 256, "eod_token 256 is no token of bytes, which end at 255"},
        {1, 65536, "eod_token 65536 is no token of uint16, which end at 65535"},
        {0, -2, "eod_token -2; it must be a token, or -1"},
        {2, 2147483648, "eod_token 2147483648; it must be a token, or -1"}};
    for (size_t i = 0; i < COUNT(bad); i++) {
        paths[0] = write_shard("some.bin", bad[i].kind, 0, tokens, 4);
        config.format = (ft_io_format)(FT_IO_FORMAT_BYTES + bad[i].kind);
        config.eod_token = bad[i].eod;
        assert_error(ft_io_data_open_files(paths, 1, &config, &data), FT_ERR_ARG, "eod_token",
                     bad[i].says);
    }
    assert_int_equal(ft_io_data_format(NULL), FT_IO_FORMAT_AUTO);
    assert_int_equal(ft_io_data_has_documents(NULL), 0);
    assert_int_equal(ft_io_data_examples(NULL), 0);
    assert_null(ft_io_data_file(NULL, 0));
}

static void data_without_a_label_are_refused(void **state)
{
    (void)state;
    static const int64_t ends[12] = {9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1};
    ft_io_data_config config = ft_io_data_config_default();
    ft_io_data *data;
    ft_io_eval eval;
    ft_io_sampler sampler;
    const char *path = write_shard("ends", 0, 0, ends, 12);
    config.eod_token = 9;
    assert_ok(ft_io_data_open_files(&path, 1, &config, &data));
    assert_error(ft_io_eval_init(&eval, data, 5, 1, 1, 0), FT_ERR_DATA, path,
                 "no label counts in 2 windows of 5 tokens");
    assert_error(ft_io_sampler_init(&sampler, data, 5, 1, 0), FT_ERR_DATA, path,
                 "no label counts in 2 windows of 5 tokens");
    ft_io_data_close(data);
    config.eod_token = 8; /* there is none: all count */
    assert_ok(ft_io_data_open_files(&path, 1, &config, &data));
    assert_ok(ft_io_sampler_init(&sampler, data, 5, 1, 0));
    ft_io_data_close(data);
}

/* One step of a model on R ranks with M micro-batches, of which some count nothing. */
typedef struct split {
    const ft_io_sampler *sampler;
    int M;
    double loss, norm;
    int64_t least; /* of the labels that count in a micro-batch */
} split;

static ft_status split_step(ft_ctx *ctx, void *user)
{
    split *work = (split *)user;
    const ft_io_sampler *sampler = work->sampler;
    const int rank = ft_rank(ctx), ranks = ft_world(ctx);
    int64_t shape[2], counted;
    int32_t host[3][12 * 6];
    ft_zero_config zero_config = ft_zero_config_default();
    ft_llama_config config = ft_llama_config_default();
    ft_zero_report report;
    ft_mesh mesh;
    ft_zero *zero;
    ft_llama *model;
    ft_tape *tape;
    ft_tensor *in[3], *loss, *scale;
    zero_config.stage = 3;
    config.hidden = 32;
    config.layers = 1;
    config.init_std = 0.1;
    shape[0] = sampler->global_batch / (ranks * work->M);
    shape[1] = sampler->seq_len;
    FT_TRY(ft_mesh_create(ctx, ranks, 1, 1, &mesh));
    FT_TRY(ft_zero_create(ctx, &zero_config, &mesh, &zero));
    FT_TRY(ft_llama_create(ctx, zero, &config, shape[1], 5, &model));
    FT_TRY(ft_tape_create(ctx, &tape));
    FT_TRY(ft_io_sampler_counted(sampler, 0, rank, ranks, work->M, &counted));
    FT_TRY(ft_zero_step_begin(zero, work->M, counted, &scale));
    for (int m = 0; m < work->M; m++) {
        int64_t here = 0;
        FT_TRY(ft_io_sampler_fill_docs(sampler, 0, rank, ranks, m, work->M, host[0], host[1],
                                       host[2]));
        for (int64_t i = 0; i < shape[0] * shape[1]; i++) here += host[1][i] != -100;
        if (rank == 0 && here < work->least) work->least = here;
        for (int k = 0; k < 3; k++) {
            FT_TRY(ft_tensor_create(ctx, &in[k], FT_I32, 2, shape, FT_TAG_OTHER));
            FT_TRY(ft_upload(in[k], host[k]));
        }
        FT_TRY(ft_tape_begin(tape));
        FT_TRY(ft_llama_loss_docs(model, in[0], in[1], in[2], scale, NULL, &loss));
        FT_TRY(ft_tape_end(tape));
        FT_TRY(ft_backward(tape, loss, NULL));
        FT_TRY(ft_zero_add_loss(zero, loss));
        ft_tensor_free(loss);
        for (int k = 0; k < 3; k++) ft_tensor_free(in[k]);
    }
    FT_TRY(ft_zero_step_end(zero, 1e-3));
    FT_TRY(ft_zero_report_get(zero, &report));
    if (rank != 0) return FT_OK;
    work->loss = report.loss;
    work->norm = report.grad_norm;
    return FT_OK;
}

static void splits_do_not_change_the_loss(void **state)
{
    (void)state;
    static const int layouts[][2] = {{1, 1}, {1, 12}, {2, 3}, {3, 1}, {4, 3}, {6, 2}, {12, 1}};
    ft_io_data *data = open_documents(0, 3, DOC_EOD);
    ft_io_sampler sampler;
    double loss = 0, norm = 0;
    int64_t least = 99;
    assert_ok(ft_io_sampler_init(&sampler, data, 6, 12, 4));
    for (size_t k = 0; k < COUNT(layouts); k++) {
        ft_config launch = ft_config_default();
        split work;
        memset(&work, 0, sizeof work);
        work.sampler = &sampler;
        work.M = layouts[k][1];
        work.least = 99;
        launch.world = layouts[k][0];
        assert_ok(ft_launch(&launch, split_step, &work));
        if (k == 0) loss = work.loss;
        if (k == 0) norm = work.norm;
        if (work.least < least) least = work.least;
        assert_true(work.loss > 1 && work.norm > 0); /* and no NaN */
        assert_true(fabs(work.loss - loss) < 1e-6 * loss);
        assert_true(fabs(work.norm - norm) < 1e-5 * norm);
    }
    assert_int_equal(least, 0); /* somewhere nothing counted */
    ft_io_data_close(data);
}

#define TEST(name) cmocka_unit_test_teardown(name, clean_directory)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(kinds_have_names),
        TEST(shards_are_little_endian),
        TEST(headers_are_not_data),
        TEST(raw_files_stay_raw),
        TEST(files_of_one_width_are_one_stream),
        TEST(many_files_are_one_stream),
        TEST(headers_that_lie_are_refused),
        TEST(raw_files_hold_whole_tokens),
        TEST(survives_every_damage_of_a_header),
        TEST(refuses_kinds_that_do_not_exist),
        TEST(runs_out_of_memory_in_good_order),
        TEST(reads_beyond_32_bits_of_tokens),
        TEST(reads_the_largest_shard_with_a_header),
        TEST(names_the_token_outside_the_vocabulary),
        TEST(every_window_is_checked),
        TEST(tokens_beyond_int32_are_refused),
        TEST(each_epoch_has_each_window_once),
        TEST(the_order_is_that_of_the_stream_alone),
        TEST(continues_identically_at_any_step),
        TEST(a_state_continues_with_any_batch),
        TEST(a_state_knows_its_data),
        TEST(evaluation_sees_each_window_once),
        TEST(refuses_bad_evaluations),
        TEST(the_loss_of_an_evaluation_is_that_of_its_windows),
        TEST(documents_end_with_their_token),
        TEST(formats_are_told_by_name_and_header),
        TEST(data_without_a_label_are_refused),
        TEST(splits_do_not_change_the_loss),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
