/* tmp_folder: see tmp_folder.h. Removes nothing but folders that it made, known by the lock file inside;
 * follows no link while it does. The lock is that of the library's own leftovers (src/ckpt/stale.h), made once
 * more: the command sees the public header only, and no program but this one needs it there. */
#include "tmp_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char lock_name[] = ".dspark-lock", whole_name[] = "whole";
#define LETTERS 6

/* All that is in the opened folder, which is closed; the lock file last. */
static void empty_folder(int folder)
{
    DIR *d = fdopendir(folder);
    const struct dirent *entry;
    if (!d) {
        close(folder);
        return;
    }
    while ((entry = readdir(d))) {
        int inner;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (strcmp(entry->d_name, lock_name) == 0) continue;
        if (unlinkat(folder, entry->d_name, 0) == 0) continue;
        inner = openat(folder, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (inner < 0) continue;
        empty_folder(inner);
        unlinkat(folder, entry->d_name, AT_REMOVEDIR);
    }
    unlinkat(folder, lock_name, 0);
    closedir(d);
}

void tmp_folder_delete(const char *path)
{
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0) return;
    empty_folder(folder);
    rmdir(path);
}

/* Is folder/name still the opened file? */
static int is_there(int fd, int folder, const char *name)
{
    struct stat mine, there;
    return fstat(fd, &mine) == 0 && fstatat(folder, name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
           mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

/* A folder without a lock file is not ours, or was made just now; one whose lock is held is in use. Empty,
 * its run died just after it had made or emptied it, or lives and makes another one. */
static void sweep_one(const char *path)
{
    struct stat info;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), lock = -1, held = 0;
    if (folder < 0) return;
    if (fstat(folder, &info) == 0 && info.st_uid == geteuid()) {
        lock = openat(folder, lock_name, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        held = lock >= 0 && fstat(lock, &info) == 0 && S_ISREG(info.st_mode) &&
               flock(lock, LOCK_EX | LOCK_NB) == 0 && is_there(lock, folder, lock_name);
        if (held) empty_folder(folder); /* and close it */
        rmdir(path);                    /* fails when it is not empty */
    }
    if (!held) close(folder);
    if (lock >= 0) close(lock);
}

static void sweep(const char *prefix)
{
    const char *slash = strrchr(prefix, '/'), *base = slash ? slash + 1 : prefix;
    char parent[4096], path[4096 + 300];
    const struct dirent *entry;
    DIR *d;
    snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - prefix) + 1 : 1,
             slash ? prefix : ".");
    d = opendir(parent);
    while (d && (entry = readdir(d))) {
        const char *name = entry->d_name;
        const size_t n = strlen(base);
        if (strncmp(name, base, n) != 0 || strlen(name) != n + LETTERS) continue;
        snprintf(path, sizeof path, "%s/%s", parent, name);
        sweep_one(path);
    }
    if (d) closedir(d);
}

/* 0: held. An errno; EAGAIN when a sweeper was quicker. */
static int hold(tmp_folder *t)
{
    int folder = open(t->path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), problem = 0;
    if (folder < 0) return errno == ENOENT ? EAGAIN : errno;
    t->lock = openat(folder, lock_name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (t->lock < 0)
        problem = errno == ENOENT ? EAGAIN : errno; /* removed while it was empty */
    else if (flock(t->lock, LOCK_EX | LOCK_NB) != 0)
        problem = errno == EWOULDBLOCK ? EAGAIN : 0; /* without locks nobody takes it either */
    else if (!is_there(t->lock, folder, lock_name))
        problem = EAGAIN;
    close(folder);
    return problem;
}

int tmp_folder_make(tmp_folder *t, const char *prefix)
{
    int problem = EAGAIN, i;
    memset(t, 0, sizeof *t);
    t->lock = -1;
    sweep(prefix);
    for (i = 0; problem == EAGAIN && i < 100; i++) {
        int n = snprintf(t->path, sizeof t->path, "%sXXXXXX", prefix);
        problem = n < 0 || (size_t)n >= sizeof t->path ? ENAMETOOLONG : 0;
        if (!problem && !mkdtemp(t->path)) problem = errno;
        if (problem) {
            t->path[0] = 0;
            return problem;
        }
        problem = hold(t);
        if (problem) tmp_folder_remove(t);
    }
    return problem;
}

int tmp_folder_beside(tmp_folder *t, const char *out, const char *kind)
{
    char prefix[sizeof t->path];
    size_t length = strlen(out);
    int n;
    while (length > 1 && out[length - 1] == '/') length--;
    n = snprintf(prefix, sizeof prefix, "%.*s.%s-", (int)length, out, kind);
    if (n >= 0 && (size_t)n < sizeof prefix) return tmp_folder_make(t, prefix);
    memset(t, 0, sizeof *t);
    return ENAMETOOLONG;
}

int tmp_folder_inner(char *inner, size_t size, const tmp_folder *t)
{
    const int n = snprintf(inner, size, "%s/%s", t->path, whole_name);
    if (n < 0 || (size_t)n >= size) return ENAMETOOLONG;
    return mkdir(inner, 0777) == 0 ? 0 : errno; /* mkdtemp's 0700 is for secrets */
}

int tmp_folder_rename(const tmp_folder *t, const char *path)
{
    char inner[sizeof t->path + sizeof whole_name + 1];
    int folder;
    snprintf(inner, sizeof inner, "%s/%s", t->path, whole_name);
    if (rename(inner, path) != 0) return errno;
    snprintf(inner, sizeof inner, "%s/..", t->path);
    folder = open(inner, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) {
        (void)fsync(folder); /* some file systems cannot */
        close(folder);
    }
    return 0;
}

void tmp_folder_remove(tmp_folder *t)
{
    if (!t->path[0]) return;
    tmp_folder_delete(t->path);
    if (t->lock >= 0) close(t->lock);
    t->path[0] = 0;
    t->lock = -1;
}
