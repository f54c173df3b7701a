/* AVX2: packed codes to bf16 panels, and what is multiplied after a sum. Equal to ref/codes.c bit
 * for bit. 4 bits are looked up by bytes; 8 bits have no such instruction, so tables that are a
 * float or an integer format are recognised (by expanding all 256 codes) and computed, others are
 * read one by one. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"

#include "base/fpenv.h"

/* 8 values of k of 48 outputs: 24 vectors of weights, vector i belongs to outputs 8 (i % 6) ... */
enum { GROUP_K = 8, GROUP_VECTORS = 24, GROUP_PAIRS = 4, REGISTERS = 6, LANES = 16 };

typedef enum lookup {
    NIBBLES,
    FLOATS,      /* sign and magnitude; NaN and infinity, if any, are the last magnitudes */
    FLOATS_FNUZ, /* the only irregular code is 0x80 */
    INTEGERS,    /* two's complement */
    ANY
} lookup;

typedef enum scaling { NONE, MULTIPLY, SUBTRACT } scaling;

/* The table as the lookup needs it. */
typedef struct code_table {
    const uint16_t *entries;
    __m256i low, high;   /* nibbles: lower and upper bytes; floats: low = the first 8 entries */
    __m128i shift;       /* floats: bf16 = (magnitude << shift) + bias from magnitude 8 on */
    __m256i bias;
    __m256i regular;     /* floats: the last magnitude for which this holds */
} code_table;

typedef struct run_scales {
    __m256 of[REGISTERS];
} run_scales;

DSPARK__INLINE run_scales load_scales(const uint8_t *scales, dspark__code_scale kind)
{
    run_scales r;
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++) {
        __m128i bytes = _mm_loadl_epi64((const void *)(scales + 8 * v));
        __m256i b = _mm256_cvtepu8_epi32(bytes);
        if (kind == DSPARK__CODE_E8M0) {
            __m256i zero = _mm256_cmpeq_epi32(b, _mm256_setzero_si256());
            b = _mm256_or_si256(_mm256_slli_epi32(b, 23),
                                _mm256_and_si256(zero, _mm256_set1_epi32(0x00400000)));
            r.of[v] = _mm256_castsi256_ps(b);
        } else if (kind == DSPARK__CODE_E4M3) {
            __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), b);
            __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(b, 20),
                                              _mm256_set1_epi32(120 << 23));
            __m256 units = _mm256_mul_ps(_mm256_cvtepi32_ps(b), _mm256_set1_ps(0x1p-9f));
            r.of[v] = _mm256_blendv_ps(_mm256_castsi256_ps(normal), units,
                                       _mm256_castsi256_ps(small));
        } else {
            r.of[v] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
        }
    }
    return r;
}

DSPARK__INLINE __m256i apply(__m256i t, __m256 s, scaling how)
{
    if (how == NONE) return t;
    __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(t, _mm256_set1_epi32(-65536)));
    __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(t, 16));
    odd = how == MULTIPLY ? _mm256_mul_ps(odd, s) : _mm256_sub_ps(odd, s);
    even = how == MULTIPLY ? _mm256_mul_ps(even, s) : _mm256_sub_ps(even, s);
    return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(even), 16),
                              _mm256_castps_si256(odd), 0xaa);
}

/* ---- 4 bits ---------------------------------------------------------------------------------- */

/* Turned codes as words of nibbles. */
DSPARK__INLINE __m256i turn_back(__m256i raw)
{
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    raw = _mm256_or_si256(_mm256_srli_epi32(raw, 3), _mm256_slli_epi32(raw, 29));
    return _mm256_shuffle_epi8(raw, order);
}

DSPARK__INLINE void expand_nibbles(uint16_t *w, const uint8_t *codes, const code_table *t,
                                   const run_scales *s, size_t n_groups, scaling how, int turned)
{
    const __m256i nibble = _mm256_set1_epi8(15), byte = _mm256_set1_epi16(255);
    for (; n_groups > 0; n_groups--, codes += 192, w += GROUP_VECTORS * LANES) {
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++) {
            __m256i raw = _mm256_load_si256((const void *)(codes + 32 * v));
            if (turned) raw = turn_back(raw);
            DSPARK__UNROLL
            for (size_t j = 0; j < 2; j++) { /* pairs j and j + 2 are in one byte each */
                __m256i c = _mm256_and_si256(_mm256_srli_epi16(raw, 4 * (int)j), nibble);
                __m256i low = _mm256_shuffle_epi8(t->low, c);
                __m256i high = _mm256_shuffle_epi8(t->high, c);
                __m256i first = _mm256_or_si256(_mm256_and_si256(low, byte),
                                                _mm256_slli_epi16(high, 8));
                __m256i second = _mm256_or_si256(_mm256_srli_epi16(low, 8),
                                                 _mm256_andnot_si256(byte, high));
                uint16_t *to = w + LANES * (REGISTERS * j + v);
                _mm256_store_si256((void *)to, apply(first, s->of[v], how));
                _mm256_store_si256((void *)(to + 2 * LANES * REGISTERS),
                                   apply(second, s->of[v], how));
            }
        }
    }
}

/* ---- 8 bits ---------------------------------------------------------------------------------- */

/* 16 codes in 16 lanes; *irregular collects where a float code is none of the formula's. */
DSPARK__INLINE __m256i look_up(__m256i c, const code_table *t, lookup kind, __m256i *irregular)
{
    if (kind == INTEGERS) {
        __m256i odd = _mm256_srai_epi32(_mm256_slli_epi32(c, 8), 24);
        __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(c, 24), 24);
        odd = _mm256_castps_si256(_mm256_cvtepi32_ps(odd)); /* 8 bits: the lower half is zero */
        even = _mm256_castps_si256(_mm256_cvtepi32_ps(even));
        return _mm256_or_si256(odd, _mm256_srli_epi32(even, 16));
    }
    __m256i m = _mm256_and_si256(c, _mm256_set1_epi16(0x7f));
    __m256i special = kind == FLOATS_FNUZ ? _mm256_cmpeq_epi16(c, _mm256_set1_epi16(0x80))
                                          : _mm256_cmpgt_epi16(m, t->regular);
    *irregular = _mm256_or_si256(*irregular, special);
    __m256i normal = _mm256_add_epi16(_mm256_sll_epi16(m, t->shift), t->bias);
    __m256i bytes = _mm256_add_epi16(_mm256_mullo_epi16(m, _mm256_set1_epi16(0x0202)),
                                     _mm256_set1_epi16(0x0100));
    __m256i first = _mm256_shuffle_epi8(t->low, bytes);
    __m256i small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), m);
    __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(c, 7), 15);
    return _mm256_or_si256(_mm256_blendv_epi8(normal, first, small), sign);
}

DSPARK__INLINE __m256i load_codes(const uint8_t *codes)
{
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)codes));
}

/* One by one. */
static void read_entries(uint16_t *w, const uint8_t *codes, const uint16_t *entries, size_t n)
{
    for (size_t i = 0; i < n; i++) w[i] = entries[codes[i]];
}

DSPARK__INLINE void expand_bytes(uint16_t *w, const uint8_t *codes, const code_table *t,
                                 const run_scales *s, size_t n_groups, lookup kind, scaling how)
{
    for (; n_groups > 0; n_groups--, codes += 384, w += GROUP_VECTORS * LANES) {
        __m256i irregular = _mm256_setzero_si256();
        if (kind != ANY) {
            DSPARK__UNROLL
            for (size_t i = 0; i < GROUP_VECTORS; i++) {
                __m256i entry = look_up(load_codes(codes + LANES * i), t, kind, &irregular);
                _mm256_store_si256((void *)(w + LANES * i),
                                   apply(entry, s->of[i % REGISTERS], how));
            }
            if (_mm256_testz_si256(irregular, irregular)) continue;
        }
        read_entries(w, codes, t->entries, GROUP_VECTORS * LANES);
        if (how == NONE) continue;
        for (size_t i = 0; i < GROUP_VECTORS; i++) { /* the rare way: left to the compiler */
            __m256i entry = _mm256_load_si256((const void *)(w + LANES * i));
            _mm256_store_si256((void *)(w + LANES * i), apply(entry, s->of[i % REGISTERS], how));
        }
    }
}

/* ---- recognising a table --------------------------------------------------------------------- */

/* What the computation of `kind` makes of all codes. */
DSPARK__INLINE void expand_all(uint16_t all[256], const code_table *t, lookup kind)
{
    __m256i unused = _mm256_setzero_si256();
    uint8_t codes[256];
    for (size_t i = 0; i < 256; i++) codes[i] = (uint8_t)i;
    for (size_t i = 0; i < 256; i += LANES)
        _mm256_store_si256((void *)(all + i), look_up(load_codes(codes + i), t, kind, &unused));
}

static lookup recognise_floats(code_table *t)
{
    enum { REGULAR = 0x78 }; /* below, there is nothing but numbers */
    _Alignas(32) uint16_t all[256];
    const uint16_t *e = t->entries;
    int step = e[0x48] - e[0x40]; /* one step of the exponent with 3 mantissa bits, two with 2 */
    if (step != 0x80 && step != 0x100) return ANY;
    int shift = step == 0x80 ? 4 : 5, last = 0x7f;
    t->low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)e));
    t->shift = _mm_cvtsi32_si128(shift);
    t->bias = _mm256_set1_epi16((short)(e[0x40] - (0x40 << shift)));
    t->regular = _mm256_set1_epi16(0x7f);
    expand_all(all, t, FLOATS);
    if (memcmp(all, e, 2 * REGULAR) != 0 || memcmp(all + 129, e + 129, 2 * (REGULAR - 1)) != 0)
        return ANY;
    for (int m = 0x7f; m >= REGULAR; m--)
        if (all[m] != e[m] || all[m + 128] != e[m + 128]) last = m - 1;
    t->regular = _mm256_set1_epi16((short)last);
    if (all[128] == e[128]) return FLOATS;
    return last == 0x7f ? FLOATS_FNUZ : ANY;
}

static lookup recognise(code_table *t, uint32_t bits)
{
    if (bits == 4) {
        __m256i e = _mm256_loadu_si256((const void *)t->entries);
        __m256i low = _mm256_and_si256(e, _mm256_set1_epi16(255)), high = _mm256_srli_epi16(e, 8);
        low = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, low), 0x88);
        high = _mm256_permute4x64_epi64(_mm256_packus_epi16(high, high), 0x88);
        t->low = low;
        t->high = high;
        return NIBBLES;
    }
    if (t->entries[1] == 0x3f80u) { /* 1 */
        _Alignas(32) uint16_t all[256];
        expand_all(all, t, INTEGERS);
        return memcmp(all, t->entries, sizeof all) == 0 ? INTEGERS : ANY;
    }
    return recognise_floats(t);
}

/* ---- the slots ------------------------------------------------------------------------------- */

typedef struct decode_job {
    uint16_t *w;
    const uint8_t *codes, *scales;
    const dspark__code_format *f;
    size_t k0, n_groups;
    code_table table;
} decode_job;

DSPARK__INLINE void expand(uint16_t *w, const uint8_t *codes, const code_table *t,
                           const run_scales *s, size_t n_groups, lookup kind, scaling how, int turned)
{
    if (kind == NIBBLES) expand_nibbles(w, codes, t, s, n_groups, how, turned);
    else expand_bytes(w, codes, t, s, n_groups, kind, how);
}

/* Runs of groups with the same scales; the kind is a constant in each copy. */
DSPARK__INLINE void decode_runs(const decode_job *job, lookup kind)
{
    const dspark__code_format *f = job->f;
    const size_t group_bytes = kind == NIBBLES ? 192 : 384;
    const uint8_t *codes = job->codes + job->k0 / GROUP_K * group_bytes;
    const code_table table = job->table;
    uint16_t *w = job->w;
    run_scales s = {{_mm256_setzero_ps()}};
    if (f->scale == DSPARK__CODE_PLAIN) {
        expand(w, codes, &table, &s, job->n_groups, kind, NONE, 0);
        return;
    }
    const size_t block = f->block / GROUP_K;
    size_t group = job->k0 / GROUP_K;
    for (size_t left = job->n_groups, n; left > 0; left -= n, group += n) {
        const uint8_t *row = job->scales + group / block * DSPARK__PANEL;
        n = block - group % block < left ? block - group % block : left;
        if (f->scale == DSPARK__CODE_OFFSET) {
            s = load_scales(row, DSPARK__CODE_OFFSET);
            expand(w, codes, &table, &s, n, kind, SUBTRACT, 0);
        } else if (f->scale == DSPARK__CODE_E8M0) {
            s = load_scales(row, DSPARK__CODE_E8M0);
            expand(w, codes, &table, &s, n, kind, MULTIPLY, 0);
        } else {
            s = load_scales(row, DSPARK__CODE_E4M3);
            expand(w, codes, &table, &s, n, kind, MULTIPLY, 1);
        }
        codes += n * group_bytes;
        w += n * GROUP_VECTORS * LANES;
    }
}

/* Called, not inlined: no multiplication may move to where MXCSR is the host's. */
DSPARK__NOINLINE void decode_kind(const decode_job *job, lookup kind)
{
    switch (kind) {
    case NIBBLES: decode_runs(job, NIBBLES); break;
    case FLOATS: decode_runs(job, FLOATS); break;
    case FLOATS_FNUZ: decode_runs(job, FLOATS_FNUZ); break;
    case INTEGERS: decode_runs(job, INTEGERS); break;
    case ANY: decode_runs(job, ANY); break;
    }
}

/* FTZ makes subnormal products zero; DAZ stays off, because 2^-127 is a scale. */
void dspark__decode__avx2(uint16_t *w, const uint8_t *codes, const uint8_t *scales,
                          const dspark__code_format *f, size_t k0, size_t n_k)
{
    const __m256i zero = _mm256_setzero_si256();
    decode_job job = {w, codes, scales, f, k0, (n_k + GROUP_K - 1) / GROUP_K,
                      {f->table, zero, zero, _mm_setzero_si128(), zero, zero}};
    lookup kind = recognise(&job.table, f->bits);
    unsigned host = _mm_getcsr();
    _mm_setcsr(host | DSPARK__MXCSR_FTZ);
    decode_kind(&job, kind);
    _mm_setcsr(host);
}

void dspark__scale_add__avx2(float *sum, const float *acc, const float *s, size_t n_rows,
                             int first)
{
    for (size_t v = 0; v < DSPARK__PANEL; v += 8) {
        __m256 scale = _mm256_loadu_ps(s + v);
        for (size_t i = 0; i < n_rows; i++) {
            float *to = sum + i * DSPARK__PANEL + v;
            __m256 a = _mm256_loadu_ps(acc + i * DSPARK__PANEL + v);
            a = first ? _mm256_mul_ps(a, scale) : _mm256_fmadd_ps(a, scale, _mm256_loadu_ps(to));
            _mm256_storeu_ps(to, a);
        }
    }
}

void dspark__finish__avx2(uint16_t *out, size_t out_stride, const float *acc, const float *s,
                          size_t n_rows, size_t n_out)
{
    for (size_t o = 0; o < n_out; o += 8) {
        size_t n = n_out - o < 8 ? n_out - o : 8;
        float scale[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        if (s) memcpy(scale, s + o, n * sizeof *s);
        for (size_t i = 0; i < n_rows; i++) {
            uint16_t y[8];
            __m256 a = _mm256_mul_ps(_mm256_loadu_ps(acc + i * DSPARK__PANEL + o),
                                     _mm256_loadu_ps(scale));
            store_8(y, 0, pack_lanes(round_bf16_lanes(a)));
            memcpy(bf16_at_mut(out, i * out_stride + o), y, 2 * n);
        }
    }
}

#endif
