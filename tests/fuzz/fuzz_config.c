/* The trainer's --config: what a file sets is printed by --print-config as a file that sets the
   same. */

#define FUZZ_NUMBERS
#include "fuzz.h"
#define TRAIN_LLAMA_MAIN train_llama_main
#include "examples/train_llama.c"

/* What --print-config prints, to be freed. */
static char *printed(const settings *set, size_t *n)
{
    char *text = NULL;
    FILE *out = stdout;
    stdout = open_memstream(&text, n);
    MUST(stdout != NULL);
    print_config(set);
    fclose(stdout);
    stdout = out;
    return text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static char program_name[] = "train_llama", flag[] = "--config";
    const char *path = fuzz_file(0, data, n);
    static FILE *nowhere;
    char *argv[] = {program_name, flag, NULL, NULL};
    char name[64];
    settings first, second;
    size_t n_first = 0, n_second = 0;
    snprintf(name, sizeof name, "%s", path);
    argv[2] = name;
    if (nowhere == NULL) nowhere = stderr = fopen("/dev/null", "w"); /* refusals go there */
    if (parse_options(3, argv, &first)) {
        char *once = printed(&first, &n_first);
        fuzz_file(0, (const uint8_t *)once, n_first);
        MUST(parse_options(3, argv, &second));
        char *twice = printed(&second, &n_second);
        MUST(n_first == n_second && memcmp(once, twice, n_first) == 0);
        free(once);
        free(twice);
        free_settings(&second);
    }
    free_settings(&first);
    return 0;
}
