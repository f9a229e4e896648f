/* The emitter of JSON, called in any order: each byte of the input is a call. What it says is well
   is JSON for cJSON, and has the strings that went in. */

#include "fuzz.h"
#include "femtotron.h"
#include "femtotron_io.h"
#include <cjson/cJSON.h>

/* The bytes up to the next zero, as a string. */
static char *take_string(const uint8_t **at, const uint8_t *end)
{
    size_t n = 0;
    while (*at + n < end && (*at)[n] != 0) n++;
    char *text = fuzz_text(*at, n);
    *at += n + (*at + n < end);
    return text;
}

static double take_double(const uint8_t **at, const uint8_t *end)
{
    double value = 0;
    size_t n = (size_t)(end - *at) < sizeof value ? (size_t)(end - *at) : sizeof value;
    memcpy(&value, *at, n);
    *at += n;
    return value;
}

static void call(ft_io_json *json, const uint8_t **at, const uint8_t *end)
{
    int which = *(*at)++ % 11;
    char *text = which < 2 ? take_string(at, end) : NULL;
    double value = which >= 2 && which < 5 ? take_double(at, end) : 0;
    switch (which) {
    case 0: ft_io_json_key(json, text); break;
    case 1: ft_io_json_string(json, text); break;
    case 2: ft_io_json_float(json, value); break;
    case 3: ft_io_json_double(json, value); break;
    case 4: ft_io_json_int(json, (int64_t)(fabs(value) < 9e18 ? value : 0)); break;
    case 5: ft_io_json_begin_object(json); break;
    case 6: ft_io_json_end_object(json); break;
    case 7: ft_io_json_begin_array(json); break;
    case 8: ft_io_json_end_array(json); break;
    case 9: ft_io_json_bool(json, 1); break;
    default: ft_io_json_null(json);
    }
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    const uint8_t *at = data, *end = data + n;
    const char *stop = NULL;
    ft_io_json *json;
    MUST(file != NULL && ft_io_json_create(file, "out", &json) == FT_OK);
    while (at < end) call(json, &at, end);
    ft_status status = ft_io_json_finish(json);
    fclose(file);
    if (status == FT_OK) {
        cJSON *root = cJSON_ParseWithOpts(text, &stop, 1);
        MUST(root != NULL);
        /* A lone string comes back as it was, if it was UTF-8. */
        if (n > 1 && data[0] % 11 == 1 && !memchr(data + 1, 0, n - 1) && !strstr(text, "\\ufffd"))
            MUST(cJSON_IsString(root) && memcmp(root->valuestring, data + 1, n - 1) == 0);
        cJSON_Delete(root);
    }
    free(text);
    return 0;
}
