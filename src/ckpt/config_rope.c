/* The rotary part of config.json: rope_parameters, the older rope_scaling, and rope_theta at the
 * top level. Absent, null and {"rope_type": "default"} are plain RoPE; an unknown type is an
 * error. */
#include <string.h>

#include "ckpt/config_value.h"

/* The effective values of one place. */
typedef struct rope_values {
    dspark_rope_type type;
    int has_theta;
    double theta;
    double factor, beta_fast, beta_slow, mscale, mscale_all_dim, extrapolation_factor, attn_factor;
    uint64_t original_max_positions;
} rope_values;

static const char *const known_keys[] = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "extrapolation_factor",
    "attn_factor",
    "apply_yarn_scaling",
    "attention_factor",
    "truncate",
    "partial_rotary_factor",
    "mrope_section",
};

static dspark_status note_unknown_keys(const dspark__cfg *g)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)g->object, key, value)
    {
        size_t i, n = sizeof known_keys / sizeof *known_keys;
        dspark_status st;
        for (i = 0; i < n && strcmp(key, known_keys[i]); i++) {
        }
        if (i < n) continue;
        st = dspark__cfg_note(g, "%s%.80s is not known here and is ignored", g->prefix, key);
        if (st != DSPARK_OK) return st;
    }
    return DSPARK_OK;
}

static dspark_status read_type(const dspark__cfg *g, dspark_rope_type *out)
{
    const char *type = NULL, *old = NULL;
    dspark_status st;

    if ((st = dspark__cfg_string(g, "rope_type", &type)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_string(g, "type", &old)) != DSPARK_OK) return st;
    if (type && old && strcmp(type, old))
        return dspark__cfg_fail(g, DSPARK_EMODEL, "rope_type",
                                "\"%.40s\" here and \"%.40s\" in %stype contradict each other",
                                type, old, g->prefix);
    if (!type) type = old;
    if (!type) {
        /* a scaling without a name: no reading of it is safe */
        if (dspark__cfg_get(g, "factor"))
            return dspark__cfg_fail(g, DSPARK_EMODEL, "rope_type",
                                    "the key is missing although a factor is given");
        *out = DSPARK_ROPE_DEFAULT;
        return DSPARK_OK;
    }
    if (!strcmp(type, "default")) {
        *out = DSPARK_ROPE_DEFAULT;
    } else if (!strcmp(type, "yarn") || !strcmp(type, "deepseek_yarn")) {
        *out = DSPARK_ROPE_YARN;
    } else {
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "rope_type",
                                "\"%.60s\" is not served; known are default, yarn and "
                                "deepseek_yarn",
                                type);
    }
    return DSPARK_OK;
}

/* Switches that ask for other mathematics. */
static dspark_status refuse_variants(const dspark__cfg *g)
{
    dspark_status st;
    int flag = 1;
    double partial = 1.0;

    if ((st = dspark__cfg_bool(g, "apply_yarn_scaling", &flag, NULL)) != DSPARK_OK) return st;
    if (!flag)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "apply_yarn_scaling",
                                "false selects another scaling, which is not served");
    if ((st = dspark__cfg_bool(g, "truncate", &flag, NULL)) != DSPARK_OK) return st;
    if (!flag)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "truncate",
                                "false (correction range not rounded) is not served");
    if (dspark__cfg_get(g, "attention_factor"))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "attention_factor",
                                "a fixed attention factor is not served; mscale and "
                                "mscale_all_dim are");
    if (dspark__cfg_get(g, "mrope_section"))
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "mrope_section",
                                "multi-axis positions are not served");
    st = dspark__cfg_real(g, "partial_rotary_factor", 0.0, 1.0, &partial, NULL);
    if (st != DSPARK_OK) return st;
    if (partial != 1.0)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "partial_rotary_factor",
                                "%g is not served; qk_rope_head_dim says what is rotated", partial);
    return DSPARK_OK;
}

static dspark_status read_yarn(const dspark__cfg *g, rope_values *v)
{
    dspark_status st;
    int64_t original = 0;
    int there = 0, fast = 0, slow = 0, all = 0, m = 0;

    if ((st = dspark__cfg_real(g, "factor", 1.0, 1e6, &v->factor, &there)) != DSPARK_OK) return st;
    if (!there)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "factor",
                                "the key is missing, and yarn needs it");
    st = dspark__cfg_int(g, "original_max_position_embeddings", 1, (int64_t)DSPARK__MAX_POSITIONS,
                         &original, &there);
    if (st != DSPARK_OK) return st;
    if (!there)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "original_max_position_embeddings",
                                "the key is missing, and yarn needs it");
    v->original_max_positions = (uint64_t)original;
    st = dspark__cfg_real(g, "beta_fast", 1e-6, 1e6, &v->beta_fast, &fast);
    if (st != DSPARK_OK) return st;
    st = dspark__cfg_real(g, "beta_slow", 1e-6, 1e6, &v->beta_slow, &slow);
    if (st != DSPARK_OK) return st;
    if (!fast || !slow) {
        st = dspark__cfg_note(g, "%sbeta_fast and beta_slow are not both given: %g and %g",
                              g->prefix, v->beta_fast, v->beta_slow);
        if (st != DSPARK_OK) return st;
    }
    if (v->beta_fast < v->beta_slow)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "beta_fast", "%g is less than beta_slow %g",
                                v->beta_fast, v->beta_slow);
    if ((st = dspark__cfg_real(g, "mscale", 0.0, 1e3, &v->mscale, &m)) != DSPARK_OK) return st;
    st = dspark__cfg_real(g, "mscale_all_dim", 0.0, 1e3, &v->mscale_all_dim, &all);
    if (st != DSPARK_OK) return st;
    if (!m && (st = dspark__cfg_note(g, "%smscale absent: 1", g->prefix)) != DSPARK_OK) return st;
    if (!all) {
        st = dspark__cfg_note(g,
                              "%smscale_all_dim absent: 0, so the softmax scale is not "
                              "corrected and cos and sin carry mscale alone",
                              g->prefix);
        if (st != DSPARK_OK) return st;
    }
    st = dspark__cfg_real(g, "extrapolation_factor", 0.0, 1e3, &v->extrapolation_factor, NULL);
    if (st != DSPARK_OK) return st;
    return dspark__cfg_real(g, "attn_factor", 1e-6, 1e6, &v->attn_factor, NULL);
}

static dspark_status read_place(const dspark__cfg *top, const char *prefix, const json_t *object,
                                rope_values *v)
{
    dspark__cfg g = *top;
    dspark_status st;

    memset(v, 0, sizeof *v);
    g.object = object;
    g.prefix = prefix;
    if ((st = read_type(&g, &v->type)) != DSPARK_OK) return st;
    st = dspark__cfg_real(&g, "rope_theta", 1.0 + 1e-9, 1e18, &v->theta, &v->has_theta);
    if (st != DSPARK_OK) return st;
    if ((st = refuse_variants(&g)) != DSPARK_OK) return st;
    if ((st = note_unknown_keys(&g)) != DSPARK_OK) return st;
    if (v->type != DSPARK_ROPE_YARN) return DSPARK_OK;
    v->beta_fast = 32.0;
    v->beta_slow = 1.0;
    v->mscale = 1.0;
    v->extrapolation_factor = 1.0;
    v->attn_factor = 1.0;
    return read_yarn(&g, v);
}

/* The first value in which two places differ, or NULL. A theta given in one place only agrees. */
static const char *first_difference(const rope_values *a, const rope_values *b)
{
    if (a->type != b->type) return "rope_type";
    if (a->has_theta && b->has_theta && a->theta != b->theta) return "rope_theta";
    if (a->factor != b->factor) return "factor";
    if (a->original_max_positions != b->original_max_positions)
        return "original_max_position_embeddings";
    if (a->beta_fast != b->beta_fast) return "beta_fast";
    if (a->beta_slow != b->beta_slow) return "beta_slow";
    if (a->mscale != b->mscale) return "mscale";
    if (a->mscale_all_dim != b->mscale_all_dim) return "mscale_all_dim";
    if (a->extrapolation_factor != b->extrapolation_factor) return "extrapolation_factor";
    if (a->attn_factor != b->attn_factor) return "attn_factor";
    return NULL;
}

dspark_status dspark__cfg_rope(const dspark__cfg *g)
{
    dspark_config *c = &g->doc->config;
    const json_t *now = NULL, *old = NULL;
    rope_values v, w;
    double top_theta = 0.0;
    int has_top = 0, interleave = 1;
    dspark_status st;

    memset(&v, 0, sizeof v);
    if ((st = dspark__cfg_object(g, "rope_parameters", &now)) != DSPARK_OK) return st;
    if ((st = dspark__cfg_object(g, "rope_scaling", &old)) != DSPARK_OK) return st;
    st = dspark__cfg_real(g, "rope_theta", 1.0 + 1e-9, 1e18, &top_theta, &has_top);
    if (st != DSPARK_OK) return st;
    if ((st = dspark__cfg_bool(g, "rope_interleave", &interleave, NULL)) != DSPARK_OK) return st;
    if (!interleave)
        return dspark__cfg_fail(g, DSPARK_EUNSUPPORTED, "rope_interleave",
                                "false (half-split pairs) is not served; K3 drafters rotate "
                                "interleaved pairs");
    if (now && (st = read_place(g, "rope_parameters.", now, &v)) != DSPARK_OK) return st;
    if (old) {
        if ((st = read_place(g, "rope_scaling.", old, &w)) != DSPARK_OK) return st;
        if (now) {
            const char *what = first_difference(&v, &w);
            if (what)
                return dspark__cfg_fail(g, DSPARK_EMODEL, "rope_parameters",
                                        "it contradicts rope_scaling in %s; keep one of the two",
                                        what);
            if (!v.has_theta && w.has_theta) {
                v.has_theta = 1;
                v.theta = w.theta;
            }
        } else {
            v = w;
        }
    }
    if (!now && !old) {
        st = dspark__cfg_note(g, "rope_parameters absent: plain RoPE");
        if (st != DSPARK_OK) return st;
    }
    if (v.has_theta && has_top && v.theta != top_theta)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "rope_theta", "%g contradicts %s.rope_theta %g",
                                top_theta, now ? "rope_parameters" : "rope_scaling", v.theta);
    if (!v.has_theta && !has_top)
        return dspark__cfg_fail(g, DSPARK_EMODEL, "rope_theta",
                                "the key is missing, here and in rope_parameters, and it has no "
                                "default");
    c->rope_type = v.type;
    c->rope_theta = v.has_theta ? v.theta : top_theta;
    if (v.type != DSPARK_ROPE_YARN) return DSPARK_OK;
    c->rope_factor = v.factor;
    c->rope_beta_fast = v.beta_fast;
    c->rope_beta_slow = v.beta_slow;
    c->rope_mscale = v.mscale;
    c->rope_mscale_all_dim = v.mscale_all_dim;
    c->rope_extrapolation_factor = v.extrapolation_factor;
    c->rope_attn_factor = v.attn_factor;
    c->rope_original_max_positions = v.original_max_positions;
    if ((double)c->max_positions > v.factor * (double)v.original_max_positions)
        return dspark__cfg_note(g,
                                "max_position_embeddings %llu exceeds factor * "
                                "original_max_position_embeddings = %.0f",
                                (unsigned long long)c->max_positions,
                                v.factor * (double)v.original_max_positions);
    return DSPARK_OK;
}
