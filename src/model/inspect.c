/* The inspection itself: looks at a path step by step, collects problems, reaches a verdict and
 * puts the document together. A broken or foreign checkpoint is a result, not a failure. */
#include "model/inspect.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/digest.h"
#include "base/status.h"
#include "ckpt/dtype.h"
#include "ckpt/family.h"
#include "ckpt/json.h"
#include "ckpt/names.h"
#include "ckpt/roster.h"
#include "quant/parts.h"
#include "quant/quant_file.h"

#define MAX_PROBLEMS 1000

struct dspark_inspection {
    dspark_verdict verdict;
    char *json;
};

typedef struct inspector {
    const char *path;
    const dspark_inspect_opts *opts;
    dspark_verdict verdict;
    char reason[900];
    int oom;
    json_t *problems, *warnings;
    size_t n_left_out;
    char *config_text;
    size_t n_config;
    char no_config[300];   /* why there is no text */
    int unread_config;     /* it is there, but could not be read */
    const char *container; /* "gguf", "pytorch", "none": instead of a family */
    dspark__family_report family;
    dspark__config_doc *doc;
    dspark_checkpoint *ckpt;
    dspark__modules modules;
    dspark__quant_config *quant;    /* NULL: the config says nothing of quantisation */
    dspark__quant_modules linears;  /* every linear of a K3 drafter: scheme and packing */
    const dspark__quant_module **linear_of; /* of each module of the file; NULL: it is none */
    json_t *tensors, *deep;
} inspector;

/* ---- problems and the verdict ---------------------------------------------------------------- */

/* The first reason of the worst kind stays. */
static void judge(inspector *k, dspark_verdict verdict, const char *where, const char *text)
{
    if (k->reason[0] && verdict <= k->verdict) return;
    if (verdict > k->verdict) k->verdict = verdict;
    snprintf(k->reason, sizeof k->reason, "%s%s%s", where, *where ? ": " : "", text);
}

static void add_problem(void *user, dspark_status kind, const char *tensor, const char *text)
{
    inspector *k = user;
    json_t *o;

    if (json_array_size(k->problems) >= MAX_PROBLEMS) {
        k->n_left_out++;
        return;
    }
    o = json_object();
    dspark__inspect_put(&k->oom, o, "status", json_string(dspark_status_name(kind)));
    dspark__inspect_put(&k->oom, o, "tensor", dspark__inspect_text(tensor));
    dspark__inspect_put(&k->oom, o, "text", dspark__inspect_text(text));
    dspark__inspect_append(&k->oom, k->problems, o);
}

static dspark_verdict verdict_of(dspark_status st)
{
    return st == DSPARK_EUNSUPPORTED ? DSPARK_RECOGNISED : DSPARK_BROKEN;
}

/* A step failed with `e`: a finding, unless memory ran out. `listed`: its problems are listed. */
static dspark_status take_error(inspector *k, dspark_status st, const dspark_error *e, int listed,
                                dspark_error *err)
{
    if (st == DSPARK_OK) return DSPARK_OK;
    if (st == DSPARK_ENOMEM || st == DSPARK_ECANCELLED) {
        if (err) *err = *e;
        return st;
    }
    if (!listed) add_problem(k, st, e->where, e->message);
    judge(k, verdict_of(st), e->where, e->message);
    return DSPARK_OK;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static int name_ends(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n > m && !strcmp(name + n - m, end);
}

/* A container that holds no safetensors. Leaves k->container NULL when there is nothing to say. */
static void look_at_folder(inspector *k)
{
    DIR *dir = opendir(k->path);
    int gguf = 0, pickle = 0, safetensors = 0;
    struct dirent *entry;

    if (!dir) {
        k->oom |= dspark__status_of_errno(errno) == DSPARK_ENOMEM;
        return;
    }
    while ((entry = readdir(dir)) != NULL) {
        if (name_ends(entry->d_name, ".gguf")) gguf = 1;
        if (name_ends(entry->d_name, ".bin") || name_ends(entry->d_name, ".pt") ||
            name_ends(entry->d_name, ".pth"))
            pickle = 1;
        if (name_ends(entry->d_name, ".safetensors") ||
            name_ends(entry->d_name, ".safetensors.index.json"))
            safetensors = 1;
    }
    closedir(dir);
    if (safetensors) return;
    if (gguf)
        k->container = "gguf";
    else if (pickle)
        k->container = "pytorch";
}

static void look_at_file(inspector *k)
{
    unsigned char magic[4] = {0, 0, 0, 0};
    int fd = open(k->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n;

    if (fd < 0) {
        k->oom |= dspark__status_of_errno(errno) == DSPARK_ENOMEM;
        return;
    }
    n = read(fd, magic, sizeof magic);
    close(fd);
    if (n == 4 && !memcmp(magic, "GGUF", 4))
        k->container = "gguf";
    else if (n == 4 && !memcmp(magic, "PK\3\4", 4))
        k->container = "pytorch";
}

/* Returns 0 when there is nothing more to look at. */
static int look_at_path(inspector *k)
{
    struct stat sb;
    char text[256];

    if (stat(k->path, &sb) != 0) {
        snprintf(text, sizeof text, "cannot be opened: %s", strerror(errno));
        k->container = "none";
        add_problem(k, DSPARK_EIO, NULL, text);
        judge(k, DSPARK_BROKEN, k->path, text);
        return 0;
    }
    if (S_ISDIR(sb.st_mode))
        look_at_folder(k);
    else if (S_ISREG(sb.st_mode))
        look_at_file(k);
    if (!k->container) return 1;
    snprintf(text, sizeof text,
             "%s, which is not read here; a checkpoint is safetensors files with "
             "a config.json",
             !strcmp(k->container, "gguf") ? "a GGUF file" : "PyTorch's own format");
    add_problem(k, DSPARK_EUNSUPPORTED, NULL, text);
    judge(k, DSPARK_RECOGNISED, k->path, text);
    return 0;
}

/* A file that belongs to this project and is no checkpoint: what it is, and who takes it. */
static int look_at_own(inspector *k)
{
    static const struct {
        const char *id, *first, *second, *text;
    } rows[] = {
        {"dump", "hidden_states", "token_ids",
         "a hidden-state dump, not a checkpoint: the input of context KV"},
        {"cache", "layers.0.kv_cache", "slot_mapping",
         "latent caches of every layer, not a checkpoint: the output of context KV"},
        {"states", "states", "positions",
         "context states, not a checkpoint: the projected rows of a dump"},
    };

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (!dspark__checkpoint_find(k->ckpt, rows[i].first) ||
            !dspark__checkpoint_find(k->ckpt, rows[i].second))
            continue;
        k->container = rows[i].id;
        add_problem(k, DSPARK_EUNSUPPORTED, NULL, rows[i].text);
        judge(k, DSPARK_RECOGNISED, dspark__checkpoint_file_name(k->ckpt, 0), rows[i].text);
        return 1;
    }
    return 0;
}

/* Is anything of that name there, be it what it may? */
static int has_config(const char *path)
{
    struct stat sb;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), there;
    if (folder < 0) return 0;
    there = fstatat(folder, "config.json", &sb, AT_SYMLINK_NOFOLLOW) == 0;
    close(folder);
    return there;
}

static dspark_status look_at_files(inspector *k, dspark_error *err)
{
    dspark_error e;
    dspark_status st;

    dspark__error_clear(&e);
    st = dspark__config_text(&k->config_text, &k->n_config, k->path, &e);
    /* a config that is not there is judged when the family is known */
    if (st == DSPARK_EIO) {
        snprintf(k->no_config, sizeof k->no_config, "%.290s", e.message);
        k->unread_config = has_config(k->path);
    } else if ((st = take_error(k, st, &e, 0, err)) != DSPARK_OK)
        return st;
    dspark__error_clear(&e);
    st = dspark__checkpoint_open(&k->ckpt, k->path, &e);
    if ((st = take_error(k, st, &e, 0, err)) != DSPARK_OK) return st;
    if (k->ckpt && (st = dspark__modules_make(&k->modules, k->ckpt, err)) != DSPARK_OK) return st;
    if (k->ckpt && look_at_own(k)) return DSPARK_OK;
    return dspark__family_detect(&k->family, k->config_text, k->n_config, k->ckpt, err);
}

/* Schemes and scales of the linears, against quantization_config. */
static dspark_status judge_linears(inspector *k, dspark_error *err)
{
    dspark_error e;
    dspark__error_clear(&e);
    dspark_status st = dspark__quant_config_read(&k->quant, k->path, &e);
    if (st != DSPARK_OK) return take_error(k, st, &e, 0, err);
    st = dspark__quant_check(k->ckpt, k->doc, k->quant, add_problem, k, &e);
    if ((st = take_error(k, st, &e, 1, err)) != DSPARK_OK) return st;
    return dspark__quant_modules_make(&k->linears, k->ckpt, k->doc, k->quant, err);
}

static dspark_status judge_k3(inspector *k, dspark_error *err)
{
    dspark_error e;
    dspark_status st;

    dspark__error_clear(&e);
    if (!k->config_text) {
        if (k->unread_config) {
            add_problem(k, DSPARK_EIO, "config.json", k->no_config);
            judge(k, DSPARK_BROKEN, "config.json", k->no_config);
        } else if (k->verdict == DSPARK_USABLE) {
            char text[500];
            snprintf(text, sizeof text,
                     "%s; the tensors are those of a K3 DSpark drafter, and its "
                     "config must lie beside them",
                     k->no_config);
            add_problem(k, DSPARK_EUNSUPPORTED, "config.json", text);
            judge(k, DSPARK_RECOGNISED, "config.json", text);
        }
        return DSPARK_OK;
    }
    st = dspark__config_read(&k->doc, k->path, &e);
    if ((st = take_error(k, st, &e, 0, err)) != DSPARK_OK) return st;
    if (!k->doc || !k->ckpt) return DSPARK_OK;
    st = dspark__roster_check(k->ckpt, k->doc, add_problem, k, &e);
    if ((st = take_error(k, st, &e, 1, err)) != DSPARK_OK) return st;
    return judge_linears(k, err);
}

static dspark_status judge_family(inspector *k, dspark_error *err)
{
    dspark_error e;
    dspark_status st;

    dspark__error_clear(&e);
    st = dspark__family_gate(&k->family, "", &e);
    if (st == DSPARK_OK) return judge_k3(k, err);
    /* files of which nothing could be read are of no family */
    if (k->family.family == DSPARK__FAMILY_UNKNOWN && !k->ckpt && !k->config_text) {
        k->container = "none";
        return DSPARK_OK;
    }
    /* a config that is no JSON at all says so itself, not "unknown family" */
    if (k->family.family == DSPARK__FAMILY_UNKNOWN && k->config_text) {
        dspark__config_doc *doc = NULL;
        dspark_error bad;
        dspark_status parsed;
        dspark__error_clear(&bad);
        parsed = dspark__config_parse(&doc, k->config_text, k->n_config, "config.json", &bad);
        dspark__config_free(doc);
        if (parsed == DSPARK_EFORMAT || parsed == DSPARK_ENOMEM) {
            parsed = take_error(k, parsed, &bad, 0, err);
            if (parsed != DSPARK_OK) return parsed;
        }
    }
    return take_error(k, st, &e, 0, err);
}

/* ---- deep ------------------------------------------------------------------------------------ */

typedef struct progress {
    const dspark_inspect_opts *opts;
    uint64_t done, total;
} progress;

static int step_progress(void *user, uint64_t bytes)
{
    progress *p = user;
    p->done += bytes;
    return p->opts->progress ? p->opts->progress(p->opts->progress_user, p->done, p->total) : 0;
}

static json_t *stats_section(const dspark__tensor_stats *s, int *oom)
{
    double a = fabs(s->min) > fabs(s->max) ? fabs(s->min) : fabs(s->max);
    json_t *o;

    if (!s->decoded) return json_null();
    o = json_object();
    dspark__inspect_put(oom, o, "elements", dspark__inspect_u64(s->elements));
    dspark__inspect_put(oom, o, "nonfinite", dspark__inspect_u64(s->nonfinite));
    dspark__inspect_put(oom, o, "rows", dspark__inspect_u64(s->rows));
    dspark__inspect_put(oom, o, "zero_rows", dspark__inspect_u64(s->zero_rows));
    dspark__inspect_put(oom, o, "min", s->has_range ? dspark__inspect_real(s->min) : json_null());
    dspark__inspect_put(oom, o, "max", s->has_range ? dspark__inspect_real(s->max) : json_null());
    dspark__inspect_put(oom, o, "absmax", s->has_range ? dspark__inspect_real(a) : json_null());
    dspark__inspect_put(oom, o, "rms",
                        s->has_range ? dspark__inspect_real((double)(float)s->rms) : json_null());
    return o;
}

/* Weights without which nothing works. Heads that may rightly be zero (no Markov correction, no
 * confidence) are not among them. */
static int is_projection(const inspector *k, const dspark_tensor *t)
{
    dspark__arrival a[2];

    if (!k->doc || !dspark__names_map(t->name, &k->doc->config, a)) return 0;
    if (strcmp(a[0].suffix, "weight") != 0) return 0;
    return a[0].target < DSPARK__T_MARKOV_W1 || a[0].target > DSPARK__T_CONFIDENCE;
}

static void judge_stats(inspector *k, const dspark_tensor *t, const dspark__tensor_stats *s)
{
    char text[400];

    if (s->nonfinite) {
        snprintf(text, sizeof text, "%llu of %llu values are NaN or infinite",
                 (unsigned long long)s->nonfinite, (unsigned long long)s->elements);
        add_problem(k, DSPARK_ENONFINITE, t->name, text);
        judge(k, DSPARK_BROKEN, t->name, text);
    }
    if (s->decoded && s->rows && s->zero_rows == s->rows && is_projection(k, t)) {
        snprintf(text, sizeof text,
                 "all %llu rows are zero: nothing was ever written here; a drafter cannot work "
                 "with it",
                 (unsigned long long)s->rows);
        add_problem(k, DSPARK_EMODEL, t->name, text);
        judge(k, DSPARK_RECOGNISED, t->name, text);
        return;
    }
    if (s->zero_rows) {
        snprintf(text, sizeof text, "%.160s: %llu of %llu rows are all zero", t->name,
                 (unsigned long long)s->zero_rows, (unsigned long long)s->rows);
        dspark__inspect_append(&k->oom, k->warnings, dspark__inspect_text(text));
    }
}

static dspark_status read_deep(inspector *k, dspark_error *err)
{
    size_t count = dspark__checkpoint_count(k->ckpt);
    uint64_t nonfinite = 0, bad_tensors = 0, zero_rows = 0;
    progress p = {k->opts, 0, 0};
    json_t *o;

    for (size_t i = 0; i < count; i++) p.total += dspark__checkpoint_at(k->ckpt, i)->n_bytes;
    for (size_t i = 0; i < count && !k->oom; i++) {
        const dspark_tensor *t = dspark__checkpoint_at(k->ckpt, i);
        dspark__tensor_stats s;
        dspark_error e;
        dspark_status st;

        dspark__error_clear(&e);
        st = dspark__tensor_scan(&s, k->ckpt, t, step_progress, &p, &e);
        if (st != DSPARK_OK) {
            if ((st = take_error(k, st, &e, 0, err)) != DSPARK_OK) return st;
            continue;
        }
        judge_stats(k, t, &s);
        nonfinite += s.nonfinite;
        bad_tensors += s.nonfinite != 0;
        zero_rows += s.zero_rows;
        dspark__inspect_put(&k->oom, json_array_get(k->tensors, i), "deep",
                            stats_section(&s, &k->oom));
    }
    k->deep = o = json_object();
    if (!o) k->oom = 1;
    dspark__inspect_put(&k->oom, o, "bytes", dspark__inspect_u64(p.total));
    dspark__inspect_put(&k->oom, o, "nonfinite", dspark__inspect_u64(nonfinite));
    dspark__inspect_put(&k->oom, o, "tensors_with_nonfinite", dspark__inspect_u64(bad_tensors));
    dspark__inspect_put(&k->oom, o, "zero_rows", dspark__inspect_u64(zero_rows));
    return DSPARK_OK;
}

/* ---- the document ---------------------------------------------------------------------------- */

static json_t *family_section(inspector *k)
{
    const dspark__family_report *f = &k->family;
    json_t *o = json_object();

    dspark__inspect_put(&k->oom, o, "id", json_string(k->container ? k->container : f->id));
    dspark__inspect_put(&k->oom, o, "variant",
                        dspark__inspect_text(k->container ? NULL : f->variant));
    dspark__inspect_put(&k->oom, o, "dialect",
                        dspark__inspect_text(k->container ? NULL : f->dialect));
    dspark__inspect_put(&k->oom, o, "model_prefix", json_boolean(f->model_prefix));
    dspark__inspect_put(&k->oom, o, "text",
                        dspark__inspect_text(k->container ? k->reason : f->text));
    return o;
}

static json_t *files_section(inspector *k)
{
    json_t *list = json_array();
    size_t n = k->ckpt ? dspark__checkpoint_file_count(k->ckpt) : 0;

    for (size_t i = k->config_text ? 0 : 1; i <= n; i++) {
        json_t *o = json_object();
        dspark__inspect_put(&k->oom, o, "name",
                            i ? dspark__inspect_text(dspark__checkpoint_file_name(k->ckpt, i - 1))
                              : json_string("config.json"));
        dspark__inspect_put(
            &k->oom, o, "bytes",
            dspark__inspect_u64(i ? dspark__checkpoint_file_bytes(k->ckpt, i - 1) : k->n_config));
        dspark__inspect_append(&k->oom, list, o);
    }
    return list;
}

/* Is there a tensor of this target and suffix? */
static int has_tensor(const inspector *k, dspark__target target, const char *suffix)
{
    size_t n = dspark__checkpoint_count(k->ckpt);

    for (size_t i = 0; i < n; i++) {
        dspark__arrival a[2];
        if (dspark__names_map(dspark__checkpoint_at(k->ckpt, i)->name, &k->doc->config, a) &&
            a[0].target == target && (!suffix || !strcmp(a[0].suffix, suffix)))
            return 1;
    }
    return 0;
}

static json_t *notes_section(inspector *k)
{
    json_t *list = json_array();

    for (size_t i = 0; k->doc && i < k->doc->n_notes; i++)
        dspark__inspect_append(&k->oom, list, dspark__inspect_text(k->doc->notes[i]));
    for (size_t i = 0; k->quant && i < dspark__quant_config_note_count(k->quant); i++)
        dspark__inspect_append(&k->oom, list,
                               dspark__inspect_text(dspark__quant_config_note(k->quant, i)));
    for (int i = 0; k->doc && k->ckpt && i < 2; i++)
        if (has_tensor(k, i ? DSPARK__T_LM_HEAD : DSPARK__T_EMBED, NULL))
            dspark__inspect_append(&k->oom, list, json_string(
                i ? "lm_head: the file has its own, which is used instead of the target's"
                  : "embed_tokens: the file has its own, which is used instead of the target's; "
                    "vLLM drops it for the target's"));
    return list;
}

/* A file of this project that is no checkpoint has tensors, and no parameters. */
static json_t *totals_section(inspector *k)
{
    json_t *o = dspark__inspect_totals(k->ckpt, &k->modules, k->linear_of);

    if (k->container) dspark__inspect_put(&k->oom, o, "parameters", json_null());
    return o;
}

static json_t *expected_section(inspector *k)
{
    dspark__roster_entry *roster = NULL;
    size_t n = 0;
    json_t *o;

    if (dspark__roster_make(&roster, &n, &k->doc->config, k->doc->context_only, NULL) !=
        DSPARK_OK) {
        k->oom = 1;
        return NULL;
    }
    o = json_object();
    dspark__inspect_put(&k->oom, o, "tensors", dspark__inspect_u64(n));
    dspark__inspect_put(&k->oom, o, "parameters",
                        dspark__inspect_u64(dspark__roster_parameters(roster, n)));
    free(roster);
    return o;
}

static json_t *quantisation_section(inspector *k)
{
    json_t *o = json_object(), *schemes = json_object();

    for (size_t i = 0; i < k->modules.n && !k->oom; i++) {
        const char *scheme = dspark__inspect_scheme(&k->modules.list[i], k->linear_of[i]);
        json_t *seen = json_object_get(schemes, scheme);
        dspark__inspect_put(&k->oom, schemes, scheme, json_integer(json_integer_value(seen) + 1));
    }
    dspark__inspect_put(&k->oom, o, "config_method",
                        dspark__inspect_text(k->doc ? k->doc->quant_method : NULL));
    dspark__inspect_put(&k->oom, o, "config",
                        dspark__inspect_text(k->quant ? dspark__quant_config_text(k->quant) : NULL));
    dspark__inspect_put(&k->oom, o, "schemes", schemes);
    dspark__inspect_put(&k->oom, o, "linears", dspark__inspect_linears(&k->linears));
    return o;
}

static void put_extras(inspector *k, json_t *root)
{
    const char *head = NULL, *embed = NULL, *lm_head = NULL;

    if (k->doc && k->ckpt) {
        int weight = has_tensor(k, DSPARK__T_CONFIDENCE, NULL);
        int bias = has_tensor(k, DSPARK__T_CONFIDENCE, "bias");
        head = !weight                           ? "absent"
               : !k->doc->config.confidence_head ? "unused"
               : bias                            ? "loaded"
                                                 : "no-bias";
        embed = has_tensor(k, DSPARK__T_EMBED, NULL) ? "own" : "absent";
        lm_head = has_tensor(k, DSPARK__T_LM_HEAD, NULL) ? "own" : "absent";
    }
    dspark__inspect_put(&k->oom, root, "confidence_head", dspark__inspect_text(head));
    dspark__inspect_put(&k->oom, root, "embed_tokens", dspark__inspect_text(embed));
    dspark__inspect_put(&k->oom, root, "lm_head", dspark__inspect_text(lm_head));
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const dspark_tensor *const *)a)->name,
                  (*(const dspark_tensor *const *)b)->name);
}

/* Over the config and, sorted by name so that sharding does not count, every tensor's header. */
static json_t *fingerprint_section(inspector *k, const json_t *config)
{
    size_t n = dspark__checkpoint_count(k->ckpt);
    const dspark_tensor **sorted = calloc(n + 1, sizeof *sorted);
    char *text = config ? dspark__json_text(config, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    dspark__digest d;
    char hex[33];

    if (!sorted || (config && !text)) {
        free(sorted);
        free(text);
        return NULL;
    }
    dspark__digest_init(&d);
    if (text) dspark__digest_update(&d, text, strlen(text));
    for (size_t i = 0; i < n; i++) sorted[i] = dspark__checkpoint_at(k->ckpt, i);
    qsort(sorted, n, sizeof *sorted, by_name);
    for (size_t i = 0; i < n; i++) {
        const char *dtype = dspark__dtype_name(sorted[i]->dtype);
        dspark__digest_update(&d, sorted[i]->name, strlen(sorted[i]->name) + 1);
        dspark__digest_update(&d, dtype, strlen(dtype) + 1);
        for (uint32_t r = 0; r <= sorted[i]->rank; r++) {
            uint64_t v = r ? sorted[i]->shape[r - 1] : sorted[i]->rank;
            unsigned char little[8];
            for (int b = 0; b < 8; b++) little[b] = (unsigned char)(v >> (8 * b));
            dspark__digest_update(&d, little, sizeof little);
        }
    }
    dspark__digest_hex(&d, hex);
    free(sorted);
    free(text);
    return json_string(hex);
}

static char *make_document(inspector *k)
{
    static const char *const verdicts[] = {"usable", "recognised", "?", "broken"};
    json_t *root = json_object(), *config = k->doc ? dspark__inspect_config(k->doc) : json_null();
    char *text = NULL;
    int *oom = &k->oom;

    dspark__inspect_put(oom, root, "path", dspark__inspect_text(k->path));
    dspark__inspect_put(oom, root, "verdict", json_string(verdicts[k->verdict]));
    dspark__inspect_put(oom, root, "exit_code", json_integer(k->verdict));
    dspark__inspect_put(oom, root, "reason", dspark__inspect_text(k->reason));
    dspark__inspect_put(oom, root, "family", family_section(k));
    dspark__inspect_put(oom, root, "files", files_section(k));
    dspark__inspect_put(oom, root, "config", config);
    dspark__inspect_put(oom, root, "notes", notes_section(k));
    dspark__inspect_put(oom, root, "warnings", json_incref(k->warnings));
    dspark__inspect_put(oom, root, "problems", json_incref(k->problems));
    dspark__inspect_put(oom, root, "problems_left_out", dspark__inspect_u64(k->n_left_out));
    dspark__inspect_put(oom, root, "totals", k->ckpt ? totals_section(k) : json_null());
    dspark__inspect_put(oom, root, "expected", k->doc ? expected_section(k) : json_null());
    dspark__inspect_put(oom, root, "quantisation", quantisation_section(k));
    put_extras(k, root);
    dspark__inspect_put(oom, root, "fingerprint",
                        k->ckpt && !*oom ? fingerprint_section(k, k->doc ? config : NULL)
                                         : json_null());
    dspark__inspect_put(oom, root, "plan",
                        k->doc ? dspark__inspect_plan(k->doc, &k->linears) : json_null());
    dspark__inspect_put(oom, root, "deep", k->deep ? json_incref(k->deep) : json_null());
    dspark__inspect_put(oom, root, "tensors", k->tensors ? json_incref(k->tensors) : json_array());
    if (!*oom && !(text = dspark__json_short_text(root, JSON_INDENT(2) | JSON_ENSURE_ASCII))) *oom = 1;
    json_decref(root);
    return text;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static void warn_square(inspector *k)
{
    json_t *text = dspark__inspect_square(k->ckpt, &k->doc->config);

    if (!text || json_is_string(text))
        dspark__inspect_append(&k->oom, k->warnings, text);
}

/* Codes are read for what they are when no rule of the config is about them; other programs go by the rule. */
static void warn_unaddressed(inspector *k)
{
    const dspark__quant_module *first = NULL;
    char text[400];
    size_t n = 0;

    for (size_t i = 0; i < k->linears.n; i++) {
        const dspark__quant_module *m = &k->linears.list[i];
        if (!m->scheme || m->packing.bits >= 16 || dspark__rule_targets(&m->rule)) continue;
        if (!first) first = m;
        n++;
    }
    if (!first) return;
    snprintf(text, sizeof text,
             "%zu linears hold codes that no rule of quantization_config addresses (the first: %s): they are read for "
             "what they are, other programs may take them for plain weights",
             n, first->name);
    dspark__inspect_append(&k->oom, k->warnings, dspark__inspect_text(text));
}

static dspark_status inspect_path(inspector *k, dspark_error *err)
{
    dspark_status st;

    if (look_at_path(k)) {
        if ((st = look_at_files(k, err)) != DSPARK_OK) return st;
        if (!k->container && (st = judge_family(k, err)) != DSPARK_OK) return st;
    }
    if (k->ckpt) {
        k->linear_of = dspark__inspect_match(&k->modules, &k->linears);
        if (k->linear_of)
            k->tensors = dspark__inspect_tensors(k->ckpt, &k->modules, k->linear_of,
                                                 k->doc ? &k->doc->config : NULL);
        if (!k->tensors) k->oom = 1;
        if (k->doc) warn_square(k);
        warn_unaddressed(k);
        if (!k->oom && k->opts->deep && (st = read_deep(k, err)) != DSPARK_OK) return st;
    }
    if (!k->reason[0])
        snprintf(k->reason, sizeof k->reason, "every tensor that %s needs is there%s",
                 k->doc && k->doc->context_only ? "context KV" : "the config",
                 k->opts->deep ? " and its data was read"
                               : " with its shape and dtype; headers only, data not read");
    return DSPARK_OK;
}

dspark_status dspark__inspect(dspark_inspection **out, const char *path,
                              const dspark_inspect_opts *opts, dspark_error *err)
{
    dspark_inspection *in = NULL;
    dspark_inspect_opts none;
    dspark_status st;
    inspector k;

    if (!out) return dspark__fail(err, DSPARK_EINVAL, "out", "it is NULL");
    *out = NULL;
    if (!path) return dspark__fail(err, DSPARK_EINVAL, "path", "it is NULL");
    memset(&none, 0, sizeof none);
    memset(&k, 0, sizeof k);
    k.path = path;
    k.opts = opts ? opts : &none;
    k.problems = json_array();
    k.warnings = json_array();
    k.oom = !k.problems || !k.warnings;
    st = k.oom ? DSPARK_OK : inspect_path(&k, err);
    if (st == DSPARK_OK && !k.oom) {
        in = calloc(1, sizeof *in);
        if (in) {
            in->verdict = k.verdict;
            in->json = make_document(&k);
        }
    }
    if (st == DSPARK_OK && (k.oom || !in || !in->json)) {
        st = dspark__fail_nomem(err, "inspection", sizeof *in);
        dspark__inspection_free(in);
        in = NULL;
    }
    json_decref(k.problems);
    json_decref(k.warnings);
    json_decref(k.tensors);
    json_decref(k.deep);
    free(k.config_text);
    free(k.linear_of);
    dspark__config_free(k.doc);
    dspark__quant_modules_free(&k.linears);
    dspark__quant_config_free(k.quant);
    dspark__modules_free(&k.modules);
    dspark__checkpoint_close(k.ckpt);
    *out = in;
    return st;
}

void dspark__inspection_free(dspark_inspection *in)
{
    if (!in) return;
    free(in->json);
    free(in);
}

dspark_verdict dspark__inspection_verdict(const dspark_inspection *in)
{
    return in->verdict;
}

const char *dspark__inspection_json(const dspark_inspection *in)
{
    return in->json;
}
