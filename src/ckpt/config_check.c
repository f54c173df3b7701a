/* Does a dspark_config hold together? The guard between anybody's struct and code that indexes by
 * it: ranges, taps, rotary values. Reads no file. */
#include <math.h>
#include <stdio.h>

#include "base/status.h"
#include "ckpt/config.h"

static dspark_status fail_field(dspark_error *err, const char *where, const char *field,
                                const char *text)
{
    char place[256];

    snprintf(place, sizeof place, "%.180s%s%s", where ? where : "", where ? ": " : "", field);
    return dspark__fail(err, DSPARK_EINVAL, place, "%s", text);
}

static dspark_status check_sizes(const dspark_config *c, const char *where, dspark_error *err)
{
    const struct {
        const char *field;
        uint64_t value, min, max;
        int even;
    } rows[] = {
        {"hidden_size", c->hidden_size, 2, DSPARK__MAX_WIDTH, 1},
        {"intermediate_size", c->intermediate_size, 2, DSPARK__MAX_INTERMEDIATE, 1},
        {"num_hidden_layers", c->n_layers, 1, DSPARK_MAX_LAYERS, 0},
        {"num_attention_heads", c->n_heads, 1, DSPARK__MAX_HEADS, 0},
        {"q_lora_rank", c->q_lora_rank, 1, DSPARK__MAX_WIDTH, 0},
        {"kv_lora_rank", c->kv_lora_rank, 1, DSPARK__MAX_WIDTH, 0},
        {"qk_nope_head_dim", c->qk_nope_head_dim, 1, DSPARK__MAX_HEAD_DIM, 0},
        {"qk_rope_head_dim", c->qk_rope_head_dim, 2, DSPARK__MAX_ROPE_DIM, 1},
        {"v_head_dim", c->v_head_dim, 1, DSPARK__MAX_HEAD_DIM, 0},
        {"vocab_size", c->vocab_size, 1, DSPARK__MAX_VOCAB, 0},
        {"target_layer_ids", c->n_taps, 1, DSPARK_MAX_TAPS, 0},
        {"target_hidden_size", c->tap_width, 2, DSPARK__MAX_WIDTH, 1},
        {"block_size", c->block_size, 1, DSPARK__MAX_BLOCK, 0},
        {"markov_rank", c->markov_rank, 1, DSPARK__MAX_WIDTH, 0},
        {"max_position_embeddings", c->max_positions, 1, DSPARK__MAX_POSITIONS, 0},
    };

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char text[160];
        if (rows[i].value >= rows[i].min && rows[i].value <= rows[i].max &&
            (!rows[i].even || rows[i].value % 2 == 0))
            continue;
        snprintf(text, sizeof text, "%llu is outside the range %llu .. %llu%s",
                 (unsigned long long)rows[i].value, (unsigned long long)rows[i].min,
                 (unsigned long long)rows[i].max, rows[i].even ? ", even" : "");
        return fail_field(err, where, rows[i].field, text);
    }
    return DSPARK_OK;
}

static dspark_status check_taps(const dspark_config *c, const char *where, dspark_error *err)
{
    char text[200];

    for (uint32_t t = 0; t < c->n_taps; t++) {
        int32_t id = c->tap_layers[t];
        if (id < 0) {
            snprintf(text, sizeof text, "entry %u is %d: layers count from 0%s", t, id,
                     id == -1 ? " (the embedding output, -1 elsewhere, is not served)" : "");
            return fail_field(err, where, "target_layer_ids", text);
        }
        if (c->target_n_layers && (uint32_t)id >= c->target_n_layers) {
            snprintf(text, sizeof text,
                     "entry %u is layer %d, and the target has %u layers "
                     "(0 .. %u)",
                     t, id, c->target_n_layers, c->target_n_layers - 1);
            return fail_field(err, where, "target_layer_ids", text);
        }
        if (t && id == c->tap_layers[t - 1]) {
            snprintf(text, sizeof text, "layer %d is listed twice", id);
            return fail_field(err, where, "target_layer_ids", text);
        }
        if (t && id < c->tap_layers[t - 1]) {
            snprintf(text, sizeof text, "the ids must ascend, found %d after %d", id,
                     c->tap_layers[t - 1]);
            return fail_field(err, where, "target_layer_ids", text);
        }
    }
    return DSPARK_OK;
}

static int is_in(double v, double min, double max)
{
    return v >= min && v <= max; /* false for NaN */
}

static dspark_status check_rope(const dspark_config *c, const char *where, dspark_error *err)
{
    if (!(c->rope_theta > 1.0 && c->rope_theta <= 1e18))
        return fail_field(err, where, "rope_theta", "it must be greater than 1 and at most 1e18");
    if (c->rope_type == DSPARK_ROPE_DEFAULT) return DSPARK_OK;
    if (c->rope_type != DSPARK_ROPE_YARN)
        return fail_field(err, where, "rope_type", "the value is not a dspark_rope_type");
    if (!is_in(c->rope_factor, 1.0, 1e6))
        return fail_field(err, where, "rope_factor", "it must lie in 1 .. 1e6");
    if (!is_in(c->rope_beta_slow, 1e-6, 1e6) || !is_in(c->rope_beta_fast, c->rope_beta_slow, 1e6))
        return fail_field(err, where, "rope_beta_fast",
                          "0 < beta_slow <= beta_fast <= 1e6 must hold");
    if (!is_in(c->rope_mscale, 0.0, 1e3) || !is_in(c->rope_mscale_all_dim, 0.0, 1e3))
        return fail_field(err, where, "rope_mscale",
                          "mscale and mscale_all_dim must lie in 0 .. 1e3");
    if (!is_in(c->rope_extrapolation_factor, 0.0, 1e3))
        return fail_field(err, where, "rope_extrapolation_factor", "it must lie in 0 .. 1e3");
    if (!is_in(c->rope_attn_factor, 1e-6, 1e6))
        return fail_field(err, where, "rope_attn_factor", "it must lie in 1e-6 .. 1e6");
    if (c->rope_original_max_positions < 1 ||
        c->rope_original_max_positions > DSPARK__MAX_POSITIONS)
        return fail_field(err, where, "rope_original_max_positions", "it must lie in 1 .. 2^31");
    return DSPARK_OK;
}

dspark_status dspark__config_check(const dspark_config *c, const char *where, dspark_error *err)
{
    dspark_status st;

    if (!c) return dspark__fail(err, DSPARK_EINVAL, where, "the config is NULL");
    if ((st = check_sizes(c, where, err)) != DSPARK_OK) return st;
    if ((st = check_taps(c, where, err)) != DSPARK_OK) return st;
    if (c->target_n_layers > INT32_MAX)
        return fail_field(err, where, "target_num_hidden_layers", "it must fit 31 bits");
    if (c->mask_token_id >= c->vocab_size) {
        char text[120];
        snprintf(text, sizeof text, "id %u lies outside the vocabulary of %u", c->mask_token_id,
                 c->vocab_size);
        return fail_field(err, where, "mask_token_id", text);
    }
    if (c->markov_type != DSPARK_MARKOV_VANILLA && c->markov_type != DSPARK_MARKOV_GATED &&
        c->markov_type != DSPARK_MARKOV_RNN)
        return fail_field(err, where, "markov_head_type", "it must be vanilla, gated or rnn");
    /* the smallest normal number: eps must survive the flush of subnormals */
    if (!(c->rms_norm_eps >= 0x1p-126f && c->rms_norm_eps <= 1.0f))
        return fail_field(err, where, "rms_norm_eps", "it must be greater than 0 and at most 1");
    if (!isfinite(c->logit_scale) || c->logit_scale == 0.0f)
        return fail_field(err, where, "logit_scale", "it must be a finite number other than 0");
    return check_rope(c, where, err);
}
