/* The check of every linear of a draft: is its module of a scheme that this library reads, are its
 * scales and shapes right for the config's geometry, does quantization_config agree. Comes after
 * the roster check, which says that a module is there at all. Reads headers and scales, not
 * weights. */
#ifndef DSPARK_QUANT_CHECK_H
#define DSPARK_QUANT_CHECK_H

#include "ckpt/checkpoint.h"
#include "ckpt/config.h"
#include "ckpt/roster.h"
#include "quant/scheme.h"

/* One linear: what it is. */
typedef struct dspark__quant_module {
    char name[96]; /* of the roster, without the suffix: "layers.0.mlp.up_proj" */
    uint64_t rows, k;
    dspark__module module; /* of the file; n_parts is 0 when it is not there */
    dspark__quant_rule rule;
    const dspark__scheme *scheme; /* NULL: refused or absent */
    dspark__packing packing;      /* when scheme is set */
    dspark_status status;         /* DSPARK_OK, or what `why` is about */
    dspark_error why;
} dspark__quant_module;

typedef struct dspark__quant_modules {
    size_t n;
    dspark__quant_module *list; /* in roster order, then lm_head */
} dspark__quant_modules;

/* Look at all linears of the roster of `doc`, and at an lm_head of the draft's own. What is wrong with one of them is said in its `why`,
 * not returned: DSPARK_ENOMEM, DSPARK_EIO and the like are. q may be NULL. */
dspark_status dspark__quant_modules_make(dspark__quant_modules *out, const dspark_checkpoint *ckpt,
                                         const dspark__config_doc *doc,
                                         const dspark__quant_config *q, dspark_error *err);
void dspark__quant_modules_free(dspark__quant_modules *m);
/* By roster name without suffix; NULL when the roster has no such linear. */
const dspark__quant_module *dspark__quant_modules_find(const dspark__quant_modules *m,
                                                       const char *name);

/* Every problem is told to `problem` (may be NULL), as dspark__roster_check does; the error names
 * the first in roster order, broken before not served, and how many more there are. Beside the
 * linears, the scales of a KV cache are checked: finite and above zero. */
dspark_status dspark__quant_check(const dspark_checkpoint *ckpt, const dspark__config_doc *doc,
                                  const dspark__quant_config *q,
                                  void (*problem)(void *user, dspark_status kind,
                                                  const char *tensor, const char *text),
                                  void *user, dspark_error *err);

#endif
