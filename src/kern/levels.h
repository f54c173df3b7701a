/* Declarations shared by the files of one level, and small helpers on unaligned bf16 rows. Included
 * by files with different instruction set flags: nothing here may have external linkage and a
 * body. */
#ifndef DSPARK_KERN_LEVELS_H
#define DSPARK_KERN_LEVELS_H

#include "base/numfmt.h"
#include "kern/attr.h"
#include "kern/kern.h"

/* Element i of a bf16 row at any alignment. */
DSPARK__INLINE const unsigned char *bf16_at(const void *row, size_t i)
{
    return (const unsigned char *)row + 2 * i;
}

DSPARK__INLINE unsigned char *bf16_at_mut(void *row, size_t i)
{
    return (unsigned char *)row + 2 * i;
}

/* Outputs that panel p has room for. */
DSPARK__INLINE size_t panel_width(const dspark__gemm_bf16 *g, size_t p)
{
    return g->narrow && p + 1 == g->n_panels ? g->narrow : DSPARK__PANEL;
}

/* Outputs of panel p that exist. */
DSPARK__INLINE size_t panel_outputs(const dspark__gemm_bf16 *g, size_t p)
{
    size_t before = p * DSPARK__PANEL;
    if (before >= g->n_out) return 0;
    return g->n_out - before < DSPARK__PANEL ? g->n_out - before : DSPARK__PANEL;
}

/* Rows of the next tile when n_left rows remain and a tile takes at most `most`: as few tiles as
 * possible, of equal size, so that 9 rows are 5 + 4 and not 8 + 1. */
DSPARK__INLINE size_t tile_rows(size_t n_left, size_t most)
{
    size_t n_tiles = (n_left + most - 1) / most;
    return (n_left + n_tiles - 1) / n_tiles;
}

/* gemm_groups by two other slots of a level. */
DSPARK__INLINE void gemm_then_scale(const dspark__gemm_bf16 *g, size_t group, const float *scales,
                                    float *sum, void (*gemm)(const dspark__gemm_bf16 *g),
                                    void (*scale_add)(float *sum, const float *acc, const float *s,
                                                      size_t n_rows, int first))
{
    for (size_t k0 = 0; k0 < g->k; k0 += group, scales += DSPARK__PANEL) {
        dspark__gemm_bf16 one = {.x = bf16_at(g->x, k0), .x_stride = g->x_stride,
                                 .n_rows = g->n_rows, .panels = g->panels + k0 * DSPARK__PANEL,
                                 .n_panels = 1, .k = g->k - k0 < group ? g->k - k0 : group,
                                 .acc = g->acc, .first = 1};
        gemm(&one);
        scale_add(sum, g->acc, scales, g->n_rows, g->first && k0 == 0);
    }
}

/* Merge 16 partial sums as rmsnorm_bf16 defines it. */
DSPARK__INLINE float merge_lanes(float *lane)
{
    for (size_t width = 8; width > 0; width /= 2)
        for (size_t j = 0; j < width; j++) lane[j] += lane[j + width];
    return lane[0];
}

/* NaNs from different instructions differ in sign and payload; one bit pattern leaves a kernel. */
DSPARK__INLINE float canonical_nan(float f)
{
    return f != f ? dspark__f32_from_bits(0x7fc00000u) : f;
}

/* argmax orders bf16 by keys: the bits of a positive value; of a negative one with the magnitude
 * inverted, as a signed number. Back: fp32 bits of the value of a key. */
DSPARK__INLINE uint32_t order_value(int key)
{
    return ((uint32_t)(key < 0 ? key ^ 0x7fff : key) & 0xffffu) << 16;
}

/* Values are clamped to the largest finite one before rounding: what lies above would round or
 * saturate to it anyway. */
typedef struct fp8_format {
    uint32_t mantissa_bits;
    uint32_t max_bits;        /* fp32 bits of the largest finite value */
    uint32_t min_normal_bits; /* fp32 bits of the smallest normal value */
    uint32_t magic_bits;      /* fp32 bits of 2^23 subnormal units: adding it rounds to them */
    uint32_t rebias;          /* (127 - bias) << mantissa_bits */
} fp8_format;

static const fp8_format FP8_E4M3 = {3, 0x43e00000u, 0x3c800000u, 0x46800000u, 120u << 3};
static const fp8_format FP8_E5M2 = {2, 0x47600000u, 0x38800000u, 0x43000000u, 112u << 2};

/* fp8 codes to bf16, in 16-bit lanes: normal magnitudes are shifted and get another exponent, subnormal
 * ones are looked up. When the scale is a power of two that keeps all values normal, both hold it
 * already and nothing is left to multiply: the product is exact. */
typedef struct fp8_values {
    uint16_t small[8]; /* bf16 of magnitudes 0 .. 7; those of e4m3's or e5m2's subnormals count */
    int rebias;
    int exact;         /* the scale is in */
} fp8_values;

DSPARK__INLINE fp8_values fp8_prepare(fp8_format f, float scale)
{
    const uint32_t u = dspark__f32_bits(scale), exponent = u >> 23; /* of a positive scale */
    fp8_values v = {{0}, (int)(f.rebias << (7 - f.mantissa_bits)), 0};
    v.exact = (u & 0x7fffffu) == 0 && exponent > 27 && exponent < 227;
    int shift = v.exact ? (int)exponent - 127 : 0;
    for (uint32_t m = 1; m < 1u << f.mantissa_bits; m++) {
        int log2 = m >= 4 ? 2 : m >= 2; /* m = 1.xx * 2^log2 units */
        uint32_t fraction = (m << (7 - log2)) & 0x7fu;
        uint32_t unit = (f.min_normal_bits >> 23) - f.mantissa_bits;
        v.small[m] = (uint16_t)((unit + (uint32_t)(log2 + shift)) << 7 | fraction);
    }
    v.rebias += shift * 128;
    return v;
}

void dspark__gemm_bf16__ref(const dspark__gemm_bf16 *g);
void dspark__gemm_groups__ref(const dspark__gemm_bf16 *g, size_t group, const float *scales,
                                float *sum);
float dspark__rmsnorm_bf16__ref(uint16_t *y, const void *x, const void *w, size_t n, float eps);
void dspark__rope_angles__ref(float *cos, float *sin, const float *f, size_t n, float position, float attn);
void dspark__rope_bf16__ref(uint16_t *y, const void *x, const float *c, const float *s,
                            size_t n_pairs);
void dspark__fp8_e4m3__ref(uint8_t *y, const uint16_t *x, size_t n, float scale);
void dspark__fp8_e5m2__ref(uint8_t *y, const uint16_t *x, size_t n, float scale);
float dspark__absmax_bf16__ref(const void *x, size_t n);
int dspark__finite_bf16__ref(const void *x, size_t n);
void dspark__decode__ref(uint16_t *w, const uint8_t *codes, const uint8_t *scales,
                         const dspark__code_format *f, size_t k0, size_t n_k);
void dspark__dot_codes__ref(const dspark__dot_codes *d);
void dspark__scale_add__ref(float *sum, const float *acc, const float *s, size_t n_rows, int first);
void dspark__finish__ref(uint16_t *out, size_t out_stride, const float *acc, const float *s,
                         size_t n_rows, size_t n_out);
void dspark__softmax_piece__ref(const dspark__softmax_piece *s);
void dspark__scale_rows__ref(float *acc, const float *a, size_t n_panels, size_t n_rows);
void dspark__attend_finish__ref(uint16_t *out, size_t out_stride, const float *acc, const float *l,
                                 size_t n_rows, size_t n_out);
void dspark__pack_entries__ref(const dspark__pack_entries *p);
int dspark__pack_panel__ref(uint16_t *panel, const void *w, size_t stride, size_t n_rows, size_t k);
void dspark__digest_rows__ref(unsigned char (*digests)[16], const void *rows, size_t stride, size_t n_rows,
                              size_t n);
void dspark__e4m3_to_bf16__ref(uint16_t *y, const uint8_t *codes, size_t n, float scale);
void dspark__e5m2_to_bf16__ref(uint16_t *y, const uint8_t *codes, size_t n, float scale);
void dspark__silu_mul__ref(uint16_t *y, const void *g, const void *u, size_t n);
void dspark__add_bf16__ref(uint16_t *y, const void *a, const void *b, size_t n);
float dspark__dot_lanes__ref(const void *x, const void *w, size_t n);
size_t dspark__argmax_bf16__ref(const void *x, size_t n, float *best);
size_t dspark__add_argmax_bf16__ref(const void *a, const void *b, size_t n, float *best);
size_t dspark__bound_panels__ref(const dspark__bound_panels *b);
void dspark__bound_widen__ref(float (*w)[DSPARK__PANEL], const uint16_t *from, size_t n);
void dspark__bound_turn__ref(float (*w)[DSPARK__PANEL], size_t n, size_t turn, float *squares);
void dspark__bound_codes__ref(unsigned char *to, const float (*w)[DSPARK__PANEL], size_t n, const float *inverse,
                             const float *step, float *left);

void dspark__gemm_bf16__avx2(const dspark__gemm_bf16 *g);
void dspark__gemm_groups__avx2(const dspark__gemm_bf16 *g, size_t group, const float *scales,
                                 float *sum);
float dspark__rmsnorm_bf16__avx2(uint16_t *y, const void *x, const void *w, size_t n, float eps);
void dspark__rope_angles__avx2(float *cos, float *sin, const float *f, size_t n, float position, float attn);
void dspark__rope_bf16__avx2(uint16_t *y, const void *x, const float *c, const float *s,
                             size_t n_pairs);
void dspark__fp8_e4m3__avx2(uint8_t *y, const uint16_t *x, size_t n, float scale);
void dspark__fp8_e5m2__avx2(uint8_t *y, const uint16_t *x, size_t n, float scale);
float dspark__absmax_bf16__avx2(const void *x, size_t n);
int dspark__finite_bf16__avx2(const void *x, size_t n);
void dspark__decode__avx2(uint16_t *w, const uint8_t *codes, const uint8_t *scales,
                          const dspark__code_format *f, size_t k0, size_t n_k);
void dspark__scale_add__avx2(float *sum, const float *acc, const float *s, size_t n_rows,
                             int first);
void dspark__finish__avx2(uint16_t *out, size_t out_stride, const float *acc, const float *s,
                          size_t n_rows, size_t n_out);
void dspark__dot_codes__avx2(const dspark__dot_codes *d);
void dspark__softmax_piece__avx2(const dspark__softmax_piece *s);
void dspark__scale_rows__avx2(float *acc, const float *a, size_t n_panels, size_t n_rows);
void dspark__attend_finish__avx2(uint16_t *out, size_t out_stride, const float *acc, const float *l,
                                 size_t n_rows, size_t n_out);
void dspark__pack_entries__avx2(const dspark__pack_entries *p);
int dspark__pack_panel__avx2(uint16_t *panel, const void *w, size_t stride, size_t n_rows, size_t k);
void dspark__digest_rows__avx2(unsigned char (*digests)[16], const void *rows, size_t stride, size_t n_rows,
                               size_t n);
int dspark__pack_digest__avx2(const dspark__pack_digest *p);
void dspark__e4m3_to_bf16__avx2(uint16_t *y, const uint8_t *codes, size_t n, float scale);
void dspark__e5m2_to_bf16__avx2(uint16_t *y, const uint8_t *codes, size_t n, float scale);
void dspark__silu_mul__avx2(uint16_t *y, const void *g, const void *u, size_t n);
void dspark__add_bf16__avx2(uint16_t *y, const void *a, const void *b, size_t n);
float dspark__dot_lanes__avx2(const void *x, const void *w, size_t n);
size_t dspark__argmax_bf16__avx2(const void *x, size_t n, float *best);
size_t dspark__add_argmax_bf16__avx2(const void *a, const void *b, size_t n, float *best);
size_t dspark__bound_panels__avx2(const dspark__bound_panels *b);
void dspark__bound_widen__avx2(float (*w)[DSPARK__PANEL], const uint16_t *from, size_t n);
void dspark__bound_turn__avx2(float (*w)[DSPARK__PANEL], size_t n, size_t turn, float *squares);
void dspark__bound_codes__avx2(unsigned char *to, const float (*w)[DSPARK__PANEL], size_t n, const float *inverse,
                             const float *step, float *left);

void dspark__gemm_bf16__avx512(const dspark__gemm_bf16 *g);
void dspark__gemm_groups__avx512(const dspark__gemm_bf16 *g, size_t group, const float *scales,
                                   float *sum);
float dspark__rmsnorm_bf16__avx512(uint16_t *y, const void *x, const void *w, size_t n, float eps);
void dspark__rope_angles__avx512(float *cos, float *sin, const float *f, size_t n, float position, float attn);
void dspark__rope_bf16__avx512(uint16_t *y, const void *x, const float *c, const float *s,
                               size_t n_pairs);
void dspark__fp8_e4m3__avx512(uint8_t *y, const uint16_t *x, size_t n, float scale);
void dspark__fp8_e5m2__avx512(uint8_t *y, const uint16_t *x, size_t n, float scale);
float dspark__absmax_bf16__avx512(const void *x, size_t n);
int dspark__finite_bf16__avx512(const void *x, size_t n);
void dspark__decode__avx512(uint16_t *w, const uint8_t *codes, const uint8_t *scales,
                            const dspark__code_format *f, size_t k0, size_t n_k);
void dspark__scale_add__avx512(float *sum, const float *acc, const float *s, size_t n_rows,
                               int first);
void dspark__finish__avx512(uint16_t *out, size_t out_stride, const float *acc, const float *s,
                            size_t n_rows, size_t n_out);
void dspark__softmax_piece__avx512(const dspark__softmax_piece *s);
void dspark__scale_rows__avx512(float *acc, const float *a, size_t n_panels, size_t n_rows);
void dspark__attend_finish__avx512(uint16_t *out, size_t out_stride, const float *acc, const float *l,
                                 size_t n_rows, size_t n_out);
void dspark__pack_entries__avx512(const dspark__pack_entries *p);
int dspark__pack_panel__avx512(uint16_t *panel, const void *w, size_t stride, size_t n_rows, size_t k);
void dspark__digest_rows__avx512(unsigned char (*digests)[16], const void *rows, size_t stride, size_t n_rows,
                                 size_t n);
int dspark__pack_digest__avx512(const dspark__pack_digest *p);
size_t dspark__pack_codes__avx512(uint8_t *panel, const void *rows, size_t stride, size_t k, uint32_t bits,
                                  uint8_t flip, int turned);
void dspark__e4m3_to_bf16__avx512(uint16_t *y, const uint8_t *codes, size_t n, float scale);
void dspark__e5m2_to_bf16__avx512(uint16_t *y, const uint8_t *codes, size_t n, float scale);
void dspark__silu_mul__avx512(uint16_t *y, const void *g, const void *u, size_t n);
void dspark__add_bf16__avx512(uint16_t *y, const void *a, const void *b, size_t n);
float dspark__dot_lanes__avx512(const void *x, const void *w, size_t n);
size_t dspark__argmax_bf16__avx512(const void *x, size_t n, float *best);
size_t dspark__add_argmax_bf16__avx512(const void *a, const void *b, size_t n, float *best);
size_t dspark__bound_panels__avx512(const dspark__bound_panels *b);
void dspark__bound_widen__avx512(float (*w)[DSPARK__PANEL], const uint16_t *from, size_t n);
void dspark__bound_turn__avx512(float (*w)[DSPARK__PANEL], size_t n, size_t turn, float *squares);
void dspark__bound_codes__avx512(unsigned char *to, const float (*w)[DSPARK__PANEL], size_t n, const float *inverse,
                             const float *step, float *left);

void dspark__gemm_bf16__avx512bf16(const dspark__gemm_bf16 *g);
/* Where first and last, of up to 9 rows or with a narrow panel. */
void dspark__gemm_short__avx512bf16(const dspark__gemm_bf16 *g);
void dspark__gemm_groups__avx512bf16(const dspark__gemm_bf16 *g, size_t group, const float *scales,
                                       float *sum);
void dspark__attend_begin__avx512bf16(const dspark__attend *t);
void dspark__attend_piece__avx512bf16(const dspark__attend *t, const dspark__attend_entries *e);
void dspark__attend_end__avx512bf16(const dspark__attend *t, uint16_t *out, size_t out_stride);

#endif
