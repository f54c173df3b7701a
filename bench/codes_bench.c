/* Times packed codes on one thread: decode alone on codes that caches hold, and decode with
 * gemm_bf16 over cold codes, against a plain read of the same bytes and the same product on bf16
 * panels. Interleaved in one process, medians. A tool for whoever changes a kernel; not part of
 * ctest, and no judge of the whole projection.
 *
 * codes_bench [isa 0-4] [rounds] [k per block] [format or "all"] [n,n,...]
 * Each block of k of one panel is expanded into a buffer and multiplied at once. */
#include "base/fpenv.h"
#include "base/numfmt.h"
#include "kern/kern.h"
#include "timing.h"

#include <string.h>

enum { K = 7168, N_PANELS = 60, N_COPIES = 6, MOST_ROWS = 128, MOST_ROUNDS = 99, MOST_DOT_ROWS = 128 };

typedef enum values { E4M3, E5M2, INT, E2M1 } values;

static const struct form {
    const char *name;
    uint32_t bits;
    values values;
    dspark__code_scale scale;
    uint32_t block;
} FORMS[] = {
    {"fp8_e4m3", 8, E4M3, DSPARK__CODE_PLAIN, 0},   {"fp8_e5m2", 8, E5M2, DSPARK__CODE_PLAIN, 0},
    {"int8", 8, INT, DSPARK__CODE_PLAIN, 0},        {"mxfp8", 8, E4M3, DSPARK__CODE_E8M0, 32},
    {"int8_offset", 8, INT, DSPARK__CODE_OFFSET, 128}, {"int4", 4, INT, DSPARK__CODE_PLAIN, 0},
    {"int4_offset", 4, INT, DSPARK__CODE_OFFSET, 32},  {"mxfp4", 4, E2M1, DSPARK__CODE_E8M0, 32},
    {"nvfp4", 4, E2M1, DSPARK__CODE_E4M3, 16},
};

typedef struct bench {
    dspark__kern kern;
    dspark__code_format format;
    uint16_t *x, *out, *block, *panels;
    uint8_t *codes; /* [N_COPIES][N_PANELS]: codes of a panel, then its scales; cold */
    size_t panel_bytes, k_per_block;
    float *acc;
} bench;

static uint64_t next_random(void)
{
    static uint64_t s = 12345;
    s ^= s << 13;
    s ^= s >> 7;
    return s ^= s << 17;
}

static uint16_t table_entry(const struct form *form, unsigned c)
{
    switch (form->values) {
    case E4M3: return dspark__f32_to_bf16(dspark__e4m3_to_f32((uint8_t)c));
    case E5M2: return dspark__f32_to_bf16(dspark__e5m2_to_f32((uint8_t)c));
    case E2M1: return dspark__f32_to_bf16(dspark__e2m1_to_f32((uint8_t)c));
    default: break;
    }
    int n = 1 << form->bits;
    return dspark__f32_to_bf16((float)((int)c < n / 2 ? (int)c : (int)c - n));
}

static void fill_codes(bench *b, const struct form *form)
{
    b->format = (dspark__code_format){.bits = form->bits, .scale = form->scale,
                                      .block = form->block};
    for (unsigned c = 0; c < 1u << form->bits; c++) b->format.table[c] = table_entry(form, c);
    size_t n_codes = dspark__code_panel_bytes(&b->format, K);
    size_t n_scales = dspark__code_scale_bytes(&b->format, K);
    b->panel_bytes = (n_codes + n_scales + 63) / 64 * 64;
    for (size_t p = 0; p < N_PANELS * N_COPIES; p++) {
        uint8_t *panel = b->codes + p * b->panel_bytes;
        if (p >= N_PANELS) {
            memcpy(panel, panel - N_PANELS * b->panel_bytes, b->panel_bytes);
            continue;
        }
        for (size_t i = 0; i < n_codes; i += 8) {
            uint64_t r = next_random();
            if (form->values == E4M3 || form->values == E5M2) r &= 0xbfbfbfbfbfbfbfbfu; /* no NaN */
            memcpy(panel + i, &r, 8);
        }
        for (size_t i = 0; i < n_scales; i++) {
            uint8_t r = (uint8_t)(next_random() >> 20);
            panel[n_codes + i] = form->scale == DSPARK__CODE_E4M3 ? (uint8_t)(0x48 + r % 54) :
                                 form->scale == DSPARK__CODE_E8M0 ? (uint8_t)(112 + r % 16) :
                                 form->bits == 4 ? (uint8_t)(r % 16 - 8) : r;
        }
    }
}

static const uint8_t *scales_of(const bench *b, const uint8_t *panel)
{
    return panel + dspark__code_panel_bytes(&b->format, K);
}

static void decode_all(const bench *b, size_t copy)
{
    for (size_t p = 0; p < N_PANELS; p++) {
        const uint8_t *panel = b->codes + (copy * N_PANELS + p) * b->panel_bytes;
        for (size_t k = 0; k < K; k += b->k_per_block) {
            size_t n_k = K - k < b->k_per_block ? K - k : b->k_per_block;
            b->kern.decode(b->block, panel, scales_of(b, panel), &b->format, k, n_k);
        }
    }
}

/* panels: bf16 panels to multiply instead of codes, or NULL. */
static void multiply_all(const bench *b, size_t copy, size_t n_rows, const uint16_t *panels)
{
    const size_t stride = dspark__panel_elements(K), k_step = panels ? K : b->k_per_block;
    for (size_t p = 0; p < N_PANELS; p++) {
        const uint8_t *panel = b->codes + (copy * N_PANELS + p) * b->panel_bytes;
        for (size_t k = 0; k < K; k += k_step) {
            size_t n_k = K - k < k_step ? K - k : k_step;
            if (!panels)
                b->kern.decode(b->block, panel, scales_of(b, panel), &b->format, k, n_k);
            dspark__gemm_bf16 g = {.x = b->x + k, .x_stride = 2 * K, .n_rows = n_rows,
                                   .panels = panels ? panels + p * stride : b->block,
                                   .panel_stride = stride, .n_panels = 1, .k = n_k,
                                   .acc = b->acc, .first = k == 0, .last = k + n_k == K,
                                   .out = b->out + p * DSPARK__PANEL,
                                   .out_stride = N_PANELS * DSPARK__PANEL,
                                   .n_out = DSPARK__PANEL};
            b->kern.gemm_bf16(&g);
        }
    }
}

/* By dot_codes, with K-groups of `group`, three panels at a time. */
static void dot_all(const bench *b, size_t copy, size_t n_rows, size_t group)
{
    const size_t side = n_rows <= 16 ? 3 : 1;
    for (size_t p = 0; p < N_PANELS; p += side) {
        const uint8_t *panel = b->codes + (copy * N_PANELS + p) * b->panel_bytes;
        dspark__dot_codes d = {.x = b->x, .x_stride = 2 * K, .n_rows = n_rows, .codes = panel,
                               .n_panels = side, .code_stride = b->panel_bytes,
                               .scale_stride = b->panel_bytes,
                               .scales = scales_of(b, panel), .format = &b->format, .k = K,
                               .group = group, .group_scales = b->acc + 3 * MOST_ROWS * DSPARK__PANEL,
                               .acc = b->acc};
        b->kern.dot_codes(&d);
        for (size_t i = 0; i < side; i++)
            b->kern.finish(b->out + (p + i) * DSPARK__PANEL, N_PANELS * DSPARK__PANEL,
                           b->acc + i * n_rows * DSPARK__PANEL, NULL, n_rows, DSPARK__PANEL);
    }
}

static double read_all(const bench *b, size_t copy)
{
    const size_t n_bytes = N_PANELS * b->panel_bytes;
    return read_bytes(b->codes + copy * n_bytes, n_bytes / 64 * 64);
}

static void measure_decode(const bench *b, size_t rounds)
{
    double warm[MOST_ROUNDS], cold[MOST_ROUNDS], read[MOST_ROUNDS];
    const double n_weights = (double)N_PANELS * DSPARK__PANEL * K;
    size_t n_k = b->k_per_block < K / 8 ? b->k_per_block : K / 8, n_calls = K / 8 / n_k;
    for (size_t r = 0; r < rounds; r++) { /* warm: the first eighth of a panel */
        double t = now();
        for (size_t i = 0; i < 16 * n_calls; i++)
            b->kern.decode(b->block, b->codes, scales_of(b, b->codes), &b->format,
                           i % n_calls * n_k, n_k);
        warm[r] = (now() - t) / (double)(16 * n_calls * n_k * DSPARK__PANEL);
        t = now();
        decode_all(b, r % N_COPIES);
        cold[r] = now() - t;
        read[r] = read_all(b, (r + N_COPIES / 2) % N_COPIES);
    }
    double t = median(cold, rounds), t_read = median(read, rounds);
    double bytes = (double)b->panel_bytes * N_PANELS;
    printf("  decode: warm %5.1f Gweights/s; cold %5.1f Gweights/s = %5.2f GB/s = %4.2f read\n",
           1e-9 / median(warm, rounds), n_weights / t * 1e-9, bytes / t * 1e-9, t_read / t);
}

static void measure(const bench *b, size_t n_rows, size_t rounds)
{
    double run[MOST_ROUNDS], dot[MOST_ROUNDS], groups[MOST_ROUNDS], dense[MOST_ROUNDS], read[MOST_ROUNDS];
    const size_t n_weights = N_PANELS * dspark__panel_elements(K);
    for (size_t r = 0; r < rounds; r++) {
        double t = now();
        multiply_all(b, r % N_COPIES, n_rows, NULL);
        run[r] = now() - t;
        dot[r] = groups[r] = 0;
        if (n_rows <= MOST_DOT_ROWS) {
            t = now();
            dot_all(b, (r + 1) % N_COPIES, n_rows, 0);
            dot[r] = now() - t;
            t = now();
            dot_all(b, (r + 2) % N_COPIES, n_rows, 128);
            groups[r] = now() - t;
        }
        t = now();
        multiply_all(b, 0, n_rows, b->panels + r % 2 * n_weights);
        dense[r] = now() - t;
        read[r] = read_all(b, (r + N_COPIES / 2) % N_COPIES);
    }
    double t = median(run, rounds), t_dense = median(dense, rounds);
    double bytes = (double)b->panel_bytes * N_PANELS;
    printf("  %3zu rows: %8.3f ms, %6.2f GB/s of codes = %4.2f read; bf16 %8.3f ms = %4.2f times\n",
           n_rows, t * 1e3, bytes / t * 1e-9, median(read, rounds) / t, t_dense * 1e3, t_dense / t);
    if (n_rows <= MOST_DOT_ROWS)
        printf("            dot_codes %8.3f ms = %4.2f times, in K-groups of 128 %8.3f ms\n",
               median(dot, rounds) * 1e3, t_dense / median(dot, rounds), median(groups, rounds) * 1e3);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static bench b;
    dspark_error err;
    int isa = argc > 1 ? atoi(argv[1]) : 0;
    size_t rounds = argc > 2 ? strtoul(argv[2], NULL, 10) : 15;
    b.k_per_block = argc > 3 ? strtoul(argv[3], NULL, 10) / 8 * 8 : 256;
    const char *form = argc > 4 ? argv[4] : "all", *rows = argc > 5 ? argv[5] : "1,8,64";
    if (rounds < 1 || rounds > MOST_ROUNDS || b.k_per_block < 8 || b.k_per_block > K) {
        fprintf(stderr, "codes_bench: bad argument\n");
        return 2;
    }
    if (dspark__kern_select(&b.kern, (dspark_isa)isa, &err) != DSPARK_OK) {
        fprintf(stderr, "codes_bench: %s\n", err.message);
        return 4;
    }
    dspark__fpenv_enter();
    const size_t n_weights = N_PANELS * dspark__panel_elements(K);
    b.x = take((size_t)MOST_ROWS * K * 2);
    b.out = take((size_t)MOST_ROWS * N_PANELS * DSPARK__PANEL * 2);
    b.block = take(b.k_per_block * DSPARK__PANEL * 2);
    b.panels = take(2 * n_weights * 2);
    b.codes = take(N_COPIES * (n_weights + n_weights / 16));
    b.acc = take((3 * (size_t)MOST_ROWS + K / 8) * DSPARK__PANEL * sizeof *b.acc);
    for (size_t i = 0; i < (size_t)MOST_ROWS * K; i++)
        b.x[i] = (uint16_t)((next_random() & 0x807fu) | 0x3f00u);
    for (size_t i = 0; i < 2 * n_weights; i++)
        b.panels[i] = (uint16_t)((next_random() & 0x807fu) | 0x3f00u);
    printf("%s, %d panels of 48 x %d, blocks of %zu of k, %zu rounds\n",
           dspark__isa_name(b.kern.isa), (int)N_PANELS, (int)K, b.k_per_block, rounds);
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++) {
        if (strcmp(form, "all") != 0 && strcmp(form, FORMS[i].name) != 0) continue;
        fill_codes(&b, &FORMS[i]);
        printf("%s\n", FORMS[i].name);
        measure_decode(&b, rounds);
        for (const char *at = rows; *at;) {
            char *end;
            size_t n = strtoul(at, &end, 10);
            if (n < 1 || n > MOST_ROWS) {
                fprintf(stderr, "codes_bench: rows must be 1..%d\n", (int)MOST_ROWS);
                return 2;
            }
            measure(&b, n, rounds);
            at = *end == ',' ? end + 1 : end;
        }
    }
    return 0;
}
