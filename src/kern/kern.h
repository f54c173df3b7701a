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

/* ---- packed codes --------------------------------------------------------------------------------
 *
 * A quantised weight stays packed: panels of codes, expanded to a small block of bf16 panel just
 * before gemm_bf16 reads it. Every expanded weight is exact in bf16, so how large the block is cannot
 * be seen in a result. Layouts, for 48 outputs and k padded with codes of value 0 to a multiple of 8:
 *
 *   8 bits: [pair][48][2] bytes: the bf16 panel's order, one byte a weight (96 bytes a pair)
 *   4 bits: [k/8][3][32] words of 16 bits: word i of register v holds, nibble j (low first), the
 *           weight of pair 4g+j, output 16v + i/2, element i%2 (192 bytes for 8 values of k)
 *
 * scales (when scale != NONE): [ceil(k / block)][48] bytes, one for `block` values of k of an output. */
typedef enum dspark__code_scale {
    DSPARK__CODE_PLAIN = 0,   /* weight = table[code] */
    DSPARK__CODE_E4M3 = 1,    /* weight = table[code] * e4m3fn(scale byte), scale finite and >= +0 */
    DSPARK__CODE_E8M0 = 2,    /* weight = table[code] * 2^(scale byte - 127), byte != 255 */
    DSPARK__CODE_OFFSET = 3   /* weight = table[code] - (int8_t)scale byte: integers, |weight| <= 256 */
} dspark__code_scale;

typedef struct dspark__code_format {
    uint32_t bits;            /* 8 or 4 */
    dspark__code_scale scale;
    uint32_t block;           /* values of k per scale byte: a positive multiple of 8; 0 when plain */
    uint16_t table[256];      /* code -> bf16; 16 entries when bits == 4 */
} dspark__code_format;

/* Bytes of codes of one panel, and of scales. */
static inline size_t dspark__code_panel_bytes(const dspark__code_format *f, size_t k)
{
    return (k + 7) / 8 * (f->bits == 8 ? 4 * 96 : 192);
}

static inline size_t dspark__code_scale_bytes(const dspark__code_format *f, size_t k)
{
    return f->scale == DSPARK__CODE_PLAIN ? 0 : (k + f->block - 1) / f->block * DSPARK__PANEL;
}

/* A panel of codes times x[n_rows][k], all of k at once, without the way through memory that decode
 * and gemm_bf16 take; the bits are theirs. */
typedef struct dspark__dot_codes {
    const void *x;             /* bf16, row i at x + i * x_stride */
    size_t x_stride;           /* bytes */
    size_t n_rows;
    const uint8_t *codes;      /* the panel's, as for decode */
    const uint8_t *scales;
    const dspark__code_format *format;
    size_t k;                  /* >= 1 */
    size_t group;              /* K-groups: a multiple of 8 values of k; or 0 */
    const float *group_scales; /* [ceil(k / group)][48] */
    float *acc;                /* [n_rows][48] finished sums; with K-groups as scale_add makes them */
} dspark__dot_codes;

typedef struct dspark__kern {
    dspark_isa isa;
    /* By dspark__code_scale: the most rows for which dot_codes is the faster way for codes of 4 bits, as
     * measured (bench/codes_bench.c); 0: never. */
    uint32_t dot_rows[4];

    void (*gemm_bf16)(const dspark__gemm_bf16 *g);

    /* Expand values k0 .. k0+n_k-1 of one panel to bf16 panel order, [ceil(n_k/2)][48][2] at w
     * (64-byte aligned). codes and scales are the whole panel's (64-byte aligned codes, scales any);
     * k0 is a multiple of 8, and n_k too unless it ends the panel (then the padding's codes are
     * expanded too: w has room for n_k rounded up to 8). The product with a scale is one fp32
     * multiplication, exact before it is cut to bf16; a product that is subnormal becomes 0 of its
     * sign, one beyond the range infinity; NaN and infinity in the table stay as they are. A table
     * holds only quiet NaNs, and no infinity when the scale is e4m3 (which can be 0).
     * Fast while w stays in L1: n_k of about 128. Tables in which bit 7 is the sign (NaN may lack
     * it) or in two's complement are the fast ones of 8 bits. */
    void (*decode)(uint16_t *w, const uint8_t *codes, const uint8_t *scales,
                   const dspark__code_format *f, size_t k0, size_t n_k);

    /* decode and gemm_bf16 of a few rows in one; see dspark__dot_codes. */
    void (*dot_codes)(const dspark__dot_codes *d);

    /* sum[i][j] = acc[i][j] * s[j] when first, else fma(acc[i][j], s[j], sum[i][j]), for n_rows rows of
     * 48 (one K-group has been accumulated in acc; s is its scale per output). IEEE, subnormals kept. */
    void (*scale_add)(float *sum, const float *acc, const float *s, size_t n_rows, int first);

    /* gemm_bf16 of one panel whose k is one K-group after the other, and scale_add of each with its row
     * of scales [ceil(k / group)][48]; group is even. sum is [n_rows][48] and starts anew when g->first.
     * Of g, x, x_stride, n_rows, panels, k and first count; acc is scratch of [n_rows][48]. */
    void (*gemm_groups)(const dspark__gemm_bf16 *g, size_t group, const float *scales, float *sum);

    /* out[i][o] = bf16(acc[i][o] * s[o]) for o < n_out <= 48 (s may be NULL: 1); NaN -> 0x7fc0. */
    void (*finish)(uint16_t *out, size_t out_stride, const float *acc, const float *s, size_t n_rows,
                   size_t n_out);

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
/* Not a level: the slots of both AVX-512 levels that gain from VBMI, which a machine has or lacks
 * whatever its level. dspark__kern_select asks. */
void dspark__kern_avx512vbmi(dspark__kern *k);

/* Pack rows [0, n_rows) of a row-major bf16 weight [n_rows, k] (any alignment) into consecutive
 * panels. Plain data movement, the same at every level. */
void dspark__pack_bf16(uint16_t *panels, const void *w, size_t n_rows, size_t k);

#endif
