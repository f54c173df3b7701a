/* AVX2: codes of W2's rows for upper bounds of logits. Equal to ref/bound_make.c bit for bit: every lane is a row
 * of its own, and products are not fused. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"

enum { LANES = 8 };

typedef float bound_row[DSPARK__PANEL];

/* Without subnormals. */
DSPARK__INLINE __m256 normal(__m256i bits)
{
    const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
    const __m256i none = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_andnot_si256(none, bits));
}

void dspark__bound_widen__avx2(float (*w)[DSPARK__PANEL], const uint16_t *from, size_t n)
{
    for (size_t i = 0; i < n; i += 2)
        for (size_t lane = 0; lane < DSPARK__PANEL; lane += LANES, from += 2 * LANES) {
            const void *at = from;
            const __m256i pairs = _mm256_loadu_si256((const __m256i *)at);
            _mm256_storeu_ps(&w[i][lane], normal(_mm256_slli_epi32(pairs, 16)));
            _mm256_storeu_ps(&w[i + 1][lane], normal(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u))));
        }
}

/* Two steps of the turn at once: half and 2 * half. */
DSPARK__INLINE void turn_four(bound_row *w, size_t half, size_t lane)
{
    const __m256 a = _mm256_loadu_ps(&w[0][lane]), b = _mm256_loadu_ps(&w[half][lane]);
    const __m256 c = _mm256_loadu_ps(&w[2 * half][lane]), d = _mm256_loadu_ps(&w[3 * half][lane]);
    const __m256 ab = _mm256_add_ps(a, b), ba = _mm256_sub_ps(a, b), cd = _mm256_add_ps(c, d), dc = _mm256_sub_ps(c, d);
    _mm256_storeu_ps(&w[0][lane], _mm256_add_ps(ab, cd));
    _mm256_storeu_ps(&w[half][lane], _mm256_add_ps(ba, dc));
    _mm256_storeu_ps(&w[2 * half][lane], _mm256_sub_ps(ab, cd));
    _mm256_storeu_ps(&w[3 * half][lane], _mm256_sub_ps(ba, dc));
}

DSPARK__INLINE void turn_two(bound_row *w, size_t half, size_t lane)
{
    const __m256 a = _mm256_loadu_ps(&w[0][lane]), b = _mm256_loadu_ps(&w[half][lane]);
    _mm256_storeu_ps(&w[0][lane], _mm256_add_ps(a, b));
    _mm256_storeu_ps(&w[half][lane], _mm256_sub_ps(a, b));
}

/* Some lanes at a time: those of all rows stay in the first-level cache. */
void dspark__bound_turn__avx2(float (*w)[DSPARK__PANEL], size_t n, size_t turn, float *squares)
{
    for (size_t lane = 0; lane < DSPARK__PANEL; lane += LANES) {
        size_t half = 1;
        for (; 4 * half <= turn; half *= 4)
            for (size_t i = 0; i < n; i += 4 * half)
                for (size_t j = i; j < i + half; j++) turn_four(w + j, half, lane);
        for (; 2 * half <= turn; half *= 2)
            for (size_t i = 0; i < n; i += 2 * half)
                for (size_t j = i; j < i + half; j++) turn_two(w + j, half, lane);
        __m256 sum = _mm256_loadu_ps(squares + lane);
        for (size_t i = 0; i < n; i++) {
            const __m256 x = _mm256_loadu_ps(&w[i][lane]);
            sum = _mm256_add_ps(sum, _mm256_mul_ps(x, x));
        }
        _mm256_storeu_ps(squares + lane, sum);
    }
}

void dspark__bound_codes__avx2(unsigned char *to, const float (*w)[DSPARK__PANEL], size_t n, const float *inverse,
                            const float *step, float *left)
{
    const __m256 eight = _mm256_set1_ps(8), none = _mm256_setzero_ps(), most = _mm256_set1_ps(15);
    for (size_t lane = 0; lane < DSPARK__PANEL; lane += LANES) {
        const __m256 inv = _mm256_loadu_ps(inverse + lane), width = _mm256_loadu_ps(step + lane);
        __m256 sum = _mm256_loadu_ps(left + lane);
        for (size_t i = 0; i < n; i += 8) {
            __m256i x = _mm256_setzero_si256();
            DSPARK__UNROLL
            for (int j = 0; j < 8; j++) {
                const __m256 v = _mm256_loadu_ps(&w[i + (size_t)j][lane]);
                const __m256 c = _mm256_max_ps(_mm256_add_ps(_mm256_mul_ps(v, inv), eight), none);
                const __m256i code = _mm256_cvttps_epi32(_mm256_min_ps(c, most));
                const __m256i twice = _mm256_sub_epi32(_mm256_slli_epi32(code, 1), _mm256_set1_epi32(15));
                const __m256 rest = _mm256_sub_ps(v, _mm256_mul_ps(width, _mm256_cvtepi32_ps(twice)));
                sum = _mm256_add_ps(sum, _mm256_mul_ps(rest, rest));
                x = _mm256_or_si256(x, _mm256_slli_epi32(code, j % 4 * 8 + j / 4 * 4));
            }
            void *at = to + (i / 8 * DSPARK__PANEL + lane) * 4;
            _mm256_storeu_si256((__m256i *)at, x);
        }
        _mm256_storeu_ps(left + lane, sum);
    }
}

#endif
