/* quantization_config in the dialects of fp8, ModelOpt and Quark: rules, defaults, refusals by
 * name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "support/quant_rules.h"

/* ---- fp8 ------------------------------------------------------------------------------------- */

static void test_fp8(void **state)
{
    (void)state;
    expect_rule(FP8(", 'activation_scheme': 'dynamic', 'fmt': 'e4m3', 'scale_fmt': 'ue8m0', "
                    "'weight_block_size': [128, 128]"),
                KV, "fp8 yes f8 block 128x128 fp8_e4m3");
    expect_rule(FP8(", 'fmt': 'E5M2'"), KV, "fp8 yes f8 tensor fp8_e5m2");
    expect_rule(FP8(", 'weight_block_size': null"), KV, "fp8 yes f8 tensor fp8");
    expect_rule(FP8(", 'modules_to_not_convert': ['kv_a_proj_with_mqa', 'lm_head']"), KV, "fp8 no");
    expect_rule(FP8(", 'modules_to_not_convert': ['self_attn']"), KV, "fp8 no");
    expect_rule(FP8(", 'modules_to_not_convert': ['model.layers.0']"), KV, "fp8 no");
    expect_rule(FP8(", 'modules_to_not_convert': ['layers.1', 'kv_a_proj', 'gate']"), KV,
                "fp8 yes f8 tensor fp8");
    expect_rule(FP8(", 'modules_to_not_convert': ['layers.1']"), "layers.11.mlp.up_proj",
                "fp8 yes f8 tensor fp8");
    expect_rule(FP8(", 'modules_to_not_convert': ['model.layers.0*']"), KV, "fp8 no");
    expect_rule(FP8(", 'ignored_layers': ['re:.*kv_a']"), KV, "fp8 no");
    /* the first list counts, even an empty one */
    expect_rule(FP8(", 'ignored_layers': [], 'modules_to_not_convert': ['self_attn']"), KV,
                "fp8 yes f8 tensor fp8");
    expect_rule(FP8(", 'ignored_layers': null, 'modules_to_not_convert': ['self_attn']"), KV,
                "fp8 no");

    expect_error(FP8(", 'weight_block_size': 128"), NULL, DSPARK_EFORMAT, "weight_block_size",
                 "two");
    expect_error(FP8(", 'weight_block_size': [128, 0]"), NULL, DSPARK_EMODEL, "weight_block_size",
                 "0");
    expect_error(FP8(", 'activation_scheme': 'token'"), NULL, DSPARK_EUNSUPPORTED,
                 "activation_scheme", "token");
    expect_error(FP8(", 'fmt': 'e3m4'"), NULL, DSPARK_EUNSUPPORTED, "fmt", "e3m4");
    expect_error(FP8(", 'scale_fmt': 'ue4m3'"), NULL, DSPARK_EUNSUPPORTED, "scale_fmt", "ue4m3");
    expect_error(FP8(", 'hadamard_rotation': true"), NULL, DSPARK_EUNSUPPORTED, "hadamard_rotation",
                 "rotations");
    expect_error(FP8(", 'modules_to_not_convert': ['']"), NULL, DSPARK_EFORMAT,
                 "modules_to_not_convert", "empty");
}

/* ---- ModelOpt -------------------------------------------------------------------------------- */

static void expect_hf(const char *hf, const char *module, const char *want)
{
    dspark__quant_config *q = parse_ok(NULL, hf);
    const char *got = rule_text(q, module);

    if (strcmp(got, want) != 0) fail_msg("%s\n%s: %s, wanted %s", hf, module, got, want);
    dspark__quant_config_free(q);
}

static void test_modelopt_algorithms(void **state)
{
    static const char *const algos[][2] = {
        {"FP8", "f8 tensor FP8"},
        {"fp8_per_channel_per_token", "f8 channel FP8_PER_CHANNEL_PER_TOKEN"},
        {"FP8_PB_WO", "f8 block 128x128 FP8_PB_WO"},
        {"nvfp4", "f4 tensor_group g16 NVFP4"},
        {"W4A16_NVFP4", "f4 tensor_group g16 W4A16_NVFP4"},
        {"NVFP4_AWQ", "f4 tensor_group g16 NVFP4_AWQ"},
        {"MXFP8", "f8 group g32 MXFP8"},
        {"W4A8_MXFP4_FP8", "f4 group g32 W4A8_MXFP4_FP8"},
        {"W8A16", "i8 channel W8A16"},
        {"W8A8_SQ_PER_CHANNEL", "i8 channel W8A8_SQ_PER_CHANNEL"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof algos / sizeof algos[0]; i++) {
        char hf[256], config[256], want[100];
        snprintf(hf, sizeof hf, HF("'quant_algo': '%s'"), algos[i][0]);
        snprintf(config, sizeof config, MO("'quant_algo': '%s'"), algos[i][0]);
        snprintf(want, sizeof want, "modelopt yes %s", algos[i][1]);
        expect_hf(hf, KV, want);
        expect_rule(config, KV, want);
    }
}

static void test_modelopt(void **state)
{
    static const char mixed[] =
        HF("'quant_algo': 'MIXED_PRECISION', 'exclude_modules': ['layers.9*'], "
           "'quantized_layers': {'model.layers.0.mlp.up_proj': {'quant_algo': 'NVFP4', "
           "'group_size': 16}, 'layers.9.x': {'quant_algo': 'FP8'}, "
           "'*.self_attn.*': {'quant_algo': 'FP8'}, 'lm_head': {'quant_algo': null}}");

    (void)state;
    expect_hf(HF("'quant_algo': 'NVFP4', 'group_size': 16, 'kv_cache_quant_algo': 'FP8', "
                 "'exclude_modules': ['lm_head', '*self_attn*']"),
              KV, "modelopt no");
    expect_hf(HF("'quant_algo': 'NVFP4', 'exclude_modules': ['*Self_Attn*']"), KV,
              "modelopt yes f4 tensor_group g16 NVFP4");
    expect_hf(HF("'quant_algo': 'NVFP4', 'exclude_modules': ['model.layers.?.self*mqa']"), KV,
              "modelopt no");
    expect_hf(HF("'quant_algo': 'NVFP4', 'exclude_modules': ['layers.0.self_attn']"), KV,
              "modelopt no f4 tensor_group g16 NVFP4 parent");
    expect_hf(HF("'quant_algo': null, 'kv_cache_quant_algo': 'FP8'"), KV, "modelopt -");
    expect_hf(HF("'quant_algo': 'FP8', 'group_size': 0"), KV, "modelopt yes f8 tensor FP8");
    expect_hf(mixed, "layers.0.mlp.up_proj", "modelopt yes f4 tensor_group g16 NVFP4");
    expect_hf(mixed, KV, "modelopt yes f8 tensor FP8");
    expect_hf(mixed, "layers.1.mlp.up_proj", "modelopt -");
    expect_hf(mixed, "layers.9.x", "modelopt no");
    expect_hf(mixed, "lm_head", "modelopt no");
    /* of the two lists the first counts, even an empty one */
    expect_hf(HF("'quant_algo': 'FP8', 'exclude_modules': [], 'ignore': ['*kv_a*']"), KV,
              "modelopt yes f8 tensor FP8");
    /* one layer by name, the others as all */
    expect_hf(HF("'quant_algo': 'FP8', 'quantized_layers': {'" KV "': {'quant_algo': 'NVFP4'}}"),
              KV, "modelopt yes f4 tensor_group g16 NVFP4");

    expect_rule(MO("'quant_algo': 'NVFP4', 'ignore': ['*kv_a*'], 'config_groups': {'g': {"
                   "'weights': {'num_bits': 4, 'type': 'float', 'group_size': 16}, "
                   "'targets': ['Linear']}}"),
                KV, "modelopt no");
    expect_rule("{'quantization_config': {'quant_method': 'modelopt_fp4', 'quantization': "
                "{'quant_algo': 'NVFP4'}}}",
                KV, "modelopt yes f4 tensor_group g16 NVFP4");
    expect_rule("{'quantization_config': {'quant_algo': 'FP8'}}", KV, "modelopt yes f8 tensor FP8");
}

static void test_modelopt_refusals(void **state)
{
    static const struct {
        const char *hf;
        dspark_status status;
        const char *where, *says;
    } bad[] = {
        {HF("'quant_algo': 'NVFP4_SVD'"), DSPARK_EUNSUPPORTED, "quantization.quant_algo",
         "low-rank"},
        {HF("'quant_algo': 'w4a16_awq'"), DSPARK_EUNSUPPORTED, "quant_algo", "W4A16_AWQ"},
        {HF("'quant_algo': 'W4A8_AWQ'"), DSPARK_EUNSUPPORTED, "quant_algo", "outputs"},
        {HF("'quant_algo': 'INT3'"), DSPARK_EUNSUPPORTED, "quant_algo", "INT3"},
        {HF("'quant_algo': 4"), DSPARK_EFORMAT, "quant_algo", "string"},
        {HF("'quant_algo': 'NVFP4', 'group_size': 32"), DSPARK_EUNSUPPORTED, "group_size", "32"},
        {HF("'quant_algo': 'NVFP4', 'rotate': {'R1': 1}"), DSPARK_EUNSUPPORTED, "rotate",
         "rotations"},
        {HF("'quant_algo': 'MIXED_PRECISION'"), DSPARK_EMODEL, "quantized_layers", "missing"},
        {HF("'quant_algo': 'MIXED_PRECISION', 'quantized_layers': {'a': 'FP8'}"), DSPARK_EFORMAT,
         "quantized_layers.a", "object"},
        {HF("'quant_algo': 'MIXED_PRECISION', 'quantized_layers': {'a': {'quant_algo': "
            "'W4A16_AWQ'}}"),
         DSPARK_EUNSUPPORTED, "quantized_layers.a.quant_algo", "W4A16_AWQ"},
        {HF("'quant_algo': 'FP8', 'exclude_modules': 'lm_head'"), DSPARK_EFORMAT, "exclude_modules",
         "array"},
        {"{}", DSPARK_EMODEL, "hf_quant_config.json: quantization", "missing"},
        {"{'quantization': []}", DSPARK_EFORMAT, "hf_quant_config.json", "object"},
        {"[]", DSPARK_EFORMAT, "hf_quant_config.json", "object"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        expect_error(NULL, bad[i].hf, bad[i].status, bad[i].where, bad[i].says);
    expect_error(MO("'config_groups': {}"), NULL, DSPARK_EMODEL, "quant_algo", "missing");
    expect_error(MO("'quant_algo': 'NVFP4', 'config_groups': {'g': {'weights': {'num_bits': 8}}}"),
                 NULL, DSPARK_EMODEL, "g.weights.num_bits", "NVFP4");
    expect_error(MO("'quant_algo': 'FP8', 'config_groups': {'g': {'weights': {'type': 'int'}}}"),
                 NULL, DSPARK_EMODEL, "g.weights", "FP8");
    /* two files, two answers */
    expect_error(MO("'quant_algo': 'NVFP4'"), HF("'quant_algo': 'FP8'"), DSPARK_EMODEL,
                 "hf_quant_config.json: quantization.quant_algo", "NVFP4");
}

/* ---- Quark ----------------------------------------------------------------------------------- */

static void test_quark(void **state)
{
    static const char layers[] =
        Q("'global_quant_config': {'weight': {'dtype': 'fp8_e4m3', 'qscheme': 'per_channel', "
          "'ch_axis': 0, 'symmetric': true, 'is_dynamic': false}, 'input_tensors': {'dtype': "
          "'fp8_e4m3', 'qscheme': 'per_channel', 'is_dynamic': true}}, "
          "'layer_quant_config': {'*.mlp.*': {'weight': {'dtype': 'fp4', 'qscheme': 'per_group', "
          "'ch_axis': -1, 'group_size': 32, 'scale_format': 'e8m0', 'symmetric': null}}, "
          "'*.mlp.up_proj': {'weight': null}, 'context_proj': {'weight': null}}, "
          "'layer_type_quant_config': {'Conv2d': {'weight': {'dtype': 'int3'}}}, "
          "'exclude': ['lm_head', '*kv_b*', 're:.*q_b'], 'kv_cache_quant_config': {}, "
          "'export': {'weight_format': 'real_quantized', 'pack_method': 'reorder', "
          "'kv_cache_group': []}, 'algo_config': [{'name': 'smoothquant'}]");

    (void)state;
    expect_rule(layers, KV, "quark yes f8 channel fp8_e4m3");
    expect_rule(layers, "layers.0.mlp.up_proj", "quark yes f4 group g32 fp4"); /* file order */
    expect_rule(layers, "context_proj", "quark no");
    expect_rule(layers, "layers.0.self_attn.kv_b_proj", "quark no");
    expect_rule(layers, "layers.0.self_attn.q_b_proj", "quark no");
    expect_rule(layers, "lm_head", "quark no");

    expect_rule(QW("{'dtype': 'fp8_e4m3', 'qscheme': 'per_tensor'}"), KV,
                "quark yes f8 tensor fp8_e4m3");
    expect_rule(QW("{'dtype': 'fp8_e4m3fnuz', 'qscheme': 'per_tensor'}"), KV,
                "quark yes f8 tensor fp8_e4m3fnuz");
    expect_rule(QW("{'dtype': 'int8', 'qscheme': 'per_channel'}"), KV, "quark yes i8 channel int8");
    expect_rule(QW("{'dtype': 'fp8_e4m3', 'qscheme': 'per_block', 'block_size': [128, 128]}"), KV,
                "quark yes f8 block 128x128 fp8_e4m3");
    expect_rule(QW("[{'dtype': 'fp4', 'qscheme': 'per_group', 'group_size': 16}, "
                   "{'dtype': 'fp8_e4m3', 'qscheme': 'per_tensor'}]"),
                KV, "quark yes f4 tensor_group g16 fp4");
    expect_rule(QW("[{'dtype': 'fp8_e4m3', 'qscheme': 'per_tensor'}]"), KV,
                "quark yes f8 tensor fp8_e4m3");
    expect_rule(QW("{'dtype': 'mx', 'mx_element_dtype': 'fp4'}"), KV, "quark yes f4 group g32 fp4");
    expect_rule(QW("null"), KV, "quark no");
    expect_rule(Q("'global_quant_config': null"), KV, "quark -");
    expect_rule(Q("'layer_type_quant_config': {'nn.Linear': {'weight': {'dtype': 'int8'}}}"), KV,
                "quark yes i8 tensor int8");
}

static void test_quark_refusals(void **state)
{
    static const struct {
        const char *config;
        dspark_status status;
        const char *where, *says;
    } bad[] = {
        {QW("{'dtype': 'int4', 'qscheme': 'per_group', 'group_size': 128}"), DSPARK_EUNSUPPORTED,
         "global_quant_config.weight.dtype", "int4"},
        {QW("{'dtype': 'fp6_e2m3', 'qscheme': 'per_group', 'group_size': 32}"), DSPARK_EUNSUPPORTED,
         "dtype", "fp6_e2m3"},
        {QW("{'qscheme': 'per_tensor'}"), DSPARK_EMODEL, "dtype", "missing"},
        {QW("{'dtype': 'fp4', 'qscheme': 'per_group', 'group_size': 16}"), DSPARK_EUNSUPPORTED,
         "dtype", "NVFP4"},
        {QW("{'dtype': 'fp4', 'qscheme': 'per_group', 'group_size': 32, 'scale_format': "
            "'float32'}"),
         DSPARK_EUNSUPPORTED, "dtype", "e8m0"},
        {QW("{'dtype': 'fp8_e4m3', 'qscheme': 'per_row'}"), DSPARK_EUNSUPPORTED, "qscheme",
         "per_row"},
        {QW("{'dtype': 'fp8_e4m3', 'qscheme': 'per_channel', 'ch_axis': 1}"), DSPARK_EUNSUPPORTED,
         "ch_axis", "outputs"},
        {QW("{'dtype': 'fp8_e4m3', 'qscheme': 'per_group', 'ch_axis': 0, 'group_size': 32}"),
         DSPARK_EUNSUPPORTED, "ch_axis", "inputs"},
        {QW("{'dtype': 'fp8_e4m3', 'qscheme': 'per_group'}"), DSPARK_EMODEL, "group_size",
         "positive"},
        {QW("{'dtype': 'fp8_e4m3', 'is_dynamic': true}"), DSPARK_EUNSUPPORTED, "is_dynamic",
         "not stored"},
        {QW("{'dtype': 'int8', 'symmetric': false}"), DSPARK_EUNSUPPORTED, "symmetric", "zero"},
        {QW("[{'dtype': 'fp8_e4m3', 'qscheme': 'per_tensor'}, {'dtype': 'int4', 'qscheme': "
            "'per_channel'}]"),
         DSPARK_EUNSUPPORTED, "dtype", "NVFP4"},
        {QW("[]"), DSPARK_EUNSUPPORTED, "weight", "0 spec"},
        {QW("[1]"), DSPARK_EFORMAT, "weight", "object"},
        {QW("3"), DSPARK_EFORMAT, "weight", "object"},
        {Q("'global_quant_config': {'weight': null, 'input_rotation': {'size': 64}}"),
         DSPARK_EUNSUPPORTED, "input_rotation", "rotations"},
        {Q("'algo_config': [{'name': 'quarot'}]"), DSPARK_EUNSUPPORTED, "algo_config", "quarot"},
        {Q("'algo_config': {'name': 'Rotation'}"), DSPARK_EUNSUPPORTED, "algo_config", "Rotation"},
        {Q("'algo_config': [{'name': 'x', 'online_r1_rotation': true}]"), DSPARK_EUNSUPPORTED,
         "online_r1_rotation", "rotations"},
        {Q("'export': {'weight_format': 'fake_quantized'}"), DSPARK_EUNSUPPORTED,
         "export.weight_format", "fake_quantized"},
        {Q("'layer_quant_config': {'a': 1}"), DSPARK_EFORMAT, "layer_quant_config.a", "object"},
        {Q("'exclude': [['x']]"), DSPARK_EFORMAT, "exclude", "entry 0"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        expect_error(bad[i].config, NULL, bad[i].status, bad[i].where, bad[i].says);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fp8),      cmocka_unit_test(test_modelopt_algorithms),
        cmocka_unit_test(test_modelopt), cmocka_unit_test(test_modelopt_refusals),
        cmocka_unit_test(test_quark),    cmocka_unit_test(test_quark_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
