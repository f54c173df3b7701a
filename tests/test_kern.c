/* The kernel table: every level that this machine runs against ref, bit for bit, over shapes,
 * alignments, guard pages and hostile values; and ref itself against a table of answers of the
 * vdpbf16ps instruction and against double precision. Owns no model knowledge. */
#include "base/fpenv.h"
#include "base/numfmt.h"
#include "base/status.h"
#include "kern/kern.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static const size_t SIZES[] = {0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127, 129};
enum { N_SIZES = sizeof SIZES / sizeof SIZES[0], MOST = 129 };
enum { MOST_PANELS = (MOST + 47) / 48 };

static uint64_t seed = 0x9e3779b97f4a7c15u;

static uint64_t next_random(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

/* ---- memory that ends at a page which may not be touched ---------------------------------- */

enum { PAGE = 4096 };

typedef struct fenced {
    unsigned char *map, *end; /* end: first forbidden byte */
    size_t n_map;
} fenced;

static fenced fence(size_t n_bytes)
{
    fenced f;
    size_t n = (n_bytes + PAGE) / PAGE * PAGE; /* at least one byte more than asked */
    f.n_map = n + PAGE;
    f.map = mmap(NULL, f.n_map, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(f.map != MAP_FAILED);
    f.end = f.map + n;
    assert_int_equal(mprotect(f.end, PAGE, PROT_NONE), 0);
    return f;
}

static void unfence(fenced *f)
{
    munmap(f->map, f->n_map);
}

/* ---- values -------------------------------------------------------------------------------- */

enum { NORMAL, NEAR_SUBNORMAL, ANY_FINITE, SPECIALS, N_CLASSES };

static uint16_t random_bf16(int class)
{
    static const uint16_t special[] = {0x7f80, 0xff80, 0x7fc1, 0xff81, 0x7f81, 0x8000, 0x0000,
                                       0x7f7f, 0xff7f, 0x0001, 0x807f, 0x0080, 0x8080, 0x007f};
    uint64_t r = next_random();
    uint16_t h = (uint16_t)r;
    switch (class) {
    case NORMAL: /* 2^-7 .. 2^6 */
        return (uint16_t)((h & 0x807fu) | ((120 + (r >> 20) % 14) << 7));
    case NEAR_SUBNORMAL: /* products around 2^-126, one element in 16 subnormal itself */
        if ((r >> 40) % 16 == 0) return h & 0x807fu;
        return (uint16_t)((h & 0x807fu) | ((57 + (r >> 20) % 14) << 7));
    case SPECIALS: /* rare enough that most sums stay numbers */
        if ((r >> 40) % 128 == 0) return special[(r >> 20) % (sizeof special / sizeof *special)];
        return (uint16_t)((h & 0x807fu) | ((120 + (r >> 20) % 14) << 7));
    default:
        if ((h & 0x7f80u) == 0x7f80u) h ^= 0x4000u;
        return h;
    }
}

static void fill_bf16(void *to, size_t n, int class)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t h = random_bf16(class);
        memcpy((unsigned char *)to + 2 * i, &h, 2);
    }
}

static int same_floats(const float *a, const float *b, size_t n) /* any NaN equals any NaN */
{
    for (size_t i = 0; i < n; i++)
        if (dspark__f32_bits(a[i]) != dspark__f32_bits(b[i]) && !(isnan(a[i]) && isnan(b[i])))
            return 0;
    return 1;
}

/* ---- levels -------------------------------------------------------------------------------- */

static dspark__kern level(int isa)
{
    dspark__kern k;
    assert_int_equal(dspark__kern_select(&k, (dspark_isa)isa, NULL), DSPARK_OK);
    assert_int_equal(k.isa, isa);
    return k;
}

/* for (EACH_LEVEL(isa)): the levels above ref on this machine. */
#define EACH_LEVEL(isa) int isa = DSPARK_ISA_AVX2; isa <= (int)dspark__isa_best(); isa++

static void test_select(void **state)
{
    (void)state;
    dspark__kern k;
    dspark_error err;
    assert_true(dspark__isa_available(DSPARK_ISA_AUTO));
    assert_true(dspark__isa_available(DSPARK_ISA_REF));
    assert_int_equal(dspark__kern_select(&k, DSPARK_ISA_AUTO, &err), DSPARK_OK);
    assert_int_equal(k.isa, dspark__isa_best());
    print_message("best level: %s\n", dspark__isa_name(k.isa));
    for (int isa = DSPARK_ISA_REF; isa <= DSPARK_ISA_AVX512BF16; isa++) {
        dspark_status st = dspark__kern_select(&k, (dspark_isa)isa, &err);
        assert_int_equal(st == DSPARK_OK, dspark__isa_available((dspark_isa)isa));
        if (st != DSPARK_OK) {
            assert_int_equal(st, DSPARK_EUNSUPPORTED);
            assert_non_null(strstr(err.message, dspark__isa_name((dspark_isa)isa)));
            continue;
        }
        assert_true(k.gemm_bf16 && k.rmsnorm_bf16 && k.rope_angles && k.rope_bf16 && k.fp8_e4m3 && k.fp8_e5m2);
        assert_true(k.absmax_bf16 && k.finite_bf16 && k.probe_flops);
        double flops = k.probe_flops(1000);
        assert_true(flops >= 2000 && k.probe_flops(2000) == 2 * flops);
    }
    assert_int_equal(dspark__kern_select(&k, (dspark_isa)99, &err), DSPARK_EUNSUPPORTED);
    assert_int_equal(dspark__kern_select(&k, (dspark_isa)-1, NULL), DSPARK_EUNSUPPORTED);
    assert_string_equal(dspark__isa_name((dspark_isa)99), "?");
}

static void test_pack(void **state)
{
    (void)state;
    for (size_t a = 0; a < N_SIZES; a++) {
        for (size_t b = 0; b < N_SIZES; b++) {
            size_t n = SIZES[a], k = SIZES[b], n_panels = (n + 47) / 48;
            size_t stride = dspark__panel_elements(k), bytes = n_panels * stride * 2;
            fenced source = fence(n * k * 2 + 4), target = fence(bytes);
            unsigned char *w = source.end - n * k * 2 - a % 2; /* odd addresses too */
            uint16_t *panels = (uint16_t *)(void *)(target.end - bytes);
            fill_bf16(w, n * k, ANY_FINITE);
            memset(target.map, 0xa5, (size_t)(target.end - target.map));
            dspark__pack_bf16(panels, w, n, k);
            for (size_t o = 0; o < n_panels * 48; o++) {
                for (size_t e = 0; e < (k + 1) / 2 * 2; e++) {
                    uint16_t want = 0;
                    if (o < n && e < k) memcpy(&want, w + (o * k + e) * 2, 2);
                    size_t at = o / 48 * stride + (e / 2 * 48 + o % 48) * 2 + e % 2;
                    assert_int_equal(panels[at], want);
                }
            }
            for (unsigned char *p = target.map; p < (unsigned char *)panels; p++)
                assert_int_equal(*p, 0xa5);
            unfence(&source);
            unfence(&target);
        }
    }
}

/* ---- the matrix product -------------------------------------------------------------------- */

/* Answers of vdpbf16ps itself: acc after one pair. They hold the order of the two multiply-adds and
 * where x86 flushes: by the result rounded to 24 bits without an exponent limit, which differs from
 * IEEE rounding on the subnormal grid just below FLT_MIN. */
static const struct {
    float acc;
    uint16_t x[2], w[2]; /* even, odd */
    uint32_t want;
} ANSWERS[] = {
    {0x1p24f, {0x3f80, 0x4b80}, {0x3f80, 0xbf80}, 0x3f800000}, /* 2^24 - 2^24 + 1: odd first */
    {0x1p24f, {0x4b80, 0x3f80}, {0xbf80, 0x3f80}, 0x00000000}, /* 2^24 + 1 - 2^24 */
    {0x1p-126f, {0x1c80, 0}, {0x9900, 0}, 0x00000000},  /* - 2^-147 */
    {0x1p-126f, {0x1c80, 0}, {0x9780, 0}, 0x00000000},  /* - 2^-150: exact, and flushed */
    {-0x1p-126f, {0x1c80, 0}, {0x1780, 0}, 0x80000000}, /* + 2^-150 */
    {0x1p-126f, {0x1c80, 0}, {0x9700, 0}, 0x00800000},  /* - 2^-151: a tie, up to FLT_MIN */
    {0x1p-126f, {0x1c81, 0}, {0x9700, 0}, 0x00000000},  /* a little more than that tie */
    {0x1p-126f, {0, 0x1c81}, {0, 0x9700}, 0x00000000},  /* the same in the odd element */
    {0x1p-126f, {0x1c81, 0}, {0x9680, 0}, 0x00800000},  /* - 2^-152 (1 + 2^-7) */
    {0x1p-126f, {0x007f, 0}, {0x7f00, 0}, 0x00800000},  /* subnormal x counts as zero */
    {0x1p-126f, {0x7f00, 0}, {0x807f, 0}, 0x00800000},  /* subnormal weight, too */
    {-0.0f, {0x8000, 0x8000}, {0x3f80, 0x3f80}, 0x80000000},
    {0.0f, {0x8000, 0x8000}, {0x3f80, 0x3f80}, 0x00000000},
    {0.0f, {0x0080, 0}, {0xbf00, 0}, 0x80000000}, /* -2^-127: flushed, sign kept */
    {FLT_MAX, {0x7f7f, 0}, {0x3f80, 0}, 0x7f800000},
    {0.0f, {0x7f7f, 0xff7f}, {0x4000, 0x3f80}, 0x7f7f0000}, /* no overflow in between */
};

static void test_gemm_answers(void **state)
{
    (void)state;
    for (int isa = DSPARK_ISA_REF; isa <= (int)dspark__isa_best(); isa++) {
        dspark__kern kern = level(isa);
        for (size_t a = 0; a < sizeof ANSWERS / sizeof ANSWERS[0]; a++) {
            _Alignas(64) uint16_t panel[48][2];
            _Alignas(64) float acc[48];
            for (size_t j = 0; j < 48; j++) {
                memcpy(panel[j], ANSWERS[a].w, sizeof panel[j]);
                acc[j] = ANSWERS[a].acc;
            }
            dspark__gemm_bf16 g = {.x = ANSWERS[a].x, .x_stride = 4, .n_rows = 1,
                                   .panels = panel[0], .panel_stride = 96, .n_panels = 1, .k = 2,
                                   .acc = acc, .n_out = 48};
            kern.gemm_bf16(&g);
            for (size_t j = 0; j < 48; j++) {
                if (dspark__f32_bits(acc[j]) != ANSWERS[a].want)
                    fail_msg("%s, answer %zu: %08x, not %08x", dspark__isa_name(kern.isa), a,
                             dspark__f32_bits(acc[j]), ANSWERS[a].want);
            }
        }
    }
}

/* One problem and a way to run it: rows and outputs may be fewer than the data holds. */
typedef struct problem {
    size_t n_rows, n_out, k, x_stride;
    fenced x, panels, out;
    uint16_t *w;
    size_t panel_stride;
} problem;

static problem make_problem(size_t n_rows, size_t n_out, size_t k, int class)
{
    problem p = {.n_rows = n_rows, .n_out = n_out, .k = k};
    size_t n_panels = (n_out + 47) / 48;
    p.panel_stride = dspark__panel_elements(k);
    p.x_stride = 2 * k + 2 * (k % 3); /* dense and with gaps */
    p.x = fence(n_rows * p.x_stride + 8);
    p.panels = fence(n_panels * p.panel_stride * 2);
    p.out = fence(n_rows * (n_out + 1) * 2 + 8);
    p.w = malloc(n_out * k * 2 + 1);
    assert_non_null(p.w);
    fill_bf16(p.w, n_out * k, class);
    return p;
}

static void free_problem(problem *p)
{
    unfence(&p->x);
    unfence(&p->panels);
    unfence(&p->out);
    free(p->w);
}

static uint16_t *panels_of(const problem *p, size_t n_out)
{
    size_t elements = (n_out + 47) / 48 * p->panel_stride;
    return (uint16_t *)(void *)p->panels.end - elements;
}

/* The last row of x ends `shift` bytes before the forbidden page. */
static unsigned char *x_of(const problem *p, size_t n_rows, size_t shift)
{
    if (n_rows == 0) return p->x.end;
    return p->x.end - shift - ((n_rows - 1) * p->x_stride + 2 * p->k);
}

/* Run [n_rows, n_out] of the problem into out (dense rows of n_out + 1) on a fresh pattern; the
 * same for acc when the sums are wanted. block: elements of k per call, 0 = one call. */
static uint16_t *run_gemm(const dspark__kern *kern, const problem *p, size_t n_rows, size_t n_out,
                          size_t shift, size_t block, float *acc)
{
    size_t n_bytes = n_rows * (n_out + 1) * 2, n_panels = (n_out + 47) / 48;
    unsigned char *out = p->out.end - n_bytes - shift;
    memset(p->out.map, 0xa5, (size_t)(p->out.end - p->out.map));
    if (block == 0) block = p->k + p->k % 2;
    size_t k = 0;
    do {
        size_t n = p->k - k < block ? p->k - k : block;
        dspark__gemm_bf16 g = {.x = x_of(p, n_rows, shift) + 2 * k, .x_stride = p->x_stride,
                               .n_rows = n_rows,
                               .panels = panels_of(p, n_out) + k * DSPARK__PANEL,
                               .panel_stride = p->panel_stride, .n_panels = n_panels, .k = n,
                               .acc = acc, .first = k == 0, .last = k + n == p->k,
                               .out = (uint16_t *)(void *)out, .out_stride = n_out + 1,
                               .n_out = n_out, .prefetch = p->panels.map,
                               .prefetch_bytes = k % 3 == 0 ? 4096 : 0};
        kern->gemm_bf16(&g);
        k += n;
    } while (k < p->k);
    return (uint16_t *)(void *)out;
}

/* out[rows][outs] against want[MOST][MOST]; gaps and surroundings must keep their pattern. */
static void check_out(const problem *p, const unsigned char *out, size_t n_rows, size_t n_out,
                      const uint16_t *want, size_t want_stride, const char *what)
{
    for (size_t i = 0; i < n_rows; i++) {
        const unsigned char *row = out + i * (n_out + 1) * 2;
        if (memcmp(row, want + i * want_stride, n_out * 2) == 0 && row[2 * n_out] == 0xa5 &&
            row[2 * n_out + 1] == 0xa5)
            continue;
        for (size_t o = 0; o < n_out; o++) {
            uint16_t h = dspark__load_u16(row + 2 * o);
            if (h != want[i * want_stride + o])
                fail_msg("%s: rows %zu outputs %zu k %zu, at [%zu][%zu]: %04x, not %04x", what,
                         n_rows, n_out, p->k, i, o, h, want[i * want_stride + o]);
        }
        fail_msg("%s: rows %zu outputs %zu k %zu wrote behind row %zu", what, n_rows, n_out, p->k,
                 i);
    }
    for (const unsigned char *b = p->out.map; b < out; b++) assert_int_equal(*b, 0xa5);
    for (const unsigned char *b = out + n_rows * (n_out + 1) * 2; b < p->out.end; b++)
        assert_int_equal(*b, 0xa5);
}

/* An output depends on its row of x and its row of w alone, so ref is asked once for each k. */
static void test_gemm_shapes(void **state)
{
    (void)state;
    static uint16_t want[MOST * MOST];
    static uint16_t x[MOST * MOST];
    dspark__kern ref = level(DSPARK_ISA_REF);
    for (size_t ik = 0; ik < N_SIZES; ik++) {
        size_t k = SIZES[ik];
        int class = (int)(ik % N_CLASSES);
        problem p = make_problem(MOST, MOST, k, class);
        fill_bf16(x, MOST * k, class);
        for (size_t i = 0; i < MOST; i++)
            memcpy(x_of(&p, MOST, 0) + i * p.x_stride, x + i * k, 2 * k);
        dspark__pack_bf16(panels_of(&p, MOST), p.w, MOST, k);
        const uint16_t *all = run_gemm(&ref, &p, MOST, MOST, 0, 0, NULL);
        for (size_t i = 0; i < MOST; i++)
            memcpy(want + i * MOST, all + i * (MOST + 1), 2 * MOST);
        for (size_t io = 0; io < N_SIZES; io++) {
            size_t n_out = SIZES[io];
            dspark__pack_bf16(panels_of(&p, n_out), p.w, n_out, k);
            for (size_t ir = 0; ir < N_SIZES; ir++) {
                size_t n_rows = SIZES[ir], shift = (ir + io) % 4;
                for (size_t i = 0; i < n_rows; i++)
                    memcpy(x_of(&p, n_rows, shift) + i * p.x_stride, x + i * k, 2 * k);
                for (EACH_LEVEL(isa)) {
                    dspark__kern kern = level(isa);
                    const void *out = run_gemm(&kern, &p, n_rows, n_out, shift, 0, NULL);
                    check_out(&p, out, n_rows, n_out, want, MOST, dspark__isa_name(kern.isa));
                }
            }
        }
        free_problem(&p);
    }
}

/* Blocks of k give the same bits as one call, at every level, and so do the sums between. */
static void test_gemm_blocks(void **state)
{
    (void)state;
    static const size_t BLOCKS[] = {2, 6, 32, 34, 62, 64, 128, 130, 256, 400};
    static const size_t ROWS[] = {1, 2, 3, 4, 6, 7, 9, 12, 16, 21};
    enum { K = 401, OUT = 4 * 48 - 5, MOST_ROWS = 21, N = sizeof BLOCKS / sizeof BLOCKS[0] };
    float *acc = aligned_alloc(64, 4 * MOST_ROWS * 48 * sizeof *acc);
    float *sums = aligned_alloc(64, 4 * MOST_ROWS * 48 * sizeof *acc);
    uint16_t *want = malloc(MOST_ROWS * (OUT + 1) * 2);
    assert_true(acc && sums && want);
    dspark__kern ref = level(DSPARK_ISA_REF);
    for (int class = 0; class < N_CLASSES; class++) {
        problem p = make_problem(MOST_ROWS, OUT, K, class);
        dspark__pack_bf16(panels_of(&p, OUT), p.w, OUT, K);
        for (size_t b = 0; b < N; b++) {
            size_t n_rows = ROWS[b], shift = b % 4;
            fill_bf16(x_of(&p, n_rows, shift), n_rows * p.x_stride / 2 - (p.x_stride / 2 - K),
                      class);
            const void *one = run_gemm(&ref, &p, n_rows, OUT, shift, 0, NULL);
            memcpy(want, one, n_rows * (OUT + 1) * 2);
            for (int isa = DSPARK_ISA_REF; isa <= (int)dspark__isa_best(); isa++) {
                dspark__kern kern = level(isa);
                const void *out = run_gemm(&kern, &p, n_rows, OUT, shift, BLOCKS[b], acc);
                check_out(&p, out, n_rows, OUT, want, OUT + 1, dspark__isa_name(kern.isa));
                /* the fp32 sums of the first block, padding lanes too */
                dspark__gemm_bf16 g = {.x = x_of(&p, n_rows, shift), .x_stride = p.x_stride,
                                       .n_rows = n_rows, .panels = panels_of(&p, OUT),
                                       .panel_stride = p.panel_stride, .n_panels = 4,
                                       .k = BLOCKS[b], .acc = acc, .first = 1, .n_out = OUT};
                kern.gemm_bf16(&g);
                if (isa == DSPARK_ISA_REF) memcpy(sums, acc, 4 * n_rows * 48 * sizeof *acc);
                assert_true(same_floats(sums, acc, 4 * n_rows * 48));
            }
        }
        free_problem(&p);
    }
    free(acc);
    free(sums);
    free(want);
}

/* Every number of rows up to some tiles, with enough k that kernels fetch ahead and change pieces. */
static void test_gemm_every_rows(void **state)
{
    (void)state;
    enum { K = 517, OUT = 4 * 48 - 1, MOST_ROWS = 40 };
    float *acc = aligned_alloc(64, 4 * MOST_ROWS * 48 * sizeof *acc);
    uint16_t *want = malloc(MOST_ROWS * (OUT + 1) * 2);
    assert_true(acc && want);
    dspark__kern ref = level(DSPARK_ISA_REF);
    problem p = make_problem(MOST_ROWS, OUT, K, SPECIALS);
    dspark__pack_bf16(panels_of(&p, OUT), p.w, OUT, K);
    for (size_t n_rows = 1; n_rows <= MOST_ROWS; n_rows++) {
        fill_bf16(x_of(&p, n_rows, 0), n_rows * p.x_stride / 2 - (p.x_stride / 2 - K), SPECIALS);
        memcpy(want, run_gemm(&ref, &p, n_rows, OUT, 0, 0, NULL), n_rows * (OUT + 1) * 2);
        for (EACH_LEVEL(isa)) {
            dspark__kern kern = level(isa);
            const void *out = run_gemm(&kern, &p, n_rows, OUT, 0, 0, n_rows % 2 ? acc : NULL);
            check_out(&p, out, n_rows, OUT, want, OUT + 1, dspark__isa_name(kern.isa));
        }
    }
    free_problem(&p);
    free(want);
    free(acc);
}

/* Sums around FLT_MIN and products far below it: where flushing is decided, in bulk. */
static void test_gemm_flush(void **state)
{
    (void)state;
    enum { ROWS = 16, PANELS = 4, N = ROWS * PANELS * 48, ROUNDS = 40 };
    _Alignas(64) static float start[N], acc[N], want[N];
    _Alignas(64) static uint16_t panels[PANELS][48][2];
    uint16_t x[ROWS][2];
    for (int round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < N; i++) { /* +-2^-126 and up to 7 units above, or any small value */
            uint32_t u = 0x00800000u + (uint32_t)next_random() % 8;
            if (i % 4 == 3) u = (uint32_t)next_random() % 0x01800000u | 0x00800000u;
            start[i] = dspark__f32_from_bits(u | (uint32_t)(next_random() % 2) << 31);
        }
        for (size_t i = 0; i < ROWS * 2; i++) /* x 2^-64 .. 2^-61, w 2^-93 .. 2^-62 */
            x[i / 2][i % 2] = (uint16_t)((next_random() & 0x8007u) | (63 + next_random() % 4) << 7);
        for (size_t i = 0; i < PANELS * 96; i++)
            panels[i / 96][i / 2 % 48][i % 2] =
                (uint16_t)((next_random() & 0x8007u) | (34 + next_random() % 32) << 7);
        for (int isa = DSPARK_ISA_REF; isa <= (int)dspark__isa_best(); isa++) {
            dspark__kern kern = level(isa);
            dspark__gemm_bf16 g = {.x = x, .x_stride = 4, .n_rows = ROWS, .panels = panels[0][0],
                                   .panel_stride = 96, .n_panels = PANELS, .k = 2, .acc = acc,
                                   .n_out = PANELS * 48};
            memcpy(acc, start, sizeof acc);
            kern.gemm_bf16(&g);
            if (isa == DSPARK_ISA_REF) memcpy(want, acc, sizeof want);
            assert_memory_equal(acc, want, sizeof acc);
        }
    }
}

/* The real width, few rows, several panels at once. */
static void test_gemm_wide(void **state)
{
    (void)state;
    static const size_t ROWS[] = {1, 2, 3};
    enum { K = 7168, OUT = 576 };
    dspark__kern ref = level(DSPARK_ISA_REF);
    uint16_t *want = malloc(3 * (OUT + 1) * 2);
    assert_non_null(want);
    for (size_t r = 0; r < sizeof ROWS / sizeof ROWS[0]; r++) {
        problem p = make_problem(ROWS[r], OUT, K, NORMAL);
        dspark__pack_bf16(panels_of(&p, OUT), p.w, OUT, K);
        size_t n_x = ((ROWS[r] - 1) * p.x_stride + 2 * K) / 2;
        fill_bf16(x_of(&p, ROWS[r], 0), n_x, NORMAL);
        const void *one = run_gemm(&ref, &p, ROWS[r], OUT, 0, 0, NULL);
        memcpy(want, one, ROWS[r] * (OUT + 1) * 2);
        for (EACH_LEVEL(isa)) {
            dspark__kern kern = level(isa);
            const void *out = run_gemm(&kern, &p, ROWS[r], OUT, 0, 0, NULL);
            check_out(&p, out, ROWS[r], OUT, want, OUT + 1, dspark__isa_name(kern.isa));
        }
        free_problem(&p);
    }
    free(want);
}

/* ref against double precision: n fp32 roundings of at most the sum of magnitudes, then bf16. */
static void test_gemm_bound(void **state)
{
    (void)state;
    enum { ROWS = 5, OUT = 50, K = 333 };
    dspark__kern ref = level(DSPARK_ISA_REF);
    problem p = make_problem(ROWS, OUT, K, NORMAL);
    unsigned char *x = x_of(&p, ROWS, 0);
    fill_bf16(x, ((ROWS - 1) * p.x_stride + 2 * K) / 2, NORMAL);
    dspark__pack_bf16(panels_of(&p, OUT), p.w, OUT, K);
    const uint16_t *out = run_gemm(&ref, &p, ROWS, OUT, 0, 0, NULL);
    for (size_t i = 0; i < ROWS; i++) {
        for (size_t o = 0; o < OUT; o++) {
            double sum = 0, magnitude = 0;
            for (size_t e = 0; e < K; e++) {
                double a = dspark__bf16_to_f32(dspark__load_u16(x + i * p.x_stride + 2 * e));
                double b = dspark__bf16_to_f32(p.w[o * K + e]);
                sum += a * b;
                magnitude += fabs(a * b);
            }
            double got = dspark__bf16_to_f32(out[i * (OUT + 1) + o]);
            double bound = K * 0x1p-24 * magnitude;
            bound += (fabs(sum) + bound) * 0x1p-8; /* half a unit of bf16, generously */
            assert_true(fabs(got - sum) <= bound);
        }
    }
    free_problem(&p);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static const size_t ROW_SIZES[] = {0,  1,  2,  3,  5,  7,  8,   15,  16,  17,
                                   31, 33, 63, 65, 127, 129, 512, 1000, 7168};
enum { N_ROW_SIZES = sizeof ROW_SIZES / sizeof ROW_SIZES[0], MOST_ROW = 7168 };

static void test_rmsnorm(void **state)
{
    (void)state;
    fenced x = fence(2 * MOST_ROW + 4), w = fence(2 * MOST_ROW + 4), y = fence(2 * MOST_ROW + 4);
    static uint16_t want[MOST_ROW];
    dspark__kern ref = level(DSPARK_ISA_REF);
    for (size_t s = 0; s < N_ROW_SIZES; s++) {
        for (size_t shift = 0; shift < 4; shift++) {
            for (int class = 0; class < N_CLASSES; class++) {
                size_t n = ROW_SIZES[s];
                float eps = shift == 3 ? 0.0f : 1e-5f;
                unsigned char *px = x.end - 2 * n - shift, *pw = w.end - 2 * n - (shift ^ 1);
                unsigned char *py = y.end - 2 * n - (3 - shift);
                fill_bf16(px, n, class);
                fill_bf16(pw, n, class == SPECIALS ? SPECIALS : NORMAL);
                float sum = ref.rmsnorm_bf16(want, px, pw, n, eps);
                for (EACH_LEVEL(isa)) {
                    dspark__kern kern = level(isa);
                    memset(y.map, 0xa5, (size_t)(y.end - y.map));
                    float got = kern.rmsnorm_bf16((uint16_t *)(void *)py, px, pw, n, eps);
                    assert_int_equal(dspark__f32_bits(got), dspark__f32_bits(sum));
                    assert_memory_equal(py, want, 2 * n);
                    if (py > y.map) assert_int_equal(py[-1], 0xa5);
                    for (unsigned char *b = py + 2 * n; b < y.end; b++)
                        assert_int_equal(*b, 0xa5);
                    memcpy(py, px, 2 * n); /* in place */
                    kern.rmsnorm_bf16((uint16_t *)(void *)py, py, pw, n, eps);
                    assert_memory_equal(py, want, 2 * n);
                }
                if (class != NORMAL) continue;
                double exact = 0;
                for (size_t i = 0; i < n; i++)
                    exact += pow(dspark__bf16_to_f32(dspark__load_u16(px + 2 * i)), 2);
                for (size_t i = 0; i < n; i++) {
                    double v = dspark__bf16_to_f32(dspark__load_u16(px + 2 * i)) /
                               sqrt(exact / (double)n + eps) *
                               dspark__bf16_to_f32(dspark__load_u16(pw + 2 * i));
                    assert_true(fabs(dspark__bf16_to_f32(want[i]) - v) <= fabs(v) * 0x1.02p-8);
                }
            }
        }
    }
    unfence(&x);
    unfence(&w);
    unfence(&y);
}

static void test_rope(void **state)
{
    (void)state;
    fenced x = fence(4 * MOST + 4), c = fence(4 * MOST), s = fence(4 * MOST);
    fenced y = fence(4 * MOST + 4);
    static uint16_t want[2 * MOST];
    dspark__kern ref = level(DSPARK_ISA_REF);
    for (size_t i = 0; i < N_SIZES; i++) {
        for (size_t shift = 0; shift < 4; shift++) {
            for (int class = 0; class < N_CLASSES; class++) {
                size_t n = SIZES[i];
                unsigned char *px = x.end - 4 * n - shift, *py = y.end - 4 * n - (3 - shift);
                float *pc = (float *)(void *)c.end - n, *ps = (float *)(void *)s.end - n;
                fill_bf16(px, 2 * n, class);
                for (size_t j = 0; j < n; j++) {
                    double angle = (double)(next_random() % 100000) * 0.01;
                    pc[j] = (float)cos(angle);
                    ps[j] = (float)sin(angle);
                }
                ref.rope_bf16(want, px, pc, ps, n);
                for (EACH_LEVEL(isa)) {
                    dspark__kern kern = level(isa);
                    memset(y.map, 0xa5, (size_t)(y.end - y.map));
                    kern.rope_bf16((uint16_t *)(void *)py, px, pc, ps, n);
                    assert_memory_equal(py, want, 4 * n);
                    if (py > y.map) assert_int_equal(py[-1], 0xa5);
                    for (unsigned char *b = py + 4 * n; b < y.end; b++)
                        assert_int_equal(*b, 0xa5);
                    memcpy(py, px, 4 * n); /* in place */
                    kern.rope_bf16((uint16_t *)(void *)py, py, pc, ps, n);
                    assert_memory_equal(py, want, 4 * n);
                }
                if (class != NORMAL) continue;
                for (size_t j = 0; j < n; j++) {
                    double a = dspark__bf16_to_f32(dspark__load_u16(px + 4 * j));
                    double b = dspark__bf16_to_f32(dspark__load_u16(px + 4 * j + 2));
                    double even = a * pc[j] - b * ps[j], odd = b * pc[j] + a * ps[j];
                    double slack = (fabs(a) + fabs(b)) * 0x1p-22;
                    assert_true(fabs(dspark__bf16_to_f32(want[2 * j]) - even) <=
                                fabs(even) * 0x1p-8 + slack);
                    assert_true(fabs(dspark__bf16_to_f32(want[2 * j + 1]) - odd) <=
                                fabs(odd) * 0x1p-8 + slack);
                }
            }
        }
    }
    unfence(&x);
    unfence(&c);
    unfence(&s);
    unfence(&y);
}

/* All 65536 inputs at every scale, then lengths and alignments. */
static void test_fp8(void **state)
{
    (void)state;
    static const float SCALES[] = {1.0f, 0.5f, 3.0f, 0.0371f, 1e-4f, 448.0f, 0x1p-149f, 0x1.8p-140f,
                                   FLT_MIN, 0x1p-126f * 3, FLT_MAX, 0x1p127f, 1.0f / 3,
                                   0x1.fffffep0f};
    enum { ALL = 65536, N = sizeof SCALES / sizeof SCALES[0] };
    fenced x = fence(2 * ALL + 4), y = fence(ALL + 4);
    static uint8_t want[ALL];
    dspark__kern ref = level(DSPARK_ISA_REF);
    for (size_t s = 0; s < N; s++) {
        for (int e5m2 = 0; e5m2 < 2; e5m2++) {
            unsigned char *px = x.end - 2 * ALL - s % 4, *py = y.end - ALL - s % 3;
            for (uint32_t i = 0; i < ALL; i++) memcpy(px + 2 * i, &(uint16_t){(uint16_t)i}, 2);
            const uint16_t *source = (const uint16_t *)(void *)px;
            (e5m2 ? ref.fp8_e5m2 : ref.fp8_e4m3)(want, source, ALL, SCALES[s]);
            for (EACH_LEVEL(isa)) {
                dspark__kern kern = level(isa);
                (e5m2 ? kern.fp8_e5m2 : kern.fp8_e4m3)(py, source, ALL, SCALES[s]);
                assert_memory_equal(py, want, ALL);
            }
        }
    }
    for (size_t i = 0; i < N_SIZES; i++) {
        for (size_t shift = 0; shift < 4; shift++) {
            size_t n = SIZES[i];
            unsigned char *px = x.end - 2 * n - shift, *py = y.end - n - (3 - shift);
            const uint16_t *source = (const uint16_t *)(void *)px;
            fill_bf16(px, n, NORMAL);
            for (EACH_LEVEL(isa)) {
                dspark__kern kern = level(isa);
                memset(y.map, 0xa5, (size_t)(y.end - y.map));
                ref.fp8_e4m3(want, source, n, 0.3f);
                kern.fp8_e4m3(py, source, n, 0.3f);
                assert_memory_equal(py, want, n);
                ref.fp8_e5m2(want, source, n, 0.3f);
                kern.fp8_e5m2(py, source, n, 0.3f);
                assert_memory_equal(py, want, n);
                assert_int_equal(py[-1], 0xa5);
                for (unsigned char *b = py + n; b < y.end; b++) assert_int_equal(*b, 0xa5);
            }
        }
    }
    unfence(&x);
    unfence(&y);
}

static void test_absmax_and_finite(void **state)
{
    (void)state;
    fenced x = fence(2 * MOST + 4);
    static const uint16_t BAD[] = {0x7f80, 0xff80, 0x7fc0, 0xff81};
    for (size_t i = 0; i < N_SIZES; i++) {
        for (size_t shift = 0; shift < 4; shift++) {
            size_t n = SIZES[i];
            unsigned char *px = x.end - 2 * n - shift;
            const uint16_t *source = (const uint16_t *)(void *)px;
            float most = 0;
            fill_bf16(px, n, ANY_FINITE);
            if (n > 0) memcpy(px + 2 * (next_random() % n), &(uint16_t){0xff7f}, 2);
            for (size_t j = 0; j < n; j++)
                most = fmaxf(most, fabsf(dspark__bf16_to_f32(dspark__load_u16(px + 2 * j))));
            for (int isa = DSPARK_ISA_REF; isa <= (int)dspark__isa_best(); isa++) {
                dspark__kern kern = level(isa);
                assert_true(kern.absmax_bf16(source, n) == most);
                assert_int_equal(kern.finite_bf16(px, n), 1);
                for (size_t j = 0; j < n; j++) { /* one bad element anywhere is found */
                    uint16_t saved = dspark__load_u16(px + 2 * j);
                    memcpy(px + 2 * j, &BAD[j % 4], 2);
                    assert_int_equal(kern.finite_bf16(px, n), 0);
                    memcpy(px + 2 * j, &(uint16_t){0x8000}, 2); /* one element fewer */
                    float rest = 0;
                    for (size_t e = 0; n <= 33 && e < n; e++)
                        rest = fmaxf(rest, fabsf(dspark__bf16_to_f32(
                                               dspark__load_u16(px + 2 * e))));
                    if (n <= 33) assert_true(kern.absmax_bf16(source, n) == rest);
                    memcpy(px + 2 * j, &saved, 2);
                }
            }
        }
    }
    unfence(&x);
}

#if defined(__SSE2__)
/* Kernels that flush put the environment back. */
static void test_environment(void **state)
{
    (void)state;
    _Alignas(64) static uint16_t panel[96], x[2], out[48];
    for (int isa = DSPARK_ISA_REF; isa <= (int)dspark__isa_best(); isa++) {
        dspark__kern kern = level(isa);
        dspark__gemm_bf16 g = {.x = x, .x_stride = 4, .n_rows = 1, .panels = panel,
                               .panel_stride = 96, .n_panels = 1, .k = 2, .first = 1, .last = 1,
                               .out = out, .out_stride = 48, .n_out = 48};
        dspark__fpenv_enter();
        kern.gemm_bf16(&g);
        assert_int_equal(_mm_getcsr() & 0xffc0u, DSPARK__MXCSR_DEFAULT & 0xffc0u);
        dspark__fpenv_leave(DSPARK__MXCSR_DEFAULT);
    }
}
#else
static void test_environment(void **state)
{
    (void)state;
    skip();
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_select),
        cmocka_unit_test(test_pack),
        cmocka_unit_test(test_gemm_answers),
        cmocka_unit_test(test_gemm_shapes),
        cmocka_unit_test(test_gemm_blocks),
        cmocka_unit_test(test_gemm_every_rows),
        cmocka_unit_test(test_gemm_flush),
        cmocka_unit_test(test_gemm_wide),
        cmocka_unit_test(test_gemm_bound),
        cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_fp8),
        cmocka_unit_test(test_absmax_and_finite),
        cmocka_unit_test(test_environment),
    };
    print_message("seed %llx\n", (unsigned long long)seed);
    return cmocka_run_group_tests_name("kern", tests, NULL, NULL);
}
