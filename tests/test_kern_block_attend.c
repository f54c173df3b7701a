/* The kernels of attention over pieces of 240 entries: every level of this machine against ref bit
 * for bit, with guard pages around what is touched; ref against double precision; and all of them
 * together with the matrix product, where neither padding nor grouping of rows may be seen. */
#include "base/expf.h"
#include "support/guard.h"
#include "support/values.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { PIECE = DSPARK__PIECE, PANEL = DSPARK__PANEL, MOST_ROWS = 17 };

static uint32_t bits(float f)
{
    return dspark__f32_bits(f);
}

static void assert_pattern(const unsigned char *from, const unsigned char *end)
{
    for (; from < end; from++) assert_int_equal(*from, 0xa5);
}

/* ---- one piece of softmax ---- */

typedef enum score_class {
    SCORES_NORMAL,
    SCORES_WIDE,  /* differences beyond what exp can tell from 0 */
    SCORES_ZERO,  /* +0 and -0 */
    SCORES_MINUS, /* nothing but -infinity */
    SCORES_SOME_MINUS,
    SCORES_PLUS, /* one +infinity */
    SCORES_NAN,  /* one NaN */
    SCORES_ALL_NAN,
    SCORES_N_CLASSES
} score_class;

/* State and results of up to MOST_ROWS rows, each array ending at a forbidden page. */
typedef struct softmax_case {
    guard scores, n_valid, m, l, a, p;
    size_t n_rows;
} softmax_case;

static void *end_of(const guard *g, size_t bytes)
{
    return g->p + g->n - bytes;
}

static softmax_case make_case(void)
{
    softmax_case c = {0};
    c.scores = guard_end(sizeof(float) * PIECE * MOST_ROWS);
    c.n_valid = guard_end(sizeof(uint32_t) * MOST_ROWS);
    c.m = guard_end(sizeof(float) * MOST_ROWS);
    c.l = guard_end(sizeof(float) * MOST_ROWS);
    c.a = guard_end(sizeof(float) * MOST_ROWS);
    c.p = guard_end(sizeof(uint16_t) * PIECE * MOST_ROWS);
    return c;
}

static void free_case(softmax_case *c)
{
    guard_free(&c->scores);
    guard_free(&c->n_valid);
    guard_free(&c->m);
    guard_free(&c->l);
    guard_free(&c->a);
    guard_free(&c->p);
}

/* The piece over `c`; panels behind the last valid entry do not exist. */
static dspark__softmax_piece piece_of(const softmax_case *c, float scale, size_t n_panels)
{
    const size_t n = c->n_rows;
    return (dspark__softmax_piece){
        .scores = end_of(&c->scores, sizeof(float) * n_panels * PANEL * n),
        .n_rows = n,
        .n_valid = end_of(&c->n_valid, sizeof(uint32_t) * n),
        .scale = scale,
        .m = end_of(&c->m, sizeof(float) * n),
        .l = end_of(&c->l, sizeof(float) * n),
        .a = end_of(&c->a, sizeof(float) * n),
        .p = end_of(&c->p, sizeof(uint16_t) * n * PIECE),
    };
}

static float *score_at(const dspark__softmax_piece *s, size_t i, size_t j)
{
    return (float *)s->scores + (j / PANEL * s->n_rows + i) * PANEL + j % PANEL;
}

static void fill_scores(const dspark__softmax_piece *s, size_t i, size_t n, score_class c)
{
    for (size_t j = 0; j < n; j++) {
        float v = values_f32(VALUES_NORMAL);
        if (c == SCORES_WIDE) v *= 64.0f;
        if (c == SCORES_ZERO) v = values_random() % 2 ? 0.0f : -0.0f;
        if (c == SCORES_MINUS || (c == SCORES_SOME_MINUS && values_random() % 2)) v = -INFINITY;
        if (c == SCORES_ALL_NAN) v = dspark__f32_from_bits(0xff800001u + (uint32_t)j);
        *score_at(s, i, j) = v;
    }
    if (n == 0) return;
    size_t at = values_random() % n;
    if (c == SCORES_PLUS) *score_at(s, i, at) = INFINITY;
    if (c == SCORES_NAN) *score_at(s, i, at) = dspark__f32_from_bits(0x7fc00001u);
}

/* ref's results of one row against double precision. m and l before: m0, l0. */
static void check_row(const dspark__softmax_piece *s, size_t i, float m0, float l0)
{
    const size_t n = s->n_valid[i];
    double most = m0, sum = 0;
    for (size_t j = 0; j < n; j++) {
        double v = *score_at(s, i, j) * s->scale; /* an fp32 product */
        if (v > most) most = v;
    }
    assert_true(s->m[i] == (float)most);
    double a = exp(m0 - most); /* 0 for -infinity */
    assert_true(fabs(s->a[i] - a) <= a * 0x1p-16 + FLT_MIN);
    for (size_t j = 0; j < PIECE; j++) {
        double p = j < n ? exp(*score_at(s, i, j) * s->scale - most) : 0;
        double got = values_f32_at(s->p, i * PIECE + j);
        assert_true(fabs(got - p) <= p * (0x1p-8 + 0x1p-15) + FLT_MIN);
        if (j >= n) assert_int_equal(values_at(s->p, i * PIECE + j), 0);
        sum += p;
    }
    double l = l0 * a + sum;
    assert_true(fabs(s->l[i] - l) <= l * 0x1p-15);
}

static void test_softmax(void **state)
{
    (void)state;
    static const size_t ROWS[] = {0, 1, 2, 3, 7, MOST_ROWS};
    static const uint32_t VALID[] = {0,  1,  2,  7,  8,  9,   15,  16, 17,
                                     47, 48, 49, 95, 97, 191, 239, 240};
    static const float SCALES[] = {1.0f, 0.0721687824f, -1.0f, 3e-39f};
    const float NANS_AND_PLUS[] = {NAN, dspark__f32_from_bits(0xff812345u), INFINITY};
    enum { N_VALID = sizeof VALID / sizeof VALID[0], ROUNDS = 400 };
    softmax_case c = make_case();
    int kinds[SCORES_N_CLASSES] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t valid[MOST_ROWS], most = 0;
        float m0[MOST_ROWS], l0[MOST_ROWS];
        score_class class[MOST_ROWS];
        c.n_rows = ROWS[round % 6];
        for (size_t i = 0; i < c.n_rows; i++) {
            valid[i] = VALID[values_random() % N_VALID];
            if (round % 7 == 0) valid[i] = PIECE;
            if (valid[i] > most) most = valid[i];
            class[i] = (score_class)(values_random() % SCORES_N_CLASSES);
            if (round % 2 == 0) class[i] = (score_class)(values_random() % 2);
            m0[i] = round % 3 == 0 ? -INFINITY : values_f32(VALUES_NORMAL);
            l0[i] = round % 3 == 0 ? 0 : 1 + fabsf(values_f32(VALUES_NORMAL));
            if (values_random() % 32 == 0) m0[i] = NANS_AND_PLUS[values_random() % 3];
            if (values_random() % 32 == 0) l0[i] = dspark__f32_from_bits(0xff812345u);
            kinds[class[i]]++;
        }
        float scale = SCALES[values_random() % 4];
        dspark__softmax_piece s = piece_of(&c, scale, (most + PANEL - 1) / PANEL);
        memset(c.scores.p, 0xff, c.scores.n); /* NaN where no entry is */
        memcpy((void *)s.n_valid, valid, sizeof(uint32_t) * c.n_rows);
        for (size_t i = 0; i < c.n_rows; i++) fill_scores(&s, i, valid[i], class[i]);
        static uint16_t p[MOST_ROWS * PIECE];
        float m[MOST_ROWS], l[MOST_ROWS], a[MOST_ROWS];
        for (VALUES_LEVELS(isa)) {
            const size_t bytes = sizeof(float) * c.n_rows;
            memset(c.p.p, 0xa5, c.p.n);
            memset(c.a.p, 0xa5, c.a.n);
            memcpy(s.m, m0, bytes);
            memcpy(s.l, l0, bytes);
            values_level(isa).softmax_piece(&s);
            if (isa == DSPARK_ISA_REF) {
                memcpy(p, s.p, sizeof(uint16_t) * c.n_rows * PIECE);
                memcpy(m, s.m, bytes);
                memcpy(l, s.l, bytes);
                memcpy(a, s.a, bytes);
            }
            assert_memory_equal(s.p, p, sizeof(uint16_t) * c.n_rows * PIECE);
            assert_memory_equal(s.m, m, bytes);
            assert_memory_equal(s.l, l, bytes);
            assert_memory_equal(s.a, a, bytes);
            assert_pattern(c.p.p, (const unsigned char *)s.p);
            assert_pattern(c.a.p, (const unsigned char *)s.a);
        }
        memcpy(s.m, m, sizeof(float) * c.n_rows);
        for (size_t i = 0; i < c.n_rows; i++) {
            if (valid[i] == 0) { /* nothing happens */
                assert_int_equal(bits(m[i]), bits(m0[i]));
                assert_int_equal(bits(l[i]), bits(l0[i]));
                assert_true(a[i] == 1);
                for (size_t j = 0; j < PIECE; j++) assert_int_equal(p[i * PIECE + j], 0);
                continue;
            }
            if (!(m0[i] < INFINITY) || isnan(l0[i])) continue;
            int any_finite = isfinite(m0[i]), bad = 0;
            for (size_t j = 0; j < valid[i]; j++) {
                float v = *score_at(&s, i, j) * scale;
                if (isfinite(v))
                    any_finite = 1;
                else if (!(v < 0))
                    bad = 1;
            }
            if (bad || !any_finite)
                assert_int_equal(bits(l[i]), 0x7fc00000); /* it shows */
            else
                check_row(&s, i, m0[i], l0[i]);
        }
    }
    for (int k = 0; k < SCORES_N_CLASSES; k++) assert_true(kinds[k] > 50);
    free_case(&c);
}

/* E on every level, to the last bit of fp32: from m = 0 and l = 0 a score x <= 0 gives l = E(x). */
static void test_exp_of_levels(void **state)
{
    (void)state;
    enum { ROWS = 512 };
    _Alignas(64) static float scores[ROWS * PANEL];
    static float m[ROWS], l[ROWS], a[ROWS];
    static uint32_t one[ROWS];
    static uint16_t p[ROWS * PIECE];
    for (size_t i = 0; i < ROWS; i++) one[i] = 1;
    for (uint64_t u = 0x80000000u; u < 0xff800010u; u += ROWS * 40009ull) {
        for (VALUES_LEVELS(isa)) {
            dspark__softmax_piece s = {.scores = scores,
                                       .n_rows = ROWS,
                                       .n_valid = one,
                                       .scale = 1,
                                       .m = m,
                                       .l = l,
                                       .a = a,
                                       .p = p};
            for (size_t i = 0; i < ROWS; i++) {
                scores[i * PANEL] = dspark__f32_from_bits((uint32_t)(u + i * 40009));
                m[i] = l[i] = 0;
            }
            values_level(isa).softmax_piece(&s);
            for (size_t i = 0; i < ROWS; i++)
                assert_int_equal(bits(l[i]), bits(dspark__exp_f32(scores[i * PANEL])));
        }
    }
    /* and the few of its corners */
    static const float CORNERS[] = {-0.0f,           0.0f,       DSPARK__EXP_LEAST,
                                    -0x1.5d58a0p+6f, -INFINITY,  -FLT_MAX,
                                    -FLT_MIN,        -0x1p-149f, -87.0f};
    for (size_t k = 0; k < sizeof CORNERS / sizeof CORNERS[0]; k++) {
        for (VALUES_LEVELS(isa)) {
            dspark__softmax_piece s = {.scores = scores,
                                       .n_rows = 1,
                                       .n_valid = one,
                                       .scale = 1,
                                       .m = m,
                                       .l = l,
                                       .a = a,
                                       .p = p};
            scores[0] = CORNERS[k];
            m[0] = l[0] = 0;
            values_level(isa).softmax_piece(&s);
            assert_int_equal(bits(l[0]), bits(dspark__exp_f32(CORNERS[k])));
            assert_int_equal(bits(m[0]), 0);
            assert_true(a[0] == 1);
        }
    }
}

/* The sum has 16 lanes, entry j in lane j % 16, merged as defined. */
static void test_softmax_sum(void **state)
{
    (void)state;
    _Alignas(64) static float scores[5 * PANEL];
    for (int round = 0; round < 50; round++) {
        float lane[16] = {0};
        uint32_t n = 1 + (uint32_t)(values_random() % PIECE);
        for (size_t j = 0; j < PIECE; j++) scores[j] = -fabsf(values_f32(VALUES_NORMAL)) * 0.1f;
        for (size_t j = 0; j < n; j++) lane[j % 16] += dspark__exp_f32(scores[j]);
        for (size_t w = 8; w > 0; w /= 2)
            for (size_t j = 0; j < w; j++) lane[j] += lane[j + w];
        for (VALUES_LEVELS(isa)) {
            float m = 0, l = 0, a;
            uint16_t p[PIECE];
            dspark__softmax_piece s = {.scores = scores,
                                       .n_rows = 1,
                                       .n_valid = &n,
                                       .scale = 1,
                                       .m = &m,
                                       .l = &l,
                                       .a = &a,
                                       .p = p};
            values_level(isa).softmax_piece(&s);
            assert_int_equal(bits(l), bits(lane[0]));
        }
    }
    for (VALUES_LEVELS(isa)) { /* the old sum comes in by one fused multiply-add */
        float m = 0, l = 0.7f, a;
        uint16_t p[PIECE];
        scores[0] = 2.0f;
        dspark__softmax_piece s = {.scores = scores,
                                   .n_rows = 1,
                                   .n_valid = &(uint32_t){1},
                                   .scale = 1,
                                   .m = &m,
                                   .l = &l,
                                   .a = &a,
                                   .p = p};
        values_level(isa).softmax_piece(&s);
        assert_int_equal(bits(l), bits(fmaf(0.7f, dspark__exp_f32(-2.0f), 1.0f)));
        assert_true(m == 2 && a == dspark__exp_f32(-2.0f));
    }
}

/* ---- the sums before and after ---- */

static void test_scale_rows(void **state)
{
    (void)state;
    static const float FACTORS[] = {0, 1, 0.5f, 0.999f, 1e-30f, 0x1p-100f, 3, INFINITY, NAN, -1};
    enum { N_FACTORS = sizeof FACTORS / sizeof FACTORS[0], MOST = 3 * MOST_ROWS * PANEL };
    static float start[MOST], want[MOST];
    guard acc = guard_end(sizeof start), a = guard_end(sizeof(float) * MOST_ROWS);
    for (size_t n_panels = 0; n_panels <= 3; n_panels++) {
        for (size_t n_rows = 0; n_rows <= MOST_ROWS; n_rows++) {
            size_t n = n_panels * n_rows * PANEL;
            float *acc_at = end_of(&acc, sizeof(float) * n),
                  *a_at = end_of(&a, sizeof(float) * n_rows);
            for (size_t i = 0; i < n_rows; i++) a_at[i] = FACTORS[values_random() % N_FACTORS];
            for (size_t i = 0; i < n; i++) {
                start[i] = values_f32((value_class)(i / 7 % VALUES_N_CLASSES));
                if (i % 11 == 0) start[i] = dspark__f32_from_bits(bits(start[i]) & 0x81ffffffu);
                float v = start[i], by = a_at[i / PANEL % n_rows];
                want[i] = v;
                if (by == 1) continue;
                v *= by;
                want[i] = fabsf(v) < FLT_MIN ? copysignf(0, v) : v;
            }
            for (VALUES_LEVELS(isa)) {
                memset(acc.p, 0xa5, acc.n);
                memcpy(acc_at, start, sizeof(float) * n);
                values_level(isa).scale_rows(acc_at, a_at, n_panels, n_rows);
                assert_true(values_same_floats(acc_at, want, n));
                for (size_t i = 0; i < n; i++) /* not touched at all: NaN payloads too */
                    if (a_at[i / PANEL % n_rows] == 1)
                        assert_int_equal(bits(acc_at[i]), bits(start[i]));
                assert_pattern(acc.p, (const unsigned char *)acc_at);
            }
        }
    }
    guard_free(&acc);
    guard_free(&a);
}

static void test_attend_finish(void **state)
{
    (void)state;
    static const size_t OUTS[] = {0, 1, 5, 8, 15, 16, 17, 47, 48, 49, 96, 97, 512};
    enum { MOST_PANELS = 11, ROWS = 5 };
    guard acc = guard_end(sizeof(float) * MOST_PANELS * ROWS * PANEL),
          l = guard_end(sizeof(float) * ROWS);
    guard out = guard_end(2 * ROWS * (512 + 3) + 4);
    for (size_t o = 0; o < sizeof OUTS / sizeof OUTS[0]; o++) {
        for (size_t n_rows = 0; n_rows <= ROWS; n_rows++) {
            const size_t n_out = OUTS[o], n_panels = (n_out + PANEL - 1) / PANEL;
            const size_t stride = n_out + n_rows % 3;
            const size_t bytes = n_rows == 0 ? 0 : 2 * ((n_rows - 1) * stride + n_out);
            float *acc_at = end_of(&acc, sizeof(float) * n_panels * n_rows * PANEL);
            float *l_at = end_of(&l, sizeof(float) * n_rows);
            unsigned char *out_at = (unsigned char *)end_of(&out, bytes) - o % 4;
            for (size_t i = 0; i < n_panels * n_rows * PANEL; i++)
                acc_at[i] = values_f32((value_class)(values_random() % VALUES_N_CLASSES));
            for (size_t i = 0; i < n_rows; i++) l_at[i] = fabsf(values_f32(VALUES_NORMAL));
            if (n_rows > 2) l_at[1] = NAN;
            if (n_out > 0 && n_rows > 0) acc_at[0] = -0.0f;
            for (VALUES_LEVELS(isa)) {
                memset(out.p, 0xa5, out.n);
                values_level(isa).attend_finish((uint16_t *)(void *)out_at, stride, acc_at, l_at,
                                                n_rows, n_out);
                for (size_t i = 0; i < n_rows; i++) {
                    for (size_t j = 0; j < stride && (j < n_out || i + 1 < n_rows); j++) {
                        uint16_t want = 0xa5a5;
                        if (j < n_out) {
                            float v =
                                acc_at[(j / PANEL * n_rows + i) * PANEL + j % PANEL] / l_at[i];
                            want = dspark__f32_to_bf16(v == 0 ? 0 : v);
                        }
                        assert_int_equal(values_at(out_at, i * stride + j), want);
                    }
                }
                assert_pattern(out.p, out_at);
                assert_pattern(out_at + bytes, out.p + out.n);
            }
        }
    }
    guard_free(&acc);
    guard_free(&l);
    guard_free(&out);
}

/* ---- packing ---- */

static void check_pack(size_t n_latent, size_t n_rope, size_t n_entries)
{
    const size_t n_values = n_latent + n_rope, n_pairs = (n_values + 1) / 2;
    const size_t n_panels = (n_latent + PANEL - 1) / PANEL;
    const size_t k_bytes = 2 * dspark__k_panels_elements(n_latent, n_rope);
    const size_t v_bytes = 2 * dspark__v_panels_elements(n_latent);
    assert_int_equal(k_bytes, 5 * n_pairs * 192);
    assert_int_equal(v_bytes, n_panels * 120 * 192);
    guard rows = guard_end(2 * n_values * (PIECE + 1) + 1), k = guard_end(k_bytes),
          v = guard_end(v_bytes);
    const void **entries = malloc(sizeof *entries * PIECE);
    assert_non_null(entries);
    values_fill(rows.p, rows.n / 2, VALUES_SPECIAL);
    for (size_t j = 0; j < n_entries; j++) { /* any order and alignment; some end at the guard */
        size_t at = values_random() % (rows.n - 2 * n_values + 1);
        entries[j] = rows.p + (values_random() % 8 == 0 ? rows.n - 2 * n_values : at);
    }
    for (VALUES_LEVELS(isa)) {
        dspark__kern kern = values_level(isa);
        for (int which = 0; which < 3; which++) { /* both, K alone, V alone */
            memset(k.p, 0xa5, k.n);
            memset(v.p, 0xa5, v.n);
            dspark__pack_entries p = {entries,
                                      n_entries,
                                      n_latent,
                                      n_rope,
                                      which == 2 ? NULL : (uint16_t *)(void *)k.p,
                                      which == 1 ? NULL : (uint16_t *)(void *)v.p};
            kern.pack_entries(&p);
            if (which == 2) assert_pattern(k.p, k.p + k.n);
            if (which == 1) assert_pattern(v.p, v.p + v.n);
            for (size_t j = 0; j < PIECE; j++) {
                for (size_t e = 0; which != 2 && e < 2 * n_pairs; e++) {
                    size_t at = ((j / PANEL * n_pairs + e / 2) * PANEL + j % PANEL) * 2 + e % 2;
                    uint16_t want = j < n_entries && e < n_values ? values_at(entries[j], e) : 0;
                    if (values_at(k.p, at) != want)
                        fail_msg("K, %s: widths %zu %zu, %zu entries: value %zu of entry %zu",
                                 dspark__isa_name(kern.isa), n_latent, n_rope, n_entries, e, j);
                }
                for (size_t o = 0; which != 1 && o < n_panels * PANEL; o++) {
                    size_t at = ((o / PANEL * 120 + j / 2) * PANEL + o % PANEL) * 2 + j % 2;
                    uint16_t want = j < n_entries && o < n_latent ? values_at(entries[j], o) : 0;
                    if (values_at(v.p, at) != want)
                        fail_msg("V, %s: widths %zu %zu, %zu entries: value %zu of entry %zu",
                                 dspark__isa_name(kern.isa), n_latent, n_rope, n_entries, o, j);
                }
            }
        }
    }
    free(entries);
    guard_free(&rows);
    guard_free(&k);
    guard_free(&v);
}

static void test_pack_entries(void **state)
{
    (void)state;
    static const size_t WIDTHS[][2] = {{0, 0},   {1, 0},   {0, 1},   {1, 1},   {2, 1},
                                       {7, 2},   {8, 8},   {15, 0},  {16, 1},  {31, 1},
                                       {31, 2},  {32, 16}, {33, 5},  {47, 1},  {48, 0},
                                       {49, 14}, {63, 1},  {97, 32}, {127, 2}, {512, 64}};
    static const size_t ENTRIES[] = {0, 1, 2, 3, 8, 15, 16, 17, 31, 33, 47, 48, 49, 127, 239, 240};
    for (size_t w = 0; w < sizeof WIDTHS / sizeof WIDTHS[0]; w++) {
        for (size_t e = 0; e < sizeof ENTRIES / sizeof ENTRIES[0]; e++) {
            if (WIDTHS[w][0] == 512 && e % 5 != 0) continue; /* the real width is slow to look at */
            check_pack(WIDTHS[w][0], WIDTHS[w][1], ENTRIES[e]);
        }
    }
}

/* ---- together ---- */

enum { LATENT = 64, ROPE = 16, WIDTH = LATENT + ROPE, V_PANELS = (LATENT + 47) / 48, QUERIES = 6 };

/* Attention of n_rows queries over n entries, row i seeing all but the last hidden[i]. whole:
 * products always run over 240 places; else over what there is. */
static void attend(const dspark__kern *kern, uint16_t *out, const uint16_t *query, size_t n_rows,
                   const uint16_t *entry, size_t n, const uint32_t *hidden, float scale, int whole)
{
    _Alignas(64) static uint16_t k_panels[5 * WIDTH * PANEL], v_panels[V_PANELS * PIECE * PANEL];
    _Alignas(64) static float scores[5 * QUERIES * PANEL], acc[V_PANELS * QUERIES * PANEL];
    static uint16_t p[QUERIES * PIECE];
    float m[QUERIES], l[QUERIES], a[QUERIES];
    uint32_t n_valid[QUERIES];
    for (size_t i = 0; i < n_rows; i++) {
        m[i] = -INFINITY;
        l[i] = 0;
    }
    memset(acc, 0, sizeof acc);
    for (size_t start = 0; start < n; start += PIECE) {
        const size_t n_here = n - start < PIECE ? n - start : PIECE;
        const void *rows[PIECE];
        for (size_t j = 0; j < n_here; j++) rows[j] = entry + (start + j) * WIDTH;
        memset(scores, 0xff, sizeof scores);
        kern->pack_entries(&(dspark__pack_entries){rows, n_here, LATENT, ROPE, k_panels, v_panels});
        dspark__gemm_bf16 g = {.x = query,
                               .x_stride = 2 * WIDTH,
                               .n_rows = n_rows,
                               .panels = k_panels,
                               .panel_stride = dspark__panel_elements(WIDTH),
                               .n_panels = whole ? 5 : (n_here + PANEL - 1) / PANEL,
                               .k = WIDTH,
                               .acc = scores,
                               .first = 1};
        kern->gemm_bf16(&g);
        for (size_t i = 0; i < n_rows; i++) {
            size_t seen = n - hidden[i];
            n_valid[i] = (uint32_t)(seen <= start          ? 0
                                    : seen - start < PIECE ? seen - start
                                                           : PIECE);
        }
        kern->softmax_piece(&(dspark__softmax_piece){.scores = scores,
                                                     .n_rows = n_rows,
                                                     .n_valid = n_valid,
                                                     .scale = scale,
                                                     .m = m,
                                                     .l = l,
                                                     .a = a,
                                                     .p = p});
        kern->scale_rows(acc, a, V_PANELS, n_rows);
        g = (dspark__gemm_bf16){.x = p,
                                .x_stride = 2 * PIECE,
                                .n_rows = n_rows,
                                .panels = v_panels,
                                .panel_stride = dspark__panel_elements(PIECE),
                                .n_panels = V_PANELS,
                                .k = whole ? PIECE : n_here,
                                .acc = acc};
        kern->gemm_bf16(&g);
    }
    for (size_t i = 0; i < n_rows; i++) assert_true(isfinite(m[i]) && isfinite(l[i]));
    kern->attend_finish(out, LATENT, acc, l, n_rows, LATENT);
}

/* The same in double, all at once. */
static void check_against_double(const uint16_t *out, const uint16_t *query, const uint16_t *entry,
                                 size_t n, double scale)
{
    double *p = malloc(sizeof *p * n), most = -INFINITY, sum = 0;
    assert_non_null(p);
    for (size_t j = 0; j < n; j++) {
        p[j] = 0;
        for (size_t e = 0; e < WIDTH; e++)
            p[j] += (double)values_f32_at(query, e) * values_f32_at(entry + j * WIDTH, e);
        p[j] *= scale;
        if (p[j] > most) most = p[j];
    }
    for (size_t j = 0; j < n; j++) sum += p[j] = exp(p[j] - most);
    for (size_t e = 0; e < LATENT; e++) {
        double want = 0, magnitude = 0;
        for (size_t j = 0; j < n; j++) {
            want += p[j] / sum * values_f32_at(entry + j * WIDTH, e);
            magnitude += p[j] / sum * fabs(values_f32_at(entry + j * WIDTH, e));
        }
        double off = fabs(values_f32_at(out, e) - want);
        assert_true(off <= magnitude * 0x1p-8 + fabs(want) * 0x1p-8);
    }
    free(p);
}

static uint16_t moderate(void) /* below 4 */
{
    return dspark__f32_to_bf16(values_f32(VALUES_NORMAL) * 0.03125f);
}

static void test_together(void **state)
{
    (void)state;
    static const size_t LENGTHS[] = {1, 2, 7, 47, 48, 49, 239, 240, 241, 487, 700};
    enum { MOST = 700 };
    static uint16_t entry[MOST * WIDTH], query[QUERIES * WIDTH];
    static uint16_t want[QUERIES * LATENT], out[QUERIES * LATENT];
    const float scale = 0.05f;
    dspark__kern ref = values_level(DSPARK_ISA_REF);
    for (size_t t = 0; t < sizeof LENGTHS / sizeof LENGTHS[0]; t++) {
        const size_t n = LENGTHS[t];
        uint32_t hidden[QUERIES];
        for (size_t i = 0; i < n * WIDTH; i++) entry[i] = moderate();
        for (size_t i = 0; i < QUERIES * WIDTH; i++) query[i] = moderate();
        for (size_t i = 0; i < n; i += 3) entry[i * WIDTH + 5] = 0x8000; /* sums that are -0 */
        for (size_t i = 0; i < n; i++) entry[i * WIDTH + 6] = i % 2 ? 0x8000 : 0x0000;
        for (size_t i = 0; i < QUERIES; i++) /* causal: the last rows are hidden from the first */
            hidden[i] = (uint32_t)(QUERIES - 1 - i < n ? QUERIES - 1 - i : n - 1);
        attend(&ref, want, query, QUERIES, entry, n, hidden, scale, 1);
        for (size_t i = 0; i < QUERIES; i++)
            check_against_double(want + i * LATENT, query + i * WIDTH, entry, n - hidden[i], scale);
        for (VALUES_LEVELS(isa)) {
            dspark__kern kern = values_level(isa);
            for (int whole = 0; whole < 2; whole++) {
                attend(&kern, out, query, QUERIES, entry, n, hidden, scale, whole);
                assert_memory_equal(out, want, sizeof want);
                for (size_t i = 0; i < QUERIES; i++) { /* alone, without what is hidden from it */
                    attend(&kern, out, query + i * WIDTH, 1, entry, n - hidden[i], &(uint32_t){0},
                           scale, whole);
                    assert_memory_equal(out, want + i * LATENT, 2 * LATENT);
                }
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_softmax),       cmocka_unit_test(test_exp_of_levels),
        cmocka_unit_test(test_softmax_sum),   cmocka_unit_test(test_scale_rows),
        cmocka_unit_test(test_attend_finish), cmocka_unit_test(test_pack_entries),
        cmocka_unit_test(test_together),
    };
    values_print_seed();
    return cmocka_run_group_tests_name("kern_block_attend", tests, NULL, NULL);
}
