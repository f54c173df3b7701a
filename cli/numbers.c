/* numbers: the values of stored bf16 and fp8, as doubles, exactly. Knows no file and no cache, and never
 * rounds. */
#include "numbers.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

double number_bf16(const unsigned char *bytes)
{
    uint16_t half;
    uint32_t word;
    float value;
    memcpy(&half, bytes, sizeof half);
    word = (uint32_t)half << 16;
    memcpy(&value, &word, sizeof value);
    return (double)value;
}

double number_fp8(dspark_dtype dtype, int code)
{
    int e = dtype == DSPARK_F8_E5M2 ? code >> 2 : code >> 3, m;
    if (dtype == DSPARK_F8_E5M2) {
        m = code & 3;
        return e ? ldexp(4 + m, e - 17) : ldexp(m, -16);
    }
    m = code & 7;
    return (e ? ldexp(8 + m, e - 10) : ldexp(m, -9)) * (dtype == DSPARK_F8_E4M3FNUZ ? 0.5 : 1.0);
}
