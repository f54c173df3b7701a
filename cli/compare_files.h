/* compare_files.c: two files of caches against each other, without any model. */
#ifndef DSPARK_CLI_COMPARE_FILES_H
#define DSPARK_CLI_COMPARE_FILES_H

/* Prints the report; returns an exit code: 0 equal, 1 different, 3 a file that cannot be compared. */
int compare_files(const char *path_a, const char *path_b, int json);

#endif
