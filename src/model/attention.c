/* Latent attention of one layer: absorbed queries against the context's entries and the block's own,
 * piece by piece with an online softmax (docs/numerics.md). Query rows are independent, so how they are
 * grouped, and on which thread, cannot be seen in the result. Only reads entries that are in use. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "model/block.h"

/* Query rows that go through one product: their accumulators stay in the L2 cache beside the panels. */
#define GROUP_ROWS 64u

typedef struct sizes {
    size_t width, latent;  /* of an entry */
    size_t v_panels;       /* panels of latent outputs */
    size_t rows;           /* most query rows of one sequence */
    size_t k_bytes, v_bytes, score_bytes, sum_bytes, p_bytes, state_bytes, entry_bytes;
    size_t attend_bytes;   /* in place of all these but entries and one state */
    size_t total;
} sizes;

static size_t round_up(size_t n)
{
    return (n + 63) / 64 * 64;
}

/* The config's products have been checked by dspark__block_plan. */
static sizes measure(const dspark_config *c)
{
    sizes z = {0};
    z.latent = c->kv_lora_rank;
    z.width = z.latent + c->qk_rope_head_dim;
    z.v_panels = (z.latent + DSPARK__PANEL - 1) / DSPARK__PANEL;
    z.rows = (size_t)c->n_heads * c->block_size;
    z.k_bytes = round_up(dspark__k_panels_elements(z.latent, c->qk_rope_head_dim) * 2);
    z.v_bytes = round_up(dspark__v_panels_elements(z.latent) * 2);
    z.score_bytes = DSPARK__PIECE * GROUP_ROWS * sizeof(float);
    z.p_bytes = DSPARK__PIECE * GROUP_ROWS * sizeof(uint16_t);
    z.sum_bytes = round_up(z.rows * z.v_panels * DSPARK__PANEL * sizeof(float));
    z.state_bytes = round_up(z.rows * sizeof(float));
    z.entry_bytes = round_up(DSPARK__PIECE * z.width * 2);
    z.attend_bytes = round_up(dspark__attend_bytes(z.rows, z.latent, c->qk_rope_head_dim));
    z.total = z.k_bytes + z.v_bytes + z.score_bytes + z.p_bytes + z.sum_bytes + 2 * z.state_bytes;
    if (z.total < z.attend_bytes) z.total = z.attend_bytes;
    z.total += z.entry_bytes + z.state_bytes;
    return z;
}

size_t dspark__attention_scratch(const dspark_config *c)
{
    return measure(c).total;
}

typedef struct job {
    const dspark__block *b;
    uint32_t layer;
    uint32_t shares;      /* units of one sequence */
    size_t share_rows;    /* query rows of a unit */
    sizes z;
    atomic_size_t next;
} job;

/* Entries in use: where they lie in the cache (or the block's own, bf16 already). */
typedef struct places {
    size_t n, n_context;
    const void *at[DSPARK__PIECE];
} places;

/* One thread's memory, and what it is working on. */
typedef struct worker {
    const job *j;
    const dspark__block_row *seq;
    uint32_t s;                 /* the sequence's number */
    size_t row0, n_rows;        /* query rows of the unit */
    uint64_t n_entries;         /* context and block */
    uint16_t *k, *v, *p, *decoded;
    float *scores, *sum, *m, *l;
    unsigned char *attend;
    uint32_t *n_valid;          /* [n_rows] */
    places pieces[2];           /* of the piece, and of the one after it */
    const void *entries[DSPARK__PIECE];
} worker;

static uint16_t *own_entry(const worker *w, uint64_t i)
{
    const dspark__block *b = w->j->b;
    uint16_t *entries = b->views[DSPARK__BLOCK_ENTRIES];
    return entries + ((size_t)w->s * b->model->config.block_size + (size_t)i) * w->j->z.width;
}

/* Find the piece [first, ..) of the list; n is 0 behind its end. */
static void locate(const worker *w, uint64_t first, places *p)
{
    const dspark__cache_map *map = w->j->b->cache;
    const dspark__context_list *c = &w->seq->context;
    const unsigned char *layer = map->layers[w->j->layer];
    const uint64_t left = first < w->n_entries ? w->n_entries - first : 0;
    const uint64_t context = first < c->n ? c->n - first : 0;
    p->n = left < DSPARK__PIECE ? (size_t)left : DSPARK__PIECE;
    p->n_context = context < p->n ? (size_t)context : p->n;
    for (size_t i = 0, run; i < p->n_context; i += run) { /* a page at a time: one division */
        uint64_t at = c->first + first + i;
        const unsigned char *from =
            layer + dspark__cache_offset(map, dspark__context_slot(c, map->block_size, at));
        run = c->slots ? 1 : map->block_size - (size_t)(at % map->block_size);
        if (run > p->n_context - i) run = p->n_context - i;
        for (size_t j = 0; j < run; j++) p->at[i + j] = from + j * map->entry_stride;
    }
    for (size_t i = p->n_context; i < p->n; i++) p->at[i] = own_entry(w, first + i - c->n);
}

/* The entries of a piece as bf16: those of another dtype are expanded. */
static const void *const *expand(worker *w, const places *p)
{
    const dspark__block *b = w->j->b;
    if (b->cache->dtype == DSPARK_CACHE_BF16) return p->at;
    for (size_t i = 0; i < p->n; i++) {
        uint16_t *to = w->decoded + i * w->j->z.width;
        w->entries[i] = i < p->n_context ? to : p->at[i];
        if (i < p->n_context) dspark__cache_decode(b->cache, b->kern, w->j->layer, p->at[i], to);
    }
    return w->entries;
}

/* Entries of the piece that each row of a group sees. */
static void count_valid(const worker *w, uint64_t first, size_t row, size_t n, uint32_t *n_valid)
{
    const dspark_config *c = &w->j->b->model->config;
    for (size_t i = 0; i < n; i++) {
        uint64_t sees = w->n_entries;
        if (c->causal) sees = w->seq->context.n + (w->row0 + row + i) % c->block_size + 1;
        uint64_t left = sees > first ? sees - first : 0;
        n_valid[i] = left < DSPARK__PIECE ? (uint32_t)left : DSPARK__PIECE;
    }
}

/* All pieces through the level's own kernel. */
static void run_fused(worker *w, uint16_t *latent)
{
    const dspark__block *b = w->j->b;
    const sizes *z = &w->j->z;
    const uint16_t *query = (const uint16_t *)b->views[DSPARK__BLOCK_QUERY] +
                            ((size_t)w->s * z->rows + w->row0) * z->width;
    const dspark__attend t = {query, z->width * 2, w->n_rows, z->latent, z->width - z->latent,
                              b->model->block.softmax_scale, w->attend};
    b->kern->attend_begin(&t);
    locate(w, 0, &w->pieces[0]);
    for (uint64_t first = 0, i = 0; first < w->n_entries; first += DSPARK__PIECE, i++) {
        const places *now = &w->pieces[i % 2];
        places *next = &w->pieces[(i + 1) % 2];
        locate(w, first + DSPARK__PIECE, next);
        count_valid(w, first, 0, w->n_rows, w->n_valid);
        const dspark__attend_entries e = {expand(w, now), now->n, w->n_valid, first == 0,
                                          next->at, next->n_context, b->cache->entry_bytes};
        b->kern->attend_piece(&t, &e);
    }
    b->kern->attend_end(&t, latent, z->latent);
}

/* One piece for one group of rows. */
static void run_group(worker *w, uint64_t first, size_t n, size_t row, size_t n_rows)
{
    const dspark__block *b = w->j->b;
    const sizes *z = &w->j->z;
    uint32_t n_valid[GROUP_ROWS];
    float a[GROUP_ROWS];
    float *sum = w->sum + row * z->v_panels * DSPARK__PANEL;
    const uint16_t *query = (const uint16_t *)b->views[DSPARK__BLOCK_QUERY] +
                            ((size_t)w->s * z->rows + w->row0 + row) * z->width;
    dspark__gemm_bf16 g = {.x = query, .x_stride = z->width * 2, .n_rows = n_rows, .panels = w->k,
                           .panel_stride = dspark__panel_elements(z->width),
                           .n_panels = (n + DSPARK__PANEL - 1) / DSPARK__PANEL, .k = z->width,
                           .acc = w->scores, .first = 1};
    b->kern->gemm_bf16(&g);
    count_valid(w, first, row, n_rows, n_valid);
    dspark__softmax_piece s = {w->scores, n_rows, n_valid, b->model->block.softmax_scale, w->m + row,
                               w->l + row, a, w->p};
    b->kern->softmax_piece(&s);
    if (first > 0) b->kern->scale_rows(sum, a, z->v_panels, n_rows);
    dspark__gemm_bf16 pv = {.x = w->p, .x_stride = DSPARK__PIECE * 2, .n_rows = n_rows,
                            .panels = w->v, .panel_stride = dspark__panel_elements(DSPARK__PIECE),
                            .n_panels = z->v_panels, .k = (n + 1) / 2 * 2, .acc = sum,
                            .first = first == 0};
    b->kern->gemm_bf16(&pv);
}

static void run_rows(worker *w)
{
    const dspark__block *b = w->j->b;
    const sizes *z = &w->j->z;
    uint16_t *latent = (uint16_t *)b->views[DSPARK__BLOCK_LATENT] +
                       ((size_t)w->s * z->rows + w->row0) * z->latent;
    if (b->kern->attend_piece && z->width % 2 == 0) {
        run_fused(w, latent);
        return;
    }
    for (size_t i = 0; i < w->n_rows; i++) {
        w->m[i] = -INFINITY;
        w->l[i] = 0;
    }
    for (uint64_t first = 0; first < w->n_entries; first += DSPARK__PIECE) {
        locate(w, first, &w->pieces[0]);
        const size_t n = w->pieces[0].n;
        dspark__pack_entries pack = {expand(w, &w->pieces[0]), n, z->latent, z->width - z->latent, w->k, w->v};
        b->kern->pack_entries(&pack);
        for (size_t row = 0; row < w->n_rows; row += GROUP_ROWS)
            run_group(w, first, n, row, w->n_rows - row < GROUP_ROWS ? w->n_rows - row : GROUP_ROWS);
    }
    for (size_t row = 0; row < w->n_rows; row += GROUP_ROWS)
        b->kern->attend_finish(latent + row * z->latent, z->latent,
                               w->sum + row * z->v_panels * DSPARK__PANEL, w->l + row,
                               w->n_rows - row < GROUP_ROWS ? w->n_rows - row : GROUP_ROWS, z->latent);
}

static void cut_scratch(worker *w, unsigned char *at)
{
    const sizes *z = &w->j->z;
    w->decoded = (uint16_t *)(void *)at;
    w->n_valid = (uint32_t *)(void *)(at += z->entry_bytes);
    w->attend = at += z->state_bytes;
    w->k = (uint16_t *)(void *)at;
    w->v = (uint16_t *)(void *)(at += z->k_bytes);
    w->scores = (float *)(void *)(at += z->v_bytes);
    w->p = (uint16_t *)(void *)(at += z->score_bytes);
    w->sum = (float *)(void *)(at += z->p_bytes);
    w->m = (float *)(void *)(at += z->sum_bytes);
    w->l = (float *)(void *)(at += z->state_bytes);
}

static void run_task(void *arg, size_t number)
{
    job *j = arg;
    const dspark__block *b = j->b;
    worker w = {.j = j};
    cut_scratch(&w, (unsigned char *)b->views[DSPARK__BLOCK_SCRATCH] + number * b->layout->scratch_bytes);
    for (;;) {
        size_t unit = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
        if (unit >= (size_t)b->n * j->shares) return;
        w.s = (uint32_t)(unit / j->shares);
        w.seq = &b->rows[w.s];
        w.row0 = unit % j->shares * j->share_rows;
        w.n_rows = j->z.rows - w.row0 < j->share_rows ? j->z.rows - w.row0 : j->share_rows;
        w.n_entries = w.seq->context.n + b->model->config.block_size;
        run_rows(&w);
    }
}

void dspark__block_attention(const dspark__block *b, uint32_t layer)
{
    const dspark_config *c = &b->model->config;
    job j = {.b = b, .layer = layer, .z = measure(c)};
    double work = 0;
    for (uint32_t s = 0; s < b->n; s++)
        work += (double)j.z.rows * (double)(b->rows[s].context.n + c->block_size) *
                (double)(j.z.width + j.z.latent);
    /* Every unit packs the entries for itself: no more units than threads have use for. */
    size_t threads = dspark__threads_worth(b->threads, (size_t)b->n * c->n_heads, work);
    size_t shares = (threads + b->n - 1) / b->n;
    size_t heads = (c->n_heads + shares - 1) / shares;
    j.share_rows = heads * c->block_size;
    j.shares = (uint32_t)((c->n_heads + heads - 1) / heads);
    atomic_init(&j.next, 0);
    dspark__threads_run(b->threads, run_task, &j, threads);
}
