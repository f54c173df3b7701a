/* The code tables. */
#include "quant/codes.h"

#include <string.h>

#include "base/numfmt.h"

int dspark__is_fp8(dspark_dtype dtype)
{
    return dtype == DSPARK_F8_E4M3 || dtype == DSPARK_F8_E5M2 || dtype == DSPARK_F8_E4M3FNUZ ||
           dtype == DSPARK_F8_E5M2FNUZ;
}

const char *dspark__fp8_name(dspark_dtype dtype)
{
    switch (dtype) {
    case DSPARK_F8_E4M3: return "E4M3";
    case DSPARK_F8_E5M2: return "E5M2";
    case DSPARK_F8_E4M3FNUZ: return "E4M3 FNUZ";
    case DSPARK_F8_E5M2FNUZ: return "E5M2 FNUZ";
    default: return "?";
    }
}

/* FNUZ: the exponent's bias is one more, the code of -0 is the only NaN, nothing is infinite. */
static float fnuz_to_f32(uint8_t code, unsigned mantissa_bits)
{
    int bias = mantissa_bits == 3 ? 8 : 16;
    int exponent = (code & 0x7f) >> mantissa_bits;
    int m = code & ((1 << mantissa_bits) - 1);

    if (code == 0x80) return dspark__f32_from_bits(0x7fc00000u);
    if (exponent == 0)
        exponent = 1;
    else
        m += 1 << mantissa_bits;
    /* m * 2^(exponent - bias - mantissa_bits): both factors and the product are normal */
    float power =
        dspark__f32_from_bits((uint32_t)(exponent - bias - (int)mantissa_bits + 127) << 23);
    return (code & 0x80 ? -(float)m : (float)m) * power;
}

static float fp8_to_f32(uint8_t code, dspark_dtype dtype)
{
    switch (dtype) {
    case DSPARK_F8_E4M3: return dspark__e4m3_to_f32(code);
    case DSPARK_F8_E5M2: return dspark__e5m2_to_f32(code);
    case DSPARK_F8_E4M3FNUZ: return fnuz_to_f32(code, 3);
    default: return fnuz_to_f32(code, 2);
    }
}

void dspark__codes_fp8(uint16_t table[256], dspark_dtype dtype)
{
    for (unsigned c = 0; c < 256; c++)
        table[c] = dspark__f32_to_bf16(fp8_to_f32((uint8_t)c, dtype));
}

void dspark__codes_e2m1(uint16_t table[256])
{
    memset(table, 0, 256 * sizeof *table);
    for (unsigned c = 0; c < 16; c++)
        table[c] = dspark__f32_to_bf16(dspark__e2m1_to_f32((uint8_t)c));
}

void dspark__codes_int(uint16_t table[256], uint32_t bits)
{
    int n = 1 << bits;

    memset(table, 0, 256 * sizeof *table);
    for (int c = 0; c < n; c++) table[c] = dspark__f32_to_bf16((float)(c < n / 2 ? c : c - n));
}
