/* Attention between the two matrix products, as defined: the online softmax of one piece of
 * entries, and what is done to the sums before and after. The specification of the other levels. */
#include "base/expf.h"
#include "kern/ref/bits.h"

#include <float.h>
#include <math.h>

/* Score j of row i: gemm_bf16's acc. */
static float score(const dspark__softmax_piece *s, size_t i, size_t j)
{
    size_t panel = j / DSPARK__PANEL, lane = j % DSPARK__PANEL;
    return s->scores[(panel * s->n_rows + i) * DSPARK__PANEL + lane] * s->scale;
}

static void soften_row(const dspark__softmax_piece *s, size_t i)
{
    const size_t n = s->n_valid[i];
    float sum[16] = {0}, most = s->m[i];
    for (size_t j = 0; j < n; j++)
        if (score(s, i, j) > most) most = score(s, i, j);
    most += 0.0f;
    for (size_t j = 0; j < n; j++) {
        float p = dspark__exp_f32(score(s, i, j) - most);
        sum[j % 16] += p;
        store_bf16(s->p + i * DSPARK__PIECE, j, p);
    }
    s->a[i] = dspark__exp_f32(s->m[i] - most);
    s->l[i] = canonical_nan(fmaf(s->l[i], s->a[i], merge_lanes(sum)));
    s->m[i] = canonical_nan(most);
}

void dspark__softmax_piece__ref(const dspark__softmax_piece *s)
{
    for (size_t i = 0; i < s->n_rows; i++) {
        for (size_t j = s->n_valid[i]; j < DSPARK__PIECE; j++)
            store_bf16(s->p + i * DSPARK__PIECE, j, 0.0f);
        s->a[i] = 1.0f;
        if (s->n_valid[i] > 0) soften_row(s, i);
    }
}

void dspark__scale_rows__ref(float *acc, const float *a, size_t n_panels, size_t n_rows)
{
    for (size_t p = 0; p < n_panels; p++) {
        for (size_t i = 0; i < n_rows; i++) {
            float *row = acc + (p * n_rows + i) * DSPARK__PANEL;
            for (size_t j = 0; a[i] != 1.0f && j < DSPARK__PANEL; j++) {
                float v = row[j] * a[i];
                row[j] = fabsf(v) < FLT_MIN ? copysignf(0.0f, v) : v;
            }
        }
    }
}

void dspark__attend_finish__ref(uint16_t *out, size_t out_stride, const float *acc, const float *l,
                                size_t n_rows, size_t n_out)
{
    for (size_t i = 0; i < n_rows; i++) {
        for (size_t o = 0; o < n_out; o++) {
            size_t panel = o / DSPARK__PANEL, lane = o % DSPARK__PANEL;
            float sum = acc[(panel * n_rows + i) * DSPARK__PANEL + lane];
            store_bf16(out, i * out_stride + o, sum / l[i] + 0.0f);
        }
    }
}
