/* The shared half of the schemes' checks. */
#include "quant/parts.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/numfmt.h"
#include "ckpt/dtype.h"

/* ---- errors ---------------------------------------------------------------------------------- */

dspark_status dspark__part_fail(dspark_error *err, dspark_status code, const dspark_tensor *t,
                                const char *fmt, ...)
{
    char where[256], text[400];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    snprintf(where, sizeof where, "%.80s%s%.160s", t->file ? t->file : "", t->file ? ": " : "",
             t->name);
    return dspark__fail(err, code, where, "%s", text);
}

dspark_status dspark__part_shape(const dspark_tensor *t, uint64_t rows, uint64_t cols,
                                 const char *why, dspark_error *err)
{
    char found[80];

    if (t->rank == 2 && t->shape[0] == rows && t->shape[1] == cols) return DSPARK_OK;
    return dspark__part_fail(err, DSPARK_EMODEL, t, "shape %s, expected [%llu, %llu] (%s)",
                             dspark__shape_text(t->rank, t->shape, found, sizeof found),
                             (unsigned long long)rows, (unsigned long long)cols, why);
}

const char *dspark__suffix_refused(const char *suffix)
{
    static const struct {
        const char *suffix, *what;
    } refused[] = {
        {"pre_quant_scale", "a scale that AWQ or SmoothQuant puts on the activations; export the "
                            "checkpoint with it folded into the weights"},
        {"svdquant_lora_a", "a low-rank residual (SVDQuant)"},
        {"svdquant_lora_b", "a low-rank residual (SVDQuant)"},
        {"qweight", "codes of GPTQ or AWQ"},
        {"qzeros", "zero points of GPTQ or AWQ"},
        {"trellis", "codes of EXL3"},
    };

    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (!strcmp(suffix, refused[i].suffix)) return refused[i].what;
    if (strstr(suffix, "rotation") || strstr(suffix, "hadamard") || strstr(suffix, "transform"))
        return "a rotation around the linear";
    return NULL;
}

dspark_status dspark__parts_only(const dspark__module *m, const char *const *own,
                                 const char *scheme, dspark_error *err)
{
    static const char *const tolerated[] = {
        "input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale",
    };
    dspark_status st;

    for (uint32_t i = 0; i < m->n_parts; i++) {
        const char *suffix = m->parts[i].suffix;
        const dspark_tensor *t = m->parts[i].tensor;
        int known = !strcmp(suffix, "bias"); /* the roster says whether it may be there */

        for (size_t o = 0; !known && own[o]; o++) known = !strcmp(suffix, own[o]);
        for (size_t o = 0; !known && o < sizeof tolerated / sizeof *tolerated; o++) {
            if (strcmp(suffix, tolerated[o]) != 0) continue;
            if ((st = dspark__scales_check(t, 1, 0, err)) != DSPARK_OK) return st;
            known = 1;
        }
        if (!known)
            return dspark__part_fail(err, DSPARK_EMODEL, t, "unexpected beside %s weights", scheme);
    }
    return DSPARK_OK;
}

/* ---- scales ---------------------------------------------------------------------------------- */

int dspark__part_grid(const dspark_tensor *t, uint64_t *rows, uint64_t *cols)
{
    const uint64_t *s = t->shape;

    *rows = *cols = 1;
    switch (t->rank) {
    case 0: return 1;
    case 1: *rows = s[0]; return 1;
    case 2:
        *rows = s[0];
        *cols = s[1];
        return 1;
    case 3:
        *rows = s[1];
        *cols = s[2];
        return s[0] == 1;
    case 4:
        *rows = s[0];
        *cols = s[2];
        return s[1] == 1 && s[3] == 1;
    default: return 0;
    }
}

float dspark__scale_at(const dspark_tensor *t, uint64_t i)
{
    const unsigned char *p = t->data;
    float f;

    switch (t->dtype) {
    case DSPARK_BF16: return dspark__bf16_to_f32(dspark__load_u16(p + 2 * i));
    case DSPARK_F16: return dspark__f16_to_f32(dspark__load_u16(p + 2 * i));
    case DSPARK_F8_E8M0: return dspark__e8m0_to_f32(p[i]);
    default: memcpy(&f, p + 4 * i, sizeof f); return f;
    }
}

dspark_status dspark__scales_check(const dspark_tensor *t, int positive, int allow_e8m0,
                                   dspark_error *err)
{
    if (t->dtype != DSPARK_BF16 && t->dtype != DSPARK_F16 && t->dtype != DSPARK_F32 &&
        !(allow_e8m0 && t->dtype == DSPARK_F8_E8M0))
        return dspark__part_fail(err, DSPARK_EMODEL, t, "dtype %s, expected F32, BF16%s F16%s",
                                 dspark__dtype_name(t->dtype), allow_e8m0 ? "," : " or",
                                 allow_e8m0 ? " or F8_E8M0" : "");
    for (uint64_t i = 0; i < t->n_elements; i++) {
        /* on bits: a mode of the thread may make subnormals look like zero */
        uint32_t u = dspark__f32_bits(dspark__scale_at(t, i));
        if (u < 0x7f800000u && (u != 0 || !positive)) continue;
        return dspark__part_fail(err, DSPARK_EMODEL, t,
                                 "element %llu is %g, a scale is finite and %s",
                                 (unsigned long long)i, (double)dspark__f32_from_bits(u),
                                 positive ? "above zero" : "not negative");
    }
    return DSPARK_OK;
}

dspark_status dspark__scale_single(const dspark_tensor *t, dspark_error *err)
{
    char found[80];

    if (t->n_elements != 1)
        return dspark__part_fail(err, DSPARK_EMODEL, t, "shape %s, expected one number: [] or [1]",
                                 dspark__shape_text(t->rank, t->shape, found, sizeof found));
    return dspark__scales_check(t, 1, 0, err);
}

void dspark__scale_map_write(const dspark__scale_map *s, uint64_t row0, uint64_t n, uint64_t k,
                             const dspark__panel_out *out)
{
    uint64_t n_groups = s->group ? (k + s->group - 1) / s->group : 1;
    float *to = s->group ? out->group_scales : out->row_scales;

    for (uint64_t g = 0; g < n_groups; g++, to += DSPARK__PANEL) {
        for (uint64_t j = 0; j < DSPARK__PANEL; j++)
            to[j] =
                j < n ? dspark__scale_at(s->tensor, dspark__scale_index(s, row0 + j, g * s->group))
                      : 1.0f;
    }
}

/* Eight words of eight bytes: byte c of word r becomes byte r of word c. */
static void turn_bytes(uint64_t x[8])
{
    static const uint64_t masks[3] = {UINT64_C(0x00000000ffffffff), UINT64_C(0x0000ffff0000ffff),
                                      UINT64_C(0x00ff00ff00ff00ff)};
    for (int step = 0, far = 4; far > 0; step++, far /= 2)
        for (int i = 0; i < 8; i++) {
            if (i & far) continue;
            const uint64_t t = (x[i] >> 8 * far ^ x[i + far]) & masks[step];
            x[i] ^= t << 8 * far;
            x[i + far] ^= t;
        }
}

/* Byte i of a word is its bits from 8 * i on, whatever the machine's order. */
static uint64_t little(uint64_t x)
{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    return x;
}

/* Whole squares of 8 rows and 8 columns, then what is left. */
void dspark__scale_bytes_write(const uint8_t *bytes, uint64_t cols, uint64_t row0, uint64_t n,
                               uint8_t missing, uint8_t *scales)
{
    const uint64_t whole = n == DSPARK__PANEL ? cols / 8 * 8 : 0;
    uint64_t x[8];
    for (uint64_t b = 0; b < whole; b += 8)
        for (uint64_t j = 0; j < DSPARK__PANEL; j += 8) {
            uint8_t *to = scales + b * DSPARK__PANEL + j;
            for (uint64_t i = 0; i < 8; i++) {
                memcpy(&x[i], bytes + (row0 + j + i) * cols + b, 8);
                x[i] = little(x[i]);
            }
            turn_bytes(x);
            for (uint64_t i = 0; i < 8; i++, to += DSPARK__PANEL) {
                x[i] = little(x[i]);
                memcpy(to, &x[i], 8);
            }
        }
    for (uint64_t j = 0; j < DSPARK__PANEL; j++) {
        const uint8_t *from = bytes + (j < n ? row0 + j : 0) * cols;
        for (uint64_t b = whole; b < cols; b++) scales[b * DSPARK__PANEL + j] = j < n ? from[b] : missing;
    }
}

uint64_t dspark__scale_bytes_below(const uint8_t *bytes, uint64_t n, uint8_t limit)
{
    enum { PASS = 4096 };
    uint64_t i = 0;
    for (; n - i >= PASS; i += PASS) {
        uint8_t most = 0;
        for (uint64_t j = i; j < i + PASS; j++) most = bytes[j] > most ? bytes[j] : most;
        if (most >= limit) break;
    }
    while (i < n && bytes[i] < limit) i++;
    return i;
}

/* ---- the config ------------------------------------------------------------------------------ */

static const char *strategy_name(dspark__quant_strategy s)
{
    switch (s) {
    case DSPARK__STRATEGY_TENSOR: return "tensor";
    case DSPARK__STRATEGY_CHANNEL: return "channel";
    case DSPARK__STRATEGY_GROUP: return "group";
    case DSPARK__STRATEGY_BLOCK: return "block";
    case DSPARK__STRATEGY_TENSOR_GROUP: return "tensor_group";
    default: return "?";
    }
}

int dspark__rule_targets(const dspark__quant_rule *q)
{
    return q && q->method != DSPARK__QUANT_NONE && (q->quantised > 0 || q->ignored_by_parent);
}

dspark_status dspark__rule_agrees(const dspark__module *m, const dspark__quant_rule *q,
                                  const dspark__claim *c, dspark_error *err)
{
    if (!q || q->method == DSPARK__QUANT_NONE) return DSPARK_OK;
    /* A plain weight is what it is, whatever the config intended: names drift, and half-converted files
     * load right. inspect tells. */
    if (c->bits >= 16) return DSPARK_OK;
    /* ModelOpt's excluded modules may still be quantised: by the model that it started from. */
    if (q->quantised < 0 && !q->ignored_by_parent && q->method != DSPARK__QUANT_MODELOPT)
        return dspark__fail(err, DSPARK_EMODEL, m->name,
                            "the file has %s codes, the config excludes this module from "
                            "quantisation",
                            c->scheme);
    if (!dspark__rule_targets(q)) return DSPARK_OK; /* names drift: presence decides */
    if (q->num_bits && (q->num_bits != c->bits || !q->is_float != !c->is_float))
        return dspark__fail(err, DSPARK_EMODEL, m->name,
                            "the file has %s codes (%u-bit %s), the config says %u-bit %s",
                            c->scheme, c->bits, c->is_float ? "float" : "int", q->num_bits,
                            q->is_float ? "float" : "int");
    if (c->strategies && q->strategy != DSPARK__STRATEGY_UNKNOWN &&
        !(c->strategies & DSPARK__STRATEGY_BIT(q->strategy)))
        return dspark__fail(
            err, DSPARK_EMODEL, m->name,
            "the scales of the file are those of %s, the config's strategy is \"%s\"", c->scheme,
            strategy_name(q->strategy));
    if (c->group && q->group_size && q->group_size != c->group)
        return dspark__fail(
            err, DSPARK_EMODEL, m->name,
            "the scales of the file make groups of %u, the config's group_size is %u", c->group,
            q->group_size);
    if (q->method == DSPARK__QUANT_COMPRESSED_TENSORS && q->format && c->formats[0] &&
        strcasecmp(q->format, "mixed-precision") != 0 &&
        strcasecmp(q->format, c->formats[0]) != 0 &&
        (!c->formats[1] || strcasecmp(q->format, c->formats[1]) != 0))
        return dspark__fail(err, DSPARK_EMODEL, m->name,
                            "the file has %s codes, the config's format is \"%.60s\" (expected "
                            "\"%s\")",
                            c->scheme, q->format, c->formats[0]);
    return DSPARK_OK;
}
