/* A checkpoint's manifest: parts hold as many elements as their runs, runs ascend in their array,
   and the parts of an array are all of it. */

#define FUZZ_NUMBERS
#include "fuzz.h"
#include "femtotron.h"
#include "femtotron_io.h"

/* Elements of the part, each run within the array and behind the one before. */
static int64_t check_part(const ft_io_part *part, int64_t n_files)
{
    int64_t elems = 0, total = 1, next = 0;
    for (int k = 0; k < part->ndim; k++) total *= part->shape[k];
    MUST(part->file >= 0 && part->file < n_files && part->total == total);
    for (int64_t i = 0; i < part->n_runs; i++) {
        const ft_io_run *run = &part->run[i];
        MUST(run->first >= next && run->n > 0 && run->count > 0);
        MUST(run->stride >= run->n);
        next = run->first + run->stride * (run->count - 1) + run->n;
        MUST(next <= total);
        elems += run->n * run->count;
    }
    MUST(elems == part->elems);
    MUST(part->n_blocks == (elems + FT_IO_BLOCK_ELEMS - 1) / FT_IO_BLOCK_ELEMS);
    fuzz_touch(part->block, (size_t)part->n_blocks * sizeof *part->block);
    return elems;
}

static void check_parts(const ft_io_manifest *m)
{
    int64_t elems = 0;
    for (int64_t i = 0; i < m->n_parts; i++) {
        const ft_io_part *part = &m->parts[i];
        int last = i + 1 == m->n_parts || strcmp(part->name, m->parts[i + 1].name) != 0;
        MUST(last || strcmp(part->name, m->parts[i + 1].name) <= 0);
        elems += check_part(part, m->n_files);
        if (!last) continue;
        MUST(elems == part->total);
        elems = 0;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    ft_io_manifest *m;
    char *exact = (char *)malloc(n > 0 ? n : 1); /* a read past its end shows */
    MUST(exact != NULL);
    memcpy(exact, data, n);
    if (ft_io_manifest_parse(exact, n, "manifest.json", &m) == FT_OK) {
        int64_t whole;
        double real;
        MUST(m->ranks > 0 && m->step >= 0);
        for (int64_t i = 0; i < m->n_files; i++)
            MUST(m->files[i].name[0] != 0 && strchr(m->files[i].name, '/') == NULL);
        for (int64_t i = 0; i < m->n_settings; i++) {
            MUST(ft_io_manifest_text(m, m->settings[i].key) == m->settings[i].value);
            (void)ft_io_manifest_int(m, m->settings[i].key, &whole);
            (void)ft_io_manifest_real(m, m->settings[i].key, &real);
        }
        check_parts(m);
        ft_io_manifest_free(m);
    } else {
        MUST(ft_last_error()[0] != 0);
    }
    free(exact);
    return 0;
}
