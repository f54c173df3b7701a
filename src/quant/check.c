/* The linears of a draft, one by one: gather the tensors of each, find rule and scheme, validate.
 */
#include "quant/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/names.h"
#include "ckpt/nametable.h"
#include "quant/parts.h"

/* ---- gathering ------------------------------------------------------------------------------- */

static int same_shape(const dspark_tensor *t, uint64_t rows, uint64_t k)
{
    return t->rank == 2 && t->shape[0] == rows && t->shape[1] == k;
}

/* A tensor of a module: into its first free place. What arrives twice (two dialects, with and
 * without "model.") is the roster check's to name. */
static void add_part(dspark__quant_module *q, const dspark__arrival *a, const dspark_tensor *t)
{
    dspark__module *m = &q->module;
    size_t n = strlen(t->name), s = strlen(a->suffix);

    if (n <= s || n - s - 1 >= sizeof m->name || m->n_parts == DSPARK__MODULE_PARTS) {
        q->status = dspark__part_fail(&q->why, DSPARK_EMODEL, t,
                                      "its module has more than %d tensors, or too long a name",
                                      DSPARK__MODULE_PARTS);
        return;
    }
    if (dspark__module_part(m, a->suffix)) return;
    if (m->n_parts == 0) {
        memcpy(m->name, t->name, n - s - 1);
        m->name[n - s - 1] = '\0';
    }
    m->parts[m->n_parts].suffix = a->suffix;
    m->parts[m->n_parts++].tensor = t;
}

static dspark_status gather(dspark__quant_modules *out, const dspark_checkpoint *ckpt,
                            const dspark_config *c, dspark_error *err)
{
    dspark_status st = DSPARK_ENOMEM;
    dspark__nametable index;
    size_t count = dspark__checkpoint_count(ckpt), id;

    memset(&index, 0, sizeof index);
    for (size_t i = 0; i < out->n; i++)
        if (dspark__nametable_put(&index, out->list[i].name, &id) < 0) goto done;
    for (size_t i = 0; i < count; i++) {
        const dspark_tensor *t = dspark__checkpoint_at(ckpt, i);
        dspark__name n;

        dspark__name_parse(&n, t->name, c);
        if (n.kind != DSPARK__NAME_MAPPED) continue;
        n.canonical[strlen(n.canonical) - strlen(n.arrivals[0].suffix) - 1] = '\0';
        id = dspark__nametable_find(&index, n.canonical);
        if (id != DSPARK__NAMETABLE_NONE) add_part(&out->list[id], &n.arrivals[0], t);
    }
    st = DSPARK_OK;
done:
    dspark__nametable_free(&index);
    return st == DSPARK_OK ? st
                           : dspark__fail_nomem(err, "index of linears", out->n * sizeof(char *));
}

/* ---- judging --------------------------------------------------------------------------------- */

/* Something that is not about this module ends the whole look. */
static int is_fatal(dspark_status st)
{
    return st == DSPARK_ENOMEM || st == DSPARK_EIO || st == DSPARK_EINTERNAL;
}

static dspark_status judge(dspark__quant_module *q, const dspark_checkpoint *ckpt,
                           const dspark__quant_config *config, dspark_error *err)
{
    const dspark__module *m = &q->module;
    const dspark_tensor *weight = dspark__module_part(m, "weight");
    const dspark__scheme *scheme;
    dspark_status st = q->status;

    if (m->n_parts == 0 || st != DSPARK_OK) return DSPARK_OK;
    /* a plain BF16 weight of a wrong shape, or a bias alone, is named by the roster check */
    if (weight && weight->dtype == DSPARK_BF16 && !same_shape(weight, q->rows, q->k))
        return DSPARK_OK;
    if (m->n_parts == 1 && !strcmp(m->parts[0].suffix, "bias")) return DSPARK_OK;
    for (uint32_t i = 0; i < m->n_parts; i++)
        if ((st = dspark__checkpoint_verify(ckpt, m->parts[i].tensor, err)) != DSPARK_OK) return st;
    st = dspark__quant_config_rule(config, m->name, &q->rule, &q->why);
    if (st == DSPARK_OK) st = dspark__scheme_detect(&scheme, m, &q->rule, q->rows, q->k, &q->why);
    if (st == DSPARK_OK) st = scheme->validate(m, &q->rule, q->rows, q->k, &q->packing, &q->why);
    q->status = st;
    if (st == DSPARK_OK)
        q->scheme = scheme;
    else if (is_fatal(st) && err)
        *err = q->why;
    return is_fatal(st) ? st : DSPARK_OK;
}

dspark_status dspark__quant_modules_make(dspark__quant_modules *out, const dspark_checkpoint *ckpt,
                                         const dspark__config_doc *doc,
                                         const dspark__quant_config *q, dspark_error *err)
{
    dspark__roster_entry *roster;
    size_t n;
    dspark_status st;

    memset(out, 0, sizeof *out);
    st = dspark__roster_make(&roster, &n, &doc->config, doc->context_only, err);
    if (st != DSPARK_OK) return st;
    out->list = calloc(n + 1, sizeof *out->list);
    if (!out->list) {
        st = dspark__fail_nomem(err, "linears", n * sizeof *out->list);
        goto fail;
    }
    for (size_t i = 0; i < n; i++) {
        dspark__quant_module *e = &out->list[out->n];
        if (!roster[i].linear) continue;
        snprintf(e->name, sizeof e->name, "%.*s", (int)(strlen(roster[i].name) - strlen(".weight")),
                 roster[i].name);
        e->rows = roster[i].shape[0];
        e->k = roster[i].shape[1];
        out->n++;
    }
    if (!doc->context_only) { /* no config demands it: a draft may bring its own */
        dspark__quant_module *e = &out->list[out->n++];
        snprintf(e->name, sizeof e->name, "lm_head");
        e->rows = doc->config.vocab_size;
        e->k = doc->config.hidden_size;
    }
    if ((st = gather(out, ckpt, &doc->config, err)) != DSPARK_OK) goto fail;
    for (size_t i = 0; i < out->n; i++)
        if ((st = judge(&out->list[i], ckpt, q, err)) != DSPARK_OK) goto fail;
    free(roster);
    return DSPARK_OK;
fail:
    free(roster);
    dspark__quant_modules_free(out);
    return st;
}

void dspark__quant_modules_free(dspark__quant_modules *m)
{
    free(m->list);
    memset(m, 0, sizeof *m);
}

const dspark__quant_module *dspark__quant_modules_find(const dspark__quant_modules *m,
                                                       const char *name)
{
    for (size_t i = 0; i < m->n; i++)
        if (!strcmp(m->list[i].name, name)) return &m->list[i];
    return NULL;
}

/* ---- telling --------------------------------------------------------------------------------- */

typedef struct teller {
    void (*problem)(void *user, dspark_status kind, const char *tensor, const char *text);
    void *user;
    size_t n;
    dspark_error first[2]; /* broken, not served */
} teller;

static void tell(teller *t, const char *tensor, const dspark_error *why)
{
    int slot = why->code == DSPARK_EUNSUPPORTED;

    t->n++;
    if (t->first[slot].code == DSPARK_OK) t->first[slot] = *why;
    if (t->problem)
        t->problem(t->user, slot ? DSPARK_EUNSUPPORTED : DSPARK_EMODEL, tensor, why->message);
}

/* The tensor that `why` is about; else a tensor that stands for the module. */
static const char *subject(const dspark__quant_module *q)
{
    size_t n = strlen(q->why.where);
    const dspark__module *m = &q->module;

    for (uint32_t i = 0; i < m->n_parts; i++) {
        size_t length = strlen(m->parts[i].tensor->name);
        if (length <= n && !strcmp(q->why.where + n - length, m->parts[i].tensor->name))
            return m->parts[i].tensor->name;
    }
    const dspark_tensor *t = dspark__module_part(m, "weight");
    return t ? t->name : m->n_parts ? m->parts[0].tensor->name : q->name;
}

/* layers.N.self_attn.k_scale and the like belong to no linear. */
static dspark_status check_cache_scales(teller *t, const dspark_checkpoint *ckpt,
                                        const dspark_config *c, dspark_error *err)
{
    size_t count = dspark__checkpoint_count(ckpt);

    for (size_t i = 0; i < count; i++) {
        const dspark_tensor *scale = dspark__checkpoint_at(ckpt, i);
        size_t length = strlen(scale->name);
        dspark_error why;
        dspark__name n;
        dspark_status st;

        if (length < 6 || strcmp(scale->name + length - 6, "_scale") != 0) continue;
        dspark__name_parse(&n, scale->name, c);
        if (n.kind != DSPARK__NAME_IGNORED) continue;
        if ((st = dspark__checkpoint_verify(ckpt, scale, err)) != DSPARK_OK) return st;
        if (dspark__scales_check(scale, 1, 0, &why) != DSPARK_OK) tell(t, scale->name, &why);
    }
    return DSPARK_OK;
}

dspark_status dspark__quant_check(const dspark_checkpoint *ckpt, const dspark__config_doc *doc,
                                  const dspark__quant_config *q,
                                  void (*problem)(void *user, dspark_status kind,
                                                  const char *tensor, const char *text),
                                  void *user, dspark_error *err)
{
    dspark__quant_modules modules;
    teller t = {.problem = problem, .user = user};
    dspark_status st = dspark__quant_modules_make(&modules, ckpt, doc, q, err);

    if (st != DSPARK_OK) return st;
    for (size_t i = 0; i < modules.n; i++)
        if (modules.list[i].status != DSPARK_OK)
            tell(&t, subject(&modules.list[i]), &modules.list[i].why);
    st = check_cache_scales(&t, ckpt, &doc->config, err);
    dspark__quant_modules_free(&modules);
    if (st != DSPARK_OK || t.n == 0) return st;
    const dspark_error *first = &t.first[t.first[0].code == DSPARK_OK];
    char tail[64] = "";
    if (t.n > 1) snprintf(tail, sizeof tail, " (%zu more problem%s)", t.n - 1, t.n == 2 ? "" : "s");
    return dspark__fail(err, first->code, first->where, "%s%s", first->message, tail);
}
