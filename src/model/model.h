/* An open drafter: config, checkpoint and the packed weights of the parts asked for. Immutable after
 * opening. */
#ifndef DSPARK_MODEL_MODEL_H
#define DSPARK_MODEL_MODEL_H

#include "ckpt/config.h"
#include "model/markov_bound.h"
#include "model/merged_linear.h"
#include "model/prepacked.h"
#include "model/rope.h"

/* A table of bf16 rows that is looked up, not multiplied: a view on a mapped file or the host's memory,
 * at any alignment. */
typedef struct dspark__table {
    const unsigned char *data;
    size_t row_stride; /* bytes */
    uint64_t rows;
    uint32_t cols;
} dspark__table;

/* What the block forward and the heads need beside the context's weights; zero without
 * DSPARK_PART_BLOCK. Filled by model_block.c and borrow.c. */
typedef struct dspark__block_weights {
    dspark__merged_linear q_b;      /* L shards [H * (P + R), Rq] */
    dspark__merged_linear w_uk;     /* L * H shards [C, P]: layer l, head h is shard l * H + h; bf16 */
    dspark__merged_linear w_uv;     /* L * H shards [V, C], likewise */
    dspark__merged_linear o;        /* L shards [h, H * V] */
    dspark__merged_linear gate_up;  /* 2 L shards [F, h]: 2l gate, 2l+1 up */
    dspark__merged_linear down;     /* L shards [h, F] */
    dspark__merged_linear lm_head;  /* 1 shard [vocab, h] */
    dspark__merged_linear markov_w2;    /* 1 shard [vocab, r] */
    dspark__markov_bound markov_bound;  /* of markov_w2; may be empty */
    dspark__merged_linear markov_mix;   /* gated: [r, h + r + 1]; rnn: [3r, 2r + h + 1]: the bias is
                                     * the last column; bf16; else no shard */
    dspark__table embed;            /* [vocab, h] */
    dspark__table markov_w1;        /* [vocab, r] */
    uint16_t *norms;                /* one block; the pointers below point into it */
    size_t norms_bytes;
    uint16_t *input_norm;           /* [L][h] */
    uint16_t *q_a_norm;             /* [L][Rq] */
    uint16_t *post_norm;            /* [L][h] */
    uint16_t *final_norm;           /* [h] */
    uint16_t *confidence;           /* [h (+ r)] bf16, NULL without a confidence head */
    float confidence_bias;          /* 0 when the file has none */
    dspark_checkpoint *target;      /* where embed points into, when it was borrowed; or NULL */
    float softmax_scale;
} dspark__block_weights;

struct dspark_model {
    dspark_allocator allocator;
    dspark_config config;
    dspark_checkpoint *ckpt;
    dspark__prepacked *prepacked;       /* what the linears point into, or NULL: memory of their own */
    dspark__quant_config *quant;        /* NULL when the checkpoint has none */
    uint32_t parts;
    dspark__rope rope;
    dspark__merged_linear context_proj; /* 1 shard [h, T * tap_width] */
    dspark__merged_linear context_kv;   /* L shards [C + R, h] */
    dspark__merged_linear q_a;          /* L shards [Rq, h], only with DSPARK_PART_Q_A or _BLOCK */
    uint16_t *norms;                    /* one block; the pointers below point into it */
    size_t norms_bytes;
    uint16_t *fc_norm;                  /* [T][tap_width], NULL without fc_norm */
    uint16_t *context_norm;             /* [h] */
    uint16_t *kv_a_norm;                /* [L][C] */
    dspark__module *modules;            /* the arrived modules of the context path, for fp64 */
    size_t n_modules;
    char config_digest[33];             /* of config.json and hf_quant_config.json, as they were read */
    char fingerprint[33];
    char block_fingerprint[33];         /* "" without DSPARK_PART_BLOCK */
    dspark__block_weights block;
};

dspark_status dspark__model_open(dspark_model **out, const char *path,
                                 const dspark_model_opts *opts, dspark_error *err);
/* The same for a model that will only be closed, so that an embedding may be missing. With `packer` packed
 * weights go there and are not kept. */
dspark_status dspark__model_open_packing(dspark_model **out, const char *path,
                                         const dspark_model_opts *opts, dspark__packer *packer,
                                         dspark_error *err);
void dspark__model_close(dspark_model *model);
uint64_t dspark__model_resident_bytes(const dspark_model *model);

/* The modules of the context path inside model->modules. */
const dspark__module *dspark__model_context_proj(const dspark_model *model);
const dspark__module *dspark__model_context_kv(const dspark_model *model, uint32_t layer);

#endif
