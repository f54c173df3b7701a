/* The allocation family of a test program, counted and refused on demand. Forwards to the names
 * under which the C library or AddressSanitizer keeps its own functions, so free needs no twin. */
#include "support/oom.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_THREAD__)
#define OOM_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define OOM_TSAN 1
#elif __has_feature(address_sanitizer)
#define OOM_ASAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define OOM_ASAN 1
#endif

static atomic_size_t seen, failed;
static atomic_int armed;
static _Thread_local size_t own, first, last; /* of the thread that asked */

static void start(size_t from, size_t to)
{
    atomic_store(&armed, 0);
    atomic_store(&seen, 0);
    atomic_store(&failed, 0);
    own = 0;
    first = from;
    last = to;
    atomic_store(&armed, 1);
}

void oom_count_start(void)
{
    start(1, 0);
}

void oom_fail_nth(size_t n)
{
    start(n, n);
}

void oom_fail_from(size_t n)
{
    start(n, (size_t)-1);
}

size_t oom_stop(void)
{
    atomic_store(&armed, 0);
    first = 1;
    last = 0;
    return atomic_load(&seen);
}

size_t oom_failed(void)
{
    return atomic_load(&failed);
}

#if defined(OOM_TSAN) || !defined(__GLIBC__)

int oom_available(void)
{
    return 0;
}

#else

#if defined(OOM_ASAN)
#define REAL(name) __interceptor_##name
#else
#define REAL(name) __libc_##name
#endif
/* Hidden, they would catch the program's own calls only, and none of the shared libraries'. */
#pragma GCC visibility push(default)
void *REAL(malloc)(size_t n);
void *REAL(calloc)(size_t n, size_t size);
void *REAL(realloc)(void *ptr, size_t n);
void *REAL(memalign)(size_t align, size_t n);
void *memalign(size_t align, size_t n);

int oom_available(void)
{
    return 1;
}

/* The loader allocates before AddressSanitizer has a shadow to look into. */
#define EARLY __attribute__((no_sanitize("address", "undefined")))

EARLY static int refuse(void)
{
    if (!atomic_load(&armed)) return 0;
    atomic_fetch_add(&seen, 1);
    own++;
    if (first == 0 || own < first || own > last) return 0; /* first == 0: never asked */
    atomic_fetch_add(&failed, 1);
    errno = ENOMEM;
    return 1;
}

EARLY void *malloc(size_t n)
{
    return refuse() ? NULL : REAL(malloc)(n);
}

EARLY void *calloc(size_t n, size_t size)
{
    return refuse() ? NULL : REAL(calloc)(n, size);
}

EARLY void *realloc(void *ptr, size_t n)
{
    return refuse() ? NULL : REAL(realloc)(ptr, n);
}

EARLY void *memalign(size_t align, size_t n)
{
    return refuse() ? NULL : REAL(memalign)(align, n);
}

void *aligned_alloc(size_t align, size_t n)
{
    return refuse() ? NULL : REAL(memalign)(align, n);
}

int posix_memalign(void **out, size_t align, size_t n)
{
    if (refuse()) return ENOMEM;
    void *ptr = REAL(memalign)(align, n);
    if (!ptr) return ENOMEM;
    *out = ptr;
    return 0;
}

/* AddressSanitizer's own would not come by here. */
char *strdup(const char *s)
{
    size_t n = strlen(s) + 1;
    char *copy = malloc(n);
    return copy ? memcpy(copy, s, n) : NULL;
}

#pragma GCC visibility pop

#endif
