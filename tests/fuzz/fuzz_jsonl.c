/* An example of JSON lines: the tokens that are counted are the ones that are written, up to the
   room that there is; strings give bytes. The first byte of the input is the room. */

#define FUZZ_NUMBERS
#include "fuzz.h"
#include "femtotron.h"
#include "femtotron_io.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n == 0) return 0;
    int64_t room = data[0], prompt, count, prompt_again, count_again;
    int is_bytes, is_bytes_again;
    char *exact = (char *)malloc(n); /* reads and writes past the ends show */
    int32_t *tokens = (int32_t *)malloc((room > 0 ? (size_t)room : 1) * sizeof *tokens);
    MUST(exact != NULL && tokens != NULL);
    memcpy(exact, data + 1, n - 1);
    exact = (char *)realloc(exact, n > 1 ? n - 1 : 1);
    ft_status status =
        ft_io_jsonl_parse(exact, n - 1, "x.jsonl", 7, room, tokens, &prompt, &count, &is_bytes);
    if (status == FT_OK) {
        MUST(prompt >= 0 && prompt <= count);
        for (int64_t i = 0; i < count && i < room; i++)
            MUST(tokens[i] >= 0 && (!is_bytes || tokens[i] < 256));
        MUST(ft_io_jsonl_parse(exact, n - 1, "x.jsonl", 7, 0, NULL, &prompt_again, &count_again,
                               &is_bytes_again) == FT_OK);
        MUST(prompt == prompt_again && count == count_again && is_bytes == is_bytes_again);
    } else {
        MUST(strncmp(ft_last_error(), "x.jsonl", 7) == 0);
    }
    free(tokens);
    free(exact);
    return 0;
}
