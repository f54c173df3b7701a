/* Temporary folders, gone when the test program ends. */
#ifndef DSPARK_TESTS_SUPPORT_TMPDIR_H
#define DSPARK_TESTS_SUPPORT_TMPDIR_H

#include <stddef.h>

/* A new empty folder; the path stays valid until tmpdir_remove or the end of the program. */
const char *tmpdir_make(void);
/* dir + "/" + name. The text is overwritten by the eighth call after this one. */
const char *tmpdir_path(const char *dir, const char *name);
/* Remove the folder and all that is in it now. Without it: at the end of the program. */
void tmpdir_remove(const char *dir);
/* Write a whole file; exits the test program when that fails. */
void tmpdir_write(const char *path, const void *data, size_t n);
/* Number of entries of a folder, hidden ones included. */
size_t tmpdir_count(const char *dir);

#endif
