/* Records of anchors and the figures made from them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "drafting.h"
#include "eval.h"

void eval_data_init(eval_data *d, uint32_t k, int has_target)
{
    memset(d, 0, sizeof *d);
    d->k = k;
    d->has_target = has_target;
}

void eval_data_free(eval_data *d)
{
    free(d->depth);
    free(d->accepted);
    free(d->confidence);
    free(d->agree);
    free(d->greedy_text);
    free(d->target_p);
    free(d->alpha);
    memset(d, 0, sizeof *d);
}

static int grow(void *column, size_t count, size_t each)
{
    void **place = column, *bigger = realloc(*place, count * each);
    if (!bigger) return -1;
    *place = bigger;
    return 0;
}

int eval_data_reserve(eval_data *d, size_t more)
{
    size_t n = d->n + more;
    if (n <= d->capacity) return 0;
    if (n < 2 * d->capacity) n = 2 * d->capacity;
    if (n > SIZE_MAX / 8 / (d->k + 1)) return -1;
    if (grow(&d->depth, n, sizeof *d->depth) || grow(&d->accepted, n, 1) ||
        grow(&d->confidence, n * d->k, sizeof *d->confidence))
        return -1;
    if (d->has_target && (grow(&d->agree, n * d->k, 1) || grow(&d->greedy_text, n * d->k, 1) ||
                          grow(&d->target_p, n * d->k, sizeof *d->target_p) ||
                          grow(&d->alpha, n * d->k, sizeof *d->alpha)))
        return -1;
    d->capacity = n;
    return 0;
}

int eval_data_append(eval_data *to, const eval_data *from)
{
    size_t at = to->n * to->k, cells = from->n * from->k;
    if (to->k != from->k || to->has_target != from->has_target) return -1;
    if (from->n == 0) return 0;
    if (eval_data_reserve(to, from->n) != 0) return -1;
    memcpy(to->depth + to->n, from->depth, from->n * sizeof *to->depth);
    memcpy(to->accepted + to->n, from->accepted, from->n);
    memcpy(to->confidence + at, from->confidence, cells * sizeof *to->confidence);
    if (to->has_target) {
        memcpy(to->agree + at, from->agree, cells);
        memcpy(to->greedy_text + at, from->greedy_text, cells);
        memcpy(to->target_p + at, from->target_p, cells * sizeof *to->target_p);
        memcpy(to->alpha + at, from->alpha, cells * sizeof *to->alpha);
    }
    to->n += from->n;
    return 0;
}

/* ---- times ---- */

void eval_times_add(eval_times *to, const eval_times *from)
{
    dspark_draft_times add = from->stages;
    size_t i;
    to->context_seconds += from->context_seconds;
    to->context_rows += from->context_rows;
    to->draft_seconds += from->draft_seconds;
    to->n_drafts += from->n_drafts;
    to->n_calls += from->n_calls;
    to->stages.total += add.total;
    for (i = 0; i < DRAFTING_STAGES; i++)
        *drafting_stage(&to->stages, i) += *drafting_stage(&add, i);
}

double eval_stage_seconds(const eval_times *t, size_t stage)
{
    dspark_draft_times stages = t->stages;
    return (double)*drafting_stage(&stages, stage) * 1e-9;
}

/* ---- figures ---- */

static double mean_column(const float *column, size_t n, uint32_t k, uint32_t at)
{
    double sum = 0;
    size_t i;
    for (i = 0; i < n; i++) sum += (double)column[i * k + at];
    return sum / (double)n;
}

static double mean_flags(const uint8_t *column, size_t n, uint32_t k, uint32_t at)
{
    uint64_t sum = 0;
    size_t i;
    for (i = 0; i < n; i++) sum += column[i * k + at];
    return (double)sum / (double)n;
}

/* Expected accepted drafts when position k is accepted with probability p[k] given all before. */
static double expected_length(const float *p, size_t n, uint32_t k)
{
    double sum = 0;
    size_t i;
    uint32_t j;
    for (i = 0; i < n; i++) {
        double survival = 1;
        for (j = 0; j < k; j++) {
            survival *= (double)p[i * k + j];
            sum += survival;
        }
    }
    return sum / (double)n;
}

static void measure_lengths(eval_figures *f, const eval_data *d)
{
    double sum = 0, squares = 0, mean;
    size_t i;
    for (i = 0; i < d->n; i++) {
        f->histogram[d->accepted[i]]++;
        sum += d->accepted[i];
        squares += (double)d->accepted[i] * d->accepted[i];
    }
    mean = sum / (double)d->n;
    f->accepted = mean;
    f->accepted_stderr = d->n > 1 ? sqrt(fmax(squares / (double)d->n - mean * mean, 0) / (double)(d->n - 1))
                                  : (double)NAN;
}

/* Context depths in powers of four: 0 to 63, 64 to 255, ... */
static void measure_depths(eval_figures *f, const eval_data *d)
{
    eval_depth all[EVAL_MAX_DEPTHS] = {{0}};
    uint64_t high = 64;
    size_t i, b;
    for (b = 0; b < EVAL_MAX_DEPTHS; b++, high *= 4) {
        all[b].low = b ? high / 4 : 0;
        all[b].high = high;
    }
    for (i = 0; i < d->n; i++) {
        for (b = 0; b + 1 < EVAL_MAX_DEPTHS && d->depth[i] >= all[b].high;) b++;
        all[b].n++;
        all[b].length += d->accepted[i];
    }
    for (b = 0; b < EVAL_MAX_DEPTHS; b++) {
        if (!all[b].n) continue;
        all[b].length = all[b].length / (double)all[b].n + 1;
        f->depths[f->n_depths++] = all[b];
    }
}

static void measure_positions(eval_figures *f, const eval_data *d)
{
    uint64_t reached = d->n, passed;
    uint32_t k;
    size_t i;
    for (k = 0; k < d->k; k++, reached = passed) {
        eval_position *p = &f->positions[k];
        passed = 0;
        for (i = 0; i < d->n; i++) passed += d->accepted[i] > k;
        p->accepted = (double)passed / (double)d->n;
        p->n_conditional = reached;
        p->conditional = reached ? (double)passed / (double)reached : (double)NAN;
        p->agree = p->greedy_text = p->target_p = p->alpha = (double)NAN;
        p->ece = p->brier = p->auc = p->mean_confidence = (double)NAN;
        if (!d->has_target) continue;
        p->agree = mean_flags(d->agree, d->n, d->k, k);
        p->greedy_text = mean_flags(d->greedy_text, d->n, d->k, k);
        p->target_p = mean_column(d->target_p, d->n, d->k, k);
        p->alpha = mean_column(d->alpha, d->n, d->k, k);
    }
}

/* The confidences that were put to the test: position k counts where all drafts before were
 * accepted. Fills p and y for one position (or all: at == k). */
static size_t tested(const eval_data *d, uint32_t at, float *p, uint8_t *y)
{
    size_t n = 0, i;
    uint32_t k;
    for (i = 0; i < d->n; i++)
        for (k = 0; k < d->k && k <= d->accepted[i]; k++) {
            if (at != d->k && k != at) continue;
            p[n] = d->confidence[i * d->k + k];
            y[n++] = d->accepted[i] > k;
        }
    return n;
}

static void measure_reliability(eval_figures *f, const float *p, const uint8_t *y, size_t n)
{
    size_t i, b;
    for (i = 0; i < n; i++) {
        b = (size_t)((double)p[i] * EVAL_RELIABILITY_BINS);
        if (b >= EVAL_RELIABILITY_BINS) b = EVAL_RELIABILITY_BINS - 1;
        f->reliability[b].n++;
        f->reliability[b].confidence += (double)p[i];
        f->reliability[b].accepted += y[i];
    }
    for (b = 0; b < EVAL_RELIABILITY_BINS; b++) {
        if (!f->reliability[b].n) continue;
        f->reliability[b].confidence /= (double)f->reliability[b].n;
        f->reliability[b].accepted /= (double)f->reliability[b].n;
    }
}

/* ECE of survival products (drafts before position k and k itself) against what stood. */
static double survival_error(const eval_data *d, const double *temperatures, float *p, uint8_t *y)
{
    size_t n = 0, i;
    uint32_t k;
    for (i = 0; i < d->n; i++) {
        double survival = 1;
        for (k = 0; k < d->k; k++) {
            double c = (double)d->confidence[i * d->k + k];
            if (temperatures && c > 0 && c < 1) c = 1 / (1 + exp(-log(c / (1 - c)) / temperatures[k]));
            survival *= c;
            p[n] = (float)survival;
            y[n++] = d->accepted[i] > k;
        }
    }
    return dspark_ece(p, y, n, 20);
}

static int measure_confidence(eval_figures *f, const eval_data *d)
{
    size_t cells = d->n * d->k, n, i;
    float *p = malloc(cells * sizeof *p);
    uint8_t *y = malloc(cells);
    dspark_calibration fit;
    uint32_t k;
    int failed = !p || !y;
    for (i = 0; !failed && !f->has_confidence && i < cells; i++) f->has_confidence = d->confidence[i] != 1.0f;
    for (k = 0; !failed && f->has_confidence && k < d->k; k++) {
        eval_position *at = &f->positions[k];
        double sum = 0;
        n = tested(d, k, p, y);
        for (i = 0; i < n; i++) sum += (double)p[i];
        at->mean_confidence = n ? sum / (double)n : (double)NAN;
        at->ece = dspark_ece(p, y, n, 20);
        at->brier = dspark_brier(p, y, n);
        failed = dspark_auc(p, y, n, &at->auc, NULL) != DSPARK_OK;
    }
    if (!failed && f->has_confidence) {
        n = tested(d, d->k, p, y);
        measure_reliability(f, p, y, n);
        f->ece = dspark_ece(p, y, n, 20);
        f->brier = dspark_brier(p, y, n);
        failed = dspark_auc(p, y, n, &f->auc, NULL) != DSPARK_OK ||
                 dspark_calibration_fit(&fit, d->confidence, d->accepted, d->n, d->k, NULL) != DSPARK_OK;
    }
    if (!failed && f->has_confidence) {
        memcpy(f->temperatures, fit.temperatures, sizeof f->temperatures);
        f->survival_ece = survival_error(d, NULL, p, y);
        f->scaled_ece = survival_error(d, f->temperatures, p, y);
    }
    free(p);
    free(y);
    return failed ? -1 : 0;
}

int eval_measure(eval_figures *f, const eval_data *d)
{
    double sum = 0;
    size_t i, cells = d->n * d->k;
    memset(f, 0, sizeof *f);
    f->n_anchors = d->n;
    f->k = d->k;
    f->positions = calloc(d->k, sizeof *f->positions);
    if (!f->positions) return -1;
    measure_lengths(f, d);
    measure_depths(f, d);
    measure_positions(f, d);
    f->expected_sampled = f->expected_greedy = f->greedy_text = (double)NAN;
    f->ece = f->brier = f->auc = f->survival_ece = f->scaled_ece = (double)NAN;
    if (d->has_target) {
        f->expected_sampled = expected_length(d->alpha, d->n, d->k);
        f->expected_greedy = expected_length(d->target_p, d->n, d->k);
        for (i = 0; i < cells; i++) sum += d->greedy_text[i];
        f->greedy_text = sum / (double)cells;
    }
    if (measure_confidence(f, d) == 0) return 0;
    eval_figures_free(f);
    return -1;
}

void eval_figures_free(eval_figures *f)
{
    free(f->positions);
    f->positions = NULL;
}
