/* tmp_folder: a folder for unfinished checkpoints. A file in it is locked while its run lives, so that
 * the next run can tell what a killed one has left, and removes it. What is to stay is made in a folder
 * inside, and moved out as a whole. */
#ifndef DSPARK_CLI_TMP_FOLDER_H
#define DSPARK_CLI_TMP_FOLDER_H

#include <stddef.h>

typedef struct tmp_folder {
    char path[4096]; /* "" when there is none */
    int lock;
} tmp_folder;

/* Make `prefix` + six letters, after removing what killed runs of this user left under such names.
 * 0, or an errno. */
int tmp_folder_make(tmp_folder *t, const char *prefix);
/* The same with the prefix "OUT.KIND-". */
int tmp_folder_beside(tmp_folder *t, const char *out, const char *kind);
/* An empty folder inside: its path. 0, or an errno. */
int tmp_folder_inner(char *inner, size_t size, const tmp_folder *t);
/* Give that one, finished, its name beside the prefix: 0, or an errno and all is as before. */
int tmp_folder_rename(const tmp_folder *t, const char *path);
/* With everything in it. Accepts one without a path. */
void tmp_folder_remove(tmp_folder *t);
/* Any folder, with everything in it. */
void tmp_folder_delete(const char *path);

#endif
