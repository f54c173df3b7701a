/* What a stage moves to its target. Where a file system gives no second name to a file, its going leaves no
 * trace; so before the first one goes, the stage says in a file of its own which they will be. By that the next
 * run knows what a killed one has moved: the same name, inode, size and time of the last change. */
#ifndef DSPARK_CKPT_MOVED_H
#define DSPARK_CKPT_MOVED_H

#include <stddef.h>

#include "ckpt/stage.h"
#include "dspark/dspark.h"

#define DSPARK__MOVED_NAME ".dspark-moved"

/* Write `path`, a file of that name in the folder `inner`, about n files there. */
dspark_status dspark__moved_write(const char *path, int inner,
                                  const char (*names)[DSPARK__STAGE_NAME_BYTES], size_t n,
                                  dspark_error *err);
/* Remove from `folder` what it tells of, as far as it is there and still the same. Without such a file in
 * `inner`, or with another one of that name, nothing happens. 0: no memory. */
int dspark__moved_take_back(int inner, int folder);

#endif
