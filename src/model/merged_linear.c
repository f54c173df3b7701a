/* A linear whose rows come from several modules: packing, tick-off, and the blocking of the product.
 * Work is split over outputs and rows, never over k: every output has one accumulator. */
#include "model/merged_linear.h"

#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/status.h"

/* Up to this many rows one call takes the whole of k: the weights are read once, as streams. */
#define FEW_ROWS 16u
/* Blocks for more rows: a [rows][BLOCK_K] piece of x and BLOCK_PANELS accumulators stay in the L2
 * cache (1 MB) while the weights stream through. */
#define BLOCK_K 1792u
#define BLOCK_PANELS 3u
/* Bytes of a module that are packed between two progress steps. */
#define PIECE_BYTES (8u << 20)

uint64_t dspark__merged_linear_bytes(uint32_t k, uint32_t n_shards, const uint32_t *rows)
{
    uint64_t panels = 0, elements, bytes;
    for (uint32_t s = 0; s < n_shards; s++) panels += dspark__ceil_div_u64(rows[s], DSPARK__PANEL);
    if (!dspark__mul_u64(panels, dspark__panel_elements(k), &elements) ||
        !dspark__mul_u64(elements, sizeof(uint16_t), &bytes) || bytes > SIZE_MAX / 2)
        return 0;
    return bytes;
}

dspark_status dspark__merged_linear_init(dspark__merged_linear *ml, const char *name, uint32_t k,
                                         uint32_t n_shards, const uint32_t *rows,
                                         const dspark_allocator *allocator, dspark_error *err)
{
    memset(ml, 0, sizeof *ml);
    ml->allocator = dspark__allocator_or_default(allocator);
    ml->name = name;
    ml->k = k;
    ml->panel_stride = dspark__panel_elements(k);
    ml->bytes = dspark__merged_linear_bytes(k, n_shards, rows);
    if (ml->bytes == 0)
        return dspark__fail(err, DSPARK_EINVAL, name, "a linear of %u shards and k = %u has no size",
                            n_shards, k);
    ml->shards = dspark__alloc(&ml->allocator, n_shards * sizeof *ml->shards, 64);
    if (!ml->shards) return dspark__fail_nomem(err, name, n_shards * sizeof *ml->shards);
    ml->n_shards = n_shards;
    memset(ml->shards, 0, n_shards * sizeof *ml->shards);
    for (uint32_t s = 0; s < n_shards; s++) {
        ml->shards[s].rows = rows[s];
        ml->shards[s].first_panel = ml->n_panels;
        ml->shards[s].n_panels = (uint32_t)dspark__ceil_div_u64(rows[s], DSPARK__PANEL);
        ml->n_panels += ml->shards[s].n_panels;
    }
    ml->panels = dspark__alloc(&ml->allocator, ml->bytes, 64);
    if (!ml->panels) {
        uint64_t bytes = ml->bytes;
        dspark__merged_linear_free(ml);
        return dspark__fail_nomem(err, name, bytes);
    }
    return DSPARK_OK;
}

void dspark__merged_linear_free(dspark__merged_linear *ml)
{
    if (ml->shards) dspark__free(&ml->allocator, ml->shards, ml->n_shards * sizeof *ml->shards);
    if (ml->panels) dspark__free(&ml->allocator, ml->panels, ml->bytes);
    memset(ml, 0, sizeof *ml);
}

typedef struct pack_job {
    const dspark__scheme *scheme;
    const dspark__module *module;
    uint16_t *panels;
    size_t panel_stride;
    uint64_t row0, n_rows, k;
    atomic_size_t next_panel;
} pack_job;

static void pack_task(void *arg, size_t i)
{
    pack_job *job = arg;
    (void)i;
    for (;;) {
        uint64_t row = atomic_fetch_add(&job->next_panel, 1) * DSPARK__PANEL;
        if (row >= job->n_rows) return;
        uint64_t n = job->n_rows - row < DSPARK__PANEL ? job->n_rows - row : DSPARK__PANEL;
        job->scheme->pack(job->module, job->panels + row / DSPARK__PANEL * job->panel_stride,
                          job->row0 + row, n, job->k);
    }
}

dspark_status dspark__merged_linear_fill(dspark__merged_linear *ml, uint32_t s,
                                         const dspark_checkpoint *ckpt,
                                         const dspark__module *module, dspark__threads *threads,
                                         dspark__digest *digest,
                                         int (*step)(void *user, uint64_t bytes), void *user,
                                         dspark_error *err)
{
    dspark_status st;
    const dspark__scheme *scheme;
    dspark__shard *shard = &ml->shards[s];
    if (shard->scheme)
        return dspark__fail(err, DSPARK_EMODEL, module->name, "shard %u of %s arrived twice", s,
                            ml->name);
    if ((st = dspark__scheme_detect(&scheme, module, err)) != DSPARK_OK) return st;
    if ((st = scheme->validate(module, shard->rows, ml->k, err)) != DSPARK_OK) return st;

    uint64_t row_bytes = (uint64_t)ml->k * 2;
    uint64_t piece = PIECE_BYTES / row_bytes / DSPARK__PANEL * DSPARK__PANEL;
    if (piece == 0) piece = DSPARK__PANEL;
    for (uint64_t row = 0; row < shard->rows; row += piece) {
        const dspark_tensor *t = module->parts[0].tensor;
        uint64_t n = shard->rows - row < piece ? shard->rows - row : piece;
        if ((st = dspark__checkpoint_verify(ckpt, t, err)) != DSPARK_OK) return st;
        if (digest)
            dspark__digest_update(digest, (const unsigned char *)t->data + row * row_bytes,
                                  n * row_bytes);
        pack_job job = {scheme, module, NULL, ml->panel_stride, row, n, ml->k, 0};
        job.panels = ml->panels + (shard->first_panel + row / DSPARK__PANEL) * ml->panel_stride;
        dspark__threads_run(threads, pack_task, &job, dspark__threads_count(threads));
        dspark__checkpoint_drop(ckpt, t, row * row_bytes, n * row_bytes);
        if (step && step(user, n * row_bytes))
            return dspark__fail(err, DSPARK_ECANCELLED, module->name, "cancelled while packing");
    }
    shard->scheme = scheme;
    ml->n_filled++;
    return DSPARK_OK;
}

dspark_status dspark__merged_linear_complete(const dspark__merged_linear *ml, dspark_error *err)
{
    for (uint32_t s = 0; s < ml->n_shards; s++)
        if (!ml->shards[s].scheme)
            return dspark__fail(err, DSPARK_EMODEL, ml->name,
                                "shard %u of %u never arrived (%u filled)", s, ml->n_shards,
                                ml->n_filled);
    return DSPARK_OK;
}

size_t dspark__merged_linear_acc(size_t n_rows)
{
    return BLOCK_PANELS * n_rows * DSPARK__PANEL;
}

void dspark__merged_linear_rows(const dspark__merged_linear *ml, const dspark__kern *kern,
                                uint32_t s, uint32_t p0, uint32_t n_panels, const void *x,
                                size_t x_stride, size_t n_rows, float *acc, uint16_t *out,
                                size_t out_stride)
{
    const dspark__shard *shard = &ml->shards[s];
    const uint16_t *first = ml->panels + (size_t)(shard->first_panel + p0) * ml->panel_stride;
    size_t n_out = shard->rows - (size_t)p0 * DSPARK__PANEL;
    if (n_out > (size_t)n_panels * DSPARK__PANEL) n_out = (size_t)n_panels * DSPARK__PANEL;

    dspark__gemm_bf16 g = {0};
    g.x_stride = x_stride;
    g.n_rows = n_rows;
    g.panel_stride = ml->panel_stride;
    g.out_stride = out_stride;
    if (n_rows <= FEW_ROWS) {
        g.x = x;
        g.panels = first;
        g.n_panels = n_panels;
        g.k = ml->k;
        g.first = g.last = 1;
        g.out = out;
        g.n_out = n_out;
        kern->gemm_bf16(&g);
        return;
    }
    g.acc = acc;
    for (uint32_t p = 0; p < n_panels; p += BLOCK_PANELS) {
        g.n_panels = n_panels - p < BLOCK_PANELS ? n_panels - p : BLOCK_PANELS;
        g.out = out + (size_t)p * DSPARK__PANEL;
        g.n_out = n_out - (size_t)p * DSPARK__PANEL;
        if (g.n_out > g.n_panels * DSPARK__PANEL) g.n_out = g.n_panels * DSPARK__PANEL;
        for (uint32_t k0 = 0; k0 < ml->k; k0 += BLOCK_K) {
            g.k = ml->k - k0 < BLOCK_K ? ml->k - k0 : BLOCK_K;
            g.x = (const unsigned char *)x + (size_t)k0 * 2;
            g.panels = first + p * ml->panel_stride + (size_t)k0 * DSPARK__PANEL;
            g.first = k0 == 0;
            g.last = k0 + g.k == ml->k;
            kern->gemm_bf16(&g);
        }
    }
}
