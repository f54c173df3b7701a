/* inspect_text.c: the library's inspection document as text for people. */
#ifndef DSPARK_CLI_INSPECT_H
#define DSPARK_CLI_INSPECT_H

#include <jansson.h>

/* Returns an exit code: EXIT_OK, or EXIT_INTERNAL without memory. */
int inspect_print(const json_t *doc);

#endif
