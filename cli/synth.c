/* dspark synth: writes synthetic checkpoints and hidden-state dumps through the library, and says
 * what was written. The bytes are the library's business (docs/formats.md). */
#include <inttypes.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "out.h"
#include "outputs.h"
#include "progress.h"
#include "quantize.h"
#include "synth_schemes.h"
#include "tmp_folder.h"

typedef struct synth_args {
    const char *out;
    const char *preset;
    args_texts settings;
    uint64_t seed;
    uint64_t shard_bytes;
    int context_only;
    const char *format;             /* NULL: bf16 */
    const synth_scheme *scheme;     /* that quantize does not write */
    dspark_format quantised;        /* that it writes; NONE: bf16 or a scheme of the above */
    dspark_layout layout;
    uint64_t group_size;
    const char *dump;
    const char *checkpoint;
    uint64_t n_tokens;
    int json;
} synth_args;

/* What lies in a checkpoint or a dump now, read back from the files. */
static int report_file(const char *kind, const char *path, uint64_t seed, int json)
{
    dspark_checkpoint *file = NULL;
    dspark_error err = {0};
    uint64_t n_bytes = 0, n_elements = 0;
    size_t i, n;
    char a[32], b[32];
    dspark_status st = dspark_checkpoint_open(&file, path, &err);
    if (st != DSPARK_OK) return out_fail(st, &err);
    n = dspark_checkpoint_tensor_count(file);
    for (i = 0; i < n; i++) {
        n_bytes += dspark_checkpoint_tensor(file, i)->n_bytes;
        n_elements += dspark_checkpoint_tensor(file, i)->n_elements;
    }
    dspark_checkpoint_close(file);
    if (json) {
        json_t *doc = json_object();
        out_set(doc, "kind", json_string(kind));
        out_set(doc, "path", out_string(path));
        out_set(doc, "seed", json_integer((json_int_t)seed));
        out_set(doc, "tensors", json_integer((json_int_t)n));
        out_set(doc, "elements", json_integer((json_int_t)n_elements));
        out_set(doc, "tensor_bytes", json_integer((json_int_t)n_bytes));
        return out_json(doc);
    }
    printf("%s ", kind);
    out_text(stdout, path);
    printf(": %zu tensors, %s elements, %s, seed %" PRIu64 "\n", n, out_count(a, n_elements),
           out_bytes(b, (double)n_bytes), seed);
    return EXIT_OK;
}

static int write_plain(const synth_args *a, const char *out)
{
    dspark_synth_opts opts;
    dspark_error err = {0};
    dspark_status st;
    progress bar;
    dspark_synth_opts_init(&opts);
    opts.preset = a->preset;
    opts.settings = a->settings.items;
    opts.n_settings = a->settings.n;
    opts.seed = a->seed;
    opts.shard_bytes = a->shard_bytes;
    opts.context_only = a->context_only;
    opts.progress = progress_update;
    opts.progress_user = &bar;
    progress_start(&bar, "writing", PROGRESS_BYTES);
    st = dspark_synth_checkpoint(out, &opts, &err);
    progress_end(&bar);
    return st == DSPARK_OK ? EXIT_OK : out_fail(out_blame_arguments(&err, st), &err);
}

/* --format F: one of quantize's names, those with ModelOpt's layout, or a scheme of synth_schemes.h. */
static int find_format(synth_args *a)
{
    size_t i;
    if (!a->format) return 1;
    if (strcmp(a->format, "nvfp4-modelopt") == 0 || strcmp(a->format, "fp8-modelopt") == 0) {
        a->layout = DSPARK_LAYOUT_MODELOPT;
        a->quantised = a->format[0] == 'n' ? DSPARK_FORMAT_NVFP4 : DSPARK_FORMAT_FP8_TENSOR;
        return 1;
    }
    for (i = 0; quantize_formats[i]; i++) {
        if (strcmp(a->format, quantize_formats[i]) != 0) continue;
        a->quantised = quantize_format((int)i);
        if (a->quantised == DSPARK_FORMAT_BF16) a->quantised = DSPARK_FORMAT_NONE;
        return 1;
    }
    a->scheme = synth_scheme_find(a->format);
    return a->scheme != NULL;
}

static int complain_format(const args_command *command, const char *format)
{
    char names[600];
    size_t n = 0, i;
    for (i = 0; quantize_formats[i]; i++)
        n += (size_t)snprintf(names + n, sizeof names - n, "%s, ", quantize_formats[i]);
    for (i = 0; synth_scheme_name(i); i++)
        n += (size_t)snprintf(names + n, sizeof names - n, "%s, ", synth_scheme_name(i));
    return args_complain(command, "--format: '%s' is none of %sfp8-modelopt, nvfp4-modelopt", format,
                         names);
}

/* The plain checkpoint lies beside OUT until it has been quantised. */
static int write_quantised(const synth_args *a)
{
    tmp_folder plain;
    dspark_quantize_opts opts;
    int code, problem = tmp_folder_beside(&plain, a->out, "bf16");
    if (problem)
        return out_error(EXIT_INTERNAL, "%s: no temporary folder beside it: %s", a->out,
                         strerror(problem));
    dspark_quantize_opts_init(&opts);
    opts.format = a->quantised;
    opts.layout = a->layout;
    opts.group_size = (uint32_t)a->group_size;
    code = write_plain(a, plain.path);
    if (code == EXIT_OK && a->scheme) {
        dspark_error err = {0};
        dspark_status st =
            synth_scheme_write(a->scheme, plain.path, a->out, (uint32_t)a->group_size, &err);
        if (st != DSPARK_OK) code = out_fail(st, &err);
    } else if (code == EXIT_OK) {
        const quantize_how how = {.quiet = 1, .advice = "choose other widths with --set KEY=VALUE"};
        code = quantize_run(plain.path, a->out, &opts, &how);
    }
    tmp_folder_remove(&plain);
    return code;
}

static int write_checkpoint(const synth_args *a)
{
    const int plain = !a->scheme && a->quantised == DSPARK_FORMAT_NONE;
    const int code = plain ? write_plain(a, a->out) : write_quantised(a);
    return code == EXIT_OK ? report_file("checkpoint", a->out, a->seed, a->json) : code;
}

static int write_dump(const synth_args *a)
{
    dspark_error err = {0};
    dspark_status st;
    progress bar;
    progress_start(&bar, "writing", PROGRESS_BYTES);
    st = dspark_synth_dump(a->dump, a->checkpoint, a->n_tokens, a->seed, progress_update, &bar,
                           &err);
    progress_end(&bar);
    if (st != DSPARK_OK) {
        if (st == DSPARK_EIO || st == DSPARK_EFORMAT || st == DSPARK_EMODEL)
            out_add_path(&err, a->checkpoint);
        return out_fail(st, &err);
    }
    return report_file("dump", a->dump, a->seed, a->json);
}

static int check_dump(const args_command *command, const synth_args *a)
{
    const output_path output = {"--dump", a->dump, 0};
    return outputs_check(command, &output, 1, &a->checkpoint, 1);
}

int command_synth(int argc, char **argv)
{
    synth_args a;
    int seed_given = 0, code;
    static const char *const operands[] = {"OUT", NULL};
    const args_option options[] = {
        {"preset", ARGS_TEXT, &a.preset, "P",
         "geometry and variant: kimi-k3, kimi-k3-block5, kimi-k3.1-pro, lightseek, tiny", 0, 0,
         NULL, NULL},
        {"set", ARGS_TEXTS, &a.settings, "KEY=VALUE",
         "override a config.json key; VALUE in JSON; may be given many times", 0, 0, NULL, NULL},
        {"seed", ARGS_UINT, &a.seed, "N",
         "seed of all values (default 0); same options, same bytes", 0, INT64_MAX, NULL,
         &seed_given},
        {"shard-size", ARGS_SIZE, &a.shard_bytes, "BYTES",
         "cut into shards of at most BYTES, for example 1G (default: one file)", 1, 0, NULL, NULL},
        {"context-only", ARGS_FLAG, &a.context_only, NULL,
         "only the tensors that context KV needs", 0, 0, NULL, NULL},
        {"format", ARGS_TEXT, &a.format, "F",
         "quantise the weights (default bf16): what dspark quantize writes,\n"
         "fp8-modelopt and nvfp4-modelopt, and what is only read:\n"
         "fp8-group, fp8-deepseek, fp8-quark, fp8-fnuz, fp8-e5m2,\n"
         "int8-packed, int4-asym, int4-gidx, int3, int5, int6, int7\n"
         "and those four with -old, the layout before 0.18", 0, 0, NULL, NULL},
        {"group-size", ARGS_UINT, &a.group_size, "N",
         "with groups of integers or fp8-group: weights that share a\n"
         "scale (default 128 for int4, else 32)", 8, 1u << 20, NULL, NULL},
        {"dump", ARGS_TEXT, &a.dump, "FILE",
         "write a hidden-state dump instead; needs --for and --tokens", 0, 0, NULL, NULL},
        {"for", ARGS_TEXT, &a.checkpoint, "CKPT", "the checkpoint that the dump is for", 0, 0,
         NULL, NULL},
        {"tokens", ARGS_UINT, &a.n_tokens, "N", "rows of the dump", 1, UINT64_C(1) << 31, NULL,
         NULL},
        {"json", ARGS_FLAG, &a.json, NULL, "print what was written as JSON", 0, 0, NULL, NULL},
    };
    args_command command = {
        .name = "synth",
        .synopsis = "OUT --preset P [--set KEY=VALUE]... [--seed N] [--shard-size BYTES] "
                    "[--context-only] [--format F] [--group-size N] [--json]\n"
                    "       dspark synth --dump FILE --for CKPT --tokens N [--seed N] [--json]",
        .summary = "Write a synthetic checkpoint (OUT/config.json, OUT/model*.safetensors) of any\n"
                   "geometry and variant, or a hidden-state dump in the extraction format.",
        .operands = operands,
        .operand_values = &a.out,
        .options = options,
        .n_options = sizeof options / sizeof *options,
    };
    memset(&a, 0, sizeof a);
    code = args_parse(&command, argc, argv);
    if (code != ARGS_RUN) goto done;
    if (a.dump) {
        if (a.out || a.preset || a.settings.n || a.shard_bytes || a.context_only ||
            a.format || a.group_size)
            code = args_complain(&command, "--dump writes a dump only: it goes with --for, "
                                 "--tokens, --seed and --json");
        else if (!a.checkpoint || !a.n_tokens)
            code = args_complain(&command, "--dump needs --for CKPT and --tokens N");
        else
            code = check_dump(&command, &a);
        if (code == ARGS_RUN) code = write_dump(&a);
    } else if (a.checkpoint || a.n_tokens) {
        code = args_complain(&command, "--for and --tokens go with --dump FILE");
    } else if (!a.out) {
        code = args_complain(&command, "OUT is missing");
    } else if (!a.preset) {
        code = args_complain(&command, "--preset is missing; presets are kimi-k3, kimi-k3-block5, "
                             "kimi-k3.1-pro, lightseek, tiny");
    } else if (!find_format(&a)) {
        code = complain_format(&command, a.format);
    } else if (a.group_size && a.quantised != DSPARK_FORMAT_INT4 &&
               !(a.scheme && synth_scheme_has_groups(a.scheme))) {
        code = args_complain(&command, "--group-size goes with formats whose scales serve a group: int4, "
                             "fp8-group and the other integers");
    } else if (a.scheme && a.shard_bytes) {
        code = args_complain(&command, "--shard-size does not go with --format %s: it is one file",
                             a.format);
    } else {
        code = write_checkpoint(&a);
    }
done:
    args_texts_free(&a.settings);
    return code;
}
