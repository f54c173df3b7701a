/* Opening a drafter with its block: every weight is where it belongs, whatever it is stored as; what is
 * missing, misshapen or not finite is refused by name; a model for context KV alone touches none of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/numfmt.h"
#include "model/model.h"
#include "model/rope.h"
#include "support/fixture.h"
#include "support/oom.h"
#include "support/target.h"
#include "support/tmpdir.h"

static dspark_error err;

/* ---- checkpoints ---- */

typedef struct variant {
    const char *name;
    const char *settings[4];
} variant;

static const variant variants[] = {
    {"vanilla", {NULL}},
    {"gated", {"markov_head_type=gated", "is_causal=true"}},
    {"rnn", {"markov_head_type=rnn", "logit_scale=0.5"}},
    {"confidence-hidden", {"confidence_head_with_markov=false", "fc_norm=true"}},
    {"no-confidence", {"enable_confidence_head=false", "confidence_head_with_markov=null"}},
    {"odd", {"markov_rank=5", "intermediate_size=102", "v_head_dim=9", "qk_nope_head_dim=7"}},
};
/* k of every linear is a multiple of every format's group. */
static const variant wide = {"wide", {"markov_head_type=gated", "markov_rank=32", "v_head_dim=16",
                                      "kv_lora_rank=32"}};
#define N_VARIANTS (sizeof variants / sizeof *variants)

/* The draft of a variant with an LM head of its own, so that nothing has to be borrowed. */
static void make_draft(char dir[512], const variant *v)
{
    dspark_synth_opts so;
    tensors t;
    char plain[512];
    const char *root = tmpdir_make();
    dspark_synth_opts_init(&so);
    so.preset = "tiny";
    so.seed = 17;
    so.settings = v->settings;
    while (so.n_settings < 4 && v->settings[so.n_settings]) so.n_settings++;
    snprintf(plain, sizeof plain, "%s/plain", root);
    snprintf(dir, 512, "%s", tmpdir_make());
    check(dspark_synth_checkpoint(plain, &so, &err), DSPARK_OK, &err);
    test_copy_checkpoint(&t, plain, dir);
    const size_t embed = tensors_index(&t, "embed_tokens.weight");
    const uint64_t vocab = t.list[embed].shape[0], hidden = t.list[embed].shape[1];
    test_target own = test_target_plain((uint32_t)vocab, (uint32_t)hidden, 8, 5);
    uint16_t *head = test_target_matrix(&own, 1);
    tensors_add2(&t, "lm_head.weight", DSPARK_BF16, vocab, hidden, head);
    free(head);
    tensors_open(&t, dir, 1);
    tensors_clear(&t);
    tmpdir_remove(root);
}

static dspark_status open_parts(dspark_model **out, const char *dir, uint32_t parts)
{
    dspark_model_opts o;
    dspark_model_opts_init(&o);
    o.parts = parts;
    o.n_threads = 1;
    memset(&err, 0, sizeof err);
    return dspark_model_open(out, dir, &o, &err);
}

static dspark_model *open_block(const char *dir)
{
    dspark_model *m;
    check(open_parts(&m, dir, DSPARK_PART_BLOCK), DSPARK_OK, &err);
    return m;
}

/* ---- where each number is ---- */

static uint16_t packed_at(const dspark__merged_linear *ml, uint32_t shard, uint32_t row, uint32_t column)
{
    const dspark__shard *s = &ml->shards[shard];
    const uint16_t *codes = (const void *)(s->codes + row / DSPARK__PANEL * s->code_stride);
    assert_true(shard < ml->n_shards && row < s->rows && column < ml->k);
    assert_int_equal(s->packing.bits, 16);
    size_t width = DSPARK__PANEL; /* of the row's panel */
    if (s->packing.narrow && row / DSPARK__PANEL + 1 == s->n_panels && dspark__narrow_width(s->rows))
        width = dspark__narrow_width(s->rows);
    return codes[(size_t)(column / 2) * width * 2 + row % DSPARK__PANEL * 2 + column % 2];
}

static uint16_t file_at(const dspark_tensor *t, uint64_t i)
{
    assert_non_null(t);
    assert_true(i < t->n_elements);
    return dspark__load_u16((const unsigned char *)t->data + 2 * i);
}

static const dspark_tensor *tensor_of(const dspark_checkpoint *file, const char *fmt, uint32_t layer)
{
    char name[128];
    snprintf(name, sizeof name, fmt, layer);
    const dspark_tensor *t = dspark_checkpoint_find(file, name);
    if (!t) fail_msg("no tensor %s", name);
    return t;
}

/* Shard = tensor, whole. */
static void shard_is(const dspark__merged_linear *ml, uint32_t shard, const dspark_tensor *t)
{
    assert_true(shard < ml->n_shards);
    assert_int_equal(ml->shards[shard].rows, t->shape[0]);
    assert_int_equal(ml->k, t->shape[1]);
    for (uint32_t r = 0; r < ml->shards[shard].rows; r++)
        for (uint32_t c = 0; c < ml->k; c++)
            if (packed_at(ml, shard, r, c) != file_at(t, (uint64_t)r * ml->k + c))
                fail_msg("%s: row %u, column %u", t->name, r, c);
}

static void vector_is(const uint16_t *v, const dspark_tensor *t)
{
    for (uint64_t i = 0; i < t->n_elements; i++)
        if (v[i] != file_at(t, i)) fail_msg("%s: %llu", t->name, (unsigned long long)i);
}

static void table_is(const dspark__table *table, const dspark_tensor *t)
{
    assert_int_equal(table->rows, t->shape[0]);
    assert_int_equal(table->cols, t->shape[1]);
    for (uint64_t r = 0; r < table->rows; r++)
        assert_memory_equal(table->data + r * table->row_stride,
                            (const unsigned char *)t->data + r * table->cols * 2, table->cols * 2);
}

/* kv_b is [H][P + V][C]: the P rows of a head turned, its V rows as they lie. */
static void kv_b_is(const dspark_model *m, uint32_t l, const dspark_tensor *t)
{
    const dspark_config *c = dspark_model_config(m);
    const uint32_t p = c->qk_nope_head_dim, v = c->v_head_dim, width = c->kv_lora_rank;
    assert_int_equal(m->block.w_uk.k, p);
    assert_int_equal(m->block.w_uv.k, width);
    assert_true(m->block.w_uk.narrow && m->block.w_uv.narrow);
    for (uint32_t h = 0; h < c->n_heads; h++) {
        uint32_t shard = l * c->n_heads + h;
        uint64_t first = (uint64_t)h * (p + v) * width;
        assert_int_equal(m->block.w_uk.shards[shard].rows, width);
        assert_int_equal(m->block.w_uv.shards[shard].rows, v);
        for (uint32_t i = 0; i < width; i++) {
            for (uint32_t j = 0; j < p; j++)
                assert_int_equal(packed_at(&m->block.w_uk, shard, i, j), file_at(t, first + j * width + i));
            for (uint32_t j = 0; j < v; j++)
                assert_int_equal(packed_at(&m->block.w_uv, shard, j, i),
                                 file_at(t, first + (p + j) * (uint64_t)width + i));
        }
    }
}

static void layers_are(const dspark_model *m, const dspark_checkpoint *file)
{
    const dspark__block_weights *b = &m->block;
    const dspark_config *c = dspark_model_config(m);
    for (uint32_t l = 0; l < c->n_layers; l++) {
        vector_is(b->input_norm + (size_t)l * c->hidden_size,
                  tensor_of(file, "layers.%u.input_layernorm.weight", l));
        vector_is(b->post_norm + (size_t)l * c->hidden_size,
                  tensor_of(file, "layers.%u.post_attention_layernorm.weight", l));
        vector_is(b->q_a_norm + (size_t)l * c->q_lora_rank,
                  tensor_of(file, "layers.%u.self_attn.q_a_layernorm.weight", l));
        shard_is(&m->q_a, l, tensor_of(file, "layers.%u.self_attn.q_a_proj.weight", l));
        shard_is(&b->q_b, l, tensor_of(file, "layers.%u.self_attn.q_b_proj.weight", l));
        kv_b_is(m, l, tensor_of(file, "layers.%u.self_attn.kv_b_proj.weight", l));
        shard_is(&b->o, l, tensor_of(file, "layers.%u.self_attn.o_proj.weight", l));
        shard_is(&b->gate_up, 2 * l, tensor_of(file, "layers.%u.mlp.gate_proj.weight", l));
        shard_is(&b->gate_up, 2 * l + 1, tensor_of(file, "layers.%u.mlp.up_proj.weight", l));
        shard_is(&b->down, l, tensor_of(file, "layers.%u.mlp.down_proj.weight", l));
    }
}

static void mix_is(const dspark_model *m, const dspark_checkpoint *file)
{
    const dspark__merged_linear *mix = &m->block.markov_mix;
    const char *name = m->config.markov_type == DSPARK_MARKOV_RNN ? "joint_proj" : "gate_proj";
    char weight[64], bias[64];
    if (m->config.markov_type == DSPARK_MARKOV_VANILLA) {
        assert_int_equal(mix->n_shards, 0);
        return;
    }
    snprintf(weight, sizeof weight, "markov_head.%s.weight", name);
    snprintf(bias, sizeof bias, "markov_head.%s.bias", name);
    const dspark_tensor *w = tensor_of(file, weight, 0), *b = tensor_of(file, bias, 0);
    assert_int_equal(mix->k, w->shape[1] + 1);
    assert_int_equal(mix->shards[0].rows, w->shape[0]);
    for (uint32_t r = 0; r < w->shape[0]; r++) {
        for (uint32_t i = 0; i < w->shape[1]; i++)
            assert_int_equal(packed_at(mix, 0, r, i), file_at(w, r * w->shape[1] + i));
        assert_int_equal(packed_at(mix, 0, r, mix->k - 1), file_at(b, r));
    }
}

static void heads_are(const dspark_model *m, const dspark_checkpoint *file)
{
    const dspark__block_weights *b = &m->block;
    const dspark_config *c = dspark_model_config(m);
    vector_is(b->final_norm, tensor_of(file, "final_norm.weight", 0));
    table_is(&b->embed, tensor_of(file, "embed_tokens.weight", 0));
    table_is(&b->markov_w1, tensor_of(file, "markov_head.markov_w1.weight", 0));
    shard_is(&b->markov_w2, 0, tensor_of(file, "markov_head.markov_w2.weight", 0));
    shard_is(&b->lm_head, 0, tensor_of(file, "lm_head.weight", 0));
    mix_is(m, file);
    if (c->confidence_head) {
        vector_is(b->confidence, tensor_of(file, "confidence_head.proj.weight", 0));
        float bias = dspark__bf16_to_f32(file_at(tensor_of(file, "confidence_head.proj.bias", 0), 0));
        assert_true(bias != 0 && b->confidence_bias == bias);
    } else {
        assert_null(b->confidence);
    }
    assert_true(b->softmax_scale == (float)dspark__rope_softmax_scale(c));
}

static void test_every_variant(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_VARIANTS; i++) {
        char dir[512];
        dspark_checkpoint *file;
        make_draft(dir, &variants[i]);
        dspark_model *m = open_block(dir);
        check(dspark_checkpoint_open(&file, dir, &err), DSPARK_OK, &err);
        layers_are(m, file);
        heads_are(m, file);
        assert_null(m->block.target);
        dspark_checkpoint_close(file);
        dspark_model_close(m);
        tmpdir_remove(dir);
    }
}

/* ---- weight schemes ---- */

static void quantise(char dir[512], const char *from, dspark_format format, dspark_layout layout)
{
    static const char *const every = "*"; /* without it kv_b and the heads stay as they are */
    dspark_quantize_opts o;
    snprintf(dir, 512, "%s/ckpt", tmpdir_make());
    dspark_quantize_opts_init(&o);
    o.format = format;
    o.targets = &every;
    o.n_targets = format != DSPARK_FORMAT_BF16;
    o.layout = layout;
    o.group_size = format == DSPARK_FORMAT_INT4 ? 32 : 0;
    o.n_threads = 1;
    check(dspark_quantize(from, dir, &o, &err), DSPARK_OK, &err);
}

static void drop_quantised(const char *dir)
{
    char root[512];
    snprintf(root, sizeof root, "%s", dir);
    *strrchr(root, '/') = 0;
    tmpdir_remove(root);
}

static void same_panels(const dspark__merged_linear *a, const dspark__merged_linear *b)
{
    assert_int_equal(a->n_shards, b->n_shards);
    for (uint32_t s = 0; s < a->n_shards; s++) {
        assert_int_equal(a->shards[s].bytes, b->shards[s].bytes);
        assert_memory_equal(a->shards[s].codes, b->shards[s].codes, a->shards[s].bytes);
    }
}

/* Every linear in every format, kv_b and heads too: kept in its codes, or expanded as the way back to BF16 expands it. */
static void test_schemes(void **state)
{
    char plain[512];
    (void)state;
    make_draft(plain, &wide);
    for (int f = DSPARK_FORMAT_FP8_TENSOR; f < DSPARK_FORMAT_BF16; f++)
        for (int layout = 0; layout < 2; layout++) {
            char packed[512], back[512];
            if (layout && f != DSPARK_FORMAT_NVFP4 && f != DSPARK_FORMAT_FP8_TENSOR) continue;
            quantise(packed, plain, (dspark_format)f,
                     layout ? DSPARK_LAYOUT_MODELOPT : DSPARK_LAYOUT_COMPRESSED_TENSORS);
            quantise(back, packed, DSPARK_FORMAT_BF16, DSPARK_LAYOUT_COMPRESSED_TENSORS);
            dspark_model *q = open_block(packed), *b = open_block(back);
            const dspark__merged_linear *coded[] = {&q->q_a, &q->block.q_b, &q->block.o, &q->block.gate_up,
                                                    &q->block.down, &q->block.markov_w2};
            const int four = f == DSPARK_FORMAT_NVFP4 || f == DSPARK_FORMAT_MXFP4 || f == DSPARK_FORMAT_INT4;
            for (size_t i = 0; i < sizeof coded / sizeof *coded; i++)
                for (uint32_t s = 0; s < coded[i]->n_shards; s++)
                    if (coded[i]->shards[s].packing.bits != (four ? 4u : 8u))
                        fail_msg("format %d: %s has %u bits", f, coded[i]->name,
                                 coded[i]->shards[s].packing.bits);
            same_panels(&q->block.w_uk, &b->block.w_uk);
            same_panels(&q->block.w_uv, &b->block.w_uv);
            same_panels(&q->block.markov_mix, &b->block.markov_mix);
            same_panels(&q->block.lm_head, &b->block.lm_head);
            assert_memory_equal(q->block.norms, b->block.norms, q->block.norms_bytes);
            assert_true(dspark_model_resident_bytes(q) < dspark_model_resident_bytes(b));
            dspark_model_close(q);
            dspark_model_close(b);
            drop_quantised(packed);
            drop_quantised(back);
        }
}

/* A double is rounded to bf16 once: next to a tie, two roundings would take the wrong side. */
static void test_rounded_once(void **state)
{
    static const struct {
        double from;
        uint16_t to;
    } rows[] = {{1.0, 0x3f80}, {1 + 0x1p-8, 0x3f80}, {1 + 0x1p-8 + 0x1p-40, 0x3f81},
                {1 + 0x1p-8 - 0x1p-40, 0x3f80}, {1 + 0x3p-8 - 0x1p-40, 0x3f81}, {1 + 0x3p-8, 0x3f82},
                {0x1p-133, 0x0001}, {0x1p-134, 0}, {0x1p-134 + 0x1p-180, 1}, {0x1p-300, 0},
                {0x1.fep127, 0x7f7f}, {0x1.ffp127 - 0x1p90, 0x7f7f}, {0x1.ffp127, 0x7f80}, {1e300, 0x7f80}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_int_equal(dspark__f64_to_bf16(rows[i].from), rows[i].to);
        assert_int_equal(dspark__f64_to_bf16(-rows[i].from), rows[i].to | 0x8000);
    }
    assert_int_equal(dspark__f64_to_bf16(-0.0), 0x8000);
}

/* ---- what is not there, or wrong ---- */

static int optional(const char *name)
{
    return strcmp(name, "confidence_head.proj.bias") == 0;
}

static int of_context(const char *name)
{
    return strstr(name, "context_") || strstr(name, "kv_a_") || strstr(name, "fc_norm") ||
           strstr(name, "q_a_proj");
}

static void named(const char *name)
{
    char module[128];
    snprintf(module, sizeof module, "%s", name);
    *strrchr(module, '.') = 0;
    if (!strstr(err.where, module) && !strstr(err.message, module))
        fail_msg("%s is not named: [%s] %s", name, err.where, err.message);
}

enum { DROPPED, LONGER, FLAT, NAN_LAST, N_FAULTS };

static void break_tensor(tensors *t, size_t i, int fault)
{
    char name[128];
    uint64_t shape[2];
    snprintf(name, sizeof name, "%s", t->list[i].name);
    memcpy(shape, t->list[i].shape, sizeof shape);
    uint32_t rank = t->list[i].rank;
    if (fault == NAN_LAST) {
        memcpy(t->list[i].data + t->list[i].n_bytes - 2, &(uint16_t){0x7fc1}, 2);
        return;
    }
    tensors_remove(t, name);
    if (fault == LONGER) shape[0]++;
    if (fault == FLAT && rank == 2) shape[0] *= shape[1], rank = 1;
    else if (fault == FLAT) shape[1] = 1, rank = 2;
    if (fault != DROPPED) tensors_add(t, name, DSPARK_BF16, rank, shape, NULL);
}

/* Each tensor in turn, dropped, of another shape, of another rank, with one NaN. */
static void test_each_tensor(void **state)
{
    char dir[512];
    tensors all;
    (void)state;
    make_draft(dir, &variants[1]); /* gated */
    test_copy_checkpoint(&all, dir, NULL);
    const size_t n = all.n;
    tensors_clear(&all);
    for (size_t i = 0; i < n; i++)
        for (int fault = 0; fault < N_FAULTS; fault++) {
            const char *bad = tmpdir_make();
            char name[128];
            dspark_model *m = NULL;
            if (SAMPLE && (i + (size_t)fault) % 4) {
                tmpdir_remove(bad);
                continue;
            }
            test_copy_checkpoint(&all, dir, bad);
            snprintf(name, sizeof name, "%s", all.list[i].name);
            break_tensor(&all, i, fault);
            tensors_open(&all, bad, 1);
            tensors_clear(&all);
            dspark_status st = open_parts(&m, bad, DSPARK_PART_BLOCK);
            int table = strstr(name, "markov_w1") || strstr(name, "embed_tokens");
            if ((fault == DROPPED && optional(name)) || (fault == NAN_LAST && table)) {
                check(st, DSPARK_OK, &err); /* tables are looked at when they are looked up */
                if (fault == DROPPED) assert_true(m->block.confidence_bias == 0);
                dspark_model_close(m);
            } else {
                if (fault == NAN_LAST) check(st, DSPARK_ENONFINITE, &err);
                else check(st, DSPARK_EMODEL, &err);
                assert_null(m);
                named(name);
            }
            /* Without the block its numbers do not matter. */
            if (fault == NAN_LAST && !of_context(name)) {
                check(open_parts(&m, bad, DSPARK_PART_CONTEXT | DSPARK_PART_Q_A), DSPARK_OK, &err);
                assert_int_equal(m->block.q_b.n_shards, 0);
                assert_null(m->block.embed.data);
                assert_string_equal(dspark_model_block_fingerprint(m), "");
                dspark_model_close(m);
            }
            tmpdir_remove(bad);
        }
}

/* A scale that makes a weight of kv_b overflow bf16 is no weight. */
static void test_overflow(void **state)
{
    char dir[512], packed[512];
    tensors t;
    dspark_model *m;
    const char *bad = tmpdir_make();
    const float huge = 0x1p127f;
    (void)state;
    make_draft(dir, &variants[0]);
    quantise(packed, dir, DSPARK_FORMAT_FP8_TENSOR, DSPARK_LAYOUT_COMPRESSED_TENSORS);
    test_copy_checkpoint(&t, packed, bad);
    memcpy(t.list[tensors_index(&t, "layers.2.self_attn.kv_b_proj.weight_scale")].data, &huge, 4);
    tensors_open(&t, bad, 1);
    tensors_clear(&t);
    check(open_parts(&m, bad, DSPARK_PART_BLOCK), DSPARK_ENONFINITE, &err);
    assert_null(m);
    assert_non_null(strstr(err.where, "layers.2.self_attn.kv_b_proj"));
    drop_quantised(packed);
}

static void test_context_only(void **state)
{
    dspark_synth_opts so;
    char dir[512];
    dspark_model *m;
    (void)state;
    snprintf(dir, sizeof dir, "%s/ckpt", tmpdir_make());
    dspark_synth_opts_init(&so);
    so.preset = "tiny";
    so.context_only = 1;
    check(dspark_synth_checkpoint(dir, &so, &err), DSPARK_OK, &err);
    check(open_parts(&m, dir, DSPARK_PART_BLOCK), DSPARK_EMODEL, &err);
    assert_null(m);
    assert_non_null(strstr(err.message, "dspark_parts"));
    check(open_parts(&m, dir, DSPARK_PART_CONTEXT), DSPARK_OK, &err);
    dspark_model_close(m);
    check(open_parts(&m, dir, 8), DSPARK_EINVAL, &err);
    assert_null(m);
}

/* ---- fingerprints, bytes ---- */

static void test_fingerprints(void **state)
{
    char dir[512], context[40], block[40];
    tensors t;
    dspark_model *m;
    (void)state;
    make_draft(dir, &variants[0]);
    check(open_parts(&m, dir, DSPARK_PART_CONTEXT), DSPARK_OK, &err);
    snprintf(context, sizeof context, "%s", dspark_model_fingerprint(m));
    dspark_model_close(m);
    m = open_block(dir);
    assert_string_equal(context, dspark_model_fingerprint(m));
    snprintf(block, sizeof block, "%s", dspark_model_block_fingerprint(m));
    assert_int_equal(strlen(block), 32);
    dspark_model_close(m);
    static const char *const counted[] = {
        "layers.4.self_attn.kv_b_proj.weight", "layers.0.mlp.up_proj.weight", "final_norm.weight",
        "layers.1.post_attention_layernorm.weight", "lm_head.weight", "markov_head.markov_w2.weight",
        "confidence_head.proj.weight", "confidence_head.proj.bias"};
    for (size_t i = 0; i < sizeof counted / sizeof *counted; i++) {
        const char *changed = tmpdir_make();
        test_copy_checkpoint(&t, dir, changed);
        size_t at = tensors_index(&t, counted[i]);
        t.list[at].data[t.list[at].n_bytes - 2] ^= 1;
        tensors_open(&t, changed, 3); /* sharding does not count */
        tensors_clear(&t);
        m = open_block(changed);
        assert_string_equal(context, dspark_model_fingerprint(m));
        if (strcmp(block, dspark_model_block_fingerprint(m)) == 0) fail_msg("%s", counted[i]);
        dspark_model_close(m);
        tmpdir_remove(changed);
    }
}

static uint64_t plan_bytes(const char *dir, const char *kind, const char *part)
{
    dspark_inspection *in;
    check(dspark_inspect(&in, dir, NULL, &err), DSPARK_OK, &err);
    assert_int_equal(dspark_inspection_verdict(in), DSPARK_USABLE);
    json_t *doc = json_loads(dspark_inspection_json(in), 0, NULL);
    const json_t *v = json_object_get(json_object_get(json_object_get(doc, "plan"), kind), part);
    assert_true(json_is_integer(v));
    uint64_t bytes = (uint64_t)json_integer_value(v);
    json_decref(doc);
    dspark_inspection_free(in);
    return bytes;
}

typedef struct heard {
    uint64_t done, total;
    size_t calls, stop_at; /* 0: never */
} heard;

static int hear(void *user, uint64_t done, uint64_t total)
{
    heard *h = user;
    assert_true(done > h->done && done <= total);
    if (h->calls++) assert_int_equal(total, h->total);
    h->done = done;
    h->total = total;
    return h->calls == h->stop_at;
}

/* What inspect plans is what opening takes; progress ends at its total, in any format, and stops. */
static void measure(const char *dir)
{
    dspark_model_opts o;
    dspark_model *m = open_block(dir);
    uint64_t bytes = dspark_model_resident_bytes(m);
    dspark_model_close(m);
    assert_int_equal(bytes, plan_bytes(dir, "resident_bytes", "total") +
                                plan_bytes(dir, "resident_bytes", "q_a") +
                                plan_bytes(dir, "resident_bytes", "block") +
                                plan_bytes(dir, "resident_bytes", "lm_head"));
    heard h = {0};
    dspark_model_opts_init(&o);
    o.parts = DSPARK_PART_BLOCK;
    o.n_threads = 1;
    o.progress = hear;
    o.progress_user = &h;
    check(dspark_model_open(&m, dir, &o, &err), DSPARK_OK, &err);
    dspark_model_close(m);
    assert_int_equal(h.done, h.total);
    const size_t calls = h.calls;
    for (size_t stop = 1; stop <= calls; stop++) {
        h = (heard){.stop_at = stop};
        check(dspark_model_open(&m, dir, &o, &err), DSPARK_ECANCELLED, &err);
        assert_null(m);
        assert_int_equal(h.calls, stop);
    }
}

static void test_bytes_and_progress(void **state)
{
    static const dspark_format formats[] = {DSPARK_FORMAT_FP8_CHANNEL, DSPARK_FORMAT_FP8_BLOCK,
                                            DSPARK_FORMAT_NVFP4, DSPARK_FORMAT_INT4};
    char dir[512], packed[512];
    (void)state;
    for (size_t i = 0; i < N_VARIANTS; i++) {
        make_draft(dir, &variants[i]);
        measure(dir);
        tmpdir_remove(dir);
    }
    make_draft(dir, &wide);
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        quantise(packed, dir, formats[i], DSPARK_LAYOUT_COMPRESSED_TENSORS);
        measure(packed);
        drop_quantised(packed);
    }
}

/* The bytes of the files: every tensor is read for something, or looked up. */
static void test_read_bytes(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_VARIANTS; i++) {
        char dir[512];
        tensors t;
        uint64_t all = 0, tables = 0;
        make_draft(dir, &variants[i]);
        test_copy_checkpoint(&t, dir, NULL);
        for (size_t k = 0; k < t.n; k++) {
            all += t.list[k].n_bytes;
            if (strstr(t.list[k].name, "markov_w1") || strstr(t.list[k].name, "embed_tokens"))
                tables += t.list[k].n_bytes;
        }
        tensors_clear(&t);
        if (all - tables != plan_bytes(dir, "read_bytes", "total") + plan_bytes(dir, "read_bytes", "q_a") +
                                plan_bytes(dir, "read_bytes", "block") +
                                plan_bytes(dir, "read_bytes", "lm_head"))
            fail_msg("%s: %llu bytes beside the tables", variants[i].name,
                     (unsigned long long)(all - tables));
        tmpdir_remove(dir);
    }
}

/* Whose embedding and head are used is said; a checkpoint for context KV alone plans no block. */
static void test_inspect_says(void **state)
{
    dspark_synth_opts so;
    char dir[512], cut[512];
    dspark_inspection *in;
    (void)state;
    make_draft(dir, &variants[0]);
    check(dspark_inspect(&in, dir, NULL, &err), DSPARK_OK, &err);
    json_t *doc = json_loads(dspark_inspection_json(in), 0, NULL);
    int said[2] = {0, 0};
    size_t i;
    json_t *note;
    assert_string_equal(json_string_value(json_object_get(doc, "embed_tokens")), "own");
    assert_string_equal(json_string_value(json_object_get(doc, "lm_head")), "own");
    json_array_foreach(json_object_get(doc, "notes"), i, note) {
        said[0] += strstr(json_string_value(note), "embed_tokens") != NULL;
        said[1] += strstr(json_string_value(note), "lm_head") != NULL;
    }
    assert_int_equal(said[0], 1);
    assert_int_equal(said[1], 1);
    json_decref(doc);
    dspark_inspection_free(in);
    snprintf(cut, sizeof cut, "%s/ckpt", tmpdir_make());
    dspark_synth_opts_init(&so);
    so.preset = "tiny";
    so.context_only = 1;
    check(dspark_synth_checkpoint(cut, &so, &err), DSPARK_OK, &err);
    check(dspark_inspect(&in, cut, NULL, &err), DSPARK_OK, &err);
    doc = json_loads(dspark_inspection_json(in), 0, NULL);
    const json_t *resident = json_object_get(json_object_get(doc, "plan"), "resident_bytes");
    assert_true(json_is_null(json_object_get(resident, "block")));
    assert_true(json_is_null(json_object_get(resident, "lm_head")));
    json_decref(doc);
    dspark_inspection_free(in);
}

/* ---- memory ---- */

static void fail_in_turn(const char *dir)
{
    dspark_model *m;
    oom_count_start();
    dspark_status st = open_parts(&m, dir, DSPARK_PART_BLOCK);
    size_t n = oom_stop();
    check(st, DSPARK_OK, &err);
    dspark_model_close(m);
    assert_true(n > 50);
    for (size_t at = 1; at <= n; at += SAMPLE ? 5 : 1) {
        oom_fail_nth(at);
        st = open_parts(&m, dir, DSPARK_PART_BLOCK);
        oom_stop();
        if (oom_failed() == 0) break;
        check(st, DSPARK_ENOMEM, &err);
        assert_null(m);
    }
}

static void test_no_memory(void **state)
{
    char dir[512], packed[512];
    (void)state;
    if (!oom_available()) skip();
    make_draft(dir, &variants[2]); /* rnn */
    fail_in_turn(dir);
    make_draft(dir, &variants[0]);
    quantise(packed, dir, DSPARK_FORMAT_FP8_BLOCK, DSPARK_LAYOUT_COMPRESSED_TENSORS);
    fail_in_turn(packed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_variant), cmocka_unit_test(test_schemes),
        cmocka_unit_test(test_rounded_once),  cmocka_unit_test(test_each_tensor),
        cmocka_unit_test(test_overflow),      cmocka_unit_test(test_context_only),
        cmocka_unit_test(test_fingerprints),  cmocka_unit_test(test_bytes_and_progress),
        cmocka_unit_test(test_read_bytes),    cmocka_unit_test(test_inspect_says),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
