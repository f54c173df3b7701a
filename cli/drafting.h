/* drafting: what `draft` and `eval` share: the options of a drafter, the opened model with its target,
 * and one dump's context in a cache from which blocks are drafted at any anchor. */
#ifndef DSPARK_CLI_DRAFTING_H
#define DSPARK_CLI_DRAFTING_H

#include "args.h"
#include "dump.h"

typedef struct drafting_args {
    const char *checkpoint;
    const char *target;
    const char *prepacked;
    int cache_dtype;
    int tile_scale;
    int tile_given;
    uint64_t n_threads;
    int isa;
    uint64_t window;
    uint64_t n_draft;  /* 0 = the whole block */
    double temperature;
    uint64_t top_k;
    double top_p, min_p;
    uint64_t seed;
    int sampled;       /* --temperature was given */
    int noise_given;   /* any option that only matters then */
} drafting_args;

/* The options of all these fields (without checkpoint); `to` has room for DRAFTING_OPTIONS. */
#define DRAFTING_OPTIONS 13
void drafting_options(args_option to[DRAFTING_OPTIONS], drafting_args *a);
void drafting_defaults(drafting_args *a);
/* ARGS_RUN, or 2 after a complaint about options that contradict each other. */
int drafting_check(const args_command *command, const drafting_args *a);

typedef struct drafting {
    const drafting_args *args;
    dspark_model *model;
    int shared;             /* the model belongs to another */
    const dspark_config *config;
    dspark_drafter *drafter;
    dspark_sampling sampling;
    uint32_t batch;         /* sequences of one call */
    /* the context of one dump */
    dspark_cache *cache;
    dspark_cache_view view;
    uint64_t n_blocks;
    int32_t *block_table;   /* 0, 1, 2, ...: entry i of the dump lies at slot i */
    uint64_t start;         /* position of the dump's first row */
    double context_seconds;
} drafting;

/* Open model (with a bar; or take the one of `shared`, which must outlive d) and drafter: n_threads 0 =
 * all, `batch` sequences go together; 0: the model only. */
dspark_status drafting_open(drafting *d, const drafting_args *a, const drafting *shared,
                            uint32_t n_threads, uint32_t batch, dspark_error *err);
/* Compute the entries of all rows of a dump; replaces what was there. bar_label NULL: no bar. */
dspark_status drafting_load(drafting *d, dump *rows, const char *bar_label, dspark_error *err);
/* An input that drafts from row `row`'s token as the anchor, over the rows before it. */
void drafting_input(const drafting *d, const dump *rows, uint64_t row, dspark_draft_input *in);
void drafting_close(drafting *d);

/* The stages of a draft, in the order of the data's path. */
#define DRAFTING_STAGES 14
extern const char *const drafting_stage_names[DRAFTING_STAGES];
/* Nanoseconds of a stage: a member of *t. */
uint64_t *drafting_stage(dspark_draft_times *t, size_t stage);

#endif
