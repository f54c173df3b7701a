/* The product of a shard that stays packed in codes: which way a panel takes, how many values of k are
 * expanded at a time, and how the scratch is cut. Owns no memory and no format; what the product is,
 * docs/numerics.md says. */
#include "model/linear_codes.h"

#include <string.h>

/* Values of k that are decoded at a time, multiples of 8. Few rows: 12 KB of bf16 panel, which stay in
 * L1 until the product reads them once. Many rows: 96 KB in L2, so that accumulators are loaded and
 * stored less often. */
#define FEW_ROWS 16u
/* Panels that go together when a product of few rows is made in one go: a kernel's tables are made for each
 * call. */
#define TOGETHER 12u
#define DECODE_K_FEW 128u
#define DECODE_K_MANY 1024u

/* What the codes' way needs beside accumulators: all are multiples of 64 bytes. */
typedef struct code_scratch {
    uint16_t *block;  /* [DECODE_K_MANY / 2][48][2] */
    float *acc, *sum; /* [n_rows][48] each */
    float *whole;     /* [TOGETHER][n_rows][48] of few rows, in place of the block; or acc */
    uint16_t *x;      /* [n_rows][DECODE_K_FEW]: gathered columns of a permuted shard */
} code_scratch;

_Static_assert(TOGETHER * FEW_ROWS * sizeof(float) <= DECODE_K_MANY * sizeof(uint16_t), "sums in place of the block");

static code_scratch cut_scratch(void *scratch, size_t n_rows)
{
    code_scratch c;
    unsigned char *at = scratch;
    c.block = (uint16_t *)(void *)at;
    at += DECODE_K_MANY * DSPARK__PANEL * sizeof(uint16_t);
    c.acc = (float *)(void *)at;
    at += n_rows * DSPARK__PANEL * sizeof(float);
    c.sum = (float *)(void *)at;
    at += n_rows * DSPARK__PANEL * sizeof(float);
    c.x = (uint16_t *)(void *)at;
    c.whole = n_rows <= FEW_ROWS ? (float *)scratch : c.acc;
    return c;
}

static void gather_columns(uint16_t *to, const void *x, size_t x_stride, size_t n_rows,
                           const uint32_t *perm, size_t n)
{
    for (size_t i = 0; i < n_rows; i++) {
        const unsigned char *row = (const unsigned char *)x + i * x_stride;
        for (size_t j = 0; j < n; j++) memcpy(to + i * DECODE_K_FEW + j, row + 2 * (size_t)perm[j], 2);
    }
}

/* One decoded block, k0 .. k0+n-1, of one panel. */
typedef struct code_block {
    const dspark__shard *shard;
    const float *group_scales; /* of the panel, or NULL */
    const float *row_scales;   /* of the panel, or NULL */
    const unsigned char *x;    /* at column k0 (gathered when the shard is permuted) */
    size_t x_stride;
    uint32_t k0, n, k;
} code_block;

/* The product with a block: in one go, or K-group by K-group, each of which has an accumulator of its
 * own that is scaled into the sum when the group is finished. */
static void run_code_block(const code_block *b, const dspark__kern *kern, const code_scratch *c,
                           dspark__gemm_bf16 *g)
{
    const uint32_t group = b->shard->packing.group;
    const uint32_t stop = b->k0 + b->n;
    g->acc = c->acc;
    g->x_stride = b->x_stride;
    if (group && group % 2 == 0 && b->k0 % group == 0 && (b->n % group == 0 || stop == b->k)) {
        g->x = b->x; /* whole groups */
        g->panels = c->block;
        g->k = b->n;
        g->first = b->k0 == 0;
        kern->gemm_groups(g, group, b->group_scales + (size_t)(b->k0 / group) * DSPARK__PANEL,
                          c->sum);
        return;
    }
    for (uint32_t at = b->k0, end; at < stop; at = end) {
        end = group && (at / group + 1) * group < stop ? (at / group + 1) * group : stop;
        g->x = b->x + (size_t)(at - b->k0) * 2;
        g->panels = c->block + (size_t)(at - b->k0) * DSPARK__PANEL;
        g->k = end - at;
        g->first = group ? at % group == 0 : at == 0;
        g->last = !group && !b->row_scales && end == b->k;
        kern->gemm_bf16(g);
        if (group && (end % group == 0 || end == b->k))
            kern->scale_add(c->sum, c->acc,
                            b->group_scales + (size_t)(at / group) * DSPARK__PANEL, g->n_rows,
                            at < group);
    }
}

/* Panels of codes in one go. */
static void run_whole(const dspark__shard *shard, const dspark__kern *kern, size_t p0, size_t n_panels,
                      uint32_t k, const dspark__gemm_bf16 *g, const void *x, size_t x_stride,
                      float *acc)
{
    dspark__dot_codes d = {.x = x, .x_stride = x_stride, .n_rows = g->n_rows, .n_panels = n_panels,
                           .codes = shard->codes + p0 * shard->code_stride,
                           .code_stride = shard->code_stride, .scale_stride = shard->scale_stride,
                           .format = &shard->packing.format, .k = k, .group = shard->packing.group,
                           .group_stride = (size_t)shard->n_groups * DSPARK__PANEL, .acc = acc};
    if (shard->scales) d.scales = shard->scales + p0 * shard->scale_stride;
    if (d.group) d.group_scales = shard->group_scales + p0 * d.group_stride;
    kern->dot_codes(&d);
    for (size_t p = 0; p < n_panels; p++) {
        size_t first = p * DSPARK__PANEL, n = g->n_out - first;
        const float *scale = NULL;
        if (shard->row_scales) scale = shard->row_scales + (p0 + p) * DSPARK__PANEL;
        kern->finish(g->out + first, g->out_stride, acc + first * g->n_rows, scale, g->n_rows,
                     n < DSPARK__PANEL ? n : DSPARK__PANEL);
    }
}

/* One panel of codes. g has what all panels share; its out is this panel's. */
static void run_code_panel(const dspark__shard *shard, const dspark__kern *kern, size_t p, uint32_t k,
                           dspark__gemm_bf16 *g, const void *x, size_t x_stride, code_scratch *c)
{
    const dspark__packing *packing = &shard->packing;
    const uint8_t *codes = shard->codes + p * shard->code_stride;
    const uint8_t *scales = shard->scales ? shard->scales + p * shard->scale_stride : NULL;
    const uint32_t step = g->n_rows <= FEW_ROWS || shard->perm ? DECODE_K_FEW : DECODE_K_MANY;
    code_block b = {.shard = shard, .k = k, .x_stride = x_stride};

    if (shard->row_scales) b.row_scales = shard->row_scales + p * DSPARK__PANEL;
    if (packing->group) b.group_scales = shard->group_scales + p * shard->n_groups * DSPARK__PANEL;
    g->n_panels = 1;
    for (b.k0 = 0; b.k0 < k; b.k0 += step) {
        b.n = k - b.k0 < step ? k - b.k0 : step;
        kern->decode(c->block, codes, scales, &packing->format, b.k0, b.n);
        b.x = (const unsigned char *)x + (size_t)b.k0 * 2;
        if (shard->perm) {
            gather_columns(c->x, x, x_stride, g->n_rows, shard->perm + b.k0, b.n);
            b.x = (const unsigned char *)c->x;
            b.x_stride = DECODE_K_FEW * 2;
        }
        run_code_block(&b, kern, c, g);
    }
    if (packing->group || b.row_scales)
        kern->finish(g->out, g->out_stride, packing->group ? c->sum : c->acc, b.row_scales,
                     g->n_rows, g->n_out);
}

size_t dspark__linear_codes_scratch(size_t n_rows)
{
    return DECODE_K_MANY * DSPARK__PANEL * sizeof(uint16_t) +
           2 * n_rows * DSPARK__PANEL * sizeof(float) + n_rows * DECODE_K_FEW * 2;
}

void dspark__linear_codes_run(const dspark__shard *shard, const dspark__kern *kern, uint32_t p0,
                              uint32_t n_panels, uint32_t k, const void *x, size_t x_stride,
                              size_t n_rows, void *scratch, uint16_t *out, size_t out_stride,
                              size_t n_out)
{
    const dspark__packing *packing = &shard->packing;
    const uint32_t most = kern->dot_rows[packing->bits == 8][packing->format.scale];
    const int whole = !shard->perm && packing->group % 8 == 0 && n_rows <= most;
    const uint32_t step = whole && n_rows <= FEW_ROWS ? TOGETHER : 1;
    dspark__gemm_bf16 g = {.n_rows = n_rows, .out_stride = out_stride};
    code_scratch c = cut_scratch(scratch, n_rows);
    for (uint32_t p = 0; p < n_panels; p += step) {
        uint32_t n = n_panels - p < step ? n_panels - p : step;
        g.out = out + (size_t)p * DSPARK__PANEL;
        g.n_out = n_out - (size_t)p * DSPARK__PANEL;
        if (g.n_out > n * DSPARK__PANEL) g.n_out = n * DSPARK__PANEL;
        if (whole) run_whole(shard, kern, p0 + p, n, k, &g, x, x_stride, c.whole);
        else run_code_panel(shard, kern, p0 + p, k, &g, x, x_stride, &c);
    }
}
