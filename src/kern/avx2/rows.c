/* AVX2: norm, rotation, fp8 codes and checks of one row. Equal to ref/rows.c bit for bit. Tails run
 * the same code on a zero-padded copy; nothing is read or written beyond the row. */
#if defined(__x86_64__)
#include "base/sincos.h"
#include "kern/avx2/bits.h"

#include <math.h>

enum { BLOCK = 16 }; /* elements per step */

DSPARK__INLINE void add_squares(__m256 sums[2], const void *x)
{
    __m256 low = widen_bf16(load_8(x, 0)), high = widen_bf16(load_8(x, 8));
    sums[0] = _mm256_fmadd_ps(low, low, sums[0]);
    sums[1] = _mm256_fmadd_ps(high, high, sums[1]);
}

DSPARK__INLINE void scale_block(void *y, const void *x, const void *w, __m256 r)
{
    __m256 low = _mm256_mul_ps(widen_bf16(load_8(x, 0)), r);
    __m256 high = _mm256_mul_ps(widen_bf16(load_8(x, 8)), r);
    low = _mm256_mul_ps(low, widen_bf16(load_8(w, 0)));
    high = _mm256_mul_ps(high, widen_bf16(load_8(w, 8)));
    store_8(y, 0, pack_lanes(round_bf16_lanes(low)));
    store_8(y, 8, pack_lanes(round_bf16_lanes(high)));
}

float dspark__rmsnorm_bf16__avx2(uint16_t *y, const void *x, const void *w, size_t n, float eps)
{
    _Alignas(32) float lane[16];
    const size_t whole = n / BLOCK * BLOCK, tail_bytes = 2 * (n - whole);
    uint16_t tail_x[BLOCK] = {0}, tail_w[BLOCK] = {0};
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (size_t i = 0; i < whole; i += BLOCK) add_squares(sums, bf16_at(x, i));
    if (tail_bytes > 0) {
        memcpy(tail_x, bf16_at(x, whole), tail_bytes);
        memcpy(tail_w, bf16_at(w, whole), tail_bytes);
        add_squares(sums, tail_x);
    }
    _mm256_store_ps(lane, sums[0]);
    _mm256_store_ps(lane + 8, sums[1]);
    float sum = merge_lanes(lane);
    __m256 r = _mm256_set1_ps(1.0f / sqrtf(sum / (float)n + eps));
    for (size_t i = 0; i < whole; i += BLOCK)
        scale_block(bf16_at_mut(y, i), bf16_at(x, i), bf16_at(w, i), r);
    if (tail_bytes > 0) {
        scale_block(tail_x, tail_x, tail_w, r);
        memcpy(bf16_at_mut(y, whole), tail_x, tail_bytes);
    }
    return canonical_nan(sum);
}

DSPARK__INLINE __m256d polynomial(const double terms[DSPARK__SINCOS_TERMS], __m256d z)
{
    __m256d s = _mm256_set1_pd(terms[DSPARK__SINCOS_TERMS - 1]);
    DSPARK__UNROLL
    for (int i = DSPARK__SINCOS_TERMS - 2; i >= 0; i--)
        s = _mm256_add_pd(_mm256_mul_pd(s, z), _mm256_set1_pd(terms[i]));
    return s;
}

/* dspark__sincos on 4 lanes. */
DSPARK__INLINE void sincos_lanes(__m256d x, __m256d *sin, __m256d *cos)
{
    static const double sin_terms[] = DSPARK__SIN_TERMS, cos_terms[] = DSPARK__COS_TERMS;
    const __m256d minus = _mm256_set1_pd(-0.0), one = _mm256_set1_pd(1), four = _mm256_set1_pd(4);
    __m256d k = _mm256_round_pd(_mm256_mul_pd(x, _mm256_set1_pd(DSPARK__QUARTERS)),
                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256d r = _mm256_fnmadd_pd(k, _mm256_set1_pd(DSPARK__QUARTER_1), x);
    r = _mm256_fnmadd_pd(k, _mm256_set1_pd(DSPARK__QUARTER_2), r);
    r = _mm256_fnmadd_pd(k, _mm256_set1_pd(DSPARK__QUARTER_3), r);
    __m256d z = _mm256_mul_pd(r, r);
    __m256d s = _mm256_add_pd(r, _mm256_mul_pd(_mm256_mul_pd(r, z), polynomial(sin_terms, z)));
    __m256d c = _mm256_mul_pd(_mm256_mul_pd(z, z), polynomial(cos_terms, z));
    c = _mm256_sub_pd(one, _mm256_sub_pd(_mm256_mul_pd(_mm256_set1_pd(0.5), z), c));
    /* The quadrant is k modulo 4, exact in double: 1 and 3 swap, 2 and 3 turn the sine, 1 and 2 the cosine. */
    __m256d turns = _mm256_floor_pd(_mm256_mul_pd(k, _mm256_set1_pd(0.25)));
    __m256d q = _mm256_sub_pd(k, _mm256_mul_pd(turns, four));
    __m256d turn = _mm256_cmp_pd(q, _mm256_set1_pd(2), _CMP_GE_OQ);
    __m256d swap = _mm256_or_pd(_mm256_cmp_pd(q, one, _CMP_EQ_OQ), _mm256_cmp_pd(q, _mm256_set1_pd(3), _CMP_EQ_OQ));
    *sin = _mm256_xor_pd(_mm256_blendv_pd(s, c, swap), _mm256_and_pd(turn, minus));
    *cos = _mm256_xor_pd(_mm256_blendv_pd(c, s, swap), _mm256_and_pd(_mm256_xor_pd(turn, swap), minus));
}

DSPARK__INLINE void angles_4(float *cos, float *sin, const float *f, __m128 position, __m128 attn)
{
    __m256d s, c;
    sincos_lanes(_mm256_cvtps_pd(_mm_mul_ps(position, _mm_loadu_ps(f))), &s, &c);
    _mm_storeu_ps(cos, _mm_mul_ps(_mm256_cvtpd_ps(c), attn));
    _mm_storeu_ps(sin, _mm_mul_ps(_mm256_cvtpd_ps(s), attn));
}

void dspark__rope_angles__avx2(float *cos, float *sin, const float *f, size_t n, float position, float attn)
{
    const __m128 p = _mm_set1_ps(position), a = _mm_set1_ps(attn);
    float tail[4] = {0}, tail_cos[4], tail_sin[4];
    size_t j = 0;
    for (; j + 4 <= n; j += 4) angles_4(cos + j, sin + j, f + j, p, a);
    if (j == n) return;
    memcpy(tail, f + j, (n - j) * sizeof *f);
    angles_4(tail_cos, tail_sin, tail, p, a);
    memcpy(cos + j, tail_cos, (n - j) * sizeof *cos);
    memcpy(sin + j, tail_sin, (n - j) * sizeof *sin);
}

/* Eight pairs. */
DSPARK__INLINE void rotate_block(void *y, const void *x, const float *c, const float *s)
{
    __m256i pairs = _mm256_loadu_si256(x);
    __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    __m256 b = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
    __m256 cos = _mm256_loadu_ps(c), sin = _mm256_loadu_ps(s);
    __m256 even = _mm256_sub_ps(_mm256_mul_ps(a, cos), _mm256_mul_ps(b, sin));
    __m256 odd = _mm256_add_ps(_mm256_mul_ps(b, cos), _mm256_mul_ps(a, sin));
    pairs = _mm256_or_si256(round_bf16_lanes(even), _mm256_slli_epi32(round_bf16_lanes(odd), 16));
    _mm256_storeu_si256(y, pairs);
}

void dspark__rope_bf16__avx2(uint16_t *y, const void *x, const float *c, const float *s,
                             size_t n_pairs)
{
    size_t j = 0;
    for (; j + 8 <= n_pairs; j += 8)
        rotate_block(bf16_at_mut(y, 2 * j), bf16_at(x, 2 * j), c + j, s + j);
    if (j == n_pairs) return;
    uint16_t tail_x[16] = {0};
    float tail_c[8] = {0}, tail_s[8] = {0};
    memcpy(tail_x, bf16_at(x, 2 * j), 4 * (n_pairs - j));
    memcpy(tail_c, c + j, sizeof *c * (n_pairs - j));
    memcpy(tail_s, s + j, sizeof *s * (n_pairs - j));
    rotate_block(tail_x, tail_x, tail_c, tail_s);
    memcpy(bf16_at_mut(y, 2 * j), tail_x, 4 * (n_pairs - j));
}

/* Eight codes, each in the low byte of 32 bits. The format is a constant in each caller. All
 * magnitudes are below 2^31, so that signed comparisons order them. */
DSPARK__INLINE __m256i encode_8(__m128i h, __m256 scale, fp8_format f)
{
    const int shift = 23 - (int)f.mantissa_bits;
    const __m256 magic = _mm256_castsi256_ps(_mm256_set1_epi32((int)f.magic_bits));
    __m256 v = _mm256_div_ps(widen_bf16(h), scale);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i u = _mm256_castps_si256(v);
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(u, 24), _mm256_set1_epi32(0x80));
    u = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
    u = _mm256_min_epi32(u, _mm256_set1_epi32((int)f.max_bits));
    __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)f.min_normal_bits), u);
    __m256i tie = _mm256_and_si256(_mm256_srli_epi32(u, shift), _mm256_set1_epi32(1));
    __m256i normal = _mm256_add_epi32(u, _mm256_set1_epi32((1 << (shift - 1)) - 1));
    normal = _mm256_srli_epi32(_mm256_add_epi32(normal, tie), shift);
    normal = _mm256_sub_epi32(normal, _mm256_set1_epi32((int)f.rebias));
    __m256i units = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(u), magic));
    units = _mm256_sub_epi32(units, _mm256_castps_si256(magic));
    __m256i code = _mm256_or_si256(_mm256_blendv_epi8(normal, units, small), sign);
    return _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), nan);
}

DSPARK__INLINE void encode_block(uint8_t *y, const void *x, __m256 scale, fp8_format f)
{
    __m128i low = pack_lanes(encode_8(load_8(x, 0), scale, f));
    __m128i high = pack_lanes(encode_8(load_8(x, 8), scale, f));
    _mm_storeu_si128((void *)y, _mm_packus_epi16(low, high));
}

DSPARK__INLINE void encode_fp8(uint8_t *y, const uint16_t *x, size_t n, float scale, fp8_format f)
{
    const __m256 divisor = _mm256_set1_ps(scale);
    size_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) encode_block(y + i, bf16_at(x, i), divisor, f);
    if (i == n) return;
    uint16_t tail_x[BLOCK] = {0};
    uint8_t tail_y[BLOCK];
    memcpy(tail_x, bf16_at(x, i), 2 * (n - i));
    encode_block(tail_y, tail_x, divisor, f);
    memcpy(y + i, tail_y, n - i);
}

void dspark__fp8_e4m3__avx2(uint8_t *y, const uint16_t *x, size_t n, float scale)
{
    encode_fp8(y, x, n, scale, FP8_E4M3);
}

void dspark__fp8_e5m2__avx2(uint8_t *y, const uint16_t *x, size_t n, float scale)
{
    encode_fp8(y, x, n, scale, FP8_E5M2);
}

/* The largest magnitude per 16-bit lane; finite or not, magnitudes order like their bits. */
static __m256i max_magnitudes(const void *x, size_t n)
{
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    __m256i most = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        __m256i h = _mm256_loadu_si256((const void *)bf16_at(x, i));
        most = _mm256_max_epu16(most, _mm256_and_si256(h, magnitude));
    }
    if (i == n) return most;
    uint16_t tail[BLOCK] = {0};
    memcpy(tail, bf16_at(x, i), 2 * (n - i));
    __m256i h = _mm256_loadu_si256((const void *)tail);
    return _mm256_max_epu16(most, _mm256_and_si256(h, magnitude));
}

float dspark__absmax_bf16__avx2(const void *x, size_t n)
{
    uint16_t lane[BLOCK], most = 0;
    _mm256_storeu_si256((void *)lane, max_magnitudes(x, n));
    for (int j = 0; j < BLOCK; j++)
        if (lane[j] > most) most = lane[j];
    return dspark__bf16_to_f32(most);
}

int dspark__finite_bf16__avx2(const void *x, size_t n)
{
    __m256i bad = _mm256_cmpgt_epi16(max_magnitudes(x, n), _mm256_set1_epi16(0x7f7f));
    return _mm256_testz_si256(bad, bad);
}

#endif
