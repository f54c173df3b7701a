/* JSON documents: a jansson tree built by our own reader. Never hands a file's bytes
 * to jansson's decoder (json.h says why). */
#include "ckpt/json.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

#define MAX_DEPTH 64u

typedef struct builder {
    dspark__json_reader reader;
    locale_t c_locale; /* numbers have a '.', whatever the host's locale has */
    int out_of_memory;
} builder;

/* jansson says NULL for "no memory" only: what it could refuse is checked before. */
static json_t *have(builder *b, json_t *value)
{
    if (!value) b->out_of_memory = 1;
    return value;
}

static json_t *build_number(builder *b)
{
    char *text;
    char copy[64];
    char *longer = NULL;
    size_t n;
    int integer;
    json_t *value = NULL;

    if (!dspark__json_number(&b->reader, &text, &n, &integer)) return NULL;
    int shown = n < 40 ? (int)n : 40;
    if (integer) {
        int64_t v = 0;
        int negative = *text == '-';
        for (size_t i = (size_t)negative; i < n; i++) {
            int64_t digit = negative ? '0' - text[i] : text[i] - '0';
            if (__builtin_mul_overflow(v, (int64_t)10, &v) ||
                __builtin_add_overflow(v, digit, &v)) {
                dspark__json_refuse(&b->reader, "%.*s does not fit 64 bits", shown, text);
                return NULL;
            }
        }
        return have(b, json_integer(v));
    }
    /* strtod wants a terminated text, and the byte behind this one is still to be read. */
    char *digits = n < sizeof copy ? copy : (longer = malloc(n + 1));
    if (!digits) {
        b->out_of_memory = 1;
        return NULL;
    }
    memcpy(digits, text, n);
    digits[n] = '\0';
    double v = strtod_l(digits, NULL, b->c_locale);
    if (isfinite(v))
        value = have(b, json_real(v));
    else
        dspark__json_refuse(&b->reader, "%.*s does not fit a double", shown, text);
    free(longer);
    return value;
}

static json_t *build_value(builder *b, unsigned depth_left);

static json_t *build_array(builder *b, unsigned depth_left)
{
    json_t *array = have(b, json_array());
    int more = 1;
    if (!array || !dspark__json_take(&b->reader, '[')) goto fail;
    if (dspark__json_peek(&b->reader) == ']') {
        b->reader.at++;
        return array;
    }
    while (more) {
        json_t *value = build_value(b, depth_left);
        if (!value) goto fail;
        if (json_array_append_new(array, value) != 0) {
            b->out_of_memory = 1;
            goto fail;
        }
        if (!dspark__json_next(&b->reader, ']', &more)) goto fail;
    }
    return array;
fail:
    json_decref(array);
    return NULL;
}

static json_t *build_object(builder *b, unsigned depth_left)
{
    json_t *object = have(b, json_object());
    int more = 1;
    if (!object || !dspark__json_take(&b->reader, '{')) goto fail;
    if (dspark__json_peek(&b->reader) == '}') {
        b->reader.at++;
        return object;
    }
    while (more) {
        char *key;
        size_t n;
        if (!dspark__json_string(&b->reader, &key, &n)) goto fail;
        if (json_object_get(object, key)) {
            dspark__json_refuse(&b->reader, "the key \"%.80s\" appears twice", key);
            goto fail;
        }
        if (!dspark__json_take(&b->reader, ':')) goto fail;
        json_t *value = build_value(b, depth_left);
        if (!value) goto fail;
        if (json_object_set_new_nocheck(object, key, value) != 0) {
            b->out_of_memory = 1;
            goto fail;
        }
        if (!dspark__json_next(&b->reader, '}', &more)) goto fail;
    }
    return object;
fail:
    json_decref(object);
    return NULL;
}

static json_t *build_value(builder *b, unsigned depth_left)
{
    int c = dspark__json_peek(&b->reader);
    if (c == '{' || c == '[') {
        if (depth_left == 0) {
            dspark__json_refuse(&b->reader, "too many levels of nesting at byte %zu",
                                (size_t)(b->reader.at - b->reader.start));
            return NULL;
        }
        return c == '{' ? build_object(b, depth_left - 1) : build_array(b, depth_left - 1);
    }
    if (c == '"') {
        char *s;
        size_t n;
        if (!dspark__json_string(&b->reader, &s, &n)) return NULL;
        return have(b, json_stringn_nocheck(s, n));
    }
    if (c == '-' || (c >= '0' && c <= '9')) return build_number(b);
    switch (dspark__json_literal(&b->reader)) {
    case 't': return json_true();
    case 'f': return json_false();
    case 'n': return json_null();
    default: return NULL;
    }
}

dspark_status dspark__json_load(json_t **out, const char *text, size_t n_bytes, unsigned max_depth,
                                const char *where, dspark_error *err)
{
    builder b = {0};

    *out = NULL;
    if (n_bytes > DSPARK__JSON_MAX_BYTES)
        return dspark__fail(err, DSPARK_EFORMAT, where, "%zu bytes of JSON, at most %zu are read",
                            n_bytes, DSPARK__JSON_MAX_BYTES);
    b.c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (b.c_locale == (locale_t)0) return dspark__fail_nomem(err, "a locale", 0);
    char *copy = malloc(n_bytes + 1); /* the reader unescapes in place */
    if (!copy) {
        freelocale(b.c_locale);
        return dspark__fail_nomem(err, "the JSON text", n_bytes + 1);
    }
    if (n_bytes > 0) memcpy(copy, text, n_bytes);
    dspark__json_reader_init(&b.reader, copy, n_bytes);

    json_t *document = NULL;
    if (dspark__json_peek(&b.reader) != '{')
        dspark__json_refuse(&b.reader, "an object expected at byte %zu",
                            (size_t)(b.reader.at - b.reader.start));
    else
        document = build_value(&b, max_depth < MAX_DEPTH ? max_depth : MAX_DEPTH);
    if (document && !dspark__json_end(&b.reader)) {
        json_decref(document);
        document = NULL;
    }
    free(copy);
    freelocale(b.c_locale);
    if (document) {
        *out = document;
        return DSPARK_OK;
    }
    if (b.out_of_memory) return dspark__fail_nomem(err, "a JSON document", n_bytes);
    return dspark__fail(err, DSPARK_EFORMAT, where, "not valid JSON: %s", b.reader.error);
}

char *dspark__json_text(const json_t *value, size_t flags)
{
    size_t n = json_dumpb(value, NULL, 0, flags);
    char *text = n ? malloc(n + 1) : NULL;
    if (!text) return NULL;
    if (json_dumpb(value, text, n, flags) != n) {
        free(text);
        return NULL;
    }
    text[n] = 0;
    return text;
}

/* Digits with which every real number in `value`, which is `depth` levels deep at most, is itself
 * again; at least 6. */
static size_t digits_needed(const json_t *value, unsigned depth)
{
    size_t digits = 6, more, i;
    const char *key;
    json_t *item;

    if (json_is_real(value)) {
        double v = json_real_value(value);
        for (; digits < 17; digits++) {
            char text[40];
            snprintf(text, sizeof text, "%.*g", (int)digits, v);
            if (strtod(text, NULL) == v) break;
        }
        return digits;
    }
    if (depth == 0) return 17;
    json_array_foreach((json_t *)(uintptr_t)value, i, item) {
        more = digits_needed(item, depth - 1);
        if (more > digits) digits = more;
    }
    json_object_foreach((json_t *)(uintptr_t)value, key, item) {
        more = digits_needed(item, depth - 1);
        if (more > digits) digits = more;
    }
    return digits;
}

char *dspark__json_short_text(const json_t *value, size_t flags)
{
    return dspark__json_text(value, flags | JSON_REAL_PRECISION(digits_needed(value, MAX_DEPTH)));
}
