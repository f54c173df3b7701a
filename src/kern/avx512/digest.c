/* AVX-512: digests of rows, alone or while they are packed. XXH3's eight lanes are one register; what a stripe
 * and a scramble are, base/digest.h says. */
#if defined(__x86_64__)
#include <string.h>

#include "base/digest.h"
#include "kern/avx512/pack.h"
#include "kern/row_fetch.h"

enum { BLOCK = 16 }; /* stripes from one scramble to the next */

typedef uint64_t row_lanes[8];

DSPARK__INLINE __m512i take_stripe(__m512i lanes, __m512i data, __m512i secret)
{
    const __m512i key = _mm512_xor_si512(data, secret);
    const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    const __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
    return _mm512_add_epi64(_mm512_add_epi64(lanes, swapped), product);
}

DSPARK__INLINE __m512i scramble(__m512i lanes, __m512i secret)
{
    const __m512i prime = _mm512_set1_epi32((int)0x9e3779b1u);
    const __m512i key = _mm512_xor_si512(_mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47)), secret);
    const __m512i low = _mm512_mul_epu32(key, prime);
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(key, 32), prime);
    return _mm512_add_epi64(low, _mm512_slli_epi64(high, 32));
}

DSPARK__INLINE __m512i secret_at(size_t byte)
{
    return _mm512_loadu_si512(dspark__digest_secret() + byte);
}

/* The last 64 of a row's n bytes, and its digest. */
static void end_row(const unsigned char *row, size_t n, __m512i lanes, unsigned char digest[16])
{
    _Alignas(64) row_lanes last;
    lanes = take_stripe(lanes, _mm512_loadu_si512(row + n - STRIPE), secret_at(DSPARK__DIGEST_LAST));
    _mm512_store_si512((void *)last, lanes);
    dspark__digest_lanes_end(last, n, digest);
}

/* n >= DSPARK__DIGEST_LONG. One row at a time: the chain through the lanes is two additions a stripe. */
static void digest_row(const unsigned char *row, size_t n, unsigned char digest[16])
{
    const unsigned char *secret = dspark__digest_secret();
    const __m512i last = secret_at(DSPARK__DIGEST_SECRET_BYTES - STRIPE);
    row_lanes first;
    dspark__digest_lanes_begin(first);
    __m512i lanes = _mm512_loadu_si512(first);
    for (size_t s = 0, n_stripes = (n - 1) / STRIPE; s < n_stripes; s++) {
        lanes = take_stripe(lanes, _mm512_loadu_si512(row + s * STRIPE),
                            _mm512_loadu_si512(secret + 8 * (s % BLOCK)));
        if (s % BLOCK == BLOCK - 1) lanes = scramble(lanes, last);
    }
    end_row(row, n, lanes, digest);
}

void dspark__digest_rows__avx512(unsigned char (*digests)[16], const void *rows, size_t stride, size_t n_rows,
                                 size_t n)
{
    const unsigned char *row = rows;
    for (size_t j = 0; j < n_rows; j++, row += stride) {
        if (n < DSPARK__DIGEST_LONG) dspark__digest_bytes(row, n, digests[j]);
        else digest_row(row, n, digests[j]);
    }
}

/* ---- while they are packed ---- */

/* Where stripes lie across lines, a line is read once, whole, and its second half kept for the next stripe: the
 * same places of 48 rows are too many for the first-level cache when the rows are a round number of bytes long. */
typedef struct halves {
    _Alignas(64) unsigned char line[DSPARK__PANEL][STRIPE];
    __m512i index; /* words of the two lines that make a stripe */
    size_t back;   /* bytes from a stripe to the line that it begins in; 0: they are the same */
} halves;

/* Rows at odd addresses, and those that do not all lie alike, are read as they lie. */
DSPARK__INLINE void begin_halves(halves *h, const unsigned char *rows, size_t stride)
{
    static const uint16_t counting[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    h->back = (uintptr_t)rows % STRIPE;
    if (h->back % 2 || stride % STRIPE) h->back = 0;
    if (!h->back) return;
    h->index = _mm512_add_epi16(_mm512_loadu_si512(counting), _mm512_set1_epi16((short)(h->back / 2)));
    for (size_t j = 0; j < DSPARK__PANEL; j++) {
        const __mmask32 inside = 0xffffffffu << (h->back / 2);
        const unsigned char *line = rows + j * stride - h->back;
        _mm512_store_si512((void *)h->line[j], _mm512_maskz_loadu_epi16(inside, line));
    }
}

/* Stripe s of 48 rows: packed, and taken into their lanes. */
DSPARK__INLINE void pack_stripe(uint16_t *to, const unsigned char *from, size_t stride, __m512i secret,
                                row_lanes *lanes, halves *h, fetch *f, __m512i *most)
{
    for (size_t j = 0; j < DSPARK__PANEL; j += 16, from += 16 * stride) {
        __m512i r[16];
        DSPARK__UNROLL
        for (size_t i = 0; i < 16; i++) {
            if (h) {
                const __m512i line = _mm512_load_si512(from + i * stride - h->back + STRIPE);
                r[i] = _mm512_permutex2var_epi16(_mm512_load_si512(h->line[j + i]), h->index, line);
                _mm512_store_si512((void *)h->line[j + i], line);
            } else {
                r[i] = _mm512_loadu_si512(from + i * stride);
            }
            *most = larger(*most, r[i]);
            _mm512_store_si512((void *)lanes[j + i],
                               take_stripe(_mm512_load_si512((const void *)lanes[j + i]), r[i], secret));
        }
        fetch_lines(f);
        store_square(to + 2 * j, r, SQUARE_PAIRS);
    }
}

int dspark__pack_digest__avx512(const dspark__pack_digest *p)
{
    const size_t n = 2 * p->k, n_stripes = n ? (n - 1) / STRIPE : 0;
    const unsigned char *rows = p->rows, *secret = dspark__digest_secret();
    _Alignas(64) row_lanes lanes[DSPARK__PANEL];
    const __m512i last = secret_at(DSPARK__DIGEST_SECRET_BYTES - STRIPE);
    __m512i most = _mm512_setzero_si512();
    if (p->n_rows < DSPARK__PANEL || n < DSPARK__DIGEST_LONG) {
        dspark__digest_rows__avx512(p->digests, rows, p->stride, p->n_rows, n);
        return dspark__pack_panel__avx512(p->panel, rows, p->stride, p->n_rows, p->k);
    }
    halves h;
    begin_halves(&h, rows, p->stride);
    for (size_t j = 0; j < DSPARK__PANEL; j++) dspark__digest_lanes_begin(lanes[j]);
    const size_t n_pieces = (n_stripes + PIECE - 1) / PIECE, piece = (n_stripes + n_pieces - 1) / n_pieces;
    for (size_t from = 0; from < n_stripes; from += piece) {
        const size_t end = n_stripes - from < piece ? n_stripes : from + piece;
        fetch f = fetch_behind(p, from, end, n_stripes, piece);
        for (size_t s = from; s < end; s++) {
            uint16_t *to = p->panel + s * SQUARE_PAIRS * DSPARK__PANEL * 2;
            const __m512i key = _mm512_loadu_si512(secret + 8 * (s % BLOCK));
            if (h.back && s + 1 < n_stripes)
                pack_stripe(to, rows + s * STRIPE, p->stride, key, lanes, &h, &f, &most);
            else
                pack_stripe(to, rows + s * STRIPE, p->stride, key, lanes, NULL, &f, &most);
            for (size_t j = 0; s % BLOCK == BLOCK - 1 && j < DSPARK__PANEL; j++)
                _mm512_store_si512((void *)lanes[j], scramble(_mm512_load_si512((const void *)lanes[j]), last));
        }
    }
    pack_rest(p->panel, rows, p->stride, p->n_rows, p->k, n_stripes * SQUARE_PAIRS, &most);
    for (size_t j = 0; j < DSPARK__PANEL; j++)
        end_row(rows + j * p->stride, n, _mm512_load_si512((const void *)lanes[j]), p->digests[j]);
    _mm_sfence(); /* streaming stores are not ordered by a lock or an atomic */
    return is_finite(most);
}

#endif
