/* AVX-512 with VBMI: bytes are looked up 64 at a time, the lower and upper halves of bf16 apart.
 * For the machines of the avx512 levels that have it (kern/select.c asks); the bits are those of
 * codes.c. */
#if defined(__x86_64__)
#include "kern/avx512/codes.h"

/* Every second byte of 128 table entries, from `half`: 0 = lower, 1 = upper. */
DSPARK__INLINE void split_table(__m512i to[2], const uint16_t *table, int half)
{
    uint8_t at[64];
    for (size_t i = 0; i < 64; i++) at[i] = (uint8_t)(2 * i + (size_t)half);
    const __m512i index = _mm512_loadu_si512(at);
    for (size_t i = 0; i < 2; i++)
        to[i] = _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 64 * i), index,
                                         _mm512_loadu_si512(table + 64 * i + 32));
}

/* [0..1] lower halves of codes 0-127, [2..3] upper halves, [4..7] the same of the other codes. */
DSPARK__INLINE byte_tables load_tables(const uint16_t *table, lookup kind)
{
    byte_tables t;
    DSPARK__UNROLL
    for (size_t i = 0; i < 2; i++) {
        const uint16_t *from = table + (kind == BYTES_ANY ? 128 * i : 0);
        split_table(t.of + 4 * i, from, 0);
        split_table(t.of + 4 * i + 2, from, 1);
    }
    return t;
}

DSPARK__INLINE void expand_bytes(uint16_t *w, const uint8_t *codes, const byte_tables *t,
                                 const run_scales *s, size_t n_groups, lookup kind, scaling how)
{
    /* Eight codes a lane, so that unpacking leaves them in order. */
    const __m512i spread = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (; n_groups > 0; n_groups--) {
        DSPARK__UNROLL
        for (size_t i = 0; i < GROUP_VECTORS; i += 2, codes += 64, w += 64) {
            __m512i c = _mm512_permutexvar_epi64(spread, _mm512_load_si512(codes));
            fetch_ahead(codes);
            __m512i low = _mm512_permutex2var_epi8(t->of[0], c, t->of[1]);
            __m512i high = _mm512_permutex2var_epi8(t->of[2], c, t->of[3]);
            if (kind == BYTES_SIGNED) {
                high = set_sign(high, c, _mm512_set1_epi8((char)0x80));
            } else {
                __mmask64 upper = _mm512_movepi8_mask(c);
                low = _mm512_mask_mov_epi8(low, upper,
                                           _mm512_permutex2var_epi8(t->of[4], c, t->of[5]));
                high = _mm512_mask_mov_epi8(high, upper,
                                            _mm512_permutex2var_epi8(t->of[6], c, t->of[7]));
            }
            __m512i first = _mm512_unpacklo_epi8(low, high);
            __m512i second = _mm512_unpackhi_epi8(low, high);
            _mm512_store_si512(w, apply(first, s->of[i % REGISTERS], how));
            _mm512_store_si512(w + 32, apply(second, s->of[(i + 1) % REGISTERS], how));
        }
    }
}

static void decode_vbmi(uint16_t *w, const uint8_t *codes, const uint8_t *scales,
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

void dspark__kern_avx512vbmi(dspark__kern *k)
{
    k->decode = decode_vbmi;
}

#endif
