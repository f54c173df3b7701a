/* Rotary embedding: frequencies of a config and the cos/sin row of a position. One table serves the
 * context path and, later, the block path. Rotation itself is a kernel. */
#ifndef DSPARK_MODEL_ROPE_H
#define DSPARK_MODEL_ROPE_H

#include "kern/kern.h"

#define DSPARK__ROPE_MAX_PAIRS 256u

typedef struct dspark__rope {
    uint32_t n_pairs;
    float attn;                                  /* factor on cos and sin; 1 without YaRN */
    float inv_freq[DSPARK__ROPE_MAX_PAIRS];
} dspark__rope;

/* Plain: f_i = 1 / theta^(2i/R). YaRN: mixes f_i and f_i / factor by a ramp over i between the pairs
 * that turn beta_fast and beta_slow times within the original window. All mixing is fp32; theta^x and
 * the ramp's ends are computed in double (docs/numerics.md). */
dspark_status dspark__rope_init(dspark__rope *rope, const dspark_config *config, dspark_error *err);

/* cos[j], sin[j] of angle = (float)position * f_j, an fp32 product; cos and sin of it in double by
 * dspark__sincos, rounded once, times attn in fp32. position >= 0. */
void dspark__rope_row(const dspark__rope *rope, const dspark__kern *kern, int64_t position, float *cos,
                      float *sin);

/* The softmax scale of attention: (P + R)^-0.5, times yarn_m(factor, mscale_all_dim)^2 with YaRN. */
double dspark__rope_softmax_scale(const dspark_config *config);

#endif
