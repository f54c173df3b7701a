/* AVX-512-BF16 with VBMI: panels of codes times rows, each vector of weights expanded (codes_dot.h)
 * while others are multiplied. The bits are those of decode and gemm_bf16; scales and tables for which
 * the integer arithmetic of codes_dot.h is not exact, x that are not tame, and the end of k, go through
 * these two. */
#if defined(__x86_64__)
#include "kern/avx512/codes_dot.h"

/* Few rows, which wait for memory: weights are multiplied in the registers where they were expanded, of
 * up to three panels side by side (one row alone would wait for its accumulators). More rows, which are
 * bound by arithmetic: a group of 8 k is expanded into L1 while the one before is multiplied, so that
 * one broadcast serves 48 outputs. Permutations and the dot product then run in different units, and a
 * tile of 8 rows hides most of the expansion, however often it is repeated (not all: operations that any
 * unit could do queue for those of the dot product, too; and a store of 64 bytes takes two cycles). */
enum {
    DIRECT = 4,      /* the most rows of a tile without a way through L1 */
    ROWS = 8,
    PANELS = 3,
    TILE = 8,        /* the most rows times panels of a tile */
    PLAIN_K = 128,
    PLAIN_ROWS = 32, /* of a tile by way of memory */
    WHOLE_ROWS = 8,  /* the most rows for which looking up all of 256 entries is the faster way */
    CHECKED = 32,    /* rows of scales that are judged at a time */
    USUAL_BLOCK = 2  /* groups of 8 under one e4m3 scale */
};

/* What p points at may have changed, for all that the compiler knows: it is loaded again. */
#define FORGET(p) __asm__ volatile("" : "+r"(p) : : "memory")

typedef struct dot_job {
    const dspark__dot_codes *d;
    const unsigned char *x; /* first row of the tile */
    size_t row, panel;
    size_t n_rows, n_panels;
    way how;
    fast_scales fast;
    dot_tables tables;
} dot_job;

DSPARK__INLINE const uint8_t *codes_of(const dot_job *job, size_t p)
{
    return job->d->codes + (job->panel + p) * job->d->code_stride;
}

DSPARK__INLINE const uint8_t *scales_of(const dot_job *job, size_t p)
{
    return job->d->scales ? job->d->scales + (job->panel + p) * job->d->scale_stride : NULL;
}

DSPARK__INLINE const float *group_scales_of(const dot_job *job, size_t p)
{
    return job->d->group ? job->d->group_scales + (job->panel + p) * job->d->group_stride : NULL;
}

DSPARK__INLINE float *sums_of(const dot_job *job, size_t p)
{
    return job->d->acc + ((job->panel + p) * job->d->n_rows + job->row) * DSPARK__PANEL;
}

/* acc += the product over k0 .. k0+n_k-1 of panel p, by way of memory. */
DSPARK__NOINLINE void multiply_plain(const dot_job *job, size_t p, float *acc, size_t k0, size_t n_k)
{
    _Alignas(64) uint16_t w[PLAIN_K * DSPARK__PANEL];
    for (size_t n; n_k > 0; n_k -= n, k0 += n) {
        n = n_k < PLAIN_K ? n_k : PLAIN_K;
        dspark__decode__avx512(w, codes_of(job, p), scales_of(job, p), job->d->format, k0, n);
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

/* Row i of panel p is of[p * n_rows + i]. */
typedef struct sums {
    __m512 of[TILE][REGISTERS];
} sums;

/* A finished K-group: to = sum * scale for the first, else fused into it; the sum starts anew. */
DSPARK__INLINE void finish_group(__m512 of[][REGISTERS], float *to, const float *scales, int first,
                                 size_t n_rows)
{
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++) {
        __m512 scale = _mm512_loadu_ps(scales + 16 * v);
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++) {
            float *at = to + i * DSPARK__PANEL + 16 * v;
            __m512 y = first ? _mm512_mul_ps(of[i][v], scale)
                             : _mm512_fmadd_ps(of[i][v], scale, _mm512_load_ps(at));
            _mm512_store_ps(at, y);
            of[i][v] = _mm512_setzero_ps();
        }
    }
}

/* What is read from here on: the panels' codes and rows of scales, and x. */
typedef struct cursor {
    const uint8_t *codes[PANELS], *row[PANELS];
    const unsigned char *x;
} cursor;

/* ---- weights in registers ---- */

DSPARK__INLINE void multiply_line(__m512 of[][REGISTERS], size_t v, const uint8_t *codes,
                                  const dot_tables *t, const dot_scales *scales,
                                  const unsigned char *x, size_t x_stride, size_t n_rows, way how)
{
    __m512i w[GROUP_PAIRS];
    expand_line(w, codes, t, scales, how, 0);
    DSPARK__UNROLL
    for (size_t j = 0; j < GROUP_PAIRS; j++)
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++)
            of[i][v] = _mm512_dpbf16_ps(of[i][v], (__m512bh)w[j],
                                        broadcast_pair(x + i * x_stride + 4 * j));
}

DSPARK__INLINE void multiply_bytes(__m512 of[][REGISTERS], const uint8_t *codes, const dot_tables *t,
                                   const dot_scales *scales, const unsigned char *x, size_t x_stride,
                                   size_t n_rows, way how, int near)
{
    DSPARK__UNROLL
    for (size_t half = 0; half < 2; half++) {
        __m512i w[6];
        expand_bytes(w, codes + 192 * half, t, scales, how, 0, near);
        DSPARK__UNROLL
        for (size_t i = 0; i < 2 * n_rows; i++) {
            size_t j = i / n_rows, r = i % n_rows;
            __m512bh two = broadcast_pair(x + r * x_stride + 8 * half + 4 * j);
            DSPARK__UNROLL
            for (size_t v = 0; v < REGISTERS; v++)
                of[r][v] = _mm512_dpbf16_ps(of[r][v], (__m512bh)w[3 * j + v], two);
        }
    }
}

/* n groups under one row of scales, if any. */
DSPARK__INLINE void multiply_direct(sums *s, const cursor *c, size_t x_stride, const dot_tables *t,
                                    size_t n, size_t n_rows, size_t n_panels, way how)
{
    const unsigned char *x = c->x;
    dot_scales none[REGISTERS];
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++) none[v] = load_scales(NULL, v, NO_WAY);
    if (!has_scales(how)) { /* panels side by side */
        for (size_t group = 0; group < n; group++, x += 2 * GROUP_K) {
            DSPARK__UNROLL
            for (size_t p = 0; p < n_panels; p++) {
                const uint8_t *codes = c->codes[p] + group * group_bytes(how);
                if (is_bytes(how))
                    multiply_bytes(s->of + p * n_rows, codes, t, none, x, x_stride, n_rows, how,
                                   n_panels > 1);
                else
                    DSPARK__UNROLL
                    for (size_t v = 0; v < REGISTERS; v++)
                        multiply_line(s->of + p * n_rows, v, codes + 64 * v, t, none, x, x_stride,
                                      n_rows, how);
            }
        }
        return;
    }
    DSPARK__UNROLL
    for (size_t p = 0; p < n_panels; p++) { /* scales take registers: few of them at a time */
        const uint8_t *row = c->row[p];
        _mm_prefetch((const char *)row + SCALES_AHEAD, _MM_HINT_T0);
        if (is_bytes(how)) {
            dot_scales scales[REGISTERS];
            DSPARK__UNROLL
            for (size_t v = 0; v < REGISTERS; v++) scales[v] = load_scales(row, v, how);
            for (size_t group = 0; group < n; group++)
                multiply_bytes(s->of + p * n_rows, c->codes[p] + group * 384, t, scales,
                               x + group * 2 * GROUP_K, x_stride, n_rows, how, 0);
            continue;
        }
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++) {
            dot_scales scales = load_scales(row, v, how);
            for (size_t group = 0; group < n; group++)
                multiply_line(s->of + p * n_rows, v, c->codes[p] + group * 192 + 64 * v, t, &scales,
                              x + group * 2 * GROUP_K, x_stride, n_rows, how);
        }
    }
}

/* ---- weights through L1 ---- */

/* A group's weights in the order of a bf16 panel. All that it needs is read from memory, since the
 * accumulators of a tile leave no registers for it. */
DSPARK__INLINE void store_group(uint16_t *to, const uint8_t *codes, const dot_tables *t,
                                const dot_scales *scales, way how)
{
    __m512i w[6];
    if (is_bytes(how)) {
        DSPARK__UNROLL
        for (size_t half = 0; half < 2; half++) {
            expand_bytes(w, codes + 192 * half, t, scales, how, 1, 0);
            DSPARK__UNROLL
            for (size_t i = 0; i < 6; i++) _mm512_store_si512(to + 32 * (6 * half + i), w[i]);
        }
        return;
    }
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++) {
        expand_line(w, codes + 64 * v, t, scales + v, how, 1);
        DSPARK__UNROLL
        for (size_t j = 0; j < GROUP_PAIRS; j++)
            _mm512_store_si512(to + 32 * (REGISTERS * j + v), w[j]);
    }
}

DSPARK__INLINE void multiply_group(sums *s, const uint16_t *w, const unsigned char *x, size_t x_stride,
                                   size_t n_rows)
{
    DSPARK__UNROLL
    for (size_t j = 0; j < GROUP_PAIRS; j++, w += 2 * DSPARK__PANEL) {
        __m512bh part[REGISTERS];
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++) part[v] = (__m512bh)_mm512_load_si512(w + 32 * v);
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++) {
            __m512bh two = broadcast_pair(x + i * x_stride + 4 * j);
            DSPARK__UNROLL
            for (size_t v = 0; v < REGISTERS; v++)
                s->of[i][v] = _mm512_dpbf16_ps(s->of[i][v], part[v], two);
        }
    }
}

/* Two groups in turn: one is multiplied while the next is expanded. */
typedef struct ring {
    _Alignas(64) uint16_t w[2][GROUP_K * DSPARK__PANEL];
    dot_scales scales[REGISTERS];
    const dot_tables *tables;
} ring;

DSPARK__INLINE void multiply_ring(sums *s, cursor *c, size_t x_stride, ring *r, size_t n_groups,
                                  size_t block, size_t n_rows, way how)
{
    size_t left = 0; /* groups under the row of scales */
    for (size_t group = 0; group <= n_groups; group++) {
        if (has_scales(how) && left == 0 && group < n_groups) {
            _mm_prefetch((const char *)c->row[0] + SCALES_AHEAD, _MM_HINT_T0);
            DSPARK__UNROLL
            for (size_t v = 0; v < REGISTERS; v++) r->scales[v] = load_scales(c->row[0], v, how);
            c->row[0] += DSPARK__PANEL;
            left = block;
        }
        FORGET(r);
        if (group < n_groups) {
            store_group(r->w[group % 2], c->codes[0], r->tables, r->scales, how);
            c->codes[0] += group_bytes(how);
            left--;
        }
        if (group == 0) continue;
        multiply_group(s, r->w[1 - group % 2], c->x, x_stride, n_rows);
        c->x += 2 * GROUP_K;
    }
}

/* Groups [0, n_groups) under rows of scales of `block` groups each, which have the fast way. */
DSPARK__INLINE void multiply_fast(sums *s, cursor *c, size_t x_stride, const dot_tables *t, ring *r,
                                  size_t block, size_t n_groups, size_t n_rows, size_t n_panels,
                                  way how)
{
    if (n_rows > DIRECT) {
        multiply_ring(s, c, x_stride, r, n_groups, block, n_rows, how);
        return;
    }
    if (!has_scales(how)) block = n_groups;
    for (size_t left = n_groups, n; left > 0; left -= n) {
        n = block < left ? block : left;
        if (n == USUAL_BLOCK && how == NIBBLES_PRODUCT)
            multiply_direct(s, c, x_stride, t, USUAL_BLOCK, n_rows, n_panels, how);
        else multiply_direct(s, c, x_stride, t, n, n_rows, n_panels, how);
        DSPARK__UNROLL
        for (size_t p = 0; p < n_panels; p++) {
            c->codes[p] += n * group_bytes(how);
            if (has_scales(how)) c->row[p] += DSPARK__PANEL;
        }
        c->x += n * 2 * GROUP_K;
    }
}

/* How many rows of scales from here on have the fast way, counted up to CHECKED and the end. */
DSPARK__INLINE size_t count_fast(const uint8_t *row, const fast_scales *fast, size_t n_groups,
                                 size_t block, way how)
{
    size_t n = 0, most = (n_groups + block - 1) / block;
    if (most > CHECKED) most = CHECKED;
    for (; n < most; n++, row += DSPARK__PANEL)
        if (!(how == NIBBLES_INTEGER ? signed_scales_within(row, fast->low, fast->high)
                                     : scales_within(row, (uint32_t)fast->low, (uint32_t)fast->high)))
            break;
    return n;
}

/* The same by way of memory: scales that have no fast way, and the last values of k. */
DSPARK__INLINE void multiply_through(sums *s, const dot_job *job, size_t k0, size_t n_k, size_t n_rows,
                                     size_t n_panels)
{
    _Alignas(64) float acc[TILE * DSPARK__PANEL];
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows * n_panels; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++)
            _mm512_store_ps(acc + i * DSPARK__PANEL + 16 * v, s->of[i][v]);
    for (size_t p = 0; p < n_panels; p++)
        multiply_plain(job, p, acc + p * n_rows * DSPARK__PANEL, k0, n_k);
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows * n_panels; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++)
            s->of[i][v] = _mm512_load_ps(acc + i * DSPARK__PANEL + 16 * v);
}

/* One tile over all of k; n_rows, n_panels and how are constants in each copy. */
DSPARK__INLINE void multiply(const dot_job *job, size_t n_rows, size_t n_panels, way how)
{
    const dspark__dot_codes *d = job->d;
    const dot_tables tables = job->tables;
    const int rows = has_scales(how);
    const size_t n_groups = d->k / GROUP_K, x_stride = d->x_stride;
    const size_t block = rows ? d->format->block / GROUP_K : 1;
    const size_t per_sum = d->group ? d->group / GROUP_K : SIZE_MAX;
    const size_t n_all = n_groups + (d->k % GROUP_K != 0);
    cursor c = {.x = job->x};
    ring r;
    sums s;
    r.tables = &job->tables;
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows * n_panels; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++) s.of[i][v] = _mm512_setzero_ps();
    DSPARK__UNROLL
    for (size_t p = 0; p < n_panels; p++) {
        c.codes[p] = codes_of(job, p);
        c.row[p] = rows ? scales_of(job, p) : NULL;
    }
    for (size_t group = 0, n, sum = 0; group < n_all; sum++) { /* one K-group, or all */
        size_t end = n_all - group < per_sum ? n_all : group + per_sum;
        for (; group < end; group += n) {
            size_t most = (end < n_groups ? end : n_groups) - group;
            n = most;
            if (rows && most > 0) {
                size_t n_fast = SIZE_MAX;
                DSPARK__UNROLL
                for (size_t p = 0; p < n_panels; p++) {
                    size_t f = count_fast(c.row[p], &job->fast, most, block, how);
                    if (f < n_fast) n_fast = f;
                }
                n = n_fast * block < most ? n_fast * block : most;
            }
            if (n > 0) {
                multiply_fast(&s, &c, x_stride, &tables, &r, block, n, n_rows, n_panels, how);
                continue;
            }
            n = most == 0 ? 1 : block < most ? block : most;
            size_t k0 = group * GROUP_K, n_k = n * GROUP_K;
            multiply_through(&s, job, k0, d->k - k0 < n_k ? d->k - k0 : n_k, n_rows, n_panels);
            c.x += 2 * n_k;
            DSPARK__UNROLL
            for (size_t p = 0; p < n_panels; p++) {
                c.codes[p] += n * group_bytes(how);
                if (rows) c.row[p] += DSPARK__PANEL;
            }
        }
        if (!d->group) break;
        DSPARK__UNROLL
        for (size_t p = 0; p < n_panels; p++)
            finish_group(s.of + p * n_rows, sums_of(job, p),
                         group_scales_of(job, p) + sum * DSPARK__PANEL, sum == 0, n_rows);
    }
    if (d->group) return;
    DSPARK__UNROLL
    for (size_t p = 0; p < n_panels; p++)
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++)
            DSPARK__UNROLL
            for (size_t v = 0; v < REGISTERS; v++)
                _mm512_store_ps(sums_of(job, p) + i * DSPARK__PANEL + 16 * v,
                                s.of[p * n_rows + i][v]);
}

DSPARK__INLINE void multiply_by(const dot_job *job, size_t n_rows, size_t n_panels)
{
    switch (job->how) {
    case BYTES_HALF: multiply(job, n_rows, n_panels, BYTES_HALF); break;
    case BYTES_WHOLE: multiply(job, n_rows, n_panels, BYTES_WHOLE); break;
    case BYTES_POWER: multiply(job, n_rows, n_panels, BYTES_POWER); break;
    case NIBBLES_PLAIN: multiply(job, n_rows, n_panels, NIBBLES_PLAIN); break;
    case NIBBLES_POWER: multiply(job, n_rows, n_panels, NIBBLES_POWER); break;
    case NIBBLES_PRODUCT: multiply(job, n_rows, n_panels, NIBBLES_PRODUCT); break;
    default: multiply(job, n_rows, n_panels, NIBBLES_INTEGER); break;
    }
}

#define TILE_OF(rows, panels)                                                                      \
    DSPARK__NOINLINE void multiply_##rows##_##panels(const dot_job *job)                           \
    {                                                                                              \
        multiply_by(job, rows, panels);                                                            \
    }
TILE_OF(1, 1)
TILE_OF(1, 3)
TILE_OF(2, 1)
TILE_OF(2, 3)
TILE_OF(3, 1)
TILE_OF(4, 1)
TILE_OF(5, 1)
TILE_OF(6, 1)
TILE_OF(7, 1)
TILE_OF(8, 1)
#undef TILE_OF

/* Everything by way of memory. */
static void multiply_any(const dot_job *job)
{
    const dspark__dot_codes *d = job->d;
    const size_t n_k = d->group ? d->group : d->k;
    _Alignas(64) float part[PLAIN_ROWS * DSPARK__PANEL];
    float *sum = sums_of(job, 0), *acc = d->group ? part : sum;
    for (size_t k0 = 0; k0 < d->k; k0 += n_k) {
        memset(acc, 0, job->n_rows * DSPARK__PANEL * sizeof *acc);
        multiply_plain(job, 0, acc, k0, d->k - k0 < n_k ? d->k - k0 : n_k);
        if (d->group)
            dspark__scale_add__avx512(sum, acc, group_scales_of(job, 0) + k0 / n_k * DSPARK__PANEL,
                                      job->n_rows, k0 == 0);
    }
}

static void run_tile(const dot_job *job)
{
    static void (*const of_one[ROWS])(const dot_job *) = {multiply_1_1, multiply_2_1, multiply_3_1,
                                                          multiply_4_1, multiply_5_1, multiply_6_1,
                                                          multiply_7_1, multiply_8_1};
    if (job->how == NO_WAY) multiply_any(job);
    else if (job->n_panels == 1) of_one[job->n_rows - 1](job);
    else if (job->n_rows == 1) multiply_1_3(job);
    else multiply_2_3(job);
}

static void dot_codes_vbmi(const dspark__dot_codes *d)
{
    dot_job job = {.d = d};
    const dspark__code_format *f = d->format;
    if (d->n_rows == 0) return;
    job.how = prepare_tables(&job.tables, &job.fast, f);
    if (job.how == BYTES_WHOLE && d->n_rows > WHOLE_ROWS) job.how = NO_WAY;
    if (f->scale != DSPARK__CODE_PLAIN && d->group % f->block != 0) job.how = NO_WAY;
    if (is_scaled(job.how) && !is_tame(d->x, d->x_stride, d->n_rows, d->k)) job.how = NO_WAY;
    for (job.panel = 0; job.panel < d->n_panels; job.panel += job.n_panels) {
        int all = job.how != NO_WAY && d->n_rows <= 2 && d->n_panels - job.panel >= PANELS;
        job.n_panels = all ? PANELS : 1;
        for (job.row = 0; job.row < d->n_rows; job.row += job.n_rows) {
            job.n_rows = tile_rows(d->n_rows - job.row, job.how == NO_WAY ? PLAIN_ROWS : ROWS);
            job.x = (const unsigned char *)d->x + job.row * d->x_stride;
            run_tile(&job);
        }
    }
}

/* As measured on Zen 4: what the tiles lose to a product that expands 128 or 1024 k once and multiplies
 * them with all rows. */
void dspark__kern_avx512bf16vbmi(dspark__kern *k)
{
    k->dot_codes = dot_codes_vbmi;
    k->dot_rows[0][DSPARK__CODE_PLAIN] = 64;
    k->dot_rows[0][DSPARK__CODE_E4M3] = 12;
    k->dot_rows[0][DSPARK__CODE_E8M0] = 16;
    k->dot_rows[0][DSPARK__CODE_OFFSET] = 16;
    k->dot_rows[1][DSPARK__CODE_PLAIN] = 32;
    k->dot_rows[1][DSPARK__CODE_E8M0] = 8;
}

#endif
