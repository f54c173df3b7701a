/* A target's checkpoint as a drafter sees it: config.json, an embedding, an LM head, and one tensor that
 * nobody asks for. The config and how the tensors are named and dealt to files are the test's choice. */
#ifndef DSPARK_TESTS_SUPPORT_TARGET_H
#define DSPARK_TESTS_SUPPORT_TARGET_H

#include <stddef.h>
#include <stdint.h>

#include "support/tensors.h"

typedef struct test_target {
    uint32_t vocab, hidden, n_layers;
    uint64_t seed;
    const char *embed_prefix; /* before "embed_tokens.weight" */
    const char *head_prefix;  /* before "lm_head.weight" */
    int no_embed, no_head;    /* leave the tensor out */
    const char *tie;          /* JSON of tie_word_embeddings, or NULL */
    const char *config;       /* the whole config.json; "": none; NULL: made of the above */
    int nested;               /* the made config keeps the model's keys in text_config */
    size_t n_files;           /* 1, or up to 3: embedding, LM head, the rest */
} test_target;

/* As most checkpoints are: "model.embed_tokens.weight", "lm_head.weight", one file. */
test_target test_target_plain(uint32_t vocab, uint32_t hidden, uint32_t n_layers, uint64_t seed);
/* Write `dir`, which is there already. Failures end the running cmocka test. */
void test_target_write(const char *dir, const test_target *t);

/* The values, at any time: embedding about uniform in (-2, 2), LM head in (-2, 2) / sqrt(hidden). */
uint16_t test_target_embed(const test_target *t, uint32_t row, uint32_t column);
uint16_t test_target_head(const test_target *t, uint32_t row, uint32_t column);
/* All of them, [vocab][hidden], for free(). */
uint16_t *test_target_matrix(const test_target *t, int head);

/* Every tensor of a checkpoint in `from`, to be changed and written elsewhere; config.json is copied to
 * `to` (NULL: not). */
void test_copy_checkpoint(tensors *t, const char *from, const char *to);

#endif
