/* The Quark dialect (AMD): a tensor specification for all modules, others for name patterns and for
 * classes, and a list of exceptions. A weight with two specifications is one whose scales are
 * quantised in turn: NVFP4 is the only such that is served. */
#include <string.h>
#include <strings.h>

#include "quant/config_dialect.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

enum { TIER_NAME, TIER_CLASS, TIER_GLOBAL };

typedef struct spec {
    const char *dtype, *qscheme, *scale_format;
    int64_t group_size, ch_axis;
    int has_axis;
} spec;

static dspark_status read_spec(const dspark__cfg *g, spec *s)
{
    const char *element = NULL;
    dspark_status st;
    int dynamic = 0;

    memset(s, 0, sizeof *s);
    if ((st = dspark__quant_refuse_rotations(g)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_string(g, "dtype", &s->dtype)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_string(g, "qscheme", &s->qscheme)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_string(g, "scale_format", &s->scale_format)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_int(g, "group_size", -1, 1 << 20, &s->group_size, NULL)) != DSPARK_OK)
        return st;
    if ((st = dspark__cfg_int(g, "ch_axis", -8, 8, &s->ch_axis, &s->has_axis)) != DSPARK_OK)
        return st;
    if ((st = dspark__cfg_bool(g, "is_dynamic", &dynamic, NULL)) != DSPARK_OK) return st;
    if (!s->dtype)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "dtype",
                                "the key is missing, and it has no default");
    if (dynamic)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "is_dynamic",
                                "weights whose scales are not stored");
    if (strcasecmp(s->dtype, "mx") == 0) { /* an older spelling: groups of 32, e8m0 */
        if ((st = dspark__cfg_string(g, "mx_element_dtype", &element)) != DSPARK_OK) return st;
        s->dtype = element ? element : "mx";
        s->scale_format = "e8m0";
        if (!s->qscheme) s->qscheme = "per_group";
        if (s->group_size <= 0) s->group_size = 32;
    }
    return DSPARK_OK;
}

static int is_word(const char *word, const char *wanted)
{
    return word && strcasecmp(word, wanted) == 0;
}

static dspark_status read_scheme(const dspark__cfg *g, const spec *s, dspark__quant_rule *r)
{
    static const char *const words[] = {"per_tensor", "per_channel", "per_group", "per_block"};
    static const dspark__quant_strategy strategies[] = {
        DSPARK__STRATEGY_TENSOR, DSPARK__STRATEGY_CHANNEL, DSPARK__STRATEGY_GROUP,
        DSPARK__STRATEGY_BLOCK};
    int index = s->qscheme ? dspark__quant_word(words, COUNT(words), s->qscheme) : 0, present;
    dspark_status st;

    if (index < 0)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "qscheme", "%.60s is not served",
                                s->qscheme);
    r->strategy = strategies[index];
    if (r->strategy == DSPARK__STRATEGY_CHANNEL && s->has_axis && s->ch_axis != 0 &&
        s->ch_axis != -2)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "ch_axis",
                                "%d: channels of weights are their outputs, axis 0",
                                (int)s->ch_axis);
    if (r->strategy == DSPARK__STRATEGY_GROUP) {
        if (s->has_axis && s->ch_axis != 1 && s->ch_axis != -1)
            return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "ch_axis",
                                    "%d: groups of weights run along the inputs, axis -1",
                                    (int)s->ch_axis);
        if (s->group_size <= 0)
            return dspark__cfg_fail(g, DSPARK_EMODEL, "group_size",
                                    "per_group needs a positive group size");
        r->group_size = (uint32_t)s->group_size;
    }
    if (r->strategy == DSPARK__STRATEGY_BLOCK) {
        st = dspark__quant_block(g, "block_size", &r->block_rows, &r->block_cols, &present);
        if (st != DSPARK_OK) return st;
    }
    return DSPARK_OK;
}

/* One specification, or the first of two; `second` is the one of its scales or NULL. */
static dspark_status make_rule(const dspark__cfg *g, const spec *s, const spec *second,
                               dspark__quant_rule *r)
{
    static const struct {
        const char *name, *format;
        uint32_t bits;
        int is_float;
    } dtypes[] = {{"fp8_e4m3", "fp8_e4m3", 8, 1},
                  {"fp8_e4m3fn", "fp8_e4m3", 8, 1},
                  {"fp8_e4m3fnuz", "fp8_e4m3fnuz", 8, 1},
                  {"fp8_e5m2", "fp8_e5m2", 8, 1},
                  {"fp8_e5m2fnuz", "fp8_e5m2fnuz", 8, 1},
                  {"fp4", "fp4", 4, 1},
                  {"fp4_e2m1", "fp4", 4, 1},
                  {"int8", "int8", 8, 0}};
    dspark_status st;
    int e8m0 = is_word(s->scale_format, "e8m0");

    memset(r, 0, sizeof *r);
    for (size_t i = 0; i < COUNT(dtypes); i++) {
        if (!is_word(s->dtype, dtypes[i].name)) continue;
        r->num_bits = dtypes[i].bits;
        r->is_float = dtypes[i].is_float;
        r->format = dtypes[i].format;
    }
    if (r->num_bits == 0)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "dtype",
                                "%.60s is not served; fp8_e4m3, fp8_e5m2, fp4 and int8 are",
                                s->dtype);
    r->quantised = 1;
    r->symmetric = 1;
    if ((st = dspark__cfg_bool(g, "symmetric", &r->symmetric, NULL)) != DSPARK_OK) return st;
    if (r->is_float) {
        r->symmetric = 1; /* floats have no zero point: false and null mean nothing there */
    } else if (!r->symmetric) {
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "symmetric",
                                "Quark's integers with zero points are not served");
    }
    if ((st = read_scheme(g, s, r)) != DSPARK_OK) return st;

    if (second) {
        if (r->num_bits != 4 || r->group_size != 16 ||
            strncasecmp(second->dtype, "fp8_e4m3", 8) != 0 ||
            (second->qscheme && !is_word(second->qscheme, "per_tensor")))
            return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "dtype",
                                    "two specifications are served as NVFP4 only: fp4 per_group "
                                    "16, then fp8_e4m3 per_tensor");
        r->strategy = DSPARK__STRATEGY_TENSOR_GROUP;
    } else if (r->num_bits == 4 && (r->group_size != 32 || (s->scale_format && !e8m0))) {
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "dtype",
                                "fp4 is served per_group 32 with scale_format e8m0, or as NVFP4");
    }
    return DSPARK_OK;
}

/* {"weight": spec, [spec, spec] or null, ...}; activations are not looked at. */
static dspark_status read_layer(const dspark__cfg *g, dspark__quant_rule *r)
{
    const json_t *weight = dspark__cfg_get(g, "weight");
    dspark__quant_cursor c[2];
    spec specs[2];
    size_t n = json_is_array(weight) ? json_array_size(weight) : 1;
    dspark_status st;

    memset(r, 0, sizeof *r);
    r->quantised = -1;
    if ((st = dspark__quant_refuse_rotations(g)) != DSPARK_OK) return st;
    if (!weight) return DSPARK_OK;
    if (n == 0 || n > 2)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "weight", "%zu specifications", n);
    for (size_t i = 0; i < n; i++) {
        const json_t *one = json_is_array(weight) ? json_array_get(weight, i) : weight;
        if (!json_is_object(one))
            return dspark__cfg_fail(g, DSPARK_EFORMAT, "weight", "a specification is an object");
        dspark__quant_descend(&c[i], g, "weight", one);
        if ((st = read_spec(&c[i].cfg, &specs[i])) != DSPARK_OK) return st;
    }
    return make_rule(&c[0].cfg, &specs[0], n == 2 ? &specs[1] : NULL, r);
}

/* name or pattern -> layer. Quark takes the first that fits, in the order of the file. */
static dspark_status read_named(dspark__quant_config *q, const dspark__cfg *g, const char *key,
                                uint32_t tier)
{
    const json_t *layers = NULL;
    dspark__quant_cursor all, one;
    dspark_status st = dspark__cfg_object(g, key, &layers);
    const char *name;
    json_t *layer;

    if (st != DSPARK_OK || !layers) return st;
    dspark__quant_descend(&all, g, key, layers);
    json_object_foreach((json_t *)(uintptr_t)layers, name, layer)
    {
        dspark__quant_rule rule;
        dspark__match_kind kind;
        const char *text;
        uint32_t group;

        if (tier == TIER_CLASS && strcasecmp(name, "Linear") != 0 &&
            strcasecmp(name, "nn.Linear") != 0)
            continue; /* convolutions, embeddings: no linear of the draft */
        if (!json_is_object(layer))
            return dspark__cfg_fail(&all.cfg, DSPARK_EFORMAT, name, "a layer is an object");
        dspark__quant_descend(&one, &all.cfg, name, layer);
        if ((st = read_layer(&one.cfg, &rule)) != DSPARK_OK) return st;
        if ((st = dspark__quant_add_group(q, &one.cfg, &rule, &group)) != DSPARK_OK) return st;
        dspark__quant_entry_glob(name, &kind, &text);
        if (tier == TIER_CLASS) kind = DSPARK__MATCH_ALL;
        st = dspark__quant_add_target(q, &all.cfg, name, kind, text, group, tier);
        if (st != DSPARK_OK) return st;
    }
    return DSPARK_OK;
}

/* What was done before quantising: of the algorithms only rotations leave a trace in how the model
 * must be computed. */
static dspark_status check_algorithms(const dspark__cfg *g)
{
    const json_t *algorithms = dspark__cfg_get(g, "algo_config");
    size_t n = json_is_array(algorithms) ? json_array_size(algorithms) : algorithms != NULL;

    for (size_t i = 0; i < n; i++) {
        const json_t *one = json_is_array(algorithms) ? json_array_get(algorithms, i) : algorithms;
        const char *name = json_string_value(json_object_get(one, "name"));
        dspark__quant_cursor c;

        if (!json_is_object(one)) continue;
        if (name && (strcasestr(name, "rotat") || strcasestr(name, "quarot")))
            return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "algo_config",
                                    "%.60s: rotations are not served", name);
        dspark__quant_descend(&c, g, "algo_config", one);
        dspark_status st = dspark__quant_refuse_rotations(&c.cfg);
        if (st != DSPARK_OK) return st;
    }
    return DSPARK_OK;
}

static dspark_status check_export(const dspark__cfg *g)
{
    const json_t *object = NULL;
    const char *weight_format = NULL;
    dspark__quant_cursor c;
    dspark_status st = dspark__cfg_object(g, "export", &object);

    if (st != DSPARK_OK || !object) return st;
    dspark__quant_descend(&c, g, "export", object);
    if ((st = dspark__cfg_string(&c.cfg, "weight_format", &weight_format)) != DSPARK_OK) return st;
    if (!weight_format || strcasecmp(weight_format, "real_quantized") == 0) return DSPARK_OK;
    return dspark__cfg_fail(&c.cfg, DSPARK_EUNSUPPORTED, "weight_format",
                            "%.60s: only weights stored as real_quantized are served",
                            weight_format);
}

dspark_status dspark__quant_read_quark(dspark__quant_config *q, const dspark__cfg *g)
{
    const json_t *global = NULL;
    dspark__quant_cursor c;
    dspark__quant_rule rule;
    uint32_t group;
    dspark_status st;

    if ((st = dspark__quant_refuse_rotations(g)) != DSPARK_OK) return st;
    if ((st = check_algorithms(g)) != DSPARK_OK) return st;
    if ((st = check_export(g)) != DSPARK_OK) return st;
    if (dspark__cfg_get(g, "kv_cache_quant_config"))
        dspark__quant_note(q, "the scheme of the KV cache is the caller's: not read");
    if ((st = read_named(q, g, "layer_quant_config", TIER_NAME)) != DSPARK_OK) return st;
    if ((st = read_named(q, g, "layer_type_quant_config", TIER_CLASS)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_object(g, "global_quant_config", &global)) != DSPARK_OK) return st;
    if (global) {
        dspark__quant_descend(&c, g, "global_quant_config", global);
        if ((st = read_layer(&c.cfg, &rule)) != DSPARK_OK) return st;
        if ((st = dspark__quant_add_group(q, g, &rule, &group)) != DSPARK_OK) return st;
        st = dspark__quant_add_target(q, g, "global_quant_config", DSPARK__MATCH_ALL, "", group,
                                      TIER_GLOBAL);
        if (st != DSPARK_OK) return st;
    }
    return dspark__quant_add_ignore_list(q, g, "exclude", dspark__quant_entry_glob, NULL);
}
