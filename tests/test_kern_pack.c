/* Packing a panel of bf16 weights, and the digests of rows: every level against the layout's definition and the
 * library's digest, at every edge of rows, k, alignment and stride, between guard pages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/digest.h"
#include "support/guard.h"
#include "support/values.h"

/* The definition: place by place. */
static void make_panel(uint16_t *to, const unsigned char *w, size_t stride, size_t n, size_t k)
{
    memset(to, 0, dspark__panel_elements(k) * 2);
    for (size_t r = 0; r < n; r++)
        for (size_t i = 0; i < k; i++)
            to[(i / 2 * DSPARK__PANEL + r) * 2 + i % 2] = values_at(w + r * stride, i);
}

/* A value that is not finite is seen wherever it stands. */
static void see_bad_values(const dspark__kern *kern, uint16_t *panel, unsigned char *w, size_t stride,
                           size_t n, size_t k)
{
    static const uint16_t bad[] = {0x7f80, 0xff80, 0x7fc0, 0xffff};
    for (size_t i = 0; i < 4; i++) {
        unsigned char *at = w + i * (n - 1) / 3 * stride + 2 * ((i * 7 + n) % k);
        uint16_t kept;
        memcpy(&kept, at, 2);
        memcpy(at, &bad[i], 2);
        assert_int_equal(kern->pack_panel(panel, w, stride, n, k), 0);
        memcpy(at, &kept, 2);
    }
}

static void try_shape(size_t n, size_t k)
{
    const size_t stride = 2 * k + 2 * (n % 3), span = (n - 1) * stride + 2 * k;
    const size_t bytes = dspark__panel_elements(k) * 2;
    guard source = guard_end(span + n % 2), target = guard_end(bytes), want = guard_end(bytes);
    unsigned char *w = source.p; /* odd addresses too */
    uint16_t *panel = (uint16_t *)(void *)target.p;
    for (size_t r = 0; r < n; r++) values_fill(w + r * stride, k, VALUES_FINITE);
    make_panel((uint16_t *)(void *)want.p, w, stride, n, k);
    for (VALUES_LEVELS(isa)) {
        dspark__kern kern = values_level(isa);
        memset(panel, 0xa5, bytes);
        assert_int_equal(kern.pack_panel(panel, w, stride, n, k), 1);
        assert_memory_equal(panel, want.p, bytes);
        see_bad_values(&kern, panel, w, stride, n, k);
    }
    guard_free(&source);
    guard_free(&target);
    guard_free(&want);
}

static void test_shapes(void **state)
{
    (void)state;
    values_print_seed();
    for (size_t b = 0; b < VALUES_N_SIZES; b++)
        for (size_t n = 1; VALUES_SIZES[b] > 0 && n <= DSPARK__PANEL; n++) try_shape(n, VALUES_SIZES[b]);
    try_shape(DSPARK__PANEL, 7168);
    try_shape(DSPARK__PANEL, 1536 + 17);
}

/* Nothing but the panel is written, whatever lies behind it. */
static void test_bounds(void **state)
{
    (void)state;
    enum { K = 77 };
    _Alignas(64) static uint16_t panel[96 * (K + 1) / 2 + 64];
    static uint16_t w[48 * K];
    values_fill(w, 48 * K, VALUES_FINITE);
    for (VALUES_LEVELS(isa)) {
        dspark__kern kern = values_level(isa);
        memset(panel, 0xa5, sizeof panel);
        kern.pack_panel(panel, w, 2 * K, 41, K);
        for (size_t i = 96 * (K + 1) / 2; i < sizeof panel / 2; i++) assert_int_equal(panel[i], 0xa5a5);
    }
}

/* ---- digests ---- */

/* Every level says of rows what the library's digest says, at every length around stripes and blocks. */
static void test_digests(void **state)
{
    static const size_t sizes[] = {1,   16,  128, 240,  241,  255,  256,  257,  320,  511,   1023,
                                   1024, 1025, 1088, 2047, 2048, 2049, 4096, 4097, 5555, 14336, 71680};
    unsigned char digests[3][16], want[16];
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const size_t n = sizes[i], stride = n + i % 4;
        guard source = guard_end(2 * stride + n);
        for (size_t b = 0; b < source.n; b++) source.p[b] = (unsigned char)values_random();
        for (VALUES_LEVELS(isa)) {
            dspark__kern kern = values_level(isa);
            memset(digests, 0, sizeof digests);
            kern.digest_rows(digests, source.p, stride, 3, n);
            for (size_t r = 0; r < 3; r++) {
                dspark__digest_bytes(source.p + r * stride, n, want);
                assert_memory_equal(digests[r], want, 16);
            }
        }
        guard_free(&source);
    }
}

/* Both at once are what each is alone; `back` moves the rows off their lines. */
static void try_both(size_t n, size_t k, size_t more, size_t back)
{
    const size_t stride = 2 * k + more, span = (n - 1) * stride + 2 * k;
    const size_t bytes = dspark__panel_elements(k) * 2;
    guard source = guard_end(2 * span + back), target = guard_end(bytes), want = guard_end(bytes);
    unsigned char *w = source.p, *next = source.p + span, digests[DSPARK__PANEL][16], one[16];
    for (size_t r = 0; r < n; r++) values_fill(w + r * stride, k, VALUES_FINITE);
    make_panel((uint16_t *)(void *)want.p, w, stride, n, k);
    for (VALUES_LEVELS(isa)) {
        dspark__kern kern = values_level(isa);
        dspark__pack_digest p = {(uint16_t *)(void *)target.p, w, stride, n, k, digests, next};
        if (!kern.pack_digest) continue;
        for (int with_next = 0; with_next < 2; with_next++) {
            memset(target.p, 0xa5, bytes);
            memset(digests, 0xa5, sizeof digests);
            p.next = with_next ? next : NULL;
            assert_int_equal(kern.pack_digest(&p), 1);
            assert_memory_equal(target.p, want.p, bytes);
            for (size_t r = 0; r < n; r++) {
                dspark__digest_bytes(w + r * stride, 2 * k, one);
                assert_memory_equal(digests[r], one, 16);
            }
        }
        for (size_t i = 0; i < 40; i++) {
            unsigned char *at = w + values_random() % n * stride + 2 * (values_random() % k);
            uint16_t kept, bad = 0xff80;
            memcpy(&kept, at, 2);
            memcpy(at, &bad, 2);
            assert_int_equal(kern.pack_digest(&p), 0);
            memcpy(at, &kept, 2);
        }
    }
    guard_free(&source);
    guard_free(&target);
    guard_free(&want);
}

static void test_pack_digest(void **state)
{
    static const size_t ks[] = {1, 77, 120, 121, 127, 128, 129, 160, 161, 512, 513, 543, 1024, 2049, 2080, 7168};
    (void)state;
    for (size_t i = 0; i < sizeof ks / sizeof *ks; i++)
        for (size_t back = 0; back < 64; back += 1 + back % 7)
            try_both(back % 3 == 2 ? 1 + back % DSPARK__PANEL : DSPARK__PANEL, ks[i], back % 5 == 3 ? 64 : back % 2,
                     back);
    try_both(DSPARK__PANEL, 2048, 0, 0);
    try_both(DSPARK__PANEL, 2048, 0, 8);
    try_both(DSPARK__PANEL, 2048, 128, 62);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_digests),
        cmocka_unit_test(test_pack_digest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
