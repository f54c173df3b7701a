/* Filling the shards of a merged linear from matrices that a caller made in memory: finite, bf16, as they lie or
 * turned. Many small ones at once, on all threads. Hashes and checks nothing. */
#include <stdatomic.h>
#include <string.h>

#include "base/status.h"
#include "model/merged_linear.h"
#include "quant/parts.h"

typedef struct dense_job {
    const dspark__merged_linear *ml;
    const dspark__dense *from;
    const dspark__kern *kern;
    uint32_t first, n;
    atomic_uint next;
} dense_job;

/* Panel p of W, whose columns lie in rows: a pair of k is two rows, and no row need be gathered. */
static void pack_turned(uint16_t *panel, size_t width, const uint16_t *w, size_t stride, size_t n_rows, size_t k)
{
    for (size_t i = 0; i < k; i += 2, panel += 2 * width, w += 2 * stride) {
        const uint16_t *second = i + 1 < k ? w + stride : NULL;
        size_t lane = 0;
        if (second)
            for (; lane < n_rows; lane++) {
                panel[2 * lane] = w[lane];
                panel[2 * lane + 1] = second[lane];
            }
        for (; lane < width; lane++) {
            panel[2 * lane] = lane < n_rows ? w[lane] : 0;
            panel[2 * lane + 1] = 0;
        }
    }
}

/* A narrow panel of rows as they lie. */
static void pack_narrow(uint16_t *panel, size_t width, const uint16_t *w, size_t stride, size_t n_rows, size_t k)
{
    for (size_t i = 0; i < k; i += 2, panel += 2 * width)
        for (size_t lane = 0; lane < width; lane++) {
            panel[2 * lane] = lane < n_rows ? w[lane * stride + i] : 0;
            panel[2 * lane + 1] = lane < n_rows && i + 1 < k ? w[lane * stride + i + 1] : 0;
        }
}

static void pack_one(const dense_job *job, uint32_t i)
{
    const dspark__dense *from = job->from;
    const dspark__shard *shard = &job->ml->shards[job->first + i];
    const uint16_t *w = from->w + i * from->step;
    for (size_t p = 0; p < shard->n_panels; p++) {
        const size_t row = p * DSPARK__PANEL, left = shard->rows - row;
        const size_t n = left < DSPARK__PANEL ? left : DSPARK__PANEL;
        const size_t narrow = shard->packing.narrow && n == left ? dspark__narrow_width(n) : 0;
        const size_t width = narrow ? narrow : DSPARK__PANEL;
        uint16_t *panel = (uint16_t *)(void *)(shard->codes + p * shard->code_stride);
        if (from->turned) pack_turned(panel, width, w + row, from->stride, n, job->ml->k);
        else if (narrow) pack_narrow(panel, width, w + row * from->stride, from->stride, n, job->ml->k);
        else job->kern->pack_panel(panel, w + row * from->stride, 2 * from->stride, n, job->ml->k);
    }
}

static void dense_task(void *arg, size_t worker)
{
    dense_job *job = arg;
    (void)worker;
    for (uint32_t i; (i = atomic_fetch_add(&job->next, 1)) < job->n;) pack_one(job, i);
}

/* What was not filled is as it was before. */
static void give_back(dspark__merged_linear *ml, uint32_t s)
{
    dspark__shard *shard = &ml->shards[s];
    dspark__shard_release(ml, s);
    *shard = (dspark__shard){.rows = shard->rows, .n_panels = shard->n_panels};
}

dspark_status dspark__merged_linear_fill_many(dspark__merged_linear *ml, uint32_t first, uint32_t n,
                                              const dspark__dense *from, dspark__threads *threads,
                                              dspark_error *err)
{
    dspark__kern kern;
    dspark_status st = dspark__kern_select(&kern, DSPARK_ISA_AUTO, err);
    dense_job job = {.ml = ml, .from = from, .kern = &kern, .first = first, .n = n};
    uint32_t taken = 0;
    for (; st == DSPARK_OK && taken < n; taken++) {
        dspark__shard *shard = &ml->shards[first + taken];
        if (shard->scheme) {
            st = dspark__fail(err, DSPARK_EMODEL, ml->name, "shard %u was filled twice", first + taken);
            break;
        }
        shard->packing = ml->narrow ? dspark__packing_narrow : dspark__packing_bf16;
        st = dspark__shard_take_memory(ml, first + taken, 0, err);
    }
    if (st != DSPARK_OK) {
        while (taken-- > 0) give_back(ml, first + taken);
        return st;
    }
    atomic_init(&job.next, 0);
    if (threads) {
        const double work = (double)ml->shards[first].rows * ml->k * n;
        dspark__threads_run(threads, dense_task, &job, dspark__threads_worth(threads, n, work));
    } else {
        dense_task(&job, 0);
    }
    for (uint32_t s = first; s < first + n; s++) {
        ml->shards[s].scheme = &dspark__scheme_bf16;
        ml->bytes += ml->shards[s].bytes;
        ml->n_filled++;
    }
    return DSPARK_OK;
}

dspark_status dspark__merged_linear_fill_dense(dspark__merged_linear *ml, uint32_t s, const uint16_t *w,
                                               dspark_error *err)
{
    const dspark__dense one = {.w = w, .stride = ml->k};
    return dspark__merged_linear_fill_many(ml, s, 1, &one, NULL, err);
}
