/* The safetensors writer. Owns the buffer and the header text; refuses to write what the reader would
 * refuse to read. Appearing whole or not at all is outfile.h's business. */
#include "ckpt/writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/utf8.h"
#include "ckpt/dtype.h"
#include "ckpt/nametable.h"
#include "ckpt/outfile.h"
#include "ckpt/safetensors.h"

#define UNIT ((size_t)2 << 20) /* of writes: a huge page */
#define ALIGN 64 /* of the data: rows of a round number of bytes then begin with cache lines */

typedef struct text {
    char *bytes;
    size_t n, capacity;
} text;

struct dspark_writer {
    dspark__outfile file;
    text metadata;      /* members of __metadata__ */
    text tensors;       /* members of the header */
    dspark__nametable keys, names;
    char **kept; /* copies of keys and names: the tables borrow them */
    size_t n_kept, kept_capacity;
    uint64_t declared, given;
    unsigned char *buffer;
    size_t buffered;
    uint64_t written; /* bytes of the file */
    int header_written;
    dspark_status failed; /* the first failure, sticky */
};

/* ------------------------------------------------------------------------------------------------
 * Text
 * --------------------------------------------------------------------------------------------- */

static int add_bytes(text *t, const char *bytes, size_t n)
{
    size_t need;
    if (!dspark__add_size(t->n, n, &need)) return 0;
    if (need > t->capacity) {
        size_t capacity = t->capacity ? t->capacity : 256;
        while (capacity < need) {
            if (!dspark__mul_size(capacity, 2, &capacity)) return 0;
        }
        char *grown = realloc(t->bytes, capacity);
        if (!grown) return 0;
        t->bytes = grown;
        t->capacity = capacity;
    }
    memcpy(t->bytes + t->n, bytes, n);
    t->n = need;
    return 1;
}

static int add_text(text *t, const char *s)
{
    return add_bytes(t, s, strlen(s));
}

/* s as a JSON string. */
static int add_string(text *t, const char *s)
{
    char escape[8];
    if (!add_text(t, "\"")) return 0;
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        int ok;
        if (c == '"' || c == '\\') {
            escape[0] = '\\';
            escape[1] = (char)c;
            ok = add_bytes(t, escape, 2);
        } else if (c < 0x20) {
            snprintf(escape, sizeof escape, "\\u%04x", c);
            ok = add_text(t, escape);
        } else {
            ok = add_bytes(t, s, 1);
        }
        if (!ok) return 0;
    }
    return add_text(t, "\"");
}

static int is_utf8(const char *s)
{
    size_t n = strlen(s);
    while (n > 0) {
        size_t len = dspark__utf8_length(s, n);
        if (len == 0) return 0;
        s += len;
        n -= len;
    }
    return 1;
}

/* A copy of s that lives as long as the writer, or NULL. */
static const char *keep(dspark_writer *w, const char *s)
{
    if (w->n_kept == w->kept_capacity) {
        size_t capacity = w->kept_capacity ? 2 * w->kept_capacity : 32;
        char **kept = realloc(w->kept, capacity * sizeof *kept);
        if (!kept) return NULL;
        w->kept = kept;
        w->kept_capacity = capacity;
    }
    char *copy = strdup(s);
    if (copy) w->kept[w->n_kept++] = copy;
    return copy;
}

/* ------------------------------------------------------------------------------------------------
 * The file
 * --------------------------------------------------------------------------------------------- */

static dspark_status write_out(dspark_writer *w, const void *data, size_t n, dspark_error *err)
{
    w->written += n;
    return dspark__outfile_write(&w->file, data, n, err);
}

static dspark_status flush_buffer(dspark_writer *w, dspark_error *err)
{
    size_t n = w->buffered;
    w->buffered = 0;
    return write_out(w, w->buffer, n, err);
}

/* Writes end where a unit of the file does: what is written unit by unit lies in the system's cache as huge pages,
 * and whoever maps the file has few of them to bring. */
static dspark_status put_bytes(dspark_writer *w, const void *data, size_t n, dspark_error *err)
{
    const unsigned char *from = data;
    dspark_status st = DSPARK_OK;
    while (st == DSPARK_OK && n > 0) {
        const size_t room = UNIT - (size_t)((w->written + w->buffered) % UNIT);
        size_t part = n < room ? n : room;
        if (w->buffered == 0 && room == UNIT && n >= UNIT) {
            part = n / UNIT * UNIT;
            st = write_out(w, from, part, err);
        } else {
            memcpy(w->buffer + w->buffered, from, part);
            w->buffered += part;
            if (part == room) st = flush_buffer(w, err);
        }
        from += part;
        n -= part;
    }
    return st;
}

static dspark_status write_header(dspark_writer *w, dspark_error *err)
{
    text header = {0};
    unsigned char prefix[8];
    int ok = add_text(&header, "{");
    if (w->metadata.n) {
        ok = ok && add_text(&header, "\"__metadata__\":{") &&
             add_bytes(&header, w->metadata.bytes, w->metadata.n) &&
             add_text(&header, w->tensors.n ? "}," : "}");
    }
    if (w->tensors.n) ok = ok && add_bytes(&header, w->tensors.bytes, w->tensors.n);
    ok = ok && add_text(&header, "}");
    while (ok && (sizeof prefix + header.n) % ALIGN != 0) ok = add_text(&header, " ");

    dspark_status st = DSPARK_OK;
    if (!ok) {
        st = dspark__fail_nomem(err, "the header of a tensor file", header.n);
    } else if (header.n > DSPARK__ST_MAX_HEADER) {
        st = dspark__fail(err, DSPARK_EINVAL, w->file.path, "a header of %zu bytes, the limit is %u",
                          header.n, DSPARK__ST_MAX_HEADER);
    } else {
        for (int i = 0; i < 8; i++) prefix[i] = (unsigned char)((uint64_t)header.n >> (8 * i));
        st = put_bytes(w, prefix, sizeof prefix, err);
        if (st == DSPARK_OK) st = put_bytes(w, header.bytes, header.n, err);
        w->header_written = 1;
    }
    free(header.bytes);
    return st;
}

/* ------------------------------------------------------------------------------------------------
 * The contract
 * --------------------------------------------------------------------------------------------- */

dspark_status dspark__writer_create(dspark_writer **out, const char *path, dspark_error *err)
{
    dspark_status st;

    *out = NULL;
    dspark_writer *w = calloc(1, sizeof *w);
    if (!w) return dspark__fail_nomem(err, "a writer", sizeof *w);
    w->buffer = malloc(UNIT);
    if (!w->buffer) {
        st = dspark__fail_nomem(err, "a writer", UNIT);
        goto fail;
    }
    if ((st = dspark__outfile_create(&w->file, path, 0, err)) != DSPARK_OK) goto fail;
    *out = w;
    return DSPARK_OK;
fail:
    dspark__writer_abort(w);
    return st;
}

/* Declarations are over and failures are final. */
static dspark_status check_open(dspark_writer *w, int declaring, dspark_error *err)
{
    if (w->failed != DSPARK_OK)
        return dspark__fail(err, w->failed, w->file.path, "an earlier call for this file has failed");
    if (declaring && w->header_written)
        return w->failed = dspark__fail(err, DSPARK_EINVAL, w->file.path,
                                        "declarations come before the first data");
    return DSPARK_OK;
}

dspark_status dspark__writer_metadata(dspark_writer *w, const char *key, const char *value,
                                      dspark_error *err)
{
    size_t id;
    dspark_status st = check_open(w, 1, err);
    if (st != DSPARK_OK) return st;
    if (!is_utf8(key) || !is_utf8(value))
        return w->failed = dspark__fail(err, DSPARK_EINVAL, key, "the metadata is not UTF-8");
    const char *copy = keep(w, key);
    int put = copy ? dspark__nametable_put(&w->keys, copy, &id) : -1;
    if (put == 0)
        return w->failed = dspark__fail(err, DSPARK_EINVAL, key, "the metadata key is given twice");
    if (put < 0 || (w->metadata.n && !add_text(&w->metadata, ",")) ||
        !add_string(&w->metadata, key) || !add_text(&w->metadata, ":") ||
        !add_string(&w->metadata, value))
        return w->failed = dspark__fail_nomem(err, "metadata", strlen(value));
    return DSPARK_OK;
}

static int add_entry(text *t, const char *name, dspark_dtype dtype, uint32_t rank,
                     const uint64_t *shape, uint64_t begin, uint64_t end)
{
    char number[80];
    if (t->n && !add_text(t, ",")) return 0;
    if (!add_string(t, name) || !add_text(t, ":{\"dtype\":\"") ||
        !add_text(t, dspark__dtype_name(dtype)) || !add_text(t, "\",\"shape\":["))
        return 0;
    for (uint32_t i = 0; i < rank; i++) {
        snprintf(number, sizeof number, "%s%llu", i ? "," : "", (unsigned long long)shape[i]);
        if (!add_text(t, number)) return 0;
    }
    snprintf(number, sizeof number, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
             (unsigned long long)end);
    return add_text(t, number);
}

dspark_status dspark__writer_declare(dspark_writer *w, const char *name, dspark_dtype dtype,
                                     uint32_t rank, const uint64_t *shape, dspark_error *err)
{
    uint64_t n_elements, n_bytes, end;
    size_t id;
    dspark_status st = check_open(w, 1, err);
    if (st != DSPARK_OK) return st;

    const char *wrong = NULL;
    if (!is_utf8(name))
        wrong = "the name is not UTF-8";
    else if (strlen(name) > DSPARK__ST_MAX_NAME)
        wrong = "the name is too long";
    else if (strcmp(name, "__metadata__") == 0)
        wrong = "the name is reserved";
    else if (dspark__dtype_bits(dtype) == 0)
        wrong = "the dtype is unknown";
    else if (rank > DSPARK_MAX_RANK)
        wrong = "the shape has too many dimensions";
    else
        wrong = dspark__shape_bytes(dtype, rank, shape, &n_elements, &n_bytes);
    if (!wrong && !dspark__add_u64(w->declared, n_bytes, &end))
        wrong = "the file's size does not fit 64 bits";
    /* A size beyond off_t cannot be a file. */
    if (!wrong && end > (uint64_t)INT64_MAX - DSPARK__ST_MAX_HEADER - 8)
        wrong = "the file would be larger than files can be";
    if (wrong) return w->failed = dspark__fail(err, DSPARK_EINVAL, name, "%s", wrong);

    const char *copy = keep(w, name);
    int put = copy ? dspark__nametable_put(&w->names, copy, &id) : -1;
    if (put == 0)
        return w->failed = dspark__fail(err, DSPARK_EINVAL, name, "the tensor is declared twice");
    if (put < 0 || !add_entry(&w->tensors, name, dtype, rank, shape, w->declared, end))
        return w->failed = dspark__fail_nomem(err, "the header of a tensor file", w->tensors.n);
    w->declared = end;
    return DSPARK_OK;
}

dspark_status dspark__writer_data(dspark_writer *w, const void *data, size_t n_bytes,
                                  dspark_error *err)
{
    dspark_status st = check_open(w, 0, err);
    if (st != DSPARK_OK) return st;
    if (n_bytes > w->declared - w->given)
        return w->failed = dspark__fail(
                   err, DSPARK_EINVAL, w->file.path, "%llu bytes are declared, %llu + %zu are given",
                   (unsigned long long)w->declared, (unsigned long long)w->given, n_bytes);
    if (!w->header_written && (st = write_header(w, err)) != DSPARK_OK) return w->failed = st;
    if ((st = put_bytes(w, data, n_bytes, err)) != DSPARK_OK) return w->failed = st;
    w->given += n_bytes;
    return DSPARK_OK;
}

dspark_status dspark__writer_commit(dspark_writer *w, dspark_error *err)
{
    dspark_status st = check_open(w, 0, err);
    if (st != DSPARK_OK) goto fail;
    if (w->given != w->declared) {
        st = dspark__fail(err, DSPARK_EINVAL, w->file.path, "%llu bytes are declared, %llu are given",
                          (unsigned long long)w->declared, (unsigned long long)w->given);
        goto fail;
    }
    if (!w->header_written && (st = write_header(w, err)) != DSPARK_OK) goto fail;
    if ((st = flush_buffer(w, err)) != DSPARK_OK) goto fail;
    st = dspark__outfile_commit(&w->file, err);
fail:
    dspark__writer_abort(w);
    return st;
}

void dspark__writer_abort(dspark_writer *w)
{
    if (!w) return;
    dspark__outfile_abort(&w->file);
    dspark__nametable_free(&w->keys);
    dspark__nametable_free(&w->names);
    for (size_t i = 0; i < w->n_kept; i++) free(w->kept[i]);
    free(w->kept);
    free(w->metadata.bytes);
    free(w->tensors.bytes);
    free(w->buffer);
    free(w);
}
