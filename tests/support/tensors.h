/* Tensors that a test makes by hand, written as a checkpoint of one file or of several. */
#ifndef DSPARK_TESTS_SUPPORT_TENSORS_H
#define DSPARK_TESTS_SUPPORT_TENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "dspark/dspark.h"
#include "quant/scheme.h"

#define TENSORS_MAX 160

typedef struct tensors {
    size_t n;
    struct {
        char name[128];
        dspark_dtype dtype;
        uint32_t rank;
        uint64_t shape[DSPARK_MAX_RANK];
        unsigned char *data;
        size_t n_bytes;
    } list[TENSORS_MAX];
    dspark_checkpoint *ckpt; /* after tensors_open */
} tensors;

/* Forget everything: tensors, the open checkpoint. Zero-initialised is empty. */
void tensors_clear(tensors *t);
/* Copies data; NULL: zeros. Returns the bytes, for changes before tensors_open. */
void *tensors_add(tensors *t, const char *name, dspark_dtype dtype, uint32_t rank,
                  const uint64_t *shape, const void *data);
/* The most common ones; d1 = 0: rank 1. */
void *tensors_add2(tensors *t, const char *name, dspark_dtype dtype, uint64_t d0, uint64_t d1,
                   const void *data);
void tensors_remove(tensors *t, const char *name);
size_t tensors_index(const tensors *t, const char *name);
/* Write into dir, dealt to n_files files in turn (an index with more than one), and open. */
void tensors_open(tensors *t, const char *dir, size_t n_files);
/* The parts of a module of the open checkpoint. */
void tensors_module(const tensors *t, const char *name, dspark__module *m);

#endif
