/* Outputs that cannot be: every command, one exit code for one kind of failure. What lies at the path
 * already and must stay is the caller's mistake (2); no folder, no right, no room is the system's (5). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/cli_said.h"
#include "support/tmpdir.h"

#define TARGET DSPARK_TEST_DATA "/golden-draft/target-64x97"
#define EVAL "eval tiny --data data --target " TARGET
#define BENCH "bench tiny --tokens 1 --repeat 1 --buffer 1M --threads 1"

/* Every output of every command; %s is its path. */
static const struct {
    const char *run;
    int folder; /* the output is one */
} outputs[] = {
    {"synth %s --preset tiny", 1},
    {"synth %s --preset tiny --format int8", 1},
    {"synth %s --preset tiny --format int3", 1},
    {"synth --dump %s --for tiny --tokens 2", 0},
    {"context tiny --taps data/d.safetensors --out %s", 0},
    {"context tiny --taps data/d.safetensors --states-out %s", 0},
    {"quantize tiny %s --format int8", 1},
    {"pack tiny %s --parts context", 0},
    {EVAL " --html %s", 0},
    {EVAL " --resume %s", 0},
    {EVAL " --calibration-out %s.json", 0},
    {BENCH " --csv %s", 0},
    {BENCH " --svg %s", 0},
};
#define N_OUTPUTS (sizeof outputs / sizeof *outputs)

static int make_inputs(void **state)
{
    (void)state;
    if (run_cli("synth tiny --preset tiny").code || mkdir(in_folder("data"), 0777)) return 1;
    return run_cli("synth --dump data/d.safetensors --for tiny --tokens 20").code;
}

static void expect(size_t i, const char *path, int code, const char *part)
{
    char args[600];
    const char *at = strstr(outputs[i].run, "%s");
    cli_result r;
    snprintf(args, sizeof args, "%.*s%s%s", (int)(at - outputs[i].run), outputs[i].run, path, at + 2);
    r = run_cli_into("/dev/null", args); /* where a report has room */
    if (r.code != code) print_error("dspark %s: %d\n%s", args, r.code, r.err);
    assert_int_equal(r.code, code);
    assert_has(r.err, part);
    assert_has(r.err, path); /* it is named */
}

static void test_no_folder(void **state)
{
    size_t i;
    (void)state;
    for (i = 0; i < N_OUTPUTS; i++) expect(i, "no/such/x", 5, "No such file or directory");
    assert_false(folder_has("no"));
}

static void test_no_right(void **state)
{
    size_t i;
    (void)state;
    if (geteuid() == 0) skip(); /* may write everywhere */
    assert_int_equal(mkdir(in_folder("shut"), 0500), 0);
    for (i = 0; i < N_OUTPUTS; i++) expect(i, "shut/x", 5, "Permission denied");
}

/* Something else than the output's kind lies there. */
static void test_taken(void **state)
{
    size_t i;
    (void)state;
    assert_int_equal(mkdir(in_folder("taken"), 0700), 0);
    assert_int_equal(mkdir(in_folder("taken.json"), 0700), 0);
    assert_int_equal(mkfifo(in_folder("pipe"), 0600), 0);
    assert_int_equal(mkfifo(in_folder("pipe.json"), 0600), 0);
    tmpdir_write(in_folder("file"), "x", 1);
    for (i = 0; i < N_OUTPUTS; i++) {
        if (outputs[i].folder) {
            expect(i, "file", 2, "");
            expect(i, "tiny", 2, ""); /* a checkpoint already */
        } else {
            expect(i, "taken", 2, "is a directory");
        }
        expect(i, "pipe", 2, "");
    }
}

/* A disk that is full, as a limit on sizes says it too. */
static void test_no_room(void **state)
{
    const struct rlimit most = {90, RLIM_INFINITY};
    struct rlimit old;
    size_t i;
    (void)state;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    for (i = 0; i < N_OUTPUTS; i++) {
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &most), 0);
        expect(i, "full", 5, "");
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        if (strstr(outputs[i].run, "--resume")) unlink(in_folder("full"));
        assert_false(folder_has("full"));
    }
}

/* Room for one of two outputs: neither is there. */
static void test_room_for_one(void **state)
{
    const struct rlimit most = {8192, RLIM_INFINITY};
    struct rlimit old;
    cli_result r;
    (void)state;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &most), 0);
    assert_int_equal(run_cli("context tiny --taps data/d.safetensors --states-out one.st").code, 0);
    r = run_cli("context tiny --taps data/d.safetensors --states-out two.st --out too-large.st");
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(r.code, 5);
    assert_has(r.err, "too-large.st");
    assert_true(folder_has("one.st"));
    assert_false(folder_has("two.st"));
    assert_false(folder_has("too-large.st"));
}

/* A temporary folder that cannot be made is said of its own path, not of the checkpoint. */
static void test_no_temporary_folder(void **state)
{
    const cli_result r = run_program("/usr/bin/env", "TMPDIR=nowhere " DSPARK_CLI " " BENCH " --formats int8");
    (void)state;
    assert_int_equal(r.code, 5);
    assert_memory_equal(r.err, "dspark: nowhere/dspark-bench-", 29);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_folder),
        cmocka_unit_test(test_no_right),
        cmocka_unit_test(test_taken),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_room_for_one),
        cmocka_unit_test(test_no_temporary_folder),
    };
    return cmocka_run_group_tests(tests, make_inputs, remove_folder);
}
