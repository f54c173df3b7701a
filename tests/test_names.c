/* The name table and the weight stream: where each tensor's bytes go, the duplication of the KV
 * projection into the cross-layer shards, and that nothing else slips through. */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "ckpt/names.h"
#include "support/fake.h"
#include "support/tmpdir.h"

static dspark__config_doc *doc;

static int setup(void **state)
{
    (void)state;
    doc = fake_config("tiny");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    dspark__config_free(doc);
    return 0;
}

/* ---- one name -------------------------------------------------------------------------------- */

static void test_table(void **state)
{
    static const struct {
        const char *name, *canonical;
        dspark__target target;
        uint32_t index;
        int shard;
        dspark__dialect dialect;
    } rows[] = {
        {"embed_tokens.weight", "embed_tokens.weight", DSPARK__T_EMBED, 0, -1, 0},
        {"lm_head.weight", "lm_head.weight", DSPARK__T_LM_HEAD, 0, -1, 0},
        {"context_proj.weight", "context_proj.weight", DSPARK__T_CONTEXT_PROJ, 0, -1, 1},
        {"fc.weight", "context_proj.weight", DSPARK__T_CONTEXT_PROJ, 0, -1, 2},
        {"context_norm.weight", "context_norm.weight", DSPARK__T_CONTEXT_NORM, 0, -1, 1},
        {"hidden_norm.weight", "context_norm.weight", DSPARK__T_CONTEXT_NORM, 0, -1, 2},
        {"final_norm.weight", "final_norm.weight", DSPARK__T_FINAL_NORM, 0, -1, 1},
        {"norm.weight", "final_norm.weight", DSPARK__T_FINAL_NORM, 0, -1, 2},
        {"layers.0.input_layernorm.weight", NULL, DSPARK__T_INPUT_NORM, 0, -1, 0},
        {"layers.4.self_attn.q_a_proj.weight", NULL, DSPARK__T_QKV_A, 4, 0, 0},
        {"layers.1.self_attn.q_a_layernorm.weight", NULL, DSPARK__T_Q_A_NORM, 1, -1, 0},
        {"layers.1.self_attn.q_b_proj.weight", NULL, DSPARK__T_Q_B, 1, -1, 0},
        {"layers.1.self_attn.kv_a_layernorm.weight", NULL, DSPARK__T_KV_A_NORM, 1, -1, 0},
        {"layers.1.self_attn.kv_b_proj.weight", NULL, DSPARK__T_KV_B, 1, -1, 0},
        {"layers.1.self_attn.o_proj.weight", NULL, DSPARK__T_O, 1, -1, 0},
        {"layers.1.post_attention_layernorm.weight", NULL, DSPARK__T_POST_NORM, 1, -1, 0},
        {"layers.2.mlp.gate_proj.weight", NULL, DSPARK__T_GATE_UP, 2, 0, 0},
        {"layers.2.mlp.up_proj.weight_scale", NULL, DSPARK__T_GATE_UP, 2, 1, 0},
        {"layers.2.mlp.down_proj.weight", NULL, DSPARK__T_DOWN, 2, -1, 0},
        {"markov_head.markov_w1.weight", NULL, DSPARK__T_MARKOV_W1, 0, -1, 0},
        {"markov_head.markov_w2.weight", NULL, DSPARK__T_MARKOV_W2, 0, -1, 0},
        {"confidence_head.proj.weight", NULL, DSPARK__T_CONFIDENCE, 0, -1, 0},
        {"confidence_head.proj.bias", NULL, DSPARK__T_CONFIDENCE, 0, -1, 0},
    };

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (int prefixed = 0; prefixed < 2; prefixed++) {
            char name[200];
            dspark__name n;
            dspark__arrival a[2];

            snprintf(name, sizeof name, "%s%s", prefixed ? "model." : "", rows[i].name);
            dspark__name_parse(&n, name, &doc->config);
            if (n.kind != DSPARK__NAME_MAPPED) fail_msg("%s is not mapped", name);
            assert_int_equal(n.prefixed, prefixed);
            assert_int_equal(n.dialect, rows[i].dialect);
            assert_string_equal(n.canonical, rows[i].canonical ? rows[i].canonical : rows[i].name);
            assert_int_equal(n.n_arrivals, 1);
            assert_int_equal(dspark__names_map(name, &doc->config, a), 1);
            assert_int_equal(a[0].target, rows[i].target);
            assert_int_equal(a[0].index, rows[i].index);
            assert_int_equal(a[0].shard, rows[i].shard);
            assert_string_equal(a[0].suffix, strrchr(name, '.') + 1);
            assert_null(a[0].tensor);
        }
    }
}

static void test_suffixes(void **state)
{
    static const char *const suffixes[] = {
        "weight",
        "bias",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "input_scale",
        "input_global_scale",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
        "pre_quant_scale",
        "scale",
        "q_scale",
        "k_scale",
        "v_scale",
        "output_scale",
        "svdquant_lora_a",
        "svdquant_lora_b",
    };

    (void)state;
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        char name[200];
        dspark__arrival a[2];

        snprintf(name, sizeof name, "layers.3.self_attn.kv_a_proj_with_mqa.%s", suffixes[i]);
        assert_int_equal(dspark__names_map(name, &doc->config, a), 2);
        /* the unchanged place first */
        assert_int_equal(a[0].target, DSPARK__T_QKV_A);
        assert_int_equal(a[0].index, 3);
        assert_int_equal(a[0].shard, 1);
        assert_int_equal(a[1].target, DSPARK__T_CONTEXT_KV);
        assert_int_equal(a[1].index, 0);
        assert_int_equal(a[1].shard, 3);
        assert_string_equal(a[0].suffix, suffixes[i]);
        assert_string_equal(a[1].suffix, suffixes[i]);
    }
}

static void test_not_mapped(void **state)
{
    static const struct {
        const char *name;
        dspark__name_kind kind;
    } rows[] = {
        {"layers.5.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers.02.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers.00.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers.x.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers.-1.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers.+1.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers. 1.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers.1e0.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers..self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers.4294967296.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers.18446744073709551616.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers.2.self_attn.kv_a_proj.weight", DSPARK__NAME_FOREIGN},
        {"layers.2.self_attn.kv_a_proj_with_mqa", DSPARK__NAME_FOREIGN},
        {"layers.2.self_attn.kv_a_proj_with_mqa.", DSPARK__NAME_FOREIGN},
        {"layers.2.self_attn.kv_a_proj_with_mqa.weights", DSPARK__NAME_FOREIGN},
        {"layers.2.self_attn.kv_a_proj_with_mqa.weight.extra", DSPARK__NAME_FOREIGN},
        {"layers.2.self_attn.kv_a_proj_with_mqa.scales", DSPARK__NAME_FOREIGN},
        {"layers.2.self_attn.k_scale", DSPARK__NAME_IGNORED},
        {"model.layers.0.self_attn.attn.v_scale", DSPARK__NAME_IGNORED},
        {"layers.5.self_attn.k_scale", DSPARK__NAME_FOREIGN},
        {"layers.2.mlp.k_scale", DSPARK__NAME_FOREIGN},
        {"layers.2.self_attn.k_scale.weight", DSPARK__NAME_FOREIGN},
        {"layers.2.attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"x.layers.2.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"model.model.layers.2.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers.2.layers.2.self_attn.kv_a_proj_with_mqa.weight", DSPARK__NAME_FOREIGN},
        {"layers.2.self_attn.q_proj.weight", DSPARK__NAME_FOREIGN},
        {"layers.0.self_attn.attention_sink_bias", DSPARK__NAME_FOREIGN},
        {"layers.0.self_attn.g_proj.weight", DSPARK__NAME_FOREIGN},
        {"fc_norm.0.weight", DSPARK__NAME_FOREIGN}, /* fc_norm is off */
        {"markov_head.gate_proj.weight", DSPARK__NAME_FOREIGN},
        {"markov_head.joint_proj.bias", DSPARK__NAME_FOREIGN},
        {"confidence_head.weight", DSPARK__NAME_FOREIGN},
        {"context_proj", DSPARK__NAME_FOREIGN},
        {"", DSPARK__NAME_FOREIGN},
        {"model.", DSPARK__NAME_FOREIGN},
        {"layers.", DSPARK__NAME_FOREIGN},
        {"d2t", DSPARK__NAME_VOCAB_MAP},
        {"model.t2d", DSPARK__NAME_VOCAB_MAP},
        {"context_kv_proj.weight", DSPARK__NAME_PREMERGED},
        {"layers.1.self_attn.fused_qkv_a_proj.weight", DSPARK__NAME_PREMERGED},
        {"model.layers.1.mlp.gate_up_proj.weight_scale", DSPARK__NAME_PREMERGED},
        {"layers.1.self_attn.rotary_emb.inv_freq", DSPARK__NAME_IGNORED},
        {"rotary_emb.cos_cached", DSPARK__NAME_IGNORED},
        {"model.rotary_emb.sin_cached", DSPARK__NAME_IGNORED},
        {"rotary_pos_emb.inv_freq", DSPARK__NAME_IGNORED},
    };

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        dspark__name n;
        dspark__arrival a[2];

        dspark__name_parse(&n, rows[i].name, &doc->config);
        if (n.kind != rows[i].kind) fail_msg("\"%s\": kind %d", rows[i].name, n.kind);
        assert_int_equal(dspark__names_map(rows[i].name, &doc->config, a), 0);
        assert_int_equal(n.canonical[0], 0);
        if (n.kind == DSPARK__NAME_FOREIGN) assert_non_null(n.why);
    }
}

static void test_config_dependent(void **state)
{
    dspark_config c = doc->config;
    dspark__arrival a[2];

    (void)state;
    c.fc_norm = 1;
    assert_int_equal(dspark__names_map("fc_norm.4.weight", &c, a), 1);
    assert_int_equal(a[0].target, DSPARK__T_FC_NORM);
    assert_int_equal(a[0].index, 4);
    assert_int_equal(dspark__names_map("fc_norm.5.weight", &c, a), 0);
    assert_int_equal(dspark__names_map("fc_norm.04.weight", &c, a), 0);
    assert_int_equal(dspark__names_map("fc_norm.weight", &c, a), 0);
    c.markov_type = DSPARK_MARKOV_GATED;
    assert_int_equal(dspark__names_map("markov_head.gate_proj.bias", &c, a), 1);
    assert_int_equal(dspark__names_map("markov_head.joint_proj.bias", &c, a), 0);
    c.markov_type = DSPARK_MARKOV_RNN;
    assert_int_equal(dspark__names_map("markov_head.joint_proj.weight", &c, a), 1);
    c.n_layers = 12;
    assert_int_equal(dspark__names_map("layers.11.mlp.up_proj.weight", &c, a), 1);
    assert_int_equal(a[0].index, 11);
    assert_int_equal(dspark__names_map("layers.12.mlp.up_proj.weight", &c, a), 0);
}

static void test_distance(void **state)
{
    static const char meant[] = "layers.2.self_attn.kv_a_proj_with_mqa.weight";

    (void)state;
    assert_int_equal(dspark__name_distance(meant, meant), 0);
    assert_int_equal(dspark__name_distance("layers.02.self_attn.kv_a_proj_with_mqa.weight", meant),
                     1);
    /* the shortened name is nearer to what it was shortened from than to a neighbour */
    assert_true(dspark__name_distance("layers.2.self_attn.kv_a_proj.weight", meant) <
                dspark__name_distance("layers.2.self_attn.kv_a_proj.weight",
                                      "layers.2.self_attn.q_a_proj.weight"));
    assert_true(dspark__name_distance("vision.patch_embed", meant) == UINT_MAX);
    assert_true(dspark__name_distance("", meant) == UINT_MAX);
}

/* ---- the stream ------------------------------------------------------------------------------ */

typedef struct seen {
    dspark__arrival list[64];
    size_t n, stop_at;
} seen;

static dspark_status remember(void *user, const dspark__arrival *a, dspark_error *err)
{
    seen *s = user;

    (void)err;
    assert_true(s->n < 64);
    s->list[s->n++] = *a;
    return s->n == s->stop_at ? DSPARK_ECANCELLED : DSPARK_OK;
}

static dspark_checkpoint *open_fake(const fake *f)
{
    const char *dir = tmpdir_make();
    dspark_checkpoint *ckpt;
    dspark_error err;

    fake_write(f, dir, NULL);
    if (dspark__checkpoint_open(&ckpt, dir, &err) != DSPARK_OK)
        fail_msg("%s: %s", err.where, err.message);
    return ckpt;
}

/* Both places are views on the same bytes, in the file's order, for every kind of companion. */
static void test_duplication(void **state)
{
    static const struct {
        const char *suffix;
        dspark_dtype dtype;
        uint64_t cols;
    } parts[] = {{"weight", DSPARK_BF16, 64},
                 {"weight_packed", DSPARK_U8, 32},
                 {"weight_scale", DSPARK_F8_E4M3, 4}};
    static fake f;
    dspark_checkpoint *ckpt;
    seen s = {.n = 0};
    size_t at = 0;

    (void)state;
    f.n = 0;
    for (uint32_t l = 0; l < 5; l++) {
        for (size_t p = 0; p < 3; p++) {
            char name[120];
            snprintf(name, sizeof name, "layers.%u.self_attn.kv_a_proj_with_mqa.%s", 4 - l,
                     parts[p].suffix);
            fake_add(&f, name, parts[p].dtype, 2, 24, parts[p].cols);
        }
        fake_add(&f, l ? "rotary_emb.inv_freq" : "context_norm.weight", DSPARK_BF16, 1, 64, 0);
        if (l > 1) f.n--; /* once is enough */
    }
    ckpt = open_fake(&f);
    assert_int_equal(dspark__weight_stream(ckpt, &doc->config, remember, &s, NULL), DSPARK_OK);
    assert_int_equal(s.n, 5 * 3 * 2 + 1);
    for (size_t i = 0; i < dspark__checkpoint_count(ckpt); i++) {
        const dspark_tensor *t = dspark__checkpoint_at(ckpt, i);
        const dspark__arrival *a = &s.list[at];
        int layer;

        if (strstr(t->name, "rotary")) continue;
        if (!strstr(t->name, "kv_a_proj")) {
            assert_int_equal(a->target, DSPARK__T_CONTEXT_NORM);
            assert_ptr_equal(a->tensor, t);
            at++;
            continue;
        }
        layer = t->name[7] - '0';
        assert_int_equal(a[0].target, DSPARK__T_QKV_A);
        assert_int_equal(a[0].index, layer);
        assert_int_equal(a[0].shard, 1);
        assert_int_equal(a[1].target, DSPARK__T_CONTEXT_KV);
        assert_int_equal(a[1].shard, layer);
        assert_ptr_equal(a[0].tensor, t);
        assert_ptr_equal(a[1].tensor, t);
        assert_ptr_equal(a[0].tensor->data, a[1].tensor->data);
        assert_string_equal(a[0].suffix, strrchr(t->name, '.') + 1);
        assert_string_equal(a[1].suffix, a[0].suffix);
        at += 2;
    }
    assert_int_equal(at, s.n);
    /* a visitor's verdict is handed on at once */
    s.n = 0;
    s.stop_at = 4;
    assert_int_equal(dspark__weight_stream(ckpt, &doc->config, remember, &s, NULL),
                     DSPARK_ECANCELLED);
    assert_int_equal(s.n, 4);
    dspark__checkpoint_close(ckpt);
}

static void test_stream_refuses(void **state)
{
    static const struct {
        const char *name;
        dspark_status status;
        const char *hint;
    } rows[] = {
        {"layers.2.self_attn.kv_a_proj.weight", DSPARK_EMODEL,
         "\"layers.2.self_attn.kv_a_proj_with_mqa.weight\""},
        {"layers.02.self_attn.kv_a_proj_with_mqa.weight", DSPARK_EMODEL,
         "\"layers.2.self_attn.kv_a_proj_with_mqa.weight\""},
        {"layers.5.self_attn.kv_a_proj_with_mqa.weight", DSPARK_EMODEL, "num_hidden_layers"},
        {"context_projection.weight", DSPARK_EMODEL, "\"context_proj.weight\""},
        {"vision_tower.patch_embed.weight", DSPARK_EMODEL, "no such module"},
        {"d2t", DSPARK_EUNSUPPORTED, "vocabulary"},
        {"context_kv_proj.weight", DSPARK_EUNSUPPORTED, "ATOM"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        static fake f;
        dspark_checkpoint *ckpt;
        dspark_error err;
        seen s = {.n = 0};
        dspark_status st;

        f.n = 0;
        fake_add(&f, "context_norm.weight", DSPARK_BF16, 1, 64, 0);
        fake_add(&f, rows[i].name, DSPARK_BF16, 2, 24, 64);
        ckpt = open_fake(&f);
        st = dspark__weight_stream(ckpt, &doc->config, remember, &s, &err);
        assert_int_equal(st, rows[i].status);
        if (!strstr(err.where, rows[i].name) || !strstr(err.where, "model.safetensors"))
            fail_msg("where is \"%s\"", err.where);
        if (!strstr(err.message, rows[i].hint)) fail_msg("message is \"%s\"", err.message);
        assert_int_equal(s.n, 1);
        dspark__checkpoint_close(ckpt);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),          cmocka_unit_test(test_suffixes),
        cmocka_unit_test(test_not_mapped),     cmocka_unit_test(test_config_dependent),
        cmocka_unit_test(test_distance),       cmocka_unit_test(test_duplication),
        cmocka_unit_test(test_stream_refuses),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
