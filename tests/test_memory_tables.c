/* The memory tables: 48 cells beside a log's figures and a floor, planned by the trainer's step.

   cc -std=c11 -I. tests/test_memory_tables.c -lcmocka -lm -lpthread

   Each cell is below the log's figure and near its floor; a higher ZeRO stage never needs more;
   default settings and selective recomputation keep below the log too; a cell takes under a second;
   and what the program prints as comma-separated values is what it planned. */

#define MEMORY_TABLES_MAIN memory_tables_main
#include "examples/memory_tables.c"

#include <setjmp.h>
#include <cmocka.h>

static outcome planned[VARIANTS][CELLS];

static int plan_all(void **state)
{
    const place meta = {FT_META, 0, 0};
    (void)state;
    for (int how = 0; how < VARIANTS; how++)
        for (int i = 0; i < CELLS; i++)
            if (run_cell(&cells[i], (variant)how, &meta, NULL, &planned[how][i]) != FT_OK)
                fail_msg("cell %d: %s", i + 1, ft_last_error());
    return 0;
}

static void below_the_log_and_near_the_floor(void **state)
{
    double logs = 0;
    (void)state;
    for (int i = 0; i < CELLS; i++) {
        const cell *c = &cells[i];
        double ours = cell_mib(&planned[LEANEST][i]), most = 1.10 * c->floor_mib + 8;
        if (!(ours < c->log_mib))
            fail_msg("cell %d: %.1f MiB, the log has %d", i + 1, ours, c->log_mib);
        if (!(ours <= most))
            fail_msg("cell %d: %.1f MiB, the floor allows %.1f", i + 1, ours, most);
        logs += log(ours / c->log_mib);
    }
    if (!(exp(logs / CELLS) <= 0.70)) fail_msg("geometric mean %.3f", exp(logs / CELLS));
}

/* The floor without recomputation is a bound for what keeps everything: nothing can be below it but
   by leaving something out. Selective recomputation may be. (Figures are rounded to a MiB.) */
static void not_below_the_floor(void **state)
{
    (void)state;
    for (int i = 0; i < CELLS; i++) {
        double ours = cell_mib(&planned[LEANEST][i]);
        if (!(ours >= cells[i].floor_mib - 0.5))
            fail_msg("cell %d: %.1f MiB, the floor is %d", i + 1, ours, cells[i].floor_mib);
    }
}

static void other_settings_are_below_the_log(void **state)
{
    (void)state;
    for (int how = DEFAULTS; how < VARIANTS; how++)
        for (int i = 0; i < CELLS; i++)
            if (!(cell_mib(&planned[how][i]) < cells[i].log_mib))
                fail_msg("cell %d, %s: %.1f MiB, the log has %d", i + 1, variant_title[how],
                         cell_mib(&planned[how][i]), cells[i].log_mib);
}

/* A layer's gradients, bf16, of which each dp rank keeps a shard. */
static double unit_shard_mib(const cell *c)
{
    double C = c->table == 1 ? 1024 : 2048, F = c->table == 1 ? 2048 : 8192;
    double kv = c->table == 1 ? 256 : 512, tp = c->table == 1 ? 1 : 2, D = c->table == 1 ? 8 : 2;
    return 2 * ((2 * C * C + 2 * C * kv + 3 * C * F) / tp + 2 * C) / D / (1024.0 * 1024.0);
}

static void a_higher_stage_needs_no_more(void **state)
{
    (void)state;
    for (int how = 0; how < VARIANTS; how++)
        for (int i = 0; i < CELLS; i++) {
            double here = cell_mib(&planned[how][i]), below;
            if (cells[i].stage == 0) continue;
            below = cell_mib(&planned[how][i - 2]); /* the same cell, one stage lower */
            assert_int_equal(cells[i - 2].stage, cells[i].stage - 1);
            assert_int_equal(cells[i - 2].full, cells[i].full);
            if (!(here <= below + unit_shard_mib(&cells[i])))
                fail_msg("cell %d, %s: stage %d %.1f MiB, stage %d %.1f", i + 1, variant_title[how],
                         cells[i].stage, here, cells[i].stage - 1, below);
        }
}

static void recomputation_needs_no_more(void **state)
{
    (void)state;
    for (int i = 0; i < CELLS; i += 2) {
        assert_true(cell_mib(&planned[LEANEST][i + 1]) <= cell_mib(&planned[LEANEST][i]));
        assert_true(cell_mib(&planned[SELECTIVE][i]) <= cell_mib(&planned[LEANEST][i]));
    }
}

static void a_cell_takes_under_a_second(void **state)
{
    (void)state;
    for (int how = 0; how < VARIANTS; how++)
        for (int i = 0; i < CELLS; i++)
            if (!(planned[how][i].seconds < 1))
                fail_msg("cell %d took %.2f s", i + 1, planned[how][i].seconds);
}

/* The books of the peak without workspace add up, and it is not above the peak with it. */
static void the_books_add_up(void **state)
{
    (void)state;
    for (int i = 0; i < CELLS; i++) {
        const ft_mem_stats *s = &planned[LEANEST][i].fullest;
        size_t sum = 0, all = 0;
        for (int t = 0; t < FT_TAG_COUNT; t++) {
            sum += s->at_tensor_peak[t];
            all += s->at_peak[t];
            assert_true(s->at_tensor_peak[t] <= s->highest[t]);
        }
        assert_int_equal(sum, s->tensor_peak_bytes);
        assert_int_equal(all, s->peak_bytes);
        assert_int_equal(s->at_tensor_peak[FT_TAG_WORKSPACE], 0);
        assert_true(s->tensor_peak_bytes <= s->peak_bytes);
        assert_true(s->peak_bytes - s->at_peak[FT_TAG_WORKSPACE] <= s->tensor_peak_bytes);
        assert_true(s->tensor_peak_where[0] != 0);
    }
}

static void csv_has_the_cells(void **state)
{
    char line[LINE_BYTES], path[] = "/tmp/test_memory_tables.XXXXXX";
    request ask;
    int n = -1, saved = dup(STDOUT_FILENO), to = mkstemp(path);
    (void)state;
    assert_true(saved >= 0 && to >= 0);
    memset(&ask, 0, sizeof ask);
    ask.at.device = FT_META;
    ask.last = CELLS - 1;
    fflush(stdout);
    dup2(to, STDOUT_FILENO);
    ft_status status = print_csv(&ask);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    close(to);
    assert_int_equal(status, FT_OK);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    for (; fgets(line, sizeof line, f); n++) {
        char name[32], policy[16];
        int v[16];
        double peak, workspace;
        if (n < 0) continue; /* the head */
        assert_true(n < CELLS);
        assert_int_equal(sscanf(line, "%d,%31[^,],%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%15[^,],"
                                      "%d,%d,%lf,%lf", &v[0], name, &v[1], &v[2], &v[3], &v[4],
                                &v[5], &v[6], &v[7], &v[8], &v[9], &v[10], &v[11], &v[12], &v[13],
                                policy, &v[14], &v[15], &peak, &workspace), 20);
        assert_int_equal(v[0], cells[n].table);
        assert_int_equal(v[4], cells[n].layers);
        assert_int_equal(v[10], cells[n].seq);
        assert_int_equal(v[13], cells[n].stage);
        assert_string_equal(policy, cells[n].full ? "full" : "none");
        assert_int_equal(v[14], cells[n].log_mib);
        assert_int_equal(v[15], cells[n].floor_mib);
        assert_true(fabs(peak - cell_mib(&planned[LEANEST][n])) <= 0.051);
        assert_true(workspace > 0);
    }
    fclose(f);
    unlink(path);
    assert_int_equal(n, CELLS);
}

static int parsed(request *ask, const char *line)
{
    char text[LINE_BYTES], *words[MAX_WORDS], *rest = NULL;
    int n = 0;
    snprintf(text, sizeof text, "memory_tables %s", line);
    for (char *w = strtok_r(text, " ", &rest); w; w = strtok_r(NULL, " ", &rest)) words[n++] = w;
    return parse_request(n, words, ask);
}

static void the_command_line_is_checked(void **state)
{
    static const char *const wrong[] = {
        "--cells 0-3", "--cells 3-2", "--cells 1-49", "--cells x", "--device tpu", "--gpus 2",
        "--device cuda --gpus 0", "--device cuda --gpus 9", "--device cuda --gpus 2x",
        "--device cpu --transport nccl", "--device cuda --transport tcp", "--nope", "--cells"
    };
    request ask;
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        if (parsed(&ask, wrong[i])) fail_msg("%s is taken", wrong[i]);
    assert_true(parsed(&ask, "--csv --cells 3-7"));
    assert_true(ask.csv && ask.first == 2 && ask.last == 6 && ask.at.device == FT_META);
    assert_true(parsed(&ask, "--device cuda"));
    assert_int_equal(ask.at.gpus, 1);
    assert_true(parsed(&ask, "--device cuda --gpus 8 --transport nccl"));
    assert_true(ask.at.gpus == 8 && ask.at.transport == FT_TRANSPORT_NCCL);
    /* As a process of a launcher. */
    assert_int_equal(setenv("RANK", "3", 1) | setenv("WORLD_SIZE", "8", 1), 0);
    assert_true(parsed(&ask, ""));
    assert_true(parsed(&ask, "--device cuda"));
    assert_int_equal(ask.at.gpus, 0);
    assert_false(parsed(&ask, "--device cpu"));
    assert_false(parsed(&ask, "--device cuda --gpus 2"));
    assert_int_equal(unsetenv("RANK") | unsetenv("WORLD_SIZE"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(below_the_log_and_near_the_floor),
        cmocka_unit_test(not_below_the_floor),
        cmocka_unit_test(other_settings_are_below_the_log),
        cmocka_unit_test(a_higher_stage_needs_no_more),
        cmocka_unit_test(recomputation_needs_no_more),
        cmocka_unit_test(a_cell_takes_under_a_second),
        cmocka_unit_test(the_books_add_up),
        cmocka_unit_test(csv_has_the_cells),
        cmocka_unit_test(the_command_line_is_checked),
    };
    return cmocka_run_group_tests_name("memory tables", tests, plan_all, NULL);
}
