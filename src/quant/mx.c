/* The MX formats: blocks of 32 columns under a power of two (E8M0). weight = code * 2^(byte - 127);
 * the power is folded into the BF16 weight, exactly. A product beyond BF16's range is infinite, and
 * one that is subnormal counts as zero where it is multiplied (kern.h). Nothing else scales an MX
 * weight. */
#include <math.h>
#include <float.h>

#include "base/numfmt.h"
#include "ckpt/dtype.h"
#include "quant/codes.h"
#include "quant/layout.h"
#include "quant/parts.h"

enum { BLOCK = 32 };

static const dspark_tensor *power_scale(const dspark__module *m)
{
    const dspark_tensor *s = dspark__module_part(m, "weight_scale");
    return s && (s->dtype == DSPARK_U8 || s->dtype == DSPARK_F8_E8M0) ? s : NULL;
}

/* The packed codes of compressed-tensors (weight_packed) or of Quark (weight). */
static const dspark_tensor *fp4_of(const dspark__module *m)
{
    const dspark_tensor *w = dspark__module_part(m, "weight_packed");
    if (w) return w->dtype == DSPARK_U8 ? w : NULL;
    w = dspark__module_part(m, "weight");
    return w && (w->dtype == DSPARK_U8 || w->dtype == DSPARK_F4) ? w : NULL;
}

static int detect_mxfp8(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                        uint64_t k)
{
    const dspark_tensor *w = dspark__module_part(m, "weight");
    (void)q;
    (void)rows;
    (void)k;
    return w && dspark__is_fp8(w->dtype) && power_scale(m) != NULL;
}

static int detect_mxfp4(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                        uint64_t k)
{
    (void)q;
    (void)rows;
    (void)k;
    return fp4_of(m) && power_scale(m) && !dspark__module_part(m, "weight_scale_2") &&
           !dspark__module_part(m, "weight_global_scale");
}

static dspark_status check_scale(const dspark_tensor *s, uint64_t rows, uint64_t k,
                                 dspark_error *err)
{
    const uint8_t *bytes = s->data;
    uint64_t r, c;
    char found[80];

    if (s->rank == 1)
        return dspark__part_fail(err, DSPARK_EUNSUPPORTED, s,
                                 "shape %s: block scales in one dimension are a runtime's swizzled "
                                 "layout, not a checkpoint's",
                                 dspark__shape_text(s->rank, s->shape, found, sizeof found));
    if (k % BLOCK != 0)
        return dspark__part_fail(err, DSPARK_EUNSUPPORTED, s,
                                 "%llu columns are no whole number of blocks of %d",
                                 (unsigned long long)k, BLOCK);
    if (!dspark__part_grid(s, &r, &c) || s->rank > 3 || r != rows || c != k / BLOCK)
        return dspark__part_fail(err, DSPARK_EMODEL, s,
                                 "shape %s, expected [%llu, %llu] (rows, "
                                 "columns / %d)",
                                 dspark__shape_text(s->rank, s->shape, found, sizeof found),
                                 (unsigned long long)rows, (unsigned long long)(k / BLOCK), BLOCK);
    const uint64_t i = dspark__scale_bytes_below(bytes, s->n_elements, 255);
    if (i == s->n_elements) return DSPARK_OK;
    return dspark__part_fail(err, DSPARK_EMODEL, s, "scale %llu is 255, which is NaN", (unsigned long long)i);
}

static dspark_status validate_mxfp8(const dspark__module *m, const dspark__quant_rule *q,
                                    uint64_t rows, uint64_t k, dspark__packing *p,
                                    dspark_error *err)
{
    static const char *const own[] = {"weight", "weight_scale", NULL};
    static const dspark__claim claim = {"MXFP8", 8,
                                        1,       DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_GROUP),
                                        BLOCK,   {"mxfp8-quantized", NULL}};
    const dspark_tensor *w = dspark__module_part(m, "weight");
    dspark_status st;

    *p = (dspark__packing){.bits = 8};
    if ((st = dspark__parts_only(m, own, "MXFP8", err)) != DSPARK_OK) return st;
    if ((st = dspark__part_shape(w, rows, k, "the config's", err)) != DSPARK_OK) return st;
    if ((st = check_scale(power_scale(m), rows, k, err)) != DSPARK_OK) return st;
    if ((st = dspark__rule_agrees(m, q, &claim, err)) != DSPARK_OK) return st;
    p->format.bits = 8;
    p->format.scale = DSPARK__CODE_E8M0;
    p->format.block = BLOCK;
    dspark__codes_fp8(p->format.table, w->dtype);
    return DSPARK_OK;
}

static dspark_status validate_mxfp4(const dspark__module *m, const dspark__quant_rule *q,
                                    uint64_t rows, uint64_t k, dspark__packing *p,
                                    dspark_error *err)
{
    static const char *const own[] = {"weight", "weight_packed", "weight_scale", NULL};
    static const dspark__claim claim = {"MXFP4", 4,
                                        1,       DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_GROUP),
                                        BLOCK,   {"mxfp4-pack-quantized", NULL}};
    const dspark_tensor *w = fp4_of(m);
    int logical = w->dtype == DSPARK_F4;
    dspark_status st;

    *p = (dspark__packing){.bits = 4};
    if ((st = dspark__parts_only(m, own, "MXFP4", err)) != DSPARK_OK) return st;
    if ((st = check_scale(power_scale(m), rows, k, err)) != DSPARK_OK) return st;
    st = dspark__part_shape(w, rows, logical ? k : k / 2,
                            logical ? "the config's" : "rows, columns / 2", err);
    if (st != DSPARK_OK || (st = dspark__rule_agrees(m, q, &claim, err)) != DSPARK_OK) return st;
    p->format.bits = 4;
    p->format.scale = DSPARK__CODE_E8M0;
    p->format.block = BLOCK;
    dspark__codes_e2m1(p->format.table);
    return DSPARK_OK;
}

static void pack_mxfp8(const dspark__module *m, const dspark__packing *p,
                       const dspark__quant_rule *q, uint64_t row0, uint64_t n, uint64_t rows,
                       uint64_t k, const dspark__panel_out *out)
{
    const uint8_t *w = dspark__module_part(m, "weight")->data;
    (void)p;
    (void)q;
    (void)rows;
    dspark__layout_panel(out, 8, w + row0 * k, k, n, k, 0);
    dspark__scale_bytes_write(power_scale(m)->data, k / BLOCK, row0, n, 127, out->scales);
}

static void pack_mxfp4(const dspark__module *m, const dspark__packing *p,
                       const dspark__quant_rule *q, uint64_t row0, uint64_t n, uint64_t rows,
                       uint64_t k, const dspark__panel_out *out)
{
    const uint8_t *w = fp4_of(m)->data;
    (void)p;
    (void)q;
    (void)rows;
    dspark__layout_panel(out, 4, w + row0 * (k / 2), k / 2, n, k, 0);
    dspark__scale_bytes_write(power_scale(m)->data, k / BLOCK, row0, n, 127, out->scales);
}

/* Exactly, from bits: the power may be 2^-127. */
static double product(uint16_t code, double power)
{
    double w = (double)dspark__bf16_to_f32(code) * power;
    return isfinite(w) && fabs(w) > FLT_MAX ? copysign(INFINITY, w) : w;
}

static void dequantise_mxfp8(const dspark__module *m, const dspark__quant_rule *q, uint64_t row,
                             uint64_t rows, uint64_t k, double *out)
{
    const dspark_tensor *t = dspark__module_part(m, "weight");
    const uint8_t *w = (const uint8_t *)t->data + row * k;
    const uint8_t *s = (const uint8_t *)power_scale(m)->data + row * (k / BLOCK);
    uint16_t table[256];
    (void)q;
    (void)rows;
    dspark__codes_fp8(table, t->dtype);
    for (uint64_t b = 0; b < k; b += BLOCK) { /* k is a multiple of it */
        const double power = ldexp(1.0, (int)s[b / BLOCK] - 127);
        for (uint64_t i = b; i < b + BLOCK; i++) out[i] = product(table[w[i]], power);
    }
}

static void dequantise_mxfp4(const dspark__module *m, const dspark__quant_rule *q, uint64_t row,
                             uint64_t rows, uint64_t k, double *out)
{
    const uint8_t *w = (const uint8_t *)fp4_of(m)->data + row * (k / 2);
    const uint8_t *s = (const uint8_t *)power_scale(m)->data + row * (k / BLOCK);
    uint16_t table[256];
    (void)q;
    (void)rows;
    dspark__codes_e2m1(table);
    for (uint64_t b = 0; b < k; b += BLOCK) {
        const double power = ldexp(1.0, (int)s[b / BLOCK] - 127);
        for (uint64_t i = b; i < b + BLOCK; i++) out[i] = product(table[w[i / 2] >> 4 * (i % 2) & 15], power);
    }
}

const dspark__scheme dspark__scheme_mxfp8 = {
    "mxfp8",         "MXFP8: FP8, a power of two per 32 columns",
    detect_mxfp8,    validate_mxfp8,
    pack_mxfp8,      NULL,
    dequantise_mxfp8};
const dspark__scheme dspark__scheme_mxfp4 = {
    "mxfp4",         "MXFP4: E2M1, a power of two per 32 columns",
    detect_mxfp4,    validate_mxfp4,
    pack_mxfp4,      NULL,
    dequantise_mxfp4};
