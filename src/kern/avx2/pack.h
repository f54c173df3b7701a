/* What both ways of packing a panel share: squares of 8 rows x 16 values, which are transposed as pairs, go to
 * memory past the caches, which need not read them first; and what is not a whole square. */
#ifndef DSPARK_KERN_AVX2_PACK_H
#define DSPARK_KERN_AVX2_PACK_H

#include "kern/avx2/bits.h"
#include "kern/avx2/transpose.h"

enum { SIDE = 8, VECTORS = DSPARK__PANEL / SIDE };

DSPARK__INLINE void stream_pairs(uint16_t *to, const __m256i *from, size_t n_pairs)
{
    for (size_t i = 0; i < n_pairs * VECTORS; i++) _mm256_stream_si256((__m256i *)(void *)to + i, from[i]);
}

/* The largest magnitude so far, twice (the sign is shifted out). */
DSPARK__INLINE __m256i larger(__m256i most, __m256i values)
{
    return _mm256_max_epu16(most, _mm256_add_epi16(values, values));
}

/* 1 when `most` is no infinity and no NaN. */
DSPARK__INLINE int is_finite(__m256i most)
{
    __m256i bound = _mm256_set1_epi16((short)0xff00);
    __m256i bad = _mm256_cmpeq_epi16(_mm256_max_epu16(most, bound), most);
    return _mm256_testz_si256(bad, bad);
}

/* What is left of a panel from pair on, value by value: the rows' ends and panels that are not full. */
DSPARK__INLINE void pack_rest(uint16_t *panel, const void *w, size_t stride, size_t n_rows, size_t k, size_t pair,
                              __m256i *most)
{
    for (const size_t n_pairs = (k + 1) / 2; pair < n_pairs; pair += SIDE) {
        uint16_t values[SIDE * DSPARK__PANEL * 2] = {0};
        __m256i block[SIDE * VECTORS];
        for (size_t row = 0; row < n_rows; row++)
            for (size_t i = 2 * pair; i < k && i < 2 * (pair + SIDE); i++)
                memcpy(&values[((i / 2 - pair) * DSPARK__PANEL + row) * 2 + i % 2],
                       bf16_at((const unsigned char *)w + row * stride, i), 2);
        memcpy(block, values, sizeof values);
        for (size_t i = 0; i < SIDE * VECTORS; i++) *most = larger(*most, block[i]);
        stream_pairs(panel + pair * DSPARK__PANEL * 2, block, n_pairs - pair < SIDE ? n_pairs - pair : SIDE);
    }
}

#endif
