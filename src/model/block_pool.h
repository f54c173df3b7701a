/* The memory of sessions: paged cache blocks with reference counts, and the sessions' tables. Everything
 * is one allocation made at creation. The free list and the counts are guarded by a mutex; an entry is
 * written by one session only, which holds the only reference to its block. */
#ifndef DSPARK_MODEL_BLOCK_POOL_H
#define DSPARK_MODEL_BLOCK_POOL_H

#include <pthread.h>

#include "model/latent_cache.h"
#include "model/model.h"
#include "spec/verify.h"

/* One timeline. `table` has room for the pool's max_length. */
struct dspark_session {
    dspark_pool *pool;
    int open;
    uint64_t length;
    uint32_t n_blocks;          /* of the table that are held */
    int32_t *table;
    int drafted;                /* a draft waits for its accept */
    uint64_t draft_position;    /* of its anchor */
    uint32_t n_drafted;
    dspark_acceptance acceptance;
};

struct dspark_pool {
    dspark_allocator allocator;
    const dspark_model *model;
    dspark_pool_info info;      /* but free_blocks and open_sessions, which change */
    dspark_cache_view view;     /* on the pool's own layers */
    size_t entry_bytes;
    unsigned char *memory;
    size_t memory_bytes;
    void **layers;
    float *scales;              /* [n_layers], or NULL */
    int32_t *free_list;         /* [n_blocks]; the last n_free are free */
    uint32_t *references;       /* [n_blocks] */
    uint64_t n_free;
    struct dspark_session *sessions; /* [max_sessions] */
    pthread_mutex_t mutex;
    int has_mutex;
};

dspark_status dspark__plan_pool(const dspark_config *c, const dspark_pool_opts *opts,
                                dspark_pool_info *info, dspark_error *err);
dspark_status dspark__pool_create(dspark_pool **out, const dspark_model *model,
                                  const dspark_pool_opts *opts, dspark_error *err);
void dspark__pool_free(dspark_pool *pool);
dspark_pool_info dspark__pool_get_info(dspark_pool *pool);

/* Take n blocks into ids[], each with one reference. DSPARK_ENOSPACE takes none. */
dspark_status dspark__pool_take(dspark_pool *pool, int32_t *ids, uint64_t n, dspark_error *err);
/* One more, one less reference to each of n blocks; a block without any is free again. */
void dspark__pool_hold(dspark_pool *pool, const int32_t *ids, uint64_t n);
void dspark__pool_release(dspark_pool *pool, const int32_t *ids, uint64_t n);
/* Has somebody else a reference to the block? */
int dspark__pool_shared(dspark_pool *pool, int32_t id);
/* Copy the first n entries of a block in every layer. */
void dspark__pool_copy(dspark_pool *pool, int32_t to, int32_t from, uint32_t n);

/* An unused session, empty; DSPARK_ENOSPACE when there is none. */
dspark_status dspark__pool_open_session(dspark_session **out, dspark_pool *pool, dspark_error *err);
void dspark__pool_close_session(dspark_session *s);

#endif
