/* The block forward on a tiny model: one answer for every level, thread count, batch, paging and
 * cache dtype; masks, positions, and numbers that are none. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/fpenv.h"
#include "base/threads.h"
#include "base/workspace.h"
#include "model/block.h"
#include "support/fixture.h"
#include "support/guard.h"
#include "support/tmpdir.h"
#include "support/values.h"

enum { N_SEQ = 4, MAX_CONTEXT = 300 };

static const uint64_t contexts[N_SEQ] = {3, 17, 1, 0}; /* B81 */

typedef struct bench {
    dspark_model *model;
    uint16_t *head;     /* the host's LM head */
    size_t width, h, n, layers;
    uint16_t *entries[N_SEQ]; /* [layers][MAX_CONTEXT][width] */
    uint64_t n_context[N_SEQ];
    int64_t anchor[N_SEQ], position[N_SEQ];
} bench;

static void open_bench(bench *t, const char *const *settings, size_t n_settings)
{
    dspark_error err;
    dspark_synth_opts so;
    dspark_model_opts mo;
    dspark_config c;
    char dir[512];
    memset(t, 0, sizeof *t);
    snprintf(dir, sizeof dir, "%s/ckpt", tmpdir_make());
    dspark_synth_opts_init(&so);
    so.preset = "tiny";
    so.seed = 5;
    so.settings = settings;
    so.n_settings = n_settings;
    check(dspark_synth_checkpoint(dir, &so, &err), DSPARK_OK, &err);
    dspark_model_opts_init(&mo);
    mo.n_threads = 1;
    check(dspark_model_open(&t->model, dir, &mo, &err), DSPARK_OK, &err);
    c = *dspark_model_config(t->model);
    dspark_model_close(t->model);
    t->head = calloc((size_t)c.vocab_size * c.hidden_size, 2);
    assert_non_null(t->head);
    dspark_host_matrix head = {t->head, c.vocab_size, c.hidden_size, 0};
    mo.parts = DSPARK_PART_BLOCK;
    mo.lm_head = &head;
    check(dspark_model_open(&t->model, dir, &mo, &err), DSPARK_OK, &err);
    t->h = c.hidden_size;
    t->n = c.block_size;
    t->layers = c.n_layers;
    t->width = (size_t)c.kv_lora_rank + c.qk_rope_head_dim;
    for (size_t i = 0; i < N_SEQ; i++) {
        size_t values = t->layers * MAX_CONTEXT * t->width;
        t->entries[i] = malloc(values * 2);
        assert_non_null(t->entries[i]);
        for (size_t j = 0; j < values; j++) {
            double x = (double)(values_random() >> 11) * 0x1p-51 - 2;
            t->entries[i][j] = dspark__f32_to_bf16((float)x);
        }
        t->n_context[i] = contexts[i];
        t->anchor[i] = (int64_t)(values_random() % c.vocab_size);
        t->position[i] = (int64_t)contexts[i] + 1000 * (int64_t)i;
    }
}

static void close_bench(bench *t)
{
    dspark_model_close(t->model);
    free(t->head);
    for (size_t i = 0; i < N_SEQ; i++) free(t->entries[i]);
}

/* A cache that holds all sequences, blocks scattered; what is not in use is all ones: NaN. */
typedef struct cache {
    guard memory;
    void *layers[DSPARK_MAX_LAYERS];
    float scales[DSPARK_MAX_LAYERS];
    dspark__cache_map map;
    int64_t slots[N_SEQ][MAX_CONTEXT];
    int32_t table[N_SEQ][MAX_CONTEXT + 1];
} cache;

static cache *open_blocks(const bench *t, dspark_cache_dtype dtype, uint32_t block_size, int fill)
{
    dspark_error err;
    dspark_cache_view view;
    const dspark_config *c = dspark_model_config(t->model);
    cache *k = calloc(1, sizeof *k);
    assert_non_null(k);
    uint64_t n_blocks = 0, next = 0;
    for (size_t i = 0; i < N_SEQ; i++) n_blocks += t->n_context[i] / block_size + 2;
    n_blocks |= 1;
    size_t layer = (size_t)n_blocks * block_size *
                   dspark__cache_entry_bytes(dtype, c->kv_lora_rank, c->qk_rope_head_dim);
    k->memory = guard_end(layer * t->layers);
    memset(k->memory.p, fill, layer * t->layers);
    for (size_t l = 0; l < t->layers; l++) {
        k->layers[l] = k->memory.p + l * layer;
        k->scales[l] = 0.25f * (float)(l + 1);
    }
    dspark_cache_view_init(&view);
    view.n_layers = c->n_layers;
    view.layers = k->layers;
    view.scales = k->scales;
    view.n_blocks = n_blocks;
    view.block_size = block_size;
    view.dtype = dtype;
    check(dspark__cache_map_init(&k->map, &view, c, &err), DSPARK_OK, &err);
    dspark__kern kern = values_level(DSPARK_ISA_REF);
    for (size_t i = 0; i < N_SEQ; i++) {
        for (uint64_t b = 0; b <= t->n_context[i] / block_size; b++, next++)
            k->table[i][b] = (int32_t)(next * 2 % n_blocks);
        for (uint64_t e = 0; e < t->n_context[i]; e++) {
            k->slots[i][e] = (int64_t)k->table[i][e / block_size] * block_size +
                             (int64_t)(e % block_size);
            for (uint32_t l = 0; l < t->layers; l++)
                dspark__cache_write(&k->map, &kern, l, k->slots[i][e],
                                    t->entries[i] + (l * MAX_CONTEXT + e) * t->width);
        }
    }
    return k;
}

static void close_blocks(cache *k)
{
    guard_free(&k->memory);
    free(k);
}

typedef struct result {
    uint16_t *hidden;  /* [N_SEQ][N][h] */
    uint16_t *entries; /* [N_SEQ][N][width]: own entries of the last layer */
    dspark_status status[N_SEQ];
} result;

static result new_result(const bench *t)
{
    result r = {malloc(N_SEQ * t->n * t->h * 2), malloc(N_SEQ * t->n * t->width * 2), {DSPARK_OK}};
    assert_non_null(r.hidden);
    assert_non_null(r.entries);
    return r;
}

static void free_result(result *r)
{
    free(r->hidden);
    free(r->entries);
}

/* Sequences which[0..n) as one batch; results go to their own places. */
static void forward(const bench *t, cache *k, int isa, uint32_t threads, const uint32_t *which,
                    uint32_t n, int by_slots, result *r)
{
    dspark_error err;
    dspark__block_layout layout;
    dspark__workspace ws;
    void *views[DSPARK__BLOCK_VIEWS];
    dspark__threads *pool = NULL;
    dspark__block_row rows[N_SEQ];
    dspark_status status[N_SEQ] = {DSPARK_OK};
    dspark_draft_times times = {0};
    dspark__kern kern = values_level(isa);
    check(dspark__threads_create(&pool, threads, NULL, NULL, &err), DSPARK_OK, &err);
    assert_true(dspark__block_plan(&layout, dspark_model_config(t->model), n, threads));
    dspark__workspace_init(&ws, NULL);
    check(dspark__workspace_get(&ws, layout.sizes, DSPARK__BLOCK_VIEWS, views, &err), DSPARK_OK,
          &err);
    for (size_t v = 0; v < DSPARK__BLOCK_VIEWS; v++) memset(views[v], 0xff, layout.sizes[v]);
    memset(rows, 0, sizeof rows);
    for (uint32_t i = 0; i < n; i++) {
        rows[i].context.slots = by_slots ? k->slots[which[i]] : NULL;
        rows[i].context.block_table = k->table[which[i]];
        rows[i].context.n = t->n_context[which[i]];
        rows[i].anchor = t->anchor[which[i]];
        rows[i].position = t->position[which[i]];
    }
    dspark__block b = {t->model, &kern, pool, &layout, &k->map, rows, n, views, &times, status};
    unsigned env = dspark__fpenv_enter();
    dspark__block_forward(&b);
    dspark__fpenv_leave(env);
    for (uint32_t i = 0; i < n; i++) {
        size_t hidden = t->n * t->h, own = t->n * t->width;
        memcpy(r->hidden + which[i] * hidden, (uint16_t *)views[DSPARK__BLOCK_NORMED] + i * hidden,
               hidden * 2);
        memcpy(r->entries + which[i] * own, (uint16_t *)views[DSPARK__BLOCK_ENTRIES] + i * own,
               own * 2);
        r->status[which[i]] = status[i];
    }
    dspark__workspace_free(&ws);
    dspark__threads_free(pool);
}

static const uint32_t all[N_SEQ] = {0, 1, 2, 3};

/* Each sequence alone by the reference, in a cache whose unused places are zeros. */
static void reference(const bench *t, dspark_cache_dtype dtype, result *r)
{
    cache *k = open_blocks(t, dtype, 16, 0);
    for (uint32_t i = 0; i < N_SEQ; i++)
        forward(t, k, DSPARK_ISA_REF, 1, all + i, 1, 0, r);
    close_blocks(k);
}

static int same_row(const bench *t, const result *a, const result *b, uint32_t seq, size_t row)
{
    size_t at = (seq * t->n + row) * t->h;
    return memcmp(a->hidden + at, b->hidden + at, t->h * 2) == 0;
}

static int same(const bench *t, const result *a, const result *b, uint32_t seq)
{
    for (size_t row = 0; row < t->n; row++)
        if (!same_row(t, a, b, seq, row)) return 0;
    return a->status[seq] == b->status[seq];
}

static void compare_all(const bench *t, dspark_cache_dtype dtype)
{
    static const uint32_t threads[] = {1, 2, 7}, blocks[] = {1, 16, 64, 128};
    static const uint32_t orders[][N_SEQ] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}};
    result want = new_result(t), got = new_result(t);
    reference(t, dtype, &want);
    for (uint32_t i = 0; i < N_SEQ; i++) assert_int_equal(want.status[i], DSPARK_OK);
    for (size_t b = 0; b < 4; b++) {
        cache *k = open_blocks(t, dtype, blocks[b], 0xff);
        for (VALUES_LEVELS(isa)) {
            for (size_t th = 0; th < 3; th++) {
                if ((SAMPLE || isa == DSPARK_ISA_REF) && (b + th + (size_t)isa) % 4 != 0) continue;
                memset(got.hidden, 0, N_SEQ * t->n * t->h * 2);
                forward(t, k, isa, threads[th], orders[(b + th) % 3], N_SEQ, (int)(th % 2), &got);
                for (uint32_t i = 0; i < N_SEQ; i++)
                    if (!same(t, &want, &got, i))
                        fail_msg("isa %d, %u threads, blocks of %u, cache %s, sequence %u: "
                                 "other bits",
                                 isa, threads[th], blocks[b], dspark__cache_dtype_name(dtype), i);
            }
        }
        close_blocks(k);
    }
    free_result(&want);
    free_result(&got);
}

static void one_answer(void **state)
{
    (void)state;
    static const char *const odd[] = {"kv_lora_rank=70", "qk_rope_head_dim=6", "hidden_size=66",
                                      "q_lora_rank=49"};
    static const char *const causal[] = {"num_attention_heads=3", "is_causal=true"};
    static const char *const ds_mla[] = {"kv_lora_rank=512", "qk_rope_head_dim=64"};
    bench t;
    open_bench(&t, NULL, 0);
    t.n_context[1] = MAX_CONTEXT; /* more than one piece */
    compare_all(&t, DSPARK_CACHE_BF16);
    compare_all(&t, DSPARK_CACHE_FP8_E4M3);
    compare_all(&t, DSPARK_CACHE_FP8_E5M2);
    close_bench(&t);
    open_bench(&t, odd, 4);
    compare_all(&t, DSPARK_CACHE_BF16);
    close_bench(&t);
    open_bench(&t, causal, 2);
    assert_int_equal(t.model->config.causal, 1);
    compare_all(&t, DSPARK_CACHE_BF16);
    close_bench(&t);
    open_bench(&t, ds_mla, 2);
    compare_all(&t, DSPARK_CACHE_FP8_DS_MLA);
    close_bench(&t);
}

/* B35: another input of the last row alone (its position is cut to the model's last) changes the
 * first row, unless the block is causal. */
static void the_last_row_reaches_the_first(void **state)
{
    (void)state;
    bench t;
    open_bench(&t, NULL, 0);
    cache *k = open_blocks(&t, DSPARK_CACHE_BF16, 16, 0xff);
    result before = new_result(&t), after = new_result(&t);
    for (int causal = 0; causal < 2; causal++) {
        t.model->config.causal = causal;
        t.model->config.max_positions = (uint64_t)t.position[1] + t.n;
        forward(&t, k, (int)dspark__isa_best(), 1, all + 1, 1, 0, &before);
        t.model->config.max_positions--;
        forward(&t, k, (int)dspark__isa_best(), 1, all + 1, 1, 0, &after);
        for (size_t row = 0; row < t.n; row++)
            assert_int_equal(same_row(&t, &before, &after, 1, row), causal && row + 1 < t.n);
    }
    free_result(&before);
    free_result(&after);
    close_blocks(k);
    close_bench(&t);
}

/* B61: the same normed row through the context path and through the block, at the same position, is
 * the same entry: latent and rotated key. */
static void both_paths_rotate_alike(void **state)
{
    (void)state;
    static const int64_t positions[] = {0, 1, 4095, 32768, 262144};
    static const char *const one[] = {"num_hidden_layers=1"};
    dspark_error err;
    bench t;
    open_bench(&t, one, 1);
    const dspark__block_weights *w = &t.model->block;
    uint16_t *states = malloc(t.h * 2), *entry = malloc(t.width * 2);
    assert_non_null(states);
    assert_non_null(entry);
    dspark__kern kern = values_level(DSPARK_ISA_REF);
    kern.rmsnorm_bf16(states, w->embed.data + (size_t)t.anchor[0] * w->embed.row_stride,
                      w->input_norm, t.h, t.model->config.rms_norm_eps);
    cache *k = open_blocks(&t, DSPARK_CACHE_BF16, 16, 0xff);
    result r = new_result(&t);
    dspark_context_opts o;
    dspark_context *ctx = NULL;
    dspark_context_opts_init(&o);
    o.n_threads = 1;
    check(dspark_context_create(&ctx, t.model, &o, &err), DSPARK_OK, &err);
    for (size_t i = 0; i < sizeof positions / sizeof *positions; i++) {
        void *layer = entry;
        int64_t slot = 0;
        dspark_cache_view view;
        dspark_batch b;
        dspark_cache_view_init(&view);
        view.n_layers = 1;
        view.layers = &layer;
        view.n_blocks = view.block_size = 1;
        dspark_batch_init(&b);
        b.n_tokens = 1;
        b.states = states;
        b.positions = positions + i;
        b.slots = &slot;
        memset(entry, 0xff, t.width * 2);
        check(dspark_context_run(ctx, &b, &view, NULL, &err), DSPARK_OK, &err);
        t.position[0] = positions[i];
        forward(&t, k, (int)dspark__isa_best(), 2, all, 1, 0, &r);
        assert_memory_equal(entry, r.entries, t.width * 2);
    }
    dspark_context_free(ctx);
    free(states);
    free(entry);
    free_result(&r);
    close_blocks(k);
    close_bench(&t);
}

/* One entry in use that is no number: a status for its sequence, nothing for the others. */
static void a_bad_cache_harms_its_own_sequence(void **state)
{
    (void)state;
    bench t;
    open_bench(&t, NULL, 0);
    for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_E5M2; dtype++) {
        result want = new_result(&t), got = new_result(&t);
        reference(&t, (dspark_cache_dtype)dtype, &want);
        cache *k = open_blocks(&t, (dspark_cache_dtype)dtype, 16, 0xff);
        unsigned char *layer = k->layers[t.layers - 1];
        memset(layer + dspark__cache_offset(&k->map, k->slots[1][16]), 0xff, 2);
        forward(&t, k, (int)dspark__isa_best(), 2, all, N_SEQ, 0, &got);
        for (uint32_t i = 0; i < N_SEQ; i++) {
            if (i == 1) assert_int_equal(got.status[i], DSPARK_ENONFINITE);
            else assert_true(same(&t, &want, &got, i));
        }
        free_result(&want);
        free_result(&got);
        close_blocks(k);
    }
    close_bench(&t);
}

/* A row of finite numbers whose squares leave fp32 has no norm: it must not pass as zeros. */
static void a_norm_that_overflows_is_told(void **state)
{
    (void)state;
    bench t;
    open_bench(&t, NULL, 0);
    dspark__table *embed = &t.model->block.embed;
    const dspark__table kept = *embed;
    uint16_t *rows = malloc((size_t)embed->rows * t.h * 2);
    assert_non_null(rows);
    for (size_t i = 0; i < embed->rows; i++)
        memcpy(rows + i * t.h, kept.data + i * kept.row_stride, t.h * 2);
    for (uint32_t i = 0; i < N_SEQ; i++) t.anchor[i] = i;
    embed->data = (const unsigned char *)rows;
    embed->row_stride = t.h * 2;
    result want = new_result(&t), got = new_result(&t);
    reference(&t, DSPARK_CACHE_BF16, &want);
    for (size_t j = 0; j < t.h; j++)
        rows[1 * t.h + j] = dspark__f32_to_bf16(j % 2 ? 0x1p+90f : -0x1p+90f);
    cache *k = open_blocks(&t, DSPARK_CACHE_BF16, 16, 0xff);
    forward(&t, k, (int)dspark__isa_best(), 2, all, N_SEQ, 0, &got);
    for (uint32_t i = 0; i < N_SEQ; i++) {
        if (i == 1) assert_int_equal(got.status[i], DSPARK_ENONFINITE);
        else assert_true(same(&t, &want, &got, i));
    }
    *embed = kept;
    free(rows);
    free_result(&want);
    free_result(&got);
    close_blocks(k);
    close_bench(&t);
}

/* An own entry beyond bf16 must not come back from an fp8 cache as its largest number. */
static void an_entry_that_overflows_is_told(void **state)
{
    (void)state;
    for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_E5M2; dtype++) {
        bench t;
        open_bench(&t, NULL, 0);
        size_t latent = t.model->config.kv_lora_rank;
        for (size_t j = 0; j < latent; j++)
            t.model->kv_a_norm[(t.layers - 1) * latent + j] = 0x7f7f;
        cache *k = open_blocks(&t, (dspark_cache_dtype)dtype, 16, 0xff);
        result got = new_result(&t);
        forward(&t, k, (int)dspark__isa_best(), 2, all, N_SEQ, 0, &got);
        for (uint32_t i = 0; i < N_SEQ; i++) assert_int_equal(got.status[i], DSPARK_ENONFINITE);
        free_result(&got);
        close_blocks(k);
        close_bench(&t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_answer),
        cmocka_unit_test(the_last_row_reaches_the_first),
        cmocka_unit_test(both_paths_rotate_alike),
        cmocka_unit_test(a_bad_cache_harms_its_own_sequence),
        cmocka_unit_test(a_norm_that_overflows_is_told),
        cmocka_unit_test(an_entry_that_overflows_is_told),
    };
    values_print_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
