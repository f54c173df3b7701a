/* The roster: exact lists and parameter counts of the published drafters, and that every way to
 * spoil a checkpoint (missing, renamed, transposed, doubled, retyped, quantised) is named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/status.h"
#include "ckpt/names.h"
#include "ckpt/roster.h"
#include "support/fake.h"
#include "support/oom.h"
#include "support/tmpdir.h"

/* ---- lists ----------------------------------------------------------------------------------- */

static uint64_t count_roster(const char *config, size_t *n, int context_only)
{
    dspark__config_doc *doc = fake_config(config);
    dspark__roster_entry *r;
    uint64_t sum;

    assert_int_equal(dspark__roster_make(&r, n, &doc->config, context_only, NULL), DSPARK_OK);
    sum = dspark__roster_parameters(r, *n);
    free(r);
    dspark__config_free(doc);
    return sum;
}

static void test_counts(void **state)
{
    size_t n;

    (void)state;
    assert_true(count_roster("kimi-k3", &n, 0) == 3562312961u);
    assert_int_equal(n, 68);
    assert_true(count_roster("kimi-k3-block5", &n, 0) == 3562312961u);
    assert_true(count_roster("lightseek", &n, 0) == 3562348801u);
    assert_int_equal(n, 73);
    /* this one ships no embedding: 163840 * 7168 less */
    assert_true(count_roster("kimi-k3.1-pro", &n, 0) == 2686752257u + 1174405120u);
    assert_int_equal(n, 68);
    /* context_proj, context_norm, and per layer q_a, kv_a and its norm */
    assert_true(count_roster("kimi-k3", &n, 1) ==
                256901120u + 7168 + 5 * (1536u * 7168 + 576 * 7168 + 512));
    assert_int_equal(n, 17);
    assert_int_equal((count_roster("lightseek", &n, 1), n), 22);
}

static void test_order(void **state)
{
    static const char *const first[] = {
        "embed_tokens.weight",
        "context_proj.weight",
        "context_norm.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.self_attn.q_a_proj.weight",
        "layers.0.self_attn.q_a_layernorm.weight",
        "layers.0.self_attn.q_b_proj.weight",
        "layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "layers.0.self_attn.kv_a_layernorm.weight",
        "layers.0.self_attn.kv_b_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "layers.1.input_layernorm.weight",
    };
    static const char *const last[] = {
        "layers.4.mlp.down_proj.weight", "final_norm.weight",
        "markov_head.markov_w1.weight",  "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",   "confidence_head.proj.bias",
    };
    dspark__config_doc *doc = fake_config("kimi-k3");
    dspark__roster_entry *r;
    size_t n, n_last = sizeof last / sizeof *last, n_context = 0, n_optional = 0;

    (void)state;
    assert_int_equal(dspark__roster_make(&r, &n, &doc->config, 0, NULL), DSPARK_OK);
    for (size_t i = 0; i < sizeof first / sizeof *first; i++)
        assert_string_equal(r[i].name, first[i]);
    for (size_t i = 0; i < n_last; i++) assert_string_equal(r[n - n_last + i].name, last[i]);
    assert_int_equal(r[7].rank, 2);
    assert_int_equal(r[7].shape[0], 576);
    assert_int_equal(r[7].shape[1], 7168);
    assert_int_equal(r[6].shape[0], 12288);
    assert_int_equal(r[9].shape[0], 16384);
    assert_int_equal(r[9].shape[1], 512);
    assert_int_equal(r[10].shape[1], 8192);
    assert_int_equal(r[66].shape[1], 7168 + 256);
    for (size_t i = 0; i < n; i++) {
        dspark__name name;
        n_context += (size_t)r[i].context;
        n_optional += (size_t)r[i].optional;
        /* both tables agree on every name */
        dspark__name_parse(&name, r[i].name, &doc->config);
        assert_int_equal(name.kind, DSPARK__NAME_MAPPED);
        assert_string_equal(name.canonical, r[i].name);
    }
    assert_int_equal(n_context, 12);
    assert_int_equal(n_optional, 2);
    free(r);
    dspark__config_free(doc);
}

/* ---- spoiled checkpoints --------------------------------------------------------------------- */

typedef struct bench {
    dspark__config_doc *doc;
    fake f;
    size_t n_problems;
    char first[300];
    dspark_error err;
} bench;

static bench b;

static void fresh(const char *config)
{
    dspark__config_free(b.doc);
    b.doc = fake_config(config);
    fake_from_roster(&b.f, &b.doc->config, 0);
}

static int teardown(void **state)
{
    (void)state;
    dspark__config_free(b.doc);
    b.doc = NULL;
    return 0;
}

static void take_problem(void *user, dspark_status kind, const char *tensor, const char *text)
{
    bench *k = user;

    assert_true(kind == DSPARK_EMODEL || kind == DSPARK_EUNSUPPORTED);
    if (k->n_problems++ == 0) snprintf(k->first, sizeof k->first, "%s: %s", tensor, text);
}

static dspark_status run_check(void)
{
    const char *dir = tmpdir_make();
    dspark_checkpoint *ckpt;
    dspark_status st;

    fake_write(&b.f, dir, NULL);
    if (dspark__checkpoint_open(&ckpt, dir, &b.err) != DSPARK_OK)
        fail_msg("%s: %s", b.err.where, b.err.message);
    dspark__error_clear(&b.err);
    b.n_problems = 0;
    b.first[0] = '\0';
    st = dspark__roster_check(ckpt, b.doc, take_problem, &b, &b.err);
    assert_int_equal(dspark__roster_check(ckpt, b.doc, NULL, NULL, NULL), st);
    assert_int_equal(b.n_problems != 0, st != DSPARK_OK);
    assert_int_equal(b.err.code, st);
    dspark__checkpoint_close(ckpt);
    tmpdir_remove(dir);
    return st;
}

/* The check fails with this status, naming the tensor and saying this. */
static void expect(dspark_status status, const char *where, const char *text)
{
    dspark_status st = run_check();

    if (st != status || !strstr(b.err.where, where) || !strstr(b.err.message, text))
        fail_msg("%s: [%s] %s; expected %s [%s] %s", dspark_status_name(st), b.err.where,
                 b.err.message, dspark_status_name(status), where, text);
}

static void test_good(void **state)
{
    static const char *const configs[] = {"kimi-k3", "kimi-k3-block5", "kimi-k3.1-pro", "lightseek",
                                          "tiny"};

    (void)state;
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        fresh(configs[i]);
        if (run_check() != DSPARK_OK)
            fail_msg("%s: %s: %s", configs[i], b.err.where, b.err.message);
        fake_remove(&b.f, "embed_tokens.weight");
        fake_remove(&b.f, "confidence_head.proj.bias");
        assert_int_equal(run_check(), DSPARK_OK);
    }
}

static void test_each_missing(void **state)
{
    size_t n_optional = 0;

    (void)state;
    fresh("tiny");
    assert_int_equal(b.f.n, 68);
    for (size_t i = 0; i < 68; i++) {
        char name[256];
        fresh("tiny");
        snprintf(name, sizeof name, "%s", b.f.list[i].name);
        fake_remove(&b.f, name);
        if (!strcmp(name, "embed_tokens.weight") || !strcmp(name, "confidence_head.proj.bias")) {
            assert_int_equal(run_check(), DSPARK_OK);
            n_optional++;
            continue;
        }
        expect(DSPARK_EMODEL, name, "missing");
        assert_string_equal(b.err.where, name);
        assert_int_equal(b.n_problems, 1);
    }
    assert_int_equal(n_optional, 2);
}

static void test_each_renamed(void **state)
{
    (void)state;
    for (size_t i = 0; i < 68; i++) {
        char name[256], wrong[300];
        fresh("tiny");
        snprintf(name, sizeof name, "%s", b.f.list[i].name);
        snprintf(wrong, sizeof wrong, "%.*sx%s", (int)(strrchr(name, '.') - name), name,
                 strrchr(name, '.'));
        fake_rename(&b.f, name, wrong);
        if (!strcmp(name, "embed_tokens.weight") || !strcmp(name, "confidence_head.proj.bias")) {
            expect(DSPARK_EMODEL, wrong, "unexpected");
            assert_int_equal(b.n_problems, 1);
        } else {
            expect(DSPARK_EMODEL, name, wrong);
            assert_int_equal(b.n_problems, 2);
        }
    }
}

static void test_each_transposed(void **state)
{
    size_t n_vectors = 0;

    (void)state;
    for (size_t i = 0; i < 68; i++) {
        fake_tensor *t;
        uint64_t rows;
        fresh("tiny");
        t = &b.f.list[i];
        if (t->rank != 2) {
            /* a vector as a column */
            t->rank = 2;
            t->shape[1] = 1;
            n_vectors++;
            expect(DSPARK_EMODEL, t->name, "shape [");
            continue;
        }
        rows = t->shape[0];
        t->shape[0] = t->shape[1];
        t->shape[1] = rows;
        expect(DSPARK_EMODEL, t->name, "the config needs [");
        assert_int_equal(b.n_problems, 1);
    }
    assert_int_equal(n_vectors, 5 * 4 + 3);
    /* a square tensor where the config alone tells that it should not be */
    fresh("tiny");
    fake_find(&b.f, "layers.2.self_attn.kv_a_proj_with_mqa.weight")->shape[0] = 64;
    expect(DSPARK_EMODEL, "layers.2.self_attn.kv_a_proj_with_mqa.weight",
           "shape [64, 64], the config needs [24, 64]");
}

static void test_each_doubled(void **state)
{
    (void)state;
    for (size_t i = 0; i < 68; i++) {
        char name[300];
        fake_tensor t;
        fresh("tiny");
        t = b.f.list[i];
        snprintf(name, sizeof name, "model.%s", t.name);
        fake_add(&b.f, name, t.dtype, t.rank, t.shape[0], t.shape[1]);
        expect(DSPARK_EMODEL, name, "double");
        assert_int_equal(b.n_problems, 2); /* and the mixed prefix */
    }
    fresh("tiny");
    fake_add(&b.f, "fc.weight", DSPARK_BF16, 2, 64, 320);
    expect(DSPARK_EMODEL, "fc.weight", "\"context_proj.weight\"");
}

/* What multiplies: everything of two dimensions but the two tables. */
static int is_linear(const char *name)
{
    return !strstr(name, "norm") && !strstr(name, "bias") && !strstr(name, "embed_tokens") &&
           !strstr(name, "markov_w1");
}

static void test_each_retyped(void **state)
{
    (void)state;
    for (size_t i = 0; i < 68; i++) {
        char name[256];
        fresh("tiny");
        snprintf(name, sizeof name, "%s", b.f.list[i].name);
        b.f.list[i].dtype = DSPARK_F32;
        if (is_linear(name)) { /* quant/ judges it */
            assert_int_equal(run_check(), DSPARK_OK);
        } else {
            expect(DSPARK_EUNSUPPORTED, name, strstr(name, "bias") ? "F32" : "f32");
            assert_int_equal(b.n_problems, 1);
        }
        b.f.list[i].dtype = DSPARK_F64;
        expect(strstr(name, "bias") ? DSPARK_EMODEL : DSPARK_EUNSUPPORTED, name,
               strstr(name, "bias") ? "F64" : "f64");
        b.f.list[i].dtype = DSPARK_F8_E4M3;
        expect(DSPARK_EMODEL, name, strstr(name, "bias") ? "F8_E4M3" : "without a scale");
        b.f.list[i].dtype = DSPARK_I64;
        expect(DSPARK_EMODEL, name, "I64");
    }
}

static void test_spellings(void **state)
{
    (void)state;
    /* all with the prefix, in the second dialect: one contract */
    fresh("tiny");
    fake_rename(&b.f, "context_proj.weight", "fc.weight");
    fake_rename(&b.f, "context_norm.weight", "hidden_norm.weight");
    fake_rename(&b.f, "final_norm.weight", "norm.weight");
    assert_int_equal(run_check(), DSPARK_OK);
    for (size_t i = 0; i < b.f.n; i++) {
        char name[200];
        snprintf(name, sizeof name, "%.190s", b.f.list[i].name);
        snprintf(b.f.list[i].name, sizeof b.f.list[i].name, "model.%s", name);
    }
    assert_int_equal(run_check(), DSPARK_OK);
    fake_rename(&b.f, "model.norm.weight", "norm.weight");
    expect(DSPARK_EMODEL, "model.", "all names or none");
    fake_rename(&b.f, "norm.weight", "model.final_norm.weight");
    expect(DSPARK_EMODEL, "model.fc.weight", "dialects");
}

static void test_foreign(void **state)
{
    (void)state;
    fresh("tiny");
    fake_rename(&b.f, "layers.2.self_attn.kv_a_proj_with_mqa.weight",
                "layers.2.self_attn.kv_a_proj.weight");
    expect(DSPARK_EMODEL, "layers.2.self_attn.kv_a_proj_with_mqa.weight",
           "\"layers.2.self_attn.kv_a_proj.weight\"");
    fresh("tiny");
    fake_rename(&b.f, "layers.2.self_attn.kv_a_proj_with_mqa.weight",
                "layers.02.self_attn.kv_a_proj_with_mqa.weight");
    expect(DSPARK_EMODEL, "layers.2.self_attn.kv_a_proj_with_mqa.weight", "layers.02.");
    fresh("tiny");
    fake_add(&b.f, "layers.5.self_attn.kv_a_proj_with_mqa.weight", DSPARK_BF16, 2, 24, 64);
    expect(DSPARK_EMODEL, "layers.5.", "beyond num_hidden_layers");
    fresh("tiny");
    fake_add(&b.f, "layers.0.self_attn.attention_sink_bias", DSPARK_BF16, 1, 4, 0);
    expect(DSPARK_EMODEL, "attention_sink_bias", "unexpected");
    fresh("tiny");
    fake_add(&b.f, "layers.0.self_attn.q_a_proj.bias", DSPARK_BF16, 1, 32, 0);
    expect(DSPARK_EMODEL, "layers.0.self_attn.q_a_proj.bias", "unexpected");
    fresh("tiny");
    fake_add(&b.f, "fc_norm.0.weight", DSPARK_BF16, 1, 64, 0);
    expect(DSPARK_EMODEL, "fc_norm.0.weight", "fc_norm: true");
    fresh("tiny");
    fake_add(&b.f, "d2t", DSPARK_I64, 1, 32, 0);
    expect(DSPARK_EUNSUPPORTED, "d2t", "vocabulary");
    fresh("tiny");
    fake_add(&b.f, "rotary_emb.inv_freq", DSPARK_F32, 1, 4, 0);
    assert_int_equal(run_check(), DSPARK_OK);
}

/* A GQA file under an MLA config: the first tensor that does not belong is named. */
static void test_other_attention(void **state)
{
    (void)state;
    fresh("tiny");
    for (uint32_t l = 0; l < 5; l++) {
        static const char *const old[] = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"};
        static const char *const now[] = {"q_proj", "k_proj", "v_proj"};
        for (int i = 0; i < 3; i++) {
            char from[120], to[120];
            snprintf(from, sizeof from, "layers.%u.self_attn.%s.weight", l, old[i]);
            snprintf(to, sizeof to, "layers.%u.self_attn.%s.weight", l, now[i]);
            fake_rename(&b.f, from, to);
        }
    }
    expect(DSPARK_EMODEL, "layers.0.self_attn.q_a_proj.weight",
           "\"layers.0.self_attn.q_proj.weight\"");
    assert_int_equal(b.n_problems, 30);
    assert_non_null(strstr(b.err.message, "29 more problems"));
}

static void test_premerged(void **state)
{
    (void)state;
    fresh("tiny");
    fake_add(&b.f, "context_kv_proj.weight", DSPARK_BF16, 2, 120, 64);
    for (uint32_t l = 0; l < 5; l++) {
        char from[120], to[120];
        snprintf(from, sizeof from, "layers.%u.self_attn.q_a_proj.weight", l);
        fake_remove(&b.f, from);
        snprintf(from, sizeof from, "layers.%u.self_attn.kv_a_proj_with_mqa.weight", l);
        snprintf(to, sizeof to, "layers.%u.self_attn.fused_qkv_a_proj.weight", l);
        fake_find(&b.f, from)->shape[0] = 56;
        fake_rename(&b.f, from, to);
    }
    expect(DSPARK_EUNSUPPORTED, "fused_qkv_a_proj", "ATOM");
    assert_int_equal(b.n_problems, 6);
}

/* ---- quantised ------------------------------------------------------------------------------- */

static void test_quantised(void **state)
{
    static const char kv[] = "layers.1.self_attn.kv_a_proj_with_mqa.weight";
    static const char kv_scale[] = "layers.1.self_attn.kv_a_proj_with_mqa.weight_scale";

    (void)state;
    fresh("tiny");
    fake_find(&b.f, kv)->dtype = DSPARK_F8_E4M3;
    fake_add(&b.f, kv_scale, DSPARK_F32, 2, 24, 1);
    assert_int_equal(run_check(), DSPARK_OK); /* present; its shapes are the scheme's business */
    fake_find(&b.f, kv_scale)->shape[0] = 1;
    assert_int_equal(run_check(), DSPARK_OK);
    fake_rename(&b.f, kv_scale, "layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv");
    assert_int_equal(run_check(), DSPARK_OK);
    fake_rename(&b.f, "layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv",
                "layers.1.self_attn.kv_a_proj_with_mqa.scale");
    assert_int_equal(run_check(), DSPARK_OK);

    fresh("tiny");
    fake_find(&b.f, kv)->dtype = DSPARK_U8;
    fake_find(&b.f, kv)->shape[1] = 32;
    fake_rename(&b.f, kv, "layers.1.self_attn.kv_a_proj_with_mqa.weight_packed");
    fake_add(&b.f, kv_scale, DSPARK_F8_E4M3, 2, 24, 4);
    expect(DSPARK_EMODEL, "layers.1.self_attn.kv_a_proj_with_mqa.", "weight_global_scale");
    fake_add(&b.f, "layers.1.self_attn.kv_a_proj_with_mqa.weight_global_scale", DSPARK_F32, 1, 1,
             0);
    assert_int_equal(run_check(), DSPARK_OK);

    /* the same of what is looked up, and of a norm: named */
    fresh("tiny");
    fake_find(&b.f, "markov_head.markov_w1.weight")->dtype = DSPARK_F8_E4M3;
    fake_add(&b.f, "markov_head.markov_w1.weight_scale", DSPARK_F32, 1, 1, 0);
    expect(DSPARK_EUNSUPPORTED, "markov_head.markov_w1.weight", "fp8 per-tensor");
    assert_int_equal(b.n_problems, 1);
    fresh("tiny");
    fake_find(&b.f, "context_norm.weight")->dtype = DSPARK_F8_E4M3;
    fake_add(&b.f, "context_norm.weight_scale", DSPARK_F32, 1, 1, 0);
    expect(DSPARK_EUNSUPPORTED, "context_norm.weight", "fp8");
    fresh("tiny");
    fake_add(&b.f, "context_norm.k_scale", DSPARK_F32, 1, 1, 0);
    expect(DSPARK_EMODEL, "context_norm.k_scale", "beside a plain weight");

    /* a scale beside a plain weight, and both kinds of weight */
    fresh("tiny");
    fake_add(&b.f, "layers.0.mlp.up_proj.weight_scale", DSPARK_F32, 1, 1, 0);
    expect(DSPARK_EMODEL, "layers.0.mlp.up_proj.weight", "beside a BF16 weight");
    fresh("tiny");
    fake_add(&b.f, "layers.0.mlp.up_proj.weight_packed", DSPARK_U8, 2, 128, 32);
    fake_add(&b.f, "layers.0.mlp.up_proj.weight_scale", DSPARK_U8, 2, 128, 2);
    expect(DSPARK_EMODEL, "layers.0.mlp.up_proj.", "both weight and weight_packed");
    fresh("tiny");
    fake_rename(&b.f, "layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight_scale");
    expect(DSPARK_EMODEL, "layers.0.mlp.up_proj.", "scale without a weight");
    /* broken wins over not served */
    fresh("tiny");
    fake_find(&b.f, "layers.0.input_layernorm.weight")->dtype = DSPARK_F16;
    fake_remove(&b.f, "final_norm.weight");
    expect(DSPARK_EMODEL, "final_norm.weight", "1 more problem)");
}

/* ---- heads that may be there ----------------------------------------------------------------- */

static void test_heads(void **state)
{
    (void)state;
    fresh("tiny");
    fake_add(&b.f, "lm_head.weight", DSPARK_BF16, 2, 97, 64);
    assert_int_equal(run_check(), DSPARK_OK);
    fake_find(&b.f, "lm_head.weight")->shape[0] = 32;
    expect(DSPARK_EMODEL, "lm_head.weight", "d2t");
    fresh("tiny");
    fake_find(&b.f, "embed_tokens.weight")->shape[0] = 96;
    expect(DSPARK_EMODEL, "embed_tokens.weight", "[96, 64]");
    /* a head that the config switches off may stay in the file, in either width */
    fresh("tiny");
    b.doc->config.confidence_head = 0;
    assert_int_equal(run_check(), DSPARK_OK);
    fake_find(&b.f, "confidence_head.proj.weight")->shape[1] = 64;
    assert_int_equal(run_check(), DSPARK_OK);
    fake_find(&b.f, "confidence_head.proj.weight")->shape[1] = 65;
    expect(DSPARK_EMODEL, "confidence_head.proj.weight", "shape");
    /* one that it switches on has the width that it says */
    fresh("tiny");
    b.doc->config.confidence_with_markov = 0;
    expect(DSPARK_EMODEL, "confidence_head.proj.weight", "[1, 64]");
    /* the other Markov heads bring tensors of their own */
    fresh("tiny");
    b.doc->config.markov_type = DSPARK_MARKOV_GATED;
    expect(DSPARK_EMODEL, "markov_head.gate_proj.weight", "[8, 72]");
    fake_from_roster(&b.f, &b.doc->config, 0);
    assert_int_equal(b.f.n, 70);
    assert_int_equal(run_check(), DSPARK_OK);
    b.doc->config.markov_type = DSPARK_MARKOV_RNN;
    fake_from_roster(&b.f, &b.doc->config, 0);
    assert_int_equal(fake_find(&b.f, "markov_head.joint_proj.weight")->shape[0], 24);
    assert_int_equal(fake_find(&b.f, "markov_head.joint_proj.weight")->shape[1], 80);
    assert_int_equal(run_check(), DSPARK_OK);
}

static void test_context_only(void **state)
{
    (void)state;
    fresh("tiny");
    b.doc->context_only = 1;
    expect(DSPARK_EMODEL, "embed_tokens.weight", "dspark_parts");
    fake_from_roster(&b.f, &b.doc->config, 1);
    assert_int_equal(b.f.n, 17);
    assert_int_equal(run_check(), DSPARK_OK);
    fake_remove(&b.f, "layers.4.self_attn.q_a_proj.weight");
    expect(DSPARK_EMODEL, "layers.4.self_attn.q_a_proj.weight", "missing");
}

static void test_no_memory(void **state)
{
    const char *dir = tmpdir_make();
    dspark_checkpoint *ckpt;
    size_t n;

    (void)state;
    if (!oom_available()) skip();
    fresh("tiny");
    fake_write(&b.f, dir, NULL);
    assert_int_equal(dspark__checkpoint_open(&ckpt, dir, NULL), DSPARK_OK);
    oom_count_start();
    assert_int_equal(dspark__roster_check(ckpt, b.doc, NULL, NULL, &b.err), DSPARK_OK);
    n = oom_stop();
    assert_true(n >= 5);
    for (size_t i = 1; i <= n; i++) {
        dspark_status st;
        oom_fail_nth(i);
        st = dspark__roster_check(ckpt, b.doc, NULL, NULL, &b.err);
        oom_stop();
        assert_int_equal(st, DSPARK_ENOMEM);
    }
    dspark__checkpoint_close(ckpt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_good),
        cmocka_unit_test(test_each_missing),
        cmocka_unit_test(test_each_renamed),
        cmocka_unit_test(test_each_transposed),
        cmocka_unit_test(test_each_doubled),
        cmocka_unit_test(test_each_retyped),
        cmocka_unit_test(test_spellings),
        cmocka_unit_test(test_foreign),
        cmocka_unit_test(test_other_attention),
        cmocka_unit_test(test_premerged),
        cmocka_unit_test(test_quantised),
        cmocka_unit_test(test_heads),
        cmocka_unit_test(test_context_only),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, teardown);
}
