/* exp, sigmoid and tanh in fp32. The text of docs/numerics.md as C; kern/ repeats exp in vectors
 * and must equal it bit for bit. */
#include "base/expf.h"

#include "base/numfmt.h"

#include <math.h>

#define F32_NAN      0x7fc00000u
#define F32_INFINITY 0x7f800000u

float dspark__exp_f32(float x)
{
    if (x != x) return dspark__f32_from_bits(F32_NAN);
    if (x > DSPARK__EXP_MOST) return dspark__f32_from_bits(F32_INFINITY);
    if (x < DSPARK__EXP_LEAST) return 0.0f;
    float n = rintf(x * DSPARK__EXP_LOG2E);      /* -126 .. 128 */
    float r = fmaf(n, -DSPARK__EXP_LN2_HIGH, x); /* exact */
    r = fmaf(n, -DSPARK__EXP_LN2_LOW, r);
    float y = fmaf(DSPARK__EXP_C6, r, DSPARK__EXP_C5);
    y = fmaf(y, r, DSPARK__EXP_C4);
    y = fmaf(y, r, DSPARK__EXP_C3);
    y = fmaf(y, r, DSPARK__EXP_C2);
    y = fmaf(y, r, 1.0f);
    y = fmaf(y, r, 1.0f);
    /* times 2^n: y < 1 when n is 128 and y >= 1 when n is -126, so the exponent stays in range */
    return dspark__f32_from_bits(dspark__f32_bits(y) + ((uint32_t)(int32_t)n << 23));
}

float dspark__sigmoid_f32(float x)
{
    if (x != x) return dspark__f32_from_bits(F32_NAN);
    return 1.0f / (1.0f + dspark__exp_f32(-x));
}

float dspark__tanh_f32(float x)
{
    if (x != x) return dspark__f32_from_bits(F32_NAN);
    float e = dspark__exp_f32(-2.0f * fabsf(x));
    return copysignf((1.0f - e) / (1.0f + e), x);
}
