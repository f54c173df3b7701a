/* Checkpoints appear whole or not at all, wherever the run that makes one is killed, and whatever another
 * run into the same folder does meanwhile: the command is stopped at each system call that changes a
 * folder. Then it is killed there and run again, or another one runs first. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dspark/dspark.h"
#include "support/cli_said.h"
#include "support/tmpdir.h"

/* ---- a run that stops ---- */

#define NEVER ((size_t)-1)
#define NO_TRACING 99

/* What PTRACE_GET_SYSCALL_INFO fills in at the entry of a call (Linux 5.3); C libraries name it
 * differently. */
#define GET_SYSCALL_INFO 0x420e
typedef struct call_info {
    uint8_t op, zero[3];
    uint32_t arch;
    uint64_t ip, sp, number, args[6], more[2];
} call_info;

static pid_t start_traced(const char *args)
{
    char text[512], *argv[32], *word;
    int n = 0;
    pid_t pid;
    snprintf(text, sizeof text, "%s", args);
    argv[n++] = (char *)DSPARK_CLI;
    for (word = strtok(text, " "); word; word = strtok(NULL, " ")) argv[n++] = word;
    argv[n] = NULL;
    cli_folder();
    pid = fork();
    if (pid == 0) {
        int null = open("/dev/null", O_WRONLY);
        if (null < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0 || chdir(cli_folder()) != 0) _exit(126);
        setenv("TMPDIR", cli_folder(), 1);
        setenv("ASAN_OPTIONS", "detect_leaks=0", 1); /* the leak checker would trace too */
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(NO_TRACING);
        raise(SIGSTOP);
        execv(DSPARK_CLI, argv);
        _exit(127);
    }
    return pid;
}

static int changes_a_folder(const call_info *c)
{
    switch (c->number) {
#if defined(SYS_mkdir)
    case SYS_mkdir:
    case SYS_rename:
    case SYS_link:
    case SYS_unlink:
    case SYS_rmdir:
#endif
#if defined(SYS_renameat)
    case SYS_renameat:
#endif
    case SYS_mkdirat:
    case SYS_renameat2:
    case SYS_linkat:
    case SYS_unlinkat:
    case SYS_flock: return 1;
    case SYS_openat: return (c->args[2] & O_CREAT) != 0;
    default: return 0;
    }
}

/* ---- what it syncs ---- */

static struct {
    dev_t device;
    ino_t file;
} synced[256];
static size_t n_synced;

static void note_sync(pid_t pid, const call_info *c)
{
    char name[64];
    struct stat info;
    if (c->number != SYS_fsync && c->number != SYS_fdatasync) return;
    snprintf(name, sizeof name, "/proc/%ld/fd/%d", (long)pid, (int)c->args[0]);
    if (stat(name, &info) != 0 || n_synced == sizeof synced / sizeof *synced) return;
    synced[n_synced].device = info.st_dev;
    synced[n_synced++].file = info.st_ino;
}

static int was_synced(const char *path)
{
    struct stat info;
    size_t i;
    assert_int_equal(stat(path, &info), 0);
    for (i = 0; i < n_synced; i++)
        if (synced[i].device == info.st_dev && synced[i].file == info.st_ino) return 1;
    return 0;
}

/* Let it run to its n-th call that changes a folder, which is not done yet. 0: it ended before, with *code. */
static int run_to(pid_t pid, size_t n, int *code)
{
    size_t seen = 0;
    int status, signal_number = 0;
    assert_true(waitpid(pid, &status, 0) == pid);
    for (;;) {
        if (WIFEXITED(status) || WIFSIGNALED(status)) {
            *code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
            return 0;
        }
        signal_number = WSTOPSIG(status);
        if (signal_number == (SIGTRAP | 0x80)) {
            call_info info = {0};
            signal_number = 0;
            assert_true(ptrace(GET_SYSCALL_INFO, pid, (void *)sizeof info, &info) > 0);
            if (info.op == 1) note_sync(pid, &info);
            if (info.op == 1 && changes_a_folder(&info) && ++seen == n) return 1;
        } else if (signal_number == SIGSTOP) { /* its own, at the start */
            signal_number = 0;
            ptrace(PTRACE_SETOPTIONS, pid, NULL, (void *)(PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL));
        } else if (signal_number == SIGTRAP) {
            signal_number = 0; /* the exec */
        }
        ptrace(PTRACE_SYSCALL, pid, NULL, (void *)(intptr_t)signal_number);
        assert_true(waitpid(pid, &status, 0) == pid);
    }
}

static int run_on(pid_t pid)
{
    int status;
    ptrace(PTRACE_DETACH, pid, NULL, NULL);
    assert_true(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void kill_it(pid_t pid)
{
    int status;
    kill(pid, SIGKILL);
    assert_true(waitpid(pid, &status, 0) == pid);
    assert_true(WIFSIGNALED(status));
}

/* Killed at its n-th such call. 0: it ended before, well. */
static int kill_at(pid_t pid, size_t n)
{
    int code = 0;
    if (run_to(pid, n, &code)) {
        kill_it(pid);
        return 1;
    }
    if (code == NO_TRACING) skip();
    assert_int_equal(code, 0);
    return 0;
}

/* ---- what it left ---- */

static int exists(const char *path)
{
    struct stat info;
    return lstat(path, &info) == 0;
}

/* The same names with the same bytes; hidden names count. */
static int is_like(const char *made, const char *wanted)
{
    char a[300], b[300];
    const struct dirent *e;
    DIR *d = opendir(in_folder(made));
    size_t n = 0;
    int same = 1;
    if (!d) return 0;
    while (same && (e = readdir(d)) != NULL) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        snprintf(a, sizeof a, "%s/%.100s", made, e->d_name);
        snprintf(b, sizeof b, "%s/%.100s", wanted, e->d_name);
        same = same_files(a, b);
        n++;
    }
    closedir(d);
    return same && n == tmpdir_count(in_folder(wanted));
}

/* Killed at each call, then run again: the same as one that nobody killed. */
static void kill_everywhere(const char *options)
{
    char args[256];
    size_t n, n_names;
    snprintf(args, sizeof args, options, "wanted");
    assert_int_equal(run_cli("%s", args).code, 0);
    n_names = tmpdir_count(cli_folder()) + 1;
    snprintf(args, sizeof args, options, "x");
    for (n = 1; kill_at(start_traced(args), n); n++) {
        const int whole = exists(in_folder("x/config.json")), code = run_cli("%s", args).code;
        if (code != (whole ? 2 : 0))
            fail_msg("killed at call %zu, whole %d: the next run ends with %d", n, whole, code);
        if (!is_like("x", "wanted")) fail_msg("killed at call %zu: not as it is to be", n);
        if (tmpdir_count(cli_folder()) != n_names) fail_msg("killed at call %zu: leftovers", n);
        tmpdir_remove(in_folder("x"));
    }
    assert_true(n > 15);
    assert_true(is_like("x", "wanted"));
    cli_cleanup();
}

static void test_killed_synth(void **state)
{
    (void)state;
    kill_everywhere("synth %s --preset tiny --shard-size 120K");
}

static void test_killed_quantize(void **state)
{
    (void)state;
    assert_int_equal(run_cli("synth plain --preset tiny --shard-size 120K").code, 0);
    kill_everywhere("quantize plain %s --format fp8 --threads 1");
}

static void test_killed_format(void **state)
{
    (void)state;
    kill_everywhere("synth %s --preset tiny --format int4-gidx");
}

/* A report: the next run leaves nothing of one that was killed. */
static void test_killed_report(void **state)
{
    static const char args[] = "bench plain --tokens 1 --repeat 1 --buffer 1M --threads 1 --path onepass --csv x";
    size_t n;
    (void)state;
    assert_int_equal(run_cli("synth plain --preset tiny").code, 0);
    for (n = 1; kill_at(start_traced(args), n); n++) {
        assert_int_equal(run_cli("%s", args).code, 0);
        assert_true(exists(in_folder("x")));
        if (tmpdir_count(cli_folder()) != 2) fail_msg("killed at call %zu: leftovers", n);
        assert_int_equal(remove(in_folder("x")), 0);
    }
    assert_true(n > 5);
}

/* Every file of what a run makes, the folder, and the one that names it; a report by its own name. */
static void test_synced(void **state)
{
    static const char *const runs[] = {
        "synth x --preset tiny --shard-size 120K",
        "synth x --preset tiny --format int3",
        "synth x --preset tiny --format fp8-deepseek",
        "synth x --preset tiny --format nvfp4-modelopt",
        "quantize plain x --format fp8 --threads 1",
        "synth --dump x --for plain --tokens 3",
        "bench plain --tokens 1 --repeat 1 --buffer 1M --threads 1 --path onepass --csv x",
    };
    size_t i;
    (void)state;
    assert_int_equal(run_cli("synth plain --preset tiny").code, 0);
    for (i = 0; i < sizeof runs / sizeof *runs; i++) {
        char path[1200];
        const struct dirent *e;
        DIR *d;
        n_synced = 0;
        assert_false(kill_at(start_traced(runs[i]), NEVER));
        if (!was_synced(in_folder("x"))) fail_msg("%s: x was not synced", runs[i]);
        if (!was_synced(cli_folder())) fail_msg("%s: the folder of x was not synced", runs[i]);
        d = opendir(in_folder("x"));
        while (d && (e = readdir(d)) != NULL) {
            snprintf(path, sizeof path, "x/%.100s", e->d_name);
            if (e->d_name[0] != '.' && !was_synced(in_folder(path)))
                fail_msg("%s: %s was not synced", runs[i], path);
        }
        if (d) closedir(d);
        tmpdir_remove(in_folder("x"));
    }
}

/* One run stopped at each call while another one comes and goes: one of both has the folder. */
static void test_two_runs(void **state)
{
    const char *first = "synth x --preset tiny --shard-size 120K --seed 1";
    size_t n, won[2] = {0, 0};
    (void)state;
    assert_int_equal(run_cli("synth one --preset tiny --shard-size 120K --seed 1").code, 0);
    assert_int_equal(run_cli("synth two --preset tiny --shard-size 200K --seed 2").code, 0);
    for (n = 1;; n++) {
        int one = 0, two;
        pid_t pid = start_traced(first);
        if (!run_to(pid, n, &one)) {
            if (one == NO_TRACING) skip();
            assert_int_equal(one, 0);
            break;
        }
        two = run_cli("synth x --preset tiny --shard-size 200K --seed 2").code;
        one = run_on(pid);
        if (!(one == 0 && two == 2) && !(one == 2 && two == 0))
            fail_msg("stopped at call %zu: %d, the other one %d", n, one, two);
        if (!is_like("x", one == 0 ? "one" : "two")) fail_msg("stopped at call %zu: mixed", n);
        if (tmpdir_count(cli_folder()) != 3) fail_msg("stopped at call %zu: leftovers", n);
        won[one != 0]++;
        tmpdir_remove(in_folder("x"));
    }
    assert_true(won[0] > 3 && won[1] > 3);
}

/* ---- a file system without hard links ---- */

static int no_links, foreign_at;
static char foreign_path[1100];

/* The library's calls come here. */
int linkat(int from, const char *name, int to, const char *other, int flags)
{
    if (!no_links) return (int)syscall(SYS_linkat, from, name, to, other, flags);
    if (no_links++ == foreign_at) {
        int fd = openat(to, other, O_WRONLY | O_CREAT | O_EXCL, 0600);
        snprintf(foreign_path, sizeof foreign_path, "%.1000s", other);
        if (fd >= 0) close(fd);
    }
    errno = EPERM;
    return -1;
}

static dspark_status synth_moved(const char *dir, dspark_error *err)
{
    dspark_synth_opts o;
    dspark_synth_opts_init(&o);
    o.preset = "tiny";
    o.shard_bytes = 120000;
    no_links = 1;
    foreign_at = 0;
    return dspark_synth_checkpoint(dir, &o, err);
}

/* A run of this process's code that stops like those of the command. */
static pid_t start_moving(const char *dir)
{
    pid_t pid = fork();
    if (pid == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(NO_TRACING);
        raise(SIGSTOP);
        _exit(synth_moved(dir, NULL) == DSPARK_OK ? 0 : 1);
    }
    return pid;
}

/* Killed at each call: what it had moved is taken back by the next run. */
static void test_killed_moving(void **state)
{
    size_t n;
    (void)state;
    cli_folder();
    assert_int_equal(synth_moved(in_folder("wanted"), NULL), DSPARK_OK);
    assert_true(tmpdir_count(in_folder("wanted")) > 3);
    for (n = 1; kill_at(start_moving(in_folder("x")), n); n++) {
        const int whole = exists(in_folder("x/config.json"));
        if (synth_moved(in_folder("x"), NULL) != (whole ? DSPARK_EINVAL : DSPARK_OK))
            fail_msg("killed at call %zu, whole %d: the next run ends otherwise", n, whole);
        if (!is_like("x", "wanted")) fail_msg("killed at call %zu: not as it is to be", n);
        tmpdir_remove(in_folder("x"));
    }
    assert_true(n > 20);
    assert_true(is_like("x", "wanted"));
    no_links = 0;
}

/* A file of a moved one's name that has been changed since, or is another one, stays. */
static void test_moved_and_changed(void **state)
{
    size_t n;
    int which;
    (void)state;
    cli_folder();
    for (which = 0; which < 2; which++) {
        char first[300] = "";
        for (n = 1; !*first; n++) { /* killed when the first one is in its place */
            const struct dirent *e;
            DIR *d;
            assert_true(kill_at(start_moving(in_folder("x")), n));
            d = opendir(in_folder("x"));
            while (d && (e = readdir(d)) != NULL)
                if (strstr(e->d_name, ".safetensors")) snprintf(first, sizeof first, "x/%.100s", e->d_name);
            if (d) closedir(d);
            if (!*first) tmpdir_remove(in_folder("x"));
        }
        if (which == 1) assert_int_equal(remove(in_folder(first)), 0);
        tmpdir_write(in_folder(first), "mine", 4);
        assert_int_equal(synth_moved(in_folder("x"), NULL), DSPARK_EINVAL);
        assert_true(exists(in_folder(first)));
        assert_int_equal(tmpdir_count(in_folder("x")), 1);
        tmpdir_remove(in_folder("x"));
    }
    no_links = 0;
}

static void test_no_links(void **state)
{
    const char *dir = tmpdir_make();
    char linked[1024], moved[1024];
    dspark_synth_opts o;
    dspark_error err;
    size_t n;
    (void)state;
    snprintf(linked, sizeof linked, "%s/linked", dir);
    snprintf(moved, sizeof moved, "%s/moved", dir);
    dspark_synth_opts_init(&o);
    o.preset = "tiny";
    o.shard_bytes = 120000;
    assert_int_equal(dspark_synth_checkpoint(linked, &o, &err), DSPARK_OK);
    n = tmpdir_count(linked);
    assert_true(n > 3);
    no_links = 1;
    assert_int_equal(dspark_synth_checkpoint(moved, &o, &err), DSPARK_OK);
    assert_int_equal(no_links, 1 + (int)n);
    assert_int_equal(tmpdir_count(moved), n);
    tmpdir_remove(moved);
    /* a file that comes in between is not replaced, and stays alone */
    for (foreign_at = 1; foreign_at <= (int)n; foreign_at++) {
        char path[1200];
        struct stat info;
        no_links = 1;
        assert_int_equal(dspark_synth_checkpoint(moved, &o, &err), DSPARK_EINVAL);
        assert_non_null(strstr(err.message, foreign_path));
        assert_int_equal(tmpdir_count(moved), 1);
        snprintf(path, sizeof path, "%s/%.100s", moved, foreign_path);
        assert_int_equal(stat(path, &info), 0);
        assert_int_equal(info.st_size, 0);
        tmpdir_remove(moved);
    }
    no_links = foreign_at = 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_killed_synth, remove_folder),
        cmocka_unit_test_teardown(test_killed_quantize, remove_folder),
        cmocka_unit_test_teardown(test_killed_format, remove_folder),
        cmocka_unit_test_teardown(test_killed_report, remove_folder),
        cmocka_unit_test_teardown(test_synced, remove_folder),
        cmocka_unit_test_teardown(test_two_runs, remove_folder),
        cmocka_unit_test_teardown(test_killed_moving, remove_folder),
        cmocka_unit_test_teardown(test_moved_and_changed, remove_folder),
        cmocka_unit_test(test_no_links),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
