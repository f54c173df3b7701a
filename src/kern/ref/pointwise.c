/* What is done element by element between the matrix products of the block and of the heads, and
 * the search of a row of logits. The specification of the other levels. */
#include "base/expf.h"
#include "kern/ref/bits.h"

#include <math.h>

void dspark__silu_mul__ref(uint16_t *y, const void *g, const void *u, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float x = load_bf16(g, i);
        float s = dspark__bf16_to_f32(dspark__f32_to_bf16(x / (1.0f + dspark__exp_f32(-x))));
        store_bf16(y, i, s * load_bf16(u, i));
    }
}

void dspark__add_bf16__ref(uint16_t *y, const void *a, const void *b, size_t n)
{
    for (size_t i = 0; i < n; i++) store_bf16(y, i, load_bf16(a, i) + load_bf16(b, i));
}

float dspark__dot_lanes__ref(const void *x, const void *w, size_t n)
{
    float lane[16] = {0};
    for (size_t i = 0; i < n; i++)
        lane[i % 16] = fmaf(load_bf16(x, i), load_bf16(w, i), lane[i % 16]);
    return canonical_nan(merge_lanes(lane) + 0.0f);
}

static size_t no_argmax(float *best)
{
    *best = canonical_nan(NAN);
    return DSPARK__NO_ARGMAX;
}

size_t dspark__argmax_bf16__ref(const void *x, size_t n, float *best)
{
    size_t at = 0;
    if (n == 0) return no_argmax(best);
    for (size_t i = 0; i < n; i++) {
        float v = load_bf16(x, i);
        if (v != v) return no_argmax(best);
        if (v > load_bf16(x, at)) at = i;
    }
    *best = load_bf16(x, at) + 0.0f;
    return at;
}

size_t dspark__add_argmax_bf16__ref(const void *a, const void *b, size_t n, float *best)
{
    size_t at = 0;
    if (n == 0) return no_argmax(best);
    for (size_t i = 0; i < n; i++) {
        uint16_t h = dspark__f32_to_bf16(load_bf16(a, i) + load_bf16(b, i));
        float v = dspark__bf16_to_f32(h);
        if (v != v) return no_argmax(best);
        if (i == 0 || v > *best) {
            *best = v;
            at = i;
        }
    }
    *best += 0.0f;
    return at;
}
