/* AVX-512-BF16: panels of 4-bit codes times a few rows, each vector of weights multiplied in the
 * register where it was looked up. The bits are those of decode and gemm_bf16; scales for which the
 * integer arithmetic of nibbles.h is not exact, and the end of k, go through these two. */
#if defined(__x86_64__)
#include "kern/avx512/nibbles.h"

/* A tile is up to 6 rows x 48 outputs: its 18 accumulators leave room for tables and for weights in the
 * making. Tiles of 16 outputs x 16 rows, which expand each weight once, were slower at every number of
 * rows: three passes over a panel, a third of its lines each, are not what memory likes. */
enum {
    ROWS = 6,
    PLAIN_K = 64,
    CHECKED = 32,   /* rows of scales that are judged at a time */
    USUAL_BLOCK = 2 /* groups of 8 under one e4m3 scale */
};

/* E2M1-like codes under an e4m3 scale 2^e * (1 + m / 8): entry 8m + c is the product of code c's magnitude
 * and 2^MOST_E * (1 + m / 8), from which (MOST_E - e) is then taken off the exponent. A zero stays zero
 * because that subtraction saturates. */
enum { MOST_E = 8 };

typedef struct product_table {
    __m512i of[2];
    int usable;
} product_table;

static product_table load_products(const uint16_t *table, int halves)
{
    _Alignas(64) uint16_t entry[64];
    product_table t = {{_mm512_setzero_si512(), _mm512_setzero_si512()}, halves};
    for (size_t c = 0; c < 8; c++)
        if (table[c] & 0x8000u || table[c + 8] != (table[c] | 0x8000u)) t.usable = 0;
    if (!t.usable) return t;
    for (size_t i = 0; i < 64; i++) {
        float product = dspark__bf16_to_f32(table[i % 8]) * (float)(8 + i / 8) * (1 << (MOST_E - 3));
        entry[i] = (uint16_t)(dspark__f32_bits(product) >> 16);
    }
    t.of[0] = _mm512_load_si512(entry);
    t.of[1] = _mm512_load_si512(entry + 32);
    return t;
}

/* of: 8m; more: what is taken off. Bytes 8 .. 0x7e. */
DSPARK__INLINE run_scales scales_products(const uint8_t *scales)
{
    run_scales r;
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++) {
        __m512i b = load_scale_words(scales, v);
        r.of[v] = _mm512_and_si512(_mm512_slli_epi16(b, 3), _mm512_set1_epi16(0x38));
        r.more[v] = _mm512_sub_epi16(_mm512_set1_epi16((MOST_E + 7) << 7),
                                     _mm512_slli_epi16(_mm512_srli_epi16(b, 3), 7));
    }
    return r;
}

DSPARK__INLINE __m512i look_up_product(__m512i raw, size_t j, const product_table *t, __m512i of,
                                       __m512i more)
{
    const __m512i sign = _mm512_set1_epi16((short)0x8000);
    __m512i index = _mm512_ternarylogic_epi32(_mm512_srli_epi16(raw, 4 * (unsigned)j), of,
                                              _mm512_set1_epi16(7), 0xec); /* c & 7 | of */
    __m512i w = _mm512_permutex2var_epi16(t->of[0], index, t->of[1]);
    w = _mm512_subs_epu16(w, more);
    return _mm512_ternarylogic_epi32(w, _mm512_slli_epi16(raw, 12 - 4 * (unsigned)j), sign, 0xf8);
}

typedef struct dot_job {
    const dspark__dot_codes *d;
    const unsigned char *x; /* first row of the tile */
    float *sum;             /* [rows of the tile][48] */
    size_t n_rows;
    nibble_tables tables;
    product_table products;
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
                                 size_t x_stride, const nibble_tables *t,
                                 const product_table *products, const run_scales *scales,
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
                __m512bh w = how == HALVES
                                 ? (__m512bh)look_up_product(raw, j, products, scales->of[v],
                                                             scales->more[v])
                                 : (__m512bh)look_up_nibbles(c, t, scales->of[v], scales->of[v], how);
                DSPARK__UNROLL
                for (size_t i = 0; i < n_rows; i++)
                    s->of[i][v] = _mm512_dpbf16_ps(s->of[i][v], w,
                                                   broadcast_pair(x + i * x_stride + 4 * j));
            }
        }
    }
}

/* Runs of `block` groups, each with a row of scales of its own that has the fast way. */
DSPARK__INLINE void multiply_rows(sums *s, const uint8_t *codes, const unsigned char *x,
                                  size_t x_stride, const nibble_tables *t,
                                  const product_table *products, const uint8_t *row, size_t block,
                                  size_t n_groups, size_t n_rows, scaling how)
{
    run_scales r;
    if (how == NONE) {
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++) r.of[v] = r.more[v] = _mm512_setzero_si512();
        multiply_run(s, codes, x, x_stride, t, products, &r, n_groups, n_rows, how);
        return;
    }
    for (; n_groups >= block; n_groups -= block) {
        _mm_prefetch((const char *)row + SCALES_AHEAD, _MM_HINT_T0);
        r = how == HALVES ? scales_products(row)
            : how == SMALL_INTEGERS ? scales_words(row, REGISTERS) : scales_exponent(row, REGISTERS);
        if (block == USUAL_BLOCK && how == HALVES)
            multiply_run(s, codes, x, x_stride, t, products, &r, USUAL_BLOCK, n_rows, how);
        else multiply_run(s, codes, x, x_stride, t, products, &r, block, n_rows, how);
        codes += block * 192;
        x += block * 2 * GROUP_K;
        row += DSPARK__PANEL;
    }
    if (n_groups == 0) return;
    r = how == HALVES ? scales_products(row)
        : how == SMALL_INTEGERS ? scales_words(row, REGISTERS) : scales_exponent(row, REGISTERS);
    multiply_run(s, codes, x, x_stride, t, products, &r, n_groups, n_rows, how);
}

/* How many rows of scales from here on have the fast way, counted up to CHECKED and the end. */
DSPARK__INLINE size_t count_fast(const uint8_t *row, const fast_scales *fast, size_t n_groups,
                                 size_t block, dspark__code_scale scale)
{
    size_t n = 0, most = (n_groups + block - 1) / block;
    if (most > CHECKED) most = CHECKED;
    for (; n < most; n++, row += DSPARK__PANEL)
        if (!(scale == DSPARK__CODE_OFFSET
                  ? signed_scales_within(row, fast->low, fast->high)
                  : scales_within(row, (uint32_t)fast->low, (uint32_t)fast->high)))
            break;
    return n;
}

/* The same by way of memory: scales that have no fast way, and the last values of k. */
DSPARK__INLINE void multiply_through(sums *s, const dot_job *job, size_t k0, size_t n_k,
                                     size_t n_rows)
{
    _Alignas(64) float acc[ROWS * DSPARK__PANEL] = {0};
    store_sums(s, acc, n_rows);
    multiply_plain(job, acc, k0, n_k);
    load_sums(s, acc, n_rows);
}

/* One tile over all of k; n_rows, scale and how (the fast way) are constants in each copy. */
DSPARK__INLINE void multiply(const dot_job *job, const fast_scales *fast, size_t n_rows,
                             dspark__code_scale scale, scaling how)
{
    const dspark__dot_codes *d = job->d;
    const nibble_tables t = job->tables;
    const product_table products = job->products;
    const size_t n_groups = d->k / GROUP_K, x_stride = d->x_stride;
    const size_t block = scale == DSPARK__CODE_PLAIN ? n_groups : d->format->block / GROUP_K;
    const size_t per_sum = d->group ? d->group / GROUP_K : SIZE_MAX;
    const uint8_t *codes = d->codes, *row = d->scales;
    const float *group_scales = d->group ? d->group_scales : NULL;
    float *to = job->sum;
    size_t to_sum = per_sum;
    int first = 1;
    sums s;

    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++)
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++) s.of[i][v] = _mm512_setzero_ps();
    for (size_t group = 0, n; group < n_groups; group += n, to_sum -= n) {
        if (to_sum == 0) {
            finish_group(&s, to, group_scales, first, n_rows);
            first = 0;
            group_scales += DSPARK__PANEL;
            to_sum = per_sum;
        }
        size_t most = n_groups - group < to_sum ? n_groups - group : to_sum;
        size_t n_fast = scale == DSPARK__CODE_PLAIN ? 1 : count_fast(row, fast, most, block, scale);
        if (n_fast > 0) {
            n = n_fast * block < most ? n_fast * block : most;
            multiply_rows(&s, codes + group * 192, job->x + group * 2 * GROUP_K, x_stride, &t,
                          &products, row ? row : NULL, block, n, n_rows, how);
            row = scale == DSPARK__CODE_PLAIN ? NULL : row + n_fast * DSPARK__PANEL;
        } else {
            n = block < most ? block : most;
            multiply_through(&s, job, group * GROUP_K, n * GROUP_K, n_rows);
            row += DSPARK__PANEL;
        }
    }
    if (d->k % GROUP_K) {
        if (to_sum == 0) {
            finish_group(&s, to, group_scales, first, n_rows);
            first = 0;
            group_scales += DSPARK__PANEL;
        }
        multiply_through(&s, job, n_groups * GROUP_K, d->k % GROUP_K, n_rows);
    }
    if (d->group) finish_group(&s, to, group_scales, first, n_rows);
    else store_sums(&s, to, n_rows);
}

DSPARK__INLINE void multiply_scaled(const dot_job *job, const fast_scales *fast, size_t n_rows)
{
    switch (fast->how) {
    case HALVES: multiply(job, fast, n_rows, DSPARK__CODE_E4M3, HALVES); break;
    case SMALL_INTEGERS:
        multiply(job, fast, n_rows, DSPARK__CODE_OFFSET, SMALL_INTEGERS);
        break;
    case EXPONENT_FINITE:
        multiply(job, fast, n_rows, DSPARK__CODE_E8M0, EXPONENT_FINITE);
        break;
    default: multiply(job, fast, n_rows, DSPARK__CODE_PLAIN, NONE); break;
    }
}

#define TILE(n)                                                                                    \
    DSPARK__NOINLINE void multiply_##n(const dot_job *job, const fast_scales *fast)                \
    {                                                                                              \
        multiply_scaled(job, fast, n);                                                             \
    }
TILE(1)
TILE(2)
TILE(3)
TILE(4)
TILE(5)
TILE(6)
#undef TILE

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
        multiply_1, multiply_2, multiply_3, multiply_4, multiply_5, multiply_6};
    const dspark__code_scale scale = d->format->scale;
    dot_job job = {.d = d};
    fast_scales fast = {NONE, 1, 0};
    int any = d->format->bits != 4;

    if (!any) {
        job.tables = load_nibbles(d->format->table);
        job.products = load_products(d->format->table, job.tables.halves);
        fast = fast_scales_of(d->format, &job.tables, scale);
        any = scale != DSPARK__CODE_PLAIN && d->group % d->format->block != 0;
        any = any || (scale != DSPARK__CODE_PLAIN && (fast.how != HALVES || !job.products.usable) &&
              fast.how != SMALL_INTEGERS && fast.how != EXPONENT_FINITE);
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
