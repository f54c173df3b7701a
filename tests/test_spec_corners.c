/* Verification and draws where the noise itself is chosen: this program has a dspark__uniform of its
 * own, which takes the place of the library's. And rows of numbers that are no distribution. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dspark/dspark.h"
#include "spec/rng.h"
#include "support/fixture.h"

#define V 3
#define ALMOST_1 (1 - 0x1p-53)

static dspark_error err;
#define must(call) check((call), DSPARK_OK, &err)

/* What every number of a purpose is. */
static double chosen[5];

double dspark__uniform(const dspark_noise_key *key)
{
    return chosen[key->purpose];
}

static void choose(double draft, double accept, double after)
{
    chosen[DSPARK_NOISE_DRAFT] = draft;
    chosen[DSPARK_NOISE_ACCEPT] = accept;
    chosen[DSPARK_NOISE_RESIDUAL] = chosen[DSPARK_NOISE_BONUS] = after;
}

static dspark_verdict_tokens verify_one(dspark_verify_method method, int32_t draft, const float *q,
                                        const float p[2][V])
{
    const dspark_noise_key key = {1, 2, 3, DSPARK_NOISE_ACCEPT, 0};
    dspark_verdict_tokens v;
    must(dspark_verify(method, &draft, 1, q, !q, p[0], V, &key, &v, &err));
    return v;
}

/* In token-wise verification the draw is compared with p / q as it is; in block verification 1 minus
 * the draw is, so the end that accepts is the other one. */
static void test_the_ends_of_the_noise(void **state)
{
    const float q[V] = {0.7f, 0.3f, 0}, p[2][V] = {{1, 0, 0}, {0, 0, 1}};
    const double ends[2] = {0, ALMOST_1};
    int method, end;
    (void)state;
    for (method = 0; method < 2; method++)
        for (end = 0; end < 2; end++) {
            dspark_verdict_tokens v;
            choose(0, ends[end], ends[end]);
            v = verify_one((dspark_verify_method)method, 1, q, p); /* B106: p = 0, q = 0.3 */
            assert_int_equal(v.n_accepted, 0);
            assert_int_equal(v.next, 0);
            v = verify_one((dspark_verify_method)method, 0, q, p); /* p > q: always */
            assert_int_equal(v.n_accepted, 1);
            assert_int_equal(v.next, 2);
            v = verify_one((dspark_verify_method)method, 0, NULL, p); /* one-hot and p = 1 */
            assert_int_equal(v.n_accepted, 1);
            v = verify_one((dspark_verify_method)method, 1, NULL, p); /* one-hot and p = 0 */
            assert_int_equal(v.n_accepted, 0);
            assert_int_equal(v.next, 0);
        }
}

/* The least p that there is still has its chance, and the largest draw does not reach beyond it. */
static void test_small_chances(void **state)
{
    const float least = 0x1p-149f, half = 0.5f;
    const float p[2][V] = {{least, 1, 0}, {1, 0, 0}}, q[V] = {half, half, 0};
    (void)state;
    choose(0, 0, 0);
    assert_int_equal(verify_one(DSPARK_VERIFY_TOKEN, 0, q, p).n_accepted, 1);
    assert_int_equal(verify_one(DSPARK_VERIFY_TOKEN, 0, NULL, p).n_accepted, 1);
    choose(0, 0x1p-53, 0);
    assert_int_equal(verify_one(DSPARK_VERIFY_TOKEN, 0, q, p).n_accepted, 0);
    choose(0, ALMOST_1, 0); /* u = 2^-53 is above 2^-148 */
    assert_int_equal(verify_one(DSPARK_VERIFY_BLOCK, 0, q, p).n_accepted, 0);
}

/* The token after a rejection is never the one that was rejected with p <= q, nor one of residual 0. */
static void test_the_residual(void **state)
{
    const float q[V] = {0.5f, 0.5f, 0}, p[2][V] = {{0.25f, 0.5f, 0.25f}, {1, 0, 0}};
    const float half[2][V] = {{0.25f, 0.5f, 0.25f}, {1, 0, 0}};
    const double draws[4] = {0, 0.3, 0.7, ALMOST_1};
    int i, method;
    (void)state;
    for (method = 0; method < 2; method++)
        for (i = 0; i < 4; i++) {
            dspark_verdict_tokens v;
            choose(0, method == DSPARK_VERIFY_TOKEN ? ALMOST_1 : 0, draws[i]); /* reject all that can be */
            v = verify_one((dspark_verify_method)method, 0, q, p);
            assert_int_equal(v.n_accepted, 0);
            assert_int_equal(v.next, 2); /* p - q = (-, 0, 0.25) */
            v = verify_one((dspark_verify_method)method, 0, NULL, half); /* B111: p without token 0 */
            assert_int_equal(v.n_accepted, 0);
            assert_int_equal(v.next, draws[i] < 2.0 / 3 ? 1 : 2);
        }
    /* p and q the same: nothing is left, and nothing is ever rejected. */
    choose(0, ALMOST_1, 0.9);
    assert_int_equal(verify_one(DSPARK_VERIFY_TOKEN, 0, p[0], p).n_accepted, 1);
    choose(0, 0, 0.9);
    assert_int_equal(verify_one(DSPARK_VERIFY_BLOCK, 0, p[0], p).n_accepted, 1);
}

/* A draw stays among the tokens that have a probability, at both ends and with zeros around them. */
static void test_the_ends_of_a_draw(void **state)
{
    const float p[5] = {0, 0.25f, 0, 0.75f, 0};
    const dspark_noise_key key = {0, 0, 0, DSPARK_NOISE_DRAFT, 0};
    const double draws[4] = {0, 0x1.fffffffffffffp-3, 0.25, ALMOST_1};
    const int32_t want[4] = {1, 1, 3, 3};
    int32_t token;
    int i;
    (void)state;
    for (i = 0; i < 4; i++) {
        choose(draws[i], 0, 0);
        must(dspark_sample(p, 5, &key, &token, &err));
        assert_int_equal(token, want[i]);
    }
}

/* A row with a fault gives no token, however the draw would have fallen. */
static void test_rows_that_are_no_distribution(void **state)
{
    const float rows[5][V] = {{0.5f, 0.5f, NAN}, {NAN, 0.5f, 0.5f}, {0.9f, -0.8f, 0.9f}, {0.5f, INFINITY, 0},
                              {0, 0, 0}};
    const dspark_noise_key key = {0, 0, 0, DSPARK_NOISE_DRAFT, 0};
    const double draws[3] = {0, 0.5, ALMOST_1};
    int i, k;
    (void)state;
    for (i = 0; i < 5; i++)
        for (k = 0; k < 3; k++) {
            int32_t token = 7;
            choose(draws[k], 0, 0);
            assert_int_equal(dspark_sample(rows[i], V, &key, &token, &err), DSPARK_ENONFINITE);
            assert_int_equal(token, -1);
        }
}

static void test_verify_refuses_such_rows(void **state)
{
    const float good[2][V] = {{0.5f, 0.25f, 0.25f}, {1, 0, 0}};
    const float bad[4][V] = {{NAN, 0.5f, 0.5f}, {1.5f, -0.5f, 0}, {INFINITY, 0, 0}, {0.5f, 0.25f, 0.2f}};
    const dspark_noise_key key = {0, 0, 0, DSPARK_NOISE_ACCEPT, 0};
    const int32_t draft = 0, below = -1;
    int i, method;
    (void)state;
    choose(0, 0, 0);
    for (method = 0; method < 2; method++) {
        const dspark_verify_method m = (dspark_verify_method)method;
        dspark_verdict_tokens v;
        for (i = 0; i < 4; i++) {
            float p[2][V];
            assert_int_equal(dspark_verify(m, &draft, 1, bad[i], 0, good[0], V, &key, &v, &err), DSPARK_EINVAL);
            assert_string_equal(err.where, "q");
            assert_int_equal(v.next, -1);
            memcpy(p, good, sizeof p);
            memcpy(p[1], bad[i], sizeof p[1]); /* the row of the bonus counts too */
            assert_int_equal(dspark_verify(m, &draft, 1, good[0], 0, p[0], V, &key, &v, &err), DSPARK_EINVAL);
            assert_string_equal(err.where, "p");
        }
        assert_int_equal(dspark_verify(m, &below, 1, NULL, 1, good[0], V, &key, &v, &err), DSPARK_EINVAL);
        assert_int_equal(dspark_verify(m, &draft, 1, good[0], 1, good[0], V, &key, &v, &err), DSPARK_EINVAL);
        must(dspark_verify(m, NULL, 0, NULL, 0, good[1], V, &key, &v, &err)); /* no draft: the bonus */
        assert_int_equal(v.n_accepted, 0);
        assert_int_equal(v.next, 0);
    }
}

/* Scores and outcomes that are none end in a status or NaN, and end. */
static void test_figures_of_no_numbers(void **state)
{
    const float nan_first[3] = {NAN, 0.5f, 0.25f}, beyond[3] = {1.5f, 0.5f, -0.25f};
    const uint8_t y[3] = {0, 1, 1}, twice[3] = {0, 2, 1};
    double auc;
    (void)state;
    assert_int_equal(dspark_auc(nan_first, y, 3, &auc, &err), DSPARK_EINVAL);
    assert_true(isnan(auc));
    assert_int_equal(dspark_auc(beyond, twice, 3, &auc, &err), DSPARK_EINVAL);
    must(dspark_auc(beyond, y, 3, &auc, &err)); /* scores need not be probabilities */
    assert_true(auc == 0);
    assert_true(isnan(dspark_ece(nan_first, y, 3, 4)));
    assert_true(isnan(dspark_ece(beyond, y, 3, 4)));
    assert_true(isnan(dspark_brier(nan_first, y, 3)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_ends_of_the_noise), cmocka_unit_test(test_small_chances),
        cmocka_unit_test(test_the_residual), cmocka_unit_test(test_the_ends_of_a_draw),
        cmocka_unit_test(test_rows_that_are_no_distribution),
        cmocka_unit_test(test_verify_refuses_such_rows), cmocka_unit_test(test_figures_of_no_numbers),
    };
    return cmocka_run_group_tests_name("spec_corners", tests, NULL, NULL);
}
