/* Faults of running that users of drafters reported (docs/faults.md): rotation, positions, padded
 * rows, what surrounds and fills a cache, and memory that follows the wrong thing. End to end
 * through the public API; the kernels only where one element must be seen. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <jansson.h>

#include "base/numfmt.h"
#include "dspark/dspark.h"
#include "kern/kern.h"
#include "model/rope.h"
#include "support/fixture.h"
#include "support/run_cli.h"
#include "support/tmpdir.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static void run_ok(dspark_context *ctx, const dspark_batch *b, const dspark_cache_view *v)
{
    dspark_error err;
    check(dspark_context_run(ctx, b, v, NULL, &err), DSPARK_OK, &err);
}

/* ---- rotation ---- */

/* The config of a checkpoint with rope_parameters set to a JSON value. */
static void set_rope(const char *dir, const char *value)
{
    char path[600];
    snprintf(path, sizeof path, "%s/config.json", dir);
    json_t *o = json_load_file(path, 0, NULL);
    assert_non_null(o);
    json_object_set_new(o, "rope_theta", json_real(50000.0));
    json_object_set_new(o, "rope_parameters", json_loads(value, JSON_DECODE_ANY, NULL));
    char *text = json_dumps(o, JSON_INDENT(2));
    tmpdir_write(path, text, strlen(text));
    free(text);
    json_decref(o);
}

/* 90 rows through the model at dir, in place of f's own model. */
static void run_model_of(fixture *f, host_cache *h)
{
    dspark_error err;
    dspark_model *own = f->model, *m;
    check(dspark_model_open(&m, f->dir, NULL, &err), DSPARK_OK, &err);
    f->model = m;
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 0);
    open_cache(h, f, DSPARK_CACHE_BF16);
    run_rows(ctx, f, h, 90, 90);
    dspark_context_free(ctx);
    dspark_model_close(m);
    f->model = own;
}

/* No scaling in the file, said in three ways: plain RoPE; the file's own base; a type that nobody
 * here knows is refused. */
static void no_scaling_without_being_told(void **state)
{
    static const char *const plain[] = {"null", "{\"rope_type\": \"default\"}",
                                        "{\"type\": \"default\", \"rope_theta\": 50000.0}"};
    static const char *const absent[] = {"rope_parameters=null"};
    fixture f, yarn;
    host_cache want, got, scaled;
    dspark_error err;
    dspark_model *m;
    (void)state;
    open_fixture(&yarn, NULL, 0);
    run_model_of(&yarn, &scaled);
    open_fixture(&f, absent, 1);
    run_model_of(&f, &want);
    assert_memory_not_equal(want.memory, scaled.memory, want.bytes);
    for (size_t i = 0; i < COUNT(plain); i++) {
        set_rope(f.dir, plain[i]);
        run_model_of(&f, &got);
        assert_memory_equal(want.memory, got.memory, want.bytes);
        free(got.memory);
    }
    set_rope(f.dir, "{\"rope_type\": \"default\", \"rope_theta\": 10000.0}");
    check(dspark_model_open(&m, f.dir, NULL, &err), DSPARK_EMODEL, &err); /* two bases */
    set_rope(f.dir, "{\"rope_type\": \"ntk\", \"factor\": 4}");
    check(dspark_model_open(&m, f.dir, NULL, &err), DSPARK_EUNSUPPORTED, &err);
    assert_non_null(strstr(err.message, "ntk"));
    free(want.memory);
    free(scaled.memory);
    close_fixture(&f);
    close_fixture(&yarn);
}

/* A key that is 1 at index 1 and 0 elsewhere, at position 1: neighbours turn together, halves do
 * not. For the widths of K3 and of the tiny preset, at every level. */
static void neighbours_are_a_pair(void **state)
{
    static const uint32_t widths[] = {64, 8};
    (void)state;
    for (size_t w = 0; w < COUNT(widths); w++)
        for (int isa = DSPARK_ISA_REF; isa <= DSPARK_ISA_AVX512BF16; isa++) {
            uint16_t key[64] = {0}, out[64];
            float cs[32], sn[32];
            dspark_config c;
            dspark__rope r;
            dspark__kern kern;
            if (!dspark_isa_available((dspark_isa)isa)) continue;
            memset(&c, 0, sizeof c);
            c.qk_rope_head_dim = widths[w];
            c.rope_theta = 50000;
            assert_int_equal(dspark__rope_init(&r, &c, NULL), DSPARK_OK);
            assert_int_equal(dspark__kern_select(&kern, (dspark_isa)isa, NULL), DSPARK_OK);
            dspark__rope_row(&r, &kern, 1, cs, sn);
            key[1] = dspark__f32_to_bf16(1.0f);
            kern.rope_bf16(out, key, cs, sn, widths[w] / 2);
            assert_int_equal(out[0], dspark__f32_to_bf16((float)-sin(1)));
            assert_int_equal(out[1], dspark__f32_to_bf16((float)cos(1)));
            for (uint32_t i = 2; i < widths[w]; i++) assert_int_equal(out[i] & 0x7fff, 0);
        }
}

/* The same row at positions near and far, alone and together, by every path: one rotation. A
 * rotation is undone by its own angle, so the key before it must come out the same everywhere. */
static void one_rotation_for_every_path(void **state)
{
    static const int64_t positions[] = {0, 1, 4095, 32768, 262144, 1048575};
    enum { N = COUNT(positions) };
    fixture *f = *state;
    dspark_config c = *dspark_model_config(f->model);
    uint16_t *taps = malloc(N * f->taps_width * 2);
    host_cache want, got;
    dspark__rope r;
    dspark__kern ref;
    assert_non_null(taps);
    for (size_t i = 0; i < N; i++) memcpy(taps + i * f->taps_width, f->taps, f->taps_width * 2);
    dspark_batch all = batch_of(f, 0, N), one;
    all.taps = taps;
    all.positions = positions;
    open_cache(&want, f, DSPARK_CACHE_BF16);
    for (int path = DSPARK_PATH_ONEPASS; path <= DSPARK_PATH_FULL; path++) {
        dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, (dspark_path)path, 0);
        open_cache(&got, f, DSPARK_CACHE_BF16);
        run_ok(ctx, &all, path ? &got.view : &want.view);
        for (size_t i = 0; i < N && !path; i++) {
            one = batch_of(f, i, 1);
            one.taps = taps;
            one.positions = &positions[i];
            run_ok(ctx, &one, &got.view);
        }
        assert_memory_equal(want.memory, got.memory, want.bytes);
        free(got.memory);
        dspark_context_free(ctx);
    }
    assert_int_equal(dspark__rope_init(&r, &c, NULL), DSPARK_OK);
    assert_int_equal(dspark__kern_select(&ref, DSPARK_ISA_REF, NULL), DSPARK_OK);
    for (size_t l = 0; l < f->n_layers; l++)
        for (size_t i = 0; i < N; i++) {
            const uint16_t *layer = want.layers[l];
            const uint16_t *base = layer + (size_t)f->slots[0] * f->width;
            const uint16_t *at = layer + (size_t)f->slots[i] * f->width;
            float cs[DSPARK__ROPE_MAX_PAIRS], sn[DSPARK__ROPE_MAX_PAIRS];
            assert_memory_equal(base, at, c.kv_lora_rank * 2); /* the latent has no position */
            dspark__rope_row(&r, &ref, positions[i], cs, sn);
            for (uint32_t j = 0; j < r.n_pairs; j++) {
                double x = dspark__bf16_to_f32(at[c.kv_lora_rank + 2 * j]);
                double y = dspark__bf16_to_f32(at[c.kv_lora_rank + 2 * j + 1]);
                double u = dspark__bf16_to_f32(base[c.kv_lora_rank + 2 * j]);
                double v = dspark__bf16_to_f32(base[c.kv_lora_rank + 2 * j + 1]);
                double size = (fabs(u) + fabs(v)) / 64;
                assert_true(fabs(x * (double)cs[j] + y * (double)sn[j] - u) <= size);
                assert_true(fabs(y * (double)cs[j] - x * (double)sn[j] - v) <= size);
            }
        }
    free(want.memory);
    free(taps);
}

/* Every position from 0 to 40,000 with a trained window of 32,768: numbers, all of them. That a
 * request leaves the window is for `context` to say (test_cli_context.c). */
static void past_the_trained_window(void **state)
{
    fixture *f = *state;
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 0);
    int64_t positions[MAX_ROWS];
    host_cache h;
    assert_int_equal(dspark_model_config(f->model)->rope_original_max_positions, 32768);
    open_cache(&h, f, DSPARK_CACHE_BF16);
    for (int64_t first = 0; first <= 40000; first += MAX_ROWS) {
        for (int64_t i = 0; i < MAX_ROWS; i++) positions[i] = first + i;
        dspark_batch b = batch_of(f, 0, MAX_ROWS);
        b.positions = positions;
        run_ok(ctx, &b, &h.view);
        for (size_t l = 0; l < f->n_layers; l++)
            for (size_t i = 0; i < MAX_ROWS; i++) {
                const uint16_t *e = (const uint16_t *)h.layers[l] + (size_t)f->slots[i] * f->width;
                for (size_t j = 0; j < f->width; j++) assert_true((e[j] & 0x7f80) != 0x7f80);
            }
    }
    free(h.memory);
    dspark_context_free(ctx);
}

/* ---- the cache and what surrounds it ---- */

/* Slots -1, 3, -1, 0 in a cache between guard bytes: two entries a layer change and nothing else,
 * before, behind or between, in every cache type that fits and at an odd address. */
static void nothing_around_an_entry_changes(void **state)
{
    enum { GUARD = 4096 + 1, SLOTS = 6 };
    static const int64_t slots[] = {-1, 3, -1, 0};
    fixture *f = *state;
    for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_E5M2; dtype++) {
        size_t entry = f->width * (dtype == DSPARK_CACHE_BF16 ? 2 : 1);
        size_t layer = SLOTS * entry + GUARD;
        size_t bytes = GUARD + f->n_layers * layer, changed = 0;
        unsigned char *memory = malloc(bytes);
        void *layers[8];
        dspark_cache_view v;
        assert_non_null(memory);
        memset(memory, 0xc3, bytes);
        for (size_t l = 0; l < f->n_layers; l++) layers[l] = memory + GUARD + l * layer;
        dspark_cache_view_init(&v);
        v.n_layers = (uint32_t)f->n_layers;
        v.layers = layers;
        v.n_blocks = 3;
        v.block_size = 2;
        v.dtype = (dspark_cache_dtype)dtype;
        dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 0);
        dspark_batch b = batch_of(f, 0, 4);
        b.slots = slots;
        run_ok(ctx, &b, &v);
        for (size_t i = 0; i < bytes; i++) {
            size_t at = i < GUARD ? SIZE_MAX : (i - GUARD) % layer / entry;
            if (at == 0 || at == 3)
                changed += memory[i] != 0xc3;
            else if (memory[i] != 0xc3)
                fail_msg("cache type %d: byte %zu of %zu changed", dtype, i, bytes);
        }
        assert_true(changed > f->n_layers * entry);
        dspark_context_free(ctx);
        free(memory);
    }
}

/* What lies in unused entries, NaN or zero, has no influence on those that are written. */
static void a_cache_is_never_read(void **state)
{
    fixture *f = *state;
    host_cache zero, nan;
    for (int path = DSPARK_PATH_ONEPASS; path <= DSPARK_PATH_FULL; path++) {
        dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, (dspark_path)path, 0);
        open_cache(&zero, f, DSPARK_CACHE_BF16);
        open_cache(&nan, f, DSPARK_CACHE_BF16);
        memset(zero.memory, 0, zero.bytes);
        memset(nan.memory, 0xff, nan.bytes);
        run_rows(ctx, f, &zero, 100, 33);
        run_rows(ctx, f, &nan, 100, 33);
        for (size_t l = 0; l < f->n_layers; l++)
            for (size_t i = 0; i < 100; i++) {
                size_t at = (size_t)f->slots[i] * f->width * 2;
                assert_memory_equal((char *)zero.layers[l] + at, (char *)nan.layers[l] + at,
                                    f->width * 2);
            }
        free(zero.memory);
        free(nan.memory);
        dspark_context_free(ctx);
    }
}

/* ---- memory ---- */

/* One row more than the workspace holds, with taps of another width than the drafter's. */
static void one_row_too_many(void **state)
{
    static const char *const wide[] = {"target_hidden_size=90"}, *const narrow[] = {
        "target_hidden_size=34"};
    const char *const *settings[] = {wide, narrow};
    (void)state;
    for (size_t s = 0; s < COUNT(settings); s++) {
        fixture f;
        host_cache want, got;
        open_fixture(&f, settings[s], 1);
        reference_run(&f, &want, DSPARK_CACHE_BF16, 17);
        dspark_context *ctx = open_context(&f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 16);
        assert_int_equal(dspark_context_get_plan(ctx).max_tokens, 16);
        open_cache(&got, &f, DSPARK_CACHE_BF16);
        run_rows(ctx, &f, &got, 17, 17);
        assert_memory_equal(want.memory, got.memory, want.bytes);
        free(want.memory);
        free(got.memory);
        dspark_context_free(ctx);
        close_fixture(&f);
    }
}

static uint64_t planned(const json_t *plan, const char *part)
{
    const json_t *v = json_object_get(json_object_get(plan, "resident_bytes"), part);
    assert_true(json_is_integer(v));
    return (uint64_t)json_integer_value(v);
}

/* The plan that inspect prints is the sum of its parts, and what is then taken. */
static void the_plan_of_inspect_is_kept(void **state)
{
    fixture *f = *state;
    dspark_inspection *in;
    dspark_model *lean;
    dspark_error err;
    check(dspark_inspect(&in, f->dir, NULL, &err), DSPARK_OK, &err);
    json_t *o = json_loads(dspark_inspection_json(in), 0, NULL), *plan = json_object_get(o, "plan");
    uint64_t total = planned(plan, "total");
    assert_int_equal(total, planned(plan, "context_proj") + planned(plan, "context_kv") +
                                planned(plan, "norms"));
    check(dspark_model_open(&lean, f->dir, NULL, &err), DSPARK_OK, &err);
    assert_int_equal(dspark_model_resident_bytes(lean), total);
    assert_int_equal(dspark_model_resident_bytes(f->model), total + planned(plan, "q_a"));
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 1, DSPARK_PATH_ONEPASS, 0);
    const json_t *w = json_array_get(json_object_get(plan, "workspace"), 0);
    assert_int_equal(json_integer_value(json_object_get(w, "bytes")),
                     dspark_context_get_plan(ctx).workspace_bytes);
    const json_t *cache = json_object_get(plan, "cache_bytes_per_token");
    assert_int_equal(json_integer_value(json_object_get(cache, "bf16")),
                     dspark_cache_bytes(dspark_model_config(lean), DSPARK_CACHE_BF16, 1, 1));
    dspark_context_free(ctx);
    dspark_model_close(lean);
    json_decref(o);
    dspark_inspection_free(in);
}

/* Peak memory of `context` on a dump of n rows without the cache that it was asked to make. */
static int64_t peak_beside_cache(int n)
{
    json_t *doc;
    assert_int_equal(run_cli("synth --dump d.st --for tiny --tokens %d", n).code, 0);
    cli_result r = run_cli("context tiny --taps d.st --threads 1 --json");
    assert_int_equal(r.code, 0);
    doc = json_loads(r.out, 0, NULL);
    assert_non_null(doc);
    int64_t peak = json_integer_value(json_object_get(doc, "peak_rss_bytes"));
    assert_true(peak > 0);
    print_message("  %d rows: peak %lld KiB\n", n, (long long)peak / 1024);
    json_decref(doc);
    return peak - (int64_t)n * (5 * 24 * 2 + 2 * 8); /* entries; slot and position */
}

/* A dump of 65,536 rows (50 MB) takes no more beside its cache than one of 8,192: rows are read
 * from the file in pieces and let go again. */
static void memory_does_not_follow_the_rows(void **state)
{
    size_t n_ballast = 160u << 20;
    char *ballast = malloc(n_ballast); /* what its parent holds is not the command's memory */
    (void)state;
    assert_non_null(ballast);
    memset(ballast, 1, n_ballast);
    assert_int_equal(run_cli("synth tiny --preset tiny").code, 0);
    int64_t small = peak_beside_cache(8192), large = peak_beside_cache(65536);
    free(ballast);
    assert_true(small < (int64_t)n_ballast);
    assert_true(large - small < 8 << 20); /* 44 MB of taps lie between the two */
    cli_cleanup();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_scaling_without_being_told),
        cmocka_unit_test(neighbours_are_a_pair),
        cmocka_unit_test(one_rotation_for_every_path),
        cmocka_unit_test(past_the_trained_window),
        cmocka_unit_test(nothing_around_an_entry_changes),
        cmocka_unit_test(a_cache_is_never_read),
        cmocka_unit_test(one_row_too_many),
        cmocka_unit_test(the_plan_of_inspect_is_kept),
        cmocka_unit_test(memory_does_not_follow_the_rows),
    };
    return cmocka_run_group_tests(tests, fixture_setup, fixture_teardown);
}
