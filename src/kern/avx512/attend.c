/* AVX-512: the online softmax of one piece of entries, and the sums of attention before and after.
 * Equal to ref/attend.c bit for bit. */
#if defined(__x86_64__)
#include "kern/avx512/bits.h"

#include <math.h>

enum { STEP = 16 };

/* The largest of 16 lanes, none of them NaN or all of them. (_mm512_reduce_max_ps promises the
 * compiler that there is no NaN.) */
DSPARK__INLINE float largest_lane(__m512 v)
{
    __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* Scaled scores of one row, in order of the entry; places [n, whole steps of 16) become -infinity,
 * which neither a maximum nor E sees. Returns the largest, most being one of them. */
DSPARK__INLINE float scale_scores(float *to, const dspark__softmax_piece *s, size_t i, size_t n)
{
    const __m512 scale = _mm512_set1_ps(s->scale), none = _mm512_set1_ps(-INFINITY);
    __m512 most = _mm512_set1_ps(s->m[i]);
    for (size_t j = 0; j < n; j += STEP) {
        size_t panel = j / DSPARK__PANEL, lane = j % DSPARK__PANEL;
        const float *from = s->scores + (panel * s->n_rows + i) * DSPARK__PANEL + lane;
        __mmask16 m = first_lanes(n - j);
        __m512 v = _mm512_mask_mul_ps(none, m, _mm512_maskz_loadu_ps(m, from), scale);
        most = _mm512_max_ps(v, most); /* a NaN in v leaves most as it is */
        _mm512_store_ps(to + j, v);
    }
    return largest_lane(most) + 0.0f;
}

DSPARK__INLINE void soften_row(const dspark__softmax_piece *s, size_t i)
{
    _Alignas(64) float score[DSPARK__PIECE];
    const size_t n = s->n_valid[i];
    uint16_t *p = s->p + i * DSPARK__PIECE;
    const float most = scale_scores(score, s, i, n);
    const __m512 shift = _mm512_set1_ps(most);
    __m512 sums = _mm512_setzero_ps();
    size_t j = 0;
    for (; j < n; j += STEP) {
        __m512 v = exp_lanes(_mm512_sub_ps(_mm512_load_ps(score + j), shift));
        v = _mm512_maskz_mov_ps(first_lanes(n - j), v);
        sums = _mm512_add_ps(sums, v);
        _mm256_storeu_si256((void *)(p + j), round_bf16(v));
    }
    for (; j < DSPARK__PIECE; j += STEP)
        _mm256_storeu_si256((void *)(p + j), _mm256_setzero_si256());
    float a = _mm512_cvtss_f32(exp_lanes(_mm512_set1_ps(s->m[i] - most)));
    s->a[i] = canonical_nan(a);
    s->l[i] = canonical_nan(fmaf(s->l[i], a, merge_register(sums)));
    s->m[i] = canonical_nan(most);
}

void dspark__softmax_piece__avx512(const dspark__softmax_piece *s)
{
    for (size_t i = 0; i < s->n_rows; i++) {
        if (s->n_valid[i] > 0) {
            soften_row(s, i);
            continue;
        }
        memset(s->p + i * DSPARK__PIECE, 0, DSPARK__PIECE * sizeof *s->p);
        s->a[i] = 1.0f;
    }
}

void dspark__scale_rows__avx512(float *acc, const float *a, size_t n_panels, size_t n_rows)
{
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    const __m512i sign = _mm512_set1_epi32((int)0x80000000u);
    for (size_t p = 0; p < n_panels; p++) {
        for (size_t i = 0; i < n_rows; i++, acc += DSPARK__PANEL) {
            if (a[i] == 1.0f) continue;
            const __m512 factor = _mm512_set1_ps(a[i]);
            for (size_t j = 0; j < DSPARK__PANEL; j += STEP) {
                __m512i v = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(acc + j), factor));
                __mmask16 small = _mm512_testn_epi32_mask(v, exponent);
                v = _mm512_mask_and_epi32(v, small, v, sign);
                _mm512_store_si512((void *)(acc + j), v);
            }
        }
    }
}

void dspark__attend_finish__avx512(uint16_t *out, size_t out_stride, const float *acc,
                                   const float *l, size_t n_rows, size_t n_out)
{
    for (size_t o = 0; o < n_out; o += DSPARK__PANEL) {
        size_t n = n_out - o < DSPARK__PANEL ? n_out - o : DSPARK__PANEL;
        for (size_t i = 0; i < n_rows; i++, acc += DSPARK__PANEL) {
            const __m512 sum = _mm512_set1_ps(l[i]);
            for (size_t j = 0; j < n; j += STEP) {
                __m512 v = _mm512_div_ps(_mm512_load_ps(acc + j), sum);
                v = _mm512_add_ps(v, _mm512_setzero_ps());
                store_bf16(out, i * out_stride + o + j, first_lanes(n - j), v);
            }
        }
    }
}

#endif
