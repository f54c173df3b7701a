/* The examination of schemes. */
#include "support/examine.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/numfmt.h"
#include "support/fixture.h"
#include "support/tmpdir.h"

tensors t;
dspark__quant_rule rule;
double *want;
uint64_t seed;

int examine_setup(void **state)
{
    (void)state;
    tensors_clear(&t);
    memset(&rule, 0, sizeof rule);
    seed = 0x9e3779b97f4a7c15u;
    want = malloc(EXAMINE_WEIGHTS * sizeof *want);
    return want ? 0 : -1;
}

int examine_teardown(void **state)
{
    (void)state;
    tensors_clear(&t);
    free(want);
    want = NULL;
    return 0;
}

unsigned char *add(const char *suffix, dspark_dtype dtype, uint64_t d0, uint64_t d1)
{
    char name[80];
    snprintf(name, sizeof name, "m.%s", suffix);
    return tensors_add2(&t, name, dtype, d0, d1, NULL);
}

void fill_random(unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) p[i] = (unsigned char)(next_random(&seed) >> 13);
}

void fill_scales(unsigned char *p, dspark_dtype dtype, uint64_t n, double *value)
{
    for (uint64_t i = 0; i < n; i++) {
        float f = (float)(1 + next_random(&seed) % 4000) * 0x1p-13f;
        uint16_t h = dspark__f32_to_bf16(f);
        uint8_t e = (uint8_t)(100 + next_random(&seed) % 40);
        switch (dtype) {
        case DSPARK_BF16:
            memcpy(p + 2 * i, &h, 2);
            value[i] = dspark__bf16_to_f32(h);
            break;
        case DSPARK_F16:
            h = (uint16_t)(1 + next_random(&seed) % 0x7bff); /* subnormal ones too */
            memcpy(p + 2 * i, &h, 2);
            value[i] = h < 0x400 ? ldexp(h, -24) : ldexp(1024 + h % 1024, (int)(h >> 10) - 25);
            break;
        case DSPARK_F8_E8M0:
            p[i] = e;
            value[i] = ldexp(1, e - 127);
            break;
        default: memcpy(p + 4 * i, &f, 4); value[i] = f;
        }
    }
}

static int same(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && !signbit(a) == !signbit(b));
}

typedef struct packed {
    dspark__packing p;
    unsigned char *codes;
    uint8_t *scales;
    float *groups, *rows;
    uint16_t *bf16; /* the expanded panel */
} packed;

static size_t places(uint64_t k)
{
    return (size_t)(k + 7) / 8 * 8;
}

/* Every buffer has exactly its size, and rubbish in it where the contract does not promise zeros.
 */
static packed pack_panel(const dspark__scheme *s, const dspark__module *m, const dspark__packing *p,
                         uint64_t row0, uint64_t rows, uint64_t k)
{
    packed x = {.p = *p};
    dspark__panel_out out = {0};
    dspark__kern best;
    if (dspark__kern_select(&best, DSPARK_ISA_AUTO, NULL) != DSPARK_OK) abort();
    size_t n_codes =
        p->bits == 16 ? dspark__panel_elements(k) * 2 : dspark__code_panel_bytes(&p->format, k);
    size_t n_scales = p->bits == 16 ? 0 : dspark__code_scale_bytes(&p->format, k);
    size_t n_groups = p->group ? (k + p->group - 1) / p->group * DSPARK__PANEL : 0;

    out.codes = x.codes = aligned_alloc(64, (n_codes + 63) / 64 * 64);
    memset(x.codes, 0x5a, n_codes);
    out.kern = &best;
    if (n_scales) out.scales = x.scales = memset(malloc(n_scales), 0x5a, n_scales);
    if (n_groups) out.group_scales = x.groups = memset(malloc(n_groups * 4), 0x5a, n_groups * 4);
    if (p->row_scale) out.row_scales = x.rows = memset(malloc(192), 0x5a, 192);
    s->pack(m, p, &rule, row0, rows - row0 < DSPARK__PANEL ? rows - row0 : DSPARK__PANEL, rows, k,
            &out);
    x.bf16 = aligned_alloc(64, places(k) * DSPARK__PANEL * 2);
    if (p->bits == 16) {
        memset(x.bf16, 0, places(k) * DSPARK__PANEL * 2);
        memcpy(x.bf16, x.codes, n_codes);
    } else {
        dspark__kern kern;
        dspark__kern_ref(&kern);
        kern.decode(x.bf16, x.codes, x.scales, &p->format, 0, k);
    }
    return x;
}

static void free_panel(packed *x)
{
    free(x->codes);
    free(x->scales);
    free(x->groups);
    free(x->rows);
    free(x->bf16);
}

static double weight_at(const packed *x, uint64_t place, uint64_t lane)
{
    double w = dspark__bf16_to_f32(x->bf16[(place / 2 * DSPARK__PANEL + lane) * 2 + place % 2]);
    if (x->p.group) w *= x->groups[place / x->p.group * DSPARK__PANEL + lane];
    if (x->p.row_scale) w *= x->rows[lane];
    return w;
}

/* Folded products that BF16 has no normal number for are zero of their sign where they multiply. */
static double as_multiplied(const dspark__packing *p, double w)
{
    return p->bits < 16 && p->format.scale == DSPARK__CODE_E8M0 && fabs(w) < FLT_MIN
               ? copysign(0, w)
               : w;
}

static void compare_panels(const dspark__scheme *s, const dspark__module *m,
                           const dspark__packing *p, uint64_t rows, uint64_t k)
{
    uint32_t *perm = malloc(k * sizeof *perm);

    assert_non_null(perm);
    for (uint64_t i = 0; i < k; i++) perm[i] = (uint32_t)i;
    if (p->permuted) s->permutation(m, k, p->group, perm);
    for (uint64_t row0 = 0; row0 < rows; row0 += DSPARK__PANEL) {
        packed x = pack_panel(s, m, p, row0, rows, k);
        for (uint64_t lane = 0; lane < DSPARK__PANEL; lane++) {
            int missing = row0 + lane >= rows;
            for (uint64_t i = 0; i < places(k); i++) {
                double w =
                    missing || i >= k ? 0 : as_multiplied(p, want[(row0 + lane) * k + perm[i]]);
                double got = i >= k || missing ? x.bf16[(i / 2 * DSPARK__PANEL + lane) * 2 + i % 2]
                                               : weight_at(&x, i, lane);
                if (!same(got, w))
                    fail_msg("%s %llux%llu: lane %llu of row %llu, place %llu: %a, want %a",
                             s->name, (unsigned long long)rows, (unsigned long long)k,
                             (unsigned long long)lane, (unsigned long long)row0,
                             (unsigned long long)i, got, w);
            }
            if (!missing) continue;
            if (x.rows) assert_true(x.rows[lane] == 1.0f);
            for (uint64_t b = 0; x.scales && b * p->format.block < k; b++)
                assert_int_equal(x.scales[b * DSPARK__PANEL + lane],
                                 p->format.scale == DSPARK__CODE_E4M3   ? 0x38
                                 : p->format.scale == DSPARK__CODE_E8M0 ? 127
                                                                        : 0);
            for (uint64_t g = 0; x.groups && g * p->group < k; g++)
                assert_true(x.groups[g * DSPARK__PANEL + lane] == 1.0f);
        }
        free_panel(&x);
    }
    free(perm);
}

/* The module "m" of t is of the named scheme and holds want. */
dspark__packing examine(const char *name, uint64_t rows, uint64_t k)
{
    dspark__packing p;

    for (size_t n_files = 1; n_files <= 3; n_files += 2) {
        const char *dir = tmpdir_make();
        const dspark__scheme *s;
        dspark__module m;
        dspark_error err;
        double *row = malloc(k * sizeof *row);

        assert_non_null(row);
        tensors_open(&t, dir, n_files);
        tensors_module(&t, "m", &m);
        check(dspark__scheme_detect(&s, &m, &rule, rows, k, &err), DSPARK_OK, &err);
        assert_string_equal(s->name, name);
        check(s->validate(&m, &rule, rows, k, &p, &err), DSPARK_OK, &err);
        for (uint64_t r = 0; r < rows; r++) {
            s->dequantise(&m, &rule, r, rows, k, row);
            for (uint64_t i = 0; i < k; i++)
                if (!same(row[i], want[r * k + i]))
                    fail_msg("%s %llux%llu: weight [%llu, %llu] is %a, want %a", name,
                             (unsigned long long)rows, (unsigned long long)k, (unsigned long long)r,
                             (unsigned long long)i, row[i], want[r * k + i]);
        }
        compare_panels(s, &m, &p, rows, k);
        free(row);
        dspark_checkpoint_close(t.ckpt);
        t.ckpt = NULL;
        tmpdir_remove(dir);
    }
    tensors_clear(&t);
    return p;
}
