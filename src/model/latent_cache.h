/* The latent cache: where an entry lies, how it is converted, and the owned variant. No attention
 * knowledge; never writes outside an entry. */
#ifndef DSPARK_MODEL_LATENT_CACHE_H
#define DSPARK_MODEL_LATENT_CACHE_H

#include "kern/kern.h"

/* A view that has been checked: every slot below n_slots addresses memory inside the host's layers. */
typedef struct dspark__cache_map {
    void *const *layers;
    const float *scales;      /* NULL = 1.0 */
    uint32_t n_layers;
    uint32_t block_size;
    int64_t n_slots;
    size_t block_stride;
    size_t entry_stride;
    size_t entry_bytes;
    uint32_t latent, rope;    /* widths in elements */
    dspark_cache_dtype dtype;
    dspark_tile_scale tile_scale;
} dspark__cache_map;

/* Check a view against the model's widths. DSPARK_EINVAL (strides that overlap, two layers at one
 * address, a scale that is not positive and finite, unknown dtype), DSPARK_EUNSUPPORTED (fp8_ds_mla
 * with other widths than 512 + 64; the text lists what is supported), DSPARK_ERANGE (sizes that
 * overflow the address space). */
dspark_status dspark__cache_map_init(dspark__cache_map *map, const dspark_cache_view *view,
                                     const dspark_config *config, dspark_error *err);

/* Byte offset of a slot in its layer; 64-bit throughout. 0 <= slot < n_slots. */
static inline size_t dspark__cache_offset(const dspark__cache_map *map, int64_t slot)
{
    size_t s = (size_t)slot;
    return s / map->block_size * map->block_stride + s % map->block_size * map->entry_stride;
}

/* Convert and store one entry (latent | rope key, finite). */
void dspark__cache_write(const dspark__cache_map *map, const dspark__kern *kern, uint32_t layer,
                         int64_t slot, const uint16_t *entry);

/* An entry as the cache stores it (entry_bytes at `to`, any alignment), and back: fp8 as bf16(code *
 * scale), one fp32 product and one more rounding. */
void dspark__cache_encode(const dspark__cache_map *map, const dspark__kern *kern, uint32_t layer,
                          unsigned char *to, const uint16_t *entry);
void dspark__cache_decode(const dspark__cache_map *map, const dspark__kern *kern, uint32_t layer,
                          const unsigned char *from, uint16_t *entry);

size_t dspark__cache_entry_bytes(dspark_cache_dtype dtype, uint32_t kv_lora_rank,
                                 uint32_t qk_rope_head_dim);
uint64_t dspark__cache_bytes(const dspark_config *config, dspark_cache_dtype dtype,
                             uint32_t block_size, uint64_t n_blocks);
const char *dspark__cache_dtype_name(dspark_cache_dtype dtype);

dspark_status dspark__cache_create(dspark_cache **out, const dspark_config *config,
                                   dspark_cache_dtype dtype, uint32_t block_size,
                                   uint64_t n_blocks, const dspark_allocator *allocator,
                                   dspark_error *err);
void dspark__cache_free(dspark_cache *cache);
const dspark_cache_view *dspark__cache_view(const dspark_cache *cache);

dspark_status dspark__slots_from_blocks(const int32_t *block_table, size_t n_table,
                                        uint32_t block_size, int32_t null_block,
                                        const int64_t *positions, size_t n, int64_t *slots,
                                        dspark_error *err);

#endif
