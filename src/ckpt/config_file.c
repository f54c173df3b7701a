/* Where a config.json is and its bytes. Owns no meaning: that is config.c. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ckpt/config_value.h"

static int ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

/* malloc'd "dir/name" for a checkpoint path that is a directory, a tensor file or, when `name` is
 * config.json, that file itself. */
static char *sibling_path(const char *path, const char *name)
{
    struct stat sb;
    size_t n = strlen(path);
    int is_dir = stat(path, &sb) == 0 && S_ISDIR(sb.st_mode);
    char *out;

    if (!is_dir) {
        const char *slash = strrchr(path, '/');
        int itself = !strcmp(name, "config.json") && ends_with(path, ".json") &&
                     !ends_with(path, ".index.json");
        if (itself) name = slash ? slash + 1 : path;
        n = slash ? (size_t)(slash - path) + 1 : 0;
    }
    out = malloc(n + 1 + strlen(name) + 1);
    if (!out) return NULL;
    memcpy(out, path, n);
    if (n && out[n - 1] != '/') out[n++] = '/';
    strcpy(out + n, name);
    return out;
}

/* Base name for error texts; the caller knows the directory. */
static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static dspark_status read_whole(char **out, size_t *n_bytes, const char *file, dspark_error *err)
{
    struct stat sb;
    char *text = NULL;
    size_t have = 0;
    dspark_status st;
    /* O_NONBLOCK: a pipe of that name must not hang the open */
    int fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0) return dspark__fail_errno(err, file, "cannot open", errno);
    if (fstat(fd, &sb) != 0 || !S_ISREG(sb.st_mode)) {
        st = dspark__fail(err, DSPARK_EIO, file, "not a regular file");
        goto fail;
    }
    if (sb.st_size < 0 || (uint64_t)sb.st_size > DSPARK__CONFIG_MAX_BYTES) {
        st = dspark__fail(err, DSPARK_EFORMAT, file, "%lld bytes, and at most %zu are read",
                          (long long)sb.st_size, DSPARK__CONFIG_MAX_BYTES);
        goto fail;
    }
    text = malloc((size_t)sb.st_size + 1);
    if (!text) {
        st = dspark__fail_nomem(err, base_name(file), (uint64_t)sb.st_size + 1);
        goto fail;
    }
    while (have < (size_t)sb.st_size) {
        ssize_t got = read(fd, text + have, (size_t)sb.st_size - have);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            st = dspark__fail(err, DSPARK_EIO, file, "cannot read: %s",
                              got < 0 ? strerror(errno) : "the file shrank");
            goto fail;
        }
        have += (size_t)got;
    }
    close(fd);
    text[have] = '\0';
    *out = text;
    *n_bytes = have;
    return DSPARK_OK;
fail:
    free(text);
    close(fd);
    return st;
}

dspark_status dspark__config_text(char **out, size_t *n_bytes, const char *path, dspark_error *err)
{
    char *file = sibling_path(path, "config.json");
    dspark_status st;

    *out = NULL;
    *n_bytes = 0;
    if (!file) return dspark__fail_nomem(err, "path", strlen(path) + 16);
    st = read_whole(out, n_bytes, file, err);
    free(file);
    return st;
}

dspark_status dspark__config_modelopt_text(char **out, size_t *n_bytes, const char *path,
                                           dspark_error *err)
{
    char *file = sibling_path(path, "hf_quant_config.json");
    dspark_status st = DSPARK_OK;

    *out = NULL;
    *n_bytes = 0;
    if (!file) return dspark__fail_nomem(err, "path", strlen(path) + 24);
    if (access(file, F_OK) == 0) st = read_whole(out, n_bytes, file, err);
    free(file);
    return st;
}

/* ModelOpt writes its scheme into a file of its own. */
static dspark_status hear_modelopt(dspark__config_doc *doc, const char *path, dspark_error *err)
{
    dspark__cfg g = {NULL, "", "config.json", doc, err};
    char *file = sibling_path(path, "hf_quant_config.json");
    int there;

    if (!file) return dspark__fail_nomem(err, "path", strlen(path) + 24);
    there = access(file, F_OK) == 0;
    free(file);
    if (!there) return DSPARK_OK;
    if (!doc->quant_method) {
        doc->quant_method = malloc(sizeof "modelopt");
        if (!doc->quant_method) return dspark__fail_nomem(err, "quant_method", sizeof "modelopt");
        strcpy(doc->quant_method, "modelopt");
    }
    return dspark__cfg_note(&g, "hf_quant_config.json is present: written by ModelOpt; what counts "
                                "is which tensors are in the file");
}

dspark_status dspark__config_read(dspark__config_doc **out, const char *path, dspark_error *err)
{
    char *text = NULL;
    size_t n = 0;
    dspark_status st;

    *out = NULL;
    if ((st = dspark__config_text(&text, &n, path, err)) != DSPARK_OK) return st;
    st = dspark__config_parse(out, text, n, "config.json", err);
    free(text);
    if (st != DSPARK_OK) return st;
    st = hear_modelopt(*out, path, err);
    if (st != DSPARK_OK) {
        dspark__config_free(*out);
        *out = NULL;
    }
    return st;
}
