/* config.json to dspark_config: every key and variant, every assumption written down.
 *
 * Strict: a value of the wrong type, a missing key that changes numbers, or two keys that
 * contradict each other is a named error, never a default. Knows the configs of K3's MLA drafter
 * only; what another family's config is, family.h says. */
#ifndef DSPARK_CKPT_CONFIG_H
#define DSPARK_CKPT_CONFIG_H

#include "dspark/dspark.h"

/* A config.json larger than this is refused. */
#define DSPARK__CONFIG_MAX_BYTES ((size_t)16 << 20)

/* Widest values that a config may hold. Chosen so that every product of two of them fits 64 bits
 * and every sum of head dims over heads and layers fits 32 bits. */
#define DSPARK__MAX_WIDTH        131072u /* hidden, taps, ranks */
#define DSPARK__MAX_INTERMEDIATE 1048576u
#define DSPARK__MAX_HEADS        4096u
#define DSPARK__MAX_HEAD_DIM     4096u
#define DSPARK__MAX_ROPE_DIM     512u
#define DSPARK__MAX_VOCAB        16777216u
#define DSPARK__MAX_BLOCK        1024u
#define DSPARK__MAX_POSITIONS    ((uint64_t)1 << 31)

/* A parsed config. `notes` are sentences about assumptions ("rope_parameters absent: plain
 * RoPE"). */
typedef struct dspark__config_doc {
    dspark_config config;
    /* "dspark_parts": ["context"], a key of this project: the checkpoint is cut down to the tensors
     * of context KV. These are fc_norm.*, context_proj, context_norm, and of every layer
     * kv_a_proj_with_mqa, kv_a_layernorm and q_a_proj; q_a_proj is there so that the path which
     * computes Q only to throw it away can be measured on the same files. */
    int context_only;
    size_t n_notes;
    char **notes;
    char
        *quant_method; /* quantization_config.quant_method (or the like), NULL when there is none */
    const char
        *aux_hidden_stream; /* "prefix" or "attn_res": which target stream is tapped; static */
} dspark__config_doc;

/* Read and check the config.json of `path`: a directory, the json file itself, or a tensor file
 * (then config.json beside it). Errors name file and key: DSPARK_EIO (no such file),
 * DSPARK_EFORMAT (not JSON, a duplicate key, a value of the wrong type), DSPARK_EMODEL (missing or
 * contradictory values), DSPARK_EUNSUPPORTED (understood and not served, for example
 * mla_use_nope). A hf_quant_config.json beside it is heard of in quant_method and the notes. */
dspark_status dspark__config_read(dspark__config_doc **out, const char *path, dspark_error *err);
/* The same from memory; `where` names the source in errors. */
dspark_status dspark__config_parse(dspark__config_doc **out, const char *text, size_t n_bytes,
                                   const char *where, dspark_error *err);
void dspark__config_free(dspark__config_doc *doc);

/* The bytes of the config.json of `path` (as above), NUL-terminated, freed with free(). */
dspark_status dspark__config_text(char **out, size_t *n_bytes, const char *path, dspark_error *err);
/* The same for hf_quant_config.json, ModelOpt's own file: *out is NULL when there is none. */
dspark_status dspark__config_modelopt_text(char **out, size_t *n_bytes, const char *path,
                                           dspark_error *err);

/* Does the config hold together (ranges, products that consumers will index)? Called by parse;
 * also guards a dspark_config that a caller made up. DSPARK_EINVAL names the field; `where` may
 * be NULL. */
dspark_status dspark__config_check(const dspark_config *c, const char *where, dspark_error *err);

#endif
