/* What all products by vdpbf16ps have in common: a pair of x for every lane, and a tile's step over one pair of k. */
#ifndef DSPARK_KERN_AVX512_BF16DOT_H
#define DSPARK_KERN_AVX512_BF16DOT_H

#include "kern/avx512/bits.h"

/* The most rows of a tile, and vectors of 16 outputs: 27 sums, 3 weights and a broadcast fit 32 registers. */
enum { MOST_ROWS = 9, VECTORS = 3 };

typedef __m512 tile_sums[MOST_ROWS][VECTORS];

/* One pair of x in every lane; the compiler folds it into the load. */
DSPARK__INLINE __m512bh broadcast_pair(const unsigned char *x)
{
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

/* One pair of every row. Counts of rows and vectors are constants in each copy. */
DSPARK__INLINE void add_pair(tile_sums sum, const unsigned char *x, size_t x_stride, const uint16_t *w,
                             size_t n_rows, size_t n_vectors)
{
    const unsigned char *from[3] = {x, x + 4 * x_stride, x + 8 * x_stride}; /* few address registers */
    __m512bh part[VECTORS];
    DSPARK__UNROLL
    for (size_t v = 0; v < n_vectors; v++) part[v] = (__m512bh)_mm512_load_si512(w + 32 * v);
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++) {
        __m512bh two = broadcast_pair(from[i / 4] + i % 4 * x_stride);
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], part[v], two);
    }
}

/* Rows of outputs, stride bytes apart, that will be written soon. They are in no cache, and stores that miss soon
 * fill the store queue, behind which the next panel waits; with many rows that is nothing. */
DSPARK__INLINE void expect_outputs(const unsigned char *at, size_t stride, size_t n_rows)
{
    for (size_t i = 0; i < n_rows; i++, at += stride) {
        _mm_prefetch((const char *)at, _MM_HINT_T0);
        _mm_prefetch((const char *)at + 64, _MM_HINT_T0);
    }
}

#endif
