/* Makes allocations fail, or counts them. Replaces malloc and its family in every test program; the
 * memory still comes from the C library (or the sanitizer). Counts all threads together; fails only
 * on the thread that asked, because sanitizers allocate on threads of their own making. */
#ifndef DSPARK_TESTS_SUPPORT_OOM_H
#define DSPARK_TESTS_SUPPORT_OOM_H

#include <stddef.h>

/* 0 where allocations cannot be intercepted (ThreadSanitizer, other C libraries): skip then. */
int oom_available(void);

/* Count from now on, fail nothing. */
void oom_count_start(void);
/* Count, and let the n-th allocation from now on (1-based) fail, once. */
void oom_fail_nth(size_t n);
/* Count, and let the n-th and all that follow fail. */
void oom_fail_from(size_t n);
/* Back to normal. Returns how many allocations were asked for since the start. */
size_t oom_stop(void);
/* How many failed between the last start and stop. */
size_t oom_failed(void);

#endif
