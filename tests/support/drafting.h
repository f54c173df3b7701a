/* A tiny synthetic drafter that can draft: opened with its block, an LM head of the test's own, rows
 * of taps, and answers that are compared bit for bit. Failures end the running cmocka test. */
#ifndef DSPARK_TESTS_SUPPORT_DRAFTING_H
#define DSPARK_TESTS_SUPPORT_DRAFTING_H

#include <stddef.h>
#include <stdint.h>

#include "dspark/dspark.h"

#define DRAFTING_ROWS 600u
#define DRAFTING_MAX_TOKENS 64u /* rows in the workspace of a drafter */
#define DRAFTING_SEED 20240611u

typedef struct drafting {
    char dir[512];
    dspark_model *model;
    const dspark_config *config;
    size_t vocab, h, n;          /* n: tokens of a block */
    size_t taps_width;
    uint16_t *lm_head;           /* [vocab][h] */
    uint16_t *taps;              /* [DRAFTING_ROWS][taps_width] */
} drafting;

/* settings: "key=value" for the tiny preset. Prints the seed of all values. */
void drafting_open(drafting *d, const char *const *settings, size_t n_settings);
void drafting_close(drafting *d);
/* For cmocka: *state is a drafting with the preset's own settings. */
int drafting_setup(void **state);
int drafting_teardown(void **state);

dspark_drafter *drafting_drafter(const drafting *d, dspark_isa isa, uint32_t threads,
                                 uint32_t max_sequences);
const uint16_t *drafting_row(const drafting *d, size_t row);

/* Room for all that a draft gives; every byte of it 0x5a before the draft. */
typedef struct answer {
    dspark_draft_output out;
    size_t vocab, h, n;
    void *memory;
    size_t bytes;
} answer;

void answer_open(answer *a, const drafting *d);
void answer_close(answer *a);
/* The same on the heap. */
answer *answer_new(const drafting *d);
void answer_free(answer *a);
/* Was all of it left alone (but for status and count)? */
int answer_untouched(const answer *a);
/* The same status, and the same bits of the first k tokens' results (of the hidden states: all). */
void answer_equal(const answer *want, const answer *got, size_t k, const char *what);

/* The same status and number of tokens, and the same bits of all that was given. */
void answer_same(const answer *want, const answer *got);

/* A pool's session of n rows of taps from row `first` on. */
dspark_pool *drafting_pool(const drafting *d, dspark_cache_dtype dtype, uint32_t block_size,
                           uint32_t max_sessions, uint64_t n_blocks);
dspark_session *drafting_session(const drafting *d, dspark_pool *pool, dspark_drafter *drafter,
                                 size_t first, size_t n);
dspark_session *drafting_empty(dspark_pool *pool);
/* Rows of taps behind those that the session has. */
void drafting_append(const drafting *d, dspark_session *s, dspark_drafter *drafter, size_t row, size_t n);
/* An input with nothing but an anchor. */
dspark_draft_input drafting_input(int64_t anchor);
/* A draft of a session; everything else in `in` is the default. */
void drafting_draft(dspark_session *s, dspark_drafter *drafter, int64_t anchor, answer *a);
/* The same into a new answer; it must succeed. */
answer *drafting_answer(const drafting *d, dspark_session *s, dspark_drafter *drafter, int64_t anchor);
/* The same through the host's own cache: the first n rows in blocks of 16, in order. */
answer *drafting_raw(const drafting *d, dspark_drafter *drafter, dspark_cache_dtype dtype, size_t n,
                     int64_t anchor);
/* A session's draft is that of n fresh rows, and harms nothing. */
void drafting_expect_fresh(const drafting *d, dspark_session *s, dspark_drafter *drafter, size_t n);
uint64_t drafting_free_blocks(dspark_pool *pool);

#endif
