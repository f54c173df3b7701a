/* Error texts. Owns the one place where names from hostile files become text that a terminal or a
 * JSON document may show: control characters and broken UTF-8 never pass. Never allocates. */
#include "base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

/* Copy `text` into dst[cap]: whole UTF-8 sequences only, '?' for what must not be shown. */
static void copy_clean(char *dst, size_t cap, const char *text)
{
    const unsigned char *s = (const unsigned char *)text;
    size_t n = strlen(text);
    size_t at = 0;

    while (n > 0) {
        size_t len = dspark__utf8_length(s, n);
        /* U+0080..U+009F are control characters too: U+009B starts a terminal sequence. */
        int hidden = len == 0 || s[0] < 0x20 || s[0] == 0x7f || (s[0] == 0xc2 && s[1] < 0xa0);
        size_t eat = len ? len : 1;
        size_t put = hidden ? 1 : len;
        if (put > cap - 1 - at) break;
        if (hidden)
            dst[at] = '?';
        else
            memcpy(dst + at, s, len);
        at += put;
        s += eat;
        n -= eat;
    }
    dst[at] = '\0';
}

dspark_status dspark__fail(dspark_error *err, dspark_status code, const char *where,
                           const char *fmt, ...)
{
    if (!err) return code;

    /* Formatted aside first: the arguments may point into *err itself. Twice the room, so that
     * a sequence that vsnprintf cuts lies beyond what is copied. */
    char text[2 * sizeof err->message];
    char place[2 * sizeof err->where];
    va_list args;
    va_start(args, fmt);
    if (vsnprintf(text, sizeof text, fmt, args) < 0) text[0] = '\0';
    va_end(args);
    size_t n = where ? strnlen(where, sizeof place - 1) : 0;
    if (n > 0) memcpy(place, where, n);
    place[n] = '\0';

    err->code = code;
    copy_clean(err->where, sizeof err->where, place);
    copy_clean(err->message, sizeof err->message, text);
    return code;
}

dspark_status dspark__fail_nomem(dspark_error *err, const char *what, uint64_t bytes)
{
    return dspark__fail(err, DSPARK_ENOMEM, NULL, "out of memory: %llu bytes for %s",
                        (unsigned long long)bytes, what);
}

/* Descriptors that ran out say as little about a file as memory that ran out. */
dspark_status dspark__status_of_errno(int error_number)
{
    return error_number == ENOMEM || error_number == EMFILE || error_number == ENFILE
               ? DSPARK_ENOMEM
               : DSPARK_EIO;
}

static dspark_status fail_errno(dspark_error *err, dspark_status code, const char *where,
                                const char *what, int error_number)
{
    char buffer[128];
    const char *text = buffer;
#if defined(__GLIBC__)
    text = strerror_r(error_number, buffer, sizeof buffer);
#else
    if (strerror_r(error_number, buffer, sizeof buffer) != 0)
        snprintf(buffer, sizeof buffer, "error %d", error_number);
#endif
    return dspark__fail(err, code, where, "%s: %s", what, text);
}

dspark_status dspark__fail_errno(dspark_error *err, const char *where, const char *what,
                                 int error_number)
{
    return fail_errno(err, dspark__status_of_errno(error_number), where, what, error_number);
}

dspark_status dspark__fail_output(dspark_error *err, const char *where, const char *what,
                                  int error_number)
{
    dspark_status st = dspark__status_of_errno(error_number);
    return fail_errno(err, st == DSPARK_EIO ? DSPARK_EOUTPUT : st, where, what, error_number);
}

void dspark__error_clear(dspark_error *err)
{
    if (!err) return;
    err->code = DSPARK_OK;
    err->where[0] = '\0';
    err->message[0] = '\0';
}

const char *dspark__status_name(dspark_status code)
{
    switch (code) {
    case DSPARK_OK: return "DSPARK_OK";
    case DSPARK_EINVAL: return "DSPARK_EINVAL";
    case DSPARK_ENOMEM: return "DSPARK_ENOMEM";
    case DSPARK_EIO: return "DSPARK_EIO";
    case DSPARK_EFORMAT: return "DSPARK_EFORMAT";
    case DSPARK_EMODEL: return "DSPARK_EMODEL";
    case DSPARK_EUNSUPPORTED: return "DSPARK_EUNSUPPORTED";
    case DSPARK_ERANGE: return "DSPARK_ERANGE";
    case DSPARK_ENOSPACE: return "DSPARK_ENOSPACE";
    case DSPARK_ENONFINITE: return "DSPARK_ENONFINITE";
    case DSPARK_ECANCELLED: return "DSPARK_ECANCELLED";
    case DSPARK_EINTERNAL: return "DSPARK_EINTERNAL";
    case DSPARK_EOUTPUT: return "DSPARK_EOUTPUT";
    }
    return "DSPARK_?";
}
