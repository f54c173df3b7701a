/* Logits to the distribution that is drawn from, and a draw from exactly that array. */
#ifndef DSPARK_SPEC_SAMPLE_H
#define DSPARK_SPEC_SAMPLE_H

#include "dspark/dspark.h"

/* DSPARK_EINVAL names the field that is out of range. */
dspark_status dspark__sampling_check(const dspark_sampling *s, dspark_error *err);
dspark_status dspark__distribution(const dspark_sampling *s, const void *logits, dspark_dtype dtype,
                                   size_t vocab, float *probs, dspark_error *err);
dspark_status dspark__sample(const float *probs, size_t vocab, const dspark_noise_key *key,
                             int32_t *token, dspark_error *err);

#endif
