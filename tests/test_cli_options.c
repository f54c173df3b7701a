/* Options of every command: a value that is no number of the range is refused by name, before anything is
 * opened or made; so is an option that could not matter. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "support/cli_said.h"

#define TARGET DSPARK_TEST_DATA "/golden-draft/target-64x97"
#define BENCH "bench tiny --repeat 1 --buffer 1M"
#define DRAFT "draft tiny --taps none --target none"
#define EVAL "eval tiny --data none --target none"

/* Inputs need not exist: values come first. */
static const struct {
    const char *run, *option;
    int zero, list, real; /* 0 is a value; numbers may be many; may be no whole number */
} options[] = {
    {"context none --taps none", "--threads", 0, 0, 0},
    {"context none --taps none", "--batch", 0, 0, 0},
    {"context none --taps none", "--block-size", 0, 0, 0},
    {"context none --taps none", "--start-position", 1, 0, 0},
    {"context none --taps none --cache-dtype fp8_e4m3", "--scale", 0, 0, 1},
    {"compare none", "--tokens", 0, 0, 0},
    {"compare none", "--start-position", 1, 0, 0},
    {"compare none", "--seed", 1, 0, 0},
    {"compare none", "--threads", 0, 0, 0},
    {"bench none", "--tokens", 0, 1, 0},
    {"bench none --what draft", "--contexts", 1, 1, 0},
    {"bench none --what draft", "--sequences", 0, 1, 0},
    {"bench none", "--threads", 0, 1, 0},
    {"bench none", "--repeat", 0, 0, 0},
    {"bench none", "--buffer", 0, 0, 0},
    {"quantize none none --format int4", "--group-size", 0, 0, 0},
    {"quantize none none --format int4", "--threads", 0, 0, 0},
    {"pack none none", "--threads", 0, 0, 0},
    {"synth --dump none --for none", "--tokens", 0, 0, 0},
    {"synth none --preset tiny", "--seed", 1, 0, 0},
    {"synth none --preset tiny --format int4", "--group-size", 0, 0, 0},
    {DRAFT, "--anchor-position", 1, 0, 0},
    {DRAFT, "--n-draft", 0, 0, 0},
    {DRAFT, "--window", 0, 0, 0},
    {DRAFT, "--threads", 0, 0, 0},
    {DRAFT, "--temperature", 0, 0, 1},
    {DRAFT " --temperature 1", "--top-k", 0, 0, 0},
    {DRAFT " --temperature 1", "--top-p", 0, 0, 1},
    {DRAFT " --temperature 1", "--min-p", 0, 0, 1},
    {DRAFT " --temperature 1", "--seed", 1, 0, 0},
    {EVAL, "--stride", 0, 0, 0},
    {EVAL, "--min-context", 1, 0, 0},
    {EVAL, "--jobs", 0, 0, 0},
    {EVAL, "--target-step-ms", 0, 0, 1},
};

static void refuse_value(size_t i, const char *value)
{
    /* "=" since an empty word is no word for run_cli */
    cli_result r = run_cli_to(2, "%s %s=%s", options[i].run, options[i].option, value);
    char text[64];
    snprintf(text, sizeof text, "%s: ", options[i].option);
    assert_has(r.err, text);
    snprintf(text, sizeof text, "'%s'", value);
    if (*value) assert_has(r.err, text);
    assert_has(r.err, *value ? "is not allowed" : ": ");
    assert_false(folder_has("none"));
}

static void test_values(void **state)
{
    static const char *const never[] = {"", "-1", "-0", "+1", "x", "1x", "0x10", ",", "1,", ",1", "1,,2", "nan",
                                        "inf", "1,x", "--"};
    size_t i, k;
    (void)state;
    for (i = 0; i < sizeof options / sizeof *options; i++) {
        for (k = 0; k < sizeof never / sizeof *never; k++) refuse_value(i, never[k]);
        if (!options[i].zero) refuse_value(i, "0");
        if (!options[i].list) refuse_value(i, "1,2");
        if (!options[i].real) {
            refuse_value(i, "1.5");
            refuse_value(i, "1e3");
            refuse_value(i, "99999999999999999999999"); /* beyond 64 bits */
        }
    }
}

/* A whole number of 64 bits that is too large for its meaning. */
static void test_large_values(void **state)
{
    size_t i;
    (void)state;
    for (i = 0; i < sizeof options / sizeof *options; i++)
        if (!options[i].real && strcmp(options[i].option, "--anchor-position") != 0)
            refuse_value(i, "18446744073709551615");
}

/* Each is refused, naming what it goes with. */
static void test_without_meaning(void **state)
{
    static const char *const runs[][2] = {
        {"pack tiny f --parts context --target nowhere", "--target is for the LM head"},
        {"pack tiny f --check --parts all", "--parts goes without --check"},
        {"pack tiny packed --check --target " TARGET, "the file holds context KV only"},
        {"draft tiny --taps d --target t --seed 1", "--seed go with --temperature"},
        {"draft tiny --taps d --target t --top-p 1", "--top-p, --min-p and --seed go with --temperature"},
        {"eval tiny --data d --target t --seed 0", "--seed go with --temperature"},
        {"compare tiny --taps d --seed 0", "--seed is for synthetic rows"},
        {"compare a b --seed 0", "only --json goes with them"},
        {"compare a b --isa auto", "only --json goes with them"},
        {BENCH " --what load --hot", "--hot goes with"},
        {BENCH " --what load --cold", "--cold goes with"},
        {BENCH " --formats bf16 --no-states", "no --no-states"},
        {BENCH " --what load --no-states", "--no-states goes with"},
        {"quantize tiny q --format bf16 --scales mse", "bf16 takes no scales"},
        {"quantize tiny q --format int8 --layout modelopt", "the ModelOpt layout is written for"},
        {"quantize tiny q --format nvfp4 --group-size 64", "goes with int4"},
        {"quantize tiny q --format int8 --target t --no-compare", "--no-compare leaves out"},
        {"synth s --preset tiny --format nvfp4 --group-size 64", "--group-size goes with"},
        {"context tiny --taps d --scale 2", "--scale and --scales go with"},
        {"context tiny --taps d --tile-scale exact", "--tile-scale goes with"},
    };
    size_t i;
    (void)state;
    assert_int_equal(run_cli("pack tiny packed --parts context").code, 0);
    for (i = 0; i < sizeof runs / sizeof *runs; i++)
        assert_has(run_cli_to(2, "%s", runs[i][0]).err, runs[i][1]);
}

/* What is to be made is looked at before it is said that it is being made. */
static void test_presets(void **state)
{
    static const char *const whats[] = {"context", "draft", "load", "growth"};
    size_t i;
    (void)state;
    for (i = 0; i < 4; i++) {
        cli_result r = run_cli_to(2, "bench --preset nope --what %s --buffer 1M", whats[i]);
        assert_has(r.err, "unknown preset \"nope\"");
        assert_null(strstr(r.err, "making"));
        r = run_cli_to(2, "bench --preset tiny --set hidden_size=0 --what %s --buffer 1M", whats[i]);
        assert_has(r.err, "hidden_size");
        assert_null(strstr(r.err, "making"));
    }
    assert_has(run_cli("bench --preset tiny --tokens 1 --repeat 1 --buffer 1M --path onepass").err,
               "making a synthetic tiny in ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_large_values),
        cmocka_unit_test(test_without_meaning),
        cmocka_unit_test(test_presets),
    };
    return cmocka_run_group_tests(tests, make_tiny, remove_folder);
}
