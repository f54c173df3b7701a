/* Grouping of tensors into modules and the table of weight formats by presence (docs/formats.md).
 * Decides what a module is, never whether a model may use it. */
#include "ckpt/modules.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"

/* Length of the part before the suffix; all of a name without a dot. */
static size_t module_length(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? (size_t)(dot - name) : strlen(name);
}

dspark_status dspark__modules_make(dspark__modules *out, const dspark_checkpoint *ckpt,
                                   dspark_error *err)
{
    size_t count = dspark__checkpoint_count(ckpt), bytes = 1;
    char *at;

    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < count; i++)
        bytes += module_length(dspark__checkpoint_at(ckpt, i)->name) + 1;
    out->names = malloc(bytes);
    out->list = calloc(count ? count : 1, sizeof *out->list);
    out->of_tensor = calloc(count ? count : 1, sizeof *out->of_tensor);
    if (!out->names || !out->list || !out->of_tensor) goto nomem;
    at = out->names;
    for (size_t i = 0; i < count; i++) {
        const dspark_tensor *t = dspark__checkpoint_at(ckpt, i);
        size_t n = module_length(t->name), id;
        dspark__file_module *m;
        int put;

        memcpy(at, t->name, n);
        at[n] = '\0';
        put = dspark__nametable_put(&out->index, at, &id);
        if (put < 0) goto nomem;
        m = &out->list[id];
        out->of_tensor[i] = (uint32_t)id;
        if (put) {
            m->name = at;
            at += n + 1;
            out->n = id + 1;
        }
        if (m->n_parts < DSPARK__FILE_MODULE_PARTS) {
            m->parts[m->n_parts].suffix = t->name[n] ? t->name + n + 1 : "";
            m->parts[m->n_parts].tensor = t;
        }
        m->n_parts++;
    }
    return DSPARK_OK;
nomem:
    dspark__modules_free(out);
    return dspark__fail_nomem(err, "module table", bytes + count * sizeof *out->list);
}

void dspark__modules_free(dspark__modules *m)
{
    free(m->names);
    free(m->list);
    free(m->of_tensor);
    dspark__nametable_free(&m->index);
    memset(m, 0, sizeof *m);
}

const dspark__file_module *dspark__modules_of(const dspark__modules *m, size_t i)
{
    return &m->list[m->of_tensor[i]];
}

const dspark_tensor *dspark__file_module_part(const dspark__file_module *m, const char *suffix)
{
    uint32_t n = m->n_parts < DSPARK__FILE_MODULE_PARTS ? m->n_parts : DSPARK__FILE_MODULE_PARTS;

    for (uint32_t i = 0; i < n; i++)
        if (!strcmp(m->parts[i].suffix, suffix)) return m->parts[i].tensor;
    return NULL;
}

static int is_power_scale(const dspark_tensor *t)
{
    return t && (t->dtype == DSPARK_U8 || t->dtype == DSPARK_F8_E8M0);
}

static dspark__module_state say(dspark__module_state state, const char **scheme, const char *text)
{
    *scheme = text;
    return state;
}

static dspark__module_state packed_state(const dspark__file_module *m, const dspark_tensor *packed,
                                         const char **scheme)
{
    const dspark_tensor *scale = dspark__file_module_part(m, "weight_scale");

    if (!scale) return say(DSPARK__MODULE_BROKEN, scheme, "weight_packed without weight_scale");
    if (packed->dtype == DSPARK_I32) {
        if (!dspark__file_module_part(m, "weight_shape"))
            return say(DSPARK__MODULE_BROKEN, scheme, "packed integers without weight_shape");
        return say(DSPARK__MODULE_QUANTISED, scheme, "int pack-quantized (compressed-tensors)");
    }
    if (packed->dtype != DSPARK_U8)
        return say(DSPARK__MODULE_QUANTISED, scheme, "weight_packed of an unknown dtype");
    if (scale->dtype == DSPARK_F8_E4M3) {
        if (!dspark__file_module_part(m, "weight_global_scale"))
            return say(DSPARK__MODULE_BROKEN, scheme, "NVFP4 codes without weight_global_scale");
        return say(DSPARK__MODULE_QUANTISED, scheme, "nvfp4 (compressed-tensors)");
    }
    if (is_power_scale(scale))
        return say(DSPARK__MODULE_QUANTISED, scheme, "mxfp4 (compressed-tensors)");
    return say(DSPARK__MODULE_QUANTISED, scheme, "weight_packed with an unknown kind of scale");
}

static dspark__module_state fp8_state(const dspark__file_module *m, const dspark_tensor *weight,
                                      const char **scheme)
{
    const dspark_tensor *scale = dspark__file_module_part(m, "weight_scale");

    if (dspark__file_module_part(m, "weight_scale_inv"))
        return say(DSPARK__MODULE_QUANTISED, scheme, "fp8 block (weight_scale_inv)");
    if (!scale && dspark__file_module_part(m, "scale"))
        return say(DSPARK__MODULE_QUANTISED, scheme, "fp8 block (scale)");
    if (!scale) return say(DSPARK__MODULE_BROKEN, scheme, "an FP8 weight without a scale");
    if (is_power_scale(scale)) return say(DSPARK__MODULE_QUANTISED, scheme, "mxfp8");
    if (scale->n_elements == 1 && scale->rank < 2)
        return say(DSPARK__MODULE_QUANTISED, scheme, "fp8 per-tensor");
    if (scale->n_elements == 1)
        return say(DSPARK__MODULE_QUANTISED, scheme, "fp8 per-tensor or of one block");
    if (weight->rank == 2 && scale->n_elements == weight->shape[0] &&
        (scale->rank == 1 || (scale->rank == 2 && scale->shape[1] == 1)))
        return say(DSPARK__MODULE_QUANTISED, scheme, "fp8 per-channel");
    return say(DSPARK__MODULE_QUANTISED, scheme, "fp8 block or group");
}

dspark__module_state dspark__file_module_state(const dspark__file_module *m, const char **scheme)
{
    static const char *const companions[] = {
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "input_scale",
        "input_global_scale",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
        "pre_quant_scale",
        "scale",
        "svdquant_lora_a",
        "svdquant_lora_b",
    };
    const dspark_tensor *weight = dspark__file_module_part(m, "weight");
    const dspark_tensor *packed = dspark__file_module_part(m, "weight_packed");
    const dspark_tensor *scale = dspark__file_module_part(m, "weight_scale");
    const char *companion = NULL;

    for (size_t i = 0; !companion && i < sizeof companions / sizeof *companions; i++)
        if (dspark__file_module_part(m, companions[i])) companion = companions[i];
    if (weight && packed)
        return say(DSPARK__MODULE_BROKEN, scheme, "both weight and weight_packed");
    if (dspark__file_module_part(m, "weight_scale_2") &&
        dspark__file_module_part(m, "weight_global_scale"))
        return say(DSPARK__MODULE_BROKEN, scheme, "both weight_scale_2 and weight_global_scale");
    if (packed) return packed_state(m, packed, scheme);
    if (!weight) {
        if (dspark__file_module_part(m, "qweight"))
            return say(DSPARK__MODULE_REFUSED, scheme, "gptq or awq (qweight)");
        if (companion) return say(DSPARK__MODULE_BROKEN, scheme, "a scale without a weight");
        return say(DSPARK__MODULE_OTHER, scheme, "no weight");
    }
    switch (weight->dtype) {
    case DSPARK_BF16:
        if (companion)
            return say(DSPARK__MODULE_BROKEN, scheme,
                       "a quantisation companion beside a BF16 weight");
        return say(DSPARK__MODULE_BF16, scheme, "bf16");
    case DSPARK_F16:
    case DSPARK_F32:
    case DSPARK_F64:
        if (companion)
            return say(DSPARK__MODULE_BROKEN, scheme,
                       "a quantisation companion beside a float weight");
        if (weight->dtype == DSPARK_F64) return say(DSPARK__MODULE_REFUSED, scheme, "f64");
        return say(DSPARK__MODULE_DENSE, scheme, weight->dtype == DSPARK_F16 ? "f16" : "f32");
    case DSPARK_F8_E4M3:
    case DSPARK_F8_E5M2:
    case DSPARK_F8_E4M3FNUZ:
    case DSPARK_F8_E5M2FNUZ: return fp8_state(m, weight, scheme);
    case DSPARK_U8:
    case DSPARK_F4:
        if (scale && dspark__file_module_part(m, "weight_scale_2"))
            return say(DSPARK__MODULE_QUANTISED, scheme, "nvfp4 (modelopt)");
        if (is_power_scale(scale)) return say(DSPARK__MODULE_QUANTISED, scheme, "mxfp4 (quark)");
        if (scale) return say(DSPARK__MODULE_QUANTISED, scheme, "4-bit codes of an unknown kind");
        return say(DSPARK__MODULE_BROKEN, scheme, "4-bit codes without a scale");
    case DSPARK_I8:
        if (scale) return say(DSPARK__MODULE_QUANTISED, scheme, "int8");
        return say(DSPARK__MODULE_BROKEN, scheme, "INT8 codes without a scale");
    default: return say(DSPARK__MODULE_OTHER, scheme, "a dtype that is no weight format");
    }
}
