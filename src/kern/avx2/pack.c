/* AVX2: a panel of weights as 8 x 8 transpositions of pairs. Eight pairs are made in the first-level
 * cache and then go to memory as whole lines past the caches, which need not be read first. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"
#include "kern/avx2/transpose.h"

enum { SIDE = 8, VECTORS = DSPARK__PANEL / SIDE };
/* Bytes of each row that are fetched ahead: rows are too many for the processor to see as streams. */
enum { AHEAD = 512 };

/* Eight whole rows from one place each. *most: the largest magnitude so far, twice (the sign is shifted
 * out). */
DSPARK__INLINE void pack_square(__m256i *to, const unsigned char *row, size_t stride, __m256i *most)
{
    __m256i r[SIDE];
    DSPARK__UNROLL
    for (size_t j = 0; j < SIDE; j++) {
        r[j] = _mm256_loadu_si256((const void *)(row + j * stride));
        *most = _mm256_max_epu16(*most, _mm256_add_epi16(r[j], r[j]));
    }
    transpose_8(r);
    DSPARK__UNROLL
    for (size_t i = 0; i < SIDE; i++) _mm256_store_si256(to + i * VECTORS, r[i]);
}

static void stream_pairs(uint16_t *to, const __m256i *from, size_t n_pairs)
{
    for (size_t i = 0; i < n_pairs * VECTORS; i++) _mm256_stream_si256((__m256i *)(void *)to + i, from[i]);
}

/* The rows' ends and panels that are not full, value by value. */
static void copy_pairs(__m256i *block, const void *w, size_t stride, size_t n_rows, size_t k, size_t pair, __m256i *most)
{
    uint16_t values[SIDE * DSPARK__PANEL * 2] = {0};
    for (size_t row = 0; row < n_rows; row++)
        for (size_t i = 2 * pair; i < k && i < 2 * (pair + SIDE); i++)
            memcpy(&values[((i / 2 - pair) * DSPARK__PANEL + row) * 2 + i % 2], bf16_at((const unsigned char *)w + row * stride, i), 2);
    memcpy(block, values, sizeof values);
    for (size_t i = 0; i < SIDE * VECTORS; i++)
        *most = _mm256_max_epu16(*most, _mm256_add_epi16(block[i], block[i]));
}

int dspark__pack_panel__avx2(uint16_t *panel, const void *w, size_t stride, size_t n_rows, size_t k)
{
    const size_t n_pairs = (k + 1) / 2;
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
    for (; pair < n_pairs; pair += SIDE) {
        copy_pairs(block, w, stride, n_rows, k, pair, &most);
        stream_pairs(panel + pair * DSPARK__PANEL * 2, block, n_pairs - pair < SIDE ? n_pairs - pair : SIDE);
    }
    _mm_sfence(); /* streaming stores are not ordered by a lock or an atomic */
    __m256i bound = _mm256_set1_epi16((short)0xff00);
    __m256i bad = _mm256_cmpeq_epi16(_mm256_max_epu16(most, bound), most);
    return _mm256_testz_si256(bad, bad);
}

#endif
