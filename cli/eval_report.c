/* dspark eval: tables and JSON of a finished evaluation. Says what each figure means beside it, since
 * "acceptance length" has two meanings in the field. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "drafting.h"
#include "eval.h"
#include "out.h"

double eval_block_seconds(const eval_report *r)
{
    const eval_times *t = r->times;
    return t->n_drafts ? t->draft_seconds / (double)t->n_drafts : 0;
}

/* "73.1 %", or nothing where there is no number. */
static void percent_cell(out_table *t, double value)
{
    if (isnan(value))
        out_table_cell(t, "%s", "");
    else
        out_table_cell(t, "%.1f %%", 100 * value);
}

static void number_cell(out_table *t, double value)
{
    if (isnan(value))
        out_table_cell(t, "%s", "");
    else
        out_table_cell(t, "%.3f", value);
}

/* A figure inside a sentence; "-" where there is none. */
static const char *figure(char buf[16], double value)
{
    if (isnan(value)) return "-";
    snprintf(buf, 16, "%.3f", value);
    return buf;
}

static int print_positions(const eval_report *r)
{
    const eval_figures *f = r->figures;
    int target = !isnan(f->expected_sampled);
    out_table t;
    uint32_t k;
    out_table_init(&t, target ? "rrrrrrrrr" : f->has_confidence ? "rrrrrrr" : "rrr");
    out_table_cell(&t, "position");
    out_table_cell(&t, "accepted");
    out_table_cell(&t, "conditional");
    if (target) {
        out_table_cell(&t, "= argmax");
        out_table_cell(&t, "sampled");
    }
    if (f->has_confidence || target) {
        out_table_cell(&t, "confidence");
        out_table_cell(&t, "ECE");
        out_table_cell(&t, "Brier");
        out_table_cell(&t, "AUC");
    }
    for (k = 0; k < f->k; k++) {
        const eval_position *p = &f->positions[k];
        out_table_cell(&t, "%u", k + 1);
        percent_cell(&t, p->accepted);
        percent_cell(&t, p->conditional);
        if (target) {
            percent_cell(&t, p->agree);
            percent_cell(&t, p->alpha);
        }
        if (f->has_confidence || target) {
            percent_cell(&t, f->has_confidence ? p->mean_confidence : (double)NAN);
            number_cell(&t, p->ece);
            number_cell(&t, p->brier);
            number_cell(&t, p->auc);
        }
    }
    return out_table_print(&t, 2);
}

static int print_depths(const eval_report *r)
{
    const eval_figures *f = r->figures;
    char low[32], high[32];
    out_table t;
    size_t i;
    out_table_init(&t, "rrr");
    out_table_cell(&t, "context");
    out_table_cell(&t, "anchors");
    out_table_cell(&t, "length");
    for (i = 0; i < f->n_depths; i++) {
        const eval_depth *d = &f->depths[i];
        out_table_cell(&t, "%s to %s", out_count(low, d->low), out_count(high, d->high - 1));
        out_table_cell(&t, "%s", out_count(low, d->n));
        out_table_cell(&t, "%.2f", d->length);
    }
    return out_table_print(&t, 2);
}

static int print_stages(const eval_report *r)
{
    double total = r->times->draft_seconds;
    size_t i;
    char text[32];
    out_table t;
    out_table_init(&t, "lrr");
    out_table_cell(&t, "stage");
    out_table_cell(&t, "a block");
    out_table_cell(&t, "share");
    for (i = 0; i < DRAFTING_STAGES; i++) {
        double seconds = eval_stage_seconds(r->times, i);
        out_table_cell(&t, "%s", drafting_stage_names[i]);
        out_table_cell(&t, "%s", out_seconds(text, seconds / (double)r->times->n_drafts));
        out_table_cell(&t, "%.1f %%", total > 0 ? 100 * seconds / total : 0);
    }
    return out_table_print(&t, 2);
}

/* What drafting is worth: a target step that verifies gives `length` tokens instead of one. */
static void print_break_even(const eval_report *r)
{
    double block = eval_block_seconds(r), accepted = r->figures->accepted;
    char a[32], b[32];
    if (!(block > 0)) return;
    if (accepted > 0)
        printf("break-even   a block takes %s here (%u job%s); drafting pays when a target step takes longer "
               "than %s\n             (block time / accepted drafts), if verifying %u tokens costs what one "
               "costs\n", out_seconds(a, block), r->jobs, r->jobs == 1 ? "" : "s",
               out_seconds(b, block / accepted), r->figures->k + 1);
    else
        printf("break-even   never: no draft was accepted\n");
    if (r->target_step > 0)
        printf("             at a target step of %s: %.2f times as many tokens a second as without\n",
               out_seconds(a, r->target_step),
               (1 + accepted) * r->target_step / (r->target_step + block));
}

static void print_head(const eval_report *r)
{
    const eval_figures *f = r->figures;
    char a[32], b[32];
    printf("checkpoint   ");
    out_text(stdout, r->checkpoint);
    printf("\n             fingerprint %s\ndata         ", r->fingerprint);
    out_text(stdout, r->data);
    printf("\n             %s dump%s, %s anchor%s (every %" PRIu64 "%s position)", out_count(a, f->n_dumps),
           f->n_dumps == 1 ? "" : "s", out_count(b, f->n_anchors), f->n_anchors == 1 ? "" : "s",
           r->stride, r->stride == 1 ? "st" : r->stride == 2 ? "nd" : r->stride == 3 ? "rd" : "th");
    if (r->n_resumed) printf("; %" PRIu64 " dumps taken from the journal", r->n_resumed);
    if (r->n_skipped_short)
        printf("; %" PRIu64 " dumps too short for a block", r->n_skipped_short);
    putchar('\n');
    if (r->n_beyond)
        printf("warning:     %s anchors lie outside the trained window of %" PRIu64 " positions\n",
               out_count(a, r->n_beyond), r->config->rope_original_max_positions);
}

int eval_print_text(const eval_report *r)
{
    const eval_figures *f = r->figures;
    char a[16], b[16], c[16], d[16], e[16];
    int failed;
    print_head(r);
    printf("\nacceptance length  %.3f  drafts accepted + the target's own token, of %u (%s drafts "
           "against the text)\n", f->accepted + 1, f->k + 1, r->sampled ? "sampled" : "greedy");
    printf("accepted drafts    %.3f  without that token, of %u; standard error %s\n", f->accepted, f->k,
           figure(a, f->accepted_stderr));
    if (!isnan(f->expected_sampled)) {
        printf("analytic           %.3f  expected length when draft and target sample at temperature %g\n",
               f->expected_sampled + 1, r->temperature);
        printf("                   %.3f  the same for greedy drafts\n", f->expected_greedy + 1);
        printf("the text           is the target's argmax at %.1f %% of its positions%s\n",
               100 * f->greedy_text,
               f->greedy_text < 0.5 ? ": is this target's head the one that wrote it?" : "");
    }
    printf("\nBy position (conditional: of the anchors whose drafts before were accepted%s)\n",
           isnan(f->expected_sampled) ? "" : "; = argmax, sampled:\ngiven the text before");
    failed = print_positions(r);
    printf("\nBy depth of the context\n");
    failed |= print_depths(r);
    if (f->has_confidence) {
        printf("\nConfidence, all positions: ECE %s, Brier %s, AUC %s. Survival (products): ECE %s, "
               "after scaling %s\n", figure(a, f->ece), figure(b, f->brier), figure(c, f->auc),
               figure(d, f->survival_ece), figure(e, f->scaled_ece));
    }
    if (r->times->n_drafts) {
        printf("\nTime (%" PRIu64 " blocks, %.1f a call)\n", r->times->n_drafts,
               (double)r->times->n_drafts / (double)r->times->n_calls);
        failed |= print_stages(r);
        print_break_even(r);
    }
    return failed ? out_error(EXIT_INTERNAL, "out of memory") : EXIT_OK;
}

/* ---- JSON ---- */

static json_t *positions_json(const eval_figures *f)
{
    json_t *array = json_array();
    uint32_t k;
    for (k = 0; k < f->k; k++) {
        const eval_position *p = &f->positions[k];
        json_t *o = json_object();
        out_set(o, "position", json_integer(k + 1));
        out_set(o, "accepted", out_real(p->accepted));
        out_set(o, "conditional", out_real(p->conditional));
        out_set(o, "conditional_anchors", json_integer((json_int_t)p->n_conditional));
        out_set(o, "equals_target_argmax", out_real(p->agree));
        out_set(o, "text_is_target_argmax", out_real(p->greedy_text));
        out_set(o, "target_probability", out_real(p->target_p));
        out_set(o, "sampled_acceptance", out_real(p->alpha));
        out_set(o, "confidence", out_real(f->has_confidence ? p->mean_confidence : (double)NAN));
        out_set(o, "ece", out_real(p->ece));
        out_set(o, "brier", out_real(p->brier));
        out_set(o, "auc", out_real(p->auc));
        out_set(o, "temperature", out_real(f->has_confidence ? f->temperatures[k] : (double)NAN));
        out_append(array, o);
    }
    return array;
}

static json_t *depths_json(const eval_figures *f)
{
    json_t *array = json_array();
    size_t i;
    for (i = 0; i < f->n_depths; i++) {
        json_t *o = json_object();
        out_set(o, "context_from", json_integer((json_int_t)f->depths[i].low));
        out_set(o, "context_to", json_integer((json_int_t)f->depths[i].high - 1));
        out_set(o, "anchors", json_integer((json_int_t)f->depths[i].n));
        out_set(o, "acceptance_length", out_real(f->depths[i].length));
        out_append(array, o);
    }
    return array;
}

static json_t *confidence_json(const eval_figures *f)
{
    json_t *o = json_object(), *bins = json_array();
    size_t i;
    if (!f->has_confidence) {
        json_decref(o);
        json_decref(bins);
        return json_null();
    }
    out_set(o, "ece", out_real(f->ece));
    out_set(o, "brier", out_real(f->brier));
    out_set(o, "auc", out_real(f->auc));
    out_set(o, "survival_ece", out_real(f->survival_ece));
    out_set(o, "survival_ece_scaled", out_real(f->scaled_ece));
    for (i = 0; i < EVAL_RELIABILITY_BINS; i++) {
        json_t *bin = json_object();
        out_set(bin, "n", json_integer((json_int_t)f->reliability[i].n));
        out_set(bin, "confidence", out_real(f->reliability[i].confidence));
        out_set(bin, "accepted", out_real(f->reliability[i].accepted));
        out_append(bins, bin);
    }
    out_set(o, "reliability", bins);
    return o;
}

static json_t *times_json(const eval_report *r)
{
    json_t *o = json_object(), *list = json_object();
    size_t i;
    out_set(o, "blocks", json_integer((json_int_t)r->times->n_drafts));
    out_set(o, "calls", json_integer((json_int_t)r->times->n_calls));
    out_set(o, "block_seconds", out_real(eval_block_seconds(r)));
    out_set(o, "context_rows", json_integer((json_int_t)r->times->context_rows));
    out_set(o, "context_seconds", out_real(r->times->context_seconds));
    for (i = 0; r->times->n_drafts && i < DRAFTING_STAGES; i++)
        out_set(list, drafting_stage_names[i],
                out_real(eval_stage_seconds(r->times, i) / (double)r->times->n_drafts));
    out_set(o, "stages_seconds", list);
    return o;
}

int eval_print_json(const eval_report *r)
{
    const eval_figures *f = r->figures;
    double block = eval_block_seconds(r);
    json_t *doc = json_object(), *histogram = json_array();
    uint32_t k;
    out_set(doc, "checkpoint", out_string(r->checkpoint));
    out_set(doc, "fingerprint", json_string(r->fingerprint));
    out_set(doc, "target", out_string(r->target));
    out_set(doc, "data", out_string(r->data));
    out_set(doc, "dumps", json_integer((json_int_t)f->n_dumps));
    out_set(doc, "dumps_resumed", json_integer((json_int_t)r->n_resumed));
    out_set(doc, "dumps_too_short", json_integer((json_int_t)r->n_skipped_short));
    out_set(doc, "anchors", json_integer((json_int_t)f->n_anchors));
    out_set(doc, "anchors_beyond_trained_window", json_integer((json_int_t)r->n_beyond));
    out_set(doc, "stride", json_integer((json_int_t)r->stride));
    out_set(doc, "drafted", json_integer(f->k));
    out_set(doc, "acceptance_length", out_real(f->accepted + 1));
    out_set(doc, "accepted_drafts", out_real(f->accepted));
    out_set(doc, "accepted_drafts_stderr", out_real(f->accepted_stderr));
    for (k = 0; k <= f->k; k++) out_append(histogram, json_integer((json_int_t)f->histogram[k]));
    out_set(doc, "accepted_histogram", histogram);
    out_set(doc, "positions", positions_json(f));
    out_set(doc, "depths", depths_json(f));
    out_set(doc, "temperature", out_real(r->temperature));
    out_set(doc, "analytic_length_sampled", out_real(f->expected_sampled + 1));
    out_set(doc, "analytic_length_greedy_drafts", out_real(f->expected_greedy + 1));
    out_set(doc, "text_is_target_argmax", out_real(f->greedy_text));
    out_set(doc, "confidence", confidence_json(f));
    out_set(doc, "times", times_json(r));
    out_set(doc, "break_even_target_step_seconds",
            out_real(block > 0 && f->accepted > 0 ? block / f->accepted : (double)NAN));
    out_set(doc, "speedup_at_target_step",
            out_real(r->target_step > 0 && block > 0
                         ? (1 + f->accepted) * r->target_step / (r->target_step + block)
                         : (double)NAN));
    return out_json(doc);
}
