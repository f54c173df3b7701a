/* The target of examples/generate.c: a llama-style model small enough to read in one sitting.
 *
 * fp32 arithmetic on BF16 weights, any number of rows in one call. Every row is computed on its own, in
 * one order, so verifying eight rows at once gives the very bits of eight single steps: that is what
 * lets speculative text equal the target's own text byte for byte. An engine has kernels here. */
#ifndef EXAMPLES_TINY_LLAMA_H
#define EXAMPLES_TINY_LLAMA_H

#include <dspark/dspark.h>

#include <jansson.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct llama_layer {
    float *attn_norm, *q, *k, *v, *o;    /* matrices lie transposed: [in][out] */
    float *mlp_norm, *gate, *up, *down;
    float *keys, *values;                /* [max_positions][dim]: this layer's cache */
} llama_layer;

typedef struct llama {
    int dim, ffn, n_layers, n_heads, head, vocab, max_positions, max_rows;
    float eps, theta;
    float *embed, *final_norm, *lm_head;
    llama_layer *layers;
    float *x, *a, *b, *q, *k, *v, *g, *u, *scores; /* rows of one call */
} llama;

/* ---- loading ---- */

static float llama_bf16(const unsigned char *p)
{
    uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint16_t llama_to_bf16(float f) /* finite, to nearest, ties to even */
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The tensor [rows, cols] as fp32, transposed when asked for; cols 0: a vector. NULL after a message. */
static float *llama_tensor(const dspark_checkpoint *file, const char *name, int rows, int cols,
                           int transpose)
{
    const dspark_tensor *t = dspark_checkpoint_find(file, name);
    int n_cols = cols ? cols : 1, r, c;
    float *out;
    if (!t || t->dtype != DSPARK_BF16 || t->rank != (cols ? 2u : 1u) ||
        t->shape[0] != (uint64_t)rows || (cols && t->shape[1] != (uint64_t)cols)) {
        fprintf(stderr, "target: %s: expected BF16 [%d%s%d]\n", name, rows, cols ? ", " : "/", n_cols);
        return NULL;
    }
    out = malloc(sizeof *out * (size_t)rows * (size_t)n_cols);
    for (r = 0; out && r < rows; r++)
        for (c = 0; c < n_cols; c++) {
            size_t from = (size_t)r * (size_t)n_cols + (size_t)c;
            size_t to = transpose ? (size_t)c * (size_t)rows + (size_t)r : from;
            out[to] = llama_bf16((const unsigned char *)t->data + 2 * from);
        }
    return out;
}

static float *llama_layer_tensor(const dspark_checkpoint *file, int layer, const char *name, int rows,
                                 int cols)
{
    char full[128];
    snprintf(full, sizeof full, "model.layers.%d.%s.weight", layer, name);
    return llama_tensor(file, full, rows, cols, cols != 0);
}

static int llama_config(llama *m, const char *dir)
{
    char path[4096];
    int kv_heads = 0;
    double eps = 0, theta = 10000;
    json_error_t problem;
    json_t *config;
    snprintf(path, sizeof path, "%s/config.json", dir);
    config = json_load_file(path, JSON_REJECT_DUPLICATES, &problem);
    if (!config) {
        fprintf(stderr, "target: %s: %s\n", path, problem.text);
        return -1;
    }
    if (json_unpack(config, "{s:i, s:i, s:i, s:i, s:i, s:i, s?i, s:F, s?F}", "hidden_size", &m->dim,
                    "intermediate_size", &m->ffn, "num_hidden_layers", &m->n_layers,
                    "num_attention_heads", &m->n_heads, "vocab_size", &m->vocab,
                    "max_position_embeddings", &m->max_positions, "num_key_value_heads", &kv_heads,
                    "rms_norm_eps", &eps, "rope_theta", &theta) != 0 ||
        m->dim <= 0 || m->ffn <= 0 || m->n_layers <= 0 || m->n_heads <= 0 || m->vocab <= 0 ||
        m->max_positions <= 0 || m->dim > 8192 || m->ffn > 65536 || m->vocab > 1 << 20 ||
        m->n_layers > 1024 || m->max_positions > 1 << 20 || m->dim % (2 * m->n_heads) != 0 ||
        (kv_heads && kv_heads != m->n_heads)) {
        fprintf(stderr, "target: %s: not the config of a small llama\n", path);
        json_decref(config);
        return -1;
    }
    json_decref(config);
    m->head = m->dim / m->n_heads;
    m->eps = (float)eps;
    m->theta = (float)theta;
    return 0;
}

static void llama_free(llama *m)
{
    float *rows[] = {m->x, m->a, m->b, m->q, m->k, m->v, m->g, m->u, m->scores, m->embed, m->final_norm,
                     m->lm_head};
    size_t i;
    int l;
    for (l = 0; m->layers && l < m->n_layers; l++) {
        llama_layer *y = &m->layers[l];
        float *all[] = {y->attn_norm, y->q, y->k, y->v, y->o, y->mlp_norm, y->gate, y->up, y->down,
                        y->keys, y->values};
        for (i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    }
    for (i = 0; i < sizeof rows / sizeof *rows; i++) free(rows[i]);
    free(m->layers);
    memset(m, 0, sizeof *m);
}

/* max_rows: most rows of one call. 0, or -1 after a message. */
static int llama_load(llama *m, const char *dir, int max_rows)
{
    dspark_error err;
    dspark_checkpoint *file = NULL;
    int l, ok;
    memset(m, 0, sizeof *m);
    if (llama_config(m, dir) != 0) return -1;
    if (dspark_checkpoint_open(&file, dir, &err) != DSPARK_OK) {
        fprintf(stderr, "target: %s: %s\n", err.where, err.message);
        return -1;
    }
    size_t rows = (size_t)max_rows, dim = (size_t)m->dim, ffn = (size_t)m->ffn;
    m->max_rows = max_rows;
    m->embed = llama_tensor(file, "model.embed_tokens.weight", m->vocab, m->dim, 0);
    m->final_norm = llama_tensor(file, "model.norm.weight", m->dim, 0, 0);
    m->lm_head = llama_tensor(file, "lm_head.weight", m->vocab, m->dim, 1);
    m->layers = calloc((size_t)m->n_layers, sizeof *m->layers);
    m->x = malloc(sizeof(float) * rows * dim);
    m->a = malloc(sizeof(float) * rows * dim);
    m->b = malloc(sizeof(float) * rows * dim);
    m->q = malloc(sizeof(float) * rows * dim);
    m->k = malloc(sizeof(float) * rows * dim);
    m->v = malloc(sizeof(float) * rows * dim);
    m->g = malloc(sizeof(float) * rows * ffn);
    m->u = malloc(sizeof(float) * rows * ffn);
    m->scores = malloc(sizeof(float) * (size_t)m->max_positions);
    ok = m->embed && m->final_norm && m->lm_head && m->layers && m->x && m->a && m->b && m->q && m->k &&
         m->v && m->g && m->u && m->scores;
    for (l = 0; ok && l < m->n_layers; l++) {
        llama_layer *y = &m->layers[l];
        size_t cache = sizeof(float) * (size_t)m->max_positions * dim;
        y->attn_norm = llama_layer_tensor(file, l, "input_layernorm", m->dim, 0);
        y->q = llama_layer_tensor(file, l, "self_attn.q_proj", m->dim, m->dim);
        y->k = llama_layer_tensor(file, l, "self_attn.k_proj", m->dim, m->dim);
        y->v = llama_layer_tensor(file, l, "self_attn.v_proj", m->dim, m->dim);
        y->o = llama_layer_tensor(file, l, "self_attn.o_proj", m->dim, m->dim);
        y->mlp_norm = llama_layer_tensor(file, l, "post_attention_layernorm", m->dim, 0);
        y->gate = llama_layer_tensor(file, l, "mlp.gate_proj", m->ffn, m->dim);
        y->up = llama_layer_tensor(file, l, "mlp.up_proj", m->ffn, m->dim);
        y->down = llama_layer_tensor(file, l, "mlp.down_proj", m->dim, m->ffn);
        y->keys = malloc(cache);
        y->values = malloc(cache);
        ok = y->attn_norm && y->q && y->k && y->v && y->o && y->mlp_norm && y->gate && y->up &&
             y->down && y->keys && y->values;
    }
    dspark_checkpoint_close(file);
    if (!ok) {
        fprintf(stderr, "target: %s cannot be loaded\n", dir);
        llama_free(m);
        return -1;
    }
    return 0;
}

/* ---- the forward pass ---- */

static void llama_norm(const llama *m, float *y, const float *x, const float *w, int n)
{
    int r, i;
    for (r = 0; r < n; r++, x += m->dim, y += m->dim) {
        float sum = 0;
        for (i = 0; i < m->dim; i++) sum += x[i] * x[i];
        sum = 1.0f / sqrtf(sum / (float)m->dim + m->eps);
        for (i = 0; i < m->dim; i++) y[i] = x[i] * sum * w[i];
    }
}

/* y[n][out] = x[n][in] . w[in][out]; added to y when add. The weights are read once for all rows. */
static void llama_linear(float *y, const float *x, const float *w, int in, int out, int n, int add)
{
    int r, i, o;
    if (!add) memset(y, 0, sizeof *y * (size_t)n * (size_t)out);
    for (i = 0; i < in; i++, w += out)
        for (r = 0; r < n; r++) {
            const float xi = x[(size_t)r * (size_t)in + (size_t)i];
            float *row = y + (size_t)r * (size_t)out;
            for (o = 0; o < out; o++) row[o] += xi * w[o];
        }
}

/* Dimension i of a head turns with dimension i + head / 2. */
static void llama_rope(const llama *m, float *x, int position)
{
    int half = m->head / 2, h, i;
    for (i = 0; i < half; i++) {
        float angle = (float)position * powf(m->theta, -2.0f * (float)i / (float)m->head);
        float c = cosf(angle), s = sinf(angle);
        for (h = 0; h < m->n_heads; h++) {
            float *p = x + h * m->head + i, x0 = p[0], x1 = p[half];
            p[0] = x0 * c - x1 * s;
            p[half] = x1 * c + x0 * s;
        }
    }
}

static void llama_attend(const llama *m, const llama_layer *y, float *out, const float *q, int position)
{
    int h, j, i;
    for (h = 0; h < m->n_heads; h++, q += m->head, out += m->head) {
        float most = -INFINITY, sum = 0;
        for (j = 0; j <= position; j++) {
            const float *key = y->keys + (size_t)j * (size_t)m->dim + h * m->head;
            float s = 0;
            for (i = 0; i < m->head; i++) s += q[i] * key[i];
            m->scores[j] = s / sqrtf((float)m->head);
            if (m->scores[j] > most) most = m->scores[j];
        }
        for (i = 0; i < m->head; i++) out[i] = 0;
        for (j = 0; j <= position; j++) {
            const float *value = y->values + (size_t)j * (size_t)m->dim + h * m->head;
            float p = expf(m->scores[j] - most);
            sum += p;
            for (i = 0; i < m->head; i++) out[i] += p * value[i];
        }
        for (i = 0; i < m->head; i++) out[i] /= sum;
    }
}

/* Run tokens[n] at positions position .. position+n-1 over the cache of all before. logits [n][vocab];
 * taps [n][n_taps * dim] bf16: the residual stream after each layer of tap_layers (may be NULL).
 * Rows behind the accepted ones are overwritten by the next call: nothing has to be undone. */
static void llama_run(llama *m, const int32_t *tokens, int n, int position, float *logits,
                      const int32_t *tap_layers, int n_taps, uint16_t *taps)
{
    const int dim = m->dim;
    int l, r, i, t;
    for (r = 0; r < n; r++)
        memcpy(m->x + (size_t)r * (size_t)dim, m->embed + (size_t)tokens[r] * (size_t)dim,
               sizeof(float) * (size_t)dim);
    for (l = 0; l < m->n_layers; l++) {
        llama_layer *y = &m->layers[l];
        llama_norm(m, m->a, m->x, y->attn_norm, n);
        llama_linear(m->q, m->a, y->q, dim, dim, n, 0);
        llama_linear(m->k, m->a, y->k, dim, dim, n, 0);
        llama_linear(m->v, m->a, y->v, dim, dim, n, 0);
        for (r = 0; r < n; r++) {
            llama_rope(m, m->q + r * dim, position + r);
            llama_rope(m, m->k + r * dim, position + r);
        }
        memcpy(y->keys + (size_t)position * (size_t)dim, m->k, sizeof(float) * (size_t)(n * dim));
        memcpy(y->values + (size_t)position * (size_t)dim, m->v, sizeof(float) * (size_t)(n * dim));
        for (r = 0; r < n; r++) llama_attend(m, y, m->b + r * dim, m->q + r * dim, position + r);
        llama_linear(m->x, m->b, y->o, dim, dim, n, 1);
        llama_norm(m, m->a, m->x, y->mlp_norm, n);
        llama_linear(m->g, m->a, y->gate, dim, m->ffn, n, 0);
        llama_linear(m->u, m->a, y->up, dim, m->ffn, n, 0);
        for (i = 0; i < n * m->ffn; i++) m->g[i] = m->g[i] / (1.0f + expf(-m->g[i])) * m->u[i];
        llama_linear(m->x, m->g, y->down, m->ffn, dim, n, 1);
        for (t = 0; taps && t < n_taps; t++)
            for (r = 0; tap_layers[t] == l && r < n; r++)
                for (i = 0; i < dim; i++)
                    taps[((size_t)r * (size_t)n_taps + (size_t)t) * (size_t)dim + (size_t)i] =
                        llama_to_bf16(m->x[r * dim + i]);
    }
    llama_norm(m, m->a, m->x, m->final_norm, n);
    llama_linear(logits, m->a, m->lm_head, dim, m->vocab, n, 0);
}

/* The likeliest token, the lowest id on ties. */
static int32_t llama_argmax(const float *logits, int vocab)
{
    int best = 0, i;
    for (i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return (int32_t)best;
}

#endif
