/* One buffer that a step cuts into views ("get simultaneous"). Every get starts at offset 0, so two
 * gets alias: views are valid until the next get. Contents are undefined after a get. */
#ifndef DSPARK_BASE_WORKSPACE_H
#define DSPARK_BASE_WORKSPACE_H

#include "dspark/dspark.h"

#define DSPARK__WORKSPACE_ALIGN 256u

typedef struct dspark__workspace {
    dspark_allocator allocator;
    unsigned char *base; /* 256-byte aligned, NULL while size == 0 */
    size_t size;
    int locked;
} dspark__workspace;

/* allocator may be NULL. Allocates nothing yet. */
void dspark__workspace_init(dspark__workspace *ws, const dspark_allocator *allocator);
void dspark__workspace_free(dspark__workspace *ws);

/* Bytes that a get of these n views takes: each size rounded up to 256, summed.
 * Pure. Returns 0 (and *total = 0) on overflow, else 1. */
int dspark__workspace_total(const size_t *sizes, size_t n, size_t *total);

/* views[i] = 256-byte aligned space of sizes[i] bytes, disjoint. Grows the buffer to exactly the
 * total when it is smaller and unlocked (old contents lost).
 * DSPARK_ENOSPACE when locked and too small (names both sizes), DSPARK_ENOMEM, DSPARK_EINVAL on
 * overflow; then views are all NULL and the buffer is as before. */
dspark_status dspark__workspace_get(dspark__workspace *ws, const size_t *sizes, size_t n,
                                    void **views, dspark_error *err);

/* While locked the buffer neither grows nor moves. */
void dspark__workspace_lock(dspark__workspace *ws);
void dspark__workspace_unlock(dspark__workspace *ws);

#endif
