/* Patterns of quantisation configs: the answers Python gave (tests/data/match/python.tsv, written
 * by tools/oracle/make_match_table.py), every construct that is refused, every bound, and patterns
 * that take a backtracking matcher longer than anyone waits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "quant/match.h"
#include "support/oom.h"

static dspark__match compiled(dspark__match_kind kind, const char *pattern)
{
    dspark__match m;
    dspark_error err = {0};

    if (dspark__match_compile(&m, kind, pattern, "here", &err) != DSPARK_OK)
        fail_msg("%s: %s", pattern, err.message);
    return m;
}

static int matches(dspark__match_kind kind, const char *pattern, const char *name)
{
    dspark__match m = compiled(kind, pattern);
    int result = dspark__match_name(&m, name);

    dspark__match_free(&m);
    return result;
}

/* ---- against Python -------------------------------------------------------------------------- */

/* The next field of *line, terminated; NULL at the end. */
static char *next_field(char **line)
{
    char *field = *line, *tab;

    if (!field) return NULL;
    tab = strchr(field, '\t');
    if (tab) *tab = '\0';
    *line = tab ? tab + 1 : NULL;
    return field;
}

static void test_python(void **state)
{
    static char line[8192];
    FILE *f = fopen(DSPARK_TEST_DATA "/match/python.tsv", "r");
    size_t n_patterns = 0, n_errors = 0, n_yes = 0, n_no = 0, n_wrong = 0;

    (void)state;
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        char *rest = line, *kind, *pattern, *field;
        dspark__match m;
        dspark_error err = {0};
        dspark_status st;

        assert_non_null(strchr(line, '\n'));
        line[strcspn(line, "\n")] = '\0';
        kind = next_field(&rest);
        pattern = next_field(&rest);
        assert_non_null(rest);
        st = dspark__match_compile(
            &m, strcmp(kind, "re") ? DSPARK__MATCH_GLOB : DSPARK__MATCH_REGEX, pattern, "x", &err);
        n_patterns++;
        if (strcmp(rest, "E") == 0) {
            n_errors++;
            if (st == DSPARK_OK) {
                print_error("%s: accepted, Python refuses it\n", pattern);
                n_wrong++;
            }
            dspark__match_free(&m);
            continue;
        }
        if (st != DSPARK_OK) {
            print_error("%s: %s\n", pattern, err.message);
            n_wrong++;
            continue;
        }
        while ((field = next_field(&rest)) != NULL) {
            int want = field[0] == '1', got = dspark__match_name(&m, field + 2);
            if (got != want) {
                print_error("%s %s on \"%s\": %d, Python says %d\n", kind, pattern, field + 2, got,
                            want);
                n_wrong++;
            }
            n_yes += want == 1;
            n_no += want == 0;
        }
        dspark__match_free(&m);
    }
    fclose(f);
    assert_int_equal(n_wrong, 0);
    assert_true(n_patterns > 1500 && n_errors > 50 && n_yes > 1000 && n_no > 1000);
}

/* ---- what random patterns do not reach ------------------------------------------------------- */

static void test_regex(void **state)
{
    (void)state;
    assert_true(matches(DSPARK__MATCH_REGEX, "", "anything"));
    assert_true(matches(DSPARK__MATCH_REGEX, "a$", "a\n"));
    assert_false(matches(DSPARK__MATCH_REGEX, "a\\Z", "a\n"));
    assert_false(matches(DSPARK__MATCH_REGEX, "a$", "a\n\n"));
    assert_false(matches(DSPARK__MATCH_REGEX, "a.b", "a\nb"));
    assert_true(matches(DSPARK__MATCH_REGEX, "a\\nb\\x41", "a\nbA"));
    assert_true(matches(DSPARK__MATCH_REGEX, "[\\b]", "\b"));
    assert_true(matches(DSPARK__MATCH_REGEX, "\\s\\s", " \x1c"));
    /* one character, however many bytes */
    assert_true(matches(DSPARK__MATCH_REGEX, "a.b$",
                        "a\xc3\xa9"
                        "b"));
    assert_true(matches(DSPARK__MATCH_REGEX, "a[^x]b$",
                        "a\xe2\x82\xac"
                        "b"));
    assert_false(matches(DSPARK__MATCH_REGEX, "a..b$",
                         "a\xc3\xa9"
                         "b"));
    assert_true(matches(DSPARK__MATCH_REGEX, "a.b$",
                        "a\xff"
                        "b"));
    assert_true(
        matches(DSPARK__MATCH_REGEX, "(a{10}){10}$",
                "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
                "aaaaaaaaaaaaaaaaaaaaaaaa"));
    assert_false(matches(DSPARK__MATCH_REGEX, "a{3,5}$", "aaaaaa"));
    assert_false(matches(DSPARK__MATCH_REGEX, "a{3,5}$", "aa"));
    assert_true(matches(DSPARK__MATCH_REGEX, "((((((((((x))))))))))", "x"));
    assert_true(matches(DSPARK__MATCH_REGEX, "(){1000}x", "x"));
}

static void test_other_kinds(void **state)
{
    dspark__match m;

    (void)state;
    assert_true(matches(DSPARK__MATCH_EXACT, "layers.3", "layers.3"));
    assert_false(matches(DSPARK__MATCH_EXACT, "layers.3", "layers.30"));
    assert_false(matches(DSPARK__MATCH_EXACT, "layers.3", "layers.3.mlp"));
    assert_true(matches(DSPARK__MATCH_GLOB, "a?b",
                        "a\xc3\xa9"
                        "b"));
    assert_false(matches(DSPARK__MATCH_GLOB, "layers.3", "layers.3.mlp"));

    assert_true(matches(DSPARK__MATCH_PATH, "mlp.gate", "layers.1.mlp.gate"));
    assert_true(matches(DSPARK__MATCH_PATH, "mlp.gate", "mlp.gate.x"));
    assert_false(matches(DSPARK__MATCH_PATH, "mlp.gate", "layers.1.mlp.gate_proj"));
    assert_false(matches(DSPARK__MATCH_PATH, "layers.1", "layers.11.mlp"));
    assert_false(matches(DSPARK__MATCH_PATH, "layers.1", "xlayers.1.mlp"));
    assert_true(matches(DSPARK__MATCH_PATH, "layers.1", "layers.11.layers.1"));
    assert_true(matches(DSPARK__MATCH_PATH, "layers.1.", "model.layers.1.mlp"));
    assert_false(matches(DSPARK__MATCH_PATH, "layers.1.", "model.layers.11.mlp"));
    assert_true(matches(DSPARK__MATCH_PATH, ".mlp", "layers.1.mlp"));
    assert_true(matches(DSPARK__MATCH_ALL, "", "x"));

    m = compiled(DSPARK__MATCH_EXACT, "layers.3.self_attn");
    assert_true(dspark__match_above(&m, "layers.3.self_attn.q_a_proj"));
    assert_false(dspark__match_above(&m, "layers.3.self_attn"));
    assert_false(dspark__match_above(&m, "layers.3.self_attn."));
    assert_false(dspark__match_above(&m, "layers.3.self_attn_x.q"));
    assert_false(dspark__match_above(&m, "layers.3"));
    dspark__match_free(&m);
    m = compiled(DSPARK__MATCH_REGEX, "layers");
    assert_false(dspark__match_above(&m, "layers.3"));
    dspark__match_free(&m);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void test_refusals(void **state)
{
    static const struct {
        const char *pattern;
        dspark_status status;
        const char *says;
    } bad[] = {
        {"(?=a)", DSPARK_EUNSUPPORTED, "look-ahead"},
        {"^(?!.*experts).*", DSPARK_EUNSUPPORTED, "look-ahead"},
        {"(?<=a)", DSPARK_EUNSUPPORTED, "look-behind"},
        {"(?<!a)", DSPARK_EUNSUPPORTED, "look-behind"},
        {"(a)\\1", DSPARK_EUNSUPPORTED, "back-reference"},
        {"(?P<x>a)(?P=x)", DSPARK_EUNSUPPORTED, "named group"},
        {"(?P=x)", DSPARK_EUNSUPPORTED, "back-reference"},
        {"(?>a)", DSPARK_EUNSUPPORTED, "atomic group"},
        {"(a)(?(1)b)", DSPARK_EUNSUPPORTED, "conditional"},
        {"(?#x)", DSPARK_EUNSUPPORTED, "comment"},
        {"(?i)a", DSPARK_EUNSUPPORTED, "inline flag"},
        {"(?i:a)", DSPARK_EUNSUPPORTED, "inline flag"},
        {"a*+", DSPARK_EUNSUPPORTED, "possessive"},
        {"a{1,2}+", DSPARK_EUNSUPPORTED, "possessive"},
        {"\\u0041", DSPARK_EUNSUPPORTED, "Unicode"},
        {"\\N{DIGIT ONE}", DSPARK_EUNSUPPORTED, "Unicode"},
        {"\\07", DSPARK_EUNSUPPORTED, "octal"},
        {"[\\1]", DSPARK_EUNSUPPORTED, "octal"},
        {"\\xe9", DSPARK_EUNSUPPORTED, "beyond ASCII"},
        {"\xc3\xa9", DSPARK_EUNSUPPORTED, "beyond ASCII"},
        {"[\xc3\xa9]", DSPARK_EUNSUPPORTED, "beyond ASCII"},
        {"a{1001}", DSPARK_EUNSUPPORTED, "1000"},
        {"a{1,1001}", DSPARK_EUNSUPPORTED, "1000"},
        {"a{99999999999999999999}", DSPARK_EUNSUPPORTED, "1000"},
        {"(a{100}){100}", DSPARK_EUNSUPPORTED, "1024"},
        {"((((a{0,9}){0,9}){0,9}){0,9}){0,9}", DSPARK_EUNSUPPORTED, "1024"},
        {"(ab){900}", DSPARK_EUNSUPPORTED, "1024"},
        {"(", DSPARK_EFORMAT, "not closed"},
        {"a)", DSPARK_EFORMAT, "closes nothing"},
        {"[a", DSPARK_EFORMAT, "not closed"},
        {"[]", DSPARK_EFORMAT, "not closed"},
        {"[z-a]", DSPARK_EFORMAT, "range"},
        {"[a-\\d]", DSPARK_EFORMAT, "range"},
        {"*", DSPARK_EFORMAT, "nothing to repeat"},
        {"^*", DSPARK_EFORMAT, "nothing to repeat"},
        {"a**", DSPARK_EFORMAT, "repeat of a repeat"},
        {"a{3,2}", DSPARK_EFORMAT, "empty"},
        {"\\q", DSPARK_EFORMAT, "no escape"},
        {"\\x4", DSPARK_EFORMAT, "hexadecimal"},
        {"a\\", DSPARK_EFORMAT, "backslash"},
        {"[\\", DSPARK_EFORMAT, "backslash"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        dspark__match m;
        dspark_error err = {0};
        dspark_status st =
            dspark__match_compile(&m, DSPARK__MATCH_REGEX, bad[i].pattern, "the field", &err);
        if (st != bad[i].status || !strstr(err.message, bad[i].says))
            fail_msg("%s: %d %s", bad[i].pattern, (int)st, err.message);
        assert_string_equal(err.where, "the field");
        assert_null(m.text);
        assert_null(m.program);
    }
}

static void test_bounds(void **state)
{
    static char text[DSPARK__MATCH_MAX_PATTERN + 2];
    dspark__match m;
    dspark_error err = {0};

    (void)state;
    memset(text, 'a', sizeof text - 1);
    assert_int_equal(dspark__match_compile(&m, DSPARK__MATCH_EXACT, text, "x", &err),
                     DSPARK_EUNSUPPORTED);
    text[DSPARK__MATCH_MAX_PATTERN] = '\0'; /* the longest; as a program one step too long */
    assert_true(matches(DSPARK__MATCH_EXACT, text, text));
    assert_int_equal(dspark__match_compile(&m, DSPARK__MATCH_REGEX, text, "x", &err),
                     DSPARK_EUNSUPPORTED);
    text[DSPARK__MATCH_MAX_PATTERN - 1] = '\0';
    assert_true(matches(DSPARK__MATCH_REGEX, text, text));

    memset(text, '(', 33); /* 33 groups deep, then 32 */
    memset(text + 33, ')', 33);
    text[66] = '\0';
    assert_int_equal(dspark__match_compile(&m, DSPARK__MATCH_REGEX, text, "x", &err),
                     DSPARK_EUNSUPPORTED);
    text[65] = '\0';
    assert_true(matches(DSPARK__MATCH_REGEX, text + 1, "x"));
    memset(text, '(', 1024); /* recursion stays bounded without a single ')' */
    text[1024] = '\0';
    assert_int_equal(dspark__match_compile(&m, DSPARK__MATCH_REGEX, text, "x", &err),
                     DSPARK_EUNSUPPORTED);

    assert_int_equal(dspark__match_compile(&m, DSPARK__MATCH_EXACT, "", "x", &err), DSPARK_EFORMAT);
    for (size_t i = 0; i < 257; i++) memcpy(text + 2 * i, "\\d", 3);
    assert_int_equal(dspark__match_compile(&m, DSPARK__MATCH_REGEX, text, "x", &err),
                     DSPARK_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "256 sets"));

    static char name[DSPARK__MATCH_MAX_NAME + 2];
    memset(name, 'n', sizeof name - 1);
    assert_false(matches(DSPARK__MATCH_REGEX, "n", name));
    name[DSPARK__MATCH_MAX_NAME] = '\0';
    assert_true(matches(DSPARK__MATCH_REGEX, "n", name));
}

/* ---- time ------------------------------------------------------------------------------------ */

/* Backtracking takes 2^1000 steps for these. The limit is three orders of magnitude above what they
 * take, for sanitizers and busy machines. */
static void test_linear_time(void **state)
{
    static const char *const patterns[] = {
        "(a*)*b",
        "(a+)+b",
        "(a|a)*b",
        "(a|aa)+b",
        "(.*)*b",
        "((a*)*)*b",
        "(a?){50}a{50}b",
        "(.*a){20}b",
        "(\\w*\\w*)*b",
        "a*a*a*a*a*a*a*a*a*a*b",
        "((a{1,5}){1,5}){1,5}b",
    };
    static char name[DSPARK__MATCH_MAX_NAME + 1];
    struct timespec from, to;

    (void)state;
    memset(name, 'a', sizeof name - 1);
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        name[sizeof name - 2] = 'a';
        assert_false(matches(DSPARK__MATCH_REGEX, patterns[i], name));
        if (strstr(patterns[i], "{")) continue;
        name[sizeof name - 2] = 'b';
        assert_true(matches(DSPARK__MATCH_REGEX, patterns[i], name));
    }
    name[sizeof name - 2] = 'a';
    assert_false(matches(DSPARK__MATCH_GLOB, "*a*a*a*a*a*a*a*a*a*a*a*a*b", name));
    clock_gettime(CLOCK_MONOTONIC, &to);
    assert_true(to.tv_sec - from.tv_sec < 10);
}

static void test_no_memory(void **state)
{
    dspark__match m;
    dspark_error err;
    size_t n;

    (void)state;
    if (!oom_available()) skip();
    oom_count_start();
    m = compiled(DSPARK__MATCH_REGEX, "(a|[bc])*d");
    n = oom_stop();
    assert_int_equal(n, 3);
    /* matching takes none */
    oom_count_start();
    assert_true(dspark__match_name(&m, "abcd"));
    assert_int_equal(oom_stop(), 0);
    dspark__match_free(&m);
    for (size_t i = 1; i <= n; i++) {
        oom_fail_nth(i);
        dspark_status st = dspark__match_compile(&m, DSPARK__MATCH_REGEX, "(a|[bc])*d", "x", &err);
        oom_stop();
        assert_int_equal(st, DSPARK_ENOMEM);
        assert_null(m.text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_python),      cmocka_unit_test(test_regex),
        cmocka_unit_test(test_other_kinds), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_bounds),      cmocka_unit_test(test_linear_time),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
