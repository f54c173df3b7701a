/* AVX-512 without bf16 instructions: the matrix product by fp32 fused multiply-adds. With FTZ and
 * DAZ set around the loop, two of them per pair give the bits of ref/gemm_bf16.c.
 *
 * Work goes by pieces: STEP pairs of k of one panel (12 KB, which stay in L1) times a block of rows,
 * tile by tile. x of a block is widened to fp32 once per STEP, so that a broadcast is a plain load. */
#if defined(__x86_64__)
#include "kern/avx512/bits.h"

#include "kern/fma_blocks.h"

/* A tile is up to 8 rows x 48 outputs: 24 sums, 3 weights, the mask and broadcasts fit 32 registers.
 *
 * Prefetch, as measured on Zen 4: up to FEW rows are about as fast as memory. For 1 and 2 of them the
 * hardware's prefetcher alone does best; for 3 and 4 each piece is fetched into L2 two pieces early and
 * into L1 one piece early, panel after panel. With more rows lines come into L2 one piece early, shared
 * out over up to three tiles. */
enum { TILE_ROWS = 8, VECTORS = 3 };

static void widen_row(float *to, const unsigned char *x, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __m256i h = _mm256_maskz_loadu_epi16(first_lanes(n - i), bf16_at(x, i));
        _mm512_store_ps(to + i, widen_bf16(h));
    }
}

/* n_rows, and the lines that are fetched per pair, are constants in each copy. */
DSPARK__INLINE void multiply(float *acc, const piece *s, size_t n_rows, size_t n_far, size_t n_near)
{
    const __m512i high = _mm512_set1_epi32(-65536);
    const uint16_t *w = s->w;
    const float *x = s->x;
    const char *far = s->far, *near = s->near;
    __m512 sum[TILE_ROWS][VECTORS];
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++)
            sum[i][v] = _mm512_load_ps(acc + i * DSPARK__PANEL + 16 * v);
    for (size_t pair = 0; pair < s->n_pairs; pair++, w += s->pair, x += 2) {
        DSPARK__UNROLL
        for (size_t line = 0; line < n_far; line++, far += LINE) _mm_prefetch(far, _MM_HINT_T1);
        DSPARK__UNROLL
        for (size_t line = 0; line < n_near; line++, near += LINE) _mm_prefetch(near, _MM_HINT_T0);
        DSPARK__UNROLL
        for (int odd = 1; odd >= 0; odd--) {
            __m512 part[VECTORS];
            DSPARK__UNROLL
            for (size_t v = 0; v < VECTORS; v++) {
                __m512i raw = _mm512_load_si512(w + 32 * v);
                raw = odd ? _mm512_and_si512(raw, high) : _mm512_slli_epi32(raw, 16);
                part[v] = _mm512_castsi512_ps(raw);
            }
            DSPARK__UNROLL
            for (size_t i = 0; i < n_rows; i++)
                DSPARK__UNROLL
                for (size_t v = 0; v < VECTORS; v++)
                    sum[i][v] = _mm512_fmadd_ps(part[v], _mm512_set1_ps(x[i * 2 * STEP + odd]),
                                                sum[i][v]);
        }
    }
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++)
            _mm512_store_ps(acc + i * DSPARK__PANEL + 16 * v, sum[i][v]);
}

/* These are called, not inlined: no multiply-add may move to where MXCSR is the host's. */
DSPARK__NOINLINE void multiply_tile(float *acc, const piece *s, size_t n_rows)
{
    switch (n_rows) {
    case 1: multiply(acc, s, 1, 0, 0); break;
    case 2: multiply(acc, s, 2, 0, 0); break;
    case 3: multiply(acc, s, 3, 0, 0); break;
    case 4: multiply(acc, s, 4, 0, 0); break;
    case 5: multiply(acc, s, 5, 0, 0); break;
    case 6: multiply(acc, s, 6, 0, 0); break;
    case 7: multiply(acc, s, 7, 0, 0); break;
    default: multiply(acc, s, 8, 0, 0); break;
    }
}

/* All rows in one tile, and the whole of a piece fetched. */
DSPARK__NOINLINE void multiply_alone(float *acc, const piece *s, size_t n_rows)
{
    switch (n_rows) {
    case 1: multiply(acc, s, 1, 0, 0); break;
    case 2: multiply(acc, s, 2, 0, 0); break;
    case 3: multiply(acc, s, 3, 3, 3); break;
    case 4: multiply(acc, s, 4, 3, 3); break;
    case 5: multiply(acc, s, 5, 3, 0); break;
    case 6: multiply(acc, s, 6, 3, 0); break;
    case 7: multiply(acc, s, 7, 3, 0); break;
    default: multiply(acc, s, 8, 3, 0); break;
    }
}

/* One of several tiles, which have 5 to 8 rows, and one or two thirds of a piece fetched. */
DSPARK__NOINLINE void multiply_fetching(float *acc, const piece *s, size_t n_rows, size_t n_far)
{
    switch (n_rows + (n_far > 1 ? TILE_ROWS : 0)) {
    case 5: multiply(acc, s, 5, 1, 0); break;
    case 6: multiply(acc, s, 6, 1, 0); break;
    case 7: multiply(acc, s, 7, 1, 0); break;
    case 8: multiply(acc, s, 8, 1, 0); break;
    case TILE_ROWS + 5: multiply(acc, s, 5, 2, 0); break;
    case TILE_ROWS + 6: multiply(acc, s, 6, 2, 0); break;
    case TILE_ROWS + 7: multiply(acc, s, 7, 2, 0); break;
    case TILE_ROWS + 8: multiply(acc, s, 8, 2, 0); break;
    default: multiply_tile(acc, s, n_rows); break;
    }
}

static int run_piece(float *acc, const piece *from, size_t n_rows, int fetch)
{
    piece s = *from;
    size_t to_fetch = fetch ? VECTORS : 0; /* thirds of a piece */
    if (fetch && n_rows <= TILE_ROWS) {
        fetch_x(from, 0, n_rows);
        multiply_alone(acc, &s, n_rows);
        return 0;
    }
    for (size_t row = 0, n; row < n_rows; row += n) {
        n = tile_rows(n_rows - row, TILE_ROWS);
        fetch_x(from, row, n);
        size_t n_far = n_rows <= 2 * TILE_ROWS && to_fetch == VECTORS ? 2 : to_fetch > 0;
        if (n_far > 0) multiply_fetching(acc, &s, n, n_far);
        else multiply_tile(acc, &s, n);
        to_fetch -= n_far;
        s.far += n_far * s.n_pairs * LINE;
        acc += n * DSPARK__PANEL;
        s.x += n * 2 * STEP;
    }
    return 0;
}

void dspark__gemm_bf16__avx512(const dspark__gemm_bf16 *g)
{
    run_blocks(g);
}

void dspark__gemm_groups__avx512(const dspark__gemm_bf16 *g, size_t group, const float *scales,
                                   float *sum)
{
    gemm_then_scale(g, group, scales, sum, dspark__gemm_bf16__avx512, dspark__scale_add__avx512);
}

#endif
