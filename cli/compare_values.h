/* compare_values: how far the values of two caches' entries are apart. */
#ifndef DSPARK_CLI_COMPARE_VALUES_H
#define DSPARK_CLI_COMPARE_VALUES_H

#include <stddef.h>
#include <stdint.h>

typedef enum value_form { VALUE_BF16, VALUE_E4M3, VALUE_E5M2, VALUE_F32 } value_form;

/* The values of 8-bit codes; zero before the first use. */
typedef struct value_tables {
    int ready;
    double codes[2][256];
} value_tables;

/* Stored elements and what they are multiplied with. */
typedef struct value_view {
    const unsigned char *bytes;
    value_form form;
    double scale;
} value_view;

/* Over the pairs in which both values are finite; the others are counted. Zero before the first. */
typedef struct value_error {
    uint64_t n, n_not_finite;
    double max_abs;
    double error_squares, squares; /* of b - a, and of a */
} value_error;

void value_error_add(value_error *e, value_tables *tables, value_view a, value_view b, size_t n);
/* Root mean square of b - a; NaN when no pair is finite. */
double value_error_rms(const value_error *e);
/* That over the root mean square of a; 0 without an error, NaN when there is nothing to hold it against. */
double value_error_relative(const value_error *e);

#endif
