/* Checkpoints that are all header: a list of tensors that a test edits and writes as a safetensors
 * file whose data is a hole. A K3-sized one takes no space and no time. */
#ifndef DSPARK_TESTS_SUPPORT_FAKE_H
#define DSPARK_TESTS_SUPPORT_FAKE_H

#include <stddef.h>
#include <stdint.h>

#include "ckpt/config.h"

#define FAKE_MAX 512

typedef struct fake_tensor {
    char name[256];
    dspark_dtype dtype;
    uint32_t rank;
    uint64_t shape[4];
} fake_tensor;

typedef struct fake {
    size_t n;
    fake_tensor list[FAKE_MAX];
} fake;

/* tests/data/configs/NAME.json, parsed; failures end the running test. */
dspark__config_doc *fake_config(const char *name);
/* Its text, for free(). */
char *fake_config_text(const char *name);

/* The roster of c, all BF16, in order. */
void fake_from_roster(fake *f, const dspark_config *c, int context_only);
void fake_add(fake *f, const char *name, dspark_dtype dtype, uint32_t rank, uint64_t d0,
              uint64_t d1);
fake_tensor *fake_find(fake *f, const char *name);
void fake_remove(fake *f, const char *name);
void fake_rename(fake *f, const char *from, const char *to);

/* Write dir/model.safetensors; with config_text also dir/config.json. */
void fake_write(const fake *f, const char *dir, const char *config_text);

#endif
