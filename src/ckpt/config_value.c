/* Typed reading of config values. Owns nothing but the notes it appends; never guesses a type. */
#include "ckpt/config_value.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *type_name(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "an array";
    case JSON_STRING: return "a string";
    case JSON_INTEGER: return "an integer";
    case JSON_REAL: return "a real number";
    case JSON_TRUE: return "true";
    case JSON_FALSE: return "false";
    default: return "null";
    }
}

dspark_status dspark__cfg_fail(const dspark__cfg *g, dspark_status code, const char *key,
                               const char *fmt, ...)
{
    char where[256], message[512];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(message, sizeof message, fmt, ap);
    va_end(ap);
    snprintf(where, sizeof where, "%s: %s%s", g->source, g->prefix, key);
    return dspark__fail(g->err, code, where, "%s", message);
}

dspark_status dspark__cfg_note(const dspark__cfg *g, const char *fmt, ...)
{
    dspark__config_doc *doc = g->doc;
    char text[512];
    va_list ap;
    char **grown;
    char *copy;

    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    grown = realloc(doc->notes, (doc->n_notes + 1) * sizeof *grown);
    if (!grown) return dspark__fail_nomem(g->err, "config notes", sizeof *grown);
    doc->notes = grown;
    copy = malloc(strlen(text) + 1);
    if (!copy) return dspark__fail_nomem(g->err, "config notes", strlen(text) + 1);
    strcpy(copy, text);
    doc->notes[doc->n_notes++] = copy;
    return DSPARK_OK;
}

const json_t *dspark__cfg_get(const dspark__cfg *g, const char *key)
{
    const json_t *v = json_object_get(g->object, key);
    return v && !json_is_null(v) ? v : NULL;
}

dspark_status dspark__cfg_int(const dspark__cfg *g, const char *key, int64_t min, int64_t max,
                              int64_t *out, int *present)
{
    const json_t *v = dspark__cfg_get(g, key);

    if (present) *present = v != NULL;
    if (!v) return DSPARK_OK;
    if (!json_is_integer(v))
        return dspark__cfg_fail(g, DSPARK_EFORMAT, key, "an integer is needed, found %s",
                                type_name(v));
    if (json_integer_value(v) < min || json_integer_value(v) > max)
        return dspark__cfg_fail(g, DSPARK_EMODEL, key,
                                "%" PRId64 " is outside the range %" PRId64 " .. %" PRId64,
                                (int64_t)json_integer_value(v), min, max);
    *out = json_integer_value(v);
    return DSPARK_OK;
}

dspark_status dspark__cfg_u32(const dspark__cfg *g, const char *key, uint32_t min, uint32_t max,
                              uint32_t *out, int *present)
{
    int64_t value = 0;
    int there = 0;
    dspark_status st = dspark__cfg_int(g, key, min, max, &value, &there);

    if (st == DSPARK_OK && there) *out = (uint32_t)value;
    if (present) *present = there;
    return st;
}

dspark_status dspark__cfg_need_u32(const dspark__cfg *g, const char *key, uint32_t min,
                                   uint32_t max, uint32_t *out)
{
    int there = 0;
    dspark_status st = dspark__cfg_u32(g, key, min, max, out, &there);

    if (st != DSPARK_OK || there) return st;
    return dspark__cfg_fail(g, DSPARK_EMODEL, key, "the key is missing, and it has no default");
}

dspark_status dspark__cfg_real(const dspark__cfg *g, const char *key, double min, double max,
                               double *out, int *present)
{
    const json_t *v = dspark__cfg_get(g, key);
    double value;

    if (present) *present = v != NULL;
    if (!v) return DSPARK_OK;
    if (!json_is_number(v))
        return dspark__cfg_fail(g, DSPARK_EFORMAT, key, "a number is needed, found %s",
                                type_name(v));
    value = json_number_value(v);
    if (!(value >= min && value <= max))
        return dspark__cfg_fail(g, DSPARK_EMODEL, key, "%g is outside the range %g .. %g", value,
                                min, max);
    *out = value;
    return DSPARK_OK;
}

dspark_status dspark__cfg_bool(const dspark__cfg *g, const char *key, int *out, int *present)
{
    const json_t *v = dspark__cfg_get(g, key);

    if (present) *present = v != NULL;
    if (!v) return DSPARK_OK;
    if (!json_is_boolean(v))
        return dspark__cfg_fail(g, DSPARK_EFORMAT, key, "true or false is needed, found %s",
                                type_name(v));
    *out = json_is_true(v);
    return DSPARK_OK;
}

dspark_status dspark__cfg_string(const dspark__cfg *g, const char *key, const char **out)
{
    const json_t *v = dspark__cfg_get(g, key);

    if (!v) return DSPARK_OK;
    if (!json_is_string(v))
        return dspark__cfg_fail(g, DSPARK_EFORMAT, key, "a string is needed, found %s",
                                type_name(v));
    *out = json_string_value(v);
    return DSPARK_OK;
}

dspark_status dspark__cfg_array(const dspark__cfg *g, const char *key, const json_t **out)
{
    const json_t *v = dspark__cfg_get(g, key);

    if (!v) return DSPARK_OK;
    if (!json_is_array(v))
        return dspark__cfg_fail(g, DSPARK_EFORMAT, key, "an array is needed, found %s",
                                type_name(v));
    *out = v;
    return DSPARK_OK;
}

dspark_status dspark__cfg_object(const dspark__cfg *g, const char *key, const json_t **out)
{
    const json_t *v = dspark__cfg_get(g, key);

    if (!v) return DSPARK_OK;
    if (!json_is_object(v))
        return dspark__cfg_fail(g, DSPARK_EFORMAT, key, "an object is needed, found %s",
                                type_name(v));
    *out = v;
    return DSPARK_OK;
}
