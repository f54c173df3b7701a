/* dspark inspect: asks the library what a checkpoint is. --json prints the library's document as it
 * is; the text is made from the same document, so the two cannot disagree. Judges nothing. */
#include "inspect.h"

#include "args.h"
#include "commands.h"
#include "out.h"
#include "progress.h"

/* What someone with this checkpoint can do now. */
static void print_verdict(dspark_verdict verdict, const char *path, const json_t *doc)
{
    const char *reason = json_string_value(json_object_get(doc, "reason"));
    static const char *const words[] = {"USABLE", "NOT USABLE HERE", "", "BROKEN"};
    printf("\n%s", words[verdict]);
    if (reason) {
        printf(": ");
        out_text(stdout, reason);
    }
    putchar('\n');
    if (verdict == DSPARK_USABLE) {
        printf("next: dspark context ");
        out_word(stdout, path);
        printf(" --taps DUMP --out CACHES\n");
    } else if (verdict == DSPARK_RECOGNISED) {
        printf("next: serve it with the program that it was made for\n");
    } else {
        printf("next: fetch or write the files again and inspect once more\n");
    }
}

static int print_text(const dspark_inspection *in, const char *path)
{
    json_error_t problem;
    json_t *doc = json_loads(dspark_inspection_json(in), JSON_REJECT_DUPLICATES, &problem);
    int code;
    if (!doc)
        return out_error(EXIT_INTERNAL, "the inspection is not valid JSON: %s", problem.text);
    code = inspect_print(doc);
    if (code == EXIT_OK) print_verdict(dspark_inspection_verdict(in), path, doc);
    json_decref(doc);
    return code;
}

static int run_inspect(const char *path, int deep, int json)
{
    dspark_inspection *in = NULL;
    dspark_inspect_opts opts;
    dspark_error err = {0};
    dspark_status st;
    progress bar;
    int code = EXIT_OK;
    dspark_inspect_opts_init(&opts);
    opts.deep = deep;
    opts.progress = progress_update;
    opts.progress_user = &bar;
    progress_start(&bar, "reading", PROGRESS_BYTES);
    st = dspark_inspect(&in, path, &opts, &err);
    progress_end(&bar);
    if (st != DSPARK_OK) return out_fail(st, &err);
    if (json)
        printf("%s\n", dspark_inspection_json(in));
    else
        code = print_text(in, path);
    if (code == EXIT_OK) code = (int)dspark_inspection_verdict(in); /* 0, 1, 3 by definition */
    dspark_inspection_free(in);
    return code;
}

int command_inspect(int argc, char **argv)
{
    const char *path;
    int deep = 0, json = 0, code;
    static const char *const operands[] = {"CKPT", NULL};
    const args_option options[] = {
        {"deep", ARGS_FLAG, &deep, NULL,
         "read all tensor data too: non-finite values, rows of zeros,\nranges", 0, 0, NULL, NULL},
        {"json", ARGS_FLAG, &json, NULL, "print the document that everything is made from", 0, 0,
         NULL, NULL},
    };
    args_command command = {
        .name = "inspect",
        .synopsis = "CKPT [--deep] [--json]",
        .summary = "Say what a checkpoint (a directory or a safetensors file) is and is not, and\n"
                   "whether it is usable here. Reads headers and config.json only, unless --deep.\n"
                   "Exit code 0 usable, 1 recognised but not usable here, 3 broken.",
        .operands = operands,
        .operand_values = &path,
        .n_required = 1,
        .options = options,
        .n_options = sizeof options / sizeof *options,
    };
    code = args_parse(&command, argc, argv);
    return code == ARGS_RUN ? run_inspect(path, deep, json) : code;
}
