/* The plan of a quantisation: every module of the source, whether it is quantised, and the tensors that
 * stand for it in the output. Private to quantize*.c. Reads headers only. */
#ifndef DSPARK_QUANT_QUANTIZE_PLAN_H
#define DSPARK_QUANT_QUANTIZE_PLAN_H

#include <jansson.h>

#include "base/threads.h"
#include "ckpt/config.h"
#include "ckpt/modules.h"
#include "quant/encode.h"
#include "quant/scheme.h"

#define DSPARK__QM_OUTPUTS (DSPARK__FILE_MODULE_PARTS + 4)

typedef enum dspark__qm_kind {
    DSPARK__QM_COPY,    /* every tensor as it is */
    DSPARK__QM_DENSE,   /* was quantised and is not to be: BF16 */
    DSPARK__QM_QUANTISE
} dspark__qm_kind;

typedef enum dspark__qm_source {
    DSPARK__QM_TENSOR, /* the bytes of `tensor` */
    DSPARK__QM_BF16,   /* the dequantised weight */
    DSPARK__QM_CODES, DSPARK__QM_SCALES, DSPARK__QM_GLOBAL, DSPARK__QM_SHAPE
} dspark__qm_source;

typedef struct dspark__qm_output {
    dspark__qm_source source;
    const char *suffix;
    const dspark_tensor *tensor;
    dspark_dtype dtype;
    uint32_t rank;
    uint64_t shape[DSPARK_MAX_RANK];
    uint64_t n_bytes;
} dspark__qm_output;

/* One module of the source. */
typedef struct dspark__qm {
    const dspark__file_module *file;
    dspark__module module;        /* the same for schemes */
    const dspark__scheme *scheme; /* of the source; NULL for copies */
    dspark__quant_rule rule;
    dspark__qm_kind kind;
    int linear;                   /* a linear layer that could be quantised */
    uint64_t rows, k;
    uint32_t shard;
    dspark__encoder encoder;      /* global is set when it is written */
    uint8_t *scales;              /* while it is written: [units][n_scales] */
    uint64_t *row_hashes;         /* [rows] of what was encoded, kept for the comparison */
    dspark__qm_output outputs[DSPARK__QM_OUTPUTS];
    uint32_t n_outputs;
    uint64_t bytes_before, bytes_after, weight_bytes;
} dspark__qm;

typedef struct dspark__quantize_plan {
    const char *path;
    dspark_checkpoint *ckpt;
    dspark__config_doc *doc;
    dspark__quant_config *quant; /* of the source */
    char *config_text;
    size_t n_config_text;
    dspark__modules modules;
    dspark__qm *list; /* [modules.n] */
    uint32_t n_shards;
    uint64_t total_bytes; /* of all outputs */
    uint64_t work_bytes;  /* of progress */
} dspark__quantize_plan;

/* Open and check the source, decide about each module. Call free also after a failure. */
dspark_status dspark__quantize_plan_make(dspark__quantize_plan *p, const char *path,
                                         const dspark_quantize_opts *opts, dspark_error *err);
void dspark__quantize_plan_free(dspark__quantize_plan *p);

/* A module of a file in the form that schemes take. DSPARK_EUNSUPPORTED when it has too many parts. */
dspark_status dspark__quantize_module(dspark__module *out, const dspark__file_module *m,
                                      dspark_error *err);

#define DSPARK__QM_NAME_BYTES 1100

/* The name of an output tensor. */
void dspark__quantize_tensor_name(char name[DSPARK__QM_NAME_BYTES], const dspark__qm *m,
                                  const dspark__qm_output *o);

/* ---- texts (quantize_config.c); free() them, NULL without memory ---- */

/* The source's config.json with the quantization_config of the output. */
dspark_status dspark__quantize_config_text(char **out, const dspark__quantize_plan *p,
                                           const dspark_quantize_opts *opts, dspark_error *err);
/* hf_quant_config.json of the ModelOpt layout. */
char *dspark__quantize_modelopt_text(const dspark__quantize_plan *p,
                                     const dspark_quantize_opts *opts);
char *dspark__quantize_index_text(const dspark__quantize_plan *p);

/* ---- rows (quantize_rows.c) ---- */

typedef struct dspark__quantize_work {
    dspark__threads *threads;
    const dspark_checkpoint *ckpt;
    uint8_t *codes; /* of one chunk */
    size_t codes_bytes;
    struct dspark__quantize_scratch *scratch; /* [threads] */
    dspark_progress progress;
    void *progress_user;
    uint64_t done, total;
} dspark__quantize_work;

/* Buffers for the largest module of the plan. Call free also after a failure. */
dspark_status dspark__quantize_work_init(dspark__quantize_work *w, const dspark__quantize_plan *p,
                                         const dspark_quantize_opts *opts, dspark_error *err);
void dspark__quantize_work_free(dspark__quantize_work *w);
/* `bytes` of the source have been passed over: tell the caller. DSPARK_ECANCELLED. */
dspark_status dspark__quantize_work_step(dspark__quantize_work *w, uint64_t bytes, const char *name,
                                         dspark_error *err);

/* Set the tensor's scale of m->encoder (one pass over the weight, or one a candidate). */
dspark_status dspark__quantize_absmax(dspark__quantize_work *w, dspark__qm *m, dspark_error *err);
/* Codes to the writer, scales to m->scales, hashes to m->row_hashes. */
dspark_status dspark__quantize_encode(dspark__quantize_work *w, dspark__qm *m, dspark_writer *writer,
                                      dspark_error *err);
/* The weight as BF16 to the writer; hashes to m->row_hashes. */
dspark_status dspark__quantize_dense(dspark__quantize_work *w, dspark__qm *m, dspark_writer *writer,
                                     dspark_error *err);
/* Dequantise every row of `back` by its scheme: DSPARK_EINTERNAL when one is not what was encoded.
 * Fills the errors of *r against the source. */
dspark_status dspark__quantize_compare(dspark__quantize_work *w, const dspark__qm *m,
                                       const dspark__module *back, const dspark__scheme *scheme,
                                       const dspark__quant_rule *rule, dspark_quantize_report *r,
                                       dspark_error *err);

#endif
