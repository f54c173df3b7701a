/* An open drafter: config, checkpoint and the packed weights of the parts asked for. Immutable after
 * opening. */
#ifndef DSPARK_MODEL_MODEL_H
#define DSPARK_MODEL_MODEL_H

#include "ckpt/config.h"
#include "model/merged_linear.h"
#include "model/rope.h"

struct dspark_model {
    dspark_allocator allocator;
    dspark_config config;
    dspark_checkpoint *ckpt;
    dspark__quant_config *quant;        /* NULL when the checkpoint has none */
    uint32_t parts;
    dspark__rope rope;
    dspark__merged_linear context_proj; /* 1 shard [h, T * tap_width] */
    dspark__merged_linear context_kv;   /* L shards [C + R, h] */
    dspark__merged_linear q_a;          /* L shards [Rq, h], only with DSPARK_PART_Q_A */
    uint16_t *norms;                    /* one block; the pointers below point into it */
    size_t norms_bytes;
    uint16_t *fc_norm;                  /* [T][tap_width], NULL without fc_norm */
    uint16_t *context_norm;             /* [h] */
    uint16_t *kv_a_norm;                /* [L][C] */
    dspark__module *modules;            /* the arrived modules of the context path, for fp64 */
    size_t n_modules;
    char fingerprint[33];
};

dspark_status dspark__model_open(dspark_model **out, const char *path,
                                 const dspark_model_opts *opts, dspark_error *err);
void dspark__model_close(dspark_model *model);
uint64_t dspark__model_resident_bytes(const dspark_model *model);

/* The modules of the context path inside model->modules. */
const dspark__module *dspark__model_context_proj(const dspark_model *model);
const dspark__module *dspark__model_context_kv(const dspark_model *model, uint32_t layer);

#endif
