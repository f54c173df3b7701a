/* Reading all data of a tensor: non-finite values, rows of zeros, the range and
 * the root mean square. Owns no memory; reads the
 * mapping piece by piece in file order. */
#include <math.h>
#include <string.h>

#include "base/numfmt.h"
#include "base/status.h"
#include "model/inspect.h"

#define PIECE_BYTES ((uint64_t)4 << 20)

/* What a run of elements held. */
typedef struct run_stats {
    uint64_t nonfinite;
    int nonzero, has_range;
    double min, max;
    double squares; /* of the finite values */
} run_stats;

static void take_value(run_stats *r, double v)
{
    if (v != 0.0) r->nonzero = 1; /* NaN too */
    if (!isfinite(v)) {
        r->nonfinite++;
        return;
    }
    if (!r->has_range || v < r->min) r->min = v;
    if (!r->has_range || v > r->max) r->max = v;
    r->has_range = 1;
    r->squares += v * v;
}

/* Eight sums side by side, so that no addition waits for the one before it. */
static double sum_squares(const unsigned char *p, uint64_t n)
{
    double lanes[8] = {0}, sum = 0;
    uint64_t i = 0;

    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) {
            double v = (double)dspark__bf16_to_f32(dspark__load_u16(p + 2 * (i + (uint64_t)j)));
            lanes[j] += v * v;
        }
    for (; i < n; i++) {
        double v = (double)dspark__bf16_to_f32(dspark__load_u16(p + 2 * i));
        sum += v * v;
    }
    for (int j = 0; j < 8; j++) sum += lanes[j];
    return sum;
}

/* A bf16 as a signed integer of the same order: 7 GB are read, so this loop must vectorise. */
static int16_t order_of(uint16_t u)
{
    int16_t k = (int16_t)u;
    return (int16_t)(k ^ ((k >> 15) & 0x7fff));
}

static double value_of(int16_t order)
{
    return (double)dspark__bf16_to_f32((uint16_t)(order ^ ((order >> 15) & 0x7fff)));
}

static void scan_bf16(run_stats *r, const unsigned char *p, uint64_t n)
{
    int16_t low = INT16_MAX, high = INT16_MIN, large = 0;
    uint16_t any = 0;

    for (uint64_t i = 0; i < n; i++) {
        uint16_t u = dspark__load_u16(p + 2 * i);
        int16_t k = order_of(u), magnitude = (int16_t)(u & 0x7fff);
        any |= u;
        low = k < low ? k : low;
        high = k > high ? k : high;
        large = magnitude > large ? magnitude : large;
    }
    if (large >= 0x7f80) {
        for (uint64_t i = 0; i < n; i++)
            take_value(r, (double)dspark__bf16_to_f32(dspark__load_u16(p + 2 * i)));
        return;
    }
    if (any & 0x7fff) r->nonzero = 1;
    if (n == 0) return;
    if (!r->has_range || value_of(low) < r->min) r->min = value_of(low);
    if (!r->has_range || value_of(high) > r->max) r->max = value_of(high);
    r->has_range = 1;
    if (r->nonzero) r->squares += sum_squares(p, n);
}

#define LOAD(type) ((void)memcpy(&u.type, p, sizeof u.type), (double)u.type)

static double load_value(dspark_dtype dtype, const unsigned char *p)
{
    union {
        uint8_t u8;
        int8_t i8;
        uint16_t u16;
        int16_t i16;
        uint32_t u32;
        int32_t i32;
        uint64_t u64;
        int64_t i64;
        float f32;
        double f64;
    } u;

    switch (dtype) {
    case DSPARK_F16: return (double)dspark__f16_to_f32(dspark__load_u16(p));
    case DSPARK_F32: return LOAD(f32);
    case DSPARK_F64: return LOAD(f64);
    case DSPARK_F8_E4M3: return (double)dspark__e4m3_to_f32(*p);
    case DSPARK_F8_E5M2: return (double)dspark__e5m2_to_f32(*p);
    case DSPARK_F8_E8M0: return (double)dspark__e8m0_to_f32(*p);
    case DSPARK_I8: return LOAD(i8);
    case DSPARK_U16: return LOAD(u16);
    case DSPARK_I16: return LOAD(i16);
    case DSPARK_U32: return LOAD(u32);
    case DSPARK_I32: return LOAD(i32);
    case DSPARK_U64: return LOAD(u64);
    case DSPARK_I64: return LOAD(i64);
    default: return LOAD(u8); /* BOOL, U8 */
    }
}

/* Bytes of one element whose value is looked at, else 0. */
static unsigned element_bytes(dspark_dtype dtype)
{
    switch (dtype) {
    case DSPARK_BF16:
    case DSPARK_F16:
    case DSPARK_U16:
    case DSPARK_I16: return 2;
    case DSPARK_F32:
    case DSPARK_U32:
    case DSPARK_I32: return 4;
    case DSPARK_F64:
    case DSPARK_U64:
    case DSPARK_I64: return 8;
    case DSPARK_F8_E4M3:
    case DSPARK_F8_E5M2:
    case DSPARK_F8_E8M0:
    case DSPARK_BOOL:
    case DSPARK_U8:
    case DSPARK_I8: return 1;
    default: return 0;
    }
}

static void scan_run(run_stats *r, dspark_dtype dtype, unsigned bytes, const unsigned char *p,
                     uint64_t n)
{
    if (dtype == DSPARK_BF16) {
        scan_bf16(r, p, n);
        return;
    }
    for (uint64_t i = 0; i < n; i++) take_value(r, load_value(dtype, p + i * bytes));
}

static void add_run(dspark__tensor_stats *s, const run_stats *r)
{
    s->nonfinite += r->nonfinite;
    if (!r->has_range) return;
    if (!s->has_range || r->min < s->min) s->min = r->min;
    if (!s->has_range || r->max > s->max) s->max = r->max;
    s->has_range = 1;
    s->rms += r->squares;
}

dspark_status dspark__tensor_scan(dspark__tensor_stats *out, const dspark_checkpoint *ckpt,
                                  const dspark_tensor *t, int (*step)(void *user, uint64_t bytes),
                                  void *user, dspark_error *err)
{
    const unsigned char *data = t->data;
    unsigned bytes = element_bytes(t->dtype);
    /* a row is the last dimension; of a vector or a scalar, all of it */
    uint64_t row = t->rank ? t->shape[t->rank - 1] : 1, left_in_row = row, done = 0;
    int row_nonzero = 0;
    dspark_status st;

    memset(out, 0, sizeof *out);
    out->elements = t->n_elements;
    out->decoded = bytes != 0;
    if ((st = dspark__checkpoint_verify(ckpt, t, err)) != DSPARK_OK) return st;
    while (done < t->n_bytes) {
        uint64_t piece = t->n_bytes - done, at;
        if (piece > PIECE_BYTES) piece = PIECE_BYTES;
        for (at = 0; bytes && at < piece;) {
            uint64_t n = (piece - at) / bytes;
            run_stats r;
            if (n > left_in_row) n = left_in_row;
            memset(&r, 0, sizeof r);
            scan_run(&r, t->dtype, bytes, data + done + at, n);
            add_run(out, &r);
            row_nonzero |= r.nonzero;
            at += n * bytes;
            left_in_row -= n;
            if (left_in_row) continue;
            out->rows++;
            out->zero_rows += !row_nonzero;
            row_nonzero = 0;
            left_in_row = row;
        }
        dspark__checkpoint_drop(ckpt, t, done, piece);
        done += piece;
        if (step && step(user, piece))
            return dspark__fail(err, DSPARK_ECANCELLED, t->name, "cancelled by the caller");
    }
    if (out->has_range) out->rms = sqrt(out->rms / (double)(out->elements - out->nonfinite));
    return DSPARK_OK;
}
