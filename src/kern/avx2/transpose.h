/* A square of 32-bit words across registers: what turns rows of pairs into panels. */
#ifndef DSPARK_KERN_AVX2_TRANSPOSE_H
#define DSPARK_KERN_AVX2_TRANSPOSE_H

#include "kern/attr.h"

#include <immintrin.h>

/* 8 x 8 words of 32 bits. */
DSPARK__INLINE void transpose_8(__m256i r[8])
{
    __m256i t[8];
    DSPARK__UNROLL
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    DSPARK__UNROLL
    for (int i = 0; i < 8; i += 4) { /* r[i + c]: columns c and 4 + c of rows i .. i+3 */
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    DSPARK__UNROLL
    for (int c = 0; c < 4; c++) {
        t[c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x20);
        t[4 + c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x31);
    }
    DSPARK__UNROLL
    for (int i = 0; i < 8; i++) r[i] = t[i];
}

#endif
