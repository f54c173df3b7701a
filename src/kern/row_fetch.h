/* Which lines of 48 rows are fetched while others of them are packed. Rows are taken in pieces of up to a
 * page, for memory is slow at 48 places at once: while one piece is packed out of the second-level cache,
 * the next one comes in row by row. */
#ifndef DSPARK_KERN_ROW_FETCH_H
#define DSPARK_KERN_ROW_FETCH_H

#include "kern/levels.h"

#include <immintrin.h>

enum { STRIPE = 64, PIECE = 64 }; /* bytes, of a digest and of a line; stripes of a row that are fetched together */

typedef struct fetch {
    const char *at;    /* the first row's piece; NULL: nothing */
    size_t stride, n;  /* bytes from row to row; lines of a row, which need not begin with one */
    size_t row, line;
    size_t a_time;
} fetch;

/* n_bytes of each row from `at` on, during n_stripes of three calls each. */
DSPARK__INLINE fetch begin_fetch(const void *at, size_t n_bytes, size_t stride, size_t n_stripes)
{
    fetch f = {.at = at, .stride = stride, .n = (n_bytes + (uintptr_t)at % STRIPE + STRIPE - 1) / STRIPE};
    f.a_time = (f.n * 16 + n_stripes - 1) / n_stripes;
    return f;
}

/* While stripes from .. end of n_stripes, a piece or the last one, are packed: the piece behind them, or that of
 * the next panel. */
DSPARK__INLINE fetch fetch_behind(const dspark__pack_digest *p, size_t from, size_t end, size_t n_stripes,
                                  size_t piece)
{
    const size_t left = n_stripes - end;
    const unsigned char *rows = p->rows;
    if (left) return begin_fetch(rows + end * STRIPE, (left < piece ? left : piece) * STRIPE, p->stride, end - from);
    if (p->next) return begin_fetch(p->next, piece * STRIPE, p->stride, end - from);
    return (fetch){0};
}

DSPARK__INLINE void fetch_lines(fetch *f)
{
    if (!f->at || f->row == DSPARK__PANEL) return;
    const char *row = f->at + f->row * f->stride;
    for (size_t i = 0; i < f->a_time; i++) {
        _mm_prefetch(row + f->line * STRIPE, _MM_HINT_T1);
        if (++f->line < f->n) continue;
        f->line = 0;
        if (++f->row == DSPARK__PANEL) return;
        row += f->stride;
    }
}

#endif
