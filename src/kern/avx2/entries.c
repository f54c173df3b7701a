/* AVX2: fp8 codes to bf16, and a piece of cache entries into the panels of both products. Equal to
 * ref/entries.c bit for bit. Tails run the same code on a zero-padded copy. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"
#include "kern/avx2/transpose.h"

enum { GROUP = 16 }; /* entries at a time: 18 KB of K3's, which stay in L1 for both panels */
enum { LANES = 8 };

/* bf16 in the high halves of 8 words times scale, rounded, in the high halves. A NaN must not have a
 * payload that rounding carries out of. */
DSPARK__INLINE __m256i multiply_high(__m256i h, __m256 scale)
{
    __m256i u = _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(h), scale));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

/* 16 codes. The format is a constant in each caller. */
DSPARK__INLINE __m256i decode_16(const uint8_t *codes, const fp8_values *v, __m256 scale,
                                 fp8_format f)
{
    const __m256i small = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)v->small));
    const __m256i limit = _mm256_set1_epi16((short)(1 << f.mantissa_bits));
    const __m256i largest = _mm256_set1_epi16(f.mantissa_bits == 3 ? 0x7e : 0x7c);
    const __m256i infinity = _mm256_set1_epi16(0x7f80), nan = _mm256_set1_epi16(DSPARK__BF16_NAN);
    __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)codes));
    __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
    __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(code, magnitude), 8);
    __m256i h = _mm256_slli_epi16(magnitude, 7 - (int)f.mantissa_bits);
    h = _mm256_add_epi16(h, _mm256_set1_epi16((short)v->rebias));
    __m256i bytes =
        _mm256_mullo_epi16(magnitude, _mm256_set1_epi16(0x202)); /* of small[magnitude] */
    bytes = _mm256_add_epi16(bytes, _mm256_set1_epi16(0x100));
    h = _mm256_blendv_epi8(h, _mm256_shuffle_epi8(small, bytes),
                           _mm256_cmpgt_epi16(limit, magnitude));
    if (f.mantissa_bits == 2) /* e5m2 has infinity, just below its NaNs */
        h = _mm256_blendv_epi8(h, infinity, _mm256_cmpeq_epi16(magnitude, largest));
    h = _mm256_blendv_epi8(_mm256_or_si256(h, sign), nan, _mm256_cmpgt_epi16(magnitude, largest));
    if (v->exact) return h;
    __m256i even = multiply_high(_mm256_slli_epi32(h, 16), scale);
    __m256i odd = multiply_high(_mm256_and_si256(h, _mm256_set1_epi32(-65536)), scale);
    h = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
    __m256i size = _mm256_and_si256(h, _mm256_set1_epi16(0x7fff));
    return _mm256_blendv_epi8(h, nan, _mm256_cmpgt_epi16(size, infinity));
}

DSPARK__INLINE void decode_fp8(uint16_t *y, const uint8_t *codes, size_t n, float scale,
                               fp8_format f)
{
    const fp8_values v = fp8_prepare(f, scale);
    const __m256 factor = _mm256_set1_ps(canonical_nan(scale));
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((void *)bf16_at_mut(y, i), decode_16(codes + i, &v, factor, f));
    if (i == n) return;
    uint8_t tail[16] = {0};
    uint16_t tail_y[16];
    memcpy(tail, codes + i, n - i);
    _mm256_storeu_si256((void *)tail_y, decode_16(tail, &v, factor, f));
    memcpy(bf16_at_mut(y, i), tail_y, 2 * (n - i));
}

void dspark__e4m3_to_bf16__avx2(uint16_t *y, const uint8_t *codes, size_t n, float scale)
{
    decode_fp8(y, codes, n, scale, FP8_E4M3);
}

void dspark__e5m2_to_bf16__avx2(uint16_t *y, const uint8_t *codes, size_t n, float scale)
{
    decode_fp8(y, codes, n, scale, FP8_E5M2);
}

/* Rows of eight entries, whole, as outputs of eight pairs of a K panel. */
DSPARK__INLINE void pack_k_block(uint16_t *to, const void *const row[LANES], size_t n_pairs)
{
    __m256i r[LANES];
    DSPARK__UNROLL
    for (size_t j = 0; j < LANES; j++) r[j] = _mm256_loadu_si256(row[j]);
    transpose_8(r);
    DSPARK__UNROLL
    for (size_t i = 0; i < LANES; i++)
        if (i < n_pairs) _mm256_store_si256((void *)(to + i * DSPARK__PANEL * 2), r[i]);
}

/* Eight entries, n of which exist. */
static void pack_k(uint16_t *to, const void *const *entries, size_t n, size_t n_values)
{
    const size_t n_pairs = (n_values + 1) / 2;
    const void *row[LANES];
    uint16_t tail[LANES][2 * LANES];
    for (size_t pair = 0; pair < n_pairs; pair += LANES) {
        size_t left = n_values - 2 * pair, pairs_left = n_pairs - pair;
        if (left > 2 * LANES) left = 2 * LANES;
        int whole = left == 2 * LANES && n == LANES;
        if (!whole) memset(tail, 0, sizeof tail);
        for (size_t j = 0; j < LANES; j++) {
            if (!whole && j < n) memcpy(tail[j], bf16_at(entries[j], 2 * pair), 2 * left);
            row[j] = whole ? (const void *)bf16_at(entries[j], 2 * pair) : tail[j];
        }
        pack_k_block(to + pair * DSPARK__PANEL * 2, row, pairs_left < LANES ? pairs_left : LANES);
    }
}

/* Values i .. i+7 of an entry (NULL: missing) of n, in words. */
DSPARK__INLINE __m256i load_words(const void *entry, size_t i, size_t n)
{
    uint16_t tail[LANES] = {0};
    if (entry && i + LANES <= n) return _mm256_cvtepu16_epi32(load_8(entry, i));
    if (!entry || i >= n) return _mm256_setzero_si256();
    memcpy(tail, bf16_at(entry, i), 2 * (n - i));
    return _mm256_cvtepu16_epi32(load_8(tail, 0));
}

/* Two entries as one pair of k of every V panel. */
static void pack_v(uint16_t *to, const void *even, const void *odd, size_t n_latent)
{
    for (size_t v = 0; v < n_latent; v += DSPARK__PANEL) {
        for (size_t j = 0; j < DSPARK__PANEL; j += LANES) {
            __m256i a = load_words(even, v + j, n_latent), b = load_words(odd, v + j, n_latent);
            _mm256_store_si256((void *)(to + 2 * j), _mm256_or_si256(a, _mm256_slli_epi32(b, 16)));
        }
        to += DSPARK__PIECE * DSPARK__PANEL;
    }
}

static size_t entries_left(size_t n, size_t before, size_t most)
{
    if (before >= n) return 0;
    return n - before < most ? n - before : most;
}

void dspark__pack_entries__avx2(const dspark__pack_entries *p)
{
    const size_t n_values = p->n_latent + p->n_rope, panel = dspark__panel_elements(n_values);
    for (size_t start = 0; start < DSPARK__PIECE; start += GROUP) {
        for (size_t j = start; p->k_panels && j < start + GROUP; j += LANES) {
            size_t n = entries_left(p->n_entries, j, LANES);
            uint16_t *to = p->k_panels + j / DSPARK__PANEL * panel + j % DSPARK__PANEL * 2;
            pack_k(to, n > 0 ? p->entries + j : NULL, n, n_values);
        }
        for (size_t j = start; p->v_panels && j < start + GROUP; j += 2)
            pack_v(p->v_panels + j * DSPARK__PANEL, j < p->n_entries ? p->entries[j] : NULL,
                   j + 1 < p->n_entries ? p->entries[j + 1] : NULL, p->n_latent);
    }
}

#endif
