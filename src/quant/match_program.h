/* The form that patterns are compiled to, between match_compile.c, which writes it, and match.c,
 * which runs it. Jumps are relative, so that a part of a program can be copied as it is. */
#ifndef DSPARK_QUANT_MATCH_PROGRAM_H
#define DSPARK_QUANT_MATCH_PROGRAM_H

#include "quant/match.h"

typedef enum dspark__match_op {
    DSPARK__OP_CHAR,     /* the byte `c` */
    DSPARK__OP_ANY,      /* any character but a newline */
    DSPARK__OP_ANY_LINE, /* any character */
    DSPARK__OP_SET,      /* a member of sets[x] */
    DSPARK__OP_SPLIT,    /* go on at x and at y */
    DSPARK__OP_JUMP,     /* go on at x */
    DSPARK__OP_START,    /* at the start of the name */
    DSPARK__OP_END,      /* at its end */
    DSPARK__OP_END_LINE, /* at its end or before a newline that ends it */
    DSPARK__OP_EDGE,     /* between a word character and another */
    DSPARK__OP_NO_EDGE,
    DSPARK__OP_MATCH
} dspark__match_op;

typedef struct dspark__match_inst {
    uint8_t op, c;
    int16_t x, y;
} dspark__match_inst;

typedef struct dspark__match_set {
    uint32_t ascii[4];
    uint32_t others; /* 1: every character beyond ASCII is a member */
} dspark__match_set;

#define DSPARK__MATCH_MAX_SETS 256u

struct dspark__program {
    uint32_t n_insts, n_sets;
    int whole; /* the name must end where the match ends */
    dspark__match_inst *insts;
    dspark__match_set *sets; /* behind the instructions, in the same block */
};

/* DSPARK_ENOMEM, DSPARK_EUNSUPPORTED, DSPARK_EFORMAT as for dspark__match_compile. The result is
 * one block for free(). */
dspark_status dspark__match_compile_regex(dspark__program **out, const char *text, size_t n,
                                          const char *where, dspark_error *err);
dspark_status dspark__match_compile_glob(dspark__program **out, const char *text, size_t n,
                                         const char *where, dspark_error *err);

#endif
