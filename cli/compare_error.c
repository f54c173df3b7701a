/* compare_error: how far bf16 entries are from fp64, in absolute terms, in units of the last place
 * and as root mean square. Reads what it is given; never runs a model and prints nothing. */
#include "compare_error.h"

#include <math.h>
#include <string.h>

#include "numbers.h"

/* 8 significant bits, fixed below 2^-126. */
double error_bf16_ulp(double x)
{
    int exponent;
    if (x == 0) return ldexp(1, -133);
    frexp(x, &exponent);
    return ldexp(1, (exponent < -125 ? -125 : exponent) - 8);
}

void error_measure(error_stats *out, const void *entries, const double *exact, uint64_t n,
                   size_t width, size_t from, size_t to)
{
    double error_squares = 0, squares = 0;
    uint64_t i;
    size_t k;
    memset(out, 0, sizeof *out);
    for (i = 0; i < n; i++, exact += width) {
        const unsigned char *entry = (const unsigned char *)entries + (size_t)i * width * 2;
        double entry_squares = 0, rms;
        for (k = from; k < to; k++) entry_squares += exact[k] * exact[k];
        rms = sqrt(entry_squares / (double)(to - from));
        squares += entry_squares;
        for (k = from; k < to; k++) {
            double error = fabs(number_bf16(entry + 2 * k) - exact[k]);
            double ulp = error / error_bf16_ulp(fmax(fabs(exact[k]), rms));
            if (!(error <= out->max_abs)) out->max_abs = error;
            if (!(ulp <= out->max_ulp)) out->max_ulp = ulp;
            error_squares += error * error;
        }
    }
    out->rms_rel = squares > 0 ? sqrt(error_squares / squares) : 0;
}
