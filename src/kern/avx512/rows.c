/* AVX-512: norm, rotation, fp8 codes and checks of one row. Equal to ref/rows.c bit for bit; tails
 * are masked, nothing is read or written beyond the row. */
#if defined(__x86_64__)
#include "kern/avx512/bits.h"

#include <math.h>

float dspark__rmsnorm_bf16__avx512(uint16_t *y, const void *x, const void *w, size_t n, float eps)
{
    _Alignas(64) float lane[16];
    __m512 sums = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += 16) {
        __m512 v = load_bf16(x, i, first_lanes(n - i));
        sums = _mm512_fmadd_ps(v, v, sums);
    }
    _mm512_store_ps(lane, sums);
    float sum = merge_lanes(lane);
    __m512 r = _mm512_set1_ps(1.0f / sqrtf(sum / (float)n + eps));
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = first_lanes(n - i);
        __m512 v = _mm512_mul_ps(_mm512_mul_ps(load_bf16(x, i, m), r), load_bf16(w, i, m));
        store_bf16(y, i, m, v);
    }
    return canonical_nan(sum);
}

void dspark__rope_bf16__avx512(uint16_t *y, const void *x, const float *c, const float *s,
                               size_t n_pairs)
{
    for (size_t j = 0; j < n_pairs; j += 16) {
        __mmask16 m = first_lanes(n_pairs - j);
        __m512i pairs = _mm512_maskz_loadu_epi32(m, bf16_at(x, 2 * j));
        __m512 a = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        __m512 b = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
        __m512 cos = _mm512_maskz_loadu_ps(m, c + j), sin = _mm512_maskz_loadu_ps(m, s + j);
        __m512 even = _mm512_sub_ps(_mm512_mul_ps(a, cos), _mm512_mul_ps(b, sin));
        __m512 odd = _mm512_add_ps(_mm512_mul_ps(b, cos), _mm512_mul_ps(a, sin));
        pairs = _mm512_or_si512(round_bf16_lanes(even),
                                _mm512_slli_epi32(round_bf16_lanes(odd), 16));
        _mm512_mask_storeu_epi32(bf16_at_mut(y, 2 * j), m, pairs);
    }
}

/* The format is a constant in each caller. */
DSPARK__INLINE void encode_fp8(uint8_t *y, const uint16_t *x, size_t n, float scale, fp8_format f)
{
    const int shift = 23 - (int)f.mantissa_bits;
    const __m512 divisor = _mm512_set1_ps(scale);
    const __m512 magic = _mm512_castsi512_ps(_mm512_set1_epi32((int)f.magic_bits));
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = first_lanes(n - i);
        __m512 v = _mm512_div_ps(load_bf16(x, i, m), divisor);
        __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        __m512i u = _mm512_castps_si512(v);
        __m512i sign = _mm512_and_si512(_mm512_srli_epi32(u, 24), _mm512_set1_epi32(0x80));
        u = _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff));
        u = _mm512_min_epu32(u, _mm512_set1_epi32((int)f.max_bits));
        __mmask16 small = _mm512_cmplt_epu32_mask(u, _mm512_set1_epi32((int)f.min_normal_bits));
        __m512i tie = _mm512_and_si512(_mm512_srli_epi32(u, shift), _mm512_set1_epi32(1));
        __m512i code = _mm512_add_epi32(u, _mm512_set1_epi32((1 << (shift - 1)) - 1));
        code = _mm512_srli_epi32(_mm512_add_epi32(code, tie), shift);
        code = _mm512_sub_epi32(code, _mm512_set1_epi32((int)f.rebias));
        __m512 units = _mm512_add_ps(_mm512_castsi512_ps(u), magic);
        code = _mm512_mask_sub_epi32(code, small, _mm512_castps_si512(units),
                                     _mm512_castps_si512(magic));
        code = _mm512_or_si512(code, sign);
        code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7f));
        _mm_mask_storeu_epi8(y + i, m, _mm512_cvtepi32_epi8(code));
    }
}

void dspark__fp8_e4m3__avx512(uint8_t *y, const uint16_t *x, size_t n, float scale)
{
    encode_fp8(y, x, n, scale, FP8_E4M3);
}

void dspark__fp8_e5m2__avx512(uint8_t *y, const uint16_t *x, size_t n, float scale)
{
    encode_fp8(y, x, n, scale, FP8_E5M2);
}

/* Lanes [0, n) of 32. */
static __mmask32 first_halves(size_t n)
{
    return n >= 32 ? 0xffffffffu : (1u << n) - 1;
}

float dspark__absmax_bf16__avx512(const uint16_t *x, size_t n)
{
    __m512i most = _mm512_setzero_si512();
    for (size_t i = 0; i < n; i += 32) {
        __m512i h = _mm512_maskz_loadu_epi16(first_halves(n - i), bf16_at(x, i));
        most = _mm512_max_epu16(most, _mm512_and_si512(h, _mm512_set1_epi16(0x7fff)));
    }
    __m512i high = _mm512_srli_epi32(most, 16);
    __m512i low = _mm512_and_si512(most, _mm512_set1_epi32(0xffff));
    return dspark__bf16_to_f32((uint16_t)_mm512_reduce_max_epu32(_mm512_max_epu32(high, low)));
}

int dspark__finite_bf16__avx512(const void *x, size_t n)
{
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 bad = 0;
    for (size_t i = 0; i < n; i += 32) {
        __m512i h = _mm512_maskz_loadu_epi16(first_halves(n - i), bf16_at(x, i));
        bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(h, exponent), exponent);
    }
    return bad == 0;
}

#endif
