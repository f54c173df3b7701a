/* A session's steps. Allocates nothing: its table and its blocks come from the pool. */
#include "model/session.h"

#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "model/context.h"

/* Rows of one call of the context path, and sessions of one call of the drafter: their positions and
 * inputs lie on the stack. */
#define CHUNK_ROWS 256u
#define CHUNK_SESSIONS 32u

/* ---- blocks ---- */

void dspark__session_trim(dspark_session *s)
{
    uint32_t keep = (uint32_t)dspark__ceil_div_u64(s->length, s->pool->info.block_size);
    if (keep >= s->n_blocks) return;
    dspark__pool_release(s->pool, s->table + keep, s->n_blocks - keep);
    s->n_blocks = keep;
}

dspark_status dspark__session_reserve(dspark_session *s, uint64_t length, dspark_error *err)
{
    dspark_pool *p = s->pool;
    const uint32_t size = p->info.block_size;
    const uint32_t held = s->n_blocks, tail = (uint32_t)(s->length % size);
    uint64_t need = dspark__ceil_div_u64(length, size);
    uint64_t more = need > held ? need - held : 0;
    dspark_status st = DSPARK_OK;
    if (more && (st = dspark__pool_take(p, s->table + held, more, err)) != DSPARK_OK) return st;
    s->n_blocks = held + (uint32_t)more;
    /* The block that the next entry goes to must be this session's alone. */
    if (tail == 0 || length == s->length) return DSPARK_OK;
    uint32_t last = (uint32_t)(s->length / size);
    int32_t own, old = s->table[last];
    if (!dspark__pool_shared(p, old)) return DSPARK_OK;
    if ((st = dspark__pool_take(p, &own, 1, err)) != DSPARK_OK) {
        dspark__session_trim(s);
        return st;
    }
    dspark__pool_copy(p, own, old, tail);
    s->table[last] = own;
    dspark__pool_release(p, &old, 1);
    return DSPARK_OK;
}

/* ---- append ---- */

static dspark_status check_append(const dspark_session *s, const dspark_drafter *d, uint64_t first,
                                  size_t taps_width, size_t n, dspark_error *err)
{
    const dspark_config *c = &s->pool->model->config;
    const size_t width = (size_t)c->n_taps * c->tap_width;
    if (dspark__drafter_model(d) != s->pool->model)
        return dspark__fail(err, DSPARK_EINVAL, "drafter", "serves another model than the session's pool");
    if (taps_width != width)
        return dspark__fail(err, DSPARK_EINVAL, "taps_width",
                            "expected %zu (%u taps of %u), found %zu", width, c->n_taps, c->tap_width,
                            taps_width);
    if (first != s->length)
        return dspark__fail(err, DSPARK_ERANGE, "first",
                            first < s->length ? "position %llu is there already: the session has %llu positions "
                                                "(rewind to replace them)"
                                              : "position %llu would leave a gap: the session has %llu "
                                                "positions",
                            (unsigned long long)first, (unsigned long long)s->length);
    if (n > s->pool->info.max_length - s->length)
        return dspark__fail(err, DSPARK_ENOSPACE, "max_length",
                            "%zu rows from position %llu on do not fit: a session of this pool has room for %llu", n,
                            (unsigned long long)first, (unsigned long long)s->pool->info.max_length);
    return DSPARK_OK;
}

/* Rows of a call from `row` on; errors name the call's rows. */
static dspark_status append_chunk(dspark_session *s, dspark_drafter *d, size_t row,
                                  const unsigned char *taps, size_t stride, size_t n, dspark_error *err)
{
    dspark_context *context = dspark__drafter_context(d);
    int64_t positions[CHUNK_ROWS], slots[CHUNK_ROWS];
    dspark_run_info info;
    dspark_batch b = {.struct_size = sizeof b, .n_tokens = n, .taps = taps, .taps_stride = stride,
                      .positions = positions, .slots = slots, .first_row = row};
    for (size_t i = 0; i < n; i++) {
        positions[i] = (int64_t)(s->length + i);
        slots[i] = dspark__session_slot(s, s->length + i);
    }
    dspark_status st = dspark__context_run(context, &b, &s->pool->view, &info, err);
    s->length += info.n_rows;
    return st;
}

dspark_status dspark__session_append(dspark_session *s, dspark_drafter *d, uint64_t first,
                                     const void *taps, size_t taps_width, size_t taps_stride, size_t n,
                                     dspark_error *err)
{
    const unsigned char *row = taps;
    dspark_status st = check_append(s, d, first, taps_width, n, err);
    if (st != DSPARK_OK || n == 0) return st;
    if (taps_stride == 0) taps_stride = taps_width * 2;
    if (taps_stride < taps_width * 2 || n > PTRDIFF_MAX / taps_stride)
        return dspark__fail(err, DSPARK_EINVAL, "taps_stride",
                            "the %zu rows are %zu bytes apart, and a row has %zu", n, taps_stride, taps_width * 2);
    if ((st = dspark__session_reserve(s, s->length + n, err)) != DSPARK_OK) return st;
    for (size_t i = 0; st == DSPARK_OK && i < n; i += CHUNK_ROWS)
        st = append_chunk(s, d, i, row + i * taps_stride, taps_stride,
                          n - i < CHUNK_ROWS ? n - i : CHUNK_ROWS, err);
    if (st != DSPARK_OK) dspark__session_trim(s);
    return st;
}

/* ---- draft ---- */

static dspark_status check_draft(dspark_session *const *s, const dspark_drafter *d, size_t n,
                                 dspark_error *err)
{
    for (size_t i = 0; i < n; i++) {
        if (dspark__drafter_model(d) != s[i]->pool->model)
            return dspark__fail(err, DSPARK_EINVAL, "drafter", "serves another model than session %zu's pool",
                                i);
        if (s[i]->pool != s[0]->pool)
            return dspark__fail(err, DSPARK_EINVAL, "sessions", "session %zu is of another pool than the first",
                                i);
    }
    return DSPARK_OK;
}

static void describe(const dspark_session *s, const dspark_draft_input *in, dspark_draft_input *to)
{
    *to = *in;
    to->position = (int64_t)s->length;
    to->n_context = s->length;
    to->slots = NULL;
    to->block_table = s->table;
    to->n_table = s->n_blocks;
}

/* Twice over the sessions: all are checked before the first is drafted. */
dspark_status dspark__sessions_draft(dspark_session *const *s, dspark_drafter *d,
                                     const dspark_draft_input *in, dspark_draft_output *out, size_t n,
                                     dspark_error *err)
{
    dspark_draft_input local[CHUNK_SESSIONS];
    dspark__cache_map map;
    dspark_status st = check_draft(s, d, n, err);
    dspark__draft_reset(out, n);
    if (st != DSPARK_OK || n == 0) return st;
    st = dspark__cache_map_init(&map, &s[0]->pool->view, &s[0]->pool->model->config, err);
    for (size_t i = 0; st == DSPARK_OK && i < n; i++) {
        describe(s[i], &in[i], local);
        st = dspark__draft_check(d, &map, local, &out[i], 1, i, err);
    }
    for (size_t i = 0; st == DSPARK_OK && i < n; i += CHUNK_SESSIONS) {
        size_t m = n - i < CHUNK_SESSIONS ? n - i : CHUNK_SESSIONS;
        for (size_t k = 0; k < m; k++) describe(s[i + k], &in[i + k], &local[k]);
        st = dspark__draft_run(d, &map, local, out + i, m, err);
        for (size_t k = 0; st == DSPARK_OK && k < m; k++) {
            s[i + k]->drafted = out[i + k].status == DSPARK_OK;
            s[i + k]->draft_position = s[i + k]->length;
            s[i + k]->n_drafted = out[i + k].n_tokens;
        }
    }
    return st;
}

/* ---- accept, rewind, fork ---- */

dspark_status dspark__session_accept(dspark_session *s, uint32_t n_accepted, dspark_error *err)
{
    if (!s->drafted)
        return dspark__fail(err, DSPARK_EINVAL, "accept", "nothing has been drafted since the last accept, "
                                                          "rewind or load");
    if (n_accepted > s->n_drafted)
        return dspark__fail(err, DSPARK_EINVAL, "n_accepted", "%u tokens are accepted, and %u were drafted", n_accepted,
                            s->n_drafted);
    const uint64_t length = s->draft_position + 1 + n_accepted;
    if (s->length < length)
        return dspark__fail(err, DSPARK_EINVAL, "accept",
                            "the rows of %llu positions must have been appended, and the session has those of %llu",
                            (unsigned long long)length, (unsigned long long)s->length);
    s->length = length;
    s->drafted = 0;
    dspark__session_trim(s);
    dspark__acceptance_add(&s->acceptance, s->n_drafted, n_accepted);
    return DSPARK_OK;
}

dspark_status dspark__session_rewind(dspark_session *s, uint64_t length, dspark_error *err)
{
    if (length > s->length)
        return dspark__fail(err, DSPARK_ERANGE, "length", "cannot rewind to %llu positions: the session has %llu",
                            (unsigned long long)length, (unsigned long long)s->length);
    s->length = length;
    s->drafted = 0;
    dspark__session_trim(s);
    return DSPARK_OK;
}

dspark_status dspark__session_fork(dspark_session **out, dspark_session *s, dspark_error *err)
{
    dspark_session *twin;
    dspark_status st = dspark__pool_open_session(&twin, s->pool, err);
    *out = NULL;
    if (st != DSPARK_OK) return st;
    dspark__pool_hold(s->pool, s->table, s->n_blocks);
    memcpy(twin->table, s->table, s->n_blocks * sizeof *s->table);
    twin->n_blocks = s->n_blocks;
    twin->length = s->length;
    twin->drafted = s->drafted;
    twin->draft_position = s->draft_position;
    twin->n_drafted = s->n_drafted;
    *out = twin;
    return DSPARK_OK;
}
