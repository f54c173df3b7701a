/* exp, sigmoid and tanh in fp32, by operations that IEEE defines to the last bit
 * (docs/numerics.md): no libm result is in them, so every machine and every kernel level gives the same bits. The
 * constants are here because the vector levels repeat exp lane by lane. Round to nearest is assumed
 * (base/fpenv.h). */
#ifndef DSPARK_BASE_EXPF_H
#define DSPARK_BASE_EXPF_H

#define DSPARK__EXP_MOST     0x1.62e42ep+6f    /* largest x whose exp is finite */
#define DSPARK__EXP_LEAST    (-0x1.5d589ep+6f) /* smallest x whose exp is at least FLT_MIN */
#define DSPARK__EXP_LOG2E    0x1.715476p+0f
#define DSPARK__EXP_LN2_HIGH 0x1.62e430p-1f
#define DSPARK__EXP_LN2_LOW  (-0x1.05c610p-29f)
/* exp(r) = 1 + r + r^2 (C2 + r (C3 + ...)) for |r| <= 0.34662, relative error 3.2e-9 */
#define DSPARK__EXP_C2 0x1.fffffcp-2f
#define DSPARK__EXP_C3 0x1.555492p-3f
#define DSPARK__EXP_C4 0x1.5558aep-5f
#define DSPARK__EXP_C5 0x1.123980p-7f
#define DSPARK__EXP_C6 0x1.6a4f14p-10f

/* At most 1 ulp. Above MOST infinity, below LEAST (the result would be subnormal) +0; NaN is
 * 0x7fc00000, as in the two functions below. */
float dspark__exp_f32(float x);

/* 1 / (1 + exp(-x)). */
float dspark__sigmoid_f32(float x);

/* (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x. */
float dspark__tanh_f32(float x);

#endif
