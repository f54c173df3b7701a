/* Parsing configs for tests, and rules as text. */
#include "support/quant_rules.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/status.h"

char *quoted(const char *text)
{
    char *copy = text ? strdup(text) : NULL;
    for (char *p = copy; p && *p; p++)
        if (*p == '\'') *p = '"';
    return copy;
}

dspark_status parse_both(dspark__quant_config **q, const char *config, const char *hf,
                         dspark_error *err)
{
    char *a = quoted(config), *b = quoted(hf);
    dspark_status st;

    *q = (void *)err; /* must be overwritten */
    memset(err, 0, sizeof *err);
    st = dspark__quant_config_parse(q, a, a ? strlen(a) : 0, b, b ? strlen(b) : 0, "config.json",
                                    err);
    free(a);
    free(b);
    return st;
}

dspark__quant_config *parse_ok(const char *config, const char *hf)
{
    dspark__quant_config *q;
    dspark_error err;

    if (parse_both(&q, config, hf, &err) != DSPARK_OK)
        fail_msg("%s\n%s: %s", config ? config : hf, err.where, err.message);
    return q;
}

/* The rule as one word per thing that it says. */
const char *rule_text(const dspark__quant_config *q, const char *module)
{
    static const char *const methods[] = {"none", "ct", "fp8", "modelopt", "quark"};
    static const char *const strategies[] = {"?",     "tensor", "channel",
                                             "group", "block",  "tensor_group"};
    static char text[256];
    dspark__quant_rule r;
    dspark_error err;
    char *at = text, *end = text + sizeof text;

    memset(&r, 0xff, sizeof r);
    if (dspark__quant_config_rule(q, module, &r, &err) != DSPARK_OK) fail_msg("%s", err.message);
    at += snprintf(at, (size_t)(end - at), "%s %s", methods[r.method],
                   r.quantised > 0   ? "yes"
                   : r.quantised < 0 ? "no"
                                     : "-");
    if (r.num_bits)
        at += snprintf(at, (size_t)(end - at), " %s%u%s %s", r.is_float ? "f" : "i", r.num_bits,
                       r.symmetric ? "" : "asym", strategies[r.strategy]);
    if (r.group_size) at += snprintf(at, (size_t)(end - at), " g%u", r.group_size);
    if (r.block_rows) at += snprintf(at, (size_t)(end - at), " %ux%u", r.block_rows, r.block_cols);
    if (r.act_order) at += snprintf(at, (size_t)(end - at), " actorder");
    if (r.dense_bits)
        at += snprintf(at, (size_t)(end - at), " %s", r.dense_bits > 0 ? "new" : "old");
    if (r.format) at += snprintf(at, (size_t)(end - at), " %s", r.format);
    if (r.ignored_by_parent) snprintf(at, (size_t)(end - at), " parent");
    return text;
}

void expect_rule(const char *config, const char *module, const char *want)
{
    dspark__quant_config *q = parse_ok(config, NULL);
    const char *got = rule_text(q, module);

    if (strcmp(got, want) != 0) fail_msg("%s\n%s: %s, wanted %s", config, module, got, want);
    dspark__quant_config_free(q);
}

void expect_error(const char *config, const char *hf, dspark_status status, const char *where,
                  const char *says)
{
    dspark__quant_config *q;
    dspark_error err;
    dspark_status st = parse_both(&q, config, hf, &err);

    if (st != status || !strstr(err.where, where) || !strstr(err.message, says))
        fail_msg("%s\n%s (%s): %s", config ? config : hf, dspark__status_name(st), err.where,
                 err.message);
    assert_null(q);
    assert_int_equal(err.code, st);
}
