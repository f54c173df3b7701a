/* args: command line parsing from a table of options, --help from the same table. Never looks at
 * the meaning of values beyond kind and range. */
#include "args.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "out.h"

#define MAX_NAME 40 /* letters of an option that are compared with another */

const char *const args_isa_choices[] = {"auto", "ref", "avx2", "avx512", "avx512bf16", NULL};
const char *const args_path_choices[] = {"onepass", "per-layer", "full", NULL};
const char *const args_cache_choices[] = {"bf16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", NULL};

/* ---- values ---- */

int args_read_uint(const char *text, size_t length, uint64_t *out)
{
    uint64_t value = 0;
    size_t i;
    if (length == 0) return 0;
    for (i = 0; i < length; i++) {
        unsigned digit = (unsigned)(unsigned char)text[i] - '0';
        if (digit > 9) return 0;
        if (value > (UINT64_MAX - digit) / 10) return 0;
        value = value * 10 + digit;
    }
    *out = value;
    return 1;
}

static int read_size(const char *text, uint64_t *out)
{
    static const char units[] = "KMGT";
    size_t length = strlen(text);
    unsigned shift = 0;
    uint64_t value;
    const char *unit = length ? strchr(units, text[length - 1]) : NULL;
    if (unit && *unit) {
        shift = 10 * (unsigned)(unit - units + 1);
        length--;
    }
    if (!args_read_uint(text, length, &value)) return 0;
    if (value > (UINT64_MAX >> shift)) return 0;
    *out = value << shift;
    return 1;
}

/* Plain decimal notation; strtod alone would also take hexadecimal, "nan" and leading spaces. */
static int read_number(const char *text, double *out)
{
    char *end;
    double value;
    if (!*text || *text == '+' || text[strspn(text, "0123456789.eE+-")]) return 0;
    value = strtod(text, &end);
    if (*end || !isfinite(value)) return 0;
    *out = value;
    return 1;
}

static size_t count_items(const char *text)
{
    size_t n = 1;
    for (; *text; text++) n += *text == ',';
    return n;
}

long args_read_uints(const char *text, uint64_t **out)
{
    size_t n = count_items(text), i;
    uint64_t *values = malloc(n * sizeof *values);
    *out = NULL;
    if (!values) return -1;
    for (i = 0; i < n; i++) {
        size_t length = strcspn(text, ",");
        if (!args_read_uint(text, length, &values[i])) {
            free(values);
            return 0;
        }
        text += length + 1;
    }
    *out = values;
    return (long)n;
}

long args_read_numbers(const char *text, double **out)
{
    size_t n = count_items(text), i;
    double *values = malloc(n * sizeof *values);
    *out = NULL;
    if (!values) return -1;
    for (i = 0; i < n; i++) {
        char item[64];
        size_t length = strcspn(text, ",");
        if (length >= sizeof item) break;
        memcpy(item, text, length);
        item[length] = 0;
        if (!read_number(item, &values[i])) break;
        text += length + 1;
    }
    if (i < n) {
        free(values);
        return 0;
    }
    *out = values;
    return (long)n;
}

/* ---- help and complaints ---- */

int args_complain(const args_command *command, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    fprintf(stderr, "dspark %s: ", command->name);
    out_text(stderr, text);
    fprintf(stderr, "\n  usage: dspark %s %s\n  'dspark %s --help' explains every option\n",
            command->name, command->synopsis, command->name);
    return EXIT_USAGE;
}

static void join_choices(char *buf, size_t size, const char *const *choices, const char *between)
{
    size_t used = 0;
    buf[0] = 0;
    for (; *choices; choices++) {
        int n = snprintf(buf + used, size - used, "%s%s", used ? between : "", *choices);
        if (n < 0 || (size_t)n >= size - used) return;
        used += (size_t)n;
    }
}

void args_help(const args_command *command)
{
    size_t i;
    printf("usage: dspark %s %s\n\n%s\n\noptions:\n", command->name, command->synopsis,
           command->summary);
    for (i = 0; i <= command->n_options; i++) {
        static const args_option help = {.name = "help", .kind = ARGS_FLAG, .help = "this text"};
        const args_option *o = i < command->n_options ? &command->options[i] : &help;
        char left[160], values[120];
        const char *line = o->help;
        if (o->kind == ARGS_CHOICE) {
            join_choices(values, sizeof values, o->choices, "|");
            snprintf(left, sizeof left, "--%s %s", o->name, values);
        } else if (o->metavar) {
            snprintf(left, sizeof left, "--%s %s", o->name, o->metavar);
        } else {
            snprintf(left, sizeof left, "--%s", o->name);
        }
        if (strlen(left) > 24)
            printf("  %s\n%28s", left, "");
        else
            printf("  %-26s", left);
        for (;;) {
            size_t length = strcspn(line, "\n");
            printf("%.*s\n", (int)length, line);
            if (!line[length]) break;
            line += length + 1;
            printf("%28s", "");
        }
    }
    if (command->trailer) printf("\n%s\n", command->trailer);
}

/* Insertions, deletions, changes and swaps of neighbours that turn a into b; both are short. */
static size_t edit_distance(const char *a, size_t n_a, const char *b, size_t n_b)
{
    size_t rows[3][MAX_NAME + 1], i, j;
    for (j = 0; j <= n_b; j++) rows[0][j] = j;
    for (i = 1; i <= n_a; i++) {
        size_t *now = rows[i % 3], *above = rows[(i + 2) % 3], *top = rows[(i + 1) % 3];
        now[0] = i;
        for (j = 1; j <= n_b; j++) {
            size_t best = above[j - 1] + (a[i - 1] != b[j - 1]);
            if (above[j] + 1 < best) best = above[j] + 1;
            if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                top[j - 2] + 1 < best)
                best = top[j - 2] + 1;
            now[j] = best;
        }
    }
    return rows[n_a % 3][n_b];
}

/* The option that was probably meant: few letters off, whatever stands for its dashes. */
static const char *guess_option(const args_command *command, const char *text)
{
    char name[MAX_NAME + 1];
    size_t n = 0, i, best = 0;
    const char *guess = NULL;
    text += strspn(text, "-");
    for (; text[n] && text[n] != '=' && n < MAX_NAME; n++) name[n] = text[n] == '_' ? '-' : text[n];
    if (n < 2) return NULL;
    for (i = 0; i <= command->n_options; i++) {
        const char *o = i < command->n_options ? command->options[i].name : "help";
        size_t length = strlen(o), distance, limit;
        if (length > MAX_NAME) continue;
        distance = edit_distance(name, n, o, length);
        limit = length < 4 ? 1 : length < 8 ? 2 : 3;
        if (distance > limit || (guess && distance >= best)) continue;
        guess = o;
        best = distance;
    }
    return guess;
}

static int complain_unknown(const args_command *command, const char *text)
{
    char known[768] = "";
    const char *guess = guess_option(command, text);
    size_t i, used = 0;
    for (i = 0; i < command->n_options; i++) {
        int n = snprintf(known + used, sizeof known - used, " --%s", command->options[i].name);
        if (n < 0 || (size_t)n >= sizeof known - used) break;
        used += (size_t)n;
    }
    if (guess)
        return args_complain(command, "unknown option '%s'; did you mean --%s? Options are%s "
                             "--help", text, guess, known);
    return args_complain(command, "unknown option '%s'; options are%s --help", text, known);
}

/* ---- parsing ---- */

static const args_option *find_option(const args_command *command, const char *name, size_t length)
{
    size_t i;
    for (i = 0; i < command->n_options; i++) {
        const args_option *o = &command->options[i];
        if (strlen(o->name) == length && memcmp(o->name, name, length) == 0) return o;
    }
    return NULL;
}

static int store_uint(const args_command *command, const args_option *o, const char *text)
{
    uint64_t max = o->max ? o->max : UINT64_MAX, value = 0;
    int ok = o->kind == ARGS_SIZE ? read_size(text, &value)
                                  : args_read_uint(text, strlen(text), &value);
    if (!ok || value < o->min || value > max)
        return args_complain(command, "--%s: '%s' is not allowed; expected a whole number%s from "
                             "%llu to %llu", o->name, text,
                             o->kind == ARGS_SIZE ? " (K, M, G, T behind it are allowed)" : "",
                             (unsigned long long)o->min, (unsigned long long)max);
    *(uint64_t *)o->value = value;
    return ARGS_RUN;
}

static int store_choice(const args_command *command, const args_option *o, const char *text)
{
    char allowed[160];
    int i;
    for (i = 0; o->choices[i]; i++) {
        if (strcmp(o->choices[i], text) == 0) {
            *(int *)o->value = i;
            return ARGS_RUN;
        }
    }
    join_choices(allowed, sizeof allowed, o->choices, ", ");
    return args_complain(command, "--%s: '%s' is not one of %s", o->name, text, allowed);
}

static int store_value(const args_command *command, const args_option *o, const char *text,
                       size_t capacity)
{
    switch (o->kind) {
    case ARGS_FLAG:
        *(int *)o->value = 1;
        return ARGS_RUN;
    case ARGS_TEXT:
        if (!*text) return args_complain(command, "--%s: the value is empty", o->name);
        *(const char **)o->value = text;
        return ARGS_RUN;
    case ARGS_UINT:
    case ARGS_SIZE:
        return store_uint(command, o, text);
    case ARGS_NUMBER: {
        double value;
        if (!read_number(text, &value) || !(value > 0))
            return args_complain(command, "--%s: '%s' is not allowed; expected a number greater "
                                 "than 0", o->name, text);
        *(double *)o->value = value;
        return ARGS_RUN;
    }
    case ARGS_CHOICE:
        return store_choice(command, o, text);
    case ARGS_TEXTS: {
        args_texts *texts = o->value;
        if (!*text) return args_complain(command, "--%s: the value is empty", o->name);
        if (!texts->items) texts->items = calloc(capacity, sizeof *texts->items);
        if (!texts->items) return out_error(EXIT_INTERNAL, "out of memory");
        texts->items[texts->n++] = text;
        return ARGS_RUN;
    }
    }
    return EXIT_INTERNAL;
}

/* One option at argv[*i]; advances *i over a separate value. `seen` counts per option. */
static int parse_option(const args_command *command, int argc, char **argv, int *i,
                        unsigned char *seen)
{
    const char *name = argv[*i] + 2;
    const char *equals = strchr(name, '=');
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    const args_option *o = find_option(command, name, length);
    const char *value = equals ? equals + 1 : NULL;
    if (!o) return complain_unknown(command, argv[*i]);
    if (o->kind == ARGS_FLAG && value)
        return args_complain(command, "--%s takes no value, found '%s'", o->name, value);
    if (o->kind != ARGS_FLAG && !value) {
        if (*i + 1 >= argc)
            return args_complain(command, "--%s needs a value%s%s", o->name,
                                 o->metavar ? ": " : "", o->metavar ? o->metavar : "");
        value = argv[++*i];
    }
    if (o->kind != ARGS_TEXTS && seen[o - command->options]++)
        return args_complain(command, "--%s is given twice", o->name);
    if (o->given) *o->given = 1;
    return store_value(command, o, value, (size_t)argc);
}

int args_parse(const args_command *command, int argc, char **argv)
{
    unsigned char seen[64] = {0};
    size_t n_operands = 0, n_allowed = 0;
    int i, only_operands = 0;
    while (command->operands[n_allowed]) n_allowed++;
    for (i = 0; i < (int)n_allowed; i++) command->operand_values[i] = NULL;
    for (i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            args_help(command);
            return EXIT_OK;
        }
    }
    for (i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (!only_operands && strcmp(arg, "--") == 0) {
            only_operands = 1;
        } else if (!only_operands && strncmp(arg, "--", 2) == 0) {
            int code = parse_option(command, argc, argv, &i, seen);
            if (code != ARGS_RUN) return code;
        } else if (!only_operands && arg[0] == '-' && arg[1]) {
            return complain_unknown(command, arg);
        } else if (n_operands == n_allowed) {
            return args_complain(command, "unexpected argument '%s'", arg);
        } else if (!*arg) {
            return args_complain(command, "%s is empty", command->operands[n_operands]);
        } else {
            command->operand_values[n_operands++] = arg;
        }
    }
    if (n_operands < command->n_required)
        return args_complain(command, "%s is missing", command->operands[n_operands]);
    return ARGS_RUN;
}

void args_texts_free(args_texts *texts)
{
    free(texts->items);
    texts->items = NULL;
    texts->n = 0;
}
