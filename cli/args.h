/* args: command line parsing from a table of options. Long options only, "--name value" or
 * "--name=value"; "--" ends them. Every complaint names the offending text and what is allowed.
 * Never looks at the meaning of values beyond kind and range. */
#ifndef DSPARK_CLI_ARGS_H
#define DSPARK_CLI_ARGS_H

#include <stddef.h>
#include <stdint.h>

typedef enum args_kind {
    ARGS_FLAG,   /* int: set to 1, takes no value */
    ARGS_TEXT,   /* const char *: any text that is not empty */
    ARGS_UINT,   /* uint64_t: decimal, min..max */
    ARGS_SIZE,   /* uint64_t: bytes with an optional K, M, G or T (powers of 1024), min..max */
    ARGS_NUMBER, /* double: finite and greater than zero */
    ARGS_CHOICE, /* int: index into choices */
    ARGS_TEXTS   /* args_texts: may be given many times */
} args_kind;

typedef struct args_texts {
    const char **items; /* pointers into argv; free with args_texts_free */
    size_t n;
} args_texts;

typedef struct args_option {
    const char *name;    /* without dashes */
    args_kind kind;
    void *value;         /* of the kind's type; holds the default before parsing */
    const char *metavar; /* NULL for flags and choices */
    const char *help;    /* lines separated by '\n' */
    uint64_t min, max;   /* ARGS_UINT, ARGS_SIZE; max 0 = no limit */
    const char *const *choices; /* ARGS_CHOICE: ends with NULL */
    int *given;          /* set to 1 when the option was there; may be NULL */
} args_option;

typedef struct args_command {
    const char *name;
    const char *synopsis;    /* after "dspark NAME " */
    const char *summary;     /* a few lines */
    const char *const *operands; /* names, ends with NULL */
    const char **operand_values; /* as many, NULL where it was not given */
    size_t n_required;       /* operands that must be there */
    const args_option *options;
    size_t n_options;
    const char *trailer;     /* printed after the options by --help; may be NULL */
} args_command;

#define ARGS_RUN (-1) /* parsed: go on */

/* argv[0] is the command's name. Returns ARGS_RUN or an exit code: 0 after --help, 2 after a usage
 * error, 5 without memory. */
int args_parse(const args_command *command, int argc, char **argv);
void args_help(const args_command *command);
/* A usage error found after parsing: prints it with a hint at --help; returns 2. */
int args_complain(const args_command *command, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
void args_texts_free(args_texts *texts);

/* Decimal digits only; 0 when `text` is not a number of 64 bits. */
int args_read_uint(const char *text, size_t length, uint64_t *out);
/* "1,2,3": numbers of a list into *out (free it). Returns how many, 0 for a malformed list, -1
 * without memory. */
long args_read_uints(const char *text, uint64_t **out);
long args_read_numbers(const char *text, double **out);

/* Choices that several commands share, in the order of the library's enums. */
extern const char *const args_isa_choices[];
extern const char *const args_path_choices[];
extern const char *const args_cache_choices[];

#endif
