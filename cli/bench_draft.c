/* dspark bench --what draft, linear and attention: one block over contexts of several lengths, for one sequence
 * or several, by stage; the linears alone; attention alone. The context's entries are made up (attention costs
 * what it costs whatever they say); without a target the LM head and embedding are made up too. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"
#include "bench_watch.h"
#include "drafting.h"
#include "out.h"

#define BLOCK_SIZE 64u
#define MAX_REPEATS 200
#define SETTLE_NANOSECONDS 60000000L /* idle workers spin for tens of ms before they sleep */

typedef struct rig {
    bench_report *report;
    const bench_args *args;
    dspark_host_matrix head;   /* when no target was given */
    dspark_model *model;
    bench_sizes sizes;
    const char *format;        /* NULL: the checkpoint's own */
    dspark_drafter *drafter;
    bench_run *run;
    dspark_cache *cache;
    dspark_cache_dtype dtype;
    int32_t *table;            /* 0, 1, 2, ...: sequence s has blocks s * n_blocks and on */
    uint64_t n_blocks;         /* of one sequence */
    int32_t *tokens;           /* [most sequences][block] */
    dspark_draft_input *in;
    dspark_draft_output *out;
    uint64_t longest, most;    /* context, sequences */
    int hot;                   /* weights stay in caches from call to call */
    size_t which_hot;
    progress bar;
    size_t done, steps;
} rig;

static uint64_t largest(const bench_list *list)
{
    uint64_t most = 0;
    size_t i;
    for (i = 0; i < list->n; i++)
        if (list->items[i] > most) most = list->items[i];
    return most;
}

/* ---- what a stage reads and computes ---- */

typedef struct work {
    double weights, bytes, flops;
} work;

enum { QKV_A = 1, Q_B, W_UK, ATTENTION, W_UV, O, GATE_UP, DOWN, NORMS, LM_HEAD, MARKOV, CONFIDENCE, CHOICE };

/* rows: the block's tokens of all sequences together; in the order of drafting_stage_names. Weights count
 * once a call, the Markov head's once a token of a block, unless a search leaves most of them: that is a chain. */
static void count_work(const rig *g, uint64_t n_context, double sequences, work all[DRAFTING_STAGES])
{
    const dspark_config *c = dspark_model_config(g->model);
    const bench_sizes *s = &g->sizes;
    const double h = c->hidden_size, l = c->n_layers, heads = c->n_heads, latent = c->kv_lora_rank;
    const double entry = latent + c->qk_rope_head_dim, vocab = c->vocab_size, nope = c->qk_nope_head_dim;
    const double value = c->v_head_dim, rows = sequences * c->block_size, f = 2 * rows;
    const double up = (double)s->kv_b / (nope + value);
    const double entry_bytes = (double)dspark_cache_entry_bytes(g->dtype, c->kv_lora_rank, c->qk_rope_head_dim);
    const double scores = heads * rows * ((double)n_context + c->block_size);
    size_t i;
    memset(all, 0, DRAFTING_STAGES * sizeof *all);
    all[0].bytes = 2 * h * rows;
    all[QKV_A] = (work){(double)(s->q_a + s->kv_a), 0, f * l * (c->q_lora_rank + entry) * h};
    all[Q_B] = (work){(double)s->q_b, 0, f * l * heads * (nope + c->qk_rope_head_dim) * c->q_lora_rank};
    all[W_UK] = (work){up * nope, 0, f * l * heads * nope * latent};
    all[ATTENTION] = (work){0, l * entry_bytes * (double)n_context * sequences, 2 * l * scores * (entry + latent)};
    all[W_UV] = (work){up * value, 0, f * l * heads * value * latent};
    all[O] = (work){(double)s->o, 0, f * l * heads * value * h};
    all[GATE_UP] = (work){(double)s->gate_up, 0, f * l * 2 * c->intermediate_size * h};
    all[DOWN] = (work){(double)s->down, 0, f * l * c->intermediate_size * h};
    all[LM_HEAD] = (work){(double)s->lm_head, 0, f * vocab * h};
    all[MARKOV] = (work){(double)s->markov * c->block_size, 0, f * vocab * c->markov_rank};
    all[CHOICE].bytes = 2 * vocab * 2 * rows;
    for (i = 0; i < DRAFTING_STAGES; i++) all[i].bytes += all[i].weights;
}

/* ---- opening ---- */

static dspark_status open_model(rig *g, const char *source, dspark_format format, dspark_error *err)
{
    const bench_args *a = g->args;
    dspark_model_opts opts;
    dspark_status st = DSPARK_OK;
    dspark_model_opts_init(&opts);
    opts.parts = DSPARK_PART_BLOCK;
    opts.target = a->target;
    opts.n_threads = bench_most_threads(a);
    if (!a->target && !g->head.data) st = bench_make_head(&g->head, source, err);
    if (st != DSPARK_OK) return st;
    if (g->head.data) opts.lm_head = opts.embed_tokens = &g->head;
    st = bench_open_format(g->report, &g->model, &g->sizes, source, format, &opts, err);
    g->format = format == DSPARK_FORMAT_NONE ? NULL : dspark_format_name(format);
    if (st == DSPARK_OK && g->longest >= dspark_model_config(g->model)->max_positions)
        st = out_set_error(err, DSPARK_EINVAL, "--contexts", "%" PRIu64 " is not allowed; the model has "
                           "positions 0 to %" PRIu64, g->longest,
                           dspark_model_config(g->model)->max_positions - 1);
    return st;
}

static dspark_status make_inputs(rig *g, dspark_error *err)
{
    const uint64_t n = g->n_blocks * g->most;
    const uint32_t block = g->report->config.block_size;
    uint64_t i;
    if (n > INT32_MAX) return out_set_error(err, DSPARK_EINVAL, "--contexts", "too many entries in all");
    g->table = malloc((size_t)n * sizeof *g->table);
    g->tokens = calloc((size_t)g->most, block * sizeof *g->tokens);
    g->in = calloc((size_t)g->most, sizeof *g->in);
    g->out = calloc((size_t)g->most, sizeof *g->out);
    if (!g->table || !g->tokens || !g->in || !g->out)
        return out_set_error(err, DSPARK_ENOMEM, "", "out of memory");
    for (i = 0; i < n; i++) g->table[i] = (int32_t)i;
    for (i = 0; i < g->most; i++) {
        dspark_draft_input_init(&g->in[i]);
        dspark_draft_output_init(&g->out[i]);
        g->in[i].block_table = g->table + i * g->n_blocks;
        g->in[i].n_table = (size_t)g->n_blocks;
        g->out[i].tokens = g->tokens + i * block;
    }
    return DSPARK_OK;
}

/* Every sequence has entries of its own. */
static dspark_status make_cache(rig *g, dspark_error *err)
{
    const dspark_config *c = &g->report->config;
    dspark_status st;
    uint32_t i;
    dspark_cache_free(g->cache);
    g->cache = NULL;
    if (dspark_cache_entry_bytes(g->dtype, c->kv_lora_rank, c->qk_rope_head_dim) == 0)
        return out_set_error(err, DSPARK_EUNSUPPORTED, "--cache-dtype", "%s does not fit entries of %u + %u",
                             dspark_cache_dtype_name(g->dtype), c->kv_lora_rank, c->qk_rope_head_dim);
    st = dspark_cache_create(&g->cache, g->model, g->dtype, BLOCK_SIZE, g->n_blocks * g->most, NULL, err);
    for (i = 0; st == DSPARK_OK && i < c->n_layers; i++)
        bench_fill_entries(dspark_cache_get_view(g->cache)->layers[i],
                           (size_t)(g->n_blocks * g->most) * BLOCK_SIZE, g->dtype, c->kv_lora_rank,
                           c->qk_rope_head_dim);
    return st;
}

static dspark_status begin_run(rig *g, size_t i, dspark_error *err)
{
    dspark_drafter_opts opts;
    work all[DRAFTING_STAGES];
    double weights = 0;
    size_t k;
    dspark_status st;
    dspark_drafter_opts_init(&opts);
    opts.isa = bench_run_isa(g->args, i);
    opts.n_threads = bench_run_threads(g->args, i);
    opts.max_sequences = (uint32_t)g->most;
    st = dspark_drafter_create(&g->drafter, g->model, &opts, err);
    if (st == DSPARK_OK)
        st = bench_run_begin(&g->run, g->report, opts.isa, dspark_drafter_get_plan(g->drafter).n_threads, 0, err);
    if (st != DSPARK_OK) return st;
    g->run->format = g->format;
    g->run->resident_bytes = dspark_model_resident_bytes(g->model);
    g->run->workspace_bytes = dspark_drafter_get_plan(g->drafter).workspace_bytes;
    count_work(g, 0, 1, all);
    for (k = 0; k < DRAFTING_STAGES; k++) weights += all[k].weights;
    g->hot = g->args->hot && weights <= (double)g->report->buffer_bytes &&
             (!g->report->cache_bytes || weights <= (double)g->report->cache_bytes);
    return g->hot ? bench_run_hot(g->report, g->run, "the block", weights, &g->which_hot, err) : DSPARK_OK;
}

/* ---- measuring ---- */

static dspark_status prepare(const rig *g, double *gbs, dspark_error *err)
{
    static const struct timespec settle = {0, SETTLE_NANOSECONDS};
    if (g->args->hot) return out_check_interrupt(err);
    if (g->run->n_threads > 1) nanosleep(&settle, NULL);
    return bench_evict(g->report, g->run->n_threads, gbs, err);
}

static dspark_status draft_once(const rig *g, size_t sequences, dspark_error *err)
{
    size_t i;
    dspark_status st = dspark_draft(g->drafter, dspark_cache_get_view(g->cache), g->in, g->out, sequences, err);
    for (i = 0; st == DSPARK_OK && i < sequences; i++)
        if (g->out[i].status != DSPARK_OK)
            st = out_set_error(err, g->out[i].status, "the block", "nothing could be drafted");
    return st;
}

/* Times of all stages and, last, of the block; of a call of the context's only the first. */
typedef struct timed {
    rig *g;
    size_t sequences;
    const dspark_batch *batch; /* of the context; NULL: a block */
    void *states;              /* of a batch of taps */
    double stages[DRAFTING_STAGES + 1][MAX_REPEATS];
    size_t n;                  /* repeats */
    dspark_draft_times last;
    bench_watch watch;
} timed;

static dspark_status prepare_timed(void *user, double *gbs, dspark_error *err)
{
    return prepare(((timed *)user)->g, gbs, err);
}

static dspark_status run_block(void *user, size_t i, dspark_error *err)
{
    timed *t = user;
    size_t k;
    dspark_status st = draft_once(t->g, t->sequences, err);
    if (st != DSPARK_OK) return st;
    t->last = dspark_drafter_times(t->g->drafter);
    for (k = 0; k < DRAFTING_STAGES; k++) t->stages[k][i] = (double)*drafting_stage(&t->last, k) * 1e-9;
    t->stages[k][i] = (double)t->last.total * 1e-9;
    return DSPARK_OK;
}

static dspark_status run_context(void *user, size_t i, dspark_error *err)
{
    timed *t = user;
    dspark_context *context = dspark_drafter_context(t->g->drafter);
    const double t0 = out_clock();
    dspark_status st = t->states
                           ? dspark_context_states(context, t->batch, t->states, err)
                           : dspark_context_run(context, t->batch, dspark_cache_get_view(t->g->cache), NULL, err);
    t->stages[0][i] = out_clock() - t0;
    return st;
}

/* Repeat what t says. */
static dspark_status time_calls(timed *t, dspark_error *err)
{
    rig *g = t->g;
    const bench_call call = {prepare_timed, t->batch ? run_context : run_block, t,
                             dspark_drafter_context(g->drafter)};
    double started = out_clock(), gbs;
    size_t i;
    dspark_status st = prepare_timed(t, &gbs, err);
    if (st == DSPARK_OK) st = call.run(t, 0, err); /* the first one warms up */
    t->n = (size_t)bench_choose_repeats(g->args, out_clock() - started);
    if (t->n > MAX_REPEATS) t->n = MAX_REPEATS;
    bench_allow_again(g->report);
    bench_watch_begin(&t->watch, g->report, g->run, t->n);
    for (i = 0; st == DSPARK_OK && i < t->n; i++) {
        st = bench_watch_repeat(&t->watch, &call, err);
        if (progress_update(&g->bar, g->done * 1000 + (i + 1) * 1000 / t->n, g->steps * 1000) && st == DSPARK_OK)
            st = out_check_interrupt(err);
    }
    g->done++;
    return st;
}

static dspark_status time_block(rig *g, uint64_t n_context, size_t sequences, timed *t, dspark_error *err)
{
    size_t i;
    for (i = 0; i < sequences; i++) {
        g->in[i].position = (int64_t)n_context;
        g->in[i].n_context = n_context;
        g->in[i].sequence = i;
    }
    t->g = g;
    t->sequences = sequences;
    return time_calls(t, err);
}

/* Greedy tokens leave most of W2 unread; what was read is known afterwards. Their choice looks at the logits
 * within that stage. */
static void count_markov(rig *g, const dspark_draft_times *times, work all[DRAFTING_STAGES])
{
    const double logits = all[CHOICE].bytes / 2;
    if (!times->markov_rows || (times->markov_rows_read == times->markov_rows && !times->markov_rows_bounded)) return;
    all[MARKOV].weights = (double)times->markov_bytes;
    all[MARKOV].bytes = all[MARKOV].weights + logits;
    all[MARKOV].flops *= (double)times->markov_rows_read / (double)times->markov_rows;
    all[CHOICE].bytes = 0;
    g->run->w2_rows[0] = times->markov_rows;
    g->run->w2_rows[1] = times->markov_rows_bounded;
    g->run->w2_rows[2] = times->markov_rows_read;
}

/* NULL and *err without memory. */
static bench_row *add_row(const rig *g, const char *name, timed *t, size_t stage, const work *w, dspark_error *err)
{
    bench_row *row = bench_run_add(g->run, name);
    if (!row) {
        out_set_error(err, DSPARK_ENOMEM, "", "out of memory");
        return NULL;
    }
    row->format = g->format;
    row->layers = g->report->config.n_layers;
    row->flops = w->flops;
    row->bytes = w->bytes;
    row->weight_bytes = w->weights;
    row->limit = w->bytes + w->flops > 0 ? g->hot ? BENCH_BY_HOT : BENCH_BY_READ : BENCH_BY_NONE;
    row->hot = g->which_hot;
    if (!g->args->hot) row->limit_gbs = bench_watch_reads(&t->watch);
    bench_row_times(row, t->stages[stage], bench_watch_choose(&t->watch, t->stages[stage]));
    bench_watch_fill(&t->watch, row);
    return row;
}

static int stage_is_wanted(const rig *g, size_t stage)
{
    switch (g->args->what) {
    case BENCH_LINEAR: return (stage >= QKV_A && stage <= MARKOV && stage != ATTENTION && stage != NORMS);
    case BENCH_ATTENTION: return stage == ATTENTION;
    default: return 1;
    }
}

static dspark_status measure_block(rig *g, uint64_t n_context, size_t sequences, dspark_error *err)
{
    static timed t;
    work all[DRAFTING_STAGES], sum = {0, 0, 0};
    dspark_status st = time_block(g, n_context, sequences, &t, err);
    bench_row *row;
    size_t i;
    count_work(g, n_context, (double)sequences, all);
    if (st == DSPARK_OK) count_markov(g, &t.last, all);
    for (i = 0; st == DSPARK_OK && i <= DRAFTING_STAGES; i++) {
        const int whole = i == DRAFTING_STAGES;
        if (whole ? g->args->what != BENCH_DRAFT : !stage_is_wanted(g, i)) continue;
        row = add_row(g, whole ? "the block" : drafting_stage_names[i], &t, i, whole ? &sum : &all[i], err);
        if (!row) return DSPARK_ENOMEM;
        row->sequences = sequences;
        row->tokens = sequences * g->report->config.block_size;
        row->context = n_context;
        row->cache = g->args->what == BENCH_LINEAR ? NULL : dspark_cache_dtype_name(g->dtype);
        row->warm = g->hot;
        if (whole) row->limit = BENCH_BY_SUM;
        else sum = (work){sum.weights + all[i].weights, sum.bytes + all[i].bytes, sum.flops + all[i].flops};
    }
    return st;
}

/* ---- the two linears of the context ---- */

static dspark_status measure_context(rig *g, uint64_t n, const dump *taps, unsigned char *states, int64_t *indices,
                                     dspark_error *err)
{
    static timed t;
    const dspark_config *c = &g->report->config;
    const double entry = (double)c->kv_lora_rank + c->qk_rope_head_dim, h = c->hidden_size, rows = (double)n;
    const double width = (double)c->n_taps * c->tap_width;
    const work all[2] = {
        {(double)g->sizes.context_proj, (double)g->sizes.context_proj + 2 * rows * (width + h), 2 * rows * width * h},
        {(double)g->sizes.context_kv, (double)g->sizes.context_kv + 2 * rows * (h + c->n_layers * entry),
         2 * rows * h * c->n_layers * entry}};
    dspark_batch batch;
    dspark_status st = DSPARK_OK;
    bench_row *row;
    int i;
    dspark_batch_init(&batch);
    batch.n_tokens = (size_t)n;
    batch.positions = batch.slots = indices;
    t.g = g;
    t.batch = &batch;
    for (i = 0; st == DSPARK_OK && i < 2; i++) { /* the first one makes the states of the second */
        batch.taps = i == 0 ? taps->taps : NULL;
        batch.states = i == 0 ? NULL : states;
        t.states = i == 0 ? states : NULL;
        st = time_calls(&t, err);
        if (st != DSPARK_OK) break;
        row = add_row(g, i == 0 ? "context_proj" : "context_kv", &t, 0, &all[i], err);
        if (!row) return DSPARK_ENOMEM;
        row->tokens = n;
    }
    return st;
}

static dspark_status measure_contexts(rig *g, dspark_error *err)
{
    const uint64_t n = largest(&g->args->tokens);
    unsigned char *states = calloc((size_t)n, (size_t)g->report->config.hidden_size * 2);
    int64_t *indices = calloc((size_t)n, sizeof *indices);
    dump taps = {0};
    uint64_t i;
    dspark_status st = states && indices ? dump_make(&taps, n, 0, &g->report->config, err)
                                         : out_set_error(err, DSPARK_ENOMEM, "", "out of memory");
    for (i = 0; indices && i < n; i++) indices[i] = (int64_t)i;
    for (i = 0; st == DSPARK_OK && i < g->args->tokens.n; i++)
        st = measure_context(g, g->args->tokens.items[i], &taps, states, indices, err);
    dump_close(&taps);
    free(states);
    free(indices);
    return st;
}

/* ---- the whole ---- */

static dspark_status measure_run(rig *g, size_t i, dspark_error *err)
{
    const bench_args *a = g->args;
    size_t d, s, k;
    dspark_status st = begin_run(g, i, err);
    for (d = 0; st == DSPARK_OK && d < a->n_caches; d++) {
        g->dtype = (dspark_cache_dtype)a->caches[d];
        st = make_cache(g, err);
        if (st == DSPARK_OK && a->what == BENCH_LINEAR) st = measure_contexts(g, err);
        for (k = 0; st == DSPARK_OK && k < a->contexts.n; k++)
            for (s = 0; st == DSPARK_OK && s < a->sequences.n; s++)
                st = measure_block(g, a->contexts.items[k], (size_t)a->sequences.items[s], err);
    }
    if (st == DSPARK_OK) st = bench_run_end(g->report, g->run, err);
    dspark_drafter_free(g->drafter);
    g->drafter = NULL;
    dspark_cache_free(g->cache);
    g->cache = NULL;
    return st;
}

dspark_status bench_draft(bench_report *r, dspark_error *err)
{
    rig g;
    const bench_args *a = r->args;
    const char *source;
    size_t f, i, n_formats = a->n_formats ? a->n_formats : 1;
    dspark_status st = bench_find_checkpoint(r, 0, &source, err);
    memset(&g, 0, sizeof g);
    g.report = r;
    g.args = a;
    g.longest = largest(&a->contexts);
    g.most = largest(&a->sequences);
    g.n_blocks = (g.longest + BLOCK_SIZE - 1) / BLOCK_SIZE;
    if (a->what == BENCH_LINEAR && g.n_blocks < (largest(&a->tokens) + BLOCK_SIZE - 1) / BLOCK_SIZE)
        g.n_blocks = (largest(&a->tokens) + BLOCK_SIZE - 1) / BLOCK_SIZE;
    if (g.n_blocks == 0) g.n_blocks = 1;
    g.steps = n_formats * bench_n_runs(a) * a->n_caches *
              (a->contexts.n * a->sequences.n + (a->what == BENCH_LINEAR ? 2 * a->tokens.n : 0));
    for (f = 0; st == DSPARK_OK && f < n_formats; f++) {
        st = open_model(&g, source, a->n_formats ? a->formats[f] : DSPARK_FORMAT_NONE, err);
        if (f + 1 == n_formats) bench_remove_directory(r);
        if (st == DSPARK_OK && !g.table) st = make_inputs(&g, err);
        progress_start(&g.bar, "measuring", PROGRESS_STEPS);
        for (i = 0; st == DSPARK_OK && i < bench_n_runs(a); i++) st = measure_run(&g, i, err);
        progress_end(&g.bar);
        dspark_drafter_free(g.drafter);
        g.drafter = NULL;
        dspark_model_close(g.model);
        g.model = NULL;
    }
    bench_remove_directory(r);
    dspark_cache_free(g.cache);
    free((void *)g.head.data);
    free(g.table);
    free(g.tokens);
    free(g.in);
    free(g.out);
    return st;
}
