/* Event files of TensorBoard, read back by a reader that shares no code with the writer: records and
   their checksums, protocol buffers by their published rules; the bytes that TensorBoard's own Python
   package writes for the same events; and what happens when memory, the disk or names are refused.

   cc -std=c11 -I. tests/test_tensorboard.c -lcmocka -lm -lpthread */

#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
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

/* The library's writes: counted, and made to fail or to stop early. */
static int writes;
static ssize_t write_limit = -1; /* bytes that the disk still takes; -1: any number */

static ssize_t counted_write(int fd, const void *bytes, size_t n)
{
    writes++;
    if (write_limit == 0) {
        errno = ENOSPC;
        return -1;
    }
    if (write_limit > 0 && n > (size_t)write_limit) n = (size_t)write_limit;
    if (write_limit > 0) write_limit -= (ssize_t)n;
    return write(fd, bytes, n);
}
#define write(fd, bytes, n) counted_write(fd, bytes, n)

#ifdef FT_TEST_LINKED /* make compiles the other headers once for many tests */
#define FEMTOTRON_IO_IMPLEMENTATION
#else
#define FEMTOTRON_IMPLEMENTATION
#endif
#include "femtotron.h"
#include "femtotron_io.h"
#include "assert_status.h"

/* -------------------------------------------------------------------------------- the reader */

/* CRC-32C as RFC 3720 defines it, from the highest coefficient down: bits of each byte from the
   lowest, a remainder that is not reflected, reversed at the end. */
static uint32_t reference_crc(const unsigned char *bytes, size_t n)
{
    uint32_t remainder = 0xffffffff, reversed = 0;
    for (size_t i = 0; i < n; i++)
        for (int bit = 0; bit < 8; bit++) {
            uint32_t carry = remainder >> 31 ^ (uint32_t)(bytes[i] >> bit & 1);
            remainder <<= 1;
            if (carry) remainder ^= 0x1edc6f41;
        }
    for (int bit = 0; bit < 32; bit++) reversed |= (remainder >> bit & 1) << (31 - bit);
    return ~reversed;
}

static uint64_t read_le(const unsigned char *at, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--) value = value << 8 | at[i];
    return value;
}

/* A mask is undone: less the constant, rotated to the left by 15. */
static uint32_t unmasked(const unsigned char *at)
{
    uint32_t rotated = (uint32_t)read_le(at, 4) - 0xa282ead8u;
    return rotated << 15 | rotated >> 17;
}

typedef struct message { const unsigned char *at, *end; } message;

static uint64_t read_varint(message *m)
{
    uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
        assert_true(m->at < m->end);
        unsigned char byte = *m->at++;
        value |= (uint64_t)(byte & 127) << shift;
        if (!(byte & 128)) return value;
    }
    fail_msg("a number of more than ten bytes");
    return 0;
}

/* The next field: its number, wire type and value; false at the end. */
static int next_field(message *m, int *field, int *type, uint64_t *number, message *inner)
{
    if (m->at == m->end) return 0;
    uint64_t key = read_varint(m);
    *field = (int)(key >> 3);
    *type = (int)(key & 7);
    *number = 0;
    if (*type == 0) *number = read_varint(m);
    else if (*type == 1 || *type == 5) {
        int bytes = *type == 1 ? 8 : 4;
        assert_true(m->end - m->at >= bytes);
        *number = read_le(m->at, bytes);
        m->at += bytes;
    } else {
        assert_int_equal(*type, 2);
        uint64_t bytes = read_varint(m);
        assert_true(bytes <= (uint64_t)(m->end - m->at));
        inner->at = m->at;
        inner->end = m->at + bytes;
        m->at += bytes;
    }
    return 1;
}

typedef struct event {
    double wall_time;
    int64_t step;
    char version[32], tag[600];
    float value;
} event;

static void read_text(message m, char *text, size_t room)
{
    size_t n = (size_t)(m.end - m.at);
    assert_true(n < room);
    memcpy(text, m.at, n);
    text[n] = 0;
}

/* A field comes once, and none is there that is not known. */
static event read_event(message m)
{
    event e;
    int field, type, seen = 0, seen_value = 0;
    uint64_t number;
    message inner, summary = {NULL, NULL}, value = {NULL, NULL};
    memset(&e, 0, sizeof e);
    while (next_field(&m, &field, &type, &number, &inner)) {
        assert_false(seen >> field & 1);
        seen |= 1 << field;
        if (field == 1 && type == 1) memcpy(&e.wall_time, &number, 8);
        else if (field == 2 && type == 0) e.step = (int64_t)number;
        else if (field == 3 && type == 2) read_text(inner, e.version, sizeof e.version);
        else if (field == 5 && type == 2) summary = inner;
        else fail_msg("event: field %d of type %d", field, type);
    }
    assert_true((seen >> 3 & 1) + (seen >> 5 & 1) == 1);
    if (!summary.at) return e;
    assert_true(next_field(&summary, &field, &type, &number, &value));
    assert_true(field == 1 && type == 2 && summary.at == summary.end);
    while (next_field(&value, &field, &type, &number, &inner)) {
        uint32_t bits = (uint32_t)number;
        assert_false(seen_value >> field & 1);
        seen_value |= 1 << field;
        if (field == 1 && type == 2) read_text(inner, e.tag, sizeof e.tag);
        else if (field == 2 && type == 5) memcpy(&e.value, &bits, 4);
        else fail_msg("value: field %d of type %d", field, type);
    }
    assert_int_equal(seen_value, 6);
    return e;
}

/* All events of a file; returns their number. */
static int read_events(const char *path, event *events, int most)
{
    static unsigned char bytes[1 << 16];
    FILE *file = fopen(path, "rb");
    int n = 0;
    assert_non_null(file);
    size_t size = fread(bytes, 1, sizeof bytes, file), at = 0;
    fclose(file);
    assert_true(size < sizeof bytes);
    while (at < size) {
        assert_true(size - at >= 12);
        assert_int_equal(unmasked(bytes + at + 8), reference_crc(bytes + at, 8));
        uint64_t length = read_le(bytes + at, 8);
        assert_true(length <= size - at - 12 && size - at - 12 - length >= 4);
        message m = {bytes + at + 12, bytes + at + 12 + length};
        assert_int_equal(unmasked(m.end), reference_crc(m.at, (size_t)length));
        assert_true(n < most);
        events[n++] = read_event(m);
        at += 16 + (size_t)length;
    }
    return n;
}

/* The only file of a directory whose name begins as TensorBoard wants. */
static const char *only_file(const char *directory)
{
    static char path[1200];
    int n = 0;
    DIR *dir = opendir(directory);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (entry->d_name[0] == '.') continue;
        assert_int_equal(strncmp(entry->d_name, "events.out.tfevents.", 20), 0);
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        n++;
    }
    closedir(dir);
    assert_int_equal(n, 1);
    return path;
}

/* ---------------------------------------------------------------------------------- the tests */

static void crc_has_the_values_of_the_rfc(void **state)
{
    static const unsigned char command[48] = {
        0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0, 0x04, 0,
        0, 0, 0, 0x14, 0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0};
    unsigned char bytes[32];
    (void)state;
    assert_int_equal(ft_io_crc32c("", 0), 0);
    assert_int_equal(ft_io_crc32c("123456789", 9), 0xe3069283);
    memset(bytes, 0, sizeof bytes);
    assert_int_equal(ft_io_crc32c(bytes, 32), 0x8a9136aa);
    memset(bytes, 0xff, sizeof bytes);
    assert_int_equal(ft_io_crc32c(bytes, 32), 0x62a8ab43);
    for (int i = 0; i < 32; i++) bytes[i] = (unsigned char)i;
    assert_int_equal(ft_io_crc32c(bytes, 32), 0x46dd794e);
    for (int i = 0; i < 32; i++) bytes[i] = (unsigned char)(31 - i);
    assert_int_equal(ft_io_crc32c(bytes, 32), 0x113fdb5c);
    assert_int_equal(ft_io_crc32c(command, sizeof command), 0xd9963a56);
    assert_int_equal(reference_crc(command, sizeof command), 0xd9963a56);
}

/* What tensorboard 2.21's RecordWriter writes for Event(wall_time=1700000000.25,
   file_version="brain.Event:2") and Event(wall_time=1700000000.5, step=300, summary=Summary(value=[
   Summary.Value(tag="loss", simple_value=2.5)])). */
static void bytes_are_those_of_the_python_package(void **state)
{
    static const unsigned char expected[] = {
        0x18, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22, 0x09, 0, 0, 0x10, 0x40, 0xfc, 0x54, 0xd9,
        0x41, 0x1a, 0x0d, 0x62, 0x72, 0x61, 0x69, 0x6e, 0x2e, 0x45, 0x76, 0x65, 0x6e, 0x74, 0x3a,
        0x32, 0x33, 0x8d, 0x2f, 0xe9, 0x1b, 0, 0, 0, 0, 0, 0, 0, 0x1a, 0x0d, 0x9e, 0x13, 0x09, 0, 0,
        0x20, 0x40, 0xfc, 0x54, 0xd9, 0x41, 0x10, 0xac, 0x02, 0x2a, 0x0d, 0x0a, 0x0b, 0x0a, 0x04,
        0x6c, 0x6f, 0x73, 0x73, 0x15, 0, 0, 0x20, 0x40, 0x94, 0xa3, 0x24, 0xbf};
    unsigned char bytes[200];
    ft_io_tb *log;
    (void)state;
    assert_ok(ft_io_tb_open(temp_directory, 1700000000.25, &log));
    ft_io_tb_scalar(log, "loss", 300, 1700000000.5, 2.5);
    assert_ok(ft_io_tb_close(log));
    FILE *file = fopen(only_file(temp_directory), "rb");
    assert_non_null(file);
    assert_int_equal(fread(bytes, 1, sizeof bytes, file), sizeof expected);
    fclose(file);
    assert_memory_equal(bytes, expected, sizeof expected);
    assert_non_null(strstr(only_file(temp_directory), "tfevents.1700000000."));
}

static void events_come_back_as_they_were(void **state)
{
    static const int64_t steps[] = {0, 1, 127, 128, 16383, 16384, (int64_t)1 << 35, INT64_MAX, -1};
    static const double values[] = {0, -0.0, 1, -2.5, 1e-40, 3.4e38, 1e300, -1e300, 0.1};
    enum { N = 9 };
    static event events[40];
    char tags[N][600];
    ft_io_tb *log;
    (void)state;
    assert_ok(ft_io_tb_open(temp_directory, 1.5, &log));
    for (int i = 0; i < N; i++) {
        /* Lengths around those at which a number of one byte becomes one of two. */
        static const int lengths[N] = {1, 4, 100, 113, 114, 115, 127, 128, 599};
        memset(tags[i], 'a' + i, sizeof tags[i]);
        tags[i][lengths[i]] = 0;
        ft_io_tb_scalar(log, tags[i], steps[i], 1.7e9 + i * 0.125, values[i]);
        if (i % 3 == 0) assert_ok(ft_io_tb_flush(log));
    }
    ft_io_tb_scalar(log, "\xc3\xa4/\xe2\x82\xac", 5, 2, NAN);
    ft_io_tb_scalar(log, "inf", 5, 2, -INFINITY);
    assert_ok(ft_io_tb_close(log));
    assert_int_equal(read_events(only_file(temp_directory), events, 40), N + 3);
    assert_string_equal(events[0].version, "brain.Event:2");
    assert_true(events[0].wall_time == 1.5 && events[0].step == 0);
    for (int i = 0; i < N; i++) {
        const event *e = &events[i + 1];
        assert_string_equal(e->version, "");
        assert_string_equal(e->tag, tags[i]);
        assert_true(e->step == steps[i]);
        assert_true(e->wall_time == 1.7e9 + i * 0.125);
        assert_true(!signbit(e->value) == !signbit(values[i]));
        if (fabs(values[i]) > 1e299) assert_true(isinf(e->value));
        else assert_true(e->value == (float)values[i]);
    }
    assert_string_equal(events[N + 1].tag, "\xc3\xa4/\xe2\x82\xac");
    assert_true(isnan(events[N + 1].value));
    assert_true(isinf(events[N + 2].value) && events[N + 2].value < 0);
}

static long size_of(const char *path)
{
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    return (long)info.st_size;
}

static void a_flush_is_one_write(void **state)
{
    static event events[200];
    ft_io_tb *log;
    (void)state;
    writes = 0;
    assert_ok(ft_io_tb_open(temp_directory, 0, &log));
    assert_int_equal(writes, 1);
    const char *path = only_file(temp_directory);
    assert_int_equal(read_events(path, events, 200), 1);
    for (int step = 0; step < 3; step++) {
        long before = size_of(path);
        for (int i = 0; i < 50; i++) ft_io_tb_scalar(log, "tag", step, 0, i);
        assert_int_equal(writes, 1 + step);
        assert_int_equal(size_of(path), before);
        assert_ok(ft_io_tb_flush(log));
        assert_int_equal(writes, 2 + step);
        assert_int_equal(read_events(path, events, 200), 1 + 50 * (step + 1));
    }
    assert_ok(ft_io_tb_flush(log)); /* nothing new: nothing happens */
    assert_ok(ft_io_tb_close(log));
    assert_int_equal(writes, 4);
}

/* A run that goes on opens a file beside the old one, also within the same second. */
static void every_log_has_a_file_of_its_own(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        ft_io_tb *log;
        assert_ok(ft_io_tb_open(temp_directory, 7, &log));
        ft_io_tb_scalar(log, "loss", i, 7, i);
        assert_ok(ft_io_tb_close(log));
        assert_int_equal(count_files(0), i + 1);
    }
    assert_int_equal(count_files(1), 3);
    for (int i = 0; i < 2; i++) { /* missing directories are made, ones that are there are taken */
        const char *path = in_directory(i ? "a/b//c/" : "a/b//c");
        ft_io_tb *log;
        event e[4];
        assert_ok(ft_io_tb_open(path, 7, &log));
        assert_ok(ft_io_tb_close(log));
        assert_int_equal(read_events(only_file(path), e, 4), 1);
        unlink(only_file(path));
    }
    assert_int_equal(rmdir(in_directory("a/b/c")), 0);
    assert_int_equal(rmdir(in_directory("a/b")), 0);
    assert_int_equal(rmdir(in_directory("a")), 0);
}

static void bad_arguments_are_refused(void **state)
{
    ft_io_tb *log = NULL;
    (void)state;
    assert_error(ft_io_tb_open(NULL, 0, &log), FT_ERR_ARG, "ft_io_tb_open", "directory");
    assert_error(ft_io_tb_open("", 0, &log), FT_ERR_ARG, "ft_io_tb_open", "directory");
    assert_error(ft_io_tb_open(temp_directory, 0, NULL), FT_ERR_ARG, "ft_io_tb_open", "out");
    assert_error(ft_io_tb_open(temp_directory, -1, &log), FT_ERR_ARG, "ft_io_tb_open",
                 "wall_time is -1");
    assert_error(ft_io_tb_open(temp_directory, NAN, &log), FT_ERR_ARG, "ft_io_tb_open",
                 "wall_time");
    assert_int_equal(count_files(0), 0);

    assert_error(ft_io_tb_open(write_file("file", "x", 1), 0, &log), FT_ERR_IO,
                 "/file: ", "cannot make the directory");
    assert_error(ft_io_tb_open(in_directory("file/below"), 0, &log), FT_ERR_IO,
                 "/file/below: ", "cannot make");
    assert_null(log);

    ft_io_tb_scalar(NULL, "loss", 0, 0, 0);
    assert_ok(ft_io_tb_flush(NULL));
    assert_ok(ft_io_tb_close(NULL));
}

/* A bad event is left out, and said so once; those beside it are kept. */
static void bad_tags_are_left_out(void **state)
{
    static const char *const bad[] = {NULL, "", "\xff", "loss\xc3"};
    static event events[20];
    ft_io_tb *log;
    (void)state;
    assert_ok(ft_io_tb_open(temp_directory, 0, &log));
    for (int i = 0; i < 4; i++) {
        ft_io_tb_scalar(log, "before", i, 0, 0);
        ft_io_tb_scalar(log, bad[i], i, 0, 0);
        ft_io_tb_scalar(log, "after", i, 0, 0);
        assert_error(ft_io_tb_flush(log), FT_ERR_ARG, temp_directory, "a tag must be UTF-8");
        assert_ok(ft_io_tb_flush(log));
    }
    ft_io_tb_scalar(log, "", 0, 0, 0);
    assert_error(ft_io_tb_close(log), FT_ERR_ARG, temp_directory, "a tag must be UTF-8");
    assert_int_equal(read_events(only_file(temp_directory), events, 20), 9);
    for (int i = 0; i < 8; i++)
        assert_string_equal(events[i + 1].tag, i % 2 ? "after" : "before");
}

/* The disk is full after `room` bytes of a step: the error names the file and what is left; when
   there is room again the file is whole, whatever was written before. */
static void a_full_disk_tears_no_record(void **state)
{
    static event events[20];
    (void)state;
    for (ssize_t room = 0; room < 120; room++) {
        ft_io_tb *log;
        write_limit = -1;
        assert_ok(ft_io_tb_open(temp_directory, 0, &log));
        ft_io_tb_scalar(log, "loss", 1, 0, 1);
        ft_io_tb_scalar(log, "lr", 1, 0, 2);
        ft_io_tb_scalar(log, "loss", 2, 0, 3);
        write_limit = room;
        assert_error(ft_io_tb_flush(log), FT_ERR_IO, temp_directory, strerror(ENOSPC));
        write_limit = -1;
        ft_io_tb_scalar(log, "lr", 2, 0, 4);
        assert_ok(ft_io_tb_close(log));
        assert_int_equal(read_events(only_file(temp_directory), events, 20), 5);
        for (int i = 1; i < 5; i++) assert_true(events[i].value == (float)i);
        count_files(1);
    }
    ft_io_tb *log = NULL;
    write_limit = 0;
    assert_error(ft_io_tb_open(temp_directory, 0, &log), FT_ERR_IO, temp_directory,
                 strerror(ENOSPC));
    assert_null(log);
    write_limit = -1;
    count_files(1);
    assert_ok(ft_io_tb_open(temp_directory, 0, &log));
    ft_io_tb_scalar(log, "loss", 1, 0, 1);
    write_limit = 0;
    assert_error(ft_io_tb_close(log), FT_ERR_IO, temp_directory, strerror(ENOSPC));
    write_limit = -1;
}

/* Memory that ends anywhere: an error, and a file of whole events without the one that had none. */
static void no_memory_tears_no_record(void **state)
{
    static event events[40];
    int n, opened = 0;
    (void)state;
    for (n = 0; n < 12; n++) {
        ft_io_tb *log = NULL;
        allocations_left = n;
        ft_status status = ft_io_tb_open(temp_directory, 0, &log);
        if (status != FT_OK) {
            assert_error(status, FT_ERR_OOM, temp_directory, "no memory");
            assert_null(log);
        } else {
            opened++;
            for (int i = 0; i < 30; i++) ft_io_tb_scalar(log, "a tag of some length", i, 0, i);
            int whole = allocations_left > 0;
            status = ft_io_tb_close(log);
            if (status != FT_OK) assert_error(status, FT_ERR_OOM, temp_directory, "no memory");
            allocations_left = -1;
            int read = read_events(only_file(temp_directory), events, 40);
            assert_true(whole ? status == FT_OK && read == 31 : read <= 31);
            assert_true(status == FT_OK ? read == 31 : read < 31);
            for (int i = 1; i < read; i++) assert_true(events[i].value == (float)(i - 1));
        }
        allocations_left = -1;
        count_files(1);
    }
    assert_true(opened > 0 && opened < n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crc_has_the_values_of_the_rfc),
        cmocka_unit_test_teardown(bytes_are_those_of_the_python_package, clean_directory),
        cmocka_unit_test_teardown(events_come_back_as_they_were, clean_directory),
        cmocka_unit_test_teardown(a_flush_is_one_write, clean_directory),
        cmocka_unit_test_teardown(every_log_has_a_file_of_its_own, clean_directory),
        cmocka_unit_test_teardown(bad_arguments_are_refused, clean_directory),
        cmocka_unit_test_teardown(bad_tags_are_left_out, clean_directory),
        cmocka_unit_test_teardown(a_full_disk_tears_no_record, clean_directory),
        cmocka_unit_test_teardown(no_memory_tears_no_record, clean_directory),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
