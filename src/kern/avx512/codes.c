/* AVX-512: packed codes to bf16 panels by permutations of words, and what is multiplied after a
 * sum. Equal to ref/codes.c bit for bit. */
#if defined(__x86_64__)
#include "kern/avx512/codes.h"

/* [0..1] codes 0-63, [2..3] 64-127, [4..7] the others. */
DSPARK__INLINE byte_tables load_tables(const uint16_t *table, lookup kind)
{
    byte_tables t;
    DSPARK__UNROLL
    for (size_t i = 0; i < 8; i++)
        t.of[i] = _mm512_loadu_si512(table + 32 * (kind == BYTES_ANY ? i : i % 4));
    return t;
}

DSPARK__INLINE __m512i look_up(__m512i c, const byte_tables *t, lookup kind)
{
    __mmask32 upper = _mm512_test_epi16_mask(c, _mm512_set1_epi16(0x40));
    __m512i r = _mm512_permutex2var_epi16(t->of[0], c, t->of[1]);
    r = _mm512_mask_mov_epi16(r, upper, _mm512_permutex2var_epi16(t->of[2], c, t->of[3]));
    if (kind == BYTES_SIGNED)
        return set_sign(r, _mm512_slli_epi16(c, 8), _mm512_set1_epi16((short)0x8000));
    __m512i n = _mm512_permutex2var_epi16(t->of[4], c, t->of[5]);
    n = _mm512_mask_mov_epi16(n, upper, _mm512_permutex2var_epi16(t->of[6], c, t->of[7]));
    return _mm512_mask_mov_epi16(r, _mm512_test_epi16_mask(c, _mm512_set1_epi16(0x80)), n);
}

DSPARK__INLINE void expand_bytes(uint16_t *w, const uint8_t *codes, const byte_tables *t,
                                 const run_scales *s, size_t n_groups, lookup kind, scaling how)
{
    for (; n_groups > 0; n_groups--) {
        DSPARK__UNROLL
        for (size_t i = 0; i < GROUP_VECTORS; i++, codes += 32, w += 32) {
            if (i % 2 == 0) fetch_ahead(codes);
            __m512i c = _mm512_cvtepu8_epi16(_mm256_load_si256((const void *)codes));
            _mm512_store_si512(w, apply(look_up(c, t, kind), s->of[i % REGISTERS], how));
        }
    }
}

void dspark__decode__avx512(uint16_t *w, const uint8_t *codes, const uint8_t *scales,
                            const dspark__code_format *f, size_t k0, size_t n_k)
{
    decode_job job;
    job.w = w;
    job.codes = codes;
    job.scales = scales;
    job.f = f;
    job.k0 = k0;
    job.n_groups = (n_k + GROUP_K - 1) / GROUP_K;
    run_decode(&job);
}

void dspark__scale_add__avx512(float *sum, const float *acc, const float *s, size_t n_rows,
                               int first)
{
    for (size_t v = 0; v < DSPARK__PANEL; v += 16) {
        __m512 scale = _mm512_loadu_ps(s + v);
        for (size_t i = 0; i < n_rows; i++) {
            size_t at = i * DSPARK__PANEL + v;
            __m512 a = _mm512_loadu_ps(acc + at);
            a = first ? _mm512_mul_ps(a, scale)
                      : _mm512_fmadd_ps(a, scale, _mm512_loadu_ps(sum + at));
            _mm512_storeu_ps(sum + at, a);
        }
    }
}

void dspark__finish__avx512(uint16_t *out, size_t out_stride, const float *acc, const float *s,
                            size_t n_rows, size_t n_out)
{
    for (size_t o = 0; o < n_out; o += 16) {
        __mmask16 m = first_lanes(n_out - o);
        __m512 scale = s ? _mm512_maskz_loadu_ps(m, s + o) : _mm512_set1_ps(1.0f);
        for (size_t i = 0; i < n_rows; i++) {
            __m512 a = _mm512_mul_ps(_mm512_loadu_ps(acc + i * DSPARK__PANEL + o), scale);
            _mm256_mask_storeu_epi16(bf16_at_mut(out, i * out_stride + o), m, round_bf16(a));
        }
    }
}

#endif
