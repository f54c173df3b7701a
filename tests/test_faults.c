/* Faults of loading that users of drafters reported (docs/faults.md), end to end: the same broken
 * or foreign checkpoint through opening, inspection and the command. The rules one by one are
 * tested in test_safetensors.c, test_config.c and test_roster.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>
#include <jansson.h>

#include "dspark/dspark.h"
#include "support/cli_said.h"
#include "support/fake.h"
#include "support/fixture.h"
#include "support/stfile.h"
#include "support/tmpdir.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define KV1 "layers.1.self_attn.kv_a_proj_with_mqa."

static fake f;

/* f becomes the tiny roster. */
static void tiny_roster(void)
{
    dspark__config_doc *doc = fake_config("tiny");
    fake_from_roster(&f, &doc->config, 0);
    dspark__config_free(doc);
}

/* The tiny config with one key set to a JSON value (NULL: the key is taken out). */
static char *config_with(const char *key, const char *value)
{
    char *text = fake_config_text("tiny"), *out;
    json_t *o = json_loads(text, 0, NULL);
    assert_non_null(o);
    if (key && value)
        json_object_set_new(o, key, json_loads(value, JSON_DECODE_ANY, NULL));
    else if (key)
        json_object_del(o, key);
    out = json_dumps(o, JSON_INDENT(2));
    json_decref(o);
    free(text);
    return out;
}

/* f with this config in a new folder. */
static const char *write_with(const char *key, const char *value)
{
    const char *dir = tmpdir_make();
    char *config = config_with(key, value);
    fake_write(&f, dir, config);
    free(config);
    return dir;
}

static void has(const char *text, const char *part)
{
    if (!strstr(text, part)) fail_msg("\"%s\" is not in: %s", part, text);
}

static json_t *inspect(const char *path, dspark_verdict verdict)
{
    dspark_inspection *in;
    dspark_error err;
    check(dspark_inspect(&in, path, NULL, &err), DSPARK_OK, &err);
    json_t *o = json_loads(dspark_inspection_json(in), 0, NULL);
    assert_non_null(o);
    if (dspark_inspection_verdict(in) != verdict)
        fail_msg("verdict %d, expected %d: %s", dspark_inspection_verdict(in), verdict,
                 json_string_value(json_object_get(o, "reason")));
    dspark_inspection_free(in);
    return o;
}

/* Opening fails with this code and these texts ("|" between them) in where or message; inspection
 * reaches the verdict that belongs to the code and says the same thing first. */
static void refused(const char *dir, dspark_status code, const char *texts)
{
    char copy[300], all[900], *rest = copy;
    dspark_model *m = (void *)&f;
    dspark_error err;
    json_t *o;
    dspark_status st = dspark_model_open(&m, dir, NULL, &err);
    if (st != code)
        fail_msg("%s: %s [%s] %s", texts, dspark_status_name(st), err.where, err.message);
    assert_null(m);
    snprintf(all, sizeof all, "%s: %s", err.where, err.message);
    snprintf(copy, sizeof copy, "%s", texts);
    for (char *text = strsep(&rest, "|"); text; text = strsep(&rest, "|")) has(all, text);
    o = inspect(dir, code == DSPARK_EUNSUPPORTED ? DSPARK_RECOGNISED : DSPARK_BROKEN);
    has(json_string_value(json_object_get(o, "reason")), err.message);
    json_decref(o);
}

/* ---- files ---- */

/* A file cut by one byte or by a page, and one with 13 bytes too many: the same text wherever the
 * file is opened, with what the header promises and what is there. */
static void other_sizes_than_promised(void **state)
{
    static const int changes[] = {-1, -4096, 13};
    (void)state;
    for (size_t i = 0; i < COUNT(changes); i++) {
        fixture fx;
        struct stat sb;
        char file[600], promised[40], found[40], texts[120];
        dspark_checkpoint *c = NULL;
        dspark_error err;
        dspark_model *m;
        uint64_t data = 0;
        open_fixture(&fx, NULL, 0);
        check(dspark_checkpoint_open(&c, fx.dir, &err), DSPARK_OK, &err);
        for (size_t t = 0; t < dspark_checkpoint_tensor_count(c); t++)
            data += dspark_checkpoint_tensor(c, t)->n_bytes;
        dspark_checkpoint_close(c);
        snprintf(file, sizeof file, "%s/model.safetensors", fx.dir);
        assert_int_equal(stat(file, &sb), 0);
        assert_int_equal(truncate(file, sb.st_size + changes[i]), 0);
        snprintf(promised, sizeof promised, "%llu bytes", (unsigned long long)data);
        snprintf(found, sizeof found, "has %lld", (long long)(sb.st_size + changes[i]));
        if (changes[i] > 0) /* the data section is compared */
            snprintf(found, sizeof found, "%llu", (unsigned long long)(data + 13));
        check(dspark_checkpoint_open(&c, file, &err), DSPARK_EFORMAT, &err);
        has(err.where, "model.safetensors");
        has(err.message, changes[i] < 0 ? "truncated" : "trailing");
        has(err.message, promised);
        char first[sizeof err.message];
        memcpy(first, err.message, sizeof first);
        snprintf(texts, sizeof texts, "model.safetensors|%s", promised);
        refused(fx.dir, DSPARK_EFORMAT, texts);
        check(dspark_model_open(&m, fx.dir, NULL, &err), DSPARK_EFORMAT, &err);
        assert_string_equal(err.message, first);
        cli_result r = run_cli("inspect %s", fx.dir);
        assert_int_equal(r.code, 3);
        has(r.out, first);
        /* as a dump it is read by the same reader */
        r = run_cli("context %s --taps %s", fx.dir, file);
        assert_int_equal(r.code, 3);
        has(r.err, first);
        close_fixture(&fx);
    }
}

/* ---- rosters ---- */

static void a_missing_tensor_stops_everything(void **state)
{
    static const char name[] = "layers.3.self_attn.kv_a_layernorm.weight";
    (void)state;
    tiny_roster();
    fake_remove(&f, name);
    const char *dir = write_with(NULL, NULL);
    refused(dir, DSPARK_EMODEL, "layers.3.self_attn.kv_a_layernorm.weight|missing");
    static const char *const commands[] = {"inspect", "compare", "context --taps x.st",
                                           "bench --tokens 1 --repeat 3 --buffer 1M"};
    for (size_t i = 0; i < COUNT(commands); i++) {
        cli_result r = run_cli("%s %s", commands[i], dir);
        if (r.code == 0) fail_msg("dspark %s: exit code 0", commands[i]);
        has(i == 0 ? r.out : r.err, name);
    }
}

/* One layer's KV projection under another name never leaves its shard of the matrix empty. */
static void a_renamed_kv_projection(void **state)
{
    static const char name[] = "layers.2.self_attn.kv_a_proj_with_mqa.weight";
    static const char *const others[] = {
        "layers.2.self_attn.kv_a_proj.weight", "layers.02.self_attn.kv_a_proj_with_mqa.weight",
        "layers.2.self_attn.kv_a_proj_with_mqa.base.weight"};
    (void)state;
    for (size_t i = 0; i < COUNT(others); i++) {
        char texts[200];
        tiny_roster();
        fake_rename(&f, name, others[i]);
        snprintf(texts, sizeof texts, "%s|missing|%s", name, others[i]);
        refused(write_with(NULL, NULL), DSPARK_EMODEL, texts);
    }
    tiny_roster();
    fake_add(&f, "layers.5.self_attn.kv_a_proj_with_mqa.weight", DSPARK_BF16, 2, 24, 64);
    refused(write_with(NULL, NULL), DSPARK_EMODEL, "layers.5.|num_hidden_layers");
}

/* MLA tensors under a class with q, k and v projections, and the reverse: whichever key of the
 * config says so, the first tensor that does not belong is named. */
static void the_other_kind_of_attention(void **state)
{
    static const char mla[] = "layers.0.self_attn.kv_a_proj_with_mqa.weight";
    (void)state;
    tiny_roster();
    refused(write_with("architectures", "[\"DSparkDraftModel\"]"), DSPARK_EMODEL, mla);
    const char *dir = tmpdir_make();
    fake_write(&f, dir, "{\"architectures\": [\"DSparkDraftModel\"]}");
    refused(dir, DSPARK_EMODEL, mla);
    for (uint32_t l = 0; l < 5; l++) {
        static const char *const from[] = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"};
        static const char *const to[] = {"q_proj", "k_proj", "v_proj"};
        for (int i = 0; i < 3; i++) {
            char a[120], b[120];
            snprintf(a, sizeof a, "layers.%u.self_attn.%s.weight", l, from[i]);
            snprintf(b, sizeof b, "layers.%u.self_attn.%s.weight", l, to[i]);
            fake_rename(&f, a, b);
        }
    }
    refused(write_with(NULL, NULL), DSPARK_EMODEL, "layers.0.self_attn.q_proj.weight");
    /* config and tensors agree: simply another family */
    refused(write_with("architectures", "[\"DSparkDraftModel\"]"), DSPARK_EUNSUPPORTED, "q_proj");
}

/* A weight as tall as it is wide passes whichever way it was stored: said, with its name. */
static void a_square_weight_is_pointed_out(void **state)
{
    dspark__config_doc *doc = fake_config("tiny");
    json_t *o, *warnings;
    (void)state;
    o = inspect((tiny_roster(), write_with(NULL, NULL)), DSPARK_USABLE);
    assert_int_equal(json_array_size(json_object_get(o, "warnings")), 0);
    json_decref(o);
    doc->config.kv_lora_rank = 56; /* 56 + 8 = hidden_size */
    fake_from_roster(&f, &doc->config, 0);
    dspark__config_free(doc);
    o = inspect(write_with("kv_lora_rank", "56"), DSPARK_USABLE);
    warnings = json_object_get(o, "warnings");
    assert_int_equal(json_array_size(warnings), 1);
    has(json_string_value(json_array_get(warnings, 0)), "layers.0.self_attn.kv_a_proj_with_mqa");
    has(json_string_value(json_array_get(warnings, 0)), "5 weights");
    has(json_string_value(json_array_get(warnings, 0)), "transposed");
    json_decref(o);
}

/* ---- heads and embeddings ---- */

static void expect_extras(const char *dir, const char *head, const char *embed, const char *lm_head)
{
    json_t *o = inspect(dir, DSPARK_USABLE);
    assert_string_equal(json_string_value(json_object_get(o, "confidence_head")), head);
    assert_string_equal(json_string_value(json_object_get(o, "embed_tokens")), embed);
    assert_string_equal(json_string_value(json_object_get(o, "lm_head")), lm_head);
    json_decref(o);
}

/* What a file has of its own is reported as its own, and what it lacks is not made up. */
static void own_heads_and_embeddings(void **state)
{
    dspark_model *m;
    dspark_error err;
    (void)state;
    tiny_roster();
    expect_extras(write_with(NULL, NULL), "loaded", "own", "absent");
    fake_add(&f, "lm_head.weight", DSPARK_BF16, 2, 97, 64);
    expect_extras(write_with(NULL, NULL), "loaded", "own", "own");
    const char *dir = write_with("enable_confidence_head", "false");
    expect_extras(dir, "unused", "own", "own");
    check(dspark_model_open(&m, dir, NULL, &err), DSPARK_OK, &err);
    dspark_model_close(m);
    fake_remove(&f, "confidence_head.proj.bias");
    fake_remove(&f, "embed_tokens.weight");
    expect_extras(write_with(NULL, NULL), "no-bias", "absent", "own");
    fake_remove(&f, "confidence_head.proj.weight");
    expect_extras(write_with("enable_confidence_head", "false"), "absent", "absent", "own");
    refused(write_with(NULL, NULL), DSPARK_EMODEL, "confidence_head.proj.weight|missing");
    /* a head for fewer tokens than there are, without the map that such a head needs */
    fake_find(&f, "lm_head.weight")->shape[0] = 32;
    refused(write_with("enable_confidence_head", "false"), DSPARK_EMODEL,
            "lm_head.weight|[32, 64]|[97, 64]|d2t");
}

/* ---- quantised tensors where bf16 is served ---- */

typedef struct quantised {
    const char *module; /* with its dot */
    dspark_dtype dtype; /* of the weight; NONE: no weight */
    const char *suffix; /* added beside it */
    dspark_dtype suffix_dtype;
    uint32_t rank;
    uint64_t d0, d1;
    dspark_status status;
    const char *texts;
} quantised;

/* Codes are never multiplied as if they were numbers, and a scale is never dropped. (The files hold
 * zeros: a scale of 0 is one more thing that is named.) */
static void quantised_tensors_are_named(void **state)
{
    static const quantised rows[] = {
        /* an FP8 weight with each spelling and shape of its scale, and without one */
        {KV1, DSPARK_F8_E4M3, "weight_scale", DSPARK_F32, 0, 0, 0, DSPARK_EMODEL, KV1 "|above zero"},
        {KV1, DSPARK_F8_E4M3, "weight_scale", DSPARK_F32, 1, 1, 0, DSPARK_EMODEL, KV1 "|above zero"},
        {KV1, DSPARK_F8_E4M3, "weight_scale", DSPARK_F32, 1, 23, 0, DSPARK_EMODEL, KV1},
        {KV1, DSPARK_F8_E4M3, "weight_scale", DSPARK_F32, 2, 1, 24, DSPARK_EMODEL, KV1},
        {KV1, DSPARK_F8_E4M3, "weight_scale", DSPARK_F32, 1, 5, 0, DSPARK_EMODEL, KV1},
        {KV1, DSPARK_F8_E4M3, "weight_scale_inv", DSPARK_F32, 2, 2, 4, DSPARK_EMODEL, KV1},
        {KV1, DSPARK_F8_E4M3, "scale", DSPARK_F32, 2, 2, 4, DSPARK_EMODEL, KV1 "scale|need"},
        {KV1, DSPARK_F8_E4M3, NULL, DSPARK_F32, 0, 0, 0, DSPARK_EMODEL, KV1 "|without a scale"},
        {KV1, DSPARK_I8, NULL, DSPARK_F32, 0, 0, 0, DSPARK_EMODEL, KV1 "|without a scale"},
        /* packed codes alone, with their scale, and beside a plain weight */
        {KV1, DSPARK_DTYPE_NONE, "weight_packed", DSPARK_U8, 2, 24, 32, DSPARK_EMODEL,
         KV1 "weight_packed|without weight_scale"},
        {KV1, DSPARK_BF16, "weight_packed", DSPARK_U8, 2, 24, 32, DSPARK_EMODEL,
         KV1 "|both weight and weight_packed"},
        {KV1, DSPARK_DTYPE_NONE, "qweight", DSPARK_I32, 2, 8, 24, DSPARK_EMODEL, KV1},
        /* a companion beside a plain weight, wherever it stands */
        {KV1, DSPARK_BF16, "weight_scale", DSPARK_F32, 0, 0, 0, DSPARK_EMODEL, KV1 "|beside"},
        {KV1, DSPARK_BF16, "scale", DSPARK_F32, 0, 0, 0, DSPARK_EMODEL, KV1 "|beside"},
        {"layers.0.mlp.up_proj.", DSPARK_BF16, "weight_scale", DSPARK_F32, 1, 1, 0, DSPARK_EMODEL,
         "layers.0.mlp.up_proj.|beside"},
        {"layers.0.input_layernorm.", DSPARK_BF16, "weight_scale_inv", DSPARK_F32, 0, 0, 0,
         DSPARK_EMODEL, "layers.0.input_layernorm.|beside"},
        {"confidence_head.proj.", DSPARK_BF16, "weight_scale", DSPARK_F32, 0, 0, 0, DSPARK_EMODEL,
         "confidence_head.proj.|beside"},
        {"lm_head.", DSPARK_BF16, "weight_scale", DSPARK_F32, 0, 0, 0, DSPARK_EMODEL,
         "lm_head.|beside"},
        {"lm_head.", DSPARK_F8_E4M3, "weight_scale", DSPARK_F32, 0, 0, 0, DSPARK_EMODEL,
         "lm_head.|above zero"},
        {"lm_head.", DSPARK_F8_E4M3, NULL, DSPARK_F32, 0, 0, 0, DSPARK_EMODEL,
         "lm_head.weight|without a scale"},
        {"lm_head.", DSPARK_DTYPE_NONE, "weight_scale", DSPARK_F32, 0, 0, 0, DSPARK_EMODEL,
         "lm_head.weight_scale|scale without a weight"},
    };
    (void)state;
    for (size_t i = 0; i < COUNT(rows); i++) {
        const quantised *q = &rows[i];
        char name[120];
        tiny_roster();
        fake_add(&f, "lm_head.weight", DSPARK_BF16, 2, 97, 64);
        snprintf(name, sizeof name, "%sweight", q->module);
        if (q->dtype == DSPARK_DTYPE_NONE)
            fake_remove(&f, name);
        else
            fake_find(&f, name)->dtype = q->dtype;
        snprintf(name, sizeof name, "%s%s", q->module, q->suffix ? q->suffix : "");
        if (q->suffix) fake_add(&f, name, q->suffix_dtype, q->rank, q->d0, q->d1);
        refused(write_with(NULL, NULL), q->status, q->texts);
    }
    /* packed with its scale: served; the q_a beside it stays bf16 */
    dspark_model *m;
    dspark_error err;
    tiny_roster();
    fake_rename(&f, KV1 "weight", KV1 "weight_packed");
    fake_find(&f, KV1 "weight_packed")->dtype = DSPARK_U8;
    fake_find(&f, KV1 "weight_packed")->shape[1] = 32;
    fake_add(&f, KV1 "weight_scale", DSPARK_U8, 2, 24, 2);
    const char *dir = write_with(NULL, NULL);
    json_decref(inspect(dir, DSPARK_USABLE));
    check(dspark_model_open(&m, dir, NULL, &err), DSPARK_OK, &err);
    dspark_model_close(m);
}

/* A config that speaks of quantisation over plain tensors: none is, and both are said. */
static void a_quantised_config_over_plain_tensors(void **state)
{
    dspark_model *m;
    dspark_error err;
    (void)state;
    tiny_roster();
    const char *dir = write_with("quantization_config",
                                 "{\"quant_method\": \"fp8\", "
                                 "\"ignore\": [\"layers.3.self_attn\"]}");
    json_t *o = inspect(dir, DSPARK_USABLE), *q = json_object_get(o, "quantisation");
    json_t *schemes = json_object_get(q, "schemes");
    assert_string_equal(json_string_value(json_object_get(q, "config_method")), "fp8");
    assert_int_equal(json_object_size(schemes), 1);
    assert_int_equal(json_integer_value(json_object_get(schemes, "bf16")), 67);
    json_decref(o);
    check(dspark_model_open(&m, dir, NULL, &err), DSPARK_OK, &err);
    dspark_model_close(m);
}

static int make_inputs(void **state)
{
    (void)state;
    return run_cli("synth tiny --preset tiny").code;
}

/* ---- dumps ---- */

static void write_states(const char *path, const char *shape, size_t n_positions)
{
    char header[600];
    size_t positions = n_positions * 8, states = 10 * 4 * 64 * 2, ids = 10 * 4;
    snprintf(header, sizeof header,
             "{\"token_ids\":{\"dtype\":\"I32\",\"shape\":[10],\"data_offsets\":[0,%zu]},"
             "\"positions\":{\"dtype\":\"I64\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]},"
             "\"hidden_states\":{\"dtype\":\"BF16\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}}", ids,
             n_positions, ids, ids + positions, shape, ids + positions, ids + positions + states);
    unsigned char *data = calloc(ids + positions + states, 1);
    assert_non_null(data);
    for (size_t i = 0; i < n_positions; i++) data[ids + 8 * i] = (unsigned char)i;
    stfile_write_raw(path, strlen(header), header, strlen(header), data, ids + positions + states);
    free(data);
}

/* Fewer taps than the drafter reads, as a matrix or apart, and one position too few. */
static void dumps_of_another_target(void **state)
{
    static const struct {
        const char *shape;
        size_t positions;
        const char *says[2];
    } rows[] = {
        {"[10,4,64]", 10, {"[10, 4, 64]", "[seq, 5 or 6, 64]"}},
        {"[10,256]", 10, {"[10, 256]", "[seq, 5 or 6, 64]"}},
        {"[5,8,64]", 10, {"[5, 8, 64]", "[seq, 5 or 6, 64]"}},
        {"[8,5,64]", 10, {"token_ids", "[8]"}},
    };
    char path[700];
    cli_result r;
    (void)state;
    snprintf(path, sizeof path, "%s/four.st", cli_folder());
    for (size_t i = 0; i < COUNT(rows); i++) {
        write_states(path, rows[i].shape, rows[i].positions);
        r = run_cli("context tiny --taps four.st --out never.st");
        assert_int_equal(r.code, 3);
        for (int k = 0; k < 2; k++) has(r.err, rows[i].says[k]);
        assert_false(folder_has("never.st"));
    }
    /* ten rows of one tap for a drafter with one, so that only the positions are wrong */
    assert_int_equal(run_cli("synth one --preset tiny --context-only --set target_layer_ids=[2] "
                             "--set num_target_layers=1 --set target_hidden_size=256").code, 0);
    write_states(path, "[10,1,256]", 9);
    r = run_cli("context one --taps four.st --out never.st");
    assert_int_equal(r.code, 3);
    has(r.err, "positions");
    has(r.err, "[9]");
    has(r.err, "[10]");
    assert_false(folder_has("never.st"));
    write_states(path, "[10,1,256]", 10);
    assert_int_equal(run_cli("context one --taps four.st").code, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(other_sizes_than_promised),
        cmocka_unit_test(a_missing_tensor_stops_everything),
        cmocka_unit_test(a_renamed_kv_projection),
        cmocka_unit_test(the_other_kind_of_attention),
        cmocka_unit_test(a_square_weight_is_pointed_out),
        cmocka_unit_test(own_heads_and_embeddings),
        cmocka_unit_test(quantised_tensors_are_named),
        cmocka_unit_test(a_quantised_config_over_plain_tensors),
        cmocka_unit_test(dumps_of_another_target),
    };
    return cmocka_run_group_tests(tests, make_inputs, remove_folder);
}
