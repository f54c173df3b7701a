/* The transpose of 16 registers: 16 rows of 16 words become 16 columns. */
#ifndef DSPARK_KERN_AVX512_TRANSPOSE_H
#define DSPARK_KERN_AVX512_TRANSPOSE_H

#include "kern/avx512/bits.h"

/* 16 x 16 words of 32 bits. */
DSPARK__INLINE void transpose_words(__m512i r[16])
{
    __m512i t[16];
    DSPARK__UNROLL
    for (int i = 0; i < 16; i += 2) { /* pairs of rows: words within 128 bits */
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    DSPARK__UNROLL
    for (int i = 0; i < 16; i += 4) { /* r[i+c]: column 4b+c of rows i .. i+3 in 128-bit block b */
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    DSPARK__UNROLL
    for (int c = 0; c < 4; c++) { /* then 4 x 4 blocks */
        __m512i low01 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44);
        __m512i high01 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xee);
        __m512i low23 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44);
        __m512i high23 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xee);
        t[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
        t[8 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
    }
    DSPARK__UNROLL
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

#endif
