/* The scheme without quantisation: one row-major bf16 tensor "weight". */
#include <string.h>

#include "base/numfmt.h"
#include "base/status.h"
#include "kern/kern.h"
#include "quant/scheme.h"

static int detect(const dspark__module *m)
{
    return m->n_parts == 1 && strcmp(m->parts[0].suffix, "weight") == 0 &&
           m->parts[0].tensor->dtype == DSPARK_BF16;
}

static dspark_status validate(const dspark__module *m, uint64_t rows, uint64_t k, dspark_error *err)
{
    const dspark_tensor *t = m->parts[0].tensor;
    if (t->rank != 2)
        return dspark__fail(err, DSPARK_EMODEL, t->name, "rank %u, expected 2", t->rank);
    if (t->shape[0] != rows || t->shape[1] != k)
        return dspark__fail(err, DSPARK_EMODEL, t->name,
                            "shape [%llu,%llu], config needs [%llu,%llu]",
                            (unsigned long long)t->shape[0], (unsigned long long)t->shape[1],
                            (unsigned long long)rows, (unsigned long long)k);
    return DSPARK_OK;
}

static void pack(const dspark__module *m, uint16_t *panels, uint64_t row0, uint64_t n, uint64_t k)
{
    const unsigned char *w = m->parts[0].tensor->data;
    dspark__pack_bf16(panels, w + row0 * k * 2, n, k);
}

static void dequantise(const dspark__module *m, uint64_t row, uint64_t k, double *out)
{
    const unsigned char *w = (const unsigned char *)m->parts[0].tensor->data + row * k * 2;
    for (uint64_t i = 0; i < k; i++) out[i] = dspark__bf16_to_f32(dspark__load_u16(w + 2 * i));
}

const dspark__scheme dspark__scheme_bf16 = {"bf16", detect, validate, pack, dequantise};
