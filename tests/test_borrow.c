/* The two tensors a drafter borrows: whose is taken, from where, and which pairs are refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/numfmt.h"
#include "ckpt/checkpoint.h"
#include "model/model.h"
#include "support/fixture.h"
#include "support/oom.h"
#include "support/target.h"
#include "support/tmpdir.h"

/* The tiny preset's. */
#define VOCAB  97u
#define HIDDEN 64u
#define DEPTH  8u

static dspark_error err;
static char borrower[512];     /* a tiny draft without an embedding of its own */
static char owner[512];        /* with its own embedding and LM head, of seed 9 */

static test_target plain(uint64_t seed)
{
    return test_target_plain(VOCAB, HIDDEN, DEPTH, seed);
}

static int make_drafts(void **state)
{
    dspark_synth_opts so;
    tensors t;
    char synth[512];
    test_target own = plain(9);
    uint16_t *values;
    (void)state;
    snprintf(synth, sizeof synth, "%s/ckpt", tmpdir_make());
    snprintf(borrower, sizeof borrower, "%s", tmpdir_make());
    snprintf(owner, sizeof owner, "%s", tmpdir_make());
    dspark_synth_opts_init(&so);
    so.preset = "tiny";
    so.seed = 3;
    check(dspark_synth_checkpoint(synth, &so, &err), DSPARK_OK, &err);
    test_copy_checkpoint(&t, synth, borrower);
    tensors_remove(&t, "embed_tokens.weight");
    tensors_open(&t, borrower, 1);
    tensors_clear(&t);
    test_copy_checkpoint(&t, borrower, owner);
    values = test_target_matrix(&own, 0);
    tensors_add2(&t, "embed_tokens.weight", DSPARK_BF16, VOCAB, HIDDEN, values);
    free(values);
    values = test_target_matrix(&own, 1);
    tensors_add2(&t, "lm_head.weight", DSPARK_BF16, VOCAB, HIDDEN, values);
    free(values);
    tensors_open(&t, owner, 1);
    tensors_clear(&t);
    return 0;
}

typedef struct host {
    unsigned char *memory;
    dspark_host_matrix m;
} host;

/* A target's matrix in the host's memory at an odd address and an odd stride, to the byte. */
static host host_of(const test_target *t, int head, size_t stride)
{
    size_t row = (size_t)t->hidden * 2, step = stride ? stride : row;
    uint16_t *values = test_target_matrix(t, head);
    host h = {malloc(1 + (t->vocab - 1) * step + row), {NULL, t->vocab, t->hidden, stride}};
    assert_non_null(h.memory);
    h.m.data = h.memory + 1;
    for (uint32_t r = 0; r < t->vocab; r++)
        memcpy(h.memory + 1 + r * step, values + (size_t)r * t->hidden, row);
    free(values);
    return h;
}

static dspark_status open_with(dspark_model **out, const char *draft, const char *target,
                               const host *embed, const host *head)
{
    dspark_model_opts o;
    dspark_model_opts_init(&o);
    o.parts = DSPARK_PART_BLOCK;
    o.n_threads = 1;
    o.target = target;
    o.embed_tokens = embed ? &embed->m : NULL;
    o.lm_head = head ? &head->m : NULL;
    memset(&err, 0, sizeof err);
    return dspark_model_open(out, draft, &o, &err);
}

static void refused(const char *draft, const char *target, dspark_status want, const char *const *words)
{
    dspark_model *m = (dspark_model *)(void *)&err;
    check(open_with(&m, draft, target, NULL, NULL), want, &err);
    assert_null(m);
    for (; *words; words++)
        if (!strstr(err.where, *words) && !strstr(err.message, *words))
            fail_msg("\"%s\" is not in [%s] %s", *words, err.where, err.message);
}
#define REFUSED(draft, target, want, ...) \
    refused(draft, target, want, (const char *const[]){__VA_ARGS__, NULL})

/* Element (row, column) of a bf16 shard. */
static uint16_t packed_at(const dspark__merged_linear *ml, uint32_t row, uint32_t column)
{
    const uint16_t *codes = (const void *)(ml->shards[0].codes +
                                           row / DSPARK__PANEL * ml->shards[0].code_stride);
    assert_int_equal(ml->shards[0].packing.bits, 16);
    return codes[(size_t)(column / 2) * DSPARK__PANEL * 2 + row % DSPARK__PANEL * 2 + column % 2];
}

static void embed_is(const dspark_model *m, const test_target *t)
{
    const dspark__table *e = &m->block.embed;
    assert_int_equal(e->rows, t->vocab);
    assert_int_equal(e->cols, t->hidden);
    for (uint32_t r = 0; r < t->vocab; r++)
        for (uint32_t c = 0; c < t->hidden; c++)
            if (dspark__load_u16(e->data + r * e->row_stride + 2 * c) != test_target_embed(t, r, c))
                fail_msg("embedding of seed %llu: row %u, column %u", (unsigned long long)t->seed, r, c);
}

/* embed: the head is the embedding (tied). */
static void head_is(const dspark_model *m, const test_target *t, int embed)
{
    for (uint32_t r = 0; r < t->vocab; r++)
        for (uint32_t c = 0; c < t->hidden; c++)
            if (packed_at(&m->block.lm_head, r, c) !=
                (embed ? test_target_embed(t, r, c) : test_target_head(t, r, c)))
                fail_msg("LM head of seed %llu: row %u, column %u", (unsigned long long)t->seed, r, c);
}

/* ---- whose ---- */

static void test_from_target(void **state)
{
    static const char *const prefixes[][2] = {{"model.", ""}, {"", ""},
                                              {"language_model.model.", "language_model."},
                                              {"model.language_model.", ""}};
    (void)state;
    for (size_t i = 0; i < 4; i++)
        for (size_t files = 1; files <= 3; files++) {
            const char *dir = tmpdir_make();
            test_target t = plain(20 + i);
            dspark_model *m;
            t.embed_prefix = prefixes[i][0];
            t.head_prefix = prefixes[i][1];
            t.nested = i >= 2;
            t.n_files = files;
            test_target_write(dir, &t);
            check(open_with(&m, borrower, dir, NULL, NULL), DSPARK_OK, &err);
            embed_is(m, &t);
            head_is(m, &t, 0);
            dspark_model_close(m);
            tmpdir_remove(dir);
        }
}

/* docs/faults.md has the public ones: the draft's own were overwritten or ignored. */
static void test_own_wins(void **state)
{
    const char *dir = tmpdir_make();
    test_target own = plain(9), theirs = plain(31), hosts = plain(32);
    host embed = host_of(&hosts, 0, 0), head = host_of(&hosts, 1, 0);
    dspark_model *m;
    (void)state;
    test_target_write(dir, &theirs);
    check(open_with(&m, owner, dir, &embed, &head), DSPARK_OK, &err);
    embed_is(m, &own);
    head_is(m, &own, 0);
    assert_null(m->block.target);
    dspark_model_close(m);
    check(open_with(&m, owner, NULL, NULL, NULL), DSPARK_OK, &err);
    embed_is(m, &own);
    head_is(m, &own, 0);
    dspark_model_close(m);
    free(embed.memory);
    free(head.memory);
}

/* Host before target, each tensor by itself; nothing of the target is opened that is not needed. */
static void test_host_wins(void **state)
{
    const char *dir = tmpdir_make();
    test_target theirs = plain(41), hosts = plain(42);
    host embed = host_of(&hosts, 0, HIDDEN * 2 + 3), head = host_of(&hosts, 1, HIDDEN * 2 + 5);
    dspark_model *m;
    (void)state;
    theirs.n_files = 3;
    test_target_write(dir, &theirs);
    for (int which = 0; which < 4; which++) {
        int e = which & 1, h = which >> 1;
        check(open_with(&m, borrower, dir, e ? &embed : NULL, h ? &head : NULL), DSPARK_OK, &err);
        embed_is(m, e ? &hosts : &theirs);
        head_is(m, h ? &hosts : &theirs, 0);
        if (e) assert_ptr_equal(m->block.embed.data, embed.m.data); /* in place */
        if (e && h)
            assert_null(m->block.target);
        else
            assert_int_equal(dspark__checkpoint_file_count(m->block.target), 2 - e - h);
        dspark_model_close(m);
    }
    free(embed.memory);
    free(head.memory);
}

static void test_nobody(void **state)
{
    test_target hosts = plain(43);
    host embed = host_of(&hosts, 0, 0);
    dspark_model *m;
    (void)state;
    REFUSED(borrower, NULL, DSPARK_EMODEL, "embed_tokens", "target");
    check(open_with(&m, borrower, NULL, &embed, NULL), DSPARK_EMODEL, &err);
    assert_non_null(strstr(err.where, "lm_head"));
    free(embed.memory);
}

/* The same weights, wherever they came from. */
static void test_fingerprint(void **state)
{
    test_target t = plain(44), other = plain(45);
    host embed = host_of(&t, 0, 0), head = host_of(&t, 1, HIDDEN * 2 + 1), head2 = host_of(&other, 1, 0);
    const char *dir = tmpdir_make();
    char print[2][40];
    dspark_model *m;
    (void)state;
    test_target_write(dir, &t);
    check(open_with(&m, borrower, dir, NULL, NULL), DSPARK_OK, &err);
    snprintf(print[0], sizeof print[0], "%s", dspark_model_fingerprint(m));
    snprintf(print[1], sizeof print[1], "%s", dspark_model_block_fingerprint(m));
    dspark_model_close(m);
    check(open_with(&m, borrower, NULL, &embed, &head), DSPARK_OK, &err);
    assert_string_equal(print[0], dspark_model_fingerprint(m));
    assert_string_equal(print[1], dspark_model_block_fingerprint(m));
    dspark_model_close(m);
    check(open_with(&m, borrower, NULL, &embed, &head2), DSPARK_OK, &err);
    assert_string_equal(print[0], dspark_model_fingerprint(m));
    assert_string_not_equal(print[1], dspark_model_block_fingerprint(m));
    dspark_model_close(m);
    free(embed.memory);
    free(head.memory);
    free(head2.memory);
}

static void test_tied(void **state)
{
    static const char *const ties[] = {"true", "false", "null", NULL};
    (void)state;
    for (int nested = 0; nested < 2; nested++)
        for (int stale = 0; stale < 2; stale++)
            for (int i = 0; i < 4; i++) {
                const char *dir = tmpdir_make();
                test_target t = plain(50);
                dspark_model *m;
                t.tie = ties[i];
                t.no_head = !stale;
                t.nested = nested;
                t.n_files = 2;
                test_target_write(dir, &t);
                if (i > 0 && !stale) {
                    REFUSED(borrower, dir, DSPARK_EMODEL, "lm_head.weight", "tie");
                    tmpdir_remove(dir);
                    continue;
                }
                check(open_with(&m, borrower, dir, NULL, NULL), DSPARK_OK, &err);
                embed_is(m, &t);
                head_is(m, &t, i == 0);
                dspark_model_close(m);
                tmpdir_remove(dir);
            }
}

/* A host's embedding does not stand in for the tied head of the target. */
static void test_tied_host(void **state)
{
    const char *dir = tmpdir_make();
    test_target t = plain(51), hosts = plain(52);
    host embed = host_of(&hosts, 0, 0);
    dspark_model *m;
    (void)state;
    t.tie = "true";
    t.no_head = 1;
    test_target_write(dir, &t);
    check(open_with(&m, borrower, dir, &embed, NULL), DSPARK_OK, &err);
    embed_is(m, &hosts);
    head_is(m, &t, 1);
    dspark_model_close(m);
    free(embed.memory);
}

/* ---- which files ---- */

/* Shards that hold neither tensor may be missing or broken: a target is far larger than its heads. */
static void test_other_shards(void **state)
{
    const char *dir = tmpdir_make();
    test_target t = plain(60);
    dspark_model *m;
    (void)state;
    t.n_files = 3;
    test_target_write(dir, &t);
    tmpdir_write(tmpdir_path(dir, "part-2.safetensors"), "broken", 6);
    check(open_with(&m, borrower, dir, NULL, NULL), DSPARK_OK, &err);
    assert_int_equal(dspark__checkpoint_file_count(m->block.target), 2);
    dspark_model_close(m);
    unlink(tmpdir_path(dir, "part-2.safetensors"));
    check(open_with(&m, borrower, dir, NULL, NULL), DSPARK_OK, &err);
    embed_is(m, &t);
    head_is(m, &t, 0);
    dspark_model_close(m);
    tmpdir_write(tmpdir_path(dir, "part-1.safetensors"), "broken", 6);
    REFUSED(borrower, dir, DSPARK_EFORMAT, "part-1.safetensors");
    unlink(tmpdir_path(dir, "part-1.safetensors"));
    REFUSED(borrower, dir, DSPARK_EIO, "part-1.safetensors");
    unlink(tmpdir_path(dir, "part-0.safetensors"));
    REFUSED(borrower, dir, DSPARK_EIO, "part-0.safetensors");
}

static void test_no_tensors(void **state)
{
    char gone[600];
    const char *dir = tmpdir_make();
    test_target t = plain(61);
    (void)state;
    snprintf(gone, sizeof gone, "%s/gone", dir);
    REFUSED(borrower, gone, DSPARK_EIO, "gone");
    REFUSED(owner, gone, DSPARK_EIO, "gone"); /* also when nothing is needed of it */
    REFUSED(borrower, dir, DSPARK_EIO, "safetensors");
    t.no_embed = 1;
    test_target_write(dir, &t);
    REFUSED(borrower, dir, DSPARK_EMODEL, "embed_tokens");
    dir = tmpdir_make();
    t.no_head = 1;
    t.n_files = 3;
    test_target_write(dir, &t);
    REFUSED(borrower, dir, DSPARK_EMODEL, "embed_tokens");
}

static void test_twice(void **state)
{
    const char *dir = tmpdir_make();
    tensors t = {0};
    (void)state;
    tensors_add2(&t, "model.embed_tokens.weight", DSPARK_BF16, VOCAB, HIDDEN, NULL);
    tensors_add2(&t, "embed_tokens.weight", DSPARK_BF16, VOCAB, HIDDEN, NULL);
    tensors_add2(&t, "lm_head.weight", DSPARK_BF16, VOCAB, HIDDEN, NULL);
    tensors_open(&t, dir, 1);
    tensors_clear(&t);
    REFUSED(borrower, dir, DSPARK_EMODEL, "embed_tokens.weight", "twice");
}

/* ---- pairs that do not fit ---- */

static void refused_config(const char *draft, const char *config, dspark_status want,
                           const char *const *words)
{
    const char *dir = tmpdir_make();
    test_target t = plain(70);
    t.config = config;
    test_target_write(dir, &t);
    refused(draft, dir, want, words);
    tmpdir_remove(dir);
}
#define CONFIG(config, want, ...) \
    refused_config(borrower, config, want, (const char *const[]){__VA_ARGS__, NULL}); \
    refused_config(owner, config, want, (const char *const[]){__VA_ARGS__, NULL})

static void test_pairing(void **state)
{
    (void)state;
    CONFIG("{\"vocab_size\": 98}", DSPARK_EMODEL, "vocab_size", "98", "97");
    CONFIG("{\"vocab_size\": -1}", DSPARK_EMODEL, "vocab_size", "-1", "97");
    CONFIG("{\"text_config\": {\"vocab_size\": 98}, \"vocab_size\": 97}", DSPARK_EMODEL, "vocab_size", "98",
           "97");
    CONFIG("{\"vocab_size\": \"97\"}", DSPARK_EFORMAT, "vocab_size", "integer");
    CONFIG("{\"hidden_size\": 128}", DSPARK_EMODEL, "hidden_size", "128", "64");
    CONFIG("{\"num_hidden_layers\": 9}", DSPARK_EMODEL, "num_hidden_layers", "9", "8",
           "target_num_hidden_layers");
    CONFIG("{\"num_hidden_layers\": 7}", DSPARK_EMODEL, "num_hidden_layers", "7", "taps layer 7");
    CONFIG("{\"num_hidden_layers\": -3}", DSPARK_EMODEL, "num_hidden_layers", "-3");
    CONFIG("{\"num_hidden_layers\": 93.5}", DSPARK_EFORMAT, "num_hidden_layers");
    CONFIG("{\"tie_word_embeddings\": \"true\"}", DSPARK_EFORMAT, "tie_word_embeddings");
    CONFIG("{\"vocab_size\": 97", DSPARK_EFORMAT, "config.json");
    CONFIG("{\"vocab_size\": 97, \"vocab_size\": 98}", DSPARK_EFORMAT, "vocab_size");
    CONFIG("[]", DSPARK_EFORMAT, "config.json");
}

/* Without a config, or with one that says nothing, shapes decide. */
static void test_shapes_only(void **state)
{
    static const char *const silent[] = {"", "{}", "{\"vocab_size\": null, \"text_config\": 5}"};
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        const char *dir = tmpdir_make();
        test_target t = plain(71);
        dspark_model *m;
        t.config = silent[i];
        test_target_write(dir, &t);
        check(open_with(&m, borrower, dir, NULL, NULL), DSPARK_OK, &err);
        embed_is(m, &t);
        head_is(m, &t, 0);
        dspark_model_close(m);
        dir = tmpdir_make();
        t.vocab = VOCAB + 1;
        test_target_write(dir, &t);
        REFUSED(borrower, dir, DSPARK_EMODEL, "embed_tokens.weight", "[97, 64]", "98");
        dir = tmpdir_make();
        t = plain(71);
        t.hidden = 2 * HIDDEN;
        t.config = silent[i];
        test_target_write(dir, &t);
        REFUSED(borrower, dir, DSPARK_EMODEL, "embed_tokens.weight", "[97, 64]", "128");
    }
}

static void test_head_shape(void **state)
{
    static const struct {
        const char *name;
        dspark_dtype dtype;
        uint64_t d0, d1;
        const char *word;
    } rows[] = {{"lm_head.weight", DSPARK_BF16, 98, 64, "98"},
                {"lm_head.weight", DSPARK_BF16, 97, 65, "65"},
                {"lm_head.weight", DSPARK_BF16, 97 * 64, 0, "lm_head"},
                {"lm_head.weight", DSPARK_I64, 97, 64, "lm_head"},
                {"lm_head.weights", DSPARK_BF16, 97, 64, "lm_head"},
                {"model.embed_tokens.weight", DSPARK_F16, 97, 64, "F16"},
                {"model.embed_tokens.weight_scale", DSPARK_F32, 97, 1, "1 tensors beside it"}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *dir = tmpdir_make();
        tensors t = {0};
        tensors_add2(&t, rows[i].name, rows[i].dtype, rows[i].d0, rows[i].d1, NULL);
        if (strcmp(rows[i].name, "model.embed_tokens.weight") != 0)
            tensors_add2(&t, "model.embed_tokens.weight", DSPARK_BF16, VOCAB, HIDDEN, NULL);
        if (strncmp(rows[i].name, "lm_head", 7) != 0)
            tensors_add2(&t, "lm_head.weight", DSPARK_BF16, VOCAB, HIDDEN, NULL);
        tensors_open(&t, dir, 1);
        tensors_clear(&t);
        dspark_model *m;
        dspark_status st = open_with(&m, borrower, dir, NULL, NULL);
        if (st != DSPARK_EMODEL && st != DSPARK_EUNSUPPORTED)
            fail_msg("row %zu: %s [%s] %s", i, dspark_status_name(st), err.where, err.message);
        if (!strstr(err.where, rows[i].word) && !strstr(err.message, rows[i].word))
            fail_msg("row %zu: [%s] %s", i, err.where, err.message);
        tmpdir_remove(dir);
    }
}

static void test_not_finite(void **state)
{
    const char *dir = tmpdir_make();
    test_target hosts = plain(72);
    host embed = host_of(&hosts, 0, 0), head = host_of(&hosts, 1, 0);
    const uint16_t inf = 0xff80;
    tensors t = {0};
    uint16_t *bad;
    dspark_model *m;
    (void)state;
    memcpy(head.memory + 1 + (96 * HIDDEN + 63) * 2, &inf, 2);
    check(open_with(&m, borrower, NULL, &embed, &head), DSPARK_ENONFINITE, &err);
    assert_null(m);
    assert_non_null(strstr(err.message, "row 96, column 63"));
    tensors_add2(&t, "embed_tokens.weight", DSPARK_BF16, VOCAB, HIDDEN, NULL);
    bad = tensors_add2(&t, "lm_head.weight", DSPARK_BF16, VOCAB, HIDDEN, NULL);
    bad[50 * HIDDEN] = 0x7fc0;
    tensors_open(&t, dir, 1);
    tensors_clear(&t);
    REFUSED(borrower, dir, DSPARK_ENONFINITE, "lm_head.weight", "48");
    free(embed.memory);
    free(head.memory);
}

static void test_bad_host(void **state)
{
    test_target hosts = plain(73);
    (void)state;
    for (int head = 0; head < 2; head++)
        for (int i = 0; i < 5; i++) {
            host h[2] = {host_of(&hosts, 0, 0), host_of(&hosts, 1, 0)};
            const char *words[2] = {head ? "lm_head" : "embed_tokens", ""};
            dspark_status want = DSPARK_EINVAL;
            dspark_model *m;
            dspark_host_matrix *x = &h[head].m;
            if (i == 0) x->rows++, want = DSPARK_EMODEL, words[1] = "[98, 64]";
            if (i == 1) x->cols--, want = DSPARK_EMODEL, words[1] = "[97, 63]";
            if (i == 2) x->row_stride = HIDDEN * 2 - 1, words[1] = "127";
            if (i == 3) x->row_stride = SIZE_MAX / 2, words[1] = "overflow";
            if (i == 4) x->data = NULL, words[1] = "NULL";
            check(open_with(&m, borrower, NULL, &h[0], &h[1]), want, &err);
            assert_null(m);
            assert_non_null(strstr(err.where, words[0]));
            assert_non_null(strstr(err.message, words[1]));
            free(h[0].memory);
            free(h[1].memory);
        }
}

/* ---- quantised LM heads ---- */

/* Codes that are exact: every weight is one of the format's numbers times a power of two. */
static void write_quantised(const char *dir, const char *prefix, int nvfp4, const char *config)
{
    tensors t = {0};
    char name[80];
    tensors_add2(&t, "model.embed_tokens.weight", DSPARK_BF16, VOCAB, HIDDEN, NULL);
    snprintf(name, sizeof name, "%slm_head.%s", prefix, nvfp4 ? "weight_packed" : "weight");
    unsigned char *codes = tensors_add2(&t, name, nvfp4 ? DSPARK_U8 : DSPARK_F8_E4M3, VOCAB,
                                        nvfp4 ? HIDDEN / 2 : HIDDEN, NULL);
    for (size_t i = 0; i < VOCAB * HIDDEN / (nvfp4 ? 2 : 1); i++) {
        codes[i] = (unsigned char)(i * 37 + i / HIDDEN);
        if (!nvfp4 && (codes[i] & 0x7f) == 0x7f) codes[i] = 0; /* NaN */
    }
    snprintf(name, sizeof name, "%slm_head.weight_scale", prefix);
    if (nvfp4) {
        unsigned char *scales = tensors_add2(&t, name, DSPARK_F8_E4M3, VOCAB, HIDDEN / 16, NULL);
        const float global = 64;
        memset(scales, 0x38, VOCAB * HIDDEN / 16); /* 1 */
        snprintf(name, sizeof name, "%slm_head.weight_global_scale", prefix);
        tensors_add2(&t, name, DSPARK_F32, 1, 0, &global);
    } else {
        float *scales = tensors_add2(&t, name, DSPARK_F32, VOCAB, 1, NULL);
        for (size_t i = 0; i < VOCAB; i++) scales[i] = i % 2 ? 0x1p-6f : 0x1p-7f;
    }
    tensors_open(&t, dir, 1);
    tensors_clear(&t);
    if (config) tmpdir_write(tmpdir_path(dir, "config.json"), config, strlen(config));
}

#define CT(format, weights) \
    "{\"vocab_size\": 97, \"quantization_config\": {\"quant_method\": \"compressed-tensors\", " \
    "\"format\": \"" format "\", \"config_groups\": {\"group_0\": {\"targets\": [\"Linear\"], " \
    "\"weights\": {" weights "}}}, \"ignore\": [\"model.layers.0.mlp.gate\"]}}"
#define CT_FP8 \
    CT("float-quantized", "\"num_bits\": 8, \"type\": \"float\", \"symmetric\": true, " \
                          "\"strategy\": \"channel\", \"dynamic\": false")
#define CT_NVFP4 \
    CT("nvfp4-pack-quantized", "\"num_bits\": 4, \"type\": \"float\", \"symmetric\": true, " \
                               "\"strategy\": \"tensor_group\", \"group_size\": 16, \"dynamic\": false")
#define FOREIGN "{\"vocab_size\": 97, \"quantization_config\": {\"quant_method\": \"someone-elses\"}}"

static void test_quantised_head(void **state)
{
    static const char *const prefixes[] = {"", "language_model."};
    (void)state;
    for (int i = 0; i < 8; i++) {
        int nvfp4 = i & 1, with_config = i & 2;
        const char *dir = tmpdir_make();
        dspark_model *m;
        write_quantised(dir, prefixes[i >> 2], nvfp4, !with_config ? NULL : nvfp4 ? CT_NVFP4 : CT_FP8);
        check(open_with(&m, borrower, dir, NULL, NULL), DSPARK_OK, &err);
        const dspark__merged_linear *head = &m->block.lm_head;
        assert_int_equal(head->n_filled, 1);
        assert_int_equal(head->shards[0].packing.bits, nvfp4 ? 4 : 8);
        /* less than bf16 would take */
        assert_true(head->bytes < dspark__packing_bytes(&dspark__packing_bf16, VOCAB, HIDDEN));
        /* The product with unit vectors is the weight: exact here in any order. */
        dspark__kern kern;
        check(dspark__kern_select(&kern, DSPARK_ISA_AUTO, &err), DSPARK_OK, &err);
        static _Alignas(64) unsigned char scratch[1 << 20];
        assert_true(dspark__merged_linear_scratch(1) <= sizeof scratch);
        for (uint32_t c = 0; c < HIDDEN; c += 7) {
            static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
            uint16_t x[HIDDEN] = {0}, out[3 * DSPARK__PANEL];
            x[c] = 0x3f80;
            dspark__merged_linear_rows(head, &kern, 0, 0, 3, x, sizeof x, 1, scratch, out, VOCAB);
            for (uint32_t r = 0; r < VOCAB; r++) {
                size_t at = (size_t)r * HIDDEN + c, byte = nvfp4 ? at / 2 : at;
                unsigned code = (unsigned char)(byte * 37 + byte / HIDDEN);
                double want;
                if (nvfp4) {
                    code = at % 2 ? code >> 4 : code & 15;
                    want = e2m1[code & 7] * (code & 8 ? -1 : 1) / 64;
                } else {
                    if ((code & 0x7f) == 0x7f) code = 0;
                    int e = code >> 3 & 15;
                    want = (e ? 8 + (code & 7) : code & 7) / 8.0;
                    for (int k = e ? e : 1; k < 7; k++) want /= 2;
                    for (int k = 7; k < e; k++) want *= 2;
                    want = want * (code & 0x80 ? -1 : 1) * (r % 2 ? 0x1p-6 : 0x1p-7);
                }
                float got = dspark__bf16_to_f32(out[r]);
                if ((double)got != want)
                    fail_msg("case %d: row %u, column %u: %g, want %g", i, r, c, (double)got, want);
            }
        }
        dspark_model_close(m);
    }
}

/* A dialect that is not read here matters only to a quantised head. */
static void test_foreign_config(void **state)
{
    const char *dir = tmpdir_make();
    test_target t = plain(80);
    dspark_model *m;
    (void)state;
    t.config = FOREIGN;
    test_target_write(dir, &t);
    check(open_with(&m, borrower, dir, NULL, NULL), DSPARK_OK, &err);
    head_is(m, &t, 0);
    dspark_model_close(m);
    dir = tmpdir_make();
    write_quantised(dir, "", 0, FOREIGN);
    REFUSED(borrower, dir, DSPARK_EUNSUPPORTED, "someone-elses");
}

/* ---- a host's matrix in pieces ---- */

static int hear(void *user, uint64_t done, uint64_t total)
{
    uint64_t *heard = user; /* done, total, calls, the call that cancels (0: none) */
    assert_true(done > heard[0] && done <= total);
    heard[0] = done;
    heard[1] = total;
    heard[2]++;
    return heard[2] == heard[3];
}

/* Larger than what is copied at a time: every piece lands in its place, and progress counts it. */
static void test_host_pieces(void **state)
{
    static const char *const settings[] = {"vocab_size=70001", "draft_vocab_size=70001",
                                           "mask_token_id=70000"};
    dspark_synth_opts so;
    dspark_model_opts o;
    dspark_model *m;
    test_target t = test_target_plain(70001, HIDDEN, DEPTH, 33);
    host head = host_of(&t, 1, HIDDEN * 2 + 1);
    uint64_t heard[4] = {0};
    char dir[512];
    (void)state;
    snprintf(dir, sizeof dir, "%s/ckpt", tmpdir_make());
    dspark_synth_opts_init(&so);
    so.preset = "tiny";
    so.settings = settings;
    so.n_settings = 3;
    check(dspark_synth_checkpoint(dir, &so, &err), DSPARK_OK, &err);
    dspark_model_opts_init(&o);
    o.parts = DSPARK_PART_BLOCK;
    o.lm_head = &head.m;
    o.progress = hear;
    o.progress_user = heard;
    check(dspark_model_open(&m, dir, &o, &err), DSPARK_OK, &err);
    head_is(m, &t, 0);
    dspark_model_close(m);
    assert_int_equal(heard[0], heard[1]);
    heard[3] = heard[2] - 1; /* between the two pieces */
    heard[0] = heard[2] = 0;
    check(dspark_model_open(&m, dir, &o, &err), DSPARK_ECANCELLED, &err);
    assert_null(m);
    assert_int_equal(heard[1] - heard[0], (70001 - 65520) * HIDDEN * 2);
    assert_non_null(strstr(err.where, "lm_head"));
    free(head.memory);
}

/* ---- memory ---- */

static void test_no_memory(void **state)
{
    const char *dirs[3] = {tmpdir_make(), tmpdir_make(), tmpdir_make()};
    test_target t = plain(90), hosts = plain(91);
    host head = host_of(&hosts, 1, 0);
    (void)state;
    if (!oom_available()) skip();
    t.n_files = 3;
    test_target_write(dirs[0], &t);
    write_quantised(dirs[1], "", 0, CT_FP8);
    t.config = "";
    test_target_write(dirs[2], &t);
    for (int i = 0; i < 4; i++) {
        const char *dir = dirs[i % 3];
        const host *h = i == 3 ? &head : NULL;
        dspark_model *m;
        oom_count_start();
        dspark_status st = open_with(&m, borrower, dir, NULL, h);
        size_t n = oom_stop();
        check(st, DSPARK_OK, &err);
        dspark_model_close(m);
        assert_true(n > 50);
        /* What comes before the target is the same every time. */
        for (size_t at = i ? n * 2 / 3 : 1; at <= n; at += SAMPLE ? 7 : 1) {
            oom_fail_nth(at);
            st = open_with(&m, borrower, dir, NULL, h);
            oom_stop();
            if (oom_failed() == 0) break;
            check(st, DSPARK_ENOMEM, &err);
            assert_null(m);
        }
    }
    free(head.memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_from_target),    cmocka_unit_test(test_own_wins),
        cmocka_unit_test(test_host_wins),      cmocka_unit_test(test_nobody),
        cmocka_unit_test(test_fingerprint),    cmocka_unit_test(test_tied),
        cmocka_unit_test(test_tied_host),      cmocka_unit_test(test_other_shards),
        cmocka_unit_test(test_no_tensors),     cmocka_unit_test(test_twice),
        cmocka_unit_test(test_pairing),        cmocka_unit_test(test_shapes_only),
        cmocka_unit_test(test_head_shape),     cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_bad_host),       cmocka_unit_test(test_quantised_head),
        cmocka_unit_test(test_foreign_config), cmocka_unit_test(test_host_pieces),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, make_drafts, NULL);
}
