/* What killed runs leave, and who removes it: hidden files beside an output, folders of unfinished
 * checkpoints. Held ones, and what only looks like one, are left alone. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dspark/dspark.h"
#include "support/cli_said.h"
#include "support/fixture.h"
#include "support/tmpdir.h"

static dspark_error err;

#define must(call) check((call), DSPARK_OK, &err)

static int exists(const char *path)
{
    struct stat info;
    return lstat(path, &info) == 0;
}

/* An open file that this process holds, as a living run does. */
static int held_file(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    return fd;
}

/* A folder as a run makes it; held is the descriptor of its lock file, or -1 for a dead run's. */
static int make_folder(const char *path, int with_lock, int hold)
{
    char name[1200];
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(name, sizeof name, "%s/model.safetensors", path);
    tmpdir_write(name, "x", 1);
    snprintf(name, sizeof name, "%s/.dspark-77-0.tmp", path);
    tmpdir_write(name, "x", 1);
    if (!with_lock) return -1;
    snprintf(name, sizeof name, "%s/.dspark-lock", path);
    if (hold) return held_file(name);
    tmpdir_write(name, "", 0);
    return -1;
}

/* ---- files ---- */

static void write_file(const char *path)
{
    const uint64_t shape[1] = {1};
    dspark_writer *w = NULL;
    must(dspark_writer_create(&w, path, &err));
    must(dspark_writer_declare(w, "t", DSPARK_U8, 1, shape, &err));
    must(dspark_writer_data(w, "x", 1, &err));
    must(dspark_writer_commit(w, &err));
}

static void test_files(void **state)
{
    static const char *const others[] = {".dspark-1-0.tmp.txt", ".dspark-x-0.tmp", ".dspark-1.tmp",
                                         ".dspark--1.tmp", "dspark-1-0.tmp", ".dspark-1-.tmp"};
    const char *dir = tmpdir_make();
    int held;
    size_t i;
    (void)state;
    tmpdir_write(tmpdir_path(dir, ".dspark-1-0.tmp"), "left", 4);
    tmpdir_write(tmpdir_path(dir, ".dspark-987654321-12.tmp"), "left", 4);
    for (i = 0; i < 6; i++) tmpdir_write(tmpdir_path(dir, others[i]), "mine", 4);
    assert_int_equal(mkdir(tmpdir_path(dir, ".dspark-2-0.tmp"), 0700), 0);
    assert_int_equal(symlink("dspark-1-0.tmp", tmpdir_path(dir, ".dspark-3-0.tmp")), 0);
    assert_int_equal(mkfifo(tmpdir_path(dir, ".dspark-4-0.tmp"), 0600), 0);
    held = held_file(tmpdir_path(dir, ".dspark-5-0.tmp"));
    write_file(tmpdir_path(dir, "out"));
    assert_false(exists(tmpdir_path(dir, ".dspark-1-0.tmp")));
    assert_false(exists(tmpdir_path(dir, ".dspark-987654321-12.tmp")));
    for (i = 0; i < 6; i++) assert_true(exists(tmpdir_path(dir, others[i])));
    for (i = 2; i < 6; i++) {
        char name[32];
        snprintf(name, sizeof name, ".dspark-%zu-0.tmp", i);
        assert_true(exists(tmpdir_path(dir, name)));
    }
    assert_int_equal(tmpdir_count(dir), 6 + 4 + 1);
    close(held); /* its run has ended */
    write_file(tmpdir_path(dir, "out"));
    assert_false(exists(tmpdir_path(dir, ".dspark-5-0.tmp")));
    assert_int_equal(tmpdir_count(dir), 6 + 3 + 1);
}

/* A file that is being written is held against the next one in its folder, also while it is renamed. */
static void test_living_file(void **state)
{
    const uint64_t shape[1] = {1};
    const char *dir = tmpdir_make();
    dspark_writer *w = NULL;
    (void)state;
    must(dspark_writer_create(&w, tmpdir_path(dir, "slow"), &err));
    must(dspark_writer_declare(w, "t", DSPARK_U8, 1, shape, &err));
    write_file(tmpdir_path(dir, "quick"));
    must(dspark_writer_data(w, "x", 1, &err));
    must(dspark_writer_commit(w, &err));
    assert_true(exists(tmpdir_path(dir, "slow")));
    assert_int_equal(tmpdir_count(dir), 2);
}

/* ---- folders of the library ---- */

static void synth(const char *dir, int (*progress)(void *, uint64_t, uint64_t))
{
    dspark_synth_opts o;
    dspark_synth_opts_init(&o);
    o.preset = "tiny";
    o.progress = progress;
    must(dspark_synth_checkpoint(dir, &o, &err));
}

static void quantize(const char *from, const char *to, int (*progress)(void *, uint64_t, uint64_t))
{
    dspark_quantize_opts o;
    dspark_quantize_opts_init(&o);
    o.format = DSPARK_FORMAT_NVFP4;
    o.n_threads = 1;
    o.progress = progress;
    must(dspark_quantize(from, to, &o, &err));
}

static void test_folders(void **state)
{
    const char *dir = tmpdir_make();
    char out[1024], name[1100];
    int held;
    (void)state;
    snprintf(out, sizeof out, "%s/out", dir);
    assert_int_equal(mkdir(out, 0700), 0);
    snprintf(name, sizeof name, "%s/elsewhere", dir);
    tmpdir_write(name, "mine", 4);
    make_folder(tmpdir_path(out, ".quantize-abcdef"), 1, 0);
    make_folder(tmpdir_path(out, ".synth-ABC123"), 1, 0);
    held = make_folder(tmpdir_path(out, ".quantize-living"), 1, 1);
    make_folder(tmpdir_path(out, ".quantize-nolock"), 0, 0);
    make_folder(tmpdir_path(out, ".quantize-longer1"), 1, 0);
    make_folder(tmpdir_path(out, ".quantize-others"), 1, 0);
    tmpdir_write(tmpdir_path(out, ".quantize-others/notes.txt"), "mine", 4);
    assert_int_equal(symlink("../elsewhere", tmpdir_path(out, ".quantize-others/config.json")), 0);
    assert_int_equal(symlink("../out", tmpdir_path(out, ".quantize-linked")), 0);
    assert_int_equal(mkdir(tmpdir_path(out, ".quantize-empty1"), 0700), 0); /* killed before the last step */
    synth(out, NULL);
    assert_false(exists(tmpdir_path(out, ".quantize-empty1")));
    assert_false(exists(tmpdir_path(out, ".quantize-abcdef")));
    assert_false(exists(tmpdir_path(out, ".synth-ABC123")));
    assert_true(exists(tmpdir_path(out, ".quantize-living/model.safetensors")));
    assert_true(exists(tmpdir_path(out, ".quantize-nolock/model.safetensors")));
    assert_true(exists(tmpdir_path(out, ".quantize-longer1/model.safetensors")));
    assert_true(exists(tmpdir_path(out, ".quantize-others/notes.txt")));
    assert_true(exists(tmpdir_path(out, ".quantize-linked")));
    assert_true(exists(name));
    assert_true(exists(tmpdir_path(out, "config.json")));
    close(held);
}

/* Killed while it published: what is in the target and in the stage is one file, and goes; as long as
 * there is no config.json. */
static void test_half_published(void **state)
{
    static const char shard[] = "model-00001-of-00009.safetensors";
    const char *dir = tmpdir_make();
    char out[1024], stage[1100];
    dspark_synth_opts o;
    int with_config;
    (void)state;
    snprintf(out, sizeof out, "%s/out", dir);
    snprintf(stage, sizeof stage, "%s/.synth-abcdef", out);
    dspark_synth_opts_init(&o);
    o.preset = "tiny";
    for (with_config = 0; with_config < 2; with_config++) {
        assert_int_equal(mkdir(out, 0700), 0);
        make_folder(stage, 1, 0);
        tmpdir_write(tmpdir_path(stage, "config.json"), "x", 1);
        tmpdir_write(tmpdir_path(stage, shard), "x", 1);
        assert_int_equal(link(tmpdir_path(stage, shard), tmpdir_path(out, shard)), 0);
        if (with_config) tmpdir_write(tmpdir_path(out, "config.json"), "x", 1);
        if (with_config)
            assert_int_equal(dspark_synth_checkpoint(out, &o, &err), DSPARK_EINVAL);
        else
            must(dspark_synth_checkpoint(out, &o, &err));
        assert_false(exists(stage));
        assert_int_equal(exists(tmpdir_path(out, shard)), with_config);
        assert_int_equal(tmpdir_count(out), 2);
        tmpdir_remove(out);
    }
    /* of the same name, but another file: somebody's */
    assert_int_equal(mkdir(out, 0700), 0);
    make_folder(stage, 1, 0);
    tmpdir_write(tmpdir_path(out, "model.safetensors"), "x", 1);
    assert_int_equal(dspark_synth_checkpoint(out, &o, &err), DSPARK_EINVAL);
    assert_false(exists(stage));
    assert_true(exists(tmpdir_path(out, "model.safetensors")));
}

static int die(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    (void)total;
    if (done > 0) kill(getpid(), SIGKILL);
    return 0;
}

static size_t count_stages(const char *dir)
{
    DIR *d = opendir(dir);
    const struct dirent *e;
    size_t n = 0;
    assert_non_null(d);
    while ((e = readdir(d)) != NULL)
        n += strncmp(e->d_name, ".quantize-", 10) == 0 || strncmp(e->d_name, ".synth-", 7) == 0;
    closedir(d);
    return n;
}

static void killed(int quantised, const char *from, const char *to)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        if (quantised)
            quantize(from, to, die);
        else
            synth(to, die);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static const char *inner_from, *inner_to;
static size_t n_seen;

/* Another run into the same folder, while the first one works. */
static int run_another(void *user, uint64_t done, uint64_t total)
{
    static int busy;
    (void)user;
    (void)total;
    if (busy || done == 0) return 0;
    busy = 1;
    if (count_stages(inner_to) == 1) {
        dspark_quantize_opts o;
        dspark_quantize_opts_init(&o);
        o.format = DSPARK_FORMAT_INT8;
        o.n_threads = 1;
        must(dspark_quantize(inner_from, inner_to, &o, &err));
        n_seen += count_stages(inner_to);
    }
    return 0;
}

static void test_killed(void **state)
{
    const char *dir = tmpdir_make();
    char tiny[1024], out[1024], two[1024];
    dspark_quantize_opts o;
    (void)state;
    snprintf(tiny, sizeof tiny, "%s/tiny", dir);
    snprintf(out, sizeof out, "%s/out", dir);
    snprintf(two, sizeof two, "%s/two", dir);
    synth(tiny, NULL);
    killed(1, tiny, out);
    killed(0, tiny, out);
    assert_int_equal(count_stages(out), 1); /* the second has removed the first one's */
    quantize(tiny, out, NULL);
    assert_int_equal(count_stages(out), 0);
    assert_int_equal(tmpdir_count(out), 2);
    /* a living run's folder stays; whoever comes second finds a checkpoint */
    inner_from = tiny;
    inner_to = two;
    dspark_quantize_opts_init(&o);
    o.format = DSPARK_FORMAT_NVFP4;
    o.n_threads = 1;
    o.progress = run_another;
    assert_int_equal(dspark_quantize(tiny, two, &o, &err), DSPARK_EINVAL);
    assert_int_equal(n_seen, 1);
    assert_non_null(strstr(err.message, "must hold no checkpoint"));
    assert_int_equal(tmpdir_count(two), 2);
}

/* ---- folders of the command ---- */

static void test_command(void **state)
{
    int held;
    (void)state;
    make_folder(in_folder("x.bf16-aaaaaa"), 1, 0);
    make_folder(in_folder("x.int3-aaaaaa"), 1, 0);
    held = make_folder(in_folder("x.bf16-living"), 1, 1);
    make_folder(in_folder("x.bf16-backup"), 0, 0); /* somebody's own */
    make_folder(in_folder("dspark-bench-aaaaaa"), 1, 0);
    assert_int_equal(mkdir(in_folder("dspark-bench-aaaaaa/copy"), 0700), 0);
    tmpdir_write(in_folder("dspark-bench-aaaaaa/copy/model.safetensors"), "x", 1);
    make_folder(in_folder("dspark-bench-nolock"), 0, 0);
    assert_int_equal(mkdir(in_folder("x.int3-empty1"), 0700), 0); /* killed before the last step */
    assert_int_equal(mkdir(in_folder("dspark-bench-empty1"), 0700), 0);
    assert_int_equal(run_cli("synth x --preset tiny --format int3").code, 0);
    assert_false(folder_has("x.bf16-aaaaaa"));
    assert_false(folder_has("x.int3-"));
    assert_true(exists(in_folder("x.bf16-living/model.safetensors")));
    assert_true(exists(in_folder("x.bf16-backup/model.safetensors")));
    assert_false(exists(in_folder("x/.dspark-lock")));
    assert_true(folder_has("dspark-bench-aaaaaa"));
    assert_int_equal(run_cli("bench --preset tiny --tokens 1 --repeat 1 --buffer 1M --threads 1").code, 0);
    assert_false(folder_has("dspark-bench-aaaaaa"));
    assert_false(folder_has("dspark-bench-empty1"));
    assert_true(exists(in_folder("dspark-bench-nolock/model.safetensors")));
    close(held);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_files),   cmocka_unit_test(test_living_file),
        cmocka_unit_test(test_folders), cmocka_unit_test(test_half_published),
        cmocka_unit_test(test_killed),  cmocka_unit_test(test_command),
    };
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
