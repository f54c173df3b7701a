/* The shard index. Owns the rules for file names that come from a file: a bare name in the same
 * folder and nothing else, so an index cannot point anywhere. */
#include "ckpt/shard_index.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "ckpt/json.h"
#include "ckpt/safetensors.h"

#define MAX_DEPTH 16u

void dspark__shard_index_free(dspark__shard_index *index)
{
    free(index->text);
    free(index->shard_of);
    free(index->order);
    dspark__nametable_free(&index->tensors);
    dspark__nametable_free(&index->shards);
    *index = (dspark__shard_index){0};
}

/* NULL, or why `file` must not be opened. */
static const char *refuse_file_name(const char *file)
{
    size_t n = strlen(file);
    if (n == 0) return "is empty";
    if (n > 255) return "is longer than 255 bytes";
    if (strchr(file, '/') || strchr(file, '\\')) return "must be a bare file name";
    if (strcmp(file, ".") == 0 || strstr(file, "..")) return "must not lead to another folder";
    return NULL;
}

static dspark_status add_tensor(dspark__shard_index *index, const char *where, const char *tensor,
                                const char *file, dspark_error *err)
{
    size_t id, shard;
    const char *wrong = refuse_file_name(file);
    if (wrong)
        return dspark__fail(err, DSPARK_EFORMAT, where,
                            "weight_map: %.150s: the file name "
                            "\"%.150s\" %s",
                            tensor, file, wrong);
    int put = dspark__nametable_put(&index->tensors, tensor, &id);
    if (put == 0)
        return dspark__fail(err, DSPARK_EFORMAT, where, "weight_map: %.150s appears twice", tensor);
    int put_shard = put < 0 ? -1 : dspark__nametable_put(&index->shards, file, &shard);
    if (put_shard < 0) return dspark__fail_nomem(err, "the shard index", index->tensors.n_names);
    if (index->shards.n_names > DSPARK__INDEX_MAX_SHARDS)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, where, "more than %u shard files",
                            DSPARK__INDEX_MAX_SHARDS);
    if (id == index->shard_of_capacity) {
        size_t capacity = id ? 2 * id : 64;
        uint32_t *shard_of = realloc(index->shard_of, capacity * sizeof *shard_of);
        if (!shard_of) return dspark__fail_nomem(err, "the shard index", capacity);
        index->shard_of = shard_of;
        index->shard_of_capacity = capacity;
    }
    index->shard_of[id] = (uint32_t)shard;
    return DSPARK_OK;
}

static dspark_status read_weight_map(dspark__shard_index *index, dspark__json_reader *r,
                                     const char *where, dspark_error *err)
{
    int more = 1;
    if (!dspark__json_take(r, '{')) goto broken;
    if (dspark__json_peek(r) == '}' && !dspark__json_next(r, '}', &more)) goto broken;
    while (more) {
        char *tensor, *file;
        size_t n;
        if (!dspark__json_string(r, &tensor, &n) || !dspark__json_take(r, ':') ||
            !dspark__json_string(r, &file, &n))
            goto broken;
        dspark_status st = add_tensor(index, where, tensor, file, err);
        if (st != DSPARK_OK) return st;
        if (!dspark__json_next(r, '}', &more)) goto broken;
    }
    return DSPARK_OK;
broken:
    return dspark__fail(err, DSPARK_EFORMAT, where, "weight_map: %s", r->error);
}

static dspark_status parse_index(dspark__shard_index *index, size_t n_bytes, const char *where,
                                 dspark_error *err)
{
    dspark__json_reader r;
    int more = 1, has_map = 0, has_metadata = 0;

    dspark__json_reader_init(&r, index->text, n_bytes);
    if (!dspark__json_take(&r, '{')) goto broken;
    if (dspark__json_peek(&r) == '}' && !dspark__json_next(&r, '}', &more)) goto broken;
    while (more) {
        char *key;
        size_t n;
        if (!dspark__json_string(&r, &key, &n) || !dspark__json_take(&r, ':')) goto broken;
        int is_map = strcmp(key, "weight_map") == 0;
        int *seen = is_map ? &has_map : strcmp(key, "metadata") == 0 ? &has_metadata : NULL;
        if (seen && (*seen)++)
            return dspark__fail(err, DSPARK_EFORMAT, where, "the key \"%s\" appears twice", key);
        if (is_map) {
            dspark_status st = read_weight_map(index, &r, where, err);
            if (st != DSPARK_OK) return st;
        } else if (!dspark__json_skip(&r, MAX_DEPTH)) {
            goto broken;
        }
        if (!dspark__json_next(&r, '}', &more)) goto broken;
    }
    if (!dspark__json_end(&r)) goto broken;
    if (!has_map) return dspark__fail(err, DSPARK_EFORMAT, where, "\"weight_map\" is missing");
    if (index->tensors.n_names == 0)
        return dspark__fail(err, DSPARK_EFORMAT, where, "\"weight_map\" is empty");
    return DSPARK_OK;
broken:
    return dspark__fail(err, DSPARK_EFORMAT, where, "not a valid index: %s", r.error);
}

/* Shards by name: the order in which tensors are listed must not hang on the index's order. */
static dspark_status sort_shards(dspark__shard_index *index, dspark_error *err)
{
    size_t n = index->shards.n_names;
    const char *const *names = index->shards.names;
    index->order = malloc(n * sizeof *index->order);
    if (!index->order) return dspark__fail_nomem(err, "the shard index", n);
    for (size_t i = 0; i < n; i++) {
        size_t at = i;
        while (at > 0 && strcmp(names[index->order[at - 1]], names[i]) > 0) {
            index->order[at] = index->order[at - 1];
            at--;
        }
        index->order[at] = (uint32_t)i;
    }
    return DSPARK_OK;
}

dspark_status dspark__shard_index_read(dspark__shard_index *index, int folder, const char *name,
                                       dspark_error *err)
{
    dspark_status st;
    int fd = -1;
    uint64_t size;

    *index = (dspark__shard_index){0};
    if ((st = dspark__st_open_regular(folder, name, &fd, &size, err)) != DSPARK_OK) goto fail;
    if (size > DSPARK__JSON_MAX_BYTES) {
        st = dspark__fail(err, DSPARK_EFORMAT, name, "an index of %llu bytes, the limit is %zu",
                          (unsigned long long)size, DSPARK__JSON_MAX_BYTES);
        goto fail;
    }
    index->text = malloc((size_t)size + 1);
    if (!index->text) {
        st = dspark__fail_nomem(err, "the shard index", size + 1);
        goto fail;
    }
    st = dspark__st_read(fd, name, 0, index->text, (size_t)size, err);
    if (st != DSPARK_OK) goto fail;
    if ((st = parse_index(index, (size_t)size, name, err)) != DSPARK_OK) goto fail;
    if ((st = sort_shards(index, err)) != DSPARK_OK) goto fail;
    close(fd);
    return DSPARK_OK;
fail:
    if (fd >= 0) close(fd);
    dspark__shard_index_free(index);
    return st;
}
