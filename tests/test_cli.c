/* The command as a user meets it: exit codes, texts, JSON, files that appear whole or not at all.
 * Usage, synth, inspect and bench; test_cli_context.c has context and compare. */
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

#include "../cli/bench_machine.c" /* the verdict on a run, which no option can bring about */
#include "support/run_cli.h"

static const char *const commands[] = {"inspect", "synth", "context", "compare", "quantize",
                                       "bench"};
#define N_COMMANDS (sizeof commands / sizeof *commands)

#define assert_has(text, part) \
    do { \
        if (!strstr(text, part)) print_error("'%s' is not in:\n%s\n", part, text); \
        assert_non_null(strstr(text, part)); \
    } while (0)

static int make_tiny(void **state)
{
    (void)state;
    return run_cli("synth tiny --preset tiny").code;
}

static int remove_all(void **state)
{
    (void)state;
    cli_cleanup();
    return 0;
}

static char *read_in_folder(const char *name)
{
    char path[800];
    snprintf(path, sizeof path, "%s/%s", cli_folder(), name);
    return read_whole_file(path, NULL);
}

static void write_in_folder(const char *name, const void *data, size_t n)
{
    char path[800];
    FILE *f;
    snprintf(path, sizeof path, "%s/%s", cli_folder(), name);
    f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static json_t *parse(const cli_result *r)
{
    json_error_t err;
    json_t *doc = json_loads(r->out, JSON_REJECT_DUPLICATES, &err);
    if (!doc) print_error("not JSON: %s\n%s\n%s\n", err.text, r->out, r->err);
    assert_non_null(doc);
    return doc;
}

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
    assert_has(r.err, "inspect synth context compare quantize draft eval bench");
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
        {"bench tiny --preset tiny", {"--preset goes without CKPT", ""}},
        {"bench --formats bf16,fp9", {"'bf16,fp9'", "mxfp8"}},
        {"bench --formats bf16,int8,", {"'bf16,int8,'", "mxfp8"}},
        {"bench --formats int8,int8", {"'int8,int8'", "different"}},
        {"bench --formats bf16,int8 --svg f.svg", {"--formats", "no --svg"}},
        {"bench --formats bf16,int8 --path full", {"--formats", "no --path"}},
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
        cli_result r = run_cli("%s", cases[i].args);
        if (r.code != 2) print_error("dspark %s: %d\n%s", cases[i].args, r.code, r.err);
        assert_int_equal(r.code, 2);
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
    doc = parse(&r);
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
    doc = parse(&r);
    assert_true(json_is_object(doc));
    json_decref(doc);
    r = run_cli("inspect tiny --deep --json");
    assert_int_equal(r.code, 0);
    json_decref(parse(&r));
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
    write_in_folder("cut/model.safetensors", whole, 1000);
    free(whole);
    r = run_cli("inspect cut");
    assert_int_equal(r.code, 3);
    assert_has(r.out, "BROKEN");
    r = run_cli("inspect cut --json");
    assert_int_equal(r.code, 3);
    json_decref(parse(&r));
    r = run_program("/bin/mkdir", "other");
    assert_int_equal(r.code, 0);
    write_in_folder("other/model.safetensors", one_tensor, sizeof one_tensor - 1);
    write_in_folder("other/config.json", target, sizeof target - 1);
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
    write_in_folder("escape.safetensors", file, 8 + sizeof header - 1 + 2);
    r = run_cli("inspect escape.safetensors");
    assert_true(r.code == 1 || r.code == 3);
    assert_null(strchr(r.out, 0x1b));
    assert_null(strchr(r.err, 0x1b));
}

/* ---- bench ---- */

static double number_in(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_number(value)) print_error("no number '%s'\n", key);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

static int drifts(const json_t *pair)
{
    double a = json_number_value(json_array_get(pair, 0));
    double b = json_number_value(json_array_get(pair, 1));
    assert_int_equal(json_array_size(pair), 2);
    assert_true(a > 0 && b > 0);
    return a > 1.25 * b || b > 1.25 * a;
}

/* The verdict follows from the conditions in the same document, whatever this machine is doing. */
static void check_verdict(const json_t *doc)
{
    const json_t *hot = json_object_get(doc, "hot_read_gbs"), *load = json_object_get(doc, "load");
    const json_t *steal = json_object_get(doc, "steal_percent");
    size_t n = json_array_size(json_object_get(doc, "reasons")), expected = 0;
    double most = json_number_value(json_array_get(load, 0));
    json_t *rows = json_object_get(doc, "rows"), *row, *pair;
    const json_t *cache = json_object_get(doc, "last_level_cache_bytes");
    const char *name;
    size_t i, n_cold = 0;
    if (json_number_value(json_array_get(load, 1)) > most)
        most = json_number_value(json_array_get(load, 1));
    expected += drifts(json_object_get(doc, "compute_gflops"));
    expected += drifts(json_object_get(doc, "read_gbs"));
    json_object_foreach((json_t *)hot, name, pair) expected += drifts(pair);
    expected += most > number_in(doc, "processors") + 0.5;
    expected += json_is_number(steal) && json_number_value(steal) > 1;
    json_array_foreach(rows, i, row)
        n_cold += strcmp(json_string_value(json_object_get(row, "weights")), "cold") == 0;
    expected += n_cold && json_is_integer(cache) &&
                number_in(doc, "buffer_bytes") < json_number_value(cache);
    assert_int_equal(n, expected);
    assert_true(json_is_boolean(json_object_get(doc, "reliable")));
    assert_int_equal(json_is_true(json_object_get(doc, "reliable")), n == 0);
}

static void test_bench_verdict(void **state)
{
    static const struct {
        double compute[2], read[2], hot[2], load[2], steal;
        uint64_t cache;
        size_t n_reasons;
        const char *says;
    } cases[] = {
        {{100, 124}, {10, 8.1}, {0, 0}, {0, 2.4}, 0.9, 0, 0, ""},
        {{100, 124}, {10, 8.1}, {50, 50}, {2.5, 0}, -1, 1000, 0, ""},
        {{100, 126}, {10, 10}, {0, 0}, {0, 0}, 0, 0, 1, "compute 100 GFLOP/s before, 126 after"},
        {{100, 100}, {10, 7.9}, {0, 0}, {0, 0}, 0, 0, 1, "read 10 GB/s before, 7.9 after"},
        {{100, 100}, {10, 10}, {50, 70}, {0, 0}, 0, 0, 1, "full's size 50 GB/s before, 70"},
        {{100, 100}, {10, 10}, {0, 0}, {2.6, 0}, 0, 0, 1, "load 2.60 on 2 processors"},
        {{100, 100}, {10, 10}, {0, 0}, {0, 2.6}, 0, 0, 1, "load 2.60 on 2 processors"},
        {{100, 100}, {10, 10}, {0, 0}, {0, 0}, 1.1, 0, 1, "steal 1.1%"},
        {{100, 100}, {10, 10}, {0, 0}, {0, 0}, 0, 2000000, 1, "1 MB does not empty caches of 2 MB"},
        {{100, 200}, {10, 20}, {10, 20}, {9, 9}, 9, 2000000, 6, "compute"},
    };
    size_t i;
    (void)state;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        bench_row row = {.cells[DSPARK_PATH_FULL] = {.measured = 1, .cold = 1}};
        bench_result r = {.n_processors = 2, .buffer_bytes = 1000000, .rows = &row, .n_rows = 1};
        bench_verdict v;
        memcpy(r.compute_gflops, cases[i].compute, sizeof r.compute_gflops);
        memcpy(r.read_gbs, cases[i].read, sizeof r.read_gbs);
        memcpy(r.hot_gbs[DSPARK_PATH_FULL], cases[i].hot, sizeof *r.hot_gbs);
        memcpy(r.load, cases[i].load, sizeof r.load);
        r.steal_percent = cases[i].steal;
        r.cache_bytes = cases[i].cache;
        bench_judge(&r, &v);
        if (v.n_reasons != cases[i].n_reasons) print_error("case %zu: %s\n", i, v.reasons[0]);
        assert_int_equal(v.n_reasons, cases[i].n_reasons);
        assert_has(v.reasons[0], cases[i].says);
        row.cells[DSPARK_PATH_FULL].cold = 0;
        bench_judge(&r, &v); /* who reads from the cache needs no large buffer */
        assert_int_equal(v.n_reasons, cases[i].n_reasons - (cases[i].cache > 1000000));
    }
}

/* Cells of one row, by stage: bytes add up, ratios are those of the medians, and each cell is held
 * against a limit that the document names. */
static void check_stages(const json_t *doc, int n_stages, int cold)
{
    static const char *const names[] = {"onepass", "per-layer", "full", "taps->states",
                                        "taps->cache onepass", "taps->cache full"};
    const json_t *rows = json_object_get(doc, "rows"), *hot = json_object_get(doc, "hot_read_gbs");
    const json_t *read = json_object_get(doc, "read_gbs"), *cells[6];
    int s;
    assert_int_equal(json_array_size(rows), n_stages);
    assert_int_equal(json_object_size(hot), cold ? 0 : n_stages);
    for (s = 0; s < n_stages; s++) {
        const json_t *pair = cold ? read : json_object_get(hot, names[s]);
        double a = json_number_value(json_array_get(pair, 0));
        double b = json_number_value(json_array_get(pair, 1));
        cells[s] = json_array_get(rows, (size_t)s);
        assert_string_equal(json_string_value(json_object_get(cells[s], "stage")), names[s]);
        assert_string_equal(json_string_value(json_object_get(cells[s], "weights")),
                            cold ? "cold" : "hot");
        assert_float_equal(number_in(cells[s], "read_gbs"), a > b ? a : b, 0);
        assert_true(number_in(cells[s], "p50_seconds") > 0);
        if (s == 3) {
            assert_null(json_object_get(cells[s], "ratio_to_onepass"));
        } else {
            double ratio = number_in(cells[s], "p50_seconds") /
                           number_in(cells[s < 3 ? 0 : 4], "p50_seconds");
            assert_float_equal(number_in(cells[s], "ratio_to_onepass"), ratio, 1e-9 * ratio);
        }
    }
    assert_true(number_in(cells[2], "bytes") > number_in(cells[1], "bytes"));
    if (n_stages < 6) return;
    for (s = 4; s < 6; s++) /* the states between are neither read nor written in memory */
        assert_float_equal(number_in(cells[s], "flops"),
                           number_in(cells[3], "flops") + number_in(cells[s == 4 ? 0 : 2], "flops"),
                           0);
    assert_true(number_in(cells[4], "bytes") > number_in(cells[3], "bytes"));
    assert_true(number_in(cells[5], "bytes") > number_in(cells[4], "bytes"));
}

/* Lines of a table must not end in spaces, and no number may have lost all its digits. */
static void check_text(const char *text)
{
    assert_null(strstr(text, " \n"));
    assert_null(strstr(text, " 0.0 "));
    assert_null(strstr(text, "1 threads"));
    assert_has(text, "\npositions");
    assert_has(text, "read of 1.0 MB (cold) ");
}

static void test_bench(void **state)
{
    static const char args[] = "bench --preset tiny --tokens 4,1 --repeat 3 --buffer 1M "
                               "--threads 2 --csv b.csv --svg b.svg";
    cli_result r = run_cli("%s", args);
    char *text, *c;
    size_t n_lines = 0;
    json_t *doc;
    (void)state;
    assert_int_equal(r.code, 0);
    assert_has(r.out, "roofline");
    assert_has(r.out, "GFLOP/s");
    check_text(r.out);
    assert_false(folder_has("dspark-bench")); /* the made checkpoint is gone */
    text = read_in_folder("b.csv");
    assert_non_null(text);
    for (c = text; *c; c++) n_lines += *c == '\n';
    assert_int_equal(n_lines, 1 + 2 * 6);
    free(text);
    text = read_in_folder("b.svg");
    assert_non_null(text);
    assert_memory_equal(text, "<svg ", 5);
    assert_has(text, "</svg>\n");
    assert_null(strstr(text, "nan"));
    assert_null(strstr(text, "inf"));
    free(text);
    r = run_cli("bench tiny --tokens 2 --repeat 3 --buffer 1M --hot --no-states --json");
    assert_int_equal(r.code, 0);
    doc = parse(&r);
    check_stages(doc, 3, 0);
    check_verdict(doc);
    json_decref(doc);
    r = run_cli("bench tiny --tokens 2 --repeat 3 --buffer 16M --threads 1 --json");
    assert_int_equal(r.code, 0);
    doc = parse(&r);
    check_stages(doc, 6, 1);
    check_verdict(doc);
    json_decref(doc);
    r = run_cli("bench tiny --tokens 2 --repeat 2 --buffer 16M --threads 1 --hot");
    assert_int_equal(r.code, 0);
    assert_has(r.out, ", 1 thread of ");
    assert_has(r.out, "(hot taps->cache full) ");
    r = run_cli("bench tiny --tokens 2 --repeat 3 --buffer 1M --path full --no-states --json");
    assert_int_equal(r.code, 0);
    doc = parse(&r);
    assert_int_equal(json_array_size(json_object_get(doc, "rows")), 1);
    json_decref(doc);
    r = run_cli("bench tiny --tokens 1 --repeat 3 --buffer 1M --csv missing/b.csv");
    assert_int_equal(r.code, 5);
    assert_has(r.err, "missing/b.csv");
}

/* Formats side by side: ratios are of this run's medians, bytes are what each one packs into, and
 * rooflines follow from both. */
static void check_formats(const json_t *doc, const char *const *formats, size_t n, int plain)
{
    const json_t *rows = json_object_get(doc, "rows"), *row;
    const json_t *compute = json_object_get(doc, "compute_gflops");
    double a = json_number_value(json_array_get(compute, 0));
    double b = json_number_value(json_array_get(compute, 1)), weights[3] = {0};
    size_t i;
    assert_int_equal(json_array_size(rows), n);
    json_array_foreach(rows, i, row) {
        double p50 = number_in(row, "p50_seconds"), bytes = number_in(row, "bytes"), limit, other;
        assert_string_equal(json_string_value(json_object_get(row, "stage")), "onepass");
        assert_string_equal(json_string_value(json_object_get(row, "format")), formats[i]);
        assert_null(json_object_get(row, "ratio_to_onepass"));
        weights[i] = number_in(row, "weight_bytes");
        assert_true(weights[i] > 0 && weights[i] < number_in(row, "resident_bytes"));
        /* tiny: two tokens in of 64 and out of 5 x 24 values */
        assert_float_equal(bytes - weights[i], 2 * (64 + 5 * 24) * 2, 0);
        assert_float_equal(number_in(row, "flops"), 2.0 * 2 * 5 * 24 * 64, 0);
        limit = bytes / number_in(row, "read_gbs") * 1e-9;
        other = number_in(row, "flops") / (a > b ? a : b) * 1e-9;
        if (other > limit) limit = other;
        assert_float_equal(number_in(row, "roofline_seconds"), limit, 1e-9 * limit);
        if (plain < 0)
            assert_null(json_object_get(row, "bf16_over_format"));
        else
            assert_float_equal(number_in(row, "bf16_over_format") * p50,
                               number_in(json_array_get(rows, (size_t)plain), "p50_seconds"),
                               1e-9 * p50);
        if (plain < 0) {
            assert_null(json_object_get(row, "of_byte_ratio"));
        } else {
            double all = number_in(json_array_get(rows, (size_t)plain), "weight_bytes");
            assert_float_equal(number_in(row, "of_byte_ratio") * all,
                               number_in(row, "bf16_over_format") * weights[i], 1e-9 * all);
        }
    }
    if (plain >= 0)
        for (i = 0; i < n; i++) assert_true((int)i == plain || weights[i] < weights[plain]);
}

static void test_bench_formats(void **state)
{
    static const char *const three[] = {"fp8-channel", "bf16", "mxfp8"};
    static const char *const two[] = {"fp8-channel", "mxfp8"};
    static const char options[] = "--tokens 2 --repeat 3 --buffer 1M --threads 2";
    size_t n_lines = 0;
    cli_result r;
    char *text, *c;
    json_t *doc;
    (void)state;
    r = run_cli("bench --preset tiny --formats fp8-channel,mxfp8 %s --csv f.csv", options);
    assert_int_equal(r.code, 0);
    check_text(r.out);
    assert_has(r.out, "vs bf16");
    assert_has(r.out, "\nmodels      fp8-channel ");
    assert_false(folder_has("dspark-bench"));
    text = read_in_folder("f.csv");
    assert_non_null(text);
    for (c = text; *c; c++) n_lines += *c == '\n';
    assert_int_equal(n_lines, 1 + 2);
    assert_has(text, ",bf16_over_format,format,weight_bytes\n2,onepass,cold,3,");
    assert_has(text, ",,fp8-channel,"); /* no bf16 to compare with */
    assert_has(text, ",,mxfp8,");
    free(text);
    r = run_cli("bench --preset tiny --formats fp8-channel,mxfp8 %s --hot --json", options);
    assert_int_equal(r.code, 0);
    doc = parse(&r);
    assert_int_equal(json_object_size(json_object_get(doc, "hot_read_gbs")), 2);
    check_formats(doc, two, 2, -1);
    check_verdict(doc);
    json_decref(doc);
    r = run_cli("bench tiny --formats fp8-channel,bf16,mxfp8 %s --json", options);
    assert_int_equal(r.code, 0);
    doc = parse(&r);
    check_formats(doc, three, 3, 1);
    check_verdict(doc);
    json_decref(doc);
    r = run_cli("bench tiny --formats bf16,int4 %s", options); /* 128 weights do not go into 64 */
    assert_int_not_equal(r.code, 0);
    assert_has(r.err, "128");
    assert_false(folder_has("dspark-bench"));
    r = run_cli("bench missing --formats bf16,int8 %s", options);
    assert_int_equal(r.code, 3);
    assert_has(r.err, "missing");
    r = run_cli("quantize tiny tiny-int8 --format int8");
    assert_int_equal(r.code, 0);
    r = run_cli("bench tiny-int8 --formats fp8-channel,bf16,mxfp8 %s --json", options);
    assert_int_equal(r.code, 0); /* bf16 is the way back, the others are smaller still */
    doc = parse(&r);
    check_formats(doc, three, 3, 1);
    json_decref(doc);
    assert_false(folder_has("dspark-bench"));
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
        cmocka_unit_test(test_bench),
        cmocka_unit_test(test_bench_formats),
        cmocka_unit_test(test_bench_verdict),
        cmocka_unit_test(test_full_stdout),
    };
    return cmocka_run_group_tests(tests, make_tiny, remove_all);
}
