/* The kernel table: every arithmetic inner loop, one slot each. ref/ fills all slots and is the
 * specification; the other levels override slots and must equal ref bit for bit (docs/numerics.md).
 *
 * A kernel is a pure function: no allocation, no threads, no globals, no over-read and no
 * over-write. It runs under the environment of base/fpenv.h. All bf16 pointers take any alignment
 * except `panels` (64 bytes) and `acc` (64 bytes). */
#ifndef DSPARK_KERN_KERN_H
#define DSPARK_KERN_KERN_H

#include "dspark/dspark.h"

/* Outputs in one packed panel: three 512-bit registers of fp32. 48 divides 576, 1536, 2112 and
 * 2880. */
#define DSPARK__PANEL 48u

/* A packed bf16 weight [rows, k]: panel p holds outputs 48p .. 48p+47 as [ceil(k/2)][48][2] bf16
 * (missing outputs and the odd last k are zero). One layout for every level. */
static inline size_t dspark__panel_elements(size_t k)
{
    return (k + 1) / 2 * DSPARK__PANEL * 2;
}

/* x[n_rows][k] times n_panels panels. Output (row i, panel p, lane j) is one fp32 accumulator fed
 * in order of k as the bf16 dot instruction does: per pair the odd element's fused multiply-add,
 * then the even element's, with subnormal inputs, accumulators and results flushed to signed zero.
 * A result is flushed when, rounded to 24 bits without a lower limit of the exponent, it lies below
 * 2^-126 (as x86 does it); next to 2^-126 that is more than "the rounded result is subnormal". */
typedef struct dspark__gemm_bf16 {
    const void *x;            /* bf16, row i at x + i * x_stride */
    size_t x_stride;          /* bytes */
    size_t n_rows;            /* >= 0 */
    const uint16_t *panels;   /* first panel, advanced to this block of k (an even offset) */
    size_t panel_stride;      /* elements from one panel to the next */
    size_t n_panels;          /* >= 0 */
    size_t k;                 /* elements of k in this call; odd only in the last block */
    float *acc;               /* [n_panels][n_rows][48] partial sums between blocks of k; may be
                               * NULL when first and last, and may be overwritten then */
    int first;                /* start from zero instead of acc */
    int last;                 /* round to bf16 into out instead of storing acc; NaN -> 0x7fc0 */
    uint16_t *out;            /* row i, output o at out + i * out_stride + o; used when last */
    size_t out_stride;        /* elements */
    size_t n_out;             /* outputs that exist: <= n_panels * 48; the others are not stored */
    const void *prefetch;     /* bytes worth fetching while this runs (the next block), or NULL */
    size_t prefetch_bytes;
} dspark__gemm_bf16;

typedef struct dspark__kern {
    dspark_isa isa;

    void (*gemm_bf16)(const dspark__gemm_bf16 *g);

    /* y = bf16((x * r) * w), r = 1 / sqrt(sum / n + eps), all fp32, IEEE division and root. sum has
     * 16 lanes: lane j takes elements 16i+j in order of i by fused multiply-add (missing ones are
     * 0), lanes are merged as 8+8, 4+4, 2+2, 1+1 (lane j += lane j+8, ...). Returns sum (every NaN
     * as 0x7fc00000). y may be x. */
    float (*rmsnorm_bf16)(uint16_t *y, const void *x, const void *w, size_t n, float eps);

    /* Interleaved pairs: y[2j] = bf16(x[2j]*c[j] - x[2j+1]*s[j]), y[2j+1] = bf16(x[2j+1]*c[j] +
     * x[2j]*s[j]); each product and sum is rounded (no fused multiply-add). y may be x. */
    void (*rope_bf16)(uint16_t *y, const void *x, const float *c, const float *s, size_t n_pairs);

    /* y = fp8(x / scale), IEEE fp32 division, saturating, NaN -> 0x7f (numfmt.h). */
    void (*fp8_e4m3)(uint8_t *y, const uint16_t *x, size_t n, float scale);
    void (*fp8_e5m2)(uint8_t *y, const uint16_t *x, size_t n, float scale);

    /* Largest |x| as fp32; 0 for n == 0. x is finite. */
    float (*absmax_bf16)(const uint16_t *x, size_t n);

    /* 1 when no element is NaN or infinite. */
    int (*finite_bf16)(const void *x, size_t n);

    /* Run the level's best multiply-add on registers for about `iterations` rounds; returns the
     * floating-point operations done. For the roofline only. */
    double (*probe_flops)(uint64_t iterations);
} dspark__kern;

/* Does this machine run the level? CPU flags and operating system state (XCR0), read once. */
int dspark__isa_available(dspark_isa isa);
dspark_isa dspark__isa_best(void);
/* "auto", "ref", "avx2", "avx512", "avx512bf16"; "?" for an unknown value. */
const char *dspark__isa_name(dspark_isa isa);

/* Fill *k for `isa` (AUTO = best). DSPARK_EUNSUPPORTED when the machine or the build lacks it. */
dspark_status dspark__kern_select(dspark__kern *k, dspark_isa isa, dspark_error *err);

/* Each level's own file. ref fills everything, the others override. */
void dspark__kern_ref(dspark__kern *k);
void dspark__kern_avx2(dspark__kern *k);
void dspark__kern_avx512(dspark__kern *k);
void dspark__kern_avx512bf16(dspark__kern *k);

/* Pack rows [0, n_rows) of a row-major bf16 weight [n_rows, k] (any alignment) into consecutive
 * panels. Plain data movement, the same at every level. */
void dspark__pack_bf16(uint16_t *panels, const void *w, size_t n_rows, size_t k);

#endif
