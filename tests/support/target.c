/* Targets for tests: two tensors by a formula, and copies of checkpoints. */
#include "support/target.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/numfmt.h"
#include "support/fixture.h"
#include "support/tmpdir.h"

test_target test_target_plain(uint32_t vocab, uint32_t hidden, uint32_t n_layers, uint64_t seed)
{
    return (test_target){.vocab = vocab, .hidden = hidden, .n_layers = n_layers, .seed = seed,
                         .embed_prefix = "model.", .head_prefix = "", .n_files = 1};
}

/* In (-2, 2), by place alone: neither file order nor the other matrix changes it. */
static double unit_value(uint64_t seed, uint64_t row, uint64_t column)
{
    uint64_t s = seed * 0x9e3779b97f4a7c15u + row * 0xbf58476d1ce4e5b9u + column * 0x94d049bb133111ebu + 1;
    for (int i = 0; i < 3; i++) next_random(&s);
    return (double)(next_random(&s) >> 11) * 0x1p-51 - 2;
}

uint16_t test_target_embed(const test_target *t, uint32_t row, uint32_t column)
{
    return dspark__f32_to_bf16((float)unit_value(2 * t->seed, row, column));
}

uint16_t test_target_head(const test_target *t, uint32_t row, uint32_t column)
{
    return dspark__f32_to_bf16((float)(unit_value(2 * t->seed + 1, row, column) / sqrt(t->hidden)));
}

uint16_t *test_target_matrix(const test_target *t, int head)
{
    uint16_t *m = malloc((size_t)t->vocab * t->hidden * 2);
    assert_non_null(m);
    for (uint32_t r = 0; r < t->vocab; r++)
        for (uint32_t c = 0; c < t->hidden; c++)
            m[(size_t)r * t->hidden + c] =
                head ? test_target_head(t, r, c) : test_target_embed(t, r, c);
    return m;
}

static void write_config(const char *dir, const test_target *t)
{
    char keys[300], tie[60] = "", text[500];
    if (t->config) {
        if (*t->config)
            tmpdir_write(tmpdir_path(dir, "config.json"), t->config, strlen(t->config));
        return;
    }
    if (t->tie) snprintf(tie, sizeof tie, ", \"tie_word_embeddings\": %s", t->tie);
    snprintf(keys, sizeof keys,
             "\"vocab_size\": %u, \"hidden_size\": %u, \"num_hidden_layers\": %u%s", t->vocab, t->hidden,
             t->n_layers, tie);
    /* A vision tower's width at the top must not be taken for the language model's. */
    snprintf(text, sizeof text,
             t->nested ? "{\"model_type\": \"target\", \"hidden_size\": 7, \"text_config\": {%s}}\n"
                       : "{\"model_type\": \"target\", %s}\n",
             keys);
    tmpdir_write(tmpdir_path(dir, "config.json"), text, strlen(text));
}

void test_target_write(const char *dir, const test_target *t)
{
    tensors all = {0};
    char name[128];
    for (int head = 0; head < 2; head++) {
        uint16_t *values;
        if (head ? t->no_head : t->no_embed) continue;
        values = test_target_matrix(t, head);
        snprintf(name, sizeof name, "%s%s.weight", head ? t->head_prefix : t->embed_prefix,
                 head ? "lm_head" : "embed_tokens");
        tensors_add2(&all, name, DSPARK_BF16, t->vocab, t->hidden, values);
        free(values);
    }
    tensors_add2(&all, "model.layers.0.mlp.gate.weight", DSPARK_BF16, 8, t->hidden, NULL);
    write_config(dir, t);
    tensors_open(&all, dir, t->n_files);
    tensors_clear(&all);
}

void test_copy_checkpoint(tensors *t, const char *from, const char *to)
{
    dspark_checkpoint *ckpt;
    dspark_error err;
    char text[16384];
    memset(t, 0, sizeof *t);
    check(dspark_checkpoint_open(&ckpt, from, &err), DSPARK_OK, &err);
    for (size_t i = 0; i < dspark_checkpoint_tensor_count(ckpt); i++) {
        const dspark_tensor *x = dspark_checkpoint_tensor(ckpt, i);
        tensors_add(t, x->name, x->dtype, x->rank, x->shape, x->data);
    }
    dspark_checkpoint_close(ckpt);
    if (!to) return;
    FILE *in = fopen(tmpdir_path(from, "config.json"), "rb");
    assert_non_null(in);
    size_t n = fread(text, 1, sizeof text, in);
    fclose(in);
    assert_true(n > 0 && n < sizeof text);
    tmpdir_write(tmpdir_path(to, "config.json"), text, n);
}
