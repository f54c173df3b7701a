/* dspark context and compare: the same output file whichever way it is computed, a named error for
 * every dump that does not fit, nothing left behind by a run that failed or was stopped. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "dspark/dspark.h"
#include "support/cli_said.h"
#include "support/tmpdir.h"

#define N_ROWS 150
#define N_TAPS 5
#define TAP_WIDTH 64
#define ENTRY 24 /* the tiny preset: 16 + 8 */
#define VOCAB 97

static int make_inputs(void **state)
{
    (void)state;
    if (run_cli("synth tiny --preset tiny").code) return 1;
    return run_cli("synth --dump dump.st --for tiny --tokens %d", N_ROWS).code;
}

/* ---- the output file ---- */

static void test_output_file(void **state)
{
    cli_result r = run_cli("context tiny --taps dump.st --out base.st --block-size 16 --json");
    dspark_checkpoint *file = NULL;
    const dspark_tensor *t;
    json_t *doc, *digests;
    char hex[33];
    size_t i;
    (void)state;
    assert_int_equal(r.code, 0);
    assert_string_equal(r.err, "");
    doc = said_json(&r);
    digests = json_object_get(doc, "digests");
    assert_int_equal(json_integer_value(json_object_get(doc, "rows")), N_ROWS);
    assert_int_equal(json_integer_value(json_object_get(doc, "entries_written")), 5 * N_ROWS);
    assert_int_equal(dspark_checkpoint_open(&file, in_folder("base.st"), NULL), DSPARK_OK);
    assert_int_equal(dspark_checkpoint_tensor_count(file), 5 + 2);
    t = dspark_checkpoint_find(file, "layers.4.kv_cache");
    assert_non_null(t);
    assert_int_equal(t->dtype, DSPARK_BF16);
    assert_int_equal(t->rank, 3);
    assert_int_equal(t->shape[0], (N_ROWS + 15) / 16);
    assert_int_equal(t->shape[1], 16);
    assert_int_equal(t->shape[2], ENTRY);
    /* The chain over the rows' entries; row i is entry i. */
    memset(hex, '0', 32);
    hex[32] = 0;
    for (i = 0; i < N_ROWS; i++) {
        char pair[65];
        memcpy(pair, hex, 32);
        dspark_digest((const char *)t->data + i * ENTRY * 2, ENTRY * 2, pair + 32);
        dspark_digest(pair, 64, hex);
    }
    assert_string_equal(hex, json_string_value(json_array_get(json_object_get(digests, "layers"),
                                                              4)));
    assert_string_equal(hex, dspark_checkpoint_metadata(file, "digest.layers.4.kv_cache"));
    assert_string_equal(dspark_checkpoint_metadata(file, "digest.states"),
                        json_string_value(json_object_get(digests, "states")));
    assert_string_equal(dspark_checkpoint_metadata(file, "fingerprint"),
                        json_string_value(json_object_get(doc, "fingerprint")));
    /* Unused entries of the last block are zero. */
    for (i = N_ROWS * ENTRY * 2; i < t->n_bytes; i++)
        assert_int_equal(((const unsigned char *)t->data)[i], 0);
    t = dspark_checkpoint_find(file, "positions");
    assert_non_null(t);
    for (i = 0; i < N_ROWS; i++) {
        int64_t position;
        memcpy(&position, (const char *)t->data + 8 * i, sizeof position);
        assert_int_equal(position, i);
    }
    dspark_checkpoint_close(file);
    json_decref(doc);
}

static void test_same_bytes(void **state)
{
    static const char *const ways[] = {
        "--path per-layer", "--path full", "--batch 1", "--batch 7", "--batch 149", "--threads 1",
        "--threads 3", "--isa ref", "--isa ref --threads 2 --batch 13 --path full",
    };
    static const dspark_isa levels[] = {DSPARK_ISA_AVX2, DSPARK_ISA_AVX512, DSPARK_ISA_AVX512BF16};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof ways / sizeof *ways; i++) {
        cli_result r = run_cli("context tiny --taps dump.st --block-size 16 --out way.st %s",
                               ways[i]);
        if (r.code) print_error("%s: %s\n", ways[i], r.err);
        assert_int_equal(r.code, 0);
        if (!same_files("base.st", "way.st")) print_error("%s differs\n", ways[i]);
        assert_true(same_files("base.st", "way.st"));
    }
    for (i = 0; i < sizeof levels / sizeof *levels; i++) {
        const char *name = dspark_isa_name(levels[i]);
        cli_result r = run_cli("context tiny --taps dump.st --block-size 16 --out way.st --isa %s",
                               name);
        if (!dspark_isa_available(levels[i])) {
            assert_int_equal(r.code, 4);
            continue;
        }
        assert_int_equal(r.code, 0);
        if (!same_files("base.st", "way.st")) print_error("%s differs\n", name);
        assert_true(same_files("base.st", "way.st"));
    }
    assert_int_equal(run_cli("context tiny --taps dump.st --block-size 16 --out way.st "
                             "--start-position 1").code, 0);
    assert_false(same_files("base.st", "way.st")); /* so the comparison can fail */
}

static void test_cache_dtypes(void **state)
{
    dspark_checkpoint *file = NULL;
    const dspark_tensor *t;
    cli_result r = run_cli("context tiny --taps dump.st --out f8.st --cache-dtype fp8_e4m3 "
                           "--scales 1,0.5,0.25,2,4");
    (void)state;
    assert_int_equal(r.code, 0);
    assert_int_equal(dspark_checkpoint_open(&file, in_folder("f8.st"), NULL), DSPARK_OK);
    t = dspark_checkpoint_find(file, "layers.1.kv_cache");
    assert_non_null(t);
    assert_int_equal(t->dtype, DSPARK_F8_E4M3);
    assert_int_equal(t->shape[2], ENTRY);
    assert_string_equal(dspark_checkpoint_metadata(file, "scale.layers.2"), "0.25");
    assert_string_equal(dspark_checkpoint_metadata(file, "cache_dtype"), "fp8_e4m3");
    dspark_checkpoint_close(file);
    assert_int_equal(run_cli("context tiny --taps dump.st --out g8.st --cache-dtype fp8_e5m2 "
                             "--scale 0.5").code, 0);
    r = run_cli("context tiny --taps dump.st --out h8.st --cache-dtype fp8_e4m3 --scales 1,2");
    assert_int_equal(r.code, 2);
    assert_has(r.err, "expected 5 numbers");
    r = run_cli("context tiny --taps dump.st --out h8.st --cache-dtype fp8_ds_mla");
    assert_int_equal(r.code, 4); /* 16 + 8 is not 512 + 64 */
    assert_false(folder_has("h8.st"));
    assert_int_equal(run_cli("synth wide --preset tiny --context-only --set kv_lora_rank=512 "
                             "--set qk_rope_head_dim=64").code, 0);
    r = run_cli("context wide --taps dump.st --out w1.st --cache-dtype fp8_ds_mla");
    assert_int_equal(r.code, 0);
    assert_int_equal(dspark_checkpoint_open(&file, in_folder("w1.st"), NULL), DSPARK_OK);
    t = dspark_checkpoint_find(file, "layers.0.kv_cache");
    assert_non_null(t);
    assert_int_equal(t->dtype, DSPARK_U8);
    assert_int_equal(t->shape[2], 656);
    assert_string_equal(dspark_checkpoint_metadata(file, "tile_scale"), "pow2");
    dspark_checkpoint_close(file);
    assert_int_equal(run_cli("context wide --taps dump.st --out w2.st --cache-dtype fp8_ds_mla "
                             "--tile-scale exact").code, 0);
    assert_false(same_files("w1.st", "w2.st"));
}

/* ---- dumps that do not fit ---- */

typedef struct dump_shape {
    uint64_t rows, ids, states, width, positions; /* positions 0: no such tensor */
    int64_t first_position, last_position;        /* last_position: 0 = the one that follows */
    int64_t bad_id;                               /* of row 2 */
    dspark_dtype id_dtype;
    long nan_at;                                  /* element of hidden_states, -1 none */
} dump_shape;

static const dump_shape good = {4, 4, N_TAPS + 1, TAP_WIDTH, 0, 0, 0, 1, DSPARK_I64, -1};

static void declare(dspark_writer *w, const char *name, dspark_dtype dtype, uint32_t rank,
                    uint64_t a, uint64_t b, uint64_t c)
{
    const uint64_t shape[3] = {a, b, c};
    assert_int_equal(dspark_writer_declare(w, name, dtype, rank, shape, NULL), DSPARK_OK);
}

static void write_dump(const char *name, const dump_shape *d)
{
    dspark_writer *w = NULL;
    uint64_t i, n = d->rows * d->states * d->width;
    assert_int_equal(dspark_writer_create(&w, in_folder(name), NULL), DSPARK_OK);
    if (d->ids) declare(w, "token_ids", d->id_dtype, 1, d->ids, 0, 0);
    declare(w, "hidden_states", DSPARK_BF16, 3, d->rows, d->states, d->width);
    if (d->positions) declare(w, "positions", DSPARK_I64, 1, d->positions, 0, 0);
    for (i = 0; i < d->ids; i++) {
        int64_t id = i == 2 ? d->bad_id : (int64_t)i;
        int32_t narrow = (int32_t)id;
        if (d->id_dtype == DSPARK_I32)
            assert_int_equal(dspark_writer_data(w, &narrow, 4, NULL), DSPARK_OK);
        else
            assert_int_equal(dspark_writer_data(w, &id, 8, NULL), DSPARK_OK);
    }
    for (i = 0; i < n; i++) {
        uint16_t value = (long)i == d->nan_at ? 0x7fc0 : (uint16_t)(0x3f00 + i % 100);
        assert_int_equal(dspark_writer_data(w, &value, 2, NULL), DSPARK_OK);
    }
    for (i = 0; i < d->positions; i++) {
        int64_t position = i + 1 == d->positions && d->last_position
                               ? d->last_position : d->first_position + (int64_t)i;
        assert_int_equal(dspark_writer_data(w, &position, 8, NULL), DSPARK_OK);
    }
    assert_int_equal(dspark_writer_commit(w, NULL), DSPARK_OK);
}

static void refuse_dump(const dump_shape *d, const char *options, const char *part,
                        const char *other)
{
    cli_result r;
    write_dump("bad.st", d);
    r = run_cli("context tiny --taps bad.st --out never.st %s", options);
    if (r.code != 3) print_error("%d: %s\n", r.code, r.err);
    assert_int_equal(r.code, 3);
    assert_string_equal(r.out, "");
    assert_has(r.err, "bad.st");
    assert_has(r.err, part);
    assert_has(r.err, other);
    assert_false(folder_has("never.st"));
}

/* Files are named once, as the user wrote them, and what is no part of the checkpoint without it. */
static void test_files_are_named_once(void **state)
{
    (void)state;
    assert_int_equal(run_program("/bin/mkdir", "deep").code, 0);
    tmpdir_write(in_folder("deep/cut.st"), "0123456789", 10);
    assert_memory_equal(run_cli_to(3, "context tiny --taps deep/cut.st").err, "dspark: deep/cut.st: ", 21);
    assert_null(strstr(run_cli_to(3, "context tiny --taps deep/cut.st").err, ": cut.st"));
    assert_memory_equal(run_cli_to(3, "compare deep/cut.st deep/cut.st").err, "dspark: deep/cut.st: ", 21);
    assert_null(strstr(run_cli_to(3, "compare deep/cut.st deep/cut.st").err, ": cut.st"));
    assert_memory_equal(run_cli_to(3, "context tiny --taps dump.st --prepacked deep/cut.st").err,
                        "dspark: deep/cut.st: not a prepacked file", 41);
}

static void test_bad_dumps(void **state)
{
    dump_shape d = good;
    (void)state;
    write_dump("good.st", &d);
    assert_int_equal(run_cli("context tiny --taps good.st").code, 0);
    d.id_dtype = DSPARK_I32;
    d.states = N_TAPS; /* without the verifier's state */
    write_dump("good.st", &d);
    assert_int_equal(run_cli("context tiny --taps good.st").code, 0);

    d = good, d.states = N_TAPS - 1;
    refuse_dump(&d, "", "hidden_states", "[seq, 5 or 6, 64]");
    d = good, d.states = N_TAPS + 2;
    refuse_dump(&d, "", "hidden_states", "[4, 7, 64]");
    d = good, d.width = TAP_WIDTH - 1;
    refuse_dump(&d, "", "hidden_states", "[4, 6, 63]");
    d = good, d.ids = 3;
    refuse_dump(&d, "", "token_ids", "[4]");
    d = good, d.ids = 0;
    refuse_dump(&d, "", "token_ids", "no such tensor");
    d = good, d.id_dtype = DSPARK_U64;
    refuse_dump(&d, "", "token_ids", "U64");
    d = good, d.bad_id = VOCAB;
    refuse_dump(&d, "", "row 2", "found 97");
    d = good, d.bad_id = -1;
    refuse_dump(&d, "", "row 2", "found -1");
    d = good, d.rows = 0, d.ids = 0;
    refuse_dump(&d, "", "hidden_states", "at least one row");
    d = good, d.positions = 3;
    refuse_dump(&d, "", "positions", "[3]");
    d = good, d.positions = 4, d.last_position = 4;
    refuse_dump(&d, "", "row 3", "found 4");
    d = good, d.positions = 4, d.last_position = 2;
    refuse_dump(&d, "", "row 3", "found 2");
    d = good, d.positions = 4, d.first_position = -1;
    refuse_dump(&d, "", "row 0", "found -1");
    d = good, d.positions = 4, d.first_position = INT64_MAX - 2;
    d.last_position = INT64_MIN; /* what a wrapping sum would give */
    refuse_dump(&d, "", "row 3", "found -");
    d = good, d.positions = 4, d.first_position = 1048574;
    refuse_dump(&d, "", "do not fit", "0 to 1048575");
    d = good, d.positions = 4, d.first_position = 7;
    refuse_dump(&d, "--start-position 8", "positions begin at 7", "says 8");
    d = good, d.nan_at = (2 * (N_TAPS + 1) + 3) * TAP_WIDTH + 5;
    refuse_dump(&d, "", "row 2, tap 3", "element 5");
    d = good, d.nan_at = (1 * (N_TAPS + 1) + N_TAPS) * TAP_WIDTH + 63;
    refuse_dump(&d, "--batch 1", "row 1, the verifier's state", "element 63");
    refuse_dump(&good, "--start-position 1048573", "do not fit", "1048575");
}

static void test_positions(void **state)
{
    dump_shape d = good;
    cli_result r;
    (void)state;
    write_dump("plain.st", &d);
    d.positions = 4;
    d.first_position = 7;
    write_dump("seven.st", &d);
    assert_int_equal(run_cli("context tiny --taps seven.st --out s1.st").code, 0);
    assert_int_equal(run_cli("context tiny --taps plain.st --out s2.st --start-position 7").code,
                     0);
    assert_true(same_files("s1.st", "s2.st"));
    r = run_cli("context tiny --taps plain.st --start-position 1048572"); /* the last four */
    assert_int_equal(r.code, 0);
    assert_has(r.out, "4 rows lie outside the trained window of 32768");
    r = run_cli("context tiny --taps plain.st --start-position 32766");
    assert_has(r.out, "2 rows lie outside the trained window");
    r = run_cli("context tiny --taps plain.st --start-position 32764");
    assert_null(strstr(r.out, "outside the trained window"));
    r = run_cli("context tiny --taps plain.st --start-position 1048576");
    assert_int_equal(r.code, 2);
    assert_has(r.err, "0 to 1048575");
}

/* ---- rows that overflow ---- */

#define TARGET DSPARK_TEST_DATA "/golden-draft/target-64x97"

/* A dump of `n` rows of `ground`, but for row b, and row a, which is below it. */
static void write_spikes(const char *name, uint64_t n, uint16_t ground, uint64_t a, uint16_t value_a,
                         uint64_t b, uint16_t value_b)
{
    const size_t row = (N_TAPS + 1) * TAP_WIDTH;
    dspark_writer *w = NULL;
    assert_int_equal(dspark_writer_create(&w, in_folder(name), NULL), DSPARK_OK);
    declare(w, "token_ids", DSPARK_I64, 1, n, 0, 0);
    declare(w, "hidden_states", DSPARK_BF16, 3, n, N_TAPS + 1, TAP_WIDTH);
    for (uint64_t i = 0; i < n; i++) {
        const int64_t id = 1;
        assert_int_equal(dspark_writer_data(w, &id, 8, NULL), DSPARK_OK);
    }
    for (uint64_t i = 0; i < n * row; i++) {
        const uint64_t r = i / row;
        const uint16_t value = r == a ? value_a : r == b ? value_b : ground;
        assert_int_equal(dspark_writer_data(w, &value, 2, NULL), DSPARK_OK);
    }
    assert_int_equal(dspark_writer_commit(w, NULL), DSPARK_OK);
}

/* What is wrong is told of the dump's row, or of the checkpoint, with the same words for every batch. */
static void same_words(const char *checkpoint, const char *name, const char *says, int drafts)
{
    static const char *const batches[] = {"512", "1", "10", "149", "1024"};
    char first[800] = "";
    cli_result r;
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        r = run_cli("context %s --taps %s --out never.st --batch %s", checkpoint, name, batches[i]);
        assert_int_equal(r.code, 3);
        assert_has(r.err, name);
        assert_has(r.err, says);
        if (i == 0) snprintf(first, sizeof first, "%s", r.err);
        assert_string_equal(r.err, first);
        assert_false(folder_has("never.st"));
    }
    r = run_cli("compare %s --taps %s", checkpoint, name);
    assert_int_equal(r.code, 3);
    assert_has(r.err, name);
    assert_has(r.err, says);
    if (!drafts) return;
    r = run_cli("draft %s --taps %s --target " TARGET, checkpoint, name);
    assert_int_equal(r.code, 3);
    assert_has(r.err, name);
    assert_has(r.err, says);
}

static void test_overflow(void **state)
{
    (void)state;
    write_spikes("huge.st", 600, 0x3f80, 577, 0x7f7f, 577, 0);
    same_words("tiny", "huge.st", "huge.st: states: row 577 overflows", 1);
}

/* One row overflows, another one is no number: the first is named. */
static void test_overflow_and_nan(void **state)
{
    (void)state;
    write_spikes("both.st", 600, 0x3f80, 577, 0x7f7f, 579, 0x7fc0);
    same_words("tiny", "both.st", "both.st: states: row 577 overflows", 1);
    write_spikes("both.st", 600, 0x3f80, 577, 0x7fc0, 579, 0x7f7f);
    same_words("tiny", "both.st", "row 577, tap 0, element 0: expected a finite number", 1);
    write_spikes("both.st", 3, 0x3f80, 0, 0x7fc0, 1, 0x7f7f);
    same_words("tiny", "both.st", "row 0, tap 0, element 0: expected a finite number", 1);
}

/* All of a checkpoint's tensor becomes the same value. */
static void fill_tensor(const char *dir, const char *tensor, const char *value, size_t size)
{
    dspark_checkpoint *c = NULL;
    const dspark_tensor *t;
    uint64_t at, data = 0;
    char *bytes, path[200];
    size_t n, i;
    FILE *f;
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    assert_int_equal(dspark_checkpoint_open(&c, in_folder(dir), NULL), DSPARK_OK);
    for (i = 0; i < dspark_checkpoint_tensor_count(c); i++) data += dspark_checkpoint_tensor(c, i)->n_bytes;
    t = dspark_checkpoint_find(c, tensor);
    assert_non_null(t);
    bytes = read_whole_file(in_folder(path), &n);
    assert_non_null(bytes);
    at = n - data + (uint64_t)((const char *)t->data - (const char *)dspark_checkpoint_tensor(c, 0)->data);
    assert_memory_equal(bytes + at, t->data, t->n_bytes);
    for (i = 0; i < t->n_bytes; i += size) memcpy(bytes + at + i, value, size);
    dspark_checkpoint_close(c);
    f = fopen(in_folder(path), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
    free(bytes);
}

/* Weights of 1e20 behind the states: now an ordinary row overflows too, but only in its entries. Rows of
 * zeros stay zeros. */
static void test_overflow_of_two_kinds(void **state)
{
    (void)state;
    assert_int_equal(run_cli("synth hot --preset tiny").code, 0);
    fill_tensor("hot", "context_norm.weight", "\xad\x60", 2);
    write_spikes("two.st", 150, 0, 77, 0x3f80, 79, 0x7f7f);
    same_words("hot", "two.st", "dspark: hot: context_norm.weight: row 77, layer 0 overflows, whatever its own "
               "numbers are: the norm's are up to 9.97e+19 (rows of two.st)", 0);
    write_spikes("two.st", 150, 0, 77, 0x7f7f, 79, 0x3f80);
    same_words("hot", "two.st", "dspark: two.st: states: row 77 overflows", 0);
    write_spikes("two.st", 150, 0, 77, 0x3f80, 79, 0x7fc0);
    same_words("hot", "two.st", "dspark: hot: context_norm.weight: row 77, layer 0 overflows", 0);
}

/* Ordinary rows that overflow: the checkpoint's tensor or module is to blame, and is named. */
static void test_overflow_of_weights(void **state)
{
    static const struct { const char *tensor, *value; size_t size; const char *says; } rows[] = {
        {"context_proj.weight_scale", "\x00\x00\x80\x7d", 4, "context_proj: row 3 overflows, and its own numbers "
         "are ordinary: weights or scales are too large (rows of tame.st)"},
        {"layers.2.self_attn.kv_a_proj_with_mqa.weight_scale", "\x00\x00\x80\x7d", 4,
         "layers.2.self_attn.kv_a_proj_with_mqa: row 3, layer 2 overflows, and its own"},
        {"layers.1.self_attn.kv_a_layernorm.weight", "\x7f\x7f", 2,
         "layers.1.self_attn.kv_a_layernorm.weight: row 3, layer 1 overflows, whatever"},
        {"context_norm.weight", "\x7f\x7f", 2, "context_norm.weight: row 3 overflows, whatever"},
    };
    size_t i;
    (void)state;
    write_spikes("tame.st", 5, 0, 3, 0x3f80, 4, 0x3f80);
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        char dir[20], says[300];
        snprintf(dir, sizeof dir, "loud%zu", i);
        snprintf(says, sizeof says, "dspark: %s: %s", dir, rows[i].says);
        assert_int_equal(run_cli("synth %s --preset tiny --format fp8-tensor", dir).code, 0);
        fill_tensor(dir, rows[i].tensor, rows[i].value, rows[i].size);
        same_words(dir, "tame.st", says, 0);
    }
}

/* A norm of the taps themselves whose squares overflow: the row is refused, it does not go on as zeros. */
static void test_overflow_before_the_projection(void **state)
{
    (void)state;
    assert_int_equal(run_cli("synth normed --preset tiny --set fc_norm=true").code, 0);
    write_spikes("big.st", 150, 0x3f80, 77, 0x7f7f, 79, 0x3f80);
    same_words("normed", "big.st", "dspark: big.st: states: row 77 overflows: the result is not finite; the row's "
               "numbers are up to 3.39e+38", 0);
}

/* ---- outputs ---- */

static void test_refused_outputs(void **state)
{
    (void)state;
    assert_int_equal(run_cli("context tiny --taps dump.st --out dump.st").code, 2);
    assert_int_equal(run_cli("context tiny --taps dump.st --out ./dump.st").code, 2);
    assert_int_equal(run_cli("context tiny --taps dump.st --out tiny").code, 2);
    assert_int_equal(run_cli("context tiny --taps dump.st --out tiny/x.safetensors").code, 2);
    assert_int_equal(run_cli("context tiny --taps dump.st --out missing/x.st").code, 5);
    assert_int_equal(run_cli("context tiny --taps missing.st --out x.st").code, 3);
    assert_int_equal(run_cli("context missing --taps dump.st --out x.st").code, 3);
    assert_false(folder_has("x.st"));
}

static void test_cancelled(void **state)
{
    cli_result r;
    (void)state;
    assert_int_equal(run_cli("synth --dump long.st --for tiny --tokens 40000").code, 0);
    r = run_cli_cancelled(".dspark-", "context tiny --taps long.st --out stopped.st --isa ref "
                          "--threads 1 --batch 16 --path full");
    assert_int_equal(r.code, 130);
    assert_has(r.err, "cancelled");
    assert_string_equal(r.out, "");
    assert_false(folder_has("stopped.st"));
    assert_false(folder_has(".dspark-"));
}

/* ---- compare ---- */

static void test_compare(void **state)
{
    cli_result r = run_cli("compare tiny");
    json_t *doc, *layers;
    size_t i;
    (void)state;
    assert_int_equal(r.code, 0);
    assert_has(r.out, "equal: ");
    assert_has(r.out, "rope key");
    assert_null(strstr(r.out, "DIFFER"));
    r = run_cli("compare tiny --taps dump.st --tokens 33 --start-position 1000000 --json");
    assert_int_equal(r.code, 0);
    doc = said_json(&r);
    assert_true(json_is_true(json_object_get(doc, "equal")));
    assert_int_equal(json_integer_value(json_object_get(doc, "rows")), 33);
    assert_true(json_array_size(json_object_get(doc, "variants")) >= 6);
    layers = json_object_get(doc, "layers");
    assert_int_equal(json_array_size(layers), 5 * 2);
    for (i = 0; i < json_array_size(layers); i++) {
        const json_t *part = json_array_get(layers, i);
        double rms = json_real_value(json_object_get(part, "rms_rel"));
        double ulp = json_real_value(json_object_get(part, "max_ulp"));
        assert_true(rms > 0 && rms < 0.02); /* bf16 has 8 bits: near 2^-9 */
        assert_true(ulp > 0 && ulp < 16);
    }
    json_decref(doc);
    r = run_cli("compare tiny --isa ref --tokens 1 --seed 5");
    assert_int_equal(r.code, 0);
    r = run_cli("compare tiny --taps missing.st");
    assert_int_equal(r.code, 3);
    r = run_cli("compare tiny --start-position 1048575");
    assert_int_equal(r.code, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_output_file),
        cmocka_unit_test(test_same_bytes),
        cmocka_unit_test(test_cache_dtypes),
        cmocka_unit_test(test_files_are_named_once),
        cmocka_unit_test(test_bad_dumps),
        cmocka_unit_test(test_positions),
        cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_overflow_and_nan),
        cmocka_unit_test(test_overflow_of_weights),
        cmocka_unit_test(test_overflow_before_the_projection),
        cmocka_unit_test(test_overflow_of_two_kinds),
        cmocka_unit_test(test_refused_outputs),
        cmocka_unit_test(test_cancelled),
        cmocka_unit_test(test_compare),
    };
    return cmocka_run_group_tests(tests, make_inputs, remove_folder);
}
