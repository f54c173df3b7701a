/* Register-only arithmetic peak (the best round) and read bandwidth (the median round). */
#include "model/probe.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/status.h"
#include "base/threads.h"
#include "kern/kern.h"

#define MAX_ROUNDS 64
#define MIN_ROUNDS 3

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct probe {
    dspark__kern kern;
    uint64_t iterations;
    const unsigned char *buffer;
    size_t n_bytes;
    uint32_t n_threads;
    double *work;      /* [n_threads] operations done, or a checksum that keeps the reads alive */
} probe;

static void compute_task(void *arg, size_t i)
{
    probe *p = arg;
    p->work[i] = p->kern.probe_flops(p->iterations);
}

static void read_task(void *arg, size_t i)
{
    probe *p = arg;
    size_t lines = p->n_bytes / 64;
    const unsigned char *at = p->buffer + lines * i / p->n_threads * 64;
    const unsigned char *end = p->buffer + lines * (i + 1) / p->n_threads * 64;
    uint64_t sum[8] = {0};
    for (; at < end; at += 64) {
        uint64_t v[8];
        memcpy(v, at, sizeof v);
        for (int j = 0; j < 8; j++) sum[j] += v[j];
    }
    p->work[i] = (double)(sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7]);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Run rounds of `task` for about `seconds`; the median of their times and the best. */
static double median_round(probe *p, dspark__threads *threads, void (*task)(void *, size_t),
                           double seconds, double *best)
{
    double times[MAX_ROUNDS], start = now();
    int n = 0;
    while (n < MAX_ROUNDS && (n < MIN_ROUNDS || now() - start < seconds)) {
        double t0 = now();
        dspark__threads_run(threads, task, p, p->n_threads);
        times[n++] = now() - t0;
    }
    qsort(times, (size_t)n, sizeof times[0], by_value);
    *best = times[0] > 1e-9 ? times[0] : 1e-9;
    return times[n / 2] > 1e-9 ? times[n / 2] : 1e-9;
}

static dspark_status open_probe(probe *p, dspark__threads **threads, uint32_t n_threads,
                                dspark_error *err)
{
    dspark_status st = dspark__threads_create(threads, n_threads, NULL, NULL, err);
    if (st != DSPARK_OK) return st;
    p->n_threads = dspark__threads_count(*threads);
    p->work = calloc(p->n_threads, sizeof *p->work);
    if (p->work) return DSPARK_OK;
    dspark__threads_free(*threads);
    return dspark__fail_nomem(err, "probe", p->n_threads * sizeof *p->work);
}

dspark_status dspark__probe_compute(dspark_isa isa, uint32_t n_threads, double seconds,
                                    double *gflops, dspark_error *err)
{
    probe p = {0};
    dspark__threads *threads;
    dspark_status st = dspark__kern_select(&p.kern, isa, err);
    if (st != DSPARK_OK || (st = open_probe(&p, &threads, n_threads, err)) != DSPARK_OK) return st;
    double best = 0, work = 0;
    for (p.iterations = 1000; best < 0.004 && p.iterations < (uint64_t)1 << 40;) {
        p.iterations *= 2; /* rounds long enough for the clock: the shortest decides */
        median_round(&p, threads, compute_task, 0, &best);
    }
    median_round(&p, threads, compute_task, seconds, &best); /* a peak is the best, not the median */
    for (uint32_t i = 0; i < p.n_threads; i++) work += p.work[i];
    *gflops = work / best * 1e-9;
    free(p.work);
    dspark__threads_free(threads);
    return DSPARK_OK;
}

dspark_status dspark__probe_read(uint32_t n_threads, const void *buffer, size_t n_bytes,
                                 double seconds, double *gbytes_per_s, dspark_error *err)
{
    probe p = {.buffer = buffer, .n_bytes = n_bytes};
    dspark__threads *threads;
    dspark_status st = open_probe(&p, &threads, n_threads, err);
    if (st != DSPARK_OK) return st;
    double best, time = median_round(&p, threads, read_task, seconds, &best);
    *gbytes_per_s = (double)(n_bytes / 64 * 64) / time * 1e-9;
    free(p.work);
    dspark__threads_free(threads);
    return DSPARK_OK;
}
