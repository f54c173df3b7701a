/* quantize_compare: context entries of a checkpoint and of what it was quantised to, on the same
 * synthetic rows, against fp64 of the source. Beside each error stands the source's own, which is bf16
 * rounding alone. Opens one model at a time; judges nothing. */
#include "quantize_compare.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dump.h"
#include "out.h"
#include "progress.h"

typedef struct sample {
    dump rows;
    uint32_t n_layers, latent, width;
    int64_t positions[QUANTIZE_COMPARE_ROWS], slots[QUANTIZE_COMPARE_ROWS];
    double *exact; /* [layers][rows][width], of the source */
} sample;

/* What a context part takes in memory, from the headers; 0 when that is not known. */
static uint64_t context_bytes(const char *path)
{
    dspark_inspection *in = NULL;
    json_t *doc = NULL;
    uint64_t n = 0;
    if (dspark_inspect(&in, path, NULL, NULL) == DSPARK_OK)
        doc = json_loads(dspark_inspection_json(in), 0, NULL);
    n = (uint64_t)json_integer_value(json_object_get(
        json_object_get(json_object_get(doc, "plan"), "resident_bytes"), "total"));
    json_decref(doc);
    dspark_inspection_free(in);
    return n;
}

static int too_large(quantize_compare *out, const char *path)
{
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    const uint64_t half = pages > 0 && page > 0 ? (uint64_t)pages / 2 * (uint64_t)page : UINT64_MAX;
    const uint64_t n = context_bytes(path);
    char a[32], b[32];
    if (n <= half) return 0;
    snprintf(out->why, sizeof out->why, "the context part takes %s, more than half of this machine's "
             "memory (%s)", out_bytes(a, (double)n), out_bytes(b, (double)half));
    return 1;
}

static dspark_status make_sample(sample *s, const dspark_model *model, dspark_error *err)
{
    const dspark_config *c = dspark_model_config(model);
    size_t i;
    dspark_status st = dump_make(&s->rows, QUANTIZE_COMPARE_ROWS, 0, c, err);
    if (st != DSPARK_OK) return st;
    s->n_layers = c->n_layers;
    s->latent = c->kv_lora_rank;
    s->width = dspark_model_entry_width(model);
    s->exact = calloc((size_t)s->n_layers * QUANTIZE_COMPARE_ROWS * s->width, sizeof *s->exact);
    if (!s->exact) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for the fp64 rows");
    for (i = 0; i < QUANTIZE_COMPARE_ROWS; i++) s->positions[i] = s->slots[i] = (int64_t)i;
    return DSPARK_OK;
}

/* Entries of one checkpoint, measured. The first makes the rows and fp64. */
static dspark_status measure(sample *s, error_stats parts[][2], const char *path, uint32_t n_threads,
                             int is_source, dspark_error *err)
{
    dspark_model *model = NULL;
    dspark_context *context = NULL;
    dspark_cache *cache = NULL;
    dspark_model_opts model_opts;
    dspark_context_opts opts;
    dspark_batch batch;
    dspark_status st;
    progress bar;
    uint32_t l;
    dspark_model_opts_init(&model_opts);
    model_opts.n_threads = n_threads;
    model_opts.progress = progress_update;
    model_opts.progress_user = &bar;
    progress_start(&bar, "comparing", PROGRESS_BYTES);
    st = dspark_model_open(&model, path, &model_opts, err);
    progress_end(&bar);
    if (st != DSPARK_OK) {
        out_add_path(err, path);
        return st;
    }
    if (is_source && (st = make_sample(s, model, err)) != DSPARK_OK) goto done;
    dspark_context_opts_init(&opts);
    opts.n_threads = n_threads;
    opts.max_tokens = QUANTIZE_COMPARE_ROWS;
    if ((st = dspark_context_create(&context, model, &opts, err)) != DSPARK_OK) goto done;
    st = dspark_cache_create(&cache, model, DSPARK_CACHE_BF16, 1, QUANTIZE_COMPARE_ROWS, NULL, err);
    if (st != DSPARK_OK) goto done;
    dspark_batch_init(&batch);
    batch.n_tokens = QUANTIZE_COMPARE_ROWS;
    batch.taps = s->rows.taps;
    batch.taps_stride = s->rows.stride;
    batch.positions = s->positions;
    batch.slots = s->slots;
    st = dspark_context_run(context, &batch, dspark_cache_get_view(cache), NULL, err);
    if (st == DSPARK_OK && is_source) st = dspark_context_fp64(context, &batch, s->exact, err);
    if (st == DSPARK_OK) st = out_check_interrupt(err);
    for (l = 0; st == DSPARK_OK && l < s->n_layers; l++) {
        const double *exact = s->exact + (size_t)l * QUANTIZE_COMPARE_ROWS * s->width;
        const void *entries = dspark_cache_get_view(cache)->layers[l];
        error_measure(&parts[l][0], entries, exact, QUANTIZE_COMPARE_ROWS, s->width, 0, s->latent);
        error_measure(&parts[l][1], entries, exact, QUANTIZE_COMPARE_ROWS, s->width, s->latent,
                      s->width);
    }
done:
    dspark_cache_free(cache);
    dspark_context_free(context);
    dspark_model_close(model);
    return st;
}

dspark_status quantize_compare_run(quantize_compare *out, const char *source, const char *result,
                                   uint32_t n_threads, dspark_error *err)
{
    sample s;
    dspark_status st = DSPARK_OK;
    memset(out, 0, sizeof *out);
    memset(&s, 0, sizeof s);
    if (too_large(out, source) || too_large(out, result)) return DSPARK_OK;
    st = measure(&s, out->source, source, n_threads, 1, err);
    if (st == DSPARK_OK) st = measure(&s, out->result, result, n_threads, 0, err);
    out->n_layers = s.n_layers;
    out->done = st == DSPARK_OK;
    free(s.exact);
    dump_close(&s.rows);
    return st;
}

int quantize_compare_print(const quantize_compare *c)
{
    out_table t;
    uint32_t l;
    int part;
    if (!c->done) {
        printf("\nContext entries are not compared: %s\n", c->why);
        return 0;
    }
    printf("\nContext entries of %u synthetic rows against fp64 of the source:\n",
           QUANTIZE_COMPARE_ROWS);
    out_table_init(&t, "llrrrr");
    out_table_cell(&t, "layer");
    out_table_cell(&t, "part");
    out_table_cell(&t, "source rms");
    out_table_cell(&t, "rms rel");
    out_table_cell(&t, "max abs");
    out_table_cell(&t, "max ulp");
    for (l = 0; l < c->n_layers; l++) {
        for (part = 0; part < 2; part++) {
            const error_stats *e = &c->result[l][part];
            out_table_cell(&t, "%u", l);
            out_table_cell(&t, part ? "rope key" : "latent");
            out_table_cell(&t, "%.3f %%", 100 * c->source[l][part].rms_rel);
            out_table_cell(&t, "%.3f %%", 100 * e->rms_rel);
            out_table_cell(&t, "%.3g", e->max_abs);
            out_table_cell(&t, "%.3g", e->max_ulp);
        }
    }
    return out_table_print(&t, 2);
}

json_t *quantize_compare_json(const quantize_compare *c)
{
    json_t *doc = json_object(), *layers = json_array();
    uint32_t l;
    int part;
    out_set(doc, "rows", json_integer(c->done ? QUANTIZE_COMPARE_ROWS : 0));
    out_set(doc, "left_out", c->done ? json_null() : json_string(c->why));
    for (l = 0; c->done && l < c->n_layers; l++) {
        for (part = 0; part < 2; part++) {
            const error_stats *e = &c->result[l][part];
            json_t *item = json_object();
            out_set(item, "layer", json_integer(l));
            out_set(item, "part", json_string(part ? "rope_key" : "latent"));
            out_set(item, "source_rms_rel", out_real(c->source[l][part].rms_rel));
            out_set(item, "rms_rel", out_real(e->rms_rel));
            out_set(item, "max_abs", out_real(e->max_abs));
            out_set(item, "max_ulp", out_real(e->max_ulp));
            out_append(layers, item);
        }
    }
    out_set(doc, "layers", layers);
    return doc;
}
