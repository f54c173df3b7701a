/* Times one greedy Markov step at the published geometry: reading all of W2 (the plain way) against the
 * search by bounds, on made-up weights and logits, beside a plain read of W2's bytes. Interleaved in one
 * process, medians. A tool for whoever changes the bounds; not part of ctest.
 *
 * markov_bench [threads] [rounds] [isa 0-4] [sequences] [vocab] [rank] */
#include "base/fpenv.h"
#include "base/numfmt.h"
#include "base/status.h"
#include "model/block.h"
#include "model/heads.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROUNDS = 99 };

/* How the logits are spread, in standard deviations of the bias, and what W2 looks like. */
static const struct form {
    const char *name;
    double spread;    /* of normally distributed logits */
    double heavy;     /* logits are multiplied by e^(heavy * z): a few stand far out */
    double outliers;  /* share of weights that are 8 times as large */
    int adversary;    /* every row of W2 and every logit equal */
} FORMS[] = {
    {"normal logits, 0 bias deviations", 0, 0, 0, 0},  {"normal logits, 1", 1, 0, 0, 0},
    {"normal logits, 4", 4, 0, 0, 0},                  {"normal logits, 16", 16, 0, 0, 0},
    {"normal logits, 64", 64, 0, 0, 0},                {"heavy logits, 2", 2, 0.5, 0, 0},
    {"W2 with outliers, 1", 1, 0, 0.01, 0},            {"adversary: all equal", 1, 0, 0, 1},
};

static uint64_t state = 88172645463325252u;

static double uniform(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return ((double)(state >> 11) + 0.5) * 0x1p-53;
}

static double normal(void)
{
    return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform());
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, size_t n)
{
    qsort(v, n, sizeof *v, compare);
    return v[n / 2];
}

static void must(dspark_status st, const dspark_error *err)
{
    if (st == DSPARK_OK) return;
    fprintf(stderr, "markov_bench: %s: %s\n", err->where, err->message);
    exit(5);
}

typedef struct read_job {
    const unsigned char *from;
    size_t bytes, n;
    uint64_t sums[64];
} read_job;

static void read_part(void *arg, size_t worker)
{
    read_job *j = arg;
    size_t part = j->bytes / j->n / 64 * 64;
    const uint64_t *p = (const void *)(j->from + part * worker);
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (size_t i = 0; i + 8 <= part / 8; i += 8) {
        a += p[i] ^ p[i + 4];
        b += p[i + 1] ^ p[i + 5];
        c += p[i + 2] ^ p[i + 6];
        d += p[i + 3] ^ p[i + 7];
    }
    j->sums[worker] = a + b + c + d;
}

typedef struct bench {
    dspark_model model;
    dspark__kern kern;
    dspark__threads *threads;
    dspark__heads_layout layout;
    dspark__heads heads;
    dspark_draft_times times;
    void *views[DSPARK__HEADS_VIEWS];
    uint32_t n;
    uint16_t *w2, *logits, *input;
} bench;

static void *take(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 4095) / 4096 * 4096);
    if (!p) exit(5);
    memset(p, 0, bytes);
    return p;
}

static void plain(bench *b, const dspark__greedy_row *rows, size_t *tokens)
{
    const dspark_config *c = &b->model.config;
    uint16_t *bias = b->views[DSPARK__HEADS_BIAS];
    const dspark__linear l = {&b->model.block.markov_w2, 0, b->input, (size_t)c->markov_rank * 2, bias,
                              c->vocab_size};
    dspark__linears_run(b->threads, &b->kern, &l, 1, b->n, b->views[DSPARK__HEADS_SCRATCH],
                        b->layout.scratch_bytes);
    for (uint32_t i = 0; i < b->n; i++)
        tokens[i] = dspark__heads_largest(&b->heads, rows[i].base, bias + (size_t)i * c->vocab_size);
}

static void run_form(bench *b, const struct form *form, size_t rounds)
{
    const dspark_config *c = &b->model.config;
    const size_t vocab = c->vocab_size, r = c->markov_rank;
    double t_plain[MOST_ROUNDS], t_greedy[MOST_ROUNDS], t_read[MOST_ROUNDS];
    dspark_error err;
    read_job probe = {.from = (const void *)b->w2, .bytes = vocab * r * 2,
                      .n = dspark__threads_count(b->threads)};
    memset(&err, 0, sizeof err);
    for (size_t i = 0; i < vocab * r; i++) {
        double x = normal() / sqrt((double)r);
        if (form->outliers > 0 && uniform() < form->outliers) x *= 8;
        if (form->adversary && i >= r) b->w2[i] = b->w2[i % r];
        else b->w2[i] = dspark__f32_to_bf16((float)x);
    }
    dspark__block_weights *w = &b->model.block;
    dspark__merged_linear_free(&w->markov_w2);
    dspark__markov_bound_free(&w->markov_bound);
    must(dspark__merged_linear_init_even(&w->markov_w2, "w2", (uint32_t)r, 1, (uint32_t)vocab, NULL, &err),
         &err);
    must(dspark__merged_linear_fill_dense(&w->markov_w2, 0, b->w2, &err), &err);
    uint64_t t0 = dspark__now();
    must(dspark__markov_bound_build(&w->markov_bound, &w->markov_w2, b->threads, NULL, &err), &err);
    double build = (double)(dspark__now() - t0) * 1e-6;
    for (size_t i = 0; i < vocab * b->n; i++) {
        double x = normal();
        if (form->heavy > 0) x *= exp(form->heavy * normal());
        b->logits[i] = form->adversary ? 0x3f80 : dspark__f32_to_bf16((float)(x * form->spread));
    }
    memset(&b->times, 0, sizeof b->times);
    uint32_t gave_up = 0;
    int hopeless = 0;
    for (size_t i = 0; i < rounds; i++) {
        dspark__greedy_row rows[DSPARK__GREEDY_ROWS];
        size_t tokens[DSPARK__GREEDY_ROWS];
        for (size_t j = 0; j < r * b->n; j++) b->input[j] = dspark__f32_to_bf16((float)normal());
        for (uint32_t s = 0; s < b->n; s++)
            rows[s] = (dspark__greedy_row){b->logits + s * vocab, b->input + s * r, 0};
        for (int side = 0; side < 3; side++) { /* another order each time */
            int which = (int)((i + (size_t)side) % 3);
            if (which == 2) { /* what the bytes of W2 cost; leaves no weight in a cache */
                t0 = dspark__now();
                dspark__threads_run(b->threads, read_part, &probe, probe.n);
                t_read[i] = (double)(dspark__now() - t0) * 1e-6;
                continue;
            }
            t0 = dspark__now();
            if (which == 0) plain(b, rows, tokens);
            else if (!dspark__greedy_tokens(&b->heads, rows, b->n, &hopeless)) {
                size_t same[DSPARK__GREEDY_ROWS];
                plain(b, rows, same);
                for (uint32_t s = 0; s < b->n; s++) rows[s].token = same[s];
                gave_up++;
            }
            (which ? t_greedy : t_plain)[i] = (double)(dspark__now() - t0) * 1e-6;
        }
        for (uint32_t s = 0; s < b->n; s++)
            if (rows[s].token != tokens[s]) {
                printf("round %zu, sequence %u: %zu, the plain way %zu\n", i, s, rows[s].token, tokens[s]);
                exit(6);
            }
    }
    /* again and again, as the steps of a block: caches may keep codes */
    double t_again[MOST_ROUNDS], p_again[MOST_ROUNDS];
    for (size_t i = 0; i < 2 * rounds; i++) {
        dspark__greedy_row rows[DSPARK__GREEDY_ROWS];
        size_t tokens[DSPARK__GREEDY_ROWS];
        for (uint32_t s = 0; s < b->n; s++)
            rows[s] = (dspark__greedy_row){b->logits + s * vocab, b->input + s * r, 0};
        t0 = dspark__now();
        if (i < rounds) plain(b, rows, tokens);
        else if (!dspark__greedy_tokens(&b->heads, rows, b->n, &hopeless)) plain(b, rows, tokens);
        (i < rounds ? p_again : t_again)[i % rounds] = (double)(dspark__now() - t0) * 1e-6;
    }
    double all = (double)vocab * b->n * 2 * (double)rounds;
    printf("%-34s plain %6.3f ms  bounds %6.3f ms  %5.2fx  (again %6.3f %6.3f %5.2fx)  read %6.3f ms  "
           "codes %.4f  rows %.4f  bytes %.3f  gave up %u  build %.0f ms\n", form->name,
           median(t_plain, rounds), median(t_greedy, rounds),
           median(t_plain, rounds) / median(t_greedy, rounds), median(p_again, rounds),
           median(t_again, rounds), median(p_again, rounds) / median(t_again, rounds),
           median(t_read, rounds), (double)b->times.markov_rows_bounded / all,
           (double)b->times.markov_rows_read / all,
           (double)b->times.markov_bytes / (double)vocab / (double)r / 4 / (double)rounds, gave_up, build);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    unsigned a[6] = {1, 15, 0, 1, 163840, 256};
    static bench b;
    dspark_error err;
    size_t i;
    for (i = 0; i < 6 && (int)i + 1 < argc; i++) a[i] = (unsigned)atoi(argv[i + 1]);
    memset(&err, 0, sizeof err);
    if (a[1] > MOST_ROUNDS) a[1] = MOST_ROUNDS;
    if (a[3] > DSPARK__GREEDY_ROWS) a[3] = DSPARK__GREEDY_ROWS;
    dspark__fpenv_enter();
    must(dspark__kern_select(&b.kern, (dspark_isa)a[2], &err), &err);
    must(dspark__threads_create(&b.threads, a[0], NULL, NULL, &err), &err);
    b.n = a[3];
    b.model.config.vocab_size = a[4];
    b.model.config.markov_rank = a[5];
    b.model.config.block_size = 1;
    b.model.config.hidden_size = 64;
    b.model.config.logit_scale = 1;
    if (!dspark__heads_plan(&b.layout, &b.model.config, b.n, a[0])) return 5;
    for (i = 0; i < DSPARK__HEADS_VIEWS; i++) b.views[i] = take(b.layout.sizes[i]);
    b.heads = (dspark__heads){.model = &b.model, .kern = &b.kern, .threads = b.threads, .layout = &b.layout,
                              .n = b.n, .views = b.views, .times = &b.times};
    b.w2 = take((size_t)a[4] * a[5] * 2);
    b.logits = take((size_t)a[4] * b.n * 2);
    b.input = take((size_t)a[5] * b.n * 2);
    for (i = 0; i < sizeof FORMS / sizeof *FORMS; i++) run_form(&b, &FORMS[i], a[1]);
    return 0;
}
