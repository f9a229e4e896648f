/* test_timeline.c: what streams did, when, and how much of the traffic lies under compute. */

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_io.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct seen { /* of rank 1, by its own thread */
    int64_t n, again, cleared;
    ft_work works[8];
    double begin_s, end_s; /* of a span around all of it */
} seen;

static ft_status gather_and_fill(ft_ctx *ctx, ft_group *world)
{
    int64_t n = 4, all = 8;
    ft_tensor *part, *whole;
    ft_stream *gather = ft_stream_get(ctx, FT_STREAM_GATHER);
    ft_stream *compute = ft_stream_get(ctx, FT_STREAM_COMPUTE);
    FT_TRY(ft_tensor_create(ctx, &part, FT_F32, 1, &n, FT_TAG_PARAM));
    FT_TRY(ft_tensor_create(ctx, &whole, FT_F32, 1, &all, FT_TAG_GATHER));
    FT_TRY(ft_fill(part, ft_rank(ctx), compute));
    FT_TRY(ft_stream_wait(gather, ft_event_record(compute)));
    FT_TRY(ft_all_gather(world, gather, part, whole));
    FT_TRY(ft_stream_wait(compute, ft_event_record(gather)));
    FT_TRY(ft_fill(whole, 2, compute));
    ft_tensor_free(part);
    ft_tensor_free(whole);
    return FT_OK;
}

static ft_status watched(ft_ctx *ctx, void *user)
{
    seen *out = (seen *)user;
    ft_group *world;
    const ft_work *works;
    const ft_span *spans;
    int64_t n;
    FT_TRY(ft_group_strided(ctx, "everyone in the whole wide world", 0, 1, 2, &world));
    FT_TRY(gather_and_fill(ctx, world)); /* forgotten by the next line, though it still runs */
    ft_mem_timeline_clear(ctx);
    FT_TRY(ft_span_begin(ctx, "all", -1, -1));
    FT_TRY(gather_and_fill(ctx, world));
    FT_TRY(ft_sync(ctx));
    ft_span_end(ctx);
    FT_TRY(ft_works(ctx, &works, &n));
    if (ft_rank(ctx) != 1) return FT_OK;
    out->n = n;
    for (int64_t i = 0; i < n && i < 8; i++) out->works[i] = works[i];
    FT_TRY(ft_works(ctx, &works, &out->again));
    if (ft_spans(ctx, &spans) == 1) {
        out->begin_s = spans[0].begin_s;
        out->end_s = spans[0].end_s;
    }
    ft_mem_timeline_clear(ctx);
    return ft_works(ctx, &works, &out->cleared);
}

static void streams_tell_what_they_did(void **state)
{
    (void)state;
    for (int async = 0; async < 2; async++) {
        seen out;
        ft_config config = ft_config_default();
        memset(&out, 0, sizeof out);
        config.world = 2;
        config.timeline = 1;
        config.async = async ? FT_ON : FT_OFF;
        config.delay_us = 200;
        assert_int_equal(ft_launch(&config, watched, &out), FT_OK);
        assert_int_equal(out.n, 3);
        assert_int_equal(out.again, 3);
        assert_int_equal(out.cleared, 0);
        assert_string_equal(out.works[0].name, "fill");
        assert_string_equal(out.works[1].name, "all-gather");
        assert_string_equal(out.works[2].name, "fill");
        assert_string_equal(out.works[0].group, "");
        assert_string_equal(out.works[1].group, "everyone in the whole w"); /* what has room */
        assert_int_equal(out.works[0].stream, FT_STREAM_COMPUTE);
        assert_int_equal(out.works[1].stream, FT_STREAM_GATHER);
        double before = out.begin_s;
        for (int i = 0; i < 3; i++) { /* each waits for the one before */
            assert_true(out.works[i].begin_s >= before);
            assert_true(out.works[i].end_s >= out.works[i].begin_s);
            before = out.works[i].end_s;
        }
        assert_true(out.end_s >= before);
    }
}

static void nobody_asks_nobody_pays(void **state)
{
    (void)state;
    seen out;
    ft_config config = ft_config_default();
    config.world = 2;
    memset(&out, 0, sizeof out);
    assert_int_equal(ft_launch(&config, watched, &out), FT_OK);
    assert_int_equal(out.n, 0);
    config.timeline = 1;
    config.device = FT_META;
    assert_int_equal(ft_launch(&config, watched, &out), FT_OK);
    assert_int_equal(out.n, 0);
}

static ft_status many(ft_ctx *ctx, void *user)
{
    int64_t n = 4;
    ft_tensor *t;
    const ft_work *works;
    FT_TRY(ft_tensor_create(ctx, &t, FT_F32, 1, &n, FT_TAG_ACT));
    for (int round = 0; round < 2; round++) { /* the blocks are used again */
        ft_mem_timeline_clear(ctx);
        for (int i = 0; i < 1000; i++)
            FT_TRY(ft_fill(t, i, ft_stream_get(ctx, FT_STREAM_COMPUTE)));
        FT_TRY(ft_works(ctx, &works, (int64_t *)user));
        for (int i = 1; i < 1000; i++)
            if (works[i].begin_s < works[i - 1].end_s) *(int64_t *)user = -1;
    }
    ft_tensor_free(t);
    return FT_OK;
}

static void more_than_a_block(void **state)
{
    (void)state;
    int64_t n = 0;
    ft_config config = ft_config_default();
    config.timeline = 1;
    assert_int_equal(ft_launch(&config, many, &n), FT_OK);
    assert_int_equal(n, 1000);
}

static ft_work work(ft_stream_kind stream, const char *group, double begin_s, double end_s)
{
    ft_work w;
    memset(&w, 0, sizeof w);
    w.name = w.phase = "";
    w.stream = stream;
    w.begin_s = begin_s;
    w.end_s = end_s;
    snprintf(w.group, sizeof w.group, "%s", group);
    return w;
}

static void overlap_is_what_lies_under_compute(void **state)
{
    (void)state;
    ft_work works[8];
    ft_io_record record;
    double traffic, under;
    memset(&record, 0, sizeof record);
    record.works = works;
    record.n_works = 8;
    works[0] = work(FT_STREAM_COMPUTE, "", 1, 2);
    works[1] = work(FT_STREAM_GATHER, "g", 0, 1.5);        /* 0.5 of 1.5 */
    works[2] = work(FT_STREAM_COMPUTE, "", 2, 4);
    works[3] = work(FT_STREAM_GATHER, "g", 1.5, 3);        /* 1.5 of 1.5 */
    works[4] = work(FT_STREAM_REDUCE, "r", 3.5, 5.5);      /* 0.5 + 0.5 of 2 */
    works[5] = work(FT_STREAM_COMPUTE, "scalars", 4, 4.5); /* traffic on compute is no compute */
    works[6] = work(FT_STREAM_COMPUTE, "", 5, 7);
    works[7] = work(FT_STREAM_REDUCE, "", 6, 7);           /* an op on another stream: neither */
    ft_io_record_overlap(&record, &traffic, &under);
    assert_true(fabs(traffic - 5.0) < 1e-12);
    assert_true(fabs(under - 3.0) < 1e-12);
    record.n_works = 0;
    ft_io_record_overlap(&record, &traffic, &under);
    assert_true(traffic == 0 && under == 0);
}

/* Kernels of a few microseconds in the third hour: Chrome's times are microseconds. */
static void traces_keep_nanoseconds(void **state)
{
    (void)state;
    char path[] = "/tmp/ft_trace.XXXXXX", text[4096];
    const int made = mkstemp(path);
    ft_io_record record;
    ft_work kernel = work(FT_STREAM_COMPUTE, "", 10000.000001234, 10000.000003236);
    memset(&record, 0, sizeof record);
    record.works = &kernel;
    record.n_works = 1;
    assert_true(made >= 0 && close(made) == 0);
    assert_int_equal(ft_io_trace_write(path, 1, &record), FT_OK);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    unlink(path);
    assert_non_null(strstr(text, "\"ts\":10000000001.234,\"dur\":2.002,"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_tell_what_they_did),
        cmocka_unit_test(nobody_asks_nobody_pays),
        cmocka_unit_test(more_than_a_block),
        cmocka_unit_test(overlap_is_what_lies_under_compute),
        cmocka_unit_test(traces_keep_nanoseconds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
