/* Quantisation schemes: one row of a table each. A scheme is found by what is in the file (suffixes,
 * dtypes, shapes), checked against the config, and turned into one packed form that kernels read
 * (kern/kern.h): bf16 panels, or panels of codes with scales. A further scheme is a further row and a
 * further file beside this one.
 *
 * What a scheme's weight is, exactly, is its dequantise function (the reference); what a product with
 * it is, docs/numerics.md section 2 says: codes times folded block scales are exact in bf16 and are
 * multiplied as bf16; a K-group's finished sum is scaled in fp32; a row's scale multiplies the end. */
#ifndef DSPARK_QUANT_SCHEME_H
#define DSPARK_QUANT_SCHEME_H

#include "dspark/dspark.h"
#include "kern/kern.h"
#include "quant/quant_config.h"

#define DSPARK__MODULE_PARTS 12

/* The tensors of one module: "layers.0.mlp.up_proj" with weight, weight_scale, ... */
typedef struct dspark__module {
    char name[192];   /* as in the file, without the suffix */
    uint32_t n_parts;
    struct {
        const char *suffix;
        const dspark_tensor *tensor;
    } parts[DSPARK__MODULE_PARTS];
} dspark__module;

const dspark_tensor *dspark__module_part(const dspark__module *m, const char *suffix);

/* The form of a packed shard of `rows` x k. Everything but the bytes. */
typedef struct dspark__packing {
    uint32_t bits;               /* 16: bf16 panels; 8 or 4: panels of codes in `format` */
    dspark__code_format format;  /* when bits < 16 */
    uint32_t group;              /* values of k whose finished sum is scaled (a multiple of 8); 0 = none */
    int row_scale;               /* 1: each output's sum is multiplied at the end */
    int permuted;                /* 1: columns are reordered (act-order): x is gathered first */
    int narrow;                  /* 1: bf16 whose last panel may be narrow (kern/kern.h) */
} dspark__packing;

/* Where a scheme packs one panel (48 rows; missing rows get code of value 0 and scale 1). */
typedef struct dspark__panel_out {
    const dspark__kern *kern;    /* what moves codes quickly; NULL: plainly */
    void *codes;                 /* bf16 panel, or codes: dspark__code_panel_bytes, written whole; 64-byte aligned */
    uint8_t *scales;             /* dspark__code_scale_bytes, or NULL */
    float *group_scales;         /* [ceil(k / group)][48], or NULL */
    float *row_scales;           /* [48], or NULL */
} dspark__panel_out;

typedef struct dspark__scheme {
    const char *name;            /* "bf16", "fp8_tensor", "nvfp4_ct", ... */
    const char *text;            /* for people: "FP8 E4M3, one scale per tensor" */
    /* Is this module of this scheme? Suffixes, dtypes and shapes decide; q (may be NULL: no
     * quantization_config) only resolves what they leave open. */
    int (*detect)(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows, uint64_t k);
    /* Every shape, dtype and value that must hold for a weight [rows, k], and agreement with q.
     * Reads scales, not weights. Fills *p. DSPARK_EMODEL, DSPARK_EUNSUPPORTED. */
    dspark_status (*validate)(const dspark__module *m, const dspark__quant_rule *q, uint64_t rows,
                              uint64_t k, dspark__packing *p, dspark_error *err);
    /* Rows [row0, row0 + n) into one panel; n <= 48, row0 a multiple of 48. Cannot fail. */
    void (*pack)(const dspark__module *m, const dspark__packing *p, const dspark__quant_rule *q,
                 uint64_t row0, uint64_t n, uint64_t rows, uint64_t k, const dspark__panel_out *out);
    /* perm[i] = the column of the file that is packed at place i; only for permuted packings. */
    void (*permutation)(const dspark__module *m, uint64_t k, uint32_t group, uint32_t *perm);
    /* One row as doubles, exactly, in the file's column order. */
    void (*dequantise)(const dspark__module *m, const dspark__quant_rule *q, uint64_t row,
                       uint64_t rows, uint64_t k, double *out);
} dspark__scheme;

/* The scheme of a module. DSPARK_EUNSUPPORTED / DSPARK_EMODEL name the module, what it carries and what
 * would be served. */
dspark_status dspark__scheme_detect(const dspark__scheme **out, const dspark__module *m,
                                    const dspark__quant_rule *q, uint64_t rows, uint64_t k,
                                    dspark_error *err);
/* All schemes, for listing. */
const dspark__scheme *const *dspark__scheme_table(size_t *n);

#endif
