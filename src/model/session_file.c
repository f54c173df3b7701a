/* Snapshots: a session's entries as one safetensors file, "layers.N.entries" [length, entry bytes] U8,
 * with all that must be equal for them to mean the same in the metadata. A file is hostile until every
 * entry of it is known to be finite. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/status.h"
#include "ckpt/checkpoint.h"
#include "ckpt/writer.h"
#include "model/session.h"

#define FORMAT "dspark session 2"

static void entries_name(char name[64], uint32_t layer)
{
    snprintf(name, 64, "layers.%u.entries", layer);
}

/* Everything that decides what an entry's bytes mean, as text. */
static void describe(const dspark_pool *p, char text[64], const char **dtype, const char **tile)
{
    snprintf(text, 64, "%zu", p->entry_bytes);
    *dtype = dspark__cache_dtype_name(p->view.dtype);
    *tile = p->view.tile_scale == DSPARK_TILE_SCALE_EXACT ? "exact" : "pow2";
}

static void scale_text(const dspark_pool *p, uint32_t layer, char key[64], char text[64])
{
    uint32_t bits;
    float scale = p->scales ? p->scales[layer] : 1.0f;
    memcpy(&bits, &scale, sizeof bits);
    snprintf(key, 64, "scale.layers.%u", layer);
    snprintf(text, 64, "%08x", bits); /* exact, unlike a decimal */
}

/* ---- saving ---- */

static dspark_status write_metadata(dspark_writer *w, const dspark_pool *p, dspark_error *err)
{
    char bytes[64], key[64], text[64];
    const char *dtype, *tile;
    describe(p, bytes, &dtype, &tile);
    dspark_status st = dspark__writer_metadata(w, "format", FORMAT, err);
    if (st == DSPARK_OK) st = dspark__writer_metadata(w, "fingerprint", p->model->fingerprint, err);
    if (st == DSPARK_OK) st = dspark__writer_metadata(w, "cache_dtype", dtype, err);
    if (st == DSPARK_OK) st = dspark__writer_metadata(w, "tile_scale", tile, err);
    if (st == DSPARK_OK) st = dspark__writer_metadata(w, "entry_bytes", bytes, err);
    for (uint32_t l = 0; st == DSPARK_OK && l < p->view.n_layers; l++) {
        scale_text(p, l, key, text);
        st = dspark__writer_metadata(w, key, text, err);
    }
    return st;
}

/* A layer's entries in order, block by block. */
static dspark_status write_layer(dspark_writer *w, const dspark_session *s, uint32_t layer,
                                 dspark_error *err)
{
    const dspark_pool *p = s->pool;
    const uint32_t size = p->info.block_size;
    dspark_status st = DSPARK_OK;
    for (uint64_t at = 0; st == DSPARK_OK && at < s->length; at += size) {
        uint64_t n = s->length - at < size ? s->length - at : size;
        st = dspark__writer_data(w, (const unsigned char *)p->layers[layer] +
                                        (size_t)dspark__session_slot(s, at) * p->entry_bytes,
                                 (size_t)n * p->entry_bytes, err);
    }
    return st;
}

dspark_status dspark__session_save(dspark_session *s, const char *path, dspark_error *err)
{
    const dspark_pool *p = s->pool;
    const uint64_t shape[2] = {s->length, p->entry_bytes};
    dspark_writer *w = NULL;
    char name[64];
    dspark_status st = dspark__writer_create(&w, path, err);
    if (st != DSPARK_OK) return st;
    st = write_metadata(w, p, err);
    for (uint32_t l = 0; st == DSPARK_OK && l < p->view.n_layers; l++) {
        entries_name(name, l);
        st = dspark__writer_declare(w, name, DSPARK_U8, 2, shape, err);
    }
    for (uint32_t l = 0; st == DSPARK_OK && l < p->view.n_layers; l++) st = write_layer(w, s, l, err);
    if (st == DSPARK_OK) return dspark__writer_commit(w, err);
    dspark__writer_abort(w);
    return st;
}

/* ---- loading ---- */

static dspark_status expect(const dspark_checkpoint *file, const char *key, const char *want,
                            const char *path, dspark_error *err)
{
    const char *found = dspark__checkpoint_metadata(file, key);
    if (found && strcmp(found, want) == 0) return DSPARK_OK;
    return dspark__fail(err, DSPARK_EMODEL, path, "%s: expected %s, found %.100s", key, want,
                        found ? found : "none");
}

static dspark_status check_metadata(const dspark_checkpoint *file, const dspark_pool *p, const char *path,
                                    dspark_error *err)
{
    char bytes[64], key[64], text[64];
    const char *dtype, *tile;
    describe(p, bytes, &dtype, &tile);
    dspark_status st = expect(file, "format", FORMAT, path, err);
    if (st == DSPARK_OK) st = expect(file, "fingerprint", p->model->fingerprint, path, err);
    if (st == DSPARK_OK) st = expect(file, "cache_dtype", dtype, path, err);
    if (st == DSPARK_OK && p->view.dtype == DSPARK_CACHE_FP8_DS_MLA)
        st = expect(file, "tile_scale", tile, path, err);
    if (st == DSPARK_OK) st = expect(file, "entry_bytes", bytes, path, err);
    for (uint32_t l = 0; st == DSPARK_OK && l < p->view.n_layers; l++) {
        scale_text(p, l, key, text);
        st = expect(file, key, text, path, err);
    }
    return st;
}

/* The layers' tensors, all of one length; nothing else in the file. */
static dspark_status find_layers(const dspark_checkpoint *file, const dspark_pool *p,
                                 const dspark_tensor *tensors[DSPARK_MAX_LAYERS], uint64_t *length,
                                 const char *path, dspark_error *err)
{
    char name[64];
    if (dspark__checkpoint_count(file) != p->view.n_layers)
        return dspark__fail(err, DSPARK_EFORMAT, path, "expected %u tensors, found %zu", p->view.n_layers,
                            dspark__checkpoint_count(file));
    for (uint32_t l = 0; l < p->view.n_layers; l++) {
        entries_name(name, l);
        const dspark_tensor *t = dspark__checkpoint_find(file, name);
        if (!t || t->dtype != DSPARK_U8 || t->rank != 2 || t->shape[1] != p->entry_bytes ||
            (l && t->shape[0] != *length))
            return dspark__fail(err, DSPARK_EFORMAT, path, "%s: expected U8 [length, %zu], all layers of one length",
                                name, p->entry_bytes);
        tensors[l] = t;
        *length = t->shape[0];
    }
    if (*length > p->info.max_length)
        return dspark__fail(err, DSPARK_ENOSPACE, path, "holds %llu positions, and a session of this pool has "
                                                        "room for %llu",
                            (unsigned long long)*length, (unsigned long long)p->info.max_length);
    return DSPARK_OK;
}

/* Copy a layer's entries to their slots; each must decode to finite numbers. */
static dspark_status take_layer(dspark_session *s, const dspark__cache_map *map, const dspark__kern *kern,
                                uint32_t layer, const dspark_tensor *t, uint16_t *entry, dspark_error *err)
{
    const dspark_pool *p = s->pool;
    const size_t width = (size_t)map->latent + map->rope;
    for (uint64_t i = 0; i < t->shape[0]; i++) {
        const unsigned char *from = (const unsigned char *)t->data + i * p->entry_bytes;
        dspark__cache_decode(map, kern, layer, from, entry);
        if (!kern->finite_bf16(entry, width))
            return dspark__fail(err, DSPARK_ENONFINITE, t->name, "the entry of position %llu is not finite",
                                (unsigned long long)i);
        memcpy((unsigned char *)p->layers[layer] +
                   (size_t)dspark__session_slot(s, i) * p->entry_bytes,
               from, p->entry_bytes);
    }
    return DSPARK_OK;
}

static dspark_status take_entries(dspark_session *s, const dspark_checkpoint *file,
                                  const dspark_tensor *const *tensors, uint64_t length, dspark_error *err)
{
    const dspark_config *c = &s->pool->model->config;
    const size_t bytes = ((size_t)c->kv_lora_rank + c->qk_rope_head_dim) * 2;
    dspark__cache_map map;
    dspark__kern kern;
    uint16_t *entry = NULL;
    dspark_status st = dspark__session_reserve(s, length, err);
    if (st == DSPARK_OK) st = dspark__cache_map_init(&map, &s->pool->view, c, err);
    if (st == DSPARK_OK) st = dspark__kern_select(&kern, DSPARK_ISA_AUTO, err);
    if (st != DSPARK_OK) return st;
    entry = dspark__alloc(&s->pool->allocator, bytes, 64);
    if (!entry) return dspark__fail_nomem(err, "an entry", bytes);
    for (uint32_t l = 0; st == DSPARK_OK && l < c->n_layers; l++) {
        st = dspark__checkpoint_verify(file, tensors[l], err);
        if (st == DSPARK_OK) st = take_layer(s, &map, &kern, l, tensors[l], entry, err);
    }
    dspark__free(&s->pool->allocator, entry, bytes);
    if (st == DSPARK_OK) s->length = length;
    return st;
}

dspark_status dspark__session_load(dspark_session **out, dspark_pool *pool, const char *path,
                                   dspark_error *err)
{
    const dspark_tensor *tensors[DSPARK_MAX_LAYERS];
    dspark_checkpoint *file = NULL;
    dspark_session *s = NULL;
    uint64_t length = 0;
    *out = NULL;
    dspark_status st = dspark__checkpoint_open(&file, path, err);
    if (st != DSPARK_OK) return st;
    st = check_metadata(file, pool, path, err);
    if (st == DSPARK_OK) st = find_layers(file, pool, tensors, &length, path, err);
    if (st == DSPARK_OK) st = dspark__pool_open_session(&s, pool, err);
    if (st == DSPARK_OK) st = take_entries(s, file, tensors, length, err);
    dspark__checkpoint_close(file);
    if (st != DSPARK_OK) {
        if (s) dspark__pool_close_session(s);
        return st;
    }
    *out = s;
    return DSPARK_OK;
}
