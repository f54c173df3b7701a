/* How the product by fp32 fused multiply-adds walks rows, panels and k, for the levels without bf16
 * instructions. Included by each level's gemm_fma.c, which defines the two functions declared here; it
 * brings tile_rows, panel_outputs and store_outputs by its bits.h. */
#ifndef DSPARK_KERN_FMA_BLOCKS_H
#define DSPARK_KERN_FMA_BLOCKS_H

#include "base/fpenv.h"
#include "kern/levels.h"

#include <immintrin.h>

enum {
    FEW = 4,                  /* rows that are about as fast as memory */
    STEP = 64,
    PAIR = 2 * DSPARK__PANEL,
    PIECE = STEP * PAIR,      /* elements of a piece */
    LINE = 64,
    BLOCK_ROWS = 64,
    LOCAL_ROWS = 16,          /* of a block whose sums the caller has no room for */
    BLOCK_PANELS = 3,
    X_LINES = 4 * STEP / LINE /* of a row's STEP, as bf16 */
};

/* What a tile reads, and what it fetches meanwhile: far into L2, near into L1. */
typedef struct piece {
    const uint16_t *w;
    size_t pair;    /* elements from one pair of k to the next: PAIR, or less in a narrow panel */
    const float *x;
    size_t n_pairs;
    const char *far, *near;
    const unsigned char *next_x; /* bf16 of the first row's next STEP, which exists whole, or NULL */
    size_t x_stride;             /* bytes from there to the next row's */
    float *next_wide;            /* few rows: where it is wanted as fp32, in the order of x */
    size_t first_line, line_step; /* more rows: which of its lines are fetched with this piece */
} piece;

/* n elements of a bf16 row as fp32; an odd n gets a zero behind it. */
static void widen_row(float *to, const unsigned char *x, size_t n);
/* acc += one piece times n_rows rows, which are 2 * STEP floats apart; fetch: `far` and `near` exist. Returns
 * whether next_wide has been written. */
static int run_piece(float *acc, const piece *from, size_t n_rows, int fetch);

/* What rows [row, row + n) of a piece's x need next. Caches hold it, but not the near ones, and lines lie far
 * apart: asked for all rows at once, they fill the miss buffers and everything waits. Rows that begin within a
 * line end in one more, whose first bytes have come with the STEP before: so the lines' ends are asked for. */
DSPARK__INLINE void fetch_x(const piece *s, size_t row, size_t n)
{
    for (size_t i = row; s->next_x && i < row + n; i++)
        for (size_t line = s->first_line; line < X_LINES; line += s->line_step)
            _mm_prefetch((const char *)s->next_x + i * s->x_stride + line * LINE + LINE - 1, _MM_HINT_T1);
}

/* Whole piece number i of panel p; numbers go on in the next panel, and behind the last one is what the
 * caller wants fetched. NULL: there is none. */
static const char *find_piece(const dspark__gemm_bf16 *g, size_t p, size_t i)
{
    const size_t n_whole = g->k / (2 * STEP), n = (g->k + 2 * STEP - 1) / (2 * STEP);
    const size_t bytes = PIECE * sizeof *g->panels;
    if (i >= n) {
        i -= n;
        p++;
    }
    if (i >= n_whole) return NULL;
    if (p < g->n_panels) return (const char *)(g->panels + p * g->panel_stride + i * PIECE);
    return g->prefetch && (i + 1) * bytes <= g->prefetch_bytes ? (const char *)g->prefetch + i * bytes : NULL;
}

/* A piece of a narrow panel. Tiles take 48 outputs of it, of which the last ones are of the next pair and are
 * seen nowhere. Its end, behind which nothing need be, is copied. */
static void narrow_piece(piece *s, const dspark__gemm_bf16 *g, size_t p, size_t k, uint16_t *whole)
{
    const uint16_t *from = g->panels + p * g->panel_stride + k * g->narrow;
    s->pair = 2 * g->narrow;
    s->w = from;
    if (((g->k + 1) / 2 - k / 2 - s->n_pairs) * s->pair >= PAIR - s->pair) return; /* what is read is behind it */
    memcpy(whole, from, s->n_pairs * s->pair * sizeof *from);
    memset(whole + s->n_pairs * s->pair, 0, (PAIR - s->pair) * sizeof *whole);
    s->w = whole;
}

/* Up to BLOCK_ROWS rows of up to BLOCK_PANELS panels, STEP after STEP. */
static void run_block(const dspark__gemm_bf16 *g, size_t p0, size_t n_panels, size_t row,
                      size_t n_rows)
{
    _Alignas(64) float wides[BLOCK_ROWS * 2 * STEP];
    _Alignas(64) float local[BLOCK_PANELS * LOCAL_ROWS * DSPARK__PANEL];
    _Alignas(64) uint16_t whole[PIECE];
    const unsigned char *x = (const unsigned char *)g->x + row * g->x_stride;
    float *acc = g->acc ? g->acc + (p0 * g->n_rows + row) * DSPARK__PANEL : local;
    const size_t acc_stride = (g->acc ? g->n_rows : n_rows) * DSPARK__PANEL;
    for (size_t p = 0; g->first && p < n_panels; p++)
        memset(acc + p * acc_stride, 0, n_rows * DSPARK__PANEL * sizeof *acc);
    float *wide = wides, *next_wide = wides + FEW * 2 * STEP;
    int ready = 0;
    for (size_t k = 0, n; k < g->k; k += n) {
        if (ready) {
            float *now = next_wide;
            next_wide = wide;
            wide = now;
        }
        n = g->k - k < 2 * STEP ? g->k - k : 2 * STEP;
        const int more = g->k - k >= 4 * STEP; /* what is fetched exists; the end is left alone */
        for (size_t i = 0; !ready && i < n_rows; i++)
            widen_row(wide + i * 2 * STEP, bf16_at(x + i * g->x_stride, k), n);
        for (size_t p = 0; p < n_panels; p++) {
            piece s = {.w = g->panels + (p0 + p) * g->panel_stride + k * DSPARK__PANEL, .pair = PAIR,
                       .x = wide, .n_pairs = (n + 1) / 2, .x_stride = g->x_stride, .first_line = p,
                       .line_step = n_panels};
            int fetch = more && row == 0;
            if (more) s.next_x = bf16_at(x, k + n);
            if (panel_width(g, p0 + p) < DSPARK__PANEL) narrow_piece(&s, g, p0 + p, k, whole);
            if (n_rows <= FEW) {
                s.first_line = X_LINES;
                s.next_wide = next_wide;
                s.near = find_piece(g, p0 + p, k / (2 * STEP) + 1);
                s.far = find_piece(g, p0 + p, k / (2 * STEP) + 2);
                if (!s.far) s.far = s.near;
                fetch = s.near != NULL;
            } else {
                s.far = s.near = (const char *)(s.w + (more ? PIECE : 0));
            }
            ready = run_piece(acc + p * acc_stride, &s, n_rows, fetch);
        }
    }
    for (size_t p = 0; g->last && p < n_panels; p++) {
        size_t n_out = panel_outputs(g, p0 + p);
        for (size_t i = 0; i < n_rows; i++) {
            size_t at = (row + i) * g->out_stride + (p0 + p) * DSPARK__PANEL;
            store_outputs(bf16_at_mut(g->out, at), acc + p * acc_stride + i * DSPARK__PANEL, n_out);
        }
    }
}

static void run_blocks(const dspark__gemm_bf16 *g)
{
    const size_t most_rows = g->acc ? BLOCK_ROWS : LOCAL_ROWS;
    const size_t most_panels = g->n_rows <= FEW ? 1 : BLOCK_PANELS;
    unsigned host = _mm_getcsr();
    _mm_setcsr(host | DSPARK__MXCSR_FTZ_DAZ);
    for (size_t p = 0, n_panels; p < g->n_panels; p += n_panels) {
        n_panels = g->n_panels - p < most_panels ? g->n_panels - p : most_panels;
        for (size_t row = 0, n; row < g->n_rows; row += n) {
            n = tile_rows(g->n_rows - row, most_rows);
            run_block(g, p, n_panels, row, n);
        }
    }
    _mm_setcsr(host);
}

#endif
