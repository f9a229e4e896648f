/* Token files: bytes, and shards of 16 and 32 bits, raw or with llm.c's header. The first byte of
   the input chooses the kind, and whether it is cut in two files. What is open can be read to its
   end, as the sampler does, and no token is outside the vocabulary. */

#include "fuzz.h"
#include "femtotron.h"
#include "femtotron_io.h"

enum { T = 5 };

static void read_all(ft_io_data *data)
{
    int64_t tokens = ft_io_data_tokens(data), vocab = ft_io_data_vocab(data), in_file, i;
    int32_t read[T + 1], labels[T];
    ft_io_sampler sampler;
    MUST(tokens > 0 && vocab > 0);
    for (i = 0; i < tokens; i++) {
        MUST(ft_io_data_locate(data, i, &in_file) != NULL && in_file >= 0 && in_file <= i);
        if (ft_io_data_read(data, i, 1, read) == FT_OK) MUST(read[0] >= 0 && read[0] < vocab);
    }
    MUST(ft_io_data_locate(data, tokens, &in_file) == NULL);
    MUST(ft_io_data_read(data, tokens, 1, read) != FT_OK);
    (void)ft_io_data_check_vocab(data, vocab / 2 + 1);
    if (ft_io_sampler_init(&sampler, data, T, 2, 1) != FT_OK) return;
    for (i = 0; i < 4; i++) (void)ft_io_sampler_read(&sampler, i, 0, 1, read, labels);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    const char *paths[2];
    ft_io_data *open;
    if (n == 0) return 0;
    size_t half = data[0] & 4 ? (n - 1) / 2 : 0;
    ft_io_token kind = (ft_io_token)((data[0] & 3) % FT_IO_TOKEN_COUNT);
    paths[0] = fuzz_file(0, data + 1 + half, n - 1 - half);
    paths[1] = fuzz_file(1, data + 1, half);
    if (ft_io_data_open(paths, half > 0 ? 2 : 1, kind, &open) != FT_OK) {
        MUST(ft_last_error()[0] != 0);
        return 0;
    }
    read_all(open);
    ft_io_data_close(open);
    return 0;
}
