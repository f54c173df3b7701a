/* What the command says to someone who is on the wrong way: paths that are not there, files of
 * another kind, configs with a slip, misspelt options. One cause, one line, one thing to do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "dspark/dspark.h"
#include "support/cli_said.h"

static int make_inputs(void **state)
{
    (void)state;
    if (run_cli("synth tiny --preset tiny").code) return 1;
    if (run_cli("synth --dump dump.safetensors --for tiny --tokens 5").code) return 1;
    return run_cli("context tiny --taps dump.safetensors --out cache.safetensors --states-out "
                   "states.safetensors").code;
}

static void write_text(const char *name, const char *text)
{
    FILE *f = fopen(in_folder(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
    assert_int_equal(fclose(f), 0);
}

/* tiny's config with `from` replaced; a new directory `dir` with tiny's tensors. */
static void write_variant(const char *dir, const char *from, const char *to)
{
    char *config = read_whole_file(in_folder("tiny/config.json"), NULL), *at, text[4096], name[80];
    assert_non_null(config);
    at = strstr(config, from);
    assert_non_null(at);
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - config), config, to, at + strlen(from));
    assert_int_equal(run_program("/bin/cp", "-r tiny copy").code, 0);
    snprintf(name, sizeof name, "copy %s", dir);
    assert_int_equal(run_program("/bin/mv", name).code, 0);
    snprintf(name, sizeof name, "%s/config.json", dir);
    write_text(name, text);
    free(config);
}

static void expect(const char *args, int code, const char *part, const char *next)
{
    cli_result r = run_cli_to(code, "%s", args);
    assert_has(r.out, part);
    assert_has(r.out, next);
}

/* One line on stderr, nothing on stdout. */
static void expect_line(const char *args, int code, const char *line)
{
    cli_result r = run_cli("%s", args);
    if (r.code != code || strcmp(r.err, line)) print_error("%s: %d\n%s", args, r.code, r.err);
    assert_int_equal(r.code, code);
    assert_string_equal(r.out, "");
    assert_string_equal(r.err, line);
}

static void test_not_there(void **state)
{
    (void)state;
    expect_line("inspect nope", 3, "dspark: not found: nope (a local directory is needed)\n");
    expect_line("inspect org/name", 3, "dspark: not found: org/name (a local directory is needed; "
                "names of a hub are not fetched)\n");
    expect_line("inspect tiny/config.json/x", 3,
                "dspark: not found: tiny/config.json/x (a local directory is needed)\n");
    assert_int_equal(run_program("/bin/mkdir", "empty").code, 0);
    expect_line("inspect empty", 3, "dspark: empty: no tensors here: neither config.json nor "
                "*.safetensors\n");
    assert_int_equal(run_cli("inspect nope --json").code, 3);
    assert_int_equal(run_cli("inspect empty --json").code, 3);
}

static void test_usable(void **state)
{
    cli_result r = run_cli("inspect tiny");
    (void)state;
    assert_int_equal(r.code, 0);
    assert_has(r.out, "headers only, data not read (--deep reads it)\n");
    assert_null(strstr(r.out, " \n"));
    assert_null(strstr(r.out, "1 threads"));
    r = run_cli("inspect tiny --deep");
    assert_int_equal(r.code, 0);
    assert_null(strstr(r.out, "not read"));
    assert_has(r.out, "rms\n");
    assert_has(r.out, "0 values not finite, 0 rows of zeros\n");
    assert_null(strstr(r.out, " \n"));
    r = run_cli("inspect tiny --deep --json");
    assert_has(r.out, "\"rms_norm_eps\": 1e-5,");
    assert_null(strstr(r.out, "0000000001"));
    assert_null(strstr(r.out, "9999999999"));
    assert_int_equal(run_cli("synth cut --preset tiny --context-only").code, 0);
    r = run_cli("inspect cut");
    assert_has(r.out, "confidence head not in this cut");
    assert_has(r.out, "lm_head not in this cut");
}

/* Overwrite 16-bit values from the end of tiny's data: the last tensor. */
static void test_deep(void **state)
{
    dspark_checkpoint *file = NULL;
    const dspark_tensor *t = NULL;
    uint64_t at = 0, n_bytes;
    size_t i;
    FILE *f;
    (void)state;
    write_variant("zero", "\"block_size\"", "\"block_size\"");
    assert_int_equal(dspark_checkpoint_open(&file, in_folder("zero"), NULL), DSPARK_OK);
    for (i = dspark_checkpoint_tensor_count(file); i-- > 0;) {
        t = dspark_checkpoint_tensor(file, i);
        at += t->n_bytes;
        if (strcmp(t->name, "layers.3.self_attn.kv_a_proj_with_mqa.weight") == 0) break;
    }
    n_bytes = t->n_bytes;
    dspark_checkpoint_close(file);
    f = fopen(in_folder("zero/model.safetensors"), "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, -(long)at, SEEK_END), 0);
    for (i = 0; i < n_bytes; i++) assert_int_equal(fputc(0, f), 0);
    assert_int_equal(fseek(f, -(long)at, SEEK_END), 0);
    assert_int_equal(fclose(f), 0);
    expect("inspect zero", 0, "USABLE", "data not read");
    expect("inspect zero --deep", 1, "NOT USABLE HERE: layers.3.self_attn.kv_a_proj_with_mqa.weight"
           ": all 24 rows are zero", "next: fetch config.json and tensors again");
    f = fopen(in_folder("zero/model.safetensors"), "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, -(long)at, SEEK_END), 0);
    assert_int_equal(fputc(0x80, f), 0x80); /* 0x7f80: infinity */
    assert_int_equal(fputc(0x7f, f), 0x7f);
    assert_int_equal(fclose(f), 0);
    expect("inspect zero --deep", 3, "1 value not finite, 23 rows of zeros", "BROKEN");
}

static void test_next(void **state)
{
    (void)state;
    write_variant("taps", "\"num_target_layers\": 5", "\"num_target_layers\": 8");
    expect("inspect taps", 3, "BROKEN", "next: mend num_target_layers in config.json\n");
    write_variant("nope", "\"block_size\"", "\"attention_bias\": true, \"block_size\"");
    expect("inspect nope", 1, "NOT USABLE", "next: serve it with the program that it was made for");
    write_variant("words", "\"vanilla\"", "\"other\"");
    expect("inspect words", 1, "NOT USABLE", "markov_head_type asks for what is not built here");
    write_variant("bare", "{", "{");
    assert_int_equal(remove(in_folder("bare/config.json")), 0);
    expect("inspect bare", 1, "NOT USABLE", "next: put config.json beside the weights\n");
    assert_int_equal(run_program("/bin/mkdir", "bare/config.json").code, 0); /* there, and not to be read */
    expect("inspect bare", 3, "BROKEN: config.json: ", "next: make config.json a file that can be read\n");
    write_variant("more", "\"num_hidden_layers\": 5", "\"num_hidden_layers\": 6");
    expect("inspect more", 3, "BROKEN", "next: fetch config.json and tensors again, from one place");
    write_variant("short", "{", "{");
    write_text("short/model.safetensors", "\x10\x27");
    expect("inspect short", 3, "BROKEN", "next: fetch model.safetensors again");
    write_variant("json", "{", "");
    expect("inspect json", 3, "BROKEN", "next: mend config.json");
    write_text("x.gguf", "GGUF....");
    expect("inspect x.gguf", 1, "GGUF", "next: get the checkpoint in its safetensors form");
    expect("inspect tiny/config.json", 3, "give the directory", "next: dspark inspect tiny\n");
}

/* Whoever opens it names the file that is wrong. */
static void test_config_is_named(void **state)
{
    static const char *const commands[] = {"context %s --taps dump.safetensors", "compare %s", "inspect %s",
                                           "pack %s p --parts context", "quantize %s q --format fp8"};
    static const char *const faults[][2] = {{"not-json", "{,"}, {"no-layers", "{\"qk_head_dim\": 1e999,"},
                                            {"list", "{\"quantization_config\": [],"}};
    size_t i, k;
    (void)state;
    for (i = 0; i < 3; i++) {
        write_variant(faults[i][0], "{", faults[i][1]);
        for (k = 0; k < sizeof commands / sizeof *commands; k++) {
            char args[200];
            cli_result r;
            snprintf(args, sizeof args, commands[k], faults[i][0]);
            r = run_cli_to(3, "%s", args);
            assert_has(*r.out ? r.out : r.err, "config.json: ");
        }
    }
}

static void test_other_files(void **state)
{
    (void)state;
    expect("inspect dump.safetensors", 1, "a hidden-state dump, not a checkpoint",
           "next: dspark context CKPT --taps dump.safetensors\n");
    expect("inspect cache.safetensors", 1, "latent caches",
           "next: dspark compare cache.safetensors OTHER\n");
    expect("inspect states.safetensors", 1, "context states", "next: ");
    write_text("lfs.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\n"
               "size 7124635000\n");
    expect_line("inspect lfs.safetensors", 3, "dspark: lfs.safetensors: a git-lfs pointer, not the "
                "tensors: fetch the file itself (git lfs pull)\n");
    write_text("page.safetensors", "<!DOCTYPE html>\n<html>Not found</html>\n");
    expect_line("inspect page.safetensors", 3, "dspark: page.safetensors: looks like text, not "
                "safetensors: it begins with \"<!DOCTYP\"\n");
    write_variant("pointer", "{", "{");
    write_text("pointer/model.safetensors", "version https://git-lfs.github.com/spec/v1\n");
    expect("inspect pointer", 3, "git-lfs pointer", "next: fetch model.safetensors again");
}

static void test_keys(void **state)
{
    cli_result r;
    (void)state;
    write_variant("keys", "{", "{\"zeta\": 1, \"block_sice\": 5, \"_Ab\": null, \"torch_dtype\": "
                  "\"bfloat16\", \"transformers_version\": \"4\", \"bos_token_id\": 1,");
    r = run_cli("inspect keys");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "- keys this library does not know: _Ab, block_sice, zeta\n");
    write_variant("many", "{", "{\"k9\":0,\"k8\":0,\"k7\":0,\"k6\":0,\"k5\":0,\"k4\":0,\"k3\":0,"
                  "\"k2\":0,\"k1\":0,\"k0\":0,");
    r = run_cli("inspect many");
    assert_has(r.out, "does not know: k0, k1, k2, k3, k4, k5, k6, k7, and 2 more\n");
    r = run_cli("inspect tiny");
    assert_null(strstr(r.out, "does not know"));
}

static void test_options(void **state)
{
    static const char *const cases[][2] = {
        {"context tiny --blok-size 4", "did you mean --block-size?"},
        {"context tiny --block_size=4", "did you mean --block-size?"},
        {"context tiny -taps x", "did you mean --taps?"},
        {"context tiny --cache_dtype bf16", "did you mean --cache-dtype?"},
        {"context tiny --tpas x", "did you mean --taps?"},
        {"inspect tiny --depp", "did you mean --deep?"},
        {"inspect tiny --hlep", "did you mean --help?"},
        {"synth x --presett tiny", "did you mean --preset?"},
    };
    static const char *const wild[] = {
        "inspect tiny --frobnicate", "inspect tiny -j", "inspect tiny -",
        "inspect tiny --aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    };
    cli_result r = run_cli("version");
    size_t i;
    (void)state;
    assert_int_equal(r.code, 0);
    assert_string_equal(r.out, "dspark 0.1.0\n");
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        r = run_cli_to(2, "%s", cases[i][0]);
        assert_has(r.err, cases[i][1]);
    }
    for (i = 0; i < sizeof wild / sizeof *wild; i++) {
        r = run_cli_to(2, "%s", wild[i]);
        assert_null(strstr(r.err, "did you mean"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_not_there),   cmocka_unit_test(test_usable),
        cmocka_unit_test(test_deep),        cmocka_unit_test(test_next),
        cmocka_unit_test(test_config_is_named),
        cmocka_unit_test(test_other_files), cmocka_unit_test(test_keys),
        cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, make_inputs, remove_folder);
}
