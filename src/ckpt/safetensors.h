/* One safetensors file: opened, its header checked whole, its data mapped and not touched. Knows
 * nothing of other files; docs/formats.md lists the rules. */
#ifndef DSPARK_CKPT_SAFETENSORS_H
#define DSPARK_CKPT_SAFETENSORS_H

#include "ckpt/nametable.h"
#include "dspark/dspark.h"

#define DSPARK__ST_MAX_HEADER 100000000u
#define DSPARK__ST_MAX_NAME 1024u

typedef struct dspark__st_entry {
    dspark_tensor tensor;
    uint64_t begin, end; /* in the data section */
} dspark__st_entry;

/* Tensors of one or more files, file by file, by offset. names holds the number of each. */
typedef struct dspark__st_list {
    dspark__st_entry *entries;
    size_t n, capacity;
    dspark__nametable names;
} dspark__st_list;

typedef struct dspark__st_file {
    char *name; /* base name */
    int fd;     /* kept, so that the size can be asked again; -1 when closed */
    const unsigned char *map;
    uint64_t size;
    uint64_t data_at; /* where the data section begins in the file */
    char *header;     /* unescaped in place: names and metadata point into it */
    dspark__nametable metadata_keys;
    const char **metadata_values;
    size_t metadata_capacity;
} dspark__st_file;

void dspark__st_list_free(dspark__st_list *list);

/* Open `name` (a base name) in the folder `folder` and append its tensors to list. On failure f is
 * closed, and list may hold some of the file's tensors: throw it away. */
dspark_status dspark__st_open(dspark__st_file *f, int folder, const char *name,
                              dspark__st_list *list, dspark_error *err);
/* Accepts an object that is zero or closed. */
void dspark__st_close(dspark__st_file *f);

/* Open `name` in `folder` for reading: a regular file (DSPARK_EIO otherwise, without waiting for
 * the other end of a pipe). Gives descriptor and size. */
dspark_status dspark__st_open_regular(int folder, const char *name, int *fd, uint64_t *size,
                                      dspark_error *err);
/* n bytes at `offset`, all of them or DSPARK_EIO. */
dspark_status dspark__st_read(int fd, const char *name, uint64_t offset, void *to, size_t n,
                              dspark_error *err);

#endif
