/* Inspection: what a path holds, its verdict, and one JSON document with everything that is known.
 * Prints nothing and decides nothing for a model: model.c asks the same questions itself.
 *
 * Keys of the document (null where nothing is known; keys are always there unless said otherwise):
 *   path, verdict ("usable" | "recognised" | "broken"), exit_code (0 | 1 | 3)
 *   reason        one line: what it is usable for, or what is wrong and what to do
 *   family        {id, variant, dialect, model_prefix, text}; id also "gguf", "pytorch", "none",
 *                 and for files of this project "dump", "cache", "states"
 *   files         [{name, bytes}], config.json first when it is there
 *   config        {the keys of config.json after all rules; rope: {...}; context_only}
 *   notes         [text]: assumptions about the config
 *   warnings      [text]: nothing wrong by contract, and still worth a look (deep: zero rows)
 *   problems      [{status, tensor, text}]: all of them; status as in dspark_status_name
 *   problems_left_out   number of problems beyond the first 1000
 *   tensors       [{name, dtype, shape, bytes, file, scheme, target, index, shard, shared_with,
 *                 deep}]
 *                 target: where the bytes go, null for foreign names; shared_with: {target, shard}
 *                 for the second place of the same bytes; deep only when deep:
 *                 {elements, nonfinite, rows, zero_rows, min, max, absmax, rms}, null for 4-
 *                 and 6-bit
 *   totals        {tensors, parameters, stored_elements, bytes}; parameters: those of the weights, biases,
 *                 norms and tables, however they are packed (null: there is no telling, or no
 *                 checkpoint); stored_elements: of all tensors as they lie in the files
 *   expected      {tensors, parameters}: of the config's roster, optional tensors included
 *   quantisation  {config_method, config, schemes: {name: number of modules}, linears}
 *     config        quantization_config in one line, null when there is none
 *     linears       [{name, scheme, text, rows, k, file_bytes, packed_bytes}]: what is read of it and
 *                   what it takes in memory; shards of context_kv are the kv_a_proj_with_mqa
 *   confidence_head  "loaded" | "no-bias" | "absent" | "unused"
 *   embed_tokens, lm_head  "own" (used instead of the target's; a note says so) | "absent" (the
 *                 target's is used)
 *   fingerprint   32 hex digits over config, names, dtypes and shapes; no data
 *   plan          {entry_width, read_bytes, resident_bytes, cache_bytes_per_token, workspace}
 *     read_bytes      {context_proj, kv_a, norms, total, q_a, block, lm_head}: of the files; total is
 *                     context KV's, without the last three; block: layers and heads; both null in a
 *                     context-only checkpoint
 *     resident_bytes  {context_proj, context_kv, norms, total, q_a, block, lm_head}: packed panels; the
 *                     same; lm_head of the target's as BF16
 *     cache_bytes_per_token {bf16, fp8_e4m3, fp8_e5m2, fp8_ds_mla}: over all layers, null: no fit
 *     workspace       [{n_threads, max_tokens, bytes}]: default options, one thread and all
 *   deep          {bytes, nonfinite, tensors_with_nonfinite, zero_rows}; null unless deep */
#ifndef DSPARK_MODEL_INSPECT_H
#define DSPARK_MODEL_INSPECT_H

#include <jansson.h>

#include "ckpt/checkpoint.h"
#include "ckpt/config.h"
#include "ckpt/modules.h"
#include "quant/check.h"

/* Succeeds also for foreign and broken checkpoints. Fails for DSPARK_EINVAL, DSPARK_ENOMEM and
 * DSPARK_ECANCELLED only. */
dspark_status dspark__inspect(dspark_inspection **out, const char *path,
                              const dspark_inspect_opts *opts, dspark_error *err);
void dspark__inspection_free(dspark_inspection *in);
dspark_verdict dspark__inspection_verdict(const dspark_inspection *in);
const char *dspark__inspection_json(const dspark_inspection *in);

/* ---- shared by inspect*.c ---- */

/* json_object_set_new and json_array_append_new that remember a failure (also a NULL value). */
void dspark__inspect_put(int *oom, json_t *object, const char *key, json_t *value);
void dspark__inspect_append(int *oom, json_t *array, json_t *value);
/* A string; bytes that are not UTF-8 become '?'. s may be NULL: null. */
json_t *dspark__inspect_text(const char *s);
json_t *dspark__inspect_u64(uint64_t v);
/* With the fewest digits that name it: as a float when it is one. */
json_t *dspark__inspect_real(double v);

/* inspect_parts.c: sections of the document. NULL when memory is short. */
json_t *dspark__inspect_config(const dspark__config_doc *doc);
json_t *dspark__inspect_tensors(const dspark_checkpoint *ckpt, const dspark__modules *modules,
                                const dspark__quant_module *const *linear_of,
                                const dspark_config *config);
json_t *dspark__inspect_plan(const dspark__config_doc *doc, const dspark__quant_modules *linears);
/* [{name, scheme, text, rows, k, file_bytes, packed_bytes}] in roster order. NULL: no memory. */
json_t *dspark__inspect_linears(const dspark__quant_modules *linears);
/* One sentence about weights whose shape is the same when transposed; null when there is none. */
json_t *dspark__inspect_square(const dspark_checkpoint *ckpt, const dspark_config *config);

/* inspect_weights.c: of each module of the file the linear that it is, else NULL. [modules->n], free it;
 * NULL: no memory. */
const dspark__quant_module **dspark__inspect_match(const dspark__modules *modules,
                                                   const dspark__quant_modules *linears);
/* What the module is, in a word or two: as headers say it, or as the config settles it. linear: of
 * dspark__inspect_match. */
const char *dspark__inspect_scheme(const dspark__file_module *m, const dspark__quant_module *linear);
json_t *dspark__inspect_totals(const dspark_checkpoint *ckpt, const dspark__modules *modules,
                               const dspark__quant_module *const *linear_of);

/* inspect_deep.c: what one tensor's data holds. */
typedef struct dspark__tensor_stats {
    int decoded; /* 0: a dtype whose values are not looked at (4- and 6-bit) */
    uint64_t elements, nonfinite, rows, zero_rows;
    int has_range;   /* some element is finite */
    double min, max; /* over the finite elements */
    double rms;      /* the same */
} dspark__tensor_stats;

/* Reads in pieces and lets the pages go again; `step` hears the bytes of each piece (NULL: nobody),
 * non-zero cancels. DSPARK_EIO when the file has shrunk. */
dspark_status dspark__tensor_scan(dspark__tensor_stats *out, const dspark_checkpoint *ckpt,
                                  const dspark_tensor *t, int (*step)(void *user, uint64_t bytes),
                                  void *user, dspark_error *err);

#endif
