/* Products of packed codes with few rows, at every level of this machine: what decode and gemm_bf16 give by
 * ref, bit for bit, whatever is moved between x, weights and sums on the way, next to where that ends to be
 * exact. Owns no model knowledge. */
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
        do packed.p[i] = (uint8_t)(code_random() >> 24); /* codes that are finite */
        while (f->bits == 8 && (f->table[packed.p[i]] & 0x7f80u) == 0x7f80u);
    }
    for (size_t i = 0; i < bytes.n; i++) bytes.p[i] = random_scale(f->scale, class);
    for (size_t i = 0; i + 1 < x.n; i += 2) {
        uint64_t r = code_random();
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
        float s = ldexpf(1.0f + (float)(code_random() % 1000) / 1000, (int)(code_random() % 9) - 8);
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
            f.table[code] = exact_bf16(ldexp((double)(code_random() % 16), -2));
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
    const size_t n_rows = 1 + code_random() % ROWS;
    dspark__dot_codes d = {.x = x, .x_stride = K * 2, .n_rows = n_rows, .codes = packed, .n_panels = 2,
                           .code_stride = PANEL, .scale_stride = SCALES, .scales = f->scale ? scales : NULL,
                           .format = f, .k = K, .acc = got};
    for (size_t i = 0; i < sizeof packed; i++) {
        do packed[i] = (uint8_t)(code_random() >> 24);
        while (f->bits == 8 && (f->table[packed[i]] & 0x7f80u) == 0x7f80u);
    }
    for (size_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)(code_random() >> 40 & 1 ? low : high);
    for (size_t i = 0; i < ROWS * K; i++)
        x[i] = (uint16_t)((code_random() >> 20 & 0x807fu) | exponent << 7);
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
    /* the ends of kern/dot_bounds.h and the next beyond them, then those of normal numbers */
    static const unsigned EXPONENTS[] = {79, 166, 78, 167, 71,  168, 91, 154, 127, 0, 1, 2,
                                         8,  9,   245, 246, 247, 248, 253, 254, 255};
    static const unsigned POWERS[][2] = {{103, 151}, {102, 151}, {103, 152}, {95, 159}, {87, 167},
                                         {1, 254},   {0, 8},     {246, 254}};
    for (int c = 0; c < N_CODES; c++) {
        for (int scale = DSPARK__CODE_PLAIN; scale <= DSPARK__CODE_OFFSET; scale++) {
            if (!is_allowed((codes)c, (dspark__code_scale)scale)) continue;
            dspark__code_format f = format_of((codes)c, (dspark__code_scale)scale, scale ? 16 : 0, 0);
            for (size_t e = 0; e < sizeof EXPONENTS / sizeof *EXPONENTS; e++) {
                if (scale != DSPARK__CODE_E8M0) check_bounds(&f, EXPONENTS[e], 1, 126);
                else if (e < 9)
                    for (size_t i = 0; i < sizeof POWERS / sizeof *POWERS; i++)
                        check_bounds(&f, EXPONENTS[e], POWERS[i][0], POWERS[i][1]);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dot_codes),
        cmocka_unit_test(test_dot_bounds),
    };
    print_message("seed %llx\n", (unsigned long long)code_seed);
    return cmocka_run_group_tests_name("kern_dot", tests, find_levels, NULL);
}
