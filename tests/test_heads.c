/* The heads on weights that are put in place by hand: which token follows which, ties, numbers that are
 * none, and that what is sampled from is what is handed out. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model/model.h"
#include "support/drafting.h"
#include "support/fixture.h"

#define CODE 8 /* the tiny preset's Markov rank */

static dspark_error err;
#define must(call) check((call), DSPARK_OK, &err)

static const uint16_t ONE = 0x3f80, MINUS = 0xbf80, NOT_A_NUMBER = 0x7fc0, INF = 0x7f80, MINUS_INF = 0xff80;

/* Weights of the heads under the test's control: W1, W2 and LM head of a model, replaced. */
typedef struct hands {
    drafting d;
    dspark__threads *threads;
    uint16_t *w1, *w2, *lm_head;
} hands;

static void put_linear(hands *h, dspark__merged_linear *ml, const uint16_t *w, uint32_t k)
{
    dspark__merged_linear_free(ml);
    must(dspark__merged_linear_init_even(ml, "by hand", k, 1, (uint32_t)h->d.vocab, NULL, &err));
    must(dspark__merged_linear_fill_dense(ml, 0, w, &err));
}

static void put_all(hands *h)
{
    dspark__block_weights *b = &h->d.model->block;
    b->markov_w1 = (dspark__table){(const unsigned char *)h->w1, CODE * 2, h->d.vocab, CODE};
    put_linear(h, &b->markov_w2, h->w2, CODE);
    dspark__markov_bound_free(&b->markov_bound); /* it was of the weights before */
    must(dspark__markov_bound_build(&b->markov_bound, &b->markov_w2, h->threads, NULL, &err));
    put_linear(h, &b->lm_head, h->lm_head, (uint32_t)h->d.h);
}

/* A code of +-1 for every id below 128; the eighth element is 1. */
static void write_code(uint16_t *to, size_t id)
{
    size_t i;
    for (i = 0; i < CODE; i++) to[i] = i == CODE - 1 || (id >> i & 1) ? ONE : MINUS;
}

static int setup(void **state)
{
    hands *h = calloc(1, sizeof *h);
    size_t id;
    assert_non_null(h);
    drafting_open(&h->d, NULL, 0);
    must(dspark__threads_create(&h->threads, 2, NULL, NULL, &err));
    assert_int_equal(h->d.config->markov_rank, CODE);
    h->w1 = calloc(h->d.vocab, CODE * 2);
    h->w2 = calloc(h->d.vocab, CODE * 2);
    h->lm_head = calloc(h->d.vocab, h->d.h * 2);
    assert_true(h->w1 && h->w2 && h->lm_head);
    for (id = 0; id < h->d.vocab; id++) write_code(h->w1 + id * CODE, id);
    *state = h;
    return 0;
}

static int teardown(void **state)
{
    hands *h = *state;
    dspark__threads_free(h->threads);
    drafting_close(&h->d);
    free(h->w1);
    free(h->w2);
    free(h->lm_head);
    free(h);
    return 0;
}

/* A block after `anchor` over an empty context. */
static void draft(const hands *h, dspark_isa isa, uint32_t threads, int64_t anchor,
                  const dspark_sampling *sampling, uint64_t seed, answer *a)
{
    dspark_drafter *drafter = drafting_drafter(&h->d, isa, threads, 1);
    dspark_cache *cache = NULL;
    dspark_draft_input in;
    dspark_draft_input_init(&in);
    in.anchor = anchor;
    in.sampling = sampling;
    in.seed = seed;
    must(dspark_cache_create(&cache, h->d.model, DSPARK_CACHE_BF16, 16, 1, NULL, &err));
    must(dspark_draft(drafter, dspark_cache_get_view(cache), &in, &a->out, 1, &err));
    dspark_cache_free(cache);
    dspark_drafter_free(drafter);
}

/* B32: base logits zero, W2 maps id n to n + 1. */
static void test_markov_rows_are_aligned(void **state)
{
    hands *h = *state;
    answer a;
    size_t id, k;
    for (id = 1; id < h->d.vocab; id++) write_code(h->w2 + id * CODE, id - 1);
    put_all(h);
    answer_open(&a, &h->d);
    draft(h, DSPARK_ISA_AUTO, 2, 5, NULL, 0, &a);
    assert_int_equal(a.out.status, DSPARK_OK);
    assert_int_equal(a.out.n_tokens, h->d.n);
    for (k = 0; k < h->d.n; k++) assert_int_equal(a.out.tokens[k], 6 + k);
    answer_close(&a);
}

/* B96: equal largest numbers at 7 and 90. */
static void test_ties_take_the_lowest_id(void **state)
{
    hands *h = *state;
    const dspark_isa levels[] = {DSPARK_ISA_REF, DSPARK_ISA_AVX2, DSPARK_ISA_AVX512, DSPARK_ISA_AVX512BF16};
    size_t i, id;
    uint32_t threads;
    for (id = 0; id < h->d.vocab; id++) memset(h->w2 + id * CODE, 0, CODE * 2);
    for (i = 0; i < CODE; i++) h->w2[7 * CODE + i] = h->w2[90 * CODE + i] = i == CODE - 1 ? ONE : 0;
    put_all(h);
    for (i = 0; i < sizeof levels / sizeof *levels; i++) {
        if (!dspark_isa_available(levels[i])) continue;
        for (threads = 1; threads <= 8; threads += 7) {
            answer a;
            size_t k;
            answer_open(&a, &h->d);
            draft(h, levels[i], threads, 3, NULL, 0, &a);
            for (k = 0; k < h->d.n; k++) assert_int_equal(a.out.tokens[k], 7);
            a.out.logits = a.out.base_logits = NULL; /* without storing the sum: the same */
            a.out.probs = NULL;
            draft(h, levels[i], threads, 3, NULL, 0, &a);
            for (k = 0; k < h->d.n; k++) assert_int_equal(a.out.tokens[k], 7);
            answer_close(&a);
        }
    }
}

/* B93, B94: numbers that are none give a status and no token; infinity an id in range or a status. */
static void test_bad_numbers(void **state)
{
    hands *h = *state;
    const uint16_t values[] = {NOT_A_NUMBER, INF, MINUS_INF};
    const size_t where[] = {0, 3, 96};
    size_t v, w, id;
    int all;
    for (v = 0; v < 3; v++)
        for (w = 0; w < 3; w++)
            for (all = 0; all < 2; all++) {
                answer a;
                int pass;
                memset(h->w2, 0, h->d.vocab * CODE * 2);
                for (id = 0; id < h->d.vocab; id++)
                    if (all || id == where[w]) h->w2[id * CODE + CODE - 1] = values[v];
                put_all(h);
                for (pass = 0; pass < 2; pass++) {
                    answer_open(&a, &h->d);
                    if (pass) a.out.logits = NULL;
                    draft(h, DSPARK_ISA_AUTO, 2, 3, NULL, 0, &a);
                    if (values[v] == NOT_A_NUMBER) {
                        assert_int_equal(a.out.status, DSPARK_ENONFINITE);
                        assert_int_equal(a.out.n_tokens, 0);
                    } else if (a.out.status == DSPARK_OK) {
                        size_t k;
                        for (k = 0; k < a.out.n_tokens; k++)
                            assert_true(a.out.tokens[k] >= 0 && (size_t)a.out.tokens[k] < h->d.vocab);
                    } else {
                        assert_int_equal(a.out.status, DSPARK_ENONFINITE);
                        assert_int_equal(a.out.n_tokens, 0);
                    }
                    answer_close(&a);
                }
            }
}

/* The row that is handed out is the row that was drawn from: over many seeds the first token follows it,
 * and the other results do not depend on the seed. */
static void test_sampled_law(void **state)
{
    hands *h = *state;
    enum { RUNS = 1500 };
    uint64_t counts[256] = {0};
    dspark_sampling s;
    answer first, a;
    double x = 0, cells = 0, rest_p = 0, rest_n = 0;
    size_t i, id;
    for (id = 0; id < h->d.vocab; id++) { /* eight likely tokens */
        memset(h->w2 + id * CODE, 0, CODE * 2);
        h->w2[id * CODE + CODE - 1] = id < 8 ? (uint16_t)(0x4000 + id * 8) : 0xc0a0;
    }
    put_all(h);
    dspark_sampling_init(&s);
    s.temperature = 1;
    answer_open(&first, &h->d);
    draft(h, DSPARK_ISA_AUTO, 1, 3, &s, 0, &first);
    assert_int_equal(first.out.status, DSPARK_OK);
    for (i = 0; i < RUNS; i++) {
        answer_open(&a, &h->d);
        draft(h, DSPARK_ISA_AUTO, 1, 3, &s, i, &a);
        assert_memory_equal(a.out.probs, first.out.probs, h->d.vocab * sizeof(float));
        assert_true(a.out.probs[a.out.tokens[0]] > 0);
        counts[a.out.tokens[0]]++;
        answer_close(&a);
    }
    for (id = 0; id < h->d.vocab; id++) {
        double p = (double)first.out.probs[id] * RUNS;
        if (p < 8) {
            rest_p += p;
            rest_n += (double)counts[id];
            continue;
        }
        x += ((double)counts[id] - p) * ((double)counts[id] - p) / p;
        cells++;
    }
    if (rest_p > 0) x += (rest_n - rest_p) * (rest_n - rest_p) / rest_p;
    print_message("  chi-square of %.0f: %.1f\n", cells, x);
    assert_true(cells >= 4 && x < cells + 5 * sqrt(2 * cells));
    /* The same seed, the same tokens; also on another level. */
    answer_open(&a, &h->d);
    draft(h, DSPARK_ISA_REF, 2, 3, &s, 0, &a);
    answer_equal(&first, &a, h->d.n, "ref against auto");
    answer_close(&a);
    answer_close(&first);
}

/* What the confidence sees: the hidden state, and W1 of the token before. */
static void test_confidence_reads_the_token_before(void **state)
{
    hands *h = *state;
    answer a;
    size_t k, i;
    memset(h->w2, 0, h->d.vocab * CODE * 2);
    put_all(h);
    answer_open(&a, &h->d);
    draft(h, DSPARK_ISA_AUTO, 1, 5, NULL, 0, &a);
    for (k = 0; k < h->d.n; k++) {
        const dspark__block_weights *b = &h->d.model->block;
        size_t prev = k ? (size_t)a.out.tokens[k - 1] : 5;
        double sum = (double)b->confidence_bias;
        for (i = 0; i < h->d.h + CODE; i++) {
            uint32_t x, w;
            float fx, fw;
            uint16_t bits = i < h->d.h ? a.out.hidden[k * h->d.h + i] : h->w1[prev * CODE + i - h->d.h];
            x = (uint32_t)bits << 16;
            w = (uint32_t)b->confidence[i] << 16;
            memcpy(&fx, &x, 4);
            memcpy(&fw, &w, 4);
            sum += (double)fx * (double)fw;
        }
        assert_true(fabs(sum - (double)a.out.confidence_logits[k]) < 1e-4);
        assert_true(fabs(1 / (1 + exp(-sum)) - (double)a.out.confidence[k]) < 1e-5);
    }
    answer_close(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_markov_rows_are_aligned), cmocka_unit_test(test_ties_take_the_lowest_id),
        cmocka_unit_test(test_bad_numbers), cmocka_unit_test(test_sampled_law),
        cmocka_unit_test(test_confidence_reads_the_token_before),
    };
    return cmocka_run_group_tests_name("heads", tests, setup, teardown);
}
