/* quantization_config of a checkpoint on disk: config.json and, where ModelOpt wrote it,
 * hf_quant_config.json. */
#ifndef DSPARK_QUANT_QUANT_FILE_H
#define DSPARK_QUANT_QUANT_FILE_H

#include "quant/quant_config.h"

/* *out is NULL when the checkpoint at `path` says nothing of quantisation. */
dspark_status dspark__quant_config_read(dspark__quant_config **out, const char *path,
                                        dspark_error *err);

#endif
