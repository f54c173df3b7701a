/* compare_values: how far the values of two caches' entries are apart: root mean square, largest, and
 * relative to the first one's. A NaN or an infinity has no distance: it is counted and left out. Reads
 * what it is given; prints nothing. */
#include "compare_values.h"

#include <math.h>
#include <string.h>

#include "numbers.h"

static void fill_tables(value_tables *t)
{
    int code;
    for (code = 0; code < 256; code++) {
        const int magnitude = code & 0x7f;
        const double sign = code & 0x80 ? -1 : 1;
        t->codes[0][code] = magnitude == 0x7f ? (double)NAN
                                              : sign * number_fp8(DSPARK_F8_E4M3, magnitude);
        t->codes[1][code] = magnitude > 0x7c    ? (double)NAN
                            : magnitude == 0x7c ? sign * (double)INFINITY
                                                : sign * number_fp8(DSPARK_F8_E5M2, magnitude);
    }
    t->ready = 1;
}

static double value_at(const value_tables *tables, const value_view *v, size_t i)
{
    float f;
    switch (v->form) {
    case VALUE_BF16: return number_bf16(v->bytes + 2 * i) * v->scale;
    case VALUE_E4M3: return tables->codes[0][v->bytes[i]] * v->scale;
    case VALUE_E5M2: return tables->codes[1][v->bytes[i]] * v->scale;
    default: break;
    }
    memcpy(&f, v->bytes + 4 * i, sizeof f);
    return (double)f * v->scale;
}

void value_error_add(value_error *e, value_tables *tables, value_view a, value_view b, size_t n)
{
    size_t i;
    if (!tables->ready) fill_tables(tables);
    for (i = 0; i < n; i++) {
        const double x = value_at(tables, &a, i), y = value_at(tables, &b, i);
        const double error = fabs(y - x);
        if (!isfinite(x) || !isfinite(y)) {
            e->n_not_finite++;
            continue;
        }
        e->n++;
        if (error > e->max_abs) e->max_abs = error;
        e->error_squares += error * error;
        e->squares += x * x;
    }
}

double value_error_rms(const value_error *e)
{
    return e->n ? sqrt(e->error_squares / (double)e->n) : (double)NAN;
}

double value_error_relative(const value_error *e)
{
    if (!e->n) return (double)NAN;
    if (!(e->error_squares > 0)) return 0;
    return e->squares > 0 ? sqrt(e->error_squares / e->squares) : (double)NAN;
}
