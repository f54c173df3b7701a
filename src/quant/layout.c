/* Rows of codes into panels. */
#include "quant/layout.h"

#include <string.h>

/* Places per pass over the rows: long enough runs of each row for the prefetcher, while the piece
 * of panel that they go to stays in L1. */
enum { PASS = 256 };

void dspark__layout_run8(uint8_t *panel, size_t lane, size_t k0, const uint8_t *codes, size_t n)
{
    uint8_t *to = panel + (k0 / 2 * DSPARK__PANEL + lane) * 2;

    for (size_t i = 0; i + 2 <= n; i += 2, to += 2 * DSPARK__PANEL) memcpy(to, codes + i, 2);
    if (n % 2) to[0] = codes[n - 1];
}

void dspark__layout_rows8(uint8_t *panel, const uint8_t *rows, size_t stride, size_t n_rows,
                          size_t k, uint8_t flip)
{
    uint8_t piece[PASS];

    for (size_t k0 = 0; k0 < k; k0 += PASS) {
        size_t n = k - k0 < PASS ? k - k0 : PASS;
        for (size_t j = 0; j < n_rows; j++) {
            const uint8_t *from = rows + j * stride + k0;
            if (flip) {
                for (size_t i = 0; i < n; i++) piece[i] = from[i] ^ flip;
                from = piece;
            }
            dspark__layout_run8(panel, j, k0, from, n);
        }
    }
}

/* Nibbles 0 2 4 6 of x, side by side. */
static uint16_t even_nibbles(uint32_t x)
{
    x &= 0x0f0f0f0fu;
    x = (x | x >> 4) & 0x00ff00ffu;
    return (uint16_t)((x | x >> 8) & 0xffffu);
}

void dspark__layout_rows4(uint8_t *panel, const uint8_t *rows, size_t stride, size_t n_rows,
                          size_t k, uint8_t flip)
{
    const size_t n_octets = k / 8;
    const uint32_t flips = (flip & 15u) * 0x11111111u;

    for (size_t octet0 = 0; octet0 < n_octets; octet0 += PASS / 8) {
        size_t octet1 = octet0 + PASS / 8 < n_octets ? octet0 + PASS / 8 : n_octets;
        for (size_t j = 0; j < n_rows; j++) {
            uint8_t *to = panel + (octet0 * DSPARK__PANEL + j) * 4;
            const uint8_t *from = rows + j * stride + 4 * octet0;
            for (size_t octet = octet0; octet < octet1; octet++) {
                uint32_t x = ((uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 |
                              (uint32_t)from[3] << 24) ^
                             flips;
                uint16_t words[2] = {even_nibbles(x), even_nibbles(x >> 4)};
                memcpy(to, words, sizeof words);
                from += 4;
                to += 4 * DSPARK__PANEL;
            }
        }
    }
    for (size_t j = 0; j < n_rows; j++) {
        for (size_t i = 8 * n_octets; i < k; i++) {
            unsigned byte = rows[j * stride + i / 2];
            dspark__layout_put(panel, 4, j, i, (uint8_t)((i % 2 ? byte >> 4 : byte & 15u) ^ flip));
        }
    }
}

static size_t panel_bytes(uint32_t bits, size_t k)
{
    const dspark__code_format f = {.bits = bits};
    return dspark__code_panel_bytes(&f, k);
}

void dspark__layout_clear(const dspark__panel_out *out, uint32_t bits, size_t k)
{
    memset(out->codes, 0, panel_bytes(bits, k));
}

/* Words of nibbles into the layout of e4m3 scales, 16 bytes at a time. */
static void turn(uint8_t *codes, size_t n)
{
    for (; n > 0; n -= 16, codes += 16) {
        uint16_t words[8];
        uint32_t turned[4];
        memcpy(words, codes, sizeof words);
        for (size_t i = 0; i < 4; i++) {
            uint32_t w = 0;
            for (size_t b = 0; b < 4; b++) w |= (words[i % 2 * 4 + b] >> (i / 2 * 8) & 255u) << 8 * b;
            turned[i] = w << 3 | w >> 29;
        }
        memcpy(codes, turned, sizeof turned);
    }
}

static void lay_panel(const dspark__panel_out *out, uint32_t bits, const uint8_t *rows, size_t stride,
                      size_t n_rows, size_t k, uint8_t flip, int turned)
{
    size_t done = 0;
    if (n_rows == DSPARK__PANEL && out->kern && out->kern->pack_codes)
        done = out->kern->pack_codes(out->codes, rows, stride, k, bits, flip, turned);
    const size_t bytes = done * bits / 8;
    uint8_t *rest = (uint8_t *)out->codes + bytes * DSPARK__PANEL;
    memset(rest, 0, panel_bytes(bits, k) - bytes * DSPARK__PANEL);
    if (bits == 8) dspark__layout_rows8(rest, rows + bytes, stride, n_rows, k - done, flip);
    else dspark__layout_rows4(rest, rows + bytes, stride, n_rows, k - done, flip);
    if (turned) turn(rest, panel_bytes(bits, k) - bytes * DSPARK__PANEL);
}

void dspark__layout_panel(const dspark__panel_out *out, uint32_t bits, const uint8_t *rows, size_t stride,
                          size_t n_rows, size_t k, uint8_t flip)
{
    lay_panel(out, bits, rows, stride, n_rows, k, flip, 0);
}

void dspark__layout_turned(const dspark__panel_out *out, const uint8_t *rows, size_t stride, size_t n_rows,
                           size_t k)
{
    lay_panel(out, 4, rows, stride, n_rows, k, 0, 1);
}
