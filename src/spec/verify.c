/* Greedy, token-wise and block verification. Rows are read, never changed; nothing is allocated: what is
 * left of a row after a draft is summed and walked in place. */
#include "spec/verify.h"

#include <math.h>

#include "base/status.h"
#include "spec/rng.h"

#define SUM_TOLERANCE 1e-3

static dspark_status check_token(const char *what, size_t i, int64_t token, size_t vocab,
                                 dspark_error *err)
{
    if (token >= 0 && (uint64_t)token < vocab) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EINVAL, what, "place %zu: %lld is no id, the vocabulary has %zu", i,
                        (long long)token, vocab);
}

dspark_status dspark__verify_greedy(const int32_t *drafts, size_t n, const int32_t *target_argmax,
                                    size_t vocab, dspark_verdict_tokens *out, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    size_t k = 0;
    *out = (dspark_verdict_tokens){0, -1};
    for (size_t i = 0; st == DSPARK_OK && i <= n; i++) {
        if (i < n) st = check_token("drafts", i, drafts[i], vocab, err);
        if (st == DSPARK_OK) st = check_token("target_argmax", i, target_argmax[i], vocab, err);
    }
    if (st != DSPARK_OK) return st;
    while (k < n && drafts[k] == target_argmax[k]) k++;
    *out = (dspark_verdict_tokens){(uint32_t)k, target_argmax[k]};
    return DSPARK_OK;
}

/* ---- rejection sampling ---- */

typedef struct rows {
    const int32_t *drafts;
    const float *p, *q; /* q NULL: one-hot */
    size_t n, vocab;
    dspark_noise_key key;
} rows;

static double p_at(const rows *r, size_t i, size_t token)
{
    return (double)r->p[i * r->vocab + token];
}

static double q_at(const rows *r, size_t i, size_t token)
{
    if (r->q) return (double)r->q[i * r->vocab + token];
    return (size_t)r->drafts[i] == token ? 1.0 : 0.0;
}

static double noise(const rows *r, size_t i, dspark_noise purpose)
{
    dspark_noise_key key = r->key;
    key.block = key.position;
    key.position += i;
    key.purpose = purpose;
    return dspark__uniform(&key);
}

/* What is left at place i for one token: max(w p - q, 0); without a draft (bonus) p itself. */
static double left_at(const rows *r, size_t i, double w, size_t token)
{
    double left;
    if (i == r->n) return p_at(r, i, token);
    left = w * p_at(r, i, token) - q_at(r, i, token);
    return left > 0 ? left : 0;
}

static double mass_left(const rows *r, size_t i, double w)
{
    double sum = 0;
    for (size_t t = 0; t < r->vocab; t++) sum += left_at(r, i, w, t);
    return sum;
}

/* A token of what is left at place i. When nothing is left p equals q there, and p is drawn from. */
static int32_t draw_left(const rows *r, size_t i, double w)
{
    double mass = mass_left(r, i, w), sum = 0, limit;
    int plain = !(mass > 0);
    size_t last = 0;
    if (plain)
        for (size_t t = 0; t < r->vocab; t++) mass += p_at(r, i, t);
    limit = noise(r, i, i == r->n ? DSPARK_NOISE_BONUS : DSPARK_NOISE_RESIDUAL) * mass;
    for (size_t t = 0; t < r->vocab; t++) {
        double here = plain ? p_at(r, i, t) : left_at(r, i, w, t);
        if (!(here > 0)) continue;
        last = t;
        sum += here;
        if (sum > limit) break;
    }
    return (int32_t)last;
}

/* u < p / q, written so that u = 0 never accepts p = 0. */
static void verify_tokens(const rows *r, dspark_verdict_tokens *out)
{
    size_t i = 0;
    while (i < r->n) {
        size_t token = (size_t)r->drafts[i];
        if (!(noise(r, i, DSPARK_NOISE_ACCEPT) * q_at(r, i, token) < p_at(r, i, token))) break;
        i++;
    }
    *out = (dspark_verdict_tokens){(uint32_t)i, draw_left(r, i, 1)};
}

/* arXiv 2403.10444: the longest prefix whose own test passes. P is the running min(1, product of p / q);
 * u is in (0, 1], so that a chance of 0 never passes. */
static void verify_block(const rows *r, dspark_verdict_tokens *out)
{
    double running = 1, at_end = 1;
    size_t accepted = 0;
    for (size_t i = 0; i < r->n; i++) {
        size_t token = (size_t)r->drafts[i];
        double chance, u = 1 - noise(r, i, DSPARK_NOISE_ACCEPT);
        running *= p_at(r, i, token) / q_at(r, i, token);
        if (running > 1) running = 1;
        chance = running;
        if (i + 1 < r->n) {
            double left = mass_left(r, i + 1, running), whole = left + 1 - running;
            chance = whole > 0 ? left / whole : 1;
        }
        if (u <= chance) {
            accepted = i + 1;
            at_end = running;
        }
    }
    *out = (dspark_verdict_tokens){(uint32_t)accepted, draw_left(r, accepted, at_end)};
}

static dspark_status check_row(const char *what, const float *row, size_t i, size_t vocab,
                               dspark_error *err)
{
    double sum = 0;
    for (size_t t = 0; t < vocab; t++) {
        if (!(row[t] >= 0) || !isfinite(row[t]))
            return dspark__fail(err, DSPARK_EINVAL, what, "row %zu, token %zu: %g is no probability", i, t,
                                (double)row[t]);
        sum += (double)row[t];
    }
    if (fabs(sum - 1) <= SUM_TOLERANCE) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EINVAL, what, "row %zu sums to %.6g instead of 1", i, sum);
}

static dspark_status check_rows(const rows *r, dspark_error *err)
{
    dspark_status st = check_row("p", r->p + r->n * r->vocab, r->n, r->vocab, err);
    for (size_t i = 0; st == DSPARK_OK && i < r->n; i++) {
        st = check_token("drafts", i, r->drafts[i], r->vocab, err);
        if (st == DSPARK_OK) st = check_row("p", r->p + i * r->vocab, i, r->vocab, err);
        if (st == DSPARK_OK && r->q) st = check_row("q", r->q + i * r->vocab, i, r->vocab, err);
        if (st == DSPARK_OK && !(q_at(r, i, (size_t)r->drafts[i]) > 0))
            st = dspark__fail(err, DSPARK_EINVAL, "q",
                              "row %zu gives its own draft %d the probability 0: these are not what it was "
                              "drawn from", i, (int)r->drafts[i]);
    }
    return st;
}

dspark_status dspark__verify(dspark_verify_method method, const int32_t *drafts, size_t n,
                             const float *q, int one_hot, const float *p, size_t vocab,
                             const dspark_noise_key *key, dspark_verdict_tokens *out,
                             dspark_error *err)
{
    const rows r = {drafts, p, one_hot ? NULL : q, n, vocab, *key};
    *out = (dspark_verdict_tokens){0, -1};
    if (method != DSPARK_VERIFY_TOKEN && method != DSPARK_VERIFY_BLOCK)
        return dspark__fail(err, DSPARK_EINVAL, "method", "%d is neither token nor block", (int)method);
    if (n && !one_hot && !q)
        return dspark__fail(err, DSPARK_EINVAL, "q", "is NULL: sampled drafts need the distributions that they "
                                                     "were drawn from, greedy ones one_hot");
    if (n && one_hot && q)
        return dspark__fail(err, DSPARK_EINVAL, "q", "is given beside one_hot");
    dspark_status st = check_rows(&r, err);
    if (st != DSPARK_OK) return st;
    if (method == DSPARK_VERIFY_TOKEN) verify_tokens(&r, out);
    else verify_block(&r, out);
    return DSPARK_OK;
}

/* ---- counters ---- */

void dspark__acceptance_add(dspark_acceptance *a, uint32_t n_drafted, uint32_t n_accepted)
{
    a->n_blocks++;
    for (uint32_t k = 0; k < n_drafted && k < DSPARK_MAX_COUNTED; k++) {
        a->drafted[k]++;
        a->accepted[k] += k < n_accepted;
    }
}

double dspark__acceptance_length(const dspark_acceptance *a, int with_bonus)
{
    uint64_t sum = 0;
    if (a->n_blocks == 0) return 0;
    for (size_t k = 0; k < DSPARK_MAX_COUNTED; k++) sum += a->accepted[k];
    return (double)sum / (double)a->n_blocks + (with_bonus ? 1 : 0);
}
