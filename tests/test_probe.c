/* The probes of the machine's limits: every size and number of threads gives a number, no byte behind the buffer is
 * touched, wrong arguments are named. What the numbers are is not tested. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "dspark/dspark.h"
#include "support/guard.h"

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
        cmocka_unit_test(test_read_stays_inside), cmocka_unit_test(test_compute), cmocka_unit_test(test_arguments)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
