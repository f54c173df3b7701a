/* The staging directory of a checkpoint that is being written: files are made in a hidden directory
 * inside the target (so that both are in one file system) and published at the end, in the order in which
 * they were added: config.json last, since without it nothing takes the directory for a checkpoint. Never
 * writes over a file, never leaves part of a checkpoint: the stage goes after the last file has been
 * published, and the next run takes back what a stage without a run has published before it. */
#ifndef DSPARK_CKPT_STAGE_H
#define DSPARK_CKPT_STAGE_H

#include <stddef.h>

#include "dspark/dspark.h"

#define DSPARK__STAGE_NAME_BYTES 64

typedef struct dspark__stage {
    const char *dir;
    char *tmp;         /* dir/PREFIXXXXXXX; NULL until made */
    int folder, inner; /* dir and tmp, opened; -1 */
    int lock;          /* a file in tmp that is held while the run lives; -1 */
    int made_dir;      /* dir did not exist before */
    int told;          /* tmp has a file about what is moved (moved.h) */
    char (*names)[DSPARK__STAGE_NAME_BYTES]; /* files in tmp, in the order they are to appear */
    size_t n_names, n_published;
} dspark__stage;

/* Make `dir` (which must outlive the stage) and the staging directory dir/PREFIX + six letters; remove
 * those that killed runs left there, and what these had published of an unfinished checkpoint.
 * PREFIX is one of ".synth-", ".quantize-". DSPARK_EINVAL when dir holds a file of a checkpoint. Call close
 * also after a failure. */
dspark_status dspark__stage_open(dspark__stage *s, const char *dir, const char *prefix,
                                 size_t max_names, dspark_error *err);
/* The path in the staging directory of a new file; free() it. NULL without memory. */
char *dspark__stage_add(dspark__stage *s, const char *name);
/* A whole text file. */
dspark_status dspark__stage_write(dspark__stage *s, const char *name, const char *text, size_t n,
                                  dspark_error *err);
/* Let all files appear in dir, in order. DSPARK_EINVAL when it has got a checkpoint since, or gets one from
 * another run right now. */
dspark_status dspark__stage_publish(dspark__stage *s, dspark_error *err);
/* Take away what is not meant to stay: when `failed` that is everything. Accepts a zero object. */
void dspark__stage_close(dspark__stage *s, int failed);

/* "model.safetensors", or "model-00001-of-00003.safetensors" for shard 0 of 3. */
void dspark__stage_shard_name(char name[DSPARK__STAGE_NAME_BYTES], uint32_t shard,
                              uint32_t n_shards);

#endif
