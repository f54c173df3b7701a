/* Threads: the host's parallel_for or an own pool (pthreadpool). No result may depend on them. */
#ifndef DSPARK_BASE_THREADS_H
#define DSPARK_BASE_THREADS_H

#include "dspark/dspark.h"

typedef struct dspark__threads dspark__threads;

/* n_threads 0 = the processors this process may run on. host may be NULL (own pool; a pool of one
 * starts no thread; more than a few for each processor are counted, not started). allocator may be NULL. */
dspark_status dspark__threads_create(dspark__threads **out, uint32_t n_threads,
                                     const dspark_parallel *host,
                                     const dspark_allocator *allocator, dspark_error *err);
void dspark__threads_free(dspark__threads *t);
uint32_t dspark__threads_count(const dspark__threads *t);

/* Processors this process may run on, at least 1. */
uint32_t dspark__threads_available(void);

/* Call task(arg, i) for every i in [0, n), each under a known floating-point environment (round to
 * nearest, no flush to zero, no traps: fpenv.h), and wait. Work pulls its items itself from an
 * atomic counter, so callers pass n = dspark__threads_count and use i as the scratch index.
 * Allocates nothing. */
void dspark__threads_run(dspark__threads *t, void (*task)(void *arg, size_t i), void *arg,
                         size_t n);

/* On how many threads is it worth to run n_units units of together `work` multiply-adds? Waking a
 * thread costs microseconds (on a busy machine far more). */
size_t dspark__threads_worth(const dspark__threads *t, size_t n_units, double work);

#endif
