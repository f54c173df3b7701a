/* Quantisation schemes: one row of a table each. A scheme is found by what is in the file (suffixes,
 * dtypes, shapes) and knows how to pack its tensors into panels and how to dequantise a row (the
 * reference). A further scheme is a further row and a further file beside this one. */
#ifndef DSPARK_QUANT_SCHEME_H
#define DSPARK_QUANT_SCHEME_H

#include "dspark/dspark.h"

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

typedef struct dspark__scheme {
    const char *name; /* "bf16" */
    /* Is this module of this scheme? Looks at suffixes and dtypes only. */
    int (*detect)(const dspark__module *m);
    /* Every shape and dtype, for a weight [rows, k]. */
    dspark_status (*validate)(const dspark__module *m, uint64_t rows, uint64_t k, dspark_error *err);
    /* Rows [row0, row0 + n) of the module into panels; row0 is a multiple of DSPARK__PANEL. */
    void (*pack)(const dspark__module *m, uint16_t *panels, uint64_t row0, uint64_t n, uint64_t k);
    /* One row as doubles, exactly what the scheme defines. */
    void (*dequantise)(const dspark__module *m, uint64_t row, uint64_t k, double *out);
} dspark__scheme;

/* The scheme of a module. DSPARK_EUNSUPPORTED names the module and what it carries when no row of the
 * table fits. */
dspark_status dspark__scheme_detect(const dspark__scheme **out, const dspark__module *m,
                                    dspark_error *err);

extern const dspark__scheme dspark__scheme_bf16;

#endif
