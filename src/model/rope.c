/* Frequencies, plain and YaRN; the angles of a position are a kernel. */
#include "model/rope.h"

#include <math.h>

#include "base/status.h"

#define PI 3.14159265358979323846

static double yarn_m(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

/* The (fractional) pair index that turns `turns` times within the original window. */
static double correction_dim(const dspark_config *c, double turns)
{
    return c->qk_rope_head_dim * log((double)c->rope_original_max_positions / (turns * 2 * PI)) /
           (2 * log(c->rope_theta));
}

dspark_status dspark__rope_init(dspark__rope *rope, const dspark_config *c, dspark_error *err)
{
    uint32_t pairs = c->qk_rope_head_dim / 2;
    if (c->qk_rope_head_dim % 2 || pairs == 0 || pairs > DSPARK__ROPE_MAX_PAIRS)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, "qk_rope_head_dim",
                            "%u: expected an even number from 2 to %u", c->qk_rope_head_dim,
                            2 * DSPARK__ROPE_MAX_PAIRS);
    rope->n_pairs = pairs;
    rope->attn = 1;

    float low = 0, span = 1, factor = 1, extrapolation = 1;
    if (c->rope_type == DSPARK_ROPE_YARN) {
        double lo = floor(correction_dim(c, c->rope_beta_fast));
        double hi = ceil(correction_dim(c, c->rope_beta_slow));
        if (lo < 0) lo = 0;
        if (hi > c->qk_rope_head_dim - 1.0) hi = c->qk_rope_head_dim - 1.0;
        if (lo == hi) hi += 0.001;
        low = (float)lo;
        span = (float)(hi - lo);
        factor = (float)c->rope_factor;
        extrapolation = (float)c->rope_extrapolation_factor;
        rope->attn = (float)(yarn_m(c->rope_factor, c->rope_mscale) /
                             yarn_m(c->rope_factor, c->rope_mscale_all_dim) * c->rope_attn_factor);
    }
    for (uint32_t i = 0; i < pairs; i++) {
        float power = (float)pow(c->rope_theta, 2.0 * i / c->qk_rope_head_dim);
        float own = 1.0f / power;
        if (c->rope_type != DSPARK_ROPE_YARN) {
            rope->inv_freq[i] = own;
            continue;
        }
        float ramp = ((float)i - low) / span;
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        float mask = (1 - ramp) * extrapolation;
        float slow = 1.0f / (factor * power);
        rope->inv_freq[i] = slow * (1 - mask) + own * mask;
    }
    return DSPARK_OK;
}

void dspark__rope_row(const dspark__rope *rope, const dspark__kern *kern, int64_t position, float *cos,
                      float *sin)
{
    kern->rope_angles(cos, sin, rope->inv_freq, rope->n_pairs, (float)position, rope->attn);
}

double dspark__rope_softmax_scale(const dspark_config *c)
{
    double scale = 1 / sqrt((double)c->qk_nope_head_dim + c->qk_rope_head_dim);
    if (c->rope_type == DSPARK_ROPE_YARN) {
        double m = yarn_m(c->rope_factor, c->rope_mscale_all_dim);
        scale *= m * m;
    }
    return scale;
}
