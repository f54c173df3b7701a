/* The product of a shard of codes, for merged_linear.c only. */
#ifndef DSPARK_MODEL_LINEAR_CODES_H
#define DSPARK_MODEL_LINEAR_CODES_H

#include "model/merged_linear.h"

/* Bytes of scratch that dspark__linear_codes_run needs for up to n_rows rows. */
size_t dspark__linear_codes_scratch(size_t n_rows);

/* dspark__merged_linear_rows for a shard whose packing has fewer than 16 bits. n_out of the outputs from
 * panel p0 on exist. */
void dspark__linear_codes_run(const dspark__shard *shard, const dspark__kern *kern, uint32_t p0,
                              uint32_t n_panels, uint32_t k, const void *x, size_t x_stride,
                              size_t n_rows, void *scratch, uint16_t *out, size_t out_stride,
                              size_t n_out);

#endif
