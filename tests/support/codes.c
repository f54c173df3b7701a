/* See codes.h. */
#include "support/codes.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/numfmt.h"

uint64_t code_seed = 0x2545f4914f6cdd1du;

uint64_t code_random(void)
{
    code_seed ^= code_seed << 13;
    code_seed ^= code_seed >> 7;
    return code_seed ^= code_seed << 17;
}

/* ---- levels ---------------------------------------------------------------------------------- */

level levels[6];
size_t n_levels;

int find_levels(void **state)
{
    (void)state;
    for (int isa = DSPARK_ISA_REF; isa <= (int)dspark__isa_best(); isa++) {
        level *l = &levels[n_levels++];
        l->name = dspark__isa_name((dspark_isa)isa);
        assert_int_equal(dspark__kern_select(&l->kern, (dspark_isa)isa, NULL), DSPARK_OK);
    }
#if defined(__x86_64__)
    if (dspark__isa_best() >= DSPARK_ISA_AVX512) { /* select prefers VBMI where it can */
        level *l = &levels[n_levels++];
        l->name = "avx512 without vbmi";
        dspark__kern_ref(&l->kern);
        dspark__kern_avx512(&l->kern);
    }
#endif
    print_message("%zu levels, the last one is %s\n", n_levels, levels[n_levels - 1].name);
    return 0;
}

/* ---- values, by definition ------------------------------------------------------------------- */

const char *const CODES_NAME[N_CODES] = {"e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "int8", "e2m1",
                                         "int4"};

static uint32_t bits_of(codes c)
{
    return c == E2M1 || c == INT4 ? 4 : 8;
}

static double float_value(unsigned code, int mantissa_bits, int bias)
{
    int m = (int)code & ((1 << mantissa_bits) - 1), e = (int)(code & 0x7f) >> mantissa_bits;
    double v = e == 0 ? ldexp(m, 1 - bias - mantissa_bits)
                      : ldexp(m + (1 << mantissa_bits), e - bias - mantissa_bits);
    return code & 0x80 ? -v : v;
}

double code_value(codes c, unsigned code)
{
    static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    switch (c) {
    case E4M3: return (code & 0x7f) == 0x7f ? (double)NAN : float_value(code, 3, 7);
    case E5M2:
        if ((code & 0x7f) > 0x7c) return (double)NAN;
        if ((code & 0x7f) == 0x7c) return code & 0x80 ? -(double)INFINITY : (double)INFINITY;
        return float_value(code, 2, 15);
    case E4M3FNUZ: return code == 0x80 ? (double)NAN : float_value(code, 3, 8);
    case E5M2FNUZ: return code == 0x80 ? (double)NAN : float_value(code, 2, 16);
    case INT8: return code < 128 ? code : (double)code - 256;
    case E2M1: return code & 8 ? -e2m1[code & 7] : e2m1[code & 7];
    default: return code < 8 ? code : (double)code - 16;
    }
}

uint16_t exact_bf16(double v)
{
    if (isnan(v)) return DSPARK__BF16_NAN;
    if (fabs(v) < 0x1p-126) return signbit(v) ? 0x8000 : 0;
    uint16_t h = dspark__f32_to_bf16((float)v);
    if (fabs(v) < 0x1p128) assert_true((double)dspark__bf16_to_f32(h) == v);
    else assert_int_equal(h & 0x7fff, 0x7f80);
    return h;
}

double scale_value(dspark__code_scale kind, unsigned byte)
{
    if (kind == DSPARK__CODE_E4M3) return float_value(byte, 3, 7);
    if (kind == DSPARK__CODE_E8M0) return ldexp(1, (int)byte - 127);
    return byte < 128 ? byte : (double)byte - 256;
}

dspark__code_format format_of(codes c, dspark__code_scale scale, uint32_t block, int nan_sign)
{
    dspark__code_format f = {.bits = bits_of(c), .scale = scale, .block = block};
    for (unsigned code = 0; code < 1u << f.bits; code++) {
        f.table[code] = exact_bf16(code_value(c, code));
        if (nan_sign && f.table[code] == DSPARK__BF16_NAN && code & 0x80) f.table[code] |= 0x8000;
    }
    return f;
}

int is_allowed(codes c, dspark__code_scale scale)
{
    if (scale == DSPARK__CODE_OFFSET) return c == INT8 || c == INT4;
    if (scale == DSPARK__CODE_E4M3) return c != INT8 && c != E5M2; /* 11 bits; infinity times 0 */
    return 1;
}

void put_code(uint8_t *to, const dspark__code_format *f, size_t k, size_t output, unsigned code)
{
    if (f->bits == 8) {
        to[k / 2 * 96 + output * 2 + k % 2] = (uint8_t)code;
        return;
    }
    if (f->scale == DSPARK__CODE_E4M3) { /* bit by bit, each three places up in its word of 32 */
        uint8_t *word = to + k / 8 * 192 + output / 4 * 16 + k % 8 / 4 * 8 + output % 4 / 2 * 4;
        size_t first = output % 2 * 16 + k % 2 * 8 + k / 2 % 2 * 4;
        for (size_t i = 0; i < 4; i++) {
            size_t at = (first + i + 3) % 32;
            word[at / 8] = (uint8_t)((word[at / 8] & ~(1u << at % 8)) | (code >> i & 1) << at % 8);
        }
        return;
    }
    size_t byte = k / 8 * 192 + output / 16 * 64 + (output % 16 * 2 + k % 2) * 2;
    size_t nibble = k % 8 / 2;
    unsigned shift = nibble % 2 * 4;
    to += byte + nibble / 2;
    *to = (uint8_t)((*to & ~(15u << shift)) | code << shift);
}

uint8_t random_scale(dspark__code_scale kind, int class)
{
    static const uint8_t edge[] = {0, 1, 2, 252, 253, 254};
    uint64_t r = code_random() >> 16;
    if (kind == DSPARK__CODE_E4M3)
        return (uint8_t)(class == 0 ? 8 + r % 119 : r % 127); /* 0: no subnormal, no zero */
    if (kind == DSPARK__CODE_E8M0) {
        if (class == 2 || (class == 1 && r % 64 == 0)) return edge[(r >> 8) % 6];
        if (class == 3) return (uint8_t)(r % 64 < 32 ? 103 : r % 64 < 63 ? 151 : r >> 63 ? 102 : 152);
        if (class == 5) return (uint8_t)(27 + (r >> 8) % 200);
        return (uint8_t)(103 + (r >> 8) % 49);
    }
    return (uint8_t)(class == 0 ? (r % 16) - 8 : r);
}

int same_float(float a, float b)
{
    return dspark__f32_bits(a) == dspark__f32_bits(b) || (isnan(a) && isnan(b));
}
