/* Linears over rows, shared out among threads by panels and tiles of rows. */
#ifndef DSPARK_MODEL_LINEAR_H
#define DSPARK_MODEL_LINEAR_H

#include "base/threads.h"
#include "model/merged_linear.h"

/* Rows of a tile at most: a piece of x, sums and weights of a tile fit the L2 cache (1 MB). */
#define DSPARK__TILE_ROWS 128u
/* Rows at most when a listener wants to hear of tiles: they are counted on the stack. */
#define DSPARK__HEARD_ROWS 512u
/* Linears of one call at most. */
#define DSPARK__MAX_LINEARS DSPARK_MAX_LAYERS

/* out[i][0..rows) = linear(x[i]) for all rows of one shard. */
typedef struct dspark__linear {
    const dspark__merged_linear *ml;
    uint32_t shard;
    const void *x;
    size_t x_stride; /* bytes */
    uint16_t *out;
    size_t out_stride; /* elements */
} dspark__linear;

/* Hears of rows [row, row + n) of a linear when all of their outputs are there, once for each row, on the
 * thread that made the last of them. */
typedef struct dspark__linear_listener {
    void (*finished)(void *user, uint32_t linear, size_t row, size_t n);
    void *user;
} dspark__linear_listener;

/* Several linears at once (q_a beside kv_a, gate beside up, all layers of the context): one wake-up of
 * the threads. scratch is [threads][scratch_bytes], 64-byte aligned, for min(n_rows,
 * DSPARK__TILE_ROWS) rows (dspark__merged_linear_scratch). */
void dspark__linears_run(dspark__threads *threads, const dspark__kern *kern,
                         const dspark__linear *linears, uint32_t n_linears, size_t n_rows,
                         void *scratch, size_t scratch_bytes);
/* The same with a listener, for up to DSPARK__MAX_LINEARS linears and DSPARK__HEARD_ROWS rows. */
void dspark__linears_run_heard(dspark__threads *threads, const dspark__kern *kern,
                               const dspark__linear *linears, uint32_t n_linears, size_t n_rows,
                               void *scratch, size_t scratch_bytes,
                               const dspark__linear_listener *listener);

#endif
