/* Names against the patterns of a quantization_config: plain names, path parts, shell wildcards
 * and the regular expressions of compressed-tensors. Patterns are hostile: their length, their
 * nesting and their compiled size are bounded, and matching takes time linear in the name
 * (Thompson's simulation, no backtracking) and no memory.
 *
 * Both kinds with a grammar follow Python, which wrote the files: `re.match` (anchored at the
 * start, open at the end) and `fnmatch.fnmatchcase` (the whole name). Of `re` the part that names
 * need is served:
 *
 *     literals  .  [...]  [^...]  |  (...)  (?:...)  *  +  ?  {m} {m,} {,n} {m,n}, each also lazy
 *     ^  $  \A  \Z  \b  \B    \d \D \w \W \s \S (ASCII)
 *     \n \t \r \f \v \a \xhh    \ before punctuation
 *
 * What is not, is refused by name: look-ahead and look-behind, back-references, named and atomic
 * groups, possessive repeats, inline flags, comments, octal and Unicode escapes. */
#ifndef DSPARK_QUANT_MATCH_H
#define DSPARK_QUANT_MATCH_H

#include <stddef.h>
#include <stdint.h>

#include "dspark/dspark.h"

#define DSPARK__MATCH_MAX_PATTERN 1024u /* bytes of a pattern or a name in a config */
#define DSPARK__MATCH_MAX_PROGRAM 1024u /* instructions that one pattern may become */
#define DSPARK__MATCH_MAX_NAME    1024u /* bytes of a module name; longer ones match nothing */

typedef enum dspark__match_kind {
    DSPARK__MATCH_EXACT = 0, /* the whole name, byte by byte */
    DSPARK__MATCH_REGEX,     /* Python's re.match */
    DSPARK__MATCH_GLOB,      /* Python's fnmatch.fnmatchcase: * ? [seq] [!seq] */
    DSPARK__MATCH_PATH,      /* occurs in the name as whole parts: "mlp.gate" in "a.mlp.gate.b" */
    DSPARK__MATCH_ALL        /* every name; the text is not looked at */
} dspark__match_kind;

typedef struct dspark__program dspark__program;

typedef struct dspark__match {
    dspark__match_kind kind;
    size_t n;
    char *text;               /* without "re:" */
    dspark__program *program; /* of REGEX and GLOB */
} dspark__match;

/* `where` names the field in errors. DSPARK_EUNSUPPORTED names the construct or the bound that was
 * passed, DSPARK_EFORMAT says why it is no pattern at all; *m is zeroed then. */
dspark_status dspark__match_compile(dspark__match *m, dspark__match_kind kind, const char *text,
                                    const char *where, dspark_error *err);
void dspark__match_free(dspark__match *m);

int dspark__match_name(const dspark__match *m, const char *name);
/* 1 when a plain name (EXACT) is a module above `name`: "layers.3.self_attn" above
 * "layers.3.self_attn.q_a_proj". */
int dspark__match_above(const dspark__match *m, const char *name);

/* Instructions of the pattern: what matching costs for each character of a name. */
size_t dspark__match_cost(const dspark__match *m);

#endif
