/* quantization_config: what a checkpoint says of its own quantisation, in the dialects of
 * compressed-tensors, fp8 (DeepSeek), ModelOpt (config.json or hf_quant_config.json) and Quark. Only a
 * cross-check of what the tensors show, and the answer where tensors alone are ambiguous. */
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
    int quantised;               /* 1 targeted, -1 ignored / excluded, 0 the config does not reach it */
    uint32_t num_bits;
    int is_float;                /* 1 float, 0 int; meaningful when num_bits != 0 */
    int symmetric;               /* 1 or 0 */
    dspark__quant_strategy strategy;
    uint32_t group_size;
    uint32_t block_rows, block_cols;
    int act_order;               /* 1: actorder = group */
    int dense_bits;              /* packing of 3/5/6/7 bits: 1 dense, -1 old, 0 unknown (by version) */
    const char *format;          /* as written, owned by the config */
} dspark__quant_rule;

typedef struct dspark__quant_config dspark__quant_config;

/* From config.json's text (quantization_config, text_config.quantization_config, compression_config) and,
 * when not NULL, hf_quant_config.json's. *out is NULL when there is none. DSPARK_EUNSUPPORTED by name:
 * other methods (gptq, awq, bitsandbytes, exl3, ...), transforms and rotations, sparse formats,
 * low-rank residuals, patterns outside the supported subset. DSPARK_EFORMAT, DSPARK_EMODEL. */
dspark_status dspark__quant_config_parse(dspark__quant_config **out, const char *config_text,
                                         size_t n_config, const char *hf_quant_text, size_t n_hf,
                                         const char *where, dspark_error *err);
void dspark__quant_config_free(dspark__quant_config *q);

/* The rule for a module ("layers.0.mlp.up_proj", as in the file): targets, ignore, wildcards, regular
 * expressions (linear time), with and without a "model." prefix. NULL config gives an all-zero rule. */
dspark_status dspark__quant_config_rule(const dspark__quant_config *q, const char *module,
                                        dspark__quant_rule *rule, dspark_error *err);

#endif
