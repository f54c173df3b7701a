/* The stages of a chunk. Each stage is one call of the thread pool: workers pull rows from an atomic
 * counter, or units of a linear (linear.c). Who computes what cannot be seen in the result. */
#include <float.h>
#include <stdatomic.h>

#include "kern/attr.h"
#include "model/context.h"
#include "model/linear.h"

/* What the cosine and sine of one pair cost, in elements. */
#define ROPE_COST 32u

/* What one element of a norm, rotation or conversion costs, in multiply-adds of a product. */
#define ELEMENT_COST 8.0

/* Run `task` on as many threads as there are units and as the work is worth. */
static void run_stage(const dspark__chunk *chunk, void (*task)(void *, size_t), void *job,
                      size_t n_units, double work)
{
    dspark__threads *threads = chunk->ctx->threads;
    dspark__threads_run(threads, task, job, dspark__threads_worth(threads, n_units, work));
}

static void run_linears(const dspark__chunk *chunk, const dspark__linear *linears, uint32_t n)
{
    const dspark_context *ctx = chunk->ctx;
    dspark__linears_run(ctx->threads, &ctx->kern, linears, n, chunk->n,
                        chunk->views[DSPARK__VIEW_SCRATCH], ctx->layout.scratch_bytes);
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
        for (uint32_t t = 0; t < c->n_taps; t++) {
            float sum = chunk->ctx->kern.rmsnorm_bf16(out + (i * c->n_taps + t) * width, row + t * width * 2,
                                                      m->fc_norm + t * width, width, c->rms_norm_eps);
            if (!(sum <= FLT_MAX)) note_bad(&job->first_bad, chunk->row0 + i, 0); /* it would go on as zeros */
        }
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
    dspark__linear project = {.ml = &m->context_proj, .out = states, .out_stride = c->hidden_size};
    atomic_init(&rows.first_bad, UINT64_MAX);
    if (m->fc_norm) {
        run_rows(chunk, fc_norm_task, &rows, (size_t)c->n_taps * c->tap_width);
        project.x = chunk->views[DSPARK__VIEW_TAPS];
        project.x_stride = (size_t)c->n_taps * c->tap_width * 2;
    } else {
        project.x_stride = dspark__batch_stride(chunk->batch, c);
        project.x = (const unsigned char *)chunk->batch->taps + chunk->row0 * project.x_stride;
    }
    run_linears(chunk, &project, 1);
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
        dspark__rope_row(rope, &chunk->ctx->kern, chunk->batch->positions[chunk->row0 + i], row, row + rope->n_pairs);
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
    size_t row0, n_rows; /* of the one pass: the rows of the chunk that are in `entries` */
    atomic_size_t next;
    atomic_size_t n_written;
    atomic_uint_least64_t first_bad;
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

/* Rows before their turn that are fetched: entries are written somewhere in memory, and while stores wait
 * for their lines the next row's wait behind them. */
#define INSERT_AHEAD 2u

/* Always inlined: a function of its own that does nothing but this has no effect for the compiler, which
 * drops the call. */
DSPARK__INLINE void fetch_bytes(const void *at, size_t n)
{
#if defined(__GNUC__)
    for (size_t i = 0; i < n; i += 64) __builtin_prefetch((const char *)at + i, 0, 2);
#else
    (void)at;
    (void)n;
#endif
}

/* The one pass: whoever finishes a tile of rows of a layer writes its entries while they are warm. */
static void insert_tile(void *user, uint32_t a, size_t row, size_t n)
{
    insert_job *job = user;
    const dspark__cache_map *cache = job->chunk->cache;
    const uint32_t layer = job->chunk->active[a];
    const size_t first = job->row0 + row;
    uint16_t *entries = job->entries + (a * job->n_rows + row) * job->stride;
    for (size_t i = 0; i < n + INSERT_AHEAD; i++) {
        int64_t slot = i < n ? dspark__batch_slot(job->chunk->batch, layer, job->chunk->row0 + first + i) : -1;
        if (slot >= 0) {
            fetch_bytes(entries + i * job->stride, job->stride * sizeof *entries);
            fetch_bytes((const char *)cache->layers[layer] + dspark__cache_offset(cache, slot),
                        cache->entry_bytes);
        }
        if (i >= INSERT_AHEAD)
            insert_row(job, layer, first + i - INSERT_AHEAD, entries + (i - INSERT_AHEAD) * job->stride);
    }
}

static void insert_onepass(insert_job *job, size_t *n_written, dspark__bad *bad)
{
    const dspark__chunk *chunk = job->chunk;
    const dspark_context *ctx = chunk->ctx;
    const dspark__linear_listener listener = {insert_tile, job};
    dspark__linear linears[DSPARK_MAX_LAYERS];
    start_insert(job);
    for (; job->row0 < chunk->n; job->row0 += job->n_rows) {
        size_t left = chunk->n - job->row0;
        job->n_rows = left < DSPARK__HEARD_ROWS ? left : DSPARK__HEARD_ROWS;
        for (uint32_t a = 0; a < chunk->n_active; a++)
            linears[a] = (dspark__linear){
                .ml = &ctx->model->context_kv, .shard = chunk->active[a],
                .x = chunk->x + job->row0 * chunk->x_stride, .x_stride = chunk->x_stride,
                .out = job->entries + a * job->n_rows * job->stride, .out_stride = job->stride};
        dspark__linears_run_heard(ctx->threads, &ctx->kern, linears, chunk->n_active, job->n_rows,
                                  chunk->views[DSPARK__VIEW_SCRATCH], ctx->layout.scratch_bytes,
                                  &listener);
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
        dspark__linear linears[2];
        uint32_t n = 0;
        job->layer = chunk->active[a];
        if (chunk->ctx->path == DSPARK_PATH_FULL)
            linears[n++] = (dspark__linear){&m->q_a, job->layer, chunk->x, chunk->x_stride, job->entries,
                                            job->stride};
        linears[n++] = (dspark__linear){&m->context_kv, job->layer, chunk->x, chunk->x_stride,
                                        job->entries + job->column, job->stride};
        run_linears(chunk, linears, n);
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
