/* dspark bench: the checkpoints that are measured. Finds or makes one, copies it into other formats, opens
 * models, and knows how many bytes their parts take. Copies lie in the run's temporary folder only while they
 * are opened. Measures nothing and prints no results. */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "out.h"
#include "quantize.h"

/* ---- the temporary folder ---- */

void bench_remove_directory(bench_report *r)
{
    tmp_folder_remove(&r->folder);
}

dspark_status bench_make_directory(bench_report *r, dspark_error *err)
{
    const char *base = getenv("TMPDIR");
    char prefix[4096];
    int problem;
    if (r->folder.path[0]) return DSPARK_OK;
    snprintf(prefix, sizeof prefix, "%s/dspark-bench-", base && *base ? base : "/tmp");
    problem = tmp_folder_make(&r->folder, prefix);
    if (!problem) return DSPARK_OK;
    return out_set_error(err, DSPARK_EOUTPUT, prefix, "no temporary folder: %s", strerror(problem));
}

/* A checkpoint that is being made. */
typedef struct making {
    const bench_report *report;
    const char *preset, *size;
    progress bar;
    int said;
} making;

/* With the first step: preset and settings were accepted then. */
static int say_making(void *user, uint64_t done, uint64_t total)
{
    making *m = user;
    if (!m->said++)
        fprintf(stderr, "dspark: %s a synthetic %s in %s%s\n",
                m->report->part ? "making" : "no CKPT given: making", m->preset,
                m->report->folder.path, m->size ? m->size : "");
    return progress_update(&m->bar, done, total);
}

dspark_status bench_find_checkpoint(bench_report *r, int context_only, const char **path,
                                    dspark_error *err)
{
    const bench_args *a = r->args;
    dspark_synth_opts opts;
    making m = {.report = r, .preset = a->preset ? a->preset : "kimi-k3"};
    dspark_status st;
    *path = a->checkpoint;
    if (a->checkpoint) return DSPARK_OK;
    if ((st = bench_make_directory(r, err)) != DSPARK_OK) return st;
    dspark_synth_opts_init(&opts);
    opts.preset = m.preset;
    opts.settings = a->settings.items;
    opts.n_settings = a->settings.n;
    opts.context_only = context_only;
    opts.progress = say_making;
    opts.progress_user = &m;
    if (!a->settings.n && strcmp(m.preset, "kimi-k3") == 0)
        m.size = context_only ? " (665 MB)" : " (7.1 GB)";
    progress_start(&m.bar, "making", PROGRESS_BYTES);
    st = out_blame_arguments(err, dspark_synth_checkpoint(r->folder.path, &opts, err));
    progress_end(&m.bar);
    *path = r->folder.path;
    r->synthetic = 1;
    return st;
}

/* ---- formats ---- */

int bench_read_formats(const char *text, bench_args *a)
{
    const char *item = text;
    for (a->n_formats = 0;; item++) {
        size_t length = strcspn(item, ","), i;
        int f = DSPARK_FORMAT_NONE + 1;
        while (f < DSPARK_FORMAT_COUNT &&
               (strlen(dspark_format_name((dspark_format)f)) != length ||
                strncmp(dspark_format_name((dspark_format)f), item, length) != 0))
            f++;
        if (f == DSPARK_FORMAT_COUNT) return 0;
        for (i = 0; i < a->n_formats; i++)
            if (a->formats[i] == (dspark_format)f) return 0;
        a->formats[a->n_formats++] = (dspark_format)f;
        item += length;
        if (!*item) return 1;
    }
}

static uint64_t number_at(const json_t *object, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(object, key));
}

/* A linear counts towards the stage that multiplies by it. */
static void add_linear(bench_sizes *s, const char *name, uint64_t bytes)
{
    const struct {
        const char *suffix;
        uint64_t *to;
    } all[] = {{"q_a_proj", &s->q_a},      {"kv_a_proj_with_mqa", &s->kv_a}, {"q_b_proj", &s->q_b},
               {"kv_b_proj", &s->kv_b},    {"o_proj", &s->o},                {"gate_proj", &s->gate_up},
               {"up_proj", &s->gate_up},   {"down_proj", &s->down},          {"markov_w2", &s->markov}};
    const char *dot = name ? strrchr(name, '.') : NULL;
    size_t i;
    for (i = 0; dot && i < sizeof all / sizeof *all; i++)
        if (strcmp(dot + 1, all[i].suffix) == 0) *all[i].to += bytes;
}

dspark_status bench_read_sizes(const char *path, bench_sizes *s, dspark_error *err)
{
    dspark_inspection *in = NULL;
    const json_t *resident, *quantisation, *linear;
    json_t *doc = NULL;
    size_t i;
    dspark_status st = dspark_inspect(&in, path, NULL, err);
    memset(s, 0, sizeof *s);
    if (st != DSPARK_OK) return st;
    doc = json_loads(dspark_inspection_json(in), 0, NULL);
    resident = json_object_get(json_object_get(doc, "plan"), "resident_bytes");
    quantisation = json_object_get(doc, "quantisation");
    s->context_kv = number_at(resident, "context_kv");
    s->context_proj = number_at(resident, "context_proj");
    s->lm_head = number_at(resident, "lm_head");
    s->quantised = json_is_string(json_object_get(quantisation, "config_method"));
    s->context_only = json_is_true(json_object_get(json_object_get(doc, "config"), "context_only"));
    json_array_foreach(json_object_get(quantisation, "linears"), i, linear)
        add_linear(s, json_string_value(json_object_get(linear, "name")), number_at(linear, "packed_bytes"));
    json_decref(doc);
    dspark_inspection_free(in);
    return DSPARK_OK;
}

/* Only what is read is quantised: the rest would take minutes and no part in it. */
static dspark_status write_copy(const char *source, const char *folder, dspark_format format,
                                int context_only, uint32_t n_threads, dspark_error *err)
{
    static const char *const targets[] = {"context_proj", "*.kv_a_proj_with_mqa"};
    dspark_quantize_opts opts;
    dspark_status st;
    progress bar;
    dspark_quantize_opts_init(&opts);
    opts.format = format;
    opts.n_threads = n_threads;
    if (format != DSPARK_FORMAT_BF16 && context_only) {
        opts.targets = targets;
        opts.n_targets = sizeof targets / sizeof *targets;
    }
    opts.progress = progress_update;
    opts.progress_user = &bar;
    progress_start(&bar, dspark_format_name(format), PROGRESS_BYTES);
    st = dspark_quantize(source, folder, &opts, err);
    progress_end(&bar);
    if (st == DSPARK_EUNSUPPORTED && quantize_is_misfit(err)) {
        const size_t n = strlen(err->message);
        snprintf(err->message + n, sizeof err->message - n, "; leave %s out of --formats",
                 dspark_format_name(format));
    }
    return st;
}

dspark_status bench_copy_format(bench_report *r, char folder[BENCH_COPY_PATH], bench_sizes *sizes,
                                const char *source, dspark_format format, int context_only,
                                uint32_t n_threads, dspark_error *err)
{
    dspark_status st = bench_read_sizes(source, sizes, err);
    folder[0] = 0;
    /* What is not usable is opened at once: that says why. */
    if (st != DSPARK_OK || !sizes->context_kv || format == DSPARK_FORMAT_NONE ||
        (format == DSPARK_FORMAT_BF16 && !sizes->quantised))
        return st;
    if ((st = bench_make_directory(r, err)) != DSPARK_OK) return st;
    snprintf(folder, BENCH_COPY_PATH, "%s/copy", r->folder.path);
    st = write_copy(source, folder, format, context_only, n_threads, err);
    return st == DSPARK_OK ? bench_read_sizes(folder, sizes, err) : st;
}

dspark_status bench_open_format(bench_report *r, dspark_model **model, bench_sizes *sizes,
                                const char *source, dspark_format format,
                                const dspark_model_opts *opts, dspark_error *err)
{
    char folder[BENCH_COPY_PATH];
    dspark_model_opts own = *opts;
    progress bar;
    dspark_status st = bench_copy_format(r, folder, sizes, source, format, !(opts->parts & DSPARK_PART_BLOCK),
                                         opts->n_threads, err);
    const char *path = folder[0] ? folder : source;
    own.progress = progress_update;
    own.progress_user = &bar;
    progress_start(&bar, "packing", PROGRESS_BYTES);
    if (st == DSPARK_OK) st = dspark_model_open(model, path, &own, err);
    progress_end(&bar);
    if (st == DSPARK_OK && format != DSPARK_FORMAT_NONE && !sizes->context_kv)
        st = out_set_error(err, DSPARK_EUNSUPPORTED, path, "its weights have no known size");
    if (folder[0]) tmp_folder_delete(folder);
    if (st == DSPARK_OK)
        bench_describe(r, *model);
    else if (st != DSPARK_EOUTPUT && r->args->checkpoint && path == source)
        out_add_checkpoint(err, source, r->args->target);
    return st;
}

/* ---- what a target lends ---- */

static uint32_t next_bits(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*state >> 33);
}

#define PATTERN 8388593u /* values until they repeat; a prime, so that no two rows are alike */

dspark_status bench_make_head(dspark_host_matrix *head, const char *checkpoint, dspark_error *err)
{
    dspark_inspection *in = NULL;
    dspark_status st = dspark_inspect(&in, checkpoint, NULL, err);
    uint64_t state = 1;
    size_t i, n;
    uint16_t *data;
    json_t *doc;
    if (st != DSPARK_OK) return st;
    doc = json_loads(dspark_inspection_json(in), 0, NULL); /* the sizes are in the config */
    head->rows = number_at(json_object_get(doc, "config"), "vocab_size");
    head->cols = number_at(json_object_get(doc, "config"), "hidden_size");
    json_decref(doc);
    dspark_inspection_free(in);
    n = (size_t)(head->rows * head->cols);
    if (n == 0) return DSPARK_OK; /* opening says what is wrong */
    data = malloc(n * sizeof *data);
    if (!data) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for a made-up LM head");
    for (i = 0; i < n && i < PATTERN; i++) { /* between -1 and 1, most of them small */
        uint32_t bits = next_bits(&state);
        data[i] = (uint16_t)((bits & 0x807f) | (0x3c00 + (bits >> 8 & 0x180)));
    }
    for (; i < n; i += PATTERN)
        memcpy(data + i, data, (n - i < PATTERN ? n - i : PATTERN) * sizeof *data);
    head->data = data;
    return DSPARK_OK;
}

/* The same for entries of a cache in any of its formats. */
void bench_fill_entries(void *entries, size_t n, dspark_cache_dtype dtype, uint32_t latent, uint32_t rope)
{
    const size_t size = dspark_cache_entry_bytes(dtype, latent, rope);
    const float one = 1;
    unsigned char *at = entries;
    uint64_t state = 2;
    size_t i, k, made = n < 4099 ? n : 4099;
    for (i = 0; i < made; i++, at += size) {
        for (k = 0; k < size; k += 2) {
            const uint32_t bits = next_bits(&state);
            const uint16_t value = dtype == DSPARK_CACHE_BF16
                                       ? (uint16_t)((bits & 0x807f) | (0x3c00 + (bits >> 8 & 0x180)))
                                       : (uint16_t)((bits & 0x9f9f) | 0x2020); /* codes of small numbers */
            memcpy(at + k, &value, size - k < 2 ? 1 : 2);
        }
        if (dtype != DSPARK_CACHE_FP8_DS_MLA) continue;
        for (k = 0; k < 4; k++) memcpy(at + latent + 4 * k, &one, 4);
        memset(at + latent + 16, 0x3c, 2 * (size_t)rope); /* bf16 of about 0.01 */
    }
    for (; i < n; i += made, at += made * size)
        memcpy(at, entries, (n - i < made ? n - i : made) * size);
}
