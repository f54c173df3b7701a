/* The safetensors header. Owns every rule of the format: a tensor that leaves here has a known
 * dtype, a shape whose bytes are exactly its range, and a range that no other tensor shares. The
 * header is read, not mapped, so a file that changes meanwhile cannot change what was checked. */
#include "ckpt/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/status.h"
#include "ckpt/dtype.h"
#include "ckpt/json.h"

#define METADATA "__metadata__"

/* ------------------------------------------------------------------------------------------------
 * Files
 * --------------------------------------------------------------------------------------------- */

dspark_status dspark__st_open_regular(int folder, const char *name, int *fd, uint64_t *size,
                                      dspark_error *err)
{
    struct stat info;

    *fd = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (*fd < 0) return dspark__fail_errno(err, name, "cannot be opened", errno);
    dspark_status st = DSPARK_OK;
    if (fstat(*fd, &info) != 0)
        st = dspark__fail_errno(err, name, "fstat", errno);
    else if (!S_ISREG(info.st_mode))
        st = dspark__fail(err, DSPARK_EIO, name, "not a regular file");
    else
        *size = (uint64_t)info.st_size;
    if (st != DSPARK_OK) {
        close(*fd);
        *fd = -1;
    }
    return st;
}

dspark_status dspark__st_read(int fd, const char *name, uint64_t offset, void *to, size_t n,
                              dspark_error *err)
{
    size_t done = 0;
    while (done < n) {
        ssize_t got = pread(fd, (char *)to + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return dspark__fail_errno(err, name, "cannot be read", errno);
        if (got == 0)
            return dspark__fail(err, DSPARK_EIO, name, "ends at byte %llu while being read",
                                (unsigned long long)(offset + done));
        done += (size_t)got;
    }
    return DSPARK_OK;
}

void dspark__st_close(dspark__st_file *f)
{
    if (f->map) munmap((void *)(uintptr_t)f->map, (size_t)f->size);
    if (f->name && f->fd >= 0) close(f->fd); /* a zero object has no name: 0 is not its own */
    free(f->header);
    free(f->metadata_values);
    dspark__nametable_free(&f->metadata_keys);
    free(f->name);
    *f = (dspark__st_file){.fd = -1};
}

void dspark__st_list_free(dspark__st_list *list)
{
    free(list->entries);
    dspark__nametable_free(&list->names);
    *list = (dspark__st_list){0};
}

/* ------------------------------------------------------------------------------------------------
 * One entry
 * --------------------------------------------------------------------------------------------- */

DSPARK__PRINTF(5, 6)
static dspark_status fail_tensor(dspark_error *err, dspark_status code, const dspark__st_file *f,
                                 const char *name, const char *fmt, ...)
{
    char place[2 * sizeof err->where];
    char text[sizeof err->message];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    snprintf(place, sizeof place, "%s: %s", f->name, name);
    return dspark__fail(err, code, place, "%s", text);
}

/* [a, b, ...] into values[max]; *n counts all elements, also those beyond max. */
static int read_numbers(dspark__json_reader *r, uint64_t *values, size_t max, size_t *n)
{
    int more = 1;
    *n = 0;
    if (!dspark__json_take(r, '[')) return 0;
    if (dspark__json_peek(r) == ']') return dspark__json_next(r, ']', &more);
    while (more) {
        uint64_t v;
        if (!dspark__json_u64(r, &v) || !dspark__json_next(r, ']', &more)) return 0;
        if (*n < max) values[*n] = v;
        (*n)++;
    }
    return 1;
}

/* dtype, shape and data_offsets as the file gives them. */
typedef struct raw_entry {
    const char *dtype;
    uint64_t shape[DSPARK_MAX_RANK], offsets[2];
    size_t rank, n_offsets;
    int has_dtype, has_shape, has_offsets;
} raw_entry;

static int read_fields(dspark__json_reader *r, raw_entry *raw)
{
    int more = 1;
    if (!dspark__json_take(r, '{')) return 0;
    if (dspark__json_peek(r) == '}') return dspark__json_next(r, '}', &more);
    while (more) {
        char *field, *text;
        size_t n;
        int *seen, ok;
        if (!dspark__json_string(r, &field, &n) || !dspark__json_take(r, ':')) return 0;
        if (strcmp(field, "dtype") == 0)
            seen = &raw->has_dtype;
        else if (strcmp(field, "shape") == 0)
            seen = &raw->has_shape;
        else if (strcmp(field, "data_offsets") == 0)
            seen = &raw->has_offsets;
        else
            return dspark__json_refuse(r, "unknown field \"%.40s\"", field);
        if (*seen) return dspark__json_refuse(r, "the field \"%s\" appears twice", field);
        *seen = 1;
        if (seen == &raw->has_dtype) {
            ok = dspark__json_string(r, &text, &n);
            if (ok) raw->dtype = text;
        } else if (seen == &raw->has_shape) {
            ok = read_numbers(r, raw->shape, DSPARK_MAX_RANK, &raw->rank);
        } else {
            ok = read_numbers(r, raw->offsets, 2, &raw->n_offsets);
        }
        if (!ok) {
            /* Say which field: a copy, since the text may lie in r->error. */
            char reason[sizeof r->error];
            snprintf(reason, sizeof reason, "%s", r->error);
            r->error[0] = '\0';
            return dspark__json_refuse(r, "%s: %.130s", field, reason);
        }
        if (!dspark__json_next(r, '}', &more)) return 0;
    }
    return 1;
}

/* Raw fields to a checked tensor: all that can be said without the other tensors. */
static dspark_status check_entry(const dspark__st_file *f, const char *name, const raw_entry *raw,
                                 dspark__st_entry *e, dspark_error *err)
{
    const char *missing = !raw->has_dtype     ? "dtype"
                          : !raw->has_shape   ? "shape"
                          : !raw->has_offsets ? "data_offsets"
                                              : NULL;
    if (missing)
        return fail_tensor(err, DSPARK_EFORMAT, f, name, "the field \"%s\" is missing", missing);
    dspark_dtype dtype = dspark__dtype_parse(raw->dtype);
    if (dtype == DSPARK_DTYPE_NONE)
        return fail_tensor(err, DSPARK_EFORMAT, f, name, "unknown dtype \"%.40s\"", raw->dtype);
    if (raw->rank > DSPARK_MAX_RANK)
        return fail_tensor(err, DSPARK_EUNSUPPORTED, f, name,
                           "a shape of %zu dimensions, at most %d are read", raw->rank,
                           DSPARK_MAX_RANK);
    if (raw->n_offsets != 2)
        return fail_tensor(err, DSPARK_EFORMAT, f, name,
                           "data_offsets holds %zu numbers, must be 2", raw->n_offsets);

    char shape[256];
    unsigned long long begin = raw->offsets[0], end = raw->offsets[1];
    uint32_t rank = (uint32_t)raw->rank;
    dspark__shape_text(rank, raw->shape, shape, sizeof shape);
    if (end < begin)
        return fail_tensor(err, DSPARK_EFORMAT, f, name,
                           "data_offsets [%llu, %llu] end before "
                           "they begin",
                           begin, end);
    dspark_tensor *t = &e->tensor;
    const char *wrong = dspark__shape_bytes(dtype, rank, raw->shape, &t->n_elements, &t->n_bytes);
    if (wrong)
        return fail_tensor(err, DSPARK_EFORMAT, f, name, "%s %s: %s", raw->dtype, shape, wrong);
    if (end - begin != t->n_bytes)
        return fail_tensor(err, DSPARK_EFORMAT, f, name,
                           "%s %s takes %llu bytes, data_offsets [%llu, %llu] hold %llu",
                           raw->dtype, shape, (unsigned long long)t->n_bytes, begin, end,
                           end - begin);
    t->name = name;
    t->dtype = dtype;
    t->rank = rank;
    memcpy(t->shape, raw->shape, rank * sizeof t->shape[0]);
    t->file = f->name;
    e->begin = begin;
    e->end = end;
    return DSPARK_OK;
}

/* ------------------------------------------------------------------------------------------------
 * The header
 * --------------------------------------------------------------------------------------------- */

static dspark_status read_metadata(dspark__st_file *f, dspark__json_reader *r, dspark_error *err)
{
    int more = 1;

    if (dspark__json_peek(r) == 'n' && dspark__json_literal(r)) return DSPARK_OK; /* null */
    if (!dspark__json_take(r, '{')) goto broken;
    if (dspark__json_peek(r) == '}') {
        if (!dspark__json_next(r, '}', &more)) goto broken;
        return DSPARK_OK;
    }
    while (more) {
        char *key, *value;
        size_t n, id;
        if (!dspark__json_string(r, &key, &n) || !dspark__json_take(r, ':') ||
            !dspark__json_string(r, &value, &n) || !dspark__json_next(r, '}', &more))
            goto broken;
        int put = dspark__nametable_put(&f->metadata_keys, key, &id);
        if (put == 0)
            return fail_tensor(err, DSPARK_EFORMAT, f, METADATA, "the key \"%.80s\" appears twice",
                               key);
        if (put > 0 && id == f->metadata_capacity) {
            size_t capacity = id ? 2 * id : 16;
            const char **values = realloc(f->metadata_values, capacity * sizeof *values);
            if (!values)
                put = -1;
            else {
                f->metadata_values = values;
                f->metadata_capacity = capacity;
            }
        }
        if (put < 0) return dspark__fail_nomem(err, "the metadata of a tensor file", n);
        f->metadata_values[id] = value;
    }
    return DSPARK_OK;
broken:
    return fail_tensor(err, DSPARK_EFORMAT, f, METADATA, "%s", r->error);
}

static dspark_status append_entry(dspark__st_list *list, const dspark__st_entry *e,
                                  dspark_error *err)
{
    if (list->n == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 64, bytes;
        dspark__st_entry *entries = NULL;
        if (dspark__mul_size(capacity, sizeof *entries, &bytes))
            entries = realloc(list->entries, bytes);
        if (!entries) return dspark__fail_nomem(err, "the list of tensors", capacity);
        list->entries = entries;
        list->capacity = capacity;
    }
    list->entries[list->n++] = *e;
    return DSPARK_OK;
}

static dspark_status read_header(dspark__st_file *f, size_t n_bytes, dspark__st_list *list,
                                 dspark_error *err)
{
    dspark_status st;
    dspark__json_reader r;
    int more = 1, has_metadata = 0;

    dspark__json_reader_init(&r, f->header, n_bytes);
    if (!dspark__json_take(&r, '{')) goto broken;
    if (dspark__json_peek(&r) == '}' && !dspark__json_next(&r, '}', &more)) goto broken;
    while (more) {
        char *name;
        size_t n;
        if (!dspark__json_string(&r, &name, &n) || !dspark__json_take(&r, ':')) goto broken;
        if (strcmp(name, METADATA) == 0) {
            if (has_metadata) return fail_tensor(err, DSPARK_EFORMAT, f, METADATA, "appears twice");
            has_metadata = 1;
            if ((st = read_metadata(f, &r, err)) != DSPARK_OK) return st;
        } else {
            raw_entry raw = {0};
            dspark__st_entry e = {0};
            if (n > DSPARK__ST_MAX_NAME)
                return fail_tensor(err, DSPARK_EUNSUPPORTED, f, name,
                                   "a name of %zu bytes, at most %u are read", n,
                                   DSPARK__ST_MAX_NAME);
            if (!read_fields(&r, &raw))
                return fail_tensor(err, DSPARK_EFORMAT, f, name, "%s", r.error);
            if ((st = check_entry(f, name, &raw, &e, err)) != DSPARK_OK) return st;
            if ((st = append_entry(list, &e, err)) != DSPARK_OK) return st;
        }
        if (!dspark__json_next(&r, '}', &more)) goto broken;
    }
    if (!dspark__json_end(&r)) goto broken;
    return DSPARK_OK;
broken:
    return dspark__fail(err, DSPARK_EFORMAT, f->name, "the header is not valid: %s", r.error);
}

/* ------------------------------------------------------------------------------------------------
 * The tensors together
 * --------------------------------------------------------------------------------------------- */

static int comes_before(const dspark__st_entry *a, const dspark__st_entry *b)
{
    if (a->begin != b->begin) return a->begin < b->begin;
    if (a->end != b->end) return a->end < b->end;
    return strcmp(a->tensor.name, b->tensor.name) < 0; /* empty tensors at one place */
}

static void sift_down(dspark__st_entry *e, size_t at, size_t n)
{
    dspark__st_entry moved = e[at];
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= n) break;
        if (child + 1 < n && comes_before(&e[child], &e[child + 1])) child++;
        if (!comes_before(&moved, &e[child])) break;
        e[at] = e[child];
        at = child;
    }
    e[at] = moved;
}

/* Heap sort: qsort may allocate, and files are mostly sorted already. */
static void sort_entries(dspark__st_entry *e, size_t n)
{
    size_t sorted = 1;
    if (n < 2) return;
    while (sorted < n && !comes_before(&e[sorted], &e[sorted - 1])) sorted++;
    if (sorted >= n) return;
    for (size_t i = n / 2; i-- > 0;) sift_down(e, i, n);
    for (size_t i = n; i-- > 1;) {
        dspark__st_entry last = e[i];
        e[i] = e[0];
        e[0] = last;
        sift_down(e, 0, i);
    }
}

/* Names once, ranges without gap or overlap, the last one ending with the file. */
static dspark_status check_layout(const dspark__st_file *f, dspark__st_list *list, size_t first,
                                  dspark_error *err)
{
    uint64_t at = 0;

    for (size_t i = first; i < list->n; i++) {
        const char *name = list->entries[i].tensor.name;
        size_t id;
        int put = dspark__nametable_put(&list->names, name, &id);
        if (put < 0) return dspark__fail_nomem(err, "the table of tensor names", list->n);
        if (put > 0) continue;
        const char *other = list->entries[id].tensor.file;
        if (id >= first)
            return fail_tensor(err, DSPARK_EFORMAT, f, name, "the tensor is defined twice");
        return fail_tensor(err, DSPARK_EFORMAT, f, name, "the tensor is in %s too", other);
    }
    for (size_t i = first; i < list->n; i++) {
        const dspark__st_entry *e = &list->entries[i];
        if (e->begin == at) {
            at = e->end;
            continue;
        }
        unsigned long long begin = e->begin, end = e->end, expected = at;
        if (e->begin > at)
            return fail_tensor(err, DSPARK_EFORMAT, f, e->tensor.name,
                               "data_offsets [%llu, %llu] leave a gap: %llu must follow", begin,
                               end, expected);
        return fail_tensor(err, DSPARK_EFORMAT, f, e->tensor.name,
                           "data_offsets [%llu, %llu] overlap those of %.200s, which end at %llu",
                           begin, end, list->entries[i - 1].tensor.name, expected);
    }
    uint64_t there = f->size - f->data_at;
    if (at != there)
        return dspark__fail(err, DSPARK_EFORMAT, f->name,
                            "%s: the header declares %llu bytes of data, the file has %llu "
                            "(%llu bytes in all)",
                            at > there ? "truncated" : "trailing bytes", (unsigned long long)at,
                            (unsigned long long)there, (unsigned long long)f->size);
    return DSPARK_OK;
}

/* What a clone without git-lfs has in the place of a large file. */
static int is_lfs_pointer(const dspark__st_file *f)
{
    static const char begin[] = "version https://git-lfs";
    char text[sizeof begin - 1];

    return f->size >= sizeof text && f->size < 4096 &&
           dspark__st_read(f->fd, f->name, 0, text, sizeof text, NULL) == DSPARK_OK &&
           memcmp(text, begin, sizeof text) == 0;
}

static int is_text(const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] >= 0x7f || (p[i] < 0x20 && !strchr("\t\n\r", p[i])) || p[i] == 0) return 0;
    return 1;
}

dspark_status dspark__st_open(dspark__st_file *f, int folder, const char *name,
                              dspark__st_list *list, dspark_error *err)
{
    dspark_status st;
    unsigned char prefix[8];
    uint64_t header_bytes = 0;
    size_t first = list->n;

    *f = (dspark__st_file){.fd = -1};
    if (!(f->name = strdup(name))) return dspark__fail_nomem(err, "a file name", strlen(name) + 1);
    if ((st = dspark__st_open_regular(folder, name, &f->fd, &f->size, err)) != DSPARK_OK) goto fail;
    if (is_lfs_pointer(f)) {
        st = dspark__fail(err, DSPARK_EFORMAT, name,
                          "a git-lfs pointer, not the tensors: fetch the file itself (git lfs pull)");
        goto fail;
    }
    if (f->size < 8) {
        st = dspark__fail(err, DSPARK_EFORMAT, name,
                          "%llu bytes are too few: the header's length alone takes 8",
                          (unsigned long long)f->size);
        goto fail;
    }
    if ((st = dspark__st_read(f->fd, name, 0, prefix, sizeof prefix, err)) != DSPARK_OK) goto fail;
    for (int i = 7; i >= 0; i--) header_bytes = header_bytes << 8 | prefix[i];
    if (memcmp(prefix, "DSPARKPK", sizeof prefix) == 0) {
        st = dspark__fail(err, DSPARK_EFORMAT, name,
                          "is a prepacked file: name its checkpoint, and this one with --prepacked");
        goto fail;
    }
    if (header_bytes > DSPARK__ST_MAX_HEADER && is_text(prefix, sizeof prefix)) {
        st = dspark__fail(err, DSPARK_EFORMAT, name,
                          "looks like text, not safetensors: it begins with \"%.8s\"",
                          (const char *)prefix);
        goto fail;
    }
    if (header_bytes > DSPARK__ST_MAX_HEADER) {
        st = dspark__fail(err, DSPARK_EFORMAT, name,
                          "a header of %llu bytes is declared, the limit is %u",
                          (unsigned long long)header_bytes, DSPARK__ST_MAX_HEADER);
        goto fail;
    }
    if (header_bytes > f->size - 8) {
        st = dspark__fail(err, DSPARK_EFORMAT, name,
                          "truncated: a header of %llu bytes is declared, the file has %llu bytes",
                          (unsigned long long)header_bytes, (unsigned long long)f->size);
        goto fail;
    }
    f->data_at = 8 + header_bytes;
    f->header = malloc((size_t)header_bytes + 1);
    if (!f->header) {
        st = dspark__fail_nomem(err, "the header of a tensor file", header_bytes + 1);
        goto fail;
    }
    st = dspark__st_read(f->fd, name, 8, f->header, (size_t)header_bytes, err);
    if (st != DSPARK_OK) goto fail;
    if ((st = read_header(f, (size_t)header_bytes, list, err)) != DSPARK_OK) goto fail;
    if (list->n > first) sort_entries(list->entries + first, list->n - first);
    if ((st = check_layout(f, list, first, err)) != DSPARK_OK) goto fail;

    void *map = mmap(NULL, (size_t)f->size, PROT_READ, MAP_PRIVATE, f->fd, 0);
    if (map == MAP_FAILED) {
        st = dspark__fail_errno(err, name, "cannot be mapped", errno);
        goto fail;
    }
    f->map = map;
    for (size_t i = first; i < list->n; i++)
        list->entries[i].tensor.data = f->map + f->data_at + list->entries[i].begin;
    return DSPARK_OK;
fail:
    dspark__st_close(f);
    return st;
}
