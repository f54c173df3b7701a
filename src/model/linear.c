/* Merged linears over all rows of a block: few rows, large weights, so threads share out panels. Who
 * computes what cannot be seen in the result. */
#include <stdatomic.h>

#include "model/block.h"

/* Panels of one unit: a kernel streams them side by side when there are few rows. */
#define UNIT_PANELS 3u
typedef struct job {
    const dspark__kern *kern;
    const dspark__linear *linears;
    uint32_t n_linears;
    size_t n_rows;
    unsigned char *scratch;
    size_t scratch_bytes;
    atomic_size_t next;
} job;

static size_t count_units(const dspark__linear *l)
{
    return (l->ml->shards[l->shard].n_panels + UNIT_PANELS - 1) / UNIT_PANELS;
}

static void run_unit(const job *j, const dspark__linear *l, size_t unit, size_t worker)
{
    uint32_t panels = l->ml->shards[l->shard].n_panels;
    uint32_t first = (uint32_t)unit * UNIT_PANELS;
    uint32_t n = panels - first < UNIT_PANELS ? panels - first : UNIT_PANELS;
    dspark__merged_linear_rows(l->ml, j->kern, l->shard, first, n, l->x, l->x_stride, j->n_rows,
                               j->scratch + worker * j->scratch_bytes,
                               l->out + (size_t)first * DSPARK__PANEL, l->out_stride);
}

static void run_task(void *arg, size_t worker)
{
    job *j = arg;
    for (;;) {
        size_t unit = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
        uint32_t i = 0;
        while (i < j->n_linears && unit >= count_units(&j->linears[i])) unit -= count_units(&j->linears[i++]);
        if (i == j->n_linears) return;
        run_unit(j, &j->linears[i], unit, worker);
    }
}

void dspark__linears_run(dspark__threads *threads, const dspark__kern *kern,
                         const dspark__linear *linears, uint32_t n_linears, size_t n_rows,
                         void *scratch, size_t scratch_bytes)
{
    job j = {.kern = kern, .linears = linears, .n_linears = n_linears, .n_rows = n_rows,
             .scratch = scratch, .scratch_bytes = scratch_bytes};
    size_t units = 0;
    double work = 0;
    for (uint32_t i = 0; i < n_linears; i++) {
        units += count_units(&linears[i]);
        work += (double)n_rows * linears[i].ml->shards[linears[i].shard].rows * linears[i].ml->k;
    }
    atomic_init(&j.next, 0);
    dspark__threads_run(threads, run_task, &j, dspark__threads_worth(threads, units, work));
}
