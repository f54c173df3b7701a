/* The block forward: anchor and masks of each sequence through the draft's layers. One stage after the
 * other, each shared out among the threads by rows, heads or panels; no stage splits a sum. */
#include <float.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/workspace.h"
#include "model/block.h"

/* What one element of a norm, a rotation or a sum costs, in multiply-adds of a product. */
#define ELEMENT_COST 8.0
/* Heads whose absorbed weights one thread reads in one go: half a MB of K3's. */
#define HEADS_OF_A_UNIT 4u

uint64_t dspark__now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- sizes ---- */

int dspark__block_plan(dspark__block_layout *out, const dspark_config *c, uint32_t n_sequences,
                       uint32_t n_threads)
{
    const size_t width = (size_t)c->kv_lora_rank + c->qk_rope_head_dim, heads = c->n_heads;
    size_t m, head_rows, total, *s = out->sizes;
    memset(out, 0, sizeof *out);
    out->n_sequences = n_sequences;
    out->n_threads = n_threads;
    if (!dspark__mul3_size(n_sequences, c->block_size, 1, &m) || !dspark__mul3_size(m, heads, 1, &head_rows)) return 0;
    if (!dspark__mul3_size(m, c->hidden_size, 2, &s[DSPARK__BLOCK_RESIDUAL]) ||
        !dspark__mul3_size(m, c->q_lora_rank + width, 2, &s[DSPARK__BLOCK_QKV]) ||
        !dspark__mul3_size(head_rows, (size_t)c->qk_nope_head_dim + c->qk_rope_head_dim, 2, &s[DSPARK__BLOCK_Q]) ||
        !dspark__mul3_size(head_rows, width, 2, &s[DSPARK__BLOCK_QUERY]) ||
        !dspark__mul3_size(head_rows, c->kv_lora_rank, 2, &s[DSPARK__BLOCK_LATENT]) ||
        !dspark__mul3_size(m, width, 2, &s[DSPARK__BLOCK_ENTRIES]) ||
        !dspark__mul3_size(head_rows, c->v_head_dim, 2, &s[DSPARK__BLOCK_OUT]) ||
        !dspark__mul3_size(m, 2 * (size_t)c->intermediate_size, 2, &s[DSPARK__BLOCK_MLP]) ||
        !dspark__mul3_size(m, c->qk_rope_head_dim, sizeof(float), &s[DSPARK__BLOCK_ROPE]))
        return 0;
    s[DSPARK__BLOCK_NORMED] = s[DSPARK__BLOCK_DELTA] = s[DSPARK__BLOCK_RESIDUAL];
    /* What attention keeps of one sequence's queries and their sums, rounded up: its largest part. */
    if (!dspark__mul3_size(head_rows + 16, width + DSPARK__PANEL, 16, &total)) return 0;
    size_t linear = dspark__merged_linear_scratch(m), attention = dspark__attention_scratch(c);
    out->scratch_bytes = ((linear > attention ? linear : attention) + 63) / 64 * 64;
    if (!dspark__mul3_size(out->scratch_bytes, n_threads, 1, &s[DSPARK__BLOCK_SCRATCH])) return 0;
    return dspark__workspace_total(s, DSPARK__BLOCK_VIEWS, &total);
}

/* ---- what a stage needs to know ---- */

typedef struct stage {
    const dspark__block *b;
    const dspark_config *c;
    uint32_t layer;
    size_t m;              /* rows */
    const uint16_t *norm;  /* weights of the norm that this stage ends with */
    atomic_size_t next;
} stage;

static uint16_t *view(const dspark__block *b, int which)
{
    return b->views[which];
}

static void *scratch_of(const dspark__block *b, size_t worker)
{
    return (unsigned char *)b->views[DSPARK__BLOCK_SCRATCH] + worker * b->layout->scratch_bytes;
}

static void run_units(stage *s, void (*task)(void *, size_t), size_t n_units, double work)
{
    atomic_init(&s->next, 0);
    dspark__threads_run(s->b->threads, task, s, dspark__threads_worth(s->b->threads, n_units, work));
}

static size_t take_unit(stage *s)
{
    return atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
}

/* ---- rows ---- */

/* Row i has met a number that is none. A norm of finite numbers whose squares overflow would go on with
 * zeros, and an fp8 entry with what infinity saturates to: NaN in the residual stays to the end. */
static void spoil_row(const dspark__block *b, size_t i)
{
    const size_t h = b->model->config.hidden_size;
    view(b, DSPARK__BLOCK_RESIDUAL)[i * h] = 0x7fc0;
    view(b, DSPARK__BLOCK_NORMED)[i * h] = 0x7fc0;
}

/* Embedding row of anchor or mask, its rotation, and the first norm. */
static void embed_task(void *arg, size_t worker)
{
    stage *s = arg;
    const dspark__block *b = s->b;
    const dspark_config *c = s->c;
    const dspark__table *embed = &b->model->block.embed;
    const size_t h = c->hidden_size;
    (void)worker;
    for (size_t i; (i = take_unit(s)) < s->m;) {
        const dspark__block_row *row = &b->rows[i / c->block_size];
        size_t k = i % c->block_size;
        uint64_t id = k == 0 ? (uint64_t)row->anchor : c->mask_token_id;
        uint64_t position = (uint64_t)row->position + k;
        float *cos = (float *)b->views[DSPARK__BLOCK_ROPE] + i * c->qk_rope_head_dim;
        uint16_t *x = view(b, DSPARK__BLOCK_RESIDUAL) + i * h;
        memcpy(x, embed->data + id * embed->row_stride, h * 2);
        if (position >= c->max_positions) position = c->max_positions - 1;
        dspark__rope_row(&b->model->rope, b->kern, (int64_t)position, cos, cos + c->qk_rope_head_dim / 2);
        float sum = b->kern->rmsnorm_bf16(view(b, DSPARK__BLOCK_NORMED) + i * h, x, s->norm, h,
                                          c->rms_norm_eps);
        if (!(sum <= FLT_MAX)) spoil_row(b, i);
    }
}

/* residual += delta, then the norm that follows. */
static void add_norm_task(void *arg, size_t worker)
{
    stage *s = arg;
    const dspark__block *b = s->b;
    const size_t h = s->c->hidden_size;
    (void)worker;
    for (size_t i; (i = take_unit(s)) < s->m;) {
        uint16_t *x = view(b, DSPARK__BLOCK_RESIDUAL) + i * h;
        b->kern->add_bf16(x, x, view(b, DSPARK__BLOCK_DELTA) + i * h, h);
        float sum = b->kern->rmsnorm_bf16(view(b, DSPARK__BLOCK_NORMED) + i * h, x, s->norm, h,
                                          s->c->rms_norm_eps);
        if (!(sum <= FLT_MAX)) spoil_row(b, i);
    }
}

/* Norms of q and of the latent, rotation of the key, and the row's own entry as a cache would give it
 * back. */
static void entry_task(void *arg, size_t worker)
{
    stage *s = arg;
    const dspark__block *b = s->b;
    const dspark_config *c = s->c;
    const dspark_model *m = b->model;
    const size_t rq = c->q_lora_rank, latent = c->kv_lora_rank, rope = c->qk_rope_head_dim;
    const size_t width = latent + rope;
    for (size_t i; (i = take_unit(s)) < s->m;) {
        uint16_t *q = view(b, DSPARK__BLOCK_QKV) + i * (rq + width), *kv = q + rq;
        const float *cos = (const float *)b->views[DSPARK__BLOCK_ROPE] + i * rope;
        uint16_t *entry = view(b, DSPARK__BLOCK_ENTRIES) + i * width;
        float q_sum = b->kern->rmsnorm_bf16(q, q, m->block.q_a_norm + s->layer * rq, rq,
                                            c->rms_norm_eps);
        float kv_sum = b->kern->rmsnorm_bf16(entry, kv, m->kv_a_norm + s->layer * latent, latent,
                                             c->rms_norm_eps);
        b->kern->rope_bf16(entry + latent, kv + latent, cos, cos + rope / 2, rope / 2);
        if (!(q_sum <= FLT_MAX) || !(kv_sum <= FLT_MAX) || !b->kern->finite_bf16(entry, width))
            spoil_row(b, i);
        if (b->cache->dtype == DSPARK_CACHE_BF16) continue;
        unsigned char *stored = scratch_of(b, worker);
        dspark__cache_encode(b->cache, b->kern, s->layer, stored, entry);
        dspark__cache_decode(b->cache, b->kern, s->layer, stored, entry);
    }
}

static void swiglu_task(void *arg, size_t worker)
{
    stage *s = arg;
    const dspark__block *b = s->b;
    const size_t f = s->c->intermediate_size;
    (void)worker;
    for (size_t i; (i = take_unit(s)) < s->m;) {
        uint16_t *gate = view(b, DSPARK__BLOCK_MLP) + i * 2 * f;
        b->kern->silu_mul(gate, gate, gate + f, f);
    }
}

/* ---- heads ---- */

/* The heads [*first, *end) of the next unit; 0 when none is left. Their weights follow each other in
 * memory, so a unit of several is one stream. */
static int take_heads(stage *s, size_t *first, size_t *end)
{
    *first = take_unit(s) * HEADS_OF_A_UNIT;
    *end = *first + HEADS_OF_A_UNIT < s->c->n_heads ? *first + HEADS_OF_A_UNIT : s->c->n_heads;
    return *first < s->c->n_heads;
}

static size_t count_head_units(const dspark_config *c)
{
    return (c->n_heads + HEADS_OF_A_UNIT - 1) / HEADS_OF_A_UNIT;
}

/* The weights that a unit of heads up to `end` goes on with after this one, or NULL. */
static const void *next_head(const stage *s, const dspark__merged_linear *ml, size_t head, size_t end)
{
    return head + 1 < end ? ml->shards[s->layer * s->c->n_heads + head + 1].codes : NULL;
}

/* Queries of one head: the nope part through W_UK, the rope part rotated. */
static void absorb_head(const stage *s, size_t head, size_t end, void *scratch)
{
    const dspark__block *b = s->b;
    const dspark_config *c = s->c;
    const dspark__merged_linear *uk = &b->model->block.w_uk;
    const size_t p = c->qk_nope_head_dim, rope = c->qk_rope_head_dim, latent = c->kv_lora_rank;
    const size_t width = latent + rope, n = c->block_size, q_row = c->n_heads * (p + rope);
    const uint32_t shard = s->layer * c->n_heads + (uint32_t)head;
    for (size_t seq = 0; seq < b->n; seq++) {
        const uint16_t *q = view(b, DSPARK__BLOCK_Q) + seq * n * q_row + head * (p + rope);
        uint16_t *query = view(b, DSPARK__BLOCK_QUERY) + (seq * c->n_heads + head) * n * width;
        dspark__merged_linear_rows_then(uk, b->kern, shard, 0, uk->shards[shard].n_panels, q, q_row * 2, n,
                                        scratch, query, width, next_head(s, uk, head, end));
        for (size_t i = 0; i < n; i++) {
            const float *cos = (const float *)b->views[DSPARK__BLOCK_ROPE] + (seq * n + i) * rope;
            b->kern->rope_bf16(query + i * width + latent, q + i * q_row + p, cos, cos + rope / 2,
                               rope / 2);
        }
    }
}

static void absorb_task(void *arg, size_t worker)
{
    stage *s = arg;
    for (size_t head, end; take_heads(s, &head, &end);)
        for (; head < end; head++) absorb_head(s, head, end, scratch_of(s->b, worker));
}

/* What a head found, through W_UV. */
static void v_up_head(const stage *s, size_t head, size_t end, void *scratch)
{
    const dspark__block *b = s->b;
    const dspark_config *c = s->c;
    const dspark__merged_linear *uv = &b->model->block.w_uv;
    const size_t latent = c->kv_lora_rank, v = c->v_head_dim, n = c->block_size;
    const uint32_t shard = s->layer * c->n_heads + (uint32_t)head;
    for (size_t seq = 0; seq < b->n; seq++)
        dspark__merged_linear_rows_then(
            uv, b->kern, shard, 0, uv->shards[shard].n_panels,
            view(b, DSPARK__BLOCK_LATENT) + (seq * c->n_heads + head) * n * latent, latent * 2, n,
            scratch, view(b, DSPARK__BLOCK_OUT) + (seq * n * c->n_heads + head) * v, c->n_heads * v,
            next_head(s, uv, head, end));
}

static void v_up_task(void *arg, size_t worker)
{
    stage *s = arg;
    for (size_t head, end; take_heads(s, &head, &end);)
        for (; head < end; head++) v_up_head(s, head, end, scratch_of(s->b, worker));
}

/* ---- layers ---- */

static void run_linears(const stage *s, const dspark__linear *linears, uint32_t n)
{
    dspark__linears_run(s->b->threads, s->b->kern, linears, n, s->m, s->b->views[DSPARK__BLOCK_SCRATCH],
                        s->b->layout->scratch_bytes);
}

static void run_attention(stage *s, uint64_t *t0)
{
    const dspark__block *b = s->b;
    const dspark_config *c = s->c;
    const dspark_model *m = b->model;
    const size_t h = c->hidden_size, rq = c->q_lora_rank, m_rows = s->m;
    const size_t width = (size_t)c->kv_lora_rank + c->qk_rope_head_dim;
    const size_t q_row = (size_t)c->n_heads * (c->qk_nope_head_dim + c->qk_rope_head_dim);
    const size_t heads_work = (size_t)c->n_heads * c->kv_lora_rank * m_rows;
    uint16_t *qkv = view(b, DSPARK__BLOCK_QKV);
    const dspark__linear qkv_a[] = {
        {&m->q_a, s->layer, view(b, DSPARK__BLOCK_NORMED), h * 2, qkv, rq + width},
        {&m->context_kv, s->layer, view(b, DSPARK__BLOCK_NORMED), h * 2, qkv + rq, rq + width},
    };
    const dspark__linear q_b = {&m->block.q_b, s->layer, qkv, (rq + width) * 2, view(b, DSPARK__BLOCK_Q),
                                q_row};
    const dspark__linear o = {&m->block.o, s->layer, view(b, DSPARK__BLOCK_OUT),
                              (size_t)c->n_heads * c->v_head_dim * 2, view(b, DSPARK__BLOCK_DELTA), h};
    run_linears(s, qkv_a, 2);
    dspark__lap(&b->times->qkv_a, t0);
    run_units(s, entry_task, m_rows, (double)m_rows * (double)(rq + width) * ELEMENT_COST);
    dspark__lap(&b->times->norms, t0);
    run_linears(s, &q_b, 1);
    dspark__lap(&b->times->q_b, t0);
    run_units(s, absorb_task, count_head_units(c), (double)heads_work * c->qk_nope_head_dim);
    dspark__lap(&b->times->absorb, t0);
    dspark__block_attention(b, s->layer);
    dspark__lap(&b->times->attention, t0);
    run_units(s, v_up_task, count_head_units(c), (double)heads_work * c->v_head_dim);
    dspark__lap(&b->times->v_up, t0);
    run_linears(s, &o, 1);
    dspark__lap(&b->times->o, t0);
}

static void run_mlp(stage *s, uint64_t *t0)
{
    const dspark__block *b = s->b;
    const dspark__block_weights *w = &b->model->block;
    const size_t h = s->c->hidden_size, f = s->c->intermediate_size;
    uint16_t *mlp = view(b, DSPARK__BLOCK_MLP);
    const dspark__linear gate_up[] = {
        {&w->gate_up, 2 * s->layer, view(b, DSPARK__BLOCK_NORMED), h * 2, mlp, 2 * f},
        {&w->gate_up, 2 * s->layer + 1, view(b, DSPARK__BLOCK_NORMED), h * 2, mlp + f, 2 * f},
    };
    const dspark__linear down = {&w->down, s->layer, mlp, 2 * f * 2, view(b, DSPARK__BLOCK_DELTA), h};
    run_linears(s, gate_up, 2);
    dspark__lap(&b->times->gate_up, t0);
    run_units(s, swiglu_task, s->m, (double)s->m * (double)f * 4 * ELEMENT_COST);
    dspark__lap(&b->times->norms, t0);
    run_linears(s, &down, 1);
    dspark__lap(&b->times->down, t0);
}

/* A number that went wrong anywhere has reached the hidden states: infinity becomes NaN in a norm, NaN
 * stays, and spoil_row sees to the rest. */
static void check_hidden(const dspark__block *b)
{
    const dspark_config *c = &b->model->config;
    const size_t n = (size_t)c->block_size * c->hidden_size;
    for (uint32_t s = 0; s < b->n; s++)
        if (!b->kern->finite_bf16(view(b, DSPARK__BLOCK_NORMED) + s * n, n))
            b->status[s] = DSPARK_ENONFINITE;
}

void dspark__block_forward(const dspark__block *b)
{
    const dspark_config *c = &b->model->config;
    const dspark__block_weights *w = &b->model->block;
    const size_t h = c->hidden_size;
    stage s = {.b = b, .c = c, .m = (size_t)b->n * c->block_size};
    const double row_work = (double)s.m * (double)h * 2 * ELEMENT_COST;
    uint64_t t0 = dspark__now();
    s.norm = w->input_norm;
    run_units(&s, embed_task, s.m, row_work);
    dspark__lap(&b->times->embed, &t0);
    for (s.layer = 0; s.layer < c->n_layers; s.layer++) {
        run_attention(&s, &t0);
        s.norm = w->post_norm + s.layer * h;
        run_units(&s, add_norm_task, s.m, row_work);
        dspark__lap(&b->times->norms, &t0);
        run_mlp(&s, &t0);
        s.norm = s.layer + 1 < c->n_layers ? w->input_norm + (s.layer + 1) * h : w->final_norm;
        run_units(&s, add_norm_task, s.m, row_work);
        dspark__lap(&b->times->norms, &t0);
    }
    check_hidden(b);
    dspark__lap(&b->times->norms, &t0);
}
