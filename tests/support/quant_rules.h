/* Tests of quantization_config: JSON with ' for ", parsed, and rules as one line of text. Failures
 * end the running cmocka test. */
#ifndef DSPARK_TESTS_SUPPORT_QUANT_RULES_H
#define DSPARK_TESTS_SUPPORT_QUANT_RULES_H

#include "quant/quant_config.h"

/* A copy with " for ', for free(); NULL for NULL. */
char *quoted(const char *text);
/* Either may be NULL. */
dspark_status parse_both(dspark__quant_config **q, const char *config, const char *hf,
                         dspark_error *err);
dspark__quant_config *parse_ok(const char *config, const char *hf);

/* "ct yes i4asym group g128 actorder new pack-quantized": method, quantised (yes, no, - for not
 * reached), then what is not zero. Overwritten by the next call. */
const char *rule_text(const dspark__quant_config *q, const char *module);
void expect_rule(const char *config, const char *module, const char *want);
/* `where` and `says` are parts of the error's two texts. */
void expect_error(const char *config, const char *hf, dspark_status status, const char *where,
                  const char *says);

#define KV "layers.0.self_attn.kv_a_proj_with_mqa"

#define FP8(rest)  "{'quantization_config': {'quant_method': 'fp8'" rest "}}"
#define HF(rest)   "{'producer': {'name': 'modelopt'}, 'quantization': {" rest "}}"
#define MO(rest)   "{'quantization_config': {'quant_method': 'modelopt', " rest "}}"
#define Q(rest)    "{'quantization_config': {'quant_method': 'quark', " rest "}}"
#define QW(weight) Q("'global_quant_config': {'weight': " weight ", 'input_tensors': null}")

#endif
