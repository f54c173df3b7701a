/* quantize_compare.c: what quantising does to context entries, compare's table between two checkpoints. */
#ifndef DSPARK_CLI_QUANTIZE_COMPARE_H
#define DSPARK_CLI_QUANTIZE_COMPARE_H

#include <jansson.h>

#include "compare_error.h"
#include "dspark/dspark.h"

#define QUANTIZE_COMPARE_ROWS 8u

typedef struct quantize_compare {
    int done;         /* 0: why says why not */
    char why[200];
    uint32_t n_layers;
    /* Against fp64 of the source: part 0 is the latent, 1 the rope key. */
    error_stats source[DSPARK_MAX_LAYERS][2];
    error_stats result[DSPARK_MAX_LAYERS][2];
    /* A block drafted behind these rows; n_drafted 0: whole models were not opened. The result is held to
     * the source's tokens, so that all of its rows can be compared. */
    uint32_t n_drafted, n_equal; /* tokens; those that both choose */
    double logits_rms;           /* of the result's error, relative to the source's logits */
    double confidence_change;    /* the largest; NaN without a confidence head */
} quantize_compare;

/* Synthetic rows through context KV of both, one after the other: memory is that of the larger context
 * part. With a target, or when both have an embedding and an LM head of their own, a block is drafted
 * too: then it is that of the larger model. What would take more than half of the machine's memory is
 * left out, with a reason. */
dspark_status quantize_compare_run(quantize_compare *out, const char *source, const char *result,
                                   const char *target, uint32_t n_threads, dspark_error *err);
/* 0, or -1 without memory. */
int quantize_compare_print(const quantize_compare *c);
json_t *quantize_compare_json(const quantize_compare *c);

#endif
