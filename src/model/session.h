/* One sequence's timeline over a pool: append, draft, accept, rewind, fork; session_file.c stores it.
 * Rows behind the accepted ones are made invisible by the length, never copied back. */
#ifndef DSPARK_MODEL_SESSION_H
#define DSPARK_MODEL_SESSION_H

#include "model/block_pool.h"
#include "model/drafter.h"

dspark_status dspark__session_append(dspark_session *s, dspark_drafter *d, uint64_t first,
                                     const void *taps, size_t taps_width, size_t taps_stride, size_t n,
                                     dspark_error *err);
dspark_status dspark__sessions_draft(dspark_session *const *s, dspark_drafter *d,
                                     const dspark_draft_input *in, dspark_draft_output *out, size_t n,
                                     dspark_error *err);
dspark_status dspark__session_accept(dspark_session *s, uint32_t n_accepted, dspark_error *err);
dspark_status dspark__session_rewind(dspark_session *s, uint64_t length, dspark_error *err);
dspark_status dspark__session_fork(dspark_session **out, dspark_session *s, dspark_error *err);
dspark_status dspark__session_save(dspark_session *s, const char *path, dspark_error *err);
dspark_status dspark__session_load(dspark_session **out, dspark_pool *pool, const char *path,
                                   dspark_error *err);

/* Make the table hold the blocks of `length` positions, the last of which this session may write to.
 * DSPARK_ENOSPACE changes nothing. */
dspark_status dspark__session_reserve(dspark_session *s, uint64_t length, dspark_error *err);
/* Give back the blocks behind the session's length. */
void dspark__session_trim(dspark_session *s);

static inline int64_t dspark__session_slot(const dspark_session *s, uint64_t position)
{
    const uint32_t size = s->pool->info.block_size;
    return (int64_t)s->table[position / size] * size + (int64_t)(position % size);
}

#endif
