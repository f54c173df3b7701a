/* dspark context: a hidden-state dump in, every layer's cache out. Streams the dump in batches;
 * what grows with the dump is the cache alone, which is the result. The output file holds facts of
 * the model and the dump only, so that runs with another batch size, path, thread count or
 * instruction set give the same bytes. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "args.h"
#include "commands.h"
#include "dump.h"
#include "open_model.h"
#include "out.h"
#include "outputs.h"
#include "progress.h"

typedef struct context_args {
    const char *checkpoint;
    const char *prepacked;
    const char *taps;
    const char *out;
    const char *states_out;
    int cache_dtype;
    int cache_given;
    int tile_scale;
    int tile_given;
    double scale;
    int scale_given;
    const char *scales;
    uint64_t block_size;
    int path;
    uint64_t batch;
    uint64_t start;
    int start_given;
    uint64_t n_threads;
    int isa;
    int vllm_compat;
    int json;
} context_args;

typedef struct context_job {
    const context_args *args;
    dspark_model *model;
    const dspark_config *config;
    dspark_context *context;
    dspark_cache *cache;
    dspark_cache_view view;
    float scales[DSPARK_MAX_LAYERS];
    dspark_writer *writer;
    dspark_writer *states_writer;
    dump rows;
    dump_stats stats;
    uint64_t start;          /* position of the first row */
    uint64_t batch;          /* rows per call */
    int64_t *positions;      /* [n_rows] */
    int64_t *slots;          /* [n_rows]: row i goes to slot i */
    unsigned char *states;   /* [batch, h] bf16 */
    size_t entry_bytes;
    uint64_t n_blocks;
    uint64_t n_written;
    double states_seconds;
    double cache_seconds;
    row_digest taps_digest;
    row_digest states_digest;
    row_digest layer_digest[DSPARK_MAX_LAYERS]; /* of entries, in order of position */
} context_job;

static const char *const tile_choices[] = {"pow2", "exact", NULL};

/* ---- before the run ---- */

static int takes_scales(const context_args *a)
{
    return a->cache_dtype == DSPARK_CACHE_FP8_E4M3 || a->cache_dtype == DSPARK_CACHE_FP8_E5M2;
}

/* Options that would be ignored are refused. Returns ARGS_RUN or an exit code. */
static int check_options(const args_command *command, const context_args *a)
{
    if (!a->taps) return args_complain(command, "--taps FILE is missing");
    if ((a->scale_given || a->scales) && !takes_scales(a))
        return args_complain(command, "--scale and --scales go with --cache-dtype fp8_e4m3 or "
                             "fp8_e5m2, not with %s", args_cache_choices[a->cache_dtype]);
    if (a->scale_given && a->scales)
        return args_complain(command, "--scale and --scales exclude each other");
    if (a->tile_given && a->cache_dtype != DSPARK_CACHE_FP8_DS_MLA)
        return args_complain(command, "--tile-scale goes with --cache-dtype fp8_ds_mla, not with "
                             "%s", args_cache_choices[a->cache_dtype]);
    return ARGS_RUN;
}

static int read_scales(const args_command *command, context_job *job)
{
    const context_args *a = job->args;
    uint32_t n_layers = job->config->n_layers, l;
    double *values = NULL;
    long n;
    int code = ARGS_RUN;
    if (!takes_scales(a)) return ARGS_RUN;
    for (l = 0; l < n_layers; l++) job->scales[l] = a->scale_given ? (float)a->scale : 1.0f;
    if (a->scales) {
        n = args_read_numbers(a->scales, &values);
        if (n < 0) return out_error(EXIT_INTERNAL, "out of memory");
        if (n != (long)n_layers) {
            free(values);
            return args_complain(command, "--scales: '%s' is not allowed; expected %u numbers "
                                 "separated by commas, one for each layer", a->scales, n_layers);
        }
        for (l = 0; l < n_layers; l++) job->scales[l] = (float)values[l];
        free(values);
    }
    for (l = 0; l < n_layers && code == ARGS_RUN; l++)
        if (!(job->scales[l] > 0) || job->scales[l] > 3e38f)
            code = args_complain(command, "%s: the scale of layer %u is not a positive fp32 number",
                                 a->scales ? "--scales" : "--scale", l);
    job->view.scales = job->scales;
    return code;
}

static int check_output(const args_command *command, const context_args *a)
{
    const output_path outputs[] = {{"--out", a->out, 0}, {"--states-out", a->states_out, 0}};
    const char *const inputs[] = {a->checkpoint, a->taps, a->prepacked};
    return outputs_check(command, outputs, 2, inputs, 3);
}

/* A dump in the place of the checkpoint is always a slip. */
static int check_swapped(const args_command *command, const context_args *a)
{
    struct stat info;
    dspark_checkpoint *file = NULL;
    int is_dump;
    if (stat(a->checkpoint, &info) != 0 || !S_ISREG(info.st_mode)) return ARGS_RUN;
    if (dspark_checkpoint_open(&file, a->checkpoint, NULL) != DSPARK_OK) return ARGS_RUN;
    is_dump = dspark_checkpoint_find(file, "hidden_states") &&
              dspark_checkpoint_find(file, "token_ids");
    dspark_checkpoint_close(file);
    if (!is_dump) return ARGS_RUN;
    return args_complain(command, "'%s' is a hidden-state dump, not a checkpoint: CKPT and --taps "
                         "look swapped", a->checkpoint);
}

static dspark_status open_context(context_job *job, dspark_error *err)
{
    dspark_model_opts opts;
    dspark_status st;
    dspark_model_opts_init(&opts);
    opts.parts = DSPARK_PART_CONTEXT;
    if (job->args->path == DSPARK_PATH_FULL) opts.parts |= DSPARK_PART_Q_A;
    opts.n_threads = (uint32_t)job->args->n_threads;
    opts.vllm_compat = job->args->vllm_compat;
    opts.prepacked = job->args->prepacked;
    st = open_model(&job->model, job->args->checkpoint, &opts, "packing", err);
    if (st == DSPARK_OK) job->config = dspark_model_config(job->model);
    return st;
}

static dspark_status open_rows(context_job *job, dspark_error *err)
{
    const context_args *a = job->args;
    dspark_status st = dump_open(&job->rows, a->taps, job->config, err);
    if (st != DSPARK_OK) return st;
    st = dump_start(&job->rows, a->start_given, a->start, &job->start, err);
    if (st != DSPARK_OK) return st;
    return dump_check_window(&job->rows, job->start, job->config, err);
}

static dspark_status make_cache(context_job *job, dspark_error *err)
{
    const context_args *a = job->args;
    const dspark_config *c = job->config;
    uint64_t n = job->rows.n_rows, i;
    dspark_status st;
    job->entry_bytes = dspark_cache_entry_bytes((dspark_cache_dtype)a->cache_dtype,
                                                c->kv_lora_rank, c->qk_rope_head_dim);
    if (!job->entry_bytes)
        return out_set_error(err, DSPARK_EUNSUPPORTED, "--cache-dtype", "%s does not fit a latent "
                             "of %u and a rope key of %u", args_cache_choices[a->cache_dtype],
                             c->kv_lora_rank, c->qk_rope_head_dim);
    job->n_blocks = (n + a->block_size - 1) / a->block_size;
    st = dspark_cache_create(&job->cache, job->model, (dspark_cache_dtype)a->cache_dtype,
                             (uint32_t)a->block_size, job->n_blocks, NULL, err);
    if (st != DSPARK_OK) return st;
    {
        const float *scales = job->view.scales;
        job->view = *dspark_cache_get_view(job->cache);
        job->view.scales = scales;
        job->view.tile_scale = (dspark_tile_scale)a->tile_scale;
    }
    job->batch = a->batch < n ? a->batch : n;
    job->positions = calloc((size_t)n, sizeof *job->positions);
    job->slots = calloc((size_t)n, sizeof *job->slots);
    job->states = calloc((size_t)job->batch, (size_t)c->hidden_size * 2);
    if (!job->positions || !job->slots || !job->states)
        return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for %" PRIu64 " rows", n);
    for (i = 0; i < n; i++) {
        job->positions[i] = (int64_t)(job->start + i);
        job->slots[i] = (int64_t)i;
    }
    return DSPARK_OK;
}

static dspark_status make_context(context_job *job, dspark_error *err)
{
    dspark_context_opts opts;
    dspark_context_opts_init(&opts);
    opts.isa = (dspark_isa)job->args->isa;
    opts.n_threads = (uint32_t)job->args->n_threads;
    opts.path = (dspark_path)job->args->path;
    if (job->batch < 512) opts.max_tokens = (uint32_t)job->batch;
    return dspark_context_create(&job->context, job->model, &opts, err);
}

/* ---- the output file ---- */

/* The projected rows: written while they are made. */
static dspark_status open_states(context_job *job, dspark_error *err)
{
    const uint64_t shape[2] = {job->rows.n_rows, job->config->hidden_size};
    const char *path = job->args->states_out;
    dspark_writer *w;
    dspark_status st;
    if (!path) return DSPARK_OK;
    st = dspark_writer_create(&job->states_writer, path, err);
    w = job->states_writer;
    if (st == DSPARK_OK) st = dspark_writer_metadata(w, "dspark_version", dspark_version(), err);
    if (st == DSPARK_OK)
        st = dspark_writer_metadata(w, "fingerprint", dspark_model_fingerprint(job->model), err);
    if (st == DSPARK_OK) st = dspark_writer_declare(w, "states", DSPARK_BF16, 2, shape, err);
    if (st == DSPARK_OK) st = dspark_writer_declare(w, "positions", DSPARK_I64, 1, shape, err);
    return st;
}

static dspark_status write_states(context_job *job, dspark_error *err)
{
    size_t n_bytes = (size_t)job->rows.n_rows * sizeof(int64_t);
    if (!job->states_writer) return DSPARK_OK;
    return dspark_writer_data(job->states_writer, job->positions, n_bytes, err);
}

/* commit frees the writer, also when it fails */
static dspark_status commit(dspark_writer **writer, dspark_error *err)
{
    dspark_status st = *writer ? dspark_writer_commit(*writer, err) : DSPARK_OK;
    *writer = NULL;
    return st;
}

/* Neither file appears before all is given to both, and the large one comes first: a disk that is full
 * leaves none of them. */
static dspark_status commit_outputs(context_job *job, dspark_error *err)
{
    dspark_status st = out_check_interrupt(err);
    if (st == DSPARK_OK) st = commit(&job->writer, err);
    return st == DSPARK_OK ? commit(&job->states_writer, err) : st;
}

/* Everything is declared before the run, so that an unwritable output fails at once. */
static dspark_status open_output(context_job *job, dspark_error *err)
{
    static const dspark_dtype dtypes[] = {DSPARK_BF16, DSPARK_F8_E4M3, DSPARK_F8_E5M2, DSPARK_U8};
    dspark_dtype dtype = dtypes[job->args->cache_dtype];
    uint64_t shape[3];
    uint32_t l;
    dspark_status st = open_states(job, err);
    if (st != DSPARK_OK || !job->args->out) return st;
    st = dspark_writer_create(&job->writer, job->args->out, err);
    shape[0] = job->n_blocks;
    shape[1] = job->args->block_size;
    shape[2] = job->entry_bytes * 8 / dspark_dtype_bits(dtype);
    for (l = 0; st == DSPARK_OK && l < job->config->n_layers; l++) {
        char name[64];
        snprintf(name, sizeof name, "layers.%u.kv_cache", l);
        st = dspark_writer_declare(job->writer, name, dtype, 3, shape, err);
    }
    shape[0] = job->rows.n_rows;
    if (st == DSPARK_OK)
        st = dspark_writer_declare(job->writer, "slot_mapping", DSPARK_I64, 1, shape, err);
    if (st == DSPARK_OK)
        st = dspark_writer_declare(job->writer, "positions", DSPARK_I64, 1, shape, err);
    return st;
}

static dspark_status write_metadata(context_job *job, dspark_error *err)
{
    char key[64], text[64];
    uint32_t l;
    dspark_writer *w = job->writer;
    dspark_status st = dspark_writer_metadata(w, "dspark_version", dspark_version(), err);
    if (st == DSPARK_OK)
        st = dspark_writer_metadata(w, "fingerprint", dspark_model_fingerprint(job->model), err);
    if (st == DSPARK_OK)
        st = dspark_writer_metadata(w, "cache_dtype", args_cache_choices[job->args->cache_dtype],
                                    err);
    snprintf(text, sizeof text, "%u", job->config->kv_lora_rank);
    if (st == DSPARK_OK) st = dspark_writer_metadata(w, "kv_lora_rank", text, err);
    if (st == DSPARK_OK && job->args->cache_dtype == DSPARK_CACHE_FP8_DS_MLA)
        st = dspark_writer_metadata(w, "tile_scale", tile_choices[job->args->tile_scale], err);
    /* These caches are not the model's: the file must say so. */
    if (st == DSPARK_OK && job->args->vllm_compat)
        st = dspark_writer_metadata(w, "vllm_compat", "true", err);
    for (l = 0; st == DSPARK_OK && job->view.scales && l < job->config->n_layers; l++) {
        snprintf(key, sizeof key, "scale.layers.%u", l);
        snprintf(text, sizeof text, "%.9g", (double)job->scales[l]);
        st = dspark_writer_metadata(w, key, text, err);
    }
    if (st == DSPARK_OK)
        st = dspark_writer_metadata(w, "digest.taps", job->taps_digest.hex, err);
    if (st == DSPARK_OK)
        st = dspark_writer_metadata(w, "digest.states", job->states_digest.hex, err);
    for (l = 0; st == DSPARK_OK && l < job->config->n_layers; l++) {
        snprintf(key, sizeof key, "digest.layers.%u.kv_cache", l);
        st = dspark_writer_metadata(w, key, job->layer_digest[l].hex, err);
    }
    return st;
}

static dspark_status write_output(context_job *job, dspark_error *err)
{
    uint64_t layer_bytes = job->n_blocks * job->args->block_size * job->entry_bytes, at, done = 0;
    size_t index_bytes = (size_t)job->rows.n_rows * sizeof(int64_t);
    const uint64_t piece = UINT64_C(16) << 20;
    dspark_status st;
    progress bar;
    uint32_t l;
    if (!job->writer) return DSPARK_OK;
    st = write_metadata(job, err);
    progress_start(&bar, "writing", PROGRESS_BYTES);
    for (l = 0; st == DSPARK_OK && l < job->config->n_layers; l++) {
        for (at = 0; st == DSPARK_OK && at < layer_bytes; at += piece) {
            uint64_t n = layer_bytes - at < piece ? layer_bytes - at : piece;
            st = dspark_writer_data(job->writer, (const char *)job->view.layers[l] + at, (size_t)n,
                                    err);
            done += n;
            if (progress_update(&bar, done, layer_bytes * job->config->n_layers))
                st = out_check_interrupt(err);
        }
    }
    progress_end(&bar);
    if (st == DSPARK_OK) st = dspark_writer_data(job->writer, job->slots, index_bytes, err);
    if (st == DSPARK_OK) st = dspark_writer_data(job->writer, job->positions, index_bytes, err);
    return st;
}

/* ---- the run ---- */

/* The rows' entries where they lie in the cache. Positions follow each other, so rows are in order
 * of position; block size and unused entries do not count. */
static void digest_entries(context_job *job, uint64_t first, uint64_t n)
{
    uint64_t i;
    uint32_t l;
    for (l = 0; l < job->config->n_layers; l++)
        for (i = first; i < first + n; i++)
            row_digest_add(&job->layer_digest[l],
                           (const char *)job->view.layers[l] +
                               (size_t)job->slots[i] * job->entry_bytes,
                           job->entry_bytes);
}

static dspark_status run_batch(context_job *job, uint64_t first, uint64_t n, dspark_error *err)
{
    const dump *rows = &job->rows;
    size_t state_bytes = (size_t)job->config->hidden_size * 2;
    dspark_batch batch;
    dspark_run_info info;
    dspark_status st = dump_check_rows(rows, first, n, err);
    double t0, t1;
    uint64_t i;
    dspark_batch_init(&batch);
    batch.n_tokens = (size_t)n;
    batch.taps = rows->taps + (size_t)first * rows->stride;
    batch.taps_stride = rows->stride;
    batch.positions = job->positions + first;
    batch.slots = job->slots + first;
    batch.first_row = (size_t)first;
    if (st == DSPARK_OK) {
        for (i = first; i < first + n; i++)
            row_digest_add(&job->taps_digest, rows->taps + (size_t)i * rows->stride, rows->row_bytes);
        dump_stats_add(&job->stats, rows, first, n);
        t0 = out_clock();
        st = dspark_context_states(job->context, &batch, job->states, err);
        t1 = out_clock();
        job->states_seconds += t1 - t0;
    }
    if (st != DSPARK_OK)
        return dump_first_fault(rows, job->args->checkpoint, job->context, &batch, &job->view, st, err);
    for (i = 0; i < n; i++)
        row_digest_add(&job->states_digest, job->states + (size_t)i * state_bytes, state_bytes);
    if (job->states_writer) {
        st = dspark_writer_data(job->states_writer, job->states, (size_t)n * state_bytes, err);
        if (st != DSPARK_OK) return st;
    }
    batch.taps = NULL;
    batch.taps_stride = 0;
    batch.states = job->states;
    t0 = out_clock();
    st = dspark_context_run(job->context, &batch, &job->view, &info, err);
    job->cache_seconds += out_clock() - t0;
    job->n_written += info.n_written;
    if (st == DSPARK_OK && info.n_rows != n)
        st = out_set_error(err, DSPARK_EINTERNAL, "", "%zu rows of %" PRIu64 " are complete",
                           info.n_rows, n);
    if (st == DSPARK_OK) digest_entries(job, first, n);
    return dump_first_fault(rows, job->args->checkpoint, job->context, &batch, &job->view, st, err);
}

static dspark_status run_rows(context_job *job, dspark_error *err)
{
    uint64_t first, n_rows = job->rows.n_rows;
    dspark_status st = DSPARK_OK;
    progress bar;
    uint32_t l;
    for (l = 0; l < job->config->n_layers; l++) row_digest_start(&job->layer_digest[l]);
    row_digest_start(&job->taps_digest);
    row_digest_start(&job->states_digest);
    progress_start(&bar, "context", PROGRESS_ROWS);
    for (first = 0; st == DSPARK_OK && first < n_rows; first += job->batch) {
        uint64_t n = n_rows - first < job->batch ? n_rows - first : job->batch;
        st = run_batch(job, first, n, err);
        dump_forget_rows(&job->rows, first, n);
        if (st == DSPARK_OK && progress_update(&bar, first + n, n_rows))
            st = out_check_interrupt(err);
    }
    progress_end(&bar);
    return st;
}

/* ---- the report ---- */

/* The kernel's high-water mark of this program alone: getrusage would hand down what the parent held
 * when it started us, so it is only the way out where there is no /proc. */
static uint64_t peak_memory(void)
{
    struct rusage usage;
    unsigned long long kib = 0;
    char line[128];
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "VmHWM: %llu kB", &kib) == 1) break;
    if (f) fclose(f);
    if (!kib && getrusage(RUSAGE_SELF, &usage) == 0) kib = (unsigned long long)usage.ru_maxrss;
    return kib * 1024;
}

/* Rows at positions that training never saw; acceptance may fall there. */
static uint64_t rows_outside_training(const context_job *job)
{
    const dspark_config *c = job->config;
    uint64_t window = c->rope_type == DSPARK_ROPE_YARN ? c->rope_original_max_positions : 0;
    uint64_t end = job->start + job->rows.n_rows;
    if (!window || end <= window) return 0;
    return end - (job->start > window ? job->start : window);
}

static size_t list_warnings(const context_job *job, char texts[DUMP_MAX_WARNINGS + 1][160])
{
    uint64_t outside = rows_outside_training(job);
    size_t n = dump_stats_warn(&job->stats, &job->rows, texts);
    char text[32];
    if (outside)
        snprintf(texts[n++], sizeof texts[0], "%s row%s outside the trained window of %" PRIu64
                 " positions", out_count(text, outside), outside == 1 ? " lies" : "s lie",
                 job->config->rope_original_max_positions);
    return n;
}

static void print_stage(out_table *t, const char *name, double seconds, uint64_t n_rows,
                        const char *digest)
{
    char text[32];
    out_table_cell(t, "%s", name);
    out_table_cell(t, "%s", seconds > 0 ? out_seconds(text, seconds) : "");
    if (seconds > 0)
        out_table_cell(t, "%.0f", (double)n_rows / seconds);
    else
        out_table_cell(t, "%s", "");
    out_table_cell(t, "%s", digest);
}

/* The scales in use, also when nobody gave one. */
static void print_scales(const context_job *job)
{
    uint32_t l, n = 1;
    for (l = 1; l < job->config->n_layers; l++) n += job->scales[l] != job->scales[0];
    printf("            scale%s", n > 1 ? "s" : "");
    for (l = 0; l < (n > 1 ? job->config->n_layers : 1); l++)
        printf("%s %g", l ? "," : "", (double)job->scales[l]);
    printf("%s\n", n > 1 ? "" : " in every layer");
}

static int print_text(const context_job *job)
{
    const context_args *a = job->args;
    const dspark_config *c = job->config;
    uint64_t n = job->rows.n_rows;
    dspark_context_plan plan = dspark_context_get_plan(job->context);
    char b1[32], b2[32], b3[32], name[64], warnings[DUMP_MAX_WARNINGS + 1][160];
    size_t n_warnings, i;
    out_table t;
    uint32_t l;
    printf("checkpoint  ");
    out_text(stdout, a->checkpoint);
    printf("\n            fingerprint %s\ndump        ", dspark_model_fingerprint(job->model));
    out_text(stdout, a->taps);
    printf("\n            %s row%s, %u taps of %u%s, positions %" PRIu64 " to %" PRIu64 "\n",
           out_count(b1, n), n == 1 ? "" : "s", c->n_taps, c->tap_width,
           job->rows.has_verifier ? " and the verifier's final state (not used)" : "", job->start,
           job->start + n - 1);
    printf("            rms of each tap:");
    for (l = 0; l < c->n_taps; l++)
        printf(" %.4g", dump_stats_rms(&job->stats, &job->rows, l));
    putchar('\n');
    n_warnings = list_warnings(job, warnings);
    for (i = 0; i < n_warnings; i++) printf("warning:    %s\n", warnings[i]);
    printf("cache       %s, %u layers x %" PRIu64 " blocks x %" PRIu64 " entries of %zu bytes: "
           "%s\n", args_cache_choices[a->cache_dtype], c->n_layers, job->n_blocks, a->block_size,
           job->entry_bytes,
           out_bytes(b1, (double)(job->n_blocks * a->block_size * job->entry_bytes) * c->n_layers));
    if (job->view.scales) print_scales(job);
    printf("run         %s, %s, %u thread%s, %" PRIu64 " row%s a call\n",
           dspark_isa_name(dspark_context_isa(job->context)), args_path_choices[a->path],
           plan.n_threads, plan.n_threads == 1 ? "" : "s", job->batch, job->batch == 1 ? "" : "s");
    if (a->vllm_compat)
        printf("            vLLM's merge: shards of context_kv take one scale where vLLM does so "
               "(inexact, for comparing)\n");
    printf("memory      weights %s, workspace %s, peak of the process %s\n\n",
           out_bytes(b1, (double)dspark_model_resident_bytes(job->model)),
           out_bytes(b2, (double)plan.workspace_bytes), out_bytes(b3, (double)peak_memory()));
    out_table_init(&t, "lrrl");
    out_table_cell(&t, "stage");
    out_table_cell(&t, "time");
    out_table_cell(&t, "rows/s");
    out_table_cell(&t, "digest");
    print_stage(&t, "taps", 0, n, job->taps_digest.hex);
    print_stage(&t, "taps -> states", job->states_seconds, n, job->states_digest.hex);
    print_stage(&t, "states -> cache", job->cache_seconds, n, "");
    for (l = 0; l < c->n_layers; l++) {
        snprintf(name, sizeof name, "  layers.%u.kv_cache", l);
        print_stage(&t, name, 0, n, job->layer_digest[l].hex);
    }
    print_stage(&t, "together", job->states_seconds + job->cache_seconds, n, "");
    if (out_table_print(&t, 0) != 0) return out_error(EXIT_INTERNAL, "out of memory");
    if (a->out || a->states_out) putchar('\n');
    for (i = 0; i < 2; i++) {
        const char *path = i ? a->states_out : a->out;
        if (!path) continue;
        printf("written     ");
        out_text(stdout, path);
        putchar('\n');
    }
    return EXIT_OK;
}

static int print_json(const context_job *job)
{
    const context_args *a = job->args;
    dspark_context_plan plan = dspark_context_get_plan(job->context);
    json_t *doc = json_object(), *digests = json_object(), *layers = json_array();
    json_t *scales = json_array(), *rms = json_array(), *warned = json_array();
    char warnings[DUMP_MAX_WARNINGS + 1][160];
    size_t n_warnings = list_warnings(job, warnings), i;
    uint32_t l;
    out_set(doc, "checkpoint", out_string(a->checkpoint));
    out_set(doc, "fingerprint", json_string(dspark_model_fingerprint(job->model)));
    out_set(doc, "dump", out_string(a->taps));
    out_set(doc, "out", out_string(a->out));
    out_set(doc, "states_out", out_string(a->states_out));
    out_set(doc, "rows", json_integer((json_int_t)job->rows.n_rows));
    out_set(doc, "taps", json_integer(job->config->n_taps));
    out_set(doc, "has_verifier_state", json_boolean(job->rows.has_verifier));
    out_set(doc, "start_position", json_integer((json_int_t)job->start));
    out_set(doc, "rows_outside_trained_window",
            json_integer((json_int_t)rows_outside_training(job)));
    for (l = 0; l < job->config->n_taps; l++)
        out_append(rms, out_real(dump_stats_rms(&job->stats, &job->rows, l)));
    out_set(doc, "tap_rms", rms);
    for (i = 0; i < n_warnings; i++) out_append(warned, json_string(warnings[i]));
    out_set(doc, "warnings", warned);
    out_set(doc, "cache_dtype", json_string(args_cache_choices[a->cache_dtype]));
    if (a->cache_dtype == DSPARK_CACHE_FP8_DS_MLA)
        out_set(doc, "tile_scale", json_string(tile_choices[a->tile_scale]));
    if (a->vllm_compat) out_set(doc, "vllm_compat", json_true());
    for (l = 0; job->view.scales && l < job->config->n_layers; l++)
        out_append(scales, out_real((double)job->scales[l]));
    out_set(doc, "scales", scales);
    out_set(doc, "block_size", json_integer((json_int_t)a->block_size));
    out_set(doc, "blocks", json_integer((json_int_t)job->n_blocks));
    out_set(doc, "entry_bytes", json_integer((json_int_t)job->entry_bytes));
    out_set(doc, "entries_written", json_integer((json_int_t)job->n_written));
    out_set(doc, "isa", json_string(dspark_isa_name(dspark_context_isa(job->context))));
    out_set(doc, "path", json_string(args_path_choices[a->path]));
    out_set(doc, "threads", json_integer(plan.n_threads));
    out_set(doc, "batch", json_integer((json_int_t)job->batch));
    out_set(doc, "weight_bytes", json_integer((json_int_t)dspark_model_resident_bytes(job->model)));
    out_set(doc, "workspace_bytes", json_integer((json_int_t)plan.workspace_bytes));
    out_set(doc, "peak_rss_bytes", json_integer((json_int_t)peak_memory()));
    out_set(doc, "states_seconds", out_real(job->states_seconds));
    out_set(doc, "cache_seconds", out_real(job->cache_seconds));
    out_set(digests, "taps", json_string(job->taps_digest.hex));
    out_set(digests, "states", json_string(job->states_digest.hex));
    for (l = 0; l < job->config->n_layers; l++)
        out_append(layers, json_string(job->layer_digest[l].hex));
    out_set(digests, "layers", layers);
    out_set(doc, "digests", digests);
    return out_json(doc);
}

static int run_job(const args_command *command, const context_args *a)
{
    context_job job;
    dspark_error err = {0};
    dspark_status st;
    int code;
    memset(&job, 0, sizeof job);
    job.args = a;
    st = open_context(&job, &err);
    if (st != DSPARK_OK) goto fail;
    code = read_scales(command, &job);
    if (code != ARGS_RUN) goto done;
    if (a->start >= job.config->max_positions) {
        code = args_complain(command, "--start-position: %" PRIu64 " is not allowed; the model has "
                             "positions 0 to %" PRIu64, a->start, job.config->max_positions - 1);
        goto done;
    }
    if ((st = open_rows(&job, &err)) != DSPARK_OK) goto fail;
    if ((st = make_cache(&job, &err)) != DSPARK_OK) goto fail;
    if ((st = make_context(&job, &err)) != DSPARK_OK) goto fail;
    if ((st = open_output(&job, &err)) != DSPARK_OK) goto fail;
    if ((st = run_rows(&job, &err)) != DSPARK_OK) goto fail;
    if ((st = dump_check_unchanged(&job.rows, &err)) != DSPARK_OK) goto fail;
    if ((st = write_states(&job, &err)) != DSPARK_OK) goto fail;
    if ((st = write_output(&job, &err)) != DSPARK_OK) goto fail;
    if ((st = commit_outputs(&job, &err)) != DSPARK_OK) goto fail;
    code = a->json ? print_json(&job) : print_text(&job);
    goto done;
fail:
    code = out_fail(st, &err);
done:
    dspark_writer_abort(job.writer);
    dspark_writer_abort(job.states_writer);
    free(job.positions);
    free(job.slots);
    free(job.states);
    dump_close(&job.rows);
    dspark_context_free(job.context);
    dspark_cache_free(job.cache);
    dspark_model_close(job.model);
    return code;
}

int command_context(int argc, char **argv)
{
    context_args a;
    int code;
    static const char *const operands[] = {"CKPT", NULL};
    const args_option options[] = {
        {"taps", ARGS_TEXT, &a.taps, "FILE", "hidden-state dump to read (safetensors)", 0, 0, NULL,
         NULL},
        {"out", ARGS_TEXT, &a.out, "FILE", "write the caches to FILE (safetensors)", 0, 0, NULL,
         NULL},
        {"states-out", ARGS_TEXT, &a.states_out, "FILE",
         "write the context states and positions to FILE", 0, 0, NULL, NULL},
        {"cache-dtype", ARGS_CHOICE, &a.cache_dtype, NULL, "format of an entry (default bf16)", 0,
         0, args_cache_choices, &a.cache_given},
        {"tile-scale", ARGS_CHOICE, &a.tile_scale, NULL,
         "how fp8_ds_mla makes its tile scales (default pow2)", 0, 0, tile_choices, &a.tile_given},
        {"scale", ARGS_NUMBER, &a.scale, "X",
         "scale of every layer for fp8_e4m3 and fp8_e5m2 (default 1)", 0, 0, NULL, &a.scale_given},
        {"scales", ARGS_TEXT, &a.scales, "X,X,...", "the same, one for each layer", 0, 0, NULL,
         NULL},
        {"block-size", ARGS_UINT, &a.block_size, "N", "entries in a block (default 64)", 1, 1048576,
         NULL, NULL},
        {"path", ARGS_CHOICE, &a.path, NULL, "way of computing; same bits (default onepass)", 0, 0,
         args_path_choices, NULL},
        {"batch", ARGS_UINT, &a.batch, "N", "rows in a call (default 512)", 1, 1048576, NULL, NULL},
        {"start-position", ARGS_UINT, &a.start, "P",
         "position of the dump's first row (default 0, or what\nthe dump's own positions say)", 0,
         INT64_MAX,
         NULL, &a.start_given},
        {"prepacked", ARGS_TEXT, &a.prepacked, "FILE",
         "map packed weights from FILE (see dspark pack)", 0, 0, NULL, NULL},
        {"threads", ARGS_UINT, &a.n_threads, "N", "threads (default: all processors)", 1, 1024,
         NULL, NULL},
        {"isa", ARGS_CHOICE, &a.isa, NULL, "instruction set; same bits (default auto)", 0, 0,
         args_isa_choices, NULL},
        {"vllm-compat", ARGS_FLAG, &a.vllm_compat, NULL,
         "merge quantised shards as vLLM does (inexact, for comparing)", 0, 0, NULL, NULL},
        {"json", ARGS_FLAG, &a.json, NULL, "print the report as JSON", 0, 0, NULL, NULL},
    };
    args_command command = {
        .name = "context",
        .synopsis = "CKPT --taps FILE [--out FILE] [--states-out FILE] [OPTIONS]",
        .summary = "Turn a hidden-state dump into every layer's latent cache, in one pass, and\n"
                   "print a digest of every stage. The output file does not depend on --path,\n"
                   "--batch, --threads and --isa.",
        .operands = operands,
        .operand_values = &a.checkpoint,
        .n_required = 1,
        .options = options,
        .n_options = sizeof options / sizeof *options,
    };
    memset(&a, 0, sizeof a);
    a.block_size = 64;
    a.batch = 512;
    code = args_parse(&command, argc, argv);
    if (code != ARGS_RUN) return code;
    code = check_options(&command, &a);
    if (code == ARGS_RUN) code = check_output(&command, &a);
    if (code == ARGS_RUN) code = check_swapped(&command, &a);
    return code == ARGS_RUN ? run_job(&command, &a) : code;
}
