/* quantization_config: what a checkpoint says of its own quantisation, in the dialects of
 * compressed-tensors, fp8 (DeepSeek), ModelOpt (config.json or hf_quant_config.json) and Quark.
 * Only a cross-check of what the tensors show, and the answer where tensors alone are ambiguous.
 *
 * How a module is found: its name is tried as it stands in the file, and with "model." put before
 * it or taken away. What is on an ignore list is not quantised, whatever targets say. Else the
 * first target counts, exact names before patterns before classes, in the order of the file within
 * each kind. A class ("Linear"), and a rule for the whole model, mean every module but embeddings
 * and norms: last parts of a name with "embed" or "norm" in them, and markov_w1.
 *
 *     dialect              entries are
 *     compressed-tensors   a module name; re: + a regular expression, anchored at the start only;
 *                          the class Linear
 *     ModelOpt, Quark      a module name or shell wildcards over the whole name; re: as above
 *     fp8                  whole dotted parts anywhere in the name ("mlp.gate", never "layers.1" in
 *                          "layers.11"); wildcards and re: as above
 *
 * A plain name on an ignore list that stands above the module ("layers.3.self_attn" above
 * "layers.3.self_attn.q_a_proj") is ambiguous: compressed-tensors compares whole names and would
 * quantise what is below, people who write such an entry mean just that. The rule then says
 * quantised = -1 with ignored_by_parent = 1 and keeps the other fields of the target, so that
 * either is in agreement with it and the tensors decide. A name never reaches its neighbour:
 * "layers.3" is not above "layers.30.mlp". */
#ifndef DSPARK_QUANT_QUANT_CONFIG_H
#define DSPARK_QUANT_QUANT_CONFIG_H

#include "dspark/dspark.h"

typedef enum dspark__quant_method {
    DSPARK__QUANT_NONE = 0,
    DSPARK__QUANT_COMPRESSED_TENSORS,
    DSPARK__QUANT_FP8,
    DSPARK__QUANT_MODELOPT,
    DSPARK__QUANT_QUARK
} dspark__quant_method;

typedef enum dspark__quant_strategy {
    DSPARK__STRATEGY_UNKNOWN = 0,
    DSPARK__STRATEGY_TENSOR,
    DSPARK__STRATEGY_CHANNEL,
    DSPARK__STRATEGY_GROUP,
    DSPARK__STRATEGY_BLOCK,
    DSPARK__STRATEGY_TENSOR_GROUP
} dspark__quant_strategy;

/* What the config says of one module's weight. Zero fields: the config does not say. */
typedef struct dspark__quant_rule {
    dspark__quant_method method;
    int quantised; /* 1 targeted, -1 ignored or excluded, 0 the config does not reach it */
    uint32_t num_bits;
    int is_float;  /* 1 float, 0 int; meaningful when num_bits != 0 */
    int symmetric; /* 1 or 0 */
    dspark__quant_strategy strategy;
    uint32_t group_size;
    uint32_t block_rows, block_cols;
    int act_order;  /* 1: actorder = group */
    int dense_bits; /* packing of 3/5/6/7 bits: 1 dense, -1 old, 0 unknown (by version) */
    /* Static, or NULL. compressed-tensors: "nvfp4-pack-quantized", ... as written or inferred;
     * ModelOpt: "NVFP4", ...; fp8: "fp8_e4m3", "fp8_e5m2", or "fp8" without a fmt; Quark: its dtype. */
    const char *format;
    int ignored_by_parent; /* 1: only a name above the module is on the ignore list */
} dspark__quant_rule;

typedef struct dspark__quant_config dspark__quant_config;

/* From config.json's text (quantization_config, then text_config.quantization_config, then
 * compression_config), and where it has none of these, from hf_quant_config.json's. Either text may
 * be NULL. When both speak and both name ModelOpt's quant_algo, they must agree. *out is NULL when
 * there is none. `where` names config.json in errors. DSPARK_EUNSUPPORTED by name: other methods
 * (gptq, awq, bitsandbytes, exl3, ...), transforms and rotations, sparse formats, low-rank
 * residuals, patterns outside the supported subset (match.h). DSPARK_EFORMAT (JSON, types, broken
 * patterns), DSPARK_EMODEL (values that contradict each other), DSPARK_ENOMEM. */
dspark_status dspark__quant_config_parse(dspark__quant_config **out, const char *config_text,
                                         size_t n_config, const char *hf_quant_text, size_t n_hf,
                                         const char *where, dspark_error *err);
void dspark__quant_config_free(dspark__quant_config *q);

/* The rule for a module ("layers.0.mlp.up_proj", as in the file). Linear in the name's length,
 * allocates nothing. NULL config gives an all-zero rule. DSPARK_EINVAL: no name, or one of more
 * than 1024 bytes. */
dspark_status dspark__quant_config_rule(const dspark__quant_config *q, const char *module,
                                        dspark__quant_rule *rule, dspark_error *err);

/* One line for people: "compressed-tensors, nvfp4-pack-quantized, 2 groups, 3 ignored"; "none" for
 * NULL. Lives as long as q. */
const char *dspark__quant_config_text(const dspark__quant_config *q);
/* What was read over, one sentence each: kv_cache_scheme, quantization_status frozen, ... */
size_t dspark__quant_config_note_count(const dspark__quant_config *q);
const char *dspark__quant_config_note(const dspark__quant_config *q, size_t i);

#endif
