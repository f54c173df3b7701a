/* The pool: plan, one allocation, free list and reference counts. */
#include "model/block_pool.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/status.h"

#define DEFAULT_BLOCK 64u

/* Where everything lies in the one allocation. */
typedef struct places {
    uint64_t entries, layers, scales, free_list, references, sessions, tables, total;
    uint64_t table_length; /* blocks of one session's table */
    uint64_t layer_bytes;
} places;

static int add_place(uint64_t *total, uint64_t *at, uint64_t count, uint64_t each)
{
    uint64_t bytes;
    *at = *total;
    return dspark__mul_u64(count, each, &bytes) && dspark__align_u64(bytes, 64, &bytes) &&
           dspark__add_u64(*total, bytes, total);
}

static int measure(places *z, const dspark_config *c, const dspark_pool_opts *o, const dspark_pool_info *i,
                   uint64_t entry_bytes)
{
    memset(z, 0, sizeof *z);
    z->table_length = dspark__ceil_div_u64(i->max_length, i->block_size);
    if (!dspark__mul_u64(entry_bytes, i->block_size, &z->layer_bytes) ||
        !dspark__mul_u64(z->layer_bytes, i->n_blocks, &z->layer_bytes))
        return 0;
    return add_place(&z->total, &z->entries, c->n_layers, z->layer_bytes) &&
           add_place(&z->total, &z->layers, c->n_layers, sizeof(void *)) &&
           add_place(&z->total, &z->scales, o->scales ? c->n_layers : 0, sizeof(float)) &&
           add_place(&z->total, &z->free_list, i->n_blocks, sizeof(int32_t)) &&
           add_place(&z->total, &z->references, i->n_blocks, sizeof(uint32_t)) &&
           add_place(&z->total, &z->sessions, i->max_sessions, sizeof(struct dspark_session)) &&
           add_place(&z->total, &z->tables, i->max_sessions, z->table_length * sizeof(int32_t)) &&
           z->total <= PTRDIFF_MAX;
}

static dspark_status plan(const dspark_config *c, const dspark_pool_opts *o, dspark_pool_info *i,
                          places *z, dspark_error *err)
{
    const uint64_t entry = dspark__cache_entry_bytes(o->dtype, c->kv_lora_rank, c->qk_rope_head_dim);
    memset(i, 0, sizeof *i);
    if (entry == 0)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, "dtype",
                            "%s does not fit a latent of %u and a rope key of %u",
                            dspark__cache_dtype_name(o->dtype), c->kv_lora_rank, c->qk_rope_head_dim);
    i->block_size = o->block_size ? o->block_size : DEFAULT_BLOCK;
    i->max_sessions = o->max_sessions ? o->max_sessions : 1;
    i->max_length = o->max_length ? o->max_length : c->max_positions;
    if (i->max_length > c->max_positions)
        return dspark__fail(err, DSPARK_ERANGE, "max_length", "%llu positions, the model has %llu",
                            (unsigned long long)i->max_length, (unsigned long long)c->max_positions);
    i->n_blocks = o->n_blocks;
    if (i->n_blocks == 0)
        i->n_blocks = dspark__ceil_div_u64(i->max_length, i->block_size) * i->max_sessions;
    else if (!o->max_length && i->max_length / i->block_size >= i->n_blocks)
        i->max_length = i->n_blocks * i->block_size;
    if (i->max_length > c->max_positions) i->max_length = c->max_positions;
    if (i->n_blocks > INT32_MAX)
        return dspark__fail(err, DSPARK_ERANGE, "n_blocks", "%llu blocks, at most %d are numbered",
                            (unsigned long long)i->n_blocks, INT32_MAX);
    if (!measure(z, c, o, i, entry))
        return dspark__fail(err, DSPARK_ERANGE, "pool",
                            "%llu blocks of %u entries overflow the address space",
                            (unsigned long long)i->n_blocks, i->block_size);
    i->free_blocks = i->n_blocks;
    i->bytes = z->total + sizeof(struct dspark_pool);
    i->bytes_per_position = entry * c->n_layers;
    return DSPARK_OK;
}

dspark_status dspark__plan_pool(const dspark_config *c, const dspark_pool_opts *opts,
                                dspark_pool_info *info, dspark_error *err)
{
    places z;
    return plan(c, opts, info, &z, err);
}

static void cut_memory(dspark_pool *p, const places *z, const dspark_pool_opts *o)
{
    const uint32_t n_layers = p->model->config.n_layers;
    p->layers = (void **)(void *)(p->memory + z->layers);
    for (uint32_t l = 0; l < n_layers; l++)
        p->layers[l] = p->memory + z->entries + l * z->layer_bytes;
    if (o->scales) {
        p->scales = (float *)(void *)(p->memory + z->scales);
        memcpy(p->scales, o->scales, n_layers * sizeof(float));
    }
    p->free_list = (int32_t *)(void *)(p->memory + z->free_list);
    p->references = (uint32_t *)(void *)(p->memory + z->references);
    p->sessions = (struct dspark_session *)(void *)(p->memory + z->sessions);
    /* The lowest blocks are at the end of the list: they are taken first. */
    for (uint64_t i = 0; i < p->info.n_blocks; i++)
        p->free_list[i] = (int32_t)(p->info.n_blocks - 1 - i);
    memset(p->references, 0, p->info.n_blocks * sizeof *p->references);
    p->n_free = p->info.n_blocks;
    for (uint32_t s = 0; s < p->info.max_sessions; s++) {
        memset(&p->sessions[s], 0, sizeof p->sessions[s]);
        p->sessions[s].pool = p;
        p->sessions[s].table =
            (int32_t *)(void *)(p->memory + z->tables + s * z->table_length * sizeof(int32_t));
    }
}

dspark_status dspark__pool_create(dspark_pool **out, const dspark_model *model,
                                  const dspark_pool_opts *o, dspark_error *err)
{
    dspark_allocator a = dspark__allocator_or_default(o->allocator);
    dspark_pool_info info;
    dspark__cache_map map;
    places z;
    dspark_status st = plan(&model->config, o, &info, &z, err);
    *out = NULL;
    if (st != DSPARK_OK) return st;
    dspark_pool *p = dspark__alloc(&a, sizeof *p, 64);
    if (!p) return dspark__fail_nomem(err, "pool", sizeof *p);
    memset(p, 0, sizeof *p);
    p->allocator = a;
    p->model = model;
    p->info = info;
    p->entry_bytes = (size_t)(info.bytes_per_position / model->config.n_layers);
    p->memory = dspark__alloc(&a, (size_t)z.total, 64);
    if (!p->memory) {
        st = dspark__fail_nomem(err, "pool", z.total);
        goto fail;
    }
    p->memory_bytes = (size_t)z.total;
    cut_memory(p, &z, o);
    p->view = (dspark_cache_view){.struct_size = sizeof p->view, .n_layers = model->config.n_layers,
                                  .layers = p->layers, .n_blocks = info.n_blocks,
                                  .block_size = info.block_size, .dtype = o->dtype,
                                  .tile_scale = o->tile_scale, .scales = p->scales};
    if ((st = dspark__cache_map_init(&map, &p->view, &model->config, err)) != DSPARK_OK) goto fail;
    int error_number = pthread_mutex_init(&p->mutex, NULL);
    if (error_number != 0) {
        st = dspark__fail_errno(err, "pool", "its mutex", error_number);
        goto fail;
    }
    p->has_mutex = 1;
    *out = p;
    return DSPARK_OK;
fail:
    dspark__pool_free(p);
    return st;
}

void dspark__pool_free(dspark_pool *p)
{
    if (!p) return;
    dspark_allocator a = p->allocator;
    if (p->has_mutex) pthread_mutex_destroy(&p->mutex);
    if (p->memory) dspark__free(&a, p->memory, p->memory_bytes);
    dspark__free(&a, p, sizeof *p);
}

dspark_pool_info dspark__pool_get_info(dspark_pool *p)
{
    dspark_pool_info info = p->info;
    pthread_mutex_lock(&p->mutex);
    info.free_blocks = p->n_free;
    for (uint32_t s = 0; s < info.max_sessions; s++) info.open_sessions += p->sessions[s].open != 0;
    pthread_mutex_unlock(&p->mutex);
    return info;
}

/* ---- blocks ---- */

dspark_status dspark__pool_take(dspark_pool *p, int32_t *ids, uint64_t n, dspark_error *err)
{
    pthread_mutex_lock(&p->mutex);
    uint64_t n_free = p->n_free;
    if (n <= n_free) {
        for (uint64_t i = 0; i < n; i++) {
            ids[i] = p->free_list[--p->n_free];
            p->references[ids[i]] = 1;
        }
    }
    pthread_mutex_unlock(&p->mutex);
    if (n <= n_free) return DSPARK_OK;
    return dspark__fail(err, DSPARK_ENOSPACE, "pool", "%llu blocks are needed, %llu of %llu are free",
                        (unsigned long long)n, (unsigned long long)n_free,
                        (unsigned long long)p->info.n_blocks);
}

void dspark__pool_hold(dspark_pool *p, const int32_t *ids, uint64_t n)
{
    pthread_mutex_lock(&p->mutex);
    for (uint64_t i = 0; i < n; i++) p->references[ids[i]]++;
    pthread_mutex_unlock(&p->mutex);
}

void dspark__pool_release(dspark_pool *p, const int32_t *ids, uint64_t n)
{
    pthread_mutex_lock(&p->mutex);
    for (uint64_t i = n; i-- > 0;)
        if (--p->references[ids[i]] == 0) p->free_list[p->n_free++] = ids[i];
    pthread_mutex_unlock(&p->mutex);
}

int dspark__pool_shared(dspark_pool *p, int32_t id)
{
    pthread_mutex_lock(&p->mutex);
    int shared = p->references[id] > 1;
    pthread_mutex_unlock(&p->mutex);
    return shared;
}

void dspark__pool_copy(dspark_pool *p, int32_t to, int32_t from, uint32_t n)
{
    const size_t block = p->entry_bytes * p->info.block_size;
    for (uint32_t l = 0; l < p->view.n_layers; l++) {
        unsigned char *layer = p->layers[l];
        memcpy(layer + (size_t)to * block, layer + (size_t)from * block, p->entry_bytes * n);
    }
}

/* ---- sessions ---- */

dspark_status dspark__pool_open_session(dspark_session **out, dspark_pool *p, dspark_error *err)
{
    *out = NULL;
    pthread_mutex_lock(&p->mutex);
    for (uint32_t i = 0; i < p->info.max_sessions && !*out; i++) {
        struct dspark_session *s = &p->sessions[i];
        if (s->open) continue;
        int32_t *table = s->table;
        memset(s, 0, sizeof *s);
        s->pool = p;
        s->table = table;
        s->open = 1;
        *out = s;
    }
    pthread_mutex_unlock(&p->mutex);
    if (*out) return DSPARK_OK;
    return dspark__fail(err, DSPARK_ENOSPACE, "pool", "all %u sessions are open", p->info.max_sessions);
}

void dspark__pool_close_session(dspark_session *s)
{
    dspark__pool_release(s->pool, s->table, s->n_blocks);
    pthread_mutex_lock(&s->pool->mutex);
    s->open = 0;
    s->n_blocks = 0;
    s->length = 0;
    pthread_mutex_unlock(&s->pool->mutex);
}
