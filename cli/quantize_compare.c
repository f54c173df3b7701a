/* quantize_compare: context entries of a checkpoint and of what it was quantised to, on the same
 * synthetic rows, against fp64 of the source. Beside each error stands the source's own, which is bf16
 * rounding alone. Behind these rows a block is drafted by both where they can draft. Opens one model at
 * a time; judges nothing. */
#include "quantize_compare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dump.h"
#include "numbers.h"
#include "open_model.h"
#include "out.h"

typedef struct sample {
    dump rows;
    uint32_t n_layers, latent, width;
    int64_t positions[QUANTIZE_COMPARE_ROWS], slots[QUANTIZE_COMPARE_ROWS];
    double *exact; /* [layers][rows][width], of the source */
    /* the drafted block: of the source, then of the result */
    const char *target;
    int draft;
    uint32_t block, vocab;
    int has_confidence;
    int32_t tokens[2][1024];
    float confidence[2][1024];
    uint16_t *logits[2]; /* [block][vocab] */
} sample;

/* What the headers say of a checkpoint. */
typedef struct needs {
    uint64_t context, whole; /* bytes in memory; 0 when not known */
    int own_tables;          /* embedding and LM head are its own */
} needs;

static void ask_needs(needs *n, const char *path)
{
    static const char *const parts[] = {"total", "q_a", "block", "lm_head"};
    dspark_inspection *in = NULL;
    const json_t *bytes;
    const char *embed, *head;
    json_t *doc = NULL;
    size_t i;
    memset(n, 0, sizeof *n);
    if (dspark_inspect(&in, path, NULL, NULL) == DSPARK_OK)
        doc = json_loads(dspark_inspection_json(in), 0, NULL);
    bytes = json_object_get(json_object_get(doc, "plan"), "resident_bytes");
    for (i = 0; i < sizeof parts / sizeof *parts; i++) {
        const uint64_t part = (uint64_t)json_integer_value(json_object_get(bytes, parts[i]));
        if (i == 0) n->context = part;
        n->whole += part;
    }
    embed = json_string_value(json_object_get(doc, "embed_tokens"));
    head = json_string_value(json_object_get(doc, "lm_head"));
    n->own_tables = embed && head && strcmp(embed, "own") == 0 && strcmp(head, "own") == 0;
    json_decref(doc);
    dspark_inspection_free(in);
}

static uint64_t half_of_memory(void)
{
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? (uint64_t)pages / 2 * (uint64_t)page : UINT64_MAX;
}

/* What can be compared; 0: nothing, and why. */
static int choose_parts(quantize_compare *out, sample *s, const char *source, const char *result)
{
    const uint64_t half = half_of_memory();
    char a[32], b[32];
    needs x, y;
    ask_needs(&x, source);
    ask_needs(&y, result);
    if (y.context > x.context) x.context = y.context;
    if (y.whole > x.whole) x.whole = y.whole;
    s->draft = (s->target || (x.own_tables && y.own_tables)) && x.whole <= half;
    if (x.context <= half) return 1;
    snprintf(out->why, sizeof out->why, "the context part takes %s, more than half of this machine's "
             "memory (%s)", out_bytes(a, (double)x.context), out_bytes(b, (double)half));
    return 0;
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
    s->block = c->block_size;
    s->vocab = c->vocab_size;
    s->has_confidence = c->confidence_head;
    s->exact = calloc((size_t)s->n_layers * QUANTIZE_COMPARE_ROWS * s->width, sizeof *s->exact);
    if (!s->exact) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for the fp64 rows");
    for (i = 0; s->draft && i < 2; i++) {
        s->logits[i] = calloc((size_t)s->block * s->vocab, sizeof *s->logits[i]);
        if (!s->logits[i]) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for logits");
    }
    for (i = 0; i < QUANTIZE_COMPARE_ROWS; i++) s->positions[i] = s->slots[i] = (int64_t)i;
    return DSPARK_OK;
}

/* A greedy block behind the rows; the result goes on from the source's tokens. */
static dspark_status draft_block(sample *s, const dspark_model *model, const dspark_cache_view *view,
                                 uint32_t n_threads, int which, dspark_error *err)
{
    dspark_drafter_opts opts;
    dspark_drafter *drafter = NULL;
    dspark_draft_input in;
    dspark_draft_output out;
    dspark_status st;
    dspark_drafter_opts_init(&opts);
    opts.n_threads = n_threads;
    opts.max_sequences = 1;
    if ((st = dspark_drafter_create(&drafter, model, &opts, err)) != DSPARK_OK) return st;
    dspark_draft_input_init(&in);
    dspark_draft_output_init(&out);
    in.anchor = 1 % (int64_t)s->vocab;
    in.position = in.n_context = QUANTIZE_COMPARE_ROWS;
    in.slots = s->slots;
    in.forced = which ? s->tokens[0] : NULL;
    out.tokens = s->tokens[which];
    out.confidence = s->confidence[which];
    out.logits = s->logits[which];
    st = dspark_draft(drafter, view, &in, &out, 1, err);
    if (st == DSPARK_OK && out.status != DSPARK_OK)
        st = out_set_error(err, out.status, "", "the synthetic block cannot be drafted");
    if (st == DSPARK_OK) s->block = out.n_tokens;
    dspark_drafter_free(drafter);
    return st;
}

static void compare_blocks(quantize_compare *out, const sample *s)
{
    double errors = 0, squares = 0;
    size_t i;
    out->n_drafted = s->block;
    out->confidence_change = s->has_confidence ? 0 : (double)NAN;
    for (i = 0; i < s->block; i++) {
        const double change = fabs((double)s->confidence[0][i] - (double)s->confidence[1][i]);
        out->n_equal += s->tokens[0][i] == s->tokens[1][i];
        if (change > out->confidence_change) out->confidence_change = change;
    }
    for (i = 0; i < (size_t)s->block * s->vocab; i++) {
        const double x = number_bf16((const unsigned char *)&s->logits[0][i]);
        const double y = number_bf16((const unsigned char *)&s->logits[1][i]);
        errors += (x - y) * (x - y);
        squares += x * x;
    }
    out->logits_rms = squares > 0 ? sqrt(errors / squares) : 0;
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
    uint32_t l;
    dspark_model_opts_init(&model_opts);
    model_opts.parts = s->draft ? DSPARK_PART_BLOCK : DSPARK_PART_CONTEXT;
    model_opts.target = s->draft ? s->target : NULL;
    model_opts.n_threads = n_threads;
    st = open_model(&model, path, &model_opts, "comparing", err);
    if (st != DSPARK_OK) return st;
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
    if (st == DSPARK_OK && s->draft)
        st = draft_block(s, model, dspark_cache_get_view(cache), n_threads, !is_source, err);
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
                                   const char *target, uint32_t n_threads, dspark_error *err)
{
    sample *s = calloc(1, sizeof *s);
    dspark_status st = DSPARK_OK;
    memset(out, 0, sizeof *out);
    if (!s) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory");
    s->target = target;
    if (choose_parts(out, s, source, result)) {
        st = measure(s, out->source, source, n_threads, 1, err);
        if (st == DSPARK_OK) st = measure(s, out->result, result, n_threads, 0, err);
        out->n_layers = s->n_layers;
        out->done = st == DSPARK_OK;
        if (out->done && s->draft) compare_blocks(out, s);
    }
    free(s->exact);
    free(s->logits[0]);
    free(s->logits[1]);
    dump_close(&s->rows);
    free(s);
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
    if (out_table_print(&t, 2) != 0) return -1;
    if (!c->n_drafted) return 0;
    printf("A block behind them: %u of %u greedy tokens are the source's; logits %.3f %% off (rms)",
           c->n_equal, c->n_drafted, 100 * c->logits_rms);
    if (!isnan(c->confidence_change)) printf("; confidence by %.3f at most", c->confidence_change);
    putchar('\n');
    return 0;
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
    if (c->done && c->n_drafted) {
        json_t *block = json_object();
        out_set(block, "tokens", json_integer(c->n_drafted));
        out_set(block, "tokens_equal", json_integer(c->n_equal));
        out_set(block, "logits_rms_rel", out_real(c->logits_rms));
        out_set(block, "confidence_change", out_real(c->confidence_change));
        out_set(doc, "block", block);
    } else {
        out_set(doc, "block", json_null());
    }
    return doc;
}
