/* Arithmetic on sizes that came from a file: every operation says whether it overflowed. */
#ifndef DSPARK_BASE_CHECKED_H
#define DSPARK_BASE_CHECKED_H

#include <stddef.h>
#include <stdint.h>

/* *r = a * b (or a + b); returns 0 when the result does not fit, 1 otherwise. */
static inline int dspark__mul_u64(uint64_t a, uint64_t b, uint64_t *r)
{
    return !__builtin_mul_overflow(a, b, r);
}

static inline int dspark__add_u64(uint64_t a, uint64_t b, uint64_t *r)
{
    return !__builtin_add_overflow(a, b, r);
}

static inline int dspark__mul_size(size_t a, size_t b, size_t *r)
{
    return !__builtin_mul_overflow(a, b, r);
}

/* *r = a * b * c. */
static inline int dspark__mul3_size(size_t a, size_t b, size_t c, size_t *r)
{
    return dspark__mul_size(a, b, r) && dspark__mul_size(*r, c, r);
}

static inline int dspark__add_size(size_t a, size_t b, size_t *r)
{
    return !__builtin_add_overflow(a, b, r);
}

/* a rounded up to a multiple of `align` (a power of two); 0 when it does not fit. */
static inline int dspark__align_u64(uint64_t a, uint64_t align, uint64_t *r)
{
    if (!dspark__add_u64(a, align - 1, r)) return 0;
    *r &= ~(align - 1);
    return 1;
}

static inline uint64_t dspark__ceil_div_u64(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

#endif
