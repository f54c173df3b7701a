/* Making and asking bounds of the Markov bias. What is written here as a number that is "a little more"
 * is what the proof in docs/numerics.md section 12 rests on; the rest is speed. */
#include "model/markov_bound.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/numfmt.h"
#include "base/status.h"

/* Values of k that are expanded at a time; a multiple of 8. */
#define BLOCK 64u
/* Sums above it are left to the plain way: far from FLT_MAX, so that no partial sum overflows. */
#define LARGEST_SUM 0x1p120
#define LARGEST_NORM 0x1p60 /* of a row of W2 */
#define UNIT 0x1p-24 /* half a unit in the last place of fp32, relative */
/* Covers the roundings of the few operations that a norm or a factor goes through once its terms are
 * summed. */
#define LITTLE_MORE (1 + 0x1p-18)

uint64_t dspark__markov_bound_bytes(const dspark__packing *packing, uint64_t rows, uint64_t k)
{
    uint64_t stride, bytes;
    if (packing->bits < 8 || packing->permuted || k > UINT32_MAX / DSPARK__PANEL) return 0;
    stride = DSPARK__BOUND_HEAD + (k + 7) / 8 * DSPARK__PANEL * 4;
    if (!dspark__mul_u64(stride, dspark__ceil_div_u64(rows, DSPARK__PANEL), &bytes)) return 0;
    return bytes <= SIZE_MAX / 2 ? bytes : 0;
}

/* ---- a panel's weights as the product sees them ---- */

typedef struct build_job {
    const dspark__markov_bound *bound;
    const dspark__shard *shard;
    const dspark__kern *kern;
    atomic_uint next;
    atomic_uint bad; /* 1: a weight that is not finite, or too large */
} build_job;

/* Rows of one panel, BLOCK values of k of each. */
typedef float weights[BLOCK][DSPARK__PANEL];

/* Values k0 .. k0+n-1 of panel p, times their scales. Subnormals are zero, as the product reads them. */
static void load_weights(const build_job *job, size_t p, uint32_t k0, uint32_t n, weights w)
{
    const dspark__shard *shard = job->shard;
    const uint16_t *from = (const uint16_t *)(const void *)(shard->codes + p * shard->code_stride);
    _Alignas(64) uint16_t block[BLOCK * DSPARK__PANEL];
    if (shard->packing.bits == 16) {
        from += (size_t)k0 * DSPARK__PANEL;
    } else {
        const uint8_t *scales = shard->scales ? shard->scales + p * shard->scale_stride : NULL;
        job->kern->decode(block, shard->codes + p * shard->code_stride, scales, &shard->packing.format,
                          k0, n);
        from = block;
    }
    for (uint32_t i = 0; i < n; i++)
        for (size_t lane = 0; lane < DSPARK__PANEL; lane++) {
            uint16_t bits = from[((size_t)(i / 2) * DSPARK__PANEL + lane) * 2 + i % 2];
            w[i][lane] = bits & 0x7f80 ? dspark__bf16_to_f32(bits) : 0;
        }
    if (shard->packing.group)
        for (uint32_t i = 0; i < n; i++) {
            const float *s = shard->group_scales +
                             (p * shard->n_groups + (k0 + i) / shard->packing.group) * DSPARK__PANEL;
            for (size_t lane = 0; lane < DSPARK__PANEL; lane++) w[i][lane] *= s[lane];
        }
    if (shard->row_scales)
        for (uint32_t i = 0; i < n; i++)
            for (size_t lane = 0; lane < DSPARK__PANEL; lane++)
                w[i][lane] *= shard->row_scales[p * DSPARK__PANEL + lane];
}

/* ---- codes and norms of a panel ---- */

/* Steps that are tried, in root mean squares of a row: the best for normally distributed weights, and a
 * larger one for rows with outliers. */
static const float STEPS[] = {0.1676f, 0.24f};
#define N_STEPS (sizeof STEPS / sizeof *STEPS)

typedef struct panel_sums {
    float most[DSPARK__PANEL], squares[DSPARK__PANEL]; /* largest magnitude; sum of squares */
    float step[N_STEPS][DSPARK__PANEL];
    float error[N_STEPS][DSPARK__PANEL];               /* sum of squares of what the codes leave */
    float coded[N_STEPS][DSPARK__PANEL];               /* of 2c - 15 */
} panel_sums;

/* The code of w for a step whose half inverse is given: c stands for step * (2c - 15). */
static inline float code_of(float w, float half_inverse)
{
    float c = w * half_inverse + 8.0f;
    c = c < 0.0f ? 0.0f : c;
    c = c > 15.0f ? 15.0f : c;
    return (float)(int32_t)c;
}

static void invert(float *inverse, const float *step)
{
    for (size_t lane = 0; lane < DSPARK__PANEL; lane++)
        inverse[lane] = step[lane] > 0 ? 0.5f / step[lane] : 0;
}

static void add_magnitudes(panel_sums *s, weights w, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        for (size_t lane = 0; lane < DSPARK__PANEL; lane++) {
            float x = w[i][lane], a = fabsf(x);
            s->squares[lane] += x * x;
            /* NaN: the comparison is false, and squares knows */
            s->most[lane] = s->most[lane] < a ? a : s->most[lane];
        }
}

static void add_errors(panel_sums *s, weights w, uint32_t n)
{
    for (size_t t = 0; t < N_STEPS; t++) {
        float inverse[DSPARK__PANEL];
        invert(inverse, s->step[t]);
        for (uint32_t i = 0; i < n; i++)
            for (size_t lane = 0; lane < DSPARK__PANEL; lane++) {
                float level = 2 * code_of(w[i][lane], inverse[lane]) - 15;
                float left = w[i][lane] - s->step[t][lane] * level; /* the product is exact */
                s->error[t][lane] += left * left;
                s->coded[t][lane] += level * level;
            }
    }
}

/* A positive number as bf16, not below it. */
static uint16_t round_up(double x)
{
    float f = (float)(x * LITTLE_MORE);
    return (uint16_t)((dspark__f32_bits(f) + 0xffffu) >> 16);
}

/* A root that is not below the true one of n squares whose sum was computed in fp32, term by term. */
static double root_above(double sum, uint32_t n)
{
    return sqrt(sum * (1 + (n + 16.0) * 2 * UNIT) + n * 0x1p-140);
}

static void choose_steps(panel_sums *s, uint32_t k)
{
    for (size_t lane = 0; lane < DSPARK__PANEL; lane++) {
        float rms = sqrtf(s->squares[lane] / (float)k), all = s->most[lane] / 15;
        for (size_t t = 0; t < N_STEPS; t++) {
            float step = STEPS[t] * rms < all ? STEPS[t] * rms : all;
            uint16_t bits = dspark__f32_to_bf16(step);
            s->step[t][lane] = bits & 0x7f80 ? dspark__bf16_to_f32(bits) : 0;
        }
    }
}

static void write_head(const panel_sums *s, uint32_t k, unsigned char *panel, float *chosen)
{
    uint16_t head[3][DSPARK__PANEL];
    for (size_t lane = 0; lane < DSPARK__PANEL; lane++) {
        size_t t = s->error[1][lane] < s->error[0][lane];
        double norm = root_above(s->squares[lane], k);
        double coded = (double)s->step[t][lane] * root_above(s->coded[t][lane], k);
        chosen[lane] = s->step[t][lane];
        head[0][lane] = dspark__f32_to_bf16(chosen[lane]);
        head[1][lane] = round_up(root_above(s->error[t][lane], k));
        head[2][lane] = round_up(norm > coded ? norm : coded);
    }
    memset(panel, 0, DSPARK__BOUND_HEAD);
    memcpy(panel, head, sizeof head);
}

static void write_codes(weights w, uint32_t n, const float *inverse, unsigned char *to)
{
    for (uint32_t i = 0; i < n; i++)
        for (size_t lane = 0; lane < DSPARK__PANEL; lane++) {
            unsigned c = (unsigned)code_of(w[i][lane], inverse[lane]);
            unsigned char *at = to + ((size_t)(i / 8) * DSPARK__PANEL + lane) * 4 + i % 4;
            *at = (unsigned char)(i % 8 < 4 ? c : *at | c << 4);
        }
}

static void build_panel(build_job *job, size_t p)
{
    const uint32_t k = job->bound->rank;
    unsigned char *panel = job->bound->panels + p * job->bound->stride;
    panel_sums s;
    weights w;
    float step[DSPARK__PANEL], inverse[DSPARK__PANEL], sum = 0;
    memset(&s, 0, sizeof s);
    memset(panel + DSPARK__BOUND_HEAD, 0, job->bound->stride - DSPARK__BOUND_HEAD);
    for (uint32_t k0 = 0, n; k0 < k; k0 += n) {
        n = k - k0 < BLOCK ? k - k0 : BLOCK;
        load_weights(job, p, k0, n, w);
        add_magnitudes(&s, w, n);
    }
    for (size_t lane = 0; lane < DSPARK__PANEL; lane++) sum += s.squares[lane];
    if (!(sum <= (float)(LARGEST_NORM * LARGEST_NORM))) {
        atomic_store(&job->bad, 1);
        return;
    }
    choose_steps(&s, k);
    for (uint32_t k0 = 0, n; k0 < k; k0 += n) {
        n = k - k0 < BLOCK ? k - k0 : BLOCK;
        load_weights(job, p, k0, n, w);
        add_errors(&s, w, n);
    }
    write_head(&s, k, panel, step);
    invert(inverse, step);
    for (uint32_t k0 = 0, n; k0 < k; k0 += n) {
        n = k - k0 < BLOCK ? k - k0 : BLOCK;
        load_weights(job, p, k0, n, w);
        write_codes(w, n, inverse, panel + DSPARK__BOUND_HEAD + k0 / 8 * (size_t)(DSPARK__PANEL * 4));
    }
}

static void build_task(void *arg, size_t worker)
{
    build_job *job = arg;
    (void)worker;
    for (unsigned p; (p = atomic_fetch_add(&job->next, 1)) < job->bound->n_panels;) build_panel(job, p);
}

/* ---- a linear ---- */

static double largest(const float *values, size_t n, double most)
{
    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)values[i]) <= most)) most = fabs((double)values[i]); /* NaN comes through */
    return most;
}

/* The largest magnitude of a code's expanded weight. */
static double largest_code(const dspark__shard *shard)
{
    const dspark__code_format *f = &shard->packing.format;
    const size_t n = (size_t)shard->n_panels * shard->scale_stride;
    double most = 0;
    uint8_t exponent = 0;
    if (f->scale == DSPARK__CODE_OFFSET) return 256;
    for (size_t i = 0; i < 256; i++) {
        double value = fabs((double)dspark__bf16_to_f32(f->table[i]));
        if (value > most && value < HUGE_VAL) most = value;
    }
    if (f->scale == DSPARK__CODE_E4M3) return most * 448;
    if (f->scale != DSPARK__CODE_E8M0) return most;
    for (size_t i = 0; i < n; i++) exponent = shard->scales[i] > exponent ? shard->scales[i] : exponent;
    return ldexp(most, (int)exponent - 127);
}

/* What partial sums may reach, and what rounding and flushing may cost. Scales count when they are above
 * 1: a sum before its scale must not overflow either. */
static void measure_scales(dspark__markov_bound *b, const dspark__shard *shard)
{
    const size_t lanes = (size_t)shard->n_panels * DSPARK__PANEL;
    double scale = 1;
    if (shard->packing.group) scale = largest(shard->group_scales, lanes * shard->n_groups, 1);
    if (shard->row_scales) scale *= largest(shard->row_scales, lanes, 1);
    b->most = LARGEST_NORM;
    if (shard->packing.bits < 16) b->most = largest_code(shard) * scale * b->rank;
    b->rounding = (b->rank + 2.0 * shard->n_groups + 16) * UNIT * 1.01;
    b->flushed = (b->rank + 8.0) * 0x1p-124 * scale;
}

dspark_status dspark__markov_bound_build(dspark__markov_bound *b, const dspark__merged_linear *w2,
                                         dspark__threads *threads, const dspark_allocator *allocator,
                                         dspark_error *err)
{
    const dspark__shard *shard = &w2->shards[0];
    build_job job = {.bound = b, .shard = shard};
    dspark__kern kern;
    memset(b, 0, sizeof *b);
    uint64_t bytes = dspark__markov_bound_bytes(&shard->packing, shard->rows, w2->k);
    dspark_status st = dspark__kern_select(&kern, DSPARK_ISA_AUTO, err);
    if (st != DSPARK_OK || bytes == 0) return st;
    b->allocator = dspark__allocator_or_default(allocator);
    b->rank = w2->k;
    b->n_panels = shard->n_panels;
    b->stride = (size_t)(bytes / shard->n_panels);
    measure_scales(b, shard);
    if (!(b->most <= LARGEST_SUM) || !(b->flushed <= 0x1p-60)) return DSPARK_OK;
    b->panels = dspark__alloc(&b->allocator, bytes, 64);
    if (!b->panels) return dspark__fail_nomem(err, "bounds of markov_w2", bytes);
    b->bytes = bytes;
    job.kern = &kern;
    atomic_init(&job.next, 0);
    atomic_init(&job.bad, 0);
    dspark__threads_run(threads, build_task, &job,
                        dspark__threads_worth(threads, b->n_panels,
                                              (double)b->n_panels * DSPARK__PANEL * b->rank * 8));
    if (atomic_load(&job.bad)) dspark__markov_bound_free(b);
    return DSPARK_OK;
}

void dspark__markov_bound_free(dspark__markov_bound *b)
{
    if (b->panels) dspark__free(&b->allocator, b->panels, b->bytes);
    memset(b, 0, sizeof *b);
}

/* ---- a vector ---- */

int dspark__markov_bound_vector(const dspark__markov_bound *b, const uint16_t *x, float scale,
                                int8_t *codes, dspark__bound_panels *call)
{
    const size_t width = dspark__markov_bound_width(b->rank);
    double most = 0, squares = 0, left = 0;
    int32_t sum = 0;
    for (uint32_t i = 0; i < b->rank; i++) {
        double v = x[i] & 0x7f80 ? (double)dspark__bf16_to_f32(x[i]) : 0; /* as the product reads it */
        if ((x[i] & 0x7f80) == 0x7f80) return 0;
        squares += v * v;
        most = fabs(v) > most ? fabs(v) : most;
    }
    const double norm = sqrt(squares) * LITTLE_MORE;
    if (!(norm * b->most * (scale > 1 ? (double)scale : 1) <= LARGEST_SUM)) return 0;

    const float step = most >= 0x1p-100 ? (float)(most / 127) : 0;
    memset(codes, 0, width);
    for (uint32_t i = 0; i < b->rank; i++) {
        double v = x[i] & 0x7f80 ? (double)dspark__bf16_to_f32(x[i]) : 0;
        double c = step > 0 ? rint(v / (double)step) : 0;
        c = c > 127 ? 127 : c < -127 ? -127 : c;
        codes[i] = (int8_t)c;
        sum += (int32_t)c;
        v -= (double)step * c;
        left += v * v;
    }
    const double rest = sqrt(left) * LITTLE_MORE;
    const double rounding = b->rounding * (norm + rest);
    memset(call, 0, sizeof *call);
    call->stride = b->stride;
    call->k = width;
    call->x = codes;
    call->offset = 15 * sum;
    call->step = step;
    call->residual = (float)(norm * LITTLE_MORE);
    call->norm = (float)((rest + rounding) * LITTLE_MORE);
    call->reach = (float)((norm + rounding) * LITTLE_MORE);
    call->slack = (float)(b->flushed * LITTLE_MORE);
    call->scale = scale;
    return 1;
}
