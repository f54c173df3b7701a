/* Family detection: which kind of model a directory holds, from config.json and tensor names. */
#ifndef DSPARK_CKPT_FAMILY_H
#define DSPARK_CKPT_FAMILY_H

#include "ckpt/checkpoint.h"

typedef enum dspark__family {
    DSPARK__FAMILY_K3_DSPARK,    /* served: MLA drafter of Kimi-K3 */
    DSPARK__FAMILY_K3_NEMO,      /* NeMo-trained MLA drafter: other mathematics */
    DSPARK__FAMILY_ATOM,         /* ATOM's pre-merged form */
    DSPARK__FAMILY_QWEN3_DSPARK, /* GQA DSpark */
    DSPARK__FAMILY_DFLASH,       /* DFlash: no Markov head */
    DSPARK__FAMILY_SPECULATORS,  /* speculators format */
    DSPARK__FAMILY_DEEPSEEK_V4,  /* mtp.* names */
    DSPARK__FAMILY_EAGLE,        /* EAGLE / EAGLE-3 drafters */
    DSPARK__FAMILY_MTP,          /* serial multi-token-prediction heads */
    DSPARK__FAMILY_TARGET,       /* a target model, not a drafter */
    DSPARK__FAMILY_UNKNOWN
} dspark__family;

typedef struct dspark__family_report {
    dspark__family family;
    const char *id; /* "k3_dspark", "qwen3_dspark", ... */
    const char
        *variant; /* for K3: "kimi-k3", "kimi-k3-block5", "kimi-k3.1-pro", "lightseek", "custom" */
    const char *dialect; /* "k3" or "deepspec"; NULL for other families */
    int model_prefix;    /* names start with "model." */
    int contradiction;   /* config says one family, tensors another */
    char foreign[160];   /* then: the first tensor that does not belong to what config says */
    char text[512];      /* one or two sentences: what it is, what it is not, and the evidence */
} dspark__family_report;

/* config_text may be NULL (no config.json), ckpt may be NULL (no tensor file). Fails for lack of
 * memory only: what is not recognised is DSPARK__FAMILY_UNKNOWN with the evidence in text. */
dspark_status dspark__family_detect(dspark__family_report *out, const char *config_text,
                                    size_t n_config, const dspark_checkpoint *ckpt,
                                    dspark_error *err);

/* DSPARK_OK for the family that is served, DSPARK_EMODEL when config and tensors contradict each
 * other, else DSPARK_EUNSUPPORTED; the error's text is the report's. */
dspark_status dspark__family_gate(const dspark__family_report *report, const char *where,
                                  dspark_error *err);

#endif
