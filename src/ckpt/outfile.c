/* See outfile.h. */
#include "ckpt/outfile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "ckpt/stale.h"

#define MOST_PER_WRITE ((size_t)1 << 30)

/* The folder of o->path, opened, so that a change of the working folder cannot split the two. */
static dspark_status open_folder(dspark__outfile *o, dspark_error *err)
{
    size_t n = (size_t)(o->base - o->path);
    char *parent = malloc(n + 2);
    if (!parent) return dspark__fail_nomem(err, "a path", n + 2);
    memcpy(parent, o->path, n);
    memcpy(parent + n, ".", 2); /* "a/b/" + "." and "" + "." */
    o->folder = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error_number = errno;
    free(parent);
    if (o->folder < 0)
        return dspark__fail_output(err, o->path, "its folder cannot be opened", error_number);
    return DSPARK_OK;
}

/* Only where it can be given a name later: that takes /proc. */
static void open_unnamed(dspark__outfile *o)
{
#if defined(O_TMPFILE)
    char self[64];
    o->fd = openat(o->folder, ".", O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666);
    if (o->fd < 0) return;
    snprintf(self, sizeof self, "/proc/self/fd/%d", o->fd);
    if (access(self, F_OK) == 0) {
        (void)flock(o->fd, LOCK_EX | LOCK_NB); /* for the moment between its name and the rename */
        return;
    }
    close(o->fd);
    o->fd = -1;
#else
    (void)o;
#endif
}

static dspark_status open_temporary(dspark__outfile *o, int unnamed, dspark_error *err)
{
    struct stat info;

    /* The rename would replace a device or a pipe by a file. */
    if (fstatat(o->folder, o->base, &info, 0) == 0 && !S_ISREG(info.st_mode))
        return dspark__fail(err, DSPARK_EINVAL, o->path, "exists and is not a regular file");
    /* Also for a file without a name: it has one between its link and its rename. */
    if (!dspark__stale_sweep_files(o->folder))
        return dspark__fail_output(err, o->path, "its folder cannot be looked through", ENOMEM);
    if (unnamed) open_unnamed(o);
    if (o->fd >= 0) return DSPARK_OK;
    for (unsigned i = 0; i < 1000; i++) {
        dspark__stale_file_name(o->temporary, sizeof o->temporary, i);
        o->fd = openat(o->folder, o->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (o->fd >= 0 && dspark__stale_hold(o->fd, o->folder, o->temporary)) return DSPARK_OK;
        if (o->fd >= 0) {
            close(o->fd);
            o->fd = -1;
            errno = EEXIST;
        }
        if (errno != EEXIST) break;
    }
    int error_number = errno;
    o->temporary[0] = '\0'; /* not ours */
    return dspark__fail_output(err, o->path, "cannot be created", error_number);
}

dspark_status dspark__outfile_create(dspark__outfile *o, const char *path, int unnamed,
                                     dspark_error *err)
{
    dspark_status st;
    memset(o, 0, sizeof *o);
    o->folder = o->fd = -1;
    o->path = strdup(path);
    if (!o->path) return dspark__fail_nomem(err, "a path", strlen(path));
    const char *slash = strrchr(o->path, '/');
    o->base = slash ? slash + 1 : o->path;
    if (o->base[0] == '\0' || strcmp(o->base, ".") == 0 || strcmp(o->base, "..") == 0)
        return dspark__fail(err, DSPARK_EINVAL, path, "does not name a file");
    if ((st = open_folder(o, err)) != DSPARK_OK) return st;
    return open_temporary(o, unnamed, err);
}

static dspark_status fail_write(const dspark__outfile *o, ssize_t done, dspark_error *err)
{
    return dspark__fail_output(err, o->path, "cannot be written", done < 0 ? errno : EIO);
}

dspark_status dspark__outfile_write(dspark__outfile *o, const void *data, size_t n, dspark_error *err)
{
    const char *bytes = data;
    while (n > 0) {
        ssize_t done = write(o->fd, bytes, n < MOST_PER_WRITE ? n : MOST_PER_WRITE);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return fail_write(o, done, err);
        bytes += done;
        n -= (size_t)done;
    }
    return DSPARK_OK;
}

dspark_status dspark__outfile_write_at(dspark__outfile *o, const void *data, size_t n, uint64_t offset,
                                       dspark_error *err)
{
    const char *bytes = data;
    while (n > 0) {
        ssize_t done = pwrite(o->fd, bytes, n < MOST_PER_WRITE ? n : MOST_PER_WRITE, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return fail_write(o, done, err);
        bytes += done;
        offset += (uint64_t)done;
        n -= (size_t)done;
    }
    return DSPARK_OK;
}

/* A hidden name for a file that has none: a link cannot replace what lies at the path, a rename can. */
static int name_file(dspark__outfile *o)
{
    char self[64];
    snprintf(self, sizeof self, "/proc/self/fd/%d", o->fd);
    for (unsigned i = 0; i < 1000; i++) {
        dspark__stale_file_name(o->temporary, sizeof o->temporary, i);
        if (linkat(AT_FDCWD, self, o->folder, o->temporary, AT_SYMLINK_FOLLOW) == 0) return 0;
        if (errno != EEXIST) break;
    }
    o->temporary[0] = '\0';
    return -1;
}

dspark_status dspark__outfile_commit(dspark__outfile *o, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    if (fsync(o->fd) != 0) {
        st = dspark__fail_output(err, o->path, "fsync", errno);
        goto done;
    }
    if (!o->temporary[0] && name_file(o) != 0) {
        st = dspark__fail_output(err, o->path, "cannot be given a name", errno);
        goto done;
    }
    /* Renamed while it is open, and so held. All is synced: closing has nothing left to fail at. */
    if (renameat(o->folder, o->temporary, o->folder, o->base) != 0) {
        st = dspark__fail_output(err, o->path, "cannot be renamed into place", errno);
        goto done;
    }
    o->temporary[0] = '\0';
    /* Some file systems cannot sync a folder and say EINVAL: nothing more can be done there. */
    if (fsync(o->folder) != 0 && errno != EINVAL)
        st = dspark__fail_output(err, o->path, "fsync of its folder", errno);
done:
    dspark__outfile_abort(o);
    return st;
}

dspark_status dspark__outfile_put(const char *path, const void *data, size_t n, dspark_error *err)
{
    dspark__outfile file;
    dspark_status st = dspark__outfile_create(&file, path, 0, err);
    if (st == DSPARK_OK) st = dspark__outfile_write(&file, data, n, err);
    if (st == DSPARK_OK) return dspark__outfile_commit(&file, err);
    dspark__outfile_abort(&file);
    return st;
}

void dspark__outfile_abort(dspark__outfile *o)
{
    if (!o->path) return;
    if (o->fd >= 0) close(o->fd);
    if (o->temporary[0]) (void)unlinkat(o->folder, o->temporary, 0);
    if (o->folder >= 0) close(o->folder);
    free(o->path);
    memset(o, 0, sizeof *o);
    o->folder = o->fd = -1;
}
