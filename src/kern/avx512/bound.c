/* AVX-512: upper bounds of logits from codes of W2's rows. Equal to ref/bound.c bit for bit. */
#if defined(__x86_64__)
#include "kern/avx512/bits.h"

/* Groups of eight whose products fit in 16 bits: two pairs of 15 * 127 each. */
enum { VECTORS = 3, GROUPS_16 = 4 };

/* An int32 of x for all lanes; x has any alignment. */
DSPARK__INLINE __m512i four_of(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}

DSPARK__INLINE void dot_groups(__m512i sum[VECTORS], const unsigned char *codes, const int8_t *x,
                               size_t n)
{
    const __m512i low = _mm512_set1_epi8(15), ones = _mm512_set1_epi16(1);
    __m512i part[VECTORS];
    DSPARK__UNROLL
    for (size_t v = 0; v < VECTORS; v++) part[v] = _mm512_setzero_si512();
    DSPARK__UNROLL
    for (size_t g = 0; g < n; g++) {
        __m512i first = four_of(x + 8 * g), second = four_of(x + 8 * g + 4);
        DSPARK__UNROLL
        for (size_t v = 0; v < VECTORS; v++) {
            __m512i c = _mm512_load_si512(codes + (g * VECTORS + v) * 64);
            __m512i a = _mm512_and_si512(c, low), b = _mm512_and_si512(_mm512_srli_epi16(c, 4), low);
            part[v] = _mm512_add_epi16(part[v], _mm512_add_epi16(_mm512_maddubs_epi16(a, first),
                                                                 _mm512_maddubs_epi16(b, second)));
        }
    }
    DSPARK__UNROLL
    for (size_t v = 0; v < VECTORS; v++)
        sum[v] = _mm512_add_epi32(sum[v], _mm512_madd_epi16(part[v], ones));
}

DSPARK__INLINE __m512 to_bf16(__m512 f)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(round_bf16_lanes(f), 16));
}

DSPARK__INLINE __m512 head_of(const unsigned char *panel, size_t which, size_t v)
{
    const unsigned char *at = panel + (which * DSPARK__PANEL + 16 * v) * 2;
    return widen_bf16(_mm256_loadu_si256((const void *)at));
}

/* The largest sum of a panel's rows from their u; rows that do not exist are -infinity. */
DSPARK__INLINE float largest_sum(const dspark__bound_panels *b, const __m512 u[VECTORS],
                                 const __m512 base[VECTORS], const __mmask16 exist[VECTORS])
{
    __m512 most = _mm512_set1_ps(dspark__f32_from_bits(0xff800000u));
    DSPARK__UNROLL
    for (size_t v = 0; v < VECTORS; v++) {
        __m512 bias = to_bf16(u[v]);
        if (b->scale != 1.0f) bias = to_bf16(_mm512_mul_ps(bias, _mm512_set1_ps(b->scale)));
        most = _mm512_mask_max_ps(most, exist[v], most, to_bf16(_mm512_add_ps(base[v], bias)));
    }
    return _mm512_reduce_max_ps(most) + 0.0f;
}

DSPARK__INLINE int bound_panel(const dspark__bound_panels *b, size_t p)
{
    const unsigned char *panel = b->panels + p * b->stride, *codes = panel + DSPARK__BOUND_HEAD;
    const size_t first = p * DSPARK__PANEL, n_groups = b->k / 8;
    const __m512 slack = _mm512_set1_ps(b->slack);
    __m512 base[VECTORS], norm[VECTORS], u[VECTORS];
    __mmask16 exist[VECTORS];
    __m512i dot[VECTORS];
    DSPARK__UNROLL
    for (size_t v = 0; v < VECTORS; v++) {
        size_t row = first + 16 * v;
        exist[v] = first_lanes(row < b->n_out ? b->n_out - row : 0);
        base[v] = load_bf16(b->base, row, exist[v]);
        norm[v] = head_of(panel, 2, v);
        u[v] = _mm512_fmadd_ps(norm[v], _mm512_set1_ps(b->reach), slack);
        dot[v] = _mm512_setzero_si512();
    }
    b->upper[p] = largest_sum(b, u, base, exist);
    if (b->upper[p] < b->floor) return 0;

    size_t g = 0;
    for (; g + GROUPS_16 <= n_groups; g += GROUPS_16)
        dot_groups(dot, codes + g * VECTORS * 64, b->x + 8 * g, GROUPS_16);
    for (; g < n_groups; g++) dot_groups(dot, codes + g * VECTORS * 64, b->x + 8 * g, 1);
    DSPARK__UNROLL
    for (size_t v = 0; v < VECTORS; v++) {
        __m512i twice = _mm512_sub_epi32(_mm512_slli_epi32(dot[v], 1), _mm512_set1_epi32(b->offset));
        __m512 step = _mm512_mul_ps(head_of(panel, 0, v), _mm512_set1_ps(b->step));
        __m512 rest = _mm512_fmadd_ps(norm[v], _mm512_set1_ps(b->norm), slack);
        rest = _mm512_fmadd_ps(head_of(panel, 1, v), _mm512_set1_ps(b->residual), rest);
        u[v] = _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(twice), step), rest);
    }
    b->upper[p] = largest_sum(b, u, base, exist);
    return 1;
}

size_t dspark__bound_panels__avx512(const dspark__bound_panels *b)
{
    size_t n_coded = 0;
    for (size_t p = 0; p < b->n_panels; p++) n_coded += (size_t)bound_panel(b, p);
    return n_coded;
}

#endif
