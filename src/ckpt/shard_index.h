/* model.safetensors.index.json: which tensor is in which shard. Text only; opens no shard. */
#ifndef DSPARK_CKPT_SHARD_INDEX_H
#define DSPARK_CKPT_SHARD_INDEX_H

#include "ckpt/nametable.h"
#include "dspark/dspark.h"

#define DSPARK__INDEX_MAX_SHARDS 4096u

typedef struct dspark__shard_index {
    char *text;                /* unescaped in place: all names point into it */
    dspark__nametable tensors;
    uint32_t *shard_of;        /* [tensors.n_names] number in shards */
    size_t shard_of_capacity;
    dspark__nametable shards;  /* in order of first mention */
    uint32_t *order;           /* [shards.n_names] shard numbers, sorted by name */
} dspark__shard_index;

/* Read and check `name` in `folder`. metadata.total_size is advisory and not looked at. */
dspark_status dspark__shard_index_read(dspark__shard_index *index, int folder, const char *name,
                                       dspark_error *err);
/* Accepts a zero object. */
void dspark__shard_index_free(dspark__shard_index *index);

#endif
