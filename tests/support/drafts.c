/* The fixture of the session tests: a tiny model that drafts, and the results of a draft. */
#include "support/drafts.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/numfmt.h"
#include "support/fixture.h"
#include "support/tmpdir.h"

#define PATTERN 0x6b

static dspark_error err;
#define must(call) check((call), DSPARK_OK, &err)

static void fill_random(uint16_t *x, size_t n, uint64_t seed, double range)
{
    for (size_t i = 0; i < n; i++) {
        double u = (double)(next_random(&seed) >> 11) * 0x1p-53;
        x[i] = dspark__f32_to_bf16((float)((2 * u - 1) * range));
    }
}

static void open_model(drafts *t)
{
    dspark_model_opts mo;
    dspark_host_matrix head = {t->head, t->c ? t->c->vocab_size : 0, t->c ? t->c->hidden_size : 0, 0};
    dspark_model_opts_init(&mo);
    mo.n_threads = 1;
    if (t->head) {
        mo.parts = DSPARK_PART_BLOCK;
        mo.lm_head = &head;
    }
    dspark_model *model;
    must(dspark_model_open(&model, t->dir, &mo, &err));
    dspark_model_close(t->model);
    t->model = model;
    t->c = dspark_model_config(model);
}

void drafts_open(drafts *t, const char *const *settings, size_t n_settings)
{
    dspark_synth_opts so;
    memset(t, 0, sizeof *t);
    snprintf(t->dir, sizeof t->dir, "%s/ckpt", tmpdir_make());
    dspark_synth_opts_init(&so);
    so.preset = "tiny";
    so.seed = 5;
    so.settings = settings;
    so.n_settings = n_settings;
    must(dspark_synth_checkpoint(t->dir, &so, &err));
    open_model(t); /* the context alone: for the widths */
    const size_t head = (size_t)t->c->vocab_size * t->c->hidden_size;
    t->head = malloc(head * 2);
    assert_non_null(t->head);
    fill_random(t->head, head, 11, 0.4);
    open_model(t);
    t->taps_width = (size_t)t->c->n_taps * t->c->tap_width;
    t->taps = malloc(DRAFTS_ROWS * t->taps_width * 2);
    assert_non_null(t->taps);
    fill_random(t->taps, DRAFTS_ROWS * t->taps_width, 12, 2);
}

void drafts_reopen(drafts *t)
{
    open_model(t);
}

void drafts_close(drafts *t)
{
    dspark_model_close(t->model);
    free(t->head);
    free(t->taps);
}

/* The file and the offset of a tensor's data: from its header. */
static FILE *seek_tensor(const drafts *t, const char *tensor, size_t n)
{
    char quoted[160], *header, *at;
    unsigned char length[8];
    uint64_t header_bytes = 0, begin, end;
    FILE *f = fopen(tmpdir_path(t->dir, "model.safetensors"), "r+b");
    assert_non_null(f);
    assert_int_equal(fread(length, 1, 8, f), 8);
    for (int i = 8; i-- > 0;) header_bytes = header_bytes << 8 | length[i];
    header = calloc(1, (size_t)header_bytes + 1);
    assert_non_null(header);
    assert_int_equal(fread(header, 1, (size_t)header_bytes, f), header_bytes);
    snprintf(quoted, sizeof quoted, "\"%s\"", tensor);
    at = strstr(header, quoted);
    if (!at) fail_msg("no tensor %s", tensor);
    at = strstr(at, "\"data_offsets\"");
    assert_non_null(at);
    at = strchr(at, '[') + 1;
    begin = strtoull(at, &at, 10);
    end = strtoull(at + strspn(at, ", "), NULL, 10);
    assert_int_equal(end - begin, n);
    assert_int_equal(fseek(f, (long)(8 + header_bytes + begin), SEEK_SET), 0);
    free(header);
    return f;
}

void drafts_read(const drafts *t, const char *tensor, void *data, size_t n)
{
    FILE *f = seek_tensor(t, tensor, n);
    assert_int_equal(fread(data, 1, n, f), n);
    fclose(f);
}

void drafts_write(const drafts *t, const char *tensor, const void *data, size_t n)
{
    FILE *f = seek_tensor(t, tensor, n);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

dspark_drafter *drafts_drafter(const drafts *t, dspark_isa isa, uint32_t n_threads, uint32_t max_sequences)
{
    dspark_drafter_opts o;
    dspark_drafter *d = NULL;
    dspark_drafter_opts_init(&o);
    o.isa = isa;
    o.n_threads = n_threads;
    o.max_sequences = max_sequences;
    o.max_tokens = 64;
    must(dspark_drafter_create(&d, t->model, &o, &err));
    return d;
}

dspark_pool *drafts_pool(const drafts *t, dspark_cache_dtype dtype, uint32_t block_size, uint64_t n_blocks,
                         uint32_t max_sessions)
{
    dspark_pool_opts o;
    dspark_pool *p = NULL;
    dspark_pool_opts_init(&o);
    o.dtype = dtype;
    o.block_size = block_size;
    o.n_blocks = n_blocks;
    o.max_sessions = max_sessions;
    must(dspark_pool_create(&p, t->model, &o, &err));
    return p;
}

void drafts_append(const drafts *t, dspark_session *s, dspark_drafter *d, uint64_t first, size_t n)
{
    assert_true(first + n <= DRAFTS_ROWS);
    must(dspark_session_append(s, d, first, t->taps + first * t->taps_width, t->taps_width, 0, n, &err));
}

/* ---- results ---- */

static void *patterned(size_t n)
{
    void *p = malloc(n);
    assert_non_null(p);
    memset(p, PATTERN, n);
    return p;
}

drafted *drafted_new(const drafts *t)
{
    const size_t n = t->c->block_size, vocab = t->c->vocab_size;
    drafted *r = patterned(sizeof *r);
    assert_true(n <= 32);
    r->hidden = patterned(n * t->c->hidden_size * 2);
    r->base = patterned(n * vocab * 2);
    r->logits = patterned(n * vocab * 2);
    r->probs = patterned(n * vocab * sizeof(float));
    dspark_draft_output_init(&r->out);
    r->out.tokens = r->tokens;
    r->out.confidence = r->confidence;
    r->out.confidence_logits = r->confidence_logits;
    r->out.hidden = r->hidden;
    r->out.base_logits = r->base;
    r->out.logits = r->logits;
    r->out.probs = r->probs;
    return r;
}

void drafted_free(drafted *r)
{
    free(r->hidden);
    free(r->base);
    free(r->logits);
    free(r->probs);
    free(r);
}

void drafted_same(const drafts *t, const drafted *a, const drafted *b)
{
    const size_t n = a->out.n_tokens, vocab = t->c->vocab_size;
    assert_int_equal(a->out.status, b->out.status);
    assert_int_equal(n, b->out.n_tokens);
    assert_int_equal(a->out.beyond_original, b->out.beyond_original);
    if (a->out.status != DSPARK_OK) return;
    assert_memory_equal(a->hidden, b->hidden, (size_t)t->c->block_size * t->c->hidden_size * 2);
    assert_memory_equal(a->base, b->base, n * vocab * 2);
    assert_memory_equal(a->logits, b->logits, n * vocab * 2);
    assert_memory_equal(a->probs, b->probs, n * vocab * sizeof(float));
    assert_memory_equal(a->tokens, b->tokens, n * sizeof *a->tokens);
    assert_memory_equal(a->confidence, b->confidence, n * sizeof *a->confidence);
    assert_memory_equal(a->confidence_logits, b->confidence_logits, n * sizeof *a->confidence);
}

static int all_pattern(const void *data, size_t n)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i++)
        if (p[i] != PATTERN) return 0;
    return 1;
}

int drafted_untouched(const drafts *t, const drafted *r)
{
    const size_t n = t->c->block_size, vocab = t->c->vocab_size;
    return all_pattern(r->tokens, sizeof r->tokens) && all_pattern(r->confidence, sizeof r->confidence) &&
           all_pattern(r->logits, n * vocab * 2) && all_pattern(r->probs, n * vocab * sizeof(float)) &&
           all_pattern(r->hidden, n * t->c->hidden_size * 2);
}

/* ---- sessions ---- */

dspark_session *drafts_session(dspark_pool *pool)
{
    dspark_session *s = NULL;
    must(dspark_session_open(&s, pool, &err));
    return s;
}

dspark_draft_input drafts_input(int64_t anchor)
{
    dspark_draft_input in;
    dspark_draft_input_init(&in);
    in.anchor = anchor;
    return in;
}

drafted *drafts_draft(const drafts *t, dspark_session *s, dspark_drafter *d, int64_t anchor)
{
    drafted *r = drafted_new(t);
    dspark_draft_input in = drafts_input(anchor);
    must(dspark_session_draft(s, d, &in, &r->out, &err));
    assert_int_equal(r->out.status, DSPARK_OK);
    return r;
}

drafted *drafts_raw(const drafts *t, dspark_drafter *d, dspark_cache_dtype dtype, size_t n,
                          int64_t anchor)
{
    dspark_cache *cache = NULL;
    int64_t *numbers = calloc(n + 1, sizeof *numbers);
    dspark_batch b;
    drafted *r = drafted_new(t);
    dspark_draft_input in = drafts_input(anchor);
    assert_non_null(numbers);
    for (size_t i = 0; i < n; i++) numbers[i] = (int64_t)i;
    must(dspark_cache_create(&cache, t->model, dtype, 16, n / 16 + 1, NULL, &err));
    dspark_batch_init(&b);
    b.n_tokens = n;
    b.taps = t->taps;
    b.positions = b.slots = numbers;
    must(dspark_context_run(dspark_drafter_context(d), &b, dspark_cache_get_view(cache), NULL, &err));
    in.position = (int64_t)n;
    in.n_context = n;
    in.slots = numbers;
    must(dspark_draft(d, dspark_cache_get_view(cache), &in, &r->out, 1, &err));
    assert_int_equal(r->out.status, DSPARK_OK);
    free(numbers);
    dspark_cache_free(cache);
    return r;
}

void drafts_expect_fresh(const drafts *t, dspark_session *s, dspark_drafter *d, size_t n)
{
    drafted *got = drafts_draft(t, s, d, 5), *want = drafts_raw(t, d, DSPARK_CACHE_BF16, n, 5);
    assert_int_equal(dspark_session_length(s), n);
    drafted_same(t, got, want);
    drafted_free(got);
    drafted_free(want);
}

uint64_t drafts_free_blocks(dspark_pool *p)
{
    return dspark_pool_get_info(p).free_blocks;
}
