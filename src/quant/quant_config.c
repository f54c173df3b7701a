/* quantization_config: where it is found, which dialect it is in, and the rule it leads to for one
 * module. Reads no key of a dialect itself: each has a file of its own (config_*.c). */
#include "quant/quant_config.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/status.h"
#include "ckpt/json.h"
#include "quant/config_dialect.h"

#define MAX_DEPTH    32u
#define TIER_NOWHERE UINT32_MAX

static const char *const method_names[] = {"none", "compressed-tensors", "fp8", "modelopt",
                                           "quark"};

/* ---- what dialects add ----------------------------------------------------------------------- */

void dspark__quant_descend(dspark__quant_cursor *to, const dspark__cfg *from, const char *key,
                           const json_t *object)
{
    to->cfg = *from;
    to->cfg.object = object;
    snprintf(to->prefix, sizeof to->prefix, "%s%s.", from->prefix, key);
    to->cfg.prefix = to->prefix;
}

void dspark__quant_note(dspark__quant_config *q, const char *fmt, ...)
{
    va_list ap;

    if (q->n_notes == DSPARK__QUANT_MAX_NOTES) return;
    va_start(ap, fmt);
    vsnprintf(q->notes[q->n_notes++], sizeof q->notes[0], fmt, ap);
    va_end(ap);
}

/* Room for one more of `n` items; 0 when memory runs out. */
static int make_room(void **list, size_t n, size_t *cap, size_t item_bytes)
{
    size_t wanted = *cap ? *cap * 2 : 8;
    void *grown;

    if (n < *cap) return 1;
    grown = realloc(*list, wanted * item_bytes);
    if (!grown) return 0;
    *list = grown;
    *cap = wanted;
    return 1;
}

dspark_status dspark__quant_add_group(dspark__quant_config *q, const dspark__cfg *g,
                                      const dspark__quant_rule *rule, uint32_t *group)
{
    void *list = q->groups;

    if (q->n_groups == DSPARK__QUANT_MAX_GROUPS)
        return dspark__fail(g->err, DSPARK_EUNSUPPORTED, g->source,
                            "%smore than %u quantisation groups", g->prefix,
                            DSPARK__QUANT_MAX_GROUPS);
    if (!make_room(&list, q->n_groups, &q->groups_cap, sizeof *q->groups))
        return dspark__fail_nomem(g->err, "quantisation groups", sizeof *q->groups);
    q->groups = list;
    q->groups[q->n_groups] = *rule;
    *group = (uint32_t)q->n_groups++;
    return DSPARK_OK;
}

static dspark_status compile_entry(dspark__quant_config *q, const dspark__cfg *g, const char *key,
                                   dspark__match_kind kind, const char *text, dspark__match *m)
{
    char where[256];
    dspark_status st;

    if (q->n_targets + q->n_ignored >= DSPARK__QUANT_MAX_ENTRIES)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, key, "more than %u names and patterns",
                                DSPARK__QUANT_MAX_ENTRIES);
    snprintf(where, sizeof where, "%s: %s%s", g->source, g->prefix, key);
    if ((st = dspark__match_compile(m, kind, text, where, g->err)) != DSPARK_OK) return st;
    q->cost += dspark__match_cost(m);
    if (q->cost <= DSPARK__QUANT_MAX_COST) return DSPARK_OK;
    dspark__match_free(m);
    return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, key,
                            "all patterns together compile to more than %u steps",
                            DSPARK__QUANT_MAX_COST);
}

dspark_status dspark__quant_add_target(dspark__quant_config *q, const dspark__cfg *g,
                                       const char *key, dspark__match_kind kind, const char *text,
                                       uint32_t group, uint32_t tier)
{
    dspark__quant_target target = {.group = group, .tier = tier};
    void *list = q->targets;
    dspark_status st;

    if (!make_room(&list, q->n_targets, &q->targets_cap, sizeof *q->targets))
        return dspark__fail_nomem(g->err, "quantisation targets", sizeof *q->targets);
    q->targets = list;
    if ((st = compile_entry(q, g, key, kind, text, &target.match)) != DSPARK_OK) return st;
    q->targets[q->n_targets++] = target;
    return DSPARK_OK;
}

dspark_status dspark__quant_add_ignored(dspark__quant_config *q, const dspark__cfg *g,
                                        const char *key, dspark__match_kind kind, const char *text)
{
    void *list = q->ignored;
    dspark_status st;

    if (!make_room(&list, q->n_ignored, &q->ignored_cap, sizeof *q->ignored))
        return dspark__fail_nomem(g->err, "an ignore list", sizeof *q->ignored);
    q->ignored = list;
    if ((st = compile_entry(q, g, key, kind, text, &q->ignored[q->n_ignored])) != DSPARK_OK)
        return st;
    q->n_ignored++;
    return DSPARK_OK;
}

/* ---- how entries are read -------------------------------------------------------------------- */

static int is_regex(const char *entry, dspark__match_kind *kind, const char **text)
{
    if (strncmp(entry, "re:", 3) != 0) return 0;
    *kind = DSPARK__MATCH_REGEX;
    *text = entry + 3;
    return 1;
}

void dspark__quant_entry_ct(const char *entry, dspark__match_kind *kind, const char **text)
{
    if (is_regex(entry, kind, text)) return;
    *kind = strcasecmp(entry, "Linear") == 0 ? DSPARK__MATCH_ALL : DSPARK__MATCH_EXACT;
    *text = entry;
}

void dspark__quant_entry_glob(const char *entry, dspark__match_kind *kind, const char **text)
{
    if (is_regex(entry, kind, text)) return;
    *kind = strpbrk(entry, "*?[") ? DSPARK__MATCH_GLOB : DSPARK__MATCH_EXACT;
    *text = entry;
}

void dspark__quant_entry_path(const char *entry, dspark__match_kind *kind, const char **text)
{
    dspark__quant_entry_glob(entry, kind, text);
    if (*kind == DSPARK__MATCH_EXACT) *kind = DSPARK__MATCH_PATH;
}

dspark_status dspark__quant_add_ignore_list(dspark__quant_config *q, const dspark__cfg *g,
                                            const char *key, dspark__quant_entry *read,
                                            int *present)
{
    const json_t *list = NULL;
    dspark_status st = dspark__cfg_array(g, key, &list);

    if (present) *present = list != NULL;
    for (size_t i = 0; st == DSPARK_OK && i < json_array_size(list); i++) {
        const char *entry = json_string_value(json_array_get(list, i)), *text;
        dspark__match_kind kind;

        if (!entry) return dspark__cfg_fail(g, DSPARK_EFORMAT, key, "entry %zu is no string", i);
        read(entry, &kind, &text);
        st = dspark__quant_add_ignored(q, g, key, kind, text);
    }
    return st;
}

int dspark__quant_word(const char *const *words, size_t n, const char *word)
{
    for (size_t i = 0; i < n; i++)
        if (strcasecmp(words[i], word) == 0) return (int)i;
    return -1;
}

/* "128x128": digits, an x, digits. */
static int read_block_text(const char *s, uint32_t *sides)
{
    for (int i = 0; i < 2; i++) {
        uint32_t value = 0;
        size_t n = 0;
        for (; *s >= '0' && *s <= '9' && n < 8; s++, n++) value = value * 10 + (uint32_t)(*s - '0');
        if (n == 0 || *s != (i ? '\0' : 'x')) return 0;
        if (i == 0) s++;
        sides[i] = value;
    }
    return 1;
}

dspark_status dspark__quant_block(const dspark__cfg *g, const char *key, uint32_t *rows,
                                  uint32_t *cols, int *present)
{
    const json_t *v = dspark__cfg_get(g, key);
    uint32_t sides[2] = {0, 0};
    int good = 0;

    *present = v != NULL;
    if (!v) return DSPARK_OK;
    if (json_is_string(v)) {
        good = read_block_text(json_string_value(v), sides);
    } else if (json_array_size(v) == 2) { /* 0 for what is no array */
        good = 1;
        for (size_t i = 0; i < 2; i++) {
            const json_t *side = json_array_get(v, i);
            if (!json_is_integer(side) || json_integer_value(side) < 0 ||
                json_integer_value(side) > UINT32_MAX)
                good = 0;
            else
                sides[i] = (uint32_t)json_integer_value(side);
        }
    }
    if (!good)
        return dspark__cfg_fail(g, DSPARK_EFORMAT, key, "a block is two integers, [rows, columns]");
    if (sides[0] == 0 || sides[1] == 0 || sides[0] > 1u << 20 || sides[1] > 1u << 20)
        return dspark__cfg_fail(g, DSPARK_EMODEL, key, "a block of %u x %u", sides[0], sides[1]);
    *rows = sides[0];
    *cols = sides[1];
    return DSPARK_OK;
}

static int is_empty(const json_t *v)
{
    return !v || json_is_null(v) || json_is_false(v) ||
           (json_is_object(v) && json_object_size(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0);
}

dspark_status dspark__quant_refuse_rotations(const dspark__cfg *g)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)g->object, key, value)
    {
        if (!strcasestr(key, "rotat") && !strcasestr(key, "transform")) continue;
        if (is_empty(value)) continue;
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, key,
                                "rotations and transforms around linears are not served");
    }
    return DSPARK_OK;
}

/* ---- which dialect --------------------------------------------------------------------------- */

typedef dspark_status dialect(dspark__quant_config *q, const dspark__cfg *g);

static dspark_status find_dialect(const dspark__cfg *g, const char *fallback,
                                  dspark__quant_method *method)
{
    static const struct {
        const char *name;
        dspark__quant_method method;
    } known[] = {{"compressed-tensors", DSPARK__QUANT_COMPRESSED_TENSORS},
                 {"compressed_tensors", DSPARK__QUANT_COMPRESSED_TENSORS},
                 {"fp8", DSPARK__QUANT_FP8},
                 {"modelopt", DSPARK__QUANT_MODELOPT},
                 {"modelopt_fp4", DSPARK__QUANT_MODELOPT},
                 {"modelopt_mxfp8", DSPARK__QUANT_MODELOPT},
                 {"modelopt_mixed", DSPARK__QUANT_MODELOPT},
                 {"quark", DSPARK__QUANT_QUARK}};
    const char *name = NULL;
    dspark_status st = dspark__cfg_string(g, "quant_method", &name);

    if (st != DSPARK_OK) return st;
    if (!name && (dspark__cfg_get(g, "quant_algo") || dspark__cfg_get(g, "quantization")))
        name = "modelopt";
    if (!name && dspark__cfg_get(g, "config_groups")) name = "compressed-tensors";
    if (!name) name = fallback;
    if (!name)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "quant_method",
                                "the key is missing, and no other key tells the method");
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcasecmp(known[i].name, name) != 0) continue;
        *method = known[i].method;
        return DSPARK_OK;
    }
    return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "quant_method",
                            "the method %.60s is not served; served are compressed-tensors, fp8, "
                            "modelopt, quark and weights that are not quantised",
                            name);
}

/* quantization_config, text_config.quantization_config, compression_config: the first that is there
 * and not empty. to->cfg.object stays NULL when none is. */
static dspark_status find_config(dspark__quant_cursor *to, const dspark__cfg *root,
                                 const char **fallback)
{
    static const char *const keys[] = {"quantization_config", "text_config", "compression_config"};

    *fallback = NULL;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const json_t *object = NULL;
        dspark__quant_cursor outer;
        dspark_status st = dspark__cfg_object(root, keys[i], &object);

        if (st != DSPARK_OK) return st;
        if (!object || json_object_size(object) == 0) continue;
        dspark__quant_descend(to, root, keys[i], object);
        if (i == 1) {
            outer = *to;
            outer.cfg.prefix = outer.prefix;
            object = NULL;
            st = dspark__cfg_object(&outer.cfg, keys[0], &object);
            if (st != DSPARK_OK) return st;
            if (!object || json_object_size(object) == 0) {
                to->cfg.object = NULL;
                continue;
            }
            dspark__quant_descend(to, &outer.cfg, keys[0], object);
        }
        if (i == 2) *fallback = method_names[DSPARK__QUANT_COMPRESSED_TENSORS];
        return DSPARK_OK;
    }
    to->cfg.object = NULL;
    return DSPARK_OK;
}

/* Both files of a ModelOpt checkpoint name the algorithm: they must name the same. */
static dspark_status compare_algos(const dspark__cfg *config, const dspark__cfg *hf)
{
    dspark__quant_cursor a, b;
    const char *one = NULL, *two = NULL;
    dspark_status st;

    if ((st = dspark__quant_modelopt_object(&a, config)) != DSPARK_OK) return st;
    if ((st = dspark__quant_modelopt_object(&b, hf)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_string(&a.cfg, "quant_algo", &one)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_string(&b.cfg, "quant_algo", &two)) != DSPARK_OK) return st;
    if (!one || !two || strcasecmp(one, two) == 0) return DSPARK_OK;
    return dspark__cfg_fail(&b.cfg, DSPARK_EMODEL, "quant_algo", "%.60s, but %.80s says %.60s", two,
                            config->source, one);
}

/* ---- parse ----------------------------------------------------------------------------------- */

static void describe(dspark__quant_config *q)
{
    const char *format = NULL;
    char groups[32];
    int mixed = 0;

    for (size_t i = 0; i < q->n_groups; i++) {
        const char *one = q->groups[i].format;
        q->groups[i].method = q->method;
        q->groups[i].dense_bits = q->dense_bits;
        if (!one) continue;
        if (format && strcmp(format, one) != 0) mixed = 1;
        format = one;
    }
    if (q->method == DSPARK__QUANT_FP8 && q->n_groups > 0)
        format = q->groups[0].block_rows ? "blocks" : "one scale per tensor";
    snprintf(groups, sizeof groups, "%zu group%s", q->n_groups, q->n_groups == 1 ? "" : "s");
    snprintf(q->text, sizeof q->text, "%s, %s, %s, %zu ignored", method_names[q->method],
             mixed    ? "mixed-precision"
             : format ? format
                      : "no format",
             groups, q->n_ignored);
}

static dspark_status read_dialect(dspark__quant_config *q, const dspark__cfg *g)
{
    static dialect *const dialects[] = {
        [DSPARK__QUANT_COMPRESSED_TENSORS] = dspark__quant_read_ct,
        [DSPARK__QUANT_FP8] = dspark__quant_read_fp8,
        [DSPARK__QUANT_MODELOPT] = dspark__quant_read_modelopt,
        [DSPARK__QUANT_QUARK] = dspark__quant_read_quark,
    };
    return dialects[q->method](q, g);
}

dspark_status dspark__quant_config_parse(dspark__quant_config **out, const char *config_text,
                                         size_t n_config, const char *hf_quant_text, size_t n_hf,
                                         const char *where, dspark_error *err)
{
    json_t *config = NULL, *hf = NULL;
    dspark__quant_config *q = NULL;
    dspark__cfg root = {NULL, "", where ? where : "config.json", NULL, err};
    dspark__cfg hf_root = {NULL, "", "hf_quant_config.json", NULL, err};
    dspark__quant_cursor found;
    const char *fallback = NULL;
    dspark_status st = DSPARK_OK;

    *out = NULL;
    found.cfg.object = NULL;
    if (config_text) {
        st = dspark__json_load(&config, config_text, n_config, MAX_DEPTH, root.source, err);
        if (st != DSPARK_OK) goto fail;
        root.object = config;
        if ((st = find_config(&found, &root, &fallback)) != DSPARK_OK) goto fail;
    }
    if (!found.cfg.object && !hf_quant_text) goto fail; /* neither: no failure, and no config */

    q = calloc(1, sizeof *q);
    if (!q) {
        st = dspark__fail_nomem(err, "the quantisation config", sizeof *q);
        goto fail;
    }
    q->method = DSPARK__QUANT_MODELOPT;
    if (found.cfg.object && (st = find_dialect(&found.cfg, fallback, &q->method)) != DSPARK_OK)
        goto fail;
    if (hf_quant_text && q->method == DSPARK__QUANT_MODELOPT) {
        st = dspark__json_load(&hf, hf_quant_text, n_hf, MAX_DEPTH, hf_root.source, err);
        if (st != DSPARK_OK) goto fail;
        hf_root.object = hf;
        if (found.cfg.object && (st = compare_algos(&found.cfg, &hf_root)) != DSPARK_OK) goto fail;
    } else if (hf_quant_text) {
        dspark__quant_note(q, "hf_quant_config.json is not read: %s names another method",
                           root.source);
    }
    st = read_dialect(q, found.cfg.object ? &found.cfg : &hf_root);
    if (st != DSPARK_OK) goto fail;
    describe(q);
    *out = q;
    q = NULL;
fail:
    dspark__quant_config_free(q);
    json_decref(config);
    json_decref(hf);
    return st;
}

void dspark__quant_config_free(dspark__quant_config *q)
{
    if (!q) return;
    for (size_t i = 0; i < q->n_targets; i++) dspark__match_free(&q->targets[i].match);
    for (size_t i = 0; i < q->n_ignored; i++) dspark__match_free(&q->ignored[i]);
    free(q->targets);
    free(q->ignored);
    free(q->groups);
    free(q);
}

/* ---- rules ----------------------------------------------------------------------------------- */

/* Rules for a class, or for all, mean linear layers. Embeddings and norms are none, and files with
 * `targets: ["Linear"]` leave them as they are without a word on their ignore lists. */
static int is_linear(const char *module)
{
    static const char *const tables[] = {"embed", "norm", "markov_w1"};
    const char *dot = strrchr(module, '.'), *last = dot ? dot + 1 : module;

    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++)
        if (strstr(last, tables[i])) return 0;
    return 1;
}

static const dspark__quant_target *find_target(const dspark__quant_config *q,
                                               const char *const *names)
{
    const dspark__quant_target *best = NULL;
    uint32_t tier = TIER_NOWHERE;
    int linear = is_linear(names[0]);

    for (size_t i = 0; i < q->n_targets; i++) {
        const dspark__quant_target *t = &q->targets[i];
        if (t->tier >= tier) continue;
        if (t->match.kind == DSPARK__MATCH_ALL && !linear) continue;
        if (!dspark__match_name(&t->match, names[0]) && !dspark__match_name(&t->match, names[1]))
            continue;
        best = t;
        tier = t->tier;
    }
    return best;
}

dspark_status dspark__quant_config_rule(const dspark__quant_config *q, const char *module,
                                        dspark__quant_rule *rule, dspark_error *err)
{
    static const char prefix[] = "model.";
    char longer[DSPARK__MATCH_MAX_NAME + sizeof prefix];
    const char *names[2];
    int ignored = 0, above = 0;

    memset(rule, 0, sizeof *rule);
    if (!module || !*module || strlen(module) > DSPARK__MATCH_MAX_NAME)
        return dspark__fail(err, DSPARK_EINVAL, "module", "a name of 1 to %u bytes is needed",
                            DSPARK__MATCH_MAX_NAME);
    if (!q) return DSPARK_OK;

    names[0] = module;
    if (strncmp(module, prefix, sizeof prefix - 1) == 0 && module[sizeof prefix - 1]) {
        names[1] = module + sizeof prefix - 1;
    } else {
        snprintf(longer, sizeof longer, "%s%s", prefix, module);
        names[1] = longer;
    }
    for (size_t i = 0; i < q->n_ignored && !ignored; i++) {
        const dspark__match *m = &q->ignored[i];
        for (int k = 0; k < 2; k++) {
            ignored |= dspark__match_name(m, names[k]);
            above |= dspark__match_above(m, names[k]);
        }
    }
    if (!ignored) {
        const dspark__quant_target *target = find_target(q, names);
        if (target) *rule = q->groups[target->group];
    }
    rule->method = q->method;
    rule->dense_bits = q->dense_bits;
    if (ignored || above) rule->quantised = -1;
    if (!ignored && above) rule->ignored_by_parent = 1;
    return DSPARK_OK;
}

/* ---- for people ------------------------------------------------------------------------------ */

const char *dspark__quant_config_text(const dspark__quant_config *q)
{
    return q ? q->text : "none";
}

size_t dspark__quant_config_note_count(const dspark__quant_config *q)
{
    return q ? q->n_notes : 0;
}

const char *dspark__quant_config_note(const dspark__quant_config *q, size_t i)
{
    return q && i < q->n_notes ? q->notes[i] : NULL;
}
