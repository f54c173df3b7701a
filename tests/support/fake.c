/* Checkpoints that are all header. */
#include "support/fake.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include <jansson.h>

#include "ckpt/dtype.h"
#include "ckpt/roster.h"
#include "support/tmpdir.h"

char *fake_config_text(const char *name)
{
    char path[600];
    char *text;
    size_t n;
    dspark_error err;

    snprintf(path, sizeof path, "%s/configs/%s.json", DSPARK_TEST_DATA, name);
    if (dspark__config_text(&text, &n, path, &err) != DSPARK_OK) fail_msg("%s", err.message);
    return text;
}

dspark__config_doc *fake_config(const char *name)
{
    char *text = fake_config_text(name);
    dspark__config_doc *doc;
    dspark_error err;

    if (dspark__config_parse(&doc, text, strlen(text), name, &err) != DSPARK_OK)
        fail_msg("%s: %s", err.where, err.message);
    free(text);
    return doc;
}

void fake_add(fake *f, const char *name, dspark_dtype dtype, uint32_t rank, uint64_t d0,
              uint64_t d1)
{
    fake_tensor *t = &f->list[f->n++];

    assert_true(f->n <= FAKE_MAX);
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%s", name);
    t->dtype = dtype;
    t->rank = rank;
    t->shape[0] = d0;
    t->shape[1] = d1;
}

void fake_from_roster(fake *f, const dspark_config *c, int context_only)
{
    dspark__roster_entry *roster;
    size_t n;

    f->n = 0;
    assert_int_equal(dspark__roster_make(&roster, &n, c, context_only, NULL), DSPARK_OK);
    for (size_t i = 0; i < n; i++)
        fake_add(f, roster[i].name, DSPARK_BF16, roster[i].rank, roster[i].shape[0],
                 roster[i].shape[1]);
    free(roster);
}

fake_tensor *fake_find(fake *f, const char *name)
{
    for (size_t i = 0; i < f->n; i++)
        if (!strcmp(f->list[i].name, name)) return &f->list[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

void fake_remove(fake *f, const char *name)
{
    fake_tensor *t = fake_find(f, name);
    size_t after = f->n - 1 - (size_t)(t - f->list);

    memmove(t, t + 1, after * sizeof *t);
    f->n--;
}

void fake_rename(fake *f, const char *from, const char *to)
{
    fake_tensor *t = fake_find(f, from);

    snprintf(t->name, sizeof t->name, "%s", to);
}

void fake_write(const fake *f, const char *dir, const char *config_text)
{
    json_t *root = json_object();
    const char *path = tmpdir_path(dir, "model.safetensors");
    uint64_t at = 0, n;
    char *header, *file;

    for (size_t i = 0; i < f->n; i++) {
        const fake_tensor *t = &f->list[i];
        json_t *o = json_object(), *shape = json_array(), *offsets = json_array();
        uint64_t bits = dspark__dtype_bits(t->dtype);

        for (uint32_t d = 0; d < t->rank; d++) {
            bits *= t->shape[d];
            json_array_append_new(shape, json_integer((json_int_t)t->shape[d]));
        }
        json_array_append_new(offsets, json_integer((json_int_t)at));
        at += bits / 8;
        json_array_append_new(offsets, json_integer((json_int_t)at));
        json_object_set_new(o, "dtype", json_string(dspark__dtype_name(t->dtype)));
        json_object_set_new(o, "shape", shape);
        json_object_set_new(o, "data_offsets", offsets);
        json_object_set_new(root, t->name, o);
    }
    header = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    n = strlen(header);
    file = malloc(8 + n);
    for (int b = 0; b < 8; b++) file[b] = (char)(n >> (8 * b));
    memcpy(file + 8, header, n);
    tmpdir_write(path, file, 8 + n);
    assert_int_equal(truncate(path, (off_t)(8 + n + at)), 0);
    free(file);
    free(header);
    if (config_text)
        tmpdir_write(tmpdir_path(dir, "config.json"), config_text, strlen(config_text));
}
