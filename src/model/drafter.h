/* The compute side of drafting: threads, one workspace for block and heads, and a context for new
 * positions. Owns no cache. Checks a whole call before any work, then drafts in passes of as many
 * sequences as the workspace holds. */
#ifndef DSPARK_MODEL_DRAFTER_H
#define DSPARK_MODEL_DRAFTER_H

#include "base/workspace.h"
#include "model/block.h"
#include "model/context.h"
#include "model/heads.h"

struct dspark_drafter {
    dspark_allocator allocator;
    const dspark_model *model;
    dspark__kern kern;
    dspark__threads *threads;
    dspark_context *context;        /* runs on the same threads */
    dspark__block_layout block;
    dspark__heads_layout heads;
    dspark__workspace workspace;    /* block and heads; locked after creation */
    dspark_drafter_plan plan;
    dspark_draft_times times;
};

/* opts->n_threads must be given. */
dspark_status dspark__plan_drafter(const dspark_config *c, const dspark_drafter_opts *opts,
                                   dspark_drafter_plan *plan, dspark_error *err);
dspark_status dspark__drafter_create(dspark_drafter **out, const dspark_model *model,
                                     const dspark_drafter_opts *opts, dspark_error *err);
void dspark__drafter_free(dspark_drafter *d);
dspark_context *dspark__drafter_context(dspark_drafter *d);
const dspark_model *dspark__drafter_model(const dspark_drafter *d);
dspark_status dspark__draft(dspark_drafter *d, const dspark_cache_view *cache,
                            const dspark_draft_input *in, dspark_draft_output *out, size_t n,
                            dspark_error *err);
/* Outputs as they are before a draft. */
void dspark__draft_reset(dspark_draft_output *out, size_t n);
/* dspark__draft in its two halves, for callers with inputs of their own making. All inputs are checked
 * (`first` is the number of in[0] in messages) before the first is run. */
dspark_status dspark__draft_check(const dspark_drafter *d, const dspark__cache_map *map,
                                  const dspark_draft_input *in, const dspark_draft_output *out, size_t n,
                                  size_t first, dspark_error *err);
dspark_status dspark__draft_run(dspark_drafter *d, const dspark__cache_map *map,
                                const dspark_draft_input *in, dspark_draft_output *out, size_t n,
                                dspark_error *err);
dspark_status dspark__head_logits(dspark_drafter *d, const void *hidden, size_t stride, size_t n,
                                  uint16_t *logits, dspark_error *err);

#endif
