/* See quantize_plan.h: passes over the rows of one weight. Rows are read in chunks and shared out to
 * threads by units (a row, or 128 rows of a block format); what a unit gives depends on nothing but its
 * rows, and sums over rows are taken in order of the rows, so no byte or number depends on threads. */
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/digest.h"
#include "base/numfmt.h"
#include "base/status.h"
#include "ckpt/checkpoint.h"
#include "ckpt/writer.h"
#include "quant/quantize_plan.h"

#define CHUNK_WEIGHTS ((uint64_t)4 << 20)

/* Of one thread. */
struct dspark__quantize_scratch {
    float *w;       /* [unit_rows][k] */
    double *source; /* [k] */
    double *value;  /* [k] */
};

/* One pass over the rows [first, first + n) of a weight. */
typedef struct pass {
    dspark__quantize_work *work;
    dspark__qm *m;
    void (*unit)(struct pass *p, struct dspark__quantize_scratch *s, uint64_t row, uint64_t n);
    uint64_t first, n;
    uint32_t unit_rows;
    atomic_uint_fast64_t next, bad_row;
    /* absmax */
    float *absmax; /* [rows] */
    double *error; /* [rows] */
    float candidate;
    /* comparison */
    const dspark__module *back;
    const dspark__scheme *back_scheme;
    const dspark__quant_rule *back_rule;
    double *error_max, *source_squares; /* [rows]; `error` holds the squared errors */
} pass;

/* ------------------------------------------------------------------------------------------------
 * Work
 * --------------------------------------------------------------------------------------------- */

static uint64_t unit_rows_of(const dspark__qm *m)
{
    return m->kind == DSPARK__QM_QUANTISE ? m->encoder.unit_rows : 1;
}

/* Rows of a chunk: whole units, one at least. */
static uint64_t chunk_rows(const dspark__qm *m)
{
    const uint64_t unit = unit_rows_of(m), n = CHUNK_WEIGHTS / m->k / unit * unit;
    return n ? n : unit;
}

static uint64_t chunk_bytes(const dspark__qm *m)
{
    return chunk_rows(m) * (m->kind == DSPARK__QM_DENSE ? m->k * 2 : m->encoder.row_bytes);
}

dspark_status dspark__quantize_work_init(dspark__quantize_work *w, const dspark__quantize_plan *p,
                                         const dspark_quantize_opts *opts, dspark_error *err)
{
    uint64_t k = 0, unit = 0;
    uint32_t n_threads;
    dspark_status st;

    memset(w, 0, sizeof *w);
    w->ckpt = p->ckpt;
    w->progress = opts->progress;
    w->progress_user = opts->progress_user;
    w->total = p->work_bytes;
    st = dspark__threads_create(&w->threads, opts->n_threads, NULL, NULL, err);
    if (st != DSPARK_OK) return st;
    for (size_t i = 0; i < p->modules.n; i++) {
        const dspark__qm *m = &p->list[i];
        if (m->kind == DSPARK__QM_COPY) continue;
        if (m->k > k) k = m->k;
        if (unit_rows_of(m) * m->k > unit) unit = unit_rows_of(m) * m->k;
        if (chunk_bytes(m) > w->codes_bytes) w->codes_bytes = chunk_bytes(m);
    }
    n_threads = dspark__threads_count(w->threads);
    w->codes = malloc(w->codes_bytes + 1);
    w->scratch = calloc(n_threads, sizeof *w->scratch);
    if (!w->codes || !w->scratch) return dspark__fail_nomem(err, "codes", w->codes_bytes);
    for (uint32_t i = 0; i < n_threads; i++) {
        struct dspark__quantize_scratch *s = &w->scratch[i];
        s->w = malloc((unit + 1) * sizeof *s->w);
        s->source = malloc((k + 1) * sizeof *s->source);
        s->value = malloc((k + 1) * sizeof *s->value);
        if (!s->w || !s->source || !s->value)
            return dspark__fail_nomem(err, "rows", unit * 4 + k * 16);
    }
    return DSPARK_OK;
}

void dspark__quantize_work_free(dspark__quantize_work *w)
{
    uint32_t n = w->threads ? dspark__threads_count(w->threads) : 0;
    for (uint32_t i = 0; w->scratch && i < n; i++) {
        free(w->scratch[i].w);
        free(w->scratch[i].source);
        free(w->scratch[i].value);
    }
    free(w->scratch);
    free(w->codes);
    dspark__threads_free(w->threads);
    memset(w, 0, sizeof *w);
}

dspark_status dspark__quantize_work_step(dspark__quantize_work *w, uint64_t bytes, const char *name,
                                         dspark_error *err)
{
    w->done += bytes;
    if (w->progress && w->progress(w->progress_user, w->done, w->total) != 0)
        return dspark__fail(err, DSPARK_ECANCELLED, name,
                            "cancelled after %" PRIu64 " of %" PRIu64 " bytes", w->done, w->total);
    return DSPARK_OK;
}

/* ------------------------------------------------------------------------------------------------
 * A pass
 * --------------------------------------------------------------------------------------------- */

static void run_units(void *arg, size_t thread)
{
    pass *p = arg;
    for (;;) {
        uint64_t at = atomic_fetch_add(&p->next, 1) * p->unit_rows;
        if (at >= p->n) return;
        p->unit(p, &p->work->scratch[thread], p->first + at,
                p->n - at < p->unit_rows ? p->n - at : p->unit_rows);
    }
}

/* Do the chunk [first, first + n) and drop the source's pages behind it. `bytes` are reported. */
static dspark_status run_chunk(pass *p, uint64_t first, uint64_t n, uint64_t bytes, dspark_error *err)
{
    const dspark__qm *m = p->m;
    uint64_t bad;
    p->first = first;
    p->n = n;
    atomic_store(&p->next, 0);
    atomic_store(&p->bad_row, UINT64_MAX);
    dspark__threads_run(p->work->threads, run_units, p, dspark__threads_count(p->work->threads));
    bad = atomic_load(&p->bad_row);
    if (bad != UINT64_MAX && p->back)
        return dspark__fail(err, DSPARK_EINTERNAL, m->file->name,
                            "row %" PRIu64 " reads back as other numbers than were encoded", bad);
    if (bad != UINT64_MAX)
        return dspark__fail(err, DSPARK_ENONFINITE, m->file->name,
                            "row %" PRIu64 " holds NaN or infinity", bad);
    for (uint32_t i = 0; i < m->file->n_parts; i++) { /* what has a part for each row */
        const dspark_tensor *t = m->file->parts[i].tensor;
        if (t->n_bytes % m->rows == 0)
            dspark__checkpoint_drop(p->work->ckpt, t, t->n_bytes / m->rows * first,
                                    t->n_bytes / m->rows * n);
    }
    return dspark__quantize_work_step(p->work, bytes, m->file->name, err);
}

static dspark_status run_pass(pass *p, dspark_error *err)
{
    const uint64_t rows = p->m->rows, step = chunk_rows(p->m);
    for (uint64_t row = 0; row < rows; row += step) {
        uint64_t n = rows - row < step ? rows - row : step;
        dspark_status st = run_chunk(p, row, n, p->m->weight_bytes / rows * n, err);
        if (st != DSPARK_OK) return st;
    }
    return DSPARK_OK;
}

static dspark_status verify_source(const dspark__quantize_work *w, const dspark__qm *m,
                                   dspark_error *err)
{
    for (uint32_t i = 0; i < m->file->n_parts; i++) {
        dspark_status st = dspark__checkpoint_verify(w->ckpt, m->file->parts[i].tensor, err);
        if (st != DSPARK_OK) return st;
    }
    return DSPARK_OK;
}

static void note_bad(pass *p, uint64_t row)
{
    uint_fast64_t seen = atomic_load(&p->bad_row);
    while (row < seen && !atomic_compare_exchange_weak(&p->bad_row, &seen, row)) {
    }
}

/* A source row as double, exactly, and as fp32, rounded once (which changes nothing of BF16). */
static void source_row(const dspark__qm *m, uint64_t row, double *exact)
{
    m->scheme->dequantise(&m->module, &m->rule, row, m->rows, m->k, exact);
}

static void float_row(const dspark__qm *m, uint64_t row, double *scratch, float *out)
{
    const dspark_tensor *t = m->module.n_parts == 1 ? m->module.parts[0].tensor : NULL;
    if (t && t->dtype == DSPARK_BF16) {
        const unsigned char *from = (const unsigned char *)t->data + row * m->k * 2;
        for (uint64_t i = 0; i < m->k; i++)
            out[i] = dspark__bf16_to_f32(dspark__load_u16(from + 2 * i));
        return;
    }
    source_row(m, row, scratch);
    for (uint64_t i = 0; i < m->k; i++) out[i] = (float)scratch[i];
}

static uint64_t hash_row(double *values, uint64_t k)
{
    for (uint64_t i = 0; i < k; i++) values[i] += 0.0; /* zeros have no sign here */
    return dspark__hash64(values, k * sizeof *values, 0);
}

/* ------------------------------------------------------------------------------------------------
 * The tensor's scale
 * --------------------------------------------------------------------------------------------- */

static void absmax_unit(pass *p, struct dspark__quantize_scratch *s, uint64_t row, uint64_t n)
{
    for (uint64_t r = row; r < row + n; r++) {
        float_row(p->m, r, s->source, s->w);
        p->absmax[r] = dspark__encode_absmax(s->w, p->m->k);
        if (!isfinite(p->absmax[r])) note_bad(p, r);
    }
}

static void error_unit(pass *p, struct dspark__quantize_scratch *s, uint64_t row, uint64_t n)
{
    for (uint64_t r = row; r < row + n; r++) {
        float_row(p->m, r, s->source, s->w);
        p->error[r] = dspark__encode_tensor_error(&p->m->encoder, s->w, p->candidate);
    }
}

/* The candidate with the least error; one pass over the weight for each. */
static dspark_status search_tensor_scale(pass *p, float absmax, dspark_error *err)
{
    float best = dspark__encode_tensor_scale(&p->m->encoder, absmax, 0);
    double least = 0;
    p->unit = error_unit;
    for (uint32_t i = 0; i < DSPARK__ENCODE_CANDIDATES; i++) {
        double sum = 0;
        dspark_status st;
        p->candidate = dspark__encode_tensor_scale(&p->m->encoder, absmax, i);
        /* Not counted: the progress of this module is that of its absmax pass. */
        if ((st = run_chunk(p, 0, p->m->rows, 0, err)) != DSPARK_OK) return st;
        for (uint64_t r = 0; r < p->m->rows; r++) sum += p->error[r];
        if (i > 0 && !(sum < least)) continue;
        least = sum;
        best = p->candidate;
    }
    p->m->encoder.global = best;
    return DSPARK_OK;
}

dspark_status dspark__quantize_absmax(dspark__quantize_work *w, dspark__qm *m, dspark_error *err)
{
    pass p = {.work = w, .m = m, .unit = absmax_unit, .unit_rows = 1};
    float absmax = 0;
    dspark_status st;

    if ((st = verify_source(w, m, err)) != DSPARK_OK) return st;
    p.absmax = malloc(m->rows * sizeof *p.absmax);
    p.error = malloc(m->rows * sizeof *p.error);
    if (!p.absmax || !p.error) {
        st = dspark__fail_nomem(err, "row statistics", m->rows * 12);
        goto done;
    }
    if ((st = run_pass(&p, err)) != DSPARK_OK) goto done;
    for (uint64_t r = 0; r < m->rows; r++) absmax = p.absmax[r] > absmax ? p.absmax[r] : absmax;
    dspark__encoder_set_absmax(&m->encoder, absmax);
    if (m->encoder.format == DSPARK_FORMAT_FP8_TENSOR && m->encoder.search == DSPARK_SCALES_MSE)
        st = search_tensor_scale(&p, absmax, err);
done:
    free(p.absmax);
    free(p.error);
    return st;
}

/* ------------------------------------------------------------------------------------------------
 * Codes
 * --------------------------------------------------------------------------------------------- */

static void encode_unit(pass *p, struct dspark__quantize_scratch *s, uint64_t row, uint64_t n)
{
    const dspark__encoder *e = &p->m->encoder;
    uint8_t *codes = p->work->codes + (row - p->first) * e->row_bytes;
    uint8_t *scales = p->m->scales + row / e->unit_rows * e->n_scales * e->scale_bytes;
    for (uint64_t r = 0; r < n; r++) {
        float *w = s->w + r * e->k;
        float_row(p->m, row + r, s->source, w);
        if (isfinite(dspark__encode_absmax(w, e->k))) continue;
        note_bad(p, row + r);
        return;
    }
    dspark__encode_unit(e, s->w, n, codes, scales);
    for (uint64_t r = 0; r < n; r++) {
        dspark__decode_row(e, codes, scales, r, s->value);
        p->m->row_hashes[row + r] = hash_row(s->value, e->k);
    }
}

/* BF16, rounded once from the fp32 of the row. */
static void dense_unit(pass *p, struct dspark__quantize_scratch *s, uint64_t row, uint64_t n)
{
    const uint64_t k = p->m->k;
    for (uint64_t r = row; r < row + n; r++) {
        uint8_t *out = p->work->codes + (r - p->first) * k * 2;
        float_row(p->m, r, s->source, s->w);
        for (uint64_t i = 0; i < k; i++) {
            uint16_t half = dspark__f32_to_bf16(s->w[i]);
            memcpy(out + 2 * i, &half, sizeof half);
            s->value[i] = dspark__bf16_to_f32(half);
            if (!isfinite(s->value[i])) note_bad(p, r);
        }
        p->m->row_hashes[r] = hash_row(s->value, k);
    }
}

static dspark_status write_rows(pass *p, uint64_t row_bytes, dspark_writer *writer,
                                dspark_error *err)
{
    dspark__qm *m = p->m;
    const uint64_t step = chunk_rows(m);
    dspark_status st;

    if ((st = verify_source(p->work, m, err)) != DSPARK_OK) return st;
    m->row_hashes = malloc(m->rows * sizeof *m->row_hashes);
    if (!m->row_hashes) return dspark__fail_nomem(err, "row hashes", m->rows * 8);
    for (uint64_t row = 0; row < m->rows; row += step) {
        uint64_t n = m->rows - row < step ? m->rows - row : step;
        st = run_chunk(p, row, n, m->weight_bytes / m->rows * n, err);
        if (st == DSPARK_OK)
            st = dspark__writer_data(writer, p->work->codes, (size_t)(row_bytes * n), err);
        if (st != DSPARK_OK) return st;
    }
    return DSPARK_OK;
}

dspark_status dspark__quantize_encode(dspark__quantize_work *w, dspark__qm *m, dspark_writer *writer,
                                      dspark_error *err)
{
    const dspark__encoder *e = &m->encoder;
    pass p = {.work = w, .m = m, .unit = encode_unit, .unit_rows = e->unit_rows};
    const uint64_t units = dspark__ceil_div_u64(m->rows, e->unit_rows);
    const uint64_t n_bytes = units * e->n_scales * e->scale_bytes; /* the plan has checked it */

    m->scales = malloc(n_bytes + 1);
    if (!m->scales) return dspark__fail_nomem(err, "scales", n_bytes);
    return write_rows(&p, e->row_bytes, writer, err);
}

dspark_status dspark__quantize_dense(dspark__quantize_work *w, dspark__qm *m, dspark_writer *writer,
                                     dspark_error *err)
{
    pass p = {.work = w, .m = m, .unit = dense_unit, .unit_rows = 1};
    return write_rows(&p, m->k * 2, writer, err);
}

/* ------------------------------------------------------------------------------------------------
 * Comparison
 * --------------------------------------------------------------------------------------------- */

static void compare_unit(pass *p, struct dspark__quantize_scratch *s, uint64_t row, uint64_t n)
{
    const dspark__qm *m = p->m;
    for (uint64_t r = row; r < row + n; r++) {
        double squares = 0, errors = 0, largest = 0;
        p->back_scheme->dequantise(p->back, p->back_rule, r, m->rows, m->k, s->value);
        if (hash_row(s->value, m->k) != m->row_hashes[r]) note_bad(p, r);
        source_row(m, r, s->source);
        for (uint64_t i = 0; i < m->k; i++) {
            double d = fabs(s->value[i] - s->source[i]);
            squares += s->source[i] * s->source[i];
            errors += d * d;
            largest = d > largest ? d : largest;
        }
        p->error_max[r] = largest;
        p->error[r] = errors;
        p->source_squares[r] = squares;
    }
}

dspark_status dspark__quantize_compare(dspark__quantize_work *w, const dspark__qm *m,
                                       const dspark__module *back, const dspark__scheme *scheme,
                                       const dspark__quant_rule *rule, dspark_quantize_report *r,
                                       dspark_error *err)
{
    dspark__qm own = *m; /* a pass may write to a module; this one does not */
    pass p = {.work = w, .m = &own, .unit = compare_unit, .unit_rows = 1, .back = back,
              .back_scheme = scheme, .back_rule = rule};
    double squares = 0, errors = 0;
    dspark_status st;

    p.error_max = malloc(m->rows * sizeof(double) * 3);
    if (!p.error_max) return dspark__fail_nomem(err, "row statistics", m->rows * 24);
    p.error = p.error_max + m->rows;
    p.source_squares = p.error + m->rows;
    if ((st = run_pass(&p, err)) != DSPARK_OK) goto done;
    r->max_abs_error = 0;
    for (uint64_t i = 0; i < m->rows; i++) {
        r->max_abs_error = p.error_max[i] > r->max_abs_error ? p.error_max[i] : r->max_abs_error;
        errors += p.error[i];
        squares += p.source_squares[i];
    }
    r->relative_rms = squares > 0 ? sqrt(errors / squares) : 0;
    r->sqnr_db = -20 * log10(r->relative_rms);
done:
    free(p.error_max);
    return st;
}
