/* From a checkpoint to a quantised one: the contract of dspark_quantize in dspark.h. Streams tensor by
 * tensor; everything is read back through the library's own schemes and compared before it appears. */
#ifndef DSPARK_QUANT_QUANTIZE_H
#define DSPARK_QUANT_QUANTIZE_H

#include "dspark/dspark.h"

dspark_status dspark__quantize(const char *ckpt, const char *out, const dspark_quantize_opts *opts,
                               dspark_error *err);

#endif
