/* AVX-512-BF16: the products of a short k and of narrow panels, all of k at once. Their sums begin and end
 * in registers: what a tile costs beside its multiply-adds counts when these are few. Which products come
 * here, gemm_bf16dot.c decides; what they are, ref/gemm_bf16.c says. */
#if defined(__x86_64__)
#include "kern/avx512/bf16dot.h"

/* A tile is up to 9 rows x 48 outputs. As in gemm_bf16dot.c, one of 7 or more asks for each line CHANCES
 * times, GAP pairs apart: here 4 times 21 are 4 to 7% faster than 3 times 42, and one chance, none, or twice the
 * distance lose 10 to 40%. Panels are small and follow each other, so that is what comes next in memory. */
enum { ROWS = MOST_ROWS, OUTPUTS = 16, PAIR_BYTES = 4, AHEAD_ROWS = 7, CHANCES = 4, GAP = 21 };

typedef struct tile {
    const unsigned char *x;
    size_t x_stride, k;
    const uint16_t *w;
    size_t n_known;  /* bytes from w on that are weights, here or in what is computed next */
    unsigned char *out;
    size_t out_stride; /* bytes */
    size_t n_out;
} tile;

/* Sums of the dot instruction are never subnormal: vcvtneps2bf16 rounds them as it must be, but for NaN. */
DSPARK__INLINE void store_sum(unsigned char *out, __m512 sum, size_t n)
{
    const __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
    __m256i y = (__m256i)_mm512_cvtneps_pbh(sum);
    y = _mm256_mask_mov_epi16(y, nan, _mm256_set1_epi16(DSPARK__BF16_NAN));
    if (n >= OUTPUTS) _mm256_storeu_si256((void *)out, y);
    else _mm256_mask_storeu_epi16(out, first_lanes(n), y);
}

/* One tile. Counts of rows and vectors are constants in each copy, here and below. */
DSPARK__INLINE void multiply(const tile *t, size_t n_rows, size_t n_vectors)
{
    const unsigned char *x = t->x;
    const uint16_t *w = t->w;
    const size_t x_stride = t->x_stride, pair_weights = 32 * n_vectors, n_pairs = t->k / 2;
    const size_t known = t->n_known / (2 * pair_weights), reach = CHANCES * GAP;
    size_t n_ahead = known < reach ? 0 : known - reach, left = n_pairs;
    tile_sums sum;
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++) sum[i][v] = _mm512_setzero_ps();
    expect_outputs(t->out, t->out_stride, n_rows);
    if (n_rows < AHEAD_ROWS) n_ahead = 0;
    if (n_ahead > n_pairs) n_ahead = n_pairs;
    for (left -= n_ahead; n_ahead > 0; n_ahead--, w += pair_weights, x += PAIR_BYTES) {
        DSPARK__UNROLL
        for (size_t c = CHANCES; c > 0; c--)
            DSPARK__UNROLL
            for (size_t v = 0; v < n_vectors; v++)
                _mm_prefetch((const char *)(w + c * GAP * pair_weights + 32 * v), _MM_HINT_T1);
        add_pair(sum, x, x_stride, w, n_rows, n_vectors);
    }
    for (; left > 0; left--, w += pair_weights, x += PAIR_BYTES)
        add_pair(sum, x, x_stride, w, n_rows, n_vectors);
    if (t->k % 2) { /* the last element with a zero beside it, so that x is not over-read */
        unsigned char tail[ROWS * PAIR_BYTES] = {0};
        for (size_t i = 0; i < n_rows; i++) memcpy(tail + i * PAIR_BYTES, x + i * x_stride, 2);
        add_pair(sum, tail, PAIR_BYTES, w, n_rows, n_vectors);
    }
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++)
            if (OUTPUTS * v < t->n_out)
                store_sum(t->out + i * t->out_stride + 2 * OUTPUTS * v, sum[i][v], t->n_out - OUTPUTS * v);
}

DSPARK__INLINE void multiply_rows(const tile *t, size_t n_rows, size_t n_vectors)
{
    switch (n_rows) {
    case 1: multiply(t, 1, n_vectors); break;
    case 2: multiply(t, 2, n_vectors); break;
    case 3: multiply(t, 3, n_vectors); break;
    case 4: multiply(t, 4, n_vectors); break;
    case 5: multiply(t, 5, n_vectors); break;
    case 6: multiply(t, 6, n_vectors); break;
    case 7: multiply(t, 7, n_vectors); break;
    case 8: multiply(t, 8, n_vectors); break;
    default: multiply(t, 9, n_vectors); break;
    }
}

DSPARK__NOINLINE void multiply_16(const tile *t, size_t n_rows)
{
    multiply_rows(t, n_rows, 1);
}

DSPARK__NOINLINE void multiply_32(const tile *t, size_t n_rows)
{
    multiply_rows(t, n_rows, 2);
}

DSPARK__NOINLINE void multiply_48(const tile *t, size_t n_rows)
{
    multiply_rows(t, n_rows, 3);
}

/* Bytes of weights from panel p on, with what the caller goes on with if it follows in memory. */
static size_t count_known(const dspark__gemm_bf16 *g, size_t p)
{
    const size_t output = (g->k + 1) / 2 * 2 * sizeof *g->panels;
    const uint16_t *last = g->panels + (g->n_panels - 1) * g->panel_stride;
    const unsigned char *end = (const unsigned char *)last + output * panel_width(g, g->n_panels - 1);
    const size_t n = (size_t)(end - (const unsigned char *)(g->panels + p * g->panel_stride));
    return n + (g->prefetch == end ? g->prefetch_bytes : 0);
}

void dspark__gemm_short__avx512bf16(const dspark__gemm_bf16 *g)
{
    size_t p = 0;
    if (g->n_rows > ROWS && g->n_panels > 1) { /* tiles take turns there */
        dspark__gemm_bf16 wide = *g;
        wide.n_panels = p = g->n_panels - 1;
        wide.narrow = 0;
        if (wide.n_out > p * DSPARK__PANEL) wide.n_out = p * DSPARK__PANEL;
        dspark__gemm_bf16__avx512bf16(&wide);
    }
    for (; p < g->n_panels; p++) {
        const size_t width = panel_width(g, p);
        for (size_t row = 0, n; row < g->n_rows; row += n) {
            n = tile_rows(g->n_rows - row, ROWS);
            const tile t = {(const unsigned char *)g->x + row * g->x_stride, g->x_stride, g->k,
                            g->panels + p * g->panel_stride, row == 0 ? count_known(g, p) : 0,
                            bf16_at_mut(g->out, row * g->out_stride + p * DSPARK__PANEL), 2 * g->out_stride,
                            panel_outputs(g, p)};
            if (width == 16) multiply_16(&t, n);
            else if (width == 32) multiply_32(&t, n);
            else multiply_48(&t, n);
        }
    }
}

#endif
