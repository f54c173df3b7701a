/* Values for the kernels' tests: a stream of random numbers whose seed is printed, bf16 and fp32 of
 * the classes that arithmetic treats differently, and a level's table. */
#ifndef DSPARK_TESTS_SUPPORT_VALUES_H
#define DSPARK_TESTS_SUPPORT_VALUES_H

#include <stddef.h>
#include <stdint.h>

#include "base/numfmt.h"
#include "kern/kern.h"

/* Lengths around every vector width. */
extern const size_t VALUES_SIZES[];
#define VALUES_N_SIZES   16
#define VALUES_MOST_SIZE 129u

typedef enum value_class {
    VALUES_NORMAL,  /* 2^-7 .. 2^6 */
    VALUES_SMALL,   /* around the square root of FLT_MIN, now and then subnormal */
    VALUES_FINITE,  /* any bits that are finite */
    VALUES_SPECIAL, /* normal, one in 64 NaN, infinity, zero, subnormal or the largest */
    VALUES_N_CLASSES
} value_class;

uint64_t values_random(void);
void values_print_seed(void);
uint16_t values_bf16(value_class c);
float values_f32(value_class c);
/* n bf16 at any alignment. */
void values_fill(void *to, size_t n, value_class c);
/* Element i of a bf16 row at any alignment. */
uint16_t values_at(const void *row, size_t i);
float values_f32_at(const void *row, size_t i);
/* Same bits, or both NaN. */
int values_same_floats(const float *a, const float *b, size_t n);

/* The table of a level that exists here; ends the test when it does not. */
dspark__kern values_level(int isa);
/* for (VALUES_LEVELS(isa)): every level of this machine, ref first. */
#define VALUES_LEVELS(isa)          \
    int isa = DSPARK_ISA_REF;       \
    isa <= (int)dspark__isa_best(); \
    isa++

#endif
