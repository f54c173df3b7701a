/* AVX-512: what is done element by element between the matrix products, and the search of a row of
 * logits. Equal to ref/pointwise.c bit for bit; tails are masked. */
#if defined(__x86_64__)
#include "kern/avx512/bits.h"

enum { BLOCK = 2048 }; /* logits whose largest is looked up once */

void dspark__silu_mul__avx512(uint16_t *y, const void *g, const void *u, size_t n)
{
    const __m512 sign = _mm512_set1_ps(-0.0f);
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = first_lanes(n - i);
        __m512 x = load_bf16(g, i, m);
        __m512 e = exp_lanes(_mm512_xor_ps(x, sign));
        __m512i s = round_bf16_lanes(_mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e)));
        x = _mm512_castsi512_ps(_mm512_slli_epi32(s, 16));
        store_bf16(y, i, m, _mm512_mul_ps(x, load_bf16(u, i, m)));
    }
}

void dspark__add_bf16__avx512(uint16_t *y, const void *a, const void *b, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = first_lanes(n - i);
        store_bf16(y, i, m, _mm512_add_ps(load_bf16(a, i, m), load_bf16(b, i, m)));
    }
}

float dspark__dot_lanes__avx512(const void *x, const void *w, size_t n)
{
    __m512 sums = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = first_lanes(n - i);
        sums = _mm512_fmadd_ps(load_bf16(x, i, m), load_bf16(w, i, m), sums);
    }
    return canonical_nan(merge_register(sums) + 0.0f);
}

/* bf16(a + b) in the high half of each word, from bf16 in the high halves; a NaN only in `nan`. */
DSPARK__INLINE __m512i add_high(__m512i a, __m512i b, __mmask16 *nan)
{
    __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b));
    __m512i u = _mm512_castps_si512(sum);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    *nan |= _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
    return _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

/* The keys of up to 32 elements of a (or of bf16(a + b) when `add`): signed numbers in the order of
 * the values, -0 just below +0. Missing elements count as -infinity. */
DSPARK__INLINE __m512i load_keys(const void *a, const void *b, size_t i, size_t n, int add,
                                 __mmask32 *nan)
{
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __mmask32 m = n - i >= 32 ? 0xffffffffu : (1u << (n - i)) - 1;
    __m512i h = _mm512_mask_loadu_epi16(_mm512_set1_epi16((short)0xff80), m, bf16_at(a, i));
    if (add) {
        __mmask16 bad = 0;
        __m512i other = _mm512_maskz_loadu_epi16(m, bf16_at(b, i));
        __m512i even = add_high(_mm512_slli_epi32(h, 16), _mm512_slli_epi32(other, 16), &bad);
        __m512i high = _mm512_set1_epi32(-65536);
        __m512i odd = add_high(_mm512_and_si512(h, high), _mm512_and_si512(other, high), &bad);
        h = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(even, 16), odd);
        *nan |= bad;
    } else {
        *nan |= _mm512_cmpgt_epu16_mask(_mm512_and_si512(h, magnitude), _mm512_set1_epi16(0x7f80));
    }
    /* negative values: the other way round */
    return _mm512_ternarylogic_epi32(h, _mm512_srai_epi16(h, 15), magnitude,
                                     0x78); /* h ^ (s & m) */
}

DSPARK__INLINE int largest_key(__m512i keys)
{
    __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(keys, 16), 16);
    return _mm512_reduce_max_epi32(_mm512_max_epi32(even, _mm512_srai_epi32(keys, 16)));
}

/* The largest of each block, remembering only which block was best; then that block again. */
DSPARK__INLINE size_t find_largest(const void *a, const void *b, size_t n, float *best, int add)
{
    int top = -0x8000;
    size_t start = 0;
    __mmask32 nan = n == 0;
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t end = n - i < BLOCK ? n : i + BLOCK;
        __m512i most = _mm512_set1_epi16(-0x8000);
        for (size_t j = i; j < end; j += 32)
            most = _mm512_max_epi16(most, load_keys(a, b, j, end, add, &nan));
        int key = largest_key(most);
        if (key == -1) key = 0; /* -0 equals +0 */
        if (key > top) {
            top = key;
            start = i;
        }
    }
    *best = dspark__f32_from_bits(nan ? 0x7fc00000u : order_value(top));
    if (nan) return DSPARK__NO_ARGMAX;
    const __m512i wanted = _mm512_set1_epi16((short)top);
    const __m512i too = _mm512_set1_epi16((short)(top == 0 ? -1 : top));
    for (;; start += 32) {
        __m512i keys = load_keys(a, b, start, n, add, &nan);
        __mmask32 found = _mm512_cmpeq_epi16_mask(keys, wanted);
        found |= _mm512_cmpeq_epi16_mask(keys, too);
        if (found) return start + (size_t)__builtin_ctz(found);
    }
}

size_t dspark__argmax_bf16__avx512(const void *x, size_t n, float *best)
{
    return find_largest(x, NULL, n, best, 0);
}

size_t dspark__add_argmax_bf16__avx512(const void *a, const void *b, size_t n, float *best)
{
    return find_largest(a, b, n, best, 1);
}

#endif
