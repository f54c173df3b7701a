/* Open addressing with linear probing, at most half full. The seed of the hash is an
 * address, so a file cannot be made whose names collide on every machine. */
#include "ckpt/nametable.h"

#include <stdlib.h>
#include <string.h>

#include "base/digest.h"

#define MAX_NAMES ((size_t)1 << 30)

/* The slot that holds `name`, or the free one where it belongs. */
static size_t find_slot(const dspark__nametable *t, const uint32_t *slots, size_t n_slots,
                        const char *name)
{
    size_t at = (size_t)dspark__hash64(name, strlen(name), t->seed) & (n_slots - 1);
    while (slots[at] != 0 && strcmp(t->names[slots[at] - 1], name) != 0)
        at = (at + 1) & (n_slots - 1);
    return at;
}

static int grow_table(dspark__nametable *t)
{
    size_t capacity = t->capacity ? 2 * t->capacity : 32;
    if (capacity > MAX_NAMES) return 0;
    const char **names = realloc(t->names, capacity * sizeof *names);
    if (!names) return 0;
    t->names = names;
    uint32_t *slots = calloc(2 * capacity, sizeof *slots);
    if (!slots) return 0;
    if (!t->slots) t->seed = (uint64_t)(uintptr_t)slots;
    for (size_t i = 0; i < t->n_names; i++)
        slots[find_slot(t, slots, 2 * capacity, t->names[i])] = (uint32_t)(i + 1);
    free(t->slots);
    t->slots = slots;
    t->n_slots = 2 * capacity;
    t->capacity = capacity;
    return 1;
}

void dspark__nametable_free(dspark__nametable *t)
{
    free(t->names);
    free(t->slots);
    *t = (dspark__nametable){0};
}

int dspark__nametable_put(dspark__nametable *t, const char *name, size_t *id)
{
    if (t->n_names == t->capacity && !grow_table(t)) return -1;
    size_t at = find_slot(t, t->slots, t->n_slots, name);
    if (t->slots[at] != 0) {
        *id = t->slots[at] - 1;
        return 0;
    }
    t->names[t->n_names] = name;
    *id = t->n_names++;
    t->slots[at] = (uint32_t)t->n_names;
    return 1;
}

size_t dspark__nametable_find(const dspark__nametable *t, const char *name)
{
    if (t->n_names == 0) return DSPARK__NAMETABLE_NONE;
    uint32_t number = t->slots[find_slot(t, t->slots, t->n_slots, name)];
    return number ? number - 1 : DSPARK__NAMETABLE_NONE;
}
