/* The two tensors that a drafter borrows from its target: the embedding and the LM head. The draft's own
 * win, then the host's, then those of the target's checkpoint, of which nothing else is opened. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/status.h"
#include "ckpt/json.h"
#include "model/model_fill.h"
#include "quant/quant_file.h"

/* What stands before the two names in the field's checkpoints. */
static const char *const prefixes[] = {"", "model.", "language_model.", "language_model.model.",
                                       "model.language_model."};
#define N_PREFIXES (sizeof prefixes / sizeof *prefixes)
#define JSON_DEPTH 32

/* The part of `name` behind "PREFIX MODULE.", or NULL when it is another module's tensor. */
static const char *suffix_of(const char *name, const char *module)
{
    size_t n = strlen(module);
    for (size_t i = 0; i < N_PREFIXES; i++) {
        size_t p = strlen(prefixes[i]);
        if (strncmp(name, prefixes[i], p) == 0 && strncmp(name + p, module, n) == 0 &&
            name[p + n] == '.' && !strchr(name + p + n + 1, '.'))
            return name + p + n + 1;
    }
    return NULL;
}

/* ---- the target's config ---- */

/* A multimodal config keeps its language model's keys one level down; null counts as absent. */
static const json_t *find_key(const json_t *root, const char *key)
{
    const json_t *value = json_object_get(json_object_get(root, "text_config"), key);
    if (!value || json_is_null(value)) value = json_object_get(root, key);
    return value && json_is_null(value) ? NULL : value;
}

static dspark_status agree(const json_t *root, const char *key, uint64_t ours, const char *our_key,
                           const char *where, dspark_error *err)
{
    const json_t *value = find_key(root, key);
    if (!value) return DSPARK_OK; /* the tensors' shapes tell */
    if (!json_is_integer(value))
        return dspark__fail(err, DSPARK_EFORMAT, where, "%s is not an integer", key);
    if (json_integer_value(value) >= 0 && (uint64_t)json_integer_value(value) == ours) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EMODEL, where,
                        "%s is %lld, and the draft's %s is %llu: it was trained for another target", key,
                        (long long)json_integer_value(value), our_key, (unsigned long long)ours);
}

static dspark_status check_depth(const json_t *root, const dspark_config *c, const char *where,
                                 dspark_error *err)
{
    const json_t *value = find_key(root, "num_hidden_layers");
    int32_t last = c->n_taps ? c->tap_layers[c->n_taps - 1] : -1;
    if (!value) return DSPARK_OK;
    if (!json_is_integer(value))
        return dspark__fail(err, DSPARK_EFORMAT, where, "num_hidden_layers is not an integer");
    if (json_integer_value(value) <= last)
        return dspark__fail(err, DSPARK_EMODEL, where,
                            "num_hidden_layers is %lld, and the draft taps layer %d of its target",
                            (long long)json_integer_value(value), (int)last);
    if (!c->target_n_layers) return DSPARK_OK;
    return agree(root, "num_hidden_layers", c->target_n_layers, "target_num_hidden_layers", where, err);
}

/* 1 in *there: a config.json lies in the folder. Without one the shapes alone are compared. */
static dspark_status look_for_config(const char *path, int *there, dspark_error *err)
{
    struct stat info;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    *there = 0;
    if (folder < 0) return dspark__fail_errno(err, path, "the target's folder cannot be opened", errno);
    *there = fstatat(folder, "config.json", &info, 0) == 0 || errno != ENOENT;
    close(folder);
    return DSPARK_OK;
}

/* hidden_size is what the taps are as wide as; the draft's own is as wide only when it borrows. */
static dspark_status check_widths(const json_t *root, const dspark_config *c, int borrows,
                                  const char *where, dspark_error *err)
{
    dspark_status st = agree(root, "hidden_size", c->tap_width, "target_hidden_size", where, err);
    if (st != DSPARK_OK || !borrows) return st;
    return agree(root, "hidden_size", c->hidden_size, "hidden_size", where, err);
}

static dspark_status check_tied(const json_t *root, int *tied, const char *where, dspark_error *err)
{
    const json_t *value = find_key(root, "tie_word_embeddings");
    *tied = json_is_true(value);
    if (!value || json_is_boolean(value)) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EFORMAT, where, "tie_word_embeddings is not true or false");
}

static dspark_status check_config(const char *path, const dspark_config *c, int borrows, int *tied,
                                  int *there, dspark_error *err)
{
    char *text = NULL;
    size_t n = 0;
    json_t *root = NULL;
    char where[256];
    *tied = 0;
    dspark_status st = look_for_config(path, there, err);
    if (st != DSPARK_OK || !*there) return st;
    snprintf(where, sizeof where, "%.240s/config.json", path);
    st = dspark__config_text(&text, &n, path, err);
    if (st == DSPARK_OK) st = dspark__json_load(&root, text, n, JSON_DEPTH, where, err);
    free(text);
    if (st != DSPARK_OK) return st;
    st = agree(root, "vocab_size", c->vocab_size, "vocab_size", where, err);
    if (st == DSPARK_OK) st = check_widths(root, c, borrows, where, err);
    if (st == DSPARK_OK) st = check_depth(root, c, where, err);
    if (st == DSPARK_OK) st = check_tied(root, tied, where, err);
    json_decref(root);
    return st;
}

/* ---- the target's tensors ---- */

typedef struct wish {
    int embed, lm_head; /* what is still wanted */
} wish;

static int is_wanted(void *user, const char *name)
{
    const wish *w = user;
    return (w->embed && suffix_of(name, "embed_tokens")) || (w->lm_head && suffix_of(name, "lm_head"));
}

static dspark_status gather(const dspark_checkpoint *ckpt, const char *module, dspark__module *to,
                            dspark_error *err)
{
    memset(to, 0, sizeof *to);
    for (size_t i = 0; i < dspark__checkpoint_count(ckpt); i++) {
        const dspark_tensor *t = dspark__checkpoint_at(ckpt, i);
        const char *suffix = suffix_of(t->name, module);
        if (!suffix) continue;
        dspark_status st = dspark__module_add(to, suffix, t, err);
        if (st != DSPARK_OK) return st;
    }
    return DSPARK_OK;
}

/* The target's quantisation, as far as its lm_head has one: a config in a dialect that is not read here
 * does not matter to a plain weight. */
static dspark_status read_quant(dspark__quant_config **out, const char *path, int has_config,
                                const dspark__module *lm_head, dspark_error *err)
{
    const dspark_tensor *weight = dspark__module_part(lm_head, "weight");
    *out = NULL;
    if (!has_config) return DSPARK_OK;
    if (weight && lm_head->n_parts == 1 &&
        (weight->dtype == DSPARK_BF16 || weight->dtype == DSPARK_F16 || weight->dtype == DSPARK_F32))
        return DSPARK_OK;
    return dspark__quant_config_read(out, path, err);
}

static dspark_status fill_lm_head(dspark__filler *f, const dspark__module *module, dspark_error *err)
{
    const dspark_config *c = &f->model->config;
    return dspark__fill_linear(f, &f->model->block.lm_head, "lm_head", c->hidden_size, 1, c->vocab_size,
                               module, 1, err);
}

static dspark_status fill_embed(dspark__filler *f, const dspark__module *module, dspark_error *err)
{
    const dspark_config *c = &f->model->config;
    return dspark__fill_table(f, module, "embed_tokens", c->vocab_size, c->hidden_size,
                              &f->model->block.embed, err);
}

static dspark_status take_target(dspark__filler *f, wish *want, dspark_error *err)
{
    dspark_model *m = f->model;
    const char *path = f->opts->target;
    dspark__module embed, lm_head;
    dspark__quant_config *quant = NULL;
    int tied, has_config;
    dspark_status st = check_config(path, &m->config, 1, &tied, &has_config, err);
    if (st != DSPARK_OK) return st;
    if (tied && want->lm_head) want->embed = 1;
    st = dspark__checkpoint_open_some(&m->block.target, path, is_wanted, want, err);
    if (st == DSPARK_OK) st = gather(m->block.target, "embed_tokens", &embed, err);
    if (st == DSPARK_OK) st = gather(m->block.target, "lm_head", &lm_head, err);
    if (st != DSPARK_OK) return st;
    /* As the target is served: its own lm_head.weight, if any, is a copy that may be stale. */
    if (tied && embed.n_parts) lm_head = embed;
    if (want->embed && !m->block.embed.data && embed.n_parts == 0)
        return dspark__fail(err, DSPARK_EMODEL, path, "holds no embed_tokens.weight");
    if (want->lm_head && lm_head.n_parts == 0)
        return dspark__fail(err, DSPARK_EMODEL, path,
                            "holds no lm_head.weight, and its config does not tie it to the embedding");
    st = read_quant(&quant, path, has_config, &lm_head, err);
    dspark__filler theirs = *f;
    theirs.ckpt = m->block.target;
    theirs.quant = quant;
    if (st == DSPARK_OK && want->embed && !m->block.embed.data) st = fill_embed(&theirs, &embed, err);
    if (st == DSPARK_OK && want->lm_head) st = fill_lm_head(&theirs, &lm_head, err);
    f->done = theirs.done;
    dspark__quant_config_free(quant);
    return st;
}

/* ---- the host's ---- */

static size_t host_stride(const dspark_host_matrix *h)
{
    return h->row_stride ? h->row_stride : (size_t)h->cols * 2;
}

static dspark_status check_host(const dspark_host_matrix *h, const dspark_config *c, const char *name,
                                dspark_error *err)
{
    const size_t row = (size_t)c->hidden_size * 2;
    size_t bytes;
    if (!h->data) return dspark__fail(err, DSPARK_EINVAL, name, "data is NULL");
    if (h->rows != c->vocab_size || h->cols != c->hidden_size)
        return dspark__fail(err, DSPARK_EMODEL, name, "expected [%u, %u] from the host, found [%llu, %llu]",
                            c->vocab_size, c->hidden_size, (unsigned long long)h->rows,
                            (unsigned long long)h->cols);
    if (host_stride(h) < row)
        return dspark__fail(err, DSPARK_EINVAL, name, "a stride of %zu bytes is below the row's %zu",
                            host_stride(h), row);
    if (!dspark__mul_size(c->vocab_size, host_stride(h), &bytes))
        return dspark__fail(err, DSPARK_EINVAL, name, "%u rows at a stride of %zu bytes overflow memory",
                            c->vocab_size, host_stride(h));
    return DSPARK_OK;
}

static dspark_status pack_host(dspark__filler *f, const dspark_host_matrix *h, dspark_error *err)
{
    dspark_model *m = f->model;
    dspark_status st = dspark__merged_linear_init_even(&m->block.lm_head, "lm_head",
                                                       m->config.hidden_size, 1, m->config.vocab_size,
                                                       &m->allocator, err);
    return st == DSPARK_OK ? dspark__fill_rows(f, &m->block.lm_head, 0, h->data, host_stride(h), err) : st;
}

/* ---- in turn ---- */

/* What is wrong with the target's files is said of the target: a draft has files of the same names. */
static dspark_status name_target(dspark_status st, const char *path, dspark_error *err)
{
    char where[sizeof err->where];
    if (!err || st == DSPARK_OK || st == DSPARK_ENOMEM || st == DSPARK_ECANCELLED ||
        strncmp(err->where, path, strlen(path)) == 0)
        return st;
    memcpy(where, err->where, sizeof where);
    snprintf(err->where, sizeof err->where, "%.120s%s%.120s", path, where[0] ? ": " : "", where);
    return st;
}

dspark_status dspark__borrow_identity(const dspark__filler *f, const dspark__module *own_embed,
                                      const dspark__module *own_lm_head, char hex[33],
                                      dspark_error *err)
{
    const dspark_model_opts *o = f->opts;
    wish want = {!own_embed->n_parts && !o->embed_tokens, !own_lm_head->n_parts && !o->lm_head};
    dspark_checkpoint *files = NULL;
    int tied, has_config;
    memset(hex, 0, 33);
    if (!o->target || !want.lm_head) return DSPARK_OK;
    dspark_status st = check_config(o->target, &f->model->config, 1, &tied, &has_config, err);
    if (st == DSPARK_OK && tied) want.embed = 1;
    if (st == DSPARK_OK) st = dspark__checkpoint_open_some(&files, o->target, is_wanted, &want, err);
    if (st == DSPARK_OK) st = dspark__checkpoint_identity(files, hex, NULL, err);
    dspark__checkpoint_close(files);
    return name_target(st, o->target, err);
}

dspark_status dspark__borrow(dspark__filler *f, const dspark__module *own_embed,
                             const dspark__module *own_lm_head, dspark_error *err)
{
    const dspark_model_opts *o = f->opts;
    dspark_model *m = f->model;
    const dspark_config *c = &m->config;
    wish want = {own_embed->n_parts == 0, own_lm_head->n_parts == 0};
    dspark_status st = DSPARK_OK;
    if (!want.embed) st = fill_embed(f, own_embed, err);
    if (st == DSPARK_OK && !want.lm_head) st = fill_lm_head(f, own_lm_head, err);
    if (st == DSPARK_OK && want.embed && o->embed_tokens) {
        st = check_host(o->embed_tokens, c, "embed_tokens", err);
        if (st == DSPARK_OK)
            m->block.embed = (dspark__table){o->embed_tokens->data, host_stride(o->embed_tokens),
                                             c->vocab_size, c->hidden_size};
        want.embed = 0;
    }
    if (st == DSPARK_OK && want.lm_head && o->lm_head) {
        st = check_host(o->lm_head, c, "lm_head", err);
        if (st == DSPARK_OK) st = pack_host(f, o->lm_head, err);
        want.lm_head = 0;
    }
    if (st != DSPARK_OK) return st;
    /* A target that is given must fit, also when nothing is needed of it. */
    if (o->target) {
        int tied, has_config;
        st = want.embed || want.lm_head
                 ? take_target(f, &want, err)
                 : check_config(o->target, c, !own_embed->n_parts || !own_lm_head->n_parts, &tied,
                                &has_config, err);
        return name_target(st, o->target, err);
    }
    if (f->no_embed) want.embed = 0;
    if (want.embed || want.lm_head)
        return dspark__fail(err, DSPARK_EMODEL, want.embed ? "embed_tokens" : "lm_head",
                            "the draft has none of its own: give the target's checkpoint (--target DIR), or the "
                            "host's matrix");
    return DSPARK_OK;
}
