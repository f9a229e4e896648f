/* test_jsonl.c: examples for fine-tuning. What a line means, and every way in which it can be
   wrong; that rows hold each example once, whole, where best fit puts it (by a search of its own,
   here), its prompt without labels; and that neither ranks nor micro-batches are seen. */

#if !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#define _DEFAULT_SOURCE 1 /* mkdtemp */
#define _POSIX_C_SOURCE 200809L
#endif

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "temp_files.h"
#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_io.h"
#include "assert_status.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ------------------------------------------------------------------------------------- helpers */

static ft_status open_rows(const char *const *paths, int n, int64_t T, int64_t eod,
                           ft_io_data **data)
{
    ft_io_data_config config = ft_io_data_config_default();
    config.eod_token = eod;
    config.seq_len = T;
    return ft_io_data_open_files(paths, n, &config, data);
}

static const char *write_text(const char *name, const char *text)
{
    return write_file(name, text, strlen(text));
}

/* --------------------------------------------------------------------------------------- lines */

static ft_status parse(const char *text, size_t n, int32_t *tokens, int64_t *prompt, int64_t *all,
                       int *is_bytes)
{
    /* In memory of its own, whose end a sanitizer watches. */
    char *exact = (char *)malloc(n ? n : 1);
    assert_non_null(exact);
    memcpy(exact, text, n);
    const ft_status status = ft_io_jsonl_parse(exact, n, "lines", 7, 64, tokens, prompt, all,
                                               is_bytes);
    free(exact);
    return status;
}

static void a_line_is_its_tokens(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int prompt, n, is_bytes;
        int32_t tokens[12];
    } cases[] = {
        {"{\"prompt\": \"ab\", \"answer\": \"c\"}", 2, 3, 1, {'a', 'b', 'c'}},
        {"{\"answer\":\"c\",\"prompt\":\"ab\"}", 2, 3, 1, {'a', 'b', 'c'}}, /* any order */
        {" \t{ \"prompt\" : \"\" , \"answer\" : \"\" } \r", 0, 0, 1, {0}},
        {"{\"prompt\": [1, 2], \"answer\": [3]}", 2, 3, 0, {1, 2, 3}},
        {"{\"answer\": [3,4 , 5 ],\"prompt\": [2147483647]}", 1, 4, 0, {2147483647, 3, 4, 5}},
        {"{\"prompt\": [], \"answer\": [0]}", 0, 1, 0, {0}},
        {"{\"prompt\": \"\\\"\\\\\\/\\b\\f\\n\\r\\t\", \"answer\": \"x\"}", 8, 9, 1,
         {'"', '\\', '/', 8, 12, 10, 13, 9, 'x'}},
        {"{\"prompt\": \"\\u0041\\u00e9\\u20ac\", \"answer\": \"\\u0000\"}", 6, 7, 1,
         {'A', 0xc3, 0xa9, 0xe2, 0x82, 0xac, 0}},
        {"{\"prompt\": \"\\ud83d\\ude00\", \"answer\": \"\xf0\x9f\x98\x80\"}", 4, 8, 1,
         {0xf0, 0x9f, 0x98, 0x80, 0xf0, 0x9f, 0x98, 0x80}},
        {"{\"prompt\": \"\\uDBFF\\uDFFF\", \"answer\": \"\x7f\"}", 4, 5, 1,
         {0xf4, 0x8f, 0xbf, 0xbf, 0x7f}},
        {"{\"\\u0070rompt\": \"p\", \"answer\": \"a\"}", 1, 2, 1, {'p', 'a'}},
        {"{\"prompt\": \"}{][,:\", \"answer\": \"a\"}", 6, 7, 1,
         {'}', '{', ']', '[', ',', ':', 'a'}},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        int32_t tokens[64];
        int64_t prompt, all;
        int is_bytes;
        memset(tokens, 0x77, sizeof tokens);
        assert_ok(parse(cases[i].text, strlen(cases[i].text), tokens, &prompt, &all, &is_bytes));
        assert_int_equal(prompt, cases[i].prompt);
        assert_int_equal(all, cases[i].n);
        assert_int_equal(is_bytes, cases[i].is_bytes);
        for (int k = 0; k < cases[i].n; k++) assert_int_equal(tokens[k], cases[i].tokens[k]);
        assert_int_equal(tokens[cases[i].n], 0x77777777);
        /* As many as there is room for. */
        for (int room = 0; room < cases[i].n; room++) {
            memset(tokens, 0x77, sizeof tokens);
            assert_ok(ft_io_jsonl_parse(cases[i].text, strlen(cases[i].text), "x", 1, room,
                                        tokens, &prompt, &all, &is_bytes));
            assert_int_equal(all, cases[i].n);
            for (int k = 0; k < room; k++) assert_int_equal(tokens[k], cases[i].tokens[k]);
            assert_int_equal(tokens[room], 0x77777777);
        }
        assert_ok(ft_io_jsonl_parse(cases[i].text, strlen(cases[i].text), "x", 1, 64, NULL,
                                    &prompt, &all, &is_bytes));
        assert_int_equal(all, cases[i].n);
    }
}

#define P "{\"prompt\": \"p\", "
static const struct { const char *text, *says; } bad_lines[] = {
    {"", "it is empty: each line is an object"},
    {"   \t", "it is empty: each line is an object"},
    {"null", "expected '{' of an example, found 'n'"},
    {"[1, 2]", "expected '{' of an example, found '['"},
    {"\"text\"", "expected '{' of an example"},
    {"{", "expected a key, found the line's end"},
    {"{}", "\"prompt\" is missing"},
    {P "}", "expected a key, found '}'"},
    {"{\"prompt\": \"p\"}", "\"answer\" is missing"},
    {"{\"answer\": \"a\"}", "\"prompt\" is missing"},
    {"{\"prompt\": \"p\" \"answer\": \"a\"}", "expected ',' or '}', found '\"'"},
    {P "\"answer\" \"a\"}", "expected ':' behind a key"},
    {P "\"answer\": }", "expected a string or an array of token ids, found '}'"},
    {P "\"answer\": \"a\"", "found the line's end"},
    {P "\"answer\": \"a\"} x", "expected nothing behind the object, found 'x'"},
    {P "\"answer\": \"a\"}{}", "expected nothing behind the object, found '{'"},
    {P "\"answer\": \"a\",}", "expected a key, found '}'"},
    {P "\"answer\": \"a\", \"answer\": \"b\"}", "\"answer\" is there twice"},
    {P "\"prompt\": \"a\"}", "\"prompt\" is there twice"},
    {P "\"completion\": \"a\"}", "key \"completion\": an example has \"prompt\" and \"answer\""},
    {P "\"Answer\": \"a\"}", "key \"Answer\""},
    {P "\"a\nb\": \"a\"}", "control character 0x0a"},
    {P "answer: \"a\"}", "expected a key, found 'a'"},
    {P "'answer': \"a\"}", "expected a key"},
    {P "\"answer\": 5}", "expected a string or an array of token ids, found '5'"},
    {P "\"answer\": null}", "expected a string or an array of token ids, found 'n'"},
    {P "\"answer\": true}", "expected a string or an array of token ids, found 't'"},
    {P "\"answer\": {\"text\": 1}}", "expected a string or an array of token ids, found '{'"},
    {P "\"answer\": [1]}", "are a string and an array: both must be of one kind"},
    {"{\"prompt\": [1], \"answer\": \"a\"}", "both must be of one kind"},
    {"{\"prompt\": [1,], \"answer\": [1]}", "expected a token id, found ']'"},
    {"{\"prompt\": [1 2], \"answer\": [1]}", "expected ',' or ']', found '2'"},
    {"{\"prompt\": [-1], \"answer\": [1]}", "a negative number where a token id belongs"},
    {"{\"prompt\": [1.5], \"answer\": [1]}", "a fraction where a token id belongs"},
    {"{\"prompt\": [1e2], \"answer\": [1]}", "a fraction where a token id belongs"},
    {"{\"prompt\": [01], \"answer\": [1]}", "a number with a leading zero"},
    {"{\"prompt\": [\"1\"], \"answer\": [1]}", "expected a token id, found '\"'"},
    {"{\"prompt\": [[1]], \"answer\": [1]}", "expected a token id, found '['"},
    {"{\"prompt\": [2147483648], \"answer\": [1]}", "token id 2147483648 is above 2^31 - 1"},
    {"{\"prompt\": [99999999999999999999], \"answer\": [1]}", "a number above 2^63 - 1"},
    {"{\"prompt\": [1", "found the line's end"},
    {P "\"answer\": \"a}", "'\"' at the end of a string, found the line's end"},
    {P "\"answer\": \"\\x41\"}", "an escape of JSON after '\\'"},
    {P "\"answer\": \"\\", "an escape of JSON after '\\'"},
    {P "\"answer\": \"\\u12g4\"}", "four hexadecimal digits after \\u, found 'g'"},
    {P "\"answer\": \"\\u12", "four hexadecimal digits after \\u"},
    {P "\"answer\": \"\\ud800\"}", "half of a surrogate pair"},
    {P "\"answer\": \"\\udc00\"}", "half of a surrogate pair"},
    {P "\"answer\": \"\\ud800\\u0041\"}", "half of a surrogate pair"},
    {P "\"answer\": \"\tx\"}", "control character 0x09 in a string"},
    {P "\"answer\": \"\x80\"}", "byte 0x80 in a string is not UTF-8"},
    {P "\"answer\": \"\xc0\xaf\"}", "byte 0xc0 in a string is not UTF-8"},
    {P "\"answer\": \"\xed\xa0\x80\"}", "byte 0xed in a string is not UTF-8"},
    {P "\"answer\": \"\xf0\x9f\x98\"}", "byte 0xf0 in a string is not UTF-8"},
};

static void lines_that_are_no_examples_are_refused(void **state)
{
    (void)state;
    int32_t tokens[64];
    int64_t prompt, all;
    int is_bytes;
    for (size_t i = 0; i < COUNT(bad_lines); i++) {
        const char *text = bad_lines[i].text;
        assert_error(parse(text, strlen(text), tokens, &prompt, &all, &is_bytes), FT_ERR_DATA,
                     "lines: line 7, byte", bad_lines[i].says);
        if (strchr(text, '\n')) continue;
        /* And as the third line of a file. */
        char file[512];
        ft_io_data *data;
        snprintf(file, sizeof file, "%s\n%s\n%s\n%s\n", "{\"prompt\": \"p\", \"answer\": \"a\"}",
                 "{\"prompt\": \"q\", \"answer\": \"b\"}", text,
                 "{\"prompt\": \"r\", \"answer\": \"c\"}");
        const char *path = write_text("bad.jsonl", file);
        assert_error(open_rows(&path, 1, 64, -1, &data), FT_ERR_DATA, "bad.jsonl: line 3",
                     bad_lines[i].says);
        assert_null(data);
    }
    static const char nul[] = "{\"prompt\": \"p\0\", \"answer\": \"a\"}";
    assert_error(parse(nul, sizeof nul - 1, tokens, &prompt, &all, &is_bytes), FT_ERR_DATA,
                 "line 7", "control character 0x00");
    assert_error(ft_io_jsonl_parse(NULL, 3, "x", 1, 0, NULL, &prompt, &all, &is_bytes), FT_ERR_ARG,
                 "ft_io_jsonl_parse", "NULL");
    assert_error(ft_io_jsonl_parse("{}", 2, "x", 0, 0, NULL, &prompt, &all, &is_bytes), FT_ERR_ARG,
                 "ft_io_jsonl_parse", "line 0");
}

/* Whatever a byte becomes, and wherever a line ends. */
static void survives_every_damage_of_a_line(void **state)
{
    (void)state;
    static const char *const whole[2] = {
        "{\"prompt\": \"\\u00e9\\ud83d\\ude00\xc3\xa9\", \"answer\": \"\\n\"}",
        "{\"answer\": [1, 20], \"prompt\": [3]}"};
    int32_t tokens[64];
    int64_t prompt, all;
    int is_bytes;
    for (int k = 0; k < 2; k++) {
        const size_t n = strlen(whole[k]);
        char text[128];
        for (size_t at = 0; at < n; at++) {
            assert_int_equal(parse(whole[k], at, tokens, &prompt, &all, &is_bytes), FT_ERR_DATA);
            for (int value = 0; value < 256; value++) {
                memcpy(text, whole[k], n);
                text[at] = (char)value;
                if (parse(text, n, tokens, &prompt, &all, &is_bytes) != FT_OK)
                    assert_non_null(strstr(ft_last_error(), "lines: line 7, byte"));
                else assert_true(prompt >= 0 && prompt <= all && all <= 16);
            }
        }
    }
}

/* ---------------------------------------------------------------------------------------- rows */

enum { EXAMPLES = 57, T = 20, EOD = 300 };

/* Example i of two files: token j is 1000 i + j; it takes 2 to T + 1 tokens with its eod. */
static int size_of_example(int i) { return i % 11 == 3 ? T + 1 : 2 + (i * 37) % (T - 1); }
static int prompt_of(int i) { return (i * 5) % size_of_example(i); }

static const char *write_ids(const char *name, int first, int last)
{
    static char text[1 << 16];
    size_t at = 0;
    for (int i = first; i < last; i++) {
        const int n = size_of_example(i) - 1, prompt = prompt_of(i); /* the eod is appended */
        at += (size_t)sprintf(text + at, "{\"prompt\": [");
        for (int j = 0; j < n; j++) {
            if (j == prompt) at += (size_t)sprintf(text + at, "], \"answer\": [");
            at += (size_t)sprintf(text + at, "%s%d", j && j != prompt ? ", " : "", 1000 * i + j);
        }
        if (prompt == n) at += (size_t)sprintf(text + at, "], \"answer\": [");
        at += (size_t)sprintf(text + at, "]}%s", i + 1 < last ? "\n" : ""); /* no last line end */
        assert_true(at < sizeof text - 4096);
    }
    return write_file(name, text, at);
}

static ft_io_data *open_ids(void)
{
    const char *paths[2];
    ft_io_data *data;
    paths[0] = write_ids("first.jsonl", 0, 20);
    paths[1] = write_ids("second.jsonl", 20, EXAMPLES);
    assert_ok(open_rows(paths, 2, T, EOD, &data));
    assert_int_equal(ft_io_data_format(data), FT_IO_FORMAT_JSONL);
    assert_int_equal(ft_io_data_examples(data), EXAMPLES);
    assert_true(ft_io_data_has_documents(data));
    assert_string_equal(ft_io_data_file(data, 1), paths[1]);
    assert_null(ft_io_data_file(data, 2));
    return data;
}

/* Best fit by looking at every row: the rows' number, and the row of each example. */
static int best_fit(int row_of[EXAMPLES])
{
    int room[EXAMPLES], rows = 0;
    int64_t newest[EXAMPLES]; /* of rows with equal room the one that was put to last */
    for (int i = 0; i < EXAMPLES; i++) {
        const int takes = size_of_example(i) - 1;
        int best = -1;
        for (int r = 0; r < rows; r++)
            if (room[r] >= takes && (best < 0 || room[r] < room[best] ||
                                     (room[r] == room[best] && newest[r] > newest[best])))
                best = r;
        if (best < 0) room[best = rows++] = T;
        room[best] -= takes;
        newest[best] = i;
        row_of[i] = best;
    }
    return rows;
}

static void rows_hold_each_example_once(void **state)
{
    (void)state;
    int row_of[EXAMPLES], seen[EXAMPLES] = {0};
    const int rows = best_fit(row_of);
    ft_io_data *data = open_ids();
    ft_io_eval eval;
    int64_t all = 0, tokens_of_all = 0;
    for (int i = 0; i < EXAMPLES; i++) tokens_of_all += size_of_example(i);
    assert_int_equal(ft_io_data_tokens(data), tokens_of_all);
    assert_ok(ft_io_eval_init(&eval, data, T, 1, 1, 0));
    assert_int_equal(eval.windows, rows);
    for (int row = 0; row < rows; row++) {
        int32_t tokens[T], labels[T], first[T], plain[2][T];
        int64_t counted, sum = 0;
        int at = 0, last = -1;
        assert_ok(ft_io_eval_fill_docs(&eval, row, 0, tokens, labels, first, &counted));
        assert_ok(ft_io_eval_fill(&eval, row, 0, plain[0], plain[1], NULL));
        assert_memory_equal(tokens, plain[0], sizeof tokens);
        assert_memory_equal(labels, plain[1], sizeof labels);
        while (at < T && (tokens[at] || labels[at] != -100)) {
            const int i = tokens[at] / 1000, n = size_of_example(i), prompt = prompt_of(i);
            assert_int_equal(row_of[i], row);
            assert_true(i > last); /* in the order of the files */
            last = i;
            seen[i]++;
            for (int j = 0; j + 1 < n; j++, at++) {
                assert_int_equal(tokens[at], 1000 * i + j);
                assert_int_equal(labels[at], j + 1 < prompt ? -100
                                 : j + 2 == n ? EOD : 1000 * i + j + 1);
                assert_int_equal(first[at], at - j);
                sum += labels[at] != -100;
            }
        }
        for (int t = at; t < T; t++) { /* filled up */
            assert_int_equal(tokens[t], 0);
            assert_int_equal(labels[t], -100);
            assert_int_equal(first[t], at);
        }
        assert_int_equal(counted, sum);
        all += sum;
    }
    assert_int_equal(eval.counted, all);
    for (int i = 0; i < EXAMPLES; i++) assert_int_equal(seen[i], 1);
    ft_io_data_close(data);
}

/* The order of rows, their labels and their counts are those of one rank. */
static void ranks_are_not_seen(void **state)
{
    (void)state;
    enum { G = 6, STEPS = 20 };
    static const int layouts[][2] = {{1, 1}, {2, 1}, {6, 1}, {1, 6}, {3, 2}, {2, 3}};
    static int32_t reference[STEPS][G][3][T];
    ft_io_data *data = open_ids();
    for (size_t k = 0; k < COUNT(layouts); k++) {
        const int R = layouts[k][0], M = layouts[k][1], B = G / (R * M);
        ft_io_sampler sampler;
        assert_ok(ft_io_sampler_init(&sampler, data, T, G, 3));
        for (int step = 0; step < STEPS; step++) {
            int64_t whole, total = 0;
            assert_ok(ft_io_sampler_counted(&sampler, step, 0, 1, 1, &whole));
            for (int r = 0; r < R; r++) {
                int64_t counted, sum = 0;
                for (int m = 0; m < M; m++) {
                    int32_t got[3][G * T];
                    assert_ok(ft_io_sampler_fill_docs(&sampler, step, r, R, m, M, got[0], got[1],
                                                      got[2]));
                    for (int b = 0; b < B; b++)
                        for (int what = 0; what < 3; what++) {
                            int32_t *row = reference[step][(m * R + r) * B + b][what];
                            if (k == 0) memcpy(row, got[what] + b * T, T * sizeof *row);
                            assert_memory_equal(row, got[what] + b * T, T * sizeof *row);
                        }
                    for (int i = 0; i < B * T; i++) sum += got[1][i] != -100;
                }
                assert_ok(ft_io_sampler_counted(&sampler, step, r, R, M, &counted));
                assert_int_equal(counted, sum);
                total += sum;
            }
            assert_int_equal(total, whole);
        }
    }
    ft_io_data_close(data);
}

/* Strings and the ids of their bytes are the same rows. */
static void strings_are_bytes(void **state)
{
    (void)state;
    static const char text[] = "{\"prompt\": \"Q: \xc3\xa9?\", \"answer\": \"yes\"}\r\n"
                               "{\"prompt\": \"\", \"answer\": \"\\u00e9\"}\n";
    static const char ids[] = "{\"prompt\": [81,58,32,195,169,63], \"answer\": [121,101,115]}\n"
                              "{\"prompt\": [], \"answer\": [195,169]}\n";
    static const int32_t labels[16] = {-100, -100, -100, -100, -100, 'y', 'e', 's', 256, 0xa9, 256,
                                       -100, -100, -100, -100, -100};
    const char *paths[2];
    paths[0] = write_text("text.jsonl", text);
    paths[1] = write_text("ids.jsonl", ids);
    for (int k = 0; k < 2; k++) {
        ft_io_data *data;
        ft_io_eval eval;
        int32_t got[2][16];
        assert_ok(open_rows(&paths[k], 1, 16, 256, &data));
        assert_int_equal(ft_io_data_vocab(data), k ? 2147483648 : 257);
        assert_ok(ft_io_eval_init(&eval, data, 16, 1, 1, 0));
        assert_int_equal(eval.windows, 1);
        assert_int_equal(eval.counted, 6);
        assert_ok(ft_io_eval_fill(&eval, 0, 0, got[0], got[1], NULL));
        assert_memory_equal(got[1], labels, sizeof labels);
        assert_int_equal(got[0][0], 'Q');
        assert_int_equal(got[0][10], 0xa9);
        ft_io_data_close(data);
    }
    ft_io_data *data;
    assert_error(open_rows(paths, 2, 16, 256, &data), FT_ERR_DATA, "ids.jsonl: line 1",
                 "has token ids, the first line of the data has strings");
    assert_ok(open_rows(paths, 1, 16, -1, &data));
    assert_int_equal(ft_io_data_vocab(data), 256);
    ft_io_data_close(data);
}

static void examples_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    static const struct { const char *text; int T, eod; const char *line, *says; } cases[] = {
        {"{\"prompt\": \"abcd\", \"answer\": \"e\"}", 3, -1, "line 1",
         "an example of 5 tokens is longer than a row: sequence length 3 + 1; shorten it"},
        {"{\"prompt\": \"abcd\", \"answer\": \"e\"}", 4, 7, "line 1",
         "an example of 6 tokens is longer than a row: sequence length 4 + 1"},
        {"{\"prompt\": \"a\", \"answer\": \"b\"}\n{\"prompt\": [], \"answer\": []}", 4, -1,
         "line 2",
         "has token ids, the first line of the data has strings"},
        {"{\"prompt\": \"a\", \"answer\": \"\"}", 4, -1, "line 1",
         "nothing to learn: prompt and answer have 1 + 0 tokens"},
        {"{\"prompt\": \"\", \"answer\": \"a\"}", 4, -1, "line 1",
         "nothing to learn: prompt and answer have 0 + 1 tokens"},
        {"{\"prompt\": \"\", \"answer\": \"\"}", 4, 7, "line 1",
         "nothing to learn: prompt and answer have 0 + 1 tokens"},
        {"{\"prompt\": \"a\", \"answer\": \"b\"}\n\n", 4, -1, "line 2", "it is empty"},
    };
    ft_io_data *data;
    for (size_t i = 0; i < COUNT(cases); i++) {
        const char *path = write_text("fit.jsonl", cases[i].text);
        assert_error(open_rows(&path, 1, cases[i].T, cases[i].eod, &data), FT_ERR_DATA,
                     cases[i].line, cases[i].says);
        assert_non_null(strstr(ft_last_error(), "fit.jsonl"));
    }
    /* Just so: a row that is full, an answer that is the end alone. */
    const char *path = write_text("fit.jsonl", "{\"prompt\": \"abcd\", \"answer\": \"e\"}");
    assert_ok(open_rows(&path, 1, 4, -1, &data));
    ft_io_data_close(data);
    path = write_text("fit.jsonl", "{\"prompt\": \"abcd\", \"answer\": \"\"}");
    assert_ok(open_rows(&path, 1, 4, 9, &data));
    ft_io_data_close(data);
    assert_error(open_rows(&path, 1, 0, 9, &data), FT_ERR_ARG, "seq_len 0", "must be given");
    assert_error(open_rows(&path, 1, 4, -2, &data), FT_ERR_ARG, "eod_token -2", "");
    path = write_text("empty.jsonl", "");
    assert_error(open_rows(&path, 1, 4, 9, &data), FT_ERR_DATA, "empty.jsonl", "is empty");
    path = in_directory("none.jsonl");
    assert_error(open_rows(&path, 1, 4, 9, &data), FT_ERR_IO, "none.jsonl", "cannot open");
}

static void rows_are_for_one_length(void **state)
{
    (void)state;
    ft_io_data *data = open_ids();
    ft_io_sampler sampler;
    ft_io_eval eval;
    int32_t token;
    assert_error(ft_io_sampler_init(&sampler, data, T + 1, 4, 1), FT_ERR_DATA, "first.jsonl",
                 "packed into rows of 20 tokens, not of 21");
    assert_error(ft_io_eval_init(&eval, data, T - 1, 4, 1, 0), FT_ERR_DATA, "first.jsonl",
                 "packed into rows of 20 tokens, not of 19");
    assert_error(ft_io_data_read(data, 0, 1, &token), FT_ERR_UNSUPPORTED, "first.jsonl",
                 "examples are no stream");
    assert_null(ft_io_data_locate(data, 0, NULL));
    /* A state knows examples as it knows tokens. */
    ft_io_sampler_state kept;
    assert_ok(ft_io_sampler_init(&sampler, data, T, 4, 1));
    assert_ok(ft_io_sampler_state_get(&sampler, 5, &kept));
    assert_int_equal(kept.samples, 20);
    assert_ok(ft_io_sampler_state_set(&sampler, &kept, 5));
    const char *path = write_ids("third.jsonl", 0, EXAMPLES - 1);
    ft_io_data *other;
    assert_ok(open_rows(&path, 1, T, EOD, &other));
    assert_ok(ft_io_sampler_init(&sampler, other, T, 4, 1));
    assert_error(ft_io_sampler_state_set(&sampler, &kept, 5), FT_ERR_DATA, "third.jsonl",
                 "had data of");
    ft_io_data_close(other);
    ft_io_data_close(data);
}

static void the_vocabulary_is_kept(void **state)
{
    (void)state;
    ft_io_data *data = open_ids();
    ft_io_sampler sampler;
    int32_t tokens[T], labels[T];
    const int last = 1000 * (EXAMPLES - 1) + size_of_example(EXAMPLES - 1) - 2;
    char says[120];
    assert_ok(ft_io_data_check_vocab(data, last + 1));
    snprintf(says, sizeof says, "token %d, number %d of prompt and answer, is outside the "
             "vocabulary of %d", last, size_of_example(EXAMPLES - 1) - 2, last);
    assert_error(ft_io_data_check_vocab(data, last), FT_ERR_DATA, "second.jsonl: line 37", says);
    assert_error(ft_io_data_check_vocab(data, 5000), FT_ERR_DATA, "first.jsonl: line 6",
                 "token 5000, number 0 of");
    assert_ok(ft_io_data_set_vocab(data, last));
    assert_ok(ft_io_sampler_init(&sampler, data, T, 1, 1));
    int refused = 0;
    for (int64_t step = 0; step < sampler.windows; step++)
        if (ft_io_sampler_fill(&sampler, step, 0, 1, 0, 1, tokens, labels) != FT_OK) {
            assert_non_null(strstr(ft_last_error(), says));
            refused++;
        }
    assert_int_equal(refused, 1);
    ft_io_data_close(data);
    /* The end token too. */
    const char *path = write_text("end.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}\n");
    assert_ok(open_rows(&path, 1, T, 400, &data));
    assert_error(ft_io_data_check_vocab(data, 256), FT_ERR_DATA, "end.jsonl: line 1",
                 "token 400, number 2 of prompt and answer");
    assert_ok(ft_io_data_check_vocab(data, 401));
    ft_io_data_close(data);
}

static void a_file_that_changes_is_noticed(void **state)
{
    (void)state;
    static const char *const changed[] = {"{\"prompt\": \"a\", \"answer\": \"bc \"",
                                          "{\"prompt\": \"ac\", \"answer\": \"b\"",
                                          "{\"prompt\": [5], \"answer\": [6]"};
    for (size_t k = 0; k < COUNT(changed); k++) {
        ft_io_data *data;
        ft_io_eval eval;
        int32_t tokens[T], labels[T];
        const char *path =
            write_text("change.jsonl", "{\"prompt\": \"a\", \"answer\": \"bc\"}  \n");
        assert_ok(open_rows(&path, 1, T, -1, &data));
        assert_ok(ft_io_eval_init(&eval, data, T, 1, 1, 0));
        assert_ok(ft_io_eval_fill(&eval, 0, 0, tokens, labels, NULL));
        FILE *file = fopen(path, "r+b"); /* the same file, written over */
        assert_non_null(file);
        fputs(changed[k], file);
        assert_int_equal(fclose(file), 0);
        assert_error(ft_io_eval_fill(&eval, 0, 0, tokens, labels, NULL), FT_ERR_DATA,
                     "change.jsonl: line 1", "has changed since it was opened");
        ft_io_data_close(data);
    }
}

static ft_status open_and_read(void)
{
    const char *path = in_directory("first.jsonl");
    ft_io_data *data;
    ft_io_eval eval;
    int32_t tokens[T], labels[T];
    FT_TRY(open_rows(&path, 1, T, EOD, &data));
    ft_status status = ft_io_eval_init(&eval, data, T, 1, 1, 0);
    if (status == FT_OK) status = ft_io_data_check_vocab(data, 100000);
    if (status == FT_OK) status = ft_io_eval_fill(&eval, 0, 0, tokens, labels, NULL);
    ft_io_data_close(data);
    return status;
}

static void runs_out_of_memory_in_good_order(void **state)
{
    (void)state;
    ft_io_data_close(open_ids());
    ft_status status = FT_ERR_OOM;
    int n = 0;
    for (; status != FT_OK; n++) {
        allocations_left = n;
        status = open_and_read();
        allocations_left = -1;
        if (status != FT_OK) assert_error(status, FT_ERR_OOM, "no memory for", "bytes");
    }
    assert_true(n > 14);
}

#define TEST(name) cmocka_unit_test_teardown(name, clean_directory)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_line_is_its_tokens),
        TEST(lines_that_are_no_examples_are_refused),
        TEST(survives_every_damage_of_a_line),
        TEST(rows_hold_each_example_once),
        TEST(ranks_are_not_seen),
        TEST(strings_are_bytes),
        TEST(examples_that_do_not_fit_are_refused),
        TEST(rows_are_for_one_length),
        TEST(the_vocabulary_is_kept),
        TEST(a_file_that_changes_is_noticed),
        TEST(runs_out_of_memory_in_good_order),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
