/* A square of a panel: 16 rows of up to 32 values, transposed as pairs and stored past the caches. */
#ifndef DSPARK_KERN_AVX512_PACK_H
#define DSPARK_KERN_AVX512_PACK_H

#include "kern/avx512/transpose.h"

/* Pairs of k in a square, which are 64 bytes of a row. */
#define SQUARE_PAIRS ((size_t)16)

/* r: the rows, of which n_pairs exist. */
DSPARK__INLINE void store_square(uint16_t *to, __m512i r[16], size_t n_pairs)
{
    transpose_words(r);
    DSPARK__UNROLL
    for (size_t i = 0; i < SQUARE_PAIRS; i++)
        if (i < n_pairs) _mm512_stream_si512((void *)(to + i * DSPARK__PANEL * 2), r[i]);
}

/* *most: the largest magnitude so far, twice (the sign is shifted out). */
DSPARK__INLINE __m512i larger(__m512i most, __m512i values)
{
    return _mm512_max_epu16(most, _mm512_add_epi16(values, values));
}

/* What is left of 48 rows of k values from pair on: n_rows exist. */
DSPARK__INLINE void pack_rest(uint16_t *panel, const void *w, size_t stride, size_t n_rows, size_t k, size_t pair,
                              __m512i *most)
{
    const size_t n_pairs = (k + 1) / 2;
    for (; pair < n_pairs; pair += SQUARE_PAIRS) {
        const size_t left = k - 2 * pair, pairs_left = n_pairs - pair;
        const __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
        for (size_t j = 0; j < DSPARK__PANEL; j += 16) {
            __m512i r[16];
            DSPARK__UNROLL
            for (size_t i = 0; i < 16; i++) {
                r[i] = j + i < n_rows ? _mm512_maskz_loadu_epi16(mask, bf16_at(w, 2 * pair) + (j + i) * stride)
                                      : _mm512_setzero_si512();
                *most = larger(*most, r[i]);
            }
            store_square(panel + (pair * DSPARK__PANEL + j) * 2, r,
                         pairs_left < SQUARE_PAIRS ? pairs_left : SQUARE_PAIRS);
        }
    }
}

/* 1 when *most is no infinity and no NaN. */
DSPARK__INLINE int is_finite(__m512i most)
{
    return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16((short)0xff00)) == 0;
}

#endif
