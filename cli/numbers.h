/* numbers: the values of stored bf16 and fp8, as doubles. */
#ifndef DSPARK_CLI_NUMBERS_H
#define DSPARK_CLI_NUMBERS_H

#include "dspark/dspark.h"

double number_bf16(const unsigned char *bytes);
/* The magnitude of an FP8 code without its sign, by the rule of finite numbers. */
double number_fp8(dspark_dtype dtype, int code);

#endif
