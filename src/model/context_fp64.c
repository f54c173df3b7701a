/* The context path in double, without any rounding in between: the yardstick of `compare`. Reads the
 * checkpoint's own bytes through the scheme's reference, not the packed panels. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/numfmt.h"
#include "base/sincos.h"
#include "base/status.h"
#include "model/context.h"

typedef struct fp64_linear {
    const dspark__module *module;
    const dspark__scheme *scheme;
    const dspark__quant_rule *rule;
    uint64_t rows, k;
    const double *x; /* [n][k] */
    size_t n;
    double *out;     /* row i, output o at out + i * out_stride + o */
    size_t out_stride;
    double *scratch; /* [threads][k] */
    atomic_size_t next;
} fp64_linear;

static void fp64_task(void *arg, size_t worker)
{
    fp64_linear *job = arg;
    double *w = job->scratch + worker * job->k;
    for (size_t o; (o = atomic_fetch_add(&job->next, 1)) < job->rows;) {
        job->scheme->dequantise(job->module, job->rule, o, job->rows, job->k, w);
        for (size_t i = 0; i < job->n; i++) {
            const double *x = job->x + i * job->k;
            double sum = 0;
            for (uint64_t k = 0; k < job->k; k++) sum += x[k] * w[k];
            job->out[i * job->out_stride + o] = sum;
        }
    }
}

static dspark_status run_linear(dspark_context *ctx, const dspark__module *module, uint64_t rows,
                                uint64_t k, const double *x, size_t n, double *out,
                                size_t out_stride, double *scratch, dspark_error *err)
{
    dspark__quant_rule rule;
    fp64_linear job = {module, NULL, &rule, rows, k, x, n, out, out_stride, scratch, 0};
    dspark_status st = dspark__quant_config_rule(ctx->model->quant, module->name, &rule, err);
    if (st == DSPARK_OK) st = dspark__scheme_detect(&job.scheme, module, &rule, rows, k, err);
    for (uint32_t i = 0; st == DSPARK_OK && i < module->n_parts; i++)
        st = dspark__checkpoint_verify(ctx->model->ckpt, module->parts[i].tensor, err);
    if (st != DSPARK_OK) return st;
    dspark__threads_run(ctx->threads, fp64_task, &job, ctx->layout.n_threads);
    return DSPARK_OK;
}

static void norm(double *x, const uint16_t *w, size_t n, double eps)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i] * x[i];
    double r = 1 / sqrt(sum / (double)n + eps);
    for (size_t i = 0; i < n; i++) x[i] *= r * dspark__bf16_to_f32(w[i]);
}

static void rotate(const dspark__rope *rope, double *x, int64_t position)
{
    for (uint32_t j = 0; j < rope->n_pairs; j++) {
        double s, c, a = x[2 * j], b = x[2 * j + 1];
        dspark__sincos((float)position * rope->inv_freq[j], &s, &c);
        s *= rope->attn;
        c *= rope->attn;
        x[2 * j] = a * c - b * s;
        x[2 * j + 1] = b * c + a * s;
    }
}

static void load_rows(const dspark_batch *b, const dspark_config *c, size_t k, double *x)
{
    const unsigned char *from = b->states ? b->states : b->taps;
    size_t stride = dspark__batch_stride(b, c);
    for (size_t i = 0; i < b->n_tokens; i++)
        for (size_t j = 0; j < k; j++)
            x[i * k + j] = dspark__bf16_to_f32(dspark__load_u16(from + i * stride + 2 * j));
}

dspark_status dspark__context_fp64(dspark_context *ctx, const dspark_batch *b, double *entries,
                                   dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    const dspark_model *m = ctx->model;
    const dspark_config *c = &m->config;
    size_t n = b->n_tokens, taps = (size_t)c->n_taps * c->tap_width, h = c->hidden_size;
    size_t width = (size_t)c->kv_lora_rank + c->qk_rope_head_dim, k = taps > h ? taps : h;
    size_t x_size, states_size, scratch_size, total;
    if (n == 0) return DSPARK_OK;
    if (!b->taps == !b->states || !b->positions)
        return dspark__fail(err, DSPARK_EINVAL, "batch",
                            "positions and exactly one of taps and states must be given");
    for (size_t i = 0; i < n; i++)
        if (b->positions[i] < 0 || (uint64_t)b->positions[i] >= c->max_positions)
            return dspark__fail(err, DSPARK_ERANGE, "positions",
                                "row %zu: position %lld, the model has 0 to %llu", b->first_row + i,
                                (long long)b->positions[i], (unsigned long long)c->max_positions - 1);
    if (!dspark__mul_size(n, k, &x_size) || !dspark__mul_size(n, h, &states_size) ||
        !dspark__mul_size(ctx->layout.n_threads, k, &scratch_size) ||
        !dspark__add_size(x_size, states_size, &total) ||
        !dspark__add_size(total, scratch_size, &total) || !dspark__mul_size(total, 8, &total))
        return dspark__fail(err, DSPARK_EINVAL, "batch", "%zu rows overflow memory", n);
    double *x = dspark__alloc(&ctx->allocator, total, 64);
    if (!x) return dspark__fail_nomem(err, "fp64 rows", total);
    double *states = x + x_size, *scratch = states + states_size;

    load_rows(b, c, b->states ? h : taps, b->states ? states : x);
    if (b->taps) {
        for (size_t i = 0; m->fc_norm && i < n; i++)
            for (uint32_t t = 0; t < c->n_taps; t++)
                norm(x + i * taps + (size_t)t * c->tap_width, m->fc_norm + (size_t)t * c->tap_width,
                     c->tap_width, c->rms_norm_eps);
        st = run_linear(ctx, dspark__model_context_proj(m), h, taps, x, n, states, h, scratch, err);
        for (size_t i = 0; i < n; i++) norm(states + i * h, m->context_norm, h, c->rms_norm_eps);
    }
    for (uint32_t l = 0; st == DSPARK_OK && l < c->n_layers; l++) {
        double *out = entries + l * n * width;
        st = run_linear(ctx, dspark__model_context_kv(m, l), width, h, states, n, out, width, scratch,
                        err);
        for (size_t i = 0; st == DSPARK_OK && i < n; i++) {
            norm(out + i * width, m->kv_a_norm + (size_t)l * c->kv_lora_rank, c->kv_lora_rank,
                 c->rms_norm_eps);
            rotate(&m->rope, out + i * width + c->kv_lora_rank, b->positions[i]);
        }
    }
    dspark__free(&ctx->allocator, x, total);
    return st;
}
