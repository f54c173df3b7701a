/* Writing one safetensors file: all or nothing. */
#ifndef DSPARK_CKPT_WRITER_H
#define DSPARK_CKPT_WRITER_H

#include "dspark/dspark.h"

/* The contract of dspark_writer_* in dspark.h. The name under `path` appears at commit, complete
 * and on the disk; until then the bytes are in a hidden file of the same folder. After a failed
 * call the writer only accepts commit (which fails alike) and abort. */
dspark_status dspark__writer_create(dspark_writer **out, const char *path, dspark_error *err);
dspark_status dspark__writer_metadata(dspark_writer *w, const char *key, const char *value,
                                      dspark_error *err);
dspark_status dspark__writer_declare(dspark_writer *w, const char *name, dspark_dtype dtype,
                                     uint32_t rank, const uint64_t *shape, dspark_error *err);
dspark_status dspark__writer_data(dspark_writer *w, const void *data, size_t n_bytes,
                                  dspark_error *err);
dspark_status dspark__writer_commit(dspark_writer *w, dspark_error *err);
void dspark__writer_abort(dspark_writer *w);

#endif
