/* dspark bench as a user meets it: every --what on a tiny model with few repeats, its JSON, CSV and drawing, what
 * follows from what inside a report, and the verdict on a run. No test looks at how long anything took. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "../cli/bench_chart.c"   /* points of disturbed rows, which no option can bring about */
#include "../cli/bench_machine.c" /* the verdict on a run: the same */
#include "support/cli_said.h"

/* ---- JSON ---- */

static double better(const json_t *pair)
{
    double a = json_number_value(json_array_get(pair, 0)), b = json_number_value(json_array_get(pair, 1));
    assert_int_equal(json_array_size(pair), 2);
    assert_true(a > 0 && b > 0);
    return a > b ? a : b;
}

static int drifts(const json_t *pair)
{
    double a = json_number_value(json_array_get(pair, 0)), b = json_number_value(json_array_get(pair, 1));
    return a > 1.25 * b || b > 1.25 * a;
}

/* As many threads as processors at most: more tell nothing about the machine. */
static int looks(const json_t *run)
{
    return said_number(run, "threads") <= bench_read_available();
}

/* The verdict follows from the conditions in the same document, whatever this machine is doing. */
static void check_verdict(const json_t *doc, const json_t *run)
{
    const json_t *hot = json_object_get(run, "hot_read_gbs"), *load = json_object_get(run, "load");
    const json_t *steal = json_object_get(run, "steal_percent"), *copy = json_object_get(run, "copy_gbs");
    const json_t *cache = json_object_get(doc, "last_level_cache_bytes");
    size_t n = json_array_size(json_object_get(run, "reasons")), expected = 0, i, n_cold = 0, n_left = 0;
    const int load_run = strcmp(said_text(doc, "what"), "load") == 0;
    json_t *rows = json_object_get(run, "rows"), *row, *pair;
    double most = json_number_value(json_array_get(load, 0));
    const char *name;
    if (json_number_value(json_array_get(load, 1)) > most) most = json_number_value(json_array_get(load, 1));
    /* Rows with probes beside their calls do not stand against those before and after. */
    expected += (load_run || !looks(run)) && drifts(json_object_get(run, "compute_gflops"));
    expected += drifts(json_object_get(run, "read_gbs"));
    if (copy) expected += drifts(copy);
    json_object_foreach((json_t *)hot, name, pair) expected += drifts(pair);
    expected += most > said_number(doc, "processors") + 0.5;
    expected += json_is_number(steal) && json_number_value(steal) > 1;
    json_array_foreach(rows, i, row)
        n_cold += json_object_get(row, "weights") && strcmp(said_text(row, "weights"), "cold") == 0 &&
                  strcmp(said_text(row, "stage"), "the block") != 0;
    json_array_foreach(rows, i, row) n_left += said_number(row, "disturbed_left") > 0;
    expected += n_left > 0;
    expected += n_cold && json_is_integer(cache) && said_number(doc, "buffer_bytes") < json_number_value(cache);
    assert_int_equal(n, expected);
    assert_true(json_is_boolean(json_object_get(run, "reliable")));
    assert_int_equal(json_is_true(json_object_get(run, "reliable")), n == 0);
}

/* What must be so in every row of every report. */
static void check_row(const json_t *run, const json_t *row)
{
    const double p50 = said_number(row, "p50_seconds"), best = said_number(run, "best_gflops");
    const double bytes = said_number(row, "bytes"), flops = said_number(row, "flops");
    const double disturbed = said_number(row, "disturbed"), left = said_number(row, "disturbed_left");
    double limit, compute;
    assert_true(best >= better(json_object_get(run, "compute_gflops")));
    assert_true(disturbed >= left && left >= 0 && left <= said_number(row, "repeats"));
    assert_true(left == 0 || 2 * left > said_number(row, "repeats"));
    if (!looks(run)) assert_true(disturbed == 0 && left == 0);
    assert_true(said_number(row, "best_seconds") <= p50);
    assert_true(p50 <= said_number(row, "p99_seconds"));
    assert_true(said_number(row, "outliers") < said_number(row, "repeats"));
    if (p50 > 0) {
        assert_float_equal(said_number(row, "gb_per_s") * p50, bytes * 1e-9, 1e-9 * (bytes + 1));
        assert_float_equal(said_number(row, "gflop_per_s") * p50, flops * 1e-9, 1e-9 * (flops + 1));
    }
    if (!json_object_get(row, "limit_gbs")) return;
    compute = said_number(row, "limit_gflops");
    assert_true(compute > 0 && compute <= best);
    if (!looks(run)) assert_float_equal(compute, better(json_object_get(run, "compute_gflops")), 0);
    limit = bytes / said_number(row, "limit_gbs") * 1e-9;
    if (flops / compute * 1e-9 > limit) limit = flops / compute * 1e-9;
    assert_float_equal(said_number(row, "roofline_seconds"), limit, 1e-9 * limit);
    if (p50 > 0)
        assert_float_equal(said_number(row, "share_of_roofline") * p50, limit, 1e-9 * limit);
}

/* Run `bench ARGS --json`, check each row and verdict; the document (json_decref it). */
static json_t *report(const char *args, size_t n_runs)
{
    cli_result r = run_cli("bench %s --json", args);
    json_error_t err;
    json_t *doc, *run, *row;
    size_t i, k;
    if (r.code != 0) print_error("bench %s: %d\n%s", args, r.code, r.err);
    assert_int_equal(r.code, 0);
    doc = json_loads(r.out, JSON_REJECT_DUPLICATES, &err);
    if (!doc) print_error("not JSON: %s\n%s\n", err.text, r.out);
    assert_non_null(doc);
    assert_int_equal(json_array_size(json_object_get(doc, "runs")), n_runs);
    json_array_foreach(json_object_get(doc, "runs"), i, run) {
        check_verdict(doc, run);
        json_array_foreach(json_object_get(run, "rows"), k, row) check_row(run, row);
        assert_true(k > 0);
    }
    assert_false(folder_has("dspark-bench")); /* what was made is gone */
    return doc;
}

static const json_t *run_at(const json_t *doc, size_t i)
{
    return json_array_get(json_object_get(doc, "runs"), i);
}

static const json_t *rows_of(const json_t *doc, size_t i)
{
    return json_object_get(run_at(doc, i), "rows");
}

/* ---- files ---- */

static size_t count(const char *text, char c)
{
    size_t n = 0;
    for (; *text; text++) n += *text == c;
    return n;
}

/* A header and n lines, each with as many fields as the header (names with commas are quoted). */
static void check_csv(const char *name, size_t n_lines)
{
    char *text = read_in_folder(name), *line;
    size_t fields = 0, n = 0;
    assert_non_null(text);
    assert_has(text, "what,over,stage,format,cache,isa,threads,tokens,");
    assert_has(text, ",repeats,outliers,disturbed,disturbed_left,best_s,");
    assert_has(text, ",limit_gb_per_s,limit_gflop_per_s,compute_probe_gflop_per_s,");
    for (line = strtok(text, "\n"); line; line = strtok(NULL, "\n"), n++) {
        char *quote = strchr(line, '"');
        for (; quote && *++quote != '"';) if (*quote == ',') *quote = ';';
        if (n == 0) fields = count(line, ',');
        assert_int_equal(count(line, ','), fields);
        assert_null(strstr(line, "nan"));
        assert_null(strstr(line, "inf"));
    }
    assert_int_equal(n, 1 + n_lines);
    free(text);
}

/* Every element is closed, and every number is one. */
static void check_svg(const char *name, size_t n_panels)
{
    char *text = read_in_folder(name), *at;
    size_t depth = 0, titles = 0;
    assert_non_null(text);
    assert_memory_equal(text, "<svg ", 5);
    assert_has(text, "</svg>\n");
    assert_has(text, "prefers-color-scheme:dark");
    for (at = text; *at; at++) assert_true((*at >= ' ' && *at <= '~') || *at == '\n');
    for (at = strchr(text, '<'); at; at = strchr(at + 1, '<')) {
        const char *end = strchr(at, '>');
        assert_non_null(end);
        if (at[1] == '/') {
            assert_true(depth > 0);
            depth--;
        } else if (end[-1] != '/') {
            depth++;
        }
    }
    assert_int_equal(depth, 0);
    for (at = text; (at = strstr(at, "class=\"b\"")); at++) titles++;
    assert_int_equal(titles, n_panels);
    assert_null(strstr(text, "\"nan"));
    assert_null(strstr(text, " nan"));
    assert_null(strstr(text, "inf"));
    free(text);
}

/* Lines of a table must not end in spaces, and no number may have lost all its digits. */
static void check_text(const char *text)
{
    assert_null(strstr(text, " \n"));
    assert_null(strstr(text, " 0.0 "));
    assert_null(strstr(text, "1 threads"));
    assert_null(strstr(text, "nan"));
    assert_has(text, "\npositions");
    assert_has(text, "read of 1.0 MB (cold) ");
    assert_has(text, "roofline");
    assert_has(text, "GFLOP/s");
}

/* ---- the verdict ---- */

static void test_verdict(void **state)
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
        bench_row row = {.stage = "full", .limit = BENCH_BY_READ, .flops = 1};
        bench_run run = {.rows = &row, .n_rows = 1};
        bench_report r = {.n_processors = 2, .buffer_bytes = 1000000};
        bench_verdict v;
        memcpy(run.compute_gflops, cases[i].compute, sizeof run.compute_gflops);
        memcpy(run.read_gbs, cases[i].read, sizeof run.read_gbs);
        run.n_hot = cases[i].hot[0] > 0;
        snprintf(run.hot[0].name, sizeof run.hot[0].name, "full");
        memcpy(run.hot[0].gbs, cases[i].hot, sizeof run.hot[0].gbs);
        memcpy(run.load, cases[i].load, sizeof run.load);
        run.steal_percent = cases[i].steal;
        r.cache_bytes = cases[i].cache;
        bench_judge(&r, &run, &v);
        if (v.n_reasons != cases[i].n_reasons) print_error("case %zu: %s\n", i, v.reasons[0]);
        assert_int_equal(v.n_reasons, cases[i].n_reasons);
        assert_has(v.reasons[0], cases[i].says);
        row.limit = BENCH_BY_HOT;
        bench_judge(&r, &run, &v); /* who reads from the cache needs no large buffer */
        assert_int_equal(v.n_reasons, cases[i].n_reasons - (cases[i].cache > 1000000));
    }
}

/* Too many disturbed repeats are a reason, of the row that has the most of them; and who was probed beside each
 * call does not stand against the arithmetic before and after. */
static void test_verdict_on_disturbed(void **state)
{
    bench_row rows[] = {
        {.stage = "onepass", .tokens = 8, .limit = BENCH_BY_READ, .flops = 1, .watched = 1, .n_repeats = 9,
         .n_disturbed = 4},
        {.stage = "onepass", .tokens = 64, .limit = BENCH_BY_READ, .flops = 1, .watched = 1, .n_repeats = 7,
         .n_disturbed = 12, .n_left = 5},
        {.stage = "full", .limit = BENCH_BY_SUM, .n_repeats = 10, .n_disturbed = 17, .n_left = 7},
    };
    bench_run run = {.rows = rows, .n_rows = 1, .n_threads = 2, .compute_gflops = {100, 50}, .read_gbs = {1, 1}};
    const bench_report r = {.n_processors = 2};
    bench_verdict v;
    (void)state;
    bench_judge(&r, &run, &v);
    assert_int_equal(v.n_reasons, 0);
    run.n_rows = 3;
    bench_judge(&r, &run, &v);
    assert_int_equal(v.n_reasons, 1);
    assert_string_equal(v.reasons[0], "processors shared a core or were busy elsewhere in 5 of 7 repeats of onepass at "
                                      "64 positions (arithmetic under 85% of the best)");
    run.n_threads = 1;
    rows[1].n_left = 4;
    bench_judge(&r, &run, &v);
    assert_int_equal(v.n_reasons, 1);
    assert_has(v.reasons[0], "the processor was shared in 7 of 10 repeats of full (");
    rows[1].n_left = rows[1].n_repeats = 10; /* a stage, and the block that it is a part of */
    rows[2].n_left = 10;
    bench_judge(&r, &run, &v);
    assert_has(v.reasons[0], "in 10 of 10 repeats of full (");
    rows[0].watched = 0; /* more threads than processors, say */
    bench_judge(&r, &run, &v);
    assert_int_equal(v.n_reasons, 2);
    assert_has(v.reasons[0], "compute 100");
}

/* ---- points of disturbed rows ---- */

static char *draw(int hollow)
{
    static chart_panel panel;
    FILE *f;
    memset(&panel, 0, sizeof panel);
    panel.x_title = panel.y_title = "";
    panel.hollow_name = "disturbed";
    chart_add_point(chart_find_series(&panel, "a"), 3, 1, 0, 0);
    chart_add_point(chart_find_series(&panel, "a"), 2, 1, 0, hollow); /* goes before the other */
    chart_add_point(chart_find_series(&panel, "b"), 2, 1, 0, 0);
    f = fopen(in_folder("chart.svg"), "w");
    assert_non_null(f);
    chart_write(f, "", "", &panel, 1);
    assert_int_equal(fclose(f), 0);
    check_svg("chart.svg", 1);
    return read_in_folder("chart.svg");
}

static void test_hollow_points(void **state)
{
    char *text = draw(0), *line;
    (void)state;
    assert_null(strstr(text, "class=\"o "));
    assert_null(strstr(text, ">disturbed<"));
    free(text);
    text = draw(1);
    assert_has(text, ">disturbed<");
    assert_null(strstr(text, "class=\"o s1\""));
    line = strstr(text, "<path class=\"p s0\""); /* its points follow */
    assert_non_null(line);
    assert_has(line, "class=\"o s0\"");
    assert_true(strstr(line, "class=\"o s0\"") < strstr(line, "class=\"f0\""));
    free(text);
}

/* ---- context ---- */

/* Rows of one size, by stage: bytes add up, ratios are those of the medians, and each hot row is held
 * against a limit that the document names. */
static void check_stages(const json_t *run, size_t n_stages, int cold)
{
    static const char *const names[] = {"onepass", "per-layer", "full", "taps->states",
                                        "taps->cache onepass", "taps->cache full"};
    const json_t *rows = json_object_get(run, "rows"), *hot = json_object_get(run, "hot_read_gbs"), *row[6];
    size_t s;
    assert_int_equal(json_array_size(rows), n_stages);
    assert_int_equal(json_object_size(hot), cold ? 0 : n_stages);
    for (s = 0; s < n_stages; s++) {
        row[s] = json_array_get(rows, s);
        assert_string_equal(said_text(row[s], "stage"), names[s]);
        assert_string_equal(said_text(row[s], "weights"), cold ? "cold" : "hot");
        assert_true(said_number(row[s], "limit_gbs") > 0);
        if (!cold)
            assert_float_equal(said_number(row[s], "limit_gbs"), better(json_object_get(hot, names[s])), 0);
        assert_true(said_number(row[s], "p50_seconds") > 0);
        if (s == 3) {
            assert_null(json_object_get(row[s], "ratio_to_onepass"));
        } else {
            double ratio = said_number(row[s], "p50_seconds") / said_number(row[s < 3 ? 0 : 4], "p50_seconds");
            assert_float_equal(said_number(row[s], "ratio_to_onepass"), ratio, 1e-9 * ratio);
        }
    }
    assert_true(said_number(row[2], "bytes") > said_number(row[1], "bytes"));
    if (n_stages < 6) return;
    for (s = 4; s < 6; s++) /* the states between are neither read nor written in memory */
        assert_float_equal(said_number(row[s], "flops"),
                           said_number(row[3], "flops") + said_number(row[s == 4 ? 0 : 2], "flops"), 0);
    assert_true(said_number(row[4], "bytes") > said_number(row[3], "bytes"));
    assert_true(said_number(row[5], "bytes") > said_number(row[4], "bytes"));
}

static void test_context(void **state)
{
    cli_result r = run_cli("bench --preset tiny --tokens 4,1 --repeat 3 --buffer 1M --threads 2 "
                           "--csv b.csv --svg b.svg");
    json_t *doc;
    (void)state;
    assert_int_equal(r.code, 0);
    check_text(r.out);
    assert_false(folder_has("dspark-bench")); /* the made checkpoint is gone */
    check_csv("b.csv", 2 * 6);
    check_svg("b.svg", 2);
    doc = report("tiny --tokens 2 --repeat 3 --buffer 1M --hot --no-states --threads 1", 1);
    check_stages(run_at(doc, 0), 3, 0);
    json_decref(doc);
    doc = report("tiny --tokens 2 --repeat 3 --buffer 16M --threads 1", 1);
    check_stages(run_at(doc, 0), 6, 1);
    json_decref(doc);
    r = run_cli("bench tiny --tokens 2 --repeat 2 --buffer 16M --threads 1 --hot");
    assert_int_equal(r.code, 0);
    assert_has(r.out, ", 1 thread of ");
    assert_has(r.out, "(hot taps->cache full) ");
    doc = report("tiny --tokens 2 --repeat 3 --buffer 1M --path full --no-states --threads 1", 1);
    assert_int_equal(json_array_size(rows_of(doc, 0)), 1);
    json_decref(doc);
    r = run_cli("bench tiny --tokens 1 --repeat 3 --buffer 1M --csv missing/b.csv");
    assert_int_equal(r.code, 5);
    assert_has(r.err, "missing/b.csv");
}

/* Numbers of threads and instruction sets are measured in turn, each with probes of its own. */
static void test_runs(void **state)
{
    json_t *doc = report("tiny --tokens 2 --repeat 1 --buffer 1M --threads 2,1 "
                         "--isa ref,auto --path onepass --no-states", 4);
    size_t i;
    (void)state;
    for (i = 0; i < 4; i++) {
        const json_t *run = run_at(doc, i);
        assert_int_equal(said_number(run, "threads"), i % 2 ? 1 : 2);
        assert_string_equal(said_text(run, "isa"), i < 2 ? "ref" : dspark_isa_name(dspark_isa_best()));
    }
    json_decref(doc);
}

/* Formats side by side: ratios are of this run's medians, bytes are what each one packs into. */
static void check_formats(const json_t *doc, const char *const *formats, size_t n, int plain)
{
    const json_t *rows = rows_of(doc, 0), *row;
    double weights[3] = {0}, sum = 0;
    size_t i;
    assert_int_equal(json_array_size(rows), n);
    json_array_foreach(rows, i, row) {
        double p50 = said_number(row, "p50_seconds"), bytes = said_number(row, "bytes");
        assert_string_equal(said_text(row, "stage"), "onepass");
        assert_string_equal(said_text(row, "format"), formats[i]);
        assert_null(json_object_get(row, "ratio_to_onepass"));
        weights[i] = said_number(row, "weight_bytes");
        sum += weights[i];
        assert_true(weights[i] > 0);
        /* tiny: two tokens in of 64 and out of 5 x 24 values */
        assert_float_equal(bytes - weights[i], 2 * (64 + 5 * 24) * 2, 0);
        assert_float_equal(said_number(row, "flops"), 2.0 * 2 * 5 * 24 * 64, 0);
        if (plain < 0) {
            assert_null(json_object_get(row, "bf16_over_format"));
            assert_null(json_object_get(row, "of_byte_ratio"));
        } else {
            const json_t *base = json_array_get(rows, (size_t)plain);
            double all = said_number(base, "weight_bytes");
            assert_float_equal(said_number(row, "bf16_over_format") * p50, said_number(base, "p50_seconds"),
                               1e-9 * p50);
            assert_float_equal(said_number(row, "of_byte_ratio") * all,
                               said_number(row, "bf16_over_format") * weights[i], 1e-9 * all);
        }
    }
    assert_true(sum < said_number(run_at(doc, 0), "resident_bytes"));
    if (plain >= 0)
        for (i = 0; i < n; i++) assert_true((int)i == plain || weights[i] < weights[plain]);
}

static void test_formats(void **state)
{
    double dense;
    static const char *const three[] = {"fp8-channel", "bf16", "mxfp8"};
    static const char *const two[] = {"fp8-channel", "mxfp8"};
#define OPTIONS "--tokens 2 --repeat 3 --buffer 1M --threads 2"
    cli_result r;
    json_t *doc;
    (void)state;
    r = run_cli("bench --preset tiny --formats fp8-channel,mxfp8 " OPTIONS " --csv f.csv --svg f.svg");
    assert_int_equal(r.code, 0);
    check_text(r.out);
    assert_false(folder_has("dspark-bench"));
    check_csv("f.csv", 2);
    check_svg("f.svg", 2);
    doc = report("--preset tiny --formats fp8-channel,mxfp8 --hot " OPTIONS, 1);
    assert_int_equal(json_object_size(json_object_get(run_at(doc, 0), "hot_read_gbs")), 2);
    check_formats(doc, two, 2, -1);
    json_decref(doc);
    doc = report("tiny --formats fp8-channel,bf16,mxfp8 " OPTIONS, 1);
    check_formats(doc, three, 3, 1);
    json_decref(doc);
    r = run_cli("bench tiny --formats fp8-channel,bf16 " OPTIONS);
    assert_int_equal(r.code, 0);
    assert_has(r.out, "vs bf16");
    r = run_cli("bench tiny --formats bf16,int4 " OPTIONS); /* 128 weights do not go into 64 */
    assert_int_not_equal(r.code, 0);
    assert_has(r.err, "128");
    assert_false(folder_has("dspark-bench"));
    r = run_cli("bench missing --formats bf16,int8 " OPTIONS);
    assert_int_equal(r.code, 3);
    assert_has(r.err, "missing");
    r = run_cli("quantize tiny tiny-int8 --format int8");
    assert_int_equal(r.code, 0);
    doc = report("tiny --path onepass --no-states " OPTIONS, 1); /* a checkpoint counts the bytes that it has */
    dense = said_number(json_array_get(rows_of(doc, 0), 0), "bytes");
    json_decref(doc);
    doc = report("tiny-int8 --path onepass --no-states " OPTIONS, 1);
    assert_true(said_number(json_array_get(rows_of(doc, 0), 0), "bytes") < 0.75 * dense);
    json_decref(doc);
    doc = report("tiny-int8 --formats fp8-channel,bf16,mxfp8 " OPTIONS, 1); /* bf16 is the way back */
    check_formats(doc, three, 3, 1);
    json_decref(doc);
}

/* ---- drafts ---- */

static void test_draft(void **state)
{
    cli_result r = run_cli("bench tiny --what draft --contexts 10 --repeat 2 --buffer 1M --threads 1 "
                           "--csv d.csv --svg d.svg");
    json_t *doc, *row;
    size_t i, n = 0;
    double seconds = 0, bytes = 0, roofline = 0;
    (void)state;
    assert_int_equal(r.code, 0);
    check_text(r.out);
    check_csv("d.csv", 15);
    check_svg("d.svg", 1);
    doc = report("--preset tiny --what draft --contexts 0,70 --sequences 1,3 --repeat 1 --buffer 1M --threads 2 "
                 "--cache-dtype bf16,fp8_e4m3", 1);
    assert_int_equal(json_array_size(rows_of(doc, 0)), 2 * 2 * 2 * 15);
    json_array_foreach((json_t *)rows_of(doc, 0), i, row) {
        const size_t block = i / 15;
        assert_int_equal(said_number(row, "context"), block / 2 % 2 ? 70 : 0);
        assert_int_equal(said_number(row, "sequences"), block % 2 ? 3 : 1);
        assert_int_equal(said_number(row, "tokens"), block % 2 ? 21 : 7);
        assert_string_equal(said_text(row, "cache"), block < 4 ? "bf16" : "fp8_e4m3");
        if (strcmp(said_text(row, "stage"), "the block") != 0) {
            seconds += said_number(row, "p50_seconds");
            bytes += said_number(row, "bytes");
            if (json_object_get(row, "roofline_seconds")) roofline += said_number(row, "roofline_seconds");
            if (strcmp(said_text(row, "stage"), "attention") == 0) /* tiny: 5 layers, entries of 24 values */
                assert_float_equal(said_number(row, "bytes"),
                                   5.0 * 24 * (block < 4 ? 2 : 1) * (block / 2 % 2 ? 70 : 0) * (block % 2 ? 3 : 1), 0);
            continue;
        }
        n++; /* the whole is what its stages are */
        assert_true(seconds <= said_number(row, "p50_seconds") * 1.000001);
        assert_float_equal(bytes, said_number(row, "bytes"), 0);
        assert_float_equal(roofline, said_number(row, "roofline_seconds"), 1e-9 * roofline);
        seconds = bytes = roofline = 0;
    }
    assert_int_equal(n, 8);
    json_decref(doc);
    doc = report("tiny --what draft --contexts 10 --repeat 1 --buffer 16M --hot --threads 1", 1);
    assert_int_equal(json_object_size(json_object_get(run_at(doc, 0), "hot_read_gbs")), 1);
    json_decref(doc);
    doc = report("tiny --what draft --formats bf16,fp8-channel --contexts 10 --repeat 1 --buffer 1M --threads 1", 2);
    for (i = 0; i < 2; i++) assert_string_equal(said_text(run_at(doc, i), "format"), i ? "fp8-channel" : "bf16");
    assert_true(said_number(json_array_get(rows_of(doc, 1), 7), "weight_bytes") <
                said_number(json_array_get(rows_of(doc, 0), 7), "weight_bytes"));
    json_decref(doc);
    r = run_cli("bench tiny --what draft --contexts 2000000 --repeat 1 --buffer 1M");
    assert_int_equal(r.code, 2);
    assert_has(r.err, "2000000");
    r = run_cli("bench tiny --what attention --contexts 10 --cache-dtype fp8_ds_mla --repeat 1 --buffer 1M");
    assert_int_equal(r.code, 4);
    assert_has(r.err, "fp8_ds_mla");
    r = run_cli("bench missing --what draft --repeat 1 --buffer 1M");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "missing");
}

static void test_linear_and_attention(void **state)
{
    static const char *const names[] = {"context_proj", "context_kv", "context_proj", "context_kv", "q_a, kv_a",
                                        "q_b",
                                        "absorb W_UK", "W_UV", "o", "gate, up", "down", "LM head", "Markov head"};
    json_t *doc = report("tiny --what linear --tokens 1,3 --repeat 1 --buffer 1M --threads 1 "
                         "--csv l.csv --svg l.svg", 1);
    size_t i;
    (void)state;
    assert_int_equal(json_array_size(rows_of(doc, 0)), 13);
    for (i = 0; i < 13; i++) {
        const json_t *row = json_array_get(rows_of(doc, 0), i);
        assert_string_equal(said_text(row, "stage"), names[i]);
        assert_int_equal(said_number(row, "tokens"), i < 2 ? 1 : i < 4 ? 3 : 7);
        assert_true(said_number(row, "weight_bytes") > 0);
    }
    json_decref(doc);
    check_csv("l.csv", 13);
    check_svg("l.svg", 1);
    doc = report("tiny --what attention --contexts 16,64 --cache-dtype bf16,fp8_e5m2 --repeat 1 --buffer 1M "
                 "--threads 1 --csv a.csv --svg a.svg", 1);
    assert_int_equal(json_array_size(rows_of(doc, 0)), 4);
    /* 5 layers x 4 heads x 7 rows x (64 + 7) entries x (24 + 16) values, two operations each */
    assert_float_equal(said_number(json_array_get(rows_of(doc, 0), 1), "flops"), 2.0 * 5 * 4 * 7 * 71 * 40, 0);
    json_decref(doc);
    check_csv("a.csv", 4);
    check_svg("a.svg", 2);
}

/* ---- load and growth ---- */

static void test_load(void **state)
{
    static const char *const names[] = {"headers", "inspect", "pack context", "first call", "tenth call", "pack all"};
    json_t *doc = report("tiny --what load --tokens 3 --repeat 2 --buffer 1M --threads 2 --csv o.csv --svg o.svg",
                         1), *row;
    const json_t *run = run_at(doc, 0);
    size_t i;
    (void)state;
    assert_int_equal(json_array_size(rows_of(doc, 0)), 6);
    json_array_foreach((json_t *)rows_of(doc, 0), i, row) {
        assert_string_equal(said_text(row, "stage"), names[i]);
        assert_int_equal(said_number(row, "repeats"), 2);
    }
    row = json_array_get(rows_of(doc, 0), 2);
    assert_float_equal(said_number(row, "limit_gbs"), better(json_object_get(run, "copy_gbs")), 0);
    assert_true(said_number(row, "bytes") < said_number(json_array_get(rows_of(doc, 0), 5), "bytes"));
    assert_float_equal(said_number(json_array_get(rows_of(doc, 0), 5), "bytes"), said_number(run, "resident_bytes"), 0);
    json_decref(doc);
    check_csv("o.csv", 6);
    check_svg("o.svg", 1);
    doc = report("tiny --what load --formats bf16,fp8-channel,nvfp4 --repeat 1 --buffer 1M --threads 1", 3);
    for (i = 0; i < 3; i++) {
        static const char *const formats[] = {"bf16", "fp8-channel", "nvfp4"};
        run = run_at(doc, i);
        assert_string_equal(said_text(run, "format"), formats[i]);
        assert_int_equal(json_array_size(rows_of(doc, i)), 6);
        if (i)
            assert_true(said_number(run, "resident_bytes") < said_number(run_at(doc, i - 1), "resident_bytes"));
        row = json_array_get(rows_of(doc, i), 2);
        assert_float_equal(said_number(row, "of_fresh_copy"),
                           said_number(row, "bytes") / better(json_object_get(run, "fresh_copy_gbs")) * 1e-9 /
                               said_number(row, "p50_seconds"), 1e-6);
    }
    json_decref(doc);
    doc = report("--preset tiny --what load --repeat 1 --buffer 1M --threads 1", 1); /* made: the context part */
    assert_int_equal(json_array_size(rows_of(doc, 0)), 5);
    json_decref(doc);
}

static void test_load_prepacked(void **state)
{
    static const char *const names[] = {"headers", "inspect", "pack context", "first call", "tenth call",
                                        "map context", "first call", "tenth call", "pack all"};
    json_t *doc, *row;
    cli_result r = run_cli("pack tiny tiny.pack --parts context");
    size_t i;
    (void)state;
    assert_int_equal(r.code, 0);
    r = run_cli("pack tiny tiny.pack --check"); /* the parts are the file's own */
    assert_int_equal(r.code, 0);
    assert_non_null(strstr(r.out, "context, "));
    doc = report("tiny --what load --prepacked tiny.pack --repeat 1 --buffer 1M --threads 1", 1);
    assert_int_equal(json_array_size(rows_of(doc, 0)), 9);
    json_array_foreach((json_t *)rows_of(doc, 0), i, row) assert_string_equal(said_text(row, "stage"), names[i]);
    json_decref(doc);
    r = run_cli("bench tiny --what load --prepacked missing.pack --repeat 1 --buffer 1M");
    assert_int_equal(r.code, 3);
    assert_non_null(strstr(r.err, "missing.pack"));
    r = run_cli("bench --preset tiny --what load --prepacked tiny.pack --repeat 1 --buffer 1M");
    assert_int_equal(r.code, 2);
    r = run_cli("bench tiny --what context --prepacked tiny.pack --repeat 1 --buffer 1M");
    assert_int_equal(r.code, 2);
}

static void test_growth(void **state)
{
    json_t *doc = report("--preset tiny --what growth --tokens 1,2,4 --contexts 16,32 --sequences 1,2 --repeat 1 "
                         "--buffer 1M --threads 1,2 --csv g.csv --svg g.svg", 2 * (1 + 1 + 5 + 1)), *run;
    static const char *const parts[] = {"tokens", "contexts", "layers", "layers", "layers", "layers", "layers",
                                        "sequences"};
    static const int layers[] = {5, 5, 1, 2, 3, 5, 8, 5};
    size_t i;
    (void)state;
    json_array_foreach(json_object_get(doc, "runs"), i, run) {
        assert_string_equal(said_text(run, "over"), parts[i / 2]);
        assert_int_equal(said_number(run, "threads"), 1 + i % 2);
        assert_int_equal(said_number(json_array_get(json_object_get(run, "rows"), 0), "layers"), layers[i / 2]);
    }
    json_decref(doc);
    check_csv("g.csv", 2 * (3 + 2 + 5 * 15 + 2 * 15));
    check_svg("g.svg", 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_verdict), cmocka_unit_test(test_verdict_on_disturbed),
        cmocka_unit_test(test_hollow_points), cmocka_unit_test(test_context), cmocka_unit_test(test_runs),
        cmocka_unit_test(test_formats), cmocka_unit_test(test_draft), cmocka_unit_test(test_linear_and_attention),
        cmocka_unit_test(test_load), cmocka_unit_test(test_load_prepacked), cmocka_unit_test(test_growth),
    };
    return cmocka_run_group_tests(tests, make_tiny, remove_folder);
}
