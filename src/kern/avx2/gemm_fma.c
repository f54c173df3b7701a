/* AVX2: the matrix product by fp32 fused multiply-adds. With FTZ and DAZ set around the loop, two
 * of them per pair give the bits of ref/gemm_bf16.c. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"

#include "base/fpenv.h"

/* A tile is up to 5 rows x 16 outputs: 10 accumulators, 2 weight vectors, the mask and a broadcast
 * of x leave gcc two of 16 registers, and 16 outputs are one cache line of weights per pair (4 x 24
 * spills and ran at 0.35 of the peak). x of one tile and STEP pairs of k is widened to fp32 once
 * per panel: a broadcast is then a plain load, and only weights are taken apart in the loop. */
enum { ROWS = 5, STEP = 64 };

typedef struct tile_scratch {
    _Alignas(64) float sum[ROWS][DSPARK__PANEL];
    _Alignas(64) float x[ROWS][2 * STEP];
} tile_scratch;

/* n elements of a bf16 row as fp32; an odd n gets a zero behind it. */
static void widen_row(float *to, const unsigned char *x, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_store_ps(to + i, widen_bf16(load_8(x, i)));
    if (i == n) return;
    uint16_t tail[8] = {0};
    memcpy(tail, bf16_at(x, i), 2 * (n - i));
    _mm256_store_ps(to + i, widen_bf16(load_8(tail, 0)));
}

/* Outputs [first, first + 8 * n_vectors) of the panel. All counts are constants in each copy. */
DSPARK__INLINE void multiply(tile_scratch *t, const uint16_t *w, size_t n_pairs, size_t n_rows,
                             size_t first, size_t n_vectors)
{
    const __m256i high = _mm256_set1_epi32(-65536);
    __m256 sum[ROWS][6];
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++)
            sum[i][v] = _mm256_load_ps(t->sum[i] + first + 8 * v);
    w += 2 * first;
    for (size_t pair = 0; pair < n_pairs; pair++, w += 2 * DSPARK__PANEL) {
        if (first == 0) /* the next step: passes that skip through a panel defeat the hardware */
            for (size_t line = 0; line < 3; line++)
                _mm_prefetch((const char *)(w + STEP * 2 * DSPARK__PANEL + 32 * line), _MM_HINT_T1);
        DSPARK__UNROLL
        for (size_t odd = 2; odd-- > 0;) {
            __m256 part[6];
            DSPARK__UNROLL
            for (size_t v = 0; v < n_vectors; v++) {
                __m256i raw = _mm256_load_si256((const void *)(w + 16 * v));
                raw = odd ? _mm256_and_si256(raw, high) : _mm256_slli_epi32(raw, 16);
                part[v] = _mm256_castsi256_ps(raw);
            }
            DSPARK__UNROLL
            for (size_t i = 0; i < n_rows; i++) {
                __m256 x = _mm256_broadcast_ss(&t->x[i][2 * pair + odd]);
                DSPARK__UNROLL
                for (size_t v = 0; v < n_vectors; v++)
                    sum[i][v] = _mm256_fmadd_ps(part[v], x, sum[i][v]);
            }
        }
    }
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++)
            _mm256_store_ps(t->sum[i] + first + 8 * v, sum[i][v]);
}

/* Called, not inlined: no multiply-add may move to where MXCSR is the host's. */
DSPARK__NOINLINE void multiply_rows(tile_scratch *t, const uint16_t *w, size_t n_pairs,
                                    size_t n_rows)
{
    if (n_rows == 1) {
        multiply(t, w, n_pairs, 1, 0, 6);
        return;
    }
    for (size_t first = 0; first < DSPARK__PANEL; first += 16) {
        switch (n_rows) {
        case 2: multiply(t, w, n_pairs, 2, first, 2); break;
        case 3: multiply(t, w, n_pairs, 3, first, 2); break;
        case 4: multiply(t, w, n_pairs, 4, first, 2); break;
        default: multiply(t, w, n_pairs, 5, first, 2); break;
        }
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

void dspark__gemm_bf16__avx2(const dspark__gemm_bf16 *g)
{
    unsigned host = _mm_getcsr();
    _mm_setcsr(host | DSPARK__MXCSR_FTZ_DAZ);
    for (size_t row = 0, n; row < g->n_rows; row += n) {
        n = tile_rows(g->n_rows - row, ROWS);
        for (size_t p = 0; p < g->n_panels; p++) run_tile(g, p, row, n);
    }
    _mm_setcsr(host);
}

void dspark__gemm_groups__avx2(const dspark__gemm_bf16 *g, size_t group, const float *scales,
                                 float *sum)
{
    gemm_then_scale(g, group, scales, sum, dspark__gemm_bf16__avx2, dspark__scale_add__avx2);
}

#endif
