/* The name table and the weight stream. One row a module; the duplication of kv_a_proj_with_mqa
 * into the cross-layer context_kv is a mark on its row. Owns no tensor and copies none. */
#include "ckpt/names.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"

typedef enum place { ALONE, PER_TAP, PER_LAYER } place;

typedef struct name_row {
    place where;
    const char *module; /* after "fc_norm.T." is empty, after "layers.N." the rest */
    dspark__dialect dialect;
    const char *canonical; /* of a second-dialect row: the first dialect's module */
    dspark__target target;
    int32_t shard;
    int duplicated; /* also arrives at context_kv, shard = layer */
} name_row;

static const name_row table[] = {
    {ALONE, "embed_tokens", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_EMBED, -1, 0},
    {ALONE, "lm_head", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_LM_HEAD, -1, 0},
    {ALONE, "context_proj", DSPARK__DIALECT_K3, NULL, DSPARK__T_CONTEXT_PROJ, -1, 0},
    {ALONE, "fc", DSPARK__DIALECT_DEEPSPEC, "context_proj", DSPARK__T_CONTEXT_PROJ, -1, 0},
    {ALONE, "context_norm", DSPARK__DIALECT_K3, NULL, DSPARK__T_CONTEXT_NORM, -1, 0},
    {ALONE, "hidden_norm", DSPARK__DIALECT_DEEPSPEC, "context_norm", DSPARK__T_CONTEXT_NORM, -1, 0},
    {ALONE, "final_norm", DSPARK__DIALECT_K3, NULL, DSPARK__T_FINAL_NORM, -1, 0},
    {ALONE, "norm", DSPARK__DIALECT_DEEPSPEC, "final_norm", DSPARK__T_FINAL_NORM, -1, 0},
    {ALONE, "markov_head.markov_w1", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_MARKOV_W1, -1, 0},
    {ALONE, "markov_head.markov_w2", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_MARKOV_W2, -1, 0},
    {ALONE, "markov_head.gate_proj", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_MARKOV_GATE, -1, 0},
    {ALONE, "markov_head.joint_proj", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_MARKOV_JOINT, -1, 0},
    {ALONE, "confidence_head.proj", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_CONFIDENCE, -1, 0},
    {PER_TAP, "", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_FC_NORM, -1, 0},
    {PER_LAYER, "input_layernorm", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_INPUT_NORM, -1, 0},
    {PER_LAYER, "self_attn.q_a_proj", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_QKV_A, 0, 0},
    {PER_LAYER, "self_attn.kv_a_proj_with_mqa", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_QKV_A, 1, 1},
    {PER_LAYER, "self_attn.q_a_layernorm", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_Q_A_NORM, -1, 0},
    {PER_LAYER, "self_attn.q_b_proj", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_Q_B, -1, 0},
    {PER_LAYER, "self_attn.kv_a_layernorm", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_KV_A_NORM, -1, 0},
    {PER_LAYER, "self_attn.kv_b_proj", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_KV_B, -1, 0},
    {PER_LAYER, "self_attn.o_proj", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_O, -1, 0},
    {PER_LAYER, "post_attention_layernorm", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_POST_NORM, -1, 0},
    {PER_LAYER, "mlp.gate_proj", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_GATE_UP, 0, 0},
    {PER_LAYER, "mlp.up_proj", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_GATE_UP, 1, 0},
    {PER_LAYER, "mlp.down_proj", DSPARK__DIALECT_BOTH, NULL, DSPARK__T_DOWN, -1, 0},
};
#define TABLE_ROWS (sizeof table / sizeof *table)

static const char *const suffixes[] = {
    "weight",
    "bias",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "pre_quant_scale",
    "scale",
    "q_scale",
    "k_scale",
    "v_scale",
    "output_scale",
    "svdquant_lora_a",
    "svdquant_lora_b",
};

/* In the order of the enum. */
static const char *const target_names[DSPARK__T_COUNT] = {
    "fc_norm",      "context_proj", "context_norm", "context_kv", "input_norm", "qkv_a",
    "q_a_norm",     "q_b",          "kv_a_norm",    "kv_b",       "o",          "post_norm",
    "gate_up",      "down",         "final_norm",   "markov_w1",  "markov_w2",  "markov_gate",
    "markov_joint", "confidence",   "embed",        "lm_head",
};

const char *dspark__target_name(dspark__target target)
{
    return (unsigned)target < DSPARK__T_COUNT ? target_names[target] : "?";
}

/* ---- one name -------------------------------------------------------------------------------- */

static int ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

/* A known suffix that is all of `s`, else NULL. */
static const char *known_suffix(const char *s)
{
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++)
        if (!strcmp(s, suffixes[i])) return suffixes[i];
    return NULL;
}

/* "12.rest": decimal digits without a leading zero, then a dot. Returns the rest or NULL. */
static const char *parse_index(const char *s, uint32_t *index)
{
    uint32_t value = 0;
    const char *p = s;

    while (*p >= '0' && *p <= '9') {
        if (value > 100000) return NULL; /* far beyond every limit */
        value = value * 10 + (uint32_t)(*p++ - '0');
    }
    if (p == s || *p != '.' || (*s == '0' && p != s + 1)) return NULL;
    *index = value;
    return p + 1;
}

/* "proj.weight" behind `module`: returns the suffix's text, or NULL when `s` is another module. */
static const char *after_module(const char *s, const char *module)
{
    size_t n = strlen(module);
    if (n == 0) return s;
    return !strncmp(s, module, n) && s[n] == '.' ? s + n + 1 : NULL;
}

static int is_ignored(const char *s)
{
    return ends_with(s, "rotary_emb.inv_freq") || ends_with(s, "rotary_emb.cos_cached") ||
           ends_with(s, "rotary_emb.sin_cached") || ends_with(s, "rotary_pos_emb.inv_freq");
}

/* Scales of a quantised KV cache, beside the attention's modules. The cache is its host's. */
static int is_cache_scale(const char *rest)
{
    static const char *const names[] = {
        "self_attn.q_scale",      "self_attn.k_scale",      "self_attn.v_scale",
        "self_attn.attn.q_scale", "self_attn.attn.k_scale", "self_attn.attn.v_scale",
    };

    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(rest, names[i])) return 1;
    return 0;
}

static int is_premerged(const char *s)
{
    return !strncmp(s, "context_kv_proj.", 16) || strstr(s, ".context_kv_proj.") ||
           strstr(s, ".fused_qkv_a_proj.") || strstr(s, ".gate_up_proj.");
}

/* A row that exists only under another config. */
static const char *why_not_here(const name_row *row, const dspark_config *c)
{
    if (row->target == DSPARK__T_FC_NORM && !c->fc_norm)
        return "the config does not say fc_norm: true";
    if (row->target == DSPARK__T_MARKOV_GATE && c->markov_type != DSPARK_MARKOV_GATED)
        return "the config's markov_head_type is not gated";
    if (row->target == DSPARK__T_MARKOV_JOINT && c->markov_type != DSPARK_MARKOV_RNN)
        return "the config's markov_head_type is not rnn";
    return NULL;
}

/* Fill out from row, index and suffix. */
static void accept_name(dspark__name *out, const name_row *row, uint32_t index, const char *suffix)
{
    const char *module = row->canonical ? row->canonical : row->module;
    dspark__arrival *a = out->arrivals;

    out->kind = DSPARK__NAME_MAPPED;
    out->dialect = row->dialect;
    if (row->where == PER_TAP)
        snprintf(out->canonical, sizeof out->canonical, "fc_norm.%u.%s", index, suffix);
    else if (row->where == PER_LAYER)
        snprintf(out->canonical, sizeof out->canonical, "layers.%u.%s.%s", index, module, suffix);
    else
        snprintf(out->canonical, sizeof out->canonical, "%s.%s", module, suffix);
    a[0].target = row->target;
    a[0].index = index;
    a[0].shard = row->shard;
    a[0].suffix = suffix;
    out->n_arrivals = 1;
    if (!row->duplicated) return;
    a[1] = a[0];
    a[1].target = DSPARK__T_CONTEXT_KV;
    a[1].index = 0;
    a[1].shard = (int32_t)index;
    out->n_arrivals = 2;
}

static void map_rest(dspark__name *out, const char *rest, place where, uint32_t index,
                     const dspark_config *c)
{
    for (size_t i = 0; i < TABLE_ROWS; i++) {
        const name_row *row = &table[i];
        const char *tail, *suffix;
        if (row->where != where || !(tail = after_module(rest, row->module))) continue;
        if ((out->why = why_not_here(row, c)) != NULL) return;
        suffix = known_suffix(tail);
        if (suffix)
            accept_name(out, row, index, suffix);
        else
            out->why = "no such tensor belongs to a module";
        return;
    }
    out->why = where == PER_LAYER ? "no such module in a layer" : "no such module";
}

void dspark__name_parse(dspark__name *out, const char *name, const dspark_config *c)
{
    const char *s = name, *rest;
    uint32_t index = 0;

    memset(out, 0, sizeof *out);
    if (!strncmp(s, "model.", 6)) {
        out->prefixed = 1;
        s += 6;
    }
    if (is_ignored(s)) {
        out->kind = DSPARK__NAME_IGNORED;
    } else if (!strcmp(s, "d2t") || !strcmp(s, "t2d")) {
        out->kind = DSPARK__NAME_VOCAB_MAP;
    } else if (is_premerged(s)) {
        out->kind = DSPARK__NAME_PREMERGED;
    } else if (!strncmp(s, "layers.", 7)) {
        rest = parse_index(s + 7, &index);
        if (!rest)
            out->why = "its layer is not a plain decimal number";
        else if (index >= c->n_layers)
            out->why = "its layer lies beyond num_hidden_layers";
        else if (is_cache_scale(rest))
            out->kind = DSPARK__NAME_IGNORED;
        else
            map_rest(out, rest, PER_LAYER, index, c);
    } else if (!strncmp(s, "fc_norm.", 8)) {
        rest = parse_index(s + 8, &index);
        if (!rest)
            out->why = "its tap is not a plain decimal number";
        else if (index >= c->n_taps)
            out->why = "its tap lies beyond target_layer_ids";
        else
            map_rest(out, rest, PER_TAP, index, c);
    } else {
        map_rest(out, s, ALONE, 0, c);
    }
}

size_t dspark__names_map(const char *name, const dspark_config *c, dspark__arrival out[2])
{
    dspark__name n;

    dspark__name_parse(&n, name, c);
    memcpy(out, n.arrivals, sizeof n.arrivals);
    return n.n_arrivals;
}

/* ---- hints ----------------------------------------------------------------------------------- */

#define DISTANCE_MAX_NAME 128

static unsigned edit_distance(const char *a, size_t n, const char *b, size_t m)
{
    unsigned char row[DISTANCE_MAX_NAME + 1];

    for (size_t j = 0; j <= m; j++) row[j] = (unsigned char)j;
    for (size_t i = 1; i <= n; i++) {
        unsigned diagonal = row[0];
        row[0] = (unsigned char)i;
        for (size_t j = 1; j <= m; j++) {
            unsigned up = row[j], best = diagonal + (a[i - 1] != b[j - 1]);
            if (up + 1 < best) best = up + 1;
            if (row[j - 1] + 1u < best) best = row[j - 1] + 1u;
            diagonal = up;
            row[j] = (unsigned char)best;
        }
    }
    return row[m];
}

/* "layers.02.x" and "layers.2.x" are the same but for leading zeros of numbers. */
static int same_but_zeros(const char *found, const char *meant)
{
    while (*found && *found == *meant) {
        found++;
        meant++;
        if (found[-1] != '.') continue;
        while (found[0] == '0' && found[1] >= '0' && found[1] <= '9') found++;
    }
    return *found == *meant;
}

unsigned dspark__name_distance(const char *found, const char *meant)
{
    size_t n = strnlen(found, DISTANCE_MAX_NAME + 1), m = strnlen(meant, DISTANCE_MAX_NAME + 1);
    size_t small = n < m ? n : m, large = n < m ? m : n, head = 0, tail = 0;
    unsigned d;

    if (n > DISTANCE_MAX_NAME || m > DISTANCE_MAX_NAME) return UINT_MAX;
    if (n == m && !memcmp(found, meant, n)) return 0;
    if (same_but_zeros(found, meant)) return 1;
    /* one piece left out or put in ("kv_a_proj" for "kv_a_proj_with_mqa") is nearer than its length
     * says, and nearer than a neighbour that differs in two letters ("q_a_proj") */
    while (head < small && found[head] == meant[head]) head++;
    while (tail < small - head && found[n - 1 - tail] == meant[m - 1 - tail]) tail++;
    if (head + tail == small && small * 2 > large) return 2;
    if (large - small > 6) return UINT_MAX;
    d = 2 + edit_distance(found, n, meant, m);
    return d <= 8 && d * 3 < large ? d : UINT_MAX;
}

/* The name in the table that `name` is nearest to, under c; "" when none is near. */
static void nearest_name(char out[DSPARK__NAME_MAX], const char *name, const dspark_config *c)
{
    const char *s = strncmp(name, "model.", 6) ? name : name + 6;
    unsigned best = UINT_MAX;
    uint32_t n_layers = c->n_layers;

    out[0] = '\0';
    for (size_t i = 0; i < TABLE_ROWS; i++) {
        uint32_t n = table[i].where == PER_LAYER ? n_layers
                     : table[i].where == PER_TAP ? c->n_taps
                                                 : 1;
        if (why_not_here(&table[i], c)) continue;
        for (uint32_t index = 0; index < n; index++) {
            dspark__name candidate;
            unsigned d;
            memset(&candidate, 0, sizeof candidate);
            accept_name(&candidate, &table[i], index, "weight");
            d = dspark__name_distance(s, candidate.canonical);
            if (d >= best) continue;
            best = d;
            memcpy(out, candidate.canonical, DSPARK__NAME_MAX);
        }
    }
}

/* ---- the stream ------------------------------------------------------------------------------ */

static dspark_status refuse_name(const dspark_tensor *t, const dspark__name *n,
                                 const dspark_config *c, dspark_error *err)
{
    char where[256], meant[DSPARK__NAME_MAX];

    snprintf(where, sizeof where, "%.80s: %.160s", t->file ? t->file : "", t->name);
    if (n->kind == DSPARK__NAME_VOCAB_MAP)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, where,
                            "a map to a reduced draft vocabulary; not served");
    if (n->kind == DSPARK__NAME_PREMERGED)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, where,
                            "a pre-merged tensor (ATOM's own form); not served");
    nearest_name(meant, t->name, c);
    if (meant[0])
        return dspark__fail(err, DSPARK_EMODEL, where,
                            "an unexpected tensor: %s; was \"%s\" meant?", n->why, meant);
    return dspark__fail(err, DSPARK_EMODEL, where, "an unexpected tensor: %s", n->why);
}

dspark_status dspark__weight_stream(const dspark_checkpoint *ckpt, const dspark_config *c,
                                    dspark_status (*visit)(void *user, const dspark__arrival *a,
                                                           dspark_error *err),
                                    void *user, dspark_error *err)
{
    size_t count = dspark__checkpoint_count(ckpt);

    for (size_t i = 0; i < count; i++) {
        const dspark_tensor *t = dspark__checkpoint_at(ckpt, i);
        dspark__name n;

        dspark__name_parse(&n, t->name, c);
        if (n.kind == DSPARK__NAME_IGNORED) continue;
        if (n.kind != DSPARK__NAME_MAPPED) return refuse_name(t, &n, c, err);
        for (size_t k = 0; k < n.n_arrivals; k++) {
            dspark_status st;
            n.arrivals[k].tensor = t;
            if ((st = visit(user, &n.arrivals[k], err)) != DSPARK_OK) return st;
        }
    }
    return DSPARK_OK;
}
