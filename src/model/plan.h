/* What memory a context takes: pure functions of config and options. */
#ifndef DSPARK_MODEL_PLAN_H
#define DSPARK_MODEL_PLAN_H

#include "dspark/dspark.h"

#define DSPARK__DEFAULT_TOKENS 512u

/* The views of one step, in the order of the workspace. */
enum {
    DSPARK__VIEW_TAPS,     /* [m][T * tap_width] bf16 after fc_norm; empty without it */
    DSPARK__VIEW_STATES,   /* [m][h] bf16 */
    DSPARK__VIEW_ENTRIES,  /* bf16: [layers][rows of a turn] entries, or a layer's of the other paths */
    DSPARK__VIEW_SCRATCH,  /* [threads][scratch_bytes] */
    DSPARK__VIEW_ROPE,     /* [m][2][pairs] fp32 */
    DSPARK__VIEW_SLOTS,    /* hash table of int64 */
    DSPARK__VIEW_COUNT
};

typedef struct dspark__layout {
    uint32_t max_tokens;
    uint32_t n_threads;
    size_t sizes[DSPARK__VIEW_COUNT];
    size_t total;
    size_t scratch_bytes;  /* of one thread, for a merged linear */
    size_t slot_table;     /* entries, a power of two */
} dspark__layout;

/* opts->n_threads must be given (> 0). */
dspark_status dspark__plan_context(const dspark_config *config, const dspark_context_opts *opts,
                                   dspark__layout *layout, dspark_error *err);

#endif
