/* A draft's bits depend on nothing but its own inputs, what is given is checked, and what goes wrong in
 * one sequence stays there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dspark/dspark.h"
#include "support/drafting.h"
#include "support/fixture.h"

#define ENTRIES 260

static dspark_error err;

typedef struct bench {
    const drafting *d;
    dspark_cache *cache;
    dspark_cache_view view;
    int64_t slots[ENTRIES];
    int32_t table[(ENTRIES + 15) / 16];
} bench;

/* ENTRIES positions in blocks of 16 that lie in reverse order. */
static void open_bench(bench *b, const drafting *d, dspark_cache_dtype dtype)
{
    const size_t blocks = (ENTRIES + 15) / 16;
    int64_t positions[ENTRIES];
    dspark_batch batch;
    dspark_drafter *drafter = drafting_drafter(d, DSPARK_ISA_AUTO, 1, 1);
    b->d = d;
    check(dspark_cache_create(&b->cache, d->model, dtype, 16, blocks + 1, NULL, &err), DSPARK_OK, &err);
    b->view = *dspark_cache_get_view(b->cache);
    for (size_t i = 0; i < blocks; i++) b->table[i] = (int32_t)(blocks - i);
    for (size_t i = 0; i < ENTRIES; i++) {
        positions[i] = (int64_t)i;
        b->slots[i] = b->table[i / 16] * 16 + (int64_t)(i % 16);
    }
    dspark_batch_init(&batch);
    batch.n_tokens = ENTRIES;
    batch.taps = d->taps;
    batch.positions = positions;
    batch.slots = b->slots;
    check(dspark_context_run(dspark_drafter_context(drafter), &batch, &b->view, NULL, &err), DSPARK_OK, &err);
    dspark_drafter_free(drafter);
}

static dspark_draft_input input(const bench *b, size_t n, int64_t anchor)
{
    dspark_draft_input in;
    dspark_draft_input_init(&in);
    in.anchor = anchor;
    in.position = (int64_t)n;
    in.n_context = n;
    in.slots = b->slots;
    return in;
}

static void draft(const bench *b, dspark_drafter *drafter, const dspark_draft_input *in, answer *a)
{
    answer_open(a, b->d);
    check(dspark_draft(drafter, &b->view, in, &a->out, 1, &err), DSPARK_OK, &err);
}

/* ---- the same bits ---- */

static void test_same_bits(void **state)
{
    static const dspark_cache_dtype dtypes[] = {DSPARK_CACHE_BF16, DSPARK_CACHE_FP8_E4M3,
                                                DSPARK_CACHE_FP8_E5M2};
    static const uint32_t threads[] = {1, 2, 7};
    static const size_t lengths[] = {0, 1, 250, 33, 260};
    const drafting *d = *state;
    for (size_t t = 0; t < 3; t++) {
        bench b;
        answer want[5], got[5];
        dspark_draft_input in[5];
        dspark_draft_output out[5];
        open_bench(&b, d, dtypes[t]);
        dspark_drafter *ref = drafting_drafter(d, DSPARK_ISA_REF, 1, 1);
        for (size_t i = 0; i < 5; i++) {
            in[i] = input(&b, lengths[i], (int64_t)i * 7);
            draft(&b, ref, &in[i], &want[i]);
            assert_int_equal(want[i].out.status, DSPARK_OK);
        }
        dspark_drafter_free(ref);
        for (int isa = DSPARK_ISA_REF; isa <= DSPARK_ISA_AVX512BF16; isa++)
            for (size_t w = 0; w < 3; w++)
                for (uint32_t most = 1; most <= 8; most += 7) {
                    if (!dspark_isa_available((dspark_isa)isa)) continue;
                    if (isa == DSPARK_ISA_REF && (w != 1 || most != 8)) continue; /* slow */
                    if (t && (w + (size_t)isa + (most > 1)) % 3 != 0) continue;
                    dspark_drafter *drafter = drafting_drafter(d, (dspark_isa)isa, threads[w], most);
                    for (size_t i = 0; i < 5; i++) {
                        answer_open(&got[i], d);
                        out[i] = got[i].out;
                    }
                    check(dspark_draft(drafter, &b.view, in, out, 5, &err), DSPARK_OK, &err);
                    for (size_t i = 0; i < 5; i++) {
                        got[i].out = out[i];
                        answer_equal(&want[i], &got[i], d->n, dspark_isa_name((dspark_isa)isa));
                        answer_close(&got[i]);
                    }
                    dspark_drafter_free(drafter);
                }
        for (size_t i = 0; i < 5; i++) answer_close(&want[i]);
        dspark_cache_free(b.cache);
    }
}

static void test_choices(void **state)
{
    const drafting *d = *state;
    bench b;
    answer want, got;
    open_bench(&b, d, DSPARK_CACHE_BF16);
    dspark_drafter *drafter = drafting_drafter(d, DSPARK_ISA_AUTO, 1, 1);
    dspark_draft_input in = input(&b, 100, 5);
    draft(&b, drafter, &in, &want);
    for (uint32_t k = 1; k < d->n; k++) { /* fewer tokens are the first of all */
        in.n_draft = k;
        draft(&b, drafter, &in, &got);
        assert_int_equal(got.out.n_tokens, k);
        assert_int_equal(got.out.tokens[k], 0x5a5a5a5a);
        answer_equal(&want, &got, k, "n_draft");
        answer_close(&got);
    }
    in.n_draft = 0;
    in.slots = NULL; /* the table says the same */
    in.block_table = b.table;
    in.n_table = 7;
    draft(&b, drafter, &in, &got);
    answer_equal(&want, &got, d->n, "a block table");
    answer_close(&got);
    in.forced = want.out.tokens; /* its own tokens */
    draft(&b, drafter, &in, &got);
    answer_equal(&want, &got, d->n, "forced to its own tokens");
    answer_close(&got);
    int32_t forced[64];
    memcpy(forced, want.out.tokens, d->n * sizeof *forced);
    forced[2] = (forced[2] + 1) % (int32_t)d->vocab;
    in.forced = forced;
    draft(&b, drafter, &in, &got);
    answer_equal(&want, &got, 3, "forced to another third token");
    assert_memory_not_equal(want.out.logits + 3 * d->vocab, got.out.logits + 3 * d->vocab, d->vocab * 2);
    answer_close(&got);
    answer_close(&want);
    in = input(&b, 100, 5); /* a window is a shorter list */
    in.window = 30;
    draft(&b, drafter, &in, &got);
    in.window = 0;
    in.n_context = 30;
    in.slots = b.slots + 70;
    draft(&b, drafter, &in, &want);
    answer_equal(&want, &got, d->n, "a window");
    answer_close(&got);
    answer_close(&want);
    dspark_drafter_free(drafter);
    dspark_cache_free(b.cache);
}

/* ---- what is refused ---- */

static void refuse(const bench *b, dspark_drafter *drafter, const dspark_draft_input *bad, dspark_status want,
                   const char *where)
{
    dspark_draft_input in[2] = {input(b, 20, 5), *bad};
    answer a[2];
    dspark_draft_output out[2];
    for (size_t i = 0; i < 2; i++) {
        answer_open(&a[i], b->d);
        out[i] = a[i].out;
    }
    check(dspark_draft(drafter, &b->view, in, out, 2, &err), want, &err);
    if (!strstr(err.where, where)) fail_msg("no '%s' in [%s] %s", where, err.where, err.message);
    assert_int_equal(out[0].tokens[0], 0x5a5a5a5a);
    for (size_t i = 0; i < 2; i++) answer_close(&a[i]);
}

static void test_checks(void **state)
{
    const drafting *d = *state;
    bench b;
    dspark_sampling sampling;
    int64_t slots[20];
    int32_t table[2] = {1, 2}, forced[64] = {0};
    open_bench(&b, d, DSPARK_CACHE_BF16);
    dspark_drafter *drafter = drafting_drafter(d, DSPARK_ISA_AUTO, 1, 2);
    const dspark_draft_input good = input(&b, 20, 5);
    dspark_draft_input in;
#define REFUSE(change, status, where)              \
    do {                                           \
        in = good;                                 \
        change;                                    \
        refuse(&b, drafter, &in, status, where);   \
    } while (0)
    REFUSE(in.anchor = -1, DSPARK_ERANGE, "anchor");
    REFUSE(in.anchor = (int64_t)d->vocab, DSPARK_ERANGE, "anchor");
    REFUSE(in.position = -1, DSPARK_ERANGE, "position");
    REFUSE(in.position = (int64_t)d->config->max_positions, DSPARK_ERANGE, "position");
    REFUSE(in.n_draft = (uint32_t)d->n + 1, DSPARK_EINVAL, "n_draft");
    REFUSE(in.slots = NULL, DSPARK_EINVAL, "slots");
    REFUSE(in.n_context = UINT64_MAX, DSPARK_EINVAL, "n_context");
    memcpy(slots, b.slots, sizeof slots);
    slots[19] = -1;
    REFUSE(in.slots = slots, DSPARK_ERANGE, "slots");
    slots[19] = 18 * 16;
    REFUSE(in.slots = slots, DSPARK_ERANGE, "slots");
    REFUSE((in.slots = NULL, in.block_table = table, in.n_table = 1), DSPARK_ERANGE, "block_table");
    table[1] = 18;
    REFUSE((in.slots = NULL, in.block_table = table, in.n_table = 2), DSPARK_ERANGE, "block_table");
    table[1] = -1;
    REFUSE((in.slots = NULL, in.block_table = table, in.n_table = 2), DSPARK_ERANGE, "block_table");
    forced[d->n - 1] = (int32_t)d->vocab;
    REFUSE(in.forced = forced, DSPARK_ERANGE, "forced");
    dspark_sampling_init(&sampling);
    sampling.temperature = -1;
    REFUSE(in.sampling = &sampling, DSPARK_EINVAL, "");
    REFUSE(in.struct_size = 8, DSPARK_EINVAL, "input");
    void *layers[DSPARK_MAX_LAYERS];
    memcpy(layers, b.view.layers, b.view.n_layers * sizeof *layers);
    layers[1] = NULL;
    b.view.layers = layers;
    REFUSE((void)0, DSPARK_EINVAL, "cache");
#undef REFUSE
    dspark_drafter_free(drafter);
    dspark_cache_free(b.cache);
}

/* ---- NaN in the cache ---- */

static void test_nan_entries(void **state)
{
    const drafting *d = *state;
    bench b;
    answer want, got[2];
    open_bench(&b, d, DSPARK_CACHE_BF16);
    dspark_drafter *drafter = drafting_drafter(d, DSPARK_ISA_AUTO, 2, 2);
    const size_t entry = dspark_model_entry_width(d->model) * 2;
    dspark_draft_input in[2] = {input(&b, 40, 5), input(&b, 50, 5)};
    dspark_draft_output out[2];
    draft(&b, drafter, &in[0], &want);
    for (size_t i = 41; i < ENTRIES; i++) /* entry 40 and the others' rows are not the first's */
        memset((unsigned char *)b.view.layers[0] + (size_t)b.slots[i] * entry, 0xff, entry);
    memset((unsigned char *)b.view.layers[0], 0xff, 16 * entry); /* a block that nobody has */
    for (size_t i = 0; i < 2; i++) {
        answer_open(&got[i], d);
        out[i] = got[i].out;
    }
    check(dspark_draft(drafter, &b.view, in, out, 2, &err), DSPARK_OK, &err);
    got[0].out = out[0];
    answer_equal(&want, &got[0], d->n, "beside NaN");
    assert_int_equal(out[1].status, DSPARK_ENONFINITE);
    assert_int_equal(out[1].n_tokens, 0);
    for (size_t i = 0; i < 2; i++) answer_close(&got[i]);
    answer_close(&want);
    dspark_drafter_free(drafter);
    dspark_cache_free(b.cache);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_bits), cmocka_unit_test(test_choices),
                                       cmocka_unit_test(test_checks), cmocka_unit_test(test_nan_entries)};
    return cmocka_run_group_tests_name("drafter", tests, drafting_setup, drafting_teardown);
}
