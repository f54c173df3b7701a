/* dspark bench --what load: from files to the first answer. Headers, inspection, packing against memcpy by as
 * many threads, mapping a prepacked file, the first call against the tenth, page faults and peak memory. */
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "bench.h"
#include "dump.h"
#include "out.h"

#define BLOCK_SIZE 64
#define N_CALLS 10
#define MAX_REPEATS 50
#define DEFAULT_REPEATS 3

/* One way to come to a model. */
typedef struct way {
    const char *name;
    uint32_t parts;
    int calls;  /* and are its first and tenth call timed? */
    int mapped; /* from --prepacked: nothing is packed */
} way;

static const way ways[] = {
    {"pack context", DSPARK_PART_CONTEXT, 1, 0},
    {"map context", DSPARK_PART_CONTEXT, 1, 1},
    {"pack all", DSPARK_PART_BLOCK, 0, 0}, /* only where the checkpoint has them */
};
#define N_WAYS (sizeof ways / sizeof *ways)

typedef struct loader {
    bench_report *report;
    const bench_args *args;
    const char *source;
    bench_sizes sizes;
    dspark_host_matrix head;
    bench_run *run;
    size_t n_repeats;
    double opened[MAX_REPEATS], first[MAX_REPEATS], tenth[MAX_REPEATS];
    uint64_t bytes, peak, faults[2]; /* faults: of the first opening, of its first call */
    progress bar;
    size_t done, steps;
} loader;

static uint64_t read_faults(void)
{
    struct rusage u;
    return getrusage(RUSAGE_SELF, &u) == 0 ? (uint64_t)u.ru_minflt + (uint64_t)u.ru_majflt : 0;
}

static dspark_status advance(loader *l, dspark_error *err)
{
    return progress_update(&l->bar, ++l->done, l->steps) ? out_check_interrupt(err) : DSPARK_OK;
}

static dspark_status add_row(const loader *l, const char *name, double *times, size_t n, bench_row **row,
                             dspark_error *err)
{
    *row = bench_run_add(l->run, name);
    if (!*row) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory");
    (*row)->limit = BENCH_BY_NONE;
    bench_row_times(*row, times, n);
    return DSPARK_OK;
}

/* ---- files ---- */

static dspark_status measure_headers(loader *l, dspark_error *err)
{
    double headers[MAX_REPEATS], whole[MAX_REPEATS], t;
    dspark_status st = DSPARK_OK;
    bench_row *row;
    size_t i;
    for (i = 0; st == DSPARK_OK && i < l->n_repeats; i++) {
        dspark_checkpoint *files = NULL;
        dspark_inspection *in = NULL;
        t = out_clock();
        st = dspark_checkpoint_open(&files, l->source, err);
        headers[i] = out_clock() - t;
        dspark_checkpoint_close(files);
        if (st != DSPARK_OK) break;
        t = out_clock();
        st = dspark_inspect(&in, l->source, NULL, err);
        whole[i] = out_clock() - t;
        dspark_inspection_free(in);
        if (st == DSPARK_OK) st = advance(l, err);
    }
    if (st == DSPARK_OK) st = add_row(l, "headers", headers, l->n_repeats, &row, err);
    if (st == DSPARK_OK) st = add_row(l, "inspect", whole, l->n_repeats, &row, err);
    return st;
}

/* ---- a model and its first calls ---- */

/* Calls of n positions from taps to the cache of a fresh context. */
static dspark_status time_calls(loader *l, const dspark_model *model, size_t i, dspark_error *err)
{
    const uint64_t n = l->args->tokens.items[0];
    dspark_context_opts opts;
    dspark_context *context = NULL;
    dspark_cache *cache = NULL;
    dspark_batch batch;
    dump taps = {0};
    int64_t *indices = calloc((size_t)n, sizeof *indices);
    uint64_t k, faults;
    dspark_status st = indices ? dump_make(&taps, n, 0, dspark_model_config(model), err)
                               : out_set_error(err, DSPARK_ENOMEM, "", "out of memory");
    for (k = 0; indices && k < n; k++) indices[k] = (int64_t)k;
    dspark_context_opts_init(&opts);
    opts.isa = l->run->isa;
    opts.n_threads = l->run->n_threads;
    if (st == DSPARK_OK) st = dspark_context_create(&context, model, &opts, err);
    if (st == DSPARK_OK)
        st = dspark_cache_create(&cache, model, DSPARK_CACHE_BF16, BLOCK_SIZE, (n + BLOCK_SIZE - 1) / BLOCK_SIZE,
                                 NULL, err);
    dspark_batch_init(&batch);
    batch.n_tokens = (size_t)n;
    batch.taps = taps.taps;
    batch.positions = batch.slots = indices;
    for (k = 0; st == DSPARK_OK && k < N_CALLS && (st = out_check_interrupt(err)) == DSPARK_OK; k++) {
        double t = out_clock();
        faults = read_faults();
        st = dspark_context_run(context, &batch, dspark_cache_get_view(cache), NULL, err);
        t = out_clock() - t;
        if (k == 0) l->first[i] = t;
        if (k == 0 && i == 0) l->faults[1] = read_faults() - faults;
        l->tenth[i] = t;
    }
    dspark_context_free(context);
    dspark_cache_free(cache);
    dump_close(&taps);
    free(indices);
    return st;
}

static dspark_status open_once(loader *l, const way *w, size_t i, dspark_error *err)
{
    dspark_model_opts opts;
    dspark_model *model = NULL;
    uint64_t faults = read_faults();
    double t;
    dspark_status st;
    dspark_model_opts_init(&opts);
    opts.parts = w->parts;
    opts.n_threads = l->run->n_threads;
    opts.target = l->args->target;
    if (w->mapped) opts.prepacked = l->args->prepacked;
    if (l->head.data) opts.lm_head = opts.embed_tokens = &l->head;
    bench_reset_peak();
    t = out_clock();
    st = dspark_model_open(&model, l->source, &opts, err);
    l->opened[i] = out_clock() - t;
    if (st != DSPARK_OK) {
        if (l->args->checkpoint && !w->mapped) out_add_checkpoint(err, l->source, l->args->target);
        return st;
    }
    bench_describe(l->report, model);
    l->bytes = dspark_model_resident_bytes(model);
    if (i == 0) l->faults[0] = read_faults() - faults;
    if (w->calls) st = time_calls(l, model, i, err);
    const uint64_t peak = bench_read_peak(), buffer = l->report->buffer_bytes; /* the probe's, touched before */
    if (peak > buffer && peak - buffer > l->peak) l->peak = peak - buffer;
    dspark_model_close(model);
    return st == DSPARK_OK ? advance(l, err) : st;
}

static dspark_status add_calls(const loader *l, dspark_error *err)
{
    const dspark_config *c = &l->report->config;
    const double n = (double)l->args->tokens.items[0], taps = (double)c->n_taps * c->tap_width, h = c->hidden_size;
    const double entries = c->n_layers * ((double)c->kv_lora_rank + c->qk_rope_head_dim);
    static const char *const names[2] = {"first call", "tenth call"};
    double times[2][MAX_REPEATS];
    bench_row *row;
    dspark_status st = DSPARK_OK;
    int i;
    memcpy(times[0], l->first, sizeof times[0]);
    memcpy(times[1], l->tenth, sizeof times[1]);
    for (i = 0; st == DSPARK_OK && i < 2; i++) {
        st = add_row(l, names[i], times[i], l->n_repeats, &row, err);
        if (st != DSPARK_OK) break;
        row->tokens = l->args->tokens.items[0];
        row->weight_bytes = (double)(l->sizes.context_proj + l->sizes.context_kv);
        row->bytes = row->weight_bytes + 2 * n * (taps + entries);
        row->flops = 2 * n * h * (taps + entries);
        row->limit = BENCH_BY_READ;
        if (i == 0) row->n_faults = l->faults[1];
    }
    return st;
}

static dspark_status measure_way(loader *l, const way *w, dspark_error *err)
{
    bench_row *row;
    size_t i;
    dspark_status st = DSPARK_OK;
    l->peak = 0;
    for (i = 0; st == DSPARK_OK && i < l->n_repeats; i++) st = open_once(l, w, i, err);
    if (st == DSPARK_OK) st = add_row(l, w->name, l->opened, l->n_repeats, &row, err);
    if (st != DSPARK_OK) return st;
    row->bytes = (double)l->bytes;
    row->limit = w->mapped ? BENCH_BY_NONE : BENCH_BY_COPY;
    row->n_faults = l->faults[0];
    row->peak_bytes = l->peak;
    return w->calls ? add_calls(l, err) : DSPARK_OK;
}

static dspark_status measure_run(loader *l, size_t i, const char *format, dspark_error *err)
{
    size_t k;
    /* As many threads as a model's packing would take. */
    uint32_t n_threads = bench_run_threads(l->args, i);
    dspark_status st = bench_run_begin(&l->run, l->report, bench_run_isa(l->args, i),
                                       n_threads ? n_threads : l->report->n_processors, 1, err);
    if (l->run) l->run->format = format;
    if (st == DSPARK_OK) st = measure_headers(l, err);
    for (k = 0; st == DSPARK_OK && k < N_WAYS; k++) {
        if ((ways[k].parts & DSPARK_PART_BLOCK) && l->sizes.context_only) continue;
        if (ways[k].mapped && !l->args->prepacked) continue;
        st = measure_way(l, &ways[k], err);
        if (st == DSPARK_OK) l->run->resident_bytes = l->bytes;
    }
    return st == DSPARK_OK ? bench_run_end(l->report, l->run, err) : st;
}

/* All runs over the checkpoint in one format. */
static dspark_status measure_format(loader *l, const char *source, dspark_format format, dspark_error *err)
{
    char folder[BENCH_COPY_PATH];
    size_t i;
    dspark_status st = bench_read_sizes(source, &l->sizes, err);
    if (st == DSPARK_OK)
        st = bench_copy_format(l->report, folder, &l->sizes, source, format, l->sizes.context_only, 0, err);
    else
        folder[0] = 0;
    l->source = folder[0] ? folder : source;
    progress_start(&l->bar, "loading", PROGRESS_STEPS);
    l->done = 0;
    for (i = 0; st == DSPARK_OK && i < bench_n_runs(l->args); i++)
        st = measure_run(l, i, format == DSPARK_FORMAT_NONE ? NULL : dspark_format_name(format), err);
    progress_end(&l->bar);
    if (folder[0]) tmp_folder_delete(folder);
    return st;
}

dspark_status bench_load(bench_report *r, dspark_error *err)
{
    loader l;
    size_t i;
    const char *source;
    dspark_status st;
    memset(&l, 0, sizeof l);
    l.report = r;
    l.args = r->args;
    l.n_repeats = r->args->repeat ? (size_t)r->args->repeat : DEFAULT_REPEATS;
    if (l.n_repeats > MAX_REPEATS) l.n_repeats = MAX_REPEATS;
    st = bench_find_checkpoint(r, 1, &source, err);
    if (st == DSPARK_OK) st = bench_read_sizes(source, &l.sizes, err);
    if (st == DSPARK_OK && !l.sizes.context_only && !r->args->target) st = bench_make_head(&l.head, source, err);
    l.steps = bench_n_runs(r->args) * l.n_repeats *
              ((l.sizes.context_only ? 2 : 3) + (l.args->prepacked != NULL));
    for (i = 0; st == DSPARK_OK && i < (r->args->n_formats ? r->args->n_formats : 1); i++)
        st = measure_format(&l, source, r->args->n_formats ? r->args->formats[i] : DSPARK_FORMAT_NONE, err);
    bench_remove_directory(r);
    free((void *)l.head.data);
    return st;
}
