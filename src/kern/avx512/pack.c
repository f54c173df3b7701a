/* AVX-512: a panel of weights as 16 x 16 transpositions of pairs. Whole lines go to memory past the
 * caches: a model's weights are larger than those, and the lines need not be read first. */
#if defined(__x86_64__)
#include "kern/avx512/pack.h"

/* Bytes of each row that are fetched ahead: rows are too many for the processor to see as streams. */
enum { AHEAD = 512 };

int dspark__pack_panel__avx512(uint16_t *panel, const void *w, size_t stride, size_t n_rows, size_t k)
{
    __m512i most = _mm512_setzero_si512();
    size_t pair = 0;
    if (n_rows == DSPARK__PANEL)
        for (; pair + SQUARE_PAIRS <= k / 2; pair += SQUARE_PAIRS) {
            uint16_t *to = panel + pair * DSPARK__PANEL * 2;
            const unsigned char *from = bf16_at(w, 2 * pair);
            for (size_t j = 0; j < DSPARK__PANEL; j += 16, from += 16 * stride) {
                __m512i r[16];
                DSPARK__UNROLL
                for (size_t i = 0; i < 16; i++) {
                    r[i] = _mm512_loadu_si512(from + i * stride);
                    _mm_prefetch((const char *)from + i * stride + AHEAD, _MM_HINT_T0);
                    most = larger(most, r[i]);
                }
                store_square(to + 2 * j, r, SQUARE_PAIRS);
            }
        }
    pack_rest(panel, w, stride, n_rows, k, pair, &most);
    _mm_sfence(); /* streaming stores are not ordered by a lock or an atomic */
    return is_finite(most);
}

#endif
