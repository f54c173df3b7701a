/* Opening a drafter: config, exact roster, then the weight stream fills merged linears and norms.
 * Everything that arrives is ticked off; what never arrived is an error, not memory. */
#include "model/model.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/numfmt.h"
#include "base/status.h"
#include "ckpt/dtype.h"
#include "ckpt/family.h"
#include "ckpt/names.h"
#include "ckpt/roster.h"
#include "quant/check.h"
#include "quant/quant_file.h"

/* Places in model->modules: one for each module that the context path takes. */
static size_t place_context_proj(void)
{
    return 0;
}

static size_t place_context_kv(uint32_t layer)
{
    return 1 + (size_t)layer;
}

static size_t place_q_a(const dspark_config *c, uint32_t layer)
{
    return 1 + (size_t)c->n_layers + layer;
}

static size_t place_norm(const dspark_config *c, dspark__target target, uint32_t index)
{
    size_t first = 1 + 2 * (size_t)c->n_layers;
    if (target == DSPARK__T_CONTEXT_NORM) return first;
    if (target == DSPARK__T_KV_A_NORM) return first + 1 + index;
    return first + 1 + c->n_layers + index; /* fc_norm */
}

static size_t count_places(const dspark_config *c)
{
    return 2 + 3 * (size_t)c->n_layers + (c->fc_norm ? c->n_taps : 0);
}

const dspark__module *dspark__model_context_proj(const dspark_model *m)
{
    return &m->modules[place_context_proj()];
}

const dspark__module *dspark__model_context_kv(const dspark_model *m, uint32_t layer)
{
    return &m->modules[place_context_kv(layer)];
}

/* ---- the weight stream's visitor: sort arrivals into modules ---- */

static dspark_status add_part(dspark__module *module, const dspark__arrival *a, dspark_error *err)
{
    const char *name = a->tensor->name;
    size_t n = strlen(name), s = strlen(a->suffix);
    if (module->n_parts == DSPARK__MODULE_PARTS || n <= s || n - s - 1 >= sizeof module->name)
        return dspark__fail(err, DSPARK_EMODEL, name, "module has too many tensors or a name too "
                                                      "long");
    if (dspark__module_part(module, a->suffix))
        return dspark__fail(err, DSPARK_EMODEL, name, "%s arrived twice for one module", a->suffix);
    if (module->n_parts == 0) {
        memcpy(module->name, name, n - s - 1);
        module->name[n - s - 1] = 0;
    }
    module->parts[module->n_parts].suffix = a->suffix;
    module->parts[module->n_parts].tensor = a->tensor;
    module->n_parts++;
    return DSPARK_OK;
}

static dspark_status take_arrival(void *user, const dspark__arrival *a, dspark_error *err)
{
    dspark_model *m = user;
    const dspark_config *c = &m->config;
    switch (a->target) {
    case DSPARK__T_CONTEXT_PROJ: return add_part(&m->modules[place_context_proj()], a, err);
    case DSPARK__T_CONTEXT_KV: return add_part(&m->modules[place_context_kv((uint32_t)a->shard)], a, err);
    case DSPARK__T_QKV_A:
        if (a->shard != 0) return DSPARK_OK;
        return add_part(&m->modules[place_q_a(c, a->index)], a, err);
    case DSPARK__T_FC_NORM:
        if (!c->fc_norm) return DSPARK_OK;
        return add_part(&m->modules[place_norm(c, a->target, a->index)], a, err);
    case DSPARK__T_CONTEXT_NORM:
    case DSPARK__T_KV_A_NORM: return add_part(&m->modules[place_norm(c, a->target, a->index)], a, err);
    default: return DSPARK_OK; /* the block path's weights */
    }
}

/* ---- filling ---- */

typedef struct fill_state {
    const dspark_model_opts *opts;
    uint64_t done, total;
} fill_state;

static int report_step(void *user, uint64_t bytes)
{
    fill_state *f = user;
    f->done += bytes;
    return f->opts->progress ? f->opts->progress(f->opts->progress_user, f->done, f->total) : 0;
}

static void digest_tensor(dspark__digest *d, const char *name, uint64_t rows, uint64_t k)
{
    uint64_t shape[2] = {rows, k};
    dspark__digest_update(d, name, strlen(name) + 1);
    dspark__digest_update(d, shape, sizeof shape);
}

static dspark_status fill_norm(dspark_model *m, dspark__target target, uint32_t index, uint64_t n,
                               const char *name, uint16_t *to, dspark__digest *d, dspark_error *err)
{
    dspark_status st;
    const dspark__module *module = &m->modules[place_norm(&m->config, target, index)];
    const dspark_tensor *t = dspark__module_part(module, "weight");
    if (!t || module->n_parts != 1)
        return dspark__fail(err, DSPARK_EMODEL, name, "expected one tensor \"weight\", found %u parts",
                            module->n_parts);
    if (t->dtype != DSPARK_BF16 || t->rank != 1 || t->shape[0] != n)
        return dspark__fail(err, DSPARK_EMODEL, t->name, "expected BF16 [%llu], found %s of rank %u",
                            (unsigned long long)n, dspark__dtype_name(t->dtype), t->rank);
    if ((st = dspark__checkpoint_verify(m->ckpt, t, err)) != DSPARK_OK) return st;
    memcpy(to, t->data, n * 2);
    for (uint64_t i = 0; i < n; i++)
        if ((to[i] & 0x7f80u) == 0x7f80u)
            return dspark__fail(err, DSPARK_ENONFINITE, t->name, "element %llu is NaN or infinite",
                                (unsigned long long)i);
    digest_tensor(d, name, n, 1);
    dspark__digest_update(d, to, n * 2);
    return DSPARK_OK;
}

static dspark_status fill_norms(dspark_model *m, dspark__digest *d, dspark_error *err)
{
    dspark_status st;
    const dspark_config *c = &m->config;
    size_t fc = c->fc_norm ? (size_t)c->n_taps * c->tap_width : 0;
    size_t kv = (size_t)c->n_layers * c->kv_lora_rank;
    m->norms_bytes = (fc + c->hidden_size + kv) * 2;
    m->norms = dspark__alloc(&m->allocator, m->norms_bytes, 64);
    if (!m->norms) return dspark__fail_nomem(err, "norm weights", m->norms_bytes);
    m->fc_norm = fc ? m->norms : NULL;
    m->context_norm = m->norms + fc;
    m->kv_a_norm = m->context_norm + c->hidden_size;
    for (uint32_t t = 0; c->fc_norm && t < c->n_taps; t++)
        if ((st = fill_norm(m, DSPARK__T_FC_NORM, t, c->tap_width, "fc_norm",
                            m->fc_norm + (size_t)t * c->tap_width, d, err)) != DSPARK_OK)
            return st;
    if ((st = fill_norm(m, DSPARK__T_CONTEXT_NORM, 0, c->hidden_size, "context_norm",
                        m->context_norm, d, err)) != DSPARK_OK)
        return st;
    for (uint32_t l = 0; l < c->n_layers; l++)
        if ((st = fill_norm(m, DSPARK__T_KV_A_NORM, l, c->kv_lora_rank, "kv_a_layernorm",
                            m->kv_a_norm + (size_t)l * c->kv_lora_rank, d, err)) != DSPARK_OK)
            return st;
    return DSPARK_OK;
}

/* n_shards equal shards named `name`; modules start at place first. */
static dspark_status fill_linear(dspark_model *m, dspark__merged_linear *ml, const char *name,
                                 uint32_t k, uint32_t n_shards, uint32_t rows_each, size_t first,
                                 dspark__threads *threads, dspark__digest *digest, fill_state *f,
                                 dspark_error *err)
{
    dspark_status st;
    uint32_t rows[DSPARK_MAX_LAYERS] = {0};
    for (uint32_t s = 0; s < n_shards; s++) rows[s] = rows_each;
    if ((st = dspark__merged_linear_init(ml, name, k, n_shards, rows, &m->allocator, err)) != DSPARK_OK)
        return st;
    for (uint32_t s = 0; s < n_shards; s++) {
        if (digest) digest_tensor(digest, name, rows_each, k);
        if (m->modules[first + s].n_parts == 0) continue; /* _complete names it */
        dspark__quant_rule rule;
        dspark__fill fill = {m->ckpt, &m->modules[first + s], &rule, threads, digest, report_step, f};
        st = dspark__quant_config_rule(m->quant, fill.module->name, &rule, err);
        if (st == DSPARK_OK) st = dspark__merged_linear_fill(ml, s, &fill, err);
        if (st != DSPARK_OK) return st;
    }
    return dspark__merged_linear_complete(ml, err);
}

static void digest_config(dspark__digest *d, const dspark_config *c)
{
    /* Field by field: padding and host layout must not reach the digest. */
    uint64_t ints[] = {c->hidden_size, c->n_layers, c->kv_lora_rank, c->qk_rope_head_dim,
                       c->n_taps, c->tap_width, (uint64_t)(c->fc_norm != 0),
                       (uint64_t)c->rope_type, c->rope_original_max_positions};
    double reals[] = {c->rms_norm_eps, c->rope_theta, c->rope_factor, c->rope_beta_fast,
                      c->rope_beta_slow, c->rope_mscale, c->rope_mscale_all_dim,
                      c->rope_extrapolation_factor, c->rope_attn_factor};
    dspark__digest_update(d, ints, sizeof ints);
    dspark__digest_update(d, reals, c->rope_type == DSPARK_ROPE_YARN ? sizeof reals
                                                                     : 2 * sizeof reals[0]);
    dspark__digest_update(d, c->tap_layers, c->n_taps * sizeof c->tap_layers[0]);
}

/* What the directory holds is settled before any weight is read: family, config, exact roster. */
static dspark_status open_files(dspark_model *m, dspark__config_doc **doc, const char *path,
                                dspark_error *err)
{
    dspark_status st;
    char *text = NULL;
    size_t n = 0;
    dspark__family_report report;
    if ((st = dspark__checkpoint_open(&m->ckpt, path, err)) != DSPARK_OK) return st;
    if ((st = dspark__config_text(&text, &n, path, err)) != DSPARK_OK) return st;
    st = dspark__family_detect(&report, text, n, m->ckpt, err);
    if (st == DSPARK_OK) st = dspark__family_gate(&report, path, err);
    if (st == DSPARK_OK) st = dspark__config_parse(doc, text, n, path, err);
    if (st == DSPARK_OK) st = dspark__quant_config_read(&m->quant, path, err);
    if (st == DSPARK_OK) st = dspark__roster_check(m->ckpt, *doc, NULL, NULL, err);
    if (st == DSPARK_OK) st = dspark__quant_check(m->ckpt, *doc, m->quant, NULL, NULL, err);
    if (st == DSPARK_OK) m->config = (*doc)->config;
    free(text);
    return st;
}

dspark_status dspark__model_open(dspark_model **out, const char *path,
                                 const dspark_model_opts *opts, dspark_error *err)
{
    dspark_status st = DSPARK_ENOMEM;
    dspark_allocator a = dspark__allocator_or_default(opts->allocator);
    dspark__config_doc *doc = NULL;
    dspark__threads *threads = NULL;
    *out = NULL;
    dspark_model *m = dspark__alloc(&a, sizeof *m, 64);
    if (!m) return dspark__fail_nomem(err, "model", sizeof *m);
    memset(m, 0, sizeof *m);
    m->allocator = a;
    m->parts = opts->parts ? opts->parts : DSPARK_PART_CONTEXT;
    if (m->parts & ~(DSPARK_PART_CONTEXT | DSPARK_PART_Q_A)) {
        st = dspark__fail(err, DSPARK_EINVAL, "parts", "unknown bits in 0x%x", m->parts);
        goto fail;
    }
    if ((st = open_files(m, &doc, path, err)) != DSPARK_OK) goto fail;
    const dspark_config *c = &m->config;
    if ((st = dspark__rope_init(&m->rope, c, err)) != DSPARK_OK) goto fail;

    m->n_modules = count_places(c);
    m->modules = dspark__alloc(&a, m->n_modules * sizeof *m->modules, 64);
    if (!m->modules) {
        st = dspark__fail_nomem(err, "modules", m->n_modules * sizeof *m->modules);
        goto fail;
    }
    memset(m->modules, 0, m->n_modules * sizeof *m->modules);
    if ((st = dspark__weight_stream(m->ckpt, c, take_arrival, m, err)) != DSPARK_OK) goto fail;
    if ((st = dspark__threads_create(&threads, opts->n_threads, NULL, &a, err)) != DSPARK_OK) goto fail;

    dspark__digest digest;
    dspark__digest_init(&digest);
    digest_config(&digest, c);
    uint32_t taps_width = c->n_taps * c->tap_width, width = c->kv_lora_rank + c->qk_rope_head_dim;
    int q = (m->parts & DSPARK_PART_Q_A) != 0;
    fill_state f = {opts, 0, 0};
    f.total = ((uint64_t)c->hidden_size * taps_width +
               (uint64_t)c->n_layers * (width + (q ? c->q_lora_rank : 0)) * c->hidden_size) * 2;
    if ((st = fill_norms(m, &digest, err)) != DSPARK_OK) goto fail;
    if ((st = fill_linear(m, &m->context_proj, "context_proj", taps_width, 1, c->hidden_size,
                          place_context_proj(), threads, &digest, &f, err)) != DSPARK_OK)
        goto fail;
    if ((st = fill_linear(m, &m->context_kv, "context_kv", c->hidden_size, c->n_layers, width,
                          place_context_kv(0), threads, &digest, &f, err)) != DSPARK_OK)
        goto fail;
    dspark__digest_hex(&digest, m->fingerprint);
    if (opts->vllm_compat) dspark__merged_linear_vllm_compat(&m->context_kv);
    if (q && (st = fill_linear(m, &m->q_a, "q_a", c->hidden_size, c->n_layers, c->q_lora_rank,
                               place_q_a(c, 0), threads, NULL, &f, err)) != DSPARK_OK)
        goto fail;
    dspark__threads_free(threads);
    dspark__config_free(doc);
    *out = m;
    return DSPARK_OK;
fail:
    dspark__threads_free(threads);
    dspark__config_free(doc);
    dspark__model_close(m);
    return st;
}

void dspark__model_close(dspark_model *m)
{
    if (!m) return;
    dspark_allocator a = m->allocator;
    dspark__merged_linear_free(&m->context_proj);
    dspark__merged_linear_free(&m->context_kv);
    dspark__merged_linear_free(&m->q_a);
    if (m->norms) dspark__free(&a, m->norms, m->norms_bytes);
    if (m->modules) dspark__free(&a, m->modules, m->n_modules * sizeof *m->modules);
    dspark__quant_config_free(m->quant);
    dspark__checkpoint_close(m->ckpt);
    dspark__free(&a, m, sizeof *m);
}

uint64_t dspark__model_resident_bytes(const dspark_model *m)
{
    return m->context_proj.bytes + m->context_kv.bytes + m->q_a.bytes + m->norms_bytes;
}
