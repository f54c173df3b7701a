/* Speculative decoding on the trained pair (models/tiny-shakespeare): greedy speculative text must be
 * the target's own greedy text, byte for byte, on every held-out prompt; with rewinds, forks and shared
 * prefixes mixed in; and sampled text must follow the target's law. */
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-function"
#endif
#include "../examples/tiny_llama.h"
#include "support/fixture.h"

#define MODELS DSPARK_TEST_DATA "/../../models/tiny-shakespeare"
#define MAX_PROMPTS 400
#define MAX_TEXT 512
#define N_BYTES 256
#define BLOCK 7

/* Sanitizers and debug builds run the same on fewer prompts. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
enum { PROMPTS = 6 };
#else
enum { PROMPTS = 200 };
#endif

static dspark_error err;
#define must(call) check((call), DSPARK_OK, &err)

typedef struct pair {
    llama target;
    dspark_model *model;
    dspark_drafter *drafter;
    dspark_pool *pool;
    const dspark_config *config;
    size_t width;
    float *logits;
    uint16_t *taps;
} pair;

static int open_pair(void **state)
{
    static pair p;
    dspark_model_opts model;
    dspark_drafter_opts drafter;
    dspark_pool_opts pool;
    memset(&p, 0, sizeof p);
    assert_int_equal(llama_load(&p.target, MODELS "/target", MAX_TEXT), 0);
    dspark_model_opts_init(&model);
    model.parts = DSPARK_PART_BLOCK;
    model.target = MODELS "/target";
    must(dspark_model_open(&p.model, MODELS "/drafter", &model, &err));
    p.config = dspark_model_config(p.model);
    assert_int_equal(p.config->block_size, BLOCK);
    p.width = (size_t)p.config->n_taps * p.config->tap_width;
    dspark_drafter_opts_init(&drafter);
    drafter.n_threads = 1;
    must(dspark_drafter_create(&p.drafter, p.model, &drafter, &err));
    dspark_pool_opts_init(&pool);
    pool.max_sessions = 4;
    pool.max_length = 1024;
    pool.block_size = 16;
    must(dspark_pool_create(&p.pool, p.model, &pool, &err));
    p.logits = malloc(sizeof *p.logits * MAX_TEXT * (size_t)p.target.vocab);
    p.taps = malloc(sizeof *p.taps * MAX_TEXT * p.width);
    assert_non_null(p.logits);
    assert_non_null(p.taps);
    *state = &p;
    return 0;
}

static int close_pair(void **state)
{
    pair *p = *state;
    dspark_pool_free(p->pool);
    dspark_drafter_free(p->drafter);
    dspark_model_close(p->model);
    llama_free(&p->target);
    free(p->logits);
    free(p->taps);
    return 0;
}

/* ---- prompts ---- */

static size_t read_prompts(unsigned char prompts[MAX_PROMPTS][MAX_TEXT], int lengths[MAX_PROMPTS])
{
    FILE *f = fopen(MODELS "/prompts.txt", "r");
    char line[4096];
    size_t n = 0;
    assert_non_null(f);
    while (n < MAX_PROMPTS && fgets(line, sizeof line, f)) {
        const char *c;
        int k = 0;
        for (c = line; *c && *c != '\n' && k < MAX_TEXT - N_BYTES; c++) {
            if (c[0] == '\\' && c[1] == 'n') {
                prompts[n][k++] = '\n';
                c++;
            } else if (c[0] == '\\' && c[1] == '\\') {
                prompts[n][k++] = '\\';
                c++;
            } else {
                prompts[n][k++] = (unsigned char)*c;
            }
        }
        if (k) lengths[n++] = k;
    }
    fclose(f);
    return n;
}

/* ---- one text ---- */

typedef struct text {
    int32_t tokens[MAX_TEXT];
    int n, n_prompt;
} text;

static void run_target(pair *p, const int32_t *tokens, int n, int position)
{
    llama_run(&p->target, tokens, n, position, p->logits, p->config->tap_layers,
              (int)p->config->n_taps, p->taps);
}

static void write_alone(pair *p, text *t, int n_bytes)
{
    run_target(p, t->tokens, t->n, 0);
    t->tokens[t->n] = llama_argmax(p->logits + (t->n - 1) * p->target.vocab, p->target.vocab);
    t->n++;
    while (t->n < t->n_prompt + n_bytes) {
        run_target(p, t->tokens + t->n - 1, 1, t->n - 1);
        t->tokens[t->n] = llama_argmax(p->logits, p->target.vocab);
        t->n++;
    }
}

/* One step with the drafter; what it accepted is counted. Returns tokens written. */
static int step(pair *p, dspark_session *s, text *t, int room, uint64_t accepted[BLOCK + 1])
{
    int32_t tokens[BLOCK + 1], best[BLOCK + 1];
    dspark_draft_input in;
    dspark_draft_output out;
    dspark_verdict_tokens v;
    const int position = t->n - 1;
    int i;
    dspark_draft_input_init(&in);
    dspark_draft_output_init(&out);
    in.anchor = tokens[0] = t->tokens[position];
    out.tokens = tokens + 1;
    must(dspark_session_draft(s, p->drafter, &in, &out, &err));
    assert_int_equal(out.status, DSPARK_OK);
    assert_int_equal(out.n_tokens, BLOCK);
    run_target(p, tokens, BLOCK + 1, position);
    for (i = 0; i <= BLOCK; i++)
        best[i] = llama_argmax(p->logits + i * p->target.vocab, p->target.vocab);
    must(dspark_verify_greedy(tokens + 1, BLOCK, best, (size_t)p->target.vocab, &v, &err));
    must(dspark_session_append(s, p->drafter, (uint64_t)position, p->taps, p->width, 0, BLOCK + 1, &err));
    must(dspark_session_accept(s, v.n_accepted, &err));
    accepted[v.n_accepted]++;
    for (i = 0; i <= (int)v.n_accepted && i < room; i++)
        t->tokens[t->n++] = i < (int)v.n_accepted ? tokens[1 + i] : v.next;
    return i;
}

/* Prefill in two calls, then steps; `tricks` adds rewinds and forks, which must not be seen. */
static void write_speculative(pair *p, text *t, int n_bytes, int tricks, uint64_t accepted[BLOCK + 1])
{
    dspark_session *s = NULL, *fork = NULL;
    const size_t half = (size_t)t->n_prompt / 2;
    int end = t->n_prompt + n_bytes, n_steps = 0;
    must(dspark_session_open(&s, p->pool, &err));
    run_target(p, t->tokens, t->n, 0);
    must(dspark_session_append(s, p->drafter, 0, p->taps, p->width, 0, half, &err));
    must(dspark_session_append(s, p->drafter, half, p->taps + half * p->width, p->width, 0,
                               (size_t)t->n - half, &err));
    t->tokens[t->n] = llama_argmax(p->logits + (t->n - 1) * p->target.vocab, p->target.vocab);
    t->n++;
    while (t->n < end) {
        if (tricks && n_steps++ % 5 == 4) { /* go on in a copy of the timeline */
            must(dspark_session_fork(&fork, s, &err));
            dspark_session_close(s);
            s = fork;
        }
        if (tricks && n_steps % 7 == 6 && dspark_session_length(s) > 12) { /* forget and read again */
            uint64_t back = dspark_session_length(s) - 9;
            must(dspark_session_rewind(s, back, &err));
            run_target(p, t->tokens + back, 9, (int)back);
            must(dspark_session_append(s, p->drafter, back, p->taps, p->width, 0, 9, &err));
        }
        step(p, s, t, end - t->n, accepted);
    }
    dspark_session_close(s);
}

static void test_greedy_text_is_the_targets(void **state)
{
    static unsigned char prompts[MAX_PROMPTS][MAX_TEXT];
    static int lengths[MAX_PROMPTS];
    pair *p = *state;
    size_t n = read_prompts(prompts, lengths), i;
    uint64_t accepted[BLOCK + 1] = {0}, blocks = 0, sum = 0;
    assert_true(n >= 200);
    if (n > PROMPTS) n = PROMPTS;
    for (i = 0; i < n; i++) {
        text alone = {.n = lengths[i], .n_prompt = lengths[i]}, fast;
        int k;
        for (k = 0; k < lengths[i]; k++) alone.tokens[k] = prompts[i][k];
        fast = alone;
        write_alone(p, &alone, N_BYTES);
        write_speculative(p, &fast, N_BYTES, i % 2 == 1, accepted);
        assert_int_equal(fast.n, alone.n);
        for (k = 0; k < alone.n; k++)
            if (alone.tokens[k] != fast.tokens[k])
                fail_msg("prompt %zu, byte %d: %d, the target alone says %d", i, k - lengths[i],
                         (int)fast.tokens[k], (int)alone.tokens[k]);
    }
    for (i = 0; i <= BLOCK; i++) {
        print_message("  %zu accepted: %llu blocks\n", i, (unsigned long long)accepted[i]);
        if (PROMPTS >= 200) assert_true(accepted[i] > 0);
        blocks += accepted[i];
        sum += i * accepted[i];
    }
    print_message("  %zu prompts x %d bytes: acceptance length %.3f of %d\n", n, N_BYTES,
                  1.0 + (double)sum / (double)blocks, BLOCK + 1);
    assert_true(1.0 + (double)sum / (double)blocks >= 3.0);
}

/* A prefix in the pool is read once and shared: both branches equal runs of their own. */
static void test_shared_prefix(void **state)
{
    pair *p = *state;
    uint64_t accepted[BLOCK + 1] = {0};
    const char *prefix = "KING RICHARD II:\nWhat must the king do now? must he submit?\n";
    const char *tails[] = {"The king", "Away, my lord"};
    dspark_session *base = NULL, *branch = NULL;
    text head = {.n = (int)strlen(prefix)};
    int i, b, k;
    for (i = 0; i < head.n; i++) head.tokens[i] = (unsigned char)prefix[i];
    must(dspark_session_open(&base, p->pool, &err));
    run_target(p, head.tokens, head.n, 0);
    must(dspark_session_append(base, p->drafter, 0, p->taps, p->width, 0, (size_t)head.n, &err));
    for (b = 0; b < 2; b++) {
        text alone = head, fast;
        for (k = 0; tails[b][k]; k++) alone.tokens[alone.n++] = (unsigned char)tails[b][k];
        alone.n_prompt = alone.n;
        fast = alone;
        write_alone(p, &alone, 64);
        must(dspark_session_fork(&branch, base, &err));
        run_target(p, fast.tokens, head.n, 0); /* the target's own cache of the prefix */
        run_target(p, fast.tokens + head.n, fast.n - head.n, head.n);
        must(dspark_session_append(branch, p->drafter, (uint64_t)head.n, p->taps, p->width, 0,
                                   (size_t)(fast.n - head.n), &err));
        fast.tokens[fast.n] = llama_argmax(p->logits + (fast.n - head.n - 1) * p->target.vocab,
                                           p->target.vocab);
        fast.n++;
        while (fast.n < alone.n) step(p, branch, &fast, alone.n - fast.n, accepted);
        assert_memory_equal(fast.tokens, alone.tokens, sizeof(int32_t) * (size_t)alone.n);
        dspark_session_close(branch);
    }
    assert_int_equal(dspark_session_length(base), head.n);
    dspark_session_close(base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_greedy_text_is_the_targets),
                                       cmocka_unit_test(test_shared_prefix)};
    return cmocka_run_group_tests_name("generate", tests, open_pair, close_pair);
}
