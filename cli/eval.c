/* dspark eval: offline acceptance. Reads a directory of hidden-state dumps, drafts a block from every
 * anchor (or every --stride-th) and holds it against the text that follows, without any serving stack.
 * The heads go on from the text (teacher forcing), which changes nothing up to the first draft that
 * differs and gives the figures behind it. */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "args.h"
#include "commands.h"
#include "drafting.h"
#include "eval.h"
#include "out.h"
#include "outputs.h"
#include "progress.h"

#define MAX_JOBS 64
#define BATCH 8 /* anchors of one call */

typedef struct eval_args {
    drafting_args drafting;
    const char *data;
    const char *html;
    const char *resume;
    const char *calibration;
    uint64_t stride;
    uint64_t min_context;
    uint64_t jobs;
    double target_step_ms;
    int no_analytic;
    int json;
} eval_args;

typedef struct eval_run {
    const eval_args *args;
    drafting *first;       /* holds the model that all workers share */
    char **names;          /* [n] file names in the directory, sorted */
    eval_data *results;    /* [n] */
    size_t n;
    uint32_t k;
    int has_target;
    eval_journal *journal;
    dspark_sampling analytic; /* the law of the analytic figures */
    /* below the mutex */
    pthread_mutex_t mutex;
    size_t next, n_done;
    uint64_t n_resumed, n_short, n_beyond;
    eval_times times;
    int stopped;
    int code;              /* exit code of the first failure */
} eval_run;

/* One worker's buffers. */
typedef struct eval_worker {
    eval_run *run;
    drafting d;
    int own;               /* d was opened for this worker */
    int32_t *tokens;       /* [BATCH][N] */
    int32_t *forced;       /* [BATCH][K] */
    float *confidence;     /* [BATCH][N] */
    uint16_t *logits;      /* [BATCH][N][vocab], with a target */
    uint16_t *target;      /* [BATCH][K][vocab] */
    float *p, *q;          /* [vocab] */
    eval_times times;
    uint64_t n_beyond;
} eval_worker;

/* ---- the directory ---- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void free_names(eval_run *run)
{
    size_t i;
    for (i = 0; i < run->n; i++) {
        free(run->names[i]);
        if (run->results) eval_data_free(&run->results[i]);
    }
    free(run->names);
    free(run->results);
}

static int list_dumps(eval_run *run)
{
    const char *dir = run->args->data, *end = ".safetensors";
    size_t capacity = 0;
    struct dirent *entry;
    DIR *d = opendir(dir);
    if (!d) return out_error(EXIT_INPUT, "%s: %s", dir, strerror(errno));
    while ((entry = readdir(d)) != NULL) {
        size_t length = strlen(entry->d_name), tail = strlen(end);
        if (length <= tail || strcmp(entry->d_name + length - tail, end) != 0 || entry->d_name[0] == '.')
            continue;
        if (run->n == capacity) {
            char **names;
            capacity = capacity ? 2 * capacity : 64;
            names = realloc(run->names, capacity * sizeof *names);
            if (!names) break;
            run->names = names;
        }
        if (!(run->names[run->n] = strdup(entry->d_name))) break;
        run->n++;
    }
    closedir(d);
    if (entry) return out_error(EXIT_INTERNAL, "out of memory");
    if (run->n == 0) return out_error(EXIT_INPUT, "%s: expected dumps (*.safetensors), found none", dir);
    qsort(run->names, run->n, sizeof *run->names, compare_names);
    run->results = calloc(run->n, sizeof *run->results);
    return run->results ? EXIT_OK : out_error(EXIT_INTERNAL, "out of memory");
}

static int open_dump(const eval_run *run, size_t i, dump *rows, char *path, size_t size)
{
    dspark_error err = {0};
    snprintf(path, size, "%s/%s", run->args->data, run->names[i]);
    if (dump_open(rows, path, run->first->config, &err) != DSPARK_OK) return out_fail(err.code, &err);
    if (run->has_target && !rows->has_verifier) {
        dump_close(rows);
        return out_error(EXIT_INPUT, "%s: has no verifier state, as other dumps here have; --no-analytic "
                         "evaluates without it", path);
    }
    return EXIT_OK;
}

/* What the journal knows a dump by, beside its name. */
static void describe_dump(const dump *rows, char facts[128])
{
    char ids[33], first[33], last[33];
    dspark_digest(rows->ids->data, (size_t)rows->ids->n_bytes, ids);
    dspark_digest(rows->taps, rows->stride, first);
    dspark_digest(rows->taps + (size_t)(rows->n_rows - 1) * rows->stride, rows->stride, last);
    snprintf(facts, 128, "%" PRIu64 ":%.16s:%.16s:%.16s", rows->n_rows, ids, first, last);
}

/* ---- one batch of anchors ---- */

/* Probabilities of target and draft at one drafted position, and what follows from them. */
static int measure_cell(eval_worker *w, const uint16_t *target, const uint16_t *draft, int32_t token,
                        int32_t text, eval_data *d, size_t cell)
{
    const eval_run *run = w->run;
    size_t vocab = w->d.config->vocab_size, i, best = 0;
    double overlap = 0;
    dspark_error err;
    if (dspark_distribution(&run->analytic, target, DSPARK_BF16, vocab, w->p, &err) != DSPARK_OK ||
        dspark_distribution(&run->analytic, draft, DSPARK_BF16, vocab, w->q, &err) != DSPARK_OK)
        return out_fail(err.code, &err);
    for (i = 0; i < vocab; i++) {
        overlap += fmin((double)w->p[i], (double)w->q[i]);
        if (w->p[i] > w->p[best]) best = i;
    }
    d->agree[cell] = (size_t)token == best;
    d->greedy_text[cell] = (size_t)text == best;
    d->target_p[cell] = fminf(w->p[token], 1);
    d->alpha[cell] = (float)fmin(overlap, 1);
    return EXIT_OK;
}

static int measure_anchor(eval_worker *w, const dump *rows, uint64_t row, size_t at,
                          const dspark_draft_output *o, eval_data *d)
{
    const eval_run *run = w->run;
    size_t vocab = w->d.config->vocab_size, cell = d->n * run->k;
    uint32_t k, accepted = 0;
    int code = EXIT_OK;
    if (o->status != DSPARK_OK || o->n_tokens < run->k)
        return out_error(EXIT_INPUT, "%s: nothing could be drafted from row %" PRIu64 ": %s", rows->path, row,
                         dspark_status_name(o->status));
    while (accepted < run->k && o->tokens[accepted] == w->forced[at * run->k + accepted]) accepted++;
    d->depth[d->n] = row > UINT32_MAX ? UINT32_MAX : (uint32_t)row;
    d->accepted[d->n] = (uint8_t)accepted;
    for (k = 0; k < run->k; k++) d->confidence[cell + k] = o->confidence[k];
    for (k = 0; run->has_target && code == EXIT_OK && k < run->k; k++)
        code = measure_cell(w, w->target + (at * run->k + k) * vocab, o->logits + (size_t)k * vocab,
                            o->tokens[k], w->forced[at * run->k + k], d, cell + k);
    d->n++;
    w->n_beyond += o->beyond_original != 0;
    return code;
}

static int run_batch(eval_worker *w, const dump *rows, const uint64_t *anchors, size_t n, eval_data *d)
{
    const eval_run *run = w->run;
    size_t block = w->d.config->block_size, vocab = w->d.config->vocab_size, i, k;
    dspark_draft_input in[BATCH];
    dspark_draft_output out[BATCH];
    dspark_error err = {0};
    eval_times t = {0};
    double t0;
    int code = EXIT_OK;
    for (i = 0; i < n; i++) {
        drafting_input(&w->d, rows, anchors[i], &in[i]);
        for (k = 0; k < run->k; k++)
            w->forced[i * run->k + k] = (int32_t)dump_token(rows, anchors[i] + 1 + k);
        in[i].forced = w->forced + i * run->k;
        in[i].n_draft = run->k;
        dspark_draft_output_init(&out[i]);
        out[i].tokens = w->tokens + i * block;
        out[i].confidence = w->confidence + i * block;
        if (run->has_target) out[i].logits = w->logits + i * block * vocab;
    }
    t0 = out_clock();
    if (dspark_draft(w->d.drafter, &w->d.view, in, out, n, &err) != DSPARK_OK) {
        out_add_path(&err, rows->path);
        return out_fail(err.code, &err);
    }
    t.draft_seconds = out_clock() - t0;
    t.n_drafts = n;
    t.n_calls = 1;
    t.stages = dspark_drafter_times(w->d.drafter);
    eval_times_add(&w->times, &t);
    /* Row r's verifier state predicts token r + 1: the drafts of anchor r begin there. */
    for (i = 0; run->has_target && i < n; i++)
        if (dspark_head_logits(w->d.drafter, rows->taps + (size_t)anchors[i] * rows->stride + rows->row_bytes,
                               rows->stride, run->k, w->target + i * run->k * vocab, &err) != DSPARK_OK) {
            out_add_path(&err, rows->path);
            return out_fail(err.code, &err);
        }
    for (i = 0; code == EXIT_OK && i < n; i++) code = measure_anchor(w, rows, anchors[i], i, &out[i], d);
    return code;
}

/* ---- one dump ---- */

static int run_anchors(eval_worker *w, dump *rows, eval_data *d)
{
    const eval_run *run = w->run;
    uint64_t row = run->args->min_context, last = rows->n_rows - 1 - run->k;
    uint64_t anchors[BATCH];
    dspark_error err = {0};
    size_t n = 0;
    int code = EXIT_OK;
    eval_times t = {0};
    w->d.context_seconds = 0;
    if (drafting_load(&w->d, rows, NULL, &err) != DSPARK_OK) {
        if (err.code == DSPARK_ECANCELLED) return EXIT_CANCELLED;
        if (err.code != DSPARK_ENONFINITE) out_add_path(&err, rows->path); /* it may be the checkpoint's fault */
        return out_fail(err.code, &err);
    }
    t.context_seconds = w->d.context_seconds;
    t.context_rows = rows->n_rows;
    eval_times_add(&w->times, &t);
    if (eval_data_reserve(d, (size_t)((last - row) / run->args->stride + 1)) != 0)
        return out_error(EXIT_INTERNAL, "out of memory");
    while (code == EXIT_OK && row <= last) {
        anchors[n++] = row;
        row += run->args->stride;
        if (n < BATCH && row <= last) continue;
        code = out_interrupted() ? EXIT_CANCELLED : run_batch(w, rows, anchors, n, d);
        n = 0;
    }
    /* Again after the verifier's states have been read. */
    if (code == EXIT_OK && dump_check_unchanged(rows, &err) != DSPARK_OK) code = out_fail(err.code, &err);
    return code;
}

static int run_dump(eval_worker *w, size_t i)
{
    eval_run *run = w->run;
    eval_data *d = &run->results[i];
    char path[4096], facts[128];
    dump rows;
    int found, code = open_dump(run, i, &rows, path, sizeof path);
    if (code != EXIT_OK) return code;
    eval_data_init(d, run->k, run->has_target);
    if (rows.n_rows < run->args->min_context + 1 + run->k) {
        pthread_mutex_lock(&run->mutex);
        run->n_short++;
        pthread_mutex_unlock(&run->mutex);
        dump_close(&rows);
        return EXIT_OK;
    }
    describe_dump(&rows, facts);
    found = run->journal ? eval_journal_find(run->journal, run->names[i], facts, d) : 0;
    if (found < 0) code = out_error(EXIT_INTERNAL, "out of memory");
    if (found == 0) code = run_anchors(w, &rows, d);
    dump_close(&rows);
    pthread_mutex_lock(&run->mutex);
    if (found > 0) run->n_resumed++;
    if (found == 0 && code == EXIT_OK && run->journal)
        code = eval_journal_add(run->journal, run->names[i], facts, d);
    pthread_mutex_unlock(&run->mutex);
    return code;
}

/* ---- workers ---- */

static void *work(void *arg)
{
    eval_worker *w = arg;
    eval_run *run = w->run;
    for (;;) {
        size_t i;
        int code;
        pthread_mutex_lock(&run->mutex);
        i = run->stopped ? run->n : run->next++;
        pthread_mutex_unlock(&run->mutex);
        if (i >= run->n) break;
        code = run_dump(w, i);
        pthread_mutex_lock(&run->mutex);
        run->n_done++;
        if (code != EXIT_OK) {
            if (!run->stopped) run->code = code;
            run->stopped = 1;
        }
        pthread_mutex_unlock(&run->mutex);
    }
    pthread_mutex_lock(&run->mutex);
    eval_times_add(&run->times, &w->times);
    run->n_beyond += w->n_beyond;
    pthread_mutex_unlock(&run->mutex);
    return NULL;
}

static void close_worker(eval_worker *w)
{
    free(w->tokens);
    free(w->forced);
    free(w->confidence);
    free(w->logits);
    free(w->target);
    free(w->p);
    free(w->q);
    if (w->own) drafting_close(&w->d);
}

static int open_worker(eval_worker *w, eval_run *run, uint32_t n_threads)
{
    size_t block = run->first->config->block_size, vocab = run->first->config->vocab_size;
    dspark_error err = {0};
    dspark_status st;
    w->run = run;
    st = drafting_open(&w->d, &run->args->drafting, run->first, n_threads, BATCH, &err);
    if (st != DSPARK_OK) return out_fail(st, &err);
    w->own = 1;
    w->tokens = calloc(BATCH * block, sizeof *w->tokens);
    w->forced = calloc(BATCH * block, sizeof *w->forced);
    w->confidence = calloc(BATCH * block, sizeof *w->confidence);
    if (!w->tokens || !w->forced || !w->confidence) return out_error(EXIT_INTERNAL, "out of memory");
    if (!run->has_target) return EXIT_OK;
    w->logits = calloc(BATCH * block * vocab, sizeof *w->logits);
    w->target = calloc(BATCH * block * vocab, sizeof *w->target);
    w->p = calloc(vocab, sizeof *w->p);
    w->q = calloc(vocab, sizeof *w->q);
    if (!w->logits || !w->target || !w->p || !w->q)
        return out_error(EXIT_INTERNAL, "out of memory");
    return EXIT_OK;
}

/* The main thread only watches, so the bar moves whatever the workers do. */
static void watch(eval_run *run)
{
    const struct timespec pause = {0, 50 * 1000 * 1000};
    progress bar;
    progress_start(&bar, "evaluating", PROGRESS_STEPS);
    for (;;) {
        size_t done;
        int over;
        pthread_mutex_lock(&run->mutex);
        done = run->n_done;
        over = run->n_done == run->n || (run->stopped && run->n_done == (run->next < run->n ? run->next
                                                                                           : run->n));
        pthread_mutex_unlock(&run->mutex);
        if (progress_update(&bar, done, run->n) && !over) {
            pthread_mutex_lock(&run->mutex);
            if (!run->stopped) run->code = EXIT_CANCELLED;
            run->stopped = 1;
            pthread_mutex_unlock(&run->mutex);
        }
        if (over) break;
        nanosleep(&pause, NULL);
    }
    progress_end(&bar);
}

/* What a drafter takes when it may take all. */
static int count_threads(const eval_run *run, uint64_t *n)
{
    drafting one;
    dspark_error err = {0};
    dspark_status st = drafting_open(&one, &run->args->drafting, run->first, 0, 1, &err);
    if (st != DSPARK_OK) return out_fail(st, &err);
    *n = dspark_drafter_get_plan(one.drafter).n_threads;
    drafting_close(&one);
    return EXIT_OK;
}

static int run_all(eval_run *run)
{
    size_t jobs = (size_t)run->args->jobs, n_open = 0, n_started = 0, i;
    uint64_t threads = run->args->drafting.n_threads;
    eval_worker *workers;
    pthread_t ids[MAX_JOBS];
    int code = EXIT_OK;
    if (jobs > run->n) jobs = run->n;
    if (threads == 0 && jobs > 1 && (code = count_threads(run, &threads)) != EXIT_OK) return code;
    workers = calloc(jobs, sizeof *workers);
    if (!workers) return out_error(EXIT_INTERNAL, "out of memory");
    while (code == EXIT_OK && n_open < jobs)
        code = open_worker(&workers[n_open++], run, (uint32_t)(threads / jobs || jobs == 1 ? threads / jobs : 1));
    while (code == EXIT_OK && n_started < jobs) {
        if (pthread_create(&ids[n_started], NULL, work, &workers[n_started]) != 0) break;
        n_started++;
    }
    if (code == EXIT_OK && n_started == 0) code = out_error(EXIT_INTERNAL, "no thread could be started");
    if (n_started) watch(run);
    for (i = 0; i < n_started; i++) pthread_join(ids[i], NULL);
    for (i = 0; i < n_open; i++) close_worker(&workers[i]);
    free(workers);
    return code == EXIT_OK ? run->code : code;
}

/* ---- the report ---- */

static void make_key(const eval_run *run, eval_key *key)
{
    const drafting_args *a = &run->args->drafting;
    snprintf(key->text, sizeof key->text,
             "k=%u target=%d stride=%" PRIu64 " min_context=%" PRIu64 " cache=%s window=%" PRIu64
             " temperature=%.9g top_k=%" PRIu64 " top_p=%.9g min_p=%.9g seed=%" PRIu64
             " tile_scale=%d model=%s/%s version=%s",
             run->k, run->has_target, run->args->stride, run->args->min_context,
             args_cache_choices[a->cache_dtype], a->window, a->temperature, a->top_k, a->top_p, a->min_p, a->seed,
             a->tile_scale,
             dspark_model_fingerprint(run->first->model), dspark_model_block_fingerprint(run->first->model),
             dspark_version());
}

static int write_calibration(const eval_figures *f, const char *path)
{
    dspark_calibration c = {f->k, {0}};
    dspark_error err = {0};
    if (!f->has_confidence)
        return out_error(EXIT_CHECK_FAILED, "--calibration-out: this drafter has no confidence head");
    memcpy(c.temperatures, f->temperatures, sizeof c.temperatures);
    if (dspark_calibration_save(&c, path, &err) == DSPARK_OK) return EXIT_OK;
    return out_fail(err.code, &err);
}

static int show(eval_run *run, const eval_data *all, double seconds)
{
    const eval_args *a = run->args;
    eval_figures figures;
    eval_report r = {0};
    int code;
    if (eval_measure(&figures, all) != 0) return out_error(EXIT_INTERNAL, "out of memory");
    figures.n_dumps = run->n - run->n_short;
    r.checkpoint = a->drafting.checkpoint;
    r.target = a->drafting.target;
    r.data = a->data;
    r.fingerprint = dspark_model_fingerprint(run->first->model);
    r.config = run->first->config;
    r.figures = &figures;
    r.times = &run->times;
    r.stride = a->stride;
    r.n_resumed = run->n_resumed;
    r.n_skipped_short = run->n_short;
    r.n_beyond = run->n_beyond;
    r.temperature = (double)run->analytic.temperature;
    r.target_step = a->target_step_ms * 1e-3;
    r.seconds = seconds;
    r.jobs = (uint32_t)a->jobs;
    r.sampled = a->drafting.sampled;
    code = a->html ? eval_write_html(&r, a->html) : EXIT_OK;
    if (code == EXIT_OK && a->calibration) code = write_calibration(&figures, a->calibration);
    if (code == EXIT_OK) code = a->json ? eval_print_json(&r) : eval_print_text(&r);
    eval_figures_free(&figures);
    return code;
}

static int collect_and_show(eval_run *run, double seconds)
{
    eval_data all;
    size_t i;
    int code = EXIT_OK;
    eval_data_init(&all, run->k, run->has_target);
    for (i = 0; code == EXIT_OK && i < run->n; i++)
        if (run->results[i].n && eval_data_append(&all, &run->results[i]) != 0)
            code = out_error(EXIT_INTERNAL, "out of memory");
    if (code == EXIT_OK && all.n == 0)
        code = out_error(EXIT_CHECK_FAILED, "nothing drafted: none of %zu dumps has the %" PRIu64
                         " rows that one anchor needs", run->n, run->args->min_context + 1 + run->k);
    if (code == EXIT_OK) code = show(run, &all, seconds);
    eval_data_free(&all);
    return code;
}

static int run_job(const eval_args *a)
{
    drafting first;
    eval_run run;
    eval_key key;
    dspark_error err = {0};
    dspark_status st;
    double t0 = out_clock();
    int code;
    memset(&run, 0, sizeof run);
    run.args = a;
    run.first = &first;
    pthread_mutex_init(&run.mutex, NULL);
    st = drafting_open(&first, &a->drafting, NULL, 0, 0, &err);
    code = st == DSPARK_OK ? list_dumps(&run) : out_fail(st, &err);
    if (code == EXIT_OK) {
        char path[4096];
        dump rows;
        run.k = a->drafting.n_draft ? (uint32_t)a->drafting.n_draft : first.config->block_size;
        run.analytic = first.sampling;
        if (!a->drafting.sampled) run.analytic.temperature = 1;
        code = run.k > 255 ? out_error(EXIT_UNSUPPORTED, "blocks of more than 255 tokens") : EXIT_OK;
        if (code == EXIT_OK) code = open_dump(&run, 0, &rows, path, sizeof path);
        if (code == EXIT_OK) {
            run.has_target = rows.has_verifier && !a->no_analytic;
            dump_close(&rows);
        }
    }
    if (code == EXIT_OK && a->resume) {
        make_key(&run, &key);
        code = eval_journal_open(&run.journal, a->resume, &key);
    }
    if (code == EXIT_OK) code = run_all(&run);
    if (code == EXIT_OK) code = collect_and_show(&run, out_clock() - t0);
    if (code == EXIT_CANCELLED) {
        fprintf(stderr, "dspark: cancelled%s\n", a->resume ? "; the same command goes on from here" : "");
    }
    eval_journal_close(run.journal);
    free_names(&run);
    pthread_mutex_destroy(&run.mutex);
    drafting_close(&first);
    return code;
}

static int check_outputs(const args_command *command, const eval_args *a)
{
    const output_path outputs[] = {{"--html", a->html, 1},
                                   {"--calibration-out", a->calibration, 1},
                                   {"--resume", a->resume, 0}};
    const char *const inputs[] = {a->drafting.checkpoint, a->drafting.target, a->data,
                                  a->drafting.prepacked};
    return outputs_check(command, outputs, 3, inputs, 4);
}

int command_eval(int argc, char **argv)
{
    eval_args a;
    int code;
    static const char *const operands[] = {"CKPT", NULL};
    args_option options[DRAFTING_OPTIONS + 10] = {
        {"data", ARGS_TEXT, &a.data, "DIR", "directory of hidden-state dumps (*.safetensors)", 0, 0, NULL,
         NULL},
        {"stride", ARGS_UINT, &a.stride, "N", "draft from every Nth position (default 1: all)", 1, 1u << 30,
         NULL, NULL},
        {"min-context", ARGS_UINT, &a.min_context, "N", "context of the first anchor (default 1)", 0,
         INT32_MAX, NULL, NULL},
        {"jobs", ARGS_UINT, &a.jobs, "N", "dumps at a time; they share the threads (default 1)", 1, MAX_JOBS,
         NULL, NULL},
        {"resume", ARGS_TEXT, &a.resume, "FILE",
         "keep finished dumps in FILE; the same command again\ngoes on from there", 0, 0, NULL, NULL},
        {"html", ARGS_TEXT, &a.html, "FILE", "write the report with its drawings to FILE", 0, 0, NULL, NULL},
        {"calibration-out", ARGS_TEXT, &a.calibration, "FILE",
         "write the fitted temperatures of the confidence to FILE,\nwhose name must end in .json", 0, 0, NULL, NULL},
        {"target-step-ms", ARGS_NUMBER, &a.target_step_ms, "MS",
         "time of one target step, for the break-even", 0, 0, NULL, NULL},
        {"no-analytic", ARGS_FLAG, &a.no_analytic, NULL,
         "leave out what needs the verifier's state and the\ntarget's head (faster)", 0, 0, NULL, NULL},
        {"json", ARGS_FLAG, &a.json, NULL, "print the report as JSON", 0, 0, NULL, NULL},
    };
    args_command command = {
        .name = "eval",
        .synopsis = "CKPT --data DIR --target DIR [OPTIONS]",
        .summary = "Measure offline how many drafts the target accepts: by position, by depth of the\n"
                   "context, with the calibration of the confidence. Needs dumps only, no server.\n"
                   "Figures do not depend on --threads, --isa, --jobs and --resume.",
        .operands = operands,
        .operand_values = &a.drafting.checkpoint,
        .n_required = 1,
        .options = options,
        .n_options = sizeof options / sizeof *options,
    };
    memset(&a, 0, sizeof a);
    drafting_defaults(&a.drafting);
    a.stride = a.min_context = a.jobs = 1;
    drafting_options(options + 10, &a.drafting);
    code = args_parse(&command, argc, argv);
    if (code == ARGS_RUN) code = drafting_check(&command, &a.drafting);
    if (code == ARGS_RUN && !a.data) code = args_complain(&command, "--data DIR is missing");
    if (code == ARGS_RUN) code = check_outputs(&command, &a);
    return code == ARGS_RUN ? run_job(&a) : code;
}
