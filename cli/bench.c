/* dspark bench: times the one pass, the per-layer path and the full path that it replaces, in turn
 * within one process, beside the machine's own limits. From states, because that is what the one
 * pass replaces; and what all of them begin with, taps -> states, and the whole way from taps to
 * cache, because that is what a user waits for. */
#include "bench.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "dump.h"
#include "out.h"
#include "progress.h"

#define BLOCK_SIZE 64
#define HUGE_PAGE ((size_t)2 << 20)
#define COLD_LIMIT 64                     /* up to here weights come from memory unless told */
#define BUFFER_BYTES (UINT64_C(512) << 20)
#define BUFFER_MAX (UINT64_C(1) << 40)    /* far from where rounding up to huge pages wraps */
#define MAX_REPEATS 1000
#define PROBE_SECONDS 0.4
#define SECONDS_A_ROW 4.0
#define SETTLE_NANOSECONDS 60000000L      /* idle workers spin for tens of ms before they sleep */

typedef struct bench_args {
    const char *checkpoint;
    const char *preset;
    const char *tokens;
    const char *formats;
    uint64_t n_threads;
    int isa;
    int path;
    int path_given;
    uint64_t repeat;
    uint64_t buffer;
    int cold, hot;
    int no_states;
    const char *csv;
    const char *svg;
    int json;
    int draft;
    const char *contexts;
    const char *target;
} bench_args;

typedef struct bench_job {
    const bench_args *args;
    char directory[4096];     /* of the made checkpoint; "" when there is none */
    dspark_model *model;      /* of the stages, or of the first format */
    dspark_model *format_models[BENCH_MAX_FORMATS];
    dspark_context *contexts[BENCH_N_PATHS];
    dspark_context *format_contexts[BENCH_MAX_FORMATS];
    dspark_cache *cache;
    dump rows;
    unsigned char *states;
    int64_t *positions, *slots;
    unsigned char *buffer;
    uint64_t *tokens;
    uint64_t max_tokens;
    progress bar;
    uint64_t steps_done, steps;
    bench_result result;
} bench_job;

/* ---- the limits of the machine ---- */

static double stage_weight_bytes(const dspark_config *c, int stage)
{
    double rows = 0; /* of hidden_size weights */
    if (stage >= BENCH_STATES) rows += (double)c->n_taps * c->tap_width;
    if (stage != BENCH_STATES)
        rows += (double)c->n_layers * (c->kv_lora_rank + c->qk_rope_head_dim);
    if (stage == DSPARK_PATH_FULL || stage == BENCH_WHOLE_FULL)
        rows += (double)c->n_layers * c->q_lora_rank;
    return rows * c->hidden_size * 2;
}

/* Do the weights stay in the last-level cache from one call to the next? Not in a row whose calls
 * begin with empty caches; not when they are larger; and not when the buffer is too small to show
 * how fast that would be read. */
static int is_cold(const bench_result *r, const bench_row *row, int stage)
{
    double bytes = r->weight_bytes[stage];
    return row->cold || bytes > (double)r->buffer_bytes ||
           (r->cache_bytes && bytes > (double)r->cache_bytes);
}

/* Weights that were used a moment ago are read as fast as that many bytes of the probe's buffer,
 * which lies in huge pages like they do. */
static dspark_status probe_hot(bench_job *job, int after, dspark_error *err)
{
    bench_result *r = &job->result;
    dspark_status st = DSPARK_OK;
    size_t i;
    int s, wanted;
    for (s = 0; st == DSPARK_OK && s < BENCH_N_LANES; s++) {
        double bytes = r->weight_bytes[s] < 4096 ? 4096 : r->weight_bytes[s];
        for (wanted = 0, i = 0; i < r->n_rows; i++)
            wanted |= r->stages[s] && !is_cold(r, &r->rows[i], s);
        if (wanted)
            st = dspark_probe_read(r->n_threads, job->buffer, (size_t)bytes, PROBE_SECONDS / 2,
                                   &r->hot_gbs[s][after], err);
    }
    return st;
}

static dspark_status probe_machine(bench_job *job, int after, dspark_error *err)
{
    bench_result *r = &job->result;
    dspark_isa isa = job->args->isa ? (dspark_isa)job->args->isa : dspark_isa_best();
    dspark_status st;
    r->load[after] = bench_read_load();
    st = dspark_probe_compute(isa, r->n_threads, PROBE_SECONDS, &r->compute_gflops[after], err);
    if (st != DSPARK_OK) return st;
    st = dspark_probe_read(r->n_threads, job->buffer, (size_t)job->args->buffer, PROBE_SECONDS,
                           &r->read_gbs[after], err);
    return st == DSPARK_OK ? probe_hot(job, after, err) : st;
}

/* ---- the checkpoint ---- */

static void remove_directory(const char *path)
{
    char name[4096 + 300];
    struct dirent *entry;
    DIR *d = opendir(path);
    while (d && (entry = readdir(d))) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        if (unlink(name) != 0) remove_directory(name); /* a copy of --formats; no deeper */
    }
    if (d) closedir(d);
    rmdir(path);
}

static dspark_status make_directory(bench_job *job, dspark_error *err)
{
    const char *base = getenv("TMPDIR");
    dspark_status st;
    int n = snprintf(job->directory, sizeof job->directory, "%s/dspark-bench-XXXXXX",
                     base && *base ? base : "/tmp");
    if (n < 0 || (size_t)n >= sizeof job->directory || !mkdtemp(job->directory)) {
        st = out_set_error(err, DSPARK_EIO, job->directory, "no temporary folder: %s",
                           strerror(errno));
        job->directory[0] = 0;
        return st;
    }
    return DSPARK_OK;
}

static dspark_status make_checkpoint(bench_job *job, dspark_error *err)
{
    dspark_synth_opts opts;
    progress bar;
    dspark_status st = make_directory(job, err);
    if (st != DSPARK_OK) return st;
    dspark_synth_opts_init(&opts);
    opts.preset = job->args->preset ? job->args->preset : "kimi-k3";
    opts.context_only = 1;
    opts.progress = progress_update;
    opts.progress_user = &bar;
    fprintf(stderr, "dspark: no CKPT given: making a synthetic %s in %s (kimi-k3: 665 MB)\n",
            opts.preset, job->directory);
    progress_start(&bar, "making", PROGRESS_BYTES);
    st = dspark_synth_checkpoint(job->directory, &opts, err);
    progress_end(&bar);
    return st;
}

static void describe_model(bench_job *job)
{
    const bench_args *a = job->args;
    bench_result *r = &job->result;
    r->checkpoint = a->checkpoint ? a->checkpoint : a->preset ? a->preset : "kimi-k3";
    r->synthetic = !a->checkpoint;
    r->config = dspark_model_config(job->model);
    snprintf(r->fingerprint, sizeof r->fingerprint, "%s", dspark_model_fingerprint(job->model));
}

/* One model a format; the copy of one is gone before the next is written. */
static dspark_status open_formats(bench_job *job, dspark_error *err)
{
    const char *source = job->args->checkpoint;
    char folder[sizeof job->directory + 8];
    bench_result *r = &job->result;
    size_t i;
    dspark_status st = source ? make_directory(job, err) : make_checkpoint(job, err);
    for (i = 0; st == DSPARK_OK && i < r->n_formats; i++) {
        dspark_model **model = &job->format_models[i];
        uint64_t kv_bytes;
        snprintf(folder, sizeof folder, "%s/copy", job->directory);
        st = bench_open_format(model, &kv_bytes, source ? source : job->directory, folder,
                               r->formats[i], (uint32_t)job->args->n_threads, err);
        remove_directory(folder);
        if (st != DSPARK_OK) break;
        r->weight_bytes[BENCH_N_STAGES + i] = (double)kv_bytes;
        r->resident_bytes[i] = dspark_model_resident_bytes(*model);
        r->stages[BENCH_N_STAGES + i] = 1;
    }
    if (job->directory[0]) remove_directory(job->directory); /* the models hold what they need */
    job->directory[0] = 0;
    if (st != DSPARK_OK) return st;
    job->model = job->format_models[0];
    describe_model(job);
    return DSPARK_OK;
}

static dspark_status open_model(bench_job *job, dspark_error *err)
{
    const bench_args *a = job->args;
    dspark_model_opts opts;
    dspark_status st;
    progress bar;
    bench_result *r = &job->result;
    if (r->n_formats) return open_formats(job, err);
    if (!a->checkpoint && (st = make_checkpoint(job, err)) != DSPARK_OK) return st;
    dspark_model_opts_init(&opts);
    opts.parts = DSPARK_PART_CONTEXT;
    if (r->stages[DSPARK_PATH_FULL]) opts.parts |= DSPARK_PART_Q_A;
    opts.n_threads = (uint32_t)a->n_threads;
    opts.progress = progress_update;
    opts.progress_user = &bar;
    progress_start(&bar, "packing", PROGRESS_BYTES);
    st = dspark_model_open(&job->model, a->checkpoint ? a->checkpoint : job->directory, &opts, err);
    progress_end(&bar);
    if (job->directory[0]) remove_directory(job->directory); /* the model holds what it needs */
    job->directory[0] = 0;
    if (st != DSPARK_OK) {
        if (a->checkpoint) out_add_path(err, a->checkpoint);
        return st;
    }
    describe_model(job);
    return DSPARK_OK;
}

static dspark_status make_context(bench_job *job, dspark_context **context,
                                  const dspark_model *model, int path, dspark_error *err)
{
    dspark_context_opts opts;
    dspark_context_opts_init(&opts);
    opts.isa = (dspark_isa)job->args->isa;
    opts.n_threads = (uint32_t)job->args->n_threads;
    opts.path = (dspark_path)path;
    return dspark_context_create(context, model, &opts, err);
}

static dspark_status make_contexts(bench_job *job, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    size_t i;
    int p;
    for (i = 0; st == DSPARK_OK && i < job->result.n_formats; i++)
        st = make_context(job, &job->format_contexts[i], job->format_models[i],
                          DSPARK_PATH_ONEPASS, err);
    for (p = 0; st == DSPARK_OK && !job->result.n_formats && p < BENCH_N_PATHS; p++) {
        /* The one-pass context is always there: it also makes the states. */
        if (p && !job->result.stages[p]) continue;
        st = make_context(job, &job->contexts[p], job->model, p, err);
    }
    return st;
}

static dspark_context *stage_context(const bench_job *job, int stage)
{
    if (stage >= BENCH_N_STAGES) return job->format_contexts[stage - BENCH_N_STAGES];
    if (job->result.n_formats) return job->format_contexts[0]; /* makes the states */
    if (stage == BENCH_WHOLE_FULL) return job->contexts[DSPARK_PATH_FULL];
    return job->contexts[stage < BENCH_STATES ? stage : DSPARK_PATH_ONEPASS];
}

static dspark_status make_buffers(bench_job *job, dspark_error *err)
{
    const dspark_config *c = job->result.config;
    uint64_t n = job->max_tokens, i;
    const dspark_context *first;
    dspark_status st;
    int p;
    if (n > c->max_positions)
        return out_set_error(err, DSPARK_EINVAL, "--tokens", "the model has only %" PRIu64
                             " positions", c->max_positions);
    job->states = calloc((size_t)n, (size_t)c->hidden_size * 2);
    job->positions = calloc((size_t)n, sizeof *job->positions);
    job->slots = calloc((size_t)n, sizeof *job->slots);
    job->buffer = aligned_alloc(HUGE_PAGE, (size_t)(job->args->buffer + HUGE_PAGE - 1) / HUGE_PAGE *
                                               HUGE_PAGE);
    if (!job->states || !job->positions || !job->slots || !job->buffer)
        return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for %" PRIu64 " positions and "
                             "a buffer of %" PRIu64 " bytes", n, job->args->buffer);
    /* In huge pages like the packed weights, so that the probe reads what a stage reads. */
    madvise(job->buffer, (size_t)job->args->buffer, MADV_HUGEPAGE);
    memset(job->buffer, 1, (size_t)job->args->buffer); /* real pages, not the shared zero page */
    for (i = 0; i < n; i++) job->positions[i] = job->slots[i] = (int64_t)i;
    if ((st = dump_make(&job->rows, n, 0, c, err)) != DSPARK_OK) return st;
    st = dspark_cache_create(&job->cache, job->model, DSPARK_CACHE_BF16, BLOCK_SIZE,
                             (n + BLOCK_SIZE - 1) / BLOCK_SIZE, NULL, err);
    if (st == DSPARK_OK) st = make_contexts(job, err);
    if (st != DSPARK_OK) return st;
    first = stage_context(job, DSPARK_PATH_ONEPASS);
    job->result.n_threads = dspark_context_get_plan(first).n_threads;
    job->result.isa = dspark_isa_name(dspark_context_isa(first));
    for (p = 0; p < BENCH_N_STAGES; p++) job->result.weight_bytes[p] = stage_weight_bytes(c, p);
    return DSPARK_OK;
}

/* ---- measuring ---- */

/* Each weight, input and output once: what an ideal implementation of the stage must move. */
static void fill_work(const bench_result *r, int lane, uint64_t n, bench_cell *cell)
{
    const dspark_config *c = r->config;
    int stage = lane < BENCH_N_STAGES ? lane : DSPARK_PATH_ONEPASS;
    double tokens = (double)n, h = c->hidden_size;
    double entries = c->n_layers * ((double)c->kv_lora_rank + c->qk_rope_head_dim);
    double in = stage >= BENCH_STATES ? (double)c->n_taps * c->tap_width : h;
    double out = stage == BENCH_STATES ? h : entries;
    cell->flops = tokens * stage_weight_bytes(c, stage); /* two bytes and two flops a weight */
    cell->bytes = r->weight_bytes[lane] + tokens * (in + out) * 2;
}

static int begins_at_states(int stage)
{
    return stage < BENCH_STATES || stage >= BENCH_N_STAGES;
}

static dspark_status run_stage(bench_job *job, int stage, uint64_t n, double *seconds,
                               dspark_error *err)
{
    dspark_batch batch;
    dspark_status st;
    double t0;
    dspark_batch_init(&batch);
    batch.n_tokens = (size_t)n;
    if (begins_at_states(stage))
        batch.states = job->states;
    else
        batch.taps = job->rows.taps;
    batch.positions = job->positions;
    batch.slots = job->slots;
    t0 = out_clock();
    if (stage == BENCH_STATES)
        st = dspark_context_states(stage_context(job, stage), &batch, job->states, err);
    else
        st = dspark_context_run(stage_context(job, stage), &batch,
                                dspark_cache_get_view(job->cache), NULL, err);
    *seconds = out_clock() - t0;
    return st;
}

/* Push the weights out of every cache by reading something larger. */
static dspark_status evict(bench_job *job, dspark_error *err)
{
    double gbs;
    return dspark_probe_read(job->result.n_threads, job->buffer, (size_t)job->args->buffer, 1e-3,
                             &gbs, err);
}

/* One untimed position that makes the context's workers run without reading the stage's weights:
 * the other half of the way, which has weights of its own. For the whole way there is no other
 * half; one layer goes into the cache, and reading context_proj pushes it out again before its turn
 * comes. Row 0 of the states and entries gets the bytes that it has already (of formats:
 * those of the one that ran last). */
static dspark_status wake_apart(bench_job *job, int stage, dspark_error *err)
{
    const int64_t *layer_slots[DSPARK_MAX_LAYERS] = {job->slots};
    dspark_batch batch;
    dspark_batch_init(&batch);
    batch.n_tokens = 1;
    if (begins_at_states(stage)) {
        batch.taps = job->rows.taps;
        return dspark_context_states(stage_context(job, stage), &batch, job->states, err);
    }
    batch.states = job->states;
    batch.positions = job->positions;
    batch.layer_slots = layer_slots;
    return dspark_context_run(stage_context(job, stage), &batch, dspark_cache_get_view(job->cache),
                              NULL, err);
}

/* What is timed is the stage, so two things about threads must be over before. Each context has a
 * pool of its own; the workers of the one that ran last go on spinning and would take processors
 * from the next: let them fall asleep. And waking a sleeping pool takes long compared with a call
 * of one position, while in use the workers are awake, since other work came just before: wake them
 * in a call that is not timed. */
static dspark_status prepare(bench_job *job, int cold, int stage, dspark_error *err)
{
    static const struct timespec settle = {0, SETTLE_NANOSECONDS};
    double seconds;
    dspark_status st;
    if (job->result.n_threads > 1) nanosleep(&settle, NULL);
    if (!cold) return run_stage(job, stage, 1, &seconds, err); /* brings the weights as well */
    st = evict(job, err);
    return st == DSPARK_OK ? wake_apart(job, stage, err) : st;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Nearest-rank percentile of sorted values. */
static double percentile(const double *sorted, uint64_t n, double p)
{
    uint64_t rank = (uint64_t)(p / 100 * (double)n + 0.9999999);
    if (rank < 1) rank = 1;
    return sorted[(rank < n ? rank : n) - 1];
}

/* Few long calls or many short ones: 5 to 200 repeats, about four seconds for a row. */
static uint64_t choose_repeats(const bench_job *job, double seconds_a_round)
{
    double n;
    if (job->args->repeat) return job->args->repeat;
    n = seconds_a_round > 0 ? SECONDS_A_ROW / seconds_a_round : 200;
    return n < 5 ? 5 : n > 200 ? 200 : (uint64_t)n;
}

static void fill_ratios(const bench_result *r, bench_cell *cells)
{
    double plain = 0, plain_bytes = 0;
    size_t i;
    int s;
    for (s = 0; s < BENCH_N_STAGES; s++) {
        int base = s < BENCH_STATES ? DSPARK_PATH_ONEPASS : BENCH_WHOLE_ONEPASS;
        if (s != BENCH_STATES && cells[s].measured && cells[base].measured)
            cells[s].ratio = cells[s].p50 / cells[base].p50;
    }
    for (i = 0; i < r->n_formats; i++)
        if (r->formats[i] == DSPARK_FORMAT_BF16) {
            plain = cells[BENCH_N_STAGES + i].p50;
            plain_bytes = (double)r->weight_bytes[BENCH_N_STAGES + i];
        }
    for (i = 0; i < r->n_formats; i++) {
        bench_cell *c = &cells[BENCH_N_STAGES + i];
        c->ratio = plain / c->p50;
        if (plain_bytes > 0)
            c->byte_share = c->ratio * (double)r->weight_bytes[BENCH_N_STAGES + i] / plain_bytes;
    }
}

static dspark_status measure_row(bench_job *job, bench_row *row, dspark_error *err)
{
    static double times[BENCH_N_LANES][MAX_REPEATS];
    bench_result *result = &job->result;
    uint64_t repeat, n_repeats, n = row->n_tokens;
    double started = out_clock(), seconds;
    /* Either the stages or the formats: the others would only spoil the turns. */
    int first = result->n_formats ? BENCH_N_STAGES : 0, s, k;
    int n_lanes = result->n_formats ? (int)result->n_formats : BENCH_N_STAGES;
    dspark_status st = DSPARK_OK;
    for (s = first; st == DSPARK_OK && s < first + n_lanes; s++) {
        if (!result->stages[s]) continue;
        st = prepare(job, row->cold, s, err);
        if (st == DSPARK_OK) st = run_stage(job, s, n, &seconds, err); /* warm-up */
    }
    n_repeats = choose_repeats(job, out_clock() - started);
    for (repeat = 0; st == DSPARK_OK && repeat < n_repeats; repeat++) {
        /* Another order each time, so that no stage always follows the same one. */
        for (k = 0; st == DSPARK_OK && k < n_lanes; k++) {
            s = first + (int)((repeat + (uint64_t)k) % (uint64_t)n_lanes);
            if (!result->stages[s]) continue;
            st = prepare(job, row->cold, s, err);
            if (st == DSPARK_OK) st = run_stage(job, s, n, &times[s][repeat], err);
            if (st == DSPARK_OK &&
                progress_update(&job->bar, job->steps_done * 1000 + repeat * 1000 / n_repeats,
                                job->steps * 1000))
                st = out_check_interrupt(err);
        }
    }
    if (st != DSPARK_OK) return st;
    for (s = first; s < first + n_lanes; s++) {
        bench_cell *cell = &row->cells[s];
        if (!result->stages[s]) continue;
        qsort(times[s], (size_t)n_repeats, sizeof *times[s], compare_doubles);
        cell->measured = 1;
        cell->n_repeats = n_repeats;
        cell->best = times[s][0];
        cell->p50 = percentile(times[s], n_repeats, 50);
        cell->p99 = percentile(times[s], n_repeats, 99);
        cell->cold = is_cold(result, row, s);
        fill_work(result, s, n, cell);
    }
    fill_ratios(result, row->cells);
    job->steps_done++;
    return DSPARK_OK;
}

static void fill_rooflines(bench_result *r)
{
    /* A limit is what the machine can do: of two probes the better one. */
    double compute = bench_limit(r->compute_gflops), cold_read = bench_limit(r->read_gbs);
    size_t i;
    int s;
    for (i = 0; i < r->n_rows; i++) {
        for (s = 0; s < BENCH_N_LANES; s++) {
            bench_cell *cell = &r->rows[i].cells[s];
            double by_read, by_compute = cell->flops / (compute * 1e9);
            if (!cell->measured) continue;
            cell->read_gbs = cell->cold ? cold_read : bench_limit(r->hot_gbs[s]);
            by_read = cell->bytes / (cell->read_gbs * 1e9);
            cell->roofline = by_read > by_compute ? by_read : by_compute;
        }
    }
}

static dspark_status measure(bench_job *job, dspark_error *err)
{
    bench_result *r = &job->result;
    double steal[2] = {0}, total[2] = {0}, seconds, started = out_clock();
    int steal_known = bench_read_steal(&steal[0], &total[0]);
    dspark_status st;
    size_t i;
    for (i = 0; i < r->n_rows; i++) {
        bench_row *row = &r->rows[i];
        row->n_tokens = job->tokens[i];
        row->cold = job->args->cold ? 1 : job->args->hot ? 0 : row->n_tokens <= COLD_LIMIT;
    }
    st = probe_machine(job, 0, err);
    if (st == DSPARK_OK) st = run_stage(job, BENCH_STATES, job->max_tokens, &seconds, err);
    progress_start(&job->bar, "measuring", PROGRESS_STEPS);
    job->steps = r->n_rows;
    for (i = 0; st == DSPARK_OK && i < r->n_rows; i++) st = measure_row(job, &r->rows[i], err);
    progress_end(&job->bar);
    if (st == DSPARK_OK) st = probe_machine(job, 1, err);
    if (st != DSPARK_OK) return st;
    r->steal_percent = -1;
    if (steal_known && bench_read_steal(&steal[1], &total[1]) && total[1] > total[0])
        r->steal_percent = 100 * (steal[1] - steal[0]) / (total[1] - total[0]);
    r->seconds = out_clock() - started;
    fill_rooflines(r);
    return DSPARK_OK;
}

/* ---- the command ---- */

static int read_tokens(const args_command *command, bench_job *job)
{
    long n = args_read_uints(job->args->tokens, &job->tokens), i;
    if (n < 0) return out_error(EXIT_INTERNAL, "out of memory");
    for (i = 0; i < n; i++)
        if (job->tokens[i] < 1 || job->tokens[i] > 65536) break;
    if (n == 0 || i < n)
        return args_complain(command, "--tokens: '%s' is not allowed; expected numbers from 1 to "
                             "65536 separated by commas", job->args->tokens);
    for (i = 0; i < n; i++)
        if (job->tokens[i] > job->max_tokens) job->max_tokens = job->tokens[i];
    job->result.n_rows = (size_t)n;
    job->result.rows = calloc((size_t)n, sizeof *job->result.rows);
    return job->result.rows ? ARGS_RUN : out_error(EXIT_INTERNAL, "out of memory");
}

static int run_job(const args_command *command, const bench_args *a)
{
    static bench_job job; /* large; one a process */
    dspark_error err = {0};
    dspark_status st;
    int code, s;
    job.args = a;
    job.result.buffer_bytes = a->buffer;
    if (a->formats && !bench_read_formats(a->formats, &job.result))
        return args_complain(command, "--formats: '%s' is not allowed; expected different names of "
                             "bf16, fp8-tensor, fp8-channel, fp8-block, nvfp4, mxfp4, mxfp8, int8, "
                             "int4, separated by commas", a->formats);
    for (s = 0; s < BENCH_N_PATHS; s++)
        job.result.stages[s] = !a->formats && (!a->path_given || a->path == s);
    job.result.stages[BENCH_STATES] = !a->formats && !a->no_states;
    job.result.stages[BENCH_WHOLE_ONEPASS] =
        !a->no_states && job.result.stages[DSPARK_PATH_ONEPASS];
    job.result.stages[BENCH_WHOLE_FULL] = !a->no_states && job.result.stages[DSPARK_PATH_FULL];
    job.result.n_processors = bench_read_processors();
    job.result.cache_bytes = bench_read_cache_bytes();
    bench_read_cpu_name(job.result.cpu, sizeof job.result.cpu);
    code = read_tokens(command, &job);
    if (code != ARGS_RUN) goto done;
    if ((st = open_model(&job, &err)) != DSPARK_OK) goto fail;
    if ((st = make_buffers(&job, &err)) != DSPARK_OK) goto fail;
    if ((st = measure(&job, &err)) != DSPARK_OK) goto fail;
    code = a->json ? bench_print_json(&job.result) : bench_print_text(&job.result);
    if (code == EXIT_OK && a->csv) code = bench_write_csv(&job.result, a->csv);
    if (code == EXIT_OK && a->svg) code = bench_write_svg(&job.result, a->svg);
    goto done;
fail:
    code = out_fail(st, &err);
done:
    for (s = 0; s < BENCH_N_PATHS; s++) dspark_context_free(job.contexts[s]);
    for (s = 0; s < BENCH_MAX_FORMATS; s++) dspark_context_free(job.format_contexts[s]);
    dspark_cache_free(job.cache);
    dump_close(&job.rows);
    if (!job.result.n_formats) dspark_model_close(job.model);
    for (s = 0; s < BENCH_MAX_FORMATS; s++) dspark_model_close(job.format_models[s]);
    if (job.directory[0]) remove_directory(job.directory);
    free(job.states);
    free(job.positions);
    free(job.slots);
    free(job.buffer);
    free(job.tokens);
    free(job.result.rows);
    return code;
}

/* Outputs that take no input's place and can be written: known before the minutes of measuring.
 * Returns ARGS_RUN or an exit code. */
static int check_outputs(const args_command *command, const bench_args *a)
{
    const char *const paths[] = {a->csv, a->svg}, *const names[] = {"--csv", "--svg"};
    int i, code;
    for (i = 0; i < 2; i++) {
        const char *why = paths[i] ? out_refuse_target(paths[i], a->checkpoint) : NULL;
        if (why) return args_complain(command, "%s: '%s' %s", names[i], paths[i], why);
    }
    if (a->csv && a->svg && out_same_target(a->csv, a->svg))
        return args_complain(command, "--csv and --svg name the same file");
    for (i = 0; i < 2; i++)
        if (paths[i] && (code = out_file_try(paths[i])) != EXIT_OK) return code;
    return ARGS_RUN;
}

int command_bench(int argc, char **argv)
{
    bench_args a;
    int code;
    static const char *const operands[] = {"CKPT", NULL};
    const args_option options[] = {
        {"preset", ARGS_TEXT, &a.preset, "P",
         "without CKPT: the synthetic checkpoint to make (default\n"
         "kimi-k3, context part only: 665 MB in a temporary folder)", 0, 0, NULL, NULL},
        {"tokens", ARGS_TEXT, &a.tokens, "N,N,...",
         "positions of a call, one for each token\n(default 1,8,16,32,64,512)", 0, 0, NULL, NULL},
        {"formats", ARGS_TEXT, &a.formats, "F,F,...",
         "instead of the paths: the one pass from states over the\n"
         "weights in each format, in turn (names as in dspark quantize;\n"
         "bf16: the checkpoint itself); copies in a temporary folder", 0, 0, NULL, NULL},
        {"draft", ARGS_FLAG, &a.draft, NULL,
         "instead: one drafted block of CKPT, time and bytes by stage", 0, 0, NULL, NULL},
        {"contexts", ARGS_TEXT, &a.contexts, "N,N,...",
         "context lengths for --draft (default 4096)", 0, 0, NULL, NULL},
        {"target", ARGS_TEXT, &a.target, "DIR",
         "with --draft: where LM head and embedding come from\n(default: made up)", 0, 0, NULL, NULL},
        {"threads", ARGS_UINT, &a.n_threads, "N", "threads (default: all processors)", 1, 1024,
         NULL, NULL},
        {"isa", ARGS_CHOICE, &a.isa, NULL, "instruction set (default auto)", 0, 0,
         args_isa_choices, NULL},
        {"path", ARGS_CHOICE, &a.path, NULL, "measure one path only (default: all three in turn)",
         0, 0, args_path_choices, &a.path_given},
        {"repeat", ARGS_UINT, &a.repeat, "R", "repeats (default: 5 to 200, about four seconds)", 1,
         MAX_REPEATS, NULL, NULL},
        {"cold", ARGS_FLAG, &a.cold, NULL,
         "weights come from memory: caches are emptied before each\n"
         "call (default up to 64 positions)", 0, 0, NULL, NULL},
        {"hot", ARGS_FLAG, &a.hot, NULL, "weights stay where the last call left them", 0, 0, NULL,
         NULL},
        {"buffer", ARGS_SIZE, &a.buffer, "BYTES",
         "buffer of the read probe and for emptying caches\n(default 512M)", 1048576,
         BUFFER_MAX, NULL, NULL},
        {"no-states", ARGS_FLAG, &a.no_states, NULL, "measure nothing that begins at the taps", 0,
         0, NULL, NULL},
        {"csv", ARGS_TEXT, &a.csv, "FILE", "write every measurement as CSV", 0, 0, NULL, NULL},
        {"svg", ARGS_TEXT, &a.svg, "FILE", "draw time per position, with the roofline", 0,
         0, NULL, NULL},
        {"json", ARGS_FLAG, &a.json, NULL, "print the report as JSON", 0, 0, NULL, NULL},
    };
    args_command command = {
        .name = "bench",
        .synopsis = "[CKPT] [OPTIONS]",
        .summary = "Time states -> cache in three ways, taps -> states and the whole way from\n"
                   "taps to cache, in turn within one process, and the machine's limits (compute\n"
                   "and read probes) before and after.",
        .operands = operands,
        .operand_values = &a.checkpoint,
        .options = options,
        .n_options = sizeof options / sizeof *options,
        .trailer = "The roofline of a stage is max(bytes / read probe, flops / compute probe),\n"
                   "each weight, input and output counted once, by the better of the probes\n"
                   "before and after. Weights are cold when they come from memory: after emptying\n"
                   "the caches, or because they are larger. ratio: median / median of onepass.\n"
                   "A run on a busy or drifting machine ends with a line NOT RELIABLE.",
    };
    memset(&a, 0, sizeof a);
    a.tokens = "1,8,16,32,64,512";
    a.buffer = BUFFER_BYTES;
    code = args_parse(&command, argc, argv);
    if (code != ARGS_RUN) return code;
    if (a.cold && a.hot) return args_complain(&command, "--cold and --hot exclude each other");
    if (a.checkpoint && a.preset)
        return args_complain(&command, "--preset goes without CKPT");
    if (a.formats && (a.path_given || a.svg))
        return args_complain(&command, "--formats measures the one pass and draws nothing: no "
                             "--path and no --svg");
    if (a.draft) {
        bench_draft_args d = {a.checkpoint, a.target, a.contexts ? a.contexts : "4096",
                              (uint32_t)a.n_threads, a.isa, a.repeat ? a.repeat : 5, a.json};
        if (a.repeat > 200) return args_complain(&command, "--repeat: at most 200 with --draft");
        if (!a.checkpoint) return args_complain(&command, "--draft needs CKPT");
        if (a.csv || a.svg || a.formats || a.path_given)
            return args_complain(&command, "--draft goes with --contexts, --target, --threads, --isa, "
                                 "--repeat and --json only");
        return bench_draft(&d);
    }
    if (a.contexts || a.target)
        return args_complain(&command, "--contexts and --target go with --draft");
    code = check_outputs(&command, &a);
    return code == ARGS_RUN ? run_job(&command, &a) : code;
}
