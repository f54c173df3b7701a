/* Counts the instructions of one call of each key kernel by single-stepping a child process (ptrace), so that a
 * change of a kernel shows on any machine, quiet or not, without hardware counters. Works for every instruction
 * set that the machine has. Counts depend on compiler and flags: the output names the compiler.
 *
 * count_instructions [part of a name]      prints "kernel level instructions" lines
 * bench/run --instructions compares with bench/results/instructions.txt. Exit code 4: ptrace is forbidden here. */
#include "base/fpenv.h"
#include "base/numfmt.h"
#include "kern/kern.h"
#include "timing.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

/* Small: a step costs some 50 us where a hypervisor watches. The inner loops are what counts. */
enum { K = 256, MOST_ROWS = 8, FORBIDDEN = 4 };

typedef struct job {
    dspark__kern kern;
    dspark__code_format nvfp4, fp8;
    uint16_t *x, *panels, *out, *block, *p;
    uint8_t *codes;
    float *acc, *m, *l, *a;
    uint32_t *valid;
} job;

/* ---- the kernels ---- */

static void call_nothing(const job *j)
{
    (void)j;
}

/* last: all of k, else its beginning, whose sums are kept. */
static void call_gemm(const job *j, size_t n_rows, int last)
{
    dspark__gemm_bf16 g = {.x = j->x, .x_stride = 2 * K, .n_rows = n_rows, .panels = j->panels,
                           .panel_stride = dspark__panel_elements(K), .n_panels = 1, .k = K, .acc = j->acc,
                           .first = 1, .last = last, .out = j->out, .out_stride = DSPARK__PANEL,
                           .n_out = DSPARK__PANEL};
    j->kern.gemm_bf16(&g);
}

static void call_gemm_1(const job *j)
{
    call_gemm(j, 1, 1);
}

static void call_gemm_8(const job *j)
{
    call_gemm(j, 8, 1);
}

static void call_gemm_8_begin(const job *j)
{
    call_gemm(j, 8, 0);
}

static void call_dot(const job *j, size_t n_rows)
{
    dspark__dot_codes d = {.x = j->x, .x_stride = 2 * K, .n_rows = n_rows, .codes = j->codes,
                           .n_panels = 1,
                           .scales = j->codes + dspark__code_panel_bytes(&j->nvfp4, K), .format = &j->nvfp4,
                           .k = K, .acc = j->acc};
    j->kern.dot_codes(&d);
}

static void call_dot_1(const job *j)
{
    call_dot(j, 1);
}

static void call_dot_7(const job *j)
{
    call_dot(j, 7);
}

static void call_decode_fp8(const job *j)
{
    j->kern.decode(j->block, j->codes, NULL, &j->fp8, 0, 128);
}

static void call_softmax(const job *j)
{
    dspark__softmax_piece s = {.scores = j->acc, .n_rows = 2, .n_valid = j->valid, .scale = 0.1f, .m = j->m,
                               .l = j->l, .a = j->a, .p = j->p};
    j->kern.softmax_piece(&s);
}

static const struct {
    const char *name;
    void (*call)(const job *j);
    size_t n_dot_rows; /* of nvfp4 that must have the direct way */
} kernels[] = {
    {"gemm_bf16_n1_k256", call_gemm_1, 0},
    {"gemm_bf16_n8_k256", call_gemm_8, 0},
    {"gemm_bf16_n8_begin_k256", call_gemm_8_begin, 0},
    {"dot_codes_nvfp4_n1_k256", call_dot_1, 1},
    {"dot_codes_nvfp4_n7_k256", call_dot_7, 7},
    {"decode_fp8_k128", call_decode_fp8, 0},
    {"softmax_piece_n2", call_softmax, 0},
};
#define N_KERNELS (sizeof kernels / sizeof *kernels)

static uint64_t next_random(void)
{
    static uint64_t s = 12345;
    s ^= s << 13;
    s ^= s >> 7;
    return s ^= s << 17;
}

static void fill_bf16(uint16_t *v, size_t n)
{
    for (size_t i = 0; i < n; i++) v[i] = (uint16_t)((next_random() & 0x807fu) | 0x3f00u);
}

static void make_job(job *j)
{
    j->nvfp4 = (dspark__code_format){.bits = 4, .scale = DSPARK__CODE_E4M3, .block = 16};
    j->fp8 = (dspark__code_format){.bits = 8, .scale = DSPARK__CODE_PLAIN};
    for (unsigned c = 0; c < 16; c++)
        j->nvfp4.table[c] = dspark__f32_to_bf16(dspark__e2m1_to_f32((uint8_t)c));
    for (unsigned c = 0; c < 256; c++)
        j->fp8.table[c] = dspark__f32_to_bf16(dspark__e4m3_to_f32((uint8_t)c));
    j->x = take(MOST_ROWS * K * 2);
    j->panels = take(dspark__panel_elements(K) * 2);
    j->out = take(MOST_ROWS * DSPARK__PANEL * 2);
    j->block = take(128 * DSPARK__PANEL * 2);
    j->p = take(MOST_ROWS * DSPARK__PIECE * 2);
    j->codes = take(2 * K * DSPARK__PANEL);
    j->acc = take(MOST_ROWS * DSPARK__PIECE * sizeof(float));
    j->m = take(3 * MOST_ROWS * sizeof(float));
    j->l = j->m + MOST_ROWS;
    j->a = j->l + MOST_ROWS;
    j->valid = take(MOST_ROWS * sizeof *j->valid);
    fill_bf16(j->x, MOST_ROWS * K);
    fill_bf16(j->panels, dspark__panel_elements(K));
    for (size_t i = 0; i < 2 * (size_t)K * DSPARK__PANEL; i++) /* codes, or scales between 2^-4 and 2^2 */
        j->codes[i] = (uint8_t)(0x18 + next_random() % 0x30);
    for (size_t i = 0; i < MOST_ROWS; i++) {
        j->valid[i] = DSPARK__PIECE;
        j->m[i] = -1;
        j->l[i] = 1;
    }
}

/* ---- counting ---- */

/* The child: one call to have every page and branch target there, then one between two stops. */
static void run_child(job *j, void (*call)(const job *j))
{
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(FORBIDDEN);
    dspark__fpenv_enter();
    call(j);
    for (size_t i = 0; i < MOST_ROWS * DSPARK__PIECE; i++) j->acc[i] = (float)(i % 97) * 0.01f;
    raise(SIGSTOP);
    call(j);
    raise(SIGSTOP);
    _exit(0);
}

/* Instructions from one stop to the other, the way there and back included; -1 when it cannot be done. */
static long count(job *j, void (*call)(const job *j))
{
    long n = 0;
    int status;
    pid_t child = fork();
    if (child < 0) return -1;
    if (child == 0) run_child(j, call);
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status) || WSTOPSIG(status) != SIGSTOP) return -1;
    for (;;) {
        if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) != 0 || waitpid(child, &status, 0) != child) return -1;
        if (!WIFSTOPPED(status)) return -1;
        if (WSTOPSIG(status) == SIGSTOP) break;
        if (WSTOPSIG(status) != SIGTRAP) return -1;
        n++;
    }
    ptrace(PTRACE_KILL, child, NULL, NULL);
    waitpid(child, &status, 0);
    return n;
}

int main(int argc, char **argv)
{
    static job j;
    const char *part = argc > 1 ? argv[1] : "";
    long empty;
    make_job(&j);
    dspark__kern_select(&j.kern, DSPARK_ISA_REF, NULL);
    empty = count(&j, call_nothing);
    if (empty < 0) {
        fprintf(stderr, "count_instructions: ptrace is forbidden here (%s)\n", strerror(errno));
        return FORBIDDEN;
    }
#ifdef __VERSION__
    printf("# compiler " __VERSION__ "\n");
#endif
    for (int isa = DSPARK_ISA_AVX2; isa <= DSPARK_ISA_AVX512BF16; isa++) {
        if (!dspark__isa_available((dspark_isa)isa)) {
            printf("# %s: not on this machine\n", dspark__isa_name((dspark_isa)isa));
            continue;
        }
        if (dspark__kern_select(&j.kern, (dspark_isa)isa, NULL) != DSPARK_OK) return 5;
        for (size_t k = 0; k < N_KERNELS; k++) {
            long n;
            if (!strstr(kernels[k].name, part)) continue;
            if (j.kern.dot_rows[0][DSPARK__CODE_E4M3] < kernels[k].n_dot_rows)
                continue; /* this level never takes that way */
            if ((n = count(&j, kernels[k].call)) < 0) {
                fprintf(stderr, "count_instructions: %s ended early\n", kernels[k].name);
                return 5;
            }
            printf("%-26s %-11s %ld\n", kernels[k].name, dspark__isa_name((dspark_isa)isa), n - empty);
            fflush(stdout);
        }
    }
    return 0;
}
