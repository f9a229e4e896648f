/* What femtotron_io.h reads and writes: files spelled out byte by byte, files broken in every way
   that the format knows, and the order in which training sees its data. */

#if !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#define _DEFAULT_SOURCE 1 /* mkdtemp, mkfifo, truncate, setrlimit */
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
#include <locale.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* What the opening of a file to be written is refused with; 0: it is not. */
static int refused_opening;

#include "temp_files.h"
#define FT_IO_FAULT(call) (strcmp(call, "open") == 0 ? refused_opening : 0)
#ifdef FT_TEST_LINKED /* make compiles the other headers once for many tests */
#define FEMTOTRON_IO_IMPLEMENTATION
#else
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"
#include "femtotron_io.h"
#include "assert_status.h"

/* ------------------------------------------------------------------------------------- helpers */

/* The whole file, with a zero after it; to be freed. */
static char *read_file(const char *path, size_t *n)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    *n = (size_t)ftell(file);
    rewind(file);
    char *bytes = (char *)malloc(*n + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *n, file), *n);
    bytes[*n] = 0;
    fclose(file);
    return bytes;
}

static void assert_file_is(const char *path, const char *text)
{
    size_t n;
    char *bytes = read_file(path, &n);
    assert_string_equal(bytes, text);
    assert_int_equal(n, strlen(text));
    free(bytes);
}

/* A safetensors file: 8 bytes of length, header, data_bytes bytes 0, 1, 2, ... */
static const char *write_tensors(const char *name, const char *header, size_t data_bytes)
{
    const size_t n = strlen(header);
    unsigned char *bytes = (unsigned char *)malloc(8 + n + data_bytes);
    assert_non_null(bytes);
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)((uint64_t)n >> 8 * i);
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < data_bytes; i++) bytes[8 + n + i] = (unsigned char)i;
    const char *path = write_file(name, bytes, 8 + n + data_bytes);
    free(bytes);
    return path;
}

/* ---------------------------------------------------------------------------- reading tensors */

static void reads_a_file_spelled_by_hand(void **state)
{
    (void)state;
    /* Three tensors in an order other than the data's, a scalar, metadata, all kinds of blanks. */
    static const char header[] =
        "{ \"b\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[12,16]},\n"
        "\t\"__metadata__\" : {\"k\":\"v\",\"config\":\"{\\\"a\\\": 1}\\n\"},\r"
        "\"a\":{\"data_offsets\":[0,12],\"shape\":[3,1],\"dtype\":\"F32\"},"
        "\"s\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[16,24]}}  ";
    static const unsigned char data[24] = {0x00, 0x00, 0x80, 0x3f, /* 1 */
                                           0x00, 0x00, 0x00, 0xc0, /* -2 */
                                           0xdb, 0x0f, 0x49, 0x40, /* pi */
                                           0xc0, 0x3f, 0x80, 0xff, /* 1.5, -inf */
                                           0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}; /* -2 */
    unsigned char bytes[400];
    const size_t n = sizeof header - 1;
    memset(bytes, 0, 8);
    bytes[0] = (unsigned char)n;
    bytes[1] = (unsigned char)(n >> 8);
    memcpy(bytes + 8, header, n);
    memcpy(bytes + 8 + n, data, sizeof data);
    const char *path = write_file("hand.safetensors", bytes, 8 + n + sizeof data);

    ft_io_safetensors *file;
    assert_ok(ft_io_safetensors_open(path, &file));
    assert_int_equal(ft_io_safetensors_count(file), 3);
    assert_string_equal(ft_io_safetensors_at(file, 0)->name, "a");
    assert_string_equal(ft_io_safetensors_at(file, 1)->name, "b");
    assert_string_equal(ft_io_safetensors_at(file, 2)->name, "s");
    assert_null(ft_io_safetensors_at(file, 3));
    assert_null(ft_io_safetensors_at(file, -1));
    assert_null(ft_io_safetensors_find(file, "c"));
    assert_null(ft_io_safetensors_find(file, "__metadata__"));

    const ft_io_tensor *a = ft_io_safetensors_find(file, "a");
    assert_non_null(a);
    assert_int_equal(a->dtype, FT_IO_F32);
    assert_int_equal(a->ndim, 2);
    assert_int_equal(a->shape[0], 3);
    assert_int_equal(a->shape[1], 1);
    assert_int_equal(a->elems, 3);
    assert_int_equal(a->bytes, 12);
    assert_memory_equal(a->data, data, 12);
    float values[3];
    assert_ok(ft_io_read_float(a, 0, 3, values));
    assert_true(values[0] == 1.0f && values[1] == -2.0f && values[2] == 3.14159274f);
    assert_ok(ft_io_read_float(a, 2, 1, values));
    assert_true(values[0] == 3.14159274f);

    const ft_io_tensor *b = ft_io_safetensors_find(file, "b");
    assert_ok(ft_io_read_float(b, 0, 2, values));
    assert_true(values[0] == 1.5f && isinf(values[1]) && values[1] < 0);

    const ft_io_tensor *s = ft_io_safetensors_find(file, "s");
    int64_t integer;
    assert_int_equal(s->ndim, 0);
    assert_int_equal(s->elems, 1);
    assert_ok(ft_io_read_int(s, 0, 1, &integer));
    assert_int_equal(integer, -2);

    const char *value;
    assert_string_equal(ft_io_safetensors_metadata(file, "k"), "v");
    assert_string_equal(ft_io_safetensors_metadata(file, "config"), "{\"a\": 1}\n");
    assert_null(ft_io_safetensors_metadata(file, "l"));
    assert_int_equal(ft_io_safetensors_metadata_count(file), 2);
    assert_string_equal(ft_io_safetensors_metadata_at(file, 0, &value), "config");
    assert_string_equal(ft_io_safetensors_metadata_at(file, 1, &value), "k");
    assert_string_equal(value, "v");
    assert_null(ft_io_safetensors_metadata_at(file, 2, &value));
    ft_io_safetensors_close(file);
    ft_io_safetensors_close(NULL);
}

static void reads_only_what_the_tensor_holds(void **state)
{
    (void)state;
    const char *path =
        write_tensors("range.safetensors",
                      "{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                      "\"q\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[8,9]}}",
                      9);
    ft_io_safetensors *file;
    float values[2];
    int64_t integers[2];
    assert_ok(ft_io_safetensors_open(path, &file));
    const ft_io_tensor *x = ft_io_safetensors_find(file, "x");
    assert_ok(ft_io_read_float(x, 2, 0, NULL));
    assert_error(ft_io_read_float(x, 1, 2, values), FT_ERR_ARG, "\"x\"",
                 "2 elements from element 1");
    assert_error(ft_io_read_float(x, -1, 1, values), FT_ERR_ARG, "\"x\"", "outside");
    assert_error(ft_io_read_float(x, INT64_MAX, INT64_MAX, values), FT_ERR_ARG, "\"x\"", "outside");
    assert_error(ft_io_read_float(x, 0, 1, NULL), FT_ERR_ARG, "values", "NULL");
    assert_error(ft_io_read_float(NULL, 0, 1, values), FT_ERR_ARG, "tensor", "NULL");
    assert_error(ft_io_read_int(x, 0, 1, integers), FT_ERR_UNSUPPORTED, "\"x\"", "F32");
    const ft_io_tensor *q = ft_io_safetensors_find(file, "q");
    assert_error(ft_io_read_float(q, 0, 1, values), FT_ERR_UNSUPPORTED, "\"q\"", "F4");
    assert_error(ft_io_read_int(q, 0, 1, integers), FT_ERR_UNSUPPORTED, "\"q\"", "F4");
    ft_io_safetensors_close(file);
}

static void converts_every_float_format(void **state)
{
    (void)state;
    static const uint16_t half[] = {0x3c00, 0xc000, 0x0001, 0x03ff, 0x0400, 0x7bff,
                                    0x3555, 0x8000, 0x7c00, 0xfc00, 0x7e01};
    static const double half_means[] = {1, -2, 0x1p-24, 1023 * 0x1p-24, 0x1p-14, 65504, 0x1.554p-2};
    static const uint16_t brain[] = {0x3f80, 0xbf00, 0x4049, 0x0001, 0x7f80, 0xffc0};
    static const double brain_means[] = {1, -0.5, 3.140625, 0x1p-133};
    static const double wide[] = {0.1, -3, 1e300, 0x1p-149, 0x1p-151};
    ft_io_tensor tensor;
    float values[11];
    memset(&tensor, 0, sizeof tensor);
    tensor.name = "x";
    tensor.dtype = FT_IO_F16;
    tensor.elems = 11;
    tensor.data = half;
    assert_ok(ft_io_read_float(&tensor, 0, 11, values));
    for (int i = 0; i < 7; i++) assert_true((double)values[i] == half_means[i]);
    assert_true(values[7] == 0 && signbit(values[7]));
    assert_true(isinf(values[8]) && values[8] > 0 && isinf(values[9]) && values[9] < 0);
    assert_true(isnan(values[10]));

    tensor.dtype = FT_IO_BF16;
    tensor.elems = 6;
    tensor.data = brain;
    assert_ok(ft_io_read_float(&tensor, 0, 6, values));
    for (int i = 0; i < 4; i++) assert_true((double)values[i] == brain_means[i]);
    assert_true(isinf(values[4]) && isnan(values[5]));

    tensor.dtype = FT_IO_F64;
    tensor.elems = 5;
    tensor.data = wide;
    assert_ok(ft_io_read_float(&tensor, 0, 5, values));
    assert_true(values[0] == 0.1f && values[1] == -3 && isinf(values[2]));
    assert_true(values[3] == 0x1p-149f && values[4] == 0);
}

static void converts_every_integer_format(void **state)
{
    (void)state;
    static const unsigned char bytes[8] = {0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f};
    static const struct {
        ft_io_dtype dtype;
        int64_t elems, first;
        int64_t value;
    } cases[] = {{FT_IO_I64, 1, 0, INT64_MAX - 1},
                 {FT_IO_U64, 1, 0, INT64_MAX - 1},
                 {FT_IO_I32, 2, 0, -2},
                 {FT_IO_I32, 2, 1, INT32_MAX},
                 {FT_IO_U32, 2, 0, 4294967294},
                 {FT_IO_I16, 4, 0, -2},
                 {FT_IO_U16, 4, 3, 32767},
                 {FT_IO_I8, 8, 0, -2},
                 {FT_IO_U8, 8, 0, 254},
                 {FT_IO_BOOL, 8, 7, 127}};
    ft_io_tensor tensor;
    int64_t value;
    memset(&tensor, 0, sizeof tensor);
    tensor.name = "x";
    tensor.data = bytes;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tensor.dtype = cases[i].dtype;
        tensor.elems = cases[i].elems;
        assert_ok(ft_io_read_int(&tensor, cases[i].first, 1, &value));
        assert_int_equal(value, cases[i].value);
    }
    static const uint64_t large[2] = {1, (uint64_t)1 << 63};
    int64_t pair[2];
    tensor.dtype = FT_IO_U64;
    tensor.elems = 2;
    tensor.data = large;
    assert_error(ft_io_read_int(&tensor, 0, 2, pair), FT_ERR_DATA, "element 1", "2^63 - 1");
}

static void knows_every_dtype(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int bits;
    } cases[] = {{"BOOL", 8},        {"U8", 8},         {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8},
                 {"F8_E8M0", 8},     {"I16", 16},       {"U16", 16}, {"F16", 16},    {"BF16", 16},
                 {"I32", 32},        {"U32", 32},       {"F32", 32}, {"C64", 64},    {"F64", 64},
                 {"I64", 64},        {"U64", 64},       {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6},
                 {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}};
    const size_t n = sizeof cases / sizeof *cases;
    assert_int_equal(n, FT_IO_DTYPE_COUNT);
    for (size_t i = 0; i < n; i++) {
        char header[128];
        ft_io_safetensors *file;
        const int bytes = cases[i].bits / 2; /* four elements */
        snprintf(header, sizeof header,
                 "{\"x\":{\"dtype\":\"%s\",\"shape\":[4],\"data_offsets\":[0,%d]}}", cases[i].name,
                 bytes);
        const char *path = write_tensors("dtype.safetensors", header, (size_t)bytes);
        assert_ok(ft_io_safetensors_open(path, &file));
        const ft_io_tensor *x = ft_io_safetensors_at(file, 0);
        assert_string_equal(ft_io_dtype_name(x->dtype), cases[i].name);
        assert_int_equal(ft_io_dtype_bits(x->dtype), cases[i].bits);
        assert_int_equal(x->bytes, bytes);
        ft_io_safetensors_close(file);
    }
    assert_string_equal(ft_io_dtype_name(FT_IO_DTYPE_COUNT), "?");
    assert_int_equal(ft_io_dtype_bits(FT_IO_DTYPE_COUNT), 0);
    assert_int_equal(ft_io_dtype_of(FT_F32), FT_IO_F32);
    assert_int_equal(ft_io_dtype_of(FT_BF16), FT_IO_BF16);
    assert_int_equal(ft_io_dtype_of(FT_I32), FT_IO_I32);
}

static void reads_unusual_but_valid_files(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data_bytes;
        int64_t count;
        const char *name; /* of the first tensor */
    } cases[] = {
        {"{}", 0, 0, NULL},
        {"{} \t\n\r", 0, 0, NULL},
        {"{\"__metadata__\":{}}", 0, 0, NULL},
        {"{\"\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, 1, ""},
        /* Empty tensors lie between others, and several at one place. */
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"c\":{\"dtype\":\"F32\",\"shape\":[7,0,9],\"data_offsets\":[4,4]},"
         "\"d\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[4,4]}}",
         4, 4, "a"},
        {"{\"x\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,2],\"data_offsets\":[0,2]}}", 2, 1,
         "x"},
        /* Every escape; U+00E9, U+20AC, U+1F600 escaped and not. */
        {"{\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20AC\\ud83d\\uDE00\xc3\xa9\xe2\x82\xac"
         "\xf0\x9f\x98\x80\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
         1, 1,
         "\"\\/\b\f\n\r\tA\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"
         "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"},
        /* Keys may be escaped too. */
        {"{\"x\":{\"\\u0064type\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, 1, "x"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ft_io_safetensors *file;
        const char *path =
            write_tensors("unusual.safetensors", cases[i].header, cases[i].data_bytes);
        assert_ok(ft_io_safetensors_open(path, &file));
        assert_int_equal(ft_io_safetensors_count(file), cases[i].count);
        if (cases[i].name != NULL) {
            assert_string_equal(ft_io_safetensors_at(file, 0)->name, cases[i].name);
            assert_non_null(ft_io_safetensors_find(file, cases[i].name));
        }
        ft_io_safetensors_close(file);
    }
}

static void finds_among_many(void **state)
{
    (void)state;
    enum { N = 777 };
    char *header = (char *)malloc(N * 100);
    size_t at = 0;
    assert_non_null(header);
    for (int i = 0; i < N; i++) /* 777 and 10 have no common factor: every name once, unsorted */
        at += (size_t)sprintf(header + at,
                              "%s\"t%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                              i == 0 ? "{" : ",", i * 10 % N, i, i + 1);
    strcpy(header + at, "}");
    const char *path = write_tensors("many.safetensors", header, N);
    ft_io_safetensors *file;
    assert_ok(ft_io_safetensors_open(path, &file));
    for (int i = 0; i < N; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i * 10 % N);
        const ft_io_tensor *t = ft_io_safetensors_find(file, name);
        assert_non_null(t);
        assert_ptr_equal(t, ft_io_safetensors_at(file, i));
        assert_int_equal(*(const unsigned char *)t->data, i & 255);
    }
    assert_null(ft_io_safetensors_find(file, "t777"));
    assert_null(ft_io_safetensors_find(file, ""));
    ft_io_safetensors_close(file);
    free(header);
}

/* -------------------------------------------------------------------------- malformed tensors */

#define T1(rest) "{\"x\":{" rest "}}"
#define F32_2 "\"dtype\":\"F32\",\"shape\":[2],"

static void refuses_malformed_headers(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data_bytes;
        ft_status status;
        const char *reason;
    } cases[] = {
        /* Not the JSON of a header. */
        {"", 0, FT_ERR_DATA, "expected '{' as its first byte"},
        {"[]", 0, FT_ERR_DATA, "expected '{' as its first byte"},
        {"\"x\"", 0, FT_ERR_DATA, "expected '{' as its first byte"},
        {" {}", 0, FT_ERR_DATA, "expected '{' as its first byte"},
        {"\xef\xbb\xbf{}", 0, FT_ERR_DATA, "found byte 0xef"},
        {"{", 0, FT_ERR_DATA, "the header's end"},
        {"{}x", 0, FT_ERR_DATA, "expected nothing but blanks after the object, found 'x'"},
        {"{}{}", 0, FT_ERR_DATA, "expected nothing but blanks after the object"},
        {"{,}", 0, FT_ERR_DATA, "expected a tensor's name, found ','"},
        {"{x:1}", 0, FT_ERR_DATA, "expected a tensor's name, found 'x'"},
        {"{'x':1}", 0, FT_ERR_DATA, "expected a tensor's name"},
        {"{1:1}", 0, FT_ERR_DATA, "expected a tensor's name"},
        {"{\"x\"}", 0, FT_ERR_DATA, "expected ':' after a name"},
        {"{\"x\":}", 0, FT_ERR_DATA, "expected '{' of the tensor's description"},
        {"{\"x\":null}", 0, FT_ERR_DATA, "expected '{' of the tensor's description, found 'n'"},
        {"{\"x\":[1]}", 0, FT_ERR_DATA, "expected '{' of the tensor's description"},
        {"{\"__metadata__\":{},}", 0, FT_ERR_DATA, "expected a tensor's name, found '}'"},
        {"{\"__metadata__\":{} \"x\":{}}", 0, FT_ERR_DATA, "expected ',' or '}', found '\"'"},
        /* Strings. */
        {"{\"x", 0, FT_ERR_DATA, "at the end of a string"},
        {"{\"x\\", 0, FT_ERR_DATA, "an escape of JSON"},
        {"{\"x\\q\":{}}", 0, FT_ERR_DATA, "an escape of JSON after '\\', found 'q'"},
        {"{\"x\\u12g4\":{}}", 0, FT_ERR_DATA, "four hexadecimal digits"},
        {"{\"x\\u12", 0, FT_ERR_DATA, "four hexadecimal digits"},
        {"{\"x\\u0000\":{}}", 0, FT_ERR_DATA, "\\u0000"},
        {"{\"x\\ud800\":{}}", 0, FT_ERR_DATA, "surrogate"},
        {"{\"x\\udc00\":{}}", 0, FT_ERR_DATA, "surrogate"},
        {"{\"x\\ud800\\u0041\":{}}", 0, FT_ERR_DATA, "surrogate"},
        {"{\"x\\ud800\\ud800\":{}}", 0, FT_ERR_DATA, "surrogate"},
        {"{\"a\tb\":{}}", 0, FT_ERR_DATA, "control character 0x09"},
        {"{\"a\nb\":{}}", 0, FT_ERR_DATA, "control character 0x0a"},
        {"{\"\xff\":{}}", 0, FT_ERR_DATA, "byte 0xff in a string is not UTF-8"},
        {"{\"\x80\":{}}", 0, FT_ERR_DATA, "not UTF-8"},
        {"{\"\xc3(\":{}}", 0, FT_ERR_DATA, "not UTF-8"},
        {"{\"\xc0\xaf\":{}}", 0, FT_ERR_DATA, "not UTF-8"},         /* overlong '/' */
        {"{\"\xe0\x80\xaf\":{}}", 0, FT_ERR_DATA, "not UTF-8"},     /* overlong */
        {"{\"\xf0\x80\x80\xaf\":{}}", 0, FT_ERR_DATA, "not UTF-8"}, /* overlong */
        {"{\"\xed\xa0\x80\":{}}", 0, FT_ERR_DATA, "not UTF-8"},     /* a surrogate */
        {"{\"\xf4\x90\x80\x80\":{}}", 0, FT_ERR_DATA, "not UTF-8"}, /* above U+10FFFF */
        {"{\"\xe2\x82", 0, FT_ERR_DATA, "not UTF-8"},               /* cut */
        /* Metadata. */
        {"{\"__metadata__\":[]}", 0, FT_ERR_DATA, "'{' of __metadata__"},
        {"{\"__metadata__\":{\"a\":1}}", 0, FT_ERR_DATA, "a string as value in __metadata__"},
        {"{\"__metadata__\":{\"a\":{}}}", 0, FT_ERR_DATA, "a string as value in __metadata__"},
        {"{\"__metadata__\":{\"a\":null}}", 0, FT_ERR_DATA, "a string as value in __metadata__"},
        {"{\"__metadata__\":{\"a\":\"\\u0000\"}}", 0, FT_ERR_DATA, "\\u0000"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, FT_ERR_DATA, "__metadata__ twice"},
        {"{\"__metadata__\":{\"a\":\"1\",\"b\":\"2\",\"a\":\"3\"}}", 0, FT_ERR_DATA,
         "__metadata__ has key \"a\" twice"},
        {"{\"__metadata__\":{\"a\":\"1\",\"\\u0061\":\"3\"}}", 0, FT_ERR_DATA, "key \"a\" twice"},
        /* A tensor's keys. */
        {T1(""), 0, FT_ERR_DATA, "key \"dtype\" is missing"},
        {T1("\"shape\":[],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA, "key \"dtype\" is missing"},
        {T1("\"dtype\":\"F32\",\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "key \"shape\" is missing"},
        {T1("\"dtype\":\"F32\",\"shape\":[]"), 4, FT_ERR_DATA, "key \"data_offsets\" is missing"},
        {T1("\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]"), 4,
         FT_ERR_DATA, "key \"dtype\" twice"},
        {T1("\"dtype\":\"F32\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "key \"shape\" twice"},
        {T1(F32_2 "\"data_offsets\":[0,8],\"strides\":[1]"), 8, FT_ERR_DATA,
         "unknown key \"strides\""},
        {"{\"x\":{" F32_2 "\"data_offsets\":[0,8]},\"x\":{" F32_2 "\"data_offsets\":[8,16]}}", 16,
         FT_ERR_DATA, "names tensor \"x\" twice"},
        /* dtype. */
        {T1("\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]"), 4, FT_ERR_UNSUPPORTED,
         "unknown dtype \"F33\""},
        {T1("\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]"), 4, FT_ERR_UNSUPPORTED,
         "unknown dtype \"f32\""},
        {T1("\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "a string as dtype"},
        {T1("\"dtype\":null,\"shape\":[1],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "a string as dtype"},
        /* shape. */
        {T1("\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "negative number"},
        {T1("\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "a fraction"},
        {T1("\"dtype\":\"F32\",\"shape\":[1e0],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "a fraction"},
        {T1("\"dtype\":\"F32\",\"shape\":[01],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "leading zero"},
        {T1("\"dtype\":\"F32\",\"shape\":[+1],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "a dimension"},
        {T1("\"dtype\":\"F32\",\"shape\":[\"1\"],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "a dimension"},
        {T1("\"dtype\":\"F32\",\"shape\":[[1]],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "a dimension"},
        {T1("\"dtype\":\"F32\",\"shape\":[1,],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "a dimension"},
        {T1("\"dtype\":\"F32\",\"shape\":[1 1],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "',' or ']'"},
        {T1("\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "'[' of the shape"},
        {T1("\"dtype\":\"F32\",\"shape\":null,\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "'[' of the shape"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1", 4, FT_ERR_DATA, "the header's end"},
        {T1("\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]"), 1,
         FT_ERR_UNSUPPORTED, "more than 8 dimensions"},
        {T1("\"dtype\":\"U8\",\"shape\":[9223372036854775808],\"data_offsets\":[0,1]"), 1,
         FT_ERR_DATA, "above 2^63 - 1"},
        {T1("\"dtype\":\"U8\",\"shape\":[99999999999999999999999],\"data_offsets\":[0,1]"), 1,
         FT_ERR_DATA, "above 2^63 - 1"},
        {T1("\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]"), 0,
         FT_ERR_DATA, "number of elements overflows"},
        {T1("\"dtype\":\"U8\",\"shape\":[0,4294967296,4294967296],\"data_offsets\":[0,0]"), 0,
         FT_ERR_DATA, "number of elements overflows"},
        {T1("\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]"), 0,
         FT_ERR_DATA, "number of bits overflows"},
        {T1("\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]"), 2, FT_ERR_DATA,
         "whole bytes"},
        {T1("\"dtype\":\"F6_E2M3\",\"shape\":[2],\"data_offsets\":[0,2]"), 2, FT_ERR_DATA,
         "whole bytes"},
        /* data_offsets. */
        {T1(F32_2 "\"data_offsets\":[0]"), 8, FT_ERR_DATA, "',' between two offsets"},
        {T1(F32_2 "\"data_offsets\":[]"), 8, FT_ERR_DATA, "the first of two offsets"},
        {T1(F32_2 "\"data_offsets\":[0,8,9]"), 8, FT_ERR_DATA, "']' after two offsets"},
        {T1(F32_2 "\"data_offsets\":8"), 8, FT_ERR_DATA, "'[' of data_offsets"},
        {T1(F32_2 "\"data_offsets\":[-8,0]"), 8, FT_ERR_DATA, "negative number"},
        {T1(F32_2 "\"data_offsets\":[0,8.0]"), 8, FT_ERR_DATA, "a fraction"},
        {T1(F32_2 "\"data_offsets\":[8,0]"), 8, FT_ERR_DATA, "[8, 0] run backwards"},
        {T1(F32_2 "\"data_offsets\":[0,8]"), 7, FT_ERR_DATA, "outside the file, which has 7 bytes"},
        {T1(F32_2 "\"data_offsets\":[0,8]"), 0, FT_ERR_DATA, "outside the file, which has 0 bytes"},
        {T1(F32_2 "\"data_offsets\":[9223372036854775799,9223372036854775807]"), 8, FT_ERR_DATA,
         "outside the file"},
        {T1(F32_2 "\"data_offsets\":[0,18446744073709551615]"), 8, FT_ERR_DATA, "above 2^63 - 1"},
        {T1(F32_2 "\"data_offsets\":[0,4]"), 4, FT_ERR_DATA,
         "4 bytes, but its shape of 2 elements in F32 needs 8"},
        {T1(F32_2 "\"data_offsets\":[0,12]"), 12, FT_ERR_DATA, "needs 8"},
        {T1("\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,4]"), 4, FT_ERR_DATA, "needs 0"},
        {T1("\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,0]"), 0, FT_ERR_DATA, "needs 4"},
        /* The tensors together. */
        {T1(F32_2 "\"data_offsets\":[0,8]"), 9, FT_ERR_DATA, "1 bytes beyond the last tensor"},
        {"{}", 5, FT_ERR_DATA, "5 bytes beyond the last tensor"},
        {T1(F32_2 "\"data_offsets\":[4,12]"), 12, FT_ERR_DATA,
         "hole of 4 bytes before tensor \"x\""},
        {"{\"x\":{" F32_2 "\"data_offsets\":[0,8]},\"y\":{" F32_2 "\"data_offsets\":[12,20]}}", 20,
         FT_ERR_DATA, "hole of 4 bytes before tensor \"y\""},
        {"{\"x\":{" F32_2 "\"data_offsets\":[0,8]},\"y\":{" F32_2 "\"data_offsets\":[4,12]}}", 12,
         FT_ERR_DATA, "\"y\" begins at data byte 4 and overlaps \"x\""},
        {"{\"x\":{" F32_2 "\"data_offsets\":[0,8]},\"y\":{" F32_2 "\"data_offsets\":[0,8]}}", 8,
         FT_ERR_DATA, "overlaps"},
        {"{\"x\":{" F32_2 "\"data_offsets\":[0,8]},"
         "\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,4]}}",
         8, FT_ERR_DATA, "\"e\" begins at data byte 4 and overlaps \"x\""},
        {"{\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,4]}}", 4, FT_ERR_DATA,
         "hole"},
    };
    const size_t n = sizeof cases / sizeof *cases;
    assert_true(n >= 30);
    for (size_t i = 0; i < n; i++) {
        const char *path = write_tensors("bad.safetensors", cases[i].header, cases[i].data_bytes);
        ft_io_safetensors *file = (ft_io_safetensors *)&file;
        assert_error(ft_io_safetensors_open(path, &file), cases[i].status, path, cases[i].reason);
        assert_null(file);
    }
}

static void refuses_malformed_files(void **state)
{
    (void)state;
    ft_io_safetensors *file;
    const char *path = write_file("empty.safetensors", "", 0);
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_DATA, path, "is empty");
    path = write_file("short.safetensors", "\2\0\0\0\0\0\0", 7);
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_DATA, path,
                 "7 bytes is shorter than the 8");
    path = write_file("length.safetensors", "\3\0\0\0\0\0\0\0{}", 10);
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_DATA, path,
                 "header length 3 runs past the end of the file, which has 2 bytes after it");
    path = write_file("zero.safetensors", "\0\0\0\0\0\0\0\0", 8);
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_DATA, path, "expected '{'");
    path = write_file("huge.safetensors", "\1\341\365\5\0\0\0\0{}", 10); /* 100000001 */
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_DATA, path,
                 "header length 100000001 is above the limit of 100000000");
    path = write_file("text.safetensors", "{\"a\":1}\n", 8);
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_DATA, path, "above the limit");
    path = write_file("most.safetensors", "\377\377\377\377\377\377\377\377{}", 10);
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_DATA, path, "18446744073709551615");
    path = write_file("nul.safetensors", "\4\0\0\0\0\0\0\0{\0}\0", 12);
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_DATA, path, "found byte 0x00");
    path = write_file("nul2.safetensors", "\6\0\0\0\0\0\0\0{\"\0\":1", 14);
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_DATA, path, "control character 0x00");
    assert_error(ft_io_safetensors_open(temp_directory, &file), FT_ERR_IO, temp_directory, "is a directory");
    path = in_directory("missing.safetensors");
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_IO, path, "No such file");
    assert_error(ft_io_safetensors_open("/dev/null", &file), FT_ERR_IO, "/dev/null",
                 "regular file");
    path = in_directory("pipe");
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_IO, path, "regular file");
    assert_error(ft_io_safetensors_open(NULL, &file), FT_ERR_ARG, "path", "NULL");
    assert_error(ft_io_safetensors_open(path, NULL), FT_ERR_ARG, "out", "NULL");
    path = write_tensors("secret.safetensors", "{}", 0);
    assert_int_equal(chmod(path, 0), 0);
    if (geteuid() != 0) /* who is root may read it all the same */
        assert_error(ft_io_safetensors_open(path, &file), FT_ERR_IO, path, "Permission denied");
}

static void messages_stay_on_one_line(void **state)
{
    (void)state;
    char header[400], name[300];
    memset(name, 'n', sizeof name - 1);
    memcpy(name, "a\\nb\\u001b\\u007f", 16);
    name[sizeof name - 1] = 0;
    snprintf(header, sizeof header, "{\"%s\":{}}", name);
    const char *path = write_tensors("name.safetensors", header, 0);
    ft_io_safetensors *file;
    assert_error(ft_io_safetensors_open(path, &file), FT_ERR_DATA, "\"a?b??nnn",
                 "nn...\": key \"dtype\"");
}

/* Whatever a byte is changed to, and wherever the file is cut, opening it ends with an error or
   with tensors that lie inside the file. */
static void survives_every_damage_of_a_byte(void **state)
{
    (void)state;
    static const char header[] =
        "{\"__metadata__\":{\"k\\n\":\"v\"},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
        "\"\\u00e9\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[8,11]}}";
    static const unsigned char values[] = {0,   1,   '"', '\\', '{', '}',  '[',  ']',  ',', ':',
                                           '0', '9', '-', ' ',  'u', 0x7f, 0x80, 0xc3, 0xff};
    size_t n;
    char *whole = read_file(write_tensors("whole.safetensors", header, 11), &n);
    ft_io_safetensors *file;
    for (size_t at = 0; at < n; at++) {
        const char *path = write_file("cut.safetensors", whole, at);
        assert_error(ft_io_safetensors_open(path, &file), FT_ERR_DATA, path, "safetensors");
        for (size_t k = 0; k < sizeof values && at < n - 11; k++) {
            const char kept = whole[at];
            whole[at] = (char)values[k];
            path = write_file("damaged.safetensors", whole, n);
            whole[at] = kept;
            if (ft_io_safetensors_open(path, &file) != FT_OK) {
                assert_non_null(strstr(ft_last_error(), path));
                continue;
            }
            size_t total = 0;
            for (int64_t i = 0; i < ft_io_safetensors_count(file); i++) {
                const ft_io_tensor *t = ft_io_safetensors_at(file, i);
                total += t->bytes;
                for (size_t b = 0; b < t->bytes; b++)
                    assert_in_range(((const unsigned char *)t->data)[b], 0, 10);
            }
            assert_int_equal(total, 11);
            ft_io_safetensors_close(file);
        }
    }
    free(whole);
}

/* ----------------------------------------------------------------------------- writing tensors */

static void writes_the_bytes_of_the_format(void **state)
{
    (void)state;
    static const unsigned char floats[8] = {0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x00, 0xc0};
    static const int64_t two[1] = {2}, one_one[2] = {1, 1};
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\","
        "\"q\\\"\":\"\\u000a\\u001f\xc3\xa9\"},"
        "\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
        "\"a\\\\b\":{\"dtype\":\"U8\",\"shape\":[1,1],\"data_offsets\":[8,9]},"
        "\"e\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[9,11]}}";
    const char *path = in_directory("new.safetensors");
    ft_io_safetensors_writer *writer;
    assert_ok(ft_io_safetensors_create(path, &writer));
    assert_ok(ft_io_safetensors_set_metadata(writer, "format", "pt"));
    assert_ok(ft_io_safetensors_set_metadata(writer, "q\"", "\n\x1f\xc3\xa9"));
    assert_ok(ft_io_safetensors_add(writer, "w", FT_IO_F32, 1, two, floats));
    assert_ok(ft_io_safetensors_add(writer, "a\\b", FT_IO_U8, 2, one_one, "z"));
    assert_ok(ft_io_safetensors_add(writer, "e", FT_IO_F16, 0, NULL, "\0<"));
    assert_int_equal(count_files(0), 0); /* nothing is there before the end */
    assert_ok(ft_io_safetensors_finish(writer));
    assert_int_equal(count_files(0), 1); /* and no temporary file after it */

    size_t n;
    char *bytes = read_file(path, &n);
    const size_t padded = (sizeof header - 1 + 7) / 8 * 8;
    assert_int_equal(n, 8 + padded + 11);
    assert_int_equal((unsigned char)bytes[0], padded & 255);
    assert_int_equal((unsigned char)bytes[1], padded >> 8);
    assert_memory_equal(bytes + 2, "\0\0\0\0\0\0", 6);
    assert_memory_equal(bytes + 8, header, sizeof header - 1);
    for (size_t i = sizeof header - 1; i < padded; i++) assert_int_equal(bytes[8 + i], ' ');
    assert_memory_equal(bytes + 8 + padded, floats, 8);
    assert_memory_equal(bytes + 8 + padded + 8, "z\0<", 3);
    free(bytes);
}

typedef struct produced {
    size_t expected; /* offset of the next call */
    int calls, fail_at;
} produced;

static unsigned char byte_at(size_t offset)
{
    return (unsigned char)(offset * 7 + (offset >> 10));
}

static ft_status produce(void *user, const char *name, size_t offset, size_t bytes, void *buffer)
{
    produced *p = (produced *)user;
    if (p->calls++ == p->fail_at) return ft_error(FT_ERR_PEER, "%s: the producer gave up", name);
    assert_string_equal(name, "large");
    assert_int_equal(offset, p->expected);
    assert_true(bytes > 0 && bytes <= 1 << 20 && bytes % 4 == 0);
    for (size_t i = 0; i < bytes; i++) ((unsigned char *)buffer)[i] = byte_at(offset + i);
    p->expected += bytes;
    return FT_OK;
}

static void writes_what_it_then_reads(void **state)
{
    (void)state;
    static const int64_t large[3] = {3, 229, 1001}, empty[2] = {0, 5}, four[1] = {4};
    static const int64_t small[4] = {-1, INT64_MAX, INT64_MIN, 0};
    const char *path = write_file("again.safetensors", "old", 3); /* is replaced */
    const size_t bytes = 3 * 229 * 1001 * 4;
    produced p = {0, 0, -1};
    ft_io_safetensors_writer *writer;
    assert_ok(ft_io_safetensors_create(path, &writer));
    assert_ok(ft_io_safetensors_add_fill(writer, "large", FT_IO_F32, 3, large, produce, &p));
    assert_ok(ft_io_safetensors_add(writer, "none", FT_IO_F32, 2, empty, NULL));
    assert_ok(ft_io_safetensors_add(writer, "\xf0\x9f\x98\x80 \t\"", FT_IO_I64, 1, four, small));
    assert_ok(ft_io_safetensors_finish(writer));
    assert_int_equal(p.expected, bytes);
    assert_int_equal(p.calls, 3);

    ft_io_safetensors *file;
    assert_ok(ft_io_safetensors_open(path, &file));
    assert_int_equal(ft_io_safetensors_count(file), 3);
    assert_int_equal(ft_io_safetensors_metadata_count(file), 0);
    const ft_io_tensor *t = ft_io_safetensors_find(file, "large");
    assert_int_equal(t->bytes, bytes);
    assert_int_equal((uintptr_t)t->data % 8, 0);
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)t->data)[i] != byte_at(i)) fail_msg("byte %zu differs", i);
    assert_int_equal(ft_io_safetensors_find(file, "none")->bytes, 0);
    int64_t integers[4];
    assert_ok(
        ft_io_read_int(ft_io_safetensors_find(file, "\xf0\x9f\x98\x80 \t\""), 0, 4, integers));
    assert_memory_equal(integers, small, sizeof small);
    ft_io_safetensors_close(file);
}

static void refuses_what_cannot_be_written(void **state)
{
    (void)state;
    static const int64_t one[1] = {1}, negative[1] = {-1}, three[1] = {3};
    static const int64_t huge[2] = {(int64_t)1 << 40, (int64_t)1 << 40};
    static const int64_t nine[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    const char *path = in_directory("refused.safetensors");
    ft_io_safetensors_writer *w;
    assert_error(ft_io_safetensors_create("", &w), FT_ERR_ARG, "ft_io_safetensors_create", "path");
    assert_error(ft_io_safetensors_create(NULL, &w), FT_ERR_ARG, "ft_io_safetensors_create",
                 "path");
    assert_ok(ft_io_safetensors_create(path, &w));
    assert_error(ft_io_safetensors_add(w, "__metadata__", FT_IO_U8, 1, one, "x"), FT_ERR_ARG, path,
                 "reserved");
    assert_error(ft_io_safetensors_add(w, "\xff", FT_IO_U8, 1, one, "x"), FT_ERR_ARG, path,
                 "not UTF-8");
    assert_error(ft_io_safetensors_add(w, "x", FT_IO_DTYPE_COUNT, 1, one, "x"), FT_ERR_ARG, path,
                 "dtype");
    assert_error(ft_io_safetensors_add(w, "x", FT_IO_U8, 1, negative, "x"), FT_ERR_SHAPE, path,
                 "dimension 0 is -1");
    assert_error(ft_io_safetensors_add(w, "x", FT_IO_U8, 9, nine, "x"), FT_ERR_SHAPE, path,
                 "9 dimensions");
    assert_error(ft_io_safetensors_add(w, "x", FT_IO_U8, -1, one, "x"), FT_ERR_SHAPE, path,
                 "dimensions");
    assert_error(ft_io_safetensors_add(w, "x", FT_IO_U8, 2, huge, "x"), FT_ERR_SHAPE, path,
                 "overflow");
    assert_error(ft_io_safetensors_add(w, "x", FT_IO_F4, 1, three, "xx"), FT_ERR_SHAPE, path,
                 "whole bytes");
    assert_error(ft_io_safetensors_add(w, "x", FT_IO_U8, 1, one, NULL), FT_ERR_ARG, path,
                 "no data");
    assert_error(ft_io_safetensors_add(w, NULL, FT_IO_U8, 1, one, "x"), FT_ERR_ARG, "name", "NULL");
    assert_error(ft_io_safetensors_add(w, "x", FT_IO_U8, 1, NULL, "x"), FT_ERR_ARG, "shape",
                 "NULL");
    assert_error(ft_io_safetensors_add_fill(w, "x", FT_IO_U8, 1, one, NULL, NULL), FT_ERR_ARG,
                 "fill", "NULL");
    assert_error(ft_io_safetensors_set_metadata(w, "k", "\xff"), FT_ERR_ARG, path, "not UTF-8");
    assert_error(ft_io_safetensors_set_metadata(w, "k", NULL), FT_ERR_ARG, "metadata", "NULL");
    /* None of these is in the file. */
    assert_ok(ft_io_safetensors_add(w, "x", FT_IO_U8, 1, one, "x"));
    assert_ok(ft_io_safetensors_finish(w));
    ft_io_safetensors *file;
    assert_ok(ft_io_safetensors_open(path, &file));
    assert_int_equal(ft_io_safetensors_count(file), 1);
    ft_io_safetensors_close(file);

    assert_ok(ft_io_safetensors_create(path, &w));
    assert_ok(ft_io_safetensors_add(w, "x", FT_IO_U8, 1, one, "1"));
    assert_ok(ft_io_safetensors_add(w, "y", FT_IO_U8, 1, one, "2"));
    assert_ok(ft_io_safetensors_add(w, "x", FT_IO_U8, 1, one, "3"));
    assert_error(ft_io_safetensors_finish(w), FT_ERR_ARG, path, "tensor \"x\" was added twice");
    assert_ok(ft_io_safetensors_create(path, &w));
    assert_ok(ft_io_safetensors_set_metadata(w, "k", "1"));
    assert_ok(ft_io_safetensors_set_metadata(w, "k", "1"));
    assert_error(ft_io_safetensors_finish(w), FT_ERR_ARG, path,
                 "metadata key \"k\" was added twice");
    assert_error(ft_io_safetensors_finish(NULL), FT_ERR_ARG, "writer", "NULL");
    assert_ok(ft_io_safetensors_create(path, &w));
    assert_ok(ft_io_safetensors_add(w, "x", FT_IO_U8, 1, one, "1"));
    ft_io_safetensors_abandon(w);
    ft_io_safetensors_abandon(NULL);
    assert_int_equal(count_files(0), 1);
}

/* Tries to write a small file to `path`. */
static ft_status write_to(const char *path)
{
    static const int64_t one[1] = {1};
    ft_io_safetensors_writer *writer;
    assert_ok(ft_io_safetensors_create(path, &writer));
    assert_ok(ft_io_safetensors_add(writer, "x", FT_IO_U8, 1, one, "x"));
    return ft_io_safetensors_finish(writer);
}

static void reports_places_that_cannot_be_written(void **state)
{
    (void)state;
    const char *path = in_directory("missing/x.safetensors");
    assert_error(write_to(path), FT_ERR_IO, path, "No such file or directory");
    write_file("plain", "p", 1);
    path = in_directory("plain/x.safetensors");
    assert_error(write_to(path), FT_ERR_IO, path, "Not a directory");
    assert_error(write_to(temp_directory), FT_ERR_IO, temp_directory, "is a directory");
    /* No process may create files there, root included. */
    assert_error(write_to("/proc/x.safetensors"), FT_ERR_IO, "/proc/x.safetensors", "temporary");
    path = in_directory("closed");
    assert_int_equal(mkdir(path, 0555), 0);
    path = in_directory("closed/x.safetensors");
    if (geteuid() != 0) assert_error(write_to(path), FT_ERR_IO, path, "Permission denied");
    path = in_directory("pipe");
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_error(write_to(path), FT_ERR_IO, path, "not a regular file");
    assert_int_equal(count_files(0), 3);
}

static void a_failed_write_leaves_the_old_file(void **state)
{
    (void)state;
    static const int64_t n[1] = {2 << 20};
    const char *path = write_file("kept.safetensors", "kept", 4);
    ft_io_safetensors_writer *writer;
    produced p = {0, 0, 1};
    assert_ok(ft_io_safetensors_create(path, &writer));
    assert_ok(ft_io_safetensors_add_fill(writer, "large", FT_IO_F32, 1, n, produce, &p));
    assert_error(ft_io_safetensors_finish(writer), FT_ERR_PEER, "large", "the producer gave up");
    assert_file_is(path, "kept");
    assert_int_equal(count_files(0), 1);

    /* A limit on the size of files stands in for a disk that is full. */
    struct rlimit old, tight;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    tight = old;
    tight.rlim_cur = 1 << 20;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    produced q = {0, 0, -1};
    assert_ok(ft_io_safetensors_create(path, &writer));
    assert_ok(ft_io_safetensors_add_fill(writer, "large", FT_IO_F32, 1, n, produce, &q));
    const ft_status status = ft_io_safetensors_finish(writer);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_error(status, FT_ERR_IO, path, "File too large");
    assert_file_is(path, "kept");
    assert_int_equal(count_files(0), 1);
}

/* Each kind of file that is written here, of `path`. */
static ft_status write_kind(int kind, const char *path)
{
    ft_io_hf_config config = ft_io_hf_config_default();
    ft_io_json *json = NULL;
    ft_io_log *log = NULL;
    ft_io_tb *tb = NULL;
    ft_io_report report;
    memset(&report, 0, sizeof report);
    config.hidden = config.layers = config.heads = config.kv_heads = config.head_dim = 2;
    config.intermediate = config.vocab = 2;
    snprintf(config.model_type, sizeof config.model_type, "llama");
    switch (kind) {
    case 0: return write_to(path);
    case 1: return ft_io_hf_config_write(&config, path);
    case 2: return ft_io_json_open(path, &json);
    case 3: return ft_io_log_open(path, 0, &log);
    case 4: return ft_io_log_open(path, 1, &log);
    case 5: return ft_io_tb_open(temp_directory, 0, &tb);
    case 6: return ft_io_report_write(path, &report);
    default: return ft_io_trace_write(path, 0, NULL);
    }
}

static void every_opening_of_a_file_to_write_can_be_refused(void **state)
{
    (void)state;
    const char *path = in_directory("none");
    for (int kind = 0; kind < 8; kind++) {
        refused_opening = EDQUOT;
        const ft_status status = write_kind(kind, path);
        refused_opening = 0;
        if (status == FT_OK) fail_msg("kind %d: opened", kind);
        assert_error(status, FT_ERR_IO, kind == 5 ? temp_directory : path, strerror(EDQUOT));
        assert_int_equal(count_files(0), 0);
    }
}

static void temporary_files_of_the_dead_are_not_in_the_way(void **state)
{
    (void)state;
    char name[64];
    ft__io_name_beside("x.safetensors", "tmp", 0, name, sizeof name);
    const char *stale = write_file(name, "stale", 5);
    assert_ok(write_to(in_directory("x.safetensors")));
    assert_file_is(stale, "stale");
    assert_int_equal(count_files(0), 2);
}

/* Kills the process in the middle of its file, or lets it wait until it may go on. */
typedef struct pausing { int kills, say, hear; } pausing;

static ft_status pause_inside(void *user, const char *name, size_t offset, size_t bytes,
                              void *buffer)
{
    const pausing *p = (const pausing *)user;
    char byte = 0;
    (void)name;
    if (p->kills && offset > 0) raise(SIGKILL);
    if (!p->kills && offset > 0 && (write(p->say, "x", 1) != 1 || read(p->hear, &byte, 1) != 1))
        return ft_error(FT_ERR_IO, "no pipe");
    memset(buffer, 'x', bytes);
    return FT_OK;
}

/* In a process of its own; its number. */
static pid_t write_in_child(const char *path, pausing *p)
{
    static const int64_t n[1] = {(1 << 20) + 1};
    const pid_t child = fork();
    if (child != 0) return child;
    alarm(20); /* when the test has failed, nobody lets it go on */
    ft_io_safetensors_writer *writer;
    ft_status status = ft_io_safetensors_create(path, &writer);
    if (status == FT_OK)
        status = ft_io_safetensors_add_fill(writer, "x", FT_IO_U8, 1, n, pause_inside, p);
    if (status == FT_OK) status = ft_io_safetensors_finish(writer);
    _exit(status == FT_OK ? 0 : 1);
}

static void what_killed_processes_left_is_removed(void **state)
{
    (void)state;
    int ended, to_child[2], to_us[2];
    char byte, path[320];
    pausing killed = {1, -1, -1}, lives = {0, -1, -1};
    snprintf(path, sizeof path, "%s", in_directory("x.safetensors"));
    const pid_t dead = write_in_child(path, &killed);
    assert_int_equal(waitpid(dead, &ended, 0), dead);
    assert_true(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGKILL);
    assert_int_equal(count_files(0), 1);
    assert_int_equal(pipe(to_child), 0);
    assert_int_equal(pipe(to_us), 0);
    lives.say = to_us[1];
    lives.hear = to_child[0];
    const pid_t child = write_in_child(path, &lives);
    assert_int_equal(read(to_us[0], &byte, 1), 1);
    assert_int_equal(count_files(0), 1); /* its own: the dead one's is gone */

    /* One that lives is in nobody's way, and keeps its file. Other targets are not touched, nor what
       is spelled otherwise: another host, no number of a process, one too many. */
    static const char *const kept[] = {
        "y.safetensors.tmp-%08x-%d-0",    "x.safetensors.old-%08x-%d-0",
        "x.safetensors.tmp-%08x-%d-0.gz", "x.safetensors.tmp-%08x-0%d-0",
        "x.safetensors.tmp-%08x-%d--1",   "x.safetensors.tmp-%08x-%d",
        "x.safetensors.tmp-%08x-%d-00",   "x.safetensors.tmp-%08x--%d-0",
        "x.safetensors.tmp-f%08x-%d-0"};
    enum { FORMS = sizeof kept / sizeof *kept, KEPT = FORMS + 2 };
    char name[64];
    for (int i = 0; i < FORMS; i++) {
        snprintf(name, sizeof name, kept[i], (unsigned)ft__io_host(), (int)dead);
        write_file(name, "kept", 4);
    }
    snprintf(name, sizeof name, kept[0], (unsigned)ft__io_host() ^ 1u, (int)dead);
    name[0] = 'x'; /* another host's */
    write_file(name, "kept", 4);
    snprintf(name, sizeof name, "x.safetensors.tmp-%08x-%d-7", (unsigned)ft__io_host(), (int)dead);
    assert_int_equal(mkdir(in_directory(name), 0777), 0); /* no file: not ours */
    assert_ok(write_to(path));
    assert_int_equal(count_files(0), KEPT + 2);
    assert_int_equal(write(to_child[1], "x", 1), 1);
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_true(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
    assert_int_equal(count_files(0), KEPT + 1);

    /* Of the other file that is written so, and with a path that is only a name. */
    char here[512];
    snprintf(name, sizeof name, "config.json.tmp-%08x-%d-0", (unsigned)ft__io_host(), (int)dead);
    write_file(name, "left", 4);
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(temp_directory), 0);
    const ft_status status = write_kind(1, "config.json");
    assert_int_equal(chdir(here), 0);
    assert_ok(status);
    assert_int_equal(count_files(0), KEPT + 2);
    for (int i = 0; i < 2; i++) {
        close(to_child[i]);
        close(to_us[i]);
    }
}

/* --------------------------------------------------------------------------------- golden files */

static void reads_golden_files(void **state)
{
    (void)state;
    static const char *const places[] = {"tests/golden", "../shared/golden"};
    static const char *const names[] = {"llama_gqa",  "llama_tied", "llama3_rope", "llama_headdim",
                                        "qwen2_bias", "llama_4l",   "qwen3_qknorm"};
    int found = 0;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
            char path[200];
            ft_io_safetensors *file;
            float loss, losses[20];
            snprintf(path, sizeof path, "%s/%s.safetensors", places[i], names[k]);
            if (access(path, R_OK) != 0) continue;
            found++;
            assert_ok(ft_io_safetensors_open(path, &file));
            assert_non_null(ft_io_safetensors_metadata(file, "config"));
            const ft_io_tensor *ids = ft_io_safetensors_find(file, "input_ids");
            assert_non_null(ids);
            assert_int_equal(ids->dtype, FT_IO_I64);
            assert_int_equal(ids->ndim, 2);
            const ft_io_tensor *labels = ft_io_safetensors_find(file, "labels");
            for (int64_t t = 0; t < ids->elems; t++) {
                int64_t id, label;
                assert_ok(ft_io_read_int(ids, t, 1, &id));
                assert_ok(ft_io_read_int(labels, t, 1, &label));
                assert_true(id >= 0 && id < 256 && (label == -100 || (label >= 0 && label < 256)));
            }
            /* The loss of the first step is the loss of the initial weights. */
            assert_ok(ft_io_read_float(ft_io_safetensors_find(file, "loss"), 0, 1, &loss));
            assert_ok(ft_io_read_float(ft_io_safetensors_find(file, "losses"), 0, 20, losses));
            assert_true(fabsf(loss - losses[0]) < 1e-5f * loss && losses[19] < losses[0]);
            ft_io_safetensors_close(file);
        }
    }
    if (found == 0) skip();
}

/* ---------------------------------------------------------------------------------- config.json */

#ifdef FT_CJSON

static ft_io_hf_config parse_config(const char *text)
{
    ft_io_hf_config config;
    assert_ok(ft_io_hf_config_parse(text, "config.json", &config));
    return config;
}

#define SIZES                                                                                      \
    "\"vocab_size\":90,\"hidden_size\":64,\"num_hidden_layers\":2,\"num_attention_heads\":4,"      \
    "\"num_key_value_heads\":2,\"intermediate_size\":128"
#define LLAMA "{\"model_type\":\"llama\"," SIZES
#define MISTRAL "{\"model_type\":\"mistral\",\"rope_theta\":1e6," SIZES
#define QWEN2 "{\"model_type\":\"qwen2\",\"rope_theta\":1e6," SIZES
#define QWEN3 "{\"model_type\":\"qwen3\",\"rope_theta\":1e6," SIZES
#define LLAMA3(rest)                                                                               \
    "{\"factor\":32.0,\"high_freq_factor\":4.0,\"low_freq_factor\":1.0,"                           \
    "\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"" rest "}"

static void reads_configs_of_every_family(void **state)
{
    (void)state;
    ft_io_hf_config c = parse_config(
        "{\"architectures\":[\"LlamaForCausalLM\"],\"attention_bias\":false,"
        "\"attention_dropout\":0.0,"
        "\"bos_token_id\":128000,\"eos_token_id\":128001,\"head_dim\":64,\"hidden_act\":\"silu\","
        "\"hidden_size\":2048,\"initializer_range\":0.02,\"intermediate_size\":8192,"
        "\"max_position_embeddings\":131072,\"mlp_bias\":false,\"model_type\":\"llama\","
        "\"num_attention_heads\":32,\"num_hidden_layers\":16,\"num_key_value_heads\":8,"
        "\"pretraining_tp\":1,\"rms_norm_eps\":1e-05,\"rope_scaling\":" LLAMA3(
            "") ","
                "\"rope_theta\":500000.0,\"tie_word_embeddings\":true,\"torch_dtype\":\"bfloat16\","
                "\"vocab_size\":128256}");
    assert_string_equal(c.model_type, "llama");
    assert_int_equal(c.vocab, 128256);
    assert_int_equal(c.hidden, 2048);
    assert_int_equal(c.layers, 16);
    assert_int_equal(c.heads, 32);
    assert_int_equal(c.kv_heads, 8);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.intermediate, 8192);
    assert_int_equal(c.max_positions, 131072);
    assert_true(c.tie_embeddings && !c.qkv_bias && !c.o_bias && !c.mlp_bias && !c.qk_norm);
    assert_true(c.norm_eps == 1e-5 && c.rope_theta == 500000);
    assert_true(c.rope_scaling.factor == 32 && c.rope_scaling.low_freq_factor == 1);
    assert_true(c.rope_scaling.high_freq_factor == 4 && c.rope_scaling.original_context == 8192);

    /* The first Llama files say neither kv heads nor theta. */
    c = parse_config(
        "{\"model_type\":\"llama\",\"vocab_size\":9,\"hidden_size\":64,"
        "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"intermediate_size\":128}");
    assert_int_equal(c.kv_heads, 4);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.max_positions, 0);
    assert_true(c.rope_theta == 10000 && c.norm_eps == 1e-6 && c.rope_scaling.factor == 0);
    assert_true(!c.tie_embeddings);

    c = parse_config(LLAMA ",\"attention_bias\":true,\"mlp_bias\":true,\"head_dim\":null,"
                           "\"rope_scaling\":null,\"quantization_config\":null}");
    assert_true(c.qkv_bias && c.o_bias && c.mlp_bias && !c.qk_norm);
    c = parse_config(MISTRAL ",\"sliding_window\":null,\"head_dim\":128}");
    assert_true(!c.qkv_bias && !c.o_bias && !c.mlp_bias && c.head_dim == 128 &&
                c.rope_theta == 1e6);
    c = parse_config(QWEN2 ",\"sliding_window\":131072,\"use_sliding_window\":false,"
                           "\"max_window_layers\":28,\"tie_word_embeddings\":true}");
    assert_true(c.qkv_bias && !c.o_bias && !c.qk_norm && c.tie_embeddings && c.head_dim == 16);
    c = parse_config(QWEN3 ",\"attention_bias\":false}");
    assert_true(!c.qkv_bias && !c.o_bias && c.qk_norm && c.head_dim == 128);
    c = parse_config(QWEN3 ",\"attention_bias\":true,\"head_dim\":16}");
    assert_true(c.qkv_bias && c.o_bias && c.qk_norm && c.head_dim == 16);

    /* The newer layout, alone and beside the same theta. */
    c = parse_config(LLAMA ",\"rope_parameters\":" LLAMA3(",\"rope_theta\":5e5") "}");
    assert_true(c.rope_theta == 5e5 && c.rope_scaling.factor == 32);
    c = parse_config(LLAMA ",\"rope_theta\":5e5,\"rope_parameters\":{\"rope_theta\":5e5}}");
    assert_true(c.rope_theta == 5e5 && c.rope_scaling.factor == 0);
    c = parse_config("{\"model_type\":\"qwen2\"," SIZES
                     ",\"rope_parameters\":{\"rope_theta\":1e6,\"rope_type\":\"default\"},"
                     "\"layer_types\":[\"full_attention\",\"full_attention\"]}");
    assert_true(c.rope_theta == 1e6);
    c = parse_config(LLAMA ",\"rope_scaling\":{\"type\":\"default\"}}");
    assert_true(c.rope_theta == 10000 && c.rope_scaling.factor == 0);
}

static void refuses_configs_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        ft_status status;
        const char *reason;
    } cases[] = {
        {"", FT_ERR_DATA, "not JSON"},
        {"{", FT_ERR_DATA, "not JSON"},
        {LLAMA "} x", FT_ERR_DATA, "not JSON"},
        {"[]", FT_ERR_DATA, "not a JSON object"},
        {"{}", FT_ERR_DATA, "\"model_type\" is missing"},
        {"{\"model_type\":5}", FT_ERR_DATA, "\"model_type\" must be a string"},
        {"{\"model_type\":\"mixtral\"," SIZES "}", FT_ERR_UNSUPPORTED, "\"mixtral\""},
        {"{\"model_type\":\"gpt2\"}", FT_ERR_UNSUPPORTED, "\"gpt2\""},
        {"{\"model_type\":\"llama\"}", FT_ERR_DATA, "\"vocab_size\" is missing"},
        {"{\"model_type\":\"llama\",\"vocab_size\":null}", FT_ERR_DATA,
         "\"vocab_size\" is missing"},
        {"{\"model_type\":\"llama\",\"vocab_size\":9,\"hidden_size\":64}", FT_ERR_DATA,
         "\"num_hidden_layers\" is missing"},
        {LLAMA ",\"vocab_size\":91}", FT_ERR_DATA, "\"vocab_size\" is there twice"},
        {LLAMA ",\"head_dim\":0}", FT_ERR_DATA, "\"head_dim\" must be an integer from 1"},
        {LLAMA ",\"head_dim\":-16}", FT_ERR_DATA, "\"head_dim\" must be"},
        {LLAMA ",\"head_dim\":16.5}", FT_ERR_DATA, "\"head_dim\" must be"},
        {LLAMA ",\"head_dim\":\"16\"}", FT_ERR_DATA, "\"head_dim\" must be"},
        {LLAMA ",\"head_dim\":1e300}", FT_ERR_DATA, "\"head_dim\" must be"},
        {LLAMA ",\"head_dim\":15}", FT_ERR_DATA, "15 is odd"},
        {LLAMA ",\"max_position_embeddings\":0}", FT_ERR_DATA, "\"max_position_embeddings\""},
        {LLAMA ",\"rms_norm_eps\":0}", FT_ERR_DATA, "\"rms_norm_eps\" must be a number above 0"},
        {LLAMA ",\"rms_norm_eps\":1e999}", FT_ERR_DATA, "\"rms_norm_eps\" must be"},
        {LLAMA ",\"tie_word_embeddings\":1}", FT_ERR_DATA,
         "\"tie_word_embeddings\" must be true or false"},
        {LLAMA ",\"hidden_act\":\"gelu\"}", FT_ERR_UNSUPPORTED, "\"hidden_act\" is \"gelu\""},
        {LLAMA ",\"attention_dropout\":0.1}", FT_ERR_UNSUPPORTED, "\"attention_dropout\""},
        {LLAMA ",\"num_local_experts\":8}", FT_ERR_UNSUPPORTED, "\"num_local_experts\""},
        {LLAMA ",\"quantization_config\":{\"quant_method\":\"gptq\"}}", FT_ERR_UNSUPPORTED,
         "\"quantization_config\""},
        {LLAMA ",\"partial_rotary_factor\":0.5}", FT_ERR_UNSUPPORTED, "\"partial_rotary_factor\""},
        {LLAMA ",\"sliding_window\":128}", FT_ERR_UNSUPPORTED, "\"sliding_window\""},
        {MISTRAL ",\"sliding_window\":0}", FT_ERR_DATA, "\"sliding_window\" must be an integer"},
        {MISTRAL ",\"sliding_window\":null,\"use_sliding_window\":true}", FT_ERR_UNSUPPORTED,
         "\"use_sliding_window\""},
        {MISTRAL ",\"sliding_window\":null,\"attention_bias\":true}", FT_ERR_UNSUPPORTED,
         "\"attention_bias\""},
        {QWEN2 ",\"use_sliding_window\":true,\"max_window_layers\":-1}", FT_ERR_DATA,
         "\"max_window_layers\" must be"},
        {QWEN2 ",\"use_sliding_window\":true,\"max_window_layers\":1,"
               "\"layer_types\":[\"sliding_attention\",\"full_attention\"]}",
         FT_ERR_UNSUPPORTED, "\"sliding_attention\" for layer 0"},
        {MISTRAL ",\"layer_types\":[\"full_attention\",\"full_attention\"]}", FT_ERR_UNSUPPORTED,
         "mean sliding_attention"},
        {LLAMA ",\"eos_token_id\":[]}", FT_ERR_DATA, "\"eos_token_id\" must be"},
        {LLAMA ",\"eos_token_id\":[1,2,3,4,5,6,7,8,9]}", FT_ERR_DATA, "\"eos_token_id\" must be"},
        {LLAMA ",\"eos_token_id\":[1,\"2\"]}", FT_ERR_DATA, "\"eos_token_id\" must be"},
        {LLAMA ",\"bos_token_id\":1.5}", FT_ERR_DATA, "\"bos_token_id\" must be"},
        {LLAMA ",\"torch_dtype\":7}", FT_ERR_DATA, "\"torch_dtype\" must be a string"},
        {QWEN2 ",\"attention_bias\":true}", FT_ERR_UNSUPPORTED, "\"attention_bias\""},
        {QWEN3 ",\"mlp_bias\":true}", FT_ERR_UNSUPPORTED, "\"mlp_bias\""},
        {QWEN3 ",\"layer_types\":[\"full_attention\",\"sliding_attention\"]}", FT_ERR_UNSUPPORTED,
         "\"sliding_attention\""},
        {QWEN3 ",\"layer_types\":[\"full_attention\"]}", FT_ERR_DATA, "1 entries for 2 layers"},
        {"{\"model_type\":\"qwen2\"," SIZES "}", FT_ERR_DATA, "\"rope_theta\" is missing"},
        {"{\"model_type\":\"qwen2\",\"rope_theta\":1e6,\"vocab_size\":9,\"hidden_size\":64,"
         "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"intermediate_size\":128}",
         FT_ERR_DATA, "\"num_key_value_heads\" is missing"},
        {"{\"model_type\":\"llama\",\"vocab_size\":9,\"hidden_size\":64,\"num_hidden_layers\":2,"
         "\"num_attention_heads\":4,\"num_key_value_heads\":3,\"intermediate_size\":128}",
         FT_ERR_DATA, "\"num_attention_heads\" 4 is not a multiple of \"num_key_value_heads\" 3"},
        {"{\"model_type\":\"llama\",\"vocab_size\":9,\"hidden_size\":66,\"num_hidden_layers\":2,"
         "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"intermediate_size\":128}",
         FT_ERR_DATA, "\"hidden_size\" 66 is not a multiple of \"num_attention_heads\" 4"},
        {LLAMA ",\"rope_theta\":-1}", FT_ERR_DATA, "\"rope_theta\" must be"},
        {LLAMA ",\"rope_scaling\":{\"factor\":2}}", FT_ERR_DATA,
         "\"rope_scaling.rope_type\" is missing"},
        {LLAMA ",\"rope_scaling\":[]}", FT_ERR_DATA, "\"rope_scaling\" must be an object"},
        {LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}}", FT_ERR_UNSUPPORTED,
         "\"linear\""},
        {LLAMA ",\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":2}}", FT_ERR_UNSUPPORTED,
         "\"yarn\""},
        {LLAMA ",\"rope_parameters\":{\"rope_type\":\"dynamic\",\"factor\":2}}", FT_ERR_UNSUPPORTED,
         "\"dynamic\" in \"rope_parameters.rope_type\""},
        {LLAMA ",\"rope_scaling\":{\"type\":\"default\",\"rope_type\":\"llama3\"}}", FT_ERR_DATA,
         "\"rope_scaling.rope_type\" is \"llama3\" but \"type\" is \"default\""},
        {LLAMA ",\"rope_scaling\":{\"type\":\"default\",\"factor\":2}}", FT_ERR_UNSUPPORTED,
         "\"rope_scaling.factor\" has no known meaning"},
        {LLAMA ",\"rope_scaling\":" LLAMA3(",\"mscale\":1") "}", FT_ERR_UNSUPPORTED,
         "\"rope_scaling.mscale\""},
        {LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8}}", FT_ERR_DATA,
         "\"rope_scaling.low_freq_factor\" is missing"},
        {LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,"
               "\"high_freq_factor\":4,\"original_max_position_embeddings\":64}}",
         FT_ERR_DATA, "\"rope_scaling.high_freq_factor\" must be above"},
        {LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":0.5,\"low_freq_factor\":1,"
               "\"high_freq_factor\":4,\"original_max_position_embeddings\":64}}",
         FT_ERR_DATA, "\"rope_scaling.factor\" must be at least 1"},
        {LLAMA ",\"rope_scaling\":" LLAMA3("") ",\"rope_parameters\":" LLAMA3("") "}", FT_ERR_DATA,
         "both"},
        {LLAMA ",\"rope_theta\":1e4,\"rope_parameters\":{\"rope_theta\":5e5}}", FT_ERR_DATA,
         "\"rope_theta\" is 10000 but \"rope_parameters.rope_theta\" is 500000"},
        {LLAMA ",\"rope_parameters\":{\"full_attention\":{\"rope_theta\":1e4}}}",
         FT_ERR_UNSUPPORTED, "\"rope_parameters.full_attention\""},
        {LLAMA ",\"rope_parameters\":{\"rope_theta\":1e4,\"rope_theta\":1e4}}", FT_ERR_DATA,
         "\"rope_parameters.rope_theta\" is there twice"},
    };
    ft_io_hf_config config;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_error(ft_io_hf_config_parse(cases[i].text, "some/config.json", &config),
                     cases[i].status, "some/config.json", cases[i].reason);
    assert_error(ft_io_hf_config_parse(NULL, "x", &config), FT_ERR_ARG, "argument", "NULL");
    /* Texts that end without a zero, or with too many. */
    assert_ok(ft_io_hf_config_parse_n(LLAMA "}???", sizeof LLAMA "}" - 1, "x", &config));
    assert_int_equal(config.vocab, 90);
    assert_error(ft_io_hf_config_parse_n(LLAMA "}", sizeof LLAMA "}", "x", &config), FT_ERR_DATA,
                 "x", "is zero");
    assert_error(ft_io_hf_config_parse_n("", 0, "x", &config), FT_ERR_DATA, "x", "not JSON");
    assert_error(ft_io_hf_config_parse_n(NULL, 0, "x", &config), FT_ERR_ARG, "argument", "NULL");
}

/* Windows in the families' own words, and what training keeps for others. */
static void reads_windows_and_tokens(void **state)
{
    (void)state;
    ft_io_hf_config c = parse_config(MISTRAL "}");
    assert_true(c.sliding_window == 4096 && c.full_layers == 0);
    assert_ok(ft_io_hf_config_check_length(&c, "x", 4096));
    assert_error(ft_io_hf_config_check_length(&c, "x", 4097), FT_ERR_UNSUPPORTED, "x",
                 "a window of 4096 tokens is not supported for sequences of 4097");
    c = parse_config(MISTRAL ",\"sliding_window\":32,"
                             "\"layer_types\":[\"sliding_attention\",\"sliding_attention\"]}");
    assert_true(c.sliding_window == 32);
    c = parse_config(MISTRAL ",\"sliding_window\":null}");
    assert_true(c.sliding_window == 0);
    assert_ok(ft_io_hf_config_check_length(&c, "x", INT64_MAX));
    c = parse_config(QWEN2 ",\"sliding_window\":16}");
    assert_true(c.sliding_window == 0);
    c = parse_config(QWEN2 ",\"use_sliding_window\":true}"); /* from layer 28 of 2 on */
    assert_true(c.sliding_window == 0);
    c = parse_config(QWEN3 ",\"use_sliding_window\":true,\"max_window_layers\":1,"
                           "\"layer_types\":[\"full_attention\",\"sliding_attention\"]}");
    assert_true(c.sliding_window == 4096 && c.full_layers == 1);
    c = parse_config(QWEN2 ",\"use_sliding_window\":true,\"max_window_layers\":0,"
                           "\"sliding_window\":null}");
    assert_true(c.sliding_window == 0);

    c = parse_config(LLAMA ",\"bos_token_id\":128000,\"eos_token_id\":[128001,128008,128009],"
                           "\"pad_token_id\":null,\"dtype\":\"float16\",\"torch_dtype\":\"x\","
                           "\"initializer_range\":0.01}");
    assert_true(c.bos_token == 128000 && c.pad_token == -1 && c.init_std == 0.01);
    assert_true(c.n_eos == 3 && c.eos_tokens[0] == 128001 && c.eos_tokens[2] == 128009);
    assert_string_equal(c.dtype, "float16");
    c = parse_config(LLAMA ",\"eos_token_id\":2,\"pad_token_id\":-1,\"torch_dtype\":\"bfloat16\"}");
    assert_true(c.n_eos == 1 && c.eos_tokens[0] == 2 && c.pad_token == -1 && c.bos_token == -1);
    assert_string_equal(c.dtype, "bfloat16");
}

static void reads_the_configs_of_golden_files(void **state)
{
    (void)state;
    static const struct {
        const char *name, *type;
        int64_t vocab, hidden, layers, heads, kv_heads, head_dim, intermediate;
        int tie, qkv_bias, qk_norm;
        double eps, theta, factor;
    } cases[] = {
        {"llama3_rope", "llama", 80, 64, 2, 4, 1, 16, 112, 1, 0, 0, 1e-5, 5e5, 8},
        {"llama_4l", "llama", 128, 64, 4, 8, 4, 8, 192, 0, 0, 0, 1e-5, 1e4, 0},
        {"llama_gqa", "llama", 97, 64, 2, 4, 2, 16, 128, 0, 0, 0, 1e-5, 1e4, 0},
        {"llama_headdim", "llama", 64, 80, 2, 4, 2, 32, 120, 0, 0, 0, 1e-5, 1e4, 0},
        {"llama_tied", "llama", 131, 48, 3, 3, 3, 16, 96, 1, 0, 0, 1e-6, 1e5, 0},
        {"qwen2_bias", "qwen2", 90, 64, 2, 4, 2, 16, 128, 1, 1, 0, 1e-6, 1e6, 0},
        {"qwen3_qknorm", "qwen3", 90, 64, 2, 4, 2, 16, 128, 0, 0, 1, 1e-6, 1e6, 0},
    };
    int found = 0;
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        char path[200];
        const size_t k = i / 2;
        ft_io_safetensors *file;
        snprintf(path, sizeof path, "%s/%s.safetensors",
                 i % 2 ? "../shared/golden" : "tests/golden", cases[k].name);
        if (access(path, R_OK) != 0) continue;
        found++;
        assert_ok(ft_io_safetensors_open(path, &file));
        const ft_io_hf_config c = parse_config(ft_io_safetensors_metadata(file, "config"));
        ft_io_safetensors_close(file);
        assert_string_equal(c.model_type, cases[k].type);
        assert_int_equal(c.vocab, cases[k].vocab);
        assert_int_equal(c.hidden, cases[k].hidden);
        assert_int_equal(c.layers, cases[k].layers);
        assert_int_equal(c.heads, cases[k].heads);
        assert_int_equal(c.kv_heads, cases[k].kv_heads);
        assert_int_equal(c.head_dim, cases[k].head_dim);
        assert_int_equal(c.intermediate, cases[k].intermediate);
        assert_int_equal(c.tie_embeddings, cases[k].tie);
        assert_int_equal(c.qkv_bias, cases[k].qkv_bias);
        assert_int_equal(c.qk_norm, cases[k].qk_norm);
        assert_true(!c.o_bias && !c.mlp_bias);
        assert_true(c.norm_eps == cases[k].eps && c.rope_theta == cases[k].theta);
        assert_true(c.rope_scaling.factor == cases[k].factor);
    }
    if (found == 0) skip();
}

#endif /* FT_CJSON */

/* ----------------------------------------------------------------------------------------- data */

static ft_io_data *open_data(const char *a, const char *b, const char *c)
{
    const char *paths[3] = {a, b, c};
    const int n = b == NULL ? 1 : c == NULL ? 2 : 3;
    ft_io_data *data;
    assert_ok(ft_io_data_open(paths, n, FT_IO_TOKEN_BYTE, &data));
    return data;
}

static void reads_files_as_one_stream(void **state)
{
    (void)state;
    static const unsigned char all[9] = {'a', 0, 255, 'x', 'p', 'q', 'r', 's', 128};
    const char *first = write_file("first", all, 3), *second = write_file("second", all + 3, 1);
    const char *third = write_file("third", all + 4, 5);
    ft_io_data *data = open_data(first, second, third);
    assert_int_equal(ft_io_data_tokens(data), 9);
    assert_int_equal(ft_io_data_vocab(data), 256);
    for (int64_t at = 0; at <= 9; at++) {
        for (int64_t n = 0; at + n <= 9; n++) {
            int32_t tokens[10];
            memset(tokens, 0x77, sizeof tokens);
            assert_ok(ft_io_data_read(data, at, n, tokens));
            for (int64_t i = 0; i < n; i++) assert_int_equal(tokens[i], all[at + i]);
            assert_int_equal(tokens[n], 0x77777777);
        }
    }
    static const int where[9] = {0, 0, 0, 1, 2, 2, 2, 2, 2}, index[9] = {0, 1, 2, 0, 0, 1, 2, 3, 4};
    const char *const paths[3] = {first, second, third};
    for (int64_t at = 0; at < 9; at++) {
        int64_t in_file;
        assert_string_equal(ft_io_data_locate(data, at, &in_file), paths[where[at]]);
        assert_int_equal(in_file, index[at]);
    }
    int32_t token;
    assert_null(ft_io_data_locate(data, 9, NULL));
    assert_null(ft_io_data_locate(data, -1, NULL));
    assert_error(ft_io_data_read(data, 9, 1, &token), FT_ERR_ARG, "position 9", "stream of 9");
    assert_error(ft_io_data_read(data, -1, 1, &token), FT_ERR_ARG, "position -1", "outside");
    assert_error(ft_io_data_read(data, 1, INT64_MAX, &token), FT_ERR_ARG, "position 1", "outside");
    assert_error(ft_io_data_read(data, 0, 1, NULL), FT_ERR_ARG, "tokens", "NULL");
    ft_io_data_close(data);
    ft_io_data_close(NULL);
}

static void reads_beyond_32_bits(void **state)
{
    (void)state;
    const char *path = write_file("sparse", "a", 1);
    const int64_t bytes = ((int64_t)5 << 30) + 3;
    if (truncate(path, (off_t)bytes) != 0) skip();
    const int fd = open(path, O_WRONLY);
    assert_true(lseek(fd, (off_t)(bytes - 1), SEEK_SET) == (off_t)(bytes - 1));
    assert_int_equal(write(fd, "z", 1), 1);
    close(fd);
    ft_io_data *data = open_data(path, write_file("tail", "t", 1), NULL);
    int32_t tokens[3];
    int64_t in_file;
    assert_int_equal(ft_io_data_tokens(data), bytes + 1);
    assert_ok(ft_io_data_read(data, bytes - 2, 3, tokens));
    assert_true(tokens[0] == 0 && tokens[1] == 'z' && tokens[2] == 't');
    assert_string_equal(ft_io_data_locate(data, bytes - 1, &in_file), path);
    assert_int_equal(in_file, bytes - 1);
    ft_io_data_close(data);
}

static void refuses_data_that_is_not_there(void **state)
{
    (void)state;
    const char *good = write_file("good", "good", 4), *empty = write_file("empty", "", 0);
    const char *missing = in_directory("missing");
    const char *paths[2] = {good, missing};
    ft_io_data *data;
    assert_error(ft_io_data_open(paths, 2, FT_IO_TOKEN_BYTE, &data), FT_ERR_IO, missing,
                 "No such file");
    assert_null(data);
    paths[1] = empty;
    assert_error(ft_io_data_open(paths, 2, FT_IO_TOKEN_BYTE, &data), FT_ERR_DATA, empty,
                 "is empty");
    paths[1] = temp_directory;
    assert_error(ft_io_data_open(paths, 2, FT_IO_TOKEN_BYTE, &data), FT_ERR_IO, temp_directory,
                 "a directory");
    paths[1] = "/dev/zero";
    assert_error(ft_io_data_open(paths, 2, FT_IO_TOKEN_BYTE, &data), FT_ERR_IO, "/dev/zero",
                 "regular");
    paths[1] = NULL;
    assert_error(ft_io_data_open(paths, 2, FT_IO_TOKEN_BYTE, &data), FT_ERR_ARG, "path", "NULL");
    assert_error(ft_io_data_open(paths, 0, FT_IO_TOKEN_BYTE, &data), FT_ERR_ARG, "0 paths",
                 "at least one");
    assert_error(ft_io_data_open(paths, 1, (ft_io_token)7, &data), FT_ERR_UNSUPPORTED, "7",
                 "format");
    assert_int_equal(chmod(good, 0), 0);
    if (geteuid() != 0)
        assert_error(ft_io_data_open(paths, 1, FT_IO_TOKEN_BYTE, &data), FT_ERR_IO, good,
                     "Permission");
}

static void names_the_byte_outside_the_vocabulary(void **state)
{
    (void)state;
    char *text = (char *)malloc(10000);
    assert_non_null(text);
    memset(text, 'a', 10000);
    const char *first = write_file("first", text, 10000);
    text[8765] = (char)200;
    text[8770] = (char)255;
    const char *second = write_file("second", text, 10000);
    free(text);
    ft_io_data *data = open_data(first, second, NULL);
    assert_ok(ft_io_data_check_vocab(data, 256));
    assert_ok(ft_io_data_check_vocab(data, 50257));
    assert_error(ft_io_data_check_vocab(data, 255), FT_ERR_DATA, second,
                 "token 255 at position 8770");
    assert_error(ft_io_data_check_vocab(data, 200), FT_ERR_DATA, second,
                 "token 200 at position 8765 is outside the vocabulary of 200");
    assert_error(ft_io_data_check_vocab(data, 97), FT_ERR_DATA, first, "token 97 at position 0");
    assert_error(ft_io_data_check_vocab(data, 0), FT_ERR_ARG, "vocabulary 0", "positive");
    ft_io_data_close(data);
}

/* -------------------------------------------------------------------------------------- sampler */

static void permutes_every_size(void **state)
{
    (void)state;
    static unsigned char seen[1001];
    for (int64_t n = 1; n <= 1000; n++) {
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            memset(seen, 0, sizeof seen);
            for (int64_t i = 0; i < n; i++) {
                const int64_t p = ft_io_permute(1234, epoch, n, i);
                assert_true(p >= 0 && p < n && !seen[p]);
                seen[p] = 1;
            }
        }
    }
    assert_int_equal(ft_io_permute(1, 0, 10, 10), -1);
    assert_int_equal(ft_io_permute(1, 0, 10, -1), -1);
    assert_int_equal(ft_io_permute(1, 0, 0, 0), -1);
}

/* Computed by an independent program from the definition. Whoever resumes a run relies on them. */
static void permutations_stay_what_they_are(void **state)
{
    (void)state;
    static const int64_t epoch0[10] = {1, 6, 2, 9, 4, 5, 8, 7, 0, 3};
    static const int64_t epoch1[10] = {1, 3, 9, 0, 5, 7, 2, 6, 8, 4};
    for (int64_t i = 0; i < 10; i++) {
        assert_int_equal(ft_io_permute(42, 0, 10, i), epoch0[i]);
        assert_int_equal(ft_io_permute(42, 1, 10, i), epoch1[i]);
    }
    assert_int_equal(ft_io_permute(0, 7, 1000003, 0), 136437);
    assert_int_equal(ft_io_permute(0, 7, 1000003, 1), 324447);
    assert_int_equal(ft_io_permute(0, 7, 1000003, 1000002), 732562);
    assert_int_equal(ft_io_permute(UINT64_MAX, 3, (int64_t)1 << 40, 12345), 84953415464);
    assert_int_equal(ft_io_permute(1, 0, ((int64_t)1 << 62) + 12345, (int64_t)1 << 61),
                     1785547468265944585);
}

static void permutations_look_random(void **state)
{
    (void)state;
    /* Over the epochs each element comes to each place equally often. Counts of uniform
       permutations have a chi-squared of N / (N - 1) times one with (N - 1)^2 degrees of freedom,
       which for 16 (25, 81) exceeds 39.3 (52.6, 125) once in a thousand times. */
    static const double limits[3] = {39.3, 52.6, 125};
    static const int sizes[3] = {5, 6, 10};
    for (int k = 0; k < 3; k++) {
        const int N = sizes[k];
        const double expected = 10000.0 / N;
        int count[100];
        double chi = 0;
        memset(count, 0, sizeof count);
        for (int64_t epoch = 0; epoch < 10000; epoch++)
            for (int i = 0; i < N; i++) count[i * N + ft_io_permute(99, epoch, N, i)]++;
        for (int i = 0; i < N * N; i++)
            chi += (count[i] - expected) * (count[i] - expected) / expected;
        assert_true(chi * (N - 1) / N < limits[k]);
    }
    /* All 24 orders of four windows occur. */
    int orders = 0;
    static unsigned char seen[256];
    memset(seen, 0, sizeof seen);
    for (int64_t epoch = 0; epoch < 500; epoch++) {
        int order = 0;
        for (int64_t i = 0; i < 4; i++) order = order * 4 + (int)ft_io_permute(5, epoch, 4, i);
        orders += !seen[order];
        seen[order] = 1;
    }
    assert_int_equal(orders, 24);
    /* Seeds give different orders; so do epochs; in none do neighbours stay together. */
    int same_seed = 0, same_epoch = 0, neighbours = 0;
    for (int64_t i = 0; i < 1000; i++) {
        const int64_t p = ft_io_permute(1, 0, 1000, i);
        same_seed += p == ft_io_permute(2, 0, 1000, i);
        same_epoch += p == ft_io_permute(1, 1, 1000, i);
        neighbours += i > 0 && p == ft_io_permute(1, 0, 1000, i - 1) + 1;
    }
    assert_true(same_seed < 10 && same_epoch < 10 && neighbours < 10); /* each Poisson of mean 1 */
}

/* 100 tokens in two files: token p is p. */
static ft_io_data *open_hundred(void)
{
    unsigned char bytes[100];
    for (int i = 0; i < 100; i++) bytes[i] = (unsigned char)i;
    return open_data(write_file("h1", bytes, 33), write_file("h2", bytes + 33, 67), NULL);
}

static void labels_are_the_next_tokens(void **state)
{
    (void)state;
    enum { T = 7 };
    ft_io_data *data = open_hundred();
    ft_io_sampler sampler;
    assert_ok(ft_io_sampler_init(&sampler, data, T, 5, 3));
    assert_int_equal(sampler.windows, 14); /* (100 - 1) / 7 */
    for (int64_t step = 0; step < 20; step++) {
        int32_t tokens[5 * T], labels[5 * T];
        assert_ok(ft_io_sampler_read(&sampler, step, 0, 5, tokens, labels));
        for (int b = 0; b < 5; b++) {
            int64_t window;
            assert_ok(ft_io_sampler_index(&sampler, step, b, &window, NULL));
            for (int t = 0; t < T; t++) { /* token p is p: positions can be read off */
                assert_int_equal(tokens[b * T + t], window * T + t);
                assert_int_equal(labels[b * T + t], window * T + t + 1);
            }
        }
    }
    ft_io_data_close(data);
}

static void short_sequences_and_exact_fits(void **state)
{
    (void)state;
    ft_io_data *data = open_hundred();
    ft_io_sampler sampler;
    int32_t tokens[99], labels[99];
    assert_ok(ft_io_sampler_init(&sampler, data, 99, 1, 0)); /* one window, all 100 tokens */
    assert_int_equal(sampler.windows, 1);
    assert_ok(ft_io_sampler_read(&sampler, 12, 0, 1, tokens, labels));
    assert_true(tokens[0] == 0 && tokens[98] == 98 && labels[0] == 1 && labels[98] == 99);
    assert_ok(ft_io_sampler_init(&sampler, data, 1, 1, 0));
    assert_int_equal(sampler.windows, 99);
    assert_ok(ft_io_sampler_read(&sampler, 0, 0, 1, tokens, labels));
    assert_int_equal(labels[0], tokens[0] + 1);
    ft_io_data_close(data);
}

static void epochs_follow_without_loss_or_repetition(void **state)
{
    (void)state;
    static const int64_t batches[] = {1, 3, 4, 14, 17, 40}; /* an epoch is 14 windows */
    ft_io_data *data = open_hundred();
    int64_t reference[280];
    for (size_t k = 0; k < sizeof batches / sizeof *batches; k++) {
        const int64_t G = batches[k];
        ft_io_sampler sampler;
        assert_ok(ft_io_sampler_init(&sampler, data, 7, G, 8));
        int seen[14], previous_epoch = 0;
        memset(seen, 0, sizeof seen);
        for (int64_t at = 0; at < 280; at++) { /* 20 epochs */
            int64_t window, epoch;
            assert_ok(ft_io_sampler_index(&sampler, at / G, at % G, &window, &epoch));
            assert_int_equal(epoch, at / 14);
            if (epoch != previous_epoch)
                for (int w = 0; w < 14; w++) assert_int_equal(seen[w], epoch);
            previous_epoch = (int)epoch;
            seen[window]++;
            /* The sequence is the same for every global batch. */
            if (k == 0) reference[at] = window;
            else assert_int_equal(window, reference[at]);
        }
    }
    ft_io_data_close(data);
}

static void samples_do_not_depend_on_the_ranks(void **state)
{
    (void)state;
    enum { T = 4, G = 12 };
    static const int layouts[][2] = {{1, 1},  {2, 1}, {3, 1}, {4, 1}, {6, 1}, {12, 1},
                                     {1, 12}, {2, 3}, {3, 2}, {4, 3}, {1, 4}, {2, 6}};
    ft_io_data *data = open_hundred();
    ft_io_sampler sampler;
    assert_ok(ft_io_sampler_init(&sampler, data, T, G, 77));
    for (int64_t step = 0; step < 6; step++) {
        int32_t all[G * T], targets[G * T];
        assert_ok(ft_io_sampler_read(&sampler, step, 0, G, all, targets));
        for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++) {
            const int R = layouts[k][0], M = layouts[k][1], B = G / (R * M);
            int used[G];
            memset(used, 0, sizeof used);
            for (int m = 0; m < M; m++) {
                for (int r = 0; r < R; r++) {
                    int32_t tokens[G * T], labels[G * T];
                    assert_ok(ft_io_sampler_fill(&sampler, step, r, R, m, M, tokens, labels));
                    for (int b = 0; b < B; b++) {
                        int at = 0; /* the row of the whole that this one is */
                        while (at < G && (used[at] || memcmp(tokens + b * T, all + at * T,
                                                             T * sizeof *all) != 0))
                            at++;
                        assert_true(at < G);
                        used[at] = 1;
                        assert_memory_equal(labels + b * T, targets + at * T, T * sizeof *all);
                    }
                }
            }
        }
    }
    ft_io_data_close(data);
}

static void refuses_bad_samples(void **state)
{
    (void)state;
    const char *path = write_file("tiny", "12345678", 8);
    ft_io_data *data = open_data(path, NULL, NULL);
    ft_io_sampler sampler;
    int32_t tokens[16], labels[16];
    assert_error(ft_io_sampler_init(&sampler, data, 8, 1, 0), FT_ERR_DATA, path,
                 "8 tokens of data are shorter than one sample: sequence length 8 + 1");
    assert_error(ft_io_sampler_init(&sampler, data, INT64_MAX, 1, 0), FT_ERR_DATA, path, "shorter");
    assert_error(ft_io_sampler_init(&sampler, data, 0, 1, 0), FT_ERR_ARG, "length 0", "positive");
    assert_error(ft_io_sampler_init(&sampler, data, 4, 0, 0), FT_ERR_ARG, "batch 0", "positive");
    assert_error(ft_io_sampler_init(&sampler, NULL, 4, 1, 0), FT_ERR_ARG, "data", "NULL");
    assert_error(ft_io_sampler_index(&sampler, 0, 0, NULL, NULL), FT_ERR_ARG, "sampler",
                 "initialised");
    assert_error(ft_io_sampler_fill(&sampler, 0, 0, 1, 0, 1, tokens, labels), FT_ERR_ARG, "sampler",
                 "initialised");
    assert_ok(ft_io_sampler_init(&sampler, data, 2, 4, 0));
    assert_error(ft_io_sampler_index(&sampler, -1, 0, NULL, NULL), FT_ERR_ARG, "step -1",
                 "batch of 4");
    assert_error(ft_io_sampler_index(&sampler, 0, 4, NULL, NULL), FT_ERR_ARG, "position 4",
                 "batch of 4");
    assert_error(ft_io_sampler_index(&sampler, INT64_MAX / 2, 0, NULL, NULL), FT_ERR_ARG, "step",
                 "batch");
    assert_ok(ft_io_sampler_index(&sampler, INT64_MAX / 4, 3, NULL, NULL));
    assert_error(ft_io_sampler_fill(&sampler, 0, 2, 2, 0, 1, tokens, labels), FT_ERR_ARG,
                 "rank 2 of 2", "");
    assert_error(ft_io_sampler_fill(&sampler, 0, 0, 0, 0, 1, tokens, labels), FT_ERR_ARG,
                 "rank 0 of 0", "");
    assert_error(ft_io_sampler_fill(&sampler, 0, 0, 1, 1, 1, tokens, labels), FT_ERR_ARG,
                 "micro-batch 1 of 1", "");
    assert_error(ft_io_sampler_fill(&sampler, 0, 0, 3, 0, 1, tokens, labels), FT_ERR_ARG,
                 "batch of 4 does not divide", "3 ranks x 1");
    assert_error(ft_io_sampler_read(&sampler, 0, 3, 2, tokens, labels), FT_ERR_ARG, "position 4",
                 "");
    assert_error(ft_io_sampler_read(&sampler, 0, 0, 1, tokens, NULL), FT_ERR_ARG, "labels", "NULL");
    ft_io_data_close(data);
}

/* ----------------------------------------------------------------------------------------- JSON */

static void emits_nested_json(void **state)
{
    (void)state;
    const char *path = in_directory("nested.json");
    ft_io_json *json;
    assert_ok(ft_io_json_open(path, &json));
    ft_io_json_begin_object(json);
    ft_io_json_key(json, "ranks");
    ft_io_json_begin_array(json);
    for (int rank = 0; rank < 2; rank++) {
        ft_io_json_begin_object(json);
        ft_io_json_key(json, "rank");
        ft_io_json_int(json, rank);
        ft_io_json_key(json, "tags");
        ft_io_json_begin_object(json);
        ft_io_json_key(json, "param");
        ft_io_json_int(json, INT64_MAX);
        ft_io_json_key(json, "grad");
        ft_io_json_int(json, INT64_MIN);
        ft_io_json_end_object(json);
        ft_io_json_end_object(json);
    }
    ft_io_json_end_array(json);
    ft_io_json_key(json, "empty");
    ft_io_json_begin_array(json);
    ft_io_json_end_array(json);
    ft_io_json_key(json, "");
    ft_io_json_begin_array(json);
    ft_io_json_bool(json, 1);
    ft_io_json_bool(json, 0);
    ft_io_json_null(json);
    ft_io_json_float(json, 1.5);
    ft_io_json_string(json, "s");
    ft_io_json_begin_object(json);
    ft_io_json_end_object(json);
    ft_io_json_end_array(json);
    ft_io_json_end_object(json);
    assert_ok(ft_io_json_finish(json));
    assert_file_is(path, "{\"ranks\":[{\"rank\":0,\"tags\":{\"param\":9223372036854775807,"
                         "\"grad\":-9223372036854775808}},{\"rank\":1,\"tags\":{\"param\":"
                         "9223372036854775807,\"grad\":-9223372036854775808}}],\"empty\":[],"
                         "\"\":[true,false,null,1.5,\"s\",{}]}\n");
}

static void escapes_strings(void **state)
{
    (void)state;
    const char *path = in_directory("strings.json");
    ft_io_json *json;
    assert_ok(ft_io_json_open(path, &json));
    ft_io_json_begin_array(json);
    ft_io_json_string(json, "\"\\/\b\f\n\r\t\x01\x1f\x7f");
    ft_io_json_string(json, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    ft_io_json_string(json, "a\xff\xc3(\xed\xa0\x80z\xe2\x82");
    ft_io_json_string(json, "");
    ft_io_json_end_array(json);
    assert_ok(ft_io_json_finish(json));
    assert_file_is(path, "[\"\\\"\\\\/\\u0008\\u000c\\u000a\\u000d\\u0009\\u0001\\u001f\x7f\","
                         "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\","
                         "\"a\\ufffd\\ufffd(\\ufffd\\ufffd\\ufffdz\\ufffd\\ufffd\",\"\"]\n");
}

static void emit_floats(const char *path)
{
    ft_io_json *json;
    assert_ok(ft_io_json_open(path, &json));
    ft_io_json_begin_array(json);
    ft_io_json_float(json, 0);
    ft_io_json_float(json, -0.5);
    ft_io_json_float(json, (double)2.34567881f);
    ft_io_json_float(json, 1e-30);
    ft_io_json_float(json, 123456789012.0);
    ft_io_json_float(json, HUGE_VAL);
    ft_io_json_float(json, -HUGE_VAL);
    ft_io_json_float(json, NAN);
    ft_io_json_end_array(json);
    assert_ok(ft_io_json_finish(json));
    assert_file_is(path, "[0,-0.5,2.34567881,1e-30,1.23456789e+11,null,null,null]\n");
}

static void floats_are_json_in_every_locale(void **state)
{
    (void)state;
    static const char *const commas[] = {"de_DE.UTF-8", "de_DE.utf8", "de_DE", "fr_FR.UTF-8",
                                         "ru_RU.UTF-8"};
    emit_floats(in_directory("floats.json"));
    size_t i = 0;
    while (i < 5 && setlocale(LC_NUMERIC, commas[i]) == NULL) i++;
    if (i == 5) return; /* no such locale is installed */
    emit_floats(in_directory("floats.json"));
    setlocale(LC_NUMERIC, "C");
}

static void a_float_comes_back_from_its_text(void **state)
{
    (void)state;
    uint32_t bits = 1;
    const char *path = in_directory("float.json");
    for (int i = 0; i < 300; i++) {
        float value;
        size_t n;
        bits = bits * 1664525u + 1013904223u;
        memcpy(&value, &bits, sizeof value);
        if (!isfinite(value)) continue;
        FILE *file = fopen(path, "w");
        ft_io_json *json;
        assert_ok(ft_io_json_create(file, path, &json));
        ft_io_json_float(json, (double)value);
        assert_ok(ft_io_json_finish(json));
        fclose(file);
        char *text = read_file(path, &n);
        assert_true(strtof(text, NULL) == value);
        free(text);
    }
}

/* A double too, in 9 digits where they are enough, else in as many as it takes. */
static void a_double_comes_back_from_its_text(void **state)
{
    (void)state;
    static const struct { double value; const char *text; } known[] = {
        {1e-3, "0.001"}, {1764460800.125, "1764460800.125"}, {0.1, "0.1"}, {-2, "-2"},
        {1.0 / 3, "0.3333333333333333"}, {1e300, "1e+300"}};
    const char *path = in_directory("double.json");
    uint64_t bits = 1;
    for (int i = 0; i < 306; i++) {
        double value;
        size_t n;
        bits = bits * 6364136223846793005u + 1442695040888963407u;
        memcpy(&value, &bits, sizeof value);
        if (i < 6) value = known[i].value;
        if (!isfinite(value)) continue;
        FILE *file = fopen(path, "w");
        ft_io_json *json;
        assert_ok(ft_io_json_create(file, path, &json));
        ft_io_json_double(json, value);
        assert_ok(ft_io_json_finish(json));
        fclose(file);
        char *text = read_file(path, &n);
        assert_true(strtod(text, NULL) == value);
        text[strcspn(text, "\n")] = 0;
        if (i < 6) assert_string_equal(text, known[i].text);
        free(text);
    }
    ft_io_log *log;
    assert_ok(ft_io_log_open(path, 0, &log));
    ft_io_log_begin(log);
    ft_io_log_double(log, "t", 1764460800.125);
    ft_io_log_double(log, "none", NAN);
    assert_ok(ft_io_log_end(log));
    assert_ok(ft_io_log_close(log));
    assert_file_is(path, "{\"t\":1764460800.125,\"none\":null}\n");
}

static void emits_long_documents(void **state)
{
    (void)state;
    const char *path = in_directory("long.json");
    ft_io_json *json;
    size_t n;
    assert_ok(ft_io_json_open(path, &json));
    ft_io_json_begin_array(json);
    for (int i = 0; i < 100000; i++) ft_io_json_int(json, i);
    ft_io_json_end_array(json);
    assert_ok(ft_io_json_finish(json));
    char *text = read_file(path, &n), *at = text;
    for (int i = 0; i < 100000; i++) {
        assert_int_equal(*at, i == 0 ? '[' : ',');
        assert_int_equal(strtol(at + 1, &at, 10), i);
    }
    assert_string_equal(at, "]\n");
    free(text);
}

typedef void (*misuse_fn)(ft_io_json *json);

static void value_without_key(ft_io_json *json)
{
    ft_io_json_begin_object(json);
    ft_io_json_int(json, 1);
    ft_io_json_end_object(json);
}
static void key_in_array(ft_io_json *json)
{
    ft_io_json_begin_array(json);
    ft_io_json_key(json, "k");
}
static void key_at_top(ft_io_json *json)
{
    ft_io_json_key(json, "k");
}
static void key_after_key(ft_io_json *json)
{
    ft_io_json_begin_object(json);
    ft_io_json_key(json, "k");
    ft_io_json_key(json, "l");
}
static void end_after_key(ft_io_json *json)
{
    ft_io_json_begin_object(json);
    ft_io_json_key(json, "k");
    ft_io_json_end_object(json);
}
static void wrong_end(ft_io_json *json)
{
    ft_io_json_begin_object(json);
    ft_io_json_end_array(json);
}
static void end_without_begin(ft_io_json *json)
{
    ft_io_json_end_array(json);
}
static void two_values(ft_io_json *json)
{
    ft_io_json_int(json, 1);
    ft_io_json_int(json, 2);
}
static void not_ended(ft_io_json *json)
{
    ft_io_json_begin_array(json);
    ft_io_json_begin_array(json);
}
static void nothing(ft_io_json *json)
{
    (void)json;
}
static void too_deep(ft_io_json *json)
{
    for (int i = 0; i < 65; i++) ft_io_json_begin_array(json);
}
static void null_string(ft_io_json *json)
{
    ft_io_json_string(json, NULL);
}

static void misuse_of_the_emitter_is_reported(void **state)
{
    (void)state;
    static const struct {
        misuse_fn fn;
        ft_status status;
        const char *reason;
    } cases[] = {{value_without_key, FT_ERR_STATE, "without a key"},
                 {key_in_array, FT_ERR_STATE, "key \"k\" outside an object"},
                 {key_at_top, FT_ERR_STATE, "key \"k\" outside an object"},
                 {key_after_key, FT_ERR_STATE, "key \"l\""},
                 {end_after_key, FT_ERR_STATE, "after a key"},
                 {wrong_end, FT_ERR_STATE, "']' without its beginning"},
                 {end_without_begin, FT_ERR_STATE, "']' without its beginning"},
                 {two_values, FT_ERR_STATE, "second value"},
                 {not_ended, FT_ERR_STATE, "2 objects or arrays are not ended"},
                 {nothing, FT_ERR_STATE, "no value"},
                 {too_deep, FT_ERR_STATE, "more than 64 levels"},
                 {null_string, FT_ERR_ARG, "NULL"}};
    const char *path = in_directory("misuse.json");
    ft_io_json *json;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(ft_io_json_open(path, &json));
        cases[i].fn(json);
        ft_error(FT_ERR_OOM, "an error of someone else in between");
        assert_error(ft_io_json_finish(json), cases[i].status, path, cases[i].reason);
    }
    /* 64 levels are possible. */
    assert_ok(ft_io_json_open(path, &json));
    for (int i = 0; i < 64; i++) ft_io_json_begin_array(json);
    for (int i = 0; i < 64; i++) ft_io_json_end_array(json);
    assert_ok(ft_io_json_finish(json));
    /* No emitter, no effect. */
    value_without_key(NULL);
    ft_io_json_float(NULL, NAN);
    ft_io_json_bool(NULL, 1);
    assert_ok(ft_io_json_finish(NULL));
    assert_error(ft_io_json_create(NULL, "x", &json), FT_ERR_ARG, "file", "NULL");
}

static void unwritable_json_is_reported(void **state)
{
    (void)state;
    ft_io_json *json;
    const char *path = in_directory("missing/x.json");
    assert_error(ft_io_json_open(path, &json), FT_ERR_IO, path, "No such file");
    assert_null(json);
    assert_error(ft_io_json_open(temp_directory, &json), FT_ERR_IO, temp_directory, "directory");
    if (access("/dev/full", W_OK) != 0) skip();
    static const int lengths[2] = {1, 100000};
    for (int k = 0; k < 2; k++) { /* the error comes at the end, and on the way */
        assert_ok(ft_io_json_open("/dev/full", &json));
        ft_io_json_begin_array(json);
        for (int i = 0; i < lengths[k]; i++) ft_io_json_int(json, i);
        ft_io_json_end_array(json);
        assert_error(ft_io_json_finish(json), FT_ERR_IO, "/dev/full", "No space left");
    }
}

/* ------------------------------------------------------------------------------------------ log */

static void logs_rows(void **state)
{
    (void)state;
    const char *path = write_file("run.jsonl", "old\n", 4);
    ft_io_log *log;
    assert_ok(ft_io_log_open(path, 0, &log));
    assert_file_is(path, "");
    ft_io_log_begin(log);
    ft_io_log_int(log, "step", 1);
    ft_io_log_float(log, "loss", 5.54517746);
    ft_io_log_float(log, "grad_norm", NAN);
    ft_io_log_string(log, "note", "a \"b\"\n");
    assert_file_is(path, "");
    assert_ok(ft_io_log_end(log));
    assert_file_is(path, "{\"step\":1,\"loss\":5.54517746,\"grad_norm\":null,"
                         "\"note\":\"a \\\"b\\\"\\u000a\"}\n");
    ft_io_log_begin(log);
    ft_io_json_key(ft_io_log_json(log), "peak");
    ft_io_json_begin_array(ft_io_log_json(log));
    ft_io_json_int(ft_io_log_json(log), 7);
    ft_io_json_end_array(ft_io_log_json(log));
    assert_ok(ft_io_log_end(log));
    ft_io_log_begin(log);
    assert_ok(ft_io_log_end(log));
    assert_ok(ft_io_log_close(log));

    /* Appended, after a row that a killed process has not finished. */
    size_t n;
    char *text = read_file(path, &n);
    assert_string_equal(strchr(text, '\n'), "\n{\"peak\":[7]}\n{}\n");
    free(text);
    path = write_file("torn.jsonl", "{\"step\":1}\n{\"st", 15);
    for (int i = 0; i < 2; i++) {
        assert_ok(ft_io_log_open(path, 1, &log));
        ft_io_log_begin(log);
        ft_io_log_int(log, "step", 2 + i);
        assert_ok(ft_io_log_end(log));
        assert_ok(ft_io_log_close(log));
    }
    assert_file_is(path, "{\"step\":1}\n{\"st\n{\"step\":2}\n{\"step\":3}\n");
    path = in_directory("fresh.jsonl");
    assert_ok(ft_io_log_open(path, 1, &log));
    assert_ok(ft_io_log_close(log));
    assert_file_is(path, "");
}

static void no_log_is_no_effect(void **state)
{
    (void)state;
    ft_io_log_begin(NULL);
    ft_io_log_int(NULL, "a", 1);
    ft_io_log_float(NULL, "a", 1);
    ft_io_log_string(NULL, "a", "b");
    assert_null(ft_io_log_json(NULL));
    assert_ok(ft_io_log_end(NULL));
    assert_ok(ft_io_log_close(NULL));
}

static void bad_rows_are_reported_and_not_written(void **state)
{
    (void)state;
    const char *path = in_directory("bad.jsonl");
    ft_io_log *log;
    assert_ok(ft_io_log_open(path, 0, &log));
    assert_error(ft_io_log_end(log), FT_ERR_STATE, path, "has not begun");
    ft_io_log_begin(log);
    ft_io_log_begin(log);
    assert_error(ft_io_log_end(log), FT_ERR_STATE, path, "inside another");
    ft_io_log_int(log, "stray", 1);
    ft_io_log_begin(log);
    ft_io_log_int(log, "lost", 1);
    assert_error(ft_io_log_end(log), FT_ERR_STATE, path, "outside a row");
    ft_io_log_begin(log);
    ft_io_json_key(ft_io_log_json(log), "k");
    ft_io_json_begin_object(ft_io_log_json(log));
    assert_error(ft_io_log_end(log), FT_ERR_STATE, path, "not ended");
    ft_io_log_begin(log);
    ft_io_log_string(log, "s", NULL);
    assert_error(ft_io_log_end(log), FT_ERR_ARG, path, "NULL");
    ft_io_log_begin(log);
    ft_io_log_int(log, "good", 1);
    assert_ok(ft_io_log_end(log));
    assert_file_is(path, "{\"good\":1}\n");
    ft_io_log_begin(log);
    assert_error(ft_io_log_close(log), FT_ERR_STATE, path, "inside a row");
    assert_ok(ft_io_log_open(path, 1, &log));
    ft_io_log_int(log, "stray", 1);
    assert_error(ft_io_log_close(log), FT_ERR_STATE, path, "outside a row");
    assert_file_is(path, "{\"good\":1}\n");
}

static void unwritable_logs_are_reported(void **state)
{
    (void)state;
    ft_io_log *log;
    const char *path = in_directory("missing/x.jsonl");
    assert_error(ft_io_log_open(path, 0, &log), FT_ERR_IO, path, "No such file");
    assert_null(log);
    assert_error(ft_io_log_open(temp_directory, 1, &log), FT_ERR_IO, temp_directory, "Is a directory");
    if (access("/dev/full", W_OK) != 0) skip();
    assert_ok(ft_io_log_open("/dev/full", 0, &log));
    for (int i = 0; i < 2; i++) {
        ft_io_log_begin(log);
        ft_io_log_int(log, "step", i);
        assert_error(ft_io_log_end(log), FT_ERR_IO, "/dev/full", "No space left");
    }
    assert_ok(ft_io_log_close(log));
}

/* A row of which only a part could be written is ended before the next one. */
static void a_torn_row_ends_before_the_next(void **state)
{
    (void)state;
    const char *path = in_directory("limit.jsonl");
    struct rlimit old, tight;
    ft_io_log *log;
    assert_ok(ft_io_log_open(path, 0, &log));
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    tight = old;
    tight.rlim_cur = 5;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    ft_io_log_begin(log);
    ft_io_log_int(log, "step", 1);
    const ft_status status = ft_io_log_end(log);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_error(status, FT_ERR_IO, path, "File too large");
    ft_io_log_begin(log);
    ft_io_log_int(log, "step", 2);
    assert_ok(ft_io_log_end(log));
    assert_ok(ft_io_log_close(log));
    assert_file_is(path, "{\"ste\n{\"step\":2}\n");
}

/* --------------------------------------------------------------------------------------- memory */

/* Each of these does a whole piece of work; limited memory may end it anywhere. */

static ft_status open_and_close(void)
{
    ft_io_safetensors *file;
    FT_TRY(ft_io_safetensors_open(in_directory("in.safetensors"), &file));
    ft_io_safetensors_close(file);
    return FT_OK;
}

static ft_status describe(ft_io_safetensors_writer *writer)
{
    static const int64_t one[1] = {1}, two[1] = {2};
    static produced p;
    p.expected = 0;
    p.calls = 0;
    p.fail_at = -1;
    FT_TRY(ft_io_safetensors_set_metadata(writer, "k", "v"));
    FT_TRY(ft_io_safetensors_add(writer, "x", FT_IO_U8, 1, one, "x"));
    return ft_io_safetensors_add_fill(writer, "large", FT_IO_F32, 1, two, produce, &p);
}

static ft_status create_and_finish(void)
{
    ft_io_safetensors_writer *writer;
    FT_TRY(ft_io_safetensors_create(in_directory("out.safetensors"), &writer));
    const ft_status status = describe(writer);
    if (status == FT_OK) return ft_io_safetensors_finish(writer);
    ft_io_safetensors_abandon(writer);
    return status;
}

static ft_status open_and_close_data(void)
{
    const char *path = in_directory("in.safetensors");
    const char *paths[2] = {path, path};
    ft_io_data *data;
    FT_TRY(ft_io_data_open(paths, 2, FT_IO_TOKEN_BYTE, &data));
    ft_io_data_close(data);
    return FT_OK;
}

static ft_status emit(void)
{
    ft_io_json *json;
    FT_TRY(ft_io_json_open(in_directory("out.json"), &json));
    ft_io_json_begin_array(json);
    for (int i = 0; i < 1000; i++) ft_io_json_int(json, i);
    ft_io_json_end_array(json);
    return ft_io_json_finish(json);
}

static ft_status log_a_row(void)
{
    ft_io_log *log;
    FT_TRY(ft_io_log_open(in_directory("out.jsonl"), 0, &log));
    ft_io_log_begin(log);
    ft_io_log_int(log, "step", 1);
    const ft_status status = ft_io_log_end(log);
    const ft_status closed = ft_io_log_close(log);
    return status != FT_OK ? status : closed;
}

static void runs_out_of_memory_in_good_order(void **state)
{
    (void)state;
    static const struct {
        ft_status (*work)(void);
        const char *output;
    } cases[] = {{open_and_close, NULL},
                 {create_and_finish, "out.safetensors"},
                 {open_and_close_data, NULL},
                 {emit, NULL},
                 {log_a_row, NULL}};
    write_tensors("in.safetensors",
                  "{\"__metadata__\":{\"k\":\"v\"},"
                  "\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
                  1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ft_status status = FT_ERR_OOM;
        int n = 0;
        for (; status != FT_OK; n++) {
            allocations_left = n;
            status = cases[i].work();
            allocations_left = -1;
            if (status == FT_OK) break;
            assert_error(status, FT_ERR_OOM, "no memory for", "bytes");
            if (cases[i].output != NULL)
                assert_int_equal(access(in_directory(cases[i].output), F_OK), -1);
        }
        assert_true(n >= 2);
    }
    assert_int_equal(count_files(0), 4); /* no temporary ones among them */
}

#define TEST(name) cmocka_unit_test_teardown(name, clean_directory)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(reads_a_file_spelled_by_hand),
        TEST(reads_only_what_the_tensor_holds),
        TEST(converts_every_float_format),
        TEST(converts_every_integer_format),
        TEST(knows_every_dtype),
        TEST(reads_unusual_but_valid_files),
        TEST(finds_among_many),
        TEST(refuses_malformed_headers),
        TEST(refuses_malformed_files),
        TEST(messages_stay_on_one_line),
        TEST(survives_every_damage_of_a_byte),
        TEST(writes_the_bytes_of_the_format),
        TEST(writes_what_it_then_reads),
        TEST(refuses_what_cannot_be_written),
        TEST(reports_places_that_cannot_be_written),
        TEST(a_failed_write_leaves_the_old_file),
        TEST(every_opening_of_a_file_to_write_can_be_refused),
        TEST(temporary_files_of_the_dead_are_not_in_the_way),
        TEST(what_killed_processes_left_is_removed),
        TEST(reads_golden_files),
#ifdef FT_CJSON
        TEST(reads_configs_of_every_family),
        TEST(refuses_configs_by_name),
        TEST(reads_windows_and_tokens),
        TEST(reads_the_configs_of_golden_files),
#endif
        TEST(reads_files_as_one_stream),
        TEST(reads_beyond_32_bits),
        TEST(refuses_data_that_is_not_there),
        TEST(names_the_byte_outside_the_vocabulary),
        TEST(permutes_every_size),
        TEST(permutations_stay_what_they_are),
        TEST(permutations_look_random),
        TEST(labels_are_the_next_tokens),
        TEST(short_sequences_and_exact_fits),
        TEST(epochs_follow_without_loss_or_repetition),
        TEST(samples_do_not_depend_on_the_ranks),
        TEST(refuses_bad_samples),
        TEST(emits_nested_json),
        TEST(escapes_strings),
        TEST(floats_are_json_in_every_locale),
        TEST(a_float_comes_back_from_its_text),
        TEST(a_double_comes_back_from_its_text),
        TEST(emits_long_documents),
        TEST(misuse_of_the_emitter_is_reported),
        TEST(unwritable_json_is_reported),
        TEST(logs_rows),
        TEST(no_log_is_no_effect),
        TEST(bad_rows_are_reported_and_not_written),
        TEST(unwritable_logs_are_reported),
        TEST(a_torn_row_ends_before_the_next),
        TEST(runs_out_of_memory_in_good_order),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
