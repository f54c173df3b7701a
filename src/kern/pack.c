/* Weight rows into panels: the one layout that every level reads. Data movement only. */
#include "kern/kern.h"

#include <string.h>

/* Pairs of k per pass: 48 rows of 128 bytes are read while 12 KB of panel stay in L1. */
enum { PACK_PAIRS = 64 };

static void pack_panel(uint16_t *panel, const unsigned char *w, size_t n_rows, size_t k)
{
    const size_t row_bytes = 2 * k, n_pairs = (k + 1) / 2;
    for (size_t pair0 = 0; pair0 < n_pairs; pair0 += PACK_PAIRS) {
        size_t pair1 = pair0 + PACK_PAIRS < n_pairs ? pair0 + PACK_PAIRS : n_pairs;
        for (size_t j = 0; j < DSPARK__PANEL; j++) {
            uint16_t *to = panel + (pair0 * DSPARK__PANEL + j) * 2;
            const unsigned char *from = j < n_rows ? w + j * row_bytes + 4 * pair0 : NULL;
            for (size_t pair = pair0; pair < pair1; pair++, to += 2 * DSPARK__PANEL) {
                uint16_t two[2] = {0, 0};
                if (from) {
                    memcpy(two, from, 2 * pair + 1 < k ? 4 : 2);
                    from += 4;
                }
                memcpy(to, two, sizeof two);
            }
        }
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
