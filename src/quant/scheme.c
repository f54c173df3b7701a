/* The table of schemes and the search in it. Knows no scheme itself: each has a file of its own. */
#include "quant/scheme.h"

#include <string.h>

#include "base/status.h"
#include "ckpt/dtype.h"

static const dspark__scheme *const schemes[] = {&dspark__scheme_bf16};

const dspark_tensor *dspark__module_part(const dspark__module *m, const char *suffix)
{
    for (uint32_t i = 0; i < m->n_parts; i++)
        if (strcmp(m->parts[i].suffix, suffix) == 0) return m->parts[i].tensor;
    return NULL;
}

dspark_status dspark__scheme_detect(const dspark__scheme **out, const dspark__module *m,
                                    dspark_error *err)
{
    *out = NULL;
    for (size_t i = 0; i < sizeof schemes / sizeof schemes[0]; i++) {
        if (schemes[i]->detect(m)) {
            *out = schemes[i];
            return DSPARK_OK;
        }
    }
    if (m->n_parts == 0)
        return dspark__fail(err, DSPARK_EMODEL, m->name, "module has no tensors");
    return dspark__fail(err, DSPARK_EUNSUPPORTED, m->name,
                        "no scheme of this library reads %s of dtype %s (%u tensors in the module); "
                        "served: a single bf16 weight",
                        m->parts[0].suffix, dspark__dtype_name(m->parts[0].tensor->dtype), m->n_parts);
}
