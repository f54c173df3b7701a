/* Small pieces shared by the AVX2 files: bf16 <-> fp32, eight lanes at a time. */
#ifndef DSPARK_KERN_AVX2_BITS_H
#define DSPARK_KERN_AVX2_BITS_H

#include "base/expf.h"
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

/* merge_lanes on two registers: the same additions. */
DSPARK__INLINE float merge_registers(__m256 low, __m256 high)
{
    __m256 eight = _mm256_add_ps(low, high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* Lanes [0, n) of 8 as a mask of words. */
DSPARK__INLINE __m256 first_words(size_t n)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n < 8 ? (int)n : 8), lane));
}

/* dspark__exp_f32 on 8 lanes, except that a NaN keeps its payload: converted to an integer it is
 * 0x80000000, which adds nothing to the exponent. */
DSPARK__INLINE __m256 exp_lanes(__m256 x)
{
    const __m256 one = _mm256_set1_ps(1.0f);
    __m256 inside = _mm256_cmp_ps(x, _mm256_set1_ps(DSPARK__EXP_LEAST), _CMP_NLT_UQ);
    __m256 n = _mm256_mul_ps(x, _mm256_set1_ps(DSPARK__EXP_LOG2E));
    n = _mm256_round_ps(n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(DSPARK__EXP_LN2_HIGH), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(DSPARK__EXP_LN2_LOW), r);
    __m256 y = _mm256_fmadd_ps(_mm256_set1_ps(DSPARK__EXP_C6), r, _mm256_set1_ps(DSPARK__EXP_C5));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(DSPARK__EXP_C4));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(DSPARK__EXP_C3));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(DSPARK__EXP_C2));
    y = _mm256_fmadd_ps(y, r, one);
    y = _mm256_fmadd_ps(y, r, one);
    __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), power));
    __m256 above = _mm256_cmp_ps(x, _mm256_set1_ps(DSPARK__EXP_MOST), _CMP_GT_OQ);
    y = _mm256_blendv_ps(y, _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)), above);
    return _mm256_and_ps(y, inside);
}

#endif
