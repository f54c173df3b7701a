/* See stage.h. */
#include "ckpt/stage.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "ckpt/moved.h"
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

static int is_there(int folder, const char *name)
{
    struct stat info;
    return fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0;
}

/* Is `name` one and the same file in both folders? */
static int is_same(int a, int b, const char *name)
{
    struct stat one, two;
    return fstatat(a, name, &one, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(one.st_mode) &&
           fstatat(b, name, &two, AT_SYMLINK_NOFOLLOW) == 0 && one.st_dev == two.st_dev &&
           one.st_ino == two.st_ino;
}

/* The names in an open folder; NULL and errno. */
static DIR *list_folder(int folder)
{
    int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), error_number;
    DIR *d = copy >= 0 ? fdopendir(copy) : NULL;
    if (d || copy < 0) return d;
    error_number = errno;
    close(copy);
    errno = error_number;
    return NULL;
}

static dspark_status refuse_file(const dspark__stage *s, const char *name, dspark_error *err)
{
    return dspark__fail(err, DSPARK_EINVAL, s->dir,
                        "the directory must hold no checkpoint yet, found %s", name);
}

/* DSPARK_EINVAL when the target holds a file of a checkpoint. */
static dspark_status refuse_used_dir(const dspark__stage *s, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    const struct dirent *e;
    DIR *d = list_folder(s->folder);
    if (!d) return dspark__fail_output(err, s->dir, "cannot read the directory", errno);
    while (st == DSPARK_OK && (errno = 0, e = readdir(d)) != NULL)
        if (is_checkpoint_file(e->d_name)) st = refuse_file(s, e->d_name, err);
    if (st == DSPARK_OK && errno != 0)
        st = dspark__fail_output(err, s->dir, "cannot read the directory", errno);
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

/* What a run that died while publishing left in the target is still in its stage too, as the same file,
 * or told of there (moved.h): it goes from both, as long as no config.json has made a checkpoint of the
 * target. Only files that are written into such directories are removed; with anything else inside, it
 * stays. One that is held, or without a lock file, stays as well, unless it is empty: its run died just
 * after it had made or emptied it, or lives and makes another one. 0: no memory. */
static int sweep_stage(int folder, const char *name)
{
    int inner = openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), ok = 1;
    int lock = inner >= 0 ? dspark__stale_take(inner, LOCK_NAME) : -1;
    DIR *d = lock >= 0 ? list_folder(inner) : NULL;
    const int published = is_there(folder, "config.json");
    const struct dirent *e;
    if (d && !published) ok = dspark__moved_take_back(inner, folder);
    if (d && ok) {
        while ((e = readdir(d)) != NULL) {
            if (!is_checkpoint_file(e->d_name) && !dspark__stale_is_file_name(e->d_name)) continue;
            if (!published && is_checkpoint_file(e->d_name) && is_same(folder, inner, e->d_name))
                (void)unlinkat(folder, e->d_name, 0);
            (void)unlinkat(inner, e->d_name, 0);
        }
        (void)unlinkat(inner, DSPARK__MOVED_NAME, 0);
        (void)unlinkat(inner, LOCK_NAME, 0);
    } else if (lock >= 0 && !d) {
        ok = errno != ENOMEM;
    }
    if (d) closedir(d);
    if (inner >= 0) {
        (void)unlinkat(folder, name, AT_REMOVEDIR); /* fails when it is not empty */
        close(inner);
    }
    if (lock >= 0) close(lock);
    return ok;
}

static dspark_status sweep_stages(const dspark__stage *s, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    DIR *d = list_folder(s->folder);
    const struct dirent *e;
    if (!d) return dspark__fail_output(err, s->dir, "cannot read the directory", errno);
    while (st == DSPARK_OK && (e = readdir(d)) != NULL)
        if (is_stage_name(e->d_name) && !sweep_stage(s->folder, e->d_name))
            st = dspark__fail_output(err, s->dir, "cannot read what a killed run left", ENOMEM);
    closedir(d);
    return st;
}

/* ---- the stage ---- */

/* The lock file of s->tmp. *held 0: a sweeper was quicker. */
static dspark_status lock_stage(dspark__stage *s, int *held, dspark_error *err)
{
    s->inner = open(s->tmp, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (s->inner >= 0)
        s->lock = openat(s->inner, LOCK_NAME, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (s->lock >= 0)
        *held = dspark__stale_hold(s->lock, s->inner, LOCK_NAME);
    else if (errno != ENOENT) /* it was removed while it was empty */
        return dspark__fail_output(err, s->tmp, "cannot make a lock file", errno);
    return DSPARK_OK;
}

static void close_tmp(dspark__stage *s)
{
    if (s->inner >= 0) close(s->inner);
    if (s->tmp) rmdir(s->tmp);
    if (s->lock >= 0) close(s->lock);
    free(s->tmp);
    s->tmp = NULL;
    s->inner = s->lock = -1;
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
        close_tmp(s);
    }
    return dspark__fail(err, DSPARK_EOUTPUT, s->dir, "directories for unfinished files do not stay there");
}

dspark_status dspark__stage_open(dspark__stage *s, const char *dir, const char *prefix,
                                 size_t max_names, dspark_error *err)
{
    dspark_status st;

    memset(s, 0, sizeof *s);
    s->folder = s->inner = s->lock = -1;
    s->dir = dir;
    s->names = calloc(max_names, sizeof *s->names);
    if (!s->names) return dspark__fail_nomem(err, "file names", max_names * sizeof *s->names);
    if (mkdir(dir, 0777) == 0)
        s->made_dir = 1;
    else if (errno != EEXIST)
        return dspark__fail_output(err, dir, "cannot make the directory", errno);
    s->folder = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->folder < 0 && errno == ENOTDIR)
        return dspark__fail(err, DSPARK_EINVAL, dir, "exists and is not a directory");
    if (s->folder < 0) return dspark__fail_output(err, dir, "cannot read the directory", errno);
    if ((st = sweep_stages(s, err)) != DSPARK_OK) return st;
    if ((st = refuse_used_dir(s, err)) != DSPARK_OK) return st;
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
    char *path = dspark__stage_add(s, name);
    if (!path) return dspark__fail_nomem(err, "a path", strlen(name));
    dspark_status st = dspark__outfile_put(path, text, n, err);
    free(path);
    return st;
}

/* 0, or -1 and errno: EEXIST when the target has the name. */
static int move_out(const dspark__stage *s, const char *name)
{
#if defined(RENAME_NOREPLACE)
    if (renameat2(s->inner, name, s->folder, name, RENAME_NOREPLACE) == 0) return 0;
    if (errno != EINVAL && errno != ENOSYS) return -1;
#endif
    if (!is_there(s->folder, name)) return renameat(s->inner, name, s->folder, name);
    errno = EEXIST;
    return -1;
}

static dspark_status tell_moves(dspark__stage *s, dspark_error *err)
{
    char *path = s->told ? NULL : join_path(s->tmp, DSPARK__MOVED_NAME);
    if (s->told) return DSPARK_OK;
    if (!path) return dspark__fail_nomem(err, "a path", strlen(s->tmp));
    s->told = 1;
    dspark_status st = dspark__moved_write(path, s->inner, (const char(*)[DSPARK__STAGE_NAME_BYTES])s->names,
                                           s->n_names, err);
    free(path);
    return st;
}

/* Never replaces a file. As a second name of the same file, by which the next run knows what a killed
 * one has published; moved where the file system gives none. */
static dspark_status put_out(dspark__stage *s, const char *name, dspark_error *err)
{
    int done = linkat(s->inner, name, s->folder, name, 0);
    if (done != 0 && (errno == EPERM || errno == EOPNOTSUPP || errno == ENOSYS || errno == EMLINK ||
                      errno == EXDEV)) {
        dspark_status st = tell_moves(s, err);
        if (st != DSPARK_OK) return st;
        done = move_out(s, name);
    }
    if (done == 0) return DSPARK_OK;
    if (errno == EEXIST) return refuse_file(s, name, err);
    return dspark__fail_output(err, s->dir, "cannot put the finished file there", errno);
}

/* A folder made by this run is a name in another one. Some file systems cannot sync a folder. */
static void sync_target(const dspark__stage *s)
{
    int above = s->made_dir ? openat(s->folder, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    (void)fsync(s->folder);
    if (above < 0) return;
    (void)fsync(above);
    close(above);
}

/* The target's lock is held until the stage is closed, so that files of two runs never mix. Where there
 * are no such locks, put_out still replaces nothing. */
dspark_status dspark__stage_publish(dspark__stage *s, dspark_error *err)
{
    dspark_status st;
    if (flock(s->folder, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return dspark__fail(err, DSPARK_EINVAL, s->dir,
                            "the directory must hold no checkpoint yet, another run is putting one there");
    if ((st = sweep_stages(s, err)) != DSPARK_OK) return st;
    if ((st = refuse_used_dir(s, err)) != DSPARK_OK) return st;
    while (s->n_published < s->n_names) {
        /* Before the last one, which makes it a checkpoint. Some file systems cannot; the files themselves
         * are synced. */
        if (s->n_published + 1 == s->n_names) (void)fsync(s->folder);
        if ((st = put_out(s, s->names[s->n_published], err)) != DSPARK_OK) return st;
        s->n_published++;
    }
    sync_target(s);
    return DSPARK_OK;
}

/* Allocates nothing, so that it works when memory is what ran out. Last in, first out: without its
 * config.json the target is no checkpoint any more. */
void dspark__stage_close(dspark__stage *s, int failed)
{
    if (!s->names) return; /* a zero object, or not more than that */
    if (failed)
        while (s->n_published > 0) unlinkat(s->folder, s->names[--s->n_published], 0);
    for (size_t i = 0; i < s->n_names; i++) unlinkat(s->inner, s->names[i], 0);
    if (s->told) unlinkat(s->inner, DSPARK__MOVED_NAME, 0);
    if (s->lock >= 0) unlinkat(s->inner, LOCK_NAME, 0);
    close_tmp(s);
    if (s->folder >= 0) {
        flock(s->folder, LOCK_UN); /* a child may have the descriptor too */
        close(s->folder);
    }
    if (failed && s->made_dir) rmdir(s->dir);
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
