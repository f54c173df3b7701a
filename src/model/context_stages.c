/* The stages of a chunk. Each stage is one call of the thread pool: workers pull units from an atomic
 * counter. Units split outputs and rows, never a dot product, so who computes what cannot be seen in
 * the result. */
#include <float.h>
#include <stdatomic.h>

#include "model/context.h"

/* Panels of one unit: a kernel streams them side by side when there are few rows. */
#define UNIT_PANELS 3u
/* What the cosine and sine of one pair cost, in elements. */
#define ROPE_COST 32u

/* What one element of a norm, rotation or conversion costs, in multiply-adds of a product. */
#define ELEMENT_COST 8.0

static size_t ceil_div(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

/* Run `task` on as many threads as there are units and as the work is worth. */
static void run_stage(const dspark__chunk *chunk, void (*task)(void *, size_t), void *job,
                      size_t n_units, double work)
{
    dspark__threads *threads = chunk->ctx->threads;
    dspark__threads_run(threads, task, job, dspark__threads_worth(threads, n_units, work));
}

/* ---- a linear over all rows of a chunk, shared out by panels and row tiles ---- */

typedef struct linear_part {
    const dspark__merged_linear *ml;
    uint32_t shard;
    size_t column; /* of the first output in the destination row */
} linear_part;

typedef struct linear_job {
    const dspark__chunk *chunk;
    const unsigned char *x;
    size_t x_stride;
    uint16_t *out;
    size_t out_stride;
    linear_part parts[2];
    uint32_t n_parts;
    uint32_t units[2]; /* units of each part */
    size_t n_tiles;
    size_t tile_rows;
    atomic_size_t next;
} linear_job;

/* Rows of a tile: as many as plan.h allows, fewer while `per_tile` units would leave threads idle, and
 * all tiles about equal. */
static size_t choose_tile(const dspark__chunk *chunk, size_t per_tile)
{
    size_t rows = DSPARK__TILE_ROWS;
    while (rows > 32 && per_tile * ceil_div(chunk->n, rows) < 4 * chunk->ctx->layout.n_threads)
        rows /= 2;
    rows = ceil_div(chunk->n, ceil_div(chunk->n, rows));
    return ceil_div(rows, 8) * 8;
}

static void *scratch_of(const dspark__chunk *chunk, size_t worker)
{
    return (unsigned char *)chunk->views[DSPARK__VIEW_SCRATCH] +
           worker * chunk->ctx->layout.scratch_bytes;
}

static void linear_task(void *arg, size_t worker)
{
    linear_job *job = arg;
    const dspark__chunk *chunk = job->chunk;
    for (;;) {
        size_t unit = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        uint32_t p = 0;
        while (p < job->n_parts && unit >= job->units[p]) unit -= job->units[p++];
        if (p == job->n_parts) return;
        const linear_part *part = &job->parts[p];
        uint32_t panels = part->ml->shards[part->shard].n_panels;
        /* Row tiles are the inner index: neighbours read the same weights. */
        uint32_t panel = (uint32_t)(unit / job->n_tiles) * UNIT_PANELS;
        size_t row = unit % job->n_tiles * job->tile_rows;
        size_t rows = chunk->n - row < job->tile_rows ? chunk->n - row : job->tile_rows;
        uint32_t n_panels = panels - panel < UNIT_PANELS ? panels - panel : UNIT_PANELS;
        dspark__merged_linear_rows(part->ml, &chunk->ctx->kern, part->shard, panel, n_panels,
                                   job->x + row * job->x_stride, job->x_stride, rows,
                                   scratch_of(chunk, worker),
                                   job->out + row * job->out_stride + part->column +
                                       (size_t)panel * DSPARK__PANEL,
                                   job->out_stride);
    }
}

static void run_linear(linear_job *job)
{
    const dspark__chunk *chunk = job->chunk;
    job->tile_rows = choose_tile(chunk, ceil_div(job->parts[0].ml->shards[0].n_panels, UNIT_PANELS));
    job->n_tiles = ceil_div(chunk->n, job->tile_rows);
    size_t n_units = 0;
    double work = 0;
    for (uint32_t p = 0; p < job->n_parts; p++) {
        const dspark__merged_linear *ml = job->parts[p].ml;
        const dspark__shard *shard = &ml->shards[job->parts[p].shard];
        job->units[p] = (uint32_t)(ceil_div(shard->n_panels, UNIT_PANELS) * job->n_tiles);
        n_units += job->units[p];
        work += (double)chunk->n * shard->rows * ml->k;
    }
    atomic_init(&job->next, 0);
    run_stage(chunk, linear_task, job, n_units, work);
}

/* ---- the first bad (row, layer), kept as one number so that threads can take its minimum ---- */

static void note_bad(atomic_uint_least64_t *first, size_t row, uint32_t layer)
{
    uint64_t key = (uint64_t)row * DSPARK_MAX_LAYERS + layer;
    uint_least64_t seen = atomic_load_explicit(first, memory_order_relaxed);
    while (key < seen && !atomic_compare_exchange_weak(first, &seen, key)) {
    }
}

static void take_bad(atomic_uint_least64_t *first, dspark__bad *bad)
{
    uint64_t key = atomic_load(first);
    bad->row = key == UINT64_MAX ? SIZE_MAX : (size_t)(key / DSPARK_MAX_LAYERS);
    bad->layer = (uint32_t)(key % DSPARK_MAX_LAYERS);
}

/* ---- taps -> states ---- */

typedef struct rows_job {
    const dspark__chunk *chunk;
    uint16_t *states;
    atomic_size_t next;
    atomic_uint_least64_t first_bad;
} rows_job;

/* `width`: elements of a row that the task works on. */
static void run_rows(const dspark__chunk *chunk, void (*task)(void *, size_t), rows_job *job,
                     size_t width)
{
    atomic_init(&job->next, 0);
    atomic_init(&job->first_bad, UINT64_MAX);
    run_stage(chunk, task, job, chunk->n, ELEMENT_COST * (double)chunk->n * (double)width);
}

static void fc_norm_task(void *arg, size_t worker)
{
    rows_job *job = arg;
    const dspark__chunk *chunk = job->chunk;
    const dspark_model *m = chunk->ctx->model;
    const dspark_config *c = &m->config;
    const unsigned char *taps = chunk->batch->taps;
    size_t stride = dspark__batch_stride(chunk->batch, c), width = c->tap_width;
    uint16_t *out = chunk->views[DSPARK__VIEW_TAPS];
    (void)worker;
    for (size_t i; (i = atomic_fetch_add(&job->next, 1)) < chunk->n;) {
        const unsigned char *row = taps + (chunk->row0 + i) * stride;
        for (uint32_t t = 0; t < c->n_taps; t++)
            chunk->ctx->kern.rmsnorm_bf16(out + (i * c->n_taps + t) * width, row + t * width * 2,
                                          m->fc_norm + t * width, width, c->rms_norm_eps);
    }
}

static void context_norm_task(void *arg, size_t worker)
{
    rows_job *job = arg;
    const dspark__chunk *chunk = job->chunk;
    const dspark_model *m = chunk->ctx->model;
    size_t h = m->config.hidden_size;
    (void)worker;
    for (size_t i; (i = atomic_fetch_add(&job->next, 1)) < chunk->n;) {
        uint16_t *row = job->states + i * h;
        int ok = chunk->ctx->kern.finite_bf16(row, h);
        float sum = chunk->ctx->kern.rmsnorm_bf16(row, row, m->context_norm, h,
                                                  m->config.rms_norm_eps);
        if (!ok || !(sum <= FLT_MAX) || !chunk->ctx->kern.finite_bf16(row, h))
            note_bad(&job->first_bad, chunk->row0 + i, 0);
    }
}

void dspark__stage_states(const dspark__chunk *chunk, uint16_t *states, dspark__bad *bad)
{
    const dspark_model *m = chunk->ctx->model;
    const dspark_config *c = &m->config;
    rows_job rows = {.chunk = chunk, .states = states};
    linear_job job = {.chunk = chunk, .out = states, .out_stride = c->hidden_size, .n_parts = 1};
    job.parts[0] = (linear_part){&m->context_proj, 0, 0};
    if (m->fc_norm) {
        run_rows(chunk, fc_norm_task, &rows, (size_t)c->n_taps * c->tap_width);
        job.x = chunk->views[DSPARK__VIEW_TAPS];
        job.x_stride = (size_t)c->n_taps * c->tap_width * 2;
    } else {
        job.x_stride = dspark__batch_stride(chunk->batch, c);
        job.x = (const unsigned char *)chunk->batch->taps + chunk->row0 * job.x_stride;
    }
    run_linear(&job);
    run_rows(chunk, context_norm_task, &rows, c->hidden_size);
    take_bad(&rows.first_bad, bad);
}

/* ---- cos/sin rows: once per position, shared by all layers ---- */

static float *rope_row(const dspark__chunk *chunk, size_t i)
{
    return (float *)chunk->views[DSPARK__VIEW_ROPE] +
           i * 2 * (size_t)chunk->ctx->model->rope.n_pairs;
}

static void rope_task(void *arg, size_t worker)
{
    rows_job *job = arg;
    const dspark__chunk *chunk = job->chunk;
    const dspark__rope *rope = &chunk->ctx->model->rope;
    (void)worker;
    for (size_t i; (i = atomic_fetch_add(&job->next, 1)) < chunk->n;) {
        float *row = rope_row(chunk, i);
        dspark__rope_row(rope, chunk->batch->positions[chunk->row0 + i], row, row + rope->n_pairs);
    }
}

void dspark__stage_rope(const dspark__chunk *chunk)
{
    rows_job job = {.chunk = chunk};
    run_rows(chunk, rope_task, &job, ROPE_COST * chunk->ctx->model->rope.n_pairs);
}

/* ---- projection rows -> cache: norm, RoPE, conversion, write ---- */

typedef struct insert_job {
    const dspark__chunk *chunk;
    uint16_t *entries;
    size_t stride;       /* elements between rows of entries */
    size_t column;       /* of the latent in such a row */
    uint32_t layer;      /* of the paths that go layer by layer */
    uint32_t layer_units;
    size_t n_tiles;
    size_t tile_rows;
    atomic_size_t next;
    atomic_size_t n_written;
    atomic_uint_least64_t first_bad;
    atomic_uint remaining[DSPARK_MAX_LAYERS];
} insert_job;

static void insert_row(insert_job *job, uint32_t layer, size_t i, uint16_t *entry)
{
    const dspark__chunk *chunk = job->chunk;
    const dspark_context *ctx = chunk->ctx;
    const dspark_config *c = &ctx->model->config;
    int64_t slot = dspark__batch_slot(chunk->batch, layer, chunk->row0 + i);
    if (slot < 0) return;
    size_t latent = c->kv_lora_rank, pairs = ctx->model->rope.n_pairs;
    const float *cs = rope_row(chunk, i);
    float sum = ctx->kern.rmsnorm_bf16(entry, entry, ctx->model->kv_a_norm + layer * latent, latent,
                                       c->rms_norm_eps);
    ctx->kern.rope_bf16(entry + latent, entry + latent, cs, cs + pairs, pairs);
    if (!(sum <= FLT_MAX) || !ctx->kern.finite_bf16(entry, latent + 2 * pairs)) {
        note_bad(&job->first_bad, chunk->row0 + i, layer);
        return;
    }
    dspark__cache_write(chunk->cache, &ctx->kern, layer, slot, entry);
    atomic_fetch_add_explicit(&job->n_written, 1, memory_order_relaxed);
}

static void start_insert(insert_job *job)
{
    atomic_init(&job->next, 0);
    atomic_init(&job->n_written, 0);
    atomic_init(&job->first_bad, UINT64_MAX);
}

static void finish_insert(insert_job *job, size_t *n_written, dspark__bad *bad)
{
    dspark__bad mine;
    *n_written += atomic_load(&job->n_written);
    take_bad(&job->first_bad, &mine);
    if (mine.row < bad->row || (mine.row == bad->row && mine.layer < bad->layer)) *bad = mine;
}

/* One pass, few rows: a layer's panels are shared out; whoever finishes its last unit writes the
 * layer's entries while they are still warm. */
static void split_task(void *arg, size_t worker)
{
    insert_job *job = arg;
    const dspark__chunk *chunk = job->chunk;
    const dspark__merged_linear *ml = &chunk->ctx->model->context_kv;
    for (;;) {
        size_t unit = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        size_t a = unit / job->layer_units;
        if (a >= chunk->n_active) return;
        uint32_t layer = chunk->active[a];
        uint32_t panel = (uint32_t)(unit % job->layer_units) * UNIT_PANELS;
        uint32_t panels = ml->shards[layer].n_panels;
        uint32_t n_panels = panels - panel < UNIT_PANELS ? panels - panel : UNIT_PANELS;
        uint16_t *entries = job->entries + a * chunk->n * job->stride;
        dspark__merged_linear_rows(ml, &chunk->ctx->kern, layer, panel, n_panels, chunk->x,
                                   chunk->x_stride, chunk->n, scratch_of(chunk, worker),
                                   entries + (size_t)panel * DSPARK__PANEL, job->stride);
        if (atomic_fetch_sub(&job->remaining[a], 1) == 1)
            for (size_t i = 0; i < chunk->n; i++)
                insert_row(job, layer, i, entries + i * job->stride);
    }
}

/* One pass, many rows: a unit is a tile of rows in one layer, from states to cache. */
static void tile_task(void *arg, size_t worker)
{
    insert_job *job = arg;
    const dspark__chunk *chunk = job->chunk;
    const dspark__merged_linear *ml = &chunk->ctx->model->context_kv;
    uint16_t *tile = job->entries + worker * DSPARK__TILE_ROWS * job->stride;
    for (;;) {
        size_t unit = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        size_t a = unit / job->n_tiles;
        if (a >= chunk->n_active) return;
        uint32_t layer = chunk->active[a];
        size_t row = unit % job->n_tiles * job->tile_rows;
        size_t rows = chunk->n - row < job->tile_rows ? chunk->n - row : job->tile_rows;
        dspark__merged_linear_rows(ml, &chunk->ctx->kern, layer, 0, ml->shards[layer].n_panels,
                                   chunk->x + row * chunk->x_stride, chunk->x_stride, rows,
                                   scratch_of(chunk, worker), tile, job->stride);
        for (size_t i = 0; i < rows; i++) insert_row(job, layer, row + i, tile + i * job->stride);
    }
}

static void insert_onepass(insert_job *job, size_t *n_written, dspark__bad *bad)
{
    const dspark__chunk *chunk = job->chunk;
    const dspark__merged_linear *ml = &chunk->ctx->model->context_kv;
    double work = (double)chunk->n * chunk->n_active * ml->shards[0].rows * ml->k;
    start_insert(job);
    if (chunk->n <= DSPARK__SPLIT_ROWS) {
        job->layer_units = (uint32_t)ceil_div(ml->shards[0].n_panels, UNIT_PANELS);
        for (uint32_t a = 0; a < chunk->n_active; a++)
            atomic_init(&job->remaining[a], job->layer_units);
        run_stage(chunk, split_task, job, (size_t)job->layer_units * chunk->n_active, work);
    } else {
        job->tile_rows = choose_tile(chunk, chunk->n_active);
        job->n_tiles = ceil_div(chunk->n, job->tile_rows);
        run_stage(chunk, tile_task, job, job->n_tiles * chunk->n_active, work);
    }
    finish_insert(job, n_written, bad);
}

/* The other paths: the whole projection of one layer, then its norm, RoPE and write. */
static void insert_rows_task(void *arg, size_t worker)
{
    insert_job *job = arg;
    (void)worker;
    for (size_t i; (i = atomic_fetch_add(&job->next, 1)) < job->chunk->n;)
        insert_row(job, job->layer, i, job->entries + i * job->stride + job->column);
}

static void insert_by_layer(insert_job *job, size_t *n_written, dspark__bad *bad)
{
    const dspark__chunk *chunk = job->chunk;
    const dspark_model *m = chunk->ctx->model;
    for (uint32_t a = 0; a < chunk->n_active; a++) {
        linear_job linear = {.chunk = chunk, .x = chunk->x, .x_stride = chunk->x_stride,
                             .out = job->entries, .out_stride = job->stride};
        job->layer = chunk->active[a];
        if (chunk->ctx->path == DSPARK_PATH_FULL)
            linear.parts[linear.n_parts++] = (linear_part){&m->q_a, job->layer, 0};
        linear.parts[linear.n_parts++] = (linear_part){&m->context_kv, job->layer, job->column};
        run_linear(&linear);
        start_insert(job);
        run_stage(chunk, insert_rows_task, job, chunk->n,
                  ELEMENT_COST * (double)chunk->n * (double)job->stride);
        finish_insert(job, n_written, bad);
    }
}

void dspark__stage_insert(const dspark__chunk *chunk, size_t *n_written, dspark__bad *bad)
{
    const dspark_config *c = &chunk->ctx->model->config;
    insert_job job = {.chunk = chunk, .entries = chunk->views[DSPARK__VIEW_ENTRIES]};
    job.stride = (size_t)c->kv_lora_rank + c->qk_rope_head_dim;
    bad->row = SIZE_MAX;
    bad->layer = 0;
    if (chunk->ctx->path == DSPARK_PATH_ONEPASS) {
        insert_onepass(&job, n_written, bad);
        return;
    }
    if (chunk->ctx->path == DSPARK_PATH_FULL) {
        job.column = c->q_lora_rank;
        job.stride += c->q_lora_rank;
    }
    insert_by_layer(&job, n_written, bad);
}
