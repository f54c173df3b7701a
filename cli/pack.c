/* dspark pack: writes the packed weights of a checkpoint as one file that openings map, and proves that
 * such a file is whole and belongs to its checkpoint. */
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "args.h"
#include "commands.h"
#include "out.h"
#include "outputs.h"
#include "progress.h"

typedef struct pack_args {
    const char *paths[2]; /* the checkpoint, the file */
    const char *target;
    int parts, parts_given;
    uint64_t n_threads;
    int check, json;
} pack_args;

static const char *const part_choices[] = {"all", "context", NULL};

static int print_report(const pack_args *a, const char *parts, uint64_t n_bytes)
{
    char size[32];
    if (a->json) {
        json_t *doc = json_object();
        out_set(doc, "checkpoint", out_string(a->paths[0]));
        out_set(doc, "file", out_string(a->paths[1]));
        out_set(doc, "parts", json_string(parts));
        out_set(doc, "bytes", json_integer((json_int_t)n_bytes));
        out_set(doc, "checked", json_boolean(a->check));
        return out_json(doc);
    }
    out_text(stdout, a->paths[1]);
    printf(": %s, %s, ", parts, out_bytes(size, (double)n_bytes));
    printf(a->check ? "whole and made of " : "packed from ");
    out_text(stdout, a->paths[0]);
    printf("\n");
    return out_finish(EXIT_OK);
}

static dspark_status check_file(const pack_args *a, dspark_model_opts *opts, dspark_error *err)
{
    dspark_status st = dspark_prepacked_parts(a->paths[1], &opts->parts, err);
    if (st != DSPARK_OK) return st;
    if (a->target && !(opts->parts & DSPARK_PART_BLOCK))
        return out_set_error(err, DSPARK_EINVAL, "--target", "it is for an LM head, and the file holds context "
                             "KV only");
    return dspark_prepacked_check(a->paths[0], a->paths[1], opts, err);
}

static int run_job(const pack_args *a)
{
    dspark_model_opts opts;
    dspark_error err = {0};
    dspark_status st;
    progress bar;
    struct stat info = {0};
    dspark_model_opts_init(&opts);
    opts.parts = a->parts ? DSPARK_PART_CONTEXT | DSPARK_PART_Q_A : DSPARK_PART_BLOCK;
    opts.target = a->target;
    opts.n_threads = (uint32_t)a->n_threads;
    opts.progress = progress_update;
    opts.progress_user = &bar;
    progress_start(&bar, a->check ? "checking" : "packing", PROGRESS_BYTES);
    st = a->check ? check_file(a, &opts, &err)
                  : dspark_prepack(a->paths[0], a->paths[1], &opts, &err);
    progress_end(&bar);
    if (st != DSPARK_OK) {
        if (st != DSPARK_EOUTPUT && st != DSPARK_EINVAL && strcmp(err.where, a->paths[1]) != 0)
            out_add_checkpoint(&err, a->paths[0], a->target);
        return out_fail(st, &err);
    }
    (void)stat(a->paths[1], &info);
    return print_report(a, part_choices[!(opts.parts & DSPARK_PART_BLOCK)], (uint64_t)info.st_size);
}

/* Options that would be ignored are refused. Returns ARGS_RUN or an exit code. */
static int check_options(const args_command *command, const pack_args *a)
{
    if (a->check && a->parts_given)
        return args_complain(command, "--parts goes without --check, which takes what FILE holds");
    if (a->target && a->parts)
        return args_complain(command, "--target is for the LM head, which --parts context leaves out");
    return ARGS_RUN;
}

static int check_output(const args_command *command, const pack_args *a)
{
    const output_path output = {NULL, a->paths[1], 0};
    const char *const inputs[] = {a->paths[0], a->target};
    return outputs_check(command, &output, 1, inputs, 2);
}

int command_pack(int argc, char **argv)
{
    static const char *const operands[] = {"CKPT", "FILE", NULL};
    pack_args a;
    int code;
    const args_option options[] = {
        {"parts", ARGS_CHOICE, &a.parts, NULL,
         "all (default): what drafting needs, and context KV;\ncontext: context KV only", 0, 0,
         part_choices, &a.parts_given},
        {"target", ARGS_TEXT, &a.target, "DIR",
         "the target's checkpoint: its LM head is packed, where the\ndraft has none of its own", 0, 0, NULL, NULL},
        {"check", ARGS_FLAG, &a.check, NULL,
         "write nothing: prove that FILE, with the parts that it\nholds, is whole and made of CKPT", 0, 0, NULL, NULL},
        {"threads", ARGS_UINT, &a.n_threads, "N", "threads (default: all processors)", 1, 1024, NULL,
         NULL},
        {"json", ARGS_FLAG, &a.json, NULL, "print the report as JSON", 0, 0, NULL, NULL},
    };
    const args_command command = {
        .name = "pack",
        .synopsis = "CKPT FILE [--parts all|context] [--target DIR] [--check] [--threads N] [--json]",
        .summary = "Write the packed weights of the checkpoint CKPT to FILE. Commands that are given\n"
                   "--prepacked FILE map it instead of packing; processes share its memory.",
        .operands = operands,
        .operand_values = a.paths,
        .n_required = 2,
        .options = options,
        .n_options = sizeof options / sizeof *options,
    };
    memset(&a, 0, sizeof a);
    code = args_parse(&command, argc, argv);
    if (code != ARGS_RUN) return code;
    code = check_options(&command, &a);
    if (code == ARGS_RUN && !a.check) code = check_output(&command, &a);
    return code == ARGS_RUN ? run_job(&a) : code;
}
