/* Repeats of bench with a probe beside each call: which are taken again, which count, what a row gets to know. The
 * probe, the clock and the pauses are scripted, so nothing here depends on the machine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>
#include <time.h>

#include "dspark/dspark.h"

static dspark_status scripted_probe(dspark_context *context, double seconds, double *gflops, dspark_error *err);
static int scripted_sleep(const struct timespec *pause, struct timespec *left);

#define dspark_context_probe scripted_probe
#define nanosleep scripted_sleep
#include "../cli/bench_watch.c"

/* What the threads can do at each look; the last one goes on. */
static const double *script;
static size_t n_script, n_looks;
static double clock_now, slept, looked; /* looked: for how long, the last time */

static dspark_status scripted_probe(dspark_context *context, double seconds, double *gflops, dspark_error *err)
{
    (void)context;
    if (seconds <= 0) { /* only wakes */
        *gflops = 1;
        return DSPARK_OK;
    }
    looked = seconds;
    *gflops = script[n_looks + 1 < n_script ? n_looks : n_script - 1];
    n_looks++;
    return *gflops < 0 ? out_set_error(err, DSPARK_EINTERNAL, "", "probe") : DSPARK_OK;
}

static int scripted_sleep(const struct timespec *pause, struct timespec *left)
{
    (void)left;
    slept += (double)pause->tv_sec + 1e-9 * (double)pause->tv_nsec;
    clock_now += (double)pause->tv_sec + 1e-9 * (double)pause->tv_nsec;
    return 0;
}

/* ---- what bench_watch.c takes from elsewhere ---- */

double out_clock(void)
{
    return clock_now;
}

dspark_status out_set_error(dspark_error *err, dspark_status code, const char *where, const char *fmt, ...)
{
    (void)where;
    (void)fmt;
    if (err) err->code = code;
    return code;
}

uint32_t bench_read_available(void)
{
    return 2;
}

static int ascending(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

double bench_median(double *values, size_t n)
{
    qsort(values, n, sizeof *values, ascending);
    return n ? values[n / 2] : 0;
}

/* ---- a call ---- */

typedef struct counted {
    size_t n_prepared, n_run;
    double times[20];
    double seconds; /* of a call */
    dspark_status fails;
} counted;

static dspark_status prepare_counted(void *user, double *gbs, dspark_error *err)
{
    counted *c = user;
    (void)err;
    clock_now += 0.25;
    *gbs = (double)++c->n_prepared;
    return DSPARK_OK;
}

static dspark_status run_counted(void *user, size_t i, dspark_error *err)
{
    counted *c = user;
    (void)err;
    clock_now += c->seconds;
    c->times[i] = (double)++c->n_run;
    return c->fails;
}

static bench_watch w;
static bench_run run;
static const bench_args given = {.repeat = 5};
static bench_report report;

/* n repeats with these looks. */
static counted repeat(size_t n, const double *looks, size_t n_given, double seconds_again)
{
    counted c = {0};
    const bench_call call = {prepare_counted, run_counted, &c, NULL};
    size_t i;
    script = looks;
    n_script = n_given;
    n_looks = 0;
    slept = 0;
    run = (bench_run){.n_threads = 2, .best_gflops = 100};
    report = (bench_report){.args = &given, .again = 100, .again_row = seconds_again};
    bench_watch_begin(&w, &report, &run, n);
    for (i = 0; i < n; i++) assert_int_equal(bench_watch_repeat(&w, &call, NULL), DSPARK_OK);
    assert_int_equal(w.n, n);
    return c;
}

#define LOOKS(...) (const double[]){__VA_ARGS__}, sizeof((const double[]){__VA_ARGS__}) / sizeof(double)

/* ---- tests ---- */

static void test_all_well(void **state)
{
    counted c = repeat(3, LOOKS(100, 86, 90, 85.1, 110, 95), 4); /* the best of the run rises with the fifth */
    bench_row row = {.n_repeats = 3};
    (void)state;
    assert_int_equal(c.n_run, 3);
    assert_int_equal(c.n_prepared, 3);
    assert_float_equal(run.best_gflops, 110, 0);
    assert_int_equal(bench_watch_choose(&w, c.times), 3);
    bench_watch_fill(&w, &row);
    assert_int_equal(row.n_disturbed + row.n_left, 0);
    assert_true(row.watched);
    assert_float_equal(row.limit_gflops, 95, 0); /* of 85.1 86 90 95 100 110 */
    assert_float_equal(bench_watch_reads(&w), 2, 0);
    assert_float_equal(slept, 0, 0);
}

/* Before a call: it is not even made. After: its time is made anew. */
static void test_taken_again(void **state)
{
    counted c = repeat(4, LOOKS(100, 100, /* first */ 84, 50, 99, 99, /* second, at the third try */
                                98, 84, 97, 97, /* third, at the second */ 96, 96), 10);
    bench_row row = {0};
    (void)state;
    assert_int_equal(c.n_prepared, 7);
    assert_int_equal(c.n_run, 5);
    assert_int_equal(bench_watch_choose(&w, c.times), 4);
    assert_float_equal(c.times[2], 4, 0); /* the third call's time is not there */
    bench_watch_fill(&w, &row);
    assert_int_equal(row.n_disturbed, 3);
    assert_int_equal(row.n_left, 0);
    assert_float_equal(row.limit_gflops, 99, 0);
    assert_float_equal(bench_watch_reads(&w), 6, 0); /* of 1 4 6 7: those of the tries that were kept */
    assert_float_equal(slept, 0.1, 1e-9); /* the first time at once */
    assert_float_equal(report.again_row, 10 - 3 * 0.25 - 0.1, 1e-9);
    assert_float_equal(report.again, 100 - 3 * 0.25 - 0.1, 1e-9);
}

/* As many again as asked for, and no longer than there is time; then a repeat is kept as it is, and left out
 * unless more than half are so. */
static void test_too_often(void **state)
{
    counted c = repeat(3, LOOKS(50), 1000);
    bench_row row = {0};
    (void)state;
    assert_int_equal(w.n_again, 3);
    assert_int_equal(c.n_run, 3);
    assert_int_equal(c.n_prepared, 6);
    assert_int_equal(bench_watch_choose(&w, c.times), 3);
    bench_watch_fill(&w, &row);
    assert_int_equal(row.n_disturbed, 6);
    assert_int_equal(row.n_left, 3);
    assert_float_equal(row.limit_gflops, 50, 0); /* what they saw */

    c = repeat(4, LOOKS(50, 50, 50, 50, 50, 60, 50, 100), 1000);
    assert_int_equal(w.n_again, 4);
    assert_int_equal(c.n_run, 4);
    assert_int_equal(bench_watch_choose(&w, c.times), 2); /* half are left: the others do not count */
    assert_float_equal(c.times[0], 3, 0);
    bench_watch_fill(&w, &row);
    assert_int_equal(row.n_disturbed, 6);
    assert_int_equal(row.n_left, 0);
    assert_float_equal(row.limit_gflops, 100, 0);

    repeat(9, LOOKS(50), 0.5); /* 0.25, then 0.25 + 0.1, and it is over */
    assert_int_equal(w.n_again, 2);
    assert_int_equal(w.n_disturbed, 11);
    repeat(9, LOOKS(50), 0);
    assert_int_equal(w.n_again, 0);
}

/* Each row begins anew, until the whole command has used up what it has. */
static void test_budgets(void **state)
{
    counted c = {0};
    const bench_call call = {prepare_counted, run_counted, &c, NULL};
    const bench_args trial = {.repeat = 3};
    static const double low[] = {50};
    (void)state;
    script = low;
    n_script = 1;
    report = (bench_report){.args = &given, .again = 1, .again_row = 0};
    run = (bench_run){.n_threads = 2, .best_gflops = 100};
    bench_allow_again(&report);
    assert_true(report.again_row > 1);
    bench_watch_begin(&w, &report, &run, 100);
    assert_int_equal(bench_watch_repeat(&w, &call, NULL), DSPARK_OK); /* 0.25, 0.35, 0.45, and it is over */
    assert_int_equal(w.n_again, 3);
    bench_allow_again(&report);
    assert_int_equal(bench_watch_repeat(&w, &call, NULL), DSPARK_OK);
    assert_int_equal(w.n_again, 3);
    report.args = &trial;
    bench_allow_again(&report);
    assert_float_equal(report.again_row, 0, 0);
}

/* A look is a part of the call, within bounds. */
static void test_how_long_it_looks(void **state)
{
    static const double seconds[] = {0, 1e-5, 2e-3, 1e-2, 1}, expected[] = {2e-4, 2e-4, 4e-4, 2e-3, 5e-3};
    static const double well[] = {100};
    size_t i;
    (void)state;
    for (i = 0; i < 5; i++) {
        counted c = {.seconds = seconds[i]};
        const bench_call call = {prepare_counted, run_counted, &c, NULL};
        script = well;
        n_script = 1;
        run = (bench_run){.n_threads = 2, .best_gflops = 100};
        bench_watch_begin(&w, &report, &run, 1);
        assert_int_equal(bench_watch_repeat(&w, &call, NULL), DSPARK_OK);
        assert_float_equal(looked, expected[i], 1e-6);
    }
}

/* More threads than processors: no look, no limit. */
static void test_blind(void **state)
{
    const bench_call call = {prepare_counted, run_counted, &(counted){0}, NULL};
    bench_row row = {.watched = 1};
    (void)state;
    run = (bench_run){.n_threads = 3, .best_gflops = 100};
    n_looks = 0;
    bench_watch_begin(&w, &report, &run, 2);
    assert_int_equal(bench_watch_repeat(&w, &call, NULL), DSPARK_OK);
    assert_int_equal(n_looks, 0);
    bench_watch_fill(&w, &row);
    assert_false(row.watched);
    assert_int_equal(row.n_disturbed + row.n_left, 0);
    assert_float_equal(row.limit_gflops, 0, 0);
}

static void test_errors(void **state)
{
    counted c = {.fails = DSPARK_ENONFINITE};
    const bench_call call = {prepare_counted, run_counted, &c, NULL};
    static const double looks[] = {100, 100, 100, -1};
    (void)state;
    run = (bench_run){.n_threads = 1};
    script = looks;
    n_script = 4;
    n_looks = 0;
    bench_watch_begin(&w, &report, &run, 2);
    assert_int_equal(bench_watch_repeat(&w, &call, NULL), DSPARK_ENONFINITE);
    c.fails = DSPARK_OK;
    assert_int_equal(bench_watch_repeat(&w, &call, NULL), DSPARK_OK);
    assert_int_equal(bench_watch_repeat(&w, &call, NULL), DSPARK_EINTERNAL);
    assert_int_equal(w.n, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_well), cmocka_unit_test(test_taken_again), cmocka_unit_test(test_too_often),
        cmocka_unit_test(test_budgets), cmocka_unit_test(test_how_long_it_looks),
        cmocka_unit_test(test_blind), cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
