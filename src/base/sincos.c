/* Our own sine and cosine: docs/numerics.md as C; kern/ repeats them in vectors and must equal them bit for bit. */
#include "base/sincos.h"

#include <math.h>

static double polynomial(const double terms[DSPARK__SINCOS_TERMS], double z)
{
    double s = terms[DSPARK__SINCOS_TERMS - 1];
    for (int i = DSPARK__SINCOS_TERMS - 2; i >= 0; i--) s = s * z + terms[i];
    return s;
}

void dspark__sincos(double x, double *sin, double *cos)
{
    static const double sin_terms[] = DSPARK__SIN_TERMS, cos_terms[] = DSPARK__COS_TERMS;
    /* k * first part leaves x exactly under a fused multiply-add, because x is an fp32 number here and k is
     * small. */
    double k = rint(x * DSPARK__QUARTERS);
    double r = fma(-k, DSPARK__QUARTER_3, fma(-k, DSPARK__QUARTER_2, fma(-k, DSPARK__QUARTER_1, x)));
    double z = r * r;
    double s = r + r * z * polynomial(sin_terms, z);
    double c = 1 - (0.5 * z - z * z * polynomial(cos_terms, z));
    switch ((long long)k & 3) {
    case 0: *sin = s; *cos = c; break;
    case 1: *sin = c; *cos = -s; break;
    case 2: *sin = -s; *cos = -c; break;
    default: *sin = -c; *cos = s; break;
    }
}
