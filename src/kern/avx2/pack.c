/* AVX2: a panel of weights as 8 x 8 transpositions of pairs. Eight pairs are made in the first-level cache and
 * then go to memory as whole lines. */
#if defined(__x86_64__)
#include "kern/avx2/pack.h"

/* Bytes of each row that are fetched ahead: rows are too many for the processor to see as streams. */
enum { AHEAD = 512 };

/* Eight whole rows from one place each. */
DSPARK__INLINE void pack_square(__m256i *to, const unsigned char *row, size_t stride, __m256i *most)
{
    __m256i r[SIDE];
    DSPARK__UNROLL
    for (size_t j = 0; j < SIDE; j++) {
        r[j] = _mm256_loadu_si256((const void *)(row + j * stride));
        *most = larger(*most, r[j]);
    }
    transpose_8(r);
    DSPARK__UNROLL
    for (size_t i = 0; i < SIDE; i++) _mm256_store_si256(to + i * VECTORS, r[i]);
}

int dspark__pack_panel__avx2(uint16_t *panel, const void *w, size_t stride, size_t n_rows, size_t k)
{
    __m256i block[SIDE * VECTORS], most = _mm256_setzero_si256();
    size_t pair = 0;
    if (n_rows == DSPARK__PANEL)
        for (; pair + SIDE <= k / 2; pair += SIDE) {
            const unsigned char *from = bf16_at(w, 2 * pair);
            if (pair % (2 * SIDE) == 0)
                for (size_t j = 0; j < DSPARK__PANEL; j++)
                    _mm_prefetch((const char *)from + j * stride + AHEAD, _MM_HINT_T0);
            for (size_t j = 0; j < VECTORS; j++)
                pack_square(block + j, from + j * SIDE * stride, stride, &most);
            stream_pairs(panel + pair * DSPARK__PANEL * 2, block, SIDE);
        }
    pack_rest(panel, w, stride, n_rows, k, pair, &most);
    _mm_sfence(); /* streaming stores are not ordered by a lock or an atomic */
    return is_finite(most);
}

#endif
