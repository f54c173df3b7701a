/* The step buffer. Owns one block and hands out disjoint views of it; knows nothing of what the
 * views hold. Under AddressSanitizer everything outside the current views is poisoned, so that a
 * kernel that reads past its view, or a view used after the next get, is seen. */
#include "base/workspace.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/status.h"

#if defined(__SANITIZE_ADDRESS__)
#define WORKSPACE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WORKSPACE_ASAN 1
#endif
#endif

#if defined(WORKSPACE_ASAN)
#include <sanitizer/asan_interface.h>
#define POISON(ptr, n)   ASAN_POISON_MEMORY_REGION(ptr, n)
#define UNPOISON(ptr, n) ASAN_UNPOISON_MEMORY_REGION(ptr, n)
#else
#define POISON(ptr, n)   ((void)(ptr), (void)(n))
#define UNPOISON(ptr, n) ((void)(ptr), (void)(n))
#endif

static void release_block(dspark__workspace *ws)
{
    if (!ws->base) return;
    UNPOISON(ws->base, ws->size);
    dspark__free(&ws->allocator, ws->base, ws->size);
    ws->base = NULL;
    ws->size = 0;
}

void dspark__workspace_init(dspark__workspace *ws, const dspark_allocator *allocator)
{
    ws->allocator = dspark__allocator_or_default(allocator);
    ws->base = NULL;
    ws->size = 0;
    ws->locked = 0;
}

void dspark__workspace_free(dspark__workspace *ws)
{
    if (!ws) return;
    release_block(ws);
    ws->locked = 0;
}

/* Bytes that a view of `size` occupies; 0 on overflow. */
static int padded_size(size_t size, size_t *padded)
{
    if (!dspark__add_size(size, DSPARK__WORKSPACE_ALIGN - 1, padded)) return 0;
    *padded &= ~(size_t)(DSPARK__WORKSPACE_ALIGN - 1);
    return 1;
}

int dspark__workspace_total(const size_t *sizes, size_t n, size_t *total)
{
    size_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        size_t padded;
        if (!padded_size(sizes[i], &padded) || !dspark__add_size(sum, padded, &sum)) {
            *total = 0;
            return 0;
        }
    }
    *total = sum;
    return 1;
}

dspark_status dspark__workspace_get(dspark__workspace *ws, const size_t *sizes, size_t n,
                                    void **views, dspark_error *err)
{
    size_t total;
    for (size_t i = 0; i < n; i++) views[i] = NULL;
    if (!dspark__workspace_total(sizes, n, &total))
        return dspark__fail(err, DSPARK_EINVAL, "workspace",
                            "the sizes of %zu views add up to more than memory can hold", n);
    if (total > ws->size) {
        if (ws->locked)
            return dspark__fail(err, DSPARK_ENOSPACE, "workspace",
                                "locked at %zu bytes, this step needs %zu", ws->size, total);
        unsigned char *base = dspark__alloc(&ws->allocator, total, DSPARK__WORKSPACE_ALIGN);
        if (!base) return dspark__fail_nomem(err, "the workspace", total);
        release_block(ws);
        ws->base = base;
        ws->size = total;
    }

    size_t at = 0;
    if (ws->base) POISON(ws->base, ws->size);
    for (size_t i = 0; i < n; i++) {
        size_t padded = 0;
        (void)padded_size(sizes[i], &padded); /* cannot overflow: the total did not */
        if (ws->base) {
            views[i] = ws->base + at;
            UNPOISON(ws->base + at, sizes[i]);
        }
        at += padded;
    }
    return DSPARK_OK;
}

void dspark__workspace_lock(dspark__workspace *ws)
{
    ws->locked = 1;
}

void dspark__workspace_unlock(dspark__workspace *ws)
{
    ws->locked = 0;
}
