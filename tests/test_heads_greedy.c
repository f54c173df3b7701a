/* The search for the largest of logits + Markov bias finds the plain way's token, whatever the numbers are
 * and however little of W2 it reads. The plain way of this test is its own: every product, then the
 * reference's argmax. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/fpenv.h"
#include "base/numfmt.h"
#include "model/heads.h"
#include "support/drafting.h"
#include "support/fixture.h"
#include "support/w2.h"

static const dspark_isa levels[] = {DSPARK_ISA_REF, DSPARK_ISA_AVX2, DSPARK_ISA_AVX512,
                                    DSPARK_ISA_AVX512BF16};
#define N_LEVELS (sizeof levels / sizeof *levels)
enum { MOST_THREADS = 4 };

static dspark_error err;

/* ---- heads without a model around them ---- */

typedef struct head {
    dspark_model model;
    dspark__kern ref;
    dspark__threads *threads[MOST_THREADS + 1];
    dspark__heads_layout layout;
    dspark_draft_times times;
    void *views[DSPARK__HEADS_VIEWS];
    uint16_t *logits, *x, *bias; /* [rows][vocab], [rows][rank], [vocab] */
    size_t found, asked;
} head;

static void *take(size_t bytes)
{
    void *p = aligned_alloc(64, bytes / 64 * 64 + 64);
    assert_non_null(p);
    memset(p, 0x5a, bytes);
    return p;
}

static void head_open(head *h, w2_form form, uint32_t vocab, uint32_t rank, float scale, uint64_t *seed)
{
    dspark_config *c = &h->model.config;
    memset(h, 0, sizeof *h);
    c->vocab_size = vocab;
    c->markov_rank = rank;
    c->block_size = 1;
    c->hidden_size = 8;
    c->logit_scale = scale;
    check(dspark__kern_select(&h->ref, DSPARK_ISA_REF, &err), DSPARK_OK, &err);
    for (uint32_t t = 1; t <= MOST_THREADS; t++)
        check(dspark__threads_create(&h->threads[t], t, NULL, NULL, &err), DSPARK_OK, &err);
    assert_true(dspark__heads_plan(&h->layout, c, DSPARK__GREEDY_ROWS, MOST_THREADS));
    for (size_t i = 0; i < DSPARK__HEADS_VIEWS; i++) h->views[i] = take(h->layout.sizes[i]);
    h->logits = take((size_t)DSPARK__GREEDY_ROWS * vocab * 2);
    h->x = take((size_t)DSPARK__GREEDY_ROWS * rank * 2);
    h->bias = take((size_t)vocab * 2);
    w2_make(&h->model.block.markov_w2, form, vocab, rank, seed);
    check(dspark__markov_bound_build(&h->model.block.markov_bound, &h->model.block.markov_w2, h->threads[2],
                                     NULL, &err), DSPARK_OK, &err);
    assert_non_null(h->model.block.markov_bound.panels);
}

static void head_close(head *h)
{
    dspark__merged_linear_free(&h->model.block.markov_w2);
    dspark__markov_bound_free(&h->model.block.markov_bound);
    for (uint32_t t = 1; t <= MOST_THREADS; t++) dspark__threads_free(h->threads[t]);
    for (size_t i = 0; i < DSPARK__HEADS_VIEWS; i++) free(h->views[i]);
    free(h->logits);
    free(h->x);
    free(h->bias);
}

static size_t plain_token(head *h, uint32_t row)
{
    const dspark_config *c = &h->model.config;
    const dspark__merged_linear *w2 = &h->model.block.markov_w2;
    float best;
    dspark__merged_linear_rows(w2, &h->ref, 0, 0, w2->shards[0].n_panels, h->x + (size_t)row * c->markov_rank,
                               0, 1, h->views[DSPARK__HEADS_SCRATCH], h->bias, c->vocab_size);
    for (uint32_t v = 0; c->logit_scale != 1 && v < c->vocab_size; v++)
        h->bias[v] = dspark__f32_to_bf16(dspark__bf16_to_f32(h->bias[v]) * c->logit_scale);
    return h->ref.add_argmax_bf16(h->logits + (size_t)row * c->vocab_size, h->bias, c->vocab_size, &best);
}

/* The search on one level with so many threads; 0 when it left the answer to the plain way. */
static int search(head *h, dspark_isa isa, uint32_t threads, uint32_t n, dspark__greedy_row *rows)
{
    const dspark_config *c = &h->model.config;
    dspark__kern kern;
    int hopeless = 0;
    check(dspark__kern_select(&kern, isa, &err), DSPARK_OK, &err);
    dspark__heads heads = {.model = &h->model, .kern = &kern, .threads = h->threads[threads],
                           .layout = &h->layout, .n = n, .views = h->views, .times = &h->times};
    memset(&h->times, 0, sizeof h->times);
    for (uint32_t r = 0; r < n; r++)
        rows[r] = (dspark__greedy_row){h->logits + (size_t)r * c->vocab_size,
                                       h->x + (size_t)r * c->markov_rank, 12345678};
    return dspark__greedy_tokens(&heads, rows, n, &hopeless);
}

/* Searches on one or all levels and threads; returns how many tokens are wrong. */
static size_t count_wrong(head *h, uint32_t n, int thorough)
{
    static unsigned turn;
    size_t want[DSPARK__GREEDY_ROWS], wrong = 0;
    uint64_t read = 0, bounded = 0;
    int first = 1;
    for (uint32_t r = 0; r < n; r++) want[r] = plain_token(h, r);
    for (size_t l = 0; l < N_LEVELS; l++)
        for (uint32_t t = 1; t <= MOST_THREADS; t++) {
            dspark__greedy_row rows[DSPARK__GREEDY_ROWS];
            if (!thorough && turn++ % 7 != 0) continue;
            if (!dspark__isa_available(levels[l])) continue;
            h->asked++;
            int found = search(h, levels[l], t, n, rows);
            h->found += (size_t)found;
            for (uint32_t r = 0; found && r < n; r++) wrong += rows[r].token != want[r];
            /* what is read depends on neither level nor threads */
            if (!first && (read != h->times.markov_rows_read || bounded != h->times.markov_rows_bounded))
                fail_msg("%s, %u threads: %llu rows read, %llu before", dspark__isa_name(levels[l]), t,
                         (unsigned long long)h->times.markov_rows_read, (unsigned long long)read);
            read = h->times.markov_rows_read;
            bounded = h->times.markov_rows_bounded;
            first = 0;
        }
    return wrong;
}

static void expect_right(head *h, uint32_t n, int thorough, const char *what)
{
    size_t wrong = count_wrong(h, n, thorough);
    if (wrong) fail_msg("%s: %zu wrong tokens", what, wrong);
}

/* How logits lie: 0 a bell, 1 small integers, 2 all equal, 3 with infinities, 4 -0 and subnormals,
 * 5 near overflow, 6 all -infinity, 7 a bell with few far out. */
#define LOGITS 8
static void fill_logits(head *h, int kind, double size, uint64_t *seed)
{
    const size_t n = (size_t)DSPARK__GREEDY_ROWS * h->model.config.vocab_size;
    for (size_t i = 0; i < n; i++) {
        double x = w2_bell(seed) * size;
        if (kind == 1) x = (double)(next_random(seed) % 7) - 3;
        if (kind == 2) x = 1.5;
        if (kind == 3 && next_random(seed) % 50 == 0) x = next_random(seed) % 3 ? -INFINITY : INFINITY;
        if (kind == 4) x = ldexp((double)(next_random(seed) % 3) - 1, -130 + (int)(next_random(seed) % 6));
        if (kind == 4 && next_random(seed) % 2) x = -0.0;
        if (kind == 5) x *= 0x1p125;
        if (kind == 6) x = -INFINITY;
        if (kind == 7 && next_random(seed) % 100 == 0) x *= 8;
        h->logits[i] = dspark__f64_to_bf16(x);
    }
}

/* ---- the search against the plain way ---- */

static void test_random_cases(void **state)
{
    static const uint32_t vocabs[] = {1, 47, 48, 49, 97, 300, 1000}, ranks[] = {1, 5, 8, 32, 33, 64, 256};
    static const float scales[] = {1, 1, 0.5f, 3.7f};
    uint64_t seed = 2024;
    size_t found = 0, asked = 0;
    unsigned old = dspark__fpenv_enter();
    (void)state;
    for (int round = 0; round < (SAMPLE ? 33 : 220); round++) {
        const w2_form form = (w2_form)(round % W2_FORMS);
        const uint32_t vocab = vocabs[next_random(&seed) % 7], rank = ranks[next_random(&seed) % 7];
        const double norm = sqrt(rank);
        head h;
        head_open(&h, form, vocab, rank, scales[next_random(&seed) % 4], &seed);
        for (int kind = 0; kind < LOGITS; kind++) {
            double size = form == W2_HUGE ? 0x1p45 : form == W2_TINY ? 0x1p-120 : 1;
            fill_logits(&h, kind, size * norm * ldexp(1, (int)(next_random(&seed) % 7) - 2), &seed);
            for (uint32_t r = 0; r < DSPARK__GREEDY_ROWS; r++)
                w2_vector(h.x + (size_t)r * rank, (int)(next_random(&seed) % W2_VECTORS), rank, &seed);
            expect_right(&h, 1 + (uint32_t)(next_random(&seed) % DSPARK__GREEDY_ROWS), round < 11,
                         w2_names[form]);
        }
        found += h.found;
        asked += h.asked;
        head_close(&h);
    }
    dspark__fpenv_leave(old);
    print_message("  %zu searches, %zu of them found the tokens\n", asked, found);
    assert_true(found * 2 > asked);
}

/* A vocabulary that is worth a sample; and one in which the sample says that bounds are of no use. */
static void test_sampled_vocabulary(void **state)
{
    uint64_t seed = 5;
    unsigned old = dspark__fpenv_enter();
    (void)state;
    for (int form = W2_NORMAL; form <= W2_EQUAL_ROWS; form++) {
        head h;
        head_open(&h, (w2_form)form, 30011, 24, 1, &seed);
        for (int round = 0; round < (SAMPLE ? 2 : 12); round++) {
            fill_logits(&h, form == W2_EQUAL_ROWS ? 2 : round % 2, 8, &seed);
            for (uint32_t r = 0; r < DSPARK__GREEDY_ROWS; r++) w2_vector(h.x + r * 24, 0, 24, &seed);
            expect_right(&h, 1 + (uint32_t)round % 2, round < 2, w2_names[form]);
            const uint64_t all = 30011 * (1 + (uint64_t)round % 2);
            if (form == W2_NORMAL && round % 2 == 0) assert_true(h.times.markov_rows_read * 10 < all);
            if (form == W2_EQUAL_ROWS) assert_true(h.times.markov_rows_bounded * 10 < all);
        }
        assert_true(form == W2_EQUAL_ROWS ? h.found == 0 : h.found > 0);
        head_close(&h);
    }
    dspark__fpenv_leave(old);
}

/* The sums at two places are equal, in one panel or far apart, and nothing is larger: the first wins. */
static void test_ties(void **state)
{
    enum { VOCAB = 960, RANK = 8 };
    uint64_t seed = 17;
    unsigned old = dspark__fpenv_enter();
    head h;
    (void)state;
    head_open(&h, W2_INTEGERS, VOCAB, RANK, 1, &seed);
    for (int round = 0; round < 300; round++) {
        const size_t a = next_random(&seed) % VOCAB, b = next_random(&seed) % VOCAB;
        dspark__greedy_row row[1];
        fill_logits(&h, 0, 1, &seed);
        w2_vector(h.x, 1, RANK, &seed);
        plain_token(&h, 0); /* for the biases */
        const double sum = 200 + (double)(next_random(&seed) % 2);
        h.logits[a] = dspark__f64_to_bf16(sum - (double)dspark__bf16_to_f32(h.bias[a]));
        h.logits[b] = dspark__f64_to_bf16(sum - (double)dspark__bf16_to_f32(h.bias[b]));
        assert_int_equal(plain_token(&h, 0), a < b ? a : b);
        assert_true(search(&h, levels[round % 2], 1 + (uint32_t)round % 4, 1, row));
        assert_int_equal(row[0].token, a < b ? a : b);
    }
    head_close(&h);
    dspark__fpenv_leave(old);
}

/* A NaN among logits is left to the plain way, wherever it lies, and so is a vector with one. */
static void test_not_a_number(void **state)
{
    enum { VOCAB = 500, RANK = 16 };
    uint64_t seed = 23;
    dspark__greedy_row rows[2];
    head h;
    (void)state;
    head_open(&h, W2_NORMAL, VOCAB, RANK, 1, &seed);
    fill_logits(&h, 0, 50, &seed);
    w2_vector(h.x, 0, RANK, &seed);
    w2_vector(h.x + RANK, 0, RANK, &seed);
    assert_true(search(&h, DSPARK_ISA_AUTO, 2, 2, rows));
    for (size_t i = 0; i < 2 * VOCAB; i += 37) {
        uint16_t keep = h.logits[i];
        h.logits[i] = 0xffc1;
        assert_false(search(&h, DSPARK_ISA_AUTO, 2, 2, rows));
        h.logits[i] = keep;
    }
    h.x[RANK + 3] = 0x7fc0;
    assert_false(search(&h, DSPARK_ISA_AUTO, 2, 2, rows));
    head_close(&h);
}

/* Bounds that are wrong are found out by these tests: with residuals and norms a third as large, tokens
 * are missed. */
static void test_wrong_bounds_are_noticed(void **state)
{
    enum { VOCAB = 2000, RANK = 16 };
    uint64_t seed = 31;
    size_t wrong = 0;
    head h;
    (void)state;
    head_open(&h, W2_NORMAL, VOCAB, RANK, 1, &seed);
    dspark__markov_bound *b = &h.model.block.markov_bound;
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t p = 0; pass && p < b->n_panels; p++)
            for (size_t i = DSPARK__PANEL; i < 3 * DSPARK__PANEL; i++) {
                unsigned char *at = b->memory + p * b->stride + 2 * i;
                uint16_t bits = dspark__f64_to_bf16((double)dspark__bf16_to_f32(dspark__load_u16(at)) / 3);
                memcpy(at, &bits, 2);
            }
        for (int round = 0; round < 150; round++) {
            fill_logits(&h, 0, 1, &seed);
            w2_vector(h.x, 0, RANK, &seed);
            wrong += count_wrong(&h, 1, 0);
        }
        print_message("  %zu wrong of %zu\n", wrong, h.asked);
        if (!pass) assert_int_equal(wrong, 0);
    }
    assert_true(wrong > 0);
    head_close(&h);
}

/* ---- through the drafter ---- */

/* Tokens with the sums stored (the plain way) and without are the same, for each kind of head, alone and
 * among others; and the counts say which way was taken. */
static void test_drafts_are_the_same(void **state)
{
    static const char *const heads[][2] = {{"markov_head_type=vanilla", "logit_scale=1"},
                                           {"markov_head_type=gated", "logit_scale=0.5"},
                                           {"markov_head_type=rnn", "logit_scale=2"},
                                           {"markov_head_type=vanilla", "logit_scale=-1"}};
    (void)state;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        drafting d;
        drafting_open(&d, heads[i], 2);
        for (size_t m = 0; m < 3; m++) {
            const uint32_t most = (const uint32_t[]){1, 3, 6}[m]; /* sequences; 6 are too many to search */
            dspark_drafter *drafter = drafting_drafter(&d, DSPARK_ISA_AUTO, 2, most);
            dspark_cache *cache = NULL;
            dspark_draft_input in[6];
            dspark_draft_output out[6];
            answer want[6], got[6];
            check(dspark_cache_create(&cache, d.model, DSPARK_CACHE_BF16, 16, 1, NULL, &err), DSPARK_OK, &err);
            for (int pass = 0; pass < 2; pass++) {
                for (uint32_t s = 0; s < most; s++) {
                    answer *a = pass ? &got[s] : &want[s];
                    dspark_draft_input_init(&in[s]);
                    in[s].anchor = (int64_t)(7 * s + i) % (int64_t)d.vocab;
                    if (s == 2) in[s].n_draft = 2; /* ends early */
                    answer_open(a, &d);
                    if (pass) a->out.logits = NULL;
                    out[s] = a->out;
                }
                check(dspark_draft(drafter, dspark_cache_get_view(cache), in, out, most, &err), DSPARK_OK, &err);
                for (uint32_t s = 0; s < most; s++) (pass ? &got[s] : &want[s])->out = out[s];
                dspark_draft_times t = dspark_drafter_times(drafter);
                uint64_t tokens = 0;
                for (uint32_t s = 0; s < most; s++) tokens += out[s].n_tokens;
                assert_int_equal(t.markov_rows, tokens * d.vocab);
                int searched = pass && heads[i][1][12] != '-';
                if (most > DSPARK__GREEDY_ROWS || !searched) assert_int_equal(t.markov_rows_read, t.markov_rows);
                assert_int_equal(t.markov_rows_bounded > 0, searched && most <= DSPARK__GREEDY_ROWS);
                assert_true(t.markov_bytes > 0);
            }
            for (uint32_t s = 0; s < most; s++) {
                assert_int_equal(want[s].out.status, DSPARK_OK);
                assert_int_equal(got[s].out.n_tokens, want[s].out.n_tokens);
                got[s].out.logits = want[s].out.logits; /* not asked for */
                answer_equal(&want[s], &got[s], want[s].out.n_tokens, heads[i][0]);
            }
            for (uint32_t s = 0; s < most; s++) {
                answer_close(&want[s]);
                answer_close(&got[s]);
            }
            dspark_cache_free(cache);
            dspark_drafter_free(drafter);
        }
        drafting_close(&d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_cases), cmocka_unit_test(test_sampled_vocabulary),
        cmocka_unit_test(test_ties), cmocka_unit_test(test_not_a_number),
        cmocka_unit_test(test_wrong_bounds_are_noticed), cmocka_unit_test(test_drafts_are_the_same),
    };
    return cmocka_run_group_tests_name("heads_greedy", tests, NULL, NULL);
}
