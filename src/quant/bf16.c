/* The scheme without quantisation: one row-major BF16 tensor "weight", packed as it is. */
#include "base/numfmt.h"
#include "quant/parts.h"

static int detect(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows, uint64_t k)
{
    const dspark_tensor *t = dspark__module_part(m, "weight");
    (void)q;
    (void)rows;
    (void)k;
    return t && t->dtype == DSPARK_BF16;
}

static dspark_status validate(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                              uint64_t k, dspark__packing *p, dspark_error *err)
{
    static const char *const own[] = {"weight", NULL};
    const dspark__claim claim = {"BF16", 16, 1, 0, 0, {NULL, NULL}};
    dspark_status st;

    *p = (dspark__packing){.bits = 16};
    if ((st = dspark__parts_only(m, own, "BF16", err)) != DSPARK_OK) return st;
    st = dspark__part_shape(dspark__module_part(m, "weight"), rows, k, "the config's", err);
    return st == DSPARK_OK ? dspark__rule_agrees(m, q, &claim, err) : st;
}

static void pack(const dspark__module *m, const dspark__packing *p, const dspark__quant_rule *q,
                 uint64_t row0, uint64_t n, uint64_t rows, uint64_t k, const dspark__panel_out *out)
{
    const unsigned char *w = dspark__module_part(m, "weight")->data;
    (void)p;
    (void)q;
    (void)rows;
    dspark__pack_bf16(out->codes, w + row0 * k * 2, n, k);
}

static void dequantise(const dspark__module *m, const dspark__quant_rule *q, uint64_t row,
                       uint64_t rows, uint64_t k, double *out)
{
    const unsigned char *w = dspark__module_part(m, "weight")->data;
    (void)q;
    (void)rows;
    w += row * k * 2;
    for (uint64_t i = 0; i < k; i++)
        out[i] = dspark__f32_exact(dspark__bf16_to_f32(dspark__load_u16(w + 2 * i)));
}

const dspark__scheme dspark__scheme_bf16 = {"bf16", "BF16", detect,    validate,
                                            pack,   NULL,   dequantise};
