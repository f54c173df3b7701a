/* The probes of the machine's limits: every size and number of threads gives a number, no byte behind the buffer is
 * touched, wrong arguments are named. What the numbers are is not tested. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dspark/dspark.h"
#include "support/fixture.h"
#include "support/guard.h"
#include "support/oom.h"

static void test_read_stays_inside(void **state)
{
    static const size_t sizes[] = {64, 65, 127, 128, 4096, 4097, 100000, (2u << 20) - 1, (2u << 20) + 64,
                                   (4u << 20) + 4032};
    static const uint32_t threads[] = {1, 2, 3, 7};
    size_t i, t;
    (void)state;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        guard g = guard_end(sizes[i]); /* ends at a page that cannot be read */
        for (t = 0; t < sizeof threads / sizeof *threads; t++) {
            double gbs = -1;
            assert_int_equal(dspark_probe_read(threads[t], g.p, sizes[i], 1e-6, &gbs, NULL), DSPARK_OK);
            assert_true(gbs > 0 && gbs < 1e6);
        }
        guard_free(&g);
    }
}

static void test_compute(void **state)
{
    int isa;
    (void)state;
    for (isa = DSPARK_ISA_AUTO; isa <= DSPARK_ISA_AVX512BF16; isa++) {
        double gflops = -1;
        dspark_error err = {0};
        dspark_status st = dspark_probe_compute((dspark_isa)isa, 2, 1e-6, &gflops, &err);
        if (isa != DSPARK_ISA_AUTO && !dspark_isa_available((dspark_isa)isa)) {
            assert_int_equal(st, DSPARK_EUNSUPPORTED);
            assert_non_null(strstr(err.message, dspark_isa_name((dspark_isa)isa)));
        } else {
            assert_int_equal(st, DSPARK_OK);
            assert_true(gflops > 0 && gflops < 1e6);
        }
    }
}

/* One after the other on the calling thread: all but the first begin when the window is over. */
static void run_in_turn(void *user, void (*task)(void *context, size_t i), void *context, size_t n)
{
    size_t i;
    for (i = 0; i < n; i++) task(context, i);
    *(size_t *)user = n;
}

/* The context's own threads, in whatever number; the context works on as before. */
static void test_beside_a_call(void **state)
{
    static const uint32_t threads[] = {1, 2, 3, 40};
    static const double seconds[] = {-1, 0, 5e-5, NAN};
    size_t n_tasks = 0, t, i;
    dspark_parallel host = {&n_tasks, run_in_turn};
    dspark_context_opts opts;
    dspark_context *ctx;
    dspark_error err = {0};
    host_cache want, got;
    fixture f;
    (void)state;
    open_fixture(&f, NULL, 0);
    reference_run(&f, &want, DSPARK_CACHE_BF16, 40);
    for (t = 0; t < sizeof threads / sizeof *threads; t++) {
        ctx = open_context(&f, DSPARK_ISA_AUTO, threads[t], DSPARK_PATH_ONEPASS, 0);
        for (i = 0; i < sizeof seconds / sizeof *seconds; i++) {
            double gflops = -1;
            oom_count_start();
            check(dspark_context_probe(ctx, seconds[i], &gflops, &err), DSPARK_OK, &err);
            assert_int_equal(oom_stop(), 0);
            assert_true(gflops > 0 && gflops < 1e6);
        }
        open_cache(&got, &f, DSPARK_CACHE_BF16);
        run_rows(ctx, &f, &got, 40, 40);
        assert_memory_equal(got.memory, want.memory, want.bytes);
        free(got.memory);
        dspark_context_free(ctx);
    }
    free(want.memory);
    dspark_context_opts_init(&opts);
    opts.parallel = &host;
    opts.n_threads = 1000; /* no more tasks than processors: the others could not add to it */
    check(dspark_context_create(&ctx, f.model, &opts, &err), DSPARK_OK, &err);
    for (i = 0; i < 2; i++) {
        double gflops = -1;
        check(dspark_context_probe(ctx, 0, &gflops, &err), DSPARK_OK, &err);
        assert_true(gflops > 0);
        assert_true(n_tasks < 1000);
    }
    assert_int_equal(dspark_context_probe(ctx, 0, NULL, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_context_probe(NULL, 0, (double[]){0}, &err), DSPARK_EINVAL);
    dspark_context_free(ctx);
    close_fixture(&f);
}

static void test_arguments(void **state)
{
    unsigned char bytes[64] = {0};
    double number;
    dspark_error err = {0};
    (void)state;
    assert_int_equal(dspark_probe_read(1, NULL, 64, 0, &number, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_probe_read(1, bytes, 64, 0, NULL, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_probe_read(1, bytes, 63, 0, &number, &err), DSPARK_EINVAL);
    assert_string_equal(err.where, "n_bytes");
    assert_int_equal(dspark_probe_compute(DSPARK_ISA_REF, 1, 0, NULL, &err), DSPARK_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_read_stays_inside), cmocka_unit_test(test_compute),
        cmocka_unit_test(test_beside_a_call), cmocka_unit_test(test_arguments)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
