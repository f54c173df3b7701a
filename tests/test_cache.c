/* The latent cache: addressing, conversion, checks of a host's view, slots of a block table. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/numfmt.h"
#include "model/latent_cache.h"

static dspark_config config_of(uint32_t layers, uint32_t latent, uint32_t rope)
{
    dspark_config c;
    memset(&c, 0, sizeof c);
    c.n_layers = layers;
    c.kv_lora_rank = latent;
    c.qk_rope_head_dim = rope;
    return c;
}

static dspark_cache_view view_of(void **layers, uint32_t n, dspark_cache_dtype dtype)
{
    dspark_cache_view v = {.struct_size = sizeof v, .n_layers = n, .layers = layers, .n_blocks = 4,
                           .block_size = 8, .dtype = dtype};
    return v;
}

static void entry_sizes(void **state)
{
    (void)state;
    assert_int_equal(dspark_cache_entry_bytes(DSPARK_CACHE_BF16, 512, 64), 1152);
    assert_int_equal(dspark_cache_entry_bytes(DSPARK_CACHE_FP8_E4M3, 512, 64), 576);
    assert_int_equal(dspark_cache_entry_bytes(DSPARK_CACHE_FP8_E5M2, 512, 64), 576);
    assert_int_equal(dspark_cache_entry_bytes(DSPARK_CACHE_FP8_DS_MLA, 512, 64), 656);
    assert_int_equal(dspark_cache_entry_bytes(DSPARK_CACHE_FP8_DS_MLA, 16, 8), 0);
    /* What K3 takes per token over five layers: 5,760 and 2,880 bytes; no hidden padding. */
    dspark_config c = config_of(5, 512, 64);
    assert_int_equal(dspark_cache_bytes(&c, DSPARK_CACHE_BF16, 1, 1), 5760);
    assert_int_equal(dspark_cache_bytes(&c, DSPARK_CACHE_FP8_E4M3, 1, 1), 2880);
    assert_int_equal(dspark_cache_bytes(&c, DSPARK_CACHE_BF16, 64, 16384), 5760u * 1048576ull);
    assert_int_equal(dspark_cache_bytes(&c, DSPARK_CACHE_BF16, 64, UINT64_MAX / 64), 0);
}

/* Offsets above 2^31 elements and 2^32 bytes: a 32-bit multiplication would wrap. */
static void offsets_are_64_bit(void **state)
{
    (void)state;
    dspark_config c = config_of(1, 512, 64);
    char memory;
    void *layers[1] = {&memory};
    dspark__cache_map map;
    dspark_cache_view v = view_of(layers, 1, DSPARK_CACHE_BF16);
    v.block_size = 64;
    v.n_blocks = 1u << 20;
    assert_int_equal(dspark__cache_map_init(&map, &v, &c, NULL), DSPARK_OK);
    assert_int_equal(map.n_slots, 67108864);
    assert_int_equal(dspark__cache_offset(&map, map.n_slots - 1), 67108863ull * 1152);
    v.entry_stride = 2000;
    v.block_stride = 200000;
    assert_int_equal(dspark__cache_map_init(&map, &v, &c, NULL), DSPARK_OK);
    assert_int_equal(dspark__cache_offset(&map, 64 * 1000003ll + 5), 1000003ull * 200000 + 5 * 2000);
}

static void bad_views_are_named(void **state)
{
    (void)state;
    dspark_config c = config_of(3, 16, 8);
    char memory[3];
    void *layers[3] = {memory, memory + 1, memory + 2};
    float scales[3] = {1, 1, 1};
    dspark__cache_map map;
    dspark_error err;
    const dspark_cache_view good = view_of(layers, 3, DSPARK_CACHE_BF16);
    dspark_cache_view v = good;
    assert_int_equal(dspark__cache_map_init(&map, &v, &c, &err), DSPARK_OK);
#define REFUSE(want, change)                                                                           \
    do {                                                                                           \
        v = good;                                                                                  \
        change;                                                                                    \
        assert_int_equal(dspark__cache_map_init(&map, &v, &c, &err), want);                        \
        assert_int_equal(err.code, want);                                                          \
        assert_true(strlen(err.message) > 0);                                                      \
    } while (0)
    REFUSE(DSPARK_EINVAL, v.layers = NULL);
    REFUSE(DSPARK_EINVAL, v.n_layers = 2);
    REFUSE(DSPARK_EINVAL, v.block_size = 0);
    REFUSE(DSPARK_EINVAL, v.entry_stride = 47);
    REFUSE(DSPARK_EINVAL, v.block_stride = 8 * 48 - 1);
    REFUSE(DSPARK_EINVAL, v.dtype = (dspark_cache_dtype)9);
    REFUSE(DSPARK_EINVAL, v.tile_scale = (dspark_tile_scale)7);
    REFUSE(DSPARK_ERANGE, v.n_blocks = UINT64_MAX);
    REFUSE(DSPARK_ERANGE, v.n_blocks = UINT64_MAX / 8; v.block_stride = 8 * 48);
    REFUSE(DSPARK_ERANGE, v.entry_stride = SIZE_MAX / 2);
    layers[2] = layers[0];
    REFUSE(DSPARK_EINVAL, (void)0);
    layers[2] = memory + 2;
    static const float bad_scales[] = {0, -1, NAN, INFINITY};
    for (int i = 0; i < 4; i++) {
        scales[1] = bad_scales[i];
        REFUSE(DSPARK_EINVAL, v.dtype = DSPARK_CACHE_FP8_E4M3; v.scales = scales);
        assert_non_null(strstr(err.message, "layer 1"));
        /* a bf16 cache does not look at scales */
        v = good;
        v.scales = scales;
        assert_int_equal(dspark__cache_map_init(&map, &v, &c, &err), DSPARK_OK);
    }
    /* A dtype that does not fit: the text lists those that do. */
    REFUSE(DSPARK_EUNSUPPORTED, v.dtype = DSPARK_CACHE_FP8_DS_MLA);
    assert_non_null(strstr(err.message, "fp8_e4m3"));
#undef REFUSE
}

static uint16_t random_bf16(uint64_t *s)
{
    *s ^= *s << 13; *s ^= *s >> 7; *s ^= *s << 17;
    uint16_t h = (uint16_t)*s;
    return (h & 0x7f80) == 0x7f80 ? (uint16_t)(h ^ 0x4000) : h; /* finite */
}

static dspark__kern kern_of(dspark_isa isa)
{
    dspark__kern k;
    assert_int_equal(dspark__kern_select(&k, isa, NULL), DSPARK_OK);
    return k;
}

/* Every dtype against the scalar formats, at odd addresses, with canaries around each entry. */
static void writes_are_exact_and_bounded(void **state)
{
    (void)state;
    dspark_config c = config_of(2, 512, 64);
    uint64_t seed = 0x9e3779b97f4a7c15u;
    static unsigned char block[2 * 2000 + 1];
    float scales[2] = {1, 0.37f};
    for (int isa = DSPARK_ISA_REF; isa <= DSPARK_ISA_AVX512BF16; isa++) {
        if (!dspark__isa_available((dspark_isa)isa)) continue;
        dspark__kern kern = kern_of((dspark_isa)isa);
        for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_DS_MLA; dtype++) {
            for (int how = DSPARK_TILE_SCALE_POW2; how <= DSPARK_TILE_SCALE_EXACT; how++) {
                void *layers[2] = {NULL, block + 1};
                dspark_cache_view v = view_of(layers, 2, (dspark_cache_dtype)dtype);
                dspark__cache_map map;
                uint16_t entry[576];
                v.n_blocks = 1;
                v.block_size = 2;
                v.entry_stride = 2000;
                v.tile_scale = (dspark_tile_scale)how;
                v.scales = scales;
                assert_int_equal(dspark__cache_map_init(&map, &v, &c, NULL), DSPARK_OK);
                for (int i = 0; i < 576; i++) entry[i] = random_bf16(&seed);
                memset(block, 0xa5, sizeof block);
                dspark__cache_write(&map, &kern, 1, 1, entry);
                const unsigned char *to = block + 1 + 2000;
                for (size_t i = 0; i < sizeof block; i++)
                    if (block + i < to || block + i >= to + map.entry_bytes)
                        assert_int_equal(block[i], 0xa5);
                if (dtype == DSPARK_CACHE_BF16) assert_memory_equal(to, entry, 1152);
                for (int i = 0; i < 576; i++) {
                    float x = dspark__bf16_to_f32(entry[i]);
                    if (dtype == DSPARK_CACHE_FP8_E4M3)
                        assert_int_equal(to[i], dspark__f32_to_e4m3(x / 0.37f));
                    if (dtype == DSPARK_CACHE_FP8_E5M2)
                        assert_int_equal(to[i], dspark__f32_to_e5m2(x / 0.37f));
                }
                if (dtype != DSPARK_CACHE_FP8_DS_MLA) continue;
                assert_memory_equal(to + 528, entry + 512, 128);
                for (int t = 0; t < 4; t++) {
                    float amax = 0, scale;
                    for (int i = 0; i < 128; i++)
                        amax = fmaxf(amax, fabsf(dspark__bf16_to_f32(entry[t * 128 + i])));
                    memcpy(&scale, to + 512 + 4 * t, 4);
                    if (how == DSPARK_TILE_SCALE_EXACT)
                        assert_true(scale == fmaxf(amax / 448.0f, FLT_MIN));
                    else
                        assert_true(scale == (float)exp2(ceil(log2(fmax(amax / 448.0f, 1e-4f)))));
                    for (int i = 0; i < 128; i++)
                        assert_int_equal(to[t * 128 + i],
                                         dspark__f32_to_e4m3(
                                             dspark__bf16_to_f32(entry[t * 128 + i]) / scale));
                }
            }
        }
    }
}

/* No scale, a scale of 1 and (for bf16) any scale give the same bytes. */
static void a_missing_scale_is_one(void **state)
{
    (void)state;
    dspark_config c = config_of(1, 16, 8);
    dspark__kern kern = kern_of(DSPARK_ISA_AUTO);
    uint16_t entry[24];
    for (int i = 0; i < 24; i++) entry[i] = dspark__f32_to_bf16(0.3f * (float)(i - 12));
    for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_E5M2; dtype++) {
        unsigned char bytes[3][48];
        float scale = dtype == DSPARK_CACHE_BF16 ? 0.06f : 1.0f, four = 4.0f;
        const float *scales[3] = {NULL, &scale, &four};
        memset(bytes, 0, sizeof bytes);
        for (int i = 0; i < 3; i++) {
            void *layers[1] = {bytes[i]};
            dspark_cache_view v = view_of(layers, 1, (dspark_cache_dtype)dtype);
            dspark__cache_map map;
            v.scales = scales[i];
            assert_int_equal(dspark__cache_map_init(&map, &v, &c, NULL), DSPARK_OK);
            dspark__cache_write(&map, &kern, 0, 0, entry);
        }
        assert_memory_equal(bytes[0], bytes[1], 48);
        if (dtype == DSPARK_CACHE_BF16) assert_memory_equal(bytes[0], bytes[2], 48);
        else assert_memory_not_equal(bytes[0], bytes[2], 48);
    }
}

static size_t counted;

static void *count_alloc(void *user, size_t bytes, size_t align)
{
    (void)user;
    counted += bytes;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void count_free(void *user, void *p, size_t bytes)
{
    (void)user;
    counted -= bytes;
    free(p);
}

/* Planned bytes are allocated bytes, for every dtype; the owned view passes its own check. */
static void owned_cache_takes_what_is_planned(void **state)
{
    (void)state;
    dspark_config c = config_of(5, 512, 64);
    dspark_allocator a = {NULL, count_alloc, count_free};
    for (int dtype = DSPARK_CACHE_BF16; dtype <= DSPARK_CACHE_FP8_DS_MLA; dtype++) {
        dspark_cache *cache = NULL;
        dspark__cache_map map;
        uint64_t plan = dspark__cache_bytes(&c, (dspark_cache_dtype)dtype, 16, 10);
        assert_int_equal(dspark__cache_create(&cache, &c, (dspark_cache_dtype)dtype, 16, 10, &a, NULL),
                         DSPARK_OK);
        assert_true(counted >= plan && counted < plan + 4096);
        assert_int_equal(dspark__cache_map_init(&map, dspark__cache_view(cache), &c, NULL), DSPARK_OK);
        assert_int_equal(map.n_slots, 160);
        assert_int_equal(map.entry_bytes * 160 * 5, plan);
        dspark__cache_free(cache);
        assert_int_equal(counted, 0);
    }
    dspark_cache *none;
    dspark_error err;
    assert_int_equal(dspark__cache_create(&none, &c, DSPARK_CACHE_BF16, 0, 10, NULL, &err), DSPARK_EINVAL);
    assert_int_equal(dspark__cache_create(&none, &c, DSPARK_CACHE_BF16, 64, 0, NULL, &err), DSPARK_EINVAL);
    assert_int_equal(dspark__cache_create(&none, &c, DSPARK_CACHE_BF16, 64, UINT64_MAX / 2, NULL, &err),
                     DSPARK_ERANGE);
    assert_null(none);
}

static void slots_of_a_block_table(void **state)
{
    (void)state;
    const int32_t table[4] = {7, 0, -1, 3};
    const int64_t positions[6] = {0, 15, 16, 33, 63, 48};
    int64_t slots[6];
    dspark_error err;
    assert_int_equal(dspark_slots_from_blocks(table, 4, 16, -1, positions, 6, slots, &err), DSPARK_OK);
    static const int64_t want[6] = {112, 127, 0, -1, 63, 48};
    for (int i = 0; i < 6; i++) assert_int_equal(slots[i], want[i]);
    assert_int_equal(dspark_slots_from_blocks(table, 4, 16, 0, positions, 6, slots, &err), DSPARK_OK);
    assert_int_equal(slots[2], -1); /* block 0 is the null block */
    static const int64_t outside[3] = {64, -1, INT64_MIN};
    for (int i = 0; i < 3; i++) {
        slots[0] = 99;
        assert_int_equal(dspark_slots_from_blocks(table, 4, 16, -1, &outside[i], 1, slots, &err),
                         DSPARK_ERANGE);
        assert_int_equal(slots[0], 99);
    }
    assert_int_equal(dspark_slots_from_blocks(table, 4, 0, -1, positions, 1, slots, &err), DSPARK_EINVAL);
    assert_int_equal(dspark_slots_from_blocks(NULL, 0, 16, -1, NULL, 0, NULL, &err), DSPARK_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(entry_sizes),
        cmocka_unit_test(offsets_are_64_bit),
        cmocka_unit_test(bad_views_are_named),
        cmocka_unit_test(writes_are_exact_and_bounded),
        cmocka_unit_test(a_missing_scale_is_one),
        cmocka_unit_test(owned_cache_takes_what_is_planned),
        cmocka_unit_test(slots_of_a_block_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
