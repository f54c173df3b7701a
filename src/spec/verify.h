/* Which drafts stand, and what comes after them; and the counters of that. */
#ifndef DSPARK_SPEC_VERIFY_H
#define DSPARK_SPEC_VERIFY_H

#include "dspark/dspark.h"

dspark_status dspark__verify_greedy(const int32_t *drafts, size_t n, const int32_t *target_argmax,
                                    size_t vocab, dspark_verdict_tokens *out, dspark_error *err);
dspark_status dspark__verify(dspark_verify_method method, const int32_t *drafts, size_t n,
                             const float *q, int one_hot, const float *p, size_t vocab,
                             const dspark_noise_key *key, dspark_verdict_tokens *out,
                             dspark_error *err);
void dspark__acceptance_add(dspark_acceptance *a, uint32_t n_drafted, uint32_t n_accepted);
double dspark__acceptance_length(const dspark_acceptance *a, int with_bonus);

#endif
