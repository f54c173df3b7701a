/* Synthetic checkpoints and dumps: valid files of any geometry from a preset, settings and a seed.
 * Owns the choice of tensors, the shards and the all-or-nothing writing; the numbers are
 * synth_values.h's, the config is synth_preset.h's. Same options, same bytes. Never leaves a part of
 * a checkpoint behind and never overwrites one.
 *
 * Tensors: the roster of the config (ckpt/roster.h) in its order, all BF16, without lm_head, and
 * without embed_tokens for kimi-k3.1-pro, which shares the target's. A shard is closed when the next
 * tensor would grow its data over shard_bytes; a larger tensor has a shard of its own. One shard is
 * model.safetensors without an index. Each file's metadata says format = pt, generator and seed. */
#ifndef DSPARK_CKPT_SYNTH_H
#define DSPARK_CKPT_SYNTH_H

#include "dspark/dspark.h"

dspark_status dspark__synth_checkpoint(const char *dir, const dspark_synth_opts *opts,
                                       dspark_error *err);
/* token_ids [n] I64 and hidden_states [n, T+1, tap_width] BF16: streams of these names. */
dspark_status dspark__synth_dump(const char *file, const char *ckpt, uint64_t n_tokens,
                                 uint64_t seed, dspark_progress progress, void *progress_user,
                                 dspark_error *err);

#endif
