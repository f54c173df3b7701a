/* Writes safetensors files byte by byte, valid or broken on purpose. */
#include "support/stfile.h"

#include <stdlib.h>
#include <string.h>

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
