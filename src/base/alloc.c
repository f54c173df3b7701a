/* Memory. Owns the built-in allocator: aligned blocks of the C library, the large ones placed and
 * advised for transparent huge pages, because packed weights are streamed end to end. */
#include "base/alloc.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define HUGE_FROM HUGE_PAGE
/* A last huge page that is filled in part is taken whole when that wastes at most 1/6 of the block. */
#define WASTE 6

static void *default_alloc(void *user, size_t bytes, size_t align)
{
    void *ptr = NULL;
    (void)user;
    if (align < sizeof(void *)) align = sizeof(void *);
    if (bytes >= HUGE_FROM) {
        size_t more = (HUGE_PAGE - bytes % HUGE_PAGE) % HUGE_PAGE;
        if (align < HUGE_PAGE) align = HUGE_PAGE;
        if (more <= bytes / WASTE && bytes <= SIZE_MAX - more) bytes += more;
    }
    if (posix_memalign(&ptr, align, bytes) != 0) return NULL;
#if defined(MADV_HUGEPAGE)
    /* Advice: a system without huge pages refuses, and the memory is good all the same. What the C library gives
     * again may have small pages, and would keep them (4-bit weights in them take twice as long for one row): they
     * are dropped first. */
    if (bytes >= HUGE_FROM) {
        (void)madvise(ptr, bytes & ~(HUGE_PAGE - 1), MADV_DONTNEED);
        (void)madvise(ptr, bytes & ~(HUGE_PAGE - 1), MADV_HUGEPAGE);
    }
#endif
    return ptr;
}

static void default_free(void *user, void *ptr, size_t bytes)
{
    (void)user;
    (void)bytes;
    free(ptr);
}

dspark_allocator dspark__allocator_or_default(const dspark_allocator *a)
{
    /* A pair with a hole in it would free with the wrong hand: take none of it. */
    if (a && a->alloc && a->free) return *a;
    return (dspark_allocator){NULL, default_alloc, default_free};
}

void *dspark__alloc(const dspark_allocator *a, size_t bytes, size_t align)
{
    if (bytes == 0) return NULL;
    dspark_allocator use = dspark__allocator_or_default(a);
    return use.alloc(use.user, bytes, align);
}

void dspark__free(const dspark_allocator *a, void *ptr, size_t bytes)
{
    if (!ptr) return;
    dspark_allocator use = dspark__allocator_or_default(a);
    use.free(use.user, ptr, bytes);
}

/* Bytes from `at` to where a huge page begins. */
static size_t to_huge_page(const void *at)
{
    return (HUGE_PAGE - (uintptr_t)at % HUGE_PAGE) % HUGE_PAGE;
}

size_t dspark__huge_pages(const void *at, size_t bytes)
{
    const size_t before = to_huge_page(at);
    return bytes > before ? (bytes - before + HUGE_PAGE - 1) / HUGE_PAGE : 0;
}

/* By its end: Linux clears a huge page towards the place that was asked for, and clearing upwards takes less
 * than half the time of clearing downwards (measured, Zen 4: 20 and 46 ms for 537 MB). */
void dspark__huge_page_bring(void *at, size_t i, const void *end)
{
#if defined(MADV_POPULATE_WRITE)
    const size_t page = 4096, room = ((uintptr_t)end - (uintptr_t)at) - (uintptr_t)end % page;
    const size_t from = to_huge_page(at) + i * HUGE_PAGE, to = from + HUGE_PAGE < room ? from + HUGE_PAGE : room;
    if (to >= from + page) (void)madvise((unsigned char *)at + to - page, page, MADV_POPULATE_WRITE);
#else
    (void)at;
    (void)i;
    (void)end;
#endif
}
