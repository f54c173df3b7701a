/* Weight rows into panels: the one layout that every level reads. Data movement only. */
#include "base/digest.h"
#include "kern/levels.h"

#include <string.h>

/* Pairs of k per pass: long enough runs of each row for the prefetcher, while the 24 KB of panel
 * that they go to stay in L1. */
enum { PACK_PAIRS = 128 };

/* Pairs [pair0, pair1) of one row: every 48th place of the panel. A missing row is zero. */
static int pack_row(uint16_t *to, const unsigned char *row, size_t pair0, size_t pair1, size_t k)
{
    int finite = 1;
    for (size_t pair = pair0; pair < pair1; pair++, to += 2 * DSPARK__PANEL) {
        uint16_t two[2] = {0, 0};
        if (row) memcpy(two, row + 4 * pair, 2 * pair + 1 < k ? 4 : 2);
        memcpy(to, two, sizeof two);
        finite &= dspark__bf16_is_finite(two[0]) && dspark__bf16_is_finite(two[1]);
    }
    return finite;
}

int dspark__pack_panel__ref(uint16_t *panel, const void *w, size_t stride, size_t n_rows, size_t k)
{
    const size_t n_pairs = (k + 1) / 2;
    const unsigned char *from = w;
    int finite = 1;
    for (size_t pair0 = 0; pair0 < n_pairs; pair0 += PACK_PAIRS) {
        size_t pair1 = pair0 + PACK_PAIRS < n_pairs ? pair0 + PACK_PAIRS : n_pairs;
        for (size_t j = 0; j < DSPARK__PANEL; j++)
            finite &= pack_row(panel + (pair0 * DSPARK__PANEL + j) * 2,
                               j < n_rows ? from + j * stride : NULL, pair0, pair1, k);
    }
    return finite;
}

void dspark__digest_rows__ref(unsigned char (*digests)[16], const void *rows, size_t stride, size_t n_rows,
                              size_t n)
{
    for (size_t j = 0; j < n_rows; j++)
        dspark__digest_bytes((const unsigned char *)rows + j * stride, n, digests[j]);
}

void dspark__pack_bf16(uint16_t *panels, const void *w, size_t n_rows, size_t k)
{
    for (size_t row = 0; row < n_rows; row += DSPARK__PANEL) {
        size_t left = n_rows - row;
        dspark__pack_panel__ref(panels, bf16_at(w, row * k), 2 * k,
                                left < DSPARK__PANEL ? left : DSPARK__PANEL, k);
        panels += dspark__panel_elements(k);
    }
}
