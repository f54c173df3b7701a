/* Shards from matrices in memory: turned or not, many at once or one by one, any number of threads, they are the
 * same panels; and what fails leaves nothing behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model/merged_linear.h"
#include "support/fixture.h"
#include "support/oom.h"

enum { HEADS = 7 };

static dspark_error err;

static uint16_t *some_matrix(size_t n, uint64_t *seed)
{
    uint16_t *w = malloc(n * sizeof *w);
    assert_non_null(w);
    for (size_t i = 0; i < n; i++) w[i] = (uint16_t)(0x3c00 + next_random(seed) % 1024 + (next_random(seed) & 0x8000));
    return w;
}

/* All products of a narrow shard and of one that is not, of as many rows as different ways take, whole and in two
 * parts of its panels. */
static void same_products(const dspark__merged_linear *a, const dspark__merged_linear *b, uint64_t *seed)
{
    static const size_t n_rows[] = {1, 5, 7, 9, 16, 17, 48, 64, 100};
    const uint32_t k = a->k, rows = a->shards[0].rows, panels = a->shards[0].n_panels;
    uint16_t *x = some_matrix(100 * (size_t)k, seed), *out = malloc((size_t)200 * rows * sizeof *out);
    void *scratch = aligned_alloc(64, (dspark__merged_linear_scratch(100) + 63) / 64 * 64);
    assert_true(out && scratch);
    for (int isa = DSPARK_ISA_AVX2; isa <= (int)dspark__isa_best(); isa++) {
        dspark__kern kern;
        check(dspark__kern_select(&kern, (dspark_isa)isa, &err), DSPARK_OK, &err);
        for (size_t i = 0; i < sizeof n_rows / sizeof *n_rows; i++) {
            const size_t n = n_rows[i] * rows;
            memset(out, 0xa5, 2 * n * sizeof *out);
            dspark__merged_linear_rows(a, &kern, 1, 0, panels, x, 2 * (size_t)k, n_rows[i], scratch, out, rows);
            dspark__merged_linear_rows(b, &kern, 1, 0, panels, x, 2 * (size_t)k, n_rows[i], scratch, out + n, rows);
            assert_memory_equal(out, out + n, n * sizeof *out);
            if (panels == 1) continue;
            memset(out + n, 0xa5, n * sizeof *out);
            dspark__merged_linear_rows(b, &kern, 1, 0, 1, x, 2 * (size_t)k, n_rows[i], scratch, out + n, rows);
            dspark__merged_linear_rows(b, &kern, 1, 1, panels - 1, x, 2 * (size_t)k, n_rows[i], scratch, out + n + 48,
                                       rows);
            assert_memory_equal(out, out + n, n * sizeof *out);
        }
    }
    free(scratch);
    free(out);
    free(x);
}

static void test_narrow(void **state)
{
    static const uint32_t rows[] = {16, 33, 64, 80, 113, 128}, columns[] = {7, 130, 512, 1800};
    uint64_t seed = 8;
    (void)state;
    for (size_t i = 0; i < 24; i++) {
        const uint32_t r = rows[i % 6], k = columns[i / 6];
        for (uint32_t turned = 0; turned < 2; turned++) {
            const size_t stride = turned ? r : k;
            uint16_t *w = some_matrix(HEADS * (size_t)r * k, &seed);
            const dspark__dense from = {.w = w, .step = (size_t)r * k, .stride = stride, .turned = (int)turned};
            dspark__merged_linear plain, narrow;
            check(dspark__merged_linear_init_even(&plain, "plain", k, HEADS, r, NULL, &err), DSPARK_OK, &err);
            check(dspark__merged_linear_init_even(&narrow, "narrow", k, HEADS, r, NULL, &err), DSPARK_OK, &err);
            narrow.narrow = 1;
            if (i % 2) check(dspark__merged_linear_reserve(&narrow, &err), DSPARK_OK, &err);
            check(dspark__merged_linear_fill_many(&plain, 0, HEADS, &from, NULL, &err), DSPARK_OK, &err);
            check(dspark__merged_linear_fill_many(&narrow, 0, HEADS, &from, NULL, &err), DSPARK_OK, &err);
            assert_int_equal(narrow.bytes, HEADS * dspark__packing_bytes(&dspark__packing_narrow, r, k));
            assert_int_equal(narrow.bytes, HEADS * ((size_t)(r == 33 ? 48 : (r + 15) / 16 * 16) * ((k + 1) / 2 * 4)));
            if (i % 2) assert_ptr_equal(narrow.shards[1].codes, narrow.shards[0].codes + narrow.shards[0].bytes);
            same_products(&plain, &narrow, &seed);
            dspark__merged_linear_free(&plain);
            dspark__merged_linear_free(&narrow);
            free(w);
        }
    }
}

static void compare(const dspark__merged_linear *a, const dspark__merged_linear *b)
{
    assert_int_equal(a->n_filled, b->n_filled);
    assert_int_equal(a->bytes, b->bytes);
    for (uint32_t s = 0; s < HEADS; s++) assert_memory_equal(a->shards[s].codes, b->shards[s].codes, a->shards[s].bytes);
}

/* Heads of rows x k, as kv_b holds them: one behind the other, and between them what is another's. */
static void try_shape(uint32_t rows, uint32_t k, int turned, uint64_t *seed)
{
    const size_t stride = turned ? rows : k, step = (size_t)rows * k + 3 * stride;
    uint16_t *w = some_matrix(HEADS * step, seed), *plain = malloc((size_t)rows * k * sizeof *plain);
    const dspark__dense from = {.w = w, .step = step, .stride = stride, .turned = turned};
    dspark__merged_linear one, many;
    assert_non_null(plain);
    check(dspark__merged_linear_init_even(&one, "one", k, HEADS, rows, NULL, &err), DSPARK_OK, &err);
    for (uint32_t s = 0; s < HEADS; s++) {
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < k; i++) plain[r * k + i] = w[s * step + (turned ? i * rows + r : r * k + i)];
        check(dspark__merged_linear_fill_dense(&one, s, plain, &err), DSPARK_OK, &err);
    }
    for (uint32_t n_threads = 0; n_threads <= 3; n_threads++) { /* 0: none are given */
        dspark__threads *t = NULL;
        if (n_threads) check(dspark__threads_create(&t, n_threads, NULL, NULL, &err), DSPARK_OK, &err);
        check(dspark__merged_linear_init_even(&many, "many", k, HEADS, rows, NULL, &err), DSPARK_OK, &err);
        if (n_threads % 2) check(dspark__merged_linear_reserve(&many, &err), DSPARK_OK, &err);
        check(dspark__merged_linear_fill_many(&many, 0, HEADS, &from, t, &err), DSPARK_OK, &err);
        compare(&one, &many);
        check(dspark__merged_linear_complete(&many, &err), DSPARK_OK, &err);
        dspark__merged_linear_free(&many);
        dspark__threads_free(t);
    }
    dspark__merged_linear_free(&one);
    free(plain);
    free(w);
}

static void test_shapes(void **state)
{
    static const uint32_t rows[] = {1, 16, 48, 49, 128}, columns[] = {1, 2, 7, 64, 131};
    uint64_t seed = 5;
    (void)state;
    for (size_t i = 0; i < 25; i++)
        for (int turned = 0; turned < 2; turned++) try_shape(rows[i % 5], columns[i / 5], turned, &seed);
}

static void test_twice(void **state)
{
    uint64_t seed = 6;
    uint16_t *w = some_matrix((size_t)HEADS * 48 * 8, &seed);
    const dspark__dense from = {.w = w, .step = 48 * 8, .stride = 8};
    dspark__merged_linear ml;
    (void)state;
    check(dspark__merged_linear_init_even(&ml, "double", 8, HEADS, 48, NULL, &err), DSPARK_OK, &err);
    check(dspark__merged_linear_fill_dense(&ml, 4, w, &err), DSPARK_OK, &err);
    check(dspark__merged_linear_fill_many(&ml, 2, 4, &from, NULL, &err), DSPARK_EMODEL, &err);
    assert_non_null(strstr(err.message, "shard 4 was filled twice"));
    assert_int_equal(ml.n_filled, 1);
    for (uint32_t s = 0; s < HEADS; s++) assert_int_equal(ml.shards[s].scheme != NULL, s == 4);
    check(dspark__merged_linear_fill_many(&ml, 0, 4, &from, NULL, &err), DSPARK_OK, &err);
    check(dspark__merged_linear_fill_many(&ml, 5, 2, &from, NULL, &err), DSPARK_OK, &err);
    check(dspark__merged_linear_complete(&ml, &err), DSPARK_OK, &err);
    dspark__merged_linear_free(&ml);
    free(w);
}

static void test_no_memory(void **state)
{
    uint64_t seed = 7;
    uint16_t *w = some_matrix((size_t)HEADS * 48 * 8, &seed);
    const dspark__dense from = {.w = w, .step = 48 * 8, .stride = 8};
    dspark__merged_linear ml;
    (void)state;
    if (!oom_available()) skip();
    check(dspark__merged_linear_init_even(&ml, "small", 8, HEADS, 48, NULL, &err), DSPARK_OK, &err);
    for (size_t n = 1; n <= HEADS; n++) {
        oom_fail_nth(n);
        dspark_status st = dspark__merged_linear_fill_many(&ml, 0, HEADS, &from, NULL, &err);
        oom_stop();
        assert_int_equal(st, DSPARK_ENOMEM);
        assert_int_equal(ml.n_filled, 0);
        assert_int_equal(ml.bytes, 0);
        for (uint32_t s = 0; s < HEADS; s++) assert_null(ml.shards[s].codes);
    }
    check(dspark__merged_linear_fill_many(&ml, 0, HEADS, &from, NULL, &err), DSPARK_OK, &err);
    dspark__merged_linear_free(&ml);
    free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_narrow),
        cmocka_unit_test(test_twice),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests_name("merged_dense", tests, NULL, NULL);
}
