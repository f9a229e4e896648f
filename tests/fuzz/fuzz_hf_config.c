/* The text of a config.json: what is accepted is a model that could be. */

#define FUZZ_NUMBERS
#include "fuzz.h"
#include "femtotron.h"
#include "femtotron_io.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    ft_io_hf_config c;
    char *text = fuzz_text(data, n);
    if (ft_io_hf_config_parse(text, "config.json", &c) == FT_OK) {
        MUST(memchr(c.model_type, 0, sizeof c.model_type) != NULL);
        MUST(c.vocab > 0 && c.hidden > 0 && c.layers > 0 && c.intermediate > 0);
        MUST(c.heads > 0 && c.kv_heads > 0 && c.heads % c.kv_heads == 0);
        MUST(c.head_dim > 0 && c.head_dim % 2 == 0 && c.max_positions >= 0);
        MUST(c.norm_eps > 0 && isfinite(c.norm_eps));
        MUST(c.rope_theta > 0 && isfinite(c.rope_theta));
    } else {
        MUST(strncmp(ft_last_error(), "config.json: ", 13) == 0);
    }
    free(text);
    return 0;
}
