/* Bounds of the Markov bias: for each row of W2 a code of 4 bits an element and three norms, a quarter of
 * the matrix. From them, and what is known of the vector that W2 multiplies, follows a number that the
 * product of a row as gemm_bf16 computes it cannot exceed (docs/numerics.md section 12 has the proof).
 * Knows nothing of tokens and sequences. */
#ifndef DSPARK_MODEL_MARKOV_BOUND_H
#define DSPARK_MODEL_MARKOV_BOUND_H

#include "model/merged_linear.h"

typedef struct dspark__markov_bound {
    dspark_allocator allocator;
    const unsigned char *panels; /* [n_panels][stride] as kern.h's bound_panels reads them; NULL: no bounds */
    unsigned char *memory; /* what they lie in, or NULL: somebody else's */
    size_t stride;
    uint32_t n_panels;
    uint32_t rank;         /* elements of a row; codes are padded to a multiple of 8 */
    double most;           /* no partial sum of a row exceeds it times the vector's norm */
    double rounding;       /* a sum's rounding error, times the norms of row and vector, is at most this, */
    double flushed;        /* and this more, from what is flushed to zero */
    uint64_t bytes;
} dspark__markov_bound;

/* Bytes of the bounds of `rows` x k in this packing; 0 where there are none: codes of 4 bits are as
 * quickly read themselves, and permuted ones are rare. */
uint64_t dspark__markov_bound_bytes(const dspark__packing *packing, uint64_t rows, uint64_t k);

/* Bounds of shard 0, filled, of a linear. `out` stays empty (panels NULL) where there are none, or when a
 * weight is so large that sums might overflow, or is not finite. DSPARK_ENOMEM. */
dspark_status dspark__markov_bound_build(dspark__markov_bound *out, const dspark__merged_linear *w2,
                                         dspark__threads *threads, const dspark_allocator *allocator,
                                         dspark_error *err);
/* The same from panels that were built before of this linear and lie 64-byte aligned in dspark__markov_bound_bytes of
 * somebody else's memory, which must outlive them. Returns NULL, or what makes them unusable: then `out` is empty. */
const char *dspark__markov_bound_attach(dspark__markov_bound *out, const dspark__merged_linear *w2,
                                        const unsigned char *panels);
void dspark__markov_bound_free(dspark__markov_bound *b);

/* Codes of one vector, padded to a multiple of 8. */
static inline size_t dspark__markov_bound_width(uint32_t rank)
{
    return ((size_t)rank + 7) / 8 * 8;
}

/* Prepare a call of bound_panels for the bf16 vector x [rank]: fills `codes`
 * [dspark__markov_bound_width], and all of *call but panels, n_panels, floor, base, n_out and upper. 0 when
 * nothing can be promised of this vector: it is not finite, or a sum might overflow. `scale` > 0 is what
 * the rounded sum is multiplied by. */
int dspark__markov_bound_vector(const dspark__markov_bound *b, const uint16_t *x, float scale,
                                int8_t *codes, dspark__bound_panels *call);

#endif
