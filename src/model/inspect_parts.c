/* Sections of the inspection document: config, tensors, memory plan. Builds JSON from what is
 * known; judges nothing. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/threads.h"
#include "base/utf8.h"
#include "ckpt/dtype.h"
#include "ckpt/names.h"
#include "ckpt/roster.h"
#include "model/inspect.h"
#include "model/latent_cache.h"
#include "model/merged_linear.h"
#include "model/model_fill.h"
#include "model/plan.h"

/* ---- small tools ----------------------------------------------------------------------------- */

void dspark__inspect_put(int *oom, json_t *object, const char *key, json_t *value)
{
    if (!value || json_object_set_new(object, key, value) != 0) *oom = 1;
}

void dspark__inspect_append(int *oom, json_t *array, json_t *value)
{
    if (!value || json_array_append_new(array, value) != 0) *oom = 1;
}

json_t *dspark__inspect_text(const char *s)
{
    size_t n;
    char *copy;
    json_t *out;

    if (!s) return json_null();
    n = strlen(s);
    copy = malloc(n + 1);
    if (!copy) return NULL;
    memcpy(copy, s, n + 1);
    for (size_t i = 0; i < n;) {
        size_t length = dspark__utf8_length(copy + i, n - i);
        if (length == 0) copy[i] = '?';
        i += length ? length : 1;
    }
    out = json_stringn_nocheck(copy, n);
    free(copy);
    return out;
}

json_t *dspark__inspect_u64(uint64_t v)
{
    return v <= INT64_MAX ? json_integer((json_int_t)v) : json_real((double)v);
}

/* A float with as few digits as name it: 1e-05, not 9.99999974737875e-06. */
static json_t *short_real(float f)
{
    char text[40];

    for (int digits = 1; digits <= 9; digits++) {
        double d;
        snprintf(text, sizeof text, "%.*g", digits, (double)f);
        d = strtod(text, NULL);
        if ((float)d == f) return json_real(d);
    }
    return json_real((double)f);
}

json_t *dspark__inspect_real(double v)
{
    return fabs(v) <= FLT_MAX && (double)(float)v == v ? short_real((float)v) : json_real(v);
}

/* ---- config ---------------------------------------------------------------------------------- */

static json_t *rope_section(const dspark_config *c, int *oom)
{
    json_t *o = json_object();
    int yarn = c->rope_type == DSPARK_ROPE_YARN;

    dspark__inspect_put(oom, o, "rope_type", json_string(yarn ? "yarn" : "default"));
    dspark__inspect_put(oom, o, "rope_theta", json_real(c->rope_theta));
    if (!yarn) return o;
    dspark__inspect_put(oom, o, "factor", json_real(c->rope_factor));
    dspark__inspect_put(oom, o, "original_max_position_embeddings",
                        dspark__inspect_u64(c->rope_original_max_positions));
    dspark__inspect_put(oom, o, "beta_fast", json_real(c->rope_beta_fast));
    dspark__inspect_put(oom, o, "beta_slow", json_real(c->rope_beta_slow));
    dspark__inspect_put(oom, o, "mscale", json_real(c->rope_mscale));
    dspark__inspect_put(oom, o, "mscale_all_dim", json_real(c->rope_mscale_all_dim));
    dspark__inspect_put(oom, o, "extrapolation_factor", json_real(c->rope_extrapolation_factor));
    dspark__inspect_put(oom, o, "attn_factor", json_real(c->rope_attn_factor));
    return o;
}

json_t *dspark__inspect_config(const dspark__config_doc *doc)
{
    static const char *const markov[] = {"none", "vanilla", "gated", "rnn"};
    const dspark_config *c = &doc->config;
    const struct {
        const char *key;
        uint64_t value;
    } numbers[] = {
        {"hidden_size", c->hidden_size},
        {"intermediate_size", c->intermediate_size},
        {"num_hidden_layers", c->n_layers},
        {"num_attention_heads", c->n_heads},
        {"q_lora_rank", c->q_lora_rank},
        {"kv_lora_rank", c->kv_lora_rank},
        {"qk_nope_head_dim", c->qk_nope_head_dim},
        {"qk_rope_head_dim", c->qk_rope_head_dim},
        {"v_head_dim", c->v_head_dim},
        {"vocab_size", c->vocab_size},
        {"num_target_layers", c->n_taps},
        {"target_hidden_size", c->tap_width},
        {"block_size", c->block_size},
        {"markov_rank", c->markov_rank},
        {"mask_token_id", c->mask_token_id},
        {"max_position_embeddings", c->max_positions},
    };
    int oom = 0;
    json_t *o = json_object(), *taps = json_array();

    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        dspark__inspect_put(&oom, o, numbers[i].key, dspark__inspect_u64(numbers[i].value));
    dspark__inspect_put(&oom, o, "target_num_hidden_layers",
                        c->target_n_layers ? dspark__inspect_u64(c->target_n_layers) : json_null());
    for (uint32_t t = 0; t < c->n_taps; t++)
        dspark__inspect_append(&oom, taps, json_integer(c->tap_layers[t]));
    dspark__inspect_put(&oom, o, "target_layer_ids", taps);
    dspark__inspect_put(&oom, o, "aux_hidden_stream", dspark__inspect_text(doc->aux_hidden_stream));
    dspark__inspect_put(&oom, o, "markov_head_type", json_string(markov[c->markov_type]));
    dspark__inspect_put(&oom, o, "fc_norm", json_boolean(c->fc_norm));
    dspark__inspect_put(&oom, o, "is_causal", json_boolean(c->causal));
    dspark__inspect_put(&oom, o, "enable_confidence_head", json_boolean(c->confidence_head));
    dspark__inspect_put(&oom, o, "confidence_head_with_markov",
                        json_boolean(c->confidence_with_markov));
    dspark__inspect_put(&oom, o, "rms_norm_eps", short_real(c->rms_norm_eps));
    dspark__inspect_put(&oom, o, "logit_scale", short_real(c->logit_scale));
    dspark__inspect_put(&oom, o, "rope", rope_section(c, &oom));
    dspark__inspect_put(&oom, o, "context_only", json_boolean(doc->context_only));
    if (!oom) return o;
    json_decref(o);
    return NULL;
}

/* ---- tensors --------------------------------------------------------------------------------- */

static void put_place(const dspark_tensor *t, const dspark_config *config, json_t *o, int *oom)
{
    dspark__arrival a[2];
    size_t n = config ? dspark__names_map(t->name, config, a) : 0;
    json_t *shared;

    dspark__inspect_put(oom, o, "target",
                        n ? json_string(dspark__target_name(a[0].target)) : json_null());
    dspark__inspect_put(oom, o, "index", n ? json_integer(a[0].index) : json_null());
    dspark__inspect_put(oom, o, "shard",
                        n && a[0].shard >= 0 ? json_integer(a[0].shard) : json_null());
    if (n < 2) {
        dspark__inspect_put(oom, o, "shared_with", json_null());
        return;
    }
    shared = json_object();
    dspark__inspect_put(oom, shared, "target", json_string(dspark__target_name(a[1].target)));
    dspark__inspect_put(oom, shared, "shard", json_integer(a[1].shard));
    dspark__inspect_put(oom, o, "shared_with", shared);
}

json_t *dspark__inspect_tensors(const dspark_checkpoint *ckpt, const dspark__modules *modules,
                                const dspark__quant_module *const *linear_of,
                                const dspark_config *config)
{
    size_t count = dspark__checkpoint_count(ckpt);
    json_t *list = json_array();
    int oom = 0;

    for (size_t i = 0; i < count && !oom; i++) {
        const dspark_tensor *t = dspark__checkpoint_at(ckpt, i);
        const dspark__file_module *m = dspark__modules_of(modules, i);
        const char *scheme = dspark__inspect_scheme(m, linear_of[modules->of_tensor[i]]);
        json_t *o = json_object(), *shape = json_array();

        dspark__inspect_put(&oom, o, "name", dspark__inspect_text(t->name));
        dspark__inspect_put(&oom, o, "dtype", json_string(dspark__dtype_name(t->dtype)));
        for (uint32_t d = 0; d < t->rank; d++)
            dspark__inspect_append(&oom, shape, dspark__inspect_u64(t->shape[d]));
        dspark__inspect_put(&oom, o, "shape", shape);
        dspark__inspect_put(&oom, o, "bytes", dspark__inspect_u64(t->n_bytes));
        dspark__inspect_put(&oom, o, "file", dspark__inspect_text(t->file));
        dspark__inspect_put(&oom, o, "scheme", dspark__inspect_text(scheme));
        put_place(t, config, o, &oom);
        dspark__inspect_append(&oom, list, o);
    }
    if (!oom) return list;
    json_decref(list);
    return NULL;
}

/* Square matrices are the ones whose transposition no shape can betray. */
json_t *dspark__inspect_square(const dspark_checkpoint *ckpt, const dspark_config *config)
{
    size_t count = dspark__checkpoint_count(ckpt), n = 0;
    const dspark_tensor *first = NULL;
    char text[400];

    for (size_t i = 0; i < count; i++) {
        const dspark_tensor *t = dspark__checkpoint_at(ckpt, i);
        dspark__arrival a[2];
        if (t->rank != 2 || t->shape[0] != t->shape[1] || t->shape[0] < 2) continue;
        if (!dspark__names_map(t->name, config, a) || strcmp(a[0].suffix, "weight") != 0) continue;
        if (n++ == 0) first = t;
    }
    if (!first) return json_null();
    snprintf(text, sizeof text,
             "%zu weight%s as tall as wide (first: %.160s, [%llu, %llu]): no shape can tell "
             "whether such a weight was stored transposed",
             n, n == 1 ? " is" : "s are", first->name, (unsigned long long)first->shape[0],
             (unsigned long long)first->shape[1]);
    return dspark__inspect_text(text);
}

/* ---- plan ------------------------------------------------------------------------------------ */

/* Bytes of a linear: in the file, and packed in memory. Without a known scheme: as bf16. */
static void add_linear(const dspark__quant_modules *linears, const char *name, uint64_t rows,
                       uint64_t k, uint64_t *file, uint64_t *packed)
{
    const dspark__quant_module *m = linears ? dspark__quant_modules_find(linears, name) : NULL;
    if (!m || !m->scheme) {
        *file += rows * k * 2;
        *packed += dspark__packing_bytes(&dspark__packing_bf16, rows, k);
        return;
    }
    for (uint32_t i = 0; i < m->module.n_parts; i++) *file += m->module.parts[i].tensor->n_bytes;
    *packed += dspark__packing_bytes(&m->packing, rows, k);
}

/* Bounds of the Markov bias, which a drafter keeps beside W2. */
static uint64_t bound_bytes(const dspark__quant_modules *linears, const char *name, uint64_t rows,
                            uint64_t k)
{
    const dspark__quant_module *m = linears ? dspark__quant_modules_find(linears, name) : NULL;
    const dspark__packing *packing = m && m->scheme ? &m->packing : &dspark__packing_bf16;
    return dspark__markov_bound_bytes(packing, rows, k);
}

static uint64_t bf16_bytes(uint64_t rows, uint64_t k)
{
    return dspark__packing_bytes(&dspark__packing_bf16, rows, k);
}

static uint64_t head_bytes(uint64_t rows, uint64_t k)
{
    return dspark__packing_bytes(&dspark__packing_narrow, rows, k);
}

/* Layers and heads as model_block.c keeps them: kv_b in its two halves, biases inside a matrix. The
 * tables are looked up in the files and take no memory of their own. */
static void add_block(const dspark_config *c, const dspark__quant_modules *linears, uint64_t *file,
                      uint64_t *packed)
{
    const uint64_t h = c->hidden_size, heads = c->n_heads, layers = c->n_layers;
    const uint64_t p = c->qk_nope_head_dim, v = c->v_head_dim, width = c->kv_lora_rank;
    const struct {
        const char *name;
        uint64_t rows, k;
    } linear[] = {{"self_attn.q_b_proj", heads * (p + c->qk_rope_head_dim), c->q_lora_rank},
                  {"self_attn.o_proj", h, heads * v},
                  {"mlp.gate_proj", c->intermediate_size, h},
                  {"mlp.up_proj", c->intermediate_size, h},
                  {"mlp.down_proj", h, c->intermediate_size}};
    const uint64_t norms = (2 * layers * h + layers * c->q_lora_rank + h) * 2;
    const uint32_t confidence = dspark__block_confidence(c);
    uint32_t mix_k, mix = dspark__block_mix(c, &mix_k);
    uint64_t unused = 0;
    char name[64];

    for (uint32_t l = 0; l < c->n_layers; l++) {
        for (size_t i = 0; i < sizeof linear / sizeof *linear; i++) {
            snprintf(name, sizeof name, "layers.%u.%s", l, linear[i].name);
            add_linear(linears, name, linear[i].rows, linear[i].k, file, packed);
        }
        snprintf(name, sizeof name, "layers.%u.self_attn.kv_b_proj", l);
        add_linear(linears, name, heads * (p + v), width, file, &unused);
    }
    *packed += layers * heads * (head_bytes(width, p) + head_bytes(v, width));
    add_linear(linears, "markov_head.markov_w2", c->vocab_size, c->markov_rank, file, packed);
    *packed += bound_bytes(linears, "markov_head.markov_w2", c->vocab_size, c->markov_rank);
    if (mix) {
        add_linear(linears, c->markov_type == DSPARK_MARKOV_RNN ? "markov_head.joint_proj"
                                                                : "markov_head.gate_proj",
                   mix, mix_k, file, &unused);
        *packed += bf16_bytes(mix, (uint64_t)mix_k + 1);
    }
    if (confidence) add_linear(linears, "confidence_head.proj", 1, confidence, file, &unused);
    *packed += norms + (uint64_t)confidence * 2;
    *file += norms;
}

/* A checkpoint that was cut down to context KV has no block. */
static json_t *known_bytes(const dspark__config_doc *doc, uint64_t bytes)
{
    return doc->context_only ? json_null() : dspark__inspect_u64(bytes);
}

static void put_bytes(const dspark__config_doc *doc, const dspark__quant_modules *linears, json_t *plan,
                      int *oom)
{
    const dspark_config *c = &doc->config;
    const uint64_t h = c->hidden_size, taps = (uint64_t)c->n_taps * c->tap_width;
    const uint32_t width = c->kv_lora_rank + c->qk_rope_head_dim;
    const uint64_t norms =
        ((c->fc_norm ? taps : 0) + h + (uint64_t)c->n_layers * c->kv_lora_rank) * 2;
    uint64_t proj = 0, kv_a = 0, q_a = 0, packed_proj = 0, packed_kv = 0, packed_q = 0;
    uint64_t block = 0, packed_block = 0, head = 0, packed_head = 0;
    json_t *read = json_object(), *resident = json_object();
    char name[64];

    add_linear(linears, "context_proj", h, taps, &proj, &packed_proj);
    for (uint32_t l = 0; l < c->n_layers; l++) {
        snprintf(name, sizeof name, "layers.%u.self_attn.kv_a_proj_with_mqa", l);
        add_linear(linears, name, width, h, &kv_a, &packed_kv);
        snprintf(name, sizeof name, "layers.%u.self_attn.q_a_proj", l);
        add_linear(linears, name, c->q_lora_rank, h, &q_a, &packed_q);
    }
    dspark__inspect_put(oom, read, "context_proj", dspark__inspect_u64(proj));
    dspark__inspect_put(oom, read, "kv_a", dspark__inspect_u64(kv_a));
    dspark__inspect_put(oom, read, "norms", dspark__inspect_u64(norms));
    dspark__inspect_put(oom, read, "total", dspark__inspect_u64(proj + kv_a + norms));
    dspark__inspect_put(oom, read, "q_a", dspark__inspect_u64(q_a));
    if (!doc->context_only) add_block(c, linears, &block, &packed_block);
    add_linear(linears, "lm_head", c->vocab_size, h, &head, &packed_head);
    dspark__inspect_put(oom, read, "block", known_bytes(doc, block));
    dspark__inspect_put(oom, read, "lm_head", known_bytes(doc, head));
    dspark__inspect_put(oom, plan, "read_bytes", read);
    dspark__inspect_put(oom, resident, "context_proj", dspark__inspect_u64(packed_proj));
    dspark__inspect_put(oom, resident, "context_kv", dspark__inspect_u64(packed_kv));
    dspark__inspect_put(oom, resident, "norms", dspark__inspect_u64(norms));
    dspark__inspect_put(oom, resident, "total",
                        dspark__inspect_u64(packed_proj + packed_kv + norms));
    dspark__inspect_put(oom, resident, "q_a", dspark__inspect_u64(packed_q));
    dspark__inspect_put(oom, resident, "block", known_bytes(doc, packed_block));
    dspark__inspect_put(oom, resident, "lm_head", known_bytes(doc, packed_head));
    dspark__inspect_put(oom, plan, "resident_bytes", resident);
}

/* What each linear is, and what the merged one over all layers is made of. */
json_t *dspark__inspect_linears(const dspark__quant_modules *linears)
{
    json_t *list = json_array();
    int oom = list == NULL;

    for (size_t i = 0; i < linears->n && !oom; i++) {
        const dspark__quant_module *m = &linears->list[i];
        uint64_t file = 0, packed = 0;
        json_t *o;
        if (!m->scheme) continue;
        add_linear(linears, m->name, m->rows, m->k, &file, &packed);
        o = json_object();
        dspark__inspect_put(&oom, o, "name", dspark__inspect_text(m->name));
        dspark__inspect_put(&oom, o, "scheme", dspark__inspect_text(m->scheme->name));
        dspark__inspect_put(&oom, o, "text", dspark__inspect_text(m->scheme->text));
        dspark__inspect_put(&oom, o, "rows", dspark__inspect_u64(m->rows));
        dspark__inspect_put(&oom, o, "k", dspark__inspect_u64(m->k));
        dspark__inspect_put(&oom, o, "file_bytes", dspark__inspect_u64(file));
        dspark__inspect_put(&oom, o, "packed_bytes", dspark__inspect_u64(packed));
        dspark__inspect_append(&oom, list, o);
    }
    if (!oom) return list;
    json_decref(list);
    return NULL;
}

static void put_workspace(const dspark_config *c, json_t *plan, int *oom)
{
    uint32_t threads[2] = {1, dspark__threads_available()};
    json_t *list = json_array();

    for (int i = 0; i < 2; i++) {
        dspark_context_opts opts;
        dspark__layout layout;
        json_t *o;

        if (i && threads[1] == 1) break;
        memset(&opts, 0, sizeof opts);
        opts.struct_size = sizeof opts;
        opts.n_threads = threads[i];
        if (dspark__plan_context(c, &opts, &layout, NULL) != DSPARK_OK) continue;
        o = json_object();
        dspark__inspect_put(oom, o, "n_threads", dspark__inspect_u64(layout.n_threads));
        dspark__inspect_put(oom, o, "max_tokens", dspark__inspect_u64(layout.max_tokens));
        dspark__inspect_put(oom, o, "bytes", dspark__inspect_u64(layout.total));
        dspark__inspect_append(oom, list, o);
    }
    dspark__inspect_put(oom, plan, "workspace", list);
}

json_t *dspark__inspect_plan(const dspark__config_doc *doc, const dspark__quant_modules *linears)
{
    const dspark_config *c = &doc->config;
    json_t *plan = json_object(), *cache = json_object();
    int oom = 0;

    dspark__inspect_put(&oom, plan, "entry_width",
                        json_integer(c->kv_lora_rank + c->qk_rope_head_dim));
    put_bytes(doc, linears, plan, &oom);
    for (int d = DSPARK_CACHE_BF16; d <= DSPARK_CACHE_FP8_DS_MLA; d++) {
        size_t entry =
            dspark__cache_entry_bytes((dspark_cache_dtype)d, c->kv_lora_rank, c->qk_rope_head_dim);
        dspark__inspect_put(&oom, cache, dspark__cache_dtype_name((dspark_cache_dtype)d),
                            entry ? dspark__inspect_u64((uint64_t)entry * c->n_layers)
                                  : json_null());
    }
    dspark__inspect_put(&oom, plan, "cache_bytes_per_token", cache);
    put_workspace(c, plan, &oom);
    if (!oom) return plan;
    json_decref(plan);
    return NULL;
}
