/* AVX-512: what one vector of packed codes becomes: table entries, how a scale is applied to them in
 * integer arithmetic where that is exact, and 4-bit look-ups. Shared by the files that expand codes to
 * memory (codes.h) and the one that multiplies them in registers (codes_bf16dot.c); owns no loop over k
 * but that of one run of groups. */
#ifndef DSPARK_KERN_AVX512_NIBBLES_H
#define DSPARK_KERN_AVX512_NIBBLES_H

#include "kern/avx512/bits.h"

/* 8 values of k of 48 outputs: 12 vectors of weights, vector i belongs to outputs 16 (i % 3) ... */
enum { GROUP_K = 8, GROUP_VECTORS = 12, GROUP_PAIRS = 4, REGISTERS = 3 };

/* How far ahead codes and scales are fetched, the codes into L2. As measured on Zen 4
 * (bench/codes_bench.c), the hardware prefetcher alone reaches half of what memory gives, because
 * most of the time nothing is loaded from it. */
enum { AHEAD = 8192, SCALES_AHEAD = 3072 };

typedef enum lookup {
    NIBBLES,      /* 4 bits */
    BYTES_SIGNED, /* 8 bits, bit 7 is the sign: 128 entries are looked up */
    BYTES_ANY
} lookup;

/* What is done with a table entry. */
typedef enum scaling {
    NONE,
    MULTIPLY,        /* fp32 products, under FTZ */
    SUBTRACT,        /* fp32 differences */
    EXPONENT,        /* scale is a power of two and nothing leaves the range: integer addition */
    EXPONENT_FINITE, /* the same, and the table holds neither NaN nor infinity */
    HALVES,          /* 4 bits: table mantissas are 1 or 1.5, so there are two products a scale */
    SMALL_INTEGERS   /* 4 bits: all differences are -16 .. 15, and are looked up */
} scaling;

/* Scale bytes of one run of groups, as the scaling needs them: per register 16 outputs, one lane of
 * 32 bits each (fp32, or the same 16-bit addend twice). */
typedef struct run_scales {
    __m512i of[REGISTERS];
    __m512i more[REGISTERS]; /* HALVES only */
} run_scales;

DSPARK__INLINE void fetch_ahead(const uint8_t *codes)
{
    _mm_prefetch((const char *)codes + AHEAD, _MM_HINT_T1);
}

DSPARK__INLINE __m512i load_scale_bytes(const uint8_t *scales, size_t v)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(scales + 16 * v)));
}

/* 48 scale bytes as fp32. Exact for every byte that the formats allow. */
DSPARK__INLINE run_scales scales_f32(const uint8_t *scales, dspark__code_scale kind)
{
    run_scales r;
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++) {
        __m512i b = load_scale_bytes(scales, v);
        if (kind == DSPARK__CODE_E8M0) {
            __mmask16 zero = _mm512_testn_epi32_mask(b, b);
            r.of[v] = _mm512_mask_mov_epi32(_mm512_slli_epi32(b, 23), zero,
                                            _mm512_set1_epi32(0x00400000));
        } else if (kind == DSPARK__CODE_E4M3) {
            __mmask16 subnormal = _mm512_cmplt_epu32_mask(b, _mm512_set1_epi32(8));
            __m512i normal = _mm512_add_epi32(_mm512_slli_epi32(b, 20),
                                              _mm512_set1_epi32(120 << 23));
            __m512 units = _mm512_mul_ps(_mm512_cvtepi32_ps(b), _mm512_set1_ps(0x1p-9f));
            r.of[v] = _mm512_mask_mov_epi32(normal, subnormal, _mm512_castps_si512(units));
        } else {
            b = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(scales + 16 * v)));
            r.of[v] = _mm512_castps_si512(_mm512_cvtepi32_ps(b));
        }
    }
    return r;
}

/* (byte - 127) << 7 in both halves of a lane, of the first n registers. */
DSPARK__INLINE run_scales scales_exponent(const uint8_t *scales, size_t n)
{
    run_scales r;
    DSPARK__UNROLL
    for (size_t v = 0; v < n; v++) {
        __m512i b = load_scale_bytes(scales, v);
        b = _mm512_or_si512(b, _mm512_slli_epi32(b, 16));
        r.of[v] = _mm512_slli_epi16(_mm512_sub_epi16(b, _mm512_set1_epi16(127)), 7);
    }
    return r;
}

DSPARK__INLINE __m512i apply(__m512i t, __m512i scale, scaling how)
{
    if (how == NONE) return t;
    if (how == EXPONENT_FINITE) {
        __mmask32 nonzero = _mm512_test_epi16_mask(t, _mm512_set1_epi16(0x7fff));
        return _mm512_mask_add_epi16(t, nonzero, t, scale);
    }
    if (how == EXPONENT) { /* magnitudes 1 .. 0x7f7f, doubled and less one */
        __m512i order = _mm512_add_epi16(_mm512_add_epi16(t, t), _mm512_set1_epi16(-1));
        __mmask32 number = _mm512_cmplt_epu16_mask(order, _mm512_set1_epi16((short)0xfeff));
        return _mm512_mask_add_epi16(t, number, t, scale);
    }
    /* Results are exact in bf16: the lower halves of both are zero, or, with NaN, cut off. */
    __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(t, _mm512_set1_epi32(-65536)));
    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(t, 16));
    __m512 s = _mm512_castsi512_ps(scale);
    odd = how == MULTIPLY ? _mm512_mul_ps(odd, s) : _mm512_sub_ps(odd, s);
    even = how == MULTIPLY ? _mm512_mul_ps(even, s) : _mm512_sub_ps(even, s);
    return _mm512_mask_mov_epi16(_mm512_srli_epi32(_mm512_castps_si512(even), 16), 0xaaaaaaaau,
                                 _mm512_castps_si512(odd));
}

/* ---- 4 bits ---------------------------------------------------------------------------------- */

/* All have 32 entries: a word's lower 5 bits are its index, and what is above a nibble in them does
 * not matter where the 16 entries are there twice. */
typedef struct nibble_tables {
    __m512i entries;
    __m512i steps;    /* HALVES: exponent - 127 and sign, bit 0: mantissa 1, bit 1: mantissa 1.5 */
    __m512i integers; /* SMALL_INTEGERS: the entries as integers */
    __m512i small;    /* bf16 of 0 .. 15, -16 .. -1 */
    int halves;
    int least, most;  /* integers; least > most where there is something else */
} nibble_tables;

static nibble_tables load_nibbles(const uint16_t *table)
{
    nibble_tables t;
    __m256i e = _mm256_loadu_si256((const void *)table);
    __m512 value = widen_bf16(e);
    __m256i magnitude = _mm256_and_si256(e, _mm256_set1_epi16(0x7fff));
    __mmask16 zero = _mm256_testn_epi16_mask(magnitude, magnitude);
    __mmask16 three = _mm256_test_epi16_mask(e, _mm256_set1_epi16(0x40));
    /* Far from both ends of the exponent, so that a product with any e4m3 stays normal. */
    __mmask16 near = _mm256_cmplt_epu16_mask(
        _mm256_sub_epi16(magnitude, _mm256_set1_epi16((127 - 64) << 7)),
        _mm256_set1_epi16(128 << 7));
    __m256i step = _mm256_sub_epi16(_mm256_and_si256(e, _mm256_set1_epi16((short)0xff80)),
                                    _mm256_set1_epi16(127 << 7));
    step = _mm256_or_si256(step, _mm256_mask_mov_epi16(_mm256_set1_epi16(1), three,
                                                       _mm256_set1_epi16(2)));
    step = _mm256_mask_mov_epi16(step, zero, e);
    t.entries = _mm512_broadcast_i64x4(e);
    t.steps = _mm512_broadcast_i64x4(step);
    t.halves = (zero | near) == 0xffff && _mm256_test_epi16_mask(e, _mm256_set1_epi16(0x3f)) == 0;

    __m512i integer = _mm512_cvttps_epi32(value);
    __mmask16 exact = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(_mm512_cvtepi32_ps(integer)),
                                              _mm512_castps_si512(value));
    t.integers = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(integer));
    t.least = exact == 0xffff ? _mm512_reduce_min_epi32(integer) : 1;
    t.most = exact == 0xffff ? _mm512_reduce_max_epi32(integer) : 0;
    __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 above = _mm512_cvtepi32_ps(index);
    __m512 below = _mm512_cvtepi32_ps(_mm512_sub_epi32(index, _mm512_set1_epi32(16)));
    t.small = _mm512_inserti64x4(_mm512_castsi256_si512(round_bf16(above)), round_bf16(below), 1);
    return t;
}

/* (byte, 0, byte, 0) a lane: the byte as a word, twice. */
DSPARK__INLINE __m512i load_scale_words(const uint8_t *scales, size_t v)
{
    return _mm512_shuffle_epi8(load_scale_bytes(scales, v),
                               _mm512_set4_epi32((int)0x800c800cu, (int)0x80088008u,
                                                 (int)0x80048004u, (int)0x80008000u));
}

/* bf16 of an e4m3 that is normal, and of 1.5 times it, less the marks in nibble_tables.steps. The
 * second differs from the first by what depends on the 3 mantissa bits alone. */
DSPARK__INLINE run_scales scales_halves(const uint8_t *scales)
{
    const __m512i more = _mm512_broadcast_i32x4(
        _mm_setr_epi16(0x3f, 0x47, 0x4f, 0x53, 0x4f, 0x4b, 0x47, 0x43));
    run_scales r;
    DSPARK__UNROLL
    for (size_t v = 0; v < REGISTERS; v++) {
        __m512i b = load_scale_words(scales, v);
        r.of[v] = _mm512_add_epi16(_mm512_slli_epi16(b, 4), _mm512_set1_epi16((120 << 7) - 1));
        r.more[v] = _mm512_add_epi16(r.of[v], _mm512_permutexvar_epi16(b, more));
    }
    return r;
}

/* Signed bytes as words, twice a lane. */
DSPARK__INLINE run_scales scales_words(const uint8_t *scales, size_t n)
{
    run_scales r;
    DSPARK__UNROLL
    for (size_t v = 0; v < n; v++) {
        __m512i b = _mm512_slli_epi16(load_scale_words(scales, v), 8);
        r.of[v] = r.more[v] = _mm512_srai_epi16(b, 8);
    }
    return r;
}

/* c: nibbles in the lower bits of words. */
DSPARK__INLINE __m512i look_up_nibbles(__m512i c, const nibble_tables *t, __m512i scale,
                                       __m512i more, scaling how)
{
    if (how == HALVES) { /* neither bit: a zero, which is its own sign */
        __m512i step = _mm512_permutexvar_epi16(c, t->steps);
        __mmask32 one = _mm512_test_epi16_mask(step, _mm512_set1_epi16(1));
        __mmask32 half = _mm512_test_epi16_mask(step, _mm512_set1_epi16(2));
        __m512i w = _mm512_mask_add_epi16(step, one, step, scale);
        return _mm512_mask_add_epi16(w, half, w, more);
    }
    if (how == SMALL_INTEGERS) {
        __m512i difference = _mm512_sub_epi16(_mm512_permutexvar_epi16(c, t->integers), scale);
        return _mm512_permutexvar_epi16(difference, t->small);
    }
    return apply(_mm512_permutexvar_epi16(c, t->entries), scale, how);
}

/* Turned codes as words of nibbles. */
DSPARK__INLINE __m512i turn_back(__m512i raw)
{
    const __m512i order = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    return _mm512_shuffle_epi8(_mm512_ror_epi32(raw, 3), order);
}

DSPARK__INLINE void expand_nibbles(uint16_t *w, const uint8_t *codes, const nibble_tables *t,
                                   const run_scales *s, size_t n_groups, scaling how, int turned)
{
    for (; n_groups > 0; n_groups--, codes += 192, w += GROUP_VECTORS * 32) {
        DSPARK__UNROLL
        for (size_t v = 0; v < REGISTERS; v++) {
            __m512i raw = _mm512_load_si512(codes + 64 * v);
            fetch_ahead(codes + 64 * v);
            if (turned) raw = turn_back(raw);
            DSPARK__UNROLL
            for (size_t j = 0; j < GROUP_PAIRS; j++) {
                __m512i c = _mm512_srli_epi16(raw, 4 * (unsigned)j);
                _mm512_store_si512(w + 32 * (REGISTERS * j + v),
                                   look_up_nibbles(c, t, s->of[v], s->more[v], how));
            }
        }
    }
}

/* Smallest and largest exponent field of what is neither zero, NaN nor infinite, and whether there
 * is NaN or infinity. Empty: low 255, high 0. */
typedef struct table_range {
    uint32_t low, high;
    int finite;
} table_range;

DSPARK__INLINE table_range range_of(const uint16_t *table, size_t n)
{
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __m512i low = exponent, high = _mm512_setzero_si512();
    __mmask32 special = 0;
    for (size_t i = 0; i < n; i += 32) {
        __mmask32 m = n - i >= 32 ? 0xffffffffu : 0xffffu;
        __m512i t = _mm512_maskz_loadu_epi16(m, table + i);
        __m512i e = _mm512_and_si512(t, exponent);
        __mmask32 bad = _mm512_cmpeq_epi16_mask(e, exponent);
        __mmask32 number = _mm512_test_epi16_mask(t, _mm512_set1_epi16(0x7fff)) & ~bad;
        special |= bad;
        low = _mm512_mask_min_epu16(low, number, low, e);
        high = _mm512_mask_max_epu16(high, number, high, e);
    }
    __m512i low_even = _mm512_and_si512(low, _mm512_set1_epi32(0xffff));
    __m512i high_even = _mm512_and_si512(high, _mm512_set1_epi32(0xffff));
    low = _mm512_min_epu32(low_even, _mm512_srli_epi32(low, 16));
    high = _mm512_max_epu32(high_even, _mm512_srli_epi32(high, 16));
    return (table_range){_mm512_reduce_min_epu32(low) >> 7, _mm512_reduce_max_epu32(high) >> 7,
                         special == 0};
}

/* Are n bytes all within low .. high, whether these are signed or not? */
DSPARK__INLINE int bytes_within(const uint8_t *bytes, size_t n, int low, int high)
{
    const __m512i least = _mm512_set1_epi8((char)low);
    __m512i most = _mm512_setzero_si512();
    if (low > high) return 0;
    for (size_t i = 0; i < n; i += 64) {
        __mmask64 m = n - i >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (n - i)) - 1;
        __m512i b = _mm512_sub_epi8(_mm512_maskz_loadu_epi8(m, bytes + i), least);
        most = _mm512_mask_max_epu8(most, m, most, b);
    }
    return _mm512_cmpgt_epu8_mask(most, _mm512_set1_epi8((char)(high - low))) == 0;
}

/* The byte scales for which the fast way of a scale and a table is exact; empty: low > high. */
typedef struct fast_scales {
    scaling how;
    int low, high;
} fast_scales;

DSPARK__INLINE fast_scales fast_scales_of(const dspark__code_format *f, const nibble_tables *t,
                                          dspark__code_scale scale)
{
    fast_scales fast = {NONE, 1, 0};
    if (scale == DSPARK__CODE_E8M0) { /* exponents of all products lie within 1 .. 254 */
        table_range range = range_of(f->table, f->bits == 4 ? 16 : 256);
        fast.how = range.finite ? EXPONENT_FINITE : EXPONENT;
        if (range.low > 0) {
            fast.low = range.low < 128 ? 128 - (int)range.low : 0;
            fast.high = range.high > 127 ? 381 - (int)range.high : 254;
        }
    } else if (f->bits == 4 && scale == DSPARK__CODE_E4M3 && t->halves) {
        fast = (fast_scales){HALVES, 8, 0x7e}; /* neither zero nor subnormal */
    } else if (f->bits == 4 && scale == DSPARK__CODE_OFFSET && t->least <= t->most) {
        fast = (fast_scales){SMALL_INTEGERS, t->most - 15, t->least + 16};
        if (fast.low < -128) fast.low = -128;
        if (fast.high > 127) fast.high = 127;
    }
    return fast;
}

#endif
