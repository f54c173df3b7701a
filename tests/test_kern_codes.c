/* Packed codes at every level of this machine: all codes with all scale bytes against values
 * computed in double precision, shapes, tables and guard pages against ref, bit for bit; and what is
 * multiplied after a sum. Their products with x are test_kern_dot.c's. Owns no model knowledge. */
#include "base/fpenv.h"
#include "base/numfmt.h"
#include "kern/kern.h"
#include "support/codes.h"
#include "support/guard.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- every code with every scale ------------------------------------------------------------- */

static uint16_t expected(codes c, unsigned code, dspark__code_scale kind, unsigned byte)
{
    double v = code_value(c, code);
    if (kind == DSPARK__CODE_OFFSET) v -= scale_value(kind, byte);
    else if (kind != DSPARK__CODE_PLAIN) v *= scale_value(kind, byte);
    return exact_bf16(v);
}

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

/* Codes, scales and weights each end at a page that may not be touched. */
static void check_shape(codes c, dspark__code_scale scale, uint32_t block, size_t k, int class,
                        size_t shift)
{
    dspark__code_format f = format_of(c, scale, scale == DSPARK__CODE_PLAIN ? 0 : block, 0);
    size_t n_scales = dspark__code_scale_bytes(&f, k), padded = (k + 7) / 8 * 8;
    guard packed = guard_end(dspark__code_panel_bytes(&f, k)), bytes = guard_end(n_scales + shift);
    guard want = guard_end(padded * 96 + 64), got = guard_end(padded * 96);
    for (size_t i = 0; i < packed.n; i++) packed.p[i] = (uint8_t)(code_random() >> 24);
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
        packed[i] = (uint8_t)(i < 512 ? i : code_random() >> 24);
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
                for (size_t i = 0; i < 256; i++) f.table[i] = random_entry(code_random());
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
                f.table[code] = random_entry(code_random());
                compare_table(&f, CODES_NAME[c]);
            }
        }
    }
    for (unsigned code = 0; code < 16; code++) { /* integers, but not in the usual places */
        dspark__code_format f = format_of(INT4, DSPARK__CODE_OFFSET, 8, 0);
        f.table[code] = exact_bf16((double)(code_random() % 64) - 32);
        compare_table(&f, "int4");
        f = format_of(E2M1, DSPARK__CODE_E4M3, 8, 0);
        f.table[code] = exact_bf16(ldexp((double)(code_random() % 16), -2));
        compare_table(&f, "e2m1");
    }
}

/* ---- after a sum ----------------------------------------------------------------------------- */

static float random_f32(int class)
{
    static const uint32_t special[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc12345u,
                                       0x7f7fffffu, 0,           0x80000000u, 0x00000001u,
                                       0x807fffffu, 0x00800000u};
    uint64_t r = code_random();
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
        cmocka_unit_test(test_scale_add),
        cmocka_unit_test(test_finish),
        cmocka_unit_test(test_environment),
    };
    print_message("seed %llx\n", (unsigned long long)code_seed);
    return cmocka_run_group_tests_name("kern_codes", tests, find_levels, NULL);
}
