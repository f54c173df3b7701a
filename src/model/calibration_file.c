/* A calibration as a small JSON file: {"dspark_calibration": 1, "temperatures": [...]}. Written whole or
 * not at all; read as hostile. */
#include "model/calibration_file.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "ckpt/config.h"
#include "ckpt/json.h"
#include "ckpt/outfile.h"

#define VERSION 1
#define JSON_DEPTH 8

static json_t *to_json(const dspark_calibration *c)
{
    json_t *doc = json_object(), *list = json_array();
    int failed = !doc || !list;
    for (uint32_t i = 0; !failed && i < c->n; i++)
        failed = json_array_append_new(list, json_real(c->temperatures[i])) != 0;
    if (!failed) failed = json_object_set_new(doc, "dspark_calibration", json_integer(VERSION)) != 0;
    if (!failed) failed = json_object_set(doc, "temperatures", list) != 0;
    json_decref(list);
    if (!failed) return doc;
    json_decref(doc);
    return NULL;
}

static dspark_status check_name(const char *path, dspark_error *err)
{
    size_t n = strlen(path);
    if (n > 5 && strcmp(path + n - 5, ".json") == 0) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EINVAL, path, "a calibration is a file of the name *.json");
}

dspark_status dspark__calibration_save(const dspark_calibration *c, const char *path,
                                       dspark_error *err)
{
    if (c->n > sizeof c->temperatures / sizeof *c->temperatures)
        return dspark__fail(err, DSPARK_EINVAL, "calibration", "%u temperatures", c->n);
    dspark_status st = check_name(path, err);
    if (st != DSPARK_OK) return st;
    json_t *doc = to_json(c);
    char *text = doc ? dspark__json_short_text(doc, JSON_INDENT(2)) : NULL;
    json_decref(doc);
    if (!text) return dspark__fail_nomem(err, "calibration", 4096);
    st = dspark__outfile_put(path, text, strlen(text), err);
    free(text);
    return st;
}

dspark_status dspark__calibration_load(dspark_calibration *out, const char *path, dspark_error *err)
{
    char *text = NULL;
    size_t n = 0, i;
    json_t *doc = NULL;
    *out = (dspark_calibration){0};
    dspark_status st = check_name(path, err);
    if (st == DSPARK_OK) st = dspark__config_text(&text, &n, path, err); /* any *.json, bounded */
    if (st == DSPARK_OK) st = dspark__json_load(&doc, text, n, JSON_DEPTH, path, err);
    free(text);
    if (st != DSPARK_OK) return st;
    const json_t *list = json_object_get(doc, "temperatures");
    if (json_integer_value(json_object_get(doc, "dspark_calibration")) != VERSION || !json_is_array(list) ||
        json_array_size(list) > sizeof out->temperatures / sizeof *out->temperatures)
        st = dspark__fail(err, DSPARK_EFORMAT, path, "expected \"dspark_calibration\": %d and a list of at most "
                                                     "%zu \"temperatures\"",
                          VERSION, sizeof out->temperatures / sizeof *out->temperatures);
    for (i = 0; st == DSPARK_OK && i < json_array_size(list); i++) {
        double t = json_number_value(json_array_get(list, i));
        if (!(t > 0) || !isfinite(t) || (float)t == 0 || isinf((float)t))
            st = dspark__fail(err, DSPARK_EFORMAT, path, "temperature %zu is not a positive number", i);
        else
            out->temperatures[i] = t;
    }
    if (st == DSPARK_OK) out->n = (uint32_t)json_array_size(list);
    else *out = (dspark_calibration){0};
    json_decref(doc);
    return st;
}
