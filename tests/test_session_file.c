/* Snapshots of sessions: what is loaded drafts as what was saved, and a file that does not fit is refused
 * by name and leaves nothing behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dspark/dspark.h"
#include "support/drafting.h"
#include "support/fixture.h"
#include "support/oom.h"
#include "support/tmpdir.h"

static dspark_error err;

typedef struct file_case {
    const drafting *d;
    dspark_drafter *drafter;
    dspark_pool *pool;
    dspark_session *s;
    char path[600];
} file_case;

static dspark_pool *scaled_pool(const drafting *d, dspark_cache_dtype dtype, float scale, uint64_t n_blocks)
{
    float scales[DSPARK_MAX_LAYERS];
    dspark_pool_opts o;
    dspark_pool *pool = NULL;
    for (size_t l = 0; l < DSPARK_MAX_LAYERS; l++) scales[l] = scale;
    dspark_pool_opts_init(&o);
    o.dtype = dtype;
    o.block_size = 16;
    o.max_sessions = 2;
    o.n_blocks = n_blocks;
    o.scales = scales;
    check(dspark_pool_create(&pool, d->model, &o, &err), DSPARK_OK, &err);
    return pool;
}

static void open_case(file_case *f, const drafting *d, dspark_cache_dtype dtype, float scale)
{
    f->d = d;
    f->drafter = drafting_drafter(d, DSPARK_ISA_AUTO, 1, 1);
    f->pool = scaled_pool(d, dtype, scale, 10);
    f->s = drafting_session(d, f->pool, f->drafter, 0, 37);
    snprintf(f->path, sizeof f->path, "%s/session.safetensors", tmpdir_make());
    check(dspark_session_save(f->s, f->path, &err), DSPARK_OK, &err);
}

static void close_case(file_case *f)
{
    dspark_pool_free(f->pool);
    dspark_drafter_free(f->drafter);
}

/* Refused by `pool`, with `word` in the message, and nothing is held afterwards. */
static void expect_refusal(dspark_pool *pool, const char *path, dspark_status want, const char *word)
{
    dspark_pool_info before = dspark_pool_get_info(pool), after;
    dspark_session *s = (dspark_session *)(void *)&before;
    check(dspark_session_load(&s, pool, path, &err), want, &err);
    assert_null(s);
    if (!strstr(err.message, word) && !strstr(err.where, word))
        fail_msg("no '%s' in [%s] %s", word, err.where, err.message);
    after = dspark_pool_get_info(pool);
    assert_int_equal(after.free_blocks, before.free_blocks);
    assert_int_equal(after.open_sessions, before.open_sessions);
}

static void test_round_trip(void **state)
{
    static const dspark_cache_dtype dtypes[] = {DSPARK_CACHE_BF16, DSPARK_CACHE_FP8_E4M3,
                                                DSPARK_CACHE_FP8_E5M2};
    const drafting *d = *state;
    for (size_t t = 0; t < 3; t++) {
        file_case f;
        answer want, got;
        dspark_session *s = NULL;
        open_case(&f, d, dtypes[t], 0.03125f);
        dspark_pool *other = scaled_pool(d, dtypes[t], 0.03125f, 10);
        answer_open(&want, d);
        answer_open(&got, d);
        check(dspark_session_load(&s, other, f.path, &err), DSPARK_OK, &err);
        assert_int_equal(dspark_session_length(s), 37);
        assert_int_equal(dspark_session_accept(s, 0, &err), DSPARK_EINVAL);
        drafting_append(d, s, f.drafter, 37, 9);
        drafting_append(d, f.s, f.drafter, 37, 9);
        drafting_draft(f.s, f.drafter, 5, &want);
        drafting_draft(s, f.drafter, 5, &got);
        assert_int_equal(want.out.status, DSPARK_OK);
        answer_equal(&want, &got, d->n, "a loaded session");
        answer_close(&want);
        answer_close(&got);
        dspark_pool_free(other);
        close_case(&f);
    }
}

static void test_empty_session(void **state)
{
    file_case f;
    dspark_session *s = NULL, *empty = NULL;
    open_case(&f, *state, DSPARK_CACHE_BF16, 1);
    check(dspark_session_open(&empty, f.pool, &err), DSPARK_OK, &err);
    check(dspark_session_save(empty, f.path, &err), DSPARK_OK, &err);
    dspark_session_close(empty);
    check(dspark_session_load(&s, f.pool, f.path, &err), DSPARK_OK, &err);
    assert_int_equal(dspark_session_length(s), 0);
    close_case(&f);
}

static void test_other_pools(void **state)
{
    const drafting *d = *state;
    static const char *const settings[] = {"rms_norm_eps=1e-6"};
    drafting other;
    file_case f;
    dspark_pool *pool;
    open_case(&f, d, DSPARK_CACHE_FP8_E4M3, 1);
    expect_refusal(pool = scaled_pool(d, DSPARK_CACHE_BF16, 1, 4), f.path, DSPARK_EMODEL, "cache_dtype");
    dspark_pool_free(pool);
    expect_refusal(pool = scaled_pool(d, DSPARK_CACHE_FP8_E4M3, 2, 4), f.path, DSPARK_EMODEL, "scale");
    dspark_pool_free(pool);
    expect_refusal(pool = scaled_pool(d, DSPARK_CACHE_FP8_E4M3, 1, 2), f.path, DSPARK_ENOSPACE, "room");
    dspark_pool_free(pool);
    drafting_open(&other, settings, 1);
    expect_refusal(pool = scaled_pool(&other, DSPARK_CACHE_FP8_E4M3, 1, 4), f.path, DSPARK_EMODEL,
                   "fingerprint");
    dspark_pool_free(pool);
    drafting_close(&other);
    /* Enough in all, but not free; then every session is open. */
    pool = scaled_pool(d, DSPARK_CACHE_FP8_E4M3, 1, 4);
    dspark_session *s = drafting_session(d, pool, f.drafter, 0, 33);
    expect_refusal(pool, f.path, DSPARK_ENOSPACE, "free");
    check(dspark_session_rewind(s, 0, &err), DSPARK_OK, &err);
    drafting_session(d, pool, f.drafter, 0, 3);
    expect_refusal(pool, f.path, DSPARK_ENOSPACE, "sessions");
    dspark_pool_free(pool);
    close_case(&f);
}

/* The file again with a change: `layers` of them, the entry NaN, or the tail cut off. */
static void rewrite(const file_case *f, uint32_t n_layers, int make_nan, const char *tile)
{
    dspark_checkpoint *file = NULL;
    dspark_writer *w = NULL;
    char path[700];
    const size_t n = dspark_model_config(f->d->model)->n_layers;
    static const char *const keys[] = {"format", "fingerprint", "cache_dtype", "tile_scale", "entry_bytes"};
    check(dspark_checkpoint_open(&file, f->path, &err), DSPARK_OK, &err);
    snprintf(path, sizeof path, "%s.new", f->path);
    check(dspark_writer_create(&w, path, &err), DSPARK_OK, &err);
    for (size_t k = 0; k < 5; k++) {
        const char *value = dspark_checkpoint_metadata(file, keys[k]);
        check(dspark_writer_metadata(w, keys[k], k == 3 && tile ? tile : value, &err), DSPARK_OK, &err);
    }
    for (size_t l = 0; l < n; l++) {
        char key[64];
        snprintf(key, sizeof key, "scale.layers.%zu", l);
        check(dspark_writer_metadata(w, key, dspark_checkpoint_metadata(file, key), &err), DSPARK_OK, &err);
    }
    for (uint32_t l = 0; l < n_layers; l++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(file, l);
        check(dspark_writer_declare(w, t->name, t->dtype, t->rank, t->shape, &err), DSPARK_OK, &err);
    }
    for (uint32_t l = 0; l < n_layers; l++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(file, l);
        unsigned char *copy = malloc((size_t)t->n_bytes);
        assert_non_null(copy);
        memcpy(copy, t->data, (size_t)t->n_bytes);
        if (make_nan && l == n_layers - 1) memset(copy + 11 * t->shape[1] + 6, 0xff, 2);
        check(dspark_writer_data(w, copy, (size_t)t->n_bytes, &err), DSPARK_OK, &err);
        free(copy);
    }
    check(dspark_writer_commit(w, &err), DSPARK_OK, &err);
    dspark_checkpoint_close(file);
    assert_int_equal(rename(path, f->path), 0);
}

static void test_broken_files(void **state)
{
    const drafting *d = *state;
    const uint32_t n = d->config->n_layers;
    file_case f;
    unsigned char bytes[4096];
    size_t n_bytes;
    FILE *in;
    open_case(&f, d, DSPARK_CACHE_BF16, 1);
    dspark_session_close(f.s); /* loading may not depend on it */
    rewrite(&f, n, 0, NULL);
    dspark_session *s = NULL;
    check(dspark_session_load(&s, f.pool, f.path, &err), DSPARK_OK, &err);
    dspark_session_close(s);
    rewrite(&f, n, 1, NULL);
    expect_refusal(f.pool, f.path, DSPARK_ENONFINITE, "position 11");
    rewrite(&f, n - 1, 0, NULL);
    expect_refusal(f.pool, f.path, DSPARK_EFORMAT, "tensors");
    in = fopen(f.path, "rb");
    assert_non_null(in);
    n_bytes = fread(bytes, 1, sizeof bytes, in);
    fclose(in);
    assert_int_equal(n_bytes, sizeof bytes);
    for (size_t cut = 0; cut < sizeof bytes; cut += 97) {
        tmpdir_write(f.path, bytes, cut);
        dspark_session *none = NULL;
        assert_true(dspark_session_load(&none, f.pool, f.path, &err) != DSPARK_OK);
        assert_null(none);
    }
    remove(f.path);
    expect_refusal(f.pool, f.path, DSPARK_EIO, "session.safetensors");
    assert_int_equal(dspark_pool_get_info(f.pool).free_blocks, 10);
    close_case(&f);
}

/* 512 and 64 wide: the dtype with scales inside its entries. */
static void test_tile_scale(void **state)
{
    static const char *const settings[] = {"kv_lora_rank=512", "qk_rope_head_dim=64", "num_hidden_layers=1"};
    drafting d;
    file_case f;
    dspark_pool_opts o;
    dspark_pool *exact = NULL;
    (void)state;
    drafting_open(&d, settings, 3);
    open_case(&f, &d, DSPARK_CACHE_FP8_DS_MLA, 1);
    dspark_pool_opts_init(&o);
    o.dtype = DSPARK_CACHE_FP8_DS_MLA;
    o.tile_scale = DSPARK_TILE_SCALE_EXACT;
    o.n_blocks = 4;
    check(dspark_pool_create(&exact, d.model, &o, &err), DSPARK_OK, &err);
    expect_refusal(exact, f.path, DSPARK_EMODEL, "tile_scale");
    rewrite(&f, 1, 0, "exact");
    expect_refusal(f.pool, f.path, DSPARK_EMODEL, "tile_scale");
    dspark_pool_free(exact);
    close_case(&f);
    drafting_close(&d);
}

static void test_out_of_memory(void **state)
{
    file_case f;
    if (!oom_available()) skip();
    open_case(&f, *state, DSPARK_CACHE_BF16, 1);
    for (int what = 0; what < 2; what++)
        for (size_t n = 1;; n++) {
            dspark_session *s = NULL;
            oom_fail_nth(n);
            dspark_status st = what ? dspark_session_load(&s, f.pool, f.path, &err)
                                    : dspark_session_save(f.s, f.path, &err);
            oom_stop();
            if (st == DSPARK_OK) {
                assert_int_equal(oom_failed(), 0);
                dspark_session_close(s);
                break;
            }
            assert_int_equal(st, DSPARK_ENOMEM);
            assert_null(s);
            assert_int_equal(dspark_pool_get_info(f.pool).free_blocks, 7);
        }
    close_case(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_empty_session),
        cmocka_unit_test(test_other_pools), cmocka_unit_test(test_broken_files),
        cmocka_unit_test(test_tile_scale), cmocka_unit_test(test_out_of_memory)};
    return cmocka_run_group_tests_name("session_file", tests, drafting_setup, drafting_teardown);
}
