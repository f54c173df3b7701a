/* synth_schemes.c: formats that are read and that `quantize` has no use for. */
#ifndef DSPARK_CLI_SYNTH_SCHEMES_H
#define DSPARK_CLI_SYNTH_SCHEMES_H

#include "dspark/dspark.h"

typedef struct synth_scheme synth_scheme;

/* NULL when no scheme has this name. */
const synth_scheme *synth_scheme_find(const char *name);
const char *synth_scheme_name(size_t index); /* NULL behind the last */
int synth_scheme_has_groups(const synth_scheme *s);

/* The BF16 checkpoint `plain` with its linear layers in scheme s as the directory `out`, which must not
 * exist or be empty; nothing is left after a failure. group 0: 32. */
dspark_status synth_scheme_write(const synth_scheme *s, const char *plain, const char *out,
                                 uint32_t group, dspark_error *err);

#endif
