/* dspark_quantize: every format is written, opens again and is the same bytes for any number of
 * threads; patterns choose what they say; what goes wrong is named and leaves nothing behind; a file
 * that changes under the comparison is never published. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <dirent.h>
#include <jansson.h>

#include "dspark/dspark.h"
#include "support/oom.h"
#include "support/run_cli.h"
#include "support/tmpdir.h"

static dspark_error err;
static const char *root;
static const char *tiny; /* one file */
static const char *cut;  /* the same in shards */

#define must(call) \
    do { \
        if ((call) != DSPARK_OK) \
            fail_msg("%s: %s: %s: %s", #call, dspark_status_name(err.code), err.where, err.message); \
    } while (0)

static const char *in_root(const char *name)
{
    return tmpdir_path(root, name);
}

static char *keep_path(const char *name)
{
    char *path = strdup(in_root(name));
    assert_non_null(path);
    return path;
}

static void synth(const char *dir, uint64_t shard_bytes, const char *setting)
{
    dspark_synth_opts o;
    dspark_synth_opts_init(&o);
    o.preset = "tiny";
    o.seed = 11;
    o.shard_bytes = shard_bytes;
    o.settings = setting ? &setting : NULL;
    o.n_settings = setting != NULL;
    must(dspark_synth_checkpoint(dir, &o, &err));
}

static int group_setup(void **state)
{
    (void)state;
    root = tmpdir_make();
    tiny = keep_path("tiny");
    cut = keep_path("cut");
    synth(tiny, 0, NULL);
    synth(cut, 60000, NULL);
    return 0;
}

static int group_teardown(void **state)
{
    (void)state;
    free((char *)tiny);
    free((char *)cut);
    tmpdir_remove(root);
    return 0;
}

static dspark_quantize_opts options(dspark_format format)
{
    dspark_quantize_opts o;
    dspark_quantize_opts_init(&o);
    o.format = format;
    o.group_size = format == DSPARK_FORMAT_INT4 ? 32 : 0;
    o.n_threads = 1;
    return o;
}

static int exists(const char *path)
{
    return access(path, F_OK) == 0;
}

static void same_files_at(const char *a, const char *b, const char *name)
{
    size_t n, m;
    char *x = read_whole_file(tmpdir_path(a, name), &n), *y = read_whole_file(tmpdir_path(b, name), &m);
    assert_non_null(x);
    assert_non_null(y);
    assert_int_equal(n, m);
    assert_memory_equal(x, y, n);
    free(x);
    free(y);
}

/* ---- every format ---- */

typedef struct seen {
    size_t n, n_lost; /* quantised, and BF16 that were quantised before */
    uint64_t before, after;
    double worst_sqnr;
    char names[64][96];
} seen;

static void see(void *user, const dspark_quantize_report *r)
{
    seen *s = user;
    if (strcmp(r->format, "bf16") == 0) {
        s->n_lost++;
        return;
    }
    assert_true(s->n < 64);
    snprintf(s->names[s->n++], sizeof s->names[0], "%s", r->name);
    s->before += r->bytes_before;
    s->after += r->bytes_after;
    assert_true(r->max_abs_error > 0 && r->relative_rms > 0);
    assert_true(fabs(r->sqnr_db + 20 * log10(r->relative_rms)) < 1e-9);
    if (s->n == 1 || r->sqnr_db < s->worst_sqnr) s->worst_sqnr = r->sqnr_db;
}

static void test_formats(void **state)
{
    static const struct {
        dspark_format format;
        double bits, sqnr; /* at most, at least */
    } cases[] = {
        {DSPARK_FORMAT_FP8_TENSOR, 8.2, 30}, {DSPARK_FORMAT_FP8_CHANNEL, 9.1, 30},
        {DSPARK_FORMAT_FP8_BLOCK, 8.2, 30}, {DSPARK_FORMAT_NVFP4, 4.6, 18},
        {DSPARK_FORMAT_MXFP4, 4.3, 17}, {DSPARK_FORMAT_MXFP8, 8.3, 30},
        {DSPARK_FORMAT_INT8, 8.6, 45}, {DSPARK_FORMAT_INT4, 4.8, 20},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int how = 0; how < 4; how++) { /* absmax, mse; compressed-tensors, ModelOpt */
            dspark_quantize_opts o = options(cases[i].format);
            seen s = {0}, t = {0};
            char name[64];
            char *a, *b;
            dspark_model *model;
            dspark_inspection *in;
            o.scales = how & 1 ? DSPARK_SCALES_MSE : DSPARK_SCALES_ABSMAX;
            o.layout = how & 2 ? DSPARK_LAYOUT_MODELOPT : DSPARK_LAYOUT_COMPRESSED_TENSORS;
            if (o.layout && o.format != DSPARK_FORMAT_NVFP4 && o.format != DSPARK_FORMAT_FP8_TENSOR)
                continue;
            snprintf(name, sizeof name, "%s-%d", dspark_format_name(o.format), how);
            a = keep_path(name);
            snprintf(name, sizeof name, "%s-%d-again", dspark_format_name(o.format), how);
            b = keep_path(name);
            o.report = see;
            o.report_user = &s;
            must(dspark_quantize(tiny, a, &o, &err));
            assert_int_equal(s.n, 36); /* 7 a layer and context_proj */
            assert_true((double)s.after / (double)s.before < cases[i].bits / 16);
            if (s.worst_sqnr < cases[i].sqnr)
                fail_msg("%s: %g dB", name, s.worst_sqnr);
            /* threads and shards change no byte of a tensor */
            o.n_threads = 3;
            o.report_user = &t;
            must(dspark_quantize(tiny, b, &o, &err));
            same_files_at(a, b, "model.safetensors");
            same_files_at(a, b, "config.json");
            assert_true(s.worst_sqnr == t.worst_sqnr);
            assert_int_equal(tmpdir_count(a), o.layout ? 3 : 2);
            must(dspark_inspect(&in, a, NULL, &err));
            if (dspark_inspection_verdict(in) != DSPARK_USABLE)
                fail_msg("%s", dspark_inspection_json(in));
            dspark_inspection_free(in);
            must(dspark_model_open(&model, a, NULL, &err));
            dspark_model_close(model);
            tmpdir_remove(a);
            tmpdir_remove(b);
            free(a);
            free(b);
        }
    }
}

/* The search never loses to absmax on the sum over the tensor. */
static double total_error;

static void add_error(void *user, const dspark_quantize_report *r)
{
    (void)user;
    total_error += r->relative_rms * r->relative_rms;
}

static void test_search(void **state)
{
    static const dspark_format formats[] = {DSPARK_FORMAT_FP8_TENSOR, DSPARK_FORMAT_NVFP4,
                                            DSPARK_FORMAT_MXFP4, DSPARK_FORMAT_INT4};
    (void)state;
    for (size_t i = 0; i < 4; i++) {
        double errors[2];
        for (int mse = 0; mse < 2; mse++) {
            dspark_quantize_opts o = options(formats[i]);
            o.scales = mse ? DSPARK_SCALES_MSE : DSPARK_SCALES_ABSMAX;
            o.report = add_error;
            total_error = 0;
            must(dspark_quantize(tiny, in_root("s"), &o, &err));
            tmpdir_remove(in_root("s"));
            errors[mse] = total_error;
        }
        assert_true(errors[1] < errors[0]);
    }
}

/* ---- shards, and the way back ---- */

static void same_tensors(const char *a, const char *b)
{
    dspark_checkpoint *x, *y;
    must(dspark_checkpoint_open(&x, a, &err));
    must(dspark_checkpoint_open(&y, b, &err));
    assert_int_equal(dspark_checkpoint_tensor_count(x), dspark_checkpoint_tensor_count(y));
    for (size_t i = 0; i < dspark_checkpoint_tensor_count(x); i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(x, i);
        const dspark_tensor *u = dspark_checkpoint_find(y, t->name);
        if (!u) fail_msg("%s: missing", t->name);
        assert_int_equal(t->dtype, u->dtype);
        assert_int_equal(t->n_bytes, u->n_bytes);
        if (memcmp(t->data, u->data, t->n_bytes) != 0) fail_msg("%s: differs", t->name);
    }
    dspark_checkpoint_close(x);
    dspark_checkpoint_close(y);
}

static void test_shards(void **state)
{
    dspark_quantize_opts o = options(DSPARK_FORMAT_NVFP4);
    char *one = keep_path("one"), *many = keep_path("many");
    (void)state;
    must(dspark_quantize(tiny, one, &o, &err));
    must(dspark_quantize(cut, many, &o, &err));
    assert_true(exists(tmpdir_path(many, "model.safetensors.index.json")));
    assert_false(exists(tmpdir_path(one, "model.safetensors.index.json")));
    same_tensors(one, many);
    tmpdir_remove(one);
    tmpdir_remove(many);
    free(one);
    free(many);
}

/* BF16 tensors of the same values; a zero may have either sign. */
static void same_values(const char *a, const char *b)
{
    dspark_checkpoint *x, *y;
    must(dspark_checkpoint_open(&x, a, &err));
    must(dspark_checkpoint_open(&y, b, &err));
    assert_int_equal(dspark_checkpoint_tensor_count(x), dspark_checkpoint_tensor_count(y));
    for (size_t i = 0; i < dspark_checkpoint_tensor_count(x); i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(x, i);
        const dspark_tensor *u = dspark_checkpoint_find(y, t->name);
        assert_non_null(u);
        assert_int_equal(t->dtype, DSPARK_BF16);
        assert_int_equal(u->dtype, DSPARK_BF16);
        assert_int_equal(t->n_elements, u->n_elements);
        for (size_t j = 0; j < t->n_elements; j++) {
            uint16_t v, w;
            memcpy(&v, (const char *)t->data + 2 * j, 2);
            memcpy(&w, (const char *)u->data + 2 * j, 2);
            if (v != w && ((v | w) & 0x7fff)) fail_msg("%s: value %zu", t->name, j);
        }
    }
    dspark_checkpoint_close(x);
    dspark_checkpoint_close(y);
}

/* BF16 to MXFP4 to BF16 to MXFP4 to BF16: the values of codes are bf16, their scale is found again. */
static void test_way_back(void **state)
{
    char *q = keep_path("q"), *back = keep_path("back"), *again = keep_path("again");
    dspark_quantize_opts o = options(DSPARK_FORMAT_MXFP4), bf16 = options(DSPARK_FORMAT_BF16);
    dspark_checkpoint *c;
    size_t n;
    char *text;
    (void)state;
    must(dspark_quantize(tiny, q, &o, &err));
    must(dspark_quantize(q, back, &bf16, &err));
    must(dspark_quantize(back, in_root("q2"), &o, &err));
    must(dspark_quantize(in_root("q2"), again, &bf16, &err));
    same_values(back, again);
    tmpdir_remove(in_root("q2"));
    text = read_whole_file(tmpdir_path(back, "config.json"), &n);
    assert_non_null(text);
    assert_null(strstr(text, "quantization_config"));
    free(text);
    /* nothing to take back, and choices that mean nothing */
    assert_int_equal(dspark_quantize(tiny, in_root("x"), &bf16, &err), DSPARK_EINVAL);
    bf16.scales = DSPARK_SCALES_MSE;
    assert_int_equal(dspark_quantize(q, in_root("x"), &bf16, &err), DSPARK_EINVAL);
    assert_false(exists(in_root("x")));
    /* from one format to another, what is kept comes out as BF16 */
    {
        static const char *const targets[] = {"*.mlp.*", "context_proj"};
        dspark_quantize_opts mixed = options(DSPARK_FORMAT_NVFP4);
        seen s = {0};
        const dspark_tensor *t;
        mixed.targets = targets;
        mixed.n_targets = 2;
        mixed.report = see;
        mixed.report_user = &s;
        must(dspark_quantize(q, in_root("mixed"), &mixed, &err));
        assert_int_equal(s.n, 16);
        assert_int_equal(s.n_lost, 36 - 16);
        must(dspark_checkpoint_open(&c, in_root("mixed"), &err));
        t = dspark_checkpoint_find(c, "layers.3.self_attn.o_proj.weight");
        assert_non_null(t);
        assert_int_equal(t->dtype, DSPARK_BF16);
        assert_null(dspark_checkpoint_find(c, "layers.3.self_attn.o_proj.weight_scale"));
        assert_non_null(dspark_checkpoint_find(c, "layers.3.mlp.up_proj.weight_global_scale"));
        dspark_checkpoint_close(c);
        tmpdir_remove(in_root("mixed"));
    }
    tmpdir_remove(q);
    tmpdir_remove(back);
    tmpdir_remove(again);
    free(q);
    free(back);
    free(again);
}

/* ---- patterns ---- */

static size_t count_of(const char *const *ignore, size_t n_ignore, const char *const *targets,
                       size_t n_targets, seen *s)
{
    dspark_quantize_opts o = options(DSPARK_FORMAT_INT8);
    memset(s, 0, sizeof *s);
    o.ignore = ignore;
    o.n_ignore = n_ignore;
    o.targets = targets;
    o.n_targets = n_targets;
    o.report = see;
    o.report_user = s;
    must(dspark_quantize(tiny, in_root("p"), &o, &err));
    tmpdir_remove(in_root("p"));
    return s->n;
}

static void test_patterns(void **state)
{
    static const char *const mlp[] = {"re:layers\\.[02]\\.mlp"};
    static const char *const one[] = {"layers.4.self_attn.kv_a_proj_with_mqa"};
    static const char *const gate[] = {"*gate_proj"};
    static const char *const absorbed[] = {"*kv_b_proj", "markov_head.markov_w2"};
    static const char *const everything[] = {"*"};
    seen s;
    (void)state;
    assert_int_equal(count_of(NULL, 0, mlp, 1, &s), 6);
    assert_int_equal(count_of(gate, 1, mlp, 1, &s), 4);
    assert_int_equal(count_of(one, 1, NULL, 0, &s), 35);
    for (size_t i = 0; i < s.n; i++) assert_string_not_equal(s.names[i], one[0]);
    assert_int_equal(count_of(NULL, 0, one, 1, &s), 1);
    assert_string_equal(s.names[0], one[0]);
    assert_int_equal(count_of(NULL, 0, absorbed, 2, &s), 6); /* what is kept unless it is asked for */
    /* all linear layers: 8 a layer, context_proj, w2, the confidence head; no table, no norm */
    assert_int_equal(count_of(NULL, 0, everything, 1, &s), 43);
}

static void test_patterns_refused(void **state)
{
    static const struct {
        const char *text, *say;
    } cases[] = {
        {"layers.5.mlp.up_proj", "fits no linear layer"},
        {"embed_tokens", "fits no linear layer"},
        {"*_layernorm", "fits no linear layer"},
        {"re:(", ""},
        {"re:(?=a)", ""},
        {NULL, "NULL"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int ignore = 0; ignore < 2; ignore++) {
            dspark_quantize_opts o = options(DSPARK_FORMAT_INT8);
            if (ignore) {
                o.ignore = &cases[i].text;
                o.n_ignore = 1;
            } else {
                o.targets = &cases[i].text;
                o.n_targets = 1;
            }
            assert_int_equal(dspark_quantize(tiny, in_root("x"), &o, &err), DSPARK_EINVAL);
            if (!strstr(err.message, cases[i].say)) fail_msg("%s", err.message);
            assert_false(exists(in_root("x")));
        }
    }
}

/* ---- what goes wrong ---- */

static void test_refused(void **state)
{
    dspark_quantize_opts o = options(DSPARK_FORMAT_NONE);
    (void)state;
    assert_int_equal(dspark_quantize(tiny, in_root("x"), NULL, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_quantize(tiny, in_root("x"), &o, &err), DSPARK_EINVAL);
    o = options(DSPARK_FORMAT_MXFP4);
    o.layout = DSPARK_LAYOUT_MODELOPT;
    assert_int_equal(dspark_quantize(tiny, in_root("x"), &o, &err), DSPARK_EINVAL);
    o = options(DSPARK_FORMAT_INT4);
    o.group_size = 0; /* 128 */
    assert_int_equal(dspark_quantize(tiny, in_root("x"), &o, &err), DSPARK_EUNSUPPORTED);
    assert_string_equal(err.where, "context_proj");
    o = options(DSPARK_FORMAT_INT8);
    assert_int_equal(dspark_quantize(in_root("nowhere"), in_root("x"), &o, &err), DSPARK_EIO);
    assert_int_equal(dspark_quantize(NULL, in_root("x"), &o, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_quantize(tiny, "", &o, &err), DSPARK_EINVAL);
    assert_false(exists(in_root("x")));
    /* a checkpoint is never written over, the source least of all */
    assert_int_equal(dspark_quantize(tiny, tiny, &o, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_quantize(cut, tiny, &o, &err), DSPARK_EINVAL);
    assert_int_equal(tmpdir_count(tiny), 2);
}

/* The tiny checkpoint with one weight changed, and with an FP8 lm_head of its own when n_scales is not 0:
 * codes of 1.0, each of the scales 0.5. */
static char *with_change(const char *name, const char *tensor, uint64_t at, uint16_t bits,
                         uint64_t n_scales)
{
    const uint64_t head[2] = {97, 64};
    char *dir = keep_path(name);
    dspark_checkpoint *c;
    dspark_writer *w;
    synth(dir, 0, NULL);
    must(dspark_checkpoint_open(&c, tiny, &err));
    must(dspark_writer_create(&w, tmpdir_path(dir, "model.safetensors"), &err));
    for (size_t i = 0; i < dspark_checkpoint_tensor_count(c); i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(c, i);
        must(dspark_writer_declare(w, t->name, t->dtype, t->rank, t->shape, &err));
    }
    if (n_scales) {
        must(dspark_writer_declare(w, "lm_head.weight", DSPARK_F8_E4M3, 2, head, &err));
        must(dspark_writer_declare(w, "lm_head.weight_scale", DSPARK_F32, 1, &n_scales, &err));
    }
    for (size_t i = 0; i < dspark_checkpoint_tensor_count(c); i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(c, i);
        unsigned char *copy = malloc(t->n_bytes);
        assert_non_null(copy);
        memcpy(copy, t->data, t->n_bytes);
        if (tensor && strcmp(t->name, tensor) == 0) memcpy(copy + 2 * at, &bits, 2);
        must(dspark_writer_data(w, copy, t->n_bytes, &err));
        free(copy);
    }
    if (n_scales) {
        unsigned char codes[97 * 64];
        const float half = 0.5f;
        memset(codes, 0x38, sizeof codes);
        must(dspark_writer_data(w, codes, sizeof codes, &err));
        for (uint64_t i = 0; i < n_scales; i++) must(dspark_writer_data(w, &half, sizeof half, &err));
    }
    must(dspark_writer_commit(w, &err));
    dspark_checkpoint_close(c);
    return dir;
}

/* An lm_head of the draft's own may be quantised: it is told, counted and judged as any linear, and
 * quantize takes it to BF16. */
static void test_own_head(void **state)
{
    char *dir = with_change("head", NULL, 0, 0, 97), *bad;
    dspark_quantize_opts o = options(DSPARK_FORMAT_INT8);
    dspark_inspection *in;
    dspark_model_opts parts;
    dspark_model *model;
    dspark_checkpoint *c;
    const dspark_tensor *t;
    const json_t *plan;
    json_t *doc;
    cli_result r;
    (void)state;
    must(dspark_inspect(&in, dir, NULL, &err));
    assert_int_equal(dspark_inspection_verdict(in), DSPARK_USABLE);
    doc = json_loads(dspark_inspection_json(in), 0, NULL);
    assert_non_null(doc);
    plan = json_object_get(doc, "plan");
    assert_int_equal(json_integer_value(json_object_get(json_object_get(plan, "read_bytes"), "lm_head")),
                     97 * 64 + 97 * 4);
    /* 3 panels of 48 outputs: a byte a code, an fp32 scale an output */
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(plan, "resident_bytes"), "lm_head")),
        3 * 48 * (64 + 4));
    json_decref(doc);
    dspark_inspection_free(in);
    r = run_cli("inspect %s", dir);
    assert_non_null(strstr(r.out, "lm_head 9.8 KB as fp8_channel"));
    dspark_model_opts_init(&parts);
    parts.parts = DSPARK_PART_BLOCK;
    must(dspark_model_open(&model, dir, &parts, &err)); /* no target: both are the draft's own */
    dspark_model_close(model);
    must(dspark_quantize(dir, in_root("h"), &o, &err));
    must(dspark_checkpoint_open(&c, in_root("h"), &err));
    assert_null(dspark_checkpoint_find(c, "lm_head.weight_scale"));
    t = dspark_checkpoint_find(c, "lm_head.weight");
    assert_non_null(t);
    assert_int_equal(t->dtype, DSPARK_BF16);
    for (size_t i = 0; i < t->n_elements; i++)
        assert_memory_equal((const char *)t->data + 2 * i, "\x00\x3f", 2);
    dspark_checkpoint_close(c);
    tmpdir_remove(in_root("h"));
    bad = with_change("badhead", NULL, 0, 0, 5);
    r = run_cli("inspect %s", bad);
    assert_int_equal(r.code, 3);
    assert_non_null(strstr(r.out, "lm_head.weight_scale"));
    tmpdir_remove(dir);
    tmpdir_remove(bad);
    free(dir);
    free(bad);
}

static void test_not_finite(void **state)
{
    static const uint16_t bad[] = {0x7fc0, 0x7f80, 0xff80};
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        char *dir = with_change("nan", "layers.2.mlp.down_proj.weight", 128 * 40 + 7, bad[i], 0);
        for (dspark_format f = DSPARK_FORMAT_FP8_TENSOR; f <= DSPARK_FORMAT_INT4; f++) {
            dspark_quantize_opts o = options(f);
            assert_int_equal(dspark_quantize(dir, in_root("x"), &o, &err), DSPARK_ENONFINITE);
            assert_string_equal(err.where, "layers.2.mlp.down_proj");
            assert_non_null(strstr(err.message, "row 40"));
            assert_false(exists(in_root("x")));
        }
        tmpdir_remove(dir);
        free(dir);
    }
}

typedef struct stopper {
    size_t calls, stop_at;
    uint64_t last, total;
} stopper;

static int stop(void *user, uint64_t done, uint64_t total)
{
    stopper *s = user;
    assert_true(done >= s->last && done <= total);
    s->last = done;
    s->total = total;
    return ++s->calls == s->stop_at;
}

static void test_cancel(void **state)
{
    dspark_quantize_opts o = options(DSPARK_FORMAT_NVFP4);
    stopper s = {0, 0, 0, 0};
    size_t n;
    (void)state;
    o.progress = stop;
    o.progress_user = &s;
    must(dspark_quantize(tiny, in_root("c"), &o, &err));
    assert_int_equal(s.last, s.total);
    tmpdir_remove(in_root("c"));
    n = s.calls;
    assert_true(n > 10);
    for (size_t i = 1; i <= n; i += 1 + n / 25) {
        s = (stopper){0, i, 0, 0};
        assert_int_equal(dspark_quantize(tiny, in_root("c"), &o, &err), DSPARK_ECANCELLED);
        assert_false(exists(in_root("c")));
    }
}

/* A byte of the unfinished file changes while it is read back. */
typedef struct tamper {
    int done;
    size_t from_end;
} tamper;

static int tamper_with(void *user, uint64_t done, uint64_t total)
{
    tamper *t = user;
    char path[1024] = "";
    struct dirent *entry;
    DIR *d = opendir(in_root("t"));
    FILE *f;
    int c;
    (void)done;
    (void)total;
    if (t->done || !d) {
        if (d) closedir(d);
        return 0;
    }
    while ((entry = readdir(d)))
        if (strncmp(entry->d_name, ".quantize-", 10) == 0)
            snprintf(path, sizeof path, "%s/%s/model.safetensors", in_root("t"), entry->d_name);
    closedir(d);
    if (!*path || !(f = fopen(path, "r+b"))) return 0; /* not yet complete */
    assert_int_equal(fseek(f, -(long)t->from_end, SEEK_END), 0);
    c = fgetc(f);
    assert_true(c != EOF);
    assert_int_equal(fseek(f, -(long)t->from_end, SEEK_END), 0);
    assert_int_equal(fputc(c ^ 0x11, f), c ^ 0x11);
    assert_int_equal(fclose(f), 0);
    t->done = 1;
    return 0;
}

/* Every part is caught: a copied tensor (confidence bias is the last), codes, scales. */
static void test_reads_back(void **state)
{
    dspark_quantize_opts o = options(DSPARK_FORMAT_MXFP4);
    dspark_checkpoint *c;
    uint64_t end = 0;
    size_t n_caught = 0;
    (void)state;
    must(dspark_quantize(tiny, in_root("t"), &o, &err));
    must(dspark_checkpoint_open(&c, in_root("t"), &err));
    for (size_t i = dspark_checkpoint_tensor_count(c); i-- > 0;) {
        const dspark_tensor *t = dspark_checkpoint_tensor(c, i);
        tamper how = {0, 0};
        char name[128];
        end += t->n_bytes;
        /* one of each kind, of a late layer: the tampering comes with the first step of reading back */
        if (strcmp(t->name, "layers.4.mlp.down_proj.weight_packed") != 0 &&
            strcmp(t->name, "layers.4.mlp.down_proj.weight_scale") != 0 &&
            strcmp(t->name, "final_norm.weight") != 0 && i + 1 != dspark_checkpoint_tensor_count(c))
            continue;
        snprintf(name, sizeof name, "%s", t->name);
        how.from_end = end;
        dspark_checkpoint_close(c);
        tmpdir_remove(in_root("t"));
        o.progress = tamper_with;
        o.progress_user = &how;
        assert_int_equal(dspark_quantize(tiny, in_root("t"), &o, &err), DSPARK_EINTERNAL);
        assert_int_equal(how.done, 1);
        assert_non_null(strstr(err.message, "reads back"));
        assert_false(exists(in_root("t")));
        n_caught++;
        o.progress = NULL;
        must(dspark_quantize(tiny, in_root("t"), &o, &err));
        must(dspark_checkpoint_open(&c, in_root("t"), &err));
    }
    dspark_checkpoint_close(c);
    tmpdir_remove(in_root("t"));
    assert_int_equal(n_caught, 4);
}

static void test_no_memory(void **state)
{
    dspark_quantize_opts o = options(DSPARK_FORMAT_NVFP4);
    char *small = keep_path("small");
    size_t n, n_failed = 0;
    (void)state;
    if (!oom_available()) skip();
    synth(small, 30000, "num_hidden_layers=1");
    oom_count_start();
    must(dspark_quantize(small, in_root("m"), &o, &err));
    n = oom_stop();
    tmpdir_remove(in_root("m"));
    for (size_t i = 1; i <= n; i += 1 + n / 150) {
        dspark_status st;
        oom_fail_nth(i);
        st = dspark_quantize(small, in_root("m"), &o, &err);
        oom_stop();
        if (st == DSPARK_OK) { /* a block that was only wished for */
            tmpdir_remove(in_root("m"));
            continue;
        }
        if (st != DSPARK_ENOMEM) fail_msg("allocation %zu: %s: %s", i, err.where, err.message);
        assert_false(exists(in_root("m")));
        n_failed++;
    }
    assert_true(n_failed > 50);
    tmpdir_remove(small);
    free(small);
}

/* ---- the command ---- */

static void test_command(void **state)
{
    cli_result r = run_cli("quantize %s q --format nvfp4", tiny);
    json_t *doc;
    (void)state;
    assert_int_equal(r.code, 0);
    assert_non_null(strstr(r.out, "layers.3.self_attn.kv_a_proj_with_mqa"));
    assert_non_null(strstr(r.out, "36 modules in nvfp4 (compressed-tensors, absmax scales), read back equal"));
    assert_non_null(strstr(r.out, "saved"));
    assert_non_null(strstr(r.out, "Context entries of 8 synthetic rows"));
    assert_non_null(strstr(r.out, "  4      rope key "));
    assert_string_equal(r.err, "");
    r = run_cli("quantize %s q --format int8", tiny);
    assert_int_equal(r.code, 2);
    assert_non_null(strstr(r.err, "must hold no checkpoint yet"));
    r = run_cli("compare q");
    assert_int_equal(r.code, 0);
    r = run_cli("quantize q back --format bf16 --json");
    assert_int_equal(r.code, 0);
    doc = json_loads(r.out, 0, NULL);
    assert_non_null(doc);
    assert_int_equal(json_array_size(json_object_get(doc, "modules")), 36);
    assert_string_equal(json_string_value(json_object_get(doc, "format")), "bf16");
    assert_true(json_is_object(json_object_get(doc, "context_entries")));
    json_decref(doc);
    r = run_cli("quantize %s o --format mxfp4 --scales mse --layout modelopt", tiny);
    assert_int_equal(r.code, 2);
    r = run_cli("quantize %s o --format nvfp4 --ignore nothing", tiny);
    assert_int_equal(r.code, 2);
    assert_non_null(strstr(r.err, "nothing"));
    r = run_cli("quantize %s o", tiny);
    assert_int_equal(r.code, 2);
    assert_non_null(strstr(r.err, "--format is missing"));
    r = run_cli("quantize nowhere o --format nvfp4");
    assert_int_equal(r.code, 3);
    assert_false(folder_has("o"));
}

static void test_synth_format(void **state)
{
    dspark_quantize_opts o = options(DSPARK_FORMAT_FP8_BLOCK);
    char path[600];
    cli_result r = run_cli("synth s --preset tiny --seed 11 --format fp8-block");
    (void)state;
    assert_int_equal(r.code, 0);
    assert_false(folder_has("bf16"));
    must(dspark_quantize(tiny, in_root("same"), &o, &err));
    snprintf(path, sizeof path, "%s/s", cli_folder());
    same_files_at(path, in_root("same"), "model.safetensors");
    r = run_cli("synth i --preset tiny --format int4");
    assert_int_equal(r.code, 4);
    assert_false(folder_has("bf16"));
    assert_false(folder_has("i"));
    r = run_cli("synth i --preset tiny --format int4 --group-size 32");
    assert_int_equal(r.code, 0);
    r = run_cli("synth j --preset tiny --group-size 32");
    assert_int_equal(r.code, 2);
    r = run_cli("synth --dump d --for s --tokens 2 --format int8");
    assert_int_equal(r.code, 2);
    cli_cleanup();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats),      cmocka_unit_test(test_search),
        cmocka_unit_test(test_shards),       cmocka_unit_test(test_way_back),
        cmocka_unit_test(test_patterns),     cmocka_unit_test(test_patterns_refused),
        cmocka_unit_test(test_refused),      cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_cancel),       cmocka_unit_test(test_reads_back),
        cmocka_unit_test(test_no_memory),    cmocka_unit_test(test_command),
        cmocka_unit_test(test_synth_format), cmocka_unit_test(test_own_head),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
