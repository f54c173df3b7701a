/* AVX-512: 48 rows of codes into a panel (kern.h has the layouts), 64 bytes of each row at a time: words of four
 * bytes are transposed as pairs of bf16 are, and what is in a word is put in order before or after. */
#if defined(__x86_64__)
#include "kern/avx512/pack.h"

enum { SQUARE_BYTES = 64, AHEAD = 512 };

/* 16 rows' words. */
DSPARK__INLINE void load_rows(__m512i r[16], const unsigned char *from, size_t stride, __m512i flip)
{
    DSPARK__UNROLL
    for (size_t i = 0; i < 16; i++) {
        r[i] = _mm512_xor_si512(_mm512_loadu_si512(from + i * stride), flip);
        _mm_prefetch((const char *)from + i * stride + AHEAD, _MM_HINT_T0);
    }
}

/* The eight nibbles of each word: those of even places in its low half, the others in its high half. */
DSPARK__INLINE __m512i part_nibbles(__m512i x)
{
    const __m512i low = _mm512_set1_epi8(15), weights = _mm512_set1_epi16(0x1001);
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    const __m512i even = _mm512_maddubs_epi16(_mm512_and_si512(x, low), weights);
    const __m512i odd = _mm512_maddubs_epi16(_mm512_and_si512(_mm512_srli_epi16(x, 4), low), weights);
    return _mm512_shuffle_epi8(_mm512_or_si512(even, _mm512_slli_epi16(odd, 8)), order);
}

/* Words of nibbles turned, as codes under e4m3 scales are. */
DSPARK__INLINE __m512i turn(__m512i x)
{
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    return _mm512_rol_epi32(_mm512_shuffle_epi8(x, order), 3);
}

static void pack_square4(uint8_t *to, const unsigned char *from, size_t stride, __m512i flip, int turned)
{
    for (size_t j = 0; j < DSPARK__PANEL; j += 16, from += 16 * stride) {
        __m512i r[16];
        load_rows(r, from, stride, flip);
        DSPARK__UNROLL
        for (size_t i = 0; i < 16; i++) r[i] = part_nibbles(r[i]);
        transpose_words(r);
        DSPARK__UNROLL
        for (size_t i = 0; i < 16; i++)
            _mm512_stream_si512((void *)(to + 4 * (i * DSPARK__PANEL + j)), turned ? turn(r[i]) : r[i]);
    }
}

/* A word holds two pairs of places: one goes to the first 96 bytes of 192, one to the last. */
static void pack_square8(uint8_t *to, const unsigned char *from, size_t stride, __m512i flip)
{
    __m512i words[3][16];
    uint16_t first[32], middle[32], last[32];
    for (unsigned i = 0; i < 32; i++) {
        first[i] = (uint16_t)(2 * i);
        middle[i] = (uint16_t)(i < 16 ? 2 * i : 2 * (i - 16) + 33);
        last[i] = (uint16_t)(2 * i + 1);
    }
    const __m512i firsts = _mm512_loadu_si512(first), middles = _mm512_loadu_si512(middle),
                  lasts = _mm512_loadu_si512(last);
    for (size_t j = 0; j < 3; j++, from += 16 * stride) {
        load_rows(words[j], from, stride, flip);
        transpose_words(words[j]);
    }
    for (size_t i = 0; i < 16; i++, to += 192) {
        const __m512i a = words[0][i], b = words[1][i], c = words[2][i];
        _mm512_stream_si512((void *)to, _mm512_permutex2var_epi16(a, firsts, b));
        _mm512_stream_si512((void *)(to + 64), _mm512_permutex2var_epi16(c, middles, a));
        _mm512_stream_si512((void *)(to + 128), _mm512_permutex2var_epi16(b, lasts, c));
    }
}

size_t dspark__pack_codes__avx512(uint8_t *panel, const void *rows, size_t stride, size_t k, uint32_t bits,
                                  uint8_t flip, int turned)
{
    const unsigned char *from = rows;
    const size_t n = k * bits / 8 / SQUARE_BYTES;
    const __m512i flips = _mm512_set1_epi8((char)(bits == 8 ? flip : (flip & 15) * 17));
    for (size_t i = 0; i < n; i++, from += SQUARE_BYTES) {
        if (bits == 8) pack_square8(panel + i * SQUARE_BYTES * DSPARK__PANEL, from, stride, flips);
        else pack_square4(panel + i * SQUARE_BYTES * DSPARK__PANEL, from, stride, flips, turned);
    }
    _mm_sfence(); /* streaming stores are not ordered by a lock or an atomic */
    return n * SQUARE_BYTES * 8 / bits;
}

#endif
