/* A linear whose rows come from several checkpoint modules (shards), packed once.
 *
 * Each shard starts a panel of its own, so the same panels serve the whole matrix and any one shard:
 * fusing changes nothing. The only place that knows both scheme and kernel. */
#ifndef DSPARK_MODEL_MERGED_LINEAR_H
#define DSPARK_MODEL_MERGED_LINEAR_H

#include "base/digest.h"
#include "base/threads.h"
#include "ckpt/checkpoint.h"
#include "kern/kern.h"
#include "quant/scheme.h"

typedef struct dspark__shard {
    const dspark__scheme *scheme; /* NULL until filled */
    uint32_t rows;
    uint32_t first_panel;
    uint32_t n_panels;
} dspark__shard;

typedef struct dspark__merged_linear {
    dspark_allocator allocator;
    const char *name;      /* "context_kv"; static */
    uint32_t k;
    uint32_t n_shards;
    uint32_t n_panels;
    uint32_t n_filled;
    dspark__shard *shards; /* [n_shards] */
    uint16_t *panels;      /* [n_panels][panel_stride], 64-byte aligned */
    size_t panel_stride;   /* elements */
    uint64_t bytes;        /* of panels */
} dspark__merged_linear;

/* Bytes of panels for such a linear; 0 on overflow. */
uint64_t dspark__merged_linear_bytes(uint32_t k, uint32_t n_shards, const uint32_t *rows);

dspark_status dspark__merged_linear_init(dspark__merged_linear *ml, const char *name, uint32_t k,
                                         uint32_t n_shards, const uint32_t *rows,
                                         const dspark_allocator *allocator, dspark_error *err);
void dspark__merged_linear_free(dspark__merged_linear *ml);

/* Take the rows of shard `s` from a module, in pieces: each is digested (digest may be NULL), packed
 * by all threads and dropped from memory. DSPARK_EMODEL when the shard is filled already or the shape
 * differs. `step` (may be NULL) hears the bytes of each piece; non-zero is DSPARK_ECANCELLED. */
dspark_status dspark__merged_linear_fill(dspark__merged_linear *ml, uint32_t s,
                                         const dspark_checkpoint *ckpt,
                                         const dspark__module *module, dspark__threads *threads,
                                         dspark__digest *digest,
                                         int (*step)(void *user, uint64_t bytes), void *user,
                                         dspark_error *err);

/* DSPARK_EMODEL naming the first unfilled shard. */
dspark_status dspark__merged_linear_complete(const dspark__merged_linear *ml, dspark_error *err);

/* Floats of accumulator space that dspark__merged_linear_rows needs for up to n_rows rows. */
size_t dspark__merged_linear_acc(size_t n_rows);

/* out[i][o] = bf16(x[i] . W[o]) for panels [p0, p0 + n_panels) of shard `s` (indices within the
 * shard), on the calling thread. out points at the first of these outputs; acc is 64-byte aligned. */
void dspark__merged_linear_rows(const dspark__merged_linear *ml, const dspark__kern *kern,
                                uint32_t s, uint32_t p0, uint32_t n_panels, const void *x,
                                size_t x_stride, size_t n_rows, float *acc, uint16_t *out,
                                size_t out_stride);

#endif
