/* Presets of synthetic checkpoints: from a preset's name and settings to the text of config.json.
 * Knows the published values and how a setting changes them; writes no file and makes no tensor. */
#ifndef DSPARK_CKPT_SYNTH_PRESET_H
#define DSPARK_CKPT_SYNTH_PRESET_H

#include "dspark/dspark.h"

typedef struct dspark__synth_config {
    char *text; /* config.json, indented, with a final newline; free() */
    size_t n_bytes;
    int embed_tokens; /* the checkpoint carries a copy of the target's embedding */
} dspark__synth_config;

/* The config of opts->preset after opts->settings, in order. A setting is "key=value": the key one of
 * config.json's (dotted for members: rope_parameters.factor), the value JSON or a bare word, null
 * deletes. Keys that repeat another one follow it unless they are set too (follow_table in the .c).
 * DSPARK_EINVAL names the preset (there is no default) or the setting. Whether the result is a valid config is for
 * dspark__config_parse to say. */
dspark_status dspark__synth_config_make(dspark__synth_config *out, const dspark_synth_opts *opts,
                                        dspark_error *err);
void dspark__synth_config_free(dspark__synth_config *c);

#endif
