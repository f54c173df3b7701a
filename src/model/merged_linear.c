/* A linear whose rows come from several modules: its memory, and the blocking of the product.
 * Work is split over outputs and rows, never over k: every output has one accumulator (or one a
 * K-group, where the scheme says so). */
#include "model/merged_linear.h"

#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/status.h"
#include "model/linear_codes.h"

/* Up to this many rows one call takes the whole of k: the weights are read once, as streams. */
#define FEW_ROWS 16u
/* Blocks for more rows: a [rows][BLOCK_K] piece of x and the accumulators of BLOCK_PANELS stay in the
 * L2 cache (1 MB) while the weights stream through. */
#define BLOCK_K 1792u
#define BLOCK_PANELS 3u
/* Up to this many rows x stays in the L2 cache as a whole, and a panel goes to its end: one stream. */
#define WHOLE_ROWS 48u

/* Shards below it, which are a few huge pages and a piece, share them in an arena. */
#define ARENA_SHARD ((uint64_t)16 << 20)

const dspark__packing dspark__packing_bf16 = {.bits = 16};
const dspark__packing dspark__packing_narrow = {.bits = 16, .narrow = 1};

/* ---- memory of a shard ---- */

typedef struct shard_sizes {
    uint64_t codes, scales, groups, rows, perm; /* bytes, each rounded up to 64 */
    uint64_t code_stride, scale_stride, n_groups, n_panels;
    uint64_t total;
} shard_sizes;

static int add_part(uint64_t *total, uint64_t *part, uint64_t count, uint64_t each)
{
    return dspark__mul_u64(count, each, part) && dspark__align_u64(*part, 64, part) &&
           dspark__add_u64(*total, *part, total);
}

static int measure(shard_sizes *z, const dspark__packing *p, uint64_t rows, uint64_t k)
{
    memset(z, 0, sizeof *z);
    if (rows == 0 || k == 0 || rows > UINT32_MAX || k > UINT32_MAX) return 0;
    z->n_panels = dspark__ceil_div_u64(rows, DSPARK__PANEL);
    z->code_stride = p->bits == 16 ? dspark__panel_elements(k) * sizeof(uint16_t)
                                   : dspark__code_panel_bytes(&p->format, k);
    z->scale_stride = p->bits == 16 ? 0 : dspark__code_scale_bytes(&p->format, k);
    z->n_groups = p->group ? dspark__ceil_div_u64(k, p->group) : 0;
    const uint64_t width = p->narrow ? dspark__narrow_width(rows) : 0; /* of a panel that is less than one */
    const uint64_t narrow = width ? z->code_stride / DSPARK__PANEL * width : 0;
    return add_part(&z->total, &z->codes, z->n_panels - (narrow > 0), z->code_stride) &&
           dspark__add_u64(z->codes, narrow, &z->codes) && dspark__add_u64(z->total, narrow, &z->total) &&
           add_part(&z->total, &z->scales, z->n_panels, z->scale_stride) &&
           add_part(&z->total, &z->groups, z->n_panels * DSPARK__PANEL * sizeof(float), z->n_groups) &&
           add_part(&z->total, &z->rows, z->n_panels * DSPARK__PANEL,
                    p->row_scale ? sizeof(float) : 0) &&
           add_part(&z->total, &z->perm, p->permuted ? k : 0, sizeof(uint32_t)) &&
           z->total <= SIZE_MAX / 2;
}

uint64_t dspark__packing_bytes(const dspark__packing *packing, uint64_t rows, uint64_t k)
{
    shard_sizes z;
    return measure(&z, packing, rows, k) ? z.total : 0;
}

/* codes: where they lie, or NULL; rest: where the other four do, one behind the other. */
static void lay_out(dspark__shard *shard, const shard_sizes *z, unsigned char *codes, unsigned char *rest)
{
    shard->bytes = z->total;
    shard->code_stride = z->code_stride;
    shard->scale_stride = z->scale_stride;
    shard->n_groups = (uint32_t)z->n_groups;
    shard->codes = codes;
    if (z->scales) shard->scales = rest;
    if (z->groups) shard->group_scales = (float *)(void *)(rest + z->scales);
    if (z->rows) shard->row_scales = (float *)(void *)(rest + z->scales + z->groups);
    if (z->perm) shard->perm = (uint32_t *)(void *)(rest + z->scales + z->groups + z->rows);
}

/* Where the arena's places before that of shard s end. */
static int measure_places(const dspark__merged_linear *ml, uint32_t n_shards, uint64_t *total)
{
    shard_sizes z;
    *total = 0;
    for (uint32_t s = 0; s < n_shards; s++)
        if (!measure(&z, &ml->arena_packing, ml->shards[s].rows, ml->k) ||
            !dspark__add_u64(*total, z.total, total) || *total > SIZE_MAX / 2)
            return 0;
    return 1;
}

static dspark_status take_arena(dspark__merged_linear *ml, const dspark__packing *packing, dspark_error *err)
{
    uint64_t total;
    ml->arena_packing = *packing;
    if (!measure_places(ml, ml->n_shards, &total))
        return dspark__fail(err, DSPARK_EINVAL, ml->name, "%u shards overflow memory", ml->n_shards);
    ml->arena = dspark__alloc(&ml->allocator, total, 64);
    if (!ml->arena) return dspark__fail_nomem(err, ml->name, total);
    ml->arena_bytes = total;
    return DSPARK_OK;
}

dspark_status dspark__merged_linear_reserve(dspark__merged_linear *ml, dspark_error *err)
{
    return take_arena(ml, ml->narrow ? &dspark__packing_narrow : &dspark__packing_bf16, err);
}

/* The place of shard s in the arena, or NULL: there is none, or it is too small. */
static unsigned char *find_place(const dspark__merged_linear *ml, uint32_t s, uint64_t bytes)
{
    uint64_t from, to;
    if (!ml->arena) return NULL;
    measure_places(ml, s, &from);
    measure_places(ml, s + 1, &to);
    return bytes <= to - from ? ml->arena + from : NULL;
}

dspark_status dspark__shard_take_memory(dspark__merged_linear *ml, uint32_t s, int streamed,
                                        dspark_error *err)
{
    shard_sizes z;
    dspark__shard *shard = &ml->shards[s];
    if (!measure(&z, &shard->packing, shard->rows, ml->k))
        return dspark__fail(err, DSPARK_EINVAL, ml->name, "a shard of %u x %u overflows memory",
                            shard->rows, ml->k);
    const uint64_t bytes = z.total - (streamed ? z.codes : 0);
    unsigned char *at = NULL;
    if (ml->alike && !ml->arena && !streamed && z.total < ARENA_SHARD) {
        dspark_status st = take_arena(ml, &shard->packing, err);
        if (st != DSPARK_OK) return st;
    }
    if (!streamed && (at = find_place(ml, s, z.total))) {
        lay_out(shard, &z, at, at + z.codes);
        return DSPARK_OK;
    }
    if (bytes) {
        at = dspark__alloc(&ml->allocator, bytes, 64);
        if (!at) return dspark__fail_nomem(err, ml->name, bytes);
        if (streamed) memset(at, 0, bytes); /* what pads the parts goes into the file */
    }
    shard->memory = at;
    shard->memory_bytes = bytes;
    lay_out(shard, &z, streamed ? NULL : at, streamed || !at ? at : at + z.codes);
    return DSPARK_OK;
}

void dspark__shard_attach(dspark__merged_linear *ml, uint32_t s, const dspark__packing *packing,
                          const dspark__scheme *scheme, void *at)
{
    shard_sizes z;
    dspark__shard *shard = &ml->shards[s];
    measure(&z, packing, shard->rows, ml->k);
    shard->packing = *packing;
    shard->scheme = scheme;
    lay_out(shard, &z, at, (unsigned char *)at + z.codes);
    ml->bytes += shard->bytes;
    ml->n_filled++;
}

void dspark__shard_clear_gaps(const dspark__merged_linear *ml, uint32_t s)
{
    shard_sizes z;
    const dspark__shard *shard = &ml->shards[s];
    const size_t scales = shard->n_panels * shard->scale_stride, perm = (size_t)ml->k * sizeof *shard->perm;
    measure(&z, &shard->packing, shard->rows, ml->k);
    if (shard->scales) memset(shard->scales + scales, 0, (size_t)z.scales - scales);
    if (shard->perm) memset((unsigned char *)shard->perm + perm, 0, (size_t)z.perm - perm);
}

const void *dspark__shard_rest(const dspark__shard *shard, size_t *bytes)
{
    const uint64_t codes = shard->packing.bits == 16 ? shard->bytes : (uint64_t)shard->n_panels * shard->code_stride;
    *bytes = (size_t)(shard->bytes - codes);
    if (!*bytes) return NULL;
    return shard->codes ? shard->codes + codes : (const unsigned char *)shard->memory;
}

static void free_shard(dspark__merged_linear *ml, dspark__shard *shard)
{
    if (shard->memory) dspark__free(&ml->allocator, shard->memory, shard->memory_bytes);
    shard->memory = NULL;
}

void dspark__shard_release(dspark__merged_linear *ml, uint32_t s)
{
    dspark__shard *shard = &ml->shards[s];
    free_shard(ml, shard);
    shard->codes = shard->scales = NULL;
    shard->group_scales = shard->row_scales = NULL;
    shard->perm = NULL;
}

dspark_status dspark__merged_linear_init(dspark__merged_linear *ml, const char *name, uint32_t k,
                                         uint32_t n_shards, const uint32_t *rows,
                                         const dspark_allocator *allocator, dspark_error *err)
{
    memset(ml, 0, sizeof *ml);
    ml->allocator = dspark__allocator_or_default(allocator);
    ml->name = name;
    ml->k = k;
    for (uint32_t s = 0; s < n_shards; s++)
        if (dspark__packing_bytes(&dspark__packing_bf16, rows[s], k) == 0)
            return dspark__fail(err, DSPARK_EINVAL, name, "a shard of %u x %u has no size", rows[s], k);
    ml->shards = dspark__alloc(&ml->allocator, n_shards * sizeof *ml->shards, 64);
    if (!ml->shards) return dspark__fail_nomem(err, name, n_shards * sizeof *ml->shards);
    ml->n_shards = n_shards;
    memset(ml->shards, 0, n_shards * sizeof *ml->shards);
    for (uint32_t s = 0; s < n_shards; s++) {
        ml->shards[s].rows = rows[s];
        ml->shards[s].n_panels = (uint32_t)dspark__ceil_div_u64(rows[s], DSPARK__PANEL);
    }
    return DSPARK_OK;
}

dspark_status dspark__merged_linear_init_even(dspark__merged_linear *ml, const char *name, uint32_t k,
                                              uint32_t n_shards, uint32_t rows,
                                              const dspark_allocator *allocator,
                                              dspark_error *err)
{
    dspark_allocator a = dspark__allocator_or_default(allocator);
    size_t bytes = (size_t)n_shards * sizeof(uint32_t);
    uint32_t *each = dspark__alloc(&a, bytes, 64);
    memset(ml, 0, sizeof *ml);
    if (!each) return dspark__fail_nomem(err, name, bytes);
    for (uint32_t s = 0; s < n_shards; s++) each[s] = rows;
    dspark_status st = dspark__merged_linear_init(ml, name, k, n_shards, each, allocator, err);
    dspark__free(&a, each, bytes);
    return st;
}

void dspark__merged_linear_free(dspark__merged_linear *ml)
{
    if (ml->arena) dspark__free(&ml->allocator, ml->arena, ml->arena_bytes);
    for (uint32_t s = 0; ml->shards && s < ml->n_shards; s++)
        free_shard(ml, &ml->shards[s]);
    if (ml->shards) dspark__free(&ml->allocator, ml->shards, ml->n_shards * sizeof *ml->shards);
    memset(ml, 0, sizeof *ml);
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

/* ---- the product ---- */

size_t dspark__merged_linear_scratch(size_t n_rows)
{
    size_t acc = BLOCK_PANELS * n_rows * DSPARK__PANEL * sizeof(float);
    size_t codes = dspark__linear_codes_scratch(n_rows);
    return codes > acc ? codes : acc;
}

static void name_next(dspark__gemm_bf16 *g, const void *at, uint32_t n_k)
{
    g->prefetch = at;
    g->prefetch_bytes = (size_t)(n_k < BLOCK_K ? n_k : BLOCK_K) * DSPARK__PANEL * sizeof(uint16_t);
}

/* All of k in one call. */
static void run_streams(const dspark__kern *kern, const uint16_t *panels, size_t n_panels, size_t narrow, uint32_t k,
                        size_t n_out, dspark__gemm_bf16 *g, const void *x, uint16_t *out, const void *next)
{
    g->x = x;
    g->panels = panels;
    g->n_panels = n_panels;
    g->narrow = narrow;
    g->k = k;
    g->first = g->last = 1;
    g->out = out;
    g->n_out = n_out;
    name_next(g, next, k);
    kern->gemm_bf16(g);
}

static void run_blocks(const dspark__kern *kern, const uint16_t *first, uint32_t n_panels, uint32_t k, size_t n_out,
                       dspark__gemm_bf16 *g, const void *x, float *acc, uint16_t *out, const void *next)
{
    const uint32_t step = g->n_rows <= WHOLE_ROWS ? 1 : BLOCK_PANELS;
    g->acc = acc;
    for (uint32_t p = 0; p < n_panels; p += step) {
        g->n_panels = n_panels - p < step ? n_panels - p : step;
        g->out = out + (size_t)p * DSPARK__PANEL;
        g->n_out = n_out - (size_t)p * DSPARK__PANEL;
        if (g->n_out > g->n_panels * DSPARK__PANEL) g->n_out = g->n_panels * DSPARK__PANEL;
        for (uint32_t k0 = 0; k0 < k; k0 += BLOCK_K) {
            g->k = k - k0 < BLOCK_K ? k - k0 : BLOCK_K;
            g->x = (const unsigned char *)x + (size_t)k0 * 2;
            g->panels = first + p * g->panel_stride + (size_t)k0 * DSPARK__PANEL;
            g->first = k0 == 0;
            g->last = k0 + g->k == k;
            /* Weights of the next call come while this one computes. */
            if (!g->last) name_next(g, g->panels + (size_t)g->k * DSPARK__PANEL, k - k0 - g->k);
            else if (p + g->n_panels < n_panels) name_next(g, first + (p + g->n_panels) * g->panel_stride, k);
            else name_next(g, next, k);
            kern->gemm_bf16(g);
        }
    }
}

static void run_bf16(const dspark__shard *shard, const dspark__kern *kern, uint32_t p0,
                     uint32_t n_panels, uint32_t k, size_t n_out, dspark__gemm_bf16 *g, const void *x,
                     float *acc, uint16_t *out, const void *next)
{
    const uint16_t *first = (const uint16_t *)(const void *)shard->codes + p0 * g->panel_stride;
    const int ends = shard->packing.narrow && p0 + n_panels == shard->n_panels;
    const size_t narrow = ends ? dspark__narrow_width(shard->rows) : 0;
    if (g->n_rows <= FEW_ROWS) {
        run_streams(kern, first, n_panels, narrow, k, n_out, g, x, out, next);
        return;
    }
    const uint32_t n_whole = n_panels - (narrow > 0); /* blocks of k are of whole panels */
    const size_t before = (size_t)n_whole * DSPARK__PANEL;
    const uint16_t *last = first + n_whole * g->panel_stride;
    run_blocks(kern, first, n_whole, k, narrow ? before : n_out, g, x, acc, out, narrow ? last : next);
    if (narrow) run_streams(kern, last, 1, narrow, k, n_out - before, g, x, out + before, next);
}

void dspark__merged_linear_rows(const dspark__merged_linear *ml, const dspark__kern *kern,
                                uint32_t s, uint32_t p0, uint32_t n_panels, const void *x,
                                size_t x_stride, size_t n_rows, void *scratch, uint16_t *out,
                                size_t out_stride)
{
    dspark__merged_linear_rows_then(ml, kern, s, p0, n_panels, x, x_stride, n_rows, scratch, out,
                                    out_stride, NULL);
}

void dspark__merged_linear_rows_then(const dspark__merged_linear *ml, const dspark__kern *kern,
                                     uint32_t s, uint32_t p0, uint32_t n_panels, const void *x,
                                     size_t x_stride, size_t n_rows, void *scratch, uint16_t *out,
                                     size_t out_stride, const void *next)
{
    const dspark__shard *shard = &ml->shards[s];
    size_t n_out = shard->rows - (size_t)p0 * DSPARK__PANEL;
    if (n_out > (size_t)n_panels * DSPARK__PANEL) n_out = (size_t)n_panels * DSPARK__PANEL;
    if (n_rows == 0) return;

    dspark__gemm_bf16 g = {.x_stride = x_stride, .n_rows = n_rows, .out_stride = out_stride};
    g.panel_stride = shard->code_stride / sizeof(uint16_t);
    if (shard->packing.bits == 16) {
        run_bf16(shard, kern, p0, n_panels, ml->k, n_out, &g, x, scratch, out, next);
        return;
    }
    dspark__linear_codes_run(shard, kern, p0, n_panels, ml->k, x, x_stride, n_rows, scratch, out,
                             out_stride, n_out);
}
