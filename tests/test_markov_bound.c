/* Bounds of the Markov bias: no product exceeds its bound, whatever the weights and the vector are like;
 * vectors that go to the limit show that the bounds are no larger than they need be, and that bounds a
 * little smaller would be noticed; and every level computes the same. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/fpenv.h"
#include "base/numfmt.h"
#include "model/markov_bound.h"
#include "support/fixture.h"
#include "support/w2.h"

static const dspark_isa levels[] = {DSPARK_ISA_REF, DSPARK_ISA_AVX2, DSPARK_ISA_AVX512,
                                    DSPARK_ISA_AVX512BF16};
#define N_LEVELS (sizeof levels / sizeof *levels)
enum { MOST_RANK = 300, MOST_ROWS = 200 };

static dspark_error err;

static float value(uint16_t bits)
{
    return dspark__bf16_to_f32(bits);
}

/* ---- levels ---- */

static uint16_t any_head(uint64_t *seed) /* finite, >= +0 */
{
    uint16_t bits = (uint16_t)(next_random(seed) & 0x7fff);
    return next_random(seed) % 4 ? (uint16_t)(0x3e00 + bits % 0x200) : (uint16_t)(bits % 0x5e00);
}

static uint16_t any_base(uint64_t *seed)
{
    static const uint16_t special[] = {0x8000, 0x0000, 0x7f80, 0xff80, 0x0001, 0x8001, 0x7f7f, 0xff7f};
    if (next_random(seed) % 8 == 0) return special[next_random(seed) % 8];
    return dspark__f64_to_bf16(w2_bell(seed) * ldexp(1, (int)(next_random(seed) % 12) - 4));
}

static void fill_panels(unsigned char *panels, size_t stride, size_t n, uint64_t *seed)
{
    for (size_t i = 0; i < n * stride; i++) panels[i] = (unsigned char)next_random(seed);
    for (size_t p = 0; p < n; p++)
        for (size_t i = 0; i < 3 * DSPARK__PANEL; i++) {
            uint16_t bits = any_head(seed);
            memcpy(panels + p * stride + 2 * i, &bits, 2);
        }
}

static void test_levels_are_equal(void **state)
{
    static const size_t widths[] = {8, 16, 24, 32, 40, 64, 256, 304};
    uint64_t seed = 41;
    (void)state;
    for (int round = 0; round < 400; round++) {
        const size_t k = widths[next_random(&seed) % 8], n = 1 + next_random(&seed) % 3;
        const size_t stride = DSPARK__BOUND_HEAD + k * DSPARK__PANEL / 2;
        const size_t n_out = (n - 1) * DSPARK__PANEL + 1 + next_random(&seed) % DSPARK__PANEL;
        unsigned char *panels = aligned_alloc(64, n * stride);
        unsigned char *base = malloc(n_out * 2 + 1) /* odd, and ends where its memory ends */;
        int8_t *x = malloc(k);
        float want[3];
        assert_true(panels && base && x);
        fill_panels(panels, stride, n, &seed);
        for (size_t i = 0; i < n_out; i++) {
            uint16_t bits = any_base(&seed);
            memcpy(base + 1 + 2 * i, &bits, 2);
        }
        int32_t sum = 0;
        for (size_t i = 0; i < k; i++) {
            x[i] = round % 3 == 0 ? (int8_t)(next_random(&seed) % 2 ? 127 : -127)
                                  : (int8_t)((int)(next_random(&seed) % 255) - 127);
            sum += x[i];
        }
        dspark__bound_panels call = {.panels = panels, .stride = stride, .n_panels = n, .k = k, .x = x,
                                     .offset = 15 * sum, .step = 0.01f, .residual = 1.25f, .norm = 0.013f,
                                     .slack = 0x1p-110f, .reach = 1.5f, .n_out = n_out,
                                     .base = (const uint16_t *)(const void *)(base + 1)};
        call.scale = round % 2 ? 1.0f : 0.37f;
        call.floor = round % 5 == 0 ? -INFINITY : (float)w2_bell(&seed) * 40;
        size_t coded = 0;
        for (size_t l = 0; l < N_LEVELS; l++) {
            dspark__kern kern;
            float upper[3] = {-7, -7, -7};
            if (!dspark__isa_available(levels[l])) continue;
            check(dspark__kern_select(&kern, levels[l], &err), DSPARK_OK, &err);
            call.upper = upper;
            size_t found = kern.bound_panels(&call);
            if (l == 0) {
                memcpy(want, upper, sizeof want);
                coded = found;
            }
            if (found != coded || memcmp(want, upper, n * sizeof *want) != 0)
                fail_msg("round %d, %s: %zu panels, %a; ref %zu, %a", round, dspark__isa_name(levels[l]),
                         found, (double)upper[0], coded, (double)want[0]);
        }
        free(panels);
        free(base);
        free(x);
    }
}

/* ---- bounds against products ---- */

typedef struct given {
    dspark__merged_linear w2;
    dspark__markov_bound bound;
    dspark__threads *threads;
    dspark__kern kern;
    uint32_t rows, k;
} given;

static void give(given *g, w2_form form, uint32_t rows, uint32_t k, uint64_t *seed)
{
    g->rows = rows;
    g->k = k;
    check(dspark__kern_select(&g->kern, DSPARK_ISA_AUTO, &err), DSPARK_OK, &err);
    check(dspark__threads_create(&g->threads, 2, NULL, NULL, &err), DSPARK_OK, &err);
    w2_make(&g->w2, form, rows, k, seed);
    check(dspark__markov_bound_build(&g->bound, &g->w2, g->threads, NULL, &err), DSPARK_OK, &err);
    assert_non_null(g->bound.panels);
    assert_int_equal(g->bound.bytes, dspark__markov_bound_bytes(&g->w2.shards[0].packing, rows, k));
}

static void take_away(given *g)
{
    dspark__merged_linear_free(&g->w2);
    dspark__markov_bound_free(&g->bound);
    dspark__threads_free(g->threads);
}

/* The products with one vector, as the model computes them. */
static void multiply(const given *g, const uint16_t *x, uint16_t *out)
{
    void *scratch = aligned_alloc(64, (dspark__merged_linear_scratch(1) + 63) / 64 * 64);
    assert_non_null(scratch);
    dspark__merged_linear_rows(&g->w2, &g->kern, 0, 0, g->w2.shards[0].n_panels, x, 0, 1, scratch, out,
                               g->rows);
    free(scratch);
}

/* bf16 of the bound of one row alone: the others' base is -infinity. By codes, or by norms only. */
static float bound_of(const given *g, dspark__bound_panels *call, uint32_t row, int coded)
{
    uint16_t base[DSPARK__PANEL];
    float upper;
    for (size_t i = 0; i < DSPARK__PANEL; i++) base[i] = 0xff80;
    base[row % DSPARK__PANEL] = 0;
    call->panels = g->bound.panels + row / DSPARK__PANEL * g->bound.stride;
    call->n_panels = 1;
    call->base = base;
    call->n_out = DSPARK__PANEL;
    call->upper = &upper;
    call->floor = coded ? -INFINITY : INFINITY;
    assert_int_equal(g->kern.bound_panels(call), coded);
    return upper;
}

/* How many products exceed their bounds, in units of a vector with all rows. */
static size_t count_violations(const given *g, const uint16_t *x, int *promised)
{
    uint16_t product[MOST_ROWS];
    int8_t codes[MOST_RANK + 8];
    dspark__bound_panels call;
    size_t n = 0;
    *promised = dspark__markov_bound_vector(&g->bound, x, 1, codes, &call);
    if (!*promised) return 0;
    multiply(g, x, product);
    for (uint32_t r = 0; r < g->rows; r++) {
        assert_true(isfinite(value(product[r])));
        for (int coded = 0; coded < 2; coded++) n += value(product[r]) > bound_of(g, &call, r, coded);
    }
    return n;
}

static void test_no_product_exceeds_its_bound(void **state)
{
    static const uint32_t ranks[] = {1, 3, 8, 13, 32, 48, 96, 256, 300};
    uint64_t seed = 7;
    size_t promises = 0, vectors = 0;
    (void)state;
    for (int form = 0; form < W2_FORMS; form++)
        for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
            given g;
            unsigned old = dspark__fpenv_enter();
            give(&g, (w2_form)form, 1 + (uint32_t)(next_random(&seed) % 100), ranks[i], &seed);
            for (int v = 0; v < 3 * W2_VECTORS; v++) {
                uint16_t x[MOST_RANK];
                int promised;
                w2_vector(x, v % W2_VECTORS, g.k, &seed);
                size_t bad = count_violations(&g, x, &promised);
                if (bad) fail_msg("%s, rank %u, vector %d: %zu too small", w2_names[form], g.k, v, bad);
                promises += (size_t)promised;
                vectors++;
                assert_true(promised || v % W2_VECTORS > 2); /* of ordinary vectors always */
            }
            take_away(&g);
            dspark__fpenv_leave(old);
        }
    print_message("  %zu of %zu vectors were promised bounds\n", promises, vectors);
}

/* ---- at the limit ---- */

/* What the codes of a row leave of it, turned back: x in this direction makes residual . x the product of
 * the norms. rank is a power of two <= 256. */
static void residual_of(const given *g, const uint16_t *w, uint32_t row, double *to)
{
    const unsigned char *panel = g->bound.panels + row / DSPARK__PANEL * g->bound.stride;
    const size_t lane = row % DSPARK__PANEL;
    uint16_t step;
    memcpy(&step, panel + 2 * lane, 2);
    for (uint32_t i = 0; i < g->k; i++) {
        unsigned char byte = panel[DSPARK__BOUND_HEAD + (i / 8 * DSPARK__PANEL + lane) * 4 + i % 4];
        int code = byte >> (i % 8 < 4 ? 0 : 4) & 15;
        to[i] = (double)value(step) * (2 * code - 15);
    }
    for (uint32_t half = 1; half < g->k; half *= 2)
        for (uint32_t i = 0; i < g->k; i++)
            if (!(i & half)) {
                double a = to[i], b = to[i + half];
                to[i] = a + b;
                to[i + half] = a - b;
            }
    for (uint32_t i = 0; i < g->k; i++) to[i] = (double)value(w[i]) - to[i] / g->k;
}

/* Multiply a row's residual (1) or norm (2) by a factor, to the nearest bf16. */
static void change_head(given *g, uint32_t row, int which, double factor)
{
    unsigned char *at = g->bound.memory + row / DSPARK__PANEL * g->bound.stride +
                        ((size_t)which * DSPARK__PANEL + row % DSPARK__PANEL) * 2;
    uint16_t bits = dspark__f64_to_bf16((double)value(dspark__load_u16(at)) * factor);
    memcpy(at, &bits, 2);
}

/* Vectors along the rows' residuals, and along the rows: bounds hold, are tight, and would not hold were
 * they a few hundredths smaller. */
static void test_limits(void **state)
{
    enum { ROWS = 96, RANK = 64 };
    uint64_t seed = 99;
    size_t missed[2] = {0, 0}, n = 0;
    (void)state;
    for (int form = W2_NORMAL; form <= W2_OUTLIERS; form++) {
        given g;
        uint16_t w[RANK], x[RANK], product[ROWS];
        int8_t codes[RANK];
        dspark__bound_panels call;
        if (form == W2_EQUAL_ROWS) continue;
        give(&g, (w2_form)form, ROWS, RANK, &seed);
        const uint16_t *packed = (const uint16_t *)(const void *)g.w2.shards[0].codes;
        for (uint32_t r = 0; r < ROWS; r++, n++) {
            double left[RANK], norm = 0, size = 0;
            for (uint32_t i = 0; i < RANK; i++) {
                size_t panel = r / DSPARK__PANEL * g.w2.shards[0].code_stride / 2;
                w[i] = packed[panel + ((size_t)(i / 2) * DSPARK__PANEL + r % DSPARK__PANEL) * 2 + i % 2];
            }
            residual_of(&g, w, r, left);
            for (uint32_t i = 0; i < RANK; i++) size += (double)value(w[i]) * (double)value(w[i]);
            size = sqrt(size);
            for (uint32_t i = 0; i < RANK; i++) norm += left[i] * left[i];
            for (uint32_t i = 0; i < RANK; i++) x[i] = dspark__f64_to_bf16(left[i] / sqrt(norm) * 50);
            for (int which = 1; which <= 2; which++) {
                assert_true(dspark__markov_bound_vector(&g.bound, which == 1 ? x : w, 1, codes, &call));
                multiply(&g, which == 1 ? x : w, product);
                float at = value(product[r]), bound = bound_of(&g, &call, r, which == 1);
                assert_true(at <= bound);
                double most = (double)at * 1.02; /* roundings up to bf16 */
                if (which == 1) /* and 7 bits of the vector */
                    most = (double)at + fabs((double)at) * 0.01 + 50 * (sqrt(norm) * 0.1 + size * 0.02);
                if ((double)bound > most)
                    fail_msg("%s, row %u: %g, bound %g, residual %g", w2_names[form], r, (double)at,
                             (double)bound, 50 * sqrt(norm));
                change_head(&g, r, which, which == 1 ? 0.7 : 0.97);
                missed[which - 1] += at <= bound_of(&g, &call, r, which == 1);
            }
        }
        take_away(&g);
    }
    print_message("  of %zu rows, %zu and %zu bounds made smaller went unnoticed\n", n, missed[0], missed[1]);
    assert_int_equal(missed[1], 0);
    assert_true(missed[0] * 20 < n);
}

/* ---- what has no bounds ---- */

static void test_refusals(void **state)
{
    uint64_t seed = 3;
    uint16_t x[32], bad[] = {0x7f80, 0xff80, 0x7fc0}, w[3 * 32];
    int8_t codes[32];
    dspark__bound_panels call;
    given g;
    (void)state;
    give(&g, W2_HUGE, 3, 32, &seed);
    w2_vector(x, 0, 32, &seed);
    assert_true(dspark__markov_bound_vector(&g.bound, x, 1, codes, &call));
    for (size_t i = 0; i < 3; i++) { /* a vector with numbers that are none */
        uint16_t keep = x[17];
        x[17] = bad[i];
        assert_false(dspark__markov_bound_vector(&g.bound, x, 1, codes, &call));
        x[17] = keep;
    }
    assert_false(dspark__markov_bound_vector(&g.bound, x, 0x1p70f, codes, &call)); /* a sum may overflow */
    x[3] = 0x7f00;
    assert_false(dspark__markov_bound_vector(&g.bound, x, 1, codes, &call));
    for (size_t i = 0; i < 4; i++) { /* weights that are none, or too large */
        for (size_t j = 0; j < 3 * 32; j++) w[j] = 0x3f80;
        w[40] = i < 3 ? bad[i] : 0x6f00;
        dspark__merged_linear_free(&g.w2);
        dspark__markov_bound_free(&g.bound);
        check(dspark__merged_linear_init_even(&g.w2, "bad", 32, 1, 3, NULL, &err), DSPARK_OK, &err);
        check(dspark__merged_linear_fill_dense(&g.w2, 0, w, &err), DSPARK_OK, &err);
        check(dspark__markov_bound_build(&g.bound, &g.w2, g.threads, NULL, &err), DSPARK_OK, &err);
        assert_null(g.bound.panels);
        assert_int_equal(g.bound.bytes, 0);
    }
    dspark__packing packing = {.bits = 4};
    assert_int_equal(dspark__markov_bound_bytes(&packing, 100, 64), 0);
    packing = (dspark__packing){.bits = 8, .permuted = 1};
    assert_int_equal(dspark__markov_bound_bytes(&packing, 100, 64), 0);
    assert_int_equal(dspark__markov_bound_bytes(&dspark__packing_bf16, UINT64_MAX, 64), 0);
    take_away(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_levels_are_equal), cmocka_unit_test(test_no_product_exceeds_its_bound),
        cmocka_unit_test(test_limits), cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("markov_bound", tests, NULL, NULL);
}
