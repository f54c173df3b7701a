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
        cmocka_unit_test(test_twice),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests_name("merged_dense", tests, NULL, NULL);
}
