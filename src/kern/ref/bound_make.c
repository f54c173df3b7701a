/* Codes of W2's rows for upper bounds of logits: the specification of the other levels. What the codes are
 * good for, model/markov_bound.c says; kern.h has the arithmetic. */
#include "kern/ref/bits.h"

void dspark__bound_widen__ref(float (*w)[DSPARK__PANEL], const uint16_t *from, size_t n)
{
    for (size_t i = 0; i < n; i += 2, from += 2 * DSPARK__PANEL)
        for (size_t lane = 0; lane < DSPARK__PANEL; lane++)
            for (size_t j = 0; j < 2; j++) {
                const uint16_t bits = dspark__load_u16(bf16_at(from, 2 * lane + j));
                w[i + j][lane] = bits & 0x7f80 ? dspark__bf16_to_f32(bits) : 0.0f;
            }
}

void dspark__bound_turn__ref(float (*w)[DSPARK__PANEL], size_t n, size_t turn, float *squares)
{
    for (size_t half = 1; half < turn; half *= 2)
        for (size_t i = 0; i < n; i++) {
            if (i & half) continue;
            for (size_t lane = 0; lane < DSPARK__PANEL; lane++) {
                const float a = w[i][lane], b = w[i + half][lane];
                w[i][lane] = a + b;
                w[i + half][lane] = a - b;
            }
        }
    for (size_t i = 0; i < n; i++)
        for (size_t lane = 0; lane < DSPARK__PANEL; lane++) squares[lane] += w[i][lane] * w[i][lane];
}

void dspark__bound_codes__ref(unsigned char *to, const float (*w)[DSPARK__PANEL], size_t n, const float *inverse,
                              const float *step, float *left)
{
    for (size_t i = 0; i < n; i++) {
        unsigned char *words = to + i / 8 * DSPARK__PANEL * 4;
        for (size_t lane = 0; lane < DSPARK__PANEL; lane++) {
            float c = w[i][lane] * inverse[lane] + 8.0f;
            c = c < 0.0f ? 0.0f : c;
            c = c > 15.0f ? 15.0f : c;
            const int32_t code = (int32_t)c;
            const float rest = w[i][lane] - step[lane] * (float)(2 * code - 15); /* the product is exact */
            left[lane] += rest * rest;
            unsigned char *byte = words + 4 * lane + i % 4;
            *byte = (unsigned char)(i % 8 < 4 ? code : *byte | code << 4);
        }
    }
}
