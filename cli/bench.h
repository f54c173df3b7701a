/* What a measurement of `dspark bench` is, and how it is shown. bench.c measures, bench_formats.c
 * makes the models of --formats, bench_machine.c asks the system and judges the run, bench_report.c
 * prints table, CSV and JSON, bench_plot.c draws. */
#ifndef DSPARK_CLI_BENCH_H
#define DSPARK_CLI_BENCH_H

#include <stdint.h>

#include "dspark/dspark.h"

/* Stages: the three paths from states to cache, by the library's numbers; then what begins at the
 * taps: the states alone, and the whole way to the cache by the one pass and by the full path. */
#define BENCH_N_PATHS 3
#define BENCH_STATES 3
#define BENCH_WHOLE_ONEPASS 4
#define BENCH_WHOLE_FULL 5
#define BENCH_N_STAGES 6
/* What is timed in turn is a lane: a stage, or (with --formats) the one pass over weights of one
 * format, BENCH_N_STAGES and on. Without --formats the lanes are the stages. */
#define BENCH_MAX_FORMATS (DSPARK_FORMAT_COUNT - 1)
#define BENCH_N_LANES (BENCH_N_STAGES + BENCH_MAX_FORMATS)

/* One stage at one number of positions. Times in seconds a call. */
typedef struct bench_cell {
    int measured;
    int cold;            /* weights come from memory: they were pushed out, or never fit */
    uint64_t n_repeats;
    double p50, p99, best;
    double byte_share;   /* of a format: ratio over (weight bytes of bf16 / of the format); 0 = unknown */
    double ratio;        /* p50 / p50 of the one pass over the same way; of a format: p50 of bf16 /
                          * p50. 0 = nothing to compare */
    double flops;        /* of one call */
    double bytes;        /* weights, inputs and outputs of one call, each once */
    double read_gbs;     /* the read probe that this cell is held against */
    double roofline;     /* max(bytes / read probe, flops / compute probe) */
} bench_cell;

typedef struct bench_row {
    uint64_t n_tokens;
    int cold;            /* caches are emptied before each call */
    bench_cell cells[BENCH_N_LANES];
} bench_row;

typedef struct bench_result {
    const char *checkpoint;
    char fingerprint[33];
    const dspark_config *config;
    int synthetic;             /* the checkpoint was made for this run */
    char cpu[128];
    const char *isa;
    uint32_t n_threads;
    uint32_t n_processors;
    uint64_t cache_bytes;       /* last-level caches of the machine, together; 0 = unknown */
    int stages[BENCH_N_LANES];  /* which lanes are measured */
    double weight_bytes[BENCH_N_LANES];
    dspark_format formats[BENCH_MAX_FORMATS]; /* of the lanes after the stages */
    uint64_t resident_bytes[BENCH_MAX_FORMATS]; /* of their models, all parts */
    size_t n_formats;           /* 0 = the stages are measured, not formats */
    double compute_gflops[2];   /* before, after */
    double read_gbs[2];         /* over the big buffer: before, after */
    double hot_gbs[BENCH_N_LANES][2]; /* over as many bytes as the stage has weights, again and
                                        * again: before, after; 0 where no cell needs it */
    uint64_t buffer_bytes;
    double load[2];             /* of one minute: before, after */
    double steal_percent;       /* of processor time during the run; negative when unknown */
    double seconds;
    bench_row *rows;
    size_t n_rows;
} bench_result;

extern const char *const bench_stage_names[BENCH_N_STAGES];
/* The stage's name, or the format's. */
const char *bench_lane_name(const bench_result *r, int lane);

/* The better of the probes before and after. */
double bench_limit(const double probes[2]);

/* ---- formats ---- */

/* "bf16,int8" into formats and n_formats. 0 for a name that is unknown or there twice. */
int bench_read_formats(const char *text, bench_result *r);
/* Open the context part of `source` in a format: `source` itself for a plain checkpoint and bf16,
 * else a copy that is written to `folder` and left there. kv_bytes: what the one pass reads of
 * weights. */
dspark_status bench_open_format(dspark_model **model, uint64_t *kv_bytes, const char *source,
                                const char *folder, dspark_format format, uint32_t n_threads,
                                dspark_error *err);

/* ---- the draft step ---- */

typedef struct bench_draft_args {
    const char *checkpoint, *target;
    const char *contexts; /* "4096,65536" */
    uint32_t n_threads;
    int isa;
    uint64_t repeat;      /* 1 to 200 */
    int json;
} bench_draft_args;
/* Measure a block over each context and print; an exit code. */
int bench_draft(const bench_draft_args *a);

/* ---- the machine ---- */

void bench_read_cpu_name(char *name, size_t size);
/* Bytes of all last-level caches together, 0 when the system does not tell. */
uint64_t bench_read_cache_bytes(void);
/* Ticks that the hypervisor took away, and all ticks; 0 when unknown. */
int bench_read_steal(double *steal, double *total);
/* Of one minute; negative when unknown. */
double bench_read_load(void);
uint32_t bench_read_processors(void);

/* Why figures of this run should not be trusted; no reasons when they may be. */
#define BENCH_MAX_REASONS 12
typedef struct bench_verdict {
    size_t n_reasons;
    char reasons[BENCH_MAX_REASONS][128];
} bench_verdict;
void bench_judge(const bench_result *r, bench_verdict *verdict);

/* ---- showing ---- */

int bench_print_text(const bench_result *r);
int bench_print_json(const bench_result *r);
/* Write to a temporary name and rename; return an exit code. */
int bench_write_csv(const bench_result *r, const char *path);
int bench_write_svg(const bench_result *r, const char *path);

#endif
