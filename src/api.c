/* Exported functions and nothing else: arguments are checked here, the work is elsewhere. Files, models,
 * context; api_draft.c has drafting, sessions, and what needs no model. */
#include "api.h"

#include <string.h>

#include "base/digest.h"
#include "base/status.h"
#include "ckpt/checkpoint.h"
#include "ckpt/dtype.h"
#include "ckpt/outfile.h"
#include "ckpt/synth.h"
#include "ckpt/writer.h"
#include "model/context.h"
#include "model/inspect.h"
#include "model/probe.h"
#include "quant/encode.h"
#include "quant/quantize.h"

dspark_status dspark__take_opts(void *own, size_t own_size, const void *theirs, const char *what,
                                dspark_error *err)
{
    size_t size;
    dspark__error_clear(err);
    if (!theirs) return DSPARK_OK;
    memcpy(&size, theirs, sizeof size);
    if (size < sizeof size || size > own_size)
        return dspark__fail(err, DSPARK_EINVAL, what,
                            "struct_size %zu, this library knows %zu to %zu: call its _init function",
                            size, sizeof size, own_size);
    memcpy(own, theirs, size);
    return DSPARK_OK;
}

dspark_status dspark__fail_null(dspark_error *err, const char *what)
{
    return dspark__fail(err, DSPARK_EINVAL, what, "is NULL");
}

/* ---- version, names ---- */

const char *dspark_version(void)
{
    return DSPARK_VERSION_STRING;
}

const char *dspark_status_name(dspark_status code)
{
    return dspark__status_name(code);
}

int dspark_isa_available(dspark_isa isa)
{
    return dspark__isa_available(isa);
}

const char *dspark_isa_name(dspark_isa isa)
{
    return dspark__isa_name(isa);
}

dspark_isa dspark_isa_best(void)
{
    return dspark__isa_best();
}

const char *dspark_dtype_name(dspark_dtype dtype)
{
    return dspark__dtype_name(dtype);
}

unsigned dspark_dtype_bits(dspark_dtype dtype)
{
    return dspark__dtype_bits(dtype);
}

/* ---- tensor files ---- */

dspark_status dspark_checkpoint_open(dspark_checkpoint **out, const char *path, dspark_error *err)
{
    dspark__error_clear(err);
    if (!out) return dspark__fail_null(err, "out");
    *out = NULL;
    if (!path) return dspark__fail_null(err, "path");
    return dspark__checkpoint_open(out, path, err);
}

void dspark_checkpoint_close(dspark_checkpoint *ckpt)
{
    dspark__checkpoint_close(ckpt);
}

size_t dspark_checkpoint_tensor_count(const dspark_checkpoint *ckpt)
{
    return ckpt ? dspark__checkpoint_count(ckpt) : 0;
}

const dspark_tensor *dspark_checkpoint_tensor(const dspark_checkpoint *ckpt, size_t i)
{
    return ckpt && i < dspark__checkpoint_count(ckpt) ? dspark__checkpoint_at(ckpt, i) : NULL;
}

const dspark_tensor *dspark_checkpoint_find(const dspark_checkpoint *ckpt, const char *name)
{
    return ckpt && name ? dspark__checkpoint_find(ckpt, name) : NULL;
}

const char *dspark_checkpoint_metadata(const dspark_checkpoint *ckpt, const char *key)
{
    return ckpt && key ? dspark__checkpoint_metadata(ckpt, key) : NULL;
}

void dspark_checkpoint_drop(const dspark_checkpoint *ckpt, const dspark_tensor *tensor,
                            uint64_t offset, uint64_t n_bytes)
{
    if (!ckpt || !tensor || offset >= tensor->n_bytes) return;
    uint64_t left = tensor->n_bytes - offset;
    dspark__checkpoint_drop(ckpt, tensor, offset, n_bytes < left ? n_bytes : left);
}

dspark_status dspark_writer_create(dspark_writer **out, const char *path, dspark_error *err)
{
    dspark__error_clear(err);
    if (!out) return dspark__fail_null(err, "out");
    *out = NULL;
    if (!path) return dspark__fail_null(err, "path");
    return dspark__writer_create(out, path, err);
}

dspark_status dspark_writer_metadata(dspark_writer *w, const char *key, const char *value,
                                     dspark_error *err)
{
    dspark__error_clear(err);
    if (!w || !key || !value) return dspark__fail_null(err, "writer, key or value");
    return dspark__writer_metadata(w, key, value, err);
}

dspark_status dspark_writer_declare(dspark_writer *w, const char *name, dspark_dtype dtype,
                                    uint32_t rank, const uint64_t *shape, dspark_error *err)
{
    dspark__error_clear(err);
    if (!w || !name || (rank && !shape)) return dspark__fail_null(err, "writer, name or shape");
    return dspark__writer_declare(w, name, dtype, rank, shape, err);
}

dspark_status dspark_writer_data(dspark_writer *w, const void *data, size_t n_bytes,
                                 dspark_error *err)
{
    dspark__error_clear(err);
    if (!w || (n_bytes && !data)) return dspark__fail_null(err, "writer or data");
    return dspark__writer_data(w, data, n_bytes, err);
}

dspark_status dspark_writer_commit(dspark_writer *w, dspark_error *err)
{
    dspark__error_clear(err);
    if (!w) return dspark__fail_null(err, "writer");
    return dspark__writer_commit(w, err);
}

void dspark_writer_abort(dspark_writer *w)
{
    dspark__writer_abort(w);
}

dspark_status dspark_file_write(const char *path, const void *data, size_t n_bytes, dspark_error *err)
{
    dspark__error_clear(err);
    if (!path || (n_bytes && !data)) return dspark__fail_null(err, "path or data");
    return dspark__outfile_put(path, data, n_bytes, err);
}

/* ---- inspection ---- */

void dspark_inspect_opts_init(dspark_inspect_opts *opts)
{
    *opts = (dspark_inspect_opts){.struct_size = sizeof *opts};
}

dspark_status dspark_inspect(dspark_inspection **out, const char *path,
                             const dspark_inspect_opts *opts, dspark_error *err)
{
    dspark_inspect_opts own;
    dspark_inspect_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "inspect options", err);
    if (!out) return dspark__fail_null(err, "out");
    *out = NULL;
    if (st != DSPARK_OK) return st;
    if (!path) return dspark__fail_null(err, "path");
    return dspark__inspect(out, path, &own, err);
}

void dspark_inspection_free(dspark_inspection *in)
{
    dspark__inspection_free(in);
}

dspark_verdict dspark_inspection_verdict(const dspark_inspection *in)
{
    return dspark__inspection_verdict(in);
}

const char *dspark_inspection_json(const dspark_inspection *in)
{
    return dspark__inspection_json(in);
}

/* ---- model ---- */

void dspark_model_opts_init(dspark_model_opts *opts)
{
    *opts = (dspark_model_opts){.struct_size = sizeof *opts, .parts = DSPARK_PART_CONTEXT};
}

dspark_status dspark_model_open(dspark_model **out, const char *path,
                                const dspark_model_opts *opts, dspark_error *err)
{
    dspark_model_opts own;
    dspark_model_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "model options", err);
    if (!out) return dspark__fail_null(err, "out");
    *out = NULL;
    if (st != DSPARK_OK) return st;
    if (!path) return dspark__fail_null(err, "path");
    return dspark__model_open(out, path, &own, err);
}

dspark_status dspark_prepacked_parts(const char *path, uint32_t *parts, dspark_error *err)
{
    if (!path || !parts) return dspark__fail_null(err, "path or parts");
    return dspark__prepacked_parts(path, parts, err);
}

dspark_status dspark_prepack(const char *path, const char *out, const dspark_model_opts *opts,
                             dspark_error *err)
{
    dspark_model_opts own;
    dspark_model_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "model options", err);
    if (st != DSPARK_OK) return st;
    if (!path || !out) return dspark__fail_null(err, "path or out");
    return dspark__prepack(path, out, &own, err);
}

dspark_status dspark_prepacked_check(const char *path, const char *file, const dspark_model_opts *opts,
                                     dspark_error *err)
{
    dspark_model_opts own;
    dspark_model_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "model options", err);
    if (st != DSPARK_OK) return st;
    if (!path || !file) return dspark__fail_null(err, "path or file");
    return dspark__prepacked_check(path, file, &own, err);
}

void dspark_model_close(dspark_model *model)
{
    dspark__model_close(model);
}

const dspark_config *dspark_model_config(const dspark_model *model)
{
    return &model->config;
}

uint32_t dspark_model_entry_width(const dspark_model *model)
{
    return model->config.kv_lora_rank + model->config.qk_rope_head_dim;
}

uint64_t dspark_model_resident_bytes(const dspark_model *model)
{
    return dspark__model_resident_bytes(model);
}

const char *dspark_model_fingerprint(const dspark_model *model)
{
    return model->fingerprint;
}

const char *dspark_model_block_fingerprint(const dspark_model *model)
{
    return model->block_fingerprint;
}

/* ---- latent cache ---- */

size_t dspark_cache_entry_bytes(dspark_cache_dtype dtype, uint32_t kv_lora_rank,
                                uint32_t qk_rope_head_dim)
{
    return dspark__cache_entry_bytes(dtype, kv_lora_rank, qk_rope_head_dim);
}

const char *dspark_cache_dtype_name(dspark_cache_dtype dtype)
{
    return dspark__cache_dtype_name(dtype);
}

void dspark_cache_view_init(dspark_cache_view *view)
{
    *view = (dspark_cache_view){.struct_size = sizeof *view};
}

dspark_status dspark_cache_create(dspark_cache **out, const dspark_model *model,
                                  dspark_cache_dtype dtype, uint32_t block_size, uint64_t n_blocks,
                                  const dspark_allocator *allocator, dspark_error *err)
{
    dspark__error_clear(err);
    if (!out) return dspark__fail_null(err, "out");
    *out = NULL;
    if (!model) return dspark__fail_null(err, "model");
    return dspark__cache_create(out, &model->config, dtype, block_size, n_blocks, allocator, err);
}

void dspark_cache_free(dspark_cache *cache)
{
    dspark__cache_free(cache);
}

const dspark_cache_view *dspark_cache_get_view(const dspark_cache *cache)
{
    return dspark__cache_view(cache);
}

uint64_t dspark_cache_bytes(const dspark_config *config, dspark_cache_dtype dtype,
                            uint32_t block_size, uint64_t n_blocks)
{
    return config ? dspark__cache_bytes(config, dtype, block_size, n_blocks) : 0;
}

dspark_status dspark_slots_from_blocks(const int32_t *block_table, size_t n_table,
                                       uint32_t block_size, int32_t null_block,
                                       const int64_t *positions, size_t n, int64_t *slots,
                                       dspark_error *err)
{
    dspark__error_clear(err);
    if (n == 0) return DSPARK_OK;
    if ((n_table && !block_table) || !positions || !slots)
        return dspark__fail_null(err, "block_table, positions or slots");
    if (block_size == 0) return dspark__fail(err, DSPARK_EINVAL, "block_size", "is 0");
    return dspark__slots_from_blocks(block_table, n_table, block_size, null_block, positions, n,
                                     slots, err);
}

/* ---- context KV ---- */

void dspark_context_opts_init(dspark_context_opts *opts)
{
    *opts = (dspark_context_opts){.struct_size = sizeof *opts};
}

dspark_status dspark_plan_context(const dspark_config *config, const dspark_context_opts *opts,
                                  dspark_context_plan *plan, dspark_error *err)
{
    dspark_context_opts own;
    dspark__layout layout;
    dspark_context_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "context options", err);
    if (st != DSPARK_OK) return st;
    if (!config || !plan) return dspark__fail_null(err, "config or plan");
    if ((st = dspark__config_check(config, "config", err)) != DSPARK_OK) return st;
    if ((st = dspark__plan_context(config, &own, &layout, err)) != DSPARK_OK) return st;
    *plan = (dspark_context_plan){layout.total, layout.max_tokens, layout.n_threads};
    return DSPARK_OK;
}

dspark_status dspark_context_create(dspark_context **out, const dspark_model *model,
                                    const dspark_context_opts *opts, dspark_error *err)
{
    dspark_context_opts own;
    dspark_context_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "context options", err);
    if (!out) return dspark__fail_null(err, "out");
    *out = NULL;
    if (st != DSPARK_OK) return st;
    if (!model) return dspark__fail_null(err, "model");
    return dspark__context_create(out, model, &own, err);
}

void dspark_context_free(dspark_context *ctx)
{
    dspark__context_free(ctx);
}

dspark_isa dspark_context_isa(const dspark_context *ctx)
{
    return ctx->kern.isa;
}

dspark_context_plan dspark_context_get_plan(const dspark_context *ctx)
{
    return (dspark_context_plan){ctx->layout.total, ctx->layout.max_tokens, ctx->layout.n_threads};
}

void dspark_batch_init(dspark_batch *batch)
{
    *batch = (dspark_batch){.struct_size = sizeof *batch};
}

dspark_status dspark_context_run(dspark_context *ctx, const dspark_batch *batch,
                                 const dspark_cache_view *cache, dspark_run_info *info,
                                 dspark_error *err)
{
    dspark_batch b;
    dspark_cache_view view;
    dspark_run_info unseen;
    dspark_batch_init(&b);
    dspark_cache_view_init(&view);
    if (!info) info = &unseen;
    *info = (dspark_run_info){.max_position = -1};
    dspark_status st = dspark__take_opts(&b, sizeof b, batch, "batch", err);
    if (st == DSPARK_OK) st = dspark__take_opts(&view, sizeof view, cache, "cache view", err);
    if (st != DSPARK_OK) return st;
    if (!ctx || !batch || !cache) return dspark__fail_null(err, "context, batch or cache");
    return dspark__context_run(ctx, &b, &view, info, err);
}

dspark_status dspark_context_states(dspark_context *ctx, const dspark_batch *batch, void *states,
                                    dspark_error *err)
{
    dspark_batch b;
    dspark_batch_init(&b);
    dspark_status st = dspark__take_opts(&b, sizeof b, batch, "batch", err);
    if (st != DSPARK_OK) return st;
    if (!ctx || !batch || (b.n_tokens && !states)) return dspark__fail_null(err, "context, batch or states");
    return dspark__context_states(ctx, &b, states, err);
}

dspark_status dspark_context_fp64(dspark_context *ctx, const dspark_batch *batch, double *entries,
                                  dspark_error *err)
{
    dspark_batch b;
    dspark_batch_init(&b);
    dspark_status st = dspark__take_opts(&b, sizeof b, batch, "batch", err);
    if (st != DSPARK_OK) return st;
    if (!ctx || !batch || (b.n_tokens && !entries)) return dspark__fail_null(err, "context, batch or entries");
    return dspark__context_fp64(ctx, &b, entries, err);
}

/* ---- synthetic files ---- */

void dspark_synth_opts_init(dspark_synth_opts *opts)
{
    *opts = (dspark_synth_opts){.struct_size = sizeof *opts};
}

dspark_status dspark_synth_checkpoint(const char *dir, const dspark_synth_opts *opts,
                                      dspark_error *err)
{
    dspark_synth_opts own;
    dspark_synth_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "synth options", err);
    if (st != DSPARK_OK) return st;
    if (!dir) return dspark__fail_null(err, "dir");
    return dspark__synth_checkpoint(dir, &own, err);
}

dspark_status dspark_synth_dump(const char *file, const char *ckpt, uint64_t n_tokens,
                                uint64_t seed, dspark_progress progress, void *progress_user,
                                dspark_error *err)
{
    dspark__error_clear(err);
    if (!file || !ckpt) return dspark__fail_null(err, "file or ckpt");
    return dspark__synth_dump(file, ckpt, n_tokens, seed, progress, progress_user, err);
}

/* ---- quantising ---- */

const char *dspark_format_name(dspark_format format)
{
    return dspark__format_name(format);
}

void dspark_quantize_opts_init(dspark_quantize_opts *opts)
{
    *opts = (dspark_quantize_opts){.struct_size = sizeof *opts};
}

dspark_status dspark_quantize(const char *ckpt, const char *out, const dspark_quantize_opts *opts,
                              dspark_error *err)
{
    dspark_quantize_opts own;
    dspark_quantize_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "quantize options", err);
    if (st != DSPARK_OK) return st;
    if (!ckpt || !out || !*out) return dspark__fail_null(err, "ckpt or out");
    if ((own.n_ignore && !own.ignore) || (own.n_targets && !own.targets))
        return dspark__fail_null(err, "ignore or targets");
    return dspark__quantize(ckpt, out, &own, err);
}

/* ---- measuring ---- */

void dspark_digest(const void *data, size_t n_bytes, char hex[33])
{
    dspark__digest d;
    dspark__digest_init(&d);
    dspark__digest_update(&d, data, n_bytes);
    dspark__digest_hex(&d, hex);
}

dspark_status dspark_probe_compute(dspark_isa isa, uint32_t n_threads, double seconds,
                                   double *gflops, dspark_error *err)
{
    dspark__error_clear(err);
    if (!gflops) return dspark__fail_null(err, "gflops");
    return dspark__probe_compute(isa, n_threads, seconds, gflops, err);
}

dspark_status dspark_probe_read(uint32_t n_threads, const void *buffer, size_t n_bytes,
                                double seconds, double *gbytes_per_s, dspark_error *err)
{
    dspark__error_clear(err);
    if (!buffer || !gbytes_per_s) return dspark__fail_null(err, "buffer or result");
    if (n_bytes < 64) return dspark__fail(err, DSPARK_EINVAL, "n_bytes", "%zu, expected 64 or more", n_bytes);
    return dspark__probe_read(n_threads, buffer, n_bytes, seconds, gbytes_per_s, err);
}

dspark_status dspark_context_probe(dspark_context *ctx, double seconds, double *gflops, dspark_error *err)
{
    dspark__error_clear(err);
    if (!ctx || !gflops) return dspark__fail_null(err, "context or gflops");
    *gflops = dspark__probe_window(&ctx->kern, ctx->threads, seconds);
    return DSPARK_OK;
}
