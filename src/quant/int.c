/* Integer codes of compressed-tensors: INT8 (a byte each) and packed words of 2 to 8 bits, with
 * scales per tensor, output or group, with or without zero points, with columns in order or by
 * g_idx. weight = (code - zero point) * scale; the difference is an integer that BF16 holds.
 *
 * In memory 4 bits stay 4, everything else becomes a byte; both are two's complement, so that code
 * 0 is worth 0. Packed words come in two generations: one string of bits (dense), or as many whole
 * codes as a word holds; they differ for 3, 5, 6 and 7 bits only. */
#include <stdio.h>
#include <string.h>

#include "base/numfmt.h"
#include "ckpt/dtype.h"
#include "quant/codes.h"
#include "quant/layout.h"
#include "quant/parts.h"

enum {
    PASS = 256,  /* codes unpacked at a time */
    BATCH = 1024 /* groups counted at a time: there is no memory for all of them */
};

/* A module as it is read. Only true of what validate has let through. */
typedef struct form {
    const dspark_tensor *weight, *zero_point;
    const dspark_tensor *g_idx; /* NULL: columns are in order */
    uint32_t bits;              /* as stored */
    int packed;
    int dense;
    uint64_t words; /* packed: of a row */
    dspark__scale_map map;
} form;

static uint32_t load_word(const dspark_tensor *t, uint64_t i)
{
    uint32_t w;
    memcpy(&w, (const unsigned char *)t->data + 4 * i, sizeof w);
    return w;
}

static uint64_t dense_words(uint64_t n, uint32_t bits)
{
    return (n * bits + 31) / 32;
}

static uint64_t whole_words(uint64_t n, uint32_t bits)
{
    uint32_t per_word = 32 / bits;
    return (n + per_word - 1) / per_word;
}

/* Code i of a string of words that are `step` apart, as a signed number. */
static int unpack(const dspark_tensor *t, uint64_t first, uint64_t step, uint64_t i, uint32_t bits,
                  int dense)
{
    uint64_t word = dense ? i * bits / 32 : i / (32 / bits);
    uint32_t at = dense ? (uint32_t)(i * bits % 32) : (uint32_t)(i % (32 / bits)) * bits;
    uint32_t u = load_word(t, first + word * step) >> at;

    if (at + bits > 32) u |= load_word(t, first + (word + 1) * step) << (32 - at);
    return (int)(u & ((1u << bits) - 1)) - (1 << (bits - 1));
}

static int code_at(const form *f, uint64_t row, uint64_t k, uint64_t i)
{
    if (f->packed) return unpack(f->weight, row * f->words, 1, i, f->bits, f->dense);
    return ((const int8_t *)f->weight->data)[row * k + i];
}

/* Rows of the zero points' grid: those of the scales'. */
static uint64_t grid_rows(const form *f, uint64_t rows)
{
    return f->map.row_div == UINT64_MAX ? 1 : rows;
}

static int zero_point_at(const form *f, uint64_t row, uint64_t group)
{
    const dspark_tensor *t = f->zero_point;

    if (!t) return 0;
    row /= f->map.row_div;
    if (f->packed) return unpack(t, group, f->map.cols, row, f->bits, f->dense);
    return ((const int8_t *)t->data)[row * f->map.cols + group];
}

static uint64_t group_of(const form *f, uint64_t column)
{
    if (f->map.group == 0) return 0;
    return f->g_idx ? load_word(f->g_idx, column) : column / f->map.group;
}

/* Cannot fail: a shape that is none of the accepted ones gives a form that validate refuses. */
static void read_form(form *f, const dspark__module *m, const dspark__quant_rule *q, uint64_t k)
{
    uint64_t r, c;

    memset(f, 0, sizeof *f);
    f->weight = dspark__module_part(m, "weight_packed");
    f->packed = f->weight != NULL;
    f->bits = f->packed ? q ? q->num_bits : 0 : 8;
    if (!f->packed) f->weight = dspark__module_part(m, "weight");
    f->zero_point = dspark__module_part(m, "weight_zero_point");
    f->g_idx = dspark__module_part(m, "weight_g_idx");
    /* -1 fills a g_idx that nobody used */
    if (f->g_idx && f->g_idx->n_bytes >= 4 && load_word(f->g_idx, 0) == UINT32_MAX) f->g_idx = NULL;
    f->map.tensor = dspark__module_part(m, "weight_scale");
    dspark__part_grid(f->map.tensor, &r, &c);
    f->map.cols = c;
    f->map.row_div = f->map.tensor->n_elements == 1 ? UINT64_MAX : 1;
    if (c > 1) f->map.group = (uint32_t)(k / c);
    if (!f->packed || f->bits < 2 || f->bits > 8) return;
    uint64_t dense = dense_words(k, f->bits), whole = whole_words(k, f->bits);
    f->words = f->weight->rank == 2 ? f->weight->shape[1] : 0;
    f->dense = dense == whole && q->dense_bits ? q->dense_bits > 0 : f->words == dense;
}

/* ---- the checks ------------------------------------------------------------------------------ */

static dspark_status check_scales(const form *f, uint64_t rows, uint64_t k, dspark_error *err)
{
    const dspark_tensor *s = f->map.tensor;
    uint64_t r, c;
    char found[80];
    int fits = dspark__part_grid(s, &r, &c) && s->rank <= 2;

    if (!fits || (s->n_elements != 1 && (r != rows || c == 0)))
        return dspark__part_fail(err, DSPARK_EMODEL, s,
                                 "shape %s, expected [], [1], [%llu], [%llu, 1] or [%llu, groups]",
                                 dspark__shape_text(s->rank, s->shape, found, sizeof found),
                                 (unsigned long long)rows, (unsigned long long)rows,
                                 (unsigned long long)rows);
    if (k % c != 0)
        return dspark__part_fail(err, DSPARK_EMODEL, s, "%llu groups do not divide %llu columns",
                                 (unsigned long long)c, (unsigned long long)k);
    if (c > 1 && k / c % 8 != 0)
        return dspark__part_fail(err, DSPARK_EUNSUPPORTED, s,
                                 "groups of %llu columns; served: multiples of 8",
                                 (unsigned long long)(k / c));
    return dspark__scales_check(s, s->n_elements == 1, 0, err);
}

static dspark_status check_words(const form *f, const dspark__quant_rule *q, uint64_t rows,
                                 uint64_t k, dspark_error *err)
{
    const dspark_tensor *t = f->weight;
    uint64_t dense = dense_words(k, f->bits), whole = whole_words(k, f->bits);
    char found[80];

    if (t->rank != 2 || t->shape[0] != rows || (t->shape[1] != dense && t->shape[1] != whole))
        return dspark__part_fail(
            err, DSPARK_EMODEL, t, "shape %s, %llu codes of %u bits need [%llu, %llu]%s",
            dspark__shape_text(t->rank, t->shape, found, sizeof found), (unsigned long long)k,
            f->bits, (unsigned long long)rows, (unsigned long long)dense,
            dense == whole ? "" : " (or the older layout's whole codes)");
    if (dense == whole && 32 % f->bits != 0 && q->dense_bits == 0)
        return dspark__part_fail(err, DSPARK_EUNSUPPORTED, t,
                                 "%u-bit codes in two possible layouts: at this width only the "
                                 "config's version tells them apart, and it is missing",
                                 f->bits);
    return DSPARK_OK;
}

static dspark_status check_weight_shape(const dspark_tensor *t, uint64_t rows, uint64_t k,
                                        dspark_error *err)
{
    int64_t said[2];

    if (!t) return DSPARK_OK;
    if ((t->dtype != DSPARK_I64 && t->dtype != DSPARK_I32) || t->n_elements != 2)
        return dspark__part_fail(err, DSPARK_EMODEL, t, "%s with %llu elements, expected I64 [2]",
                                 dspark__dtype_name(t->dtype), (unsigned long long)t->n_elements);
    for (int i = 0; i < 2; i++) {
        if (t->dtype == DSPARK_I64)
            memcpy(&said[i], (const char *)t->data + 8 * i, 8);
        else
            said[i] = (int32_t)load_word(t, (uint64_t)i);
    }
    if (said[0] == (int64_t)rows && said[1] == (int64_t)k) return DSPARK_OK;
    return dspark__part_fail(
        err, DSPARK_EMODEL, t, "it says [%lld, %lld], the config needs [%llu, %llu]",
        (long long)said[0], (long long)said[1], (unsigned long long)rows, (unsigned long long)k);
}

static dspark_status check_zero_point(const form *f, uint64_t rows, dspark_error *err)
{
    const dspark_tensor *t = f->zero_point;
    uint64_t n = grid_rows(f, rows), r, c;
    dspark_dtype dtype = f->packed ? DSPARK_I32 : DSPARK_I8;
    char found[80];

    if (!t) return DSPARK_OK;
    if (f->packed) n = f->dense ? dense_words(n, f->bits) : whole_words(n, f->bits);
    if (t->dtype != dtype)
        return dspark__part_fail(err, DSPARK_EMODEL, t, "dtype %s, expected %s",
                                 dspark__dtype_name(t->dtype), dspark__dtype_name(dtype));
    if (dspark__part_grid(t, &r, &c) && t->rank <= 2 && r == n && c == f->map.cols)
        return DSPARK_OK;
    return dspark__part_fail(err, DSPARK_EMODEL, t, "shape %s, expected [%llu, %llu]%s",
                             dspark__shape_text(t->rank, t->shape, found, sizeof found),
                             (unsigned long long)n, (unsigned long long)f->map.cols,
                             f->packed ? " (packed along the rows)" : " (that of weight_scale)");
}

/* Every entry is a group, every group has as many columns as the others. *ordered: none is out of
 * place. */
static dspark_status check_g_idx(const dspark__module *m, const form *f, uint64_t k, int *ordered,
                                 dspark_error *err)
{
    const dspark_tensor *t = dspark__module_part(m, "weight_g_idx");
    uint64_t n_groups = f->map.cols, size = k / n_groups;
    char found[80];

    *ordered = 1;
    if (!t) return DSPARK_OK;
    if (t->dtype != DSPARK_I32 || t->rank != 1 || t->shape[0] != k)
        return dspark__part_fail(
            err, DSPARK_EMODEL, t, "%s %s, expected I32 [%llu]", dspark__dtype_name(t->dtype),
            dspark__shape_text(t->rank, t->shape, found, sizeof found), (unsigned long long)k);
    char groups[80] = "-1 as in column 0";
    if (f->g_idx)
        snprintf(groups, sizeof groups, "one of %llu groups, or -1 in every column",
                 (unsigned long long)n_groups);
    for (uint64_t i = 0; i < k; i++) {
        uint32_t g = load_word(t, i);
        if (f->g_idx ? g >= n_groups : g != UINT32_MAX)
            return dspark__part_fail(err, DSPARK_EMODEL, t,
                                     "column %llu is of group %ld, expected %s",
                                     (unsigned long long)i, (long)(int32_t)g, groups);
        if (f->g_idx && g != i / size) *ordered = 0;
    }
    for (uint64_t g0 = 0; f->g_idx && g0 < n_groups; g0 += BATCH) {
        uint32_t count[BATCH] = {0};
        for (uint64_t i = 0; i < k; i++) {
            uint64_t g = load_word(t, i) - g0;
            if (g < BATCH) count[g]++;
        }
        for (uint64_t g = g0; g < n_groups && g < g0 + BATCH; g++)
            if (count[g - g0] != size)
                return dspark__part_fail(
                    err, DSPARK_EMODEL, t, "group %llu has %u columns, expected %llu in each",
                    (unsigned long long)g, count[g - g0], (unsigned long long)size);
    }
    return DSPARK_OK;
}

/* What only the config knows of integers: signs and order. */
static dspark_status check_int_rule(const dspark__module *m, const form *f,
                                    const dspark__quant_rule *q, int ordered, dspark_error *err)
{
    if (!dspark__rule_targets(q) || q->method != DSPARK__QUANT_COMPRESSED_TENSORS || !q->num_bits)
        return DSPARK_OK;
    if (!q->symmetric != (f->zero_point != NULL))
        return dspark__fail(err, DSPARK_EMODEL, m->name,
                            "the config says symmetric: %s, the file has %s weight_zero_point",
                            q->symmetric ? "true" : "false", f->zero_point ? "a" : "no");
    if (q->act_order && !dspark__module_part(m, "weight_g_idx"))
        return dspark__fail(err, DSPARK_EMODEL, m->name,
                            "the config says actorder: group, the file has no weight_g_idx");
    if (!q->act_order && !ordered)
        return dspark__fail(err, DSPARK_EMODEL, m->name,
                            "weight_g_idx reorders the columns, the config does not say actorder: "
                            "group");
    return DSPARK_OK;
}

static dspark_status check_rule(const dspark__module *m, const form *f, const dspark__quant_rule *q,
                                uint64_t rows, uint64_t k, dspark_error *err)
{
    dspark__claim c = {"INT8", f->bits, 0, 0, f->map.group, {"int-quantized", "naive-quantized"}};

    if (f->packed) {
        c.scheme = "packed INT";
        c.formats[0] = "pack-quantized";
        c.formats[1] = NULL;
    }
    if (f->map.group) {
        c.strategies = DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_GROUP);
    } else {
        c.strategies = DSPARK__STRATEGY_BIT(f->map.row_div == 1 ? DSPARK__STRATEGY_CHANNEL
                                                                : DSPARK__STRATEGY_TENSOR);
        if (rows == 1) c.strategies |= DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_CHANNEL);
        if (q && q->group_size >= k) c.strategies |= DSPARK__STRATEGY_BIT(DSPARK__STRATEGY_GROUP);
    }
    return dspark__rule_agrees(m, q, &c, err);
}

static dspark_status validate(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                              uint64_t k, dspark__packing *p, dspark_error *err)
{
    static const char *const own8[] = {"weight", "weight_scale", "weight_zero_point", NULL};
    static const char *const own[] = {"weight_packed",     "weight_scale", "weight_shape",
                                      "weight_zero_point", "weight_g_idx", NULL};
    dspark_status st;
    int ordered;
    form f;

    *p = (dspark__packing){.bits = 8};
    read_form(&f, m, q, k);
    st = dspark__parts_only(m, f.packed ? own : own8, f.packed ? "packed INT" : "INT8", err);
    if (st != DSPARK_OK) return st;
    /* a rule for floats is the better thing to name, where the rule reaches this module at all */
    if (q && q->num_bits && q->is_float && (st = check_rule(m, &f, q, rows, k, err)) != DSPARK_OK)
        return st;
    if (f.bits == 0)
        return dspark__fail(err, DSPARK_EMODEL, m->name,
                            "packed integers, and the config does not say num_bits for them");
    if (f.bits < 2 || f.bits > 8)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, m->name,
                            "packed integers of %u bits; served: 2 to 8", f.bits);
    st = f.packed ? check_words(&f, q, rows, k, err)
                  : dspark__part_shape(f.weight, rows, k, "the config's", err);
    if (st != DSPARK_OK) return st;
    st = check_weight_shape(dspark__module_part(m, "weight_shape"), rows, k, err);
    if (st != DSPARK_OK || (st = check_scales(&f, rows, k, err)) != DSPARK_OK) return st;
    if ((st = check_zero_point(&f, rows, err)) != DSPARK_OK) return st;
    if ((st = check_g_idx(m, &f, k, &ordered, err)) != DSPARK_OK) return st;
    if ((st = check_rule(m, &f, q, rows, k, err)) != DSPARK_OK) return st;
    if ((st = check_int_rule(m, &f, q, ordered, err)) != DSPARK_OK) return st;
    p->bits = p->format.bits = f.bits == 4 ? 4 : 8;
    dspark__codes_int(p->format.table, p->bits);
    if (f.zero_point) {
        p->format.scale = DSPARK__CODE_OFFSET;
        p->format.block = f.map.group ? f.map.group : (uint32_t)((k + 7) / 8 * 8);
    }
    p->group = f.map.group;
    p->row_scale = f.map.group == 0;
    p->permuted = !ordered;
    return DSPARK_OK;
}

/* ---- the weight ------------------------------------------------------------------------------ */

/* Codes of 2, 3, 5, 6 or 7 bits become bytes. */
static void pack_narrow(const form *f, uint64_t row0, uint64_t n, uint64_t k, uint8_t *panel)
{
    uint8_t codes[PASS];

    for (uint64_t k0 = 0; k0 < k; k0 += PASS) {
        uint64_t n_codes = k - k0 < PASS ? k - k0 : PASS;
        for (uint64_t j = 0; j < n; j++) {
            for (uint64_t i = 0; i < n_codes; i++)
                codes[i] = (uint8_t)code_at(f, row0 + j, k, k0 + i);
            dspark__layout_run8(panel, j, k0, codes, n_codes);
        }
    }
}

/* Columns by group, and within a group by number: the place of a column is its group's first place
 * plus how many of the group came before. */
static void pack_permuted(const form *f, uint32_t bits, uint64_t row0, uint64_t n, uint64_t k,
                          uint8_t *panel)
{
    for (uint64_t g0 = 0; g0 < f->map.cols; g0 += BATCH) {
        uint32_t count[BATCH] = {0};
        for (uint64_t i = 0; i < k; i++) {
            uint64_t g = group_of(f, i);
            if (g - g0 >= BATCH) continue;
            uint64_t place = g * f->map.group + count[g - g0]++;
            for (uint64_t j = 0; j < n; j++)
                dspark__layout_put(panel, bits, j, place, (uint8_t)code_at(f, row0 + j, k, i));
        }
    }
}

static void permutation(const dspark__module *m, uint64_t k, uint32_t group, uint32_t *perm)
{
    const dspark_tensor *t = dspark__module_part(m, "weight_g_idx");

    for (uint64_t g0 = 0; g0 < k / group; g0 += BATCH) {
        uint32_t count[BATCH] = {0};
        for (uint64_t i = 0; i < k; i++) {
            uint64_t g = load_word(t, i);
            if (g - g0 < BATCH) perm[g * group + count[g - g0]++] = (uint32_t)i;
        }
    }
}

/* Zero points as scale bytes. Padding of k gets the code that its row's zero point makes 0. */
static void pack_zero_points(const form *f, const dspark__packing *p, uint64_t row0, uint64_t n,
                             uint64_t k, const dspark__panel_out *out)
{
    for (uint64_t g = 0; g < f->map.cols; g++)
        for (uint64_t j = 0; j < DSPARK__PANEL; j++)
            out->scales[g * DSPARK__PANEL + j] = j < n ? (uint8_t)zero_point_at(f, row0 + j, g) : 0;
    for (uint64_t i = k; i % 8 != 0; i++)
        for (uint64_t j = 0; j < n; j++)
            dspark__layout_put(out->codes, p->bits, j, i,
                               out->scales[(f->map.cols - 1) * DSPARK__PANEL + j]);
}

static void pack(const dspark__module *m, const dspark__packing *p, const dspark__quant_rule *q,
                 uint64_t row0, uint64_t n, uint64_t rows, uint64_t k, const dspark__panel_out *out)
{
    form f;

    read_form(&f, m, q, k);
    const uint8_t *w = f.weight->data;
    uint64_t stride = f.packed ? 4 * f.words : k;
    w += row0 * stride;
    (void)rows;
    if (!p->permuted && (f.bits == 4 || f.bits == 8)) {
        dspark__layout_panel(out, f.bits, w, stride, n, k, f.bits == 4 ? 8 : f.packed ? 0x80 : 0);
    } else {
        dspark__layout_clear(out, p->bits, k);
        if (p->permuted) pack_permuted(&f, p->bits, row0, n, k, out->codes);
        else pack_narrow(&f, row0, n, k, out->codes);
    }
    if (f.zero_point) pack_zero_points(&f, p, row0, n, k, out);
    dspark__scale_map_write(&f.map, row0, n, k, out);
}

static void dequantise(const dspark__module *m, const dspark__quant_rule *q, uint64_t row,
                       uint64_t rows, uint64_t k, double *out)
{
    form f;

    (void)rows;
    read_form(&f, m, q, k);
    for (uint64_t i = 0; i < k; i++) {
        uint64_t g = group_of(&f, i);
        float scale =
            dspark__scale_at(f.map.tensor, dspark__scale_index(&f.map, row, g * f.map.group));
        out[i] =
            (double)(code_at(&f, row, k, i) - zero_point_at(&f, row, g)) * dspark__f32_exact(scale);
    }
}

static int detect_int8(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                       uint64_t k)
{
    const dspark_tensor *w = dspark__module_part(m, "weight");
    (void)q;
    (void)rows;
    (void)k;
    return w && w->dtype == DSPARK_I8 && dspark__module_part(m, "weight_scale");
}

static int detect_packed(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                         uint64_t k)
{
    const dspark_tensor *w = dspark__module_part(m, "weight_packed");
    (void)q;
    (void)rows;
    (void)k;
    return w && w->dtype == DSPARK_I32 && dspark__module_part(m, "weight_scale");
}

const dspark__scheme dspark__scheme_int8 = {
    "int8",    "INT8, a scale per tensor, output or group", detect_int8, validate, pack, NULL,
    dequantise};
const dspark__scheme dspark__scheme_int_packed = {
    "int_packed",  "packed integers of 2 to 8 bits, a scale per output or group",
    detect_packed, validate,
    pack,          permutation,
    dequantise};
