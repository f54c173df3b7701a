/* The roster: the exact list of tensors that a config demands, and the tick-off of what is
 * there. */
#ifndef DSPARK_CKPT_ROSTER_H
#define DSPARK_CKPT_ROSTER_H

#include "ckpt/checkpoint.h"
#include "ckpt/config.h"

typedef struct dspark__roster_entry {
    char name[96]; /* in the first dialect, no "model." prefix */
    uint32_t rank;
    uint64_t shape[2];
    int optional; /* embed_tokens, confidence bias: may be absent */
    int context;  /* needed for context KV */
    int linear;   /* a matrix that multiplies: any scheme of quant/ may hold it. 0: norms, biases,
                   * and what is looked up by row (embed_tokens, markov_w1): BF16 only */
} dspark__roster_entry;

/* All entries in the published order of docs/formats.md: embed_tokens, fc_norm.*, context_proj,
 * context_norm, the layers, final_norm, Markov head, confidence head. lm_head is not listed (no
 * published drafter has one); the check allows it. *out is freed with free(). */
dspark_status dspark__roster_make(dspark__roster_entry **out, size_t *n, const dspark_config *c,
                                  int context_only, dspark_error *err);

/* Parameters (elements) over all entries. */
uint64_t dspark__roster_parameters(const dspark__roster_entry *r, size_t n);

/* Exact check: nothing missing, foreign, double (also across dialects and prefixes), mis-shaped
 * or of another dtype than BF16. The module of a linear may also be quantised, F16 or F32: it
 * counts as present here, and quant/check.h judges its shapes, dtypes and values. All problems are
 * counted; the error names the first in roster order and how many more there are. DSPARK_EMODEL
 * when anything is wrong; DSPARK_EUNSUPPORTED when all that is found is known and not served:
 * quantised norms and tables, GPTQ and AWQ, pre-merged tensors (context_kv_proj, fused_qkv_a_proj,
 * gate_up_proj: ATOM's own form), a vocabulary map. Accepted beside the roster: lm_head, rotary
 * tables, scales of a KV cache, and a confidence head that the config does not enable. problem may
 * be NULL; else it is called for each problem. */
dspark_status dspark__roster_check(const dspark_checkpoint *ckpt, const dspark__config_doc *doc,
                                   void (*problem)(void *user, dspark_status kind,
                                                   const char *tensor, const char *text),
                                   void *user, dspark_error *err);

#endif
