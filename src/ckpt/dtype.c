/* The table of element types, and checked sizes. */
#include "ckpt/dtype.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"

static const struct {
    const char *name;
    unsigned bits;
} dtypes[DSPARK_DTYPE_COUNT] = {
    [DSPARK_DTYPE_NONE] = {"?", 0},
    [DSPARK_BF16] = {"BF16", 16},
    [DSPARK_F16] = {"F16", 16},
    [DSPARK_F32] = {"F32", 32},
    [DSPARK_F64] = {"F64", 64},
    [DSPARK_F8_E4M3] = {"F8_E4M3", 8},
    [DSPARK_F8_E5M2] = {"F8_E5M2", 8},
    [DSPARK_F8_E8M0] = {"F8_E8M0", 8},
    [DSPARK_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [DSPARK_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
    [DSPARK_F4] = {"F4", 4},
    [DSPARK_F6_E2M3] = {"F6_E2M3", 6},
    [DSPARK_F6_E3M2] = {"F6_E3M2", 6},
    [DSPARK_BOOL] = {"BOOL", 8},
    [DSPARK_U8] = {"U8", 8},
    [DSPARK_I8] = {"I8", 8},
    [DSPARK_U16] = {"U16", 16},
    [DSPARK_I16] = {"I16", 16},
    [DSPARK_U32] = {"U32", 32},
    [DSPARK_I32] = {"I32", 32},
    [DSPARK_U64] = {"U64", 64},
    [DSPARK_I64] = {"I64", 64},
    [DSPARK_C64] = {"C64", 64},
};

static int is_dtype(dspark_dtype dtype)
{
    return (int)dtype > (int)DSPARK_DTYPE_NONE && (int)dtype < (int)DSPARK_DTYPE_COUNT;
}

const char *dspark__dtype_name(dspark_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].name : "?";
}

unsigned dspark__dtype_bits(dspark_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].bits : 0;
}

dspark_dtype dspark__dtype_parse(const char *text)
{
    for (int i = DSPARK_DTYPE_NONE + 1; i < DSPARK_DTYPE_COUNT; i++) {
        if (strcmp(dtypes[i].name, text) == 0) return (dspark_dtype)i;
    }
    return DSPARK_DTYPE_NONE;
}

const char *dspark__shape_bytes(dspark_dtype dtype, uint32_t rank, const uint64_t *shape,
                                uint64_t *n_elements, uint64_t *n_bytes)
{
    uint64_t n = 1, bits;
    for (uint32_t i = 0; i < rank; i++) {
        if (!dspark__mul_u64(n, shape[i], &n)) return "the number of elements does not fit 64 bits";
    }
    if (!dspark__mul_u64(n, dspark__dtype_bits(dtype), &bits))
        return "the number of bits does not fit 64 bits";
    if (bits % 8 != 0) return "the elements are not a whole number of bytes";
    *n_elements = n;
    *n_bytes = bits / 8;
    return NULL;
}

const char *dspark__shape_text(uint32_t rank, const uint64_t *shape, char *text, size_t cap)
{
    size_t at = 0;
    int n = snprintf(text, cap, "[");
    for (uint32_t i = 0; n >= 0 && i < rank; i++) {
        at += (size_t)n;
        if (at + 32 > cap) {
            n = snprintf(text + at, cap - at, "...");
            break;
        }
        n = snprintf(text + at, cap - at, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
    }
    at += n > 0 ? (size_t)n : 0;
    if (at < cap) snprintf(text + at, cap - at, "]");
    return text;
}
