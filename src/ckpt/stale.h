/* Leftovers of killed runs. An unfinished file, or the lock file of a folder of unfinished files, is
 * flock'ed by the run that makes it; the system lets go when the run ends, however it ends. What can be
 * locked by somebody else is therefore nobody's work any more and may be removed. */
#ifndef DSPARK_CKPT_STALE_H
#define DSPARK_CKPT_STALE_H

#include <stddef.h>

/* Lock the open file `fd`, made just now as folder/name. 0: a sweeper was quicker and removes it (make
 * another one). 1 also where the file system knows no locks: then nobody takes it either. */
int dspark__stale_hold(int fd, int folder, const char *name);
/* folder/name, a regular file that nobody holds: the locked descriptor, to be closed when it is removed.
 * -1 when it is not there, is something else, is held, or cannot be locked. */
int dspark__stale_take(int folder, const char *name);

/* ".dspark-PID-N.tmp" */
void dspark__stale_file_name(char *name, size_t size, unsigned n);
int dspark__stale_is_file_name(const char *name);
/* Remove such files of the folder that nobody holds. What cannot be removed is left: nothing depends on
 * it. 0: no memory. */
int dspark__stale_sweep_files(int folder);

#endif
