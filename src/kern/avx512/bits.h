/* Small pieces shared by the AVX-512 files: bf16 <-> fp32 and partial rows by mask. */
#ifndef DSPARK_KERN_AVX512_BITS_H
#define DSPARK_KERN_AVX512_BITS_H

#include "kern/levels.h"

#include <immintrin.h>

/* Lanes [0, n) of 16. */
DSPARK__INLINE __mmask16 first_lanes(size_t n)
{
    return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1);
}

DSPARK__INLINE __m512 widen_bf16(__m256i h)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* dspark__f32_to_bf16 on 16 lanes, each in the low half of 32 bits. Integer arithmetic only, so
 * that subnormals survive whatever MXCSR says (vcvtneps2bf16 would flush them). */
DSPARK__INLINE __m512i round_bf16_lanes(__m512 f)
{
    __m512i u = _mm512_castps_si512(f);
    __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_mov_epi32(_mm512_srli_epi32(u, 16), nan,
                                 _mm512_set1_epi32(DSPARK__BF16_NAN));
}

DSPARK__INLINE __m256i round_bf16(__m512 f)
{
    return _mm512_cvtepi32_epi16(round_bf16_lanes(f));
}

/* One row of 48 finished sums; n of them exist. */
DSPARK__INLINE void store_outputs(unsigned char *out, const float *sum, size_t n)
{
    for (size_t j = 0; j < n; j += 16) {
        __m256i y = round_bf16(_mm512_load_ps(sum + j));
        if (n - j >= 16) _mm256_storeu_si256((void *)(out + 2 * j), y);
        else _mm256_mask_storeu_epi16(out + 2 * j, first_lanes(n - j), y);
    }
}

#endif
