/* See stage.h. */
#include "ckpt/stage.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "ckpt/outfile.h"
#include "ckpt/stale.h"

#define LOCK_NAME ".dspark-lock"
#define LETTERS 6 /* that mkdtemp chooses */

static char *join_path(const char *dir, const char *name)
{
    size_t n = strlen(dir), m = strlen(name);
    char *path = malloc(n + m + 2);
    if (!path) return NULL;
    memcpy(path, dir, n);
    path[n] = '/';
    memcpy(path + n + 1, name, m + 1);
    return path;
}

static int is_checkpoint_file(const char *name)
{
    static const char tensors[] = ".safetensors", index[] = ".safetensors.index.json";
    size_t n = strlen(name);
    if (strcmp(name, "config.json") == 0 || strcmp(name, "hf_quant_config.json") == 0) return 1;
    if (n >= sizeof tensors - 1 && strcmp(name + n - (sizeof tensors - 1), tensors) == 0) return 1;
    return n >= sizeof index - 1 && strcmp(name + n - (sizeof index - 1), index) == 0;
}

/* DSPARK_EINVAL when `dir` holds a file of a checkpoint. */
static dspark_status refuse_used_dir(const char *dir, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    const struct dirent *e;
    DIR *d = opendir(dir);
    if (!d && errno == ENOTDIR)
        return dspark__fail(err, DSPARK_EINVAL, dir, "exists and is not a directory");
    if (!d) return dspark__fail_output(err, dir, "cannot read the directory", errno);
    while (st == DSPARK_OK && (errno = 0, e = readdir(d)) != NULL) {
        if (is_checkpoint_file(e->d_name))
            st = dspark__fail(err, DSPARK_EINVAL, dir,
                              "the directory must hold no checkpoint yet, found %s", e->d_name);
    }
    if (st == DSPARK_OK && errno != 0) st = dspark__fail_output(err, dir, "cannot read the directory", errno);
    closedir(d);
    return st;
}

/* ---- leftovers of killed runs ---- */

/* A staging directory of any kind: synth's or quantize's. */
static int is_stage_name(const char *name)
{
    static const char *const prefixes[] = {".synth-", ".quantize-"};
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
        size_t n = strlen(prefixes[i]);
        if (strncmp(name, prefixes[i], n) == 0 && strlen(name) == n + LETTERS) return 1;
    }
    return 0;
}

/* One without a lock file was born just now, or is nobody's that is known. Only files that are written
 * into such directories are removed; with anything else inside, it stays. */
static void sweep_stage(int dir, const char *name)
{
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int lock = fd >= 0 ? dspark__stale_take(fd, LOCK_NAME) : -1;
    DIR *d = lock >= 0 ? fdopendir(fd) : NULL;
    const struct dirent *e;
    if (d) {
        while ((e = readdir(d)) != NULL)
            if (is_checkpoint_file(e->d_name) || dspark__stale_is_file_name(e->d_name))
                (void)unlinkat(fd, e->d_name, 0);
        (void)unlinkat(fd, LOCK_NAME, 0);
        (void)unlinkat(dir, name, AT_REMOVEDIR);
        closedir(d); /* and fd */
    } else if (fd >= 0) {
        close(fd);
    }
    if (lock >= 0) close(lock);
}

static dspark_status sweep_stages(const char *path, dspark_error *err)
{
    DIR *d = opendir(path);
    const struct dirent *e;
    if (!d) return dspark__fail_output(err, path, "cannot read the directory", errno);
    while ((e = readdir(d)) != NULL)
        if (is_stage_name(e->d_name)) sweep_stage(dirfd(d), e->d_name);
    closedir(d);
    return DSPARK_OK;
}

/* ---- the stage ---- */

/* The lock file of s->tmp. *held 0: a sweeper was quicker. */
static dspark_status lock_stage(dspark__stage *s, int *held, dspark_error *err)
{
    int dir = open(s->tmp, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (dir >= 0) s->lock = openat(dir, LOCK_NAME, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (s->lock < 0) {
        dspark_status st = dspark__fail_output(err, s->tmp, "cannot make a lock file", errno);
        if (dir >= 0) close(dir);
        return st;
    }
    *held = dspark__stale_hold(s->lock, dir, LOCK_NAME);
    close(dir);
    return DSPARK_OK;
}

static dspark_status make_tmp(dspark__stage *s, const char *prefix, dspark_error *err)
{
    char name[DSPARK__STAGE_NAME_BYTES];
    snprintf(name, sizeof name, "%sXXXXXX", prefix);
    for (int i = 0; i < 100; i++) {
        int held = 0;
        char *tmp = join_path(s->dir, name);
        dspark_status st;
        if (!tmp) return dspark__fail_nomem(err, "a path", strlen(s->dir));
        if (!mkdtemp(tmp)) {
            st = dspark__fail_output(err, tmp, "cannot make a directory for unfinished files", errno);
            free(tmp);
            return st;
        }
        s->tmp = tmp;
        if ((st = lock_stage(s, &held, err)) != DSPARK_OK || held) return st;
        close(s->lock);
        s->lock = -1;
        rmdir(tmp);
        free(tmp);
        s->tmp = NULL;
    }
    return dspark__fail(err, DSPARK_EOUTPUT, s->dir, "directories for unfinished files do not stay there");
}

dspark_status dspark__stage_open(dspark__stage *s, const char *dir, const char *prefix,
                                 size_t max_names, dspark_error *err)
{
    dspark_status st;

    memset(s, 0, sizeof *s);
    s->lock = -1;
    s->dir = dir;
    s->names = calloc(max_names, sizeof *s->names);
    if (!s->names) return dspark__fail_nomem(err, "file names", max_names * sizeof *s->names);
    if (mkdir(dir, 0777) == 0)
        s->made_dir = 1;
    else if (errno != EEXIST)
        return dspark__fail_output(err, dir, "cannot make the directory", errno);
    if ((st = refuse_used_dir(dir, err)) != DSPARK_OK) return st;
    if ((st = sweep_stages(dir, err)) != DSPARK_OK) return st;
    return make_tmp(s, prefix, err);
}

/* The path in the staging directory of a new file; free() it. */
char *dspark__stage_add(dspark__stage *s, const char *name)
{
    char *path = join_path(s->tmp, name);
    if (path) snprintf(s->names[s->n_names++], DSPARK__STAGE_NAME_BYTES, "%s", name);
    return path;
}

dspark_status dspark__stage_write(dspark__stage *s, const char *name, const char *text, size_t n,
                                 dspark_error *err)
{
    dspark__outfile file = {0};
    char *path = dspark__stage_add(s, name);
    if (!path) return dspark__fail_nomem(err, "a path", strlen(name));
    dspark_status st = dspark__outfile_create(&file, path, 0, err);
    if (st == DSPARK_OK) st = dspark__outfile_write(&file, text, n, err);
    if (st == DSPARK_OK) st = dspark__outfile_commit(&file, err);
    dspark__outfile_abort(&file);
    free(path);
    return st;
}

/* Move all files out, in order. */
dspark_status dspark__stage_publish(dspark__stage *s, dspark_error *err)
{
    dspark_status st = refuse_used_dir(s->dir, err);
    int fd;
    for (size_t i = 0; st == DSPARK_OK && i < s->n_names; i++) {
        char *from = join_path(s->tmp, s->names[i]), *to = join_path(s->dir, s->names[i]);
        if (!from || !to)
            st = dspark__fail_nomem(err, "a path", strlen(s->dir));
        else if (rename(from, to) != 0)
            st = dspark__fail_output(err, to, "cannot rename the finished file", errno);
        else
            s->n_moved = i + 1;
        free(from);
        free(to);
    }
    if (st != DSPARK_OK) return st;
    fd = open(s->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd); /* some file systems cannot; the files themselves are synced */
        close(fd);
    }
    return DSPARK_OK;
}

/* Take away what is not meant to stay: on failure that is everything. Allocates nothing, so that it
 * works when memory is what ran out. */
void dspark__stage_close(dspark__stage *s, int failed)
{
    if (s->tmp) {
        int dir = open(s->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        int tmp = open(s->tmp, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        for (size_t i = 0; i < s->n_names; i++) {
            if (i >= s->n_moved)
                unlinkat(tmp, s->names[i], 0);
            else if (failed)
                unlinkat(dir, s->names[i], 0);
        }
        if (s->lock >= 0) unlinkat(tmp, LOCK_NAME, 0);
        if (tmp >= 0) close(tmp);
        if (dir >= 0) close(dir);
        rmdir(s->tmp);
        if (s->lock >= 0) close(s->lock);
    }
    if (failed && s->made_dir) rmdir(s->dir);
    free(s->tmp);
    free(s->names);
    memset(s, 0, sizeof *s);
}

void dspark__stage_shard_name(char name[DSPARK__STAGE_NAME_BYTES], uint32_t shard,
                              uint32_t n_shards)
{
    if (n_shards == 1)
        snprintf(name, DSPARK__STAGE_NAME_BYTES, "model.safetensors");
    else
        snprintf(name, DSPARK__STAGE_NAME_BYTES, "model-%05" PRIu32 "-of-%05" PRIu32 ".safetensors",
                 shard + 1, n_shards);
}
