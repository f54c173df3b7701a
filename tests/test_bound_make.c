/* Codes for bounds of the Markov bias: every level makes those that ref makes, bit for bit, and ref turns as
 * Hadamard's matrix does and leaves what its codes leave. That bounds hold is test_markov_bound's. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/values.h"

enum { MOST = 256, LANES = DSPARK__PANEL };

typedef float rows[MOST][LANES];

typedef struct made {
    rows wide, turned;
    float squares[LANES], left[LANES];
    unsigned char words[MOST / 8 * LANES * 4];
} made;

static const size_t sizes[] = {8, 16, 24, 64, 200, 256};
static uint16_t panel[MOST * LANES];
static made want, got;

static void make(made *m, const dspark__kern *kern, size_t n, size_t turn)
{
    float step[LANES], inverse[LANES];
    memset(m, 0, sizeof *m);
    kern->bound_widen(m->wide, panel, n);
    memcpy(m->turned, m->wide, sizeof m->wide);
    for (size_t lane = 0; lane < LANES; lane++) m->squares[lane] = m->left[lane] = (float)(lane % 3);
    kern->bound_turn(m->turned, n, turn, m->squares);
    for (size_t lane = 0; lane < LANES; lane++) { /* one step in five is none, as for a row of zeros */
        step[lane] = lane % 5 ? dspark__bf16_to_f32(dspark__f32_to_bf16(0.17f * sqrtf(m->squares[lane] / (float)n))) : 0;
        inverse[lane] = step[lane] > 0 ? 0.5f / step[lane] : 0;
    }
    kern->bound_codes(m->words, (const float (*)[LANES])m->turned, n, inverse, step, m->left);
}

static void fill_panel(size_t n, int round)
{
    values_fill(panel, n * LANES, round % 3 == 0 ? VALUES_SMALL : VALUES_NORMAL);
    if (round % 4 == 1) memset(panel, 0x80, 64); /* subnormals below zero */
}

static void test_levels_are_equal(void **state)
{
    (void)state;
    for (int round = 0; round < 60; round++) {
        const size_t n = sizes[round % 6];
        size_t turn = 1;
        fill_panel(n, round);
        for (; n % turn == 0; turn *= 2) {
            dspark__kern ref = values_level(DSPARK_ISA_REF);
            make(&want, &ref, n, turn);
            for (VALUES_LEVELS(isa)) {
                dspark__kern kern = values_level(isa);
                make(&got, &kern, n, turn);
                if (memcmp(&want, &got, sizeof want) != 0)
                    fail_msg("%s: %zu elements, turned by %zu", dspark__isa_name((dspark_isa)isa), n, turn);
            }
        }
    }
}

static int bits_of(unsigned x)
{
    int n = 0;
    for (; x; x &= x - 1) n++;
    return n;
}

/* Against the definition: element i of a turn is the sum of all w[j], negative where i & j has odd parity. */
static void test_what_is_made(void **state)
{
    enum { N = 64 };
    dspark__kern ref = values_level(DSPARK_ISA_REF);
    (void)state;
    values_fill(panel, N * LANES, VALUES_NORMAL);
    panel[0] = 0x0001; /* subnormal: zero */
    make(&want, &ref, N, N);
    for (size_t lane = 0; lane < LANES; lane++) {
        double squares = lane % 3, left = lane % 3;
        for (unsigned i = 0; i < N; i++) {
            double sum = 0, most = 0;
            for (unsigned j = 0; j < N; j++) {
                const size_t at = ((size_t)j / 2 * LANES + lane) * 2 + j % 2;
                const double w = panel[at] & 0x7f80 ? (double)dspark__bf16_to_f32(panel[at]) : 0;
                sum += bits_of(i & j) % 2 ? -w : w;
                most += fabs(w);
            }
            if (!(fabs(sum - (double)want.turned[i][lane]) <= most * 1e-6)) fail_msg("lane %zu, element %u", lane, i);
            squares += (double)want.turned[i][lane] * want.turned[i][lane];
            const int byte = want.words[(i / 8 * LANES + lane) * 4 + i % 4], code = i % 8 < 4 ? byte & 15 : byte >> 4;
            const double s = lane % 5 ? (double)dspark__bf16_to_f32(dspark__f32_to_bf16(
                                            0.17f * sqrtf(want.squares[lane] / N)))
                                      : 0;
            const double rest = (double)want.turned[i][lane] - s * (2 * code - 15);
            if (s > 0 && code > 0 && code < 15 && fabs(rest) > s * 1.001) fail_msg("lane %zu, element %u: code %d", lane, i, code);
            left += rest * rest;
        }
        if (!(fabs(squares - (double)want.squares[lane]) <= squares * 1e-5)) fail_msg("squares of lane %zu", lane);
        if (!(fabs(left - (double)want.left[lane]) <= left * 1e-4)) fail_msg("what lane %zu leaves", lane);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_levels_are_equal),
        cmocka_unit_test(test_what_is_made),
    };
    values_print_seed();
    return cmocka_run_group_tests_name("bound_make", tests, NULL, NULL);
}
