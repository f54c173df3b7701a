/* AVX-512: packed codes to bf16 panels, for two ways of looking bytes up (codes.c, codes_vbmi.c):
 * each says how 32 or 64 codes become table entries, this file what is done with the entries and in
 * which order. Everything is inlined with constant arguments, one copy per kind of table and
 * scale. */
#ifndef DSPARK_KERN_AVX512_CODES_H
#define DSPARK_KERN_AVX512_CODES_H

#include "kern/avx512/nibbles.h"

#include "base/fpenv.h"

/* ---- all ------------------------------------------------------------------------------------- */

/* Tables of bytes in the form that the including file looks up, and how it expands groups. */
typedef struct byte_tables {
    __m512i of[8];
} byte_tables;

DSPARK__INLINE byte_tables load_tables(const uint16_t *table, lookup kind);
DSPARK__INLINE void expand_bytes(uint16_t *w, const uint8_t *codes, const byte_tables *t,
                                 const run_scales *s, size_t n_groups, lookup kind, scaling how);

/* Where bit 7 is the sign, half a table is enough: entry c of `half` is table[c], and its bit 15,
 * which would be zero, says that entry c + 128 has no sign either (NaN). Returns 0 for other
 * tables. */
static int halve_table(uint16_t half[128], const uint16_t *table)
{
    const __m512i sign = _mm512_set1_epi16((short)0x8000);
    __m512i wrong = _mm512_setzero_si512();
    for (size_t i = 0; i < 128; i += 32) {
        __m512i a = _mm512_loadu_si512(table + i), b = _mm512_loadu_si512(table + 128 + i);
        wrong = _mm512_or_si512(wrong, _mm512_and_si512(a, sign));
        wrong = _mm512_or_si512(wrong, _mm512_andnot_si512(sign, _mm512_xor_si512(a, b)));
        _mm512_storeu_si512(half + i, _mm512_or_si512(a, _mm512_andnot_si512(b, sign)));
    }
    return _mm512_test_epi32_mask(wrong, wrong) == 0;
}

/* r, an entry of half a table, with the sign of c where it takes one; `sign` has that bit set. */
DSPARK__INLINE __m512i set_sign(__m512i r, __m512i c, __m512i sign)
{
    return _mm512_ternarylogic_epi32(r, c, sign, 0x58); /* sign ? c & ~r : r */
}

typedef struct decode_job {
    uint16_t *w;
    const uint8_t *codes, *scales;
    const dspark__code_format *f;
    size_t k0, n_groups;
    uint16_t half[128];
} decode_job;

DSPARK__INLINE void expand(uint16_t *w, const uint8_t *codes, const nibble_tables *nibbles,
                           const byte_tables *bytes, const run_scales *s, size_t n_groups,
                           lookup kind, scaling how, int turned)
{
    if (kind == NIBBLES) expand_nibbles(w, codes, nibbles, s, n_groups, how, turned);
    else expand_bytes(w, codes, bytes, s, n_groups, kind, how);
}

/* Runs of groups with the same scales; the kinds are constants in each copy. */
DSPARK__INLINE void decode_runs(const decode_job *job, lookup kind, dspark__code_scale scale)
{
    const dspark__code_format *f = job->f;
    const size_t group_bytes = kind == NIBBLES ? 192 : 384;
    const uint8_t *codes = job->codes + job->k0 / GROUP_K * group_bytes;
    uint16_t *w = job->w;
    nibble_tables nibbles = {0};
    byte_tables bytes = {{_mm512_setzero_si512()}};
    run_scales s = {{_mm512_setzero_si512()}, {_mm512_setzero_si512()}};
    if (kind == NIBBLES) nibbles = load_nibbles(f->table);
    else bytes = load_tables(kind == BYTES_SIGNED ? job->half : f->table, kind);
    if (scale == DSPARK__CODE_PLAIN) {
        expand(w, codes, &nibbles, &bytes, &s, job->n_groups, kind, NONE, 0);
        return;
    }
    const fast_scales fast = fast_scales_of(f, &nibbles, scale);
    const size_t block = f->block / GROUP_K;
    size_t group = job->k0 / GROUP_K;
    for (size_t left = job->n_groups, n; left > 0; left -= n, group += n) {
        const uint8_t *row = job->scales + group / block * DSPARK__PANEL;
        n = block - group % block < left ? block - group % block : left;
        _mm_prefetch((const char *)row + SCALES_AHEAD, _MM_HINT_T0);
        int is_fast = (scale != DSPARK__CODE_OFFSET || kind == NIBBLES) &&
                      bytes_within(row, DSPARK__PANEL, fast.low, fast.high);
        if (scale == DSPARK__CODE_E8M0 && is_fast && fast.how == EXPONENT_FINITE) {
            s = scales_exponent(row, REGISTERS);
            expand(w, codes, &nibbles, &bytes, &s, n, kind, EXPONENT_FINITE, 0);
        } else if (scale == DSPARK__CODE_E8M0 && is_fast) {
            s = scales_exponent(row, REGISTERS);
            expand(w, codes, &nibbles, &bytes, &s, n, kind, EXPONENT, 0);
        } else if (scale == DSPARK__CODE_E4M3 && kind == NIBBLES && is_fast) {
            s = scales_halves(row);
            expand_nibbles(w, codes, &nibbles, &s, n, HALVES, 1);
        } else if (scale == DSPARK__CODE_OFFSET && kind == NIBBLES && is_fast) {
            s = scales_words(row, REGISTERS);
            expand_nibbles(w, codes, &nibbles, &s, n, SMALL_INTEGERS, 0);
        } else {
            s = scales_f32(row, scale);
            expand(w, codes, &nibbles, &bytes, &s, n, kind,
                   scale == DSPARK__CODE_OFFSET ? SUBTRACT : MULTIPLY, scale == DSPARK__CODE_E4M3);
        }
        codes += n * group_bytes;
        w += n * GROUP_VECTORS * 32;
    }
}

DSPARK__INLINE void decode_kind(const decode_job *job, lookup kind)
{
    switch (job->f->scale) {
    case DSPARK__CODE_PLAIN: decode_runs(job, kind, DSPARK__CODE_PLAIN); break;
    case DSPARK__CODE_E4M3: decode_runs(job, kind, DSPARK__CODE_E4M3); break;
    case DSPARK__CODE_E8M0: decode_runs(job, kind, DSPARK__CODE_E8M0); break;
    case DSPARK__CODE_OFFSET: decode_runs(job, kind, DSPARK__CODE_OFFSET); break;
    }
}

/* Called, not inlined: no multiplication may move to where MXCSR is the host's. */
DSPARK__NOINLINE void decode_nibbles(const decode_job *job)
{
    decode_kind(job, NIBBLES);
}

DSPARK__NOINLINE void decode_bytes_signed(const decode_job *job)
{
    decode_kind(job, BYTES_SIGNED);
}

DSPARK__NOINLINE void decode_bytes_any(const decode_job *job)
{
    decode_kind(job, BYTES_ANY);
}

/* FTZ makes subnormal products zero; DAZ stays off, because 2^-127 is a scale. */
static void run_decode(decode_job *job)
{
    unsigned host = _mm_getcsr();
    _mm_setcsr(host | DSPARK__MXCSR_FTZ);
    if (job->f->bits == 4) decode_nibbles(job);
    else if (halve_table(job->half, job->f->table)) decode_bytes_signed(job);
    else decode_bytes_any(job);
    _mm_setcsr(host);
}

#endif
