/* dspark draft: a hidden-state dump in, drafted blocks out. The context is the dump's positions below
 * an anchor; the anchor is the dump's token at that position. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "drafting.h"
#include "out.h"
#include "progress.h"

typedef struct draft_args {
    drafting_args drafting;
    const char *taps;
    args_texts anchors;
    int json;
} draft_args;

typedef struct draft_job {
    const draft_args *args;
    drafting d;
    dump rows;
    uint64_t *anchors; /* rows of the dump */
    size_t n;
    dspark_draft_output *outputs; /* [n]; tokens and confidences lie in the two arrays below */
    int32_t *tokens;              /* [n][N] */
    float *confidence;            /* [n][N] */
    int32_t *anchor_tokens;
} draft_job;

/* Positions from the command line to rows of the dump. */
static dspark_status read_anchors(draft_job *job, dspark_error *err)
{
    const args_texts *texts = &job->args->anchors;
    uint64_t first = 0, last, position;
    size_t i;
    dspark_status st = dump_start(&job->rows, 0, 0, &first, err);
    if (st != DSPARK_OK) return st;
    last = first + job->rows.n_rows - 1;
    job->n = texts->n ? texts->n : 1;
    job->anchors = calloc(job->n, sizeof *job->anchors);
    if (!job->anchors) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory");
    job->anchors[0] = job->rows.n_rows - 1;
    for (i = 0; i < texts->n; i++) {
        if (!args_read_uint(texts->items[i], strlen(texts->items[i]), &position) || position < first ||
            position > last)
            return out_set_error(err, DSPARK_EINVAL, "--anchor-position", "'%s' is not allowed; the "
                                 "dump has positions %" PRIu64 " to %" PRIu64, texts->items[i], first,
                                 last);
        job->anchors[i] = position - first;
    }
    return DSPARK_OK;
}

static dspark_status make_outputs(draft_job *job, dspark_error *err)
{
    size_t block = job->d.config->block_size, i;
    job->outputs = calloc(job->n, sizeof *job->outputs);
    job->tokens = calloc(job->n * block, sizeof *job->tokens);
    job->confidence = calloc(job->n * block, sizeof *job->confidence);
    if (!job->outputs || !job->tokens || !job->confidence)
        return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for %zu drafts", job->n);
    for (i = 0; i < job->n; i++) {
        dspark_draft_output_init(&job->outputs[i]);
        job->outputs[i].tokens = job->tokens + i * block;
        job->outputs[i].confidence = job->confidence + i * block;
    }
    return DSPARK_OK;
}

static dspark_status run_drafts(draft_job *job, dspark_error *err)
{
    dspark_draft_input in[8];
    size_t i, k, n;
    dspark_status st = DSPARK_OK;
    progress bar;
    progress_start(&bar, "drafting", PROGRESS_STEPS);
    for (i = 0; st == DSPARK_OK && i < job->n; i += n) {
        n = job->n - i < job->d.batch ? job->n - i : job->d.batch;
        for (k = 0; k < n; k++) drafting_input(&job->d, &job->rows, job->anchors[i + k], &in[k]);
        st = dspark_draft(job->d.drafter, &job->d.view, in, job->outputs + i, n, err);
        if (st == DSPARK_OK && progress_update(&bar, i + n, job->n)) st = out_check_interrupt(err);
    }
    progress_end(&bar);
    return st;
}

/* A draft that could not be made: its status, never tokens. */
static size_t count_failures(const draft_job *job)
{
    size_t i, n = 0;
    for (i = 0; i < job->n; i++)
        if (job->outputs[i].status != DSPARK_OK || job->outputs[i].n_tokens == 0) n++;
    return n;
}

static int print_json(const draft_job *job)
{
    json_t *doc = json_object(), *drafts = json_array();
    size_t i;
    uint32_t k;
    for (i = 0; i < job->n; i++) {
        const dspark_draft_output *o = &job->outputs[i];
        json_t *draft = json_object(), *tokens = json_array(), *confidence = json_array();
        out_set(draft, "anchor_position", json_integer((json_int_t)(job->d.start + job->anchors[i])));
        out_set(draft, "anchor", json_integer(dump_token(&job->rows, job->anchors[i])));
        for (k = 0; k < o->n_tokens; k++) {
            out_append(tokens, json_integer(o->tokens[k]));
            out_append(confidence, out_real((double)o->confidence[k]));
        }
        out_set(draft, "tokens", tokens);
        out_set(draft, "confidence", confidence);
        if (o->status != DSPARK_OK) out_set(draft, "error", json_string(dspark_status_name(o->status)));
        if (o->beyond_original) out_set(draft, "beyond_trained_window", json_true());
        out_append(drafts, draft);
    }
    out_set(doc, "drafts", drafts);
    return out_json(doc);
}

static int print_text(const draft_job *job)
{
    size_t i;
    uint32_t k;
    out_table t;
    out_table_init(&t, "rrll");
    out_table_cell(&t, "position");
    out_table_cell(&t, "anchor");
    out_table_cell(&t, "tokens");
    out_table_cell(&t, "confidence");
    for (i = 0; i < job->n; i++) {
        const dspark_draft_output *o = &job->outputs[i];
        char tokens[1024] = "", confidence[1024] = "";
        size_t a = 0, b = 0;
        for (k = 0; k < o->n_tokens; k++) {
            if (a < sizeof tokens - 16)
                a += (size_t)snprintf(tokens + a, sizeof tokens - a, "%s%" PRId32, k ? " " : "",
                                      o->tokens[k]);
            if (b < sizeof confidence - 16)
                b += (size_t)snprintf(confidence + b, sizeof confidence - b, "%s%.3f", k ? " " : "",
                                      (double)o->confidence[k]);
        }
        out_table_cell(&t, "%" PRIu64, job->d.start + job->anchors[i]);
        out_table_cell(&t, "%" PRId64, dump_token(&job->rows, job->anchors[i]));
        if (o->status != DSPARK_OK)
            out_table_cell(&t, "none: %s", dspark_status_name(o->status));
        else
            out_table_cell(&t, "%s", tokens);
        out_table_cell(&t, "%s", confidence);
    }
    if (out_table_print(&t, 0) != 0) return out_error(EXIT_INTERNAL, "out of memory");
    for (i = 0; i < job->n; i++)
        if (job->outputs[i].beyond_original) {
            printf("note: position %" PRIu64 " and what follows lies outside the trained window of "
                   "%" PRIu64 " positions\n", job->d.start + job->anchors[i],
                   job->d.config->rope_original_max_positions);
            break;
        }
    return EXIT_OK;
}

static int run_job(const draft_args *a)
{
    draft_job job;
    dspark_error err = {0};
    dspark_status st;
    size_t failed;
    int code;
    memset(&job, 0, sizeof job);
    job.args = a;
    st = drafting_open(&job.d, &a->drafting, NULL, (uint32_t)a->drafting.n_threads, 8, &err);
    if (st == DSPARK_OK) st = dump_open(&job.rows, a->taps, job.d.config, &err);
    if (st == DSPARK_OK) st = read_anchors(&job, &err);
    if (st == DSPARK_OK) st = make_outputs(&job, &err);
    if (st == DSPARK_OK) st = drafting_load(&job.d, &job.rows, "context", &err);
    if (st == DSPARK_OK) st = run_drafts(&job, &err);
    if (st == DSPARK_OK) {
        failed = count_failures(&job);
        code = a->json ? print_json(&job) : print_text(&job);
        if (code == EXIT_OK && failed == job.n)
            code = out_error(EXIT_CHECK_FAILED, "nothing was drafted: %s",
                             dspark_status_name(job.outputs[0].status));
        else if (code == EXIT_OK && failed)
            code = out_error(EXIT_CHECK_FAILED, "%zu of %zu drafts could not be made", failed, job.n);
    } else {
        code = out_fail(st, &err);
    }
    free(job.anchors);
    free(job.outputs);
    free(job.tokens);
    free(job.confidence);
    dump_close(&job.rows);
    drafting_close(&job.d);
    return code;
}

/* Where the dump begins and ends is known later. Returns ARGS_RUN or an exit code. */
static int check_anchors(const args_command *command, const args_texts *anchors)
{
    uint64_t position;
    size_t i;
    for (i = 0; i < anchors->n; i++)
        if (!args_read_uint(anchors->items[i], strlen(anchors->items[i]), &position))
            return args_complain(command, "--anchor-position: '%s' is not allowed; expected a whole number",
                                 anchors->items[i]);
    return ARGS_RUN;
}

int command_draft(int argc, char **argv)
{
    draft_args a;
    int code;
    static const char *const operands[] = {"CKPT", NULL};
    args_option options[DRAFTING_OPTIONS + 3] = {
        {"taps", ARGS_TEXT, &a.taps, "FILE", "hidden-state dump to read (safetensors)", 0, 0, NULL, NULL},
        {"anchor-position", ARGS_TEXTS, &a.anchors, "S",
         "draft from the token at position S over all before it;\nmay be given many times (default: the "
         "last position)", 0, 0, NULL, NULL},
        {"json", ARGS_FLAG, &a.json, NULL, "print the drafts as JSON", 0, 0, NULL, NULL},
    };
    args_command command = {
        .name = "draft",
        .synopsis = "CKPT --taps FILE --target DIR [--anchor-position S]... [OPTIONS]",
        .summary = "Draft a block of tokens from a hidden-state dump: token ids and the confidence of\n"
                   "each. Greedy unless --temperature is given. Results do not depend on --threads\n"
                   "and --isa, nor on which other anchors are asked for.",
        .operands = operands,
        .operand_values = &a.drafting.checkpoint,
        .n_required = 1,
        .options = options,
        .n_options = sizeof options / sizeof *options,
    };
    memset(&a, 0, sizeof a);
    drafting_defaults(&a.drafting);
    drafting_options(options + 3, &a.drafting);
    code = args_parse(&command, argc, argv);
    if (code == ARGS_RUN) code = drafting_check(&command, &a.drafting);
    if (code == ARGS_RUN) code = check_anchors(&command, &a.anchors);
    if (code == ARGS_RUN && !a.taps) code = args_complain(&command, "--taps FILE is missing");
    if (code == ARGS_RUN) code = run_job(&a);
    args_texts_free(&a.anchors);
    return code;
}
