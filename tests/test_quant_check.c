/* The linears of a whole draft: which schemes may stand where, what is told of those that may not,
 * and that roster check and quant check share the work without a gap. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/status.h"
#include "ckpt/roster.h"
#include "quant/check.h"
#include "support/fake.h"
#include "support/fixture.h"
#include "support/oom.h"
#include "support/tensors.h"
#include "support/tmpdir.h"

static dspark__config_doc *doc;
static tensors t;
static dspark__roster_entry *roster;
static size_t n_roster, n_problems;
static char first_problem[400];
static dspark_status first_kind;

/* The roster of the tiny preset, BF16 zeros. */
static int setup(void **state)
{
    (void)state;
    doc = fake_config("tiny");
    tensors_clear(&t);
    if (dspark__roster_make(&roster, &n_roster, &doc->config, 0, NULL) != DSPARK_OK) return -1;
    for (size_t i = 0; i < n_roster; i++)
        tensors_add(&t, roster[i].name, DSPARK_BF16, roster[i].rank, roster[i].shape, NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    tensors_clear(&t);
    free(roster);
    dspark__config_free(doc);
    return 0;
}

static void again(void)
{
    teardown(NULL);
    assert_int_equal(setup(NULL), 0);
}

static void take_problem(void *user, dspark_status kind, const char *tensor, const char *text)
{
    (void)user;
    if (n_problems++ > 0) return;
    first_kind = kind;
    snprintf(first_problem, sizeof first_problem, "%s: %s", tensor, text);
}

/* Open what t is and check it: the roster, then the schemes. *err is that of the check that failed.
 */
static dspark_status run(const dspark__quant_config *q, size_t n_files, dspark_error *err)
{
    const char *dir = tmpdir_make();
    dspark_status st;

    tensors_open(&t, dir, n_files);
    dspark__error_clear(err);
    n_problems = 0;
    first_problem[0] = '\0';
    st = dspark__roster_check(t.ckpt, doc, NULL, NULL, err);
    if (st == DSPARK_OK) st = dspark__quant_check(t.ckpt, doc, q, take_problem, NULL, err);
    if (st == DSPARK_OK) assert_int_equal(n_problems, 0);
    dspark_checkpoint_close(t.ckpt);
    t.ckpt = NULL;
    tmpdir_remove(dir);
    return st;
}

static void expect(const dspark__quant_config *q, dspark_status want, const char *where,
                   const char *text)
{
    dspark_error err;
    dspark_status st = run(q, 1, &err);
    if (st != want || !strstr(err.where, where) || !strstr(err.message, text))
        fail_msg("%s [%s] %s; want %s [%s] %s", dspark_status_name(st), err.where, err.message,
                 dspark_status_name(want), where, text);
}

static void expect_ok(const dspark__quant_config *q, size_t n_files)
{
    dspark_error err;
    check(run(q, n_files, &err), DSPARK_OK, &err);
}

/* A tensor beside NAME.weight, all elements of float or byte `value`. */
static void beside(const char *weight, const char *suffix, dspark_dtype dtype, uint64_t d0,
                   uint64_t d1, float value)
{
    char name[160];
    uint64_t n = d0 * (d1 ? d1 : 1);
    unsigned char *p;

    snprintf(name, sizeof name, "%.*s%s", (int)(strlen(weight) - 6), weight, suffix);
    p = tensors_add2(&t, name, dtype, d0, d1, NULL);
    for (uint64_t i = 0; i < n; i++) {
        if (dtype == DSPARK_F32)
            memcpy(p + 4 * i, &value, 4);
        else
            p[i] = (unsigned char)value;
    }
}

static void to_fp8(const char *weight)
{
    size_t i = tensors_index(&t, weight);
    uint64_t shape[2] = {t.list[i].shape[0], t.list[i].shape[1]};
    uint32_t rank = t.list[i].rank;

    tensors_remove(&t, weight);
    tensors_add(&t, weight, DSPARK_F8_E4M3, rank, shape, NULL);
    beside(weight, "weight_scale", DSPARK_F32, 1, 0, 0.5f);
}

static void to_nvfp4(const char *weight, float global)
{
    size_t i = tensors_index(&t, weight);
    uint64_t rows = t.list[i].shape[0], k = t.list[i].shape[1];

    tensors_remove(&t, weight);
    beside(weight, "weight_packed", DSPARK_U8, rows, k / 2, 0x21);
    beside(weight, "weight_scale", DSPARK_F8_E4M3, rows, k / 16, 0x38);
    beside(weight, "weight_global_scale", DSPARK_F32, 1, 0, global);
}

static void kv_name(char name[80], int layer)
{
    snprintf(name, 80, "layers.%d.self_attn.kv_a_proj_with_mqa.weight", layer);
}

/* ---- where a scheme may stand ---------------------------------------------------------------- */

static void test_every_linear(void **state)
{
    size_t n_linear = 0;

    (void)state;
    expect_ok(NULL, 1);
    for (size_t e = 0; e < n_roster; e++) {
        char name[96];
        int linear = roster[e].linear;
        snprintf(name, sizeof name, "%s", roster[e].name);
        again();
        if (strstr(name, "bias")) continue;
        n_linear += (size_t)linear;
        to_fp8(name);
        if (linear)
            expect_ok(NULL, 1);
        else
            expect(NULL, DSPARK_EUNSUPPORTED, name, "no linear of the draft");
    }
    /* per layer q_a, kv_a, q_b, kv_b, o, gate, up, down; context_proj, markov_w2, confidence */
    assert_int_equal(n_linear, 5 * 8 + 3);
    again();
    for (size_t e = 0; e < n_roster; e++)
        if (roster[e].linear) to_fp8(roster[e].name);
    expect_ok(NULL, 3);
}

/* One merged linear of five schemes, scales in other files than their weights. */
static void test_mixed(void **state)
{
    static const char *const schemes[5] = {"bf16", "fp8_tensor", "nvfp4_ct", "f32", "fp8_channel"};
    dspark__quant_modules modules;
    dspark_error err;
    char name[80];
    const char *dir = tmpdir_make();
    uint64_t shape[2] = {24, 64};

    (void)state;
    kv_name(name, 1);
    to_fp8(name);
    kv_name(name, 2);
    to_nvfp4(name, 768);
    kv_name(name, 3);
    tensors_remove(&t, name);
    tensors_add(&t, name, DSPARK_F32, 2, shape, NULL);
    kv_name(name, 4);
    tensors_remove(&t, name);
    tensors_add(&t, name, DSPARK_F8_E4M3, 2, shape, NULL);
    beside(name, "weight_scale", DSPARK_F32, 24, 1, 0.5f);
    expect_ok(NULL, 5);

    tensors_open(&t, dir, 4);
    check(dspark__quant_modules_make(&modules, t.ckpt, doc, NULL, &err), DSPARK_OK, &err);
    assert_int_equal(modules.n, 44); /* the last: an lm_head, which this file has not */
    for (int l = 0; l < 5; l++) {
        const dspark__quant_module *m;
        kv_name(name, l);
        name[strlen(name) - 7] = '\0';
        m = dspark__quant_modules_find(&modules, name);
        assert_non_null(m);
        assert_string_equal(m->scheme->name, schemes[l]);
        assert_int_equal(m->rows, 24);
        assert_int_equal(m->k, 64);
        assert_int_equal(m->status, DSPARK_OK);
        assert_string_equal(m->module.name, name);
        assert_int_equal(m->packing.bits, l == 0 || l == 3 ? 16 : l == 2 ? 4 : 8);
    }
    assert_null(dspark__quant_modules_find(&modules, "layers.0.input_layernorm"));
    dspark__quant_modules_free(&modules);
    tmpdir_remove(dir);
}

static void test_prefixed(void **state)
{
    char name[160];

    (void)state;
    to_fp8("layers.2.mlp.up_proj.weight");
    for (size_t i = 0; i < t.n; i++) {
        snprintf(name, sizeof name, "model.%s", t.list[i].name);
        snprintf(t.list[i].name, sizeof t.list[i].name, "%.120s", name);
    }
    expect_ok(NULL, 2);
    t.list[tensors_index(&t, "model.layers.2.mlp.up_proj.weight_scale")].data[3] = 0xff;
    expect(NULL, DSPARK_EMODEL, "model.layers.2.mlp.up_proj.weight_scale", "finite");
}

/* ---- what is told ---------------------------------------------------------------------------- */

static void test_problems(void **state)
{
    dspark_error err;
    char name[80];

    (void)state;
    /* without a scale; a scale too many; an unknown tensor: the roster check's */
    to_fp8("layers.3.mlp.down_proj.weight");
    tensors_remove(&t, "layers.3.mlp.down_proj.weight_scale");
    expect(NULL, DSPARK_EMODEL, "layers.3.mlp.down_proj.weight", "without a scale");
    again();
    beside("layers.0.mlp.up_proj.weight", "weight_scale", DSPARK_F32, 1, 0, 1);
    expect(NULL, DSPARK_EMODEL, "layers.0.mlp.up_proj.weight", "beside a BF16 weight");
    again();
    to_fp8("layers.0.mlp.up_proj.weight");
    beside("layers.0.mlp.up_proj.weight", "weight_scal", DSPARK_F32, 1, 0, 1);
    expect(NULL, DSPARK_EMODEL, "layers.0.mlp.up_proj.weight_scal", "no such tensor belongs");
    again();
    beside("final_norm.weight", "k_scale", DSPARK_F32, 1, 0, 1);
    expect(NULL, DSPARK_EMODEL, "final_norm.k_scale", "beside a plain weight");
    again();
    beside("layers.0.mlp.up_proj.weight", "weight_packed", DSPARK_U8, 128, 32, 0);
    beside("layers.0.mlp.up_proj.weight", "weight_scale", DSPARK_U8, 128, 2, 127);
    expect(NULL, DSPARK_EMODEL, "layers.0.mlp.up_proj.", "both weight and weight_packed");
    again();
    to_fp8("layers.1.mlp.up_proj.weight");
    beside("layers.1.mlp.up_proj.weight", "pre_quant_scale", DSPARK_F32, 64, 0, 1);
    expect(NULL, DSPARK_EUNSUPPORTED, "layers.1.mlp.up_proj.pre_quant_scale", "AWQ");

    /* several: broken before not served, in roster order, all of them told */
    again();
    to_fp8("layers.0.mlp.up_proj.weight");
    beside("layers.0.mlp.up_proj.weight", "svdquant_lora_a", DSPARK_F32, 4, 64, 1);
    kv_name(name, 3);
    to_nvfp4(name, -1);
    kv_name(name, 1);
    to_nvfp4(name, NAN);
    assert_int_equal(run(NULL, 2, &err), DSPARK_EMODEL);
    assert_int_equal(n_problems, 3);
    assert_int_equal(first_kind, DSPARK_EUNSUPPORTED);
    assert_non_null(strstr(first_problem, "layers.0.mlp.up_proj.svdquant_lora_a: "));
    assert_non_null(strstr(err.where, "layers.1.self_attn.kv_a_proj_with_mqa.weight_global_scale"));
    assert_non_null(strstr(err.where, ".safetensors"));
    assert_non_null(strstr(err.message, "(2 more problems)"));
}

/* What the roster check has named is not told again: a missing weight, also where its bias is
 * there, and a plain weight of another shape. */
static void test_left_to_the_roster(void **state)
{
    static const char *const names[] = {"confidence_head.proj.weight", "context_proj.weight"};
    const char *dir = tmpdir_make();
    dspark_error err;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        tensors_remove(&t, names[i]);
        expect(NULL, DSPARK_EMODEL, names[i], "missing");
    }
    t.list[tensors_index(&t, "layers.0.mlp.up_proj.weight")].shape[0] = 64;
    t.list[tensors_index(&t, "layers.0.mlp.up_proj.weight")].n_bytes /= 2;
    tensors_open(&t, dir, 1);
    check(dspark__quant_check(t.ckpt, doc, NULL, take_problem, NULL, &err), DSPARK_OK, &err);
    tmpdir_remove(dir);
}

/* Scales of a KV cache, in the attention and in a linear: no part of any weight, and numbers. */
static void test_cache_scales(void **state)
{
    float value = 0.06f;
    size_t i;

    (void)state;
    tensors_add2(&t, "layers.2.self_attn.k_scale", DSPARK_F32, 1, 0, &value);
    tensors_add2(&t, "layers.2.self_attn.kv_a_proj_with_mqa.v_scale", DSPARK_F32, 1, 0, &value);
    expect_ok(NULL, 1);
    i = tensors_index(&t, "layers.2.self_attn.k_scale");
    memset(t.list[i].data, 0, 4);
    expect(NULL, DSPARK_EMODEL, "layers.2.self_attn.k_scale", "above zero");
    snprintf(t.list[i].name, sizeof t.list[i].name, "layers.5.self_attn.k_scale");
    expect(NULL, DSPARK_EMODEL, "layers.5.self_attn.k_scale", "num_hidden_layers");
}

/* ---- with a config --------------------------------------------------------------------------- */

static dspark__quant_config *parse(const char *text)
{
    dspark__quant_config *q;
    dspark_error err;
    check(dspark__quant_config_parse(&q, text, strlen(text), NULL, 0, "config.json", &err),
          DSPARK_OK, &err);
    return q;
}

#define CONFIG(ignore)                                                                       \
    "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"format\": "      \
    "\"float-quantized\", \"quantization_status\": \"compressed\", \"config_groups\": "      \
    "{\"group_0\": "                                                                         \
    "{\"targets\": [\"re:.*kv_a_proj_with_mqa\"], \"weights\": {\"num_bits\": 8, \"type\": " \
    "\"float\", "                                                                            \
    "\"symmetric\": true, \"strategy\": \"tensor\"}}}, \"ignore\": [" ignore "]}}"

static void test_config(void **state)
{
    dspark__quant_config *q = parse(CONFIG(""));
    char name[80];

    (void)state;
    expect_ok(q, 1); /* plain weights are what they are, whatever the config intended */
    for (int l = 0; l < 5; l++) {
        kv_name(name, l);
        to_fp8(name);
    }
    expect_ok(q, 2);
    kv_name(name, 2);
    t.list[tensors_index(&t, name)].dtype = DSPARK_I8;
    expect(q, DSPARK_EMODEL, "layers.2.self_attn.kv_a_proj_with_mqa", "8-bit int");
    dspark__quant_config_free(q);

    again();
    q = parse(CONFIG("\"layers.3.self_attn.kv_a_proj_with_mqa\""));
    for (int l = 0; l < 5; l++) {
        kv_name(name, l);
        if (l != 3) to_fp8(name);
    }
    expect_ok(q, 1);
    kv_name(name, 3);
    to_fp8(name);
    expect(q, DSPARK_EMODEL, "layers.3.self_attn.kv_a_proj_with_mqa", "excludes");
    dspark__quant_config_free(q);
}

/* ---- no memory ------------------------------------------------------------------------------- */

static void test_no_memory(void **state)
{
    const char *dir = tmpdir_make();
    dspark_error err;
    dspark_status st = DSPARK_ENOMEM;
    size_t n = 0;

    (void)state;
    if (!oom_available()) skip();
    to_fp8("layers.2.mlp.up_proj.weight");
    tensors_open(&t, dir, 1);
    while (st != DSPARK_OK) {
        oom_fail_nth(++n);
        st = dspark__quant_check(t.ckpt, doc, NULL, NULL, NULL, &err);
        oom_stop();
        assert_true(st == DSPARK_OK || st == DSPARK_ENOMEM);
        assert_true(n < 100);
    }
    assert_true(n > 3);
    tmpdir_remove(dir);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_every_linear), TEST(test_mixed),  TEST(test_prefixed),  TEST(test_problems),
        TEST(test_left_to_the_roster),
        TEST(test_cache_scales), TEST(test_config), TEST(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
