/* Raw safetensors files for tests, right or wrong: nothing is checked. */
#ifndef DSPARK_TESTS_SUPPORT_STFILE_H
#define DSPARK_TESTS_SUPPORT_STFILE_H

#include <stddef.h>
#include <stdint.h>

#include "dspark/dspark.h"

/* Length prefix, header text, then n_data bytes 0, 1, 2, ... 250, 0, 1, ... */
void stfile_write(const char *path, const char *header, size_t n_data);
/* The same with everything in the caller's hands. data may be NULL: the counting bytes. */
void stfile_write_raw(const char *path, uint64_t header_length, const void *header,
                      size_t n_header, const void *data, size_t n_data);
/* The byte that stfile_write puts at offset i of the data section. */
unsigned char stfile_byte(size_t i);

/* Opens what must be good; close it. */
dspark_checkpoint *stfile_open(const char *path);
/* The checkpoint or file must be refused, each of the texts ("|" between them) named by the error. */
void stfile_refuse(const char *path, dspark_status code, const char *texts);

#endif
