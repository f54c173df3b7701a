/* AVX-512: codes of W2's rows for upper bounds of logits. Equal to ref/bound_make.c bit for bit: every lane is a row
 * of its own, and products are not fused. */
#if defined(__x86_64__)
#include "kern/avx512/bits.h"

enum { LANES = 16 };

typedef float bound_row[DSPARK__PANEL];

/* Without subnormals. */
DSPARK__INLINE __m512 normal(__m512i bits)
{
    const __mmask16 some = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    return _mm512_castsi512_ps(_mm512_maskz_mov_epi32(some, bits));
}

void dspark__bound_widen__avx512(float (*w)[DSPARK__PANEL], const uint16_t *from, size_t n)
{
    for (size_t i = 0; i < n; i += 2)
        for (size_t lane = 0; lane < DSPARK__PANEL; lane += LANES, from += 2 * LANES) {
            const void *at = from;
            const __m512i pairs = _mm512_loadu_si512(at);
            _mm512_storeu_ps(&w[i][lane], normal(_mm512_slli_epi32(pairs, 16)));
            _mm512_storeu_ps(&w[i + 1][lane], normal(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u))));
        }
}

/* Two steps of the turn at once: half and 2 * half. */
DSPARK__INLINE void turn_four(bound_row *w, size_t half, size_t lane)
{
    const __m512 a = _mm512_loadu_ps(&w[0][lane]), b = _mm512_loadu_ps(&w[half][lane]);
    const __m512 c = _mm512_loadu_ps(&w[2 * half][lane]), d = _mm512_loadu_ps(&w[3 * half][lane]);
    const __m512 ab = _mm512_add_ps(a, b), ba = _mm512_sub_ps(a, b), cd = _mm512_add_ps(c, d), dc = _mm512_sub_ps(c, d);
    _mm512_storeu_ps(&w[0][lane], _mm512_add_ps(ab, cd));
    _mm512_storeu_ps(&w[half][lane], _mm512_add_ps(ba, dc));
    _mm512_storeu_ps(&w[2 * half][lane], _mm512_sub_ps(ab, cd));
    _mm512_storeu_ps(&w[3 * half][lane], _mm512_sub_ps(ba, dc));
}

DSPARK__INLINE void turn_two(bound_row *w, size_t half, size_t lane)
{
    const __m512 a = _mm512_loadu_ps(&w[0][lane]), b = _mm512_loadu_ps(&w[half][lane]);
    _mm512_storeu_ps(&w[0][lane], _mm512_add_ps(a, b));
    _mm512_storeu_ps(&w[half][lane], _mm512_sub_ps(a, b));
}

/* Some lanes at a time: those of all rows stay in the first-level cache. */
void dspark__bound_turn__avx512(float (*w)[DSPARK__PANEL], size_t n, size_t turn, float *squares)
{
    for (size_t lane = 0; lane < DSPARK__PANEL; lane += LANES) {
        size_t half = 1;
        for (; 4 * half <= turn; half *= 4)
            for (size_t i = 0; i < n; i += 4 * half)
                for (size_t j = i; j < i + half; j++) turn_four(w + j, half, lane);
        for (; 2 * half <= turn; half *= 2)
            for (size_t i = 0; i < n; i += 2 * half)
                for (size_t j = i; j < i + half; j++) turn_two(w + j, half, lane);
        __m512 sum = _mm512_loadu_ps(squares + lane);
        for (size_t i = 0; i < n; i++) {
            const __m512 x = _mm512_loadu_ps(&w[i][lane]);
            sum = _mm512_add_ps(sum, _mm512_mul_ps(x, x));
        }
        _mm512_storeu_ps(squares + lane, sum);
    }
}

void dspark__bound_codes__avx512(unsigned char *to, const float (*w)[DSPARK__PANEL], size_t n, const float *inverse,
                            const float *step, float *left)
{
    const __m512 eight = _mm512_set1_ps(8), none = _mm512_setzero_ps(), most = _mm512_set1_ps(15);
    for (size_t lane = 0; lane < DSPARK__PANEL; lane += LANES) {
        const __m512 inv = _mm512_loadu_ps(inverse + lane), width = _mm512_loadu_ps(step + lane);
        __m512 sum = _mm512_loadu_ps(left + lane);
        for (size_t i = 0; i < n; i += 8) {
            __m512i x = _mm512_setzero_si512();
            DSPARK__UNROLL
            for (int j = 0; j < 8; j++) {
                const __m512 v = _mm512_loadu_ps(&w[i + (size_t)j][lane]);
                const __m512 c = _mm512_max_ps(_mm512_add_ps(_mm512_mul_ps(v, inv), eight), none);
                const __m512i code = _mm512_cvttps_epi32(_mm512_min_ps(c, most));
                const __m512i twice = _mm512_sub_epi32(_mm512_slli_epi32(code, 1), _mm512_set1_epi32(15));
                const __m512 rest = _mm512_sub_ps(v, _mm512_mul_ps(width, _mm512_cvtepi32_ps(twice)));
                sum = _mm512_add_ps(sum, _mm512_mul_ps(rest, rest));
                x = _mm512_or_si512(x, _mm512_slli_epi32(code, j % 4 * 8 + j / 4 * 4));
            }
            void *at = to + (i / 8 * DSPARK__PANEL + lane) * 4;
            _mm512_storeu_si512(at, x);
        }
        _mm512_storeu_ps(left + lane, sum);
    }
}

#endif
