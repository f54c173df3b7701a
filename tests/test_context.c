/* Context KV end to end through the public API on small synthetic checkpoints: one answer for every
 * path, batch, thread count, instruction set and cache type; slots, ranges, numbers, memory. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "dspark/dspark.h"
#include "support/fixture.h"
#include "support/oom.h"

/* ---- one answer ---- */

static void one_answer(void **state)
{
    compare_everything(*state, DSPARK_CACHE_BF16, 300, 1);
}

static void one_answer_for_a_long_batch(void **state)
{
    compare_everything(*state, DSPARK_CACHE_BF16, LONG_BATCH, 0);
}

static void one_answer_for_fp8_caches(void **state)
{
    compare_everything(*state, DSPARK_CACHE_FP8_E4M3, 129, 0);
    compare_everything(*state, DSPARK_CACHE_FP8_E5M2, 129, 0);
}

static void one_answer_for_every_variant(void **state)
{
    (void)state;
    static const char *const fc_norm[] = {"fc_norm=true"};
    static const char *const plain[] = {"rope_parameters=null"};
    static const char *const three[] = {"num_hidden_layers=3"};
    static const char *const wide_tap[] = {"target_hidden_size=50"};
    static const char *const odd[] = {"kv_lora_rank=70", "qk_rope_head_dim=6", "hidden_size=66",
                                      "q_lora_rank=49"};
    static const char *const ds_mla[] = {"kv_lora_rank=512", "qk_rope_head_dim=64"};
    static const struct {
        const char *const *settings;
        size_t n;
        dspark_cache_dtype dtype;
    } variants[] = {{fc_norm, 1, DSPARK_CACHE_BF16}, {plain, 1, DSPARK_CACHE_BF16},
                    {three, 1, DSPARK_CACHE_BF16},   {wide_tap, 1, DSPARK_CACHE_BF16},
                    {odd, 4, DSPARK_CACHE_BF16},     {ds_mla, 2, DSPARK_CACHE_FP8_DS_MLA}};
    for (size_t v = 0; v < sizeof variants / sizeof variants[0]; v++) {
        fixture f;
        open_fixture(&f, variants[v].settings, variants[v].n);
        compare_everything(&f, variants[v].dtype, 130, 0);
        close_fixture(&f);
    }
}

/* taps in one go, or states first and then the insertion: the same bits. */
static void states_then_insert(void **state)
{
    fixture *f = *state;
    dspark_error err;
    host_cache want, got;
    size_t h = dspark_model_config(f->model)->hidden_size, n = 77;
    uint16_t *states = malloc(n * h * 2);
    assert_non_null(states);
    reference_run(f, &want, DSPARK_CACHE_BF16, n);
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 20);
    dspark_batch b = batch_of(f, 0, n);
    check(dspark_context_states(ctx, &b, states, &err), DSPARK_OK, &err);
    b.taps = NULL;
    b.states = states;
    open_cache(&got, f, DSPARK_CACHE_BF16);
    check(dspark_context_run(ctx, &b, &got.view, NULL, &err), DSPARK_OK, &err);
    assert_memory_equal(want.memory, got.memory, want.bytes);
    free(states);
    free(want.memory);
    free(got.memory);
    dspark_context_free(ctx);
}

/* Rows further apart than they are wide, and at an odd address. */
static void strided_and_misaligned_rows(void **state)
{
    fixture *f = *state;
    dspark_error err;
    host_cache want, got;
    size_t n = 21, stride = f->taps_width * 2 + 13;
    unsigned char *raw = malloc(n * stride + 1);
    assert_non_null(raw);
    memset(raw, 0xff, n * stride + 1); /* NaN between the rows */
    for (size_t i = 0; i < n; i++)
        memcpy(raw + 1 + i * stride, f->taps + i * f->taps_width, f->taps_width * 2);
    reference_run(f, &want, DSPARK_CACHE_BF16, n);
    for (int isa = DSPARK_ISA_REF; isa <= DSPARK_ISA_AVX512BF16; isa++) {
        if (!dspark_isa_available((dspark_isa)isa)) continue;
        dspark_context *ctx = open_context(f, (dspark_isa)isa, 2, DSPARK_PATH_ONEPASS, 0);
        dspark_batch b = batch_of(f, 0, n);
        b.taps = raw + 1;
        b.taps_stride = stride;
        open_cache(&got, f, DSPARK_CACHE_BF16);
        check(dspark_context_run(ctx, &b, &got.view, NULL, &err), DSPARK_OK, &err);
        assert_memory_equal(want.memory, got.memory, want.bytes);
        free(got.memory);
        dspark_context_free(ctx);
    }
    free(want.memory);
    free(raw);
}

/* The fp64 twin: the bf16 result must be near it, and must be rotated by the position. */
static void near_fp64(void **state)
{
    double error = error_of_fp64(*state, 9);
    if (!(error < 0.04)) fail_msg("worst error %.3g of the rms", error);
}

/* ---- threads of the host, floating-point state of the host ---- */

static void run_backwards(void *user, void (*task)(void *arg, size_t i), void *arg, size_t n)
{
    ++*(int *)user;
    while (n-- > 0) task(arg, n);
}

static void host_threads(void **state)
{
    fixture *f = *state;
    dspark_error err;
    host_cache want, got;
    int calls = 0;
    dspark_parallel host = {&calls, run_backwards};
    dspark_context_opts o;
    dspark_context *ctx;
    dspark_context_opts_init(&o);
    o.n_threads = 5;
    o.parallel = &host;
    check(dspark_context_create(&ctx, f->model, &o, &err), DSPARK_OK, &err);
    reference_run(f, &want, DSPARK_CACHE_BF16, 200);
    open_cache(&got, f, DSPARK_CACHE_BF16);
    run_rows(ctx, f, &got, 200, 200);
    assert_true(calls > 0);
    assert_memory_equal(want.memory, got.memory, want.bytes);
    free(want.memory);
    free(got.memory);
    dspark_context_free(ctx);
}

static void host_rounding_mode_is_ignored(void **state)
{
#if defined(__SSE2__)
    fixture *f = *state;
    host_cache want, got;
    unsigned before = _mm_getcsr();
    reference_run(f, &want, DSPARK_CACHE_BF16, 70);
    for (int isa = DSPARK_ISA_REF; isa <= DSPARK_ISA_AVX512BF16; isa++) {
        if (!dspark_isa_available((dspark_isa)isa)) continue;
        dspark_context *ctx = open_context(f, (dspark_isa)isa, 2, DSPARK_PATH_ONEPASS, 0);
        open_cache(&got, f, DSPARK_CACHE_BF16);
        _mm_setcsr(0x1f80u | 0x8040u | 0x6000u); /* flush to zero, round towards zero */
        run_rows(ctx, f, &got, 70, 70);
        assert_int_equal(_mm_getcsr() & ~0x3fu, 0x1f80u | 0x8040u | 0x6000u);
        _mm_setcsr(before);
        assert_memory_equal(want.memory, got.memory, want.bytes);
        free(got.memory);
        dspark_context_free(ctx);
    }
    free(want.memory);
#else
    (void)state;
    skip();
#endif
}

typedef struct neighbour {
    const fixture *f;
    host_cache cache;
    dspark_status st;
} neighbour;

static void *run_neighbour(void *arg)
{
    neighbour *me = arg;
    dspark_context_opts o;
    dspark_context *ctx = NULL;
    dspark_context_opts_init(&o);
    o.n_threads = 2;
    me->st = dspark_context_create(&ctx, me->f->model, &o, NULL);
    for (int i = 0; me->st == DSPARK_OK && i < 5; i++) {
        dspark_batch b = batch_of(me->f, 0, 60);
        me->st = dspark_context_run(ctx, &b, &me->cache.view, NULL, NULL);
    }
    dspark_context_free(ctx);
    return NULL;
}

/* Many contexts on one model at the same time. */
static void contexts_share_a_model(void **state)
{
    fixture *f = *state;
    host_cache want;
    neighbour n[3];
    pthread_t threads[3];
    reference_run(f, &want, DSPARK_CACHE_BF16, 60);
    for (int i = 0; i < 3; i++) {
        n[i].f = f;
        n[i].st = DSPARK_EINTERNAL;
        open_cache(&n[i].cache, f, DSPARK_CACHE_BF16);
        assert_int_equal(pthread_create(&threads[i], NULL, run_neighbour, &n[i]), 0);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(n[i].st, DSPARK_OK);
        assert_memory_equal(want.memory, n[i].cache.memory, want.bytes);
        free(n[i].cache.memory);
    }
    free(want.memory);
}

/* ---- memory ---- */

static void a_run_allocates_nothing(void **state)
{
    fixture *f = *state;
    dspark_error err;
    host_cache h;
    if (!oom_available()) skip();
    for (int path = DSPARK_PATH_ONEPASS; path <= DSPARK_PATH_FULL; path++) {
        dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, (dspark_path)path, 50);
        open_cache(&h, f, DSPARK_CACHE_FP8_E4M3);
        dspark_batch b = batch_of(f, 0, 333);
        oom_count_start();
        dspark_status st = dspark_context_run(ctx, &b, &h.view, NULL, &err);
        size_t n = oom_stop();
        check(st, DSPARK_OK, &err);
        assert_int_equal(n, 0);
        free(h.memory);
        dspark_context_free(ctx);
    }
}

static void a_workspace_limit_cuts_chunks(void **state)
{
    fixture *f = *state;
    dspark_error err;
    host_cache want, got;
    dspark_context_plan plan, one;
    dspark_context_opts o;
    dspark_context *ctx;
    const dspark_config *c = dspark_model_config(f->model);
    dspark_context_opts_init(&o);
    o.n_threads = 2;
    check(dspark_plan_context(c, &o, &plan, &err), DSPARK_OK, &err);
    assert_int_equal(plan.max_tokens, 512);
    o.max_tokens = 1;
    check(dspark_plan_context(c, &o, &one, &err), DSPARK_OK, &err);
    assert_true(one.workspace_bytes < plan.workspace_bytes / 2);
    o.max_tokens = 0;
    reference_run(f, &want, DSPARK_CACHE_BF16, 400);
    for (uint64_t limit = one.workspace_bytes; limit < plan.workspace_bytes; limit = limit * 7 / 4) {
        o.workspace_limit = limit;
        check(dspark_context_create(&ctx, f->model, &o, &err), DSPARK_OK, &err);
        dspark_context_plan p = dspark_context_get_plan(ctx);
        assert_true(p.workspace_bytes <= limit && p.max_tokens >= 1 && p.max_tokens < 512);
        open_cache(&got, f, DSPARK_CACHE_BF16);
        run_rows(ctx, f, &got, 400, 400); /* more rows than the workspace holds */
        assert_memory_equal(want.memory, got.memory, want.bytes);
        free(got.memory);
        dspark_context_free(ctx);
    }
    o.workspace_limit = one.workspace_bytes - 1;
    check(dspark_context_create(&ctx, f->model, &o, &err), DSPARK_ENOSPACE, &err);
    assert_null(ctx);
    assert_non_null(strstr(err.where, "workspace_limit"));
    free(want.memory);
}

/* The plan is what a context takes: counted by an allocator of the host. */
static size_t held;

static void *held_alloc(void *user, size_t bytes, size_t align)
{
    (void)user;
    held += bytes;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void held_free(void *user, void *p, size_t bytes)
{
    (void)user;
    held -= bytes;
    free(p);
}

static void the_plan_is_what_is_taken(void **state)
{
    fixture *f = *state;
    dspark_error err;
    dspark_allocator a = {NULL, held_alloc, held_free};
    dspark_model_opts mo;
    dspark_model *m;
    dspark_context_opts o;
    dspark_context *ctx;
    dspark_context_plan plan;
    dspark_model_opts_init(&mo);
    mo.allocator = &a;
    mo.n_threads = 1;
    held = 0;
    check(dspark_model_open(&m, f->dir, &mo, &err), DSPARK_OK, &err);
    uint64_t resident = dspark_model_resident_bytes(m);
    assert_true(held >= resident && held < resident + 64 * 1024);
    size_t before = held;
    dspark_context_opts_init(&o);
    o.n_threads = 3;
    o.allocator = &a;
    check(dspark_plan_context(dspark_model_config(m), &o, &plan, &err), DSPARK_OK, &err);
    check(dspark_context_create(&ctx, m, &o, &err), DSPARK_OK, &err);
    assert_true(held - before >= plan.workspace_bytes &&
                held - before < plan.workspace_bytes + 8192);
    dspark_context_free(ctx);
    assert_int_equal(held, before);
    dspark_model_close(m);
    assert_int_equal(held, 0);
}

/* Every allocation fails once in turn: a named error, nothing leaked, the library stays usable. */
static void every_allocation_may_fail(void **state)
{
    fixture *f = *state;
    if (!oom_available()) skip();
    for (size_t n = 1;; n++) {
        dspark_error err;
        dspark_model_opts mo;
        dspark_context_opts o;
        dspark_model *m = NULL;
        dspark_context *ctx = NULL;
        dspark_cache *cache = NULL;
        dspark_model_opts_init(&mo);
        mo.n_threads = 1;
        dspark_context_opts_init(&o);
        o.n_threads = 2;
        oom_fail_nth(n);
        dspark_status st = dspark_model_open(&m, f->dir, &mo, &err);
        if (st == DSPARK_OK) st = dspark_context_create(&ctx, m, &o, &err);
        if (st == DSPARK_OK)
            st = dspark_cache_create(&cache, m, DSPARK_CACHE_BF16, 16, 4, NULL, &err);
        oom_stop();
        dspark_cache_free(cache); /* a leak is the sanitizer's to find */
        dspark_context_free(ctx);
        dspark_model_close(m);
        if (oom_failed() == 0) {
            check(st, DSPARK_OK, &err);
            assert_true(n > 20);
            break;
        }
        if (st != DSPARK_ENOMEM)
            fail_msg("allocation %zu failed: %s [%s] %s", n, dspark_status_name(st), err.where,
                     err.message);
        assert_true(strlen(err.message) > 0);
        assert_true(n < 100000);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_answer),
        cmocka_unit_test(one_answer_for_a_long_batch),
        cmocka_unit_test(one_answer_for_fp8_caches),
        cmocka_unit_test(one_answer_for_every_variant),
        cmocka_unit_test(states_then_insert),
        cmocka_unit_test(strided_and_misaligned_rows),
        cmocka_unit_test(near_fp64),
        cmocka_unit_test(host_threads),
        cmocka_unit_test(host_rounding_mode_is_ignored),
        cmocka_unit_test(contexts_share_a_model),
        cmocka_unit_test(a_run_allocates_nothing),
        cmocka_unit_test(a_workspace_limit_cuts_chunks),
        cmocka_unit_test(the_plan_is_what_is_taken),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, fixture_setup, fixture_teardown);
}
