/* Sine and cosine in double by IEEE operations only, no libm result among them: the same bits on every machine.
 * The constants are here because the vector levels repeat them lane by lane. Round to nearest is assumed
 * (base/fpenv.h). */
#ifndef DSPARK_BASE_SINCOS_H
#define DSPARK_BASE_SINCOS_H

/* pi/2 as three doubles, and what a number of quarter turns comes from. */
#define DSPARK__QUARTER_1 1.5707963267948966
#define DSPARK__QUARTER_2 6.123233995736766e-17
#define DSPARK__QUARTER_3 (-1.4973849048591833e-33)
#define DSPARK__QUARTERS  (2 / 3.14159265358979323846)

/* Taylor polynomials on |r| <= pi/4, with z = r * r, lowest power first; the first term left out is below 1e-19.
 * sin = r + r * z * (S0 + z * (S1 + ..)),  cos = 1 - (0.5 * z - z * z * (C0 + z * (C1 + ..))) */
#define DSPARK__SINCOS_TERMS 8
#define DSPARK__SIN_TERMS {-1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, \
                           1.0 / 6227020800, -1.0 / 1307674368000, 1.0 / 355687428096000}
#define DSPARK__COS_TERMS {1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600, \
                           -1.0 / 87178291200, 1.0 / 20922789888000, -1.0 / 6402373705728000}

/* Of any |x| < 2^31 to about 1e-16. */
void dspark__sincos(double x, double *sin, double *cos);

#endif
