/* Which keys of a config.json are known: those that are read, and those that say nothing about the
 * mathematics of a drafter. The others are named in a note, because a misspelt key is otherwise a
 * default nobody asked for. Reads no value. */
#include <stdio.h>
#include <string.h>

#include "ckpt/config_value.h"

#define SHOWN_KEYS 8

static int is_known(const char *key)
{
    static const char *const keys[] = {
        /* read */
        "model_type", "architectures", "text_config", "speculators_model_type", "mla_use_nope",
        "mla_use_output_gate", "mla_use_qk_norm", "dspark_bonus_anchor", "sample_from_anchor",
        "attention_bias", "mlp_bias", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "vocab_size", "num_key_value_heads", "draft_vocab_size",
        "max_position_embeddings", "rms_norm_eps", "logit_scale", "target_layer_ids",
        "num_target_layers", "target_num_hidden_layers", "target_hidden_size", "fc_norm",
        "aux_hidden_stream", "block_size", "is_causal", "dflash_config", "layer_types",
        "enable_confidence_head", "confidence_head_with_markov", "markov_rank", "markov_head_type",
        "mask_token_id", "hidden_act", "dspark_draft_topk", "dspark_parts", "quantization_config",
        "compression_config", "rope_parameters", "rope_scaling", "rope_theta", "rope_interleave",
        "partial_rotary_factor", "apply_yarn_scaling", "mrope_section",
        /* of no consequence here */
        "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype",
        "transformers_version", "_name_or_path", "name_or_path", "auto_map", "use_cache",
        "tie_word_embeddings", "initializer_range", "attention_dropout", "hidden_dropout",
        "num_speculative_tokens", "return_dict", "output_attentions", "output_hidden_states",
        "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "id2label", "label2id",
        "problem_type", "pruned_heads", "pretraining_tp", "sliding_window", "use_sliding_window",
        "max_window_layers", "head_dim", "qk_head_dim", "tokenizer_class", "license",
        "vllm_version", "torchscript",
    };

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!strcmp(key, keys[i])) return 1;
    return 0;
}

/* The first unknown key in byte order behind `last` (NULL: of all), so that nothing is sorted. */
static const char *next_unknown(const dspark__cfg *g, const char *last)
{
    const char *best = NULL, *key;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)g->object, key, value) {
        if (is_known(key) || (last && strcmp(key, last) <= 0)) continue;
        if (!best || strcmp(key, best) < 0) best = key;
    }
    return best;
}

dspark_status dspark__cfg_note_unknown(const dspark__cfg *g)
{
    char text[448] = "";
    const char *key, *last = NULL;
    json_t *value;
    size_t n = 0, n_shown = 0, used = 0;

    json_object_foreach((json_t *)(uintptr_t)g->object, key, value) n += !is_known(key);
    while (n_shown < SHOWN_KEYS && (last = next_unknown(g, last)) != NULL) {
        /* 8 * (2 + 48) fits */
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%.48s", n_shown ? ", " : "",
                                 last);
        n_shown++;
    }
    if (!n) return DSPARK_OK;
    if (n > n_shown)
        return dspark__cfg_note(g, "keys this library does not know: %s, and %zu more", text,
                                n - n_shown);
    return dspark__cfg_note(g, "keys this library does not know: %s", text);
}
