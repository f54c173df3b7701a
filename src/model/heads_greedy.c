/* The largest of base logits + Markov bias without reading most of W2: codes of its rows bound the bias
 * from above, and only panels that may hold the largest are read. What is left out provably is not the
 * answer (docs/numerics.md section 12), so the answer is the plain way's, whatever is read. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "model/block.h"
#include "model/heads.h"

/* Panels of one unit of the threads: about 100 KB of codes at rank 256. */
#define UNIT_PANELS 16u
/* Every SAMPLE_EVERYth unit is looked at first. When nearly all of its panels might hold the largest, the
 * others are not worth a look; and when most of all panels might, the plain way is as fast (with few
 * panels it does not matter). */
#define SAMPLE_EVERY 16u
#define SAMPLE_MOST 0.9
#define LISTED_MOST 0.7
#define SAMPLE_LEAST 32u /* units of a matrix that is worth a sample */
#define FEW_PANELS 64u
#define MOST_EARLY 3u /* panels of a row that are read before the list */

/* One panel that has to be read for one sequence, and what was found in it. */
typedef struct wanted {
    uint32_t panel, row;
    size_t at;   /* in the panel */
    float value;
} wanted;

typedef struct search {
    const dspark__heads *h;
    const dspark__merged_linear *w2;
    const dspark__markov_bound *bound;
    dspark__greedy_row *rows;
    uint32_t n_rows, n_panels;
    dspark__bound_panels calls[DSPARK__GREEDY_ROWS];
    float floor[DSPARK__GREEDY_ROWS];  /* the largest found so far: a number that the largest is not below */
    uint32_t early[DSPARK__GREEDY_ROWS][MOST_EARLY], n_early[DSPARK__GREEDY_ROWS]; /* panels read already */
    float *upper;                      /* [n_rows][n_panels] */
    wanted *list;
    size_t n_list, n_workers;
    int sampling;                      /* bound_task: the sample's units, or the others */
    atomic_size_t next, bounded, bytes;
} search;

int dspark__greedy_bytes(const dspark_config *c, uint32_t n_sequences, size_t *bytes)
{
    const size_t n = n_sequences < DSPARK__GREEDY_ROWS ? n_sequences : DSPARK__GREEDY_ROWS;
    const size_t panels = ((size_t)c->vocab_size + DSPARK__PANEL - 1) / DSPARK__PANEL;
    return dspark__mul_size(panels, sizeof(float) + sizeof(wanted), bytes) &&
           dspark__add_size(*bytes, dspark__markov_bound_width(c->markov_rank), bytes) &&
           dspark__mul_size(*bytes, n, bytes);
}

static size_t panel_rows(const search *s, uint32_t panel)
{
    size_t left = s->w2->shards[0].rows - (size_t)panel * DSPARK__PANEL;
    return left < DSPARK__PANEL ? left : DSPARK__PANEL;
}

/* ---- reading a panel ---- */

static void read_panel(const search *s, wanted *w, size_t worker)
{
    const dspark__heads *h = s->h;
    const dspark__greedy_row *row = &s->rows[w->row];
    unsigned char *scratch = (unsigned char *)h->views[DSPARK__HEADS_SCRATCH] +
                             worker * h->layout->scratch_bytes;
    const size_t n = panel_rows(s, w->panel);
    uint16_t bias[DSPARK__PANEL];
    dspark__merged_linear_rows(s->w2, h->kern, 0, w->panel, 1, row->input, 0, 1, scratch, bias,
                               DSPARK__PANEL);
    dspark__heads_scale(h, bias, n);
    w->at = h->kern->add_argmax_bf16(row->base + (size_t)w->panel * DSPARK__PANEL, bias, n, &w->value);
}

/* Panels lie far apart: what comes next is asked for while this one is computed. */
static void fetch_panel(const search *s, size_t i)
{
    const dspark__shard *shard = &s->w2->shards[0];
    if (i >= s->n_list) return;
    const unsigned char *at = shard->codes + s->list[i].panel * shard->code_stride;
    for (size_t n = 0; n < shard->code_stride; n += 64) __builtin_prefetch(at + n, 0, 2);
}

static void read_task(void *arg, size_t worker)
{
    search *s = arg;
    for (size_t i; (i = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed)) < s->n_list;) {
        fetch_panel(s, i + s->n_workers);
        read_panel(s, &s->list[i], worker);
    }
}

static void read_list(search *s)
{
    const double panel = (double)s->w2->k * DSPARK__PANEL;
    atomic_store(&s->next, 0);
    s->n_workers = dspark__threads_worth(s->h->threads, s->n_list, (double)s->n_list * panel);
    dspark__threads_run(s->h->threads, read_task, s, s->n_workers);
}

/* What was found in the list's panels: the largest, the lowest index of equals. */
static void take_found(search *s)
{
    for (size_t i = 0; i < s->n_list; i++) {
        const wanted *w = &s->list[i];
        dspark__greedy_row *row = &s->rows[w->row];
        const size_t token = (size_t)w->panel * DSPARK__PANEL + w->at;
        if (row->token != DSPARK__NO_ARGMAX && !(w->value > s->floor[w->row]) &&
            !(w->value == s->floor[w->row] && token < row->token))
            continue;
        row->token = token;
        s->floor[w->row] = w->value;
    }
}

static void count_reads(search *s)
{
    dspark_draft_times *t = s->h->times;
    const dspark__shard *shard = &s->w2->shards[0];
    size_t n_panels = 0;
    for (size_t i = 0; i < s->n_list; i++) {
        t->markov_rows_read += panel_rows(s, s->list[i].panel);
        n_panels += i == 0 || s->list[i].panel != s->list[i - 1].panel;
    }
    t->markov_bytes += n_panels * (shard->bytes / shard->n_panels);
}

static int is_read(const search *s, uint32_t row, uint32_t panel)
{
    for (uint32_t i = 0; i < s->n_early[row]; i++)
        if (s->early[row][i] == panel) return 1;
    return 0;
}

/* Read one panel of each row now, so that its largest becomes a floor. */
static void raise_floors(search *s, const uint32_t *panels)
{
    s->n_list = 0;
    for (uint32_t r = 0; r < s->n_rows; r++) {
        if (is_read(s, r, panels[r])) continue;
        s->list[s->n_list++] = (wanted){.panel = panels[r], .row = r};
        s->early[r][s->n_early[r]++] = panels[r];
    }
    read_list(s);
    count_reads(s);
    take_found(s);
}

/* ---- bounds of all panels ---- */

static int in_sample(const search *s, size_t unit)
{
    return s->n_panels < SAMPLE_LEAST * UNIT_PANELS || unit % SAMPLE_EVERY == 0;
}

static void bound_task(void *arg, size_t worker)
{
    search *s = arg;
    (void)worker;
    for (;;) {
        size_t unit = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
        size_t coded = 0, most = 0;
        const uint32_t first = (uint32_t)(unit * UNIT_PANELS);
        if (unit * UNIT_PANELS >= s->n_panels) return;
        if (in_sample(s, unit) != s->sampling) continue;
        for (uint32_t r = 0; r < s->n_rows; r++) {
            const uint32_t left = s->n_panels - first;
            dspark__bound_panels call = s->calls[r];
            call.n_panels = left < UNIT_PANELS ? left : UNIT_PANELS;
            call.panels = s->bound->panels + first * s->bound->stride;
            call.floor = s->floor[r];
            call.base = s->rows[r].base + (size_t)first * DSPARK__PANEL;
            call.n_out = (call.n_panels - 1) * DSPARK__PANEL +
                         panel_rows(s, first + (uint32_t)call.n_panels - 1);
            call.upper = s->upper + (size_t)r * s->n_panels + first;
            size_t n = s->h->kern->bound_panels(&call);
            coded += n;
            most = n > most ? n : most;
        }
        atomic_fetch_add_explicit(&s->bounded, coded, memory_order_relaxed);
        atomic_fetch_add_explicit(&s->bytes, most * (s->bound->stride - DSPARK__BOUND_HEAD) +
                                                 UNIT_PANELS * DSPARK__BOUND_HEAD,
                                  memory_order_relaxed);
    }
}

static void bound_all(search *s, int sampling)
{
    const size_t units = (s->n_panels + UNIT_PANELS - 1) / UNIT_PANELS;
    /* an element of codes costs about a quarter of a multiply-add of W2 */
    double work = (double)s->n_panels * DSPARK__PANEL * s->w2->k / 4 * s->n_rows;
    s->sampling = sampling;
    if (sampling && units >= SAMPLE_LEAST) work /= SAMPLE_EVERY;
    atomic_store(&s->next, 0);
    dspark__threads_run(s->h->threads, bound_task, s, dspark__threads_worth(s->h->threads, units, work));
}

static int is_bounded(const search *s, uint32_t panel)
{
    return !s->sampling || in_sample(s, panel / UNIT_PANELS);
}

/* The panel of the largest bound so far, for each row. */
static void best_panels(const search *s, uint32_t *panels)
{
    for (uint32_t r = 0; r < s->n_rows; r++) {
        const float *upper = s->upper + (size_t)r * s->n_panels;
        float most = -INFINITY;
        panels[r] = 0;
        for (uint32_t p = 0; p < s->n_panels; p++)
            if (upper[p] > most && is_bounded(s, p)) {
                most = upper[p];
                panels[r] = p;
            }
    }
}

/* The share of panels looked at so far that reach their floor. */
static double reaching_floors(const search *s)
{
    size_t n = 0, reach = 0;
    for (uint32_t r = 0; r < s->n_rows; r++)
        for (uint32_t p = 0; p < s->n_panels; p++)
            if (is_bounded(s, p)) {
                n++;
                reach += s->upper[(size_t)r * s->n_panels + p] >= s->floor[r];
            }
    return (double)reach / (double)n;
}

/* ---- the search ---- */

static int start(search *s, const dspark__heads *h, dspark__greedy_row *rows, uint32_t n)
{
    const dspark__block_weights *w = &h->model->block;
    const float scale = h->model->config.logit_scale;
    unsigned char *at = h->views[DSPARK__HEADS_GREEDY];
    memset(s, 0, sizeof *s);
    if (!w->markov_bound.panels || n > DSPARK__GREEDY_ROWS || !(scale > 0)) return 0;
    s->h = h;
    s->w2 = &w->markov_w2;
    s->bound = &w->markov_bound;
    s->rows = rows;
    s->n_rows = n;
    s->n_panels = s->bound->n_panels;
    s->list = (wanted *)(void *)at;
    at += (size_t)n * s->n_panels * sizeof(wanted);
    s->upper = (float *)(void *)at;
    at += (size_t)n * s->n_panels * sizeof(float);
    for (uint32_t r = 0; r < n; r++, at += dspark__markov_bound_width(s->bound->rank)) {
        s->floor[r] = -INFINITY;
        rows[r].token = DSPARK__NO_ARGMAX;
        if (!dspark__markov_bound_vector(s->bound, rows[r].input, scale, (int8_t *)at, &s->calls[r]))
            return 0;
    }
    atomic_init(&s->next, 0);
    atomic_init(&s->bounded, 0);
    atomic_init(&s->bytes, 0);
    return 1;
}

/* Every further panel that may hold the largest, panel by panel, so that what several sequences want is read
 * together. */
static void list_wanted(search *s)
{
    s->n_list = 0;
    for (uint32_t p = 0; p < s->n_panels; p++)
        for (uint32_t r = 0; r < s->n_rows; r++)
            if (s->upper[(size_t)r * s->n_panels + p] >= s->floor[r] && !is_read(s, r, p))
                s->list[s->n_list++] = (wanted){.panel = p, .row = r};
}

/* Floors, then the panels that reach them. 0: too many do; *hopeless = 1 when that was found out late. */
static int list_candidates(search *s, int *hopeless)
{
    uint32_t panels[DSPARK__GREEDY_ROWS];
    for (uint32_t r = 0; r < s->n_rows; r++) {
        size_t at = dspark__heads_largest(s->h, s->rows[r].base, NULL);
        if (at == DSPARK__NO_ARGMAX) return 0; /* NaN: the plain way says so */
        panels[r] = (uint32_t)(at / DSPARK__PANEL);
    }
    raise_floors(s, panels);
    for (int sampling = 1; sampling >= 0; sampling--) {
        if (!sampling && s->n_panels < SAMPLE_LEAST * UNIT_PANELS) break; /* all were looked at */
        bound_all(s, sampling);
        best_panels(s, panels);
        raise_floors(s, panels);
        const int all = !sampling || s->n_panels < SAMPLE_LEAST * UNIT_PANELS;
        if (s->n_panels > FEW_PANELS && reaching_floors(s) > (all ? LISTED_MOST : SAMPLE_MOST)) {
            *hopeless = all;
            return 0;
        }
    }
    list_wanted(s);
    return 1;
}

int dspark__greedy_tokens(const dspark__heads *h, dspark__greedy_row *rows, uint32_t n, int *hopeless)
{
    search s;
    if (!start(&s, h, rows, n)) return 0;
    const int found = list_candidates(&s, hopeless);
    const uint64_t all = (uint64_t)s.w2->shards[0].rows * n;
    const uint64_t bounded = (uint64_t)atomic_load(&s.bounded) * DSPARK__PANEL;
    h->times->markov_rows_bounded += bounded < all ? bounded : all; /* the last panel may be cut */
    h->times->markov_bytes += atomic_load(&s.bytes);
    if (!found) return 0;
    read_list(&s);
    count_reads(&s);
    take_found(&s);
    return 1;
}
