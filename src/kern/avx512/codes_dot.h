/* AVX-512 with VBMI: what vectors of packed codes become when they are multiplied in the registers
 * where they were looked up: the tables, the scales of a run, and the expansion of a few values of k.
 * Owns no loop over k and no accumulator (codes_bf16dot_vbmi.c).
 *
 * The powers of two in scales are not applied to weights, of which there are many, but to accumulators:
 * these stand under the power of the present row of scales and are multiplied by a power of two when the
 * next one comes. Rounding is the same under any power as long as nothing leaves the range, which tame
 * x and scales exclude (see is_tame). */
#ifndef DSPARK_KERN_AVX512_CODES_DOT_H
#define DSPARK_KERN_AVX512_CODES_DOT_H

#include "kern/avx512/nibbles.h"
#include "kern/dot_bounds.h"

typedef enum way {
    BYTES_HALF,       /* 8 bits: bit 7 is the sign, 128 entries are looked up */
    BYTES_WHOLE,      /* 8 bits, any table */
    BYTES_POWER,      /* as BYTES_HALF, with e8m0 scales */
    NIBBLES_PLAIN,    /* 4 bits, any table */
    NIBBLES_POWER,    /* with e8m0 scales */
    NIBBLES_PRODUCT,  /* with e4m3 scales: code and mantissa of the scale are looked up at once */
    NIBBLES_INTEGER,  /* less an integer; all differences are -16 .. 15 */
    NO_WAY
} way;

DSPARK__INLINE int is_bytes(way how)
{
    return how <= BYTES_POWER;
}

DSPARK__INLINE int is_scaled(way how)
{
    return how == BYTES_POWER || how == NIBBLES_POWER || how == NIBBLES_PRODUCT;
}

DSPARK__INLINE int has_scales(way how)
{
    return how == NIBBLES_INTEGER || is_scaled(how);
}

/* Bytes of 8 values of k of a panel. */
DSPARK__INLINE size_t group_bytes(way how)
{
    return is_bytes(how) ? 384 : 192;
}

/* BYTES: of[0..1] lower halves of codes 0-127, [2..3] upper halves, [4..7] the same of the others.
 * NIBBLES_PRODUCT: of[0] lower halves by mantissa + 8 * code without its sign, [1..2] upper halves by
 * mantissa + 8 * code; [3..4] upper and lower bytes of powers of two (see power_between_rows). PLAIN and
 * POWER: of[0], twice 16 entries. INTEGER: of[0] integers, of[1] bf16 of 0 .. 15, -16 .. -1. */
typedef struct dot_tables {
    __m512i of[8];
    __m512i order; /* BYTES: eight codes a lane of 128 bits */
    __m512i mask;  /* BYTES: 0x80, NIBBLES_PRODUCT: bits 3-6, in each byte */
    /* NIBBLES_PRODUCT: where the bytes of 16 outputs of a row go, see spread_bytes and power_between_rows */
    __m512i mantissas[3], powers[3];
} dot_tables;

/* Of 16 scale bytes. INTEGER: what is subtracted from words; PRODUCT: the mantissas in bits 0-2 of bytes. */
typedef __m512i dot_scales;

/* ---- tables ---------------------------------------------------------------------------------- */

DSPARK__INLINE int is_near(uint16_t entry)
{
    unsigned exponent = entry >> 7 & 255u;
    return (entry & 0x7fffu) == 0 || (exponent >= 127 - NEAR && exponent < 127 + NEAR);
}

/* Entries as their lower and upper halves, 128 of them. */
static void split_entries(__m512i to[4], const uint16_t *entries)
{
    _Alignas(64) uint8_t half[2][128];
    for (size_t i = 0; i < 128; i++) {
        half[0][i] = (uint8_t)entries[i];
        half[1][i] = (uint8_t)(entries[i] >> 8);
    }
    for (size_t i = 0; i < 4; i++) to[i] = _mm512_load_si512(half[i / 2] + 64 * (i % 2));
}

/* Codes whose entry is not finite do not occur, so those entries may be anything. */
static way prepare_bytes(dot_tables *t, const dspark__code_format *f)
{
    uint16_t entries[256];
    int is_half = 1, near = 1;
    for (size_t c = 0; c < 128; c++) {
        uint16_t a = f->table[c], b = f->table[c + 128];
        if (!dspark__bf16_is_finite(a)) a = b & 0x7fffu;
        if (!dspark__bf16_is_finite(b)) b = a | 0x8000u;
        is_half &= a < 0x8000u && b == (a | 0x8000u);
        near &= !dspark__bf16_is_finite(a) || is_near(a);
        entries[c] = a;
        entries[c + 128] = b;
    }
    split_entries(t->of, entries);
    if (f->scale == DSPARK__CODE_E8M0) return is_half && near ? BYTES_POWER : NO_WAY;
    if (f->scale != DSPARK__CODE_PLAIN) return NO_WAY;
    if (is_half) return BYTES_HALF;
    split_entries(t->of + 4, entries + 128);
    return BYTES_WHOLE;
}

/* Codes are nibbles in bits 3-6, above the mantissa, so that one look-up of 64 bytes finds lower halves,
 * which a sign does not change. */
static way prepare_product(dot_tables *t, const uint16_t *table)
{
    uint16_t entries[128];
    __m512i halves[4];
    _Alignas(64) uint8_t upper[64], lower[64], bytes[64];
    for (size_t i = 0; i < 128; i++) {
        uint16_t code = table[i / 8];
        if (!is_near(code) || (code ^ table[i / 8 % 8]) & 0x7fffu) return NO_WAY;
        float mantissa = (float)(8 + i % 8) * 0.125f;
        float product = dspark__bf16_to_f32(code) * mantissa;
        entries[i] = (uint16_t)(dspark__f32_bits(product) >> 16);
    }
    split_entries(halves, entries);
    t->of[0] = halves[0];
    t->of[1] = halves[2];
    t->of[2] = halves[3];
    for (int i = 0; i < 64; i++) { /* by a difference of exponents, -16 .. 15 */
        int exponent = 127 + (i % 32 < 16 ? i % 32 : i % 32 - 32);
        upper[i] = (uint8_t)(exponent >> 1);
        lower[i] = (uint8_t)(exponent << 7);
    }
    t->of[3] = _mm512_load_si512(upper);
    t->of[4] = _mm512_load_si512(lower);
    for (uint8_t v = 0; v < 3; v++) {
        for (uint8_t i = 0; i < 64; i++) bytes[i] = (uint8_t)(16 * v + i / 16 * 4 + i % 8 / 2);
        t->mantissas[v] = _mm512_load_si512(bytes);
        for (uint8_t i = 0; i < 64; i++) bytes[i] = (uint8_t)(16 * v + i / 4 + (i % 4 == 2 ? 64 : 0));
        t->powers[v] = _mm512_load_si512(bytes);
    }
    return NIBBLES_PRODUCT;
}

/* The tables of a format and the scale bytes that they serve. */
static way prepare_tables(dot_tables *t, fast_scales *fast, const dspark__code_format *f)
{
    t->order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    t->mask = _mm512_set1_epi8(f->bits == 8 ? (char)0x80 : 0x78);
    fast->low = 127 - POWERS;
    fast->high = 127 + POWERS;
    if (f->bits == 8) return prepare_bytes(t, f);
    nibble_tables n = load_nibbles(f->table);
    if (f->scale == DSPARK__CODE_E4M3) {
        fast->low = 8; /* neither zero nor subnormal */
        fast->high = 0x7e;
        return prepare_product(t, f->table);
    }
    if (f->scale == DSPARK__CODE_E8M0) {
        for (size_t c = 0; c < 16; c++)
            if (!is_near(f->table[c])) return NO_WAY;
        t->of[0] = n.entries;
        return NIBBLES_POWER;
    }
    if (f->scale == DSPARK__CODE_OFFSET) {
        *fast = fast_scales_of(f, &n, DSPARK__CODE_OFFSET);
        t->of[0] = n.integers;
        t->of[1] = n.small;
        return fast->how == SMALL_INTEGERS ? NIBBLES_INTEGER : NO_WAY;
    }
    t->of[0] = n.entries;
    return NIBBLES_PLAIN;
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* Output i / 2 for word i, its lower byte. */
DSPARK__INLINE __m512i spread_words(__m512i bytes)
{
    const __m512i at = _mm512_setr_epi32(0, 0x00010001, 0x00020002, 0x00030003, 0x00040004, 0x00050005,
                                         0x00060006, 0x00070007, 0x00080008, 0x00090009, 0x000a000a,
                                         0x000b000b, 0x000c000c, 0x000d000d, 0x000e000e, 0x000f000f);
    return _mm512_maskz_permutexvar_epi8(0x5555555555555555u, at, bytes);
}

/* A whole row. A load that broadcasts 16 of its bytes would take the place of a permutation. */
DSPARK__INLINE __m512i load_row(const uint8_t *row)
{
    return _mm512_maskz_loadu_epi8(((__mmask64)1 << DSPARK__PANEL) - 1, row);
}

DSPARK__INLINE dot_scales load_scales(const uint8_t *row, size_t v, const dot_tables *t, way how)
{
    if (how == NIBBLES_PRODUCT) return _mm512_permutexvar_epi8(t->mantissas[v], load_row(row));
    if (how != NIBBLES_INTEGER) return _mm512_setzero_si512();
    __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)(row + 16 * v)));
    return _mm512_srai_epi16(_mm512_slli_epi16(spread_words(bytes), 8), 8);
}

/* The exponent fields of 16 e8m0 scales in their place in fp32. NULL: of one. */
DSPARK__INLINE __m512i load_powers(const uint8_t *row, size_t v)
{
    if (!row) return _mm512_set1_epi32(127 << 23);
    return _mm512_slli_epi32(load_scale_bytes(row, v), 23);
}

/* What takes accumulators from under `from` to under `to`. */
DSPARK__INLINE __m512 power_between(__m512i from, __m512i to)
{
    return _mm512_castsi512_ps(
        _mm512_sub_epi32(_mm512_add_epi32(from, _mm512_set1_epi32(127 << 23)), to));
}

/* The exponent fields of a row of e4m3 scales where they are in the bytes. NULL: of one. */
DSPARK__INLINE __m512i load_exponents(const uint8_t *row)
{
    const __m512i field = _mm512_set1_epi8(0x78);
    return row ? _mm512_and_si512(load_row(row), field) : _mm512_set1_epi8(7 << 3);
}

/* The same as power_between for e4m3, of which two exponents differ by less than 16: what is not zero in
 * such a power of two, its two upper bytes, is looked up for all 48 outputs at once. */
typedef struct row_powers {
    __m512i upper, lower;
} row_powers;

DSPARK__INLINE row_powers power_between_rows(__m512i from, __m512i to, const dot_tables *t)
{
    __m512i difference = _mm512_srli_epi16(_mm512_sub_epi8(from, to), 3); /* in bits 0-4; 5 is zero */
    return (row_powers){_mm512_permutexvar_epi8(difference, t->of[3]),
                        _mm512_permutexvar_epi8(difference, t->of[4])};
}

DSPARK__INLINE __m512 power_of_outputs(row_powers p, size_t v, const dot_tables *t)
{
    const __mmask64 upper_half = 0xccccccccccccccccu;
    return _mm512_castsi512_ps(
        _mm512_maskz_permutex2var_epi8(upper_half, p.upper, t->powers[v], p.lower));
}

/* ---- expansion ------------------------------------------------------------------------------- */

/* How far ahead codes are fetched, and into which cache, as measured on Zen 4 with cold codes
 * (bench/codes_bench.c). Bytes for one row outrun memory, and the hardware fetches them best alone; products
 * are slower than memory, and come into L1. Others are about as fast as memory: a prefetch that finds no miss
 * buffer is dropped and its line is waited for, so every line is asked for three times (nibbles of one row: 14
 * % faster than once with powers, 24 % with integers; bytes of 2 to 4 rows: 3 to 8 %). */
DSPARK__INLINE void fetch_line(const uint8_t *codes, size_t n_rows, way how)
{
    const char *at = (const char *)codes;
    if (is_bytes(how) && n_rows > 1) {
        _mm_prefetch(at + 24576, _MM_HINT_T1);
        _mm_prefetch(at + 16384, _MM_HINT_T1);
        _mm_prefetch(at + 8192, _MM_HINT_T1);
    }
    if (how == NIBBLES_PRODUCT) {
        _mm_prefetch(at + 8192, _MM_HINT_T1);
        _mm_prefetch(at + 2048, _MM_HINT_T0);
    }
    if (is_bytes(how) || how == NIBBLES_PRODUCT) return;
    _mm_prefetch(at + 12288, _MM_HINT_T1);
    _mm_prefetch(at + 8192, _MM_HINT_T1);
    _mm_prefetch(at + 4096, _MM_HINT_T1);
}

/* 64 codes, in order, as two vectors of weights. */
DSPARK__INLINE void expand_bytes(__m512i w[2], const uint8_t *codes, const dot_tables *t, way how)
{
    __m512i c = _mm512_permutexvar_epi64(t->order, _mm512_load_si512(codes));
    __m512i low = _mm512_permutex2var_epi8(t->of[0], c, t->of[1]);
    __m512i high = _mm512_permutex2var_epi8(t->of[2], c, t->of[3]);
    if (how == BYTES_WHOLE) {
        __mmask64 upper = _mm512_movepi8_mask(c);
        low = _mm512_mask_mov_epi8(low, upper, _mm512_permutex2var_epi8(t->of[4], c, t->of[5]));
        high = _mm512_mask_mov_epi8(high, upper, _mm512_permutex2var_epi8(t->of[6], c, t->of[7]));
    } else { /* high | c & sign */
        high = _mm512_ternarylogic_epi32(high, c, t->mask, 0xf8);
    }
    w[0] = _mm512_unpacklo_epi8(low, high);
    w[1] = _mm512_unpackhi_epi8(low, high);
}

/* 4 pairs of k of 16 outputs, which 64 bytes hold (kern.h): bytes are looked up, the two halves of 64
 * products apart. A rotation by the rest of a nibble brings the others into the same bits. */
DSPARK__INLINE void expand_products(__m512i w[GROUP_PAIRS], const uint8_t *codes,
                                    const dot_tables *t, dot_scales mantissa)
{
    __m512i raw = _mm512_load_si512(codes);
    DSPARK__UNROLL
    for (size_t j = 0; j < 2; j++) {
        __m512i c = j ? _mm512_ror_epi32(raw, 4) : raw;
        c = _mm512_ternarylogic_epi32(c, t->mask, mantissa, 0xe2); /* mask ? c : mantissa */
        __m512i low = _mm512_permutexvar_epi8(c, t->of[0]);
        __m512i high = _mm512_permutex2var_epi8(t->of[1], c, t->of[2]);
        w[j] = _mm512_unpacklo_epi8(low, high);
        w[j + 2] = _mm512_unpackhi_epi8(low, high);
    }
}

DSPARK__INLINE void expand_line(__m512i w[GROUP_PAIRS], const uint8_t *codes, const dot_tables *t,
                                dot_scales scales, way how)
{
    if (how == NIBBLES_PRODUCT) {
        expand_products(w, codes, t, scales);
        return;
    }
    __m512i raw = _mm512_load_si512(codes);
    DSPARK__UNROLL
    for (size_t j = 0; j < GROUP_PAIRS; j++) {
        w[j] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 4 * (unsigned)j), t->of[0]);
        if (how == NIBBLES_INTEGER)
            w[j] = _mm512_permutexvar_epi16(_mm512_sub_epi16(w[j], scales), t->of[1]);
    }
}

/* ---- x --------------------------------------------------------------------------------------- */

/* Is every element of n_rows rows zero or within 2^-TAME_LOW .. 2^TAME_HIGH, and k small enough? */
static int is_tame(const unsigned char *x, size_t x_stride, size_t n_rows, size_t k)
{
    const short low = (127 - TAME_LOW) << 7, high = (127 + TAME_HIGH) << 7;
    const __m512i magnitude = _mm512_set1_epi16(0x7fff), least = _mm512_set1_epi16(low);
    const __m512i range = _mm512_set1_epi16(high - low);
    __mmask32 wild = k > (size_t)1 << TAME_K;
    for (size_t i = 0; i < n_rows && wild == 0; i++, x += x_stride) {
        for (size_t j = 0; j < k; j += 32) {
            __mmask32 m = k - j >= 32 ? 0xffffffffu : (1u << (k - j)) - 1;
            __m512i u = _mm512_and_si512(_mm512_maskz_loadu_epi16(m, x + 2 * j), magnitude);
            wild |= _mm512_mask_cmpgt_epu16_mask(_mm512_test_epi16_mask(u, u),
                                                 _mm512_sub_epi16(u, least), range);
        }
    }
    return wild == 0;
}

#endif
