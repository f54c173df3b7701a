/* See quantize_plan.h: the texts of the output: config.json's quantization_config as the library of
 * compressed-tensors or ModelOpt writes it, hf_quant_config.json, the index. What is quantised is said
 * the way that cannot be misread: every linear layer is a target, and each one that is kept is listed
 * by its name. Activations are left to whoever runs the model: dynamic where the format asks for it. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "ckpt/json.h"
#include "ckpt/stage.h"
#include "quant/quantize_plan.h"

#define JSON_DEPTH 32
#define TEXT_FLAGS (JSON_INDENT(2))

typedef struct format_text {
    const char *format;   /* of compressed-tensors */
    const char *type, *strategy;
    int bits, group;      /* group 0: null */
    const char *scale_dtype;
    const char *activations; /* strategy of dynamic activations; NULL: none */
} format_text;

static const format_text texts[DSPARK_FORMAT_COUNT] = {
    [DSPARK_FORMAT_FP8_TENSOR] = {"float-quantized", "float", "tensor", 8, 0, NULL, "token"},
    [DSPARK_FORMAT_FP8_CHANNEL] = {"float-quantized", "float", "channel", 8, 0, NULL, "token"},
    [DSPARK_FORMAT_FP8_BLOCK] = {"float-quantized", "float", "block", 8, 0, NULL, "group"},
    [DSPARK_FORMAT_NVFP4] = {"nvfp4-pack-quantized", "float", "tensor_group", 4, 16,
                             "torch.float8_e4m3fn", NULL},
    [DSPARK_FORMAT_MXFP4] = {"mxfp4-pack-quantized", "float", "group", 4, 32, "torch.uint8", NULL},
    [DSPARK_FORMAT_MXFP8] = {"mxfp8-quantized", "float", "group", 8, 32, "torch.uint8", NULL},
    [DSPARK_FORMAT_INT8] = {"int-quantized", "int", "channel", 8, 0, NULL, "token"},
    [DSPARK_FORMAT_INT4] = {"pack-quantized", "int", "group", 4, 128, NULL, NULL},
};

/* Takes value; *bad remembers a lack of memory. */
static void put(int *bad, json_t *object, const char *key, json_t *value)
{
    if (!value || json_object_set_new(object, key, value) != 0) *bad = 1;
}

static json_t *group_of(int group)
{
    return group ? json_integer(group) : json_null();
}

static json_t *weights_json(const dspark_quantize_opts *opts, const format_text *t, int *bad)
{
    json_t *w = json_object();
    const int group = opts->group_size ? (int)opts->group_size : t->group;
    put(bad, w, "num_bits", json_integer(t->bits));
    put(bad, w, "type", json_string(t->type));
    put(bad, w, "symmetric", json_true());
    put(bad, w, "strategy", json_string(t->strategy));
    put(bad, w, "group_size", group_of(group));
    put(bad, w, "dynamic", json_false());
    if (opts->format == DSPARK_FORMAT_FP8_BLOCK)
        put(bad, w, "block_structure",
            json_pack("[ii]", (int)DSPARK__ENCODE_BLOCK, (int)DSPARK__ENCODE_BLOCK));
    if (t->scale_dtype) put(bad, w, "scale_dtype", json_string(t->scale_dtype));
    return w;
}

static json_t *activations_json(const dspark_quantize_opts *opts, const format_text *t, int *bad)
{
    json_t *a;
    const int group = opts->format == DSPARK_FORMAT_FP8_BLOCK ? (int)DSPARK__ENCODE_BLOCK : 0;
    if (!t->activations) return json_null();
    a = json_object();
    put(bad, a, "num_bits", json_integer(t->bits));
    put(bad, a, "type", json_string(t->type));
    put(bad, a, "symmetric", json_true());
    put(bad, a, "strategy", json_string(t->activations));
    put(bad, a, "group_size", group_of(group));
    put(bad, a, "dynamic", json_true());
    return a;
}

/* The linear layers that are kept, and lm_head, which the drafter shares with its target. */
static json_t *ignore_json(const dspark__quantize_plan *p, int *bad)
{
    json_t *list = json_array();
    int lm_head = 0;
    for (size_t i = 0; list && i < p->modules.n; i++) {
        const dspark__qm *m = &p->list[i];
        const dspark_tensor *w = dspark__file_module_part(m->file, "weight");
        const char *dot = strrchr(m->file->name, '.');
        if (m->kind == DSPARK__QM_QUANTISE || (!m->linear && !(w && w->rank == 2))) continue;
        lm_head |= strcmp(dot ? dot + 1 : m->file->name, "lm_head") == 0;
        if (json_array_append_new(list, json_string(m->file->name)) != 0) *bad = 1;
    }
    if (list && !lm_head && json_array_append_new(list, json_string("lm_head")) != 0) *bad = 1;
    if (!list) *bad = 1;
    return list;
}

static const char *modelopt_algo(dspark_format format)
{
    return format == DSPARK_FORMAT_NVFP4 ? "W4A16_NVFP4" : "FP8";
}

static json_t *modelopt_json(const dspark__quantize_plan *p, const dspark_quantize_opts *opts,
                             int *bad)
{
    const format_text *t = &texts[opts->format];
    json_t *q = json_object(), *group = json_object(), *w = json_object();
    put(bad, w, "dynamic", json_false());
    put(bad, w, "num_bits", json_integer(t->bits));
    put(bad, w, "type", json_string(t->type));
    if (t->group) put(bad, w, "group_size", json_integer(t->group));
    put(bad, group, "weights", w);
    put(bad, group, "targets", json_pack("[s]", "Linear"));
    put(bad, q, "config_groups", json_pack("{so}", "group_0", group));
    put(bad, q, "ignore", ignore_json(p, bad));
    put(bad, q, "quant_algo", json_string(modelopt_algo(opts->format)));
    put(bad, q, "producer", json_pack("{ssss}", "name", "dspark", "version", DSPARK_VERSION_STRING));
    put(bad, q, "quant_method", json_string("modelopt"));
    return q;
}

static json_t *compressed_json(const dspark__quantize_plan *p, const dspark_quantize_opts *opts,
                               int *bad)
{
    const format_text *t = &texts[opts->format];
    json_t *q = json_object(), *group = json_object();
    put(bad, group, "targets", json_pack("[s]", "Linear"));
    put(bad, group, "weights", weights_json(opts, t, bad));
    put(bad, group, "input_activations", activations_json(opts, t, bad));
    put(bad, group, "output_activations", json_null());
    put(bad, group, "format", json_string(t->format));
    put(bad, q, "config_groups", json_pack("{so}", "group_0", group));
    put(bad, q, "format", json_string(t->format));
    put(bad, q, "ignore", ignore_json(p, bad));
    put(bad, q, "kv_cache_scheme", json_null());
    put(bad, q, "quant_method", json_string("compressed-tensors"));
    put(bad, q, "quantization_status", json_string("compressed"));
    return q;
}

dspark_status dspark__quantize_config_text(char **out, const dspark__quantize_plan *p,
                                           const dspark_quantize_opts *opts, dspark_error *err)
{
    json_t *config = NULL, *inner, *q;
    int bad = 0;
    dspark_status st;

    *out = NULL;
    st = dspark__json_load(&config, p->config_text, p->n_config_text, JSON_DEPTH, "config.json", err);
    if (st != DSPARK_OK) return st;
    json_object_del(config, "quantization_config");
    json_object_del(config, "compression_config");
    inner = json_object_get(config, "text_config");
    if (json_is_object(inner)) json_object_del(inner, "quantization_config");
    if (opts->format != DSPARK_FORMAT_BF16) {
        q = opts->layout == DSPARK_LAYOUT_MODELOPT ? modelopt_json(p, opts, &bad)
                                                   : compressed_json(p, opts, &bad);
        put(&bad, config, "quantization_config", q);
    }
    if (!bad) *out = dspark__json_text(config, TEXT_FLAGS);
    json_decref(config);
    return *out ? DSPARK_OK : dspark__fail_nomem(err, "config.json", p->n_config_text);
}

char *dspark__quantize_modelopt_text(const dspark__quantize_plan *p,
                                     const dspark_quantize_opts *opts)
{
    json_t *root = json_object(), *q = json_object();
    char *text = NULL;
    int bad = !root || !q;
    put(&bad, q, "quant_algo", json_string(modelopt_algo(opts->format)));
    put(&bad, q, "kv_cache_quant_algo", json_null());
    if (texts[opts->format].group)
        put(&bad, q, "group_size", json_integer(texts[opts->format].group));
    put(&bad, q, "exclude_modules", ignore_json(p, &bad));
    put(&bad, root, "producer",
        json_pack("{ssss}", "name", "dspark", "version", DSPARK_VERSION_STRING));
    put(&bad, root, "quantization", q);
    if (!bad) text = dspark__json_text(root, TEXT_FLAGS);
    json_decref(root);
    return text;
}

char *dspark__quantize_index_text(const dspark__quantize_plan *p)
{
    json_t *map = json_object(), *meta = json_object(), *root = json_object();
    char *text = NULL;
    int bad = !map || !meta || !root;

    for (size_t i = 0; i < p->modules.n && !bad; i++) {
        const dspark__qm *m = &p->list[i];
        char file[DSPARK__STAGE_NAME_BYTES], name[DSPARK__QM_NAME_BYTES];
        dspark__stage_shard_name(file, m->shard, p->n_shards);
        for (uint32_t o = 0; o < m->n_outputs; o++) {
            dspark__quantize_tensor_name(name, m, &m->outputs[o]);
            put(&bad, map, name, json_string(file));
        }
    }
    put(&bad, meta, "total_size", json_integer((json_int_t)p->total_bytes));
    put(&bad, root, "metadata", meta);
    put(&bad, root, "weight_map", map);
    if (!bad) text = dspark__json_text(root, TEXT_FLAGS | JSON_SORT_KEYS);
    json_decref(root);
    return text;
}
