/* JSON from hostile files: a strict reader over memory, and on top of it a jansson document.
 *
 * The decoding is our own because jansson 2.14's ignores a failed growth of its token buffer: out
 * of memory it drops characters, and then reads past the token or trips an assertion. jansson
 * holds and prints documents; it never sees a file's bytes here. */
#ifndef DSPARK_CKPT_JSON_H
#define DSPARK_CKPT_JSON_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "dspark/dspark.h"

/* ------------------------------------------------------------------------------------------------
 * Reader: pulls tokens out of a buffer and unescapes strings in place, so it allocates nothing.
 * --------------------------------------------------------------------------------------------- */

typedef struct dspark__json_reader {
    char *start, *at, *end;
    char error[160]; /* what is wrong, "" while nothing is; later calls keep the first */
} dspark__json_reader;

void dspark__json_reader_init(dspark__json_reader *r, char *text, size_t n_bytes);

/* Skip white space; the next byte, or -1 at the end. */
int dspark__json_peek(dspark__json_reader *r);
/* All the following return 1, or 0 with r->error set. */
int dspark__json_take(dspark__json_reader *r, char punctuation);
/* After a member or an element: *more = 1 for ',', 0 for `close`, which is taken. */
int dspark__json_next(dspark__json_reader *r, char close, int *more);
/* A string: valid UTF-8, no NUL, unescaped and terminated in place. */
int dspark__json_string(dspark__json_reader *r, char **s, size_t *n);
/* An integer in [0, 2^64): no sign, fraction or exponent. */
int dspark__json_u64(dspark__json_reader *r, uint64_t *value);
/* A number's text, spelling checked; *integer = it has neither fraction nor exponent. */
int dspark__json_number(dspark__json_reader *r, char **text, size_t *n, int *integer);
/* true, false or null: returns its first letter. */
int dspark__json_literal(dspark__json_reader *r);
/* Any value, spelling checked and thrown away; at most max_depth objects and arrays deep. */
int dspark__json_skip(dspark__json_reader *r, unsigned max_depth);
/* Nothing but white space is left. */
int dspark__json_end(dspark__json_reader *r);
/* Note an error of the caller's own; returns 0. */
int dspark__json_refuse(dspark__json_reader *r, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* ------------------------------------------------------------------------------------------------
 * Documents
 * --------------------------------------------------------------------------------------------- */

#define DSPARK__JSON_MAX_BYTES ((size_t)100000000)

/* Parse one object from memory. Duplicate keys at any level, more than max_depth levels, integers
 * that do not fit 64 bits signed, invalid UTF-8 and anything after the object are DSPARK_EFORMAT
 * with the byte's offset; `where` names the source. Free with json_decref. */
dspark_status dspark__json_load(json_t **out, const char *text, size_t n_bytes, unsigned max_depth,
                                const char *where, dspark_error *err);

/* The text of a value (jansson's JSON_* flags), freed with free(); NULL when memory runs out. Not
 * json_dumps: jansson 2.14 leaves text out without a word when its buffer cannot grow. */
char *dspark__json_text(const json_t *value, size_t flags);
/* The same with real numbers in as few digits as give the same numbers back: 1e-05, not
 * 1.0000000000000001e-05. The number that needs most digits decides for the whole document. */
char *dspark__json_short_text(const json_t *value, size_t flags);

#endif
