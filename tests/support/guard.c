/* Guard pages around test buffers. */
#include "support/guard.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static guard make(size_t n, int at_end)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t inside = (n + page - 1) / page * page;
    guard g = {NULL, n, NULL, inside + 2 * page};
    void *map = mmap(NULL, g.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED ||
        (inside > 0 && mprotect((char *)map + page, inside, PROT_READ | PROT_WRITE) != 0)) {
        perror("guard pages");
        exit(EXIT_FAILURE);
    }
    g.map = map;
    g.p = g.map + page + (at_end ? inside - n : 0);
    memset(g.map + page, 0xa5, inside);
    return g;
}

guard guard_end(size_t n)
{
    return make(n, 1);
}

guard guard_start(size_t n)
{
    return make(n, 0);
}

void guard_free(guard *g)
{
    if (g->map) munmap(g->map, g->map_bytes);
    *g = (guard){0};
}
