/* A safetensors file: a tensor that is found has its bytes, within the file and apart from the
   others'; names and metadata are found again; elements can be read. */

#include "fuzz.h"
#include "femtotron.h"
#include "femtotron_io.h"

static void read_elements(const ft_io_tensor *t)
{
    float real[4];
    int64_t whole[4], n = t->elems < 4 ? t->elems : 4;
    if (n == 0) return;
    (void)ft_io_read_float(t, t->elems - n, n, real);
    (void)ft_io_read_int(t, t->elems - n, n, whole);
    MUST(ft_io_read_float(t, t->elems, 1, real) != FT_OK);
}

/* Numbers of the header too are changed; its length in the first 8 bytes stays right. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t most, unsigned seed)
{
    uint64_t header = 0;
    if (n >= 8) memcpy(&header, data, 8);
    if (!(seed & 1) || header == 0 || header > n - 8) return LLVMFuzzerMutate(data, n, most);
    size_t changed = fuzz_change_number(data, n, most, 8, 8 + (size_t)header, seed >> 1);
    header += changed - n;
    memcpy(data, &header, 8);
    return changed;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    ft_io_safetensors *file;
    const char *value, *end = NULL;
    if (ft_io_safetensors_open(fuzz_file(0, data, n), &file) != FT_OK) {
        MUST(ft_last_error()[0] != 0);
        return 0;
    }
    for (int64_t i = 0; i < ft_io_safetensors_count(file); i++) {
        const ft_io_tensor *t = ft_io_safetensors_at(file, i);
        int64_t elems = 1;
        for (int k = 0; k < t->ndim; k++) elems *= t->shape[k];
        MUST(elems == t->elems);
        MUST(t->bytes * 8 == (size_t)elems * (size_t)ft_io_dtype_bits(t->dtype));
        MUST(ft_io_safetensors_find(file, t->name) == t);
        MUST(end == NULL || t->bytes == 0 || (const char *)t->data >= end);
        if (t->bytes > 0) end = (const char *)t->data + t->bytes;
        fuzz_touch(t->data, t->bytes);
        read_elements(t);
    }
    for (int64_t i = 0; i < ft_io_safetensors_metadata_count(file); i++) {
        const char *key = ft_io_safetensors_metadata_at(file, i, &value);
        MUST(ft_io_safetensors_metadata(file, key) == value);
        fuzz_touch(value, strlen(value));
    }
    ft_io_safetensors_close(file);
    return 0;
}
