/* open_model: a checkpoint is opened behind a progress bar. */
#ifndef DSPARK_CLI_OPEN_MODEL_H
#define DSPARK_CLI_OPEN_MODEL_H

#include "dspark/dspark.h"

/* dspark_model_open with a bar named `label` that Ctrl-C ends; opts' progress is set here. An error names
 * the checkpoint, or opts' target when it is that one's. */
dspark_status open_model(dspark_model **model, const char *checkpoint, dspark_model_opts *opts,
                         const char *label, dspark_error *err);

#endif
