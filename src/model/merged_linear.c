/* A linear whose rows come from several modules: packing, tick-off, and the blocking of the product.
 * Work is split over outputs and rows, never over k: every output has one accumulator (or one a
 * K-group, where the scheme says so). */
#include "model/merged_linear.h"

#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/status.h"
#include "quant/parts.h"

/* Up to this many rows one call takes the whole of k: the weights are read once, as streams. */
#define FEW_ROWS 16u
/* Blocks for more rows: a [rows][BLOCK_K] piece of x and the accumulators of BLOCK_PANELS stay in the
 * L2 cache (1 MB) while the weights stream through. */
#define BLOCK_K 1792u
#define BLOCK_PANELS 3u
/* Values of k that are decoded at a time, multiples of 8. Few rows: 12 KB of bf16 panel, which stay in
 * L1 until the product reads them once. Many rows: 96 KB in L2, so that accumulators are loaded and
 * stored less often. */
#define DECODE_K_FEW 128u
#define DECODE_K_MANY 1024u
/* Bytes of a module that are packed between two progress steps. */
#define PIECE_BYTES (8u << 20)

const dspark__packing dspark__packing_bf16 = {.bits = 16};

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
    return add_part(&z->total, &z->codes, z->n_panels, z->code_stride) &&
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

static dspark_status take_memory(dspark__merged_linear *ml, dspark__shard *shard, dspark_error *err)
{
    shard_sizes z;
    if (!measure(&z, &shard->packing, shard->rows, ml->k))
        return dspark__fail(err, DSPARK_EINVAL, ml->name, "a shard of %u x %u overflows memory",
                            shard->rows, ml->k);
    shard->memory = dspark__alloc(&ml->allocator, z.total, 64);
    if (!shard->memory) return dspark__fail_nomem(err, ml->name, z.total);
    shard->bytes = z.total;
    shard->code_stride = z.code_stride;
    shard->scale_stride = z.scale_stride;
    shard->n_groups = (uint32_t)z.n_groups;
    unsigned char *at = shard->memory;
    shard->codes = at;
    if (z.scales) shard->scales = at + z.codes;
    if (z.groups) shard->group_scales = (float *)(void *)(at + z.codes + z.scales);
    if (z.rows) shard->row_scales = (float *)(void *)(at + z.codes + z.scales + z.groups);
    if (z.perm) shard->perm = (uint32_t *)(void *)(at + z.codes + z.scales + z.groups + z.rows);
    return DSPARK_OK;
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
    for (uint32_t s = 0; ml->shards && s < ml->n_shards; s++)
        if (ml->shards[s].memory)
            dspark__free(&ml->allocator, ml->shards[s].memory, ml->shards[s].bytes);
    if (ml->shards) dspark__free(&ml->allocator, ml->shards, ml->n_shards * sizeof *ml->shards);
    memset(ml, 0, sizeof *ml);
}

/* ---- filling ---- */

typedef struct pack_job {
    const dspark__shard *shard;
    const dspark__fill *fill;
    const dspark__kern *kern;
    uint64_t k;
    uint32_t panel0, n_panels;
    atomic_uint next;
    atomic_uint bad; /* the first panel with a weight that is not finite, or UINT32_MAX */
} pack_job;

/* Missing rows and padding are zero, so a panel is finite when its rows are. */
static int panel_is_finite(const pack_job *job, const unsigned char *codes)
{
    const dspark__packing *packing = &job->shard->packing;
    if (packing->bits == 16) return job->kern->finite_bf16(codes, dspark__panel_elements(job->k));
    if (packing->bits != 8) return 1; /* no code of 4 bits is NaN */
    for (size_t i = 0; i < job->shard->code_stride; i++)
        if ((packing->format.table[codes[i]] & 0x7f80u) == 0x7f80u) return 0;
    return 1;
}

static void pack_task(void *arg, size_t worker)
{
    pack_job *job = arg;
    const dspark__shard *shard = job->shard;
    (void)worker;
    for (uint32_t i; (i = atomic_fetch_add(&job->next, 1)) < job->n_panels;) {
        size_t p = job->panel0 + i;
        uint64_t row = p * DSPARK__PANEL, left = shard->rows - row;
        dspark__panel_out out = {.codes = shard->codes + p * shard->code_stride};
        if (shard->scales) out.scales = shard->scales + p * shard->scale_stride;
        if (shard->group_scales)
            out.group_scales = shard->group_scales + p * shard->n_groups * DSPARK__PANEL;
        if (shard->row_scales) out.row_scales = shard->row_scales + p * DSPARK__PANEL;
        if (shard->packing.bits != 16) memset(out.codes, 0, shard->code_stride);
        shard->scheme->pack(job->fill->module, &shard->packing, job->fill->rule, row,
                            left < DSPARK__PANEL ? left : DSPARK__PANEL, shard->rows, job->k, &out);
        if (panel_is_finite(job, out.codes)) continue;
        unsigned seen = atomic_load(&job->bad);
        while (p < seen && !atomic_compare_exchange_weak(&job->bad, &seen, (unsigned)p)) {
        }
    }
}

/* The tensor that holds the rows; the others of the module are small. */
static const dspark_tensor *main_part(const dspark__module *m)
{
    const dspark_tensor *t = dspark__module_part(m, "weight");
    return t ? t : dspark__module_part(m, "weight_packed");
}

/* Every tensor but the main one, in the order of their suffixes: how files are cut does not count. */
static dspark_status digest_small_parts(const dspark__fill *f, const dspark_tensor *rows,
                                        dspark_error *err)
{
    const char *last = "";
    for (uint32_t n = 0; n < f->module->n_parts; n++) {
        const char *suffix = NULL;
        const dspark_tensor *t = NULL;
        for (uint32_t i = 0; i < f->module->n_parts; i++)
            if (strcmp(f->module->parts[i].suffix, last) > 0 &&
                (!suffix || strcmp(f->module->parts[i].suffix, suffix) < 0)) {
                suffix = f->module->parts[i].suffix;
                t = f->module->parts[i].tensor;
            }
        if (!t) break;
        last = suffix;
        if (t == rows) continue;
        dspark_status st = dspark__checkpoint_verify(f->ckpt, t, err);
        if (st != DSPARK_OK) return st;
        dspark__digest_update(f->digest, suffix, strlen(suffix) + 1);
        dspark__digest_update(f->digest, t->data, t->n_bytes);
    }
    return DSPARK_OK;
}

static dspark_status pack_pieces(const dspark__merged_linear *ml, dspark__shard *shard,
                                 const dspark__fill *f, dspark_error *err)
{
    dspark_status st;
    const dspark_tensor *t = main_part(f->module);
    dspark__kern kern;
    if ((st = dspark__kern_select(&kern, DSPARK_ISA_AUTO, err)) != DSPARK_OK) return st;
    uint64_t row_bytes = t->n_bytes / shard->rows;
    uint64_t piece = PIECE_BYTES / (row_bytes ? row_bytes : 1) / DSPARK__PANEL * DSPARK__PANEL;
    if (piece == 0) piece = DSPARK__PANEL;
    for (uint64_t row = 0; row < shard->rows; row += piece) {
        uint64_t n = shard->rows - row < piece ? shard->rows - row : piece;
        if ((st = dspark__checkpoint_verify(f->ckpt, t, err)) != DSPARK_OK) return st;
        if (f->digest)
            dspark__digest_update(f->digest, (const unsigned char *)t->data + row * row_bytes,
                                  n * row_bytes);
        pack_job job = {.shard = shard, .fill = f, .kern = &kern, .k = ml->k, .bad = UINT32_MAX};
        job.panel0 = (uint32_t)(row / DSPARK__PANEL);
        job.n_panels = (uint32_t)dspark__ceil_div_u64(n, DSPARK__PANEL);
        dspark__threads_run(f->threads, pack_task, &job, dspark__threads_count(f->threads));
        dspark__checkpoint_drop(f->ckpt, t, row * row_bytes, n * row_bytes);
        unsigned bad = atomic_load(&job.bad);
        if (bad != UINT32_MAX) {
            unsigned last = (bad + 1) * DSPARK__PANEL;
            return dspark__fail(err, DSPARK_ENONFINITE, t->name,
                                "a weight in rows %u to %u is NaN or infinite (inspect --deep counts "
                                "them)",
                                bad * DSPARK__PANEL, (last < shard->rows ? last : shard->rows) - 1);
        }
        if (f->step && f->step(f->user, n * row_bytes))
            return dspark__fail(err, DSPARK_ECANCELLED, f->module->name, "cancelled while packing");
    }
    return DSPARK_OK;
}

dspark_status dspark__merged_linear_fill(dspark__merged_linear *ml, uint32_t s,
                                         const dspark__fill *f, dspark_error *err)
{
    dspark_status st;
    dspark__shard *shard = &ml->shards[s];
    dspark__quant_rule silent = {0};
    dspark__fill fill = *f;
    if (!fill.rule) fill.rule = &silent;
    if (shard->scheme)
        return dspark__fail(err, DSPARK_EMODEL, f->module->name, "shard %u of %s arrived twice", s,
                            ml->name);
    st = dspark__scheme_detect(&shard->scheme, f->module, fill.rule, shard->rows, ml->k, err);
    if (st == DSPARK_OK)
        st = shard->scheme->validate(f->module, fill.rule, shard->rows, ml->k, &shard->packing, err);
    if (st == DSPARK_OK && !main_part(f->module))
        st = dspark__fail(err, DSPARK_EMODEL, f->module->name, "has no weight");
    if (st == DSPARK_OK) st = take_memory(ml, shard, err);
    if (st == DSPARK_OK && f->digest) st = digest_small_parts(&fill, main_part(f->module), err);
    if (st == DSPARK_OK && shard->perm)
        shard->scheme->permutation(f->module, ml->k, shard->packing.group, shard->perm);
    if (st == DSPARK_OK) st = pack_pieces(ml, shard, &fill, err);
    if (st != DSPARK_OK) {
        if (shard->memory) dspark__free(&ml->allocator, shard->memory, shard->bytes);
        *shard = (dspark__shard){.rows = shard->rows, .n_panels = shard->n_panels};
        return st;
    }
    ml->bytes += shard->bytes;
    ml->n_filled++;
    return DSPARK_OK;
}

dspark_status dspark__merged_linear_fill_rows(dspark__merged_linear *ml, uint32_t s, uint32_t row,
                                              uint32_t n, const uint16_t *w, dspark_error *err)
{
    dspark__shard *shard = &ml->shards[s];
    if (shard->scheme)
        return dspark__fail(err, DSPARK_EMODEL, ml->name, "shard %u was filled twice", s);
    if (!shard->memory) {
        shard->packing = dspark__packing_bf16;
        dspark_status st = take_memory(ml, shard, err);
        if (st != DSPARK_OK) return st;
    }
    unsigned char *to = shard->codes + row / DSPARK__PANEL * shard->code_stride;
    dspark__pack_bf16((uint16_t *)(void *)to, w, n, ml->k);
    if (row + n < shard->rows) return DSPARK_OK;
    shard->scheme = &dspark__scheme_bf16;
    ml->bytes += shard->bytes;
    ml->n_filled++;
    return DSPARK_OK;
}

dspark_status dspark__merged_linear_fill_dense(dspark__merged_linear *ml, uint32_t s,
                                               const uint16_t *w, dspark_error *err)
{
    return dspark__merged_linear_fill_rows(ml, s, 0, ml->shards[s].rows, w, err);
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

/* What the codes' way needs beside accumulators: all are multiples of 64 bytes. */
typedef struct code_scratch {
    uint16_t *block;  /* [DECODE_K_MANY / 2][48][2] */
    float *acc, *sum; /* [n_rows][48] each */
    uint16_t *x;      /* [n_rows][DECODE_K_FEW]: gathered columns of a permuted shard */
} code_scratch;

size_t dspark__merged_linear_scratch(size_t n_rows)
{
    size_t acc = n_rows * DSPARK__PANEL * sizeof(float);
    size_t codes = DECODE_K_MANY * DSPARK__PANEL * sizeof(uint16_t) + 2 * acc +
                   n_rows * DECODE_K_FEW * 2;
    return codes > BLOCK_PANELS * acc ? codes : BLOCK_PANELS * acc;
}

static code_scratch cut_scratch(void *scratch, size_t n_rows)
{
    code_scratch c;
    unsigned char *at = scratch;
    c.block = (uint16_t *)(void *)at;
    at += DECODE_K_MANY * DSPARK__PANEL * sizeof(uint16_t);
    c.acc = (float *)(void *)at;
    at += n_rows * DSPARK__PANEL * sizeof(float);
    c.sum = (float *)(void *)at;
    at += n_rows * DSPARK__PANEL * sizeof(float);
    c.x = (uint16_t *)(void *)at;
    return c;
}

static void gather_columns(uint16_t *to, const void *x, size_t x_stride, size_t n_rows,
                           const uint32_t *perm, size_t n)
{
    for (size_t i = 0; i < n_rows; i++) {
        const unsigned char *row = (const unsigned char *)x + i * x_stride;
        for (size_t j = 0; j < n; j++) memcpy(to + i * DECODE_K_FEW + j, row + 2 * (size_t)perm[j], 2);
    }
}

/* One decoded block, k0 .. k0+n-1, of one panel. */
typedef struct code_block {
    const dspark__shard *shard;
    const float *group_scales; /* of the panel, or NULL */
    const float *row_scales;   /* of the panel, or NULL */
    const unsigned char *x;    /* at column k0 (gathered when the shard is permuted) */
    size_t x_stride;
    uint32_t k0, n, k;
} code_block;

/* The product with a block: in one go, or K-group by K-group, each of which has an accumulator of its
 * own that is scaled into the sum when the group is finished. */
static void run_code_block(const code_block *b, const dspark__kern *kern, const code_scratch *c,
                           dspark__gemm_bf16 *g)
{
    const uint32_t group = b->shard->packing.group;
    const uint32_t stop = b->k0 + b->n;
    g->acc = c->acc;
    g->x_stride = b->x_stride;
    if (group && group % 2 == 0 && b->k0 % group == 0 && (b->n % group == 0 || stop == b->k)) {
        g->x = b->x; /* whole groups */
        g->panels = c->block;
        g->k = b->n;
        g->first = b->k0 == 0;
        kern->gemm_groups(g, group, b->group_scales + (size_t)(b->k0 / group) * DSPARK__PANEL,
                          c->sum);
        return;
    }
    for (uint32_t at = b->k0, end; at < stop; at = end) {
        end = group && (at / group + 1) * group < stop ? (at / group + 1) * group : stop;
        g->x = b->x + (size_t)(at - b->k0) * 2;
        g->panels = c->block + (size_t)(at - b->k0) * DSPARK__PANEL;
        g->k = end - at;
        g->first = group ? at % group == 0 : at == 0;
        g->last = !group && !b->row_scales && end == b->k;
        kern->gemm_bf16(g);
        if (group && (end % group == 0 || end == b->k))
            kern->scale_add(c->sum, c->acc,
                            b->group_scales + (size_t)(at / group) * DSPARK__PANEL, g->n_rows,
                            at < group);
    }
}

/* One panel of codes times few rows, in one go. */
static void run_few_rows(const dspark__shard *shard, const dspark__kern *kern, size_t p, uint32_t k,
                         const dspark__gemm_bf16 *g, const void *x, size_t x_stride, float *acc)
{
    dspark__dot_codes d = {.x = x, .x_stride = x_stride, .n_rows = g->n_rows,
                           .codes = shard->codes + p * shard->code_stride,
                           .format = &shard->packing.format, .k = k, .group = shard->packing.group,
                           .acc = acc};
    if (shard->scales) d.scales = shard->scales + p * shard->scale_stride;
    if (d.group) d.group_scales = shard->group_scales + p * shard->n_groups * DSPARK__PANEL;
    kern->dot_codes(&d);
    kern->finish(g->out, g->out_stride, acc,
                 shard->row_scales ? shard->row_scales + p * DSPARK__PANEL : NULL, g->n_rows,
                 g->n_out);
}

/* One panel of codes. g has what all panels share; its out is this panel's. */
static void run_code_panel(const dspark__shard *shard, const dspark__kern *kern, size_t p, uint32_t k,
                           dspark__gemm_bf16 *g, const void *x, size_t x_stride, code_scratch *c)
{
    const dspark__packing *packing = &shard->packing;
    const uint8_t *codes = shard->codes + p * shard->code_stride;
    const uint8_t *scales = shard->scales ? shard->scales + p * shard->scale_stride : NULL;
    const uint32_t step = g->n_rows <= FEW_ROWS || shard->perm ? DECODE_K_FEW : DECODE_K_MANY;
    code_block b = {.shard = shard, .k = k, .x_stride = x_stride};

    if (shard->row_scales) b.row_scales = shard->row_scales + p * DSPARK__PANEL;
    if (packing->group) b.group_scales = shard->group_scales + p * shard->n_groups * DSPARK__PANEL;
    g->n_panels = 1;
    for (b.k0 = 0; b.k0 < k; b.k0 += step) {
        b.n = k - b.k0 < step ? k - b.k0 : step;
        kern->decode(c->block, codes, scales, &packing->format, b.k0, b.n);
        b.x = (const unsigned char *)x + (size_t)b.k0 * 2;
        if (shard->perm) {
            gather_columns(c->x, x, x_stride, g->n_rows, shard->perm + b.k0, b.n);
            b.x = (const unsigned char *)c->x;
            b.x_stride = DECODE_K_FEW * 2;
        }
        run_code_block(&b, kern, c, g);
    }
    if (packing->group || b.row_scales)
        kern->finish(g->out, g->out_stride, packing->group ? c->sum : c->acc, b.row_scales,
                     g->n_rows, g->n_out);
}

static void name_next(dspark__gemm_bf16 *g, const void *at, uint32_t n_k)
{
    g->prefetch = at;
    g->prefetch_bytes = (size_t)(n_k < BLOCK_K ? n_k : BLOCK_K) * DSPARK__PANEL * sizeof(uint16_t);
}

static void run_bf16(const dspark__shard *shard, const dspark__kern *kern, uint32_t p0,
                     uint32_t n_panels, uint32_t k, size_t n_out, dspark__gemm_bf16 *g, const void *x,
                     float *acc, uint16_t *out, const void *next)
{
    const uint16_t *first = (const uint16_t *)(const void *)shard->codes + p0 * g->panel_stride;
    if (g->n_rows <= FEW_ROWS) {
        g->x = x;
        g->panels = first;
        g->n_panels = n_panels;
        g->k = k;
        g->first = g->last = 1;
        g->out = out;
        g->n_out = n_out;
        kern->gemm_bf16(g);
        return;
    }
    g->acc = acc;
    for (uint32_t p = 0; p < n_panels; p += BLOCK_PANELS) {
        g->n_panels = n_panels - p < BLOCK_PANELS ? n_panels - p : BLOCK_PANELS;
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
    code_scratch c = cut_scratch(scratch, n_rows);
    const int few = shard->packing.bits == 4 && !shard->perm && shard->packing.group % 8 == 0 &&
                    n_rows <= kern->dot_rows[shard->packing.format.scale];
    for (uint32_t p = 0; p < n_panels; p++) {
        g.out = out + (size_t)p * DSPARK__PANEL;
        g.n_out = n_out - (size_t)p * DSPARK__PANEL;
        if (g.n_out > DSPARK__PANEL) g.n_out = DSPARK__PANEL;
        if (few) run_few_rows(shard, kern, p0 + p, ml->k, &g, x, x_stride, c.acc);
        else run_code_panel(shard, kern, p0 + p, ml->k, &g, x, x_stride, &c);
    }
}
