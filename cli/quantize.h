/* Quantising for more than one command: the choice of formats, the bar, the report. */
#ifndef DSPARK_CLI_QUANTIZE_H
#define DSPARK_CLI_QUANTIZE_H

#include "dspark/dspark.h"

/* For ARGS_CHOICE, ends with NULL; quantize_format turns the choice into the library's value. */
extern const char *const quantize_formats[];
dspark_format quantize_format(int choice);

/* Runs dspark_quantize with a bar and prints the table (or JSON, or nothing when quiet), with `compare`
 * also that of context entries. Returns an exit code. progress and report of opts are set here. */
int quantize_run(const char *in, const char *out, dspark_quantize_opts *opts, int json, int quiet,
                 int compare);

#endif
