/* Exported functions of drafting and sessions, and of what needs no model: sampling, verification,
 * scheduling, calibration. Arguments are checked here, the work is elsewhere. */
#include "api.h"

#include "base/fpenv.h"
#include "model/calibration_file.h"
#include "model/drafter.h"
#include "model/session.h"
#include "spec/calibrate.h"
#include "spec/rng.h"
#include "spec/sample.h"
#include "spec/schedule.h"
#include "spec/verify.h"

/* ---- drafting ---- */

void dspark_drafter_opts_init(dspark_drafter_opts *opts)
{
    if (opts) *opts = (dspark_drafter_opts){.struct_size = sizeof *opts};
}

void dspark_draft_input_init(dspark_draft_input *in)
{
    if (in) *in = (dspark_draft_input){.struct_size = sizeof *in};
}

void dspark_draft_output_init(dspark_draft_output *out)
{
    if (out) *out = (dspark_draft_output){.struct_size = sizeof *out};
}

dspark_status dspark_plan_drafter(const dspark_config *config, const dspark_drafter_opts *opts,
                                  dspark_drafter_plan *plan, dspark_error *err)
{
    dspark_drafter_opts own;
    dspark_drafter_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "drafter options", err);
    if (st != DSPARK_OK) return st;
    if (!config || !plan) return dspark__fail_null(err, "config or plan");
    if ((st = dspark__config_check(config, "config", err)) != DSPARK_OK) return st;
    return dspark__plan_drafter(config, &own, plan, err);
}

dspark_status dspark_drafter_create(dspark_drafter **out, const dspark_model *model,
                                    const dspark_drafter_opts *opts, dspark_error *err)
{
    dspark_drafter_opts own;
    dspark_drafter_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "drafter options", err);
    if (!out) return dspark__fail_null(err, "out");
    *out = NULL;
    if (st != DSPARK_OK) return st;
    if (!model) return dspark__fail_null(err, "model");
    return dspark__drafter_create(out, model, &own, err);
}

void dspark_drafter_free(dspark_drafter *d)
{
    dspark__drafter_free(d);
}

dspark_drafter_plan dspark_drafter_get_plan(const dspark_drafter *d)
{
    return d->plan;
}

dspark_context *dspark_drafter_context(dspark_drafter *d)
{
    return dspark__drafter_context(d);
}

dspark_draft_times dspark_drafter_times(const dspark_drafter *d)
{
    return d->times;
}

/* Elements of arrays: their size must be this library's own. */
static dspark_status check_drafts(const dspark_draft_input *in, const dspark_draft_output *out, size_t n,
                                  dspark_error *err)
{
    if (n && (!in || !out)) return dspark__fail_null(err, "in or out");
    for (size_t i = 0; i < n; i++)
        if (in[i].struct_size != sizeof *in || out[i].struct_size != sizeof *out)
            return dspark__fail(err, DSPARK_EINVAL, "draft input or output",
                                "struct_size %zu and %zu, this library has %zu and %zu: call their _init "
                                "functions",
                                in[i].struct_size, out[i].struct_size, sizeof *in, sizeof *out);
    return DSPARK_OK;
}

dspark_status dspark_draft(dspark_drafter *d, const dspark_cache_view *cache,
                           const dspark_draft_input *in, dspark_draft_output *out, size_t n,
                           dspark_error *err)
{
    dspark_cache_view view;
    dspark_cache_view_init(&view);
    dspark_status st = dspark__take_opts(&view, sizeof view, cache, "cache view", err);
    if (st != DSPARK_OK) return st;
    if (!d || !cache) return dspark__fail_null(err, "drafter or cache");
    if ((st = check_drafts(in, out, n, err)) != DSPARK_OK) return st;
    return dspark__draft(d, &view, in, out, n, err);
}

dspark_status dspark_head_logits(dspark_drafter *d, const void *hidden, size_t stride, size_t n,
                                 uint16_t *logits, dspark_error *err)
{
    dspark__error_clear(err);
    if (!d || (n && (!hidden || !logits))) return dspark__fail_null(err, "drafter, hidden or logits");
    return dspark__head_logits(d, hidden, stride, n, logits, err);
}

/* ---- sessions ---- */

void dspark_pool_opts_init(dspark_pool_opts *opts)
{
    if (opts) *opts = (dspark_pool_opts){.struct_size = sizeof *opts};
}

dspark_status dspark_plan_pool(const dspark_config *config, const dspark_pool_opts *opts,
                               dspark_pool_info *info, dspark_error *err)
{
    dspark_pool_opts own;
    dspark_pool_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "pool options", err);
    if (st != DSPARK_OK) return st;
    if (!config || !info) return dspark__fail_null(err, "config or info");
    if ((st = dspark__config_check(config, "config", err)) != DSPARK_OK) return st;
    return dspark__plan_pool(config, &own, info, err);
}

dspark_status dspark_pool_create(dspark_pool **out, const dspark_model *model,
                                 const dspark_pool_opts *opts, dspark_error *err)
{
    dspark_pool_opts own;
    dspark_pool_opts_init(&own);
    dspark_status st = dspark__take_opts(&own, sizeof own, opts, "pool options", err);
    if (!out) return dspark__fail_null(err, "out");
    *out = NULL;
    if (st != DSPARK_OK) return st;
    if (!model) return dspark__fail_null(err, "model");
    return dspark__pool_create(out, model, &own, err);
}

void dspark_pool_free(dspark_pool *pool)
{
    dspark__pool_free(pool);
}

dspark_pool_info dspark_pool_get_info(dspark_pool *pool)
{
    return dspark__pool_get_info(pool);
}

dspark_status dspark_session_open(dspark_session **out, dspark_pool *pool, dspark_error *err)
{
    dspark__error_clear(err);
    if (!out) return dspark__fail_null(err, "out");
    *out = NULL;
    if (!pool) return dspark__fail_null(err, "pool");
    return dspark__pool_open_session(out, pool, err);
}

void dspark_session_close(dspark_session *s)
{
    if (s && s->open) dspark__pool_close_session(s);
}

uint64_t dspark_session_length(const dspark_session *s)
{
    return s->length;
}

static dspark_status check_session(const dspark_session *s, dspark_error *err)
{
    dspark__error_clear(err);
    if (!s) return dspark__fail_null(err, "session");
    return s->open ? DSPARK_OK : dspark__fail(err, DSPARK_EINVAL, "session", "has been closed");
}

dspark_status dspark_session_append(dspark_session *s, dspark_drafter *d, uint64_t first,
                                    const void *taps, size_t taps_width, size_t taps_stride, size_t n,
                                    dspark_error *err)
{
    dspark_status st = check_session(s, err);
    if (st != DSPARK_OK) return st;
    if (!d || (n && !taps)) return dspark__fail_null(err, "drafter or taps");
    return dspark__session_append(s, d, first, taps, taps_width, taps_stride, n, err);
}

dspark_status dspark_sessions_draft(dspark_session *const *s, dspark_drafter *d,
                                    const dspark_draft_input *in, dspark_draft_output *out, size_t n,
                                    dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    dspark__error_clear(err);
    if (!d || (n && !s)) return dspark__fail_null(err, "drafter or sessions");
    for (size_t i = 0; st == DSPARK_OK && i < n; i++) st = check_session(s[i], err);
    if (st == DSPARK_OK) st = check_drafts(in, out, n, err);
    return st == DSPARK_OK ? dspark__sessions_draft(s, d, in, out, n, err) : st;
}

dspark_status dspark_session_draft(dspark_session *s, dspark_drafter *d, const dspark_draft_input *in,
                                   dspark_draft_output *out, dspark_error *err)
{
    return dspark_sessions_draft(&s, d, in, out, 1, err);
}

dspark_status dspark_session_accept(dspark_session *s, uint32_t n_accepted, dspark_error *err)
{
    dspark_status st = check_session(s, err);
    return st == DSPARK_OK ? dspark__session_accept(s, n_accepted, err) : st;
}

dspark_status dspark_session_rewind(dspark_session *s, uint64_t length, dspark_error *err)
{
    dspark_status st = check_session(s, err);
    return st == DSPARK_OK ? dspark__session_rewind(s, length, err) : st;
}

dspark_status dspark_session_fork(dspark_session **out, dspark_session *s, dspark_error *err)
{
    dspark_status st = check_session(s, err);
    if (!out) return dspark__fail_null(err, "out");
    *out = NULL;
    return st == DSPARK_OK ? dspark__session_fork(out, s, err) : st;
}

dspark_status dspark_session_save(dspark_session *s, const char *path, dspark_error *err)
{
    dspark_status st = check_session(s, err);
    if (st == DSPARK_OK && !path) return dspark__fail_null(err, "path");
    return st == DSPARK_OK ? dspark__session_save(s, path, err) : st;
}

dspark_status dspark_session_load(dspark_session **out, dspark_pool *pool, const char *path,
                                  dspark_error *err)
{
    dspark__error_clear(err);
    if (!out) return dspark__fail_null(err, "out");
    *out = NULL;
    if (!pool || !path) return dspark__fail_null(err, "pool or path");
    return dspark__session_load(out, pool, path, err);
}

void dspark_session_acceptance(const dspark_session *s, struct dspark_acceptance *out)
{
    *out = s->acceptance;
}

/* ---- sampling, verification ---- */

void dspark_sampling_init(dspark_sampling *s)
{
    if (s) *s = (dspark_sampling){.struct_size = sizeof *s, .top_p = 1};
}

dspark_status dspark_distribution(const dspark_sampling *s, const void *logits, dspark_dtype dtype,
                                  size_t vocab, float *probs, dspark_error *err)
{
    dspark__error_clear(err);
    if (!s || !logits || !probs) return dspark__fail_null(err, "sampling, logits or probs");
    unsigned env = dspark__fpenv_enter();
    dspark_status st = dspark__distribution(s, logits, dtype, vocab, probs, err);
    dspark__fpenv_leave(env);
    return st;
}

double dspark_uniform(const dspark_noise_key *key)
{
    return dspark__uniform(key);
}

dspark_status dspark_sample(const float *probs, size_t vocab, const dspark_noise_key *key,
                            int32_t *token, dspark_error *err)
{
    dspark__error_clear(err);
    if (!probs || !key || !token) return dspark__fail_null(err, "probs, key or token");
    unsigned env = dspark__fpenv_enter();
    dspark_status st = dspark__sample(probs, vocab, key, token, err);
    dspark__fpenv_leave(env);
    return st;
}

dspark_status dspark_verify_greedy(const int32_t *drafts, size_t n, const int32_t *target_argmax,
                                   size_t vocab, dspark_verdict_tokens *out, dspark_error *err)
{
    dspark__error_clear(err);
    if ((n && !drafts) || !target_argmax || !out) return dspark__fail_null(err, "drafts, target or out");
    return dspark__verify_greedy(drafts, n, target_argmax, vocab, out, err);
}

dspark_status dspark_verify(dspark_verify_method method, const int32_t *drafts, size_t n,
                            const float *q, int one_hot, const float *p, size_t vocab,
                            const dspark_noise_key *key, dspark_verdict_tokens *out,
                            dspark_error *err)
{
    dspark__error_clear(err);
    if ((n && !drafts) || !p || !key || !out) return dspark__fail_null(err, "drafts, p, key or out");
    unsigned env = dspark__fpenv_enter();
    dspark_status st = dspark__verify(method, drafts, n, q, one_hot, p, vocab, key, out, err);
    dspark__fpenv_leave(env);
    return st;
}

void dspark_acceptance_add(dspark_acceptance *a, uint32_t n_drafted, uint32_t n_accepted)
{
    dspark__acceptance_add(a, n_drafted, n_accepted);
}

double dspark_acceptance_length(const dspark_acceptance *a, int with_bonus)
{
    return dspark__acceptance_length(a, with_bonus);
}

/* ---- scheduling, calibration ---- */

void dspark_survival(const float *confidence, uint32_t n, float *survival)
{
    dspark__survival(confidence, n, survival);
}

uint32_t dspark_keep_static(const float *confidence, uint32_t n, float threshold)
{
    return dspark__keep_static(confidence, n, threshold);
}

double dspark_steps_per_second(const dspark_step_table *table, uint64_t tokens)
{
    return dspark__steps_per_second(table, tokens);
}

dspark_status dspark_schedule(const float *confidence, size_t stride, const uint32_t *n_drafted,
                              size_t n_sequences, const dspark_step_table *table, uint32_t *keep,
                              dspark_error *err)
{
    dspark__error_clear(err);
    if (n_sequences && (!confidence || !n_drafted || !keep))
        return dspark__fail_null(err, "confidence, n_drafted or keep");
    return dspark__schedule(confidence, stride, n_drafted, n_sequences, table, keep, err);
}

dspark_status dspark_schedule_stale(const float *stale, const float *confidence, size_t stride,
                                    const uint32_t *n_drafted, size_t n_sequences,
                                    const dspark_step_table *table, uint32_t *keep,
                                    dspark_error *err)
{
    dspark__error_clear(err);
    if (n_sequences && (!stale || !confidence || !n_drafted || !keep))
        return dspark__fail_null(err, "stale, confidence, n_drafted or keep");
    return dspark__schedule_stale(stale, confidence, stride, n_drafted, n_sequences, table, keep, err);
}

dspark_status dspark_calibration_fit(dspark_calibration *out, const float *confidence,
                                     const uint8_t *accepted, size_t n, uint32_t k, dspark_error *err)
{
    dspark__error_clear(err);
    if (!out || (n && (!confidence || !accepted)))
        return dspark__fail_null(err, "out, confidence or accepted");
    return dspark__calibration_fit(out, confidence, accepted, n, k, err);
}

void dspark_calibration_apply(const dspark_calibration *c, const float *logits, uint32_t k,
                              float *probabilities)
{
    unsigned env = dspark__fpenv_enter();
    dspark__calibration_apply(c, logits, k, probabilities);
    dspark__fpenv_leave(env);
}

dspark_status dspark_calibration_save(const dspark_calibration *c, const char *path, dspark_error *err)
{
    dspark__error_clear(err);
    if (!c || !path) return dspark__fail_null(err, "calibration or path");
    return dspark__calibration_save(c, path, err);
}

dspark_status dspark_calibration_load(dspark_calibration *out, const char *path, dspark_error *err)
{
    dspark__error_clear(err);
    if (!out || !path) return dspark__fail_null(err, "out or path");
    return dspark__calibration_load(out, path, err);
}

double dspark_ece(const float *p, const uint8_t *y, size_t n, size_t bins)
{
    return dspark__ece(p, y, n, bins);
}

double dspark_brier(const float *p, const uint8_t *y, size_t n)
{
    return dspark__brier(p, y, n);
}

dspark_status dspark_auc(const float *p, const uint8_t *y, size_t n, double *auc, dspark_error *err)
{
    dspark__error_clear(err);
    if (!auc || (n && (!p || !y))) return dspark__fail_null(err, "p, y or auc");
    return dspark__auc(p, y, n, auc, err);
}
