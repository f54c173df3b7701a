/* synth_schemes: checkpoints in the formats of other producers that are read here and that `quantize`
 * does not write: FP8 per group, DeepSeek's and Quark's, E5M2 and FNUZ; packed integers of other widths,
 * with zero points, reordered columns, and in the older layout. For tests and trials: scales are plain
 * absmax, and nobody should serve what this makes. Reads a BF16 checkpoint of synth's and nothing else. */
#include "synth_schemes.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"
#include "out.h"
#include "tmp_folder.h"

#define BLOCK 128u
#define MAX_PARTS 5

typedef enum layout { TENSOR, CHANNEL, GROUP, GRID } layout;

struct synth_scheme {
    const char *name;
    dspark_dtype dtype;   /* of FP8 codes; I32: packed integers */
    layout scales;
    const char *suffix;   /* of the scales */
    const char *method;   /* quant_method */
    const char *quark;    /* the dtype's name there */
    unsigned bits;
    int asymmetric, reordered, old; /* integers */
};

#define FP8(name, dtype, scales, suffix, method, quark) \
    {name, dtype, scales, suffix, method, quark, 8, 0, 0, 0}
#define INT(name, bits, asymmetric, reordered, old) \
    {name, DSPARK_I32, GROUP, "weight_scale", "compressed-tensors", NULL, bits, asymmetric, reordered, old}

static const synth_scheme schemes[] = {
    FP8("fp8-group", DSPARK_F8_E4M3, GROUP, "weight_scale", "compressed-tensors", NULL),
    FP8("fp8-deepseek", DSPARK_F8_E4M3, GRID, "weight_scale_inv", "fp8", NULL),
    FP8("fp8-quark", DSPARK_F8_E4M3, CHANNEL, "weight_scale", "quark", "fp8_e4m3"),
    FP8("fp8-fnuz", DSPARK_F8_E4M3FNUZ, CHANNEL, "weight_scale", "quark", "fp8_e4m3fnuz"),
    FP8("fp8-e5m2", DSPARK_F8_E5M2, TENSOR, "weight_scale", "quark", "fp8_e5m2"),
    INT("int8-packed", 8, 0, 0, 0), INT("int4-asym", 4, 1, 0, 0), INT("int4-gidx", 4, 0, 1, 0),
    INT("int3", 3, 0, 0, 0),        INT("int5", 5, 1, 0, 0),      INT("int6", 6, 0, 0, 0),
    INT("int7", 7, 1, 0, 0),        INT("int3-old", 3, 1, 0, 1),  INT("int5-old", 5, 0, 0, 1),
    INT("int6-old", 6, 1, 0, 1),    INT("int7-old", 7, 0, 0, 1),
};

/* One linear layer while it is written. */
typedef struct module {
    const synth_scheme *s;
    const dspark_tensor *t;
    char name[300]; /* without ".weight" */
    uint64_t rows, k, group, n_cols, n_scales;
    uint64_t number; /* of the module: columns are reordered by it */
    float *scales;   /* [n_scales] */
    int *zeros;
    uint8_t *codes;  /* of a row */
    uint64_t row_bytes;
} module;

const synth_scheme *synth_scheme_find(const char *name)
{
    size_t i;
    for (i = 0; i < sizeof schemes / sizeof *schemes; i++)
        if (strcmp(schemes[i].name, name) == 0) return &schemes[i];
    return NULL;
}

const char *synth_scheme_name(size_t index)
{
    return index < sizeof schemes / sizeof *schemes ? schemes[index].name : NULL;
}

int synth_scheme_has_groups(const synth_scheme *s)
{
    return s->scales == GROUP;
}

/* ---- numbers ---- */

static float weight_at(const module *m, uint64_t row, uint64_t col)
{
    return (float)number_bf16((const unsigned char *)m->t->data + 2 * (row * m->k + col));
}

/* To nearest, ties to even; f is finite. */
static uint16_t bf16_of(float f)
{
    uint32_t word;
    memcpy(&word, &f, sizeof word);
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

static float bf16_rounded(float f)
{
    uint32_t word = (uint32_t)bf16_of(f) << 16;
    memcpy(&f, &word, sizeof f);
    return f;
}

static float fp8_value(dspark_dtype dtype, int code)
{
    return (float)number_fp8(dtype, code);
}

static int fp8_last(dspark_dtype dtype)
{
    return dtype == DSPARK_F8_E5M2 ? 0x7b : dtype == DSPARK_F8_E4M3FNUZ ? 0x7f : 0x7e;
}

/* The nearest code, the even one of two. A zero has no sign: FNUZ has no code for it. */
static uint8_t fp8_code(dspark_dtype dtype, float x)
{
    int low = 0, high = fp8_last(dtype);
    float a = fabsf(x), below, above;
    while (low + 1 < high) {
        int middle = (low + high) / 2;
        if (fp8_value(dtype, middle) <= a)
            low = middle;
        else
            high = middle;
    }
    below = a - fp8_value(dtype, low);
    above = fp8_value(dtype, high) - a;
    if (above < below || (above == below && high % 2 == 0)) low = high;
    return (uint8_t)(low | (x < 0 && low ? 0x80 : 0));
}

static int rounded(float x, int low, int high)
{
    float r = rintf(x);
    return r < (float)low ? low : r > (float)high ? high : (int)r;
}

static uint64_t ceil_div(uint64_t a, uint64_t b)
{
    return (a + b - 1) / b;
}

/* ---- one module ---- */

static uint64_t n_words(const module *m, uint64_t n)
{
    return m->s->old ? ceil_div(n, 32 / m->s->bits) : ceil_div(n * m->s->bits, 32);
}

/* Element i of a string of packed codes; words lie `step` apart. */
static void put_code(const module *m, uint8_t *words, uint64_t step, uint64_t i, int code)
{
    const unsigned bits = m->s->bits, per_word = 32 / bits;
    const unsigned u = (unsigned)(code + (1 << (bits - 1)));
    uint64_t at = m->s->old ? i / per_word * 32 + i % per_word * bits : i * bits;
    unsigned b;
    for (b = 0; b < bits; b++, at++)
        if (u >> b & 1) words[4 * (at / 32 * step) + at % 32 / 8] |= (uint8_t)(1u << at % 8);
}

static uint64_t group_of(const module *m, uint64_t col)
{
    return m->s->reordered ? (col + m->number) % m->n_cols : col / m->group;
}

static uint64_t scale_of(const module *m, uint64_t row, uint64_t col)
{
    switch (m->s->scales) {
    case TENSOR: return 0;
    case CHANNEL: return row;
    case GRID: return row / BLOCK * m->n_cols + col / BLOCK;
    default: return row * m->n_cols + group_of(m, col);
    }
}

static void find_scales(module *m, float *low, float *high)
{
    const int half = 1 << (m->s->bits - 1);
    uint64_t r, c, i;
    for (r = 0; r < m->rows; r++) {
        for (c = 0; c < m->k; c++) {
            const float w = weight_at(m, r, c);
            i = scale_of(m, r, c);
            if (w < low[i]) low[i] = w;
            if (w > high[i]) high[i] = w;
        }
    }
    for (i = 0; i < m->n_scales; i++) {
        const float largest = fmaxf(-low[i], high[i]);
        float s = m->s->dtype != DSPARK_I32
                      ? largest / fp8_value(m->s->dtype, fp8_last(m->s->dtype))
                  : m->s->asymmetric ? bf16_rounded((high[i] - low[i]) / (float)(2 * half - 1))
                                     : bf16_rounded(largest / ((float)half - 0.5f));
        m->scales[i] = s > 0 ? s : 1;
        m->zeros[i] = m->s->asymmetric ? rounded(-low[i] / m->scales[i] - (float)half, -half, half - 1)
                                       : 0;
    }
}

static void encode_row(module *m, uint64_t row)
{
    const int half = 1 << (m->s->bits - 1);
    uint64_t c;
    memset(m->codes, 0, m->row_bytes);
    for (c = 0; c < m->k; c++) {
        const uint64_t i = scale_of(m, row, c);
        const float x = weight_at(m, row, c) / m->scales[i];
        if (m->s->dtype == DSPARK_I32)
            put_code(m, m->codes, 1, c, rounded(x + (float)m->zeros[i], -half, half - 1));
        else
            m->codes[c] = fp8_code(m->s->dtype, x);
    }
}

/* ---- what is written of it ---- */

typedef enum part { CODES, SCALES, SHAPE, ZEROS, ORDER } part;

/* Suffix, dtype and shape; 0 when the module has no such part. */
static int describe(const module *m, part p, const char **suffix, dspark_dtype *dtype, uint32_t *rank,
                    uint64_t shape[2])
{
    const int packed = m->s->dtype == DSPARK_I32;
    *rank = 2;
    switch (p) {
    case CODES:
        *suffix = packed ? "weight_packed" : "weight";
        *dtype = m->s->dtype;
        shape[0] = m->rows;
        shape[1] = packed ? m->row_bytes / 4 : m->k;
        return 1;
    case SCALES:
        *suffix = m->s->suffix;
        *dtype = packed ? DSPARK_BF16 : DSPARK_F32;
        *rank = m->s->scales == TENSOR ? 0 : m->s->scales == CHANNEL ? 1 : 2;
        shape[0] = m->n_scales / m->n_cols;
        shape[1] = m->n_cols;
        return 1;
    case SHAPE:
        *suffix = "weight_shape";
        *dtype = DSPARK_I64;
        *rank = 1;
        shape[0] = 2;
        return packed;
    case ZEROS:
        *suffix = "weight_zero_point";
        *dtype = DSPARK_I32;
        shape[0] = n_words(m, m->rows);
        shape[1] = m->n_cols;
        return m->s->asymmetric;
    default:
        *suffix = "weight_g_idx";
        *dtype = DSPARK_I32;
        *rank = 1;
        shape[0] = m->k;
        return m->s->reordered;
    }
}

static dspark_status write_codes(module *m, dspark_writer *w, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    uint64_t r;
    for (r = 0; st == DSPARK_OK && r < m->rows; r++) {
        encode_row(m, r);
        st = dspark_writer_data(w, m->codes, (size_t)m->row_bytes, err);
        if (st == DSPARK_OK && r % 256 == 0) st = out_check_interrupt(err);
    }
    return st;
}

static dspark_status write_part(module *m, part p, uint64_t n_bytes, dspark_writer *w,
                                dspark_error *err)
{
    const int64_t shape[2] = {(int64_t)m->rows, (int64_t)m->k};
    dspark_status st;
    uint8_t *bytes;
    uint64_t i;
    if (p == CODES) return write_codes(m, w, err);
    if (!(bytes = calloc(1, (size_t)n_bytes + 1)))
        return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for %s", m->name);
    for (i = 0; p == SCALES && i < m->n_scales; i++) {
        const uint16_t half = bf16_of(m->scales[i]);
        if (m->s->dtype == DSPARK_I32)
            memcpy(bytes + 2 * i, &half, sizeof half);
        else
            memcpy(bytes + 4 * i, &m->scales[i], sizeof *m->scales);
    }
    if (p == SHAPE) memcpy(bytes, shape, sizeof shape);
    for (i = 0; p == ZEROS && i < m->n_scales; i++)
        put_code(m, bytes + 4 * (i % m->n_cols), m->n_cols, i / m->n_cols, m->zeros[i]);
    for (i = 0; p == ORDER && i < m->k; i++) {
        const int32_t group = (int32_t)group_of(m, i);
        memcpy(bytes + 4 * i, &group, sizeof group);
    }
    st = dspark_writer_data(w, bytes, (size_t)n_bytes, err);
    free(bytes);
    return st;
}

static dspark_status write_module(module *m, dspark_writer *w, dspark_error *err)
{
    float *ends = calloc((size_t)m->n_scales * 2, sizeof *ends);
    dspark_status st = DSPARK_OK;
    int p;
    m->scales = calloc((size_t)m->n_scales, sizeof *m->scales);
    m->zeros = calloc((size_t)m->n_scales, sizeof *m->zeros);
    m->codes = calloc((size_t)m->row_bytes, 1);
    if (!ends || !m->scales || !m->zeros || !m->codes) {
        st = out_set_error(err, DSPARK_ENOMEM, "", "out of memory for %s", m->name);
        goto done;
    }
    find_scales(m, ends, ends + m->n_scales);
    for (p = CODES; st == DSPARK_OK && p <= ORDER; p++) {
        const char *suffix;
        dspark_dtype dtype;
        uint64_t shape[2] = {1, 1}, n;
        uint32_t rank;
        if (!describe(m, (part)p, &suffix, &dtype, &rank, shape)) continue;
        n = (rank ? shape[0] : 1) * (rank > 1 ? shape[1] : 1);
        n *= dtype == DSPARK_I64 ? 8 : dtype == DSPARK_BF16 ? 2 : 4;
        st = write_part(m, (part)p, n, w, err);
    }
done:
    free(ends);
    free(m->scales);
    free(m->zeros);
    free(m->codes);
    return st;
}

/* ---- the checkpoint ---- */

/* A linear layer that `quantize` would take by default. */
static int is_linear(const dspark_tensor *t)
{
    static const char *const kept[] = {"embed_tokens", "markov", "confidence", "kv_b_proj", "lm_head"};
    const size_t n = strlen(t->name);
    size_t i;
    if (t->rank != 2 || n < 8 || strcmp(t->name + n - 7, ".weight") != 0) return 0;
    for (i = 0; i < sizeof kept / sizeof *kept; i++)
        if (strstr(t->name, kept[i])) return 0;
    return 1;
}

static dspark_status module_init(module *m, const synth_scheme *s, const dspark_tensor *t,
                                 uint64_t number, uint32_t group, dspark_error *err)
{
    memset(m, 0, sizeof *m);
    m->s = s;
    m->t = t;
    m->number = number;
    snprintf(m->name, sizeof m->name, "%.*s", (int)(strlen(t->name) - 7), t->name);
    m->rows = t->shape[0];
    m->k = t->shape[1];
    m->group = group ? group : 32;
    m->n_cols = s->scales == GROUP ? m->k / m->group : s->scales == GRID ? ceil_div(m->k, BLOCK) : 1;
    m->n_scales = m->n_cols * (s->scales == TENSOR ? 1 : s->scales == GRID ? ceil_div(m->rows, BLOCK)
                                                                          : m->rows);
    m->row_bytes = s->dtype == DSPARK_I32 ? 4 * n_words(m, m->k) : m->k;
    if (s->scales == GROUP && (m->group % 8 != 0 || m->k % m->group != 0))
        return out_set_error(err, DSPARK_EUNSUPPORTED, m->name, "%llu columns are no multiple of groups "
                             "of %llu; choose another one (--group-size N)", (unsigned long long)m->k,
                             (unsigned long long)m->group);
    return DSPARK_OK;
}

static dspark_status declare_module(const module *m, dspark_writer *w, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    int p;
    for (p = CODES; st == DSPARK_OK && p <= ORDER; p++) {
        const char *suffix;
        dspark_dtype dtype;
        uint64_t shape[2];
        uint32_t rank;
        char name[340];
        if (!describe(m, (part)p, &suffix, &dtype, &rank, shape)) continue;
        snprintf(name, sizeof name, "%s.%s", m->name, suffix);
        st = dspark_writer_declare(w, name, dtype, rank, shape, err);
    }
    return st;
}

static dspark_status write_tensors(const synth_scheme *s, const dspark_checkpoint *c, const char *path,
                                   uint32_t group, dspark_error *err)
{
    dspark_writer *w = NULL;
    dspark_status st = dspark_writer_create(&w, path, err);
    size_t i, n = dspark_checkpoint_tensor_count(c);
    int pass;
    if (st == DSPARK_OK) st = dspark_writer_metadata(w, "format", "pt", err);
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; st == DSPARK_OK && i < n; i++) {
            const dspark_tensor *t = dspark_checkpoint_tensor(c, i);
            module m;
            if (!is_linear(t)) {
                st = pass ? dspark_writer_data(w, t->data, (size_t)t->n_bytes, err)
                          : dspark_writer_declare(w, t->name, t->dtype, t->rank, t->shape, err);
                continue;
            }
            st = module_init(&m, s, t, i, group, err);
            if (st == DSPARK_OK) st = pass ? write_module(&m, w, err) : declare_module(&m, w, err);
        }
    }
    if (st == DSPARK_OK) return dspark_writer_commit(w, err);
    dspark_writer_abort(w);
    return st;
}

/* ---- its config ---- */

static json_t *compressed_json(const synth_scheme *s, uint32_t group)
{
    const int is_int = s->dtype == DSPARK_I32;
    json_t *weights = json_pack("{si ss sb ss si sb ss?}", "num_bits", (int)s->bits, "type",
                                is_int ? "int" : "float", "symmetric", !s->asymmetric, "strategy",
                                "group", "group_size", group ? (int)group : 32, "dynamic", 0,
                                "actorder", s->reordered ? "group" : NULL);
    return json_pack("{ss ss ss ss s{s{s[s] so}}}", "quant_method", s->method, "format",
                     is_int ? "pack-quantized" : "float-quantized", "quantization_status", "compressed",
                     "version", s->old ? "0.17.1" : "0.20.1", "config_groups", "group_0", "targets",
                     "Linear", "weights", weights);
}

static json_t *quark_json(const synth_scheme *s)
{
    json_t *weight = json_pack("{ss ss sb sb}", "dtype", s->quark, "qscheme",
                               s->scales == CHANNEL ? "per_channel" : "per_tensor", "is_dynamic", 0,
                               "symmetric", 1);
    if (s->scales == CHANNEL) out_set(weight, "ch_axis", json_integer(0));
    return json_pack("{ss s{so sn}}", "quant_method", s->method, "global_quant_config", "weight", weight,
                     "input_tensors");
}

static json_t *quant_json(const synth_scheme *s, const dspark_checkpoint *c, uint32_t group)
{
    const int deepseek = strcmp(s->method, "fp8") == 0, quark = strcmp(s->method, "quark") == 0;
    json_t *q = quark ? quark_json(s)
                : deepseek
                    ? json_pack("{ss ss ss s[ii]}", "quant_method", s->method, "fmt", "e4m3",
                                "activation_scheme", "dynamic", "weight_block_size", (int)BLOCK,
                                (int)BLOCK)
                    : compressed_json(s, group);
    json_t *ignore = json_array();
    size_t i;
    for (i = 0; i < dspark_checkpoint_tensor_count(c); i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(c, i);
        if (t->rank == 2 && !is_linear(t) && strlen(t->name) > 7)
            out_append(ignore, json_stringn(t->name, strlen(t->name) - 7));
    }
    out_append(ignore, json_string("lm_head"));
    out_set(q, deepseek ? "modules_to_not_convert" : quark ? "exclude" : "ignore", ignore);
    return q;
}

static dspark_status write_config(const synth_scheme *s, const dspark_checkpoint *c, const char *plain,
                                  const char *folder, uint32_t group, dspark_error *err)
{
    char path[4200], *text = NULL;
    dspark_status st;
    json_t *config;
    snprintf(path, sizeof path, "%s/config.json", plain);
    config = json_load_file(path, 0, NULL);
    if (!config) return out_set_error(err, DSPARK_EIO, path, "cannot be read back");
    snprintf(path, sizeof path, "%s/config.json", folder);
    if (json_object_set_new(config, "quantization_config", quant_json(s, c, group)) == 0)
        text = json_dumps(config, JSON_INDENT(2));
    json_decref(config);
    st = text ? dspark_file_write(path, text, strlen(text), err)
              : out_set_error(err, DSPARK_ENOMEM, path, "out of memory");
    free(text);
    return st;
}

dspark_status synth_scheme_write(const synth_scheme *s, const char *plain, const char *out,
                                 uint32_t group, dspark_error *err)
{
    char file[4200], inner[4150];
    tmp_folder folder;
    dspark_checkpoint *c = NULL;
    dspark_status st;
    int problem = tmp_folder_beside(&folder, out, s->name);
    if (!problem && (problem = tmp_folder_inner(inner, sizeof inner, &folder)) != 0)
        tmp_folder_remove(&folder);
    if (problem)
        return out_set_error(err, DSPARK_EOUTPUT, out, "no temporary folder beside it: %s",
                             strerror(problem));
    snprintf(file, sizeof file, "%s/model.safetensors", inner);
    st = dspark_checkpoint_open(&c, plain, err);
    if (st == DSPARK_OK) st = write_tensors(s, c, file, group, err);
    if (st == DSPARK_OK) st = write_config(s, c, plain, inner, group, err);
    dspark_checkpoint_close(c);
    if (st == DSPARK_OK && (problem = tmp_folder_rename(&folder, out)) != 0) {
        const int taken = problem == ENOTEMPTY || problem == EEXIST || problem == ENOTDIR;
        st = out_set_error(err, taken ? DSPARK_EINVAL : DSPARK_EOUTPUT, out,
                           "must not be there yet, or be an empty folder: %s", strerror(problem));
    }
    tmp_folder_remove(&folder);
    return st;
}
