/* AVX-512: a panel of weights as 16 x 16 transpositions of pairs. Whole lines go to memory past the
 * caches: a model's weights are larger than those, and the lines need not be read first. */
#if defined(__x86_64__)
#include "kern/avx512/bits.h"
#include "kern/avx512/transpose.h"

/* Bytes of each row that are fetched ahead: rows are too many for the processor to see as streams. */
enum { AHEAD = 512 };

/* 16 rows of which n exist, n_pairs <= 16 pairs with the values of mask. *most: the largest magnitude
 * so far, twice (the sign is shifted out). */
DSPARK__INLINE void pack_square(uint16_t *to, const unsigned char *row, size_t stride, size_t n,
                                size_t n_pairs, __mmask32 mask, __m512i *most)
{
    __m512i r[16];
    DSPARK__UNROLL
    for (size_t j = 0; j < 16; j++) {
        r[j] = _mm512_setzero_si512();
        if (j >= n) continue;
        r[j] = mask == 0xffffffffu ? _mm512_loadu_si512(row + j * stride)
                                   : _mm512_maskz_loadu_epi16(mask, row + j * stride);
        if (mask == 0xffffffffu) _mm_prefetch((const char *)row + j * stride + AHEAD, _MM_HINT_T0);
        *most = _mm512_max_epu16(*most, _mm512_add_epi16(r[j], r[j]));
    }
    transpose_words(r);
    DSPARK__UNROLL
    for (size_t i = 0; i < 16; i++)
        if (i < n_pairs) _mm512_stream_si512((void *)(to + i * DSPARK__PANEL * 2), r[i]);
}

int dspark__pack_panel__avx512(uint16_t *panel, const void *w, size_t stride, size_t n_rows, size_t k)
{
    const size_t n_pairs = (k + 1) / 2;
    __m512i most = _mm512_setzero_si512();
    size_t pair = 0;
    if (n_rows == DSPARK__PANEL)
        for (; pair + 16 <= k / 2; pair += 16) {
            uint16_t *to = panel + pair * DSPARK__PANEL * 2;
            const unsigned char *from = bf16_at(w, 2 * pair);
            for (size_t j = 0; j < DSPARK__PANEL; j += 16)
                pack_square(to + 2 * j, from + j * stride, stride, 16, 16, 0xffffffffu, &most);
        }
    for (; pair < n_pairs; pair += 16) {
        size_t left = k - 2 * pair, pairs_left = n_pairs - pair;
        __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
        for (size_t j = 0; j < DSPARK__PANEL; j += 16) {
            size_t n = n_rows > j ? n_rows - j : 0;
            pack_square(panel + (pair * DSPARK__PANEL + j) * 2, bf16_at(w, 2 * pair) + j * stride, stride,
                        n < 16 ? n : 16, pairs_left < 16 ? pairs_left : 16, mask, &most);
        }
    }
    _mm_sfence(); /* streaming stores are not ordered by a lock or an atomic */
    return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16((short)0xff00)) == 0;
}

#endif
