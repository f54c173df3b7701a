/* Text by speculative decoding: a small llama-style target (tiny_llama.h), libdspark as its drafter.
 * Everything an engine has to do with the library is in `speculate` below.
 *
 * Writes the text from a prompt, then the target's own greedy text again without drafting, and says
 * whether the two are equal byte for byte, how many drafts were accepted, and how fast both were.
 *   generate [--target DIR] [--draft DIR] [--prompt TEXT] [--bytes N] [--colour always|never] [--dump FILE]
 *
 * Accepted drafts are coloured on a terminal; what is plain was written by the target. --dump keeps the
 * text with its hidden states in the form that `dspark draft` and `dspark eval` read. */
#include "tiny_llama.h"

#include <errno.h>
#include <limits.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_BLOCK 32

typedef struct settings {
    const char *target, *draft, *prompt, *dump;
    int n_bytes;
    int colour;
} settings;

typedef struct run {
    const settings *set;
    llama target;
    dspark_model *model;
    dspark_drafter *drafter;
    dspark_pool *pool;
    const dspark_config *config;
    int32_t *text;          /* prompt and what was written */
    unsigned char *drafted; /* 1: an accepted draft */
    int n_prompt, n_text, capacity;
    uint16_t *taps;         /* [rows of a call][T * dim] */
    float *logits;          /* [rows of a call][vocab] */
    dspark_acceptance acceptance;
    double seconds;
} run;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int fail(const dspark_error *err)
{
    fprintf(stderr, "generate: %s: %s: %s\n", dspark_status_name(err->code), err->where, err->message);
    return -1;
}

/* Show what was written since `shown`. */
static void show(const run *r, int shown)
{
    int i;
    for (i = shown; i < r->n_text; i++) {
        int colour = r->set->colour && r->drafted[i];
        if (colour && (i == shown || !r->drafted[i - 1])) fputs("\x1b[32m", stdout);
        putchar(r->text[i] == '\n' || (r->text[i] >= 32 && r->text[i] < 127) ? (int)r->text[i] : '?');
        if (colour && (i + 1 == r->n_text || !r->drafted[i + 1])) fputs("\x1b[0m", stdout);
    }
    fflush(stdout);
}

static void emit(run *r, int32_t token, int drafted)
{
    if (r->n_text == r->capacity) return;
    r->drafted[r->n_text] = (unsigned char)drafted;
    r->text[r->n_text++] = token;
}

/* ---- the target alone: one token a step ---- */

/* Run the prompt through the target in pieces; every new position goes to `s`, when there is one. The
 * logits of the last position are left in r->logits. */
static int prefill(run *r, dspark_session *s)
{
    dspark_error err;
    const size_t width = (size_t)r->config->n_taps * r->config->tap_width;
    int at, n;
    for (at = 0; at < r->n_prompt; at += n) {
        n = r->n_prompt - at < r->target.max_rows ? r->n_prompt - at : r->target.max_rows;
        llama_run(&r->target, r->text + at, n, at, r->logits, r->config->tap_layers,
                  (int)r->config->n_taps, r->taps);
        if (s && dspark_session_append(s, r->drafter, (uint64_t)at, r->taps, width, 0, (size_t)n, &err) !=
                     DSPARK_OK)
            return fail(&err);
        memmove(r->logits, r->logits + (size_t)(n - 1) * (size_t)r->target.vocab,
                sizeof(float) * (size_t)r->target.vocab);
    }
    return 0;
}

static int write_alone(run *r)
{
    double t0;
    if (prefill(r, NULL) != 0) return -1;
    emit(r, llama_argmax(r->logits, r->target.vocab), 0);
    t0 = now();
    while (r->n_text < r->capacity) {
        llama_run(&r->target, r->text + r->n_text - 1, 1, r->n_text - 1, r->logits, NULL, 0, NULL);
        emit(r, llama_argmax(r->logits, r->target.vocab), 0);
    }
    r->seconds = now() - t0;
    return 0;
}

/* ---- with the drafter: a block a step ---- */

static int speculate(run *r, dspark_session *s)
{
    const size_t width = (size_t)r->config->n_taps * r->config->tap_width;
    const int n_block = (int)r->config->block_size, vocab = r->target.vocab;
    int32_t tokens[MAX_BLOCK + 1], best[MAX_BLOCK + 1];
    dspark_draft_input in;
    dspark_draft_output out;
    dspark_verdict_tokens verdict;
    dspark_error err;
    double t0;
    int i, shown = r->n_prompt;

    if (prefill(r, s) != 0) return -1;
    emit(r, llama_argmax(r->logits, vocab), 0);
    t0 = now();
    while (r->n_text < r->capacity) {
        /* The anchor: the target's last token, which it has not run yet. */
        const int position = r->n_text - 1;
        dspark_draft_input_init(&in);
        dspark_draft_output_init(&out);
        in.anchor = tokens[0] = r->text[position];
        in.n_draft = (uint32_t)(r->capacity - r->n_text < n_block ? r->capacity - r->n_text : n_block);
        out.tokens = tokens + 1;
        if (dspark_session_draft(s, r->drafter, &in, &out, &err) != DSPARK_OK) return fail(&err);
        if (out.status != DSPARK_OK) {
            fprintf(stderr, "generate: nothing drafted: %s\n", dspark_status_name(out.status));
            return -1;
        }

        /* Anchor and drafts through the target at once: row i says what follows token i. */
        llama_run(&r->target, tokens, 1 + (int)out.n_tokens, position, r->logits, r->config->tap_layers,
                  (int)r->config->n_taps, r->taps);
        for (i = 0; i <= (int)out.n_tokens; i++) best[i] = llama_argmax(r->logits + i * vocab, vocab);
        if (dspark_verify_greedy(tokens + 1, out.n_tokens, best, (size_t)vocab, &verdict, &err) != DSPARK_OK)
            return fail(&err);

        /* The drafter learns all rows, then forgets those behind the accepted ones. */
        if (dspark_session_append(s, r->drafter, (uint64_t)position, r->taps, width, 0, 1 + out.n_tokens,
                                  &err) != DSPARK_OK ||
            dspark_session_accept(s, verdict.n_accepted, &err) != DSPARK_OK)
            return fail(&err);
        for (i = 0; i < (int)verdict.n_accepted; i++) emit(r, tokens[1 + i], 1);
        emit(r, verdict.next, 0);
        show(r, shown);
        shown = r->n_text;
    }
    r->seconds = now() - t0;
    dspark_session_acceptance(s, &r->acceptance);
    return 0;
}

/* ---- a dump of the text: token_ids [n], hidden_states [n, T + 1, dim] (taps, then the final state) ---- */

static int write_rows(run *r, dspark_writer *w, dspark_error *err)
{
    const size_t dim = (size_t)r->target.dim, taps = r->config->n_taps;
    uint16_t *row = malloc((taps + 1) * dim * sizeof *row);
    int at, n, i, ok = row != NULL;
    size_t d;
    for (at = 0; ok && at < r->n_text; at += n) {
        n = r->n_text - at < r->target.max_rows ? r->n_text - at : r->target.max_rows;
        llama_run(&r->target, r->text + at, n, at, r->logits, r->config->tap_layers, (int)taps, r->taps);
        for (i = 0; ok && i < n; i++) {
            memcpy(row, r->taps + (size_t)i * taps * dim, taps * dim * sizeof *row);
            for (d = 0; d < dim; d++) row[taps * dim + d] = llama_to_bf16(r->target.a[(size_t)i * dim + d]);
            ok = dspark_writer_data(w, row, (taps + 1) * dim * sizeof *row, err) == DSPARK_OK;
        }
    }
    free(row);
    return ok ? 0 : -1;
}

/* Does the dump lie in `folder`? Its files are read. */
static int lies_in(const char *dump, const char *folder)
{
    char parent[PATH_MAX];
    struct stat a, b;
    const char *slash = strrchr(dump, '/');
    snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - dump + 1) : 1, slash ? dump : ".");
    return stat(parent, &a) == 0 && stat(folder, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Before the text is made: can there be a dump? */
static int try_dump(const settings *set)
{
    dspark_writer *w;
    dspark_error err;
    struct stat info;
    const char *why = NULL;
    if (lies_in(set->dump, set->target) || lies_in(set->dump, set->draft))
        why = "lies among the files of a model";
    else if (stat(set->dump, &info) == 0 && !S_ISREG(info.st_mode))
        why = "exists and is no file";
    if (why) {
        fprintf(stderr, "generate: --dump: %s %s\n", set->dump, why);
        return -1;
    }
    if (dspark_writer_create(&w, set->dump, &err) != DSPARK_OK) return fail(&err);
    dspark_writer_abort(w);
    return 0;
}

static int write_dump(run *r)
{
    const uint64_t shape[3] = {(uint64_t)r->n_text, r->config->n_taps + 1u, (uint64_t)r->target.dim};
    dspark_writer *w = NULL;
    dspark_error err = {DSPARK_ENOMEM, "", "out of memory"};
    int i, ok;
    ok = dspark_writer_create(&w, r->set->dump, &err) == DSPARK_OK &&
         dspark_writer_declare(w, "token_ids", DSPARK_I64, 1, shape, &err) == DSPARK_OK &&
         dspark_writer_declare(w, "hidden_states", DSPARK_BF16, 3, shape, &err) == DSPARK_OK;
    for (i = 0; ok && i < r->n_text; i++) {
        int64_t id = r->text[i];
        ok = dspark_writer_data(w, &id, sizeof id, &err) == DSPARK_OK;
    }
    ok = ok && write_rows(r, w, &err) == 0;
    if (ok) return dspark_writer_commit(w, &err) == DSPARK_OK ? 0 : fail(&err);
    dspark_writer_abort(w);
    return fail(&err);
}

/* ---- around it ---- */

static int open_drafter(run *r)
{
    dspark_model_opts model;
    dspark_drafter_opts drafter;
    dspark_pool_opts pool;
    dspark_error err;
    dspark_model_opts_init(&model);
    model.parts = DSPARK_PART_BLOCK;
    model.target = r->set->target; /* embedding and LM head are the target's */
    if (dspark_model_open(&r->model, r->set->draft, &model, &err) != DSPARK_OK) return fail(&err);
    r->config = dspark_model_config(r->model);
    dspark_drafter_opts_init(&drafter);
    drafter.n_threads = 1; /* the models are tiny: waking a thread costs more than it brings */
    if (dspark_drafter_create(&r->drafter, r->model, &drafter, &err) != DSPARK_OK) return fail(&err);
    dspark_pool_opts_init(&pool);
    pool.max_length = (uint64_t)r->target.max_positions;
    if (dspark_pool_create(&r->pool, r->model, &pool, &err) != DSPARK_OK) return fail(&err);
    if ((int)r->config->block_size > MAX_BLOCK || r->config->tap_width != (uint32_t)r->target.dim) {
        fprintf(stderr, "generate: this drafter does not fit this target\n");
        return -1;
    }
    return 0;
}

static int make_buffers(run *r)
{
    size_t rows = (size_t)r->target.max_rows, i, n = strlen(r->set->prompt);
    r->n_prompt = r->n_text = (int)n;
    r->capacity = r->n_prompt + r->set->n_bytes;
    if (n == 0 || r->capacity > r->target.max_positions) {
        fprintf(stderr, "generate: prompt and text together must have 1 to %d bytes\n",
                r->target.max_positions);
        return -1;
    }
    r->text = malloc(sizeof *r->text * (size_t)r->capacity);
    r->drafted = calloc((size_t)r->capacity, 1);
    r->taps = malloc(rows * r->config->n_taps * r->config->tap_width * sizeof *r->taps);
    r->logits = malloc(rows * (size_t)r->target.vocab * sizeof *r->logits);
    if (!r->text || !r->drafted || !r->taps || !r->logits) {
        fprintf(stderr, "generate: out of memory\n");
        return -1;
    }
    for (i = 0; i < n; i++) r->text[i] = (unsigned char)r->set->prompt[i] % r->target.vocab;
    return 0;
}

static int report(const run *r, const int32_t *spoken, double alone)
{
    const dspark_acceptance *a = &r->acceptance;
    int equal = memcmp(spoken, r->text, sizeof *spoken * (size_t)r->capacity) == 0;
    uint32_t k;
    printf("\n\nacceptance length   %.2f  (accepted drafts + the target's own token; %.2f without it)\n",
           dspark_acceptance_length(a, 1), dspark_acceptance_length(a, 0));
    printf("by position        ");
    for (k = 0; k < r->config->block_size; k++)
        printf(" %.0f%%", a->drafted[k] ? 100.0 * (double)a->accepted[k] / (double)a->drafted[k] : 0.0);
    printf("\nbytes a second      %.0f with drafting, %.0f without\n", r->set->n_bytes / r->seconds,
           r->set->n_bytes / alone);
    printf("target steps        %llu for %d bytes\n", (unsigned long long)a->n_blocks, r->set->n_bytes);
    printf("equal to the target's own greedy text, byte for byte: %s\n", equal ? "yes" : "NO");
    return equal ? 0 : -1;
}

static int generate(run *r)
{
    dspark_session *session = NULL;
    dspark_error err;
    int32_t *spoken;
    double alone;
    int code;
    if (r->set->dump && try_dump(r->set) != 0) return -1;
    if (llama_load(&r->target, r->set->target, MAX_BLOCK + 1) != 0 || open_drafter(r) != 0 ||
        make_buffers(r) != 0)
        return -1;
    spoken = malloc(sizeof *spoken * (size_t)r->capacity);
    if (!spoken || write_alone(r) != 0) {
        free(spoken);
        return -1;
    }
    memcpy(spoken, r->text, sizeof *spoken * (size_t)r->capacity);
    alone = r->seconds;
    r->n_text = r->n_prompt;
    if (dspark_session_open(&session, r->pool, &err) != DSPARK_OK) {
        free(spoken);
        return fail(&err);
    }
    fputs(r->set->prompt, stdout);
    code = speculate(r, session);
    if (code == 0) code = report(r, spoken, alone);
    if (code == 0 && r->set->dump) code = write_dump(r);
    dspark_session_close(session);
    free(spoken);
    return code;
}

static int read_colour(settings *s, const char *word)
{
    s->colour = strcmp(word, "always") == 0;
    return s->colour || strcmp(word, "never") == 0;
}

static int read_settings(settings *s, int argc, char **argv)
{
    int i;
    s->target = "models/tiny-shakespeare/target";
    s->draft = "models/tiny-shakespeare/drafter";
    s->dump = NULL;
    s->prompt = "ROMEO:\n";
    s->n_bytes = 400;
    s->colour = isatty(STDOUT_FILENO);
    for (i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--target") == 0) s->target = argv[i + 1];
        else if (strcmp(argv[i], "--draft") == 0) s->draft = argv[i + 1];
        else if (strcmp(argv[i], "--prompt") == 0) s->prompt = argv[i + 1];
        else if (strcmp(argv[i], "--dump") == 0) s->dump = argv[i + 1];
        else if (strcmp(argv[i], "--bytes") == 0) s->n_bytes = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--colour") != 0 || !read_colour(s, argv[i + 1])) break;
    }
    if (i == argc && s->n_bytes > 1) return 0;
    fprintf(stderr, "usage: generate [--target DIR] [--draft DIR] [--prompt TEXT] [--bytes N] "
                    "[--colour always|never] [--dump FILE]\n");
    return -1;
}

int main(int argc, char **argv)
{
    settings set;
    run r;
    int code;
    if (read_settings(&set, argc, argv) != 0) return 2;
    memset(&r, 0, sizeof r);
    r.set = &set;
    code = generate(&r);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "generate: standard output: %s\n", strerror(errno));
        code = -1;
    }
    dspark_pool_free(r.pool);
    dspark_drafter_free(r.drafter);
    dspark_model_close(r.model);
    llama_free(&r.target);
    free(r.text);
    free(r.drafted);
    free(r.taps);
    free(r.logits);
    return code == 0 ? 0 : 1;
}
