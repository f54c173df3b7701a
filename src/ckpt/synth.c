/* See synth.h. All or nothing is stage.h's business. */
#include "ckpt/synth.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/status.h"
#include "ckpt/config.h"
#include "ckpt/json.h"
#include "ckpt/roster.h"
#include "ckpt/stage.h"
#include "ckpt/synth_preset.h"
#include "ckpt/synth_values.h"
#include "ckpt/writer.h"

#define BUFFER_VALUES (1u << 21) /* 4 MiB: enough per write, and a progress report every few ms */

/* ------------------------------------------------------------------------------------------------
 * Filling: one buffer, and the caller's progress
 * --------------------------------------------------------------------------------------------- */

typedef struct filler {
    uint16_t *buffer; /* [BUFFER_VALUES] */
    dspark_progress progress;
    void *progress_user;
    uint64_t done, total; /* bytes */
} filler;

static dspark_status filler_init(filler *f, uint64_t total, dspark_progress progress, void *user,
                                 dspark_error *err)
{
    memset(f, 0, sizeof *f);
    f->progress = progress;
    f->progress_user = user;
    f->total = total;
    f->buffer = dspark__alloc(NULL, BUFFER_VALUES * sizeof *f->buffer, 64);
    if (!f->buffer)
        return dspark__fail_nomem(err, "the write buffer", BUFFER_VALUES * sizeof *f->buffer);
    return DSPARK_OK;
}

static void filler_free(filler *f)
{
    if (f->buffer) dspark__free(NULL, f->buffer, BUFFER_VALUES * sizeof *f->buffer);
    f->buffer = NULL;
}

/* Hand n_bytes of the buffer to the writer and tell the caller. */
static dspark_status filler_flush(filler *f, dspark_writer *w, size_t n_bytes, const char *name,
                                  dspark_error *err)
{
    dspark_status st = dspark__writer_data(w, f->buffer, n_bytes, err);
    if (st != DSPARK_OK) return st;
    f->done += n_bytes;
    if (f->progress && f->progress(f->progress_user, f->done, f->total) != 0)
        return dspark__fail(err, DSPARK_ECANCELLED, name,
                            "cancelled after %" PRIu64 " of %" PRIu64 " bytes", f->done, f->total);
    return DSPARK_OK;
}

static dspark_status fill_tensor(filler *f, dspark_writer *w, const char *name, uint64_t n_values,
                                 uint64_t last_axis, uint64_t seed, dspark_error *err)
{
    dspark__synth_stream stream;
    dspark__synth_stream_init(&stream, name, last_axis, seed);
    for (uint64_t i = 0; i < n_values;) {
        size_t n = n_values - i < BUFFER_VALUES ? (size_t)(n_values - i) : BUFFER_VALUES;
        dspark_status st;
        dspark__synth_fill(&stream, i, n, f->buffer);
        if ((st = filler_flush(f, w, n * sizeof *f->buffer, name, err)) != DSPARK_OK) return st;
        i += n;
    }
    return DSPARK_OK;
}

static dspark_status fill_token_ids(filler *f, dspark_writer *w, uint64_t n_tokens, uint32_t vocab,
                                    uint64_t seed, dspark_error *err)
{
    const size_t most = BUFFER_VALUES * sizeof *f->buffer / sizeof(int64_t);
    dspark__synth_stream stream;
    dspark__synth_stream_init(&stream, "token_ids", 1, seed);
    for (uint64_t i = 0; i < n_tokens;) {
        size_t n = n_tokens - i < most ? (size_t)(n_tokens - i) : most;
        dspark_status st;
        for (size_t j = 0; j < n; j++) {
            int64_t id = (int64_t)dspark__synth_token(&stream, i + j, vocab);
            memcpy((unsigned char *)f->buffer + j * sizeof id, &id, sizeof id);
        }
        if ((st = filler_flush(f, w, n * sizeof(int64_t), "token_ids", err)) != DSPARK_OK)
            return st;
        i += n;
    }
    return DSPARK_OK;
}

/* ------------------------------------------------------------------------------------------------
 * Checkpoints
 * --------------------------------------------------------------------------------------------- */

typedef struct plan {
    dspark__roster_entry *entries;
    uint64_t *bytes;  /* [n_entries] */
    uint32_t *shard;  /* [n_entries] */
    size_t n_entries;
    uint32_t n_shards;
    uint64_t total; /* bytes of all tensors */
} plan;

static void plan_free(plan *p)
{
    free(p->entries);
    free(p->bytes);
    free(p->shard);
    memset(p, 0, sizeof *p);
}

static int entry_bytes(const dspark__roster_entry *e, uint64_t *bytes)
{
    *bytes = 2;
    for (uint32_t i = 0; i < e->rank; i++)
        if (!dspark__mul_u64(*bytes, e->shape[i], bytes)) return 0;
    return 1;
}

static dspark_status plan_make(plan *p, const dspark_config *c, int context_only, int embed_tokens,
                               uint64_t shard_bytes, dspark_error *err)
{
    uint64_t in_shard = 0;
    size_t n = 0;
    dspark_status st;

    memset(p, 0, sizeof *p);
    if ((st = dspark__roster_make(&p->entries, &p->n_entries, c, context_only, err)) != DSPARK_OK)
        return st;
    for (size_t i = 0; i < p->n_entries; i++) { /* keep what this checkpoint carries */
        const char *name = p->entries[i].name;
        if (strcmp(name, "lm_head.weight") == 0) continue;
        if (strcmp(name, "embed_tokens.weight") == 0 && !embed_tokens) continue;
        if (n != i) p->entries[n] = p->entries[i];
        n++;
    }
    p->n_entries = n;
    p->bytes = calloc(n + 1, sizeof *p->bytes);
    p->shard = calloc(n + 1, sizeof *p->shard);
    if (!p->bytes || !p->shard) return dspark__fail_nomem(err, "the plan of shards", n * 12);
    for (size_t i = 0; i < n; i++) {
        if (!entry_bytes(&p->entries[i], &p->bytes[i]) ||
            !dspark__add_u64(p->total, p->bytes[i], &p->total) || p->total > INT64_MAX)
            return dspark__fail(err, DSPARK_EMODEL, p->entries[i].name,
                                "the checkpoint would be larger than a file can be");
        if (shard_bytes > 0 && in_shard > 0 &&
            (in_shard > shard_bytes || p->bytes[i] > shard_bytes - in_shard)) {
            p->n_shards++;
            in_shard = 0;
        }
        p->shard[i] = p->n_shards;
        in_shard += p->bytes[i];
    }
    p->n_shards++;
    return DSPARK_OK;
}

static dspark_status write_shard(dspark__stage *s, const plan *p, uint32_t shard, uint64_t seed, filler *f,
                                 dspark_error *err)
{
    char name[DSPARK__STAGE_NAME_BYTES], number[24];
    dspark_writer *w = NULL;
    dspark_status st;
    char *path;

    dspark__stage_shard_name(name, shard, p->n_shards);
    snprintf(number, sizeof number, "%" PRIu64, seed);
    if (!(path = dspark__stage_add(s, name))) return dspark__fail_nomem(err, "a path", strlen(s->tmp));
    if ((st = dspark__writer_create(&w, path, err)) != DSPARK_OK) goto fail;
    if ((st = dspark__writer_metadata(w, "format", "pt", err)) != DSPARK_OK) goto fail;
    if ((st = dspark__writer_metadata(w, "generator", "dspark synth 1", err)) != DSPARK_OK)
        goto fail;
    if ((st = dspark__writer_metadata(w, "seed", number, err)) != DSPARK_OK) goto fail;
    for (size_t i = 0; i < p->n_entries; i++) {
        const dspark__roster_entry *e = &p->entries[i];
        if (p->shard[i] != shard) continue;
        st = dspark__writer_declare(w, e->name, DSPARK_BF16, e->rank, e->shape, err);
        if (st != DSPARK_OK) goto fail;
    }
    for (size_t i = 0; i < p->n_entries; i++) {
        const dspark__roster_entry *e = &p->entries[i];
        if (p->shard[i] != shard) continue;
        st = fill_tensor(f, w, e->name, p->bytes[i] / 2, e->shape[e->rank - 1], seed, err);
        if (st != DSPARK_OK) goto fail;
    }
    st = dspark__writer_commit(w, err);
    free(path);
    return st;
fail:
    dspark__writer_abort(w);
    free(path);
    return st;
}

static dspark_status write_index(dspark__stage *s, const plan *p, dspark_error *err)
{
    dspark_status st = DSPARK_ENOMEM;
    json_t *map = json_object(), *root = NULL;
    char *text = NULL;
    int bad = !map;

    for (size_t i = 0; i < p->n_entries && !bad; i++) {
        char name[DSPARK__STAGE_NAME_BYTES];
        dspark__stage_shard_name(name, p->shard[i], p->n_shards);
        bad = json_object_set_new(map, p->entries[i].name, json_string(name)) != 0;
    }
    if (!bad)
        root = json_pack("{s{sI}sO}", "metadata", "total_size", (json_int_t)p->total, "weight_map",
                         map);
    if (root) text = dspark__json_text(root, JSON_INDENT(2) | JSON_SORT_KEYS);
    if (text)
        st = dspark__stage_write(s, "model.safetensors.index.json", text, strlen(text), err);
    else
        dspark__fail_nomem(err, "the index", p->n_entries * sizeof *p->entries);
    free(text);
    json_decref(root);
    json_decref(map);
    return st;
}

dspark_status dspark__synth_checkpoint(const char *dir, const dspark_synth_opts *opts,
                                       dspark_error *err)
{
    dspark__synth_config config = {0};
    dspark__config_doc *doc = NULL;
    plan p = {0};
    dspark__stage s = {0};
    filler f = {0};
    dspark_status st;

    if (!*dir) return dspark__fail(err, DSPARK_EINVAL, "dir", "a directory is needed");
    /* All that can be known beforehand comes before the first touch of the disk. */
    if ((st = dspark__synth_config_make(&config, opts, err)) != DSPARK_OK) goto fail;
    st = dspark__config_parse(&doc, config.text, config.n_bytes, "synthetic config.json", err);
    if (st != DSPARK_OK) goto fail;
    st = plan_make(&p, &doc->config, opts->context_only, config.embed_tokens, opts->shard_bytes,
                   err);
    if (st != DSPARK_OK) goto fail;
    st = filler_init(&f, p.total, opts->progress, opts->progress_user, err);
    if (st != DSPARK_OK) goto fail;

    if ((st = dspark__stage_open(&s, dir, ".synth-", (size_t)p.n_shards + 2, err)) != DSPARK_OK) goto fail;
    for (uint32_t i = 0; i < p.n_shards; i++)
        if ((st = write_shard(&s, &p, i, opts->seed, &f, err)) != DSPARK_OK) goto fail;
    if (p.n_shards > 1 && (st = write_index(&s, &p, err)) != DSPARK_OK) goto fail;
    st = dspark__stage_write(&s, "config.json", config.text, config.n_bytes, err);
    if (st != DSPARK_OK) goto fail;
    st = dspark__stage_publish(&s, err);
fail:
    dspark__stage_close(&s, st != DSPARK_OK);
    filler_free(&f);
    plan_free(&p);
    dspark__config_free(doc);
    dspark__synth_config_free(&config);
    return st;
}

/* ------------------------------------------------------------------------------------------------
 * Dumps
 * --------------------------------------------------------------------------------------------- */

dspark_status dspark__synth_dump(const char *file, const char *ckpt, uint64_t n_tokens,
                                 uint64_t seed, dspark_progress progress, void *progress_user,
                                 dspark_error *err)
{
    dspark__config_doc *doc = NULL;
    dspark_writer *w = NULL;
    filler f = {0};
    uint64_t shape[3], n_values, n_bytes, id_bytes;
    dspark_status st;

    if (!*file) return dspark__fail(err, DSPARK_EINVAL, "file", "a file name is needed");
    if ((st = dspark__config_read(&doc, ckpt, err)) != DSPARK_OK) goto fail;
    shape[0] = n_tokens;
    shape[1] = (uint64_t)doc->config.n_taps + 1; /* the last one is the target's final state */
    shape[2] = doc->config.tap_width;
    if (!dspark__mul_u64(shape[1] * shape[2], n_tokens, &n_values) ||
        !dspark__mul_u64(n_values, 2, &n_bytes) || !dspark__mul_u64(n_tokens, 8, &id_bytes) ||
        !dspark__add_u64(n_bytes, id_bytes, &id_bytes) || id_bytes > INT64_MAX) {
        st = dspark__fail(err, DSPARK_EINVAL, file,
                          "a dump of %" PRIu64 " tokens would be larger than a file can be",
                          n_tokens);
        goto fail;
    }
    if ((st = filler_init(&f, id_bytes, progress, progress_user, err)) != DSPARK_OK) goto fail;
    if ((st = dspark__writer_create(&w, file, err)) != DSPARK_OK) goto fail;
    st = dspark__writer_declare(w, "token_ids", DSPARK_I64, 1, shape, err);
    if (st != DSPARK_OK) goto fail;
    st = dspark__writer_declare(w, "hidden_states", DSPARK_BF16, 3, shape, err);
    if (st != DSPARK_OK) goto fail;
    st = fill_token_ids(&f, w, n_tokens, doc->config.vocab_size, seed, err);
    if (st != DSPARK_OK) goto fail;
    st = fill_tensor(&f, w, "hidden_states", n_values, shape[2], seed, err);
    if (st != DSPARK_OK) goto fail;
    st = dspark__writer_commit(w, err);
    w = NULL;
fail:
    dspark__writer_abort(w);
    filler_free(&f);
    dspark__config_free(doc);
    return st;
}
