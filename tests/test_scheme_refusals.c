/* What no scheme may read: every refusal names the tensor (or the module) and what is wrong with
 * it. And the same modules with the fault put right are read. */
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
#include "support/examine.h"
#include "support/fixture.h"
#include "support/tmpdir.h"

/* clang-format off: the tables are rows, not columns */

/* A tensor whose elements are all `value`; d1 = 0: rank 1, d0 = 0 too: rank 0. */
typedef struct part {
    const char *suffix;
    dspark_dtype dtype;
    uint64_t d0, d1;
    double value;
} part;

typedef struct refusal {
    uint64_t rows, k;
    part parts[7];
    dspark__quant_rule rule;
    dspark_status status; /* DSPARK_OK: it is read */
    const char *where, *text;
} refusal;

static void add_part(const part *p)
{
    char name[80];
    uint64_t shape[2] = {p->d0, p->d1}, n = (p->d0 ? p->d0 : 1) * (p->d1 ? p->d1 : 1);
    unsigned char *at;
    float f = (float)p->value;

    snprintf(name, sizeof name, "m.%s", p->suffix);
    at = tensors_add(&t, name, p->dtype, p->d0 ? p->d1 ? 2 : 1 : 0, shape, NULL);
    for (uint64_t i = 0; i < n; i++) {
        uint16_t h = dspark__f32_to_bf16(f);
        int64_t l = (int64_t)p->value;
        int32_t w = (int32_t)p->value;
        switch (p->dtype) {
        case DSPARK_F32: memcpy(at + 4 * i, &f, 4); break;
        case DSPARK_BF16: memcpy(at + 2 * i, &h, 2); break;
        case DSPARK_I32: memcpy(at + 4 * i, &w, 4); break;
        case DSPARK_I64: memcpy(at + 8 * i, &l, 8); break;
        case DSPARK_F64:
        case DSPARK_F16:
        case DSPARK_F4: break;
        default: at[i] = (unsigned char)p->value;
        }
    }
}

static dspark_status judge(const refusal *r, dspark_error *err)
{
    const dspark__scheme *s;
    dspark__module m;
    dspark__packing p;
    dspark_status st;
    const char *dir = tmpdir_make();

    for (size_t i = 0; i < 7 && r->parts[i].suffix; i++) add_part(&r->parts[i]);
    tensors_open(&t, dir, 1);
    tensors_module(&t, "m", &m);
    memset(err, 0, sizeof *err);
    st = dspark__scheme_detect(&s, &m, &r->rule, r->rows, r->k, err);
    if (st == DSPARK_OK) st = s->validate(&m, &r->rule, r->rows, r->k, &p, err);
    /* without a place for the text, and with nothing of a config, nothing breaks */
    if (dspark__scheme_detect(&s, &m, NULL, r->rows, r->k, NULL) == DSPARK_OK)
        (void)s->validate(&m, NULL, r->rows, r->k, &p, NULL);
    tensors_clear(&t);
    tmpdir_remove(dir);
    return st;
}

static void expect(const refusal *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        dspark_error err;
        const refusal *r = &list[i];
        dspark_status st = judge(r, &err);
        if (st == r->status &&
            (st == DSPARK_OK || (strstr(err.where, r->where) && strstr(err.message, r->text))))
            continue;
        fail_msg("row %zu: %s [%s] %s; want %s [%s] %s", i, dspark_status_name(st), err.where,
                 err.message, dspark_status_name(r->status), r->where ? r->where : "",
                 r->text ? r->text : "");
    }
}

#define EXPECT(list) expect(list, sizeof list / sizeof *list)

#define BAD DSPARK_EMODEL
#define NOT DSPARK_EUNSUPPORTED
#define F8  DSPARK_F8_E4M3
#define E8  DSPARK_F8_E8M0
#define F32 DSPARK_F32
#define BF  DSPARK_BF16
#define U8  DSPARK_U8
#define I8  DSPARK_I8
#define I32 DSPARK_I32
#define I64 DSPARK_I64
#define W8(rows, k) {"weight", F8, rows, k, 0x38}
#define FILE_M "model.safetensors: m."

/* ---- presence -------------------------------------------------------------------------------- */

static void test_presence(void **state)
{
    static const refusal list[] = {
        {8, 64, {W8(8, 64)}, {0}, BAD, FILE_M "weight", "without a scale"},
        {8, 64, {{"weight", I8, 8, 64, 1}}, {0}, BAD, FILE_M "weight", "without a scale"},
        {8, 64, {{"weight", U8, 8, 32, 1}}, {0}, BAD, FILE_M "weight", "without a scale"},
        {8, 64, {{"weight_packed", I32, 8, 8, 1}}, {0}, BAD, FILE_M "weight_packed",
         "without a scale"},
        {8, 64, {{"weight_scale", F32, 1, 0, 1}}, {0}, BAD, FILE_M "weight_scale", "no weight"},
        {8, 64, {{"weight", BF, 8, 64, 1}, {"weight_packed", U8, 8, 32, 1}, {"weight_scale", U8,
         8, 2, 127}}, {0}, BAD, FILE_M "weight_packed", "both weight and"},
        {8, 64, {{"weight", U8, 8, 32, 1}, {"weight_scale", F8, 8, 4, 56}, {"weight_scale_2", F32,
         1, 0, 1}, {"weight_global_scale", F32, 1, 0, 1}}, {0}, BAD, "weight_global_scale",
         "both"},
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 0, 1}, {"weight_scale_inv", F32, 1, 1, 1}},
         {0}, BAD, "weight_scale_inv", "both"},
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 0, 1}, {"scale", E8, 1, 1, 127}}, {0}, BAD,
         FILE_M "scale", "both"},
        {8, 64, {{"weight", BF, 8, 64, 1}, {"weight_scale", F32, 1, 0, 1}}, {0}, BAD, FILE_M
         "weight_scale", "unexpected beside BF16"},
        {8, 64, {{"weight", DSPARK_F64, 8, 64, 1}}, {0}, NOT, FILE_M "weight", "F64"},
        {8, 64, {{"weight", BF, 64, 8, 1}}, {0}, BAD, FILE_M "weight",
         "[64, 8], expected [8, 64]"},
        {8, 64, {{"weight", F32, 8, 63, 1}}, {0}, BAD, FILE_M "weight",
         "[8, 63], expected [8, 64]"},
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 0, 1}, {"weight_g_idx", I32, 64, 0, 0}}, {0},
         BAD, FILE_M "weight_g_idx", "unexpected beside FP8"},
        {8, 64, {{"weight", U8, 8, 32, 1}, {"weight_scale", F8, 8, 4, 56}}, {0}, BAD, FILE_M
         "weight", "without weight_scale_2"},
        {8, 64, {{"weight_packed", U8, 8, 32, 1}, {"weight_scale", F8, 8, 4, 56}}, {0}, BAD,
         FILE_M "weight_packed", "without weight_global_scale"},
        {8, 64, {{"weight_packed", U8, 8, 32, 1}, {"weight_scale", F8, 8, 4, 56},
         {"weight_scale_2", F32, 1, 0, 1}}, {0}, BAD, "weight_packed", "weight_global_scale"},
        /* what is more than codes and scales */
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 0, 1}, {"pre_quant_scale", BF, 64, 0, 1}},
         {0}, NOT, FILE_M "pre_quant_scale", "AWQ"},
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 0, 1}, {"svdquant_lora_a", BF, 4, 64, 1}},
         {0}, NOT, FILE_M "svdquant_lora_a", "low-rank"},
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 0, 1}, {"svdquant_lora_b", BF, 8, 4, 1}},
         {0}, NOT, FILE_M "svdquant_lora_b", "low-rank"},
        {8, 64, {{"weight", BF, 8, 64, 1}, {"input_rotation", BF, 64, 64, 1}}, {0}, NOT, FILE_M
         "input_rotation", "rotation"},
        {8, 64, {{"qweight", I32, 8, 8, 1}, {"scales", BF, 8, 2, 1}}, {0}, NOT, FILE_M "qweight",
         "GPTQ"},
        {8, 64, {{"weight", U8, 4, 64, 1}, {"weight_scale", F32, 8, 1, 1}}, {0}, NOT, FILE_M
         "weight", "AWQ"},
        /* scales of activations and caches: allowed, and numbers */
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 0, 1}, {"input_scale", F32, 0, 0, .5},
         {"k_scale", BF, 1, 0, .06}, {"v_scale", F32, 1, 0, 1}, {"bias", BF, 8, 0, 1}}, {0},
         DSPARK_OK, NULL, NULL},
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 0, 1}, {"input_scale", F32, 1, 0, 0}}, {0},
         BAD, FILE_M "input_scale", "above zero"},
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 0, 1}, {"input_scale", F32, 1, 0, NAN}}, {0},
         BAD, FILE_M "input_scale", "finite"},
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 0, 1}, {"k_scale", I32, 1, 0, 1}}, {0}, BAD,
         FILE_M "k_scale", "dtype I32"},
        {8, 64, {{"weight", BF, 8, 64, 1}, {"k_scale", F32, 1, 0, .06}}, {0}, DSPARK_OK, NULL,
         NULL},
    };
    (void)state;
    EXPECT(list);
}

/* ---- FP8 ------------------------------------------------------------------------------------- */

static void test_fp8(void **state)
{
    static const refusal list[] = {
        {576, 64, {W8(576, 64), {"weight_scale", F32, 5, 0, 1}}, {0}, BAD, FILE_M "weight_scale",
         "[5]"},
        {576, 64, {W8(576, 64), {"weight_scale", F32, 575, 1, 1}}, {0}, BAD, FILE_M
         "weight_scale", "[575, 1]"},
        {576, 64, {W8(64, 576), {"weight_scale", F32, 1, 0, 1}}, {0}, BAD, FILE_M "weight",
         "[64, 576]"},
        {576, 64, {W8(576, 64), {"weight_scale_inv", F32, 4, 1, 1}}, {0}, BAD, FILE_M
         "weight_scale_inv", "need [5, 1]"},
        {576, 64, {W8(576, 64), {"weight_scale_inv", F32, 0, 0, 1}}, {0}, BAD, FILE_M
         "weight_scale_inv", "need [5, 1]"},
        {24, 64, {W8(24, 64), {"weight_scale", F32, 24, 3, 1}}, {0}, BAD, "weight_scale",
         "3 groups do not divide 64"},
        {24, 64, {W8(24, 64), {"weight_scale", F32, 24, 16, 1}}, {0}, NOT, "weight_scale",
         "groups of 4 columns"},
        {24, 64, {W8(24, 64), {"weight_scale", I32, 24, 1, 1}}, {0}, BAD, "weight_scale",
         "dtype I32"},
        {24, 64, {W8(24, 64), {"weight_scale", F32, 1, 0, 0}}, {0}, BAD, "weight_scale",
         "above zero"},
        {24, 64, {W8(24, 64), {"weight_scale", F32, 1, 0, INFINITY}}, {0}, BAD, "weight_scale",
         "finite"},
        {24, 64, {W8(24, 64), {"weight_scale", BF, 24, 1, NAN}}, {0}, BAD, "weight_scale",
         "finite"},
        {24, 64, {W8(24, 64), {"weight_scale", BF, 24, 1, -1}}, {0}, BAD, "weight_scale",
         "not negative"},
        {24, 64, {W8(24, 64), {"weight_scale", BF, 24, 1, 0}}, {0}, DSPARK_OK, NULL, NULL},
        {24, 64, {W8(24, 64), {"scale", F32, 1, 1, 1}}, {0}, BAD, FILE_M "scale", "F8_E8M0"},
        {24, 64, {W8(24, 64), {"scale", E8, 1, 1, 255}}, {0}, BAD, FILE_M "scale", "finite"},
        {24, 64, {W8(24, 64), {"scale", E8, 1, 1, 0}}, {0}, DSPARK_OK, NULL, NULL},
        {24, 64, {W8(24, 64), {"weight_scale", F32, 1, 0, 1}, {"weight_zero_point", I8, 1, 0, 0}},
         {0}, BAD, "weight_zero_point", "unexpected"},
        /* blocks of a size that cannot be */
        {24, 64, {W8(24, 64), {"weight_scale_inv", F32, 1, 1, 1}}, {.method = DSPARK__QUANT_FP8,
         .quantised = 1, .strategy = DSPARK__STRATEGY_BLOCK, .block_rows = 16, .block_cols = 16},
         BAD, "weight_scale_inv", "need [2, 4]"},
        {24, 64, {W8(24, 64), {"weight_scale_inv", F32, 2, 16, 1}}, {.method = DSPARK__QUANT_FP8,
         .quantised = 1, .strategy = DSPARK__STRATEGY_BLOCK, .block_rows = 16, .block_cols = 4},
         NOT, "weight_scale_inv", "blocks of 4 columns"},
    };
    (void)state;
    EXPECT(list);
}

/* ---- MX and NVFP4 ---------------------------------------------------------------------------- */

static void test_fp4(void **state)
{
    static const refusal list[] = {
        {8, 64, {W8(8, 64), {"weight_scale", U8, 8, 2, 255}}, {0}, BAD, "weight_scale", "255"},
        {8, 64, {W8(8, 64), {"weight_scale", U8, 8, 1, 127}}, {0}, BAD, "weight_scale", "[8, 2]"},
        {8, 64, {W8(8, 64), {"weight_scale", U8, 16, 0, 127}}, {0}, NOT, "weight_scale",
         "swizzled"},
        {8, 64, {W8(8, 64), {"weight_scale", E8, 16, 0, 127}}, {0}, NOT, "weight_scale",
         "swizzled"},
        {8, 48, {W8(8, 48), {"weight_scale", U8, 8, 2, 127}}, {0}, NOT, "weight_scale",
         "blocks of 32"},
        {8, 64, {{"weight_packed", U8, 8, 32, 1}, {"weight_scale", U8, 8, 1, 127}}, {0}, BAD,
         "weight_scale", "[8, 2]"},
        {8, 64, {{"weight_packed", U8, 8, 31, 1}, {"weight_scale", U8, 8, 2, 127}}, {0}, BAD,
         FILE_M "weight_packed", "[8, 31], expected [8, 32]"},
        {8, 64, {{"weight", DSPARK_F4, 8, 62, 1}, {"weight_scale", U8, 8, 2, 127}}, {0}, BAD,
         FILE_M "weight", "[8, 62], expected [8, 64]"},
        {8, 64, {{"weight", U8, 8, 64, 1}, {"weight_scale", U8, 8, 2, 127}}, {0}, BAD, FILE_M
         "weight", "[8, 64], expected [8, 32]"},
        {8, 64, {{"weight_packed", U8, 8, 32, 1}, {"weight_scale", E8, 8, 2, 255}}, {0}, BAD,
         "weight_scale", "NaN"},
#define NV(w, s, g) {{"weight_packed", U8, 8, w, 1}, s, {"weight_global_scale", F32, 1, 0, g}}
#define NVS(rows, cols, byte) {"weight_scale", F8, rows, cols, byte}
        {8, 64, NV(32, NVS(8, 4, 0x38), 1), {0}, DSPARK_OK, NULL, NULL},
        {8, 64, NV(32, NVS(8, 4, 0x7f), 1), {0}, BAD, "weight_scale", "NaN"},
        {8, 64, NV(32, NVS(8, 4, 0xff), 1), {0}, BAD, "weight_scale", "NaN"},
        {8, 64, NV(32, NVS(8, 4, 0xb8), 1), {0}, BAD, "weight_scale", "negative"},
        {8, 64, NV(32, NVS(8, 4, 0x80), 1), {0}, BAD, "weight_scale", "negative"},
        {8, 64, NV(32, NVS(8, 3, 0x38), 1), {0}, BAD, "weight_scale", "[8, 4]"},
        {8, 64, NV(32, NVS(128, 4, 0x38), 1), {0}, BAD, "weight_scale", "swizzled"},
        {8, 64, NV(32, NVS(512, 0, 0x38), 1), {0}, NOT, "weight_scale", "swizzled"},
        {8, 64, NV(33, NVS(8, 4, 0x38), 1), {0}, BAD, "weight_packed", "[8, 33]"},
        {8, 40, NV(20, NVS(8, 3, 0x38), 1), {0}, NOT, "weight_scale", "blocks of 16"},
        {8, 64, NV(32, NVS(8, 4, 0x38), 0), {0}, BAD, "weight_global_scale", "above zero"},
        {8, 64, NV(32, NVS(8, 4, 0x38), -1), {0}, BAD, "weight_global_scale", "above zero"},
        {8, 64, NV(32, NVS(8, 4, 0x38), NAN), {0}, BAD, "weight_global_scale", "finite"},
        {8, 64, NV(32, NVS(8, 4, 0x38), 1e-39), {0}, BAD, "weight_global_scale", "one over it"},
        {8, 64, NV(32, NVS(8, 4, 0x38), 3e38), {0}, DSPARK_OK, NULL, NULL},
        {8, 64, {{"weight", U8, 8, 32, 1}, NVS(8, 4, 0x38), {"weight_scale_2", F32, 2, 0, 1}},
         {0}, BAD, "weight_scale_2", "one number"},
        {8, 64, {{"weight", U8, 8, 32, 1}, NVS(8, 4, 0x38), {"weight_scale_2", F32, 0, 0,
         INFINITY}}, {0}, BAD, "weight_scale_2", "finite"},
    };
    (void)state;
    EXPECT(list);
}

/* ---- integers -------------------------------------------------------------------------------- */

#define INT_RULE(bits, sym, ...)                                                                 \
    {.method = DSPARK__QUANT_COMPRESSED_TENSORS, .quantised = 1, .num_bits = bits,               \
     .symmetric = sym, __VA_ARGS__}
#define P4(words) {"weight_packed", I32, 8, words, 0}
#define S(cols) {"weight_scale", BF, 8, cols, 1}
#define SHAPE(n) {"weight_shape", I64, 2, 0, n} /* [n, n] */

static void test_int(void **state)
{
    static const refusal list[] = {
        {8, 8, {P4(1), S(1), SHAPE(8)}, INT_RULE(4, 1, .dense_bits = 1), DSPARK_OK, NULL, NULL},
        {8, 8, {P4(1), S(1), SHAPE(8)}, {0}, BAD, "m", "num_bits"},
        {8, 8, {P4(1), S(1), SHAPE(8)}, INT_RULE(1, 1, .dense_bits = 1), NOT, "m", "2 to 8"},
        {8, 8, {P4(1), S(1), SHAPE(8)}, INT_RULE(9, 1, .dense_bits = 1), NOT, "m", "2 to 8"},
        {8, 8, {P4(1), S(1), SHAPE(8)}, INT_RULE(4, 1, .is_float = 1), BAD, "m", "4-bit float"},
        {8, 8, {P4(2), S(1), SHAPE(8)}, INT_RULE(4, 1, .dense_bits = 1), BAD, "weight_packed",
         "[8, 1]"},
        {8, 8, {P4(1), S(1), SHAPE(7)}, INT_RULE(4, 1, .dense_bits = 1), BAD, "weight_shape",
         "[7, 7]"},
        {8, 8, {P4(1), S(1), {"weight_shape", I32, 2, 0, 8}}, INT_RULE(4, 1, .dense_bits = 1),
         DSPARK_OK, NULL, NULL},
        {8, 8, {P4(1), S(1), {"weight_shape", I64, 3, 0, 8}}, INT_RULE(4, 1, .dense_bits = 1),
         BAD, "weight_shape", "I64 [2]"},
        {8, 64, {P4(8), S(3)}, INT_RULE(4, 1, .dense_bits = 1), BAD, "weight_scale", "3 groups"},
        {8, 64, {P4(8), S(16)}, INT_RULE(4, 1, .dense_bits = 1), NOT, "weight_scale",
         "groups of 4"},
        {8, 64, {P4(8), {"weight_scale", BF, 7, 2, 1}}, INT_RULE(4, 1, .dense_bits = 1), BAD,
         "weight_scale", "[7, 2]"},
        {8, 64, {P4(8), {"weight_scale", BF, 8, 2, NAN}}, INT_RULE(4, 1, .dense_bits = 1), BAD,
         "weight_scale", "finite"},
        /* 3 bits: 64 codes are 6 words or 7; 40 are 4 in both layouts */
        {8, 64, {P4(6), S(1)}, INT_RULE(3, 1, .dense_bits = 0), DSPARK_OK, NULL, NULL},
        {8, 64, {P4(7), S(1)}, INT_RULE(3, 1, .dense_bits = 0), DSPARK_OK, NULL, NULL},
        {8, 64, {P4(8), S(1)}, INT_RULE(3, 1, .dense_bits = 0), BAD, "weight_packed", "[8, 6]"},
        {8, 40, {P4(4), S(1)}, INT_RULE(3, 1, .dense_bits = 0), NOT, "weight_packed", "layouts"},
        {8, 40, {P4(4), S(1)}, INT_RULE(3, 1, .dense_bits = -1), DSPARK_OK, NULL, NULL},
        /* zero points */
        {8, 8, {P4(1), S(1), {"weight_zero_point", I32, 1, 1, 0}}, INT_RULE(4, 0, .dense_bits =
         1), DSPARK_OK, NULL, NULL},
        {8, 8, {P4(1), S(1), {"weight_zero_point", I32, 8, 1, 0}}, INT_RULE(4, 0, .dense_bits =
         1), BAD, "weight_zero_point", "[1, 1]"},
        {8, 8, {P4(1), S(1), {"weight_zero_point", I8, 1, 1, 0}}, INT_RULE(4, 0, .dense_bits = 1),
         BAD, "weight_zero_point", "dtype I8"},
        {8, 8, {P4(1), S(1), {"weight_zero_point", I32, 1, 1, 0}}, INT_RULE(4, 1, .dense_bits =
         1), BAD, "m", "symmetric: true"},
        {8, 8, {P4(1), S(1)}, INT_RULE(4, 0, .dense_bits = 1), BAD, "m", "symmetric: false"},
        {8, 8, {{"weight", I8, 8, 8, 1}, S(1), {"weight_zero_point", I8, 1, 0, 0}}, {0}, BAD,
         "weight_zero_point", "[8, 1]"},
        {8, 8, {{"weight", I8, 8, 8, 1}, S(1), {"weight_shape", I64, 2, 0, 8}}, {0}, BAD,
         "weight_shape", "unexpected"},
        {8, 8, {{"weight", I8, 8, 7, 1}, S(1)}, {0}, BAD, FILE_M "weight", "[8, 7]"},
        {8, 8, {{"weight", I8, 8, 8, 1}, {"weight_scale", BF, 4, 0, 1}}, {0}, BAD, "weight_scale",
         "[4]"},
        /* g_idx: all of one group, of a group that is not, too short, of another dtype */
        {8, 64, {P4(8), S(2), {"weight_g_idx", I32, 64, 0, 0}}, INT_RULE(4, 1, .act_order = 1),
         BAD, "weight_g_idx", "group 0 has 64 columns"},
        {8, 64, {P4(8), S(2), {"weight_g_idx", I32, 64, 0, 2}}, INT_RULE(4, 1, .act_order = 1),
         BAD, "weight_g_idx", "column 0 is of group 2"},
        {8, 64, {P4(8), S(2), {"weight_g_idx", I32, 64, 0, -2}}, INT_RULE(4, 1, .act_order = 1),
         BAD, "weight_g_idx", "column 0 is of group -2, expected one of 2 groups"},
        {8, 64, {P4(8), S(2), {"weight_g_idx", I32, 63, 0, 0}}, INT_RULE(4, 1, .act_order = 1),
         BAD, "weight_g_idx", "expected I32 [64]"},
        {8, 64, {P4(8), S(2), {"weight_g_idx", I64, 64, 0, 0}}, INT_RULE(4, 1, .act_order = 1),
         BAD, "weight_g_idx", "I64"},
        {8, 64, {P4(8), S(2), {"weight_g_idx", I32, 64, 0, -1}}, INT_RULE(4, 1, .act_order = 1),
         DSPARK_OK, NULL, NULL},
        {8, 64, {P4(8), S(2)}, INT_RULE(4, 1, .act_order = 1), BAD, "m", "no weight_g_idx"},
    };
    (void)state;
    EXPECT(list);
}

/* A g_idx that reorders although the config says nothing of it, and one that mixes -1 with groups.
 */
static void test_g_idx_against_config(void **state)
{
    for (int v = 0; v < 3; v++) {
        static const part parts[] = {P4(8), S(2), {"weight_g_idx", I32, 64, 0, 0}};
        refusal r = {8, 64, {{0}}, INT_RULE(4, 1, .act_order = v == 2), BAD, "", ""};
        const dspark__scheme *s;
        dspark__module m;
        dspark__packing p;
        dspark_error err;
        int32_t *g;

        (void)state;
        for (int i = 0; i < 3; i++) add_part(&parts[i]);
        g = (int32_t *)(void *)t.list[2].data;
        for (int i = 0; i < 64; i++) g[i] = i % 2;
        if (v == 1) g[5] = -1;
        tensors_open(&t, tmpdir_make(), 1);
        tensors_module(&t, "m", &m);
        check(dspark__scheme_detect(&s, &m, &r.rule, 8, 64, &err), DSPARK_OK, &err);
        check(s->validate(&m, &r.rule, 8, 64, &p, &err), v == 2 ? DSPARK_OK : BAD, &err);
        if (v < 2) assert_non_null(strstr(err.message, v ? "group -1" : "actorder"));
        tensors_clear(&t);
    }
}

/* ---- the config ------------------------------------------------------------------------------ */

#define CT(...) {.method = DSPARK__QUANT_COMPRESSED_TENSORS, __VA_ARGS__}
#define FP8_T {W8(8, 64), {"weight_scale", F32, 1, 0, 1}}
#define E5_T {{"weight", DSPARK_F8_E5M2, 8, 64, 0x38}, {"weight_scale", F32, 1, 0, 1}}
#define FNUZ_T {{"weight", DSPARK_F8_E4M3FNUZ, 8, 64, 0x38}, {"weight_scale", F32, 1, 0, 1}}
#define SAYS(m, f) {.method = DSPARK__QUANT_##m, .quantised = 1, .num_bits = 8, .is_float = 1, .format = f}
#define FP8_C {W8(8, 64), {"weight_scale", F32, 8, 1, 1}}
#define FP8_G {W8(8, 64), {"weight_scale", F32, 8, 2, 1}}
#define NVFP4_ NV(32, NVS(8, 4, 0x38), 1)
#define MXFP4_ {{"weight_packed", U8, 8, 32, 1}, {"weight_scale", U8, 8, 2, 127}}

static void test_config(void **state)
{
    static const refusal list[] = {
        {8, 64, {{"weight", BF, 8, 64, 1}}, CT(.quantised = 1, .num_bits = 8, .is_float = 1),
         DSPARK_OK, NULL, NULL},
        {8, 64, {{"weight", BF, 8, 64, 1}}, CT(.quantised = -1), DSPARK_OK, NULL, NULL},
        {8, 64, {{"weight", BF, 8, 64, 1}}, CT(.quantised = -1, .ignored_by_parent = 1),
         DSPARK_OK, NULL, NULL},
        {8, 64, {{"weight", F32, 8, 64, 1}}, CT(.quantised = 1, .num_bits = 8), DSPARK_OK, NULL,
         NULL},
        /* ModelOpt's exclusions may still be quantised, by the model that it started from */
        {8, 64, FP8_T, {.method = DSPARK__QUANT_MODELOPT, .quantised = -1}, DSPARK_OK, NULL, NULL},
        {8, 64, FP8_T, CT(.quantised = -1), BAD, "m", "excludes"},
        {8, 64, NVFP4_, CT(.quantised = -1), BAD, "m", "excludes"},
        {8, 64, FP8_T, CT(.quantised = -1, .ignored_by_parent = 1, .num_bits = 8, .is_float = 1),
         DSPARK_OK, NULL, NULL},
        {8, 64, FP8_T, CT(.quantised = -1, .ignored_by_parent = 1, .num_bits = 4, .is_float = 1),
         BAD, "m", "4-bit float"},
        {8, 64, FP8_T, CT(.quantised = 0), DSPARK_OK, NULL, NULL},
        {8, 64, FP8_T, CT(.quantised = 1, .num_bits = 8, .is_float = 1, .strategy =
         DSPARK__STRATEGY_TENSOR, .format = "Float-Quantized"), DSPARK_OK, NULL, NULL},
        {8, 64, FP8_T, CT(.quantised = 1, .num_bits = 8, .is_float = 0), BAD, "m", "8-bit int"},
        {8, 64, FP8_T, CT(.quantised = 1, .num_bits = 8, .is_float = 1, .strategy =
         DSPARK__STRATEGY_CHANNEL), BAD, "m", "\"channel\""},
        /* ModelOpt's scale of a weight that is one block has no dimensions; of two blocks it is wrong */
        {8, 64, FP8_T, CT(.quantised = 1, .num_bits = 8, .is_float = 1, .strategy =
         DSPARK__STRATEGY_BLOCK, .block_rows = 128, .block_cols = 128), DSPARK_OK, NULL, NULL},
        {8, 64, FP8_T, CT(.quantised = 1, .num_bits = 8, .is_float = 1, .strategy =
         DSPARK__STRATEGY_BLOCK, .block_rows = 8, .block_cols = 32), BAD, "m", "\"block\""},
        /* blocks of another size than the config's are not called by another kind's name */
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 1, 1}}, CT(.quantised = 1, .num_bits = 8, .is_float = 1,
         .strategy = DSPARK__STRATEGY_BLOCK, .block_rows = 8, .block_cols = 32), BAD, "weight_scale",
         "blocks of 8x32 need [1, 2]"},
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 3, 1}}, CT(.quantised = 1, .num_bits = 8, .is_float = 1,
         .strategy = DSPARK__STRATEGY_BLOCK, .block_rows = 8, .block_cols = 32), BAD, "weight_scale",
         "blocks of 8x32 need [1, 2]"},
        {8, 64, {W8(8, 64), {"weight_scale", F32, 1, 1, 1}}, CT(.quantised = 1, .num_bits = 8, .is_float = 1,
         .strategy = DSPARK__STRATEGY_CHANNEL), BAD, "m", "of one block, the config's strategy is \"channel\""},
        {8, 64, FP8_C, CT(.quantised = 1, .num_bits = 8, .is_float = 1, .strategy =
         DSPARK__STRATEGY_TENSOR), BAD, "m", "\"tensor\""},
        {8, 64, FP8_C, CT(.quantised = 1, .num_bits = 8, .is_float = 1, .group_size = 64,
         .strategy = DSPARK__STRATEGY_GROUP), DSPARK_OK, NULL, NULL},
        {8, 64, FP8_C, CT(.quantised = 1, .num_bits = 8, .is_float = 1, .group_size = 32,
         .strategy = DSPARK__STRATEGY_GROUP), BAD, "m", "\"group\""},
        {8, 64, FP8_G, CT(.quantised = 1, .num_bits = 8, .is_float = 1, .group_size = 32,
         .strategy = DSPARK__STRATEGY_GROUP), DSPARK_OK, NULL, NULL},
        {8, 64, FP8_G, CT(.quantised = 1, .num_bits = 8, .is_float = 1, .group_size = 64,
         .strategy = DSPARK__STRATEGY_GROUP), BAD, "m", "group_size is 64"},
        {8, 64, FP8_G, CT(.quantised = 1, .num_bits = 8, .is_float = 1, .group_size = 32,
         .strategy = DSPARK__STRATEGY_BLOCK), BAD, "m", "\"block\""},
        {8, 64, FP8_T, CT(.quantised = 1, .num_bits = 8, .is_float = 1, .format =
         "int-quantized"), BAD, "m", "int-quantized"},
        /* which numbers the codes are, where the config says it */
        {8, 64, E5_T, SAYS(FP8, "fp8_e4m3"), BAD, "m", "F8_E5M2 codes, the config says fp8_e4m3"},
        {8, 64, FP8_T, SAYS(FP8, "fp8_e5m2"), BAD, "m", "F8_E4M3 codes, the config says fp8_e5m2"},
        {8, 64, E5_T, SAYS(FP8, "fp8_e5m2"), DSPARK_OK, NULL, NULL},
        {8, 64, E5_T, SAYS(FP8, "fp8"), DSPARK_OK, NULL, NULL},
        {8, 64, FNUZ_T, SAYS(FP8, "fp8_e4m3"), DSPARK_OK, NULL, NULL},
        {8, 64, E5_T, SAYS(QUARK, "fp8_e4m3"), BAD, "m", "F8_E5M2 codes, the config says fp8_e4m3"},
        {8, 64, FNUZ_T, SAYS(QUARK, "fp8_e4m3"), BAD, "m", "F8_E4M3FNUZ codes"},
        {8, 64, FP8_T, SAYS(QUARK, "fp8_e4m3fnuz"), BAD, "m", "the config says fp8_e4m3fnuz"},
        {8, 64, FNUZ_T, SAYS(QUARK, "fp8_e4m3fnuz"), DSPARK_OK, NULL, NULL},
        {8, 64, E5_T, {.method = DSPARK__QUANT_QUARK, .quantised = 0, .format = "fp8_e4m3"}, DSPARK_OK, NULL,
         NULL},
        {8, 64, NVFP4_, CT(.quantised = 1, .num_bits = 4, .is_float = 1, .group_size = 16,
         .strategy = DSPARK__STRATEGY_TENSOR_GROUP, .format = "nvfp4-pack-quantized"), DSPARK_OK,
         NULL, NULL},
        {8, 64, NVFP4_, CT(.quantised = 1, .num_bits = 4, .is_float = 1, .group_size = 32), BAD,
         "m", "group_size is 32"},
        {8, 64, NVFP4_, CT(.quantised = 1, .num_bits = 4, .is_float = 1, .format =
         "mxfp4-pack-quantized"), BAD, "m", "mxfp4-pack-quantized"},
        {8, 64, MXFP4_, CT(.quantised = 1, .num_bits = 4, .is_float = 1, .group_size = 16), BAD,
         "m", "group_size is 16"},
        {8, 64, MXFP4_, CT(.quantised = 1, .num_bits = 8, .is_float = 1), BAD, "m",
         "8-bit float"},
        {8, 64, {P4(8), S(2)}, INT_RULE(4, 1, .group_size = 64, .strategy =
         DSPARK__STRATEGY_GROUP), BAD, "m", "group_size is 64"},
        {8, 64, {P4(8), S(1)}, INT_RULE(4, 1, .group_size = 128, .strategy =
         DSPARK__STRATEGY_GROUP), DSPARK_OK, NULL, NULL},
        {8, 64, {P4(8), S(2)}, INT_RULE(4, 1, .strategy = DSPARK__STRATEGY_CHANNEL), BAD, "m",
         "\"channel\""},
        {8, 64, {P4(8), S(2)}, INT_RULE(4, 1, .format = "int-quantized"), BAD, "m",
         "pack-quantized"},
    };
    (void)state;
    EXPECT(list);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, examine_setup, examine_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_presence),
        TEST(test_fp8),
        TEST(test_fp4),
        TEST(test_int),
        TEST(test_g_idx_against_config),
        TEST(test_config),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
