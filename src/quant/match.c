/* Matching: plain comparisons, and the simulation of a compiled pattern's automaton, all of its
 * states at once, one character after the other. While matching it neither allocates nor goes
 * back. */
#include "quant/match.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/utf8.h"
#include "quant/match_program.h"

dspark_status dspark__match_compile(dspark__match *m, dspark__match_kind kind, const char *text,
                                    const char *where, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    size_t n = strlen(text);

    memset(m, 0, sizeof *m);
    if (n > DSPARK__MATCH_MAX_PATTERN)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, where,
                            "a pattern of %zu bytes, at most %u are read: \"%.40s...\"", n,
                            DSPARK__MATCH_MAX_PATTERN, text);
    if (n == 0 && kind != DSPARK__MATCH_REGEX && kind != DSPARK__MATCH_ALL)
        return dspark__fail(err, DSPARK_EFORMAT, where, "an empty name matches no module");
    m->kind = kind;
    m->n = n;
    m->text = malloc(n + 1);
    if (!m->text) return dspark__fail_nomem(err, "a pattern", n + 1);
    memcpy(m->text, text, n + 1);
    if (kind == DSPARK__MATCH_REGEX)
        st = dspark__match_compile_regex(&m->program, text, n, where, err);
    else if (kind == DSPARK__MATCH_GLOB)
        st = dspark__match_compile_glob(&m->program, text, n, where, err);
    if (st != DSPARK_OK) dspark__match_free(m);
    return st;
}

void dspark__match_free(dspark__match *m)
{
    free(m->text);
    free(m->program);
    memset(m, 0, sizeof *m);
}

size_t dspark__match_cost(const dspark__match *m)
{
    return m->program ? m->program->n_insts : 0;
}

/* ---- the automaton --------------------------------------------------------------------------- */

typedef struct states {
    uint16_t n;
    uint16_t at[DSPARK__MATCH_MAX_PROGRAM];
} states;

typedef struct run {
    const dspark__program *program;
    const char *name;
    size_t n;
    uint32_t seen[DSPARK__MATCH_MAX_PROGRAM]; /* the step at which a state was last entered */
    uint16_t stack[DSPARK__MATCH_MAX_PROGRAM];
} run;

static int is_word(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static int is_edge(const run *r, size_t at)
{
    int before = at > 0 && is_word(r->name[at - 1]);
    int after = at < r->n && is_word(r->name[at]);
    return before != after;
}

static int holds(const run *r, unsigned op, size_t at)
{
    switch (op) {
    case DSPARK__OP_START: return at == 0;
    case DSPARK__OP_END: return at == r->n;
    case DSPARK__OP_END_LINE: return at == r->n || (at + 1 == r->n && r->name[at] == '\n');
    case DSPARK__OP_EDGE: return is_edge(r, at);
    default: return r->n > 0 && !is_edge(r, at);
    }
}

/* Enter `first` and all that is reached from it without a character. Returns 1 when the pattern
 * has matched. A state is entered at most once per step, so the stack holds each at most once. */
static int enter(run *r, states *to, uint16_t first, uint32_t step, size_t at)
{
    const dspark__program *p = r->program;
    size_t depth = 0;

    if (r->seen[first] == step) return 0;
    r->seen[first] = step;
    r->stack[depth++] = first;
    while (depth > 0) {
        uint16_t pc = r->stack[--depth], next[2];
        const dspark__match_inst *i = &p->insts[pc];
        unsigned n_next = 0;

        switch (i->op) {
        case DSPARK__OP_MATCH:
            if (!p->whole || at == r->n) return 1;
            break;
        case DSPARK__OP_JUMP: next[n_next++] = (uint16_t)(pc + i->x); break;
        case DSPARK__OP_SPLIT:
            next[n_next++] = (uint16_t)(pc + i->x);
            next[n_next++] = (uint16_t)(pc + i->y);
            break;
        case DSPARK__OP_START:
        case DSPARK__OP_END:
        case DSPARK__OP_END_LINE:
        case DSPARK__OP_EDGE:
        case DSPARK__OP_NO_EDGE:
            if (holds(r, i->op, at)) next[n_next++] = (uint16_t)(pc + 1);
            break;
        default: to->at[to->n++] = pc;
        }
        for (unsigned k = 0; k < n_next; k++) {
            if (r->seen[next[k]] == step) continue;
            r->seen[next[k]] = step;
            r->stack[depth++] = next[k];
        }
    }
    return 0;
}

static int takes(const dspark__program *p, const dspark__match_inst *i, unsigned char c)
{
    switch (i->op) {
    case DSPARK__OP_CHAR: return i->c == c;
    case DSPARK__OP_ANY: return c != '\n';
    case DSPARK__OP_ANY_LINE: return 1;
    default: {
        const dspark__match_set *set = &p->sets[i->x];
        return c < 128 ? (int)(set->ascii[c / 32] >> (c % 32) & 1) : (int)set->others;
    }
    }
}

static int run_program(const dspark__program *p, const char *name, size_t n)
{
    run r;
    states lists[2], *now = &lists[0], *then = &lists[1];
    size_t at = 0;
    uint32_t step = 1;

    r.program = p;
    r.name = name;
    r.n = n;
    memset(r.seen, 0, sizeof r.seen);
    now->n = 0;
    if (enter(&r, now, 0, step, 0)) return 1;
    while (at < n && now->n > 0) {
        /* A byte that is no character of UTF-8 counts as one beyond ASCII. */
        size_t length = dspark__utf8_length(name + at, n - at);
        unsigned char c = (unsigned char)name[at];

        at += length ? length : 1;
        step++;
        then->n = 0;
        for (uint16_t k = 0; k < now->n; k++) {
            uint16_t pc = now->at[k];
            if (takes(p, &p->insts[pc], c) && enter(&r, then, (uint16_t)(pc + 1), step, at))
                return 1;
        }
        states *swap = now;
        now = then;
        then = swap;
    }
    return 0;
}

/* ---- names ----------------------------------------------------------------------------------- */

/* Whole parts: the text's ends fall on dots or on the name's ends. */
static int has_path(const dspark__match *m, const char *name, size_t n)
{
    int open_start = m->text[0] == '.', open_end = m->text[m->n - 1] == '.';

    for (const char *at = strstr(name, m->text); at; at = strstr(at + 1, m->text)) {
        size_t end = (size_t)(at - name) + m->n;
        if ((open_start || at == name || at[-1] == '.') &&
            (open_end || end == n || name[end] == '.'))
            return 1;
    }
    return 0;
}

int dspark__match_name(const dspark__match *m, const char *name)
{
    size_t n = strlen(name);

    if (n > DSPARK__MATCH_MAX_NAME) return 0;
    switch (m->kind) {
    case DSPARK__MATCH_EXACT: return n == m->n && memcmp(name, m->text, n) == 0;
    case DSPARK__MATCH_PATH: return has_path(m, name, n);
    case DSPARK__MATCH_ALL: return 1;
    default: return run_program(m->program, name, n);
    }
}

int dspark__match_above(const dspark__match *m, const char *name)
{
    return m->kind == DSPARK__MATCH_EXACT && strncmp(name, m->text, m->n) == 0 &&
           name[m->n] == '.' && name[m->n + 1] != '\0';
}
