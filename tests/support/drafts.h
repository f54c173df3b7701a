/* A tiny model with a block and heads, taps to feed it, and a draft's results in memory of the test's
 * own: what the tests of heads, drafters and sessions stand on. Failures end the running cmocka test. */
#ifndef DSPARK_TESTS_SUPPORT_DRAFTS_H
#define DSPARK_TESTS_SUPPORT_DRAFTS_H

#include <stddef.h>
#include <stdint.h>

#include "dspark/dspark.h"

#define DRAFTS_ROWS 600 /* of taps */

typedef struct drafts {
    char dir[512];
    dspark_model *model;
    const dspark_config *c;
    uint16_t *head;      /* [vocab][h], the host's */
    size_t taps_width;
    uint16_t *taps;      /* [DRAFTS_ROWS][taps_width] */
} drafts;

/* settings: "key=value" for the tiny preset. The head and the taps are random, the same in every run. */
void drafts_open(drafts *t, const char *const *settings, size_t n_settings);
/* Open the checkpoint again: its files or t->head have been changed. */
void drafts_reopen(drafts *t);
void drafts_close(drafts *t);
/* The data of a tensor of the checkpoint, to read and to replace; n bytes exactly. */
void drafts_read(const drafts *t, const char *tensor, void *data, size_t n);
void drafts_write(const drafts *t, const char *tensor, const void *data, size_t n);

dspark_drafter *drafts_drafter(const drafts *t, dspark_isa isa, uint32_t n_threads, uint32_t max_sequences);
dspark_pool *drafts_pool(const drafts *t, dspark_cache_dtype dtype, uint32_t block_size, uint64_t n_blocks,
                         uint32_t max_sessions);
/* Rows first .. first+n-1 of the taps at those positions. */
void drafts_append(const drafts *t, dspark_session *s, dspark_drafter *d, uint64_t first, size_t n);

/* What one draft gave, every pointer of the output set. */
typedef struct drafted {
    dspark_draft_output out;
    int32_t tokens[32];
    float confidence[32], confidence_logits[32];
    uint16_t *hidden, *base, *logits;
    float *probs;
} drafted;

/* Empty (and filled with a pattern) results for a model. */
drafted *drafted_new(const drafts *t);
void drafted_free(drafted *r);
/* Fails unless both have the same status and, of the tokens given, the same bits everywhere. */
void drafted_same(const drafts *t, const drafted *a, const drafted *b);
/* Was the output left alone (but for status and count)? */
int drafted_untouched(const drafts *t, const drafted *r);

/* ---- sessions ---- */

dspark_session *drafts_session(dspark_pool *pool);
/* An input with nothing but an anchor. */
dspark_draft_input drafts_input(int64_t anchor);
/* A session's draft, which must succeed. */
drafted *drafts_draft(const drafts *t, dspark_session *s, dspark_drafter *d, int64_t anchor);
/* The same through the host's own cache: n rows in blocks of 16, in order. */
drafted *drafts_raw(const drafts *t, dspark_drafter *d, dspark_cache_dtype dtype, size_t n,
                    int64_t anchor);
/* A session's draft is that of n fresh rows, and harms nothing. */
void drafts_expect_fresh(const drafts *t, dspark_session *s, dspark_drafter *d, size_t n);
uint64_t drafts_free_blocks(dspark_pool *p);

#endif
