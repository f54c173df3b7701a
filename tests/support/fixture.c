/* The fixture of the context tests. */
#include "support/fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "support/tmpdir.h"

void check(dspark_status got, dspark_status want, const dspark_error *err)
{
    if (got != want)
        fail_msg("%s, want %s: [%s] %s", dspark_status_name(got), dspark_status_name(want),
                 err->where, err->message);
}

uint64_t next_random(uint64_t *s)
{
    *s ^= *s << 13; *s ^= *s >> 7; *s ^= *s << 17;
    return *s;
}

/* About uniform in (-2, 2). */
static uint16_t random_tap(uint64_t *s)
{
    float f = (float)((double)(next_random(s) >> 11) * 0x1p-51 - 2);
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)(u >> 16);
}

void open_fixture(fixture *f, const char *const *settings, size_t n_settings)
{
    dspark_error err;
    dspark_synth_opts so;
    char dir[sizeof f->dir];
    snprintf(dir, sizeof dir, "%s/ckpt", tmpdir_make());
    dspark_synth_opts_init(&so);
    so.preset = "tiny";
    so.seed = 11;
    so.settings = settings;
    so.n_settings = n_settings;
    check(dspark_synth_checkpoint(dir, &so, &err), DSPARK_OK, &err);
    open_fixture_at(f, dir, 0);
    f->owned = 1;
}

void open_fixture_at(fixture *f, const char *dir, int vllm_compat)
{
    dspark_error err;
    dspark_model_opts mo;
    memset(f, 0, sizeof *f);
    snprintf(f->dir, sizeof f->dir, "%s", dir);
    dspark_model_opts_init(&mo);
    mo.vllm_compat = vllm_compat;
    mo.parts = DSPARK_PART_CONTEXT | DSPARK_PART_Q_A;
    mo.n_threads = 1;
    check(dspark_model_open(&f->model, f->dir, &mo, &err), DSPARK_OK, &err);
    const dspark_config *c = dspark_model_config(f->model);
    f->taps_width = (size_t)c->n_taps * c->tap_width;
    f->width = dspark_model_entry_width(f->model);
    f->n_layers = c->n_layers;
    f->taps = malloc(MAX_ROWS * f->taps_width * 2);
    assert_non_null(f->taps);
    uint64_t seed = 88172645463325252u;
    for (size_t i = 0; i < MAX_ROWS * f->taps_width; i++) f->taps[i] = random_tap(&seed);
    for (size_t i = 0; i < MAX_ROWS; i++) {
        f->positions[i] = (int64_t)(i * 37 % 5000);
        f->slots[i] = (int64_t)((i * 619) % CACHE_SLOTS);
    }
}

void close_fixture(fixture *f)
{
    free(f->taps);
    dspark_model_close(f->model);
    if (f->owned) tmpdir_remove(f->dir);
}

int fixture_setup(void **state)
{
    fixture *f = malloc(sizeof *f);
    assert_non_null(f);
    open_fixture(f, NULL, 0);
    *state = f;
    return 0;
}

int fixture_teardown(void **state)
{
    close_fixture(*state);
    free(*state);
    return 0;
}

void open_cache(host_cache *h, const fixture *f, dspark_cache_dtype dtype)
{
    const dspark_config *c = dspark_model_config(f->model);
    memset(h, 0, sizeof *h);
    size_t layer = CACHE_SLOTS * dspark_cache_entry_bytes(dtype, c->kv_lora_rank, c->qk_rope_head_dim);
    h->bytes = layer * f->n_layers;
    h->memory = malloc(h->bytes);
    assert_non_null(h->memory);
    memset(h->memory, 0x5a, h->bytes);
    for (size_t l = 0; l < f->n_layers; l++) h->layers[l] = h->memory + l * layer;
    dspark_cache_view_init(&h->view);
    h->view.n_layers = (uint32_t)f->n_layers;
    h->view.layers = h->layers;
    h->view.n_blocks = 64;
    h->view.block_size = 16;
    h->view.dtype = dtype;
}

dspark_batch batch_of(const fixture *f, size_t row, size_t n)
{
    dspark_batch b;
    dspark_batch_init(&b);
    b.n_tokens = n;
    b.taps = f->taps + row * f->taps_width;
    b.positions = f->positions + row;
    b.slots = f->slots + row;
    return b;
}

dspark_context *open_context(const fixture *f, dspark_isa isa, uint32_t threads,
                                    dspark_path path, uint32_t max_tokens)
{
    dspark_error err;
    dspark_context_opts o;
    dspark_context *ctx = NULL;
    dspark_context_opts_init(&o);
    o.isa = isa;
    o.n_threads = threads;
    o.path = path;
    o.max_tokens = max_tokens;
    check(dspark_context_create(&ctx, f->model, &o, &err), DSPARK_OK, &err);
    return ctx;
}

/* Run n rows in calls of `batch` rows. */
void run_rows(dspark_context *ctx, const fixture *f, host_cache *h, size_t n, size_t batch)
{
    dspark_error err;
    for (size_t row = 0; row < n; row += batch) {
        dspark_batch b = batch_of(f, row, n - row < batch ? n - row : batch);
        dspark_run_info info;
        check(dspark_context_run(ctx, &b, &h->view, &info, &err), DSPARK_OK, &err);
        assert_int_equal(info.n_rows, b.n_tokens);
        assert_int_equal(info.n_written, b.n_tokens * f->n_layers);
    }
}

void reference_run(const fixture *f, host_cache *h, dspark_cache_dtype dtype, size_t n)
{
    dspark_context *ctx = open_context(f, DSPARK_ISA_REF, 1, DSPARK_PATH_ONEPASS, 0);
    open_cache(h, f, dtype);
    run_rows(ctx, f, h, n, n);
    dspark_context_free(ctx);
}

void compare_everything(const fixture *f, dspark_cache_dtype dtype, size_t n, int thorough)
{
    static const size_t batches[] = {1, 3, 16, 64, 1000};
    static const uint32_t threads[] = {1, 2, 3, 7};
    host_cache want, got;
    reference_run(f, &want, dtype, n);
    for (int isa = DSPARK_ISA_REF; isa <= DSPARK_ISA_AVX512BF16; isa++) {
        if (!dspark_isa_available((dspark_isa)isa)) continue;
        for (int path = DSPARK_PATH_ONEPASS; path <= DSPARK_PATH_FULL; path++)
            for (size_t t = 0; t < 4; t++)
                for (size_t b = 0; b < 5; b++) {
                    if ((!thorough || SAMPLE) && (t + b + (size_t)path) % 4 != 0) continue;
                    if (isa == DSPARK_ISA_REF && (t + b) % 3 != 0) continue; /* slow */
                    dspark_context *ctx = open_context(f, (dspark_isa)isa, threads[t],
                                                       (dspark_path)path, b == 4 ? 100 : 0);
                    open_cache(&got, f, dtype);
                    run_rows(ctx, f, &got, n, batches[b]);
                    if (memcmp(want.memory, got.memory, want.bytes) != 0)
                        fail_msg("isa %s, path %d, %u threads, batch %zu, cache %s: other bits",
                                 dspark_isa_name((dspark_isa)isa), path, threads[t], batches[b],
                                 dspark_cache_dtype_name(dtype));
                    free(got.memory);
                    dspark_context_free(ctx);
                }
    }
    free(want.memory);
}

float entry_value(const host_cache *h, const fixture *f, size_t layer, size_t row, size_t column)
{
    uint16_t v;
    uint32_t u;
    float x;
    memcpy(&v, (unsigned char *)h->layers[layer] +
                   ((size_t)f->slots[row] * f->width + column) * 2, 2);
    u = (uint32_t)v << 16;
    memcpy(&x, &u, 4);
    return x;
}

double error_of_fp64(const fixture *f, size_t n)
{
    dspark_error err;
    host_cache got;
    double *entries = malloc(f->n_layers * n * f->width * sizeof *entries), worst = 0, power = 0;
    assert_non_null(entries);
    dspark_context *ctx = open_context(f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 0);
    dspark_batch b = batch_of(f, 0, n);
    check(dspark_context_fp64(ctx, &b, entries, &err), DSPARK_OK, &err);
    open_cache(&got, f, DSPARK_CACHE_BF16);
    check(dspark_context_run(ctx, &b, &got.view, NULL, &err), DSPARK_OK, &err);
    for (size_t l = 0; l < f->n_layers; l++)
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < f->width; j++) {
                float x = entry_value(&got, f, l, i, j);
                double want = entries[(l * n + i) * f->width + j];
                worst = fmax(worst, fabs(x - want));
                power += want * want;
            }
    free(entries);
    free(got.memory);
    dspark_context_free(ctx);
    return worst / sqrt(power / (double)(f->n_layers * n * f->width));
}
