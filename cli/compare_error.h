/* compare_error: how far bf16 entries are from fp64. */
#ifndef DSPARK_CLI_COMPARE_ERROR_H
#define DSPARK_CLI_COMPARE_ERROR_H

#include <stddef.h>
#include <stdint.h>

/* Error against fp64 of one part (latent or rope key) of one layer. */
typedef struct error_stats {
    double max_abs;
    double max_ulp;  /* in units of the last place of bf16 of the value, or of the entry's root mean
                      * square where the value is smaller: near zero an own unit says nothing */
    double rms_rel;  /* root of the summed squared error over the summed squares */
} error_stats;

/* Elements from..to-1 of n entries of `width` elements: bf16 at `entries`, fp64 at `exact`. */
void error_measure(error_stats *out, const void *entries, const double *exact, uint64_t n,
                   size_t width, size_t from, size_t to);

/* The distance between neighbouring bf16 numbers at x. */
double error_bf16_ulp(double x);

#endif
