/* quantization_config: where it is found, compressed-tensors' defaults and refusals, how modules
 * are matched, the line for people, hostile sizes and lack of memory. The other dialects are in
 * test_quant_dialects.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/status.h"
#include "support/oom.h"
#include "support/quant_rules.h"

/* One group for Linear with these weights, and what follows behind the groups. */
#define CT(weights, rest) CTG("'targets': ['Linear'], 'weights': {" weights "}", rest)
#define CTG(group, rest)                                                                      \
    "{'quantization_config': {'quant_method': 'compressed-tensors', 'config_groups': {'g0': " \
    "{" group "}}" rest "}}"

/* ---- compressed-tensors ---------------------------------------------------------------------- */

static void test_ct_arguments(void **state)
{
    static const struct {
        const char *config, *want;
    } good[] = {
        /* defaults: 8 bits, int, symmetric, one scale per tensor */
        {CT("", ""), "ct yes i8 tensor pack-quantized"},
        {CT("'num_bits': null, 'type': null, 'strategy': null, 'group_size': null", ""),
         "ct yes i8 tensor pack-quantized"},
        {CT("'group_size': -1", ""), "ct yes i8 channel pack-quantized"},
        {CT("'num_bits': 4, 'group_size': 128", ""), "ct yes i4 group g128 pack-quantized"},
        {CT("'num_bits': 4, 'group_size': 128, 'symmetric': false", ", 'format': 'pack-quantized'"),
         "ct yes i4asym group g128 pack-quantized"},
        {CT("'type': 'FLOAT', 'strategy': 'Channel'", ""), "ct yes f8 channel naive-quantized"},
        {CT("'type': 'float', 'strategy': 'block', 'block_structure': [128, 64]", ""),
         "ct yes f8 block 128x64 naive-quantized"},
        {CT("'type': 'float', 'strategy': 'block', 'block_structure': '128x128'", ""),
         "ct yes f8 block 128x128 naive-quantized"},
        {CT("'num_bits': 4, 'type': 'float', 'strategy': 'tensor_group', 'group_size': 16, "
            "'scale_dtype': 'torch.float8_e4m3fn', 'zp_dtype': 'torch.float8_e4m3fn', "
            "'observer': 'minmax', 'observer_kwargs': {}, 'dynamic': false, 'actorder': null",
            ""),
         "ct yes f4 tensor_group g16 nvfp4-pack-quantized"},
        {CT("'num_bits': 4, 'type': 'float', 'group_size': 16", ""),
         "ct yes f4 tensor_group g16 nvfp4-pack-quantized"},
        {CT("'num_bits': 4, 'type': 'float', 'group_size': 32", ""),
         "ct yes f4 group g32 mxfp4-pack-quantized"},
        {CT("'type': 'float', 'group_size': 32, 'scale_dtype': 'torch.uint8'", ""),
         "ct yes f8 group g32 mxfp8-quantized"},
        {CT("'type': 'float', 'group_size': 32", ""), "ct yes f8 group g32 naive-quantized"},
        {CT("'type': 'float', 'group_size': 32", ", 'format': 'MXFP8-Quantized'"),
         "ct yes f8 group g32 mxfp8-quantized"},
        /* activations decide between the stored forms */
        {CTG("'targets': ['Linear'], 'weights': {'strategy': 'channel'}, "
             "'input_activations': {'dynamic': true}",
             ""),
         "ct yes i8 channel int-quantized"},
        {CTG("'targets': ['Linear'], 'weights': {'type': 'float'}, 'input_activations': {}", ""),
         "ct yes f8 tensor float-quantized"},
        {CTG("'targets': ['Linear'], 'weights': null, 'input_activations': {}", ""), "ct no dense"},
        {CT("'type': 'float'", ", 'format': 'dense'"), "ct no dense"},
        /* order of columns */
        {CT("'num_bits': 4, 'group_size': 32, 'actorder': 'Group'", ""),
         "ct yes i4 group g32 actorder pack-quantized"},
        {CT("'num_bits': 4, 'group_size': 32, 'actorder': 'dynamic'", ""),
         "ct yes i4 group g32 actorder pack-quantized"},
        {CT("'num_bits': 4, 'group_size': 32, 'actorder': true", ""),
         "ct yes i4 group g32 actorder pack-quantized"},
        {CT("'num_bits': 4, 'group_size': 32, 'actorder': 'static'", ""),
         "ct yes i4 group g32 pack-quantized"},
        {CT("'num_bits': 4, 'group_size': 32, 'actorder': 'weight'", ""),
         "ct yes i4 group g32 pack-quantized"},
        {CT("'num_bits': 4, 'group_size': 32, 'actorder': false", ""),
         "ct yes i4 group g32 pack-quantized"},
        {CT("'actorder': 'weight'", ""), "ct yes i8 tensor pack-quantized"},
        /* a group's own format, and mixed ones */
        {CTG("'targets': ['Linear'], 'format': 'int-quantized', 'weights': {}",
             ", 'format': 'mixed-precision'"),
         "ct yes i8 tensor int-quantized"},
        {CT("'type': 'float'", ", 'format': 'mixed-precision'"),
         "ct yes f8 tensor naive-quantized"},
        {CTG("'targets': ['Linear'], 'format': 'int-quantized', 'weights': {}",
             ", 'format': 'pack-quantized'"),
         "ct yes i8 tensor int-quantized"},
        /* versions */
        {CT("'num_bits': 3", ", 'version': '0.18.0'"), "ct yes i3 tensor new pack-quantized"},
        {CT("'num_bits': 3", ", 'version': '0.18.1.a20260801'"),
         "ct yes i3 tensor new pack-quantized"},
        {CT("'num_bits': 3", ", 'version': '1.0.0'"), "ct yes i3 tensor new pack-quantized"},
        {CT("'num_bits': 3", ", 'version': '0.17.1'"), "ct yes i3 tensor old pack-quantized"},
        {CT("'num_bits': 3", ", 'version': '0.9.4'"), "ct yes i3 tensor old pack-quantized"},
        {CT("'num_bits': 3", ", 'version': '0.17.2.a20260610'"), "ct yes i3 tensor pack-quantized"},
        {CT("'num_bits': 3", ", 'version': '0.18.0.a20260611'"), "ct yes i3 tensor pack-quantized"},
        {CT("'num_bits': 3", ", 'version': 'main'"), "ct yes i3 tensor pack-quantized"},
        {CT("'num_bits': 3", ", 'version': '0.-5.1'"), "ct yes i3 tensor pack-quantized"},
        {CT("'num_bits': 3", ", 'version': '0.18'"), "ct yes i3 tensor pack-quantized"},
        /* what is empty or of no concern */
        {CT("", ", 'ignore': null, 'kv_cache_scheme': null, 'global_compression_ratio': 1.5, "
                "'quantization_status': 'Compressed', 'sparsity_config': {}, "
                "'transform_config': {}, 'anything': 1"),
         "ct yes i8 tensor pack-quantized"},
        {CT("", ", 'sparsity_config': {'format': 'dense'}, "
                "'transform_config': {'config_groups': {}}"),
         "ct yes i8 tensor pack-quantized"},
        {"{'quantization_config': {'quant_method': 'compressed-tensors', 'config_groups': {}}}",
         "ct -"},
        {"{'quantization_config': {'config_groups': {'FP8_BLOCK': ['Linear']}}}",
         "ct yes f8 block 128x128 float-quantized"},
        {"{'quantization_config': {'config_groups': {'nvfp4a16': ['Linear']}, "
         "'format': 'nvfp4-pack-quantized'}}",
         "ct yes f4 tensor_group g16 nvfp4-pack-quantized"},
        {"{'quantization_config': {'config_groups': {'W4A16_ASYM': ['re:.*kv_a']}}}",
         "ct yes i4asym group g128 pack-quantized"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        expect_rule(good[i].config, KV, good[i].want);
}

static void test_ct_refusals(void **state)
{
    static const struct {
        const char *config;
        dspark_status status;
        const char *where, *says;
    } bad[] = {
        {CT("'num_bits': 9", ""), DSPARK_EUNSUPPORTED, "config_groups.g0.weights.num_bits", "9"},
        {CT("'num_bits': 0", ""), DSPARK_EMODEL, "num_bits", "0"},
        {CT("'num_bits': 6, 'type': 'float'", ""), DSPARK_EUNSUPPORTED, "num_bits", "6"},
        {CT("'num_bits': 4.0", ""), DSPARK_EFORMAT, "num_bits", "integer"},
        {CT("'num_bits': true", ""), DSPARK_EFORMAT, "num_bits", "integer"},
        {CT("'type': 'complex'", ""), DSPARK_EMODEL, "type", "complex"},
        {CT("'symmetric': false, 'type': 'float'", ""), DSPARK_EUNSUPPORTED, "symmetric", "zero"},
        {CT("'dynamic': true", ""), DSPARK_EUNSUPPORTED, "dynamic", "not stored"},
        {CT("'dynamic': 'local'", ""), DSPARK_EUNSUPPORTED, "dynamic", "not stored"},
        {CT("'strategy': 'token'", ""), DSPARK_EUNSUPPORTED, "strategy", "token"},
        {CT("'strategy': 'attn_head'", ""), DSPARK_EUNSUPPORTED, "strategy", "attn_head"},
        {CT("'strategy': 'rows'", ""), DSPARK_EMODEL, "strategy", "rows"},
        {CT("'strategy': 'group'", ""), DSPARK_EMODEL, "group_size", "positive"},
        {CT("'strategy': 'group', 'group_size': -1", ""), DSPARK_EMODEL, "group_size", "positive"},
        {CT("'strategy': 'channel', 'group_size': 64", ""), DSPARK_EMODEL, "group_size", "64"},
        {CT("'group_size': 0", ""), DSPARK_EMODEL, "group_size", "0"},
        {CT("'group_size': -2", ""), DSPARK_EMODEL, "group_size", "-2"},
        {CT("'group_size': 4611686018427387904", ""), DSPARK_EMODEL, "group_size", "range"},
        {CT("'strategy': 'block'", ""), DSPARK_EMODEL, "block_structure", "block"},
        {CT("'block_structure': [128, 128]", ""), DSPARK_EMODEL, "block_structure", "block"},
        {CT("'strategy': 'block', 'block_structure': [128]", ""), DSPARK_EFORMAT, "block_structure",
         "two"},
        {CT("'strategy': 'block', 'block_structure': '128'", ""), DSPARK_EFORMAT, "block_structure",
         "two"},
        {CT("'strategy': 'block', 'block_structure': '128x128x1'", ""), DSPARK_EFORMAT,
         "block_structure", "two"},
        {CT("'strategy': 'block', 'block_structure': [0, 128]", ""), DSPARK_EMODEL,
         "block_structure", "0"},
        {CT("'strategy': 'block', 'block_structure': [128, 4294967424]", ""), DSPARK_EFORMAT,
         "block_structure", "two"},
        {CT("'actorder': 'group'", ""), DSPARK_EMODEL, "actorder", "groups"},
        {CT("'actorder': 'up', 'group_size': 8", ""), DSPARK_EMODEL, "actorder", "up"},
        {CT("'rotation': 1", ""), DSPARK_EUNSUPPORTED, "weights.rotation", "not known"},
        {CTG("'targets': ['Linear'], 'weights': {}, 'lora': {}", ""), DSPARK_EUNSUPPORTED,
         "g0.lora", "not known"},
        {CTG("'weights': {}", ""), DSPARK_EMODEL, "g0.targets", "missing"},
        {CTG("'targets': 'Linear', 'weights': {}", ""), DSPARK_EFORMAT, "g0.targets", "array"},
        {CTG("'targets': [1], 'weights': {}", ""), DSPARK_EFORMAT, "g0.targets", "entry 0"},
        {CTG("'targets': [''], 'weights': {}", ""), DSPARK_EFORMAT, "g0.targets", "empty"},
        {CTG("'targets': ['re:(?!x)'], 'weights': {}", ""), DSPARK_EUNSUPPORTED, "g0.targets",
         "look-ahead"},
        {CTG("'targets': [], 'weights': {}, 'format': 'mixed-precision'", ""), DSPARK_EMODEL,
         "g0.format", "one format"},
        {CT("", ", 'ignore': ['re:[']"), DSPARK_EFORMAT, "quantization_config.ignore", "closed"},
        {CT("", ", 'ignore': {}"), DSPARK_EFORMAT, "ignore", "array"},
        {CT("", ", 'ignore': [null]"), DSPARK_EFORMAT, "ignore", "entry 0"},
        {CT("", ", 'format': 'float-quantized'"), DSPARK_EMODEL, "weights", "float-quantized"},
        {CT("'type': 'float'", ", 'format': 'pack-quantized'"), DSPARK_EMODEL, "weights",
         "pack-quantized"},
        {CT("'type': 'float', 'num_bits': 4, 'group_size': 32",
            ", 'format': 'nvfp4-pack-quantized'"),
         DSPARK_EMODEL, "weights", "nvfp4-pack-quantized"},
        {CT("", ", 'format': 'marlin-24'"), DSPARK_EUNSUPPORTED, "format", "sparse"},
        {CT("", ", 'format': 'sparse-24-bitmask'"), DSPARK_EUNSUPPORTED, "format", "sparse"},
        {CT("", ", 'format': 'fakequant'"), DSPARK_EUNSUPPORTED, "format", "fakequant"},
        {CT("", ", 'sparsity_config': {'format': 'sparse-bitmask'}"), DSPARK_EUNSUPPORTED,
         "sparsity_config", "sparse-bitmask"},
        {CT("", ", 'sparsity_config': {'sparsity_structure': '2:4'}"), DSPARK_EUNSUPPORTED,
         "sparsity_config", "sparse"},
        {CT("", ", 'transform_config': {'config_groups': {'R1': {}}}"), DSPARK_EUNSUPPORTED,
         "transform_config", "rotations"},
        {CT("", ", 'transform_config': {'R4': {}}"), DSPARK_EUNSUPPORTED, "transform_config",
         "rotations"},
        {CT("", ", 'quantization_status': 'initialized'"), DSPARK_EUNSUPPORTED,
         "quantization_status", "initialized"},
        {CT("", ", 'quantization_status': 'decompressed'"), DSPARK_EUNSUPPORTED,
         "quantization_status", "decompressed"},
        {CT("", ", 'version': 3"), DSPARK_EFORMAT, "version", "string"},
        {"{'quantization_config': {'config_groups': {'NVFP9': ['Linear']}}}", DSPARK_EUNSUPPORTED,
         "NVFP9", "preset"},
        {"{'quantization_config': {'config_groups': {'g': 1}}}", DSPARK_EFORMAT, "g", "object"},
        {"{'quantization_config': {'config_groups': []}}", DSPARK_EFORMAT, "config_groups",
         "object"},
        {"{'quantization_config': {'config_groups': {'g': {'targets': []}, 'g': {}}}}",
         DSPARK_EFORMAT, "config.json", "twice"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        expect_error(bad[i].config, NULL, bad[i].status, bad[i].where, bad[i].says);
}

/* ---- which modules --------------------------------------------------------------------------- */

#define GROUP(name, bits, targets) \
    "'" name "': {'weights': {'num_bits': " bits "}, 'targets': [" targets "]}"

static void test_matching(void **state)
{
    /* clang-format off */
    static const char config[] =
        "{'quantization_config': {'quant_method': 'compressed-tensors', 'config_groups': {"
        /* classes come last although they stand first */
        GROUP("a", "8", "'Linear'") ", "
        GROUP("b", "7", "'re:.*mlp\\\\..*_proj', 're:layers\\\\.2'") ", "
        GROUP("c", "6", "'re:.*mlp\\\\.up'") ", "
        GROUP("d", "5", "'layers.1.mlp.up_proj'") ", "
        GROUP("e", "4", "'model.layers.2.mlp.up_proj'") "}, "
        "'ignore': ['layers.4.mlp.up_proj', 're:.*lm_head', 'model.context_proj', "
        "'re:layers\\\\.1\\\\.mlp\\\\.down']}}";
    /* clang-format on */
    static const struct {
        const char *module, *want;
    } rules[] = {
        {"layers.0.self_attn.q_a_proj", "ct yes i8 tensor pack-quantized"},
        {"layers.0.mlp.up_proj", "ct yes i7 tensor pack-quantized"}, /* the first that fits */
        {"layers.0.mlp.up", "ct yes i6 tensor pack-quantized"},
        {"layers.1.mlp.up_proj", "ct yes i5 tensor pack-quantized"},       /* exact names first */
        {"model.layers.1.mlp.up_proj", "ct yes i5 tensor pack-quantized"}, /* model. taken away */
        {"layers.2.mlp.up_proj", "ct yes i4 tensor pack-quantized"},       /* and put before */
        {"layers.20.self_attn", "ct yes i7 tensor pack-quantized"},        /* open at the end */
        {"x.layers.2.self_attn", "ct yes i8 tensor pack-quantized"},       /* closed at the start */
        {"layers.4.mlp.up_proj", "ct no"},
        {"model.layers.4.mlp.up_proj", "ct no"},
        {"lm_head", "ct no"},
        {"model.lm_head.x", "ct no"},
        {"context_proj", "ct no"},
        {"layers.1.mlp.down_proj", "ct no"},
        {"model.layers.1.mlp.down_proj", "ct no"},
    };
    dspark__quant_config *q = parse_ok(config, NULL);
    dspark__quant_rule r;
    dspark_error err;
    char longest[1026];

    (void)state;
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const char *got = rule_text(q, rules[i].module);
        if (strcmp(got, rules[i].want) != 0)
            fail_msg("%s: %s, wanted %s", rules[i].module, got, rules[i].want);
    }
    assert_int_equal(dspark__quant_config_rule(q, "", &r, &err), DSPARK_EINVAL);
    assert_int_equal(dspark__quant_config_rule(q, NULL, &r, &err), DSPARK_EINVAL);
    memset(longest, 'x', sizeof longest);
    longest[1025] = '\0';
    assert_int_equal(dspark__quant_config_rule(q, longest, &r, &err), DSPARK_EINVAL);
    longest[1024] = '\0';
    assert_string_equal(rule_text(q, longest), "ct yes i8 tensor pack-quantized");
    assert_string_equal(rule_text(q, "model."), "ct yes i8 tensor pack-quantized");
    dspark__quant_config_free(q);
    assert_string_equal(rule_text(NULL, "x"), "none -");
}

/* Case B41: a name above modules reaches those, marked, and no neighbour's. */
static void test_parents(void **state)
{
    dspark__quant_config *q =
        parse_ok(CT("'type': 'float'", ", 'ignore': ['layers.3.self_attn', 'lm_head']"), NULL);

    (void)state;
    assert_string_equal(rule_text(q, "layers.3.self_attn.q_a_proj"),
                        "ct no f8 tensor naive-quantized parent");
    assert_string_equal(rule_text(q, "model.layers.3.self_attn.kv_a_proj_with_mqa"),
                        "ct no f8 tensor naive-quantized parent");
    assert_string_equal(rule_text(q, "layers.3.self_attn"), "ct no");
    assert_string_equal(rule_text(q, "lm_head"), "ct no");
    for (int layer = 0; layer < 40; layer++) {
        char name[64];
        if (layer == 3) continue;
        snprintf(name, sizeof name, "layers.%d.self_attn.q_a_proj", layer);
        assert_string_equal(rule_text(q, name), "ct yes f8 tensor naive-quantized");
    }
    assert_string_equal(rule_text(q, "layers.3.mlp.up_proj"), "ct yes f8 tensor naive-quantized");
    assert_string_equal(rule_text(q, "layers.3.self_attn2.q"), "ct yes f8 tensor naive-quantized");
    dspark__quant_config_free(q);

    /* a full hit elsewhere on the list is no longer ambiguous */
    expect_rule(CT("", ", 'ignore': ['layers.0', 're:.*kv_a']"), KV, "ct no");
}

/* Linear is no class of tables and norms, and no ignore list names them. */
static void test_classes(void **state)
{
    static const char *const others[] = {
        "embed_tokens",          "model.embed_tokens",
        "markov_head.markov_w1", "layers.0.input_layernorm",
        "context_norm",          "layers.0.self_attn.kv_a_layernorm"};
    static const char *const linears[] = {"markov_head.markov_w2", "context_proj", "lm_head",
                                          "layers.0.mlp.gate_proj", "normal.proj"};
    dspark__quant_config *ct = parse_ok(CT("'type': 'float'", ""), NULL);
    dspark__quant_config *all = parse_ok(FP8(""), NULL);
    dspark__quant_config *named = parse_ok(CTG("'targets': ['re:.*w1'], 'weights': {}", ""), NULL);

    (void)state;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        assert_string_equal(rule_text(ct, others[i]), "ct -");
        assert_string_equal(rule_text(all, others[i]), "fp8 -");
    }
    for (size_t i = 0; i < sizeof linears / sizeof linears[0]; i++) {
        assert_string_equal(rule_text(ct, linears[i]), "ct yes f8 tensor naive-quantized");
        assert_string_equal(rule_text(all, linears[i]), "fp8 yes f8 tensor fp8");
    }
    /* by name they are reached all the same */
    assert_string_equal(rule_text(named, "markov_head.markov_w1"),
                        "ct yes i8 tensor pack-quantized");
    dspark__quant_config_free(ct);
    dspark__quant_config_free(all);
    dspark__quant_config_free(named);
}

/* Case B42: q_a in BF16 beside kv_a in FP8. */
static void test_one_layer_two_schemes(void **state)
{
    dspark__quant_config *q = parse_ok(
        CT("'type': 'float', 'strategy': 'channel'", ", 'ignore': ['re:.*q_a_proj$', 'lm_head']"),
        NULL);
    (void)state;
    assert_string_equal(rule_text(q, "layers.2.self_attn.q_a_proj"), "ct no");
    assert_string_equal(rule_text(q, "layers.2.self_attn.kv_a_proj_with_mqa"),
                        "ct yes f8 channel naive-quantized");
    dspark__quant_config_free(q);
}

/* ---- where it is ----------------------------------------------------------------------------- */

static void test_places(void **state)
{
    static const char *const methods[] = {"gptq", "awq", "bitsandbytes", "exl3", "mxfp4", "hqq"};
    dspark__quant_config *q;
    dspark_error err;

    (void)state;
    q = parse_ok("{}", NULL);
    assert_null(q);
    q = parse_ok("{'quantization_config': null, 'text_config': {}}", NULL);
    assert_null(q);
    q = parse_ok("{'quantization_config': {}, 'compression_config': {}}", NULL);
    assert_null(q);
    assert_int_equal(parse_both(&q, NULL, NULL, &err), DSPARK_OK);
    assert_null(q);
    dspark__quant_config_free(NULL);

    expect_rule("{'text_config': {'quantization_config': {'quant_method': 'fp8'}}}", KV,
                "fp8 yes f8 tensor fp8");
    expect_rule("{'compression_config': {'config_groups': {'g': {'targets': ['Linear'], "
                "'weights': {}}}}}",
                KV, "ct yes i8 tensor pack-quantized");
    expect_rule("{'compression_config': {'format': 'dense'}}", KV, "ct -");
    /* the first of the places counts */
    expect_rule("{'compression_config': {'quant_method': 'gptq'}, 'text_config': "
                "{'quantization_config': {'quant_method': 'awq'}}, 'quantization_config': "
                "{'quant_method': 'FP8'}}",
                KV, "fp8 yes f8 tensor fp8");
    expect_rule("{'compression_config': {'quant_method': 'gptq'}, 'text_config': "
                "{'quantization_config': {'quant_method': 'fp8'}}}",
                KV, "fp8 yes f8 tensor fp8");

    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++) {
        char config[128];
        snprintf(config, sizeof config, "{'quantization_config': {'quant_method': '%s'}}",
                 methods[i]);
        expect_error(config, NULL, DSPARK_EUNSUPPORTED, "quantization_config.quant_method",
                     methods[i]);
        expect_error(config, NULL, DSPARK_EUNSUPPORTED, "config.json", "served are");
    }
    expect_error("{'quantization_config': {'bits': 4}}", NULL, DSPARK_EMODEL, "quant_method",
                 "missing");
    expect_error("{'quantization_config': {'quant_method': 3}}", NULL, DSPARK_EFORMAT,
                 "quant_method", "string");
    expect_error("{'quantization_config': 'fp8'}", NULL, DSPARK_EFORMAT, "quantization_config",
                 "object");
    expect_error("{'text_config': {'quantization_config': 1}}", NULL, DSPARK_EFORMAT,
                 "text_config.quantization_config", "object");
    expect_error("{'quantization_config': {", NULL, DSPARK_EFORMAT, "config.json", "JSON");
    expect_error("", NULL, DSPARK_EFORMAT, "config.json", "JSON");

    /* hf_quant_config.json: alone, beside its own, beside another's */
    q = parse_ok("{}", HF("'quant_algo': 'FP8'"));
    assert_string_equal(rule_text(q, KV), "modelopt yes f8 tensor FP8");
    dspark__quant_config_free(q);
    q = parse_ok(MO("'quant_algo': 'nvfp4', 'ignore': ['*kv_a*']"), HF("'quant_algo': 'NVFP4'"));
    assert_string_equal(rule_text(q, KV), "modelopt no");
    dspark__quant_config_free(q);
    q = parse_ok(FP8(""), "not even JSON");
    assert_string_equal(rule_text(q, KV), "fp8 yes f8 tensor fp8");
    assert_int_equal(dspark__quant_config_note_count(q), 1);
    assert_non_null(strstr(dspark__quant_config_note(q, 0), "hf_quant_config.json"));
    assert_null(dspark__quant_config_note(q, 1));
    dspark__quant_config_free(q);
}

static void test_text(void **state)
{
    static const struct {
        const char *config, *want;
        size_t n_notes;
    } cases[] = {
        {CT("'num_bits': 4, 'type': 'float', 'group_size': 16",
            ", 'ignore': ['a', 'b', 're:c'], 'kv_cache_scheme': {'num_bits': 8}, "
            "'quantization_status': 'frozen'"),
         "compressed-tensors, nvfp4-pack-quantized, 1 group, 3 ignored", 2},
        {"{'quantization_config': {'config_groups': {" GROUP("a", "8", "'Linear'") ", " GROUP(
             "b", "4", "'x'") "}, 'format': 'pack-quantized'}}",
         "compressed-tensors, pack-quantized, 2 groups, 0 ignored", 0},
        {"{'quantization_config': {'config_groups': {'FP8': ['a'], 'W4A16': ['b']}}}",
         "compressed-tensors, mixed-precision, 2 groups, 0 ignored", 0},
        {FP8(", 'weight_block_size': [128, 128], 'ignored_layers': ['lm_head']"),
         "fp8, blocks, 1 group, 1 ignored", 0},
        {FP8(""), "fp8, one scale per tensor, 1 group, 0 ignored", 0},
        {MO("'quant_algo': 'NVFP4_AWQ', 'kv_cache_scheme': {}"),
         "modelopt, NVFP4_AWQ, 1 group, 0 ignored", 2},
        {Q("'global_quant_config': null"), "quark, no format, 0 groups, 0 ignored", 0},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dspark__quant_config *q = parse_ok(cases[i].config, NULL);
        assert_string_equal(dspark__quant_config_text(q), cases[i].want);
        assert_int_equal(dspark__quant_config_note_count(q), cases[i].n_notes);
        dspark__quant_config_free(q);
    }
    assert_string_equal(dspark__quant_config_text(NULL), "none");
    assert_int_equal(dspark__quant_config_note_count(NULL), 0);
    assert_null(dspark__quant_config_note(NULL, 0));
}

/* ---- hostile sizes, no memory ---------------------------------------------------------------- */

/* n times the entry in an ignore list. */
static char *many_ignored(const char *entry, size_t n)
{
    static const char head[] = "{'quantization_config': {'quant_method': 'compressed-tensors', "
                               "'ignore': [";
    size_t length = strlen(entry);
    char *text = malloc(sizeof head + n * (length + 4) + 8), *at = text;

    at += sprintf(at, "%s", head);
    for (size_t i = 0; i < n; i++) at += sprintf(at, "%s'%s'", i ? ", " : "", entry);
    sprintf(at, "]}}");
    return text;
}

static void test_limits(void **state)
{
    char *text;

    (void)state;
    text = many_ignored("layers.0", 65536);
    expect_rule(text, "layers.0", "ct no");
    free(text);
    text = many_ignored("layers.0", 65537);
    expect_error(text, NULL, DSPARK_EUNSUPPORTED, "ignore", "65536");
    free(text);
    /* 32 patterns of 1001 instructions are within the limit, 33 are not */
    text = many_ignored("re:a{1000}", 32);
    expect_rule(text, "a", "ct -");
    free(text);
    text = many_ignored("re:a{1000}", 33);
    expect_error(text, NULL, DSPARK_EUNSUPPORTED, "ignore", "32768");
    free(text);
}

static void test_no_memory(void **state)
{
    static const char *const configs[] = {
        CT("'num_bits': 4, 'group_size': 32", ", 'ignore': ['a', 're:b*[cd]', 'e', 'f', 'g', 'h', "
                                              "'i', 'j', 'k', 'l']"),
        FP8(", 'modules_to_not_convert': ['a', 'b*']"),
        MO("'quant_algo': 'FP8', 'quantized_layers': {'a': {'quant_algo': 'NVFP4'}}"),
        Q("'layer_quant_config': {'*x': {'weight': {'dtype': 'int8'}}}, 'exclude': ['a']"),
    };

    (void)state;
    if (!oom_available()) skip();
    for (size_t c = 0; c < sizeof configs / sizeof configs[0]; c++) {
        char *text = quoted(configs[c]), *hf = quoted(HF("'quant_algo': 'FP8'"));
        dspark__quant_config *q;
        dspark_error err;
        size_t n;

        oom_count_start();
        assert_int_equal(
            dspark__quant_config_parse(&q, text, strlen(text), hf, strlen(hf), NULL, &err),
            DSPARK_OK);
        n = oom_stop();
        assert_true(n > 10);
        oom_count_start();
        rule_text(q, KV);
        assert_int_equal(oom_stop(), 0);
        dspark__quant_config_free(q);
        for (size_t i = 1; i <= n; i++) {
            oom_fail_nth(i);
            dspark_status st =
                dspark__quant_config_parse(&q, text, strlen(text), hf, strlen(hf), NULL, &err);
            oom_stop();
            if (st != DSPARK_ENOMEM)
                fail_msg("config %zu, allocation %zu of %zu: %s", c, i, n, dspark__status_name(st));
            assert_null(q);
        }
        free(text);
        free(hf);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ct_arguments), cmocka_unit_test(test_ct_refusals),
        cmocka_unit_test(test_matching),     cmocka_unit_test(test_parents),
        cmocka_unit_test(test_classes),      cmocka_unit_test(test_one_layer_two_schemes),
        cmocka_unit_test(test_places),       cmocka_unit_test(test_text),
        cmocka_unit_test(test_limits),       cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
