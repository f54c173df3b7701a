/* See encode.h: formulas of every format, one function a step. The inner loops hold no branches, so
 * that compilers may vectorise them; they equal numfmt.h's functions bit for bit (test_encode.c). */
#include "quant/encode.h"

#include <math.h>
#include <string.h>

#include "base/numfmt.h"
#include "base/status.h"

#define E4M3_MAX  448.0f
#define E2M1_MAX  6.0f
#define GLOBAL    2688.0f /* 448 * 6: the largest value of an E4M3 scale and an E2M1 code */
#define FP32_EPS  0x1p-23f
#define BF16_EPS  0x1p-7f
#define FP32_TINY 0x1p-126f
#define ROUNDER   0x1.8p23f /* adding and taking it away rounds |x| < 2^22 to an integer */

static const struct {
    const char *name;
    uint32_t bits, group; /* group 0: the row */
} formats[DSPARK_FORMAT_COUNT] = {
    [DSPARK_FORMAT_NONE] = {"?", 0, 0},
    [DSPARK_FORMAT_FP8_TENSOR] = {"fp8-tensor", 8, 0},
    [DSPARK_FORMAT_FP8_CHANNEL] = {"fp8-channel", 8, 0},
    [DSPARK_FORMAT_FP8_BLOCK] = {"fp8-block", 8, DSPARK__ENCODE_BLOCK},
    [DSPARK_FORMAT_NVFP4] = {"nvfp4", 4, 16},
    [DSPARK_FORMAT_MXFP4] = {"mxfp4", 4, 32},
    [DSPARK_FORMAT_MXFP8] = {"mxfp8", 8, 32},
    [DSPARK_FORMAT_INT8] = {"int8", 8, 0},
    [DSPARK_FORMAT_INT4] = {"int4", 4, 128},
    [DSPARK_FORMAT_BF16] = {"bf16", 16, 0},
};

static void fill_values(dspark__encoder *e);

const char *dspark__format_name(dspark_format format)
{
    return (unsigned)format < DSPARK_FORMAT_COUNT ? formats[format].name : "?";
}

dspark_status dspark__encoder_init(dspark__encoder *e, dspark_format format,
                                   dspark_scale_search search, dspark_layout layout,
                                   uint32_t group_size, uint64_t k, const char *name,
                                   dspark_error *err)
{
    memset(e, 0, sizeof *e);
    if (format <= DSPARK_FORMAT_NONE || format >= DSPARK_FORMAT_BF16)
        return dspark__fail(err, DSPARK_EINVAL, "format",
                            "%d is none; formats are fp8-tensor, fp8-channel, fp8-block, nvfp4, "
                            "mxfp4, mxfp8, int8, int4, bf16", (int)format);
    if (search != DSPARK_SCALES_ABSMAX && search != DSPARK_SCALES_MSE)
        return dspark__fail(err, DSPARK_EINVAL, "scales", "%d is neither absmax nor mse",
                            (int)search);
    if (layout == DSPARK_LAYOUT_MODELOPT && format != DSPARK_FORMAT_FP8_TENSOR &&
        format != DSPARK_FORMAT_NVFP4)
        return dspark__fail(err, DSPARK_EINVAL, "layout",
                            "the ModelOpt layout is written for fp8-tensor and nvfp4, not for %s",
                            formats[format].name);
    if (layout != DSPARK_LAYOUT_COMPRESSED_TENSORS && layout != DSPARK_LAYOUT_MODELOPT)
        return dspark__fail(err, DSPARK_EINVAL, "layout",
                            "%d is neither compressed-tensors nor modelopt", (int)layout);
    if (group_size && format != DSPARK_FORMAT_INT4)
        return dspark__fail(err, DSPARK_EINVAL, "group_size", "goes with int4, not with %s",
                            formats[format].name);
    if (group_size % 8 != 0)
        return dspark__fail(err, DSPARK_EINVAL, "group_size", "%u, expected a multiple of 8",
                            group_size);
    e->format = format;
    e->search = search;
    e->layout = layout;
    e->k = k;
    e->bits = formats[format].bits;
    e->group = formats[format].group ? formats[format].group : k;
    if (group_size) e->group = group_size;
    if (k == 0 || (format != DSPARK_FORMAT_FP8_BLOCK && k % e->group != 0))
        return dspark__fail(err, DSPARK_EUNSUPPORTED, name,
                            "%llu columns are no multiple of %s's group of %llu", (unsigned long long)k,
                            formats[format].name, (unsigned long long)e->group);
    e->unit_rows = format == DSPARK_FORMAT_FP8_BLOCK ? DSPARK__ENCODE_BLOCK : 1;
    e->n_scales = format == DSPARK_FORMAT_FP8_TENSOR ? 0 : (k + e->group - 1) / e->group;
    e->has_global = format == DSPARK_FORMAT_FP8_TENSOR || format == DSPARK_FORMAT_NVFP4;
    e->global = 1.0f;
    e->row_bytes = k / 8 * e->bits + k % 8 * e->bits / 8;
    switch (format) {
    case DSPARK_FORMAT_NVFP4:
        e->scale_dtype = DSPARK_F8_E4M3;
        e->scale_bytes = 1;
        break;
    case DSPARK_FORMAT_MXFP4:
    case DSPARK_FORMAT_MXFP8:
        e->scale_dtype = DSPARK_U8;
        e->scale_bytes = 1;
        break;
    case DSPARK_FORMAT_INT8:
    case DSPARK_FORMAT_INT4:
        e->scale_dtype = DSPARK_BF16;
        e->scale_bytes = 2;
        break;
    default:
        e->scale_dtype = DSPARK_F32;
        e->scale_bytes = 4;
    }
    fill_values(e);
    return DSPARK_OK;
}

float dspark__encode_absmax(const float *w, size_t n)
{
    uint32_t largest = 0; /* magnitudes order like their bits; NaN is above infinity */
    for (size_t i = 0; i < n; i++) {
        uint32_t a = dspark__f32_bits(w[i]) & 0x7fffffffu;
        largest = a > largest ? a : largest;
    }
    return dspark__f32_from_bits(largest);
}

/* ------------------------------------------------------------------------------------------------
 * Codes
 * --------------------------------------------------------------------------------------------- */

/* Saturating; x is no NaN. */
static inline uint8_t e4m3_code(float x)
{
    uint32_t u = dspark__f32_bits(x), a = u & 0x7fffffffu, normal, subnormal;
    a = a > 0x43e00000u ? 0x43e00000u : a;
    normal = ((a + 0x7ffffu + ((a >> 20) & 1u)) >> 20) - 960u;
    /* In [2^14, 2^15) one step of fp32 is 2^-9, the smallest E4M3: the addition rounds. */
    subnormal = dspark__f32_bits(dspark__f32_from_bits(a) + 0x1p14f) - 0x46800000u;
    return (uint8_t)((u >> 24 & 0x80u) | (a < 0x3c800000u ? subnormal : normal));
}

static inline uint8_t e2m1_code(float x)
{
    float a = fabsf(x);
    unsigned code = (unsigned)(a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) +
                    (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return (uint8_t)(code | (unsigned)(x < 0.0f) << 3);
}

static inline int integer_code(float x, float lo, float hi)
{
    x = x < lo ? lo : x;
    x = x > hi ? hi : x;
    return (int)((x + ROUNDER) - ROUNDER);
}

/* What the codes of e's kind stand for. */
static void fill_values(dspark__encoder *e)
{
    for (unsigned code = 0; code < 1u << e->bits; code++) {
        switch (e->format) {
        case DSPARK_FORMAT_NVFP4:
        case DSPARK_FORMAT_MXFP4: e->values[code] = dspark__e2m1_to_f32((uint8_t)code); break;
        case DSPARK_FORMAT_INT8: e->values[code] = (int8_t)code; break;
        case DSPARK_FORMAT_INT4: e->values[code] = (float)code - 8.0f; break;
        default: e->values[code] = dspark__e4m3_to_f32((uint8_t)code);
        }
    }
}

/* Weights [col, col + n) of a row under the scale s. n is even for 4-bit codes, and col too. */
static void encode_run(const dspark__encoder *e, const float *w, uint64_t col, uint64_t n, float s,
                       uint8_t *codes)
{
    enum { PASS = 64 };
    uint32_t wide[PASS]; /* as wide as a weight: a compiler makes vectors of it */
    w += col;
    switch (e->format) {
    case DSPARK_FORMAT_NVFP4:
    case DSPARK_FORMAT_MXFP4:
    case DSPARK_FORMAT_INT4: /* words of 8 codes, low nibble first: on disk the same order of bytes */
        codes += col / 2;
        for (uint64_t at = 0; at < n; at += PASS) {
            const uint64_t m = n - at < PASS ? n - at : PASS;
            if (e->format == DSPARK_FORMAT_INT4)
                for (uint64_t i = 0; i < m; i++) wide[i] = (uint32_t)(integer_code(w[at + i] / s, -8, 7) + 8);
            else
                for (uint64_t i = 0; i < m; i++) wide[i] = e2m1_code(w[at + i] / s);
            for (uint64_t i = 0; i < m; i += 2) codes[(at + i) / 2] = (uint8_t)(wide[i] | wide[i + 1] << 4);
        }
        break;
    case DSPARK_FORMAT_INT8:
        codes += col;
        for (uint64_t i = 0; i < n; i++) codes[i] = (uint8_t)integer_code(w[i] / s, -128, 127);
        break;
    default:
        codes += col;
        for (uint64_t i = 0; i < n; i++) codes[i] = e4m3_code(w[i] / s);
    }
}

/* Sum of squared errors of n weights under the scale s. */
static double run_error(const dspark__encoder *e, const float *w, uint64_t n, float s)
{
    const double scale = s;
    double sum = 0, d;
    switch (e->format) {
    case DSPARK_FORMAT_NVFP4:
    case DSPARK_FORMAT_MXFP4:
        for (uint64_t i = 0; i < n; i++) {
            d = w[i] - e->values[e2m1_code(w[i] / s)] * scale;
            sum += d * d;
        }
        break;
    case DSPARK_FORMAT_INT8:
        for (uint64_t i = 0; i < n; i++) {
            d = w[i] - integer_code(w[i] / s, -128, 127) * scale;
            sum += d * d;
        }
        break;
    case DSPARK_FORMAT_INT4:
        for (uint64_t i = 0; i < n; i++) {
            d = w[i] - integer_code(w[i] / s, -8, 7) * scale;
            sum += d * d;
        }
        break;
    default:
        for (uint64_t i = 0; i < n; i++) {
            d = w[i] - e->values[e4m3_code(w[i] / s)] * scale;
            sum += d * d;
        }
    }
    return sum;
}

/* ------------------------------------------------------------------------------------------------
 * Scales
 * --------------------------------------------------------------------------------------------- */

static float not_zero(float s, float otherwise)
{
    return s == 0.0f ? otherwise : s;
}

static float bf16(float x)
{
    return dspark__bf16_to_f32(dspark__f32_to_bf16(x));
}

/* A real scale for the largest magnitude m, candidate i of a search (0: no search). */
static float real_scale(const dspark__encoder *e, float m, uint32_t i)
{
    const float shrink = 1.0f - (float)i / 64.0f; /* exact */
    if (e->format == DSPARK_FORMAT_INT8) return not_zero(bf16(m / 127.5f * shrink), BF16_EPS);
    if (e->format == DSPARK_FORMAT_INT4) return not_zero(bf16(m / 7.5f * shrink), BF16_EPS);
    return not_zero(m / E4M3_MAX * shrink, FP32_EPS);
}

float dspark__encode_tensor_scale(const dspark__encoder *e, float absmax, uint32_t i)
{
    return real_scale(e, absmax, i);
}

double dspark__encode_tensor_error(const dspark__encoder *e, const float *w, float s)
{
    return run_error(e, w, e->k, s);
}

void dspark__encoder_set_absmax(dspark__encoder *e, float absmax)
{
    if (e->format == DSPARK_FORMAT_FP8_TENSOR) {
        e->global = real_scale(e, absmax, 0);
    } else if (e->format != DSPARK_FORMAT_NVFP4) {
        e->global = 1.0f;
    } else if (e->layout == DSPARK_LAYOUT_MODELOPT) {
        e->global = not_zero(absmax / GLOBAL, 1.0f);
    } else {
        float g = 1.0f / (absmax < FP32_TINY ? FP32_TINY : absmax) * GLOBAL;
        e->global = isinf(g) ? 1.0f : g;
    }
}

/* What a stored scale byte of nvfp4 or mx divides by. */
static float byte_scale(const dspark__encoder *e, unsigned byte)
{
    if (e->format != DSPARK_FORMAT_NVFP4) return dspark__e8m0_to_f32((uint8_t)byte);
    if (e->layout == DSPARK_LAYOUT_MODELOPT) return dspark__e4m3_to_f32((uint8_t)byte) * e->global;
    return dspark__e4m3_to_f32((uint8_t)byte) / e->global;
}

static unsigned absmax_byte(const dspark__encoder *e, float m)
{
    uint8_t code;
    if (e->format != DSPARK_FORMAT_NVFP4) {
        const uint32_t offset = e->format == DSPARK_FORMAT_MXFP4 ? 2 : 8;
        uint32_t exponent = (dspark__f32_bits(m) + 0x200000u) >> 23;
        return exponent <= offset ? 0 : exponent - offset;
    }
    if (e->layout == DSPARK_LAYOUT_MODELOPT) {
        float s = not_zero(m / (E2M1_MAX * e->global), 1.0f);
        return e4m3_code(s < 0x1p-9f ? 0x1p-9f : s);
    }
    code = e4m3_code(e->global * (m / E2M1_MAX));
    return code ? code : 0x20u; /* 0.125 */
}

/* Candidate i of a search around `byte`: 0, +1, -1, -2, ...; 0 when there is none left, with *byte. */
static int byte_candidate(const dspark__encoder *e, unsigned byte, uint32_t i, unsigned *out)
{
    const int nvfp4 = e->format == DSPARK_FORMAT_NVFP4;
    const int least = nvfp4 ? 1 : 0, most = nvfp4 ? 0x7e : 254;
    int c = (int)byte + (i == 1 ? 1 : i > 1 ? 1 - (int)i : 0);
    if (i > (nvfp4 ? 7u : 2u)) return 0;
    *out = c < least || c > most ? byte : (unsigned)c;
    return 1;
}

/* The weights that one scale serves. */
typedef struct area {
    const float *w; /* its first row, from column 0 on */
    size_t n_rows;
    uint64_t k, col, n;
} area;

static float area_absmax(const area *a)
{
    float m = 0;
    for (size_t r = 0; r < a->n_rows; r++) {
        float row = dspark__encode_absmax(a->w + r * a->k + a->col, a->n);
        m = row > m ? row : m;
    }
    return m;
}

static double area_error(const dspark__encoder *e, const area *a, float s)
{
    double sum = 0;
    for (size_t r = 0; r < a->n_rows; r++) sum += run_error(e, a->w + r * a->k + a->col, a->n, s);
    return sum;
}

/* Choose the area's scale, store it, and return what it divides by. */
static float choose_scale(const dspark__encoder *e, const area *a, uint8_t *stored)
{
    const float m = area_absmax(a);
    double best = 0;
    if (e->scale_bytes == 1) {
        unsigned first = absmax_byte(e, m), chosen = first, byte;
        for (uint32_t i = 0; e->search == DSPARK_SCALES_MSE && byte_candidate(e, first, i, &byte);
             i++) {
            double error = area_error(e, a, byte_scale(e, byte));
            if (i > 0 && !(error < best)) continue;
            best = error;
            chosen = byte;
        }
        stored[0] = (uint8_t)chosen;
        return byte_scale(e, chosen);
    }
    float chosen = real_scale(e, m, 0);
    for (uint32_t i = 0; e->search == DSPARK_SCALES_MSE && i < DSPARK__ENCODE_CANDIDATES; i++) {
        float s = real_scale(e, m, i);
        double error = area_error(e, a, s);
        if (i > 0 && !(error < best)) continue;
        best = error;
        chosen = s;
    }
    if (e->scale_bytes == 2) {
        uint16_t half = dspark__f32_to_bf16(chosen);
        memcpy(stored, &half, sizeof half);
    } else {
        memcpy(stored, &chosen, sizeof chosen);
    }
    return chosen;
}

/* ------------------------------------------------------------------------------------------------
 * Units
 * --------------------------------------------------------------------------------------------- */

void dspark__encode_unit(const dspark__encoder *e, const float *w, size_t n_rows, uint8_t *codes,
                         uint8_t *scales)
{
    if (e->n_scales == 0) {
        for (size_t r = 0; r < n_rows; r++)
            encode_run(e, w + r * e->k, 0, e->k, e->global, codes + r * e->row_bytes);
        return;
    }
    for (uint64_t g = 0; g < e->n_scales; g++) {
        area a = {w, n_rows, e->k, g * e->group, e->group};
        float s;
        if (a.n > e->k - a.col) a.n = e->k - a.col;
        s = choose_scale(e, &a, scales + g * e->scale_bytes);
        for (size_t r = 0; r < n_rows; r++)
            encode_run(e, w + r * e->k, a.col, a.n, s, codes + r * e->row_bytes);
    }
}

/* A stored scale as the number it is, without the tensor's. */
static double stored_scale(const dspark__encoder *e, const uint8_t *stored)
{
    float s;
    if (e->scale_bytes == 1)
        return e->format == DSPARK_FORMAT_NVFP4 ? dspark__e4m3_to_f32(*stored)
                                                : dspark__e8m0_to_f32(*stored);
    if (e->scale_bytes == 2) return dspark__bf16_to_f32(dspark__load_u16(stored));
    memcpy(&s, stored, sizeof s);
    return s;
}

void dspark__decode_row(const dspark__encoder *e, const uint8_t *codes, const uint8_t *scales,
                        size_t row, double *out)
{
    const float *table = e->values;
    double global = 1.0;

    codes += row * e->row_bytes;
    if (e->has_global)
        global = e->format == DSPARK_FORMAT_NVFP4 && e->layout == DSPARK_LAYOUT_COMPRESSED_TENSORS
                     ? 1.0f / e->global
                     : e->global;
    for (uint64_t col = 0; col < e->k;) {
        uint64_t end = e->k - col < e->group ? e->k : col + e->group;
        double s = e->n_scales ? stored_scale(e, scales + col / e->group * e->scale_bytes) : 1.0;
        s *= global; /* exact: 4 and 24 bits, or one of them is 1 */
        if (e->bits == 8) {
            for (; col < end; col++) out[col] = table[codes[col]] * s;
        } else {
            for (; col < end; col += 2) {
                out[col] = table[codes[col / 2] & 15] * s;
                out[col + 1] = table[codes[col / 2] >> 4] * s;
            }
        }
    }
}
