/* Made-up weights of a Markov head. */
#include "support/w2.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/alloc.h"
#include "base/numfmt.h"
#include "quant/parts.h"
#include "support/fixture.h"

const char *const w2_names[W2_FORMS] = {"normal", "integers", "equal rows", "outliers", "one column", "huge",
                                        "tiny", "mixed", "codes", "groups", "blocks"};

double w2_bell(uint64_t *seed)
{
    double sum = 0;
    for (int i = 0; i < 12; i++) sum += (double)(next_random(seed) >> 11) * 0x1p-53;
    return sum - 6;
}

static uint16_t rounded(double x)
{
    return dspark__f64_to_bf16(x);
}

static double element(w2_form form, uint32_t column, double row_size, uint64_t *seed)
{
    double x = w2_bell(seed);
    switch (form) {
    case W2_INTEGERS: return (double)(next_random(seed) % 3) - 1;
    case W2_OUTLIERS: return next_random(seed) % 50 ? x : 16 * x;
    case W2_ONE_COLUMN: return column == 0 ? x : 0;
    case W2_HUGE: return x * 0x1p45;
    case W2_TINY: return x * 0x1p-124;
    default: return x * row_size;
    }
}

static void make_dense(dspark__merged_linear *ml, w2_form form, uint32_t rows, uint32_t k, uint64_t *seed)
{
    uint16_t *w = malloc((size_t)rows * k * sizeof *w);
    dspark_error err;
    assert_non_null(w);
    for (uint32_t r = 0; r < rows; r++) {
        double size = 1;
        if (form == W2_MIXED && next_random(seed) % 8 == 0) size = 0;
        else if (form == W2_MIXED) size = ldexp(1, (int)(next_random(seed) % 60) - 45);
        for (uint32_t i = 0; i < k; i++) w[(size_t)r * k + i] = rounded(element(form, i, size, seed));
        if (form == W2_EQUAL_ROWS) memcpy(w + (size_t)r * k, w, (size_t)k * 2);
    }
    check(dspark__merged_linear_fill_dense(ml, 0, w, &err), DSPARK_OK, &err);
    free(w);
}

/* E4M3-like values on 8 bits: sign, exponent of 4 bits, three bits; no NaN. */
static void fill_table(uint16_t table[256])
{
    for (unsigned c = 0; c < 256; c++)
        table[c] = dspark__f32_to_bf16((c & 0x7f) == 0x7f ? 0 : dspark__e4m3_to_f32((uint8_t)c));
}

static void make_codes(dspark__merged_linear *ml, w2_form form, uint32_t rows, uint32_t k, uint64_t *seed)
{
    dspark__shard *s = &ml->shards[0];
    const size_t panels = s->n_panels, groups = form == W2_GROUPS ? (k + 7) / 8 : 0;
    s->packing = (dspark__packing){.bits = 8, .format = {.bits = 8}, .row_scale = form != W2_BLOCKS};
    fill_table(s->packing.format.table);
    if (form == W2_GROUPS) s->packing.group = 8;
    if (form == W2_BLOCKS) {
        s->packing.format.scale = DSPARK__CODE_E8M0;
        s->packing.format.block = 8;
    }
    s->code_stride = dspark__code_panel_bytes(&s->packing.format, k);
    s->scale_stride = dspark__code_scale_bytes(&s->packing.format, k);
    s->n_groups = (uint32_t)groups;
    const size_t codes = panels * s->code_stride, scales = (panels * s->scale_stride + 63) / 64 * 64;
    const size_t group = panels * groups * DSPARK__PANEL, row = panels * DSPARK__PANEL;
    s->bytes = codes + scales + (group + row) * sizeof(float);
    s->memory = dspark__alloc(&ml->allocator, s->bytes, 64);
    assert_non_null(s->memory);
    s->codes = s->memory;
    if (s->scale_stride) s->scales = s->codes + codes;
    float *floats = (float *)(void *)(s->codes + codes + scales);
    if (groups) s->group_scales = floats;
    if (s->packing.row_scale) s->row_scales = floats + group;
    memset(s->codes, 0, codes);
    for (size_t p = 0; p < panels; p++)
        for (uint32_t i = 0; i < k; i++)
            for (size_t lane = 0; lane < DSPARK__PANEL && p * DSPARK__PANEL + lane < rows; lane++) {
                uint8_t code = (uint8_t)next_random(seed);
                s->codes[p * s->code_stride + ((size_t)(i / 2) * DSPARK__PANEL + lane) * 2 + i % 2] =
                    (code & 0x7f) == 0x7f ? 0 : code;
            }
    for (size_t i = 0; s->scales && i < panels * s->scale_stride; i++)
        s->scales[i] = (uint8_t)(120 + next_random(seed) % 10);
    for (size_t i = 0; i < group; i++) floats[i] = ldexpf((float)(1 + next_random(seed) % 15), -4);
    for (size_t i = 0; i < row; i++)
        floats[group + i] = (float)ldexp(1 + (double)(next_random(seed) >> 40) * 0x1p-24, -9);
    s->scheme = &dspark__scheme_bf16; /* filled; who multiplies looks at the packing only */
    ml->bytes = s->bytes;
    ml->n_filled = 1;
}

void w2_make(dspark__merged_linear *ml, w2_form form, uint32_t rows, uint32_t k, uint64_t *seed)
{
    dspark_error err;
    check(dspark__merged_linear_init_even(ml, w2_names[form], k, 1, rows, NULL, &err), DSPARK_OK, &err);
    if (form < W2_CODES) make_dense(ml, form, rows, k, seed);
    else make_codes(ml, form, rows, k, seed);
}

void w2_vector(uint16_t *x, int kind, uint32_t k, uint64_t *seed)
{
    const uint32_t one = (uint32_t)(next_random(seed) % k);
    for (uint32_t i = 0; i < k; i++) {
        double v = w2_bell(seed);
        if (kind == 1) v = (double)(next_random(seed) % 5) - 2;
        if (kind == 2) v = i == one ? v : 0;
        if (kind == 3) v *= 0x1p60;
        if (kind == 4) v *= ldexp(1, -124 + (int)(next_random(seed) % 40));
        if (kind == 5) v = next_random(seed) % 2 ? 0.0 : -0.0;
        x[i] = rounded(v);
    }
}
