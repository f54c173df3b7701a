/* The table of schemes and the search in it. Knows no scheme itself: each has a file of its own.
 * What contradicts itself, and what is more than codes and scales, is refused here before any
 * scheme looks. */
#include "quant/scheme.h"

#include <stdio.h>
#include <string.h>

#include "ckpt/dtype.h"
#include "quant/parts.h"

static const dspark__scheme *const schemes[] = {
    &dspark__scheme_bf16,           &dspark__scheme_f16,         &dspark__scheme_f32,
    &dspark__scheme_fp8_tensor,     &dspark__scheme_fp8_channel, &dspark__scheme_fp8_group,
    &dspark__scheme_fp8_block,      &dspark__scheme_mxfp8,       &dspark__scheme_nvfp4_ct,
    &dspark__scheme_nvfp4_modelopt, &dspark__scheme_mxfp4,       &dspark__scheme_int8,
    &dspark__scheme_int_packed,
};
#define N_SCHEMES (sizeof schemes / sizeof schemes[0])

const dspark__scheme *const *dspark__scheme_table(size_t *n)
{
    *n = N_SCHEMES;
    return schemes;
}

const dspark_tensor *dspark__module_part(const dspark__module *m, const char *suffix)
{
    for (uint32_t i = 0; i < m->n_parts; i++)
        if (strcmp(m->parts[i].suffix, suffix) == 0) return m->parts[i].tensor;
    return NULL;
}

/* Two answers to one question. */
static dspark_status check_contradictions(const dspark__module *m, dspark_error *err)
{
    static const char *const pairs[][2] = {
        {"weight", "weight_packed"},          {"weight_scale_2", "weight_global_scale"},
        {"weight_scale", "weight_scale_inv"}, {"weight_scale", "scale"},
        {"weight_scale_inv", "scale"},
    };

    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        const dspark_tensor *b = dspark__module_part(m, pairs[i][1]);
        if (b && dspark__module_part(m, pairs[i][0]))
            return dspark__part_fail(err, DSPARK_EMODEL, b,
                                     "its module has both %s and %s: which of them counts is "
                                     "anybody's guess",
                                     pairs[i][0], pairs[i][1]);
    }
    return DSPARK_OK;
}

/* "weight F8_E4M3 [24, 64], weight_scale F32 [5]" */
static void list_parts(const dspark__module *m, char *text, size_t cap)
{
    size_t at = 0;

    text[0] = '\0';
    for (uint32_t i = 0; i < m->n_parts && at + 1 < cap; i++) {
        const dspark_tensor *t = m->parts[i].tensor;
        char shape[60];
        int n = snprintf(text + at, cap - at, "%s%.40s %s %s", i ? ", " : "", m->parts[i].suffix,
                         dspark__dtype_name(t->dtype),
                         dspark__shape_text(t->rank, t->shape, shape, sizeof shape));
        if (n < 0) return;
        at += (size_t)n;
    }
}

/* No scheme knows the module: say what is missing or odd, before saying what would be served. */
static dspark_status refuse(const dspark__module *m, uint64_t rows, uint64_t k, dspark_error *err)
{
    const dspark_tensor *w = dspark__module_part(m, "weight");
    const dspark_tensor *packed = dspark__module_part(m, "weight_packed");
    const dspark_tensor *s = dspark__module_part(m, "weight_scale");
    char parts[260];

    if (!w && !packed)
        return dspark__part_fail(err, DSPARK_EMODEL, m->parts[0].tensor,
                                 "its module has no weight and no weight_packed");
    if (!w) w = packed;
    unsigned bits = dspark__dtype_bits(w->dtype);
    int floats = w->dtype == DSPARK_F64 || w->dtype == DSPARK_F6_E2M3 || w->dtype == DSPARK_F6_E3M2;
    if (!s && !floats && (packed || bits <= 8))
        return dspark__part_fail(err, DSPARK_EMODEL, w,
                                 "%s codes without a scale; a scale is never assumed",
                                 dspark__dtype_name(w->dtype));
    list_parts(m, parts, sizeof parts);
    if (s && !packed && w->dtype == DSPARK_U8 && w->rank == 2 && w->shape[1] == k &&
        rows % 2 == 0 && w->shape[0] == rows / 2)
        return dspark__part_fail(
            err, DSPARK_EUNSUPPORTED, w,
            "integers packed along the outputs (AWQ as ModelOpt writes it) are "
            "not served");
    if (s && (w->dtype == DSPARK_U8 || w->dtype == DSPARK_F4) && s->dtype == DSPARK_F8_E4M3)
        return dspark__part_fail(err, DSPARK_EMODEL, w, "NVFP4 codes without %s",
                                 packed ? "weight_global_scale" : "weight_scale_2");
    if (s && dspark__dtype_bits(s->dtype) == 8 && s->rank == 1 && s->n_elements > 1)
        return dspark__part_fail(err, DSPARK_EUNSUPPORTED, s,
                                 "block scales in one dimension are a runtime's swizzled layout, "
                                 "not a checkpoint's");
    if (s && bits == 8 && w->dtype != DSPARK_U8)
        return dspark__part_fail(
            err, DSPARK_EMODEL, s,
            "no scale of a weight [%llu, %llu] has this shape: %s; served: "
            "[], [1], [%llu], [%llu, 1], [%llu, groups], [rows / 128, columns / "
            "128] rounded up",
            (unsigned long long)rows, (unsigned long long)k, parts, (unsigned long long)rows,
            (unsigned long long)rows, (unsigned long long)rows);
    return dspark__part_fail(err, DSPARK_EUNSUPPORTED, w,
                             "no scheme of this library reads it: %s; served: BF16, F16, F32, FP8, "
                             "MXFP8, MXFP4, NVFP4, INT8 and packed integers",
                             parts);
}

dspark_status dspark__scheme_detect(const dspark__scheme **out, const dspark__module *m,
                                    const dspark__quant_rule *q, uint64_t rows, uint64_t k,
                                    dspark_error *err)
{
    dspark_status st;

    *out = NULL;
    if (m->n_parts == 0) return dspark__fail(err, DSPARK_EMODEL, m->name, "module has no tensors");
    if ((st = check_contradictions(m, err)) != DSPARK_OK) return st;
    for (uint32_t i = 0; i < m->n_parts; i++) {
        const char *what = dspark__suffix_refused(m->parts[i].suffix);
        if (what)
            return dspark__part_fail(err, DSPARK_EUNSUPPORTED, m->parts[i].tensor, "not served: %s",
                                     what);
    }
    for (size_t i = 0; i < N_SCHEMES; i++) {
        if (!schemes[i]->detect(m, q, rows, k)) continue;
        *out = schemes[i];
        return DSPARK_OK;
    }
    return refuse(m, rows, k, err);
}
