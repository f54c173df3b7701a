/* Quantising for more than one command: the choice of formats, the bar, the report. */
#ifndef DSPARK_CLI_QUANTIZE_H
#define DSPARK_CLI_QUANTIZE_H

#include "dspark/dspark.h"

/* For ARGS_CHOICE, ends with NULL; quantize_format turns the choice into the library's value. */
extern const char *const quantize_formats[];
dspark_format quantize_format(int choice);

/* What is said of it. */
typedef struct quantize_how {
    int quiet, json;
    int compare;        /* also what has become of context entries */
    const char *target; /* and of a drafted block; may be NULL */
    const char *advice; /* what this command has against groups that do not fit, but --group-size; or "" */
} quantize_how;

/* Is the error that groups do not fit the columns of some modules? */
int quantize_is_misfit(const dspark_error *err);

/* Runs dspark_quantize with a bar and prints the table (or JSON, or nothing). Returns an exit code.
 * progress and report of opts are set here. */
int quantize_run(const char *in, const char *out, dspark_quantize_opts *opts, const quantize_how *how);

#endif
