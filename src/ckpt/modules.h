/* Modules of an open checkpoint: tensors grouped by the name before the last dot, and the weight
 * format that the presence of tensors and their dtypes tell. Looks at headers only, knows no
 * model. */
#ifndef DSPARK_CKPT_MODULES_H
#define DSPARK_CKPT_MODULES_H

#include "ckpt/checkpoint.h"
#include "ckpt/nametable.h"

#define DSPARK__FILE_MODULE_PARTS 12

typedef enum dspark__module_state {
    DSPARK__MODULE_BF16,      /* plain BF16: served */
    DSPARK__MODULE_DENSE,     /* F16 or F32 */
    DSPARK__MODULE_QUANTISED, /* codes and their scales, also of kinds that no scheme reads */
    DSPARK__MODULE_REFUSED,   /* known, and read by nothing here: GPTQ, AWQ, F64 */
    DSPARK__MODULE_BROKEN,    /* contradicts itself: codes without a scale, ... */
    DSPARK__MODULE_OTHER      /* no weight at all, integers, ... */
} dspark__module_state;

typedef struct dspark__file_module {
    const char *name; /* of the file, without the suffix */
    uint32_t n_parts; /* may exceed DSPARK__FILE_MODULE_PARTS; later ones are not kept */
    struct {
        const char *suffix;
        const dspark_tensor *tensor;
    } parts[DSPARK__FILE_MODULE_PARTS];
} dspark__file_module;

typedef struct dspark__modules {
    size_t n;
    dspark__file_module *list; /* in file order of their first tensor */
    uint32_t *of_tensor;       /* [tensors of the checkpoint]: which of the list */
    char *names;               /* storage of the names */
    dspark__nametable index;
} dspark__modules;

/* Zeroes *out on failure. The checkpoint must outlive it. */
dspark_status dspark__modules_make(dspark__modules *out, const dspark_checkpoint *ckpt,
                                   dspark_error *err);
void dspark__modules_free(dspark__modules *m);

/* The module of the checkpoint's tensor i. */
const dspark__file_module *dspark__modules_of(const dspark__modules *m, size_t i);
const dspark_tensor *dspark__file_module_part(const dspark__file_module *m, const char *suffix);

/* What the module's tensors are; *scheme is a word or two for people ("bf16", "fp8 per-channel",
 * "nvfp4 (compressed-tensors)") or, when broken, what contradicts. Static storage. */
dspark__module_state dspark__file_module_state(const dspark__file_module *m, const char **scheme);

#endif
