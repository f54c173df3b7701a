/* See stale.h. Removes only what carries a name of this library and is locked by itself. */
#include "ckpt/stale.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char prefix[] = ".dspark-", suffix[] = ".tmp";

/* Is folder/name still what fd is? */
static int is_there(int fd, int folder, const char *name)
{
    struct stat mine, there;
    return fstat(fd, &mine) == 0 && fstatat(folder, name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
           mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

int dspark__stale_hold(int fd, int folder, const char *name)
{
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) return errno != EWOULDBLOCK;
    return is_there(fd, folder, name);
}

int dspark__stale_take(int folder, const char *name)
{
    struct stat info;
    /* For writing, since some network file systems give no exclusive lock without it; a pipe does not
     * wait for a reader. */
    int fd = openat(folder, name, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return -1;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && flock(fd, LOCK_EX | LOCK_NB) == 0 &&
        is_there(fd, folder, name))
        return fd;
    close(fd);
    return -1;
}

void dspark__stale_file_name(char *name, size_t size, unsigned n)
{
    snprintf(name, size, "%s%ld-%u%s", prefix, (long)getpid(), n, suffix);
}

int dspark__stale_is_file_name(const char *name)
{
    size_t n;
    if (strncmp(name, prefix, sizeof prefix - 1) != 0) return 0;
    name += sizeof prefix - 1;
    n = strspn(name, "0123456789");
    if (n == 0 || name[n] != '-') return 0;
    name += n + 1;
    n = strspn(name, "0123456789");
    return n > 0 && strcmp(name + n, suffix) == 0;
}

int dspark__stale_sweep_files(int folder)
{
    int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* closedir closes it */
    DIR *d = copy >= 0 ? fdopendir(copy) : NULL;
    const struct dirent *entry;

    if (!d) {
        int nomem = errno == ENOMEM;
        if (copy >= 0) close(copy);
        return !nomem;
    }
    while ((entry = readdir(d)) != NULL) {
        int fd = dspark__stale_is_file_name(entry->d_name) ? dspark__stale_take(folder, entry->d_name)
                                                           : -1;
        if (fd < 0) continue;
        (void)unlinkat(folder, entry->d_name, 0);
        close(fd);
    }
    closedir(d);
    return 1;
}
