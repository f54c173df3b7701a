/* The integer schemes: INT8, and packed words of 2 to 8 bits in both layouts, with zero points and
 * with columns in any order. Words are packed here bit by bit. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "support/examine.h"
#include "support/fixture.h"
#include "support/tmpdir.h"

static int below(uint32_t n)
{
    return (int)((next_random(&seed) >> 17) % n);
}

/* ---- INT8 ------------------------------------------------------------------------------------ */

static void int8_case(uint64_t rows, uint64_t k, uint64_t n_rows, uint64_t n_groups, int rank,
                      int zero_points, dspark_dtype sdtype)
{
    double scales[4096];
    uint64_t n = n_rows * n_groups, size = k / n_groups, shape[2] = {n_rows, n_groups};
    unsigned char *w = add("weight", DSPARK_I8, rows, k), *zp = NULL;
    unsigned char *s = tensors_add(&t, "m.weight_scale", sdtype, (uint32_t)rank, shape, NULL);

    fill_random(w, rows * k);
    fill_scales(s, sdtype, n, scales);
    if (zero_points) {
        zp = tensors_add(&t, "m.weight_zero_point", DSPARK_I8, (uint32_t)rank, shape, NULL);
        fill_random(zp, n);
        zp[0] = 0x80, zp[n - 1] = 0x7f;
    }
    w[0] = 0x7f, w[1] = 0x80;
    for (uint64_t i = 0; i < rows * k; i++) {
        uint64_t at = (n_rows == 1 ? 0 : i / k * n_groups) + i % k / size;
        want[i] = ((int8_t)w[i] - (zp ? (int8_t)zp[at] : 0)) * scales[at];
    }
    dspark__packing p = examine("int8", rows, k);
    assert_int_equal(p.bits, 8);
    assert_int_equal(p.format.scale, zero_points ? DSPARK__CODE_OFFSET : DSPARK__CODE_PLAIN);
    assert_int_equal(p.group, n_groups > 1 ? size : 0);
    assert_int_equal(p.row_scale, n_groups == 1);
    assert_int_equal(p.permuted, 0);
}

static void test_int8(void **state)
{
    static const uint64_t sizes[][2] = {{24, 64}, {50, 65}, {48, 127}, {97, 72}, {576, 64}};

    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint64_t rows = sizes[i][0], k = sizes[i][1];
        for (int zp = 0; zp < 2; zp++) {
            for (int rank = 0; rank <= 2; rank++) int8_case(rows, k, 1, 1, rank, zp, DSPARK_F32);
            for (int rank = 1; rank <= 2; rank++)
                int8_case(rows, k, rows, 1, rank, zp, DSPARK_BF16);
            if (k == 64) int8_case(rows, k, rows, 4, 2, zp, DSPARK_F16);
            if (k == 72) int8_case(rows, k, rows, 3, 2, zp, DSPARK_F32);
        }
    }
}

/* ---- packed ---------------------------------------------------------------------------------- */

static uint64_t words_of(uint64_t n, unsigned bits, int dense)
{
    return dense ? (n * bits + 31) / 32 : (n + 32 / bits - 1) / (32 / bits);
}

/* Put u as element i into words that are `step` apart. */
static void put_bits(unsigned char *words, uint64_t step, uint64_t i, unsigned bits, int dense,
                     unsigned u)
{
    uint64_t at = dense ? i * bits : i / (32 / bits) * 32 + i % (32 / bits) * bits;

    for (unsigned b = 0; b < bits; b++, at++)
        if (u >> b & 1) words[4 * (at / 32 * step) + at % 32 / 8] |= (unsigned char)(1 << at % 8);
}

typedef struct packed_case {
    uint64_t rows, k, n_groups;
    unsigned bits;
    int dense, zero_points;
    int order; /* 0: no g_idx; 1: all -1; 2: in order; 3: shuffled */
} packed_case;

static void shuffle_groups(int32_t *g_idx, uint64_t k, uint64_t size)
{
    for (uint64_t i = 0; i < k; i++) g_idx[i] = (int32_t)(i / size);
    for (uint64_t i = k - 1; i > 0; i--) {
        uint64_t j = (uint64_t)below((uint32_t)i + 1);
        int32_t swap = g_idx[i];
        g_idx[i] = g_idx[j];
        g_idx[j] = swap;
    }
}

static void run_packed(const packed_case *c)
{
    const uint64_t rows = c->rows, k = c->k, groups = c->n_groups, size = k / groups;
    const int half = 1 << (c->bits - 1);
    uint64_t words = words_of(k, c->bits, c->dense), zwords = words_of(rows, c->bits, c->dense);
    unsigned char *w = add("weight_packed", DSPARK_I32, rows, words), *z = NULL;
    unsigned char *s = add("weight_scale", DSPARK_BF16, rows, groups);
    double *scales = malloc(rows * groups * sizeof *scales);
    int *zp = calloc(rows * groups, sizeof *zp);
    int32_t *g_idx = NULL;
    int64_t shape[2] = {(int64_t)rows, (int64_t)k};

    assert_true(scales && zp);
    memcpy(add("weight_shape", DSPARK_I64, 2, 0), shape, sizeof shape);
    fill_scales(s, DSPARK_BF16, rows * groups, scales);
    if (c->zero_points) {
        z = add("weight_zero_point", DSPARK_I32, zwords, groups);
        for (uint64_t i = 0; i < rows * groups; i++) {
            zp[i] = below(2u * (unsigned)half) - half;
            put_bits(z + 4 * (i % groups), groups, i / groups, c->bits, c->dense,
                     (unsigned)(zp[i] + half));
        }
    }
    if (c->order) {
        g_idx = (int32_t *)(void *)add("weight_g_idx", DSPARK_I32, k, 0);
        for (uint64_t i = 0; i < k; i++) g_idx[i] = c->order == 1 ? -1 : (int32_t)(i / size);
        if (c->order == 3) shuffle_groups(g_idx, k, size);
    }
    for (uint64_t r = 0; r < rows; r++) {
        for (uint64_t i = 0; i < k; i++) {
            int q = below(2u * (unsigned)half) - half;
            uint64_t at = r * groups + (c->order >= 2 ? (uint64_t)g_idx[i] : i / size);
            put_bits(w + 4 * r * words, 1, i, c->bits, c->dense, (unsigned)(q + half));
            want[r * k + i] = (q - zp[at]) * scales[at];
        }
    }
    rule = (dspark__quant_rule){.method = DSPARK__QUANT_COMPRESSED_TENSORS,
                                .quantised = 1,
                                .num_bits = c->bits,
                                .symmetric = !c->zero_points,
                                .strategy =
                                    groups > 1 ? DSPARK__STRATEGY_GROUP : DSPARK__STRATEGY_CHANNEL,
                                .group_size = groups > 1 ? (uint32_t)size : 0,
                                .act_order = c->order == 3,
                                .format = "pack-quantized",
                                .dense_bits = c->dense ? 1 : -1};
    dspark__packing p = examine("int_packed", rows, k);
    assert_int_equal(p.bits, c->bits == 4 ? 4 : 8);
    assert_int_equal(p.group, groups > 1 ? size : 0);
    assert_int_equal(p.permuted, c->order == 3);
    free(scales);
    free(zp);
}

static void test_packed(void **state)
{
    static const uint64_t sizes[][3] = {{24, 64, 2}, {50, 72, 9},  {48, 96, 4}, {97, 65, 1},
                                        {50, 30, 1}, {576, 64, 1}, {24, 256, 2}};

    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (unsigned bits = 2; bits <= 8; bits++)
            for (int v = 0; v < 4; v++) {
                packed_case c = {sizes[i][0], sizes[i][1], sizes[i][2], bits, v & 1, v >> 1, 0};
                run_packed(&c);
            }
}

static void test_act_order(void **state)
{
    (void)state;
    for (unsigned bits = 3; bits <= 8; bits++)
        for (int order = 1; order <= 3; order++)
            for (int zp = 0; zp < 2; zp++) {
                packed_case c = {50, 128, 4, bits, 1, zp, order};
                run_packed(&c);
                c.rows = 24, c.k = 72, c.n_groups = 9, c.dense = 0;
                run_packed(&c);
            }
}

/* More groups than are counted at a time. */
static void test_many_groups(void **state)
{
    packed_case c = {2, 8 * 3000, 3000, 4, 1, 1, 3};
    (void)state;
    run_packed(&c);
}

/* ---- golden words ---------------------------------------------------------------------------- */

/* One row of words: the values that the reference library packs into them. */
static void golden(unsigned bits, const uint32_t *words, uint64_t n_words, const int *values,
                   uint64_t k, int dense)
{
    float one = 1;
    int64_t shape[2] = {1, (int64_t)k};

    memcpy(add("weight_packed", DSPARK_I32, 1, n_words), words, 4 * n_words);
    memcpy(add("weight_scale", DSPARK_F32, 1, 1), &one, 4);
    memcpy(add("weight_shape", DSPARK_I64, 2, 0), shape, sizeof shape);
    for (uint64_t i = 0; i < k; i++) want[i] = values[i];
    rule = (dspark__quant_rule){.method = DSPARK__QUANT_COMPRESSED_TENSORS,
                                .quantised = 1,
                                .num_bits = bits,
                                .symmetric = 1,
                                .dense_bits = dense};
    examine("int_packed", 1, k);
}

static void test_golden_words(void **state)
{
    static const uint32_t w4[] = {0x76543210}, w8[] = {0xff807f00};
    static const uint32_t w3[] = {0x88fac688, 0xc688fac6, 0xfac688fa};
    int v4[8], v3[32];
    static const int v8[] = {-128, -1, 0, 127};

    (void)state;
    for (int i = 0; i < 8; i++) v4[i] = i - 8;
    for (int i = 0; i < 32; i++) v3[i] = i % 8 - 4;
    golden(4, w4, 1, v4, 8, 0);
    golden(8, w8, 1, v8, 4, 0);
    golden(3, w3, 3, v3, 32, 0); /* three words: 4 would be the older layout */
    /* the older layout: ten codes a word from bit 0, two bits left over */
    uint32_t words[4] = {0};
    for (int i = 0; i < 32; i++) words[i / 10] |= (uint32_t)(v3[i] + 4) << (3 * (i % 10));
    assert_int_equal(words[0], 0x08fac688);
    golden(3, words, 4, v3, 32, 0);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, examine_setup, examine_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_int8),        TEST(test_packed),       TEST(test_act_order),
        TEST(test_many_groups), TEST(test_golden_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
