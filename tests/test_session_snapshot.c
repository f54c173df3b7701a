/* Snapshots of sessions: equal drafts after loading under other paging; files of another model, dtype or
 * scale; every header changed byte by byte; memory that runs out. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "model/session.h"
#include "support/drafting.h"
#include "support/fixture.h"
#include "support/oom.h"
#include "support/tmpdir.h"

static dspark_error err;
#define must(call) check((call), DSPARK_OK, &err)
#define refused(call, status) check((call), (status), &err)

/* ---- snapshots ---- */

static void test_snapshot(void **state)
{
    drafting t;
    (void)state;
    drafting_open(&t, NULL, 0);
    dspark_drafter *d = drafting_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_E5M2; dtype++)
        for (size_t n = 0; n <= 43; n += 43) {
            const char *path = tmpdir_path(t.dir, "session.st");
            dspark_pool *p = drafting_pool(&t, (dspark_cache_dtype)dtype, 16, 1, 8);
            dspark_pool *q = drafting_pool(&t, (dspark_cache_dtype)dtype, 5, 1, 20); /* other paging */
            dspark_session *s = drafting_empty(p), *again = NULL;
            drafting_append(&t, s, d, 0, n);
            must(dspark_session_save(s, path, &err));
            must(dspark_session_load(&again, q, path, &err));
            assert_int_equal(dspark_session_length(again), n);
            for (int more = 0; more < 2; more++) {
                answer *a = drafting_answer(&t, s, d, 8), *b = drafting_answer(&t, again, d, 8);
                answer_same(a, b);
                answer_free(a);
                answer_free(b);
                if (more) break;
                drafting_append(&t, s, d, n, 9);
                drafting_append(&t, again, d, n, 9);
            }
            dspark_pool_free(p);
            dspark_pool_free(q);
        }
    dspark_drafter_free(d);
    drafting_close(&t);
}

/* Refused, and neither a session nor a block is lost. */
static void load_refused(dspark_pool *p, const char *path, dspark_status status)
{
    dspark_session *s = (void *)p;
    refused(dspark_session_load(&s, p, path, &err), status);
    assert_null(s);
    assert_int_equal(drafting_free_blocks(p), dspark_pool_get_info(p).n_blocks);
    assert_int_equal(dspark_pool_get_info(p).open_sessions, 0);
}

static void test_foreign_snapshots(void **state)
{
    static const char *const settings[] = {"hidden_size=96"};
    static const char *const other_theta[] = {"rope_theta=777"};
    drafting t, wide, theta;
    float scales[DSPARK_MAX_LAYERS];
    dspark_pool_opts o;
    dspark_pool *q = NULL;
    (void)state;
    drafting_open(&t, NULL, 0);
    drafting_open(&wide, settings, 1);
    drafting_open(&theta, other_theta, 1);
    dspark_drafter *d = drafting_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafting_pool(&t, DSPARK_CACHE_FP8_E4M3, 16, 1, 8);
    const char *path = tmpdir_path(t.dir, "session.st");
    dspark_session *s = drafting_empty(p);
    drafting_append(&t, s, d, 0, 20);
    must(dspark_session_save(s, path, &err));
    dspark_session_close(s);
    q = drafting_pool(&wide, DSPARK_CACHE_FP8_E4M3, 16, 1, 8);
    load_refused(q, path, DSPARK_EMODEL);
    dspark_pool_free(q);
    q = drafting_pool(&theta, DSPARK_CACHE_FP8_E4M3, 16, 1, 8);
    load_refused(q, path, DSPARK_EMODEL);
    dspark_pool_free(q);
    q = drafting_pool(&t, DSPARK_CACHE_FP8_E5M2, 16, 1, 8); /* same bytes, other numbers */
    load_refused(q, path, DSPARK_EMODEL);
    dspark_pool_free(q);
    q = drafting_pool(&t, DSPARK_CACHE_FP8_E4M3, 16, 1, 1);
    load_refused(q, path, DSPARK_ENOSPACE);
    dspark_pool_free(q);
    for (size_t l = 0; l < DSPARK_MAX_LAYERS; l++) scales[l] = 1;
    scales[t.config->n_layers - 1] = nextafterf(1, 2);
    dspark_pool_opts_init(&o);
    o.dtype = DSPARK_CACHE_FP8_E4M3;
    o.n_blocks = 8;
    o.scales = scales;
    must(dspark_pool_create(&q, t.model, &o, &err));
    load_refused(q, path, DSPARK_EMODEL);
    dspark_pool_free(q);
    load_refused(p, tmpdir_path(t.dir, "none.st"), DSPARK_EIO);
    refused(dspark_session_save(s = drafting_empty(p), tmpdir_path(t.dir, "no/such/folder.st"), &err),
            DSPARK_EOUTPUT);
    dspark_session_close(s);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafting_close(&theta);
    drafting_close(&wide);
    drafting_close(&t);
}

/* Every length that the file could be cut to near its parts, and every byte of the header changed:
 * never a crash, and never a session with other than the file's bytes. */
static void test_broken_snapshots(void **state)
{
    drafting t;
    (void)state;
    drafting_open(&t, NULL, 0);
    dspark_drafter *d = drafting_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafting_pool(&t, DSPARK_CACHE_BF16, 16, 1, 8);
    const char *path = tmpdir_path(t.dir, "session.st"), *bad = tmpdir_path(t.dir, "bad.st");
    dspark_session *s = drafting_empty(p);
    drafting_append(&t, s, d, 0, 5);
    must(dspark_session_save(s, path, &err));
    dspark_session_close(s);
    FILE *f = fopen(path, "rb");
    static unsigned char bytes[1u << 16];
    assert_non_null(f);
    const size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    assert_true(n > 100 && n < sizeof bytes);
    const size_t data = 5 * p->entry_bytes * t.config->n_layers, header = n - data;
    size_t n_refused = 0;
    for (size_t cut = 0; cut < n; cut += cut < 16 || cut > n - 16 ? 1 : 97) {
        tmpdir_write(bad, bytes, cut);
        s = NULL;
        assert_int_not_equal(dspark_session_load(&s, p, bad, &err), DSPARK_OK);
        assert_null(s);
    }
    for (size_t i = 0; i < header; i += SAMPLE ? 7 : 1) {
        bytes[i] ^= 1;
        tmpdir_write(bad, bytes, n);
        s = NULL;
        if (dspark_session_load(&s, p, bad, &err) == DSPARK_OK) dspark_session_close(s);
        else n_refused++;
        assert_int_equal(drafting_free_blocks(p), 8);
        assert_int_equal(dspark_pool_get_info(p).open_sessions, 0);
        bytes[i] ^= 1;
    }
    print_message("  %zu of %zu changed headers refused\n", n_refused, header);
    assert_true(n_refused > (SAMPLE ? header / 14 : header / 2));
    /* The last element of the last entry: not a number, then infinite. */
    bytes[n - 1] = 0x7f;
    bytes[n - 2] = 0xc0;
    tmpdir_write(bad, bytes, n);
    load_refused(p, bad, DSPARK_ENONFINITE);
    bytes[n - 2] = 0x80;
    tmpdir_write(bad, bytes, n);
    load_refused(p, bad, DSPARK_ENONFINITE);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafting_close(&t);
}

static void test_oom_snapshot(void **state)
{
    drafting t;
    size_t n;
    (void)state;
    if (!oom_available()) skip();
    drafting_open(&t, NULL, 0);
    dspark_drafter *d = drafting_drafter(&t, DSPARK_ISA_AUTO, 1, 1);
    dspark_pool *p = drafting_pool(&t, DSPARK_CACHE_BF16, 16, 2, 8);
    const char *path = tmpdir_path(t.dir, "session.st");
    dspark_session *s = drafting_empty(p), *again = NULL;
    drafting_append(&t, s, d, 0, 20);
    const size_t entries = tmpdir_count(t.dir);
    for (n = 1;; n++) {
        oom_fail_nth(n);
        dspark_status st = dspark_session_save(s, path, &err);
        oom_stop();
        if (st == DSPARK_OK) break;
        refused(st, DSPARK_ENOMEM);
        assert_int_equal(tmpdir_count(t.dir), entries); /* not even a temporary file */
    }
    assert_true(n > 2);
    for (n = 1;; n++) {
        oom_fail_nth(n);
        dspark_status st = dspark_session_load(&again, p, path, &err);
        oom_stop();
        if (st == DSPARK_OK) break;
        refused(st, DSPARK_ENOMEM);
        assert_null(again);
        assert_int_equal(drafting_free_blocks(p), 6);
        assert_int_equal(dspark_pool_get_info(p).open_sessions, 1);
    }
    assert_true(n > 2);
    drafting_expect_fresh(&t, again, d, 20);
    dspark_pool_free(p);
    dspark_drafter_free(d);
    drafting_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_snapshot),
        cmocka_unit_test(test_foreign_snapshots),
        cmocka_unit_test(test_broken_snapshots),
        cmocka_unit_test(test_oom_snapshot),
    };
    return cmocka_run_group_tests_name("session_snapshot", tests, NULL, NULL);
}
