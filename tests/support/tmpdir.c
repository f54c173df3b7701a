/* Temporary folders of test programs. Owns their names and their removal. */
#include "support/tmpdir.h"

#include <dirent.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_FOLDERS 64

static char folders[MAX_FOLDERS][PATH_MAX];

static void die(const char *what)
{
    perror(what);
    exit(EXIT_FAILURE);
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *walk)
{
    (void)info;
    (void)kind;
    (void)walk;
    return remove(path);
}

void tmpdir_remove(const char *dir)
{
    char copy[PATH_MAX];
    snprintf(copy, sizeof copy, "%s", dir);
    for (size_t i = 0; i < MAX_FOLDERS; i++) {
        if (strcmp(folders[i], copy) == 0) folders[i][0] = '\0';
    }
    nftw(copy, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static void remove_all(void)
{
    for (size_t i = 0; i < MAX_FOLDERS; i++) {
        if (folders[i][0]) tmpdir_remove(folders[i]);
    }
}

const char *tmpdir_make(void)
{
    static int registered;
    const char *base = getenv("TMPDIR");
    if (!registered) atexit(remove_all);
    registered = 1;
    for (size_t i = 0; i < MAX_FOLDERS; i++) {
        if (folders[i][0]) continue;
        snprintf(folders[i], sizeof folders[i], "%s/dspark-test-XXXXXX", base ? base : P_tmpdir);
        if (!mkdtemp(folders[i])) die(folders[i]);
        return folders[i];
    }
    fprintf(stderr, "more than %d temporary folders\n", MAX_FOLDERS);
    exit(EXIT_FAILURE);
}

const char *tmpdir_path(const char *dir, const char *name)
{
    static char text[8][PATH_MAX];
    static unsigned next;
    char *t = text[next++ % 8];
    if (snprintf(t, PATH_MAX, "%s/%s", dir, name) >= PATH_MAX) die(name);
    return t;
}

void tmpdir_write(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f) != 0) die(path);
}

size_t tmpdir_count(const char *dir)
{
    size_t n = 0;
    DIR *stream = opendir(dir);
    if (!stream) die(dir);
    for (struct dirent *d = readdir(stream); d; d = readdir(stream))
        n += strcmp(d->d_name, ".") != 0 && strcmp(d->d_name, "..") != 0;
    closedir(stream);
    return n;
}
