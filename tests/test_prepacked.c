/* Prepacked files: the same bits as packing, whatever the format; never stale; written whole or not at
 * all. What a hostile file does is test_prepacked_hostile.c's. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/model.h"
#include "support/drafting.h"
#include "support/fixture.h"
#include "support/oom.h"
#include "support/target.h"
#include "support/tmpdir.h"

static dspark_error err;

static dspark_model_opts opts_of(uint32_t parts, const dspark_host_matrix *lm_head, const char *file)
{
    dspark_model_opts o;
    dspark_model_opts_init(&o);
    o.parts = parts;
    o.n_threads = 2;
    o.lm_head = lm_head;
    o.prepacked = file;
    return o;
}

static dspark_model *open_model(const char *dir, const dspark_model_opts *o)
{
    dspark_model *m = NULL;
    check(dspark_model_open(&m, dir, o, &err), DSPARK_OK, &err);
    return m;
}

/* An opening that must fail; the text must hold `says`. */
static void refuse(const char *dir, const dspark_model_opts *o, dspark_status want, const char *says)
{
    dspark_model *m = NULL;
    check(dspark_model_open(&m, dir, o, &err), want, &err);
    assert_null(m);
    if (!strstr(err.message, says)) fail_msg("expected \"%s\" in \"%s\"", says, err.message);
}

static dspark_host_matrix head_of(const drafting *d)
{
    return (dspark_host_matrix){d->lm_head, d->vocab, d->h, 0};
}

/* ---- equal ---- */

static void same_linear(const dspark__merged_linear *a, const dspark__merged_linear *b)
{
    assert_int_equal(a->n_shards, b->n_shards);
    assert_int_equal(a->bytes, b->bytes);
    for (uint32_t s = 0; s < a->n_shards; s++) {
        const dspark__shard *x = &a->shards[s], *y = &b->shards[s];
        const size_t panels = x->n_panels;
        assert_ptr_equal(x->scheme, y->scheme);
        assert_memory_equal(&x->packing.format, &y->packing.format, sizeof x->packing.format);
        assert_true(x->packing.bits == y->packing.bits && x->packing.group == y->packing.group &&
                    x->packing.row_scale == y->packing.row_scale &&
                    x->packing.permuted == y->packing.permuted);
        assert_true(x->code_stride == y->code_stride && x->n_groups == y->n_groups);
        assert_int_equal((uintptr_t)y->codes % 64, 0);
        assert_int_equal(x->packing.narrow, y->packing.narrow);
        assert_int_equal(x->bytes, y->bytes);
        assert_memory_equal(x->codes, y->codes, x->packing.bits == 16 ? x->bytes : panels * x->code_stride);
        assert_true(!x->scales == !y->scales && !x->group_scales == !y->group_scales &&
                    !x->row_scales == !y->row_scales && !x->perm == !y->perm);
        if (x->scales) assert_memory_equal(x->scales, y->scales, panels * x->scale_stride);
        if (x->group_scales)
            assert_memory_equal(x->group_scales, y->group_scales, panels * x->n_groups * 48 * 4);
        if (x->row_scales) assert_memory_equal(x->row_scales, y->row_scales, panels * 48 * 4);
        if (x->perm) assert_memory_equal(x->perm, y->perm, a->k * sizeof *x->perm);
    }
}

static void same_models(const dspark_model *a, const dspark_model *b)
{
    same_linear(&a->context_proj, &b->context_proj);
    same_linear(&a->context_kv, &b->context_kv);
    same_linear(&a->q_a, &b->q_a);
    const dspark__block_weights *x = &a->block, *y = &b->block;
    same_linear(&x->q_b, &y->q_b);
    same_linear(&x->w_uk, &y->w_uk);
    same_linear(&x->w_uv, &y->w_uv);
    same_linear(&x->o, &y->o);
    same_linear(&x->gate_up, &y->gate_up);
    same_linear(&x->down, &y->down);
    same_linear(&x->lm_head, &y->lm_head);
    same_linear(&x->markov_w2, &y->markov_w2);
    same_linear(&x->markov_mix, &y->markov_mix);
    const dspark__markov_bound *m = &x->markov_bound, *n = &y->markov_bound;
    assert_int_equal(m->bytes, n->bytes);
    assert_true(m->most == n->most && m->rounding == n->rounding && m->flushed == n->flushed);
    assert_true(m->rank == n->rank && m->n_panels == n->n_panels && m->stride == n->stride);
    if (m->bytes) assert_memory_equal(m->panels, n->panels, m->bytes);
    assert_null(n->memory); /* mapped, not made again */
    assert_int_equal(a->norms_bytes, b->norms_bytes);
    assert_memory_equal(a->norms, b->norms, a->norms_bytes);
    assert_string_equal(a->fingerprint, b->fingerprint);
    assert_string_equal(a->block_fingerprint, b->block_fingerprint);
    assert_int_equal(dspark_model_resident_bytes(a), dspark_model_resident_bytes(b));
}

/* Every format, with and without the target's LM head, believed and doubted. */
static void test_equal(void **state)
{
    static const struct { dspark_format format; const char *mix; } cases[] = {
        {DSPARK_FORMAT_BF16, "vanilla"}, {DSPARK_FORMAT_BF16, "gated"}, {DSPARK_FORMAT_BF16, "rnn"},
        {DSPARK_FORMAT_FP8_BLOCK, "vanilla"}, {DSPARK_FORMAT_FP8_CHANNEL, "vanilla"},
        {DSPARK_FORMAT_NVFP4, "vanilla"}, {DSPARK_FORMAT_MXFP4, "vanilla"}, {DSPARK_FORMAT_INT4, "gated"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char setting[64], quantised[600], file[600];
        const char *const settings[] = {setting}, *dir;
        drafting d;
        dspark_model *want, *got;
        snprintf(setting, sizeof setting, "markov_head_type=\"%s\"", cases[i].mix);
        drafting_open(&d, settings, 1);
        dir = d.dir;
        snprintf(file, sizeof file, "%s.packed", d.dir);
        snprintf(quantised, sizeof quantised, "%s.quantised", d.dir);
        if (cases[i].format != DSPARK_FORMAT_BF16) {
            dspark_quantize_opts q;
            dspark_quantize_opts_init(&q);
            q.format = cases[i].format;
            q.group_size = 32;
            if (q.format != DSPARK_FORMAT_INT4) q.group_size = 0;
            check(dspark_quantize(d.dir, quantised, &q, &err), DSPARK_OK, &err);
            dir = quantised;
        }
        dspark_host_matrix head = head_of(&d);
        dspark_model_opts o = opts_of(DSPARK_PART_BLOCK, &head, NULL);
        want = open_model(dir, &o);
        check(dspark_prepack(dir, file, &o, &err), DSPARK_OK, &err);
        o.prepacked = file;
        for (o.prepacked_verify = 0; o.prepacked_verify < 2; o.prepacked_verify++) {
            got = open_model(dir, &o);
            same_models(want, got);
            dspark_model_close(got);
        }
        dspark_model_close(want);
        drafting_close(&d);
    }
}

/* Memory is one thing, answers another: a draft over mapped weights on 1 to 3 threads. */
static void test_draft(void **state)
{
    drafting d, mapped;
    char file[600];
    (void)state;
    drafting_open(&d, NULL, 0);
    snprintf(file, sizeof file, "%s.packed", d.dir);
    dspark_host_matrix head = head_of(&d);
    dspark_model_opts o = opts_of(DSPARK_PART_BLOCK, &head, NULL);
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err);
    o.prepacked = file;
    mapped = d;
    mapped.model = open_model(d.dir, &o);
    for (uint32_t threads = 1; threads <= 3; threads++) {
        const drafting *both[2] = {&d, &mapped};
        answer answers[2];
        for (int i = 0; i < 2; i++) {
            dspark_drafter *drafter = drafting_drafter(both[i], DSPARK_ISA_AUTO, threads, 1);
            dspark_pool *pool = drafting_pool(both[i], DSPARK_CACHE_BF16, 16, 1, 32);
            dspark_session *s = drafting_session(both[i], pool, drafter, 0, 100);
            answer_open(&answers[i], both[i]);
            drafting_draft(s, drafter, 7, &answers[i]);
            dspark_session_close(s);
            dspark_pool_free(pool);
            dspark_drafter_free(drafter);
        }
        answer_equal(&answers[0], &answers[1], d.n, "mapped weights");
        answer_close(&answers[0]);
        answer_close(&answers[1]);
    }
    dspark_model_close(mapped.model);
    drafting_close(&d);
}

/* How often config.json was opened since the last time. (Closings are watched to keep two openings apart.) */
static int count_opens(int watch)
{
    _Alignas(struct inotify_event) char events[4096];
    ssize_t n = read(watch, events, sizeof events);
    int found = 0;
    for (ssize_t at = 0; at < n;) {
        const struct inotify_event *e = (const void *)(events + at);
        found += (e->mask & IN_OPEN) != 0;
        at += (ssize_t)(sizeof *e + e->len);
    }
    return found;
}

/* What is known of the config is known of one state of it: family, shapes, schemes, the file's digest. */
static void test_config_read_once(void **state)
{
    drafting d;
    char file[600], config[600];
    (void)state;
    drafting_open(&d, NULL, 0);
    snprintf(file, sizeof file, "%s.packed", d.dir);
    snprintf(config, sizeof config, "%s/config.json", d.dir);
    int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    assert_true(watch >= 0 && inotify_add_watch(watch, config, IN_OPEN | IN_CLOSE) >= 0);
    dspark_model_opts o = opts_of(DSPARK_PART_CONTEXT, NULL, NULL);
    dspark_model_close(open_model(d.dir, &o));
    assert_int_equal(count_opens(watch), 1);
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err);
    assert_int_equal(count_opens(watch), 1);
    o.prepacked = file;
    dspark_model_close(open_model(d.dir, &o));
    assert_int_equal(count_opens(watch), 1);
    close(watch);
    drafting_close(&d);
}

/* Parts of a file serve openings of fewer parts, not of more. */
static void test_parts(void **state)
{
    drafting d;
    char file[600];
    (void)state;
    drafting_open(&d, NULL, 0);
    snprintf(file, sizeof file, "%s.packed", d.dir);
    dspark_host_matrix head = head_of(&d);
    dspark_model_opts o = opts_of(DSPARK_PART_CONTEXT, NULL, NULL);
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err);
    o.prepacked = file;
    dspark_model_close(open_model(d.dir, &o));
    o.parts = DSPARK_PART_CONTEXT | DSPARK_PART_Q_A;
    refuse(d.dir, &o, DSPARK_EMODEL,
           "holds what context KV needs, and what context KV on every path needs is asked for");
    o = opts_of(DSPARK_PART_BLOCK, &head, file);
    refuse(d.dir, &o, DSPARK_EMODEL, "holds what context KV needs, and what drafting needs is asked for");
    uint32_t parts = 0;
    check(dspark_prepacked_parts(file, &parts, &err), DSPARK_OK, &err);
    assert_int_equal(parts, DSPARK_PART_CONTEXT);
    check(dspark_prepacked_parts(d.dir, &parts, &err), DSPARK_EIO, &err);
    o.prepacked = NULL;
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err); /* over the old one */
    o = opts_of(DSPARK_PART_CONTEXT, NULL, file);
    dspark_model_close(open_model(d.dir, &o));
    o.parts |= DSPARK_PART_Q_A;
    dspark_model_close(open_model(d.dir, &o));
    o.vllm_compat = 1;
    refuse(d.dir, &o, DSPARK_EINVAL, "not with a prepacked");
    o.vllm_compat = 0;
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_EINVAL, &err); /* out of itself */
    o = opts_of(DSPARK_PART_Q_A, NULL, NULL); /* which comes with context, as every part */
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err);
    check(dspark_prepacked_parts(file, &parts, &err), DSPARK_OK, &err);
    assert_int_equal(parts, DSPARK_PART_CONTEXT | DSPARK_PART_Q_A);
    o = opts_of(DSPARK_PART_CONTEXT, NULL, file);
    dspark_model_close(open_model(d.dir, &o));
    drafting_close(&d);
}

/* ---- stale ---- */

/* Change one byte of a tensor in place, as a careless tool does; the times are put back. */
static void poke(const char *dir, const char *tensor, const char *file)
{
    dspark_checkpoint *c = NULL;
    struct stat info;
    unsigned char byte;
    char path[700];
    check(dspark_checkpoint_open(&c, dir, &err), DSPARK_OK, &err);
    const dspark_tensor *t = dspark_checkpoint_find(c, tensor);
    assert_non_null(t);
    snprintf(path, sizeof path, "%s/%s", dir, file);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &info), 0);
    off_t at = 0;
    for (size_t i = 0; i < dspark_checkpoint_tensor_count(c); i++) /* data ends the file */
        at += (off_t)dspark_checkpoint_tensor(c, i)->n_bytes;
    const unsigned char *first = dspark_checkpoint_tensor(c, 0)->data;
    at = info.st_size - at + ((const unsigned char *)t->data - first);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    const struct timespec times[2] = {info.st_atim, info.st_mtim};
    assert_int_equal(futimens(fd, times), 0);
    close(fd);
    dspark_checkpoint_close(c);
}

static void test_stale(void **state)
{
    static const struct { const char *tensor; int context, q_a; } changed[] = {
        {"layers.1.mlp.up_proj.weight", 0, 0},       {"layers.0.self_attn.o_proj.weight", 0, 0},
        {"layers.0.self_attn.kv_b_proj.weight", 0, 0}, {"markov_head.markov_w2.weight", 0, 0},
        {"layers.2.input_layernorm.weight", 0, 0},   {"layers.0.self_attn.q_a_proj.weight", 0, 1},
        {"context_proj.weight", 1, 1},               {"layers.3.self_attn.kv_a_proj_with_mqa.weight", 1, 1},
        {"layers.1.self_attn.kv_a_layernorm.weight", 1, 1},
    };
    drafting d;
    char file[600];
    dspark_host_matrix head;
    (void)state;
    drafting_open(&d, NULL, 0);
    head = head_of(&d);
    snprintf(file, sizeof file, "%s.packed", d.dir);
    dspark_model_opts o = opts_of(DSPARK_PART_BLOCK, &head, NULL);
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err);
    for (size_t i = 0; i < sizeof changed / sizeof *changed; i++) {
        dspark_model_opts parts[3] = {opts_of(DSPARK_PART_CONTEXT, NULL, file),
                                      opts_of(DSPARK_PART_CONTEXT | DSPARK_PART_Q_A, NULL, file),
                                      opts_of(DSPARK_PART_BLOCK, &head, file)};
        const int stale[3] = {changed[i].context, changed[i].q_a, 1};
        for (int p = 0; p < 3; p++) dspark_model_close(open_model(d.dir, &parts[p]));
        poke(d.dir, changed[i].tensor, "model.safetensors");
        for (int p = 0; p < 3; p++) { /* only what is used is asked about */
            if (stale[p]) refuse(d.dir, &parts[p], DSPARK_EMODEL, "before it changed");
            else dspark_model_close(open_model(d.dir, &parts[p]));
        }
        poke(d.dir, changed[i].tensor, "model.safetensors"); /* back: the same contents */
    }
    d.lm_head[5] ^= 1;
    o.prepacked = file;
    refuse(d.dir, &o, DSPARK_EMODEL, "LM head");
    d.lm_head[5] ^= 1;
    dspark_model_close(open_model(d.dir, &o));
    drafting_close(&d);
}

static void test_other_config(void **state)
{
    static const char *const settings[] = {"rope_theta=20000"};
    drafting d;
    fixture f;
    char file[600];
    (void)state;
    open_fixture(&f, settings, 1);
    drafting_open(&d, NULL, 0);
    snprintf(file, sizeof file, "%s.packed", d.dir);
    dspark_model_opts o = opts_of(DSPARK_PART_CONTEXT, NULL, NULL);
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err);
    o.prepacked = file;
    refuse(f.dir, &o, DSPARK_EMODEL, "the digest of config.json was ");
    close_fixture(&f);
    drafting_close(&d);
}

/* A target's LM head: believed while its files are untouched, read when they are not, refused when it
 * differs. */
static void test_targets_head(void **state)
{
    char file[600], dir[600];
    drafting d;
    (void)state;
    drafting_open(&d, NULL, 0);
    snprintf(file, sizeof file, "%s.packed", d.dir);
    snprintf(dir, sizeof dir, "%s", tmpdir_make());
    test_target t = test_target_plain((uint32_t)d.vocab, (uint32_t)d.h, d.config->target_n_layers + 1, 5);
    if (d.config->target_n_layers) t.n_layers = d.config->target_n_layers;
    test_target_write(dir, &t);
    dspark_model_opts o = opts_of(DSPARK_PART_BLOCK, NULL, NULL);
    o.target = dir;
    usleep(300000); /* so that the target's identity is recorded too */
    dspark_model *want = open_model(d.dir, &o);
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err);
    o.prepacked = file;
    dspark_model *got = open_model(d.dir, &o);
    assert_true(dspark__prepacked_get_head(got->prepacked)->identity[0]);
    assert_true(dspark__prepacked_get_head(got->prepacked)->target[0]);
    same_models(want, got);
    dspark_model_close(got);
    test_target_write(dir, &t); /* other files, same contents */
    got = open_model(d.dir, &o);
    same_models(want, got);
    dspark_model_close(got);
    t.seed++;
    test_target_write(dir, &t);
    refuse(d.dir, &o, DSPARK_EMODEL, "LM head");
    dspark_model_close(want);
    drafting_close(&d);
}

/* ---- whole or not at all ---- */

static int die(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    if (done > total / 2) raise(SIGKILL);
    return 0;
}

static int stop(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    return done > total / 2;
}

static void test_whole(void **state)
{
    drafting d;
    char file[600];
    const char *dir = tmpdir_make();
    int status;
    (void)state;
    drafting_open(&d, NULL, 0);
    snprintf(file, sizeof file, "%s/packed", dir);
    dspark_host_matrix head = head_of(&d);
    dspark_model_opts o = opts_of(DSPARK_PART_BLOCK, &head, NULL);
    o.n_threads = 1;
    pid_t child = fork();
    if (child == 0) {
        o.progress = die;
        (void)dspark_prepack(d.dir, file, &o, &err);
        _exit(1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_int_equal(tmpdir_count(dir), 0);
    child = fork();
    if (child == 0) { /* as a full disk */
        const struct rlimit most = {100000, 100000};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &most);
        _exit(dspark_prepack(d.dir, file, &o, &err) == DSPARK_EOUTPUT && !strcmp(err.where, file) ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(tmpdir_count(dir), 0);
    o.progress = stop;
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_ECANCELLED, &err);
    assert_int_equal(tmpdir_count(dir), 0);
    o.progress = NULL;
    check(dspark_prepack(d.dir, tmpdir_path(dir, "none/f"), &o, &err), DSPARK_EOUTPUT, &err);
    /* what one leaves that is killed between link and rename */
    tmpdir_write(tmpdir_path(dir, ".dspark-987654321-0.tmp"), "left", 4);
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err);
    assert_int_equal(tmpdir_count(dir), 1);
    drafting_close(&d);
}

/* The embedding is looked up, not packed: a draft with an LM head and no embedding needs no target for it. */
static void test_no_embedding(void **state)
{
    test_target values = test_target_plain(97, 64, 8, 5);
    drafting d;
    tensors t;
    char dir[512], file[600];
    (void)state;
    drafting_open(&d, NULL, 0);
    snprintf(dir, sizeof dir, "%s", tmpdir_make());
    snprintf(file, sizeof file, "%s.packed", dir);
    test_copy_checkpoint(&t, d.dir, dir);
    tensors_remove(&t, "embed_tokens.weight");
    tensors_open(&t, dir, 1);
    dspark_model_opts o = opts_of(DSPARK_PART_BLOCK, NULL, NULL);
    check(dspark_prepack(dir, file, &o, &err), DSPARK_EMODEL, &err); /* and without a head nothing helps */
    assert_string_equal(err.where, "lm_head");
    uint16_t *embed = test_target_matrix(&values, 0), *head = test_target_matrix(&values, 1);
    tensors_add2(&t, "lm_head.weight", DSPARK_BF16, 97, 64, head);
    tensors_open(&t, dir, 1);
    check(dspark_prepack(dir, file, &o, &err), DSPARK_OK, &err);
    check(dspark_prepacked_check(dir, file, &o, &err), DSPARK_OK, &err);
    refuse(dir, &o, DSPARK_EMODEL, "none of its own"); /* who drafts needs one */
    const dspark_host_matrix lent = {embed, 97, 64, 0};
    o.embed_tokens = &lent;
    dspark_model *packed = open_model(dir, &o);
    o.prepacked = file;
    dspark_model *mapped = open_model(dir, &o);
    assert_string_equal(dspark_model_block_fingerprint(packed), dspark_model_block_fingerprint(mapped));
    dspark_model_close(packed);
    dspark_model_close(mapped);
    poke(dir, "lm_head.weight", "model.safetensors");
    o.prepacked = NULL;
    o.embed_tokens = NULL;
    check(dspark_prepacked_check(dir, file, &o, &err), DSPARK_EMODEL, &err);
    assert_non_null(strstr(err.message, "before it changed"));
    check(dspark_prepacked_check(NULL, file, &o, &err), DSPARK_EINVAL, &err);
    check(dspark_prepacked_check(dir, tmpdir_path(dir, "none"), &o, &err), DSPARK_EIO, &err);
    tensors_clear(&t);
    free(embed);
    free(head);
    drafting_close(&d);
}

/* Same bytes for every number of threads. */
static void test_same_bytes(void **state)
{
    drafting d;
    unsigned char *bytes[2];
    struct stat info[2];
    (void)state;
    drafting_open(&d, NULL, 0);
    dspark_host_matrix head = head_of(&d);
    for (int i = 0; i < 2; i++) {
        char file[600];
        snprintf(file, sizeof file, "%s.packed%d", d.dir, i);
        dspark_model_opts o = opts_of(DSPARK_PART_BLOCK, &head, NULL);
        o.n_threads = 1 + 2 * (uint32_t)i;
        check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err);
        int fd = open(file, O_RDONLY);
        assert_int_equal(fstat(fd, &info[i]), 0);
        bytes[i] = malloc((size_t)info[i].st_size);
        assert_int_equal(read(fd, bytes[i], (size_t)info[i].st_size), info[i].st_size);
        close(fd);
    }
    assert_int_equal(info[0].st_size, info[1].st_size);
    assert_memory_equal(bytes[0], bytes[1], (size_t)info[0].st_size);
    free(bytes[0]);
    free(bytes[1]);
    drafting_close(&d);
}

/* ---- memory ---- */

static void test_no_memory(void **state)
{
    drafting d;
    char file[600], again[600];
    const char *dir = tmpdir_make();
    (void)state;
    if (!oom_available()) skip();
    drafting_open(&d, NULL, 0);
    snprintf(file, sizeof file, "%s/packed", dir);
    snprintf(again, sizeof again, "%s/again", dir);
    dspark_host_matrix head = head_of(&d);
    dspark_model_opts o = opts_of(DSPARK_PART_BLOCK, &head, NULL);
    o.n_threads = 1;
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err);
    for (int writing = 0; writing < 2; writing++) {
        for (size_t n = 1;; n += n < 100 ? 1 : 7) {
            dspark_model *m = NULL;
            o.prepacked = writing ? NULL : file;
            oom_fail_nth(n);
            dspark_status st = writing ? dspark_prepack(d.dir, again, &o, &err)
                                       : dspark_model_open(&m, d.dir, &o, &err);
            oom_stop();
            const int failed = oom_failed() > 0;
            dspark_model_close(m);
            if (failed && st != DSPARK_OK) {
                check(st, DSPARK_ENOMEM, &err);
                assert_int_equal(tmpdir_count(dir), 1);
            } else {
                check(st, DSPARK_OK, &err);
            }
            if (!failed) break;
            unlink(again);
        }
    }
    drafting_close(&d);
}

/* ---- only the parts in use ---- */

/* Resident KB of the mapping that holds `at`; -1 where the system does not tell. */
static long resident_of(const void *at)
{
    FILE *f = fopen("/proc/self/smaps", "r");
    char line[512];
    int inside = 0;
    long kb = -1;
    while (f && kb < 0 && fgets(line, sizeof line, f)) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2)
            inside = (uintptr_t)at >= begin && (uintptr_t)at < end;
        else if (inside)
            (void)!sscanf(line, "Rss: %ld", &kb);
    }
    if (f) fclose(f);
    return kb;
}

/* Context alone touches no weight of the MLPs, which are 12 MB a layer here; neither in the checkpoint
 * nor in the file. What it does touch lies once in each layer, and may come in huge pages. */
static void test_parts_untouched(void **state)
{
    static const char *const settings[] = {"intermediate_size=32768"};
    drafting d;
    char file[600];
    (void)state;
    drafting_open(&d, settings, 1);
    snprintf(file, sizeof file, "%s.packed", d.dir);
    dspark_host_matrix head = head_of(&d);
    dspark_model_opts o = opts_of(DSPARK_PART_BLOCK, &head, NULL);
    check(dspark_prepack(d.dir, file, &o, &err), DSPARK_OK, &err);
    for (int mapped = 0; mapped < 2; mapped++) {
        dspark_model_opts context = opts_of(DSPARK_PART_CONTEXT, NULL, mapped ? file : NULL);
        dspark_model *m = open_model(d.dir, &context);
        const dspark_tensor *t = dspark__checkpoint_find(m->ckpt, "layers.0.mlp.up_proj.weight");
        const long layers = m->config.n_layers, most = layers * 2 * (2 << 20);
        assert_true((long)t->n_bytes * 3 * layers > 2 * most); /* gate, up and down */
        long kb = resident_of(t->data);
        if (kb >= 0 && kb * 1024 > most) fail_msg("%ld KB of the checkpoint are resident", kb);
        if (mapped) {
            kb = resident_of(m->context_proj.shards[0].codes);
            if (kb * 1024 > most) fail_msg("%ld KB of the file are resident", kb);
        }
        dspark_model_close(m);
    }
    drafting_close(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal),      cmocka_unit_test(test_draft),
        cmocka_unit_test(test_parts),      cmocka_unit_test(test_stale),
        cmocka_unit_test(test_other_config), cmocka_unit_test(test_targets_head),
        cmocka_unit_test(test_whole),      cmocka_unit_test(test_no_embedding),
        cmocka_unit_test(test_same_bytes),
        cmocka_unit_test(test_config_read_once),
        cmocka_unit_test(test_no_memory),  cmocka_unit_test(test_parts_untouched),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
