/* Modules of a checkpoint to packed linears, vectors and tables. Knows no part of the model. */
#include "model/model_fill.h"

#include <string.h>

#include "base/alloc.h"
#include "base/numfmt.h"
#include "base/status.h"
#include "ckpt/dtype.h"
#include "quant/parts.h"

dspark_status dspark__module_add(dspark__module *module, const char *suffix,
                                 const dspark_tensor *tensor, dspark_error *err)
{
    const char *name = tensor->name;
    size_t n = strlen(name), s = strlen(suffix);
    if (module->n_parts == DSPARK__MODULE_PARTS || n <= s || n - s - 1 >= sizeof module->name)
        return dspark__fail(err, DSPARK_EMODEL, name, "module has too many tensors or a name too "
                                                      "long");
    if (dspark__module_part(module, suffix))
        return dspark__fail(err, DSPARK_EMODEL, name, "%s arrived twice for one module", suffix);
    if (module->n_parts == 0) {
        memcpy(module->name, name, n - s - 1);
        module->name[n - s - 1] = 0;
    }
    module->parts[module->n_parts].suffix = suffix;
    module->parts[module->n_parts].tensor = tensor;
    module->n_parts++;
    return DSPARK_OK;
}

static int report(dspark__filler *f, uint64_t bytes)
{
    f->done += bytes;
    return f->opts->progress ? f->opts->progress(f->opts->progress_user, f->done, f->total) : 0;
}

/* A merged linear's step: whole rows, in bytes of the file. */
static int report_rows(void *user, uint64_t bytes)
{
    dspark__filler *f = user;
    return report(f, f->row_bytes ? bytes / f->row_bytes * f->row_work : bytes);
}

dspark_status dspark__fill_progress(dspark__filler *f, const char *name, uint64_t bytes,
                                    dspark_error *err)
{
    if (!report(f, bytes)) return DSPARK_OK;
    return dspark__fail(err, DSPARK_ECANCELLED, name, "cancelled while packing");
}

void dspark__fill_mark(dspark__filler *f, const char *name, uint64_t rows, uint64_t k)
{
    uint64_t shape[2] = {rows, k};
    if (!f->digest) return;
    dspark__digest_update(f->digest, name, strlen(name) + 1);
    dspark__digest_update(f->digest, shape, sizeof shape);
}

dspark_status dspark__fill_vector(dspark__filler *f, const dspark__module *module, const char *suffix,
                                  const char *name, uint64_t n, uint16_t *to, dspark_error *err)
{
    dspark_status st;
    const dspark_tensor *t = dspark__module_part(module, suffix);
    if (!t)
        return dspark__fail(err, DSPARK_EMODEL, name, "expected a tensor \"%s\", found %u parts", suffix,
                            module->n_parts);
    if (t->dtype != DSPARK_BF16 || t->rank != 1 || t->shape[0] != n)
        return dspark__fail(err, DSPARK_EMODEL, t->name, "expected BF16 [%llu], found %s of rank %u",
                            (unsigned long long)n, dspark__dtype_name(t->dtype), t->rank);
    if ((st = dspark__checkpoint_verify(f->ckpt, t, err)) != DSPARK_OK) return st;
    memcpy(to, t->data, n * 2);
    for (uint64_t i = 0; i < n; i++)
        if (!dspark__bf16_is_finite(to[i]))
            return dspark__fail(err, DSPARK_ENONFINITE, t->name, "element %llu is NaN or infinite",
                                (unsigned long long)i);
    dspark__fill_mark(f, name, n, 1);
    if (f->digest) dspark__digest_update(f->digest, to, n * 2);
    return DSPARK_OK;
}

/* A shard that is packed already. */
static dspark_status take_shard(dspark__filler *f, dspark__merged_linear *ml, uint32_t shard,
                                dspark_error *err)
{
    dspark_status st = dspark__prepacked_take(f->prepacked, ml, shard, f->opts->prepacked_verify, err);
    if (st != DSPARK_OK) return st;
    return dspark__fill_progress(f, ml->name, (uint64_t)ml->shards[shard].rows * ml->k * 2, err);
}

dspark_status dspark__fill_shard(dspark__filler *f, dspark__merged_linear *ml, uint32_t shard,
                                 const dspark__module *module, dspark_error *err)
{
    dspark__quant_rule rule;
    dspark__fill fill = {f->ckpt, module, &rule, f->threads, f->digest, report_rows, f, f->packer};
    dspark_status st = DSPARK_OK;
    const dspark_tensor *weight = dspark__module_part(module, "weight");
    if (!weight) weight = dspark__module_part(module, "weight_packed");
    f->row_bytes = weight ? weight->n_bytes / ml->shards[shard].rows : 0;
    f->row_work = (uint64_t)ml->k * 2;
    dspark__fill_mark(f, ml->name, ml->shards[shard].rows, ml->k);
    if (module->n_parts == 0) return DSPARK_OK; /* _complete names it */
    if (f->prepacked) {
        if (f->digest) st = dspark__merged_linear_hash(ml, shard, &fill, err);
        return st == DSPARK_OK ? take_shard(f, ml, shard, err) : st;
    }
    st = dspark__quant_config_rule(f->quant, module->name, &rule, err);
    return st == DSPARK_OK ? dspark__merged_linear_fill(ml, shard, &fill, err) : st;
}

dspark_status dspark__fill_rows(dspark__filler *f, dspark__merged_linear *ml, uint32_t shard,
                                const void *rows, size_t stride, dspark_error *err)
{
    dspark__fill fill = {.threads = f->threads, .digest = f->digest, .step = report_rows, .user = f,
                         .packer = f->packer};
    f->row_bytes = f->row_work = (uint64_t)ml->k * 2;
    dspark__fill_mark(f, ml->name, ml->shards[shard].rows, ml->k);
    if (!f->prepacked) return dspark__merged_linear_fill_rows(ml, shard, rows, stride, &fill, err);
    dspark_status st = DSPARK_OK;
    if (f->digest) st = dspark__merged_linear_hash_rows(ml, shard, rows, stride, &fill, err);
    return st == DSPARK_OK ? take_shard(f, ml, shard, err) : st;
}

static dspark_status put_own(dspark__filler *f, dspark__merged_linear *ml, uint32_t shard, const dspark__dense *from,
                             dspark_error *err)
{
    dspark_status st = dspark__merged_linear_fill_many(ml, shard, 1, from, f->threads, err);
    if (st != DSPARK_OK) return st;
    st = dspark__packer_put_shard(f->packer, ml, shard, NULL, err);
    dspark__shard_release(ml, shard);
    return st;
}

dspark_status dspark__fill_own(dspark__filler *f, dspark__merged_linear *ml, uint32_t shard, uint32_t n,
                               const dspark__dense *from, dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    dspark__dense one = *from;
    if (!f->prepacked && !f->packer) return dspark__merged_linear_fill_many(ml, shard, n, from, f->threads, err);
    for (uint32_t i = 0; st == DSPARK_OK && i < n; i++, one.w += from->step)
        st = f->packer ? put_own(f, ml, shard + i, &one, err)
                       : dspark__prepacked_take(f->prepacked, ml, shard + i, f->opts->prepacked_verify, err);
    return st;
}

/* Have all modules one scheme, which makes their shards alike? What is wrong with them is said when they are
 * filled. */
static int are_alike(const dspark__filler *f, const dspark__merged_linear *ml, const dspark__module *first,
                     size_t step)
{
    const dspark__scheme *scheme[2] = {NULL, NULL};
    dspark__quant_rule rule;
    for (uint32_t s = 0; s < ml->n_shards; s++) {
        const dspark__module *m = first + s * step;
        if (dspark__quant_config_rule(f->quant, m->name, &rule, NULL) != DSPARK_OK ||
            dspark__scheme_detect(&scheme[s > 0], m, &rule, ml->shards[s].rows, ml->k, NULL) != DSPARK_OK ||
            scheme[s > 0] != scheme[0])
            return 0;
    }
    return ml->n_shards > 1;
}

dspark_status dspark__fill_linear(dspark__filler *f, dspark__merged_linear *ml, const char *name,
                                  uint32_t k, uint32_t n_shards, uint32_t rows_each,
                                  const dspark__module *first, size_t step, dspark_error *err)
{
    dspark_status st = dspark__merged_linear_init_even(ml, name, k, n_shards, rows_each,
                                                       &f->model->allocator, err);
    if (st == DSPARK_OK) ml->alike = !f->prepacked && !f->packer && are_alike(f, ml, first, step);
    for (uint32_t s = 0; st == DSPARK_OK && s < n_shards; s++)
        st = dspark__fill_shard(f, ml, s, first + s * step, err);
    return st == DSPARK_OK ? dspark__merged_linear_complete(ml, err) : st;
}

static dspark_status fail_element(const dspark__module *module, uint64_t row, uint64_t column,
                                  dspark_error *err)
{
    return dspark__fail(err, DSPARK_ENONFINITE, module->name, "row %llu, column %llu is NaN or infinite",
                        (unsigned long long)row, (unsigned long long)column);
}

/* Rows that are bf16 already. */
static dspark_status copy_rows(const dspark__module *module, uint32_t rows, uint32_t k, uint16_t *to,
                               dspark_error *err)
{
    const size_t n = (size_t)rows * k;
    dspark__kern kern;
    dspark_status st = dspark__kern_select(&kern, DSPARK_ISA_AUTO, err);
    if (st != DSPARK_OK) return st;
    memcpy(to, dspark__module_part(module, "weight")->data, n * 2);
    if (kern.finite_bf16(to, n)) return DSPARK_OK;
    size_t i = 0;
    while (dspark__bf16_is_finite(to[i])) i++;
    return fail_element(module, i / k, i % k, err);
}

/* The rows as doubles, one by one, each element rounded once. */
static dspark_status expand_rows(dspark__filler *f, const dspark__module *module,
                                 const dspark__scheme *scheme, const dspark__quant_rule *rule,
                                 uint32_t rows, uint32_t k, uint16_t *to, dspark_error *err)
{
    size_t bytes = (size_t)k * sizeof(double);
    if (scheme == &dspark__scheme_bf16) return copy_rows(module, rows, k, to, err);
    double *row = dspark__alloc(&f->model->allocator, bytes, 64);
    dspark_status st = DSPARK_OK;
    if (!row) return dspark__fail_nomem(err, module->name, bytes);
    for (uint32_t r = 0; st == DSPARK_OK && r < rows; r++) {
        scheme->dequantise(module, rule, r, rows, k, row);
        for (uint32_t i = 0; i < k; i++) {
            uint16_t value = dspark__f64_to_bf16(row[i]);
            to[(size_t)r * k + i] = value;
            if (!dspark__bf16_is_finite(value)) {
                st = fail_element(module, r, i, err);
                break;
            }
        }
    }
    dspark__free(&f->model->allocator, row, bytes);
    return st;
}

dspark_status dspark__fill_dense(dspark__filler *f, const dspark__module *module, const char *name,
                                 uint32_t rows, uint32_t k, uint16_t *to, dspark_error *err)
{
    dspark_status st;
    dspark__quant_rule rule;
    const dspark__scheme *scheme;
    dspark__packing packing;
    if (module->n_parts == 0)
        return dspark__fail(err, DSPARK_EMODEL, name, "is missing");
    st = dspark__quant_config_rule(f->quant, module->name, &rule, err);
    if (st == DSPARK_OK) st = dspark__scheme_detect(&scheme, module, &rule, rows, k, err);
    if (st == DSPARK_OK) st = scheme->validate(module, &rule, rows, k, &packing, err);
    for (uint32_t i = 0; st == DSPARK_OK && i < module->n_parts; i++)
        st = dspark__checkpoint_verify(f->ckpt, module->parts[i].tensor, err);
    if (st == DSPARK_OK) st = expand_rows(f, module, scheme, &rule, rows, k, to, err);
    if (st != DSPARK_OK) return st;
    dspark__fill_mark(f, name, rows, k);
    if (f->digest) dspark__digest_update(f->digest, to, (size_t)rows * k * 2);
    for (uint32_t i = 0; i < module->n_parts; i++)
        dspark__checkpoint_drop(f->ckpt, module->parts[i].tensor, 0, module->parts[i].tensor->n_bytes);
    return dspark__fill_progress(f, module->name, (uint64_t)rows * k * 2, err);
}

dspark_status dspark__fill_table(dspark__filler *f, const dspark__module *module, const char *name,
                                 uint64_t rows, uint32_t cols, dspark__table *to, dspark_error *err)
{
    const dspark_tensor *t = dspark__module_part(module, "weight");
    if (!t)
        return dspark__fail(err, DSPARK_EMODEL, module->n_parts ? module->name : name,
                            "expected a tensor \"weight\": a table is looked up, and read as BF16 only");
    if (t->dtype != DSPARK_BF16 || t->rank != 2 || t->shape[0] != rows || t->shape[1] != cols ||
        module->n_parts != 1)
        return dspark__fail(err, DSPARK_EMODEL, t->name,
                            "expected BF16 [%llu, %u] alone, found %s of rank %u [%llu, %llu] and %u "
                            "tensors beside it",
                            (unsigned long long)rows, cols, dspark__dtype_name(t->dtype), t->rank,
                            (unsigned long long)(t->rank > 0 ? t->shape[0] : 0),
                            (unsigned long long)(t->rank > 1 ? t->shape[1] : 0), module->n_parts - 1);
    dspark_status st = dspark__checkpoint_verify(f->ckpt, t, err);
    if (st != DSPARK_OK) return st;
    *to = (dspark__table){t->data, (size_t)cols * 2, rows, cols};
    return DSPARK_OK;
}
