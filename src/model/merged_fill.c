/* Filling the shards of a merged linear: modules or rows in memory into panels, on all threads. A thread takes
 * units of panels, brings their pages, hashes, packs and checks each panel while it is in its cache, and drops
 * the file's pages. A piece, which is many units, ends with what one thread does: digest, progress, output. */
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/numfmt.h"
#include "base/status.h"
#include "model/merged_linear.h"
#include "model/prepacked.h"
#include "quant/parts.h"

/* What is packed between two progress steps, for each thread: so many bytes, and enough panels to share out. */
#define PIECE_BYTES ((uint64_t)32 << 20)
#define MOST_PIECE ((uint64_t)256 << 20)
#define PIECE_PANELS 16u
#define PIECE_ROWS 65536u /* at most: each has a digest */
/* Of a unit. Smaller ones cost more in the system: a drop interrupts all processors. */
#define UNIT_BYTES ((size_t)16 << 20)
/* A file's pages are mapped by the system in runs of so many bytes, or larger ones. */
#define RUN_BYTES (64u << 10)

typedef unsigned char row_digest[16];

typedef struct pack_job {
    const dspark__shard *shard;
    const dspark__fill *fill;
    const dspark__kern *kern;
    const dspark_allocator *allocator;
    const unsigned char *rows; /* row r of the shard at rows + r * stride, row_bytes long */
    size_t stride, row_bytes;
    uint64_t k;
    uint32_t panel0, n_panels;
    unsigned char *codes; /* of panel codes_from and those behind it; NULL: rows are hashed and not packed */
    uint32_t codes_from;
    row_digest *digests;  /* of the piece's rows, in order */
    const dspark_tensor *file; /* that holds the rows, or NULL: they are in memory */
    unsigned a_unit;      /* panels of a unit at most */
    atomic_uint next;     /* panel that nobody took yet */
    atomic_uint bad;      /* the first panel with a weight that is not finite, or UINT32_MAX */
} pack_job;

static uint64_t rows_of_panel(const pack_job *job, size_t p)
{
    uint64_t left = job->shard->rows - p * DSPARK__PANEL;
    return left < DSPARK__PANEL ? left : DSPARK__PANEL;
}

static const unsigned char *row_at(const pack_job *job, size_t row)
{
    return job->rows + row * job->stride;
}

static unsigned char *codes_at(const pack_job *job, size_t p)
{
    return job->codes + (p - job->codes_from) * job->shard->code_stride;
}

/* ---- units ---- */

typedef struct unit {
    size_t first, n; /* panels; n = 0: none */
} unit;

/* Less and less towards the end of a piece, so that threads finish together. */
static unit take_unit(pack_job *job)
{
    const unsigned end = job->panel0 + job->n_panels, threads = dspark__threads_count(job->fill->threads);
    unsigned first = atomic_load(&job->next), n;
    do {
        if (first >= end) return (unit){end, 0};
        n = threads == 1 ? end - first : (end - first) / (2 * threads);
        n = n < 1 ? 1 : n > job->a_unit ? job->a_unit : n;
    } while (!atomic_compare_exchange_weak(&job->next, &first, first + n));
    return (unit){first, n};
}

static uint64_t rows_of_unit(const pack_job *job, unit u)
{
    const uint64_t left = job->shard->rows - (uint64_t)u.first * DSPARK__PANEL;
    return left < u.n * DSPARK__PANEL ? left : u.n * DSPARK__PANEL;
}

/* Pages of file and memory come before they are used: not one by one under a kernel that has many rows in flight.
 * A huge page comes with the unit that it begins in; the last one first, for another thread goes on in it. */
static void bring_unit(const pack_job *job, unit u)
{
    const volatile unsigned char *from = row_at(job, u.first * DSPARK__PANEL);
    if (!u.n) return;
    const size_t bytes = job->file ? (size_t)rows_of_unit(job, u) * job->row_bytes : 0;
    if (job->codes && !job->fill->packer)
        for (size_t i = dspark__huge_pages(codes_at(job, u.first), u.n * job->shard->code_stride); i-- > 0;)
            dspark__huge_page_bring(codes_at(job, u.first), i, job->codes + job->shard->bytes);
    for (size_t i = 0; i < bytes; i += RUN_BYTES) (void)from[i];
}

/* Units are cut at any byte: the page that two of them share is left to the piece. */
static void drop_unit(const pack_job *job, unit u)
{
    const uint64_t row = (uint64_t)u.first * DSPARK__PANEL;
    if (job->file)
        dspark__checkpoint_drop(job->fill->ckpt, job->file, row * job->row_bytes,
                                rows_of_unit(job, u) * job->row_bytes);
}

/* No code of these rows stands for a number that is not finite; none of 4 bits does. Codes of 8 bits that can are
 * packed as they are stored. */
static int codes_are_finite(const pack_job *job, size_t p)
{
    const dspark__packing *packing = &job->shard->packing;
    const uint64_t row = p * DSPARK__PANEL, n = rows_of_panel(job, p);
    if (packing->bits != 8) return 1;
    for (int c = 0; c < 256; c++)
        for (uint64_t r = row; !dspark__bf16_is_finite(packing->format.table[c]) && r < row + n; r++)
            if (memchr(row_at(job, r), c, job->row_bytes)) return 0;
    return 1;
}

/* bf16 as it is stored: hashed and packed in one pass where that is better. next: the panel that follows on
 * this thread, or SIZE_MAX. */
static int pack_bf16(const pack_job *job, size_t p, size_t next, row_digest *digests)
{
    const unsigned char *rows = row_at(job, p * DSPARK__PANEL);
    const uint64_t n = rows_of_panel(job, p);
    uint16_t *panel = (uint16_t *)(void *)codes_at(job, p);
    if (job->kern->pack_digest) {
        dspark__pack_digest all = {panel, rows, job->stride, n, job->k, digests, NULL};
        if (next != SIZE_MAX && rows_of_panel(job, next) == DSPARK__PANEL)
            all.next = row_at(job, next * DSPARK__PANEL);
        return job->kern->pack_digest(&all);
    }
    job->kern->digest_rows(digests, rows, job->stride, n, job->row_bytes);
    return job->kern->pack_panel(panel, rows, job->stride, n, job->k);
}

/* 1 when all weights are finite. */
static int pack_panel(const pack_job *job, size_t p, size_t next)
{
    const dspark__shard *shard = job->shard;
    const dspark__packing *packing = &shard->packing;
    const uint64_t row = p * DSPARK__PANEL, n = rows_of_panel(job, p);
    row_digest *digests = job->digests + (p - job->panel0) * DSPARK__PANEL;
    const int plain = !shard->scheme || shard->scheme == &dspark__scheme_bf16;
    if (plain && job->codes) return pack_bf16(job, p, next, digests);
    /* Hashing reads the rows in order and into the cache, as packing would not. */
    job->kern->digest_rows(digests, row_at(job, row), job->stride, n, job->row_bytes);
    if (!job->codes) return 1;
    dspark__panel_out out = {.kern = job->kern, .codes = codes_at(job, p)};
    if (shard->scales) out.scales = shard->scales + p * shard->scale_stride;
    if (shard->group_scales)
        out.group_scales = shard->group_scales + p * shard->n_groups * DSPARK__PANEL;
    if (shard->row_scales) out.row_scales = shard->row_scales + p * DSPARK__PANEL;
    if (!codes_are_finite(job, p)) return 0;
    shard->scheme->pack(job->fill->module, packing, job->fill->rule, row, n, shard->rows, job->k, &out);
    if (packing->bits == 16)
        return job->kern->finite_bf16(out.codes, dspark__panel_elements(job->k));
    return 1;
}

static void note_bad(pack_job *job, unsigned p)
{
    unsigned seen = atomic_load(&job->bad);
    while (p < seen && !atomic_compare_exchange_weak(&job->bad, &seen, p)) {
    }
}

static void pack_task(void *arg, size_t worker)
{
    pack_job *job = arg;
    unit now = take_unit(job);
    (void)worker;
    bring_unit(job, now);
    while (now.n) {
        unit then = {0};
        for (size_t i = 0, p = now.first; i < now.n; i++, p++) {
            size_t next = p + 1;
            if (i + 1 == now.n) { /* not before: who is done first finds more to take */
                then = take_unit(job);
                bring_unit(job, then);
                next = then.n ? then.first : SIZE_MAX;
            }
            if (!pack_panel(job, p, next)) note_bad(job, (unsigned)p);
        }
        drop_unit(job, now);
        now = then;
    }
}

/* ---- pieces ---- */

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

/* Rows [row, row + n) of the shard. The first bad panel, or UINT32_MAX. */
static unsigned pack_piece(pack_job *job, uint64_t row, uint64_t n)
{
    const size_t workers = dspark__threads_count(job->fill->threads);
    job->panel0 = (uint32_t)(row / DSPARK__PANEL);
    job->n_panels = (uint32_t)dspark__ceil_div_u64(n, DSPARK__PANEL);
    atomic_store(&job->next, job->panel0);
    dspark__threads_run(job->fill->threads, pack_task, job, workers < job->n_panels ? workers : job->n_panels);
    if (job->fill->digest) dspark__digest_update(job->fill->digest, job->digests, n * sizeof *job->digests);
    if (job->file)
        dspark__checkpoint_drop(job->fill->ckpt, job->file, row * job->row_bytes, n * job->row_bytes);
    return atomic_load(&job->bad);
}

static dspark_status fail_panel(const pack_job *job, size_t p, const char *tensor, dspark_error *err)
{
    const uint64_t first = p * DSPARK__PANEL;
    return dspark__fail(err, DSPARK_ENONFINITE, tensor,
                        "a weight in rows %llu to %llu is NaN or infinite (inspect --deep counts them)",
                        (unsigned long long)first,
                        (unsigned long long)(first + rows_of_panel(job, p) - 1));
}

/* Of bf16 rows in memory, which nobody can inspect. */
static dspark_status fail_row(const pack_job *job, size_t p, const char *name, dspark_error *err)
{
    uint64_t row = p * DSPARK__PANEL, column = 0;
    const unsigned char *at = job->rows + row * job->stride;
    for (; job->kern->finite_bf16(at, job->k); row++) at += job->stride;
    while (job->kern->finite_bf16(at, column + 1)) column++;
    return dspark__fail(err, DSPARK_ENONFINITE, name,
                        "row %llu, column %llu of the host's matrix is NaN or infinite",
                        (unsigned long long)row, (unsigned long long)column);
}

static uint64_t rows_of_piece(const pack_job *job)
{
    uint64_t bytes = PIECE_BYTES * dspark__threads_count(job->fill->threads);
    if (bytes > MOST_PIECE) bytes = MOST_PIECE;
    uint64_t rows = bytes / (job->row_bytes ? job->row_bytes : 1);
    if (rows > PIECE_ROWS) rows = PIECE_ROWS;
    if (rows < PIECE_PANELS * DSPARK__PANEL) rows = PIECE_PANELS * DSPARK__PANEL;
    return rows / DSPARK__PANEL * DSPARK__PANEL;
}

static unsigned panels_of_unit(const pack_job *job)
{
    const size_t file = job->row_bytes * DSPARK__PANEL, codes = job->codes ? job->shard->code_stride : 0;
    const size_t panel = file > codes ? file : codes;
    return panel < UNIT_BYTES ? (unsigned)(UNIT_BYTES / (panel ? panel : 1)) : 1;
}

/* A piece is packed: what is there to say of it? */
static dspark_status end_piece(const pack_job *job, uint64_t n, const dspark_tensor *t, const char *name,
                               unsigned bad, dspark_error *err)
{
    const dspark__fill *f = job->fill;
    if (bad != UINT32_MAX) return t ? fail_panel(job, bad, t->name, err) : fail_row(job, bad, name, err);
    if (!job->codes) return DSPARK_OK;
    if (f->step && f->step(f->user, n * job->row_bytes))
        return dspark__fail(err, DSPARK_ECANCELLED, name, "cancelled while packing");
    if (!f->packer) return DSPARK_OK;
    return dspark__packer_put(f->packer, job->codes, job->n_panels * job->shard->code_stride, err);
}

/* All of the shard. */
static dspark_status take_pieces(pack_job *job, const char *name, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    const dspark_tensor *t = job->file;
    const dspark__fill *f = job->fill;
    const uint64_t rows = job->shard->rows, piece = rows_of_piece(job);
    const size_t bytes = (size_t)(piece < rows ? piece : rows) * sizeof *job->digests;
    job->digests = dspark__alloc(job->allocator, bytes, 64);
    if (!job->digests) return dspark__fail_nomem(err, name, bytes);
    job->a_unit = panels_of_unit(job);
    for (uint64_t row = 0; row < rows && st == DSPARK_OK; row += piece) {
        const uint64_t n = rows - row < piece ? rows - row : piece;
        if (t && (st = dspark__checkpoint_verify(f->ckpt, t, err)) != DSPARK_OK) break;
        if (f->packer) job->codes_from = (uint32_t)(row / DSPARK__PANEL);
        const unsigned bad = pack_piece(job, row, n);
        st = end_piece(job, n, t, name, bad, err);
    }
    dspark__free(job->allocator, job->digests, bytes);
    return st;
}

/* The same, with memory for a piece's codes where they are not kept. */
static dspark_status pack_pieces(pack_job *job, const char *name, dspark_error *err)
{
    const uint64_t rows = job->shard->rows, piece = rows_of_piece(job);
    const size_t panels = (size_t)dspark__ceil_div_u64(piece < rows ? piece : rows, DSPARK__PANEL);
    const size_t bytes = panels * job->shard->code_stride;
    if (!job->fill->packer) return take_pieces(job, name, err);
    if (!(job->codes = dspark__alloc(job->allocator, bytes, 64))) return dspark__fail_nomem(err, name, bytes);
    dspark_status st = take_pieces(job, name, err);
    dspark__free(job->allocator, job->codes, bytes);
    return st;
}

static dspark_status pack_shard(const dspark__merged_linear *ml, uint32_t s, const dspark__fill *f,
                                const void *rows, size_t stride, size_t row_bytes,
                                const dspark_tensor *t, const char *name, dspark_error *err)
{
    const dspark__shard *shard = &ml->shards[s];
    dspark__kern kern;
    dspark_status st = dspark__kern_select(&kern, DSPARK_ISA_AUTO, err);
    if (st != DSPARK_OK) return st;
    pack_job job = {.shard = shard, .fill = f, .kern = &kern, .allocator = &ml->allocator, .rows = rows,
                    .stride = stride, .row_bytes = row_bytes, .k = ml->k, .codes = shard->codes,
                    .file = t, .bad = UINT32_MAX};
    if (!f->packer) return pack_pieces(&job, name, err);
    size_t n_rest;
    const void *rest = dspark__shard_rest(shard, &n_rest);
    st = dspark__packer_begin(f->packer, ml, s, shard->scheme ? shard->scheme : &dspark__scheme_bf16, err);
    if (st == DSPARK_OK) st = pack_pieces(&job, name, err);
    if (st == DSPARK_OK) st = dspark__packer_put(f->packer, rest, n_rest, err);
    return st == DSPARK_OK ? dspark__packer_end(f->packer, err) : st;
}

/* A shard that could not be filled is as it was before; one that was streamed has no memory. */
static dspark_status end_shard(dspark__merged_linear *ml, uint32_t s, const dspark__fill *f,
                               dspark_status st)
{
    dspark__shard *shard = &ml->shards[s];
    if (st == DSPARK_OK) {
        ml->bytes += shard->bytes;
        ml->n_filled++;
        if (f && f->packer) dspark__shard_release(ml, s);
        return st;
    }
    dspark__shard_release(ml, s);
    *shard = (dspark__shard){.rows = shard->rows, .n_panels = shard->n_panels};
    return st;
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
    if (st == DSPARK_OK) st = dspark__shard_take_memory(ml, s, f->packer != NULL, err);
    const dspark_tensor *t = main_part(f->module);
    if (st == DSPARK_OK && f->digest) st = digest_small_parts(&fill, t, err);
    if (st == DSPARK_OK && shard->perm)
        shard->scheme->permutation(f->module, ml->k, shard->packing.group, shard->perm);
    if (st == DSPARK_OK) {
        size_t row_bytes = (size_t)(t->n_bytes / shard->rows);
        st = pack_shard(ml, s, &fill, t->data, row_bytes, row_bytes, t, f->module->name, err);
    }
    return end_shard(ml, s, f, st);
}

/* Rows of t, or in memory when it is NULL. */
static dspark_status hash_shard(const dspark__merged_linear *ml, uint32_t s, const dspark__fill *f,
                                const void *rows, size_t stride, size_t row_bytes, const dspark_tensor *t,
                                dspark_error *err)
{
    dspark__kern kern;
    dspark__fill fill = *f;
    dspark_status st = dspark__kern_select(&kern, DSPARK_ISA_AUTO, err);
    if (st != DSPARK_OK) return st;
    fill.packer = NULL;
    pack_job job = {.shard = &ml->shards[s], .fill = &fill, .kern = &kern, .allocator = &ml->allocator,
                    .rows = rows, .stride = stride, .row_bytes = row_bytes, .k = ml->k, .file = t,
                    .bad = UINT32_MAX};
    return take_pieces(&job, ml->name, err);
}

dspark_status dspark__merged_linear_hash(const dspark__merged_linear *ml, uint32_t s,
                                         const dspark__fill *f, dspark_error *err)
{
    const dspark_tensor *t = main_part(f->module);
    if (!t) return dspark__fail(err, DSPARK_EMODEL, f->module->name, "has no weight");
    const size_t row_bytes = (size_t)(t->n_bytes / ml->shards[s].rows);
    dspark_status st = digest_small_parts(f, t, err);
    return st == DSPARK_OK ? hash_shard(ml, s, f, t->data, row_bytes, row_bytes, t, err) : st;
}

dspark_status dspark__merged_linear_hash_rows(const dspark__merged_linear *ml, uint32_t s, const void *rows,
                                              size_t stride, const dspark__fill *f, dspark_error *err)
{
    return hash_shard(ml, s, f, rows, stride, (size_t)ml->k * 2, NULL, err);
}

dspark_status dspark__merged_linear_fill_rows(dspark__merged_linear *ml, uint32_t s, const void *rows,
                                              size_t stride, const dspark__fill *fill,
                                              dspark_error *err)
{
    dspark__shard *shard = &ml->shards[s];
    dspark_status st;
    if (shard->scheme)
        return dspark__fail(err, DSPARK_EMODEL, ml->name, "shard %u was filled twice", s);
    shard->packing = dspark__packing_bf16;
    st = dspark__shard_take_memory(ml, s, fill->packer != NULL, err);
    if (st == DSPARK_OK)
        st = pack_shard(ml, s, fill, rows, stride, (size_t)ml->k * 2, NULL, ml->name, err);
    if (st == DSPARK_OK) shard->scheme = &dspark__scheme_bf16;
    return end_shard(ml, s, fill, st);
}
