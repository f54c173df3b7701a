/* The machine's limits in this run: what bench prints beside every number. Not part of any result. */
#ifndef DSPARK_MODEL_PROBE_H
#define DSPARK_MODEL_PROBE_H

#include "base/threads.h"
#include "dspark/dspark.h"
#include "kern/kern.h"

dspark_status dspark__probe_compute(dspark_isa isa, uint32_t n_threads, double seconds,
                                    double *gflops, dspark_error *err);
dspark_status dspark__probe_read(uint32_t n_threads, const void *buffer, size_t n_bytes,
                                 double seconds, double *gbytes_per_s, dspark_error *err);
/* GFLOP/s of these threads during the next `seconds` (20 us to a second), whatever they were doing. */
double dspark__probe_window(const dspark__kern *kern, dspark__threads *threads, double seconds);

#endif
