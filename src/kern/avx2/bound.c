/* AVX2: upper bounds of logits from codes of W2's rows. Equal to ref/bound.c bit for bit. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"

/* A panel's rows in registers of eight, three registers at a time. Groups of eight whose products fit in
 * 16 bits: two pairs of 15 * 127 each. */
enum { LANES = 8, VECTORS = 3, HALVES = DSPARK__PANEL / LANES / VECTORS, GROUPS_16 = 4 };

DSPARK__INLINE __m256i four_of(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}

/* n groups of rows [24 half, 24 half + 24). */
DSPARK__INLINE void dot_groups(__m256i sum[VECTORS], const unsigned char *codes, const int8_t *x,
                               size_t n)
{
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i part[VECTORS];
    DSPARK__UNROLL
    for (size_t v = 0; v < VECTORS; v++) part[v] = _mm256_setzero_si256();
    DSPARK__UNROLL
    for (size_t g = 0; g < n; g++) {
        __m256i first = four_of(x + 8 * g), second = four_of(x + 8 * g + 4);
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++) {
            __m256i c = _mm256_load_si256((const void *)(codes + g * 192 + v * 32));
            __m256i a = _mm256_and_si256(c, low), b = _mm256_and_si256(_mm256_srli_epi16(c, 4), low);
            part[v] = _mm256_add_epi16(part[v], _mm256_add_epi16(_mm256_maddubs_epi16(a, first),
                                                                 _mm256_maddubs_epi16(b, second)));
        }
    }
    DSPARK__UNROLL
    for (size_t v = 0; v < VECTORS; v++)
        sum[v] = _mm256_add_epi32(sum[v], _mm256_madd_epi16(part[v], ones));
}

DSPARK__INLINE __m256 to_bf16(__m256 f)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(round_bf16_lanes(f), 16));
}

DSPARK__INLINE __m256 eight_of(const unsigned char *panel, size_t which, size_t lane)
{
    return widen_bf16(load_8(panel, which * DSPARK__PANEL + lane));
}

DSPARK__INLINE __m256 add_bias(const dspark__bound_panels *b, __m256 base, __m256 u)
{
    __m256 bias = to_bf16(u);
    if (b->scale != 1.0f) bias = to_bf16(_mm256_mul_ps(bias, _mm256_set1_ps(b->scale)));
    return to_bf16(_mm256_add_ps(base, bias));
}

DSPARK__INLINE float largest_lane(__m256 v)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1))) + 0.0f;
}

DSPARK__INLINE int bound_panel(const dspark__bound_panels *b, size_t p)
{
    const unsigned char *panel = b->panels + p * b->stride, *codes = panel + DSPARK__BOUND_HEAD;
    const size_t first = p * DSPARK__PANEL, n_groups = b->k / 8;
    const __m256 slack = _mm256_set1_ps(b->slack);
    const __m256 none = _mm256_set1_ps(dspark__f32_from_bits(0xff800000u));
    uint16_t rows[DSPARK__PANEL]; /* of base; those that do not exist are -infinity, whatever is added */
    const unsigned char *base = bf16_at(b->base, first);
    if (b->n_out - first < DSPARK__PANEL) {
        for (size_t i = 0; i < DSPARK__PANEL; i++) rows[i] = 0xff80;
        memcpy(rows, base, (b->n_out - first) * 2);
        base = (const unsigned char *)rows;
    }
    __m256 most = none;
    for (size_t lane = 0; lane < DSPARK__PANEL; lane += LANES) {
        __m256 u = _mm256_fmadd_ps(eight_of(panel, 2, lane), _mm256_set1_ps(b->reach), slack);
        most = _mm256_max_ps(most, add_bias(b, widen_bf16(load_8(base, lane)), u));
    }
    b->upper[p] = largest_lane(most);
    if (b->upper[p] < b->floor) return 0;

    most = none;
    for (size_t half = 0; half < HALVES; half++) {
        const unsigned char *at = codes + half * VECTORS * 32;
        __m256i dot[VECTORS];
        size_t g = 0;
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++) dot[v] = _mm256_setzero_si256();
        for (; g + GROUPS_16 <= n_groups; g += GROUPS_16)
            dot_groups(dot, at + g * 192, b->x + 8 * g, GROUPS_16);
        for (; g < n_groups; g++) dot_groups(dot, at + g * 192, b->x + 8 * g, 1);
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++) {
            const size_t lane = (half * VECTORS + v) * LANES;
            __m256i twice = _mm256_sub_epi32(_mm256_slli_epi32(dot[v], 1),
                                             _mm256_set1_epi32(b->offset));
            __m256 step = _mm256_mul_ps(eight_of(panel, 0, lane), _mm256_set1_ps(b->step));
            __m256 rest = _mm256_fmadd_ps(eight_of(panel, 2, lane), _mm256_set1_ps(b->norm), slack);
            rest = _mm256_fmadd_ps(eight_of(panel, 1, lane), _mm256_set1_ps(b->residual), rest);
            __m256 u = _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(twice), step), rest);
            most = _mm256_max_ps(most, add_bias(b, widen_bf16(load_8(base, lane)), u));
        }
    }
    b->upper[p] = largest_lane(most);
    return 1;
}

size_t dspark__bound_panels__avx2(const dspark__bound_panels *b)
{
    size_t n_coded = 0;
    for (size_t p = 0; p < b->n_panels; p++) n_coded += (size_t)bound_panel(b, p);
    return n_coded;
}

#endif
