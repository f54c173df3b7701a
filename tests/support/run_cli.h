/* run_cli: runs the command under test in a folder of its own and keeps what it said.
 * Not a framework: one run at a time, everything static. */
#ifndef DSPARK_TESTS_RUN_CLI_H
#define DSPARK_TESTS_RUN_CLI_H

#include <stddef.h>

typedef struct cli_result {
    int code;      /* exit code, or -signal */
    char *out;     /* all of stdout, terminated; valid until the next run */
    size_t n_out;
    char *err;
} cli_result;

/* A fresh folder, made at the first call; the command runs inside it. */
const char *cli_folder(void);
/* Remove the folder and everything in it. */
void cli_cleanup(void);

/* Arguments after the program's name, separated by single spaces (no quoting). "%s" etc. work. */
cli_result run_cli(const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 1, 2)))
#endif
    ;
/* Any program. */
cli_result run_program(const char *program, const char *args);
/* The same with stdout going to `path` instead ("/dev/full"). */
cli_result run_cli_into(const char *path, const char *args);
/* Start, wait until a name that holds `part` appears in the folder, send SIGTERM, wait. */
cli_result run_cli_cancelled(const char *part, const char *args);

/* Is there a name in the folder that holds `part`? */
int folder_has(const char *part);
/* Whole file, terminated (free it), NULL when it cannot be read. */
char *read_whole_file(const char *path, size_t *n_bytes);
/* Do both files exist with the same bytes? Paths relative to the folder. */
int same_files(const char *a, const char *b);

#endif
