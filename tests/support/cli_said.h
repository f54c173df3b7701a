/* What a run of the command said, and where it said it: for the tests of the command line, beside
 * run_cli. What is not as asked ends the running cmocka test with both outputs shown. */
#ifndef DSPARK_TESTS_SUPPORT_CLI_SAID_H
#define DSPARK_TESTS_SUPPORT_CLI_SAID_H

#include <jansson.h>

#include "support/run_cli.h"

/* The run must end with this code; both outputs are shown when it does not. */
cli_result run_cli_to(int code, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;

/* The text must hold the part. */
#define assert_has(text, part) said_has(text, part, __FILE__, __LINE__)
void said_has(const char *text, const char *part, const char *file, int line);

/* Stdout as JSON without duplicate keys; json_decref it. */
json_t *said_json(const cli_result *r);
/* Members that must be there and of the type. */
json_int_t said_int(const json_t *object, const char *key);
double said_number(const json_t *object, const char *key);
const char *said_text(const json_t *object, const char *key);

/* A name in the command's folder, until the next call. */
const char *in_folder(const char *name);
/* The file of that name; free() it. */
char *read_in_folder(const char *name);
/* A cmocka setup: the folder with a checkpoint "tiny". */
int make_tiny(void **state);
/* A cmocka teardown: the folder and all in it. */
int remove_folder(void **state);

#endif
