/* Packed codes, as the layouts in kern.h define them: expanding codes to bf16 weights, and what is
 * multiplied after a sum. The specification of the other levels. */
#include "kern/levels.h"

#include <float.h>
#include <math.h>

/* The code of value k of output j. */
static uint8_t code_at(const uint8_t *codes, const dspark__code_format *f, size_t k, size_t j)
{
    size_t pair = k / 2, element = k % 2;
    if (f->bits == 8) return codes[(pair * DSPARK__PANEL + j) * 2 + element];
    if (dspark__codes_are_turned(f)) {
        size_t at = (pair / 4 * 3 + j / 16) * 16 + j % 16 / 4 * 4 + pair % 4 / 2 * 2 + j % 4 / 2;
        uint32_t turned;
        memcpy(&turned, codes + 4 * at, sizeof turned);
        return (turned >> 3 | turned << 29) >> (j % 2 * 16 + element * 8 + pair % 2 * 4) & 15;
    }
    size_t word = (pair / 4 * 3 + j / 16) * 32 + j % 16 * 2 + element;
    return (dspark__load_u16(bf16_at(codes, word)) >> pair % 4 * 4) & 15;
}

/* t * scale, cut to bf16. What is neither a number nor finite stays as it is in the table. */
static uint16_t scaled(uint16_t t, float scale)
{
    if (!dspark__bf16_is_finite(t)) return t;
    float product = dspark__bf16_to_f32(t) * scale;
    if (fabsf(product) < FLT_MIN) return t & 0x8000u;
    return (uint16_t)(dspark__f32_bits(product) >> 16);
}

static uint16_t minus(uint16_t t, int8_t zero_point)
{
    float difference = dspark__bf16_to_f32(t) - (float)zero_point;
    return (uint16_t)(dspark__f32_bits(difference) >> 16);
}

void dspark__decode__ref(uint16_t *w, const uint8_t *codes, const uint8_t *scales,
                         const dspark__code_format *f, size_t k0, size_t n_k)
{
    for (size_t k = 0; k < (n_k + 7) / 8 * 8; k++) {
        for (size_t j = 0; j < DSPARK__PANEL; j++) {
            uint16_t t = f->table[code_at(codes, f, k0 + k, j)];
            if (f->scale != DSPARK__CODE_PLAIN) {
                uint8_t scale = scales[(k0 + k) / f->block * DSPARK__PANEL + j];
                if (f->scale == DSPARK__CODE_E4M3) t = scaled(t, dspark__e4m3_to_f32(scale));
                else if (f->scale == DSPARK__CODE_E8M0) t = scaled(t, dspark__e8m0_to_f32(scale));
                else t = minus(t, (int8_t)scale);
            }
            w[(k / 2 * DSPARK__PANEL + j) * 2 + k % 2] = t;
        }
    }
}

/* One panel times one row. */
static void dot_row(const dspark__dot_codes *d, size_t p, size_t i)
{
    enum { STEP = 32 };
    _Alignas(64) uint16_t w[STEP * DSPARK__PANEL];
    _Alignas(64) float acc[DSPARK__PANEL];
    const size_t group = d->group ? d->group : d->k;
    const unsigned char *x = (const unsigned char *)d->x + i * d->x_stride;
    const uint8_t *scales = d->scales ? d->scales + p * d->scale_stride : NULL;
    float *sum = d->acc + (p * d->n_rows + i) * DSPARK__PANEL;
    for (size_t k0 = 0, n; k0 < d->k; k0 += n) {
        size_t left = group - k0 % group; /* of the group, then of k */
        if (left > d->k - k0) left = d->k - k0;
        n = left < STEP ? left : STEP;
        dspark__decode__ref(w, d->codes + p * d->code_stride, scales, d->format, k0, n);
        dspark__gemm_bf16 g = {.x = x + 2 * k0, .x_stride = d->x_stride, .n_rows = 1,
                               .panels = w, .n_panels = 1, .k = n,
                               .acc = d->group ? acc : sum, .first = k0 % group == 0};
        dspark__gemm_bf16__ref(&g);
        if (d->group && n == left) {
            size_t at = p * d->group_stride + k0 / group * DSPARK__PANEL;
            dspark__scale_add__ref(sum, acc, d->group_scales + at, 1, k0 < group);
        }
    }
}

void dspark__dot_codes__ref(const dspark__dot_codes *d)
{
    for (size_t p = 0; p < d->n_panels; p++)
        for (size_t i = 0; i < d->n_rows; i++) dot_row(d, p, i);
}

void dspark__scale_add__ref(float *sum, const float *acc, const float *s, size_t n_rows, int first)
{
    for (size_t i = 0; i < n_rows; i++, sum += DSPARK__PANEL, acc += DSPARK__PANEL)
        for (size_t j = 0; j < DSPARK__PANEL; j++)
            sum[j] = first ? acc[j] * s[j] : fmaf(acc[j], s[j], sum[j]);
}

void dspark__finish__ref(uint16_t *out, size_t out_stride, const float *acc, const float *s,
                         size_t n_rows, size_t n_out)
{
    for (size_t i = 0; i < n_rows; i++, acc += DSPARK__PANEL) {
        for (size_t o = 0; o < n_out; o++) {
            uint16_t y = dspark__f32_to_bf16(s ? acc[o] * s[o] : acc[o]);
            memcpy(bf16_at_mut(out, i * out_stride + o), &y, sizeof y);
        }
    }
}
