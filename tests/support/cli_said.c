/* See cli_said.h. */
#include "support/cli_said.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

cli_result run_cli_to(int code, const char *fmt, ...)
{
    char text[4096];
    cli_result r;
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    r = run_cli("%s", text);
    if (r.code != code) print_error("dspark %s: %d\n%s\n%s\n", text, r.code, r.out, r.err);
    assert_int_equal(r.code, code);
    return r;
}

void said_has(const char *text, const char *part, const char *file, int line)
{
    if (strstr(text, part)) return;
    print_error("'%s' is not in:\n%s\n", part, text);
    _fail(file, line);
}

json_t *said_json(const cli_result *r)
{
    json_error_t err;
    json_t *doc = json_loads(r->out, JSON_REJECT_DUPLICATES, &err);
    if (!doc) print_error("not JSON: %s\n%s\n%s\n", err.text, r->out, r->err);
    assert_non_null(doc);
    return doc;
}

static const json_t *member(const json_t *object, const char *key, int is_right, const char *type)
{
    if (!is_right) print_error("'%s' is %s\n", key, type);
    assert_true(is_right);
    return json_object_get(object, key);
}

json_int_t said_int(const json_t *object, const char *key)
{
    const int is_int = json_is_integer(json_object_get(object, key));
    return json_integer_value(member(object, key, is_int, "no integer"));
}

double said_number(const json_t *object, const char *key)
{
    const int is_number = json_is_number(json_object_get(object, key));
    return json_number_value(member(object, key, is_number, "no number"));
}

const char *said_text(const json_t *object, const char *key)
{
    const int is_text = json_is_string(json_object_get(object, key));
    return json_string_value(member(object, key, is_text, "no text"));
}

const char *in_folder(const char *name)
{
    static char path[800];
    snprintf(path, sizeof path, "%s/%s", cli_folder(), name);
    return path;
}

char *read_in_folder(const char *name)
{
    return read_whole_file(in_folder(name), NULL);
}

int make_tiny(void **state)
{
    (void)state;
    return run_cli("synth tiny --preset tiny").code;
}

int remove_folder(void **state)
{
    (void)state;
    cli_cleanup();
    return 0;
}
