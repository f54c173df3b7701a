/* Inspection: families and verdicts over header-only checkpoints, the document's keys, broken and
 * hostile files, deep reading, cancelling, and every allocation failing. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include <jansson.h>

#include "ckpt/family.h"
#include "model/inspect.h"
#include "support/fake.h"
#include "support/oom.h"
#include "support/tmpdir.h"

static fake f;

/* A new folder with f and this config (NULL: none). */
static const char *write_fake(const char *config)
{
    const char *dir = tmpdir_make();

    fake_write(&f, dir, config);
    return dir;
}

static void roster_of(const char *config)
{
    dspark__config_doc *doc = fake_config(config);

    fake_from_roster(&f, &doc->config, 0);
    dspark__config_free(doc);
}

/* The inspection of `path` as JSON, its verdict checked. */
static json_t *look(const char *path, dspark_verdict verdict, const dspark_inspect_opts *opts)
{
    dspark_inspection *in;
    dspark_error err;
    json_error_t bad;
    json_t *o;

    if (dspark__inspect(&in, path, opts, &err) != DSPARK_OK)
        fail_msg("%s: %s", err.where, err.message);
    o = json_loads(dspark__inspection_json(in), JSON_REJECT_DUPLICATES, &bad);
    if (!o) fail_msg("not JSON: %s", bad.text);
    if (dspark__inspection_verdict(in) != verdict)
        fail_msg("verdict %d, expected %d: %s", dspark__inspection_verdict(in), verdict,
                 json_string_value(json_object_get(o, "reason")));
    assert_int_equal(json_integer_value(json_object_get(o, "exit_code")), verdict);
    assert_int_equal(verdict == DSPARK_USABLE,
                     json_array_size(json_object_get(o, "problems")) == 0);
    dspark__inspection_free(in);
    return o;
}

/* "a.b.0.c" */
static const json_t *at(const json_t *o, const char *path)
{
    char part[80];

    while (*path) {
        size_t n = strcspn(path, ".");
        snprintf(part, sizeof part, "%.*s", (int)n, path);
        o = json_is_array(o) ? json_array_get(o, (size_t)atoi(part)) : json_object_get(o, part);
        if (!o) fail_msg("no %s in the document", part);
        path += n + (path[n] == '.');
    }
    return o;
}

static void want_text(const json_t *o, const char *path, const char *part)
{
    const char *s = json_string_value(at(o, path));

    if (!s || !strstr(s, part))
        fail_msg("%s is \"%s\", expected \"%s\"", path, s ? s : "null", part);
}

static void want_int(const json_t *o, const char *path, long long value)
{
    if (!json_is_integer(at(o, path)) || json_integer_value(at(o, path)) != value)
        fail_msg("%s is %lld, expected %lld", path, (long long)json_integer_value(at(o, path)),
                 value);
}

/* ---- the served family ----------------------------------------------------------------------- */

static void test_kimi_k3(void **state)
{
    char *config = fake_config_text("kimi-k3");
    struct timespec start, end;
    const char *dir;
    json_t *o;

    (void)state;
    roster_of("kimi-k3");
    dir = write_fake(config);
    clock_gettime(CLOCK_MONOTONIC, &start);
    o = look(dir, DSPARK_USABLE, NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    /* 7.1 GB of tensors; only headers may be read */
    assert_true((double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec) <
                1);
    want_text(o, "family.id", "k3_dspark");
    want_text(o, "family.variant", "kimi-k3");
    want_text(o, "family.dialect", "k3");
    want_text(o, "files.0.name", "config.json");
    want_text(o, "files.1.name", "model.safetensors");
    want_int(o, "totals.tensors", 68);
    want_int(o, "totals.parameters", 3562312961);
    want_int(o, "totals.bytes", 7124625922);
    want_int(o, "expected.tensors", 68);
    want_int(o, "expected.parameters", 3562312961);
    want_int(o, "config.hidden_size", 7168);
    want_int(o, "config.target_layer_ids.4", 89);
    assert_true(json_real_value(at(o, "config.rms_norm_eps")) == 1e-05);
    want_text(o, "config.rope.rope_type", "yarn");
    want_text(o, "confidence_head", "loaded");
    want_text(o, "embed_tokens", "own");
    want_text(o, "lm_head", "absent");
    want_int(o, "quantisation.schemes.bf16", 67);
    want_int(o, "plan.entry_width", 576);
    want_int(o, "plan.cache_bytes_per_token.bf16", 5760);
    want_int(o, "plan.cache_bytes_per_token.fp8_e4m3", 2880);
    want_int(o, "plan.cache_bytes_per_token.fp8_e5m2", 2880);
    want_int(o, "plan.cache_bytes_per_token.fp8_ds_mla", 5 * 656);
    want_int(o, "plan.read_bytes.context_proj", 513802240);
    want_int(o, "plan.read_bytes.kv_a", 41287680);
    /* 7168 = 149.33 panels of 48 outputs; 576 = 12 panels a layer */
    want_int(o, "plan.resident_bytes.context_proj", 150ll * 48 * 35840 * 2);
    want_int(o, "plan.resident_bytes.context_kv", 41287680);
    want_int(o, "plan.resident_bytes.q_a", 5ll * 32 * 48 * 7168 * 2);
    want_int(o, "plan.resident_bytes.norms", 2 * (7168 + 5 * 512));
    want_int(o, "plan.resident_bytes.total",
             150ll * 48 * 35840 * 2 + 41287680 + 2 * (7168 + 5 * 512));
    want_int(o, "plan.workspace.0.n_threads", 1);
    want_int(o, "plan.workspace.0.max_tokens", 512);
    assert_true(json_integer_value(at(o, "plan.workspace.0.bytes")) > 512 * 7168 * 2);
    want_text(o, "tensors.7.name", "layers.0.self_attn.kv_a_proj_with_mqa.weight");
    want_text(o, "tensors.7.target", "qkv_a");
    want_text(o, "tensors.7.scheme", "bf16");
    want_int(o, "tensors.7.shard", 1);
    want_text(o, "tensors.7.shared_with.target", "context_kv");
    want_int(o, "tensors.7.shared_with.shard", 0);
    assert_int_equal(strlen(json_string_value(at(o, "fingerprint"))), 32);
    assert_true(json_is_null(at(o, "deep")));
    json_decref(o);
    free(config);
}

static void test_variants(void **state)
{
    static const char *const names[] = {"kimi-k3", "kimi-k3-block5", "kimi-k3.1-pro", "lightseek",
                                        "tiny"};

    (void)state;
    for (size_t i = 0; i < 5; i++) {
        char *config = fake_config_text(names[i]);
        json_t *o;
        roster_of(names[i]);
        o = look(write_fake(config), DSPARK_USABLE, NULL);
        assert_string_equal(json_string_value(at(o, "family.variant")),
                            i == 4 ? "custom" : names[i]);
        json_decref(o);
        free(config);
    }
}

/* The layout's fingerprint: not of data or file names, but of names, shapes and config. */
static void test_fingerprint(void **state)
{
    char *config = fake_config_text("tiny"), *other = fake_config_text("tiny");
    char prints[4][33];
    fake_tensor last;

    (void)state;
    memcpy(strstr(other, "\"mask_token_id\": 96"), "\"mask_token_id\": 95", 19);
    for (int i = 0; i < 4; i++) {
        json_t *o;
        roster_of("tiny");
        if (i == 1) { /* another order in the file */
            last = f.list[67];
            memmove(f.list + 1, f.list, 67 * sizeof *f.list);
            f.list[0] = last;
        }
        if (i == 2) fake_remove(&f, "embed_tokens.weight");
        o = look(write_fake(i == 3 ? other : config), DSPARK_USABLE, NULL);
        snprintf(prints[i], 33, "%s", json_string_value(at(o, "fingerprint")));
        json_decref(o);
    }
    assert_string_equal(prints[0], prints[1]);
    assert_string_not_equal(prints[0], prints[2]);
    assert_string_not_equal(prints[0], prints[3]);
    free(config);
    free(other);
}

static void test_heads(void **state)
{
    char *config = fake_config_text("tiny"), *off = fake_config_text("tiny");
    char *key = strstr(off, "\"enable_confidence_head\": true");
    json_t *o;

    (void)state;
    memcpy(key, "\"enable_confidence_head\":false", 30);
    roster_of("tiny");
    fake_add(&f, "lm_head.weight", DSPARK_BF16, 2, 97, 64);
    o = look(write_fake(off), DSPARK_USABLE, NULL);
    want_text(o, "confidence_head", "unused");
    want_text(o, "lm_head", "own");
    json_decref(o);
    fake_remove(&f, "embed_tokens.weight");
    fake_remove(&f, "confidence_head.proj.bias");
    o = look(write_fake(config), DSPARK_USABLE, NULL);
    want_text(o, "confidence_head", "no-bias");
    want_text(o, "embed_tokens", "absent");
    json_decref(o);
    fake_remove(&f, "confidence_head.proj.weight");
    o = look(write_fake(off), DSPARK_USABLE, NULL);
    want_text(o, "confidence_head", "absent");
    json_decref(o);
    o = look(write_fake(config), DSPARK_BROKEN, NULL);
    want_text(o, "confidence_head", "absent");
    want_text(o, "reason", "confidence_head.proj.weight");
    json_decref(o);
    free(config);
    free(off);
}

/* ---- other families -------------------------------------------------------------------------- */

static void gqa_tensors(const char *prefix)
{
    f.n = 0;
    for (uint32_t l = 0; l < 2; l++) {
        static const char *const parts[] = {"q_proj", "k_proj", "v_proj", "o_proj"};
        for (int i = 0; i < 4; i++) {
            char name[160];
            snprintf(name, sizeof name, "%slayers.%u.self_attn.%s.weight", prefix, l, parts[i]);
            fake_add(&f, name, DSPARK_BF16, 2, 64, 64);
        }
    }
}

static void add_small(const char *name)
{
    fake_add(&f, name, DSPARK_BF16, 2, 8, 8);
}

static void expect_family(const char *config_name, const char *id, const char *text)
{
    char *config = config_name ? fake_config_text(config_name) : NULL;
    json_t *o = look(write_fake(config), DSPARK_RECOGNISED, NULL);

    if (strcmp(json_string_value(at(o, "family.id")), id))
        fail_msg("%s: family %s: %s", config_name ? config_name : "no config",
                 json_string_value(at(o, "family.id")), json_string_value(at(o, "family.text")));
    want_text(o, "family.text", text);
    want_text(o, "reason", text);
    json_decref(o);
    free(config);
}

static void test_families(void **state)
{
    (void)state;
    gqa_tensors("");
    add_small("markov_head.markov_w1.weight");
    add_small("fc.weight");
    expect_family("qwen3-dspark", "qwen3_dspark", "q_proj");
    expect_family(NULL, "qwen3_dspark", "grouped-query");
    gqa_tensors("");
    add_small("fc.weight");
    add_small("hidden_norm.weight");
    expect_family("dflash", "dflash", "DFlash");
    expect_family(NULL, "dflash", "no Markov head");
    expect_family("speculators", "speculators", "dspark");
    gqa_tensors("midlayer.");
    add_small("midlayer.hidden_norm.weight");
    add_small("fc.weight");
    fake_add(&f, "d2t", DSPARK_I64, 1, 32, 0);
    expect_family("eagle3", "eagle", "EAGLE");
    expect_family(NULL, "eagle", "EAGLE");
    f.n = 0;
    add_small("mtp.0.main_norm.weight");
    add_small("mtp.0.attn.wq_a.weight");
    expect_family("deepseek-v4", "deepseek_v4", "mtp.0.main_norm.weight");
    expect_family(NULL, "mtp", "mtp.0.main_norm.weight");
    f.n = 0;
    add_small("model.layers.61.eh_proj.weight");
    expect_family("mtp", "mtp", "eh_proj");
    gqa_tensors("model.");
    add_small("lm_head.weight");
    add_small("model.embed_tokens.weight");
    expect_family("target", "target", "not a drafter");
    expect_family(NULL, "target", "not a drafter");
    f.n = 0;
    add_small("unet.conv_in.weight");
    expect_family(NULL, "unknown", "Not a drafter");
    roster_of("tiny");
    expect_family("nemo", "k3_nemo", "mla_use_nope");
    add_small("layers.0.self_attn.g_proj.weight");
    expect_family("tiny", "k3_nemo", "g_proj");
    roster_of("tiny");
    add_small("context_kv_proj.weight");
    expect_family("atom", "atom_k3_dspark", "context_kv_proj.weight");
    expect_family("tiny", "atom_k3_dspark", "pre-merged");
}

/* Config and tensors of two families: refused, and the tensor that does not belong is named. */
static void test_mixed_families(void **state)
{
    char *qwen = fake_config_text("qwen3-dspark"), *tiny = fake_config_text("tiny");
    json_t *o;

    (void)state;
    roster_of("tiny");
    o = look(write_fake(qwen), DSPARK_BROKEN, NULL);
    want_text(o, "reason", "\"layers.0.self_attn.kv_a_proj_with_mqa.weight\"");
    json_decref(o);
    gqa_tensors("");
    add_small("markov_head.markov_w1.weight");
    o = look(write_fake(tiny), DSPARK_BROKEN, NULL);
    want_text(o, "reason", "\"layers.0.self_attn.q_proj.weight\"");
    json_decref(o);
    free(qwen);
    free(tiny);
}

static void test_not_served(void **state)
{
    char *config = fake_config_text("tiny");
    json_t *o;

    (void)state;
    roster_of("tiny");
    fake_rename(&f, "layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight_packed");
    fake_find(&f, "layers.1.mlp.up_proj.weight_packed")->dtype = DSPARK_U8;
    fake_find(&f, "layers.1.mlp.up_proj.weight_packed")->shape[1] = 32;
    fake_add(&f, "layers.1.mlp.up_proj.weight_scale", DSPARK_U8, 2, 128, 2);
    json_decref(look(write_fake(config), DSPARK_USABLE, NULL)); /* mxfp4 is served */
    fake_add(&f, "layers.1.mlp.up_proj.pre_quant_scale", DSPARK_BF16, 1, 64, 0);
    o = look(write_fake(config), DSPARK_RECOGNISED, NULL);
    want_text(o, "reason", "pre_quant_scale");
    want_text(o, "problems.0.status", "DSPARK_EUNSUPPORTED");
    json_decref(o);
    roster_of("tiny");
    memcpy(strstr(config, "\"silu\"") ? strstr(config, "\"silu\"") : strstr(config, "\"vanilla\""),
           "\"unusual\"", 9);
    o = look(write_fake(config), DSPARK_RECOGNISED, NULL);
    want_text(o, "reason", "markov_head_type");
    assert_true(json_is_null(at(o, "config")));
    assert_int_equal(json_array_size(at(o, "tensors")), 68);
    json_decref(o);
    o = look(write_fake(NULL), DSPARK_RECOGNISED, NULL);
    want_text(o, "reason", "config.json");
    want_text(o, "family.id", "k3_dspark");
    json_decref(o);
    free(config);
}

/* ---- broken and hostile ---------------------------------------------------------------------- */

static void test_broken(void **state)
{
    char *config = fake_config_text("tiny");
    const char *dir;
    json_t *o;

    (void)state;
    roster_of("tiny");
    fake_remove(&f, "layers.3.self_attn.kv_a_layernorm.weight");
    fake_remove(&f, "final_norm.weight");
    o = look(write_fake(config), DSPARK_BROKEN, NULL);
    want_text(o, "reason", "layers.3.self_attn.kv_a_layernorm.weight");
    assert_int_equal(json_array_size(at(o, "problems")), 2);
    want_text(o, "problems.1.tensor", "final_norm.weight");
    json_decref(o);

    roster_of("tiny");
    dir = write_fake("{\"model_type\": \"k3_dspark\",");
    o = look(dir, DSPARK_BROKEN, NULL);
    want_text(o, "reason", "config.json");
    json_decref(o);
    dir = write_fake(config);
    assert_int_equal(truncate(tmpdir_path(dir, "model.safetensors"), 100000), 0);
    o = look(dir, DSPARK_BROKEN, NULL);
    want_text(o, "reason", "model.safetensors");
    want_text(o, "family.id", "k3_dspark");
    json_decref(o);
    assert_int_equal(truncate(tmpdir_path(dir, "model.safetensors"), 3), 0);
    json_decref(look(dir, DSPARK_BROKEN, NULL));
    /* config alone, nothing at all, no such path */
    assert_int_equal(unlink(tmpdir_path(dir, "model.safetensors")), 0);
    json_decref(look(dir, DSPARK_BROKEN, NULL));
    dir = tmpdir_make();
    o = look(dir, DSPARK_BROKEN, NULL);
    want_text(o, "family.id", "none");
    json_decref(o);
    o = look(tmpdir_path(dir, "missing"), DSPARK_BROKEN, NULL);
    want_text(o, "reason", "No such file");
    json_decref(o);
    /* other containers */
    tmpdir_write(tmpdir_path(dir, "model.gguf"), "GGUF\3\0\0\0", 8);
    o = look(dir, DSPARK_RECOGNISED, NULL);
    want_text(o, "family.id", "gguf");
    json_decref(o);
    o = look(tmpdir_path(dir, "model.gguf"), DSPARK_RECOGNISED, NULL);
    want_text(o, "reason", "GGUF");
    json_decref(o);
    dir = tmpdir_make();
    tmpdir_write(tmpdir_path(dir, "pytorch_model.bin"), "PK\3\4", 4);
    o = look(dir, DSPARK_RECOGNISED, NULL);
    want_text(o, "family.id", "pytorch");
    json_decref(o);
    free(config);
}

static void test_hostile_names(void **state)
{
    char *config = fake_config_text("tiny"), *key;
    json_t *o;

    (void)state;
    roster_of("tiny");
    fake_add(&f, "a\"b\\c\n\x1b[31m\xf0\x9f\x98\x80", DSPARK_BF16, 1, 4, 0);
    o = look(write_fake(config), DSPARK_BROKEN, NULL);
    assert_string_equal(json_string_value(at(o, "tensors.68.name")),
                        "a\"b\\c\n\x1b[31m\xf0\x9f\x98\x80");
    assert_null(strchr(json_string_value(at(o, "reason")), '\x1b'));
    json_decref(o);
    /* many problems: the list is cut, the count is not */
    key = strstr(config, "\"num_hidden_layers\": 5,");
    assert_non_null(key);
    memcpy(key, "\"num_hidden_layers\":99,", 23);
    fake_remove(&f, "final_norm.weight");
    o = look(write_fake(config), DSPARK_BROKEN, NULL);
    assert_int_equal(json_array_size(at(o, "problems")), 1000);
    want_int(o, "problems_left_out", 94 * 12 + 2 - 1000);
    json_decref(o);
    free(config);
    /* a path that is no UTF-8 */
    json_decref(look("/nonexistent/\xff\xfe", DSPARK_BROKEN, NULL));
}

static void test_arguments(void **state)
{
    dspark_inspection *in = (dspark_inspection *)1;
    dspark_error err;

    (void)state;
    assert_int_equal(dspark__inspect(&in, NULL, NULL, &err), DSPARK_EINVAL);
    assert_null(in);
    assert_int_equal(dspark__inspect(NULL, ".", NULL, &err), DSPARK_EINVAL);
    dspark__inspection_free(NULL);
}

/* ---- deep ------------------------------------------------------------------------------------ */

typedef struct heard {
    uint64_t done, total;
    size_t n, stop_at;
} heard;

static int hear(void *user, uint64_t done, uint64_t total)
{
    heard *h = user;

    assert_true(done >= h->done && done <= total);
    h->done = done;
    h->total = total;
    return ++h->n == h->stop_at;
}

/* Put 16-bit values into tensor `name` of dir's file. */
static void poke(const char *dir, const char *name, size_t element, uint16_t value)
{
    dspark_checkpoint *ckpt;
    const dspark_tensor *t;
    uint64_t offset = 0;
    FILE *file;

    assert_int_equal(dspark__checkpoint_open(&ckpt, dir, NULL), DSPARK_OK);
    for (size_t i = 0; i < dspark__checkpoint_count(ckpt); i++) {
        t = dspark__checkpoint_at(ckpt, i);
        if (!strcmp(t->name, name)) break;
        offset += t->n_bytes;
    }
    offset += dspark__checkpoint_file_bytes(ckpt, 0);
    for (size_t i = 0; i < dspark__checkpoint_count(ckpt); i++)
        offset -= dspark__checkpoint_at(ckpt, i)->n_bytes;
    dspark__checkpoint_close(ckpt);
    file = fopen(tmpdir_path(dir, "model.safetensors"), "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, (long)(offset + 2 * element), SEEK_SET), 0);
    assert_int_equal(fwrite(&value, 2, 1, file), 1);
    fclose(file);
}

/* Every value of dir's file becomes `value`. */
static void fill(const char *dir, uint16_t value)
{
    dspark_checkpoint *ckpt;
    uint64_t n_bytes = 0;
    FILE *file = fopen(tmpdir_path(dir, "model.safetensors"), "r+b");

    assert_non_null(file);
    assert_int_equal(dspark__checkpoint_open(&ckpt, dir, NULL), DSPARK_OK);
    for (size_t i = 0; i < dspark__checkpoint_count(ckpt); i++)
        n_bytes += dspark__checkpoint_at(ckpt, i)->n_bytes;
    dspark__checkpoint_close(ckpt);
    assert_int_equal(fseek(file, -(long)n_bytes, SEEK_END), 0);
    for (uint64_t i = 0; i < n_bytes / 2; i++) assert_int_equal(fwrite(&value, 2, 1, file), 1);
    fclose(file);
}

static void test_deep(void **state)
{
    char *config = fake_config_text("tiny");
    dspark_inspect_opts opts;
    heard h = {0, 0, 0, 0};
    const char *dir;
    json_t *o;
    dspark_inspection *in;

    (void)state;
    roster_of("tiny");
    dir = write_fake(config);
    memset(&opts, 0, sizeof opts);
    opts.struct_size = sizeof opts;
    opts.deep = 1;
    opts.progress = hear;
    opts.progress_user = &h;
    poke(dir, "context_norm.weight", 3, 0x3f80);  /* 1 */
    poke(dir, "context_norm.weight", 63, 0xc040); /* -3 */
    poke(dir, "context_proj.weight", 320 * 5 + 319, 0x0001);
    poke(dir, "context_proj.weight", 320 * 6, 0x8000); /* -0 is zero */
    o = look(dir, DSPARK_RECOGNISED, &opts); /* the other weights are all zero */
    want_text(o, "reason", "rows are zero");
    want_int(o, "problems_left_out", 0);
    assert_true(json_array_size(at(o, "problems")) > 50);
    json_decref(o);
    fill(dir, 0x3f00); /* 0.5 */
    h.done = 0;
    o = look(dir, DSPARK_USABLE, &opts);
    assert_true(json_real_value(at(o, "tensors.0.deep.rms")) == 0.5);
    json_decref(o);
    /* one projection that nobody wrote; a Markov head without effect is right */
    for (size_t i = 0; i < 24 * 64; i++)
        poke(dir, "layers.2.self_attn.kv_a_proj_with_mqa.weight", i, i % 2 ? 0 : 0x8000);
    for (size_t i = 0; i < 97 * 8; i++) poke(dir, "markov_head.markov_w2.weight", i, 0);
    h.done = 0;
    o = look(dir, DSPARK_RECOGNISED, &opts);
    want_text(o, "reason", "layers.2.self_attn.kv_a_proj_with_mqa.weight: all 24 rows are zero");
    assert_int_equal(json_array_size(at(o, "problems")), 1);
    json_decref(o);
    poke(dir, "layers.2.self_attn.kv_a_proj_with_mqa.weight", 7, 0x0001);
    for (size_t i = 0; i < 320 * 64; i++)
        poke(dir, "context_proj.weight", i, i == 320 * 5 + 319);
    for (size_t i = 0; i < 64; i++) poke(dir, "context_norm.weight", i, 0);
    poke(dir, "context_norm.weight", 3, 0x3f80);  /* 1 */
    poke(dir, "context_norm.weight", 63, 0xc040); /* -3 */
    h.done = 0;
    h.n = 0;
    o = look(dir, DSPARK_USABLE, &opts);
    assert_true(h.n >= 68 && h.done == h.total);
    assert_int_equal(h.total, json_integer_value(at(o, "totals.bytes")));
    want_text(o, "tensors.2.name", "context_norm.weight");
    want_int(o, "tensors.2.deep.rows", 1);
    want_int(o, "tensors.2.deep.zero_rows", 0);
    assert_true(json_real_value(at(o, "tensors.2.deep.min")) == -3.0);
    assert_true(json_real_value(at(o, "tensors.2.deep.max")) == 1.0);
    assert_true(json_real_value(at(o, "tensors.2.deep.absmax")) == 3.0);
    /* (1 + 9) / 64 */
    assert_true(fabs(json_real_value(at(o, "tensors.2.deep.rms")) - 0.3952847075) < 1e-7);
    want_int(o, "tensors.1.deep.rows", 64);
    want_int(o, "tensors.1.deep.zero_rows", 63);
    want_int(o, "deep.nonfinite", 0);
    assert_true(json_array_size(at(o, "warnings")) >= 3);
    json_decref(o);

    poke(dir, "context_norm.weight", 0, 0x7fc1);
    poke(dir, "context_norm.weight", 1, 0xff80);
    poke(dir, "layers.4.mlp.down_proj.weight", 100, 0x7f80);
    h.done = 0;
    o = look(dir, DSPARK_BROKEN, &opts);
    want_int(o, "deep.nonfinite", 3);
    want_int(o, "deep.tensors_with_nonfinite", 2);
    want_int(o, "tensors.2.deep.nonfinite", 2);
    assert_true(json_real_value(at(o, "tensors.2.deep.max")) == 1.0);
    want_text(o, "reason", "context_norm.weight");
    json_decref(o);

    h.n = 0;
    h.done = 0;
    h.stop_at = 3;
    in = (dspark_inspection *)1;
    assert_int_equal(dspark__inspect(&in, dir, &opts, NULL), DSPARK_ECANCELLED);
    assert_null(in);
    assert_int_equal(h.n, 3);
    free(config);
}

/* The vectorised bf16 loop against the plain definition, over all 65536 values and odd lengths. */
static void test_scan(void **state)
{
    static uint16_t values[65536];
    uint64_t seed = 20260808;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int round = 0; round < 200; round++) {
        size_t n = round == 0 ? 65536 : (size_t)round * 7 % 131 + 1, nonfinite = 0;
        double low = INFINITY, high = -INFINITY;
        dspark__tensor_stats s;
        const char *dir = tmpdir_make();
        dspark_checkpoint *ckpt;
        FILE *file;

        for (size_t i = 0; i < n; i++) {
            uint32_t bits;
            float v;
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            values[i] = round == 0 ? (uint16_t)i : (uint16_t)(seed >> 48);
            if (round % 2) values[i] &= 0xbfff; /* finite only */
            bits = (uint32_t)values[i] << 16;
            memcpy(&v, &bits, 4);
            if (!isfinite(v))
                nonfinite++;
            else {
                low = v < low ? v : low;
                high = v > high ? v : high;
            }
        }
        f.n = 0;
        fake_add(&f, "x", DSPARK_BF16, 1, n, 0);
        fake_write(&f, dir, NULL);
        file = fopen(tmpdir_path(dir, "model.safetensors"), "r+b");
        assert_non_null(file);
        assert_int_equal(fseek(file, -(long)(2 * n), SEEK_END), 0);
        assert_int_equal(fwrite(values, 2, n, file), n);
        fclose(file);
        assert_int_equal(dspark__checkpoint_open(&ckpt, dir, NULL), DSPARK_OK);
        assert_int_equal(
            dspark__tensor_scan(&s, ckpt, dspark__checkpoint_at(ckpt, 0), NULL, NULL, NULL),
            DSPARK_OK);
        assert_int_equal(s.nonfinite, nonfinite);
        assert_int_equal(s.rows, 1);
        assert_int_equal(s.has_range, nonfinite < n);
        if (s.has_range) assert_true(s.min == low && s.max == high);
        dspark__checkpoint_close(ckpt);
        tmpdir_remove(dir);
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void test_no_memory(void **state)
{
    char *config = fake_config_text("tiny");
    const char *dir;
    dspark_inspection *in;
    dspark_inspect_opts opts;
    size_t n;

    (void)state;
    if (!oom_available()) skip();
    roster_of("tiny");
    while (f.n > 20) f.n--; /* problems too */
    dir = write_fake(config);
    memset(&opts, 0, sizeof opts);
    opts.deep = 1;
    oom_count_start();
    assert_int_equal(dspark__inspect(&in, dir, &opts, NULL), DSPARK_OK);
    n = oom_stop();
    dspark__inspection_free(in);
    assert_true(n > 30);
    for (size_t i = 1; i <= n; i++) {
        dspark_error err;
        dspark_status st;
        oom_fail_nth(i);
        st = dspark__inspect(&in, dir, &opts, &err);
        oom_stop();
        if (oom_failed() && st != DSPARK_ENOMEM)
            fail_msg("allocation %zu of %zu: %s", i, n, dspark_status_name(st));
        if (st != DSPARK_OK) assert_null(in);
        dspark__inspection_free(in);
    }
    free(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kimi_k3),       cmocka_unit_test(test_variants),
        cmocka_unit_test(test_fingerprint),   cmocka_unit_test(test_heads),
        cmocka_unit_test(test_families),      cmocka_unit_test(test_mixed_families),
        cmocka_unit_test(test_not_served),    cmocka_unit_test(test_broken),
        cmocka_unit_test(test_hostile_names), cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_deep),          cmocka_unit_test(test_scan),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
