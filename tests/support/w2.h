/* Made-up weights of a Markov head in all the ways that bounds of their products must survive: sizes from
 * subnormal to near overflow, outliers, equal rows, and codes with scales put together by hand. */
#ifndef DSPARK_TESTS_SUPPORT_W2_H
#define DSPARK_TESTS_SUPPORT_W2_H

#include "model/merged_linear.h"

typedef enum w2_form {
    W2_NORMAL,      /* a bell */
    W2_INTEGERS,    /* -1, 0, 1: sums are exact, and many are equal */
    W2_EQUAL_ROWS,
    W2_OUTLIERS,    /* one weight in fifty is 16 times as large */
    W2_ONE_COLUMN,  /* only one column is not zero */
    W2_HUGE,        /* about 2^45 */
    W2_TINY,        /* about 2^-124: many are subnormal */
    W2_MIXED,       /* each row of another size, some all zero */
    W2_CODES,       /* 8 bits, a scale a row */
    W2_GROUPS,      /* 8 bits, scales of 8 columns and of rows */
    W2_BLOCKS,      /* 8 bits, E8M0 scales of 8 columns */
    W2_FORMS
} w2_form;

extern const char *const w2_names[W2_FORMS];

/* One filled shard [rows, k]. */
void w2_make(dspark__merged_linear *ml, w2_form form, uint32_t rows, uint32_t k, uint64_t *seed);

/* A vector that it could multiply; kind 0: a bell, 1: small integers, 2: one element, 3: huge, 4: tiny with
 * subnormals, 5: zero of both signs. */
#define W2_VECTORS 6
void w2_vector(uint16_t *x, int kind, uint32_t k, uint64_t *seed);

/* A roughly normal number of mean 0 and variance 1. */
double w2_bell(uint64_t *seed);

#endif
