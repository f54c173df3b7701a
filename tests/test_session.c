/* Sessions: timelines over a pool of shared blocks against a host's own cache, with ==; the rules of
 * append, accept, rewind and fork; what a full pool does. Snapshots: test_session_snapshot.c. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include <pthread.h>

#include "model/session.h"
#include "support/drafting.h"
#include "support/fixture.h"
#include "support/oom.h"
#include "support/tmpdir.h"

static dspark_error err;
#define must(call) check((call), DSPARK_OK, &err)
#define refused(call, status) check((call), (status), &err)

/* ---- what a test stands on, between open_rig and close_rig ---- */

static drafting base;
static dspark_drafter *drafter;
static dspark_pool *pool;

static void open_rig_of(const char *const *settings, size_t n_settings, uint32_t n_threads,
                        uint32_t max_sequences, uint32_t block_size, uint64_t n_blocks,
                        uint32_t max_sessions)
{
    drafting_open(&base, settings, n_settings);
    drafter = drafting_drafter(&base, DSPARK_ISA_AUTO, n_threads, max_sequences);
    pool = drafting_pool(&base, DSPARK_CACHE_BF16, block_size, max_sessions, n_blocks);
}

static void open_rig(uint32_t block_size, uint64_t n_blocks, uint32_t max_sessions)
{
    open_rig_of(NULL, 0, 1, 1, block_size, n_blocks, max_sessions);
}

/* Closes the pool's sessions too. */
static void close_rig(void)
{
    dspark_pool_free(pool);
    dspark_drafter_free(drafter);
    drafting_close(&base);
}

static dspark_session *open_session(void)
{
    return drafting_empty(pool);
}

/* Rows first .. first+n-1 of the taps, behind those that are there. */
static void append(dspark_session *s, uint64_t first, size_t n)
{
    drafting_append(&base, s, drafter, (size_t)first, n);
}

static void expect_fresh(dspark_session *s, size_t n)
{
    drafting_expect_fresh(&base, s, drafter, n);
}

static uint64_t free_blocks(void)
{
    return drafting_free_blocks(pool);
}

/* ---- equal to the host's own cache ---- */

static void test_paging(void **state)
{
    static const uint32_t sizes[] = {1, 16, 64, 128};
    static const size_t steps[] = {1, 2, 61, 64, 100};
    drafting t;
    (void)state;
    drafting_open(&t, NULL, 0);
    dspark_drafter *d = drafting_drafter(&t, DSPARK_ISA_AUTO, 2, 1);
    for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_E5M2; dtype++) {
        answer *want = drafting_raw(&t, d, (dspark_cache_dtype)dtype, 228, 7);
        for (size_t i = 0; i < 4; i++) {
            dspark_pool *p = drafting_pool(&t, (dspark_cache_dtype)dtype, sizes[i], 3, 600);
            dspark_session *other = drafting_empty(p), *s = drafting_empty(p);
            uint64_t at = 0;
            for (size_t k = 0; k < 5; k++) { /* blocks of the two alternate */
                drafting_append(&t, s, d, at, steps[k]);
                drafting_append(&t, other, d, k * 3, 3);
                at += steps[k];
            }
            answer *got = drafting_answer(&t, s, d, 7);
            answer_same(got, want);
            answer_free(got);
            dspark_pool_free(p); /* closes its sessions */
        }
        answer_free(want);
    }
    dspark_drafter_free(d);
    drafting_close(&t);
}

/* B119, B120: longer than any chunk, at an odd stride; a tap is not as wide as the hidden states. */
static void test_long_append(void **state)
{
    static const char *const settings[] = {"target_hidden_size=48"};
    (void)state;
    open_rig_of(settings, 1, 1, 1, 16, 40, 1);
    assert_int_not_equal(base.config->tap_width, base.config->hidden_size);
    dspark_session *s = open_session();
    const size_t n = 257, stride = base.taps_width * 2 + 6;
    unsigned char *rows = malloc(n * stride);
    assert_non_null(rows);
    memset(rows, 0xff, n * stride); /* NaN between the rows */
    for (size_t i = 0; i < n; i++)
        memcpy(rows + i * stride, base.taps + i * base.taps_width, base.taps_width * 2);
    must(dspark_session_append(s, drafter, 0, rows, base.taps_width, stride, n, &err));
    free(rows);
    expect_fresh(s, n);
    dspark_session_close(s);
    s = open_session();
    append(s, 0, 65); /* the workspace has 64 rows */
    expect_fresh(s, 65);
    close_rig();
}

/* B117: what a session could hold says nothing about what a step needs. */
static void test_capacity_is_not_workspace(void **state)
{
    static const char *const settings[] = {"max_position_embeddings=1048576"};
    const uint64_t limit = 64u << 20;
    drafting t;
    dspark_drafter_opts o;
    dspark_drafter *d = NULL;
    dspark_pool_opts po;
    dspark_pool *p = NULL;
    (void)state;
    drafting_open(&t, settings, 1);
    dspark_drafter_opts_init(&o);
    o.n_threads = 1;
    o.max_tokens = 1u << 20;
    o.workspace_limit = limit;
    must(dspark_drafter_create(&d, t.model, &o, &err));
    assert_true(dspark_drafter_get_plan(d).workspace_bytes <= limit);
    assert_true(dspark_drafter_get_plan(d).max_tokens < 1u << 20);
    dspark_pool_opts_init(&po);
    po.n_blocks = 8;
    po.max_length = 1048576;
    must(dspark_pool_create(&p, t.model, &po, &err));
    dspark_session *s = drafting_empty(p);
    drafting_append(&t, s, d, 0, 300);
    drafting_expect_fresh(&t, s, d, 300);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafting_close(&t);
}

/* ---- several sessions ---- */

/* More than go together in one call or one pass; one of them twice. */
static void test_together(void **state)
{
    enum { N = 35 };
    dspark_session *s[N + 1];
    dspark_draft_input in[N + 1];
    dspark_draft_output out[N + 1];
    answer *r[N + 1], *solo;
    (void)state;
    open_rig_of(NULL, 0, 2, 8, 4, 400, N);
    for (size_t i = 0; i < N; i++) {
        s[i] = open_session();
        append(s[i], 0, i % 5 * 7);
        in[i] = drafting_input((int64_t)i);
    }
    s[N] = s[3];
    in[N] = drafting_input(50);
    for (size_t i = 0; i <= N; i++) r[i] = answer_new(&base), out[i] = r[i]->out;
    /* All are checked before any is answer. */
    in[N].anchor = -1;
    refused(dspark_sessions_draft(s, drafter, in, out, N + 1, &err), DSPARK_ERANGE);
    for (size_t i = 0; i <= N; i++) {
        assert_true(answer_untouched(r[i]));
        assert_int_equal(out[i].n_tokens, 0);
        assert_int_not_equal(out[i].status, DSPARK_OK);
        refused(dspark_session_accept(s[i], 0, &err), DSPARK_EINVAL);
    }
    in[N].anchor = 50;
    must(dspark_sessions_draft(s, drafter, in, out, N + 1, &err));
    for (size_t i = 0; i <= N; i++) {
        r[i]->out = out[i];
        solo = drafting_answer(&base, s[i], drafter, in[i].anchor);
        answer_same(r[i], solo);
        answer_free(solo);
        answer_free(r[i]);
    }
    close_rig();
}

static void test_fork(void **state)
{
    dspark_session *b = NULL;
    (void)state;
    open_rig(16, 10, 2);
    dspark_session *a = open_session();
    append(a, 0, 40);
    must(dspark_session_fork(&b, a, &err));
    assert_int_equal(free_blocks(), 7); /* nothing copied yet */
    /* The fork goes on with other rows, in the block that was shared. */
    must(dspark_session_append(b, drafter, 40, base.taps, base.taps_width, 0, 20, &err));
    assert_int_equal(free_blocks(), 5);
    expect_fresh(a, 40);
    append(a, 40, 30);
    expect_fresh(a, 70);
    must(dspark_session_rewind(b, 40, &err));
    expect_fresh(b, 40);
    append(b, 40, 3);
    dspark_session_close(a);
    expect_fresh(b, 43); /* blocks that it shared outlive the other */
    dspark_session_close(b);
    assert_int_equal(free_blocks(), 10);
    close_rig();
}

static void test_rewind(void **state)
{
    (void)state;
    open_rig(16, 8, 1);
    dspark_session *s = open_session();
    append(s, 0, 20);
    for (uint64_t keep = 0; keep <= 20; keep += 4) {
        /* Wrong rows from `keep` on, then the right ones. */
        must(dspark_session_rewind(s, keep, &err));
        must(dspark_session_append(s, drafter, keep, base.taps + 300 * base.taps_width,
                                   base.taps_width, 0, 60, &err));
        must(dspark_session_rewind(s, keep, &err));
        expect_fresh(s, keep);
        append(s, keep, 33 - keep);
        expect_fresh(s, 33);
        assert_int_equal(free_blocks(), 5);
        must(dspark_session_rewind(s, 20, &err));
    }
    refused(dspark_session_rewind(s, 21, &err), DSPARK_ERANGE);
    assert_int_equal(dspark_session_length(s), 20);
    close_rig();
}

/* B75: a session in the blocks of one that is gone; what is behind its length may be anything. */
static void test_reused_blocks(void **state)
{
    (void)state;
    open_rig(16, 4, 1);
    dspark_session *s = open_session();
    append(s, 0, 40);
    dspark_session_close(s);
    for (uint32_t l = 0; l < pool->view.n_layers; l++)
        memset(pool->layers[l], 0xff, pool->entry_bytes * 16 * 4); /* NaN */
    s = open_session();
    assert_int_equal(dspark_session_length(s), 0);
    expect_fresh(s, 0);
    append(s, 0, 3);
    expect_fresh(s, 3);
    close_rig();
}

/* ---- rules ---- */

static void test_append_rules(void **state)
{
    drafting other;
    (void)state;
    open_rig(16, 4, 2);
    drafting_open(&other, NULL, 0);
    dspark_drafter *foreign = drafting_drafter(&other, DSPARK_ISA_AUTO, 1, 1);
    dspark_session *s = open_session();
    const size_t w = base.taps_width;
    append(s, 0, 10);
    /* B80: the same again, a gap. */
    refused(dspark_session_append(s, drafter, 0, base.taps, w, 0, 10, &err), DSPARK_ERANGE);
    refused(dspark_session_append(s, drafter, 0, base.taps + w, w, 0, 10, &err), DSPARK_ERANGE);
    refused(dspark_session_append(s, drafter, 9, base.taps, w, 0, 1, &err), DSPARK_ERANGE);
    refused(dspark_session_append(s, drafter, 11, base.taps, w, 0, 1, &err), DSPARK_ERANGE);
    refused(dspark_session_append(s, drafter, UINT64_MAX, base.taps, w, 0, 1, &err), DSPARK_ERANGE);
    /* B67: taps of another width, rows that overlap, no rows at all. */
    refused(dspark_session_append(s, drafter, 10, base.taps, w - 64, 0, 1, &err), DSPARK_EINVAL);
    refused(dspark_session_append(s, drafter, 10, base.taps, w + 1, 0, 1, &err), DSPARK_EINVAL);
    refused(dspark_session_append(s, drafter, 10, base.taps, w, w * 2 - 2, 2, &err), DSPARK_EINVAL);
    refused(dspark_session_append(s, drafter, 10, NULL, w, 0, 1, &err), DSPARK_EINVAL);
    refused(dspark_session_append(s, foreign, 10, base.taps, w, 0, 1, &err), DSPARK_EINVAL);
    refused(dspark_session_append(NULL, drafter, 10, base.taps, w, 0, 1, &err), DSPARK_EINVAL);
    refused(dspark_session_append(s, drafter, 10, base.taps, w, 0, SIZE_MAX / 2, &err), DSPARK_ENOSPACE);
    must(dspark_session_append(s, drafter, 10, NULL, w, 0, 0, &err));
    expect_fresh(s, 10);
    /* A NaN far behind: nothing of its chunk counts, no block is kept. */
    uint16_t *rows = malloc(30 * w * 2);
    assert_non_null(rows);
    memcpy(rows, base.taps + 10 * w, 30 * w * 2);
    rows[29 * w + 3] = 0x7fc1;
    refused(dspark_session_append(s, drafter, 10, rows, w, 0, 30, &err), DSPARK_ENONFINITE);
    free(rows);
    assert_int_equal(free_blocks(), 3);
    expect_fresh(s, 10);
    answer *r = answer_new(&base);
    dspark_draft_input in = drafting_input(1);
    refused(dspark_session_draft(s, foreign, &in, &r->out, &err), DSPARK_EINVAL);
    assert_true(answer_untouched(r));
    answer_free(r);
    dspark_drafter_free(foreign);
    drafting_close(&other);
    close_rig();
}

/* Sampled drafts are draws from the laws that are handed out, by the documented keys: the block's number
 * is put in by the library, so a session needs one sequence number for all its blocks. */
static void test_noise_of_blocks(void **state)
{
    dspark_sampling law;
    (void)state;
    open_rig(16, 8, 1);
    dspark_session *s = open_session();
    dspark_sampling_init(&law);
    law.temperature = 1;
    for (uint64_t at = 10; at < 13; at++) {
        dspark_draft_input in = drafting_input(5);
        answer *r = answer_new(&base);
        append(s, at == 10 ? 0 : at - 1, at == 10 ? 10 : 1);
        in.sampling = &law;
        in.seed = 77;
        in.sequence = 9;
        must(dspark_session_draft(s, drafter, &in, &r->out, &err));
        assert_int_equal(r->out.n_tokens, base.config->block_size);
        for (uint32_t i = 0; i < r->out.n_tokens; i++) {
            const dspark_noise_key key = {77, 9, at + 1 + i, DSPARK_NOISE_DRAFT, at + 1};
            int32_t token;
            must(dspark_sample(r->out.probs + i * base.vocab, base.vocab, &key, &token, &err));
            assert_int_equal(r->out.tokens[i], token);
        }
        answer_free(r);
    }
    close_rig();
}

/* A call may be cut in pieces inside; the row that an error names is the call's. */
static void test_append_names_rows(void **state)
{
    (void)state;
    open_rig(64, 16, 1);
    dspark_session *s = open_session();
    base.taps[577 * base.taps_width + 3] = 0x7fc1;
    refused(dspark_session_append(s, drafter, 0, base.taps, base.taps_width, 0, 600, &err),
                                  DSPARK_ENONFINITE);
    if (!strstr(err.message, "row 577,")) fail_msg("%s", err.message);
    expect_fresh(s, (size_t)dspark_session_length(s));
    /* the context that the drafter lends names its own caller's rows again */
    int64_t position = 0, slot = 0;
    dspark_batch b;
    dspark_cache *cache;
    dspark_batch_init(&b);
    b.n_tokens = 1;
    b.taps = base.taps + 577 * base.taps_width;
    b.positions = &position;
    b.slots = &slot;
    must(dspark_cache_create(&cache, base.model, DSPARK_CACHE_BF16, 16, 1, NULL, &err));
    refused(dspark_context_run(dspark_drafter_context(drafter), &b, dspark_cache_get_view(cache),
        NULL, &err),
            DSPARK_ENONFINITE);
    if (!strstr(err.message, "row 0,")) fail_msg("%s", err.message);
    dspark_cache_free(cache);
    close_rig();
}

/* A full pool: the append that does not fit leaves all as it was, also where a shared block would have
 * had to be copied. */
static void test_full_pool(void **state)
{
    dspark_session *b = NULL;
    (void)state;
    open_rig(16, 4, 2);
    dspark_session *a = open_session();
    const size_t w = base.taps_width;
    append(a, 0, 40); /* 3 of 4 */
    must(dspark_session_fork(&b, a, &err));
    refused(dspark_session_append(b, drafter, 40, base.taps + 40 * w, w, 0, 9, &err),
                                  DSPARK_ENOSPACE); /* 1 + copy */
    assert_int_equal(free_blocks(), 1);
    expect_fresh(b, 40);
    append(b, 40, 8); /* the copy alone */
    assert_int_equal(free_blocks(), 0);
    refused(dspark_session_append(b, drafter, 48, base.taps + 48 * w, w, 0, 1, &err), DSPARK_ENOSPACE);
    expect_fresh(b, 48);
    expect_fresh(a, 40);
    dspark_session_close(a);
    assert_int_equal(free_blocks(), 1);
    append(b, 48, 16);
    expect_fresh(b, 64);
    refused(dspark_session_append(b, drafter, 64, base.taps + 64 * w, w, 0, 1, &err), DSPARK_ENOSPACE);
    close_rig();
}

/* B72, B73: no session too many, none that is closed, and the others are as they were. */
static void test_session_count(void **state)
{
    dspark_session *s[3], *more = (void *)&base;
    (void)state;
    open_rig(16, 8, 3);
    for (size_t i = 0; i < 3; i++) append(s[i] = open_session(), 0, i + 2);
    refused(dspark_session_open(&more, pool, &err), DSPARK_ENOSPACE);
    assert_null(more);
    refused(dspark_session_fork(&more, s[0], &err), DSPARK_ENOSPACE);
    assert_null(more);
    assert_int_equal(dspark_pool_get_info(pool).open_sessions, 3);
    dspark_session_close(s[1]);
    dspark_session_close(s[1]);
    dspark_session_close(NULL);
    answer *r = answer_new(&base);
    dspark_draft_input in = drafting_input(1);
    refused(dspark_session_draft(s[1], drafter, &in, &r->out, &err), DSPARK_EINVAL);
    assert_true(answer_untouched(r));
    answer_free(r);
    refused(dspark_session_append(s[1], drafter, 0, base.taps, base.taps_width, 0, 1, &err),
                                  DSPARK_EINVAL);
    refused(dspark_session_rewind(s[1], 0, &err), DSPARK_EINVAL);
    refused(dspark_session_accept(s[1], 0, &err), DSPARK_EINVAL);
    refused(dspark_session_save(s[1], tmpdir_path(base.dir, "closed.st"), &err), DSPARK_EINVAL);
    expect_fresh(s[0], 2);
    expect_fresh(s[2], 4);
    assert_int_equal(free_blocks(), 6);
    close_rig();
}

static void test_accept(void **state)
{
    dspark_acceptance a;
    (void)state;
    open_rig(4, 40, 1);
    dspark_session *s = open_session();
    uint64_t length = 6, accepted[8] = {0};
    append(s, 0, 6);
    refused(dspark_session_accept(s, 0, &err), DSPARK_EINVAL); /* nothing answer */
    for (uint32_t n = 0; n <= 7; n++) {
        answer_free(drafting_answer(&base, s, drafter, 9));
        refused(dspark_session_accept(s, 8, &err), DSPARK_EINVAL);
        refused(dspark_session_accept(s, n, &err), DSPARK_EINVAL); /* rows are missing */
        append(s, length, 8);
        must(dspark_session_accept(s, n, &err));
        refused(dspark_session_accept(s, n, &err), DSPARK_EINVAL); /* twice */
        length += 1 + n;
        expect_fresh(s, (size_t)length);
        must(dspark_session_rewind(s, length, &err)); /* forgets expect_fresh's draft */
        refused(dspark_session_accept(s, 0, &err), DSPARK_EINVAL);
        for (uint32_t k = 0; k < n; k++) accepted[k]++;
    }
    dspark_session_acceptance(s, &a);
    assert_int_equal(a.n_blocks, 8);
    for (size_t k = 0; k < 7; k++) {
        assert_int_equal(a.drafted[k], 8);
        assert_int_equal(a.accepted[k], accepted[k]);
    }
    assert_int_equal(a.drafted[7], 0);
    assert_true(dspark_acceptance_length(&a, 1) == 4.5);
    close_rig();
}

/* B76: pages of one entry, filled to the limit, answer from, rolled back. */
static void test_no_leak(void **state)
{
    const int rounds = SAMPLE ? 300 : 10000;
    dspark_session *b = NULL;
    (void)state;
    open_rig(1, 12, 2);
    dspark_session *s = open_session();
    append(s, 0, 4);
    for (int i = 0; i < rounds; i++) {
        append(s, 4, 8);
        assert_int_equal(free_blocks(), 0);
        if (i % 50 == 0) {
            answer_free(drafting_answer(&base, s, drafter, 3));
            must(dspark_session_fork(&b, s, &err));
            refused(dspark_session_append(b, drafter, 12, base.taps, base.taps_width, 0, 1, &err),
                                          DSPARK_ENOSPACE);
            dspark_session_close(b);
        }
        must(dspark_session_rewind(s, 4, &err));
        assert_int_equal(free_blocks(), 8);
    }
    expect_fresh(s, 4);
    dspark_session_close(s);
    assert_int_equal(free_blocks(), 12);
    close_rig();
}

/* The model's last positions: fewer tokens, then none and a reason, never ids (B64, B65). */
static void test_end_of_model(void **state)
{
    static const char *const settings[] = {"max_position_embeddings=64", "rope_parameters=null"};
    (void)state;
    open_rig_of(settings, 2, 1, 1, 16, 0, 1);
    dspark_session *s = open_session();
    assert_int_equal(dspark_pool_get_info(pool).max_length, 64);
    append(s, 0, 58);
    for (uint32_t left = 5; left <= 5; left--) {
        answer *r = answer_new(&base);
        dspark_draft_input in = drafting_input(1);
        must(dspark_session_draft(s, drafter, &in, &r->out, &err));
        assert_int_equal(r->out.n_tokens, left);
        assert_int_equal(r->out.status, left ? DSPARK_OK : DSPARK_ERANGE);
        assert_int_equal(r->out.tokens[left], 0x5a5a5a5a);
        answer_free(r);
        append(s, 63 - left, 1);
    }
    /* Full: no position for an anchor. */
    answer *r = answer_new(&base);
    dspark_draft_input in = drafting_input(1);
    refused(dspark_session_draft(s, drafter, &in, &r->out, &err), DSPARK_ERANGE);
    assert_true(answer_untouched(r));
    answer_free(r);
    refused(dspark_session_append(s, drafter, 64, base.taps, base.taps_width, 0, 1, &err),
                                  DSPARK_ENOSPACE);
    close_rig();
}

/* ---- memory ---- */

typedef struct counted {
    uint64_t now, n_calls;
} counted;

static void *counted_alloc(void *user, size_t bytes, size_t align)
{
    counted *c = user;
    void *p = NULL;
    if (posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, bytes ? bytes : 1)) return NULL;
    c->now += bytes;
    c->n_calls++;
    return p;
}

static void counted_free(void *user, void *p, size_t bytes)
{
    counted *c = user;
    if (p) c->now -= bytes;
    free(p);
}

/* B122, B123: the plan is what is taken, to the byte, and positions have no padding. */
static void test_plan(void **state)
{
    static const uint32_t sizes[] = {1, 7, 64};
    drafting t;
    counted c = {0, 0};
    dspark_allocator a = {&c, counted_alloc, counted_free};
    (void)state;
    drafting_open(&t, NULL, 0);
    for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_E5M2; dtype++)
        for (size_t i = 0; i < 3; i++) {
            dspark_pool_opts o;
            dspark_pool_info plan, info;
            dspark_pool *p = NULL;
            dspark_pool_opts_init(&o);
            o.allocator = &a;
            o.dtype = (dspark_cache_dtype)dtype;
            o.block_size = sizes[i];
            o.max_sessions = 3;
            o.max_length = 200;
            must(dspark_plan_pool(t.config, &o, &plan, &err));
            must(dspark_pool_create(&p, t.model, &o, &err));
            info = dspark_pool_get_info(p);
            assert_int_equal(info.bytes, plan.bytes);
            assert_int_equal(info.n_blocks, plan.n_blocks);
            assert_int_equal(info.free_blocks, plan.n_blocks);
            assert_int_equal(info.max_length, plan.max_length);
            assert_int_equal(info.open_sessions, 0);
            assert_int_equal(c.now, plan.bytes);
            assert_int_equal(plan.n_blocks, 3 * ((200 + sizes[i] - 1) / sizes[i]));
            assert_int_equal(plan.bytes_per_position,
                             t.config->n_layers * dspark_cache_entry_bytes(o.dtype, t.config->kv_lora_rank,
                                                                      t.config->qk_rope_head_dim));
            dspark_pool_free(p);
            assert_int_equal(c.now, 0);
        }
    dspark_pool_opts o;
    dspark_pool_info plan;
    dspark_pool_opts_init(&o);
    o.n_blocks = (uint64_t)INT32_MAX + 1;
    refused(dspark_plan_pool(t.config, &o, &plan, &err), DSPARK_ERANGE);
    o.n_blocks = INT32_MAX;
    o.block_size = UINT32_MAX;
    refused(dspark_plan_pool(t.config, &o, &plan, &err), DSPARK_ERANGE);
    dspark_pool_opts_init(&o);
    o.max_length = t.config->max_positions + 1;
    refused(dspark_plan_pool(t.config, &o, &plan, &err), DSPARK_ERANGE);
    o.max_length = 0;
    o.dtype = DSPARK_CACHE_FP8_DS_MLA;
    refused(dspark_plan_pool(t.config, &o, &plan, &err), DSPARK_EUNSUPPORTED);
    drafting_close(&t);
}

/* B78: the slot and the address behind 2^31 entries. */
static void test_large_slots(void **state)
{
    int32_t table[3] = {0, 1, INT32_MAX - 1};
    dspark_pool p;
    dspark_session s;
    (void)state;
    memset(&p, 0, sizeof p);
    memset(&s, 0, sizeof s);
    p.info.block_size = 128;
    s.pool = &p;
    s.table = table;
    assert_true(dspark__session_slot(&s, 2 * 128 + 127) == (int64_t)(INT32_MAX - 1) * 128 + 127);
}

static void test_nothing_allocated(void **state)
{
    dspark_session *b = NULL;
    (void)state;
    if (!oom_available()) skip();
    open_rig_of(NULL, 0, 2, 2, 16, 64, 3);
    answer *r = answer_new(&base);
    dspark_draft_input in = drafting_input(1);
    oom_count_start();
    dspark_session *s = open_session();
    for (uint64_t i = 0; i < 5; i++) {
        append(s, dspark_session_length(s), 70);
        must(dspark_session_draft(s, drafter, &in, &r->out, &err));
        append(s, dspark_session_length(s), 8);
        must(dspark_session_accept(s, 3, &err));
        must(dspark_session_fork(&b, s, &err));
        append(b, dspark_session_length(s), 2);
        dspark_session_close(b);
        must(dspark_session_rewind(s, i, &err));
    }
    dspark_session_close(s);
    assert_int_equal(oom_stop(), 0);
    answer_free(r);
    close_rig();
}

static void test_oom_create(void **state)
{
    drafting t;
    size_t n = 1;
    dspark_pool *p = NULL;
    (void)state;
    if (!oom_available()) skip();
    drafting_open(&t, NULL, 0);
    for (;; n++) {
        dspark_pool_opts o;
        dspark_pool_opts_init(&o);
        o.n_blocks = 4;
        oom_fail_nth(n);
        dspark_status st = dspark_pool_create(&p, t.model, &o, &err);
        oom_stop();
        if (st == DSPARK_OK) break;
        refused(st, DSPARK_ENOMEM);
        assert_null(p);
    }
    assert_true(n > 2);
    dspark_pool_free(p);
    drafting_close(&t);
}

/* ---- threads ---- */

enum { N_THREADS = 4 };

typedef struct worker {
    const drafting *t;
    dspark_pool *pool;
    dspark_session *past; /* a fork of the common past */
    answer *result;
    size_t id;
    int failed;
} worker;

/* No cmocka in here: its failures jump. */
static void *work(void *arg)
{
    worker *w = arg;
    const drafting *t = w->t;
    dspark_error e;
    dspark_drafter_opts o;
    dspark_drafter *d = NULL;
    dspark_draft_input in = drafting_input((int64_t)w->id);
    dspark_drafter_opts_init(&o);
    o.n_threads = 2;
    w->failed = dspark_drafter_create(&d, t->model, &o, &e) != DSPARK_OK;
    for (int round = 0; !w->failed && round < 6; round++) {
        dspark_session *s = NULL;
        w->failed = dspark_session_fork(&s, w->past, &e) != DSPARK_OK ||
                    dspark_session_append(s, d, 21, t->taps + 21 * t->taps_width, t->taps_width, 0,
                                          10 + w->id, &e) != DSPARK_OK ||
                    dspark_session_draft(s, d, &in, &w->result->out, &e) != DSPARK_OK;
        (void)dspark_pool_get_info(w->pool);
        dspark_session_close(s);
    }
    dspark_drafter_free(d);
    return NULL;
}

/* One model, one pool, blocks of a common past; every thread has its session and drafter. */
static void test_threads(void **state)
{
    worker w[N_THREADS];
    pthread_t id[N_THREADS];
    (void)state;
    open_rig(8, 60, 2 * N_THREADS + 1);
    dspark_session *past = open_session();
    append(past, 0, 21);
    for (size_t i = 0; i < N_THREADS; i++) {
        w[i] = (worker){.t = &base, .pool = pool, .id = i, .result = answer_new(&base)};
        must(dspark_session_fork(&w[i].past, past, &err));
    }
    for (size_t i = 0; i < N_THREADS; i++) assert_int_equal(pthread_create(&id[i], NULL, work, &w[i]), 0);
    for (size_t i = 0; i < N_THREADS; i++) pthread_join(id[i], NULL);
    for (size_t i = 0; i < N_THREADS; i++) {
        assert_false(w[i].failed);
        answer *want = drafting_raw(&base, drafter, DSPARK_CACHE_BF16, 31 + i, (int64_t)i);
        answer_same(w[i].result, want);
        answer_free(want);
        answer_free(w[i].result);
        dspark_session_close(w[i].past);
    }
    expect_fresh(past, 21);
    dspark_session_close(past);
    assert_int_equal(free_blocks(), 60);
    close_rig();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paging),
        cmocka_unit_test(test_long_append),
        cmocka_unit_test(test_capacity_is_not_workspace),
        cmocka_unit_test(test_together),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_rewind),
        cmocka_unit_test(test_reused_blocks),
        cmocka_unit_test(test_append_rules),
        cmocka_unit_test(test_append_names_rows),
        cmocka_unit_test(test_noise_of_blocks),
        cmocka_unit_test(test_full_pool),
        cmocka_unit_test(test_session_count),
        cmocka_unit_test(test_accept),
        cmocka_unit_test(test_no_leak),
        cmocka_unit_test(test_end_of_model),
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_large_slots),
        cmocka_unit_test(test_nothing_allocated),
        cmocka_unit_test(test_oom_create),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests_name("session", tests, NULL, NULL);
}
