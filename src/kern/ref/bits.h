/* Small pieces shared by the reference files: one bf16 element as fp32. */
#ifndef DSPARK_KERN_REF_BITS_H
#define DSPARK_KERN_REF_BITS_H

#include "kern/levels.h"

DSPARK__INLINE float load_bf16(const void *row, size_t i)
{
    return dspark__bf16_to_f32(dspark__load_u16(bf16_at(row, i)));
}

DSPARK__INLINE void store_bf16(uint16_t *row, size_t i, float f)
{
    uint16_t h = dspark__f32_to_bf16(f);
    memcpy(bf16_at_mut(row, i), &h, sizeof h);
}

#endif
