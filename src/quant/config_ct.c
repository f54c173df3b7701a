/* The compressed-tensors dialect: groups of targets with the arguments of their weights, the
 * formats they are stored in, and the ignore list. Activations are looked at only where the format
 * of the weights depends on them. */
#include <string.h>
#include <strings.h>

#include "quant/config_dialect.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

enum { TIER_EXACT, TIER_PATTERN, TIER_CLASS };

enum { DENSE, INT, FLOAT, NAIVE, PACK, NVFP4, MXFP4, MXFP8, MIXED };
static const char *const formats[] = {
    "dense",          "int-quantized",        "float-quantized",      "naive-quantized",
    "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
    "mixed-precision"};

/* ---- formats --------------------------------------------------------------------------------- */

/* The format named by `key` into *format (an index), -1 when the key is absent. */
static dspark_status read_format(const dspark__cfg *g, const char *key, int *format)
{
    static const char *const sparse[] = {"sparse-bitmask", "sparse-24-bitmask", "marlin-24"};
    const char *word = NULL;
    dspark_status st = dspark__cfg_string(g, key, &word);

    *format = -1;
    if (st != DSPARK_OK || !word) return st;
    if ((*format = dspark__quant_word(formats, COUNT(formats), word)) >= 0) return DSPARK_OK;
    if (dspark__quant_word(sparse, COUNT(sparse), word) >= 0)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, key,
                                "the sparse format %.60s is not served", word);
    return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, key, "the format %.60s is not served", word);
}

/* What compressed-tensors would store these arguments in: the first that fits, most special
 * first. */
static int infer_format(const dspark__quant_rule *r, int scale_is_u8, int has_input)
{
    if (r->is_float && r->num_bits == 4 && r->group_size == 32) return MXFP4;
    if (r->is_float && r->num_bits == 8 && r->group_size == 32 && scale_is_u8) return MXFP8;
    if (r->is_float && r->num_bits == 4 && r->group_size == 16) return NVFP4;
    if (!r->is_float) return has_input ? INT : PACK;
    return has_input ? FLOAT : NAIVE;
}

static int format_fits(int format, const dspark__quant_rule *r)
{
    switch (format) {
    case INT: return !r->is_float;
    case FLOAT: return r->is_float && r->num_bits == 8;
    case NAIVE: return r->num_bits == 8;
    case PACK: return !r->is_float;
    case NVFP4: return r->is_float && r->num_bits == 4 && r->group_size == 16;
    case MXFP4: return r->is_float && r->num_bits == 4 && r->group_size == 32;
    case MXFP8: return r->is_float && r->num_bits == 8 && r->group_size == 32;
    default: return 0;
    }
}

/* ---- the arguments of weights ---------------------------------------------------------------- */

static dspark_status refuse_unknown(const dspark__cfg *g, const char *const *known, size_t n)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)g->object, key, value)
    {
        size_t i = 0;
        while (i < n && strcmp(known[i], key) != 0) i++;
        if (i == n)
            return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, key,
                                    "the key is not known here, and may change the weights");
    }
    return DSPARK_OK;
}

/* One of a list of words, whatever its case; -1 when absent. */
static dspark_status read_word(const dspark__cfg *g, const char *key, const char *const *words,
                               size_t n, int *index)
{
    const char *word = NULL;
    dspark_status st = dspark__cfg_string(g, key, &word);

    *index = -1;
    if (st != DSPARK_OK || !word) return st;
    *index = dspark__quant_word(words, n, word);
    if (*index >= 0) return DSPARK_OK;
    return dspark__cfg_fail(g, DSPARK_EMODEL, key, "%.60s is none of its words", word);
}

static dspark_status read_strategy(const dspark__cfg *g, dspark__quant_rule *r)
{
    static const char *const words[] = {"tensor",       "channel", "group",    "block",
                                        "tensor_group", "token",   "attn_head"};
    static const dspark__quant_strategy strategies[] = {
        DSPARK__STRATEGY_TENSOR, DSPARK__STRATEGY_CHANNEL, DSPARK__STRATEGY_GROUP,
        DSPARK__STRATEGY_BLOCK, DSPARK__STRATEGY_TENSOR_GROUP};
    int64_t group_size = 0;
    int index, grouped, has_group_size, has_block;
    dspark_status st;

    if ((st = read_word(g, "strategy", words, COUNT(words), &index)) != DSPARK_OK) return st;
    st = dspark__cfg_int(g, "group_size", -1, 1 << 20, &group_size, &has_group_size);
    if (st != DSPARK_OK) return st;
    st = dspark__quant_block(g, "block_structure", &r->block_rows, &r->block_cols, &has_block);
    if (st != DSPARK_OK) return st;

    if (index >= (int)COUNT(strategies))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "strategy",
                                "%s is a strategy of activations, not of weights", words[index]);
    if (index >= 0) {
        r->strategy = strategies[index];
    } else if (has_group_size && group_size == 0) {
        return dspark__cfg_fail(g, DSPARK_EMODEL, "group_size", "groups of 0 values");
    } else {
        r->strategy = !has_group_size  ? DSPARK__STRATEGY_TENSOR
                      : group_size > 0 ? DSPARK__STRATEGY_GROUP
                                       : DSPARK__STRATEGY_CHANNEL;
    }
    grouped = r->strategy == DSPARK__STRATEGY_GROUP || r->strategy == DSPARK__STRATEGY_TENSOR_GROUP;
    if (grouped && group_size <= 0)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "group_size",
                                "the strategy needs a positive group size");
    if (!grouped && group_size > 0)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "group_size",
                                "%d, but the strategy has no groups", (int)group_size);
    if (grouped) r->group_size = (uint32_t)group_size;
    if (has_block != (r->strategy == DSPARK__STRATEGY_BLOCK))
        return dspark__cfg_fail(g, DSPARK_EMODEL, "block_structure",
                                "goes with the strategy block, and the strategy with it");
    return DSPARK_OK;
}

/* null, a boolean, or a word with an alias. "weight" orders columns while calibrating and changes
 * nothing that is stored. */
static dspark_status read_act_order(const dspark__cfg *g, dspark__quant_rule *r)
{
    static const char *const words[] = {"group", "dynamic", "weight", "static"};
    const json_t *v = dspark__cfg_get(g, "actorder");
    int index;
    dspark_status st;

    if (!v) return DSPARK_OK;
    if (json_is_boolean(v)) {
        r->act_order = json_is_true(v);
    } else {
        st = read_word(g, "actorder", words, COUNT(words), &index);
        if (st != DSPARK_OK) return st;
        r->act_order = index < 2;
    }
    if (r->act_order && r->group_size == 0)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "actorder", "needs a strategy with groups");
    return DSPARK_OK;
}

static dspark_status read_weights(const dspark__cfg *g, dspark__quant_rule *r, int *scale_is_u8)
{
    static const char *const known[] = {
        "num_bits", "type",     "symmetric",   "group_size", "strategy", "block_structure",
        "dynamic",  "actorder", "scale_dtype", "zp_dtype",   "observer", "observer_kwargs"};
    static const char *const types[] = {"int", "float"};
    const json_t *dynamic = dspark__cfg_get(g, "dynamic");
    const char *scale_dtype = NULL;
    int type;
    dspark_status st;

    r->quantised = 1;
    r->num_bits = 8;
    r->symmetric = 1;
    if ((st = refuse_unknown(g, known, COUNT(known))) != DSPARK_OK) return st;
    if ((st = dspark__cfg_u32(g, "num_bits", 1, 64, &r->num_bits, NULL)) != DSPARK_OK) return st;
    if ((st = read_word(g, "type", types, COUNT(types), &type)) != DSPARK_OK) return st;
    r->is_float = type == 1;
    if (r->is_float ? r->num_bits != 4 && r->num_bits != 8 : r->num_bits > 8)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "num_bits", "%s of %u bits",
                                r->is_float ? "floats" : "integers", r->num_bits);
    if ((st = dspark__cfg_bool(g, "symmetric", &r->symmetric, NULL)) != DSPARK_OK) return st;
    if (r->is_float && !r->symmetric)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "symmetric", "floats with zero points");
    if (dynamic && !json_is_false(dynamic))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "dynamic",
                                "weights whose scales are not stored");
    if ((st = read_strategy(g, r)) != DSPARK_OK) return st;
    if ((st = read_act_order(g, r)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_string(g, "scale_dtype", &scale_dtype)) != DSPARK_OK) return st;
    *scale_is_u8 = scale_dtype &&
                   (strcmp(scale_dtype, "torch.uint8") == 0 || strcmp(scale_dtype, "uint8") == 0);
    return DSPARK_OK;
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* `format`: the group's own or the top level's; MIXED and -1 leave it to the arguments. */
static dspark_status settle_format(const dspark__cfg *g, int format, int scale_is_u8, int has_input,
                                   dspark__quant_rule *r)
{
    if (format < 0 || format == MIXED) format = infer_format(r, scale_is_u8, has_input);
    if (format == DENSE) { /* stored as they were, whatever the arguments say */
        memset(r, 0, sizeof *r);
        r->quantised = -1;
        r->format = formats[DENSE];
        return DSPARK_OK;
    }
    if (!format_fits(format, r))
        return dspark__cfg_fail(g, DSPARK_EMODEL, "weights", "%s of %u bits%s do not fit %s",
                                r->is_float ? "floats" : "integers", r->num_bits,
                                r->group_size ? " in such groups" : "", formats[format]);
    if (format == NVFP4) r->strategy = DSPARK__STRATEGY_TENSOR_GROUP;
    r->format = formats[format];
    return DSPARK_OK;
}

static dspark_status read_group(const dspark__cfg *g, int format, dspark__quant_rule *r)
{
    static const char *const known[] = {"targets", "weights", "input_activations",
                                        "output_activations", "format"};
    const json_t *weights = NULL, *input = NULL;
    dspark__quant_cursor args;
    int own, scale_is_u8 = 0;
    dspark_status st;

    memset(r, 0, sizeof *r);
    if ((st = refuse_unknown(g, known, COUNT(known))) != DSPARK_OK) return st;
    if ((st = read_format(g, "format", &own)) != DSPARK_OK) return st;
    if (own == MIXED) return dspark__cfg_fail(g, DSPARK_EMODEL, "format", "a group has one format");
    if ((st = dspark__cfg_object(g, "weights", &weights)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_object(g, "input_activations", &input)) != DSPARK_OK) return st;
    if (!weights) { /* activations only */
        r->quantised = -1;
        r->format = formats[DENSE];
        return DSPARK_OK;
    }
    dspark__quant_descend(&args, g, "weights", weights);
    if ((st = read_weights(&args.cfg, r, &scale_is_u8)) != DSPARK_OK) return st;
    return settle_format(g, own >= 0 ? own : format, scale_is_u8, input != NULL, r);
}

/* A group may be a preset's name with nothing but targets. */
static dspark_status read_preset(const dspark__cfg *g, const char *name, int format,
                                 dspark__quant_rule *r)
{
#define S(strategy) DSPARK__STRATEGY_##strategy
    static const struct {
        const char *name;
        unsigned bits, is_float, symmetric, group, block, u8, input;
        dspark__quant_strategy strategy;
    } presets[] = {
        {"FP8", 8, 1, 1, 0, 0, 0, 1, S(TENSOR)},
        {"FP8_DYNAMIC", 8, 1, 1, 0, 0, 0, 1, S(CHANNEL)},
        {"FP8_BLOCK", 8, 1, 1, 0, 128, 0, 1, S(BLOCK)},
        {"NVFP4", 4, 1, 1, 16, 0, 0, 1, S(TENSOR_GROUP)},
        {"NVFP4A16", 4, 1, 1, 16, 0, 0, 0, S(TENSOR_GROUP)},
        {"MXFP4", 4, 1, 1, 32, 0, 1, 1, S(GROUP)},
        {"MXFP4A16", 4, 1, 1, 32, 0, 1, 0, S(GROUP)},
        {"MXFP8", 8, 1, 1, 32, 0, 1, 1, S(GROUP)},
        {"MXFP8A16", 8, 1, 1, 32, 0, 1, 0, S(GROUP)},
        {"W8A8", 8, 0, 1, 0, 0, 0, 1, S(CHANNEL)},
        {"INT8", 8, 0, 1, 0, 0, 0, 1, S(CHANNEL)},
        {"W4A16", 4, 0, 1, 128, 0, 0, 0, S(GROUP)},
        {"W4A16_ASYM", 4, 0, 0, 128, 0, 0, 0, S(GROUP)},
    };
#undef S
    memset(r, 0, sizeof *r);
    for (size_t i = 0; i < COUNT(presets); i++) {
        if (strcasecmp(presets[i].name, name) != 0) continue;
        r->quantised = 1;
        r->num_bits = presets[i].bits;
        r->is_float = (int)presets[i].is_float;
        r->symmetric = (int)presets[i].symmetric;
        r->group_size = presets[i].group;
        r->block_rows = r->block_cols = presets[i].block;
        r->strategy = presets[i].strategy;
        return settle_format(g, format, (int)presets[i].u8, (int)presets[i].input, r);
    }
    return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, name, "no preset of that name is known");
}

static dspark_status add_targets(dspark__quant_config *q, const dspark__cfg *g, const char *key,
                                 const json_t *list, const dspark__quant_rule *rule)
{
    uint32_t group;
    dspark_status st = dspark__quant_add_group(q, g, rule, &group);

    for (size_t i = 0; st == DSPARK_OK && i < json_array_size(list); i++) {
        const char *entry = json_string_value(json_array_get(list, i)), *text;
        dspark__match_kind kind;

        if (!entry) return dspark__cfg_fail(g, DSPARK_EFORMAT, key, "entry %zu is no string", i);
        dspark__quant_entry_ct(entry, &kind, &text);
        st = dspark__quant_add_target(q, g, key, kind, text, group,
                                      kind == DSPARK__MATCH_EXACT   ? TIER_EXACT
                                      : kind == DSPARK__MATCH_REGEX ? TIER_PATTERN
                                                                    : TIER_CLASS);
    }
    return st;
}

static dspark_status read_groups(dspark__quant_config *q, const dspark__cfg *g, int format)
{
    const json_t *groups = NULL;
    dspark__quant_cursor all, one;
    dspark_status st = dspark__cfg_object(g, "config_groups", &groups);
    const char *name;
    json_t *group;

    if (st != DSPARK_OK || !groups) return st;
    dspark__quant_descend(&all, g, "config_groups", groups);
    json_object_foreach((json_t *)(uintptr_t)groups, name, group)
    {
        dspark__quant_rule rule;
        const json_t *targets = NULL;

        if (json_is_array(group)) {
            if ((st = read_preset(&all.cfg, name, format, &rule)) != DSPARK_OK) return st;
            st = add_targets(q, &all.cfg, name, group, &rule);
        } else if (json_is_object(group)) {
            dspark__quant_descend(&one, &all.cfg, name, group);
            if ((st = read_group(&one.cfg, format, &rule)) != DSPARK_OK) return st;
            if ((st = dspark__cfg_array(&one.cfg, "targets", &targets)) != DSPARK_OK) return st;
            if (!targets)
                return dspark__cfg_fail(&one.cfg, DSPARK_EMODEL, "targets",
                                        "the key is missing, and it has no default");
            st = add_targets(q, &one.cfg, "targets", targets, &rule);
        } else {
            return dspark__cfg_fail(&all.cfg, DSPARK_EFORMAT, name, "a group is an object");
        }
        if (st != DSPARK_OK) return st;
    }
    return DSPARK_OK;
}

/* ---- the top level --------------------------------------------------------------------------- */

/* Digits at *at, one to four; moves behind them. */
static int read_part(const char **at, unsigned *value)
{
    size_t n = strspn(*at, "0123456789");

    *value = 0;
    if (n == 0 || n > 4) return 0;
    for (; n > 0; n--) *value = *value * 10 + (unsigned)(*(*at)++ - '0');
    return 1;
}

/* Dense packing of 3, 5, 6 and 7 bits came with 0.18.0; 0.17.1 was the last before. Builds between
 * the two, and whatever is not three numbers, say nothing. */
static int dense_bits_of(const char *version)
{
    unsigned part[3];

    if (!version) return 0;
    for (int i = 0; i < 3; i++) {
        if (i > 0 && *version++ != '.') return 0;
        if (!read_part(&version, &part[i])) return 0;
    }
    int tagged = *version != '\0'; /* 0.18.0.a20260610: before the release */
    if (part[0] > 0 || part[1] > 18 || (part[1] == 18 && part[2] > 0)) return 1;
    if (part[1] == 18) return tagged ? 0 : 1;
    if (part[1] < 17 || part[2] == 0) return -1;
    return part[2] == 1 && !tagged ? -1 : 0;
}

/* "compressed" is how files should be. Many that are in use say "frozen" and are compressed all the
 * same; one that is not shows scales beside weights that need none, which is refused by tensors.
 * The other states have no meaningful scales. */
static dspark_status check_status(dspark__quant_config *q, const dspark__cfg *g)
{
    const char *status = NULL;
    dspark_status st = dspark__cfg_string(g, "quantization_status", &status);

    if (st != DSPARK_OK || !status || strcasecmp(status, "compressed") == 0) return st;
    if (strcasecmp(status, "frozen") != 0)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "quantization_status",
                                "%.60s: the weights are not stored compressed; only \"compressed\" "
                                "and \"frozen\" are read",
                                status);
    dspark__quant_note(q, "quantization_status is frozen, not compressed: the tensors decide");
    return DSPARK_OK;
}

static dspark_status refuse_extras(const dspark__cfg *g)
{
    const json_t *sparsity = NULL, *transform = NULL, *groups;
    const char *format = NULL;
    dspark__quant_cursor inner;
    dspark_status st;

    if ((st = dspark__cfg_object(g, "transform_config", &transform)) != DSPARK_OK) return st;
    groups = json_object_get(transform, "config_groups");
    if (json_object_size(transform) > 1 ||
        (json_object_size(transform) == 1 && (!groups || json_object_size(groups) > 0)))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "transform_config",
                                "rotations and transforms around linears are not served");
    if ((st = dspark__cfg_object(g, "sparsity_config", &sparsity)) != DSPARK_OK) return st;
    if (json_object_size(sparsity) == 0) return DSPARK_OK;
    dspark__quant_descend(&inner, g, "sparsity_config", sparsity);
    if ((st = dspark__cfg_string(&inner.cfg, "format", &format)) != DSPARK_OK) return st;
    if (format && strcasecmp(format, formats[DENSE]) == 0) return DSPARK_OK;
    return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "sparsity_config",
                            "the sparse format %.60s is not served", format ? format : "(none)");
}

dspark_status dspark__quant_read_ct(dspark__quant_config *q, const dspark__cfg *g)
{
    const char *version = NULL;
    int format;
    dspark_status st;

    if ((st = refuse_extras(g)) != DSPARK_OK) return st;
    if ((st = check_status(q, g)) != DSPARK_OK) return st;
    if ((st = read_format(g, "format", &format)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_string(g, "version", &version)) != DSPARK_OK) return st;
    q->dense_bits = dense_bits_of(version);
    if (dspark__cfg_get(g, "kv_cache_scheme"))
        dspark__quant_note(q,
                           "kv_cache_scheme concerns the cache, which the caller owns: not read");
    if ((st = read_groups(q, g, format)) != DSPARK_OK) return st;
    return dspark__quant_add_ignore_list(q, g, "ignore", dspark__quant_entry_ct, NULL);
}
