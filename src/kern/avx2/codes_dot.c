/* AVX2: panels of codes times few rows. A group of 8 k is expanded into L1 as fp16, which one
 * instruction widens when it is loaded: 8-bit floats are fp16 but for a shift and a power of two, small
 * integers and E2M1 are fp16 with an empty lower half. The bits are those of decode and gemm_bf16; other
 * tables, scales and x for which the power of two is not exact, and the end of k, go through these two. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"

#include "base/fpenv.h"

enum {
    GROUP_K = 8,
    PAIRS = 4,
    VECTORS = 6,
    HALF = VECTORS / 2,
    SLOTS = GROUP_K * DSPARK__PANEL, /* fp16 of a group */
    STEP = 512,                      /* values of k whose x are widened at a time */
    ROWS = 4,                        /* of a tile */
    SIDE = 3,                        /* panels that are read side by side */
    LEAD = 2,                        /* groups that are expanded before they are multiplied */
    RING = 2 * LEAD,
    PLAIN_K = 128,
    PLAIN_ROWS = 16,                 /* of a tile by way of memory */
    AHEAD = 2048,                    /* bytes */
    SCALE_POWER = 32                 /* e8m0 scales 2^-32 .. 2^32, see is_tame */
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

/* RESCALE: scales that are powers of two divide the sums, so that weights go without. */
typedef enum scaling { NONE, RESCALE, MULTIPLY, SUBTRACT } scaling;

typedef struct dot_job {
    const dspark__dot_codes *d;
    size_t row, panel;
    size_t n_rows, n_panels;
    form form;
    scaling how;
    int power;        /* an expanded weight is 2^-power of the true one; x make up for it */
    __m256i table;    /* NIBBLES: the upper halves of 16 fp16, twice */
} dot_job;

/* What one panel's product over a few groups of k reads. */
typedef struct span {
    const uint8_t *codes;
    const uint8_t *row; /* of scales, of the first group, or NULL */
    size_t left;        /* groups under this row */
    const float *x;     /* row i at x + i * STEP */
    size_t n_groups;
} span;

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
        if (i % 2 == 0) _mm_prefetch((const char *)codes + 32 * i + AHEAD, _MM_HINT_T0);
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
                                   size_t end)
{
    /* Of 8 outputs: evens of pairs 0 and 1, odds of them; the same of pairs 2 and 3. */
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15));
    const __m256i lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    DSPARK__UNROLL
    for (size_t v = first * VECTORS / PAIRS; v < end * VECTORS / PAIRS; v++) {
        uint16_t *at = to + 64 * v;
        __m256i c = _mm256_load_si256((const void *)(codes + 32 * v));
        if (v % 2 == 0) _mm_prefetch((const char *)codes + 32 * v + AHEAD, _MM_HINT_T0);
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

/* Parts [first, end) of the four of a group. */
DSPARK__INLINE void expand(uint16_t *to, const uint8_t *codes, __m256i table, form f, size_t first,
                           size_t end)
{
    if (f == NIBBLES) expand_nibbles(to, codes, table, first, end);
    else expand_bytes(to, codes, f, first, end);
}

/* 8 scale bytes as what the weights are multiplied by, or what is subtracted. */
DSPARK__INLINE __m256 load_scale(const uint8_t *bytes, form f, scaling how)
{
    __m128i b = _mm_loadl_epi64((const void *)bytes);
    if (how == MULTIPLY) /* 2^-8 of it, see prepare_nibbles */
        return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(b), 7));
    __m256i zero_point = _mm256_cvtepi8_epi32(b);
    if (f == INTEGERS) zero_point = _mm256_add_epi32(zero_point, _mm256_set1_epi32(1024 + 128));
    return _mm256_cvtepi32_ps(zero_point);
}

/* 2^(old - new) of 8 scale bytes; NULL is a scale of 1. */
DSPARK__INLINE __m256 load_ratio(const uint8_t *old, const uint8_t *new)
{
    const __m256i one = _mm256_set1_epi32(127);
    __m256i o = old ? _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)old)) : one;
    __m256i n = new ? _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)new)) : one;
    __m256i e = _mm256_add_epi32(_mm256_sub_epi32(o, n), one);
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}

/* ---- products -------------------------------------------------------------------------------- */

DSPARK__INLINE __m256 take_weights(const uint16_t *w, const __m256 *scale, scaling how)
{
    __m256 y = _mm256_cvtph_ps(_mm_load_si128((const void *)w));
    if (how == MULTIPLY) y = _mm256_mul_ps(y, *scale);
    if (how == SUBTRACT) y = _mm256_sub_ps(y, *scale);
    return y;
}

typedef struct sums {
    __m256 of[ROWS][VECTORS];
} sums;

/* A group that is expanded meanwhile, or to == NULL. */
typedef struct expansion {
    uint16_t *to;
    const uint8_t *codes;
    __m256i table;
} expansion;

/* One group times n_rows rows, vectors first .. first + n_vectors - 1; all counts are constants. What is
 * expanded is spread over the products: they wait for different things. */
DSPARK__INLINE void multiply_group(sums *s, const uint16_t *w, const __m256 *scales, const float *x,
                                   size_t n_rows, size_t first, size_t n_vectors, form f, scaling how,
                                   const expansion *next)
{
    DSPARK__UNROLL
    for (size_t i = 0; i < GROUP_K; i++) {
        const size_t k = i ^ 1; /* odd elements first */
        __m256 held[HALF];
        if (n_vectors == VECTORS) {
            DSPARK__UNROLL
            for (size_t r = 0; r < n_rows; r++) held[r] = _mm256_broadcast_ss(x + r * STEP + k);
            DSPARK__UNROLL
            for (size_t v = 0; v < n_vectors; v++) {
                __m256 part = take_weights(w + slot_of(f, k, v), scales + v, how);
                DSPARK__UNROLL
                for (size_t r = 0; r < n_rows; r++)
                    s->of[r][v] = _mm256_fmadd_ps(part, held[r], s->of[r][v]);
            }
            if (i % 2 == 1 && next->to != NULL)
                expand(next->to, next->codes, next->table, f, i / 2, i / 2 + 1);
            continue;
        }
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++)
            held[v] = take_weights(w + slot_of(f, k, first + v), scales + first + v, how);
        DSPARK__UNROLL
        for (size_t r = 0; r < n_rows; r++) {
            __m256 b = _mm256_broadcast_ss(x + r * STEP + k);
            DSPARK__UNROLL
            for (size_t v = 0; v < n_vectors; v++)
                s->of[r][v] = _mm256_fmadd_ps(held[v], b, s->of[r][v]);
        }
        if (i % 4 == 3 && next->to != NULL) /* the other half of it with the other vectors */
            expand(next->to, next->codes, next->table, f, first / HALF * 2 + i / 4,
                   first / HALF * 2 + i / 4 + 1);
    }
}

DSPARK__INLINE void load_sums(sums *s, const float *acc, size_t n_rows, size_t first, size_t n_vectors)
{
    DSPARK__UNROLL
    for (size_t r = 0; r < n_rows; r++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++)
            s->of[r][v] = _mm256_load_ps(acc + r * DSPARK__PANEL + 8 * (first + v));
}

DSPARK__INLINE void store_sums(float *acc, const sums *s, size_t n_rows, size_t first, size_t n_vectors)
{
    DSPARK__UNROLL
    for (size_t r = 0; r < n_rows; r++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++)
            _mm256_store_ps(acc + r * DSPARK__PANEL + 8 * (first + v), s->of[r][v]);
}

/* Sums under scales `old` become sums under `new`. */
DSPARK__INLINE void rescale(sums *s, const uint8_t *old, const uint8_t *new, size_t n_rows, size_t first,
                            size_t n_vectors)
{
    DSPARK__UNROLL
    for (size_t v = 0; v < n_vectors; v++) {
        size_t at = 8 * (first + v);
        __m256 ratio = load_ratio(old ? old + at : NULL, new ? new + at : NULL);
        DSPARK__UNROLL
        for (size_t r = 0; r < n_rows; r++) s->of[r][v] = _mm256_mul_ps(s->of[r][v], ratio);
    }
}

/* acc += a span of one panel times n_rows rows. 1 and 2 rows: all sums stay in registers. 3 and 4: one
 * half of the outputs after the other, LEAD groups at a time. */
DSPARK__INLINE void multiply_span(const dot_job *job, float *acc, span s, size_t n_rows, form f,
                                  scaling how)
{
    _Alignas(64) uint16_t ring[RING][SLOTS];
    uint16_t *w = ring[0];
    const size_t block = s.row ? job->d->format->block / GROUP_K : SIZE_MAX;
    const int whole = n_rows <= 2;
    expansion next = {NULL, s.codes, job->table};
    const uint8_t *old = NULL;
    __m256 scales[VECTORS];
    sums sum;
    DSPARK__UNROLL
    for (size_t v = 0; v < VECTORS; v++) scales[v] = _mm256_set1_ps(1024 + 128);
    if (whole) load_sums(&sum, acc, n_rows, 0, VECTORS);
    for (size_t g = 0; g < LEAD && g < s.n_groups; g++, next.codes += group_bytes(f))
        expand(ring[g], next.codes, next.table, f, 0, PAIRS);
    for (size_t group = 0, n; group < s.n_groups; group += n) {
        int fresh = group == 0;
        if (s.left == 0) {
            s.left = block;
            s.row += DSPARK__PANEL;
            fresh = 1;
        }
        if ((how == MULTIPLY || how == SUBTRACT) && s.row != NULL && fresh)
            DSPARK__UNROLL
            for (size_t v = 0; v < VECTORS; v++) scales[v] = load_scale(s.row + 8 * v, f, how);
        n = whole || s.left == 1 || s.n_groups - group == 1 ? 1 : LEAD;
        FORGET(w);
        if (whole) {
            if (how == RESCALE && fresh) rescale(&sum, old, s.row, n_rows, 0, VECTORS);
            next.to = group + LEAD < s.n_groups ? w + (group + LEAD) % RING * SLOTS : NULL;
            multiply_group(&sum, w + group % RING * SLOTS, scales, s.x, n_rows, 0, VECTORS, f, how, &next);
        } else {
            DSPARK__UNROLL
            for (size_t first = 0; first < VECTORS; first += HALF) {
                load_sums(&sum, acc, n_rows, first, HALF);
                if (how == RESCALE && fresh) rescale(&sum, old, s.row, n_rows, first, HALF);
                for (size_t g = group; g < group + n; g++) {
                    expansion half = next;
                    half.codes += (g - group) * group_bytes(f);
                    half.to = g + LEAD < s.n_groups ? w + (g + LEAD) % RING * SLOTS : NULL;
                    multiply_group(&sum, w + g % RING * SLOTS, scales, s.x + (g - group) * GROUP_K, n_rows,
                                   first, HALF, f, how, &half);
                }
                store_sums(acc, &sum, n_rows, first, HALF);
            }
        }
        old = s.row;
        s.left -= n;
        s.x += n * GROUP_K;
        next.codes += n * group_bytes(f);
    }
    if (whole) {
        if (how == RESCALE) rescale(&sum, old, NULL, n_rows, 0, VECTORS);
        store_sums(acc, &sum, n_rows, 0, VECTORS);
    } else if (how == RESCALE) {
        DSPARK__UNROLL
        for (size_t first = 0; first < VECTORS; first += HALF) {
            load_sums(&sum, acc, n_rows, first, HALF);
            rescale(&sum, old, NULL, n_rows, first, HALF);
            store_sums(acc, &sum, n_rows, first, HALF);
        }
    }
}

DSPARK__INLINE void multiply_by(const dot_job *job, float *acc, const span *s, size_t n_rows)
{
    const scaling how = job->how;
    switch (job->form) {
    case FLOATS_E4:
        if (how == NONE) multiply_span(job, acc, *s, n_rows, FLOATS_E4, NONE);
        else multiply_span(job, acc, *s, n_rows, FLOATS_E4, RESCALE);
        break;
    case FLOATS_E5:
        if (how == NONE) multiply_span(job, acc, *s, n_rows, FLOATS_E5, NONE);
        else multiply_span(job, acc, *s, n_rows, FLOATS_E5, RESCALE);
        break;
    case INTEGERS: multiply_span(job, acc, *s, n_rows, INTEGERS, SUBTRACT); break;
    default:
        if (how == NONE) multiply_span(job, acc, *s, n_rows, NIBBLES, NONE);
        else if (how == RESCALE) multiply_span(job, acc, *s, n_rows, NIBBLES, RESCALE);
        else if (how == MULTIPLY) multiply_span(job, acc, *s, n_rows, NIBBLES, MULTIPLY);
        else multiply_span(job, acc, *s, n_rows, NIBBLES, SUBTRACT);
        break;
    }
}

/* These are called, not inlined: no arithmetic may move to where MXCSR is the host's. */
#define TILE_OF(rows)                                                                              \
    DSPARK__NOINLINE void multiply_##rows(const dot_job *job, float *acc, const span *s)           \
    {                                                                                              \
        multiply_by(job, acc, s, rows);                                                            \
    }
TILE_OF(1)
TILE_OF(2)
TILE_OF(3)
TILE_OF(4)
#undef TILE_OF

/* x times 2^power, as the product reads it: subnormal ones are zero. */
DSPARK__NOINLINE void widen(float *to, const dot_job *job, size_t k0, size_t n, int power)
{
    const __m256 factor = _mm256_castsi256_ps(_mm256_set1_epi32((127 + power) << 23));
    for (size_t i = 0; i < job->n_rows; i++) {
        const unsigned char *x = (const unsigned char *)job->d->x + (job->row + i) * job->d->x_stride;
        for (size_t k = 0; k < n; k += 8)
            _mm256_store_ps(to + i * STEP + k,
                            _mm256_mul_ps(widen_bf16(load_8(x, k0 + k)), factor));
    }
}

/* acc [n_panels][acc_rows][48] += values k0 .. k0+n_k-1, whole groups. */
static void multiply_fast(const dot_job *job, float *acc, size_t acc_rows, size_t k0, size_t n_k)
{
    static void (*const multiply[ROWS])(const dot_job *, float *, const span *) = {
        multiply_1, multiply_2, multiply_3, multiply_4};
    _Alignas(64) float x[ROWS * STEP];
    const dspark__dot_codes *d = job->d;
    const int scaled = d->format->scale != DSPARK__CODE_PLAIN;
    const size_t block = scaled ? d->format->block / GROUP_K : SIZE_MAX;
    unsigned host = _mm_getcsr();
    _mm_setcsr(host | DSPARK__MXCSR_FTZ_DAZ);
    for (size_t n; n_k > 0; n_k -= n, k0 += n) {
        size_t group = k0 / GROUP_K;
        n = n_k < STEP ? n_k : STEP;
        widen(x, job, k0, n, job->power);
        for (size_t p = 0; p < job->n_panels; p++) {
            span s = {.codes = d->codes + (job->panel + p) * d->code_stride + group * group_bytes(job->form),
                      .x = x, .n_groups = n / GROUP_K, .left = block - group % block};
            if (scaled)
                s.row = d->scales + (job->panel + p) * d->scale_stride + group / block * DSPARK__PANEL;
            multiply[job->n_rows - 1](job, acc + p * acc_rows * DSPARK__PANEL, &s);
        }
    }
    _mm_setcsr(host);
}

/* ---- by way of memory ------------------------------------------------------------------------ */

static void multiply_plain(const dot_job *job, float *acc, size_t acc_rows, size_t k0, size_t n_k)
{
    _Alignas(64) uint16_t w[PLAIN_K * DSPARK__PANEL];
    const dspark__dot_codes *d = job->d;
    for (size_t n; n_k > 0; n_k -= n, k0 += n) {
        n = n_k < PLAIN_K ? n_k : PLAIN_K;
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

static int is_number(uint16_t entry)
{
    return (entry & 0x7f80u) != 0x7f80u;
}

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
        if (!is_number(f->table[c])) continue;
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
               f->scale == DSPARK__CODE_E8M0 ? RESCALE : MULTIPLY;
    job->table = _mm256_setzero_si256();
    if (f->bits == 8) prepare_bytes(job, f);
    else prepare_nibbles(job, f);
}

/* Is every element zero, or of an exponent field within low .. high? */
static int is_within(const dspark__dot_codes *d, int low, int high)
{
    const __m256i magnitude = _mm256_set1_epi16(0x7fff), one = _mm256_set1_epi16(1);
    const __m256i least = _mm256_set1_epi16((short)(low << 7)), most = _mm256_set1_epi16((short)(high << 7 | 127));
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
 * times 2^power x stay normal. Sums that are rescaled: with weights that are multiples of 2^-17 and at
 * most 2^16, scales within 2^-32 .. 2^32 and x within 2^-36 .. 2^28, sums of up to 2^17 products are
 * multiples of 2^-92, at most 2^93, and 2^-32 to 2^32 times as much when they are rescaled. Sums before
 * the last k % 8 go by the plain way, and are true ones again. */
static int is_tame(const dot_job *job)
{
    const int p = job->power;
    if (job->how == RESCALE) return job->d->k <= 1u << 17 && is_within(job->d, 127 - 36, 127 + 27);
    return p == 0 || is_within(job->d, p < 0 ? 1 - p : 1, p > 0 ? 254 - p : 254);
}

/* Are all scales of the panels within 2^-SCALE_POWER .. 2^SCALE_POWER? */
static int are_tame(const dspark__dot_codes *d, size_t panel, size_t n_panels)
{
    const size_t n = dspark__code_scale_bytes(d->format, d->k);
    const __m128i low = _mm_set1_epi8(127 - SCALE_POWER), high = _mm_set1_epi8((char)(127 + SCALE_POWER));
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
    _Alignas(64) float part[SIDE * PLAIN_ROWS * DSPARK__PANEL];
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
    const int tame = fast != NO_FORM && is_tame(&job);
    for (; job.panel < d->n_panels; job.panel += job.n_panels) {
        job.n_panels = d->n_panels - job.panel < SIDE ? d->n_panels - job.panel : SIDE;
        job.form = tame && (job.how != RESCALE || are_tame(d, job.panel, job.n_panels)) ? fast : NO_FORM;
        for (job.row = 0; job.row < d->n_rows; job.row += job.n_rows) {
            job.n_rows = tile_rows(d->n_rows - job.row, job.form == NO_FORM ? PLAIN_ROWS : ROWS);
            run_tile(&job);
        }
    }
}

#endif
