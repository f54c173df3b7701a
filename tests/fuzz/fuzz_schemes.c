/* Fuzz target: whatever tensors a module has, detection ends in a scheme or a named error; a module
 * that validates can be packed, decoded and dequantised without a byte outside its tensors.
 *
 * Input: rule (8 bytes), rows, k / 8, number of parts, then per part: suffix, dtype, rank, dims; the
 * rest is the tensors' data, taken in turn and repeated where it runs out. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/dtype.h"
#include "model/merged_linear.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const suffixes[] = {
    "weight",           "weight_packed",      "weight_scale",  "weight_scale_inv",
    "weight_scale_2",   "weight_global_scale", "scale",        "weight_zero_point",
    "weight_shape",     "weight_g_idx",        "input_scale",  "input_global_scale",
    "pre_quant_scale",  "bias"};

typedef struct fuzz_input {
    const uint8_t *at;
    size_t left;
} fuzz_input;

static unsigned take(fuzz_input *in)
{
    if (in->left == 0) return 0;
    in->left--;
    return *in->at++;
}

static void demand(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "fuzz_schemes: %s\n", what);
    abort();
}

/* A dimension that is likely to fit: rows, k, or fractions of them, or any small number. */
static uint64_t take_dim(fuzz_input *in, uint64_t rows, uint64_t k)
{
    unsigned how = take(in);
    switch (how % 14) {
    case 0: return rows;
    case 1: return k;
    case 2: return k / 2;
    case 3: return k / 16;
    case 4: return k / 32;
    case 5: return 1;
    case 6: return (rows + 127) / 128;
    case 7: return (k + 127) / 128;
    case 8: return k / 8;
    case 9: return k / 4;
    case 10: return (rows * 4 + 31) / 32;
    case 11: return 2;
    case 12: return k / 64;
    default: return how / 14;
    }
}

static void use_module(const dspark__scheme *scheme, const dspark__module *m,
                       const dspark__quant_rule *q, uint64_t rows, uint64_t k,
                       const dspark__packing *p)
{
    dspark__kern kern;
    size_t n_groups = p->group ? (size_t)((k + p->group - 1) / p->group) : 0;
    size_t code_bytes = p->bits == 16 ? dspark__panel_elements(k) * 2
                                      : dspark__code_panel_bytes(&p->format, k);
    size_t scale_bytes = p->bits == 16 ? 0 : dspark__code_scale_bytes(&p->format, k);
    double *row = malloc(k * sizeof *row);
    void *codes = aligned_alloc(64, (code_bytes + 63) / 64 * 64);
    uint8_t *scales = scale_bytes ? malloc(scale_bytes) : NULL;
    float *groups = n_groups ? malloc(n_groups * DSPARK__PANEL * sizeof *groups) : NULL;
    float *row_scales = p->row_scale ? malloc(DSPARK__PANEL * sizeof *row_scales) : NULL;
    uint32_t *perm = p->permuted ? malloc(k * sizeof *perm) : NULL;
    uint16_t *w = aligned_alloc(64, ((k + 7) / 8 * 8 * DSPARK__PANEL * 2 + 63) / 64 * 64);
    demand(row && codes && w, "no memory");
    demand(dspark__kern_select(&kern, DSPARK_ISA_AUTO, NULL) == DSPARK_OK, "no kernels");
    demand(p->bits == 16 || p->bits == 8 || p->bits == 4, "odd bits");
    demand(p->group % 8 == 0, "an odd group");
    if (perm) {
        scheme->permutation(m, k, p->group, perm);
        for (uint64_t i = 0; i < k; i++) demand(perm[i] < k, "a column that is not there");
    }
    for (uint64_t r = 0; r < rows; r += DSPARK__PANEL) {
        dspark__panel_out out = {&kern, codes, scales, groups, row_scales};
        scheme->pack(m, p, q, r, rows - r < DSPARK__PANEL ? rows - r : DSPARK__PANEL, rows, k, &out);
        if (p->bits < 16) kern.decode(w, codes, scales, &p->format, 0, k);
    }
    for (uint64_t r = 0; r < rows; r++) scheme->dequantise(m, q, r, rows, k, row);
    free(row);
    free(codes);
    free(scales);
    free(groups);
    free(row_scales);
    free(perm);
    free(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    dspark__quant_rule q = {0};
    dspark__module m = {.name = "m"};
    dspark_tensor tensors[DSPARK__MODULE_PARTS];
    const dspark__scheme *scheme = NULL;
    dspark__packing packing = {0};
    dspark_error err = {0};

    q.method = (dspark__quant_method)(take(&in) % 5);
    q.quantised = (int)(take(&in) % 3) - 1;
    q.num_bits = take(&in) % 9;
    q.is_float = take(&in) & 1;
    q.symmetric = take(&in) & 1;
    q.strategy = (dspark__quant_strategy)(take(&in) % 6);
    q.group_size = take(&in);
    unsigned flags = take(&in);
    q.act_order = flags & 1;
    q.dense_bits = (int)(flags >> 1) % 3 - 1;
    if (flags & 8) q.block_rows = q.block_cols = 16u << (flags >> 6);
    uint64_t rows = 1 + take(&in) % 140, k = 8 * (1 + take(&in) % 24);
    if (flags & 16) k -= 3;
    unsigned n = take(&in) % (DSPARK__MODULE_PARTS + 1);
    memset(tensors, 0, sizeof tensors);
    for (unsigned i = 0; i < n; i++) {
        dspark_tensor *t = &tensors[i];
        t->name = m.parts[i].suffix = suffixes[take(&in) % (sizeof suffixes / sizeof *suffixes)];
        t->file = "f";
        t->dtype = (dspark_dtype)(1 + take(&in) % (DSPARK_DTYPE_COUNT - 1));
        t->rank = take(&in) % 5;
        for (uint32_t d = 0; d < t->rank; d++) t->shape[d] = take_dim(&in, rows, k);
        if (dspark__shape_bytes(t->dtype, t->rank, t->shape, &t->n_elements, &t->n_bytes) ||
            t->n_bytes > 1 << 20)
            t->rank = 0, t->dtype = DSPARK_U8, t->n_elements = t->n_bytes = 1;
        m.parts[i].tensor = t;
        m.n_parts = i + 1;
        for (unsigned j = 0; j < i; j++)
            if (strcmp(m.parts[j].suffix, m.parts[i].suffix) == 0) m.n_parts = n = i; /* no doubles */
    }
    for (unsigned i = 0; i < m.n_parts; i++) {
        unsigned char *bytes = malloc(tensors[i].n_bytes ? tensors[i].n_bytes : 1);
        demand(bytes != NULL, "no memory");
        for (uint64_t b = 0; b < tensors[i].n_bytes; b++)
            bytes[b] = in.left ? in.at[b % in.left] : (uint8_t)(b * 37 + 56);
        tensors[i].data = bytes;
    }
    dspark_status st = dspark__scheme_detect(&scheme, &m, &q, rows, k, &err);
    if (st == DSPARK_OK) st = scheme->validate(&m, &q, rows, k, &packing, &err);
    if (st == DSPARK_OK)
        use_module(scheme, &m, &q, rows, k, &packing);
    else
        demand(err.code == st && err.message[0] &&
                   (st == DSPARK_EMODEL || st == DSPARK_EUNSUPPORTED || st == DSPARK_ENONFINITE),
               "an error without a name");
    for (unsigned i = 0; i < m.n_parts; i++) free((void *)(uintptr_t)tensors[i].data);
    return 0;
}
