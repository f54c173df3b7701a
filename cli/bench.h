/* What a measurement of `dspark bench` is. A report has runs (one number of threads, one instruction set, one
 * pair of probes), a run has rows (one stage at one size). bench.c reads the command line; bench_context.c,
 * bench_draft.c, bench_load.c and bench_growth.c measure, the first two with bench_watch.c beside each call;
 * bench_run.c and bench_machine.c keep the limits and judge; bench_report.c prints; bench_plot.c draws through
 * bench_chart.c. */
#ifndef DSPARK_CLI_BENCH_H
#define DSPARK_CLI_BENCH_H

#include <stdint.h>

#include "args.h"
#include "dspark/dspark.h"
#include "progress.h"
#include "tmp_folder.h"

typedef enum bench_what {
    BENCH_CONTEXT, BENCH_DRAFT, BENCH_LINEAR, BENCH_ATTENTION, BENCH_LOAD, BENCH_GROWTH
} bench_what;
extern const char *const bench_what_names[]; /* ends with NULL */

#define BENCH_MAX_FORMATS (DSPARK_FORMAT_COUNT - 1)
#define BENCH_MAX_CACHES 4
#define BENCH_MAX_ISAS 5
#define BENCH_MAX_REPEATS 1000
#define BENCH_MAX_HOT 16
#define BENCH_MAX_SETTINGS 64

typedef struct bench_list {
    uint64_t *items;
    size_t n;
} bench_list;

typedef struct bench_args {
    int what;
    const char *checkpoint, *target, *prepacked;
    const char *preset;        /* of the checkpoint to make when none is given; NULL = kimi-k3 */
    args_texts settings;       /* and its settings */
    bench_list tokens, contexts, sequences, threads; /* threads 0 = all processors */
    int tokens_given, contexts_given, sequences_given;
    int isas[BENCH_MAX_ISAS];  /* dspark_isa */
    size_t n_isas;
    dspark_format formats[BENCH_MAX_FORMATS];
    size_t n_formats;          /* 0 = the checkpoint as it is */
    int caches[BENCH_MAX_CACHES]; /* dspark_cache_dtype */
    size_t n_caches;
    int path, path_given;
    uint64_t repeat;           /* 0 = as many as fit a few seconds */
    uint64_t buffer;
    int cold, hot;
    int no_states;
    const char *csv, *svg;
    int json;
} bench_args;

/* What a row is held against. */
typedef enum bench_limit_kind {
    BENCH_BY_READ, /* reads that come from memory */
    BENCH_BY_HOT,  /* reads of as many bytes again and again */
    BENCH_BY_COPY, /* memcpy */
    BENCH_BY_SUM,  /* the rooflines of the rows before it, up to the last such row */
    BENCH_BY_NONE
} bench_limit_kind;

/* One stage at one size. Times in seconds a call. */
typedef struct bench_row {
    char stage[32];
    const char *format;  /* of the weights; NULL: the checkpoint's own */
    const char *cache;   /* of the context's entries; NULL: none takes part */
    uint64_t tokens;     /* positions of a call; this and the next three: 0 = does not apply */
    uint64_t context, layers, sequences;
    bench_limit_kind limit;
    size_t hot;          /* BENCH_BY_HOT: which of the run's */
    int warm;            /* BENCH_BY_SUM: those rows are hot */
    uint64_t n_repeats;
    uint64_t n_outliers; /* repeats that took more than twice the median */
    uint64_t n_disturbed; /* tries beside which the threads were not all there (bench_watch.h) */
    uint64_t n_left;     /* those among the repeats; 0 unless they were too many to be left out */
    double best, p50, p99;
    double flops;        /* of one call */
    double bytes;        /* weights, inputs, entries and outputs of one call, each once */
    double weight_bytes; /* 0 = none, or not told apart */
    double limit_gbs;    /* what bytes are held against: reads between the repeats where there are any */
    int watched;         /* limit_gflops comes from probes beside its calls */
    double limit_gflops; /* what flops are held against: those, or the run's */
    double roofline;     /* max(bytes / limit_gbs, flops / limit_gflops); 0 without a limit */
    double ratio;        /* to another row, see ratio_key; 0 = nothing to compare */
    const char *ratio_key;
    double byte_share;   /* ratio over (weight bytes of bf16 / of the format); 0 = unknown */
    uint64_t n_faults;   /* pages that the system had to bring during the first repeat */
    uint64_t peak_bytes; /* resident, at most; 0 = not looked at */
} bench_row;

/* Reads of `bytes` bytes over and over: what weights that stay in caches are held against. */
typedef struct bench_hot {
    char name[32];
    double bytes, gbs[2];
} bench_hot;

typedef struct bench_run {
    const char *part;     /* of --what growth: what grows; else NULL */
    const char *format;   /* of all its rows; NULL: the checkpoint's own, or rows say it */
    uint32_t n_threads;
    dspark_isa isa;
    double compute_gflops[2], read_gbs[2]; /* before, after */
    double best_gflops;   /* that so many threads have shown in this report until its end */
    double copy_gbs[2], fresh_gbs[2]; /* into memory that was used before, or that is new; 0 = not asked for */
    bench_hot hot[BENCH_MAX_HOT];
    size_t n_hot;
    double load[2];       /* of one minute */
    double steal_percent; /* of processor time during the run; negative when unknown */
    double ticks[2];      /* stolen and all, at the beginning */
    double started, seconds;
    uint64_t resident_bytes; /* weights of its models together */
    uint64_t workspace_bytes;
    uint64_t w2_rows[3];  /* of the Markov head in a block: all, those bounded by their codes, those read; or 0 */
    bench_row *rows;
    size_t n_rows, capacity;
} bench_run;

typedef struct bench_report {
    const bench_args *args;
    const char *checkpoint;
    char fingerprint[33];
    dspark_config config;
    int synthetic;           /* the checkpoint was made for this run */
    tmp_folder folder;       /* where it is */
    char cpu[128];
    uint32_t n_processors;
    uint64_t cache_bytes;    /* last-level caches of the machine, together; 0 = unknown */
    uint64_t buffer_bytes;
    unsigned char *buffer;   /* of the probes, in huge pages */
    const char *part;        /* that runs which begin now belong to */
    double again, again_row; /* seconds that are left for taking disturbed repeats again: in all, of this row */
    bench_run **runs;
    size_t n_runs, capacity;
} bench_report;

/* ---- reports and runs ---- */

dspark_status bench_report_open(bench_report *r, const bench_args *a, dspark_error *err);
void bench_report_close(bench_report *r);
/* The model that is measured next; the first one names the report. */
void bench_describe(bench_report *r, const dspark_model *model);

/* Probe the machine and begin a run; it belongs to r. n_threads as it is, not 0. */
dspark_status bench_run_begin(bench_run **run, bench_report *r, dspark_isa isa, uint32_t n_threads,
                              int with_copy, dspark_error *err);
/* From now on the run also knows how fast so many bytes are read from caches. */
dspark_status bench_run_hot(bench_report *r, bench_run *run, const char *name, double bytes,
                            size_t *which, dspark_error *err);
/* A zeroed row named `stage`, valid until the next one; NULL without memory. */
bench_row *bench_run_add(bench_run *run, const char *stage);
/* Probe again and work out the rooflines. */
dspark_status bench_run_end(bench_report *r, bench_run *run, dspark_error *err);

/* Sorts the times. */
void bench_row_times(bench_row *row, double *times, size_t n);
/* Median of n values; sorts them. */
double bench_median(double *values, size_t n);
/* 5 to 200, about four seconds; or what --repeat says. */
uint64_t bench_choose_repeats(const bench_args *a, double seconds_a_round);
double bench_share(const bench_row *row); /* of the roofline; 0 without one */
/* The better of the probes before and after. */
double bench_limit(const double probes[2]);

/* Push the weights out of every cache by reading something larger, which is a read probe as well. */
dspark_status bench_evict(const bench_report *r, uint32_t n_threads, double *gbs, dspark_error *err);
/* GB/s (bytes copied, each counted once) of memcpy from one half of the buffer to the other, or with `fresh` to
 * memory that the system must bring: huge pages, where there are any. */
dspark_status bench_probe_copy(const bench_report *r, uint32_t n_threads, double seconds, int fresh, double *gbs,
                               dspark_error *err);

/* Numbers of threads and instruction sets of --threads and --isa, in turn: run i of bench_n_runs. */
size_t bench_n_runs(const bench_args *a);
uint32_t bench_run_threads(const bench_args *a, size_t i); /* 0 = all */
dspark_isa bench_run_isa(const bench_args *a, size_t i);
uint32_t bench_most_threads(const bench_args *a);          /* for packing; 0 = all */

/* ---- checkpoints ---- */

/* The checkpoint to measure: what was given, or one made in a temporary folder (r->folder). */
dspark_status bench_find_checkpoint(bench_report *r, int context_only, const char **path,
                                    dspark_error *err);
/* A temporary folder for copies, at most one at a time: r->folder. */
dspark_status bench_make_directory(bench_report *r, dspark_error *err);
void bench_remove_directory(bench_report *r);

/* "bf16,int8" into formats and n_formats. 0 for a name that is unknown or there twice. */
int bench_read_formats(const char *text, bench_args *a);

/* Packed bytes, from the report on a checkpoint. */
typedef struct bench_sizes {
    int quantised;        /* anything is */
    int context_only;
    uint64_t context_kv;  /* the merged linear of all layers; 0 when the checkpoint is not usable */
    uint64_t context_proj, q_a, kv_a, q_b, kv_b, o, gate_up, down, markov, lm_head;
} bench_sizes;
dspark_status bench_read_sizes(const char *path, bench_sizes *s, dspark_error *err);

/* Write `source` in a format to `folder` in the report's temporary folder; "" when it has that format already, for
 * DSPARK_FORMAT_NONE, or when it is not usable. sizes are those of what is to be opened. */
#define BENCH_COPY_PATH 4104
dspark_status bench_copy_format(bench_report *r, char folder[BENCH_COPY_PATH], bench_sizes *sizes,
                                const char *source, dspark_format format, int context_only,
                                uint32_t n_threads, dspark_error *err);

/* Open `source` with these parts (and a made-up LM head, see opts) in a format: as it is for
 * DSPARK_FORMAT_NONE and for a plain checkpoint and bf16, else a copy that is written to the report's
 * temporary folder, opened and removed. */
dspark_status bench_open_format(bench_report *r, dspark_model **model, bench_sizes *sizes,
                                const char *source, dspark_format format,
                                const dspark_model_opts *opts, dspark_error *err);

/* ---- what is measured ---- */

dspark_status bench_context(bench_report *r, dspark_error *err);
/* draft, linear, attention */
dspark_status bench_draft(bench_report *r, dspark_error *err);
dspark_status bench_load(bench_report *r, dspark_error *err);
dspark_status bench_growth(bench_report *r, dspark_error *err);

/* A bf16 matrix between -1 and 1 in the place of a target's LM head and embedding; free data. */
dspark_status bench_make_head(dspark_host_matrix *head, const char *checkpoint, dspark_error *err);

/* n entries of a cache: numbers that are finite and small. */
void bench_fill_entries(void *entries, size_t n, dspark_cache_dtype dtype, uint32_t latent, uint32_t rope);

/* ---- the machine ---- */

void bench_read_cpu_name(char *name, size_t size);
/* Bytes of all last-level caches together, 0 when the system does not tell. */
uint64_t bench_read_cache_bytes(void);
/* Ticks that the hypervisor took away, and all ticks; 0 when unknown. */
int bench_read_steal(double *steal, double *total);
/* Of one minute; negative when unknown. */
double bench_read_load(void);
uint32_t bench_read_processors(void);
/* Of them those that this process may use. */
uint32_t bench_read_available(void);
/* Largest resident size so far, and forgetting it; 0 when the system does not tell. */
uint64_t bench_read_peak(void);
void bench_reset_peak(void);

/* Why figures of a run should not be trusted; no reasons when they may be. */
#define BENCH_MAX_REASONS (BENCH_MAX_HOT + 7)
typedef struct bench_verdict {
    size_t n_reasons;
    char reasons[BENCH_MAX_REASONS][192];
} bench_verdict;
void bench_judge(const bench_report *r, const bench_run *run, bench_verdict *verdict);

/* ---- showing ---- */

int bench_print_text(const bench_report *r);
int bench_print_json(const bench_report *r);
/* Write to a temporary name and rename; return an exit code. */
int bench_write_csv(const bench_report *r, const char *path);
int bench_write_svg(const bench_report *r, const char *path);

#endif
