/* Buffers between inaccessible pages: a byte too far, on either side, is a crash at the culprit. */
#ifndef DSPARK_TESTS_SUPPORT_GUARD_H
#define DSPARK_TESTS_SUPPORT_GUARD_H

#include <stddef.h>

typedef struct guard {
    unsigned char *p; /* the buffer */
    size_t n;
    unsigned char *map;
    size_t map_bytes;
} guard;

/* n bytes whose end (or start) touches an inaccessible page, filled with 0xa5. The other side is
 * within a page of one. Exits the test program when the system refuses. */
guard guard_end(size_t n);
guard guard_start(size_t n);
void guard_free(guard *g);

#endif
