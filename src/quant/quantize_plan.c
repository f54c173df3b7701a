/* See quantize_plan.h: opening the source, choosing modules by pattern, and the tensors of the output. */
#include "quant/quantize_plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "ckpt/dtype.h"
#include "ckpt/family.h"
#include "ckpt/names.h"
#include "ckpt/roster.h"
#include "quant/match.h"
#include "quant/quant_file.h"

/* ------------------------------------------------------------------------------------------------
 * Patterns
 * --------------------------------------------------------------------------------------------- */

typedef struct pattern {
    dspark__match match;
    const char *text;
    const char *option; /* "ignore" or "targets" */
    int used;
} pattern;

typedef struct patterns {
    pattern *list;
    size_t n, n_ignore; /* the first n_ignore ignore, the others target */
} patterns;

static void patterns_free(patterns *p)
{
    for (size_t i = 0; i < p->n; i++) dspark__match_free(&p->list[i].match);
    free(p->list);
    memset(p, 0, sizeof *p);
}

static dspark_status patterns_make(patterns *p, const dspark_quantize_opts *opts, dspark_error *err)
{
    size_t n = opts->n_ignore + opts->n_targets;

    memset(p, 0, sizeof *p);
    p->list = calloc(n + 1, sizeof *p->list);
    if (!p->list) return dspark__fail_nomem(err, "patterns", n * sizeof *p->list);
    p->n_ignore = opts->n_ignore;
    for (size_t i = 0; i < n; i++) {
        pattern *at = &p->list[i];
        const int ignore = i < opts->n_ignore;
        const char *text = ignore ? opts->ignore[i] : opts->targets[i - opts->n_ignore];
        dspark__match_kind kind = DSPARK__MATCH_EXACT;
        dspark_status st;
        at->option = ignore ? "ignore" : "targets";
        at->text = text;
        if (!text) return dspark__fail(err, DSPARK_EINVAL, at->option, "a pattern is NULL");
        if (strncmp(text, "re:", 3) == 0) {
            kind = DSPARK__MATCH_REGEX;
            text += 3;
        } else if (strpbrk(text, "*?[")) {
            kind = DSPARK__MATCH_GLOB;
        }
        st = dspark__match_compile(&at->match, kind, text, at->option, err);
        if (st != DSPARK_OK && st != DSPARK_ENOMEM) { /* an argument, not a file, is at fault */
            if (err) err->code = DSPARK_EINVAL;
            st = DSPARK_EINVAL;
        }
        if (st != DSPARK_OK) return st;
        p->n = i + 1;
    }
    return DSPARK_OK;
}

/* Does a pattern of [first, last) fit? All are tried, so that each one knows whether it is of use. A
 * name with "model." in front is tried without it too. */
static int patterns_fit(patterns *p, size_t first, size_t last, const char *name)
{
    const char *bare = strncmp(name, "model.", 6) == 0 ? name + 6 : name;
    int fits = 0;
    for (size_t i = first; i < last; i++) {
        if (!dspark__match_name(&p->list[i].match, name) &&
            !dspark__match_name(&p->list[i].match, bare))
            continue;
        p->list[i].used = 1;
        fits = 1;
    }
    return fits;
}

static dspark_status patterns_used(const patterns *p, dspark_error *err)
{
    for (size_t i = 0; i < p->n; i++)
        if (!p->list[i].used)
            return dspark__fail(err, DSPARK_EINVAL, p->list[i].option,
                                "\"%.200s\" fits no linear layer of the checkpoint",
                                p->list[i].text);
    return DSPARK_OK;
}

/* ------------------------------------------------------------------------------------------------
 * Modules
 * --------------------------------------------------------------------------------------------- */

/* What is not quantised unless a target says so. */
static int kept_by_default(dspark__target target)
{
    return target == DSPARK__T_KV_B || target == DSPARK__T_MARKOV_W2 ||
           target == DSPARK__T_MARKOV_GATE || target == DSPARK__T_MARKOV_JOINT ||
           target == DSPARK__T_CONFIDENCE;
}

static int is_table(dspark__target target)
{
    return target == DSPARK__T_EMBED || target == DSPARK__T_MARKOV_W1 ||
           target == DSPARK__T_LM_HEAD;
}

dspark_status dspark__quantize_module(dspark__module *out, const dspark__file_module *m,
                                      dspark_error *err)
{
    memset(out, 0, sizeof *out);
    if (strlen(m->name) >= sizeof out->name || m->n_parts > DSPARK__MODULE_PARTS ||
        m->n_parts > DSPARK__FILE_MODULE_PARTS)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, m->name,
                            "%u tensors in one module, or a name that is too long", m->n_parts);
    memcpy(out->name, m->name, strlen(m->name) + 1);
    out->n_parts = m->n_parts;
    for (uint32_t i = 0; i < m->n_parts; i++) {
        out->parts[i].suffix = m->parts[i].suffix;
        out->parts[i].tensor = m->parts[i].tensor;
    }
    return DSPARK_OK;
}

void dspark__quantize_tensor_name(char name[DSPARK__QM_NAME_BYTES], const dspark__qm *m,
                                  const dspark__qm_output *o)
{
    snprintf(name, DSPARK__QM_NAME_BYTES, "%s%s%s", m->file->name, *o->suffix ? "." : "", o->suffix);
}

/* The roster's entry of the module's weight, with its target; NULL when it has none. */
static const dspark__roster_entry *entry_of(const dspark__roster_entry *roster, size_t n,
                                            const dspark__file_module *m, const dspark_config *c,
                                            dspark__target *target)
{
    char name[256];
    dspark__name parsed;
    if (strlen(m->name) + sizeof ".weight" > sizeof name) return NULL;
    memcpy(name, m->name, strlen(m->name));
    memcpy(name + strlen(m->name), ".weight", sizeof ".weight");
    dspark__name_parse(&parsed, name, c);
    if (parsed.kind != DSPARK__NAME_MAPPED) return NULL;
    *target = parsed.arrivals[0].target;
    for (size_t i = 0; i < n; i++)
        if (strcmp(roster[i].name, parsed.canonical) == 0) return &roster[i];
    return NULL;
}

static dspark_status add_output(dspark__qm *m, dspark__qm_source source, const char *suffix,
                                dspark_dtype dtype, uint32_t rank, uint64_t d0, uint64_t d1,
                                const dspark_tensor *tensor, dspark_error *err)
{
    dspark__qm_output *o = &m->outputs[m->n_outputs];
    uint64_t n_elements;
    if (m->n_outputs == DSPARK__QM_OUTPUTS)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, m->file->name, "too many tensors in one module");
    o->source = source;
    o->suffix = suffix;
    o->tensor = tensor;
    o->dtype = dtype;
    o->rank = rank;
    if (tensor) {
        memcpy(o->shape, tensor->shape, sizeof o->shape);
        o->n_bytes = tensor->n_bytes;
    } else {
        o->shape[0] = d0;
        o->shape[1] = d1;
        if (dspark__shape_bytes(dtype, rank, o->shape, &n_elements, &o->n_bytes))
            return dspark__fail(err, DSPARK_EUNSUPPORTED, m->file->name, "larger than a file can be");
    }
    m->bytes_after += o->n_bytes;
    m->n_outputs++;
    return DSPARK_OK;
}

static dspark_status copy_output(dspark__qm *m, uint32_t part, dspark_error *err)
{
    const dspark_tensor *t = m->file->parts[part].tensor;
    return add_output(m, DSPARK__QM_TENSOR, m->file->parts[part].suffix, t->dtype, t->rank, 0, 0, t,
                      err);
}

/* What stays beside another form of the weight: all else belongs to the old one. */
static dspark_status keep_companions(dspark__qm *m, dspark_error *err)
{
    static const char *const kept[] = {"bias", "q_scale", "k_scale", "v_scale", "output_scale"};
    for (uint32_t i = 0; i < m->file->n_parts; i++) {
        for (size_t j = 0; j < sizeof kept / sizeof *kept; j++) {
            dspark_status st;
            if (strcmp(m->file->parts[i].suffix, kept[j]) != 0) continue;
            if ((st = copy_output(m, i, err)) != DSPARK_OK) return st;
        }
    }
    return DSPARK_OK;
}

static dspark_status plan_quantised(dspark__qm *m, const dspark_quantize_opts *opts,
                                    dspark_error *err)
{
    const dspark__encoder *e = &m->encoder;
    const int modelopt = opts->layout == DSPARK_LAYOUT_MODELOPT;
    const uint64_t units = dspark__ceil_div_u64(m->rows, e->unit_rows);
    dspark_status st;

    switch (opts->format) {
    case DSPARK_FORMAT_NVFP4:
    case DSPARK_FORMAT_MXFP4:
        st = add_output(m, DSPARK__QM_CODES, modelopt ? "weight" : "weight_packed", DSPARK_U8, 2,
                        m->rows, e->row_bytes, NULL, err);
        break;
    case DSPARK_FORMAT_INT4:
        st = add_output(m, DSPARK__QM_CODES, "weight_packed", DSPARK_I32, 2, m->rows,
                        e->row_bytes / 4, NULL, err);
        break;
    case DSPARK_FORMAT_INT8:
        st = add_output(m, DSPARK__QM_CODES, "weight", DSPARK_I8, 2, m->rows, m->k, NULL, err);
        break;
    default:
        st = add_output(m, DSPARK__QM_CODES, "weight", DSPARK_F8_E4M3, 2, m->rows, m->k, NULL, err);
    }
    if (st == DSPARK_OK && e->n_scales)
        st = add_output(m, DSPARK__QM_SCALES, "weight_scale", e->scale_dtype, 2, units, e->n_scales,
                        NULL, err);
    if (st == DSPARK_OK && e->has_global) {
        const char *suffix = opts->format == DSPARK_FORMAT_FP8_TENSOR ? "weight_scale"
                             : modelopt                               ? "weight_scale_2"
                                                                      : "weight_global_scale";
        st = add_output(m, DSPARK__QM_GLOBAL, suffix, DSPARK_F32, modelopt ? 0 : 1, 1, 0, NULL, err);
    }
    if (st == DSPARK_OK && opts->format == DSPARK_FORMAT_INT4)
        st = add_output(m, DSPARK__QM_SHAPE, "weight_shape", DSPARK_I64, 1, 2, 0, NULL, err);
    if (st == DSPARK_OK) st = keep_companions(m, err);
    return st;
}

static dspark_status plan_module(dspark__quantize_plan *p, dspark__qm *m,
                                 const dspark__roster_entry *entry, dspark__target target,
                                 const dspark_quantize_opts *opts, patterns *pats, dspark_error *err)
{
    const char *scheme_text;
    dspark_status st = DSPARK_OK;
    int ignored, targeted, quantise, quantised;

    for (uint32_t i = 0; i < m->file->n_parts && i < DSPARK__FILE_MODULE_PARTS; i++)
        m->bytes_before += m->file->parts[i].tensor->n_bytes;
    quantised = dspark__file_module_state(m->file, &scheme_text) == DSPARK__MODULE_QUANTISED;
    m->linear = entry && entry->rank == 2 && !is_table(target);
    ignored = m->linear && patterns_fit(pats, 0, pats->n_ignore, m->file->name);
    targeted = m->linear && patterns_fit(pats, pats->n_ignore, pats->n, m->file->name);
    quantise = m->linear && !ignored && (opts->n_targets ? targeted : !kept_by_default(target)) &&
               opts->format != DSPARK_FORMAT_BF16;
    m->kind = quantise ? DSPARK__QM_QUANTISE : quantised ? DSPARK__QM_DENSE : DSPARK__QM_COPY;
    if ((st = dspark__quantize_module(&m->module, m->file, err)) != DSPARK_OK) return st;
    if (m->kind == DSPARK__QM_COPY) {
        for (uint32_t i = 0; st == DSPARK_OK && i < m->file->n_parts; i++)
            st = copy_output(m, i, err);
        return st;
    }
    if (!entry || entry->rank != 2)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, m->file->name,
                            "it is %s, and only linear layers and tables can be", scheme_text);
    m->rows = entry->shape[0];
    m->k = entry->shape[1];
    if ((st = dspark__quant_config_rule(p->quant, m->file->name, &m->rule, err)) != DSPARK_OK)
        return st;
    st = dspark__scheme_detect(&m->scheme, &m->module, &m->rule, m->rows, m->k, err);
    if (st == DSPARK_OK) {
        dspark__packing unused;
        memset(&unused, 0, sizeof unused);
        st = m->scheme->validate(&m->module, &m->rule, m->rows, m->k, &unused, err);
    }
    if (st != DSPARK_OK) return st;
    m->weight_bytes = m->bytes_before;
    if (m->kind == DSPARK__QM_DENSE) {
        st = add_output(m, DSPARK__QM_BF16, "weight", DSPARK_BF16, 2, m->rows, m->k, NULL, err);
        return st == DSPARK_OK ? keep_companions(m, err) : st;
    }
    st = dspark__encoder_init(&m->encoder, opts->format, opts->scales, opts->layout,
                              opts->group_size, m->k, m->file->name, err);
    return st == DSPARK_OK ? plan_quantised(m, opts, err) : st;
}

/* ------------------------------------------------------------------------------------------------
 * Groups that do not fit
 * --------------------------------------------------------------------------------------------- */

/* Columns of what is to be quantised; the first module whose groups do not fit them. */
typedef struct columns {
    uint64_t divisor; /* the greatest of all */
    size_t n_misfits;
    dspark_error first;
} columns;

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Take `st` of planning m: a misfit is told when all modules are known. */
static dspark_status note_columns(columns *c, const dspark__qm *m, dspark_status st, const dspark_error *e,
                                  dspark_error *err)
{
    const int misfit = st == DSPARK_EUNSUPPORTED && m->kind == DSPARK__QM_QUANTISE && m->encoder.group &&
                       m->k % m->encoder.group != 0 && m->encoder.format != DSPARK_FORMAT_FP8_BLOCK;
    if (st != DSPARK_OK && !misfit) {
        if (err) *err = *e;
        return st;
    }
    if (m->kind == DSPARK__QM_QUANTISE) c->divisor = common_divisor(m->k, c->divisor);
    if (misfit && c->n_misfits++ == 0) c->first = *e;
    return DSPARK_OK;
}

/* What is so; what to do about it, each caller has its own options for. */
static dspark_status fail_columns(const columns *c, const dspark_quantize_opts *opts, dspark_error *err)
{
    uint64_t group = opts->format == DSPARK_FORMAT_INT4 ? opts->group_size ? opts->group_size : 128 : 0;
    char others[64] = "", size[80] = "";
    while (group && c->divisor % group != 0) group -= 8;
    if (c->n_misfits > 1)
        snprintf(others, sizeof others, ", nor are those of %zu more module%s", c->n_misfits - 1,
                 c->n_misfits == 2 ? "" : "s");
    if (group)
        snprintf(size, sizeof size, "; a group size of %llu fits all", (unsigned long long)group);
    return dspark__fail(err, DSPARK_EUNSUPPORTED, c->first.where, "%s%s%s", c->first.message, others, size);
}

/* ------------------------------------------------------------------------------------------------
 * The whole
 * --------------------------------------------------------------------------------------------- */

static dspark_status open_source(dspark__quantize_plan *p, dspark_error *err)
{
    dspark__family_report report;
    dspark_status st;
    if ((st = dspark__checkpoint_open(&p->ckpt, p->path, err)) != DSPARK_OK) return st;
    st = dspark__config_text(&p->config_text, &p->n_config_text, p->path, err);
    if (st != DSPARK_OK) return st;
    st = dspark__family_detect(&report, p->config_text, p->n_config_text, p->ckpt, err);
    if (st == DSPARK_OK) st = dspark__family_gate(&report, p->path, err);
    if (st == DSPARK_OK)
        st = dspark__config_parse(&p->doc, p->config_text, p->n_config_text, "config.json", err);
    if (st == DSPARK_OK) st = dspark__quant_config_read(&p->quant, p->path, err);
    if (st == DSPARK_OK) st = dspark__roster_check(p->ckpt, p->doc, NULL, NULL, err);
    if (st == DSPARK_OK) st = dspark__modules_make(&p->modules, p->ckpt, err);
    return st;
}

/* A module is written where its first tensor was; a file that holds no such tensor has no successor. */
static void number_shards(dspark__quantize_plan *p)
{
    for (size_t f = 0; f < dspark__checkpoint_file_count(p->ckpt); f++) {
        const char *file = dspark__checkpoint_file_name(p->ckpt, f);
        int used = 0;
        for (size_t i = 0; i < p->modules.n; i++) {
            if (strcmp(p->list[i].file->parts[0].tensor->file, file) != 0) continue;
            p->list[i].shard = p->n_shards;
            used = 1;
        }
        p->n_shards += (uint32_t)used;
    }
}

dspark_status dspark__quantize_plan_make(dspark__quantize_plan *p, const char *path,
                                         const dspark_quantize_opts *opts, dspark_error *err)
{
    dspark__roster_entry *roster = NULL, own_head;
    dspark__encoder probe;
    patterns pats = {NULL, 0, 0};
    columns cols = {0};
    dspark_error e;
    size_t n_roster = 0, n_quantised = 0;
    dspark_status st;

    memset(p, 0, sizeof *p);
    p->path = path;
    /* Options that cannot be right are told before the first file is opened. */
    if (opts->format == DSPARK_FORMAT_BF16)
        st = opts->scales || opts->layout || opts->group_size || opts->n_ignore || opts->n_targets
                 ? dspark__fail(err, DSPARK_EINVAL, "format",
                                "bf16 takes no scales, layout, group size, ignore or targets")
                 : DSPARK_OK;
    else
        st = dspark__encoder_init(&probe, opts->format, opts->scales, opts->layout,
                                  opts->group_size, opts->group_size ? opts->group_size : 1024,
                                  "options", err);
    if (st == DSPARK_OK) st = patterns_make(&pats, opts, err);
    if (st == DSPARK_OK) st = open_source(p, err);
    if (st != DSPARK_OK) goto done;
    st = dspark__roster_make(&roster, &n_roster, &p->doc->config, p->doc->context_only, err);
    if (st != DSPARK_OK) goto done;
    memset(&own_head, 0, sizeof own_head);
    own_head.rank = 2;
    own_head.shape[0] = p->doc->config.vocab_size;
    own_head.shape[1] = p->doc->config.hidden_size;
    p->list = calloc(p->modules.n + 1, sizeof *p->list);
    if (!p->list) {
        st = dspark__fail_nomem(err, "the plan", p->modules.n * sizeof *p->list);
        goto done;
    }
    for (size_t i = 0; i < p->modules.n; i++) {
        dspark__qm *m = &p->list[i];
        dspark__target target = DSPARK__T_COUNT;
        const dspark__roster_entry *entry;
        m->file = &p->modules.list[i];
        entry = entry_of(roster, n_roster, m->file, &p->doc->config, &target);
        if (!entry && target == DSPARK__T_LM_HEAD) entry = &own_head; /* no roster has it */
        dspark__error_clear(&e);
        st = note_columns(&cols, m, plan_module(p, m, entry, target, opts, &pats, &e), &e, err);
        if (st != DSPARK_OK) goto done;
        n_quantised += m->kind == DSPARK__QM_QUANTISE ||
                       (m->kind == DSPARK__QM_DENSE && opts->format == DSPARK_FORMAT_BF16);
        if (!dspark__add_u64(p->total_bytes, m->bytes_after, &p->total_bytes)) {
            st = dspark__fail(err, DSPARK_EUNSUPPORTED, path, "larger than a file can be");
            goto done;
        }
        /* Passes: the tensor's scale, the codes, the comparison; or writing and comparing. */
        p->work_bytes += m->bytes_before * 2;
        if (m->kind == DSPARK__QM_QUANTISE && m->encoder.has_global) p->work_bytes += m->bytes_before;
    }
    if ((st = patterns_used(&pats, err)) != DSPARK_OK) goto done;
    if (cols.n_misfits) {
        st = fail_columns(&cols, opts, err);
        goto done;
    }
    if (n_quantised == 0) {
        st = dspark__fail(err, DSPARK_EINVAL, path, opts->format == DSPARK_FORMAT_BF16 ? "nothing in it is quantised"
                                                                                 : "nothing is left to be quantised");
        goto done;
    }
    number_shards(p);
done:
    free(roster);
    patterns_free(&pats);
    return st;
}

void dspark__quantize_plan_free(dspark__quantize_plan *p)
{
    for (size_t i = 0; p->list && i < p->modules.n; i++) {
        free(p->list[i].scales);
        free(p->list[i].row_hashes);
    }
    free(p->list);
    dspark__modules_free(&p->modules);
    dspark__quant_config_free(p->quant);
    dspark__config_free(p->doc);
    free(p->config_text);
    dspark__checkpoint_close(p->ckpt);
    memset(p, 0, sizeof *p);
}
