/* dspark compare: are the three paths, every instruction set and the thread counts equal bit for
 * bit on this checkpoint, and how far is the answer from fp64? Latent and rope key apart, layer by
 * layer. Exit 1 when a single bit differs. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "compare_error.h"
#include "compare_files.h"
#include "compare_vllm.h"
#include "dump.h"
#include "open_model.h"
#include "out.h"
#include "progress.h"

typedef struct compare_args {
    const char *checkpoint;
    const char *taps;
    uint64_t n_tokens;
    int tokens_given;
    uint64_t start;
    int start_given;
    uint64_t seed;
    uint64_t n_threads;
    int isa;
    int vllm_compat;
    int json;
} compare_args;

/* One way of computing everything, and where it differs from the first way. */
typedef struct variant {
    dspark_isa isa;
    dspark_path path;
    uint32_t n_threads;
    int from_taps;           /* in one call; else states first, then the cache */
    uint64_t states_differ;  /* values */
    uint64_t latent_differ[DSPARK_MAX_LAYERS];
    uint64_t rope_differ[DSPARK_MAX_LAYERS];
} variant;

#define MAX_VARIANTS 32

typedef struct compare_job {
    const compare_args *args;
    dspark_model *model;
    const dspark_config *config;
    dump rows;
    uint64_t n;
    uint64_t start;              /* position of the first row */
    int64_t *positions;
    int64_t *slots;
    uint32_t entry_width;
    unsigned char *states;       /* [n, h] of the variant at work */
    unsigned char *first_states; /* of the first variant */
    dspark_cache *cache;         /* of the variant at work */
    dspark_cache *first_cache;
    double *exact;               /* [L][n][entry_width] */
    variant variants[MAX_VARIANTS];
    size_t n_variants;
    uint32_t n_threads;          /* of the first variant */
    error_stats latent[DSPARK_MAX_LAYERS];
    error_stats rope[DSPARK_MAX_LAYERS];
    uint64_t n_differ;
    compare_vllm vllm;           /* with --vllm-compat */
    progress bar;
} compare_job;

/* ---- set-up ---- */

static void add_variant(compare_job *job, dspark_isa isa, dspark_path path, uint32_t n_threads,
                        int from_taps)
{
    variant *v;
    if (job->n_variants == MAX_VARIANTS) return;
    v = &job->variants[job->n_variants++];
    v->isa = isa;
    v->path = path;
    v->n_threads = n_threads;
    v->from_taps = from_taps;
}

/* First the way that `context` goes; then every path at every level, then one thread and three. */
static void list_variants(compare_job *job)
{
    uint32_t threads = (uint32_t)job->args->n_threads;
    dspark_isa first = job->args->isa ? (dspark_isa)job->args->isa : dspark_isa_best();
    int isa, path;
    for (path = DSPARK_PATH_ONEPASS; path <= DSPARK_PATH_FULL; path++)
        add_variant(job, first, (dspark_path)path, threads, 0);
    add_variant(job, first, DSPARK_PATH_ONEPASS, threads, 1);
    add_variant(job, first, DSPARK_PATH_ONEPASS, 1, 0);
    add_variant(job, first, DSPARK_PATH_ONEPASS, 3, 0);
    for (isa = DSPARK_ISA_AVX512BF16; isa >= DSPARK_ISA_REF; isa--) {
        if ((dspark_isa)isa == first || !dspark_isa_available((dspark_isa)isa)) continue;
        for (path = DSPARK_PATH_ONEPASS; path <= DSPARK_PATH_FULL; path++)
            add_variant(job, (dspark_isa)isa, (dspark_path)path, threads, 0);
    }
}

static dspark_status open_inputs(compare_job *job, dspark_error *err)
{
    const compare_args *a = job->args;
    dspark_model_opts opts;
    dspark_status st;
    dspark_model_opts_init(&opts);
    opts.parts = DSPARK_PART_CONTEXT | DSPARK_PART_Q_A;
    opts.n_threads = (uint32_t)a->n_threads;
    st = open_model(&job->model, a->checkpoint, &opts, "packing", err);
    if (st != DSPARK_OK) return st;
    job->config = dspark_model_config(job->model);
    job->entry_width = dspark_model_entry_width(job->model);
    if (a->taps)
        st = dump_open(&job->rows, a->taps, job->config, err);
    else
        st = dump_make(&job->rows, a->n_tokens, a->seed, job->config, err);
    if (st != DSPARK_OK) return st;
    job->n = job->rows.n_rows;
    if (a->tokens_given && job->n > a->n_tokens) job->n = a->n_tokens;
    job->rows.n_rows = job->n;
    st = dump_start(&job->rows, a->start_given, a->start, &job->start, err);
    if (st == DSPARK_OK) st = dump_check_window(&job->rows, job->start, job->config, err);
    return st;
}

static dspark_status make_buffers(compare_job *job, dspark_error *err)
{
    size_t n = (size_t)job->n, i;
    size_t state_bytes = (size_t)job->config->hidden_size * 2;
    dspark_status st;
    job->positions = calloc(n, sizeof *job->positions);
    job->slots = calloc(n, sizeof *job->slots);
    job->states = calloc(n, state_bytes);
    job->first_states = calloc(n, state_bytes);
    if (n <= SIZE_MAX / sizeof(double) / job->config->n_layers / job->entry_width)
        job->exact = calloc(n * job->config->n_layers * job->entry_width, sizeof *job->exact);
    if (!job->positions || !job->slots || !job->states || !job->first_states || !job->exact)
        return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for %zu rows", n);
    for (i = 0; i < n; i++) {
        job->positions[i] = (int64_t)(job->start + i);
        job->slots[i] = (int64_t)i;
    }
    st = dspark_cache_create(&job->first_cache, job->model, DSPARK_CACHE_BF16, 1, n, NULL, err);
    if (st == DSPARK_OK)
        st = dspark_cache_create(&job->cache, job->model, DSPARK_CACHE_BF16, 1, n, NULL, err);
    return st;
}

/* ---- one variant ---- */

static uint64_t count_different(const unsigned char *a, const unsigned char *b, size_t n_values)
{
    uint64_t n = 0;
    size_t i;
    for (i = 0; i < n_values; i++) n += memcmp(a + 2 * i, b + 2 * i, 2) != 0;
    return n;
}

static void count_differences(compare_job *job, variant *v)
{
    const dspark_cache_view *a = dspark_cache_get_view(job->first_cache);
    const dspark_cache_view *b = dspark_cache_get_view(job->cache);
    size_t latent = job->config->kv_lora_rank, rope = job->config->qk_rope_head_dim;
    uint64_t i;
    uint32_t l;
    /* Only these variants made states of their own (run_variant). */
    if (!v->from_taps && v->path == DSPARK_PATH_ONEPASS)
        v->states_differ = count_different(job->first_states, job->states,
                                           (size_t)job->n * job->config->hidden_size);
    for (l = 0; l < job->config->n_layers; l++) {
        for (i = 0; i < job->n; i++) {
            size_t at = (size_t)i * job->entry_width * 2;
            const unsigned char *x = (const unsigned char *)a->layers[l] + at;
            const unsigned char *y = (const unsigned char *)b->layers[l] + at;
            v->latent_differ[l] += count_different(x, y, latent);
            v->rope_differ[l] += count_different(x + 2 * latent, y + 2 * latent, rope);
        }
        job->n_differ += v->latent_differ[l] + v->rope_differ[l];
    }
    job->n_differ += v->states_differ;
}

/* Every cache starts filled with 0xff, a NaN, so an entry that was not written is seen. */
static void clear_cache(compare_job *job, const dspark_cache *cache)
{
    const dspark_cache_view *view = dspark_cache_get_view(cache);
    uint32_t l;
    for (l = 0; l < job->config->n_layers; l++)
        memset(view->layers[l], 0xff, (size_t)job->n * job->entry_width * 2);
}

/* Rows in a call: few enough that Ctrl-C is heard within seconds on the slowest way. */
#define PIECE_ROWS 256
#define PIECE_ROWS_REF 32
#define PIECE_ROWS_FP64 8

static void set_piece(const compare_job *job, dspark_batch *batch, uint64_t first, uint64_t most)
{
    batch->n_tokens = (size_t)(job->n - first < most ? job->n - first : most);
    batch->taps = job->rows.taps + (size_t)first * job->rows.stride;
    batch->taps_stride = job->rows.stride;
    batch->states = NULL;
    batch->positions = job->positions + first;
    batch->slots = job->slots + first;
    batch->first_row = (size_t)first;
}

/* fp64 of all rows, piece by piece: a piece comes layer by layer and goes to its place in each. */
static dspark_status run_exact(compare_job *job, dspark_context *context, dspark_error *err)
{
    size_t width = job->entry_width;
    uint32_t n_layers = job->config->n_layers, l;
    double *piece = calloc((size_t)n_layers * PIECE_ROWS_FP64 * width, sizeof *piece);
    dspark_status st = DSPARK_OK;
    uint64_t first;
    if (!piece) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for the fp64 rows");
    for (first = 0; st == DSPARK_OK && first < job->n; first += PIECE_ROWS_FP64) {
        dspark_batch batch;
        dspark_batch_init(&batch);
        set_piece(job, &batch, first, PIECE_ROWS_FP64);
        st = dspark_context_fp64(context, &batch, piece, err);
        for (l = 0; st == DSPARK_OK && l < n_layers; l++)
            memcpy(job->exact + ((size_t)l * job->n + first) * width,
                   piece + (size_t)l * batch.n_tokens * width,
                   batch.n_tokens * width * sizeof *piece);
        if (st == DSPARK_OK) st = out_check_interrupt(err);
    }
    free(piece);
    return st;
}

static dspark_status run_piece(compare_job *job, const variant *v, dspark_context *context,
                               uint64_t first, uint64_t most, dspark_error *err)
{
    int is_first = v == job->variants;
    dspark_cache *cache = is_first ? job->first_cache : job->cache;
    unsigned char *states = is_first ? job->first_states : job->states;
    size_t at = (size_t)first * job->config->hidden_size * 2;
    dspark_batch batch;
    dspark_run_info info;
    dspark_status st = DSPARK_OK;
    dspark_batch_init(&batch);
    set_piece(job, &batch, first, most);
    if (is_first) st = dump_check_rows(&job->rows, first, batch.n_tokens, err);
    /* Taps to states once for each level and thread count, by the one-pass variant, which comes
     * first: the paths differ only behind it. */
    if (st == DSPARK_OK && !v->from_taps) {
        if (v->path == DSPARK_PATH_ONEPASS)
            st = dspark_context_states(context, &batch, states + at, err);
        else if (v->isa == job->variants[0].isa)
            states = job->first_states;
        batch.taps = NULL;
        batch.taps_stride = 0;
        batch.states = states + at;
    }
    if (st == DSPARK_OK)
        st = dspark_context_run(context, &batch, dspark_cache_get_view(cache), &info, err);
    if (st == DSPARK_OK && info.n_rows != batch.n_tokens)
        st = out_set_error(err, DSPARK_EINTERNAL, "", "%zu rows of %zu are complete", info.n_rows,
                           batch.n_tokens);
    if (st == DSPARK_OK) return out_check_interrupt(err);
    return dump_first_fault(&job->rows, job->args->checkpoint, context, &batch,
                            dspark_cache_get_view(cache), st, err);
}

static dspark_status run_variant(compare_job *job, variant *v, dspark_error *err)
{
    int is_first = v == job->variants;
    uint64_t first, most = v->isa == DSPARK_ISA_REF ? PIECE_ROWS_REF : PIECE_ROWS;
    dspark_context_opts opts;
    dspark_context *context = NULL;
    dspark_status st;
    dspark_context_opts_init(&opts);
    opts.isa = v->isa;
    opts.n_threads = v->n_threads;
    opts.path = v->path;
    if (job->n < most) most = job->n;
    opts.max_tokens = (uint32_t)most;
    st = dspark_context_create(&context, job->model, &opts, err);
    if (st != DSPARK_OK) return st;
    v->n_threads = dspark_context_get_plan(context).n_threads;
    clear_cache(job, is_first ? job->first_cache : job->cache);
    for (first = 0; st == DSPARK_OK && first < job->n; first += most)
        st = run_piece(job, v, context, first, most, err);
    /* The rows are finite: it is known now. */
    if (is_first && st == DSPARK_OK) st = run_exact(job, context, err);
    dspark_context_free(context);
    return st;
}

/* ---- against fp64 ---- */

static void measure_errors(compare_job *job)
{
    const dspark_cache_view *view = dspark_cache_get_view(job->first_cache);
    const size_t width = job->entry_width, latent = job->config->kv_lora_rank;
    uint32_t l;
    for (l = 0; l < job->config->n_layers; l++) {
        const double *exact = job->exact + (size_t)l * job->n * width;
        error_measure(&job->latent[l], view->layers[l], exact, job->n, width, 0, latent);
        error_measure(&job->rope[l], view->layers[l], exact, job->n, width, latent, width);
    }
}

/* The first way again, on weights merged as vLLM merges them; what comes out decides nothing. */
static dspark_status run_vllm(compare_job *job, dspark_error *err)
{
    const compare_vllm_rows rows = {job->args->checkpoint, job->variants[0].isa,
                                    (uint32_t)job->args->n_threads, (size_t)job->n,
                                    job->first_states, job->positions, job->slots};
    return compare_vllm_run(&job->vllm, &rows, dspark_cache_get_view(job->first_cache), err);
}

/* ---- the report ---- */

static uint64_t variant_differences(const compare_job *job, const variant *v)
{
    uint64_t n = v->states_differ;
    uint32_t l;
    for (l = 0; l < job->config->n_layers; l++) n += v->latent_differ[l] + v->rope_differ[l];
    return n;
}

static void cell_equal(out_table *t, uint64_t n_differ)
{
    if (n_differ)
        out_table_cell(t, "%" PRIu64 " DIFFER", n_differ);
    else
        out_table_cell(t, "equal");
}

/* Differences of one part of one layer over the variants of one kind. */
static uint64_t sum_kind(const compare_job *job, uint32_t layer, int rope, int kind)
{
    uint64_t n = 0;
    size_t i;
    for (i = 1; i < job->n_variants; i++) {
        const variant *v = &job->variants[i];
        int other_isa = v->isa != job->variants[0].isa;
        int is_kind = kind == 3 ? other_isa
                    : kind == 0 ? !other_isa && v->path == DSPARK_PATH_ONEPASS
                                : !other_isa && (int)v->path == kind;
        if (is_kind) n += rope ? v->rope_differ[layer] : v->latent_differ[layer];
    }
    return n;
}

static int print_text(const compare_job *job)
{
    const compare_args *a = job->args;
    out_table t;
    char text[32];
    uint32_t l;
    size_t i;
    int part;
    printf("checkpoint  ");
    out_text(stdout, a->checkpoint);
    printf("\n            fingerprint %s\nrows        ", dspark_model_fingerprint(job->model));
    out_text(stdout, job->rows.path);
    if (!a->taps) printf(" (seed %" PRIu64 ")", a->seed);
    printf(": %s, positions %" PRIu64 " to %" PRIu64 "\n\n", out_count(text, job->n),
           job->start, job->start + job->n - 1);

    printf("Bits against the first way:\n");
    out_table_init(&t, "llrll");
    out_table_cell(&t, "isa");
    out_table_cell(&t, "path");
    out_table_cell(&t, "threads");
    out_table_cell(&t, "from");
    out_table_cell(&t, "bits");
    for (i = 0; i < job->n_variants; i++) {
        const variant *v = &job->variants[i];
        out_table_cell(&t, "%s", dspark_isa_name(v->isa));
        out_table_cell(&t, "%s", args_path_choices[v->path]);
        out_table_cell(&t, "%u", v->n_threads);
        out_table_cell(&t, "%s", v->from_taps ? "taps" : "states");
        if (i)
            cell_equal(&t, variant_differences(job, v));
        else
            out_table_cell(&t, "(first)");
    }
    if (out_table_print(&t, 2) != 0) return out_error(EXIT_INTERNAL, "out of memory");

    printf("\nBy layer, and the error of the first way against fp64:\n");
    out_table_init(&t, "llllllrrr");
    out_table_cell(&t, "layer");
    out_table_cell(&t, "part");
    out_table_cell(&t, "per-layer");
    out_table_cell(&t, "full");
    out_table_cell(&t, "threads");
    out_table_cell(&t, "other isa");
    out_table_cell(&t, "max abs");
    out_table_cell(&t, "max ulp");
    out_table_cell(&t, "rms rel");
    for (l = 0; l < job->config->n_layers; l++) {
        for (part = 0; part < 2; part++) {
            const error_stats *e = part ? &job->rope[l] : &job->latent[l];
            out_table_cell(&t, "%u", l);
            out_table_cell(&t, part ? "rope key" : "latent");
            cell_equal(&t, sum_kind(job, l, part, 1));
            cell_equal(&t, sum_kind(job, l, part, 2));
            cell_equal(&t, sum_kind(job, l, part, 0));
            cell_equal(&t, sum_kind(job, l, part, 3));
            out_table_cell(&t, "%.3g", e->max_abs);
            out_table_cell(&t, "%.3g", e->max_ulp);
            out_table_cell(&t, "%.3g", e->rms_rel);
        }
    }
    if (out_table_print(&t, 2) != 0) return out_error(EXIT_INTERNAL, "out of memory");
    if (a->vllm_compat && compare_vllm_print(&job->vllm) != 0)
        return out_error(EXIT_INTERNAL, "out of memory");
    if (job->n_differ)
        printf("\nNOT EQUAL: %" PRIu64 " values differ\n", job->n_differ);
    else
        printf("\nequal: %zu ways give the same bits\n", job->n_variants);
    return EXIT_OK;
}

static json_t *json_part(const compare_job *job, uint32_t l, int rope)
{
    const error_stats *e = rope ? &job->rope[l] : &job->latent[l];
    json_t *part = json_object();
    out_set(part, "layer", json_integer(l));
    out_set(part, "part", json_string(rope ? "rope_key" : "latent"));
    out_set(part, "differ_per_layer", json_integer((json_int_t)sum_kind(job, l, rope, 1)));
    out_set(part, "differ_full", json_integer((json_int_t)sum_kind(job, l, rope, 2)));
    out_set(part, "differ_threads", json_integer((json_int_t)sum_kind(job, l, rope, 0)));
    out_set(part, "differ_isa", json_integer((json_int_t)sum_kind(job, l, rope, 3)));
    out_set(part, "max_abs", out_real(e->max_abs));
    out_set(part, "max_ulp", out_real(e->max_ulp));
    out_set(part, "rms_rel", out_real(e->rms_rel));
    return part;
}

static int print_json(const compare_job *job)
{
    json_t *doc = json_object(), *variants = json_array(), *layers = json_array();
    uint32_t l;
    size_t i;
    out_set(doc, "checkpoint", out_string(job->args->checkpoint));
    out_set(doc, "fingerprint", json_string(dspark_model_fingerprint(job->model)));
    out_set(doc, "dump", out_string(job->args->taps));
    if (!job->args->taps) out_set(doc, "seed", json_integer((json_int_t)job->args->seed));
    out_set(doc, "rows", json_integer((json_int_t)job->n));
    out_set(doc, "start_position", json_integer((json_int_t)job->start));
    out_set(doc, "equal", json_boolean(!job->n_differ));
    out_set(doc, "values_different", json_integer((json_int_t)job->n_differ));
    for (i = 0; i < job->n_variants; i++) {
        const variant *v = &job->variants[i];
        json_t *item = json_object();
        out_set(item, "isa", json_string(dspark_isa_name(v->isa)));
        out_set(item, "path", json_string(args_path_choices[v->path]));
        out_set(item, "threads", json_integer(v->n_threads));
        out_set(item, "from", json_string(v->from_taps ? "taps" : "states"));
        out_set(item, "values_different", json_integer((json_int_t)variant_differences(job, v)));
        out_append(variants, item);
    }
    out_set(doc, "variants", variants);
    for (l = 0; l < job->config->n_layers; l++) {
        out_append(layers, json_part(job, l, 0));
        out_append(layers, json_part(job, l, 1));
    }
    out_set(doc, "layers", layers);
    if (job->args->vllm_compat) out_set(doc, "vllm_compat", compare_vllm_json(&job->vllm));
    return out_json(doc);
}

static int run_job(const compare_args *a)
{
    compare_job job;
    dspark_error err = {0};
    dspark_status st;
    size_t i;
    int code;
    memset(&job, 0, sizeof job);
    job.args = a;
    list_variants(&job);
    if ((st = open_inputs(&job, &err)) != DSPARK_OK) goto fail;
    if ((st = make_buffers(&job, &err)) != DSPARK_OK) goto fail;
    progress_start(&job.bar, "comparing", PROGRESS_STEPS);
    for (i = 0; st == DSPARK_OK && i < job.n_variants; i++) {
        st = run_variant(&job, &job.variants[i], &err);
        if (st == DSPARK_OK && i) count_differences(&job, &job.variants[i]);
        if (st == DSPARK_OK && progress_update(&job.bar, i + 1, job.n_variants))
            st = out_check_interrupt(&err);
    }
    progress_end(&job.bar);
    if (st == DSPARK_OK) st = dump_check_unchanged(&job.rows, &err);
    if (st != DSPARK_OK) goto fail;
    if (a->vllm_compat && (st = run_vllm(&job, &err)) != DSPARK_OK) goto fail;
    measure_errors(&job);
    code = a->json ? print_json(&job) : print_text(&job);
    if (code == EXIT_OK && job.n_differ) code = EXIT_CHECK_FAILED;
    goto done;
fail:
    code = out_fail(st, &err);
done:
    free(job.positions);
    free(job.slots);
    free(job.states);
    free(job.first_states);
    free(job.exact);
    dspark_cache_free(job.cache);
    dspark_cache_free(job.first_cache);
    dump_close(&job.rows);
    dspark_model_close(job.model);
    return code;
}

int command_compare(int argc, char **argv)
{
    compare_args a;
    int seed_given = 0, isa_given = 0, code;
    const char *paths[2];
    static const char *const operands[] = {"CKPT", "OTHER", NULL};
    const args_option options[] = {
        {"taps", ARGS_TEXT, &a.taps, "FILE",
         "rows from a hidden-state dump (default: synthetic rows)", 0, 0, NULL, NULL},
        {"tokens", ARGS_UINT, &a.n_tokens, "N",
         "synthetic rows (default 8), or at most N rows of the dump", 1, 65536, NULL,
         &a.tokens_given},
        {"start-position", ARGS_UINT, &a.start, "P",
         "position of the first row (default 0, or what the\ndump's own positions say)", 0,
         INT64_MAX, NULL, &a.start_given},
        {"seed", ARGS_UINT, &a.seed, "N", "seed of the synthetic rows (default 0)", 0, INT64_MAX,
         NULL, &seed_given},
        {"threads", ARGS_UINT, &a.n_threads, "N", "threads (default: all processors)", 1, 1024,
         NULL, NULL},
        {"isa", ARGS_CHOICE, &a.isa, NULL,
         "the level that all others are compared with (default auto)", 0, 0, args_isa_choices,
         &isa_given},
        {"vllm-compat", ARGS_FLAG, &a.vllm_compat, NULL,
         "also measure what vLLM's inexact merge of quantised shards\n"
         "changes; the exit code does not depend on it", 0, 0, NULL, NULL},
        {"json", ARGS_FLAG, &a.json, NULL, "print the report as JSON", 0, 0, NULL, NULL},
    };
    args_command command = {
        .name = "compare",
        .synopsis = "CKPT [--taps FILE] [OPTIONS]\n"
                    "       dspark compare CACHE CACHE [--json]",
        .summary = "Compute the same rows in every way: one pass, per layer and full, on every\n"
                   "instruction set of this machine and other thread counts. Bits must be equal\n"
                   "(exit code 1 if not); the error against fp64 is measured.\n\n"
                   "With two files as 'dspark context --out' writes them (or as an engine dumped\n"
                   "its cache in the same form): compare them layer by layer, latent and rope key\n"
                   "apart. Exit code 0 equal, 1 different, 3 a bad file.",
        .operands = operands,
        .operand_values = paths,
        .n_required = 1,
        .options = options,
        .n_options = sizeof options / sizeof *options,
    };
    memset(&a, 0, sizeof a);
    a.n_tokens = 8;
    code = args_parse(&command, argc, argv);
    if (code != ARGS_RUN) return code;
    if (paths[1]) {
        if (a.taps || a.tokens_given || a.start_given || a.n_threads || seed_given || isa_given ||
            a.vllm_compat)
            return args_complain(&command, "two files are compared as they are: only --json goes "
                                 "with them");
        return compare_files(paths[0], paths[1], a.json);
    }
    if (a.taps && seed_given)
        return args_complain(&command, "--seed is for synthetic rows, not for those of --taps");
    a.checkpoint = paths[0];
    if (a.taps && !a.tokens_given) a.n_tokens = 0;
    return run_job(&a);
}
