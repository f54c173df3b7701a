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
    uint32_t n_panels;
    dspark__packing packing;
    unsigned char *codes;         /* [n_panels][code_stride] bytes: bf16 panels (the last one may be narrow) or
                                   * codes, 64-byte aligned */
    size_t code_stride;
    uint8_t *scales;              /* [n_panels][scale_stride] bytes, or NULL */
    size_t scale_stride;
    float *group_scales;          /* [n_panels][n_groups][48], or NULL */
    uint32_t n_groups;
    float *row_scales;            /* [n_panels][48], or NULL */
    uint32_t *perm;               /* [k] columns in packed order, or NULL */
    void *memory;                 /* the one allocation behind the five; NULL: somebody else's memory or the arena */
    uint64_t memory_bytes;
    uint64_t bytes;               /* of the packed shard */
} dspark__shard;

typedef struct dspark__merged_linear {
    dspark_allocator allocator;
    const char *name;      /* "context_kv"; static */
    uint32_t k;
    uint32_t n_shards;
    uint32_t n_filled;
    dspark__shard *shards; /* [n_shards] */
    uint64_t bytes;        /* of packed weights, over the filled shards */
    int alike;             /* the shards will be packed alike: the first one to take memory takes it for all */
    int narrow;            /* what is filled from memory may end with a narrow panel; none is filled yet */
    unsigned char *arena;  /* of dspark__merged_linear_reserve, or NULL */
    uint64_t arena_bytes;
    dspark__packing arena_packing; /* that its places are made for */
} dspark__merged_linear;

/* Bytes that a packed shard of `rows` x k takes in memory; 0 when that overflows. */
uint64_t dspark__packing_bytes(const dspark__packing *packing, uint64_t rows, uint64_t k);
/* The packing of plain bf16, and of bf16 whose last panel may be narrow. */
extern const dspark__packing dspark__packing_bf16, dspark__packing_narrow;

dspark_status dspark__merged_linear_init(dspark__merged_linear *ml, const char *name, uint32_t k,
                                         uint32_t n_shards, const uint32_t *rows,
                                         const dspark_allocator *allocator, dspark_error *err);
/* The same with n_shards shards of `rows` each. */
dspark_status dspark__merged_linear_init_even(dspark__merged_linear *ml, const char *name, uint32_t k,
                                              uint32_t n_shards, uint32_t rows,
                                              const dspark_allocator *allocator,
                                              dspark_error *err);
void dspark__merged_linear_free(dspark__merged_linear *ml);

/* One block of memory, shard behind shard, for many small ones that will all be filled from dense rows:
 * what reads them in order reads one stream of huge pages. Before any is filled; shards that are larger than
 * bf16 or streamed take memory of their own. Shards that are `alike` get such a block without asking when they
 * are a few MB each: codes and scales at their ends would lie in small pages. */
dspark_status dspark__merged_linear_reserve(dspark__merged_linear *ml, dspark_error *err);

/* ---- filling: merged_fill.c ---- */

/* Memory for a shard whose packing is known; `streamed`: without room for codes, which is then NULL. */
dspark_status dspark__shard_take_memory(dspark__merged_linear *ml, uint32_t s, int streamed,
                                        dspark_error *err);
/* Let the shard be what lies packed at `at` already (64-byte aligned, of dspark__packing_bytes), which
 * must outlive it. */
void dspark__shard_attach(dspark__merged_linear *ml, uint32_t s, const dspark__packing *packing,
                          const dspark__scheme *scheme, void *at);
/* Zeros where nothing lies between the parts of a shard: bytes that go into a file. */
void dspark__shard_clear_gaps(const dspark__merged_linear *ml, uint32_t s);
/* Everything of a filled shard but its codes, as it lies behind them; 0 bytes: nothing. */
const void *dspark__shard_rest(const dspark__shard *shard, size_t *bytes);
/* Give the memory of a filled shard back; it counts as filled and must not be used any more. */
void dspark__shard_release(dspark__merged_linear *ml, uint32_t s);

struct dspark__packer; /* prepacked.h */

/* Where a shard's weights come from and who hears of it. */
typedef struct dspark__fill {
    const dspark_checkpoint *ckpt;
    const dspark__module *module;
    const dspark__quant_rule *rule;   /* NULL: the config says nothing of it */
    dspark__threads *threads;
    dspark__digest *digest;           /* takes a digest of each row as stored, in order; may be NULL */
    int (*step)(void *user, uint64_t bytes); /* hears the bytes of each piece; non-zero cancels; NULL */
    void *user;
    struct dspark__packer *packer;    /* takes the packed bytes, which are then kept nowhere; or NULL */
} dspark__fill;

/* Take the rows of shard `s` from a module: find its scheme, check it, pack it with all threads in
 * pieces that are dropped from memory once read. DSPARK_EMODEL when the shard is filled already or the
 * shape differs, DSPARK_ECANCELLED, DSPARK_ENOMEM. */
dspark_status dspark__merged_linear_fill(dspark__merged_linear *ml, uint32_t s,
                                         const dspark__fill *fill, dspark_error *err);

/* Feed the fill's digest with what filling from this module feeds it, and pack nothing. */
dspark_status dspark__merged_linear_hash(const dspark__merged_linear *ml, uint32_t s,
                                         const dspark__fill *fill, dspark_error *err);

/* The same for rows in memory, as dspark__merged_linear_fill_rows takes them. */
dspark_status dspark__merged_linear_hash_rows(const dspark__merged_linear *ml, uint32_t s, const void *rows,
                                              size_t stride, const dspark__fill *fill, dspark_error *err);

/* Take them from bf16 rows in memory that lie `stride` bytes apart, as dspark__merged_linear_fill does; of the
 * fill, module and checkpoint are not used. DSPARK_ENONFINITE names row and column. */
dspark_status dspark__merged_linear_fill_rows(dspark__merged_linear *ml, uint32_t s, const void *rows,
                                              size_t stride, const dspark__fill *fill,
                                              dspark_error *err);

/* ---- filling from memory: merged_dense.c ---- */

/* Finite bf16 matrices in memory, one for each of some shards: that of the next one is `step` elements on. */
typedef struct dspark__dense {
    const uint16_t *w;
    size_t step, stride; /* in elements; stride: from row to row */
    int turned;          /* the rows are the columns of what is packed */
} dspark__dense;

/* Fill n shards of equal size from `first` on, on all threads (NULL: this one). They take memory of their own, or
 * of dspark__merged_linear_reserve. */
dspark_status dspark__merged_linear_fill_many(dspark__merged_linear *ml, uint32_t first, uint32_t n,
                                              const dspark__dense *from, dspark__threads *threads,
                                              dspark_error *err);
/* Take the rows of shard `s` from dense finite bf16 [rows][k] in memory. */
dspark_status dspark__merged_linear_fill_dense(dspark__merged_linear *ml, uint32_t s,
                                               const uint16_t *w, dspark_error *err);

/* DSPARK_EMODEL naming the first unfilled shard. */
dspark_status dspark__merged_linear_complete(const dspark__merged_linear *ml, dspark_error *err);

/* Merge the filled shards as vLLM does (docs/numerics.md): NVFP4 under the largest global scale
 * without rescaling, per-tensor FP8 requantised to the largest scale; other schemes stay as they are.
 * Changes numbers. Returns what was done, static: "exact" when nothing had to change. */
const char *dspark__merged_linear_vllm_compat(dspark__merged_linear *ml);

/* Bytes of scratch that dspark__merged_linear_rows needs for up to n_rows rows. */
size_t dspark__merged_linear_scratch(size_t n_rows);

/* out[i][o] = bf16(x[i] . W[o]) for panels [p0, p0 + n_panels) of shard `s` (indices within the
 * shard), on the calling thread. out points at the first of these outputs; scratch is 64-byte
 * aligned. What the product is, docs/numerics.md says for each scheme. */
void dspark__merged_linear_rows(const dspark__merged_linear *ml, const dspark__kern *kern,
                                uint32_t s, uint32_t p0, uint32_t n_panels, const void *x,
                                size_t x_stride, size_t n_rows, void *scratch, uint16_t *out,
                                size_t out_stride);
/* The same. next, or NULL: weights that the thread goes on with, which then may be fetched early. */
void dspark__merged_linear_rows_then(const dspark__merged_linear *ml, const dspark__kern *kern,
                                     uint32_t s, uint32_t p0, uint32_t n_panels, const void *x,
                                     size_t x_stride, size_t n_rows, void *scratch, uint16_t *out,
                                     size_t out_stride, const void *next);

#endif
