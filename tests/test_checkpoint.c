/* test_checkpoint.c: checkpoints that survive.

   Properties: what was saved on one mesh continues on any other as the run that was not interrupted
   (on the same one, bit for bit); a process that dies at any moment of saving leaves the last
   complete checkpoint to be found and loaded, and saving again works; a system that refuses
   (full, read-only) costs an error and nothing else; whatever was damaged or made up is refused,
   naming file and reason.

   Kills and refusals come at the calls that FT_IO_FAULT sees, one after another, and at moments
   that a generator gives.

   License: MIT, see LICENSE. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include <signal.h>
#include <stdint.h>
#include <stdio.h> /* before femtotron.h: _POSIX_C_SOURCE is set above */

/* Of the counted calls (all, or those of one name) number fault_at is refused, or kills. */
static const char *fault_call;
static int fault_at, fault_errno, fault_count;

static int test_fault(const char *call);
#define FT_IO_FAULT(call) test_fault(call)

#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"
#include "femtotron_io.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static int test_fault(const char *call)
{
    if (fault_at <= 0 || (fault_call && strcmp(fault_call, call) != 0)) return 0;
    if (__atomic_add_fetch(&fault_count, 1, __ATOMIC_SEQ_CST) != fault_at) return 0;
    if (!fault_errno) kill(getpid(), SIGKILL);
    return fault_errno;
}

static void set_fault(const char *call, int at, int error)
{
    fault_call = call;
    fault_errno = error;
    __atomic_store_n(&fault_count, 0, __ATOMIC_SEQ_CST);
    fault_at = at;
}

#if !defined(FT_CJSON) || !defined(FT_XXHASH)

int main(void)
{
    printf("checkpoints need cJSON and xxHash (FT_CJSON, FT_XXHASH): not checked\n");
    return 0;
}

#else

#include "check.h"
#include "mesh_harness.h"

/* ----------------------------------------------------------------------------------- the files */

static char base[128]; /* a directory of this program's, in memory where that is possible */

static void shell(const char *command)
{
    if (system(command) != 0) fail_msg("%s failed", command);
}

static const char *place(const char *name)
{
    static char paths[8][400];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%.200s", base, name);
    return path;
}

static void clear_files(void)
{
    char command[400];
    snprintf(command, sizeof command, "rm -rf '%s' && mkdir '%s'", base, base);
    shell(command);
}

static int setup(void **state)
{
    (void)state;
    set_fault(NULL, 0, 0);
    clear_files();
    return 0;
}

/* Directories and files whose names begin so. */
static int count_names(const char *dir, const char *prefix)
{
    int n = 0;
    DIR *open_dir = opendir(dir);
    if (!open_dir) return 0;
    for (struct dirent *d; (d = readdir(open_dir)) != NULL;)
        n += strncmp(d->d_name, prefix, strlen(prefix)) == 0 && strcmp(d->d_name, ".") != 0 &&
             strcmp(d->d_name, "..") != 0;
    closedir(open_dir);
    return n;
}

static char *read_all(const char *path, size_t *n)
{
    char *text = NULL;
    if (ft__io_slurp(path, (size_t)1 << 30, &text, n) != FT_OK) fail_msg("%s", ft_last_error());
    return text;
}

static void write_all(const char *path, const char *text, size_t n)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

/* ---------------------------------------------------------------------------------- a training */

typedef struct job {
    const mh_layout *l;
    const char *dir, *path;     /* path: resume from this one */
    int resume, weights_only;
    int64_t last;               /* steps in all */
    int64_t every;              /* a save after so many; 0: none */
    int64_t die_after;          /* SIGKILL after this step; 0: no */
    int keep;
    int64_t begun;              /* out: the first step that was run */
    double loss[32];
    uint64_t hash;
    char notes[2048];
} job;

static void take_note(void *user, const char *text)
{
    job *j = (job *)user;
    size_t n = strlen(j->notes);
    snprintf(j->notes + n, sizeof j->notes - n, "%s\n", text);
}

static ft_status resume(mh_rank *r, job *j, int64_t *step)
{
    ft_io_resume from;
    ft_io_manifest *m;
    ft_llama_config config = mh_model(j->l);
    int64_t seed = 0;
    memset(&from, 0, sizeof from);
    from.dir = j->dir;
    from.path = j->path;
    from.weights_only = j->weights_only;
    from.note = take_note;
    from.user = j;
    FT_TRY(ft_io_llama_resume(r->ctx, &from, r->model, &config, r->zero, &m));
    *step = m ? m->step : 0;
    if (m) FT_TRY(ft_io_manifest_int(m, "test.seed", &seed));
    CHECK(!m || seed == (int64_t)j->l->samples);
    ft_io_manifest_free(m);
    return FT_OK;
}

static ft_status save(ft_io_checkpoint *c, mh_rank *r, int64_t step)
{
    ft_llama_config config = mh_model(r->l);
    FT_TRY(ft_io_checkpoint_begin(c, step));
    FT_TRY(ft_io_checkpoint_set(c, "test.seed", "%d", r->l->samples));
    FT_TRY(ft_io_llama_stage(c, r->model, &config, r->zero));
    return ft_io_checkpoint_commit(c);
}

static ft_status run_steps(mh_rank *r, job *j, ft_io_checkpoint *c, int64_t step)
{
    for (; step < j->last; step++) {
        ft_zero_report report;
        FT_TRY(mh_step(r, step, &report));
        if (ft_rank(r->ctx) == 0) j->loss[step] = report.loss;
        if (c && j->every && (step + 1) % j->every == 0) FT_TRY(save(c, r, step + 1));
        if (step + 1 == j->die_after) kill(getpid(), SIGKILL);
    }
    return FT_OK;
}

static ft_status train_rank(ft_ctx *ctx, void *user)
{
    job *j = (job *)user;
    mh_rank r;
    ft_io_checkpoint *c = NULL;
    ft_io_checkpoint_config config;
    int64_t step = 0;
    memset(&config, 0, sizeof config);
    config.dir = j->dir;
    config.keep = j->keep;
    FT_TRY(mh_create(ctx, j->l, &r));
    if (j->every) FT_TRY(ft_io_checkpoint_create(ctx, &config, &c));
    ft_status status = j->resume ? resume(&r, j, &step) : FT_OK;
    if (ft_rank(ctx) == 0) j->begun = step;
    if (status == FT_OK) status = run_steps(&r, j, c, step);
    if (status != FT_OK) ft_io_checkpoint_abandon(c);
    else status = ft_io_checkpoint_close(c);
    FT_TRY(status);
    uint64_t hash;
    FT_TRY(ft_llama_hash(r.model, &hash));
    if (ft_rank(ctx) == 0) j->hash = hash;
    return FT_OK;
}

static ft_status launch_job(job *j)
{
    ft_config config = ft_config_default();
    config.world = mh_world(j->l);
    return ft_launch(&config, train_rank, j);
}

static job make_job(const mh_layout *l, const char *dir, int64_t last)
{
    job j;
    memset(&j, 0, sizeof j);
    j.l = l;
    j.dir = dir;
    j.last = last;
    return j;
}

static void run(job *j)
{
    if (launch_job(j) != FT_OK) fail_msg("%s: %s", mh_text(j->l), ft_last_error());
}

static void assert_losses(const job *got, const job *want, int64_t from, int64_t to,
                          double tolerance)
{
    for (int64_t s = from; s < to; s++)
        if (!(fabs(got->loss[s] - want->loss[s]) <= tolerance))
            fail_msg("%s: loss of step %lld is %.9g, uninterrupted %.9g", mh_text(got->l),
                     (long long)s, got->loss[s], want->loss[s]);
}

/* ------------------------------------------------------------------------------- any other mesh */

static void what_one_mesh_saves_any_other_continues(void **state)
{
    (void)state;
    for (int tied = 0; tied < 2; tied++) {
        mh_layout from = mh_make(2, 2, 2, 3), to[5];
        clear_files();
        to[0] = mh_make(8, 1, 1, 1);
        to[1] = mh_make(1, 1, 4, 0);
        to[2] = mh_make(3, 2, 1, 2);
        to[3] = mh_make(4, 1, 1, 3);
        to[3].shard_ranks = 2;
        to[4] = mh_make(1, 2, 1, 0);
        to[4].sp = 1;
        from.tied = tied;
        from.biased = !tied;
        job whole = make_job(&from, NULL, 6), first = make_job(&from, place("a"), 3);
        run(&whole);
        first.every = 3;
        run(&first);
        for (int i = 0; i < 5; i++) {
            to[i].tied = from.tied;
            to[i].biased = from.biased;
            to[i].seed = 7; /* other weights, were they not loaded */
            job then = make_job(&to[i], place("a"), 6);
            then.resume = 1;
            run(&then);
            assert_int_equal(then.begun, 3);
            assert_losses(&then, &whole, 3, 6, 1e-6);
        }
    }
}

/* Case 24. */
static void saved_on_2_ranks_loaded_on_3_then_on_8(void **state)
{
    (void)state;
    mh_layout two = mh_make(2, 1, 1, 2), three = mh_make(3, 1, 1, 3), eight = mh_make(8, 1, 1, 1);
    job whole = make_job(&two, NULL, 9), a = make_job(&two, place("a"), 3);
    job b = make_job(&three, place("a"), 6), c = make_job(&eight, place("a"), 9);
    run(&whole);
    a.every = b.every = c.every = 3;
    b.resume = c.resume = 1;
    run(&a);
    run(&b);
    run(&c);
    assert_int_equal(b.begun, 3);
    assert_int_equal(c.begun, 6);
    assert_losses(&b, &whole, 3, 6, 1e-6);
    assert_losses(&c, &whole, 6, 9, 1e-6);
}

/* Runs in a child, which must die of a signal, or end as it should (signal 0). */
static void in_child(job *j, int signal)
{
    int ended;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) _exit(launch_job(j) == FT_OK ? 0 : 1);
    assert_int_equal(waitpid(child, &ended, 0), child);
    if (signal) assert_true(WIFSIGNALED(ended) && WTERMSIG(ended) == signal);
    else assert_true(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
}

/* Case 25. */
static void the_same_mesh_continues_bit_for_bit_after_a_kill(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        mh_layout l = mh_make(2, stage == 1 ? 2 : 1, stage == 2 ? 2 : 1, stage);
        clear_files();
        l.dtype = stage % 2 ? FT_BF16 : FT_F32;
        l.tied = stage == 2;
        l.sgd = stage == 3;
        job whole = make_job(&l, NULL, 20), killed = make_job(&l, place("a"), 20);
        job rest = make_job(&l, place("a"), 20);
        run(&whole);
        killed.every = rest.every = 4;
        killed.die_after = 11;
        killed.keep = rest.keep = 2;
        in_child(&killed, SIGKILL);
        rest.resume = 1;
        run(&rest);
        assert_true(rest.begun == 8 || rest.begun == 4); /* 8 may still have been on its way */
        assert_losses(&rest, &whole, rest.begun, 20, 0);
        if (rest.hash != whole.hash)
            fail_msg("%s: hash %016llx, uninterrupted %016llx", mh_text(&l),
                     (unsigned long long)rest.hash, (unsigned long long)whole.hash);
        assert_int_equal(count_names(place("a"), "step-"), 2);
    }
}

/* -------------------------------------------------------------- a store without a model: kills */

enum { ROWS = 7, COLS = 12 };

/* Two ranks store an array [7,12], cut by columns, and one of [5] that rank 1 alone has; each
   element is a function of (step, array, element). */
static float element_of(int64_t step, int array, int64_t i)
{
    return (float)(mh_mix((uint64_t)step * 1000 + (uint64_t)array * 100 + (uint64_t)i) % 100000);
}

typedef struct store {
    const char *dir;
    int keep, blocking;
    int64_t first, saves; /* steps first, first + 1, ...; `again`: each of them twice */
    int again;
    double timeout_s;
    int absent;           /* rank 1 does not save */
    ft_status status[2];
    ft_io_checkpoint_report report;
} store;

static ft_status stage_store(ft_io_checkpoint *c, int rank, int64_t step)
{
    ft_io_run run;
    int64_t shape[2];
    float *values;
    shape[0] = ROWS;
    shape[1] = COLS;
    run.first = rank * COLS / 2;
    run.n = COLS / 2;
    run.stride = COLS;
    run.count = ROWS;
    FT_TRY(ft_io_checkpoint_add(c, "cut", 2, shape, 1, &run, &values));
    for (int64_t i = 0; i < ROWS * COLS / 2; i++)
        values[i] = element_of(step, 0, run.first + i / run.n * COLS + i % run.n);
    if (rank == 0) return FT_OK;
    shape[0] = 5;
    run.first = 0;
    run.n = run.stride = 5;
    run.count = 1;
    FT_TRY(ft_io_checkpoint_add(c, "own", 1, shape, 1, &run, &values));
    for (int64_t i = 0; i < 5; i++) values[i] = element_of(step, 1, i);
    return FT_OK;
}

static ft_status save_store(ft_io_checkpoint *c, int rank, int64_t step)
{
    FT_TRY(ft_io_checkpoint_begin(c, step));
    FT_TRY(ft_io_checkpoint_set(c, "step", "%lld", (long long)step));
    FT_TRY(stage_store(c, rank, step));
    return ft_io_checkpoint_commit(c);
}

/* A rank's own error is kept apart: the others must see theirs. */
static ft_status store_rank(ft_ctx *ctx, void *user)
{
    store *s = (store *)user;
    ft_io_checkpoint *c;
    ft_io_checkpoint_config config;
    int rank = ft_rank(ctx), done;
    ft_status status = FT_OK;
    memset(&config, 0, sizeof config);
    config.dir = s->dir;
    config.keep = s->keep;
    config.blocking = s->blocking;
    config.timeout_s = s->timeout_s;
    FT_TRY(ft_io_checkpoint_create(ctx, &config, &c));
    for (int64_t i = 0; i < s->saves * (s->again ? 2 : 1) && status == FT_OK; i++) {
        if (rank == 1 && s->absent) break;
        status = save_store(c, rank, s->first + i / (s->again ? 2 : 1));
        if (status == FT_OK)
            status = ft_io_checkpoint_wait(c, rank == 0 ? &s->report : NULL, &done);
    }
    s->status[rank] = status;
    if (rank == 0 && status != FT_OK) {
        ft_status kept = ft_error(status, "%s", ft_last_error());
        ft_io_checkpoint_abandon(c);
        return kept;
    }
    ft_io_checkpoint_abandon(c);
    return FT_OK;
}

static ft_status launch_store(store *s)
{
    ft_config config = ft_config_default();
    config.world = 2;
    return ft_launch(&config, store_rank, s);
}

static store make_store(const char *dir, int64_t first, int64_t saves)
{
    store s;
    memset(&s, 0, sizeof s);
    s.dir = dir;
    s.first = first;
    s.saves = saves;
    return s;
}

/* Reads all of a checkpoint; FT_OK only if every element is as it was saved. */
static ft_status verify(const char *path, int64_t step)
{
    ft_io_reader *r;
    ft_io_run run;
    int64_t shape[2];
    float values[ROWS * COLS];
    FT_TRY(ft_io_reader_open(path, &r));
    ft_status status = FT_OK;
    if (ft_io_reader_manifest(r)->step != step) status = ft_error(FT_ERR_STATE, "another step");
    shape[0] = ROWS;
    shape[1] = COLS;
    run.first = 0;
    run.n = run.stride = ROWS * COLS;
    run.count = 1;
    if (status == FT_OK) status = ft_io_reader_read(r, "cut", 2, shape, 1, &run, values);
    for (int i = 0; i < ROWS * COLS && status == FT_OK; i++)
        if (values[i] != element_of(step, 0, i)) status = ft_error(FT_ERR_STATE, "cut: %d", i);
    shape[0] = 5;
    run.n = run.stride = 5;
    if (status == FT_OK) status = ft_io_reader_read(r, "own", 1, shape, 1, &run, values);
    for (int i = 0; i < 5 && status == FT_OK; i++)
        if (values[i] != element_of(step, 1, i)) status = ft_error(FT_ERR_STATE, "own: %d", i);
    ft_io_reader_close(r);
    return status;
}

/* The last complete checkpoint: its step; -1 without one. All that is listed must load. */
static int64_t last_step(const char *dir)
{
    ft_io_entry *entries;
    int64_t n, step;
    char path[600];
    assert_int_equal(ft_io_checkpoint_list(dir, &n, &entries), FT_OK);
    for (int64_t i = 0; i < n; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, entries[i].name);
        if (verify(path, entries[i].step) != FT_OK) fail_msg("%s: %s", path, ft_last_error());
    }
    step = n ? entries[0].step : -1;
    ft_io_checkpoint_list_free(entries);
    return step;
}

/* Case 26. 200 deaths, while steps are saved, and saved again over themselves: 104 at the calls that
   saving makes, one after another; 26 at each renaming, when the last one is being replaced; the
   others at moments of a generator. */
static void killed_at_any_moment_of_saving(void **state)
{
    (void)state;
    int64_t last = -1;
    int killed = 0;
    for (int k = 0; k < 200; k++) {
        struct timespec pause;
        int ended, at_call = k < 130, renaming = at_call && k % 5 == 4 && last > 0;
        store s = make_store(place("a"), last < 0 ? 1 : last + (k % 2 && !renaming),
                             at_call ? 3 : 40);
        s.keep = 2;
        s.again = k % 3 == 0;
        if (renaming) s.saves = 1;
        pid_t child = fork();
        if (child == 0) {
            set_fault(renaming ? "rename" : NULL, renaming ? k / 5 % 9 + 1 : at_call ? k + 1 : 0,
                      0);
            _exit(launch_store(&s) == FT_OK ? 0 : 1);
        }
        pause.tv_sec = 0;
        pause.tv_nsec = (long)(mh_mix((uint64_t)k) % 12000000);
        if (!at_call) {
            nanosleep(&pause, NULL);
            kill(child, SIGKILL);
        }
        assert_int_equal(waitpid(child, &ended, 0), child);
        if (WIFEXITED(ended) && WEXITSTATUS(ended)) fail_msg("kill %d: the child failed", k);
        killed += WIFSIGNALED(ended) != 0;
        int64_t now = last_step(place("a"));
        if (now < last) fail_msg("kill %d: the last is %lld, it was %lld", k, (long long)now,
                                 (long long)last);
        last = now;
    }
    assert_true(killed > 150 && last > 10);
    store s = make_store(place("a"), last + 1, 1);
    s.keep = 2;
    if (launch_store(&s) != FT_OK) fail_msg("%s", ft_last_error());
    assert_int_equal(last_step(place("a")), last + 1);
    assert_int_equal(count_names(place("a"), ""), 3); /* two checkpoints and the lock */
}

/* Every call that saving makes is refused in turn, on each rank: an error (or a warning, of what is
   left to delete), the checkpoint before is there, and saving again works. */
static void a_refused_call_costs_an_error_and_nothing_else(void **state)
{
    (void)state;
    static const struct { const char *call; int error; const char *text; } kinds[] = {
        {"write", ENOSPC, "No space left"}, {"sync", EIO, "Input/output"},
        {"rename", EROFS, "Read-only"}, {"mkdir", EROFS, "Read-only"},
        {"open", EDQUOT, "quota"}};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        int failures = 0;
        for (int n = 1; n < 60; n++) {
            clear_files();
            store s = make_store(place("a"), 1, 1), again;
            s.timeout_s = 5;
            s.keep = 1;
            assert_int_equal(launch_store(&s), FT_OK);
            s.first = 2;
            set_fault(kinds[k].call, n, kinds[k].error);
            ft_status status = launch_store(&s);
            int reached = fault_count >= n;
            char message[1024];
            snprintf(message, sizeof message, "%s", status ? ft_last_error() : "");
            set_fault(NULL, 0, 0);
            if (!reached) break;
            if (status != FT_OK) {
                failures++;
                if (status != FT_ERR_IO || !strstr(message, kinds[k].text))
                    fail_msg("%s %d: %s", kinds[k].call, n, message);
                int64_t now = last_step(place("a"));
                assert_true(now == 1 || now == 2); /* 2: when the directory's sync is refused */
            } else {
                assert_int_equal(last_step(place("a")), 2);
            }
            again = make_store(place("a"), 3, 1);
            again.keep = 1;
            if (launch_store(&again) != FT_OK)
                fail_msg("%s %d, then: %s", kinds[k].call, n, ft_last_error());
            assert_int_equal(last_step(place("a")), 3);
            assert_int_equal(count_names(place("a"), ""), 2);
        }
        assert_true(failures > 0);
    }
}

/* ---------------------------------------------------------------------------------- the system */

static void a_file_system_that_is_full(void **state)
{
    (void)state;
    int ended;
    mh_layout l = mh_make(2, 1, 1, 1);
    job first = make_job(&l, place("a"), 2), more = make_job(&l, place("a"), 4);
    first.every = more.every = 2;
    more.resume = 1;
    run(&first);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) { /* files of 20 KB at most: a part has more */
        struct rlimit limit;
        limit.rlim_cur = limit.rlim_max = 20000;
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        ft_status status = launch_job(&more);
        _exit(status == FT_ERR_IO && strstr(ft_last_error(), "too large") &&
              strstr(ft_last_error(), ".safetensors") ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_true(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
    run(&more);
    assert_int_equal(more.begun, 2);
    assert_int_equal(count_names(place("a"), "step-"), 2);
}

static void directories_that_cannot_be_written(void **state)
{
    (void)state;
    write_all(place("file"), "x", 1);
    store s = make_store(place("file"), 1, 1);
    assert_int_equal(launch_store(&s), FT_ERR_IO);
    assert_non_null(strstr(ft_last_error(), "no directory"));
    s.dir = place("file/below");
    assert_int_equal(launch_store(&s), FT_ERR_IO);
    assert_non_null(strstr(ft_last_error(), "file/below"));
    s.dir = place("deep/er/est"); /* those above are made too */
    assert_int_equal(launch_store(&s), FT_OK);
    assert_int_equal(last_step(s.dir), 1);
    if (getuid() == 0) return; /* root may write everywhere */
    assert_int_equal(mkdir(place("ro"), 0555), 0);
    s.dir = place("ro");
    assert_int_equal(launch_store(&s), FT_ERR_IO);
    assert_non_null(strstr(ft_last_error(), "Permission denied"));
}

static void a_part_that_does_not_come_is_named(void **state)
{
    (void)state;
    store s = make_store(place("a"), 1, 1);
    s.timeout_s = 0.2;
    s.absent = 1;
    assert_int_equal(launch_store(&s), FT_ERR_IO);
    if (!strstr(ft_last_error(), "the part of rank 1 has not come within 0.2 s"))
        fail_msg("%s", ft_last_error());
    assert_int_equal(last_step(place("a")), -1);
    assert_int_equal(count_names(place("a"), ""), 1);
}

static ft_status second_rank(ft_ctx *ctx, void *user)
{
    ft_io_checkpoint *c, *other = NULL;
    ft_io_checkpoint_config config;
    (void)user;
    memset(&config, 0, sizeof config);
    config.dir = place("a");
    FT_TRY(ft_io_checkpoint_create(ctx, &config, &c));
    REFUSED(ft_io_checkpoint_create(ctx, &config, &other), FT_ERR_IO, "another run is writing");
    CHECK(mkdir(place("a/step-00000009.tmp-live"), 0777) == 0);
    FT_TRY(ft_io_checkpoint_close(c));
    FT_TRY(ft_io_checkpoint_create(ctx, &config, &c)); /* the lock is free; what is left is dead */
    CHECK(count_names(place("a"), "step-") == 0);
    return ft_io_checkpoint_close(c);
}

static void two_runs_in_one_directory_are_refused(void **state)
{
    (void)state;
    ft_config config = ft_config_default();
    if (ft_launch(&config, second_rank, NULL) != FT_OK) fail_msg("%s", ft_last_error());
}

/* ------------------------------------------------------------------------------ which are kept */

static void the_last_written_are_kept_and_found(void **state)
{
    (void)state;
    store s = make_store(place("a"), 10, 5);
    s.keep = 3;
    assert_int_equal(launch_store(&s), FT_OK);
    assert_int_equal(last_step(s.dir), 14);
    assert_int_equal(count_names(s.dir, "step-"), 3);
    assert_int_equal(mkdir(place("a/step-mine"), 0777), 0); /* not ours, and nothing of ours */
    assert_int_equal(mkdir(place("a/step-00000099"), 0777), 0);
    write_all(place("a/notes.txt"), "x", 1);
    s.first = 3; /* a run that began again from an earlier step: its checkpoints are the last */
    s.saves = 2;
    s.keep = 2;
    assert_int_equal(launch_store(&s), FT_OK);
    assert_int_equal(rmdir(place("a/step-00000099")), 0);
    assert_int_equal(last_step(s.dir), 4);
    assert_int_equal(count_names(s.dir, "step-0"), 2);
    assert_int_equal(count_names(s.dir, "notes.txt") + count_names(s.dir, "step-mine"), 2);
    s.keep = 0;
    s.first = 4;
    s.saves = 3;
    s.again = 1; /* each replaces itself */
    assert_int_equal(launch_store(&s), FT_OK);
    assert_int_equal(count_names(s.dir, "step-0"), 4);
    assert_string_equal(s.report.warning, "");
    assert_true(s.report.bytes > 4 * (ROWS * COLS + 5) && s.report.step == 6);
    assert_non_null(strstr(s.report.path, "a/step-00000006"));
}

/* A name of ours that is no directory of ours, and a checkpoint into which somebody has put a
   directory: neither stops a run, now or the next time, and what links lead to stays. */
static void what_others_put_there_stops_no_run(void **state)
{
    (void)state;
    struct stat info;
    char dir[400]; /* names of place() do not last */
    snprintf(dir, sizeof dir, "%s", place("a"));
    store s = make_store(dir, 1, 3);
    s.keep = 2;
    assert_int_equal(mkdir(place("a"), 0777) | mkdir(place("b"), 0777), 0);
    write_all(place("b/theirs"), "x", 1);
    assert_int_equal(symlink(place("b"), place("a/step-00000001")), 0);
    assert_int_equal(symlink(place("b"), place("a/.old-step-00000009")), 0);
    assert_int_equal(symlink(place("b"), place("a/step-00000009.tmp-0123456789abcdef")), 0);
    write_all(place("a/step-00000002"), "x", 1);
    write_all(place("a/.old-step-00000007"), "x", 1);
    assert_int_equal(mkdir(place("a/step-notes.tmp-1"), 0777), 0); /* theirs, by its name */
    write_all(place("a/step-notes.tmp-1/theirs"), "x", 1);
    assert_int_equal(launch_store(&s), FT_OK);
    assert_string_equal(s.report.warning, "");
    assert_int_equal(count_names(s.dir, "step-0") + count_names(s.dir, ".old"), 2);
    assert_int_equal(stat(place("b/theirs"), &info), 0);
    assert_int_equal(stat(place("a/step-notes.tmp-1/theirs"), &info), 0);

    assert_int_equal(mkdir(place("a/step-00000003/model"), 0777), 0);
    write_all(place("a/step-00000003/model/theirs"), "x", 1);
    s.first = 4;
    s.saves = 2;
    for (int run = 0; run < 2; run++) {
        assert_int_equal(launch_store(&s), FT_OK);
        assert_int_equal(last_step(s.dir), 5);
        assert_int_equal(stat(place("a/.old-step-00000003/model/theirs"), &info), 0);
    }
}

/* ----------------------------------------------------------------------------------- manifests */

#define HEX "\"0123456789abcdef\""
#define PART0 "{\"name\":\"w\",\"shape\":[4,4],\"runs\":[0,2,4,4],\"xxh3\":[" HEX "]}"
#define PART1 "{\"name\":\"w\",\"shape\":[4,4],\"runs\":[2,2,4,4],\"xxh3\":[" HEX "]}"
#define FILE0 "{\"rank\":0,\"name\":\"a\",\"bytes\":100,\"header_xxh3\":" HEX ",\"arrays\":[" \
    PART0 "]}"
#define FILE1 "{\"rank\":1,\"name\":\"b\",\"bytes\":100,\"header_xxh3\":" HEX ",\"arrays\":[" \
    PART1 "]}"
#define MANIFEST "{\"format\":\"femtotron checkpoint\",\"version\":1,\"serial\":3,\"step\":12," \
    "\"ranks\":2,\"settings\":{\"a\":\"1\",\"b\":\"x\"},\"files\":[" FILE0 "," FILE1 "]," \
    "\"xxh3\":" HEX "}"

/* The manifest with the first `from` replaced by `to`. */
static char *changed(const char *from, const char *to)
{
    static char text[4096];
    const char *at = strstr(MANIFEST, from);
    if (!at) fail_msg("no %s", from);
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - MANIFEST), MANIFEST, to, at + strlen(from));
    return text;
}

static void manifests_that_cannot_be_are_refused(void **state)
{
    (void)state;
    static const struct { const char *from, *to, *why; } cases[] = {
        {"{\"format\"", "\"format\"", "not JSON"},
        {"\"}", "\"}}", "not JSON, at byte"},
        {"\"version\":1", "\"version\":2", "\"version\" must be a whole number from 1 to 1"},
        {"\"version\":1,", "", "\"version\" is missing"},
        {"\"version\":1", "\"version\":1.5", "\"version\""},
        {"\"version\":1", "\"version\":\"1\"", "\"version\""},
        {"femtotron checkpoint", "something else", "\"format\" must be"},
        {"\"step\":12", "\"step\":-1", "\"step\" must be a whole number from 0"},
        {"\"step\":12", "\"step\":1e400", "\"step\""},
        {"\"step\":12", "\"step\":9007199254740994", "\"step\""},
        {"\"step\":12", "\"step\":12,\"step\":13", "\"step\" is there twice"},
        {"\"step\":12", "\"stop\":12", "\"stop\" is no key of version 1"},
        {"\"serial\":3", "\"serial\":0", "\"serial\""},
        {"\"ranks\":2", "\"ranks\":1", "\"files\" must be one for each rank"},
        {"\"ranks\":2", "\"ranks\":2000000", "\"ranks\""},
        {"\"a\":\"1\"", "\"a\":1", "\"settings.a\" must be a string"},
        {"\"b\":\"x\"", "\"a\":\"x\"", "\"settings.a\" is there twice"},
        {"{\"a\":\"1\",\"b\":\"x\"}", "[]", "\"settings\" must be an object"},
        {FILE0, "7", "\"files[0].\" must be an object"},
        {"\"rank\":0", "\"rank\":2", "\"files[0].rank\""},
        {"\"rank\":1", "\"rank\":0", "above that of the file before"},
        {"\"name\":\"b\"", "\"name\":\"a\"", "another than those before"},
        {"\"name\":\"a\"", "\"name\":\"../a\"", "no slash"},
        {"\"name\":\"a\"", "\"name\":\"/etc/passwd\"", "no slash"},
        {"\"name\":\"a\"", "\"name\":\"..\"", "leading dot"},
        {"\"name\":\"a\"", "\"name\":\"x/y\"", "no slash"},
        {"\"name\":\"a\"", "\"name\":\"\"", "\"files[0].name\" must be a string"},
        {"\"name\":\"a\"", "\"name\":\"manifest.json\"", "\"files[0].name\""},
        {"\"bytes\":100", "\"bytes\":24", "fewer than its arrays"},
        {"\"bytes\":100", "\"bytes\":-100", "\"files[0].bytes\""},
        {HEX ",\"arrays\"", "\"0123\",\"arrays\"", "\"files[0].header_xxh3\" must be 16 hex"},
        {"\"shape\":[4,4]", "\"shape\":[]", "\"files[0].arrays[0].shape\" must be 1 to 8"},
        {"\"shape\":[4,4]", "\"shape\":[0,4]", "whole numbers from 1"},
        {"\"shape\":[4,4]", "\"shape\":[9007199254740991,9007199254740991]", "fewer than 2^51"},
        {"\"shape\":[4,4]", "\"shape\":[8,4]", "different shapes in a and b"},
        {"[0,2,4,4]", "[0,2,4]", "numbers in fours"},
        {"[0,2,4,4]", "[-1,2,4,4]", "\"files[0].arrays[0].runs\" must be whole"},
        {"[0,2,4,4]", "[0,2,4,5]", "outside its array"},
        {"[0,2,4,4]", "[0,2,4,9007199254740992]", "outside its array"},
        {"[0,2,4,4]", "[9007199254740992,2,4,4]", "outside its array"},
        {"[0,2,4,4]", "[0,2,3,4]", "stride is neither"},
        {"[0,2,4,4]", "[0,2,1,4]", "outside its array, or its pieces overlap"},
        {"[0,2,4,4]", "[0,2,2,1,1,2,2,1,4,4,4,1]", "runs overlap or do not ascend"},
        {"[0,2,4,4]", "[0,2,4,3]", "2 of its 16 elements are in no file"},
        {"[2,2,4,4]", "[1,2,4,4]", "elements from 1 on are in a and again in b"},
        {"[2,2,4,4]", "[8,8,8,1]", "again in"},
        {"\"xxh3\":[" HEX "]", "\"xxh3\":[]", "number of hashes"},
        {"\"xxh3\":[" HEX "]", "\"xxh3\":[1]", "\"files[0].arrays[0].xxh3\" must be strings"},
        {"\"name\":\"w\"", "\"name\":7", "\"files[0].arrays[0].name\" must be a string"},
        {"\"files\":[", "\"files\":{", "not JSON"}};
    ft_io_manifest *m;
    if (ft_io_manifest_parse(MANIFEST, strlen(MANIFEST), "m.json", &m) != FT_OK)
        fail_msg("%s", ft_last_error());
    assert_int_equal(m->n_parts, 2);
    assert_int_equal(m->step, 12);
    assert_string_equal(ft_io_manifest_text(m, "b"), "x");
    int64_t whole;
    double real;
    assert_int_equal(ft_io_manifest_int(m, "a", &whole), FT_OK);
    assert_int_equal(whole, 1);
    assert_int_equal(ft_io_manifest_int(m, "b", &whole), FT_ERR_DATA);
    assert_int_equal(ft_io_manifest_real(m, "b", &real), FT_ERR_DATA);
    assert_int_equal(ft_io_manifest_real(m, "c", &real), FT_ERR_DATA);
    ft_io_manifest_free(m);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *text = changed(cases[i].from, cases[i].to);
        ft_status status = ft_io_manifest_parse(text, strlen(text), "m.json", &m);
        if (status != FT_ERR_DATA || strncmp(ft_last_error(), "m.json: ", 8) != 0 ||
            !strstr(ft_last_error(), cases[i].why))
            fail_msg("%s -> %s: %s", cases[i].from, cases[i].to,
                     status ? ft_last_error() : "accepted");
    }
    static char deep[20001];
    memset(deep, '[', 20000);
    assert_int_equal(ft_io_manifest_parse(deep, 20000, "m.json", &m), FT_ERR_DATA);
    for (size_t n = 0; n < strlen(MANIFEST); n++) /* cut short anywhere */
        assert_int_equal(ft_io_manifest_parse(MANIFEST, n, "m.json", &m), FT_ERR_DATA);
}

/* Whether runs meet, against all of their elements. */
static void runs_meet_as_their_elements_do(void **state)
{
    (void)state;
    uint64_t x = 1;
    for (int i = 0; i < 200000; i++) {
        ft_io_run r[2];
        char seen[400];
        int meet = 0;
        int64_t cols = (int64_t)(mh_mix(x++) % 9) + 1;
        memset(seen, 0, sizeof seen);
        for (int k = 0; k < 2; k++) {
            r[k].count = (int64_t)(mh_mix(x++) % 6) + 1;
            r[k].n = (int64_t)(mh_mix(x++) % (uint64_t)(r[k].count == 1 ? 20 : cols)) + 1;
            r[k].stride = r[k].count == 1 ? r[k].n : cols;
            r[k].first = (int64_t)(mh_mix(x++) % 60);
            for (int64_t c = 0; c < r[k].count; c++)
                for (int64_t e = 0; e < r[k].n; e++) {
                    int64_t at = r[k].first + c * r[k].stride + e;
                    meet |= k == 1 && seen[at];
                    if (k == 0) seen[at] = 1;
                }
        }
        if (ft__io_runs_meet(&r[0], &r[1]) != meet || ft__io_runs_meet(&r[1], &r[0]) != meet)
            fail_msg("%lld %lld %lld %lld and %lld %lld %lld %lld: %d", (long long)r[0].first,
                     (long long)r[0].n, (long long)r[0].stride, (long long)r[0].count,
                     (long long)r[1].first, (long long)r[1].n, (long long)r[1].stride,
                     (long long)r[1].count, meet);
    }
}

/* -------------------------------------------------------------------------------------- damage */

/* Any bit of any file: refused, by name. */
static void a_changed_byte_is_found(void **state)
{
    (void)state;
    static const char *const names[] = {"manifest.json", "rank-00000.safetensors",
                                        "rank-00001.safetensors"};
    store s = make_store(place("a"), 5, 1);
    assert_int_equal(launch_store(&s), FT_OK);
    for (int f = 0; f < 3; f++) {
        char path[600];
        size_t n;
        snprintf(path, sizeof path, "%s/a/step-00000005/%s", base, names[f]);
        char *text = read_all(path, &n);
        for (size_t at = 0; at < n; at++) {
            text[at] ^= (char)(1 << at % 8);
            write_all(path, text, n);
            if (verify(place("a/step-00000005"), 5) == FT_OK)
                fail_msg("%s: byte %zu can be changed", names[f], at);
            if (!strstr(ft_last_error(), names[f])) fail_msg("byte %zu: %s", at, ft_last_error());
            text[at] ^= (char)(1 << at % 8);
        }
        for (size_t cut = 0; cut < n; cut += 7) {
            write_all(path, text, cut);
            assert_int_not_equal(verify(place("a/step-00000005"), 5), FT_OK);
        }
        write_all(path, text, n);
        FT_FREE(text);
    }
    assert_int_equal(verify(place("a/step-00000005"), 5), FT_OK);
    /* A link, even to the same bytes, and a file that is not there. */
    char part[600];
    snprintf(part, sizeof part, "%s/a/step-00000005/rank-00001.safetensors", base);
    assert_int_equal(rename(part, place("moved")), 0);
    assert_int_not_equal(verify(place("a/step-00000005"), 5), FT_OK);
    assert_non_null(strstr(ft_last_error(), "No such file"));
    assert_int_equal(symlink(place("moved"), part), 0);
    assert_int_not_equal(verify(place("a/step-00000005"), 5), FT_OK);
    assert_non_null(strstr(ft_last_error(), "is no regular file"));
}

static void flip(const char *path, size_t from_end)
{
    size_t n;
    char *text = read_all(path, &n);
    text[n - from_end] ^= 16;
    write_all(path, text, n);
    FT_FREE(text);
}

static void auto_takes_the_last_that_loads_and_says_why(void **state)
{
    (void)state;
    mh_layout l = mh_make(2, 1, 1, 3);
    job whole = make_job(&l, NULL, 8), first = make_job(&l, place("a"), 6);
    run(&whole);
    first.every = 2;
    run(&first);
    flip(place("a/step-00000006/rank-00001.safetensors"), 3);
    flip(place("a/step-00000004/manifest.json"), 90);
    assert_int_equal(mkdir(place("a/step-00000007"), 0777), 0);
    job then = make_job(&l, place("a"), 8);
    then.resume = 1;
    run(&then);
    assert_int_equal(then.begun, 2);
    assert_losses(&then, &whole, 2, 8, 0);
    assert_int_equal(then.hash, whole.hash);
    if (!strstr(then.notes, "damaged (rank 1)") ||
        !strstr(then.notes, "step-00000006/rank-00001") ||
        !strstr(then.notes, "step-00000004/manifest.json: its hash"))
        fail_msg("%s", then.notes);
    then.path = place("a/step-00000006"); /* this one and no other */
    assert_int_equal(launch_job(&then), FT_ERR_DATA);
    assert_non_null(strstr(ft_last_error(), "damaged"));
    flip(place("a/step-00000002/rank-00000.safetensors"), 3);
    then.path = NULL;
    assert_int_equal(launch_job(&then), FT_ERR_DATA);
    assert_non_null(strstr(ft_last_error(), "none of its 4 checkpoints can be loaded"));
    job fresh = make_job(&l, place("none"), 8); /* none at all is no error */
    fresh.resume = 1;
    run(&fresh);
    assert_int_equal(fresh.begun, 0);
    assert_int_equal(fresh.hash, whole.hash);
}

static void another_model_or_optimizer_is_refused(void **state)
{
    (void)state;
    mh_layout l = mh_make(2, 1, 1, 0), other;
    job first = make_job(&l, place("a"), 2);
    first.every = 2;
    run(&first);
    job then = make_job(&other, place("a"), 4);
    then.resume = 1;
    other = l;
    other.tied = 1;
    assert_int_equal(launch_job(&then), FT_ERR_ARG);
    assert_non_null(strstr(ft_last_error(), "model.tie_embeddings is 0 there, 1 here"));
    other = l;
    other.sgd = 1;
    assert_int_equal(launch_job(&then), FT_ERR_ARG);
    assert_non_null(strstr(ft_last_error(), "its optimizer is adamw, this run's sgd"));
    then.weights_only = 1;
    then.last = 2;
    run(&then);
    assert_int_equal(then.hash, first.hash);
    other = l; /* AdamW's moments and count begin anew: not the uninterrupted run */
    job whole = make_job(&l, NULL, 4);
    run(&whole);
    then.last = 4;
    run(&then);
    assert_true(fabs(then.loss[2] - whole.loss[2]) < 1e-6);
    assert_true(fabs(then.loss[3] - whole.loss[3]) > 1e-5);
    other.sgd = 1; /* SGD's own states differ with its momentum */
    clear_files();
    first.l = &other;
    run(&first);
    mh_layout plain = other;
    plain.sgd = 2;
    then = make_job(&plain, place("a"), 4);
    then.resume = 1;
    assert_int_equal(launch_job(&then), FT_ERR_ARG);
    assert_non_null(strstr(ft_last_error(), "keeps 1 numbers of each element, this run's 0"));
}

/* --------------------------------------------------------------------------------- wrong calls */

static ft_status calls_rank(ft_ctx *ctx, void *user)
{
    ft_io_checkpoint *c;
    ft_io_checkpoint_config config;
    ft_io_run run;
    int64_t shape[2];
    float *values;
    int done;
    (void)user;
    memset(&config, 0, sizeof config);
    REFUSED(ft_io_checkpoint_create(ctx, &config, &c), FT_ERR_ARG, "a directory");
    config.dir = place("a");
    config.keep = -1;
    REFUSED(ft_io_checkpoint_create(ctx, &config, &c), FT_ERR_ARG, "keep -1");
    config.keep = 0;
    config.blocking = 1;
    FT_TRY(ft_io_checkpoint_create(ctx, &config, &c));
    memset(&run, 0, sizeof run);
    shape[0] = 4;
    shape[1] = 4;
    REFUSED(ft_io_checkpoint_set(c, "a", "b"), FT_ERR_STATE, "begin comes first");
    REFUSED(ft_io_checkpoint_add(c, "a", 2, shape, 1, &run, &values), FT_ERR_STATE, "first");
    REFUSED(ft_io_checkpoint_commit(c), FT_ERR_STATE, "begin comes first");
    REFUSED(ft_io_checkpoint_begin(c, -1), FT_ERR_ARG, "step -1");
    FT_TRY(ft_io_checkpoint_begin(c, 1));
    REFUSED(ft_io_checkpoint_begin(c, 1), FT_ERR_STATE, "a save is open");
    REFUSED(ft_io_checkpoint_add(c, "a", 2, shape, 1, &run, &values), FT_ERR_ARG, "run 0");
    REFUSED(ft_io_checkpoint_add(c, "a", 0, shape, 1, &run, &values), FT_ERR_ARG, "0 dimensions");
    FT_TRY(ft_io_checkpoint_set(c, "a", "%s", "1"));
    REFUSED(ft_io_checkpoint_set(c, "a", "%s", "2"), FT_ERR_ARG, "a was set before");
    REFUSED(ft_io_checkpoint_set(c, "b", "\xff"), FT_ERR_ARG, "not UTF-8");
    run.n = run.stride = 8;
    run.count = 1;
    FT_TRY(ft_io_checkpoint_add(c, "a", 2, shape, 1, &run, &values));
    memset(values, 0, 8 * sizeof *values);
    FT_TRY(ft_io_checkpoint_commit(c));
    /* half of an array: the parts are not whole together */
    REFUSED(ft_io_checkpoint_poll(c, NULL, &done), FT_ERR_DATA, "8 of its 16 elements are in no");
    FT_TRY(ft_io_checkpoint_poll(c, NULL, &done)); /* an error is told once */
    CHECK(!done);
    return ft_io_checkpoint_close(c);
}

static void wrong_calls_are_refused(void **state)
{
    (void)state;
    ft_config config = ft_config_default();
    if (ft_launch(&config, calls_rank, NULL) != FT_OK) fail_msg("%s", ft_last_error());
    ft_io_checkpoint_abandon(NULL);
    ft_io_reader_close(NULL);
    ft_io_manifest_free(NULL);
    assert_int_equal(ft_io_checkpoint_close(NULL), FT_OK);
}

/* On meta nothing is written and nothing read, and the calls are the same. */
static void a_plan_touches_no_file(void **state)
{
    (void)state;
    mh_layout l = mh_make(2, 2, 1, 1);
    job j = make_job(&l, place("a"), 2);
    ft_config config = ft_config_default();
    config.world = 4;
    config.device = FT_META;
    j.every = 1;
    j.resume = 1;
    if (ft_launch(&config, train_rank, &j) != FT_OK) fail_msg("%s", ft_last_error());
    assert_int_equal(count_names(base, ""), 0);
}

int main(void)
{
    const char *memory = "/dev/shm", *temp = getenv("TMPDIR");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(what_one_mesh_saves_any_other_continues, setup),
        cmocka_unit_test_setup(saved_on_2_ranks_loaded_on_3_then_on_8, setup),
        cmocka_unit_test_setup(the_same_mesh_continues_bit_for_bit_after_a_kill, setup),
        cmocka_unit_test_setup(killed_at_any_moment_of_saving, setup),
        cmocka_unit_test_setup(a_refused_call_costs_an_error_and_nothing_else, setup),
        cmocka_unit_test_setup(a_file_system_that_is_full, setup),
        cmocka_unit_test_setup(directories_that_cannot_be_written, setup),
        cmocka_unit_test_setup(a_part_that_does_not_come_is_named, setup),
        cmocka_unit_test_setup(two_runs_in_one_directory_are_refused, setup),
        cmocka_unit_test_setup(the_last_written_are_kept_and_found, setup),
        cmocka_unit_test_setup(what_others_put_there_stops_no_run, setup),
        cmocka_unit_test_setup(manifests_that_cannot_be_are_refused, setup),
        cmocka_unit_test_setup(runs_meet_as_their_elements_do, setup),
        cmocka_unit_test_setup(a_changed_byte_is_found, setup),
        cmocka_unit_test_setup(auto_takes_the_last_that_loads_and_says_why, setup),
        cmocka_unit_test_setup(another_model_or_optimizer_is_refused, setup),
        cmocka_unit_test_setup(wrong_calls_are_refused, setup),
        cmocka_unit_test_setup(a_plan_touches_no_file, setup)};
    if (access(memory, W_OK) != 0) memory = temp ? temp : "/tmp";
    snprintf(base, sizeof base, "%.90s/ft_checkpoint.XXXXXX", memory);
    if (!mkdtemp(base)) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    clear_files();
    rmdir(base);
    return failed;
}

#endif
