/* From pattern text to program: Python's regular expressions (the subset of match.h) and shell
 * wildcards. A recursive descent of bounded depth that writes each piece where it belongs; repeats
 * copy the piece they follow. Owns the grammar, never looks at a name. */
#include "quant/match_program.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

#define MAX_DEPTH  32u
#define MAX_REPEAT 1000u
#define NO_LIMIT   (MAX_REPEAT + 1)

typedef struct compiler {
    const char *text;
    size_t n, at;
    unsigned depth;
    dspark_status status; /* the first thing that went wrong */
    char message[200];
    uint32_t n_insts, n_sets;
    dspark__match_inst insts[DSPARK__MATCH_MAX_PROGRAM];
    dspark__match_set sets[DSPARK__MATCH_MAX_SETS];
} compiler;

/* Keeps the first reason; returns 0 so that callers can return it. */
static int refuse(compiler *c, dspark_status status, const char *fmt, ...) DSPARK__PRINTF(3, 4);

static int refuse(compiler *c, dspark_status status, const char *fmt, ...)
{
    va_list ap;

    if (c->status != DSPARK_OK) return 0;
    c->status = status;
    va_start(ap, fmt);
    vsnprintf(c->message, sizeof c->message, fmt, ap);
    va_end(ap);
    return 0;
}

static int unsupported(compiler *c, const char *construct)
{
    return refuse(c, DSPARK_EUNSUPPORTED, "%s at byte %zu is not supported", construct, c->at);
}

static int too_large(compiler *c)
{
    return refuse(c, DSPARK_EUNSUPPORTED, "it compiles to more than %u steps",
                  DSPARK__MATCH_MAX_PROGRAM);
}

/* ---- writing --------------------------------------------------------------------------------- */

static int emit(compiler *c, unsigned op, unsigned char byte, int x, int y)
{
    if (c->n_insts == DSPARK__MATCH_MAX_PROGRAM) return too_large(c);
    c->insts[c->n_insts++] = (dspark__match_inst){(uint8_t)op, byte, (int16_t)x, (int16_t)y};
    return 1;
}

/* Put a split before the piece at `start`, which moves up by one as it is. */
static int put_split(compiler *c, uint32_t start, int x, int y)
{
    if (!emit(c, DSPARK__OP_SPLIT, 0, x, y)) return 0;
    dspark__match_inst split = c->insts[c->n_insts - 1];
    memmove(&c->insts[start + 1], &c->insts[start], (c->n_insts - 1 - start) * sizeof c->insts[0]);
    c->insts[start] = split;
    return 1;
}

static dspark__match_set *new_set(compiler *c)
{
    if (c->n_sets == DSPARK__MATCH_MAX_SETS) {
        refuse(c, DSPARK_EUNSUPPORTED, "it has more than %u sets", DSPARK__MATCH_MAX_SETS);
        return NULL;
    }
    dspark__match_set *set = &c->sets[c->n_sets++];
    memset(set, 0, sizeof *set);
    return set;
}

static void set_range(dspark__match_set *set, unsigned first, unsigned last)
{
    for (unsigned b = first; b <= last && b < 128; b++) set->ascii[b / 32] |= 1u << (b % 32);
}

static void set_invert(dspark__match_set *set)
{
    for (int i = 0; i < 4; i++) set->ascii[i] = ~set->ascii[i];
    set->others = !set->others;
}

/* \d \w \s and their complements. */
static void set_class(dspark__match_set *set, char letter)
{
    dspark__match_set members = {{0, 0, 0, 0}, 0};

    switch (letter | 0x20) {
    case 'd': set_range(&members, '0', '9'); break;
    case 'w':
        set_range(&members, '0', '9');
        set_range(&members, 'a', 'z');
        set_range(&members, 'A', 'Z');
        set_range(&members, '_', '_');
        break;
    default: /* Python counts the four separators as white space, too */
        set_range(&members, '\t', '\r');
        set_range(&members, 0x1c, 0x1f);
        set_range(&members, ' ', ' ');
    }
    if (!(letter & 0x20)) set_invert(&members);
    for (int i = 0; i < 4; i++) set->ascii[i] |= members.ascii[i];
    set->others |= members.others;
}

/* ---- escapes --------------------------------------------------------------------------------- */

static int is_alnum(char ch)
{
    return (ch >= '0' && ch <= '9') || (ch >= 'a' && ch <= 'z') || (ch >= 'A' && ch <= 'Z');
}

static int hex_digit(char ch)
{
    if (ch >= '0' && ch <= '9') return ch - '0';
    if (ch >= 'a' && ch <= 'f') return ch - 'a' + 10;
    if (ch >= 'A' && ch <= 'F') return ch - 'A' + 10;
    return -1;
}

/* The letter or sign behind a backslash that stands for one byte, the same in and out of [...];
 * c->at is on it and moves behind. */
static int escaped_byte(compiler *c, unsigned char *byte)
{
    char ch = c->text[c->at];
    static const char letters[] = "ntrfva", bytes[] = "\n\t\r\f\v\a";
    const char *known = strchr(letters, ch);

    if (ch == 'x') {
        int high = c->at + 1 < c->n ? hex_digit(c->text[c->at + 1]) : -1;
        int low = c->at + 2 < c->n ? hex_digit(c->text[c->at + 2]) : -1;
        if (high < 0 || low < 0)
            return refuse(c, DSPARK_EFORMAT, "\\x at byte %zu needs two hexadecimal digits", c->at);
        if (high > 7) return unsupported(c, "an escape beyond ASCII");
        *byte = (unsigned char)(high * 16 + low);
        c->at += 3;
        return 1;
    }
    if ((unsigned char)ch >= 128) return unsupported(c, "a character beyond ASCII");
    if (ch == 'u' || ch == 'U' || ch == 'N') return unsupported(c, "a Unicode escape");
    if (ch == '0') return unsupported(c, "an octal escape");
    if (known) {
        *byte = (unsigned char)bytes[known - letters];
    } else if (is_alnum(ch)) {
        return refuse(c, DSPARK_EFORMAT, "\\%c at byte %zu is no escape", ch, c->at);
    } else {
        *byte = (unsigned char)ch;
    }
    c->at++;
    return 1;
}

/* ---- sets ------------------------------------------------------------------------------------ */

/* One member of [...]: a byte (*is_class = 0), or a class that went into the set. */
static int set_member(compiler *c, dspark__match_set *set, unsigned char *byte, int *is_class)
{
    char ch = c->text[c->at];

    *is_class = 0;
    if ((unsigned char)ch >= 128) return unsupported(c, "a character beyond ASCII");
    if (ch != '\\') {
        *byte = (unsigned char)ch;
        c->at++;
        return 1;
    }
    if (++c->at == c->n) return refuse(c, DSPARK_EFORMAT, "a backslash ends it");
    ch = c->text[c->at];
    if (strchr("dDwWsS", ch)) {
        set_class(set, ch);
        *is_class = 1;
        c->at++;
        return 1;
    }
    if (ch == 'b') {
        *byte = '\b';
        c->at++;
        return 1;
    }
    if (ch >= '1' && ch <= '7') return unsupported(c, "an octal escape");
    return escaped_byte(c, byte);
}

/* [...], c->at is behind the bracket. */
static int parse_set(compiler *c)
{
    dspark__match_set *set = new_set(c);
    size_t open = c->at;
    int negated = 0, empty = 1;

    if (!set) return 0;
    uint32_t index = c->n_sets - 1;
    if (c->at < c->n && c->text[c->at] == '^') {
        negated = 1;
        c->at++;
    }
    for (;;) {
        unsigned char first, last;
        int is_class, last_is_class;

        if (c->at == c->n) break;
        if (c->text[c->at] == ']' && !empty) {
            c->at++;
            if (negated) set_invert(set);
            return emit(c, DSPARK__OP_SET, 0, (int)index, 0);
        }
        empty = 0;
        if (!set_member(c, set, &first, &is_class)) return 0;
        if (c->at + 1 < c->n && c->text[c->at] == '-' && c->text[c->at + 1] != ']') {
            c->at++;
            if (!set_member(c, set, &last, &last_is_class)) return 0;
            if (is_class || last_is_class || last < first)
                return refuse(c, DSPARK_EFORMAT, "the range before byte %zu is empty", c->at);
            set_range(set, first, last);
        } else if (!is_class) {
            set_range(set, first, first);
        }
    }
    return refuse(c, DSPARK_EFORMAT, "the [ before byte %zu is not closed", open);
}

/* ---- regular expressions --------------------------------------------------------------------- */

static int parse_choices(compiler *c);

static int parse_group(compiler *c)
{
    size_t open = c->at;

    if (c->depth == MAX_DEPTH) return unsupported(c, "a group that many levels deep");
    if (c->at < c->n && c->text[c->at] == '?') {
        char kind = c->at + 1 < c->n ? c->text[c->at + 1] : '\0';
        char next = c->at + 2 < c->n ? c->text[c->at + 2] : '\0';
        switch (kind) {
        case ':': c->at += 2; break;
        case '=':
        case '!': return unsupported(c, "look-ahead");
        case '<': return unsupported(c, "look-behind");
        case '>': return unsupported(c, "an atomic group");
        case '(': return unsupported(c, "a conditional group");
        case '#': return unsupported(c, "a comment");
        case 'P': return unsupported(c, next == '=' ? "a back-reference" : "a named group");
        default: return unsupported(c, "an inline flag");
        }
    }
    c->depth++;
    if (!parse_choices(c)) return 0;
    c->depth--;
    if (c->at == c->n)
        return refuse(c, DSPARK_EFORMAT, "the ( before byte %zu is not closed", open);
    c->at++;
    return 1;
}

/* Behind a backslash. *fixed = 1 for what has no length and so cannot be repeated. */
static int parse_escape(compiler *c, int *fixed)
{
    unsigned char byte;

    if (c->at == c->n) return refuse(c, DSPARK_EFORMAT, "a backslash ends it");
    char ch = c->text[c->at];
    if (strchr("dDwWsS", ch)) {
        dspark__match_set *set = new_set(c);
        if (!set) return 0;
        set_class(set, ch);
        c->at++;
        return emit(c, DSPARK__OP_SET, 0, (int)(c->n_sets - 1), 0);
    }
    if (strchr("AZbB", ch)) {
        *fixed = 1;
        c->at++;
        return emit(c,
                    ch == 'A'   ? DSPARK__OP_START
                    : ch == 'Z' ? DSPARK__OP_END
                    : ch == 'b' ? DSPARK__OP_EDGE
                                : DSPARK__OP_NO_EDGE,
                    0, 0, 0);
    }
    if (ch >= '1' && ch <= '9') return unsupported(c, "a back-reference");
    return escaped_byte(c, &byte) && emit(c, DSPARK__OP_CHAR, byte, 0, 0);
}

static unsigned read_count(compiler *c, size_t *at, int *there)
{
    unsigned value = 0;

    *there = 0;
    for (; *at < c->n && c->text[*at] >= '0' && c->text[*at] <= '9'; (*at)++) {
        *there = 1;
        if (value <= MAX_REPEAT) value = value * 10 + (unsigned)(c->text[*at] - '0');
    }
    return value;
}

/* Is there a repeat at c->at? A brace that is none is a literal, as in Python. */
static int find_repeat(compiler *c, unsigned *min, unsigned *max)
{
    size_t at = c->at;
    int has_min, has_max = 0;

    if (at == c->n) return 0;
    *min = 0;
    *max = NO_LIMIT;
    switch (c->text[at]) {
    case '*': break;
    case '+': *min = 1; break;
    case '?': *max = 1; break;
    case '{':
        at++;
        *min = read_count(c, &at, &has_min);
        if (at < c->n && c->text[at] == ',') {
            at++;
            *max = read_count(c, &at, &has_max);
            if (!has_max) *max = NO_LIMIT;
        } else if (has_min) {
            *max = *min;
        } else {
            return 0;
        }
        if (at == c->n || c->text[at] != '}') return 0;
        if (*min > MAX_REPEAT || (has_max && *max > MAX_REPEAT)) {
            refuse(c, DSPARK_EUNSUPPORTED, "a repeat of more than %u at byte %zu", MAX_REPEAT,
                   c->at);
            return 1;
        }
        break;
    default: return 0;
    }
    c->at = at + 1;
    return 1;
}

/* Append a copy of the piece [start, start + n). */
static int copy_piece(compiler *c, uint32_t start, uint32_t n)
{
    if (n > DSPARK__MATCH_MAX_PROGRAM - c->n_insts) return too_large(c);
    memcpy(&c->insts[c->n_insts], &c->insts[start], n * sizeof c->insts[0]);
    c->n_insts += n;
    return 1;
}

/* The piece [start, end of program) becomes its repeat. */
static int repeat_piece(compiler *c, uint32_t start, unsigned min, unsigned max)
{
    uint32_t n = c->n_insts - start;

    if (n == 0) return 1; /* nothing, however often */
    if (max == 0) {
        c->n_insts = start;
        return 1;
    }
    /* The first is there already; it becomes optional when none is demanded. */
    for (unsigned i = 1; i < min; i++)
        if (!copy_piece(c, start, n)) return 0;
    if (max == NO_LIMIT) {
        if (min > 0) return emit(c, DSPARK__OP_SPLIT, 0, -(int)n, 1);
        return put_split(c, start, 1, (int)n + 2) && emit(c, DSPARK__OP_JUMP, 0, -(int)n - 1, 0);
    }
    if (min == 0) {
        uint64_t skip = (uint64_t)max * (n + 1);
        if (skip > DSPARK__MATCH_MAX_PROGRAM) return too_large(c);
        if (!put_split(c, start, 1, (int)skip)) return 0;
        start++;
        min = 1;
    }
    for (unsigned i = min; i < max; i++) {
        uint64_t skip = (uint64_t)(max - i) * (n + 1);
        if (skip > DSPARK__MATCH_MAX_PROGRAM) return too_large(c);
        if (!emit(c, DSPARK__OP_SPLIT, 0, 1, (int)skip) || !copy_piece(c, start, n)) return 0;
    }
    return 1;
}

static int parse_atom(compiler *c, int *fixed)
{
    unsigned char ch = (unsigned char)c->text[c->at];

    *fixed = 0;
    if (ch >= 128) return unsupported(c, "a character beyond ASCII");
    c->at++;
    switch (ch) {
    case '.': return emit(c, DSPARK__OP_ANY, 0, 0, 0);
    case '^': *fixed = 1; return emit(c, DSPARK__OP_START, 0, 0, 0);
    case '$': *fixed = 1; return emit(c, DSPARK__OP_END_LINE, 0, 0, 0);
    case '(': return parse_group(c);
    case '[': return parse_set(c);
    case '\\': return parse_escape(c, fixed);
    default: return emit(c, DSPARK__OP_CHAR, ch, 0, 0);
    }
}

/* Atoms with their repeats, up to | or ) or the end. */
static int parse_sequence(compiler *c)
{
    unsigned min, max;

    while (c->at < c->n && c->text[c->at] != '|' && c->text[c->at] != ')') {
        uint32_t start = c->n_insts;
        size_t at = c->at;
        int fixed;

        if (find_repeat(c, &min, &max))
            return refuse(c, DSPARK_EFORMAT, "nothing to repeat at byte %zu", at);
        if (!parse_atom(c, &fixed)) return 0;
        at = c->at;
        if (!find_repeat(c, &min, &max)) continue;
        if (c->status != DSPARK_OK) return 0;
        if (fixed) return refuse(c, DSPARK_EFORMAT, "nothing to repeat at byte %zu", at);
        if (min > max) return refuse(c, DSPARK_EFORMAT, "the repeat at byte %zu is empty", at);
        if (c->at < c->n && c->text[c->at] == '?')
            c->at++; /* lazy: another order of search, the same answer */
        else if (c->at < c->n && c->text[c->at] == '+')
            return unsupported(c, "a possessive repeat");
        at = c->at;
        unsigned again_min, again_max;
        if (find_repeat(c, &again_min, &again_max))
            return refuse(c, DSPARK_EFORMAT, "a repeat of a repeat at byte %zu", at);
        if (!repeat_piece(c, start, min, max)) return 0;
    }
    return 1;
}

static int parse_choices(compiler *c)
{
    uint32_t start = c->n_insts;

    if (!parse_sequence(c)) return 0;
    while (c->at < c->n && c->text[c->at] == '|') {
        uint32_t n = c->n_insts - start;
        c->at++;
        if (!put_split(c, start, 1, (int)n + 2) || !emit(c, DSPARK__OP_JUMP, 0, 0, 0)) return 0;
        uint32_t jump = c->n_insts - 1;
        if (!parse_sequence(c)) return 0;
        c->insts[jump].x = (int16_t)(c->n_insts - jump);
    }
    return 1;
}

static int parse_regex(compiler *c)
{
    if (!parse_choices(c)) return 0;
    if (c->at < c->n) return refuse(c, DSPARK_EFORMAT, "the ) at byte %zu closes nothing", c->at);
    return emit(c, DSPARK__OP_MATCH, 0, 0, 0);
}

/* ---- shell wildcards ------------------------------------------------------------------------- */

/* [...] with c->at behind the bracket; 0 = it is not closed, so the bracket is a literal. */
static size_t glob_set_end(const compiler *c)
{
    size_t at = c->at;

    if (at < c->n && c->text[at] == '!') at++;
    if (at < c->n && c->text[at] == ']') at++;
    while (at < c->n && c->text[at] != ']') at++;
    return at < c->n ? at : 0;
}

static int glob_set(compiler *c, size_t end)
{
    dspark__match_set *set = new_set(c);
    int negated = c->text[c->at] == '!';

    if (!set) return 0;
    if (negated) c->at++;
    while (c->at < end) {
        unsigned char first = (unsigned char)c->text[c->at], last = first;
        if (first >= 128) return unsupported(c, "a character beyond ASCII in [...]");
        if (c->at + 2 < end && c->text[c->at + 1] == '-') {
            last = (unsigned char)c->text[c->at + 2];
            if (last >= 128) return unsupported(c, "a character beyond ASCII in [...]");
            c->at += 2;
        }
        set_range(set, first, last); /* a backward range has no members */
        c->at++;
    }
    c->at = end + 1;
    if (negated) set_invert(set);
    return emit(c, DSPARK__OP_SET, 0, (int)(c->n_sets - 1), 0);
}

static int parse_glob(compiler *c)
{
    while (c->at < c->n) {
        unsigned char ch = (unsigned char)c->text[c->at++];
        size_t end;

        if (ch >= 128) {
            c->at--;
            return unsupported(c, "a character beyond ASCII");
        }
        if (ch == '*') {
            while (c->at < c->n && c->text[c->at] == '*') c->at++;
            if (!emit(c, DSPARK__OP_SPLIT, 0, 1, 3) || !emit(c, DSPARK__OP_ANY_LINE, 0, 0, 0) ||
                !emit(c, DSPARK__OP_JUMP, 0, -2, 0))
                return 0;
        } else if (ch == '?') {
            if (!emit(c, DSPARK__OP_ANY_LINE, 0, 0, 0)) return 0;
        } else if (ch == '[' && (end = glob_set_end(c)) != 0) {
            if (!glob_set(c, end)) return 0;
        } else if (!emit(c, DSPARK__OP_CHAR, ch, 0, 0)) {
            return 0;
        }
    }
    return emit(c, DSPARK__OP_MATCH, 0, 0, 0);
}

/* ---- both ------------------------------------------------------------------------------------ */

static dspark_status compile(dspark__program **out, int (*parse)(compiler *c), int whole,
                             const char *text, size_t n, const char *where, dspark_error *err)
{
    compiler *c = calloc(1, sizeof *c);
    dspark_status st;

    *out = NULL;
    if (!c) return dspark__fail_nomem(err, "a pattern's compiler", sizeof *c);
    c->text = text;
    c->n = n;
    if (!parse(c) || c->status != DSPARK_OK) {
        st = dspark__fail(err, c->status, where, "the pattern \"%.200s\": %s", text, c->message);
        free(c);
        return st;
    }
    size_t insts = c->n_insts * sizeof c->insts[0], sets = c->n_sets * sizeof c->sets[0];
    /* Sets want the alignment of uint32_t: instructions are 6 bytes each. */
    size_t before = (insts + 7) & ~(size_t)7;
    dspark__program *p = malloc(sizeof *p + before + sets);
    if (!p) {
        free(c);
        return dspark__fail_nomem(err, "a pattern's program", sizeof *p + before + sets);
    }
    p->n_insts = c->n_insts;
    p->n_sets = c->n_sets;
    p->whole = whole;
    p->insts = (dspark__match_inst *)(void *)(p + 1);
    p->sets = (dspark__match_set *)(void *)((char *)(p + 1) + before);
    memcpy(p->insts, c->insts, insts);
    memcpy(p->sets, c->sets, sets);
    free(c);
    *out = p;
    return DSPARK_OK;
}

dspark_status dspark__match_compile_regex(dspark__program **out, const char *text, size_t n,
                                          const char *where, dspark_error *err)
{
    return compile(out, parse_regex, 0, text, n, where, err);
}

dspark_status dspark__match_compile_glob(dspark__program **out, const char *text, size_t n,
                                         const char *where, dspark_error *err)
{
    return compile(out, parse_glob, 1, text, n, where, err);
}
