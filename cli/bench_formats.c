/* dspark bench --formats: the list of formats, and for each a model of the checkpoint's copy in
 * that format, with the bytes that its one pass reads. Copies lie in the run's temporary folder
 * only while they are opened. Measures nothing and prints no results. */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "out.h"
#include "progress.h"

int bench_read_formats(const char *text, bench_result *r)
{
    const char *item = text;
    for (r->n_formats = 0;; item++) {
        size_t length = strcspn(item, ","), i;
        int f = DSPARK_FORMAT_NONE + 1;
        while (f < DSPARK_FORMAT_COUNT &&
               (strlen(dspark_format_name((dspark_format)f)) != length ||
                strncmp(dspark_format_name((dspark_format)f), item, length) != 0))
            f++;
        if (f == DSPARK_FORMAT_COUNT) return 0;
        for (i = 0; i < r->n_formats; i++)
            if (r->formats[i] == (dspark_format)f) return 0;
        r->formats[r->n_formats++] = (dspark_format)f;
        item += length;
        if (!*item) return 1;
    }
}

/* From the report on the checkpoint: is anything in it quantised, and how large is the merged
 * linear of all layers in memory (0 when the checkpoint is not usable)? */
static dspark_status inspect_checkpoint(const char *path, int *quantised, uint64_t *kv_bytes,
                                        dspark_error *err)
{
    dspark_inspection *in = NULL;
    const json_t *bytes;
    json_t *doc = NULL;
    dspark_status st = dspark_inspect(&in, path, NULL, err);
    if (st != DSPARK_OK) return st;
    doc = json_loads(dspark_inspection_json(in), 0, NULL);
    bytes = json_object_get(json_object_get(json_object_get(doc, "plan"), "resident_bytes"),
                            "context_kv");
    *kv_bytes = (uint64_t)json_integer_value(bytes);
    *quantised = json_is_string(json_object_get(json_object_get(doc, "quantisation"),
                                                "config_method"));
    json_decref(doc);
    dspark_inspection_free(in);
    return DSPARK_OK;
}

/* Only what the context part reads is quantised: the rest would take minutes and no part in it. */
static dspark_status write_copy(const char *source, const char *folder, dspark_format format,
                                uint32_t n_threads, dspark_error *err)
{
    static const char *const targets[] = {"context_proj", "*.kv_a_proj_with_mqa"};
    dspark_quantize_opts opts;
    dspark_status st;
    progress bar;
    dspark_quantize_opts_init(&opts);
    opts.format = format;
    opts.n_threads = n_threads;
    if (format != DSPARK_FORMAT_BF16) {
        opts.targets = targets;
        opts.n_targets = sizeof targets / sizeof *targets;
    }
    opts.progress = progress_update;
    opts.progress_user = &bar;
    progress_start(&bar, dspark_format_name(format), PROGRESS_BYTES);
    st = dspark_quantize(source, folder, &opts, err);
    progress_end(&bar);
    return st;
}

dspark_status bench_open_format(dspark_model **model, uint64_t *kv_bytes, const char *source,
                                const char *folder, dspark_format format, uint32_t n_threads,
                                dspark_error *err)
{
    const char *path = source;
    dspark_model_opts opts;
    dspark_status st;
    progress bar;
    int quantised;
    st = inspect_checkpoint(source, &quantised, kv_bytes, err);
    /* What is not usable is opened at once: that says why. */
    if (st == DSPARK_OK && *kv_bytes && (format != DSPARK_FORMAT_BF16 || quantised)) {
        path = folder;
        st = write_copy(source, folder, format, n_threads, err);
        if (st == DSPARK_OK) st = inspect_checkpoint(folder, &quantised, kv_bytes, err);
    }
    if (st != DSPARK_OK) return st;
    dspark_model_opts_init(&opts);
    opts.parts = DSPARK_PART_CONTEXT;
    opts.n_threads = n_threads;
    opts.progress = progress_update;
    opts.progress_user = &bar;
    progress_start(&bar, "packing", PROGRESS_BYTES);
    st = dspark_model_open(model, path, &opts, err);
    progress_end(&bar);
    if (st == DSPARK_OK && !*kv_bytes)
        st = out_set_error(err, DSPARK_EUNSUPPORTED, path, "its weights have no known size");
    return st;
}
