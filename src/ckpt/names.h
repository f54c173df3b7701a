/* Names: what each tensor of a K3 DSpark checkpoint is, and where its bytes go (the weight stream).
 *
 * A name is mapped by one table: strip an optional "model.", translate the second dialect (fc,
 * hidden_norm, norm), then drop, stack or keep. kv_a_proj_with_mqa goes to two places: its layer's
 * A projection and, as shard number = layer, the cross-layer context_kv; both are views on the same
 * bytes. Nothing is copied here. */
#ifndef DSPARK_CKPT_NAMES_H
#define DSPARK_CKPT_NAMES_H

#include "ckpt/checkpoint.h"

typedef enum dspark__target {
    DSPARK__T_FC_NORM, /* index = tap */
    DSPARK__T_CONTEXT_PROJ,
    DSPARK__T_CONTEXT_NORM,
    DSPARK__T_CONTEXT_KV, /* shard = layer */
    DSPARK__T_INPUT_NORM, /* index = layer, as all down to DOWN */
    DSPARK__T_QKV_A,      /* shard 0 = q_a, 1 = kv_a */
    DSPARK__T_Q_A_NORM,
    DSPARK__T_Q_B,
    DSPARK__T_KV_A_NORM,
    DSPARK__T_KV_B,
    DSPARK__T_O,
    DSPARK__T_POST_NORM,
    DSPARK__T_GATE_UP, /* shard 0 = gate, 1 = up */
    DSPARK__T_DOWN,
    DSPARK__T_FINAL_NORM,
    DSPARK__T_MARKOV_W1,
    DSPARK__T_MARKOV_W2,
    DSPARK__T_MARKOV_GATE,  /* markov_head_type gated only */
    DSPARK__T_MARKOV_JOINT, /* markov_head_type rnn only */
    DSPARK__T_CONFIDENCE,
    DSPARK__T_EMBED,
    DSPARK__T_LM_HEAD,
    DSPARK__T_COUNT
} dspark__target;

/* "context_kv", "qkv_a", ... Static storage. */
const char *dspark__target_name(dspark__target target);

/* One arrival: the tensor's bytes belong to `target` (of layer or tap `index`) as shard `shard`. */
typedef struct dspark__arrival {
    dspark__target target;
    uint32_t index;     /* layer or tap; 0 where there is one */
    int32_t shard;      /* -1 when the target is not merged */
    const char *suffix; /* "weight", "bias", "weight_packed", "weight_scale", ...; static */
    const dspark_tensor *tensor; /* a view: never copied */
} dspark__arrival;

typedef enum dspark__name_kind {
    DSPARK__NAME_FOREIGN = 0, /* nothing asks for it */
    DSPARK__NAME_MAPPED,
    DSPARK__NAME_IGNORED,   /* rotary tables that some exporters store (recomputed here), and the
                             * scales of a KV cache: layers.N.self_attn.k_scale, ... */
    DSPARK__NAME_VOCAB_MAP, /* d2t, t2d: a reduced draft vocabulary, not served */
    DSPARK__NAME_PREMERGED  /* ATOM's own form: context_kv_proj, fused_qkv_a_proj, gate_up_proj */
} dspark__name_kind;

typedef enum dspark__dialect {
    DSPARK__DIALECT_BOTH = 0, /* the name is the same in both */
    DSPARK__DIALECT_K3,       /* context_proj, context_norm, final_norm */
    DSPARK__DIALECT_DEEPSPEC  /* fc, hidden_norm, norm */
} dspark__dialect;

#define DSPARK__NAME_MAX 96

/* Everything a name says. */
typedef struct dspark__name {
    dspark__name_kind kind;
    dspark__dialect dialect;
    int prefixed;                     /* starts with "model." */
    char canonical[DSPARK__NAME_MAX]; /* mapped: first dialect, no prefix; else "" */
    size_t n_arrivals;                /* 1 or 2 when mapped */
    dspark__arrival arrivals[2];      /* tensor is NULL; the unchanged place comes first */
    const char *why;                  /* foreign: what is wrong with it; static */
} dspark__name;

/* Parse `name` under `c`. A layer or tap index must be decimal digits without a leading zero and
 * below its limit, else the name is foreign. */
void dspark__name_parse(dspark__name *out, const char *name, const dspark_config *c);

/* Where `name` goes: 1 or 2 arrivals into out[2] (tensor left NULL; the unchanged place comes
 * first, context_kv second), 0 for every name that is not mapped. */
size_t dspark__names_map(const char *name, const dspark_config *c, dspark__arrival out[2]);

/* Visit every arrival of a checkpoint in file order. Stops at the first non-OK return and hands
 * it on. Ignored names are passed over. Foreign names are an error that names the tensor
 * (DSPARK_EMODEL) and, where it can, says which name was probably meant; vocabulary maps and
 * pre-merged tensors are DSPARK_EUNSUPPORTED. */
dspark_status dspark__weight_stream(const dspark_checkpoint *ckpt, const dspark_config *c,
                                    dspark_status (*visit)(void *user, const dspark__arrival *a,
                                                           dspark_error *err),
                                    void *user, dspark_error *err);

/* How far `found` is from `meant`: 0 equal, small when a letter or one piece was changed, UINT_MAX
 * when they have nothing to do with each other. For hints only. */
unsigned dspark__name_distance(const char *found, const char *meant);

#endif
