/* Element types of tensor files and the size arithmetic on shapes that came from a file. */
#ifndef DSPARK_CKPT_DTYPE_H
#define DSPARK_CKPT_DTYPE_H

#include "dspark/dspark.h"

/* "BF16", ...; "?" for an unknown value. */
const char *dspark__dtype_name(dspark_dtype dtype);
/* Bits per element; 0 for an unknown value. */
unsigned dspark__dtype_bits(dspark_dtype dtype);
/* DSPARK_DTYPE_NONE for a spelling that is not one. */
dspark_dtype dspark__dtype_parse(const char *text);

/* Elements and bytes of a tensor. Multiplies from left to right, so [2^63, 4, 0] overflows. Returns
 * NULL, or what is wrong ("... does not fit 64 bits", "... not a whole number of bytes"). */
const char *dspark__shape_bytes(dspark_dtype dtype, uint32_t rank, const uint64_t *shape,
                                uint64_t *n_elements, uint64_t *n_bytes);

/* "[576, 7168]", cut with "..." when it does not fit. Returns text. */
const char *dspark__shape_text(uint32_t rank, const uint64_t *shape, char *text, size_t cap);

#endif
