/* One hand-made module "m" through its scheme: dequantised, packed, decoded, compared. */
#ifndef DSPARK_TESTS_SUPPORT_EXAMINE_H
#define DSPARK_TESTS_SUPPORT_EXAMINE_H

#include <stddef.h>
#include <stdint.h>

#include "quant/scheme.h"
#include "support/tensors.h"

#define EXAMINE_WEIGHTS (600u * 256u)

/* What the tests fill: the tensors, the rule of the config, the weights [rows][k] that they are. */
extern tensors t;
extern dspark__quant_rule rule;
extern double *want;
extern uint64_t seed;

/* For cmocka. */
int examine_setup(void **state);
int examine_teardown(void **state);

/* A zeroed tensor "m.SUFFIX"; d1 = 0: rank 1. */
unsigned char *add(const char *suffix, dspark_dtype dtype, uint64_t d0, uint64_t d1);
void fill_random(unsigned char *p, size_t n);
/* n positive scales of a dtype, and the numbers that they are. */
void fill_scales(unsigned char *p, dspark_dtype dtype, uint64_t n, double *value);

/* Write t (in one file, and in three), find the scheme, which must be the named one, and hold it to
 * want: dequantise exactly; pack, decode and scale exactly, with padding that is 0. Empties t. */
dspark__packing examine(const char *scheme, uint64_t rows, uint64_t k);

#endif
