/* AVX-512-BF16: the matrix product by vdpbf16ps, whose two multiply-adds per lane are the
 * definition in ref/gemm_bf16.c (it flushes subnormals whatever MXCSR says). */
#if defined(__x86_64__)
#include "kern/avx512/bf16dot.h"

/* A tile is up to 8 rows x 48 outputs: 24 accumulators, 3 weights and a broadcast fit 32 registers
 * and run at the register-only peak from L2; 9 rows still fit, by one register. All tiles take turns on
 * a block of a panel, so that its weights come from memory once.
 *
 * Who fetches them, as measured on Zen 4 (bench/kern_bench.c):
 *
 *   up to 6 rows   One tile, one stream over all of k: it outruns memory, and the hardware prefetcher
 *                  alone does best. Software prefetches fill the few miss buffers of L1; several
 *                  streams at once, or pauses in one, make the hardware lose the thread.
 *   7 to 9         About as fast as memory. Renamed registers are used up within 5 pairs, too soon to
 *                  hide a miss, so lines are fetched into L2. A prefetch that finds no miss buffer is
 *                  dropped, and the hole it leaves costs more than the line, as the hardware goes by
 *                  sequences. So every line is asked for CHANCES times, GAP pairs apart: 8 to 12% faster
 *                  than once on one thread, 3 to 5% on two.
 *   10 to 16       Two tiles. While they work on a block, its successor comes into L2: two lines per
 *                  pair in the first, one in the second. Without it the second tile leaves
 *                  memory idle (35% slower); into L1 it loses as much. Up to 13 rows the first one asks
 *                  faster than memory gives, so the second one asks for every line again: 1 to 6%.
 *   more           The first three tiles fetch a line per pair each: that is the next block. */
enum {
    ROWS = 8,
    LONE_ROWS = MOST_ROWS,
    GROUP = 2 * ROWS,
    PAIR_BYTES = 4,
    PAIR_WEIGHTS = 2 * DSPARK__PANEL,
    BLOCK_SHORT = 128, /* pairs of a block for two tiles that ask again: 24 KB, as more is asked for in vain */
    SHORT_ROWS = 13,
    BLOCK_TWO = 256,   /* for two that do not: to change tiles takes some 100 cycles */
    BLOCK_SOME = 448,  /* for a few more: 84 KB; what one begins with that nobody has fetched costs less */
    BLOCK_MANY = 896,  /* and for many: 168 KB, which fit L2 twice beside much of x */
    SOME_ROWS = 48,
    AHEAD_ROWS = 7,    /* the fewest rows of a lone tile that fetches ahead */
    CHANCES = 3,
    GAP = 42,          /* pairs: 8 KB */
    SHORT_K = 1024,    /* up to it sums of a lone tile are best kept in registers (gemm_short_bf16dot.c) */
    LINE = 64
};

DSPARK__INLINE void load_sums(tile_sums sum, const float *acc, size_t n_rows)
{
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++)
            sum[i][v] = _mm512_load_ps(acc + i * DSPARK__PANEL + 16 * v);
}

DSPARK__INLINE void store_sums(float *acc, tile_sums sum, size_t n_rows)
{
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++)
            _mm512_store_ps(acc + i * DSPARK__PANEL + 16 * v, sum[i][v]);
}

/* One tile; n_rows and n_lines (cache lines to prefetch per pair) are constants in each copy. */
DSPARK__INLINE void multiply(float *acc, const unsigned char *x, size_t x_stride,
                             const uint16_t *w, size_t n_pairs, size_t n_rows,
                             const char *fetch, size_t n_lines)
{
    tile_sums sum;
    load_sums(sum, acc, n_rows);
    for (size_t pair = 0; pair < n_pairs; pair++, w += PAIR_WEIGHTS, x += PAIR_BYTES) {
        DSPARK__UNROLL
        for (size_t line = 0; line < n_lines; line++, fetch += LINE)
            _mm_prefetch(fetch, _MM_HINT_T1);
        add_pair(sum, x, x_stride, w, n_rows, VECTORS);
    }
    store_sums(acc, sum, n_rows);
}

/* A lone tile over a whole panel. Where the panel ends, fetching goes on with `next`; without one it
 * asks for lines that are here. */
DSPARK__INLINE void multiply_ahead(float *acc, const unsigned char *x, size_t x_stride,
                                   const uint16_t *w, size_t n_pairs, size_t n_rows,
                                   const uint16_t *next)
{
    tile_sums sum;
    load_sums(sum, acc, n_rows);
    for (size_t pair = 0, end; pair < n_pairs;) {
        const uint16_t *fetch[CHANCES];
        end = n_pairs;
        DSPARK__UNROLL
        for (size_t c = 0; c < CHANCES; c++) {
            size_t ahead = (c + 1) * GAP;
            if (pair + ahead < n_pairs) {
                fetch[c] = w + ahead * PAIR_WEIGHTS;
                end = end < n_pairs - ahead ? end : n_pairs - ahead;
            } else {
                fetch[c] = next ? next + (pair + ahead - n_pairs) * PAIR_WEIGHTS : w;
            }
        }
        for (; pair < end; pair++, w += PAIR_WEIGHTS, x += PAIR_BYTES) {
            DSPARK__UNROLL
            for (size_t c = CHANCES; c-- > 0; fetch[c] += PAIR_WEIGHTS)
                DSPARK__UNROLL
                for (size_t v = 0; v < VECTORS; v++) _mm_prefetch(fetch[c] + 32 * v, _MM_HINT_T1);
            add_pair(sum, x, x_stride, w, n_rows, VECTORS);
        }
    }
    store_sums(acc, sum, n_rows);
}

DSPARK__NOINLINE void multiply_rows(float *acc, const unsigned char *x, size_t x_stride,
                                    const uint16_t *w, size_t n_pairs, size_t n_rows)
{
    switch (n_rows) {
    case 1: multiply(acc, x, x_stride, w, n_pairs, 1, NULL, 0); break;
    case 2: multiply(acc, x, x_stride, w, n_pairs, 2, NULL, 0); break;
    case 3: multiply(acc, x, x_stride, w, n_pairs, 3, NULL, 0); break;
    case 4: multiply(acc, x, x_stride, w, n_pairs, 4, NULL, 0); break;
    case 5: multiply(acc, x, x_stride, w, n_pairs, 5, NULL, 0); break;
    case 6: multiply(acc, x, x_stride, w, n_pairs, 6, NULL, 0); break;
    case 7: multiply(acc, x, x_stride, w, n_pairs, 7, NULL, 0); break;
    default: multiply(acc, x, x_stride, w, n_pairs, 8, NULL, 0); break;
    }
}

/* A lone tile of 7 to 9 rows. */
DSPARK__NOINLINE void multiply_rows_ahead(float *acc, const unsigned char *x, size_t x_stride,
                                          const uint16_t *w, size_t n_pairs, size_t n_rows,
                                          const uint16_t *next)
{
    switch (n_rows) {
    case 7: multiply_ahead(acc, x, x_stride, w, n_pairs, 7, next); break;
    case 8: multiply_ahead(acc, x, x_stride, w, n_pairs, 8, next); break;
    default: multiply_ahead(acc, x, x_stride, w, n_pairs, 9, next); break;
    }
}

/* One of several tiles: they have 4 to 8 rows, a first one of two at least 5. */
DSPARK__NOINLINE void multiply_rows_fetch1(float *acc, const unsigned char *x, size_t x_stride,
                                           const uint16_t *w, size_t n_pairs, size_t n_rows,
                                           const char *fetch)
{
    switch (n_rows) {
    case 4: multiply(acc, x, x_stride, w, n_pairs, 4, fetch, 1); break;
    case 5: multiply(acc, x, x_stride, w, n_pairs, 5, fetch, 1); break;
    case 6: multiply(acc, x, x_stride, w, n_pairs, 6, fetch, 1); break;
    case 7: multiply(acc, x, x_stride, w, n_pairs, 7, fetch, 1); break;
    default: multiply(acc, x, x_stride, w, n_pairs, 8, fetch, 1); break;
    }
}

DSPARK__NOINLINE void multiply_rows_fetch2(float *acc, const unsigned char *x, size_t x_stride,
                                           const uint16_t *w, size_t n_pairs, size_t n_rows,
                                           const char *fetch)
{
    switch (n_rows) {
    case 5: multiply(acc, x, x_stride, w, n_pairs, 5, fetch, 2); break;
    case 6: multiply(acc, x, x_stride, w, n_pairs, 6, fetch, 2); break;
    case 7: multiply(acc, x, x_stride, w, n_pairs, 7, fetch, 2); break;
    default: multiply(acc, x, x_stride, w, n_pairs, 8, fetch, 2); break;
    }
}

/* The second one of two, of 5 or 6 rows, that asks for all lines of the next block. */
DSPARK__NOINLINE void multiply_rows_fetch3(float *acc, const unsigned char *x, size_t x_stride,
                                           const uint16_t *w, size_t n_pairs, size_t n_rows,
                                           const char *fetch)
{
    if (n_rows == 5) multiply(acc, x, x_stride, w, n_pairs, 5, fetch, 3);
    else multiply(acc, x, x_stride, w, n_pairs, 6, fetch, 3);
}

/* What the tiles of a block still have to fetch for the next one. */
typedef struct fetch_queue {
    const char *next;
    size_t n_bytes;
} fetch_queue;

/* One of several tiles on a block, fetching n_lines per pair as long as there is something to fetch; more than
 * that is no harm. */
static void run_tile(float *acc, const unsigned char *x, size_t x_stride, const uint16_t *w,
                     size_t n_pairs, size_t n_rows, size_t n_lines, fetch_queue *queue)
{
    const char *fetch = queue->next;
    const size_t bytes = n_pairs * n_lines * LINE;
    if (queue->n_bytes == 0) {
        multiply_rows(acc, x, x_stride, w, n_pairs, n_rows);
        return;
    }
    if (n_lines == 3) multiply_rows_fetch3(acc, x, x_stride, w, n_pairs, n_rows, fetch);
    else if (n_lines == 2) multiply_rows_fetch2(acc, x, x_stride, w, n_pairs, n_rows, fetch);
    else multiply_rows_fetch1(acc, x, x_stride, w, n_pairs, n_rows, fetch);
    queue->n_bytes -= queue->n_bytes < bytes ? queue->n_bytes : bytes;
    queue->next += bytes;
}

/* What comes after the block of n pairs at `pair` of panel p: of this panel, of the next one, or what
 * the caller has named. */
static fetch_queue next_block(const dspark__gemm_bf16 *g, size_t p, size_t pair, size_t block)
{
    const size_t pair_bytes = PAIR_WEIGHTS * sizeof(uint16_t), n_pairs = g->k / 2;
    const uint16_t *panel = g->panels + p * g->panel_stride;
    fetch_queue q = {g->prefetch, g->prefetch ? g->prefetch_bytes : 0};
    if (pair + block < n_pairs) {
        size_t left = n_pairs - pair - block;
        q.next = (const char *)(panel + (pair + block) * PAIR_WEIGHTS);
        q.n_bytes = (left < block ? left : block) * pair_bytes;
    } else if (p + 1 < g->n_panels) {
        q.next = (const char *)(panel + g->panel_stride);
        q.n_bytes = (n_pairs < block ? n_pairs : block) * pair_bytes;
    }
    return q;
}

/* Rows from `row` on of panel p, unless this is not the last block of k. */
static void expect_panel(const dspark__gemm_bf16 *g, size_t p, size_t row, size_t n_rows)
{
    if (g->last) expect_outputs(bf16_at(g->out, row * g->out_stride + p * DSPARK__PANEL), 2 * g->out_stride, n_rows);
}

/* The pairs of rows [row, row + n_rows) of panel p, without the odd end of k. */
static void run_pairs(const dspark__gemm_bf16 *g, float *acc, size_t p, size_t row, size_t n_rows)
{
    const size_t n_pairs = g->k / 2, x_stride = g->x_stride;
    const unsigned char *x = (const unsigned char *)g->x + row * x_stride;
    const uint16_t *w = g->panels + p * g->panel_stride;
    if (n_rows <= LONE_ROWS) expect_panel(g, p, row, n_rows);
    if (n_rows < AHEAD_ROWS || (n_rows <= ROWS && row > 0)) {
        multiply_rows(acc, x, x_stride, w, n_pairs, n_rows);
        return;
    }
    if (n_rows <= LONE_ROWS && row == 0) {
        multiply_rows_ahead(acc, x, x_stride, w, n_pairs, n_rows,
                            p + 1 < g->n_panels ? w + g->panel_stride : g->prefetch);
        return;
    }
    /* Equal blocks: a short one at the end is over before the next one has come. */
    const int again = n_rows <= SHORT_ROWS;
    const size_t most = again ? BLOCK_SHORT : n_rows <= GROUP ? BLOCK_TWO : n_rows <= SOME_ROWS ? BLOCK_SOME
                                                                                               : BLOCK_MANY;
    const size_t n_blocks = (n_pairs + most - 1) / most;
    const size_t block = n_blocks ? (n_pairs + n_blocks - 1) / n_blocks : 1;
    for (size_t pair = 0; pair < n_pairs; pair += block) {
        fetch_queue queue = next_block(g, p, pair, block);
        size_t n = n_pairs - pair < block ? n_pairs - pair : block;
        if (row > 0) queue.n_bytes = 0; /* rows before these have fetched it all */
        const fetch_queue whole = queue;
        for (size_t i = 0, tile; i < n_rows; i += tile) {
            tile = tile_rows(n_rows - i, ROWS); /* equal ones: 9 rows are 5 + 4, not 8 + 1 */
            const size_t n_lines = n_rows > GROUP ? 1 : i == 0 ? 2 : again ? 3 : 1;
            if (n_rows <= GROUP && pair + n == n_pairs) expect_panel(g, p, row + i, tile);
            if (n_lines == 3) queue = whole;
            run_tile(acc + i * DSPARK__PANEL, x + i * x_stride + pair * PAIR_BYTES, x_stride,
                     w + pair * PAIR_WEIGHTS, n, tile, n_lines, &queue);
        }
    }
}

/* The last element of an odd k with a zero beside it, so that x is not over-read. */
static void run_odd_end(const dspark__gemm_bf16 *g, float *acc, size_t p, size_t row, size_t n_rows)
{
    const unsigned char *x = (const unsigned char *)g->x + row * g->x_stride;
    const uint16_t *w = g->panels + p * g->panel_stride + (g->k - 1) * DSPARK__PANEL;
    for (size_t i = 0, tile; i < n_rows; i += tile) {
        unsigned char tail[ROWS * PAIR_BYTES] = {0};
        tile = tile_rows(n_rows - i, ROWS);
        for (size_t j = 0; j < tile; j++)
            memcpy(tail + j * PAIR_BYTES, bf16_at(x + (i + j) * g->x_stride, g->k - 1), 2);
        multiply_rows(acc + i * DSPARK__PANEL, tail, PAIR_BYTES, w, 1, tile);
    }
}

void dspark__gemm_bf16__avx512bf16(const dspark__gemm_bf16 *g)
{
    _Alignas(64) float local[GROUP * DSPARK__PANEL];
    /* Sums that stay here bound the rows that go together. */
    const size_t most = g->acc || g->n_rows < GROUP ? g->n_rows : GROUP;
    if (g->narrow || (g->first && g->last && g->n_rows <= LONE_ROWS && g->k <= SHORT_K)) {
        dspark__gemm_short__avx512bf16(g);
        return;
    }
    for (size_t row = 0, n; row < g->n_rows; row += n) {
        n = g->n_rows - row < most ? g->n_rows - row : most;
        for (size_t p = 0; p < g->n_panels; p++) {
            float *acc = g->acc ? g->acc + (p * g->n_rows + row) * DSPARK__PANEL : local;
            size_t n_out = panel_outputs(g, p);
            if (g->first) memset(acc, 0, n * DSPARK__PANEL * sizeof *acc);
            run_pairs(g, acc, p, row, n);
            if (g->k % 2) run_odd_end(g, acc, p, row, n);
            for (size_t i = 0; g->last && i < n; i++) {
                size_t at = (row + i) * g->out_stride + p * DSPARK__PANEL;
                store_outputs(bf16_at_mut(g->out, at), acc + i * DSPARK__PANEL, n_out);
            }
        }
    }
}

/* ---- K-groups: a tile takes one group after the other, and its sums stay in L1 ---------------- */

typedef struct groups_job {
    const unsigned char *x;
    size_t x_stride, k, group;
    const uint16_t *w;
    const float *scales;
    float *sum;
    int first;
} groups_job;

DSPARK__INLINE void multiply_groups(const groups_job *job, size_t n_rows)
{
    const unsigned char *x = job->x;
    const uint16_t *w = job->w;
    const float *scales = job->scales;
    const size_t x_stride = job->x_stride;
    int first = job->first;
    for (size_t left = job->k, n; left > 0; left -= n, scales += DSPARK__PANEL, first = 0) {
        __m512 sum[ROWS][VECTORS];
        n = left < job->group ? left : job->group;
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++)
            DSPARK__UNROLL
            for (size_t v = 0; v < VECTORS; v++) sum[i][v] = _mm512_setzero_ps();
        for (size_t pair = 0; pair < n / 2; pair++, w += 2 * DSPARK__PANEL, x += PAIR_BYTES) {
            __m512bh part[VECTORS];
            DSPARK__UNROLL
            for (size_t v = 0; v < VECTORS; v++)
                part[v] = (__m512bh)_mm512_load_si512(w + 32 * v);
            DSPARK__UNROLL
            for (size_t i = 0; i < n_rows; i++) {
                __m512bh two = broadcast_pair(x + i * x_stride);
                DSPARK__UNROLL
                for (size_t v = 0; v < VECTORS; v++)
                    sum[i][v] = _mm512_dpbf16_ps(sum[i][v], part[v], two);
            }
        }
        if (n % 2) { /* the end of k: the last element with a zero beside it */
            DSPARK__UNROLL
            for (size_t i = 0; i < n_rows; i++) {
                __m512bh two = (__m512bh)_mm512_set1_epi32(dspark__load_u16(x + i * x_stride));
                DSPARK__UNROLL
                for (size_t v = 0; v < VECTORS; v++)
                    sum[i][v] = _mm512_dpbf16_ps(sum[i][v],
                                                 (__m512bh)_mm512_load_si512(w + 32 * v), two);
            }
        }
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++) {
            __m512 scale = _mm512_loadu_ps(scales + 16 * v);
            DSPARK__UNROLL
            for (size_t i = 0; i < n_rows; i++) {
                float *at = job->sum + i * DSPARK__PANEL + 16 * v;
                _mm512_store_ps(at, first ? _mm512_mul_ps(sum[i][v], scale)
                                          : _mm512_fmadd_ps(sum[i][v], scale, _mm512_load_ps(at)));
            }
        }
    }
}

/* The scaled sums are IEEE: MXCSR is left alone, and the dot instruction ignores it. */
DSPARK__NOINLINE void multiply_groups_rows(const groups_job *job, size_t n_rows)
{
    switch (n_rows) {
    case 1: multiply_groups(job, 1); break;
    case 2: multiply_groups(job, 2); break;
    case 3: multiply_groups(job, 3); break;
    case 4: multiply_groups(job, 4); break;
    case 5: multiply_groups(job, 5); break;
    case 6: multiply_groups(job, 6); break;
    case 7: multiply_groups(job, 7); break;
    default: multiply_groups(job, 8); break;
    }
}

void dspark__gemm_groups__avx512bf16(const dspark__gemm_bf16 *g, size_t group, const float *scales,
                                     float *sum)
{
    groups_job job = {.x_stride = g->x_stride, .k = g->k, .group = group, .w = g->panels,
                      .scales = scales, .first = g->first};
    for (size_t row = 0, n; row < g->n_rows; row += n) {
        n = tile_rows(g->n_rows - row, ROWS);
        job.x = (const unsigned char *)g->x + row * g->x_stride;
        job.sum = sum + row * DSPARK__PANEL;
        multiply_groups_rows(&job, n);
    }
}

static double probe_flops(uint64_t iterations)
{
    enum { CHAINS = 24 };
    __m512 sum[CHAINS];
    volatile float source = dspark__f32_from_bits(0x3f803f80u); /* a pair of ones */
    __m512bh one = (__m512bh)_mm512_set1_ps(source);
    DSPARK__UNROLL
    for (int j = 0; j < CHAINS; j++) sum[j] = _mm512_set1_ps((float)j); /* all different */
    for (uint64_t i = 0; i < iterations; i++)
        DSPARK__UNROLL
        for (int j = 0; j < CHAINS; j++) sum[j] = _mm512_dpbf16_ps(sum[j], one, one);
    DSPARK__UNROLL
    for (int j = 1; j < CHAINS; j++) sum[0] = _mm512_add_ps(sum[0], sum[j]);
    source = _mm512_cvtss_f32(sum[0]);
    return 64.0 * CHAINS * (double)iterations;
}

void dspark__kern_avx512bf16(dspark__kern *k)
{
    k->isa = DSPARK_ISA_AVX512BF16;
    k->gemm_bf16 = dspark__gemm_bf16__avx512bf16;
    k->gemm_groups = dspark__gemm_groups__avx512bf16;
    k->attend_begin = dspark__attend_begin__avx512bf16;
    k->attend_piece = dspark__attend_piece__avx512bf16;
    k->attend_end = dspark__attend_end__avx512bf16;
    k->probe_flops = probe_flops;
}

#endif
