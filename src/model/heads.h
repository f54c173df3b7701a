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
    DSPARK__HEADS_GREEDY,  /* dspark__greedy_bytes: bounds of panels, codes of vectors */
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

/* ---- between heads.c and heads_greedy.c ---- */

/* The largest of logits, or of logits + bias (may be NULL): its index, the lowest of equals;
 * DSPARK__NO_ARGMAX when a NaN is in the row. */
size_t dspark__heads_largest(const dspark__heads *h, const uint16_t *logits, const uint16_t *bias);

/* n logits times logit_scale, rounded once more; 1 changes nothing and is not applied. */
void dspark__heads_scale(const dspark__heads *h, uint16_t *logits, size_t n);

/* Sequences of one step that are searched together at most: with more, reading W2 once for all of them is
 * cheaper than bounds for each. */
#define DSPARK__GREEDY_ROWS 4u

typedef struct dspark__greedy_row {
    const uint16_t *base;  /* [vocab] logits, logit_scale applied */
    const uint16_t *input; /* [r] what W2 multiplies */
    size_t token;          /* out */
} dspark__greedy_row;

/* Bytes of DSPARK__HEADS_GREEDY; 0 when that overflows. */
int dspark__greedy_bytes(const dspark_config *c, uint32_t n_sequences, size_t *bytes);

/* The tokens that the largest logit + bias gives, with no bias stored. 0 when the plain way must or had
 * better be taken: without bounds, for too many rows, numbers that are none, or when too little could be
 * left out; *hopeless is set when finding that out was not cheap: better not ask again for this block.
 * Counts in times what was read. */
int dspark__greedy_tokens(const dspark__heads *h, dspark__greedy_row *rows, uint32_t n, int *hopeless);

#endif
