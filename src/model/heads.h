/* The heads: hidden states of one block to tokens. Base logits of all rows at once, then from left to
 * right the Markov bias of the token before, the choice, and the confidence. */
#ifndef DSPARK_MODEL_HEADS_H
#define DSPARK_MODEL_HEADS_H

#include "base/threads.h"
#include "model/model.h"

enum {
    DSPARK__HEADS_LOGITS,  /* [n_sequences * N][vocab] bf16: base */
    DSPARK__HEADS_BIAS,    /* [n_sequences][vocab] bf16: Markov bias of one step, then the sum */
    DSPARK__HEADS_STATE,   /* [n_sequences][...] bf16: embeddings, gates, rnn state of a step */
    DSPARK__HEADS_PROBS,   /* [vocab] fp32, when one samples and the caller does not want probs */
    DSPARK__HEADS_SCRATCH, /* [threads][scratch_bytes] */
    DSPARK__HEADS_VIEWS
};

typedef struct dspark__heads_layout {
    uint32_t n_sequences, n_threads;
    size_t sizes[DSPARK__HEADS_VIEWS];
    size_t scratch_bytes;
} dspark__heads_layout;

/* 0 when something overflows. Pure. */
int dspark__heads_plan(dspark__heads_layout *out, const dspark_config *c, uint32_t n_sequences,
                       uint32_t n_threads);

typedef struct dspark__heads {
    const dspark_model *model;
    const dspark__kern *kern;
    dspark__threads *threads;
    const dspark__heads_layout *layout;
    const uint16_t *hidden;          /* [n][N][h] */
    uint32_t n;
    const dspark_draft_input *in;    /* [n] */
    dspark_draft_output *out;        /* [n]: status is DSPARK_OK or that of a failed forward */
    const uint32_t *n_tokens;        /* [n] tokens to take (<= N); 0 for a failed sequence */
    void **views;
    dspark_draft_times *times;
} dspark__heads;

/* Fill tokens, confidence, probs, logits, status and n_tokens of every output. */
void dspark__heads_run(const dspark__heads *h);

/* Base logits of n rows (n <= n_sequences * N) alone: out [n][vocab], logit_scale applied. Uses layout,
 * views, kern, threads and model of h. */
void dspark__heads_logits(const dspark__heads *h, const void *x, size_t x_stride, size_t n,
                          uint16_t *out);

#endif
