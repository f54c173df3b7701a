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
#include "support/drafts.h"
#include "support/fixture.h"
#include "support/oom.h"
#include "support/tmpdir.h"

static dspark_error err;
#define must(call) check((call), DSPARK_OK, &err)
#define refused(call, status) check((call), (status), &err)

/* ---- equal to the host's own cache ---- */

static void test_paging(void **state)
{
    static const uint32_t sizes[] = {1, 16, 64, 128};
    static const size_t steps[] = {1, 2, 61, 64, 100};
    drafts t;
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 2, 1);
    for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_E5M2; dtype++) {
        drafted *want = drafts_raw(&t, d, (dspark_cache_dtype)dtype, 228, 7);
        for (size_t i = 0; i < 4; i++) {
            dspark_pool *p = drafts_pool(&t, (dspark_cache_dtype)dtype, sizes[i], 600, 3);
            dspark_session *other = drafts_session(p), *s = drafts_session(p);
            uint64_t at = 0;
            for (size_t k = 0; k < 5; k++) { /* blocks of the two alternate */
                drafts_append(&t, s, d, at, steps[k]);
                drafts_append(&t, other, d, k * 3, 3);
                at += steps[k];
            }
            drafted *got = drafts_draft(&t, s, d, 7);
            drafted_same(&t, got, want);
            drafted_free(got);
            dspark_pool_free(p); /* closes its sessions */
        }
        drafted_free(want);
    }
    dspark_drafter_free(d);
    drafts_close(&t);
}

/* B119, B120: longer than any chunk, at an odd stride; a tap is not as wide as the hidden states. */
static void test_long_append(void **state)
{
    static const char *const settings[] = {"target_hidden_size=48"};
    drafts t;
    (void)state;
    drafts_open(&t, settings, 1);
    assert_int_not_equal(t.c->tap_width, t.c->hidden_size);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 16, 40, 1);
    dspark_session *s = drafts_session(p);
    const size_t n = 257, stride = t.taps_width * 2 + 6;
    unsigned char *rows = malloc(n * stride);
    assert_non_null(rows);
    memset(rows, 0xff, n * stride); /* NaN between the rows */
    for (size_t i = 0; i < n; i++) memcpy(rows + i * stride, t.taps + i * t.taps_width, t.taps_width * 2);
    must(dspark_session_append(s, d, 0, rows, t.taps_width, stride, n, &err));
    free(rows);
    drafts_expect_fresh(&t, s, d, n);
    dspark_session_close(s);
    s = drafts_session(p);
    drafts_append(&t, s, d, 0, 65); /* the workspace has 64 rows */
    drafts_expect_fresh(&t, s, d, 65);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

/* B117: what a session could hold says nothing about what a step needs. */
static void test_capacity_is_not_workspace(void **state)
{
    static const char *const settings[] = {"max_position_embeddings=1048576"};
    const uint64_t limit = 64u << 20;
    drafts t;
    dspark_drafter_opts o;
    dspark_drafter *d = NULL;
    dspark_pool_opts po;
    dspark_pool *p = NULL;
    (void)state;
    drafts_open(&t, settings, 1);
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
    dspark_session *s = drafts_session(p);
    drafts_append(&t, s, d, 0, 300);
    drafts_expect_fresh(&t, s, d, 300);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

/* ---- several sessions ---- */

/* More than go together in one call or one pass; one of them twice. */
static void test_together(void **state)
{
    enum { N = 35 };
    drafts t;
    dspark_session *s[N + 1];
    dspark_draft_input in[N + 1];
    dspark_draft_output out[N + 1];
    drafted *r[N + 1], *solo;
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 2, 8);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 4, 400, N);
    for (size_t i = 0; i < N; i++) {
        s[i] = drafts_session(p);
        drafts_append(&t, s[i], d, 0, i % 5 * 7);
        in[i] = drafts_input((int64_t)i);
    }
    s[N] = s[3];
    in[N] = drafts_input(50);
    for (size_t i = 0; i <= N; i++) r[i] = drafted_new(&t), out[i] = r[i]->out;
    /* All are checked before any is drafted. */
    in[N].anchor = -1;
    refused(dspark_sessions_draft(s, d, in, out, N + 1, &err), DSPARK_ERANGE);
    for (size_t i = 0; i <= N; i++) {
        assert_true(drafted_untouched(&t, r[i]));
        assert_int_equal(out[i].n_tokens, 0);
        assert_int_not_equal(out[i].status, DSPARK_OK);
        refused(dspark_session_accept(s[i], 0, &err), DSPARK_EINVAL);
    }
    in[N].anchor = 50;
    must(dspark_sessions_draft(s, d, in, out, N + 1, &err));
    for (size_t i = 0; i <= N; i++) {
        r[i]->out = out[i];
        solo = drafts_draft(&t, s[i], d, in[i].anchor);
        drafted_same(&t, r[i], solo);
        drafted_free(solo);
        drafted_free(r[i]);
    }
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

static void test_fork(void **state)
{
    drafts t;
    dspark_session *b = NULL;
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 16, 10, 2);
    dspark_session *a = drafts_session(p);
    drafts_append(&t, a, d, 0, 40);
    must(dspark_session_fork(&b, a, &err));
    assert_int_equal(drafts_free_blocks(p), 7); /* nothing copied yet */
    /* The fork goes on with other rows, in the block that was shared. */
    must(dspark_session_append(b, d, 40, t.taps, t.taps_width, 0, 20, &err));
    assert_int_equal(drafts_free_blocks(p), 5);
    drafts_expect_fresh(&t, a, d, 40);
    drafts_append(&t, a, d, 40, 30);
    drafts_expect_fresh(&t, a, d, 70);
    must(dspark_session_rewind(b, 40, &err));
    drafts_expect_fresh(&t, b, d, 40);
    drafts_append(&t, b, d, 40, 3);
    dspark_session_close(a);
    drafts_expect_fresh(&t, b, d, 43); /* blocks that it shared outlive the other */
    dspark_session_close(b);
    assert_int_equal(drafts_free_blocks(p), 10);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

static void test_rewind(void **state)
{
    drafts t;
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 16, 8, 1);
    dspark_session *s = drafts_session(p);
    drafts_append(&t, s, d, 0, 20);
    for (uint64_t keep = 0; keep <= 20; keep += 4) {
        /* Wrong rows from `keep` on, then the right ones. */
        must(dspark_session_rewind(s, keep, &err));
        must(dspark_session_append(s, d, keep, t.taps + 300 * t.taps_width, t.taps_width, 0, 60, &err));
        must(dspark_session_rewind(s, keep, &err));
        drafts_expect_fresh(&t, s, d, keep);
        drafts_append(&t, s, d, keep, 33 - keep);
        drafts_expect_fresh(&t, s, d, 33);
        assert_int_equal(drafts_free_blocks(p), 5);
        must(dspark_session_rewind(s, 20, &err));
    }
    refused(dspark_session_rewind(s, 21, &err), DSPARK_ERANGE);
    assert_int_equal(dspark_session_length(s), 20);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

/* B75: a session in the blocks of one that is gone; what is behind its length may be anything. */
static void test_reused_blocks(void **state)
{
    drafts t;
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 16, 4, 1);
    dspark_session *s = drafts_session(p);
    drafts_append(&t, s, d, 0, 40);
    dspark_session_close(s);
    for (uint32_t l = 0; l < p->view.n_layers; l++)
        memset(p->layers[l], 0xff, p->entry_bytes * 16 * 4); /* NaN */
    s = drafts_session(p);
    assert_int_equal(dspark_session_length(s), 0);
    drafts_expect_fresh(&t, s, d, 0);
    drafts_append(&t, s, d, 0, 3);
    drafts_expect_fresh(&t, s, d, 3);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

/* ---- rules ---- */

static void test_append_rules(void **state)
{
    drafts t, other;
    (void)state;
    drafts_open(&t, NULL, 0);
    drafts_open(&other, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_drafter *foreign = drafts_drafter(&other, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 16, 4, 2);
    dspark_session *s = drafts_session(p);
    const size_t w = t.taps_width;
    drafts_append(&t, s, d, 0, 10);
    /* B80: the same again, a gap. */
    refused(dspark_session_append(s, d, 0, t.taps, w, 0, 10, &err), DSPARK_ERANGE);
    refused(dspark_session_append(s, d, 0, t.taps + w, w, 0, 10, &err), DSPARK_ERANGE);
    refused(dspark_session_append(s, d, 9, t.taps, w, 0, 1, &err), DSPARK_ERANGE);
    refused(dspark_session_append(s, d, 11, t.taps, w, 0, 1, &err), DSPARK_ERANGE);
    refused(dspark_session_append(s, d, UINT64_MAX, t.taps, w, 0, 1, &err), DSPARK_ERANGE);
    /* B67: taps of another width, rows that overlap, no rows at all. */
    refused(dspark_session_append(s, d, 10, t.taps, w - 64, 0, 1, &err), DSPARK_EINVAL);
    refused(dspark_session_append(s, d, 10, t.taps, w + 1, 0, 1, &err), DSPARK_EINVAL);
    refused(dspark_session_append(s, d, 10, t.taps, w, w * 2 - 2, 2, &err), DSPARK_EINVAL);
    refused(dspark_session_append(s, d, 10, NULL, w, 0, 1, &err), DSPARK_EINVAL);
    refused(dspark_session_append(s, foreign, 10, t.taps, w, 0, 1, &err), DSPARK_EINVAL);
    refused(dspark_session_append(NULL, d, 10, t.taps, w, 0, 1, &err), DSPARK_EINVAL);
    refused(dspark_session_append(s, d, 10, t.taps, w, 0, SIZE_MAX / 2, &err), DSPARK_ENOSPACE);
    must(dspark_session_append(s, d, 10, NULL, w, 0, 0, &err));
    drafts_expect_fresh(&t, s, d, 10);
    /* A NaN far behind: nothing of its chunk counts, no block is kept. */
    uint16_t *rows = malloc(30 * w * 2);
    assert_non_null(rows);
    memcpy(rows, t.taps + 10 * w, 30 * w * 2);
    rows[29 * w + 3] = 0x7fc1;
    refused(dspark_session_append(s, d, 10, rows, w, 0, 30, &err), DSPARK_ENONFINITE);
    free(rows);
    assert_int_equal(drafts_free_blocks(p), 3);
    drafts_expect_fresh(&t, s, d, 10);
    drafted *r = drafted_new(&t);
    dspark_draft_input in = drafts_input(1);
    refused(dspark_session_draft(s, foreign, &in, &r->out, &err), DSPARK_EINVAL);
    assert_true(drafted_untouched(&t, r));
    drafted_free(r);
    dspark_pool_free(p);
    dspark_drafter_free(foreign);
    dspark_drafter_free(d);
    drafts_close(&other);
    drafts_close(&t);
}

/* Sampled drafts are draws from the laws that are handed out, by the documented keys: the block's number
 * is put in by the library, so a session needs one sequence number for all its blocks. */
static void test_noise_of_blocks(void **state)
{
    drafts t;
    dspark_sampling law;
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 16, 8, 1);
    dspark_session *s = drafts_session(p);
    dspark_sampling_init(&law);
    law.temperature = 1;
    for (uint64_t at = 10; at < 13; at++) {
        dspark_draft_input in = drafts_input(5);
        drafted *r = drafted_new(&t);
        drafts_append(&t, s, d, at == 10 ? 0 : at - 1, at == 10 ? 10 : 1);
        in.sampling = &law;
        in.seed = 77;
        in.sequence = 9;
        must(dspark_session_draft(s, d, &in, &r->out, &err));
        assert_int_equal(r->out.n_tokens, t.c->block_size);
        for (uint32_t i = 0; i < r->out.n_tokens; i++) {
            const dspark_noise_key key = {77, 9, at + 1 + i, DSPARK_NOISE_DRAFT, at + 1};
            int32_t token;
            must(dspark_sample(r->probs + i * t.c->vocab_size, t.c->vocab_size, &key, &token, &err));
            assert_int_equal(r->tokens[i], token);
        }
        drafted_free(r);
    }
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

/* A call may be cut in pieces inside; the row that an error names is the call's. */
static void test_append_names_rows(void **state)
{
    drafts t;
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 64, 16, 1);
    dspark_session *s = drafts_session(p);
    t.taps[577 * t.taps_width + 3] = 0x7fc1;
    refused(dspark_session_append(s, d, 0, t.taps, t.taps_width, 0, 600, &err), DSPARK_ENONFINITE);
    if (!strstr(err.message, "row 577,")) fail_msg("%s", err.message);
    drafts_expect_fresh(&t, s, d, (size_t)dspark_session_length(s));
    /* the context that the drafter lends names its own caller's rows again */
    int64_t position = 0, slot = 0;
    dspark_batch b;
    dspark_cache *cache;
    dspark_batch_init(&b);
    b.n_tokens = 1;
    b.taps = t.taps + 577 * t.taps_width;
    b.positions = &position;
    b.slots = &slot;
    must(dspark_cache_create(&cache, t.model, DSPARK_CACHE_BF16, 16, 1, NULL, &err));
    refused(dspark_context_run(dspark_drafter_context(d), &b, dspark_cache_get_view(cache), NULL, &err),
            DSPARK_ENONFINITE);
    if (!strstr(err.message, "row 0,")) fail_msg("%s", err.message);
    dspark_cache_free(cache);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

/* A full pool: the append that does not fit leaves all as it was, also where a shared block would have
 * had to be copied. */
static void test_full_pool(void **state)
{
    drafts t;
    dspark_session *b = NULL;
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 16, 4, 2);
    dspark_session *a = drafts_session(p);
    const size_t w = t.taps_width;
    drafts_append(&t, a, d, 0, 40); /* 3 of 4 */
    must(dspark_session_fork(&b, a, &err));
    refused(dspark_session_append(b, d, 40, t.taps + 40 * w, w, 0, 9, &err), DSPARK_ENOSPACE); /* 1 + copy */
    assert_int_equal(drafts_free_blocks(p), 1);
    drafts_expect_fresh(&t, b, d, 40);
    drafts_append(&t, b, d, 40, 8); /* the copy alone */
    assert_int_equal(drafts_free_blocks(p), 0);
    refused(dspark_session_append(b, d, 48, t.taps + 48 * w, w, 0, 1, &err), DSPARK_ENOSPACE);
    drafts_expect_fresh(&t, b, d, 48);
    drafts_expect_fresh(&t, a, d, 40);
    dspark_session_close(a);
    assert_int_equal(drafts_free_blocks(p), 1);
    drafts_append(&t, b, d, 48, 16);
    drafts_expect_fresh(&t, b, d, 64);
    refused(dspark_session_append(b, d, 64, t.taps + 64 * w, w, 0, 1, &err), DSPARK_ENOSPACE);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

/* B72, B73: no session too many, none that is closed, and the others are as they were. */
static void test_session_count(void **state)
{
    drafts t;
    dspark_session *s[3], *more = (void *)&t;
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 16, 8, 3);
    for (size_t i = 0; i < 3; i++) drafts_append(&t, s[i] = drafts_session(p), d, 0, i + 2);
    refused(dspark_session_open(&more, p, &err), DSPARK_ENOSPACE);
    assert_null(more);
    refused(dspark_session_fork(&more, s[0], &err), DSPARK_ENOSPACE);
    assert_null(more);
    assert_int_equal(dspark_pool_get_info(p).open_sessions, 3);
    dspark_session_close(s[1]);
    dspark_session_close(s[1]);
    dspark_session_close(NULL);
    drafted *r = drafted_new(&t);
    dspark_draft_input in = drafts_input(1);
    refused(dspark_session_draft(s[1], d, &in, &r->out, &err), DSPARK_EINVAL);
    assert_true(drafted_untouched(&t, r));
    drafted_free(r);
    refused(dspark_session_append(s[1], d, 0, t.taps, t.taps_width, 0, 1, &err), DSPARK_EINVAL);
    refused(dspark_session_rewind(s[1], 0, &err), DSPARK_EINVAL);
    refused(dspark_session_accept(s[1], 0, &err), DSPARK_EINVAL);
    refused(dspark_session_save(s[1], tmpdir_path(t.dir, "closed.st"), &err), DSPARK_EINVAL);
    drafts_expect_fresh(&t, s[0], d, 2);
    drafts_expect_fresh(&t, s[2], d, 4);
    assert_int_equal(drafts_free_blocks(p), 6);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

static void test_accept(void **state)
{
    drafts t;
    dspark_acceptance a;
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 4, 40, 1);
    dspark_session *s = drafts_session(p);
    uint64_t length = 6, accepted[8] = {0};
    drafts_append(&t, s, d, 0, 6);
    refused(dspark_session_accept(s, 0, &err), DSPARK_EINVAL); /* nothing drafted */
    for (uint32_t n = 0; n <= 7; n++) {
        drafted_free(drafts_draft(&t, s, d, 9));
        refused(dspark_session_accept(s, 8, &err), DSPARK_EINVAL);
        refused(dspark_session_accept(s, n, &err), DSPARK_EINVAL); /* rows are missing */
        drafts_append(&t, s, d, length, 8);
        must(dspark_session_accept(s, n, &err));
        refused(dspark_session_accept(s, n, &err), DSPARK_EINVAL); /* twice */
        length += 1 + n;
        drafts_expect_fresh(&t, s, d, (size_t)length);
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
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

/* B76: pages of one entry, filled to the limit, drafted from, rolled back. */
static void test_no_leak(void **state)
{
    const int rounds = SAMPLE ? 300 : 10000;
    drafts t;
    dspark_session *b = NULL;
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 1, 12, 2);
    dspark_session *s = drafts_session(p);
    drafts_append(&t, s, d, 0, 4);
    for (int i = 0; i < rounds; i++) {
        drafts_append(&t, s, d, 4, 8);
        assert_int_equal(drafts_free_blocks(p), 0);
        if (i % 50 == 0) {
            drafted_free(drafts_draft(&t, s, d, 3));
            must(dspark_session_fork(&b, s, &err));
            refused(dspark_session_append(b, d, 12, t.taps, t.taps_width, 0, 1, &err), DSPARK_ENOSPACE);
            dspark_session_close(b);
        }
        must(dspark_session_rewind(s, 4, &err));
        assert_int_equal(drafts_free_blocks(p), 8);
    }
    drafts_expect_fresh(&t, s, d, 4);
    dspark_session_close(s);
    assert_int_equal(drafts_free_blocks(p), 12);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

/* The model's last positions: fewer tokens, then none and a reason, never ids (B64, B65). */
static void test_end_of_model(void **state)
{
    static const char *const settings[] = {"max_position_embeddings=64", "rope_parameters=null"};
    drafts t;
    (void)state;
    drafts_open(&t, settings, 2);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 16, 0, 1);
    dspark_session *s = drafts_session(p);
    assert_int_equal(dspark_pool_get_info(p).max_length, 64);
    drafts_append(&t, s, d, 0, 58);
    for (uint32_t left = 5; left <= 5; left--) {
        drafted *r = drafted_new(&t);
        dspark_draft_input in = drafts_input(1);
        must(dspark_session_draft(s, d, &in, &r->out, &err));
        assert_int_equal(r->out.n_tokens, left);
        assert_int_equal(r->out.status, left ? DSPARK_OK : DSPARK_ERANGE);
        assert_int_equal(r->tokens[left], 0x6b6b6b6b);
        drafted_free(r);
        drafts_append(&t, s, d, 63 - left, 1);
    }
    /* Full: no position for an anchor. */
    drafted *r = drafted_new(&t);
    dspark_draft_input in = drafts_input(1);
    refused(dspark_session_draft(s, d, &in, &r->out, &err), DSPARK_ERANGE);
    assert_true(drafted_untouched(&t, r));
    drafted_free(r);
    refused(dspark_session_append(s, d, 64, t.taps, t.taps_width, 0, 1, &err), DSPARK_ENOSPACE);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
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
    drafts t;
    counted c = {0, 0};
    dspark_allocator a = {&c, counted_alloc, counted_free};
    (void)state;
    drafts_open(&t, NULL, 0);
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
            must(dspark_plan_pool(t.c, &o, &plan, &err));
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
                             t.c->n_layers * dspark_cache_entry_bytes(o.dtype, t.c->kv_lora_rank,
                                                                      t.c->qk_rope_head_dim));
            dspark_pool_free(p);
            assert_int_equal(c.now, 0);
        }
    dspark_pool_opts o;
    dspark_pool_info plan;
    dspark_pool_opts_init(&o);
    o.n_blocks = (uint64_t)INT32_MAX + 1;
    refused(dspark_plan_pool(t.c, &o, &plan, &err), DSPARK_ERANGE);
    o.n_blocks = INT32_MAX;
    o.block_size = UINT32_MAX;
    refused(dspark_plan_pool(t.c, &o, &plan, &err), DSPARK_ERANGE);
    dspark_pool_opts_init(&o);
    o.max_length = t.c->max_positions + 1;
    refused(dspark_plan_pool(t.c, &o, &plan, &err), DSPARK_ERANGE);
    o.max_length = 0;
    o.dtype = DSPARK_CACHE_FP8_DS_MLA;
    refused(dspark_plan_pool(t.c, &o, &plan, &err), DSPARK_EUNSUPPORTED);
    drafts_close(&t);
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
    drafts t;
    dspark_session *b = NULL;
    (void)state;
    if (!oom_available()) skip();
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 2, 2);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 16, 64, 3);
    drafted *r = drafted_new(&t);
    dspark_draft_input in = drafts_input(1);
    oom_count_start();
    dspark_session *s = drafts_session(p);
    for (uint64_t i = 0; i < 5; i++) {
        drafts_append(&t, s, d, dspark_session_length(s), 70);
        must(dspark_session_draft(s, d, &in, &r->out, &err));
        drafts_append(&t, s, d, dspark_session_length(s), 8);
        must(dspark_session_accept(s, 3, &err));
        must(dspark_session_fork(&b, s, &err));
        drafts_append(&t, b, d, dspark_session_length(s), 2);
        dspark_session_close(b);
        must(dspark_session_rewind(s, i, &err));
    }
    dspark_session_close(s);
    assert_int_equal(oom_stop(), 0);
    drafted_free(r);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
}

static void test_oom_create(void **state)
{
    drafts t;
    size_t n = 1;
    dspark_pool *p = NULL;
    (void)state;
    if (!oom_available()) skip();
    drafts_open(&t, NULL, 0);
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
    drafts_close(&t);
}

/* ---- threads ---- */

enum { N_THREADS = 4 };

typedef struct worker {
    const drafts *t;
    dspark_pool *pool;
    dspark_session *past; /* a fork of the common past */
    drafted *result;
    size_t id;
    int failed;
} worker;

/* No cmocka in here: its failures jump. */
static void *work(void *arg)
{
    worker *w = arg;
    const drafts *t = w->t;
    dspark_error e;
    dspark_drafter_opts o;
    dspark_drafter *d = NULL;
    dspark_draft_input in = drafts_input((int64_t)w->id);
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
    drafts t;
    worker w[N_THREADS];
    pthread_t id[N_THREADS];
    (void)state;
    drafts_open(&t, NULL, 0);
    dspark_drafter *d = drafts_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafts_pool(&t, DSPARK_CACHE_BF16, 8, 60, 2 * N_THREADS + 1);
    dspark_session *past = drafts_session(p);
    drafts_append(&t, past, d, 0, 21);
    for (size_t i = 0; i < N_THREADS; i++) {
        w[i] = (worker){.t = &t, .pool = p, .id = i, .result = drafted_new(&t)};
        must(dspark_session_fork(&w[i].past, past, &err));
    }
    for (size_t i = 0; i < N_THREADS; i++) assert_int_equal(pthread_create(&id[i], NULL, work, &w[i]), 0);
    for (size_t i = 0; i < N_THREADS; i++) pthread_join(id[i], NULL);
    for (size_t i = 0; i < N_THREADS; i++) {
        assert_false(w[i].failed);
        drafted *want = drafts_raw(&t, d, DSPARK_CACHE_BF16, 31 + i, (int64_t)i);
        drafted_same(&t, w[i].result, want);
        drafted_free(want);
        drafted_free(w[i].result);
        dspark_session_close(w[i].past);
    }
    drafts_expect_fresh(&t, past, d, 21);
    dspark_session_close(past);
    assert_int_equal(drafts_free_blocks(p), 60);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafts_close(&t);
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
