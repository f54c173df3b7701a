/* What the modules of a file are and how many parameters they hold: the linears of a K3 drafter by the
 * scheme that reads them, everything else by its headers. Stored elements are counted apart: packed
 * codes hold two parameters and more in one element, and scales are none. Judges nothing. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "ckpt/dtype.h"
#include "model/inspect.h"
#include "quant/codes.h"

const dspark__quant_module **dspark__inspect_match(const dspark__modules *modules,
                                                   const dspark__quant_modules *linears)
{
    const dspark__quant_module **linear_of = calloc(modules->n + 1, sizeof *linear_of);

    for (size_t i = 0; linear_of && i < linears->n; i++) {
        const dspark__quant_module *linear = &linears->list[i];
        size_t id = linear->module.n_parts
                        ? dspark__nametable_find(&modules->index, linear->module.name)
                        : DSPARK__NAMETABLE_NONE;
        if (id != DSPARK__NAMETABLE_NONE) linear_of[id] = linear;
    }
    return linear_of;
}

/* The shapes of one scale fit two kinds: which of them it is, only the config says. */
const char *dspark__inspect_scheme(const dspark__file_module *m, const dspark__quant_module *linear)
{
    static const char *const fp8[][2] = {{"fp8_tensor", "fp8 per-tensor"},
                                         {"fp8_channel", "fp8 per-channel"},
                                         {"fp8_group", "fp8 per-group"},
                                         {"fp8_block", "fp8 block"}};
    const dspark_tensor *scale = dspark__file_module_part(m, "weight_scale");
    const char *text = NULL;

    dspark__file_module_state(m, &text);
    if (!linear || !linear->scheme || !scale) return text;
    /* Where no config tells one block from a tensor, the name of the scheme that reads both does not either. */
    if (scale->n_elements == 1 && scale->rank >= 2 && linear->rule.strategy == DSPARK__STRATEGY_UNKNOWN)
        return text;
    for (size_t i = 0; i < sizeof fp8 / sizeof *fp8; i++)
        if (strcmp(linear->scheme->name, fp8[i][0]) == 0) return fp8[i][1];
    return text;
}

/* ---- totals ---------------------------------------------------------------------------------- */

static int is_float(dspark_dtype dtype)
{
    return dtype == DSPARK_BF16 || dtype == DSPARK_F16 || dtype == DSPARK_F32 ||
           dtype == DSPARK_F64;
}

static int name_ends(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

/* Of codes: as many as the config's shape has; without a config, what headers tell. 0: unknown. */
static int weight_parameters(const dspark_tensor *t, const dspark__quant_module *linear, uint64_t *n)
{
    *n = t->n_elements;
    if (linear) return dspark__mul_u64(linear->rows, linear->k, n);
    switch (t->dtype) {
    case DSPARK_F4:
    case DSPARK_I8: return 1;
    case DSPARK_U8: return dspark__mul_u64(*n, 2, n);
    default: return dspark__is_fp8(t->dtype);
    }
}

/* Parameters of tensor i: weights, biases, norms and tables; not scales, shapes, zero points and
 * rotary tables. 0 when there is no telling. */
static int tensor_parameters(const dspark_tensor *t, const dspark__file_module *m,
                             const dspark__quant_module *linear, uint64_t *n)
{
    int is_weight = t == dspark__file_module_part(m, "weight") ||
                    t == dspark__file_module_part(m, "weight_packed");
    const char *scheme;

    *n = 0;
    if (is_weight && !is_float(t->dtype) &&
        dspark__file_module_state(m, &scheme) != DSPARK__MODULE_OTHER)
        return weight_parameters(t, linear, n);
    if (is_float(t->dtype) && !name_ends(t->name, "scale") && !name_ends(t->name, "scale_2") &&
        !name_ends(t->name, "scale_inv") && !name_ends(t->name, "inv_freq"))
        *n = t->n_elements;
    return 1;
}

json_t *dspark__inspect_totals(const dspark_checkpoint *ckpt, const dspark__modules *modules,
                               const dspark__quant_module *const *linear_of)
{
    size_t count = dspark__checkpoint_count(ckpt);
    uint64_t parameters = 0, elements = 0, bytes = 0, n;
    int known = 1, oom = 0;
    json_t *o = json_object();

    for (size_t i = 0; i < count; i++) {
        const dspark_tensor *t = dspark__checkpoint_at(ckpt, i);
        const dspark__quant_module *linear = linear_of[modules->of_tensor[i]];
        known &= tensor_parameters(t, dspark__modules_of(modules, i), linear, &n) &&
                 dspark__add_u64(parameters, n, &parameters);
        elements += t->n_elements;
        bytes += t->n_bytes;
    }
    dspark__inspect_put(&oom, o, "tensors", dspark__inspect_u64(count));
    dspark__inspect_put(&oom, o, "parameters", known ? dspark__inspect_u64(parameters) : json_null());
    dspark__inspect_put(&oom, o, "stored_elements", dspark__inspect_u64(elements));
    dspark__inspect_put(&oom, o, "bytes", dspark__inspect_u64(bytes));
    if (!oom) return o;
    json_decref(o);
    return NULL;
}
