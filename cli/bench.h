/* What a measurement of `dspark bench` is, and how it is shown. bench.c measures, bench_report.c
 * prints table, CSV and JSON, bench_plot.c draws. */
#ifndef DSPARK_CLI_BENCH_H
#define DSPARK_CLI_BENCH_H

#include <stdint.h>

#include "dspark/dspark.h"

#define BENCH_N_PATHS 3
#define BENCH_N_STAGES 4 /* the paths, then taps -> states */
#define BENCH_STATES 3

/* One stage at one number of tokens. Times in seconds a call. */
typedef struct bench_cell {
    int measured;
    uint64_t n_repeats;
    double p50, p99, best;
    double flops;        /* of one call */
    double bytes;        /* weights, inputs and outputs of one call, each once */
    double read_gbs;     /* the read probe that this cell is held against */
    double roofline;     /* max(bytes / read probe, flops / compute probe) */
} bench_cell;

typedef struct bench_row {
    uint64_t n_tokens;
    int cold;
    double ratio;        /* full / one pass: the median over pairs measured in turn */
    bench_cell cells[BENCH_N_STAGES];
} bench_row;

typedef struct bench_result {
    const char *checkpoint;
    char fingerprint[33];
    const dspark_config *config;
    int synthetic;             /* the checkpoint was made for this run */
    char cpu[128];
    const char *isa;
    uint32_t n_threads;
    int stages[BENCH_N_STAGES]; /* which are measured */
    double compute_gflops[2];   /* before, after */
    double read_gbs[2];         /* over the big buffer: before, after */
    double hot_gbs[BENCH_N_STAGES]; /* over a buffer as large as the stage's weights, read again
                                     * and again */
    uint64_t buffer_bytes;
    double load[2];             /* of one minute: before, after */
    double steal_percent;       /* of processor time during the run; negative when unknown */
    double seconds;
    bench_row *rows;
    size_t n_rows;
} bench_result;

extern const char *const bench_stage_names[BENCH_N_STAGES];

/* The better of the probes before and after. */
double bench_limit(const double probes[2]);

int bench_print_text(const bench_result *r);
int bench_print_json(const bench_result *r);
/* Write to a temporary name and rename; return an exit code. */
int bench_write_csv(const bench_result *r, const char *path);
int bench_write_svg(const bench_result *r, const char *path);

#endif
