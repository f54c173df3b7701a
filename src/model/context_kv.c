/* A context: checks a whole batch before the first write, then cuts it into chunks of consecutive
 * active rows and hands them to the stages. Allocates at creation only. */
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fpenv.h"
#include "base/status.h"
#include "model/context.h"

/* What reading a byte of the input costs, in multiply-adds of a product. */
#define CHECK_COST 4.0

dspark_status dspark__context_create(dspark_context **out, const dspark_model *model,
                                     const dspark_context_opts *opts, dspark_error *err)
{
    dspark_status st;
    dspark_allocator a = dspark__allocator_or_default(opts->allocator);
    dspark_context_opts o = *opts;
    *out = NULL;
    dspark_context *ctx = dspark__alloc(&a, sizeof *ctx, 64);
    if (!ctx) return dspark__fail_nomem(err, "context", sizeof *ctx);
    memset(ctx, 0, sizeof *ctx);
    ctx->allocator = a;
    ctx->model = model;
    ctx->path = o.path;
    dspark__workspace_init(&ctx->workspace, &a);
    if ((st = dspark__kern_select(&ctx->kern, o.isa, err)) != DSPARK_OK) goto fail;
    if (o.n_threads == 0) o.n_threads = dspark__threads_available();
    if ((st = dspark__plan_context(&model->config, &o, &ctx->layout, err)) != DSPARK_OK) goto fail;
    if (o.path == DSPARK_PATH_FULL && !(model->parts & DSPARK_PART_Q_A)) {
        st = dspark__fail(err, DSPARK_EINVAL, "path",
                          "the full path needs the model opened with DSPARK_PART_Q_A");
        goto fail;
    }
    st = dspark__threads_create(&ctx->threads, o.n_threads, o.parallel, &a, err);
    if (st != DSPARK_OK) goto fail;
    void *views[DSPARK__VIEW_COUNT];
    st = dspark__workspace_get(&ctx->workspace, ctx->layout.sizes, DSPARK__VIEW_COUNT, views, err);
    if (st != DSPARK_OK) goto fail;
    dspark__workspace_lock(&ctx->workspace);
    *out = ctx;
    return DSPARK_OK;
fail:
    dspark__context_free(ctx);
    return st;
}

void dspark__context_free(dspark_context *ctx)
{
    if (!ctx) return;
    dspark_allocator a = ctx->allocator;
    dspark__threads_free(ctx->threads);
    dspark__workspace_free(&ctx->workspace);
    dspark__free(&a, ctx, sizeof *ctx);
}

size_t dspark__batch_stride(const dspark_batch *b, const dspark_config *c)
{
    if (b->states) return b->states_stride ? b->states_stride : (size_t)c->hidden_size * 2;
    return b->taps_stride ? b->taps_stride : (size_t)c->n_taps * c->tap_width * 2;
}

/* ---- checking ---- */

static size_t row_bytes(const dspark_batch *b, const dspark_config *c)
{
    return b->states ? (size_t)c->hidden_size * 2 : (size_t)c->n_taps * c->tap_width * 2;
}

static dspark_status check_input(const dspark_batch *b, const dspark_config *c, dspark_error *err)
{
    if (b->n_tokens == 0) return DSPARK_OK;
    if (!b->taps == !b->states)
        return dspark__fail(err, DSPARK_EINVAL, "batch", "exactly one of taps and states must be given");
    size_t stride = dspark__batch_stride(b, c);
    if (b->n_tokens > 1 && stride < row_bytes(b, c))
        return dspark__fail(err, DSPARK_EINVAL, "batch", "a stride of %zu bytes is below the row's %zu",
                            stride, row_bytes(b, c));
    if (b->n_tokens > PTRDIFF_MAX / (stride ? stride : 1))
        return dspark__fail(err, DSPARK_EINVAL, "batch", "%zu rows of %zu bytes overflow memory",
                            b->n_tokens, stride);
    return DSPARK_OK;
}

static const unsigned char *input_row(const dspark_batch *b, const dspark_config *c, size_t row)
{
    const unsigned char *x = b->states ? b->states : b->taps;
    return x + row * dspark__batch_stride(b, c);
}

/* Name the element that is not a number: a tap and a column, or a column of the states. */
static dspark_status fail_nonfinite(const dspark_context *ctx, const dspark_batch *b, size_t row,
                                    dspark_error *err)
{
    const dspark_config *c = &ctx->model->config;
    const unsigned char *x = input_row(b, c, row);
    size_t n = row_bytes(b, c) / 2, i = 0;
    while (i + 1 < n && ctx->kern.finite_bf16(x + 2 * i, 1)) i++;
    if (b->states)
        return dspark__fail(err, DSPARK_ENONFINITE, "states", "row %zu, column %zu is not finite",
                            b->first_row + row, i);
    return dspark__fail(err, DSPARK_ENONFINITE, "taps",
                        "row %zu, tap %zu (target layer %d), column %zu is not finite",
                        b->first_row + row, i / c->tap_width, (int)c->tap_layers[i / c->tap_width], i % c->tap_width);
}

static int layer_mapped(const dspark_batch *b, const dspark__cache_map *map, uint32_t layer)
{
    return map->layers[layer] && (b->slots || b->layer_slots[layer]);
}

/* A row is active when some layer takes it. */
static int row_active(const dspark_batch *b, const dspark__cache_map *map, size_t row)
{
    for (uint32_t l = 0; l < map->n_layers; l++)
        if (layer_mapped(b, map, l) && dspark__batch_slot(b, l, row) >= 0) return 1;
    return 0;
}

/* Slots and positions of the active rows. *row: the first that is wrong, n_tokens when none is. */
static dspark_status check_places(const dspark_context *ctx, const dspark_batch *b,
                                  const dspark__cache_map *map, size_t *row, dspark_error *err)
{
    const dspark_config *c = &ctx->model->config;
    for (size_t i = *row = 0; i < b->n_tokens; *row = ++i) {
        if (!row_active(b, map, i)) continue; /* neither its position nor its numbers are read */
        for (uint32_t l = 0; l < map->n_layers; l++) {
            if (!layer_mapped(b, map, l)) continue;
            int64_t slot = dspark__batch_slot(b, l, i);
            if (slot >= map->n_slots)
                return dspark__fail(err, DSPARK_ERANGE, "slots",
                                    "row %zu, layer %u: slot %lld, the cache holds %lld (%lld blocks "
                                    "of %u)",
                                    b->first_row + i, l, (long long)slot, (long long)map->n_slots,
                                    (long long)(map->n_slots / map->block_size), map->block_size);
        }
        int64_t position = b->positions[i];
        if (position < 0 || (uint64_t)position >= c->max_positions)
            return dspark__fail(err, DSPARK_ERANGE, "positions",
                                "row %zu: position %lld, the model has 0 to %llu", b->first_row + i,
                                (long long)position, (unsigned long long)c->max_positions - 1);
    }
    return DSPARK_OK;
}

typedef struct finite_job {
    const dspark_context *ctx;
    const dspark_batch *batch;
    const dspark__cache_map *map; /* NULL: all rows are active */
    size_t n;
    size_t step; /* rows that a thread takes at a time: neighbours are one stream */
    atomic_size_t next, bad;
} finite_job;

static int row_is_good(const finite_job *job, size_t row)
{
    const dspark_config *c = &job->ctx->model->config;
    return (job->map && !row_active(job->batch, job->map, row)) ||
           job->ctx->kern.finite_bf16(input_row(job->batch, c, row), row_bytes(job->batch, c) / 2);
}

static void finite_task(void *arg, size_t worker)
{
    finite_job *job = arg;
    (void)worker;
    for (size_t first; (first = atomic_fetch_add(&job->next, job->step)) < job->n;) {
        for (size_t i = first; i < job->n && i < first + job->step; i++) {
            if (row_is_good(job, i)) continue;
            size_t seen = atomic_load(&job->bad);
            while (i < seen && !atomic_compare_exchange_weak(&job->bad, &seen, i)) {
            }
        }
    }
}

/* The numbers of the active ones of rows [0, n): the first that is wrong is named. Every batch is read
 * once for this, so large ones are read by all threads. */
static dspark_status check_numbers(const dspark_context *ctx, const dspark_batch *b,
                                   const dspark__cache_map *map, size_t n, dspark_error *err)
{
    finite_job job = {.ctx = ctx, .batch = b, .map = map, .n = n};
    job.step = 1 + n / (4 * (size_t)dspark__threads_count(ctx->threads));
    double work = (double)n * (double)row_bytes(b, &ctx->model->config) * CHECK_COST;
    atomic_init(&job.next, 0);
    atomic_init(&job.bad, n);
    dspark__threads_run(ctx->threads, finite_task, &job, dspark__threads_worth(ctx->threads, n, work));
    size_t bad = atomic_load(&job.bad);
    return bad < n ? fail_nonfinite(ctx, b, bad, err) : DSPARK_OK;
}

/* Of several wrong rows the first one is named; of a row its slot and position come first. */
static dspark_status check_rows(const dspark_context *ctx, const dspark_batch *b,
                                const dspark__cache_map *map, dspark_error *err)
{
    size_t n;
    dspark_status places = check_places(ctx, b, map, &n, err);
    dspark_status numbers = check_numbers(ctx, b, map, n, err);
    return numbers != DSPARK_OK ? numbers : places;
}

/* ---- chunks ---- */

static size_t hash_slot(int64_t slot)
{
    return (size_t)((uint64_t)slot * 0x9e3779b97f4a7c15u >> 17);
}

/* How many of the rows [row0, row0 + n) can go together before one names a slot again? A repeated
 * slot starts a new chunk, so the later row wins whatever the threads do. */
static size_t distinct_rows(const dspark_batch *b, const dspark__cache_map *map, size_t row0, size_t n,
                            int64_t *table)
{
    size_t mask = 1; /* of a table that is half empty, within the layout's */
    if (n == 1) return 1;
    while (mask < 2 * n) mask *= 2;
    mask--;
    for (uint32_t l = 0; l < map->n_layers; l++) {
        if (!layer_mapped(b, map, l)) continue;
        memset(table, 0xff, (mask + 1) * sizeof *table);
        for (size_t i = 0; i < n; i++) {
            int64_t slot = dspark__batch_slot(b, l, row0 + i);
            if (slot < 0) continue;
            size_t at = hash_slot(slot) & mask;
            while (table[at] >= 0 && table[at] != slot) at = (at + 1) & mask;
            if (table[at] == slot) n = i;
            else table[at] = slot;
        }
        if (b->slots) break; /* one mapping for all layers */
    }
    return n;
}

static void start_chunk(dspark__chunk *chunk, size_t row0, size_t n)
{
    const dspark_context *ctx = chunk->ctx;
    const dspark_batch *b = chunk->batch;
    chunk->row0 = row0;
    chunk->n = n;
    if (b->states) {
        chunk->x = input_row(b, &ctx->model->config, row0);
        chunk->x_stride = dspark__batch_stride(b, &ctx->model->config);
    } else {
        chunk->x = chunk->views[DSPARK__VIEW_STATES];
        chunk->x_stride = (size_t)ctx->model->config.hidden_size * 2;
    }
}

static dspark_status run_chunk(dspark__chunk *chunk, dspark_run_info *info, dspark_error *err)
{
    const dspark_batch *b = chunk->batch;
    dspark__bad states = {.row = SIZE_MAX}, entries = {.row = SIZE_MAX};
    if (b->taps) dspark__stage_states(chunk, chunk->views[DSPARK__VIEW_STATES], &states);
    /* The rows before go on: whether chunks are large or small, the first row that overflows anywhere is
     * named. */
    if (states.row != SIZE_MAX) chunk->n = states.row - chunk->row0;
    if (chunk->n > 0) {
        dspark__stage_rope(chunk);
        dspark__stage_insert(chunk, &info->n_written, &entries);
    }
    if (entries.row != SIZE_MAX) return dspark__blame_entries(chunk->ctx, b, &entries, err);
    if (states.row != SIZE_MAX) return dspark__blame_states(chunk->ctx, b, &states, err);
    for (size_t i = 0; i < chunk->n; i++)
        if (b->positions[chunk->row0 + i] > info->max_position)
            info->max_position = b->positions[chunk->row0 + i];
    return DSPARK_OK;
}

static dspark_status run_checked(dspark_context *ctx, const dspark_batch *b,
                                 const dspark__cache_map *map, dspark_run_info *info,
                                 dspark_error *err)
{
    dspark_status st = check_rows(ctx, b, map, err);
    if (st != DSPARK_OK) return st;

    uint16_t active[DSPARK_MAX_LAYERS];
    dspark__chunk chunk = {.ctx = ctx, .batch = b, .cache = map, .active = active};
    for (uint32_t l = 0; l < map->n_layers; l++)
        if (layer_mapped(b, map, l)) active[chunk.n_active++] = (uint16_t)l;
    st = dspark__workspace_get(&ctx->workspace, ctx->layout.sizes, DSPARK__VIEW_COUNT, chunk.views,
                               err);
    if (st != DSPARK_OK) return st;

    for (size_t row = 0; row < b->n_tokens;) {
        if (!row_active(b, map, row)) {
            info->n_skipped++;
            info->n_rows = ++row;
            continue;
        }
        size_t n = 1;
        while (n < ctx->layout.max_tokens && row + n < b->n_tokens && row_active(b, map, row + n)) n++;
        n = distinct_rows(b, map, row, n, chunk.views[DSPARK__VIEW_SLOTS]);
        start_chunk(&chunk, row, n);
        if ((st = run_chunk(&chunk, info, err)) != DSPARK_OK) return st;
        row += n;
        info->n_rows = row;
    }
    return DSPARK_OK;
}

dspark_status dspark__context_run(dspark_context *ctx, const dspark_batch *b,
                                  const dspark_cache_view *view, dspark_run_info *info,
                                  dspark_error *err)
{
    dspark_status st;
    dspark__cache_map map;
    const dspark_config *c = &ctx->model->config;
    *info = (dspark_run_info){.max_position = -1};
    if ((st = dspark__cache_map_init(&map, view, c, err)) != DSPARK_OK) return st;
    if ((st = check_input(b, c, err)) != DSPARK_OK) return st;
    if (b->n_tokens == 0) return DSPARK_OK;
    if (!b->slots == !b->layer_slots)
        return dspark__fail(err, DSPARK_EINVAL, "batch",
                            "exactly one of slots and layer_slots must be given");
    if (!b->positions) return dspark__fail(err, DSPARK_EINVAL, "batch", "positions is NULL");
    unsigned env = dspark__fpenv_enter();
    st = run_checked(ctx, b, &map, info, err);
    dspark__fpenv_leave(env);
    return st;
}

static dspark_status states_checked(dspark_context *ctx, const dspark_batch *b, uint16_t *states,
                                    dspark_error *err)
{
    dspark_status st;
    const dspark_config *c = &ctx->model->config;
    dspark__chunk chunk = {.ctx = ctx, .batch = b};
    dspark__bad bad;
    if ((st = check_numbers(ctx, b, NULL, b->n_tokens, err)) != DSPARK_OK) return st;
    st = dspark__workspace_get(&ctx->workspace, ctx->layout.sizes, DSPARK__VIEW_COUNT, chunk.views,
                               err);
    if (st != DSPARK_OK) return st;
    for (size_t row = 0; row < b->n_tokens; row += chunk.n) {
        size_t left = b->n_tokens - row;
        start_chunk(&chunk, row, left < ctx->layout.max_tokens ? left : ctx->layout.max_tokens);
        dspark__stage_states(&chunk, states + row * c->hidden_size, &bad);
        if (bad.row != SIZE_MAX) return dspark__blame_states(ctx, b, &bad, err);
    }
    return DSPARK_OK;
}

dspark_status dspark__context_states(dspark_context *ctx, const dspark_batch *b, void *states,
                                     dspark_error *err)
{
    dspark_status st = check_input(b, &ctx->model->config, err);
    if (st != DSPARK_OK || b->n_tokens == 0) return st;
    if (!b->taps) return dspark__fail(err, DSPARK_EINVAL, "batch", "taps is NULL");
    unsigned env = dspark__fpenv_enter();
    st = states_checked(ctx, b, states, err);
    dspark__fpenv_leave(env);
    return st;
}
