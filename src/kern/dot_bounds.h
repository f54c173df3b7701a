/* Bounds of a product whose weights go without the powers of two in their scales: the sums stand under the
 * power of the present row of scales, and are multiplied by a power of two when the next one comes. Every
 * level checks them with vectors of its own, and takes the plain way outside. Holds numbers only. */
#ifndef DSPARK_KERN_DOT_BOUNDS_H
#define DSPARK_KERN_DOT_BOUNDS_H

/* Rounding is the same under any power while every sum stays in the range: entries of the table are zero or
 * within 2^-NEAR .. 2^NEAR, powers of scales within 2^-POWERS .. 2^POWERS (e4m3's are), x zero or within
 * 2^-TAME_LOW .. 2^TAME_HIGH, and k at most 2^TAME_K. A weight is a multiple of 2^(-NEAR - 7 - POWERS) and
 * x of 2^(-TAME_LOW - 7), so every sum of products is a multiple of 2^-102, and of 2^-126 under another
 * power: none but 0 is subnormal. No sum is larger than 2^(16 + 24 + 40 + 20) times a rounding error, or
 * 2^124 under another power. */
enum { NEAR = 16, POWERS = 24, TAME_LOW = 48, TAME_HIGH = 40, TAME_K = 20 };

#endif
