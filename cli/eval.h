/* What `dspark eval` measures and how it is shown. eval.c drafts from every anchor of every dump,
 * eval_data.c keeps one record an anchor and goes from records to figures, eval_resume.c stores the
 * records of finished dumps, eval_report.c prints, eval_plot.c draws. */
#ifndef DSPARK_CLI_EVAL_H
#define DSPARK_CLI_EVAL_H

#include <stdint.h>

#include "dspark/dspark.h"

/* Records of anchors, as columns. K is the number of drafted tokens that are looked at. */
typedef struct eval_data {
    uint32_t k;
    int has_target;        /* agree, target_p and alpha are filled */
    size_t n, capacity;
    uint32_t *depth;       /* [n] context entries */
    uint8_t *accepted;     /* [n] drafts that equal the text, counted from the first: 0 .. K */
    float *confidence;     /* [n][K], given the text before */
    uint8_t *agree;        /* [n][K] 1: the draft is the target's argmax, given the text before */
    uint8_t *greedy_text;  /* [n][K] 1: the text is the target's argmax */
    float *target_p;       /* [n][K] the target's probability of the drafted token */
    float *alpha;          /* [n][K] 1 - total variation: acceptance when both sample */
} eval_data;

void eval_data_init(eval_data *d, uint32_t k, int has_target);
void eval_data_free(eval_data *d);
/* Room for `more` further records; 0, or -1 without memory. */
int eval_data_reserve(eval_data *d, size_t more);
/* Records of `from` behind those of `to`. 0, or -1 without memory. */
int eval_data_append(eval_data *to, const eval_data *from);

/* Time of one kind of work, summed over calls. */
typedef struct eval_times {
    double context_seconds; /* entries of all rows */
    uint64_t context_rows;
    double draft_seconds;   /* wall, all draft calls */
    uint64_t n_drafts;      /* blocks */
    uint64_t n_calls;
    dspark_draft_times stages;
} eval_times;
void eval_times_add(eval_times *to, const eval_times *from);
/* Seconds of a stage (drafting.h), summed. */
double eval_stage_seconds(const eval_times *t, size_t stage);

/* ---- figures ---- */

#define EVAL_MAX_DEPTHS 16
#define EVAL_RELIABILITY_BINS 10

typedef struct eval_depth {
    uint64_t low, high;    /* context entries, low <= depth < high */
    uint64_t n;
    double length;         /* mean accepted + 1 */
} eval_depth;

typedef struct eval_position {
    double accepted;       /* share of anchors with at least k + 1 accepted */
    double conditional;    /* of those whose k drafts before were accepted; NaN for none */
    uint64_t n_conditional;
    double agree, greedy_text, target_p, alpha; /* means, NaN without a target */
    double ece, brier, auc;      /* of the confidence among n_conditional; NaN when undefined */
    double mean_confidence;
} eval_position;

typedef struct eval_figures {
    uint64_t n_anchors;
    uint64_t n_dumps;
    uint32_t k;
    double accepted;       /* mean drafts accepted */
    double accepted_stderr;
    uint64_t histogram[256]; /* anchors by accepted drafts */
    eval_position *positions; /* [k] */
    eval_depth depths[EVAL_MAX_DEPTHS];
    size_t n_depths;
    double expected_sampled; /* mean over anchors of the sum of running products of alpha; NaN */
    double expected_greedy;  /* the same with target_p: greedy drafts, sampling target */
    double greedy_text;      /* share of text that is the target's argmax */
    struct {
        uint64_t n;
        double confidence, accepted;
    } reliability[EVAL_RELIABILITY_BINS]; /* all positions together */
    double ece, brier, auc;
    double temperatures[256];       /* sequential temperature scaling, [k] */
    double survival_ece, scaled_ece; /* of the survival products, before and after scaling */
    int has_confidence;
} eval_figures;

/* 0, or -1 without memory. Free with eval_figures_free. */
int eval_measure(eval_figures *f, const eval_data *d);
void eval_figures_free(eval_figures *f);

/* ---- resuming ---- */

/* Everything that decides what a record is; begins with "k=K target=0" or "target=1". Two runs with equal
 * keys may share records. */
typedef struct eval_key {
    char text[512];
} eval_key;

typedef struct eval_journal eval_journal;
/* Open or make a journal; a journal of another key is an error (exit code 3), as is a broken line that
 * is not the last one. Prints what went wrong; returns an exit code. */
int eval_journal_open(eval_journal **out, const char *path, const eval_key *key);
/* The records of a dump (by file name and digest of its facts), if they are there: 1, else 0; -1
 * without memory. */
int eval_journal_find(eval_journal *j, const char *name, const char *facts, eval_data *into);
/* Add a finished dump; on disk when it returns. An exit code. */
int eval_journal_add(eval_journal *j, const char *name, const char *facts, const eval_data *d);
void eval_journal_close(eval_journal *j);

/* ---- showing ---- */

typedef struct eval_report {
    const char *checkpoint, *target, *data;
    const char *fingerprint;
    const dspark_config *config;
    const eval_figures *figures;
    const eval_times *times;
    uint64_t stride;
    uint64_t n_resumed;      /* dumps taken from the journal */
    uint64_t n_skipped_short;/* dumps too short for one anchor */
    double temperature;      /* of the analytic figures */
    double target_step;      /* seconds; 0 = not given */
    uint64_t n_beyond;       /* anchors outside the trained window */
    double seconds;
    uint32_t jobs;
    int sampled;             /* the drafts were sampled, not greedy */
} eval_report;

/* Seconds of one drafted block, context included; 0 when nothing was timed. */
double eval_block_seconds(const eval_report *r);
int eval_print_text(const eval_report *r);
int eval_print_json(const eval_report *r);
int eval_write_html(const eval_report *r, const char *path);

#endif
