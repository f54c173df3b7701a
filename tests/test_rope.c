/* Rotary embedding: frequencies against published values, our sine and cosine against long double. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "base/fpenv.h"
#include "base/sincos.h"
#include "model/rope.h"

static dspark_config k3_config(void)
{
    dspark_config c;
    memset(&c, 0, sizeof c);
    c.qk_rope_head_dim = 64;
    c.qk_nope_head_dim = 128;
    c.rope_type = DSPARK_ROPE_YARN;
    c.rope_theta = 50000;
    c.rope_factor = 32;
    c.rope_original_max_positions = 32768;
    c.rope_beta_fast = 32;
    c.rope_beta_slow = 1;
    c.rope_mscale = c.rope_mscale_all_dim = 1;
    c.rope_extrapolation_factor = c.rope_attn_factor = 1;
    return c;
}

static void assert_near(double got, double want, double relative)
{
    if (!(fabs(got - want) <= relative * fabs(want)))
        fail_msg("got %.12g, want %.12g", got, want);
}

static dspark__kern level(int isa)
{
    dspark__kern k;
    assert_int_equal(dspark__kern_select(&k, (dspark_isa)isa, NULL), DSPARK_OK);
    return k;
}

static void yarn_spot_values(void **state)
{
    (void)state;
    dspark_config c = k3_config();
    dspark__rope r;
    assert_int_equal(dspark__rope_init(&r, &c, NULL), DSPARK_OK);
    static const struct {
        int i;
        double f;
    } spots[] = {{0, 1}, {15, 0.0062713034}, {16, 0.0040782831}, {17, 0.0026274080},
                 {25, 2.5446984e-5}, {26, 4.7526617e-6}, {31, 8.764413e-7}};
    assert_int_equal(r.n_pairs, 32);
    assert_true(r.attn == 1.0f);
    for (size_t i = 0; i < sizeof spots / sizeof spots[0]; i++)
        assert_near(r.inv_freq[spots[i].i], spots[i].f, 3e-7);
    assert_near(dspark__rope_softmax_scale(&c), 0.1308608, 1e-6);
}

static void plain_is_not_scaled(void **state)
{
    (void)state;
    dspark_config c = k3_config();
    c.rope_type = DSPARK_ROPE_DEFAULT; /* the YaRN fields must not matter then */
    dspark__rope r;
    assert_int_equal(dspark__rope_init(&r, &c, NULL), DSPARK_OK);
    for (int i = 0; i < 32; i++) assert_near(r.inv_freq[i], pow(50000, -2.0 * i / 64), 2e-7);
    assert_near(dspark__rope_softmax_scale(&c), 1 / sqrt(192), 1e-12);
}

static void attention_factor(void **state)
{
    (void)state;
    dspark_config c = k3_config();
    dspark__rope r;
    c.rope_mscale_all_dim = 0; /* a missing key counts as 0: mscale of 1 there */
    assert_int_equal(dspark__rope_init(&r, &c, NULL), DSPARK_OK);
    assert_near(r.attn, 0.1 * log(32) + 1, 1e-7);
    assert_near(dspark__rope_softmax_scale(&c), 1 / sqrt(192), 1e-12);
    float cs[32], sn[32];
    const dspark__kern ref = level(DSPARK_ISA_REF);
    dspark__rope_row(&r, &ref, 0, cs, sn);
    assert_true(cs[0] == r.attn && sn[0] == 0);
}

static void odd_and_huge_widths_are_refused(void **state)
{
    (void)state;
    dspark_config c = k3_config();
    dspark__rope r;
    dspark_error err;
    static const uint32_t bad[] = {0, 1, 7, 2 * DSPARK__ROPE_MAX_PAIRS + 2};
    for (size_t i = 0; i < 4; i++) {
        c.qk_rope_head_dim = bad[i];
        assert_int_equal(dspark__rope_init(&r, &c, &err), DSPARK_EUNSUPPORTED);
        assert_non_null(strstr(err.where, "qk_rope_head_dim"));
    }
}

static void sine_and_cosine(void **state)
{
    (void)state;
    uint64_t s = 88172645463325252u;
    double worst = 0;
    for (int i = 0; i < 400000; i++) {
        s ^= s << 13; s ^= s >> 7; s ^= s << 17;
        double limit = i % 4 == 0 ? 4 : i % 4 == 1 ? 40000 : i % 4 == 2 ? 1048576 : 2147483000.0;
        double x = (float)((double)(s >> 11) * 0x1p-53 * limit), sn, cs;
        dspark__sincos(x, &sn, &cs);
        double e = fabs(sn - (double)sinl(x)), f = fabs(cs - (double)cosl(x));
        if (e > worst) worst = e;
        if (f > worst) worst = f;
    }
    if (worst > 3e-16) fail_msg("worst error %.3g", worst);
    /* fp32 numbers next to multiples of pi/2, where the reduction cancels most. */
    for (int k = 1; k < 700000; k += 997) {
        float x = (float)(k * 1.57079632679489661923);
        double sn, cs;
        dspark__sincos(x, &sn, &cs);
        assert_true((float)sn == (float)sinl((double)x));
        assert_true((float)cs == (float)cosl((double)x));
    }
}

static void angle_is_an_fp32_product(void **state)
{
    (void)state;
    dspark_config c = k3_config();
    dspark__rope r;
    assert_int_equal(dspark__rope_init(&r, &c, NULL), DSPARK_OK);
    float cs[32], sn[32];
    const dspark__kern ref = level(DSPARK_ISA_REF);
    dspark__rope_row(&r, &ref, 1048575, cs, sn);
    for (int j = 0; j < 32; j++) {
        float angle = 1048575.0f * r.inv_freq[j];
        assert_true(cs[j] == (float)cosl((double)angle));
        assert_true(sn[j] == (float)sinl((double)angle));
    }
}

static double next_double(uint64_t *s)
{
    *s ^= *s << 13; *s ^= *s >> 7; *s ^= *s << 17;
    return (double)(*s >> 11) * 0x1p-53;
}

/* Any number of angles of either sign, in all quadrants and next to their borders, and nothing behind them. */
static void every_level_has_the_same_angles(void **state)
{
    (void)state;
    enum { MOST = 37 };
    static const float positions[] = {0, 1, 2, 3, 17, 255, 4095, 65535, 1048575, 16777216, 2000000000};
    const dspark__kern ref = level(DSPARK_ISA_REF);
    const unsigned old = dspark__fpenv_enter();
    uint64_t s = 88172645463325252u;
    for (size_t n = 0; n <= MOST; n++)
        for (size_t i = 0; i < sizeof positions / sizeof *positions; i++) {
            float f[MOST], want[2][MOST + 1], got[2][MOST + 1];
            const float attn = i % 2 ? 1 : 1.3465736f;
            for (size_t j = 0; j < n; j++) {
                f[j] = (float)pow(50000, -next_double(&s));
                if (j % 5 == 1) f[j] = (float)((double)(j / 2) * 1.57079632679489661923); /* a border */
                if (j % 7 == 3) f[j] = -f[j];
            }
            memset(want, 0xa5, sizeof want);
            ref.rope_angles(want[0], want[1], f, n, positions[i], attn);
            for (int isa = DSPARK_ISA_REF; isa <= DSPARK_ISA_AVX512BF16; isa++) {
                if (!dspark__isa_available((dspark_isa)isa)) continue;
                memset(got, 0xa5, sizeof got);
                level(isa).rope_angles(got[0], got[1], f, n, positions[i], attn);
                assert_memory_equal(got, want, sizeof want);
            }
        }
    dspark__fpenv_leave(old);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(yarn_spot_values),
        cmocka_unit_test(plain_is_not_scaled),
        cmocka_unit_test(attention_factor),
        cmocka_unit_test(odd_and_huge_widths_are_refused),
        cmocka_unit_test(sine_and_cosine),
        cmocka_unit_test(angle_is_an_fp32_product),
        cmocka_unit_test(every_level_has_the_same_angles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
