/* Filling a model's weights from modules of a checkpoint: what model.c (context), model_block.c (layers
 * and heads) and borrow.c (the target's two tensors) share. */
#ifndef DSPARK_MODEL_MODEL_FILL_H
#define DSPARK_MODEL_MODEL_FILL_H

#include "ckpt/names.h"
#include "model/model.h"

typedef struct dspark__filler {
    dspark_model *model;
    const dspark_checkpoint *ckpt;       /* holds the modules */
    const dspark__quant_config *quant;   /* of that checkpoint, or NULL */
    dspark__threads *threads;
    dspark__digest *digest;              /* of everything that is filled; may be NULL */
    const dspark_model_opts *opts;
    dspark__prepacked *prepacked;        /* shards come from there instead; or NULL */
    dspark__packer *packer;              /* shards go there and are not kept; or NULL */
    int no_embed;                        /* the model will not draft: the embedding need not be there */
    int trusted;                         /* the checkpoint's files are those of `prepacked` */
    /* Progress counts weights as bf16, whatever they are stored as: what is stored of the present
     * shard is told in row_bytes a row, each worth row_work. */
    uint64_t done, total;
    uint64_t row_bytes, row_work;
} dspark__filler;

/* Add one tensor to a module. DSPARK_EMODEL when it arrives twice or there are too many. */
dspark_status dspark__module_add(dspark__module *module, const char *suffix,
                                 const dspark_tensor *tensor, dspark_error *err);

/* Report `bytes` more; DSPARK_ECANCELLED with `name` when the caller says stop. */
dspark_status dspark__fill_progress(dspark__filler *f, const char *name, uint64_t bytes,
                                    dspark_error *err);

/* Shape and name of what comes next, into the filler's digest. */
void dspark__fill_mark(dspark__filler *f, const char *name, uint64_t rows, uint64_t k);

/* The module's one tensor `suffix` is BF16 [n], finite; copied to `to`. */
dspark_status dspark__fill_vector(dspark__filler *f, const dspark__module *module, const char *suffix,
                                  const char *name, uint64_t n, uint16_t *to, dspark_error *err);

/* n_shards equal shards named `name` from modules first[0], first[step], ... Each in the scheme it has. */
dspark_status dspark__fill_linear(dspark__filler *f, dspark__merged_linear *ml, const char *name,
                                  uint32_t k, uint32_t n_shards, uint32_t rows_each,
                                  const dspark__module *first, size_t step, dspark_error *err);

/* One shard of a linear that is there already. */
dspark_status dspark__fill_shard(dspark__filler *f, dspark__merged_linear *ml, uint32_t shard,
                                 const dspark__module *module, dspark_error *err);

/* One shard from the host's bf16 rows, `stride` bytes apart. */
dspark_status dspark__fill_rows(dspark__filler *f, dspark__merged_linear *ml, uint32_t shard,
                                const void *rows, size_t stride, dspark_error *err);

/* n shards from finite matrices of the filler's own; unused with `prepacked`. */
dspark_status dspark__fill_own(dspark__filler *f, dspark__merged_linear *ml, uint32_t shard, uint32_t n,
                               const dspark__dense *from, dspark_error *err);

/* A weight of any scheme as dense bf16 [rows][k], every element rounded once, finite. */
dspark_status dspark__fill_dense(dspark__filler *f, const dspark__module *module, const char *name,
                                 uint32_t rows, uint32_t k, uint16_t *to, dspark_error *err);

/* A table that is looked up: BF16 [rows, cols]. The view points into the checkpoint. */
dspark_status dspark__fill_table(dspark__filler *f, const dspark__module *module, const char *name,
                                 uint64_t rows, uint32_t cols, dspark__table *to, dspark_error *err);

/* ---- the parts of opening ---- */

/* Modules that the block and the heads take, behind the context's: how many, and which one an arrival
 * belongs to (index and shard as in names.h); SIZE_MAX for what is not theirs. */
size_t dspark__block_places(const dspark_config *c);
size_t dspark__block_place(const dspark_config *c, dspark__target target, uint32_t index,
                           int32_t shard);
/* Rows of what mixes into the Markov bias (0 for the plain head) and its width *k without the bias;
 * width of the confidence head, 0 without one. */
uint32_t dspark__block_mix(const dspark_config *c, uint32_t *k);
uint32_t dspark__block_confidence(const dspark_config *c);
/* Bytes that filling them will report as progress. */
uint64_t dspark__block_work(const dspark_config *c);
/* Fill model->block but embedding and LM head. modules = the first of the block's places. */
dspark_status dspark__block_fill(dspark__filler *f, const dspark__module *modules,
                                 dspark_error *err);
void dspark__block_free(dspark_model *m);
uint64_t dspark__block_bytes(const dspark_model *m);

/* Embedding and LM head: the draft's own modules (no parts: it has none), the host's, the target's. */
dspark_status dspark__borrow(dspark__filler *f, const dspark__module *own_embed,
                             const dspark__module *own_lm_head, dspark_error *err);
/* The identity of the target's files when the LM head will be theirs, else "". */
dspark_status dspark__borrow_identity(const dspark__filler *f, const dspark__module *own_embed,
                                      const dspark__module *own_lm_head, char hex[33],
                                      dspark_error *err);

#endif
