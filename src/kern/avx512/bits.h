/* Small pieces shared by the AVX-512 files: bf16 <-> fp32 and partial rows by mask. */
#ifndef DSPARK_KERN_AVX512_BITS_H
#define DSPARK_KERN_AVX512_BITS_H

#include "base/expf.h"
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

/* dspark__f32_to_bf16 on 16 lanes, each in the high half of 32 bits; what the low half holds is left open.
 * Integer arithmetic only, so that subnormals survive whatever MXCSR says (vcvtneps2bf16 would flush them). */
DSPARK__INLINE __m512i round_bf16_high(__m512 f)
{
    __m512i u = _mm512_castps_si512(f);
    __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
    __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
    u = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
    u = _mm512_mask_add_epi32(u, odd, u, _mm512_set1_epi32(1));
    return _mm512_mask_mov_epi32(u, nan, _mm512_set1_epi32((int)((uint32_t)DSPARK__BF16_NAN << 16)));
}

/* The same in the low half, with zeros above. */
DSPARK__INLINE __m512i round_bf16_lanes(__m512 f)
{
    return _mm512_srli_epi32(round_bf16_high(f), 16);
}

/* Even and odd elements of 32. */
DSPARK__INLINE __m512i round_bf16_pairs(__m512 even, __m512 odd)
{
    return _mm512_mask_blend_epi16(0xaaaaaaaa, round_bf16_lanes(even), round_bf16_high(odd));
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

/* Up to 16 elements of a bf16 row as fp32, the lanes outside m as 0. */
DSPARK__INLINE __m512 load_bf16(const void *row, size_t i, __mmask16 m)
{
    return widen_bf16(_mm256_maskz_loadu_epi16(m, bf16_at(row, i)));
}

DSPARK__INLINE void store_bf16(void *row, size_t i, __mmask16 m, __m512 f)
{
    unsigned char *to = bf16_at_mut(row, i);
    if (m == 0xffff) _mm256_storeu_si256((void *)to, round_bf16(f)); /* masked ones can be slow */
    else _mm256_mask_storeu_epi16(to, m, round_bf16(f));
}

/* merge_lanes on a register: the same additions. */
DSPARK__INLINE float merge_register(__m512 v)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* dspark__exp_f32 on 16 lanes, except that a NaN keeps its payload. Above DSPARK__EXP_MOST the
 * polynomial is still positive (its degree is even) and 2^n makes infinity of it. */
DSPARK__INLINE __m512 exp_lanes(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    __mmask16 inside = _mm512_cmp_ps_mask(x, _mm512_set1_ps(DSPARK__EXP_LEAST), _CMP_NLT_UQ);
    __m512 n = _mm512_mul_ps(x, _mm512_set1_ps(DSPARK__EXP_LOG2E));
    n = _mm512_roundscale_ps(n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(DSPARK__EXP_LN2_HIGH), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(DSPARK__EXP_LN2_LOW), r);
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(DSPARK__EXP_C6), r, _mm512_set1_ps(DSPARK__EXP_C5));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(DSPARK__EXP_C4));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(DSPARK__EXP_C3));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(DSPARK__EXP_C2));
    y = _mm512_fmadd_ps(y, r, one);
    y = _mm512_fmadd_ps(y, r, one);
    return _mm512_maskz_scalef_ps(inside, y, n); /* exact where the result is normal */
}

#endif
