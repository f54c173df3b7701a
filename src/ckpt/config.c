/* Parsing of config.json: the keys of the model itself, the refusals by name, causality, block
 * size. The rotary keys are in config_rope.c, the reading of the file in config_file.c. */
#include "ckpt/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/config_value.h"
#include "ckpt/json.h"

#define CONFIG_MAX_DEPTH 32u

void dspark__config_free(dspark__config_doc *doc)
{
    if (!doc) return;
    for (size_t i = 0; i < doc->n_notes; i++) free(doc->notes[i]);
    free(doc->notes);
    free(doc->quant_method);
    free(doc);
}

/* ---- what kind of config this is ------------------------------------------------------------- */

static dspark_status read_identity(const dspark__cfg *g)
{
    const char *type = NULL;
    const json_t *list = NULL;
    dspark_status st;

    if (dspark__cfg_get(g, "text_config"))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "text_config",
                                "the model's keys are nested here; a K3 drafter's config is flat");
    if (dspark__cfg_get(g, "speculators_model_type"))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "speculators_model_type",
                                "this is the speculators format, not a K3 drafter's own config");
    if ((st = dspark__cfg_string(g, "model_type", &type)) != DSPARK_OK) return st;
    if (type && strcmp(type, "k3_dspark"))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "model_type",
                                "\"%.60s\" is not served; the K3 MLA drafter is k3_dspark", type);
    if (!type && (st = dspark__cfg_note(g, "model_type absent: k3_dspark")) != DSPARK_OK) return st;
    if ((st = dspark__cfg_array(g, "architectures", &list)) != DSPARK_OK) return st;
    if (!list) return dspark__cfg_note(g, "architectures absent: K3DSparkModel");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_string(v))
            return dspark__cfg_fail(g, DSPARK_EFORMAT, "architectures", "entry %zu is not a string",
                                    i);
        if (strcmp(json_string_value(v), "K3DSparkModel") &&
            strcmp(json_string_value(v), "K3DSparkForCausalLM"))
            return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "architectures",
                                    "\"%.60s\" is not served; the K3 MLA drafter is K3DSparkModel",
                                    json_string_value(v));
    }
    return DSPARK_OK;
}

/* Switches whose other value is other mathematics, with the value that is served. */
static dspark_status refuse_switches(const dspark__cfg *g)
{
    static const struct {
        const char *key;
        int served;
        const char *why;
    } rows[] = {
        {"mla_use_nope", 0, "true: rope dims stay unrotated (NeMo's training form); not served"},
        {"mla_use_output_gate", 0, "true: a gate on the attention output is not served"},
        {"mla_use_qk_norm", 0, "true: norms on q and k are not served"},
        {"dspark_bonus_anchor", 0, "true: the 1+N block layout is not served"},
        {"sample_from_anchor", 1, "false: the 1+N block layout is not served"},
        {"attention_bias", 0, "true: biases in attention are not served"},
        {"mlp_bias", 0, "true: biases in the MLP are not served"},
    };

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int value = rows[i].served;
        dspark_status st = dspark__cfg_bool(g, rows[i].key, &value, NULL);
        if (st != DSPARK_OK) return st;
        if (value != rows[i].served)
            return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, rows[i].key, "%s", rows[i].why);
    }
    return DSPARK_OK;
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static dspark_status read_sizes(const dspark__cfg *g)
{
    dspark_config *c = &g->doc->config;
    const struct {
        const char *key;
        uint32_t min, max;
        uint32_t *out;
    } rows[] = {
        {"hidden_size", 2, DSPARK__MAX_WIDTH, &c->hidden_size},
        {"intermediate_size", 2, DSPARK__MAX_INTERMEDIATE, &c->intermediate_size},
        {"num_hidden_layers", 1, DSPARK_MAX_LAYERS, &c->n_layers},
        {"num_attention_heads", 1, DSPARK__MAX_HEADS, &c->n_heads},
        {"q_lora_rank", 1, DSPARK__MAX_WIDTH, &c->q_lora_rank},
        {"kv_lora_rank", 1, DSPARK__MAX_WIDTH, &c->kv_lora_rank},
        {"qk_nope_head_dim", 1, DSPARK__MAX_HEAD_DIM, &c->qk_nope_head_dim},
        {"qk_rope_head_dim", 2, DSPARK__MAX_ROPE_DIM, &c->qk_rope_head_dim},
        {"v_head_dim", 1, DSPARK__MAX_HEAD_DIM, &c->v_head_dim},
        {"vocab_size", 1, DSPARK__MAX_VOCAB, &c->vocab_size},
    };
    const json_t *q_lora = json_object_get(g->object, "q_lora_rank");
    int64_t positions = 0;
    uint32_t kv_heads = 0, draft_vocab = 0;
    double eps = 0.0, scale = 1.0;
    int there = 0;
    dspark_status st;

    if (q_lora && json_is_null(q_lora))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "q_lora_rank",
                                "null: a query projection without a rank is not served");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        st = dspark__cfg_need_u32(g, rows[i].key, rows[i].min, rows[i].max, rows[i].out);
        if (st != DSPARK_OK) return st;
    }
    st = dspark__cfg_u32(g, "num_key_value_heads", 1, DSPARK__MAX_HEADS, &kv_heads, &there);
    if (st != DSPARK_OK) return st;
    if (there && kv_heads != c->n_heads)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "num_key_value_heads",
                                "%u, and num_attention_heads is %u; MLA has no grouped heads",
                                kv_heads, c->n_heads);
    st = dspark__cfg_u32(g, "draft_vocab_size", 1, DSPARK__MAX_VOCAB, &draft_vocab, &there);
    if (st != DSPARK_OK) return st;
    if (there && draft_vocab != c->vocab_size)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "draft_vocab_size",
                                "%u, and vocab_size is %u: a d2t map would be needed, which is not "
                                "served",
                                draft_vocab, c->vocab_size);
    if (!there) {
        st = dspark__cfg_note(g, "draft_vocab_size absent: vocab_size %u", c->vocab_size);
        if (st != DSPARK_OK) return st;
    }
    st = dspark__cfg_int(g, "max_position_embeddings", 1, (int64_t)DSPARK__MAX_POSITIONS,
                         &positions, &there);
    if (st != DSPARK_OK) return st;
    if (!there)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "max_position_embeddings",
                                "the key is missing, and it has no default");
    c->max_positions = (uint64_t)positions;
    st = dspark__cfg_real(g, "rms_norm_eps", 0x1p-126, 1.0, &eps, &there);
    if (st != DSPARK_OK) return st;
    if (!there)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "rms_norm_eps",
                                "the key is missing, and it has no default");
    c->rms_norm_eps = (float)eps;
    st = dspark__cfg_real(g, "logit_scale", -1e6, 1e6, &scale, NULL);
    if (st != DSPARK_OK) return st;
    c->logit_scale = (float)scale;
    return DSPARK_OK;
}

/* ---- the target and its taps ----------------------------------------------------------------- */

/* dflash_config may repeat a top-level list; it must then say the same. */
static dspark_status compare_dflash(const dspark__cfg *g, const json_t *dflash)
{
    static const char *const keys[] = {"target_layer_ids", "mask_token_id"};

    for (size_t i = 0; dflash && i < sizeof keys / sizeof *keys; i++) {
        const json_t *inner = json_object_get(dflash, keys[i]);
        const json_t *outer = dspark__cfg_get(g, keys[i]);
        if (!inner || json_is_null(inner)) continue;
        if (!outer)
            return dspark__cfg_fail(g, DSPARK_EMODEL, keys[i],
                                    "the key is missing; dflash_config.%s belongs to another "
                                    "format and is not taken instead",
                                    keys[i]);
        if (!json_equal(inner, outer))
            return dspark__cfg_fail(g, DSPARK_EMODEL, keys[i],
                                    "it contradicts dflash_config.%s; keep one of the two",
                                    keys[i]);
    }
    return DSPARK_OK;
}

static dspark_status read_taps(const dspark__cfg *g)
{
    dspark_config *c = &g->doc->config;
    const json_t *ids = NULL;
    uint32_t n = 0;
    int there = 0;
    dspark_status st;

    if ((st = dspark__cfg_array(g, "target_layer_ids", &ids)) != DSPARK_OK) return st;
    if (!ids)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "target_layer_ids",
                                "the key is missing; which layers are tapped has no default");
    if (json_array_size(ids) == 0)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "target_layer_ids", "the list is empty");
    if (json_array_size(ids) > DSPARK_MAX_TAPS)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "target_layer_ids",
                                "%zu taps, at most %d are served", json_array_size(ids),
                                DSPARK_MAX_TAPS);
    c->n_taps = (uint32_t)json_array_size(ids);
    for (uint32_t t = 0; t < c->n_taps; t++) {
        const json_t *v = json_array_get(ids, t);
        if (!json_is_integer(v))
            return dspark__cfg_fail(g, DSPARK_EFORMAT, "target_layer_ids",
                                    "entry %u is not an integer", t);
        if (json_integer_value(v) < INT32_MIN || json_integer_value(v) > INT32_MAX)
            return dspark__cfg_fail(g, DSPARK_EMODEL, "target_layer_ids",
                                    "entry %u is %lld: no such layer", t,
                                    (long long)json_integer_value(v));
        c->tap_layers[t] = (int32_t)json_integer_value(v);
    }
    st = dspark__cfg_u32(g, "num_target_layers", 0, INT32_MAX, &n, &there);
    if (st != DSPARK_OK) return st;
    if (there && n != c->n_taps)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "num_target_layers",
                                "%u, and target_layer_ids has %u entries: in k3_dspark the key "
                                "counts taps; in DeepSpec and NeMo configs it is the target's "
                                "depth",
                                n, c->n_taps);
    if (!there &&
        (st = dspark__cfg_note(g, "num_target_layers absent: %u taps", c->n_taps)) != DSPARK_OK)
        return st;
    st = dspark__cfg_u32(g, "target_num_hidden_layers", 1, INT32_MAX, &c->target_n_layers, &there);
    if (st != DSPARK_OK) return st;
    if (!there) {
        st = dspark__cfg_note(g, "target_num_hidden_layers absent: tap ids are not checked against "
                                 "the target's depth");
        if (st != DSPARK_OK) return st;
    }
    st = dspark__cfg_u32(g, "target_hidden_size", 2, DSPARK__MAX_WIDTH, &c->tap_width, &there);
    if (st != DSPARK_OK) return st;
    if (!there) {
        c->tap_width = c->hidden_size;
        st = dspark__cfg_note(g, "target_hidden_size absent: hidden_size %u", c->hidden_size);
        if (st != DSPARK_OK) return st;
    }
    st = dspark__cfg_bool(g, "fc_norm", &c->fc_norm, &there);
    if (st == DSPARK_OK && !there) st = dspark__cfg_note(g, "fc_norm absent: taps are not normed");
    return st;
}

static dspark_status read_stream(const dspark__cfg *g)
{
    const char *stream = NULL;
    dspark_status st = dspark__cfg_string(g, "aux_hidden_stream", &stream);

    if (st != DSPARK_OK) return st;
    g->doc->aux_hidden_stream = "prefix";
    if (!stream)
        return dspark__cfg_note(g, "aux_hidden_stream absent: taps come from the prefix "
                                   "stream");
    if (!strcmp(stream, "prefix")) return DSPARK_OK;
    if (strcmp(stream, "attn_res"))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "aux_hidden_stream",
                                "\"%.60s\" is not known; known are prefix and attn_res", stream);
    g->doc->aux_hidden_stream = "attn_res";
    return dspark__cfg_note(g,
                            "aux_hidden_stream attn_res: taps must be dumped from that stream of "
                            "the target");
}

/* ---- block and heads ------------------------------------------------------------------------- */

static dspark_status read_block(const dspark__cfg *g, const json_t *dflash)
{
    dspark_config *c = &g->doc->config;
    dspark__cfg inner = *g;
    uint32_t other = 0;
    int there = 0, other_there = 0;
    dspark_status st;

    inner.object = dflash;
    inner.prefix = "dflash_config.";
    st = dspark__cfg_u32(g, "block_size", 1, DSPARK__MAX_BLOCK, &c->block_size, &there);
    if (st != DSPARK_OK) return st;
    if (dflash) {
        st = dspark__cfg_u32(&inner, "block_size", 1, DSPARK__MAX_BLOCK, &other, &other_there);
        if (st != DSPARK_OK) return st;
    }
    if (other_there && !there)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "block_size",
                                "only dflash_config.block_size %u is given, and DFlash counts the "
                                "anchor there; say the number of drafted tokens in block_size",
                                other);
    if (other_there && other != c->block_size)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "block_size",
                                "%u contradicts dflash_config.block_size %u: drafted tokens with "
                                "or without the anchor cannot be told",
                                c->block_size, other);
    if (there && dflash && c->block_size == 8)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "block_size",
                                "8 beside dflash_config is ambiguous: older DFlash configs count "
                                "the anchor (7 drafted tokens), DSpark does not");
    if (there) return DSPARK_OK;
    c->block_size = 7;
    return dspark__cfg_note(g, "block_size absent: 7 drafted tokens");
}

/* is_causal, else dflash_config.causal, else layer_types, else non-causal. */
static dspark_status read_causality(const dspark__cfg *g, const json_t *dflash)
{
    dspark_config *c = &g->doc->config;
    dspark__cfg inner = *g;
    const json_t *types = NULL;
    size_t n_sliding = 0;
    int there = 0, inner_causal = 0, inner_there = 0;
    dspark_status st;

    inner.object = dflash;
    inner.prefix = "dflash_config.";
    if ((st = dspark__cfg_bool(g, "is_causal", &c->causal, &there)) != DSPARK_OK) return st;
    if (dflash) {
        st = dspark__cfg_bool(&inner, "causal", &inner_causal, &inner_there);
        if (st != DSPARK_OK) return st;
    }
    if ((st = dspark__cfg_array(g, "layer_types", &types)) != DSPARK_OK) return st;
    for (size_t i = 0; types && i < json_array_size(types); i++) {
        const char *s = json_string_value(json_array_get(types, i));
        if (!s)
            return dspark__cfg_fail(g, DSPARK_EFORMAT, "layer_types", "entry %zu is not a string",
                                    i);
        if (!strcmp(s, "sliding_attention"))
            n_sliding++;
        else if (strcmp(s, "full_attention"))
            return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "layer_types",
                                    "entry %zu is \"%.60s\"; known are full_attention and "
                                    "sliding_attention",
                                    i, s);
    }
    if (types && json_array_size(types) != c->n_layers)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "layer_types",
                                "%zu entries, and num_hidden_layers is %u", json_array_size(types),
                                c->n_layers);
    if (n_sliding && n_sliding != c->n_layers)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "layer_types",
                                "%zu of %u layers are sliding_attention; mixed layers are not "
                                "served",
                                n_sliding, c->n_layers);
    if (there) {
        if (inner_there && inner_causal != c->causal)
            return dspark__cfg_note(g, "is_causal wins over dflash_config.causal, which says "
                                       "otherwise");
        return DSPARK_OK;
    }
    if (inner_there) {
        c->causal = inner_causal;
        return dspark__cfg_note(g, "is_causal absent: dflash_config.causal says %s",
                                c->causal ? "causal" : "non-causal");
    }
    if (n_sliding) {
        c->causal = 1;
        return dspark__cfg_note(g, "is_causal absent: all layer_types are sliding_attention, so "
                                   "causal");
    }
    return dspark__cfg_note(g, "is_causal absent: non-causal inside the block");
}

static dspark_status read_markov(const dspark__cfg *g)
{
    dspark_config *c = &g->doc->config;
    const char *type = NULL;
    int enabled = 0, with_markov = 0, there = 0, with_there = 0;
    dspark_status st;

    st = dspark__cfg_bool(g, "enable_confidence_head", &enabled, &there);
    if (st != DSPARK_OK) return st;
    if (!there) {
        st = dspark__cfg_note(g, "enable_confidence_head absent: no confidence head");
        if (st != DSPARK_OK) return st;
    }
    st = dspark__cfg_bool(g, "confidence_head_with_markov", &with_markov, &with_there);
    if (st != DSPARK_OK) return st;
    if (enabled && !with_there) {
        with_markov = 1;
        st = dspark__cfg_note(g, "confidence_head_with_markov absent: the head reads hidden state "
                                 "and Markov embedding");
        if (st != DSPARK_OK) return st;
    }
    st = dspark__cfg_need_u32(g, "markov_rank", 0, DSPARK__MAX_WIDTH, &c->markov_rank);
    if (st != DSPARK_OK) return st;
    if (c->markov_rank == 0)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "markov_rank",
                                with_markov
                                    ? "0, and confidence_head_with_markov is true: the head has no "
                                      "Markov embedding to read"
                                    : "0, and a K3 DSpark drafter has a Markov head (rank > 0)");
    c->confidence_head = enabled;
    c->confidence_with_markov = with_markov;

    c->markov_type = DSPARK_MARKOV_VANILLA;
    if ((st = dspark__cfg_string(g, "markov_head_type", &type)) != DSPARK_OK) return st;
    if (!type) return dspark__cfg_note(g, "markov_head_type absent: vanilla");
    if (!strcmp(type, "vanilla")) return DSPARK_OK;
    if (!strcmp(type, "classical"))
        return dspark__cfg_note(g, "markov_head_type classical: TorchSpec's word for vanilla");
    if (!strcmp(type, "gated"))
        c->markov_type = DSPARK_MARKOV_GATED;
    else if (!strcmp(type, "rnn"))
        c->markov_type = DSPARK_MARKOV_RNN;
    else
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "markov_head_type",
                                "\"%.60s\" is not known; known are vanilla, gated and rnn", type);
    return dspark__cfg_note(g, "markov_head_type %s: vLLM and TokenSpeed serve vanilla only", type);
}

static dspark_status read_heads(const dspark__cfg *g)
{
    dspark_config *c = &g->doc->config;
    const char *act = NULL;
    uint32_t topk = 0;
    int there = 0;
    dspark_status st;

    if ((st = read_markov(g)) != DSPARK_OK) return st;
    st = dspark__cfg_u32(g, "mask_token_id", 0, UINT32_MAX, &c->mask_token_id, &there);
    if (st != DSPARK_OK) return st;
    if (!there)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "mask_token_id",
                                "the key is missing, and it has no default");
    if ((st = dspark__cfg_string(g, "hidden_act", &act)) != DSPARK_OK) return st;
    if (act && strcmp(act, "silu"))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "hidden_act",
                                "\"%.60s\" is not served; K3 drafters use silu", act);
    if (!act && (st = dspark__cfg_note(g, "hidden_act absent: silu")) != DSPARK_OK) return st;
    st = dspark__cfg_u32(g, "dspark_draft_topk", 1, DSPARK__MAX_VOCAB, &topk, &there);
    if (st != DSPARK_OK || !there) return st;
    return dspark__cfg_note(g, "dspark_draft_topk %u concerns sampling only", topk);
}

/* ---- what this project adds, quantisation ---------------------------------------------------- */

static dspark_status read_parts(const dspark__cfg *g)
{
    const json_t *parts = NULL;
    const char *s;
    dspark_status st = dspark__cfg_array(g, "dspark_parts", &parts);

    if (st != DSPARK_OK || !parts) return st;
    s = json_string_value(json_array_get(parts, 0));
    if (json_array_size(parts) != 1 || !s || strcmp(s, "context"))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "dspark_parts",
                                "only [\"context\"] is known");
    g->doc->context_only = 1;
    return dspark__cfg_note(g, "dspark_parts context: only the tensors of context KV are expected");
}

static dspark_status read_quantisation(const dspark__cfg *g)
{
    static const char *const keys[] = {"quantization_config", "compression_config"};

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const json_t *q = NULL;
        const char *method = NULL;
        dspark__cfg inner = *g;
        dspark_status st = dspark__cfg_object(g, keys[i], &q);

        if (st != DSPARK_OK) return st;
        if (!q) continue;
        inner.object = q;
        inner.prefix = i ? "compression_config." : "quantization_config.";
        if ((st = dspark__cfg_string(&inner, "quant_method", &method)) != DSPARK_OK) return st;
        if (!method) method = i ? "compressed-tensors" : "unnamed";
        g->doc->quant_method = malloc(strlen(method) + 1);
        if (!g->doc->quant_method)
            return dspark__fail_nomem(g->err, "quant_method", strlen(method) + 1);
        strcpy(g->doc->quant_method, method);
        return dspark__cfg_note(g,
                                "%s names the method %.60s; what counts is which tensors are in "
                                "the file",
                                keys[i], method);
    }
    return DSPARK_OK;
}

static dspark_status parse_object(const dspark__cfg *g)
{
    dspark_config *c = &g->doc->config;
    const json_t *dflash = NULL;
    dspark_status st;

    if ((st = read_identity(g)) != DSPARK_OK) return st;
    if ((st = refuse_switches(g)) != DSPARK_OK) return st;
    if ((st = read_sizes(g)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_rope(g)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_object(g, "dflash_config", &dflash)) != DSPARK_OK) return st;
    if ((st = compare_dflash(g, dflash)) != DSPARK_OK) return st;
    if ((st = read_taps(g)) != DSPARK_OK) return st;
    if ((st = read_stream(g)) != DSPARK_OK) return st;
    if ((st = read_heads(g)) != DSPARK_OK) return st;
    if ((st = read_block(g, dflash)) != DSPARK_OK) return st;
    if ((st = read_causality(g, dflash)) != DSPARK_OK) return st;
    if ((st = read_parts(g)) != DSPARK_OK) return st;
    if ((st = read_quantisation(g)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_note_unknown(g)) != DSPARK_OK) return st;
    st = dspark__config_check(c, g->source, g->err);
    if (st == DSPARK_EINVAL) {
        /* the struct came from a file, so the file is at fault, not a caller */
        st = DSPARK_EMODEL;
        if (g->err) g->err->code = st;
    }
    return st;
}

dspark_status dspark__config_parse(dspark__config_doc **out, const char *text, size_t n_bytes,
                                   const char *where, dspark_error *err)
{
    dspark__cfg g = {NULL, "", where ? where : "config.json", NULL, err};
    json_t *root = NULL;
    dspark_status st;

    *out = NULL;
    if (n_bytes > DSPARK__CONFIG_MAX_BYTES)
        return dspark__fail(err, DSPARK_EFORMAT, g.source, "%zu bytes, and at most %zu are read",
                            n_bytes, DSPARK__CONFIG_MAX_BYTES);
    if (n_bytes >= 3 && !memcmp(text, "\xef\xbb\xbf", 3))
        return dspark__fail(err, DSPARK_EFORMAT, g.source,
                            "the file begins with a UTF-8 byte order mark, which JSON does not "
                            "allow; save it without one");
    st = dspark__json_load(&root, text, n_bytes, CONFIG_MAX_DEPTH, g.source, err);
    if (st != DSPARK_OK) return st;
    g.object = root;
    g.doc = calloc(1, sizeof *g.doc);
    st = g.doc ? parse_object(&g) : dspark__fail_nomem(err, "config", sizeof *g.doc);
    json_decref(root);
    if (st == DSPARK_OK) {
        *out = g.doc;
        return DSPARK_OK;
    }
    dspark__config_free(g.doc);
    return st;
}
