/* See quantize.h: writes the shards of a plan into a staging directory, reads them back through the
 * schemes, compares, and publishes. Which tensors there are is the plan's business. */
#include "quant/quantize.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "ckpt/checkpoint.h"
#include "ckpt/dtype.h"
#include "ckpt/stage.h"
#include "ckpt/writer.h"
#include "quant/quant_file.h"
#include "quant/quantize_plan.h"

#define COPY_BYTES ((uint64_t)16 << 20)

/* ------------------------------------------------------------------------------------------------
 * Writing
 * --------------------------------------------------------------------------------------------- */

static dspark_status copy_tensor(dspark__quantize_work *w, const dspark__qm *m,
                                 const dspark_tensor *t, dspark_writer *writer, dspark_error *err)
{
    dspark_status st = dspark__checkpoint_verify(w->ckpt, t, err);
    for (uint64_t at = 0; st == DSPARK_OK && at < t->n_bytes; at += COPY_BYTES) {
        uint64_t n = t->n_bytes - at < COPY_BYTES ? t->n_bytes - at : COPY_BYTES;
        st = dspark__writer_data(writer, (const unsigned char *)t->data + at, (size_t)n, err);
        if (st != DSPARK_OK) return st;
        dspark__checkpoint_drop(w->ckpt, t, at, n);
        /* Beside another form of its module's weight it was counted with the weight. */
        if (m->kind == DSPARK__QM_COPY) st = dspark__quantize_work_step(w, n, t->name, err);
    }
    return st;
}

static dspark_status write_output(dspark__quantize_work *w, dspark__qm *m,
                                  const dspark__qm_output *o, dspark_writer *writer,
                                  dspark_error *err)
{
    const int64_t shape[2] = {(int64_t)m->rows, (int64_t)m->k};
    dspark_status st;
    switch (o->source) {
    case DSPARK__QM_TENSOR: return copy_tensor(w, m, o->tensor, writer, err);
    case DSPARK__QM_BF16: return dspark__quantize_dense(w, m, writer, err);
    case DSPARK__QM_CODES:
        if (m->encoder.has_global && (st = dspark__quantize_absmax(w, m, err)) != DSPARK_OK)
            return st;
        return dspark__quantize_encode(w, m, writer, err);
    case DSPARK__QM_SCALES:
        st = dspark__writer_data(writer, m->scales, (size_t)o->n_bytes, err);
        free(m->scales);
        m->scales = NULL;
        return st;
    case DSPARK__QM_GLOBAL:
        return dspark__writer_data(writer, &m->encoder.global, sizeof m->encoder.global, err);
    case DSPARK__QM_SHAPE: return dspark__writer_data(writer, shape, sizeof shape, err);
    }
    return dspark__fail(err, DSPARK_EINTERNAL, m->file->name, "an output of no kind");
}

/* Of the source's metadata "format" stays: libraries look at it. */
static dspark_status write_shard(dspark__quantize_work *w, dspark__quantize_plan *p, uint32_t shard,
                                 dspark__stage *s, dspark_error *err)
{
    char name[DSPARK__QM_NAME_BYTES];
    dspark_writer *writer = NULL;
    const char *format = dspark__checkpoint_metadata(p->ckpt, "format");
    dspark_status st;
    char *path;

    dspark__stage_shard_name(name, shard, p->n_shards);
    if (!(path = dspark__stage_add(s, name))) return dspark__fail_nomem(err, "a path", strlen(name));
    if ((st = dspark__writer_create(&writer, path, err)) != DSPARK_OK) goto fail;
    st = dspark__writer_metadata(writer, "format", format ? format : "pt", err);
    if (st == DSPARK_OK)
        st = dspark__writer_metadata(writer, "generator", "dspark quantize 1", err);
    if (st != DSPARK_OK) goto fail;
    for (size_t i = 0; i < p->modules.n; i++) {
        const dspark__qm *m = &p->list[i];
        for (uint32_t o = 0; m->shard == shard && o < m->n_outputs; o++) {
            const dspark__qm_output *out = &m->outputs[o];
            dspark__quantize_tensor_name(name, m, out);
            st = dspark__writer_declare(writer, name, out->dtype, out->rank, out->shape, err);
            if (st != DSPARK_OK) goto fail;
        }
    }
    for (size_t i = 0; i < p->modules.n; i++) {
        dspark__qm *m = &p->list[i];
        for (uint32_t o = 0; m->shard == shard && o < m->n_outputs; o++)
            if ((st = write_output(w, m, &m->outputs[o], writer, err)) != DSPARK_OK) goto fail;
    }
    st = dspark__writer_commit(writer, err);
    free(path);
    return st;
fail:
    dspark__writer_abort(writer);
    free(path);
    return st;
}

/* `text` ends where its newline is to be, and is freed. */
static dspark_status write_text(dspark__stage *s, const char *name, char *text, dspark_error *err)
{
    dspark_status st;
    size_t n = text ? strlen(text) : 0;
    if (!text) return dspark__fail_nomem(err, name, 0);
    text[n] = '\n';
    st = dspark__stage_write(s, name, text, n + 1, err);
    free(text);
    return st;
}

static dspark_status write_texts(const dspark__quantize_plan *p, const dspark_quantize_opts *opts,
                                 dspark__stage *s, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    char *text;
    if (p->n_shards > 1)
        st = write_text(s, "model.safetensors.index.json", dspark__quantize_index_text(p), err);
    if (st == DSPARK_OK && opts->layout == DSPARK_LAYOUT_MODELOPT)
        st = write_text(s, "hf_quant_config.json", dspark__quantize_modelopt_text(p, opts), err);
    if (st == DSPARK_OK) st = dspark__quantize_config_text(&text, p, opts, err);
    if (st == DSPARK_OK) st = write_text(s, "config.json", text, err);
    return st;
}

/* ------------------------------------------------------------------------------------------------
 * Reading back
 * --------------------------------------------------------------------------------------------- */

typedef struct reader {
    dspark_checkpoint *ckpt;
    dspark__config_doc *doc;
    dspark__quant_config *quant;
    dspark__modules modules;
} reader;

static void reader_close(reader *r)
{
    dspark__modules_free(&r->modules);
    dspark__quant_config_free(r->quant);
    dspark__config_free(r->doc);
    dspark__checkpoint_close(r->ckpt);
}

static dspark_status reader_open(reader *r, const char *path, dspark_error *err)
{
    dspark_status st;
    memset(r, 0, sizeof *r);
    if ((st = dspark__checkpoint_open(&r->ckpt, path, err)) != DSPARK_OK) return st;
    if ((st = dspark__config_read(&r->doc, path, err)) != DSPARK_OK) return st;
    if ((st = dspark__quant_config_read(&r->quant, path, err)) != DSPARK_OK) return st;
    return dspark__modules_make(&r->modules, r->ckpt, err);
}

/* A tensor that was copied has its dtype, its shape and its bytes. */
static dspark_status compare_copy(dspark__quantize_work *w, const dspark__qm *m,
                                  const dspark__qm_output *o, const reader *r, dspark_error *err)
{
    char name[DSPARK__QM_NAME_BYTES];
    const dspark_tensor *a = o->tensor, *b;
    dspark_status st = DSPARK_OK;
    dspark__quantize_tensor_name(name, m, o);
    b = dspark__checkpoint_find(r->ckpt, name);
    if (!b || b->dtype != o->dtype || b->rank != o->rank || b->n_bytes != a->n_bytes ||
        memcmp(b->shape, o->shape, o->rank * sizeof *o->shape) != 0)
        return dspark__fail(err, DSPARK_EINTERNAL, name, "reads back as another tensor");
    if ((st = dspark__checkpoint_verify(w->ckpt, a, err)) != DSPARK_OK) return st;
    for (uint64_t at = 0; st == DSPARK_OK && at < a->n_bytes; at += COPY_BYTES) {
        uint64_t n = a->n_bytes - at < COPY_BYTES ? a->n_bytes - at : COPY_BYTES;
        if (memcmp((const char *)a->data + at, (const char *)b->data + at, (size_t)n) != 0)
            return dspark__fail(err, DSPARK_EINTERNAL, name, "reads back as other bytes");
        dspark__checkpoint_drop(w->ckpt, a, at, n);
        dspark__checkpoint_drop(r->ckpt, b, at, n);
        if (m->kind == DSPARK__QM_COPY) st = dspark__quantize_work_step(w, n, name, err);
    }
    return st;
}

/* The weight that was encoded, through the scheme that detects it. */
static dspark_status compare_weight(dspark__quantize_work *w, const dspark__qm *m, const reader *r,
                                    dspark_quantize_report *report, dspark_error *err)
{
    const dspark__scheme *scheme;
    const dspark__file_module *file;
    dspark__module back;
    dspark__quant_rule rule;
    dspark__packing packing;
    char name[DSPARK__QM_NAME_BYTES];
    dspark_status st;
    size_t id;

    dspark__quantize_tensor_name(name, m, &m->outputs[0]);
    if (!dspark__checkpoint_find(r->ckpt, name))
        return dspark__fail(err, DSPARK_EINTERNAL, name, "was written and is not found");
    id = dspark__nametable_find(&r->modules.index, m->file->name);
    if (id == DSPARK__NAMETABLE_NONE)
        return dspark__fail(err, DSPARK_EINTERNAL, m->file->name, "was written and is not found");
    file = &r->modules.list[id];
    memset(&packing, 0, sizeof packing);
    if ((st = dspark__quantize_module(&back, file, err)) != DSPARK_OK) return st;
    st = dspark__quant_config_rule(r->quant, back.name, &rule, err);
    if (st == DSPARK_OK) st = dspark__scheme_detect(&scheme, &back, &rule, m->rows, m->k, err);
    if (st == DSPARK_OK) st = scheme->validate(&back, &rule, m->rows, m->k, &packing, err);
    if (st == DSPARK_OK)
        st = dspark__quantize_compare(w, m, &back, scheme, &rule, report, err);
    for (uint32_t i = 0; i < back.n_parts; i++)
        dspark__checkpoint_drop(r->ckpt, back.parts[i].tensor, 0, back.parts[i].tensor->n_bytes);
    return st;
}

static dspark_status compare_all(dspark__quantize_work *w, const dspark__quantize_plan *p,
                                 const dspark_quantize_opts *opts, const char *path,
                                 dspark_error *err)
{
    reader r;
    size_t n_tensors = 0;
    dspark_status st = reader_open(&r, path, err);
    for (size_t i = 0; st == DSPARK_OK && i < p->modules.n; i++) {
        const dspark__qm *m = &p->list[i];
        const dspark_format format = m->kind == DSPARK__QM_DENSE ? DSPARK_FORMAT_BF16 : opts->format;
        dspark_quantize_report report = {m->file->name, dspark__format_name(format), m->rows,
                                         m->k, m->bytes_before, m->bytes_after, 0, 0, 0};
        n_tensors += m->n_outputs;
        for (uint32_t o = 0; st == DSPARK_OK && o < m->n_outputs; o++)
            if (m->outputs[o].source == DSPARK__QM_TENSOR)
                st = compare_copy(w, m, &m->outputs[o], &r, err);
        if (st != DSPARK_OK || m->kind == DSPARK__QM_COPY) continue;
        st = compare_weight(w, m, &r, &report, err);
        if (st == DSPARK_OK && opts->report) opts->report(opts->report_user, &report);
    }
    if (st == DSPARK_OK && n_tensors != dspark__checkpoint_count(r.ckpt))
        st = dspark__fail(err, DSPARK_EINTERNAL, path, "%zu tensors were written, %zu read back",
                          n_tensors, dspark__checkpoint_count(r.ckpt));
    reader_close(&r);
    return st;
}

/* ------------------------------------------------------------------------------------------------
 * The whole
 * --------------------------------------------------------------------------------------------- */

dspark_status dspark__quantize(const char *ckpt, const char *out, const dspark_quantize_opts *opts,
                               dspark_error *err)
{
    dspark__quantize_plan p;
    dspark__quantize_work w;
    dspark__stage s;
    dspark_status st;

    memset(&w, 0, sizeof w);
    memset(&s, 0, sizeof s);
    st = dspark__quantize_plan_make(&p, ckpt, opts, err);
    if (st == DSPARK_OK) st = dspark__quantize_work_init(&w, &p, opts, err);
    if (st != DSPARK_OK) goto done;
    if ((st = dspark__stage_open(&s, out, ".quantize-", (size_t)p.n_shards + 3, err)) != DSPARK_OK)
        goto done;
    for (uint32_t i = 0; i < p.n_shards; i++)
        if ((st = write_shard(&w, &p, i, &s, err)) != DSPARK_OK) goto done;
    if ((st = write_texts(&p, opts, &s, err)) != DSPARK_OK) goto done;
    if ((st = compare_all(&w, &p, opts, s.tmp, err)) != DSPARK_OK) goto done;
    if (w.done < w.total) /* scales and odd bytes are not counted row by row */
        st = dspark__quantize_work_step(&w, w.total - w.done, out, err);
    if (st == DSPARK_OK) st = dspark__stage_publish(&s, err);
done:
    dspark__stage_close(&s, st != DSPARK_OK);
    dspark__quantize_work_free(&w);
    dspark__quantize_plan_free(&p);
    return st;
}
