/* temp_files.h: for tests of files: a directory of the test's own, emptied between tests, and host
   memory that can be made to end.

   Include before femtotron.h, with cmocka.h before it: it sets FT_MALLOC and FT_FREE. */

#ifndef TEMP_FILES_H
#define TEMP_FILES_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Memory that ends after a number of allocations; -1: never. */
static int allocations_left = -1;

static void *limited_malloc(size_t n)
{
    if (allocations_left == 0) return NULL;
    if (allocations_left > 0) allocations_left--;
    return malloc(n);
}

#define FT_MALLOC(n) limited_malloc(n)
#define FT_FREE(p) free(p)

static char temp_directory[256];

static int make_directory(void **state)
{
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(temp_directory, sizeof temp_directory, "%s/ft_files.XXXXXX",
             base != NULL ? base : "/tmp");
    return mkdtemp(temp_directory) == NULL;
}

static int count_files(int remove_them)
{
    int n = 0;
    DIR *dir = opendir(temp_directory);
    if (dir == NULL) return -1;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        char path[600];
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", temp_directory, entry->d_name);
        n++;
        if (remove_them && unlink(path) != 0) rmdir(path);
    }
    closedir(dir);
    return n;
}

static int clean_directory(void **state)
{
    (void)state;
    return count_files(1) < 0;
}

static int remove_directory(void **state)
{
    (void)state;
    count_files(1);
    return rmdir(temp_directory);
}

/* The path of a file in the test's directory; eight may be in use at a time. */
static const char *in_directory(const char *name)
{
    static char paths[8][320];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", temp_directory, name);
    return path;
}

static const char *write_file(const char *name, const void *bytes, size_t n)
{
    const char *path = in_directory(name);
    unlink(path); /* some file systems sync a file that is emptied and written again */
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
    return path;
}

#endif /* TEMP_FILES_H */
