/* What the other spec tests would not notice: the weight of a block's residual, every word of the noise
 * key, the edges of tables and counters, allocation failure. Seeds are fixed and printed. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dspark/dspark.h"
#include "support/fixture.h"
#include "support/oom.h"

#define SEED 4177u
#define RUNS 65536u
#define V 3
#define DEPTH 2

static dspark_error err;
#define must(call) check((call), DSPARK_OK, &err)

/* Rows by place alone. Behind draft 1 (p / q = 0.6) two tokens are left, in other shares than with weight
 * 1: 0.5 * 0.6 - 0.1 and 0.4 * 0.6 - 0.2, against 0.4 and 0.2. */
static const float p_rows[DEPTH + 1][V] = {{0.6f, 0.3f, 0.1f}, {0.5f, 0.4f, 0.1f}, {0.2f, 0.2f, 0.6f}};
static const float q_rows[DEPTH][V] = {{0.3f, 0.5f, 0.2f}, {0.1f, 0.2f, 0.7f}};

/* Mean accepted drafts of a block, by the formulas of docs/verification.md over all drafts. */
static double block_by_formula(void)
{
    double sum = 0;
    int a, b, t;
    for (a = 0; a < V; a++)
        for (b = 0; b < V; b++) {
            double first = fmin(1, (double)p_rows[0][a] / (double)q_rows[0][a]), left = 0, h;
            double both = fmin(1, first * (double)p_rows[1][b] / (double)q_rows[1][b]);
            for (t = 0; t < V; t++) left += fmax(first * (double)p_rows[1][t] - (double)q_rows[1][t], 0);
            h = left + 1 - first > 0 ? left / (left + 1 - first) : 1;
            sum += (double)q_rows[0][a] * (double)q_rows[1][b] * (2 * both + (1 - both) * h);
        }
    return sum;
}

static void test_block_law_behind_the_first_token(void **state)
{
    uint64_t counts[V * V] = {0}, accepted = 0, run;
    double x = 0, mean, want = block_by_formula();
    int a, b, i;
    (void)state;
    for (run = 0; run < RUNS; run++) {
        dspark_noise_key key = {SEED, run, 10, DSPARK_NOISE_ACCEPT, 0};
        int32_t drafts[DEPTH], out[DEPTH + 1];
        dspark_verdict_tokens v;
        for (i = 0; i < DEPTH; i++) {
            dspark_noise_key draw = {SEED, run, 10 + (uint64_t)i, DSPARK_NOISE_DRAFT, 0};
            must(dspark_sample(q_rows[i], V, &draw, &drafts[i], &err));
        }
        must(dspark_verify(DSPARK_VERIFY_BLOCK, drafts, DEPTH, q_rows[0], 0, p_rows[0], V, &key, &v, &err));
        for (i = 0; i < (int)v.n_accepted; i++) out[i] = drafts[i];
        out[v.n_accepted] = v.next;
        if (v.n_accepted == 0) {
            key = (dspark_noise_key){SEED, run, 900, DSPARK_NOISE_BONUS, 0};
            must(dspark_sample(p_rows[1], V, &key, &out[1], &err));
        }
        counts[out[0] * V + out[1]]++;
        accepted += v.n_accepted;
    }
    for (a = 0; a < V; a++)
        for (b = 0; b < V; b++) {
            double expected = RUNS * (double)p_rows[0][a] * (double)p_rows[1][b];
            double off = (double)counts[a * V + b] - expected;
            x += off * off / expected;
        }
    mean = (double)accepted / RUNS;
    print_message("  seed %u: chi-square of 8: %.2f; %.4f accepted, by formula %.4f\n", SEED, x, mean, want);
    assert_true(x < 26.1); /* 0.001 */
    assert_true(fabs(mean - want) < 0.018); /* 5 standard deviations of at most 0.9 */
}

/* From an independent program: the generator, its key and its counter as docs/verification.md has them. */
static void test_noise_is_what_it_is_documented_to_be(void **state)
{
    static const struct {
        dspark_noise_key key;
        double u;
    } known[5] = {
        {{0, 0, 0, DSPARK_NOISE_DRAFT, 0}, 0x1.af92a7468a966p-1},
        {{0x123456789abcdef0, 0xfedcba9876543210, 0x0f1e2d3c4b5a6978, DSPARK_NOISE_DRAFT, 0},
         0x1.241039433c790p-2},
        {{0x123456789abcdef0, 0xfedcba9876543210, 0x0f1e2d3c4b5a6978, DSPARK_NOISE_ACCEPT, 0},
         0x1.a678ed17cb440p-4},
        {{0x123456789abcdef0, 0xfedcba9876543210, 0x0f1e2d3c4b5a6978, DSPARK_NOISE_RESIDUAL, 0},
         0x1.ef16e79ad3298p-4},
        {{1, (uint64_t)1 << 40, (uint64_t)1 << 33, DSPARK_NOISE_BONUS, 0}, 0x1.f5f6900eeaaddp-1},
    };
    size_t i;
    (void)state;
    for (i = 0; i < 5; i++) assert_true(dspark_uniform(&known[i].key) == known[i].u);
}

/* The bonus is drawn by its own purpose at its own place, the residual by another. */
static void test_purposes_of_the_last_token(void **state)
{
    const float p[2][V] = {{0, 0.5f, 0.5f}, {0.25f, 0.5f, 0.25f}};
    int fell = 0;
    uint64_t run;
    (void)state;
    for (run = 0; run < 512; run++) {
        dspark_noise_key key = {SEED, run, 20, DSPARK_NOISE_ACCEPT, 20};
        dspark_noise_key bonus = {SEED, run, 20, DSPARK_NOISE_BONUS, 20};
        dspark_noise_key residual = {SEED, run, 20, DSPARK_NOISE_RESIDUAL, 20};
        const int32_t impossible = 0;
        dspark_verdict_tokens v;
        int32_t want;
        must(dspark_verify(DSPARK_VERIFY_TOKEN, NULL, 0, NULL, 0, p[1], V, &key, &v, &err));
        must(dspark_sample(p[1], V, &bonus, &want, &err));
        assert_int_equal(v.next, want);
        must(dspark_verify(DSPARK_VERIFY_TOKEN, &impossible, 1, NULL, 1, p[0], V, &key, &v, &err));
        must(dspark_sample(p[0], V, &residual, &want, &err));
        assert_int_equal(v.next, want);
        fell += v.n_accepted == 0;
    }
    assert_int_equal(fell, 512);
}

/* A weight of exactly min_p stays: exp(0) = 1 and min_p = 1. */
static void test_min_p_keeps_its_own_edge(void **state)
{
    const float logits[3] = {1, 2, 2};
    dspark_sampling s;
    float p[3];
    (void)state;
    dspark_sampling_init(&s);
    s.temperature = 1;
    s.min_p = 1;
    must(dspark_distribution(&s, logits, DSPARK_F32, 3, p, &err));
    assert_true(p[0] == 0 && p[1] == 0.5f && p[2] == 0.5f);
}

static void test_counters_of_long_blocks(void **state)
{
    struct {
        dspark_acceptance a;
        uint64_t behind[16];
    } s = {0};
    size_t i;
    (void)state;
    dspark_acceptance_add(&s.a, DSPARK_MAX_COUNTED + 8, DSPARK_MAX_COUNTED + 8);
    for (i = 0; i < DSPARK_MAX_COUNTED; i++) assert_true(s.a.drafted[i] == 1 && s.a.accepted[i] == 1);
    for (i = 0; i < 16; i++) assert_true(s.behind[i] == 0);
}

/* ---- scheduling ---- */

static void test_schedule_edges(void **state)
{
    static const uint32_t sizes[2] = {2, 3}, unsorted[2] = {3, 2}, repeated[2] = {2, 2}, zero[2] = {0, 2};
    static const double rates[2] = {3, 2}, nothing[2] = {3, 0}, nan_rate[2] = {3, NAN};
    const dspark_step_table level = {2, sizes, rates};
    const dspark_step_table bad[6] = {{2, unsorted, rates}, {2, repeated, rates}, {2, zero, rates},
                                      {2, sizes, nothing}, {2, sizes, nan_rate}, {0, sizes, rates}};
    const float one[2][1] = {{1}, {1}}, beyond[2][1] = {{0.5f}, {1.5f}}, none[2][1] = {{NAN}, {0.5f}};
    const uint32_t n[2] = {1, 1}, many[2] = {2, 1};
    uint32_t keep[2];
    int i;
    (void)state;
    must(dspark_schedule(one[0], 1, n, 2, &level, keep, &err)); /* (2 + 1) * 2 = 2 * 3: it does not pay */
    assert_int_equal(keep[0] + keep[1], 0);
    for (i = 0; i < 6; i++) {
        assert_int_equal(dspark_schedule(one[0], 1, n, 2, &bad[i], keep, &err), DSPARK_EINVAL);
        assert_int_equal(dspark_schedule_stale(one[0], one[0], 1, n, 2, &bad[i], keep, &err), DSPARK_EINVAL);
    }
    assert_int_equal(dspark_schedule(beyond[0], 1, n, 2, &level, keep, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_schedule(none[0], 1, n, 2, &level, keep, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_schedule(one[0], 1, many, 2, &level, keep, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_schedule_stale(beyond[0], one[0], 1, n, 2, &level, keep, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_schedule_stale(one[0], none[0], 1, n, 2, &level, keep, &err), DSPARK_EINVAL);
}

/* Room for one draft and equal survivals: the first sequence. Room for two: the order is that of the
 * products, not of single confidences (0.5, 0.5 * 0.9 against 0.48). */
static void test_order_of_admission(void **state)
{
    static const uint32_t one_more[3] = {2, 3, 4}, two_more[3] = {2, 4, 5};
    static const double rates[3] = {1, 1, 0.01};
    const dspark_step_table one = {3, one_more, rates}, two = {3, two_more, rates};
    const float equal[2][2] = {{0.5f, 0.1f}, {0.5f, 0.1f}}, products[2][2] = {{0.5f, 0.9f}, {0.48f, 0.1f}};
    const float ones[2][2] = {{1, 1}, {1, 1}}, other[2][2] = {{0.1f, 0.1f}, {0.9f, 0.1f}};
    const uint32_t n[2] = {2, 2};
    uint32_t keep[2];
    (void)state;
    must(dspark_schedule(equal[0], 2, n, 2, &one, keep, &err));
    assert_true(keep[0] == 1 && keep[1] == 0);
    must(dspark_schedule(products[0], 2, n, 2, &two, keep, &err));
    assert_true(keep[0] == 1 && keep[1] == 1);
    /* Stale: how many, by the old ones (all alike: the first sequence); which, by the present ones. */
    must(dspark_schedule_stale(ones[0], other[0], 2, n, 2, &one, keep, &err));
    assert_true(keep[0] == 0 && keep[1] == 1);
}

/* ---- calibration ---- */

static void test_calibration_edges(void **state)
{
    const float good[2][2] = {{0.5f, 0.5f}, {0.5f, 0.5f}}, above[2][2] = {{0.5f, 1.5f}, {0.5f, 0.5f}};
    const float none[2][2] = {{0.5f, 0.5f}, {NAN, 0.5f}}, tied[4] = {0.5f, 0.5f, 0.5f, 0.25f};
    const uint8_t accepted[2] = {0, 2}, too_many[2] = {0, 3}, y[4] = {1, 0, 1, 0};
    const float logits[3] = {2, 2, 2};
    dspark_calibration c;
    float p[3];
    double auc;
    (void)state;
    assert_int_equal(dspark_calibration_fit(&c, good[0], too_many, 2, 2, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_calibration_fit(&c, above[0], accepted, 2, 2, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_calibration_fit(&c, none[0], accepted, 2, 2, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_calibration_fit(&c, good[0], accepted, 0, 2, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_calibration_fit(&c, good[0], accepted, 2, 257, &err), DSPARK_EINVAL);
    assert_int_equal(c.n, 0);
    c = (dspark_calibration){.n = 1, .temperatures = {2, 8, 8}}; /* behind n a temperature is none */
    dspark_calibration_apply(&c, logits, 3, p);
    assert_true(fabs((double)p[0] - 1 / (1 + exp(-1.0))) < 1e-6);
    assert_true(fabs((double)p[1] - 1 / (1 + exp(-2.0))) < 1e-6 && p[1] == p[2]);
    must(dspark_auc(tied, y, 4, &auc, &err)); /* of 4 pairs 2 are won and 2 are ties */
    assert_true(auc == 0.75);
}

static void test_memory_that_cannot_be_had(void **state)
{
    const float c[2][2] = {{0.5f, 0.5f}, {0.5f, 0.5f}}, p[2] = {0.25f, 0.5f};
    const uint8_t accepted[2] = {0, 2}, y[2] = {0, 1};
    dspark_calibration fit;
    dspark_status st;
    double auc;
    (void)state;
    if (!oom_available()) skip();
    oom_fail_from(1);
    st = dspark_calibration_fit(&fit, c[0], accepted, 2, 2, NULL);
    oom_stop();
    assert_int_equal(st, DSPARK_ENOMEM);
    assert_int_equal(fit.n, 0);
    oom_fail_from(1);
    st = dspark_auc(p, y, 2, &auc, NULL);
    oom_stop();
    assert_int_equal(st, DSPARK_ENOMEM);
    assert_true(isnan(auc));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block_law_behind_the_first_token),
        cmocka_unit_test(test_noise_is_what_it_is_documented_to_be),
        cmocka_unit_test(test_purposes_of_the_last_token), cmocka_unit_test(test_min_p_keeps_its_own_edge),
        cmocka_unit_test(test_counters_of_long_blocks), cmocka_unit_test(test_schedule_edges),
        cmocka_unit_test(test_order_of_admission), cmocka_unit_test(test_calibration_edges),
        cmocka_unit_test(test_memory_that_cannot_be_had),
    };
    return cmocka_run_group_tests_name("spec_bounds", tests, NULL, NULL);
}
