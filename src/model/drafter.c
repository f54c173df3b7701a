/* A drafter: plan, creation, the checks of a call, and its passes. Allocates at creation only. */
#include "model/drafter.h"

#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fpenv.h"
#include "base/status.h"
#include "spec/sample.h"

#define VIEWS (DSPARK__BLOCK_VIEWS + DSPARK__HEADS_VIEWS)

/* ---- plan ---- */

static dspark_context_opts context_opts(const dspark_drafter_opts *o)
{
    dspark_context_opts c = {.struct_size = sizeof c};
    c.isa = o->isa;
    c.n_threads = o->n_threads;
    c.allocator = o->allocator;
    c.max_tokens = o->max_tokens;
    return c;
}

/* Block and heads of n sequences; 0 when something overflows. */
static int plan_block(const dspark_config *c, uint32_t n, uint32_t n_threads, dspark__block_layout *block,
                      dspark__heads_layout *heads, size_t *total)
{
    size_t a, b;
    return dspark__block_plan(block, c, n, n_threads) && dspark__heads_plan(heads, c, n, n_threads) &&
           dspark__workspace_total(block->sizes, DSPARK__BLOCK_VIEWS, &a) &&
           dspark__workspace_total(heads->sizes, DSPARK__HEADS_VIEWS, &b) &&
           dspark__add_size(a, b, total);
}

dspark_status dspark__plan_drafter(const dspark_config *c, const dspark_drafter_opts *o,
                                   dspark_drafter_plan *plan, dspark_error *err)
{
    dspark__block_layout block;
    dspark__heads_layout heads;
    dspark__layout context;
    dspark_context_opts co = context_opts(o);
    const uint32_t most = o->max_sequences ? o->max_sequences : 1;
    uint32_t n = most < DSPARK__MAX_SEQUENCES ? most : DSPARK__MAX_SEQUENCES;
    size_t total = 0;
    dspark_status st;
    memset(plan, 0, sizeof *plan);
    if (o->n_threads == 0)
        return dspark__fail(err, DSPARK_EINVAL, "n_threads", "must be given to plan a drafter");
    /* One row of context must fit beside the block: fewer sequences until it does. */
    for (;; n = (n + 1) / 2) {
        int sized = plan_block(c, n, o->n_threads, &block, &heads, &total);
        uint64_t left = o->workspace_limit > total ? o->workspace_limit - total : 0;
        if (sized && (o->workspace_limit == 0 || left > 0)) {
            co.workspace_limit = o->workspace_limit ? left : 0;
            st = dspark__plan_context(c, &co, &context, err);
            if (st == DSPARK_OK) break;
            if (st != DSPARK_ENOSPACE) return st;
        }
        if (n == 1)
            return dspark__fail(err, DSPARK_ENOSPACE, "workspace_limit",
                                sized ? "one sequence and one row of context need more than %llu bytes "
                                        "(the block alone %zu)"
                                      : "the sizes overflow memory (%llu, %zu)",
                                (unsigned long long)o->workspace_limit, total);
    }
    plan->workspace_bytes = (uint64_t)total + context.total;
    plan->max_sequences = n;
    plan->max_tokens = context.max_tokens;
    plan->n_threads = o->n_threads;
    return DSPARK_OK;
}

/* ---- the object ---- */

/* The context's stages run on the drafter's threads through the host's hook. */
typedef struct relay {
    void (*task)(void *arg, size_t i);
    void *arg;
} relay;

static void relay_task(void *arg, size_t i)
{
    relay *r = arg;
    r->task(r->arg, i);
}

static void run_on_threads(void *user, void (*task)(void *arg, size_t i), void *arg, size_t n_tasks)
{
    relay r = {task, arg};
    dspark__threads_run(user, relay_task, &r, n_tasks);
}

static dspark_status make_context(dspark_drafter *d, const dspark_drafter_opts *o, dspark_error *err)
{
    dspark_context_opts co = context_opts(o);
    dspark_parallel parallel = {d->threads, run_on_threads};
    co.n_threads = d->plan.n_threads;
    co.max_tokens = d->plan.max_tokens;
    co.parallel = &parallel;
    return dspark__context_create(&d->context, d->model, &co, err);
}

static dspark_status take_views(dspark_drafter *d, void *views[VIEWS], dspark_error *err)
{
    size_t sizes[VIEWS];
    memcpy(sizes, d->block.sizes, sizeof d->block.sizes);
    memcpy(sizes + DSPARK__BLOCK_VIEWS, d->heads.sizes, sizeof d->heads.sizes);
    return dspark__workspace_get(&d->workspace, sizes, VIEWS, views, err);
}

dspark_status dspark__drafter_create(dspark_drafter **out, const dspark_model *model,
                                     const dspark_drafter_opts *opts, dspark_error *err)
{
    dspark_status st;
    dspark_allocator a = dspark__allocator_or_default(opts->allocator);
    dspark_drafter_opts o = *opts;
    void *views[VIEWS];
    size_t total;
    *out = NULL;
    if (!(model->parts & DSPARK_PART_BLOCK))
        return dspark__fail(err, DSPARK_EINVAL, "model", "a drafter needs the model opened with "
                                                         "DSPARK_PART_BLOCK");
    dspark_drafter *d = dspark__alloc(&a, sizeof *d, 64);
    if (!d) return dspark__fail_nomem(err, "drafter", sizeof *d);
    memset(d, 0, sizeof *d);
    d->allocator = a;
    d->model = model;
    dspark__workspace_init(&d->workspace, &a);
    if (o.n_threads == 0) o.n_threads = dspark__threads_available();
    st = dspark__kern_select(&d->kern, o.isa, err);
    if (st == DSPARK_OK) st = dspark__plan_drafter(&model->config, &o, &d->plan, err);
    if (st == DSPARK_OK) st = dspark__threads_create(&d->threads, o.n_threads, o.parallel, &a, err);
    if (st == DSPARK_OK) st = make_context(d, &o, err);
    if (st == DSPARK_OK && !plan_block(&model->config, d->plan.max_sequences, o.n_threads, &d->block,
                                       &d->heads, &total))
        st = dspark__fail(err, DSPARK_EINTERNAL, "drafter", "the plan changed");
    if (st == DSPARK_OK) st = take_views(d, views, err);
    if (st != DSPARK_OK) {
        dspark__drafter_free(d);
        return st;
    }
    dspark__workspace_lock(&d->workspace);
    *out = d;
    return DSPARK_OK;
}

void dspark__drafter_free(dspark_drafter *d)
{
    if (!d) return;
    dspark_allocator a = d->allocator;
    dspark__context_free(d->context);
    dspark__threads_free(d->threads);
    dspark__workspace_free(&d->workspace);
    dspark__free(&a, d, sizeof *d);
}

dspark_context *dspark__drafter_context(dspark_drafter *d)
{
    return d->context;
}

const dspark_model *dspark__drafter_model(const dspark_drafter *d)
{
    return d->model;
}

/* ---- checking a call ---- */

static dspark_status check_slots(const dspark_draft_input *in, size_t i, const dspark__cache_map *map,
                                 dspark_error *err)
{
    for (uint64_t k = 0; k < in->n_context; k++)
        if (in->slots[k] < 0 || in->slots[k] >= map->n_slots)
            return dspark__fail(err, DSPARK_ERANGE, "slots",
                                "sequence %zu, entry %llu: slot %lld, the cache holds 0 to %lld", i,
                                (unsigned long long)k, (long long)in->slots[k],
                                (long long)map->n_slots - 1);
    return DSPARK_OK;
}

static dspark_status check_table(const dspark_draft_input *in, size_t i, const dspark__cache_map *map,
                                 dspark_error *err)
{
    uint64_t need = dspark__ceil_div_u64(in->n_context, map->block_size);
    if (!in->block_table)
        return dspark__fail(err, DSPARK_EINVAL, "slots", "sequence %zu has %llu entries, and neither slots "
                                                         "nor a block table",
                            i, (unsigned long long)in->n_context);
    if (need > in->n_table)
        return dspark__fail(err, DSPARK_ERANGE, "block_table",
                            "sequence %zu: %llu entries need %llu blocks of %u, the table has %zu", i,
                            (unsigned long long)in->n_context, (unsigned long long)need, map->block_size,
                            in->n_table);
    for (uint64_t k = 0; k < need; k++)
        if (in->block_table[k] < 0 ||
            (int64_t)in->block_table[k] >= map->n_slots / (int64_t)map->block_size)
            return dspark__fail(err, DSPARK_ERANGE, "block_table",
                                "sequence %zu, place %llu: block %d, the cache holds 0 to %lld", i,
                                (unsigned long long)k, (int)in->block_table[k],
                                (long long)(map->n_slots / (int64_t)map->block_size) - 1);
    return DSPARK_OK;
}

static dspark_status check_forced(const dspark_draft_input *in, size_t i, const dspark_config *c,
                                  dspark_error *err)
{
    uint32_t n = in->n_draft ? in->n_draft : c->block_size;
    for (uint32_t k = 0; in->forced && k < n; k++)
        if (in->forced[k] < 0 || (uint32_t)in->forced[k] >= c->vocab_size)
            return dspark__fail(err, DSPARK_ERANGE, "forced",
                                "sequence %zu, token %u: %d is no id, the vocabulary has 0 to %u", i, k,
                                (int)in->forced[k], c->vocab_size - 1);
    return DSPARK_OK;
}

static dspark_status check_input(const dspark_drafter *d, const dspark_draft_input *in, size_t i,
                                 const dspark_draft_output *out, const dspark__cache_map *map,
                                 dspark_error *err)
{
    const dspark_config *c = &d->model->config;
    if (in->anchor < 0 || (uint64_t)in->anchor >= c->vocab_size)
        return dspark__fail(err, DSPARK_ERANGE, "anchor",
                            "sequence %zu: %lld is no id, the vocabulary has 0 to %u", i,
                            (long long)in->anchor, c->vocab_size - 1);
    if (in->position < 0 || (uint64_t)in->position >= c->max_positions)
        return dspark__fail(err, DSPARK_ERANGE, "position",
                            "sequence %zu: position %lld, the model has 0 to %llu", i,
                            (long long)in->position, (unsigned long long)c->max_positions - 1);
    if (in->n_draft > c->block_size)
        return dspark__fail(err, DSPARK_EINVAL, "n_draft",
                            "sequence %zu asks for %u tokens, a block has %u", i, in->n_draft, c->block_size);
    if (in->n_context > (uint64_t)PTRDIFF_MAX / sizeof(int64_t))
        return dspark__fail(err, DSPARK_EINVAL, "n_context", "sequence %zu: %llu entries overflow memory", i,
                            (unsigned long long)in->n_context);
    if (!out->tokens) return dspark__fail(err, DSPARK_EINVAL, "tokens", "sequence %zu has no place for "
                                                                        "tokens", i);
    for (uint32_t l = 0; in->n_context && l < map->n_layers; l++)
        if (!map->layers[l])
            return dspark__fail(err, DSPARK_EINVAL, "cache", "layer %u has no memory: a block attends to "
                                                             "every layer's entries", l);
    dspark_status st = check_forced(in, i, c, err);
    if (st == DSPARK_OK && in->sampling) st = dspark__sampling_check(in->sampling, err);
    if (st != DSPARK_OK || in->n_context == 0) return st;
    return in->slots ? check_slots(in, i, map, err) : check_table(in, i, map, err);
}

/* ---- passes ---- */

/* Tokens that may be given: wanted, and not beyond the model's last position. */
static uint32_t count_tokens(const dspark_draft_input *in, const dspark_config *c)
{
    uint64_t left = c->max_positions - 1 - (uint64_t)in->position;
    uint32_t n = in->n_draft ? in->n_draft : c->block_size;
    return n < left ? n : (uint32_t)left;
}

static void describe(dspark__block_row *row, const dspark_draft_input *in)
{
    row->anchor = in->anchor;
    row->position = in->position;
    row->context.slots = in->slots;
    row->context.block_table = in->block_table;
    row->context.n = in->window && in->window < in->n_context ? in->window : in->n_context;
    row->context.first = in->n_context - row->context.n;
}

static dspark_status run_pass(dspark_drafter *d, const dspark__cache_map *map,
                              const dspark_draft_input *in, dspark_draft_output *out, uint32_t n,
                              dspark_error *err)
{
    const dspark_config *c = &d->model->config;
    dspark__block_row rows[DSPARK__MAX_SEQUENCES];
    dspark_status status[DSPARK__MAX_SEQUENCES];
    uint32_t n_tokens[DSPARK__MAX_SEQUENCES], i;
    void *views[VIEWS];
    dspark_status st = take_views(d, views, err);
    if (st != DSPARK_OK) return st;
    for (i = 0; i < n; i++) {
        describe(&rows[i], &in[i]);
        n_tokens[i] = count_tokens(&in[i], c);
        status[i] = DSPARK_OK;
    }
    dspark__block block = {d->model, &d->kern, d->threads, &d->block, map, rows, n, views, &d->times,
                           status};
    dspark__block_forward(&block);
    for (i = 0; i < n; i++) {
        out[i].status = status[i];
        if (status[i] == DSPARK_OK && n_tokens[i] == 0) out[i].status = DSPARK_ERANGE;
        out[i].beyond_original = c->rope_type == DSPARK_ROPE_YARN &&
                                 (uint64_t)in[i].position + c->block_size > c->rope_original_max_positions;
    }
    dspark__heads heads = {d->model, &d->kern, d->threads, &d->heads, views[DSPARK__BLOCK_NORMED], n,
                           in, out, n_tokens, views + DSPARK__BLOCK_VIEWS, &d->times};
    dspark__heads_run(&heads);
    return DSPARK_OK;
}

void dspark__draft_reset(dspark_draft_output *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        out[i].n_tokens = 0;
        out[i].beyond_original = 0;
        out[i].status = DSPARK_EINVAL; /* until it has been drafted */
    }
}

dspark_status dspark__draft_check(const dspark_drafter *d, const dspark__cache_map *map,
                                  const dspark_draft_input *in, const dspark_draft_output *out, size_t n,
                                  size_t first, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    for (size_t i = 0; st == DSPARK_OK && i < n; i++)
        st = check_input(d, &in[i], first + i, &out[i], map, err);
    return st;
}

dspark_status dspark__draft_run(dspark_drafter *d, const dspark__cache_map *map,
                                const dspark_draft_input *in, dspark_draft_output *out, size_t n,
                                dspark_error *err)
{
    uint64_t t0 = dspark__now();
    dspark_status st = DSPARK_OK;
    memset(&d->times, 0, sizeof d->times);
    unsigned env = dspark__fpenv_enter();
    for (size_t i = 0; st == DSPARK_OK && i < n; i += d->plan.max_sequences) {
        size_t left = n - i;
        st = run_pass(d, map, in + i, out + i,
                      left < d->plan.max_sequences ? (uint32_t)left : d->plan.max_sequences, err);
    }
    dspark__fpenv_leave(env);
    d->times.total = dspark__now() - t0;
    return st;
}

dspark_status dspark__draft(dspark_drafter *d, const dspark_cache_view *view,
                            const dspark_draft_input *in, dspark_draft_output *out, size_t n,
                            dspark_error *err)
{
    dspark__cache_map map;
    dspark__draft_reset(out, n);
    dspark_status st = dspark__cache_map_init(&map, view, &d->model->config, err);
    if (st == DSPARK_OK) st = dspark__draft_check(d, &map, in, out, n, 0, err);
    return st == DSPARK_OK ? dspark__draft_run(d, &map, in, out, n, err) : st;
}

/* ---- the LM head alone ---- */

dspark_status dspark__head_logits(dspark_drafter *d, const void *hidden, size_t stride, size_t n,
                                  uint16_t *logits, dspark_error *err)
{
    const dspark_config *c = &d->model->config;
    const size_t row = (size_t)c->hidden_size * 2, most = (size_t)d->plan.max_sequences * c->block_size;
    const unsigned char *x = hidden;
    void *views[VIEWS];
    if (stride == 0) stride = row;
    if (n > 1 && stride < row)
        return dspark__fail(err, DSPARK_EINVAL, "hidden", "a stride of %zu bytes is below the row's %zu",
                            stride, row);
    for (size_t i = 0; i < n; i++)
        if (!d->kern.finite_bf16(x + i * stride, c->hidden_size))
            return dspark__fail(err, DSPARK_ENONFINITE, "hidden", "row %zu is not finite", i);
    dspark_status st = take_views(d, views, err);
    if (st != DSPARK_OK) return st;
    unsigned env = dspark__fpenv_enter();
    for (size_t i = 0; i < n; i += most) {
        size_t m = n - i < most ? n - i : most;
        dspark__heads heads = {.model = d->model, .kern = &d->kern, .threads = d->threads,
                               .layout = &d->heads, .views = views + DSPARK__BLOCK_VIEWS};
        dspark__heads_logits(&heads, x + i * stride, stride, m, logits + i * c->vocab_size);
    }
    dspark__fpenv_leave(env);
    return DSPARK_OK;
}
