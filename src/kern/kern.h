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

/* Where many weights have few rows, a last panel of 48 would be a good part of what is read. It may be
 * narrow instead: [ceil(k/2)][16 or 32][2]. This is how wide it is for so many rows; 0: not narrow. */
static inline size_t dspark__narrow_width(size_t rows)
{
    const size_t left = rows % DSPARK__PANEL;
    return left > 32 ? 0 : (left + 15) / 16 * 16;
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
    size_t narrow;            /* outputs that the last of these panels is wide, when first and last; 0: 48 */
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
 *   4 bits under e4m3 scales, turned, so that bytes are looked up as they are: [k/8][3][16] words of 32
 *           bits, each rotated left by 3. Before that, byte b (low first) of word i of register v holds the
 *           weights of pairs 4g + i%4/2*2 (low nibble) and the next (high nibble), output 16v + i/4*4 +
 *           i%2*2 + b/2, element b%2
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

static inline int dspark__codes_are_turned(const dspark__code_format *f)
{
    return f->bits == 4 && f->scale == DSPARK__CODE_E4M3;
}

/* Bytes of codes of one panel, and of scales. */
static inline size_t dspark__code_panel_bytes(const dspark__code_format *f, size_t k)
{
    return (k + 7) / 8 * (f->bits == 8 ? 4 * 96 : 192);
}

static inline size_t dspark__code_scale_bytes(const dspark__code_format *f, size_t k)
{
    return f->scale == DSPARK__CODE_PLAIN ? 0 : (k + f->block - 1) / f->block * DSPARK__PANEL;
}

/* Panels of codes times x[n_rows][k], all of k at once, without the way through memory that decode
 * and gemm_bf16 take; the bits are theirs. Codes whose entry of the table is NaN or infinite do not
 * occur (packing refuses them). */
typedef struct dspark__dot_codes {
    const void *x;             /* bf16, row i at x + i * x_stride */
    size_t x_stride;           /* bytes */
    size_t n_rows;
    const uint8_t *codes;      /* of the first panel, as for decode */
    const uint8_t *scales;
    size_t n_panels;
    size_t code_stride, scale_stride; /* bytes from one panel to the next; the first a multiple of 64 */
    const dspark__code_format *format;
    size_t k;                  /* >= 1 */
    size_t group;              /* K-groups: a multiple of 8 values of k; or 0 */
    const float *group_scales; /* [ceil(k / group)][48] of the first panel */
    size_t group_stride;       /* floats from one panel to the next */
    float *acc;                /* [n_panels][n_rows][48] finished sums, 64-byte aligned; with K-groups
                                * as scale_add makes them */
} dspark__dot_codes;

/* ---- attention over pieces ---------------------------------------------------------------------
 *
 * Entries of the latent cache are attended to in pieces of 240: five panels of 48, so that scores and
 * values are products of gemm_bf16 (docs/numerics.md section 11). A piece with fewer entries is
 * filled up with zeros. */
#define DSPARK__PIECE 240u
#define DSPARK__PIECE_PANELS (DSPARK__PIECE / DSPARK__PANEL)

/* One piece of the online softmax for n_rows query rows, each by itself. For row i, with v = n_valid[i]:
 *   s_j = scores_j * scale         j < v; one fp32 product
 *   M   = max(m[i], s_0 .. s_v-1) + 0     a NaN among s does not take part, +0 makes a zero positive
 *   a[i] = E(m[i] - M);  p_j = E(s_j - M) for j < v, else +0        E = dspark__exp_f32
 *   l[i] = fma(l[i], a[i], sum_j p_j);  m[i] = M
 * sum: 16 lanes from +0, lane t takes p_t, p_16+t, .. in order by addition, merged 8+8, 4+4, 2+2, 1+1.
 * v == 0: m and l stay as they are and a = 1. Before the first piece m is -infinity and l is 0.
 * A score that is NaN or +infinity, or a row that has nothing but -infinity so far, gives a p and so
 * an l that is NaN (0x7fc00000), and l stays NaN in later pieces: who finds m and l finite after the
 * last piece had no such score. */
typedef struct dspark__softmax_piece {
    const float *scores;      /* [panels][n_rows][48], 64-byte aligned: gemm_bf16's acc. Only entries
                               * below n_valid count; panels without any are not read */
    size_t n_rows;            /* >= 0 */
    const uint32_t *n_valid;  /* [n_rows], each <= 240 */
    float scale;
    float *m, *l;             /* [n_rows] state, in and out */
    float *a;                 /* [n_rows] out: the factor of scale_rows */
    uint16_t *p;              /* [n_rows][240] out, bf16: x of the product with the V panels */
} dspark__softmax_piece;

/* Up to 240 entries of n_latent + n_rope bf16 values, gathered into the panels of both products. All
 * 240 places are written; missing entries, and what follows an odd last value, are zero. A caller
 * may run gemm_bf16 over fewer (n_panels of K, k of V cut to n_entries): attend_finish makes that
 * invisible. */
typedef struct dspark__pack_entries {
    const void *const *entries; /* [n_entries] bf16 rows, any alignment */
    size_t n_entries;         /* <= 240 */
    size_t n_latent, n_rope;  /* values of an entry: latent, then rope key; any widths */
    uint16_t *k_panels;       /* [5][ceil((n_latent + n_rope) / 2)][48][2], 64-byte aligned: an output
                               * is an entry, k runs over its values; or NULL: not wanted */
    uint16_t *v_panels;       /* [ceil(n_latent / 48)][120][48][2], 64-byte aligned: an output is a
                               * latent value, k runs over entries; or NULL: not wanted */
} dspark__pack_entries;

static inline size_t dspark__k_panels_elements(size_t n_latent, size_t n_rope)
{
    return DSPARK__PIECE_PANELS * dspark__panel_elements(n_latent + n_rope);
}

static inline size_t dspark__v_panels_elements(size_t n_latent)
{
    return (n_latent + DSPARK__PANEL - 1) / DSPARK__PANEL * dspark__panel_elements(DSPARK__PIECE);
}

/* The same attention in three calls, for a level that has better than those kernels: begin, then each
 * piece in order, then end. n_latent + n_rope is even. The bits are theirs. */
typedef struct dspark__attend {
    const void *query;        /* bf16 [n_rows][n_latent + n_rope], row i at query + i * query_stride */
    size_t query_stride;      /* bytes */
    size_t n_rows, n_latent, n_rope;
    float scale;
    void *memory;             /* dspark__attend_bytes, 64-byte aligned; state between the calls */
} dspark__attend;

typedef struct dspark__attend_entries {
    const void *const *entries; /* [n] bf16 rows, any alignment */
    size_t n;                 /* 1 to 240 */
    const uint32_t *n_valid;  /* [n_rows], each <= n */
    int first;                /* the first piece */
    const void *const *next;  /* [n_next] rows of next_bytes worth fetching meanwhile: a hint */
    size_t n_next, next_bytes;
} dspark__attend_entries;

static inline size_t dspark__attend_bytes(size_t n_rows, size_t n_latent, size_t n_rope)
{
    const size_t lanes = (n_rows + 15) / 16 * 16, latents = (n_latent + 15) / 16;
    size_t state = lanes * ((n_latent + n_rope) * 2 + latents * 64 + 16); /* queries, sums, m, l, a, n */
    return state + DSPARK__PIECE / 2 * 64 * (4 + 8 + lanes / 16 + lanes / 64 + 1); /* values, scores, p */
}

/* ---- bounds of the Markov bias -----------------------------------------------------------------
 *
 * For each row of W2 a step, codes of 4 bits and three norms are kept, so that the largest logit can be
 * found without reading most of W2 (docs/numerics.md section 12). A panel of 48 rows:
 *
 *   step, residual, norm   bf16 [48] each, >= +0 and finite, filled up to DSPARK__BOUND_HEAD bytes
 *   codes                  [k/8][48] words of 32 bits: bits 0-3 of byte j are element j of the eight, bits
 *                          4-7 element 4 + j; a code c stands for step * (2c - 15) */
#define DSPARK__BOUND_HEAD 320u

typedef struct dspark__bound_panels {
    const unsigned char *panels; /* n_panels from here, 64-byte aligned */
    size_t stride;               /* bytes from one to the next, a multiple of 64 */
    size_t n_panels;
    size_t k;                    /* a multiple of 8 */
    const int8_t *x;             /* [k] */
    int32_t offset;              /* 15 times the sum of x */
    float step;                  /* of x */
    float residual, norm, slack; /* what the rows' residuals and norms are multiplied by, and what is added */
    float reach;                 /* as norm, when the codes are not looked at */
    float scale;                 /* logit scale, > 0 */
    float floor;                 /* panels that stay below it by their norms alone are not looked into */
    const uint16_t *base;        /* [n_out] bf16 without NaN, any alignment */
    size_t n_out;                /* <= 48 * n_panels, > 48 * (n_panels - 1) */
    float *upper;                /* [n_panels] out */
} dspark__bound_panels;

/* A panel of a bf16 weight and the digests of its rows in one pass, while the rows that come next are fetched. */
typedef struct dspark__pack_digest {
    uint16_t *panel;
    const void *rows;            /* n_rows <= 48 of k values, `stride` bytes from row to row */
    size_t stride, n_rows, k;
    unsigned char (*digests)[16]; /* [n_rows], as digest_rows has them */
    const void *next;            /* as many rows of which a part is worth fetching meanwhile, or NULL: a hint */
} dspark__pack_digest;

/* What argmax returns when there is no largest element: a NaN is among them, or there is none. */
#define DSPARK__NO_ARGMAX SIZE_MAX

typedef struct dspark__kern {
    dspark_isa isa;
    /* [bits == 8][dspark__code_scale]: the most rows for which dot_codes is the faster way, as measured
     * (bench/codes_bench.c); 0: never. */
    uint32_t dot_rows[2][4];

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

    /* decode and gemm_bf16 in one; see dspark__dot_codes. */
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

    /* cos[j], sin[j] for j < n of the fp32 product position * f[j]: in double by dspark__sincos, rounded once,
     * times attn in fp32. Both are written as far as n only. */
    void (*rope_angles)(float *cos, float *sin, const float *f, size_t n, float position, float attn);

    /* Interleaved pairs: y[2j] = bf16(x[2j]*c[j] - x[2j+1]*s[j]), y[2j+1] = bf16(x[2j+1]*c[j] +
     * x[2j]*s[j]); each product and sum is rounded (no fused multiply-add). y may be x. */
    void (*rope_bf16)(uint16_t *y, const void *x, const float *c, const float *s, size_t n_pairs);

    /* y = fp8(x / scale), IEEE fp32 division, saturating, NaN -> 0x7f (numfmt.h). */
    void (*fp8_e4m3)(uint8_t *y, const uint16_t *x, size_t n, float scale);
    void (*fp8_e5m2)(uint8_t *y, const uint16_t *x, size_t n, float scale);

    /* Largest |x| as fp32; 0 for n == 0. x is finite. */
    float (*absmax_bf16)(const void *x, size_t n);

    /* 1 when no element is NaN or infinite. */
    int (*finite_bf16)(const void *x, size_t n);

    /* ---- attention and heads ---- */

    void (*softmax_piece)(const dspark__softmax_piece *s);

    /* acc[p][i][j] *= a[i] for acc [n_panels][n_rows][48], 64-byte aligned; rows with a[i] == 1 are not
     * touched. A product that is subnormal becomes 0 of its sign: gemm_bf16 goes on with acc, whose
     * accumulators are never subnormal. */
    void (*scale_rows)(float *acc, const float *a, size_t n_panels, size_t n_rows);

    /* out[i][o] = bf16(acc[i][o] / l[i] + 0) for o < n_out, out of acc [ceil(n_out / 48)][n_rows][48],
     * 64-byte aligned. One IEEE division; + 0 makes a zero positive, so that the places of entries that
     * are missing or masked cannot be seen. out: any alignment, out_stride in elements. */
    void (*attend_finish)(uint16_t *out, size_t out_stride, const float *acc, const float *l,
                          size_t n_rows, size_t n_out);

    void (*pack_entries)(const dspark__pack_entries *p);

    /* One panel of a bf16 weight: n_rows <= 48 rows of k values, `stride` bytes from row to row, stored
     * past the caches where the level can. 1 when every value is finite; the panel is written whole
     * either way. */
    int (*pack_panel)(uint16_t *panel, const void *w, size_t stride, size_t n_rows, size_t k);

    /* dspark__digest_bytes of n_rows rows of n bytes, `stride` apart. */
    void (*digest_rows)(unsigned char (*digests)[16], const void *rows, size_t stride, size_t n_rows, size_t n);
    /* Whole panels of 48 rows of k codes, `bits` 8 or 4 each (nibbles, low first), each xored with `flip`: writes
     * the first places of the panel, past the caches, and returns how many, a multiple of 64 up to k; the rest is
     * the caller's. turned: 4 bits in the layout of e4m3 scales. NULL where a level has nothing better than
     * quant/layout.c. */
    size_t (*pack_codes)(uint8_t *panel, const void *rows, size_t stride, size_t k, uint32_t bits, uint8_t flip,
                         int turned);
    /* pack_panel and digest_rows of the same rows at once; NULL where that is not better than one after the
     * other. */
    int (*pack_digest)(const dspark__pack_digest *p);

    /* NULL, all three, where a level has nothing better than the kernels above. end: row i to out +
     * i * out_stride (elements), any alignment. */
    void (*attend_begin)(const dspark__attend *t);
    void (*attend_piece)(const dspark__attend *t, const dspark__attend_entries *e);
    void (*attend_end)(const dspark__attend *t, uint16_t *out, size_t out_stride);

    /* y = bf16(value(code) * scale): the fp32 product of fp8 code and scale, rounded once more. */
    void (*e4m3_to_bf16)(uint16_t *y, const uint8_t *codes, size_t n, float scale);
    void (*e5m2_to_bf16)(uint16_t *y, const uint8_t *codes, size_t n, float scale);

    /* y = bf16(bf16(g / (1 + E(-g))) * u). y may be g or u. */
    void (*silu_mul)(uint16_t *y, const void *g, const void *u, size_t n);

    /* y = bf16(a + b). y may be a or b. */
    void (*add_bf16)(uint16_t *y, const void *a, const void *b, size_t n);

    /* sum of x[i] * w[i] + 0: 16 lanes, lane j takes elements 16i+j in order of i by fused
     * multiply-add from +0, merged as rmsnorm_bf16's sum is. NaN is 0x7fc00000, a zero positive. */
    float (*dot_lanes)(const void *x, const void *w, size_t n);

    /* The index of the largest element, the lowest one of equals (-0 equals +0); *best is its value (a
     * zero positive). DSPARK__NO_ARGMAX when a NaN is in the row, or n is 0; *best is NaN then.
     * Slices of a row are merged by: a later slice wins when its best is larger. */
    size_t (*argmax_bf16)(const void *x, size_t n, float *best);

    /* The same of bf16(a + b), which is stored nowhere. */
    size_t (*add_argmax_bf16)(const void *a, const void *b, size_t n, float *best);

    /* upper[p] = the largest of sum(v) + 0 over the panel's rows that exist, all fp32 and IEEE:
     *   sum(v) = bf16(base[v] + b(v)),  b(v) = bf16(u(v)), with scale != 1 then bf16(b(v) * scale)
     *   u(v) = fma(norm[v], reach, slack); when that upper[p] is below floor, it stays. Else
     *   u(v) = (float)(2 * codes[v] . x - offset) * (step[v] * step) + r(v)
     *   r(v) = fma(residual[v], residual, fma(norm[v], norm, slack))
     * Returns how many panels' codes were looked at. */
    size_t (*bound_panels)(const dspark__bound_panels *b);

    /* Making those codes, each lane a row of W2 and w[i] their elements i; all fp32 and IEEE, no fused operation.
     * bound_widen: n elements in panel order to w, subnormals as zero (n + 1 where n is odd). bound_turn: Hadamard's
     * matrix on every `turn` elements (a power of two that divides n): for half = 1, 2, 4 .. and i without that
     * bit, w[i], w[i + half] = w[i] + w[i + half], w[i] - w[i + half]; then squares += w[i] * w[i] in order of i.
     * bound_codes: code = (int)min(max(w * inverse + 8, 0), 15), rest = w - step * (2 * code - 15), left += rest * rest
     * in order of i; n is a multiple of 8, `to` has bound_panels' words. */
    void (*bound_widen)(float (*w)[DSPARK__PANEL], const uint16_t *from, size_t n);
    void (*bound_turn)(float (*w)[DSPARK__PANEL], size_t n, size_t turn, float *squares);
    void (*bound_codes)(unsigned char *to, const float (*w)[DSPARK__PANEL], size_t n, const float *inverse,
                        const float *step, float *left);

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
/* Not levels: the slots of both AVX-512 levels that gain from VBMI, which a machine has or lacks
 * whatever its level, and those of the second alone. dspark__kern_select asks. */
void dspark__kern_avx512vbmi(dspark__kern *k);
void dspark__kern_avx512bf16vbmi(dspark__kern *k);

/* Pack rows [0, n_rows) of a row-major bf16 weight [n_rows, k] (any alignment) into consecutive
 * panels. Plain data movement, the same at every level. */
void dspark__pack_bf16(uint16_t *panels, const void *w, size_t n_rows, size_t k);

#endif
