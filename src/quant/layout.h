/* Codes of rows into the panel layouts of kern/kern.h: data movement, no arithmetic. A panel's codes are zero
 * before, but for dspark__layout_panel, and code 0 has the value 0: what is not written is padding. */
#ifndef DSPARK_QUANT_LAYOUT_H
#define DSPARK_QUANT_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "quant/scheme.h"

/* The whole panel of `out` from n_rows of k codes as one of the next two functions takes them: by a kernel as far as
 * there is one, and zeros where no weight is. */
void dspark__layout_panel(const dspark__panel_out *out, uint32_t bits, const uint8_t *rows, size_t stride,
                          size_t n_rows, size_t k, uint8_t flip);
/* The same of nibbles under e4m3 scales, whose layout is another one than that of the functions below. */
void dspark__layout_turned(const dspark__panel_out *out, const uint8_t *rows, size_t stride, size_t n_rows,
                           size_t k);
/* Zeros, for what is put code by code. */
void dspark__layout_clear(const dspark__panel_out *out, uint32_t bits, size_t k);

/* Rows of k codes, row j at rows + j * stride, become lanes 0 .. n_rows-1 of the panel. Each code
 * is xored with `flip` on its way. 8 bits: a byte each. 4 bits: nibbles, low first. */
void dspark__layout_rows8(uint8_t *panel, const uint8_t *rows, size_t stride, size_t n_rows,
                          size_t k, uint8_t flip);
void dspark__layout_rows4(uint8_t *panel, const uint8_t *rows, size_t stride, size_t n_rows,
                          size_t k, uint8_t flip);

/* n codes, a byte each, of one lane from place k0 on. k0 is even. */
void dspark__layout_run8(uint8_t *panel, size_t lane, size_t k0, const uint8_t *codes, size_t n);

/* One code; its place is still zero. bits is 8 or 4. */
static inline void dspark__layout_put(uint8_t *panel, uint32_t bits, size_t lane, size_t place,
                                      uint8_t code)
{
    size_t pair = place / 2, element = place % 2;

    if (bits == 8) {
        panel[(pair * DSPARK__PANEL + lane) * 2 + element] = code;
    } else {
        /* a word of 16 bits an output and element; nibble 0 is the low one of its first byte */
        size_t word = (pair / 4 * DSPARK__PANEL + lane) * 2 + element;
        uint16_t w;
        unsigned char *at = panel + 2 * word;
        __builtin_memcpy(&w, at, sizeof w);
        w = (uint16_t)(w | (unsigned)(code & 15u) << (4 * (pair % 4)));
        __builtin_memcpy(at, &w, sizeof w);
    }
}

#endif
