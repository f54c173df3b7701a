/* What a directory holds, told from keys of its config and from tensor names. Rules in order of how
 * sure they are; the first that fits wins. Reads no tensor data and judges no K3 drafter in detail:
 * that is the roster's work. */
#include "ckpt/family.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "ckpt/json.h"

/* Names of the first tensor of each kind, NULL when there is none. */
typedef struct evidence {
    const json_t *config;     /* NULL: none, or not JSON */
    const char *model_type;   /* "" when absent */
    const char *architecture; /* the first one, "" when absent */
    size_t n_tensors;
    const char *mla, *gqa, *markov, *k3, *deepspec, *premerged, *mtp, *nextn, *midlayer, *gate;
    const char *vocab_map, *lm_head, *embed;
    uint32_t n_layers; /* 1 + largest layer index */
    int prefixed;
} evidence;

/* ---- gathering ------------------------------------------------------------------------------- */

static void keep_first(const char **slot, const char *name)
{
    if (!*slot) *slot = name;
}

static int starts(const char *s, const char *with)
{
    return !strncmp(s, with, strlen(with));
}

static void count_layer(evidence *e, const char *bare)
{
    uint32_t index = 0;

    if (!starts(bare, "layers.")) return;
    for (const char *p = bare + 7; *p >= '0' && *p <= '9' && index < 1000000; p++)
        index = index * 10 + (uint32_t)(*p - '0');
    if (index + 1 > e->n_layers) e->n_layers = index + 1;
}

static void gather_name(evidence *e, const char *name)
{
    const char *bare = starts(name, "model.") ? name + 6 : name;

    if (bare != name) e->prefixed = 1;
    count_layer(e, bare);
    if (strstr(name, ".kv_a_proj_with_mqa.")) keep_first(&e->mla, name);
    if (strstr(name, ".self_attn.q_proj.") || strstr(name, ".self_attn.k_proj.") ||
        strstr(name, ".self_attn.v_proj."))
        keep_first(&e->gqa, name);
    if (starts(bare, "markov_head.")) keep_first(&e->markov, name);
    if (starts(bare, "context_proj.")) keep_first(&e->k3, name);
    if (starts(bare, "fc.") || starts(bare, "hidden_norm.")) keep_first(&e->deepspec, name);
    if (starts(bare, "context_kv_proj.") || strstr(name, ".fused_qkv_a_proj."))
        keep_first(&e->premerged, name);
    if (starts(bare, "mtp.")) keep_first(&e->mtp, name);
    if (strstr(name, ".eh_proj.") || strstr(name, ".mtp_block.")) keep_first(&e->nextn, name);
    if (starts(bare, "midlayer.")) keep_first(&e->midlayer, name);
    if (strstr(name, ".self_attn.g_proj.")) keep_first(&e->gate, name);
    if (!strcmp(bare, "d2t") || !strcmp(bare, "t2d")) keep_first(&e->vocab_map, name);
    if (starts(bare, "lm_head.")) keep_first(&e->lm_head, name);
    if (starts(bare, "embed_tokens.")) keep_first(&e->embed, name);
}

static const char *key_string(const evidence *e, const char *key)
{
    const char *s = e->config ? json_string_value(json_object_get(e->config, key)) : NULL;
    return s ? s : "";
}

static int has_key(const evidence *e, const char *key)
{
    const json_t *v = e->config ? json_object_get(e->config, key) : NULL;
    return v && !json_is_null(v);
}

static int key_true(const evidence *e, const char *key)
{
    return e->config && json_is_true(json_object_get(e->config, key));
}

static json_int_t key_int(const evidence *e, const char *key)
{
    return e->config ? json_integer_value(json_object_get(e->config, key)) : 0;
}

static void gather(evidence *e, const json_t *config, const dspark_checkpoint *ckpt)
{
    const char *first;

    memset(e, 0, sizeof *e);
    e->config = config;
    e->model_type = key_string(e, "model_type");
    first = config ? json_string_value(json_array_get(json_object_get(config, "architectures"), 0))
                   : NULL;
    e->architecture = first ? first : "";
    e->n_tensors = ckpt ? dspark__checkpoint_count(ckpt) : 0;
    for (size_t i = 0; i < e->n_tensors; i++) gather_name(e, dspark__checkpoint_at(ckpt, i)->name);
}

/* ---- verdicts -------------------------------------------------------------------------------- */

static void settle(dspark__family_report *out, dspark__family family, const char *fmt, ...)
    DSPARK__PRINTF(3, 4);

static void settle(dspark__family_report *out, dspark__family family, const char *fmt, ...)
{
    static const char *const ids[] = {"k3_dspark", "k3_nemo",     "atom_k3_dspark", "qwen3_dspark",
                                      "dflash",    "speculators", "deepseek_v4",    "eagle",
                                      "mtp",       "target",      "unknown"};
    dspark_error shown;
    char text[512];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    /* hostile names and strings: let the error printer make them harmless */
    dspark__fail(&shown, DSPARK_OK, "", "%s", text);
    memcpy(out->text, shown.message, sizeof out->text);
    out->family = family;
    out->id = ids[family];
}

/* Is `key` this integer? */
static int is_int(const evidence *e, const char *key, json_int_t value)
{
    return key_int(e, key) == value;
}

static int taps_are(const evidence *e, const int *ids, size_t n)
{
    const json_t *list = e->config ? json_object_get(e->config, "target_layer_ids") : NULL;

    if (json_array_size(list) != n) return 0;
    for (size_t i = 0; i < n; i++)
        if (json_integer_value(json_array_get(list, i)) != ids[i]) return 0;
    return 1;
}

/* Which of the published drafters has this geometry. */
static const char *k3_variant(const evidence *e)
{
    static const int inferact[] = {2, 23, 47, 71, 89}, lightseek[] = {7, 31, 47, 63, 87};

    if (!is_int(e, "hidden_size", 7168) || !is_int(e, "intermediate_size", 14336) ||
        !is_int(e, "num_hidden_layers", 5) || !is_int(e, "q_lora_rank", 1536) ||
        !is_int(e, "kv_lora_rank", 512) || !is_int(e, "qk_nope_head_dim", 128) ||
        !is_int(e, "qk_rope_head_dim", 64) || !is_int(e, "v_head_dim", 128) ||
        !is_int(e, "vocab_size", 163840))
        return "custom";
    if (is_int(e, "num_attention_heads", 96))
        return is_int(e, "markov_rank", 512) ? "kimi-k3.1-pro" : "custom";
    if (!is_int(e, "num_attention_heads", 64) || !is_int(e, "markov_rank", 256)) return "custom";
    if (key_true(e, "fc_norm")) return taps_are(e, lightseek, 5) ? "lightseek" : "custom";
    if (!taps_are(e, inferact, 5)) return "custom";
    if (is_int(e, "block_size", 5)) return "kimi-k3-block5";
    return !has_key(e, "block_size") || is_int(e, "block_size", 7) ? "kimi-k3" : "custom";
}

static void contradict(dspark__family_report *out, const char *foreign)
{
    out->contradiction = 1;
    snprintf(out->foreign, sizeof out->foreign, "%.150s", foreign);
}

/* DSparkDraftModel is the class with q, k and v projections: it outweighs a model_type. */
static int is_k3_config(const evidence *e)
{
    if (!strcmp(e->architecture, "DSparkDraftModel")) return 0;
    return !strcmp(e->model_type, "k3_dspark") || starts(e->architecture, "K3DSpark");
}

/* K3's own family and the two that look like it. Returns 1 when settled. */
static int try_k3(dspark__family_report *out, const evidence *e)
{
    int by_config = is_k3_config(e);
    int by_names = e->mla && (e->k3 || (e->deepspec && e->markov));
    const char *other = NULL;

    if (!strcmp(e->model_type, "atom_k3_dspark") || starts(e->architecture, "AtomK3DSpark") ||
        (e->premerged && (by_config || e->markov))) {
        settle(out, DSPARK__FAMILY_ATOM,
               "ATOM's native form of a K3 DSpark drafter: projections "
               "are stored pre-merged (%s). Not the plain checkpoint that this library reads; the "
               "checkpoint it was made from can be used.",
               e->premerged ? e->premerged : "model_type atom_k3_dspark");
        return 1;
    }
    if (!by_config && !by_names) return 0;
    if (key_true(e, "mla_use_nope"))
        other = "mla_use_nope is true";
    else if (key_true(e, "mla_use_output_gate"))
        other = "mla_use_output_gate is true";
    else if (e->gate)
        other = e->gate;
    else if (!strcmp(key_string(e, "hidden_act"), "situ"))
        other = "hidden_act is situ";
    else if (e->config && !by_config && !e->k3 && *e->model_type &&
             !starts(e->architecture, "DSparkDraftModel"))
        other = e->deepspec;
    if (other) {
        settle(out, DSPARK__FAMILY_K3_NEMO,
               "A K3 MLA drafter in NeMo's training form (%s): rotary "
               "dims unrotated, output gate or SiTU. Similar names, other mathematics; not a "
               "k3_dspark checkpoint.",
               other);
        return 1;
    }
    if (!by_config && e->config) return 0; /* another family's config over these tensors */
    out->variant = e->config ? k3_variant(e) : "custom";
    out->dialect = e->deepspec && !e->k3 ? "deepspec" : "k3";
    if (e->gqa && !e->mla) {
        contradict(out, e->gqa);
        settle(out, DSPARK__FAMILY_K3_DSPARK,
               "The config says k3_dspark (MLA), the tensors are "
               "those of a drafter with q, k and v projections (GQA): \"%.150s\" does not belong. "
               "Not usable as either.",
               e->gqa);
    } else if (!e->config) {
        settle(out, DSPARK__FAMILY_K3_DSPARK,
               "Tensor names are those of a K3 DSpark MLA drafter "
               "(%.150s), but there is no readable config.json beside them.",
               e->mla);
    } else {
        settle(out, DSPARK__FAMILY_K3_DSPARK,
               "K3 DSpark MLA drafter (%s; %s names%s). Not a target "
               "model and not a GQA drafter.",
               out->variant, out->dialect, e->prefixed ? ", prefix \"model.\"" : "");
    }
    return 1;
}

static int is_known_target(const char *type)
{
    static const char *const types[] = {
        "kimi_k3",      "kimi_k25", "kimi_k2",   "kimi_linear", "deepseek_v2", "deepseek_v3",
        "deepseek_v32", "llama",    "llama4",    "mistral",     "mixtral",     "qwen2",
        "qwen2_moe",    "qwen3",    "qwen3_moe", "qwen3_next",  "glm4",        "glm4_moe",
        "gpt_oss",      "gemma2",   "gemma3",    "phi3",        "minimax_m2",
    };

    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (!strcmp(type, types[i])) return 1;
    return 0;
}

static int try_drafters(dspark__family_report *out, const evidence *e)
{
    int has_dspark = strstr(e->architecture, "DSpark") != NULL;
    int fc_drafter = e->deepspec && (e->gqa || !e->mla);

    if (has_dspark || e->markov || has_key(e, "markov_rank")) {
        if (e->mla) contradict(out, e->mla);
        settle(
            out, DSPARK__FAMILY_QWEN3_DSPARK,
            e->mla
                ? "The config is that of a Qwen3-style DSpark drafter (%.60s%s%.60s), the tensors "
                  "are those of an MLA drafter: \"%.150s\" does not belong. Not usable as either."
                : "A Qwen3-style DSpark drafter: %.60s%s%.60s, grouped-query attention (%.150s). "
                  "Not "
                  "K3's MLA drafter; not served.",
            *e->architecture ? e->architecture : "no architecture",
            *e->model_type ? ", model_type " : "", e->model_type,
            e->mla   ? e->mla
            : e->gqa ? e->gqa
                     : "no tensors read");
        return 1;
    }
    if (strstr(e->architecture, "DFlash") || has_key(e, "dflash_config")) {
        settle(out, DSPARK__FAMILY_DFLASH,
               "A DFlash drafter (%.60s): block drafting without a "
               "Markov head. Not a K3 DSpark drafter; not served.",
               *e->architecture ? e->architecture : "dflash_config");
        return 1;
    }
    if (strstr(e->architecture, "Eagle") || strstr(e->architecture, "EAGLE") ||
        strstr(e->model_type, "eagle") || e->midlayer ||
        (e->vocab_map && (e->deepspec || e->n_layers <= 2))) {
        settle(out, DSPARK__FAMILY_EAGLE,
               "An EAGLE drafter (%.150s): one token after the other. Not "
               "a K3 DSpark drafter; not served.",
               e->midlayer        ? e->midlayer
               : *e->architecture ? e->architecture
               : e->vocab_map     ? e->vocab_map
                                  : e->model_type);
        return 1;
    }
    if (fc_drafter) {
        settle(out, DSPARK__FAMILY_DFLASH,
               "A drafter with fc and no Markov head (%.150s), as "
               "DFlash has. Not a K3 DSpark drafter; not served.",
               e->deepspec);
        return 1;
    }
    if (e->mtp || e->nextn || strstr(e->architecture, "MTP") || strstr(e->architecture, "NextN") ||
        strstr(e->model_type, "mtp")) {
        settle(out, DSPARK__FAMILY_MTP,
               "Multi-token-prediction heads (%.150s): a serial drafter, or "
               "a target that carries one. Not a K3 DSpark drafter; not served.",
               e->mtp             ? e->mtp
               : e->nextn         ? e->nextn
               : *e->architecture ? e->architecture
                                  : e->model_type);
        return 1;
    }
    return 0;
}

static void detect(dspark__family_report *out, const evidence *e)
{
    const char *spec = key_string(e, "speculators_model_type");

    if (*spec || has_key(e, "speculators_config")) {
        settle(out, DSPARK__FAMILY_SPECULATORS,
               "A drafter in the speculators format "
               "(speculators_model_type %.60s). Not K3's own checkpoint form; not served.",
               *spec ? spec : "absent");
        return;
    }
    if (starts(e->model_type, "deepseek_v4") || starts(e->architecture, "DeepseekV4")) {
        settle(out, DSPARK__FAMILY_DEEPSEEK_V4,
               "DeepSeek-V4 (model_type %.60s%s%.150s), with or "
               "without its own drafter. Another architecture than K3's MLA drafter; not served.",
               *e->model_type ? e->model_type : "absent", e->mtp ? ", tensors " : "",
               e->mtp ? e->mtp : "");
        return;
    }
    if (try_k3(out, e) || try_drafters(out, e)) return;
    if ((is_known_target(e->model_type) || has_key(e, "text_config") ||
         (e->lm_head && e->embed && e->n_layers >= 2)) &&
        !has_key(e, "target_layer_ids")) {
        settle(out, DSPARK__FAMILY_TARGET,
               "A target model, not a drafter (model_type %.60s, "
               "%u layers in the files, no target_layer_ids).",
               *e->model_type ? e->model_type : "absent", e->n_layers);
        return;
    }
    settle(out, DSPARK__FAMILY_UNKNOWN,
           "Not a drafter that is known here (model_type %.60s, "
           "architecture %.60s, %zu tensors, no MLA drafter's names among them).",
           *e->model_type ? e->model_type : "absent", *e->architecture ? e->architecture : "absent",
           e->n_tensors);
}

dspark_status dspark__family_detect(dspark__family_report *out, const char *config_text,
                                    size_t n_config, const dspark_checkpoint *ckpt,
                                    dspark_error *err)
{
    json_t *config = NULL;
    evidence e;

    memset(out, 0, sizeof *out);
    if (config_text) {
        /* a config that is not JSON is no evidence; whoever reads it says what is wrong */
        dspark_status st =
            dspark__json_load(&config, config_text, n_config, 32, "config.json", err);
        if (st == DSPARK_ENOMEM) return st;
        if (st != DSPARK_OK) dspark__error_clear(err);
    }
    gather(&e, config, ckpt);
    detect(out, &e);
    out->model_prefix = e.prefixed;
    json_decref(config);
    return DSPARK_OK;
}

dspark_status dspark__family_gate(const dspark__family_report *report, const char *where,
                                  dspark_error *err)
{
    if (report->contradiction) return dspark__fail(err, DSPARK_EMODEL, where, "%s", report->text);
    if (report->family == DSPARK__FAMILY_K3_DSPARK) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EUNSUPPORTED, where, "%s", report->text);
}
