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
    SLOTS = GROUP_K * DSPARK__PANEL, /* fp16 of a group */
    STEP = 128,                      /* values of k whose x are widened at a time */
    ROWS = 4,                        /* of a tile */
    SIDE = 3,                        /* panels that are read side by side */
    CHUNK = 4,                       /* groups between two loads of the sums of 3 or 4 rows */
    PLAIN_ROWS = 16,                 /* of a tile by way of memory */
    AHEAD = 2048,                    /* bytes */
    MOST_POWER = 16
};

typedef enum form {
    FLOATS_E4, /* sign, 4 bits of exponent, 3 of mantissa */
    FLOATS_E5,
    INTEGERS,
    NIBBLES,
    NO_FORM
} form;

typedef enum scaling { NONE, MULTIPLY, SUBTRACT } scaling;

typedef struct dot_job {
    const dspark__dot_codes *d;
    size_t row, panel;
    size_t n_rows, n_panels;
    form form;
    scaling how;
    int power;        /* an expanded weight is 2^-power of the true one; x or the scale make up for it */
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

DSPARK__INLINE void expand_bytes(uint16_t *to, const uint8_t *codes, form f)
{
    const __m256i signs = _mm256_set1_epi16((short)0xbf80), upper = _mm256_set1_epi16((short)0xff00);
    const __m256i low_128 = _mm256_set1_epi16(0x0080), high_128 = _mm256_set1_epi16((short)0x8000);
    const __m256i thousand = _mm256_set1_epi16(0x6480), lower = _mm256_set1_epi16(0x00ff);
    DSPARK__UNROLL
    for (size_t i = 0; i < PAIRS * 3; i++) {
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

DSPARK__INLINE void expand_nibbles(uint16_t *to, const uint8_t *codes, __m256i table)
{
    /* Of 8 outputs: evens of pairs 0 and 1, odds of them; the same of pairs 2 and 3. */
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15));
    const __m256i lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    DSPARK__UNROLL
    for (size_t v = 0; v < VECTORS; v++, to += 64) {
        __m256i c = _mm256_load_si256((const void *)(codes + 32 * v));
        if (v % 2 == 0) _mm_prefetch((const char *)codes + 32 * v + AHEAD, _MM_HINT_T0);
        c = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(c, order), lanes);
        DSPARK__UNROLL
        for (size_t j = 0; j < 2; j++) {
            __m256i n = _mm256_and_si256(j ? _mm256_srli_epi16(c, 4) : c, nibble);
            __m256i upper = _mm256_shuffle_epi8(table, n);
            _mm256_store_si256((void *)(to + 32 * j), _mm256_unpacklo_epi8(zero, upper));
            _mm256_store_si256((void *)(to + 32 * j + 16), _mm256_unpackhi_epi8(zero, upper));
        }
    }
}

DSPARK__INLINE void expand(uint16_t *to, const uint8_t *codes, __m256i table, form f)
{
    if (f == NIBBLES) expand_nibbles(to, codes, table);
    else expand_bytes(to, codes, f);
}

/* 8 scale bytes as what the weights are multiplied by, or what is subtracted. */
DSPARK__INLINE __m256 load_scale(const uint8_t *bytes, dspark__code_scale kind, form f, int power)
{
    __m128i b = _mm_loadl_epi64((const void *)bytes);
    if (kind == DSPARK__CODE_E4M3) /* 2^-8 of it, see prepare_nibbles */
        return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(b), 7));
    if (kind == DSPARK__CODE_E8M0) {
        __m256i e = _mm256_add_epi32(_mm256_cvtepu8_epi32(b), _mm256_set1_epi32(power));
        return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
    }
    __m256i zero_point = _mm256_cvtepi8_epi32(b);
    if (f == INTEGERS) zero_point = _mm256_add_epi32(zero_point, _mm256_set1_epi32(1024 + 128));
    return _mm256_cvtepi32_ps(zero_point);
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

/* One group times n_rows rows, vectors first .. first + n_vectors - 1; all counts are constants. */
DSPARK__INLINE void multiply_group(sums *s, const uint16_t *w, const __m256 *scales, const float *x,
                                   size_t n_rows, size_t first, size_t n_vectors, form f, scaling how)
{
    DSPARK__UNROLL
    for (size_t i = 0; i < GROUP_K; i++) {
        const size_t k = i ^ 1; /* odd elements first */
        __m256 held[3];
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

/* acc += a span of one panel times n_rows rows. 1 and 2 rows: all sums stay in registers, and a group is
 * expanded while the one before is multiplied, for all that the processor can tell. 3 and 4: one half of
 * the outputs after the other. */
DSPARK__INLINE void multiply_span(const dot_job *job, float *acc, span s, size_t n_rows, form f,
                                  scaling how)
{
    enum { HALF = VECTORS / 2 };
    _Alignas(64) uint16_t w[CHUNK][SLOTS];
    const dspark__code_format *format = job->d->format;
    const size_t block = how == NONE || s.row == NULL ? SIZE_MAX : format->block / GROUP_K;
    const size_t chunk = n_rows <= 2 ? 1 : CHUNK;
    const __m256i table = job->table;
    __m256 scales[VECTORS];
    sums sum;
    size_t turn = 0;
    DSPARK__UNROLL
    for (size_t v = 0; v < VECTORS; v++) scales[v] = _mm256_set1_ps(1024 + 128);
    if (n_rows <= 2) load_sums(&sum, acc, n_rows, 0, VECTORS);
    for (size_t n; s.n_groups > 0; s.left -= n) {
        if (s.left == 0) {
            s.left = block;
            s.row += DSPARK__PANEL;
        }
        if (s.row != NULL)
            DSPARK__UNROLL
            for (size_t v = 0; v < VECTORS; v++)
                scales[v] = load_scale(s.row + 8 * v, format->scale, f, job->power);
        n = s.left < s.n_groups ? s.left : s.n_groups;
        s.n_groups -= n;
        for (size_t left = n, some; left > 0; left -= some) {
            some = left < chunk ? left : chunk;
            if (n_rows <= 2) {
                uint16_t *to = w[turn++ % 2];
                expand(to, s.codes, table, f);
                multiply_group(&sum, to, scales, s.x, n_rows, 0, VECTORS, f, how);
            } else {
                for (size_t g = 0; g < some; g++) expand(w[g], s.codes + g * group_bytes(f), table, f);
                for (size_t first = 0; first < VECTORS; first += HALF) {
                    load_sums(&sum, acc, n_rows, first, HALF);
                    for (size_t g = 0; g < some; g++)
                        multiply_group(&sum, w[g], scales, s.x + g * GROUP_K, n_rows, first, HALF, f,
                                       how);
                    store_sums(acc, &sum, n_rows, first, HALF);
                }
            }
            s.codes += some * group_bytes(f);
            s.x += some * GROUP_K;
        }
    }
    if (n_rows <= 2) store_sums(acc, &sum, n_rows, 0, VECTORS);
}

DSPARK__INLINE void multiply_by(const dot_job *job, float *acc, const span *s, size_t n_rows)
{
    const scaling how = job->how;
    switch (job->form) {
    case FLOATS_E4:
        if (how == NONE) multiply_span(job, acc, *s, n_rows, FLOATS_E4, NONE);
        else multiply_span(job, acc, *s, n_rows, FLOATS_E4, MULTIPLY);
        break;
    case FLOATS_E5:
        if (how == NONE) multiply_span(job, acc, *s, n_rows, FLOATS_E5, NONE);
        else multiply_span(job, acc, *s, n_rows, FLOATS_E5, MULTIPLY);
        break;
    case INTEGERS: multiply_span(job, acc, *s, n_rows, INTEGERS, SUBTRACT); break;
    default:
        if (how == NONE) multiply_span(job, acc, *s, n_rows, NIBBLES, NONE);
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
    const int of_x = job->how == NONE ? job->power : 0;
    unsigned host = _mm_getcsr();
    _mm_setcsr(host | DSPARK__MXCSR_FTZ_DAZ);
    for (size_t n; n_k > 0; n_k -= n, k0 += n) {
        size_t group = k0 / GROUP_K;
        n = n_k < STEP ? n_k : STEP;
        widen(x, job, k0, n, of_x);
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

static int is_number(uint16_t entry)
{
    return (entry & 0x7f80u) != 0x7f80u;
}

/* Are the numbers of a table what expand_bytes makes of the codes, times 2^power? */
static int are_floats(const uint16_t *table, form f, int power)
{
    const __m256 factor = _mm256_castsi256_ps(_mm256_set1_epi32((127 + power) << 23));
    for (unsigned c = 0; c < 256; c++) {
        unsigned half = f == FLOATS_E5 ? c << 8 : (c & 0x80u) << 8 | (c & 0x7fu) << 7;
        __m256 y = _mm256_mul_ps(_mm256_cvtph_ps(_mm_set1_epi16((short)half)), factor);
        if (is_number(table[c]) && dspark__f32_bits(_mm256_cvtss_f32(y)) != (uint32_t)table[c] << 16)
            return 0;
    }
    return 1;
}

static void prepare_bytes(dot_job *job, const dspark__code_format *f)
{
    const uint16_t *t = f->table;
    if (f->scale == DSPARK__CODE_E4M3) return;
    int is_integer = f->scale != DSPARK__CODE_E8M0;
    for (int c = 0; c < 256 && is_integer; c++)
        is_integer = t[c] == dspark__f32_to_bf16((float)(c < 128 ? c : c - 256));
    if (is_integer) {
        job->form = INTEGERS;
        job->how = SUBTRACT;
        return;
    }
    if (f->scale == DSPARK__CODE_OFFSET) return;
    for (int kind = FLOATS_E4; kind <= FLOATS_E5; kind++) { /* code 0x40 is a power of two */
        int power = (t[0x40] >> 7 & 255) - (kind == FLOATS_E4 ? 127 - 7 : 127 + 1);
        if (power < -MOST_POWER || power > MOST_POWER || !are_floats(t, (form)kind, power)) continue;
        job->form = (form)kind;
        job->power = power;
        return;
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
               f->scale == DSPARK__CODE_OFFSET ? SUBTRACT : MULTIPLY;
    job->table = _mm256_setzero_si256();
    if (f->bits == 8) prepare_bytes(job, f);
    else prepare_nibbles(job, f);
}

/* Does every element stay a normal number, or zero, when it is multiplied by 2^power? */
static int is_tame(const dspark__dot_codes *d, int power)
{
    const __m256i magnitude = _mm256_set1_epi16(0x7fff), one = _mm256_set1_epi16(1);
    const int low = power < 0 ? (1 - power) << 7 : 1 << 7, high = (power > 0 ? 255 - power : 255) << 7;
    const __m256i least = _mm256_set1_epi16((short)(low - 1)), over = _mm256_set1_epi16((short)(high - 1));
    for (size_t i = 0; i < d->n_rows; i++) {
        const unsigned char *x = (const unsigned char *)d->x + i * d->x_stride;
        __m256i wild = _mm256_setzero_si256();
        for (size_t k = 0; k + 16 <= d->k; k += 16) { /* what is left goes the plain way or below */
            __m256i u = _mm256_loadu_si256((const void *)bf16_at(x, k));
            u = _mm256_and_si256(u, magnitude);
            __m256i small = _mm256_andnot_si256(_mm256_cmpgt_epi16(one, u), _mm256_cmpgt_epi16(least, u));
            wild = _mm256_or_si256(wild, _mm256_or_si256(small, _mm256_cmpgt_epi16(u, over)));
        }
        if (!_mm256_testz_si256(wild, wild)) return 0;
        for (size_t k = d->k / 16 * 16; k < d->k; k++) {
            int u = dspark__load_u16(bf16_at(x, k)) & 0x7fff;
            if ((u > 0 && u < low) || u >= high) return 0;
        }
    }
    return 1;
}

/* Is 2^(byte - 127 + power) a normal number for all scales of the panels? */
static int are_normal(const dspark__dot_codes *d, size_t panel, size_t n_panels, int power)
{
    const size_t n = dspark__code_scale_bytes(d->format, d->k);
    const __m128i low = _mm_set1_epi8((char)(power < 1 ? 1 - power : 0));
    const __m128i high = _mm_set1_epi8((char)(power > 0 ? 254 - power : 254));
    __m128i normal = _mm_set1_epi8(-1);
    for (size_t p = panel; p < panel + n_panels; p++) {
        for (size_t i = 0; i < n; i += 16) { /* 48 bytes a row */
            __m128i b = _mm_loadu_si128((const void *)(d->scales + p * d->scale_stride + i));
            normal = _mm_and_si128(normal, _mm_cmpeq_epi8(_mm_max_epu8(b, low), b));
            normal = _mm_and_si128(normal, _mm_cmpeq_epi8(_mm_min_epu8(b, high), b));
        }
    }
    return _mm_movemask_epi8(normal) == 0xffff;
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
    const int powers = d->format->scale == DSPARK__CODE_E8M0;
    int tame = fast != NO_FORM && (powers || job.power == 0 || is_tame(d, job.power));
    for (; job.panel < d->n_panels; job.panel += job.n_panels) {
        job.n_panels = d->n_panels - job.panel < SIDE ? d->n_panels - job.panel : SIDE;
        job.form = tame && (!powers || are_normal(d, job.panel, job.n_panels, job.power)) ? fast : NO_FORM;
        for (job.row = 0; job.row < d->n_rows; job.row += job.n_rows) {
            job.n_rows = tile_rows(d->n_rows - job.row, job.form == NO_FORM ? PLAIN_ROWS : ROWS);
            run_tile(&job);
        }
    }
}

#endif
