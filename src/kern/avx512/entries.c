/* AVX-512: fp8 codes to bf16, and a piece of cache entries into the panels of both products. Equal
 * to ref/entries.c bit for bit; tails are masked. */
#if defined(__x86_64__)
#include "kern/avx512/transpose.h"

enum { GROUP = 16 }; /* entries at a time: 18 KB of K3's, which stay in L1 for both panels */

/* bf16 in the high halves of 16 words times scale, rounded, in the high halves. A NaN must not have a
 * payload that rounding carries out of. */
DSPARK__INLINE __m512i multiply_high(__m512i h, __m512 scale)
{
    __m512i u = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(h), scale));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

/* The format is a constant in each caller. */
DSPARK__INLINE void decode_fp8(uint16_t *y, const uint8_t *codes, size_t n, float scale,
                               fp8_format f)
{
    const fp8_values values = fp8_prepare(f, scale);
    const __m512i small = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)values.small));
    const __m512i rebias = _mm512_set1_epi16((short)values.rebias);
    const __m512i limit = _mm512_set1_epi16((short)(1 << f.mantissa_bits));
    const __m512i largest = _mm512_set1_epi16(f.mantissa_bits == 3 ? 0x7e : 0x7c);
    const __m512i high = _mm512_set1_epi32(-65536), nan = _mm512_set1_epi16(DSPARK__BF16_NAN);
    const __m512 factor = _mm512_set1_ps(canonical_nan(scale));
    for (size_t i = 0; i < n; i += 32) {
        __mmask32 m = n - i >= 32 ? 0xffffffffu : (1u << (n - i)) - 1;
        __m512i code = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(m, codes + i));
        __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
        __m512i sign = _mm512_slli_epi16(_mm512_xor_si512(code, magnitude), 8);
        __mmask32 is_nan = _mm512_cmpgt_epi16_mask(magnitude, largest);
        __m512i h = _mm512_slli_epi16(magnitude, 7 - (int)f.mantissa_bits);
        h = _mm512_add_epi16(h, rebias);
        h = _mm512_mask_permutexvar_epi16(h, _mm512_cmplt_epi16_mask(magnitude, limit), magnitude,
                                          small);
        if (f.mantissa_bits == 2) /* e5m2 has infinity, just below its NaNs */
            h = _mm512_mask_mov_epi16(h, _mm512_cmpeq_epi16_mask(magnitude, largest),
                                      _mm512_set1_epi16(0x7f80));
        h = _mm512_mask_mov_epi16(_mm512_or_si512(h, sign), is_nan, nan);
        if (!values.exact) {
            __m512i even = multiply_high(_mm512_slli_epi32(h, 16), factor);
            __m512i odd = multiply_high(_mm512_and_si512(h, high), factor);
            h = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(even, 16), odd);
            __m512i size = _mm512_and_si512(h, _mm512_set1_epi16(0x7fff));
            is_nan = _mm512_cmpgt_epi16_mask(size, _mm512_set1_epi16(0x7f80));
            h = _mm512_mask_mov_epi16(h, is_nan, nan);
        }
        _mm512_mask_storeu_epi16(bf16_at_mut(y, i), m, h);
    }
}

void dspark__e4m3_to_bf16__avx512(uint16_t *y, const uint8_t *codes, size_t n, float scale)
{
    decode_fp8(y, codes, n, scale, FP8_E4M3);
}

void dspark__e5m2_to_bf16__avx512(uint16_t *y, const uint8_t *codes, size_t n, float scale)
{
    decode_fp8(y, codes, n, scale, FP8_E5M2);
}

/* 16 entries, n of which exist, as outputs of a K panel: n_pairs <= 16 pairs from pair on, with the
 * values of mask. */
DSPARK__INLINE void pack_k_block(uint16_t *to, const void *const *entries, size_t n, size_t pair,
                                 size_t n_pairs, __mmask32 mask)
{
    __m512i r[GROUP];
    DSPARK__UNROLL
    for (size_t j = 0; j < GROUP; j++)
        r[j] = j < n ? _mm512_maskz_loadu_epi16(mask, bf16_at(entries[j], 2 * pair))
                     : _mm512_setzero_si512();
    transpose_words(r);
    to += pair * DSPARK__PANEL * 2;
    DSPARK__UNROLL
    for (size_t i = 0; i < GROUP; i++)
        if (i < n_pairs) _mm512_store_si512((void *)(to + i * DSPARK__PANEL * 2), r[i]);
}

static void pack_k(uint16_t *to, const void *const *entries, size_t n, size_t n_values)
{
    const size_t n_pairs = (n_values + 1) / 2;
    size_t pair = 0;
    if (n == GROUP)
        for (; pair + 16 <= n_values / 2; pair += 16)
            pack_k_block(to, entries, GROUP, pair, 16, 0xffffffffu);
    for (; pair < n_pairs; pair += 16) {
        size_t left = n_values - 2 * pair, pairs_left = n_pairs - pair;
        __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
        pack_k_block(to, entries, n, pair, pairs_left < 16 ? pairs_left : 16, mask);
    }
}

/* 16 values of a row from i on, in words; m: those that exist. */
DSPARK__INLINE __m512i load_words(const void *row, size_t i, __mmask16 m)
{
    if (m == 0) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, bf16_at(row, i)));
}

/* Two entries (NULL: missing) as one pair of k of every V panel. */
static void pack_v(uint16_t *to, const void *even, const void *odd, size_t n_latent)
{
    for (size_t v = 0; v < n_latent; v += DSPARK__PANEL) {
        for (size_t j = 0; j < DSPARK__PANEL; j += 16) {
            __mmask16 m = v + j < n_latent ? first_lanes(n_latent - v - j) : 0;
            __m512i a = load_words(even, v + j, even ? m : 0);
            __m512i b = load_words(odd, v + j, odd ? m : 0);
            _mm512_store_si512((void *)(to + 2 * j), _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
        }
        to += DSPARK__PIECE * DSPARK__PANEL;
    }
}

void dspark__pack_entries__avx512(const dspark__pack_entries *p)
{
    const size_t n_values = p->n_latent + p->n_rope, panel = dspark__panel_elements(n_values);
    for (size_t j = 0; j < DSPARK__PIECE; j += GROUP) {
        size_t n = j < p->n_entries ? p->n_entries - j : 0;
        if (n > GROUP) n = GROUP;
        const void *const *entries = n > 0 ? p->entries + j : NULL;
        if (p->k_panels)
            pack_k(p->k_panels + j / DSPARK__PANEL * panel + j % DSPARK__PANEL * 2, entries, n,
                   n_values);
        for (size_t i = 0; p->v_panels && i < GROUP; i += 2)
            pack_v(p->v_panels + (j + i) * DSPARK__PANEL, i < n ? entries[i] : NULL,
                   i + 1 < n ? entries[i + 1] : NULL, p->n_latent);
    }
}

#endif
