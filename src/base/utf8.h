/* UTF-8, strictly: what is a character and what is not. */
#ifndef DSPARK_BASE_UTF8_H
#define DSPARK_BASE_UTF8_H

#include <stddef.h>

/* Bytes (1 to 4) of the well-formed sequence at `text` with n bytes left; 0 when there is none:
 * truncated, overlong, a surrogate, beyond U+10FFFF. */
static inline size_t dspark__utf8_length(const void *text, size_t n)
{
    const unsigned char *s = text;
    if (n == 0) return 0;
    if (s[0] < 0x80) return 1;
    size_t need = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || n < need) return 0;
    for (size_t i = 1; i < need; i++) {
        if ((s[i] & 0xc0) != 0x80) return 0;
    }
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f)) return 0;
    if ((s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f)) return 0;
    return need;
}

#endif
