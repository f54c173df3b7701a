/* Runs a fuzz target over the files of a corpus, so that every finding of the past is a test
 * wherever the tree builds, without libFuzzer. Takes directories and files; descends one into the
 * other. Never mutates an input. Fails when it found no input at all. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static size_t n_inputs;

static int replay_file(const char *path, size_t n_bytes)
{
    FILE *f = fopen(path, "rb");
    /* An exact allocation, so that a sanitizer sees the first byte read beyond the input. */
    uint8_t *data = malloc(n_bytes ? n_bytes : 1);
    int ok = f && data && fread(data, 1, n_bytes, f) == n_bytes;
    if (ok) {
        LLVMFuzzerTestOneInput(data, n_bytes);
        n_inputs++;
    } else {
        fprintf(stderr, "%s: cannot be read\n", path);
    }
    free(data);
    if (f) fclose(f);
    return ok ? 0 : -1;
}

static int replay(const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0) {
        perror(path);
        return -1;
    }
    if (!S_ISDIR(st.st_mode)) return replay_file(path, (size_t)st.st_size);

    DIR *dir = opendir(path);
    if (!dir) {
        perror(path);
        return -1;
    }
    int result = 0;
    for (struct dirent *e; result == 0 && (e = readdir(dir));) {
        if (e->d_name[0] == '.') continue;
        size_t n = strlen(path) + strlen(e->d_name) + 2;
        char *child = malloc(n);
        if (!child) {
            result = -1;
            break;
        }
        snprintf(child, n, "%s/%s", path, e->d_name);
        result = replay(child);
        free(child);
    }
    closedir(dir);
    return result;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (replay(argv[i]) != 0) return 1;
    }
    printf("%zu inputs replayed\n", n_inputs);
    return n_inputs > 0 ? 0 : 1;
}
