/* out: what every command shares about talking to the outside: error lines and exit codes, tables,
 * JSON documents, readable numbers, and the flag that Ctrl-C sets.
 * Results go to stdout, everything else to stderr. Knows nothing about models. */
#ifndef DSPARK_CLI_OUT_H
#define DSPARK_CLI_OUT_H

#include <jansson.h>
#include <stdio.h>

#include "dspark/dspark.h"

#if defined(__GNUC__)
#define OUT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define OUT_PRINTF(fmt, args)
#endif

enum {
    EXIT_OK = 0,
    EXIT_CHECK_FAILED = 1, /* the check said no */
    EXIT_USAGE = 2,        /* or an output path at which something else lies */
    EXIT_INPUT = 3,        /* a bad input file */
    EXIT_UNSUPPORTED = 4,
    EXIT_INTERNAL = 5,     /* out of memory, output not writable, or a bug */
    EXIT_CANCELLED = 130
};

/* ---- errors ---- */

int out_exit_code(dspark_status status);
/* Print "dspark: where: message" and return the exit code of `status`. */
int out_fail(dspark_status status, const dspark_error *err);
/* Print "dspark: text" and return `code`. */
int out_error(int code, const char *fmt, ...) OUT_PRINTF(2, 3);
/* Fill *err like the library does and return `code`. */
dspark_status out_set_error(dspark_error *err, dspark_status code, const char *where,
                            const char *fmt, ...) OUT_PRINTF(4, 5);
/* Put the path that the user gave before err->where, which may name a file inside it only. */
void out_add_path(dspark_error *err, const char *path);
/* The same for what was opened as a file, of which the library says the name without its folder. */
void out_add_file(dspark_error *err, const char *path);
/* The same of an error of opening a checkpoint that borrows from `target` (NULL: from none): what is
 * wrong with the target names it already. */
void out_add_checkpoint(dspark_error *err, const char *checkpoint, const char *target);
/* Nothing but arguments went in: what does not fit together are they. */
dspark_status out_blame_arguments(dspark_error *err, dspark_status st);
/* Flush stdout; a result that could not be written turns `code` into EXIT_INTERNAL. */
int out_finish(int code);

/* ---- the process ---- */

/* Before anything else: a closed standard descriptor is filled, so that no file of ours gets its
 * number and a message never lands in a file. SIGINT, SIGTERM and SIGHUP set a flag (the third one
 * ends the process at once) unless the parent has them ignored; a file that grows over its limit is
 * an error of write, not a death; a mapped file that shrinks while it is read is an input error. */
void out_start(void);
int out_interrupted(void);
/* DSPARK_ECANCELLED and its text when the flag is set, else DSPARK_OK. */
dspark_status out_check_interrupt(dspark_error *err);

/* ---- text ---- */

/* Print a string from outside: control characters, which could steer a terminal, and what is not
 * UTF-8 become '?'. */
void out_text(FILE *f, const char *text);
/* The same into buf[size], cut between characters. Returns buf. */
char *out_clean(char *buf, size_t size, const char *text);
/* Print a string so that a shell reads it as one word. */
void out_word(FILE *f, const char *text);
/* "665.1 MB" (powers of ten), "3,562,312,961", "1.234 ms". They return buf. */
char *out_bytes(char buf[32], double n_bytes);
char *out_count(char buf[32], uint64_t n);
char *out_seconds(char buf[32], double seconds);

/* Columns that find their width. The first row is the header. */
typedef struct out_table {
    const char *align; /* one letter a column: 'l' or 'r' */
    size_t n_columns;
    size_t n_cells;
    size_t capacity;
    char **cells;
    int failed;        /* out of memory: the table is not printed */
} out_table;
void out_table_init(out_table *table, const char *align);
void out_table_cell(out_table *table, const char *fmt, ...) OUT_PRINTF(2, 3);
/* Print with `indent` spaces before each row and free everything. 0, or -1 without memory. */
int out_table_print(out_table *table, int indent);

/* ---- JSON ---- */

/* Set key; takes the value. A failure is remembered and reported by out_json. */
void out_set(json_t *object, const char *key, json_t *value);
void out_append(json_t *array, json_t *value);
/* A string that may hold any bytes: what is not UTF-8 becomes '?'. */
json_t *out_string(const char *text);
/* NaN and infinity have no JSON form: they become null. */
json_t *out_real(double value);
/* Print the document and free it; returns EXIT_OK, or EXIT_INTERNAL when something failed. */
int out_json(json_t *document);

/* ---- files ---- */

/* Why an output file must not be `path`, or NULL: it is no regular file, it is `input`, or it would lie
 * among the files of `input` (a checkpoint's or dump's path). input may be NULL. */
const char *out_refuse_target(const char *path, const char *input);
/* Do both name one file? Neither needs to exist; their folders must. */
int out_same_target(const char *a, const char *b);

/* A text file that is complete or not there: collected in memory, written when it is finished. */
typedef struct out_file {
    FILE *stream;
    const char *path;
    char *text;
    size_t n;
} out_file;
/* They print what went wrong and return EXIT_OK, EXIT_USAGE when something else than a regular file lies at
 * the path, or EXIT_INTERNAL. After a failure of open there is nothing to commit. */
int out_file_open(out_file *file, const char *path);
int out_file_commit(out_file *file);
/* Could it be written? Leaves nothing behind. For an early answer before long work. */
int out_file_try(const char *path);

/* Seconds of a clock that only goes forward. */
double out_clock(void);

#endif
