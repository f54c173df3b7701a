/* Temperature, top-k, top-p, min-p. Selection works on keys that order like the numbers, one byte of the
 * key at a time, so nothing is sorted and nothing but the row of probabilities is written. */
#include "spec/sample.h"

#include <math.h>
#include <string.h>

#include "base/expf.h"
#include "base/numfmt.h"
#include "base/status.h"
#include "spec/rng.h"

dspark_status dspark__sampling_check(const dspark_sampling *s, dspark_error *err)
{
    if (s->struct_size != sizeof *s)
        return dspark__fail(err, DSPARK_EINVAL, "sampling", "struct_size %zu, this library has %zu",
                            s->struct_size, sizeof *s);
    if (!(s->temperature >= 0) || !isfinite(s->temperature))
        return dspark__fail(err, DSPARK_EINVAL, "temperature", "%g is not allowed; 0 or more",
                            (double)s->temperature);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return dspark__fail(err, DSPARK_EINVAL, "top_p", "%g is not allowed; above 0, at most 1",
                            (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return dspark__fail(err, DSPARK_EINVAL, "min_p", "%g is not allowed; 0 to 1", (double)s->min_p);
    return DSPARK_OK;
}

static float logit_at(const void *logits, dspark_dtype dtype, size_t i)
{
    float f;
    if (dtype == DSPARK_BF16) return dspark__bf16_to_f32(dspark__load_u16((const char *)logits + 2 * i));
    memcpy(&f, (const char *)logits + 4 * i, sizeof f);
    return f;
}

/* The largest, lowest index on ties; SIZE_MAX when the row is no row of logits. */
static size_t find_largest(const void *logits, dspark_dtype dtype, size_t vocab)
{
    size_t best = SIZE_MAX;
    float most = -INFINITY;
    for (size_t i = 0; i < vocab; i++) {
        float x = logit_at(logits, dtype, i);
        if (isnan(x) || x == INFINITY) return SIZE_MAX;
        if (x > most) {
            most = x;
            best = i;
        }
    }
    return best;
}

/* ---- selection: keep the largest by number or by mass ---- */

/* Probabilities are >= +0, and then their bits order as they do. */
static uint32_t key_of(float p)
{
    return dspark__f32_bits(p);
}

/* Keep the largest ones until `limit` is reached (limit_count of them, or a mass of limit_mass), the
 * lower index first among equals; all others become 0. */
static void keep_largest(float *p, size_t n, int by_mass, double limit)
{
    uint32_t prefix = 0, mask = 0;
    double above = 0; /* what the keys above the prefix come to */
    for (int shift = 24; shift >= 0; shift -= 8) {
        double bins[256] = {0};
        int bin = 255;
        for (size_t i = 0; i < n; i++) {
            uint32_t key = key_of(p[i]);
            if ((key & mask) == prefix) bins[key >> shift & 255] += by_mass ? (double)p[i] : 1.0;
        }
        while (bin > 0 && above + bins[bin] < limit) above += bins[bin--];
        prefix |= (uint32_t)bin << shift;
        mask |= 255u << shift;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t key = key_of(p[i]);
        if (key > prefix) continue;
        if (key == prefix && above < limit) above += by_mass ? (double)p[i] : 1.0;
        else p[i] = 0;
    }
}

static double sum_of(const float *p, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)p[i];
    return sum;
}

dspark_status dspark__distribution(const dspark_sampling *s, const void *logits, dspark_dtype dtype,
                                   size_t vocab, float *probs, dspark_error *err)
{
    dspark_status st = dspark__sampling_check(s, err);
    if (st != DSPARK_OK) return st;
    if (dtype != DSPARK_BF16 && dtype != DSPARK_F32)
        return dspark__fail(err, DSPARK_EINVAL, "dtype", "logits are BF16 or F32");
    size_t best = find_largest(logits, dtype, vocab);
    if (best == SIZE_MAX)
        return dspark__fail(err, DSPARK_ENONFINITE, "logits",
                            "NaN, +infinity or nothing but -infinity among %zu", vocab);
    if (s->temperature == 0) {
        memset(probs, 0, vocab * sizeof *probs);
        probs[best] = 1;
        return DSPARK_OK;
    }
    const float most = logit_at(logits, dtype, best);
    for (size_t i = 0; i < vocab; i++)
        probs[i] = dspark__exp_f32((logit_at(logits, dtype, i) - most) / s->temperature);
    /* Equal logits have equal probabilities, and the largest is 1: selecting by them is by logits, but
     * for what has become 0 and would never be drawn. */
    if (s->top_k && s->top_k < vocab) keep_largest(probs, vocab, 0, s->top_k);
    if (s->top_p < 1) keep_largest(probs, vocab, 1, (double)s->top_p * sum_of(probs, vocab));
    for (size_t i = 0; s->min_p > 0 && i < vocab; i++)
        if (probs[i] < s->min_p) probs[i] = 0;
    const double sum = sum_of(probs, vocab);
    for (size_t i = 0; i < vocab; i++) probs[i] = (float)((double)probs[i] / sum);
    return DSPARK_OK;
}

dspark_status dspark__sample(const float *probs, size_t vocab, const dspark_noise_key *key,
                             int32_t *token, dspark_error *err)
{
    const double limit = dspark__uniform(key) * sum_of(probs, vocab);
    size_t last = SIZE_MAX;
    double sum = 0;
    *token = -1;
    for (size_t i = 0; i < vocab; i++) {
        if (!(probs[i] > 0)) continue;
        last = i;
        sum += (double)probs[i];
        if (sum > limit) break;
    }
    if (last == SIZE_MAX || !isfinite(sum))
        return dspark__fail(err, DSPARK_ENONFINITE, "probs", "no distribution: nothing can be drawn");
    *token = (int32_t)last;
    return DSPARK_OK;
}
