/* Fuzz target: whatever bytes a checkpoint's files hold, opening them ends in a usable checkpoint
 * or in a named error. The first byte of an input says what the rest is: 's' a safetensors file,
 * 'i' the index of two fixed shards, 'c' config.json. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ckpt/checkpoint.h"
#include "ckpt/config.h"
#include "ckpt/family.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char fuzz_folder[256];

/* Violations stop the fuzzer, and the replaying test with it. */
static void fuzz_demand(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "fuzz_checkpoint: %s\n", what);
    abort();
}

static void fuzz_put(const char *name, const void *bytes, size_t n)
{
    char path[320];
    snprintf(path, sizeof path, "%s/%s", fuzz_folder, name);
    /* Cut afterwards: some file systems sync a file that was emptied first. */
    int fd = open(path, O_WRONLY | O_CREAT, 0600);
    fuzz_demand(fd >= 0 && write(fd, bytes, n) == (ssize_t)n && ftruncate(fd, (off_t)n) == 0,
                "cannot write");
    close(fd);
}

static void fuzz_clean(void)
{
    static const char *const names[] = {"one.safetensors", "two.safetensors", "file.safetensors",
                                        "model.safetensors.index.json"};
    char path[320];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", fuzz_folder, names[i]);
        unlink(path);
    }
    rmdir(fuzz_folder);
}

/* Every tensor is where it says, once, with as many bytes as its shape needs: touch them all. */
static void fuzz_use(const dspark_checkpoint *c)
{
    static volatile unsigned char sink;
    uint64_t total = 0;
    for (size_t i = 0; i < dspark__checkpoint_count(c); i++) {
        const dspark_tensor *t = dspark__checkpoint_at(c, i);
        const unsigned char *p = t->data;
        fuzz_demand(dspark__checkpoint_find(c, t->name) == t, "a tensor is not found by its name");
        fuzz_demand(dspark__checkpoint_verify(c, t, NULL) == DSPARK_OK,
                    "a tensor is not in a file");
        fuzz_demand(t->rank <= DSPARK_MAX_RANK, "too many dimensions");
        for (uint64_t k = 0; k < t->n_bytes; k++) sink = p[k];
        total += t->n_bytes;
        dspark__checkpoint_drop(c, t, 0, t->n_bytes);
    }
    uint64_t files = 0;
    for (size_t i = 0; i < dspark__checkpoint_file_count(c); i++)
        files += dspark__checkpoint_file_bytes(c, i);
    fuzz_demand(total < files, "tensors hold more bytes than their files");
    (void)sink;
}

static dspark_status fuzz_open(const char *name)
{
    char path[320];
    dspark_checkpoint *c = (void *)path;
    dspark_error err = {0};
    snprintf(path, sizeof path, "%s/%s", fuzz_folder, name);
    dspark_status st = dspark__checkpoint_open(&c, path, &err);
    if (st == DSPARK_OK) {
        dspark__family_report report;
        fuzz_use(c);
        fuzz_demand(dspark__family_detect(&report, NULL, 0, c, &err) == DSPARK_OK, "no family");
    } else {
        fuzz_demand(!c, "an object in spite of an error");
        fuzz_demand(err.code == st && err.message[0] && err.where[0], "an error without a name");
        fuzz_demand(st == DSPARK_EFORMAT || st == DSPARK_EUNSUPPORTED || st == DSPARK_EIO ||
                        st == DSPARK_ENOMEM,
                    "an unexpected status");
    }
    dspark__checkpoint_close(c);
    return st;
}

static void fuzz_prepare(void)
{
    /* Headers of 0x3c bytes, then 2 and 1 bytes of data. */
    static const char one[] = "\x3c\0\0\0\0\0\0\0{\"a.weight\":{\"dtype\":\"U8\",\"shape\":[2],"
                              "\"data_offsets\":[0,2]}}xy";
    static const char two[] =
        "\x3c\0\0\0\0\0\0\0{\"b.weight\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}z";
    static const char index[] =
        "{\"weight_map\":{\"a.weight\":\"one.safetensors\",\"b.weight\":\"two.safetensors\"}}";
    const char *base = getenv("TMPDIR");
    if (fuzz_folder[0]) return;
    snprintf(fuzz_folder, sizeof fuzz_folder, "%s/dspark-fuzz-XXXXXX", base ? base : P_tmpdir);
    fuzz_demand(mkdtemp(fuzz_folder) != NULL, "no temporary folder");
    atexit(fuzz_clean);
    fuzz_put("one.safetensors", one, sizeof one - 1);
    fuzz_put("two.safetensors", two, sizeof two - 1);
    fuzz_put("model.safetensors.index.json", index, sizeof index - 1);
    fuzz_demand(fuzz_open("model.safetensors.index.json") == DSPARK_OK, "the shards are broken");
}

static void fuzz_config(const char *text, size_t n)
{
    dspark__config_doc *doc = NULL;
    dspark__family_report report;
    dspark_error err = {0};
    dspark_status st = dspark__config_parse(&doc, text, n, "config.json", &err);
    if (st == DSPARK_OK) {
        fuzz_demand(dspark__config_check(&doc->config, "config.json", NULL) == DSPARK_OK,
                    "a parsed config that does not hold together");
    } else {
        fuzz_demand(!doc, "an object in spite of an error");
        fuzz_demand(err.code == st && err.message[0], "an error without a name");
    }
    dspark__config_free(doc);
    fuzz_demand(dspark__family_detect(&report, text, n, NULL, &err) == DSPARK_OK, "no family");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_prepare();
    if (size == 0) return 0;
    if (data[0] == 's') {
        fuzz_put("file.safetensors", data + 1, size - 1);
        (void)fuzz_open("file.safetensors");
    } else if (data[0] == 'i') {
        fuzz_put("model.safetensors.index.json", data + 1, size - 1);
        (void)fuzz_open("model.safetensors.index.json");
    } else if (data[0] == 'c') {
        fuzz_config((const char *)data + 1, size - 1);
    }
    return 0;
}
