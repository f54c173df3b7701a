/* What the schemes share: the tensors beside a weight (scales of every accepted shape and dtype,
 * the activations' scales that are tolerated), errors that name file and tensor, the comparison of
 * what is found with what the config says. Reads scales, never weights. */
#ifndef DSPARK_QUANT_PARTS_H
#define DSPARK_QUANT_PARTS_H

#include "base/numfmt.h"
#include "base/status.h"
#include "quant/scheme.h"

/* ---- the rows of the table ------------------------------------------------------------------- */

extern const dspark__scheme dspark__scheme_bf16, dspark__scheme_f16, dspark__scheme_f32,
    dspark__scheme_fp8_tensor, dspark__scheme_fp8_channel, dspark__scheme_fp8_group,
    dspark__scheme_fp8_block, dspark__scheme_mxfp8, dspark__scheme_mxfp4, dspark__scheme_nvfp4_ct,
    dspark__scheme_nvfp4_modelopt, dspark__scheme_int8, dspark__scheme_int_packed;

/* ---- errors ---------------------------------------------------------------------------------- */

/* dspark__fail with "file: tensor" as its place. */
dspark_status dspark__part_fail(dspark_error *err, dspark_status code, const dspark_tensor *t,
                                const char *fmt, ...) DSPARK__PRINTF(4, 5);

/* The tensor is [rows, cols], nothing else; `why` continues the sentence ("rows x k / 2"). */
dspark_status dspark__part_shape(const dspark_tensor *t, uint64_t rows, uint64_t cols,
                                 const char *why, dspark_error *err);

/* The module consists of `own` (NULL-terminated), of what every module may carry (bias, scales of
 * activations and of the KV cache: finite and above zero) and of nothing else. */
dspark_status dspark__parts_only(const dspark__module *m, const char *const *own,
                                 const char *scheme, dspark_error *err);

/* A suffix that says "more than codes and scales": a rotation, a low-rank residual, ... Returns
 * what it is, or NULL. */
const char *dspark__suffix_refused(const char *suffix);

/* ---- scales ---------------------------------------------------------------------------------- */

/* Rows and columns of a scale: [] and [1] are 1 x 1, [n] is n x 1, [1, n, m] and [n, 1, m, 1] are n
 * x m. 0 for a shape that is none of these. */
int dspark__part_grid(const dspark_tensor *t, uint64_t *rows, uint64_t *cols);

/* BF16, F16 and F32 as fp32, exactly; E8M0 as its power of two. */
float dspark__scale_at(const dspark_tensor *t, uint64_t i);
/* The same number as a double, whatever the thread does to subnormals. */
static inline double dspark__f32_exact(float f)
{
    uint32_t u = dspark__f32_bits(f);
    if ((u >> 23 & 255u) != 0 || (u & 0x7fffffffu) == 0) return f;
    double magnitude = (double)(u & 0x7fffffu) * 0x1p-149;
    return u >> 31 ? -magnitude : magnitude;
}

/* dtype BF16, F16 or F32 (or E8M0 when allowed), every value finite and >= 0, or > 0 when
 * `positive`. */
dspark_status dspark__scales_check(const dspark_tensor *t, int positive, int allow_e8m0,
                                   dspark_error *err);
/* One such number, > 0. */
dspark_status dspark__scale_single(const dspark_tensor *t, dspark_error *err);

/* Which element of a scale serves row and K-group: (row / row_div) * cols + group. */
typedef struct dspark__scale_map {
    const dspark_tensor *tensor;
    uint64_t row_div; /* UINT64_MAX: one for all rows */
    uint64_t cols;
    uint32_t group; /* values of k; 0: one scale for the whole row */
} dspark__scale_map;

static inline uint64_t dspark__scale_index(const dspark__scale_map *s, uint64_t row, uint64_t k)
{
    return row / s->row_div * s->cols + (s->group ? k / s->group : 0);
}

/* The scales of rows row0 .. row0+n-1 into out's group_scales or row_scales. Missing rows get 1. */
void dspark__scale_map_write(const dspark__scale_map *s, uint64_t row0, uint64_t n, uint64_t k,
                             const dspark__panel_out *out);

/* Scale bytes [rows, cols] of rows row0 .. into out->scales; missing rows get `missing`. */
void dspark__scale_bytes_write(const uint8_t *bytes, uint64_t cols, uint64_t row0, uint64_t n,
                               uint8_t missing, uint8_t *scales);

/* How many of the n bytes come before the first one that is not below the limit. */
uint64_t dspark__scale_bytes_below(const uint8_t *bytes, uint64_t n, uint8_t limit);

/* ---- the config ------------------------------------------------------------------------------ */

/* What a scheme found, to be compared with the rule. */
typedef struct dspark__claim {
    const char *scheme; /* for people */
    uint32_t bits;      /* of a code; 16 and more: not quantised */
    int is_float;
    unsigned strategies;    /* a bit for each dspark__quant_strategy that agrees; 0: any */
    uint32_t group;         /* 0: none */
    const char *formats[2]; /* of compressed-tensors; NULL: none more */
} dspark__claim;

/* DSPARK_EMODEL naming the module and both answers. q may be NULL. */
dspark_status dspark__rule_agrees(const dspark__module *m, const dspark__quant_rule *q,
                                  const dspark__claim *c, dspark_error *err);

/* The config says how this module is quantised (or that it is, unless a name above it meant it). */
int dspark__rule_targets(const dspark__quant_rule *q);

#define DSPARK__STRATEGY_BIT(s) (1u << (s))

#endif
