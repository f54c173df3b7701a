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
#include "model/model_fill.h"
#include "quant/check.h"

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

static dspark_status take_arrival(void *user, const dspark__arrival *a, dspark_error *err)
{
    dspark_model *m = user;
    const dspark_config *c = &m->config;
    size_t place = m->parts & DSPARK_PART_BLOCK
                       ? dspark__block_place(c, a->target, a->index, a->shard)
                       : SIZE_MAX;
    if (place != SIZE_MAX)
        return dspark__module_add(&m->modules[count_places(c) + place], a->suffix, a->tensor, err);
    switch (a->target) {
    case DSPARK__T_CONTEXT_PROJ: return dspark__module_add(&m->modules[place_context_proj()], a->suffix, a->tensor, err);
    case DSPARK__T_CONTEXT_KV: return dspark__module_add(&m->modules[place_context_kv((uint32_t)a->shard)], a->suffix, a->tensor, err);
    case DSPARK__T_QKV_A:
        if (a->shard != 0) return DSPARK_OK;
        return dspark__module_add(&m->modules[place_q_a(c, a->index)], a->suffix, a->tensor, err);
    case DSPARK__T_FC_NORM:
        if (!c->fc_norm) return DSPARK_OK;
        return dspark__module_add(&m->modules[place_norm(c, a->target, a->index)], a->suffix, a->tensor, err);
    case DSPARK__T_CONTEXT_NORM:
    case DSPARK__T_KV_A_NORM: return dspark__module_add(&m->modules[place_norm(c, a->target, a->index)], a->suffix, a->tensor, err);
    default: return DSPARK_OK; /* the block path's weights */
    }
}

/* ---- filling ---- */

static dspark_status fill_norm(dspark__filler *f, dspark__target target, uint32_t index, uint64_t n,
                               const char *name, uint16_t *to, dspark_error *err)
{
    const dspark_model *m = f->model;
    return dspark__fill_vector(f, &m->modules[place_norm(&m->config, target, index)], "weight", name, n,
                               to, err);
}

static dspark_status fill_norms(dspark__filler *f, dspark_error *err)
{
    dspark_status st;
    dspark_model *m = f->model;
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
        if ((st = fill_norm(f, DSPARK__T_FC_NORM, t, c->tap_width, "fc_norm",
                            m->fc_norm + (size_t)t * c->tap_width, err)) != DSPARK_OK)
            return st;
    if ((st = fill_norm(f, DSPARK__T_CONTEXT_NORM, 0, c->hidden_size, "context_norm",
                        m->context_norm, err)) != DSPARK_OK)
        return st;
    for (uint32_t l = 0; l < c->n_layers; l++)
        if ((st = fill_norm(f, DSPARK__T_KV_A_NORM, l, c->kv_lora_rank, "kv_a_layernorm",
                            m->kv_a_norm + (size_t)l * c->kv_lora_rank, err)) != DSPARK_OK)
            return st;
    return DSPARK_OK;
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

/* What the directory holds is settled before any weight is read: family, config, exact roster. The config's files
 * are read once: all that is known of them is known of one state. */
static dspark_status open_files(dspark_model *m, dspark__config_doc **doc, const char *path,
                                dspark_error *err)
{
    dspark_status st;
    char *text = NULL, *modelopt = NULL;
    size_t n = 0, n_modelopt = 0;
    dspark__family_report report;
    if ((st = dspark__checkpoint_open(&m->ckpt, path, err)) != DSPARK_OK) return st;
    if ((st = dspark__config_text(&text, &n, path, err)) != DSPARK_OK) return st;
    st = dspark__config_modelopt_text(&modelopt, &n_modelopt, path, err);
    if (st == DSPARK_OK) st = dspark__family_detect(&report, text, n, m->ckpt, err);
    if (st == DSPARK_OK) st = dspark__family_gate(&report, path, err);
    if (st == DSPARK_OK) st = dspark__config_parse(doc, text, n, "config.json", err);
    if (st == DSPARK_OK)
        st = dspark__quant_config_parse(&m->quant, text, n, modelopt, n_modelopt, "config.json", err);
    if (st == DSPARK_OK) st = dspark__roster_check(m->ckpt, *doc, NULL, NULL, err);
    if (st == DSPARK_OK) st = dspark__quant_check(m->ckpt, *doc, m->quant, NULL, NULL, err);
    if (st == DSPARK_OK) m->config = (*doc)->config;
    if (st == DSPARK_OK) dspark__prepacked_config(m->config_digest, text, n, modelopt, n_modelopt);
    free(modelopt);
    free(text);
    return st;
}

/* ---- fingerprints ---- */

/* Everything that is filled from now on goes into *digest; unless a prepacked file's word is enough. */
static void begin_digest(dspark__filler *f, dspark__digest *digest, int trusted)
{
    static const char which[] = "dspark fingerprint 2"; /* another definition is another number */
    dspark__digest_init(digest);
    dspark__digest_update(digest, which, sizeof which);
    f->digest = trusted ? NULL : digest;
}

/* hex: what was filled since; with a prepacked file, what it was made of, and the same. */
static dspark_status end_digest(dspark__filler *f, const char *what, const char *recorded, char hex[33],
                                dspark_error *err)
{
    const int made = f->digest != NULL;
    if (made) dspark__digest_hex(f->digest, hex);
    else memcpy(hex, recorded, 33);
    f->digest = NULL;
    return made && f->prepacked ? dspark__prepacked_same(f->prepacked, what, recorded, hex, err) : DSPARK_OK;
}

static const dspark__prepacked_head *recorded_head(const dspark__filler *f)
{
    static const dspark__prepacked_head none;
    return f->prepacked ? dspark__prepacked_get_head(f->prepacked) : &none;
}

/* q_a has a digest only where a prepacked file is made or doubted. */
static dspark_status fill_q_a(dspark__filler *f, dspark_error *err)
{
    dspark_model *m = f->model;
    const dspark_config *c = &m->config;
    dspark__digest digest;
    char hex[33];
    begin_digest(f, &digest, f->trusted || (!f->packer && !f->prepacked));
    dspark_status st = dspark__fill_linear(f, &m->q_a, "q_a", c->hidden_size, c->n_layers, c->q_lora_rank,
                                           &m->modules[place_q_a(c, 0)], 1, err);
    if (st == DSPARK_OK) st = end_digest(f, "q_a_proj", recorded_head(f)->q_a, hex, err);
    if (st == DSPARK_OK && f->packer) memcpy(dspark__packer_head(f->packer)->q_a, hex, sizeof hex);
    return st;
}

/* Everything of the context path, in the order of its fingerprint. */
static dspark_status fill_context(dspark__filler *f, dspark_error *err)
{
    dspark_status st;
    dspark_model *m = f->model;
    const dspark_config *c = &m->config;
    dspark__digest digest;
    uint32_t taps_width = c->n_taps * c->tap_width, width = c->kv_lora_rank + c->qk_rope_head_dim;
    begin_digest(f, &digest, f->trusted);
    digest_config(&digest, c);
    if ((st = fill_norms(f, err)) != DSPARK_OK) return st;
    st = dspark__fill_linear(f, &m->context_proj, "context_proj", taps_width, 1, c->hidden_size,
                             dspark__model_context_proj(m), 1, err);
    if (st == DSPARK_OK)
        st = dspark__fill_linear(f, &m->context_kv, "context_kv", c->hidden_size, c->n_layers, width,
                                 dspark__model_context_kv(m, 0), 1, err);
    if (st != DSPARK_OK) return st;
    st = end_digest(f, "the context's weights", recorded_head(f)->context, m->fingerprint, err);
    if (st != DSPARK_OK) return st;
    if (f->opts->vllm_compat) dspark__merged_linear_vllm_compat(&m->context_kv);
    if (!(m->parts & DSPARK_PART_Q_A)) return DSPARK_OK;
    return fill_q_a(f, err);
}

/* Is a prepacked file's word enough for the block and for the LM head, wherever it comes from? A host's
 * matrix has no identity. */
static dspark_status trust_block(dspark__filler *f, const dspark__module *embed,
                                 const dspark__module *lm_head, int *trusted, dspark_error *err)
{
    char hex[33];
    const char *recorded = recorded_head(f)->target;
    *trusted = f->trusted && lm_head->n_parts && !recorded[0];
    if (!f->trusted || lm_head->n_parts || f->opts->lm_head) return DSPARK_OK;
    dspark_status st = dspark__borrow_identity(f, embed, lm_head, hex, err);
    *trusted = st == DSPARK_OK && hex[0] && strcmp(hex, recorded) == 0;
    return st;
}

/* Layers, heads, and the two tensors that are the target's. */
static dspark_status fill_block(dspark__filler *f, dspark_error *err)
{
    dspark_model *m = f->model;
    const dspark_config *c = &m->config;
    const dspark__module *block = m->modules + count_places(c);
    const dspark__module *embed = block + dspark__block_place(c, DSPARK__T_EMBED, 0, -1);
    const dspark__module *lm_head = block + dspark__block_place(c, DSPARK__T_LM_HEAD, 0, -1);
    dspark__digest digest;
    int trusted = 0;
    dspark_status st = f->prepacked ? trust_block(f, embed, lm_head, &trusted, err) : DSPARK_OK;
    if (st != DSPARK_OK) return st;
    begin_digest(f, &digest, trusted);
    st = dspark__block_fill(f, block, err);
    if (st == DSPARK_OK) st = dspark__borrow(f, embed, lm_head, err);
    if (st == DSPARK_OK)
        st = end_digest(f, "the block's weights or the LM head", recorded_head(f)->block,
                        m->block_fingerprint, err);
    f->digest = NULL;
    if (st == DSPARK_OK && f->packer)
        st = dspark__borrow_identity(f, embed, lm_head, dspark__packer_head(f->packer)->target, err);
    return st;
}

/* The prepacked file, and whether the checkpoint's files are still those that it was made of. */
static dspark_status open_prepacked(dspark__filler *f, dspark_error *err)
{
    dspark_model *m = f->model;
    char hex[33];
    if (!f->opts->prepacked) return DSPARK_OK;
    if (f->opts->vllm_compat)
        return dspark__fail(err, DSPARK_EINVAL, "vllm_compat", "changes packed weights: not with a prepacked "
                                                               "file");
    dspark_status st = dspark__prepacked_open(&m->prepacked, f->opts->prepacked, err);
    if (st == DSPARK_OK) st = dspark__prepacked_match(m->prepacked, m->parts, m->config_digest, err);
    if (st == DSPARK_OK) st = dspark__checkpoint_identity(m->ckpt, hex, NULL, err);
    if (st != DSPARK_OK) return st;
    f->prepacked = m->prepacked;
    f->trusted = !f->opts->prepacked_verify && strcmp(hex, recorded_head(f)->identity) == 0;
    return DSPARK_OK;
}

static dspark_status check_parts(dspark_model *m, const dspark_model_opts *opts, dspark_error *err)
{
    const uint32_t known = DSPARK_PART_CONTEXT | DSPARK_PART_Q_A | DSPARK_PART_BLOCK;
    m->parts = opts->parts ? opts->parts : DSPARK_PART_CONTEXT;
    if (m->parts & ~known)
        return dspark__fail(err, DSPARK_EINVAL, "parts", "unknown bits in 0x%x", m->parts);
    m->parts = m->parts & DSPARK_PART_BLOCK ? known : m->parts | DSPARK_PART_CONTEXT; /* always filled */
    return DSPARK_OK;
}

static uint64_t count_work(const dspark_model *m)
{
    const dspark_config *c = &m->config;
    uint64_t rows = c->kv_lora_rank + c->qk_rope_head_dim;
    if (m->parts & DSPARK_PART_Q_A) rows += c->q_lora_rank;
    uint64_t work = ((uint64_t)c->hidden_size * c->n_taps * c->tap_width +
                     (uint64_t)c->n_layers * rows * c->hidden_size) * 2;
    return m->parts & DSPARK_PART_BLOCK ? work + dspark__block_work(c) : work;
}

static dspark_status make_modules(dspark_model *m, dspark_error *err)
{
    const dspark_config *c = &m->config;
    m->n_modules = count_places(c);
    if (m->parts & DSPARK_PART_BLOCK) m->n_modules += dspark__block_places(c);
    m->modules = dspark__alloc(&m->allocator, m->n_modules * sizeof *m->modules, 64);
    if (!m->modules) return dspark__fail_nomem(err, "modules", m->n_modules * sizeof *m->modules);
    memset(m->modules, 0, m->n_modules * sizeof *m->modules);
    return dspark__weight_stream(m->ckpt, c, take_arrival, m, err);
}

static dspark_status open_model(dspark_model **out, const char *path, const dspark_model_opts *opts,
                                dspark__packer *packer, int no_embed, dspark_error *err)
{
    dspark_status st;
    dspark_allocator a = dspark__allocator_or_default(opts->allocator);
    dspark__config_doc *doc = NULL;
    dspark__threads *threads = NULL;
    *out = NULL;
    dspark_model *m = dspark__alloc(&a, sizeof *m, 64);
    if (!m) return dspark__fail_nomem(err, "model", sizeof *m);
    memset(m, 0, sizeof *m);
    m->allocator = a;
    if ((st = check_parts(m, opts, err)) != DSPARK_OK) goto fail;
    if ((st = open_files(m, &doc, path, err)) != DSPARK_OK) goto fail;
    if (doc->context_only && (m->parts & DSPARK_PART_BLOCK)) {
        st = dspark__fail(err, DSPARK_EMODEL, path,
                          "holds the tensors of context KV only (dspark_parts): it cannot draft");
        goto fail;
    }
    if ((st = dspark__rope_init(&m->rope, &m->config, err)) != DSPARK_OK) goto fail;
    if ((st = make_modules(m, err)) != DSPARK_OK) goto fail;
    dspark__filler f = {.model = m, .ckpt = m->ckpt, .quant = m->quant, .opts = opts,
                        .packer = packer, .no_embed = no_embed, .total = count_work(m)};
    if ((st = open_prepacked(&f, err)) != DSPARK_OK) goto fail;
    /* Nothing to pack and nothing to hash: no pool. A host's LM head is hashed in any case. */
    const uint32_t n_threads = f.prepacked && f.trusted && !opts->lm_head ? 1 : opts->n_threads;
    if ((st = dspark__threads_create(&threads, n_threads, NULL, &a, err)) != DSPARK_OK) goto fail;
    f.threads = threads;
    if ((st = fill_context(&f, err)) != DSPARK_OK) goto fail;
    if ((m->parts & DSPARK_PART_BLOCK) && (st = fill_block(&f, err)) != DSPARK_OK) goto fail;
    if (m->prepacked && (st = dspark__prepacked_end(m->prepacked, m->parts, err)) != DSPARK_OK) goto fail;
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

dspark_status dspark__model_open(dspark_model **out, const char *path,
                                 const dspark_model_opts *opts, dspark_error *err)
{
    return open_model(out, path, opts, NULL, 0, err);
}

dspark_status dspark__model_open_packing(dspark_model **out, const char *path,
                                         const dspark_model_opts *opts, dspark__packer *packer,
                                         dspark_error *err)
{
    return open_model(out, path, opts, packer, 1, err);
}

void dspark__model_close(dspark_model *m)
{
    if (!m) return;
    dspark_allocator a = m->allocator;
    dspark__block_free(m);
    dspark__merged_linear_free(&m->context_proj);
    dspark__merged_linear_free(&m->context_kv);
    dspark__merged_linear_free(&m->q_a);
    if (m->norms) dspark__free(&a, m->norms, m->norms_bytes);
    if (m->modules) dspark__free(&a, m->modules, m->n_modules * sizeof *m->modules);
    dspark__quant_config_free(m->quant);
    dspark__prepacked_close(m->prepacked);
    dspark__checkpoint_close(m->ckpt);
    dspark__free(&a, m, sizeof *m);
}

uint64_t dspark__model_resident_bytes(const dspark_model *m)
{
    return m->context_proj.bytes + m->context_kv.bytes + m->q_a.bytes + m->norms_bytes +
           dspark__block_bytes(m);
}
