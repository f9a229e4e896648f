/* A model.safetensors.index.json: tensors are sorted by name, each in a file of the same
   directory. */

#define FUZZ_NUMBERS
#include "fuzz.h"
#include "femtotron.h"
#include "femtotron_io.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    ft_io_hf_index *index;
    char *exact = (char *)malloc(n > 0 ? n : 1); /* a read past its end shows */
    const char *file, *before = NULL;
    MUST(exact != NULL);
    memcpy(exact, data, n);
    if (ft_io_hf_index_parse(exact, n, "index.json", &index) == FT_OK) {
        MUST(ft_io_hf_index_count(index) > 0);
        for (int64_t i = 0; i < ft_io_hf_index_count(index); i++) {
            const char *name = ft_io_hf_index_at(index, i, &file);
            size_t length = strlen(file);
            MUST(before == NULL || strcmp(before, name) < 0);
            MUST(length > 12 && strcmp(file + length - 12, ".safetensors") == 0);
            MUST(strchr(file, '/') == NULL && file[0] != '.');
            before = name;
        }
        MUST(ft_io_hf_index_at(index, ft_io_hf_index_count(index), &file) == NULL);
        ft_io_hf_index_free(index);
    } else {
        MUST(strncmp(ft_last_error(), "index.json: ", 12) == 0);
    }
    free(exact);
    return 0;
}
