/* The rules of the safetensors format: one good or broken file per rule, and what the refusal must
 * name. Faults that users of other readers have reported have their numbers of docs/faults.md. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ckpt/checkpoint.h"
#include "ckpt/dtype.h"
#include "support/stfile.h"
#include "support/tmpdir.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static const char *path; /* of the file under test */

static int set_up(void **state)
{
    static char text[512];
    (void)state;
    snprintf(text, sizeof text, "%s", tmpdir_path(tmpdir_make(), "m.safetensors"));
    path = text;
    return 0;
}

static void refuse(dspark_status code, const char *texts)
{
    char with_name[300];
    snprintf(with_name, sizeof with_name, "m.safetensors|%s", texts);
    stfile_refuse(path, code, with_name);
}

#define TEST4 "{\"test\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}"

static void test_golden_file(void **state)
{
    (void)state;
    assert_int_equal(strlen(TEST4), 60);
    stfile_write(path, TEST4, 16);
    dspark_checkpoint *c = stfile_open(path);
    assert_int_equal(dspark__checkpoint_count(c), 1);
    const dspark_tensor *t = dspark__checkpoint_find(c, "test");
    assert_ptr_equal(t, dspark__checkpoint_at(c, 0));
    assert_null(dspark__checkpoint_at(c, 1));
    assert_null(dspark__checkpoint_find(c, "tes"));
    assert_null(dspark__checkpoint_find(c, ""));
    assert_int_equal(t->dtype, DSPARK_I32);
    assert_int_equal(t->rank, 2);
    assert_int_equal(t->shape[0], 2);
    assert_int_equal(t->n_elements, 4);
    assert_int_equal(t->n_bytes, 16);
    assert_string_equal(t->file, "m.safetensors");
    for (size_t i = 0; i < 16; i++)
        assert_int_equal(((const unsigned char *)t->data)[i], stfile_byte(i));
    assert_int_equal(dspark__checkpoint_file_count(c), 1);
    assert_string_equal(dspark__checkpoint_file_name(c, 0), "m.safetensors");
    assert_int_equal(dspark__checkpoint_file_bytes(c, 0), 84);
    assert_null(dspark__checkpoint_file_name(c, 1));
    assert_int_equal(dspark__checkpoint_file_bytes(c, 1), 0);
    assert_null(dspark__checkpoint_metadata(c, "format"));
    dspark__checkpoint_close(c);
    dspark__checkpoint_close(NULL);
}

typedef struct good_case {
    const char *header;
    size_t n_data, n_tensors;
} good_case;

#define E(dtype, shape, begin, end) \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

static void test_good_files(void **state)
{
    static const good_case cases[] = {
        {"{}", 0, 0},
        {" \t\r\n{ } \n ", 0, 0},
        {"\t\n" TEST4 "    ", 16, 1},
        {"{\"__metadata__\":null}", 0, 0},
        {"{\"__metadata__\":{}}", 0, 0},
        {"{\"a\":" E("F32", "[2,0]", 0, 0) "}", 0, 1},
        {"{\"a\":" E("F4", "[1,2]", 0, 1) "}", 1, 1},
        {"{\"a\":" E("F6_E2M3", "[4]", 0, 3) "}", 3, 1},
        {"{\"a\":" E("BF16", "[]", 0, 2) "}", 2, 1},
        {"{\"a\":" E("U8", "[1,1,1,1,1,1,1,3]", 0, 3) "}", 3, 1},
        /* Empty tensors share a boundary with a neighbour, before, between and after. */
        {"{\"c\":" E("U8", "[0]", 4, 4) ",\"b\":" E("U8", "[4]", 0, 4) ",\"a\":" E(
             "BF16", "[0,7168]", 0, 0) ",\"d\":" E("U8", "[0]", 4, 4) "}",
         4, 4},
        {"{\"a\":{\"data_offsets\":[0,1],\"shape\":[1],\"dtype\":\"BOOL\"}}", 1, 1},
        {"{\"\":" E("U8", "[1]", 0, 1) "}", 1, 1},
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        stfile_write(path, cases[i].header, cases[i].n_data);
        dspark_checkpoint *c = stfile_open(path);
        assert_int_equal(dspark__checkpoint_count(c), cases[i].n_tensors);
        dspark__checkpoint_close(c);
    }
}

typedef struct bad_case {
    const char *header;
    size_t n_data;
    dspark_status code;
    const char *texts;
} bad_case;

#define BAD DSPARK_EFORMAT

static void test_broken_files(void **state)
{
    static const bad_case cases[] = {
        /* Sizes that do not agree with the file (faults.md F1, F8). */
        {TEST4, 17, BAD, "trailing|16 bytes|has 17"},
        {TEST4, 16 + 13, BAD, "trailing|16 bytes|has 29"},
        {TEST4, 15, BAD, "truncated|16 bytes|has 15|83"},
        {TEST4, 0, BAD, "truncated|16 bytes|has 0"},
        {"{}", 1, BAD, "trailing"},
        /* Shape against range (faults.md F2, F3). */
        {"{\"test\":" E("I32", "[2,2]", 0, 4) "}", 4, BAD, "test|16 bytes|[0, 4]|[2, 2]"},
        {"{\"n.weight\":" E("F32", "[1000,1000]", 0, 4) "}", 4, BAD, "n.weight|4000000|hold 4"},
        {"{\"a\":" E("I32", "[2,18446744073709551614]", 0, 16) "}", 16, BAD, "a|elements"},
        {"{\"a\":" E("I32", "[2,9223372036854775807]", 0, 16) "}", 16, BAD, "a|bits"},
        {"{\"a\":" E("I32", "[18446744073709551616]", 0, 16) "}", 16, BAD,
         "a|shape|18446744073709551616|64 bits"},
        {"{\"a\":" E("BF16", "[4294967296,4294967296]", 0, 1099511627776) "}", 16, BAD,
         "a|elements|4294967296"},
        {"{\"a\":" E("U8", "[9223372036854775808,4,0]", 0, 0) "}", 0, BAD, "a|elements"},
        {"{\"a\":" E("F4", "[1,3]", 0, 1) "}", 1, BAD, "a|whole number of bytes"},
        {"{\"a\":" E("F6_E3M2", "[3]", 0, 2) "}", 2, BAD, "a|whole number of bytes"},
        /* Dtypes (faults.md F4). */
        {"{\"a\":{\"dtype\":\"BF17\",\"shape\":[1],\"data_offsets\":[9223372036854775808,0]}}", 2,
         BAD, "a|BF17"},
        {"{\"a\":" E("bf16", "[1]", 0, 2) "}", 2, BAD, "a|bf16"},
        {"{\"a\":" E("?", "[1]", 0, 2) "}", 2, BAD, "a|dtype"},
        {"{\"a\":" E("", "[1]", 0, 2) "}", 2, BAD, "a|dtype"},
        {"{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,2]}}", 2, BAD, "a|dtype|string"},
        {"{\"a\":{\"dtype\":null,\"shape\":[1],\"data_offsets\":[0,2]}}", 2, BAD, "a|dtype"},
        /* Ranges together (faults.md F5). */
        {"{\"q\":" E("U8", "[16]", 0, 16) ",\"kv\":" E("U8", "[16]", 0, 16) "}", 16, BAD,
         "overlap|q|kv"},
        {"{\"q\":" E("U8", "[16]", 0, 16) ",\"kv\":" E("U8", "[16]", 8, 24) "}", 24, BAD,
         "overlap|[8, 24]|16"},
        {"{\"a\":" E("U8", "[4]", 0, 4) ",\"b\":" E("U8", "[4]", 8, 12) "}", 12, BAD,
         "b|gap|[8, 12]|4"},
        {"{\"a\":" E("U8", "[64]", 0, 64) ",\"b\":" E("U8", "[4]", 128, 132) "}", 132, BAD,
         "b|gap"},
        {"{\"a\":" E("U8", "[4]", 4, 8) "}", 8, BAD, "a|gap"},
        {"{\"a\":" E("U8", "[4]", 0, 4) ",\"z\":" E("U8", "[0]", 2, 2) "}", 4, BAD, "z|overlap"},
        {"{\"a\":" E("U8", "[4]", 0, 4) ",\"z\":" E("U8", "[0]", 9, 9) "}", 4, BAD, "z|gap"},
        /* Numbers that are no offsets (faults.md F6). */
        {"{\"a\":" E("U8", "[16]", -8, 8) "}", 16, BAD, "a|data_offsets|-8|negative"},
        {"{\"a\":" E("U8", "[8]", 16, 8) "}", 16, BAD, "a|[16, 8] end before"},
        {"{\"a\":" E("U8", "[8]", 0.0, 8) "}", 8, BAD, "a|data_offsets|0.0|integer"},
        {"{\"a\":" E("U8", "[8]", 0, 8e0) "}", 8, BAD, "a|8e0"},
        {"{\"a\":" E("U8", "[8]", 0, 08) "}", 8, BAD, "a|leading zeros"},
        {"{\"a\":" E("U8", "[-0]", 0, 0) "}", 0, BAD, "a|shape|negative"},
        {"{\"a\":" E("U8", "[8]", 0, 18446744073709551624) "}", 8, BAD, "a|18446744073709551624"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0]}}", 8, BAD,
         "a|data_offsets|1"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8,8]}}", 8, BAD, "a|3"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,\"8\"]}}", 8, BAD, "a|number"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":8,\"data_offsets\":[0,8]}}", 8, BAD, "a|shape"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[[8]],\"data_offsets\":[0,8]}}", 8, BAD, "a|shape"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8,],\"data_offsets\":[0,8]}}", 8, BAD, "a|shape"},
        /* Duplicates at every level (faults.md F7). */
        {"{\"a\":" E("U8", "[4]", 0, 4) ",\"a\":" E("U8", "[4]", 4, 8) "}", 8, BAD, "a|twice"},
        {"{\"a\":" E("U8", "[4]", 0, 4) ",\"a\":" E("U8", "[4]", 0, 4) "}", 4, BAD, "a|twice"},
        {"{\"a\":" E("U8", "[4]", 0, 4) ",\"\\u0061\":" E("U8", "[4]", 4, 8) "}", 8, BAD, "twice"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, BAD,
         "a|dtype|twice"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,1]}}", 1, BAD,
         "a|shape|twice"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, BAD, "__metadata__|twice"},
        {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"1\"}}", 0, BAD, "__metadata__|k|twice"},
        /* Entries that are no entries. */
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, BAD, "a|data_offsets|missing"},
        {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, BAD, "a|shape|missing"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, BAD, "a|dtype|missing"},
        {"{\"a\":{}}", 0, BAD, "a|dtype|missing"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"strides\":[1]}}", 1, BAD,
         "a|strides"},
        {"{\"a\":[\"U8\",[1],[0,1]]}", 1, BAD, "a|'{'"},
        {"{\"a\":null}", 0, BAD, "a"},
        {"{\"__metadata__\":{\"k\":1}}", 0, BAD, "__metadata__|string"},
        {"{\"__metadata__\":{\"k\":null}}", 0, BAD, "__metadata__|string"},
        {"{\"__metadata__\":[]}", 0, BAD, "__metadata__"},
        {"{\"__metadata__\":{\"k\":{\"n\":\"v\"}}}", 0, BAD, "__metadata__"},
        /* Text that is not JSON, or JSON that is no header. */
        {"", 0, BAD, "header|end of the text"},
        {"{", 0, BAD, "header|end of the text"},
        {"\xff", 0, BAD, "header|0xff"},
        {"{\"\xff\":1}", 0, BAD, "header|UTF-8|0xff"},
        {"{\"\xc0\x80\":1}", 0, BAD, "UTF-8"},
        {"{\"\xed\xa0\x80\":1}", 0, BAD, "UTF-8"},
        {"{\"\xe2\x82\":1}", 0, BAD, "UTF-8"},
        {"\xef\xbb\xbf{}", 0, BAD, "0xef"},
        {"[]", 0, BAD, "header|'{'"},
        {"7", 0, BAD, "header"},
        {"{} {}", 0, BAD, "header|end of the text"},
        {"{}x", 0, BAD, "header"},
        {"{,}", 0, BAD, "header"},
        {"{\"a\"}", 0, BAD, "header"},
        {"{\"a\":" E("U8", "[1]", 0, 1) ",}", 1, BAD, "header"},
        {"{\"a\":" E("U8", "[1]", 0, 1), 1, BAD, "header"},
        {"{a:1}", 0, BAD, "header"},
        {"{'a':1}", 0, BAD, "header"},
        {"{\"a\\u0000b\":" E("U8", "[1]", 0, 1) "}", 1, BAD, "NUL"},
        {"{\"a\\ud800\":" E("U8", "[1]", 0, 1) "}", 1, BAD, "surrogate"},
        {"{\"a\\udc00\":" E("U8", "[1]", 0, 1) "}", 1, BAD, "surrogate"},
        {"{\"a\\ud800\\u0041\":" E("U8", "[1]", 0, 1) "}", 1, BAD, "surrogate"},
        {"{\"a\\x\":" E("U8", "[1]", 0, 1) "}", 1, BAD, "escape"},
        {"{\"a\\u12g4\":" E("U8", "[1]", 0, 1) "}", 1, BAD, "hex"},
        {"{\"a\nb\":" E("U8", "[1]", 0, 1) "}", 1, BAD, "string"},
        {"{\"a", 0, BAD, "header"},
        {"{\"a\\", 0, BAD, "header"},
        {"{\"a\\u00", 0, BAD, "header"},
        /* Legal, and more than is read. */
        {"{\"a\":" E("U8", "[1,1,1,1,1,1,1,1,1]", 0, 1) "}", 1, DSPARK_EUNSUPPORTED, "a|9|8"},
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        stfile_write(path, cases[i].header, cases[i].n_data);
        refuse(cases[i].code, cases[i].texts);
    }
}

static void test_ten_aliases(void **state)
{
    char header[1200] = "{";
    (void)state;
    for (int i = 0; i < 10; i++) {
        char entry[128];
        snprintf(entry, sizeof entry, "%s\"t%d\":" E("I32", "[2,2]", 0, 16), i ? "," : "", i);
        strcat(header, entry);
    }
    strcat(header, "}");
    stfile_write(path, header, 16);
    refuse(BAD, "overlap|t0|t1");
}

/* The header's length: too short a file, the cap, wrap-around; never an allocation of that size. */
static void test_header_length(void **state)
{
    static const struct {
        uint64_t declared;
        const char *texts;
    } cases[] = {
        {100000001, "100000001|100000000"}, {UINT64_MAX, "18446744073709551615|100000000"},
        {UINT64_MAX - 7, "100000000"},      {100000000, "truncated|100000000|file has 68"},
        {99999999, "truncated|99999999"},   {61, "truncated|61|68"},
        {59, "header|end of the text"},     {0, "header"},
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        stfile_write_raw(path, cases[i].declared, TEST4, 60, NULL, 0);
        refuse(BAD, cases[i].texts);
    }
    for (size_t n = 0; n < 8; n++) {
        char number[32];
        tmpdir_write(path, "\x3c\0\0\0\0\0\0\0", n);
        snprintf(number, sizeof number, "%zu bytes|8", n);
        refuse(BAD, number);
    }
    stfile_write_raw(path, 1, "{", 1, NULL, 0);
    refuse(BAD, "header");
    stfile_write_raw(path, 1, "\xff", 1, NULL, 0);
    refuse(BAD, "header");
}

/* faults.md F9: the cap itself passes, and one byte less: header bytes that are mostly spaces. */
static void test_header_at_the_cap(void **state)
{
    size_t n = 100000000;
    char *header = malloc(n);
    (void)state;
    assert_non_null(header);
    memset(header, ' ', n);
    memcpy(header, "{}", 2);
    for (size_t less = 0; less < 2; less++) {
        stfile_write_raw(path, n - less, header, n - less, NULL, 0);
        dspark__checkpoint_close(stfile_open(path));
    }
    free(header);
    unlink(path);
}

/* A header of many gigabytes' worth of promises in few bytes: refused without the memory. */
static void test_hostile_headers_take_little_memory(void **state)
{
    size_t n = 8u << 20;
    char *header = malloc(n + 64);
    struct rusage before, after;
    (void)state;
    assert_non_null(header);
    getrusage(RUSAGE_SELF, &before);
    size_t at = (size_t)sprintf(header, "{\"a\":{\"dtype\":\"U8\",\"shape\":[");
    while (at < n) at += (size_t)sprintf(header + at, "1,");
    strcpy(header + at, "1],\"data_offsets\":[0,1]}}");
    stfile_write(path, header, 1);
    refuse(DSPARK_EUNSUPPORTED, "a|dimensions");
    memset(header, '[', n);
    memcpy(header, "{\"a\":", 5);
    header[n] = '\0';
    stfile_write(path, header, 1);
    refuse(BAD, "a");
    getrusage(RUSAGE_SELF, &after);
    assert_true(after.ru_maxrss - before.ru_maxrss < 64 << 10); /* KiB: a few copies of the text */
    free(header);
}

static void test_names(void **state)
{
    char *header = malloc(4096);
    (void)state;
    /* Unescaping: what is found is the name, not its spelling. */
    stfile_write(
        path,
        "{\"a\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\u20AC\\ud83d\\ude00z\":" E("U8", "[1]", 0, 1) "}",
        1);
    dspark_checkpoint *c = stfile_open(path);
    assert_non_null(
        dspark__checkpoint_find(c, "a\"\\/\b\f\n\r\t\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z"));
    dspark__checkpoint_close(c);
    for (size_t n = 1023; n <= 1025; n++) {
        char *at = header + sprintf(header, "{\"");
        memset(at, 'n', n);
        strcpy(at + n, "\":" E("U8", "[1]", 0, 1) "}");
        stfile_write(path, header, 1);
        if (n <= 1024)
            dspark__checkpoint_close(stfile_open(path));
        else
            refuse(DSPARK_EUNSUPPORTED, "1025|1024");
    }
    free(header);
}

static void test_order_and_alignment(void **state)
{
    (void)state;
    /* Header order is not file order; 71 bytes of header put the data at an odd address. */
    const char *header = "{\"c\":" E("U8", "[1]", 6, 7) ",\"a\":" E(
        "BF16", "[2]", 1, 5) ",\"b\":" E("U8", "[1]", 0, 1) ",\"d\":" E("U8", "[1]", 5, 6) "}";
    static const char *const order[] = {"b", "a", "d", "c"};
    for (size_t pad = 0; pad < 8; pad++) {
        char text[512];
        snprintf(text, sizeof text, "%s%*s", header, (int)pad, "");
        stfile_write(path, text, 7);
        dspark_checkpoint *c = stfile_open(path);
        for (size_t i = 0; i < 4; i++)
            assert_string_equal(dspark__checkpoint_at(c, i)->name, order[i]);
        const unsigned char *p = dspark__checkpoint_find(c, "a")->data;
        for (size_t i = 0; i < 4; i++) assert_int_equal(p[i], stfile_byte(1 + i));
        dspark__checkpoint_close(c);
    }
}

/* Empty tensors at one place come by name, whatever the header's order. */
static void test_order_of_empty_tensors(void **state)
{
    static const char *const order[] = {"w", "x", "y", "z"};
    (void)state;
    stfile_write(path,
                 "{\"y\":" E("U8", "[0]", 0, 0) ",\"z\":" E("U8", "[0]", 0, 0) ",\"w\":" E(
                     "U8", "[0]", 0, 0) ",\"x\":" E("U8", "[0]", 0, 0) "}",
                 0);
    dspark_checkpoint *c = stfile_open(path);
    for (size_t i = 0; i < 4; i++) assert_string_equal(dspark__checkpoint_at(c, i)->name, order[i]);
    dspark__checkpoint_close(c);
}

/* Many tensors in a scrambled order: sorted, all found, the table grown several times. */
static void test_many_tensors(void **state)
{
    enum { N = 3000 };
    char *header = malloc(N * 96), name[32];
    size_t at = 1;
    (void)state;
    header[0] = '{';
    for (size_t i = 0; i < N; i++) {
        size_t k = i * 1009 % N; /* 1009 is prime to N */
        at += (size_t)sprintf(
            header + at, "%s\"t.%zu\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%zu,%zu]}",
            i ? "," : "", k, k, k + 1);
    }
    strcpy(header + at, "}");
    stfile_write(path, header, N);
    dspark_checkpoint *c = stfile_open(path);
    assert_int_equal(dspark__checkpoint_count(c), N);
    for (size_t i = 0; i < N; i++) {
        snprintf(name, sizeof name, "t.%zu", i);
        const dspark_tensor *t = dspark__checkpoint_find(c, name);
        assert_ptr_equal(t, dspark__checkpoint_at(c, i));
        assert_int_equal(*(const unsigned char *)t->data, stfile_byte(i));
    }
    dspark__checkpoint_close(c);
    free(header);
}

static void test_metadata(void **state)
{
    char header[8192];
    size_t at;
    (void)state;
    at = (size_t)sprintf(header, "{\"__metadata__\":{\"format\":\"pt\",\"a\\u0062\":\"x\\ny\"");
    for (int i = 0; i < 100; i++) at += (size_t)sprintf(header + at, ",\"k%d\":\"v%d\"", i, i);
    strcpy(header + at, "},\"t\":" E("U8", "[1]", 0, 1) "}");
    stfile_write(path, header, 1);
    dspark_checkpoint *c = stfile_open(path);
    assert_int_equal(dspark__checkpoint_count(c), 1);
    assert_string_equal(dspark__checkpoint_metadata(c, "format"), "pt");
    assert_string_equal(dspark__checkpoint_metadata(c, "ab"), "x\ny");
    assert_string_equal(dspark__checkpoint_metadata(c, "k99"), "v99");
    assert_null(dspark__checkpoint_metadata(c, "k100"));
    assert_null(dspark__checkpoint_find(c, "__metadata__"));
    dspark__checkpoint_close(c);
}

static void test_not_regular_files(void **state)
{
    (void)state;
    unlink(path);
    refuse(DSPARK_EIO, "No such file");
    assert_int_equal(mkfifo(path, 0600), 0); /* must not wait for a writer */
    refuse(DSPARK_EIO, "not a regular file");
    unlink(path);
    assert_int_equal(symlink("/dev/zero", path), 0);
    refuse(DSPARK_EIO, "not a regular file");
    unlink(path);
}

/* faults.md F1: every truncation of a valid file, byte by byte. */
static void test_every_truncation(void **state)
{
    const char *header = "{\"a\":" E("U8", "[4]", 0, 4) ",\"b\":" E("BF16", "[3]", 4, 10) "}";
    size_t n = strlen(header);
    unsigned char whole[256];
    (void)state;
    stfile_write(path, header, 10);
    FILE *f = fopen(path, "rb");
    size_t all = fread(whole, 1, sizeof whole, f);
    fclose(f);
    assert_int_equal(all, 8 + n + 10);
    for (size_t cut = 0; cut < all; cut++) {
        dspark_checkpoint *c;
        dspark_error err = {0};
        tmpdir_write(path, whole, cut);
        assert_int_equal(dspark__checkpoint_open(&c, path, &err), DSPARK_EFORMAT);
        assert_null(c);
        assert_true(err.message[0] != '\0');
    }
}

static void test_dtypes(void **state)
{
    static const struct {
        const char *name;
        unsigned bits;
    } table[] = {
        {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8},    {"U8", 8},
        {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
        {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
        {"I32", 32},        {"U32", 32},    {"F32", 32},    {"I64", 64},    {"U64", 64},
        {"F64", 64},        {"C64", 64},
    };
    (void)state;
    assert_int_equal(COUNT(table), DSPARK_DTYPE_COUNT - 1);
    for (size_t i = 0; i < COUNT(table); i++) {
        dspark_dtype d = dspark__dtype_parse(table[i].name);
        assert_int_not_equal(d, DSPARK_DTYPE_NONE);
        assert_string_equal(dspark__dtype_name(d), table[i].name);
        assert_int_equal(dspark__dtype_bits(d), table[i].bits);
        char header[256];
        snprintf(header, sizeof header,
                 "{\"a\":{\"dtype\":\"%s\",\"shape\":[8],\"data_offsets\":[0,%u]}}", table[i].name,
                 table[i].bits);
        stfile_write(path, header, table[i].bits);
        dspark_checkpoint *c = stfile_open(path);
        assert_int_equal(dspark__checkpoint_at(c, 0)->dtype, d);
        dspark__checkpoint_close(c);
    }
    assert_string_equal(dspark__dtype_name(DSPARK_DTYPE_NONE), "?");
    assert_string_equal(dspark__dtype_name((dspark_dtype)-1), "?");
    assert_string_equal(dspark__dtype_name(DSPARK_DTYPE_COUNT), "?");
    assert_int_equal(dspark__dtype_bits((dspark_dtype)1000), 0);
    uint64_t eight[8] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX,
                         UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
    char text[64];
    assert_string_equal(dspark__shape_text(0, eight, text, sizeof text), "[]");
    assert_string_equal(dspark__shape_text(2, (uint64_t[]){576, 7168}, text, sizeof text),
                        "[576, 7168]");
    dspark__shape_text(8, eight, text, sizeof text);
    assert_non_null(strstr(text, "...]"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_file),
        cmocka_unit_test(test_good_files),
        cmocka_unit_test(test_broken_files),
        cmocka_unit_test(test_ten_aliases),
        cmocka_unit_test(test_header_length),
        cmocka_unit_test(test_hostile_headers_take_little_memory), /* before the peak of the next */
        cmocka_unit_test(test_header_at_the_cap),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_order_and_alignment),
        cmocka_unit_test(test_order_of_empty_tensors),
        cmocka_unit_test(test_many_tensors),
        cmocka_unit_test(test_metadata),
        cmocka_unit_test(test_not_regular_files),
        cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_dtypes),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
