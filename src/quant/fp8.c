/* FP8 codes (E4M3, E5M2 and their FNUZ forms) under real scales: one per tensor, one per output,
 * one per group of columns, or one per block of rows and columns. weight = code * scale.
 *
 * A scale of the whole row multiplies the finished sum; one of a group or block multiplies the sum
 * of its columns. Block rows are counted within the module (576 rows of 128 are 5).
 * weight_scale_inv is a multiplier, whatever its name says. */
#include <string.h>
#include <strings.h>

#include "base/numfmt.h"
#include "ckpt/dtype.h"
#include "quant/codes.h"
#include "quant/layout.h"
#include "quant/parts.h"

typedef enum kind { KIND_NONE, KIND_TENSOR, KIND_CHANNEL, KIND_GROUP, KIND_BLOCK } kind;

static const dspark_tensor *scale_of(const dspark__module *m)
{
    const dspark_tensor *t = dspark__module_part(m, "weight_scale");
    if (!t) t = dspark__module_part(m, "weight_scale_inv");
    return t ? t : dspark__module_part(m, "scale");
}

static dspark__quant_strategy strategy_of(const dspark__quant_rule *q)
{
    return dspark__rule_targets(q) ? q->strategy : DSPARK__STRATEGY_UNKNOWN;
}

/* The config's block, or the one that everybody uses: it is checked against the scale's shape. */
static void block_of(const dspark__quant_rule *q, uint64_t *rows, uint64_t *cols)
{
    int said = q && q->method != DSPARK__QUANT_NONE && q->block_rows && q->block_cols;
    *rows = said ? q->block_rows : 128;
    *cols = said ? q->block_cols : 128;
}

static uint64_t blocks(uint64_t n, uint64_t block)
{
    return n / block + (n % block != 0);
}

/* ModelOpt drops the dimensions of a single block's scale: without the config it is a tensor's. */
static int fits_blocks(const dspark_tensor *s, const dspark__quant_rule *q, uint64_t rows,
                       uint64_t k)
{
    uint64_t r, c, br, bc;
    int grid = s->rank >= 2 || (s->n_elements == 1 && strategy_of(q) == DSPARK__STRATEGY_BLOCK);
    block_of(q, &br, &bc);
    return grid && dspark__part_grid(s, &r, &c) && r == blocks(rows, br) && c == blocks(k, bc);
}

/* One block of another size than the config's: check_block says so. Without dimensions it is a tensor's. */
static int is_misfit(const dspark_tensor *s, dspark__quant_strategy strategy)
{
    return strategy == DSPARK__STRATEGY_BLOCK && s->rank >= 2;
}

/* What the shape of the scale says; where it fits two kinds, or none, the config's strategy decides. */
static kind kind_of(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows, uint64_t k)
{
    const dspark_tensor *w = dspark__module_part(m, "weight");
    const dspark_tensor *s = dspark__module_part(m, "weight_scale");
    dspark__quant_strategy strategy = strategy_of(q);
    uint64_t r, c;

    if (!w || !dspark__is_fp8(w->dtype)) return KIND_NONE;
    if (!s) return scale_of(m) ? KIND_BLOCK : KIND_NONE;
    if (s->dtype == DSPARK_U8) return KIND_NONE; /* MXFP8 */
    int fits = fits_blocks(s, q, rows, k);
    if (s->dtype == DSPARK_F8_E8M0) return fits ? KIND_BLOCK : KIND_NONE;
    if (fits && strategy == DSPARK__STRATEGY_BLOCK) return KIND_BLOCK;
    if (!dspark__part_grid(s, &r, &c)) return KIND_NONE;
    if (s->n_elements == 1 && !is_misfit(s, strategy))
        return rows == 1 && strategy == DSPARK__STRATEGY_CHANNEL ? KIND_CHANNEL : KIND_TENSOR;
    if (r == rows && c == 1) return KIND_CHANNEL;
    if (r == rows && c > 1 && s->rank == 2) return KIND_GROUP;
    return fits || strategy == DSPARK__STRATEGY_BLOCK ? KIND_BLOCK : KIND_NONE;
}

static dspark__scale_map map_of(const dspark__module *m, const dspark__quant_rule *q, kind what,
                                uint64_t k)
{
    dspark__scale_map s = {scale_of(m), 1, 1, 0};
    uint64_t r, br, bc;

    dspark__part_grid(s.tensor, &r, &s.cols);
    block_of(q, &br, &bc);
    switch (what) {
    case KIND_TENSOR: s.row_div = UINT64_MAX; break;
    case KIND_GROUP: s.group = (uint32_t)(k / s.cols); break;
    case KIND_BLOCK:
        s.row_div = br;
        s.group = (uint32_t)bc;
        break;
    default: break;
    }
    return s;
}

/* ---- the checks ------------------------------------------------------------------------------ */

static dspark_status check_group(const dspark_tensor *s, uint64_t k, dspark_error *err)
{
    uint64_t r, c;

    dspark__part_grid(s, &r, &c);
    if (k % c != 0)
        return dspark__part_fail(err, DSPARK_EMODEL, s, "%llu groups do not divide %llu columns",
                                 (unsigned long long)c, (unsigned long long)k);
    if (k / c % 8 != 0)
        return dspark__part_fail(err, DSPARK_EUNSUPPORTED, s,
                                 "groups of %llu columns; served: multiples of 8",
                                 (unsigned long long)(k / c));
    return DSPARK_OK;
}

static dspark_status check_block(const dspark_tensor *s, const dspark__quant_rule *q, uint64_t rows,
                                 uint64_t k, dspark_error *err)
{
    uint64_t br, bc;
    char found[80];

    block_of(q, &br, &bc);
    if (bc % 8 != 0 || bc > UINT32_MAX)
        return dspark__part_fail(err, DSPARK_EUNSUPPORTED, s,
                                 "blocks of %llu columns; served: multiples of 8",
                                 (unsigned long long)bc);
    if (fits_blocks(s, q, rows, k)) return DSPARK_OK;
    return dspark__part_fail(
        err, DSPARK_EMODEL, s,
        "shape %s, blocks of %llux%llu need [%llu, %llu] for a weight "
        "[%llu, %llu]",
        dspark__shape_text(s->rank, s->shape, found, sizeof found), (unsigned long long)br,
        (unsigned long long)bc, (unsigned long long)blocks(rows, br),
        (unsigned long long)blocks(k, bc), (unsigned long long)rows, (unsigned long long)k);
}

static dspark_status check_rule(const dspark__module *m, const dspark__quant_rule *q, kind what,
                                uint64_t rows, uint64_t k, uint32_t group, dspark_error *err)
{
    dspark__claim c = {"FP8", 8, 1, 0, 0, {"float-quantized", "naive-quantized"}};

    switch (what) {
    case KIND_TENSOR:
        c.scheme = scale_of(m)->rank >= 2 ? "FP8 per tensor or of one block" : "FP8 per tensor";
        c.strategies = DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_TENSOR);
        if (rows == 1) c.strategies |= DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_CHANNEL);
        break;
    case KIND_CHANNEL:
        c.scheme = "FP8 per channel";
        c.strategies = DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_CHANNEL);
        if (q && q->group_size >= k) c.strategies |= DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_GROUP);
        break;
    case KIND_GROUP:
        c.scheme = "FP8 per group";
        c.strategies = DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_GROUP);
        c.group = group;
        break;
    default:
        c.scheme = "FP8 per block";
        c.strategies = DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_BLOCK);
        break;
    }
    return dspark__rule_agrees(m, q, &c, err);
}

/* Where the config says which numbers the codes are: one byte means another number in each. fmt names the kind
 * only, with or without FNUZ; Quark says which. */
static dspark_status check_codes(const dspark__module *m, const dspark__quant_rule *q, const dspark_tensor *w,
                                 dspark_error *err)
{
    static const size_t code = sizeof "F8_" - 1, said = sizeof "fp8_" - 1;
    const char *name = dspark__dtype_name(w->dtype);

    if (!dspark__rule_targets(q) || !q->format || strncmp(q->format, "fp8_", said) != 0) return DSPARK_OK;
    if (q->method == DSPARK__QUANT_FP8 && strncasecmp(name + code, q->format + said, 4) == 0) return DSPARK_OK;
    if (q->method == DSPARK__QUANT_QUARK && strcasecmp(name + code, q->format + said) == 0) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EMODEL, m->name, "the file has %s codes, the config says %s", name, q->format);
}

static dspark_status validate(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                              uint64_t k, dspark__packing *p, dspark_error *err)
{
    static const char *const own[] = {"weight", "weight_scale", "weight_scale_inv", "scale", NULL};
    const dspark_tensor *w = dspark__module_part(m, "weight"), *s = scale_of(m);
    kind what = kind_of(m, q, rows, k);
    dspark_status st;

    *p = (dspark__packing){.bits = 8};
    if ((st = dspark__parts_only(m, own, "FP8", err)) != DSPARK_OK) return st;
    if ((st = dspark__part_shape(w, rows, k, "the config's", err)) != DSPARK_OK) return st;
    if (what == KIND_GROUP && (st = check_group(s, k, err)) != DSPARK_OK) return st;
    if (what == KIND_BLOCK && (st = check_block(s, q, rows, k, err)) != DSPARK_OK) return st;
    if (s == dspark__module_part(m, "scale") && s->dtype != DSPARK_F8_E8M0)
        return dspark__part_fail(err, DSPARK_EMODEL, s,
                                 "dtype %s, a scale of this name is F8_E8M0 (DeepSeek-V4)",
                                 dspark__dtype_name(s->dtype));
    if ((st = dspark__scales_check(s, what == KIND_TENSOR, what == KIND_BLOCK, err)) != DSPARK_OK)
        return st;
    dspark__scale_map map = map_of(m, q, what, k);
    if ((st = check_rule(m, q, what, rows, k, map.group, err)) != DSPARK_OK) return st;
    if ((st = check_codes(m, q, w, err)) != DSPARK_OK) return st;
    p->format.bits = 8;
    dspark__codes_fp8(p->format.table, w->dtype);
    p->group = map.group;
    p->row_scale = map.group == 0;
    return DSPARK_OK;
}

/* ---- the weight ------------------------------------------------------------------------------ */

static void pack(const dspark__module *m, const dspark__packing *p, const dspark__quant_rule *q,
                 uint64_t row0, uint64_t n, uint64_t rows, uint64_t k, const dspark__panel_out *out)
{
    const uint8_t *w = dspark__module_part(m, "weight")->data;
    dspark__scale_map map = map_of(m, q, kind_of(m, q, rows, k), k);

    (void)p;
    dspark__layout_panel(out, 8, w + row0 * k, k, n, k, 0);
    dspark__scale_map_write(&map, row0, n, k, out);
}

static void dequantise(const dspark__module *m, const dspark__quant_rule *q, uint64_t row,
                       uint64_t rows, uint64_t k, double *out)
{
    const dspark_tensor *t = dspark__module_part(m, "weight");
    const uint8_t *w = (const uint8_t *)t->data + row * k;
    dspark__scale_map map = map_of(m, q, kind_of(m, q, rows, k), k);
    uint16_t table[256];
    double values[256];

    dspark__codes_fp8(table, t->dtype);
    for (unsigned c = 0; c < 256; c++) values[c] = dspark__bf16_to_f32(table[c]);
    for (uint64_t i = 0; i < k;) {
        const uint64_t end = map.group && k - i > map.group ? i + map.group : k;
        const double scale = dspark__f32_exact(dspark__scale_at(map.tensor, dspark__scale_index(&map, row, i)));
        for (; i < end; i++) out[i] = values[w[i]] * scale;
    }
}

static int detect_tensor(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                         uint64_t k)
{
    return kind_of(m, q, rows, k) == KIND_TENSOR;
}

static int detect_channel(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                          uint64_t k)
{
    return kind_of(m, q, rows, k) == KIND_CHANNEL;
}

static int detect_group(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                        uint64_t k)
{
    return kind_of(m, q, rows, k) == KIND_GROUP;
}

static int detect_block(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                        uint64_t k)
{
    return kind_of(m, q, rows, k) == KIND_BLOCK;
}

const dspark__scheme dspark__scheme_fp8_tensor = {
    "fp8_tensor", "FP8, one scale per tensor", detect_tensor, validate, pack, NULL, dequantise};
const dspark__scheme dspark__scheme_fp8_channel = {
    "fp8_channel", "FP8, one scale per output", detect_channel, validate, pack, NULL, dequantise};
const dspark__scheme dspark__scheme_fp8_group = {
    "fp8_group", "FP8, one scale per group of columns", detect_group, validate, pack, NULL,
    dequantise};
const dspark__scheme dspark__scheme_fp8_block = {
    "fp8_block", "FP8, one scale per block of rows and columns", detect_block, validate, pack, NULL,
    dequantise};
