/* Quantised checkpoints through the command: every format goes from quantize to inspect and
 * compare, and vLLM's inexact merge is seen where it parts from the exact one, deciding nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>
#include <math.h>

#include "dspark/dspark.h"
#include "support/cli_said.h"
#include "support/tmpdir.h"

/* Of the tiny preset. */
#define N_LAYERS 5
#define TINY_PARAMETERS 195721

static int make_inputs(void **state)
{
    (void)state;
    if (run_cli("synth tiny --preset tiny").code) return 1;
    if (run_cli("synth --dump dump.st --for tiny --tokens 20").code) return 1;
    return run_cli("quantize tiny nv --format nvfp4").code;
}

static json_t *run_json(int code, const char *args)
{
    cli_result r = run_cli_to(code, "%s --json", args);
    return said_json(&r);
}

/* ---- every format ---- */

/* Packing and scales change what is stored, not how many parameters there are. */
static void check_totals(const json_t *doc, const char *text, int plain)
{
    const json_t *totals = json_object_get(doc, "totals");
    assert_int_equal(said_int(totals, "parameters"), TINY_PARAMETERS);
    assert_has(text, ", 195,721 parameters, ");
    assert_int_equal(said_int(totals, "stored_elements") == TINY_PARAMETERS, plain);
    assert_int_equal(strstr(text, " stored elements, ") == NULL, plain);
}

/* The name of the scheme of a checkpoint's context_kv shards must be in the text too. */
static void check_format(const char *format, const char *options, const char *scheme)
{
    char args[200], line[120];
    const json_t *linears;
    json_t *doc;
    cli_result r;
    size_t i, n_shards = 0;
    /* The way back starts from what is quantised. */
    snprintf(args, sizeof args, "quantize %s q-%s%s --format %s %s",
             strcmp(format, "bf16") == 0 ? "nv" : "tiny", format, options[0] ? "-o" : "", format,
             options);
    json_decref(run_json(0, args));
    snprintf(args, sizeof args, "inspect q-%s%s", format, options[0] ? "-o" : "");
    doc = run_json(0, args);
    assert_string_equal(said_text(doc, "verdict"), "usable");
    linears = json_object_get(json_object_get(doc, "quantisation"), "linears");
    for (i = 0; i < json_array_size(linears); i++) {
        const json_t *linear = json_array_get(linears, i);
        if (!strstr(said_text(linear, "name"), "kv_a_proj_with_mqa")) continue;
        assert_string_equal(said_text(linear, "scheme"), scheme);
        n_shards++;
    }
    assert_int_equal(n_shards, N_LAYERS);
    r = run_cli("%s", args);
    assert_int_equal(r.code, 0);
    check_totals(doc, r.out, strcmp(format, "bf16") == 0);
    json_decref(doc);
    snprintf(line, sizeof line, "merged      context_kv: 5 shards, %s in 5, ", scheme);
    assert_has(r.out, line);
    snprintf(line, sizeof line,
             "%s: context_proj, q_a_proj x 5, q_b_proj x 5, kv_a_proj_with_mqa x 5", scheme);
    assert_has(r.out, line);
    snprintf(args, sizeof args, "compare q-%s%s --tokens 3", format, options[0] ? "-o" : "");
    doc = run_json(0, args);
    assert_true(json_is_true(json_object_get(doc, "equal")));
    assert_null(json_object_get(doc, "vllm_compat"));
    json_decref(doc);
}

static void test_every_format(void **state)
{
    static const char *const cases[][3] = {
        {"fp8-tensor", "", "fp8_tensor"},    {"fp8-channel", "", "fp8_channel"},
        {"fp8-block", "", "fp8_block"},      {"nvfp4", "", "nvfp4_ct"},
        {"nvfp4", "--layout modelopt", "nvfp4_modelopt"},
        {"mxfp4", "", "mxfp4"},              {"mxfp8", "", "mxfp8"},
        {"int8", "", "int8"},        {"int4", "--group-size 32", "int_packed"},
        {"bf16", "", "bf16"},
    };
    size_t i;
    (void)state;
    for (i = 0; i < sizeof cases / sizeof *cases; i++)
        check_format(cases[i][0], cases[i][1], cases[i][2]);
}

static void test_fp8_is_fp8_channel(void **state)
{
    json_t *doc = run_json(0, "quantize tiny short --format fp8");
    (void)state;
    assert_string_equal(said_text(doc, "format"), "fp8-channel");
    json_decref(doc);
    assert_int_equal(run_cli("quantize tiny long --format fp8-channel").code, 0);
    assert_true(same_files("short/model.safetensors", "long/model.safetensors"));
    assert_true(same_files("short/config.json", "long/config.json"));
    assert_int_equal(run_cli("synth made --preset tiny --format fp8").code, 0);
    assert_true(same_files("made/model.safetensors", "long/model.safetensors"));
    assert_has(run_cli("help quantize").out, "fp8: fp8-channel");
}

/* Groups that do not fit: which module, how many more, and what would. */
static void test_columns_and_groups(void **state)
{
    static const char *const rows[][2] = {
        {"tiny x --format int4",
         "dspark: context_proj: 320 columns are no multiple of int4's group of 128, nor are those of 30 more "
         "modules; a group size of 32 fits all (DSPARK_EUNSUPPORTED)\n"},
        {"tiny x --format int4 --group-size 64",
         "dspark: layers.0.self_attn.q_b_proj: 32 columns are no multiple of int4's group of 64, nor are "
         "those of 9 more modules; a group size of 32 fits all"},
        {"tiny x --format int4 --group-size 64 --ignore re:.*layers.[0124].self_attn.*",
         "dspark: layers.3.self_attn.q_b_proj: 32 columns are no multiple of int4's group of 64, nor are "
         "those of 1 more module; "},
        {"tiny x --format int4 --group-size 56", "a group size of 32 fits all"},
        {"odd x --format int4 --group-size 16", "a group size of 8 fits all"},
        {"odd x --format mxfp8", "dspark: layers.0.self_attn.q_b_proj: 24 columns are no multiple of mxfp8's "
                                 "group of 32, nor are those of 4 more modules (DSPARK_EUNSUPPORTED)\n"},
        {"odd x --format mxfp8 --ignore re:.*layers.[0124].*q_b_proj", "group of 32 (DSPARK_EUNSUPPORTED)\n"},
    };
    size_t i;
    (void)state;
    assert_int_equal(run_cli("synth odd --preset tiny --set q_lora_rank=24").code, 0);
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        cli_result r = run_cli_to(4, "quantize %s --no-compare", rows[i][0]);
        assert_has(r.err, rows[i][1]);
        assert_has(r.err, strstr(rows[i][0], "int4") ? "  (--group-size N; or keep them with --ignore P, "
                                                     : "  (keep them with --ignore P, ");
    }
    /* other commands have other options for it */
    assert_has(run_cli_to(4, "synth x --preset tiny --format int4").err,
               "a group size of 32 fits all (DSPARK_EUNSUPPORTED)\n  (--group-size N; or choose other widths with --set ");
    assert_has(run_cli_to(4, "synth x --preset tiny --format mxfp8 --set q_lora_rank=24").err,
               "(DSPARK_EUNSUPPORTED)\n  (choose other widths with --set KEY=VALUE)\n");
    assert_has(run_cli_to(4, "synth x --preset tiny --format int4-asym --group-size 48").err, "(--group-size N)");
    assert_has(run_cli_to(4, "bench tiny --formats int4 --tokens 1 --repeat 1 --buffer 1M").err,
               "; leave int4 out of --formats (DSPARK_EUNSUPPORTED)\n");
    assert_int_equal(run_cli("quantize tiny fits --format int4 --group-size 32 --no-compare").code, 0);
    assert_int_equal(run_cli("quantize odd kept --format mxfp8 --ignore *q_b_proj --no-compare").code, 0);
}

/* Scales of one element: headers alone do not tell a block from a tensor, the config does. */
static void test_inspect_one_scale(void **state)
{
    static const char *const rows[][2] = {
        {"fp8-tensor", "bf16 in 31 modules, fp8 per-tensor in 36 modules;"},
        {"fp8-channel", "bf16 in 31 modules, fp8 per-channel in 36 modules;"},
        {"fp8-block", "bf16 in 31 modules, fp8 block in 36 modules;"},
    };
    cli_result r;
    size_t i;
    (void)state;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_int_equal(run_cli("quantize tiny one-%s --format %s --no-compare", rows[i][0],
                                 rows[i][0]).code, 0);
        assert_has(run_cli_to(0, "inspect one-%s", rows[i][0]).out, rows[i][1]);
    }
    assert_int_equal(remove(in_folder("one-fp8-block/config.json")), 0);
    assert_int_equal(run_program("/bin/cp", "tiny/config.json one-fp8-block/config.json").code, 0);
    r = run_cli_to(0, "inspect one-fp8-block"); /* a config that says nothing of it */
    assert_has(r.out, "fp8 block in 1 module, fp8 per-tensor or of one block in 35 modules\n");
    assert_int_equal(remove(in_folder("one-fp8-block/config.json")), 0);
    r = run_cli("inspect one-fp8-block");
    assert_int_equal(r.code, 1);
    assert_has(r.out, "fp8 block or group in 1 module, fp8 per-tensor or of one block in 35 modules");
    assert_has(r.out, ", 195,721 parameters, 195,759 stored elements, ");
}

/* Shards of other schemes in one merged linear are counted apart; q_a_proj is all BF16 here. */
static void test_inspect_mixed(void **state)
{
    cli_result r;
    (void)state;
    assert_int_equal(run_cli("quantize tiny mixed --format int8 --ignore "
                             "layers.2.self_attn.kv_a_proj_with_mqa --ignore *q_a_proj").code, 0);
    r = run_cli("inspect mixed");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "context_kv: 5 shards, int8 in 4, bf16 in 1, ");
    assert_has(r.out, "linears     int8: context_proj, q_b_proj x 5, kv_a_proj_with_mqa x 4");
    assert_has(r.out, "            bf16: q_a_proj x 5, ");
    assert_has(r.out, "            q_a: 5 shards, bf16 in 5, ");
    assert_has(r.out, "            gate_up: 10 shards, int8 in 10, ");
    assert_has(r.out, ", layers.2.self_attn.kv_a_proj_with_mqa, "); /* the one by its name */
    assert_has(r.out, "quantization_config: compressed-tensors, ");
}

/* What is quantised and not chosen becomes bf16, and that is said. */
static void test_what_quantising_again_loses(void **state)
{
    json_t *doc = run_json(0, "quantize nv again --format mxfp8 --targets *up_proj --no-compare");
    const json_t *modules = json_object_get(doc, "modules");
    size_t i, n_new = 0, n_lost = 0;
    (void)state;
    for (i = 0; i < json_array_size(modules); i++) {
        const json_t *m = json_array_get(modules, i);
        int chosen = strstr(said_text(m, "name"), "up_proj") != NULL;
        assert_string_equal(said_text(m, "format"), chosen ? "mxfp8" : "bf16");
        n_new += (size_t)chosen;
        n_lost += (size_t)!chosen;
    }
    assert_int_equal(n_new, N_LAYERS);
    assert_int_equal(n_lost, 31);
    json_decref(doc);
    cli_result r = run_cli_to(0, "quantize nv againtext --format mxfp8 --targets *up_proj --no-compare");
    assert_has(r.out, ": 5 modules in mxfp8 (");
    assert_has(r.out, "31 modules that were quantised and are not to be are bf16 now");
}

/* Codes that no rule of the config is about are read, and told. */
static void test_codes_without_a_rule(void **state)
{
    char path[800];
    json_t *doc, *config;
    (void)state;
    json_decref(run_json(0, "quantize tiny unruled --format nvfp4 --no-compare"));
    doc = run_json(0, "inspect unruled");
    assert_int_equal(json_array_size(json_object_get(doc, "warnings")), 0);
    json_decref(doc);
    snprintf(path, sizeof path, "%s/unruled/config.json", cli_folder());
    config = json_load_file(path, 0, NULL);
    assert_non_null(config);
    assert_int_equal(json_object_del(config, "quantization_config"), 0);
    assert_int_equal(json_dump_file(config, path, 0), 0);
    json_decref(config);
    doc = run_json(0, "inspect unruled");
    assert_int_equal(json_array_size(json_object_get(doc, "warnings")), 1);
    assert_has(json_string_value(json_array_get(json_object_get(doc, "warnings"), 0)),
               "36 linears hold codes that no rule of quantization_config addresses (the first: context_proj)");
    json_decref(doc);
}

/* ---- what synth writes ---- */

static double bf16_at(const dspark_tensor *t, uint64_t i)
{
    uint16_t half;
    uint32_t word;
    float f;
    memcpy(&half, (const char *)t->data + 2 * i, sizeof half);
    word = (uint32_t)half << 16;
    memcpy(&f, &word, sizeof f);
    return f;
}

/* Error of all weights of two BF16 checkpoints of the test folder, relative to a's. */
static double distance(const char *a, const char *b)
{
    dspark_checkpoint *x, *y;
    double errors = 0, squares = 0;
    char path[800];
    snprintf(path, sizeof path, "%s/%s", cli_folder(), a);
    assert_int_equal(dspark_checkpoint_open(&x, path, NULL), DSPARK_OK);
    snprintf(path, sizeof path, "%s/%s", cli_folder(), b);
    assert_int_equal(dspark_checkpoint_open(&y, path, NULL), DSPARK_OK);
    assert_int_equal(dspark_checkpoint_tensor_count(x), dspark_checkpoint_tensor_count(y));
    for (size_t t = 0; t < dspark_checkpoint_tensor_count(x); t++) {
        const dspark_tensor *from = dspark_checkpoint_tensor(x, t);
        const dspark_tensor *to = dspark_checkpoint_find(y, from->name);
        assert_non_null(to);
        assert_int_equal(from->n_bytes, to->n_bytes);
        for (uint64_t i = 0; strstr(from->name, "proj.weight") && i < from->n_elements; i++) {
            errors += pow(bf16_at(from, i) - bf16_at(to, i), 2);
            squares += pow(bf16_at(from, i), 2);
        }
    }
    dspark_checkpoint_close(x);
    dspark_checkpoint_close(y);
    return sqrt(errors / squares);
}

/* Every scheme that is read can be written, is detected as itself and means the weights it was made of. */
static void test_synth_schemes(void **state)
{
    static const struct {
        const char *format, *scheme;
        double least, most; /* error of the weights */
    } cases[] = {
        {"fp8-modelopt", "fp8_tensor", 0.01, 0.05},   {"nvfp4-modelopt", "nvfp4_modelopt", 0.05, 0.15},
        {"fp8-group", "fp8_group", 0.01, 0.05},       {"fp8-deepseek", "fp8_block", 0.01, 0.05},
        {"fp8-quark", "fp8_channel", 0.01, 0.05},     {"fp8-fnuz", "fp8_channel", 0.01, 0.05},
        {"fp8-e5m2", "fp8_tensor", 0.03, 0.1},        {"int8-packed", "int_packed", 0.001, 0.01},
        {"int4-asym", "int_packed", 0.03, 0.15},      {"int4-gidx", "int_packed", 0.03, 0.15},
        {"int3", "int_packed", 0.1, 0.25},            {"int3-old", "int_packed", 0.1, 0.25},
        {"int5", "int_packed", 0.02, 0.08},           {"int5-old", "int_packed", 0.02, 0.08},
        {"int6", "int_packed", 0.01, 0.04},           {"int6-old", "int_packed", 0.01, 0.04},
        {"int7", "int_packed", 0.003, 0.02},          {"int7-old", "int_packed", 0.003, 0.02},
    };
    char line[120];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double error;
        cli_result r = run_cli("synth s%zu --preset tiny --format %s", i, cases[i].format);
        assert_int_equal(r.code, 0);
        r = run_cli("inspect s%zu", i);
        assert_int_equal(r.code, 0);
        snprintf(line, sizeof line, "context_kv: 5 shards, %s in 5, ", cases[i].scheme);
        assert_has(r.out, line);
        assert_int_equal(run_cli("quantize s%zu b%zu --format bf16 --no-compare", i, i).code, 0);
        snprintf(line, sizeof line, "b%zu", i);
        error = distance("tiny", line);
        if (!(error >= cases[i].least && error <= cases[i].most))
            fail_msg("%s: the weights are off by %g", cases[i].format, error);
        assert_int_equal(run_cli("compare s%zu --tokens 2", i).code, 0);
    }
    /* what cannot be leaves nothing behind */
    cli_result r = run_cli("synth wrong --preset tiny --format int9");
    assert_int_equal(r.code, 2);
    assert_has(r.err, "int4-gidx");
    assert_int_equal(run_cli("synth wrong --preset tiny --format int3 --group-size 40").code, 4);
    assert_int_equal(run_cli("synth wrong --preset tiny --format fp8-quark --group-size 32").code, 2);
    assert_int_equal(run_cli("synth wrong --preset tiny --format int3 --shard-size 9000").code, 2);
    assert_false(folder_has("wrong"));
    assert_int_equal(run_cli("synth tiny --preset tiny --format int3").code, 2); /* there already */
    assert_false(folder_has("tiny.int3"));
}

/* ---- what quantize says ---- */

/* What quantising does to entries: a 4-bit weight costs more than rounding, in every layer and part; the
 * way back to BF16 changes little. Not with --no-compare. */
static void test_quantize_compares(void **state)
{
    static const struct {
        const char *args;
        double least, most; /* rms of the result, relative to that of the source */
    } cases[] = {{"c --format nvfp4", 10, 200}, {"c --format fp8", 2, 30}, {"c --format bf16", 0.9, 2.5}};
    char args[600];
    cli_result r;
    const json_t *layers;
    json_t *doc;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(args, sizeof args, "quantize %s %s --json", i < 2 ? "tiny" : "nv", cases[i].args);
        r = run_cli("%s", args);
        doc = said_json(&r);
        layers = json_object_get(json_object_get(doc, "context_entries"), "layers");
        assert_int_equal(json_array_size(layers), 10);
        for (size_t l = 0; l < 10; l++) {
            const json_t *part = json_array_get(layers, l);
            double rms = json_number_value(json_object_get(part, "rms_rel"));
            double source = json_number_value(json_object_get(part, "source_rms_rel"));
            assert_int_equal(json_integer_value(json_object_get(part, "layer")), l / 2);
            assert_string_equal(json_string_value(json_object_get(part, "part")),
                                l % 2 ? "rope_key" : "latent");
            assert_true(json_number_value(json_object_get(part, "max_abs")) > 0);
            if (!(rms >= cases[i].least * source && rms <= cases[i].most * source))
                fail_msg("%s: layer %zu: %g, source %g", args, l, rms, source);
        }
        json_decref(doc);
        tmpdir_remove(in_folder("c"));
    }
    /* a block, where the drafter has what it needs */
    snprintf(args, sizeof args, "quantize tiny c --format fp8 --json --target " DSPARK_TEST_DATA
             "/golden-draft/target-64x97");
    r = run_cli("%s", args);
    doc = said_json(&r);
    layers = json_object_get(json_object_get(doc, "context_entries"), "block");
    assert_int_equal(json_integer_value(json_object_get(layers, "tokens")), 7);
    assert_true(json_integer_value(json_object_get(layers, "tokens_equal")) >= 3);
    assert_true(json_number_value(json_object_get(layers, "logits_rms_rel")) > 0.001);
    assert_true(json_number_value(json_object_get(layers, "logits_rms_rel")) < 0.3);
    assert_true(json_number_value(json_object_get(layers, "confidence_change")) > 0);
    json_decref(doc);
    tmpdir_remove(in_folder("c"));
    r = run_cli("quantize tiny c --format int8 --no-compare");
    assert_null(strstr(r.out, "Context entries"));
    r = run_cli("quantize tiny d --format int8 --no-compare --json");
    doc = said_json(&r);
    assert_true(json_is_null(json_object_get(doc, "context_entries")));
    json_decref(doc);
}

/* ---- vLLM's merge ---- */

static void check_parts(const json_t *doc, int has_differences)
{
    const json_t *vllm = json_object_get(doc, "vllm_compat"), *layers;
    json_int_t n_differ = 0, n_rope_layers = 0;
    size_t i;
    assert_true(json_is_object(vllm));
    layers = json_object_get(vllm, "layers");
    assert_int_equal(json_array_size(layers), 2 * N_LAYERS);
    for (i = 0; i < json_array_size(layers); i++) {
        const json_t *part = json_array_get(layers, i);
        json_int_t differ = said_int(part, "values_different");
        double ratio = json_number_value(json_object_get(part, "rms_ratio"));
        assert_int_equal(said_int(part, "layer"), i / 2);
        assert_string_equal(said_text(part, "part"), i % 2 ? "rope_key" : "latent");
        assert_int_equal(said_int(part, "values"), 8 * (i % 2 ? 8 : 16));
        assert_int_equal(said_int(part, "max_ulp") > 0, differ > 0);
        n_differ += differ;
        if (!(i % 2)) /* the norm takes a common factor away */
            assert_true(ratio > 0.99 && ratio < 1.01);
        else if (differ)
            assert_true(ratio > 0.1 && ratio < 10);
        else
            assert_true(ratio == 1);
        /* A factor on the whole rope key: most of its elements move. */
        if (i % 2 && differ > 8 * 8 / 2) n_rope_layers++;
    }
    assert_int_equal(n_differ, said_int(vllm, "values_different"));
    assert_int_equal(n_rope_layers > 0, has_differences);
    assert_int_equal(n_differ > 0, has_differences);
}

static void test_compare_vllm(void **state)
{
    json_t *doc = run_json(0, "compare nv --vllm-compat");
    cli_result r;
    (void)state;
    assert_true(json_is_true(json_object_get(doc, "equal"))); /* of our ways: exit code 0 */
    check_parts(doc, 1);
    json_decref(doc);
    doc = run_json(0, "compare tiny --vllm-compat --isa ref");
    check_parts(doc, 0);
    json_decref(doc);
    r = run_cli("compare nv --vllm-compat");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "vLLM's merge against the exact one");
    assert_has(r.out, "rms ratio");
    assert_has(r.out, "\nequal: ");
    assert_has(r.out, "  kv_a_proj_with_mqa of 5 layers: nvfp4_ct in 5\n  of such formats vLLM keeps one scale: other entries\n");
    r = run_cli_to(0, "compare tiny --vllm-compat --isa ref");
    assert_has(r.out, "bf16 in 5\n  exact: every row keeps its own scales, if any: the same bits on these rows\n");
    /* "the same bits" is no praise where vLLM merges nothing because it would not load the checkpoint */
    assert_int_equal(run_cli("quantize tiny part --format nvfp4 --ignore layers.0.self_attn.kv_a* --no-compare").code, 0);
    r = run_cli_to(0, "compare part --vllm-compat --isa ref");
    assert_has(r.out, "bf16 in 1, nvfp4_ct in 4\n  vLLM would not load this checkpoint: it reads these layers as one "
               "matrix, under one format\n  nothing to merge was found: the same bits on these rows\n");
    assert_int_equal(run_cli("quantize tiny pair --format nvfp4 --ignore *.q_a* --no-compare").code, 0);
    doc = run_json(0, "compare pair --vllm-compat --isa ref");
    assert_string_equal(said_text(json_object_get(doc, "vllm_compat"), "merged"), "nvfp4_ct in 5");
    assert_has(said_text(json_object_get(doc, "vllm_compat"), "refused"), "q_a_proj (bf16 in layer 0)");
    json_decref(doc);
    assert_int_equal(run_cli("quantize tiny blocks --format fp8-block --no-compare").code, 0);
    assert_has(run_cli_to(0, "compare blocks --vllm-compat --isa ref").out, "24 rows of a layer are no multiple");
    /* codes that vLLM's merge does not know stay what they are */
    assert_int_equal(run_cli("synth e5m2 --preset tiny --format fp8-e5m2").code, 0);
    r = run_cli("compare e5m2 --vllm-compat");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "the same bits on these rows");
    r = run_cli("compare tiny --vllm-compat");
    assert_has(r.out, "the same bits on these rows");
    assert_null(strstr(run_cli("compare nv").out, "vLLM"));
    r = run_cli("compare x.st y.st --vllm-compat"); /* files have no weights to merge */
    assert_int_equal(r.code, 2);
    assert_has(r.err, "only --json");
}

static void test_context_vllm(void **state)
{
    dspark_checkpoint *file = NULL;
    char path[800];
    cli_result r = run_cli("context nv --taps dump.st --out exact.st");
    json_t *doc;
    (void)state;
    assert_int_equal(r.code, 0);
    assert_null(strstr(r.out, "vLLM"));
    r = run_cli("context nv --taps dump.st --out vllm.st --vllm-compat");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "vLLM's merge: ");
    assert_has(r.out, "(inexact, for comparing)");
    assert_false(same_files("exact.st", "vllm.st"));
    assert_int_equal(run_cli("compare exact.st vllm.st").code, 1); /* the entries too */
    doc = run_json(0, "context nv --taps dump.st --out again.st --path per-layer --vllm-compat");
    assert_true(json_is_true(json_object_get(doc, "vllm_compat")));
    json_decref(doc);
    assert_true(same_files("vllm.st", "again.st"));
    doc = run_json(0, "context nv --taps dump.st");
    assert_null(json_object_get(doc, "vllm_compat"));
    json_decref(doc);
    snprintf(path, sizeof path, "%s/vllm.st", cli_folder());
    assert_int_equal(dspark_checkpoint_open(&file, path, NULL), DSPARK_OK);
    assert_string_equal(dspark_checkpoint_metadata(file, "vllm_compat"), "true");
    dspark_checkpoint_close(file);
    snprintf(path, sizeof path, "%s/exact.st", cli_folder());
    assert_int_equal(dspark_checkpoint_open(&file, path, NULL), DSPARK_OK);
    assert_null(dspark_checkpoint_metadata(file, "vllm_compat"));
    dspark_checkpoint_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_format),
        cmocka_unit_test(test_fp8_is_fp8_channel),
        cmocka_unit_test(test_columns_and_groups),
        cmocka_unit_test(test_inspect_one_scale),
        cmocka_unit_test(test_inspect_mixed),
        cmocka_unit_test(test_what_quantising_again_loses),
        cmocka_unit_test(test_codes_without_a_rule),
        cmocka_unit_test(test_synth_schemes),
        cmocka_unit_test(test_quantize_compares),
        cmocka_unit_test(test_compare_vllm),
        cmocka_unit_test(test_context_vllm),
    };
    return cmocka_run_group_tests(tests, make_inputs, remove_folder);
}
