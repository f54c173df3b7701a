/* Linears over rows: the one place where their work is cut into units and shared out. A unit is a few
 * panels times a tile of rows, never a part of a dot product, so who computes what cannot be seen in
 * the result. */
#include "model/linear.h"

#include <stdatomic.h>

/* Panels of a unit: each piece of x is read once for all of them. */
#define UNIT_PANELS 3u
/* The last units are of one panel, this many for each thread, so that threads finish together. */
#define SMALL_UNITS 6u
#define MAX_TILES (DSPARK__HEARD_ROWS / DSPARK__TILE_ROWS)

typedef struct job {
    const dspark__kern *kern;
    const dspark__linear *linears;
    const dspark__linear_listener *listener;
    uint32_t n_linears;
    size_t n_rows, tile_rows, n_tiles;
    size_t n_large;      /* panels, over all linears, that come in units of UNIT_PANELS */
    size_t n_units;
    size_t n_early;      /* units that are taken before the one at hand is finished */
    unsigned char *scratch;
    size_t scratch_bytes;
    atomic_size_t next;
    atomic_uint *left;   /* [n_linears][n_tiles] panels that are missing; NULL without a listener */
} job;

typedef struct unit {
    uint32_t linear, panel, n_panels;
    size_t row, n_rows;
} unit;

static uint32_t count_panels(const dspark__linear *l)
{
    return l->ml->shards[l->shard].n_panels;
}

/* Of n panels of which n_large are left for large units: how many go that way. */
static uint32_t large_part(uint32_t n, size_t n_large)
{
    return n < n_large ? n : (uint32_t)n_large;
}

static size_t ceil_div(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

/* Unit i. Tiles of rows are the inner index: neighbours read the same weights. */
static unit find_unit(const job *j, size_t i)
{
    unit u = {.row = i % j->n_tiles * j->tile_rows};
    size_t at = i / j->n_tiles, n_large = j->n_large;
    u.n_rows = j->n_rows - u.row < j->tile_rows ? j->n_rows - u.row : j->tile_rows;
    for (;; u.linear++) {
        uint32_t n = count_panels(&j->linears[u.linear]), large = large_part(n, n_large);
        size_t n_groups = ceil_div(large, UNIT_PANELS), n_here = n_groups + (n - large);
        n_large -= large;
        if (at >= n_here) {
            at -= n_here;
        } else if (at < n_groups) {
            u.panel = (uint32_t)at * UNIT_PANELS;
            u.n_panels = large - u.panel < UNIT_PANELS ? large - u.panel : UNIT_PANELS;
            return u;
        } else {
            u.panel = large + (uint32_t)(at - n_groups);
            u.n_panels = 1;
            return u;
        }
    }
}

static const void *first_weights(const job *j, const unit *u)
{
    const dspark__linear *l = &j->linears[u->linear];
    const dspark__shard *shard = &l->ml->shards[l->shard];
    return shard->codes + u->panel * shard->code_stride;
}

static void run_unit(const job *j, const unit *u, size_t worker, const void *next)
{
    const dspark__linear *l = &j->linears[u->linear];
    dspark__merged_linear_rows_then(
        l->ml, j->kern, l->shard, u->panel, u->n_panels,
        (const unsigned char *)l->x + u->row * l->x_stride, l->x_stride, u->n_rows,
        j->scratch + worker * j->scratch_bytes,
        l->out + u->row * l->out_stride + (size_t)u->panel * DSPARK__PANEL, l->out_stride, next);
    if (!j->left) return;
    size_t tile = u->linear * j->n_tiles + u->row / j->tile_rows;
    if (atomic_fetch_sub(&j->left[tile], u->n_panels) == u->n_panels)
        j->listener->finished(j->listener->user, u->linear, u->row, u->n_rows);
}

static size_t take_unit(job *j)
{
    return atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
}

/* As long as there is plenty, the next unit is known before this one is computed, so that its weights
 * come meanwhile. The last ones go to whoever is free. */
static void run_task(void *arg, size_t worker)
{
    job *j = arg;
    for (size_t i = take_unit(j); i < j->n_units;) {
        unit u = find_unit(j, i);
        if (i < j->n_early) {
            i = take_unit(j);
            unit then = i < j->n_units ? find_unit(j, i) : u;
            run_unit(j, &u, worker, first_weights(j, &then));
        } else {
            run_unit(j, &u, worker, NULL);
            i = take_unit(j);
        }
    }
}

/* As few tiles as possible, about equal, of a multiple of 8 rows. */
static size_t choose_tile(size_t n_rows)
{
    return ceil_div(ceil_div(n_rows, ceil_div(n_rows, DSPARK__TILE_ROWS)), 8) * 8;
}

static void run(job *j, dspark__threads *threads)
{
    size_t n_threads = dspark__threads_count(threads), n_panels = 0, n_small, n_large;
    double work = 0;
    if (j->n_rows == 0) return;
    j->tile_rows = choose_tile(j->n_rows);
    j->n_tiles = ceil_div(j->n_rows, j->tile_rows);
    for (uint32_t i = 0; i < j->n_linears; i++) {
        const dspark__linear *l = &j->linears[i];
        n_panels += count_panels(l);
        work += (double)j->n_rows * l->ml->shards[l->shard].rows * l->ml->k;
    }
    n_small = n_threads > 1 ? ceil_div(SMALL_UNITS * n_threads, j->n_tiles) : 0;
    j->n_large = n_large = n_panels > n_small ? n_panels - n_small : 0;
    for (uint32_t i = 0; i < j->n_linears; i++) {
        uint32_t n = count_panels(&j->linears[i]), large = large_part(n, n_large);
        n_large -= large;
        j->n_units += (ceil_div(large, UNIT_PANELS) + (n - large)) * j->n_tiles;
        for (size_t t = 0; j->left && t < j->n_tiles; t++) atomic_init(&j->left[i * j->n_tiles + t], n);
    }
    j->n_early = j->n_units > 2 * n_threads ? j->n_units - 2 * n_threads : 0;
    atomic_init(&j->next, 0);
    dspark__threads_run(threads, run_task, j, dspark__threads_worth(threads, j->n_units, work));
}

void dspark__linears_run(dspark__threads *threads, const dspark__kern *kern,
                         const dspark__linear *linears, uint32_t n_linears, size_t n_rows,
                         void *scratch, size_t scratch_bytes)
{
    job j = {.kern = kern, .linears = linears, .n_linears = n_linears, .n_rows = n_rows,
             .scratch = scratch, .scratch_bytes = scratch_bytes};
    run(&j, threads);
}

void dspark__linears_run_heard(dspark__threads *threads, const dspark__kern *kern,
                               const dspark__linear *linears, uint32_t n_linears, size_t n_rows,
                               void *scratch, size_t scratch_bytes,
                               const dspark__linear_listener *listener)
{
    atomic_uint left[DSPARK__MAX_LINEARS * MAX_TILES];
    job j = {.kern = kern, .linears = linears, .listener = listener, .n_linears = n_linears,
             .n_rows = n_rows, .scratch = scratch, .scratch_bytes = scratch_bytes, .left = left};
    run(&j, threads);
}
