/* Small pieces shared by the AVX2 files: bf16 <-> fp32, eight lanes at a time. */
#ifndef DSPARK_KERN_AVX2_BITS_H
#define DSPARK_KERN_AVX2_BITS_H

#include "kern/levels.h"

#include <immintrin.h>

DSPARK__INLINE __m256 widen_bf16(__m128i h)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* dspark__f32_to_bf16 on 8 lanes, each in the low half of 32 bits. Integer arithmetic only. */
DSPARK__INLINE __m256i round_bf16_lanes(__m256 f)
{
    __m256i u = _mm256_castps_si256(f);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    u = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_blendv_epi8(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(DSPARK__BF16_NAN), nan);
}

/* The low halves of 8 lanes, in order. */
DSPARK__INLINE __m128i pack_lanes(__m256i u)
{
    return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}

DSPARK__INLINE __m128i load_8(const void *row, size_t i)
{
    return _mm_loadu_si128((const void *)bf16_at(row, i));
}

DSPARK__INLINE void store_8(void *row, size_t i, __m128i h)
{
    _mm_storeu_si128((void *)bf16_at_mut(row, i), h);
}

/* One row of 48 finished sums; n of them exist. */
DSPARK__INLINE void store_outputs(unsigned char *out, const float *sum, size_t n)
{
    size_t j = 0;
    for (; j + 8 <= n; j += 8)
        store_8(out, j, pack_lanes(round_bf16_lanes(_mm256_load_ps(sum + j))));
    if (j == n) return;
    uint16_t tail[8];
    store_8(tail, 0, pack_lanes(round_bf16_lanes(_mm256_load_ps(sum + j))));
    memcpy(out + 2 * j, tail, 2 * (n - j));
}

#endif
