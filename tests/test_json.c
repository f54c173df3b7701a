/* JSON documents from hostile text: values come through exactly, everything else is refused by
 * name, and no allocation is assumed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/json.h"
#include "support/guard.h"
#include "support/oom.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* The text ends at a guard page: not a byte behind it may be read. */
static dspark_status load(json_t **out, const char *text, unsigned depth, dspark_error *err)
{
    size_t n = strlen(text);
    guard g = guard_end(n);
    memcpy(g.p, text, n);
    dspark_status st = dspark__json_load(out, (const char *)g.p, n, depth, "here", err);
    guard_free(&g);
    return st;
}

static void test_values(void **state)
{
    static const struct {
        const char *text;
        double value;
    } reals[] = {
        {"1e-5", 1e-5},
        {"0.1", 0.1},
        {"-0.0", -0.0},
        {"1E+2", 100.0},
        {"5e-324", 5e-324},
        {"1.7976931348623157e308", 1.7976931348623157e308},
        {"123456789012345678901234.5", 123456789012345678901234.5},
        {"0.1000000000000000055511151231257827021181583404541015625000000000000000000000000001",
         0.1},
    };
    json_t *j;
    dspark_error err;
    (void)state;
    assert_int_equal(load(&j,
                          "\t{ \"a\" : [ 1 , -9223372036854775808, 9223372036854775807, true,"
                          "false,null,{},[] ],\"\\u00e9\":\"x\\u20ac\\ud83d\\ude00\\n\"}\r\n",
                          3, &err),
                     DSPARK_OK);
    json_t *a = json_object_get(j, "a");
    assert_int_equal(json_array_size(a), 8);
    assert_int_equal(json_integer_value(json_array_get(a, 0)), 1);
    assert_true(json_integer_value(json_array_get(a, 1)) == INT64_MIN);
    assert_true(json_integer_value(json_array_get(a, 2)) == INT64_MAX);
    assert_true(json_is_true(json_array_get(a, 3)));
    assert_true(json_is_false(json_array_get(a, 4)));
    assert_true(json_is_null(json_array_get(a, 5)));
    assert_true(json_is_object(json_array_get(a, 6)));
    assert_string_equal(json_string_value(json_object_get(j, "\xc3\xa9")),
                        "x\xe2\x82\xac\xf0\x9f\x98\x80\n");
    json_decref(j);
    for (size_t i = 0; i < COUNT(reals); i++) {
        char text[128];
        snprintf(text, sizeof text, "{\"v\":%s}", reals[i].text);
        assert_int_equal(load(&j, text, 1, &err), DSPARK_OK);
        double v = json_real_value(json_object_get(j, "v"));
        assert_memory_equal(&v, &reals[i].value, sizeof v);
        json_decref(j);
    }
}

static void test_refusals(void **state)
{
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"", "object"},
        {"  ", "object"},
        {"[]", "object"},
        {"1", "object"},
        {"null", "object"},
        {"{", "end of the text"},
        {"{}{}", "end of the text"},
        {"{} x", "'x'"},
        {"{\"a\":1,\"a\":2}", "\"a\" appears twice"},
        {"{\"b\":{\"x\":1,\"y\":2,\"x\":3}}", "\"x\" appears twice"},
        {"{\"b\":[{\"x\":1,\"\\u0078\":3}]}", "\"x\" appears twice"},
        {"{\"a\":9223372036854775808}", "9223372036854775808 does not fit"},
        {"{\"a\":-9223372036854775809}", "-9223372036854775809 does not fit"},
        {"{\"a\":1e999}", "1e999 does not fit"},
        {"{\"a\":01}", "leading zeros"},
        {"{\"a\":+1}", "value"},
        {"{\"a\":.5}", "value"},
        {"{\"a\":1.}", "digit"},
        {"{\"a\":1e}", "digit"},
        {"{\"a\":-}", "number"},
        {"{\"a\":NaN}", "value"},
        {"{\"a\":Infinity}", "value"},
        {"{\"a\":True}", "value"},
        {"{\"a\":tru", "value"},
        {"{\"a\":nulll}", "','"},
        {"{\"a\":[1,]}", "value"},
        {"{\"a\":[1 2]}", "','"},
        {"{\"a\":[1", "','"},
        {"{\"a\":1,}", "string"},
        {"{\"a\" 1}", "':'"},
        {"{\"a\":\"x}", "end of the text"},
        {"{\"a\":\"\\u0000\"}", "NUL"},
        {"{\"\\u0000\":1}", "NUL"},
        {"{\"a\":\"\x01\"}", "0x01"},
        {"{\"a\":\"\xff\"}", "UTF-8"},
        {"{\"a\":\"\\ud800x\"}", "surrogate"},
        {"{\"a\":{\"b\":{\"c\":{\"d\":1}}}}", "nesting"},
        {"{\"a\":[[[1]]]}", "nesting"},
        {"{/* no */}", "string"},
        {"{\"a\":1 // no\n}", "','"},
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        json_t *j = (void *)&i;
        dspark_error err = {0};
        if (load(&j, cases[i].text, 3, &err) != DSPARK_EFORMAT)
            fail_msg("accepted: %s", cases[i].text);
        assert_null(j);
        assert_string_equal(err.where, "here");
        if (!strstr(err.message, cases[i].message))
            fail_msg("%s: \"%s\" is not in: %s", cases[i].text, cases[i].message, err.message);
    }
    json_t *j;
    dspark_error err = {0};
    assert_int_equal(dspark__json_load(&j, "{}\0", 3, 3, "here", &err), DSPARK_EFORMAT);
    assert_int_equal(load(&j, "{\"a\":{\"b\":{}}}", 3, NULL), DSPARK_OK);
    json_decref(j);
    assert_int_equal(dspark__json_load(&j, "{}", DSPARK__JSON_MAX_BYTES + 1, 3, "here", &err),
                     DSPARK_EFORMAT);
    assert_non_null(strstr(err.message, "100000000"));
}

/* Deep nesting uses the limit, not the stack. */
static void test_deep_nesting(void **state)
{
    size_t n = 1000000;
    char *text = malloc(n);
    json_t *j;
    (void)state;
    memset(text, '[', n);
    memcpy(text, "{\"a\":", 5);
    assert_int_equal(dspark__json_load(&j, text, n, 1000000, "here", NULL), DSPARK_EFORMAT);
    free(text);
}

static void test_out_of_memory(void **state)
{
    static const char text[] =
        "{\"a name that is longer than sixteen bytes\":[1,2,3,4,5,6,7,8,9,10,{\"x\":1.5}],"
        "\"b\":\"a string that is longer than thirty-two "
        "bytes\",\"k1\":1,\"k2\":2,\"k3\":3,\"k4\":4,"
        "\"k5\":5,\"k6\":6,\"k7\":7,\"k8\":8,\"k9\":9,\"real\":"
        "0.1000000000000000055511151231257827021181583404541015625000000000000000000000000001}";
    (void)state;
    if (!oom_available()) skip();
    for (size_t n = 1;; n++) {
        json_t *j = (void *)&n;
        dspark_error err = {0};
        oom_fail_nth(n);
        dspark_status st = dspark__json_load(&j, text, sizeof text - 1, 8, "here", &err);
        oom_stop();
        if (!oom_failed()) {
            assert_int_equal(st, DSPARK_OK);
            assert_int_equal(json_object_size(j), 12);
            json_decref(j);
            assert_true(n > 20);
            break;
        }
        assert_int_equal(st, DSPARK_ENOMEM);
        assert_int_equal(err.code, DSPARK_ENOMEM);
        assert_null(j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_deep_nesting),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
