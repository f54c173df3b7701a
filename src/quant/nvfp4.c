/* NVFP4: E2M1 codes, an E4M3 scale per 16 columns, one fp32 scale per tensor. The block scale is
 * folded into the BF16 weight, exactly; the tensor's multiplies the finished sum. Two spellings:
 * compressed-tensors stores a divisor (weight_packed, weight_global_scale), and its reciprocal,
 * rounded to fp32, is what counts here; ModelOpt and Quark store a multiplier (weight,
 * weight_scale_2). */
#include "base/fpenv.h"
#include "base/numfmt.h"
#include "ckpt/dtype.h"
#include "quant/codes.h"
#include "quant/layout.h"
#include "quant/parts.h"

enum { BLOCK = 16 };

static int has_byte_scale(const dspark__module *m)
{
    const dspark_tensor *s = dspark__module_part(m, "weight_scale");
    return s && s->dtype == DSPARK_F8_E4M3;
}

static int detect_ct(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                     uint64_t k)
{
    const dspark_tensor *w = dspark__module_part(m, "weight_packed");
    (void)q;
    (void)rows;
    (void)k;
    return w && w->dtype == DSPARK_U8 && has_byte_scale(m) &&
           dspark__module_part(m, "weight_global_scale");
}

static int detect_modelopt(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                           uint64_t k)
{
    const dspark_tensor *w = dspark__module_part(m, "weight");
    (void)q;
    (void)rows;
    (void)k;
    return w && (w->dtype == DSPARK_U8 || w->dtype == DSPARK_F4) && has_byte_scale(m) &&
           dspark__module_part(m, "weight_scale_2");
}

static const dspark_tensor *codes_of(const dspark__module *m)
{
    const dspark_tensor *w = dspark__module_part(m, "weight_packed");
    return w ? w : dspark__module_part(m, "weight");
}

/* The number that multiplies. Subnormals are kept whatever the thread has set: volatile holds the
 * division between the two changes of the environment. */
static float multiplier(const dspark__module *m)
{
    const dspark_tensor *divisor = dspark__module_part(m, "weight_global_scale");
    if (!divisor) return dspark__scale_at(dspark__module_part(m, "weight_scale_2"), 0);
    volatile float g = dspark__scale_at(divisor, 0);
    unsigned old = dspark__fpenv_enter();
    volatile float r = 1.0f / g;
    dspark__fpenv_leave(old);
    return r;
}

static dspark_status check_scale(const dspark_tensor *s, uint64_t rows, uint64_t k,
                                 dspark_error *err)
{
    const uint8_t *bytes = s->data;
    uint64_t r, c;
    char found[80];

    dspark__shape_text(s->rank, s->shape, found, sizeof found);
    if (s->rank == 1)
        return dspark__part_fail(err, DSPARK_EUNSUPPORTED, s,
                                 "shape %s: block scales in one dimension are a runtime's swizzled "
                                 "layout, not a checkpoint's",
                                 found);
    if (k % BLOCK != 0)
        return dspark__part_fail(err, DSPARK_EUNSUPPORTED, s,
                                 "%llu columns are no whole number of blocks of %d",
                                 (unsigned long long)k, BLOCK);
    if (!dspark__part_grid(s, &r, &c) || s->rank > 3 || r != rows || c != k / BLOCK) {
        uint64_t tall = (rows + 127) / 128 * 128, wide = (k / BLOCK + 3) / 4 * 4;
        return dspark__part_fail(
            err, DSPARK_EMODEL, s, "shape %s, expected [%llu, %llu] (rows, columns / %d)%s", found,
            (unsigned long long)rows, (unsigned long long)(k / BLOCK), BLOCK,
            s->n_elements == tall * wide ? "; padded to 128 x 4 it is a runtime's swizzled layout"
                                         : "");
    }
    const uint64_t i = dspark__scale_bytes_below(bytes, s->n_elements, 0x7f);
    if (i == s->n_elements) return DSPARK_OK;
    return dspark__part_fail(err, DSPARK_EMODEL, s, "scale %llu is byte 0x%02x, which is %s",
                             (unsigned long long)i, bytes[i],
                             (bytes[i] & 0x7f) == 0x7f ? "NaN" : "negative");
}

static dspark_status validate(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                              uint64_t k, dspark__packing *p, dspark_error *err)
{
    static const char *const ct[] = {"weight_packed", "weight_scale", "weight_global_scale", NULL};
    static const char *const modelopt[] = {"weight", "weight_scale", "weight_scale_2", NULL};
    static const dspark__claim claim = {"NVFP4",
                                        4,
                                        1,
                                        DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_TENSOR_GROUP) |
                                            DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_GROUP),
                                        BLOCK,
                                        {"nvfp4-pack-quantized", NULL}};
    const dspark_tensor *w = codes_of(m), *global = dspark__module_part(m, "weight_global_scale");
    int divides = global != NULL, logical = w->dtype == DSPARK_F4;
    dspark_status st;

    *p = (dspark__packing){.bits = 4};
    if (!divides) global = dspark__module_part(m, "weight_scale_2");
    if ((st = dspark__parts_only(m, divides ? ct : modelopt, "NVFP4", err)) != DSPARK_OK) return st;
    st = check_scale(dspark__module_part(m, "weight_scale"), rows, k, err);
    if (st != DSPARK_OK) return st;
    st = dspark__part_shape(w, rows, logical ? k : k / 2,
                            logical ? "the config's" : "rows, columns / 2", err);
    if (st != DSPARK_OK || (st = dspark__scale_single(global, err)) != DSPARK_OK) return st;
    uint32_t bits = dspark__f32_bits(multiplier(m));
    if (bits == 0 || bits >= 0x7f800000u)
        return dspark__part_fail(err, DSPARK_EMODEL, global,
                                 "%g divides, and one over it is no finite fp32 number",
                                 (double)dspark__scale_at(global, 0));
    if ((st = dspark__rule_agrees(m, q, &claim, err)) != DSPARK_OK) return st;
    p->format.bits = 4;
    p->format.scale = DSPARK__CODE_E4M3;
    p->format.block = BLOCK;
    dspark__codes_e2m1(p->format.table);
    p->row_scale = 1;
    return DSPARK_OK;
}

static void pack(const dspark__module *m, const dspark__packing *p, const dspark__quant_rule *q,
                 uint64_t row0, uint64_t n, uint64_t rows, uint64_t k, const dspark__panel_out *out)
{
    const uint8_t *w = codes_of(m)->data;
    float global = multiplier(m);

    (void)p;
    (void)q;
    (void)rows;
    dspark__layout_turned(out, w + row0 * (k / 2), k / 2, n, k);
    dspark__scale_bytes_write(dspark__module_part(m, "weight_scale")->data, k / BLOCK, row0, n,
                              0x38, out->scales);
    for (uint64_t j = 0; j < DSPARK__PANEL; j++) out->row_scales[j] = j < n ? global : 1.0f;
}

static void dequantise(const dspark__module *m, const dspark__quant_rule *q, uint64_t row,
                       uint64_t rows, uint64_t k, double *out)
{
    const uint8_t *w = (const uint8_t *)codes_of(m)->data + row * (k / 2);
    const uint8_t *s = dspark__module_part(m, "weight_scale")->data;
    double global = dspark__f32_exact(multiplier(m));
    uint16_t table[256];
    double values[16];

    (void)q;
    (void)rows;
    s += row * (k / BLOCK);
    dspark__codes_e2m1(table);
    for (unsigned c = 0; c < 16; c++) values[c] = dspark__bf16_to_f32(table[c]);
    for (uint64_t i = 0; i < k; s++) { /* k is a multiple of BLOCK */
        const double scale = dspark__e4m3_to_f32(*s);
        for (const uint64_t end = i + BLOCK; i < end; i += 2) {
            out[i] = values[w[i / 2] & 15] * scale * global;
            out[i + 1] = values[w[i / 2] >> 4] * scale * global;
        }
    }
}

const dspark__scheme dspark__scheme_nvfp4_ct = {
    "nvfp4_ct", "NVFP4 of compressed-tensors: E2M1, E4M3 per 16 columns, a divisor per tensor",
    detect_ct,  validate,
    pack,       NULL,
    dequantise};
const dspark__scheme dspark__scheme_nvfp4_modelopt = {
    "nvfp4_modelopt",
    "NVFP4 of ModelOpt: E2M1, E4M3 per 16 columns, a multiplier per tensor",
    detect_modelopt,
    validate,
    pack,
    NULL,
    dequantise};
