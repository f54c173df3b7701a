/* AVX2: what is done element by element between the matrix products, and the search of a row of
 * logits. Equal to ref/pointwise.c bit for bit. Tails run the same code on a padded copy. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"

enum { LANES = 8 };
enum { STEP = 16 };    /* logits at a time */
enum { BLOCK = 2048 }; /* logits whose largest is looked up once */

/* The last n < 8 elements of a row as one register, others 0. */
DSPARK__INLINE __m128i load_tail(const void *row, size_t i, size_t n)
{
    uint16_t tail[LANES] = {0};
    memcpy(tail, bf16_at(row, i), 2 * n);
    return load_8(tail, 0);
}

DSPARK__INLINE void store_tail(void *row, size_t i, size_t n, __m128i h)
{
    uint16_t tail[LANES];
    store_8(tail, 0, h);
    memcpy(bf16_at_mut(row, i), tail, 2 * n);
}

DSPARK__INLINE __m128i silu_mul_8(__m128i g, __m128i u)
{
    __m256 x = widen_bf16(g);
    __m256 e = exp_lanes(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f)));
    __m256i s = round_bf16_lanes(_mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e)));
    x = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(s, 16)), widen_bf16(u));
    return pack_lanes(round_bf16_lanes(x));
}

void dspark__silu_mul__avx2(uint16_t *y, const void *g, const void *u, size_t n)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) store_8(y, i, silu_mul_8(load_8(g, i), load_8(u, i)));
    if (i == n) return;
    store_tail(y, i, n - i, silu_mul_8(load_tail(g, i, n - i), load_tail(u, i, n - i)));
}

DSPARK__INLINE __m128i add_8(__m128i a, __m128i b)
{
    return pack_lanes(round_bf16_lanes(_mm256_add_ps(widen_bf16(a), widen_bf16(b))));
}

void dspark__add_bf16__avx2(uint16_t *y, const void *a, const void *b, size_t n)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) store_8(y, i, add_8(load_8(a, i), load_8(b, i)));
    if (i == n) return;
    store_tail(y, i, n - i, add_8(load_tail(a, i, n - i), load_tail(b, i, n - i)));
}

float dspark__dot_lanes__avx2(const void *x, const void *w, size_t n)
{
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    size_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        for (size_t j = 0; j < 2; j++) {
            __m256 a = widen_bf16(load_8(x, i + j * LANES));
            __m256 b = widen_bf16(load_8(w, i + j * LANES));
            sums[j] = _mm256_fmadd_ps(a, b, sums[j]);
        }
    }
    for (size_t j = 0; i < n; i += LANES, j++) {
        size_t left = n - i < LANES ? n - i : LANES;
        __m256 a = widen_bf16(load_tail(x, i, left)), b = widen_bf16(load_tail(w, i, left));
        sums[j] = _mm256_fmadd_ps(a, b, sums[j]);
    }
    return canonical_nan(merge_registers(sums[0], sums[1]) + 0.0f);
}

/* bf16(a + b) in the high half of each word, from bf16 in the high halves; a NaN only in `nan`. */
DSPARK__INLINE __m256i add_high(__m256i a, __m256i b, __m256i *nan)
{
    __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
    __m256i u = _mm256_castps_si256(sum);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    *nan = _mm256_or_si256(*nan, _mm256_castps_si256(_mm256_cmp_ps(sum, sum, _CMP_UNORD_Q)));
    return _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

/* The keys of up to 16 elements of a (or of bf16(a + b) when `add`): signed numbers in the order of
 * the values, -0 just below +0. Missing elements count as -infinity. */
DSPARK__INLINE __m256i load_keys(const void *a, const void *b, size_t i, size_t n, int add,
                                 __m256i *nan)
{
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    __m256i h, other = _mm256_setzero_si256();
    if (n - i >= STEP) {
        h = _mm256_loadu_si256((const void *)bf16_at(a, i));
        if (add) other = _mm256_loadu_si256((const void *)bf16_at(b, i));
    } else {
        uint16_t tail[2][STEP] = {{0}};
        for (size_t j = n - i; j < STEP; j++) tail[0][j] = 0xff80;
        memcpy(tail[0], bf16_at(a, i), 2 * (n - i));
        if (add) memcpy(tail[1], bf16_at(b, i), 2 * (n - i));
        h = _mm256_loadu_si256((const void *)tail[0]);
        other = _mm256_loadu_si256((const void *)tail[1]);
    }
    if (add) {
        const __m256i high = _mm256_set1_epi32(-65536);
        __m256i even = add_high(_mm256_slli_epi32(h, 16), _mm256_slli_epi32(other, 16), nan);
        __m256i odd = add_high(_mm256_and_si256(h, high), _mm256_and_si256(other, high), nan);
        h = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
    } else {
        __m256i bad = _mm256_cmpgt_epi16(_mm256_and_si256(h, magnitude), _mm256_set1_epi16(0x7f80));
        *nan = _mm256_or_si256(*nan, bad);
    }
    /* negative values: the other way round */
    return _mm256_xor_si256(h, _mm256_and_si256(_mm256_srai_epi16(h, 15), magnitude));
}

DSPARK__INLINE int largest_key(__m256i keys)
{
    int16_t lane[STEP];
    int most = -0x8000;
    _mm256_storeu_si256((void *)lane, keys);
    for (int j = 0; j < STEP; j++)
        if (lane[j] > most) most = lane[j];
    return most;
}

/* The largest of each block, remembering only which block was best; then that block again. */
DSPARK__INLINE size_t find_largest(const void *a, const void *b, size_t n, float *best, int add)
{
    int top = -0x8000;
    size_t start = 0;
    __m256i nan = _mm256_set1_epi32(n == 0 ? -1 : 0);
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t end = n - i < BLOCK ? n : i + BLOCK;
        __m256i most = _mm256_set1_epi16(-0x8000);
        for (size_t j = i; j < end; j += STEP)
            most = _mm256_max_epi16(most, load_keys(a, b, j, end, add, &nan));
        int key = largest_key(most);
        if (key == -1) key = 0; /* -0 equals +0 */
        if (key > top) {
            top = key;
            start = i;
        }
    }
    int sound = _mm256_testz_si256(nan, nan);
    *best = dspark__f32_from_bits(sound ? order_value(top) : 0x7fc00000u);
    if (!sound) return DSPARK__NO_ARGMAX;
    const __m256i wanted = _mm256_set1_epi16((short)top);
    const __m256i too = _mm256_set1_epi16((short)(top == 0 ? -1 : top));
    for (;; start += STEP) {
        __m256i keys = load_keys(a, b, start, n, add, &nan);
        __m256i found =
            _mm256_or_si256(_mm256_cmpeq_epi16(keys, wanted), _mm256_cmpeq_epi16(keys, too));
        uint32_t bytes = (uint32_t)_mm256_movemask_epi8(found);
        if (bytes != 0) return start + (size_t)__builtin_ctz(bytes) / 2;
    }
}

size_t dspark__argmax_bf16__avx2(const void *x, size_t n, float *best)
{
    return find_largest(x, NULL, n, best, 0);
}

size_t dspark__add_argmax_bf16__avx2(const void *a, const void *b, size_t n, float *best)
{
    return find_largest(a, b, n, best, 1);
}

#endif
