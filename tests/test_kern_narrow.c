/* Narrow last panels and short products: every level against ref over panels of 48, bit for bit, between pages
 * that may not be touched. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/guard.h"
#include "support/values.h"

enum { MOST_ROWS = 20, MOST_OUT = 144 };

/* The last panel of `n_out` outputs as a narrow one, the others as they are; returns elements. */
static size_t make_narrow(uint16_t *to, const uint16_t *from, size_t n_out, size_t k)
{
    const size_t width = dspark__narrow_width(n_out), whole = n_out / 48 * dspark__panel_elements(k);
    memcpy(to, from, whole * 2);
    for (size_t pair = 0; pair < (k + 1) / 2; pair++)
        memcpy(to + whole + pair * width * 2, from + whole + pair * 96, width * 4);
    return whole + (k + 1) / 2 * width * 2;
}

static void test_width(void **state)
{
    (void)state;
    for (size_t rows = 1; rows <= MOST_OUT; rows++) {
        const size_t width = dspark__narrow_width(rows), left = (rows - 1) % 48 + 1;
        if (left > 32) assert_int_equal(width, 0);
        else assert_int_equal(width, left > 16 ? 32 : 16);
    }
}

typedef struct problem {
    size_t k, n_out, stride; /* stride of x, bytes */
    guard x, out;
    const uint16_t *panels;
    size_t narrow;
    const void *next; /* what is fetched: what follows in memory, or something else */
} problem;

/* out[rows][n_out + 1], the last one of a row untouched. */
static const uint16_t *run(const dspark__kern *kern, const problem *p, size_t n_rows, float *acc)
{
    uint16_t *out = (uint16_t *)(void *)(p->out.p + (MOST_ROWS - n_rows) * (p->n_out + 1) * 2);
    dspark__gemm_bf16 g = {.x = p->x.p, .x_stride = p->stride, .n_rows = n_rows, .panels = p->panels,
                           .panel_stride = dspark__panel_elements(p->k), .n_panels = (p->n_out + 47) / 48,
                           .narrow = p->narrow, .k = p->k, .acc = acc, .first = 1, .last = 1, .out = out,
                           .out_stride = p->n_out + 1, .n_out = p->n_out, .prefetch = p->next,
                           .prefetch_bytes = p->next ? 4096 : 0};
    memset(p->out.p, 0xa5, p->out.n);
    kern->gemm_bf16(&g);
    return out;
}

static void check_rows(const problem *p, const uint16_t *out, size_t n_rows, const uint16_t *want, const char *what)
{
    const unsigned char *at = p->out.p;
    for (; at < (const unsigned char *)out; at++) assert_int_equal(*at, 0xa5);
    for (size_t i = 0; i < n_rows; i++, out += p->n_out + 1, want += p->n_out + 1) {
        assert_int_equal(out[p->n_out], 0xa5a5);
        for (size_t o = 0; o < p->n_out; o++)
            if (out[o] != want[o])
                fail_msg("%s: k %zu, outputs %zu, rows %zu, at [%zu][%zu]: %04x, not %04x", what, p->k, p->n_out,
                         n_rows, i, o, out[o], want[o]);
    }
}

static void try_shape(size_t k, size_t n_out, value_class class)
{
    const size_t wide = (n_out + 47) / 48 * dspark__panel_elements(k);
    problem p = {.k = k, .n_out = n_out, .stride = 2 * k + 2 * (k % 3)};
    uint16_t *w = malloc(n_out * k * 2), *want = malloc(MOST_ROWS * (n_out + 1) * 2);
    uint16_t *panels = aligned_alloc(64, wide * 2 + 64), *narrow = aligned_alloc(64, wide * 2 + 64);
    float *acc = aligned_alloc(64, (n_out + 47) / 48 * MOST_ROWS * 48 * sizeof *acc);
    dspark__kern ref = values_level(DSPARK_ISA_REF);
    assert_true(w && want && panels && narrow && acc);
    p.x = guard_end((MOST_ROWS - 1) * p.stride + 2 * k);
    p.out = guard_end(MOST_ROWS * (n_out + 1) * 2);
    values_fill(p.x.p, p.x.n / 2, class);
    values_fill(w, n_out * k, class);
    dspark__pack_bf16(panels, w, n_out, k);
    p.panels = panels;
    memcpy(want, run(&ref, &p, MOST_ROWS, NULL), MOST_ROWS * (n_out + 1) * 2);

    const size_t n = (dspark__narrow_width(n_out) ? make_narrow(narrow, panels, n_out, k) : wide) * 2;
    guard g = guard_end(n);
    memcpy(g.p, dspark__narrow_width(n_out) ? narrow : panels, n);
    p.panels = (const uint16_t *)(const void *)g.p;
    p.narrow = dspark__narrow_width(n_out);
    for (VALUES_LEVELS(isa)) {
        dspark__kern kern = values_level(isa);
        for (size_t n_rows = 0; n_rows <= MOST_ROWS; n_rows++) {
            if (isa == DSPARK_ISA_REF && n_rows % 7) continue; /* slow, and row by row */
            p.next = n_rows % 3 == 0 ? NULL : n_rows % 3 == 1 ? g.p + g.n : (const void *)w;
            check_rows(&p, run(&kern, &p, n_rows, n_rows % 2 ? acc : NULL), n_rows, want, dspark__isa_name(kern.isa));
        }
    }
    guard_free(&g);
    guard_free(&p.x);
    guard_free(&p.out);
    free(acc);
    free(narrow);
    free(panels);
    free(want);
    free(w);
}

static void test_shapes(void **state)
{
    static const size_t ks[] = {1, 2, 3, 16, 33, 127, 128, 170, 257, 300};
    static const size_t outs[] = {1, 15, 16, 17, 32, 33, 48, 64, 79, 128, 144};
    (void)state;
    values_print_seed();
    for (size_t i = 0; i < sizeof ks / sizeof *ks; i++)
        for (size_t j = 0; j < sizeof outs / sizeof *outs; j++)
            try_shape(ks[i], outs[j], (value_class)((i + j) % VALUES_N_CLASSES));
}

/* Around the k up to which sums stay in registers, and well above it. */
static void test_long(void **state)
{
    static const size_t ks[] = {512, 1023, 1024, 1025, 2100};
    (void)state;
    for (size_t i = 0; i < sizeof ks / sizeof *ks; i++)
        for (size_t c = 0; c < VALUES_N_CLASSES; c++) try_shape(ks[i], c % 2 ? 65 : 80, (value_class)c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_width),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_long),
    };
    return cmocka_run_group_tests_name("kern_narrow", tests, NULL, NULL);
}
