/* Fuzz target: whatever config.json and hf_quant_config.json say of quantisation, reading it ends in
 * rules that hold together or in a named error, and every module has an answer. An input is
 * config.json's text, then, behind a NUL, hf_quant_config.json's, then, behind another, a name. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant/quant_config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Violations stop the fuzzer, and the replaying test with it. */
static void fuzz_demand(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "fuzz_quant_config: %s\n", what);
    abort();
}

static void fuzz_rule(const dspark__quant_config *q, const char *module)
{
    dspark__quant_rule r;
    dspark_error err;
    dspark_status st = dspark__quant_config_rule(q, module, &r, &err);

    if (*module == '\0' || strlen(module) > 1024) {
        fuzz_demand(st == DSPARK_EINVAL, "a name that is none");
        return;
    }
    fuzz_demand(st == DSPARK_OK, "a module without a rule");
    fuzz_demand(r.method != DSPARK__QUANT_NONE, "a rule without a method");
    fuzz_demand(r.quantised >= -1 && r.quantised <= 1, "neither quantised nor not");
    fuzz_demand(!r.ignored_by_parent || r.quantised == -1, "ignored and yet not");
    if (r.quantised <= 0) return;
    fuzz_demand(r.num_bits >= 1 && r.num_bits <= 8, "an odd number of bits");
    fuzz_demand(!r.is_float || r.symmetric, "floats with zero points");
    fuzz_demand(r.strategy != DSPARK__STRATEGY_UNKNOWN, "no strategy");
    fuzz_demand((r.group_size != 0) == (r.strategy == DSPARK__STRATEGY_GROUP ||
                                        r.strategy == DSPARK__STRATEGY_TENSOR_GROUP),
                "groups without a strategy of groups");
    fuzz_demand((r.block_rows != 0) == (r.block_cols != 0), "half a block");
    fuzz_demand(!r.block_rows || r.strategy == DSPARK__STRATEGY_BLOCK, "blocks unasked");
    fuzz_demand(!r.act_order || r.group_size, "an order without groups");
    fuzz_demand(r.format != NULL, "no format");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const modules[] = {"layers.0.self_attn.kv_a_proj_with_mqa",
                                          "model.layers.13.mlp.up_proj",
                                          "context_proj",
                                          "lm_head",
                                          "embed_tokens",
                                          "model."};
    const uint8_t *first = size ? memchr(data, '\0', size) : NULL, *second = NULL;
    size_t n_config = first ? (size_t)(first - data) : size, n_hf = 0;
    const char *hf = NULL;
    char name[1200] = "";
    dspark__quant_config *q = (void *)name;
    dspark_error err = {0};

    if (first) {
        size_t left = size - n_config - 1;
        hf = (const char *)first + 1;
        second = left ? memchr(hf, '\0', left) : NULL;
        n_hf = second ? (size_t)(second - (const uint8_t *)hf) : left;
        if (second) {
            size_t n_name = left - n_hf - 1;
            if (n_name >= sizeof name) n_name = sizeof name - 1;
            memcpy(name, second + 1, n_name);
            name[n_name] = '\0';
        }
        if (n_hf == 0) hf = NULL;
    }
    dspark_status st =
        dspark__quant_config_parse(&q, (const char *)data, n_config, hf, n_hf, "config.json", &err);
    if (st != DSPARK_OK) {
        fuzz_demand(!q, "an object in spite of an error");
        fuzz_demand(err.code == st && err.message[0] && err.where[0], "an error without a name");
        fuzz_demand(st == DSPARK_EFORMAT || st == DSPARK_EUNSUPPORTED || st == DSPARK_EMODEL ||
                        st == DSPARK_ENOMEM,
                    "an unexpected status");
        return 0;
    }
    fuzz_demand(dspark__quant_config_text(q)[0] != '\0', "no text");
    for (size_t i = 0; i < dspark__quant_config_note_count(q); i++)
        fuzz_demand(dspark__quant_config_note(q, i)[0] != '\0', "an empty note");
    if (q) {
        for (size_t i = 0; i < sizeof modules / sizeof modules[0]; i++) fuzz_rule(q, modules[i]);
        fuzz_rule(q, name);
    }
    dspark__quant_config_free(q);
    return 0;
}
