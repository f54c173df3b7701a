/* AVX-512-BF16 with VBMI: panels of codes times rows, each vector of weights expanded (codes_dot.h)
 * while others are multiplied. The bits are those of decode and gemm_bf16; scales, tables, x and sums
 * that are outside of the bounds of codes_dot.h, and the end of k, go through these two. */
#if defined(__x86_64__)
#include "kern/avx512/bf16dot.h"
#include "kern/avx512/codes_dot.h"

/* Weights are multiplied in the registers where they were expanded, one panel after the other, as one stream.
 * Few rows wait for memory (three panels side by side, which wait less for accumulators, are as fast or up to
 * 10 % slower once every line is asked for often enough: fetch_line). More are bound by arithmetic:
 * permutations and the dot product run in different units, and a tile of 8 rows hides most of the
 * expansion, however often it is repeated (not all: operations that any unit could do queue for those of
 * the dot product, too). A way through L1, so that a broadcast of x serves 48 outputs of any number of
 * rows, is 2 to 12 % slower: a store of 64 bytes takes two cycles. */
enum {
    FEW = 4,         /* the most rows that take a group of 8 k at once, not a line of codes (products always do) */
    ROWS = 8,
    MANY = 6,        /* the fewest rows whose nvfp4 products go line by line (multiply_lines) */
    PLAIN_K = 128,
    PLAIN_ROWS = 32, /* of a tile by way of memory */
    WHOLE_ROWS = 8,  /* the most rows for which looking up all of 256 entries is the faster way */
    CHECKED = 32,    /* rows of scales that are judged at a time */
    PRODUCT_BLOCK = 2, POWER_BLOCK = 4 /* groups of 8 under one scale, of nvfp4 and of mx formats */
};

/* What p points at may have changed, for all that the compiler knows: it is loaded again. */
#define FORGET(p) __asm__ volatile("" : "+r"(p) : : "memory")
/* Nothing that depends on p moves to before this place, nor before what is volatile ahead of it. */
#define KEEP(p) __asm__ volatile("" : "+r"(p))

typedef struct dot_job {
    const dspark__dot_codes *d;
    const unsigned char *x; /* first row of the tile */
    size_t row, panel;
    size_t n_rows;
    way how;
    fast_scales fast;
    dot_tables tables;
} dot_job;

DSPARK__INLINE const uint8_t *codes_of(const dot_job *job)
{
    return job->d->codes + job->panel * job->d->code_stride;
}

DSPARK__INLINE const uint8_t *scales_of(const dot_job *job)
{
    return job->d->scales ? job->d->scales + job->panel * job->d->scale_stride : NULL;
}

DSPARK__INLINE const float *group_scales_of(const dot_job *job)
{
    return job->d->group ? job->d->group_scales + job->panel * job->d->group_stride : NULL;
}

DSPARK__INLINE float *sums_of(const dot_job *job)
{
    return job->d->acc + (job->panel * job->d->n_rows + job->row) * DSPARK__PANEL;
}

/* acc += the product over k0 .. k0+n_k-1, by way of memory. */
DSPARK__NOINLINE void multiply_plain(const dot_job *job, float *acc, size_t k0, size_t n_k)
{
    _Alignas(64) uint16_t w[PLAIN_K * DSPARK__PANEL];
    for (size_t n; n_k > 0; n_k -= n, k0 += n) {
        n = n_k < PLAIN_K ? n_k : PLAIN_K;
        dspark__decode__avx512(w, codes_of(job), scales_of(job), job->d->format, k0, n);
        dspark__gemm_bf16 g = {.x = job->x + 2 * k0, .x_stride = job->d->x_stride,
                               .n_rows = job->n_rows, .panels = w, .n_panels = 1, .k = n,
                               .acc = acc};
        dspark__gemm_bf16__avx512bf16(&g);
    }
}

typedef struct sums {
    __m512 of[ROWS][REGISTERS];
} sums;

/* How far ahead scales of K-groups are fetched, in K-groups: as far as codes are with groups of 128. */
enum { GROUPS_AHEAD = 4 };

/* A finished K-group: to = sum * scale for the first, else fused into it; the sum starts anew. */
DSPARK__INLINE void finish_group(__m512 of[][REGISTERS], float *to, const float *scales, int first,
                                 size_t n_rows)
{
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++) {
        __m512 scale = _mm512_loadu_ps(scales + 16 * v);
        _mm_prefetch((const char *)(scales + GROUPS_AHEAD * DSPARK__PANEL + 16 * v), _MM_HINT_T0);
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

/* What is read from here on: codes, rows of scales, and x; and where the tables that are used once a row
 * are, which take no registers. */
typedef struct cursor {
    const uint8_t *codes, *row;
    const unsigned char *x;
    const dot_tables *tables;
} cursor;

/* The powers that the sums stand under (codes_dot.h); of NIBBLES_PRODUCT the exponents of all 48 outputs in
 * of[0]. */
typedef struct powers {
    __m512i of[REGISTERS];
} powers;

DSPARK__INLINE void start_powers(powers *under, way how)
{
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++)
        under->of[v] = how == NIBBLES_PRODUCT ? load_exponents(NULL) : load_powers(NULL, v);
}

/* Put the sums under the powers of a row of scales; NULL: of one. */
DSPARK__INLINE void change_powers(sums *s, powers *under, const uint8_t *row,
                                  const dot_tables *t, size_t n_rows, way how)
{
    row_powers between = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    if (how == NIBBLES_PRODUCT) {
        __m512i to = load_exponents(row);
        between = power_between_rows(under->of[0], to, t);
        under->of[0] = to;
    }
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++) {
        __m512 factor;
        if (how == NIBBLES_PRODUCT) {
            factor = power_of_outputs(between, v, t);
        } else {
            __m512i to = load_powers(row, v);
            factor = power_between(under->of[v], to);
            under->of[v] = to;
        }
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++)
            s->of[i][v] = _mm512_mul_ps(s->of[i][v], factor);
    }
}

/* Lines of codes of a group, and how many of them are weights in registers at a time. Of few rows all: a
 * broadcast of x then serves 48 outputs (4 rows of bytes: half of them, see multiply_codes). */
DSPARK__INLINE size_t count_lines(way how)
{
    return is_bytes(how) ? GROUP_VECTORS / 2 : REGISTERS;
}

DSPARK__INLINE size_t lines_at_once(size_t n_rows, way how)
{
    if (n_rows == 4 && (how == BYTES_HALF || how == BYTES_POWER)) return GROUP_VECTORS / 4;
    return how == NIBBLES_PRODUCT || n_rows <= FEW ? count_lines(how) : 1;
}

/* Line l of a group as weights; vector 3 * pair + v belongs to outputs 16v .. 16v+15. Returns which it was. */
DSPARK__INLINE unsigned expand_one(__m512i w[GROUP_VECTORS], const uint8_t *codes, size_t l,
                                   const dot_tables *t, const dot_scales scales[REGISTERS],
                                   size_t n_rows, way how)
{
    fetch_line(codes + 64 * l, n_rows, how);
    if (is_bytes(how)) {
        expand_bytes(w + 2 * l, codes + 64 * l, t, how);
        return 3u << 2 * l;
    }
    __m512i line[GROUP_PAIRS];
    expand_line(line, codes + 64 * l, t, scales[l], how);
    DSPARK__UNROLL
    for (size_t j = 0; j < GROUP_PAIRS; j++) w[REGISTERS * j + l] = line[j];
    return 0x249u << l;
}

/* sum += w . the pair of x at `at`, which the same instruction loads into every lane. Of several rows these stay
 * in their order, one row is best as the compiler mixes it. */
DSPARK__INLINE void add_product(__m512 *sum, __m512i w, const unsigned char *at, size_t n_rows)
{
    if (n_rows == 1) *sum = _mm512_dpbf16_ps(*sum, (__m512bh)w, broadcast_pair(at));
    else __asm__ volatile("vdpbf16ps %2%{1to16%}, %1, %0"
                          : "+v"(*sum) : "v"(w), "m"(*(const unsigned char (*)[4])at));
}

/* A register for each row: compilers would keep one for every row and pair. */
DSPARK__INLINE void list_rows(const unsigned char *row[ROWS], const unsigned char *x, size_t x_stride,
                              size_t n_rows)
{
    row[0] = x;
    DSPARK__UNROLL
    for (size_t i = 1; i < n_rows; i++) {
        row[i] = row[i - 1] + x_stride;
        KEEP(row[i]);
    }
}

/* One group of a panel. Of several rows in an order that the compiler is kept from changing: on Zen 4 the order of
 * the same operations alone makes 8 to 11 cycles a line of bytes at 4 rows, presumably because pipes are given out
 * before operands are ready: look-ups then wait behind dot products while another pipe is idle. Expanding a
 * few lines, then all their products vector by vector, runs at 0.95 to 1.00 of the products' own speed for bytes
 * from 4 rows on (0.85 to 0.97 as the compiler mixed them), and takes 15 to 20 % off int4 from 5 rows on. */
DSPARK__INLINE void multiply_codes(__m512 of[][REGISTERS], const uint8_t *codes, const dot_tables *t,
                                   const dot_scales scales[REGISTERS], const unsigned char *x,
                                   size_t x_stride, size_t n_rows, way how)
{
    const size_t n_lines = count_lines(how), n = lines_at_once(n_rows, how);
    const unsigned char *row[ROWS];
    list_rows(row, x, x_stride, n_rows);
    DSPARK__UNROLL
    for (size_t first = 0; first < n_lines; first += n) {
        __m512i w[GROUP_VECTORS];
        unsigned live = 0;
        if (n_rows == 1) FORGET(row[0]); /* a broadcast that is kept for the next line costs a register */
        DSPARK__UNROLL
        for (size_t l = first; l < first + n; l++) {
            if (n_rows > 1) KEEP(codes);
            const unsigned these = expand_one(w, codes, l, t, scales, n_rows, how);
            DSPARK__UNROLL
            for (size_t j = 0; j < GROUP_VECTORS; j++)
                if (n_rows > 1 && these >> j & 1) __asm__ volatile("" : "+v"(w[j]));
            live |= these;
        }
        DSPARK__UNROLL
        for (size_t j = 0; j < GROUP_VECTORS; j++)
            DSPARK__UNROLL
            for (size_t i = 0; i < n_rows; i++)
                if (live >> j & 1) add_product(&of[i][j % REGISTERS], w[j], row[i] + j / REGISTERS * 4, n_rows);
    }
}

/* n groups under one row of scales, if any. */
DSPARK__INLINE void multiply_direct(sums *s, powers *under, const cursor *c, size_t x_stride,
                                    const dot_tables *t, size_t n, size_t n_rows, way how)
{
    dot_scales scales[REGISTERS];
    const dot_scales *from = scales;
    const dot_tables *rare = c->tables;
    if (how == NIBBLES_PRODUCT) FORGET(rare);
    if (has_scales(how)) _mm_prefetch((const char *)c->row + SCALES_AHEAD, _MM_HINT_T0);
    if (is_scaled(how)) change_powers(s, under, c->row, rare, n_rows, how);
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++) scales[v] = load_scales(c->row, v, rare, how);
    if (lines_at_once(n_rows, how) == 1) FORGET(from); /* registers are dearer than loads */
    for (size_t group = 0; group < n; group++)
        multiply_codes(s->of, c->codes + group * group_bytes(how), t, from, c->x + group * 2 * GROUP_K,
                       x_stride, n_rows, how);
}

/* ---- nvfp4 and many rows ---- */

/* One line of a group under a row of scales. Tables are read where they are used: the sums of 8 rows leave
 * eight registers. */
DSPARK__INLINE void multiply_line(sums *s, const uint8_t *codes, size_t v, const dot_tables *t, __m512i row,
                                  const unsigned char *const x[ROWS], size_t n_rows)
{
    __m512i w[GROUP_PAIRS];
    FORGET(t);
    fetch_line(codes + 64 * v, n_rows, NIBBLES_PRODUCT);
    expand_products(w, codes + 64 * v, t, _mm512_permutexvar_epi8(t->mantissas[v], row));
    DSPARK__UNROLL
    for (size_t j = 0; j < GROUP_PAIRS; j++)
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++) add_product(&s->of[i][v], w[j], x[i] + 4 * j, n_rows);
}

/* multiply_direct of nvfp4 for MANY rows or more. Sums come under their new powers line by line, so that these
 * multiplications, too, have products beside them. */
DSPARK__INLINE void multiply_lines(sums *s, powers *under, const cursor *c, size_t x_stride,
                                   const dot_tables *t, size_t n, size_t n_rows)
{
    _mm_prefetch((const char *)c->row + SCALES_AHEAD, _MM_HINT_T0);
    const unsigned char *x[ROWS];
    list_rows(x, c->x, x_stride, n_rows);
    const __m512i row = load_row(c->row), to = load_exponents(c->row);
    FORGET(t);
    const row_powers between = power_between_rows(under->of[0], to, t);
    under->of[0] = to;
    for (size_t group = 0; group < n; group++) {
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++) {
            if (group == 0) {
                __m512 factor = power_of_outputs(between, v, t);
                DSPARK__UNROLL
                for (size_t i = 0; i < n_rows; i++) s->of[i][v] = _mm512_mul_ps(s->of[i][v], factor);
            }
            multiply_line(s, c->codes + group * group_bytes(NIBBLES_PRODUCT), v, t, row, x, n_rows);
        }
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++) x[i] += 2 * GROUP_K;
    }
}

/* Groups [0, n_groups) under rows of scales of `block` groups each, which have the fast way. */
DSPARK__INLINE void multiply_fast(sums *s, cursor *c, size_t x_stride, const dot_tables *t, size_t block,
                                  size_t n_groups, size_t n_rows, way how)
{
    const size_t usual = how == NIBBLES_PRODUCT ? PRODUCT_BLOCK : POWER_BLOCK;
    powers under;
    start_powers(&under, how);
    if (!has_scales(how)) block = n_groups;
    for (size_t left = n_groups, n; left > 0; left -= n) {
        n = block < left ? block : left;
        if (how == NIBBLES_PRODUCT && n_rows >= MANY)
            multiply_lines(s, &under, c, x_stride, t, n == usual ? usual : n, n_rows);
        else if (is_scaled(how) && n == usual)
            multiply_direct(s, &under, c, x_stride, t, usual, n_rows, how);
        else multiply_direct(s, &under, c, x_stride, t, n, n_rows, how);
        c->codes += n * group_bytes(how);
        if (has_scales(how)) c->row += DSPARK__PANEL;
        c->x += n * 2 * GROUP_K;
    }
    if (is_scaled(how)) change_powers(s, &under, NULL, c->tables, n_rows, how);
}

/* How many rows of scales from here on have the fast way, counted up to CHECKED and the end. All of them at
 * once is the usual case: one by one they took 3 % of nvfp4's product with one row. */
DSPARK__INLINE size_t count_fast(const uint8_t *row, const fast_scales *fast, size_t n_groups,
                                 size_t block)
{
    size_t n = 0, most = (n_groups + block - 1) / block;
    if (most > CHECKED) most = CHECKED;
    if (bytes_within(row, most * DSPARK__PANEL, fast->low, fast->high)) return most;
    while (n < most && bytes_within(row + n * DSPARK__PANEL, DSPARK__PANEL, fast->low, fast->high)) n++;
    return n;
}

/* Could all sums be those of weights and x within the bounds of codes_dot.h? Zero or within 2^-78 .. 2^99
 * is enough: multiples of 2^-102 that leave room for what follows. */
DSPARK__INLINE int are_tame(const sums *s, size_t n)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), low = _mm512_set1_epi32((127 - 78) << 23);
    const __m512i range = _mm512_set1_epi32((99 + 78) << 23);
    __mmask16 wild = 0;
    DSPARK__UNROLL
    for (size_t i = 0; i < n; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++) {
            __m512i u = _mm512_and_si512(_mm512_castps_si512(s->of[i][v]), magnitude);
            wild |= _mm512_mask_cmpgt_epu32_mask(_mm512_test_epi32_mask(u, u),
                                                 _mm512_sub_epi32(u, low), range);
        }
    return wild == 0;
}

/* The same by way of memory: scales that have no fast way, and the last values of k. */
DSPARK__INLINE void multiply_through(sums *s, const dot_job *job, size_t k0, size_t n_k, size_t n_rows)
{
    _Alignas(64) float acc[ROWS * DSPARK__PANEL];
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++)
            _mm512_store_ps(acc + i * DSPARK__PANEL + 16 * v, s->of[i][v]);
    multiply_plain(job, acc, k0, n_k);
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++)
            s->of[i][v] = _mm512_load_ps(acc + i * DSPARK__PANEL + 16 * v);
}

/* One tile over all of k; n_rows and how are constants in each copy. */
DSPARK__INLINE void multiply(const dot_job *job, size_t n_rows, way how)
{
    const dspark__dot_codes *d = job->d;
    const dot_tables tables = job->tables;
    const int rows = has_scales(how);
    const size_t n_groups = d->k / GROUP_K, x_stride = d->x_stride;
    const size_t block = rows ? d->format->block / GROUP_K : 1;
    const size_t per_sum = d->group ? d->group / GROUP_K : SIZE_MAX;
    const size_t n_all = n_groups + (d->k % GROUP_K != 0);
    cursor c = {.x = job->x, .codes = codes_of(job), .row = rows ? scales_of(job) : NULL,
                .tables = &job->tables};
    sums s;
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++) s.of[i][v] = _mm512_setzero_ps();
    for (size_t group = 0, n, sum = 0; group < n_all; sum++) { /* one K-group, or all */
        size_t end = n_all - group < per_sum ? n_all : group + per_sum;
        int tame = 1; /* no power of a scale that has no fast way is left in the sums */
        for (; group < end; group += n) {
            size_t most = (end < n_groups ? end : n_groups) - group;
            n = most;
            if (rows && most > 0) {
                size_t n_fast = tame ? count_fast(c.row, &job->fast, most, block) : 0;
                n = n_fast * block < most ? n_fast * block : most;
            }
            if (n > 0) {
                multiply_fast(&s, &c, x_stride, &tables, block, n, n_rows, how);
                continue;
            }
            n = most == 0 ? 1 : block < most ? block : most;
            size_t k0 = group * GROUP_K, n_k = n * GROUP_K;
            multiply_through(&s, job, k0, d->k - k0 < n_k ? d->k - k0 : n_k, n_rows);
            if (is_scaled(how)) tame = are_tame(&s, n_rows);
            c.x += 2 * n_k;
            c.codes += n * group_bytes(how);
            if (rows) c.row += DSPARK__PANEL;
        }
        if (!d->group) break;
        finish_group(s.of, sums_of(job), group_scales_of(job) + sum * DSPARK__PANEL, sum == 0, n_rows);
    }
    if (d->group) return;
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++)
            _mm512_store_ps(sums_of(job) + i * DSPARK__PANEL + 16 * v, s.of[i][v]);
}

DSPARK__INLINE void multiply_by(const dot_job *job, size_t n_rows)
{
    switch (job->how) {
    case BYTES_HALF: multiply(job, n_rows, BYTES_HALF); break;
    case BYTES_WHOLE: multiply(job, n_rows, BYTES_WHOLE); break;
    case BYTES_POWER: multiply(job, n_rows, BYTES_POWER); break;
    case NIBBLES_PLAIN: multiply(job, n_rows, NIBBLES_PLAIN); break;
    case NIBBLES_POWER: multiply(job, n_rows, NIBBLES_POWER); break;
    case NIBBLES_PRODUCT: multiply(job, n_rows, NIBBLES_PRODUCT); break;
    default: multiply(job, n_rows, NIBBLES_INTEGER); break;
    }
}

#define TILE_OF(rows)                                                                              \
    DSPARK__NOINLINE void multiply_##rows(const dot_job *job)                                      \
    {                                                                                              \
        multiply_by(job, rows);                                                                    \
    }
TILE_OF(1)
TILE_OF(2)
TILE_OF(3)
TILE_OF(4)
TILE_OF(5)
TILE_OF(6)
TILE_OF(7)
TILE_OF(8)
#undef TILE_OF

/* Everything by way of memory. */
static void multiply_any(const dot_job *job)
{
    const dspark__dot_codes *d = job->d;
    const size_t n_k = d->group ? d->group : d->k;
    _Alignas(64) float part[PLAIN_ROWS * DSPARK__PANEL];
    float *sum = sums_of(job), *acc = d->group ? part : sum;
    for (size_t k0 = 0; k0 < d->k; k0 += n_k) {
        memset(acc, 0, job->n_rows * DSPARK__PANEL * sizeof *acc);
        multiply_plain(job, acc, k0, d->k - k0 < n_k ? d->k - k0 : n_k);
        if (d->group)
            dspark__scale_add__avx512(sum, acc, group_scales_of(job) + k0 / n_k * DSPARK__PANEL,
                                      job->n_rows, k0 == 0);
    }
}

static void run_tile(const dot_job *job)
{
    static void (*const of_one[ROWS])(const dot_job *) = {multiply_1, multiply_2, multiply_3,
                                                          multiply_4, multiply_5, multiply_6,
                                                          multiply_7, multiply_8};
    if (job->how == NO_WAY) multiply_any(job);
    else of_one[job->n_rows - 1](job);
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
    for (; job.panel < d->n_panels; job.panel++) {
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
    k->dot_rows[0][DSPARK__CODE_E4M3] = 8;
    k->dot_rows[0][DSPARK__CODE_E8M0] = 16;
    k->dot_rows[0][DSPARK__CODE_OFFSET] = 32;
    k->dot_rows[1][DSPARK__CODE_PLAIN] = 64;
    k->dot_rows[1][DSPARK__CODE_E8M0] = 16;
}

#endif
