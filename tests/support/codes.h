/* Packed codes for tests of kernels: every level of this machine, values of codes and scales by definition,
 * in double precision, and the layouts of kern.h from the writer's side. Knows no kernel. */
#ifndef DSPARK_TESTS_SUPPORT_CODES_H
#define DSPARK_TESTS_SUPPORT_CODES_H

#include <stddef.h>
#include <stdint.h>

#include "kern/kern.h"

/* The seed of code_random, which a test prints. */
extern uint64_t code_seed;
uint64_t code_random(void);

typedef struct level {
    const char *name;
    dspark__kern kern;
} level;

extern level levels[6];
extern size_t n_levels; /* ref is the first */

/* For cmocka: fills them. */
int find_levels(void **state);

typedef enum codes { E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, INT8, E2M1, INT4, N_CODES } codes;

extern const char *const CODES_NAME[N_CODES];

double code_value(codes c, unsigned code);
double scale_value(dspark__code_scale kind, unsigned byte);
/* The bf16 of a value that must be exact; subnormal ones are zero, NaN is canonical. */
uint16_t exact_bf16(double v);
/* Is the product of all codes and scales exact in bf16, and defined? */
int is_allowed(codes c, dspark__code_scale scale);
/* nan_sign: a table may give NaN the sign of its code, too. */
dspark__code_format format_of(codes c, dspark__code_scale scale, uint32_t block, int nan_sign);
/* class 0: of the fast ways of every level; 1: some are not; 2: at the ends; 3: at the ends of what is fast;
 * 5: far beyond. */
uint8_t random_scale(dspark__code_scale kind, int class);
void put_code(uint8_t *to, const dspark__code_format *f, size_t k, size_t output, unsigned code);

/* The same bits, or both NaN. */
int same_float(float a, float b);

#endif
