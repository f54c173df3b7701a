/* dspark quantize: one checkpoint in, a smaller one out, through the library; says what was lost in
 * each module and what was saved. Also quantises for `dspark synth --format`. */
#include "quantize.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "out.h"
#include "progress.h"
#include "quantize_compare.h"

const char *const quantize_formats[] = {"fp8-tensor", "fp8-channel", "fp8-block", "nvfp4", "mxfp4",
                                        "mxfp8", "int8", "int4", "bf16", "fp8", NULL};

dspark_format quantize_format(int choice)
{
    /* Behind the library's own names: the short one. */
    if (choice > (int)DSPARK_FORMAT_BF16 - (int)DSPARK_FORMAT_FP8_TENSOR)
        return DSPARK_FORMAT_FP8_CHANNEL;
    return (dspark_format)((int)DSPARK_FORMAT_FP8_TENSOR + choice);
}

/* ---- what the library reports ---- */

typedef struct kept_report {
    dspark_quantize_report r; /* its name is a copy */
} kept_report;

typedef struct reports {
    kept_report *list;
    size_t n, capacity;
    int failed; /* out of memory */
} reports;

static void keep_report(void *user, const dspark_quantize_report *report)
{
    reports *all = user;
    if (all->n == all->capacity) {
        size_t capacity = all->capacity ? 2 * all->capacity : 64;
        kept_report *list = realloc(all->list, capacity * sizeof *list);
        if (!list) {
            all->failed = 1;
            return;
        }
        all->list = list;
        all->capacity = capacity;
    }
    all->list[all->n].r = *report;
    all->list[all->n].r.name = strdup(report->name);
    if (all->list[all->n].r.name)
        all->n++;
    else
        all->failed = 1;
}

static void free_reports(reports *all)
{
    size_t i;
    for (i = 0; i < all->n; i++) free((char *)all->list[i].r.name);
    free(all->list);
}

/* Bytes of all tensors; 0 when the file cannot be read. */
static uint64_t checkpoint_bytes(const char *path)
{
    dspark_checkpoint *ckpt = NULL;
    uint64_t n_bytes = 0;
    size_t i;
    if (dspark_checkpoint_open(&ckpt, path, NULL) != DSPARK_OK) return 0;
    for (i = 0; i < dspark_checkpoint_tensor_count(ckpt); i++)
        n_bytes += dspark_checkpoint_tensor(ckpt, i)->n_bytes;
    dspark_checkpoint_close(ckpt);
    return n_bytes;
}

/* ---- printing ---- */

static int print_json(const char *in, const char *out, const dspark_quantize_opts *opts,
                      const reports *all, uint64_t before, uint64_t after,
                      const quantize_compare *compared)
{
    json_t *doc = json_object(), *list = json_array();
    size_t i;
    out_set(doc, "source", out_string(in));
    out_set(doc, "path", out_string(out));
    out_set(doc, "format", json_string(dspark_format_name(opts->format)));
    out_set(doc, "layout", json_string(opts->layout == DSPARK_LAYOUT_MODELOPT
                                           ? "modelopt" : "compressed-tensors"));
    out_set(doc, "scales", json_string(opts->scales == DSPARK_SCALES_MSE ? "mse" : "absmax"));
    for (i = 0; i < all->n; i++) {
        const dspark_quantize_report *r = &all->list[i].r;
        json_t *item = json_object();
        out_set(item, "name", out_string(r->name));
        out_set(item, "format", json_string(r->format));
        out_set(item, "rows", json_integer((json_int_t)r->rows));
        out_set(item, "columns", json_integer((json_int_t)r->k));
        out_set(item, "bytes_before", json_integer((json_int_t)r->bytes_before));
        out_set(item, "bytes_after", json_integer((json_int_t)r->bytes_after));
        out_set(item, "max_abs_error", out_real(r->max_abs_error));
        out_set(item, "relative_rms_error", out_real(r->relative_rms));
        out_set(item, "sqnr_db", out_real(r->sqnr_db));
        out_append(list, item);
    }
    out_set(doc, "modules", list);
    out_set(doc, "bytes_before", json_integer((json_int_t)before));
    out_set(doc, "bytes_after", json_integer((json_int_t)after));
    out_set(doc, "context_entries", compared ? quantize_compare_json(compared) : json_null());
    return out_json(doc);
}

/* Modules that were quantised before and, not being chosen now, have become bf16. */
static size_t count_lost(const reports *all, const dspark_quantize_opts *opts)
{
    size_t i, n = 0;
    for (i = 0; i < all->n; i++) n += strcmp(all->list[i].r.format, dspark_format_name(opts->format)) != 0;
    return n;
}

static int print_text(const char *out, const dspark_quantize_opts *opts, const reports *all,
                      uint64_t before, uint64_t after, const quantize_compare *compared)
{
    out_table t;
    size_t i, n_lost = count_lost(all, opts);
    char a[32], b[32], c[32];
    out_table_init(&t, "llrrrrrr");
    out_table_cell(&t, "module");
    out_table_cell(&t, "format");
    out_table_cell(&t, "shape");
    out_table_cell(&t, "before");
    out_table_cell(&t, "after");
    out_table_cell(&t, "largest error");
    out_table_cell(&t, "rms error");
    out_table_cell(&t, "SQNR dB");
    for (i = 0; i < all->n; i++) {
        const dspark_quantize_report *r = &all->list[i].r;
        out_table_cell(&t, "%s", r->name);
        out_table_cell(&t, "%s", r->format);
        out_table_cell(&t, "%llux%llu", (unsigned long long)r->rows, (unsigned long long)r->k);
        out_table_cell(&t, "%s", out_bytes(a, (double)r->bytes_before));
        out_table_cell(&t, "%s", out_bytes(a, (double)r->bytes_after));
        out_table_cell(&t, "%.3g", r->max_abs_error);
        out_table_cell(&t, "%.3f %%", 100 * r->relative_rms);
        out_table_cell(&t, isfinite(r->sqnr_db) ? "%.1f" : "exact", r->sqnr_db);
    }
    if (out_table_print(&t, 0) != 0) return out_error(EXIT_INTERNAL, "out of memory");
    out_text(stdout, out);
    printf(": %zu modules in %s", all->n - n_lost, dspark_format_name(opts->format));
    if (opts->format != DSPARK_FORMAT_BF16)
        printf(" (%s, %s scales)", opts->layout == DSPARK_LAYOUT_MODELOPT ? "ModelOpt" : "compressed-tensors",
               opts->scales == DSPARK_SCALES_MSE ? "mse" : "absmax");
    printf(", read back equal\n");
    if (n_lost)
        printf("%zu modules that were quantised and are not to be are bf16 now\n", n_lost);
    printf("%s before, %s after, %s %s (%.1f %%)\n", out_bytes(a, (double)before),
           out_bytes(b, (double)after),
           out_bytes(c, before > after ? (double)(before - after) : (double)(after - before)),
           before >= after ? "saved" : "more",
           before ? 100 * fabs(1 - (double)after / (double)before) : 0);
    if (compared && quantize_compare_print(compared) != 0)
        return out_error(EXIT_INTERNAL, "out of memory");
    return EXIT_OK;
}

/* The report of a checkpoint that has been written. What keeps the comparison from being made is told
 * behind it; the checkpoint stays. */
static int print_report(const char *in, const char *out, const dspark_quantize_opts *opts,
                        const reports *all, const quantize_how *how)
{
    const uint64_t before = checkpoint_bytes(in), after = checkpoint_bytes(out);
    quantize_compare *compared = NULL;
    dspark_error err = {0};
    dspark_status st = DSPARK_OK;
    int code;
    if (how->compare) {
        if (!(compared = malloc(sizeof *compared))) return out_error(EXIT_INTERNAL, "out of memory");
        st = quantize_compare_run(compared, in, out, how->target, opts->n_threads, &err);
        if (st != DSPARK_OK)
            snprintf(compared->why, sizeof compared->why, "%.199s", err.message);
    }
    code = how->json ? print_json(in, out, opts, all, before, after, compared)
                     : print_text(out, opts, all, before, after, compared);
    free(compared);
    return code == EXIT_OK && st != DSPARK_OK ? out_fail(st, &err) : code;
}

/* A target that cannot be opened is known before the minutes of quantising. */
static dspark_status check_target(const char *path, dspark_error *err)
{
    dspark_checkpoint *target = NULL;
    dspark_status st = path ? dspark_checkpoint_open(&target, path, err) : DSPARK_OK;
    if (st != DSPARK_OK) out_add_path(err, path);
    dspark_checkpoint_close(target);
    return st;
}

int quantize_is_misfit(const dspark_error *err)
{
    return strstr(err->message, " columns are no multiple of ") != NULL;
}

static void advise(dspark_format format, const char *otherwise)
{
    const char *group = format == DSPARK_FORMAT_INT4 ? "--group-size N" : "";
    if (*group || *otherwise)
        fprintf(stderr, "  (%s%s%s)\n", group, *group && *otherwise ? "; or " : "", otherwise);
}

int quantize_run(const char *in, const char *out, dspark_quantize_opts *opts, const quantize_how *how)
{
    reports all = {0};
    dspark_error err = {0};
    dspark_status st;
    progress bar;
    int code;
    opts->progress = progress_update;
    opts->progress_user = &bar;
    opts->report = keep_report;
    opts->report_user = &all;
    st = check_target(how->compare ? how->target : NULL, &err);
    if (st == DSPARK_OK) {
        progress_start(&bar, "quantising", PROGRESS_BYTES);
        st = dspark_quantize(in, out, opts, &err);
        progress_end(&bar);
    }
    if (st != DSPARK_OK) {
        code = out_fail(st, &err);
        if (st == DSPARK_EUNSUPPORTED && quantize_is_misfit(&err)) advise(opts->format, how->advice);
    } else if (all.failed)
        code = out_error(EXIT_INTERNAL, "out of memory");
    else
        code = how->quiet ? EXIT_OK : print_report(in, out, opts, &all, how);
    free_reports(&all);
    return code;
}

/* ---- the command ---- */

int command_quantize(int argc, char **argv)
{
    static const char *const operands[] = {"CKPT", "OUT", NULL};
    static const char *const scales[] = {"absmax", "mse", NULL};
    static const char *const layouts[] = {"ct", "modelopt", NULL};
    const char *paths[2];
    int format = 0, format_given = 0, scale = 0, layout = 0, no_compare = 0, code;
    quantize_how how = {.advice = "keep them with --ignore P, for each name or wildcard P"};
    uint64_t group_size = 0, threads = 0;
    args_texts ignore = {0}, targets = {0};
    dspark_quantize_opts opts;
    const args_option options[] = {
        {"format", ARGS_CHOICE, &format, NULL,
         "what the weights become (bf16: the way back; fp8: fp8-channel)", 0, 0, quantize_formats,
         &format_given},
        {"scales", ARGS_CHOICE, &scale, NULL,
         "absmax: the largest weight is the largest code (default);\n"
         "mse: the scale with the least squared error", 0, 0, scales, NULL},
        {"layout", ARGS_CHOICE, &layout, NULL,
         "names and config of compressed-tensors (default) or of\n"
         "ModelOpt (fp8-tensor and nvfp4 only)", 0, 0, layouts, NULL},
        {"group-size", ARGS_UINT, &group_size, "N",
         "int4: weights that share a scale, a multiple of 8 (default 128)", 8, 1u << 20, NULL,
         NULL},
        {"ignore", ARGS_TEXTS, &ignore, "P",
         "keep the modules that P fits, in bf16: a name, a wildcard\n"
         "(*), or re:EXPRESSION; may be given many times", 0, 0, NULL, NULL},
        {"targets", ARGS_TEXTS, &targets, "P",
         "quantise only the modules that P fits, the others become\n"
         "bf16; may be given many times (default: all linear layers but\n"
         "kv_b_proj and the heads)", 0, 0, NULL, NULL},
        {"threads", ARGS_UINT, &threads, "N", "threads (default: all processors)", 1, 1024, NULL,
         NULL},
        {"target", ARGS_TEXT, &how.target, "DIR",
         "the target's checkpoint: a block is drafted and compared too,\n"
         "for which the whole of CKPT and OUT is opened", 0, 0, NULL, NULL},
        {"no-compare", ARGS_FLAG, &no_compare, NULL,
         "do not run context KV of CKPT and OUT to see what has become\n"
         "of its entries; memory is then that of the largest tensor", 0, 0, NULL, NULL},
        {"json", ARGS_FLAG, &how.json, NULL, "print the report as JSON", 0, 0, NULL, NULL},
    };
    const args_command command = {
        .name = "quantize",
        .synopsis = "CKPT OUT --format F [--scales absmax|mse] [--layout ct|modelopt] "
                    "[--group-size N]\n                       [--ignore P]... [--targets P]... "
                    "[--threads N] [--target DIR] [--no-compare] [--json]",
        .summary = "Write the checkpoint CKPT to the directory OUT with quantised weights. All that is\n"
                   "written is read back and compared before OUT appears; on failure nothing is left. Then 8\n"
                   "synthetic rows pass context KV of both: the error of their entries is shown.",
        .operands = operands,
        .operand_values = paths,
        .n_required = 2,
        .options = options,
        .n_options = sizeof options / sizeof *options,
    };
    code = args_parse(&command, argc, argv);
    if (code == ARGS_RUN && !format_given)
        code = args_complain(&command, "--format is missing; formats are fp8-tensor, fp8-channel, "
                             "fp8-block, nvfp4, mxfp4, mxfp8, int8, int4, bf16, fp8");
    if (code == ARGS_RUN && how.target && no_compare)
        code = args_complain(&command, "--target is for the comparison that --no-compare leaves out");
    if (code == ARGS_RUN) {
        how.compare = !no_compare;
        dspark_quantize_opts_init(&opts);
        opts.format = quantize_format(format);
        opts.scales = scale ? DSPARK_SCALES_MSE : DSPARK_SCALES_ABSMAX;
        opts.layout = layout ? DSPARK_LAYOUT_MODELOPT : DSPARK_LAYOUT_COMPRESSED_TENSORS;
        opts.group_size = (uint32_t)group_size;
        opts.n_threads = (uint32_t)threads;
        opts.ignore = ignore.items;
        opts.n_ignore = ignore.n;
        opts.targets = targets.items;
        opts.n_targets = targets.n;
        code = quantize_run(paths[0], paths[1], &opts, &how);
    }
    args_texts_free(&ignore);
    args_texts_free(&targets);
    return code;
}
