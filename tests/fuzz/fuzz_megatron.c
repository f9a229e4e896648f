/* An index of Megatron-LM's data: what is accepted counts what its file has room for, and names the
   size of the .bin beside it. */

#include "fuzz.h"
#include "femtotron.h"
#include "femtotron_io.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    ft_io_megatron index, again;
    uint8_t *exact = (uint8_t *)malloc(n > 0 ? n : 1); /* a read past its end shows */
    MUST(exact != NULL);
    memcpy(exact, data, n);
    if (ft_io_megatron_parse(exact, n, "x.idx", -1, &index) == FT_OK) {
        int64_t bin_bytes = index.tokens * index.token_bytes;
        MUST(index.tokens > 0 && index.documents >= 0 && index.sequences > 0);
        MUST((uint64_t)index.sequences < n / 12 && (uint64_t)index.documents < n / 8);
        MUST(index.token_bytes >= 1 && index.token_bytes <= 8 && index.dtype[0] != 0);
        fuzz_touch(index.pointers, 8 * (size_t)index.sequences);
        fuzz_touch(index.first_sequence, 8 * ((size_t)index.documents + 1));
        MUST(ft_io_megatron_parse(exact, n, "x.idx", bin_bytes, &again) == FT_OK);
        MUST(ft_io_megatron_parse(exact, n, "x.idx", bin_bytes + 1, &again) != FT_OK);
    } else {
        MUST(strncmp(ft_last_error(), "x.idx: ", 7) == 0);
    }
    free(exact);
    return 0;
}
