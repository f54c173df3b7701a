/* dspark draft and eval: what they print, that it does not depend on threads, jobs, levels or on what else
 * is asked for, resuming, and a named error for what does not fit. Figures are checked on records that are
 * counted here from the drafts themselves. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>
#include <jansson.h>

#include "dspark/dspark.h"
#include "support/cli_said.h"

#define N_ROWS 60
#define BLOCK 7
#define TARGET DSPARK_TEST_DATA "/golden-draft/target-64x97"

static int make_inputs(void **state)
{
    char path[800];
    (void)state;
    if (run_cli("synth tiny --preset tiny").code) return 1;
    snprintf(path, sizeof path, "%s/data", cli_folder());
    if (mkdir(path, 0777) != 0) return 1;
    if (run_cli("synth --dump data/a.safetensors --for tiny --tokens %d --seed 1", N_ROWS).code) return 1;
    if (run_cli("synth --dump data/b.safetensors --for tiny --tokens 30 --seed 2").code) return 1;
    return run_cli("synth --dump data/short.safetensors --for tiny --tokens 5 --seed 3").code;
}

/* ---- draft ---- */

static void test_draft_json(void **state)
{
    cli_result r = run_cli("draft tiny --taps data/a.safetensors --target " TARGET
                           " --anchor-position 1 --anchor-position 40 --anchor-position 0 --json");
    json_t *doc = said_json(&r), *all = json_object_get(doc, "drafts"), *again, *one;
    const int positions[3] = {1, 40, 0};
    size_t i, k;
    (void)state;
    assert_int_equal(r.code, 0);
    assert_int_equal(json_array_size(all), 3);
    for (i = 0; i < 3; i++) {
        json_t *d = json_array_get(all, i), *tokens = json_object_get(d, "tokens");
        assert_int_equal(json_integer_value(json_object_get(d, "anchor_position")), positions[i]);
        assert_true(json_is_integer(json_object_get(d, "anchor")));
        assert_int_equal(json_array_size(tokens), BLOCK);
        assert_int_equal(json_array_size(json_object_get(d, "confidence")), BLOCK);
        for (k = 0; k < BLOCK; k++) {
            json_int_t id = json_integer_value(json_array_get(tokens, k));
            double c = json_number_value(json_array_get(json_object_get(d, "confidence"), k));
            assert_true(id >= 0 && id < 97);
            assert_true(c > 0 && c < 1);
        }
        /* alone, on one thread, by plain C: the same */
        r = run_cli("draft tiny --taps data/a.safetensors --target " TARGET
                    " --anchor-position %d --threads 1 --isa ref --json", positions[i]);
        again = said_json(&r);
        one = json_array_get(json_object_get(again, "drafts"), 0);
        assert_true(json_equal(one, d));
        json_decref(again);
    }
    json_decref(doc);
}

static void test_draft_options(void **state)
{
    cli_result r = run_cli("draft tiny --taps data/a.safetensors --target " TARGET " --n-draft 3 --json");
    json_t *doc = said_json(&r), *d = json_array_get(json_object_get(doc, "drafts"), 0), *full, *sampled;
    size_t k;
    (void)state;
    assert_int_equal(json_integer_value(json_object_get(d, "anchor_position")), N_ROWS - 1);
    assert_int_equal(json_array_size(json_object_get(d, "tokens")), 3);
    r = run_cli("draft tiny --taps data/a.safetensors --target " TARGET " --json");
    full = said_json(&r);
    for (k = 0; k < 3; k++) /* B34 */
        assert_true(json_equal(json_array_get(json_object_get(d, "tokens"), k),
                               json_array_get(json_object_get(json_array_get(
                                   json_object_get(full, "drafts"), 0), "tokens"), k)));
    json_decref(doc);
    r = run_cli("draft tiny --taps data/a.safetensors --target " TARGET
                " --temperature 5 --seed 4 --json");
    sampled = said_json(&r);
    assert_false(json_equal(sampled, full));
    r = run_cli("draft tiny --taps data/a.safetensors --target " TARGET
                " --temperature 5 --seed 4 --threads 1 --json");
    doc = said_json(&r);
    assert_true(json_equal(sampled, doc));
    json_decref(doc);
    json_decref(sampled);
    json_decref(full);
    r = run_cli("draft tiny --taps data/a.safetensors --target " TARGET);
    assert_int_equal(r.code, 0);
    assert_has(r.out, "position");
}

static void test_draft_refusals(void **state)
{
    cli_result r;
    (void)state;
    r = run_cli("draft tiny --taps data/a.safetensors");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "lm_head");
    r = run_cli("draft tiny --taps data/a.safetensors --target nowhere");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "nowhere");
    r = run_cli("draft tiny --target " TARGET);
    assert_int_equal(r.code, 2);
    assert_has(r.err, "--taps");
    r = run_cli("draft tiny --taps data/a.safetensors --target " TARGET " --anchor-position 60");
    assert_int_equal(r.code, 2);
    assert_has(r.err, "0 to 59");
    r = run_cli("draft tiny --taps data/a.safetensors --target " TARGET " --n-draft 8");
    assert_int_equal(r.code, 2);
    r = run_cli("draft tiny --taps data/a.safetensors --target " TARGET " --top-k 3");
    assert_int_equal(r.code, 2);
    assert_has(r.err, "--temperature");
    r = run_cli("draft tiny --taps data/a.safetensors --target " DSPARK_TEST_DATA
                "/golden-draft/target-50x97");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "50");
    assert_has(r.err, "64");
}

/* ---- eval ---- */

#define EVAL "eval tiny --data data --target " TARGET

/* Accepted drafts, counted from `draft` at every anchor of a dump. */
static void count_by_hand(const char *dump, int n_rows, uint64_t *anchors, uint64_t *accepted)
{
    char args[1024], path[800];
    dspark_checkpoint *file = NULL;
    const dspark_tensor *ids;
    int row, k;
    snprintf(path, sizeof path, "%s/%s", cli_folder(), dump);
    assert_int_equal(dspark_checkpoint_open(&file, path, NULL), DSPARK_OK);
    ids = dspark_checkpoint_find(file, "token_ids");
    for (row = 1; row + BLOCK < n_rows; row += 10) { /* ten anchors a run */
        size_t i, used = (size_t)snprintf(args, sizeof args, "draft tiny --taps %s --target %s --json", dump,
                                          TARGET);
        cli_result r;
        json_t *doc, *all;
        for (k = row; k < row + 10 && k + BLOCK < n_rows; k++)
            used += (size_t)snprintf(args + used, sizeof args - used, " --anchor-position %d", k);
        r = run_cli("%s", args);
        doc = said_json(&r);
        all = json_object_get(doc, "drafts");
        for (i = 0; i < json_array_size(all); i++) {
            json_t *tokens = json_object_get(json_array_get(all, i), "tokens");
            for (k = 0; k < BLOCK; k++) {
                int64_t text;
                memcpy(&text, (const char *)ids->data + 8 * ((size_t)row + i + 1 + (size_t)k), sizeof text);
                if (json_integer_value(json_array_get(tokens, (size_t)k)) != text) break;
                ++*accepted;
            }
            ++*anchors;
        }
        json_decref(doc);
    }
    dspark_checkpoint_close(file);
}

static void test_eval_counts(void **state)
{
    cli_result r = run_cli(EVAL " --json");
    json_t *doc = said_json(&r);
    uint64_t anchors = 0, accepted = 0;
    (void)state;
    assert_int_equal(r.code, 0);
    count_by_hand("data/a.safetensors", N_ROWS, &anchors, &accepted);
    count_by_hand("data/b.safetensors", 30, &anchors, &accepted);
    assert_int_equal((uint64_t)said_number(doc, "anchors"), anchors);
    assert_int_equal((uint64_t)said_number(doc, "dumps"), 2);
    assert_int_equal((uint64_t)said_number(doc, "dumps_too_short"), 1);
    print_message("  %llu accepted, eval says %.4f\n", (unsigned long long)accepted,
                  said_number(doc, "accepted_drafts") * (double)anchors);
    assert_true(fabs(said_number(doc, "accepted_drafts") * (double)anchors - (double)accepted) < 1e-6);
    assert_true(fabs(said_number(doc, "acceptance_length") - said_number(doc, "accepted_drafts") - 1) < 1e-4);
    assert_int_equal(json_array_size(json_object_get(doc, "positions")), BLOCK);
    assert_true(said_number(doc, "analytic_length_sampled") > 1);
    json_decref(doc);
}

/* Everything but times. */
static json_t *figures(const char *options)
{
    cli_result r = run_cli(EVAL " --json %s", options);
    json_t *doc = said_json(&r);
    assert_int_equal(r.code, 0);
    json_object_del(doc, "times");
    json_object_del(doc, "break_even_target_step_seconds");
    json_object_del(doc, "speedup_at_target_step");
    json_object_del(doc, "dumps_resumed");
    return doc;
}

static void test_eval_is_one_answer(void **state)
{
    const char *const ways[] = {"--threads 1 --isa ref", "--jobs 2", "--resume journal", "--resume journal"};
    json_t *base = figures("");
    size_t i;
    (void)state;
    for (i = 0; i < 4; i++) {
        json_t *other = figures(ways[i]);
        if (!json_equal(base, other)) fail_msg("%s gives other figures", ways[i]);
        json_decref(other);
    }
    json_decref(base);
}

static void test_eval_journal(void **state)
{
    cli_result r = run_cli(EVAL " --stride 3 --resume j3 --json");
    json_t *doc = said_json(&r);
    char path[800];
    FILE *f;
    (void)state;
    assert_int_equal((int)said_number(doc, "dumps_resumed"), 0);
    json_decref(doc);
    r = run_cli(EVAL " --stride 3 --resume j3 --json");
    doc = said_json(&r);
    assert_int_equal((int)said_number(doc, "dumps_resumed"), 2);
    json_decref(doc);
    r = run_cli(EVAL " --stride 2 --resume j3");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "another evaluation");
    snprintf(path, sizeof path, "%s/j3", cli_folder());
    f = fopen(path, "a"); /* a line that a crash cut off is written again */
    assert_non_null(f);
    fputs("{\"dump\": \"a.safe", f);
    fclose(f);
    r = run_cli(EVAL " --stride 3 --resume j3 --json");
    assert_int_equal(r.code, 0);
    f = fopen(path, "a"); /* one that is complete and broken is not ours */
    assert_non_null(f);
    fputs("{\"dump\": 3}\n", f);
    fclose(f);
    r = run_cli(EVAL " --stride 3 --resume j3");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "broken");
}

/* One changed digit of one figure: the file is refused, whichever line it is in. */
static void test_eval_journal_digest(void **state)
{
    static const char *const places[] = {"\"accepted\":[", "\"target_p\":[0.", "\"k\":"};
    char path[800];
    size_t i, n;
    (void)state;
    snprintf(path, sizeof path, "%s/jd", cli_folder());
    for (i = 0; i < 3; i++) {
        char *text, *at;
        FILE *f;
        cli_result r;
        remove(path);
        assert_int_equal(run_cli(EVAL " --stride 3 --resume jd").code, 0);
        text = read_whole_file(path, &n);
        assert_non_null(text);
        at = strstr(text, places[i]);
        assert_non_null(at);
        at += strlen(places[i]);
        *at = *at == '1' ? '0' : '1';
        f = fopen(path, "w");
        assert_non_null(f);
        assert_int_equal(fwrite(text, 1, n, f), n);
        fclose(f);
        free(text);
        r = run_cli(EVAL " --stride 3 --resume jd");
        assert_int_equal(r.code, 3);
        assert_has(r.err, i < 2 ? "line 2 is broken" : "another evaluation");
    }
}

/* A journal whose first line was cut off begins anew; a file of somebody else's without a newline, which
 * looks like one, stays as it is. */
static void test_eval_journal_cut_header(void **state)
{
    static const char *const texts[] = {"{\"dspark_eval\":\"k=", "{\"my\":\"only copy\"}"};
    char path[800];
    size_t i, n;
    (void)state;
    snprintf(path, sizeof path, "%s/jh", cli_folder());
    for (i = 0; i < 2; i++) {
        char *text;
        cli_result r;
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fputs(texts[i], f);
        fclose(f);
        r = run_cli(EVAL " --stride 3 --resume jh");
        assert_int_equal(r.code, i ? 3 : 0);
        if (!i) continue;
        assert_has(r.err, "another evaluation");
        text = read_whole_file(path, &n);
        assert_non_null(text);
        assert_int_equal(n, strlen(texts[i]));
        assert_memory_equal(text, texts[i], n);
        free(text);
    }
}

/* Figures that one anchor does not have are told as "-". */
static void test_eval_one_anchor(void **state)
{
    cli_result r;
    json_t *doc;
    char path[800];
    (void)state;
    snprintf(path, sizeof path, "%s/one", cli_folder());
    assert_int_equal(mkdir(path, 0777), 0);
    assert_int_equal(run_cli("synth --dump one/a.safetensors --for tiny --tokens 12 --seed 1").code, 0);
    r = run_cli("eval tiny --data one --target " TARGET " --stride 1000");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "standard error -\n");
    assert_has(r.out, "AUC -. ");
    assert_null(strstr(r.out, "nan"));
    r = run_cli("eval tiny --data one --target " TARGET " --stride 1000 --json");
    doc = said_json(&r);
    assert_true(json_is_null(json_object_get(doc, "accepted_drafts_stderr")));
    json_decref(doc);
}

/* What is wrong with the target's files is not said of the drafter, and a temperature that is none of
 * fp32 is the option's fault. */
static void test_errors_name_the_culprit(void **state)
{
    static const char *const runs[] = {
        "draft tiny --taps data/a.safetensors",
        "eval tiny --data data",
        "pack tiny packed",
        "quantize tiny quantised --format int8",
        "bench tiny --buffer 1M --what draft",
        "bench tiny --buffer 1M --what load",
    };
    char path[800];
    cli_result r;
    FILE *f;
    size_t n, command;
    char *text = read_whole_file(TARGET "/model.safetensors", &n);
    (void)state;
    assert_non_null(text);
    snprintf(path, sizeof path, "%s/cut", cli_folder());
    assert_int_equal(mkdir(path, 0777), 0);
    snprintf(path, sizeof path, "%s/cut/model.safetensors", cli_folder());
    f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n - 10, f), n - 10);
    fclose(f);
    free(text);
    for (command = 0; command < sizeof runs / sizeof *runs; command++) {
        const char *run = runs[command];
        r = run_cli("%s --target cut", run);
        assert_int_equal(r.code, 3);
        assert_has(r.err, "dspark: cut: model.safetensors: truncated");
        if (command > 1) continue;
        r = run_cli("%s --target " TARGET " --temperature 1e308", run);
        assert_int_equal(r.code, 2);
        assert_has(r.err, "--temperature: 1e+308 is not allowed");
    }
    r = run_cli("help eval");
    assert_has(r.out, "whose name must end in .json");
}

/* A file with the target's LM head is checked with that head; one of context KV says so. */
static void test_pack_check(void **state)
{
    static const char *const files[][2] = {{"all", "borrowed --target " TARGET}, {"context", "kv"}};
    cli_result r;
    size_t i;
    (void)state;
    assert_int_equal(run_cli("pack tiny borrowed --target " TARGET).code, 0);
    assert_int_equal(run_cli("pack tiny kv --parts context").code, 0);
    for (i = 0; i < 2; i++) {
        json_t *doc;
        r = run_cli("pack tiny %s --check --json", files[i][1]);
        if (r.code) print_error("%s\n", r.err);
        assert_int_equal(r.code, 0);
        doc = said_json(&r);
        assert_string_equal(said_text(doc, "parts"), files[i][0]);
        assert_true(json_is_true(json_object_get(doc, "checked")));
        json_decref(doc);
    }
    r = run_cli("pack tiny borrowed --target " TARGET " --check");
    assert_has(r.out, "borrowed: all, ");
    assert_has(r.out, "whole and made of tiny");
    r = run_cli("pack tiny borrowed --check");
    assert_int_equal(r.code, 3);
}

static void test_eval_journal_is_a_file(void **state)
{
    cli_result r = run_cli(EVAL " --stride 3 --resume /dev/full"); /* reads for ever */
    (void)state;
    assert_int_equal(r.code, 2);
    assert_has(r.err, "not a regular file");
}

/* No output takes an input's place, or another output's. */
static void test_eval_spares_its_inputs(void **state)
{
    static const char *const options[] = {
        "--html data/a.safetensors", "--html data/r.html", "--html tiny/model.safetensors",
        "--resume tiny", "--calibration-out tiny/c.json", "--html same --resume same",
    };
    cli_result r;
    size_t i;
    (void)state;
    for (i = 0; i < sizeof options / sizeof *options; i++) {
        r = run_cli(EVAL " --stride 3 %s", options[i]);
        if (r.code != 2) fail_msg("%s: exit code %d", options[i], r.code);
    }
    r = run_cli(EVAL " --stride 3 --json"); /* and they are whole */
    assert_int_equal(r.code, 0);
}

static void test_eval_files(void **state)
{
    cli_result r = run_cli(EVAL " --html r.html --calibration-out c.json --target-step-ms 5");
    char path[800], *text;
    dspark_calibration c;
    size_t n;
    (void)state;
    assert_int_equal(r.code, 0);
    assert_has(r.out, "acceptance length");
    snprintf(path, sizeof path, "%s/r.html", cli_folder());
    text = read_whole_file(path, &n);
    assert_non_null(text);
    assert_has(text, "</html>");
    assert_has(text, "<svg");
    assert_null(strstr(text, "http")); /* nothing from outside */
    free(text);
    snprintf(path, sizeof path, "%s/c.json", cli_folder());
    assert_int_equal(dspark_calibration_load(&c, path, NULL), DSPARK_OK);
    assert_int_equal(c.n, BLOCK);
}

static void test_eval_refusals(void **state)
{
    cli_result r = run_cli(EVAL " --min-context 100");
    (void)state;
    assert_int_equal(r.code, 1); /* B125 */
    assert_has(r.err, "nothing drafted");
    r = run_cli("eval tiny --target " TARGET);
    assert_int_equal(r.code, 2);
    r = run_cli("eval tiny --data tiny/nothing --target " TARGET);
    assert_int_equal(r.code, 3);
    r = run_cli(EVAL " --html nowhere/r.html");
    assert_int_equal(r.code, 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_draft_json), cmocka_unit_test(test_draft_options),
        cmocka_unit_test(test_draft_refusals), cmocka_unit_test(test_eval_counts),
        cmocka_unit_test(test_eval_is_one_answer), cmocka_unit_test(test_eval_journal),
        cmocka_unit_test(test_eval_journal_is_a_file),
        cmocka_unit_test(test_pack_check),
        cmocka_unit_test(test_eval_journal_digest),
        cmocka_unit_test(test_eval_journal_cut_header),
        cmocka_unit_test(test_eval_one_anchor),
        cmocka_unit_test(test_errors_name_the_culprit),
        cmocka_unit_test(test_eval_spares_its_inputs),
        cmocka_unit_test(test_eval_files), cmocka_unit_test(test_eval_refusals),
    };
    return cmocka_run_group_tests_name("cli_draft", tests, make_inputs, remove_folder);
}
