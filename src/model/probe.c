/* Register-only arithmetic peak and read bandwidth: a limit is what the machine can do, so of several
 * rounds the best one counts. Nothing here takes part in a result. */
#include "model/probe.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/status.h"
#include "base/threads.h"
#include "kern/kern.h"

#define MAX_ROUNDS 64
#define MIN_ROUNDS 3
#define PIECE ((size_t)2 << 20)     /* one huge page where the caller's buffer lies in such */
#define SHORTEST 20e-6              /* seconds of a window, and of the chunks that fill it */
#define LONGEST 1.0
#define LATE 0.05                   /* of a window */

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
    size_t piece;      /* bytes that a thread takes at a time, a multiple of 64 */
    atomic_size_t next;
    uint32_t n_threads;
    double *work;      /* [n_threads] operations done, or a checksum that keeps the reads alive */
} probe;

static void compute_task(void *arg, size_t i)
{
    probe *p = arg;
    p->work[i] = p->kern.probe_flops(p->iterations);
}

/* One word of each line brings the whole line from memory, and so few instructions let the processor look far
 * ahead: with all words, as compilers for the oldest machine make it, a quarter of the bandwidth was lost. The
 * sum keeps the reads alive. n_bytes is a multiple of 64. */
static uint64_t touch_lines(const unsigned char *at, size_t n_bytes)
{
    const unsigned char *end = at + n_bytes;
    uint64_t sum = 0, word;
    for (; at < end; at += 64) {
        memcpy(&word, at, sizeof word);
        sum += word;
    }
    return sum;
}

/* Each piece in order, and whoever is free takes the next one: with halves a thread that was slowed down would
 * decide the time. Several streams at once inside a piece were slower (25 to 28 GB/s at two, 21 at four). */
static void read_task(void *arg, size_t i)
{
    probe *p = arg;
    uint64_t sum = 0;
    for (;;) {
        size_t first = atomic_fetch_add(&p->next, 1) * p->piece;
        if (first >= p->n_bytes) break;
        size_t left = (p->n_bytes - first) / 64 * 64;
        sum += touch_lines(p->buffer + first, left < p->piece ? left : p->piece);
    }
    p->work[i] = (double)sum;
}

/* Run rounds of `task` for about `seconds`; the shortest one's time. */
static double best_round(probe *p, dspark__threads *threads, void (*task)(void *, size_t),
                         double seconds)
{
    double best = 1e30, start = now();
    for (int n = 0; n < MAX_ROUNDS && (n < MIN_ROUNDS || now() - start < seconds); n++) {
        double t0 = now(), t;
        atomic_store(&p->next, 0);
        dspark__threads_run(threads, task, p, p->n_threads);
        t = now() - t0;
        if (t < best) best = t;
    }
    return best > 1e-9 ? best : 1e-9;
}

static dspark_status open_probe(probe *p, dspark__threads **threads, uint32_t n_threads,
                                dspark_error *err)
{
    /* More threads than processors reach no more, and take seconds to begin and to end. */
    uint32_t available = dspark__threads_available();
    dspark_status st = dspark__threads_create(threads, n_threads < available ? n_threads : available,
                                              NULL, NULL, err);
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
    /* Rounds long enough for the clock, by one thread alone: where several must wake up, a slice of the
     * scheduler is easily taken for work. */
    for (p.iterations = 1000; best < 0.004 && p.iterations < (uint64_t)1 << 40;) {
        p.iterations *= 2;
        best = 1e30;
        for (int n = 0; n < MIN_ROUNDS; n++) {
            double t = now();
            compute_task(&p, 0);
            t = now() - t;
            if (t < best) best = t;
        }
    }
    best = best_round(&p, threads, compute_task, seconds);
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
    /* A small buffer, which a cache may hold, is cut so that every thread has some of it. */
    p.piece = n_bytes / p.n_threads < PIECE ? n_bytes / p.n_threads : PIECE;
    p.piece = p.piece < 64 ? 64 : p.piece / 64 * 64;
    *gbytes_per_s = (double)n_bytes / best_round(&p, threads, read_task, seconds) * 1e-9;
    free(p.work);
    dspark__threads_free(threads);
    return DSPARK_OK;
}

/* ---- beside a call ---- */

typedef struct window {
    double (*compute)(uint64_t iterations);
    uint64_t iterations;
    double start, end;
    atomic_uint_fast64_t kflops; /* a second, of all threads */
} window;

/* Who begins late did less, and who never came did nothing: of two threads on one processor that is half. Being
 * called takes a microsecond or two, which is no lateness. */
static void fill_window(void *arg, size_t i)
{
    window *w = arg;
    double work = 0, first = now(), t = first;
    if (i && t >= w->end) return;
    do {
        work += w->compute(w->iterations);
        t = now();
    } while (t < w->end);
    if (first - w->start > LATE * (w->end - w->start)) first = w->start;
    atomic_fetch_add(&w->kflops, (uint_fast64_t)(work / (t - first) * 1e-3));
}

double dspark__probe_window(const dspark__kern *kern, dspark__threads *threads, double seconds)
{
    const uint32_t n = dspark__threads_count(threads), available = dspark__threads_available();
    window w = {.compute = kern->probe_flops, .iterations = 16};
    double t;
    if (!(seconds >= SHORTEST)) seconds = SHORTEST;
    if (seconds > LONGEST) seconds = LONGEST;
    do { /* chunks that the clock can tell, many to a window */
        w.iterations *= 2;
        t = now();
        w.compute(w.iterations);
        t = now() - t;
    } while (t < SHORTEST / 2 && w.iterations < (uint64_t)1 << 40);
    w.start = now();
    w.end = w.start + seconds;
    dspark__threads_run(threads, fill_window, &w, n < available ? n : available);
    return (double)atomic_load(&w.kflops) * 1e-6;
}
