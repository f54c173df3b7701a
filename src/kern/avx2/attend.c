/* AVX2: the online softmax of one piece of entries, and the sums of attention before and after.
 * Equal to ref/attend.c bit for bit. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"

#include <float.h>
#include <math.h>

enum { STEP = 8 };

/* The largest of eight lanes, none of them NaN or all of them. */
DSPARK__INLINE float largest_lane(__m256 v)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* Scaled scores of one row, in order of the entry; places [n, whole steps of 8) become -infinity,
 * which neither a maximum nor E sees. Returns the largest, most being one of them. */
DSPARK__INLINE float scale_scores(float *to, const dspark__softmax_piece *s, size_t i, size_t n)
{
    const __m256 scale = _mm256_set1_ps(s->scale), none = _mm256_set1_ps(-INFINITY);
    __m256 most = _mm256_set1_ps(s->m[i]);
    for (size_t j = 0; j < n; j += STEP) {
        size_t panel = j / DSPARK__PANEL, lane = j % DSPARK__PANEL;
        const float *from = s->scores + (panel * s->n_rows + i) * DSPARK__PANEL + lane;
        __m256 v = _mm256_mul_ps(_mm256_load_ps(from), scale);
        v = _mm256_blendv_ps(none, v, first_words(n - j));
        most = _mm256_max_ps(v, most); /* a NaN in v leaves most as it is */
        _mm256_store_ps(to + j, v);
    }
    return largest_lane(most) + 0.0f;
}

DSPARK__INLINE void soften_row(const dspark__softmax_piece *s, size_t i)
{
    _Alignas(32) float score[DSPARK__PIECE];
    const size_t n = s->n_valid[i];
    uint16_t *p = s->p + i * DSPARK__PIECE;
    const float most = scale_scores(score, s, i, n);
    const __m256 shift = _mm256_set1_ps(most);
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (size_t j = 0; j < n; j += STEP) {
        __m256 v = exp_lanes(_mm256_sub_ps(_mm256_load_ps(score + j), shift));
        v = _mm256_and_ps(v, first_words(n - j));
        if (j % 16 == 0)
            sums[0] = _mm256_add_ps(sums[0], v);
        else
            sums[1] = _mm256_add_ps(sums[1], v);
        store_8(p, j, pack_lanes(round_bf16_lanes(v)));
    }
    for (size_t j = (n + STEP - 1) / STEP * STEP; j < DSPARK__PIECE; j += STEP)
        store_8(p, j, _mm_setzero_si128());
    float a = _mm256_cvtss_f32(exp_lanes(_mm256_set1_ps(s->m[i] - most)));
    s->a[i] = canonical_nan(a);
    s->l[i] = canonical_nan(fmaf(s->l[i], a, merge_registers(sums[0], sums[1])));
    s->m[i] = canonical_nan(most);
}

void dspark__softmax_piece__avx2(const dspark__softmax_piece *s)
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

void dspark__scale_rows__avx2(float *acc, const float *a, size_t n_panels, size_t n_rows)
{
    const __m256 sign = _mm256_set1_ps(-0.0f), least = _mm256_set1_ps(FLT_MIN);
    for (size_t p = 0; p < n_panels; p++) {
        for (size_t i = 0; i < n_rows; i++, acc += DSPARK__PANEL) {
            if (a[i] == 1.0f) continue;
            const __m256 factor = _mm256_set1_ps(a[i]);
            for (size_t j = 0; j < DSPARK__PANEL; j += STEP) {
                __m256 v = _mm256_mul_ps(_mm256_load_ps(acc + j), factor);
                __m256 small = _mm256_cmp_ps(_mm256_andnot_ps(sign, v), least, _CMP_LT_OQ);
                v = _mm256_andnot_ps(_mm256_andnot_ps(sign, small), v);
                _mm256_store_ps(acc + j, v);
            }
        }
    }
}

void dspark__attend_finish__avx2(uint16_t *out, size_t out_stride, const float *acc, const float *l,
                                 size_t n_rows, size_t n_out)
{
    for (size_t o = 0; o < n_out; o += DSPARK__PANEL) {
        size_t n = n_out - o < DSPARK__PANEL ? n_out - o : DSPARK__PANEL;
        for (size_t i = 0; i < n_rows; i++, acc += DSPARK__PANEL) {
            _Alignas(32) float row[DSPARK__PANEL];
            const __m256 sum = _mm256_set1_ps(l[i]);
            for (size_t j = 0; j < n; j += STEP) {
                __m256 v = _mm256_div_ps(_mm256_load_ps(acc + j), sum);
                _mm256_store_ps(row + j, _mm256_add_ps(v, _mm256_setzero_ps()));
            }
            store_outputs(bf16_at_mut(out, i * out_stride + o), row, n);
        }
    }
}

#endif
