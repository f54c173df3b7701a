/* Cache layouts: addressing, conversion and the owned variant. */
#include "model/latent_cache.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/numfmt.h"
#include "base/status.h"

/* fp8_ds_mla: 4 tiles of 128 e4m3 codes, their scales, then the rope key as bf16. */
#define DS_MLA_LATENT 512u
#define DS_MLA_ROPE 64u
#define DS_MLA_TILE 128u
#define DS_MLA_BYTES (DS_MLA_LATENT + DS_MLA_LATENT / DS_MLA_TILE * 4 + DS_MLA_ROPE * 2)

size_t dspark__cache_entry_bytes(dspark_cache_dtype dtype, uint32_t kv_lora_rank,
                                 uint32_t qk_rope_head_dim)
{
    size_t width = (size_t)kv_lora_rank + qk_rope_head_dim;
    switch (dtype) {
    case DSPARK_CACHE_BF16: return width * 2;
    case DSPARK_CACHE_FP8_E4M3:
    case DSPARK_CACHE_FP8_E5M2: return width;
    case DSPARK_CACHE_FP8_DS_MLA:
        return kv_lora_rank == DS_MLA_LATENT && qk_rope_head_dim == DS_MLA_ROPE ? DS_MLA_BYTES : 0;
    }
    return 0;
}

const char *dspark__cache_dtype_name(dspark_cache_dtype dtype)
{
    switch (dtype) {
    case DSPARK_CACHE_BF16: return "bf16";
    case DSPARK_CACHE_FP8_E4M3: return "fp8_e4m3";
    case DSPARK_CACHE_FP8_E5M2: return "fp8_e5m2";
    case DSPARK_CACHE_FP8_DS_MLA: return "fp8_ds_mla";
    }
    return "?";
}

static dspark_status check_dtype(dspark_cache_dtype dtype, const dspark_config *c, size_t *bytes,
                                 dspark_error *err)
{
    if (dtype < DSPARK_CACHE_BF16 || dtype > DSPARK_CACHE_FP8_DS_MLA)
        return dspark__fail(err, DSPARK_EINVAL, "cache dtype",
                            "%d; supported: bf16, fp8_e4m3, fp8_e5m2, fp8_ds_mla", (int)dtype);
    *bytes = dspark__cache_entry_bytes(dtype, c->kv_lora_rank, c->qk_rope_head_dim);
    if (*bytes == 0)
        return dspark__fail(err, DSPARK_EUNSUPPORTED, "cache dtype",
                            "fp8_ds_mla needs a latent of 512 and a rope key of 64, the model has "
                            "%u and %u; supported for it: bf16, fp8_e4m3, fp8_e5m2",
                            c->kv_lora_rank, c->qk_rope_head_dim);
    return DSPARK_OK;
}

dspark_status dspark__cache_map_init(dspark__cache_map *map, const dspark_cache_view *view,
                                     const dspark_config *c, dspark_error *err)
{
    dspark_status st;
    memset(map, 0, sizeof *map);
    if (!view->layers) return dspark__fail(err, DSPARK_EINVAL, "cache view", "layers is NULL");
    if (view->n_layers != c->n_layers)
        return dspark__fail(err, DSPARK_EINVAL, "cache view", "%u layers, the model has %u",
                            view->n_layers, c->n_layers);
    if (view->block_size == 0)
        return dspark__fail(err, DSPARK_EINVAL, "cache view", "block_size is 0");
    if ((st = check_dtype(view->dtype, c, &map->entry_bytes, err)) != DSPARK_OK) return st;
    if (view->tile_scale != DSPARK_TILE_SCALE_POW2 && view->tile_scale != DSPARK_TILE_SCALE_EXACT)
        return dspark__fail(err, DSPARK_EINVAL, "cache view", "tile_scale %d",
                            (int)view->tile_scale);

    uint64_t entry_stride = view->entry_stride ? view->entry_stride : map->entry_bytes;
    uint64_t in_block, block_stride, span, n_slots;
    if (entry_stride < map->entry_bytes)
        return dspark__fail(err, DSPARK_EINVAL, "cache view",
                            "entry_stride %llu is below the entry's %zu bytes",
                            (unsigned long long)entry_stride, map->entry_bytes);
    if (!dspark__mul_u64(view->block_size - 1, entry_stride, &in_block) ||
        !dspark__add_u64(in_block, map->entry_bytes, &in_block))
        return dspark__fail(err, DSPARK_ERANGE, "cache view", "a block overflows 64 bits");
    block_stride = view->block_stride;
    if (block_stride == 0 && !dspark__mul_u64(view->block_size, entry_stride, &block_stride))
        return dspark__fail(err, DSPARK_ERANGE, "cache view", "a block overflows 64 bits");
    if (block_stride < in_block)
        return dspark__fail(err, DSPARK_EINVAL, "cache view",
                            "block_stride %llu is below the %llu bytes that a block of %u entries "
                            "takes",
                            (unsigned long long)block_stride, (unsigned long long)in_block,
                            view->block_size);
    if (!dspark__mul_u64(view->n_blocks ? view->n_blocks - 1 : 0, block_stride, &span) ||
        !dspark__add_u64(span, in_block, &span) || span > PTRDIFF_MAX ||
        !dspark__mul_u64(view->n_blocks, view->block_size, &n_slots) || n_slots > INT64_MAX)
        return dspark__fail(err, DSPARK_ERANGE, "cache view",
                            "%llu blocks of %u entries overflow the address space",
                            (unsigned long long)view->n_blocks, view->block_size);
    for (uint32_t l = 0; l < view->n_layers; l++) {
        for (uint32_t m = 0; m < l; m++)
            if (view->layers[l] && view->layers[l] == view->layers[m])
                return dspark__fail(err, DSPARK_EINVAL, "cache view",
                                    "layers %u and %u share one base address", m, l);
        if (view->scales &&
            (view->dtype == DSPARK_CACHE_FP8_E4M3 || view->dtype == DSPARK_CACHE_FP8_E5M2) &&
            !(view->scales[l] > 0 && view->scales[l] <= FLT_MAX))
            return dspark__fail(err, DSPARK_EINVAL, "cache view",
                                "scale %g of layer %u is not positive and finite",
                                (double)view->scales[l], l);
    }
    map->layers = view->layers;
    map->scales = view->scales;
    map->n_layers = view->n_layers;
    map->block_size = view->block_size;
    map->n_slots = (int64_t)n_slots;
    map->block_stride = (size_t)block_stride;
    map->entry_stride = (size_t)entry_stride;
    map->latent = c->kv_lora_rank;
    map->rope = c->qk_rope_head_dim;
    map->dtype = view->dtype;
    map->tile_scale = view->tile_scale;
    return DSPARK_OK;
}

static float tile_scale(float amax, dspark_tile_scale how)
{
    float scale = amax / 448.0f;
    if (how == DSPARK_TILE_SCALE_EXACT) return scale > FLT_MIN ? scale : FLT_MIN;
    if (!(scale > 1e-4f)) scale = 1e-4f;
    uint32_t u = dspark__f32_bits(scale);
    if (u & 0x7fffffu) u = (u & 0x7f800000u) + 0x800000u; /* up to the next power of two */
    return dspark__f32_from_bits(u);
}

static void write_ds_mla(unsigned char *to, const dspark__kern *kern, const uint16_t *entry,
                         dspark_tile_scale how)
{
    for (uint32_t t = 0; t < DS_MLA_LATENT / DS_MLA_TILE; t++) {
        const uint16_t *x = entry + t * DS_MLA_TILE;
        float scale = tile_scale(kern->absmax_bf16(x, DS_MLA_TILE), how);
        kern->fp8_e4m3(to + t * DS_MLA_TILE, x, DS_MLA_TILE, scale);
        memcpy(to + DS_MLA_LATENT + t * sizeof scale, &scale, sizeof scale);
    }
    memcpy(to + DS_MLA_BYTES - DS_MLA_ROPE * 2, entry + DS_MLA_LATENT, DS_MLA_ROPE * 2);
}

static void read_ds_mla(uint16_t *entry, const dspark__kern *kern, const unsigned char *from)
{
    for (uint32_t t = 0; t < DS_MLA_LATENT / DS_MLA_TILE; t++) {
        float scale;
        memcpy(&scale, from + DS_MLA_LATENT + t * sizeof scale, sizeof scale);
        kern->e4m3_to_bf16(entry + t * DS_MLA_TILE, from + t * DS_MLA_TILE, DS_MLA_TILE, scale);
    }
    memcpy(entry + DS_MLA_LATENT, from + DS_MLA_BYTES - DS_MLA_ROPE * 2, DS_MLA_ROPE * 2);
}

void dspark__cache_encode(const dspark__cache_map *map, const dspark__kern *kern, uint32_t layer,
                          unsigned char *to, const uint16_t *entry)
{
    size_t width = (size_t)map->latent + map->rope;
    float scale = map->scales ? map->scales[layer] : 1.0f;
    switch (map->dtype) {
    case DSPARK_CACHE_BF16: memcpy(to, entry, width * 2); break;
    case DSPARK_CACHE_FP8_E4M3: kern->fp8_e4m3(to, entry, width, scale); break;
    case DSPARK_CACHE_FP8_E5M2: kern->fp8_e5m2(to, entry, width, scale); break;
    case DSPARK_CACHE_FP8_DS_MLA: write_ds_mla(to, kern, entry, map->tile_scale); break;
    }
}

void dspark__cache_decode(const dspark__cache_map *map, const dspark__kern *kern, uint32_t layer,
                          const unsigned char *from, uint16_t *entry)
{
    size_t width = (size_t)map->latent + map->rope;
    float scale = map->scales ? map->scales[layer] : 1.0f;
    switch (map->dtype) {
    case DSPARK_CACHE_BF16: memcpy(entry, from, width * 2); break;
    case DSPARK_CACHE_FP8_E4M3: kern->e4m3_to_bf16(entry, from, width, scale); break;
    case DSPARK_CACHE_FP8_E5M2: kern->e5m2_to_bf16(entry, from, width, scale); break;
    case DSPARK_CACHE_FP8_DS_MLA: read_ds_mla(entry, kern, from); break;
    }
}

void dspark__cache_write(const dspark__cache_map *map, const dspark__kern *kern, uint32_t layer,
                         int64_t slot, const uint16_t *entry)
{
    dspark__cache_encode(map, kern, layer,
                         (unsigned char *)map->layers[layer] + dspark__cache_offset(map, slot), entry);
}

struct dspark_cache {
    dspark_allocator allocator;
    dspark_cache_view view;
    void **layers;
    uint64_t bytes;
};

uint64_t dspark__cache_bytes(const dspark_config *c, dspark_cache_dtype dtype, uint32_t block_size,
                             uint64_t n_blocks)
{
    uint64_t bytes = dspark__cache_entry_bytes(dtype, c->kv_lora_rank, c->qk_rope_head_dim);
    if (!dspark__mul_u64(bytes, block_size, &bytes) || !dspark__mul_u64(bytes, n_blocks, &bytes) ||
        !dspark__mul_u64(bytes, c->n_layers, &bytes) || bytes > PTRDIFF_MAX)
        return 0;
    return bytes;
}

dspark_status dspark__cache_create(dspark_cache **out, const dspark_config *c,
                                   dspark_cache_dtype dtype, uint32_t block_size,
                                   uint64_t n_blocks, const dspark_allocator *allocator,
                                   dspark_error *err)
{
    dspark_status st;
    size_t entry_bytes;
    dspark_allocator a = dspark__allocator_or_default(allocator);
    dspark_cache *cache = NULL;
    *out = NULL;
    if ((st = check_dtype(dtype, c, &entry_bytes, err)) != DSPARK_OK) return st;
    if (block_size == 0 || n_blocks == 0)
        return dspark__fail(err, DSPARK_EINVAL, "cache", "%llu blocks of %u entries hold nothing",
                            (unsigned long long)n_blocks, block_size);
    uint64_t bytes = dspark__cache_bytes(c, dtype, block_size, n_blocks);
    if (bytes == 0)
        return dspark__fail(err, DSPARK_ERANGE, "cache",
                            "%llu blocks of %u entries overflow the address space",
                            (unsigned long long)n_blocks, block_size);
    st = DSPARK_ENOMEM;
    cache = dspark__alloc(&a, sizeof *cache, 64);
    if (!cache) goto fail;
    memset(cache, 0, sizeof *cache);
    cache->allocator = a;
    cache->view.n_layers = c->n_layers;
    cache->layers = dspark__alloc(&a, c->n_layers * sizeof *cache->layers, 64);
    if (!cache->layers) goto fail;
    cache->layers[0] = dspark__alloc(&a, bytes, 64);
    if (!cache->layers[0]) goto fail;
    cache->bytes = bytes;
    memset(cache->layers[0], 0, bytes);
    for (uint32_t l = 1; l < c->n_layers; l++)
        cache->layers[l] = (unsigned char *)cache->layers[0] + bytes / c->n_layers * l;
    cache->view.struct_size = sizeof cache->view;
    cache->view.layers = cache->layers;
    cache->view.n_blocks = n_blocks;
    cache->view.block_size = block_size;
    cache->view.entry_stride = entry_bytes;
    cache->view.block_stride = entry_bytes * block_size;
    cache->view.dtype = dtype;
    *out = cache;
    return DSPARK_OK;
fail:
    dspark__cache_free(cache);
    return dspark__fail_nomem(err, "cache", bytes);
}

void dspark__cache_free(dspark_cache *cache)
{
    if (!cache) return;
    dspark_allocator a = cache->allocator;
    if (cache->layers) {
        if (cache->bytes) dspark__free(&a, cache->layers[0], cache->bytes);
        dspark__free(&a, cache->layers, cache->view.n_layers * sizeof *cache->layers);
    }
    dspark__free(&a, cache, sizeof *cache);
}

const dspark_cache_view *dspark__cache_view(const dspark_cache *cache)
{
    return &cache->view;
}

dspark_status dspark__slots_from_blocks(const int32_t *block_table, size_t n_table,
                                        uint32_t block_size, int32_t null_block,
                                        const int64_t *positions, size_t n, int64_t *slots,
                                        dspark_error *err)
{
    for (size_t i = 0; i < n; i++) {
        if (positions[i] < 0 || (uint64_t)positions[i] / block_size >= n_table)
            return dspark__fail(err, DSPARK_ERANGE, "positions",
                                "row %zu: position %lld is outside a table of %zu blocks of %u", i,
                                (long long)positions[i], n_table, block_size);
    }
    for (size_t i = 0; i < n; i++) {
        int32_t block = block_table[(uint64_t)positions[i] / block_size];
        int skip = block < 0 || (null_block >= 0 && block == null_block);
        slots[i] = skip ? -1
                        : (int64_t)block * block_size +
                              (int64_t)((uint64_t)positions[i] % block_size);
    }
    return DSPARK_OK;
}
