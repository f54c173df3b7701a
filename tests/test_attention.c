/* Latent attention of a block alone: against fp64, bit for bit against the definition written down
 * a second time, and with the same bits whatever the level, threads, batch or paging. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/expf.h"
#include "base/threads.h"
#include "base/workspace.h"
#include "model/block.h"
#include "support/guard.h"
#include "support/values.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { FEW = 1 };
#else
enum { FEW = 0 };
#endif

enum { MAX_SEQ = 4, MAX_CONTEXT = 1000, N_BLOCK = 7, MAX_WIDTH = 576 };

/* Sequences with their inputs: what a batch is made of. */
typedef struct scene {
    dspark_model model;
    dspark_cache_dtype dtype;
    size_t width, latent, n_query; /* query rows of a sequence */
    uint32_t n;
    uint64_t n_context[MAX_SEQ];
    uint16_t *query[MAX_SEQ];      /* [H * N][width] */
    uint16_t *own[MAX_SEQ];        /* [N][width] */
    uint16_t *entries[MAX_SEQ];    /* [n_context][width], as written */
    float scale;                   /* of the cache's one layer */
} scene;

/* A cache of one layer that holds a scene; entries that no sequence owns are all ones, which is NaN
 * in every dtype. */
typedef struct paged {
    guard memory;
    void *layer;
    dspark__cache_map map;
    int64_t *slots[MAX_SEQ];
    int32_t *table[MAX_SEQ];
} paged;

static uint16_t *random_rows(size_t n)
{
    uint16_t *rows = malloc((n + 1) * 2);
    assert_non_null(rows);
    for (size_t i = 0; i < n; i++)
        rows[i] = dspark__f32_to_bf16((float)((double)(values_random() >> 11) * 0x1p-51 - 2));
    return rows;
}

static void open_scene(scene *s, dspark_cache_dtype dtype, int causal, uint32_t n,
                       const uint64_t *n_context)
{
    memset(s, 0, sizeof *s);
    dspark_config *c = &s->model.config;
    int ds_mla = dtype == DSPARK_CACHE_FP8_DS_MLA;
    c->n_layers = 1;
    c->n_heads = ds_mla ? 3 : 11; /* 77 rows: two groups */
    c->block_size = N_BLOCK;
    c->kv_lora_rank = ds_mla ? 512 : 70;
    c->qk_rope_head_dim = ds_mla ? 64 : 6;
    c->qk_nope_head_dim = c->v_head_dim = c->hidden_size = c->intermediate_size = c->q_lora_rank = 8;
    c->causal = causal;
    s->dtype = dtype;
    s->latent = c->kv_lora_rank;
    s->width = s->latent + c->qk_rope_head_dim;
    s->n_query = (size_t)c->n_heads * N_BLOCK;
    s->model.block.softmax_scale = ds_mla ? 0.04f : 0.13f;
    s->scale = 0.37f;
    s->n = n;
    for (uint32_t i = 0; i < n; i++) {
        s->n_context[i] = n_context[i];
        s->query[i] = random_rows(s->n_query * s->width);
        s->own[i] = random_rows(N_BLOCK * s->width);
        s->entries[i] = random_rows(n_context[i] * s->width);
    }
}

static void close_scene(scene *s)
{
    for (uint32_t i = 0; i < s->n; i++) {
        free(s->query[i]);
        free(s->own[i]);
        free(s->entries[i]);
    }
}

/* Blocks are dealt to the sequences in turn by a step that jumps all over the cache. */
static void open_paged(paged *p, scene *s, uint32_t block_size)
{
    dspark_error err;
    dspark_cache_view view;
    uint64_t n_blocks = 0, next = 0;
    memset(p, 0, sizeof *p);
    for (uint32_t i = 0; i < s->n; i++) n_blocks += s->n_context[i] / block_size + 2;
    n_blocks |= 1; /* odd, so that steps of 2 visit all */
    size_t bytes = (size_t)n_blocks * block_size *
                   dspark__cache_entry_bytes(s->dtype, (uint32_t)s->latent,
                                             (uint32_t)(s->width - s->latent));
    p->memory = guard_end(bytes);
    memset(p->memory.p, 0xff, bytes);
    p->layer = p->memory.p;
    dspark_cache_view_init(&view);
    view.n_layers = 1;
    view.layers = &p->layer;
    view.scales = &s->scale;
    view.n_blocks = n_blocks;
    view.block_size = block_size;
    view.dtype = s->dtype;
    assert_int_equal(dspark__cache_map_init(&p->map, &view, &s->model.config, &err), DSPARK_OK);
    dspark__kern kern = values_level(DSPARK_ISA_REF);
    for (uint32_t i = 0; i < s->n; i++) {
        uint64_t blocks = s->n_context[i] / block_size + 1;
        p->table[i] = malloc(blocks * sizeof *p->table[i]);
        p->slots[i] = malloc((s->n_context[i] + 1) * sizeof *p->slots[i]);
        assert_non_null(p->table[i]);
        assert_non_null(p->slots[i]);
        for (uint64_t b = 0; b < blocks; b++, next++) p->table[i][b] = (int32_t)(next * 2 % n_blocks);
        for (uint64_t e = 0; e < s->n_context[i]; e++) {
            int64_t slot = (int64_t)p->table[i][e / block_size] * block_size +
                           (int64_t)(e % block_size);
            p->slots[i][e] = slot;
            dspark__cache_write(&p->map, &kern, 0, slot, s->entries[i] + e * s->width);
        }
    }
}

static void close_paged(paged *p, const scene *s)
{
    for (uint32_t i = 0; i < s->n; i++) {
        free(p->table[i]);
        free(p->slots[i]);
    }
    guard_free(&p->memory);
}

/* Attention of sequences [from, from + n) in one batch; out[i] = LATENT of sequence from + i. */
static void attend(scene *s, paged *p, int isa, uint32_t threads, uint32_t from, uint32_t n,
                   int by_slots, uint16_t **out)
{
    dspark_error err;
    dspark__block_layout layout;
    dspark__workspace ws;
    void *views[DSPARK__BLOCK_VIEWS];
    dspark__threads *pool = NULL;
    dspark__block_row rows[MAX_SEQ];
    dspark_status status[MAX_SEQ] = {DSPARK_OK};
    dspark_draft_times times = {0};
    dspark__kern kern = values_level(isa);
    assert_int_equal(dspark__threads_create(&pool, threads, NULL, NULL, &err), DSPARK_OK);
    assert_true(dspark__block_plan(&layout, &s->model.config, n, threads));
    dspark__workspace_init(&ws, NULL);
    assert_int_equal(dspark__workspace_get(&ws, layout.sizes, DSPARK__BLOCK_VIEWS, views, &err),
                     DSPARK_OK);
    for (size_t v = 0; v < DSPARK__BLOCK_VIEWS; v++) memset(views[v], 0xff, layout.sizes[v]);
    size_t query = s->n_query * s->width, own = N_BLOCK * s->width, latent = s->n_query * s->latent;
    memset(rows, 0, sizeof rows);
    for (uint32_t i = 0; i < n; i++) {
        memcpy((uint16_t *)views[DSPARK__BLOCK_QUERY] + i * query, s->query[from + i], query * 2);
        memcpy((uint16_t *)views[DSPARK__BLOCK_ENTRIES] + i * own, s->own[from + i], own * 2);
        rows[i].context.slots = by_slots ? p->slots[from + i] : NULL;
        rows[i].context.block_table = p->table[from + i];
        rows[i].context.n = s->n_context[from + i];
    }
    dspark__block b = {&s->model, &kern, pool, &layout, &p->map, rows, n, views, &times, status};
    dspark__block_attention(&b, 0);
    for (uint32_t i = 0; i < n; i++)
        memcpy(out[i], (uint16_t *)views[DSPARK__BLOCK_LATENT] + i * latent, latent * 2);
    dspark__workspace_free(&ws);
    dspark__threads_free(pool);
}

/* ---- the definition, a second time ---- */

static float dot_on(float acc, const uint16_t *x, const uint16_t *y, size_t n)
{
    for (size_t i = 0; i < n; i += 2) { /* odd element first */
        if (i + 1 < n)
            acc = fmaf(dspark__bf16_to_f32(x[i + 1]), dspark__bf16_to_f32(y[i + 1]), acc);
        acc = fmaf(dspark__bf16_to_f32(x[i]), dspark__bf16_to_f32(y[i]), acc);
    }
    return acc;
}

/* Entry i of a sequence's list, as a reader of the cache sees it. */
static void list_entry(const scene *s, const paged *p, uint32_t seq, uint64_t i, uint16_t *to)
{
    if (i >= s->n_context[seq]) {
        memcpy(to, s->own[seq] + (i - s->n_context[seq]) * s->width, s->width * 2);
        return;
    }
    const unsigned char *at = p->memory.p + dspark__cache_offset(&p->map, p->slots[seq][i]);
    for (size_t j = 0; j < s->width; j++) {
        float scale = s->scale;
        switch (s->dtype) {
        case DSPARK_CACHE_BF16: memcpy(to + j, at + 2 * j, 2); break;
        case DSPARK_CACHE_FP8_E4M3:
            to[j] = dspark__f32_to_bf16(dspark__e4m3_to_f32(at[j]) * scale);
            break;
        case DSPARK_CACHE_FP8_E5M2:
            to[j] = dspark__f32_to_bf16(dspark__e5m2_to_f32(at[j]) * scale);
            break;
        case DSPARK_CACHE_FP8_DS_MLA:
            if (j >= 512) {
                memcpy(to + j, at + 528 + 2 * (j - 512), 2);
                break;
            }
            memcpy(&scale, at + 512 + j / 128 * 4, 4);
            to[j] = dspark__f32_to_bf16(dspark__e4m3_to_f32(at[j]) * scale);
            break;
        }
    }
}

static void define_row(const scene *s, const uint16_t *list, uint64_t n_list, const uint16_t *query,
                       uint16_t *out)
{
    float m = -INFINITY, l = 0, sums[MAX_WIDTH] = {0};
    uint16_t p16[240], column[240];
    for (uint64_t first = 0; first < n_list; first += 240) {
        uint64_t n = n_list - first < 240 ? n_list - first : 240;
        float score[240], lanes[16] = {0}, most = m;
        for (uint64_t j = 0; j < n; j++) {
            score[j] = dot_on(0, query, list + (first + j) * s->width, s->width) *
                       s->model.block.softmax_scale;
            if (score[j] > most) most = score[j];
        }
        float a = dspark__exp_f32(m - most);
        for (uint64_t j = 0; j < n; j++) {
            float p = dspark__exp_f32(score[j] - most);
            lanes[j % 16] += p;
            p16[j] = dspark__f32_to_bf16(p);
        }
        for (size_t half = 8; half; half /= 2)
            for (size_t t = 0; t < half; t++) lanes[t] += lanes[t + half];
        l = fmaf(l, a, lanes[0]);
        m = most;
        for (size_t o = 0; o < s->latent; o++) {
            for (uint64_t j = 0; j < n; j++) column[j] = list[(first + j) * s->width + o];
            sums[o] = dot_on(first ? sums[o] * a : 0, p16, column, n);
        }
    }
    for (size_t o = 0; o < s->latent; o++) out[o] = dspark__f32_to_bf16(sums[o] / l + 0.0f);
}

/* The largest distance of `got` from softmax in fp64 over the same bf16 inputs. */
static double distance(const scene *s, const uint16_t *list, uint64_t n_list, const uint16_t *query,
                       const uint16_t *got)
{
    double *score = malloc(n_list * sizeof *score), most = -INFINITY, sum = 0, worst = 0;
    assert_non_null(score);
    for (uint64_t j = 0; j < n_list; j++) {
        score[j] = 0;
        for (size_t i = 0; i < s->width; i++)
            score[j] += (double)dspark__bf16_to_f32(query[i]) *
                        (double)dspark__bf16_to_f32(list[j * s->width + i]);
        score[j] *= (double)s->model.block.softmax_scale;
        most = fmax(most, score[j]);
    }
    for (uint64_t j = 0; j < n_list; j++) sum += exp(score[j] - most);
    for (size_t o = 0; o < s->latent; o++) {
        double want = 0;
        for (uint64_t j = 0; j < n_list; j++)
            want += exp(score[j] - most) / sum * (double)dspark__bf16_to_f32(list[j * s->width + o]);
        worst = fmax(worst, fabs(want - (double)dspark__bf16_to_f32(got[o])));
    }
    free(score);
    return worst;
}

static void check_sequence(const scene *s, const paged *p, uint32_t seq, const uint16_t *got)
{
    uint64_t n = s->n_context[seq];
    uint16_t *list = malloc((n + N_BLOCK) * s->width * 2), want[MAX_WIDTH];
    assert_non_null(list);
    for (uint64_t i = 0; i < n + N_BLOCK; i++) list_entry(s, p, seq, i, list + i * s->width);
    for (size_t row = 0; row < s->n_query; row += n > 300 ? 5 : 1) {
        uint64_t sees = n + (s->model.config.causal ? row % N_BLOCK + 1 : N_BLOCK);
        const uint16_t *query = s->query[seq] + row * s->width;
        define_row(s, list, sees, query, want);
        if (memcmp(want, got + row * s->latent, s->latent * 2) != 0)
            fail_msg("context %llu, row %zu, cache %s: not what is defined", (unsigned long long)n, row,
                     dspark__cache_dtype_name(s->dtype));
        if (row % 10 == 0 && distance(s, list, sees, query, got + row * s->latent) > 0.012)
            fail_msg("context %llu, row %zu, cache %s: far from fp64", (unsigned long long)n, row,
                     dspark__cache_dtype_name(s->dtype));
    }
    free(list);
}

static uint16_t *new_latent(const scene *s)
{
    uint16_t *latent = malloc(s->n_query * s->latent * 2);
    assert_non_null(latent);
    return latent;
}

/* ---- tests ---- */

static void follows_the_definition(void **state)
{
    (void)state;
    static const uint64_t contexts[] = {0, 1, 17, 232, 233, 234, 239, 240, 241, MAX_CONTEXT};
    for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_DS_MLA; dtype++)
        for (size_t i = 0; i < sizeof contexts / sizeof *contexts; i++)
            for (int causal = 0; causal < 2; causal++) {
                if ((FEW || dtype != DSPARK_CACHE_BF16) && (i + (size_t)causal) % 3 != 0) continue;
                scene s;
                paged p;
                open_scene(&s, (dspark_cache_dtype)dtype, causal, 1, contexts + i);
                open_paged(&p, &s, 16);
                uint16_t *got = new_latent(&s);
                attend(&s, &p, (int)dspark__isa_best(), 2, 0, 1, 0, &got);
                check_sequence(&s, &p, 0, got);
                free(got);
                close_paged(&p, &s);
                close_scene(&s);
            }
}

/* B71, B81: every level, thread count, batch and paging, against each sequence alone by ref. */
static void one_answer(void **state)
{
    (void)state;
    static const uint64_t contexts[MAX_SEQ] = {3, 500, 1, 0};
    static const uint32_t threads[] = {1, 2, 7}, blocks[] = {1, 16, 64, 128};
    for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_DS_MLA; dtype++) {
        scene s;
        paged p;
        uint16_t *want[MAX_SEQ], *got[MAX_SEQ];
        open_scene(&s, (dspark_cache_dtype)dtype, dtype % 2, MAX_SEQ, contexts);
        open_paged(&p, &s, 16);
        for (uint32_t i = 0; i < MAX_SEQ; i++) {
            want[i] = new_latent(&s);
            got[i] = new_latent(&s);
            attend(&s, &p, DSPARK_ISA_REF, 1, i, 1, 0, want + i);
        }
        close_paged(&p, &s);
        for (size_t k = 0; k < 4; k++) {
            open_paged(&p, &s, blocks[k]);
            for (VALUES_LEVELS(isa)) {
                for (size_t t = 0; t < 3; t++) {
                    if ((FEW || isa == DSPARK_ISA_REF) && (k + t + (size_t)isa) % 4 != 0) continue;
                    for (uint32_t from = 0; from < 2; from++) {
                        uint32_t n = MAX_SEQ - from * 2;
                        attend(&s, &p, isa, threads[t], from, n, (k + t) % 2 == 0, got);
                        for (uint32_t i = 0; i < n; i++)
                            if (memcmp(want[from + i], got[i], s.n_query * s.latent * 2) != 0)
                                fail_msg("isa %d, %u threads, blocks of %u, cache %d, sequence %u of "
                                         "%u: other bits", isa, threads[t], blocks[k], dtype, i, n);
                    }
                }
            }
            close_paged(&p, &s);
        }
        for (uint32_t i = 0; i < MAX_SEQ; i++) {
            free(want[i]);
            free(got[i]);
        }
        close_scene(&s);
    }
}

/* B35: the last row's entry is seen by the first row, unless the block is causal. */
static void the_block_is_seen_as_the_mask_says(void **state)
{
    (void)state;
    for (int causal = 0; causal < 2; causal++) {
        const uint64_t n = 20;
        scene s;
        paged p;
        open_scene(&s, DSPARK_CACHE_BF16, causal, 1, &n);
        open_paged(&p, &s, 16);
        uint16_t *before = new_latent(&s), *after = new_latent(&s);
        attend(&s, &p, (int)dspark__isa_best(), 1, 0, 1, 0, &before);
        for (size_t j = 0; j < s.width; j++) s.own[0][6 * s.width + j] ^= 0x8000;
        attend(&s, &p, (int)dspark__isa_best(), 1, 0, 1, 0, &after);
        for (size_t row = 0; row < s.n_query; row++) {
            int same = memcmp(before + row * s.latent, after + row * s.latent, s.latent * 2) == 0;
            assert_int_equal(same, causal && row % N_BLOCK < 6);
        }
        free(before);
        free(after);
        close_paged(&p, &s);
        close_scene(&s);
    }
}

/* What is no number in an entry in use makes every row that sees it NaN, and no other sequence. */
static void numbers_that_are_none(void **state)
{
    (void)state;
    static const uint64_t contexts[] = {300, 300};
    static const uint16_t bad[] = {0x7fc0, 0xffff, 0x7f80, 0xff80};
    static const size_t columns[] = {0, 69, 70, 75}; /* latent, rope key */
    for (size_t v = 0; v < 4; v++)
        for (size_t c = 0; c < 4; c++) {
            scene s;
            paged p;
            open_scene(&s, DSPARK_CACHE_BF16, 0, 2, contexts);
            s.entries[1][(250 * s.width) + columns[c]] = bad[v];
            open_paged(&p, &s, 16);
            uint16_t *got[2] = {new_latent(&s), new_latent(&s)}, *alone = new_latent(&s);
            attend(&s, &p, (int)dspark__isa_best(), 2, 0, 2, 0, got);
            attend(&s, &p, (int)dspark__isa_best(), 1, 0, 1, 0, &alone);
            assert_memory_equal(got[0], alone, s.n_query * s.latent * 2);
            dspark__kern kern = values_level(DSPARK_ISA_REF);
            if (kern.finite_bf16(got[1], s.n_query * s.latent))
                fail_msg("%04x in column %zu cannot be seen", bad[v], columns[c]);
            free(got[0]);
            free(got[1]);
            free(alone);
            close_paged(&p, &s);
            close_scene(&s);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(follows_the_definition),
        cmocka_unit_test(one_answer),
        cmocka_unit_test(the_block_is_seen_as_the_mask_says),
        cmocka_unit_test(numbers_that_are_none),
    };
    values_print_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
