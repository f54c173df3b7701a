/* Noise, sampling, verification, scheduling and calibration: known answers, corners, and that the output
 * has the target's law. Seeds are fixed and printed. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dspark/dspark.h"
#include "spec/rng.h"
#include "support/fixture.h"
#include "support/tmpdir.h"

#define SEED 20251u
#define RUNS 131072u

static dspark_error err;
#define must(call) check((call), DSPARK_OK, &err)

static dspark_noise_key key_of(uint64_t sequence, uint64_t position, dspark_noise purpose)
{
    dspark_noise_key key = {SEED, sequence, position, purpose, 0};
    return key;
}

static double chi_square(const uint64_t *counts, const double *p, size_t n, double total)
{
    double sum = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        double expected = p[i] * total;
        if (p[i] == 0) {
            assert_true(counts[i] == 0);
            continue;
        }
        sum += ((double)counts[i] - expected) * ((double)counts[i] - expected) / expected;
    }
    return sum;
}

/* ---- noise ---- */

/* The known answers that come with the generator's publication (Random123, kat_vectors). */
static void test_philox_known_answers(void **state)
{
    static const uint32_t table[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e,
         0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb,
         0x5001e420, 0x24126ea1},
    };
    size_t i, k;
    (void)state;
    for (i = 0; i < 3; i++) {
        uint32_t out[4];
        dspark__philox(table[i], table[i] + 4, out);
        for (k = 0; k < 4; k++) assert_int_equal(out[k], table[i][6 + k]);
    }
}

/* tools/oracle/noise.py, written from the documentation, prints this table. */
static void test_noise_of_the_twin(void **state)
{
    static const struct {
        dspark_noise_key key;
        double u;
    } table[] = {
        {{0x0, 0x0, 0x0, 0x1, 0x0}, 0x1.af92a7468a966p-1},
        {{0x4f1b, 0x7, 0x64, 0x1, 0x64}, 0x1.dfec2a002e02dp-1},
        {{0x4f1b, 0x7, 0x66, 0x1, 0x64}, 0x1.199b165a249c4p-1},
        {{0x4f1b, 0x7, 0x66, 0x1, 0x65}, 0x1.fabbf52ceef3bp-1},
        {{0x4f1b, 0x7, 0x66, 0x2, 0x64}, 0x1.fd1589ece7ddbp-1},
        {{0x123456789abcdef, 0xfedcba9876543210, 0x1234567890, 0x3, 0x123456788a}, 0x1.925143f62d739p-1},
        {{0x1, 0x8000000000000000, 0x10000000003, 0x4, 0x10000000000}, 0x1.47d8a5a502692p-1},
    };
    size_t i;
    (void)state;
    for (i = 0; i < sizeof table / sizeof *table; i++)
        assert_true(dspark_uniform(&table[i].key) == table[i].u);
}

static void test_noise_depends_on_all_of_its_key(void **state)
{
    dspark_noise_key a = key_of(1, 2, DSPARK_NOISE_DRAFT), b;
    double u = dspark_uniform(&a);
    (void)state;
    assert_true(u >= 0 && u < 1);
    assert_true(u == dspark_uniform(&a));
    b = a, b.seed++;
    assert_true(dspark_uniform(&b) != u);
    b = a, b.sequence++;
    assert_true(dspark_uniform(&b) != u);
    b = a, b.position++;
    assert_true(dspark_uniform(&b) != u);
    b = a, b.purpose = DSPARK_NOISE_ACCEPT;
    assert_true(dspark_uniform(&b) != u);
    b = a, b.block = 2;
    assert_true(dspark_uniform(&b) != u);
    b = a, b.block = UINT64_C(1) << 32;
    assert_true(dspark_uniform(&b) != u);
    /* Draft and verifier noise of one place are independent: 16 x 16 cells, chi-square. */
    {
        static uint64_t cells[256];
        static double p[256];
        uint64_t i;
        double x;
        memset(cells, 0, sizeof cells);
        for (i = 0; i < 256; i++) p[i] = 1.0 / 256;
        for (i = 0; i < RUNS; i++) {
            a = key_of(7, i, DSPARK_NOISE_DRAFT);
            b = key_of(7, i, DSPARK_NOISE_ACCEPT);
            cells[(size_t)(dspark_uniform(&a) * 16) * 16 + (size_t)(dspark_uniform(&b) * 16)]++;
        }
        x = chi_square(cells, p, 256, RUNS);
        print_message("  seed %u: chi-square of 255: %.1f\n", SEED, x);
        assert_true(x < 255 + 5 * sqrt(2 * 255.0));
    }
}

/* ---- distributions ---- */

static dspark_sampling law(float temperature, uint32_t top_k, float top_p, float min_p)
{
    dspark_sampling s;
    dspark_sampling_init(&s);
    s.temperature = temperature;
    s.top_k = top_k;
    s.top_p = top_p;
    s.min_p = min_p;
    return s;
}

static void test_distribution(void **state)
{
    const float logits[6] = {1.0f, 3.0f, 2.0f, 3.0f, -INFINITY, 0.0f};
    float p[6];
    double z = 2 * exp(3) + exp(2) + exp(1) + 1;
    dspark_sampling s = law(1, 0, 1, 0);
    (void)state;
    must(dspark_distribution(&s, logits, DSPARK_F32, 6, p, &err));
    assert_true(fabs((double)p[1] - exp(3) / z) < 1e-6 && p[1] == p[3] && p[4] == 0);
    s = law(0.5f, 0, 1, 0);
    must(dspark_distribution(&s, logits, DSPARK_F32, 6, p, &err));
    assert_true(fabs((double)(p[2] / p[1]) - exp(-2)) < 1e-6);
    s = law(0, 0, 1, 0); /* greedy: the lowest of equals */
    must(dspark_distribution(&s, logits, DSPARK_F32, 6, p, &err));
    assert_true(p[1] == 1 && p[3] == 0);
    s = law(1e-8f, 0, 1, 0); /* no NaN, no division by zero */
    must(dspark_distribution(&s, logits, DSPARK_F32, 6, p, &err));
    assert_true(p[1] == 0.5f && p[3] == 0.5f && p[0] == 0);
    s = law(1, 1, 1, 0); /* ties keep the lower id */
    must(dspark_distribution(&s, logits, DSPARK_F32, 6, p, &err));
    assert_true(p[1] == 1 && p[3] == 0);
    s = law(1, 3, 1, 0);
    must(dspark_distribution(&s, logits, DSPARK_F32, 6, p, &err));
    assert_true(p[0] == 0 && p[1] > 0 && p[2] > 0 && p[3] > 0 && p[5] == 0);
    s = law(1, 0, 0.5f, 0); /* 0.43 is not enough: two tokens */
    must(dspark_distribution(&s, logits, DSPARK_F32, 6, p, &err));
    assert_true(p[1] == 0.5f && p[3] == 0.5f);
    s = law(1, 0, 0.39f, 0);
    must(dspark_distribution(&s, logits, DSPARK_F32, 6, p, &err));
    assert_true(p[1] == 1 && p[3] == 0);
    s = law(1, 0, 1, 0.2f); /* exp(-1) = 0.37 stays, exp(-2) goes */
    must(dspark_distribution(&s, logits, DSPARK_F32, 6, p, &err));
    assert_true(p[2] > 0 && p[0] == 0 && p[5] == 0);
}

static void test_bad_rows_give_no_token(void **state)
{
    const float rows[4][3] = {{0, NAN, 1}, {NAN, NAN, NAN}, {0, INFINITY, 1},
                              {-INFINITY, -INFINITY, -INFINITY}};
    const float none[3] = {0, 0, 0};
    const float temperatures[2] = {0, 1};
    dspark_noise_key key = key_of(0, 0, DSPARK_NOISE_DRAFT);
    float p[3];
    int32_t token;
    size_t i, t;
    (void)state;
    for (i = 0; i < 4; i++)
        for (t = 0; t < 2; t++) {
            dspark_sampling s = law(temperatures[t], 0, 1, 0);
            assert_int_equal(dspark_distribution(&s, rows[i], DSPARK_F32, 3, p, &err), DSPARK_ENONFINITE);
        }
    assert_int_equal(dspark_sample(none, 3, &key, &token, &err), DSPARK_ENONFINITE);
    assert_int_equal(token, -1);
}

static void test_samples_follow_the_row(void **state)
{
    const float p[5] = {0.1f, 0, 0.6f, 0.05f, 0.25f};
    const double want[5] = {0.1, 0, 0.6, 0.05, 0.25};
    uint64_t counts[5] = {0}, i;
    double x;
    (void)state;
    for (i = 0; i < RUNS; i++) {
        dspark_noise_key key = key_of(3, i, DSPARK_NOISE_DRAFT);
        int32_t token;
        must(dspark_sample(p, 5, &key, &token, &err));
        counts[token]++;
    }
    x = chi_square(counts, want, 5, RUNS);
    print_message("  seed %u: chi-square of 3: %.2f\n", SEED, x);
    assert_true(x < 16.3); /* 0.001 */
}

/* ---- verification ---- */

#define V 3
#define DEPTH 3

/* Distributions that depend on the token before: row of token t. */
static const float target_rows[V][V] = {{0.1f, 0.6f, 0.3f}, {0.5f, 0.25f, 0.25f}, {0.2f, 0, 0.8f}};
static const float draft_rows[V][V] = {{0.5f, 0.3f, 0.2f}, {0.3f, 0.4f, 0.3f}, {0.1f, 0.6f, 0.3f}};

/* One block from token 0: draft DEPTH tokens, verify. Returns tokens (accepted + next) and their law. */
static uint32_t play(dspark_verify_method method, int greedy, uint64_t run, int32_t out[DEPTH + 1])
{
    float p[DEPTH + 1][V], q[DEPTH][V], p0[DEPTH + 1][V], q0[DEPTH][V];
    int32_t drafts[DEPTH], prev = 0;
    dspark_noise_key key = key_of(run, 100, DSPARK_NOISE_ACCEPT);
    dspark_verdict_tokens v;
    uint32_t i;
    for (i = 0; i < DEPTH; i++) {
        memcpy(p[i], target_rows[prev], sizeof p[i]);
        memcpy(q[i], draft_rows[prev], sizeof q[i]);
        if (greedy) {
            drafts[i] = prev == 0 ? 0 : prev == 1 ? 1 : 1;
        } else {
            dspark_noise_key draw = key_of(run, 100 + i, DSPARK_NOISE_DRAFT);
            must(dspark_sample(q[i], V, &draw, &drafts[i], &err));
        }
        prev = drafts[i];
    }
    memcpy(p[DEPTH], target_rows[prev], sizeof p[DEPTH]);
    memcpy(p0, p, sizeof p);
    memcpy(q0, q, sizeof q);
    must(dspark_verify(method, drafts, DEPTH, greedy ? NULL : q[0], greedy, p[0], V, &key, &v, &err));
    assert_memory_equal(p0, p, sizeof p); /* B113 */
    assert_memory_equal(q0, q, sizeof q);
    for (i = 0; i < v.n_accepted; i++) out[i] = drafts[i];
    out[v.n_accepted] = v.next;
    return v.n_accepted;
}

/* The first two tokens of the output: cells of 3 x 3, the second one drawn from the target when the
 * block ended before it. */
static void test_output_has_the_targets_law(void **state)
{
    int method, greedy;
    (void)state;
    for (method = 0; method < 2; method++)
        for (greedy = 0; greedy < 2; greedy++) {
            uint64_t counts[V * V] = {0}, accepted = 0, i;
            double want[V * V], x;
            int32_t a, b;
            for (a = 0; a < V; a++)
                for (b = 0; b < V; b++)
                    want[a * V + b] = (double)target_rows[0][a] * (double)target_rows[a][b];
            for (i = 0; i < RUNS; i++) {
                int32_t out[DEPTH + 1];
                uint32_t n = play((dspark_verify_method)method, greedy, i, out);
                accepted += n;
                if (n == 0) {
                    dspark_noise_key key = key_of(i, 900, DSPARK_NOISE_BONUS);
                    must(dspark_sample(target_rows[out[0]], V, &key, &out[1], &err));
                }
                counts[out[0] * V + out[1]]++;
            }
            x = chi_square(counts, want, V * V, RUNS);
            print_message("  seed %u, %s, %s drafts: chi-square of 7: %.2f, %.4f accepted\n", SEED,
                          method ? "block" : "token", greedy ? "greedy" : "sampled", x,
                          (double)accepted / RUNS);
            assert_true(x < 24.3); /* 0.001 */
        }
}

static double mean_accepted(dspark_verify_method method)
{
    uint64_t sum = 0, i;
    int32_t out[DEPTH + 1];
    for (i = 0; i < RUNS; i++) sum += play(method, 0, i, out);
    return (double)sum / RUNS;
}

static void test_acceptance_is_analytic(void **state)
{
    double expected = 0, reach[V] = {1, 0, 0}, token, block;
    int i, a, b;
    (void)state;
    /* Token-wise: from token a draft b is accepted with min(p, q) of it. */
    for (i = 0; i < DEPTH; i++) {
        double next[V] = {0};
        for (a = 0; a < V; a++)
            for (b = 0; b < V; b++)
                next[b] += reach[a] * fmin((double)target_rows[a][b], (double)draft_rows[a][b]);
        for (b = 0; b < V; b++) expected += next[b];
        memcpy(reach, next, sizeof reach);
    }
    token = mean_accepted(DSPARK_VERIFY_TOKEN);
    block = mean_accepted(DSPARK_VERIFY_BLOCK);
    print_message("  seed %u: token %.4f (analytic %.4f), block %.4f\n", SEED, token, expected, block);
    assert_true(fabs(token - expected) < 0.015);
    assert_true(block >= token - 0.005);
}

static void test_verify_corners(void **state)
{
    const int32_t drafts[2] = {1, 2}, argmax[3] = {1, 0, 2}, outside[2] = {1, 3};
    const float p[3][V] = {{0, 1, 0}, {1, 0, 0}, {0, 0, 1}}, q[2][V] = {{0, 1, 0}, {0.7f, 0, 0.3f}};
    const float no_sum[2][V] = {{0, 0.5f, 0}, {0, 0, 1}}, not_drawn[2][V] = {{1, 0, 0}, {0, 0, 1}};
    float p_before[3][V], q_before[2][V];
    dspark_noise_key key = key_of(1, 1, DSPARK_NOISE_ACCEPT);
    dspark_verdict_tokens v;
    uint64_t i;
    (void)state;
    must(dspark_verify_greedy(drafts, 2, argmax, V, &v, &err));
    assert_int_equal(v.n_accepted, 1);
    assert_int_equal(v.next, 0);
    must(dspark_verify_greedy(NULL, 0, argmax, V, &v, &err));
    assert_int_equal(v.n_accepted, 0);
    assert_int_equal(v.next, 1);
    assert_int_equal(dspark_verify_greedy(outside, 2, argmax, V, &v, &err), DSPARK_EINVAL);
    memcpy(p_before, p, sizeof p);
    memcpy(q_before, q, sizeof q);
    for (i = 0; i < 4096; i++) { /* p = q = 1 always stands, p = 0 never does */
        int m;
        key.sequence = i;
        for (m = 0; m < 2; m++) {
            must(dspark_verify((dspark_verify_method)m, drafts, 2, q[0], 0, p[0], V, &key, &v, &err));
            assert_int_equal(v.n_accepted, 1);
            assert_int_equal(v.next, 0);
        }
    }
    assert_memory_equal(p_before, p, sizeof p);
    assert_memory_equal(q_before, q, sizeof q);
    assert_int_equal(dspark_verify(DSPARK_VERIFY_TOKEN, drafts, 2, NULL, 0, p[0], V, &key, &v, &err),
                     DSPARK_EINVAL); /* B109 */
    assert_int_equal(dspark_verify(DSPARK_VERIFY_TOKEN, outside, 2, q[0], 0, p[0], V, &key, &v, &err),
                     DSPARK_EINVAL);
    assert_int_equal(dspark_verify(DSPARK_VERIFY_TOKEN, drafts, 2, no_sum[0], 0, p[0], V, &key, &v, &err),
                     DSPARK_EINVAL);
    assert_int_equal(dspark_verify(DSPARK_VERIFY_TOKEN, drafts, 2, not_drawn[0], 0, p[0], V, &key, &v, &err),
                     DSPARK_EINVAL); /* B110 */
}

/* ---- scheduling ---- */

static void test_survival_and_threshold(void **state)
{
    const float c[3] = {0.9f, 0.2f, 0.99f};
    float s[3];
    (void)state;
    dspark_survival(c, 3, s);
    assert_true(fabs((double)s[1] - 0.18) < 1e-6 && fabs((double)s[2] - 0.1782) < 1e-6);
    assert_int_equal(dspark_keep_static(c, 3, 0.15f), 3); /* B98: on the product */
    assert_int_equal(dspark_keep_static(c, 3, 0.18f + 1e-4f), 1);
    assert_int_equal(dspark_keep_static(c, 3, 0.95f), 0);
    assert_int_equal(dspark_keep_static(c, 3, 0), 3);
}

/* A scheduler that looks at every length and takes the best: it peeks. */
static uint32_t keep_by_peeking(const float *c, uint32_t n, const dspark_step_table *t)
{
    double expected = 1, survival = 1, best = dspark_steps_per_second(t, 1);
    uint32_t keep = 0, k;
    for (k = 0; k < n; k++) {
        survival *= (double)c[k];
        expected += survival;
        if (expected * dspark_steps_per_second(t, k + 2) > best) {
            best = expected * dspark_steps_per_second(t, k + 2);
            keep = k + 1;
        }
    }
    return keep;
}

/* The paper's counterexample: how often is the first token A? */
static double play_schedule(int peek)
{
    static const uint32_t sizes[3] = {1, 2, 3};
    static const double rates[3] = {1.0, 0.5, 0.45};
    const dspark_step_table table = {3, sizes, rates};
    const float q[2] = {0.5f, 0.5f}, p[4] = {0.7f, 0.3f, 0.7f, 0.3f};
    uint64_t n_a = 0, i;
    for (i = 0; i < RUNS; i++) {
        dspark_noise_key draw = key_of(i, 5, DSPARK_NOISE_DRAFT), key = key_of(i, 5, DSPARK_NOISE_ACCEPT);
        dspark_verdict_tokens v;
        int32_t x;
        uint32_t keep, n = 2;
        float c[2] = {0.8f, 0};
        must(dspark_sample(q, 2, &draw, &x, &err));
        c[1] = x == 0 ? 0.9f : 0.0f;
        if (peek) keep = keep_by_peeking(c, 2, &table);
        else must(dspark_schedule(c, 2, &n, 1, &table, &keep, &err));
        must(dspark_verify(DSPARK_VERIFY_TOKEN, &x, keep > 0, keep > 0 ? q : NULL, 0, p, 2, &key, &v, &err));
        n_a += (v.n_accepted ? x : v.next) == 0;
    }
    return (double)n_a / RUNS;
}

static void test_early_stop_keeps_the_law(void **state)
{
    double peeking = play_schedule(1), ours = play_schedule(0);
    (void)state;
    print_message("  seed %u: first token A: peeking %.4f, ours %.4f, the target 0.7\n", SEED, peeking, ours);
    assert_true(fabs(peeking - 0.85) < 0.01);
    assert_true(fabs(ours - 0.7) < 0.006);
}

static void test_schedule(void **state)
{
    static const uint32_t sizes[3] = {2, 4, 8};
    static const double rates[3] = {10, 9, 7};
    const dspark_step_table table = {3, sizes, rates};
    const float c[2][3] = {{0.9f, 0.9f, 0.9f}, {0.3f, 0.2f, 0.1f}}, old[2][3] = {{1, 1, 1}, {1, 1, 1}};
    const uint32_t n[2] = {3, 3};
    uint32_t keep[2];
    (void)state;
    assert_true(dspark_steps_per_second(&table, 1) == 10 && dspark_steps_per_second(&table, 3) == 9);
    assert_true(dspark_steps_per_second(&table, 16) == 3.5);
    must(dspark_schedule(c[0], 3, n, 2, &table, keep, &err));
    assert_int_equal(keep[0], 2); /* 3.71 x 9 steps; one more: 4.44 x 7 */
    assert_int_equal(keep[1], 0);
    must(dspark_schedule_stale(old[0], c[0], 3, n, 2, &table, keep, &err));
    assert_int_equal(keep[0] + keep[1], 6);
    /* Over every number: 4.805 x 7 is the best, behind the place where the early stop ends. */
    must(dspark_schedule_stale(c[0], old[0], 3, n, 2, &table, keep, &err));
    assert_int_equal(keep[0] + keep[1], 6);
}

/* ---- calibration ---- */

static void test_calibration(void **state)
{
    enum { N = 20000, K = 3 };
    static float c[N][K], flat[N * K];
    static uint8_t accepted[N], y[N * K];
    dspark_calibration fit, again;
    const char *dir = tmpdir_make();
    char path[512];
    float logits[K] = {2, 2, 2}, p[K];
    double auc;
    size_t i, k;
    (void)state;
    for (i = 0; i < N; i++) { /* over-confident: the logit is twice what it should be */
        for (k = 0; k < K; k++) {
            dspark_noise_key key = key_of(i, k, DSPARK_NOISE_DRAFT);
            double logit = 4 * dspark_uniform(&key) - 1;
            key.purpose = DSPARK_NOISE_ACCEPT;
            c[i][k] = (float)(1 / (1 + exp(-2 * logit)));
            if (accepted[i] == k && dspark_uniform(&key) < 1 / (1 + exp(-logit))) accepted[i]++;
        }
    }
    must(dspark_calibration_fit(&fit, c[0], accepted, N, K, &err));
    for (k = 0; k < K; k++) {
        print_message("  T_%zu = %.3f\n", k + 1, fit.temperatures[k]);
        assert_true(fit.temperatures[k] > 1.6 && fit.temperatures[k] < 2.5);
    }
    dspark_calibration_apply(&fit, logits, K, p);
    assert_true(fabs((double)p[0] - 1 / (1 + exp(-2 / fit.temperatures[0]))) < 1e-6);
    fit.temperatures[0] = 1; /* B99: a change is seen by the next call */
    dspark_calibration_apply(&fit, logits, K, p);
    assert_true(fabs((double)p[0] - 1 / (1 + exp(-2.0))) < 1e-6);
    snprintf(path, sizeof path, "%s/c.json", dir);
    must(dspark_calibration_save(&fit, path, &err));
    must(dspark_calibration_load(&again, path, &err));
    assert_memory_equal(&fit, &again, sizeof fit);
    tmpdir_write(path, "{\"dspark_calibration\": 1, \"temperatures\": [1, 0]}", 49);
    assert_int_equal(dspark_calibration_load(&again, path, &err), DSPARK_EFORMAT);
    for (i = 0; i < 4; i++) {
        flat[i] = (float)i / 4;
        y[i] = i >= 2;
    }
    must(dspark_auc(flat, y, 4, &auc, &err));
    assert_true(auc == 1);
    y[1] = 1, y[2] = 0;
    must(dspark_auc(flat, y, 4, &auc, &err));
    assert_true(auc == 0.75);
    y[0] = y[2] = 1;
    must(dspark_auc(flat, y, 4, &auc, &err));
    assert_true(isnan(auc));
    assert_true(fabs(dspark_brier(flat, y, 4) - (1 + 0.5625 + 0.25 + 0.0625) / 4) < 1e-9);
    assert_true(fabs(dspark_ece(flat, y, 4, 4) - (1 + 0.75 + 0.5 + 0.25) / 4) < 1e-9);
    assert_true(isnan(dspark_ece(flat, y, 0, 4)));
    tmpdir_remove(dir);
}

static void test_counters(void **state)
{
    dspark_acceptance a = {0};
    (void)state;
    dspark_acceptance_add(&a, 7, 3);
    dspark_acceptance_add(&a, 2, 0);
    assert_true(dspark_acceptance_length(&a, 0) == 1.5 && dspark_acceptance_length(&a, 1) == 2.5);
    assert_int_equal(a.drafted[1], 2);
    assert_int_equal(a.drafted[2], 1);
    assert_int_equal(a.accepted[2], 1);
    assert_int_equal(a.accepted[3], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox_known_answers), cmocka_unit_test(test_noise_of_the_twin),
        cmocka_unit_test(test_noise_depends_on_all_of_its_key),
        cmocka_unit_test(test_distribution), cmocka_unit_test(test_bad_rows_give_no_token),
        cmocka_unit_test(test_samples_follow_the_row), cmocka_unit_test(test_output_has_the_targets_law),
        cmocka_unit_test(test_acceptance_is_analytic), cmocka_unit_test(test_verify_corners),
        cmocka_unit_test(test_survival_and_threshold), cmocka_unit_test(test_early_stop_keeps_the_law),
        cmocka_unit_test(test_schedule), cmocka_unit_test(test_calibration), cmocka_unit_test(test_counters),
    };
    return cmocka_run_group_tests_name("spec", tests, NULL, NULL);
}
