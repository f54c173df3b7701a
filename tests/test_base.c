/* The base layer: error texts, checked sizes, memory, workspace, threads, digests; and the test
 * supports that other tests rely on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/digest.h"
#include "base/fpenv.h"
#include "base/status.h"
#include "base/threads.h"
#include "base/utf8.h"
#include "base/workspace.h"
#include "support/guard.h"
#include "support/oom.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

/* ---- status -------------------------------------------------------------------------------- */

static void test_error_texts(void **state)
{
    dspark_error err;
    (void)state;

    assert_int_equal(dspark__fail(&err, DSPARK_EMODEL, "a: b", "%d of %s", 3, "four"),
                     DSPARK_EMODEL);
    assert_int_equal(err.code, DSPARK_EMODEL);
    assert_string_equal(err.where, "a: b");
    assert_string_equal(err.message, "3 of four");
    assert_int_equal(dspark__fail(NULL, DSPARK_EIO, "x", "%s", "y"), DSPARK_EIO);
    dspark__fail(&err, DSPARK_EIO, NULL, "%s", err.message); /* from itself */
    assert_string_equal(err.where, "");
    assert_string_equal(err.message, "3 of four");

    dspark__fail(&err, DSPARK_EFORMAT, "n\x1b[2J\x7f\n",
                 "a\tb\xc2\x9b"
                 "c\xff\xc3"
                 "d\xe2\x82");
    assert_string_equal(err.where, "n?[2J??");
    assert_string_equal(err.message, "a?b?c??d??");
    dspark__fail(&err, DSPARK_EFORMAT, "\xe2\x82\xac", "\xf0\x9f\x98\x80");
    assert_string_equal(err.where, "\xe2\x82\xac");
    assert_string_equal(err.message, "\xf0\x9f\x98\x80");

    dspark__fail_nomem(&err, "tests", 12345);
    assert_int_equal(err.code, DSPARK_ENOMEM);
    assert_string_equal(err.message, "out of memory: 12345 bytes for tests");
    assert_int_equal(dspark__fail_errno(&err, "f", "open", ENOENT), DSPARK_EIO);
    assert_string_equal(err.message, "open: No such file or directory");
    assert_int_equal(dspark__fail_errno(&err, "f", "open", ENOMEM), DSPARK_ENOMEM);
    assert_int_equal(dspark__fail_output(&err, "f", "write", ENOSPC), DSPARK_EOUTPUT);
    assert_string_equal(err.message, "write: No space left on device");
    assert_int_equal(dspark__fail_output(&err, "f", "write", EMFILE), DSPARK_ENOMEM);
    dspark__error_clear(&err);
    assert_int_equal(err.code, DSPARK_OK);
    assert_string_equal(err.message, "");
    dspark__error_clear(NULL);
    assert_string_equal(dspark__status_name(DSPARK_ECANCELLED), "DSPARK_ECANCELLED");
    assert_string_equal(dspark__status_name(DSPARK_EOUTPUT), "DSPARK_EOUTPUT");
    assert_string_equal(dspark__status_name((dspark_status)-99), "DSPARK_?");
}

/* Texts of every length around the limit, made of three-byte characters: never half of one. */
static void test_error_texts_are_cut_between_characters(void **state)
{
    char text[700];
    dspark_error err;
    (void)state;
    for (size_t lead = 0; lead < 3; lead++) {
        size_t at = lead;
        memset(text, 'x', lead);
        for (; at + 3 < sizeof text; at += 3) memcpy(text + at, "\xe2\x82\xac", 3);
        text[at] = '\0';
        dspark__fail(&err, DSPARK_EIO, text, "%s", text);
        const char *cut[2] = {err.where, err.message};
        size_t room[2] = {sizeof err.where, sizeof err.message};
        for (int i = 0; i < 2; i++) {
            size_t n = strlen(cut[i]);
            assert_true(n < room[i] && n + 3 >= room[i]);
            assert_int_equal((n - lead) % 3, 0);
            assert_memory_equal(cut[i], text, n);
        }
    }
}

static void test_utf8(void **state)
{
    static const char *const bad[] = {
        "\x80",         "\xc0\x80",         "\xc1\xbf",         "\xe0\x9f\xbf",
        "\xed\xa0\x80", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80",
        "\xc3",         "\xe2\x82",         "\xf0\x9f\x98",     "\xff"};
    static const char *const good[] = {
        "a", "\xc2\x80", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"};
    (void)state;
    for (size_t i = 0; i < COUNT(bad); i++)
        assert_int_equal(dspark__utf8_length(bad[i], strlen(bad[i])), 0);
    for (size_t i = 0; i < COUNT(good); i++)
        assert_int_equal(dspark__utf8_length(good[i], strlen(good[i])), strlen(good[i]));
    assert_int_equal(dspark__utf8_length("", 0), 0);
}

/* ---- checked sizes ------------------------------------------------------------------------- */

static void test_checked(void **state)
{
    uint64_t r;
    size_t s;
    (void)state;
    assert_true(dspark__mul_u64(UINT64_C(1) << 32, (UINT64_C(1) << 32) - 1, &r));
    assert_int_equal(r, UINT64_C(0xffffffff00000000));
    assert_false(dspark__mul_u64(UINT64_C(1) << 32, UINT64_C(1) << 32, &r));
    assert_true(dspark__add_u64(UINT64_MAX, 0, &r));
    assert_false(dspark__add_u64(UINT64_MAX, 1, &r));
    assert_true(dspark__mul_size(SIZE_MAX, 1, &s));
    assert_false(dspark__mul_size(SIZE_MAX, 2, &s));
    assert_false(dspark__add_size(SIZE_MAX, 1, &s));
    assert_true(dspark__align_u64(257, 256, &r));
    assert_int_equal(r, 512);
    assert_true(dspark__align_u64(0, 256, &r));
    assert_int_equal(r, 0);
    assert_false(dspark__align_u64(UINT64_MAX - 254, 256, &r));
    assert_true(dspark__align_u64(UINT64_MAX - 255, 256, &r));
    assert_int_equal(dspark__ceil_div_u64(2880, 128), 23);
    assert_int_equal(dspark__ceil_div_u64(UINT64_MAX, 1), UINT64_MAX);
    assert_int_equal(dspark__ceil_div_u64(0, 7), 0);
}

/* ---- memory -------------------------------------------------------------------------------- */

typedef struct host_memory {
    size_t allocs, frees, bytes;
    int refuse;
} host_memory;

static void *host_alloc(void *user, size_t bytes, size_t align)
{
    host_memory *h = user;
    void *p = NULL;
    if (h->refuse) return NULL;
    if (posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, bytes) != 0)
        return NULL;
    h->allocs++;
    h->bytes += bytes;
    return p;
}

static void host_free(void *user, void *ptr, size_t bytes)
{
    host_memory *h = user;
    h->frees++;
    h->bytes -= bytes;
    free(ptr);
}

static void test_alloc(void **state)
{
    static const size_t sizes[] = {1, 255, 4096, (4u << 20) - 1, 4u << 20, (9u << 20) + 3};
    (void)state;
    assert_null(dspark__alloc(NULL, 0, 64));
    dspark__free(NULL, NULL, 0);
    for (size_t i = 0; i < COUNT(sizes); i++) {
        for (size_t align = 1; align <= 4096; align *= 4) {
            unsigned char *p = dspark__alloc(NULL, sizes[i], align);
            assert_non_null(p);
            assert_int_equal((uintptr_t)p % align, 0);
            if (sizes[i] >= 4u << 20) assert_int_equal((uintptr_t)p % (2u << 20), 0);
            p[0] = p[sizes[i] - 1] = 1;
            dspark__free(NULL, p, sizes[i]);
        }
    }
    host_memory h = {0};
    dspark_allocator a = {&h, host_alloc, host_free};
    void *p = dspark__alloc(&a, 100, 64);
    assert_int_equal(h.bytes, 100);
    dspark__free(&a, p, 100);
    assert_int_equal(h.frees, 1);
    dspark_allocator half = {&h, host_alloc, NULL};
    p = dspark__alloc(&half, 100, 64);
    dspark__free(&half, p, 100);
    assert_int_equal(h.allocs, 1);
    if (!SANITIZED) assert_null(dspark__alloc(NULL, SIZE_MAX / 2, 64));
}

/* What the C library gives again has the pages that it had, small ones: they go, since a page that is there is
 * never made huge. What was in them goes with them. */
static void test_alloc_takes_no_old_pages(void **state)
{
    const size_t huge = (size_t)2 << 20, bytes = 6 * huge;
    (void)state;
    unsigned char *volatile old = malloc(2 * bytes); /* volatile: or the compiler leaves all of this out */
    free(old); /* from here on glibc keeps blocks of this size */
    old = malloc(2 * bytes);
    assert_non_null(old);
    memset(old, 0xa5, 2 * bytes);
    assert_int_equal(old[bytes], 0xa5);
    free(old);
    unsigned char *p = dspark__alloc(NULL, bytes, 64);
    assert_non_null(p);
    for (size_t i = 0; i < bytes; i++)
        if (p[i] != 0) fail_msg("byte %zu is 0x%02x", i, p[i]);
    dspark__free(NULL, p, bytes);
}

/* ---- workspace ----------------------------------------------------------------------------- */

static void test_workspace_total(void **state)
{
    size_t total = 1;
    (void)state;
    assert_true(dspark__workspace_total(NULL, 0, &total));
    assert_int_equal(total, 0);
    assert_true(dspark__workspace_total((size_t[]){1, 256, 257, 0}, 4, &total));
    assert_int_equal(total, 256 + 256 + 512);
    assert_false(dspark__workspace_total((size_t[]){SIZE_MAX}, 1, &total));
    assert_int_equal(total, 0);
    assert_false(dspark__workspace_total((size_t[]){SIZE_MAX / 2, SIZE_MAX / 2, 512}, 3, &total));
}

static void test_workspace(void **state)
{
    host_memory h = {0};
    dspark_allocator a = {&h, host_alloc, host_free};
    dspark__workspace ws;
    dspark_error err;
    void *v[3], *w[3];
    (void)state;

    dspark__workspace_init(&ws, &a);
    assert_int_equal(h.allocs, 0);
    assert_int_equal(dspark__workspace_get(&ws, NULL, 0, v, &err), DSPARK_OK);
    assert_int_equal(dspark__workspace_get(&ws, (size_t[]){100, 0, 300}, 3, v, &err), DSPARK_OK);
    assert_int_equal(h.bytes, 768);
    assert_int_equal(ws.size, 768);
    for (int i = 0; i < 3; i++) assert_int_equal((uintptr_t)v[i] % DSPARK__WORKSPACE_ALIGN, 0);
    assert_ptr_equal(v[0], ws.base);
    assert_ptr_equal(v[1], ws.base + 256);
    assert_ptr_equal(v[2], ws.base + 256);
    memset(v[0], 1, 100);
    memset(v[2], 2, 300);
    assert_int_equal(((unsigned char *)v[0])[99], 1);

    /* A smaller get aliases and keeps the buffer. */
    assert_int_equal(dspark__workspace_get(&ws, (size_t[]){256, 256, 256}, 3, w, &err), DSPARK_OK);
    assert_ptr_equal(w[0], v[0]);
    assert_int_equal(h.allocs, 1);
    memset(w[2], 3, 256);

    /* Growth to exactly the total; the old block is returned. */
    assert_int_equal(dspark__workspace_get(&ws, (size_t[]){1000, 24}, 2, w, &err), DSPARK_OK);
    assert_int_equal(h.bytes, 1280);
    assert_int_equal(h.allocs - h.frees, 1);

    dspark__workspace_lock(&ws);
    unsigned char *base = ws.base;
    assert_int_equal(dspark__workspace_get(&ws, (size_t[]){1000, 256}, 2, w, &err), DSPARK_OK);
    w[0] = w[1] = &h;
    assert_int_equal(dspark__workspace_get(&ws, (size_t[]){1000, 257}, 2, w, &err),
                     DSPARK_ENOSPACE);
    assert_null(w[0]);
    assert_null(w[1]);
    assert_non_null(strstr(err.message, "1280"));
    assert_non_null(strstr(err.message, "1536"));
    assert_ptr_equal(ws.base, base);
    assert_int_equal(dspark__workspace_get(&ws, (size_t[]){SIZE_MAX, 1}, 2, w, &err),
                     DSPARK_EINVAL);
    dspark__workspace_unlock(&ws);

    h.refuse = 1;
    w[0] = &h;
    assert_int_equal(dspark__workspace_get(&ws, (size_t[]){4096}, 1, w, &err), DSPARK_ENOMEM);
    assert_null(w[0]);
    assert_non_null(strstr(err.message, "4096"));
    assert_ptr_equal(ws.base, base);
    h.refuse = 0;
    assert_int_equal(dspark__workspace_get(&ws, (size_t[]){4096}, 1, w, NULL), DSPARK_OK);
    dspark__workspace_free(&ws);
    assert_int_equal(h.bytes, 0);
    assert_int_equal(h.allocs, h.frees);
    dspark__workspace_free(&ws);
    dspark__workspace_free(NULL);
}

/* ---- threads ------------------------------------------------------------------------------- */

#define MAX_ITEMS 1000

typedef struct tally {
    atomic_uint calls[MAX_ITEMS];
    atomic_uint wrong_environment;
    unsigned plain[MAX_ITEMS]; /* written by tasks, read after: a race unless run orders it */
} tally;

static void count_call(void *arg, size_t i)
{
    tally *t = arg;
    atomic_fetch_add(&t->calls[i], 1);
    t->plain[i] += (unsigned)i + 1;
#if defined(__SSE2__)
    if ((_mm_getcsr() & 0xffc0u) != DSPARK__MXCSR_DEFAULT)
        atomic_fetch_add(&t->wrong_environment, 1);
    _mm_setcsr(_mm_getcsr() | 0x8040u); /* what a kernel might leave behind */
#endif
}

static void check_runs(dspark__threads *t)
{
    static const size_t n[] = {0, 1, 2, 3, 7, 8, 64, MAX_ITEMS};
    for (size_t k = 0; k < COUNT(n); k++) {
        tally *y = calloc(1, sizeof *y);
        for (unsigned round = 1; round <= 20; round++) {
            dspark__threads_run(t, count_call, y, n[k]);
            for (size_t i = 0; i < MAX_ITEMS; i++) {
                assert_int_equal(atomic_load(&y->calls[i]), i < n[k] ? round : 0);
                assert_int_equal(y->plain[i], i < n[k] ? round * (i + 1) : 0);
            }
        }
        assert_int_equal(atomic_load(&y->wrong_environment), 0);
        free(y);
    }
}

static void test_threads_call_each_once(void **state)
{
    static const uint32_t counts[] = {1, 2, 3, 7};
    dspark_error err;
    (void)state;
    assert_true(dspark__threads_available() >= 1);
    for (size_t k = 0; k < COUNT(counts); k++) {
        dspark__threads *t;
        assert_int_equal(dspark__threads_create(&t, counts[k], NULL, NULL, &err), DSPARK_OK);
        assert_int_equal(dspark__threads_count(t), counts[k]);
        check_runs(t);
        dspark__threads_free(t);
    }
    dspark__threads *t;
    assert_int_equal(dspark__threads_create(&t, 0, NULL, NULL, &err), DSPARK_OK);
    assert_int_equal(dspark__threads_count(t), dspark__threads_available());
    dspark__threads_free(t);
    assert_int_equal(dspark__threads_create(&t, 100000, NULL, NULL, &err), DSPARK_EINVAL);
    assert_null(t);
    dspark__threads_free(NULL);
}

/* The host's environment comes back, whatever tasks did to it. */
static void test_threads_restore_environment(void **state)
{
    (void)state;
#if defined(__SSE2__)
    for (uint32_t n = 1; n <= 2; n++) {
        dspark__threads *t;
        tally *y = calloc(1, sizeof *y);
        assert_int_equal(dspark__threads_create(&t, n, NULL, NULL, NULL), DSPARK_OK);
        unsigned old = _mm_getcsr();
        unsigned host = 0x1f80u | 0x6000u | 0x8040u;
        _mm_setcsr(host);
        dspark__threads_run(t, count_call, y, 50);
        unsigned after = _mm_getcsr();
        _mm_setcsr(old);
        assert_int_equal(after & 0xffc0u, host);
        assert_int_equal(atomic_load(&y->wrong_environment), 0);
        dspark__threads_free(t);
        free(y);
    }
#else
    skip();
#endif
}

static void test_threads_do_not_allocate(void **state)
{
    (void)state;
    if (!oom_available()) skip();
    for (uint32_t n = 1; n <= 3; n++) {
        dspark__threads *t;
        tally *y = calloc(1, sizeof *y);
        assert_int_equal(dspark__threads_create(&t, n, NULL, NULL, NULL), DSPARK_OK);
        oom_count_start();
        for (int round = 0; round < 50; round++) dspark__threads_run(t, count_call, y, 1 + 19 * n);
        assert_int_equal(oom_stop(), 0);
        dspark__threads_free(t);
        free(y);
    }
}

static void host_run(void *user, void (*task)(void *arg, size_t i), void *arg, size_t n)
{
    (*(size_t *)user)++;
    for (size_t i = n; i-- > 0;) task(arg, i);
}

static void test_threads_host_hook(void **state)
{
    size_t used = 0;
    dspark_parallel host = {&used, host_run};
    dspark__threads *t;
    (void)state;
    assert_int_equal(dspark__threads_create(&t, 5, &host, NULL, NULL), DSPARK_OK);
    assert_int_equal(dspark__threads_count(t), 5);
    check_runs(t);
    assert_true(used > 0);
    dspark__threads_free(t);
}

/* Each allocation of a pool failing in turn: a named error, and never a wait without end. */
static size_t count_tasks(void)
{
    DIR *d = opendir("/proc/self/task");
    size_t n = 0;
    if (!d) return 0;
    while (readdir(d)) n++;
    closedir(d);
    return n - 2;
}

/* Hundreds of threads on a few processors are asked for and not started; work is cut as asked. */
static void test_threads_are_not_all_started(void **state)
{
    const size_t available = dspark__threads_available(), most = available < 4 ? 16 : 4 * available;
    const size_t before = count_tasks();
    dspark__threads *t;
    (void)state;
    assert_int_equal(dspark__threads_create(&t, 1000, NULL, NULL, NULL), DSPARK_OK);
    assert_int_equal(dspark__threads_count(t), 1000);
    check_runs(t);
    if (before) assert_true(count_tasks() < before + (most < 1000 ? most : 1000));
    dspark__threads_free(t);
}

static void test_threads_out_of_memory(void **state)
{
    (void)state;
    if (!oom_available()) skip();
    for (size_t n = 1;; n++) {
        dspark__threads *t;
        dspark_error err = {0};
        oom_fail_nth(n);
        dspark_status st = dspark__threads_create(&t, 3, NULL, NULL, &err);
        oom_stop();
        if (st == DSPARK_OK) {
            check_runs(t);
            dspark__threads_free(t);
            if (!oom_failed()) break;
        } else {
            assert_int_equal(st, DSPARK_ENOMEM);
            assert_int_equal(err.code, DSPARK_ENOMEM);
            assert_null(t);
        }
        assert_true(n < 200);
    }
}

/* A system that allows no further thread: an error. In a child, whose limits may be lowered. */
static void test_threads_refused_by_the_system(void **state)
{
    (void)state;
    if (SANITIZED) skip();
    pid_t child = fork();
    if (child == 0) {
        dspark__threads *t;
        dspark_error err = {0};
        struct rlimit little = {100u << 20, 100u << 20}; /* 15 stacks of 8 MiB do not fit */
        alarm(20);
        setrlimit(RLIMIT_AS, &little);
        dspark_status st = dspark__threads_create(&t, 64, NULL, NULL, &err);
        _exit(st == DSPARK_ENOMEM && !t && strstr(err.message, " more threads") ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* ---- digest -------------------------------------------------------------------------------- */

static void test_digest(void **state)
{
    char whole[33], parts[33];
    unsigned char data[5000];
    dspark__digest d;
    (void)state;

    dspark__digest_init(&d);
    dspark__digest_hex(&d, whole);
    assert_string_equal(whole, "99aa06d3014798d86001c324468d497f"); /* XXH3-128 of nothing */
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i * 7 + i / 256);
    dspark__digest_init(&d);
    dspark__digest_update(&d, data, sizeof data);
    dspark__digest_hex(&d, whole);
    dspark__digest_init(&d);
    for (size_t at = 0, step = 1; at < sizeof data; at += step, step = step * 3 % 1021) {
        if (step > sizeof data - at) step = sizeof data - at;
        dspark__digest_update(&d, data + at, step);
        dspark__digest_update(&d, NULL, 0);
    }
    dspark__digest_hex(&d, parts);
    assert_string_equal(whole, parts);
    data[4999] ^= 1;
    dspark__digest_init(&d);
    dspark__digest_update(&d, data, sizeof data);
    dspark__digest_hex(&d, parts);
    assert_string_not_equal(whole, parts);
    assert_int_not_equal(dspark__hash64("a", 1, 1), dspark__hash64("a", 1, 2));
}

/* ---- the supports of other tests ----------------------------------------------------------- */

static int dies_writing(volatile unsigned char *p)
{
    pid_t child = fork();
    if (child == 0) {
        close(2);                 /* a sanitizer's report of the expected crash */
        signal(SIGSEGV, SIG_DFL); /* cmocka would go on with the next test */
        signal(SIGBUS, SIG_DFL);
        *p = 1;
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_guard_pages(void **state)
{
    static const size_t sizes[] = {0, 1, 4095, 4096, 4097};
    (void)state;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        guard e = guard_end(sizes[i]), s = guard_start(sizes[i]);
        if (sizes[i]) e.p[0] = e.p[sizes[i] - 1] = s.p[0] = s.p[sizes[i] - 1] = 0;
        assert_true(dies_writing(e.p + sizes[i]));
        assert_true(dies_writing(s.p - 1));
        guard_free(&e);
        guard_free(&s);
    }
}

static void test_failing_allocations(void **state)
{
    (void)state;
    if (!oom_available()) skip();
    void *volatile p[4];
    void *q = &q;
    oom_fail_nth(2);
    for (int i = 0; i < 4; i++) p[i] = malloc(10);
    assert_int_equal(oom_stop(), 4);
    assert_int_equal(oom_failed(), 1);
    for (int i = 0; i < 4; i++) {
        assert_true((p[i] == NULL) == (i == 1));
        free(p[i]);
    }
    oom_fail_from(1);
    p[0] = calloc(3, 4);
    p[1] = aligned_alloc(64, 64);
    p[2] = strdup("x");
    p[3] = realloc(NULL, 5);
    int refused = posix_memalign(&q, 64, 64);
    size_t n = oom_stop();
    for (int i = 0; i < 4; i++) assert_null(p[i]);
    assert_int_equal(refused, ENOMEM);
    assert_ptr_equal(q, &q);
    assert_int_equal(n, 5);
    assert_int_equal(oom_failed(), 5);

    /* Calls from inside shared libraries count too. */
    char *text = NULL;
    oom_fail_nth(1);
    int printed = asprintf(&text, "%d", 7);
    assert_int_equal(oom_stop() > 0, 1);
    assert_int_equal(printed, -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error_texts),
        cmocka_unit_test(test_error_texts_are_cut_between_characters),
        cmocka_unit_test(test_utf8),
        cmocka_unit_test(test_checked),
        cmocka_unit_test(test_alloc),
        cmocka_unit_test(test_alloc_takes_no_old_pages),
        cmocka_unit_test(test_workspace_total),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_threads_call_each_once),
        cmocka_unit_test(test_threads_restore_environment),
        cmocka_unit_test(test_threads_do_not_allocate),
        cmocka_unit_test(test_threads_host_hook),
        cmocka_unit_test(test_threads_are_not_all_started),
        cmocka_unit_test(test_threads_out_of_memory),
        cmocka_unit_test(test_threads_refused_by_the_system),
        cmocka_unit_test(test_digest),
        cmocka_unit_test(test_guard_pages),
        cmocka_unit_test(test_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
