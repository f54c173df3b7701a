/* The kernels that take a piece of attention in one go, on every level that has them: bit for bit what
 * ref's separate kernels give, for any numbers of rows, latents and entries, whatever the numbers are,
 * with guard pages around the entries, the memory and the result. */
#include "support/guard.h"
#include "support/values.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { PIECE = DSPARK__PIECE, PANEL = DSPARK__PANEL, MOST_PIECES = 4 };

/* A list of pieces that some rows attend to. */
typedef struct attention {
    size_t n_rows, n_latent, n_rope, n_pieces;
    size_t n[MOST_PIECES];           /* entries of a piece */
    float scale;
    guard query, entries;            /* each ends at a forbidden page */
    uint32_t *n_valid[MOST_PIECES];  /* [n_rows] */
} attention;

static size_t width_of(const attention *t)
{
    return t->n_latent + t->n_rope;
}

static void find_rows(const attention *t, size_t piece, const void *rows[PIECE])
{
    size_t before = 0;
    for (size_t i = 0; i < piece; i++) before += t->n[i];
    for (size_t j = 0; j < t->n[piece]; j++)
        rows[j] = t->entries.p + (before + j) * width_of(t) * 2;
}

/* kinds: what the numbers are. At first every row sees everything, later pieces are cut by chance. */
static attention make_attention(size_t n_rows, size_t n_latent, size_t n_rope, size_t last,
                                size_t n_pieces, value_class kind, int cut)
{
    attention t = {n_rows, n_latent, n_rope, n_pieces, {0}, 0.07f, {0}, {0}, {0}};
    size_t all = 0;
    for (size_t i = 0; i < n_pieces; i++) {
        t.n[i] = i + 1 < n_pieces ? PIECE : last;
        all += t.n[i];
        t.n_valid[i] = malloc(n_rows * sizeof(uint32_t));
        assert_non_null(t.n_valid[i]);
        for (size_t r = 0; r < n_rows; r++) {
            t.n_valid[i][r] = (uint32_t)t.n[i];
            if (cut && values_random() % 2) t.n_valid[i][r] = (uint32_t)(values_random() % (t.n[i] + 1));
        }
    }
    t.query = guard_end(n_rows * width_of(&t) * 2);
    t.entries = guard_end(all * width_of(&t) * 2);
    for (size_t i = 0; i < t.query.n; i += 2) {
        uint16_t v = kind == VALUES_NORMAL ? dspark__f32_to_bf16(values_f32(kind) * 0.03125f)
                                           : values_bf16(kind);
        memcpy(t.query.p + i, &v, 2);
    }
    for (size_t i = 0; i < t.entries.n; i += 2) {
        value_class of = kind == VALUES_SPECIAL && values_random() % 64 ? VALUES_NORMAL : kind;
        uint16_t v = kind == VALUES_NORMAL ? dspark__f32_to_bf16(values_f32(kind) * 0.0625f)
                                           : values_bf16(of);
        memcpy(t.entries.p + i, &v, 2);
    }
    return t;
}

static void free_attention(attention *t)
{
    guard_free(&t->query);
    guard_free(&t->entries);
    for (size_t i = 0; i < t->n_pieces; i++) free(t->n_valid[i]);
}

static void *room(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(p);
    return p;
}

/* What it must be: ref's kernels one after the other. */
static void define(const attention *t, uint16_t *out)
{
    const dspark__kern ref = values_level(DSPARK_ISA_REF);
    const size_t rows = t->n_rows, width = width_of(t), v_panels = (t->n_latent + PANEL - 1) / PANEL;
    uint16_t *k = room(dspark__k_panels_elements(t->n_latent, t->n_rope) * 2);
    uint16_t *v = room(dspark__v_panels_elements(t->n_latent) * 2), *p = room(rows * PIECE * 2);
    float *scores = room(PIECE * rows * 4), *acc = room(v_panels * PANEL * rows * 4);
    float *m = room(rows * 4), *l = room(rows * 4), *a = room(rows * 4);
    memset(acc, 0, v_panels * PANEL * rows * 4);
    for (size_t i = 0; i < rows; i++) {
        m[i] = -INFINITY;
        l[i] = 0;
    }
    for (size_t i = 0; i < t->n_pieces; i++) {
        const void *entries[PIECE];
        find_rows(t, i, entries);
        ref.pack_entries(&(dspark__pack_entries){entries, t->n[i], t->n_latent, t->n_rope, k, v});
        dspark__gemm_bf16 g = {.x = t->query.p, .x_stride = width * 2, .n_rows = rows, .panels = k,
                               .panel_stride = dspark__panel_elements(width), .n_panels = PIECE / PANEL,
                               .k = width, .acc = scores, .first = 1};
        ref.gemm_bf16(&g);
        ref.softmax_piece(&(dspark__softmax_piece){scores, rows, t->n_valid[i], t->scale, m, l, a, p});
        if (i > 0) ref.scale_rows(acc, a, v_panels, rows);
        g = (dspark__gemm_bf16){.x = p, .x_stride = PIECE * 2, .n_rows = rows, .panels = v,
                                .panel_stride = dspark__panel_elements(PIECE), .n_panels = v_panels,
                                .k = PIECE, .acc = acc, .first = i == 0};
        ref.gemm_bf16(&g);
    }
    ref.attend_finish(out, t->n_latent, acc, l, rows, t->n_latent);
    void *all[] = {k, v, p, scores, acc, m, l, a};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* The same by the kernels of a level. The memory is full of NaN, and ends at a forbidden page. */
static void run_level(const attention *t, const dspark__kern *kern, unsigned char *out,
                      size_t out_stride)
{
    const size_t bytes = dspark__attend_bytes(t->n_rows, t->n_latent, t->n_rope);
    guard memory = guard_end(bytes);
    assert_int_equal(bytes % 64, 0);
    memset(memory.p, 0xff, bytes);
    const dspark__attend job = {t->query.p, width_of(t) * 2, t->n_rows, t->n_latent,
                                t->n_rope,  t->scale,        memory.p};
    kern->attend_begin(&job);
    for (size_t i = 0; i < t->n_pieces; i++) {
        const void *rows[PIECE], *next[PIECE];
        find_rows(t, i, rows);
        if (i + 1 < t->n_pieces) find_rows(t, i + 1, next);
        const dspark__attend_entries e = {rows, t->n[i], t->n_valid[i], i == 0, next,
                                          i + 1 < t->n_pieces ? t->n[i + 1] : 0, width_of(t) * 2};
        kern->attend_piece(&job, &e);
    }
    kern->attend_end(&job, (uint16_t *)(void *)out, out_stride);
    guard_free(&memory);
}

/* Returns how many rows came out as numbers. */
static size_t check(const attention *t)
{
    const size_t n = t->n_rows * t->n_latent, stride = t->n_latent + t->n_rows % 3;
    const size_t bytes = ((t->n_rows - 1) * stride + t->n_latent) * 2;
    uint16_t *want = room(n * 2);
    guard out = guard_end(bytes);
    size_t finite = 0;
    define(t, want);
    for (VALUES_LEVELS(isa)) {
        const dspark__kern kern = values_level(isa);
        if (!kern.attend_piece) continue;
        memset(out.p, 0xa5, bytes);
        run_level(t, &kern, out.p, stride);
        for (size_t i = 0; i < t->n_rows; i++) {
            const unsigned char *row = out.p + i * stride * 2;
            if (memcmp(row, want + i * t->n_latent, t->n_latent * 2) != 0)
                fail_msg("%s: %zu rows, %zu + %zu values, %zu pieces, the last of %zu: row %zu",
                         dspark__isa_name((dspark_isa)isa), t->n_rows, t->n_latent, t->n_rope,
                         t->n_pieces, t->n[t->n_pieces - 1], i);
            for (size_t j = t->n_latent; j < stride && i + 1 < t->n_rows; j++)
                assert_int_equal(values_at(row, j), 0xa5a5);
        }
    }
    for (size_t i = 0; i < t->n_rows; i++) finite += (want[i * t->n_latent] & 0x7f80) != 0x7f80;
    guard_free(&out);
    free(want);
    return finite;
}

static void any_shape(void **state)
{
    (void)state;
    static const size_t ROWS[] = {1, 7, 16, 17, 33, 48, 49, 64, 65, 77, 81, 113, 128};
    static const size_t LATENTS[] = {2, 14, 16, 18, 34, 64, 70, 96, 130};
    static const size_t LAST[] = {1, 2, 7, 8, 15, 16, 17, 48, 239, 240};
    for (size_t i = 0; i < 120; i++) {
        size_t n_rows = ROWS[i % 13], n_latent = LATENTS[values_random() % 9];
        attention t = make_attention(n_rows, n_latent, values_random() % 3 * 2, LAST[i % 10],
                                     1 + values_random() % 3, VALUES_NORMAL, i % 3 == 0);
        size_t finite = check(&t);
        if (i % 3 != 0) assert_int_equal(finite, n_rows);
        free_attention(&t);
    }
}

static void any_numbers(void **state)
{
    (void)state;
    size_t finite = 0, other = 0;
    for (size_t i = 0; i < 60; i++) {
        attention t = make_attention(20 + i, 16 + i % 9 * 2, 4, 1 + values_random() % PIECE,
                                     1 + values_random() % MOST_PIECES,
                                     (value_class)(i % VALUES_N_CLASSES), (int)(i / 4 % 2));
        if (i % 5 == 0) t.scale = -1.5f; /* the order of scores the other way round */
        size_t n = check(&t);
        finite += n;
        other += t.n_rows - n;
        free_attention(&t);
    }
    assert_true(finite > 200 && other > 200);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(any_shape), cmocka_unit_test(any_numbers)};
    values_print_seed();
    return cmocka_run_group_tests_name("kern_attend", tests, NULL, NULL);
}
