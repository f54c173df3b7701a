/* dspark compare A B, and what `dspark context` says about its rows: caches of two runs or of an
 * engine against each other, the states file, digests that block sizes do not change, warnings. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "dspark/dspark.h"
#include "support/cli_said.h"

#define LATENT 3
#define ENTRY 5

static int make_inputs(void **state)
{
    (void)state;
    if (run_cli("synth tiny --preset tiny").code) return 1;
    if (run_cli("synth --dump dump.st --for tiny --tokens 50").code) return 1;
    return run_cli("context tiny --taps dump.st --out a.st").code;
}

/* A cache of two layers as an engine could dump it. The entry of position p in layer l holds
 * 0x3f00 + 16 * p + 8 * l + element. */
typedef struct small_cache {
    size_t blocks, block_size, rows;
    int64_t slots[16], positions[16];
    int mapped, with_positions, with_latent;
    dspark_dtype dtype;
    int at_layer, at_row, at_element; /* where one value is off ... */
    uint16_t value;                   /* ... and what it is; 0: nowhere */
    const char *scale;                /* of layer 1 */
} small_cache;

static const small_cache plain = {2, 4, 6, {0, 1, 2, 3, 4, 5}, {7, 8, 9, 10, 11, 12}, 1, 1, 1,
                                  DSPARK_BF16, 0, 0, 0, 0, NULL};

static void write_cache(const char *name, const small_cache *c)
{
    const uint64_t shape[3] = {c->blocks, c->block_size, ENTRY}, rows[1] = {c->rows};
    size_t n = c->blocks * c->block_size * ENTRY, width = c->dtype == DSPARK_BF16 ? 2 : 1, i, e;
    unsigned char *layer = malloc(2 * n);
    dspark_writer *w = NULL;
    int l;
    assert_non_null(layer);
    assert_int_equal(dspark_writer_create(&w, in_folder(name), NULL), DSPARK_OK);
    if (c->with_latent)
        assert_int_equal(dspark_writer_metadata(w, "kv_lora_rank", "3", NULL), DSPARK_OK);
    if (c->scale)
        assert_int_equal(dspark_writer_metadata(w, "scale.layers.1", c->scale, NULL), DSPARK_OK);
    for (l = 0; l < 2; l++) {
        const char *tensor = l ? "layers.1.kv_cache" : "layers.0.kv_cache";
        assert_int_equal(dspark_writer_declare(w, tensor, c->dtype, 3, shape, NULL), DSPARK_OK);
    }
    if (c->mapped)
        assert_int_equal(dspark_writer_declare(w, "slot_mapping", DSPARK_I64, 1, rows, NULL), 0);
    if (c->with_positions)
        assert_int_equal(dspark_writer_declare(w, "positions", DSPARK_I64, 1, rows, NULL), 0);
    for (l = 0; l < 2; l++) {
        memset(layer, 0x11, 2 * n); /* unused entries are anything */
        for (i = 0; i < c->rows; i++) {
            if (c->slots[i] < 0) continue;
            for (e = 0; e < ENTRY; e++) {
                uint16_t v = (uint16_t)(0x3f00 + 16 * c->positions[i] + 8 * l + (int)e);
                size_t at = ((size_t)c->slots[i] * ENTRY + e) * width;
                if (c->value && l == c->at_layer && (int)i == c->at_row && (int)e == c->at_element)
                    v = c->value;
                memcpy(layer + at, &v, width); /* the low byte of fp8 */
            }
        }
        assert_int_equal(dspark_writer_data(w, layer, n * width, NULL), DSPARK_OK);
    }
    if (c->mapped)
        assert_int_equal(dspark_writer_data(w, c->slots, 8 * c->rows, NULL), DSPARK_OK);
    if (c->with_positions)
        assert_int_equal(dspark_writer_data(w, c->positions, 8 * c->rows, NULL), DSPARK_OK);
    assert_int_equal(dspark_writer_commit(w, NULL), DSPARK_OK);
    free(layer);
}

static void test_runs(void **state)
{
    cli_result r;
    (void)state;
    r = run_cli("compare a.st a.st");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "equal: 50 entries in each of 5 layers");
    assert_has(r.out, "rope key");
    assert_int_equal(run_cli("context tiny --taps dump.st --out b.st --block-size 7").code, 0);
    r = run_cli("compare a.st b.st");
    assert_int_equal(r.code, 0);
    assert_null(strstr(r.out, "metadata"));
    assert_int_equal(run_cli("context tiny --taps dump.st --out c.st --start-position 1").code, 0);
    r = run_cli("compare a.st c.st --json");
    assert_int_equal(r.code, 1);
    {
        json_t *doc = said_json(&r);
        const json_t *layers = json_object_get(doc, "layers");
        size_t i;
        assert_true(json_is_false(json_object_get(doc, "equal")));
        assert_int_equal(said_int(doc, "entries"), 49);
        assert_int_equal(said_int(doc, "only_a"), 1);
        assert_int_equal(said_int(doc, "only_b"), 1);
        assert_int_equal(json_array_size(layers), 10);
        for (i = 0; i < 10; i++) /* another row, so everything differs */
            assert_true(said_int(json_array_get(layers, i), "elements_different") > 100);
        json_decref(doc);
    }
    r = run_cli("context tiny --taps dump.st --out f.st --cache-dtype fp8_e4m3");
    assert_int_equal(r.code, 0);
    r = run_cli("compare a.st f.st");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "different formats");
    r = run_cli("compare a.st dump.st");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "no file of caches");
    assert_int_equal(run_cli("compare a.st missing.st").code, 3);
    assert_int_equal(run_cli("compare a.st b.st --tokens 3").code, 2);
    assert_int_equal(run_cli("compare a.st b.st c.st").code, 2);
}

/* The entries of one layer part; the others must be equal. */
static void expect_one(const char *a, const char *b, int layer, const char *part, long long n,
                       long long first, long long element, long long most)
{
    cli_result r = run_cli("compare %s %s --json", a, b);
    json_t *doc = said_json(&r);
    const json_t *layers = json_object_get(doc, "layers");
    size_t i;
    assert_int_equal(r.code, 1);
    for (i = 0; i < json_array_size(layers); i++) {
        const json_t *o = json_array_get(layers, i);
        if (said_int(o, "layer") != layer ||
            strcmp(json_string_value(json_object_get(o, "part")), part) != 0) {
            assert_int_equal(said_int(o, "elements_different"), 0);
            continue;
        }
        assert_int_equal(said_int(o, "elements_different"), n);
        assert_int_equal(said_int(o, "first"), first);
        assert_int_equal(said_int(o, "first_element"), element);
        assert_int_equal(said_int(o, "max_difference"), most);
    }
    json_decref(doc);
}

static void test_differences(void **state)
{
    small_cache c = plain;
    cli_result r;
    (void)state;
    write_cache("base.st", &plain);
    /* Another block table, another block size, rows in another order, a row not in the cache. */
    c.blocks = 5, c.block_size = 3;
    memcpy(c.slots, (int64_t[]){14, 0, 7, 3, 9, 12}, 6 * sizeof *c.slots);
    write_cache("moved.st", &c);
    assert_int_equal(run_cli("compare base.st moved.st").code, 0);
    c = plain, c.rows = 7;
    memcpy(c.slots, (int64_t[]){6, 5, 4, 3, 2, 1, -1}, 7 * sizeof *c.slots);
    memcpy(c.positions, (int64_t[]){12, 11, 10, 9, 8, 7, 13}, 7 * sizeof *c.positions);
    write_cache("turned.st", &c);
    assert_int_equal(run_cli("compare base.st turned.st").code, 0);
    /* One value: 0x3f00 + 16 * 10 + 8 + 2 = 0x3faa; three units on, and the other sign. */
    c.at_layer = 1, c.at_row = 2, c.at_element = 2, c.value = 0x3fad;
    write_cache("off.st", &c);
    expect_one("base.st", "off.st", 1, "latent", 1, 10, 2, 3);
    c.at_element = 4, c.value = 0xbfac;
    write_cache("off.st", &c);
    expect_one("base.st", "off.st", 1, "rope_key", 1, 10, 1, 2 * 0x3fac);
    r = run_cli("compare base.st off.st");
    assert_has(r.out, "position 10, element 1");
    assert_has(r.out, "1 DIFFER");
    assert_has(r.out, "NOT EQUAL: 1 elements differ");
    /* Without the latent's width in either file the entry stays whole. */
    c.with_latent = 0;
    write_cache("off.st", &c);
    c.value = 0;
    write_cache("whole.st", &c);
    expect_one("whole.st", "off.st", 1, "entry", 1, 10, 4, 2 * 0x3fac);
    /* fp8: codes; equal codes under other scales are other values. */
    c = plain, c.dtype = DSPARK_F8_E4M3, c.scale = "1";
    write_cache("codes.st", &c);
    c.at_row = 1, c.at_element = 0, c.value = 0x85; /* 0x80 + 5 codes */
    write_cache("other.st", &c);
    expect_one("codes.st", "other.st", 0, "latent", 1, 8, 0, 5);
    c.value = 0, c.scale = "2";
    write_cache("other.st", &c);
    r = run_cli("compare codes.st other.st");
    assert_int_equal(r.code, 1);
    assert_has(r.out, "scale.layers.1: A 1, B 2");
    assert_has(r.out, "scales are not");
}

static void test_slots(void **state)
{
    small_cache c = plain;
    cli_result r;
    (void)state;
    write_cache("base.st", &plain);
    c.mapped = c.with_positions = 0;
    write_cache("bare.st", &c);
    r = run_cli("compare base.st bare.st");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "8 entries a layer, by slot");
    c.at_row = 3, c.value = 0x3fa1; /* position 10: 0x3fa0 */
    write_cache("bare.st", &c);
    expect_one("base.st", "bare.st", 0, "latent", 1, 3, 0, 1);
    c.blocks = 4, c.block_size = 2;
    write_cache("bare.st", &c);
    r = run_cli("compare base.st bare.st");
    assert_int_equal(r.code, 3);
    assert_has(r.err, "bare.st: slot_mapping");
    assert_has(r.err, "block sizes 4 and 2");
    /* rows without positions are counted */
    c = plain, c.with_positions = 0;
    write_cache("counted.st", &c);
    r = run_cli("compare counted.st counted.st");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "no positions");
    r = run_cli("compare base.st counted.st"); /* 7 .. 12 against 0 .. 5 */
    assert_int_equal(r.code, 1);
    assert_has(r.out, "no position is in both");
}

static void test_hostile_slots(void **state)
{
    const uint64_t shape[3] = {1, 2, ENTRY}, rows[1] = {2};
    static const int64_t bad[] = {2, INT64_MAX};
    const char zeros[2 * 2 * ENTRY] = {0};
    size_t i;
    (void)state;
    for (i = 0; i < 2; i++) {
        const int64_t slots[2] = {0, bad[i]};
        dspark_writer *w = NULL;
        cli_result r;
        assert_int_equal(dspark_writer_create(&w, in_folder("bad.st"), NULL), DSPARK_OK);
        assert_int_equal(dspark_writer_declare(w, "layers.0.kv_cache", DSPARK_BF16, 3, shape, NULL),
                         DSPARK_OK);
        assert_int_equal(dspark_writer_declare(w, "slot_mapping", DSPARK_I64, 1, rows, NULL), 0);
        assert_int_equal(dspark_writer_data(w, zeros, sizeof zeros, NULL), DSPARK_OK);
        assert_int_equal(dspark_writer_data(w, slots, sizeof slots, NULL), DSPARK_OK);
        assert_int_equal(dspark_writer_commit(w, NULL), DSPARK_OK);
        r = run_cli("compare bad.st bad.st");
        assert_int_equal(r.code, 3);
        assert_has(r.err, "row 1: slot ");
    }
}

/* ---- context --------------------------------------------------------------------------------- */

static void test_digests(void **state)
{
    static const char *const sizes[] = {"1", "16", "1000"};
    dspark_checkpoint *a = NULL, *b = NULL;
    size_t i;
    (void)state;
    assert_int_equal(dspark_checkpoint_open(&a, in_folder("a.st"), NULL), DSPARK_OK);
    for (i = 0; i < 3; i++) {
        assert_int_equal(run_cli("context tiny --taps dump.st --out d.st --batch 9 --block-size %s",
                                 sizes[i]).code, 0);
        assert_int_equal(dspark_checkpoint_open(&b, in_folder("d.st"), NULL), DSPARK_OK);
        assert_string_equal(dspark_checkpoint_metadata(a, "digest.layers.3.kv_cache"),
                            dspark_checkpoint_metadata(b, "digest.layers.3.kv_cache"));
        assert_string_not_equal(dspark_checkpoint_metadata(a, "digest.layers.3.kv_cache"),
                                dspark_checkpoint_metadata(b, "digest.layers.2.kv_cache"));
        assert_string_equal(dspark_checkpoint_metadata(b, "kv_lora_rank"), "16");
        dspark_checkpoint_close(b);
    }
    dspark_checkpoint_close(a);
}

static void test_states_out(void **state)
{
    cli_result r = run_cli("context tiny --taps dump.st --states-out s.st --batch 7 "
                           "--start-position 3 --json");
    dspark_checkpoint *file = NULL;
    const dspark_tensor *t, *positions;
    char hex[33];
    json_t *doc;
    size_t i;
    (void)state;
    assert_int_equal(r.code, 0);
    doc = said_json(&r);
    assert_int_equal(dspark_checkpoint_open(&file, in_folder("s.st"), NULL), DSPARK_OK);
    assert_int_equal(dspark_checkpoint_tensor_count(file), 2);
    t = dspark_checkpoint_find(file, "states");
    positions = dspark_checkpoint_find(file, "positions");
    assert_true(t && positions);
    assert_int_equal(t->dtype, DSPARK_BF16);
    assert_int_equal(t->rank, 2);
    assert_int_equal(t->shape[0], 50);
    assert_int_equal(t->shape[1], 64);
    memset(hex, '0', 32);
    hex[32] = 0;
    for (i = 0; i < 50; i++) {
        char pair[65];
        int64_t p;
        memcpy(&p, (const char *)positions->data + 8 * i, sizeof p);
        assert_int_equal(p, 3 + i);
        memcpy(pair, hex, 32);
        dspark_digest((const char *)t->data + i * 128, 128, pair + 32);
        dspark_digest(pair, 64, hex);
    }
    assert_string_equal(hex, json_string_value(json_object_get(json_object_get(doc, "digests"),
                                                               "states")));
    assert_string_equal(dspark_checkpoint_metadata(file, "fingerprint"),
                        json_string_value(json_object_get(doc, "fingerprint")));
    dspark_checkpoint_close(file);
    json_decref(doc);
    assert_int_equal(run_cli("context tiny --taps dump.st --states-out s1.st --out s1.st").code, 2);
    assert_int_equal(run_cli("context tiny --taps dump.st --states-out dump.st").code, 2);
    assert_int_equal(run_cli("context tiny --taps dump.st --states-out no/s1.st").code, 5);
    assert_int_equal(run_cli("context tiny --taps dump.st --start-position 1048576 --states-out "
                             "s1.st").code, 2);
    assert_false(folder_has("s1.st"));
    assert_false(folder_has(".dspark-"));
}

/* Rows of five taps and no verifier; tap t of row r is `values[t]` everywhere, plus r when `moves`. */
static void write_rows(const char *name, size_t n, const uint16_t values[5], int moves)
{
    const uint64_t ids[1] = {n}, shape[3] = {n, 5, 64};
    dspark_writer *w = NULL;
    size_t r, t, i;
    assert_int_equal(dspark_writer_create(&w, in_folder(name), NULL), DSPARK_OK);
    assert_int_equal(dspark_writer_declare(w, "token_ids", DSPARK_I64, 1, ids, NULL), DSPARK_OK);
    assert_int_equal(dspark_writer_declare(w, "hidden_states", DSPARK_BF16, 3, shape, NULL),
                     DSPARK_OK);
    for (r = 0; r < n; r++) {
        int64_t id = (int64_t)r % 97;
        assert_int_equal(dspark_writer_data(w, &id, 8, NULL), DSPARK_OK);
    }
    for (r = 0; r < n; r++)
        for (t = 0; t < 5; t++)
            for (i = 0; i < 64; i++) {
                uint16_t v = values[t] ? (uint16_t)(values[t] + (moves ? r : 0)) : 0;
                assert_int_equal(dspark_writer_data(w, &v, 2, NULL), DSPARK_OK);
            }
    assert_int_equal(dspark_writer_commit(w, NULL), DSPARK_OK);
}

static void test_warnings(void **state)
{
    static const uint16_t good[] = {0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0}; /* 1 2 3 4 5 */
    static const uint16_t odd[] = {0x3f80, 0, 0x4040, 0x4080, 0x4040};
    cli_result r;
    json_t *doc;
    size_t i;
    (void)state;
    write_rows("good.st", 1, good, 0);
    r = run_cli("context tiny --taps good.st --json");
    assert_int_equal(r.code, 0);
    doc = said_json(&r);
    for (i = 0; i < 5; i++)
        assert_true(json_number_value(json_array_get(json_object_get(doc, "tap_rms"), i)) ==
                    (double)i + 1);
    assert_int_equal(json_array_size(json_object_get(doc, "warnings")), 0);
    json_decref(doc);
    r = run_cli("context tiny --taps good.st --threads 1");
    assert_has(r.out, "rms of each tap: 1 2 3 4 5");
    assert_has(r.out, "1 row, 5 taps");
    assert_has(r.out, "1 thread, 1 row a call");
    assert_null(strstr(r.out, "warning:"));
    assert_null(strstr(r.out, " \n"));
    write_rows("odd.st", 4, odd, 1);
    r = run_cli("context tiny --taps odd.st --batch 1");
    assert_int_equal(r.code, 0);
    assert_has(r.out, "warning:    tap 1 is zero");
    assert_has(r.out, "warning:    taps 2 and 4 are equal");
    assert_null(strstr(r.out, "equal to the row before"));
    write_rows("still.st", 4, good, 0);
    r = run_cli("context tiny --taps still.st --batch 1 --start-position 32765");
    assert_has(r.out, "warning:    3 rows are equal to the row before (first: row 1)");
    assert_has(r.out, "warning:    1 row lies outside the trained window");
    r = run_cli("context tiny --taps still.st --start-position 32765 --json");
    doc = said_json(&r);
    assert_int_equal(json_array_size(json_object_get(doc, "warnings")), 2);
    json_decref(doc);
}

static void test_swapped(void **state)
{
    cli_result r = run_cli("context dump.st --taps tiny");
    (void)state;
    assert_int_equal(r.code, 2);
    assert_has(r.err, "look swapped");
    r = run_cli("context a.st --taps dump.st"); /* no dump either, and not swapped */
    assert_true(r.code == 3 || r.code == 4);
    assert_null(strstr(r.err, "swapped"));
}

/* More rows than one call takes, in fp64 and on every way: each row must be held against itself. */
static void test_compare_pieces(void **state)
{
    cli_result r = run_cli("synth --dump long.st --for tiny --tokens 300");
    const json_t *layers;
    json_t *doc;
    size_t i;
    (void)state;
    assert_int_equal(r.code, 0);
    r = run_cli("compare tiny --taps long.st --json");
    assert_int_equal(r.code, 0);
    doc = said_json(&r);
    assert_int_equal(said_int(doc, "rows"), 300);
    assert_true(json_is_true(json_object_get(doc, "equal")));
    layers = json_object_get(doc, "layers");
    assert_int_equal(json_array_size(layers), 10);
    for (i = 0; i < 10; i++) {
        double rms = json_number_value(json_object_get(json_array_get(layers, i), "rms_rel"));
        assert_true(rms > 0 && rms < 0.02);
    }
    json_decref(doc);
}

/* Minutes of work, stopped after a second: the signal is heard within a variant, in fp64 too. */
static void test_compare_cancelled(void **state)
{
    struct timespec start, end;
    cli_result r;
    (void)state;
    if (access("/usr/bin/timeout", X_OK) != 0) skip();
    clock_gettime(CLOCK_MONOTONIC, &start);
    r = run_program("/usr/bin/timeout", "-s TERM 1 " DSPARK_CLI " compare tiny --tokens 65536");
    clock_gettime(CLOCK_MONOTONIC, &end);
    assert_int_equal(r.code, 124);
    assert_has(r.err, "cancelled");
    assert_true(end.tv_sec - start.tv_sec < 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_runs),          cmocka_unit_test(test_differences),
        cmocka_unit_test(test_slots),         cmocka_unit_test(test_hostile_slots),
        cmocka_unit_test(test_digests),       cmocka_unit_test(test_states_out),
        cmocka_unit_test(test_warnings),      cmocka_unit_test(test_swapped),
        cmocka_unit_test(test_compare_pieces), cmocka_unit_test(test_compare_cancelled),
    };
    return cmocka_run_group_tests(tests, make_inputs, remove_folder);
}
