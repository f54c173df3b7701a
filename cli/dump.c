/* dump: opens and checks hidden-state dumps, makes synthetic rows, digests and measures rows as a
 * stream. */
#include "dump.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "out.h"

static dspark_status fail_tensor(const dump *d, const char *tensor, dspark_error *err,
                                 const char *expected, const dspark_tensor *found)
{
    char where[256], shape[128] = "";
    size_t used = 0;
    uint32_t i;
    snprintf(where, sizeof where, "%s: %s", d->path, tensor);
    if (!found)
        return out_set_error(err, DSPARK_EFORMAT, where, "expected %s, found no such tensor",
                             expected);
    for (i = 0; i < found->rank && i < DSPARK_MAX_RANK && used < sizeof shape; i++)
        used += (size_t)snprintf(shape + used, sizeof shape - used, "%s%" PRIu64, i ? ", " : "",
                                 found->shape[i]);
    return out_set_error(err, DSPARK_EFORMAT, where, "expected %s, found [%s] %s", expected, shape,
                         dspark_dtype_name(found->dtype));
}

static int64_t read_i64(const dspark_tensor *t, uint64_t i)
{
    if (t->dtype == DSPARK_I32) {
        int32_t value;
        memcpy(&value, (const unsigned char *)t->data + 4 * i, sizeof value);
        return value;
    } else {
        int64_t value;
        memcpy(&value, (const unsigned char *)t->data + 8 * i, sizeof value);
        return value;
    }
}

static dspark_status check_states(dump *d, const dspark_config *c, dspark_error *err)
{
    const dspark_tensor *t = dspark_checkpoint_find(d->file, "hidden_states");
    char expected[128];
    snprintf(expected, sizeof expected, "[seq, %u or %u, %u] BF16", c->n_taps, c->n_taps + 1,
             c->tap_width);
    if (!t || t->rank != 3 || t->dtype != DSPARK_BF16 || t->shape[2] != c->tap_width ||
        (t->shape[1] != c->n_taps && t->shape[1] != (uint64_t)c->n_taps + 1))
        return fail_tensor(d, "hidden_states", err, expected, t);
    if (t->shape[0] == 0) return fail_tensor(d, "hidden_states", err, "at least one row", t);
    d->n_rows = t->shape[0];
    d->has_verifier = t->shape[1] == (uint64_t)c->n_taps + 1;
    d->stride = (size_t)(t->n_bytes / t->shape[0]);
    d->taps = t->data;
    d->states = t;
    return DSPARK_OK;
}

static dspark_status check_ids(dump *d, const dspark_config *c, dspark_error *err)
{
    const dspark_tensor *t = dspark_checkpoint_find(d->file, "token_ids");
    char text[128];
    uint64_t i;
    snprintf(text, sizeof text, "[%" PRIu64 "] I64 (one id for each row of hidden_states)",
             d->n_rows);
    if (!t || t->rank != 1 || (t->dtype != DSPARK_I64 && t->dtype != DSPARK_I32) ||
        t->shape[0] != d->n_rows)
        return fail_tensor(d, "token_ids", err, text, t);
    d->ids = t;
    for (i = 0; i < d->n_rows; i++) {
        int64_t id = read_i64(t, i);
        if (id >= 0 && id < (int64_t)c->vocab_size) continue;
        snprintf(text, sizeof text, "%s: token_ids", d->path);
        return out_set_error(err, DSPARK_EFORMAT, text, "row %" PRIu64 ": expected an id from 0 to "
                             "%u, found %" PRId64, i, c->vocab_size - 1, id);
    }
    return DSPARK_OK;
}

static dspark_status check_positions(dump *d, dspark_error *err)
{
    const dspark_tensor *t = dspark_checkpoint_find(d->file, "positions");
    char text[256];
    uint64_t i;
    int64_t first;
    if (!t) return DSPARK_OK;
    snprintf(text, sizeof text, "[%" PRIu64 "] I64 (one position for each row of hidden_states)",
             d->n_rows);
    if (t->rank != 1 || (t->dtype != DSPARK_I64 && t->dtype != DSPARK_I32) ||
        t->shape[0] != d->n_rows)
        return fail_tensor(d, "positions", err, text, t);
    snprintf(text, sizeof text, "%s: positions", d->path);
    first = read_i64(t, 0);
    if (first < 0)
        return out_set_error(err, DSPARK_EFORMAT, text, "row 0: expected a position of 0 or more, "
                             "found %" PRId64, first);
    for (i = 1; i < d->n_rows; i++) {
        /* Unsigned: a hostile first position must not overflow the sum. */
        uint64_t expected = (uint64_t)first + i;
        int64_t found = read_i64(t, i);
        if (found >= 0 && (uint64_t)found == expected) continue;
        return out_set_error(err, DSPARK_EFORMAT, text, "row %" PRIu64 ": positions must follow "
                             "each other without a gap; expected %" PRIu64 ", found %" PRId64, i,
                             expected, found);
    }
    d->has_positions = 1;
    d->first_position = (uint64_t)first;
    return DSPARK_OK;
}

dspark_status dump_open(dump *d, const char *path, const dspark_config *config, dspark_error *err)
{
    dspark_status st;
    memset(d, 0, sizeof *d);
    d->path = path;
    d->n_taps = config->n_taps;
    d->tap_width = config->tap_width;
    d->row_bytes = (size_t)config->n_taps * config->tap_width * 2;
    if (stat(path, &d->opened) != 0) d->opened.st_ino = 0;
    st = dspark_checkpoint_open(&d->file, path, err);
    if (st != DSPARK_OK) out_add_file(err, path);
    if (st == DSPARK_OK) st = check_states(d, config, err);
    if (st == DSPARK_OK) st = check_ids(d, config, err);
    if (st == DSPARK_OK) st = check_positions(d, err);
    if (st != DSPARK_OK) dump_close(d);
    return st;
}

int64_t dump_token(const dump *d, uint64_t row)
{
    return read_i64(d->ids, row);
}

/* splitmix64: a counter in, well mixed bits out. */
static uint64_t mix_bits(uint64_t counter)
{
    uint64_t z = counter * UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Four uniform 16-bit parts summed: near normal, sum of squares 1, and exact in fp32. The float is
 * then cut to bf16; which rounding is used does not matter for made-up data. */
static uint16_t make_value(uint64_t bits)
{
    int32_t sum = (int32_t)(bits & 0xffff) + (int32_t)(bits >> 16 & 0xffff) +
                  (int32_t)(bits >> 32 & 0xffff) + (int32_t)(bits >> 48) - 2 * 65535;
    float value = (float)sum * (1.0f / 37837.0f);
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return (uint16_t)(word >> 16);
}

dspark_status dump_make(dump *d, uint64_t n_rows, uint64_t seed, const dspark_config *config,
                        dspark_error *err)
{
    uint64_t i, n_values, base = mix_bits(seed + 1);
    memset(d, 0, sizeof *d);
    d->path = "synthetic rows";
    d->n_taps = config->n_taps;
    d->tap_width = config->tap_width;
    d->row_bytes = (size_t)config->n_taps * config->tap_width * 2;
    d->stride = d->row_bytes;
    d->n_rows = n_rows;
    if (d->row_bytes && n_rows <= SIZE_MAX / d->row_bytes)
        d->owned = malloc((size_t)n_rows * d->row_bytes + 1);
    if (!d->owned)
        return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for %" PRIu64 " synthetic rows",
                             n_rows);
    n_values = n_rows * (d->row_bytes / 2);
    for (i = 0; i < n_values; i++) {
        uint16_t value = make_value(mix_bits(base + i));
        memcpy(d->owned + 2 * i, &value, sizeof value);
    }
    d->taps = d->owned;
    return DSPARK_OK;
}

/* Is every bf16 of a row finite? Four values at a time, at any alignment: an exponent of all ones
 * becomes a zero lane, and adding 0x7fff sets the top bit of every lane that is not zero. */
static int row_is_finite(const unsigned char *row, size_t n_bytes)
{
    const uint64_t exponents = UINT64_C(0x7f807f807f807f80);
    const uint64_t tops = UINT64_C(0x8000800080008000);
    uint64_t all = tops;
    size_t i;
    for (i = 0; i + 8 <= n_bytes; i += 8) {
        uint64_t v;
        memcpy(&v, row + i, sizeof v);
        all &= ((v & exponents) ^ exponents) + UINT64_C(0x7fff7fff7fff7fff);
    }
    if ((all & tops) != tops) return 0;
    for (; i + 2 <= n_bytes; i += 2) {
        uint16_t v;
        memcpy(&v, row + i, sizeof v);
        if ((v & 0x7f80) == 0x7f80) return 0;
    }
    return 1;
}

/* How many rows from `first` on come before one that is not finite. */
static uint64_t count_finite(const dump *d, uint64_t first, uint64_t n)
{
    uint64_t i = 0;
    while (i < n && row_is_finite(d->taps + (size_t)(first + i) * d->stride, d->stride)) i++;
    return i;
}

dspark_status dump_check_rows(const dump *d, uint64_t first, uint64_t n, dspark_error *err)
{
    const uint64_t r = first + count_finite(d, first, n);
    const unsigned char *row = d->taps + (size_t)r * d->stride;
    char where[256], state[32];
    size_t i;
    if (r == first + n) return DSPARK_OK;
    for (i = 0; i + 2 <= d->stride; i += 2)
        if (!row_is_finite(row + i, 2)) break;
    if (i / 2 / d->tap_width < d->n_taps)
        snprintf(state, sizeof state, "tap %zu", i / 2 / d->tap_width);
    else
        snprintf(state, sizeof state, "the verifier's state");
    snprintf(where, sizeof where, "%s: hidden_states", d->path);
    return out_set_error(err, DSPARK_ENONFINITE, where, "row %" PRIu64 ", %s, element %zu: "
                         "expected a finite number, found NaN or infinity", r, state,
                         i / 2 % d->tap_width);
}

/* Is the error about rows that were given, not about a tensor of the checkpoint? */
static int is_about_rows(const dump *d, const dspark_error *err)
{
    const char *where = err->where;
    return strncmp(where, d->path, strlen(d->path)) == 0 || strcmp(where, "taps") == 0 ||
           strcmp(where, "states") == 0 || strcmp(where, "entries") == 0;
}

static void add_rows(const dump *d, dspark_error *err)
{
    const size_t n = strlen(err->message);
    snprintf(err->message + n, sizeof err->message - n, " (rows of %s)", d->path);
}

dspark_status dump_first_fault(const dump *d, const char *checkpoint, dspark_context *context,
                               const dspark_batch *batch, const dspark_cache_view *view, dspark_status st,
                               dspark_error *err)
{
    dspark_batch before = *batch;
    if (st != DSPARK_ENONFINITE) return st;
    before.states = NULL;
    before.states_stride = 0;
    before.taps = d->taps + batch->first_row * d->stride;
    before.taps_stride = d->stride;
    before.n_tokens = (size_t)count_finite(d, batch->first_row, batch->n_tokens);
    if (before.n_tokens) {
        dspark_error earlier;
        if (dspark_context_run(context, &before, view, NULL, &earlier) != DSPARK_OK) *err = earlier;
    }
    if (is_about_rows(d, err)) {
        out_add_path(err, d->path);
    } else {
        add_rows(d, err);
        out_add_path(err, checkpoint);
    }
    return err->code;
}

/* Four sums side by side; the order is fixed, so batches do not change the result. */
static double sum_squares(const unsigned char *row, size_t n)
{
    double lanes[4] = {0};
    size_t i;
    for (i = 0; i < n; i++) {
        uint16_t half;
        uint32_t word;
        float value;
        memcpy(&half, row + 2 * i, sizeof half);
        word = (uint32_t)half << 16;
        memcpy(&value, &word, sizeof value);
        lanes[i % 4] += (double)value * (double)value;
    }
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

/* Is the row equal to the last one of the call before? */
static int repeats_last(const dump_stats *s, const unsigned char *row, size_t n_bytes)
{
    char hex[33];
    dspark_digest(row, n_bytes, hex);
    return strcmp(hex, s->last) == 0;
}

void dump_stats_add(dump_stats *s, const dump *d, uint64_t first, uint64_t n)
{
    size_t bytes = (size_t)d->tap_width * 2;
    uint64_t r;
    uint32_t t, u;
    for (r = first; r < first + n; r++) {
        const unsigned char *row = d->taps + (size_t)r * d->stride;
        for (t = 0; t < d->n_taps; t++) {
            s->squares[t] += sum_squares(row + t * bytes, d->tap_width);
            for (u = t + 1; u < d->n_taps; u++)
                if (!s->differ[t][u])
                    s->differ[t][u] = memcmp(row + t * bytes, row + u * bytes, bytes) != 0;
        }
        if (r > first ? memcmp(row, row - d->stride, d->row_bytes) == 0
                      : s->n_rows && repeats_last(s, row, d->row_bytes)) {
            if (s->n_repeated++ == 0) s->first_repeated = r;
        }
        s->n_rows++;
    }
    if (n) dspark_digest(d->taps + (size_t)(first + n - 1) * d->stride, d->row_bytes, s->last);
}

double dump_stats_rms(const dump_stats *s, const dump *d, uint32_t tap)
{
    double n = (double)s->n_rows * d->tap_width;
    return n > 0 ? sqrt(s->squares[tap] / n) : 0;
}

size_t dump_stats_warn(const dump_stats *s, const dump *d, char texts[DUMP_MAX_WARNINGS][160])
{
    size_t n = 0;
    uint32_t t, u;
    if (s->n_repeated)
        snprintf(texts[n++], sizeof texts[0], "%" PRIu64 " row%s equal to the row before (first: "
                 "row %" PRIu64 "): was the dump padded, or written twice?", s->n_repeated,
                 s->n_repeated == 1 ? " is" : "s are", s->first_repeated);
    for (t = 0; t < d->n_taps && n < DUMP_MAX_WARNINGS; t++)
        if (s->squares[t] == 0)
            snprintf(texts[n++], sizeof texts[0], "tap %u is zero in every row: it was not filled",
                     t);
    for (t = 0; t < d->n_taps; t++)
        for (u = t + 1; u < d->n_taps && n < DUMP_MAX_WARNINGS; u++)
            if (!s->differ[t][u] && s->squares[t] != 0)
                snprintf(texts[n++], sizeof texts[0], "taps %u and %u are equal in every row: the "
                         "same layer was dumped twice", t, u);
    return n;
}

dspark_status dump_start(const dump *d, int given, uint64_t asked, uint64_t *start,
                         dspark_error *err)
{
    *start = d->has_positions ? d->first_position : given ? asked : 0;
    if (!given || asked == *start) return DSPARK_OK;
    return out_set_error(err, DSPARK_EFORMAT, d->path, "positions begin at %" PRIu64
                         ", but --start-position says %" PRIu64, *start, asked);
}

dspark_status dump_check_window(const dump *d, uint64_t start, const dspark_config *config,
                                dspark_error *err)
{
    if (start < config->max_positions && d->n_rows <= config->max_positions - start)
        return DSPARK_OK;
    return out_set_error(err, DSPARK_ERANGE, d->path, "%" PRIu64 " rows from position %" PRIu64
                         " do not fit: the model has positions 0 to %" PRIu64, d->n_rows, start,
                         config->max_positions - 1);
}

void dump_forget_rows(const dump *d, uint64_t first, uint64_t n)
{
    if (d->states) dspark_checkpoint_drop(d->file, d->states, first * d->stride, n * d->stride);
}

dspark_status dump_check_unchanged(const dump *d, dspark_error *err)
{
    struct stat now;
    const struct stat *then = &d->opened;
    if (!then->st_ino || stat(d->path, &now) != 0 || now.st_ino != then->st_ino || now.st_dev != then->st_dev)
        return DSPARK_OK;
    if (now.st_size == then->st_size && now.st_mtim.tv_sec == then->st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == then->st_mtim.tv_nsec)
        return DSPARK_OK;
    return out_set_error(err, DSPARK_EIO, d->path, "was written to while it was read");
}

void dump_close(dump *d)
{
    dspark_checkpoint_close(d->file);
    free(d->owned);
    memset(d, 0, sizeof *d);
}

void row_digest_start(row_digest *chain)
{
    memset(chain->hex, '0', 32);
    chain->hex[32] = 0;
}

void row_digest_add(row_digest *chain, const void *row, size_t n_bytes)
{
    char pair[65], row_hex[33];
    dspark_digest(row, n_bytes, row_hex);
    memcpy(pair, chain->hex, 32);
    memcpy(pair + 32, row_hex, 33);
    dspark_digest(pair, 64, chain->hex);
}
