/* AVX-512: norm, rotation, fp8 codes and checks of one row. Equal to ref/rows.c bit for bit; tails
 * are masked, nothing is read or written beyond the row. */
#if defined(__x86_64__)
#include "base/sincos.h"
#include "kern/avx512/bits.h"

#include <math.h>

/* Elements [0, n) of 32. */
static __mmask32 first_halves(size_t n)
{
    return n >= 32 ? 0xffffffffu : (1u << n) - 1;
}

/* 32 elements come apart into even and odd ones by one shift and one mask, without a shuffle. */
DSPARK__INLINE __m512 widen_even(__m512i h)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(h, 16));
}

DSPARK__INLINE __m512 widen_odd(__m512i h)
{
    return _mm512_castsi512_ps(_mm512_and_si512(h, _mm512_set1_epi32(-65536)));
}

/* 16 elements: lanes 0, 2, .. 14 of the definition are in sums[0], the odd ones in sums[1]. */
DSPARK__INLINE void add_squares(__m256 sums[2], __m256i h)
{
    __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(h, 16));
    __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(h, _mm256_set1_epi32(-65536)));
    sums[0] = _mm256_fmadd_ps(even, even, sums[0]);
    sums[1] = _mm256_fmadd_ps(odd, odd, sums[1]);
}

/* merge_lanes of lanes 0, 2, .. 14, or of the odd ones, but for its last addition. */
DSPARK__INLINE __m128 merge_half(__m256 sums)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_add_ss(two, _mm_movehdup_ps(two));
}

DSPARK__INLINE __m512i scale_32(__m512i x, __m512i w, __m512 r)
{
    __m512 even = _mm512_mul_ps(_mm512_mul_ps(widen_even(x), r), widen_even(w));
    __m512 odd = _mm512_mul_ps(_mm512_mul_ps(widen_odd(x), r), widen_odd(w));
    return round_bf16_pairs(even, odd);
}

float dspark__rmsnorm_bf16__avx512(uint16_t *y, const void *x, const void *w, size_t n, float eps)
{
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    size_t i;
    for (i = 0; i + 16 <= n; i += 16) add_squares(sums, _mm256_loadu_si256((const void *)bf16_at(x, i)));
    if (i < n) add_squares(sums, _mm256_maskz_loadu_epi16(first_lanes(n - i), bf16_at(x, i)));
    float sum = _mm_cvtss_f32(_mm_add_ss(merge_half(sums[0]), merge_half(sums[1])));
    __m512 r = _mm512_set1_ps(1.0f / sqrtf(sum / (float)n + eps));
    for (i = 0; i + 32 <= n; i += 32)
        _mm512_storeu_si512(bf16_at_mut(y, i), scale_32(_mm512_loadu_si512(bf16_at(x, i)),
                                                        _mm512_loadu_si512(bf16_at(w, i)), r));
    if (i < n) {
        __mmask32 m = first_halves(n - i);
        _mm512_mask_storeu_epi16(bf16_at_mut(y, i), m,
                                 scale_32(_mm512_maskz_loadu_epi16(m, bf16_at(x, i)),
                                          _mm512_maskz_loadu_epi16(m, bf16_at(w, i)), r));
    }
    return canonical_nan(sum);
}

DSPARK__INLINE __m512d polynomial(const double terms[DSPARK__SINCOS_TERMS], __m512d z)
{
    __m512d s = _mm512_set1_pd(terms[DSPARK__SINCOS_TERMS - 1]);
    DSPARK__UNROLL
    for (int i = DSPARK__SINCOS_TERMS - 2; i >= 0; i--)
        s = _mm512_add_pd(_mm512_mul_pd(s, z), _mm512_set1_pd(terms[i]));
    return s;
}

/* dspark__sincos on 8 lanes. */
DSPARK__INLINE void sincos_lanes(__m512d x, __m512d *sin, __m512d *cos)
{
    static const double sin_terms[] = DSPARK__SIN_TERMS, cos_terms[] = DSPARK__COS_TERMS;
    const __m512d minus = _mm512_set1_pd(-0.0);
    __m512d k = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(DSPARK__QUARTERS)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512d r = _mm512_fnmadd_pd(k, _mm512_set1_pd(DSPARK__QUARTER_1), x);
    r = _mm512_fnmadd_pd(k, _mm512_set1_pd(DSPARK__QUARTER_2), r);
    r = _mm512_fnmadd_pd(k, _mm512_set1_pd(DSPARK__QUARTER_3), r);
    __m512d z = _mm512_mul_pd(r, r);
    __m512d s = _mm512_add_pd(r, _mm512_mul_pd(_mm512_mul_pd(r, z), polynomial(sin_terms, z)));
    __m512d c = _mm512_mul_pd(_mm512_mul_pd(z, z), polynomial(cos_terms, z));
    c = _mm512_sub_pd(_mm512_set1_pd(1), _mm512_sub_pd(_mm512_mul_pd(_mm512_set1_pd(0.5), z), c));
    __m512i quadrant = _mm512_cvttpd_epi64(k);
    __mmask8 swap = _mm512_test_epi64_mask(quadrant, _mm512_set1_epi64(1));
    __mmask8 turn = _mm512_test_epi64_mask(quadrant, _mm512_set1_epi64(2));
    *sin = _mm512_mask_mov_pd(s, swap, c);
    *cos = _mm512_mask_mov_pd(c, swap, s);
    *sin = _mm512_mask_xor_pd(*sin, turn, *sin, minus);
    *cos = _mm512_mask_xor_pd(*cos, turn ^ swap, *cos, minus);
}

void dspark__rope_angles__avx512(float *cos, float *sin, const float *f, size_t n, float position, float attn)
{
    const __m256 p = _mm256_set1_ps(position), a = _mm256_set1_ps(attn);
    for (size_t j = 0; j < n; j += 8) {
        __mmask8 m = n - j >= 8 ? 0xff : (__mmask8)((1u << (n - j)) - 1);
        __m512d s, c;
        sincos_lanes(_mm512_cvtps_pd(_mm256_mul_ps(p, _mm256_maskz_loadu_ps(m, f + j))), &s, &c);
        _mm256_mask_storeu_ps(cos + j, m, _mm256_mul_ps(_mm512_cvtpd_ps(c), a));
        _mm256_mask_storeu_ps(sin + j, m, _mm256_mul_ps(_mm512_cvtpd_ps(s), a));
    }
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
        _mm512_mask_storeu_epi32(bf16_at_mut(y, 2 * j), m, round_bf16_pairs(even, odd));
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

float dspark__absmax_bf16__avx512(const void *x, size_t n)
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
