/* The journal of `dspark eval`: one line of JSON a finished dump, so that an interrupted run goes on
 * where it stopped. Each line ends in a digest of itself. A line that was cut off by a crash is dropped;
 * anything else that is not as written, be it one digit, is an error. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "eval.h"
#include "out.h"

typedef struct journal_line {
    char *name, *facts;
    eval_data data;
} journal_line;

struct eval_journal {
    FILE *file;
    const char *path;
    journal_line *lines;
    size_t n, capacity;
};

void eval_journal_close(eval_journal *j)
{
    size_t i;
    if (!j) return;
    if (j->file) fclose(j->file);
    for (i = 0; i < j->n; i++) {
        free(j->lines[i].name);
        free(j->lines[i].facts);
        eval_data_free(&j->lines[i].data);
    }
    free(j->lines);
    free(j);
}

/* ---- columns to JSON and back ---- */

static json_t *pack_bytes(const uint8_t *values, size_t n)
{
    json_t *array = json_array();
    size_t i;
    for (i = 0; i < n; i++) out_append(array, json_integer(values[i]));
    return array;
}

static json_t *pack_floats(const float *values, size_t n)
{
    json_t *array = json_array();
    size_t i;
    for (i = 0; i < n; i++) out_append(array, json_real((double)values[i]));
    return array;
}

static json_t *pack_data(const eval_data *d)
{
    json_t *o = json_object(), *depth = json_array();
    size_t i, cells = d->n * d->k;
    for (i = 0; i < d->n; i++) out_append(depth, json_integer(d->depth[i]));
    out_set(o, "depth", depth);
    out_set(o, "accepted", pack_bytes(d->accepted, d->n));
    out_set(o, "confidence", pack_floats(d->confidence, cells));
    if (!d->has_target) return o;
    out_set(o, "agree", pack_bytes(d->agree, cells));
    out_set(o, "greedy_text", pack_bytes(d->greedy_text, cells));
    out_set(o, "target_p", pack_floats(d->target_p, cells));
    out_set(o, "alpha", pack_floats(d->alpha, cells));
    return o;
}

static int unpack_bytes(const json_t *array, uint8_t *to, size_t n, int most)
{
    size_t i;
    if (!json_is_array(array) || json_array_size(array) != n) return -1;
    for (i = 0; i < n; i++) {
        const json_t *v = json_array_get(array, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > most) return -1;
        to[i] = (uint8_t)json_integer_value(v);
    }
    return 0;
}

static int unpack_floats(const json_t *array, float *to, size_t n)
{
    size_t i;
    if (!json_is_array(array) || json_array_size(array) != n) return -1;
    for (i = 0; i < n; i++) {
        double v = json_number_value(json_array_get(array, i));
        if (!json_is_number(json_array_get(array, i)) || !(v >= 0 && v <= 1)) return -1;
        to[i] = (float)v;
    }
    return 0;
}

/* -1 when the object is not what pack_data wrote, -2 without memory. */
static int unpack_data(const json_t *o, eval_data *d)
{
    const json_t *depth = json_object_get(o, "depth");
    size_t n = json_array_size(depth), i, cells;
    if (!json_is_array(depth)) return -1;
    if (eval_data_reserve(d, n) != 0) return -2;
    cells = n * d->k;
    for (i = 0; i < n; i++) {
        const json_t *v = json_array_get(depth, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > UINT32_MAX)
            return -1;
        d->depth[i] = (uint32_t)json_integer_value(v);
    }
    if (unpack_bytes(json_object_get(o, "accepted"), d->accepted, n, (int)d->k) != 0 ||
        unpack_floats(json_object_get(o, "confidence"), d->confidence, cells) != 0)
        return -1;
    if (d->has_target &&
        (unpack_bytes(json_object_get(o, "agree"), d->agree, cells, 1) != 0 ||
         unpack_bytes(json_object_get(o, "greedy_text"), d->greedy_text, cells, 1) != 0 ||
         unpack_floats(json_object_get(o, "target_p"), d->target_p, cells) != 0 ||
         unpack_floats(json_object_get(o, "alpha"), d->alpha, cells) != 0))
        return -1;
    d->n = n;
    return 0;
}

/* ---- lines ---- */

static const char digest_key[] = ",\"digest\":\"";

/* A line with its digest and newline, which the caller frees; NULL without memory. Takes o. */
static char *line_text(json_t *o)
{
    char *text = json_dumps(o, JSON_COMPACT | JSON_REAL_PRECISION(9)), hex[33], *line = NULL;
    size_t n = text ? strlen(text) - 1 : 0; /* without the closing brace */
    json_decref(o);
    if (text) line = malloc(n + sizeof digest_key + 36);
    if (line) {
        dspark_digest(text, n, hex);
        sprintf(line, "%.*s%s%s\"}\n", (int)n, text, digest_key, hex);
    }
    free(text);
    return line;
}

/* The first line: what the records mean. */
static json_t *header_line(const eval_key *key)
{
    json_t *o = json_object();
    unsigned k = 0;
    int has_target = 0;
    sscanf(key->text, "k=%u target=%d", &k, &has_target);
    out_set(o, "dspark_eval", json_string(key->text));
    out_set(o, "k", json_integer(k));
    out_set(o, "has_target", json_boolean(has_target));
    return o;
}

/* Does a line, with its newline, end in the digest of what stands before it? */
static int is_as_written(const char *text, size_t n)
{
    char hex[33];
    const size_t tail = sizeof digest_key - 1 + 32 + 3; /* `,"digest":"HEX"}` and the newline */
    if (n <= tail || memcmp(text + n - tail, digest_key, sizeof digest_key - 1) != 0) return 0;
    dspark_digest(text, n - tail, hex);
    return memcmp(text + n - 35, hex, 32) == 0 && strcmp(text + n - 3, "\"}\n") == 0;
}

/* ---- reading ---- */

static journal_line *new_line(eval_journal *j)
{
    if (j->n == j->capacity) {
        size_t capacity = j->capacity ? 2 * j->capacity : 16;
        journal_line *lines = realloc(j->lines, capacity * sizeof *lines);
        if (!lines) return NULL;
        j->lines = lines;
        j->capacity = capacity;
    }
    memset(&j->lines[j->n], 0, sizeof j->lines[j->n]);
    return &j->lines[j->n++];
}

/* 0; -1 for a line that is broken, -2 without memory. */
static int read_line(eval_journal *j, const char *text, uint32_t k, int has_target)
{
    json_t *o = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    const char *name = json_string_value(json_object_get(o, "dump"));
    const char *facts = json_string_value(json_object_get(o, "facts"));
    journal_line *line;
    int code = -1;
    if (name && facts) {
        code = -2;
        line = new_line(j);
        if (line) {
            eval_data_init(&line->data, k, has_target);
            line->name = strdup(name);
            line->facts = strdup(facts);
            if (line->name && line->facts)
                code = unpack_data(json_object_get(o, "records"), &line->data);
        }
    }
    json_decref(o);
    return code;
}

static int check_header(const char *text, const eval_key *key, uint32_t *k, int *has_target)
{
    json_t *o = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    const char *found = json_string_value(json_object_get(o, "dspark_eval"));
    int same = found && strcmp(found, key->text) == 0;
    *k = (uint32_t)json_integer_value(json_object_get(o, "k"));
    *has_target = json_is_true(json_object_get(o, "has_target"));
    json_decref(o);
    return same;
}

/* Is a first line without its end the beginning of a journal? Anybody's file may have no newline, and a
 * line that was cut off is overwritten. */
static int is_cut_header(const char *text, size_t n, const eval_key *key)
{
    char *header = line_text(header_line(key));
    int same = header && n < strlen(header) && memcmp(text, header, n) == 0;
    free(header);
    return same;
}

static int load_lines(eval_journal *j, const eval_key *key, long *good_end)
{
    char *text = NULL;
    size_t size = 0, number = 0;
    ssize_t n;
    uint32_t k = 0;
    int has_target = 0, code = EXIT_OK, broken = 0;
    *good_end = 0;
    while (code == EXIT_OK && (n = getline(&text, &size, j->file)) > 0) {
        number++;
        if (text[n - 1] != '\n' && (number > 1 || is_cut_header(text, (size_t)n, key)))
            break; /* cut off by a crash: it is written again */
        if (broken)
            code = out_error(EXIT_INPUT, "--resume: %s: line %zu is broken", j->path, number - 1);
        else if (number == 1 && (!is_as_written(text, (size_t)n) ||
                                 !check_header(text, key, &k, &has_target) || k == 0 || k > 255))
            code = out_error(EXIT_INPUT, "--resume: %s belongs to another evaluation (other model, dumps' "
                             "options or version); expected %s", j->path, key->text);
        else if (number > 1) {
            int st = is_as_written(text, (size_t)n) ? read_line(j, text, k, has_target) : -1;
            if (st == -2) code = out_error(EXIT_INTERNAL, "out of memory");
            broken = st == -1;
        }
        if (code == EXIT_OK && !broken) *good_end = ftell(j->file);
    }
    if (code == EXIT_OK && broken)
        code = out_error(EXIT_INPUT, "--resume: %s: line %zu is broken", j->path, number);
    if (code == EXIT_OK && ferror(j->file))
        code = out_error(EXIT_INPUT, "--resume: %s: %s", j->path, strerror(errno));
    free(text);
    return code;
}

static int write_line(eval_journal *j, json_t *o)
{
    char *text = line_text(o);
    int failed;
    if (!text) return out_error(EXIT_INTERNAL, "out of memory");
    failed = fputs(text, j->file) < 0 || fflush(j->file) != 0 || fsync(fileno(j->file)) != 0;
    free(text);
    return failed ? out_error(EXIT_INTERNAL, "--resume: %s: %s", j->path, strerror(errno)) : EXIT_OK;
}

int eval_journal_open(eval_journal **out, const char *path, const eval_key *key)
{
    eval_journal *j = calloc(1, sizeof *j);
    struct stat info;
    long end = 0;
    int code, fd;
    *out = NULL;
    if (!j) return out_error(EXIT_INTERNAL, "out of memory");
    j->path = path;
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666); /* a pipe must not hang it */
    j->file = fd >= 0 ? fdopen(fd, "r+") : NULL;
    if (!j->file) {
        code = out_error(EXIT_INTERNAL, "--resume: %s: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        eval_journal_close(j);
        return code;
    }
    /* A device or a pipe may never end, and cannot be cut. */
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        eval_journal_close(j);
        return out_error(EXIT_USAGE, "--resume: %s: exists and is not a regular file", path);
    }
    code = load_lines(j, key, &end);
    /* What a crash left half-written goes; the next line begins where the last good one ended. */
    if (code == EXIT_OK && (ftruncate(fd, end) != 0 || fseek(j->file, end, SEEK_SET) != 0))
        code = out_error(EXIT_INTERNAL, "--resume: %s: %s", path, strerror(errno));
    if (code == EXIT_OK && end == 0) code = write_line(j, header_line(key));
    if (code != EXIT_OK) {
        eval_journal_close(j);
        return code;
    }
    *out = j;
    return EXIT_OK;
}

int eval_journal_find(eval_journal *j, const char *name, const char *facts, eval_data *into)
{
    size_t i;
    for (i = 0; i < j->n; i++)
        if (strcmp(j->lines[i].name, name) == 0 && strcmp(j->lines[i].facts, facts) == 0)
            return eval_data_append(into, &j->lines[i].data) == 0 ? 1 : -1;
    return 0;
}

int eval_journal_add(eval_journal *j, const char *name, const char *facts, const eval_data *d)
{
    json_t *o = json_object();
    out_set(o, "dump", out_string(name));
    out_set(o, "facts", json_string(facts));
    out_set(o, "records", pack_data(d));
    return write_line(j, o);
}
