/* Plain F16 and F32 weights. They are served as BF16: each weight is rounded once, to nearest even,
 * when it is packed (what a loader that casts the model to BF16 does), and the rounded number is
 * what dequantise tells. A number beyond BF16's range becomes infinite, as that cast has it. */
#include <string.h>

#include "base/numfmt.h"
#include "quant/parts.h"

static int has_dtype(const dspark__module *m, dspark_dtype dtype)
{
    const dspark_tensor *t = dspark__module_part(m, "weight");
    return t && t->dtype == dtype;
}

static int detect_f16(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                      uint64_t k)
{
    (void)q;
    (void)rows;
    (void)k;
    return has_dtype(m, DSPARK_F16);
}

static int detect_f32(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                      uint64_t k)
{
    (void)q;
    (void)rows;
    (void)k;
    return has_dtype(m, DSPARK_F32);
}

static dspark_status validate(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                              uint64_t k, dspark__packing *p, dspark_error *err)
{
    static const char *const own[] = {"weight", NULL};
    const dspark_tensor *t = dspark__module_part(m, "weight");
    const dspark__claim claim = {t->dtype == DSPARK_F16 ? "F16" : "F32", 16, 1, 0, 0, {NULL, NULL}};
    dspark_status st;

    *p = (dspark__packing){.bits = 16};
    if ((st = dspark__parts_only(m, own, claim.scheme, err)) != DSPARK_OK) return st;
    st = dspark__part_shape(t, rows, k, "the config's", err);
    return st == DSPARK_OK ? dspark__rule_agrees(m, q, &claim, err) : st;
}

/* Subnormals are kept: the rounding is on bits. */
static uint16_t rounded(const dspark_tensor *t, uint64_t i)
{
    return dspark__f32_to_bf16(dspark__scale_at(t, i));
}

static void pack(const dspark__module *m, const dspark__packing *p, const dspark__quant_rule *q,
                 uint64_t row0, uint64_t n, uint64_t rows, uint64_t k, const dspark__panel_out *out)
{
    enum { PASS = 128 }; /* pairs of k: what pack_bf16 takes at a time */
    const dspark_tensor *t = dspark__module_part(m, "weight");
    uint16_t *panel = out->codes;
    (void)p;
    (void)q;
    (void)rows;
    for (uint64_t k0 = 0; k0 < k; k0 += 2 * PASS) {
        uint64_t k1 = k - k0 < 2 * PASS ? (k + 1) / 2 * 2 : k0 + 2 * PASS;
        for (uint64_t j = 0; j < DSPARK__PANEL; j++) {
            for (uint64_t i = k0; i < k1; i++)
                panel[(i / 2 * DSPARK__PANEL + j) * 2 + i % 2] =
                    j < n && i < k ? rounded(t, (row0 + j) * k + i) : 0;
        }
    }
}

static void dequantise(const dspark__module *m, const dspark__quant_rule *q, uint64_t row,
                       uint64_t rows, uint64_t k, double *out)
{
    const dspark_tensor *t = dspark__module_part(m, "weight");
    (void)q;
    (void)rows;
    for (uint64_t i = 0; i < k; i++)
        out[i] = dspark__f32_exact(dspark__bf16_to_f32(rounded(t, row * k + i)));
}

const dspark__scheme dspark__scheme_f16 = {
    "f16", "F16, rounded to BF16 when it is packed", detect_f16, validate, pack, NULL, dequantise};
const dspark__scheme dspark__scheme_f32 = {
    "f32", "F32, rounded to BF16 when it is packed", detect_f32, validate, pack, NULL, dequantise};
