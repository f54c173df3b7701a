/* Linears over rows: whoever computes which unit, and however rows are cut into tiles and k into blocks,
 * the bits are those of one panel after the other on the reference level; a listener hears of each
 * tile once, when it is complete. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/alloc.h"
#include "model/linear.h"
#include "support/fixture.h"

#define K 2001      /* more than a block of k, and odd */
#define SHARDS 3
#define MOST 260
#define WIDTH 144   /* of an output row */
#define OUTPUTS 141 /* of the largest shard: three panels, the last one not full */

static const uint32_t rows_of[SHARDS] = {OUTPUTS, 48, 100};

typedef struct fixture_linear {
    dspark__merged_linear ml;
    uint16_t *x;                /* [MOST][K] */
    uint16_t *want[SHARDS];     /* [MOST][WIDTH] */
    uint16_t *out[SHARDS];
} fixture_linear;

static uint16_t *take(size_t n)
{
    uint16_t *p = malloc(n * sizeof *p);
    assert_non_null(p);
    return p;
}

static int set_up(void **state)
{
    fixture_linear *f = calloc(1, sizeof *f);
    dspark__kern ref;
    uint64_t seed = 5;
    assert_non_null(f);
    void *scratch = dspark__alloc(NULL, dspark__merged_linear_scratch(1), 64);
    assert_non_null(scratch);
    assert_int_equal(dspark__kern_select(&ref, DSPARK_ISA_REF, NULL), DSPARK_OK);
    assert_int_equal(dspark__merged_linear_init(&f->ml, "test", K, SHARDS, rows_of, NULL, NULL), DSPARK_OK);
    f->x = take(MOST * K);
    for (size_t i = 0; i < MOST * K; i++)
        f->x[i] = (uint16_t)(0x3c00 + next_random(&seed) % 1024 + (next_random(&seed) & 0x8000));
    for (uint32_t s = 0; s < SHARDS; s++) {
        size_t n = (size_t)rows_of[s] * K;
        uint16_t *w = take(n);
        for (size_t i = 0; i < n; i++)
            w[i] = (uint16_t)(0x3c00 + next_random(&seed) % 1024 + (next_random(&seed) & 0x8000));
        assert_int_equal(dspark__merged_linear_fill_dense(&f->ml, s, w, NULL), DSPARK_OK);
        free(w);
        f->want[s] = take(MOST * WIDTH);
        f->out[s] = take(MOST * WIDTH);
        memset(f->want[s], 0x11, MOST * WIDTH * 2);
        for (size_t i = 0; i < MOST; i++)
            for (uint32_t p = 0; p < f->ml.shards[s].n_panels; p++)
                dspark__merged_linear_rows(&f->ml, &ref, s, p, 1, f->x + i * K, K * 2, 1, scratch,
                                           f->want[s] + i * WIDTH + p * DSPARK__PANEL, WIDTH);
    }
    dspark__free(NULL, scratch, dspark__merged_linear_scratch(1));
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    fixture_linear *f = *state;
    dspark__merged_linear_free(&f->ml);
    for (int s = 0; s < SHARDS; s++) {
        free(f->want[s]);
        free(f->out[s]);
    }
    free(f->x);
    free(f);
    return 0;
}

typedef struct ear {
    const fixture_linear *f;
    atomic_int heard[SHARDS][MOST]; /* by row */
    atomic_int incomplete;
} ear;

static void hear(void *user, uint32_t linear, size_t row, size_t n)
{
    ear *e = user;
    for (size_t i = row; i < row + n; i++) {
        atomic_fetch_add(&e->heard[linear][i], 1);
        if (memcmp(e->f->out[linear] + i * WIDTH, e->f->want[linear] + i * WIDTH,
                   rows_of[linear] * 2) != 0)
            atomic_fetch_add(&e->incomplete, 1);
    }
}

static void run_one(const fixture_linear *f, dspark__threads *t, uint32_t n_threads,
                    const dspark__kern *kern, size_t n, int heard)
{
    static ear e;
    dspark__linear linears[SHARDS];
    const dspark__linear_listener listener = {hear, &e};
    size_t bytes = dspark__merged_linear_scratch(n < DSPARK__TILE_ROWS ? n : DSPARK__TILE_ROWS);
    bytes = (bytes + 63) / 64 * 64;
    void *scratch = dspark__alloc(NULL, bytes * n_threads, 64);
    assert_non_null(scratch);
    memset(&e, 0, sizeof e);
    e.f = f;
    for (uint32_t s = 0; s < SHARDS; s++) {
        linears[s] = (dspark__linear){&f->ml, s, f->x, K * 2, f->out[s], WIDTH};
        memset(f->out[s], 0x11, MOST * WIDTH * 2);
    }
    if (heard) dspark__linears_run_heard(t, kern, linears, SHARDS, n, scratch, bytes, &listener);
    else dspark__linears_run(t, kern, linears, SHARDS, n, scratch, bytes);
    for (uint32_t s = 0; s < SHARDS; s++) {
        assert_memory_equal(f->out[s], f->want[s], n * WIDTH * 2);
        for (size_t i = n * WIDTH; i < MOST * WIDTH; i++) assert_int_equal(f->out[s][i], 0x1111);
        for (size_t i = 0; heard && i < MOST; i++) assert_int_equal(e.heard[s][i], i < n);
    }
    assert_int_equal(e.incomplete, 0);
    dspark__free(NULL, scratch, bytes * n_threads);
}

/* On both sides of every switch: 8 and 16 rows (tiles), 48 (the order of panels and k), 128 (tiles of
 * rows that units are made of), and 16, 24 and 32 (parts of a tile), with parts that are short or, as at
 * 200, beyond the last row. */
static const size_t counts[] = {1, 7, 8, 9, 12, 16, 17, 24, 25, 31, 32, 33, 48, 49, 65, 128, 129, 200, MOST};
enum { N_COUNTS = sizeof counts / sizeof counts[0] };

static void any_threads_give_the_same_bits(void **state)
{
    const fixture_linear *f = *state;
    static const uint32_t threads[] = {1, 2, 5};
    dspark__kern kern;
    assert_int_equal(dspark__kern_select(&kern, DSPARK_ISA_AUTO, NULL), DSPARK_OK);
    for (int i = 0; i < 3; i++) {
        dspark__threads *t;
        assert_int_equal(dspark__threads_create(&t, threads[i], NULL, NULL, NULL), DSPARK_OK);
        for (int c = 0; c < N_COUNTS; c++) {
            run_one(f, t, threads[i], &kern, counts[c], 0);
            run_one(f, t, threads[i], &kern, counts[c], 1);
        }
        run_one(f, t, threads[i], &kern, 0, 1);
        dspark__threads_free(t);
    }
}

static void any_level_gives_the_same_bits(void **state)
{
    const fixture_linear *f = *state;
    dspark__threads *t;
    assert_int_equal(dspark__threads_create(&t, 2, NULL, NULL, NULL), DSPARK_OK);
    for (int isa = DSPARK_ISA_AVX2; isa <= DSPARK_ISA_AVX512BF16; isa++) {
        dspark__kern kern;
        if (!dspark__isa_available((dspark_isa)isa)) continue;
        assert_int_equal(dspark__kern_select(&kern, (dspark_isa)isa, NULL), DSPARK_OK);
        for (int c = 0; c < N_COUNTS; c++) run_one(f, t, 2, &kern, counts[c], 1);
    }
    dspark__threads_free(t);
}

/* Units of few rows are many panels, of dense weights and of codes: on both sides of 16 rows and of a unit's
 * panels, what one panel after the other gives. */
static void units_of_many_panels_give_the_same_bits(void **state)
{
    enum { SHORT_K = 96, TALL = 30, N = 18, STRIDE = TALL * 48 };
    static const uint32_t tall[] = {14 * 48 - 5, TALL * 48, 5 * 48}, threads[] = {1, 2};
    static const size_t few[] = {1, 5, 16, 17};
    static uint16_t x[N][SHORT_K], want[3][N][STRIDE], out[3][N][STRIDE];
    dspark__packing packing = {.bits = 4, .format = {.bits = 4, .scale = DSPARK__CODE_E8M0, .block = 32}};
    dspark__merged_linear ml;
    dspark__kern ref;
    uint64_t seed = 11;
    (void)state;
    const size_t bytes = (dspark__merged_linear_scratch(N) + 63) / 64 * 64;
    unsigned char *scratch = dspark__alloc(NULL, 2 * bytes, 64);
    uint16_t *w = take(tall[1] * (size_t)SHORT_K);
    assert_non_null(scratch);
    for (size_t i = 0; i < N; i++)
        for (size_t j = 0; j < SHORT_K; j++)
            x[i][j] = (uint16_t)(0x3c00 + next_random(&seed) % 1024 + (next_random(&seed) & 0x8000));
    for (size_t i = 0; i < tall[1] * (size_t)SHORT_K; i++)
        w[i] = (uint16_t)(0x3c00 + next_random(&seed) % 1024 + (next_random(&seed) & 0x8000));
    for (uint16_t c = 0; c < 16; c++) packing.format.table[c] = (uint16_t)(c ? 0x3e80 + 0x33 * c : 0);
    assert_int_equal(dspark__merged_linear_init(&ml, "test", SHORT_K, 3, tall, NULL, NULL), DSPARK_OK);
    assert_int_equal(dspark__merged_linear_fill_dense(&ml, 1, w, NULL), DSPARK_OK);
    for (uint32_t s = 0; s < 3; s += 2) {
        dspark__shard *shard = &ml.shards[s];
        shard->packing = packing;
        assert_int_equal(dspark__shard_take_memory(&ml, s, 0, NULL), DSPARK_OK);
        for (size_t i = 0; i < shard->n_panels * shard->code_stride; i++)
            shard->codes[i] = (unsigned char)next_random(&seed);
        for (size_t i = 0; i < shard->n_panels * shard->scale_stride; i++)
            shard->scales[i] = (uint8_t)(120 + next_random(&seed) % 16);
    }
    assert_int_equal(dspark__kern_select(&ref, DSPARK_ISA_REF, NULL), DSPARK_OK);
    for (uint32_t s = 0; s < 3; s++)
        for (uint32_t p = 0; p < ml.shards[s].n_panels; p++)
            dspark__merged_linear_rows(&ml, &ref, s, p, 1, x, sizeof x[0], N, scratch, &want[s][0][p * 48], STRIDE);
    for (int isa = DSPARK_ISA_REF; isa <= DSPARK_ISA_AVX512BF16; isa++)
        for (int i = 0; dspark__isa_available((dspark_isa)isa) && i < 2; i++) {
            dspark__kern kern;
            dspark__threads *t;
            dspark__linear linears[3];
            assert_int_equal(dspark__kern_select(&kern, (dspark_isa)isa, NULL), DSPARK_OK);
            assert_int_equal(dspark__threads_create(&t, threads[i], NULL, NULL, NULL), DSPARK_OK);
            for (uint32_t s = 0; s < 3; s++) linears[s] = (dspark__linear){&ml, s, x, sizeof x[0], out[s][0], STRIDE};
            for (size_t c = 0; c < sizeof few / sizeof few[0]; c++) {
                memset(out, 0, sizeof out);
                dspark__linears_run(t, &kern, linears, 3, few[c], scratch, bytes);
                for (uint32_t s = 0; s < 3; s++)
                    for (size_t row = 0; row < few[c]; row++)
                        assert_memory_equal(out[s][row], want[s][row], tall[s] * 2);
            }
            dspark__threads_free(t);
        }
    free(w);
    dspark__free(NULL, scratch, 2 * bytes);
    dspark__merged_linear_free(&ml);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_threads_give_the_same_bits),
        cmocka_unit_test(any_level_gives_the_same_bits),
        cmocka_unit_test(units_of_many_panels_give_the_same_bits),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
