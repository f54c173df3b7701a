/* Whose overflow is it? A row of finite numbers gave one that is none: the row's own numbers are too large,
 * or ordinary ones met weights, scales or norms that are. Looks at magnitudes only, after the fact, and
 * computes nothing again. */
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "model/context.h"

/* No trained model has numbers above it in its hidden states or norms. A product of 2^16 such numbers
 * with weights below it stays below 1e17, and the sum of its squares within fp32: whatever overflows with
 * all else below it is the weights. */
#define ORDINARY 1e6

/* A normed number is at most the root of its row's width, 2^8; only a norm above this lifts it out of bf16. */
#define NORM_MOST 1e30

/* "PREFIX." of a module's name. */
static int prefix_length(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? (int)(dot - name) + 1 : 0;
}

/* The second dialect's names of context_proj and context_norm. */
static const char *context_norm_name(const char *proj)
{
    return strcmp(proj + prefix_length(proj), "fc") == 0 ? "hidden_norm" : "context_norm";
}

/* "row 7, layer 1 overflows"; states are of no layer. */
typedef struct fault {
    char text[64];
} fault;

static fault describe(const dspark_batch *b, const dspark__bad *bad, int in_layer)
{
    fault f;
    char layer[24] = "";
    if (in_layer) snprintf(layer, sizeof layer, ", layer %u", bad->layer);
    snprintf(f.text, sizeof f.text, "row %zu%s overflows", b->first_row + bad->row, layer);
    return f;
}

static dspark_status fail_norm(fault f, const char *module, const char *norm, float most, dspark_error *err)
{
    char where[192];
    snprintf(where, sizeof where, "%.*s%s.weight", prefix_length(module), module, norm);
    return dspark__fail(err, DSPARK_ENONFINITE, where, "%s, whatever its own numbers are: the norm's are up to %.3g",
                        f.text, (double)most);
}

static dspark_status fail_weights(fault f, const char *module, dspark_error *err)
{
    return dspark__fail(err, DSPARK_ENONFINITE, module,
                        "%s, and its own numbers are ordinary: weights or scales are too large", f.text);
}

static dspark_status fail_row(fault f, const char *what, float most, dspark_error *err)
{
    return dspark__fail(err, DSPARK_ENONFINITE, what, "%s: the result is not finite; the row's numbers are up to %.3g",
                        f.text, (double)most);
}

dspark_status dspark__blame_states(const dspark_context *ctx, const dspark_batch *b, const dspark__bad *bad,
                                   dspark_error *err)
{
    const dspark_model *m = ctx->model;
    const dspark_config *c = &m->config;
    const char *proj = dspark__model_context_proj(m)->name;
    const unsigned char *row = (const unsigned char *)b->taps + bad->row * dspark__batch_stride(b, c);
    const fault f = describe(b, bad, 0);
    float most = ctx->kern.absmax_bf16(row, (size_t)c->n_taps * c->tap_width);
    if ((double)most > ORDINARY) return fail_row(f, "states", most, err);
    for (uint32_t t = 0; m->fc_norm && t < c->n_taps; t++) {
        char name[32];
        most = ctx->kern.absmax_bf16(m->fc_norm + (size_t)t * c->tap_width, c->tap_width);
        snprintf(name, sizeof name, "fc_norm.%u", t);
        if ((double)most > ORDINARY) return fail_norm(f, proj, name, most, err);
    }
    most = ctx->kern.absmax_bf16(m->context_norm, c->hidden_size);
    if ((double)most > NORM_MOST) return fail_norm(f, proj, context_norm_name(proj), most, err);
    return fail_weights(f, proj, err);
}

dspark_status dspark__blame_entries(const dspark_context *ctx, const dspark_batch *b, const dspark__bad *bad,
                                    dspark_error *err)
{
    const dspark_model *m = ctx->model;
    const dspark_config *c = &m->config;
    const char *proj = dspark__model_context_proj(m)->name;
    const char *module = dspark__model_context_kv(m, bad->layer)->name;
    const fault f = describe(b, bad, 1);
    float most;
    if (b->states) {
        const unsigned char *row = (const unsigned char *)b->states + bad->row * dspark__batch_stride(b, c);
        most = ctx->kern.absmax_bf16(row, c->hidden_size);
        if ((double)most > ORDINARY) return fail_row(f, "entries", most, err);
    } else {
        /* The states were normed: however large the taps, they are as large as that norm's weights. */
        most = ctx->kern.absmax_bf16(m->context_norm, c->hidden_size);
        if ((double)most > ORDINARY) return fail_norm(f, proj, context_norm_name(proj), most, err);
    }
    most = ctx->kern.absmax_bf16(m->kv_a_norm + (size_t)bad->layer * c->kv_lora_rank, c->kv_lora_rank);
    if ((double)most > NORM_MOST) return fail_norm(f, module, "kv_a_layernorm", most, err);
    return fail_weights(f, module, err);
}
