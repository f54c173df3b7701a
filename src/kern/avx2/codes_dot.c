/* AVX2: panels of codes times few rows. A group of 8 k is expanded into L1 as fp16, which one
 * instruction widens when it is loaded: 8-bit floats are fp16 but for a shift and a power of two, small
 * integers and E2M1 are fp16 with an empty lower half. The bits are those of decode and gemm_bf16; other
 * tables, scales and x for which the power of two is not exact, and the end of k, go through these two. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"

#include "base/fpenv.h"
#include "kern/dot_bounds.h"

enum {
    GROUP_K = 8,
    PAIRS = 4,
    VECTORS = 6,
    HALF = VECTORS / 2,
    SLOTS = GROUP_K * DSPARK__PANEL, /* fp16 of a group */
    STEP = 128,                      /* values of k that are looked at together */
    TILE_ROWS = 6,
    ROWS = 16,                       /* for which weights are expanded once */
    SIDE = 3,                        /* panels that are read side by side */
    LEAD = 2,                        /* one row: groups that are expanded before they are multiplied */
    RING = 4,
    LINE = 64
};

/* What p points at may have changed, for all that the compiler knows: it is loaded again. */
#define FORGET(p) __asm__ volatile("" : "+r"(p) : : "memory")

typedef enum form {
    FLOATS_E4, /* sign, 4 bits of exponent, 3 of mantissa */
    FLOATS_E5,
    INTEGERS,
    NIBBLES,
    NO_FORM
} form;

/* Scales that are powers of two divide the sums, so that weights go without: NONE. */
typedef enum scaling { NONE, MULTIPLY, SUBTRACT } scaling;

typedef struct dot_job {
    const dspark__dot_codes *d;
    size_t row, panel;
    size_t n_rows, n_panels;
    form form;
    scaling how;
    int power;        /* an expanded weight is 2^-power of the true one; x make up for it */
    __m256i table;    /* NIBBLES: the upper halves of 16 fp16, twice */
} dot_job;

/* What the product of one panel and a few groups of k reads. */
typedef struct chunk {
    const uint8_t *codes;
    const uint16_t *w;   /* the same expanded, when there is more than one row */
    const float *x;      /* fp32; row i at x + i * STEP */
    size_t n_groups;
    const float *scales; /* 48 for each run of groups: factors of the weights, or what is taken off them, or
                          * (NONE) factors of the sums before the run; or NULL */
    size_t left, block;  /* groups of the first run, and of the others */
    const char *fetch;   /* n_lines lines are fetched meanwhile for each group */
    size_t n_lines;
} chunk;

/* ---- expansion ------------------------------------------------------------------------------- */

DSPARK__INLINE size_t group_bytes(form f)
{
    return f == NIBBLES ? 192 : 384;
}

/* Where the fp16 of 8 outputs v of value k of the group lie: 8-bit codes in order of k, so that 16
 * outputs are stored at once; of nibbles, values k and k + 4 are. */
DSPARK__INLINE size_t slot_of(form f, size_t k, size_t v)
{
    return f == NIBBLES ? v * 64 + k % 4 * 16 + k / 4 * 8 : k * DSPARK__PANEL + v * 8;
}

DSPARK__INLINE void expand_bytes(uint16_t *to, const uint8_t *codes, form f, size_t first, size_t end)
{
    const __m256i signs = _mm256_set1_epi16((short)0xbf80), upper = _mm256_set1_epi16((short)0xff00);
    const __m256i low_128 = _mm256_set1_epi16(0x0080), high_128 = _mm256_set1_epi16((short)0x8000);
    const __m256i thousand = _mm256_set1_epi16(0x6480), lower = _mm256_set1_epi16(0x00ff);
    DSPARK__UNROLL
    for (size_t i = 3 * first; i < 3 * end; i++) {
        __m256i c = _mm256_load_si256((const void *)(codes + 32 * i)), even, odd;
        if (f == FLOATS_E4) { /* times 128 is a shift that extends the sign */
            even = _mm256_and_si256(_mm256_maddubs_epi16(low_128, c), signs);
            odd = _mm256_and_si256(_mm256_maddubs_epi16(high_128, c), signs);
        } else if (f == FLOATS_E5) {
            even = _mm256_slli_epi16(c, 8);
            odd = _mm256_and_si256(c, upper);
        } else { /* 1024 + 128 + code */
            even = _mm256_xor_si256(_mm256_and_si256(c, lower), thousand);
            odd = _mm256_xor_si256(_mm256_srli_epi16(c, 8), thousand);
        }
        uint16_t *at = to + i / 3 * 2 * DSPARK__PANEL + i % 3 * 16;
        _mm256_store_si256((void *)at, even);
        _mm256_store_si256((void *)(at + DSPARK__PANEL), odd);
    }
}

DSPARK__INLINE void expand_nibbles(uint16_t *to, const uint8_t *codes, __m256i table, size_t first,
                                   size_t end, int turned)
{
    /* Of 8 outputs: evens of pairs 0 and 1, odds of them; the same of pairs 2 and 3. */
    const __m256i order = _mm256_broadcastsi128_si256(
        turned ? _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
               : _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15));
    const __m256i lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    DSPARK__UNROLL
    for (size_t v = first * VECTORS / PAIRS; v < end * VECTORS / PAIRS; v++) {
        uint16_t *at = to + 64 * v;
        __m256i c = _mm256_load_si256((const void *)(codes + 32 * v));
        if (turned) c = _mm256_or_si256(_mm256_srli_epi32(c, 3), _mm256_slli_epi32(c, 29));
        c = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(c, order), lanes);
        DSPARK__UNROLL
        for (size_t j = 0; j < 2; j++) {
            __m256i n = _mm256_and_si256(j ? _mm256_srli_epi16(c, 4) : c, nibble);
            __m256i upper = _mm256_shuffle_epi8(table, n);
            _mm256_store_si256((void *)(at + 32 * j), _mm256_unpacklo_epi8(zero, upper));
            _mm256_store_si256((void *)(at + 32 * j + 16), _mm256_unpackhi_epi8(zero, upper));
        }
    }
}

/* Parts [first, end) of the four of a group. Nibbles that are multiplied by scales are turned. */
DSPARK__INLINE void expand(uint16_t *to, const uint8_t *codes, __m256i table, form f, scaling how,
                           size_t first, size_t end)
{
    if (f == NIBBLES) expand_nibbles(to, codes, table, first, end, how == MULTIPLY);
    else expand_bytes(to, codes, f, first, end);
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* 2^(old - new) of 8 scale bytes; NULL is a scale of 1. */
DSPARK__INLINE __m256 load_ratio(const uint8_t *old, const uint8_t *new)
{
    const __m256i one = _mm256_set1_epi32(127);
    __m256i o = old ? _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)old)) : one;
    __m256i n = new ? _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)new)) : one;
    __m256i e = _mm256_add_epi32(_mm256_sub_epi32(o, n), one);
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}

/* One row of scale bytes as chunk.scales has it; old: the row before, or NULL. */
static void prepare_row(float *to, const dot_job *job, const uint8_t *old, const uint8_t *row)
{
    for (size_t i = 0; i < DSPARK__PANEL; i += 8) {
        __m128i b = _mm_loadl_epi64((const void *)(row + i));
        __m256 y;
        if (job->how == NONE) {
            y = load_ratio(old ? old + i : NULL, row + i);
        } else if (job->how == MULTIPLY) { /* 2^-8 of it, see prepare_nibbles */
            y = _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(b), 7));
        } else {
            __m256i zero_point = _mm256_cvtepi8_epi32(b);
            if (job->form == INTEGERS)
                zero_point = _mm256_add_epi32(zero_point, _mm256_set1_epi32(1024 + 128));
            y = _mm256_cvtepi32_ps(zero_point);
        }
        _mm256_store_ps(to + i, y);
    }
}

/* Sums under the last row of a span become true ones. */
static void end_scales(float *acc, const uint8_t *row, size_t n_rows)
{
    for (size_t i = 0; i < DSPARK__PANEL; i += 8) {
        __m256 ratio = load_ratio(row + i, NULL);
        for (float *at = acc + i; at < acc + n_rows * DSPARK__PANEL; at += DSPARK__PANEL)
            _mm256_store_ps(at, _mm256_mul_ps(_mm256_load_ps(at), ratio));
    }
}

/* ---- products -------------------------------------------------------------------------------- */

typedef struct sums {
    __m256 of[TILE_ROWS][VECTORS];
} sums;

DSPARK__INLINE __m256 take_weights(const uint16_t *w, const float *scale, scaling how)
{
    __m256 y = _mm256_cvtph_ps(_mm_load_si128((const void *)w));
    if (how == MULTIPLY) y = _mm256_mul_ps(y, _mm256_load_ps(scale));
    if (how == SUBTRACT) y = _mm256_sub_ps(y, _mm256_load_ps(scale));
    return y;
}

DSPARK__INLINE void load_sums(sums *s, const float *acc, size_t n_rows, size_t n_vectors)
{
    DSPARK__UNROLL
    for (size_t r = 0; r < n_rows; r++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++)
            s->of[r][v] = _mm256_load_ps(acc + r * DSPARK__PANEL + 8 * v);
}

DSPARK__INLINE void store_sums(float *acc, const sums *s, size_t n_rows, size_t n_vectors)
{
    DSPARK__UNROLL
    for (size_t r = 0; r < n_rows; r++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++)
            _mm256_store_ps(acc + r * DSPARK__PANEL + 8 * v, s->of[r][v]);
}

DSPARK__INLINE void rescale(sums *s, const float *ratio, size_t n_rows, size_t n_vectors)
{
    DSPARK__UNROLL
    for (size_t v = 0; v < n_vectors; v++) {
        __m256 y = _mm256_load_ps(ratio + 8 * v);
        DSPARK__UNROLL
        for (size_t r = 0; r < n_rows; r++) s->of[r][v] = _mm256_mul_ps(s->of[r][v], y);
    }
}

/* One row: sums stay in registers, and between the products of a group the next but one is expanded: they
 * wait for different things. */
DSPARK__INLINE void multiply_row(const dot_job *job, float *acc, const chunk *from, form f, scaling how)
{
    _Alignas(64) uint16_t ring[RING][SLOTS];
    const __m256i table = job->table;
    const size_t lines = group_bytes(f) / LINE;
    chunk c = *from;
    uint16_t *w = ring[0];
    sums sum;
    load_sums(&sum, acc, 1, VECTORS);
    for (size_t g = 0; g < LEAD && g < c.n_groups; g++, c.codes += group_bytes(f))
        expand(ring[g], c.codes, table, f, how, 0, PAIRS);
    if (how == NONE && c.scales) rescale(&sum, c.scales, 1, VECTORS);
    for (size_t g = 0; g < c.n_groups; g++, c.left--, c.x += GROUP_K) {
        if (c.left == 0) {
            c.left = c.block;
            c.scales += DSPARK__PANEL;
            if (how == NONE) rescale(&sum, c.scales, 1, VECTORS);
        }
        const uint16_t *now = w + g % RING * SLOTS;
        uint16_t *then = w + (g + LEAD) % RING * SLOTS;
        FORGET(w);
        DSPARK__UNROLL
        for (size_t i = 0; i < GROUP_K; i++) {
            const size_t k = i ^ 1; /* odd elements first */
            __m256 x = _mm256_broadcast_ss(c.x + k);
            DSPARK__UNROLL
            for (size_t v = 0; v < VECTORS; v++)
                sum.of[0][v] = _mm256_fmadd_ps(take_weights(now + slot_of(f, k, v), c.scales + 8 * v, how),
                                               x, sum.of[0][v]);
            if (i < lines) _mm_prefetch(c.fetch + i * LINE, _MM_HINT_T1);
            if (i % 2 == 1 && g + LEAD < c.n_groups)
                expand(then, c.codes, table, f, how, i / 2, i / 2 + 1);
        }
        c.codes += group_bytes(f);
        c.fetch += group_bytes(f);
    }
    store_sums(acc, &sum, 1, VECTORS);
}

/* n_rows rows, 8 * n_vectors outputs from acc and w on; all counts are constants in each copy. With 6
 * vectors the broadcasts are held and weights taken one by one, else the other way round. */
DSPARK__INLINE void multiply(float *acc, const chunk *from, size_t first, size_t n_rows, size_t n_vectors,
                             form f, scaling how)
{
    const char *fetch = from->fetch;
    const size_t n_lines = from->n_lines;
    const uint16_t *w = from->w + slot_of(f, 0, first);
    const float *x = from->x, *scales = from->scales;
    size_t left = from->left;
    sums sum;
    acc += 8 * first;
    if (scales) scales += 8 * first;
    load_sums(&sum, acc, n_rows, n_vectors);
    if (how == NONE && scales) rescale(&sum, scales, n_rows, n_vectors);
    for (size_t g = from->n_groups; g > 0; g--, left--, x += GROUP_K, w += SLOTS) {
        if (left == 0) {
            left = from->block;
            scales += DSPARK__PANEL;
            if (how == NONE) rescale(&sum, scales, n_rows, n_vectors);
        }
        for (size_t line = 0; line < n_lines; line++, fetch += LINE) _mm_prefetch(fetch, _MM_HINT_T1);
        DSPARK__UNROLL
        for (size_t i = 0; i < GROUP_K; i++) {
            const size_t k = i ^ 1;
            __m256 held[HALF];
            if (n_vectors == VECTORS) {
                DSPARK__UNROLL
                for (size_t r = 0; r < n_rows; r++) held[r] = _mm256_broadcast_ss(x + r * STEP + k);
                DSPARK__UNROLL
                for (size_t v = 0; v < n_vectors; v++) {
                    __m256 part = take_weights(w + slot_of(f, k, v), scales + 8 * v, how);
                    DSPARK__UNROLL
                    for (size_t r = 0; r < n_rows; r++)
                        sum.of[r][v] = _mm256_fmadd_ps(part, held[r], sum.of[r][v]);
                }
                continue;
            }
            DSPARK__UNROLL
            for (size_t v = 0; v < n_vectors; v++)
                held[v] = take_weights(w + slot_of(f, k, v), scales + 8 * v, how);
            DSPARK__UNROLL
            for (size_t r = 0; r < n_rows; r++) {
                __m256 b = _mm256_broadcast_ss(x + r * STEP + k);
                DSPARK__UNROLL
                for (size_t v = 0; v < n_vectors; v++)
                    sum.of[r][v] = _mm256_fmadd_ps(held[v], b, sum.of[r][v]);
            }
        }
    }
    store_sums(acc, &sum, n_rows, n_vectors);
}

DSPARK__INLINE void multiply_by(const dot_job *job, float *acc, const chunk *from, size_t n_rows,
                                size_t n_vectors)
{
    const scaling how = job->how;
    const size_t n_lines = from->n_lines;
    chunk one = *from, *c = &one;
    size_t done = 0; /* lines of each group */
    for (size_t v = 0; v < VECTORS; v += n_vectors) {
        c->n_lines = n_lines * (v + n_vectors) / VECTORS - done;
        c->fetch = from->fetch + done * c->n_groups * LINE;
        done += c->n_lines;
        if (job->form != NIBBLES) { /* in the order of FLOATS_E4 */
            if (how == NONE) multiply(acc, c, v, n_rows, n_vectors, FLOATS_E4, NONE);
            else multiply(acc, c, v, n_rows, n_vectors, FLOATS_E4, SUBTRACT);
        } else if (how == NONE) multiply(acc, c, v, n_rows, n_vectors, NIBBLES, NONE);
        else if (how == MULTIPLY) multiply(acc, c, v, n_rows, n_vectors, NIBBLES, MULTIPLY);
        else multiply(acc, c, v, n_rows, n_vectors, NIBBLES, SUBTRACT);
    }
}

/* These are called, not inlined: no arithmetic may move to where MXCSR is the host's. */
DSPARK__NOINLINE void multiply_1(const dot_job *job, float *acc, const chunk *c)
{
    const scaling how = job->how;
    switch (job->form) {
    case FLOATS_E4: multiply_row(job, acc, c, FLOATS_E4, NONE); break;
    case FLOATS_E5: multiply_row(job, acc, c, FLOATS_E5, NONE); break;
    case INTEGERS: multiply_row(job, acc, c, INTEGERS, SUBTRACT); break;
    default:
        if (how == NONE) multiply_row(job, acc, c, NIBBLES, NONE);
        else if (how == MULTIPLY) multiply_row(job, acc, c, NIBBLES, MULTIPLY);
        else multiply_row(job, acc, c, NIBBLES, SUBTRACT);
        break;
    }
}

/* Tiles as in gemm_fma.c, but 4 rows x 24 outputs fit: no mask, no shifts. */
#define TILE_OF(rows, vectors)                                                                     \
    DSPARK__NOINLINE void multiply_##rows(const dot_job *job, float *acc, const chunk *c)          \
    {                                                                                              \
        multiply_by(job, acc, c, rows, vectors);                                                   \
    }
TILE_OF(2, 6)
TILE_OF(3, 3)
TILE_OF(4, 3)
TILE_OF(5, 2)
TILE_OF(6, 2)
#undef TILE_OF

DSPARK__NOINLINE void expand_all(uint16_t *to, const dot_job *job, const uint8_t *codes, size_t n_groups)
{
    const form f = job->form;
    const __m256i table = job->table;
    for (; n_groups > 0; n_groups--, codes += group_bytes(f), to += SLOTS) {
        if (f == NIBBLES && job->how == MULTIPLY) expand(to, codes, table, NIBBLES, MULTIPLY, 0, PAIRS);
        else if (f == NIBBLES) expand(to, codes, table, NIBBLES, NONE, 0, PAIRS);
        else if (f == INTEGERS) expand(to, codes, table, INTEGERS, NONE, 0, PAIRS);
        else if (f == FLOATS_E4) expand(to, codes, table, FLOATS_E4, NONE, 0, PAIRS);
        else expand(to, codes, table, FLOATS_E5, NONE, 0, PAIRS);
    }
}

/* x times 2^power, as the product reads it: subnormal ones are zero. */
DSPARK__NOINLINE void widen(float *to, const dot_job *job, size_t k0, size_t n)
{
    const __m256 factor = _mm256_castsi256_ps(_mm256_set1_epi32((127 + job->power) << 23));
    for (size_t i = 0; i < job->n_rows; i++) {
        const unsigned char *x = (const unsigned char *)job->d->x + (job->row + i) * job->d->x_stride;
        for (size_t k = 0; k < n; k += 8)
            _mm256_store_ps(to + i * STEP + k, _mm256_mul_ps(widen_bf16(load_8(x, k0 + k)), factor));
    }
}

static void run_chunk(const dot_job *job, float *acc, chunk c)
{
    static void (*const tiles[TILE_ROWS])(const dot_job *, float *, const chunk *) = {
        multiply_1, multiply_2, multiply_3, multiply_4, multiply_5, multiply_6};
    _Alignas(64) uint16_t w[STEP / GROUP_K * SLOTS];
    if (job->n_rows == 1) {
        multiply_1(job, acc, &c);
        return;
    }
    expand_all(w, job, c.codes, c.n_groups);
    c.w = w;
    for (size_t row = 0, n; row < job->n_rows; row += n) {
        n = tile_rows(job->n_rows - row, TILE_ROWS);
        tiles[n - 1](job, acc + row * DSPARK__PANEL, &c);
        c.x += n * STEP;
        c.n_lines = 0;
    }
}

/* acc [n_panels][acc_rows][48] += values k0 .. k0+n_k-1, whole groups. */
static void multiply_fast(const dot_job *job, float *acc, size_t acc_rows, size_t k0, size_t n_k)
{
    _Alignas(64) float x[ROWS * STEP], scales[(STEP / GROUP_K + 1) * DSPARK__PANEL];
    const dspark__dot_codes *d = job->d;
    const int scaled = d->format->scale != DSPARK__CODE_PLAIN;
    const size_t end = (k0 + n_k) / GROUP_K;
    const size_t block = scaled ? d->format->block / GROUP_K : SIZE_MAX, bytes = group_bytes(job->form);
    unsigned host = _mm_getcsr();
    _mm_setcsr(host | DSPARK__MXCSR_FTZ_DAZ);
    for (size_t i = 0; i < DSPARK__PANEL; i++) scales[i] = 1024 + 128;
    for (size_t group = k0 / GROUP_K, n; group < end; group += n) {
        n = end - group < STEP / GROUP_K ? end - group : STEP / GROUP_K;
        widen(x, job, group * GROUP_K, n * GROUP_K);
        for (size_t p = 0; p < job->n_panels; p++) {
            const uint8_t *rows = scaled ? d->scales + (job->panel + p) * d->scale_stride : NULL;
            chunk c = {.codes = d->codes + (job->panel + p) * d->code_stride + group * bytes, .x = x,
                        .n_groups = n, .left = block - group % block, .block = block};
            if (job->how == SUBTRACT || scaled) c.scales = scales;
            c.fetch = (const char *)c.codes + n * bytes; /* the next chunk, if there is one */
            if (d->k / GROUP_K - group > n) c.n_lines = bytes / LINE;
            /* The row that the sums are under: none, the one that goes on, or the one before. */
            const uint8_t *under = NULL;
            if (scaled && group * GROUP_K > k0) under = rows + (group - 1) / block * DSPARK__PANEL;
            for (size_t r = group / block; scaled && r <= (group + n - 1) / block; r++) {
                const uint8_t *row = rows + r * DSPARK__PANEL;
                prepare_row(scales + (r - group / block) * DSPARK__PANEL, job, under, row);
                under = row;
            }
            run_chunk(job, acc + p * acc_rows * DSPARK__PANEL, c);
            if (scaled && job->how == NONE && group + n == end)
                end_scales(acc + p * acc_rows * DSPARK__PANEL, rows + (end - 1) / block * DSPARK__PANEL,
                           job->n_rows);
        }
    }
    _mm_setcsr(host);
}

/* ---- by way of memory ------------------------------------------------------------------------ */

static void multiply_plain(const dot_job *job, float *acc, size_t acc_rows, size_t k0, size_t n_k)
{
    _Alignas(64) uint16_t w[STEP * DSPARK__PANEL];
    const dspark__dot_codes *d = job->d;
    for (size_t n; n_k > 0; n_k -= n, k0 += n) {
        n = n_k < STEP ? n_k : STEP;
        for (size_t p = 0; p < job->n_panels; p++) {
            const size_t panel = job->panel + p;
            dspark__gemm_bf16 g = {.x = (const unsigned char *)d->x + job->row * d->x_stride + 2 * k0,
                                   .x_stride = d->x_stride, .n_rows = job->n_rows, .panels = w,
                                   .n_panels = 1, .k = n, .acc = acc + p * acc_rows * DSPARK__PANEL};
            dspark__decode__avx2(w, d->codes + panel * d->code_stride,
                                 d->scales ? d->scales + panel * d->scale_stride : NULL, d->format, k0, n);
            dspark__gemm_bf16__avx2(&g);
        }
    }
}

/* ---- what is exact --------------------------------------------------------------------------- */

/* Are the numbers of a table what expand_bytes makes of the codes, times 2^power? */
DSPARK__INLINE int is_table_of(const uint16_t *table, form f, int power)
{
    const __m256 factor = _mm256_castsi256_ps(_mm256_set1_epi32((127 + power) << 23));
    const __m256i infinite = _mm256_set1_epi32(0x7f800000);
    __m256i c = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), differ = _mm256_setzero_si256();
    for (size_t i = 0; i < 256; i += 8, c = _mm256_add_epi32(c, _mm256_set1_epi32(8))) {
        __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(c, 7), 15), entry;
        __m256i half = _mm256_slli_epi32(_mm256_and_si256(c, _mm256_set1_epi32(127)), f == FLOATS_E5 ? 8 : 7);
        __m256 y = _mm256_mul_ps(_mm256_cvtph_ps(pack_lanes(_mm256_or_si256(sign, half))), factor);
        if (f == INTEGERS) y = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(c, 24), 24));
        entry = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_8(table, i)), 16);
        __m256i number = _mm256_cmpeq_epi32(_mm256_and_si256(entry, infinite), infinite);
        number = _mm256_or_si256(number, _mm256_cmpeq_epi32(entry, _mm256_castps_si256(y)));
        differ = _mm256_or_si256(differ, _mm256_xor_si256(number, _mm256_set1_epi32(-1)));
    }
    return _mm256_testz_si256(differ, differ);
}

static void prepare_bytes(dot_job *job, const dspark__code_format *f)
{
    const uint16_t *t = f->table;
    const int e4 = (t[0x40] >> 7 & 255) - (127 - 7), e5 = (t[0x40] >> 7 & 255) - (127 + 1);
    if (f->scale == DSPARK__CODE_E4M3) return;
    if (f->scale != DSPARK__CODE_E8M0 && is_table_of(t, INTEGERS, 0)) {
        job->form = INTEGERS;
        job->how = SUBTRACT;
        return;
    }
    if (f->scale == DSPARK__CODE_OFFSET) return;
    if (e4 >= 0 && e4 < 16 && is_table_of(t, FLOATS_E4, e4)) {
        job->form = FLOATS_E4;
        job->power = e4;
    } else if ((e5 == 0 || e5 == -1) && is_table_of(t, FLOATS_E5, e5)) {
        job->form = FLOATS_E5;
        job->power = e5;
    }
}

/* The upper halves of the entries as fp16, times 2^8 under e4m3 scales. */
static void prepare_nibbles(dot_job *job, const dspark__code_format *f)
{
    _Alignas(16) uint8_t upper[16] = {0};
    for (size_t c = 0; c < 16; c++) {
        if (!dspark__bf16_is_finite(f->table[c])) continue;
        float v = dspark__bf16_to_f32(f->table[c]) * (f->scale == DSPARK__CODE_E4M3 ? 256.0f : 1.0f);
        __m128i half = _mm_cvtps_ph(_mm_set_ss(v), _MM_FROUND_TO_NEAREST_INT);
        unsigned h = (unsigned)_mm_cvtsi128_si32(half) & 0xffffu;
        if (dspark__f32_bits(_mm_cvtss_f32(_mm_cvtph_ps(half))) != dspark__f32_bits(v) || h & 255) return;
        upper[c] = (uint8_t)(h >> 8);
    }
    job->form = NIBBLES;
    job->table = _mm256_broadcastsi128_si256(_mm_load_si128((const void *)upper));
}

static void prepare(dot_job *job)
{
    const dspark__code_format *f = job->d->format;
    job->form = NO_FORM;
    job->how = f->scale == DSPARK__CODE_PLAIN ? NONE :
               f->scale == DSPARK__CODE_OFFSET ? SUBTRACT :
               f->scale == DSPARK__CODE_E8M0 ? NONE : MULTIPLY;
    job->table = _mm256_setzero_si256();
    if (f->bits == 8) prepare_bytes(job, f);
    else prepare_nibbles(job, f);
}

/* Is every element zero, or of an exponent field within low .. high? */
static int is_within(const dspark__dot_codes *d, int low, int high)
{
    const __m256i magnitude = _mm256_set1_epi16(0x7fff), one = _mm256_set1_epi16(1);
    const __m256i least = _mm256_set1_epi16((short)(low << 7));
    const __m256i most = _mm256_set1_epi16((short)(high << 7 | 127));
    for (size_t i = 0; i < d->n_rows; i++) {
        const unsigned char *x = (const unsigned char *)d->x + i * d->x_stride;
        __m256i wild = _mm256_setzero_si256();
        for (size_t k = 0; k < d->k / GROUP_K * GROUP_K; k += GROUP_K) {
            __m256i u = _mm256_and_si256(_mm256_castsi128_si256(load_8(x, k)), magnitude);
            __m256i small = _mm256_andnot_si256(_mm256_cmpgt_epi16(one, u), _mm256_cmpgt_epi16(least, u));
            wild = _mm256_or_si256(wild, _mm256_or_si256(small, _mm256_cmpgt_epi16(u, most)));
        }
        if (!_mm_testz_si128(_mm256_castsi256_si128(wild), _mm256_castsi256_si128(wild))) return 0;
    }
    return 1;
}

/* Are x such that nothing rounds, overflows or is flushed that would not be without the powers of two?
 * times 2^power x stay normal. For sums that are rescaled x and k are within dot_bounds.h, as all 8-bit
 * floats and nibbles are. Sums before the last k % 8 go by the plain way, and are true ones again. */
static int is_tame(const dot_job *job)
{
    const int p = job->power;
    if (job->d->format->scale == DSPARK__CODE_E8M0)
        return job->d->k <= (size_t)1 << TAME_K && is_within(job->d, 127 - TAME_LOW, 127 + TAME_HIGH - 1);
    return p == 0 || is_within(job->d, p < 0 ? 1 - p : 1, p > 0 ? 254 - p : 254);
}

/* Are all scales of the panels within 2^-POWERS .. 2^POWERS? */
static int are_tame(const dspark__dot_codes *d, size_t panel, size_t n_panels)
{
    const size_t n = dspark__code_scale_bytes(d->format, d->k);
    const __m128i low = _mm_set1_epi8(127 - POWERS), high = _mm_set1_epi8((char)(127 + POWERS));
    __m128i tame = _mm_set1_epi8(-1);
    for (size_t p = panel; p < panel + n_panels; p++) {
        for (size_t i = 0; i < n; i += 16) { /* 48 bytes a row */
            __m128i b = _mm_loadu_si128((const void *)(d->scales + p * d->scale_stride + i));
            tame = _mm_and_si128(tame, _mm_cmpeq_epi8(_mm_max_epu8(b, low), b));
            tame = _mm_and_si128(tame, _mm_cmpeq_epi8(_mm_min_epu8(b, high), b));
        }
    }
    return _mm_movemask_epi8(tame) == 0xffff;
}

/* ---- the slot -------------------------------------------------------------------------------- */

/* A tile of rows of panels side by side, K-group by K-group. */
static void run_tile(const dot_job *job)
{
    _Alignas(64) float part[SIDE * ROWS * DSPARK__PANEL];
    const dspark__dot_codes *d = job->d;
    const size_t step = d->group ? d->group : d->k, acc_rows = d->group ? job->n_rows : d->n_rows;
    float *sum = d->acc + (job->panel * d->n_rows + job->row) * DSPARK__PANEL;
    float *acc = d->group ? part : sum;
    for (size_t k0 = 0, n; k0 < d->k; k0 += n) {
        n = d->k - k0 < step ? d->k - k0 : step;
        const size_t n_fast = job->form == NO_FORM ? 0 : n / GROUP_K * GROUP_K;
        for (size_t p = 0; p < job->n_panels; p++)
            memset(acc + p * acc_rows * DSPARK__PANEL, 0, job->n_rows * DSPARK__PANEL * sizeof *acc);
        if (n_fast > 0) multiply_fast(job, acc, acc_rows, k0, n_fast);
        if (n > n_fast) multiply_plain(job, acc, acc_rows, k0 + n_fast, n - n_fast);
        for (size_t p = 0; d->group && p < job->n_panels; p++)
            dspark__scale_add__avx2(sum + p * d->n_rows * DSPARK__PANEL,
                                    acc + p * acc_rows * DSPARK__PANEL,
                                    d->group_scales + (job->panel + p) * d->group_stride +
                                        k0 / step * DSPARK__PANEL,
                                    job->n_rows, k0 == 0);
    }
}

void dspark__dot_codes__avx2(const dspark__dot_codes *d)
{
    dot_job job = {.d = d};
    prepare(&job);
    const form fast = job.form;
    const int powers = d->format->scale == DSPARK__CODE_E8M0, tame = fast != NO_FORM && is_tame(&job);
    for (; job.panel < d->n_panels; job.panel += job.n_panels) {
        job.n_panels = d->n_panels - job.panel < SIDE ? d->n_panels - job.panel : SIDE;
        job.form = tame && (!powers || are_tame(d, job.panel, job.n_panels)) ? fast : NO_FORM;
        for (job.row = 0; job.row < d->n_rows; job.row += job.n_rows) {
            job.n_rows = tile_rows(d->n_rows - job.row, ROWS);
            run_tile(&job);
        }
    }
}

#endif
