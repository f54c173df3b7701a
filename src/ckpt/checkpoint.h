/* An open checkpoint: one safetensors file or the shards of an index, mapped, headers checked
 * whole. Knows names, dtypes, shapes and bytes; knows nothing of models. */
#ifndef DSPARK_CKPT_CHECKPOINT_H
#define DSPARK_CKPT_CHECKPOINT_H

#include "dspark/dspark.h"

dspark_status dspark__checkpoint_open(dspark_checkpoint **out, const char *path, dspark_error *err);
/* Only the shards that hold a tensor which `wanted` says yes to (with every tensor they hold); the
 * others need not exist. A directory with one file, or a file, is opened whole. A directory in which
 * nothing is wanted is a checkpoint without tensors. */
dspark_status dspark__checkpoint_open_some(dspark_checkpoint **out, const char *path,
                                           int (*wanted)(void *user, const char *name), void *user,
                                           dspark_error *err);
void dspark__checkpoint_close(dspark_checkpoint *c);
size_t dspark__checkpoint_count(const dspark_checkpoint *c);
const dspark_tensor *dspark__checkpoint_at(const dspark_checkpoint *c, size_t i);
const dspark_tensor *dspark__checkpoint_find(const dspark_checkpoint *c, const char *name);
const char *dspark__checkpoint_metadata(const dspark_checkpoint *c, const char *key);

/* Files of the checkpoint, in order: base name and size. */
size_t dspark__checkpoint_file_count(const dspark_checkpoint *c);
const char *dspark__checkpoint_file_name(const dspark_checkpoint *c, size_t i);
uint64_t dspark__checkpoint_file_bytes(const dspark_checkpoint *c, size_t i);

/* 32 hex digits over what no write to a file leaves as it is: each file's name, size, inode, times of
 * modification and of change. *newest (may be NULL) is the latest time of change, in ns. */
dspark_status dspark__checkpoint_identity(const dspark_checkpoint *c, char hex[33], int64_t *newest,
                                          dspark_error *err);

/* Is the mapped range of `t` still backed by its file (fstat)? DSPARK_EIO naming both sizes when
 * the file has shrunk since opening. Call before reading much. */
dspark_status dspark__checkpoint_verify(const dspark_checkpoint *c, const dspark_tensor *t,
                                        dspark_error *err);
/* Tell the system that [offset, offset + n) of `t` has been read and need not stay resident. */
void dspark__checkpoint_drop(const dspark_checkpoint *c, const dspark_tensor *t, uint64_t offset,
                             uint64_t n);

#endif
