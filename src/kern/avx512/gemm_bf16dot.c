/* AVX-512-BF16: the matrix product by vdpbf16ps, whose two multiply-adds per lane are the
 * definition in ref/gemm_bf16.c (it flushes subnormals whatever MXCSR says). */
#if defined(__x86_64__)
#include "kern/avx512/bits.h"

/* A tile is up to 8 rows x 48 outputs: 24 accumulators, 3 weights and a broadcast fit 32 registers
 * and run at the register-only peak from L2. Two tiles take turns on STEP pairs of a panel (96 KB),
 * so that up to 16 rows fetch their weights from memory once.
 *
 * Prefetch, as measured on Zen 4 (bench/kern_bench.c): a tile of up to 6 rows outruns memory, and
 * the hardware prefetcher alone does best; software prefetches then fill the few miss buffers of L1
 * and are dropped. A tile of 7 or 8 rows is about as fast as memory. Its renamed registers are used
 * up within 5 pairs, too soon to hide a miss, and fetching all lines into L2 AHEAD bytes early
 * gives it 20%. Into L1, or less far ahead, it loses. */
enum {
    ROWS = 8,
    VECTORS = 3,
    GROUP = 2 * ROWS,
    PAIR_BYTES = 4,
    STEP = 512,
    AHEAD = 8192,
    AHEAD_ROWS = 7, /* the fewest rows of a tile that fetches ahead */
    LINE = 64
};

/* One pair of x in every lane; the compiler folds it into the load. */
DSPARK__INLINE __m512bh broadcast_pair(const unsigned char *x)
{
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

/* One tile; n_rows and n_lines (cache lines to prefetch per pair) are constants in each copy. */
DSPARK__INLINE void multiply(float *acc, const unsigned char *x, size_t x_stride,
                             const uint16_t *w, size_t n_pairs, size_t n_rows,
                             const char *fetch, size_t n_lines)
{
    __m512 sum[ROWS][VECTORS];
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++)
            sum[i][v] = _mm512_load_ps(acc + i * DSPARK__PANEL + 16 * v);
    for (size_t pair = 0; pair < n_pairs; pair++, w += 2 * DSPARK__PANEL, x += PAIR_BYTES) {
        DSPARK__UNROLL
        for (size_t line = 0; line < n_lines; line++, fetch += LINE)
            _mm_prefetch(fetch, _MM_HINT_T1);
        __m512bh part[VECTORS];
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++) part[v] = (__m512bh)_mm512_load_si512(w + 32 * v);
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++) {
            __m512bh two = broadcast_pair(x + i * x_stride);
            DSPARK__UNROLL
            for (size_t v = 0; v < VECTORS; v++)
                sum[i][v] = _mm512_dpbf16_ps(sum[i][v], part[v], two);
        }
    }
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++)
            _mm512_store_ps(acc + i * DSPARK__PANEL + 16 * v, sum[i][v]);
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

/* 7 or 8 rows whose weights are still in memory. */
DSPARK__NOINLINE void multiply_rows_cold(float *acc, const unsigned char *x, size_t x_stride,
                                         const uint16_t *w, size_t n_pairs, size_t n_rows)
{
    const char *ahead = (const char *)w + AHEAD;
    if (n_rows == 7) multiply(acc, x, x_stride, w, n_pairs, 7, ahead, VECTORS);
    else multiply(acc, x, x_stride, w, n_pairs, 8, ahead, VECTORS);
}

/* 7 or 8 rows whose weights are in L2, while one line per pair (9 GB/s) comes for the next call. */
DSPARK__NOINLINE void multiply_rows_fetching(float *acc, const unsigned char *x, size_t x_stride,
                                             const uint16_t *w, size_t n_pairs, size_t n_rows,
                                             const char *fetch)
{
    if (n_rows == 7) multiply(acc, x, x_stride, w, n_pairs, 7, fetch, 1);
    else multiply(acc, x, x_stride, w, n_pairs, 8, fetch, 1);
}

/* What is left of g->prefetch. */
typedef struct fetch_queue {
    const char *next;
    size_t n_bytes;
} fetch_queue;

/* n_pairs of one tile. cold: no tile before it has read these weights. */
static void run_tile(float *acc, const unsigned char *x, size_t x_stride, const uint16_t *w,
                     size_t n_pairs, size_t n_rows, int cold, fetch_queue *queue)
{
    if (n_rows < AHEAD_ROWS || (!cold && queue->n_bytes < n_pairs * LINE)) {
        multiply_rows(acc, x, x_stride, w, n_pairs, n_rows);
    } else if (cold) {
        multiply_rows_cold(acc, x, x_stride, w, n_pairs, n_rows);
    } else {
        multiply_rows_fetching(acc, x, x_stride, w, n_pairs, n_rows, queue->next);
        queue->next += n_pairs * LINE;
        queue->n_bytes -= n_pairs * LINE;
    }
}

/* Rows [row, row + n_first + n_second) of one panel. */
static void run_group(const dspark__gemm_bf16 *g, size_t p, size_t row, size_t n_first,
                      size_t n_second, fetch_queue *queue)
{
    _Alignas(64) float local[GROUP * DSPARK__PANEL];
    const size_t n_rows = n_first + n_second, n_pairs = g->k / 2, x_stride = g->x_stride;
    const unsigned char *x = (const unsigned char *)g->x + row * x_stride;
    const uint16_t *w = g->panels + p * g->panel_stride;
    float *acc = g->acc ? g->acc + (p * g->n_rows + row) * DSPARK__PANEL : local;
    if (g->first) memset(acc, 0, n_rows * DSPARK__PANEL * sizeof *acc);
    for (size_t pair = 0; pair < n_pairs; pair += STEP) {
        size_t n = n_pairs - pair < STEP ? n_pairs - pair : STEP;
        const uint16_t *part = w + pair * 2 * DSPARK__PANEL;
        const unsigned char *at = x + pair * PAIR_BYTES;
        run_tile(acc, at, x_stride, part, n, n_first, row == 0, queue);
        if (n_second > 0)
            run_tile(acc + n_first * DSPARK__PANEL, at + n_first * x_stride, x_stride, part, n,
                     n_second, 0, queue);
    }
    if (g->k % 2) { /* the last element with a zero beside it, so that x is not over-read */
        const uint16_t *part = w + (g->k - 1) * DSPARK__PANEL;
        unsigned char tail[GROUP * PAIR_BYTES] = {0};
        for (size_t i = 0; i < n_rows; i++)
            memcpy(tail + i * PAIR_BYTES, bf16_at(x + i * x_stride, g->k - 1), 2);
        multiply_rows(acc, tail, PAIR_BYTES, part, 1, n_first);
        if (n_second > 0)
            multiply_rows(acc + n_first * DSPARK__PANEL, tail + n_first * PAIR_BYTES, PAIR_BYTES,
                          part, 1, n_second);
    }
    if (!g->last) return;
    size_t n_out = panel_outputs(g, p);
    for (size_t i = 0; i < n_rows; i++) {
        size_t at = (row + i) * g->out_stride + p * DSPARK__PANEL;
        store_outputs(bf16_at_mut(g->out, at), acc + i * DSPARK__PANEL, n_out);
    }
}

void dspark__gemm_bf16__avx512bf16(const dspark__gemm_bf16 *g)
{
    fetch_queue queue = {g->prefetch, g->prefetch ? g->prefetch_bytes : 0};
    /* The first tile waits for memory, so it is a whole one; the others are bound by arithmetic and
     * lose least when they are equal (9 rows behind it are 5 + 4, not 8 + 1). */
    for (size_t row = 0; row < g->n_rows;) {
        size_t left = g->n_rows - row;
        size_t n_first = row > 0 ? tile_rows(left, ROWS) : left < ROWS ? left : ROWS;
        size_t n_second = 0;
        if (g->n_rows <= GROUP && n_first < left) n_second = left - n_first;
        for (size_t p = 0; p < g->n_panels; p++) run_group(g, p, row, n_first, n_second, &queue);
        row += n_first + n_second;
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
    k->dot_codes = dspark__dot_codes__avx512bf16;
    k->dot_rows[DSPARK__CODE_PLAIN] = k->dot_rows[DSPARK__CODE_OFFSET] = 12;
    k->dot_rows[DSPARK__CODE_E8M0] = 8;
    k->dot_rows[DSPARK__CODE_E4M3] = 6;
    k->probe_flops = probe_flops;
}

#endif
