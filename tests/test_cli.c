/* The command as a user meets it: exit codes, texts, JSON, files that appear whole or not at all.
 * Usage, synth and inspect; test_cli_context.c has context and compare, test_cli_bench.c bench. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "support/cli_said.h"
#include "support/tmpdir.h"

static const char *const commands[] = {"inspect", "synth", "context", "compare", "quantize",
                                       "bench"};
#define N_COMMANDS (sizeof commands / sizeof *commands)

/* ---- usage ---- */

static void test_top_level(void **state)
{
    cli_result r = run_cli("%s", "");
    (void)state;
    assert_int_equal(r.code, 2);
    assert_string_equal(r.out, "");
    assert_has(r.err, "usage: dspark COMMAND");
    r = run_cli("--version");
    assert_int_equal(r.code, 0);
    assert_string_equal(r.out, "dspark 0.1.0\n");
    r = run_cli("--help");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "compare");
    r = run_cli("frobnicate x");
    assert_int_equal(r.code, 2);
    assert_string_equal(r.out, "");
    assert_has(r.err, "'frobnicate'");
    assert_has(r.err, "inspect synth context compare quantize pack draft eval bench");
    r = run_cli("help frobnicate");
    assert_int_equal(r.code, 2);
}

static void test_usage_errors(void **state)
{
    static const struct {
        const char *args;
        const char *says[2];
    } cases[] = {
        {"inspect", {"CKPT is missing", "--help"}},
        {"inspect tiny more", {"unexpected argument 'more'", ""}},
        {"inspect tiny --depp", {"'--depp'", "--deep --json"}},
        {"inspect tiny -j", {"'-j'", ""}},
        {"inspect tiny --json=yes", {"--json takes no value", "'yes'"}},
        {"inspect tiny --json --json", {"--json is given twice", ""}},
        {"context tiny", {"--taps FILE is missing", ""}},
        {"context tiny --taps", {"--taps needs a value", "FILE"}},
        {"context tiny --taps=", {"--taps: the value is empty", ""}},
        {"context tiny --taps x --isa sse", {"'sse'", "auto, ref, avx2, avx512, avx512bf16"}},
        {"context tiny --taps x --path=fast", {"'fast'", "onepass, per-layer, full"}},
        {"context tiny --taps x --cache-dtype fp8", {"'fp8'", "bf16, fp8_e4m3"}},
        {"context tiny --taps x --block-size 0", {"'0'", "from 1 to 1048576"}},
        {"context tiny --taps x --batch 1e3", {"'1e3'", "whole number"}},
        {"context tiny --taps x --batch -1", {"'-1'", "whole number"}},
        {"context tiny --taps x --threads 99999999999999999999", {"99999999999999999999", "1024"}},
        {"context tiny --taps x --scale 2", {"fp8_e4m3", "not with bf16"}},
        {"context tiny --taps x --tile-scale exact", {"fp8_ds_mla", "not with bf16"}},
        {"context tiny --taps x --cache-dtype fp8_e4m3 --scale 0", {"'0'", "greater than 0"}},
        {"context tiny --taps x --cache-dtype fp8_e4m3 --scale nan", {"'nan'", "greater than 0"}},
        {"context tiny --taps x --cache-dtype fp8_e4m3 --scale 1 --scales 1,1", {"exclude", ""}},
        {"compare tiny --tokens 0", {"'0'", "from 1"}},
        {"bench --tokens 1,,2", {"'1,,2'", "commas"}},
        {"bench --tokens 0", {"'0'", "from 1"}},
        {"bench --cold --hot", {"exclude", ""}},
        {"bench tiny --preset tiny", {"--preset and --set go without CKPT", ""}},
        {"bench --formats bf16,fp9", {"'bf16,fp9'", "mxfp8"}},
        {"bench --formats bf16,int8,", {"'bf16,int8,'", "mxfp8"}},
        {"bench --formats int8,int8", {"'int8,int8'", "different"}},
        {"bench --formats bf16,int8 --path full", {"--formats", "no --path"}},
        {"bench --what speed", {"'speed'", "context, draft, linear, attention, load, growth"}},
        {"bench --threads 1,0", {"'1,0'", "from 1 to 1024"}},
        {"bench --isa avx2,avx2", {"'avx2,avx2'", "different names of auto, ref"}},
        {"bench --isa avx2,", {"'avx2,'", "avx512bf16"}},
        {"bench --what attention --cache-dtype bf16,fp8", {"'bf16,fp8'", "fp8_e4m3"}},
        {"bench --what draft --sequences 0", {"'0'", "from 1 to 1024"}},
        {"bench --what draft --contexts 4k", {"'4k'", "numbers from 0"}},
        {"bench --what draft --tokens 1", {"--tokens goes with", "not with draft"}},
        {"bench --what attention --formats bf16", {"--formats goes with", "not with attention"}},
        {"bench tiny --what load --formats bf16 --prepacked x", {"--prepacked", "no --formats"}},
        {"bench --what linear --cache-dtype bf16", {"--cache-dtype goes with", "not with linear"}},
        {"bench --contexts 4096", {"--contexts goes with --what draft", "not with context"}},
        {"bench --target x", {"--target goes with", "not with context"}},
        {"bench --what draft --no-states", {"--no-states goes with", "not with draft"}},
        {"bench --what attention --path full", {"--path goes with", "not with attention"}},
        {"bench tiny --set block_size=5", {"--preset and --set go without CKPT", ""}},
        {"bench tiny --what growth", {"no CKPT", "growth"}},
        {"bench --repeat 100000", {"100000", "1000"}},
        {"synth", {"OUT is missing", ""}},
        {"synth new", {"--preset is missing", "kimi-k3.1-pro"}},
        {"synth new --preset huge", {"huge", "lightseek"}},
        {"synth new --preset tiny --set hidden_sice=64", {"hidden_sice", ""}},
        {"synth new --preset tiny --shard-size 1X", {"'1X'", "K, M, G"}},
        {"synth new --preset tiny --shard-size 99999999999T", {"99999999999T", ""}},
        {"synth --dump d", {"--for CKPT and --tokens N", ""}},
        {"synth new --dump d --for tiny --tokens 1", {"--dump writes a dump only", ""}},
        {"synth --tokens 5", {"go with --dump", ""}},
    };
    size_t i;
    (void)state;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        cli_result r = run_cli_to(2, "%s", cases[i].args);
        assert_string_equal(r.out, "");
        assert_has(r.err, cases[i].says[0]);
        assert_has(r.err, cases[i].says[1]);
    }
    assert_false(folder_has("new"));
    assert_int_equal(run_cli("inspect -- --json").code, 3); /* a path that begins with dashes */
}

/* The manual names every option that --help names. */
static void test_help_and_manual(void **state)
{
    char *manual = read_whole_file(DSPARK_TEST_DATA "/../../man/dspark.1", NULL), *from, *to;
    size_t i, n_options = 0;
    (void)state;
    assert_non_null(manual);
    for (from = to = manual; *from; from++)
        if (*from != '\\' || from[1] != '-') *to++ = *from;
    *to = 0;
    for (i = 0; i < N_COMMANDS; i++) {
        cli_result r = run_cli("help %s", commands[i]);
        char *help = strdup(r.out), *line;
        assert_int_equal(r.code, 0);
        assert_string_equal(r.err, "");
        r = run_cli("%s --help", commands[i]);
        assert_int_equal(r.code, 0);
        assert_string_equal(r.out, help);
        for (line = strtok(help, "\n"); line; line = strtok(NULL, "\n")) {
            char option[64];
            if (sscanf(line, "  %63[-a-z0-9]", option) != 1 || strncmp(option, "--", 2) != 0)
                continue;
            n_options++;
            assert_has(manual, option);
        }
        free(help);
    }
    assert_true(n_options > 40);
    free(manual);
}

/* Commands and examples are what an embedder could write: no internal header. */
static void test_public_header_only(void **state)
{
    cli_result r = run_program("/bin/grep", "-rhoE #[[:space:]]*include.*[<\"][^>\"]+[>\"] "
                               DSPARK_TEST_DATA "/../../cli " DSPARK_TEST_DATA "/../../examples");
    char *line;
    size_t n = 0;
    (void)state;
    assert_int_equal(r.code, 0);
    for (line = strtok(r.out, "\n"); line; line = strtok(NULL, "\n")) {
        int ok = !strchr(line, '/') || strstr(line, "dspark/dspark.h") || strstr(line, "<sys/");
        if (!ok) print_error("%s\n", line);
        assert_true(ok);
        n += strstr(line, "dspark/dspark.h") != NULL;
    }
    assert_true(n >= 3);
}

/* ---- synth ---- */

static void test_synth(void **state)
{
    cli_result r = run_cli("synth a --preset tiny --seed 7 --json");
    json_t *doc;
    (void)state;
    assert_int_equal(r.code, 0);
    doc = said_json(&r);
    assert_int_equal(json_integer_value(json_object_get(doc, "tensors")), 68);
    assert_int_equal(json_integer_value(json_object_get(doc, "seed")), 7);
    json_decref(doc);
    r = run_cli("synth b --seed=7 --preset=tiny");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "68 tensors");
    assert_true(same_files("a/model.safetensors", "b/model.safetensors"));
    assert_true(same_files("a/config.json", "b/config.json"));
    assert_int_equal(run_cli("synth c --preset tiny --shard-size 64K --seed 7").code, 0);
    assert_false(same_files("a/model.safetensors", "tiny/model.safetensors"));
    r = run_cli("synth a --preset tiny");
    assert_int_not_equal(r.code, 0); /* a former checkpoint is never written over */
    assert_true(same_files("a/model.safetensors", "b/model.safetensors"));
    r = run_cli("synth d --preset tiny --context-only --set num_hidden_layers=3");
    assert_int_equal(r.code, 0);
    r = run_cli("inspect d");
    assert_int_equal(r.code, 0);
    r = run_cli("synth --dump x.st --for nowhere --tokens 3");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "nowhere");
    assert_false(folder_has("x.st"));
}

static void test_cancelled_synth(void **state)
{
    cli_result r = run_cli_cancelled(".dspark-",
                                     "synth --dump huge.st --for tiny --tokens 50000000");
    (void)state;
    assert_int_equal(r.code, 130);
    assert_has(r.err, "cancelled");
    assert_string_equal(r.out, "");
    assert_false(folder_has("huge.st"));
    assert_false(folder_has(".dspark-"));
}

/* ---- inspect ---- */

static void test_inspect(void **state)
{
    cli_result r = run_cli("inspect tiny");
    json_t *doc;
    (void)state;
    assert_int_equal(r.code, 0);
    assert_has(r.out, "USABLE: ");
    assert_has(r.out, "next: dspark context tiny --taps");
    assert_has(r.out, "layers.{0-4}.self_attn.kv_a_proj_with_mqa.weight");
    assert_string_equal(r.err, "");
    r = run_cli("inspect tiny --json");
    assert_int_equal(r.code, 0);
    doc = said_json(&r);
    assert_true(json_is_object(doc));
    json_decref(doc);
    r = run_cli("inspect tiny --deep --json");
    assert_int_equal(r.code, 0);
    json_decref(said_json(&r));
    assert_int_equal(run_cli("inspect tiny --deep").code, 0);
}

static void test_inspect_others(void **state)
{
    static const char target[] = "{\"model_type\": \"llama\", \"architectures\": "
                                 "[\"LlamaForCausalLM\"], \"hidden_size\": 64}\n";
    static const char one_tensor[] = "\x50\0\0\0\0\0\0\0{\"model.norm.weight\":{\"dtype\":\"BF16\","
                                     "\"shape\":[1],\"data_offsets\":[0,2]}}         xx";
    char *whole;
    cli_result r = run_cli("inspect nowhere");
    (void)state;
    assert_int_equal(r.code, 3);
    assert_int_equal(run_cli("synth cut --preset tiny").code, 0);
    whole = read_in_folder("cut/model.safetensors");
    assert_non_null(whole);
    tmpdir_write(in_folder("cut/model.safetensors"), whole, 1000);
    free(whole);
    r = run_cli("inspect cut");
    assert_int_equal(r.code, 3);
    assert_has(r.out, "BROKEN");
    r = run_cli("inspect cut --json");
    assert_int_equal(r.code, 3);
    json_decref(said_json(&r));
    r = run_program("/bin/mkdir", "other");
    assert_int_equal(r.code, 0);
    tmpdir_write(in_folder("other/model.safetensors"), one_tensor, sizeof one_tensor - 1);
    tmpdir_write(in_folder("other/config.json"), target, sizeof target - 1);
    r = run_cli("inspect other");
    assert_int_equal(r.code, 1);
    assert_has(r.out, "NOT USABLE HERE");
}

/* Names from a hostile file must not reach the terminal as escape sequences. */
static void test_inspect_escapes(void **state)
{
    static const char header[] = "{\"a\\u001b[31mb\":{\"dtype\":\"BF16\",\"shape\":[1],"
                                 "\"data_offsets\":[0,2]}}";
    unsigned char file[256] = {sizeof header - 1};
    cli_result r;
    (void)state;
    memcpy(file + 8, header, sizeof header - 1);
    tmpdir_write(in_folder("escape.safetensors"), file, 8 + sizeof header - 1 + 2);
    r = run_cli("inspect escape.safetensors");
    assert_true(r.code == 1 || r.code == 3);
    assert_null(strchr(r.out, 0x1b));
    assert_null(strchr(r.err, 0x1b));
}

/* ---- output that cannot be written ---- */

static void test_full_stdout(void **state)
{
    (void)state;
    if (access("/dev/full", W_OK) != 0) skip();
    assert_int_equal(run_cli_into("/dev/full", "--version").code, 5);
    assert_int_equal(run_cli_into("/dev/full", "inspect tiny").code, 5);
    assert_int_equal(run_cli_into("/dev/full", "inspect tiny --json").code, 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_top_level),
        cmocka_unit_test(test_usage_errors),
        cmocka_unit_test(test_help_and_manual),
        cmocka_unit_test(test_public_header_only),
        cmocka_unit_test(test_synth),
        cmocka_unit_test(test_cancelled_synth),
        cmocka_unit_test(test_inspect),
        cmocka_unit_test(test_inspect_others),
        cmocka_unit_test(test_inspect_escapes),
        cmocka_unit_test(test_full_stdout),
    };
    return cmocka_run_group_tests(tests, make_tiny, remove_folder);
}
