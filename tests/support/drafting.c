/* The fixture of the drafting and session tests. */
#include "support/drafting.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "support/fixture.h"
#include "support/tmpdir.h"

#define PATTERN 0x5a

static dspark_error err;

static uint16_t random_bf16(uint64_t *s, float most)
{
    float f = (float)((double)(next_random(s) >> 11) * 0x1p-52 - 1) * most;
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)(u >> 16);
}

static uint16_t *random_rows(size_t n, uint64_t *seed, float most)
{
    uint16_t *rows = malloc(n * sizeof *rows);
    assert_non_null(rows);
    for (size_t i = 0; i < n; i++) rows[i] = random_bf16(seed, most);
    return rows;
}

void drafting_open(drafting *d, const char *const *settings, size_t n_settings)
{
    dspark_synth_opts so;
    dspark_model_opts mo;
    dspark_host_matrix lm_head = {0};
    uint64_t seed = DRAFTING_SEED;
    memset(d, 0, sizeof *d);
    snprintf(d->dir, sizeof d->dir, "%s/ckpt", tmpdir_make());
    dspark_synth_opts_init(&so);
    so.preset = "tiny";
    so.seed = DRAFTING_SEED;
    so.settings = settings;
    so.n_settings = n_settings;
    check(dspark_synth_checkpoint(d->dir, &so, &err), DSPARK_OK, &err);
    /* The sizes are known from the context part, which needs no LM head. */
    dspark_model_opts_init(&mo);
    mo.n_threads = 1;
    check(dspark_model_open(&d->model, d->dir, &mo, &err), DSPARK_OK, &err);
    d->vocab = dspark_model_config(d->model)->vocab_size;
    d->h = dspark_model_config(d->model)->hidden_size;
    dspark_model_close(d->model);
    d->lm_head = random_rows(d->vocab * d->h, &seed, 0.5f);
    lm_head = (dspark_host_matrix){d->lm_head, d->vocab, d->h, 0};
    mo.parts = DSPARK_PART_BLOCK;
    mo.lm_head = &lm_head;
    check(dspark_model_open(&d->model, d->dir, &mo, &err), DSPARK_OK, &err);
    d->config = dspark_model_config(d->model);
    d->n = d->config->block_size;
    d->taps_width = (size_t)d->config->n_taps * d->config->tap_width;
    d->taps = random_rows(DRAFTING_ROWS * d->taps_width, &seed, 2);
    print_message("  seed %u\n", DRAFTING_SEED);
}

void drafting_close(drafting *d)
{
    free(d->lm_head);
    free(d->taps);
    dspark_model_close(d->model);
    tmpdir_remove(d->dir);
}

int drafting_setup(void **state)
{
    drafting *d = malloc(sizeof *d);
    assert_non_null(d);
    drafting_open(d, NULL, 0);
    *state = d;
    return 0;
}

int drafting_teardown(void **state)
{
    drafting_close(*state);
    free(*state);
    return 0;
}

dspark_drafter *drafting_drafter(const drafting *d, dspark_isa isa, uint32_t threads,
                                 uint32_t max_sequences)
{
    dspark_drafter_opts o;
    dspark_drafter *drafter = NULL;
    dspark_drafter_opts_init(&o);
    o.isa = isa;
    o.n_threads = threads;
    o.max_sequences = max_sequences;
    o.max_tokens = DRAFTING_MAX_TOKENS;
    check(dspark_drafter_create(&drafter, d->model, &o, &err), DSPARK_OK, &err);
    return drafter;
}

const uint16_t *drafting_row(const drafting *d, size_t row)
{
    assert_true(row < DRAFTING_ROWS);
    return d->taps + row * d->taps_width;
}

/* ---- answers ---- */

void answer_open(answer *a, const drafting *d)
{
    const size_t n = d->n;
    memset(a, 0, sizeof *a);
    a->vocab = d->vocab;
    a->h = d->h;
    a->n = n;
    a->bytes = n * (4 + 4 + 4 + d->vocab * (4 + 2 + 2) + d->h * 2);
    unsigned char *at = a->memory = malloc(a->bytes);
    assert_non_null(at);
    memset(at, PATTERN, a->bytes);
    dspark_draft_output_init(&a->out);
    a->out.tokens = (int32_t *)(void *)at;
    a->out.confidence = (float *)(void *)(at + n * 4);
    a->out.confidence_logits = (float *)(void *)(at + n * 8);
    a->out.probs = (float *)(void *)(at + n * 12);
    a->out.logits = (uint16_t *)(void *)(at + n * (12 + d->vocab * 4));
    a->out.base_logits = a->out.logits + n * d->vocab;
    a->out.hidden = a->out.base_logits + n * d->vocab;
}

void answer_close(answer *a)
{
    free(a->memory);
    memset(a, 0, sizeof *a);
}

answer *answer_new(const drafting *d)
{
    answer *a = malloc(sizeof *a);
    assert_non_null(a);
    answer_open(a, d);
    return a;
}

void answer_free(answer *a)
{
    answer_close(a);
    free(a);
}

int answer_untouched(const answer *a)
{
    const unsigned char *at = a->memory;
    for (size_t i = 0; i < a->bytes; i++)
        if (at[i] != PATTERN) return 0;
    return 1;
}

static void same(const void *want, const void *got, size_t bytes, const char *what, const char *part)
{
    if (memcmp(want, got, bytes) != 0) fail_msg("%s: other %s", what, part);
}

void answer_equal(const answer *want, const answer *got, size_t k, const char *what)
{
    const dspark_draft_output *w = &want->out, *g = &got->out;
    if (w->status != g->status)
        fail_msg("%s: %s, expected %s", what, dspark_status_name(g->status), dspark_status_name(w->status));
    if (w->n_tokens < k || g->n_tokens < k)
        fail_msg("%s: %u and %u tokens, at least %zu expected", what, w->n_tokens, g->n_tokens, k);
    same(w->hidden, g->hidden, want->n * want->h * 2, what, "hidden states");
    same(w->tokens, g->tokens, k * 4, what, "tokens");
    same(w->confidence, g->confidence, k * 4, what, "confidence");
    same(w->confidence_logits, g->confidence_logits, k * 4, what, "confidence logits");
    same(w->probs, g->probs, k * want->vocab * 4, what, "probs");
    same(w->logits, g->logits, k * want->vocab * 2, what, "logits");
    same(w->base_logits, g->base_logits, k * want->vocab * 2, what, "base logits");
}

void answer_same(const answer *want, const answer *got)
{
    assert_int_equal(want->out.status, got->out.status);
    assert_int_equal(want->out.n_tokens, got->out.n_tokens);
    assert_int_equal(want->out.beyond_original, got->out.beyond_original);
    if (want->out.status == DSPARK_OK) answer_equal(want, got, want->out.n_tokens, "a draft");
}

/* ---- sessions ---- */

dspark_pool *drafting_pool(const drafting *d, dspark_cache_dtype dtype, uint32_t block_size,
                           uint32_t max_sessions, uint64_t n_blocks)
{
    dspark_pool_opts o;
    dspark_pool *pool = NULL;
    dspark_pool_opts_init(&o);
    o.dtype = dtype;
    o.block_size = block_size;
    o.max_sessions = max_sessions;
    o.n_blocks = n_blocks;
    check(dspark_pool_create(&pool, d->model, &o, &err), DSPARK_OK, &err);
    return pool;
}

void drafting_append(const drafting *d, dspark_session *s, dspark_drafter *drafter, size_t row, size_t n)
{
    assert_true(row + n <= DRAFTING_ROWS);
    check(dspark_session_append(s, drafter, dspark_session_length(s), d->taps + row * d->taps_width,
                                d->taps_width, 0, n, &err),
          DSPARK_OK, &err);
}

dspark_session *drafting_session(const drafting *d, dspark_pool *pool, dspark_drafter *drafter,
                                 size_t first, size_t n)
{
    dspark_session *s = drafting_empty(pool);
    drafting_append(d, s, drafter, first, n);
    return s;
}

dspark_session *drafting_empty(dspark_pool *pool)
{
    dspark_session *s = NULL;
    check(dspark_session_open(&s, pool, &err), DSPARK_OK, &err);
    return s;
}

dspark_draft_input drafting_input(int64_t anchor)
{
    dspark_draft_input in;
    dspark_draft_input_init(&in);
    in.anchor = anchor;
    return in;
}

void drafting_draft(dspark_session *s, dspark_drafter *drafter, int64_t anchor, answer *a)
{
    dspark_draft_input in = drafting_input(anchor);
    check(dspark_session_draft(s, drafter, &in, &a->out, &err), DSPARK_OK, &err);
}

answer *drafting_answer(const drafting *d, dspark_session *s, dspark_drafter *drafter, int64_t anchor)
{
    answer *a = answer_new(d);
    drafting_draft(s, drafter, anchor, a);
    assert_int_equal(a->out.status, DSPARK_OK);
    return a;
}

answer *drafting_raw(const drafting *d, dspark_drafter *drafter, dspark_cache_dtype dtype, size_t n,
                     int64_t anchor)
{
    dspark_cache *cache = NULL;
    int64_t *numbers = calloc(n + 1, sizeof *numbers);
    dspark_batch b;
    answer *a = answer_new(d);
    dspark_draft_input in = drafting_input(anchor);
    assert_non_null(numbers);
    for (size_t i = 0; i < n; i++) numbers[i] = (int64_t)i;
    check(dspark_cache_create(&cache, d->model, dtype, 16, n / 16 + 1, NULL, &err), DSPARK_OK, &err);
    dspark_batch_init(&b);
    b.n_tokens = n;
    b.taps = d->taps;
    b.positions = b.slots = numbers;
    check(dspark_context_run(dspark_drafter_context(drafter), &b, dspark_cache_get_view(cache), NULL, &err),
          DSPARK_OK, &err);
    in.position = (int64_t)n;
    in.n_context = n;
    in.slots = numbers;
    check(dspark_draft(drafter, dspark_cache_get_view(cache), &in, &a->out, 1, &err), DSPARK_OK, &err);
    assert_int_equal(a->out.status, DSPARK_OK);
    free(numbers);
    dspark_cache_free(cache);
    return a;
}

void drafting_expect_fresh(const drafting *d, dspark_session *s, dspark_drafter *drafter, size_t n)
{
    answer *got = drafting_answer(d, s, drafter, 5);
    answer *want = drafting_raw(d, drafter, DSPARK_CACHE_BF16, n, 5);
    assert_int_equal(dspark_session_length(s), n);
    answer_same(want, got);
    answer_free(got);
    answer_free(want);
}

uint64_t drafting_free_blocks(dspark_pool *pool)
{
    return dspark_pool_get_info(pool).free_blocks;
}
