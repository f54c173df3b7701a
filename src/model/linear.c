/* Linears over rows: the one place where their work is cut into units and shared out. A unit is a few
 * panels times a tile of rows, never a part of a dot product, so who computes what cannot be seen in
 * the result. */
#include "model/linear.h"

#include <stdatomic.h>

/* Panels of a unit: each piece of x is read once for all of them. Of few rows, whose x stays in L1, a unit costs
 * what a kernel does once for each call: as many, but still UNITS_EACH for each thread. */
#define UNIT_PANELS 3u
#define FEW_ROWS 16u
#define MOST_UNIT_PANELS 12u
#define UNITS_EACH 4u
/* So that threads finish together, the last units are small: of one panel, this many for each thread,
 * and then parts of the rows of one panel for each thread. */
#define SMALL_UNITS 5u
#define MAX_PARTS 4u
#define PART_ROWS 8u /* the fewest */
#define MAX_TILES (DSPARK__HEARD_ROWS / DSPARK__TILE_ROWS)

typedef struct job {
    const dspark__kern *kern;
    const dspark__linear *linears;
    const dspark__linear_listener *listener;
    uint32_t n_linears;
    size_t n_rows, tile_rows, n_tiles;
    size_t part_rows, n_parts; /* of a tile */
    size_t unit_panels;
    size_t n_large;      /* panels, over all linears, that come in units of unit_panels */
    size_t n_small;      /* the next panels, a unit each; those that are left come in parts */
    size_t n_units;
    size_t n_early;      /* units that are taken before the one at hand is finished */
    unsigned char *scratch;
    size_t scratch_bytes;
    atomic_size_t next;
    atomic_uint *left;   /* [n_linears][n_tiles][n_parts] panels that are missing; NULL without a listener */
} job;

typedef struct unit {
    uint32_t linear, panel, n_panels;
    size_t row, n_rows;
} unit;

static uint32_t count_panels(const dspark__linear *l)
{
    return l->ml->shards[l->shard].n_panels;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t ceil_div(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

/* How the panels of a linear come. n_large, n_small: what is left of the job's, counted down. */
typedef struct shares {
    size_t large, small, parted;
    size_t n_units; /* for each tile of rows */
} shares;

static shares share_panels(const job *j, uint32_t linear, size_t *n_large, size_t *n_small)
{
    const size_t n = count_panels(&j->linears[linear]);
    shares s = {.large = least(n, *n_large)};
    s.small = least(n - s.large, *n_small);
    s.parted = n - s.large - s.small;
    s.n_units = ceil_div(s.large, j->unit_panels) + s.small + s.parted * j->n_parts;
    *n_large -= s.large;
    *n_small -= s.small;
    return s;
}

/* Rows [row, row + n) as far as they exist, which the last part of the last tile may not do. */
static size_t clip_rows(const job *j, size_t row, size_t n)
{
    return row < j->n_rows ? least(n, j->n_rows - row) : 0;
}

/* Unit i. Tiles of rows are the inner index: neighbours read the same weights. */
static unit find_unit(const job *j, size_t i)
{
    const size_t tile_row = i % j->n_tiles * j->tile_rows;
    size_t at = i / j->n_tiles, n_large = j->n_large, n_small = j->n_small, n_groups;
    unit u = {.n_panels = 1, .row = tile_row, .n_rows = clip_rows(j, tile_row, j->tile_rows)};
    shares s = share_panels(j, 0, &n_large, &n_small);
    for (; at >= s.n_units; s = share_panels(j, ++u.linear, &n_large, &n_small)) at -= s.n_units;
    n_groups = ceil_div(s.large, j->unit_panels);
    if (at < n_groups) {
        u.panel = (uint32_t)(at * j->unit_panels);
        u.n_panels = (uint32_t)least(s.large - u.panel, j->unit_panels);
    } else if (at < n_groups + s.small) {
        u.panel = (uint32_t)(s.large + at - n_groups);
    } else {
        size_t part = at - n_groups - s.small;
        u.panel = (uint32_t)(s.large + s.small + part / j->n_parts);
        u.row += part % j->n_parts * j->part_rows;
        u.n_rows = clip_rows(j, u.row, j->part_rows);
    }
    return u;
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
    const size_t parts_before = u->linear * j->n_tiles * j->n_parts;
    for (size_t row = u->row, n; row < u->row + u->n_rows; row += n) {
        size_t part = row / j->tile_rows * j->n_parts + row % j->tile_rows / j->part_rows;
        n = clip_rows(j, row, j->part_rows);
        if (atomic_fetch_sub(&j->left[parts_before + part], u->n_panels) == u->n_panels)
            j->listener->finished(j->listener->user, u->linear, row, n);
    }
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

/* Tiles, and the equal parts that the last ones come in: one thread needs none. */
static void cut_rows(job *j, size_t n_threads)
{
    size_t most = least(j->n_rows / PART_ROWS, MAX_PARTS);
    j->tile_rows = choose_tile(j->n_rows);
    j->n_tiles = ceil_div(j->n_rows, j->tile_rows);
    j->n_parts = n_threads > 1 && most > 1 ? least(j->tile_rows / PART_ROWS, most) : 1;
    while (j->tile_rows % j->n_parts) j->n_parts--;
    j->part_rows = j->tile_rows / j->n_parts;
}

static size_t choose_unit(const job *j, size_t n_panels, size_t n_threads)
{
    size_t n = least(n_panels / (UNITS_EACH * n_threads), MOST_UNIT_PANELS);
    n -= n % UNIT_PANELS;
    return j->n_rows <= FEW_ROWS && n > UNIT_PANELS ? n : UNIT_PANELS;
}

static void cut_panels(job *j, size_t n_threads)
{
    size_t n_panels = 0, n_parted = 0, n_large, n_small;
    for (uint32_t i = 0; i < j->n_linears; i++) n_panels += count_panels(&j->linears[i]);
    j->unit_panels = choose_unit(j, n_panels, n_threads);
    if (n_threads > 1) {
        n_parted = j->n_parts > 1 ? least(ceil_div(n_threads, j->n_tiles), n_panels) : 0;
        j->n_small = least(ceil_div(SMALL_UNITS * n_threads, j->n_tiles), n_panels - n_parted);
    }
    j->n_large = n_large = n_panels - n_parted - j->n_small;
    n_small = j->n_small;
    for (uint32_t i = 0; i < j->n_linears; i++)
        j->n_units += share_panels(j, i, &n_large, &n_small).n_units * j->n_tiles;
    j->n_early = j->n_units > 2 * n_threads ? j->n_units - 2 * n_threads : 0;
}

static void run(job *j, dspark__threads *threads)
{
    size_t n_threads = dspark__threads_count(threads);
    double work = 0;
    if (j->n_rows == 0) return;
    cut_rows(j, n_threads);
    cut_panels(j, n_threads);
    for (uint32_t i = 0; i < j->n_linears; i++) {
        const dspark__linear *l = &j->linears[i];
        const size_t n = j->n_tiles * j->n_parts;
        work += (double)j->n_rows * l->ml->shards[l->shard].rows * l->ml->k;
        for (size_t t = 0; j->left && t < n; t++) atomic_init(&j->left[i * n + t], count_panels(l));
    }
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
    atomic_uint left[DSPARK__MAX_LINEARS * MAX_TILES * MAX_PARTS];
    job j = {.kern = kern, .linears = linears, .listener = listener, .n_linears = n_linears,
             .n_rows = n_rows, .scratch = scratch, .scratch_bytes = scratch_bytes, .left = left};
    run(&j, threads);
}
