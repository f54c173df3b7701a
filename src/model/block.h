/* The block forward: N rows of each sequence through the draft's layers over their context. block.c
 * walks the layers, attention.c is one layer's latent attention. Reads the cache, writes only the workspace. */
#ifndef DSPARK_MODEL_BLOCK_H
#define DSPARK_MODEL_BLOCK_H

#include "base/threads.h"
#include "model/latent_cache.h"
#include "model/linear.h"
#include "model/model.h"

/* Sequences of one pass at most: what they are described by lies on the stack. */
#define DSPARK__MAX_SEQUENCES 256u

/* The context of one sequence: entry i of the list is cache slot dspark__context_slot(.., i). */
typedef struct dspark__context_list {
    const int64_t *slots;       /* or NULL */
    const int32_t *block_table;
    uint64_t first, n;          /* entries [first, first + n) are attended to */
} dspark__context_list;

static inline int64_t dspark__context_slot(const dspark__context_list *c, uint32_t block_size,
                                           uint64_t i)
{
    if (c->slots) return c->slots[i];
    return (int64_t)c->block_table[i / block_size] * block_size + (int64_t)(i % block_size);
}

/* One sequence of a block forward. */
typedef struct dspark__block_row {
    dspark__context_list context;
    int64_t anchor, position;
} dspark__block_row;

/* The views of a block forward in the order of the workspace; M = n_sequences * N rows. */
enum {
    DSPARK__BLOCK_RESIDUAL, /* [M][h] bf16 */
    DSPARK__BLOCK_NORMED,   /* [M][h] bf16: a, b of a layer; at the end the hidden states */
    DSPARK__BLOCK_QKV,      /* [M][Rq + C + R] bf16 */
    DSPARK__BLOCK_Q,        /* [M][H][P + R] bf16 */
    DSPARK__BLOCK_QUERY,    /* [n_sequences][H][N][C + R] bf16: absorbed queries, rows of a head together */
    DSPARK__BLOCK_LATENT,   /* [n_sequences][H][N][C] bf16: what attention found */
    DSPARK__BLOCK_ENTRIES,  /* [M][C + R] bf16: the block's own entries, through the cache's dtype */
    DSPARK__BLOCK_OUT,      /* [M][H * V] bf16 */
    DSPARK__BLOCK_MLP,      /* [M][2 F] bf16: gate | up; the product in place of gate */
    DSPARK__BLOCK_DELTA,    /* [M][h] bf16: o or down, before it is added */
    DSPARK__BLOCK_ROPE,     /* [M][2][pairs] fp32 */
    DSPARK__BLOCK_SCRATCH,  /* [threads][scratch_bytes] */
    DSPARK__BLOCK_VIEWS
};

typedef struct dspark__block_layout {
    uint32_t n_sequences; /* most of one pass */
    uint32_t n_threads;
    size_t sizes[DSPARK__BLOCK_VIEWS];
    size_t scratch_bytes; /* of one thread: a merged linear or attention, whichever is larger */
} dspark__block_layout;

/* Sizes for up to n_sequences; 0 when something overflows. Pure. */
int dspark__block_plan(dspark__block_layout *out, const dspark_config *c, uint32_t n_sequences,
                       uint32_t n_threads);

/* What a pass works with. */
typedef struct dspark__block {
    const dspark_model *model;
    const dspark__kern *kern;
    dspark__threads *threads;
    const dspark__block_layout *layout;
    const dspark__cache_map *cache;
    const dspark__block_row *rows; /* [n] */
    uint32_t n;                    /* sequences */
    void **views;                  /* [DSPARK__BLOCK_VIEWS] */
    dspark_draft_times *times;     /* added to */
    dspark_status *status;         /* [n]: DSPARK_ENONFINITE where a number went wrong */
} dspark__block;

/* Rows to hidden states (the caller has entered base/fpenv.h's environment): afterwards views[DSPARK__BLOCK_NORMED] is [n][N][h], after final_norm.
 * Rows of a sequence that has gone wrong are undefined and harm no other. */
void dspark__block_forward(const dspark__block *b);

/* ---- between block.c and its parts ---- */

/* Attention of layer `layer`: QUERY, ENTRIES and the cache to LATENT. */
void dspark__block_attention(const dspark__block *b, uint32_t layer);
/* Bytes of scratch that one thread of it needs. */
size_t dspark__attention_scratch(const dspark_config *c);

/* Nanoseconds of a monotonic clock. */
uint64_t dspark__now(void);
/* The time since *t0 goes to *where, and *t0 becomes now. */
static inline void dspark__lap(uint64_t *where, uint64_t *t0)
{
    uint64_t t = dspark__now();
    *where += t - *t0;
    *t0 = t;
}

#endif
