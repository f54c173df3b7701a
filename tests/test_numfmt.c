/* Number formats against slow, independent definitions: formulas in double for decoding, a search
 * for the nearest value for encoding. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "base/fpenv.h"
#include "base/numfmt.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* A float format by its parts; the largest codes may be special. */
static double formula(unsigned code, unsigned exponent_bits, unsigned mantissa_bits, int bias)
{
    unsigned m = code & ((1u << mantissa_bits) - 1u);
    unsigned e = (code >> mantissa_bits) & ((1u << exponent_bits) - 1u);
    int negative = (code >> (exponent_bits + mantissa_bits)) & 1;
    double v = e == 0
                   ? ldexp(m, 1 - bias - (int)mantissa_bits)
                   : ldexp(m + ldexp(1.0, (int)mantissa_bits), (int)e - bias - (int)mantissa_bits);
    return negative ? -v : v;
}

static void same(float got, double expected)
{
    assert_true((double)got == expected);
    assert_int_equal(!!signbit(got), !!signbit(expected));
}

static void test_decode_all_codes(void **state)
{
    (void)state;
    for (unsigned c = 0; c < 256; c++) {
        if ((c & 0x7f) == 0x7f)
            assert_int_equal(dspark__f32_bits(dspark__e4m3_to_f32((uint8_t)c)), 0x7fc00000);
        else
            same(dspark__e4m3_to_f32((uint8_t)c), formula(c, 4, 3, 7));

        if ((c & 0x7f) == 0x7c)
            same(dspark__e5m2_to_f32((uint8_t)c), c & 0x80 ? -INFINITY : INFINITY);
        else if ((c & 0x7f) > 0x7c)
            assert_int_equal(dspark__f32_bits(dspark__e5m2_to_f32((uint8_t)c)), 0x7fc00000);
        else
            same(dspark__e5m2_to_f32((uint8_t)c), formula(c, 5, 2, 15));

        if (c == 255)
            assert_int_equal(dspark__f32_bits(dspark__e8m0_to_f32(255)), 0x7fc00000);
        else
            same(dspark__e8m0_to_f32((uint8_t)c), ldexp(1.0, (int)c - 127));

        same(dspark__e2m1_to_f32((uint8_t)c), formula(c & 15u, 2, 1, 1));
    }
    for (unsigned h = 0; h < 65536; h++) {
        float got = dspark__f16_to_f32((uint16_t)h);
        if ((h & 0x7fff) > 0x7c00)
            assert_int_equal(dspark__f32_bits(got), 0x7fc00000);
        else if ((h & 0x7fff) == 0x7c00)
            same(got, h & 0x8000 ? -INFINITY : INFINITY);
        else
            same(got, formula(h, 5, 10, 15));
    }
}

static void test_checksums(void **state)
{
    (void)state;
    double e4m3 = 0, e5m2 = 0;
    for (unsigned c = 0; c <= 0x7e; c++) e4m3 += dspark__e4m3_to_f32((uint8_t)c);
    for (unsigned c = 0; c <= 0x7b; c++) e5m2 += dspark__e5m2_to_f32((uint8_t)c);
    assert_true(e4m3 == 5407.875);
    assert_true(e5m2 == 360447.9997558594);
}

/* The nearest finite code by search over all of them; ties to the even code; saturating. */
static uint8_t nearest(float x, unsigned last, double (*value)(unsigned))
{
    if (isnan(x)) return 0x7f;
    double a = fabs((double)x);
    unsigned best = last;
    if (a < value(last)) {
        for (unsigned c = 0; c <= last; c++) {
            double d = fabs(value(c) - a), b = fabs(value(best) - a);
            if (d < b || (d == b && c % 2 == 0)) best = c;
        }
    }
    return (uint8_t)(best | (signbit(x) ? 0x80u : 0u));
}

static double e4m3_value(unsigned c)
{
    return formula(c, 4, 3, 7);
}

static double e5m2_value(unsigned c)
{
    return formula(c, 5, 2, 15);
}

static void check_encode(float x)
{
    assert_int_equal(dspark__f32_to_e4m3(x), nearest(x, 0x7e, e4m3_value));
    assert_int_equal(dspark__f32_to_e5m2(x), nearest(x, 0x7b, e5m2_value));
}

static void test_encode_every_bf16(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 65536; h++) check_encode(dspark__bf16_to_f32((uint16_t)h));
}

/* Every value, every midpoint, and their fp32 neighbours on both sides. */
static void test_encode_ties(void **state)
{
    static double (*const values[2])(unsigned) = {e4m3_value, e5m2_value};
    static const unsigned last[2] = {0x7e, 0x7b};
    (void)state;
    for (int f = 0; f < 2; f++) {
        for (unsigned c = 0; c <= last[f]; c++) {
            double here = values[f](c);
            double next = c < last[f] ? values[f](c + 1) : here + (here - values[f](c - 1));
            float points[2] = {(float)here, (float)((here + next) / 2)};
            for (int p = 0; p < 2; p++) {
                check_encode(points[p]);
                check_encode(-points[p]);
                check_encode(nextafterf(points[p], INFINITY));
                check_encode(nextafterf(points[p], -INFINITY));
            }
        }
    }
    static const struct {
        float x;
        uint8_t code;
    } published[] = {
        {0x1p-10f, 0x00}, {0x3p-10f, 0x02}, {0.017578125f, 0x09}, {1.0625f, 0x38},
        {1.1875f, 0x3a},  {448.0f, 0x7e},   {464.0f, 0x7e},       {0.3f, 0x2a},
        {5.3f, 0x4b},     {480.0f, 0x7e},   {1e30f, 0x7e},        {-1e30f, 0xfe},
        {1.0f, 0x38},     {240.0f, 0x77},   {256.0f, 0x78},       {-0.0f, 0x80},
    };
    for (size_t i = 0; i < COUNT(published); i++)
        assert_int_equal(dspark__f32_to_e4m3(published[i].x), published[i].code);
    assert_int_equal(dspark__f32_to_e4m3(INFINITY), 0x7e);
    assert_int_equal(dspark__f32_to_e4m3(-INFINITY), 0xfe);
    assert_int_equal(dspark__f32_to_e4m3(dspark__f32_from_bits(0xff800001u)), 0x7f);
    assert_int_equal(dspark__f32_to_e5m2(INFINITY), 0x7b);
    assert_int_equal(dspark__f32_to_e5m2(-INFINITY), 0xfb);
    assert_int_equal(dspark__f32_to_e5m2(61440.0f), 0x7b);
    assert_int_equal(dspark__f32_to_e5m2(dspark__f32_from_bits(0xffc00000u)), 0x7f);
}

static void test_bf16(void **state)
{
    static const struct {
        uint32_t f32;
        uint16_t bf16;
    } published[] = {
        {0x3f808000u, 0x3f80}, {0x3f818000u, 0x3f82}, {0x3f808001u, 0x3f81}, {0x7f7fffffu, 0x7f80},
        {0xff800000u, 0xff80}, {0x7f800001u, 0x7fc0}, {0x7fffffffu, 0x7fc0}, {0xffffffffu, 0x7fc0},
        {0x00008000u, 0x0000}, {0x00018000u, 0x0002}, {0x80000001u, 0x8000}, {0x007fffffu, 0x0080},
    };
    (void)state;
    for (size_t i = 0; i < COUNT(published); i++)
        assert_int_equal(dspark__f32_to_bf16(dspark__f32_from_bits(published[i].f32)),
                         published[i].bf16);
    for (unsigned h = 0; h < 65536; h++) {
        uint16_t expected = (h & 0x7fff) > 0x7f80 ? 0x7fc0 : (uint16_t)h;
        assert_int_equal(dspark__f32_to_bf16(dspark__bf16_to_f32((uint16_t)h)), expected);
    }
    unsigned char odd[3] = {0xff, 0x34, 0x12};
    assert_int_equal(dspark__load_u16(odd + 1), 0x1234);
}

/* Flush-to-zero in the host's thread must not reach a result. */
static void test_flush_to_zero_does_not_matter(void **state)
{
    (void)state;
#if defined(__SSE2__)
    unsigned old = dspark__fpenv_enter();
    _mm_setcsr(DSPARK__MXCSR_DEFAULT | DSPARK__MXCSR_FTZ_DAZ | 0x6000u); /* and toward zero */
    uint32_t e8m0 = dspark__f32_bits(dspark__e8m0_to_f32(0));
    uint32_t f16 = dspark__f32_bits(dspark__f16_to_f32(1));
    uint16_t bf16 = dspark__f32_to_bf16(dspark__f32_from_bits(0x00010000u));
    uint8_t e4m3 = dspark__f32_to_e4m3(0.3f);
    dspark__fpenv_leave(old);
    assert_int_equal(e8m0, 0x00400000);
    assert_int_equal(f16, 0x33800000);
    assert_int_equal(bf16, 1);
    assert_int_equal(e4m3, 0x2a);
#else
    skip();
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode_all_codes),
        cmocka_unit_test(test_checksums),
        cmocka_unit_test(test_encode_every_bf16),
        cmocka_unit_test(test_encode_ties),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_flush_to_zero_does_not_matter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
