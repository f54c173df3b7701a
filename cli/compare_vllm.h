/* compare_vllm: what vLLM's merge of quantised shards changes in the entries. */
#ifndef DSPARK_CLI_COMPARE_VLLM_H
#define DSPARK_CLI_COMPARE_VLLM_H

#include <jansson.h>
#include <stdint.h>

#include "dspark/dspark.h"

/* One part (latent or rope key) of one layer. */
typedef struct vllm_part {
    uint64_t n_values;
    uint64_t n_differ;
    uint64_t max_ulp;  /* bf16 numbers between the two */
    double rms_ratio;  /* root mean square by vLLM's merge over the exact one; NaN: of zeros */
} vllm_part;

typedef struct compare_vllm {
    uint32_t n_layers;
    char merged[200];  /* the formats of what vLLM makes one matrix of: "nvfp4_ct in 4, bf16 in 1" */
    int one_scale;     /* are they of a kind of which vLLM keeps one scale? */
    char refused[200]; /* why vLLM would not load this checkpoint; "" when nothing is known against it */
    vllm_part latent[DSPARK_MAX_LAYERS];
    vllm_part rope[DSPARK_MAX_LAYERS];
} compare_vllm;

/* The rows, as the exact way had them. */
typedef struct compare_vllm_rows {
    const char *checkpoint;
    dspark_isa isa;
    uint32_t n_threads;
    size_t n;
    const unsigned char *states; /* [n, h] bf16 */
    const int64_t *positions;    /* [n] */
    const int64_t *slots;        /* [n]: row i is entry i */
} compare_vllm_rows;

/* `exact` holds the rows' bf16 entries without gaps. */
dspark_status compare_vllm_run(compare_vllm *out, const compare_vllm_rows *rows,
                               const dspark_cache_view *exact, dspark_error *err);
/* 0, or -1 without memory. */
int compare_vllm_print(const compare_vllm *result);
json_t *compare_vllm_json(const compare_vllm *result);

#endif
