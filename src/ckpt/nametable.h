/* A set of names, each with the number of its insertion: tensor names, metadata keys, shard names.
 * Finds duplicates at once. Names are borrowed: the caller keeps them alive and unchanged. */
#ifndef DSPARK_CKPT_NAMETABLE_H
#define DSPARK_CKPT_NAMETABLE_H

#include <stddef.h>
#include <stdint.h>

typedef struct dspark__nametable {
    const char **names; /* in order of insertion */
    uint32_t *slots;    /* number + 1, 0 = free; a power of two of them */
    size_t n_names, n_slots, capacity;
    uint64_t seed;
} dspark__nametable;

#define DSPARK__NAMETABLE_NONE ((size_t)-1)

/* Zero-initialised is empty. */
void dspark__nametable_free(dspark__nametable *t);

/* 1: inserted as number *id. 0: already there as number *id. -1: no memory (unchanged). */
int dspark__nametable_put(dspark__nametable *t, const char *name, size_t *id);

/* The name's number or DSPARK__NAMETABLE_NONE. */
size_t dspark__nametable_find(const dspark__nametable *t, const char *name);

#endif
