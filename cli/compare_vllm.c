/* dspark compare --vllm-compat: opens the model once more with vLLM's merge of quantised shards and
 * measures how its entries part from the exact ones. One scale for all shards hardly reaches the
 * latent, which is normed behind it; the rope key takes it whole.
 * Never judges: the exit code belongs to the ways that must give the same bits. */
#include "compare_vllm.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "compare_error.h"
#include "numbers.h"
#include "open_model.h"
#include "out.h"

/* Rows in a call, so that Ctrl-C is heard. */
#define PIECE_ROWS 256
#define PIECE_ROWS_REF 32

/* bf16 numbers in order: equal for both zeros. */
static int32_t bf16_rank(const unsigned char *bytes)
{
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
    return half & 0x8000 ? -(int32_t)(half & 0x7fff) : (int32_t)half;
}

static void measure_part(vllm_part *out, const unsigned char *exact, const unsigned char *other,
                         size_t n, size_t width, size_t from, size_t to)
{
    double exact_squares = 0, other_squares = 0;
    size_t i, k;
    memset(out, 0, sizeof *out);
    out->n_values = (uint64_t)n * (to - from);
    for (i = 0; i < n; i++) {
        for (k = from; k < to; k++) {
            const unsigned char *x = exact + 2 * (i * width + k), *y = other + 2 * (i * width + k);
            double a = number_bf16(x), b = number_bf16(y);
            int64_t ulp = (int64_t)bf16_rank(y) - bf16_rank(x);
            if (ulp < 0) ulp = -ulp;
            out->n_differ += memcmp(x, y, 2) != 0;
            if ((uint64_t)ulp > out->max_ulp) out->max_ulp = (uint64_t)ulp;
            exact_squares += a * a;
            other_squares += b * b;
        }
    }
    out->rms_ratio = exact_squares > 0 ? sqrt(other_squares / exact_squares) : (double)NAN;
}

static dspark_status open_merged(dspark_model **model, const compare_vllm_rows *rows,
                                 dspark_error *err)
{
    dspark_model_opts opts;
    dspark_model_opts_init(&opts);
    opts.parts = DSPARK_PART_CONTEXT;
    opts.n_threads = rows->n_threads;
    opts.vllm_compat = 1;
    return open_model(model, rows->checkpoint, &opts, "packing as vLLM", err);
}

static dspark_status run_rows(dspark_context *context, const compare_vllm_rows *rows, size_t h,
                              size_t most, const dspark_cache_view *view, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    size_t first;
    for (first = 0; st == DSPARK_OK && first < rows->n; first += most) {
        dspark_batch batch;
        dspark_batch_init(&batch);
        batch.n_tokens = rows->n - first < most ? rows->n - first : most;
        batch.states = rows->states + first * h * 2;
        batch.positions = rows->positions + first;
        batch.slots = rows->slots + first;
        batch.first_row = first;
        st = dspark_context_run(context, &batch, view, NULL, err);
        if (st == DSPARK_OK) st = out_check_interrupt(err);
    }
    return st;
}

/* ---- what vLLM makes of the formats ---- */

static const char *scheme_of(const json_t *linears, uint32_t layer, const char *name, uint64_t *rows)
{
    const json_t *linear;
    char want[96];
    size_t i;
    snprintf(want, sizeof want, "layers.%u.self_attn.%s", layer, name);
    json_array_foreach(linears, i, linear) {
        const char *found = json_string_value(json_object_get(linear, "name"));
        if (!found || strcmp(found, want) != 0) continue;
        *rows = (uint64_t)json_integer_value(json_object_get(linear, "rows"));
        return json_string_value(json_object_get(linear, "scheme"));
    }
    return NULL; /* a checkpoint of context KV only has no q_a_proj */
}

/* "nvfp4_ct in 4, bf16 in 1" */
static void describe_layers(compare_vllm *out, const char *const *schemes)
{
    size_t used = 0;
    uint32_t l, k, n;
    for (l = 0; l < out->n_layers; l++) {
        for (k = 0; k < l && strcmp(schemes[k], schemes[l]) != 0; k++) continue;
        if (k < l || used >= sizeof out->merged) continue;
        for (n = 0; k < out->n_layers; k++) n += strcmp(schemes[k], schemes[l]) == 0;
        used += (size_t)snprintf(out->merged + used, sizeof out->merged - used, "%s%s in %u",
                                 used ? ", " : "", schemes[l], n);
    }
}

/* vLLM chooses one scheme for all layers' kv_a_proj_with_mqa and one for a layer's q_a_proj with it; blocks of
 * rows must end where a layer does. */
static void judge_formats(compare_vllm *out, const json_t *linears)
{
    const char *schemes[DSPARK_MAX_LAYERS];
    uint64_t rows = 0, q_rows;
    int alike = 1;
    uint32_t l;
    for (l = 0; l < out->n_layers; l++) {
        schemes[l] = scheme_of(linears, l, "kv_a_proj_with_mqa", &rows);
        if (!schemes[l]) schemes[l] = "unknown";
        alike = alike && strcmp(schemes[l], schemes[0]) == 0;
        if (!alike)
            snprintf(out->refused, sizeof out->refused, "it reads these layers as one matrix, under one format");
    }
    describe_layers(out, schemes);
    for (l = 0; !out->refused[0] && l < out->n_layers; l++) {
        const char *q = scheme_of(linears, l, "q_a_proj", &q_rows);
        if (q && strcmp(q, schemes[l]) != 0)
            snprintf(out->refused, sizeof out->refused, "it reads q_a_proj (%s in layer %u) and "
                     "kv_a_proj_with_mqa as one matrix, under one format", q, l);
    }
    if (!out->refused[0] && out->n_layers > 1 && strcmp(schemes[0], "fp8_block") == 0 && rows % 128 != 0)
        snprintf(out->refused, sizeof out->refused, "%" PRIu64 " rows of a layer are no multiple of its blocks of "
                 "128", rows);
    out->one_scale = alike && (strncmp(schemes[0], "nvfp4", 5) == 0 || strcmp(schemes[0], "fp8_tensor") == 0);
}

static dspark_status read_formats(compare_vllm *out, const char *checkpoint, dspark_error *err)
{
    dspark_inspection *in = NULL;
    json_t *doc;
    dspark_status st = dspark_inspect(&in, checkpoint, NULL, err);
    if (st != DSPARK_OK) return st;
    doc = json_loads(dspark_inspection_json(in), 0, NULL);
    if (doc)
        judge_formats(out, json_object_get(json_object_get(doc, "quantisation"), "linears"));
    else
        st = out_set_error(err, DSPARK_ENOMEM, "", "out of memory");
    json_decref(doc);
    dspark_inspection_free(in);
    return st;
}

dspark_status compare_vllm_run(compare_vllm *out, const compare_vllm_rows *rows,
                               const dspark_cache_view *exact, dspark_error *err)
{
    size_t most = rows->isa == DSPARK_ISA_REF ? PIECE_ROWS_REF : PIECE_ROWS, width, latent;
    dspark_model *model = NULL;
    dspark_context *context = NULL;
    dspark_cache *cache = NULL;
    const dspark_config *config;
    const dspark_cache_view *view;
    dspark_context_opts opts;
    dspark_status st;
    uint32_t l;
    memset(out, 0, sizeof *out);
    if (rows->n < most) most = rows->n;
    if ((st = open_merged(&model, rows, err)) != DSPARK_OK) goto done;
    config = dspark_model_config(model);
    dspark_context_opts_init(&opts);
    opts.isa = rows->isa;
    opts.n_threads = rows->n_threads;
    opts.max_tokens = (uint32_t)most;
    if ((st = dspark_context_create(&context, model, &opts, err)) != DSPARK_OK) goto done;
    st = dspark_cache_create(&cache, model, DSPARK_CACHE_BF16, 1, rows->n, NULL, err);
    if (st != DSPARK_OK) goto done;
    view = dspark_cache_get_view(cache);
    st = run_rows(context, rows, config->hidden_size, most, view, err);
    if (st != DSPARK_OK) goto done;
    out->n_layers = config->n_layers;
    if ((st = read_formats(out, rows->checkpoint, err)) != DSPARK_OK) goto done;
    width = dspark_model_entry_width(model);
    latent = config->kv_lora_rank;
    for (l = 0; l < config->n_layers; l++) {
        const void *x = exact->layers[l], *y = view->layers[l];
        measure_part(&out->latent[l], x, y, rows->n, width, 0, latent);
        measure_part(&out->rope[l], x, y, rows->n, width, latent, width);
    }
done:
    dspark_cache_free(cache);
    dspark_context_free(context);
    dspark_model_close(model);
    return st;
}

static uint64_t count_different(const compare_vllm *r)
{
    uint64_t n = 0;
    uint32_t l;
    for (l = 0; l < r->n_layers; l++) n += r->latent[l].n_differ + r->rope[l].n_differ;
    return n;
}

/* What was compared, and what vLLM would do with it. */
static void print_merge(const compare_vllm *r)
{
    printf("  kv_a_proj_with_mqa of %u layers: %s\n", r->n_layers, r->merged);
    if (r->refused[0]) printf("  vLLM would not load this checkpoint: %s\n", r->refused);
    printf("  %s: ", r->one_scale ? "of such formats vLLM keeps one scale"
                   : r->refused[0] ? "nothing to merge was found" : "exact: every row keeps its own scales, if any");
}

int compare_vllm_print(const compare_vllm *r)
{
    out_table t;
    uint32_t l;
    int part;
    printf("\nvLLM's merge against the exact one (inexact, for comparing; it decides nothing):\n");
    print_merge(r);
    if (!count_different(r)) {
        printf("the same bits on these rows\n");
        return 0;
    }
    printf("other entries\n");
    out_table_init(&t, "llrrrr");
    out_table_cell(&t, "layer");
    out_table_cell(&t, "part");
    out_table_cell(&t, "differ");
    out_table_cell(&t, "of");
    out_table_cell(&t, "max ulp");
    out_table_cell(&t, "rms ratio");
    for (l = 0; l < r->n_layers; l++) {
        for (part = 0; part < 2; part++) {
            const vllm_part *p = part ? &r->rope[l] : &r->latent[l];
            out_table_cell(&t, "%u", l);
            out_table_cell(&t, part ? "rope key" : "latent");
            out_table_cell(&t, "%" PRIu64, p->n_differ);
            out_table_cell(&t, "%" PRIu64, p->n_values);
            out_table_cell(&t, "%" PRIu64, p->max_ulp);
            out_table_cell(&t, isfinite(p->rms_ratio) ? "%.6g" : "", p->rms_ratio);
        }
    }
    return out_table_print(&t, 2);
}

static json_t *json_part(const vllm_part *p, uint32_t layer, const char *name)
{
    json_t *part = json_object();
    out_set(part, "layer", json_integer(layer));
    out_set(part, "part", json_string(name));
    out_set(part, "values", json_integer((json_int_t)p->n_values));
    out_set(part, "values_different", json_integer((json_int_t)p->n_differ));
    out_set(part, "max_ulp", json_integer((json_int_t)p->max_ulp));
    out_set(part, "rms_ratio", out_real(p->rms_ratio));
    return part;
}

json_t *compare_vllm_json(const compare_vllm *r)
{
    json_t *doc = json_object(), *layers = json_array();
    uint32_t l;
    for (l = 0; l < r->n_layers; l++) {
        out_append(layers, json_part(&r->latent[l], l, "latent"));
        out_append(layers, json_part(&r->rope[l], l, "rope_key"));
    }
    out_set(doc, "merged", json_string(r->merged));
    out_set(doc, "refused", r->refused[0] ? json_string(r->refused) : json_null());
    out_set(doc, "values_different", json_integer((json_int_t)count_different(r)));
    out_set(doc, "layers", layers);
    return doc;
}
