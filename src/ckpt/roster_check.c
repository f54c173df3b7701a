/* The tick-off: every tensor of a file against the roster of a config. Counts all problems,
 * names the first, and sorts what is broken from what is merely not served. */
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "ckpt/dtype.h"
#include "ckpt/modules.h"
#include "ckpt/names.h"
#include "ckpt/nametable.h"
#include "ckpt/roster.h"

#define HINTS        8   /* names that get a hint: the search is quadratic */
#define HINT_FOREIGN 256 /* foreign tensors that a missing name is compared with */

typedef struct checker {
    const dspark_checkpoint *ckpt;
    const dspark__config_doc *doc;
    dspark__roster_entry *roster;
    size_t n_roster;
    const dspark_tensor **found; /* [n_roster] the weight or bias that ticked the entry */
    size_t *carrier;             /* [n_roster] 1 + number of any tensor of the entry's module */
    dspark__nametable index;
    dspark__modules modules;
    const dspark_tensor **foreign; /* [n_foreign], and why in the name */
    size_t n_foreign;
    unsigned n_hints;

    void (*problem)(void *user, dspark_status kind, const char *tensor, const char *text);
    void *user;
    size_t n_broken, n_unserved;
    char where[2][256], text[2][400]; /* the first broken one, the first unserved one */
} checker;

static void report(checker *k, dspark_status kind, const char *file, const char *tensor,
                   const char *fmt, ...) DSPARK__PRINTF(5, 6);

static void report(checker *k, dspark_status kind, const char *file, const char *tensor,
                   const char *fmt, ...)
{
    int slot = kind == DSPARK_EUNSUPPORTED;
    size_t *count = slot ? &k->n_unserved : &k->n_broken;
    char text[400];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if ((*count)++ == 0) {
        snprintf(k->where[slot], sizeof k->where[slot], "%.80s%s%.160s", file ? file : "",
                 file ? ": " : "", tensor);
        memcpy(k->text[slot], text, sizeof text);
    }
    if (k->problem) k->problem(k->user, kind, tensor, text);
}

static size_t find_entry(const checker *k, const char *name)
{
    return dspark__nametable_find(&k->index, name);
}

static int is_plain(const dspark__name *n)
{
    return !strcmp(n->arrivals[0].suffix, "weight") || !strcmp(n->arrivals[0].suffix, "bias");
}

/* The entry of the weight of n's module. */
static size_t find_weight_entry(const checker *k, const dspark__name *n)
{
    char name[DSPARK__NAME_MAX + 8];
    size_t length = strlen(n->canonical) - strlen(n->arrivals[0].suffix);

    snprintf(name, sizeof name, "%.*sweight", (int)length, n->canonical);
    return find_entry(k, name);
}

/* ---- beside the roster ----------------------------------------------------------------------- */

static void check_shape(checker *k, const dspark_tensor *t, uint32_t rank, const uint64_t *shape,
                        const char *more)
{
    char found[80], wanted[80];

    if (t->rank == rank && !memcmp(t->shape, shape, rank * sizeof *shape)) return;
    report(k, DSPARK_EMODEL, t->file, t->name, "shape %s, the config needs %s%s",
           dspark__shape_text(t->rank, t->shape, found, sizeof found),
           dspark__shape_text(rank, shape, wanted, sizeof wanted), more);
}

static void report_dtype(checker *k, const dspark_tensor *t)
{
    int served_elsewhere = t->dtype == DSPARK_F16 || t->dtype == DSPARK_F32;

    report(k, served_elsewhere ? DSPARK_EUNSUPPORTED : DSPARK_EMODEL, t->file, t->name,
           "dtype %s, only BF16 is served", dspark__dtype_name(t->dtype));
}

/* A module that is more than one plain BF16 tensor. Returns 1 when that settles the entry: with a
 * report, or, for a linear, because quant/ judges what is there. */
static int judge_module(checker *k, size_t i, const char *name, int linear)
{
    const dspark_tensor *carrier = dspark__checkpoint_at(k->ckpt, i);
    const dspark__file_module *m = dspark__modules_of(&k->modules, i);
    const char *scheme = "";

    switch (dspark__file_module_state(m, &scheme)) {
    case DSPARK__MODULE_BF16: return 0;
    case DSPARK__MODULE_DENSE:
    case DSPARK__MODULE_QUANTISED:
        if (linear) return 1;
        report(k, DSPARK_EUNSUPPORTED, carrier->file, carrier->name,
               "its module is %s; only BF16 is served for what is no linear of the draft", scheme);
        return 1;
    case DSPARK__MODULE_REFUSED:
        report(k, DSPARK_EUNSUPPORTED, carrier->file, carrier->name,
               "its module is %s, which is not served", scheme);
        return 1;
    case DSPARK__MODULE_BROKEN:
        report(k, DSPARK_EMODEL, carrier->file, carrier->name, "its module contradicts itself: %s",
               scheme);
        return 1;
    default:
        if (!dspark__file_module_part(m, "weight")) return 0; /* "missing" says it better */
        report(k, DSPARK_EMODEL, carrier->file, carrier->name,
               "dtype %s, the config needs BF16 for "
               "%.90s",
               dspark__dtype_name(carrier->dtype), name);
        return 1;
    }
}

/* lm_head and a confidence head that is not enabled: allowed, and still checked. Returns 0 when the
 * tensor is neither. */
static int check_extra(checker *k, size_t i, const dspark__name *n)
{
    const dspark_config *c = &k->doc->config;
    const dspark_tensor *t = dspark__checkpoint_at(k->ckpt, i);
    const dspark__file_module *m = dspark__modules_of(&k->modules, i);
    dspark__target target = n->arrivals[0].target;
    int bias = !strcmp(n->arrivals[0].suffix, "bias");

    if (k->doc->context_only) return 0;
    if (target != DSPARK__T_LM_HEAD && (target != DSPARK__T_CONFIDENCE || c->confidence_head))
        return 0;
    if (!is_plain(
            n)) { /* judged once: with the weight, or with the first that is there without it */
        if (dspark__file_module_part(m, "weight") || m->parts[0].tensor != t) return 1;
        return judge_module(k, i, n->canonical, target == DSPARK__T_LM_HEAD);
    }
    if (target == DSPARK__T_LM_HEAD) {
        uint64_t shape[2] = {c->vocab_size, c->hidden_size};
        if (bias) return 0;
        if (judge_module(k, i, n->canonical, 1)) return 1;
        check_shape(k, t, 2, shape,
                    t->rank == 2 && t->shape[0] < shape[0]
                        ? "; a smaller draft vocabulary would need a d2t map, which is not served"
                        : "");
        return 1;
    } else {
        uint64_t shape[2] = {1, c->hidden_size};
        if (!bias && judge_module(k, i, n->canonical, 0)) return 1;
        /* which input the head was made for is not said when it is off */
        if (!bias && t->rank == 2 && t->shape[1] == (uint64_t)c->hidden_size + c->markov_rank)
            shape[1] = t->shape[1];
        check_shape(k, t, bias ? 1 : 2, shape, "");
        if (bias && t->dtype != DSPARK_BF16) report_dtype(k, t);
        return 1;
    }
}

/* ---- pass 1: sort the tensors ---------------------------------------------------------------- */

/* First tensors with and without "model.", in the first and in the second dialect. */
typedef struct spelling {
    const dspark_tensor *prefix[2], *dialect[3];
} spelling;

static void sort_mapped(checker *k, size_t i, const dspark__name *n)
{
    const dspark_tensor *t = dspark__checkpoint_at(k->ckpt, i);
    size_t e = is_plain(n) ? find_entry(k, n->canonical) : DSPARK__NAMETABLE_NONE;
    size_t w = find_weight_entry(k, n);

    if (w != DSPARK__NAMETABLE_NONE && !k->carrier[w]) k->carrier[w] = i + 1;
    if (e != DSPARK__NAMETABLE_NONE) {
        if (!k->found[e])
            k->found[e] = t;
        else
            report(k, DSPARK_EMODEL, t->file, t->name,
                   "double: it is the same tensor as \"%.120s\"", k->found[e]->name);
        return;
    }
    if (!is_plain(n) && w != DSPARK__NAMETABLE_NONE) return; /* its module is judged in pass 2 */
    if (check_extra(k, i, n)) return;
    if (k->doc->context_only)
        report(k, DSPARK_EMODEL, t->file, t->name,
               "unexpected: dspark_parts says that only the context tensors are here");
    else
        k->foreign[k->n_foreign++] = t;
}

static void sort_tensors(checker *k, spelling *s, size_t *n_premerged)
{
    size_t count = dspark__checkpoint_count(k->ckpt);

    for (size_t i = 0; i < count; i++) {
        const dspark_tensor *t = dspark__checkpoint_at(k->ckpt, i);
        dspark__name n;

        dspark__name_parse(&n, t->name, &k->doc->config);
        switch (n.kind) {
        case DSPARK__NAME_MAPPED:
            if (!s->prefix[n.prefixed]) s->prefix[n.prefixed] = t;
            if (!s->dialect[n.dialect]) s->dialect[n.dialect] = t;
            sort_mapped(k, i, &n);
            break;
        case DSPARK__NAME_IGNORED: break;
        case DSPARK__NAME_VOCAB_MAP:
            report(k, DSPARK_EUNSUPPORTED, t->file, t->name,
                   "a map to a reduced draft vocabulary; not served");
            break;
        case DSPARK__NAME_PREMERGED:
            ++*n_premerged;
            report(k, DSPARK_EUNSUPPORTED, t->file, t->name,
                   "a pre-merged tensor (ATOM's own form); not served, use the checkpoint it was "
                   "made from");
            break;
        default: k->foreign[k->n_foreign++] = t;
        }
    }
}

/* ---- pass 2: judge the entries --------------------------------------------------------------- */

static void report_missing(checker *k, const dspark__roster_entry *e)
{
    const dspark_tensor *near = NULL;
    unsigned best = UINT_MAX;
    char wanted[80];

    if (k->n_hints++ < HINTS) {
        for (size_t i = 0; i < k->n_foreign && i < HINT_FOREIGN; i++) {
            const char *name = k->foreign[i]->name;
            unsigned d =
                dspark__name_distance(strncmp(name, "model.", 6) ? name : name + 6, e->name);
            if (d >= best) continue;
            best = d;
            near = k->foreign[i];
        }
    }
    dspark__shape_text(e->rank, e->shape, wanted, sizeof wanted);
    if (near)
        report(k, DSPARK_EMODEL, NULL, e->name,
               "missing: the config needs BF16 %s; is \"%.120s\" a misspelling of it?", wanted,
               near->name);
    else
        report(k, DSPARK_EMODEL, NULL, e->name, "missing: the config needs BF16 %s", wanted);
}

/* What a norm or a table has no use for, and no quantisation explains. */
static void judge_beside(checker *k, const dspark__file_module *m)
{
    for (uint32_t i = 0; i < m->n_parts && i < DSPARK__FILE_MODULE_PARTS; i++) {
        const dspark_tensor *t = m->parts[i].tensor;
        if (strcmp(m->parts[i].suffix, "weight") != 0 && strcmp(m->parts[i].suffix, "bias") != 0)
            report(k, DSPARK_EMODEL, t->file, t->name, "unexpected beside a plain weight");
    }
}

static void judge_entry(checker *k, size_t i)
{
    const dspark__roster_entry *e = &k->roster[i];
    const dspark_tensor *t = k->found[i];

    if (k->carrier[i] && judge_module(k, k->carrier[i] - 1, e->name, e->linear)) return;
    if (!t) {
        if (!e->optional) report_missing(k, e);
        return;
    }
    check_shape(k, t, e->rank, e->shape, "");
    if (t->dtype != DSPARK_BF16) report_dtype(k, t);
    if (k->carrier[i] && !e->linear)
        judge_beside(k, dspark__modules_of(&k->modules, k->carrier[i] - 1));
}

/* ---- pass 3: what nothing asked for ---------------------------------------------------------- */

static void judge_foreign(checker *k)
{
    unsigned n_hints = 0;

    for (size_t f = 0; f < k->n_foreign; f++) {
        const dspark_tensor *t = k->foreign[f];
        const char *bare = strncmp(t->name, "model.", 6) ? t->name : t->name + 6, *near = NULL;
        unsigned best = UINT_MAX;
        dspark__name n;

        dspark__name_parse(&n, t->name, &k->doc->config);
        for (size_t i = 0; n_hints < HINTS && i < k->n_roster; i++) {
            unsigned d;
            if (k->found[i] || k->carrier[i]) continue;
            d = dspark__name_distance(bare, k->roster[i].name);
            if (d >= best) continue;
            best = d;
            near = k->roster[i].name;
        }
        n_hints++;
        if (!n.why) n.why = "the config asks for no such tensor";
        if (near)
            report(k, DSPARK_EMODEL, t->file, t->name, "unexpected: %s; was \"%s\" meant?", n.why,
                   near);
        else
            report(k, DSPARK_EMODEL, t->file, t->name, "unexpected: %s", n.why);
    }
}

static void judge_spelling(checker *k, const spelling *s)
{
    if (s->prefix[0] && s->prefix[1])
        report(k, DSPARK_EMODEL, s->prefix[1]->file, s->prefix[1]->name,
               "the prefix \"model.\" here and none on \"%.120s\": all names or none",
               s->prefix[0]->name);
    if (s->dialect[DSPARK__DIALECT_K3] && s->dialect[DSPARK__DIALECT_DEEPSPEC])
        report(k, DSPARK_EMODEL, s->dialect[DSPARK__DIALECT_DEEPSPEC]->file,
               s->dialect[DSPARK__DIALECT_DEEPSPEC]->name,
               "two dialects are mixed: the other one is that of \"%.120s\"",
               s->dialect[DSPARK__DIALECT_K3]->name);
}

/* ---- the whole ------------------------------------------------------------------------------- */

static dspark_status check_all(checker *k, dspark_error *err)
{
    size_t count = dspark__checkpoint_count(k->ckpt), n_premerged = 0;
    spelling s;
    dspark_status st;

    memset(&s, 0, sizeof s);
    st = dspark__roster_make(&k->roster, &k->n_roster, &k->doc->config, k->doc->context_only, err);
    if (st != DSPARK_OK) return st;
    if ((st = dspark__modules_make(&k->modules, k->ckpt, err)) != DSPARK_OK) return st;
    k->found = calloc(k->n_roster + 1, sizeof *k->found);
    k->carrier = calloc(k->n_roster + 1, sizeof *k->carrier);
    k->foreign = calloc(count + 1, sizeof *k->foreign);
    if (!k->found || !k->carrier || !k->foreign)
        return dspark__fail_nomem(err, "roster check",
                                  (2 * k->n_roster + count) * sizeof *k->found);
    for (size_t i = 0; i < k->n_roster; i++) {
        size_t id;
        if (dspark__nametable_put(&k->index, k->roster[i].name, &id) < 0)
            return dspark__fail_nomem(err, "roster index", k->n_roster * sizeof(char *));
    }
    sort_tensors(k, &s, &n_premerged);
    /* of a pre-merged file half the roster is "missing": the one fact says more */
    if (n_premerged == 0) {
        for (size_t i = 0; i < k->n_roster; i++) judge_entry(k, i);
        judge_foreign(k);
        judge_spelling(k, &s);
    }
    return DSPARK_OK;
}

static dspark_status sum_up(const checker *k, dspark_error *err)
{
    int slot = k->n_broken == 0;
    size_t more = k->n_broken + k->n_unserved;
    const dspark_tensor *first = k->n_foreign ? k->foreign[0] : NULL;
    char tail[160] = "", foreign[200] = "";

    if (more-- == 0) return DSPARK_OK;
    if (more) snprintf(tail, sizeof tail, " (%zu more problem%s)", more, more == 1 ? "" : "s");
    /* whoever mixed up two families looks for the tensor that does not belong */
    if (!slot && first && !strstr(k->where[0], first->name) && !strstr(k->text[0], first->name))
        snprintf(foreign, sizeof foreign, "; the first unexpected tensor is \"%.120s\"",
                 first->name);
    return dspark__fail(err, slot ? DSPARK_EUNSUPPORTED : DSPARK_EMODEL, k->where[slot], "%s%s%s",
                        k->text[slot], foreign, tail);
}

dspark_status dspark__roster_check(const dspark_checkpoint *ckpt, const dspark__config_doc *doc,
                                   void (*problem)(void *user, dspark_status kind,
                                                   const char *tensor, const char *text),
                                   void *user, dspark_error *err)
{
    checker k;
    dspark_status st;

    memset(&k, 0, sizeof k);
    k.ckpt = ckpt;
    k.doc = doc;
    k.problem = problem;
    k.user = user;
    st = check_all(&k, err);
    if (st == DSPARK_OK) st = sum_up(&k, err);
    free(k.roster);
    free(k.found);
    free(k.carrier);
    free(k.foreign);
    dspark__modules_free(&k.modules);
    dspark__nametable_free(&k.index);
    return st;
}
