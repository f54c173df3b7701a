/* The matrix product, as defined: one fp32 accumulator per output, fed in order of k, per pair the
 * odd element first. This loop is the specification of every other level (docs/numerics.md); it is
 * meant to be read, not to be fast. */
#include "kern/levels.h"

#include <float.h>
#include <math.h>

/* bf16 -> fp32 with subnormals as zero of the same sign. */
static float load_flushed(uint16_t h)
{
    if ((h & 0x7f80u) == 0) h &= 0x8000u;
    return dspark__bf16_to_f32(h);
}

/* Would x * y + acc, rounded to 24 bits without a lower limit of the exponent, lie below FLT_MIN?
 * This is how x86 decides to flush, and it differs from "the rounded result is subnormal" just
 * below FLT_MIN, where rounding on the subnormal grid gives FLT_MIN. All is scaled by 2^64; of two
 * factors whose product is tiny one is below 1 and can take the scale. */
static int is_tiny(float x, float y, float acc)
{
    if (fabsf(x) < 1.0f) x *= 0x1p64f;
    else y *= 0x1p64f;
    return fabsf(fmaf(x, y, acc * 0x1p64f)) < FLT_MIN * 0x1p64f;
}

static float multiply_add(float x, float y, float acc)
{
    float r = fmaf(x, y, acc);
    if (fabsf(r) < FLT_MIN || (fabsf(r) == FLT_MIN && is_tiny(x, y, acc))) return copysignf(0, r);
    return r;
}

void dspark__gemm_bf16__ref(const dspark__gemm_bf16 *g)
{
    for (size_t p = 0; p < g->n_panels; p++) {
        const uint16_t *panel = g->panels + p * g->panel_stride; /* [ceil(k/2)][width][2] */
        const size_t width = panel_width(g, p), n_out = panel_outputs(g, p);
        for (size_t i = 0; i < g->n_rows; i++) {
            const unsigned char *x = (const unsigned char *)g->x + i * g->x_stride;
            float *acc = g->acc ? g->acc + (p * g->n_rows + i) * DSPARK__PANEL : NULL;
            for (size_t j = 0; j < width; j++) {
                float sum = g->first ? 0.0f : acc[j];
                for (size_t k = 0; k < g->k; k += 2) {
                    const uint16_t *w = panel + k * width + 2 * j;
                    uint16_t x0 = dspark__load_u16(bf16_at(x, k));
                    uint16_t x1 = k + 1 < g->k ? dspark__load_u16(bf16_at(x, k + 1)) : 0;
                    sum = multiply_add(load_flushed(x1), load_flushed(w[1]), sum);
                    sum = multiply_add(load_flushed(x0), load_flushed(w[0]), sum);
                }
                if (!g->last) {
                    acc[j] = sum;
                } else if (j < n_out) {
                    uint16_t y = dspark__f32_to_bf16(sum);
                    size_t at = i * g->out_stride + p * DSPARK__PANEL + j;
                    memcpy(bf16_at_mut(g->out, at), &y, sizeof y);
                }
            }
        }
    }
}

void dspark__gemm_groups__ref(const dspark__gemm_bf16 *g, size_t group, const float *scales,
                                float *sum)
{
    gemm_then_scale(g, group, scales, sum, dspark__gemm_bf16__ref, dspark__scale_add__ref);
}
