/* fuzz.h: what the fuzzers share. A fuzzer feeds a parser with inputs that libFuzzer makes; the
   sanitizers see what the parser must not do, and MUST() what must hold of what it accepts.

   make fuzz builds the parsers with tests/fuzz/heap_map.h, so that a read past the end of a file is
   one past the end of a block, which AddressSanitizer sees. */

#ifndef FUZZ_H
#define FUZZ_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memfd_create, open_memstream */
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            dprintf(2, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* The input as a file: its path. There is one, whose contents change; slot tells two apart. */
static inline const char *fuzz_file(int slot, const uint8_t *data, size_t n)
{
    static int fds[2] = {-1, -1};
    static char paths[2][40];
    if (fds[slot] < 0) fds[slot] = memfd_create("input", 0);
    snprintf(paths[slot], sizeof paths[slot], "/proc/self/fd/%d", fds[slot]);
    MUST(fds[slot] >= 0 && ftruncate(fds[slot], 0) == 0);
    MUST(pwrite(fds[slot], data, n, 0) == (ssize_t)n);
    return paths[slot];
}

/* The input as text: a copy with a zero after it, to be freed. */
static inline char *fuzz_text(const uint8_t *data, size_t n)
{
    char *text = (char *)malloc(n + 1);
    MUST(text != NULL);
    memcpy(text, data, n);
    text[n] = 0;
    return text;
}

/* Reads all bytes, so that one that is not there shows. */
static inline void fuzz_touch(const void *bytes, size_t n)
{
    static volatile unsigned char sum;
    for (size_t i = 0; i < n; i++) sum = (unsigned char)(sum + ((const unsigned char *)bytes)[i]);
}

/* -- mutations of texts with numbers -- */

size_t LLVMFuzzerMutate(uint8_t *data, size_t n, size_t most);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t most, unsigned seed);

/* Puts another number in the place of one that begins at or after `from` and before `end`: one that
   is near, or one that is often wrong. Blind changes of bytes hardly ever hit a value that matters.
   Returns the new size. */
static inline size_t fuzz_change_number(uint8_t *data, size_t n, size_t most, size_t from,
                                        size_t end, unsigned seed)
{
    static const char *const numbers[] = {
        "0", "1", "2", "3", "4", "7", "8", "16", "-1", "1.5", "-0", "255", "256", "65536",
        "2147483647", "2147483648", "4294967296", "9007199254740991", "9007199254740993",
        "9223372036854775807", "9223372036854775808", "18446744073709551616", "1e308", "1e999",
        "1e-400", "null", "true", "\"\"", "[]", "{}"};
    char near[32];
    const char *put = numbers[seed / 7 % (sizeof numbers / sizeof *numbers)];
    if (end <= from) return n;
    size_t at = from + seed % (end - from), length = 0;
    while (at > from && strchr("0123456789.eE+-", data[at - 1]) && data[at - 1]) at--;
    while (at < end && (data[at] < '0' || data[at] > '9')) at++;
    while (at + length < n && data[at + length] && strchr("0123456789.eE+-", data[at + length]))
        length++;
    if (length == 0) return n;
    if (seed % 3 == 0 && length < 16) {
        snprintf(near, sizeof near, "%.*s", (int)length, (const char *)data + at);
        snprintf(near, sizeof near, "%lld", strtoll(near, NULL, 10) + (int)(seed / 11 % 17) - 8);
        put = near;
    }
    size_t with = strlen(put);
    if (n - length + with > most) return n;
    memmove(data + at + with, data + at + length, n - at - length);
    memcpy(data + at, put, with);
    return n - length + with;
}

#ifdef FUZZ_NUMBERS /* the input is such a text */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t most, unsigned seed)
{
    if (seed & 1) return fuzz_change_number(data, n, most, 0, n, seed >> 1);
    return LLVMFuzzerMutate(data, n, most);
}
#endif

#endif /* FUZZ_H */
