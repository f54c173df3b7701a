/* The command among hostile and unlucky users: outputs that would take an input's place, limits of
 * the system, closed descriptors, inputs that shrink, arguments that steer terminals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/cli_said.h"
#include "support/tmpdir.h"

#define BENCH "bench tiny --tokens 1 --repeat 1 --buffer 1M --threads 1 "

static int make_inputs(void **state)
{
    (void)state;
    if (run_cli("synth tiny --preset tiny").code) return 1;
    if (run_cli("synth shards --preset tiny --shard-size 64K").code) return 1;
    return run_cli("synth --dump dump.st --for tiny --tokens 20").code;
}

/* What surrounds a run that run_cli cannot arrange. */
typedef struct surroundings {
    int limit;      /* RLIMIT_..., -1 for none */
    rlim_t value;
    unsigned close; /* bit n: descriptor n */
    int ignore;     /* a signal, 0 for none */
} surroundings;

/* Run with whole arguments (spaces, any byte); ends with NULL. Its words are in the files "said"
 * and "told" of the folder; returns the exit code or -signal. */
static int run_in(surroundings s, const char *const *words)
{
    char *argv[24];
    int n = 0, status = 0;
    pid_t pid;
    argv[n++] = (char *)DSPARK_CLI;
    while (n < 23 && words[n - 1]) {
        argv[n] = (char *)words[n - 1];
        n++;
    }
    argv[n] = NULL;
    cli_folder();
    pid = fork();
    if (pid == 0) {
        struct rlimit limit = {s.value, s.value};
        int fd, out, err;
        if (chdir(cli_folder()) != 0) _exit(126);
        out = open("said", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        err = open("told", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        if (out < 0 || err < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) _exit(126);
        for (fd = 0; fd < 3; fd++)
            if (s.close & (1u << fd)) close(fd);
        if (s.ignore) signal(s.ignore, SIG_IGN);
        if (s.limit >= 0 && setrlimit((__rlimit_resource_t)s.limit, &limit) != 0) _exit(126);
        execv(DSPARK_CLI, argv);
        _exit(127);
    }
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static const surroundings usual = {-1, 0, 0, 0};

/* What was said on stdout or told on stderr; free it. */
static char *heard(const char *name)
{
    char *text = read_whole_file(in_folder(name), NULL);
    assert_non_null(text);
    return text;
}

/* No character of these lets a terminal do anything but show it or go to the next line. */
static void assert_harmless(const char *text)
{
    const unsigned char *s = (const unsigned char *)text;
    json_t *valid = json_string(text); /* refuses what is not UTF-8 */
    if (!valid) print_error("not UTF-8: %s\n", text);
    assert_non_null(valid);
    json_decref(valid);
    for (; *s; s++) {
        int steers = (*s < 0x20 && *s != '\n') || *s == 0x7f || (*s == 0xc2 && s[1] < 0xa0);
        if (steers) print_error("0x%02x in: %s\n", *s, text);
        assert_false(steers);
    }
}

/* ---- outputs and inputs ---- */

/* Every option that names an output, pointed at every file of the input. */
static void test_output_onto_input(void **state)
{
    static const char *const runs[] = {
        "context tiny --taps dump.st --out %s",
        "context tiny/model.safetensors --taps dump.st --out %s",
        "synth --dump %s --for tiny --tokens 2",
        BENCH "--csv %s",
        BENCH "--svg %s",
    };
    static const char *const targets[] = {"tiny/model.safetensors", "tiny/../tiny/config.json"};
    char *before[2], args[400];
    size_t i, k, n[2], m;
    (void)state;
    for (k = 0; k < 2; k++) {
        before[k] = read_whole_file(in_folder(targets[k]), &n[k]);
        assert_non_null(before[k]);
    }
    for (i = 0; i < sizeof runs / sizeof *runs; i++) {
        for (k = 0; k < 2; k++) {
            char *after;
            snprintf(args, sizeof args, runs[i], targets[k]);
            assert_has(run_cli_to(2, "%s", args).err, targets[k]);
            after = read_whole_file(in_folder(targets[k]), &m);
            assert_non_null(after);
            assert_int_equal(m, n[k]);
            assert_memory_equal(after, before[k], m);
            free(after);
        }
    }
    for (k = 0; k < 2; k++) free(before[k]);
    assert_int_equal(run_cli("context tiny --taps dump.st --out dump.st").code, 2);
    assert_int_equal(run_cli("synth --dump tiny/more.safetensors --for tiny --tokens 2").code, 2);
    assert_int_equal(run_cli(BENCH "--csv one.txt --svg ./one.txt").code, 2);
    assert_int_equal(run_cli("inspect tiny").code, 0);
}

/* A pipe or a device stays what it is, also for one who may replace it. */
static void test_special_output(void **state)
{
    static const char *const runs[] = {
        "context tiny --taps dump.st --out pipe",
        "synth --dump pipe --for tiny --tokens 2",
        BENCH "--csv pipe",
        BENCH "--svg pipe",
    };
    struct stat info;
    size_t i;
    (void)state;
    assert_int_equal(mkfifo(in_folder("pipe"), 0600), 0);
    for (i = 0; i < sizeof runs / sizeof *runs; i++) {
        assert_has(run_cli_to(2, "%s", runs[i]).err, "not a regular file");
        assert_int_equal(stat(in_folder("pipe"), &info), 0);
        assert_true(S_ISFIFO(info.st_mode));
    }
    assert_int_equal(unlink(in_folder("pipe")), 0);
    assert_false(folder_has(".dspark-"));
}

/* The output's fault has the output's exit code and the output's name. */
static void test_output_refused(void **state)
{
    cli_result r = run_cli("synth --dump missing/d.st --for tiny --tokens 2");
    char name[300], args[400];
    (void)state;
    assert_int_equal(r.code, 5);
    assert_has(r.err, "dspark: missing/d.st: ");
    r = run_cli("synth --dump d.st --for missing --tokens 2");
    assert_int_equal(r.code, 3);
    r = run_cli("context tiny --taps /dev/null");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "/dev/null");
    assert_int_equal(mkdir(in_folder("m"), 0700), 0);
    assert_int_equal(symlink("/dev/null", in_folder("m/model.safetensors")), 0);
    assert_int_equal(symlink("../tiny/config.json", in_folder("m/config.json")), 0);
    r = run_cli("context m --taps dump.st");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "dspark: m: model.safetensors: ");
    r = run_cli("bench --preset tiny --tokens 1 --csv missing/b.csv");
    assert_int_equal(r.code, 5);
    assert_null(strstr(r.err, "making")); /* before anything was made or measured */
    /* A name as long as names may be has no room for a suffix. */
    memset(name, 'n', 255);
    name[255] = 0;
    snprintf(args, sizeof args, BENCH "--csv %s", name);
    r = run_cli("%s", args);
    assert_int_equal(r.code, 0);
    assert_int_equal(unlink(in_folder(name)), 0);
}

/* ---- limits of the system ---- */

/* Descriptors that ran out are no fault of the checkpoint. */
static void test_few_descriptors(void **state)
{
    static const char *const runs[][9] = {
        {"inspect", "shards", "--json", NULL},
        {"inspect", "tiny", NULL},
        {"context", "shards", "--taps", "dump.st", "--threads", "1", NULL},
        {"synth", "--dump", "few.st", "--for", "tiny", "--tokens", "2", NULL},
        {"synth", "few", "--preset", "tiny", NULL},
    };
    surroundings s = usual;
    size_t i, n_failed = 0;
    (void)state;
    s.limit = RLIMIT_NOFILE;
    for (i = 0; i < sizeof runs / sizeof *runs; i++) {
        for (s.value = 4; s.value < 16; s.value++) {
            int code = run_in(s, runs[i]);
            char *told = heard("told");
            if (code == 127 && strstr(told, "shared")) { /* not even the program could be loaded */
                free(told);
                continue;
            }
            if (code != 0 && code != 5)
                print_error("%s, %d descriptors: %d\n%s", runs[i][0], (int)s.value, code, told);
            assert_true(code == 0 || code == 5);
            if (code == 5) assert_has(told, "Too many open files");
            n_failed += code == 5;
            free(told);
            assert_false(folder_has(".dspark-"));
            if (code == 0 && i == 3) unlink(in_folder("few.st"));
            if (code == 0 && i == 4) break;
        }
    }
    assert_true(n_failed > 5);
}

/* A file that may not grow: an error, not a death that leaves a part behind. */
static void test_file_size_limit(void **state)
{
    static const char *const runs[][12] = {
        {"context", "tiny", "--taps", "dump.st", "--out", "limited.st", NULL},
        {"synth", "--dump", "limited.st", "--for", "tiny", "--tokens", "9999", NULL},
        {"synth", "limited", "--preset", "tiny", NULL},
        {"bench", "tiny", "--tokens", "1", "--repeat", "1", "--buffer", "1M", "--csv",
         "limited.csv", NULL},
    };
    surroundings s = usual;
    size_t i;
    (void)state;
    s.limit = RLIMIT_FSIZE;
    s.value = 1500; /* room for the report */
    for (i = 0; i < sizeof runs / sizeof *runs; i++) {
        int code;
        if (i == 3) s.value = 200;
        code = run_in(s, runs[i]);
        if (code != 5) print_error("%s: %d\n", runs[i][0], code);
        assert_int_equal(code, 5);
        assert_false(folder_has("limited"));
        assert_false(folder_has(".dspark-"));
    }
}

/* ---- descriptors and signals ---- */

static void test_closed_descriptors(void **state)
{
    static const char *const good[] = {"context", "tiny", "--taps", "dump.st", "--out", "shut.st",
                                       NULL};
    static const char *const bad[] = {"inspect", "nowhere", "--json", NULL};
    surroundings s = usual;
    (void)state;
    assert_int_equal(run_cli("context tiny --taps dump.st --out open.st").code, 0);
    for (s.close = 1; s.close < 8; s.close++) {
        int code = run_in(s, good);
        if (code != (s.close & 2 ? 5 : 0)) print_error("closed %u: %d\n", s.close, code);
        assert_int_equal(code, s.close & 2 ? 5 : 0);
        assert_true(same_files("open.st", "shut.st"));
        assert_int_equal(unlink(in_folder("shut.st")), 0);
        assert_int_equal(run_in(s, bad), s.close & 2 ? 5 : 3);
    }
}

/* Descriptor 2 is given to no file of ours: what is told meanwhile would land in it. */
static void test_closed_stderr_is_filled(void **state)
{
    static const char *const words[] = {"synth", "--dump", "long.st", "--for", "tiny", "--tokens",
                                        "50000000", NULL};
    char *argv[9], link[64], to[600];
    ssize_t n = -1;
    pid_t pid;
    int i, status;
    (void)state;
    argv[0] = (char *)DSPARK_CLI;
    for (i = 0; i < 8; i++) argv[i + 1] = (char *)words[i];
    pid = fork();
    if (pid == 0) {
        if (chdir(cli_folder()) != 0) _exit(126);
        close(0);
        close(1);
        close(2);
        execv(DSPARK_CLI, argv);
        _exit(127);
    }
    for (i = 0; i < 5000 && !folder_has(".dspark-"); i++) usleep(1000);
    snprintf(link, sizeof link, "/proc/%ld/fd/2", (long)pid);
    n = readlink(link, to, sizeof to - 1);
    kill(pid, SIGHUP); /* a lost terminal cleans up as Ctrl-C does */
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 130);
    assert_false(folder_has("long.st"));
    assert_false(folder_has(".dspark-"));
    if (n < 0) skip(); /* no /proc */
    to[n] = 0;
    assert_string_equal(to, "/dev/null");
}

/* What kill -9 leaves is in nobody's way. */
static void test_leftovers(void **state)
{
    (void)state;
    assert_int_equal(mkdir(in_folder("stale"), 0700), 0);
    assert_int_equal(mkdir(in_folder("stale/.synth-AbCdEf"), 0700), 0);
    assert_int_equal(symlink("nowhere", in_folder("stale/.synth-AbCdEf/model.safetensors")), 0);
    assert_int_equal(run_cli("synth stale --preset tiny").code, 0);
    assert_int_equal(run_cli("inspect stale --deep").code, 0);
    assert_true(same_files("stale/model.safetensors", "tiny/model.safetensors"));
}

/* ---- inputs that change ---- */

/* The dump is cut while it is read: exit code 3 and a sentence, whenever it happens. */
static void test_dump_shrinks(void **state)
{
    char *argv[] = {(char *)DSPARK_CLI, "context", "tiny", "--taps", "big.st", "--batch", "1",
                    "--out", "cut.st", "--threads", "1", NULL};
    char *told;
    pid_t pid;
    int i, status;
    (void)state;
    assert_int_equal(run_cli("synth --dump big.st --for tiny --tokens 60000").code, 0);
    pid = fork();
    if (pid == 0) {
        int err;
        if (chdir(cli_folder()) != 0) _exit(126);
        err = open("told", O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (err < 0 || dup2(err, 2) < 0) _exit(126);
        execv(DSPARK_CLI, argv);
        _exit(127);
    }
    /* The output is made when the dump has been checked and before its rows are read. */
    for (i = 0; i < 30000 && !folder_has(".dspark-"); i++) usleep(1000);
    assert_true(folder_has(".dspark-"));
    assert_int_equal(truncate(in_folder("big.st"), 500000), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    told = heard("told");
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 3) print_error("%d\n%s", status, told);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 3);
    assert_has(told, "became shorter");
    assert_false(folder_has("cut.st"));
    free(told);
    unlink(in_folder("big.st"));
}

/* ---- arguments ---- */

/* Escape sequences, one-character ones in UTF-8 too, and bytes that are not UTF-8 at all. */
static void test_arguments_are_shown_harmless(void **state)
{
    static const char *const evil[] = {
        "\x1b[31mred", "line\nfeed\r", "\xc2\x9b" "31m", "\x9b" "31m", "\xff\xfe", "\xe2\x82",
        "\xed\xa0\x80", "\xc0\xaf", "\xf4\x90\x80\x80", "\xc3\xbc ber \xe6\xbc\xa2", "it's",
    };
    size_t i, k;
    (void)state;
    for (i = 0; i < sizeof evil / sizeof *evil; i++) {
        char inside[64], option[64];
        const char *x = evil[i];
        const char *const runs[][8] = {
            {x, NULL},
            {"help", x, NULL},
            {"inspect", x, NULL},
            {"inspect", x, "--json", NULL},
            {"inspect", "tiny", x, NULL},
            {"inspect", "tiny", option, NULL},
            {"context", x, "--taps", "dump.st", NULL},
            {"context", "tiny", "--taps", x, NULL},
            {"context", "tiny", "--taps", "dump.st", "--out", inside, NULL},
            {"context", "tiny", "--taps", "dump.st", "--batch", x, NULL},
            {"compare", "tiny", "--isa", x, NULL},
            {"synth", "evil", "--preset", x, NULL},
            {"synth", "evil", "--preset", "tiny", "--set", x, NULL},
            {"synth", inside, "--preset", "tiny", NULL},
            {"bench", "tiny", "--csv", inside, NULL},
        };
        snprintf(inside, sizeof inside, "missing/%s", x);
        snprintf(option, sizeof option, "--%s", x);
        for (k = 0; k < sizeof runs / sizeof *runs; k++) {
            int code = run_in(usual, runs[k]);
            char *said = heard("said"), *told = heard("told");
            assert_in_range(code, 1, 5);
            assert_harmless(said);
            assert_harmless(told);
            if (k == 3) {
                json_t *doc = json_loads(said, JSON_REJECT_DUPLICATES, NULL);
                assert_non_null(doc);
                json_decref(doc);
            }
            free(said);
            free(told);
        }
    }
}

/* A folder of any name works, is JSON in JSON, and the next command is one word to a shell. */
static void test_odd_names(void **state)
{
    static const char *const names[] = {"sp ace", "q'uote", "\xc2\x9b" "31m", "\xff" "f\xc3\xbc"};
    static const char *const words[] = {"'sp ace'", "'q'\\''uote'", "'?31m'", "'?f\xc3\xbc'"};
    static const char *const paths[] = {"sp ace", "q'uote", "\xc2\x9b" "31m", "?f\xc3\xbc"};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof names / sizeof *names; i++) {
        const char *const make[] = {"synth", names[i], "--preset", "tiny", "--json", NULL};
        const char *const look[] = {"inspect", names[i], NULL};
        char *said, part[100];
        json_t *doc;
        assert_int_equal(run_in(usual, make), 0);
        said = heard("said");
        assert_harmless(said);
        doc = json_loads(said, JSON_REJECT_DUPLICATES, NULL);
        assert_non_null(doc);
        assert_string_equal(json_string_value(json_object_get(doc, "path")), paths[i]);
        json_decref(doc);
        free(said);
        assert_int_equal(run_in(usual, look), 0);
        said = heard("said");
        assert_harmless(said);
        snprintf(part, sizeof part, "next: dspark context %s --taps", words[i]);
        assert_has(said, part);
        free(said);
    }
}

/* Sizes near 2^64 must not wrap on the way to an allocation. */
static void test_huge_sizes(void **state)
{
    static const char *const sizes[] = {"18446744073709551615", "18446744073707454465",
                                        "9223372036854775808", "16777215T", "2T"};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        cli_result r = run_cli("bench tiny --tokens 1 --repeat 1 --buffer %s", sizes[i]);
        if (r.code != 2) print_error("%s: %d\n%s", sizes[i], r.code, r.err);
        assert_int_equal(r.code, 2);
        assert_has(r.err, sizes[i]);
    }
}

/* A dump that is written to while its rows are read gives no output; the script waits for the temporary file,
 * which is made before the first row is read. */
static void test_changed_while_read(void **state)
{
    static const char script[] =
        "$1 context tiny --taps growing.st --out mixed.st --isa ref --batch 1 --threads 1 &\n"
        "until ls -a | grep -q '^\\.dspark-'; do :; done\n"
        "printf x >>growing.st\n"
        "wait $!\n";
    cli_result r;
    (void)state;
    assert_int_equal(run_cli("synth --dump growing.st --for tiny --tokens 20000").code, 0);
    tmpdir_write(in_folder("grow.sh"), script, sizeof script - 1);
    r = run_program("/bin/sh", "grow.sh " DSPARK_CLI);
    assert_int_equal(r.code, 3);
    assert_has(r.err, "growing.st: was written to while it was read");
    assert_false(folder_has("mixed.st"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_output_onto_input),
        cmocka_unit_test(test_special_output),
        cmocka_unit_test(test_output_refused),
        cmocka_unit_test(test_few_descriptors),
        cmocka_unit_test(test_file_size_limit),
        cmocka_unit_test(test_closed_descriptors),
        cmocka_unit_test(test_closed_stderr_is_filled),
        cmocka_unit_test(test_leftovers),
        cmocka_unit_test(test_dump_shrinks),
        cmocka_unit_test(test_arguments_are_shown_harmless),
        cmocka_unit_test(test_odd_names),
        cmocka_unit_test(test_huge_sizes), cmocka_unit_test(test_changed_while_read),
    };
    return cmocka_run_group_tests(tests, make_inputs, remove_folder);
}
