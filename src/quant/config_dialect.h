/* What the dialects of quantization_config share: the object they fill, and how they add to it.
 * Private to quant_config.c and config_*.c of this folder. */
#ifndef DSPARK_QUANT_CONFIG_DIALECT_H
#define DSPARK_QUANT_CONFIG_DIALECT_H

#include "ckpt/config_value.h"
#include "quant/match.h"
#include "quant/quant_config.h"

#define DSPARK__QUANT_MAX_GROUPS  4096u
#define DSPARK__QUANT_MAX_ENTRIES 65536u /* names and patterns, of targets and of ignore lists */
#define DSPARK__QUANT_MAX_COST    32768u /* instructions of all patterns together */
#define DSPARK__QUANT_MAX_NOTES   8u

/* A target: a pattern and the rule it leads to. Lower tiers win, then the order of the file. */
typedef struct dspark__quant_target {
    dspark__match match;
    uint32_t group, tier;
} dspark__quant_target;

struct dspark__quant_config {
    dspark__quant_method method;
    int dense_bits;
    size_t n_groups, n_targets, n_ignored, n_notes;
    size_t groups_cap, targets_cap, ignored_cap, cost;
    dspark__quant_rule *groups; /* method and dense_bits are filled in at the end */
    dspark__quant_target *targets;
    dspark__match *ignored;
    char notes[DSPARK__QUANT_MAX_NOTES][160];
    char text[200];
};

/* An object within an object, with the path for error texts. */
typedef struct dspark__quant_cursor {
    dspark__cfg cfg;
    char prefix[256];
} dspark__quant_cursor;

void dspark__quant_descend(dspark__quant_cursor *to, const dspark__cfg *from, const char *key,
                           const json_t *object);

/* Notes beyond the eighth are dropped. */
void dspark__quant_note(dspark__quant_config *q, const char *fmt, ...) DSPARK__PRINTF(2, 3);

dspark_status dspark__quant_add_group(dspark__quant_config *q, const dspark__cfg *g,
                                      const dspark__quant_rule *rule, uint32_t *group);
/* `key` names the field in errors. */
dspark_status dspark__quant_add_target(dspark__quant_config *q, const dspark__cfg *g,
                                       const char *key, dspark__match_kind kind, const char *text,
                                       uint32_t group, uint32_t tier);
dspark_status dspark__quant_add_ignored(dspark__quant_config *q, const dspark__cfg *g,
                                        const char *key, dspark__match_kind kind, const char *text);

/* How a dialect reads an entry: *kind and *text (behind "re:"). */
typedef void dspark__quant_entry(const char *entry, dspark__match_kind *kind, const char **text);
void dspark__quant_entry_ct(const char *entry, dspark__match_kind *kind, const char **text);
void dspark__quant_entry_glob(const char *entry, dspark__match_kind *kind, const char **text);
void dspark__quant_entry_path(const char *entry, dspark__match_kind *kind, const char **text);

/* The array of strings `key`, each entry onto the ignore list; *present says whether there is
 * one. */
dspark_status dspark__quant_add_ignore_list(dspark__quant_config *q, const dspark__cfg *g,
                                            const char *key, dspark__quant_entry *read,
                                            int *present);

/* One name of a table, whatever its case: its index, or -1. */
int dspark__quant_word(const char *const *words, size_t n, const char *word);

/* [rows, cols], or the older "rowsxcols"; *present = 0 and nothing else when the key is absent. */
dspark_status dspark__quant_block(const dspark__cfg *g, const char *key, uint32_t *rows,
                                  uint32_t *cols, int *present);

/* Refuses members whose name holds "rotat" or "transform" and that are not empty or false: they
 * change activations, so weights alone would be another network. */
dspark_status dspark__quant_refuse_rotations(const dspark__cfg *g);

/* One per dialect: g stands on the quantization_config itself. */
dspark_status dspark__quant_read_ct(dspark__quant_config *q, const dspark__cfg *g);
dspark_status dspark__quant_read_fp8(dspark__quant_config *q, const dspark__cfg *g);
dspark_status dspark__quant_read_modelopt(dspark__quant_config *q, const dspark__cfg *g);
dspark_status dspark__quant_read_quark(dspark__quant_config *q, const dspark__cfg *g);

/* ModelOpt's object with quant_algo: the config itself or its member "quantization". */
dspark_status dspark__quant_modelopt_object(dspark__quant_cursor *to, const dspark__cfg *g);

#endif
