/* A checkpoint: finds the files of a path, opens them as one set of tensors, and answers by name.
 * Owns discovery and the agreement of index and shards; the format itself is safetensors.c. */
#include "ckpt/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/digest.h"
#include "base/status.h"
#include "ckpt/safetensors.h"
#include "ckpt/shard_index.h"

#define INDEX_SUFFIX ".safetensors.index.json"
#define FILE_SUFFIX  ".safetensors"

struct dspark_checkpoint {
    dspark__st_file *files;
    size_t n_files;
    dspark__st_list list;
};

static int ends_with(const char *name, const char *suffix)
{
    size_t n = strlen(name), m = strlen(suffix);
    return n >= m && strcmp(name + n - m, suffix) == 0;
}

/* ------------------------------------------------------------------------------------------------
 * Discovery
 * --------------------------------------------------------------------------------------------- */

/* The visible files of a folder that end alike: how many, and the first two by name. */
typedef struct candidates {
    size_t n;
    char name[2][256];
} candidates;

static void add_candidate(candidates *c, const char *name)
{
    c->n++;
    int at = c->n == 1 || strcmp(name, c->name[0]) < 0 ? 0 : 1;
    if (at == 0)
        memcpy(c->name[1], c->name[0], sizeof c->name[1]);
    else if (c->n > 2 && strcmp(name, c->name[1]) >= 0)
        return;
    snprintf(c->name[at], sizeof c->name[at], "%s", name);
}

static dspark_status scan_folder(int folder, const char *path, candidates *indexes,
                                 candidates *files, dspark_error *err)
{
    int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* the stream closes it */
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (!stream) {
        int error_number = errno;
        if (fd >= 0) close(fd);
        return dspark__fail_errno(err, path, "the folder cannot be listed", error_number);
    }
    errno = 0; /* readdir's only way to tell an error from the end */
    for (const struct dirent *d = readdir(stream); d; d = readdir(stream)) {
        if (d->d_name[0] == '.') continue; /* also files that a writer has not finished */
        if (ends_with(d->d_name, INDEX_SUFFIX))
            add_candidate(indexes, d->d_name);
        else if (ends_with(d->d_name, FILE_SUFFIX))
            add_candidate(files, d->d_name);
    }
    int error_number = errno;
    closedir(stream);
    if (error_number != 0)
        return dspark__fail_errno(err, path, "the folder cannot be listed", error_number);
    return DSPARK_OK;
}

static int exists(int folder, const char *name)
{
    struct stat info;
    return fstatat(folder, name, &info, 0) == 0;
}

/* The file to open in a folder: an index or one tensor file. Files are never merged by pattern:
 * some folders hold the same tensors twice under different names. */
static dspark_status discover(int folder, const char *path, char name[256], dspark_error *err)
{
    static const char *const usual[] = {"model" INDEX_SUFFIX, "model" FILE_SUFFIX};
    candidates indexes = {0}, files = {0};

    for (size_t i = 0; i < 2; i++) {
        if (exists(folder, usual[i])) {
            snprintf(name, 256, "%s", usual[i]);
            return DSPARK_OK;
        }
    }
    dspark_status st = scan_folder(folder, path, &indexes, &files, err);
    if (st != DSPARK_OK) return st;
    const candidates *found = indexes.n ? &indexes : &files;
    if (found->n == 0)
        return dspark__fail(err, DSPARK_EIO, path,
                            "no tensor file: looked for model" INDEX_SUFFIX ", model" FILE_SUFFIX
                            ", *" INDEX_SUFFIX ", *" FILE_SUFFIX);
    if (found->n > 1)
        return dspark__fail(
            err, DSPARK_EFORMAT, path,
            "%zu files could be meant (%.150s, %.150s%s) and there is no model" INDEX_SUFFIX,
            found->n, found->name[0], found->name[1], found->n > 2 ? ", ..." : "");
    snprintf(name, 256, "%s", found->name[0]);
    return DSPARK_OK;
}

/* Split a path into an open folder and a name inside it. */
static dspark_status locate(const char *path, int *folder, char name[256], dspark_error *err)
{
    *folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*folder >= 0) return discover(*folder, path, name, err);
    if (errno != ENOTDIR) return dspark__fail_errno(err, path, "cannot be opened", errno);

    const char *slash = strrchr(path, '/');
    const char *base = slash ? slash + 1 : path;
    size_t n = slash ? (size_t)(slash - path) : 0;
    if (strlen(base) > 255) return dspark__fail_errno(err, path, "cannot be opened", ENAMETOOLONG);
    char *parent = malloc(n + 2);
    if (!parent) return dspark__fail_nomem(err, "a path", n + 2);
    memcpy(parent, path, n);
    parent[n] = '\0';
    if (n == 0) memcpy(parent, slash ? "/" : ".", 2);
    *folder = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error_number = errno;
    free(parent);
    if (*folder < 0)
        return dspark__fail_errno(err, path, "its folder cannot be opened", error_number);
    snprintf(name, 256, "%s", base);
    if (ends_with(name, ".json") && !ends_with(name, INDEX_SUFFIX) && exists(*folder, name))
        return dspark__fail(err, DSPARK_EFORMAT, path,
                            "a JSON file, not tensors: give the directory that holds it");
    return DSPARK_OK;
}

/* ------------------------------------------------------------------------------------------------
 * Opening
 * --------------------------------------------------------------------------------------------- */

static dspark_status allocate_files(dspark_checkpoint *c, size_t n, dspark_error *err)
{
    c->files = calloc(n, sizeof *c->files);
    if (!c->files) return dspark__fail_nomem(err, "the list of files", n * sizeof *c->files);
    return DSPARK_OK;
}

/* Every mapped tensor is in the shard it is mapped to, and no shard holds another one. */
static dspark_status match_index(const dspark_checkpoint *c, const dspark__shard_index *index,
                                 const unsigned char *opened, const char *index_name,
                                 dspark_error *err)
{
    for (size_t i = 0; i < index->tensors.n_names; i++) {
        const char *tensor = index->tensors.names[i];
        const char *shard = index->shards.names[index->shard_of[i]];
        if (!opened[index->shard_of[i]]) continue;
        size_t id = dspark__nametable_find(&c->list.names, tensor);
        if (id == DSPARK__NAMETABLE_NONE)
            return dspark__fail(err, DSPARK_EFORMAT, index_name,
                                "%.200s is mapped to %.150s, which does not hold it", tensor,
                                shard);
        const char *file = c->list.entries[id].tensor.file;
        if (strcmp(file, shard) != 0)
            return dspark__fail(err, DSPARK_EFORMAT, index_name,
                                "%.150s is mapped to %.120s, and is in %.120s", tensor, shard,
                                file);
    }
    for (size_t i = 0; i < c->list.n; i++) {
        const dspark_tensor *t = &c->list.entries[i].tensor;
        if (dspark__nametable_find(&index->tensors, t->name) == DSPARK__NAMETABLE_NONE)
            return dspark__fail(err, DSPARK_EFORMAT, index_name,
                                "%.200s is in %.150s, and the index does not map it", t->name,
                                t->file);
    }
    return DSPARK_OK;
}

/* Which tensors somebody asks for; wanted NULL: all. */
typedef struct choice {
    int (*wanted)(void *user, const char *name);
    void *user;
} choice;

/* opened[s] = 1 for every shard to open. */
static void choose_shards(unsigned char *opened, const dspark__shard_index *index,
                          const choice *which)
{
    for (size_t i = 0; i < index->tensors.n_names; i++)
        if (!which->wanted || which->wanted(which->user, index->tensors.names[i]))
            opened[index->shard_of[i]] = 1;
}

static dspark_status open_shards(dspark_checkpoint *c, int folder, const char *index_name,
                                 const choice *which, dspark_error *err)
{
    dspark__shard_index index;
    unsigned char *opened = NULL;
    dspark_status st = dspark__shard_index_read(&index, folder, index_name, err);
    if (st != DSPARK_OK) return st;
    if ((st = allocate_files(c, index.shards.n_names, err)) != DSPARK_OK) goto done;
    opened = calloc(index.shards.n_names, 1);
    if (!opened) {
        st = dspark__fail_nomem(err, "the list of shards", index.shards.n_names);
        goto done;
    }
    choose_shards(opened, &index, which);
    for (size_t i = 0; i < index.shards.n_names; i++) {
        const char *shard = index.shards.names[index.order[i]];
        if (!opened[index.order[i]]) continue;
        if (!exists(folder, shard) && errno == ENOENT) {
            st = dspark__fail(err, DSPARK_EIO, shard,
                              "%s maps tensors to this file, which does "
                              "not exist",
                              index_name);
            goto done;
        }
        st = dspark__st_open(&c->files[c->n_files], folder, shard, &c->list, err);
        if (st != DSPARK_OK) goto done;
        c->n_files++;
    }
    st = match_index(c, &index, opened, index_name, err);
done:
    free(opened);
    dspark__shard_index_free(&index);
    return st;
}

dspark_status dspark__checkpoint_open_some(dspark_checkpoint **out, const char *path,
                                           int (*wanted)(void *user, const char *name), void *user,
                                           dspark_error *err)
{
    dspark_status st;
    int folder = -1;
    char name[256];
    choice which = {wanted, user};

    *out = NULL;
    dspark_checkpoint *c = calloc(1, sizeof *c);
    if (!c) return dspark__fail_nomem(err, "a checkpoint", sizeof *c);
    if ((st = locate(path, &folder, name, err)) != DSPARK_OK) goto fail;
    if (ends_with(name, INDEX_SUFFIX)) {
        st = open_shards(c, folder, name, &which, err);
    } else if ((st = allocate_files(c, 1, err)) == DSPARK_OK) {
        st = dspark__st_open(&c->files[0], folder, name, &c->list, err);
        c->n_files = st == DSPARK_OK;
    }
    if (st != DSPARK_OK) goto fail;
    close(folder);
    *out = c;
    return DSPARK_OK;
fail:
    if (folder >= 0) close(folder);
    dspark__checkpoint_close(c);
    return st;
}

dspark_status dspark__checkpoint_open(dspark_checkpoint **out, const char *path, dspark_error *err)
{
    return dspark__checkpoint_open_some(out, path, NULL, NULL, err);
}

void dspark__checkpoint_close(dspark_checkpoint *c)
{
    if (!c) return;
    for (size_t i = 0; i < c->n_files; i++) dspark__st_close(&c->files[i]);
    free(c->files);
    dspark__st_list_free(&c->list);
    free(c);
}

/* ------------------------------------------------------------------------------------------------
 * Answers
 * --------------------------------------------------------------------------------------------- */

size_t dspark__checkpoint_count(const dspark_checkpoint *c)
{
    return c->list.n;
}

const dspark_tensor *dspark__checkpoint_at(const dspark_checkpoint *c, size_t i)
{
    return i < c->list.n ? &c->list.entries[i].tensor : NULL;
}

const dspark_tensor *dspark__checkpoint_find(const dspark_checkpoint *c, const char *name)
{
    size_t id = dspark__nametable_find(&c->list.names, name);
    return id == DSPARK__NAMETABLE_NONE ? NULL : &c->list.entries[id].tensor;
}

const char *dspark__checkpoint_metadata(const dspark_checkpoint *c, const char *key)
{
    const dspark__st_file *f = &c->files[0];
    size_t id = dspark__nametable_find(&f->metadata_keys, key);
    return id == DSPARK__NAMETABLE_NONE ? NULL : f->metadata_values[id];
}

size_t dspark__checkpoint_file_count(const dspark_checkpoint *c)
{
    return c->n_files;
}

const char *dspark__checkpoint_file_name(const dspark_checkpoint *c, size_t i)
{
    return i < c->n_files ? c->files[i].name : NULL;
}

uint64_t dspark__checkpoint_file_bytes(const dspark_checkpoint *c, size_t i)
{
    return i < c->n_files ? c->files[i].size : 0;
}

dspark_status dspark__checkpoint_identity(const dspark_checkpoint *c, char hex[33], int64_t *newest,
                                          dspark_error *err)
{
    dspark__digest d;
    dspark__digest_init(&d);
    if (newest) *newest = INT64_MIN;
    for (size_t i = 0; i < c->n_files; i++) {
        const dspark__st_file *f = &c->files[i];
        struct stat info;
        if (fstat(f->fd, &info) != 0) return dspark__fail_errno(err, f->name, "fstat", errno);
        int64_t numbers[6] = {(int64_t)info.st_size,         (int64_t)info.st_ino,
                              (int64_t)info.st_mtim.tv_sec,  (int64_t)info.st_mtim.tv_nsec,
                              (int64_t)info.st_ctim.tv_sec,  (int64_t)info.st_ctim.tv_nsec};
        dspark__digest_update(&d, f->name, strlen(f->name) + 1);
        dspark__digest_update(&d, numbers, sizeof numbers);
        int64_t changed = numbers[4] * 1000000000 + numbers[5];
        if (newest && changed > *newest) *newest = changed;
    }
    dspark__digest_hex(&d, hex);
    return DSPARK_OK;
}

/* The file whose mapping holds the tensor's bytes. */
static const dspark__st_file *file_of(const dspark_checkpoint *c, const dspark_tensor *t)
{
    uintptr_t data = (uintptr_t)t->data;
    for (size_t i = 0; i < c->n_files; i++) {
        uintptr_t map = (uintptr_t)c->files[i].map;
        if (data >= map && data - map <= c->files[i].size &&
            t->n_bytes <= c->files[i].size - (data - map) && t->file == c->files[i].name)
            return &c->files[i];
    }
    return NULL;
}

dspark_status dspark__checkpoint_verify(const dspark_checkpoint *c, const dspark_tensor *t,
                                        dspark_error *err)
{
    struct stat info;
    const dspark__st_file *f = file_of(c, t);
    if (!f) return dspark__fail(err, DSPARK_EINVAL, t->name, "not a tensor of this checkpoint");
    if (fstat(f->fd, &info) != 0) return dspark__fail_errno(err, f->name, "fstat", errno);
    uint64_t end = (uint64_t)((const unsigned char *)t->data - f->map) + t->n_bytes;
    if (info.st_size < 0 || (uint64_t)info.st_size < end)
        return dspark__fail(err, DSPARK_EIO, f->name,
                            "the file has shrunk since it was opened: from %llu to %lld bytes, "
                            "%.200s ends at %llu",
                            (unsigned long long)f->size, (long long)info.st_size, t->name,
                            (unsigned long long)end);
    return DSPARK_OK;
}

void dspark__checkpoint_drop(const dspark_checkpoint *c, const dspark_tensor *t, uint64_t offset,
                             uint64_t n)
{
    const dspark__st_file *f = file_of(c, t);
    long page = sysconf(_SC_PAGESIZE);
    if (!f || page <= 0 || offset > t->n_bytes) return;
    if (n > t->n_bytes - offset) n = t->n_bytes - offset;

    /* Whole pages inside the range only: its edges belong to neighbours, which may be in use. */
    uintptr_t mask = (uintptr_t)page - 1;
    uintptr_t begin = ((uintptr_t)t->data + offset + mask) & ~mask;
    uintptr_t end = ((uintptr_t)t->data + offset + n) & ~mask;
    if (begin < end) (void)madvise((void *)begin, end - begin, MADV_DONTNEED);
}
