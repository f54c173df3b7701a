/* Hidden states to tokens. The LM head runs over all rows of all sequences at once; then, step by step,
 * the Markov bias of the token before is computed for all sequences together. Greedy choices never store
 * the sum of logits and bias unless somebody wants it. */
#include "model/heads.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "base/expf.h"
#include "base/numfmt.h"
#include "base/workspace.h"
#include "model/block.h"
#include "spec/sample.h"

/* Logits that one unit of an argmax looks at. */
#define ARGMAX_UNIT 16384u
#define MAX_UNITS (DSPARK__MAX_VOCAB / ARGMAX_UNIT)

/* A step's rows of one sequence inside DSPARK__HEADS_STATE. */
typedef struct state_row {
    uint16_t *e;      /* [r] W1 of the token before */
    uint16_t *input;  /* [r] what W2 multiplies */
    uint16_t *s;      /* [r] rnn state */
    uint16_t *mix_in; /* [mix_k] x of the gate or the rnn */
    uint16_t *mix;    /* [mix rows] */
} state_row;

/* Values that the gate or the rnn multiplies, with a 1 for its bias. */
static size_t mix_width(const dspark_config *c)
{
    if (c->markov_type == DSPARK_MARKOV_GATED) return (size_t)c->hidden_size + c->markov_rank + 1;
    if (c->markov_type == DSPARK_MARKOV_RNN) return (size_t)c->hidden_size + 2 * (size_t)c->markov_rank + 1;
    return 0;
}

/* Elements of a state_row. */
static size_t state_elements(const dspark_config *c)
{
    return 3 * (size_t)c->markov_rank + mix_width(c) + 3 * (size_t)c->markov_rank;
}

static size_t confidence_elements(const dspark_config *c)
{
    return (size_t)c->hidden_size + c->markov_rank;
}

int dspark__heads_plan(dspark__heads_layout *out, const dspark_config *c, uint32_t n_sequences,
                       uint32_t n_threads)
{
    size_t m, total, *s = out->sizes;
    memset(out, 0, sizeof *out);
    out->n_sequences = n_sequences;
    out->n_threads = n_threads;
    if (!dspark__mul3_size(n_sequences, c->block_size, 1, &m) ||
        !dspark__mul3_size(m, c->vocab_size, 2, &s[DSPARK__HEADS_LOGITS]) ||
        !dspark__mul3_size(n_sequences, c->vocab_size, 2, &s[DSPARK__HEADS_BIAS]) ||
        !dspark__mul3_size(n_sequences, state_elements(c) + confidence_elements(c), 2, &s[DSPARK__HEADS_STATE]) ||
        !dspark__mul3_size(c->vocab_size, sizeof(float), 1, &s[DSPARK__HEADS_PROBS]))
        return 0;
    if (!dspark__greedy_bytes(c, n_sequences, &s[DSPARK__HEADS_GREEDY])) return 0;
    out->scratch_bytes = (dspark__merged_linear_scratch(m) + 63) / 64 * 64;
    if (!dspark__mul3_size(out->scratch_bytes, n_threads, 1, &s[DSPARK__HEADS_SCRATCH])) return 0;
    return dspark__workspace_total(s, DSPARK__HEADS_VIEWS, &total);
}

static state_row state_of(const dspark__heads *h, size_t seq)
{
    const dspark_config *c = &h->model->config;
    const size_t r = c->markov_rank;
    uint16_t *at = (uint16_t *)h->views[DSPARK__HEADS_STATE] +
                   seq * (state_elements(c) + confidence_elements(c));
    return (state_row){at, at + r, at + 2 * r, at + 3 * r, at + 3 * r + mix_width(c)};
}

/* ---- the largest of logits + bias, sliced among the threads ---- */

typedef struct argmax_job {
    const dspark__kern *kern;
    const uint16_t *logits, *bias; /* bias may be NULL */
    size_t vocab;
    size_t at[MAX_UNITS + 1];      /* by unit */
    float best[MAX_UNITS + 1];
    atomic_size_t next;
} argmax_job;

static void argmax_task(void *arg, size_t worker)
{
    argmax_job *j = arg;
    (void)worker;
    for (;;) {
        size_t unit = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
        size_t first = unit * ARGMAX_UNIT;
        if (first >= j->vocab) return;
        size_t n = j->vocab - first < ARGMAX_UNIT ? j->vocab - first : ARGMAX_UNIT;
        j->at[unit] = j->bias ? j->kern->add_argmax_bf16(j->logits + first, j->bias + first, n,
                                                         &j->best[unit])
                              : j->kern->argmax_bf16(j->logits + first, n, &j->best[unit]);
    }
}

size_t dspark__heads_largest(const dspark__heads *h, const uint16_t *logits, const uint16_t *bias)
{
    argmax_job j = {.kern = h->kern, .logits = logits, .bias = bias, .vocab = h->model->config.vocab_size};
    size_t units = (j.vocab + ARGMAX_UNIT - 1) / ARGMAX_UNIT, best = DSPARK__NO_ARGMAX;
    float value = 0;
    atomic_init(&j.next, 0);
    dspark__threads_run(h->threads, argmax_task, &j,
                        dspark__threads_worth(h->threads, units, (double)j.vocab * 4));
    for (size_t unit = 0; unit < units; unit++) {
        if (j.at[unit] == DSPARK__NO_ARGMAX) return DSPARK__NO_ARGMAX;
        if (best != DSPARK__NO_ARGMAX && !(j.best[unit] > value)) continue;
        best = unit * ARGMAX_UNIT + j.at[unit];
        value = j.best[unit];
    }
    return best;
}

/* ---- Markov ---- */

static float sigmoid_bf16(uint16_t x)
{
    return dspark__bf16_to_f32(dspark__f32_to_bf16(dspark__sigmoid_f32(dspark__bf16_to_f32(x))));
}

static uint16_t product(float a, float b)
{
    return dspark__f32_to_bf16(a * b);
}

static void run_linear(const dspark__heads *h, const dspark__merged_linear *ml, const void *x,
                       size_t x_stride, size_t rows, uint16_t *out, size_t out_stride)
{
    const dspark__linear linear = {ml, 0, x, x_stride, out, out_stride};
    dspark__linears_run(h->threads, h->kern, &linear, 1, rows, h->views[DSPARK__HEADS_SCRATCH],
                        h->layout->scratch_bytes);
}

/* The bias is the last column of the weight: it joins the accumulator before the one rounding. */
static void mix_linear(const dspark__heads *h, const state_row *st, size_t rows)
{
    const size_t k = mix_width(&h->model->config);
    st->mix_in[k - 1] = 0x3f80; /* 1 */
    run_linear(h, &h->model->block.markov_mix, st->mix_in, k * 2, 1, st->mix, rows);
}

static void mix_gated(const dspark__heads *h, const state_row *st, const uint16_t *hid)
{
    const dspark_config *c = &h->model->config;
    const size_t r = c->markov_rank, hs = c->hidden_size;
    memcpy(st->mix_in, hid, hs * 2);
    memcpy(st->mix_in + hs, st->e, r * 2);
    mix_linear(h, st, r);
    for (size_t i = 0; i < r; i++)
        st->input[i] = product(sigmoid_bf16(st->mix[i]), dspark__bf16_to_f32(st->e[i]));
}

static void mix_rnn(const dspark__heads *h, const state_row *st, const uint16_t *hid)
{
    const dspark_config *c = &h->model->config;
    const size_t r = c->markov_rank;
    memcpy(st->mix_in, st->s, r * 2);
    memcpy(st->mix_in + r, st->e, r * 2);
    memcpy(st->mix_in + 2 * r, hid, (size_t)c->hidden_size * 2);
    mix_linear(h, st, 3 * r);
    for (size_t i = 0; i < r; i++) {
        float g = sigmoid_bf16(st->mix[i]);
        float new_part = dspark__bf16_to_f32(
            dspark__f32_to_bf16(dspark__tanh_f32(dspark__bf16_to_f32(st->mix[r + i]))));
        float rest = dspark__bf16_to_f32(dspark__f32_to_bf16(1.0f - g));
        float kept = dspark__bf16_to_f32(product(g, dspark__bf16_to_f32(st->s[i])));
        st->s[i] = dspark__f32_to_bf16(kept + dspark__bf16_to_f32(product(rest, new_part)));
        st->input[i] = dspark__f32_to_bf16(dspark__tanh_f32(dspark__bf16_to_f32(st->mix[2 * r + i])));
    }
}

void dspark__heads_scale(const dspark__heads *h, uint16_t *logits, size_t n)
{
    float scale = h->model->config.logit_scale;
    if (scale == 1.0f) return;
    for (size_t i = 0; i < n; i++)
        logits[i] = dspark__f32_to_bf16(dspark__bf16_to_f32(logits[i]) * scale);
}

void dspark__heads_logits(const dspark__heads *h, const void *x, size_t x_stride, size_t n,
                          uint16_t *out)
{
    const size_t vocab = h->model->config.vocab_size;
    run_linear(h, &h->model->block.lm_head, x, x_stride, n, out, vocab);
    dspark__heads_scale(h, out, n * vocab);
}

/* What W2 multiplies in one step, for every sequence; prev[i] < vocab. */
static void markov_inputs(const dspark__heads *h, uint32_t step, const int64_t *prev)
{
    const dspark_config *c = &h->model->config;
    const dspark__block_weights *w = &h->model->block;
    const size_t r = c->markov_rank;
    for (uint32_t i = 0; i < h->n; i++) {
        state_row st = state_of(h, i);
        const uint16_t *hid = h->hidden + ((size_t)i * c->block_size + step) * c->hidden_size;
        memcpy(st.e, w->markov_w1.data + (size_t)prev[i] * w->markov_w1.row_stride, r * 2);
        if (c->markov_type == DSPARK_MARKOV_GATED) mix_gated(h, &st, hid);
        else if (c->markov_type == DSPARK_MARKOV_RNN) mix_rnn(h, &st, hid);
        else memcpy(st.input, st.e, r * 2);
    }
}

/* The bias rows of one step: all of W2 is read. */
static uint16_t *markov_bias(const dspark__heads *h)
{
    const dspark_config *c = &h->model->config;
    const dspark__block_weights *w = &h->model->block;
    uint16_t *bias = h->views[DSPARK__HEADS_BIAS];
    run_linear(h, &w->markov_w2, state_of(h, 0).input,
               (state_elements(c) + confidence_elements(c)) * 2, h->n, bias, c->vocab_size);
    dspark__heads_scale(h, bias, (size_t)h->n * c->vocab_size);
    h->times->markov_bytes += w->markov_w2.bytes;
    return bias;
}

/* ---- one step of one sequence ---- */

static void run_confidence(const dspark__heads *h, uint32_t seq, uint32_t step)
{
    const dspark_config *c = &h->model->config;
    const dspark__block_weights *w = &h->model->block;
    dspark_draft_output *o = &h->out[seq];
    const uint16_t *hid = h->hidden + ((size_t)seq * c->block_size + step) * c->hidden_size;
    float logit = 0, probability = 1;
    if (w->confidence) {
        size_t n = c->hidden_size;
        uint16_t *x = state_of(h, seq).e + state_elements(c);
        memcpy(x, hid, n * 2);
        if (c->confidence_with_markov) {
            memcpy(x + n, state_of(h, seq).e, (size_t)c->markov_rank * 2);
            n += c->markov_rank;
        }
        logit = h->kern->dot_lanes(x, w->confidence, n) + w->confidence_bias;
        probability = dspark__sigmoid_f32(logit);
        if (!isfinite(probability)) o->status = DSPARK_ENONFINITE;
    }
    if (o->confidence) o->confidence[step] = probability;
    if (o->confidence_logits) o->confidence_logits[step] = logit;
}

static int samples(const dspark_draft_input *in)
{
    return in->sampling && in->sampling->temperature > 0;
}

/* The distribution drafted from, and a token of it. Returns the token or DSPARK__NO_ARGMAX. */
static size_t draw(const dspark__heads *h, uint32_t seq, uint32_t step, const uint16_t *logits)
{
    const dspark_draft_input *in = &h->in[seq];
    const size_t vocab = h->model->config.vocab_size;
    float *probs = h->out[seq].probs ? h->out[seq].probs + step * vocab
                                     : h->views[DSPARK__HEADS_PROBS];
    dspark_noise_key key = {in->seed, in->sequence, (uint64_t)in->position + step + 1, DSPARK_NOISE_DRAFT,
                            (uint64_t)in->position + 1};
    int32_t token;
    if (dspark__distribution(in->sampling, logits, DSPARK_BF16, vocab, probs,
                             NULL) != DSPARK_OK ||
        dspark__sample(probs, vocab, &key, &token, NULL) != DSPARK_OK)
        return DSPARK__NO_ARGMAX;
    return (size_t)token;
}

static const uint16_t *base_row(const dspark__heads *h, uint32_t seq, uint32_t step)
{
    const dspark_config *c = &h->model->config;
    return (const uint16_t *)h->views[DSPARK__HEADS_LOGITS] +
           ((size_t)seq * c->block_size + step) * c->vocab_size;
}

/* Does somebody want the sum of logits and bias itself? */
static int is_stored(const dspark__heads *h, uint32_t seq)
{
    return samples(&h->in[seq]) || h->out[seq].logits;
}

/* Choose token `step` of a sequence, unless it is known; bias may be NULL. */
static void choose(const dspark__heads *h, uint32_t seq, uint32_t step, uint16_t *bias,
                   const size_t *known)
{
    const dspark_config *c = &h->model->config;
    const size_t vocab = c->vocab_size;
    dspark_draft_output *o = &h->out[seq];
    const uint16_t *base = base_row(h, seq, step), *sum = base;
    int stored = is_stored(h, seq);
    size_t token;
    if (bias && stored) {
        h->kern->add_bf16(bias, base, bias, vocab);
        sum = bias;
    }
    if (o->base_logits) memcpy(o->base_logits + step * vocab, base, vocab * 2);
    if (o->logits) memcpy(o->logits + step * vocab, sum, vocab * 2);
    /* finds NaN also when one samples */
    token = known ? *known : dspark__heads_largest(h, sum, bias && !stored ? bias : NULL);
    if (token != DSPARK__NO_ARGMAX && samples(&h->in[seq])) token = draw(h, seq, step, sum);
    else if (token != DSPARK__NO_ARGMAX && o->probs) {
        memset(o->probs + step * vocab, 0, vocab * sizeof *o->probs);
        o->probs[step * vocab + token] = 1;
    }
    if (token >= vocab) {
        o->status = DSPARK_ENONFINITE;
        return;
    }
    o->tokens[step] = (int32_t)token;
}

static int is_drafting(const dspark__heads *h, uint32_t seq, uint32_t step)
{
    return h->out[seq].status == DSPARK_OK && step < h->n_tokens[seq];
}

/* The tokens of one step where only they are wanted; tokens[i] of sequence i. 0: the plain way. */
static int search_tokens(const dspark__heads *h, uint32_t step, size_t *tokens, int *hopeless)
{
    dspark__greedy_row rows[DSPARK__GREEDY_ROWS];
    uint32_t who[DSPARK__GREEDY_ROWS], n = 0, i;
    if (*hopeless) return 0;
    for (i = 0; i < h->n; i++) {
        if (!is_drafting(h, i, step)) continue;
        if (n == DSPARK__GREEDY_ROWS || is_stored(h, i)) return 0;
        rows[n] = (dspark__greedy_row){.base = base_row(h, i, step), .input = state_of(h, i).input};
        who[n++] = i;
    }
    if (!dspark__greedy_tokens(h, rows, n, hopeless)) return 0;
    for (i = 0; i < n; i++) tokens[who[i]] = rows[i].token;
    return 1;
}

static uint32_t count_drafting(const dspark__heads *h, uint32_t step)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < h->n; i++) n += (uint32_t)is_drafting(h, i, step);
    return n;
}

/* The bias of one step, or NULL with the tokens known already. */
static uint16_t *markov_step(const dspark__heads *h, uint32_t step, const int64_t *prev, size_t *tokens,
                             int *hopeless)
{
    const uint64_t rows = (uint64_t)h->model->config.vocab_size * count_drafting(h, step);
    markov_inputs(h, step, prev);
    h->times->markov_rows += rows;
    if (search_tokens(h, step, tokens, hopeless)) return NULL;
    h->times->markov_rows_read += rows;
    return markov_bias(h);
}

static void start(const dspark__heads *h, int64_t *prev)
{
    const dspark_config *c = &h->model->config;
    for (uint32_t i = 0; i < h->n; i++) {
        prev[i] = h->in[i].anchor;
        memset(state_of(h, i).s, 0, (size_t)c->markov_rank * 2);
        if (h->out[i].hidden)
            memcpy(h->out[i].hidden, h->hidden + (size_t)i * c->block_size * c->hidden_size,
                   (size_t)c->block_size * c->hidden_size * 2);
    }
}

void dspark__heads_run(const dspark__heads *h)
{
    const dspark_config *c = &h->model->config;
    int64_t prev[DSPARK__MAX_SEQUENCES];
    size_t known[DSPARK__MAX_SEQUENCES];
    uint32_t most = 0, i, step;
    int hopeless = 0;
    uint64_t t0 = dspark__now();
    start(h, prev);
    for (i = 0; i < h->n; i++)
        if (h->out[i].status == DSPARK_OK && h->n_tokens[i] > most) most = h->n_tokens[i];
    if (most) {
        dspark__heads_logits(h, h->hidden, (size_t)c->hidden_size * 2, (size_t)h->n * c->block_size,
                             h->views[DSPARK__HEADS_LOGITS]);
    }
    dspark__lap(&h->times->lm_head, &t0);
    for (step = 0; step < most; step++) {
        const int markov = c->markov_type != DSPARK_MARKOV_NONE;
        uint16_t *bias = markov ? markov_step(h, step, prev, known, &hopeless) : NULL;
        dspark__lap(&h->times->markov, &t0);
        for (i = 0; i < h->n; i++)
            if (is_drafting(h, i, step)) run_confidence(h, i, step);
        dspark__lap(&h->times->confidence, &t0);
        for (i = 0; i < h->n; i++) {
            if (!is_drafting(h, i, step)) continue;
            choose(h, i, step, bias ? bias + (size_t)i * c->vocab_size : NULL,
                   markov && !bias ? &known[i] : NULL);
            if (h->out[i].status == DSPARK_OK)
                prev[i] = h->in[i].forced ? h->in[i].forced[step] : h->out[i].tokens[step];
        }
        dspark__lap(&h->times->sample, &t0);
    }
    for (i = 0; i < h->n; i++)
        if (h->out[i].status == DSPARK_OK) h->out[i].n_tokens = h->n_tokens[i];
}
