/* Quantised checkpoints through the fused path: one answer for every format and mixture, each shard
 * with its own scales, and vLLM's merge where it is asked for. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "dspark/dspark.h"
#include "support/fixture.h"
#include "support/oom.h"
#include "support/tmpdir.h"

/* ---- making checkpoints ---- */

/* `format` of a fresh tiny checkpoint; only the modules that `target` fits when it is not NULL. */
static void make_quantised(char *dir, size_t cap, dspark_format format, dspark_layout layout,
                           const char *target)
{
    dspark_error err;
    dspark_synth_opts so;
    dspark_quantize_opts qo;
    const char *root = tmpdir_make();
    char plain[512];
    snprintf(plain, sizeof plain, "%s/plain", root);
    snprintf(dir, cap, "%s/quantised", root);
    dspark_synth_opts_init(&so);
    so.preset = "tiny";
    so.seed = 11;
    check(dspark_synth_checkpoint(plain, &so, &err), DSPARK_OK, &err);
    dspark_quantize_opts_init(&qo);
    qo.format = format;
    qo.layout = layout;
    qo.group_size = format == DSPARK_FORMAT_INT4 ? 32 : 0;
    qo.targets = &target;
    qo.n_targets = target != NULL;
    qo.n_threads = 1;
    check(dspark_quantize(plain, dir, &qo, &err), DSPARK_OK, &err);
}

static void copy_config(const char *from, const char *to)
{
    char path[600], text[16384];
    snprintf(path, sizeof path, "%s/config.json", from);
    FILE *in = fopen(path, "rb");
    assert_non_null(in);
    size_t n = fread(text, 1, sizeof text, in);
    fclose(in);
    assert_true(n > 0 && n < sizeof text);
    snprintf(path, sizeof path, "%s/config.json", to);
    tmpdir_write(path, text, n);
}

/* A copy of a checkpoint in which one-number scale tensors called `suffix` of each layer's kv_a are
 * multiplied by factors[layer]. */
static void copy_scaled(char *dir, size_t cap, const char *from, const char *suffix,
                        const float *factors)
{
    dspark_error err;
    dspark_checkpoint *in;
    dspark_writer *out;
    char path[600];
    snprintf(dir, cap, "%s", tmpdir_make());
    copy_config(from, dir);
    check(dspark_checkpoint_open(&in, from, &err), DSPARK_OK, &err);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    check(dspark_writer_create(&out, path, &err), DSPARK_OK, &err);
    size_t n = dspark_checkpoint_tensor_count(in), changed = 0;
    for (size_t i = 0; i < n; i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(in, i);
        check(dspark_writer_declare(out, t->name, t->dtype, t->rank, t->shape, &err), DSPARK_OK, &err);
    }
    for (size_t i = 0; i < n; i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(in, i);
        char want[128];
        const void *data = t->data;
        float scaled;
        uint16_t half;
        for (int l = 0; l < 5; l++) {
            snprintf(want, sizeof want, "layers.%d.self_attn.kv_a_proj_with_mqa.%s", l, suffix);
            if (strcmp(want, t->name) != 0) continue;
            assert_int_equal(t->n_elements, 1);
            changed++;
            if (t->dtype == DSPARK_BF16) {
                uint32_t u;
                memcpy(&half, t->data, 2);
                u = (uint32_t)half << 16;
                memcpy(&scaled, &u, 4);
                scaled *= factors[l];
                memcpy(&u, &scaled, 4);
                half = (uint16_t)(u >> 16); /* powers of two: exact */
                data = &half;
            } else {
                assert_int_equal(t->dtype, DSPARK_F32);
                memcpy(&scaled, t->data, 4);
                scaled *= factors[l];
                data = &scaled;
            }
        }
        check(dspark_writer_data(out, data, t->n_bytes, &err), DSPARK_OK, &err);
    }
    assert_int_equal(changed, 5);
    check(dspark_writer_commit(out, &err), DSPARK_OK, &err);
    dspark_checkpoint_close(in);
}

/* ---- one answer ---- */

static void every_format_has_one_answer(void **state)
{
    (void)state;
    static const struct {
        dspark_format format;
        dspark_layout layout;
    } cases[] = {{DSPARK_FORMAT_FP8_TENSOR, DSPARK_LAYOUT_COMPRESSED_TENSORS},
                 {DSPARK_FORMAT_FP8_TENSOR, DSPARK_LAYOUT_MODELOPT},
                 {DSPARK_FORMAT_FP8_CHANNEL, DSPARK_LAYOUT_COMPRESSED_TENSORS},
                 {DSPARK_FORMAT_FP8_BLOCK, DSPARK_LAYOUT_COMPRESSED_TENSORS},
                 {DSPARK_FORMAT_NVFP4, DSPARK_LAYOUT_COMPRESSED_TENSORS},
                 {DSPARK_FORMAT_NVFP4, DSPARK_LAYOUT_MODELOPT},
                 {DSPARK_FORMAT_MXFP4, DSPARK_LAYOUT_COMPRESSED_TENSORS},
                 {DSPARK_FORMAT_MXFP8, DSPARK_LAYOUT_COMPRESSED_TENSORS},
                 {DSPARK_FORMAT_INT8, DSPARK_LAYOUT_COMPRESSED_TENSORS},
                 {DSPARK_FORMAT_INT4, DSPARK_LAYOUT_COMPRESSED_TENSORS}};
    uint64_t bf16 = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fixture f, plain;
        char dir[512];
        make_quantised(dir, sizeof dir, cases[i].format, cases[i].layout, NULL);
        open_fixture_at(&f, dir, 0);
        if (i == 0) {
            open_fixture(&plain, NULL, 0);
            bf16 = dspark_model_resident_bytes(plain.model);
            close_fixture(&plain);
        }
        assert_true(dspark_model_resident_bytes(f.model) < bf16 * 7 / 10); /* packed stays packed */
        compare_everything(&f, DSPARK_CACHE_BF16, 130, 0);
        double error = error_of_fp64(&f, 9);
        if (!(error < 0.04)) fail_msg("%s: error %.3g", dspark_format_name(cases[i].format), error);
        close_fixture(&f);
    }
}

/* Two layers of the merged linear in one format, three in bf16. */
static void a_merged_linear_may_be_mixed(void **state)
{
    (void)state;
    static const dspark_format formats[] = {DSPARK_FORMAT_NVFP4, DSPARK_FORMAT_FP8_BLOCK,
                                            DSPARK_FORMAT_INT4};
    for (size_t i = 0; i < 3; i++) {
        fixture f, plain;
        host_cache mixed, all_bf16;
        char dir[512];
        make_quantised(dir, sizeof dir, formats[i], DSPARK_LAYOUT_COMPRESSED_TENSORS,
                       "re:.*layers\\.[13]\\.self_attn\\.kv_a_proj_with_mqa");
        open_fixture_at(&f, dir, 0);
        compare_everything(&f, DSPARK_CACHE_BF16, 70, 0);
        open_fixture(&plain, NULL, 0);
        reference_run(&f, &mixed, DSPARK_CACHE_BF16, 20);
        reference_run(&plain, &all_bf16, DSPARK_CACHE_BF16, 20);
        size_t layer = mixed.bytes / f.n_layers;
        for (size_t l = 0; l < f.n_layers; l++) {
            int same = memcmp(mixed.layers[l], all_bf16.layers[l], layer) == 0;
            assert_int_equal(same, l != 1 && l != 3); /* only these layers have other numbers */
        }
        free(mixed.memory);
        free(all_bf16.memory);
        close_fixture(&f);
        close_fixture(&plain);
    }
}

/* ---- each shard keeps its own scale ---- */

static size_t latent_of(const fixture *f)
{
    return dspark_model_config(f->model)->kv_lora_rank;
}

/* Five scales apart by powers of two: the rope key of each layer is scaled by exactly its factor, the
 * latent hardly moves (its norm cancels a factor, but for eps), and no layer feels another's. */
static void scales_stay_with_their_layer(void **state)
{
    (void)state;
    static const struct {
        dspark_format format;
        dspark_layout layout;
        const char *suffix;
        int divides;
        size_t parted; /* layers at least that vLLM's merge gets wrong */
    } cases[] = {
        {DSPARK_FORMAT_NVFP4, DSPARK_LAYOUT_COMPRESSED_TENSORS, "weight_global_scale", 1, 4},
        {DSPARK_FORMAT_NVFP4, DSPARK_LAYOUT_MODELOPT, "weight_scale_2", 0, 4},
        {DSPARK_FORMAT_FP8_TENSOR, DSPARK_LAYOUT_COMPRESSED_TENSORS, "weight_scale", 0, 1},
    };
    static const float factors[5] = {1, 0.125f, 8, 0.015625f, 64};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fixture f, g, compat;
        host_cache before, after, merged;
        char dir[512], scaled[512];
        make_quantised(dir, sizeof dir, cases[i].format, cases[i].layout, NULL);
        copy_scaled(scaled, sizeof scaled, dir, cases[i].suffix, factors);
        open_fixture_at(&f, dir, 0);
        open_fixture_at(&g, scaled, 0);
        open_fixture_at(&compat, scaled, 1);
        compare_everything(&g, DSPARK_CACHE_BF16, 70, 0);
        compare_everything(&compat, DSPARK_CACHE_BF16, 70, 0);
        reference_run(&f, &before, DSPARK_CACHE_BF16, 20);
        reference_run(&g, &after, DSPARK_CACHE_BF16, 20);
        reference_run(&compat, &merged, DSPARK_CACHE_BF16, 20);
        size_t parted = 0, latent = latent_of(&f);
        for (size_t l = 0; l < 5; l++) {
            float factor = cases[i].divides ? 1 / factors[l] : factors[l];
            int rope_differs = 0;
            for (size_t row = 0; row < 20; row++)
                for (size_t c = latent; c < f.width; c++) {
                    float x = entry_value(&before, &f, l, row, c), y = entry_value(&after, &f, l, row, c);
                    assert_true(x * factor == y);
                    rope_differs |= entry_value(&merged, &f, l, row, c) != y;
                }
            parted += rope_differs;
        }
        /* vLLM's merge of NVFP4 is right for one layer at most, and shows in the rope key. Requantised
         * FP8 loses what the larger scale cannot hold; powers of two cost only the smallest codes. */
        assert_true(parted >= cases[i].parted);
        free(before.memory);
        free(after.memory);
        free(merged.memory);
        close_fixture(&f);
        close_fixture(&g);
        close_fixture(&compat);
    }
}

/* The layer whose scale is vLLM's choice is the one that its merge leaves alone. */
static void vllm_compat_picks_the_largest(void **state)
{
    (void)state;
    static const float factors[5] = {1, 0.125f, 8, 0.015625f, 64};
    fixture g, compat;
    host_cache exact, merged;
    char dir[512], scaled[512];
    make_quantised(dir, sizeof dir, DSPARK_FORMAT_NVFP4, DSPARK_LAYOUT_COMPRESSED_TENSORS, NULL);
    copy_scaled(scaled, sizeof scaled, dir, "weight_global_scale", factors);
    open_fixture_at(&g, scaled, 0);
    open_fixture_at(&compat, scaled, 1);
    reference_run(&g, &exact, DSPARK_CACHE_BF16, 20);
    reference_run(&compat, &merged, DSPARK_CACHE_BF16, 20);
    size_t layer = exact.bytes / 5;
    for (size_t l = 0; l < 5; l++) /* the largest divisor: layer 4 */
        assert_int_equal(memcmp(exact.layers[l], merged.layers[l], layer) == 0, l == 4);
    /* The others' rope keys are off by the ratio of the global scales, up to rounding. */
    for (size_t row = 0; row < 20; row++) {
        float x = entry_value(&exact, &g, 2, row, latent_of(&g));
        float y = entry_value(&merged, &g, 2, row, latent_of(&g));
        if (fabsf(x) < 1e-3f) continue;
        assert_true(y / x > 0.02f && y / x < 0.5f); /* 8/64, and what the two scales were apart before */
    }
    free(exact.memory);
    free(merged.memory);
    close_fixture(&g);
    close_fixture(&compat);
}

/* ---- memory ---- */

static void runs_allocate_nothing(void **state)
{
    (void)state;
    dspark_error err;
    if (!oom_available()) skip();
    static const dspark_format formats[] = {DSPARK_FORMAT_NVFP4, DSPARK_FORMAT_FP8_BLOCK};
    for (size_t i = 0; i < 2; i++) {
        fixture f;
        host_cache h;
        char dir[512];
        make_quantised(dir, sizeof dir, formats[i], DSPARK_LAYOUT_COMPRESSED_TENSORS, NULL);
        open_fixture_at(&f, dir, 0);
        dspark_context *ctx = open_context(&f, DSPARK_ISA_AUTO, 2, DSPARK_PATH_ONEPASS, 50);
        open_cache(&h, &f, DSPARK_CACHE_BF16);
        dspark_batch b = batch_of(&f, 0, 333);
        oom_count_start();
        dspark_status st = dspark_context_run(ctx, &b, &h.view, NULL, &err);
        size_t n = oom_stop();
        check(st, DSPARK_OK, &err);
        assert_int_equal(n, 0);
        free(h.memory);
        dspark_context_free(ctx);
        close_fixture(&f);
    }
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    char dir[512];
    if (!oom_available()) skip();
    make_quantised(dir, sizeof dir, DSPARK_FORMAT_NVFP4, DSPARK_LAYOUT_COMPRESSED_TENSORS, NULL);
    for (size_t n = 1;; n++) {
        dspark_error err;
        dspark_model_opts mo;
        dspark_model *m = NULL;
        dspark_model_opts_init(&mo);
        mo.n_threads = 1;
        oom_fail_nth(n);
        dspark_status st = dspark_model_open(&m, dir, &mo, &err);
        oom_stop();
        dspark_model_close(m);
        if (oom_failed() == 0) {
            check(st, DSPARK_OK, &err);
            assert_true(n > 20);
            break;
        }
        if (st != DSPARK_ENOMEM)
            fail_msg("allocation %zu failed: %s [%s] %s", n, dspark_status_name(st), err.where,
                     err.message);
        assert_true(n < 100000);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format_has_one_answer),
        cmocka_unit_test(a_merged_linear_may_be_mixed),
        cmocka_unit_test(scales_stay_with_their_layer),
        cmocka_unit_test(vllm_compat_picks_the_largest),
        cmocka_unit_test(runs_allocate_nothing),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
