/* The weights of the block forward and the heads. kv_b is cut into its two absorbed halves here: W_UK
 * transposed, W_UV as it lies, one shard a head in one block of memory, expanded to bf16 whatever its
 * scheme was. */
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/numfmt.h"
#include "base/status.h"
#include "model/model_fill.h"

/* Places of one layer, then those that exist once. */
enum {
    P_INPUT_NORM, P_Q_A_NORM, P_Q_B, P_KV_B, P_O, P_POST_NORM, P_GATE, P_UP, P_DOWN, P_PER_LAYER
};
enum {
    P_FINAL_NORM, P_MARKOV_W1, P_MARKOV_W2, P_MARKOV_MIX, P_CONFIDENCE, P_EMBED, P_LM_HEAD, P_ONCE
};

size_t dspark__block_places(const dspark_config *c)
{
    return (size_t)c->n_layers * P_PER_LAYER + P_ONCE;
}

size_t dspark__block_place(const dspark_config *c, dspark__target target, uint32_t index,
                           int32_t shard)
{
    const size_t layer = (size_t)index * P_PER_LAYER, once = (size_t)c->n_layers * P_PER_LAYER;
    switch (target) {
    case DSPARK__T_INPUT_NORM: return layer + P_INPUT_NORM;
    case DSPARK__T_Q_A_NORM: return layer + P_Q_A_NORM;
    case DSPARK__T_Q_B: return layer + P_Q_B;
    case DSPARK__T_KV_B: return layer + P_KV_B;
    case DSPARK__T_O: return layer + P_O;
    case DSPARK__T_POST_NORM: return layer + P_POST_NORM;
    case DSPARK__T_GATE_UP: return layer + (shard == 0 ? P_GATE : P_UP);
    case DSPARK__T_DOWN: return layer + P_DOWN;
    case DSPARK__T_FINAL_NORM: return once + P_FINAL_NORM;
    case DSPARK__T_MARKOV_W1: return once + P_MARKOV_W1;
    case DSPARK__T_MARKOV_W2: return once + P_MARKOV_W2;
    case DSPARK__T_MARKOV_GATE:
    case DSPARK__T_MARKOV_JOINT: return once + P_MARKOV_MIX;
    case DSPARK__T_CONFIDENCE: return once + P_CONFIDENCE;
    case DSPARK__T_EMBED: return once + P_EMBED;
    case DSPARK__T_LM_HEAD: return once + P_LM_HEAD;
    default: return SIZE_MAX; /* the context path's */
    }
}

uint32_t dspark__block_mix(const dspark_config *c, uint32_t *k)
{
    *k = c->hidden_size + c->markov_rank * (c->markov_type == DSPARK_MARKOV_RNN ? 2 : 1);
    if (c->markov_type == DSPARK_MARKOV_GATED) return c->markov_rank;
    return c->markov_type == DSPARK_MARKOV_RNN ? 3 * c->markov_rank : 0;
}

uint32_t dspark__block_confidence(const dspark_config *c)
{
    if (!c->confidence_head) return 0;
    return c->hidden_size + (c->confidence_with_markov ? c->markov_rank : 0);
}

uint64_t dspark__block_work(const dspark_config *c)
{
    const uint64_t h = c->hidden_size, heads = c->n_heads, p = c->qk_nope_head_dim;
    const uint64_t r = c->qk_rope_head_dim, v = c->v_head_dim;
    uint64_t layer = heads * (p + r) * c->q_lora_rank + heads * (p + v) * c->kv_lora_rank +
                     h * heads * v + 3 * h * c->intermediate_size;
    uint32_t mix_k, mix = dspark__block_mix(c, &mix_k);
    return (layer * c->n_layers + (uint64_t)c->vocab_size * (h + c->markov_rank) +
            (uint64_t)mix * mix_k + dspark__block_confidence(c)) * 2;
}

/* ---- vectors ---- */

static dspark_status fill_norms(dspark__filler *f, const dspark__module *modules, dspark_error *err)
{
    const dspark_config *c = &f->model->config;
    dspark__block_weights *b = &f->model->block;
    const size_t h = c->hidden_size, layers = c->n_layers;
    const dspark__module *once = modules + layers * P_PER_LAYER;
    uint32_t confidence = dspark__block_confidence(c);
    dspark_status st = DSPARK_OK;
    b->norms_bytes = (2 * layers * h + layers * c->q_lora_rank + h + confidence) * 2;
    b->norms = dspark__alloc(&f->model->allocator, b->norms_bytes, 64);
    if (!b->norms) return dspark__fail_nomem(err, "norm weights of the block", b->norms_bytes);
    b->input_norm = b->norms;
    b->post_norm = b->input_norm + layers * h;
    b->q_a_norm = b->post_norm + layers * h;
    b->final_norm = b->q_a_norm + layers * c->q_lora_rank;
    b->confidence = confidence ? b->final_norm + h : NULL;
    for (uint32_t l = 0; st == DSPARK_OK && l < layers; l++) {
        const dspark__module *m = modules + (size_t)l * P_PER_LAYER;
        st = dspark__fill_vector(f, m + P_INPUT_NORM, "weight", "input_layernorm", h,
                                 b->input_norm + l * h, err);
        if (st == DSPARK_OK)
            st = dspark__fill_vector(f, m + P_Q_A_NORM, "weight", "q_a_layernorm", c->q_lora_rank,
                                     b->q_a_norm + (size_t)l * c->q_lora_rank, err);
        if (st == DSPARK_OK)
            st = dspark__fill_vector(f, m + P_POST_NORM, "weight", "post_attention_layernorm", h,
                                     b->post_norm + l * h, err);
    }
    if (st == DSPARK_OK)
        st = dspark__fill_vector(f, once + P_FINAL_NORM, "weight", "final_norm", h, b->final_norm, err);
    if (st == DSPARK_OK && confidence)
        st = dspark__fill_dense(f, once + P_CONFIDENCE, "confidence_head.proj", 1, confidence,
                                b->confidence, err);
    if (st == DSPARK_OK && confidence && dspark__module_part(once + P_CONFIDENCE, "bias")) {
        uint16_t bias;
        st = dspark__fill_vector(f, once + P_CONFIDENCE, "bias", "confidence_head.proj.bias", 1, &bias,
                                 err);
        if (st == DSPARK_OK) b->confidence_bias = dspark__bf16_to_f32(bias);
    }
    return st;
}

/* ---- kv_b ---- */

/* One layer: dense [H * (P + V)][C] in bf16, of which each head has two shards. A file has them head by head. */
static dspark_status split_layer(dspark__filler *f, const dspark__module *module, uint32_t layer,
                                 uint16_t *dense, dspark_error *err)
{
    const dspark_config *c = &f->model->config;
    dspark__block_weights *b = &f->model->block;
    const uint32_t p = c->qk_nope_head_dim, v = c->v_head_dim, width = c->kv_lora_rank, heads = c->n_heads;
    const uint32_t at_once = f->packer || f->prepacked ? 1 : heads;
    dspark__dense k = {.w = dense, .step = (size_t)(p + v) * width, .stride = width, .turned = 1}, values = k;
    dspark_status st = DSPARK_OK;
    values.w += (size_t)p * width;
    values.turned = 0;
    if (!f->prepacked || f->digest) /* else nobody looks at the rows */
        st = dspark__fill_dense(f, module, "kv_b_proj", heads * (p + v), width, dense, err);
    for (uint32_t head = 0; st == DSPARK_OK && head < heads; head += at_once) {
        st = dspark__fill_own(f, &b->w_uk, layer * heads + head, at_once, &k, err);
        if (st == DSPARK_OK) st = dspark__fill_own(f, &b->w_uv, layer * heads + head, at_once, &values, err);
        k.w += at_once * k.step;
        values.w += at_once * values.step;
    }
    return st;
}

static dspark_status fill_kv_b(dspark__filler *f, const dspark__module *modules, dspark_error *err)
{
    dspark_model *m = f->model;
    const dspark_config *c = &m->config;
    const uint32_t p = c->qk_nope_head_dim, v = c->v_head_dim, width = c->kv_lora_rank;
    size_t dense_bytes;
    uint64_t shards;
    uint16_t *dense;
    dspark_status st;
    if (!dspark__mul_u64(c->n_layers, c->n_heads, &shards) || shards > UINT32_MAX ||
        !dspark__mul_size((size_t)c->n_heads * (p + v), (size_t)width * 2, &dense_bytes))
        return dspark__fail(err, DSPARK_EINVAL, "kv_b_proj", "%u layers of %u heads overflow memory",
                            c->n_layers, c->n_heads);
    st = dspark__merged_linear_init_even(&m->block.w_uk, "w_uk", p, (uint32_t)shards, width,
                                         &m->allocator, err);
    if (st == DSPARK_OK)
        st = dspark__merged_linear_init_even(&m->block.w_uv, "w_uv", width, (uint32_t)shards, v,
                                             &m->allocator, err);
    m->block.w_uk.narrow = m->block.w_uv.narrow = 1; /* a head has few rows: 128 are 48 + 48 + 32 */
    const int kept = !f->prepacked && !f->packer;
    if (st == DSPARK_OK && kept) st = dspark__merged_linear_reserve(&m->block.w_uk, err);
    if (st == DSPARK_OK && kept) st = dspark__merged_linear_reserve(&m->block.w_uv, err);
    if (st != DSPARK_OK) return st;
    dense = dspark__alloc(&m->allocator, dense_bytes, 64);
    if (!dense) st = dspark__fail_nomem(err, "kv_b_proj", dense_bytes);
    for (uint32_t l = 0; st == DSPARK_OK && l < c->n_layers; l++)
        st = split_layer(f, modules + (size_t)l * P_PER_LAYER + P_KV_B, l, dense, err);
    if (dense) dspark__free(&m->allocator, dense, dense_bytes);
    return st;
}

/* ---- the gate or rnn of the Markov head ---- */

/* Weight and bias as one matrix: x is given a last element of 1, so the bias joins the accumulator. */
static dspark_status fill_mix(dspark__filler *f, const dspark__module *module, uint32_t rows, uint32_t k,
                              dspark_error *err)
{
    dspark_model *m = f->model;
    size_t bytes = (size_t)rows * (k + 1) * 2, bias_bytes = (size_t)rows * 2;
    uint16_t *dense = dspark__alloc(&m->allocator, bytes, 64);
    uint16_t *bias = dspark__alloc(&m->allocator, bias_bytes, 64);
    dspark_status st = DSPARK_OK;
    if (!dense || !bias) st = dspark__fail_nomem(err, "markov_mix", bytes + bias_bytes);
    if (st == DSPARK_OK) st = dspark__fill_dense(f, module, "markov_mix", rows, k, dense, err);
    if (st == DSPARK_OK)
        st = dspark__fill_vector(f, module, "bias", "the Markov head's bias", rows, bias, err);
    if (st == DSPARK_OK)
        st = dspark__merged_linear_init_even(&m->block.markov_mix, "markov_mix", k + 1, 1, rows,
                                             &m->allocator, err);
    for (size_t r = rows; st == DSPARK_OK && r-- > 0;) { /* from the last row: the gaps grow behind it */
        memmove(dense + r * (k + 1), dense + r * k, (size_t)k * 2);
        dense[r * (k + 1) + k] = bias[r];
    }
    const dspark__dense one = {.w = dense, .stride = k + 1};
    if (st == DSPARK_OK) st = dspark__fill_own(f, &m->block.markov_mix, 0, 1, &one, err);
    if (dense) dspark__free(&m->allocator, dense, bytes);
    if (bias) dspark__free(&m->allocator, bias, bias_bytes);
    return st;
}

/* ---- all of it ---- */

/* The matrix of the Markov bias with the bounds of its rows. A packer, which keeps no weights otherwise, keeps this
 * one until it has the bounds. */
static dspark_status fill_w2(dspark__filler *f, const dspark__module *module, dspark_error *err)
{
    const dspark_config *c = &f->model->config;
    dspark__block_weights *b = &f->model->block;
    dspark__packer *packer = f->packer;
    f->packer = NULL;
    dspark_status st = dspark__fill_linear(f, &b->markov_w2, "markov_w2", c->markov_rank, 1, c->vocab_size, module,
                                           1, err);
    f->packer = packer;
    if (st == DSPARK_OK && packer) {
        dspark__shard_clear_gaps(&b->markov_w2, 0);
        st = dspark__packer_put_shard(packer, &b->markov_w2, 0, NULL, err);
    }
    if (st == DSPARK_OK && f->prepacked)
        st = dspark__prepacked_take_bound(f->prepacked, &b->markov_w2, &b->markov_bound, f->opts->prepacked_verify,
                                          err);
    if (st == DSPARK_OK && !b->markov_bound.panels)
        st = dspark__markov_bound_build(&b->markov_bound, &b->markov_w2, f->threads, &f->model->allocator, err);
    if (!packer) return st;
    if (st == DSPARK_OK && b->markov_bound.panels)
        st = dspark__packer_put_shard(packer, &b->markov_w2, 0, &b->markov_bound, err);
    dspark__markov_bound_free(&b->markov_bound);
    if (b->markov_w2.shards) dspark__shard_release(&b->markov_w2, 0);
    return st;
}

dspark_status dspark__block_fill(dspark__filler *f, const dspark__module *modules,
                                 dspark_error *err)
{
    const dspark_config *c = &f->model->config;
    dspark__block_weights *b = &f->model->block;
    const dspark__module *once = modules + (size_t)c->n_layers * P_PER_LAYER;
    const uint32_t h = c->hidden_size, layers = c->n_layers;
    const uint32_t q = c->n_heads * (c->qk_nope_head_dim + c->qk_rope_head_dim);
    uint32_t mix_k, mix = dspark__block_mix(c, &mix_k), l;
    dspark_status st = fill_norms(f, modules, err);
    if (st == DSPARK_OK) st = fill_kv_b(f, modules, err);
    if (st == DSPARK_OK)
        st = dspark__fill_linear(f, &b->q_b, "q_b", c->q_lora_rank, layers, q, modules + P_Q_B,
                                 P_PER_LAYER, err);
    if (st == DSPARK_OK)
        st = dspark__fill_linear(f, &b->o, "o", c->n_heads * c->v_head_dim, layers, h, modules + P_O,
                                 P_PER_LAYER, err);
    if (st == DSPARK_OK)
        st = dspark__fill_linear(f, &b->down, "down", c->intermediate_size, layers, h, modules + P_DOWN,
                                 P_PER_LAYER, err);
    if (st == DSPARK_OK)
        st = dspark__merged_linear_init_even(&b->gate_up, "gate_up", h, 2 * layers, c->intermediate_size,
                                             &f->model->allocator, err);
    for (l = 0; st == DSPARK_OK && l < 2 * layers; l++)
        st = dspark__fill_shard(f, &b->gate_up, l,
                                modules + (size_t)(l / 2) * P_PER_LAYER + (l % 2 ? P_UP : P_GATE), err);
    if (st == DSPARK_OK) st = dspark__merged_linear_complete(&b->gate_up, err);
    if (st == DSPARK_OK && c->markov_type != DSPARK_MARKOV_NONE) {
        st = fill_w2(f, once + P_MARKOV_W2, err);
        if (st == DSPARK_OK)
            st = dspark__fill_table(f, once + P_MARKOV_W1, "markov_head.markov_w1", c->vocab_size,
                                    c->markov_rank, &b->markov_w1, err);
    }
    if (st == DSPARK_OK && mix) st = fill_mix(f, once + P_MARKOV_MIX, mix, mix_k, err);
    b->softmax_scale = (float)dspark__rope_softmax_scale(c);
    return st;
}

void dspark__block_free(dspark_model *m)
{
    dspark__block_weights *b = &m->block;
    dspark__merged_linear *all[] = {&b->q_b, &b->w_uk, &b->w_uv, &b->o, &b->gate_up, &b->down,
                                    &b->lm_head, &b->markov_w2, &b->markov_mix};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) dspark__merged_linear_free(all[i]);
    dspark__markov_bound_free(&b->markov_bound);
    if (b->norms) dspark__free(&m->allocator, b->norms, b->norms_bytes);
    dspark__checkpoint_close(b->target);
    memset(b, 0, sizeof *b);
}

uint64_t dspark__block_bytes(const dspark_model *m)
{
    const dspark__block_weights *b = &m->block;
    return b->q_b.bytes + b->w_uk.bytes + b->w_uv.bytes + b->o.bytes + b->gate_up.bytes +
           b->down.bytes + b->lm_head.bytes + b->markov_w2.bytes + b->markov_bound.bytes +
           b->markov_mix.bytes + b->norms_bytes;
}
