/* config.json: the published values, every default with its note, every refusal by name, hostile
 * text, and the guard on structs that a caller made up. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include <jansson.h>

#include "ckpt/config.h"
#include "support/oom.h"
#include "support/tmpdir.h"

static json_t *load_base(const char *name)
{
    char path[600];
    json_error_t bad;
    json_t *o;

    snprintf(path, sizeof path, "%s/configs/%s.json", DSPARK_TEST_DATA, name);
    o = json_load_file(path, 0, &bad);
    if (!o) fail_msg("%s: %s", path, bad.text);
    return o;
}

/* The base with the members of `patch` (JSON); {"key": "<delete>"} removes, one level of "a.b". */
static char *patched(const char *base, const char *patch)
{
    json_t *o = load_base(base), *p = json_loads(patch, 0, NULL);
    const char *key;
    json_t *value;
    char *text;

    if (!p) fail_msg("bad patch %s", patch);
    json_object_foreach(p, key, value)
    {
        const char *dot = strchr(key, '.'), *last = dot ? dot + 1 : key;
        json_t *in = o;
        if (dot) {
            char head[80];
            snprintf(head, sizeof head, "%.*s", (int)(dot - key), key);
            in = json_object_get(o, head);
            assert_non_null(in);
        }
        if (json_is_string(value) && !strcmp(json_string_value(value), "<delete>"))
            assert_int_equal(json_object_del(in, last), 0);
        else
            json_object_set(in, last, value);
    }
    text = json_dumps(o, 0);
    json_decref(o);
    json_decref(p);
    return text;
}

static dspark__config_doc *parse_ok(const char *base, const char *patch)
{
    char *text = patched(base, patch);
    dspark__config_doc *doc = NULL;
    dspark_error err;
    dspark_status st = dspark__config_parse(&doc, text, strlen(text), "config.json", &err);

    if (st != DSPARK_OK) fail_msg("%s %s: %s: %s", base, patch, err.where, err.message);
    free(text);
    return doc;
}

static int has_note(const dspark__config_doc *doc, const char *part)
{
    for (size_t i = 0; i < doc->n_notes; i++)
        if (strstr(doc->notes[i], part)) return 1;
    return 0;
}

static void expect_note(const dspark__config_doc *doc, const char *part)
{
    if (!has_note(doc, part)) fail_msg("no note \"%s\"", part);
}

/* ---- published values ------------------------------------------------------------------------ */

static void test_kimi_k3(void **state)
{
    static const int32_t taps[] = {2, 23, 47, 71, 89};
    dspark__config_doc *doc = parse_ok("kimi-k3", "{}");
    const dspark_config *c = &doc->config;

    (void)state;
    assert_int_equal(c->hidden_size, 7168);
    assert_int_equal(c->intermediate_size, 14336);
    assert_int_equal(c->n_layers, 5);
    assert_int_equal(c->n_heads, 64);
    assert_int_equal(c->q_lora_rank, 1536);
    assert_int_equal(c->kv_lora_rank, 512);
    assert_int_equal(c->qk_nope_head_dim, 128);
    assert_int_equal(c->qk_rope_head_dim, 64);
    assert_int_equal(c->v_head_dim, 128);
    assert_int_equal(c->vocab_size, 163840);
    assert_int_equal(c->n_taps, 5);
    assert_int_equal(c->tap_width, 7168);
    assert_int_equal(c->target_n_layers, 93);
    assert_memory_equal(c->tap_layers, taps, sizeof taps);
    assert_int_equal(c->block_size, 7);
    assert_int_equal(c->markov_rank, 256);
    assert_int_equal(c->markov_type, DSPARK_MARKOV_VANILLA);
    assert_int_equal(c->mask_token_id, 163837);
    assert_int_equal(c->max_positions, 1048576);
    assert_int_equal(c->fc_norm, 0);
    assert_int_equal(c->causal, 0);
    assert_int_equal(c->confidence_head, 1);
    assert_int_equal(c->confidence_with_markov, 1);
    assert_true(c->rms_norm_eps == 1e-5f);
    assert_true(c->logit_scale == 1.0f);
    assert_int_equal(c->rope_type, DSPARK_ROPE_YARN);
    assert_true(c->rope_theta == 50000.0 && c->rope_factor == 32.0);
    assert_true(c->rope_beta_fast == 32.0 && c->rope_beta_slow == 1.0);
    assert_true(c->rope_mscale == 1.0 && c->rope_mscale_all_dim == 1.0);
    assert_true(c->rope_extrapolation_factor == 1.0 && c->rope_attn_factor == 1.0);
    assert_int_equal(c->rope_original_max_positions, 32768);
    assert_int_equal(doc->context_only, 0);
    assert_null(doc->quant_method);
    assert_string_equal(doc->aux_hidden_stream, "prefix");
    expect_note(doc, "block_size absent: 7");
    expect_note(doc, "is_causal absent: non-causal");
    assert_false(has_note(doc, "rope_parameters absent"));
    dspark__config_free(doc);
}

static void test_other_published(void **state)
{
    dspark__config_doc *doc = parse_ok("kimi-k3-block5", "{}");

    (void)state;
    assert_int_equal(doc->config.block_size, 5);
    assert_false(has_note(doc, "block_size"));
    dspark__config_free(doc);

    doc = parse_ok("kimi-k3.1-pro", "{}");
    assert_int_equal(doc->config.n_heads, 96);
    assert_int_equal(doc->config.markov_rank, 512);
    assert_int_equal(doc->config.causal, 1);
    assert_false(has_note(doc, "is_causal"));
    dspark__config_free(doc);

    doc = parse_ok("lightseek", "{}");
    assert_int_equal(doc->config.fc_norm, 1);
    assert_int_equal(doc->config.tap_layers[4], 87);
    assert_int_equal(doc->config.rope_type, DSPARK_ROPE_DEFAULT);
    assert_true(doc->config.rope_theta == 50000.0);
    assert_string_equal(doc->aux_hidden_stream, "attn_res");
    expect_note(doc, "rope_parameters absent: plain RoPE");
    expect_note(doc, "draft_vocab_size absent: vocab_size 163840");
    expect_note(doc, "attn_res");
    dspark__config_free(doc);

    doc = parse_ok("tiny", "{}");
    assert_int_equal(doc->config.hidden_size, 64);
    dspark__config_free(doc);
}

/* ---- what is accepted, with its note --------------------------------------------------------- */

typedef struct accepted {
    const char *patch, *note;
    size_t offset; /* of an int or u32 in dspark_config */
    uint32_t value;
} accepted;

#define FIELD(name) offsetof(dspark_config, name)

static const accepted accepted_rows[] = {
    {"{\"architectures\": \"<delete>\"}", "architectures absent", FIELD(n_layers), 5},
    {"{\"model_type\": null}", "model_type absent", FIELD(n_layers), 5},
    {"{\"rope_parameters\": \"<delete>\"}", "rope_parameters absent", FIELD(rope_type), 0},
    {"{\"rope_parameters\": null}", "rope_parameters absent", FIELD(rope_type), 0},
    {"{\"rope_parameters\": {\"rope_type\": \"default\"}}", "block_size absent", FIELD(rope_type),
     0},
    {"{\"rope_parameters\": {\"rope_theta\": 50000.0}}", "block_size absent", FIELD(rope_type), 0},
    {"{\"rope_parameters.rope_type\": \"deepseek_yarn\"}", "block_size absent", FIELD(rope_type),
     1},
    {"{\"rope_parameters.rope_type\": \"<delete>\", \"rope_parameters.type\": \"yarn\"}",
     "block_size absent", FIELD(rope_type), 1},
    {"{\"rope_parameters.mscale_all_dim\": \"<delete>\"}", "mscale_all_dim absent: 0",
     FIELD(rope_type), 1},
    {"{\"rope_parameters.mscale\": \"<delete>\"}", "mscale absent: 1", FIELD(rope_type), 1},
    {"{\"rope_parameters.beta_fast\": \"<delete>\"}", "beta_fast", FIELD(rope_type), 1},
    {"{\"rope_parameters.apply_yarn_scaling\": true}", "block_size absent", FIELD(rope_type), 1},
    {"{\"rope_parameters.llama_4_scaling_beta\": 0.1}", "llama_4_scaling_beta", FIELD(rope_type),
     1},
    {"{\"rope_theta\": \"<delete>\"}", "block_size absent", FIELD(rope_type), 1},
    {"{\"rope_parameters.rope_theta\": \"<delete>\"}", "block_size absent", FIELD(rope_type), 1},
    {"{\"max_position_embeddings\": 1048577}", "exceeds factor", FIELD(rope_type), 1},
    {"{\"rope_scaling\": null}", "block_size absent", FIELD(rope_type), 1},
    {"{\"num_key_value_heads\": null}", "block_size absent", FIELD(n_heads), 64},
    {"{\"draft_vocab_size\": \"<delete>\"}", "draft_vocab_size absent", FIELD(vocab_size), 163840},
    {"{\"num_target_layers\": \"<delete>\"}", "num_target_layers absent", FIELD(n_taps), 5},
    {"{\"target_num_hidden_layers\": \"<delete>\"}", "target_num_hidden_layers absent",
     FIELD(target_n_layers), 0},
    {"{\"target_hidden_size\": \"<delete>\"}", "target_hidden_size absent", FIELD(tap_width), 7168},
    {"{\"target_hidden_size\": 4096}", "block_size absent", FIELD(tap_width), 4096},
    {"{\"hidden_act\": \"silu\"}", "block_size absent", FIELD(n_layers), 5},
    {"{\"markov_head_type\": \"<delete>\"}", "markov_head_type absent", FIELD(markov_type), 1},
    {"{\"markov_head_type\": \"classical\"}", "TorchSpec", FIELD(markov_type), 1},
    {"{\"markov_head_type\": \"gated\"}", "serve vanilla only", FIELD(markov_type), 2},
    {"{\"markov_head_type\": \"rnn\"}", "serve vanilla only", FIELD(markov_type), 3},
    {"{\"enable_confidence_head\": \"<delete>\"}", "enable_confidence_head absent",
     FIELD(confidence_head), 0},
    {"{\"confidence_head_with_markov\": \"<delete>\"}", "confidence_head_with_markov absent",
     FIELD(confidence_with_markov), 1},
    {"{\"is_causal\": true}", "block_size absent", FIELD(causal), 1},
    {"{\"dflash_config\": {\"causal\": true}}", "dflash_config.causal says causal", FIELD(causal),
     1},
    {"{\"is_causal\": false, \"dflash_config\": {\"causal\": true}}", "is_causal wins",
     FIELD(causal), 0},
    {"{\"layer_types\": [\"sliding_attention\", \"sliding_attention\", \"sliding_attention\", "
     "\"sliding_attention\", \"sliding_attention\"]}",
     "sliding_attention, so causal", FIELD(causal), 1},
    {"{\"layer_types\": [\"full_attention\", \"full_attention\", \"full_attention\", "
     "\"full_attention\", \"full_attention\"]}",
     "non-causal", FIELD(causal), 0},
    {"{\"block_size\": 8}", "hidden_act absent", FIELD(block_size), 8},
    {"{\"block_size\": 7, \"dflash_config\": {\"block_size\": 7}}", "hidden_act", FIELD(block_size),
     7},
    {"{\"dflash_config\": {\"target_layer_ids\": [2, 23, 47, 71, 89], \"mask_token_id\": 163837}}",
     "block_size absent", FIELD(n_taps), 5},
    {"{\"dspark_draft_topk\": 64}", "dspark_draft_topk 64", FIELD(n_layers), 5},
    {"{\"quantization_config\": {\"quant_method\": \"fp8\"}}", "names the method fp8",
     FIELD(n_layers), 5},
    {"{\"compression_config\": {}}", "compressed-tensors", FIELD(n_layers), 5},
    {"{\"mla_use_nope\": null, \"sample_from_anchor\": true}", "block_size absent", FIELD(n_layers),
     5},
};

static void test_accepted(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof accepted_rows / sizeof *accepted_rows; i++) {
        const accepted *r = &accepted_rows[i];
        dspark__config_doc *doc = parse_ok("kimi-k3", r->patch);
        uint32_t found;

        memcpy(&found, (const char *)&doc->config + r->offset, sizeof found);
        if (found != r->value) fail_msg("%s: %u, expected %u", r->patch, found, r->value);
        if (!has_note(doc, r->note)) fail_msg("%s: no note \"%s\"", r->patch, r->note);
        assert_true(doc->config.rope_theta == 50000.0);
        dspark__config_free(doc);
    }
}

static void test_values(void **state)
{
    dspark__config_doc *doc;

    (void)state;
    doc = parse_ok("kimi-k3", "{\"rope_parameters.mscale_all_dim\": \"<delete>\"}");
    assert_true(doc->config.rope_mscale_all_dim == 0.0);
    dspark__config_free(doc);
    doc = parse_ok("kimi-k3", "{\"logit_scale\": 0.5, \"rope_parameters.factor\": 8}");
    assert_true(doc->config.logit_scale == 0.5f && doc->config.rope_factor == 8.0);
    dspark__config_free(doc);
    /* the older place alone, and both places when they agree */
    doc = parse_ok("lightseek", "{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, "
                                "\"original_max_position_embeddings\": 4096}}");
    assert_int_equal(doc->config.rope_type, DSPARK_ROPE_YARN);
    assert_int_equal(doc->config.rope_original_max_positions, 4096);
    assert_true(doc->config.rope_theta == 50000.0 && doc->config.rope_beta_fast == 32.0);
    dspark__config_free(doc);
    doc = parse_ok("kimi-k3",
                   "{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 32, \"beta_fast\": "
                   "32, \"beta_slow\": 1, \"mscale\": 1, \"mscale_all_dim\": 1, "
                   "\"original_max_position_embeddings\": 32768}}");
    assert_true(doc->config.rope_factor == 32.0);
    dspark__config_free(doc);
    doc = parse_ok("tiny", "{\"dspark_parts\": [\"context\"]}");
    assert_int_equal(doc->context_only, 1);
    dspark__config_free(doc);
    doc = parse_ok("tiny", "{\"quantization_config\": {\"quant_method\": \"quark\"}}");
    assert_string_equal(doc->quant_method, "quark");
    dspark__config_free(doc);
}

/* ---- what is refused ------------------------------------------------------------------------- */

typedef struct refused {
    const char *patch;
    dspark_status status;
    const char *where, *text;
} refused;

static const refused refused_rows[] = {
    /* types */
    {"{\"hidden_size\": \"7168\"}", DSPARK_EFORMAT, "hidden_size", "a string"},
    {"{\"hidden_size\": 7168.0}", DSPARK_EFORMAT, "hidden_size", "real"},
    {"{\"hidden_size\": true}", DSPARK_EFORMAT, "hidden_size", "true"},
    {"{\"hidden_size\": [7168]}", DSPARK_EFORMAT, "hidden_size", "an array"},
    {"{\"rms_norm_eps\": true}", DSPARK_EFORMAT, "rms_norm_eps", "true"},
    {"{\"fc_norm\": 1}", DSPARK_EFORMAT, "fc_norm", "integer"},
    {"{\"mla_use_nope\": \"false\"}", DSPARK_EFORMAT, "mla_use_nope", "a string"},
    {"{\"model_type\": 3}", DSPARK_EFORMAT, "model_type", "a string"},
    {"{\"architectures\": \"K3DSparkModel\"}", DSPARK_EFORMAT, "architectures", "an array"},
    {"{\"architectures\": [1]}", DSPARK_EFORMAT, "architectures", "entry 0"},
    {"{\"rope_parameters\": []}", DSPARK_EFORMAT, "rope_parameters", "an object"},
    {"{\"rope_parameters.factor\": \"32\"}", DSPARK_EFORMAT, "rope_parameters.factor", "a number"},
    {"{\"rope_parameters.rope_type\": 1}", DSPARK_EFORMAT, "rope_parameters.rope_type", "a string"},
    {"{\"target_layer_ids\": 5}", DSPARK_EFORMAT, "target_layer_ids", "an array"},
    {"{\"target_layer_ids\": [2, 23.0, 47, 71, 89]}", DSPARK_EFORMAT, "target_layer_ids",
     "entry 1"},
    {"{\"layer_types\": [1]}", DSPARK_EFORMAT, "layer_types", "entry 0"},
    /* missing */
    {"{\"hidden_size\": \"<delete>\"}", DSPARK_EMODEL, "hidden_size", "missing"},
    {"{\"num_hidden_layers\": null}", DSPARK_EMODEL, "num_hidden_layers", "missing"},
    {"{\"q_lora_rank\": \"<delete>\"}", DSPARK_EMODEL, "q_lora_rank", "missing"},
    {"{\"rms_norm_eps\": \"<delete>\"}", DSPARK_EMODEL, "rms_norm_eps", "missing"},
    {"{\"max_position_embeddings\": \"<delete>\"}", DSPARK_EMODEL, "max_position_embeddings",
     "missing"},
    {"{\"mask_token_id\": \"<delete>\"}", DSPARK_EMODEL, "mask_token_id", "missing"},
    {"{\"markov_rank\": \"<delete>\"}", DSPARK_EMODEL, "markov_rank", "missing"},
    {"{\"target_layer_ids\": \"<delete>\"}", DSPARK_EMODEL, "target_layer_ids", "missing"},
    {"{\"target_layer_ids\": []}", DSPARK_EMODEL, "target_layer_ids", "empty"},
    {"{\"rope_theta\": \"<delete>\", \"rope_parameters.rope_theta\": \"<delete>\"}", DSPARK_EMODEL,
     "rope_theta", "missing"},
    {"{\"rope_parameters.factor\": \"<delete>\"}", DSPARK_EMODEL, "rope_parameters.factor",
     "missing"},
    {"{\"rope_parameters.original_max_position_embeddings\": \"<delete>\"}", DSPARK_EMODEL,
     "original_max_position_embeddings", "missing"},
    {"{\"rope_parameters.rope_type\": \"<delete>\"}", DSPARK_EMODEL, "rope_parameters.rope_type",
     "factor"},
    /* ranges */
    {"{\"hidden_size\": 0}", DSPARK_EMODEL, "hidden_size", "range"},
    {"{\"hidden_size\": -7168}", DSPARK_EMODEL, "hidden_size", "-7168"},
    {"{\"hidden_size\": 7167}", DSPARK_EMODEL, "hidden_size", "even"},
    {"{\"hidden_size\": 9223372036854775807}", DSPARK_EMODEL, "hidden_size", "range"},
    {"{\"num_hidden_layers\": 257}", DSPARK_EMODEL, "num_hidden_layers", "257"},
    {"{\"qk_rope_head_dim\": 63}", DSPARK_EMODEL, "qk_rope_head_dim", "even"},
    {"{\"vocab_size\": 4294967296, \"draft_vocab_size\": 4294967296}", DSPARK_EMODEL, "vocab_size",
     "range"},
    {"{\"rms_norm_eps\": 0}", DSPARK_EMODEL, "rms_norm_eps", "range"},
    {"{\"rms_norm_eps\": -1e-5}", DSPARK_EMODEL, "rms_norm_eps", "range"},
    {"{\"rms_norm_eps\": 1e-60}", DSPARK_EMODEL, "rms_norm_eps", "range"},
    {"{\"logit_scale\": 0}", DSPARK_EMODEL, "logit_scale", "other than 0"},
    {"{\"max_position_embeddings\": 0}", DSPARK_EMODEL, "max_position_embeddings", "range"},
    {"{\"max_position_embeddings\": 4294967296}", DSPARK_EMODEL, "max_position_embeddings",
     "range"},
    {"{\"mask_token_id\": 163840}", DSPARK_EMODEL, "mask_token_id", "163840"},
    {"{\"mask_token_id\": -1}", DSPARK_EMODEL, "mask_token_id", "-1"},
    {"{\"rope_theta\": 1, \"rope_parameters.rope_theta\": 1}", DSPARK_EMODEL, "rope_theta",
     "range"},
    {"{\"rope_parameters.factor\": 0.5}", DSPARK_EMODEL, "rope_parameters.factor", "range"},
    {"{\"rope_parameters.beta_fast\": 0.5}", DSPARK_EMODEL, "rope_parameters.beta_fast",
     "beta_slow"},
    {"{\"block_size\": 0}", DSPARK_EMODEL, "block_size", "range"},
    {"{\"num_key_value_heads\": 16}", DSPARK_EMODEL, "num_key_value_heads", "16"},
    /* taps */
    {"{\"target_layer_ids\": [2, 23, 47, 71, 93]}", DSPARK_EMODEL, "target_layer_ids", "93"},
    {"{\"target_layer_ids\": [2, 2, 47, 71, 89]}", DSPARK_EMODEL, "target_layer_ids", "twice"},
    {"{\"target_layer_ids\": [23, 2, 47, 71, 89]}", DSPARK_EMODEL, "target_layer_ids", "ascend"},
    {"{\"target_layer_ids\": [-1, 2, 47, 71, 89]}", DSPARK_EMODEL, "target_layer_ids", "-1"},
    {"{\"target_layer_ids\": [2, 23, 47, 71, 4294967296]}", DSPARK_EMODEL, "target_layer_ids",
     "no such layer"},
    {"{\"num_target_layers\": 4}", DSPARK_EMODEL, "num_target_layers", "counts taps"},
    {"{\"num_target_layers\": 93}", DSPARK_EMODEL, "num_target_layers", "DeepSpec"},
    {"{\"dflash_config\": {\"target_layer_ids\": [1, 2, 3, 4, 5]}}", DSPARK_EMODEL,
     "target_layer_ids", "dflash_config"},
    {"{\"target_layer_ids\": null, \"dflash_config\": {\"target_layer_ids\": [1, 2]}}",
     DSPARK_EMODEL, "target_layer_ids", "dflash_config"},
    {"{\"aux_hidden_stream\": \"middle\"}", DSPARK_EUNSUPPORTED, "aux_hidden_stream", "middle"},
    /* switches */
    {"{\"mla_use_nope\": true}", DSPARK_EUNSUPPORTED, "mla_use_nope", "unrotated"},
    {"{\"mla_use_output_gate\": true}", DSPARK_EUNSUPPORTED, "mla_use_output_gate", "gate"},
    {"{\"mla_use_qk_norm\": true}", DSPARK_EUNSUPPORTED, "mla_use_qk_norm", "norm"},
    {"{\"dspark_bonus_anchor\": true}", DSPARK_EUNSUPPORTED, "dspark_bonus_anchor", "1+N"},
    {"{\"sample_from_anchor\": false}", DSPARK_EUNSUPPORTED, "sample_from_anchor", "1+N"},
    {"{\"attention_bias\": true}", DSPARK_EUNSUPPORTED, "attention_bias", "bias"},
    {"{\"q_lora_rank\": null}", DSPARK_EUNSUPPORTED, "q_lora_rank", "null"},
    {"{\"draft_vocab_size\": 32000}", DSPARK_EUNSUPPORTED, "draft_vocab_size", "d2t"},
    {"{\"hidden_act\": \"situ\"}", DSPARK_EUNSUPPORTED, "hidden_act", "situ"},
    {"{\"markov_head_type\": \"lstm\"}", DSPARK_EUNSUPPORTED, "markov_head_type", "lstm"},
    {"{\"markov_rank\": 0}", DSPARK_EMODEL, "markov_rank", "confidence_head_with_markov"},
    {"{\"markov_rank\": 0, \"confidence_head_with_markov\": false}", DSPARK_EMODEL, "markov_rank",
     "rank > 0"},
    /* rotary */
    {"{\"rope_parameters.rope_type\": \"llama3\"}", DSPARK_EUNSUPPORTED,
     "rope_parameters.rope_type", "llama3"},
    {"{\"rope_parameters.type\": \"linear\"}", DSPARK_EMODEL, "rope_parameters.rope_type",
     "linear"},
    {"{\"rope_parameters.apply_yarn_scaling\": false}", DSPARK_EUNSUPPORTED,
     "rope_parameters.apply_yarn_scaling", "false"},
    {"{\"rope_parameters.attention_factor\": 1.2}", DSPARK_EUNSUPPORTED,
     "rope_parameters.attention_factor", "mscale"},
    {"{\"rope_parameters.partial_rotary_factor\": 0.5}", DSPARK_EUNSUPPORTED,
     "partial_rotary_factor", "0.5"},
    {"{\"rope_theta\": 10000.0}", DSPARK_EMODEL, "rope_theta", "rope_parameters.rope_theta"},
    {"{\"rope_scaling\": {\"rope_type\": \"default\"}}", DSPARK_EMODEL, "rope_parameters",
     "rope_scaling in rope_type"},
    {"{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 16, \"beta_fast\": 32, \"beta_slow\": 1, "
     "\"mscale\": 1, \"mscale_all_dim\": 1, \"original_max_position_embeddings\": 32768}}",
     DSPARK_EMODEL, "rope_parameters", "rope_scaling in factor"},
    {"{\"rope_interleave\": false}", DSPARK_EUNSUPPORTED, "rope_interleave", "half-split"},
    /* block size, causality */
    {"{\"block_size\": 7, \"dflash_config\": {\"block_size\": 8}}", DSPARK_EMODEL, "block_size",
     "dflash_config.block_size 8"},
    {"{\"dflash_config\": {\"block_size\": 8}}", DSPARK_EMODEL, "block_size", "anchor"},
    {"{\"block_size\": 8, \"dflash_config\": {\"causal\": false}}", DSPARK_EMODEL, "block_size",
     "ambiguous"},
    {"{\"layer_types\": [\"full_attention\", \"sliding_attention\", \"full_attention\", "
     "\"full_attention\", \"full_attention\"]}",
     DSPARK_EUNSUPPORTED, "layer_types", "mixed"},
    {"{\"layer_types\": [\"full_attention\"]}", DSPARK_EMODEL, "layer_types", "num_hidden_layers"},
    {"{\"layer_types\": [\"linear_attention\"]}", DSPARK_EUNSUPPORTED, "layer_types", "linear"},
    /* other kinds of config */
    {"{\"text_config\": {}}", DSPARK_EUNSUPPORTED, "text_config", "nested"},
    {"{\"speculators_model_type\": \"dspark\"}", DSPARK_EUNSUPPORTED, "speculators_model_type",
     "speculators"},
    {"{\"model_type\": \"atom_k3_dspark\"}", DSPARK_EUNSUPPORTED, "model_type", "atom_k3_dspark"},
    {"{\"architectures\": [\"DSparkDraftModel\"]}", DSPARK_EUNSUPPORTED, "architectures",
     "DSparkDraftModel"},
    {"{\"dspark_parts\": [\"block\"]}", DSPARK_EUNSUPPORTED, "dspark_parts", "context"},
    {"{\"dspark_parts\": []}", DSPARK_EUNSUPPORTED, "dspark_parts", "context"},
    {"{\"quantization_config\": \"fp8\"}", DSPARK_EFORMAT, "quantization_config", "an object"},
};

static void expect_refusal(const char *label, const char *text, size_t n, dspark_status status,
                           const char *where, const char *message)
{
    dspark__config_doc *doc = (dspark__config_doc *)1;
    dspark_error err;
    dspark_status st = dspark__config_parse(&doc, text, n, "config.json", &err);

    if (st != status || err.code != status)
        fail_msg("%s: %s, expected %s (%s: %s)", label, dspark_status_name(st),
                 dspark_status_name(status), err.where, err.message);
    assert_null(doc);
    if (!strstr(err.where, "config.json")) fail_msg("%s: where is \"%s\"", label, err.where);
    if (!strstr(err.where, where)) fail_msg("%s: where is \"%s\"", label, err.where);
    if (!strstr(err.message, message)) fail_msg("%s: message is \"%s\"", label, err.message);
    /* the error is optional */
    assert_int_equal(dspark__config_parse(&doc, text, n, "config.json", NULL), status);
}

static void test_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refused_rows / sizeof *refused_rows; i++) {
        const refused *r = &refused_rows[i];
        char *text = patched("kimi-k3", r->patch);
        expect_refusal(r->patch, text, strlen(text), r->status, r->where, r->text);
        free(text);
    }
}

static void test_not_json(void **state)
{
    static const struct {
        const char *text, *message;
    } rows[] = {
        {"", ""},
        {"{", ""},
        {"[]", ""},
        {"{\"a\": 1, \"a\": 2}", "a"},
        {"{} x", ""},
        {"\xef\xbb\xbf{}", "byte order mark"},
        {"{\"a\": NaN}", ""},
        {"{'a': 1}", ""},
        {"{\"hidden_size\": 99999999999999999999}", ""},
        {"{\"a\": 1e999}", ""},
        {"{\"\xff\": 1}", ""},
    };
    char *deep = malloc(100001);

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        expect_refusal(rows[i].text, rows[i].text, strlen(rows[i].text), DSPARK_EFORMAT, "",
                       rows[i].message);
    memset(deep, '[', 100000);
    expect_refusal("deep", deep, 100000, DSPARK_EFORMAT, "", "");
    free(deep);
    /* the size is refused before a byte is read */
    expect_refusal("large", "{}", DSPARK__CONFIG_MAX_BYTES + 1, DSPARK_EFORMAT, "", "16777216");
}

/* Every proper prefix of a config is refused, and none crashes. */
static void test_truncated(void **state)
{
    char *text = patched("tiny", "{}");
    size_t n = strlen(text);

    (void)state;
    for (size_t i = 0; i < n; i++) {
        dspark__config_doc *doc;
        char *copy = malloc(i + 1); /* exact, so that a sanitizer sees one byte too far */
        memcpy(copy, text, i);
        assert_int_equal(dspark__config_parse(&doc, copy, i, "config.json", NULL), DSPARK_EFORMAT);
        free(copy);
    }
    free(text);
}

/* ---- files ----------------------------------------------------------------------------------- */

static void test_files(void **state)
{
    const char *dir = tmpdir_make(), *file = tmpdir_path(dir, "config.json");
    char *text = patched("tiny", "{}");
    dspark__config_doc *doc;
    dspark_error err;

    (void)state;
    assert_int_equal(dspark__config_read(&doc, dir, &err), DSPARK_EIO);
    assert_null(doc);
    assert_non_null(strstr(err.where, "config.json"));
    tmpdir_write(file, text, strlen(text));
    assert_int_equal(dspark__config_read(&doc, dir, &err), DSPARK_OK);
    dspark__config_free(doc);
    assert_int_equal(dspark__config_read(&doc, file, &err), DSPARK_OK);
    dspark__config_free(doc);
    tmpdir_write(tmpdir_path(dir, "model.safetensors"), "x", 1);
    assert_int_equal(dspark__config_read(&doc, tmpdir_path(dir, "model.safetensors"), &err),
                     DSPARK_OK);
    assert_null(doc->quant_method);
    dspark__config_free(doc);
    tmpdir_write(tmpdir_path(dir, "hf_quant_config.json"), "{}", 2);
    assert_int_equal(dspark__config_read(&doc, dir, &err), DSPARK_OK);
    assert_string_equal(doc->quant_method, "modelopt");
    dspark__config_free(doc);
    assert_int_equal(truncate(file, (off_t)DSPARK__CONFIG_MAX_BYTES + 1), 0);
    assert_int_equal(dspark__config_read(&doc, dir, &err), DSPARK_EFORMAT);
    assert_non_null(strstr(err.message, "16777216"));
    free(text);
}

static void test_no_memory(void **state)
{
    char *text = patched("kimi-k3", "{\"quantization_config\": {\"quant_method\": \"fp8\"}}");
    size_t n;
    dspark__config_doc *doc;
    dspark_error err;

    (void)state;
    if (!oom_available()) skip();
    oom_count_start();
    assert_int_equal(dspark__config_parse(&doc, text, strlen(text), "config.json", &err),
                     DSPARK_OK);
    n = oom_stop();
    dspark__config_free(doc);
    assert_true(n > 5);
    for (size_t i = 1; i <= n; i++) {
        dspark_status st;
        oom_fail_nth(i);
        st = dspark__config_parse(&doc, text, strlen(text), "config.json", &err);
        oom_stop();
        if (st != DSPARK_ENOMEM)
            fail_msg("allocation %zu of %zu: %s", i, n, dspark_status_name(st));
        assert_null(doc);
    }
    free(text);
}

/* ---- structs of a caller --------------------------------------------------------------------- */

static void test_check(void **state)
{
    dspark__config_doc *doc = parse_ok("kimi-k3", "{}");
    dspark_error err;
    size_t n = 0;

    (void)state;
    assert_int_equal(dspark__config_check(&doc->config, NULL, &err), DSPARK_OK);
    assert_int_equal(dspark__config_check(NULL, NULL, &err), DSPARK_EINVAL);
#define SPOIL(field, value, name)                                                  \
    do {                                                                           \
        dspark_config bad = doc->config;                                           \
        bad.field = value;                                                         \
        assert_int_equal(dspark__config_check(&bad, "here", &err), DSPARK_EINVAL); \
        if (!strstr(err.where, name) || !strstr(err.where, "here"))                \
            fail_msg("%s = %s: where is \"%s\"", #field, #value, err.where);       \
        n++;                                                                       \
    } while (0)
    SPOIL(hidden_size, 0, "hidden_size");
    SPOIL(hidden_size, UINT32_MAX, "hidden_size");
    SPOIL(hidden_size, 7169, "hidden_size");
    SPOIL(intermediate_size, 3, "intermediate_size");
    SPOIL(n_layers, DSPARK_MAX_LAYERS + 1, "num_hidden_layers");
    SPOIL(n_heads, 0, "num_attention_heads");
    SPOIL(q_lora_rank, 0, "q_lora_rank");
    SPOIL(kv_lora_rank, DSPARK__MAX_WIDTH + 1, "kv_lora_rank");
    SPOIL(qk_rope_head_dim, 7, "qk_rope_head_dim");
    SPOIL(qk_rope_head_dim, 0, "qk_rope_head_dim");
    SPOIL(v_head_dim, 0, "v_head_dim");
    SPOIL(vocab_size, 0, "vocab_size");
    SPOIL(n_taps, 0, "target_layer_ids");
    SPOIL(n_taps, DSPARK_MAX_TAPS + 1, "target_layer_ids");
    SPOIL(tap_width, 0, "target_hidden_size");
    SPOIL(tap_layers[0], -1, "target_layer_ids");
    SPOIL(tap_layers[0], 23, "target_layer_ids");
    SPOIL(tap_layers[4], 93, "target_layer_ids");
    SPOIL(block_size, 0, "block_size");
    SPOIL(markov_rank, 0, "markov_rank");
    SPOIL(markov_type, DSPARK_MARKOV_NONE, "markov_head_type");
    SPOIL(mask_token_id, 163840, "mask_token_id");
    SPOIL(max_positions, 0, "max_position_embeddings");
    SPOIL(max_positions, UINT64_MAX, "max_position_embeddings");
    SPOIL(rms_norm_eps, 0.0f, "rms_norm_eps");
    SPOIL(rms_norm_eps, (float)NAN, "rms_norm_eps");
    SPOIL(logit_scale, (float)INFINITY, "logit_scale");
    SPOIL(rope_type, (dspark_rope_type)7, "rope_type");
    SPOIL(rope_theta, 0.0, "rope_theta");
    SPOIL(rope_theta, NAN, "rope_theta");
    SPOIL(rope_factor, 0.0, "rope_factor");
    SPOIL(rope_beta_slow, 0.0, "rope_beta_fast");
    SPOIL(rope_mscale, NAN, "rope_mscale");
    SPOIL(rope_attn_factor, 0.0, "rope_attn_factor");
    SPOIL(rope_extrapolation_factor, -1.0, "rope_extrapolation_factor");
    SPOIL(rope_original_max_positions, 0, "rope_original_max_positions");
#undef SPOIL
    assert_int_equal(n, 36);
    dspark__config_free(doc);
    dspark__config_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kimi_k3),   cmocka_unit_test(test_other_published),
        cmocka_unit_test(test_accepted),  cmocka_unit_test(test_values),
        cmocka_unit_test(test_refused),   cmocka_unit_test(test_not_json),
        cmocka_unit_test(test_truncated), cmocka_unit_test(test_files),
        cmocka_unit_test(test_no_memory), cmocka_unit_test(test_check),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
