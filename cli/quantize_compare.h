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
} quantize_compare;

/* Synthetic rows through context KV of both, one after the other: memory is that of the larger context
 * part. Is left out, with a reason, where that is more than half of the machine's. */
dspark_status quantize_compare_run(quantize_compare *out, const char *source, const char *result,
                                   uint32_t n_threads, dspark_error *err);
/* 0, or -1 without memory. */
int quantize_compare_print(const quantize_compare *c);
json_t *quantize_compare_json(const quantize_compare *c);

#endif
