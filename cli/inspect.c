/* dspark inspect: asks the library what a checkpoint is. --json prints the library's document as it
 * is; the text is made from the same document, so the two cannot disagree. Judges nothing; says what
 * to do next. */
#include "inspect.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "args.h"
#include "commands.h"
#include "out.h"
#include "progress.h"

static const char *text_in(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

/* "config.json: rope_parameters.factor" -> the key, else NULL. */
static const char *config_key(const char *where)
{
    static const char begin[] = "config.json: ";
    const char *at = strstr(where, begin);
    return at ? at + sizeof begin - 1 : NULL;
}

/* A file of this project that is no checkpoint: the command that takes it. */
static int advise_own(const char *id, const char *path)
{
    if (strcmp(id, "dump") == 0) {
        printf("next: dspark context CKPT --taps ");
        out_word(stdout, path);
        putchar('\n');
    } else if (strcmp(id, "cache") == 0) {
        printf("next: dspark compare ");
        out_word(stdout, path);
        printf(" OTHER\n");
    } else if (strcmp(id, "states") == 0) {
        printf("next: hand its rows to dspark_context_run as states\n");
    } else {
        return 0;
    }
    return 1;
}

/* What mends the first problem. The library's order of looking makes it the cause of the others. */
static void advise_mending(const json_t *doc, const char *path)
{
    const json_t *family = json_object_get(doc, "family");
    const json_t *problem = json_array_get(json_object_get(doc, "problems"), 0);
    const char *id = text_in(family, "id"), *where = text_in(problem, "tensor");
    const char *status = text_in(problem, "status"), *key = config_key(where);
    int unsupported = strcmp(status, "DSPARK_EUNSUPPORTED") == 0;
    printf("next: ");
    if (strstr(text_in(problem, "text"), "give the directory")) {
        const char *slash = strrchr(path, '/');
        char folder[4096];
        snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) : 1,
                 slash ? path : ".");
        printf("dspark inspect ");
        out_word(stdout, *folder ? folder : "/");
        putchar('\n');
    } else if (strcmp(where, "config.json") == 0 && unsupported) {
        printf("put config.json beside the weights\n");
    } else if (key && unsupported) {
        printf("serve it with the program that it was made for: ");
        out_text(stdout, key);
        printf(" asks for what is not built here\n");
    } else if (key) {
        printf("mend ");
        out_text(stdout, key);
        printf(" in config.json\n");
    } else if (strcmp(where, "config.json") == 0) {
        printf(strcmp(status, "DSPARK_EIO") == 0 ? "make config.json a file that can be read\n"
                                                 : "mend config.json, or fetch it again\n");
    } else if (strcmp(id, "gguf") == 0 || strcmp(id, "pytorch") == 0) {
        printf("get the checkpoint in its safetensors form\n");
    } else if (strcmp(id, "unknown") == 0) {
        printf("give the directory of a K3 DSpark drafter\n");
    } else if (strcmp(id, "target") == 0) {
        printf("give the directory of its drafter, not of the target\n");
    } else if (strcmp(status, "DSPARK_EMODEL") == 0 && !*where) {
        printf("put the config.json that belongs to these tensors beside them\n");
    } else if (strcmp(id, "k3_dspark") != 0 && unsupported) {
        printf("serve it with the program that it was made for\n");
    } else if (unsupported) {
        printf("use the BF16 checkpoint that this one was made from\n");
    } else if (strcmp(status, "DSPARK_EMODEL") == 0) {
        printf("fetch config.json and tensors again, from one place: they do not fit together, or "
               "were not all written\n");
    } else {
        printf("fetch ");
        out_text(stdout, *where ? where : "the files");
        printf(" again, and inspect once more\n");
    }
}

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
    if (verdict == DSPARK_USABLE && !json_is_object(json_object_get(doc, "deep")))
        printf(" (--deep reads it)");
    putchar('\n');
    if (verdict == DSPARK_USABLE) {
        printf("next: dspark context ");
        out_word(stdout, path);
        printf(" --taps DUMP --out CACHES\n");
    } else if (!advise_own(text_in(json_object_get(doc, "family"), "id"), path)) {
        advise_mending(doc, path);
    }
}

/* Paths of which a whole page would say one thing three times. Returns EXIT_OK to go on. */
static int check_path(const char *path)
{
    struct stat info;
    const char *slash = strchr(path, '/');
    int hub;
    if (stat(path, &info) == 0 || (errno != ENOENT && errno != ENOTDIR)) return EXIT_OK;
    hub = slash && slash != path && slash[1] && !strchr(slash + 1, '/') && path[0] != '.';
    return out_error(EXIT_INPUT, "not found: %s (a local directory is needed%s)", path,
                     hub ? "; names of a hub are not fetched" : "");
}

/* A directory without anything of a checkpoint, likewise. */
static int has_nothing(const json_t *doc)
{
    return strcmp(text_in(json_object_get(doc, "family"), "id"), "none") == 0 &&
           json_array_size(json_object_get(doc, "files")) == 0;
}

static int print_short(const char *path, const json_t *doc)
{
    const json_t *problems = json_object_get(doc, "problems");
    const char *text = NULL;
    struct stat info;
    size_t i;
    for (i = 0; i < json_array_size(problems); i++)
        text = text_in(json_array_get(problems, i), "text");
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode) && text && strstr(text, "no tensor file"))
        return out_error(EXIT_INPUT, "%s: no tensors here: neither config.json nor *.safetensors",
                         path);
    return out_error(EXIT_INPUT, "%s: %s", path, text ? text : "nothing could be read");
}

static int print_text(const dspark_inspection *in, const char *path)
{
    json_error_t problem;
    json_t *doc = json_loads(dspark_inspection_json(in), JSON_REJECT_DUPLICATES, &problem);
    int code;
    if (!doc)
        return out_error(EXIT_INTERNAL, "the inspection is not valid JSON: %s", problem.text);
    if (has_nothing(doc)) {
        code = print_short(path, doc);
        json_decref(doc);
        return code;
    }
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
    int code = json ? EXIT_OK : check_path(path);
    if (code != EXIT_OK) return code;
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
         "read all tensor data too: non-finite values, rows of zeros,\nranges, root mean squares", 0, 0, NULL, NULL},
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
