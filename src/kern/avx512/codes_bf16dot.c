/* AVX-512-BF16: panels of 4-bit codes times a few rows, each vector of weights multiplied in the
 * register where it was looked up. The bits are those of decode and gemm_bf16; scales for which the
 * integer arithmetic of nibbles.h is not exact, and the end of k, go through these two. */
#if defined(__x86_64__)
#include "kern/avx512/nibbles.h"

/* 8 rows x 48 outputs: 24 accumulators leave room for a table and for weights in the making. */
enum { ROWS = 8, PLAIN_K = 64 };

typedef struct dot_job {
    const dspark__dot_codes *d;
    const unsigned char *x; /* first row of the tile */
    float *sum;             /* [rows of the tile][48] */
    size_t n_rows;
    nibble_tables tables;
} dot_job;

/* acc += the product over k0 .. k0+n_k-1, by way of memory. */
DSPARK__NOINLINE void multiply_plain(const dot_job *job, float *acc, size_t k0, size_t n_k)
{
    _Alignas(64) uint16_t w[PLAIN_K * DSPARK__PANEL];
    for (size_t n; n_k > 0; n_k -= n, k0 += n) {
        n = n_k < PLAIN_K ? n_k : PLAIN_K;
        dspark__decode__avx512(w, job->d->codes, job->d->scales, job->d->format, k0, n);
        dspark__gemm_bf16 g = {.x = job->x + 2 * k0, .x_stride = job->d->x_stride,
                               .n_rows = job->n_rows, .panels = w, .n_panels = 1, .k = n,
                               .acc = acc};
        dspark__gemm_bf16__avx512bf16(&g);
    }
}

DSPARK__INLINE __m512bh broadcast_pair(const unsigned char *x)
{
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

typedef struct sums {
    __m512 of[ROWS][REGISTERS];
} sums;

DSPARK__INLINE void load_sums(sums *s, const float *from, size_t n_rows)
{
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++)
            s->of[i][v] = _mm512_load_ps(from + i * DSPARK__PANEL + 16 * v);
}

DSPARK__INLINE void store_sums(const sums *s, float *to, size_t n_rows)
{
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++)
            _mm512_store_ps(to + i * DSPARK__PANEL + 16 * v, s->of[i][v]);
}

/* A finished K-group: to = sum * scale for the first, else fused into it; the sum starts anew. */
DSPARK__INLINE void finish_group(sums *s, float *to, const float *scales, int first, size_t n_rows)
{
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++) {
        __m512 scale = _mm512_loadu_ps(scales + 16 * v);
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++) {
            float *at = to + i * DSPARK__PANEL + 16 * v;
            __m512 y = first ? _mm512_mul_ps(s->of[i][v], scale)
                             : _mm512_fmadd_ps(s->of[i][v], scale, _mm512_load_ps(at));
            _mm512_store_ps(at, y);
            s->of[i][v] = _mm512_setzero_ps();
        }
    }
}

/* One run of groups of 8 values of k under one row of scales. */
DSPARK__INLINE void multiply_run(sums *s, const uint8_t *codes, const unsigned char *x,
                                 size_t x_stride, const nibble_tables *t, const run_scales *scales,
                                 size_t n_groups, size_t n_rows, scaling how)
{
    for (; n_groups > 0; n_groups--, codes += 192, x += 2 * GROUP_K) {
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++) {
            __m512i raw = _mm512_load_si512(codes + 64 * v);
            fetch_ahead(codes + 64 * v);
            DSPARK__UNROLL
            for (size_t j = 0; j < GROUP_PAIRS; j++) {
                __m512i c = _mm512_srli_epi16(raw, 4 * (unsigned)j);
                __m512bh w = (__m512bh)look_up_nibbles(c, t, scales->of[v], scales->more[v], how);
                DSPARK__UNROLL
                for (size_t i = 0; i < n_rows; i++)
                    s->of[i][v] = _mm512_dpbf16_ps(s->of[i][v], w,
                                                   broadcast_pair(x + i * x_stride + 4 * j));
            }
        }
    }
}

/* One tile over all of k; n_rows, scale and how (the fast way) are constants in each copy. */
DSPARK__INLINE void multiply(const dot_job *job, const fast_scales *fast, size_t n_rows,
                             dspark__code_scale scale, scaling how)
{
    const dspark__dot_codes *d = job->d;
    const nibble_tables t = job->tables;
    const size_t n_groups = d->k / GROUP_K, x_stride = d->x_stride;
    const size_t block = scale == DSPARK__CODE_PLAIN ? n_groups : d->format->block / GROUP_K;
    const size_t per_sum = d->group ? d->group / GROUP_K : SIZE_MAX;
    const uint8_t *row = d->scales;
    const float *group_scales = d->group_scales;
    run_scales r = {{_mm512_setzero_si512()}, {_mm512_setzero_si512()}};
    size_t to_row = 0, to_sum = per_sum;
    int is_fast = 1, first = 1;
    sums s;

    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++) s.of[i][v] = _mm512_setzero_ps();
    for (size_t group = 0, n; group < n_groups; group += n, to_row -= n, to_sum -= n) {
        if (to_sum == 0) {
            finish_group(&s, job->sum, group_scales, first, n_rows);
            first = 0;
            group_scales += DSPARK__PANEL;
            to_sum = per_sum;
        }
        if (to_row == 0) {
            to_row = block;
            if (scale != DSPARK__CODE_PLAIN) {
                _mm_prefetch((const char *)row + SCALES_AHEAD, _MM_HINT_T0);
                is_fast = scale == DSPARK__CODE_OFFSET
                              ? signed_scales_within(row, fast->low, fast->high)
                              : scales_within(row, (uint32_t)fast->low, (uint32_t)fast->high);
                if (how == HALVES) r = scales_halves(row);
                else if (how == SMALL_INTEGERS) r = scales_words(row);
                else r = scales_exponent(row);
                row += DSPARK__PANEL;
            }
        }
        n = to_row < to_sum ? to_row : to_sum;
        if (n > n_groups - group) n = n_groups - group;
        if (is_fast) {
            multiply_run(&s, d->codes + group * 192, job->x + group * 2 * GROUP_K, x_stride, &t, &r,
                         n, n_rows, how);
        } else {
            _Alignas(64) float acc[ROWS * DSPARK__PANEL];
            store_sums(&s, acc, n_rows);
            multiply_plain(job, acc, group * GROUP_K, n * GROUP_K);
            load_sums(&s, acc, n_rows);
        }
    }
    if (d->k % GROUP_K) {
        _Alignas(64) float acc[ROWS * DSPARK__PANEL];
        if (to_sum == 0) {
            finish_group(&s, job->sum, group_scales, first, n_rows);
            first = 0;
            group_scales += DSPARK__PANEL;
        }
        store_sums(&s, acc, n_rows);
        multiply_plain(job, acc, n_groups * GROUP_K, d->k % GROUP_K);
        load_sums(&s, acc, n_rows);
    }
    if (d->group) finish_group(&s, job->sum, group_scales, first, n_rows);
    else store_sums(&s, job->sum, n_rows);
}

#define EACH_SCALE(n)                                                                              \
    switch (fast->how) {                                                                           \
    case HALVES: multiply(job, fast, n, DSPARK__CODE_E4M3, HALVES); break;                         \
    case SMALL_INTEGERS: multiply(job, fast, n, DSPARK__CODE_OFFSET, SMALL_INTEGERS); break;       \
    case EXPONENT_FINITE: multiply(job, fast, n, DSPARK__CODE_E8M0, EXPONENT_FINITE); break;       \
    default: multiply(job, fast, n, DSPARK__CODE_PLAIN, NONE); break;                              \
    }

DSPARK__NOINLINE void multiply_1(const dot_job *job, const fast_scales *fast) { EACH_SCALE(1) }
DSPARK__NOINLINE void multiply_2(const dot_job *job, const fast_scales *fast) { EACH_SCALE(2) }
DSPARK__NOINLINE void multiply_3(const dot_job *job, const fast_scales *fast) { EACH_SCALE(3) }
DSPARK__NOINLINE void multiply_4(const dot_job *job, const fast_scales *fast) { EACH_SCALE(4) }
DSPARK__NOINLINE void multiply_5(const dot_job *job, const fast_scales *fast) { EACH_SCALE(5) }
DSPARK__NOINLINE void multiply_6(const dot_job *job, const fast_scales *fast) { EACH_SCALE(6) }
DSPARK__NOINLINE void multiply_7(const dot_job *job, const fast_scales *fast) { EACH_SCALE(7) }
DSPARK__NOINLINE void multiply_8(const dot_job *job, const fast_scales *fast) { EACH_SCALE(8) }

/* Everything by way of memory: tables that no fast way fits. */
static void multiply_any(const dot_job *job)
{
    const dspark__dot_codes *d = job->d;
    const size_t n_k = d->group ? d->group : d->k;
    float *acc = job->sum;
    _Alignas(64) float part[ROWS * DSPARK__PANEL];
    if (d->group) acc = part;
    for (size_t k0 = 0; k0 == 0 || k0 < d->k; k0 += n_k) {
        memset(acc, 0, job->n_rows * DSPARK__PANEL * sizeof *acc);
        multiply_plain(job, acc, k0, d->k - k0 < n_k ? d->k - k0 : n_k);
        if (d->group)
            dspark__scale_add__avx512(job->sum, acc, d->group_scales + k0 / n_k * DSPARK__PANEL,
                                      job->n_rows, k0 == 0);
        if (n_k == 0) break;
    }
}

void dspark__dot_codes__avx512bf16(const dspark__dot_codes *d)
{
    static void (*const by_rows[ROWS])(const dot_job *, const fast_scales *) = {
        multiply_1, multiply_2, multiply_3, multiply_4,
        multiply_5, multiply_6, multiply_7, multiply_8};
    const dspark__code_scale scale = d->format->scale;
    dot_job job = {.d = d};
    fast_scales fast = {NONE, 1, 0};
    int any = d->format->bits != 4;

    if (!any) {
        job.tables = load_nibbles(d->format->table);
        fast = fast_scales_of(d->format, &job.tables, scale);
        any = scale != DSPARK__CODE_PLAIN && fast.how != HALVES && fast.how != SMALL_INTEGERS &&
              fast.how != EXPONENT_FINITE;
    }
    for (size_t row = 0; row < d->n_rows; row += job.n_rows) {
        job.n_rows = tile_rows(d->n_rows - row, ROWS);
        job.x = (const unsigned char *)d->x + row * d->x_stride;
        job.sum = d->acc + row * DSPARK__PANEL;
        if (any) multiply_any(&job);
        else by_rows[job.n_rows - 1](&job, &fast);
    }
}

#endif
