/* Number formats, exactly (docs/formats.md): bf16, f16, fp8 e4m3/e5m2, e8m0, e2m1. Pure functions
 * on bits; every NaN they make is canonical. Round to nearest, ties to even. */
#ifndef DSPARK_BASE_NUMFMT_H
#define DSPARK_BASE_NUMFMT_H

#include <stdint.h>
#include <string.h>

#define DSPARK__BF16_NAN 0x7fc0u

static inline uint32_t dspark__f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float dspark__f32_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Neither NaN nor infinite. */
static inline int dspark__bf16_is_finite(uint16_t h)
{
    return (h & 0x7f80u) != 0x7f80u;
}

static inline float dspark__bf16_to_f32(uint16_t h)
{
    return dspark__f32_from_bits((uint32_t)h << 16);
}

/* Every NaN becomes 0x7fc0; subnormals are kept. */
static inline uint16_t dspark__f32_to_bf16(float f)
{
    uint32_t u = dspark__f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return DSPARK__BF16_NAN;
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* A double rounded once: cut to fp32 with the lowest bit set when anything was lost (round to odd), so
 * that the second rounding sees on which side of a tie it lies. */
static inline uint16_t dspark__f64_to_bf16(double d)
{
    float f = (float)d;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if ((double)f != d && d == d) {
        if ((d < 0 ? -(double)f : (double)f) > (d < 0 ? -d : d)) bits--;
        bits |= 1;
        memcpy(&f, &bits, sizeof f);
    }
    return dspark__f32_to_bf16(f);
}

/* Any alignment. */
static inline uint16_t dspark__load_u16(const void *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

float dspark__f16_to_f32(uint16_t h);

/* e4m3fn, saturating: |x| > 448 (and infinity) gives +-448, NaN gives 0x7f. */
uint8_t dspark__f32_to_e4m3(float x);
float dspark__e4m3_to_f32(uint8_t code);
/* e5m2, saturating: |x| > 57344 (and infinity) gives +-57344, NaN gives 0x7f. */
uint8_t dspark__f32_to_e5m2(float x);
float dspark__e5m2_to_f32(uint8_t code);
/* 2^(code-127); 255 is NaN; 0 is the fp32 subnormal 2^-127 whatever MXCSR says. */
float dspark__e8m0_to_f32(uint8_t code);
/* e2m1, low nibble of code. */
float dspark__e2m1_to_f32(uint8_t code);

#endif
