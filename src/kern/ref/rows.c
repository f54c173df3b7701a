/* Everything that is done to one row after the matrix product: norm, rotation, fp8 codes, checks.
 * IEEE fp32 throughout, subnormals kept. The specification of the other levels. */
#include "base/sincos.h"
#include "kern/ref/bits.h"

#include <math.h>

float dspark__rmsnorm_bf16__ref(uint16_t *y, const void *x, const void *w, size_t n, float eps)
{
    float lane[16] = {0};
    for (size_t i = 0; i < n; i++) {
        float v = load_bf16(x, i);
        lane[i % 16] = fmaf(v, v, lane[i % 16]);
    }
    float sum = merge_lanes(lane);
    float r = 1.0f / sqrtf(sum / (float)n + eps);
    for (size_t i = 0; i < n; i++) store_bf16(y, i, (load_bf16(x, i) * r) * load_bf16(w, i));
    return canonical_nan(sum);
}

void dspark__rope_angles__ref(float *cos, float *sin, const float *f, size_t n, float position, float attn)
{
    for (size_t j = 0; j < n; j++) {
        float angle = position * f[j];
        double s, c;
        dspark__sincos(angle, &s, &c);
        cos[j] = (float)c * attn;
        sin[j] = (float)s * attn;
    }
}

void dspark__rope_bf16__ref(uint16_t *y, const void *x, const float *c, const float *s,
                            size_t n_pairs)
{
    for (size_t j = 0; j < n_pairs; j++) {
        float a = load_bf16(x, 2 * j), b = load_bf16(x, 2 * j + 1);
        store_bf16(y, 2 * j, a * c[j] - b * s[j]);
        store_bf16(y, 2 * j + 1, b * c[j] + a * s[j]);
    }
}

void dspark__fp8_e4m3__ref(uint8_t *y, const uint16_t *x, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) y[i] = dspark__f32_to_e4m3(load_bf16(x, i) / scale);
}

void dspark__fp8_e5m2__ref(uint8_t *y, const uint16_t *x, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) y[i] = dspark__f32_to_e5m2(load_bf16(x, i) / scale);
}

float dspark__absmax_bf16__ref(const void *x, size_t n)
{
    uint16_t most = 0; /* magnitudes order like their bits */
    for (size_t i = 0; i < n; i++) {
        uint16_t h = dspark__load_u16(bf16_at(x, i)) & 0x7fffu;
        if (h > most) most = h;
    }
    return dspark__bf16_to_f32(most);
}

int dspark__finite_bf16__ref(const void *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!dspark__bf16_is_finite(dspark__load_u16(bf16_at(x, i)))) return 0;
    return 1;
}
