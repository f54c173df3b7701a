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

/* Values of k that are expanded at a time, and turned at most; a power of two. */
#define BLOCK 256u
/* Of packed codes that are decoded at a time. */
#define DECODE 64u
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

/* Rows of one panel, BLOCK values of k of each, zero behind the last. */
typedef float weights[BLOCK][DSPARK__PANEL];

static void scale_rows(float (*w)[DSPARK__PANEL], uint32_t n, const float *s)
{
    for (uint32_t i = 0; i < n; i++)
        for (size_t lane = 0; lane < DSPARK__PANEL; lane++) w[i][lane] *= s[lane];
}

/* Values k0 .. k0+n-1 of panel p, times their scales. When n is odd, n+1 rows are written. */
static void load_weights(const build_job *job, size_t p, uint32_t k0, uint32_t n, weights w)
{
    const dspark__shard *shard = job->shard;
    const uint32_t group = shard->packing.group;
    if (shard->packing.bits == 16) {
        const uint16_t *from = (const uint16_t *)(const void *)(shard->codes + p * shard->code_stride);
        job->kern->bound_widen(w, from + (size_t)k0 * DSPARK__PANEL, n);
        return;
    }
    const uint8_t *scales = shard->scales ? shard->scales + p * shard->scale_stride : NULL;
    for (uint32_t i = 0; i < n; i += DECODE) {
        _Alignas(64) uint16_t block[DECODE * DSPARK__PANEL];
        const uint32_t m = n - i < DECODE ? n - i : DECODE;
        job->kern->decode(block, shard->codes + p * shard->code_stride, scales, &shard->packing.format,
                          k0 + i, m);
        job->kern->bound_widen(w + i, block, m);
    }
    if (group)
        for (uint32_t i = 0; i < n; i++)
            scale_rows(w + i, 1, shard->group_scales +
                                     (p * shard->n_groups + (k0 + i) / group) * DSPARK__PANEL);
    if (shard->row_scales) scale_rows(w, n, shard->row_scales + p * DSPARK__PANEL);
}

/* Rows are turned before they are coded, and vectors are turned with them: no product changes, but the
 * elements become alike, and a few large ones do not spoil the codes of all others. Hadamard's matrix, not
 * normalised, on `turn` elements at a time (a power of two that divides the width). */
static uint32_t turn_of(uint32_t rank)
{
    uint32_t width = (uint32_t)dspark__markov_bound_width(rank), turn = width & (~width + 1);
    return turn < BLOCK ? turn : BLOCK;
}

/* Values k0 .. of panel p, turned, their squares added; returns how many, a multiple of 8. */
static uint32_t load_turned(const build_job *job, size_t p, uint32_t k0, weights w, float *squares)
{
    const uint32_t rank = job->bound->rank, n = rank - k0 < BLOCK ? rank - k0 : BLOCK;
    const uint32_t whole = (n + 7) / 8 * 8;
    load_weights(job, p, k0, n, w);
    for (uint32_t i = n; i < whole; i++) memset(w[i], 0, sizeof w[i]);
    job->kern->bound_turn(w, whole, turn_of(rank), squares);
    return whole;
}

/* ---- codes and norms of a panel ---- */

/* The step in root mean squares of a row: the best one for 16 levels of normally distributed numbers. */
#define STEP 0.1676f

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

static void build_panel(build_job *job, size_t p)
{
    const uint32_t k = job->bound->rank;
    unsigned char *panel = job->bound->memory + p * job->bound->stride, *to = panel + DSPARK__BOUND_HEAD;
    weights w;
    float squares[DSPARK__PANEL] = {0}, left[DSPARK__PANEL] = {0}, again[DSPARK__PANEL] = {0}, sum = 0;
    float step[DSPARK__PANEL], inverse[DSPARK__PANEL];
    uint16_t head[3][DSPARK__PANEL];
    uint32_t n = 0;
    for (uint32_t k0 = 0; k0 < k; k0 += BLOCK) n = load_turned(job, p, k0, w, squares);
    for (size_t lane = 0; lane < DSPARK__PANEL; lane++) sum += squares[lane];
    if (!(sum <= (float)(LARGEST_NORM * LARGEST_NORM))) { /* or NaN */
        atomic_store(&job->bad, 1);
        return;
    }
    for (size_t lane = 0; lane < DSPARK__PANEL; lane++) {
        head[0][lane] = dspark__f32_to_bf16(STEP * sqrtf(squares[lane] / (float)k));
        if (!(head[0][lane] & 0x7f80)) head[0][lane] = 0;
        step[lane] = dspark__bf16_to_f32(head[0][lane]);
        inverse[lane] = step[lane] > 0 ? 0.5f / step[lane] : 0;
    }
    for (uint32_t k0 = 0; k0 < k; k0 += BLOCK) {
        if (k > BLOCK) n = load_turned(job, p, k0, w, again);
        job->kern->bound_codes(to, (const float (*)[DSPARK__PANEL])w, n, inverse, step, left);
        to += (size_t)n * DSPARK__PANEL / 2;
    }
    const uint32_t width = (uint32_t)dspark__markov_bound_width(k);
    for (size_t lane = 0; lane < DSPARK__PANEL; lane++) {
        head[1][lane] = round_up(root_above(left[lane], width));
        head[2][lane] = round_up(root_above(squares[lane], width));
    }
    memset(panel, 0, DSPARK__BOUND_HEAD);
    memcpy(panel, head, sizeof head);
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
    b->rounding = (b->rank + 2.0 * shard->n_groups + 32) * UNIT * 1.01;
    b->flushed = (b->rank + 8.0) * 0x1p-124 * scale;
}

/* All but the panels. 0: there are none, or sums might overflow. */
static uint64_t begin_bound(dspark__markov_bound *b, const dspark__merged_linear *w2)
{
    const dspark__shard *shard = &w2->shards[0];
    const uint64_t bytes = dspark__markov_bound_bytes(&shard->packing, shard->rows, w2->k);
    memset(b, 0, sizeof *b);
    if (bytes == 0) return 0;
    b->rank = w2->k;
    b->n_panels = shard->n_panels;
    b->stride = (size_t)(bytes / shard->n_panels);
    b->bytes = bytes;
    measure_scales(b, shard);
    return b->most <= LARGEST_SUM && b->flushed <= 0x1p-60 ? bytes : 0;
}

dspark_status dspark__markov_bound_build(dspark__markov_bound *b, const dspark__merged_linear *w2,
                                         dspark__threads *threads, const dspark_allocator *allocator,
                                         dspark_error *err)
{
    build_job job = {.bound = b, .shard = &w2->shards[0]};
    dspark__kern kern;
    dspark_status st = dspark__kern_select(&kern, DSPARK_ISA_AUTO, err);
    if (begin_bound(b, w2) == 0 || st != DSPARK_OK) {
        memset(b, 0, sizeof *b);
        return st;
    }
    b->allocator = dspark__allocator_or_default(allocator);
    b->memory = dspark__alloc(&b->allocator, b->bytes, 64);
    if (!b->memory) {
        st = dspark__fail_nomem(err, "bounds of markov_w2", b->bytes);
        memset(b, 0, sizeof *b);
        return st;
    }
    b->panels = b->memory;
    job.kern = &kern;
    atomic_init(&job.next, 0);
    atomic_init(&job.bad, 0);
    dspark__threads_run(threads, build_task, &job,
                        dspark__threads_worth(threads, b->n_panels,
                                              (double)b->n_panels * DSPARK__PANEL * b->rank * 8));
    if (atomic_load(&job.bad)) dspark__markov_bound_free(b);
    return DSPARK_OK;
}

/* Step, residual and norm of 48 rows: what the kernels rely on. Any code of 4 bits is one. */
static int head_is_sound(const unsigned char *head)
{
    uint16_t values[3 * DSPARK__PANEL];
    memcpy(values, head, sizeof values);
    for (size_t i = 0; i < 3 * DSPARK__PANEL; i++)
        if (values[i] >= 0x7f80u) return 0; /* negative, infinite or NaN */
    return 1;
}

const char *dspark__markov_bound_attach(dspark__markov_bound *b, const dspark__merged_linear *w2,
                                        const unsigned char *panels)
{
    const char *wrong = begin_bound(b, w2) ? NULL : "there are none of such weights";
    for (size_t p = 0; !wrong && p < b->n_panels; p++)
        if (!head_is_sound(panels + p * b->stride)) wrong = "a step or norm is no finite positive number";
    if (wrong) memset(b, 0, sizeof *b);
    else b->panels = panels;
    return wrong;
}

void dspark__markov_bound_free(dspark__markov_bound *b)
{
    if (b->memory) dspark__free(&b->allocator, b->memory, b->bytes);
    memset(b, 0, sizeof *b);
}

/* ---- a vector ---- */

static void turn_vector(double *x, size_t n, size_t turn)
{
    for (size_t half = 1; half < turn; half *= 2)
        for (size_t i = 0; i < n; i++) {
            if (i & half) continue;
            double sum = x[i] + x[i + half], difference = x[i] - x[i + half];
            x[i] = sum;
            x[i + half] = difference;
        }
    for (size_t i = 0; i < n; i++) x[i] /= (double)turn; /* of both sides together: exact */
}

/* BLOCK elements of x from k0 on, as the product reads them, turned. Returns how many. */
static size_t load_vector(const dspark__markov_bound *b, const uint16_t *x, size_t k0, double *v)
{
    const size_t width = dspark__markov_bound_width(b->rank);
    const size_t n = width - k0 < BLOCK ? width - k0 : BLOCK;
    for (size_t i = 0; i < n; i++) {
        uint16_t bits = k0 + i < b->rank ? x[k0 + i] : 0;
        v[i] = bits & 0x7f80 ? (double)dspark__bf16_to_f32(bits) : 0;
    }
    turn_vector(v, n, turn_of(b->rank));
    return n;
}

int dspark__markov_bound_vector(const dspark__markov_bound *b, const uint16_t *x, float scale,
                                int8_t *codes, dspark__bound_panels *call)
{
    double v[BLOCK], most = 0, plain = 0, squares = 0, left = 0;
    const size_t width = dspark__markov_bound_width(b->rank);
    int32_t sum = 0;
    for (uint32_t i = 0; i < b->rank; i++) {
        double value = x[i] & 0x7f80 ? (double)dspark__bf16_to_f32(x[i]) : 0;
        if (!dspark__bf16_is_finite(x[i])) return 0;
        plain += value * value;
    }
    for (size_t k0 = 0; k0 < width; k0 += BLOCK) {
        const size_t n = load_vector(b, x, k0, v);
        for (size_t i = 0; i < n; i++) {
            squares += v[i] * v[i];
            most = fabs(v[i]) > most ? fabs(v[i]) : most;
        }
    }
    if (!(sqrt(plain) * b->most * (scale > 1 ? (double)scale : 1) <= LARGEST_SUM)) return 0;
    if (plain > 0 && most < 0x1p-100) return 0; /* factors would be subnormal */

    const float step = (float)(most / 127);
    for (size_t k0 = 0; k0 < width; k0 += BLOCK) {
        const size_t n = load_vector(b, x, k0, v);
        for (size_t i = 0; i < n; i++) {
            double c = step > 0 ? rint(v[i] / (double)step) : 0;
            c = c > 127 ? 127 : c < -127 ? -127 : c;
            codes[k0 + i] = (int8_t)c;
            sum += (int32_t)c;
            v[i] -= (double)step * c;
            left += v[i] * v[i];
        }
    }
    const double norm = sqrt(squares) * LITTLE_MORE, rest = sqrt(left) * LITTLE_MORE;
    const double rounding = b->rounding * (norm + rest);
    memset(call, 0, sizeof *call);
    call->stride = b->stride;
    call->k = width;
    call->x = codes;
    call->offset = 15 * sum;
    call->step = step;
    call->residual = (float)((norm + rest) * LITTLE_MORE);
    call->norm = (float)((rest + rounding) * LITTLE_MORE);
    call->reach = (float)((norm + rounding) * LITTLE_MORE);
    call->slack = (float)(b->flushed * LITTLE_MORE);
    call->scale = scale;
    return 1;
}
