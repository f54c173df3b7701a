/* See moved.h. One line a file: name, inode, size, seconds and nanoseconds. */
#include "ckpt/moved.h"

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

#define LINE_BYTES (DSPARK__STAGE_NAME_BYTES + 128) /* a name, four numbers */

/* The line of folder/name without its end; 0 when that is no regular file. */
static int describe(int folder, const char *name, char line[LINE_BYTES])
{
    struct stat info;
    if (fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode)) return 0;
    snprintf(line, LINE_BYTES, "%s %" PRIu64 " %" PRIu64 " %" PRId64 " %ld", name, (uint64_t)info.st_ino,
             (uint64_t)info.st_size, (int64_t)info.st_mtim.tv_sec, (long)info.st_mtim.tv_nsec);
    return 1;
}

dspark_status dspark__moved_write(const char *path, int inner,
                                  const char (*names)[DSPARK__STAGE_NAME_BYTES], size_t n,
                                  dspark_error *err)
{
    char *text = malloc(n * (LINE_BYTES + 1) + 1), *end = text;
    if (!text) return dspark__fail_nomem(err, "the list of files to move", n * (LINE_BYTES + 1) + 1);
    for (size_t i = 0; i < n; i++) {
        if (!describe(inner, names[i], end)) continue;
        end += strlen(end);
        *end++ = '\n';
    }
    dspark_status st = dspark__outfile_put(path, text, (size_t)(end - text), err);
    free(text);
    return st;
}

int dspark__moved_take_back(int inner, int folder)
{
    char line[LINE_BYTES + 2], found[LINE_BYTES];
    int fd = openat(inner, DSPARK__MOVED_NAME, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    FILE *f = fd >= 0 ? fdopen(fd, "r") : NULL;
    if (!f) {
        int nomem = errno == ENOMEM;
        if (fd >= 0) close(fd);
        return !nomem;
    }
    while (fgets(line, sizeof line, f)) {
        char name[DSPARK__STAGE_NAME_BYTES];
        line[strcspn(line, "\n")] = '\0';
        if (sscanf(line, "%63s", name) != 1 || strchr(name, '/')) continue;
        if (describe(folder, name, found) && strcmp(found, line) == 0) (void)unlinkat(folder, name, 0);
    }
    fclose(f);
    return 1;
}
