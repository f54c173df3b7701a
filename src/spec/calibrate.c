/* Calibration: temperatures by a grid search, one position after the other, and ECE, Brier, AUC. The
 * logarithm of the fit is the C library's: it decides between points of a grid, and no probability that
 * is handed out comes from it. */
#include "spec/calibrate.h"

#include <math.h>
#include <stdlib.h>

#include "base/expf.h"
#include "base/status.h"

#define MAX_POSITIONS 256u
#define BINS 20u
#define GRID 81
/* The grid: 1/8 to 8, evenly in the logarithm, 1 in its middle. */
static double grid_at(int i)
{
    return exp2((i - GRID / 2) * (3.0 / (GRID / 2)));
}

static size_t bin_of(double p, size_t bins)
{
    size_t b = (size_t)(p * (double)bins);
    return b < bins ? b : bins - 1;
}

/* ---- the fit ---- */

/* Survival up to k - 1 with the temperatures found so far, for every record; and this position's
 * logit. */
typedef struct fit {
    const float *confidence;
    const uint8_t *accepted;
    size_t n;
    uint32_t k, at;
    double *before; /* [n] */
} fit;

static double scaled(double p, double temperature)
{
    const double least = 1e-7;
    if (p < least) p = least;
    if (p > 1 - least) p = 1 - least;
    return 1 / (1 + exp(-log(p / (1 - p)) / temperature));
}

/* ECE of survival through position `at` at a temperature. */
static double error_at(const fit *f, double temperature)
{
    double sum[BINS] = {0}, hits[BINS] = {0}, error = 0;
    for (size_t i = 0; i < f->n; i++) {
        double s = f->before[i] * scaled((double)f->confidence[i * f->k + f->at], temperature);
        size_t b = bin_of(s, BINS);
        sum[b] += s;
        hits[b] += f->accepted[i] > f->at;
    }
    for (size_t b = 0; b < BINS; b++) error += fabs(sum[b] - hits[b]);
    return error / (double)f->n;
}

static double best_temperature(const fit *f)
{
    double best = 1, least = error_at(f, 1);
    for (int i = 0; i < GRID; i++) {
        double t = grid_at(i), e = error_at(f, t);
        if (!(e < least)) continue;
        least = e;
        best = t;
    }
    return best;
}

dspark_status dspark__calibration_fit(dspark_calibration *out, const float *confidence,
                                      const uint8_t *accepted, size_t n, uint32_t k,
                                      dspark_error *err)
{
    fit f = {confidence, accepted, n, k, 0, NULL};
    *out = (dspark_calibration){0};
    if (n == 0 || k == 0 || k > MAX_POSITIONS)
        return dspark__fail(err, DSPARK_EINVAL, "calibration", "%zu records of %u positions (1 to %u)", n, k,
                            MAX_POSITIONS);
    for (size_t i = 0; i < n; i++) {
        if (accepted[i] > k)
            return dspark__fail(err, DSPARK_EINVAL, "accepted", "record %zu: %u of %u", i, accepted[i], k);
        for (uint32_t j = 0; j < k; j++)
            if (!(confidence[i * k + j] >= 0 && confidence[i * k + j] <= 1))
                return dspark__fail(err, DSPARK_EINVAL, "confidence", "record %zu, position %u: %g", i, j,
                                    (double)confidence[i * k + j]);
    }
    f.before = malloc(n * sizeof *f.before);
    if (!f.before) return dspark__fail_nomem(err, "calibration", n * sizeof *f.before);
    for (size_t i = 0; i < n; i++) f.before[i] = 1;
    for (f.at = 0; f.at < k; f.at++) {
        double t = out->temperatures[f.at] = best_temperature(&f);
        for (size_t i = 0; i < n; i++) f.before[i] *= scaled((double)confidence[i * k + f.at], t);
    }
    out->n = k;
    free(f.before);
    return DSPARK_OK;
}

void dspark__calibration_apply(const dspark_calibration *c, const float *logits, uint32_t k,
                               float *probabilities)
{
    for (uint32_t i = 0; i < k; i++)
        probabilities[i] = dspark__sigmoid_f32(i < c->n ? logits[i] / (float)c->temperatures[i] : logits[i]);
}

/* ---- figures ---- */

double dspark__ece(const float *p, const uint8_t *y, size_t n, size_t bins)
{
    double error = 0;
    if (n == 0 || bins == 0) return (double)NAN;
    for (size_t b = 0; b < bins; b++) {
        double sum = 0, hits = 0;
        for (size_t i = 0; i < n; i++) {
            if (bin_of((double)p[i], bins) != b) continue;
            sum += (double)p[i];
            hits += y[i];
        }
        error += fabs(sum - hits);
    }
    return error / (double)n;
}

double dspark__brier(const float *p, const uint8_t *y, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += ((double)p[i] - y[i]) * ((double)p[i] - y[i]);
    return n ? sum / (double)n : (double)NAN;
}

typedef struct scored {
    float p;
    uint8_t y;
} scored;

static int compare_scored(const void *a, const void *b)
{
    float x = ((const scored *)a)->p, y = ((const scored *)b)->p;
    return (x > y) - (x < y);
}

dspark_status dspark__auc(const float *p, const uint8_t *y, size_t n, double *auc, dspark_error *err)
{
    double below = 0, wins = 0, ones = 0;
    scored *all;
    *auc = (double)NAN;
    if (n == 0) return DSPARK_OK;
    all = malloc(n * sizeof *all);
    if (!all) return dspark__fail_nomem(err, "auc", n * sizeof *all);
    for (size_t i = 0; i < n; i++) all[i] = (scored){p[i], y[i]};
    qsort(all, n, sizeof *all, compare_scored);
    /* Pairs of a one above a zero; equal scores count half. */
    for (size_t i = 0, end; i < n; i = end) {
        double zeros = 0, here = 0;
        for (end = i; end < n && all[end].p == all[i].p; end++) {
            here += all[end].y;
            zeros += !all[end].y;
        }
        wins += here * (below + zeros / 2);
        below += zeros;
        ones += here;
    }
    if (ones > 0 && below > 0) *auc = wins / (ones * below);
    free(all);
    return DSPARK_OK;
}
