/* Is a confidence what it says? Sequential temperature scaling, and the figures of calibration. */
#ifndef DSPARK_SPEC_CALIBRATE_H
#define DSPARK_SPEC_CALIBRATE_H

#include "dspark/dspark.h"

dspark_status dspark__calibration_fit(dspark_calibration *out, const float *confidence,
                                      const uint8_t *accepted, size_t n, uint32_t k,
                                      dspark_error *err);
void dspark__calibration_apply(const dspark_calibration *c, const float *logits, uint32_t k,
                               float *probabilities);
double dspark__ece(const float *p, const uint8_t *y, size_t n, size_t bins);
double dspark__brier(const float *p, const uint8_t *y, size_t n);
dspark_status dspark__auc(const float *p, const uint8_t *y, size_t n, double *auc, dspark_error *err);

#endif
