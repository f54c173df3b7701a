/* The kernels between the matrix products of block and heads: exp and its kin against double
 * precision; silu, sums, fp8 codes and the search of logits on every level of this machine, against
 * ref bit for bit and against simple text of this file, with guard pages around what is touched. */
#include "base/expf.h"
#include "support/guard.h"
#include "support/values.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { ALL = 65536 };

static double ulps(float y, double want)
{
    int exponent;
    frexp(want, &exponent);
    return fabs((double)y - want) / ldexp(1, exponent - 24);
}

static uint32_t bits(float f)
{
    return dspark__f32_bits(f);
}

/* ---- exp, sigmoid, tanh ---- */

static void test_exp_corners(void **state)
{
    (void)state;
    const float above = nextafterf(DSPARK__EXP_MOST, INFINITY);
    const float below = nextafterf(DSPARK__EXP_LEAST, -INFINITY);
    assert_true(exp(DSPARK__EXP_MOST) <= FLT_MAX && exp(above) > FLT_MAX);
    assert_true(exp(DSPARK__EXP_LEAST) >= FLT_MIN && exp(below) < FLT_MIN);
    assert_true(isfinite(dspark__exp_f32(DSPARK__EXP_MOST)));
    assert_true(dspark__exp_f32(DSPARK__EXP_LEAST) >= FLT_MIN);
    static const struct {
        float x;
        uint32_t want;
    } CORNERS[] = {
        {0.0f, 0x3f800000},
        {-0.0f, 0x3f800000},
        {0x1p-149f, 0x3f800000},
        {-0x1p-149f, 0x3f800000},
        {-0x1p-30f, 0x3f800000},
        {INFINITY, 0x7f800000},
        {FLT_MAX, 0x7f800000},
        {100.0f, 0x7f800000},
        {-INFINITY, 0},
        {-FLT_MAX, 0},
        {-88.0f, 0},
        {1.0f, 0x402df854},
        {-1.0f, 0x3ebc5ab2},
    };
    for (size_t i = 0; i < sizeof CORNERS / sizeof CORNERS[0]; i++)
        assert_int_equal(bits(dspark__exp_f32(CORNERS[i].x)), CORNERS[i].want);
    assert_int_equal(bits(dspark__exp_f32(above)), 0x7f800000);
    assert_int_equal(bits(dspark__exp_f32(below)), 0);
    static const uint32_t NANS[] = {0x7fc00000, 0xffc00000, 0x7f800001, 0xffffffff};
    for (size_t i = 0; i < 4; i++) {
        float nan = dspark__f32_from_bits(NANS[i]);
        assert_int_equal(bits(dspark__exp_f32(nan)), 0x7fc00000);
        assert_int_equal(bits(dspark__sigmoid_f32(nan)), 0x7fc00000);
        assert_int_equal(bits(dspark__tanh_f32(nan)), 0x7fc00000);
    }
}

/* Every 1013th fp32, and every one around the middles between two powers of two. */
static void test_exp_sweep(void **state)
{
    (void)state;
    double worst = 0;
    for (uint64_t u = 0; u < 0x100000000u; u += 1013) {
        float x = dspark__f32_from_bits((uint32_t)u);
        if (!(x >= DSPARK__EXP_LEAST && x <= DSPARK__EXP_MOST)) continue;
        double off = ulps(dspark__exp_f32(x), exp(x));
        if (off > worst) worst = off;
    }
    for (int n = -126; n <= 127; n++) {
        float x = (float)((n + 0.5) * 0.6931471805599453);
        for (int i = 0; i < 200; i++) x = nextafterf(x, -INFINITY);
        for (int i = 0; i < 400; i++) {
            if (x >= DSPARK__EXP_LEAST && x <= DSPARK__EXP_MOST) {
                double off = ulps(dspark__exp_f32(x), exp(x));
                if (off > worst) worst = off;
            }
            x = nextafterf(x, INFINITY);
        }
    }
    print_message("exp: at most %.3f ulp\n", worst);
    assert_true(worst > 0.5 && worst < 1.0);
}

static void test_sigmoid_and_tanh(void **state)
{
    (void)state;
    assert_true(dspark__sigmoid_f32(0) == 0.5f);
    assert_true(dspark__sigmoid_f32(INFINITY) == 1 && dspark__sigmoid_f32(200) == 1);
    assert_int_equal(bits(dspark__sigmoid_f32(-INFINITY)), 0);
    assert_int_equal(bits(dspark__sigmoid_f32(-90)), 0);
    assert_true(dspark__tanh_f32(INFINITY) == 1 && dspark__tanh_f32(-FLT_MAX) == -1);
    assert_int_equal(bits(dspark__tanh_f32(0.0f)), 0);
    assert_int_equal(bits(dspark__tanh_f32(-0.0f)), 0x80000000);
    for (int i = -40000; i <= 40000; i++) {
        float x = (float)i * 0x1.1p-11f;
        assert_true(fabs(dspark__sigmoid_f32(x) - 1 / (1 + exp(-x))) <= 0x1p-22 / (1 + exp(-x)));
        assert_true(fabs(dspark__tanh_f32(x) - tanh(x)) <= 0x1p-22);
        assert_true(dspark__tanh_f32(-x) == -dspark__tanh_f32(x));
    }
}

/* ---- silu and sums ---- */

static void test_silu_all(void **state)
{
    (void)state;
    static uint16_t g[ALL], u[ALL], want[ALL], y[ALL];
    dspark__kern ref = values_level(DSPARK_ISA_REF);
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < ALL; i++) {
            g[i] = (uint16_t)i;
            u[i] = round == 0 ? 0x3f80 : values_bf16(round == 1 ? VALUES_SPECIAL : VALUES_FINITE);
        }
        ref.silu_mul(want, g, u, ALL);
        for (VALUES_LEVELS(isa)) {
            values_level(isa).silu_mul(y, g, u, ALL);
            assert_memory_equal(y, want, sizeof want);
        }
        for (size_t i = 0; i < ALL; i++) {
            double x = dspark__bf16_to_f32(g[i]), w = dspark__bf16_to_f32(u[i]);
            double exact = x / (1 + exp(-x)) * w, got = dspark__bf16_to_f32(want[i]);
            if (!isfinite(x) ||
                !isfinite(w)) { /* silu of +infinity is infinite, of -infinity NaN */
                if (!(x > 0 && !isnan(w) && w != 0)) assert_true(isnan(got) || got == exact);
                continue;
            }
            if (x < -DSPARK__EXP_MOST) exact = 0; /* exp has become infinite */
            if (fabs(exact) < 0x1.ffp127)
                assert_true(fabs(got - exact) <=
                            fabs(exact) * 0x1p-7 + fabs(w) * 0x1p-134 + 0x1p-134);
            else
                assert_true(fabs(got) >= 0x1.fcp127);
        }
    }
}

/* A row at the end of a guarded buffer, `shift` bytes before the forbidden page. */
static unsigned char *row_at_end(const guard *g, size_t bytes, size_t shift)
{
    return g->p + g->n - bytes - shift;
}

static void assert_pattern(const unsigned char *from, const unsigned char *end)
{
    for (; from < end; from++) assert_int_equal(*from, 0xa5);
}

/* y = f(a, b) on every size, alignment, class and level; in place over a and over b. */
static void check_pairs(const char *what, size_t offset)
{
    typedef void (*binary)(uint16_t *, const void *, const void *, size_t);
    guard a = guard_end(2 * VALUES_MOST_SIZE + 8), b = guard_end(2 * VALUES_MOST_SIZE + 8);
    guard y = guard_end(2 * VALUES_MOST_SIZE + 8);
    uint16_t want[VALUES_MOST_SIZE];
    for (size_t s = 0; s < VALUES_N_SIZES; s++) {
        for (size_t shift = 0; shift < 4; shift++) {
            for (int c = 0; c < VALUES_N_CLASSES; c++) {
                const size_t bytes = 2 * VALUES_SIZES[s];
                unsigned char *pa = row_at_end(&a, bytes, shift),
                              *pb = row_at_end(&b, bytes, 3 - shift);
                unsigned char *py = row_at_end(&y, bytes, (shift + 1) % 4);
                for (VALUES_LEVELS(isa)) {
                    dspark__kern kern = values_level(isa);
                    binary f;
                    memcpy(&f, (const char *)&kern + offset, sizeof f);
                    values_fill(pa, VALUES_SIZES[s], (value_class)c);
                    values_fill(pb, VALUES_SIZES[s], (value_class)c);
                    dspark__kern ref = values_level(DSPARK_ISA_REF);
                    binary g;
                    memcpy(&g, (const char *)&ref + offset, sizeof g);
                    g(want, pa, pb, VALUES_SIZES[s]);
                    memset(y.p, 0xa5, y.n);
                    f((uint16_t *)(void *)py, pa, pb, VALUES_SIZES[s]);
                    if (memcmp(py, want, bytes) != 0)
                        fail_msg("%s: %s, %zu elements", what, dspark__isa_name(kern.isa),
                                 VALUES_SIZES[s]);
                    assert_pattern(y.p, py);
                    assert_pattern(py + bytes, y.p + y.n);
                    memcpy(py, pa, bytes);
                    f((uint16_t *)(void *)py, py, pb, VALUES_SIZES[s]);
                    assert_memory_equal(py, want, bytes);
                    memcpy(py, pb, bytes);
                    f((uint16_t *)(void *)py, pa, py, VALUES_SIZES[s]);
                    assert_memory_equal(py, want, bytes);
                }
            }
        }
    }
    guard_free(&a);
    guard_free(&b);
    guard_free(&y);
}

static void test_pairs(void **state)
{
    (void)state;
    check_pairs("silu_mul", offsetof(dspark__kern, silu_mul));
    check_pairs("add_bf16", offsetof(dspark__kern, add_bf16));
}

static void test_add_exact(void **state)
{
    (void)state;
    uint16_t a[100], b[100], y[100];
    for (int c = 0; c < VALUES_N_CLASSES; c++) {
        for (VALUES_LEVELS(isa)) {
            values_fill(a, 100, (value_class)c);
            values_fill(b, 100, (value_class)c);
            values_level(isa).add_bf16(y, a, b, 100);
            for (size_t i = 0; i < 100; i++) {
                double sum = (double)values_f32_at(a, i) + (double)values_f32_at(b, i);
                uint16_t want = isnan(sum) ? DSPARK__BF16_NAN : dspark__f32_to_bf16((float)sum);
                assert_int_equal(y[i], want);
            }
        }
    }
}

static void test_dot_lanes(void **state)
{
    (void)state;
    enum { WIDE = 7168 + 256 };
    guard x = guard_end(2 * WIDE + 4), w = guard_end(2 * WIDE + 4);
    dspark__kern ref = values_level(DSPARK_ISA_REF);
    for (size_t s = 0; s <= VALUES_N_SIZES; s++) {
        size_t n = s < VALUES_N_SIZES ? VALUES_SIZES[s] : WIDE;
        for (int c = 0; c < VALUES_N_CLASSES; c++) {
            for (size_t shift = 0; shift < 4; shift++) {
                unsigned char *px = row_at_end(&x, 2 * n, shift),
                              *pw = row_at_end(&w, 2 * n, 3 - shift);
                values_fill(px, n, (value_class)c);
                values_fill(pw, n, (value_class)c);
                float want = ref.dot_lanes(px, pw, n);
                for (VALUES_LEVELS(isa)) {
                    float got = values_level(isa).dot_lanes(px, pw, n);
                    assert_int_equal(bits(got), bits(want));
                }
                if (isnan(want)) assert_int_equal(bits(want), 0x7fc00000);
                if (n == 0) assert_int_equal(bits(want), 0);
                if (c != VALUES_NORMAL) continue;
                double sum = 0, magnitude = 0;
                for (size_t i = 0; i < n; i++) {
                    double v = (double)values_f32_at(px, i) * (double)values_f32_at(pw, i);
                    sum += v;
                    magnitude += fabs(v);
                }
                assert_true(fabs(want - sum) <= magnitude * 0x1p-24 * (double)(n / 16 + 5));
            }
        }
    }
    /* the order: 2^24 in lane 0, then 1 twice in it; other lanes come later */
    uint16_t a[64] = {0}, one[64];
    for (size_t i = 0; i < 64; i++) one[i] = 0x3f80;
    a[0] = 0x4b80;
    a[16] = a[32] = 0x3f80;
    a[8] = 0xcb80;
    for (VALUES_LEVELS(isa)) assert_true(values_level(isa).dot_lanes(a, one, 64) == 0);
    a[24] = 0x3f80; /* lane 8: -2^24 + 1 is exact */
    for (VALUES_LEVELS(isa)) assert_true(values_level(isa).dot_lanes(a, one, 64) == 1);
    for (size_t i = 0; i < 64; i++) { /* each product underflows to -0 */
        a[i] = 0x8001;
        one[i] = 0x0080;
    }
    for (size_t n = 1; n <= 64; n++)
        for (VALUES_LEVELS(isa)) assert_int_equal(bits(values_level(isa).dot_lanes(a, one, n)), 0);
    guard_free(&x);
    guard_free(&w);
}

/* ---- fp8 codes ---- */

static void test_fp8_codes(void **state)
{
    (void)state;
    static const float ODD_ONES[] = {3.0f,        0.0371f,  1e-4f, 448.0f,   0x1.8p-140f,
                                     FLT_MIN * 3, FLT_MAX,  -1.0f, 1.0f / 3, 0.0f,
                                     -0.0f,       INFINITY, NAN,   -0.5f,    0x1.fffffep0f};
    enum { N_ODD = sizeof ODD_ONES / sizeof ODD_ONES[0], N_POWERS = 127 + 149 + 1 };
    uint8_t codes[256];
    uint16_t want[256];
    for (size_t i = 0; i < 256; i++) codes[i] = (uint8_t)i;
    guard x = guard_end(VALUES_MOST_SIZE + 4), y = guard_end(2 * VALUES_MOST_SIZE + 8);
    for (size_t s = 0; s < N_ODD + 2 + N_POWERS; s++) { /* odd ones, a NaN, powers of two */
        float scale = s < N_ODD ? ODD_ONES[s] : ldexpf(1, (int)(s - N_ODD - 2) - 149);
        if (s == N_ODD) scale = dspark__f32_from_bits(0xffffffffu);
        if (s == N_ODD + 1) scale = dspark__f32_from_bits(0x7fbfffffu);
        for (int e5m2 = 0; e5m2 < 2; e5m2++) {
            for (size_t i = 0; i < 256; i++) {
                float v = e5m2 ? dspark__e5m2_to_f32(codes[i]) : dspark__e4m3_to_f32(codes[i]);
                want[i] = dspark__f32_to_bf16(v * scale);
            }
            for (VALUES_LEVELS(isa)) {
                dspark__kern kern = values_level(isa);
                uint16_t got[256];
                (e5m2 ? kern.e5m2_to_bf16 : kern.e4m3_to_bf16)(got, codes, 256, scale);
                assert_memory_equal(got, want, sizeof want);
            }
        }
    }
    for (size_t s = 0; s < VALUES_N_SIZES; s++) {
        for (size_t shift = 0; shift < 4; shift++) {
            size_t n = VALUES_SIZES[s];
            unsigned char *px = row_at_end(&x, n, shift), *py = row_at_end(&y, 2 * n, 3 - shift);
            for (size_t i = 0; i < n; i++) px[i] = (unsigned char)values_random();
            for (VALUES_LEVELS(isa)) {
                dspark__kern kern = values_level(isa);
                for (int e5m2 = 0; e5m2 < 2; e5m2++) {
                    memset(y.p, 0xa5, y.n);
                    (e5m2 ? kern.e5m2_to_bf16 : kern.e4m3_to_bf16)((uint16_t *)(void *)py, px, n,
                                                                   0.3f);
                    for (size_t i = 0; i < n; i++) {
                        float v = e5m2 ? dspark__e5m2_to_f32(px[i]) : dspark__e4m3_to_f32(px[i]);
                        assert_int_equal(values_at(py, i), dspark__f32_to_bf16(v * 0.3f));
                    }
                    assert_pattern(y.p, py);
                    assert_pattern(py + 2 * n, y.p + y.n);
                }
            }
        }
    }
    guard_free(&x);
    guard_free(&y);
}

/* ---- the largest logit ---- */

/* argmax of a, or add_argmax of a and b, must be `want` on every level, with that element's value. */
static void check_argmax(const void *a, const void *b, size_t n, size_t want, const char *what)
{
    for (VALUES_LEVELS(isa)) {
        dspark__kern kern = values_level(isa);
        float best = 7;
        size_t at = b ? kern.add_argmax_bf16(a, b, n, &best) : kern.argmax_bf16(a, n, &best);
        if (at != want)
            fail_msg("%s, %s: %zu elements, %zu instead of %zu", what, dspark__isa_name(kern.isa),
                     n, at, want);
        float value = NAN;
        if (want != DSPARK__NO_ARGMAX) value = values_f32_at(a, want);
        if (b && want != DSPARK__NO_ARGMAX)
            value = dspark__bf16_to_f32(dspark__f32_to_bf16(value + values_f32_at(b, want)));
        if (isnan(value))
            assert_int_equal(bits(best), 0x7fc00000);
        else
            assert_int_equal(bits(best), bits(value + 0.0f));
    }
}

/* Written without keys or blocks. */
static size_t largest_of(const void *a, const void *b, size_t n)
{
    size_t at = DSPARK__NO_ARGMAX;
    double best = 0;
    for (size_t i = 0; i < n; i++) {
        float v = values_f32_at(a, i);
        if (b) v = dspark__bf16_to_f32(dspark__f32_to_bf16(v + values_f32_at(b, i)));
        if (isnan(v)) return DSPARK__NO_ARGMAX;
        if (at == DSPARK__NO_ARGMAX || v > best) {
            best = v;
            at = i;
        }
    }
    return at;
}

static void test_argmax_random(void **state)
{
    (void)state;
    static const size_t WIDE[] = {2047, 2048, 2049, 2080, 4095, 4097, 10000};
    enum { MOST = 10000, N = sizeof WIDE / sizeof WIDE[0] };
    static const uint16_t FEW[] = {0x0000, 0x8000, 0x8001, 0x0001, 0xbf80, 0x3f80, 0xff80, 0x7f80};
    guard a = guard_end(2 * MOST + 4), b = guard_end(2 * MOST + 4);
    for (size_t s = 0; s < VALUES_N_SIZES + N; s++) {
        size_t n = s < VALUES_N_SIZES ? VALUES_SIZES[s] : WIDE[s - VALUES_N_SIZES];
        for (int round = 0; round < 24; round++) {
            size_t shift = (size_t)round % 4;
            unsigned char *pa = row_at_end(&a, 2 * n, shift),
                          *pb = row_at_end(&b, 2 * n, 3 - shift);
            values_fill(pa, n, round % 3 == 0 ? VALUES_FINITE : VALUES_NORMAL);
            values_fill(pb, n, VALUES_NORMAL);
            if (round >= 8) { /* a few values: ties everywhere; the first ones more often */
                for (size_t i = 0; i < n; i++) {
                    size_t most = 1 + (size_t)round % 8;
                    memcpy(pa + 2 * i, &FEW[values_random() % most], 2);
                    memcpy(pb + 2 * i, &FEW[values_random() % (most < 7 ? most : 7)], 2);
                }
            }
            check_argmax(pa, NULL, n, largest_of(pa, NULL, n), "argmax");
            check_argmax(pa, pb, n, largest_of(pa, pb, n), "add_argmax");
            for (int i = 0; n > 0 && i < 3; i++) { /* one NaN: nothing, wherever it is */
                static const uint16_t NANS[] = {0x7fc0, 0xffff, 0x7f81, 0xff81};
                size_t at = values_random() % n;
                uint16_t saved = values_at(pa, at);
                memcpy(pa + 2 * at, &NANS[values_random() % 4], 2);
                check_argmax(pa, NULL, n, DSPARK__NO_ARGMAX, "argmax of NaN");
                check_argmax(pa, pb, n, DSPARK__NO_ARGMAX, "add_argmax of NaN");
                memcpy(pa + 2 * at, &saved, 2);
            }
        }
    }
    guard_free(&a);
    guard_free(&b);
}

static void test_argmax_cases(void **state)
{
    (void)state;
    enum { N = 5000 };
    static uint16_t a[N], b[N];
    check_argmax(a, NULL, 0, DSPARK__NO_ARGMAX, "none");
    check_argmax(a, b, 0, DSPARK__NO_ARGMAX, "none");
    for (size_t i = 0; i < N; i++) a[i] = 0xff80; /* nothing but -infinity */
    check_argmax(a, NULL, N, 0, "-infinity");
    check_argmax(a, b, N, 0, "-infinity");
    for (size_t n = 1; n < 70; n++) check_argmax(a, NULL, n, 0, "-infinity");
    a[4321] = 0xff7f; /* the smallest finite one */
    check_argmax(a, NULL, N, 4321, "smallest");
    a[17] = 0x8000; /* -0 before +0, in one block and in two */
    a[18] = a[3000] = 0;
    check_argmax(a, NULL, N, 17, "-0 and +0");
    a[17] = 0xff80;
    check_argmax(a, NULL, N, 18, "+0");
    a[18] = 0x8000;
    check_argmax(a, NULL, N, 18, "-0, +0 in a later block");
    check_argmax(a, b, N, 18, "-0 + 0");
    b[200] = 0x7f80; /* -infinity + infinity */
    check_argmax(a, b, N, DSPARK__NO_ARGMAX, "infinities");
    a[200] = 0;
    check_argmax(a, b, N, 200, "infinity");
    b[200] = 0;
    a[100] = 0x3f80; /* 1 + 2^-9 rounds to 1: a tie that only rounding makes */
    a[50] = 0x3f80;
    b[100] = 0x3b00;
    check_argmax(a, b, N, 50, "rounded");
    b[100] = 0x3b80; /* 1 + 2^-8: a tie of rounding, to even */
    check_argmax(a, b, N, 50, "half a unit");
    b[100] = 0x3b81;
    check_argmax(a, b, N, 100, "more than half a unit");
    b[100] = 0xff80;
    a[50] = b[50] = 0x7f00; /* 2^127 twice: infinity */
    check_argmax(a, b, N, 50, "overflow");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp_corners),
        cmocka_unit_test(test_exp_sweep),
        cmocka_unit_test(test_sigmoid_and_tanh),
        cmocka_unit_test(test_silu_all),
        cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_add_exact),
        cmocka_unit_test(test_dot_lanes),
        cmocka_unit_test(test_fp8_codes),
        cmocka_unit_test(test_argmax_random),
        cmocka_unit_test(test_argmax_cases),
    };
    values_print_seed();
    return cmocka_run_group_tests_name("kern_block", tests, NULL, NULL);
}
