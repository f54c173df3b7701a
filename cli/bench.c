/* dspark bench: the command. Reads what is to be measured and how, checks that it goes together, opens the
 * outputs before the minutes of measuring, and shows the report. */
#include "bench.h"

#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "out.h"
#include "outputs.h"

#define BUFFER_BYTES (UINT64_C(512) << 20)
#define BUFFER_MAX (UINT64_C(1) << 40) /* far from where rounding up to huge pages wraps */

const char *const bench_what_names[] = {"context", "draft", "linear", "attention", "load", "growth", NULL};

/* The options as they were written. */
typedef struct written {
    const char *tokens, *contexts, *sequences, *threads, *isa, *formats, *caches;
} written;

/* ---- lists ---- */

static int read_list(const args_command *command, const char *option, const char *text, uint64_t least,
                     uint64_t most, bench_list *list)
{
    long n = args_read_uints(text, &list->items), i;
    if (n < 0) return out_error(EXIT_INTERNAL, "out of memory");
    list->n = (size_t)n;
    for (i = 0; i < n; i++)
        if (list->items[i] < least || list->items[i] > most) break;
    if (n == 0 || i < n)
        return args_complain(command, "--%s: '%s' is not allowed; expected numbers from %llu to %llu separated "
                             "by commas", option, text, (unsigned long long)least, (unsigned long long)most);
    return ARGS_RUN;
}

/* Names of a list, each at most once, into their places in `choices`. */
static int read_names(const args_command *command, const char *option, const char *text,
                      const char *const *choices, int *to, size_t most, size_t *n)
{
    const char *item = text;
    char all[128] = "";
    size_t i;
    for (i = 0; choices[i]; i++)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? ", " : "", choices[i]);
    for (*n = 0;; item++) {
        const size_t length = strcspn(item, ",");
        int k = 0, known;
        while (choices[k] && (strlen(choices[k]) != length || strncmp(choices[k], item, length) != 0)) k++;
        known = choices[k] != NULL && *n < most;
        for (i = 0; i < *n; i++) known &= to[i] != k;
        if (!known)
            return args_complain(command, "--%s: '%s' is not allowed; expected different names of %s, separated "
                                 "by commas", option, text, all);
        to[(*n)++] = k;
        item += length;
        if (!*item) return ARGS_RUN;
    }
}

static int read_lists(const args_command *command, const written *w, bench_args *a)
{
    int code = read_list(command, "tokens", w->tokens ? w->tokens : "1,8,16,32,64,512", 1, 65536, &a->tokens);
    const char *contexts = a->what == BENCH_ATTENTION ? "4096,16384,65536" : a->what == BENCH_LINEAR ? "0" : "4096";
    a->tokens_given = w->tokens != NULL;
    a->contexts_given = w->contexts != NULL;
    a->sequences_given = w->sequences != NULL;
    if (code == ARGS_RUN)
        code = read_list(command, "contexts", w->contexts ? w->contexts : contexts, 0, UINT64_C(1) << 31,
                         &a->contexts);
    if (code == ARGS_RUN)
        code = read_list(command, "sequences", w->sequences ? w->sequences : "1", 1, 1024, &a->sequences);
    if (code == ARGS_RUN && w->threads) code = read_list(command, "threads", w->threads, 1, 1024, &a->threads);
    if (code == ARGS_RUN && !w->threads) { /* 0: all of them; growth: 1 and all */
        const uint32_t all = bench_read_processors();
        a->threads.items = calloc(2, sizeof *a->threads.items);
        if (!a->threads.items) return out_error(EXIT_INTERNAL, "out of memory");
        a->threads.n = a->what == BENCH_GROWTH && all > 1 ? 2 : 1;
        if (a->threads.n == 2) a->threads.items[0] = 1;
    }
    if (code == ARGS_RUN)
        code = read_names(command, "isa", w->isa ? w->isa : "auto", args_isa_choices, a->isas, BENCH_MAX_ISAS,
                          &a->n_isas);
    if (code == ARGS_RUN)
        code = read_names(command, "cache-dtype", w->caches ? w->caches : "bf16", args_cache_choices, a->caches,
                          BENCH_MAX_CACHES, &a->n_caches);
    if (code == ARGS_RUN && w->formats && !bench_read_formats(w->formats, a))
        code = args_complain(command, "--formats: '%s' is not allowed; expected different names of bf16, fp8-tensor, "
                             "fp8-channel, fp8-block, nvfp4, mxfp4, mxfp8, int8, int4, separated by commas",
                             w->formats);
    return code;
}

/* ---- what goes with what ---- */

#define WITH(what) (1u << (what))
#define ALL_DRAFTS (WITH(BENCH_DRAFT) | WITH(BENCH_LINEAR) | WITH(BENCH_ATTENTION))

static int check_combination(const args_command *command, const written *w, const bench_args *a)
{
    const struct {
        const char *name;
        int given;
        unsigned with;
        const char *text;
    } rules[] = {
        {"tokens", w->tokens != NULL,
         WITH(BENCH_CONTEXT) | WITH(BENCH_LINEAR) | WITH(BENCH_LOAD) | WITH(BENCH_GROWTH),
         "context, linear, load and growth"},
        {"formats", w->formats != NULL,
         WITH(BENCH_CONTEXT) | WITH(BENCH_DRAFT) | WITH(BENCH_LINEAR) | WITH(BENCH_LOAD),
         "context, draft, linear and load"},
        {"contexts", w->contexts != NULL, ALL_DRAFTS | WITH(BENCH_GROWTH), "draft, linear, attention and growth"},
        {"sequences", w->sequences != NULL, ALL_DRAFTS | WITH(BENCH_GROWTH), "draft, linear, attention and growth"},
        {"cache-dtype", w->caches != NULL, WITH(BENCH_DRAFT) | WITH(BENCH_ATTENTION), "draft and attention"},
        {"target", a->target != NULL, ALL_DRAFTS | WITH(BENCH_LOAD), "draft, linear, attention and load"},
        {"prepacked", a->prepacked != NULL, WITH(BENCH_LOAD), "load"},
        {"path", a->path_given, WITH(BENCH_CONTEXT), "context"},
        {"no-states", a->no_states, WITH(BENCH_CONTEXT), "context"},
        {"cold", a->cold, ~WITH(BENCH_LOAD), "everything but load"},
        {"hot", a->hot, ~WITH(BENCH_LOAD), "everything but load"},
    };
    size_t i;
    for (i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rules[i].given && !(rules[i].with & WITH(a->what)))
            return args_complain(command, "--%s goes with --what %s, not with %s", rules[i].name, rules[i].text,
                                 bench_what_names[a->what]);
    if (a->cold && a->hot) return args_complain(command, "--cold and --hot exclude each other");
    if (a->checkpoint && (a->preset || a->settings.n))
        return args_complain(command, "--preset and --set go without CKPT");
    if (a->prepacked && !a->checkpoint)
        return args_complain(command, "--prepacked goes with CKPT, of which the file was made");
    if (a->settings.n > BENCH_MAX_SETTINGS) return args_complain(command, "--set: too many settings");
    if (a->checkpoint && a->what == BENCH_GROWTH)
        return args_complain(command, "--what growth makes its own checkpoints: no CKPT");
    if (w->formats && a->prepacked)
        return args_complain(command, "--prepacked is of CKPT as it is: no --formats");
    if (w->formats && (a->path_given || (a->no_states && a->what == BENCH_CONTEXT)))
        return args_complain(command, "--formats measures the one pass only: no --%s",
                             a->path_given ? "path" : "no-states");
    return ARGS_RUN;
}

static int check_outputs(const args_command *command, const bench_args *a)
{
    const output_path outputs[] = {{"--csv", a->csv, 1}, {"--svg", a->svg, 1}};
    const char *const inputs[] = {a->checkpoint, a->prepacked, a->target};
    return outputs_check(command, outputs, 2, inputs, 3);
}

/* ---- the command ---- */

static int run(const bench_args *a)
{
    static bench_report r; /* large; one a process */
    dspark_error err = {0};
    dspark_status st = bench_report_open(&r, a, &err);
    int code;
    if (st == DSPARK_OK) {
        switch (a->what) {
        case BENCH_CONTEXT: st = bench_context(&r, &err); break;
        case BENCH_LOAD: st = bench_load(&r, &err); break;
        case BENCH_GROWTH: st = bench_growth(&r, &err); break;
        default: st = bench_draft(&r, &err); break;
        }
    }
    if (st != DSPARK_OK) {
        code = out_fail(st, &err);
    } else {
        code = a->json ? bench_print_json(&r) : bench_print_text(&r);
        if (code == EXIT_OK && a->csv) code = bench_write_csv(&r, a->csv);
        if (code == EXIT_OK && a->svg) code = bench_write_svg(&r, a->svg);
    }
    bench_report_close(&r);
    return code;
}

int command_bench(int argc, char **argv)
{
    static bench_args a;
    written w;
    int code;
    static const char *const operands[] = {"CKPT", NULL};
    const args_option options[] = {
        {"what", ARGS_CHOICE, &a.what, NULL,
         "what is measured (default context):\n"
         "context    states -> cache in three ways, taps -> states, and\n"
         "           the whole way; with --formats the one pass over each\n"
         "draft      one drafted block by stage\n"
         "linear     every linear of the draft\n"
         "attention  attention of a block over the latent cache\n"
         "load       headers, packing, first call and tenth, memory\n"
         "growth     time over positions, context, layers, sequences\n"
         "           and threads, on checkpoints made for it", 0, 0, bench_what_names, NULL},
        {"preset", ARGS_TEXT, &a.preset, "P",
         "without CKPT: the synthetic checkpoint to make (default kimi-k3:\n"
         "665 MB for context and load, else 7.1 GB) in a temporary folder", 0, 0, NULL, NULL},
        {"set", ARGS_TEXTS, &a.settings, "KEY=VALUE",
         "without CKPT: override a config key of the made checkpoint", 0, 0, NULL, NULL},
        {"tokens", ARGS_TEXT, &w.tokens, "N,N,...",
         "positions of a call, one for each token\n(default 1,8,16,32,64,512; load: the first)", 0, 0, NULL, NULL},
        {"contexts", ARGS_TEXT, &w.contexts, "N,N,...",
         "context lengths (default 4096; attention 4096,16384,65536)", 0, 0, NULL, NULL},
        {"sequences", ARGS_TEXT, &w.sequences, "N,N,...", "sequences in a batch (default 1)", 0, 0, NULL, NULL},
        {"formats", ARGS_TEXT, &w.formats, "F,F,...",
         "weights in each format (names of dspark quantize but fp8; bf16:\n"
         "a plain checkpoint itself); copies in a temporary folder", 0, 0, NULL, NULL},
        {"cache-dtype", ARGS_TEXT, &w.caches, "D,D,...", "formats of the context's entries (default bf16)", 0, 0,
         NULL, NULL},
        {"target", ARGS_TEXT, &a.target, "DIR",
         "where LM head and embedding come from (default: made up)", 0, 0, NULL, NULL},
        {"prepacked", ARGS_TEXT, &a.prepacked, "FILE",
         "with --what load: also the context's weights mapped from\nthis file of CKPT (dspark pack)", 0, 0, NULL, NULL},
        {"threads", ARGS_TEXT, &w.threads, "N,N,...",
         "numbers of threads, in turn (default: all processors;\ngrowth: 1 and all)", 0, 0, NULL, NULL},
        {"isa", ARGS_TEXT, &w.isa, "I,I,...",
         "instruction sets, in turn: auto, ref, avx2, avx512,\navx512bf16 (default auto)", 0, 0, NULL, NULL},
        {"path", ARGS_CHOICE, &a.path, NULL, "measure one path only (default: all three in turn)",
         0, 0, args_path_choices, &a.path_given},
        {"repeat", ARGS_UINT, &a.repeat, "R",
         "repeats (default: 5 to 200, about four seconds; load: 3)", 1, BENCH_MAX_REPEATS, NULL, NULL},
        {"cold", ARGS_FLAG, &a.cold, NULL,
         "weights come from memory: caches are emptied before each\n"
         "call (default up to 64 positions, and for drafts)", 0, 0, NULL, NULL},
        {"hot", ARGS_FLAG, &a.hot, NULL, "weights stay where the last call left them", 0, 0, NULL,
         NULL},
        {"buffer", ARGS_SIZE, &a.buffer, "BYTES",
         "buffer of the read probe and for emptying caches\n(default 512M)", 1048576,
         BUFFER_MAX, NULL, NULL},
        {"no-states", ARGS_FLAG, &a.no_states, NULL, "measure nothing that begins at the taps", 0,
         0, NULL, NULL},
        {"csv", ARGS_TEXT, &a.csv, "FILE", "write every measurement as CSV", 0, 0, NULL, NULL},
        {"svg", ARGS_TEXT, &a.svg, "FILE", "draw the report, with the rooflines", 0, 0, NULL, NULL},
        {"json", ARGS_FLAG, &a.json, NULL, "print the report as JSON", 0, 0, NULL, NULL},
    };
    args_command command = {
        .name = "bench",
        .synopsis = "[CKPT] [--what W] [OPTIONS]",
        .summary = "Time what the library does, contenders in turn within one process, beside the\n"
                   "machine's limits (compute, read and copy probes) in the same run.",
        .operands = operands,
        .operand_values = &a.checkpoint,
        .options = options,
        .n_options = sizeof options / sizeof *options,
        .trailer = "The roofline of a stage is max(bytes / read, flops / compute probe), each weight,\n"
                   "input, entry and output counted once. Cold rows stand against reads that take\n"
                   "turns with the repeats, and arithmetic against probes by the same threads right\n"
                   "before and after each call. A repeat beside which they did under 85% of their\n"
                   "best, as when two processors share one core, is counted as disturbed and taken\n"
                   "again, at most as many as were asked for. A run on a busy or drifting machine\n"
                   "ends with a line NOT RELIABLE.",
    };
    memset(&a, 0, sizeof a);
    memset(&w, 0, sizeof w);
    a.buffer = BUFFER_BYTES;
    code = args_parse(&command, argc, argv);
    if (code == ARGS_RUN) code = check_combination(&command, &w, &a);
    if (code == ARGS_RUN) code = read_lists(&command, &w, &a);
    if (code == ARGS_RUN) code = check_outputs(&command, &a);
    if (code == ARGS_RUN) code = run(&a);
    args_texts_free(&a.settings);
    free(a.tokens.items);
    free(a.contexts.items);
    free(a.sequences.items);
    free(a.threads.items);
    return code;
}
