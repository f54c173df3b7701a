/* AVX-512-BF16: a piece of attention in one go, for a group of query rows after the other. Lanes are
 * query rows: entries are multiplied as they lie, a row's maximum and sum need no step across lanes,
 * and the scaled sums pass through registers once a piece. The bits are those of gemm_bf16,
 * softmax_piece, scale_rows and attend_finish in ref/. */
#if defined(__x86_64__)
#include "kern/avx512/bf16dot.h"
#include "kern/avx512/transpose.h"

#include <math.h>

/* A group is up to 4 registers of query rows; a tile of scores is 8 entries x 3 registers or 6 x 4, one
 * of values as many rows x latent registers: 24 accumulators. Between the pairs of P lies an odd number
 * of cache lines, so that a tile's column does not crowd into a few sets of L1. */
enum { LANES = 16, MOST = 4, PIECE = DSPARK__PIECE, PAIRS = PIECE / 2, LINE = 64, STEP = 16 };
enum { AHEAD = 4 }; /* pairs of queries that come into L1 early: the entries push them out */

/* The memory of a dspark__attend, as dspark__attend_bytes counts it. */
typedef struct parts {
    unsigned char *query;  /* a group after the other: [pair][registers][16] pairs */
    float *acc;            /* [panel of latents][row][up to 64] */
    uint16_t *values;      /* of one panel: [120][up to 64][2] */
    float *scores;         /* of a group: [240][registers][16] */
    unsigned char *p;      /* a group after the other: [120] pairs for each row, p_stride apart */
    float *m, *l, *a;      /* [rows, up to whole registers] */
    uint32_t *n_valid;
} parts;

static size_t count_registers(size_t n)
{
    return (n + LANES - 1) / LANES;
}

static parts cut_memory(const dspark__attend *t)
{
    const size_t lanes = count_registers(t->n_rows) * LANES, latents = count_registers(t->n_latent);
    parts s;
    unsigned char *at = t->memory;
    s.query = at;
    at += lanes * (t->n_latent + t->n_rope) * 2;
    s.acc = (float *)(void *)at;
    at += lanes * latents * LINE;
    s.values = (uint16_t *)(void *)at;
    at += PAIRS * MOST * LINE;
    s.scores = (float *)(void *)at;
    at += PIECE * MOST * LINE;
    s.p = at;
    at += PAIRS * (lanes / LANES + lanes / LANES / 4 + 1) * LINE;
    s.m = (float *)(void *)at;
    s.l = s.m + lanes;
    s.a = s.l + lanes;
    s.n_valid = (uint32_t *)(void *)(s.a + lanes);
    return s;
}

/* Registers of the next group when n_left remain: mostly 3, never a lone one when there are others. */
static size_t group_registers(size_t n_left)
{
    if (n_left <= MOST) return n_left;
    return n_left % 3 == 1 || (n_left % 3 == 2 && n_left >= 8) ? 4 : 3;
}

static size_t panel_registers(size_t n_left)
{
    return n_left < MOST ? n_left : MOST;
}

/* ---- queries ------------------------------------------------------------------------------------ */

/* 16 rows, n of which exist, as lanes of a group: from `to` on, `stride` bytes from pair to pair. */
static void pack_rows(unsigned char *to, size_t stride, const unsigned char *rows, size_t row_stride,
                      size_t n, size_t n_pairs)
{
    for (size_t pair = 0; pair < n_pairs; pair += LANES) {
        __m512i r[LANES];
        const __mmask16 m = first_lanes(n_pairs - pair);
        for (size_t i = 0; i < LANES; i++)
            r[i] = i < n ? _mm512_maskz_loadu_epi32(m, rows + i * row_stride + pair * 4)
                         : _mm512_setzero_si512();
        transpose_words(r);
        for (size_t i = 0; i < LANES && i < n_pairs - pair; i++, to += stride)
            _mm512_store_si512((void *)to, r[i]);
    }
}

void dspark__attend_begin__avx512bf16(const dspark__attend *t)
{
    const size_t registers = count_registers(t->n_rows), n_pairs = (t->n_latent + t->n_rope) / 2;
    parts s = cut_memory(t);
    for (size_t r = 0, n; r < registers; r += n) {
        n = group_registers(registers - r);
        for (size_t v = 0; v < n; v++) {
            size_t row = (r + v) * LANES, left = t->n_rows - row;
            pack_rows(s.query + v * LINE, n * LINE,
                      (const unsigned char *)t->query + row * t->query_stride, t->query_stride,
                      left < LANES ? left : LANES, n_pairs);
        }
        s.query += n * LINE * n_pairs;
    }
    for (size_t i = 0; i < registers * LANES; i++) {
        s.m[i] = -INFINITY;
        s.l[i] = 0;
        s.n_valid[i] = 0;
    }
}

/* ---- scores ------------------------------------------------------------------------------------- */

/* Lines that come into L2 while tiles of scores run: the rows of a later piece, one line per pair. */
typedef struct fetch_list {
    const void *const *rows;
    size_t n, bytes; /* of a row */
} fetch_list;

typedef struct score_job {
    const void *const *entries;
    size_t n, n_pairs;
    const unsigned char *query; /* of the group */
    const uint32_t *n_valid;
    float scale;
    float *scores, *most;
} score_job;

/* n_rows entries from `first` on times n_registers of query rows. Places behind the last entry take
 * that one again; nobody looks at them. */
DSPARK__INLINE void score_tile(const score_job *j, size_t first, size_t n_rows, size_t n_registers,
                               const char *fetch)
{
    const __m512 scale = _mm512_set1_ps(j->scale), none = _mm512_set1_ps(-INFINITY);
    const unsigned char *row[8], *q = j->query;
    const size_t end = j->n_pairs * 4;
    __m512 sum[8][MOST];
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++) {
        row[i] = j->entries[first + i < j->n ? first + i : j->n - 1];
        DSPARK__UNROLL
        for (size_t v = 0; v < n_registers; v++) sum[i][v] = _mm512_setzero_ps();
    }
    for (size_t at = 0; at < end; at += 4, q += n_registers * LINE) {
        if (fetch) {
            _mm_prefetch(fetch, _MM_HINT_T1);
            fetch += LINE;
        }
        __m512bh part[MOST];
        DSPARK__UNROLL
        for (size_t v = 0; v < n_registers; v++) {
            _mm_prefetch((const char *)q + (AHEAD * n_registers + v) * LINE, _MM_HINT_T0);
            part[v] = (__m512bh)_mm512_load_si512((const void *)(q + v * LINE));
        }
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++) {
            __m512bh two = broadcast_pair(row[i] + at);
            DSPARK__UNROLL
            for (size_t v = 0; v < n_registers; v++)
                sum[i][v] = _mm512_dpbf16_ps(sum[i][v], part[v], two);
        }
    }
    DSPARK__UNROLL
    for (size_t v = 0; v < n_registers; v++) {
        __m512i valid = _mm512_load_si512((const void *)(j->n_valid + v * LANES));
        __m512 most = _mm512_load_ps(j->most + v * LANES);
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++) {
            __mmask16 m = _mm512_cmplt_epu32_mask(_mm512_set1_epi32((int)(first + i)), valid);
            __m512 s = _mm512_mask_mul_ps(none, m, sum[i][v], scale);
            most = _mm512_max_ps(s, most); /* a NaN in s leaves most as it is */
            _mm512_store_ps(j->scores + ((first + i) * n_registers + v) * LANES, s);
        }
        _mm512_store_ps(j->most + v * LANES, most);
    }
}

DSPARK__INLINE void score_tiles(const score_job *j, size_t n_rows, size_t n_registers, fetch_list *f)
{
    for (size_t first = 0; first < j->n; first += n_rows) {
        if (f->n == 0) {
            score_tile(j, first, n_rows, n_registers, NULL);
            continue;
        }
        const void *fetch = f->rows[0];
        size_t n = j->n_pairs * LINE / f->bytes; /* rows of one page follow each other */
        if (n == 0) n = 1;
        if (n > f->n) n = f->n;
        f->rows += n;
        f->n -= n;
        score_tile(j, first, n_rows, n_registers, fetch);
    }
}

static void score_group(const score_job *j, size_t n_registers, fetch_list *f)
{
    switch (n_registers) {
    case 1: score_tiles(j, 8, 1, f); break;
    case 2: score_tiles(j, 8, 2, f); break;
    case 3: score_tiles(j, 8, 3, f); break;
    default: score_tiles(j, 6, 4, f); break;
    }
}

/* ---- softmax ------------------------------------------------------------------------------------ */

static size_t p_stride(size_t n_registers)
{
    return (n_registers | 1) * LINE;
}

DSPARK__INLINE __m512 canonical_lanes(__m512 v)
{
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(v, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}

/* One register of rows; s->p is that of the group. p is 0, at least FLT_MIN, or NaN, so the
 * instruction that rounds to bf16 has
 * nothing to flush; the payload of a NaN ends in l and in a last conversion, which make it canonical.
 * masked: some row sees fewer than n entries. */
DSPARK__INLINE void soften(const parts *s, size_t row, size_t v, size_t n_registers, size_t n,
                           const __m512 most, int masked)
{
    _Alignas(64) static const uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,
                                                    21, 6, 22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                    11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(ORDER);
    const __m512i valid = _mm512_load_si512((const void *)(s->n_valid + row));
    const size_t stride = p_stride(n_registers);
    const float *score = s->scores + v * LANES;
    unsigned char *p = s->p + v * LINE;
    __m512 sum[STEP], e[2];
    DSPARK__UNROLL
    for (size_t t = 0; t < STEP; t++) sum[t] = _mm512_setzero_ps();
    for (size_t j = 0; j < n; j += STEP) {
        DSPARK__UNROLL
        for (size_t t = 0; t < STEP; t++, score += n_registers * LANES) {
            e[t % 2] = exp_lanes(_mm512_sub_ps(_mm512_load_ps(score), most));
            if (masked) {
                __m512i at = _mm512_set1_epi32((int)(j + t));
                e[t % 2] = _mm512_maskz_mov_ps(_mm512_cmplt_epu32_mask(at, valid), e[t % 2]);
            }
            sum[t] = _mm512_add_ps(sum[t], e[t % 2]);
            if (t % 2 == 0) continue;
            __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(e[1], e[0]);
            _mm512_store_si512((void *)p, _mm512_permutexvar_epi16(order, pairs));
            p += stride;
        }
    }
    DSPARK__UNROLL
    for (size_t width = STEP / 2; width > 0; width /= 2)
        DSPARK__UNROLL
        for (size_t t = 0; t < width; t++) sum[t] = _mm512_add_ps(sum[t], sum[t + width]);
    const __mmask16 any = _mm512_test_epi32_mask(valid, valid);
    const __m512 m = _mm512_load_ps(s->m + row), l = _mm512_load_ps(s->l + row);
    const __m512 a = canonical_lanes(exp_lanes(_mm512_sub_ps(m, most)));
    _mm512_store_ps(s->a + row, _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), any, a));
    _mm512_store_ps(s->l + row,
                    _mm512_mask_mov_ps(l, any, canonical_lanes(_mm512_fmadd_ps(l, a, sum[0]))));
    _mm512_store_ps(s->m + row, _mm512_mask_mov_ps(m, any, canonical_lanes(most)));
}

DSPARK__NOINLINE void soften_whole(const parts *s, size_t row, size_t v, size_t n_registers,
                                   size_t n, __m512 most)
{
    soften(s, row, v, n_registers, n, most, 0);
}

DSPARK__NOINLINE void soften_masked(const parts *s, size_t row, size_t v, size_t n_registers,
                                    size_t n, __m512 most)
{
    soften(s, row, v, n_registers, n, most, 1);
}

static void soften_group(const parts *s, const float *most, size_t row, size_t n_registers, size_t n)
{
    for (size_t v = 0; v < n_registers; v++, row += LANES) {
        __m512i valid = _mm512_load_si512((const void *)(s->n_valid + row));
        __m512i all = _mm512_set1_epi32((int)n);
        __m512 m = _mm512_add_ps(_mm512_load_ps(most + v * LANES), _mm512_setzero_ps());
        if (n % STEP == 0 && _mm512_cmpeq_epi32_mask(valid, all) == 0xffff)
            soften_whole(s, row, v, n_registers, n, m);
        else
            soften_masked(s, row, v, n_registers, n, m);
    }
}

/* ---- values ------------------------------------------------------------------------------------- */

/* The panel of latents from `from` on: n_registers of them, out of every two entries a pair of k. */
static void pack_panel(uint16_t *to, const void *const *entries, size_t n, size_t from,
                       size_t n_latent, size_t n_registers)
{
    _Alignas(64) static const uint16_t ORDER[2][32] = {
        {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    const __m512i low = _mm512_load_si512(ORDER[0]), high = _mm512_load_si512(ORDER[1]);
    for (size_t i = 0; i < n; i += 2) {
        for (size_t v = 0; v < n_registers; v += 2) {
            size_t at = from + v * LANES, left = n_latent - at;
            __mmask32 m = left >= 32 ? 0xffffffffu : (1u << left) - 1;
            __m512i a = _mm512_maskz_loadu_epi16(m, bf16_at(entries[i], at));
            __m512i b = _mm512_setzero_si512();
            if (i + 1 < n) b = _mm512_maskz_loadu_epi16(m, bf16_at(entries[i + 1], at));
            _mm512_store_si512((void *)to, _mm512_permutex2var_epi16(a, low, b));
            to += 2 * LANES;
            if (v + 1 == n_registers) break;
            _mm512_store_si512((void *)to, _mm512_permutex2var_epi16(a, high, b));
            to += 2 * LANES;
        }
    }
}

typedef struct value_job {
    const uint16_t *values; /* of the panel */
    size_t n_pairs;
    const unsigned char *p; /* of the tile's first row */
    size_t p_stride;
    const float *a;
    int first;
    float *acc;
} value_job;

/* n_rows query rows times n_registers of latents. */
DSPARK__INLINE void value_tile(const value_job *j, size_t n_rows, size_t n_registers)
{
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    const __m512i sign = _mm512_set1_epi32((int)0x80000000u);
    const uint16_t *w = j->values;
    const unsigned char *p = j->p;
    float *acc = j->acc;
    const char *ahead = (const char *)(acc + n_rows * n_registers * LANES);
    __m512 sum[8][MOST];
    int scaled = 0;
    for (size_t i = 0; i < n_rows; i++) scaled |= j->a[i] != 1.0f;
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_registers; v++)
            sum[i][v] = j->first ? _mm512_setzero_ps()
                                 : _mm512_load_ps(acc + (i * n_registers + v) * LANES);
    if (scaled && !j->first) { /* a product with 1 changes nothing */
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++) {
            const __m512 factor = _mm512_set1_ps(j->a[i]);
            DSPARK__UNROLL
            for (size_t v = 0; v < n_registers; v++) {
                __m512i u = _mm512_castps_si512(_mm512_mul_ps(sum[i][v], factor));
                __mmask16 small = _mm512_testn_epi32_mask(u, exponent);
                sum[i][v] = _mm512_castsi512_ps(_mm512_mask_and_epi32(u, small, u, sign));
            }
        }
    }
    for (size_t pair = 0; pair < j->n_pairs; pair++, w += n_registers * 2 * LANES, p += j->p_stride) {
        if (pair < n_rows * n_registers) _mm_prefetch(ahead + pair * LINE, _MM_HINT_T0); /* next tile */
        __m512bh part[MOST];
        DSPARK__UNROLL
        for (size_t v = 0; v < n_registers; v++)
            part[v] = (__m512bh)_mm512_load_si512((const void *)(w + v * 2 * LANES));
        DSPARK__UNROLL
        for (size_t i = 0; i < n_rows; i++) {
            __m512bh two = broadcast_pair(p + 4 * i);
            DSPARK__UNROLL
            for (size_t v = 0; v < n_registers; v++)
                sum[i][v] = _mm512_dpbf16_ps(sum[i][v], part[v], two);
        }
    }
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_registers; v++)
            _mm512_store_ps(acc + (i * n_registers + v) * LANES, sum[i][v]);
}

DSPARK__INLINE void value_rows(const value_job *j, size_t n_rows, size_t n_registers)
{
    switch (n_rows) {
    case 1: value_tile(j, 1, n_registers); break;
    case 2: value_tile(j, 2, n_registers); break;
    case 3: value_tile(j, 3, n_registers); break;
    case 4: value_tile(j, 4, n_registers); break;
    case 5: value_tile(j, 5, n_registers); break;
    default: value_tile(j, 6, n_registers); break;
    }
}

DSPARK__NOINLINE void value_tiles(const value_job *j, size_t n_rows, size_t n_registers)
{
    switch (n_registers) {
    case 1: value_rows(j, n_rows, 1); break;
    case 2: value_rows(j, n_rows, 2); break;
    case 3: value_rows(j, n_rows, 3); break;
    default: value_rows(j, n_rows, 4); break;
    }
}

/* All rows times one panel of latents; acc is the panel's. */
static void value_panel(const dspark__attend *t, const parts *s, value_job *j, float *acc,
                        size_t n_registers)
{
    const size_t registers = count_registers(t->n_rows);
    const unsigned char *p = s->p;
    for (size_t r = 0, n; r < registers; r += n) {
        n = group_registers(registers - r);
        size_t row = r * LANES, left = t->n_rows - row, n_rows = left < n * LANES ? left : n * LANES;
        j->p_stride = p_stride(n);
        for (size_t i = 0, tile; i < n_rows; i += tile, acc += tile * n_registers * LANES) {
            tile = tile_rows(n_rows - i, 6);
            j->p = p + 4 * i;
            j->a = s->a + row + i;
            j->acc = acc;
            value_tiles(j, tile, n_registers);
        }
        p += PAIRS * j->p_stride;
    }
}

/* ---- a piece ------------------------------------------------------------------------------------ */

void dspark__attend_piece__avx512bf16(const dspark__attend *t, const dspark__attend_entries *e)
{
    const size_t registers = count_registers(t->n_rows), n_pairs = (t->n_latent + t->n_rope) / 2;
    const size_t latents = count_registers(t->n_latent);
    _Alignas(64) float most[MOST * LANES];
    parts s = cut_memory(t);
    unsigned char *const p = s.p;
    fetch_list fetch = {e->next, e->n_next, e->next_bytes};
    memcpy(s.n_valid, e->n_valid, t->n_rows * sizeof *s.n_valid);
    for (size_t r = 0, n; r < registers; r += n) {
        n = group_registers(registers - r);
        size_t row = r * LANES;
        score_job j = {e->entries, e->n,     n_pairs,  s.query + row * n_pairs * 4,
                       s.n_valid + row, t->scale, s.scores, most};
        memcpy(most, s.m + row, n * LANES * sizeof *most);
        score_group(&j, n, &fetch);
        soften_group(&s, most, row, n, e->n);
        s.p += PAIRS * p_stride(n);
    }
    s.p = p;
    value_job j = {.values = s.values, .n_pairs = (e->n + 1) / 2, .first = e->first};
    for (size_t r = 0, n; r < latents; r += n) {
        n = panel_registers(latents - r);
        pack_panel(s.values, e->entries, e->n, r * LANES, t->n_latent, n);
        value_panel(t, &s, &j, s.acc + r * LANES * t->n_rows, n);
    }
}

void dspark__attend_end__avx512bf16(const dspark__attend *t, uint16_t *out, size_t out_stride)
{
    const size_t latents = count_registers(t->n_latent);
    const parts s = cut_memory(t);
    const float *acc = s.acc;
    for (size_t r = 0, n; r < latents; r += n) {
        n = panel_registers(latents - r);
        for (size_t i = 0; i < t->n_rows; i++) {
            const __m512 sum = _mm512_set1_ps(s.l[i]);
            for (size_t v = 0; v < n; v++, acc += LANES) {
                size_t o = (r + v) * LANES;
                __m512 y = _mm512_div_ps(_mm512_load_ps(acc), sum);
                y = _mm512_add_ps(y, _mm512_setzero_ps());
                store_bf16(out, i * out_stride + o, first_lanes(t->n_latent - o), y);
            }
        }
    }
}

#endif
