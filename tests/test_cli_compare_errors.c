/* dspark compare A B: how far the values of two caches are apart, against numbers worked out by hand. Each
 * cache here has one layer of two entries, three elements of latent and one of rope key. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "dspark/dspark.h"
#include "support/cli_said.h"

#define NOTHING (-1.0) /* null in JSON */

static void write_cache(const char *name, dspark_dtype dtype, uint64_t width, const void *entries,
                        const char *scale, const char *cache_dtype)
{
    const uint64_t shape[3] = {1, 2, width};
    const size_t n_bytes = (size_t)(2 * width * (dtype == DSPARK_BF16 ? 2 : 1));
    dspark_writer *w = NULL;
    assert_int_equal(dspark_writer_create(&w, in_folder(name), NULL), DSPARK_OK);
    assert_int_equal(dspark_writer_metadata(w, "kv_lora_rank", width == 656 ? "512" : "3", NULL), 0);
    if (scale) assert_int_equal(dspark_writer_metadata(w, "scale.layers.0", scale, NULL), 0);
    if (cache_dtype)
        assert_int_equal(dspark_writer_metadata(w, "cache_dtype", cache_dtype, NULL), 0);
    assert_int_equal(dspark_writer_declare(w, "layers.0.kv_cache", dtype, 3, shape, NULL), 0);
    assert_int_equal(dspark_writer_data(w, entries, n_bytes, NULL), DSPARK_OK);
    assert_int_equal(dspark_writer_commit(w, NULL), DSPARK_OK);
}

static void check_number(const json_t *o, const char *key, double want)
{
    const json_t *value = json_object_get(o, key);
    double found = json_is_null(value) ? NOTHING : json_number_value(value);
    assert_non_null(value);
    if (!(fabs(found - want) <= 1e-8 * fabs(want)))
        fail_msg("%s is %.12g, expected %.12g", key, found, want);
}

typedef struct part_errors {
    double max_abs, rms, relative, not_finite;
} part_errors;

/* Of the two files, or of a part of theirs: 0 the latent. */
static void check_part(int code, size_t part, const part_errors *want)
{
    cli_result r = run_cli("compare a.st b.st --json");
    json_t *doc = said_json(&r);
    const json_t *o = json_array_get(json_object_get(doc, "layers"), part);
    assert_int_equal(r.code, code);
    check_number(o, "max_abs_error", want->max_abs);
    check_number(o, "rms_error", want->rms);
    check_number(o, "relative_error", want->relative);
    check_number(o, "elements_not_finite", want->not_finite);
    json_decref(doc);
}

/* 1, 2, 0.5, 0 and -1, 4, 0, 1: the squares of the latent are 22.25. */
static const uint16_t base[8] = {0x3f80, 0x4000, 0x3f00, 0, 0xbf80, 0x4080, 0, 0x3f80};

static void test_bf16(void **state)
{
    uint16_t other[8];
    cli_result r;
    (void)state;
    memcpy(other, base, sizeof base);
    write_cache("a.st", DSPARK_BF16, 4, base, NULL, NULL);
    write_cache("b.st", DSPARK_BF16, 4, base, NULL, NULL);
    check_part(0, 0, &(part_errors){0, 0, 0, 0});
    r = run_cli("compare a.st b.st");
    assert_has(r.out, "  max abs  rms  relative\n");
    assert_has(r.out, "latent    equal");
    other[1] = 0x4010; /* 2.25 */
    other[4] = 0xbf00; /* -0.5 */
    write_cache("b.st", DSPARK_BF16, 4, other, NULL, NULL);
    check_part(1, 0, &(part_errors){0.5, sqrt(0.3125 / 6), sqrt(0.3125 / 22.25), 0});
    check_part(1, 1, &(part_errors){0, 0, 0, 0});
    r = run_cli("compare a.st b.st");
    assert_has(r.out, "first at           largest  max abs    rms  relative\n");
    assert_has(r.out, "slot 0, element 1  128 ulp      0.5  0.228     0.119\n");
    assert_null(strstr(r.out, "not finite"));
}

/* A NaN or an infinity in either file differs and has no distance; the others keep theirs. */
static void test_not_finite(void **state)
{
    static const uint16_t odd[] = {0x7fc0, 0x7f80, 0xff80, 0x7f81};
    uint16_t other[8];
    size_t i;
    (void)state;
    for (i = 0; i < sizeof odd / sizeof *odd; i++) {
        memcpy(other, base, sizeof base);
        other[1] = odd[i];
        other[4] = 0xbf00;
        write_cache("a.st", DSPARK_BF16, 4, base, NULL, NULL);
        write_cache("b.st", DSPARK_BF16, 4, other, NULL, NULL);
        check_part(1, 0, &(part_errors){0.5, sqrt(0.25 / 5), sqrt(0.25 / 18.25), 1});
        assert_has(run_cli("compare a.st b.st").out, "relative  not finite\n");
        write_cache("a.st", DSPARK_BF16, 4, other, NULL, NULL);
        write_cache("b.st", DSPARK_BF16, 4, base, NULL, NULL);
        check_part(1, 0, &(part_errors){0.5, sqrt(0.25 / 5), sqrt(0.25 / 17.5), 1});
        /* the same bits are equal, whatever they are */
        write_cache("b.st", DSPARK_BF16, 4, other, NULL, NULL);
        check_part(0, 0, &(part_errors){0, 0, 0, 1});
    }
}

/* Nothing finite, and nothing but zeros to hold an error against. */
static void test_nothing_to_measure(void **state)
{
    uint16_t other[8];
    (void)state;
    memset(other, 0xff, sizeof other);
    write_cache("a.st", DSPARK_BF16, 4, base, NULL, NULL);
    write_cache("b.st", DSPARK_BF16, 4, other, NULL, NULL);
    check_part(1, 0, &(part_errors){NOTHING, NOTHING, NOTHING, 6});
    assert_has(run_cli("compare a.st b.st").out, "ulp        -    -         -           6\n");
    memset(other, 0, sizeof other);
    write_cache("a.st", DSPARK_BF16, 4, other, NULL, NULL);
    write_cache("b.st", DSPARK_BF16, 4, base, NULL, NULL);
    check_part(1, 0, &(part_errors){4, sqrt(22.25 / 6), NOTHING, 0});
    check_part(1, 1, &(part_errors){1, sqrt(0.5), NOTHING, 0});
}

/* A value of fp8 is code times scale, in E4M3 and E5M2, also when the file has only bytes. */
static void test_fp8(void **state)
{
    /* 1 2 0.5 0, -1 4 0 1 */
    static const uint8_t e4m3[8] = {0x38, 0x40, 0x30, 0, 0xb8, 0x48, 0, 0x38};
    static const uint8_t e5m2[8] = {0x3c, 0x40, 0x38, 0, 0xbc, 0x44, 0, 0x3c};
    uint8_t other[8];
    int form;
    (void)state;
    for (form = 0; form < 3; form++) {
        const uint8_t *codes = form == 1 ? e5m2 : e4m3;
        const dspark_dtype dtype = form == 0   ? DSPARK_F8_E4M3
                                   : form == 1 ? DSPARK_F8_E5M2 : DSPARK_U8;
        const char *said = form == 2 ? "fp8_e4m3" : NULL;
        memcpy(other, codes, sizeof other);
        other[4] = codes[2] | 0x80; /* -0.5 */
        write_cache("a.st", dtype, 4, codes, "2", said);
        write_cache("b.st", dtype, 4, other, "2", said);
        check_part(1, 0, &(part_errors){1, sqrt(1.0 / 6), sqrt(0.25 / 22.25), 0});
        /* equal codes under other scales are other values */
        write_cache("b.st", dtype, 4, codes, "1", said);
        check_part(1, 0, &(part_errors){4, sqrt(22.25 / 6), 0.5, 0});
        assert_has(run_cli("compare a.st b.st").out, "  0.5\n");
        /* a file that does not say is read like the other */
        write_cache("b.st", dtype, 4, codes, NULL, said);
        check_part(0, 0, &(part_errors){0, 0, 0, 0});
    }
    /* NaN codes: 0x7f of E4M3; 0x7c of E5M2 is infinite */
    memcpy(other, e4m3, sizeof other);
    other[0] = 0x7f, other[1] = 0xff, other[2] = 0x7e;
    write_cache("a.st", DSPARK_F8_E4M3, 4, e4m3, NULL, NULL);
    write_cache("b.st", DSPARK_F8_E4M3, 4, other, NULL, NULL);
    check_part(1, 0, &(part_errors){447.5, 447.5 / 2, 447.5 / sqrt(17.25), 2});
    memcpy(other, e5m2, sizeof other);
    other[0] = 0x7c, other[1] = 0xfd, other[2] = 0x7b;
    write_cache("a.st", DSPARK_F8_E5M2, 4, e5m2, NULL, NULL);
    write_cache("b.st", DSPARK_F8_E5M2, 4, other, NULL, NULL);
    check_part(1, 0, &(part_errors){57343.5, 57343.5 / 2, 57343.5 / sqrt(17.25), 2});
}

/* Codes under their tile's own scale, the scales as numbers, the rope key as bf16. */
static void test_ds_mla(void **state)
{
    static const float scales[2][4] = {{1, 2, 4, 8}, {1, 2, 4, 16}};
    uint8_t entries[2][2 * 656];
    const uint16_t one = 0x3f80, two = 0x4000;
    int file, entry;
    size_t i;
    (void)state;
    for (file = 0; file < 2; file++) {
        for (entry = 0; entry < 2; entry++) {
            uint8_t *at = entries[file] + (size_t)entry * 656;
            memset(at, 0x38, 512);
            memcpy(at + 512, scales[file], 16);
            for (i = 0; i < 64; i++) memcpy(at + 528 + 2 * i, &one, 2);
        }
    }
    memcpy(entries[1] + 528, &two, 2);
    write_cache("a.st", DSPARK_U8, 656, entries[0], NULL, NULL);
    write_cache("b.st", DSPARK_U8, 656, entries[1], NULL, NULL);
    /* 256 of 1024 values are 8 off; squares 128 (1 + 4 + 16 + 64) an entry */
    check_part(1, 0, &(part_errors){8, 4, sqrt(64.0 / 85), 0});
    check_part(1, 1, &(part_errors){8, 4, sqrt(64.0 / 85), 0});
    check_part(1, 2, &(part_errors){1, sqrt(1.0 / 128), sqrt(1.0 / 128), 0});
}

static void test_bad_scales(void **state)
{
    static const char *const bad[] = {"0", "-1", "nan", "inf", "1x", "x"};
    static const uint8_t codes[8] = {0};
    size_t i;
    (void)state;
    write_cache("a.st", DSPARK_F8_E4M3, 4, codes, NULL, NULL);
    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        cli_result r;
        write_cache("b.st", DSPARK_F8_E4M3, 4, codes, bad[i], NULL);
        r = run_cli("compare a.st b.st");
        assert_int_equal(r.code, 3);
        assert_has(r.err, "b.st: scale.layers.0");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16),     cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_nothing_to_measure), cmocka_unit_test(test_fp8),
        cmocka_unit_test(test_ds_mla),   cmocka_unit_test(test_bad_scales),
    };
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
