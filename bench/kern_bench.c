/* Times gemm_bf16 on one thread with cold weights against this machine's limits: a plain read of
 * the same bytes and the register-only peak, all interleaved in one process, medians. A tool for
 * whoever changes a kernel; not part of ctest, and no judge of the whole projection.
 *
 * kern_bench [isa 0-4] [rounds] [panels per call] [k per call] [rows per call] [n,n,...]
 * Rows up to FEW take one call over the whole k; above, blocks of k with partial sums, as
 * model/merged_linear.c does it. */
#include "base/fpenv.h"
#include "kern/kern.h"
#include "timing.h"

#include <string.h>

enum { K = 7168, N_PANELS = 60, N_COPIES = 6, MOST_ROWS = 512, FEW = 16, MOST_ROUNDS = 99 };

typedef struct bench {
    dspark__kern kern;
    uint16_t *x, *out;
    uint16_t *panels; /* [N_COPIES][N_PANELS][k/2][48][2]: more than any cache holds */
    float *acc;
    size_t panels_per_call, k_per_call, rows_per_call;
} bench;

static uint16_t random_bf16(uint64_t *s)
{
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    return (uint16_t)((*s & 0x807fu) | ((118 + (*s >> 20) % 8) << 7));
}

static void run_rows(const bench *b, const uint16_t *panels, const uint16_t *x, uint16_t *out,
                     size_t n_rows)
{
    const size_t stride = dspark__panel_elements(K);
    size_t k_step = n_rows <= FEW ? K : b->k_per_call;
    for (size_t p = 0; p < N_PANELS; p += b->panels_per_call) {
        size_t n = N_PANELS - p < b->panels_per_call ? N_PANELS - p : b->panels_per_call;
        for (size_t k = 0; k < K; k += k_step) {
            size_t n_k = K - k < k_step ? K - k : k_step;
            dspark__gemm_bf16 g = {.x = x + k, .x_stride = 2 * K, .n_rows = n_rows,
                                   .panels = panels + p * stride + k * DSPARK__PANEL,
                                   .panel_stride = stride, .n_panels = n, .k = n_k,
                                   .acc = b->acc, .first = k == 0, .last = k + n_k == K,
                                   .out = out + p * DSPARK__PANEL,
                                   .out_stride = N_PANELS * DSPARK__PANEL,
                                   .n_out = n * DSPARK__PANEL};
            if (n_rows > FEW && k + n_k < K) {
                g.prefetch = g.panels + n_k * DSPARK__PANEL;
                g.prefetch_bytes = n_k * DSPARK__PANEL * 2;
            }
            b->kern.gemm_bf16(&g);
        }
    }
}

static void run_all(const bench *b, size_t copy, size_t n_rows)
{
    const uint16_t *panels = b->panels + copy * N_PANELS * dspark__panel_elements(K);
    size_t step = n_rows <= b->rows_per_call ? n_rows : b->rows_per_call;
    for (size_t row = 0; row < n_rows; row += step) {
        size_t n = n_rows - row < step ? n_rows - row : step;
        run_rows(b, panels, b->x + row * K, b->out + row * N_PANELS * DSPARK__PANEL, n);
    }
}

/* A plain read in order of the bytes that one pass over the weights takes. */
static double read_all(const bench *b, size_t copy)
{
    size_t n = N_PANELS * dspark__panel_elements(K);
    return read_bytes(b->panels + copy * n, n * 2);
}

static void measure(const bench *b, size_t n_rows, size_t rounds)
{
    static size_t rotation;
    double run[MOST_ROUNDS], read[MOST_ROUNDS], peak[MOST_ROUNDS];
    double flops = 2.0 * (double)n_rows * K * N_PANELS * DSPARK__PANEL;
    double bytes = 2.0 * K * N_PANELS * DSPARK__PANEL;
    for (size_t r = 0; r < rounds; r++) {
        double t = now();
        run_all(b, rotation++ % N_COPIES, n_rows);
        run[r] = now() - t;
        read[r] = read_all(b, rotation++ % N_COPIES);
        t = now();
        double done = b->kern.probe_flops(200000);
        peak[r] = done / (now() - t);
    }
    double t = median(run, rounds), t_read = median(read, rounds), f = median(peak, rounds);
    double limit = t_read > flops / f ? t_read : flops / f;
    printf("%5zu %9.3f ms %8.1f GFLOP/s = %4.2f peak %7.2f GB/s = %4.2f read   %4.2f roofline\n",
           n_rows, t * 1e3, flops / t * 1e-9, flops / t / f, bytes / t * 1e-9, t_read / t,
           limit / t);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static char every[] = "1,2,3,4,5,6,7,8,9,10,12,15,16,17,24,32,33,64,128,256,512";
    bench b = {.panels_per_call = 3, .k_per_call = 1792, .rows_per_call = 128};
    dspark_error err;
    int isa = argc > 1 ? atoi(argv[1]) : 0;
    size_t rounds = argc > 2 ? strtoul(argv[2], NULL, 10) : 15;
    if (argc > 3) b.panels_per_call = strtoul(argv[3], NULL, 10);
    if (argc > 4) b.k_per_call = strtoul(argv[4], NULL, 10) / 2 * 2;
    if (argc > 5) b.rows_per_call = strtoul(argv[5], NULL, 10);
    char *list = argc > 6 ? argv[6] : every;
    if (rounds < 1 || rounds > MOST_ROUNDS || b.panels_per_call < 1 || b.k_per_call < 2 ||
        b.rows_per_call < 1 || b.panels_per_call > N_PANELS || b.rows_per_call > MOST_ROWS) {
        fprintf(stderr, "kern_bench: bad argument\n");
        return 2;
    }
    if (dspark__kern_select(&b.kern, (dspark_isa)isa, &err) != DSPARK_OK) {
        fprintf(stderr, "kern_bench: %s\n", err.message);
        return 4;
    }
    dspark__fpenv_enter();
    const size_t n_weights = N_PANELS * dspark__panel_elements(K);
    uint64_t seed = 12345;
    b.x = take((size_t)MOST_ROWS * K * 2);
    b.out = take((size_t)MOST_ROWS * N_PANELS * DSPARK__PANEL * 2);
    b.panels = take(N_COPIES * n_weights * 2);
    b.acc = take((size_t)MOST_ROWS * N_PANELS * DSPARK__PANEL * sizeof *b.acc);
    for (size_t i = 0; i < (size_t)MOST_ROWS * K; i++) b.x[i] = random_bf16(&seed);
    for (size_t i = 0; i < n_weights; i++) b.panels[i] = random_bf16(&seed);
    for (size_t c = 1; c < N_COPIES; c++)
        memcpy(b.panels + c * n_weights, b.panels, n_weights * 2);
    memset(b.out, 0, (size_t)MOST_ROWS * N_PANELS * DSPARK__PANEL * 2);
    memset(b.acc, 0, (size_t)MOST_ROWS * N_PANELS * DSPARK__PANEL * sizeof *b.acc);
    printf("%s, %d panels of 48 x %d, per call %zu panels x %zu of k x %zu rows, %zu rounds\n",
           dspark__isa_name(b.kern.isa), (int)N_PANELS, (int)K, b.panels_per_call, b.k_per_call,
           b.rows_per_call, rounds);
    for (char *at = list; *at;) {
        size_t n = strtoul(at, &at, 10);
        if (n < 1 || n > MOST_ROWS) {
            fprintf(stderr, "kern_bench: rows must be 1..%d\n", (int)MOST_ROWS);
            return 2;
        }
        measure(&b, n, rounds);
        if (*at == ',') at++;
    }
    return 0;
}
