/* Every scheme, from hand-made tensors: what dequantise tells is computed here by the formats' own
 * formulas, and what is packed, decoded by the reference kernel and scaled, is exactly that. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/fpenv.h"
#include "base/numfmt.h"
#include "support/examine.h"
#include "support/fixture.h"
#include "support/tmpdir.h"

/* ---- formats by their formulas --------------------------------------------------------------- */

static double fp8_value(dspark_dtype dtype, unsigned c)
{
    int fnuz = dtype == DSPARK_F8_E4M3FNUZ || dtype == DSPARK_F8_E5M2FNUZ;
    int e4m3 = dtype == DSPARK_F8_E4M3 || dtype == DSPARK_F8_E4M3FNUZ;
    int mbits = e4m3 ? 3 : 2, bias = (e4m3 ? 7 : 15) + fnuz;
    int e = (int)(c & 0x7f) >> mbits, m = (int)c & ((1 << mbits) - 1);
    double sign = c & 0x80 ? -1 : 1;

    if (fnuz && c == 0x80) return NAN;
    if (!fnuz && e4m3 && (c & 0x7f) == 0x7f) return NAN;
    if (!fnuz && !e4m3 && e == 31) return m ? NAN : sign * INFINITY;
    if (e == 0) return sign * ldexp(m, 1 - bias - mbits);
    return sign * ldexp(m + (1 << mbits), e - bias - mbits);
}

static double e2m1_value(unsigned c)
{
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return c & 8 ? -magnitude[c & 7] : magnitude[c & 7];
}

/* ---- plain weights --------------------------------------------------------------------------- */

static const struct {
    uint64_t rows, k;
} geometries[] = {{24, 64}, {48, 128}, {50, 65}, {1, 7}, {97, 8}, {576, 64}};
#define N_GEOMETRIES (sizeof geometries / sizeof *geometries)

static void test_plain(void **state)
{
    (void)state;
    for (size_t g = 0; g < N_GEOMETRIES; g++) {
        uint64_t rows = geometries[g].rows, k = geometries[g].k, n = rows * k;
        unsigned char *w = add("weight", DSPARK_BF16, rows, k);
        fill_random(w, 2 * n);
        for (uint64_t i = 0; i < n; i++) {
            uint16_t h = dspark__load_u16(w + 2 * i);
            want[i] = (h & 0x7fff) > 0x7f80 ? NAN : (double)dspark__bf16_to_f32(h);
        }
        assert_int_equal(examine("bf16", rows, k).bits, 16);

        w = add("weight", DSPARK_F16, rows, k);
        fill_random(w, 2 * n);
        for (uint64_t i = 0; i < n; i++)
            want[i] = dspark__bf16_to_f32(
                dspark__f32_to_bf16(dspark__f16_to_f32(dspark__load_u16(w + 2 * i))));
        assert_int_equal(examine("f16", rows, k).bits, 16);

        w = add("weight", DSPARK_F32, rows, k);
        fill_random(w, 4 * n);
        for (uint64_t i = 0; i < n; i++) {
            float f;
            memcpy(&f, w + 4 * i, 4);
            want[i] = dspark__bf16_to_f32(dspark__f32_to_bf16(f));
        }
        assert_int_equal(examine("f32", rows, k).bits, 16);
    }
}

/* One rounding, ties to even, overflow to infinity. */
static void test_f32_roundings(void **state)
{
    static const uint32_t bits[8] = {0x3f808000, 0x3f818000, 0x3f808001, 0x7f7fffff,
                                     0xff800000, 0x7f800001, 0x00000001, 0x807f8000};
    static const uint16_t rounded[8] = {0x3f80, 0x3f82, 0x3f81, 0x7f80,
                                        0xff80, 0x7fc0, 0x0000, 0x8080};
    (void)state;
    memcpy(add("weight", DSPARK_F32, 1, 8), bits, sizeof bits);
    for (int i = 0; i < 8; i++)
        want[i] = rounded[i] == 0x7fc0 ? NAN : (double)dspark__bf16_to_f32(rounded[i]);
    examine("f32", 1, 8);
    memcpy(add("weight", DSPARK_F32, 1, 8), bits, sizeof bits);
    memcpy(add("bias", DSPARK_BF16, 1, 0), rounded, 2);
    examine("f32", 1, 8);
}

/* ---- FP8 ------------------------------------------------------------------------------------- */

static const dspark_dtype fp8s[] = {DSPARK_F8_E4M3, DSPARK_F8_E5M2, DSPARK_F8_E4M3FNUZ,
                                    DSPARK_F8_E5M2FNUZ};
static const dspark_dtype floats[] = {DSPARK_F32, DSPARK_BF16, DSPARK_F16};

/* One FP8 module: scale element of (row, column) is (row / br) * cols + column / bc. */
static void fp8_case(const char *scheme, dspark_dtype dtype, const char *suffix,
                     dspark_dtype sdtype, uint32_t rank, const uint64_t *shape, uint64_t rows,
                     uint64_t k, uint64_t br, uint64_t bc)
{
    char name[80];
    uint64_t n = 1, cols = (k + bc - 1) / bc;
    double scales[4096];
    unsigned char *w = add("weight", dtype, rows, k), *s;

    for (uint32_t d = 0; d < rank; d++) n *= shape[d];
    assert_true(n <= 4096);
    snprintf(name, sizeof name, "m.%s", suffix);
    s = tensors_add(&t, name, sdtype, rank, shape, NULL);
    fill_scales(s, sdtype, n, scales);
    for (uint64_t i = 0; i < rows * k; i++) {
        w[i] = (unsigned char)(i < 256 ? i : next_random(&seed) >> 13);
        want[i] = fp8_value(dtype, w[i]) * scales[i / k / br * cols + i % k / bc];
    }
    dspark__packing p = examine(scheme, rows, k);
    assert_int_equal(p.bits, 8);
    assert_int_equal(p.format.scale, DSPARK__CODE_PLAIN);
    assert_int_equal(p.row_scale,
                     strcmp(scheme, "fp8_tensor") == 0 || strcmp(scheme, "fp8_channel") == 0);
    assert_int_equal(p.group, p.row_scale ? 0 : bc);
}

static void test_fp8(void **state)
{
    const uint64_t huge = UINT64_MAX;

    (void)state;
    for (size_t d = 0; d < 4; d++) {
        for (size_t f = 0; f < 3; f++) {
            static const uint64_t one[2] = {1, 1};
            for (uint32_t rank = 0; rank <= 2; rank++)
                fp8_case("fp8_tensor", fp8s[d], "weight_scale", floats[f], rank, one, 50, 65, huge,
                         huge / 2);
            uint64_t channel[2] = {50, 1};
            for (uint32_t rank = 1; rank <= 2; rank++)
                fp8_case("fp8_channel", fp8s[d], "weight_scale", floats[f], rank, channel, 50, 67,
                         1, huge / 2);
            uint64_t group[2] = {24, 5};
            fp8_case("fp8_group", fp8s[d], "weight_scale", floats[f], 2, group, 24, 200, 1, 40);
            uint64_t block[4] = {5, 1, 2, 1}, flat[2] = {5, 2}, lead[3] = {1, 5, 2};
            fp8_case("fp8_block", fp8s[d], "weight_scale", floats[f], 2, flat, 576, 200, 128, 128);
            fp8_case("fp8_block", fp8s[d], "weight_scale", floats[f], 4, block, 576, 256, 128, 128);
            fp8_case("fp8_block", fp8s[d], "weight_scale", floats[f], 3, lead, 576, 129, 128, 128);
            fp8_case("fp8_block", fp8s[d], "weight_scale_inv", floats[f], 2, flat, 576, 256, 128,
                     128);
        }
    }
    uint64_t flat[2] = {5, 2}, single[2] = {1, 1}, small[2] = {2, 3};
    fp8_case("fp8_block", DSPARK_F8_E4M3, "scale", DSPARK_F8_E8M0, 2, flat, 576, 256, 128, 128);
    fp8_case("fp8_block", DSPARK_F8_E4M3, "weight_scale_inv", DSPARK_F8_E8M0, 2, flat, 576, 256,
             128, 128);
    fp8_case("fp8_block", DSPARK_F8_E4M3, "weight_scale", DSPARK_F8_E8M0, 2, flat, 576, 256, 128,
             128);
    fp8_case("fp8_block", DSPARK_F8_E4M3, "weight_scale_inv", DSPARK_F32, 2, single, 24, 64, 128,
             128);
    /* blocks of the config's size: 24 rows of 16 are two, the second half empty */
    rule.method = DSPARK__QUANT_FP8;
    rule.quantised = 1;
    rule.num_bits = 8;
    rule.is_float = 1;
    rule.strategy = DSPARK__STRATEGY_BLOCK;
    rule.block_rows = 16;
    rule.block_cols = 24;
    fp8_case("fp8_block", DSPARK_F8_E4M3, "weight_scale_inv", DSPARK_F32, 2, small, 24, 64, 16, 24);
    /* one block is a block where the config says so, also without ModelOpt's dropped dimensions */
    rule.block_rows = rule.block_cols = 128;
    for (uint32_t rank = 0; rank <= 2; rank++)
        fp8_case("fp8_block", DSPARK_F8_E4M3, "weight_scale", DSPARK_F32, rank, single, 24, 64, 128,
                 128);
}

/* 576 rows of 128x128 blocks: the fifth block row serves rows 512 .. 575 and nothing else. */
static void test_last_block_row(void **state)
{
    float scales[5] = {1, 1, 1, 1, 1000};
    unsigned char *w = add("weight", DSPARK_F8_E4M3, 576, 64);

    (void)state;
    memset(w, 0x38, 576 * 64); /* 1.0 */
    memcpy(add("weight_scale_inv", DSPARK_F32, 5, 1), scales, sizeof scales);
    for (size_t i = 0; i < 576 * 64; i++) want[i] = i / 64 < 512 ? 1 : 1000;
    examine("fp8_block", 576, 64);
}

/* A shape that fits two kinds is what the config's strategy says; the numbers are the same. */
static void test_one_row(void **state)
{
    static const struct {
        dspark__quant_strategy strategy;
        const char *scheme;
        uint64_t cols;
    } rows[] = {
        {DSPARK__STRATEGY_UNKNOWN, "fp8_tensor", 1}, {DSPARK__STRATEGY_CHANNEL, "fp8_channel", 1},
        {DSPARK__STRATEGY_BLOCK, "fp8_block", 1},    {DSPARK__STRATEGY_GROUP, "fp8_group", 2},
        {DSPARK__STRATEGY_BLOCK, "fp8_block", 2},
    };
    (void)state;
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        uint64_t k = 128 * rows[r].cols, shape[2] = {1, rows[r].cols};
        rule = (dspark__quant_rule){.method = DSPARK__QUANT_COMPRESSED_TENSORS,
                                    .quantised = 1,
                                    .num_bits = 8,
                                    .is_float = 1,
                                    .symmetric = 1,
                                    .strategy = rows[r].strategy,
                                    .format = "float-quantized"};
        fp8_case(rows[r].scheme, DSPARK_F8_E4M3, "weight_scale", DSPARK_BF16, 2, shape, 1, k, 1,
                 128);
    }
}

/* ---- MX -------------------------------------------------------------------------------------- */

static double mx_product(double code, unsigned e)
{
    double w = ldexp(code, (int)e - 127);
    return isfinite(w) && fabs(w) > FLT_MAX ? copysign(INFINITY, w) : w;
}

/* FP4 codes of [rows, k] in the three spellings; returns the bytes. */
static unsigned char *add_fp4(int spelling, uint64_t rows, uint64_t k)
{
    unsigned char *w = spelling == 0   ? add("weight_packed", DSPARK_U8, rows, k / 2)
                       : spelling == 1 ? add("weight", DSPARK_U8, rows, k / 2)
                                       : add("weight", DSPARK_F4, rows, k);
    fill_random(w, rows * k / 2);
    return w;
}

static void test_mx(void **state)
{
    (void)state;
    for (size_t g = 0; g < 3; g++) {
        static const uint64_t sizes[3][2] = {{24, 64}, {50, 96}, {576, 32}};
        uint64_t rows = sizes[g][0], k = sizes[g][1], n_scales = rows * k / 32;
        for (int v = 0; v < 3; v++) {
            for (int u8 = 0; u8 < 2; u8++) {
                unsigned char *w = add_fp4(v, rows, k);
                unsigned char *s =
                    add("weight_scale", u8 ? DSPARK_U8 : DSPARK_F8_E8M0, rows, k / 32);
                fill_random(s, n_scales);
                s[0] = 0, s[1] = 1, s[2] = 254;
                for (uint64_t i = 0; i < n_scales; i++) s[i] -= s[i] == 255;
                for (uint64_t i = 0; i < rows * k; i++)
                    want[i] = mx_product(e2m1_value(w[i / 2] >> 4 * (i % 2) & 15), s[i / 32]);
                dspark__packing p = examine("mxfp4", rows, k);
                assert_int_equal(p.bits, 4);
                assert_int_equal(p.format.scale, DSPARK__CODE_E8M0);
                assert_int_equal(p.format.block, 32);
            }
        }
        for (int d = 0; d < 2; d++) {
            unsigned char *w = add("weight", fp8s[d], rows, k);
            unsigned char *s = add("weight_scale", d ? DSPARK_F8_E8M0 : DSPARK_U8, rows, k / 32);
            fill_random(w, rows * k);
            fill_random(s, n_scales);
            s[0] = 0, s[1] = 1, s[2] = 254;
            for (uint64_t i = 0; i < n_scales; i++) s[i] -= s[i] == 255;
            for (uint64_t i = 0; i < rows * k; i++)
                want[i] = mx_product(fp8_value(fp8s[d], w[i]), s[i / 32]);
            assert_int_equal(examine("mxfp8", rows, k).format.scale, DSPARK__CODE_E8M0);
        }
    }
}

/* ---- NVFP4 ----------------------------------------------------------------------------------- */

static void test_nvfp4(void **state)
{
    (void)state;
    for (size_t g = 0; g < 4; g++) {
        static const uint64_t sizes[4][2] = {{24, 64}, {50, 48}, {48, 16}, {576, 32}};
        uint64_t rows = sizes[g][0], k = sizes[g][1], n_scales = rows * k / 16;
        for (int v = 0; v < 3; v++) {
            unsigned char *w = add_fp4(v, rows, k);
            uint64_t shape[3] = {1, rows, k / 16};
            unsigned char *s =
                g == 2 ? tensors_add(&t, "m.weight_scale", DSPARK_F8_E4M3, 3, shape, NULL)
                       : add("weight_scale", DSPARK_F8_E4M3, rows, k / 16);
            float global = v == 0 ? 768.0f : 1.0f / 700.0f;
            fill_random(s, n_scales);
            for (uint64_t i = 0; i < n_scales; i++) s[i] = (uint8_t)(s[i] % 0x7f);
            s[0] = 0x01, s[1] = 0x7e, s[2] = 0; /* the smallest subnormal, 448, zero */
            memcpy(tensors_add(&t, v == 0 ? "m.weight_global_scale" : "m.weight_scale_2",
                               DSPARK_F32, g % 2, (const uint64_t[]){1}, NULL),
                   &global, 4);
            if (v == 0) global = 1.0f / global;
            for (uint64_t i = 0; i < rows * k; i++)
                want[i] = e2m1_value(w[i / 2] >> 4 * (i % 2) & 15) *
                          fp8_value(DSPARK_F8_E4M3, s[i / 16]) * global;
            dspark__packing p = examine(v == 0 ? "nvfp4_ct" : "nvfp4_modelopt", rows, k);
            assert_int_equal(p.bits, 4);
            assert_int_equal(p.format.scale, DSPARK__CODE_E4M3);
            assert_int_equal(p.format.block, 16);
            assert_int_equal(p.row_scale, 1);
        }
    }
}

/* Bytes 21, F7, 9A under scale 6.5 / 768: what the reference library rounds to. The same tensor
 * with a power of two for a global, as divisor and as multiplier, is the same; the other way round
 * is not. */
static void test_nvfp4_golden(void **state)
{
    static const unsigned char codes[8] = {0x21, 0xf7, 0x9a};
    static const uint16_t rounded[6] = {0x3b8b, 0x3c0b, 0x3d50, 0xbd50, 0xbc0b, 0xbb8b};
    static const float globals[4] = {768.0f, 512.0f, 1.0f / 512, 1.0f / 512};
    static const char *const suffixes[4] = {"weight_global_scale", "weight_global_scale",
                                            "weight_scale_2", "weight_global_scale"};
    double row[4][16];

    (void)state;
    for (int v = 0; v < 4; v++) {
        const dspark__scheme *s;
        dspark__module m;
        dspark__packing p;
        dspark_error err;
        memcpy(add(v == 2 ? "weight" : "weight_packed", DSPARK_U8, 1, 8), codes, 8);
        *add("weight_scale", DSPARK_F8_E4M3, 1, 1) = 0x4d;
        memcpy(add(suffixes[v], DSPARK_F32, 1, 0), &globals[v], 4);
        tensors_open(&t, tmpdir_make(), 1);
        tensors_module(&t, "m", &m);
        check(dspark__scheme_detect(&s, &m, NULL, 1, 16, &err), DSPARK_OK, &err);
        check(s->validate(&m, NULL, 1, 16, &p, &err), DSPARK_OK, &err);
        s->dequantise(&m, NULL, 0, 1, 16, row[v]);
        tensors_clear(&t);
    }
    for (int i = 0; i < 6; i++) assert_int_equal(dspark__f32_to_bf16((float)row[0][i]), rounded[i]);
    assert_memory_equal(row[1], row[2], sizeof row[1]);
    assert_true(row[3][0] == row[1][0] * 512 * 512);
}

/* ---- the ends of the exponents, whatever the thread does to subnormals ----------------------- */

#if defined(__SSE2__)
static void test_flushing_thread(void **state)
{
    static const uint32_t tiny_scale = 0x00000003; /* 3 * 2^-149 */
    unsigned old = _mm_getcsr();
    const dspark__scheme *s;
    dspark__module m;
    dspark__packing p;
    dspark_error err;
    double row[64];
    float scales[DSPARK__PANEL];
    unsigned char *codes = calloc(64 * DSPARK__PANEL, 2);

    (void)state;
    assert_non_null(codes);
    for (int v = 0; v < 3; v++) {
        dspark__panel_out out = {NULL, codes, NULL, NULL, scales};
        uint8_t bytes[48 * 2] = {0};
        dspark_status st;
        add("weight", v == 1 ? DSPARK_F32 : DSPARK_F8_E4M3, 1, 64);
        if (v == 0) memcpy(add("weight_scale", DSPARK_F32, 1, 0), &tiny_scale, 4);
        if (v == 2) add("weight_scale", DSPARK_U8, 1, 2); /* two scales of 2^-127 */
        if (v == 1)
            memcpy(t.list[0].data, (const uint32_t[]){0x00018000, 0x80400000}, 8);
        else
            memset(t.list[0].data, 0x38, 64); /* 1.0 */
        tensors_open(&t, tmpdir_make(), 1);
        tensors_module(&t, "m", &m);
        if (v == 2) out.scales = bytes;
        _mm_setcsr(0x1f80 | 0x8040); /* flush to zero, subnormals are zero */
        st = dspark__scheme_detect(&s, &m, &rule, 1, 64, &err);
        if (st == DSPARK_OK) st = s->validate(&m, &rule, 1, 64, &p, &err);
        if (st == DSPARK_OK) s->dequantise(&m, &rule, 0, 1, 64, row);
        if (st == DSPARK_OK) s->pack(&m, &p, &rule, 0, 1, 1, 64, &out);
        _mm_setcsr(old);
        check(st, DSPARK_OK, &err);
        if (v == 0) assert_true(row[0] == 3 * 0x1p-149 && scales[0] == 3 * 0x1p-149f);
        if (v == 1)
            assert_true(row[0] == 0x1p-132 && row[1] == -0x1p-127); /* 1.5 rounds to even: 2 */
        if (v == 1) assert_int_equal(dspark__load_u16(codes), 0x0002);
        if (v == 2) assert_true(row[0] == 0x1p-127 && row[63] == 0x1p-127 && bytes[0] == 0);
        tensors_clear(&t);
    }
    free(codes);
}
#else
static void test_flushing_thread(void **state)
{
    (void)state;
    skip();
}
#endif

/* ---- the table ------------------------------------------------------------------------------- */

static void test_table(void **state)
{
    static const char *const names[] = {
        "bf16",      "f16",       "f32",        "fp8_tensor", "fp8_channel",
        "fp8_group", "fp8_block", "mxfp8",      "nvfp4_ct",   "nvfp4_modelopt",
        "mxfp4",     "int8",      "int_packed",
    };
    size_t n;
    const dspark__scheme *const *table = dspark__scheme_table(&n);

    (void)state;
    assert_int_equal(n, sizeof names / sizeof *names);
    for (size_t i = 0; i < n; i++) {
        assert_string_equal(table[i]->name, names[i]);
        assert_true(strlen(table[i]->text) >= 3);
        assert_true(table[i]->detect && table[i]->validate && table[i]->pack &&
                    table[i]->dequantise);
    }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, examine_setup, examine_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_plain),          TEST(test_f32_roundings), TEST(test_fp8),
        TEST(test_last_block_row), TEST(test_one_row),       TEST(test_mx),
        TEST(test_nvfp4),          TEST(test_nvfp4_golden),  TEST(test_flushing_thread),
        TEST(test_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
