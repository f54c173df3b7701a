/* Writes safetensors files byte by byte, valid or broken on purpose, and opens them. */
#include "support/stfile.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ckpt/checkpoint.h"
#include "support/tmpdir.h"

unsigned char stfile_byte(size_t i)
{
    return (unsigned char)(i % 251);
}

void stfile_write_raw(const char *path, uint64_t header_length, const void *header, size_t n_header,
                      const void *data, size_t n_data)
{
    unsigned char *file = malloc(8 + n_header + n_data);
    if (!file) abort();
    for (int i = 0; i < 8; i++) file[i] = (unsigned char)(header_length >> (8 * i));
    if (n_header) memcpy(file + 8, header, n_header);
    for (size_t i = 0; i < n_data; i++)
        file[8 + n_header + i] = data ? ((const unsigned char *)data)[i] : stfile_byte(i);
    tmpdir_write(path, file, 8 + n_header + n_data);
    free(file);
}

void stfile_write(const char *path, const char *header, size_t n_data)
{
    stfile_write_raw(path, strlen(header), header, strlen(header), NULL, n_data);
}

dspark_checkpoint *stfile_open(const char *path)
{
    dspark_checkpoint *c = NULL;
    dspark_error err = {0};
    if (dspark__checkpoint_open(&c, path, &err) != DSPARK_OK) fail_msg("%s: %s", err.where, err.message);
    return c;
}

void stfile_refuse(const char *path, dspark_status code, const char *texts)
{
    char copy[300], *rest = copy;
    dspark_checkpoint *c = (void *)&copy;
    dspark_error err = {0};
    dspark_status st = dspark__checkpoint_open(&c, path, &err);
    snprintf(copy, sizeof copy, "%s", texts);
    if (st != code) fail_msg("%s: status %d (%s: %s)", texts, st, err.where, err.message);
    assert_int_equal(err.code, code);
    assert_null(c);
    for (char *text = strsep(&rest, "|"); text; text = strsep(&rest, "|"))
        if (!strstr(err.message, text) && !strstr(err.where, text))
            fail_msg("\"%s\" is not named in: %s: %s", text, err.where, err.message);
    assert_int_equal(dspark__checkpoint_open(&c, path, NULL), code);
}
