/* Memory through the host's allocator or the C library's. */
#ifndef DSPARK_BASE_ALLOC_H
#define DSPARK_BASE_ALLOC_H

#include "dspark/dspark.h"

/* The allocator to use for `a`: *a itself, or the built-in one when a is NULL. */
dspark_allocator dspark__allocator_or_default(const dspark_allocator *a);

/* `bytes` bytes aligned to `align`; NULL on failure and for bytes == 0. Large blocks of the
 * built-in allocator ask for transparent huge pages. Memory is not cleared. */
void *dspark__alloc(const dspark_allocator *a, size_t bytes, size_t align);
void dspark__free(const dspark_allocator *a, void *ptr, size_t bytes);

/* Large memory comes zeroed and page by page, when it is first written: half the time of filling it. How many
 * huge pages begin in [at, at + bytes), and bring the i-th of them, or what of it lies before `end`, on any
 * thread, the quickest way there is. Contents stay. Advice: nothing happens where the system cannot. */
size_t dspark__huge_pages(const void *at, size_t bytes);
void dspark__huge_page_bring(void *at, size_t i, const void *end);

#endif
