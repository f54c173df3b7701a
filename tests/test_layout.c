/* Codes into panels, against the layout's definition in kern.h written out here; and the tables of
 * what codes are worth, against the formats' formulas and sums. */
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
#include "quant/codes.h"
#include "quant/layout.h"
#include "support/fixture.h"

/* ---- layouts --------------------------------------------------------------------------------- */

static unsigned code8(const uint8_t *panel, size_t k, size_t output)
{
    return panel[k / 2 * 96 + output * 2 + k % 2];
}

static unsigned code4(const uint8_t *panel, size_t k, size_t output)
{
    size_t g = k / 8, j = k % 8 / 2, v = output / 16, i = output % 16 * 2 + k % 2;
    uint16_t word = dspark__load_u16(panel + 2 * (g * 96 + v * 32 + i));
    return word >> 4 * j & 15;
}

static unsigned code_turned(const uint8_t *panel, size_t k, size_t output)
{
    const uint8_t *word = panel + k / 8 * 192 + output / 4 * 16 + k % 8 / 4 * 8 + output % 4 / 2 * 4;
    unsigned code = 0;
    for (size_t i = 0; i < 4; i++) {
        size_t at = (output % 2 * 16 + k % 2 * 8 + k / 2 % 2 * 4 + i + 3) % 32;
        code |= (word[at / 8] >> at % 8 & 1u) << i;
    }
    return code;
}

static const size_t ks[] = {1, 2, 7, 8, 9, 15, 16, 24, 65, 255, 256, 257, 264, 520};
static const size_t row_counts[] = {1, 2, 24, 47, 48};

/* All places of a panel: what is not a weight is 0. */
static void compare(const uint8_t *panel, const uint8_t *codes, size_t stride, size_t n_rows,
                    size_t k, unsigned bits, unsigned flip, int turned)
{
    for (size_t j = 0; j < 48; j++) {
        for (size_t i = 0; i < (k + 7) / 8 * 8; i++) {
            unsigned got = bits == 8 ? code8(panel, i, j)
                           : turned  ? code_turned(panel, i, j)
                                     : code4(panel, i, j);
            unsigned want = 0;
            if (j < n_rows && i < k) {
                unsigned c = bits == 8 ? codes[j * stride + i]
                                       : codes[j * stride + i / 2] >> 4 * (i % 2) & 15;
                want = c ^ flip;
            }
            if (got != want)
                fail_msg("%u bits, k %zu, %zu rows: output %zu, place %zu: %u, want %u", bits, k,
                         n_rows, j, i, got, want);
        }
    }
}

static void test_rows(void **state)
{
    uint64_t seed = 12345;

    (void)state;
    for (size_t a = 0; a < sizeof ks / sizeof *ks; a++) {
        for (size_t b = 0; b < sizeof row_counts / sizeof *row_counts; b++) {
            size_t k = ks[a], n = row_counts[b], places = (k + 7) / 8 * 8;
            for (int flip = 0; flip < 2; flip++) {
                for (unsigned bits = 4; bits <= 8; bits += 4) {
                    /* rows that are further apart than they are long, at an odd address, and no
                     * byte beyond the last one */
                    size_t bytes = bits == 8 ? k : (k + 1) / 2, stride = bytes + 3;
                    size_t total = 1 + (n - 1) * stride + bytes;
                    uint8_t *memory = malloc(total), *panel = calloc(places * 48, bits / 4);
                    unsigned x = flip ? bits == 8 ? 0x80 : 8 : 0;
                    assert_true(memory && panel);
                    for (size_t i = 0; i < total; i++)
                        memory[i] = (uint8_t)(next_random(&seed) >> 9);
                    if (bits == 8)
                        dspark__layout_rows8(panel, memory + 1, stride, n, k, (uint8_t)x);
                    else
                        dspark__layout_rows4(panel, memory + 1, stride, n, k, (uint8_t)x);
                    compare(panel, memory + 1, stride, n, k, bits, x, 0);
                    free(memory);
                    free(panel);
                }
            }
        }
    }
}

/* Every level's kernel writes the whole panel, over rubbish, as the definition has it. */
static void test_kernels(void **state)
{
    static const size_t sizes[] = {63, 64, 127, 128, 129, 190, 256, 1000, 7168};
    uint64_t seed = 54321;
    (void)state;
    for (int isa = DSPARK_ISA_REF; isa <= DSPARK_ISA_AVX512BF16; isa++) {
        dspark__kern kern;
        if (!dspark__isa_available((dspark_isa)isa)) continue;
        assert_int_equal(dspark__kern_select(&kern, (dspark_isa)isa, NULL), DSPARK_OK);
        for (size_t a = 0; a < sizeof sizes / sizeof *sizes; a++)
            for (size_t n = 47; n <= 48; n++)
                for (unsigned bits = 4; bits <= 8; bits += 4)
                    for (unsigned flip = 0; flip < 2; flip++) {
                        const size_t k = sizes[a], bytes = bits == 8 ? k : (k + 1) / 2, stride = bytes + a % 3;
                        const size_t total = (n - 1) * stride + bytes, size = (k + 7) / 8 * 8 * 48 * bits / 8;
                        const uint8_t x = flip ? bits == 8 ? 0x80 : 8 : 0;
                        uint8_t *rows = malloc(total), *panel = aligned_alloc(64, (size + 63) / 64 * 64);
                        dspark__panel_out out = {.kern = &kern, .codes = panel};
                        assert_true(rows && panel);
                        for (size_t i = 0; i < total; i++) rows[i] = (uint8_t)(next_random(&seed) >> 9);
                        memset(panel, 0x5a, size);
                        dspark__layout_panel(&out, bits, rows, stride, n, k, x);
                        compare(panel, rows, stride, n, k, bits, x, 0);
                        if (bits == 4 && !flip) {
                            memset(panel, 0x5a, size);
                            dspark__layout_turned(&out, rows, stride, n, k);
                            compare(panel, rows, stride, n, k, bits, x, 1);
                        }
                        free(rows);
                        free(panel);
                    }
    }
}

static void test_single_codes(void **state)
{
    uint8_t *panel8 = calloc(24 * 48, 1), *panel4 = calloc(24 * 48, 1);

    (void)state;
    assert_true(panel8 && panel4);
    for (size_t i = 0; i < 24; i++)
        for (size_t j = 0; j < 48; j++) {
            dspark__layout_put(panel8, 8, j, i, (uint8_t)(i * 48 + j * 7));
            dspark__layout_put(panel4, 4, j, i, (uint8_t)(i * 5 + j));
        }
    for (size_t i = 0; i < 24; i++)
        for (size_t j = 0; j < 48; j++) {
            assert_int_equal(code8(panel8, i, j), (i * 48 + j * 7) & 255);
            assert_int_equal(code4(panel4, i, j), (i * 5 + j) & 15);
        }
    free(panel8);
    free(panel4);
}

/* ---- tables ---------------------------------------------------------------------------------- */

static double value(uint16_t bf16)
{
    return dspark__bf16_to_f32(bf16);
}

static void test_fp8_tables(void **state)
{
    static const struct {
        dspark_dtype dtype;
        unsigned last; /* the last finite code of the positive half */
        double sum, max, min;
    } rows[] = {
        {DSPARK_F8_E4M3, 0x7e, 5407.875, 448, 0x1p-9},
        {DSPARK_F8_E5M2, 0x7b, 360447.9997558594, 57344, 0x1p-16},
        {DSPARK_F8_E4M3FNUZ, 0x7f, 2943.9375, 240, 0x1p-10},
        {DSPARK_F8_E5M2FNUZ, 0x7f, 0, 57344, 0x1p-17},
    };
    uint16_t fn[256], table[256];

    (void)state;
    for (size_t r = 0; r < 4; r++) {
        double sum = 0;
        dspark__codes_fp8(table, rows[r].dtype);
        for (unsigned c = 0; c <= rows[r].last; c++) {
            double w = value(table[c]);
            assert_true(isfinite(w) && !signbit(w) && (c == 0 ? w == 0 : w > value(table[c - 1])));
            if (c) assert_true(value(table[c | 0x80]) == -w);
            sum += w;
        }
        if (rows[r].sum != 0) assert_true(fabs(sum - rows[r].sum) < 1e-10);
        assert_true(value(table[rows[r].last]) == rows[r].max);
        assert_true(value(table[1]) == rows[r].min);
        for (unsigned c = rows[r].last + 1; c < 128; c++) assert_false(isfinite(value(table[c])));
    }
    /* FNUZ: half of the other form, byte for byte, but for its one NaN and the codes the other form
     * keeps for NaN and infinity */
    for (int e5 = 0; e5 < 2; e5++) {
        unsigned last = e5 ? 0x7b : 0x7e;
        dspark__codes_fp8(fn, e5 ? DSPARK_F8_E5M2 : DSPARK_F8_E4M3);
        dspark__codes_fp8(table, e5 ? DSPARK_F8_E5M2FNUZ : DSPARK_F8_E4M3FNUZ);
        assert_int_equal(table[0x80], 0x7fc0);
        assert_int_equal(fn[0x80], 0x8000);
        for (unsigned c = 1; c <= last; c++) assert_true(value(table[c]) * 2 == value(fn[c]));
    }
    dspark__codes_fp8(fn, DSPARK_F8_E5M2);
    assert_int_equal(fn[0x7c], 0x7f80);
    assert_int_equal(fn[0xfc], 0xff80);
    assert_int_equal(fn[0x7d], 0x7fc0);
    assert_int_equal(fn[0xff], 0x7fc0);
    assert_string_equal(dspark__fp8_name(DSPARK_F8_E4M3FNUZ), "E4M3 FNUZ");
    assert_true(dspark__is_fp8(DSPARK_F8_E5M2) && !dspark__is_fp8(DSPARK_F8_E8M0));
}

static void test_small_tables(void **state)
{
    static const double e2m1[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    uint16_t table[256];

    (void)state;
    dspark__codes_e2m1(table);
    for (unsigned c = 0; c < 16; c++)
        assert_true(value(table[c]) == (c & 8 ? -e2m1[c & 7] : e2m1[c & 7]));
    assert_int_equal(table[8], 0x8000);
    dspark__codes_int(table, 8);
    for (int c = -128; c < 128; c++) assert_true(value(table[c & 255]) == c);
    dspark__codes_int(table, 4);
    for (int c = -8; c < 8; c++) assert_true(value(table[c & 15]) == c);
    for (unsigned c = 16; c < 256; c++) assert_int_equal(table[c], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_single_codes),
        cmocka_unit_test(test_fp8_tables),
        cmocka_unit_test(test_small_tables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
