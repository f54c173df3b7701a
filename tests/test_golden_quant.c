/* Quantised weights against the libraries that other people write them with: files of
 * compressed-tensors (tools/oracle/quant_golden.py, quant_read_golden.py) and of ModelOpt
 * (modelopt_golden.py). Our encoders must give their codes and scales, byte by byte, from the same
 * weights; our schemes must give their dequantised values, bit by bit where both mean the same
 * product. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/numfmt.h"
#include "ckpt/checkpoint.h"
#include "ckpt/synth_values.h"
#include "quant/encode.h"
#include "quant/quant_file.h"
#include "quant/scheme.h"

static dspark_error err;

#define must(call) \
    do { \
        if ((call) != DSPARK_OK) \
            fail_msg("%s: %s: %s: %s", #call, dspark_status_name(err.code), err.where, err.message); \
    } while (0)

typedef struct golden {
    const char *folder;
    dspark_format format; /* what our encoder makes of the same weights; NONE: it is only read */
    dspark_layout layout;
    const char *scheme;   /* that reads it */
    const char *config;   /* format and weights of the config group; NULL: the folder has its own */
} golden;

#define CT(name) "golden_quant/" name
#define READ(name) "golden_quant_read/" name
#define MODELOPT(name) "golden_modelopt/" name

static const golden goldens[] = {
    {CT("fp8-tensor"), DSPARK_FORMAT_FP8_TENSOR, 0, "fp8_tensor",
     "\"float-quantized\",\"weights\":{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"tensor\"}"},
    {CT("fp8-channel"), DSPARK_FORMAT_FP8_CHANNEL, 0, "fp8_channel",
     "\"float-quantized\",\"weights\":{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"channel\"}"},
    {CT("fp8-block"), DSPARK_FORMAT_FP8_BLOCK, 0, "fp8_block",
     "\"float-quantized\",\"weights\":{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"block\","
     "\"block_structure\":[128,128]}"},
    {CT("nvfp4"), DSPARK_FORMAT_NVFP4, 0, "nvfp4_ct",
     "\"nvfp4-pack-quantized\",\"weights\":{\"num_bits\":4,\"type\":\"float\","
     "\"strategy\":\"tensor_group\",\"group_size\":16}"},
    {CT("mxfp4"), DSPARK_FORMAT_MXFP4, 0, "mxfp4",
     "\"mxfp4-pack-quantized\",\"weights\":{\"num_bits\":4,\"type\":\"float\","
     "\"strategy\":\"group\",\"group_size\":32}"},
    {CT("mxfp8"), DSPARK_FORMAT_MXFP8, 0, "mxfp8",
     "\"mxfp8-quantized\",\"weights\":{\"num_bits\":8,\"type\":\"float\","
     "\"strategy\":\"group\",\"group_size\":32}"},
    {CT("int8"), DSPARK_FORMAT_INT8, 0, "int8",
     "\"int-quantized\",\"weights\":{\"num_bits\":8,\"type\":\"int\",\"strategy\":\"channel\"}"},
    {CT("int4"), DSPARK_FORMAT_INT4, 0, "int_packed",
     "\"pack-quantized\",\"weights\":{\"num_bits\":4,\"type\":\"int\",\"strategy\":\"group\","
     "\"group_size\":128}"},
    {READ("fp8-group"), DSPARK_FORMAT_NONE, 0, "fp8_group", NULL},
    {READ("int8-asym"), DSPARK_FORMAT_NONE, 0, "int8", NULL},
    {READ("int8-packed"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int4-asym"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int4-channel"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int4-gidx"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int2"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int3"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int3-asym"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int3-old"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int5"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int5-old"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int6"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int6-old"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int7"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {READ("int7-old"), DSPARK_FORMAT_NONE, 0, "int_packed", NULL},
    {MODELOPT("nvfp4"), DSPARK_FORMAT_NVFP4, DSPARK_LAYOUT_MODELOPT, "nvfp4_modelopt", NULL},
    {MODELOPT("nvfp4-a16"), DSPARK_FORMAT_NVFP4, DSPARK_LAYOUT_MODELOPT, "nvfp4_modelopt", NULL},
    {MODELOPT("fp8"), DSPARK_FORMAT_FP8_TENSOR, DSPARK_LAYOUT_MODELOPT, "fp8_tensor", NULL},
    {MODELOPT("fp8-channel"), DSPARK_FORMAT_NONE, 0, "fp8_channel", NULL},
    {MODELOPT("fp8-block"), DSPARK_FORMAT_NONE, 0, "fp8_block", NULL},
    {MODELOPT("mxfp8"), DSPARK_FORMAT_NONE, 0, "mxfp8", NULL},
    {MODELOPT("mxfp4-fp8"), DSPARK_FORMAT_NONE, 0, "mxfp4", NULL},
    {MODELOPT("int8"), DSPARK_FORMAT_NONE, 0, "int8", NULL},
};

static const char *const modules[] = {"layers.0.self_attn.kv_a_proj_with_mqa",
                                      "layers.1.self_attn.kv_a_proj_with_mqa",
                                      "layers.1.mlp.up_proj", "special"};

static const dspark_tensor *find(const dspark_checkpoint *c, const char *prefix, const char *module,
                                 const char *suffix)
{
    char name[256];
    snprintf(name, sizeof name, "%s%s%s", prefix, module, suffix);
    return dspark__checkpoint_find(c, name);
}

static void gather(dspark__module *m, const dspark_checkpoint *c, const char *module)
{
    size_t n = strlen(module);
    memset(m, 0, sizeof *m);
    snprintf(m->name, sizeof m->name, "%s", module);
    for (size_t i = 0; i < dspark__checkpoint_count(c); i++) {
        const dspark_tensor *t = dspark__checkpoint_at(c, i);
        if (strncmp(t->name, module, n) != 0 || t->name[n] != '.') continue;
        m->parts[m->n_parts].suffix = t->name + n + 1;
        m->parts[m->n_parts++].tensor = t;
    }
}

/* The weight that was quantised, [rows][k]. */
static float *make_weight(const dspark_checkpoint *c, const char *module, uint64_t rows, uint64_t k)
{
    const dspark_tensor *stored = find(c, "weight.", module, "");
    uint16_t *bits = malloc(rows * k * sizeof *bits);
    float *w = malloc(rows * k * sizeof *w);
    assert_non_null(bits);
    assert_non_null(w);
    if (stored) {
        assert_int_equal(stored->n_elements, rows * k);
        memcpy(bits, stored->data, rows * k * sizeof *bits);
    } else {
        dspark__synth_stream s;
        char name[256];
        snprintf(name, sizeof name, "%s.weight", module);
        dspark__synth_stream_init(&s, name, k,
                                  strtoull(dspark__checkpoint_metadata(c, "seed"), NULL, 10));
        dspark__synth_fill(&s, 0, rows * k, bits);
    }
    for (uint64_t i = 0; i < rows * k; i++) w[i] = dspark__bf16_to_f32(bits[i]);
    free(bits);
    return w;
}

static void same_bytes(const char *what, const dspark_tensor *t, const uint8_t *ours, uint64_t n)
{
    const uint8_t *theirs = t->data;
    assert_int_equal(t->n_bytes, n);
    for (uint64_t i = 0; i < n; i++)
        if (theirs[i] != ours[i])
            fail_msg("%s (%s): byte %llu is 0x%02x, the library wrote 0x%02x", t->name, what,
                     (unsigned long long)i, ours[i], theirs[i]);
}

/* ---- encoders ---- */

static void check_encoder(const golden *g, const dspark_checkpoint *c, const char *module,
                          uint64_t rows, uint64_t k)
{
    const dspark_tensor *codes = find(c, "", module, ".weight_packed");
    const dspark_tensor *scales = find(c, "", module, ".weight_scale");
    const dspark_tensor *global = find(c, "", module, ".weight_global_scale");
    float *w = make_weight(c, module, rows, k);
    dspark__encoder e;
    uint8_t *our_codes, *our_scales;
    uint64_t units;

    must(dspark__encoder_init(&e, g->format, DSPARK_SCALES_ABSMAX, g->layout, 0, k, module, &err));
    if (!global) global = find(c, "", module, ".weight_scale_2");
    if (!codes) codes = find(c, "", module, ".weight");
    if (g->format == DSPARK_FORMAT_FP8_TENSOR) {
        global = scales;
        scales = NULL;
    }
    assert_non_null(codes);
    units = (rows + e.unit_rows - 1) / e.unit_rows;
    our_codes = malloc(rows * e.row_bytes);
    our_scales = malloc(units * e.n_scales * e.scale_bytes + 1);
    assert_non_null(our_codes);
    assert_non_null(our_scales);
    dspark__encoder_set_absmax(&e, dspark__encode_absmax(w, rows * k));
    for (uint64_t u = 0; u < units; u++) {
        uint64_t row = u * e.unit_rows, n = rows - row < e.unit_rows ? rows - row : e.unit_rows;
        dspark__encode_unit(&e, w + row * k, n, our_codes + row * e.row_bytes,
                            our_scales + u * e.n_scales * e.scale_bytes);
    }
    if (e.has_global) same_bytes("global", global, (const uint8_t *)&e.global, sizeof e.global);
    if (scales) {
        assert_int_equal(scales->dtype, e.scale_dtype);
        same_bytes("scales", scales, our_scales, units * e.n_scales * e.scale_bytes);
    }
    same_bytes("codes", codes, our_codes, rows * e.row_bytes);
    free(our_codes);
    free(our_scales);
    free(w);
}

/* ---- schemes ---- */

static double stored_value(const dspark_tensor *t, uint64_t i)
{
    const uint8_t *p = t->data;
    float f;
    if (t->dtype == DSPARK_BF16) return dspark__bf16_to_f32(dspark__load_u16(p + 2 * i));
    assert_int_equal(t->dtype, DSPARK_F32);
    memcpy(&f, p + 4 * i, sizeof f);
    return f;
}

/* d rounded once to the dtype of `t`. */
static double rounded(const dspark_tensor *t, double d)
{
    float f = (float)d;
    if (t->dtype == DSPARK_F32) return f;
    if ((double)f != d) { /* keep the tie: round to odd first */
        uint32_t u = dspark__f32_bits(f);
        if (fabs((double)f) > fabs(d)) u--;
        f = dspark__f32_from_bits(u | 1u);
    }
    return dspark__bf16_to_f32(dspark__f32_to_bf16(f));
}

static void check_scheme(const golden *g, const dspark_checkpoint *c, dspark__quant_config *q,
                         const char *module, uint64_t rows, uint64_t k, size_t *n_apart)
{
    const dspark_tensor *list = find(c, "rows.", module, ""), *want = find(c, "dequantised.", module, "");
    const dspark_tensor *global = find(c, "", module, ".weight_global_scale");
    const dspark__scheme *scheme;
    dspark__quant_rule rule;
    dspark__packing packing;
    dspark__module m;
    double *row = malloc(k * sizeof *row);
    float gs = 1;
    int exponent;

    assert_non_null(row);
    assert_non_null(list);
    assert_non_null(want);
    memset(&packing, 0, sizeof packing);
    gather(&m, c, module);
    must(dspark__quant_config_rule(q, module, &rule, &err));
    assert_int_equal(rule.quantised, 1);
    must(dspark__scheme_detect(&scheme, &m, &rule, rows, k, &err));
    assert_string_equal(scheme->name, g->scheme);
    must(scheme->validate(&m, &rule, rows, k, &packing, &err));
    if (!global) global = find(c, "", module, ".weight_scale_2");
    if (global) memcpy(&gs, global->data, sizeof gs);
    for (uint64_t i = 0; i < list->n_elements; i++) {
        int64_t r;
        memcpy(&r, (const uint8_t *)list->data + 8 * i, sizeof r);
        scheme->dequantise(&m, &rule, (uint64_t)r, rows, k, row);
        for (uint64_t j = 0; j < k; j++) {
            double theirs = stored_value(want, i * k + j), ours = rounded(want, row[j]);
            if (theirs == ours) continue;
            /* The libraries round the product of the two scales to fp32, we multiply the sum by the
             * tensor's (in compressed-tensors by its fp32 reciprocal): the same number when that is a
             * power of two, and else a value that lies within two steps of fp32 of a tie may round to
             * its other side. */
            if (g->format != DSPARK_FORMAT_NVFP4 || frexpf(gs, &exponent) == 0.5f)
                fail_msg("%s row %lld column %llu: %a, the library says %a", module, (long long)r,
                         (unsigned long long)j, row[j], theirs);
            assert_true(fabs(theirs - row[j]) <= fabs(row[j]) * (0x1p-9 + 0x1p-22) * 2);
            assert_true(rounded(want, row[j] * (1 + 0x1p-22)) == theirs ||
                        rounded(want, row[j] * (1 - 0x1p-22)) == theirs);
            ++*n_apart;
        }
    }
    free(row);
}

static dspark__quant_config *read_config(const golden *g, const char *path)
{
    dspark__quant_config *q;
    char text[512];
    if (!g->config) {
        must(dspark__quant_config_read(&q, path, &err));
        return q;
    }
    snprintf(text, sizeof text,
             "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"config_groups\":{"
             "\"group_0\":{\"targets\":[\"Linear\"],\"format\":%s}}}}", g->config);
    must(dspark__quant_config_parse(&q, text, strlen(text), NULL, 0, "test", &err));
    return q;
}

/* [rows, columns] of a module; 0 when it is not in the file. */
static int find_size(const dspark_checkpoint *c, const char *module, uint64_t *rows, uint64_t *k)
{
    const dspark_tensor *t = find(c, "", module, ".weight_shape");
    int64_t shape[2];
    if (t) {
        memcpy(shape, t->data, sizeof shape);
        *rows = (uint64_t)shape[0];
        *k = (uint64_t)shape[1];
        return 1;
    }
    t = find(c, "", module, ".weight_packed");
    if (!t) t = find(c, "", module, ".weight");
    if (!t) return 0;
    *rows = t->shape[0];
    *k = t->shape[1] * (t->dtype == DSPARK_U8 ? 2 : 1);
    return 1;
}

/* What ModelOpt was told to leave alone is BF16 under its exclude_modules. */
static void check_kept(const dspark_checkpoint *c, dspark__quant_config *q)
{
    static const char kept[] = "layers.1.mlp.gate_proj";
    const dspark__scheme *scheme;
    dspark__quant_rule rule;
    dspark__module m;
    if (!find(c, "", kept, ".weight")) return;
    gather(&m, c, kept);
    must(dspark__quant_config_rule(q, kept, &rule, &err));
    assert_true(rule.quantised <= 0);
    must(dspark__scheme_detect(&scheme, &m, &rule, 16, 128, &err));
    assert_string_equal(scheme->name, "bf16");
}

static void test_golden(void **state)
{
    for (size_t i = 0; i < sizeof goldens / sizeof *goldens; i++) {
        const golden *g = &goldens[i];
        dspark_checkpoint *c;
        dspark__quant_config *q;
        char path[512];
        size_t n_modules = 0, n_apart = 0;
        snprintf(path, sizeof path, DSPARK_TEST_DATA "/%s", g->folder);
        must(dspark__checkpoint_open(&c, path, &err));
        q = read_config(g, path);
        for (size_t j = 0; j < sizeof modules / sizeof *modules; j++) {
            uint64_t rows, k;
            if (!find_size(c, modules[j], &rows, &k)) continue; /* not every format has every module */
            if (g->format) check_encoder(g, c, modules[j], rows, k);
            check_scheme(g, c, q, modules[j], rows, k, &n_apart);
            n_modules++;
        }
        check_kept(c, q);
        assert_true(n_modules >= 3);
        printf("%-28s %zu modules, %zu values on the other side of a tie\n", g->folder, n_modules,
               n_apart);
        dspark__quant_config_free(q);
        dspark__checkpoint_close(c);
    }
    (void)state;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
