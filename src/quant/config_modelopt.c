/* The ModelOpt dialect: an algorithm's name for all modules or for each, in config.json or in
 * hf_quant_config.json. What an algorithm does to activations is not looked at; algorithms whose
 * weights are more than codes and scales are refused. */
#include <strings.h>

#include "quant/config_dialect.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

enum { TIER_EXACT, TIER_PATTERN, TIER_ALL };

typedef struct algo {
    const char *name;
    uint32_t bits;
    int is_float;
    dspark__quant_strategy strategy;
    uint32_t group, block;
} algo;

static const algo algos[] = {
    {"FP8", 8, 1, DSPARK__STRATEGY_TENSOR, 0, 0},
    {"FP8_PER_CHANNEL_PER_TOKEN", 8, 1, DSPARK__STRATEGY_CHANNEL, 0, 0},
    {"FP8_PB_WO", 8, 1, DSPARK__STRATEGY_BLOCK, 0, 128},
    {"NVFP4", 4, 1, DSPARK__STRATEGY_TENSOR_GROUP, 16, 0},
    {"W4A16_NVFP4", 4, 1, DSPARK__STRATEGY_TENSOR_GROUP, 16, 0},
    {"NVFP4_AWQ", 4, 1, DSPARK__STRATEGY_TENSOR_GROUP, 16, 0},
    {"MXFP8", 8, 1, DSPARK__STRATEGY_GROUP, 32, 0},
    {"W4A8_MXFP4_FP8", 4, 1, DSPARK__STRATEGY_GROUP, 32, 0},
    {"W8A16", 8, 0, DSPARK__STRATEGY_CHANNEL, 0, 0},
    {"W8A8_SQ_PER_CHANNEL", 8, 0, DSPARK__STRATEGY_CHANNEL, 0, 0},
};

static const struct {
    const char *name, *reason;
} refused[] = {
    {"NVFP4_SVD", "its weights carry a low-rank residual"},
    {"W4A16_AWQ", "its codes are packed along the outputs and scale the activations"},
    {"W4A8_AWQ", "its codes are packed along the outputs and scale the activations"},
};

dspark_status dspark__quant_modelopt_object(dspark__quant_cursor *to, const dspark__cfg *g)
{
    const json_t *inner = NULL;
    dspark_status st = dspark__cfg_object(g, "quantization", &inner);

    to->cfg = *g;
    if (inner) dspark__quant_descend(to, g, "quantization", inner);
    return st;
}

/* The algorithm of `g` (*found = NULL: none is named), checked against its group_size. */
static dspark_status read_algo(const dspark__cfg *g, const char *name, const algo **found)
{
    int64_t group_size = 0;
    dspark_status st = dspark__cfg_int(g, "group_size", -1, 1 << 20, &group_size, NULL);

    *found = NULL;
    if (st != DSPARK_OK) return st;
    for (size_t i = 0; i < COUNT(refused); i++)
        if (strcasecmp(refused[i].name, name) == 0)
            return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "quant_algo", "%s is not served: %s",
                                    refused[i].name, refused[i].reason);
    for (size_t i = 0; i < COUNT(algos); i++)
        if (strcasecmp(algos[i].name, name) == 0) *found = &algos[i];
    if (!*found)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "quant_algo", "%.60s is not served", name);
    /* Algorithms without groups leave any number there. */
    if ((*found)->group && group_size > 0 && group_size != (*found)->group)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "group_size",
                                "%d for %s, which is served with %u", (int)group_size,
                                (*found)->name, (*found)->group);
    return DSPARK_OK;
}

/* The group of an algorithm, one for all modules that share it; NULL: not quantised. */
static dspark_status group_of(dspark__quant_config *q, const dspark__cfg *g, const algo *a,
                              uint32_t *group)
{
    dspark__quant_rule rule = {.quantised = -1};

    for (size_t i = 0; i < q->n_groups; i++) {
        if (q->groups[i].format != (a ? a->name : NULL)) continue;
        *group = (uint32_t)i;
        return DSPARK_OK;
    }
    if (a) {
        rule.quantised = 1;
        rule.num_bits = a->bits;
        rule.is_float = a->is_float;
        rule.symmetric = 1;
        rule.strategy = a->strategy;
        rule.group_size = a->group;
        rule.block_rows = rule.block_cols = a->block;
        rule.format = a->name;
        if (strcasecmp(a->name, "NVFP4_AWQ") == 0)
            dspark__quant_note(q, "quant_algo NVFP4_AWQ: pre_quant_scale, where a module has one, "
                                  "decides whether it is served");
    }
    return dspark__quant_add_group(q, g, &rule, group);
}

/* name -> {"quant_algo": ..., "group_size": ...} */
static dspark_status read_layers(dspark__quant_config *q, const dspark__cfg *g,
                                 const json_t *layers)
{
    dspark__quant_cursor all, one;
    const char *name;
    json_t *layer;

    dspark__quant_descend(&all, g, "quantized_layers", layers);
    json_object_foreach((json_t *)(uintptr_t)layers, name, layer)
    {
        const char *algo_name = NULL, *text;
        const algo *a = NULL;
        dspark__match_kind kind;
        uint32_t group;
        dspark_status st;

        if (!json_is_object(layer))
            return dspark__cfg_fail(&all.cfg, DSPARK_EFORMAT, name, "a layer is an object");
        dspark__quant_descend(&one, &all.cfg, name, layer);
        if ((st = dspark__quant_refuse_rotations(&one.cfg)) != DSPARK_OK) return st;
        if ((st = dspark__cfg_string(&one.cfg, "quant_algo", &algo_name)) != DSPARK_OK) return st;
        if (algo_name && (st = read_algo(&one.cfg, algo_name, &a)) != DSPARK_OK) return st;
        if ((st = group_of(q, &one.cfg, a, &group)) != DSPARK_OK) return st;
        dspark__quant_entry_glob(name, &kind, &text);
        st = dspark__quant_add_target(q, &all.cfg, name, kind, text, group,
                                      kind == DSPARK__MATCH_EXACT ? TIER_EXACT : TIER_PATTERN);
        if (st != DSPARK_OK) return st;
    }
    return DSPARK_OK;
}

/* config.json repeats the algorithm as groups of compressed-tensors: bits and type must agree. */
static dspark_status check_groups(const dspark__cfg *g, const algo *a)
{
    const json_t *groups = NULL;
    dspark__quant_cursor all, one, args;
    dspark_status st = dspark__cfg_object(g, "config_groups", &groups);
    const char *name;
    json_t *group;

    if (st != DSPARK_OK || !groups) return st;
    dspark__quant_descend(&all, g, "config_groups", groups);
    json_object_foreach((json_t *)(uintptr_t)groups, name, group)
    {
        const json_t *weights = NULL;
        const char *type = NULL;
        uint32_t bits = a->bits;

        if (!json_is_object(group))
            return dspark__cfg_fail(&all.cfg, DSPARK_EFORMAT, name, "a group is an object");
        dspark__quant_descend(&one, &all.cfg, name, group);
        if ((st = dspark__cfg_object(&one.cfg, "weights", &weights)) != DSPARK_OK) return st;
        if (!weights) continue;
        dspark__quant_descend(&args, &one.cfg, "weights", weights);
        st = dspark__cfg_u32(&args.cfg, "num_bits", 1, 64, &bits, NULL);
        if (st == DSPARK_OK) st = dspark__cfg_string(&args.cfg, "type", &type);
        if (st != DSPARK_OK) return st;
        if (bits != a->bits || (type && strcasecmp(type, a->is_float ? "float" : "int") != 0))
            return dspark__cfg_fail(&args.cfg, DSPARK_EMODEL, "num_bits",
                                    "%s of %u bits, but quant_algo is %s", type ? type : "codes",
                                    bits, a->name);
    }
    return DSPARK_OK;
}

static dspark_status read_top(dspark__quant_config *q, const dspark__cfg *g)
{
    const json_t *layers = NULL;
    const char *name = NULL;
    const algo *a = NULL;
    uint32_t group;
    dspark_status st;

    if ((st = dspark__cfg_string(g, "quant_algo", &name)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_object(g, "quantized_layers", &layers)) != DSPARK_OK) return st;
    if (layers && (st = read_layers(q, g, layers)) != DSPARK_OK) return st;
    if (!name) {
        if (!layers && dspark__cfg_get(g, "config_groups"))
            return dspark__cfg_fail(g, DSPARK_EMODEL, "quant_algo",
                                    "the key is missing, and config_groups do not replace it");
        return DSPARK_OK; /* the cache only, or nothing */
    }
    if (strcasecmp(name, "MIXED_PRECISION") == 0) {
        if (layers) return DSPARK_OK;
        return dspark__cfg_fail(g, DSPARK_EMODEL, "quantized_layers",
                                "the key is missing, and MIXED_PRECISION needs it");
    }
    if ((st = read_algo(g, name, &a)) != DSPARK_OK) return st;
    if ((st = check_groups(g, a)) != DSPARK_OK) return st;
    if ((st = group_of(q, g, a, &group)) != DSPARK_OK) return st;
    return dspark__quant_add_target(q, g, "quant_algo", DSPARK__MATCH_ALL, "", group, TIER_ALL);
}

dspark_status dspark__quant_read_modelopt(dspark__quant_config *q, const dspark__cfg *g)
{
    dspark__quant_cursor c;
    int present;
    dspark_status st = dspark__quant_modelopt_object(&c, g);

    if (st != DSPARK_OK) return st;
    if (c.cfg.object == g->object && !dspark__cfg_get(g, "quant_algo") &&
        !dspark__cfg_get(g, "quantized_layers") && !dspark__cfg_get(g, "quant_method"))
        return dspark__cfg_fail(g, DSPARK_EMODEL, "quantization",
                                "the key is missing, and no other key tells the algorithm");
    if ((st = dspark__quant_refuse_rotations(&c.cfg)) != DSPARK_OK) return st;
    if (dspark__cfg_get(&c.cfg, "kv_cache_quant_algo") ||
        dspark__cfg_get(&c.cfg, "kv_cache_scheme"))
        dspark__quant_note(q, "the scheme of the KV cache is the caller's: not read");
    if ((st = read_top(q, &c.cfg)) != DSPARK_OK) return st;
    st = dspark__quant_add_ignore_list(q, &c.cfg, "exclude_modules", dspark__quant_entry_glob,
                                       &present);
    if (st != DSPARK_OK || present) return st;
    return dspark__quant_add_ignore_list(q, &c.cfg, "ignore", dspark__quant_entry_glob, NULL);
}
