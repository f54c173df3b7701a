/* drafting: opens a drafter with its target, computes a dump's context, prepares draft inputs. */
#include "drafting.h"

#include <float.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "open_model.h"
#include "out.h"
#include "progress.h"

#define BLOCK_SIZE 64u

static const char *const tile_choices[] = {"pow2", "exact", NULL};

void drafting_defaults(drafting_args *a)
{
    memset(a, 0, sizeof *a);
    a->top_p = 1;
}

void drafting_options(args_option to[DRAFTING_OPTIONS], drafting_args *a)
{
    const args_option all[DRAFTING_OPTIONS] = {
        {"target", ARGS_TEXT, &a->target, "DIR",
         "the target's checkpoint: its embedding and LM head are\nborrowed (the draft's own win)", 0, 0,
         NULL, NULL},
        {"prepacked", ARGS_TEXT, &a->prepacked, "FILE",
         "map packed weights from FILE (see dspark pack)", 0, 0, NULL, NULL},
        {"cache-dtype", ARGS_CHOICE, &a->cache_dtype, NULL,
         "format of the context's entries (default bf16)", 0, 0, args_cache_choices, NULL},
        {"tile-scale", ARGS_CHOICE, &a->tile_scale, NULL,
         "how fp8_ds_mla makes its tile scales (default pow2)", 0, 0, tile_choices, &a->tile_given},
        {"n-draft", ARGS_UINT, &a->n_draft, "K",
         "tokens of a block to use, from its start (default all;\nthe whole block is computed anyway)",
         1, 1024, NULL, NULL},
        {"window", ARGS_UINT, &a->window, "W",
         "attend to the last W positions only (default all)", 1, INT64_MAX, NULL, NULL},
        {"temperature", ARGS_NUMBER, &a->temperature, "T",
         "sample the drafts at temperature T (default: greedy)", 0, 0, NULL, &a->sampled},
        {"top-k", ARGS_UINT, &a->top_k, "K", "of the K likeliest only", 1, INT32_MAX, NULL,
         &a->noise_given},
        {"top-p", ARGS_NUMBER, &a->top_p, "P", "of the likeliest that make up P", 0, 0, NULL,
         &a->noise_given},
        {"min-p", ARGS_NUMBER, &a->min_p, "P", "of those at least P times as likely as the first", 0, 0,
         NULL, &a->noise_given},
        {"seed", ARGS_UINT, &a->seed, "N", "seed of the noise (default 0)", 0, INT64_MAX, NULL,
         &a->noise_given},
        {"threads", ARGS_UINT, &a->n_threads, "N", "threads (default: all processors)", 1, 1024, NULL,
         NULL},
        {"isa", ARGS_CHOICE, &a->isa, NULL, "instruction set; same bits (default auto)", 0, 0,
         args_isa_choices, NULL},
    };
    memcpy(to, all, sizeof all);
}

int drafting_check(const args_command *command, const drafting_args *a)
{
    if (a->tile_given && a->cache_dtype != DSPARK_CACHE_FP8_DS_MLA)
        return args_complain(command, "--tile-scale goes with --cache-dtype fp8_ds_mla, not with %s",
                             args_cache_choices[a->cache_dtype]);
    if (!a->sampled && a->noise_given)
        return args_complain(command, "--top-k, --top-p, --min-p and --seed go with --temperature");
    if (a->temperature > FLT_MAX)
        return args_complain(command, "--temperature: %g is not allowed; at most %.3g", a->temperature,
                             (double)FLT_MAX);
    if (a->top_p > 1) return args_complain(command, "--top-p: %g is not allowed; at most 1", a->top_p);
    if (a->min_p > 1) return args_complain(command, "--min-p: %g is not allowed; at most 1", a->min_p);
    return ARGS_RUN;
}

static dspark_status open_block(drafting *d, dspark_error *err)
{
    const drafting_args *a = d->args;
    dspark_model_opts opts;
    dspark_model_opts_init(&opts);
    opts.parts = DSPARK_PART_BLOCK;
    opts.target = a->target;
    opts.prepacked = a->prepacked;
    opts.n_threads = (uint32_t)a->n_threads;
    return open_model(&d->model, a->checkpoint, &opts, "packing", err);
}

dspark_status drafting_open(drafting *d, const drafting_args *a, const drafting *shared,
                            uint32_t n_threads, uint32_t batch, dspark_error *err)
{
    dspark_drafter_opts opts;
    dspark_status st;
    memset(d, 0, sizeof *d);
    d->args = a;
    d->batch = batch;
    d->shared = shared != NULL;
    if (shared)
        d->model = shared->model;
    else if ((st = open_block(d, err)) != DSPARK_OK)
        return st;
    d->config = dspark_model_config(d->model);
    if (a->n_draft > d->config->block_size)
        return out_set_error(err, DSPARK_EINVAL, "--n-draft", "%" PRIu64 " is not allowed; a block of "
                             "this drafter has %u tokens", a->n_draft, d->config->block_size);
    dspark_sampling_init(&d->sampling);
    d->sampling.temperature = (float)a->temperature;
    d->sampling.top_k = (uint32_t)a->top_k;
    d->sampling.top_p = (float)a->top_p;
    d->sampling.min_p = (float)a->min_p;
    if (batch == 0) return DSPARK_OK;
    dspark_drafter_opts_init(&opts);
    opts.isa = (dspark_isa)a->isa;
    opts.n_threads = n_threads;
    opts.max_sequences = batch;
    return dspark_drafter_create(&d->drafter, d->model, &opts, err);
}

/* A cache of at least n_rows entries; a larger one from the dump before stays. */
static dspark_status make_cache(drafting *d, uint64_t n_rows, dspark_error *err)
{
    uint64_t n_blocks = (n_rows + BLOCK_SIZE - 1) / BLOCK_SIZE, i;
    dspark_status st;
    if (d->cache && n_blocks <= d->n_blocks) return DSPARK_OK;
    dspark_cache_free(d->cache);
    free(d->block_table);
    d->cache = NULL;
    d->n_blocks = 0;
    d->block_table = n_blocks <= INT32_MAX ? malloc((size_t)n_blocks * sizeof *d->block_table) : NULL;
    if (!d->block_table)
        return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for %" PRIu64 " rows", n_rows);
    for (i = 0; i < n_blocks; i++) d->block_table[i] = (int32_t)i;
    st = dspark_cache_create(&d->cache, d->model, (dspark_cache_dtype)d->args->cache_dtype, BLOCK_SIZE,
                             n_blocks, NULL, err);
    if (st != DSPARK_OK) return st;
    d->n_blocks = n_blocks;
    d->view = *dspark_cache_get_view(d->cache);
    d->view.tile_scale = (dspark_tile_scale)d->args->tile_scale;
    return DSPARK_OK;
}

dspark_status drafting_load(drafting *d, dump *rows, const char *bar_label, dspark_error *err)
{
    int64_t positions[512], slots[512];
    const uint64_t most = sizeof slots / sizeof *slots;
    uint64_t first, n, i;
    dspark_batch batch;
    progress bar;
    dspark_context *context = dspark_drafter_context(d->drafter);
    dspark_status st = dump_start(rows, 0, 0, &d->start, err);
    if (st == DSPARK_OK) st = dump_check_window(rows, d->start, d->config, err);
    if (st == DSPARK_OK) st = make_cache(d, rows->n_rows, err);
    if (st != DSPARK_OK) return st;
    dspark_batch_init(&batch);
    batch.taps_stride = rows->stride;
    batch.positions = positions;
    batch.slots = slots;
    if (bar_label) progress_start(&bar, bar_label, PROGRESS_ROWS);
    for (first = 0; st == DSPARK_OK && first < rows->n_rows; first += n) {
        double t0 = out_clock();
        n = rows->n_rows - first < most ? rows->n_rows - first : most;
        for (i = 0; i < n; i++) {
            positions[i] = (int64_t)(d->start + first + i);
            slots[i] = (int64_t)(first + i);
        }
        batch.n_tokens = (size_t)n;
        batch.taps = rows->taps + (size_t)first * rows->stride;
        batch.first_row = (size_t)first;
        st = dump_check_rows(rows, first, n, err);
        if (st == DSPARK_OK) st = dspark_context_run(context, &batch, &d->view, NULL, err);
        st = dump_first_fault(rows, d->args->checkpoint, context, &batch, &d->view, st, err);
        d->context_seconds += out_clock() - t0;
        dump_forget_rows(rows, first, n);
        if (st == DSPARK_OK && bar_label && progress_update(&bar, first + n, rows->n_rows))
            st = out_check_interrupt(err);
        if (st == DSPARK_OK) st = out_check_interrupt(err);
    }
    if (bar_label) progress_end(&bar);
    return st == DSPARK_OK ? dump_check_unchanged(rows, err) : st;
}

void drafting_input(const drafting *d, const dump *rows, uint64_t row, dspark_draft_input *in)
{
    dspark_draft_input_init(in);
    in->anchor = dump_token(rows, row);
    in->position = (int64_t)(d->start + row);
    in->n_context = row;
    in->block_table = d->block_table;
    in->n_table = (size_t)d->n_blocks;
    in->window = d->args->window;
    in->n_draft = (uint32_t)d->args->n_draft;
    in->sampling = d->args->sampled ? &d->sampling : NULL;
    in->seed = d->args->seed;
}

void drafting_close(drafting *d)
{
    dspark_drafter_free(d->drafter);
    dspark_cache_free(d->cache);
    if (!d->shared) dspark_model_close(d->model);
    free(d->block_table);
    memset(d, 0, sizeof *d);
}

const char *const drafting_stage_names[DRAFTING_STAGES] = {
    "embedding", "q_a, kv_a", "q_b", "absorb W_UK", "attention", "W_UV", "o", "gate, up", "down",
    "norms, RoPE, SwiGLU", "LM head", "Markov head", "confidence", "choice",
};

uint64_t *drafting_stage(dspark_draft_times *t, size_t stage)
{
    uint64_t *const all[DRAFTING_STAGES] = {
        &t->embed, &t->qkv_a, &t->q_b, &t->absorb, &t->attention, &t->v_up, &t->o, &t->gate_up,
        &t->down, &t->norms, &t->lm_head, &t->markov, &t->confidence, &t->sample,
    };
    return all[stage];
}
