/* AVX2: digests of rows, alone or while they are packed. XXH3's eight lanes are two registers; what a stripe
 * and a scramble are, base/digest.h says. */
#if defined(__x86_64__)
#include "base/digest.h"
#include "kern/avx2/pack.h"
#include "kern/row_fetch.h"

enum {
    BLOCK = 16,    /* stripes from one scramble to the next */
    HALF = 32      /* bytes of a stripe in a register */
};

typedef uint64_t row_lanes[8];

DSPARK__INLINE __m256i take_half(__m256i lanes, __m256i data, __m256i secret)
{
    const __m256i key = _mm256_xor_si256(data, secret);
    const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    const __m256i swapped = _mm256_shuffle_epi32(data, 0x4e);
    return _mm256_add_epi64(_mm256_add_epi64(lanes, swapped), product);
}

DSPARK__INLINE __m256i scramble(__m256i lanes, __m256i secret)
{
    const __m256i prime = _mm256_set1_epi32((int)0x9e3779b1u);
    const __m256i key = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), secret);
    const __m256i low = _mm256_mul_epu32(key, prime);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(key, 32), prime);
    return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

DSPARK__INLINE __m256i load_at(const void *bytes, size_t i)
{
    return _mm256_loadu_si256((const void *)((const unsigned char *)bytes + i));
}

/* The last 64 of a row's n bytes, and its digest. */
DSPARK__INLINE void end_row(const unsigned char *row, size_t n, __m256i low, __m256i high, unsigned char digest[16])
{
    const unsigned char *secret = dspark__digest_secret() + DSPARK__DIGEST_LAST, *end = row + n - STRIPE;
    _Alignas(32) row_lanes last;
    _mm256_store_si256((void *)last, take_half(low, load_at(end, 0), load_at(secret, 0)));
    _mm256_store_si256((void *)(last + 4), take_half(high, load_at(end, HALF), load_at(secret, HALF)));
    dspark__digest_lanes_end(last, n, digest);
}

/* n >= DSPARK__DIGEST_LONG. One row at a time: the chain through the lanes is two additions a stripe. */
static void digest_row(const unsigned char *row, size_t n, unsigned char digest[16])
{
    const unsigned char *secret = dspark__digest_secret();
    const unsigned char *last = secret + DSPARK__DIGEST_SECRET_BYTES - STRIPE;
    _Alignas(32) row_lanes first;
    dspark__digest_lanes_begin(first);
    __m256i low = load_at(first, 0), high = load_at(first, HALF);
    for (size_t s = 0, n_stripes = (n - 1) / STRIPE; s < n_stripes; s++) {
        const unsigned char *from = row + s * STRIPE, *key = secret + 8 * (s % BLOCK);
        low = take_half(low, load_at(from, 0), load_at(key, 0));
        high = take_half(high, load_at(from, HALF), load_at(key, HALF));
        if (s % BLOCK < BLOCK - 1) continue;
        low = scramble(low, load_at(last, 0));
        high = scramble(high, load_at(last, HALF));
    }
    end_row(row, n, low, high, digest);
}

void dspark__digest_rows__avx2(unsigned char (*digests)[16], const void *rows, size_t stride, size_t n_rows,
                               size_t n)
{
    const unsigned char *row = rows;
    for (size_t j = 0; j < n_rows; j++, row += stride) {
        if (n < DSPARK__DIGEST_LONG) dspark__digest_bytes(row, n, digests[j]);
        else digest_row(row, n, digests[j]);
    }
}

/* ---- while they are packed ---- */

/* One half of a stripe of 8 rows: into its lanes, and transposed. */
DSPARK__INLINE void take_square(__m256i r[SIDE], const unsigned char *row, size_t stride, __m256i secret,
                                row_lanes *lanes, size_t lane, __m256i *most)
{
    DSPARK__UNROLL
    for (size_t j = 0; j < SIDE; j++) {
        __m256i *sum = (void *)(lanes[j] + lane);
        r[j] = load_at(row, j * stride);
        *most = larger(*most, r[j]);
        _mm256_store_si256(sum, take_half(_mm256_load_si256(sum), r[j], secret));
    }
    transpose_8(r);
}

/* A stripe of 48 rows, 16 at a time: two squares side by side make whole lines, which go past the caches
 * half as fast again as pieces of them or by way of a block. */
DSPARK__INLINE void pack_stripe(uint16_t *to, const unsigned char *from, size_t stride, const unsigned char *secret,
                                row_lanes *lanes, fetch *f, __m256i *most)
{
    for (size_t j = 0; j < VECTORS; j += 2, from += 2 * SIDE * stride, lanes += 2 * SIDE) {
        for (size_t half = 0; half < 2; half++) {
            const unsigned char *row = from + half * HALF;
            const __m256i key = load_at(secret, half * HALF);
            __m256i *at = (__m256i *)(void *)to + half * SIDE * VECTORS + j;
            __m256i left[SIDE], right[SIDE];
            take_square(left, row, stride, key, lanes, 4 * half, most);
            take_square(right, row + SIDE * stride, stride, key, lanes + SIDE, 4 * half, most);
            DSPARK__UNROLL
            for (size_t i = 0; i < SIDE; i++) {
                _mm256_stream_si256(at + i * VECTORS, left[i]);
                _mm256_stream_si256(at + i * VECTORS + 1, right[i]);
            }
        }
        fetch_lines(f);
    }
}

static void scramble_rows(row_lanes *lanes)
{
    const unsigned char *secret = dspark__digest_secret() + DSPARK__DIGEST_SECRET_BYTES - STRIPE;
    for (size_t j = 0; j < DSPARK__PANEL; j++) {
        for (size_t i = 0; i < 8; i += 4) {
            __m256i *sum = (void *)(lanes[j] + i);
            _mm256_store_si256(sum, scramble(_mm256_load_si256(sum), load_at(secret, 8 * i)));
        }
    }
}

int dspark__pack_digest__avx2(const dspark__pack_digest *p)
{
    const size_t n = 2 * p->k, n_stripes = n ? (n - 1) / STRIPE : 0;
    const unsigned char *rows = p->rows, *secret = dspark__digest_secret();
    _Alignas(64) row_lanes lanes[DSPARK__PANEL];
    __m256i most = _mm256_setzero_si256();
    if (p->n_rows < DSPARK__PANEL || n < DSPARK__DIGEST_LONG) {
        dspark__digest_rows__avx2(p->digests, rows, p->stride, p->n_rows, n);
        return dspark__pack_panel__avx2(p->panel, rows, p->stride, p->n_rows, p->k);
    }
    for (size_t j = 0; j < DSPARK__PANEL; j++) dspark__digest_lanes_begin(lanes[j]);
    const size_t n_pieces = (n_stripes + PIECE - 1) / PIECE, piece = (n_stripes + n_pieces - 1) / n_pieces;
    for (size_t from = 0; from < n_stripes; from += piece) {
        const size_t end = n_stripes - from < piece ? n_stripes : from + piece;
        fetch f = fetch_behind(p, from, end, n_stripes, piece);
        for (size_t s = from; s < end; s++) {
            pack_stripe(p->panel + s * 2 * SIDE * DSPARK__PANEL * 2, rows + s * STRIPE, p->stride,
                        secret + 8 * (s % BLOCK), lanes, &f, &most);
            if (s % BLOCK == BLOCK - 1) scramble_rows(lanes);
        }
    }
    pack_rest(p->panel, rows, p->stride, p->n_rows, p->k, n_stripes * 2 * SIDE, &most);
    for (size_t j = 0; j < DSPARK__PANEL; j++)
        end_row(rows + j * p->stride, n, load_at(lanes[j], 0), load_at(lanes[j], HALF), p->digests[j]);
    _mm_sfence(); /* streaming stores are not ordered by a lock or an atomic */
    return is_finite(most);
}

#endif
