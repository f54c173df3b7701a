/* Merged linears: one packed copy serves the whole matrix and any shard, and no shard can stay
 * unfilled, arrive twice or have another shape. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/alloc.h"
#include "base/numfmt.h"
#include "model/merged_linear.h"
#include "support/fixture.h"
#include "support/tmpdir.h"

#define SHARDS 4
#define K 150

static const uint32_t rows_of[SHARDS] = {1, 48, 49, 120};

typedef struct files {
    dspark_checkpoint *ckpt;
    dspark__module modules[SHARDS];
} files;

/* Four weights of different heights in one file. */
static void open_files(files *f)
{
    dspark_writer *w;
    dspark_error err;
    char name[32];
    const char *path = tmpdir_path(tmpdir_make(), "w.safetensors");
    uint64_t seed = 77;
    check(dspark_writer_create(&w, path, &err), DSPARK_OK, &err);
    for (int s = 0; s < SHARDS; s++) {
        uint64_t shape[2] = {rows_of[s], K};
        snprintf(name, sizeof name, "s%d.weight", s);
        check(dspark_writer_declare(w, name, DSPARK_BF16, 2, shape, &err), DSPARK_OK, &err);
    }
    for (int s = 0; s < SHARDS; s++)
        for (uint32_t i = 0; i < rows_of[s] * K; i++) {
            uint16_t v = (uint16_t)(0x3c00 + next_random(&seed) % 1024 + (next_random(&seed) & 0x8000));
            check(dspark_writer_data(w, &v, 2, &err), DSPARK_OK, &err);
        }
    check(dspark_writer_commit(w, &err), DSPARK_OK, &err);
    check(dspark_checkpoint_open(&f->ckpt, path, &err), DSPARK_OK, &err);
    memset(f->modules, 0, sizeof f->modules);
    for (int s = 0; s < SHARDS; s++) {
        snprintf(name, sizeof name, "s%d.weight", s);
        snprintf(f->modules[s].name, sizeof f->modules[s].name, "s%d", s);
        f->modules[s].n_parts = 1;
        f->modules[s].parts[0].suffix = "weight";
        f->modules[s].parts[0].tensor = dspark_checkpoint_find(f->ckpt, name);
        assert_non_null(f->modules[s].parts[0].tensor);
    }
}

static dspark__threads *two_threads(void)
{
    dspark__threads *t;
    assert_int_equal(dspark__threads_create(&t, 2, NULL, NULL, NULL), DSPARK_OK);
    return t;
}

static dspark_status fill(dspark__merged_linear *ml, uint32_t s, const files *f,
                          const dspark__module *module, dspark__threads *t,
                          int (*step)(void *user, uint64_t bytes), void *user, dspark_error *err)
{
    dspark__fill from = {f->ckpt, module, NULL, t, NULL, step, user, NULL};
    return dspark__merged_linear_fill(ml, s, &from, err);
}

static void fill_all(dspark__merged_linear *ml, const files *f, dspark__threads *t)
{
    dspark_error err;
    check(dspark__merged_linear_init(ml, "test", K, SHARDS, rows_of, NULL, &err), DSPARK_OK, &err);
    for (uint32_t s = 0; s < SHARDS; s++)
        check(fill(ml, s, f, &f->modules[s], t, NULL, NULL, &err),
              DSPARK_OK, &err);
    check(dspark__merged_linear_complete(ml, &err), DSPARK_OK, &err);
}

/* Every shard of the merged copy gives what a linear with that shard alone gives, for any cut of its
 * panels; and what one dot product in order of k gives. */
static void shards_are_what_they_are_alone(void **state)
{
    (void)state;
    files f;
    dspark_error err;
    dspark__merged_linear ml, alone;
    dspark__threads *t = two_threads();
    uint64_t seed = 9;
    static uint16_t x[140][K], merged[140][120], single[140][120];
    void *scratch = dspark__alloc(NULL, dspark__merged_linear_scratch(140), 64);
    assert_non_null(scratch);
    open_files(&f);
    fill_all(&ml, &f, t);
    uint64_t bytes = 0;
    for (int s = 0; s < SHARDS; s++) bytes += dspark__packing_bytes(&dspark__packing_bf16, rows_of[s], K);
    assert_int_equal(bytes, (1 + 1 + 2 + 3) * dspark__panel_elements(K) * 2);
    assert_int_equal(ml.bytes, bytes);
    for (int i = 0; i < 140; i++)
        for (int k = 0; k < K; k++) x[i][k] = (uint16_t)(0x3f00 + next_random(&seed) % 256);
    static const size_t counts[] = {0, 1, 5, 16, 17, 64, 140};
    for (int isa = DSPARK_ISA_REF; isa <= DSPARK_ISA_AVX512BF16; isa++) {
        dspark__kern kern;
        if (!dspark__isa_available((dspark_isa)isa)) continue;
        assert_int_equal(dspark__kern_select(&kern, (dspark_isa)isa, NULL), DSPARK_OK);
        for (uint32_t s = 0; s < SHARDS; s++) {
            check(dspark__merged_linear_init(&alone, "alone", K, 1, &rows_of[s], NULL, &err), DSPARK_OK,
                  &err);
            check(fill(&alone, 0, &f, &f.modules[s], t, NULL, NULL, &err),
                  DSPARK_OK, &err);
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                memset(merged, 0x11, sizeof merged);
                memset(single, 0x11, sizeof single);
                for (uint32_t p = 0; p < ml.shards[s].n_panels; p++)
                    dspark__merged_linear_rows(&ml, &kern, s, p, 1, x, sizeof x[0], counts[c], scratch,
                                               &merged[0][p * DSPARK__PANEL], 120);
                dspark__merged_linear_rows(&alone, &kern, 0, 0, alone.shards[0].n_panels, x, sizeof x[0],
                                           counts[c], scratch, single[0], 120);
                assert_memory_equal(merged, single, sizeof merged);
                for (size_t i = 0; i < 140; i++)
                    for (uint32_t o = 0; o < 120; o++)
                        if (i >= counts[c] || o >= rows_of[s])
                            assert_int_equal(merged[i][o], 0x1111); /* nothing beyond */
            }
            dspark__merged_linear_free(&alone);
            double want = 0, size = 0; /* the last output of the last row in double */
            double w[K];
            ml.shards[s].scheme->dequantise(&f.modules[s], NULL, rows_of[s] - 1, rows_of[s], K, w);
            for (int k = 0; k < K; k++) {
                double term = w[k] * dspark__bf16_to_f32(x[139][k]);
                want += term;
                size += fabs(term);
            }
            double got = dspark__bf16_to_f32(merged[139][rows_of[s] - 1]);
            assert_true(fabs(got - want) <= fabs(want) / 256 + size * K * 0x1p-24);
        }
    }
    dspark__free(NULL, scratch, dspark__merged_linear_scratch(140));
    dspark__merged_linear_free(&ml);
    dspark_checkpoint_close(f.ckpt);
    dspark__threads_free(t);
}

static void a_missing_or_double_shard_is_named(void **state)
{
    (void)state;
    files f;
    dspark_error err;
    dspark__merged_linear ml;
    dspark__threads *t = two_threads();
    open_files(&f);
    check(dspark__merged_linear_init(&ml, "context_kv", K, SHARDS, rows_of, NULL, &err), DSPARK_OK, &err);
    for (uint32_t s = 0; s < SHARDS; s++) {
        if (s == 2) continue;
        check(fill(&ml, s, &f, &f.modules[s], t, NULL, NULL, &err),
              DSPARK_OK, &err);
    }
    check(dspark__merged_linear_complete(&ml, &err), DSPARK_EMODEL, &err);
    assert_string_equal(err.where, "context_kv");
    assert_non_null(strstr(err.message, "shard 2 of 4"));
    check(fill(&ml, 1, &f, &f.modules[1], t, NULL, NULL, &err),
          DSPARK_EMODEL, &err);
    assert_non_null(strstr(err.message, "twice"));
    /* another shape: both shapes are named, the shard stays unfilled */
    check(fill(&ml, 2, &f, &f.modules[3], t, NULL, NULL, &err),
          DSPARK_EMODEL, &err);
    assert_non_null(strstr(err.message, "[120, 150]"));
    assert_non_null(strstr(err.message, "[49, 150]"));
    check(dspark__merged_linear_complete(&ml, &err), DSPARK_EMODEL, &err);
    /* a module that contradicts itself: named, not packed */
    dspark__module odd = f.modules[2];
    odd.parts[0].suffix = "weight_packed";
    check(fill(&ml, 2, &f, &odd, t, NULL, NULL, &err),
          DSPARK_EMODEL, &err);
    assert_non_null(strstr(err.message, "without a scale"));
    odd = f.modules[2];
    odd.parts[1] = odd.parts[0];
    odd.parts[1].suffix = "weight_scale";
    odd.n_parts = 2;
    check(fill(&ml, 2, &f, &odd, t, NULL, NULL, &err),
          DSPARK_EMODEL, &err); /* a scale beside bf16 */
    assert_non_null(strstr(err.message, "unexpected"));
    dspark__merged_linear_free(&ml);
    dspark_checkpoint_close(f.ckpt);
    dspark__threads_free(t);
}

/* Shards that are packed alike lie in one block, each behind the one before; what does not fit its place has
 * memory of its own, and what is streamed has no place. */
static void alike_shards_share_a_block(void **state)
{
    (void)state;
    static const dspark__packing nibbles = {.bits = 4, .format.bits = 4, .row_scale = 1};
    static const dspark__packing bytes = {.bits = 8, .format.bits = 8};
    dspark__merged_linear ml;
    dspark_error err;
    check(dspark__merged_linear_init(&ml, "test", K, SHARDS, rows_of, NULL, &err), DSPARK_OK, &err);
    ml.alike = 1;
    ml.shards[0].packing = ml.shards[1].packing = ml.shards[3].packing = nibbles;
    ml.shards[2].packing = bytes;
    for (uint32_t s = 0; s < SHARDS; s++)
        check(dspark__shard_take_memory(&ml, s, 0, &err), DSPARK_OK, &err);
    assert_non_null(ml.arena);
    unsigned char *at = ml.arena;
    for (uint32_t s = 0; s < SHARDS; s++) {
        const uint64_t place = dspark__packing_bytes(&nibbles, rows_of[s], K);
        if (s == 2) {
            assert_non_null(ml.shards[s].memory);
            assert_ptr_equal(ml.shards[s].codes, ml.shards[s].memory);
        } else {
            assert_null(ml.shards[s].memory);
            assert_ptr_equal(ml.shards[s].codes, at);
            assert_ptr_equal(ml.shards[s].row_scales, at + place - ml.shards[s].n_panels * 192);
        }
        memset(ml.shards[s].codes, 1, (size_t)ml.shards[s].bytes);
        at += place;
    }
    assert_int_equal(at - ml.arena, ml.arena_bytes);
    dspark__merged_linear_free(&ml);

    check(dspark__merged_linear_init(&ml, "test", K, SHARDS, rows_of, NULL, &err), DSPARK_OK, &err);
    ml.alike = 1;
    ml.shards[0].packing = nibbles;
    check(dspark__shard_take_memory(&ml, 0, 1, &err), DSPARK_OK, &err);
    assert_null(ml.arena);
    assert_null(ml.shards[0].codes);
    dspark__merged_linear_free(&ml);
}

static int stop_after_two(void *user, uint64_t bytes)
{
    (void)bytes;
    return ++*(int *)user > 1;
}

static void filling_can_be_cancelled(void **state)
{
    (void)state;
    files f;
    dspark_error err;
    dspark__merged_linear ml;
    dspark__threads *t = two_threads();
    int steps = 0;
    open_files(&f);
    check(dspark__merged_linear_init(&ml, "test", K, SHARDS, rows_of, NULL, &err), DSPARK_OK, &err);
    check(fill(&ml, 0, &f, &f.modules[0], t, stop_after_two, &steps, &err),
          DSPARK_OK, &err);
    check(fill(&ml, 1, &f, &f.modules[1], t, stop_after_two, &steps, &err),
          DSPARK_ECANCELLED, &err);
    check(dspark__merged_linear_complete(&ml, &err), DSPARK_EMODEL, &err);
    dspark__merged_linear_free(&ml);
    dspark_checkpoint_close(f.ckpt);
    dspark__threads_free(t);
}

static void sizes_that_overflow_are_refused(void **state)
{
    (void)state;
    static const uint32_t huge[2] = {UINT32_MAX, UINT32_MAX}, none[1] = {0};
    dspark__merged_linear ml;
    dspark_error err;
    assert_int_equal(dspark__packing_bytes(&dspark__packing_bf16, UINT32_MAX, UINT64_MAX), 0);
    check(dspark__merged_linear_init(&ml, "huge", UINT32_MAX, 2, huge, NULL, &err), DSPARK_EINVAL, &err);
    check(dspark__merged_linear_init(&ml, "none", 64, 1, none, NULL, &err), DSPARK_EINVAL, &err);
    /* K3: what inspect promises for the cross-layer matrix */
    assert_int_equal(dspark__packing_bytes(&dspark__packing_bf16, 576, 7168) * 5, 41287680);
}

/* ---- digests ---- */

enum { TALL = 1700, WIDE = 2600 }; /* two pieces of a packing */

/* What a weight's rows are, in the words of docs/formats.md: a digest of each one's digest, in order. */
static void expect_digest(char hex[33], const unsigned char *rows, size_t stride, size_t row_bytes)
{
    dspark__digest d;
    dspark__digest_init(&d);
    for (size_t r = 0; r < TALL; r++) {
        unsigned char row[16];
        dspark__digest_bytes(rows + r * stride, row_bytes, row);
        dspark__digest_update(&d, row, 16);
    }
    dspark__digest_hex(&d, hex);
}

static void open_tall(files *f)
{
    static const uint64_t shape[2] = {TALL, WIDE};
    dspark_writer *w;
    dspark_error err;
    const char *path = tmpdir_path(tmpdir_make(), "tall.safetensors");
    uint64_t seed = 5;
    static uint16_t row[WIDE];
    check(dspark_writer_create(&w, path, &err), DSPARK_OK, &err);
    check(dspark_writer_declare(w, "tall.weight", DSPARK_BF16, 2, shape, &err), DSPARK_OK, &err);
    for (int r = 0; r < TALL; r++) {
        for (int i = 0; i < WIDE; i++) row[i] = (uint16_t)(next_random(&seed) % 0x7f80);
        check(dspark_writer_data(w, row, sizeof row, &err), DSPARK_OK, &err);
    }
    check(dspark_writer_commit(w, &err), DSPARK_OK, &err);
    check(dspark_checkpoint_open(&f->ckpt, path, &err), DSPARK_OK, &err);
    memset(f->modules, 0, sizeof f->modules);
    snprintf(f->modules[0].name, sizeof f->modules[0].name, "tall");
    f->modules[0].n_parts = 1;
    f->modules[0].parts[0].suffix = "weight";
    f->modules[0].parts[0].tensor = dspark_checkpoint_find(f->ckpt, "tall.weight");
}

/* Packed, hashed alone, from a file or from memory, by however many threads: one digest. */
static void digest_is_of_rows_in_order(void **state)
{
    const uint32_t tall = TALL;
    const size_t row = WIDE * 2, stride = row + 6;
    unsigned char *wide = malloc(TALL * stride), *codes = NULL;
    char want[33], hex[33];
    dspark_error err;
    files f;
    (void)state;
    assert_non_null(wide);
    open_tall(&f);
    const unsigned char *data = f.modules[0].parts[0].tensor->data;
    for (size_t r = 0; r < TALL; r++) memcpy(wide + r * stride, data + r * row, row);
    expect_digest(want, data, row, row);
    for (uint32_t n_threads = 1; n_threads <= 3; n_threads++) {
        dspark__threads *t;
        check(dspark__threads_create(&t, n_threads, NULL, NULL, &err), DSPARK_OK, &err);
        for (int way = 0; way < 4; way++) {
            dspark__merged_linear ml;
            dspark__digest d;
            dspark__fill from = {.ckpt = f.ckpt, .module = &f.modules[0], .threads = t, .digest = &d};
            dspark__digest_init(&d);
            check(dspark__merged_linear_init(&ml, "test", WIDE, 1, &tall, NULL, &err), DSPARK_OK, &err);
            dspark_status st = way == 0   ? dspark__merged_linear_fill(&ml, 0, &from, &err)
                               : way == 1 ? dspark__merged_linear_hash(&ml, 0, &from, &err)
                               : way == 2 ? dspark__merged_linear_fill_rows(&ml, 0, wide, stride, &from, &err)
                                          : dspark__merged_linear_hash_rows(&ml, 0, wide, stride, &from, &err);
            check(st, DSPARK_OK, &err);
            dspark__digest_hex(&d, hex);
            assert_string_equal(hex, want);
            if (way % 2 == 0) { /* and packed, one as the other */
                const size_t bytes = (size_t)ml.shards[0].bytes;
                if (!codes) assert_non_null(codes = memcpy(malloc(bytes), ml.shards[0].codes, bytes));
                assert_memory_equal(codes, ml.shards[0].codes, bytes);
            }
            dspark__merged_linear_free(&ml);
        }
        dspark__threads_free(t);
    }
    dspark_checkpoint_close(f.ckpt);
    free(codes);
    free(wide);
}

static int add_bytes(void *user, uint64_t bytes)
{
    *(uint64_t *)user += bytes;
    return 0;
}

/* More rows than a piece has: pieces follow each other, and end inside a panel. */
static void pieces_follow_each_other(void **state)
{
    enum { ROWS = 65536 + 2 * 48 + 5, COLUMNS = 6 };
    uint64_t seed = 78, heard[2];
    uint16_t *w = malloc((size_t)ROWS * COLUMNS * sizeof *w);
    char hex[2][33];
    dspark__merged_linear plain, ml;
    dspark_error err;
    (void)state;
    assert_non_null(w);
    for (size_t i = 0; i < (size_t)ROWS * COLUMNS; i++) w[i] = (uint16_t)(0x3c00 + next_random(&seed) % 1024);
    check(dspark__merged_linear_init_even(&plain, "plain", COLUMNS, 1, ROWS, NULL, &err), DSPARK_OK, &err);
    check(dspark__merged_linear_fill_dense(&plain, 0, w, &err), DSPARK_OK, &err);
    for (uint32_t n_threads = 1; n_threads <= 2; n_threads++) {
        dspark__threads *t;
        dspark__digest digest;
        uint64_t *bytes = &heard[n_threads - 1];
        *bytes = 0;
        check(dspark__threads_create(&t, n_threads, NULL, NULL, &err), DSPARK_OK, &err);
        dspark__digest_init(&digest);
        dspark__fill from = {.threads = t, .digest = &digest, .step = add_bytes, .user = bytes};
        check(dspark__merged_linear_init_even(&ml, "pieces", COLUMNS, 1, ROWS, NULL, &err), DSPARK_OK, &err);
        check(dspark__merged_linear_fill_rows(&ml, 0, w, COLUMNS * 2, &from, &err), DSPARK_OK, &err);
        assert_memory_equal(ml.shards[0].codes, plain.shards[0].codes, plain.shards[0].bytes);
        dspark__digest_hex(&digest, hex[n_threads - 1]);
        dspark__merged_linear_free(&ml);
        dspark__threads_free(t);
    }
    assert_string_equal(hex[0], hex[1]);
    assert_true(heard[0] == (uint64_t)ROWS * COLUMNS * 2 && heard[1] == heard[0]);
    dspark__merged_linear_free(&plain);
    free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_are_what_they_are_alone),
        cmocka_unit_test(a_missing_or_double_shard_is_named),
        cmocka_unit_test(alike_shards_share_a_block),
        cmocka_unit_test(filling_can_be_cancelled),
        cmocka_unit_test(sizes_that_overflow_are_refused),
        cmocka_unit_test(digest_is_of_rows_in_order),
        cmocka_unit_test(pieces_follow_each_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
