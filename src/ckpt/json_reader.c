/* The JSON reader: RFC 8259 and nothing more, over a buffer it may write into. Owns the rules of
 * tokens; never allocates, never recurses, knows no documents. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "ckpt/json.h"

void dspark__json_reader_init(dspark__json_reader *r, char *text, size_t n_bytes)
{
    r->start = r->at = text;
    r->end = text + n_bytes;
    r->error[0] = '\0';
}

int dspark__json_refuse(dspark__json_reader *r, const char *fmt, ...)
{
    if (r->error[0]) return 0;
    va_list args;
    va_start(args, fmt);
    vsnprintf(r->error, sizeof r->error, fmt, args);
    va_end(args);
    return 0;
}

/* Refuse what stands at r->at instead of `wanted`. */
static int refuse_here(dspark__json_reader *r, const char *wanted)
{
    size_t offset = (size_t)(r->at - r->start);
    if (r->at == r->end)
        return dspark__json_refuse(r, "%s expected, found the end of the text at byte %zu", wanted,
                                   offset);
    unsigned char c = (unsigned char)*r->at;
    if (c < 0x20 || c >= 0x7f)
        return dspark__json_refuse(r, "%s expected, found byte 0x%02x at byte %zu", wanted, c,
                                   offset);
    return dspark__json_refuse(r, "%s expected, found '%c' at byte %zu", wanted, c, offset);
}

int dspark__json_peek(dspark__json_reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r'))
        r->at++;
    return r->at < r->end ? (unsigned char)*r->at : -1;
}

int dspark__json_take(dspark__json_reader *r, char punctuation)
{
    if (r->error[0]) return 0;
    if (dspark__json_peek(r) != punctuation) {
        char wanted[4] = {'\'', punctuation, '\'', '\0'};
        return refuse_here(r, wanted);
    }
    r->at++;
    return 1;
}

int dspark__json_next(dspark__json_reader *r, char close, int *more)
{
    if (r->error[0]) return 0;
    int c = dspark__json_peek(r);
    if (c != ',' && c != close) {
        char wanted[] = "',' or '?'";
        wanted[8] = close;
        return refuse_here(r, wanted);
    }
    r->at++;
    *more = c == ',';
    return 1;
}

int dspark__json_end(dspark__json_reader *r)
{
    if (r->error[0]) return 0;
    return dspark__json_peek(r) == -1 ? 1 : refuse_here(r, "the end of the text");
}

/* Four hex digits at r->at, -1 when there are none. */
static int hex4(const dspark__json_reader *r)
{
    int value = 0;
    if (r->end - r->at < 4) return -1;
    for (int i = 0; i < 4; i++) {
        char c = r->at[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return -1;
        value = value * 16 + digit;
    }
    return value;
}

static char *put_utf8(char *to, uint32_t c)
{
    if (c < 0x80) {
        *to++ = (char)c;
    } else if (c < 0x800) {
        *to++ = (char)(0xc0 | (c >> 6));
        *to++ = (char)(0x80 | (c & 0x3f));
    } else if (c < 0x10000) {
        *to++ = (char)(0xe0 | (c >> 12));
        *to++ = (char)(0x80 | ((c >> 6) & 0x3f));
        *to++ = (char)(0x80 | (c & 0x3f));
    } else {
        *to++ = (char)(0xf0 | (c >> 18));
        *to++ = (char)(0x80 | ((c >> 12) & 0x3f));
        *to++ = (char)(0x80 | ((c >> 6) & 0x3f));
        *to++ = (char)(0x80 | (c & 0x3f));
    }
    return to;
}

/* An escape; r->at is behind the backslash. What it means is never longer than how it is spelt. */
static int take_escape(dspark__json_reader *r, char **to)
{
    static const char spelt[] = "\"\\/bfnrt";
    static const char meant[] = "\"\\/\b\f\n\r\t";

    if (r->at == r->end) return refuse_here(r, "an escape");
    char c = *r->at;
    const char *simple = c ? strchr(spelt, c) : NULL;
    if (simple) {
        *(*to)++ = meant[simple - spelt];
        r->at++;
        return 1;
    }
    if (c != 'u') return refuse_here(r, "an escape");
    r->at++;
    int high = hex4(r);
    if (high < 0) return refuse_here(r, "four hex digits");
    if (high == 0) return dspark__json_refuse(r, "NUL (\\u0000) inside a string");
    r->at += 4;
    uint32_t point = (uint32_t)high;
    if (high >= 0xd800 && high <= 0xdfff) {
        int low = -1;
        if (high <= 0xdbff && r->end - r->at >= 6 && r->at[0] == '\\' && r->at[1] == 'u') {
            r->at += 2;
            low = hex4(r);
            r->at += 4;
        }
        if (low < 0xdc00 || low > 0xdfff)
            return dspark__json_refuse(r, "\\u%04x is half of a surrogate pair", high);
        point = 0x10000u + (((uint32_t)high - 0xd800u) << 10) + ((uint32_t)low - 0xdc00u);
    }
    *to = put_utf8(*to, point);
    return 1;
}

int dspark__json_string(dspark__json_reader *r, char **s, size_t *n)
{
    if (r->error[0]) return 0;
    if (dspark__json_peek(r) != '"') return refuse_here(r, "a string");
    r->at++;
    char *first = r->at;
    char *to = first;
    while (r->at < r->end && *r->at != '"') {
        unsigned char c = (unsigned char)*r->at;
        if (c == '\\') {
            r->at++;
            if (!take_escape(r, &to)) return 0;
        } else if (c < 0x20) {
            return refuse_here(r, "the rest of a string");
        } else if (c < 0x80) {
            *to++ = *r->at++;
        } else {
            size_t len = dspark__utf8_length(r->at, (size_t)(r->end - r->at));
            if (len == 0)
                return dspark__json_refuse(r, "invalid UTF-8: byte 0x%02x at byte %zu", c,
                                           (size_t)(r->at - r->start));
            memmove(to, r->at, len);
            to += len;
            r->at += len;
        }
    }
    if (r->at == r->end) return refuse_here(r, "'\"'");
    r->at++;
    *to = '\0'; /* at the latest on the closing quote */
    *s = first;
    *n = (size_t)(to - first);
    return 1;
}

static int is_digit(const dspark__json_reader *r)
{
    return r->at < r->end && *r->at >= '0' && *r->at <= '9';
}

int dspark__json_number(dspark__json_reader *r, char **first, size_t *n, int *integer)
{
    if (r->error[0]) return 0;
    int c = dspark__json_peek(r);
    char *start = r->at;
    *integer = 1;
    if (c == '-') r->at++;
    if (!is_digit(r)) return refuse_here(r, "a number");
    if (*r->at == '0')
        r->at++;
    else
        while (is_digit(r)) r->at++;
    if (is_digit(r)) return refuse_here(r, "a number without leading zeros");
    if (r->at < r->end && *r->at == '.') {
        *integer = 0;
        r->at++;
        if (!is_digit(r)) return refuse_here(r, "a digit");
        while (is_digit(r)) r->at++;
    }
    if (r->at < r->end && (*r->at == 'e' || *r->at == 'E')) {
        *integer = 0;
        r->at++;
        if (r->at < r->end && (*r->at == '+' || *r->at == '-')) r->at++;
        if (!is_digit(r)) return refuse_here(r, "a digit");
        while (is_digit(r)) r->at++;
    }
    *first = start;
    *n = (size_t)(r->at - start);
    return 1;
}

int dspark__json_u64(dspark__json_reader *r, uint64_t *value)
{
    char *text;
    size_t n;
    int integer;

    if (!dspark__json_number(r, &text, &n, &integer)) return 0;
    int shown = n < 40 ? (int)n : 40;
    if (!integer) return dspark__json_refuse(r, "%.*s is not an integer", shown, text);
    if (*text == '-') return dspark__json_refuse(r, "%.*s is negative", shown, text);
    uint64_t v = 0;
    for (size_t i = 0; i < n; i++) {
        if (__builtin_mul_overflow(v, (uint64_t)10, &v) ||
            __builtin_add_overflow(v, (uint64_t)(text[i] - '0'), &v))
            return dspark__json_refuse(r, "%.*s does not fit 64 bits", shown, text);
    }
    *value = v;
    return 1;
}

int dspark__json_literal(dspark__json_reader *r)
{
    static const char *const words[] = {"true", "false", "null"};
    if (r->error[0]) return 0;
    (void)dspark__json_peek(r);
    for (size_t i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(r->end - r->at) >= n && memcmp(r->at, words[i], n) == 0) {
            r->at += n;
            return words[i][0];
        }
    }
    return refuse_here(r, "a value");
}

int dspark__json_skip(dspark__json_reader *r, unsigned max_depth)
{
    uint64_t is_object = 0; /* one bit a level */
    unsigned depth = 0;
    if (max_depth > 64) max_depth = 64;

    for (;;) {
        char *s;
        size_t n;
        int integer;
        int c = dspark__json_peek(r);
        int opened = 0;
        if (r->error[0]) return 0;
        if (c == '{' || c == '[') {
            if (depth == max_depth)
                return dspark__json_refuse(r, "more than %u levels of nesting", max_depth);
            is_object = (is_object << 1) | (c == '{');
            depth++;
            r->at++;
            opened = 1;
        } else if (c == '"') {
            if (!dspark__json_string(r, &s, &n)) return 0;
        } else if (c == '-' || (c >= '0' && c <= '9')) {
            if (!dspark__json_number(r, &s, &n, &integer)) return 0;
        } else if (!dspark__json_literal(r)) {
            return 0;
        }
        /* Close what ends here; then stand before the next value. */
        while (depth > 0) {
            char close = (is_object & 1u) ? '}' : ']';
            int more;
            if (opened && dspark__json_peek(r) != close) break;
            if (!dspark__json_next(r, close, &more)) return 0;
            if (more) break;
            opened = 0;
            is_object >>= 1;
            depth--;
        }
        if (depth == 0) return 1;
        if (is_object & 1u) {
            if (!dspark__json_string(r, &s, &n) || !dspark__json_take(r, ':')) return 0;
        }
    }
}
