/* out: error lines and exit codes, tables, JSON documents, readable numbers, and the flag that
 * Ctrl-C sets. Knows nothing about models and options. */
#include "out.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
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
    case DSPARK_EOUTPUT:
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
    size_t n = strlen(path);
    /* "m" is in front of "m/config.json", not of "model.safetensors". */
    if (strncmp(err->where, path, n) == 0 && (!err->where[n] || strchr("/:", err->where[n])))
        return;
    memcpy(where, err->where, sizeof where);
    snprintf(err->where, sizeof err->where, "%.120s%s%.120s", path, where[0] ? ": " : "", where);
}

void out_add_file(dspark_error *err, const char *path)
{
    char where[sizeof err->where];
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    const size_t n = strlen(name);
    if (!slash || !n || strncmp(err->where, name, n) != 0 || !strchr(":", err->where[n])) {
        out_add_path(err, path);
        return;
    }
    memcpy(where, err->where, sizeof where);
    snprintf(err->where, sizeof err->where, "%.120s%.120s", path, where + n);
}

void out_add_checkpoint(dspark_error *err, const char *checkpoint, const char *target)
{
    if (!target || strncmp(err->where, target, strlen(target)) != 0) out_add_path(err, checkpoint);
}

dspark_status out_blame_arguments(dspark_error *err, dspark_status st)
{
    if (st != DSPARK_EMODEL && st != DSPARK_EFORMAT && st != DSPARK_ERANGE) return st;
    return err->code = DSPARK_EINVAL;
}

int out_finish(int code)
{
    int failed = ferror(stdout);
    if (fflush(stdout) != 0) failed = 1;
    if (failed && code != EXIT_CANCELLED)
        return out_error(EXIT_INTERNAL, "standard output: could not be written");
    return code;
}

/* ---- the process ---- */

static void on_signal(int number)
{
    (void)number;
    /* Someone who insists gets out even when a step takes long; temporary files may then stay. */
    if (++signals_seen >= 3) _exit(EXIT_CANCELLED);
}

/* Every mapping of this process is an input file. Other threads may be anywhere, so there is no way
 * back: say it and go. */
static void on_bus_error(int number)
{
    static const char text[] = "dspark: an input file became shorter, or its disk failed, while it "
                               "was read (DSPARK_EIO)\n";
    (void)number;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(EXIT_INPUT);
    _exit(EXIT_INPUT);
}

static void set_handler(int number, void (*handler)(int))
{
    struct sigaction action, old;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    /* Ignored by the parent (nohup, a background job of a script): that is to stay. */
    if (sigaction(number, NULL, &old) == 0 && old.sa_handler == SIG_IGN) return;
    sigaction(number, &action, NULL);
}

void out_start(void)
{
    int fd;
    for (fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        /* Opened for the wrong direction: using a closed standard output stays an error. */
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF)
            (void)open("/dev/null", fd == STDOUT_FILENO ? O_RDONLY : O_WRONLY);
    }
    set_handler(SIGINT, on_signal);
    set_handler(SIGTERM, on_signal);
    set_handler(SIGHUP, on_signal);
    set_handler(SIGXFSZ, SIG_IGN);
    set_handler(SIGBUS, on_bus_error);
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

/* Bytes of the well-formed UTF-8 sequence at s (a zero byte ends it); 0 when there is none. */
static size_t utf8_length(const unsigned char *s)
{
    size_t need, i;
    unsigned low = 0x80, high = 0xbf; /* of the second byte: no overlong form, no surrogate */
    if (s[0] < 0x80) return 1;
    if (s[0] < 0xc2 || s[0] > 0xf4) return 0;
    need = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] == 0xe0) low = 0xa0;
    if (s[0] == 0xed) high = 0x9f;
    if (s[0] == 0xf0) low = 0x90;
    if (s[0] == 0xf4) high = 0x8f;
    if (s[1] < low || s[1] > high) return 0;
    for (i = 2; i < need; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    return need;
}

/* The same, and 0 too for control characters; U+0080 to U+009F are some: U+009B is ESC [. */
static size_t shown_length(const unsigned char *s)
{
    if (s[0] < 0x20 || s[0] == 0x7f || (s[0] == 0xc2 && s[1] < 0xa0)) return 0;
    return utf8_length(s);
}

/* Bytes that one '?' stands for where shown_length says 0. */
static size_t hidden_length(const unsigned char *s)
{
    size_t n = utf8_length(s);
    return n ? n : 1;
}

void out_text(FILE *f, const char *text)
{
    const unsigned char *s = (const unsigned char *)(text ? text : "");
    while (*s) {
        size_t n = shown_length(s);
        if (n)
            fwrite(s, 1, n, f);
        else
            fputc('?', f);
        s += n ? n : hidden_length(s);
    }
}

char *out_clean(char *buf, size_t size, const char *text)
{
    const unsigned char *s = (const unsigned char *)text;
    size_t used = 0;
    while (*s) {
        size_t n = shown_length(s), put = n ? n : 1;
        if (put > size - 1 - used) break;
        if (n)
            memcpy(buf + used, s, n);
        else
            buf[used] = '?';
        used += put;
        s += n ? n : hidden_length(s);
    }
    buf[used] = 0;
    return buf;
}

void out_word(FILE *f, const char *text)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "%+,-./:=@_";
    const char *quote;
    if (text[strspn(text, plain)] == 0 && *text) {
        fputs(text, f);
        return;
    }
    fputc('\'', f);
    while ((quote = strchr(text, '\''))) {
        char part[256];
        while (text < quote) {
            size_t n = (size_t)(quote - text) < sizeof part ? (size_t)(quote - text)
                                                            : sizeof part - 1;
            memcpy(part, text, n);
            part[n] = 0;
            out_text(f, part);
            text += n;
        }
        fputs("'\\''", f);
        text++;
    }
    out_text(f, text);
    fputc('\'', f);
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
    if (seconds < 0.95e-6)
        snprintf(buf, 32, "%.0f ns", seconds * 1e9);
    else if (seconds < 1e-3)
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
    size_t i, c, owed = 0, width[32] = {0};
    int failed = table->failed;
    for (i = 0; i < table->n_cells; i++) {
        size_t length = strlen(table->cells[i]);
        c = i % table->n_columns;
        if (c < 32 && length > width[c]) width[c] = length;
    }
    for (i = 0; !failed && i < table->n_cells; i++) {
        const char *cell = table->cells[i];
        size_t pad;
        c = i % table->n_columns;
        pad = c < 32 ? width[c] - strlen(cell) : 0;
        /* Spaces are owed until something stands behind them, so that no line ends with one. */
        owed += c == 0 ? (size_t)indent : 2;
        if (table->align[c] == 'r') owed += pad;
        if (*cell) {
            for (; owed; owed--) putchar(' ');
            out_text(stdout, cell);
        }
        if (table->align[c] != 'r') owed += pad;
        if (c + 1 == table->n_columns) {
            putchar('\n');
            owed = 0;
        }
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
    for (c = clean; *c;) {
        size_t n = utf8_length((const unsigned char *)c);
        if (!n) *c = '?';
        c += n ? n : 1;
    }
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
    /* ASCII: a terminal takes U+009B for ESC [ and U+202E turns lines around. */
    if (!failed)
        failed = json_dumpf(document, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9) |
                                                  JSON_PRESERVE_ORDER | JSON_ENSURE_ASCII) != 0;
    json_decref(document);
    if (failed) return out_error(EXIT_INTERNAL, "the JSON document could not be made or written");
    putchar('\n');
    return EXIT_OK;
}

/* ---- files ---- */

/* The folder that `path` lies in, without links and dots. 0 when there is none. */
static int real_folder(const char *path, char folder[PATH_MAX])
{
    char text[PATH_MAX];
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) : 0;
    if (!slash) return realpath(".", folder) != NULL;
    if (n >= sizeof text) return 0;
    memcpy(text, path, n);
    text[n] = 0;
    return realpath(n ? text : "/", folder) != NULL;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int same_file(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

int out_same_target(const char *a, const char *b)
{
    char folder_a[PATH_MAX], folder_b[PATH_MAX];
    if (same_file(a, b)) return 1;
    return strcmp(base_name(a), base_name(b)) == 0 && real_folder(a, folder_a) &&
           real_folder(b, folder_b) && strcmp(folder_a, folder_b) == 0;
}

const char *out_refuse_target(const char *path, const char *input)
{
    static const char index[] = ".index.json", config[] = "config.json";
    char folder[PATH_MAX], files[PATH_MAX];
    struct stat info;
    size_t n;
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        return S_ISDIR(info.st_mode) ? "is a directory" : "exists and is not a regular file";
    if (!input) return NULL;
    if (same_file(path, input)) return "is an input of this run";
    n = strlen(input);
    if (stat(input, &info) == 0 && S_ISDIR(info.st_mode)) {
        if (!realpath(input, files)) return NULL;
    } else if (!real_folder(input, files)) {
        return NULL;
    } else if (n < sizeof index - 1 || strcmp(input + n - (sizeof index - 1), index) != 0) {
        /* One file: its neighbours are not its parts, but for the config. */
        if (strcmp(base_name(path), config) != 0) return NULL;
    }
    if (real_folder(path, folder) && strcmp(folder, files) == 0)
        return "would become a part of an input; choose another directory";
    return NULL;
}

int out_file_open(out_file *file, const char *path)
{
    memset(file, 0, sizeof *file);
    file->path = path;
    file->stream = open_memstream(&file->text, &file->n);
    return file->stream ? EXIT_OK : out_error(EXIT_INTERNAL, "%s: out of memory", path);
}

int out_file_try(const char *path)
{
    dspark_writer *w = NULL;
    dspark_error err;
    dspark_status st = dspark_writer_create(&w, path, &err);
    dspark_writer_abort(w);
    return st == DSPARK_OK ? EXIT_OK : out_fail(st, &err);
}

int out_file_commit(out_file *file)
{
    dspark_error err = {0};
    dspark_status st;
    int failed = ferror(file->stream);
    if (fclose(file->stream) != 0) failed = 1;
    if (failed)
        st = out_set_error(&err, DSPARK_ENOMEM, file->path, "out of memory for the text");
    else
        st = dspark_file_write(file->path, file->text, file->n, &err);
    free(file->text);
    memset(file, 0, sizeof *file);
    return st == DSPARK_OK ? EXIT_OK : out_fail(st, &err);
}

double out_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
