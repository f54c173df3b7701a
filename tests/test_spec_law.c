/* Properties over many random distributions: selection against a full sort, what is drawn against what
 * is handed out, and the output's law under the transforms. Seeds are fixed and printed. */
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

#define SEED 977u
#define RUNS 131072u

static dspark_error err;
#define must(call) check((call), DSPARK_OK, &err)

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

static double uniform(uint64_t *s)
{
    return (double)(next_random(s) >> 11) * 0x1p-53;
}

/* Cells of less than 5 are counted together. Returns the statistic, *df its degrees of freedom. */
static double chi_square(const uint64_t *counts, const double *p, size_t n, double total, int *df)
{
    double sum = 0, rare = 0, rare_p = 0;
    size_t i;
    *df = -1;
    for (i = 0; i < n; i++) {
        double expected = p[i] * total;
        if (p[i] == 0) assert_true(counts[i] == 0);
        if (expected < 5) {
            rare += (double)counts[i];
            rare_p += p[i];
            continue;
        }
        sum += ((double)counts[i] - expected) * ((double)counts[i] - expected) / expected;
        ++*df;
    }
    if (rare_p * total >= 5) {
        sum += (rare - rare_p * total) * (rare - rare_p * total) / (rare_p * total);
        ++*df;
    }
    return sum;
}

/* Beyond 5 standard deviations of a chi-square. */
static double limit_of(int df)
{
    return df + 5 * sqrt(2.0 * df) + 8;
}

/* ---- selection ---- */

#define ROW 64
static const float *sorted_by; /* qsort has no argument for it */

static int compare_ids(const void *a, const void *b)
{
    const size_t x = *(const size_t *)a, y = *(const size_t *)b;
    if (sorted_by[x] != sorted_by[y]) return sorted_by[x] < sorted_by[y] ? 1 : -1;
    return x < y ? -1 : 1;
}

/* The transforms as one would write them with a sort. */
static void expected_row(const dspark_sampling *s, const float *logits, size_t n, double *p)
{
    size_t ids[ROW], i, kept = s->top_k && s->top_k < n ? s->top_k : n;
    double sum = 0, mass = 0;
    for (i = 0; i < n; i++) ids[i] = i;
    sorted_by = logits;
    qsort(ids, n, sizeof *ids, compare_ids);
    for (i = 0; i < n; i++) p[i] = 0;
    for (i = 0; i < kept; i++)
        sum += p[ids[i]] = exp(((double)logits[ids[i]] - (double)logits[ids[0]]) / (double)s->temperature);
    for (i = 0; i < n; i++) {
        int stays = (s->top_p == 1 || mass < (double)s->top_p * sum) && p[ids[i]] >= (double)s->min_p;
        mass += p[ids[i]];
        if (!stays) p[ids[i]] = 0;
    }
    for (sum = 0, i = 0; i < n; i++) sum += p[i];
    for (i = 0; i < n; i++) p[i] /= sum;
}

static void test_selection_equals_sorting(void **state)
{
    static const float temperatures[4] = {0.3f, 1, 2, 50}, top_ps[4] = {1, 0.95f, 0.5f, 0.01f};
    static const float min_ps[3] = {0, 0.05f, 0.6f};
    uint64_t s = SEED, run;
    (void)state;
    for (run = 0; run < 2000; run++) {
        float logits[ROW], p[ROW], again[ROW];
        double want[ROW];
        size_t n = 1 + next_random(&s) % ROW, i;
        dspark_sampling t = law(temperatures[run % 4], (uint32_t)(next_random(&s) % (n + 3)),
                                top_ps[run / 4 % 4], min_ps[run / 16 % 3]);
        for (i = 0; i < n; i++) { /* of few values: ties are common */
            logits[i] = (float)(next_random(&s) % 17) / 4 - 2;
            if (run % 5 == 0) logits[i] = (float)(uniform(&s) * 12 - 6);
        }
        must(dspark_distribution(&t, logits, DSPARK_F32, n, p, &err));
        expected_row(&t, logits, n, want);
        for (i = 0; i < n; i++) assert_true(fabs((double)p[i] - want[i]) < 2e-6 && (p[i] > 0) == (want[i] > 0));
        memcpy(again, logits, n * sizeof *again); /* in place, and a second time: the same bits */
        must(dspark_distribution(&t, again, DSPARK_F32, n, again, &err));
        assert_memory_equal(again, p, n * sizeof *p);
    }
}

/* Neighbours in fp32, and logits that the heat makes equal: top_k = 1 is greedy all the same. */
static void test_top_1_is_greedy(void **state)
{
    uint64_t s = SEED, run;
    (void)state;
    for (run = 0; run < 2000; run++) {
        float logits[8], p[8], greedy[8];
        dspark_sampling one = law(run % 2 ? 1 : 1e7f, 1, 1, 0), none = law(0, 0, 1, 0);
        size_t i;
        for (i = 0; i < 8; i++) logits[i] = 0.1f + 0x1p-27f * (float)(next_random(&s) % 5);
        if (run % 3 == 0) logits[run % 8] = run % 2 ? -0.0f : 0.2f;
        if (run % 7 == 0) for (i = 0; i < 8; i++) logits[i] = i % 2 ? 0.0f : -0.0f;
        must(dspark_distribution(&one, logits, DSPARK_F32, 8, p, &err));
        must(dspark_distribution(&none, logits, DSPARK_F32, 8, greedy, &err));
        assert_memory_equal(p, greedy, sizeof p);
    }
}

/* B108: greedy and sampling rows side by side, and colder than fp32 can divide by. */
static void test_temperatures_side_by_side(void **state)
{
    static const float temperatures[5] = {0, 1, 0, 1e-8f, 0x1p-149f};
    const float logits[4] = {-3, 2.5f, 2.25f, -INFINITY};
    int i, k;
    (void)state;
    for (i = 0; i < 5; i++) {
        dspark_sampling t = law(temperatures[i], 0, 1, 0);
        float p[4];
        must(dspark_distribution(&t, logits, DSPARK_F32, 4, p, &err));
        for (k = 0; k < 4; k++) assert_true(p[k] >= 0 && p[k] <= 1);
        assert_true(p[3] == 0 && (i == 1 ? p[1] < 1 && p[2] > 0 : p[1] == 1));
    }
}

/* B110: bf16 logits with near ties. What is drawn follows what is handed out. */
static void test_drawn_is_what_is_handed_out(void **state)
{
    enum { N = 6, DRAWS = 200000 };
    const uint16_t logits[N] = {0x4080, 0x4081, 0x4080, 0x4082, 0x3f80, 0x407f}; /* 4, 4.03, 4, 4.06, 1, 3.98 */
    dspark_sampling t = law(0.7f, 0, 1, 0);
    float p[N];
    double want[N], x;
    uint64_t counts[N] = {0}, i;
    int df;
    (void)state;
    must(dspark_distribution(&t, logits, DSPARK_BF16, N, p, &err));
    for (i = 0; i < N; i++) want[i] = (double)p[i];
    for (i = 0; i < DRAWS; i++) {
        dspark_noise_key key = {SEED, 1, i, DSPARK_NOISE_DRAFT, 0};
        int32_t token;
        must(dspark_sample(p, N, &key, &token, &err));
        counts[token]++;
    }
    x = chi_square(counts, want, N, DRAWS, &df);
    print_message("  seed %u: chi-square of %d: %.2f\n", SEED, df, x);
    assert_true(x < limit_of(df));
}

/* ---- a block under the transforms ---- */

#define V 12
#define DEPTH 3
#define PAIRS 5

typedef struct pair {
    float p[V][V], q[V][V]; /* the row after token t */
} pair;

static void random_pair(pair *x, uint64_t *s, const dspark_sampling *target, const dspark_sampling *draft)
{
    size_t a, b;
    for (a = 0; a < V; a++) {
        float p[V], q[V];
        for (b = 0; b < V; b++) {
            p[b] = (float)(uniform(s) * 4);
            q[b] = p[b] + (float)(uniform(s) * 3 - 1.5);
        }
        must(dspark_distribution(target, p, DSPARK_F32, V, x->p[a], &err));
        must(dspark_distribution(draft, q, DSPARK_F32, V, x->q[a], &err));
    }
}

/* One block after token 0. one_hot: the drafts are the largest of q. */
static uint32_t play(const pair *x, dspark_verify_method method, int one_hot, uint64_t run,
                     int32_t out[DEPTH + 1])
{
    float p[DEPTH + 1][V], q[DEPTH][V];
    int32_t drafts[DEPTH], prev = 0;
    dspark_noise_key key = {SEED, run, 40, DSPARK_NOISE_ACCEPT, 0};
    dspark_verdict_tokens v;
    uint32_t i, t;
    for (i = 0; i < DEPTH; i++) {
        dspark_noise_key draw = {SEED, run, 40 + i, DSPARK_NOISE_DRAFT, 0};
        memcpy(p[i], x->p[prev], sizeof p[i]);
        memcpy(q[i], x->q[prev], sizeof q[i]);
        must(dspark_sample(q[i], V, &draw, &drafts[i], &err));
        if (one_hot)
            for (drafts[i] = 0, t = 1; t < V; t++)
                if (q[i][t] > q[i][drafts[i]]) drafts[i] = (int32_t)t;
        prev = drafts[i];
    }
    memcpy(p[DEPTH], x->p[prev], sizeof p[DEPTH]);
    must(dspark_verify(method, drafts, DEPTH, one_hot ? NULL : q[0], one_hot, p[0], V, &key, &v, &err));
    for (i = 0; i < v.n_accepted; i++) out[i] = drafts[i];
    out[v.n_accepted] = v.next;
    return v.n_accepted;
}

/* The first token has the target's law with every transform on either side, by both methods, also
 * where the draft's support is larger than the target's and the other way round. */
static void test_first_token_has_the_targets_law(void **state)
{
    const dspark_sampling laws[4] = {law(1, 0, 1, 0), law(0.7f, 4, 1, 0), law(1.3f, 0, 0.8f, 0),
                                     law(1, 0, 0.9f, 0.1f)};
    static pair x;
    uint64_t s = SEED;
    int i, method, one_hot;
    (void)state;
    for (i = 0; i < 4; i++) {
        random_pair(&x, &s, &laws[i], &laws[(i + 1) % 4]);
        for (method = 0; method < 2; method++)
            for (one_hot = 0; one_hot < 2; one_hot++) {
                uint64_t counts[V] = {0}, run;
                double want[V], statistic;
                int df, k;
                for (k = 0; k < V; k++) want[k] = (double)x.p[0][k];
                for (run = 0; run < RUNS / 8; run++) {
                    int32_t out[DEPTH + 1];
                    play(&x, (dspark_verify_method)method, one_hot, run, out);
                    counts[out[0]]++;
                }
                statistic = chi_square(counts, want, V, RUNS / 8, &df);
                if (df > 0) assert_true(statistic < limit_of(df));
                print_message("  seed %u, laws %d, %s, %s: chi-square of %d: %.1f\n", SEED, i,
                              method ? "block" : "token", one_hot ? "greedy" : "sampled", df, statistic);
            }
    }
}

/* Accepted drafts: token-wise as sum of min(p, q) says, and with the same pairs no fewer by block. */
static void test_block_accepts_no_fewer(void **state)
{
    const dspark_sampling plain = law(1, 0, 1, 0);
    static pair x;
    uint64_t s = SEED;
    double gained = 0;
    int i, d, a, b;
    (void)state;
    for (i = 0; i < PAIRS; i++) {
        double reach[V] = {1}, expected = 0, n[2] = {0, 0};
        uint64_t run;
        int32_t out[DEPTH + 1];
        random_pair(&x, &s, &plain, &plain);
        for (d = 0; d < DEPTH; d++) {
            double next[V] = {0};
            for (a = 0; a < V; a++)
                for (b = 0; b < V; b++) next[b] += reach[a] * fmin((double)x.p[a][b], (double)x.q[a][b]);
            for (b = 0; b < V; b++) expected += next[b];
            memcpy(reach, next, sizeof reach);
        }
        for (run = 0; run < RUNS / 8; run++) {
            n[0] += play(&x, DSPARK_VERIFY_TOKEN, 0, run, out);
            n[1] += play(&x, DSPARK_VERIFY_BLOCK, 0, run, out);
        }
        n[0] /= RUNS / 8;
        n[1] /= RUNS / 8;
        assert_true(fabs(n[0] - expected) < 0.05); /* five standard deviations of at most 1.2 */
        assert_true(n[1] > expected - 0.05);
        gained += n[1] - expected;
    }
    print_message("  seed %u: block accepts %.4f more on average\n", SEED, gained / PAIRS);
    assert_true(gained / PAIRS > 0.01);
}

/* Nothing depends on what else is asked: neighbours, order, a second time. */
static void test_repetition_changes_nothing(void **state)
{
    const dspark_sampling plain = law(1, 0, 1, 0);
    static pair x;
    static int32_t once[256][DEPTH + 1];
    static uint32_t n[256];
    uint64_t s = SEED, run;
    (void)state;
    random_pair(&x, &s, &plain, &plain);
    memset(once, 0, sizeof once);
    for (run = 0; run < 256; run++) n[run] = play(&x, DSPARK_VERIFY_BLOCK, 0, run, once[run]);
    for (run = 256; run-- > 0;) { /* backwards, with others between */
        int32_t out[DEPTH + 1] = {0};
        play(&x, DSPARK_VERIFY_TOKEN, 1, run * 31, out);
        memset(out, 0, sizeof out);
        assert_int_equal(play(&x, DSPARK_VERIFY_BLOCK, 0, run, out), n[run]);
        assert_memory_equal(out, once[run], sizeof out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_selection_equals_sorting), cmocka_unit_test(test_top_1_is_greedy),
        cmocka_unit_test(test_temperatures_side_by_side), cmocka_unit_test(test_drawn_is_what_is_handed_out),
        cmocka_unit_test(test_first_token_has_the_targets_law), cmocka_unit_test(test_block_accepts_no_fewer),
        cmocka_unit_test(test_repetition_changes_nothing),
    };
    return cmocka_run_group_tests_name("spec_law", tests, NULL, NULL);
}
