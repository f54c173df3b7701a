/* outputs: the files that a command is to write, looked at before it works. */
#ifndef DSPARK_CLI_OUTPUTS_H
#define DSPARK_CLI_OUTPUTS_H

#include "args.h"

typedef struct output_path {
    const char *option; /* "--out"; NULL: an operand */
    const char *path;   /* NULL: not asked for */
    int late;           /* it is opened only after minutes of work: try it now */
} output_path;

/* No output may take the place of an input (NULL: none) or of another output, be a folder, a device or
 * a pipe. Returns ARGS_RUN, or an exit code after saying why. */
int outputs_check(const args_command *command, const output_path *outputs, size_t n,
                  const char *const *inputs, size_t n_inputs);

#endif
