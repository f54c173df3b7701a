/* bench_watch: repeats of one call with a probe of arithmetic right before and right after each, by the threads
 * that do the call. Says what they could do while it was timed, and takes a repeat again when they were not all
 * there. Knows nothing about what is measured, and judges no run. */
#ifndef DSPARK_CLI_BENCH_WATCH_H
#define DSPARK_CLI_BENCH_WATCH_H

#include "bench.h"

typedef struct bench_sample {
    double read_gbs;    /* what emptied the caches before it; 0 = nothing did */
    double gflops[2];   /* before, after; 0 = not looked at */
    int disturbed;
} bench_sample;

typedef struct bench_watch {
    bench_report *report;
    bench_run *run;
    int blind;              /* more threads than processors: a probe would show the scheduler */
    size_t most_again, n_again;
    double call_seconds;    /* the last call's */
    size_t n_disturbed;     /* in all: taken again, or kept because that had an end */
    bench_sample samples[BENCH_MAX_REPEATS];
    size_t n;
} bench_watch;

/* What is repeated. prepare: caches and threads as the call is to find them, and *read_gbs if it reads; run: one
 * call, whose time is number i of the caller's. */
typedef struct bench_call {
    dspark_status (*prepare)(void *user, double *read_gbs, dspark_error *err);
    dspark_status (*run)(void *user, size_t i, dspark_error *err);
    void *user;
    dspark_context *threads; /* whose threads do it */
} bench_call;

/* Before the contenders of a row begin: how long they may take repeats again. About as long as the row, not in a
 * trial, and half a minute in all: where that is not enough more would not help. */
void bench_allow_again(bench_report *r);
/* n_asked: repeats that are to come; so many may be taken again. */
void bench_watch_begin(bench_watch *w, bench_report *r, bench_run *run, size_t n_asked);
/* One more repeat. */
dspark_status bench_watch_repeat(bench_watch *w, const bench_call *call, dspark_error *err);
/* The times of those repeats that count, moved to the front, and how many: the undisturbed ones when they are half
 * or more, else all. */
size_t bench_watch_choose(const bench_watch *w, double *times);
/* What it says about a row of this call. */
void bench_watch_fill(const bench_watch *w, bench_row *row);
/* Median of what emptied the caches, over all repeats; 0 without. */
double bench_watch_reads(const bench_watch *w);

/* Less than the threads of this run have shown they can do. */
int bench_is_disturbed(const bench_run *run, double gflops);

#endif
