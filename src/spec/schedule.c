/* Scheduling of verification. A decision about a draft may only use what was known before that draft
 * was sampled; why the early stop and the stale budget hold to that, docs/verification.md says. */
#include "spec/schedule.h"

#include <math.h>
#include <string.h>

#include "base/status.h"

void dspark__survival(const float *confidence, uint32_t n, float *survival)
{
    float product = 1;
    for (uint32_t k = 0; k < n; k++) survival[k] = product *= confidence[k];
}

uint32_t dspark__keep_static(const float *confidence, uint32_t n, float threshold)
{
    float product = 1;
    for (uint32_t k = 0; threshold > 0 && k < n; k++) {
        product *= confidence[k];
        if (!(product >= threshold)) return k;
    }
    return n;
}

double dspark__steps_per_second(const dspark_step_table *t, uint64_t tokens)
{
    for (uint32_t i = 0; i < t->n; i++)
        if (t->tokens[i] >= tokens) return t->steps_per_second[i];
    return t->steps_per_second[t->n - 1] * (double)t->tokens[t->n - 1] / (double)tokens;
}

/* ---- checking ---- */

static dspark_status check_table(const dspark_step_table *t, dspark_error *err)
{
    if (!t || t->n == 0 || !t->tokens || !t->steps_per_second)
        return dspark__fail(err, DSPARK_EINVAL, "table", "has no rows");
    for (uint32_t i = 0; i < t->n; i++) {
        if (t->tokens[i] == 0 || (i && t->tokens[i] <= t->tokens[i - 1]))
            return dspark__fail(err, DSPARK_EINVAL, "table", "row %u: sizes must be above 0 and ascend", i);
        if (!(t->steps_per_second[i] > 0) || !isfinite(t->steps_per_second[i]))
            return dspark__fail(err, DSPARK_EINVAL, "table", "row %u: %g steps per second", i,
                                t->steps_per_second[i]);
    }
    return DSPARK_OK;
}

static dspark_status check_confidence(const char *what, const float *c, size_t stride,
                                      const uint32_t *n_drafted, size_t n, dspark_error *err)
{
    for (size_t r = 0; r < n; r++) {
        if (n_drafted[r] > stride)
            return dspark__fail(err, DSPARK_EINVAL, "n_drafted", "sequence %zu: %u of a row of %zu", r,
                                n_drafted[r], stride);
        for (uint32_t k = 0; k < n_drafted[r]; k++)
            if (!(c[r * stride + k] >= 0 && c[r * stride + k] <= 1))
                return dspark__fail(err, DSPARK_EINVAL, what, "sequence %zu, draft %u: %g is no probability",
                                    r, k, (double)c[r * stride + k]);
    }
    return DSPARK_OK;
}

/* ---- the next draft in order of survival ---- */

typedef struct queue {
    const float *confidence;
    size_t stride, n;
    const uint32_t *n_drafted;
} queue;

static double survival_of(const queue *q, size_t r, uint32_t k)
{
    double product = 1;
    for (uint32_t i = 0; i <= k; i++) product *= (double)q->confidence[r * q->stride + i];
    return product;
}

/* The sequence whose next draft (keep[r]) survives most likely, the first of equals; SIZE_MAX when all
 * are admitted. Survival does not rise along a sequence, so this is the order of a sort. */
static size_t next_draft(const queue *q, const uint32_t *keep, double *survival)
{
    size_t best = SIZE_MAX;
    for (size_t r = 0; r < q->n; r++) {
        if (keep[r] >= q->n_drafted[r]) continue;
        double s = survival_of(q, r, keep[r]);
        if (best != SIZE_MAX && !(s > *survival)) continue;
        best = r;
        *survival = s;
    }
    return best;
}

dspark_status dspark__schedule(const float *confidence, size_t stride, const uint32_t *n_drafted,
                               size_t n, const dspark_step_table *table, uint32_t *keep,
                               dspark_error *err)
{
    const queue q = {confidence, stride, n, n_drafted};
    double expected = (double)n, rate, survival = 0;
    uint64_t tokens = n;
    dspark_status st = check_table(table, err);
    if (st == DSPARK_OK) st = check_confidence("confidence", confidence, stride, n_drafted, n, err);
    if (st != DSPARK_OK) return st;
    memset(keep, 0, n * sizeof *keep);
    if (n == 0) return DSPARK_OK;
    rate = expected * dspark__steps_per_second(table, tokens);
    for (size_t r; (r = next_draft(&q, keep, &survival)) != SIZE_MAX;) {
        double next = (expected + survival) * dspark__steps_per_second(table, tokens + 1);
        if (!(next > rate)) break; /* the early stop */
        expected += survival;
        tokens++;
        rate = next;
        keep[r]++;
    }
    return DSPARK_OK;
}

dspark_status dspark__schedule_stale(const float *stale, const float *confidence, size_t stride,
                                     const uint32_t *n_drafted, size_t n,
                                     const dspark_step_table *table, uint32_t *keep,
                                     dspark_error *err)
{
    const queue old = {stale, stride, n, n_drafted}, now = {confidence, stride, n, n_drafted};
    double expected = (double)n, best, survival = 0;
    uint64_t tokens = n, budget = 0;
    dspark_status st = check_table(table, err);
    if (st == DSPARK_OK) st = check_confidence("stale", stale, stride, n_drafted, n, err);
    if (st == DSPARK_OK) st = check_confidence("confidence", confidence, stride, n_drafted, n, err);
    if (st != DSPARK_OK) return st;
    memset(keep, 0, n * sizeof *keep);
    if (n == 0) return DSPARK_OK;
    best = expected * dspark__steps_per_second(table, tokens);
    for (size_t r; (r = next_draft(&old, keep, &survival)) != SIZE_MAX;) {
        expected += survival;
        tokens++;
        keep[r]++;
        if (!(expected * dspark__steps_per_second(table, tokens) > best)) continue;
        best = expected * dspark__steps_per_second(table, tokens);
        budget = tokens - n;
    }
    memset(keep, 0, n * sizeof *keep);
    for (size_t r; budget > 0 && (r = next_draft(&now, keep, &survival)) != SIZE_MAX; budget--) keep[r]++;
    return DSPARK_OK;
}
