/* vLLM's merge of quantised shards, reproduced on packed shards so that a run can be compared with
 * vLLM's. It is wrong on purpose: one scale stands for all shards. Off unless the host asks for it. */
#include <string.h>

#include "base/numfmt.h"
#include "model/merged_linear.h"
#include "quant/codes.h"

/* One number for a whole shard: what every row's scale is. */
static float shard_scale(const dspark__shard *shard)
{
    return shard->row_scales[0];
}

static void set_shard_scale(dspark__shard *shard, float scale)
{
    for (size_t i = 0; i < (size_t)shard->n_panels * DSPARK__PANEL; i++) shard->row_scales[i] = scale;
}

static int all_of(const dspark__merged_linear *ml, const char *scheme)
{
    for (uint32_t s = 0; s < ml->n_shards; s++)
        if (!ml->shards[s].scheme || strcmp(ml->shards[s].scheme->name, scheme) != 0) return 0;
    return 1;
}

/* E4M3 is what vLLM quantises to; codes of another kind would not be read as what they became. */
static int all_e4m3(const dspark__merged_linear *ml)
{
    uint16_t e4m3[256];
    dspark__codes_fp8(e4m3, DSPARK_F8_E4M3);
    for (uint32_t s = 0; s < ml->n_shards; s++)
        if (memcmp(ml->shards[s].packing.format.table, e4m3, sizeof e4m3) != 0) return 0;
    return 1;
}

/* fp32 rounded to f16 and back: the dtype in which vLLM dequantises before it quantises again. */
static float through_f16(float x)
{
    uint32_t u = dspark__f32_bits(x), sign = u & 0x80000000u, a = u & 0x7fffffffu;
    if (a >= 0x7f800000u) return x;
    if (a >= 0x477ff000u) return dspark__f32_from_bits(sign | 0x7f800000u); /* 65520 and above */
    if (a >= 0x38800000u) {
        a = (a + 0xfffu + ((a >> 13) & 1u)) & ~0x1fffu;
        return dspark__f32_from_bits(sign | a);
    }
    /* Subnormal in f16: adding 0.5 leaves the unit 2^-24 as the last bit of the sum. */
    float r = (dspark__f32_from_bits(a) + 0.5f) - 0.5f;
    return dspark__f32_from_bits(sign | dspark__f32_bits(r));
}

/* Per-tensor E4M3: each shard's codes are dequantised with its own scale and quantised with the largest. */
static void requantise_fp8(dspark__merged_linear *ml, float largest)
{
    for (uint32_t s = 0; s < ml->n_shards; s++) {
        dspark__shard *shard = &ml->shards[s];
        float own = shard_scale(shard);
        uint8_t recoded[256];
        for (unsigned c = 0; c < 256; c++) {
            float w = through_f16(dspark__bf16_to_f32(shard->packing.format.table[c]) * own);
            recoded[c] = dspark__f32_to_e4m3(w / largest);
        }
        for (size_t i = 0; i < shard->n_panels * shard->code_stride; i++)
            shard->codes[i] = recoded[shard->codes[i]];
        set_shard_scale(shard, largest);
    }
}

const char *dspark__merged_linear_vllm_compat(dspark__merged_linear *ml)
{
    int ct = all_of(ml, "nvfp4_ct"), modelopt = all_of(ml, "nvfp4_modelopt");
    if (ml->n_shards < 2 || !(ct || modelopt || all_of(ml, "fp8_tensor"))) return "exact";
    float largest = shard_scale(&ml->shards[0]), smallest = largest;
    for (uint32_t s = 1; s < ml->n_shards; s++) {
        float scale = shard_scale(&ml->shards[s]);
        if (scale > largest) largest = scale;
        if (scale < smallest) smallest = scale;
    }
    if (largest == smallest) return "exact";
    if (!ct && !modelopt) {
        if (!all_e4m3(ml)) return "exact";
        requantise_fp8(ml, largest);
        return "requantised to the largest scale";
    }
    /* The largest stored number wins; compressed-tensors stores divisors, so that is the smallest
     * factor. Block scales are not adjusted. */
    for (uint32_t s = 0; s < ml->n_shards; s++)
        set_shard_scale(&ml->shards[s], ct ? smallest : largest);
    return "one global scale";
}
