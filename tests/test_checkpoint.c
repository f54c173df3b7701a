/* Checkpoints as sets of files: what is found in a folder, what an index may say, that names are
 * answered right across shards, that a shrunken file is noticed, that no allocation is assumed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ckpt/checkpoint.h"
#include "support/oom.h"
#include "support/stfile.h"
#include "support/tmpdir.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define INDEX    "model.safetensors.index.json"
#define S1       "model-00001-of-00002.safetensors"
#define S2       "model-00002-of-00002.safetensors"
#define T1(name) "{\"" name "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}"
#define T2(a, b)                                                              \
    "{\"" a "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"" b \
    "\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}"
#define MAP(text) "{\"metadata\":{\"total_size\":1e3},\"weight_map\":{" text "}}"

static void put(const char *dir, const char *name, const char *header, size_t n)
{
    stfile_write(tmpdir_path(dir, name), header, n);
}

static void put_text(const char *dir, const char *name, const char *text)
{
    tmpdir_write(tmpdir_path(dir, name), text, strlen(text));
}

static void holds(const char *path, const char *tensor)
{
    dspark_checkpoint *c = stfile_open(path);
    if (!dspark__checkpoint_find(c, tensor)) fail_msg("%s: %s is not there", path, tensor);
    dspark__checkpoint_close(c);
}

/* ---- discovery ----------------------------------------------------------------------------- */

static void test_discovery(void **state)
{
    const char *dir = tmpdir_make();
    (void)state;

    stfile_refuse(dir, DSPARK_EIO, "model.safetensors|index.json");
    stfile_refuse(tmpdir_path(dir, "nothing"), DSPARK_EIO, "nothing|No such file");
    stfile_refuse("", DSPARK_EIO, "No such file");
    put(dir, ".hidden.safetensors", T1("hidden"), 1);
    put_text(dir, "notes.safetensors.txt", "");
    stfile_refuse(dir, DSPARK_EIO, "model.safetensors");

    /* From the weakest to the strongest: each one added wins over all before it. */
    put(dir, "other.safetensors", T1("other"), 1);
    holds(dir, "other");
    put(dir, "more.safetensors", T1("more"), 1);
    stfile_refuse(dir, DSPARK_EFORMAT, "2 files|more.safetensors|other.safetensors");
    put(dir, "less.safetensors", T1("less"), 1);
    stfile_refuse(dir, DSPARK_EFORMAT, "3 files|less.safetensors|more.safetensors");
    put_text(dir, "x.safetensors.index.json", MAP("\"less\":\"less.safetensors\""));
    holds(dir, "less");
    put_text(dir, "y.safetensors.index.json", MAP("\"more\":\"more.safetensors\""));
    stfile_refuse(dir, DSPARK_EFORMAT, "2 files|x.safetensors.index.json|y.safetensors.index.json");
    put(dir, "model.safetensors", T1("single"), 1);
    holds(dir, "single");
    put_text(dir, INDEX, MAP("\"more\":\"more.safetensors\""));
    holds(dir, "more");

    /* A file by its own name: no folder is looked at. */
    holds(tmpdir_path(dir, "other.safetensors"), "other");
    holds(tmpdir_path(dir, "x.safetensors.index.json"), "less");
    put(dir, "no-suffix", T1("bare"), 1);
    holds(tmpdir_path(dir, "no-suffix"), "bare");
    stfile_refuse(tmpdir_path(dir, "no-suffix/"), DSPARK_EIO, "no-suffix");
    char cwd[4096];
    assert_non_null(getcwd(cwd, sizeof cwd));
    assert_int_equal(chdir(dir), 0);
    holds("no-suffix", "bare");
    holds(".", "more");
    assert_int_equal(chdir(cwd), 0);
    tmpdir_remove(dir);
}

/* Hub caches hold links into another folder: followed, under the name of the link. */
static void test_links_are_followed(void **state)
{
    const char *dir = tmpdir_make(), *blobs = tmpdir_make();
    (void)state;
    put(blobs, "f00d", T1("t"), 1);
    assert_int_equal(symlink(tmpdir_path(blobs, "f00d"), tmpdir_path(dir, "model.safetensors")), 0);
    dspark_checkpoint *c = stfile_open(dir);
    assert_string_equal(dspark__checkpoint_at(c, 0)->file, "model.safetensors");
    dspark__checkpoint_close(c);
    tmpdir_remove(dir);
    tmpdir_remove(blobs);
}

/* ---- shards -------------------------------------------------------------------------------- */

static const char *sharded(void)
{
    const char *dir = tmpdir_make();
    put(dir, S1, T2("b", "a"), 3);
    put(dir, S2, T1("c"), 1);
    put_text(dir, INDEX, MAP("\"c\":\"" S2 "\",\"a\":\"" S1 "\",\"b\":\"" S1 "\""));
    return dir;
}

static void test_shards(void **state)
{
    static const char *const order[] = {"b", "a", "c"}; /* shards by name, then by offset */
    const char *dir = sharded();
    (void)state;
    dspark_checkpoint *c = stfile_open(dir);
    assert_int_equal(dspark__checkpoint_count(c), 3);
    assert_int_equal(dspark__checkpoint_file_count(c), 2);
    assert_string_equal(dspark__checkpoint_file_name(c, 0), S1);
    assert_string_equal(dspark__checkpoint_file_name(c, 1), S2);
    for (size_t i = 0; i < 3; i++) {
        const dspark_tensor *t = dspark__checkpoint_at(c, i);
        assert_string_equal(t->name, order[i]);
        assert_ptr_equal(dspark__checkpoint_find(c, order[i]), t);
        assert_string_equal(t->file, i < 2 ? S1 : S2);
        assert_int_equal(dspark__checkpoint_verify(c, t, NULL), DSPARK_OK);
    }
    assert_int_equal(*(const unsigned char *)dspark__checkpoint_find(c, "a")->data, stfile_byte(1));
    dspark__checkpoint_close(c);
    tmpdir_remove(dir);
}

static void test_broken_indexes(void **state)
{
    static const struct {
        const char *text;
        dspark_status code;
        const char *texts;
    } cases[] = {
        {MAP("\"a\":\"" S1 "\",\"b\":\"" S1 "\",\"c\":\"" S2 "\",\"d\":\"" S2 "\""), DSPARK_EFORMAT,
         INDEX "|d|" S2},
        {MAP("\"a\":\"" S1 "\",\"b\":\"" S1 "\",\"c\":\"" S1 "\""), DSPARK_EFORMAT, "c|" S1},
        {MAP("\"a\":\"" S1 "\",\"b\":\"" S2 "\",\"c\":\"" S2 "\""), DSPARK_EFORMAT, "b|" S1 "|" S2},
        {MAP("\"a\":\"" S1 "\",\"c\":\"" S2 "\""), DSPARK_EFORMAT, INDEX "|b|" S1},
        {MAP("\"a\":\"" S1 "\",\"b\":\"" S1 "\",\"c\":\"gone.safetensors\""), DSPARK_EIO,
         "gone.safetensors|" INDEX},
        {MAP("\"a\":\"" S1 "\",\"a\":\"" S1 "\",\"b\":\"" S1 "\",\"c\":\"" S2 "\""), DSPARK_EFORMAT,
         INDEX "|a|twice"},
        {MAP("\"a\":\"/etc/passwd\""), DSPARK_EFORMAT, "a|/etc/passwd|bare"},
        {MAP("\"a\":\"../" S1 "\""), DSPARK_EFORMAT, "a|../|bare"},
        {MAP("\"a\":\"sub/" S1 "\""), DSPARK_EFORMAT, "a|sub/|bare"},
        {MAP("\"a\":\"sub\\\\" S1 "\""), DSPARK_EFORMAT, "a|bare"},
        {MAP("\"a\":\"..\""), DSPARK_EFORMAT, "a|folder"},
        {MAP("\"a\":\".\""), DSPARK_EFORMAT, "a|folder"},
        {MAP("\"a\":\"\""), DSPARK_EFORMAT, "a|empty"},
        {MAP("\"a\":\"x\\u0000" S1 "\""), DSPARK_EFORMAT, "NUL"},
        {MAP("\"a\":7"), DSPARK_EFORMAT, "weight_map|string"},
        {MAP("\"a\":null"), DSPARK_EFORMAT, "weight_map|string"},
        {MAP(""), DSPARK_EFORMAT, "weight_map|empty"},
        {"{\"weight_map\":[]}", DSPARK_EFORMAT, "weight_map"},
        {"{\"metadata\":{}}", DSPARK_EFORMAT, "weight_map|missing"},
        {"{\"weight_map\":{\"a\":\"x\"},\"weight_map\":{}}", DSPARK_EFORMAT, "weight_map|twice"},
        {"{\"metadata\":{},\"metadata\":{}}", DSPARK_EFORMAT, "metadata|twice"},
        {"{\"metadata\":[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}", DSPARK_EFORMAT, "nesting"},
        {"{\"metadata\":{\"x\":tru}}", DSPARK_EFORMAT, INDEX "|value"},
        {"{\"metadata\":{\"x\":1,}}", DSPARK_EFORMAT, INDEX "|string"},
        {"{\"metadata\":[1 2]}", DSPARK_EFORMAT, INDEX "|','"},
        {"{\"metadata\":[}", DSPARK_EFORMAT, INDEX "|value"},
        {"", DSPARK_EFORMAT, INDEX "|end of the text"},
        {"[]", DSPARK_EFORMAT, INDEX "|'{'"},
        {"{", DSPARK_EFORMAT, INDEX},
    };
    const char *dir = sharded();
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        put_text(dir, INDEX, cases[i].text);
        stfile_refuse(dir, cases[i].code, cases[i].texts);
    }
    /* What may stand beside the map. */
    put_text(dir, INDEX,
             " {\"x\":[{},[],[[-1.5e+3,true,false,null,\"\\n\"]],{\"y\":{\"z\":[0]}}],"
             "\"weight_map\":{\"a\":\"" S1 "\",\"b\":\"" S1 "\",\"c\":\"" S2 "\"}} ");
    holds(dir, "c");
    tmpdir_remove(dir);
}

static void test_tensor_in_two_shards(void **state)
{
    const char *dir = sharded();
    (void)state;
    put(dir, S2, T1("a"), 1);
    stfile_refuse(dir, DSPARK_EFORMAT, "a|" S1 "|" S2);
    put(dir, S2, T1("c"), 0); /* a broken shard is named */
    stfile_refuse(dir, DSPARK_EFORMAT, S2 "|truncated");
    tmpdir_remove(dir);
}

static void test_too_many_shards(void **state)
{
    const char *dir = tmpdir_make();
    char *text = malloc(5000 * 32), *at = text;
    (void)state;
    at += sprintf(at, "{\"weight_map\":{");
    for (int i = 0; i < 5000; i++) at += sprintf(at, "%s\"t%d\":\"f%d\"", i ? "," : "", i, i);
    strcpy(at, "}}");
    put_text(dir, INDEX, text);
    stfile_refuse(dir, DSPARK_EUNSUPPORTED, "4096");
    free(text);
    tmpdir_remove(dir);
}

/* ---- while open ---------------------------------------------------------------------------- */

static void test_shrunken_file_is_noticed(void **state)
{
    const char *dir = tmpdir_make();
    const char *file = tmpdir_path(dir, "model.safetensors");
    dspark_error err;
    (void)state;
    stfile_write(file, T2("a", "b"), 3);
    dspark_checkpoint *c = stfile_open(dir);
    const dspark_tensor *a = dspark__checkpoint_find(c, "a"), *b = dspark__checkpoint_find(c, "b");
    uint64_t size = dspark__checkpoint_file_bytes(c, 0);
    assert_int_equal(truncate(file, (off_t)size - 1), 0);
    char number[32];
    snprintf(number, sizeof number, "to %llu bytes", (unsigned long long)size - 1);
    assert_int_equal(dspark__checkpoint_verify(c, a, &err), DSPARK_OK);
    assert_int_equal(dspark__checkpoint_verify(c, b, &err), DSPARK_EIO);
    assert_non_null(strstr(err.message, number));
    assert_non_null(strstr(err.message, "b ends at"));
    dspark_tensor foreign = {.name = "f", .data = "x", .n_bytes = 1};
    assert_int_equal(dspark__checkpoint_verify(c, &foreign, &err), DSPARK_EINVAL);
    dspark__checkpoint_drop(c, &foreign, 0, 1);
    dspark__checkpoint_close(c);
    tmpdir_remove(dir);
}

/* File pages of this process that are in memory. */
static long resident_file_pages(void)
{
    long total = 0, resident = 0, file = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%ld %ld %ld", &total, &resident, &file), 3);
    fclose(f);
    return file;
}

/* Pages of a range that is dropped leave the process; their content comes back from the file. */
static void test_drop(void **state)
{
    enum { PAGES = 2048, N = PAGES * 4096 };
    static const uint64_t ranges[][2] = {
        {0, N}, {0, UINT64_MAX}, {N, 1}, {N + 1, 5}, {UINT64_MAX, UINT64_MAX},
        {1, 1}, {4000, 9000},    {5, 0}};
    const char *dir = tmpdir_make();
    char header[128];
    unsigned char *expected = malloc(N);
    (void)state;
    snprintf(header, sizeof header,
             "{\"a\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[0,%d]}}", N, N);
    put(dir, "model.safetensors", header, N);
    for (size_t i = 0; i < N; i++) expected[i] = stfile_byte(i);
    dspark_checkpoint *c = stfile_open(dir);
    const dspark_tensor *t = dspark__checkpoint_at(c, 0);
    for (size_t k = 0; k < COUNT(ranges); k++) {
        assert_memory_equal(t->data, expected, N);
        long before = resident_file_pages();
        dspark__checkpoint_drop(c, t, ranges[k][0], ranges[k][1]);
        long gone = before - resident_file_pages();
        if (k < 2)
            assert_true(gone > PAGES / 2);
        else
            assert_true(gone < PAGES / 2); /* a huge page's mapping may go as a whole */
    }
    dspark__checkpoint_close(c);
    tmpdir_remove(dir);
    free(expected);
}

/* ---- out of memory ------------------------------------------------------------------------- */

static size_t open_descriptors(void)
{
    return tmpdir_count("/proc/self/fd");
}

/* Every allocation failing once, and everything failing from there on. */
static void each_allocation_fails(const char *path)
{
    size_t descriptors = open_descriptors();
    for (size_t n = 1;; n++) {
        size_t failures = 0;
        for (int all = 0; all <= 1; all++) {
            dspark_checkpoint *c = (void *)&failures;
            dspark_error err = {0};
            if (all)
                oom_fail_from(n);
            else
                oom_fail_nth(n);
            dspark_status st = dspark__checkpoint_open(&c, path, &err);
            oom_stop();
            failures += oom_failed();
            if (oom_failed()) {
                if (st != DSPARK_ENOMEM)
                    fail_msg("allocation %zu: %s: %s", n, err.where, err.message);
                assert_int_equal(err.code, DSPARK_ENOMEM);
                assert_null(c);
            } else {
                assert_int_equal(st, DSPARK_OK);
            }
            dspark__checkpoint_close(c);
        }
        if (!failures) {
            assert_true(n > 5);
            break;
        }
    }
    assert_int_equal(open_descriptors(), descriptors);
}

static void test_out_of_memory(void **state)
{
    (void)state;
    if (!oom_available()) skip();
    const char *dir = sharded();
    each_allocation_fails(dir);
    each_allocation_fails(tmpdir_path(dir, S1));
    assert_int_equal(unlink(tmpdir_path(dir, INDEX)), 0);
    assert_int_equal(unlink(tmpdir_path(dir, S2)), 0);
    char *header = malloc(20000), *at = header;
    at += sprintf(at, "{\"__metadata__\":{\"k\":\"v\"");
    for (int i = 0; i < 40; i++) at += sprintf(at, ",\"k%d\":\"v\"", i);
    at += sprintf(at, "}");
    for (int i = 0; i < 200; i++)
        at += sprintf(at, ",\"t%d\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}", i);
    strcpy(at, "}");
    put(dir, S1, header, 0); /* found by listing the folder; tables and lists grow */
    free(header);
    each_allocation_fails(dir);
    tmpdir_remove(dir);
}

/* Nothing is read but headers: a huge sparse data section opens at once and stays out of memory. */
static void test_data_is_not_read(void **state)
{
    const char *dir = tmpdir_make();
    const char *file = tmpdir_path(dir, "model.safetensors");
    const uint64_t n = UINT64_C(1) << 36;
    char header[160];
    (void)state;
    snprintf(header, sizeof header,
             "{\"a\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[0,%llu]}}",
             (unsigned long long)n, (unsigned long long)n);
    stfile_write(file, header, 0);
    assert_int_equal(truncate(file, (off_t)(8 + strlen(header) + n)), 0);
    dspark_checkpoint *c = stfile_open(dir);
    const dspark_tensor *t = dspark__checkpoint_at(c, 0);
    assert_int_equal(t->n_bytes, n);
    unsigned char resident[16];
    uintptr_t page = ((uintptr_t)t->data + n / 2) & ~(uintptr_t)4095;
    assert_int_equal(mincore((void *)page, sizeof resident * 4096, resident), 0);
    for (size_t i = 0; i < sizeof resident; i++) assert_int_equal(resident[i] & 1, 0);
    dspark__checkpoint_close(c);
    tmpdir_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_discovery),
        cmocka_unit_test(test_links_are_followed),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_broken_indexes),
        cmocka_unit_test(test_tensor_in_two_shards),
        cmocka_unit_test(test_too_many_shards),
        cmocka_unit_test(test_shrunken_file_is_noticed),
        cmocka_unit_test(test_drop),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_data_is_not_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
