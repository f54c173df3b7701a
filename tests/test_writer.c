/* The writer: what it writes reads back, what it refuses, and that nothing half-written is ever
 * seen. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ckpt/checkpoint.h"
#include "ckpt/writer.h"
#include "support/oom.h"
#include "support/stfile.h"
#include "support/tmpdir.h"

static const uint64_t shape23[2] = {2, 3}, shape5[1] = {5}, shape0[2] = {0, 7168};

static void test_round_trip(void **state)
{
    const char *dir = tmpdir_make(), *path = tmpdir_path(dir, "out.safetensors");
    const char *odd = "a\"\\\x01\x7f\n\xc3\xa9\xf0\x9f\x98\x80";
    unsigned char data[12 + 10 + 2];
    dspark_writer *w;
    dspark_error err;
    (void)state;

    for (size_t i = 0; i < sizeof data; i++) data[i] = stfile_byte(i + 7);
    assert_int_equal(dspark__writer_create(&w, path, &err), DSPARK_OK);
    assert_int_equal(dspark__writer_metadata(w, "format", "pt", &err), DSPARK_OK);
    assert_int_equal(dspark__writer_metadata(w, odd, odd, &err), DSPARK_OK);
    assert_int_equal(dspark__writer_declare(w, "z", DSPARK_BF16, 2, shape23, &err), DSPARK_OK);
    assert_int_equal(dspark__writer_declare(w, odd, DSPARK_F16, 1, shape5, &err), DSPARK_OK);
    assert_int_equal(dspark__writer_declare(w, "none", DSPARK_F32, 2, shape0, &err), DSPARK_OK);
    assert_int_equal(dspark__writer_declare(w, "scalar", DSPARK_I16, 0, NULL, &err), DSPARK_OK);
    for (size_t at = 0; at < sizeof data; at += 5) {
        size_t n = sizeof data - at < 5 ? sizeof data - at : 5;
        assert_int_equal(dspark__writer_data(w, data + at, n, &err), DSPARK_OK);
        assert_int_equal(dspark__writer_data(w, NULL, 0, &err), DSPARK_OK);
        assert_int_equal(access(path, F_OK), -1); /* not before commit */
    }
    assert_int_equal(dspark__writer_commit(w, &err), DSPARK_OK);
    assert_int_equal(tmpdir_count(dir), 1);

    dspark_checkpoint *c = stfile_open(path);
    assert_int_equal(dspark__checkpoint_count(c), 4);
    const dspark_tensor *z = dspark__checkpoint_find(c, "z");
    assert_ptr_equal(z, dspark__checkpoint_at(c, 0));
    assert_int_equal(z->dtype, DSPARK_BF16);
    assert_int_equal(z->shape[1], 3);
    assert_memory_equal(z->data, data, 12);
    assert_int_equal((uintptr_t)z->data % 8, 0);
    assert_memory_equal(dspark__checkpoint_find(c, odd)->data, data + 12, 10);
    assert_memory_equal(dspark__checkpoint_find(c, "scalar")->data, data + 22, 2);
    assert_int_equal(dspark__checkpoint_find(c, "none")->n_bytes, 0);
    assert_string_equal(dspark__checkpoint_metadata(c, "format"), "pt");
    assert_string_equal(dspark__checkpoint_metadata(c, odd), odd);
    dspark__checkpoint_close(c);
    tmpdir_remove(dir);
}

/* Data larger than the buffer, in pieces of awkward sizes. */
static void test_large_data(void **state)
{
    const char *dir = tmpdir_make(), *path = tmpdir_path(dir, "big");
    const uint64_t n = 5u << 20;
    static const size_t steps[] = {1, (1u << 20) - 3, 77, (1u << 20) + 1, 2u << 20, 1u << 20};
    unsigned char *data = malloc(n);
    dspark_writer *w;
    (void)state;
    for (size_t i = 0; i < n; i++) data[i] = (unsigned char)(i * 31 + (i >> 12));
    assert_int_equal(dspark__writer_create(&w, path, NULL), DSPARK_OK);
    assert_int_equal(dspark__writer_declare(w, "t", DSPARK_U8, 1, &n, NULL), DSPARK_OK);
    for (size_t at = 0, k = 0; at < n; k++) {
        size_t step = steps[k % 6] < n - at ? steps[k % 6] : n - at;
        assert_int_equal(dspark__writer_data(w, data + at, step, NULL), DSPARK_OK);
        at += step;
    }
    assert_int_equal(dspark__writer_commit(w, NULL), DSPARK_OK);
    dspark_checkpoint *c = stfile_open(path);
    assert_memory_equal(dspark__checkpoint_at(c, 0)->data, data, n);
    dspark__checkpoint_close(c);
    free(data);
    tmpdir_remove(dir);
}

static void test_empty_and_metadata_only(void **state)
{
    const char *dir = tmpdir_make(), *path = tmpdir_path(dir, "e");
    dspark_writer *w;
    (void)state;
    assert_int_equal(dspark__writer_create(&w, path, NULL), DSPARK_OK);
    assert_int_equal(dspark__writer_commit(w, NULL), DSPARK_OK);
    dspark_checkpoint *c = stfile_open(path);
    assert_int_equal(dspark__checkpoint_count(c), 0);
    dspark__checkpoint_close(c);
    assert_int_equal(dspark__writer_create(&w, path, NULL), DSPARK_OK); /* replaces */
    assert_int_equal(dspark__writer_metadata(w, "", "", NULL), DSPARK_OK);
    assert_int_equal(dspark__writer_commit(w, NULL), DSPARK_OK);
    c = stfile_open(path);
    assert_string_equal(dspark__checkpoint_metadata(c, ""), "");
    dspark__checkpoint_close(c);
    tmpdir_remove(dir);
}

/* A call that must fail; afterwards the writer is dead and leaves nothing behind. */
#define REFUSED(call, text)                                                             \
    do {                                                                                \
        assert_int_equal(dspark__writer_create(&w, path, &err), DSPARK_OK);             \
        assert_int_equal(dspark__writer_declare(w, "t", DSPARK_BF16, 2, shape23, &err), \
                         DSPARK_OK);                                                    \
        assert_int_equal(dspark__writer_metadata(w, "k", "v", &err), DSPARK_OK);        \
        assert_int_equal(call, DSPARK_EINVAL);                                          \
        if (!strstr(err.message, text)) fail_msg("%s: %s", text, err.message);          \
        assert_int_equal(dspark__writer_data(w, "", 0, &err), DSPARK_EINVAL);           \
        assert_int_equal(dspark__writer_commit(w, &err), DSPARK_EINVAL);                \
        assert_int_equal(tmpdir_count(dir), 0);                                         \
    } while (0)

static void test_refusals(void **state)
{
    const char *dir = tmpdir_make(), *path = tmpdir_path(dir, "x.safetensors");
    const uint64_t huge[2] = {UINT64_MAX, 2}, large[1] = {UINT64_MAX / 64}, odd[1] = {3};
    const uint64_t nine[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    char longer[1026];
    unsigned char data[13] = {0};
    dspark_writer *w;
    dspark_error err;
    (void)state;
    memset(longer, 'n', 1025);
    longer[1025] = '\0';

    REFUSED(dspark__writer_declare(w, "t", DSPARK_U8, 1, shape5, &err), "twice");
    REFUSED(dspark__writer_declare(w, "__metadata__", DSPARK_U8, 1, shape5, &err), "reserved");
    REFUSED(dspark__writer_declare(w, "\xff", DSPARK_U8, 1, shape5, &err), "UTF-8");
    REFUSED(dspark__writer_declare(w, longer, DSPARK_U8, 1, shape5, &err), "too long");
    REFUSED(dspark__writer_declare(w, "u", DSPARK_DTYPE_NONE, 1, shape5, &err), "dtype");
    REFUSED(dspark__writer_declare(w, "u", DSPARK_DTYPE_COUNT, 1, shape5, &err), "dtype");
    REFUSED(dspark__writer_declare(w, "u", DSPARK_U8, 9, nine, &err), "dimensions");
    REFUSED(dspark__writer_declare(w, "u", DSPARK_U8, 2, huge, &err), "64 bits");
    REFUSED((dspark__writer_declare(w, "u1", DSPARK_F64, 1, large, &err),
             dspark__writer_declare(w, "u2", DSPARK_F64, 1, large, &err),
             dspark__writer_declare(w, "u3", DSPARK_F64, 1, large, &err),
             dspark__writer_declare(w, "u4", DSPARK_F64, 1, large, &err)),
            "larger than files");
    REFUSED(dspark__writer_declare(w, "u", DSPARK_F4, 1, odd, &err), "whole number");
    REFUSED(dspark__writer_metadata(w, "k", "v2", &err), "twice");
    REFUSED(dspark__writer_metadata(w, "k2", "\xc0\x80", &err), "UTF-8");
    REFUSED(dspark__writer_data(w, data, 13, &err), "12 bytes");
    REFUSED((dspark__writer_data(w, data, 1, &err),
             dspark__writer_declare(w, "u", DSPARK_U8, 1, shape5, &err)),
            "before the first data");

    /* Too little data. */
    assert_int_equal(dspark__writer_create(&w, path, &err), DSPARK_OK);
    assert_int_equal(dspark__writer_declare(w, "t", DSPARK_BF16, 2, shape23, &err), DSPARK_OK);
    assert_int_equal(dspark__writer_data(w, data, 11, &err), DSPARK_OK);
    assert_int_equal(dspark__writer_commit(w, &err), DSPARK_EINVAL);
    assert_non_null(strstr(err.message, "12 bytes are declared, 11"));
    assert_int_equal(tmpdir_count(dir), 0);
    tmpdir_remove(dir);
}

static void test_paths(void **state)
{
    const char *dir = tmpdir_make();
    dspark_writer *w = (void *)&dir;
    dspark_error err;
    (void)state;
    assert_int_equal(dspark__writer_create(&w, dir, &err), DSPARK_EINVAL); /* a folder */
    assert_null(w);
    assert_int_equal(dspark__writer_create(&w, tmpdir_path(dir, ""), &err), DSPARK_EINVAL);
    assert_int_equal(dspark__writer_create(&w, tmpdir_path(dir, ".."), &err), DSPARK_EINVAL);
    assert_int_equal(dspark__writer_create(&w, "", &err), DSPARK_EINVAL);
    assert_int_equal(dspark__writer_create(&w, tmpdir_path(dir, "no/f"), &err), DSPARK_EOUTPUT);
    assert_non_null(strstr(err.message, "No such file"));
    assert_int_equal(mkfifo(tmpdir_path(dir, "pipe"), 0600), 0);
    assert_int_equal(dspark__writer_create(&w, tmpdir_path(dir, "pipe"), &err), DSPARK_EINVAL);
    assert_non_null(strstr(err.message, "not a regular file"));
    assert_int_equal(tmpdir_count(dir), 1);
    dspark__writer_abort(NULL);
    tmpdir_remove(dir);
}

/* Abort, and a replacement that fails: what stood there before still stands, byte for byte. */
static void test_old_file_survives(void **state)
{
    const char *dir = tmpdir_make(), *path = tmpdir_path(dir, "f");
    unsigned char data[12] = {0};
    dspark_writer *w, *v;
    (void)state;
    tmpdir_write(path, "old", 3);
    assert_int_equal(dspark__writer_create(&w, path, NULL), DSPARK_OK);
    assert_int_equal(dspark__writer_create(&v, path, NULL), DSPARK_OK); /* two at once */
    assert_int_equal(dspark__writer_declare(w, "t", DSPARK_BF16, 2, shape23, NULL), DSPARK_OK);
    assert_int_equal(dspark__writer_data(w, data, 12, NULL), DSPARK_OK);
    assert_int_equal(tmpdir_count(dir), 3);
    dspark__writer_abort(w);
    assert_int_equal(tmpdir_count(dir), 2);
    dspark__writer_abort(v);
    assert_int_equal(tmpdir_count(dir), 1);
    char text[8] = {0};
    FILE *f = fopen(path, "rb");
    assert_int_equal(fread(text, 1, 8, f), 3);
    fclose(f);
    assert_string_equal(text, "old");
    tmpdir_remove(dir);
}

/* A disk that fills up (a file size limit says the same): EOUTPUT, and the remains are removed. */
static void test_disk_full(void **state)
{
    const char *dir = tmpdir_make(), *path = tmpdir_path(dir, "f");
    const uint64_t n = 3u << 20;
    unsigned char *data = calloc(1, n);
    struct rlimit old, little;
    dspark_writer *w;
    dspark_error err = {0};
    (void)state;
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    little = old;
    little.rlim_cur = 100000;
    setrlimit(RLIMIT_FSIZE, &little);
    assert_int_equal(dspark__writer_create(&w, path, &err), DSPARK_OK);
    assert_int_equal(dspark__writer_declare(w, "t", DSPARK_U8, 1, &n, &err), DSPARK_OK);
    assert_int_equal(dspark__writer_data(w, data, n, &err), DSPARK_EOUTPUT);
    assert_non_null(strstr(err.message, "File too large"));
    assert_int_equal(dspark__writer_data(w, data, 0, &err), DSPARK_EOUTPUT);
    assert_int_equal(dspark__writer_commit(w, &err), DSPARK_EOUTPUT);
    setrlimit(RLIMIT_FSIZE, &old);
    assert_int_equal(tmpdir_count(dir), 0);
    free(data);
    tmpdir_remove(dir);
}

static dspark_status write_some(const char *path, dspark_error *err)
{
    dspark_writer *w;
    char name[32];
    dspark_status st = dspark__writer_create(&w, path, err);
    if (st != DSPARK_OK) return st;
    for (int i = 0; st == DSPARK_OK && i < 80; i++) {
        snprintf(name, sizeof name, "name.%d", i);
        st = dspark__writer_metadata(w, name, "value", err);
        if (st == DSPARK_OK) st = dspark__writer_declare(w, name, DSPARK_U8, 1, shape5, err);
    }
    for (int i = 0; st == DSPARK_OK && i < 80; i++) st = dspark__writer_data(w, "12345", 5, err);
    if (st == DSPARK_OK) return dspark__writer_commit(w, err);
    dspark__writer_abort(w);
    return st;
}

static void test_out_of_memory(void **state)
{
    const char *dir = tmpdir_make(), *path = tmpdir_path(dir, "f");
    (void)state;
    if (!oom_available()) skip();
    for (size_t n = 1;; n++) {
        dspark_error err = {0};
        oom_fail_nth(n);
        dspark_status st = write_some(path, &err);
        oom_stop();
        if (!oom_failed()) {
            assert_int_equal(st, DSPARK_OK);
            assert_true(n > 100);
            break;
        }
        if (st != DSPARK_ENOMEM) fail_msg("allocation %zu: %s: %s", n, err.where, err.message);
        assert_int_equal(err.code, DSPARK_ENOMEM);
        assert_int_equal(tmpdir_count(dir), 0);
    }
    dspark_checkpoint *c = stfile_open(path);
    assert_int_equal(dspark__checkpoint_count(c), 80);
    dspark__checkpoint_close(c);
    tmpdir_remove(dir);
}

/* Any other file, in one call: there as given, or as before. */
static void test_whole_file(void **state)
{
    const char *dir = tmpdir_make(), *path = tmpdir_path(dir, "f");
    struct rlimit old, little;
    struct stat info;
    char read_back[8];
    dspark_error err = {0};
    (void)state;
    tmpdir_write(tmpdir_path(dir, ".dspark-1-0.tmp"), "left", 4);
    assert_int_equal(dspark_file_write(path, "a\0b\n", 4, &err), DSPARK_OK);
    assert_int_equal(tmpdir_count(dir), 1);
    getrlimit(RLIMIT_FSIZE, &old);
    little = old;
    little.rlim_cur = 3;
    setrlimit(RLIMIT_FSIZE, &little);
    assert_int_equal(dspark_file_write(path, "other", 5, &err), DSPARK_EOUTPUT);
    setrlimit(RLIMIT_FSIZE, &old);
    for (size_t n = 1;; n++) {
        oom_fail_nth(n);
        dspark_status st = dspark_file_write(path, "a\0b\n", 4, &err);
        oom_stop();
        if (!oom_failed()) break;
        assert_int_equal(st, DSPARK_ENOMEM);
    }
    assert_int_equal(dspark_file_write(dir, "x", 1, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_file_write(NULL, "x", 1, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_file_write(path, NULL, 1, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_file_write(tmpdir_path(dir, "no/f"), "x", 1, &err), DSPARK_EOUTPUT);
    assert_int_equal(tmpdir_count(dir), 1);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fread(read_back, 1, sizeof read_back, f), 4);
    assert_memory_equal(read_back, "a\0b\n", 4);
    fclose(f);
    assert_int_equal(dspark_file_write(path, NULL, 0, &err), DSPARK_OK);
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_size, 0);
    tmpdir_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_large_data),
        cmocka_unit_test(test_empty_and_metadata_only),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_old_file_survives),
        cmocka_unit_test(test_disk_full),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_whole_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
