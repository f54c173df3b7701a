/* dspark bench --what context: the one pass, the per-layer path and the full path that it replaces, in turn
 * within one process. From states, because that is what the one pass replaces; and what all of them begin
 * with, taps -> states, and the whole way from taps to cache, because that is what a user waits for. With
 * --formats: the one pass over weights in each format, in turn. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"
#include "bench_watch.h"
#include "dump.h"
#include "out.h"

#define BLOCK_SIZE 64
#define COLD_LIMIT 64                     /* up to here weights come from memory unless told */
#define SETTLE_NANOSECONDS 60000000L      /* idle workers spin for tens of ms before they sleep */

/* Stages: the three paths from states to cache, by the library's numbers; then what begins at the taps: the
 * states alone, and the whole way to the cache by the one pass and by the full path. */
#define N_PATHS 3
#define STATES 3
#define WHOLE_ONEPASS 4
#define WHOLE_FULL 5
#define N_STAGES 6
#define MAX_LANES (N_STAGES > BENCH_MAX_FORMATS ? N_STAGES : BENCH_MAX_FORMATS)

static const char *const stage_names[N_STAGES] = {
    "onepass", "per-layer", "full", "taps->states", "taps->cache onepass", "taps->cache full"};

/* What is timed in turn: a stage, or the one pass over weights of one format. */
typedef struct lane {
    int stage;
    dspark_format format;    /* NONE: of the checkpoint as it is */
    double weight_bytes;
    dspark_context *context; /* of the present run */
    int owns;                /* is it freed with this lane? */
    size_t hot;              /* the run's probe of that many bytes */
} lane;

typedef struct job {
    bench_report *report;
    const bench_args *args;
    dspark_model *models[BENCH_MAX_FORMATS]; /* one without formats */
    size_t n_models;
    bench_sizes sizes[BENCH_MAX_FORMATS];
    lane lanes[MAX_LANES];
    size_t n_lanes;
    dspark_context *maker;   /* of the states, from the first model */
    dspark_cache *cache;
    dump rows;
    unsigned char *states;
    int64_t *positions, *slots;
    uint64_t most;           /* positions of the longest call */
    progress bar;
    size_t done, steps;
} job;

/* ---- the contenders ---- */

static double stage_weights(const dspark_config *c, int stage)
{
    double rows = 0; /* of hidden_size weights */
    if (stage >= STATES) rows += (double)c->n_taps * c->tap_width;
    if (stage != STATES) rows += (double)c->n_layers * (c->kv_lora_rank + c->qk_rope_head_dim);
    if (stage == DSPARK_PATH_FULL || stage == WHOLE_FULL) rows += (double)c->n_layers * c->q_lora_rank;
    return rows * c->hidden_size;
}

/* As they lie in memory, in whatever format. */
static double stage_weight_bytes(const bench_sizes *s, int stage)
{
    uint64_t bytes = 0;
    if (stage >= STATES) bytes += s->context_proj;
    if (stage != STATES) bytes += s->context_kv;
    if (stage == DSPARK_PATH_FULL || stage == WHOLE_FULL) bytes += s->q_a;
    return (double)bytes;
}

static int begins_at_states(int stage)
{
    return stage < STATES;
}

static int wanted(const bench_args *a, int stage)
{
    const int path = stage == WHOLE_ONEPASS ? DSPARK_PATH_ONEPASS : stage == WHOLE_FULL ? DSPARK_PATH_FULL : stage;
    if (stage >= STATES && a->no_states) return 0;
    return stage == STATES || !a->path_given || a->path == path;
}

static dspark_status open_models(job *j, dspark_error *err)
{
    const bench_args *a = j->args;
    dspark_model_opts opts;
    const char *source;
    size_t i, n = a->n_formats ? a->n_formats : 1;
    dspark_status st = bench_find_checkpoint(j->report, 1, &source, err);
    dspark_model_opts_init(&opts);
    opts.parts = DSPARK_PART_CONTEXT;
    if (!a->n_formats && (!a->path_given || a->path == DSPARK_PATH_FULL)) opts.parts |= DSPARK_PART_Q_A;
    opts.n_threads = bench_most_threads(a);
    for (i = 0; st == DSPARK_OK && i < n; i++) {
        st = bench_open_format(j->report, &j->models[i], &j->sizes[i], source,
                               a->n_formats ? a->formats[i] : DSPARK_FORMAT_NONE, &opts, err);
        if (st != DSPARK_OK) break;
        j->n_models = i + 1;
    }
    bench_remove_directory(j->report); /* the models hold what they need */
    return st;
}

static void list_lanes(job *j)
{
    const bench_args *a = j->args;
    int s;
    size_t i;
    for (i = 0; i < a->n_formats; i++)
        j->lanes[j->n_lanes++] = (lane){.stage = DSPARK_PATH_ONEPASS, .format = a->formats[i],
                                        .weight_bytes = stage_weight_bytes(&j->sizes[i], DSPARK_PATH_ONEPASS)};
    for (s = 0; !a->n_formats && s < N_STAGES; s++)
        if (wanted(a, s))
            j->lanes[j->n_lanes++] = (lane){.stage = s, .weight_bytes = stage_weight_bytes(&j->sizes[0], s)};
}

static dspark_status make_buffers(job *j, dspark_error *err)
{
    const dspark_config *c = &j->report->config;
    uint64_t n = 0, i;
    dspark_status st;
    for (i = 0; i < j->args->tokens.n; i++)
        if (j->args->tokens.items[i] > n) n = j->args->tokens.items[i];
    j->most = n;
    if (n > c->max_positions)
        return out_set_error(err, DSPARK_EINVAL, "--tokens", "the model has only %" PRIu64 " positions",
                             c->max_positions);
    j->states = calloc((size_t)n, (size_t)c->hidden_size * 2);
    j->positions = calloc((size_t)n, sizeof *j->positions);
    j->slots = calloc((size_t)n, sizeof *j->slots);
    if (!j->states || !j->positions || !j->slots)
        return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for %" PRIu64 " positions", n);
    for (i = 0; i < n; i++) j->positions[i] = j->slots[i] = (int64_t)i;
    if ((st = dump_make(&j->rows, n, 0, c, err)) != DSPARK_OK) return st;
    return dspark_cache_create(&j->cache, j->models[0], DSPARK_CACHE_BF16, BLOCK_SIZE,
                               (n + BLOCK_SIZE - 1) / BLOCK_SIZE, NULL, err);
}

static void free_contexts(job *j)
{
    size_t i;
    for (i = 0; i < j->n_lanes; i++) {
        if (j->lanes[i].owns) dspark_context_free(j->lanes[i].context);
        j->lanes[i].context = NULL;
        j->lanes[i].owns = 0;
    }
    dspark_context_free(j->maker);
    j->maker = NULL;
}

static dspark_status make_context(const job *j, size_t run, dspark_context **context, size_t model, int path,
                                  dspark_error *err)
{
    dspark_context_opts opts;
    dspark_context_opts_init(&opts);
    opts.isa = bench_run_isa(j->args, run);
    opts.n_threads = bench_run_threads(j->args, run);
    opts.path = (dspark_path)path;
    return dspark_context_create(context, j->models[model], &opts, err);
}

/* One context a path, shared by the stages that take it. The maker's is the one pass of the first model. */
static dspark_status make_contexts(job *j, size_t run, dspark_error *err)
{
    dspark_context *full = NULL;
    size_t i;
    dspark_status st = make_context(j, run, &j->maker, 0, DSPARK_PATH_ONEPASS, err);
    for (i = 0; st == DSPARK_OK && i < j->n_lanes; i++) {
        lane *l = &j->lanes[i];
        const int is_full = l->stage == DSPARK_PATH_FULL || l->stage == WHOLE_FULL;
        if (l->format != DSPARK_FORMAT_NONE ? i == 0 : !is_full && l->stage != DSPARK_PATH_PER_LAYER) {
            l->context = j->maker;
        } else if (is_full && full) {
            l->context = full;
        } else {
            const int path = l->stage == WHOLE_FULL ? DSPARK_PATH_FULL : l->stage;
            st = make_context(j, run, &l->context, l->format != DSPARK_FORMAT_NONE ? i : 0, path, err);
            l->owns = st == DSPARK_OK;
            if (is_full) full = l->context;
        }
    }
    return st;
}

/* ---- measuring ---- */

/* Do calls of n positions begin with empty caches? */
static int row_is_cold(const job *j, uint64_t n)
{
    return j->args->cold || (!j->args->hot && n <= COLD_LIMIT);
}

/* Do the weights stay in the last-level cache from one call to the next? Not in a row whose calls
 * begin with empty caches; not when they are larger; and not when the buffer is too small to show
 * how fast that would be read. */
static int is_cold(const job *j, const lane *l, uint64_t n)
{
    const bench_report *r = j->report;
    return row_is_cold(j, n) || l->weight_bytes > (double)r->buffer_bytes ||
           (r->cache_bytes && l->weight_bytes > (double)r->cache_bytes);
}

/* Each weight, input and output once: what an ideal implementation of the stage must move. */
static void fill_work(const job *j, const lane *l, uint64_t n, bench_row *row)
{
    const dspark_config *c = &j->report->config;
    double tokens = (double)n, h = c->hidden_size;
    double entries = c->n_layers * ((double)c->kv_lora_rank + c->qk_rope_head_dim);
    double in = l->stage >= STATES ? (double)c->n_taps * c->tap_width : h;
    double out = l->stage == STATES ? h : entries;
    row->flops = 2 * tokens * stage_weights(c, l->stage);
    row->bytes = l->weight_bytes + tokens * (in + out) * 2;
}

static dspark_status run_lane(job *j, const lane *l, uint64_t n, double *seconds, dspark_error *err)
{
    dspark_batch batch;
    dspark_status st;
    double t0;
    dspark_batch_init(&batch);
    batch.n_tokens = (size_t)n;
    if (begins_at_states(l->stage))
        batch.states = j->states;
    else
        batch.taps = j->rows.taps;
    batch.positions = j->positions;
    batch.slots = j->slots;
    t0 = out_clock();
    if (l->stage == STATES)
        st = dspark_context_states(l->context, &batch, j->states, err);
    else
        st = dspark_context_run(l->context, &batch, dspark_cache_get_view(j->cache), NULL, err);
    *seconds = out_clock() - t0;
    return st;
}

/* One untimed position that makes the context's workers run without reading the stage's weights:
 * the other half of the way, which has weights of its own. For the whole way there is no other
 * half; one layer goes into the cache, and reading context_proj pushes it out again before its turn
 * comes. Row 0 of the states and entries gets the bytes that it has already (of formats:
 * those of the one that ran last). */
static dspark_status wake_apart(job *j, const lane *l, dspark_error *err)
{
    const int64_t *layer_slots[DSPARK_MAX_LAYERS] = {j->slots};
    dspark_batch batch;
    dspark_batch_init(&batch);
    batch.n_tokens = 1;
    if (begins_at_states(l->stage)) {
        batch.taps = j->rows.taps;
        return dspark_context_states(l->context, &batch, j->states, err);
    }
    batch.states = j->states;
    batch.positions = j->positions;
    batch.layer_slots = layer_slots;
    return dspark_context_run(l->context, &batch, dspark_cache_get_view(j->cache), NULL, err);
}

/* What is timed is the stage, so two things about threads must be over before. Each context has a
 * pool of its own; the workers of the one that ran last go on spinning and would take processors
 * from the next: let them fall asleep. And waking a sleeping pool takes long compared with a call
 * of one position, while in use the workers are awake, since other work came just before: wake them
 * in a call that is not timed. */
static dspark_status prepare(job *j, const bench_run *run, int cold, const lane *l, double *gbs, dspark_error *err)
{
    static const struct timespec settle = {0, SETTLE_NANOSECONDS};
    double seconds;
    dspark_status st;
    if (out_interrupted()) return out_check_interrupt(err);
    if (run->n_threads > 1) nanosleep(&settle, NULL);
    if (!cold) return run_lane(j, l, 1, &seconds, err); /* brings the weights as well */
    st = bench_evict(j->report, run->n_threads, gbs, err);
    return st == DSPARK_OK ? wake_apart(j, l, err) : st;
}

/* Medians of this row over those of what they are compared with. */
static void fill_ratios(const job *j, bench_row *rows)
{
    size_t i, base = j->n_lanes;
    if (j->n_lanes < 2) return;
    if (j->args->n_formats) {
        for (i = 0; i < j->n_lanes; i++)
            if (j->lanes[i].format == DSPARK_FORMAT_BF16) base = i;
        for (i = 0; base < j->n_lanes && i < j->n_lanes; i++) {
            rows[i].ratio = rows[base].p50 / rows[i].p50;
            rows[i].ratio_key = "bf16_over_format";
            rows[i].byte_share = rows[i].ratio * rows[i].weight_bytes / rows[base].weight_bytes;
        }
        return;
    }
    for (i = 0; i < j->n_lanes; i++) {
        const int of = j->lanes[i].stage < STATES ? DSPARK_PATH_ONEPASS : WHOLE_ONEPASS;
        for (base = 0; base < j->n_lanes && j->lanes[base].stage != of; base++) continue;
        if (j->lanes[i].stage == STATES || base == j->n_lanes) continue;
        rows[i].ratio = rows[i].p50 / rows[base].p50;
        rows[i].ratio_key = "ratio_to_onepass";
    }
}

/* One lane's turns within a row. */
typedef struct turn {
    job *j;
    bench_run *run;
    const lane *lane;
    uint64_t n;
    int cold;
    double times[BENCH_MAX_REPEATS];
    bench_watch watch;
} turn;

static dspark_status prepare_turn(void *user, double *gbs, dspark_error *err)
{
    turn *t = user;
    return prepare(t->j, t->run, t->cold, t->lane, gbs, err);
}

static dspark_status run_turn(void *user, size_t i, dspark_error *err)
{
    turn *t = user;
    return run_lane(t->j, t->lane, t->n, &t->times[i], err);
}

/* Of each repeat the median over the lanes, of those the median. */
static double median_reads(const turn *turns, size_t n_lanes)
{
    static double reads[BENCH_MAX_REPEATS];
    double gbs[MAX_LANES];
    size_t i, k;
    for (i = 0; i < turns->watch.n; i++) {
        for (k = 0; k < n_lanes; k++) gbs[k] = turns[k].watch.samples[i].read_gbs;
        reads[i] = bench_median(gbs, n_lanes);
    }
    return bench_median(reads, turns->watch.n);
}

static dspark_status time_turns(job *j, turn *turns, dspark_error *err)
{
    double started = out_clock(), gbs;
    uint64_t repeat, n_repeats;
    size_t k;
    dspark_status st = DSPARK_OK;
    for (k = 0; st == DSPARK_OK && k < j->n_lanes; k++) { /* warm-up */
        st = prepare_turn(&turns[k], &gbs, err);
        if (st == DSPARK_OK) st = run_turn(&turns[k], 0, err);
    }
    n_repeats = bench_choose_repeats(j->args, out_clock() - started);
    bench_allow_again(j->report);
    for (k = 0; k < j->n_lanes; k++)
        bench_watch_begin(&turns[k].watch, j->report, turns->run, (size_t)n_repeats);
    for (repeat = 0; st == DSPARK_OK && repeat < n_repeats; repeat++) {
        /* Another order each time, so that no stage always follows the same one. */
        for (k = 0; st == DSPARK_OK && k < j->n_lanes; k++) {
            turn *t = &turns[(repeat + k) % j->n_lanes];
            const bench_call call = {prepare_turn, run_turn, t, t->lane->context};
            st = bench_watch_repeat(&t->watch, &call, err);
            if (st == DSPARK_OK && progress_update(&j->bar, j->done * 1000 + repeat * 1000 / n_repeats,
                                                   j->steps * 1000))
                st = out_check_interrupt(err);
        }
    }
    return st;
}

static dspark_status measure_row(job *j, bench_run *run, uint64_t n, dspark_error *err)
{
    static turn turns[MAX_LANES]; /* large; one row at a time */
    const int cold = row_is_cold(j, n);
    size_t k, first = run->n_rows;
    dspark_status st;
    for (k = 0; k < j->n_lanes; k++) {
        turns[k].j = j;
        turns[k].run = run;
        turns[k].lane = &j->lanes[k];
        turns[k].n = n;
        turns[k].cold = cold;
    }
    if ((st = time_turns(j, turns, err)) != DSPARK_OK) return st;
    for (k = 0; k < j->n_lanes; k++) {
        const lane *l = &j->lanes[k];
        bench_row *row = bench_run_add(run, stage_names[l->stage]);
        if (!row) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory");
        row->tokens = n;
        row->layers = j->report->config.n_layers;
        if (l->format != DSPARK_FORMAT_NONE) {
            row->format = dspark_format_name(l->format);
            row->weight_bytes = l->weight_bytes;
        }
        bench_row_times(row, turns[k].times, bench_watch_choose(&turns[k].watch, turns[k].times));
        bench_watch_fill(&turns[k].watch, row);
        row->limit = is_cold(j, l, n) ? BENCH_BY_READ : BENCH_BY_HOT;
        row->hot = l->hot;
        if (cold) row->limit_gbs = median_reads(turns, j->n_lanes);
        fill_work(j, l, n, row);
    }
    fill_ratios(j, &run->rows[first]);
    j->done++;
    return DSPARK_OK;
}

/* Weights that were used a moment ago are read as fast as that many bytes of the probe's buffer. */
static dspark_status probe_hot(job *j, bench_run *run, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    size_t k, i;
    for (k = 0; st == DSPARK_OK && k < j->n_lanes; k++) {
        lane *l = &j->lanes[k];
        int any = 0;
        for (i = 0; i < j->args->tokens.n; i++) any |= !is_cold(j, l, j->args->tokens.items[i]);
        if (any)
            st = bench_run_hot(j->report, run, l->format != DSPARK_FORMAT_NONE ? dspark_format_name(l->format)
                                                                             : stage_names[l->stage],
                               l->weight_bytes, &l->hot, err);
    }
    return st;
}

static dspark_status measure_run(job *j, size_t i, dspark_error *err)
{
    bench_run *run;
    dspark_batch batch;
    size_t k;
    dspark_status st = make_contexts(j, i, err);
    if (st == DSPARK_OK)
        st = bench_run_begin(&run, j->report, dspark_context_isa(j->maker),
                             dspark_context_get_plan(j->maker).n_threads,
                             0, err);
    if (st == DSPARK_OK) st = probe_hot(j, run, err);
    if (st != DSPARK_OK) return st;
    for (k = 0; k < j->n_models; k++) run->resident_bytes += dspark_model_resident_bytes(j->models[k]);
    run->workspace_bytes = dspark_context_get_plan(j->maker).workspace_bytes;
    dspark_batch_init(&batch);
    batch.n_tokens = (size_t)j->most;
    batch.taps = j->rows.taps;
    st = dspark_context_states(j->maker, &batch, j->states, err);
    for (k = 0; st == DSPARK_OK && k < j->args->tokens.n; k++)
        st = measure_row(j, run, j->args->tokens.items[k], err);
    return st == DSPARK_OK ? bench_run_end(j->report, run, err) : st;
}

dspark_status bench_context(bench_report *r, dspark_error *err)
{
    static job j; /* large; one at a time */
    dspark_status st;
    size_t i, n_runs = bench_n_runs(r->args);
    memset(&j, 0, sizeof j);
    j.report = r;
    j.args = r->args;
    st = open_models(&j, err);
    if (st == DSPARK_OK) {
        list_lanes(&j);
        st = make_buffers(&j, err);
    }
    progress_start(&j.bar, "measuring", PROGRESS_STEPS);
    j.steps = n_runs * r->args->tokens.n;
    for (i = 0; st == DSPARK_OK && i < n_runs; i++) {
        st = measure_run(&j, i, err);
        free_contexts(&j);
    }
    progress_end(&j.bar);
    free_contexts(&j);
    dspark_cache_free(j.cache);
    dump_close(&j.rows);
    for (i = 0; i < BENCH_MAX_FORMATS; i++) dspark_model_close(j.models[i]);
    free(j.states);
    free(j.positions);
    free(j.slots);
    return st;
}
