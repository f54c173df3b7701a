/* Typed reading of one JSON object of a config: a cursor that knows its file and its place for
 * error texts. No coercion: a boolean is not a number, 5.0 is not an integer. Private to
 * config*.c. */
#ifndef DSPARK_CKPT_CONFIG_VALUE_H
#define DSPARK_CKPT_CONFIG_VALUE_H

#include <jansson.h>

#include "base/status.h"
#include "ckpt/config.h"

typedef struct dspark__cfg {
    const json_t *object;    /* where keys are looked up */
    const char *prefix;      /* "" or "rope_parameters." */
    const char *source;      /* file name for errors */
    dspark__config_doc *doc; /* hears the notes */
    dspark_error *err;
} dspark__cfg;

/* Fail at source: prefix + key. */
dspark_status dspark__cfg_fail(const dspark__cfg *g, dspark_status code, const char *key,
                               const char *fmt, ...) DSPARK__PRINTF(4, 5);
/* Append one sentence to doc->notes. */
dspark_status dspark__cfg_note(const dspark__cfg *g, const char *fmt, ...) DSPARK__PRINTF(2, 3);

/* The value of `key`; NULL when it is absent or null (published configs write null for absent). */
const json_t *dspark__cfg_get(const dspark__cfg *g, const char *key);

/* Each getter leaves *out alone and says DSPARK_OK when the key is absent. `present` may be
 * NULL. */
dspark_status dspark__cfg_int(const dspark__cfg *g, const char *key, int64_t min, int64_t max,
                              int64_t *out, int *present);
dspark_status dspark__cfg_u32(const dspark__cfg *g, const char *key, uint32_t min, uint32_t max,
                              uint32_t *out, int *present);
/* The same, and a key that is absent is DSPARK_EMODEL. */
dspark_status dspark__cfg_need_u32(const dspark__cfg *g, const char *key, uint32_t min,
                                   uint32_t max, uint32_t *out);
dspark_status dspark__cfg_real(const dspark__cfg *g, const char *key, double min, double max,
                               double *out, int *present);
dspark_status dspark__cfg_bool(const dspark__cfg *g, const char *key, int *out, int *present);
/* A string that lives as long as the JSON document. */
dspark_status dspark__cfg_string(const dspark__cfg *g, const char *key, const char **out);
dspark_status dspark__cfg_array(const dspark__cfg *g, const char *key, const json_t **out);
dspark_status dspark__cfg_object(const dspark__cfg *g, const char *key, const json_t **out);

/* config_rope.c: rope_parameters, rope_scaling and rope_theta into doc->config. */
dspark_status dspark__cfg_rope(const dspark__cfg *g);

/* config_keys.c: a note with the keys that nobody here knows; none when there are none. */
dspark_status dspark__cfg_note_unknown(const dspark__cfg *g);

#endif
