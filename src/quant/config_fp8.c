/* The fp8 dialect (DeepSeek, Hugging Face's FineGrainedFP8): one rule for every module that is not
 * on the list of exceptions. Scales are called weight_scale_inv or weight_scale; which of them is
 * there the tensors tell, and both multiply. */
#include <strings.h>

#include "quant/config_dialect.h"

/* A string that must be one of two; absent or null is fine. *which (or NULL): 1, 2, or 0. */
static dspark_status check_word(const dspark__cfg *g, const char *key, const char *one,
                                const char *two, int *which)
{
    const char *word = NULL;
    dspark_status st = dspark__cfg_string(g, key, &word);
    int n = st != DSPARK_OK || !word ? 0 : strcasecmp(word, one) == 0 ? 1 : strcasecmp(word, two) == 0 ? 2 : -1;

    if (which) *which = n;
    if (n >= 0) return st;
    return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, key, "%.60s is neither %s nor %s", word, one,
                            two);
}

dspark_status dspark__quant_read_fp8(dspark__quant_config *q, const dspark__cfg *g)
{
    dspark__quant_rule rule = {.quantised = 1,
                               .num_bits = 8,
                               .is_float = 1,
                               .symmetric = 1,
                               .strategy = DSPARK__STRATEGY_TENSOR,
                               .format = "fp8"};
    uint32_t group;
    int blocks, present, fmt;
    dspark_status st;

    if ((st = dspark__quant_refuse_rotations(g)) != DSPARK_OK) return st;
    if ((st = check_word(g, "activation_scheme", "dynamic", "static", NULL)) != DSPARK_OK) return st;
    if ((st = check_word(g, "fmt", "e4m3", "e5m2", &fmt)) != DSPARK_OK) return st;
    if (fmt) rule.format = fmt == 1 ? "fp8_e4m3" : "fp8_e5m2";
    /* Says how scales were rounded, not what they are. */
    if ((st = check_word(g, "scale_fmt", "ue8m0", "float", NULL)) != DSPARK_OK) return st;
    st = dspark__quant_block(g, "weight_block_size", &rule.block_rows, &rule.block_cols, &blocks);
    if (st != DSPARK_OK) return st;
    if (blocks) rule.strategy = DSPARK__STRATEGY_BLOCK;

    st = dspark__quant_add_ignore_list(q, g, "ignored_layers", dspark__quant_entry_path, &present);
    if (st == DSPARK_OK && !present)
        st = dspark__quant_add_ignore_list(q, g, "modules_to_not_convert", dspark__quant_entry_path,
                                           NULL);
    if (st != DSPARK_OK) return st;
    if ((st = dspark__quant_add_group(q, g, &rule, &group)) != DSPARK_OK) return st;
    return dspark__quant_add_target(q, g, "quant_method", DSPARK__MATCH_ALL, "", group, 0);
}
