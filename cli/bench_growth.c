/* dspark bench --what growth: how time grows with positions in a call, with the context's length, with layers,
 * with sequences in a batch and with threads, each beside the limit of its run. Short measurements of the other
 * kinds over checkpoints that are made for it; measures nothing itself. */
#include <stdio.h>
#include <string.h>

#include "bench.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* A smaller model whose layers still come from memory: about a quarter of K3's width in all but the entry. */
static const char *const middle[] = {
    "hidden_size=2048", "intermediate_size=8192", "num_attention_heads=16", "vocab_size=32768",
    "mask_token_id=32767"};
/* One layer of K3's attention, with little beside it. */
static const char *const one_layer[] = {
    "num_hidden_layers=1", "intermediate_size=1024", "vocab_size=8192", "mask_token_id=8191"};
/* K3's width, from states to cache. */
static const char *const narrow_taps[] = {"target_layer_ids=[2]"};

static uint64_t tokens[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
static uint64_t contexts[] = {256, 1024, 4096, 16384, 65536, 262144};
static uint64_t sequences[] = {1, 2, 4, 8, 16};
static const int layers[] = {1, 2, 3, 5, 8};

typedef struct growth {
    bench_report *report;
    const bench_args *given;
    bench_args args;           /* of the part that is measured */
    const char *settings[BENCH_MAX_SETTINGS + 8];
} growth;

static void start(growth *g)
{
    g->args = *g->given;
    g->args.contexts.n = g->args.sequences.n = 1;
}

/* The part's checkpoint: `own` settings (a preset of the user's is measured as it is), then one more when it
 * is not NULL, then the user's. */
static void set_checkpoint(growth *g, const char *const *own, size_t n, const char *more)
{
    const args_texts *given = &g->given->settings;
    size_t i, k = 0;
    for (i = 0; !g->given->preset && i < n; i++) g->settings[k++] = own[i];
    if (more) g->settings[k++] = more;
    for (i = 0; i < given->n && k < COUNT(g->settings); i++) g->settings[k++] = given->items[i];
    g->args.settings.items = g->settings;
    g->args.settings.n = k;
}

static dspark_status measure(growth *g, const char *part, int what, dspark_error *err)
{
    bench_report *r = g->report;
    dspark_status st;
    g->args.what = what;
    r->part = part;
    r->args = &g->args;
    st = what == BENCH_CONTEXT ? bench_context(r, err) : bench_draft(r, err);
    r->args = g->given;
    r->part = NULL;
    return st;
}

static dspark_status grow_tokens(growth *g, dspark_error *err)
{
    start(g);
    if (!g->given->tokens_given) g->args.tokens = (bench_list){tokens, COUNT(tokens)};
    g->args.path_given = g->args.no_states = 1;
    g->args.path = DSPARK_PATH_ONEPASS;
    set_checkpoint(g, narrow_taps, COUNT(narrow_taps), NULL);
    return measure(g, "tokens", BENCH_CONTEXT, err);
}

static dspark_status grow_contexts(growth *g, dspark_error *err)
{
    start(g);
    g->args.contexts =
        g->given->contexts_given ? g->given->contexts : (bench_list){contexts, COUNT(contexts)};
    set_checkpoint(g, one_layer, COUNT(one_layer), NULL);
    return measure(g, "contexts", BENCH_ATTENTION, err);
}

static dspark_status grow_layers(growth *g, dspark_error *err)
{
    char setting[64];
    size_t i;
    dspark_status st = DSPARK_OK;
    for (i = 0; st == DSPARK_OK && i < COUNT(layers); i++) {
        start(g);
        snprintf(setting, sizeof setting, "num_hidden_layers=%d", layers[i]);
        set_checkpoint(g, middle, COUNT(middle), setting);
        st = measure(g, "layers", BENCH_DRAFT, err);
    }
    return st;
}

static dspark_status grow_sequences(growth *g, dspark_error *err)
{
    start(g);
    g->args.sequences =
        g->given->sequences_given ? g->given->sequences : (bench_list){sequences, COUNT(sequences)};
    set_checkpoint(g, middle, COUNT(middle), NULL);
    return measure(g, "sequences", BENCH_DRAFT, err);
}

dspark_status bench_growth(bench_report *r, dspark_error *err)
{
    growth g;
    dspark_status st;
    memset(&g, 0, sizeof g);
    g.report = r;
    g.given = r->args;
    st = grow_tokens(&g, err);
    if (st == DSPARK_OK) st = grow_contexts(&g, err);
    if (st == DSPARK_OK) st = grow_layers(&g, err);
    if (st == DSPARK_OK) st = grow_sequences(&g, err);
    return st;
}
