/* Context KV: hidden states to cache entries. context_kv.c checks a batch and cuts it into chunks,
 * context_stages.c computes a chunk, context_blame.c says whose overflow it was,
 * context_fp64.c is the fp64 twin of the same mathematics. */
#ifndef DSPARK_MODEL_CONTEXT_H
#define DSPARK_MODEL_CONTEXT_H

#include "base/workspace.h"
#include "model/latent_cache.h"
#include "model/model.h"
#include "model/plan.h"

struct dspark_context {
    dspark_allocator allocator;
    const dspark_model *model;
    dspark__kern kern;
    dspark__threads *threads;
    dspark_path path;
    dspark__layout layout;
    dspark__workspace workspace; /* locked after creation */
};

/* opts->n_threads may be 0 here. */
dspark_status dspark__context_create(dspark_context **out, const dspark_model *model,
                                     const dspark_context_opts *opts, dspark_error *err);
void dspark__context_free(dspark_context *ctx);
dspark_status dspark__context_run(dspark_context *ctx, const dspark_batch *batch,
                                  const dspark_cache_view *cache, dspark_run_info *info,
                                  dspark_error *err);
dspark_status dspark__context_states(dspark_context *ctx, const dspark_batch *batch, void *states,
                                     dspark_error *err);
dspark_status dspark__context_fp64(dspark_context *ctx, const dspark_batch *batch, double *entries,
                                   dspark_error *err);

/* ---- between context_kv.c and context_stages.c ---- */

/* One chunk: n rows (<= layout.max_tokens) of a batch. */
typedef struct dspark__chunk {
    const dspark_context *ctx;
    const dspark_batch *batch;
    const dspark__cache_map *cache;
    size_t row0;          /* first row in the batch */
    size_t n;
    void *views[DSPARK__VIEW_COUNT];
    const unsigned char *x; /* states of this chunk, row i at x + i * x_stride */
    size_t x_stride;
    uint32_t n_active;    /* layers that have a mapping and memory */
    const uint16_t *active;
} dspark__chunk;

/* The first row and layer (row-major) whose numbers were not finite; row == SIZE_MAX when none. */
typedef struct dspark__bad {
    size_t row;
    uint32_t layer;
} dspark__bad;

/* What overflowed in making states or entries is named: the row of the input ("states", "entries") or the
 * checkpoint's tensor or module. DSPARK_ENONFINITE. */
dspark_status dspark__blame_states(const dspark_context *ctx, const dspark_batch *batch, const dspark__bad *bad,
                                   dspark_error *err);
dspark_status dspark__blame_entries(const dspark_context *ctx, const dspark_batch *batch,
                                    const dspark__bad *bad, dspark_error *err);

/* Bytes from one row of the batch's input to the next. */
size_t dspark__batch_stride(const dspark_batch *batch, const dspark_config *config);
/* The slot of a row in a layer; negative when that layer has no mapping. */
static inline int64_t dspark__batch_slot(const dspark_batch *b, uint32_t layer, size_t row)
{
    if (b->slots) return b->slots[row];
    return b->layer_slots[layer] ? b->layer_slots[layer][row] : -1;
}

/* taps -> states of a chunk, into `states` ([n][h], dense). */
void dspark__stage_states(const dspark__chunk *chunk, uint16_t *states, dspark__bad *bad);
/* cos/sin rows of the chunk's positions. */
void dspark__stage_rope(const dspark__chunk *chunk);
/* states -> cache by the context's path; adds entries written to *n_written. */
void dspark__stage_insert(const dspark__chunk *chunk, size_t *n_written, dspark__bad *bad);

#endif
