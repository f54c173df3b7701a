/* Synthetic checkpoints and dumps: the generator's bits against the twin's, the presets' sizes,
 * settings, shards, and that nothing is left behind when it ends early. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "ckpt/synth_values.h"
#include "dspark/dspark.h"
#include "support/oom.h"
#include "support/tmpdir.h"

static dspark_error err;
static const char *root; /* scratch directory of the running test */

#define must(call) \
    do { \
        if ((call) != DSPARK_OK) \
            fail_msg("%s: %s: %s: %s", #call, dspark_status_name(err.code), err.where, err.message); \
    } while (0)

/* ------------------------------------------------------------------------------------------------
 * Scratch
 * --------------------------------------------------------------------------------------------- */

static int setup(void **state)
{
    (void)state;
    root = tmpdir_make();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    tmpdir_remove(root);
    return 0;
}

static const char *in_root(const char *name)
{
    return tmpdir_path(root, name);
}

static int exists(const char *path)
{
    return access(path, F_OK) == 0;
}

static char *read_file(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    char *text;
    long size;
    if (!f) fail_msg("cannot open %s", path);
    fseek(f, 0, SEEK_END);
    size = ftell(f);
    rewind(f);
    text = malloc((size_t)size + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)size, f), size);
    text[size] = '\0';
    fclose(f);
    *n = (size_t)size;
    return text;
}

static int same_file(const char *a, const char *b)
{
    size_t n, m;
    char *x = read_file(a, &n), *y = read_file(b, &m);
    int same = n == m && memcmp(x, y, n) == 0;
    free(x);
    free(y);
    return same;
}

static dspark_synth_opts preset(const char *name, uint64_t seed)
{
    dspark_synth_opts o;
    dspark_synth_opts_init(&o);
    o.preset = name;
    o.seed = seed;
    return o;
}

static json_t *read_config(const char *dir)
{
    char path[512];
    json_t *root_object;
    snprintf(path, sizeof path, "%s/config.json", dir);
    root_object = json_load_file(path, 0, NULL);
    assert_non_null(root_object);
    return root_object;
}

/* ------------------------------------------------------------------------------------------------
 * The generator
 * --------------------------------------------------------------------------------------------- */

static void test_generator_golden(void **state)
{
    dspark_checkpoint *c = NULL;
    const dspark_tensor *starts;
    uint64_t seeds[3];
    const char *text;
    char *end;
    size_t n_streams = 0;

    (void)state;
    must(dspark_checkpoint_open(&c, DSPARK_TEST_DATA "/golden/generator.safetensors", &err));
    assert_non_null(text = dspark_checkpoint_metadata(c, "seeds"));
    for (size_t i = 0; i < 3; i++, text = end) seeds[i] = strtoull(text, &end, 10);
    assert_non_null(starts = dspark_checkpoint_find(c, "starts"));
    for (size_t i = 0; i < dspark_checkpoint_tensor_count(c); i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(c, i);
        const char *colon = strchr(t->name, ':');
        char name[128];
        if (!colon) continue;
        n_streams++;
        snprintf(name, sizeof name, "%.*s", (int)(colon - t->name), t->name);
        for (size_t j = 0; j < 3; j++) {
            dspark__synth_stream s;
            dspark__synth_stream_init(&s, name, strtoull(colon + 1, NULL, 10), seeds[j]);
            for (size_t k = 0; k < t->shape[1]; k++) {
                uint16_t got[16];
                int64_t first;
                size_t n = (size_t)t->shape[2];
                memcpy(&first, (const char *)starts->data + k * sizeof first, sizeof first);
                dspark__synth_fill(&s, (uint64_t)first, n, got);
                if (memcmp(got, (const char *)t->data + (j * t->shape[1] + k) * n * 2, n * 2) != 0)
                    fail_msg("%s, seed %llu, from %lld: other values than the twin's", name,
                             (unsigned long long)seeds[j], (long long)first);
            }
        }
    }
    assert_int_equal(n_streams, 12);
    for (size_t j = 0; j < 3; j++) {
        const dspark_tensor *t = dspark_checkpoint_find(c, "token_ids");
        dspark__synth_stream s;
        assert_non_null(t);
        dspark__synth_stream_init(&s, "token_ids", 1, seeds[j]);
        for (size_t i = 0; i < t->shape[1]; i++) {
            int64_t want;
            memcpy(&want, (const char *)t->data + (j * t->shape[1] + i) * 8, sizeof want);
            assert_int_equal(dspark__synth_token(&s, i, 163840), want);
        }
    }
    dspark_checkpoint_close(c);
}

static void test_generator_any_piece(void **state)
{
    static uint16_t whole[5000], piece[5000];
    static const size_t cuts[] = {0, 1, 2, 3, 4, 5, 7, 8, 1023, 1024, 1025, 2048, 3001, 4999};
    dspark__synth_stream s;

    (void)state;
    dspark__synth_stream_init(&s, "layers.1.mlp.up_proj.weight", 7168, 42);
    dspark__synth_fill(&s, 0, 5000, whole);
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        for (size_t j = i; j < sizeof cuts / sizeof *cuts; j++) {
            size_t n = cuts[j] - cuts[i];
            memset(piece, 0xaa, sizeof piece);
            dspark__synth_fill(&s, cuts[i], n, piece);
            assert_memory_equal(piece, whole + cuts[i], n * 2);
            if (n < 5000) assert_int_equal(piece[n], 0xaaaa);
        }
    }
}

/* ------------------------------------------------------------------------------------------------
 * Presets and settings
 * --------------------------------------------------------------------------------------------- */

typedef struct watcher {
    uint64_t calls, stop_at, done, total;
} watcher;

static int watch(void *user, uint64_t done, uint64_t total)
{
    watcher *w = user;
    w->calls++;
    if (done <= w->done || done > total || (w->total && total != w->total)) return 2;
    w->done = done;
    w->total = total;
    return w->calls == w->stop_at;
}

/* The full-size presets are never written: the first report of progress says how many bytes there
 * will be, and stops. */
static void test_preset_sizes(void **state)
{
    static const struct {
        const char *name;
        uint64_t parameters;
        int context_only;
    } sizes[] = {
        {"kimi-k3", 3562312961u, 0},       {"kimi-k3-block5", 3562312961u, 0},
        {"kimi-k3.1-pro", 2686752257u, 0}, {"lightseek", 3562348801u, 0},
        {"kimi-k3", 256901120u + 7168 + 5u * (576 * 7168 + 512 + 1536 * 7168), 1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        watcher w = {0, 1, 0, 0};
        dspark_synth_opts o = preset(sizes[i].name, 1);
        o.context_only = sizes[i].context_only;
        o.progress = watch;
        o.progress_user = &w;
        assert_int_equal(dspark_synth_checkpoint(in_root("big"), &o, &err), DSPARK_ECANCELLED);
        assert_int_equal(err.code, DSPARK_ECANCELLED);
        assert_int_equal(w.calls, 1);
        if (w.total != 2 * sizes[i].parameters)
            fail_msg("%s: %llu bytes, expected %llu", sizes[i].name,
                     (unsigned long long)w.total, (unsigned long long)(2 * sizes[i].parameters));
        assert_false(exists(in_root("big")));
    }
}

static void test_tiny(void **state)
{
    dspark_synth_opts o = preset("tiny", 3);
    dspark_checkpoint *c = NULL;
    dspark_inspection *in = NULL;

    (void)state;
    must(dspark_synth_checkpoint(in_root("a"), &o, &err));
    assert_int_equal(tmpdir_count(in_root("a")), 2);
    must(dspark_checkpoint_open(&c, in_root("a"), &err));
    assert_int_equal(dspark_checkpoint_tensor_count(c), 68);
    assert_string_equal(dspark_checkpoint_metadata(c, "format"), "pt");
    assert_string_equal(dspark_checkpoint_metadata(c, "seed"), "3");
    for (size_t i = 0; i < 68; i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(c, i);
        dspark__synth_stream s;
        uint16_t *want = malloc((size_t)t->n_bytes);
        assert_non_null(want);
        assert_int_equal(t->dtype, DSPARK_BF16);
        dspark__synth_stream_init(&s, t->name, t->shape[t->rank - 1], 3);
        dspark__synth_fill(&s, 0, (size_t)t->n_elements, want);
        assert_memory_equal(t->data, want, t->n_bytes);
        free(want);
    }
    dspark_checkpoint_close(c);
    must(dspark_inspect(&in, in_root("a"), NULL, &err));
    assert_int_equal(dspark_inspection_verdict(in), DSPARK_USABLE);
    dspark_inspection_free(in);

    must(dspark_synth_checkpoint(in_root("b"), &o, &err)); /* same options, same bytes */
    assert_true(same_file(in_root("a/config.json"), in_root("b/config.json")));
    assert_true(same_file(in_root("a/model.safetensors"), in_root("b/model.safetensors")));
    o.seed = 4;
    must(dspark_synth_checkpoint(in_root("c"), &o, &err));
    assert_false(same_file(in_root("a/model.safetensors"), in_root("c/model.safetensors")));
}

static void test_context_only(void **state)
{
    dspark_synth_opts o = preset("tiny", 3);
    dspark_checkpoint *c = NULL;
    dspark_model *m = NULL;
    json_t *config;

    (void)state;
    o.context_only = 1;
    must(dspark_synth_checkpoint(in_root("a"), &o, &err));
    must(dspark_checkpoint_open(&c, in_root("a"), &err));
    assert_int_equal(dspark_checkpoint_tensor_count(c), 2 + 5 * 3);
    assert_non_null(dspark_checkpoint_find(c, "layers.4.self_attn.q_a_proj.weight"));
    assert_null(dspark_checkpoint_find(c, "final_norm.weight"));
    dspark_checkpoint_close(c);
    config = read_config(in_root("a"));
    assert_string_equal(
        json_string_value(json_array_get(json_object_get(config, "dspark_parts"), 0)), "context");
    json_decref(config);
    must(dspark_model_open(&m, in_root("a"), NULL, &err));
    dspark_model_close(m);
}

static void test_settings(void **state)
{
    static const char *const settings[] = {
        "num_attention_heads=6",          /* num_key_value_heads follows */
        "target_layer_ids=[0, 3, 6]",     /* num_target_layers follows */
        "rope_theta=10000.0",             /* the inner one follows */
        "rope_parameters.factor=4",
        "hidden_size=32", "target_hidden_size=48", /* named: does not follow */
        "markov_head_type=vanilla",       /* a bare word */
        "aux_hidden_stream=\"attn_res\"", /* a JSON string */
        "block_size=null",                /* deleted */
        "rope_parameters.beta_fast=null",
        "dflash_config.causal=true",      /* an object made on the way */
        "rms_norm_eps=0.1",
    };
    dspark_synth_opts o = preset("tiny", 3);
    json_t *c, *rope;
    size_t n;
    char *text;

    (void)state;
    o.settings = settings;
    o.n_settings = sizeof settings / sizeof *settings;
    must(dspark_synth_checkpoint(in_root("a"), &o, &err));
    c = read_config(in_root("a"));
    rope = json_object_get(c, "rope_parameters");
    assert_int_equal(json_integer_value(json_object_get(c, "num_attention_heads")), 6);
    assert_int_equal(json_integer_value(json_object_get(c, "num_key_value_heads")), 6);
    assert_int_equal(json_integer_value(json_object_get(c, "num_target_layers")), 3);
    assert_int_equal(json_integer_value(json_object_get(c, "target_hidden_size")), 48);
    assert_true(json_number_value(json_object_get(rope, "rope_theta")) == 10000.0);
    assert_true(json_number_value(json_object_get(rope, "factor")) == 4.0);
    assert_null(json_object_get(rope, "beta_fast"));
    assert_null(json_object_get(c, "block_size"));
    assert_string_equal(json_string_value(json_object_get(c, "aux_hidden_stream")), "attn_res");
    assert_true(json_is_true(json_object_get(json_object_get(c, "dflash_config"), "causal")));
    json_decref(c);
    text = read_file(in_root("a/config.json"), &n);
    assert_non_null(strstr(text, "\n  \"rms_norm_eps\": 0.1,")); /* few digits, one key a line */
    assert_int_equal(text[n - 1], '\n');
    free(text);
}

static void test_settings_refused(void **state)
{
    static const struct {
        const char *setting, *part;
        int code;
    } bad[] = {
        {"hidden_size", "key=value", DSPARK_EINVAL},
        {"=3", "key=value", DSPARK_EINVAL},
        {"", "key=value", DSPARK_EINVAL},
        {"hiden_size=64", "hiden_size", DSPARK_EINVAL},
        {"hidden_size=", "JSON", DSPARK_EINVAL},
        {"hidden_size=[1,", "JSON", DSPARK_EINVAL},
        {"hidden_size=12 13", "JSON", DSPARK_EINVAL},
        {"hidden_size=12, \"vocab_size\": 13", "JSON", DSPARK_EINVAL},
        {"hidden_size=12}", "JSON", DSPARK_EINVAL},
        {"dflash_config={\"causal\": true, \"causal\": false}", "JSON", DSPARK_EINVAL},
        {"hidden_size.x=1", "object", DSPARK_EINVAL},
        {"rope_parameters.=1", "object", DSPARK_EINVAL},
        {"rope_parameters..x=1", "object", DSPARK_EINVAL},
        {"dspark_parts=[\"context\"]", "dspark_parts", DSPARK_EINVAL},
        /* what the config parser says */
        {"hidden_size=0", NULL, 0},
        {"hidden_size=-64", NULL, 0},
        {"hidden_size=large", NULL, 0},
        {"hidden_size=null", NULL, 0},
        {"num_key_value_heads=3", NULL, 0},
        {"mla_use_nope=true", NULL, DSPARK_EUNSUPPORTED},
        {"target_layer_ids=[5, 2]", NULL, 0},
        {"rope_parameters.rope_type=llama3", NULL, DSPARK_EUNSUPPORTED},
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dspark_synth_opts o = preset("tiny", 3);
        dspark_status st;
        o.settings = &bad[i].setting;
        o.n_settings = 1;
        st = dspark_synth_checkpoint(in_root("a"), &o, &err);
        if (st == DSPARK_OK) fail_msg("\"%s\" was taken", bad[i].setting);
        if (bad[i].code && st != bad[i].code)
            fail_msg("\"%s\": %s: %s", bad[i].setting, dspark_status_name(st), err.message);
        if (bad[i].part && !strstr(err.message, bad[i].part))
            fail_msg("\"%s\": the message does not say %s: %s", bad[i].setting, bad[i].part,
                     err.message);
        assert_int_equal(err.code, st);
        assert_true(err.message[0] != '\0');
        assert_false(exists(in_root("a")));
    }
}

static void test_arguments(void **state)
{
    dspark_synth_opts o = preset("huge", 1);

    (void)state;
    assert_int_equal(dspark_synth_checkpoint(in_root("a"), &o, &err), DSPARK_EINVAL);
    assert_non_null(strstr(err.message, "huge"));
    o = preset(NULL, 1); /* no default */
    assert_int_equal(dspark_synth_checkpoint(in_root("a"), &o, &err), DSPARK_EINVAL);
    o = preset("tiny", 1);
    o.n_settings = 1;
    assert_int_equal(dspark_synth_checkpoint(in_root("a"), &o, &err), DSPARK_EINVAL);
    o = preset("tiny", 1);
    o.struct_size = 0;
    assert_int_equal(dspark_synth_checkpoint(in_root("a"), &o, NULL), DSPARK_EINVAL);
    assert_int_equal(dspark_synth_checkpoint(in_root("a"), NULL, NULL), DSPARK_EINVAL);
    o = preset("tiny", 1);
    assert_int_equal(dspark_synth_checkpoint("", &o, NULL), DSPARK_EINVAL);
    assert_int_equal(dspark_synth_checkpoint(NULL, &o, NULL), DSPARK_EINVAL);
    assert_int_equal(dspark_synth_checkpoint(in_root("no/such"), &o, &err), DSPARK_EOUTPUT);
    assert_int_equal(tmpdir_count(root), 0);
    tmpdir_write(in_root("plain"), "x", 1);
    assert_int_equal(dspark_synth_checkpoint(in_root("plain"), &o, &err), DSPARK_EINVAL);
    assert_int_equal(tmpdir_count(root), 1);
}

/* ------------------------------------------------------------------------------------------------
 * Shards
 * --------------------------------------------------------------------------------------------- */

static void test_shards(void **state)
{
    dspark_synth_opts o = preset("tiny", 3);
    dspark_checkpoint *one = NULL, *many = NULL;
    uint64_t total = 0, in_file = 0;
    const char *file = "";
    size_t n_files = 0, n, in_index;
    json_t *index;

    (void)state;
    must(dspark_synth_checkpoint(in_root("one"), &o, &err));
    o.shard_bytes = 20000;
    must(dspark_synth_checkpoint(in_root("many"), &o, &err));
    must(dspark_checkpoint_open(&one, in_root("one"), &err));
    must(dspark_checkpoint_open(&many, in_root("many"), &err));
    n = dspark_checkpoint_tensor_count(many);
    assert_int_equal(n, dspark_checkpoint_tensor_count(one));
    for (size_t i = 0; i < n; i++) {
        const dspark_tensor *t = dspark_checkpoint_tensor(many, i);
        const dspark_tensor *u = dspark_checkpoint_find(one, t->name);
        assert_non_null(u);
        assert_int_equal(t->n_bytes, u->n_bytes);
        assert_memory_equal(t->data, u->data, t->n_bytes);
        total += t->n_bytes;
        if (strcmp(file, t->file) != 0) {
            file = t->file;
            n_files++;
            in_file = 0;
        }
        in_file += t->n_bytes;
        /* over the limit only when the tensor is alone */
        if (in_file > o.shard_bytes) assert_int_equal(in_file, t->n_bytes);
    }
    assert_true(n_files > 3);
    assert_int_equal(tmpdir_count(in_root("many")), n_files + 2);
    index = json_load_file(in_root("many/model.safetensors.index.json"), 0, NULL);
    assert_non_null(index);
    in_index = json_object_size(json_object_get(index, "weight_map"));
    assert_int_equal(in_index, n);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(index, "metadata"),
                                                        "total_size")), total);
    json_decref(index);
    dspark_checkpoint_close(one);
    dspark_checkpoint_close(many);

    o.shard_bytes = UINT64_MAX; /* all in one: no index */
    must(dspark_synth_checkpoint(in_root("all"), &o, &err));
    assert_int_equal(tmpdir_count(in_root("all")), 2);
    assert_true(same_file(in_root("one/model.safetensors"), in_root("all/model.safetensors")));
    o.shard_bytes = 1; /* every tensor its own */
    must(dspark_synth_checkpoint(in_root("each"), &o, &err));
    assert_int_equal(tmpdir_count(in_root("each")), 68 + 2);
}

/* ------------------------------------------------------------------------------------------------
 * All or nothing
 * --------------------------------------------------------------------------------------------- */

static void test_used_directory(void **state)
{
    static const char *const names[] = {
        "config.json", "model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    };
    dspark_synth_opts o = preset("tiny", 3);
    char path[256];

    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        mkdir(in_root("a"), 0777);
        snprintf(path, sizeof path, "%s/a/%s", root, names[i]);
        tmpdir_write(path, "mine", 4);
        assert_int_equal(dspark_synth_checkpoint(in_root("a"), &o, &err), DSPARK_EINVAL);
        assert_non_null(strstr(err.message, names[i]));
        assert_int_equal(tmpdir_count(in_root("a")), 1);
        unlink(path);
    }
    tmpdir_write(in_root("a/README.md"), "mine", 4); /* not ours to mind */
    must(dspark_synth_checkpoint(in_root("a"), &o, &err));
    assert_int_equal(tmpdir_count(in_root("a")), 3);
}

static void test_cancel_anywhere(void **state)
{
    uint64_t n_calls;
    watcher w = {0, 0, 0, 0};
    dspark_synth_opts o = preset("tiny", 3);

    (void)state;
    o.shard_bytes = 20000;
    o.progress = watch;
    o.progress_user = &w;
    must(dspark_synth_checkpoint(in_root("whole"), &o, &err));
    assert_int_equal(w.done, w.total);
    n_calls = w.calls;
    assert_true(n_calls >= 68);
    mkdir(in_root("there"), 0777);
    for (uint64_t at = 1; at <= n_calls; at++) {
        memset(&w, 0, sizeof w);
        w.stop_at = at;
        assert_int_equal(dspark_synth_checkpoint(in_root("a"), &o, &err), DSPARK_ECANCELLED);
        assert_int_equal(w.calls, at);
        assert_false(exists(in_root("a")));
        memset(&w, 0, sizeof w);
        w.stop_at = at;
        assert_int_equal(dspark_synth_checkpoint(in_root("there"), &o, &err), DSPARK_ECANCELLED);
        assert_int_equal(tmpdir_count(in_root("there")), 0);
    }
    assert_true(exists(in_root("there")));
}

/* A disk that takes no more: the limit on file sizes makes write() fail. */
static void test_full_disk(void **state)
{
    static const rlim_t limits[] = {0, 100, 8192, 30000, 65536};
    struct rlimit old, small;
    dspark_synth_opts o = preset("tiny", 3);

    (void)state;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        dspark_status st, dump;
        must(dspark_synth_checkpoint(in_root("good"), &o, &err));
        small = old;
        small.rlim_cur = limits[i];
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        st = dspark_synth_checkpoint(in_root("a"), &o, &err);
        dump = dspark_synth_dump(in_root("dump"), in_root("good"), 1000, 1, NULL, NULL, NULL);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        assert_int_equal(st, DSPARK_EOUTPUT);
        assert_int_equal(dump, DSPARK_EOUTPUT);
        assert_false(exists(in_root("a")));
        assert_int_equal(tmpdir_count(root), 1);
        tmpdir_remove(in_root("good"));
    }
}

/* Each allocation fails once: a named error and nothing left, or (where the C library copes, as with
 * the buffer of a directory stream) success. */
static void test_out_of_memory(void **state)
{
    static const char *const settings[] = {"rope_parameters.factor=4", "num_hidden_layers=2",
                                           "dflash_config.causal=true"};
    dspark_synth_opts o = preset("tiny", 3);
    size_t n, n_failed = 0;

    (void)state;
    if (!oom_available()) skip();
    o.settings = settings;
    o.n_settings = 3;
    o.shard_bytes = 50000;
    o.context_only = 1;
    oom_count_start();
    must(dspark_synth_checkpoint(in_root("good"), &o, &err));
    n = oom_stop();
    assert_true(n > 50);
    for (size_t i = 1; i <= n; i++) {
        const char *dir = in_root("a");
        dspark_status st;
        oom_fail_nth(i);
        st = dspark_synth_checkpoint(dir, &o, &err);
        oom_stop();
        if (st == DSPARK_OK) {
            assert_true(same_file(in_root("good/config.json"), in_root("a/config.json")));
            tmpdir_remove(dir);
            continue;
        }
        n_failed++;
        if (st != DSPARK_ENOMEM)
            fail_msg("allocation %zu: %s: %s", i, dspark_status_name(st), err.message);
        assert_int_equal(err.code, st);
        assert_int_equal(tmpdir_count(root), 1);
    }
    assert_true(n_failed > 50);

    oom_count_start();
    must(dspark_synth_dump(in_root("d"), in_root("good"), 3, 1, NULL, NULL, &err));
    n = oom_stop();
    unlink(in_root("d"));
    for (size_t i = 1; i <= n; i++) {
        dspark_status st;
        oom_fail_nth(i);
        st = dspark_synth_dump(in_root("d"), in_root("good"), 3, 1, NULL, NULL, &err);
        oom_stop();
        if (st == DSPARK_OK) {
            unlink(in_root("d"));
            continue;
        }
        assert_int_equal(st, DSPARK_ENOMEM);
        assert_int_equal(tmpdir_count(root), 1);
    }
}

/* ------------------------------------------------------------------------------------------------
 * Dumps
 * --------------------------------------------------------------------------------------------- */

static void test_dump(void **state)
{
    static const char *const settings[] = {"target_hidden_size=40", "target_layer_ids=[0, 3]"};
    dspark_synth_opts o = preset("tiny", 3);
    dspark_checkpoint *c = NULL, *shorter = NULL;
    const dspark_tensor *t;
    dspark__synth_stream s;
    uint16_t want[9 * 3 * 40];
    watcher w = {0, 0, 0, 0};

    (void)state;
    o.settings = settings;
    o.n_settings = 2;
    must(dspark_synth_checkpoint(in_root("ckpt"), &o, &err));
    must(dspark_synth_dump(in_root("d9"), in_root("ckpt"), 9, 77, watch, &w, &err));
    assert_int_equal(w.done, 9 * 8 + sizeof want);
    must(dspark_checkpoint_open(&c, in_root("d9"), &err));
    assert_int_equal(dspark_checkpoint_tensor_count(c), 2);
    assert_non_null(t = dspark_checkpoint_find(c, "token_ids"));
    assert_int_equal(t->dtype, DSPARK_I64);
    assert_int_equal(t->rank, 1);
    assert_int_equal(t->shape[0], 9);
    for (size_t i = 0; i < 9; i++) {
        int64_t id;
        memcpy(&id, (const char *)t->data + i * sizeof id, sizeof id);
        assert_true(id >= 0 && id < 97);
    }
    assert_non_null(t = dspark_checkpoint_find(c, "hidden_states"));
    assert_int_equal(t->dtype, DSPARK_BF16);
    assert_int_equal(t->rank, 3);
    assert_int_equal(t->shape[0], 9);
    assert_int_equal(t->shape[1], 3);
    assert_int_equal(t->shape[2], 40);
    dspark__synth_stream_init(&s, "hidden_states", 40, 77);
    dspark__synth_fill(&s, 0, 9 * 3 * 40, want);
    assert_memory_equal(t->data, want, sizeof want);

    /* a shorter dump is the beginning of a longer one */
    must(dspark_synth_dump(in_root("d4"), in_root("ckpt"), 4, 77, NULL, NULL, &err));
    must(dspark_checkpoint_open(&shorter, in_root("d4"), &err));
    assert_non_null(t = dspark_checkpoint_find(shorter, "hidden_states"));
    assert_memory_equal(t->data, want, 4 * 3 * 40 * 2);
    dspark_checkpoint_close(shorter);
    dspark_checkpoint_close(c);
}

static void test_dump_refused(void **state)
{
    dspark_synth_opts o = preset("tiny", 3);
    watcher w = {0, 1, 0, 0};

    (void)state;
    must(dspark_synth_checkpoint(in_root("ckpt"), &o, &err));
    assert_int_equal(
        dspark_synth_dump(in_root("d"), in_root("ckpt"), UINT64_MAX, 1, NULL, NULL, &err),
        DSPARK_EINVAL);
    assert_int_equal(
        dspark_synth_dump(in_root("d"), in_root("ckpt"), UINT64_MAX / 768, 1, NULL, NULL, &err),
        DSPARK_EINVAL);
    assert_int_equal(dspark_synth_dump(in_root("d"), in_root("ckpt"), 50, 1, watch, &w, &err),
                     DSPARK_ECANCELLED);
    assert_true(dspark_synth_dump(in_root("d"), in_root("none"), 5, 1, NULL, NULL, &err) < 0);
    assert_true(dspark_synth_dump(in_root("no/d"), in_root("ckpt"), 5, 1, NULL, NULL, &err) < 0);
    assert_int_equal(dspark_synth_dump(NULL, in_root("ckpt"), 5, 1, NULL, NULL, &err),
                     DSPARK_EINVAL);
    assert_int_equal(dspark_synth_dump(in_root("d"), NULL, 5, 1, NULL, NULL, &err), DSPARK_EINVAL);
    assert_int_equal(tmpdir_count(root), 1);
    must(dspark_synth_dump(in_root("d"), in_root("ckpt"), 0, 1, NULL, NULL, &err));
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_generator_golden), TEST(test_generator_any_piece), TEST(test_preset_sizes),
        TEST(test_tiny),             TEST(test_context_only),        TEST(test_settings),
        TEST(test_settings_refused), TEST(test_arguments),           TEST(test_shards),
        TEST(test_used_directory),   TEST(test_cancel_anywhere),     TEST(test_full_disk),
        TEST(test_out_of_memory),    TEST(test_dump),                TEST(test_dump_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
