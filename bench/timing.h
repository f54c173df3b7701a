/* What the measuring programs of this folder share: a clock, medians, memory in huge pages, values, and a
 * plain read of cold bytes. Static functions only: each program is one file and this one. */
#ifndef DSPARK_BENCH_TIMING_H
#define DSPARK_BENCH_TIMING_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

/* Processor time: a busy machine then costs cache contents, but not time slices. */
static inline double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double median(double *v, size_t n)
{
    qsort(v, n, sizeof *v, compare_doubles);
    return v[n / 2];
}

/* In huge pages, as the library's packed weights are. Ends the program without memory. */
static inline void *take(size_t n_bytes)
{
    size_t huge = (size_t)2 << 20, n = (n_bytes + huge - 1) / huge * huge;
    void *p = aligned_alloc(huge, n);
    if (!p) {
        fprintf(stderr, "no memory for %zu bytes\n", n);
        exit(5);
    }
    madvise(p, n, MADV_HUGEPAGE);
    return p;
}

/* Seconds that a plain read of n_bytes (a multiple of 64) takes. */
static inline double read_bytes(const void *bytes, size_t n_bytes)
{
    const uint64_t *w = bytes;
    uint64_t sum[8] = {0};
    volatile uint64_t sink;
    double t = now();
    for (size_t i = 0; i < n_bytes / 8; i += 8)
        for (size_t j = 0; j < 8; j++) sum[j] |= w[i + j];
    t = now() - t;
    for (size_t j = 1; j < 8; j++) sum[0] |= sum[j];
    sink = sum[0];
    (void)sink;
    return t;
}

#endif
