/* Upper bounds of logits from codes of W2's rows: the specification of the other levels. Owns no proof:
 * why the bounds hold is model/markov_bound.c's business. */
#include "kern/ref/bits.h"

#include <math.h>

/* Sum of codes times x of row `lane` of a panel. */
static int32_t dot_row(const unsigned char *codes, const int8_t *x, size_t k, size_t lane)
{
    int32_t sum = 0;
    for (size_t i = 0; i < k; i++) {
        size_t byte = (i / 8 * DSPARK__PANEL + lane) * 4 + i % 4;
        sum += (codes[byte] >> (i % 8 < 4 ? 0 : 4) & 15) * x[i];
    }
    return sum;
}

static float add_bias(const dspark__bound_panels *b, size_t row, float bias)
{
    float rounded = dspark__bf16_to_f32(dspark__f32_to_bf16(bias));
    if (b->scale != 1.0f)
        rounded = dspark__bf16_to_f32(dspark__f32_to_bf16(rounded * b->scale));
    return dspark__bf16_to_f32(dspark__f32_to_bf16(load_bf16(b->base, row) + rounded)) + 0.0f;
}

static float bound_row(const dspark__bound_panels *b, size_t row, const unsigned char *panel, int coded)
{
    const size_t lane = row % DSPARK__PANEL;
    const float norm = load_bf16(panel, 2 * DSPARK__PANEL + lane);
    if (!coded) return add_bias(b, row, fmaf(norm, b->reach, b->slack));
    int32_t dot = 2 * dot_row(panel + DSPARK__BOUND_HEAD, b->x, b->k, lane) - b->offset;
    float middle = (float)dot * (load_bf16(panel, lane) * b->step);
    float rest = fmaf(load_bf16(panel, DSPARK__PANEL + lane), b->residual,
                      fmaf(norm, b->norm, b->slack));
    return add_bias(b, row, middle + rest);
}

static float bound_panel(const dspark__bound_panels *b, size_t p, int coded)
{
    size_t end = (p + 1) * DSPARK__PANEL < b->n_out ? (p + 1) * DSPARK__PANEL : b->n_out;
    float most = -INFINITY;
    for (size_t row = p * DSPARK__PANEL; row < end; row++) {
        float sum = bound_row(b, row, b->panels + p * b->stride, coded);
        if (sum > most) most = sum;
    }
    return most;
}

size_t dspark__bound_panels__ref(const dspark__bound_panels *b)
{
    size_t n_coded = 0;
    for (size_t p = 0; p < b->n_panels; p++) {
        b->upper[p] = bound_panel(b, p, 0);
        if (b->upper[p] < b->floor) continue;
        b->upper[p] = bound_panel(b, p, 1);
        n_coded++;
    }
    return n_coded;
}
