/* Packed codes at every level of this machine: all codes with all scale bytes against values
 * computed here in double precision, shapes, tables and guard pages against ref, bit for bit; and
 * what is multiplied after a sum. Owns no model knowledge. */
#include "base/fpenv.h"
#include "base/numfmt.h"
#include "kern/kern.h"
#include "support/guard.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t seed = 0x2545f4914f6cdd1du;

static uint64_t next_random(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    return seed ^= seed << 17;
}

/* ---- levels ---------------------------------------------------------------------------------- */

typedef struct level {
    const char *name;
    dspark__kern kern;
} level;

static level levels[6];
static size_t n_levels; /* ref is the first */

static int find_levels(void **state)
{
    (void)state;
    for (int isa = DSPARK_ISA_REF; isa <= (int)dspark__isa_best(); isa++) {
        level *l = &levels[n_levels++];
        l->name = dspark__isa_name((dspark_isa)isa);
        assert_int_equal(dspark__kern_select(&l->kern, (dspark_isa)isa, NULL), DSPARK_OK);
    }
#if defined(__x86_64__)
    if (dspark__isa_best() >= DSPARK_ISA_AVX512) { /* select prefers VBMI where it can */
        level *l = &levels[n_levels++];
        l->name = "avx512 without vbmi";
        dspark__kern_ref(&l->kern);
        dspark__kern_avx512(&l->kern);
    }
#endif
    print_message("%zu levels, the last one is %s\n", n_levels, levels[n_levels - 1].name);
    return 0;
}

/* ---- values, by definition ------------------------------------------------------------------- */

typedef enum codes { E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, INT8, E2M1, INT4, N_CODES } codes;

static const char *const CODES_NAME[] = {"e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "int8", "e2m1",
                                         "int4"};

static uint32_t bits_of(codes c)
{
    return c == E2M1 || c == INT4 ? 4 : 8;
}

static double float_value(unsigned code, int mantissa_bits, int bias)
{
    int m = (int)code & ((1 << mantissa_bits) - 1), e = (int)(code & 0x7f) >> mantissa_bits;
    double v = e == 0 ? ldexp(m, 1 - bias - mantissa_bits)
                      : ldexp(m + (1 << mantissa_bits), e - bias - mantissa_bits);
    return code & 0x80 ? -v : v;
}

static double code_value(codes c, unsigned code)
{
    static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    switch (c) {
    case E4M3: return (code & 0x7f) == 0x7f ? (double)NAN : float_value(code, 3, 7);
    case E5M2:
        if ((code & 0x7f) > 0x7c) return (double)NAN;
        if ((code & 0x7f) == 0x7c) return code & 0x80 ? -(double)INFINITY : (double)INFINITY;
        return float_value(code, 2, 15);
    case E4M3FNUZ: return code == 0x80 ? (double)NAN : float_value(code, 3, 8);
    case E5M2FNUZ: return code == 0x80 ? (double)NAN : float_value(code, 2, 16);
    case INT8: return code < 128 ? code : (double)code - 256;
    case E2M1: return code & 8 ? -e2m1[code & 7] : e2m1[code & 7];
    default: return code < 8 ? code : (double)code - 16;
    }
}

/* The bf16 of a value that must be exact; subnormal ones are zero, NaN is canonical. */
static uint16_t exact_bf16(double v)
{
    if (isnan(v)) return DSPARK__BF16_NAN;
    if (fabs(v) < 0x1p-126) return signbit(v) ? 0x8000 : 0;
    uint16_t h = dspark__f32_to_bf16((float)v);
    if (fabs(v) < 0x1p128) assert_true((double)dspark__bf16_to_f32(h) == v);
    else assert_int_equal(h & 0x7fff, 0x7f80);
    return h;
}

static double scale_value(dspark__code_scale kind, unsigned byte)
{
    if (kind == DSPARK__CODE_E4M3) return float_value(byte, 3, 7);
    if (kind == DSPARK__CODE_E8M0) return ldexp(1, (int)byte - 127);
    return byte < 128 ? byte : (double)byte - 256;
}

static uint16_t expected(codes c, unsigned code, dspark__code_scale kind, unsigned byte)
{
    double v = code_value(c, code);
    if (kind == DSPARK__CODE_OFFSET) v -= scale_value(kind, byte);
    else if (kind != DSPARK__CODE_PLAIN) v *= scale_value(kind, byte);
    return exact_bf16(v);
}

/* nan_sign: a table may give NaN the sign of its code, too. */
static dspark__code_format format_of(codes c, dspark__code_scale scale, uint32_t block,
                                     int nan_sign)
{
    dspark__code_format f = {.bits = bits_of(c), .scale = scale, .block = block};
    for (unsigned code = 0; code < 1u << f.bits; code++) {
        f.table[code] = exact_bf16(code_value(c, code));
        if (nan_sign && f.table[code] == DSPARK__BF16_NAN && code & 0x80) f.table[code] |= 0x8000;
    }
    return f;
}

/* Is the product of all codes and scales exact in bf16, and defined? */
static int is_allowed(codes c, dspark__code_scale scale)
{
    if (scale == DSPARK__CODE_OFFSET) return c == INT8 || c == INT4;
    if (scale == DSPARK__CODE_E4M3) return c != INT8 && c != E5M2; /* 11 bits; infinity times 0 */
    return 1;
}

/* The layouts of kern.h, from the writer's side. */
static void put_code(uint8_t *to, const dspark__code_format *f, size_t k, size_t output, unsigned code)
{
    if (f->bits == 8) {
        to[k / 2 * 96 + output * 2 + k % 2] = (uint8_t)code;
        return;
    }
    if (f->scale == DSPARK__CODE_E4M3) { /* bit by bit, each three places up in its word of 32 */
        uint8_t *word = to + k / 8 * 192 + output / 4 * 16 + k % 8 / 4 * 8 + output % 4 / 2 * 4;
        size_t first = output % 2 * 16 + k % 2 * 8 + k / 2 % 2 * 4;
        for (size_t i = 0; i < 4; i++) {
            size_t at = (first + i + 3) % 32;
            word[at / 8] = (uint8_t)((word[at / 8] & ~(1u << at % 8)) | (code >> i & 1) << at % 8);
        }
        return;
    }
    size_t byte = k / 8 * 192 + output / 16 * 64 + (output % 16 * 2 + k % 2) * 2;
    size_t nibble = k % 8 / 2;
    unsigned shift = nibble % 2 * 4;
    to += byte + nibble / 2;
    *to = (uint8_t)((*to & ~(15u << shift)) | code << shift);
}

/* ---- every code with every scale ------------------------------------------------------------- */

static void check_pairs(codes c, dspark__code_scale scale, int nan_sign)
{
    enum { K = 256, MOST = K * 48 };
    static uint16_t want[256];
    _Alignas(64) static uint8_t packed[MOST];
    _Alignas(64) static uint16_t w[MOST];
    dspark__code_format f = format_of(c, scale, scale == DSPARK__CODE_PLAIN ? 0 : K, nan_sign);
    unsigned n_bytes = scale == DSPARK__CODE_E4M3 ? 127 : scale == DSPARK__CODE_E8M0 ? 255 : 256;
    unsigned n = 1u << f.bits;
    for (size_t j = 0; j < 48; j++)
        for (size_t k = 0; k < K; k++) put_code(packed, &f, k, j, (unsigned)k % n);
    for (unsigned first = 0; first < n_bytes; first += 48) {
        uint8_t scales[49];
        for (unsigned j = 0; j < 48; j++)
            scales[1 + j] = (uint8_t)(first + j < n_bytes ? first + j : n_bytes - 1);
        for (size_t l = 0; l < n_levels; l++) {
            memset(w, 0xa5, sizeof w);
            levels[l].kern.decode(w, packed, scales + 1, &f, 0, K);
            for (size_t j = 0; j < 48; j++) {
                for (unsigned code = 0; code < n; code++) {
                    want[code] = expected(c, code, scale, scales[1 + j]);
                    if (want[code] == DSPARK__BF16_NAN) want[code] = f.table[code];
                }
                for (size_t k = 0; k < K; k++) {
                    uint16_t got = w[k / 2 * 96 + j * 2 + k % 2];
                    if (got != want[k % n])
                        fail_msg("%s: %s code %zu, scale %d byte %u: %04x, not %04x",
                                 levels[l].name, CODES_NAME[c], k % n, (int)scale, scales[1 + j],
                                 got, want[k % n]);
                }
            }
        }
        if (scale == DSPARK__CODE_PLAIN) break;
    }
}

static void test_pairs(void **state)
{
    (void)state;
    for (int c = 0; c < N_CODES; c++)
        for (int scale = DSPARK__CODE_PLAIN; scale <= DSPARK__CODE_OFFSET; scale++)
            for (int nan_sign = 0; nan_sign < 2; nan_sign++)
                if (is_allowed((codes)c, (dspark__code_scale)scale))
                    check_pairs((codes)c, (dspark__code_scale)scale, nan_sign);
}

/* Known answers, so that the values above are not only their own proof. */
static void test_answers(void **state)
{
    (void)state;
    enum {
        PLAIN = DSPARK__CODE_PLAIN,
        S_E4M3 = DSPARK__CODE_E4M3,
        S_E8M0 = DSPARK__CODE_E8M0,
        OFFSET = DSPARK__CODE_OFFSET
    };
    static const struct {
        codes c;
        unsigned code;
        int scale;
        unsigned byte;
        uint16_t want;
    } A[] = {
        {E4M3, 0x38, PLAIN, 0, 0x3f80},
        {E4M3, 0x7e, PLAIN, 0, 0x43e0},
        {E4M3, 0x01, PLAIN, 0, 0x3b00},
        {E4M3FNUZ, 0x7f, PLAIN, 0, 0x4370},
        {E5M2, 0xfc, PLAIN, 0, 0xff80},
        {E5M2, 0x01, PLAIN, 0, 0x3780},
        {INT8, 0x80, PLAIN, 0, 0xc300},
        {E2M1, 7, S_E4M3, 0x4d, 0x421c},
        {E2M1, 7, S_E4M3, 0x7e, 0x4528},
        {E2M1, 9, S_E4M3, 0x01, 0xba80},
        {E2M1, 8, S_E4M3, 0x38, 0x8000},
        {E2M1, 7, S_E4M3, 0x00, 0x0000},
        {E2M1, 2, S_E8M0, 0, 0x0000},
        {E2M1, 12, S_E8M0, 0, 0x8080},
        {E2M1, 4, S_E8M0, 0, 0x0080},
        {E2M1, 9, S_E8M0, 1, 0x8000},
        {E2M1, 7, S_E8M0, 254, 0x7f80},
        {E2M1, 3, S_E8M0, 254, 0x7f40},
        {E2M1, 7, S_E4M3, 0x08, 0x3dc0},
        {E2M1, 7, S_E4M3, 0x07, 0x3da8},
        {INT4, 0x8, OFFSET, 7, 0xc170},
        {INT4, 0x8, OFFSET, 8, 0xc180},
        {INT4, 0x8, OFFSET, 9, 0xc188},
        {INT4, 0x7, OFFSET, 0xf8, 0x4170},
        {INT4, 0x7, OFFSET, 0xf7, 0x4180},
        {INT8, 0x80, OFFSET, 127, 0xc37f},
    };
    for (size_t a = 0; a < sizeof A / sizeof A[0]; a++) {
        uint32_t block = A[a].scale == PLAIN ? 0 : 8;
        dspark__code_format f = format_of(A[a].c, (dspark__code_scale)A[a].scale, block, 0);
        _Alignas(64) uint8_t packed[384] = {0};
        _Alignas(64) uint16_t w[384];
        uint8_t scales[48];
        memset(scales, (int)A[a].byte, sizeof scales);
        for (size_t j = 0; j < 48; j++)
            for (size_t k = 0; k < 8; k++) put_code(packed, &f, k, j, A[a].code);
        for (size_t l = 0; l < n_levels; l++) {
            levels[l].kern.decode(w, packed, scales, &f, 0, 8);
            for (size_t i = 0; i < 384; i++)
                if (w[i] != A[a].want)
                    fail_msg("%s, answer %zu: %04x, not %04x", levels[l].name, a, w[i], A[a].want);
        }
    }
}

/* ---- shapes ---------------------------------------------------------------------------------- */

static uint8_t random_scale(dspark__code_scale kind, int class)
{
    static const uint8_t edge[] = {0, 1, 2, 252, 253, 254};
    uint64_t r = next_random() >> 16;
    if (kind == DSPARK__CODE_E4M3)
        return (uint8_t)(class == 0 ? 8 + r % 119 : r % 127); /* 0: no subnormal, no zero */
    if (kind == DSPARK__CODE_E8M0) {
        if (class == 2 || (class == 1 && r % 64 == 0)) return edge[(r >> 8) % 6];
        if (class == 3) return (uint8_t)(r % 64 < 32 ? 103 : r % 64 < 63 ? 151 : r >> 63 ? 102 : 152);
        if (class == 5) return (uint8_t)(27 + (r >> 8) % 200);
        return (uint8_t)(103 + (r >> 8) % 49);
    }
    return (uint8_t)(class == 0 ? (r % 16) - 8 : r);
}

/* Codes, scales and weights each end at a page that may not be touched. */
static void check_shape(codes c, dspark__code_scale scale, uint32_t block, size_t k, int class,
                        size_t shift)
{
    dspark__code_format f = format_of(c, scale, scale == DSPARK__CODE_PLAIN ? 0 : block, 0);
    size_t n_scales = dspark__code_scale_bytes(&f, k), padded = (k + 7) / 8 * 8;
    guard packed = guard_end(dspark__code_panel_bytes(&f, k)), bytes = guard_end(n_scales + shift);
    guard want = guard_end(padded * 96 + 64), got = guard_end(padded * 96);
    for (size_t i = 0; i < packed.n; i++) packed.p[i] = (uint8_t)(next_random() >> 24);
    for (size_t i = 0; i < n_scales; i++) bytes.p[i] = random_scale(scale, class);
    if (k == 0 || scale == DSPARK__CODE_PLAIN) bytes.p = NULL;
    for (size_t step = 0; step < 5; step++) { /* the whole panel, then pieces from every start */
        static const size_t PIECE[] = {0, 8, 16, 40, 128};
        size_t piece = step == 0 ? padded + 8 : PIECE[step];
        if (step > 0 && (k > 1000 || k == 0)) break;
        for (size_t k0 = 0; k0 == 0 || k0 < k; k0 += piece) {
            size_t n_k = k - k0 < piece ? k - k0 : piece, n = (n_k + 7) / 8 * 8 * 96;
            uint16_t *ref = (uint16_t *)(void *)want.p;
            levels[0].kern.decode(ref, packed.p, bytes.p, &f, k0, n_k);
            for (size_t l = 1; l < n_levels; l++) {
                unsigned char *w = got.p + got.n - n;
                memset(got.p, 0xa5, got.n);
                levels[l].kern.decode((uint16_t *)(void *)w, packed.p, bytes.p, &f, k0, n_k);
                if (memcmp(w, want.p, n) != 0)
                    fail_msg("%s: %s scale %d block %u k %zu, %zu from %zu, class %d",
                             levels[l].name, CODES_NAME[c], (int)scale, block, k, n_k, k0, class);
                for (unsigned char *b = got.p; b < w; b++) assert_int_equal(*b, 0xa5);
            }
        }
    }
    for (unsigned char *b = want.p + padded * 96; b < want.p + want.n; b++)
        assert_int_equal(*b, 0xa5);
    guard_free(&packed);
    guard_free(&bytes);
    guard_free(&want);
    guard_free(&got);
}

static void test_shapes(void **state)
{
    (void)state;
    static const size_t SIZES[] = {0, 1, 7, 8, 9, 16, 24, 40, 128, 131, 264};
    static const uint32_t BLOCKS[] = {8, 16, 24, 32, 128};
    for (int c = 0; c < N_CODES; c++) {
        for (int scale = DSPARK__CODE_PLAIN; scale <= DSPARK__CODE_OFFSET; scale++) {
            if (!is_allowed((codes)c, (dspark__code_scale)scale)) continue;
            for (size_t s = 0; s < sizeof SIZES / sizeof *SIZES; s++) {
                for (size_t b = 0; b < sizeof BLOCKS / sizeof *BLOCKS; b++) {
                    if (scale == DSPARK__CODE_PLAIN && b > 0) break;
                    check_shape((codes)c, (dspark__code_scale)scale, BLOCKS[b], SIZES[s],
                                (int)((s + b) % 3), (s + b) % 4);
                }
            }
            check_shape((codes)c, (dspark__code_scale)scale, BLOCKS[1 + (size_t)c % 3], 7168, 1, 0);
        }
    }
}

/* ---- tables that are nobody's format --------------------------------------------------------- */

static void compare_table(const dspark__code_format *f, const char *what)
{
    enum { K = 64 };
    _Alignas(64) static uint8_t packed[K * 48];
    _Alignas(64) static uint16_t want[K * 48], got[K * 48];
    uint8_t scales[K / 8 * 48];
    for (size_t i = 0; i < sizeof packed; i++) /* every code, and random ones */
        packed[i] = (uint8_t)(i < 512 ? i : next_random() >> 24);
    for (size_t i = 0; i < sizeof scales; i++) scales[i] = random_scale(f->scale, i % 96 < 48);
    levels[0].kern.decode(want, packed, scales, f, 0, K);
    for (size_t i = 0; f->scale == DSPARK__CODE_PLAIN && f->bits == 8 && i < sizeof packed; i++)
        assert_int_equal(want[i], f->table[packed[i]]);
    for (size_t l = 1; l < n_levels; l++) {
        levels[l].kern.decode(got, packed, scales, f, 0, K);
        if (memcmp(got, want, sizeof got) != 0)
            fail_msg("%s: %s, scale %d", levels[l].name, what, (int)f->scale);
    }
}

/* Signalling NaN excluded: tables hold quiet ones. */
static uint16_t random_entry(uint64_t r)
{
    uint16_t h = (uint16_t)r;
    if (r >> 60 == 0) h &= 0x8000u;
    if (r >> 60 == 1) h &= 0x807fu;
    if ((h & 0x7fffu) > 0x7f80u) h |= 0x40u;
    return h;
}

static void test_tables(void **state)
{
    (void)state;
    for (int scale = DSPARK__CODE_PLAIN; scale <= DSPARK__CODE_E8M0; scale += 2) {
        uint32_t block = scale == DSPARK__CODE_PLAIN ? 0 : 8;
        for (uint32_t bits = 4; bits <= 8; bits += 4) {
            for (int round = 0; round < 20; round++) {
                dspark__code_format f = {.bits = bits, .scale = (dspark__code_scale)scale,
                                         .block = block};
                for (size_t i = 0; i < 256; i++) f.table[i] = random_entry(next_random());
                compare_table(&f, "random");
                for (size_t i = 0; i < 128; i++) { /* one sign bit, NaN with it or without */
                    f.table[i] &= 0x7fffu;
                    f.table[i + 128] = f.table[i] | 0x8000u;
                    if ((f.table[i] & 0x7f80u) == 0x7f80u && i % 2) f.table[i + 128] &= 0x7fffu;
                }
                compare_table(&f, "random with a sign");
            }
        }
        for (int c = E4M3; c <= INT8; c++) { /* a format but for one entry */
            for (unsigned code = 0; code < 256; code++) {
                dspark__code_format f = format_of((codes)c, (dspark__code_scale)scale, block, 0);
                f.table[code] = random_entry(next_random());
                compare_table(&f, CODES_NAME[c]);
            }
        }
    }
    for (unsigned code = 0; code < 16; code++) { /* integers, but not in the usual places */
        dspark__code_format f = format_of(INT4, DSPARK__CODE_OFFSET, 8, 0);
        f.table[code] = exact_bf16((double)(next_random() % 64) - 32);
        compare_table(&f, "int4");
        f = format_of(E2M1, DSPARK__CODE_E4M3, 8, 0);
        f.table[code] = exact_bf16(ldexp((double)(next_random() % 16), -2));
        compare_table(&f, "e2m1");
    }
}

static int same_float(float a, float b)
{
    return dspark__f32_bits(a) == dspark__f32_bits(b) || (isnan(a) && isnan(b));
}

/* ---- few rows in one go ---------------------------------------------------------------------- */

enum { MOST_DOT_ROWS = 27, MOST_DOT_PANELS = 4 };

/* What dot_codes is: decode, gemm_bf16 a K-group at a time, scale_add, each by ref. */
static void dot_by_steps(float *want, const dspark__dot_codes *d, size_t p)
{
    size_t step = d->group ? d->group : d->k;
    uint16_t *w = aligned_alloc(64, (d->k + 7) / 8 * 8 * 96);
    _Alignas(64) static float part[MOST_DOT_ROWS * 48];
    assert_non_null(w);
    levels[0].kern.decode(w, d->codes + p * d->code_stride,
                          d->scales ? d->scales + p * d->scale_stride : NULL, d->format, 0, d->k);
    for (size_t k0 = 0; k0 < d->k; k0 += step) {
        dspark__gemm_bf16 g = {.x = (const unsigned char *)d->x + 2 * k0, .x_stride = d->x_stride,
                               .n_rows = d->n_rows, .panels = w + k0 * 48, .n_panels = 1,
                               .acc = part, .first = 1};
        g.k = d->k - k0 < step ? d->k - k0 : step;
        levels[0].kern.gemm_bf16(&g);
        if (d->group)
            levels[0].kern.scale_add(want, part, d->group_scales + p * d->group_stride + k0 / step * 48,
                                     d->n_rows, k0 == 0);
        else memcpy(want, part, d->n_rows * 192);
    }
    free(w);
}

/* gemm_groups over the first panel, in two calls. */
static void check_groups(const dspark__dot_codes *d, int class)
{
    const size_t k = d->k, group = d->group, n_rows = d->n_rows;
    uint16_t *w = aligned_alloc(64, (k + 7) / 8 * 8 * 96);
    static float want[MOST_DOT_ROWS * 48];
    _Alignas(64) static float part[MOST_DOT_ROWS * 48], sum[MOST_DOT_ROWS * 48];
    assert_non_null(w);
    dot_by_steps(want, d, 0);
    levels[0].kern.decode(w, d->codes, d->scales, d->format, 0, k);
    for (size_t l = 0; l < n_levels; l++) {
        dspark__gemm_bf16 g = {.x = d->x, .x_stride = d->x_stride, .n_rows = n_rows, .panels = w,
                               .n_panels = 1, .k = k < group ? k : group, .acc = part, .first = 1};
        levels[l].kern.gemm_groups(&g, group, d->group_scales, sum);
        if (k > group) {
            g.x = (const unsigned char *)d->x + 2 * group;
            g.panels = w + group * 48;
            g.k = k - group;
            g.first = 0;
            levels[l].kern.gemm_groups(&g, group, d->group_scales + 48, sum);
        }
        for (size_t i = 0; i < n_rows * 48; i++)
            if (!same_float(sum[i], want[i]))
                fail_msg("%s: gemm_groups, k %zu rows %zu group %zu class %d, at %zu: %a, not %a",
                         levels[l].name, k, n_rows, group, class, i, (double)sum[i],
                         (double)want[i]);
    }
    free(w);
}

/* Row i of x ends at a guard page when it is the last one; x is misaligned by `shift`. class 0: all
 * fast ways; 1: some scales have none; 2: x have none either; 3: both are at the ends of what the fast
 * ways take, 2^-48 and 2^40, 2^-24 and 2^24, and sometimes beyond; 4: x far beyond at one end;
 * 5: scales far beyond. */
static void check_dot(const dspark__code_format *f, size_t k, size_t n_rows, size_t n_panels,
                      size_t group, int class, size_t shift)
{
    size_t codes_stride = dspark__code_panel_bytes(f, k);
    size_t n_scales = dspark__code_scale_bytes(f, k), stride = 2 * k + shift % 3;
    size_t n_groups = group ? (k + group - 1) / group : 0;
    guard packed = guard_end(n_panels * codes_stride), bytes = guard_end(n_panels * n_scales);
    guard x = guard_end(n_rows ? (n_rows - 1) * stride + 2 * k : 0);
    guard scale = guard_end(n_panels * n_groups * 192), acc = guard_end(n_panels * n_rows * 192);
    static float want[MOST_DOT_PANELS][MOST_DOT_ROWS * 48];
    for (size_t i = 0; i < packed.n; i++) {
        do packed.p[i] = (uint8_t)(next_random() >> 24); /* codes that are finite */
        while (f->bits == 8 && (f->table[packed.p[i]] & 0x7f80u) == 0x7f80u);
    }
    for (size_t i = 0; i < bytes.n; i++) bytes.p[i] = random_scale(f->scale, class);
    for (size_t i = 0; i + 1 < x.n; i += 2) {
        uint64_t r = next_random();
        uint16_t v = (uint16_t)((r & 0x807fu) | (uint64_t)(100 + (r >> 20) % 50) << 7);
        if (class == 2 && (r >> 40) % 8 == 0) v = (uint16_t)(r >> 48 & 0x81ffu); /* about subnormal */
        if (class != 2 && (r >> 40) % 64 == 0) v = r >> 63 ? 0x8000 : 0;
        if (class == 3) v = (uint16_t)((r >> 48 & 0x8000u) | (r >> 30 & 1 ? 79 << 7 : 167 << 7));
        if (class == 3 && (r >> 40) % 4 == 0)
            v = (uint16_t)((r >> 48 & 0x807fu) | (r >> 30 & 1 ? 79 << 7 : 166 << 7));
        uint64_t far = k % 2 ? 27 + (r >> 20) % 12 : 127 + (r >> 20) % 100;
        if (class == 4) v = (uint16_t)((r & 0x807fu) | far << 7);
        if (class == 3 && (r >> 31) % 512 == 0) v = (r >> 30 & 1) ? 78 << 7 | 0x7f : 167 << 7 | 1;
        if (class > 0 && (r >> 50) % 4096 == 0) v = r >> 63 ? 0x7f80 : 0xffc0;
        memcpy(x.p + i, &v, 2);
    }
    for (size_t i = 0; i < n_panels * n_groups * 48; i++) {
        float s = ldexpf(1.0f + (float)(next_random() % 1000) / 1000, (int)(next_random() % 9) - 8);
        if (class == 2) s *= 0x1p-120f;
        memcpy(scale.p + 4 * i, &s, 4);
    }
    dspark__dot_codes d = {.x = x.p, .x_stride = stride, .n_rows = n_rows, .codes = packed.p,
                           .scales = n_scales ? bytes.p : NULL, .format = f, .k = k, .group = group,
                           .n_panels = n_panels, .code_stride = codes_stride,
                           .scale_stride = n_scales, .group_stride = n_groups * 48,
                           .group_scales = group ? (const float *)(const void *)scale.p : NULL,
                           .acc = (float *)(void *)acc.p};
    for (size_t p = 0; p < n_panels; p++) dot_by_steps(want[p], &d, p);
    for (size_t l = 0; l < n_levels; l++) {
        memset(acc.p, 0xa5, acc.n);
        levels[l].kern.dot_codes(&d);
        for (size_t p = 0; p < n_panels; p++) {
            const float *got = d.acc + p * n_rows * 48;
            for (size_t i = 0; i < n_rows * 48; i++)
                if (!same_float(got[i], want[p][i]))
                    fail_msg("%s: bits %u scale %d block %u k %zu rows %zu panel %zu of %zu group %zu "
                             "class %d, at %zu: %a, not %a", levels[l].name, f->bits, (int)f->scale,
                             f->block, k, n_rows, p, n_panels, group, class, i, (double)got[i],
                             (double)want[p][i]);
        }
    }
    if (group > 0 && n_panels > 0) check_groups(&d, class);
    guard_free(&packed);
    guard_free(&bytes);
    guard_free(&x);
    guard_free(&scale);
    guard_free(&acc);
}

static void test_dot_codes(void **state)
{
    (void)state;
    static const size_t SIZES[] = {1, 2, 7, 8, 9, 16, 17, 24, 40, 131, 264, 391};
    static const uint32_t BLOCKS[] = {8, 16, 24, 32, 256};
    static const size_t GROUPS[] = {0, 8, 32, 48, 128};
    size_t turn = 0;
    for (int c = 0; c < N_CODES; c++) {
        for (int scale = DSPARK__CODE_PLAIN; scale <= DSPARK__CODE_OFFSET; scale++) {
            if (!is_allowed((codes)c, (dspark__code_scale)scale)) continue;
            for (size_t b = 0; b < sizeof BLOCKS / sizeof *BLOCKS; b++) {
                if (scale == DSPARK__CODE_PLAIN && b > 0) break;
                dspark__code_format f = format_of((codes)c, (dspark__code_scale)scale,
                                                  scale == DSPARK__CODE_PLAIN ? 0 : BLOCKS[b], 0);
                for (size_t s = 0; s < sizeof SIZES / sizeof *SIZES; s++)
                    for (size_t g = 0; g < sizeof GROUPS / sizeof *GROUPS; g++, turn++)
                        check_dot(&f, SIZES[s], turn % (MOST_DOT_ROWS + 1),
                                  (turn + turn / 5) % (MOST_DOT_PANELS + 1),
                                  GROUPS[g], (int)(turn / 7 % 6), turn % 4);
            }
        }
    }
    for (unsigned code = 0; code < 16; code++) { /* tables that are no format's, but for one entry */
        for (int scale = DSPARK__CODE_PLAIN; scale <= DSPARK__CODE_E8M0; scale++) {
            dspark__code_format f = format_of(E2M1, (dspark__code_scale)scale, scale ? 16 : 0, 0);
            f.table[code] = exact_bf16(ldexp((double)(next_random() % 16), -2));
            check_dot(&f, 72, 3, 1, code % 2 ? 32 : 0, 0, 1);
        }
    }
    /* every code under every scale byte, 48 bytes at a time; x picks one code */
    for (unsigned first = 0; first < 127; first += 4) {
        dspark__code_format f = format_of(E2M1, DSPARK__CODE_E4M3, 16, 0);
        _Alignas(64) uint8_t packed[384] = {0};
        _Alignas(64) float acc[48];
        uint8_t scales[48];
        for (size_t j = 0; j < 48; j++) {
            scales[j] = (uint8_t)(first + j % 4 < 127 ? first + j % 4 : 126);
            for (unsigned k = 0; k < 16; k++) put_code(packed, &f, k, j, k);
        }
        for (size_t l = 0; l < n_levels; l++) {
            for (unsigned k = 0; k < 16; k++) {
                uint16_t x[16] = {0};
                x[k] = 0x3f80;
                dspark__dot_codes d = {.x = x, .x_stride = 32, .n_rows = 1, .codes = packed, .n_panels = 1,
                                       .scales = scales, .format = &f, .k = 16, .acc = acc};
                levels[l].kern.dot_codes(&d);
                for (size_t j = 0; j < 48; j++)
                    assert_true((double)acc[j] ==
                                code_value(E2M1, k) * scale_value(DSPARK__CODE_E4M3, scales[j]));
            }
        }
    }
}

/* dot_codes may move powers of two between x, weights and sums, as far as no number can tell: x of one
 * exponent, scales of two, next to where normal numbers or the exactness of that end. */
static void check_bounds(const dspark__code_format *f, unsigned exponent, unsigned low, unsigned high)
{
    enum { K = 144, ROWS = 3, PANEL = K * 48, SCALES = K / 8 * 48 };
    _Alignas(64) static uint8_t packed[2 * PANEL];
    _Alignas(64) static float got[2 * ROWS * 48], want[2 * ROWS * 48];
    static uint8_t scales[2 * SCALES];
    static uint16_t x[ROWS * K];
    const size_t n_rows = 1 + next_random() % ROWS;
    dspark__dot_codes d = {.x = x, .x_stride = K * 2, .n_rows = n_rows, .codes = packed, .n_panels = 2,
                           .code_stride = PANEL, .scale_stride = SCALES, .scales = f->scale ? scales : NULL,
                           .format = f, .k = K, .acc = got};
    for (size_t i = 0; i < sizeof packed; i++) {
        do packed[i] = (uint8_t)(next_random() >> 24);
        while (f->bits == 8 && (f->table[packed[i]] & 0x7f80u) == 0x7f80u);
    }
    for (size_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)(next_random() >> 40 & 1 ? low : high);
    for (size_t i = 0; i < ROWS * K; i++)
        x[i] = (uint16_t)((next_random() >> 20 & 0x807fu) | exponent << 7);
    for (size_t p = 0; p < 2; p++) dot_by_steps(want + p * n_rows * 48, &d, p);
    for (size_t l = 1; l < n_levels; l++) {
        levels[l].kern.dot_codes(&d);
        for (size_t i = 0; i < 2 * n_rows * 48; i++)
            if (!same_float(got[i], want[i]))
                fail_msg("%s: bits %u scale %d, %u and %u, x 2^%d, rows %zu, at %zu: %a, not %a",
                         levels[l].name, f->bits, (int)f->scale, low, high, (int)exponent - 127, n_rows, i,
                         (double)got[i], (double)want[i]);
    }
}

static void test_dot_bounds(void **state)
{
    (void)state;
    static const unsigned EXPONENTS[] = {91, 154, 90,  155, 71,  127, 0,   1,   2,
                                         8,  9,   245, 246, 247, 248, 253, 254, 255};
    static const unsigned POWERS[][2] = {{95, 159}, {94, 159}, {95, 160}, {87, 167}, {1, 254},
                                         {0, 8},    {246, 254}};
    for (int c = 0; c < N_CODES; c++) {
        for (int scale = DSPARK__CODE_PLAIN; scale <= DSPARK__CODE_OFFSET; scale++) {
            if (!is_allowed((codes)c, (dspark__code_scale)scale)) continue;
            dspark__code_format f = format_of((codes)c, (dspark__code_scale)scale, scale ? 16 : 0, 0);
            for (size_t e = 0; e < sizeof EXPONENTS / sizeof *EXPONENTS; e++) {
                if (scale != DSPARK__CODE_E8M0) check_bounds(&f, EXPONENTS[e], 1, 126);
                else if (e < 6)
                    for (size_t i = 0; i < sizeof POWERS / sizeof *POWERS; i++)
                        check_bounds(&f, EXPONENTS[e], POWERS[i][0], POWERS[i][1]);
            }
        }
    }
}

/* ---- after a sum ----------------------------------------------------------------------------- */

static float random_f32(int class)
{
    static const uint32_t special[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc12345u,
                                       0x7f7fffffu, 0,           0x80000000u, 0x00000001u,
                                       0x807fffffu, 0x00800000u};
    uint64_t r = next_random();
    uint32_t u = (uint32_t)r;
    if (class == 1 && r >> 61 == 0) return dspark__f32_from_bits(special[(r >> 40) % 10]);
    uint32_t exponent = (uint32_t)(class == 2 ? 50 + (r >> 40) % 30 : 100 + (r >> 40) % 50);
    return dspark__f32_from_bits((u & 0x807fffffu) | exponent << 23);
}

static void test_scale_add(void **state)
{
    (void)state;
    for (size_t n_rows = 0; n_rows <= 17; n_rows++) {
        for (int class = 0; class < 3; class++) {
            guard acc = guard_end(n_rows * 192), sum = guard_end(n_rows * 192);
            guard s = guard_end(192 + class % 2 * 1), want = guard_end(n_rows * 192 + 4);
            float *a = (float *)(void *)acc.p, *t = (float *)(void *)sum.p;
            float *w = (float *)(void *)want.p, scale[48];
            for (size_t j = 0; j < 48; j++) scale[j] = random_f32(class);
            memcpy(s.p, scale, sizeof scale); /* s.p may be unaligned */
            for (int first = 0; first < 2; first++) {
                float start[17 * 48];
                for (size_t i = 0; i < n_rows * 48; i++) {
                    a[i] = random_f32(class);
                    start[i] = random_f32(class) * (class == 2 ? 0x1p-60f : 1.0f);
                }
                memcpy(w, start, n_rows * 192);
                levels[0].kern.scale_add(w, a, scale, n_rows, first);
                for (size_t i = 0; first && i < n_rows * 48; i++)
                    assert_true(same_float(w[i], (float)((double)a[i] * (double)scale[i % 48])));
                for (size_t l = 1; l < n_levels; l++) {
                    memcpy(t, start, n_rows * 192);
                    levels[l].kern.scale_add(t, a, scale, n_rows, first);
                    for (size_t i = 0; i < n_rows * 48; i++)
                        if (!same_float(t[i], w[i]))
                            fail_msg("%s: rows %zu first %d, at %zu: %a, not %a", levels[l].name,
                                     n_rows, first, i, (double)t[i], (double)w[i]);
                }
            }
            guard_free(&acc);
            guard_free(&sum);
            guard_free(&s);
            guard_free(&want);
        }
    }
    _Alignas(64) float acc[48], sum[48], s[48]; /* fused, and subnormals kept */
    for (size_t l = 0; l < n_levels; l++) {
        for (size_t j = 0; j < 48; j++) {
            acc[j] = s[j] = j % 2 ? 0x1p-70f : 1 + 0x1p-12f;
            sum[j] = j % 2 ? 0x1p-149f : -(1 + 0x1p-11f);
        }
        levels[l].kern.scale_add(sum, acc, s, 1, 0);
        for (size_t j = 0; j < 48; j++)
            assert_true(sum[j] == (j % 2 ? 0x1p-140f + 0x1p-149f : 0x1p-24f));
    }
}

static void test_finish(void **state)
{
    (void)state;
    for (size_t n_rows = 0; n_rows <= 17; n_rows += n_rows < 3 ? 1 : 7) {
        for (size_t n_out = 0; n_out <= 48; n_out++) {
            int class = (int)((n_out + n_rows) % 3), scaled = n_out % 5 != 0;
            size_t stride = n_out + n_out % 4, shift = n_out % 3;
            size_t n_bytes = n_rows == 0 ? 0 : ((n_rows - 1) * stride + n_out) * 2;
            guard acc = guard_end(n_rows * 192), s = guard_end(n_out * 4);
            guard out = guard_end(n_bytes + shift);
            float *a = (float *)(void *)acc.p, *scale = (float *)(void *)s.p;
            for (size_t i = 0; i < n_rows * 48; i++) a[i] = random_f32(class);
            for (size_t j = 0; j < n_out; j++) scale[j] = random_f32(class);
            for (size_t l = 0; l < n_levels; l++) {
                memset(out.p, 0xa5, out.n);
                levels[l].kern.finish((uint16_t *)(void *)out.p, stride, a, scaled ? scale : NULL,
                                      n_rows, n_out);
                for (size_t i = 0; i < n_rows; i++) {
                    for (size_t o = 0; o < stride; o++) {
                        if (o >= n_out && i + 1 == n_rows) break;
                        double v = (double)a[i * 48 + o] * (scaled && o < n_out ? scale[o] : 1.0f);
                        uint16_t want = o < n_out ? dspark__f32_to_bf16((float)v) : 0xa5a5u;
                        uint16_t got = dspark__load_u16(out.p + (i * stride + o) * 2);
                        if (got != want)
                            fail_msg("%s: rows %zu outputs %zu, at [%zu][%zu]: %04x, not %04x",
                                     levels[l].name, n_rows, n_out, i, o, got, want);
                    }
                }
                for (size_t i = n_bytes; i < out.n; i++) assert_int_equal(out.p[i], 0xa5);
            }
            guard_free(&acc);
            guard_free(&s);
            guard_free(&out);
        }
    }
}

#if defined(__SSE2__)
/* decode flushes inside and puts the environment back. */
static void test_environment(void **state)
{
    (void)state;
    _Alignas(64) static uint8_t packed[384];
    _Alignas(64) static uint16_t w[384];
    uint8_t scales[48] = {0};
    dspark__code_format f = format_of(E2M1, DSPARK__CODE_E8M0, 8, 0);
    for (size_t l = 0; l < n_levels; l++) {
        dspark__fpenv_enter();
        levels[l].kern.decode(w, packed, scales, &f, 0, 8);
        assert_int_equal(_mm_getcsr() & 0xffc0u, DSPARK__MXCSR_DEFAULT & 0xffc0u);
        dspark__fpenv_leave(DSPARK__MXCSR_DEFAULT);
    }
}
#else
static void test_environment(void **state)
{
    (void)state;
    skip();
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_answers),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_dot_codes),
        cmocka_unit_test(test_dot_bounds),
        cmocka_unit_test(test_scale_add),
        cmocka_unit_test(test_finish),
        cmocka_unit_test(test_environment),
    };
    print_message("seed %llx\n", (unsigned long long)seed);
    return cmocka_run_group_tests_name("kern_codes", tests, find_levels, NULL);
}
