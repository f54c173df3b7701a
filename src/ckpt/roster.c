/* The list of tensors that a config demands: names, shapes, order. One function a part of the
 * model. The comparison with a file is roster_check.c's. */
#include "ckpt/roster.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"

#define ENTRIES_PER_LAYER 12
#define ENTRIES_ELSEWHERE 11 /* embed, proj, norm, final, w1, w2, 2 gate or joint, 2 confidence */

enum {
    OPTIONAL = 1,
    CONTEXT = 2,
    MEASURED = 4, /* q_a, kept in a context-only file */
    LOOKUP = 8    /* a table: rows are taken, nothing is multiplied */
};

typedef struct list {
    dspark__roster_entry *entries;
    size_t n;
    int context_only;
} list;

static void add(list *l, int flags, const char *name, uint64_t rows, uint64_t cols)
{
    dspark__roster_entry *e = &l->entries[l->n];

    if (l->context_only && !(flags & (CONTEXT | MEASURED))) return;
    memset(e, 0, sizeof *e);
    snprintf(e->name, sizeof e->name, "%s", name);
    e->rank = cols ? 2 : 1;
    e->shape[0] = rows;
    e->shape[1] = cols ? cols : 1;
    e->optional = (flags & OPTIONAL) != 0;
    e->context = (flags & CONTEXT) != 0;
    e->linear = e->rank == 2 && !(flags & LOOKUP);
    l->n++;
}

static void add_at(list *l, int flags, const char *format, uint32_t index, uint64_t rows,
                   uint64_t cols)
{
    char name[96];

    snprintf(name, sizeof name, format, index);
    add(l, flags, name, rows, cols);
}

static void add_layer(list *l, const dspark_config *c, uint32_t i)
{
    const uint64_t h = c->hidden_size, f = c->intermediate_size, heads = c->n_heads;
    const uint64_t p = c->qk_nope_head_dim, r = c->qk_rope_head_dim, v = c->v_head_dim;

    add_at(l, 0, "layers.%u.input_layernorm.weight", i, h, 0);
    add_at(l, MEASURED, "layers.%u.self_attn.q_a_proj.weight", i, c->q_lora_rank, h);
    add_at(l, 0, "layers.%u.self_attn.q_a_layernorm.weight", i, c->q_lora_rank, 0);
    add_at(l, 0, "layers.%u.self_attn.q_b_proj.weight", i, heads * (p + r), c->q_lora_rank);
    add_at(l, CONTEXT, "layers.%u.self_attn.kv_a_proj_with_mqa.weight", i, c->kv_lora_rank + r, h);
    add_at(l, CONTEXT, "layers.%u.self_attn.kv_a_layernorm.weight", i, c->kv_lora_rank, 0);
    add_at(l, 0, "layers.%u.self_attn.kv_b_proj.weight", i, heads * (p + v), c->kv_lora_rank);
    add_at(l, 0, "layers.%u.self_attn.o_proj.weight", i, h, heads * v);
    add_at(l, 0, "layers.%u.post_attention_layernorm.weight", i, h, 0);
    add_at(l, 0, "layers.%u.mlp.gate_proj.weight", i, f, h);
    add_at(l, 0, "layers.%u.mlp.up_proj.weight", i, f, h);
    add_at(l, 0, "layers.%u.mlp.down_proj.weight", i, h, f);
}

static void add_heads(list *l, const dspark_config *c)
{
    const uint64_t h = c->hidden_size, r = c->markov_rank;

    add(l, LOOKUP, "markov_head.markov_w1.weight", c->vocab_size, r);
    add(l, 0, "markov_head.markov_w2.weight", c->vocab_size, r);
    if (c->markov_type == DSPARK_MARKOV_GATED) {
        add(l, 0, "markov_head.gate_proj.weight", r, h + r);
        add(l, 0, "markov_head.gate_proj.bias", r, 0);
    } else if (c->markov_type == DSPARK_MARKOV_RNN) {
        add(l, 0, "markov_head.joint_proj.weight", 3 * r, 2 * r + h);
        add(l, 0, "markov_head.joint_proj.bias", 3 * r, 0);
    }
    if (!c->confidence_head) return;
    add(l, 0, "confidence_head.proj.weight", 1, h + (c->confidence_with_markov ? r : 0));
    add(l, OPTIONAL, "confidence_head.proj.bias", 1, 0);
}

dspark_status dspark__roster_make(dspark__roster_entry **out, size_t *n, const dspark_config *c,
                                  int context_only, dspark_error *err)
{
    list l = {NULL, 0, context_only};
    size_t most = (size_t)ENTRIES_PER_LAYER * c->n_layers + c->n_taps + ENTRIES_ELSEWHERE;

    *out = NULL;
    *n = 0;
    l.entries = malloc(most * sizeof *l.entries);
    if (!l.entries) return dspark__fail_nomem(err, "roster", most * sizeof *l.entries);
    add(&l, OPTIONAL | LOOKUP, "embed_tokens.weight", c->vocab_size, c->hidden_size);
    for (uint32_t t = 0; c->fc_norm && t < c->n_taps; t++)
        add_at(&l, CONTEXT, "fc_norm.%u.weight", t, c->tap_width, 0);
    add(&l, CONTEXT, "context_proj.weight", c->hidden_size, (uint64_t)c->n_taps * c->tap_width);
    add(&l, CONTEXT, "context_norm.weight", c->hidden_size, 0);
    for (uint32_t i = 0; i < c->n_layers; i++) add_layer(&l, c, i);
    add(&l, 0, "final_norm.weight", c->hidden_size, 0);
    add_heads(&l, c);
    *out = l.entries;
    *n = l.n;
    return DSPARK_OK;
}

uint64_t dspark__roster_parameters(const dspark__roster_entry *r, size_t n)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < n; i++) {
        uint64_t elements;
        /* config_check bounds every product; a made-up roster saturates */
        if (!dspark__mul_u64(r[i].shape[0], r[i].rank == 2 ? r[i].shape[1] : 1, &elements) ||
            !dspark__add_u64(sum, elements, &sum))
            return UINT64_MAX;
    }
    return sum;
}
