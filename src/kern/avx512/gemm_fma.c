/* AVX-512 without bf16 instructions: the matrix product by fp32 fused multiply-adds. With FTZ and
 * DAZ set around the loop, two of them per pair give the bits of ref/gemm_bf16.c. */
#if defined(__x86_64__)
#include "kern/avx512/bits.h"

#include "base/fpenv.h"

/* A tile is up to 8 rows x 48 outputs (24 accumulators). x of one tile and STEP pairs of k is
 * widened to fp32 once per panel, which leaves only the weights to take apart in the inner loop. */
enum { ROWS = 8, STEP = 64, VECTORS = 3 };

typedef struct tile_scratch {
    _Alignas(64) float sum[ROWS][DSPARK__PANEL];
    _Alignas(64) float x[ROWS][2 * STEP];
} tile_scratch;

/* n elements of a bf16 row as fp32; an odd n gets a zero behind it. */
static void widen_row(float *to, const unsigned char *x, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __m256i h = _mm256_maskz_loadu_epi16(first_lanes(n - i), bf16_at(x, i));
        _mm512_store_ps(to + i, widen_bf16(h));
    }
}

/* n_rows is a constant in each copy. */
DSPARK__INLINE void multiply(tile_scratch *t, const uint16_t *w, size_t n_pairs, size_t n_rows)
{
    const __m512i high = _mm512_set1_epi32(-65536);
    __m512 sum[ROWS][VECTORS];
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++) sum[i][v] = _mm512_load_ps(t->sum[i] + 16 * v);
    for (size_t pair = 0; pair < n_pairs; pair++, w += 2 * DSPARK__PANEL) {
        __m512i raw[VECTORS];
        __m512 part[VECTORS];
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++) {
            raw[v] = _mm512_load_si512(w + 32 * v);
            part[v] = _mm512_castsi512_ps(_mm512_and_si512(raw[v], high));
        }
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++)
            DSPARK__UNROLL
            for (size_t v = 0; v < VECTORS; v++)
                sum[i][v] = _mm512_fmadd_ps(part[v], _mm512_set1_ps(t->x[i][2 * pair + 1]),
                                            sum[i][v]);
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++)
            part[v] = _mm512_castsi512_ps(_mm512_slli_epi32(raw[v], 16));
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++)
            DSPARK__UNROLL
            for (size_t v = 0; v < VECTORS; v++)
                sum[i][v] = _mm512_fmadd_ps(part[v], _mm512_set1_ps(t->x[i][2 * pair]), sum[i][v]);
    }
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++) _mm512_store_ps(t->sum[i] + 16 * v, sum[i][v]);
}

/* Called, not inlined: no multiply-add may move to where MXCSR is the host's. */
DSPARK__NOINLINE void multiply_rows(tile_scratch *t, const uint16_t *w, size_t n_pairs,
                                    size_t n_rows)
{
    switch (n_rows) {
    case 1: multiply(t, w, n_pairs, 1); break;
    case 2: multiply(t, w, n_pairs, 2); break;
    case 3: multiply(t, w, n_pairs, 3); break;
    case 4: multiply(t, w, n_pairs, 4); break;
    case 5: multiply(t, w, n_pairs, 5); break;
    case 6: multiply(t, w, n_pairs, 6); break;
    case 7: multiply(t, w, n_pairs, 7); break;
    default: multiply(t, w, n_pairs, 8); break;
    }
}

static void run_tile(const dspark__gemm_bf16 *g, size_t p, size_t row, size_t n_rows)
{
    tile_scratch t;
    const unsigned char *x = (const unsigned char *)g->x + row * g->x_stride;
    const uint16_t *w = g->panels + p * g->panel_stride;
    float *acc = g->acc ? g->acc + (p * g->n_rows + row) * DSPARK__PANEL : NULL;
    size_t sum_bytes = n_rows * sizeof t.sum[0];
    if (g->first) memset(t.sum, 0, sum_bytes);
    else memcpy(t.sum, acc, sum_bytes);
    for (size_t k = 0; k < g->k; k += 2 * STEP) {
        size_t n = g->k - k < 2 * STEP ? g->k - k : 2 * STEP;
        for (size_t i = 0; i < n_rows; i++) widen_row(t.x[i], bf16_at(x + i * g->x_stride, k), n);
        multiply_rows(&t, w + k * DSPARK__PANEL, (n + 1) / 2, n_rows);
    }
    if (!g->last) {
        memcpy(acc, t.sum, sum_bytes);
        return;
    }
    size_t n_out = panel_outputs(g, p);
    for (size_t i = 0; i < n_rows; i++) {
        size_t at = (row + i) * g->out_stride + p * DSPARK__PANEL;
        store_outputs(bf16_at_mut(g->out, at), t.sum[i], n_out);
    }
}

void dspark__gemm_bf16__avx512(const dspark__gemm_bf16 *g)
{
    unsigned host = _mm_getcsr();
    _mm_setcsr(host | DSPARK__MXCSR_FTZ_DAZ);
    for (size_t row = 0, n; row < g->n_rows; row += n) {
        n = tile_rows(g->n_rows - row, ROWS);
        for (size_t p = 0; p < g->n_panels; p++) run_tile(g, p, row, n);
    }
    _mm_setcsr(host);
}

void dspark__gemm_groups__avx512(const dspark__gemm_bf16 *g, size_t group, const float *scales,
                                   float *sum)
{
    gemm_then_scale(g, group, scales, sum, dspark__gemm_bf16__avx512, dspark__scale_add__avx512);
}

#endif
