/* Encoders: every rounding tie, the ends of the scales, the documented formulas, the search, and that
 * what is decoded is encoded to the same codes again. The reference library's own bytes are
 * test_golden_quant.c's. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/numfmt.h"
#include "quant/encode.h"
#include "support/guard.h"

#define CT DSPARK_LAYOUT_COMPRESSED_TENSORS
#define MODELOPT DSPARK_LAYOUT_MODELOPT

static dspark_error err;

static dspark__encoder encoder(dspark_format format, dspark_scale_search search,
                               dspark_layout layout, uint64_t k)
{
    dspark__encoder e;
    if (dspark__encoder_init(&e, format, search, layout, 0, k, "w", &err) != DSPARK_OK)
        fail_msg("%s: %s", err.where, err.message);
    return e;
}

static uint64_t next(uint64_t *s)
{
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    return *s;
}

/* BF16 values around 2^exponent. */
static float draw(uint64_t *s, int exponent)
{
    float x = (float)((int64_t)(next(s) >> 11) - ((int64_t)1 << 52)) * 0x1p-52f;
    return dspark__bf16_to_f32(dspark__f32_to_bf16(ldexpf(x, exponent)));
}

/* ---- codes ---- */

/* The loop's own rounding against numfmt.h: all exponents, mantissas next to every tie, both signs. */
static void test_e4m3(void **state)
{
    dspark__encoder e = encoder(DSPARK_FORMAT_FP8_TENSOR, DSPARK_SCALES_ABSMAX, CT, 1);
    (void)state;
    e.global = 1.0f;
    for (uint32_t exponent = 0; exponent < 255; exponent++) {
        for (uint32_t tie = 0; tie < 64; tie++) {
            for (int near = -1; near <= 1; near++) {
                for (uint32_t sign = 0; sign < 2; sign++) {
                    uint32_t bits = (exponent << 23) + (tie << 17) + (uint32_t)near;
                    float x;
                    uint8_t code;
                    if (exponent == 0 && tie == 0 && near < 0) continue;
                    x = dspark__f32_from_bits(bits | sign << 31);
                    dspark__encode_unit(&e, &x, 1, &code, NULL);
                    if (code != dspark__f32_to_e4m3(x))
                        fail_msg("%a: 0x%02x, numfmt says 0x%02x", (double)x, code,
                                 dspark__f32_to_e4m3(x));
                }
            }
        }
    }
}

static void test_e2m1(void **state)
{
    static const struct {
        float x;
        uint8_t code;
    } cases[] = {
        {0, 0}, {0.25f, 0}, {0.2500001f, 1}, {0.5f, 1}, {0.7499999f, 1}, {0.75f, 2}, {1, 2},
        {1.25f, 2}, {1.2500001f, 3}, {1.5f, 3}, {1.7499999f, 3}, {1.75f, 4}, {2, 4}, {2.5f, 4},
        {2.5000002f, 5}, {3, 5}, {3.4999998f, 5}, {3.5f, 6}, {4, 6}, {5, 6}, {5.0000005f, 7}, {6, 7},
        {-0.0f, 0}, {-0.25f, 8}, {-0.5f, 9}, {-5, 14}, {-6, 15},
    };
    dspark__encoder e = encoder(DSPARK_FORMAT_MXFP4, DSPARK_SCALES_ABSMAX, CT, 32);
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float w[32] = {0};
        uint8_t codes[16], scale;
        w[3] = cases[i].x;
        w[4] = 6; /* its exponent makes the scale 1 */
        dspark__encode_unit(&e, w, 1, codes, &scale);
        assert_int_equal(scale, 127);
        assert_int_equal(codes[2] & 15, 7);
        if (codes[1] >> 4 != cases[i].code)
            fail_msg("%g: code %u, expected %u", (double)cases[i].x, codes[1] >> 4, cases[i].code);
    }
}

static void test_integers(void **state)
{
    /* s = bf16(127.5 / 127.5) = 1: ties go to even, and the largest magnitudes are cut. */
    static const float w8[8] = {0.5f, 1.5f, -0.5f, -1.5f, 2.5f, 127.5f, -127.5f, 126.5f};
    static const int8_t want8[8] = {0, 2, 0, -2, 2, 127, -128, 126};
    dspark__encoder e = encoder(DSPARK_FORMAT_INT8, DSPARK_SCALES_ABSMAX, CT, 8);
    uint8_t codes[64];
    uint16_t scale;
    float w4[128] = {7.5f, -7.5f, 0.5f, 1.5f, -0.5f, -1.5f, 6.5f, -6.5f};
    (void)state;
    dspark__encode_unit(&e, w8, 1, codes, (uint8_t *)&scale);
    assert_int_equal(scale, 0x3f80);
    assert_memory_equal(codes, want8, 8);
    e = encoder(DSPARK_FORMAT_INT4, DSPARK_SCALES_ABSMAX, CT, 128);
    dspark__encode_unit(&e, w4, 1, codes, (uint8_t *)&scale);
    assert_int_equal(scale, 0x3f80);
    /* 7 -8 0 2 0 -2 6 -6, plus 8, low nibble first; the rest is 0 */
    assert_memory_equal(codes, "\x0f\xa8\x68\x2e\x88\x88", 6);
    /* the word of the format's description: -8 .. -1 is 0x76543210 */
    for (int i = 0; i < 8; i++) w4[i] = (float)(i - 8) * 0.9375f;
    dspark__encode_unit(&e, w4, 1, codes, (uint8_t *)&scale);
    assert_int_equal(scale, 0x3f80);
    assert_memory_equal(codes, "\x10\x32\x54\x76", 4); /* -7.5 rounds to -8, -6.5625 to -7, ... */
}

/* ---- scales ---- */

static void test_real_scales(void **state)
{
    float w[130] = {0}, s[2];
    uint8_t codes[130 * 3];
    uint16_t half;
    dspark__encoder e = encoder(DSPARK_FORMAT_FP8_CHANNEL, DSPARK_SCALES_ABSMAX, CT, 130);
    (void)state;
    dspark__encode_unit(&e, w, 1, codes, (uint8_t *)s);
    assert_true(s[0] == 0x1p-23f);
    w[77] = -3.5f;
    dspark__encode_unit(&e, w, 1, codes, (uint8_t *)s);
    assert_true(s[0] == 3.5f / 448.0f);
    assert_int_equal(codes[77], 0xfe);
    e = encoder(DSPARK_FORMAT_INT8, DSPARK_SCALES_ABSMAX, CT, 130);
    memset(w, 0, sizeof w);
    dspark__encode_unit(&e, w, 1, codes, (uint8_t *)&half);
    assert_int_equal(half, 0x3c00); /* 2^-7 */
    /* the last block of columns is narrower, and each block has a scale of its own */
    e = encoder(DSPARK_FORMAT_FP8_BLOCK, DSPARK_SCALES_ABSMAX, CT, 130);
    assert_int_equal(e.n_scales, 2);
    assert_int_equal(e.unit_rows, 128);
    {
        float rows[3 * 130] = {0};
        rows[2 * 130 + 127] = 448;
        rows[1 * 130 + 129] = -896;
        dspark__encode_unit(&e, rows, 3, codes, (uint8_t *)s);
        assert_true(s[0] == 1.0f && s[1] == 2.0f);
        assert_int_equal(codes[2 * 130 + 127], 0x7e);
        assert_int_equal(codes[130 + 129], 0xfe);
    }
}

/* The stored exponent of one group whose largest magnitude is m. */
static unsigned mx_exponent(dspark_format format, float m)
{
    dspark__encoder e = encoder(format, DSPARK_SCALES_ABSMAX, CT, 32);
    float w[32] = {0};
    uint8_t codes[32], scale;
    w[5] = m;
    dspark__encode_unit(&e, w, 1, codes, &scale);
    return scale;
}

static void test_powers(void **state)
{
    (void)state;
    assert_int_equal(mx_exponent(DSPARK_FORMAT_MXFP4, 0), 0);
    assert_int_equal(mx_exponent(DSPARK_FORMAT_MXFP4, 1), 125);
    assert_int_equal(mx_exponent(DSPARK_FORMAT_MXFP4, 1.7499999f), 125);
    assert_int_equal(mx_exponent(DSPARK_FORMAT_MXFP4, 1.75f), 126);
    assert_int_equal(mx_exponent(DSPARK_FORMAT_MXFP8, 1), 119);
    assert_int_equal(mx_exponent(DSPARK_FORMAT_MXFP8, -1.75f), 120);
    /* the ends: subnormals and the smallest normals reach 0, the largest bf16 stays finite */
    assert_int_equal(mx_exponent(DSPARK_FORMAT_MXFP4, 0x1p-133f), 0);
    assert_int_equal(mx_exponent(DSPARK_FORMAT_MXFP4, 0x1p-125f), 0);
    assert_int_equal(mx_exponent(DSPARK_FORMAT_MXFP4, 0x1p-124f), 1);
    assert_int_equal(mx_exponent(DSPARK_FORMAT_MXFP8, 0x1p-118f), 1);
    assert_int_equal(mx_exponent(DSPARK_FORMAT_MXFP4, 0x1.fep127f), 253);
}

static void test_nvfp4(void **state)
{
    dspark__encoder e = encoder(DSPARK_FORMAT_NVFP4, DSPARK_SCALES_ABSMAX, CT, 32);
    float w[32] = {0};
    uint8_t codes[16], scales[2];
    double back[32];
    (void)state;
    dspark__encoder_set_absmax(&e, 3.5f);
    assert_true(e.global == 1.0f / 3.5f * 2688.0f); /* the reciprocal is rounded too */
    dspark__encoder_set_absmax(&e, 10.5f);
    assert_true(e.global == 256.0f);
    w[0] = 10.5f;
    w[1] = -5.25f;
    dspark__encode_unit(&e, w, 1, codes, scales);
    assert_int_equal(scales[0], 0x7e); /* 256 * 10.5 / 6 = 448 */
    assert_int_equal(scales[1], 0x20); /* a group of zeros: 0.125 */
    assert_int_equal(codes[0], 0xd7);  /* 6, -3 */
    dspark__decode_row(&e, codes, scales, 0, back);
    assert_true(back[0] == 10.5);
    dspark__encoder_set_absmax(&e, 0);
    assert_true(e.global == 1.0f);
    dspark__encoder_set_absmax(&e, 0x1p-133f);
    assert_true(e.global == 1.0f);
    e = encoder(DSPARK_FORMAT_NVFP4, DSPARK_SCALES_ABSMAX, MODELOPT, 32);
    dspark__encoder_set_absmax(&e, 10.5f);
    assert_true(e.global == 10.5f / 2688.0f);
    w[17] = 0x1p-20f; /* a scale below the smallest E4M3 is that one */
    dspark__encode_unit(&e, w, 1, codes, scales);
    assert_int_equal(scales[0], 0x7e);
    assert_int_equal(scales[1], 0x01);
    w[17] = 0;
    dspark__encode_unit(&e, w, 1, codes, scales);
    assert_int_equal(scales[1], 0x38); /* 1.0 */
    dspark__encoder_set_absmax(&e, 0);
    assert_true(e.global == 1.0f);
}

/* ---- whole rows ---- */

static const dspark_format all_formats[] = {
    DSPARK_FORMAT_FP8_TENSOR, DSPARK_FORMAT_FP8_CHANNEL, DSPARK_FORMAT_FP8_BLOCK,
    DSPARK_FORMAT_NVFP4, DSPARK_FORMAT_MXFP4, DSPARK_FORMAT_MXFP8, DSPARK_FORMAT_INT8,
    DSPARK_FORMAT_INT4};
#define N_FORMATS (sizeof all_formats / sizeof *all_formats)

static double row_error(const float *w, const double *back, size_t k)
{
    double sum = 0;
    for (size_t i = 0; i < k; i++) sum += (w[i] - back[i]) * (w[i] - back[i]);
    return sum;
}

/* Nothing beyond the buffers is touched, the search never makes a row worse, what is worth a row
 * exactly is coded without loss. */
static void test_rows(void **state)
{
    enum { K = 384 };
    /* relative rms of uniform weights: 2^-4 / sqrt(3) and less for floats of 3 bits, and so on */
    static const double limit[N_FORMATS] = {0.03, 0.03, 0.03, 0.11, 0.13, 0.03, 0.01, 0.12};
    uint64_t seed = 0x9e3779b97f4a7c15;
    (void)state;
    printf("seed 0x%llx\n", (unsigned long long)seed);
    for (size_t f = 0; f < N_FORMATS; f++) {
        for (int round = 0; round < 20; round++) {
            dspark__encoder plain = encoder(all_formats[f], DSPARK_SCALES_ABSMAX, CT, K);
            dspark__encoder search = encoder(all_formats[f], DSPARK_SCALES_MSE, CT, K);
            guard w = guard_end(K * sizeof(float)), codes = guard_end(plain.row_bytes);
            guard scales = guard_end(plain.n_scales * plain.scale_bytes + 1);
            float *row = (float *)(void *)w.p;
            double back[K], errors, squares = 0;
            float m;
            for (size_t i = 0; i < K; i++) row[i] = draw(&seed, round - 10);
            for (size_t i = 0; i < K; i++) squares += (double)row[i] * row[i];
            m = dspark__encode_absmax(row, K);
            dspark__encoder_set_absmax(&plain, m);
            dspark__encoder_set_absmax(&search, m);
            if (all_formats[f] == DSPARK_FORMAT_FP8_TENSOR) { /* the caller's loop */
                double least = INFINITY;
                for (uint32_t i = 0; i < DSPARK__ENCODE_CANDIDATES; i++) {
                    float s = dspark__encode_tensor_scale(&search, m, i);
                    double error = dspark__encode_tensor_error(&search, row, s);
                    if (error < least) search.global = s;
                    least = error < least ? error : least;
                }
            }
            dspark__encode_unit(&plain, row, 1, codes.p, scales.p + 1);
            dspark__decode_row(&plain, codes.p, scales.p + 1, 0, back);
            errors = row_error(row, back, K);
            if (!(sqrt(errors / squares) < limit[f]))
                fail_msg("%s: relative error %g", dspark__format_name(all_formats[f]),
                         sqrt(errors / squares));
            dspark__encode_unit(&search, row, 1, codes.p, scales.p + 1);
            dspark__decode_row(&search, codes.p, scales.p + 1, 0, back);
            assert_true(row_error(row, back, K) <= errors * (1 + 1e-6));
            guard_free(&w);
            guard_free(&codes);
            guard_free(&scales);
        }
    }
}

/* Weights that are codes times a power of two, every code among them, come back as they went in. */
static void test_exact(void **state)
{
    enum { K = 512 };
    static const dspark_format floats[] = {DSPARK_FORMAT_FP8_TENSOR, DSPARK_FORMAT_FP8_CHANNEL,
                                           DSPARK_FORMAT_FP8_BLOCK, DSPARK_FORMAT_NVFP4,
                                           DSPARK_FORMAT_MXFP4, DSPARK_FORMAT_MXFP8};
    (void)state;
    for (size_t f = 0; f < sizeof floats / sizeof *floats; f++) {
        dspark__encoder e = encoder(floats[f], DSPARK_SCALES_ABSMAX, CT, K);
        /* what stands at the start of each group, so that the scale is the power of two */
        const float top = floats[f] == DSPARK_FORMAT_MXFP8 ? 256.0f : e.bits == 4 ? 6.0f : 448.0f;
        const size_t group = floats[f] == DSPARK_FORMAT_NVFP4 ? 16 : 32;
        float row[K];
        double back[K];
        uint8_t codes[K], scales[K];
        for (size_t i = 0; i < K; i++) {
            float value = e.bits == 4 ? dspark__e2m1_to_f32((uint8_t)(i / 2 & 15))
                                      : dspark__e4m3_to_f32((uint8_t)(i % 121));
            row[i] = (i % group == 0 ? top : i % 7 == 0 ? -value : value) * 0.25f;
        }
        dspark__encoder_set_absmax(&e, dspark__encode_absmax(row, K));
        if (floats[f] == DSPARK_FORMAT_NVFP4) e.global = 64;
        dspark__encode_unit(&e, row, 1, codes, scales);
        dspark__decode_row(&e, codes, scales, 0, back);
        for (size_t i = 0; i < K; i++)
            if (back[i] != row[i])
                fail_msg("%s: value %zu, %a became %a", dspark__format_name(floats[f]), i,
                         (double)row[i], back[i]);
    }
}

/* A row of zeros keeps the scale of absmax: the first of equal candidates wins. */
static void test_first_wins(void **state)
{
    (void)state;
    for (size_t f = 0; f < N_FORMATS; f++) {
        dspark__encoder plain = encoder(all_formats[f], DSPARK_SCALES_ABSMAX, CT, 128);
        dspark__encoder search = encoder(all_formats[f], DSPARK_SCALES_MSE, CT, 128);
        float row[128] = {0};
        uint8_t codes[128], a[128] = {0}, b[128] = {0};
        dspark__encode_unit(&plain, row, 1, codes, a);
        dspark__encode_unit(&search, row, 1, codes, b);
        assert_memory_equal(a, b, sizeof a);
    }
}

static void test_absmax(void **state)
{
    float w[5] = {0.5f, -2, 1, -0.0f, 0};
    (void)state;
    assert_true(dspark__encode_absmax(w, 5) == 2.0f);
    assert_true(dspark__encode_absmax(w, 0) == 0.0f);
    w[2] = -INFINITY;
    assert_true(isinf(dspark__encode_absmax(w, 5)));
    w[4] = NAN;
    assert_true(isnan(dspark__encode_absmax(w, 5)));
}

static void refused(dspark_status want, dspark_format format, dspark_layout layout, uint32_t group,
                    uint64_t k, const char *text)
{
    dspark__encoder e;
    assert_int_equal(dspark__encoder_init(&e, format, DSPARK_SCALES_ABSMAX, layout, group, k, "w", &err),
                     want);
    if (!strstr(err.message, text)) fail_msg("\"%s\" does not say \"%s\"", err.message, text);
}

static void test_refused(void **state)
{
    dspark__encoder e;
    (void)state;
    refused(DSPARK_EINVAL, DSPARK_FORMAT_NONE, CT, 0, 128, "nvfp4");
    refused(DSPARK_EINVAL, DSPARK_FORMAT_BF16, CT, 0, 128, "formats are");
    refused(DSPARK_EINVAL, (dspark_format)99, CT, 0, 128, "formats are");
    refused(DSPARK_EINVAL, DSPARK_FORMAT_MXFP4, MODELOPT, 0, 128, "ModelOpt");
    refused(DSPARK_EINVAL, DSPARK_FORMAT_MXFP4, CT, 64, 128, "int4");
    refused(DSPARK_EINVAL, DSPARK_FORMAT_INT4, CT, 12, 120, "multiple of 8");
    refused(DSPARK_EUNSUPPORTED, DSPARK_FORMAT_INT4, CT, 0, 64, "int4's group of 128");
    refused(DSPARK_EUNSUPPORTED, DSPARK_FORMAT_NVFP4, CT, 0, 40, "16");
    refused(DSPARK_EUNSUPPORTED, DSPARK_FORMAT_MXFP8, CT, 0, 48, "32");
    refused(DSPARK_EUNSUPPORTED, DSPARK_FORMAT_FP8_TENSOR, CT, 0, 0, "0 columns");
    assert_int_equal(dspark__encoder_init(&e, DSPARK_FORMAT_INT4, DSPARK_SCALES_ABSMAX, CT, 24, 72,
                                          "w", &err),
                     DSPARK_OK);
    assert_int_equal(e.row_bytes, 36);
    assert_int_equal(e.n_scales, 3);
    assert_int_equal(dspark__encoder_init(&e, DSPARK_FORMAT_INT8, (dspark_scale_search)7, CT, 0, 8, "w",
                                          &err),
                     DSPARK_EINVAL);
    assert_string_equal(dspark__format_name((dspark_format)-1), "?");
    assert_string_equal(dspark__format_name(DSPARK_FORMAT_FP8_BLOCK), "fp8-block");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_e4m3),      cmocka_unit_test(test_e2m1),
        cmocka_unit_test(test_integers),  cmocka_unit_test(test_real_scales),
        cmocka_unit_test(test_powers),    cmocka_unit_test(test_nvfp4),
        cmocka_unit_test(test_rows),      cmocka_unit_test(test_exact),
        cmocka_unit_test(test_first_wins), cmocka_unit_test(test_absmax),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
