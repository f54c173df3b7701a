/* Hand-made checkpoints. */
#include "support/tensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "ckpt/dtype.h"
#include "support/fixture.h"
#include "support/tmpdir.h"

void tensors_clear(tensors *t)
{
    dspark_checkpoint_close(t->ckpt);
    for (size_t i = 0; i < t->n; i++) free(t->list[i].data);
    memset(t, 0, sizeof *t);
}

void *tensors_add(tensors *t, const char *name, dspark_dtype dtype, uint32_t rank,
                  const uint64_t *shape, const void *data)
{
    uint64_t n_elements, n_bytes;
    size_t i = t->n++;

    assert_true(i < TENSORS_MAX && rank <= DSPARK_MAX_RANK);
    if (dspark__shape_bytes(dtype, rank, shape, &n_elements, &n_bytes))
        fail_msg("bad shape: %s", name);
    snprintf(t->list[i].name, sizeof t->list[i].name, "%s", name);
    t->list[i].dtype = dtype;
    t->list[i].rank = rank;
    if (rank) memcpy(t->list[i].shape, shape, rank * sizeof *shape);
    t->list[i].n_bytes = n_bytes;
    t->list[i].data = calloc(1, n_bytes + 1);
    assert_non_null(t->list[i].data);
    if (data) memcpy(t->list[i].data, data, n_bytes);
    return t->list[i].data;
}

void *tensors_add2(tensors *t, const char *name, dspark_dtype dtype, uint64_t d0, uint64_t d1,
                   const void *data)
{
    uint64_t shape[2] = {d0, d1};
    return tensors_add(t, name, dtype, d1 ? 2 : 1, shape, data);
}

size_t tensors_index(const tensors *t, const char *name)
{
    for (size_t i = 0; i < t->n; i++)
        if (!strcmp(t->list[i].name, name)) return i;
    fail_msg("no tensor %s", name);
    return 0;
}

void tensors_remove(tensors *t, const char *name)
{
    size_t i = tensors_index(t, name);
    free(t->list[i].data);
    memmove(&t->list[i], &t->list[i + 1], (--t->n - i) * sizeof t->list[0]);
}

static void write_file(const tensors *t, const char *path, size_t first, size_t step)
{
    dspark_writer *w;
    dspark_error err;

    check(dspark_writer_create(&w, path, &err), DSPARK_OK, &err);
    for (size_t i = first; i < t->n; i += step)
        check(dspark_writer_declare(w, t->list[i].name, t->list[i].dtype, t->list[i].rank,
                                    t->list[i].shape, &err),
              DSPARK_OK, &err);
    for (size_t i = first; i < t->n; i += step)
        check(dspark_writer_data(w, t->list[i].data, t->list[i].n_bytes, &err), DSPARK_OK, &err);
    check(dspark_writer_commit(w, &err), DSPARK_OK, &err);
}

static void write_index(const tensors *t, const char *dir, size_t n_files)
{
    size_t cap = 200 * (t->n + 1), at = 0;
    char *text = malloc(cap);

    assert_non_null(text);
    at += (size_t)snprintf(text, cap, "{\"metadata\": {}, \"weight_map\": {");
    for (size_t i = 0; i < t->n; i++)
        at += (size_t)snprintf(text + at, cap - at, "%s\"%s\": \"part-%zu.safetensors\"",
                               i ? ", " : "", t->list[i].name, i % n_files);
    at += (size_t)snprintf(text + at, cap - at, "}}");
    tmpdir_write(tmpdir_path(dir, "model.safetensors.index.json"), text, at);
    free(text);
}

void tensors_open(tensors *t, const char *dir, size_t n_files)
{
    dspark_error err;
    char name[40];

    if (n_files > t->n) n_files = t->n;
    for (size_t f = 0; f < n_files; f++) {
        snprintf(name, sizeof name, "part-%zu.safetensors", f);
        write_file(t, tmpdir_path(dir, n_files > 1 ? name : "model.safetensors"), f, n_files);
    }
    if (n_files > 1) write_index(t, dir, n_files);
    dspark_checkpoint_close(t->ckpt);
    check(dspark_checkpoint_open(&t->ckpt, dir, &err), DSPARK_OK, &err);
}

void tensors_module(const tensors *t, const char *name, dspark__module *m)
{
    size_t n = strlen(name);

    memset(m, 0, sizeof *m);
    snprintf(m->name, sizeof m->name, "%s", name);
    for (size_t i = 0; i < dspark_checkpoint_tensor_count(t->ckpt); i++) {
        const dspark_tensor *tensor = dspark_checkpoint_tensor(t->ckpt, i);
        if (strncmp(tensor->name, name, n) != 0 || tensor->name[n] != '.') continue;
        assert_true(m->n_parts < DSPARK__MODULE_PARTS);
        m->parts[m->n_parts].suffix = tensor->name + n + 1;
        m->parts[m->n_parts++].tensor = tensor;
    }
}
