/* Weight rows into panels: the one layout that every level reads. Data movement only. */
#include "kern/kern.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Pairs of k per pass: long enough runs of each row for the prefetcher, while the 24 KB of panel
 * that they go to stay in L1. */
enum { PACK_PAIRS = 128 };

/* Pairs [pair0, pair1) of one row: every 48th place of the panel. A missing row is zero. */
static void pack_row(uint16_t *to, const unsigned char *row, size_t pair0, size_t pair1, size_t k)
{
    for (size_t pair = pair0; pair < pair1; pair++, to += 2 * DSPARK__PANEL) {
        uint16_t two[2] = {0, 0};
        if (row) memcpy(two, row + 4 * pair, 2 * pair + 1 < k ? 4 : 2);
        memcpy(to, two, sizeof two);
    }
}

#if defined(__SSE2__)
/* The same for four rows that exist and pairs that are whole, as 4 x 4 transpositions: a store of 16
 * bytes instead of four of 4. pair1 - pair0 is a multiple of 4. */
static void pack_four_rows(uint16_t *to, const unsigned char *row, size_t row_bytes, size_t pair0,
                           size_t pair1)
{
    for (size_t pair = pair0; pair < pair1; pair += 4) {
        const unsigned char *at = row + 4 * pair;
        __m128i r0 = _mm_loadu_si128((const __m128i *)at);
        __m128i r1 = _mm_loadu_si128((const __m128i *)(at + row_bytes));
        __m128i r2 = _mm_loadu_si128((const __m128i *)(at + 2 * row_bytes));
        __m128i r3 = _mm_loadu_si128((const __m128i *)(at + 3 * row_bytes));
        __m128i low01 = _mm_unpacklo_epi32(r0, r1), high01 = _mm_unpackhi_epi32(r0, r1);
        __m128i low23 = _mm_unpacklo_epi32(r2, r3), high23 = _mm_unpackhi_epi32(r2, r3);
        _mm_store_si128((__m128i *)to, _mm_unpacklo_epi64(low01, low23));
        _mm_store_si128((__m128i *)(to + 2 * DSPARK__PANEL), _mm_unpackhi_epi64(low01, low23));
        _mm_store_si128((__m128i *)(to + 4 * DSPARK__PANEL), _mm_unpacklo_epi64(high01, high23));
        _mm_store_si128((__m128i *)(to + 6 * DSPARK__PANEL), _mm_unpackhi_epi64(high01, high23));
        to += 8 * DSPARK__PANEL;
    }
}
#endif

static void pack_panel(uint16_t *panel, const unsigned char *w, size_t n_rows, size_t k)
{
    const size_t row_bytes = 2 * k, n_pairs = (k + 1) / 2;
    for (size_t pair0 = 0; pair0 < n_pairs; pair0 += PACK_PAIRS) {
        size_t pair1 = pair0 + PACK_PAIRS < n_pairs ? pair0 + PACK_PAIRS : n_pairs;
        size_t j = 0;
        uint16_t *to = panel + pair0 * DSPARK__PANEL * 2;
#if defined(__SSE2__)
        for (; 2 * pair1 <= k && (pair1 - pair0) % 4 == 0 && j + 4 <= n_rows; j += 4)
            pack_four_rows(to + 2 * j, w + j * row_bytes, row_bytes, pair0, pair1);
#endif
        for (; j < DSPARK__PANEL; j++)
            pack_row(to + 2 * j, j < n_rows ? w + j * row_bytes : NULL, pair0, pair1, k);
    }
}

void dspark__pack_bf16(uint16_t *panels, const void *w, size_t n_rows, size_t k)
{
    const unsigned char *from = w;
    for (size_t row = 0; row < n_rows; row += DSPARK__PANEL) {
        size_t left = n_rows - row;
        pack_panel(panels, from + row * k * 2, left < DSPARK__PANEL ? left : DSPARK__PANEL, k);
        panels += dspark__panel_elements(k);
    }
}
