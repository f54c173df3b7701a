/* A file that appears whole or not at all: written under another name, or under none, in the same folder,
 * synced, and renamed into place. The one place of the library that does so. */
#ifndef DSPARK_CKPT_OUTFILE_H
#define DSPARK_CKPT_OUTFILE_H

#include <stddef.h>

#include "dspark/dspark.h"

typedef struct dspark__outfile {
    int folder, fd;     /* -1 when there is none */
    char *path;         /* as given: names the file in errors */
    const char *base;   /* inside path */
    char temporary[64]; /* "" when there is none to remove */
} dspark__outfile;

/* Hidden files that killed runs left in the folder are removed (stale.h).
 * Bytes go to a hidden file of the folder, or with `unnamed` (where the system can) to a file without a
 * name, of which a killed process leaves nothing, unless it is killed between its link and its rename.
 * Call abort also after a failure. DSPARK_EINVAL when path does not name a file or something else than a
 * regular file lies there, else DSPARK_EOUTPUT. */
dspark_status dspark__outfile_create(dspark__outfile *o, const char *path, int unnamed,
                                     dspark_error *err);
dspark_status dspark__outfile_write(dspark__outfile *o, const void *data, size_t n, dspark_error *err);
/* At an offset that has been written or skipped before. */
dspark_status dspark__outfile_write_at(dspark__outfile *o, const void *data, size_t n, uint64_t offset,
                                       dspark_error *err);
/* Sync, rename, and end: whatever happens, nothing is open or left behind afterwards. */
dspark_status dspark__outfile_commit(dspark__outfile *o, dspark_error *err);
/* All of it in one call. */
dspark_status dspark__outfile_put(const char *path, const void *data, size_t n, dspark_error *err);
/* Accepts a zero object and one that is ended. */
void dspark__outfile_abort(dspark__outfile *o);

#endif
