/* What a stored code is worth: the tables of every format that a weight is coded in. Values are
 * exact and need no floating-point arithmetic that a mode of the thread could change. */
#ifndef DSPARK_QUANT_CODES_H
#define DSPARK_QUANT_CODES_H

#include "dspark/dspark.h"

/* F8_E4M3, F8_E5M2 and their FNUZ forms. */
int dspark__is_fp8(dspark_dtype dtype);
/* "E4M3", "E5M2 FNUZ", ... */
const char *dspark__fp8_name(dspark_dtype dtype);

/* code -> bf16, every NaN as 0x7fc0. */
void dspark__codes_fp8(uint16_t table[256], dspark_dtype dtype);
/* 16 entries; the others 0. */
void dspark__codes_e2m1(uint16_t table[256]);
/* Two's complement of 8 or 4 bits (16 entries then; the others 0). */
void dspark__codes_int(uint16_t table[256], uint32_t bits);

#endif
