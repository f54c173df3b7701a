/* Encoders: rows of float into codes and scales of a format, and back. Pure functions: no file, no
 * thread, no allocation; the same input gives the same bytes on every machine. All arithmetic is IEEE
 * fp32 unless it says otherwise, each operation rounded once, to nearest even.
 *
 * m is the largest |w| of what a scale serves; e4m3, e2m1 and bf16 round and saturate.
 *
 *   fp8-*   s = m / 448, stored as fp32; 2^-23 when that is 0. Code e4m3(w / s).
 *   int8    s = bf16(m / 127.5); 2^-7 when that is 0. Code round(clamp(w / s, -128, 127)).
 *   int4    s = bf16(m / 7.5); 2^-7 when that is 0. Code round(clamp(w / s, -8, 7)).
 *   mxfp4   the stored exponent is max(E - 2, 0), E the biased exponent of the fp32 whose bits are
 *           those of m + 2^21 (so from 1.75 * 2^n on the next power serves), 0 when m is 0.
 *           Code e2m1(w / 2^(exponent - 127)).
 *   mxfp8   the same with E - 8 and e4m3.
 *   nvfp4   with M over the whole tensor,
 *     compressed-tensors: g = (1 / max(M, 2^-126)) * 2688, 1 when that is infinite; c = e4m3(g * (m / 6)),
 *           0.125 when that is 0. Code e2m1(w / (c / g)).
 *     ModelOpt: g = M / 2688, 1 when that is 0; c = e4m3(max(m / (6 * g), 2^-9)), 1 when m / (6 * g)
 *           is 0. Code e2m1(w / (c * g)).
 *
 * An e2m1 code has its sign bit when w / scale < 0, also when it rounds to zero.
 *
 * Search for the least squared error (sum in double, in order of the weights, of (w - value)^2):
 * real scales try s * (1 - i / 64), i = 0 .. 23, stored scales rounded to bf16 after that; nvfp4 tries
 * the codes c, c + 1, c - 1 .. c - 6 of its scale that are positive and finite; mx tries the exponents
 * e, e + 1, e - 1. The first of equals wins. */
#ifndef DSPARK_QUANT_ENCODE_H
#define DSPARK_QUANT_ENCODE_H

#include "dspark/dspark.h"

#define DSPARK__ENCODE_BLOCK 128u     /* rows and columns of a fp8-block */
#define DSPARK__ENCODE_CANDIDATES 24u /* real scales that a search tries */

typedef struct dspark__encoder {
    dspark_format format;
    dspark_scale_search search;
    dspark_layout layout;
    uint64_t k;
    /* derived */
    uint32_t bits;            /* of a code */
    uint64_t group;           /* columns that one scale serves; k when it serves the row */
    uint32_t unit_rows;       /* rows that are encoded together: 128 for fp8-block, else 1 */
    uint64_t n_scales;        /* scales of a unit; 0 for fp8-tensor */
    dspark_dtype scale_dtype; /* of these */
    uint32_t scale_bytes;     /* of one of these */
    uint64_t row_bytes;       /* of codes */
    int has_global;           /* fp8-tensor, nvfp4: `global` is stored too */
    float global;             /* fp8-tensor: the scale; nvfp4: weight_global_scale or weight_scale_2 */
    float values[256];        /* what a code stands for */
} dspark__encoder;

/* Sizes for rows of k weights; bf16 has no encoder. group_size is for int4 (0 = 128). `name` is for errors.
 * DSPARK_EINVAL: the format or layout; DSPARK_EUNSUPPORTED: k does not fit the format's groups. */
dspark_status dspark__encoder_init(dspark__encoder *e, dspark_format format,
                                   dspark_scale_search search, dspark_layout layout,
                                   uint32_t group_size, uint64_t k, const char *name,
                                   dspark_error *err);

/* Largest |w|; infinite or NaN when one of them is. */
float dspark__encode_absmax(const float *w, size_t n);

/* Set e->global from the tensor's largest magnitude. */
void dspark__encoder_set_absmax(dspark__encoder *e, float absmax);
/* fp8-tensor, search: the scale of candidate i, and the squared error of a row under scale s. */
float dspark__encode_tensor_scale(const dspark__encoder *e, float absmax, uint32_t i);
double dspark__encode_tensor_error(const dspark__encoder *e, const float *w, float s);

/* Encode one unit: n_rows <= unit_rows rows [n_rows][k] of finite weights. codes [n_rows][row_bytes],
 * scales [n_scales] in scale_dtype, little endian, any alignment. */
void dspark__encode_unit(const dspark__encoder *e, const float *w, size_t n_rows, uint8_t *codes,
                         uint8_t *scales);

/* Row `row` of a unit, exactly: code * scale (* scale of the tensor) in double, as the scheme that reads
 * it defines it (1 / weight_global_scale is rounded to fp32 first). */
void dspark__decode_row(const dspark__encoder *e, const uint8_t *codes, const uint8_t *scales,
                        size_t row, double *out);

/* "fp8-tensor", ...; "?" for an unknown value. */
const char *dspark__format_name(dspark_format format);

#endif
