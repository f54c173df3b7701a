/* Random values for the kernels' tests. */
#include "support/values.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

const size_t VALUES_SIZES[] = {0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127, 129};

static uint64_t seed = 0x9e3779b97f4a7c15u;

void values_print_seed(void)
{
    print_message("seed %llx\n", (unsigned long long)seed);
}

uint64_t values_random(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

float values_f32(value_class c)
{
    static const uint32_t special[] = {0x7f800000, 0xff800000, 0x7fc12345, 0xff812345, 0x7fa00000,
                                       0x80000000, 0x00000000, 0x7f7fffff, 0xff7fffff, 0x00000001,
                                       0x807fffff, 0x00800000, 0x80800000};
    uint64_t r = values_random();
    uint32_t u = (uint32_t)r, place = (uint32_t)(r >> 34) % 14;
    switch (c) {
    case VALUES_SMALL:
        if (r >> 60 == 0) return dspark__f32_from_bits(u & 0x807fffffu);
        return dspark__f32_from_bits((u & 0x807fffffu) | (57 + place) << 23);
    case VALUES_FINITE:
        if ((u & 0x7f800000u) == 0x7f800000u) u ^= 0x40000000u;
        return dspark__f32_from_bits(u);
    case VALUES_SPECIAL:
        if (r >> 58 == 0)
            return dspark__f32_from_bits(special[(r >> 38) % (sizeof special / sizeof *special)]);
        break;
    default: break;
    }
    return dspark__f32_from_bits((u & 0x807fffffu) | (120 + place) << 23);
}

uint16_t values_bf16(value_class c)
{
    uint32_t u = dspark__f32_bits(values_f32(c));
    if ((u & 0x7fffffffu) > 0x7f800000u)
        u |= 0x10000u; /* cut off, a payload must not be infinity */
    return (uint16_t)(u >> 16);
}

void values_fill(void *to, size_t n, value_class c)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t h = values_bf16(c);
        memcpy((unsigned char *)to + 2 * i, &h, 2);
    }
}

uint16_t values_at(const void *row, size_t i)
{
    return dspark__load_u16((const unsigned char *)row + 2 * i);
}

float values_f32_at(const void *row, size_t i)
{
    return dspark__bf16_to_f32(values_at(row, i));
}

int values_same_floats(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (dspark__f32_bits(a[i]) != dspark__f32_bits(b[i]) && !(isnan(a[i]) && isnan(b[i])))
            return 0;
    return 1;
}

dspark__kern values_level(int isa)
{
    dspark__kern k;
    assert_int_equal(dspark__kern_select(&k, (dspark_isa)isa, NULL), DSPARK_OK);
    assert_int_equal(k.isa, isa);
    return k;
}
