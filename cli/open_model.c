/* open_model: a checkpoint is opened behind a progress bar, and its errors say whose they are. Chooses no
 * option. */
#include "open_model.h"

#include <string.h>

#include "out.h"
#include "progress.h"

dspark_status open_model(dspark_model **model, const char *checkpoint, dspark_model_opts *opts,
                         const char *label, dspark_error *err)
{
    dspark_status st;
    progress bar;
    opts->progress = progress_update;
    opts->progress_user = &bar;
    progress_start(&bar, label, PROGRESS_BYTES);
    st = dspark_model_open(model, checkpoint, opts, err);
    progress_end(&bar);
    opts->progress = NULL;
    opts->progress_user = NULL;
    if (st == DSPARK_OK) return st;
    /* A prepacked file is no part of the checkpoint. */
    if (!opts->prepacked || strncmp(err->where, opts->prepacked, strlen(opts->prepacked)) != 0)
        out_add_checkpoint(err, checkpoint, opts->target);
    return st;
}
