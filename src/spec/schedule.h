/* How many drafts are worth verifying: survival products, a static threshold, and two schedulers that
 * keep the output's law. */
#ifndef DSPARK_SPEC_SCHEDULE_H
#define DSPARK_SPEC_SCHEDULE_H

#include "dspark/dspark.h"

void dspark__survival(const float *confidence, uint32_t n, float *survival);
uint32_t dspark__keep_static(const float *confidence, uint32_t n, float threshold);
double dspark__steps_per_second(const dspark_step_table *table, uint64_t tokens);
dspark_status dspark__schedule(const float *confidence, size_t stride, const uint32_t *n_drafted,
                               size_t n_sequences, const dspark_step_table *table, uint32_t *keep,
                               dspark_error *err);
dspark_status dspark__schedule_stale(const float *stale, const float *confidence, size_t stride,
                                     const uint32_t *n_drafted, size_t n_sequences,
                                     const dspark_step_table *table, uint32_t *keep,
                                     dspark_error *err);

#endif
