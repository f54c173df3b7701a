/* out: error lines and exit codes, tables, JSON documents, readable numbers, and the flag that
 * Ctrl-C sets. Knows nothing about models and options. */
#include "out.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t signals_seen;
static int json_failed;

/* ---- errors ---- */

int out_exit_code(dspark_status status)
{
    switch (status) {
    case DSPARK_OK:
        return EXIT_OK;
    case DSPARK_EINVAL:
        return EXIT_USAGE;
    case DSPARK_EIO:
    case DSPARK_EFORMAT:
    case DSPARK_EMODEL:
    case DSPARK_ERANGE:
    case DSPARK_ENONFINITE:
        return EXIT_INPUT;
    case DSPARK_EUNSUPPORTED:
        return EXIT_UNSUPPORTED;
    case DSPARK_ECANCELLED:
        return EXIT_CANCELLED;
    case DSPARK_ENOMEM:
    case DSPARK_ENOSPACE:
    case DSPARK_EINTERNAL:
        break;
    }
    return EXIT_INTERNAL;
}

int out_fail(dspark_status status, const dspark_error *err)
{
    if (status == DSPARK_ECANCELLED) {
        fprintf(stderr, "dspark: cancelled\n");
        return EXIT_CANCELLED;
    }
    fprintf(stderr, "dspark: ");
    if (err && err->where[0]) {
        out_text(stderr, err->where);
        fprintf(stderr, ": ");
    }
    out_text(stderr, err && err->message[0] ? err->message : "failed");
    fprintf(stderr, " (%s)\n", dspark_status_name(status));
    return out_exit_code(status);
}

int out_error(int code, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    fprintf(stderr, "dspark: ");
    out_text(stderr, text);
    fputc('\n', stderr);
    return code;
}

dspark_status out_set_error(dspark_error *err, dspark_status code, const char *where,
                            const char *fmt, ...)
{
    va_list args;
    if (!err) return code;
    err->code = code;
    snprintf(err->where, sizeof err->where, "%s", where ? where : "");
    va_start(args, fmt);
    vsnprintf(err->message, sizeof err->message, fmt, args);
    va_end(args);
    return code;
}

void out_add_path(dspark_error *err, const char *path)
{
    char where[sizeof err->where];
    if (strstr(err->where, path)) return;
    memcpy(where, err->where, sizeof where);
    snprintf(err->where, sizeof err->where, "%.120s%s%.120s", path, where[0] ? ": " : "", where);
}

int out_finish(int code)
{
    int failed = ferror(stdout);
    if (fflush(stdout) != 0) failed = 1;
    if (failed && code != EXIT_CANCELLED)
        return out_error(EXIT_INTERNAL, "standard output: could not be written");
    return code;
}

/* ---- cancelling ---- */

static void on_signal(int number)
{
    (void)number;
    /* Someone who insists gets out even when a step takes long; temporary files may then stay. */
    if (++signals_seen >= 3) _exit(EXIT_CANCELLED);
}

void out_install_signals(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

int out_interrupted(void)
{
    return signals_seen != 0;
}

dspark_status out_check_interrupt(dspark_error *err)
{
    if (!signals_seen) return DSPARK_OK;
    return out_set_error(err, DSPARK_ECANCELLED, "", "cancelled");
}

/* ---- text ---- */

void out_text(FILE *f, const char *text)
{
    const unsigned char *c;
    for (c = (const unsigned char *)(text ? text : ""); *c; c++)
        fputc(*c < 0x20 || *c == 0x7f ? '?' : *c, f);
}

char *out_bytes(char buf[32], double n_bytes)
{
    static const char *const unit[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
    size_t i = 0;
    while (n_bytes >= 999.95 && i + 1 < sizeof unit / sizeof *unit) {
        n_bytes /= 1000;
        i++;
    }
    snprintf(buf, 32, i ? "%.1f %s" : "%.0f %s", n_bytes, unit[i]);
    return buf;
}

char *out_count(char buf[32], uint64_t n)
{
    char digits[24];
    size_t n_digits = (size_t)snprintf(digits, sizeof digits, "%llu", (unsigned long long)n);
    size_t i, o = 0;
    for (i = 0; i < n_digits; i++) {
        if (i && (n_digits - i) % 3 == 0) buf[o++] = ',';
        buf[o++] = digits[i];
    }
    buf[o] = 0;
    return buf;
}

char *out_seconds(char buf[32], double seconds)
{
    if (seconds < 1e-3)
        snprintf(buf, 32, "%.1f us", seconds * 1e6);
    else if (seconds < 1)
        snprintf(buf, 32, "%.3f ms", seconds * 1e3);
    else
        snprintf(buf, 32, "%.2f s", seconds);
    return buf;
}

void out_table_init(out_table *table, const char *align)
{
    memset(table, 0, sizeof *table);
    table->align = align;
    table->n_columns = strlen(align);
}

void out_table_cell(out_table *table, const char *fmt, ...)
{
    char text[512];
    char *copy;
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (table->failed) return;
    if (table->n_cells == table->capacity) {
        size_t capacity = table->capacity ? 2 * table->capacity : 64;
        char **cells = realloc(table->cells, capacity * sizeof *cells);
        if (!cells) {
            table->failed = 1;
            return;
        }
        table->cells = cells;
        table->capacity = capacity;
    }
    copy = strdup(text);
    if (!copy) {
        table->failed = 1;
        return;
    }
    table->cells[table->n_cells++] = copy;
}

int out_table_print(out_table *table, int indent)
{
    size_t i, c, width[32] = {0};
    int failed = table->failed;
    for (i = 0; i < table->n_cells; i++) {
        size_t length = strlen(table->cells[i]);
        c = i % table->n_columns;
        if (c < 32 && length > width[c]) width[c] = length;
    }
    for (i = 0; !failed && i < table->n_cells; i++) {
        const char *cell = table->cells[i];
        size_t pad, k;
        c = i % table->n_columns;
        pad = c < 32 ? width[c] - strlen(cell) : 0;
        if (c == 0)
            for (k = 0; k < (size_t)indent; k++) putchar(' ');
        else
            fputs("  ", stdout);
        if (table->align[c] == 'r')
            for (k = 0; k < pad; k++) putchar(' ');
        out_text(stdout, cell);
        if (c + 1 == table->n_columns)
            putchar('\n');
        else if (table->align[c] != 'r')
            for (k = 0; k < pad; k++) putchar(' ');
    }
    for (i = 0; i < table->n_cells; i++) free(table->cells[i]);
    free(table->cells);
    memset(table, 0, sizeof *table);
    return failed ? -1 : 0;
}

/* ---- JSON ---- */

void out_set(json_t *object, const char *key, json_t *value)
{
    if (json_object_set_new(object, key, value) != 0) json_failed = 1;
}

void out_append(json_t *array, json_t *value)
{
    if (json_array_append_new(array, value) != 0) json_failed = 1;
}

json_t *out_string(const char *text)
{
    json_t *s;
    char *clean, *c;
    if (!text) return json_null();
    s = json_string(text);
    if (s) return s;
    clean = strdup(text);
    if (!clean) return NULL;
    for (c = clean; *c; c++)
        if ((unsigned char)*c >= 0x80) *c = '?';
    s = json_string(clean);
    free(clean);
    return s;
}

json_t *out_real(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

int out_json(json_t *document)
{
    int failed = json_failed || !document;
    if (!failed)
        failed = json_dumpf(document, stdout,
                            JSON_INDENT(2) | JSON_REAL_PRECISION(9) | JSON_PRESERVE_ORDER) != 0;
    json_decref(document);
    if (failed) return out_error(EXIT_INTERNAL, "the JSON document could not be made or written");
    putchar('\n');
    return EXIT_OK;
}

/* ---- files ---- */

static int fail_file(out_file *file, const char *what)
{
    int code = out_error(EXIT_INTERNAL, "%s: cannot %s: %s", file->path, what, strerror(errno));
    if (file->stream) fclose(file->stream);
    if (file->temporary) unlink(file->temporary);
    free(file->temporary);
    memset(file, 0, sizeof *file);
    return code;
}

int out_file_open(out_file *file, const char *path)
{
    size_t size = strlen(path) + 16;
    int fd;
    mode_t mask = umask(0);
    umask(mask);
    memset(file, 0, sizeof *file);
    file->path = path;
    file->temporary = malloc(size);
    if (!file->temporary) return fail_file(file, "write");
    snprintf(file->temporary, size, "%s.tmp-XXXXXX", path);
    fd = mkstemp(file->temporary);
    if (fd < 0) {
        free(file->temporary);
        file->temporary = NULL;
        return fail_file(file, "write");
    }
    fchmod(fd, 0666 & ~mask); /* mkstemp's 0600 is for secrets */
    file->stream = fdopen(fd, "w");
    if (!file->stream) {
        close(fd);
        return fail_file(file, "write");
    }
    return EXIT_OK;
}

int out_file_commit(out_file *file)
{
    FILE *stream = file->stream;
    if (fflush(stream) != 0 || ferror(stream) || fsync(fileno(stream)) != 0)
        return fail_file(file, "write");
    file->stream = NULL;
    if (fclose(stream) != 0 || rename(file->temporary, file->path) != 0)
        return fail_file(file, "write");
    free(file->temporary);
    memset(file, 0, sizeof *file);
    return EXIT_OK;
}

double out_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
