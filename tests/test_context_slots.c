/* Context KV: which rows are written, which are left alone and what is refused. Every refusal must
 * leave the cache as it was. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <cmocka.h>

#include "dspark/dspark.h"
#include "support/fixture.h"
#include "support/oom.h"

static unsigned char *entry_of(const host_cache *h, const fixture *f, size_t layer, int64_t slot)
{
    return (unsigned char *)h->layers[layer] + (size_t)slot * f->width * 2;
}

static int untouched(const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != 0x5a) return 0;
    return 1;
}

static void run_ok(dspark_context *ctx, const dspark_batch *b, const host_cache *h,
                   dspark_run_info *info)
{
    dspark_error err;
    check(dspark_context_run(ctx, b, &h->view, info, &err), DSPARK_OK, &err);
}

/* Rows with slot -1 change no byte; rows beside them are what they are alone. */
static void negative_slots_are_skipped(void **state)
{
    fixture *f = *state;
    host_cache h, alone;
    dspark_run_info info;
    static const int64_t slots[4] = {-1, 3, -1, 0};
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 0);
    open_cache(&h, f, DSPARK_CACHE_BF16);
    open_cache(&alone, f, DSPARK_CACHE_BF16);
    dspark_batch b = batch_of(f, 0, 4);
    b.slots = slots;
    run_ok(ctx, &b, &h, &info);
    assert_int_equal(info.n_rows, 4);
    assert_int_equal(info.n_skipped, 2);
    assert_int_equal(info.n_written, 2 * f->n_layers);
    assert_int_equal(info.max_position, f->positions[3]);
    for (size_t i = 1; i < 4; i += 2) {
        b = batch_of(f, i, 1);
        b.slots = &slots[i];
        run_ok(ctx, &b, &alone, NULL);
    }
    assert_memory_equal(h.memory, alone.memory, h.bytes);
    for (size_t l = 0; l < f->n_layers; l++)
        for (int64_t s = 0; s < CACHE_SLOTS; s++)
            assert_int_equal(untouched(entry_of(&h, f, l, s), f->width * 2), s != 0 && s != 3);
    free(h.memory);
    free(alone.memory);
    dspark_context_free(ctx);
}

/* Padded rows are not read at all: neither their position nor their numbers. Sixteen rows of which
 * eleven are valid; the others hold rubbish. */
static void padded_rows_are_not_read(void **state)
{
    fixture *f = *state;
    host_cache h, want;
    dspark_run_info info;
    int64_t slots[16], positions[16];
    uint16_t *taps = malloc(16 * f->taps_width * 2);
    assert_non_null(taps);
    memcpy(taps, f->taps, 16 * f->taps_width * 2);
    for (size_t i = 0; i < 16; i++) {
        slots[i] = i < 11 ? f->slots[i] : -1 - (int64_t)i;
        positions[i] = i < 11 ? f->positions[i] : INT64_MIN;
    }
    memset(taps + 11 * f->taps_width, 0xff, 5 * f->taps_width * 2); /* NaN */
    reference_run(f, &want, DSPARK_CACHE_BF16, 11);
    for (int path = DSPARK_PATH_ONEPASS; path <= DSPARK_PATH_FULL; path++) {
        dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 3, (dspark_path)path, 0);
        open_cache(&h, f, DSPARK_CACHE_BF16);
        dspark_batch b = batch_of(f, 0, 16);
        b.taps = taps;
        b.slots = slots;
        b.positions = positions;
        run_ok(ctx, &b, &h, &info);
        assert_int_equal(info.n_rows, 16);
        assert_int_equal(info.n_skipped, 5);
        assert_int_equal(info.n_written, 11 * f->n_layers);
        assert_memory_equal(h.memory, want.memory, h.bytes);
        free(h.memory);
        dspark_context_free(ctx);
    }
    free(want.memory);
    free(taps);
}

/* A mapping for each layer, none for a layer, and no memory for a layer. */
static void each_layer_may_have_its_own_slots(void **state)
{
    fixture *f = *state;
    host_cache h, want;
    dspark_run_info info;
    int64_t shifted[40], partly[40];
    const int64_t *layer_slots[5] = {f->slots, shifted, NULL, partly, f->slots};
    for (size_t i = 0; i < 40; i++) {
        shifted[i] = CACHE_SLOTS - 1 - f->slots[i];
        partly[i] = i % 3 == 0 ? f->slots[i] : -1;
    }
    reference_run(f, &want, DSPARK_CACHE_BF16, 40);
    for (int path = DSPARK_PATH_ONEPASS; path <= DSPARK_PATH_FULL; path++) {
        dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, (dspark_path)path, 7);
        open_cache(&h, f, DSPARK_CACHE_BF16);
        dspark_batch b = batch_of(f, 0, 40);
        b.slots = NULL;
        b.layer_slots = layer_slots;
        h.layers[4] = NULL; /* skipped although it has slots */
        run_ok(ctx, &b, &h, &info);
        assert_int_equal(info.n_written, 40 + 40 + 14);
        assert_int_equal(info.n_skipped, 0);
        for (size_t i = 0; i < 40; i++) {
            size_t n = f->width * 2;
            assert_memory_equal(entry_of(&h, f, 0, f->slots[i]), entry_of(&want, f, 0, f->slots[i]), n);
            assert_memory_equal(entry_of(&h, f, 1, shifted[i]), entry_of(&want, f, 1, f->slots[i]), n);
            if (partly[i] >= 0)
                assert_memory_equal(entry_of(&h, f, 3, partly[i]), entry_of(&want, f, 3, partly[i]), n);
            else
                assert_true(untouched(entry_of(&h, f, 3, f->slots[i]), n));
        }
        size_t layer = h.bytes / f->n_layers;
        assert_true(untouched(h.memory + 2 * layer, layer));
        assert_true(untouched(h.memory + 4 * layer, layer));
        free(h.memory);
        dspark_context_free(ctx);
    }
    free(want.memory);
}

/* When rows name one slot the later row wins, for every thread count and path. */
static void the_later_row_wins(void **state)
{
    fixture *f = *state;
    host_cache h, want;
    int64_t slots[200];
    uint64_t seed = 5;
    for (size_t i = 0; i < 200; i++) slots[i] = (int64_t)(next_random(&seed) % 40);
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 1, DSPARK_PATH_ONEPASS, 0);
    open_cache(&want, f, DSPARK_CACHE_BF16);
    for (size_t i = 0; i < 200; i++) {
        dspark_batch b = batch_of(f, i, 1);
        b.slots = &slots[i];
        run_ok(ctx, &b, &want, NULL);
    }
    dspark_context_free(ctx);
    for (int path = DSPARK_PATH_ONEPASS; path <= DSPARK_PATH_FULL; path++)
        for (uint32_t threads = 1; threads < 8; threads += 2) {
            ctx = open_context(f, DSPARK_ISA_AUTO, threads, (dspark_path)path, 0);
            open_cache(&h, f, DSPARK_CACHE_BF16);
            dspark_batch b = batch_of(f, 0, 200);
            b.slots = slots;
            run_ok(ctx, &b, &h, NULL);
            assert_memory_equal(h.memory, want.memory, h.bytes);
            free(h.memory);
            dspark_context_free(ctx);
        }
    free(want.memory);
}

/* Several sequences in one call equal each alone; a place used before leaves no trace. */
static void ragged_batches_and_reuse(void **state)
{
    fixture *f = *state;
    host_cache h, fresh;
    static const size_t lengths[4] = {3, 17, 0, 1};
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 0);
    open_cache(&h, f, DSPARK_CACHE_BF16);
    open_cache(&fresh, f, DSPARK_CACHE_BF16);
    dspark_batch all = batch_of(f, 100, 40);
    all.slots = f->slots; /* sequence A: 40 tokens where the others will lie */
    run_ok(ctx, &all, &h, NULL);
    all = batch_of(f, 0, 21);
    run_ok(ctx, &all, &h, NULL);
    size_t row = 0;
    for (int i = 0; i < 4; i++) {
        dspark_batch one = batch_of(f, row, lengths[i]);
        run_ok(ctx, &one, &fresh, NULL);
        row += lengths[i];
    }
    for (size_t l = 0; l < f->n_layers; l++)
        for (size_t i = 0; i < 21; i++)
            assert_memory_equal(entry_of(&h, f, l, f->slots[i]), entry_of(&fresh, f, l, f->slots[i]),
                                f->width * 2);
    free(h.memory);
    free(fresh.memory);
    dspark_context_free(ctx);
}

static void empty_batches(void **state)
{
    fixture *f = *state;
    host_cache h;
    dspark_run_info info;
    dspark_batch b;
    dspark_error err;
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 0);
    open_cache(&h, f, DSPARK_CACHE_BF16);
    dspark_batch_init(&b);
    run_ok(ctx, &b, &h, &info); /* no pointers needed */
    assert_int_equal(info.n_rows, 0);
    assert_int_equal(info.max_position, -1);
    int64_t none[5] = {-1, -2, INT64_MIN, -1, -1};
    b = batch_of(f, 0, 5);
    b.slots = none;
    run_ok(ctx, &b, &h, &info);
    assert_int_equal(info.n_rows, 5);
    assert_int_equal(info.n_skipped, 5);
    assert_true(untouched(h.memory, h.bytes));
    check(dspark_context_states(ctx, &(dspark_batch){.struct_size = sizeof b}, NULL, &err), DSPARK_OK,
          &err);
    free(h.memory);
    dspark_context_free(ctx);
}

/* Everything is checked before the first write: a bad last row leaves the whole cache untouched. */
static void refusals_write_nothing(void **state)
{
    fixture *f = *state;
    host_cache h;
    dspark_run_info info;
    dspark_error err;
    int64_t slots[30], positions[30];
    uint16_t *taps = malloc(30 * f->taps_width * 2);
    const int64_t max = (int64_t)dspark_model_config(f->model)->max_positions;
    assert_non_null(taps);
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 8);
    open_cache(&h, f, DSPARK_CACHE_BF16);
    dspark_batch good = batch_of(f, 0, 30), b;
    good.taps = taps;
    good.slots = slots;
    good.positions = positions;
#define REFUSE(want, text, change)                                                                 \
    do {                                                                                           \
        memcpy(taps, f->taps, 30 * f->taps_width * 2);                                             \
        memcpy(slots, f->slots, sizeof slots);                                                     \
        memcpy(positions, f->positions, sizeof positions);                                         \
        b = good;                                                                                  \
        change;                                                                                    \
        check(dspark_context_run(ctx, &b, &h.view, &info, &err), want, &err);                      \
        if (!strstr(err.message, text) && !strstr(err.where, text))                                \
            fail_msg("\"%s\" not in [%s] %s", text, err.where, err.message);                       \
        assert_int_equal(info.n_rows, 0);                                                          \
        assert_true(untouched(h.memory, h.bytes));                                                 \
    } while (0)
    REFUSE(DSPARK_ERANGE, "row 29", slots[29] = CACHE_SLOTS);
    REFUSE(DSPARK_ERANGE, "9223372036854775807", slots[29] = INT64_MAX);
    REFUSE(DSPARK_ERANGE, "row 29", positions[29] = -1);
    REFUSE(DSPARK_ERANGE, "positions", positions[29] = max);
    REFUSE(DSPARK_ERANGE, "positions", positions[29] = INT64_MIN);
    REFUSE(DSPARK_ENONFINITE, "row 29, tap 1", taps[29 * f->taps_width + f->taps_width / 5] = 0x7fc1);
    REFUSE(DSPARK_ENONFINITE, "column 3", taps[29 * f->taps_width + 3] = 0xff80); /* -inf */
    /* Of several wrong rows the first is named, of a row its slot and position before its numbers. */
    REFUSE(DSPARK_ENONFINITE, "row 7", (slots[8] = CACHE_SLOTS, taps[7 * f->taps_width] = 0x7f80));
    REFUSE(DSPARK_ERANGE, "row 7", (slots[7] = CACHE_SLOTS, taps[8 * f->taps_width] = 0x7f80));
    REFUSE(DSPARK_ERANGE, "positions", (positions[7] = -1, taps[7 * f->taps_width] = 0x7f80));
    REFUSE(DSPARK_ENONFINITE, "row 7",
           (taps[29 * f->taps_width] = taps[7 * f->taps_width] = 0x7f80));
    REFUSE(DSPARK_EINVAL, "taps", b.taps = NULL);
    REFUSE(DSPARK_EINVAL, "states", b.states = taps);
    REFUSE(DSPARK_EINVAL, "slots", b.slots = NULL);
    REFUSE(DSPARK_EINVAL, "slots", b.layer_slots = (const int64_t *const *)h.layers);
    REFUSE(DSPARK_EINVAL, "positions", b.positions = NULL);
    REFUSE(DSPARK_EINVAL, "stride", b.taps_stride = f->taps_width * 2 - 1);
    REFUSE(DSPARK_EINVAL, "struct_size", b.struct_size = 0);
    REFUSE(DSPARK_EINVAL, "struct_size", b.struct_size = sizeof b + 8);
    REFUSE(DSPARK_EINVAL, "overflow", b.n_tokens = SIZE_MAX / 4);
#undef REFUSE
    positions[29] = max - 1; /* the last position there is */
    slots[29] = CACHE_SLOTS - 1;
    run_ok(ctx, &good, &h, &info);
    assert_int_equal(info.max_position, max - 1);
    good.first_row = 70;
    slots[29] = CACHE_SLOTS;
    check(dspark_context_run(ctx, &good, &h.view, &info, &err), DSPARK_ERANGE, &err);
    assert_non_null(strstr(err.message, "row 99, layer 0"));
    slots[29] = 0;
    positions[28] = max;
    check(dspark_context_run(ctx, &good, &h.view, &info, &err), DSPARK_ERANGE, &err);
    assert_non_null(strstr(err.message, "row 98: position"));
    taps[27 * f->taps_width] = 0x7f80;
    check(dspark_context_run(ctx, &good, &h.view, &info, &err), DSPARK_ENONFINITE, &err);
    assert_non_null(strstr(err.message, "row 97, tap 0"));
    free(taps);
    free(h.memory);
    dspark_context_free(ctx);
}

/* Finite input whose arithmetic overflows: that entry is not written, the rest of the chunk is, and
 * the error names the row. */
static void overflow_is_reported_not_written(void **state)
{
    fixture *f = *state;
    dspark_error err;
    dspark_run_info info;
    size_t h_size = dspark_model_config(f->model)->hidden_size;
    uint16_t *states = calloc(12 * h_size, 2);
    assert_non_null(states);
    uint64_t seed = 3;
    for (size_t i = 0; i < 12 * h_size; i++) states[i] = (uint16_t)(0x3f80 + next_random(&seed) % 64);
    for (size_t i = 0; i < h_size; i++) states[7 * h_size + i] = 0x7f7f; /* the largest finite bf16 */
    for (int path = DSPARK_PATH_ONEPASS; path <= DSPARK_PATH_FULL; path++) {
        host_cache h;
        dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, (dspark_path)path, 5);
        open_cache(&h, f, DSPARK_CACHE_BF16);
        dspark_batch b = batch_of(f, 0, 12);
        b.taps = NULL;
        b.states = states;
        check(dspark_context_run(ctx, &b, &h.view, &info, &err), DSPARK_ENONFINITE, &err);
        assert_non_null(strstr(err.message, "row 7, layer 0"));
        b.first_row = 1000; /* what the caller calls it, in any of these errors */
        check(dspark_context_run(ctx, &b, &h.view, &info, &err), DSPARK_ENONFINITE, &err);
        assert_non_null(strstr(err.message, "row 1007, layer 0"));
        assert_int_equal(info.n_rows, 5); /* the chunk before is complete */
        for (size_t l = 0; l < f->n_layers; l++) {
            assert_true(untouched(entry_of(&h, f, l, f->slots[7]), f->width * 2));
            assert_false(untouched(entry_of(&h, f, l, f->slots[6]), f->width * 2));
            assert_true(untouched(entry_of(&h, f, l, f->slots[10]), f->width * 2));
        }
        free(h.memory);
        dspark_context_free(ctx);
    }
    free(states);
}

/* More than 2^31 elements before the last slot: a 32-bit offset would land elsewhere. */
static void a_cache_beyond_two_gigabytes(void **state)
{
    fixture *f = *state;
    host_cache want;
    size_t entry = f->width * 2, blocks = ((size_t)1 << 32) / (64 * entry) + 3;
    size_t bytes = blocks * 64 * entry;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) skip();
    void *layers[5] = {memory, NULL, NULL, NULL, NULL};
    dspark_cache_view v;
    dspark_error err;
    dspark_cache_view_init(&v);
    v.n_layers = 5;
    v.layers = layers;
    v.n_blocks = blocks;
    v.block_size = 64;
    int64_t slot = (int64_t)(blocks * 64) - 1;
    dspark_batch b = batch_of(f, 0, 1);
    b.slots = &slot;
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 0);
    check(dspark_context_run(ctx, &b, &v, NULL, &err), DSPARK_OK, &err);
    reference_run(f, &want, DSPARK_CACHE_BF16, 1);
    assert_memory_equal((char *)memory + (size_t)slot * entry, entry_of(&want, f, 0, f->slots[0]), entry);
    slot++;
    check(dspark_context_run(ctx, &b, &v, NULL, &err), DSPARK_ERANGE, &err);
    munmap(memory, bytes);
    free(want.memory);
    dspark_context_free(ctx);
}

/* Pages of one entry, filled to the limit through a block table, again and again. */
static void page_size_one_to_the_limit(void **state)
{
    fixture *f = *state;
    host_cache h, want;
    dspark_error err;
    int32_t table[CACHE_SLOTS];
    int64_t positions[CACHE_SLOTS], slots[CACHE_SLOTS], beyond = CACHE_SLOTS;
    for (int32_t i = 0; i < CACHE_SLOTS; i++) {
        table[i] = CACHE_SLOTS - 1 - i;
        positions[i] = i;
    }
    check(dspark_slots_from_blocks(table, CACHE_SLOTS, 1, -1, positions, CACHE_SLOTS, slots, &err),
          DSPARK_OK, &err);
    check(dspark_slots_from_blocks(table, CACHE_SLOTS, 1, -1, &beyond, 1, slots, &err), DSPARK_ERANGE,
          &err);
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 0);
    open_cache(&h, f, DSPARK_CACHE_BF16);
    h.view.n_blocks = CACHE_SLOTS;
    h.view.block_size = 1;
    for (int round = 0; round < 3; round++) {
        dspark_batch b = batch_of(f, 0, MAX_ROWS);
        b.positions = positions;
        b.slots = slots;
        run_ok(ctx, &b, &h, NULL);
        b = batch_of(f, 0, CACHE_SLOTS - MAX_ROWS);
        b.positions = positions + MAX_ROWS;
        b.slots = slots + MAX_ROWS;
        run_ok(ctx, &b, &h, NULL);
        if (round == 0) {
            open_cache(&want, f, DSPARK_CACHE_BF16);
            memcpy(want.memory, h.memory, h.bytes);
            assert_false(untouched(entry_of(&h, f, 4, CACHE_SLOTS - 1), 2));
        }
        assert_memory_equal(want.memory, h.memory, h.bytes);
    }
    free(h.memory);
    free(want.memory);
    dspark_context_free(ctx);
}

/* A million positions of capacity and a small workspace: the plan of K3 stays within it. */
static void the_workspace_does_not_follow_the_context(void **state)
{
    (void)state;
    dspark_error err;
    dspark_config c = *dspark_model_config(((fixture *)*state)->model);
    dspark_context_opts o;
    dspark_context_plan plan, unlimited;
    c.hidden_size = c.tap_width = 7168;
    c.kv_lora_rank = 512;
    c.qk_rope_head_dim = 64;
    c.max_positions = 1048576;
    dspark_context_opts_init(&o);
    o.n_threads = 2;
    o.max_tokens = 1048576;
    check(dspark_plan_context(&c, &o, &unlimited, &err), DSPARK_OK, &err);
    o.workspace_limit = 64u << 20;
    check(dspark_plan_context(&c, &o, &plan, &err), DSPARK_OK, &err);
    assert_true(plan.workspace_bytes <= 64u << 20 && plan.workspace_bytes > 48u << 20);
    assert_true(plan.max_tokens > 1000 && plan.max_tokens < unlimited.max_tokens);
    o.max_tokens = 0; /* the default does not depend on the capacity at all */
    check(dspark_plan_context(&c, &o, &plan, &err), DSPARK_OK, &err);
    c.max_positions = 4096;
    uint64_t bytes = plan.workspace_bytes;
    check(dspark_plan_context(&c, &o, &plan, &err), DSPARK_OK, &err);
    assert_int_equal(plan.workspace_bytes, bytes);
    o.n_threads = 0;
    check(dspark_plan_context(&c, &o, &plan, &err), DSPARK_EINVAL, &err);
}

/* 65,536 rows in one call: nothing is allocated, whatever the number of rows. */
static void a_long_batch_allocates_nothing(void **state)
{
    fixture *f = *state;
    dspark_error err;
    host_cache h;
    size_t n = 65536, allocations;
    if (!oom_available()) skip();
    int64_t *positions = malloc(n * 8), *slots = malloc(n * 8);
    assert_true(positions && slots);
    for (size_t i = 0; i < n; i++) {
        positions[i] = (int64_t)i;
        slots[i] = (int64_t)(i % CACHE_SLOTS);
    }
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 0);
    open_cache(&h, f, DSPARK_CACHE_BF16);
    /* One row of taps under all of them: a stride smaller than the row is refused, so repeat it. */
    uint16_t *taps = malloc(n * f->taps_width * 2);
    assert_non_null(taps);
    for (size_t i = 0; i < n; i++)
        memcpy(taps + i * f->taps_width, f->taps + i % MAX_ROWS * f->taps_width, f->taps_width * 2);
    dspark_batch b = batch_of(f, 0, n);
    dspark_run_info info;
    b.taps = taps;
    b.positions = positions;
    b.slots = slots;
    oom_count_start();
    dspark_status st = dspark_context_run(ctx, &b, &h.view, &info, &err);
    allocations = oom_stop();
    check(st, DSPARK_OK, &err);
    assert_int_equal(allocations, 0);
    assert_int_equal(info.n_written, n * f->n_layers);
    free(taps);
    free(positions);
    free(slots);
    free(h.memory);
    dspark_context_free(ctx);
}

static void null_arguments(void **state)
{
    fixture *f = *state;
    dspark_error err;
    host_cache h;
    dspark_batch b = batch_of(f, 0, 1);
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 1, DSPARK_PATH_ONEPASS, 0), *none = ctx;
    open_cache(&h, f, DSPARK_CACHE_BF16);
    check(dspark_context_run(NULL, &b, &h.view, NULL, &err), DSPARK_EINVAL, &err);
    check(dspark_context_run(ctx, NULL, &h.view, NULL, &err), DSPARK_EINVAL, &err);
    check(dspark_context_run(ctx, &b, NULL, NULL, &err), DSPARK_EINVAL, &err);
    check(dspark_context_run(ctx, &b, &h.view, NULL, NULL), DSPARK_OK, &err);
    check(dspark_context_create(&none, NULL, NULL, &err), DSPARK_EINVAL, &err);
    assert_null(none);
    check(dspark_context_create(NULL, f->model, NULL, &err), DSPARK_EINVAL, &err);
    check(dspark_context_states(ctx, &b, NULL, &err), DSPARK_EINVAL, &err);
    dspark_context_free(NULL);
    dspark_model_close(NULL);
    dspark_cache_free(NULL);
    dspark_context_opts o;
    dspark_context_opts_init(&o);
    o.isa = (dspark_isa)17;
    assert_true(dspark_context_create(&none, f->model, &o, &err) != DSPARK_OK);
    assert_null(none);
    o.isa = DSPARK_ISA_AUTO;
    o.path = (dspark_path)9;
    check(dspark_context_create(&none, f->model, &o, &err), DSPARK_EINVAL, &err);
    /* Q is needed for the full path only, and asked for by name. */
    dspark_model *lean;
    check(dspark_model_open(&lean, f->dir, NULL, &err), DSPARK_OK, &err);
    o.path = DSPARK_PATH_FULL;
    check(dspark_context_create(&none, lean, &o, &err), DSPARK_EINVAL, &err);
    assert_non_null(strstr(err.message, "DSPARK_PART_Q_A"));
    dspark_model_close(lean);
    free(h.memory);
    dspark_context_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(negative_slots_are_skipped),
        cmocka_unit_test(padded_rows_are_not_read),
        cmocka_unit_test(each_layer_may_have_its_own_slots),
        cmocka_unit_test(the_later_row_wins),
        cmocka_unit_test(ragged_batches_and_reuse),
        cmocka_unit_test(empty_batches),
        cmocka_unit_test(refusals_write_nothing),
        cmocka_unit_test(overflow_is_reported_not_written),
        cmocka_unit_test(a_cache_beyond_two_gigabytes),
        cmocka_unit_test(page_size_one_to_the_limit),
        cmocka_unit_test(the_workspace_does_not_follow_the_context),
        cmocka_unit_test(a_long_batch_allocates_nothing),
        cmocka_unit_test(null_arguments),
    };
    return cmocka_run_group_tests(tests, fixture_setup, fixture_teardown);
}
