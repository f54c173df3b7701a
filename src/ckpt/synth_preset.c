/* See synth_preset.h. A preset is Kimi-K3's published config and a list of settings: presets go
 * through the same code as the caller's own settings. */
#include "ckpt/synth_preset.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "ckpt/json.h"

/* The published config of Kimi-K3's drafter. */
static const char k3_config[] =
    "{\"architectures\": [\"K3DSparkModel\"], \"model_type\": \"k3_dspark\","
    "\"hidden_size\": 7168, \"intermediate_size\": 14336, \"num_hidden_layers\": 5,"
    "\"num_attention_heads\": 64, \"num_key_value_heads\": 64,"
    "\"q_lora_rank\": 1536, \"kv_lora_rank\": 512, \"qk_nope_head_dim\": 128,"
    "\"qk_rope_head_dim\": 64, \"v_head_dim\": 128,"
    "\"mla_use_nope\": false, \"mla_use_output_gate\": false,"
    "\"vocab_size\": 163840, \"draft_vocab_size\": 163840, \"rms_norm_eps\": 1e-5,"
    "\"max_position_embeddings\": 1048576, \"rope_theta\": 50000.0,"
    "\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 32.0,"
    " \"original_max_position_embeddings\": 32768, \"rope_theta\": 50000.0,"
    " \"beta_fast\": 32, \"beta_slow\": 1, \"mscale\": 1.0, \"mscale_all_dim\": 1.0},"
    "\"num_target_layers\": 5, \"target_hidden_size\": 7168, \"target_num_hidden_layers\": 93,"
    "\"target_layer_ids\": [2, 23, 47, 71, 89], \"mask_token_id\": 163837,"
    "\"markov_rank\": 256, \"markov_head_type\": \"vanilla\","
    "\"enable_confidence_head\": true, \"confidence_head_with_markov\": true}";

#define MAX_PRESET_SETTINGS 20
#define JSON_DEPTH 32

static const struct {
    const char *name;
    int embed_tokens;
    const char *settings[MAX_PRESET_SETTINGS]; /* NULL-terminated */
} presets[] = {
    {"kimi-k3", 1, {NULL}},
    {"kimi-k3-block5", 1, {"block_size=5", NULL}},
    {"kimi-k3.1-pro", 0, {"num_attention_heads=96", "markov_rank=512", "is_causal=true", NULL}},
    {"lightseek", 1,
     {"target_layer_ids=[7, 31, 47, 63, 87]", "draft_vocab_size=null", "rope_parameters=null",
      "fc_norm=true", "aux_hidden_stream=attn_res", "bos_token_id=163584", "eos_token_id=163586",
      "pad_token_id=163839", NULL}},
    {"tiny", 1,
     {"hidden_size=64", "intermediate_size=128", "num_attention_heads=4", "q_lora_rank=32",
      "kv_lora_rank=16", "qk_nope_head_dim=8", "qk_rope_head_dim=8", "v_head_dim=8",
      "vocab_size=97", "target_num_hidden_layers=8", "target_layer_ids=[1, 2, 4, 5, 7]",
      "mask_token_id=96", "markov_rank=8", "block_size=7", NULL}},
};

/* Every key that a setting may name. A misspelt key would otherwise be a checkpoint that silently is
 * not what was asked for. */
static const char *const known_keys[] = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_nope", "mla_use_output_gate",
    "mla_use_qk_norm", "dspark_bonus_anchor", "sample_from_anchor", "vocab_size",
    "draft_vocab_size", "rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_theta",
    "rope_parameters", "rope_scaling", "rope_interleave", "num_target_layers", "target_hidden_size",
    "target_num_hidden_layers", "target_layer_ids", "fc_norm", "aux_hidden_stream",
    "mask_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "tie_word_embeddings", "logit_scale", "block_size", "num_speculative_tokens", "is_causal",
    "dflash_config", "layer_types", "dspark_draft_topk", "torch_dtype", "dtype",
    "transformers_version",
};

/* `key` repeats `leader`: it takes over a new value unless a setting names it too. */
static const struct {
    const char *leader, *key;
} follow_table[] = {
    {"num_attention_heads", "num_key_value_heads"},
    {"vocab_size", "draft_vocab_size"},
    {"hidden_size", "target_hidden_size"},
    {"rope_theta", "rope_parameters.rope_theta"}, /* two different ones are a contradiction */
    {"rope_parameters.rope_theta", "rope_theta"},
    {"target_layer_ids", "num_target_layers"},    /* its length */
};

static int is_known_key(const char *key)
{
    size_t n = strcspn(key, ".");
    for (size_t i = 0; i < sizeof known_keys / sizeof *known_keys; i++)
        if (strlen(known_keys[i]) == n && strncmp(known_keys[i], key, n) == 0) return 1;
    return 0;
}

static int is_bare_word(const char *s)
{
    if (!((*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z') || *s == '_')) return 0;
    for (; *s; s++) {
        if (!((*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z') || (*s >= '0' && *s <= '9') ||
              strchr("_-.+/", *s)))
            return 0;
    }
    return 1;
}

/* The object that holds the last component of `key`, made on the way when `make` is set; NULL when
 * there is none or (*out_of_memory) it could not be made. *last is that component. */
static json_t *find_holder(json_t *root, const char *key, int make, const char **last,
                           int *out_of_memory)
{
    json_t *at = root;
    const char *dot;
    *out_of_memory = 0;
    while ((dot = strchr(key, '.')) != NULL) {
        char part[64];
        size_t n = (size_t)(dot - key);
        json_t *next;
        if (n == 0 || n >= sizeof part) return NULL;
        memcpy(part, key, n);
        part[n] = '\0';
        next = json_object_get(at, part);
        if (!next && make) {
            next = json_object();
            if (!next || json_object_set_new(at, part, next) != 0) {
                *out_of_memory = 1;
                return NULL;
            }
        }
        if (!json_is_object(next)) return NULL;
        at = next;
        key = dot + 1;
    }
    *last = key;
    return *key ? at : NULL;
}

/* Does one of the settings name `key`? */
static int settings_name(const char *const *settings, size_t n, const char *key)
{
    size_t len = strlen(key);
    for (size_t i = 0; i < n; i++)
        if (strncmp(settings[i], key, len) == 0 && settings[i][len] == '=') return 1;
    return 0;
}

/* The JSON value or bare word in `text`. JSON_DEPTH levels are more than any config has. */
static dspark_status read_value(json_t **out, const char *text, const char *setting,
                                dspark_error *err)
{
    dspark_error why;
    json_t *object = NULL;
    size_t n = strlen(text) + sizeof "{\"\":}";
    char *wrapped = malloc(n);
    dspark_status st;

    *out = NULL;
    if (!wrapped) return dspark__fail_nomem(err, "a setting", n);
    n = (size_t)snprintf(wrapped, n, "{\"\":%s}", text);
    st = dspark__json_load(&object, wrapped, n, JSON_DEPTH, setting, &why);
    free(wrapped);
    if (st == DSPARK_OK && json_object_size(object) == 1) { /* 1,"x":2 would make two */
        *out = json_incref(json_object_get(object, ""));
    } else if (st != DSPARK_ENOMEM && is_bare_word(text)) {
        *out = json_string(text);
        if (!*out) st = DSPARK_ENOMEM;
    }
    json_decref(object);
    if (*out) return DSPARK_OK;
    if (st == DSPARK_ENOMEM) return dspark__fail_nomem(err, "a setting", n);
    return dspark__fail(err, DSPARK_EINVAL, setting,
                        "the value must be JSON or a bare word, found \"%s\"", text);
}

static dspark_status apply_setting(json_t *root, const char *setting, dspark_error *err)
{
    const char *equals = strchr(setting, '='), *last = NULL;
    char key[128];
    size_t n_key = equals ? (size_t)(equals - setting) : 0;
    json_t *value, *holder;
    int out_of_memory;
    dspark_status st;

    if (!equals || n_key == 0 || n_key >= sizeof key)
        return dspark__fail(err, DSPARK_EINVAL, setting, "a setting must be key=value");
    memcpy(key, setting, n_key);
    key[n_key] = '\0';
    if (!is_known_key(key))
        return dspark__fail(err, DSPARK_EINVAL, setting, "config.json has no key %s", key);

    if ((st = read_value(&value, equals + 1, setting, err)) != DSPARK_OK) return st;
    holder = find_holder(root, key, !json_is_null(value), &last, &out_of_memory);
    if (json_is_null(value)) {
        json_decref(value);
        if (holder) json_object_del(holder, last);
        return DSPARK_OK; /* deleting what is not there is no error */
    }
    if (!holder) {
        json_decref(value);
        if (out_of_memory) return dspark__fail_nomem(err, "a setting", strlen(setting));
        return dspark__fail(err, DSPARK_EINVAL, setting,
                            "%s: every part before the last must name an object", key);
    }
    if (json_object_set_new(holder, last, value) != 0)
        return dspark__fail_nomem(err, "a setting", strlen(setting));
    return DSPARK_OK;
}

static dspark_status follow_leaders(json_t *root, const char *const *settings, size_t n,
                                    dspark_error *err)
{
    for (size_t i = 0; i < sizeof follow_table / sizeof *follow_table; i++) {
        const char *leader = follow_table[i].leader, *key = follow_table[i].key, *last = NULL;
        json_t *value, *holder, *copy;
        int ignored;
        if (!settings_name(settings, n, leader) || settings_name(settings, n, key)) continue;
        holder = find_holder(root, leader, 0, &last, &ignored);
        value = holder ? json_object_get(holder, last) : NULL;
        if (!value) continue;
        holder = find_holder(root, key, 0, &last, &ignored);
        if (!holder || !json_object_get(holder, last)) continue;
        copy = json_is_array(value) ? json_integer((json_int_t)json_array_size(value))
                                    : json_copy(value);
        if (!copy || json_object_set_new(holder, last, copy) != 0)
            return dspark__fail_nomem(err, "the config", 0);
    }
    return DSPARK_OK;
}

static dspark_status apply_settings(json_t *root, const char *const *settings, size_t n,
                                    dspark_error *err)
{
    for (size_t i = 0; i < n; i++) {
        dspark_status st;
        if (!settings[i])
            return dspark__fail(err, DSPARK_EINVAL, "settings", "setting %zu is NULL", i);
        if ((st = apply_setting(root, settings[i], err)) != DSPARK_OK) return st;
    }
    return follow_leaders(root, settings, n, err);
}

static size_t find_preset(const char *name)
{
    size_t n = sizeof presets / sizeof *presets, i;
    for (i = 0; i < n && strcmp(presets[i].name, name) != 0; i++) {}
    return i;
}

dspark_status dspark__synth_config_make(dspark__synth_config *out, const dspark_synth_opts *opts,
                                        dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    json_t *root = NULL;
    char *text = NULL, *longer;
    size_t preset, n = 0;

    memset(out, 0, sizeof *out);
    /* No default: the likeliest one would be a surprise of 7 GB. */
    if (!opts->preset) return dspark__fail(err, DSPARK_EINVAL, "preset", "a preset is needed");
    preset = find_preset(opts->preset);
    if (preset == sizeof presets / sizeof *presets)
        return dspark__fail(err, DSPARK_EINVAL, "preset",
                            "unknown preset \"%s\": expected kimi-k3, kimi-k3-block5, "
                            "kimi-k3.1-pro, lightseek or tiny",
                            opts->preset);
    if (opts->n_settings > 0 && !opts->settings)
        return dspark__fail(err, DSPARK_EINVAL, "settings", "%zu settings expected, found NULL",
                            opts->n_settings);
    st = dspark__json_load(&root, k3_config, sizeof k3_config - 1, JSON_DEPTH, "preset", err);
    if (st != DSPARK_OK) goto done;
    while (n < MAX_PRESET_SETTINGS && presets[preset].settings[n]) n++;
    if ((st = apply_settings(root, presets[preset].settings, n, err)) != DSPARK_OK) goto done;
    if ((st = apply_settings(root, opts->settings, opts->n_settings, err)) != DSPARK_OK) goto done;
    if (opts->context_only &&
        json_object_set_new(root, "dspark_parts", json_pack("[s]", "context")) != 0) {
        st = dspark__fail_nomem(err, "the config", 0);
        goto done;
    }
    text = dspark__json_short_text(root, JSON_INDENT(2));
    n = text ? strlen(text) : 0;
    longer = text ? realloc(text, n + 2) : NULL;
    if (!longer) {
        free(text);
        st = dspark__fail_nomem(err, "the text of config.json", n + 2);
        goto done;
    }
    memcpy(longer + n, "\n", 2);
    out->text = longer;
    out->n_bytes = n + 1;
    out->embed_tokens = presets[preset].embed_tokens;
done:
    json_decref(root);
    return st;
}

void dspark__synth_config_free(dspark__synth_config *c)
{
    free(c->text);
    memset(c, 0, sizeof *c);
}
