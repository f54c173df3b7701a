/* Number formats on bits. Everything is integer arithmetic, or a product that is exact in fp32 and
 * never subnormal: no rounding mode or flush-to-zero setting of the thread can reach a result. */
#include "base/numfmt.h"

#define F32_NAN 0x7fc00000u

/* The fp32 magnitude `a` (finite, below 1) times 2^log2_scale, rounded to an integer, ties to even.
 * The caller keeps the result small; fp32 subnormals are far below any half unit and give 0. */
static uint32_t round_scaled(uint32_t a, unsigned log2_scale)
{
    uint32_t exponent = a >> 23;
    if (exponent == 0) return 0;
    uint32_t m = (a & 0x7fffffu) | 0x800000u;      /* value = m * 2^(exponent - 150) */
    uint32_t shift = 150u - exponent - log2_scale; /* result = m / 2^shift */
    if (shift > 24) return 0;
    uint32_t q = m >> shift;
    uint32_t rest = m & ((1u << shift) - 1u);
    uint32_t half = 1u << (shift - 1u);
    return q + (rest > half || (rest == half && (q & 1u)));
}

float dspark__f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 0x1fu;
    uint32_t m = h & 0x3ffu;

    if (exponent == 0x1f) return dspark__f32_from_bits(m ? F32_NAN : sign | 0x7f800000u);
    if (exponent != 0) return dspark__f32_from_bits(sign | ((exponent + 112u) << 23) | (m << 13));
    float magnitude = (float)m * 0x1p-24f;
    return dspark__f32_from_bits(sign | dspark__f32_bits(magnitude));
}

uint8_t dspark__f32_to_e4m3(float x)
{
    uint32_t u = dspark__f32_bits(x);
    uint32_t a = u & 0x7fffffffu;
    uint32_t sign = (u >> 24) & 0x80u;

    if (a > 0x7f800000u) return 0x7f;
    if (a >= 0x43e00000u) return (uint8_t)(sign | 0x7eu); /* 448 and above, infinity */
    if (a >= 0x3c800000u)                                 /* 2^-6: normal in e4m3 */
        return (uint8_t)(sign | (((a + 0x7ffffu + ((a >> 20) & 1u)) >> 20) - 960u));
    return (uint8_t)(sign | round_scaled(a, 9));
}

float dspark__e4m3_to_f32(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80u) << 24;
    uint32_t exponent = (code >> 3) & 0xfu;
    uint32_t m = code & 7u;

    if ((code & 0x7fu) == 0x7fu) return dspark__f32_from_bits(F32_NAN);
    if (exponent != 0) return dspark__f32_from_bits(sign | ((exponent + 120u) << 23) | (m << 20));
    float magnitude = (float)m * 0x1p-9f;
    return dspark__f32_from_bits(sign | dspark__f32_bits(magnitude));
}

uint8_t dspark__f32_to_e5m2(float x)
{
    uint32_t u = dspark__f32_bits(x);
    uint32_t a = u & 0x7fffffffu;
    uint32_t sign = (u >> 24) & 0x80u;

    if (a > 0x7f800000u) return 0x7f;
    if (a >= 0x47600000u) return (uint8_t)(sign | 0x7bu); /* 57344 and above, infinity */
    if (a >= 0x38800000u)                                 /* 2^-14: normal in e5m2 */
        return (uint8_t)(sign | (((a + 0xfffffu + ((a >> 21) & 1u)) >> 21) - 448u));
    return (uint8_t)(sign | round_scaled(a, 16));
}

float dspark__e5m2_to_f32(uint8_t code)
{
    return dspark__f16_to_f32((uint16_t)(code << 8)); /* the upper half of a binary16 */
}

float dspark__e8m0_to_f32(uint8_t code)
{
    if (code == 255) return dspark__f32_from_bits(F32_NAN);
    return dspark__f32_from_bits(code == 0 ? 0x00400000u : (uint32_t)code << 23);
}

float dspark__e2m1_to_f32(uint8_t code)
{
    static const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    float m = magnitude[code & 7u];
    return (code & 8u) ? -m : m;
}
