/* See synth_values.h, which defines every bit that this file makes. */
#include "ckpt/synth_values.h"

#include <string.h>

#include "base/numfmt.h"

#define GOLDEN 0x9e3779b97f4a7c15u
#define GROUP 1024u /* values made at a time: 2 KiB of words, 2 KiB of lanes */

static inline uint64_t mix64(uint64_t z)
{
    z ^= z >> 30;
    z *= 0xbf58476d1ce4e5b9u;
    z ^= z >> 27;
    z *= 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline uint64_t stream_word(uint64_t key, uint64_t block)
{
    return mix64(key + (block + 1) * GOLDEN);
}

static uint64_t hash_name(const char *name)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *name; name++) {
        h ^= (unsigned char)*name;
        h *= 0x100000001b3u;
    }
    return h;
}

static int ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && strcmp(s + n - m, tail) == 0;
}

/* 2^e for the small exponents used here, without libm. */
static float power_of_two(int e)
{
    return dspark__f32_from_bits((uint32_t)(127 + e) << 23);
}

static float linear_scale(uint64_t fan_in)
{
    int k = 0;
    while (fan_in > 1) {
        fan_in >>= 1;
        k++;
    }
    return k % 2 == 0 ? 1.75f * power_of_two(-15 - k / 2) : 1.25f * power_of_two(-15 - (k - 1) / 2);
}

void dspark__synth_stream_init(dspark__synth_stream *s, const char *name, uint64_t last_axis,
                               uint64_t seed)
{
    s->key = mix64(hash_name(name) ^ mix64(seed + GOLDEN));
    s->offset = 0.0f;
    if (ends_with(name, "norm.weight") || strncmp(name, "fc_norm.", 8) == 0) {
        s->scale = power_of_two(-18);
        s->offset = 1.0f;
    } else if (ends_with(name, "bias")) {
        s->scale = power_of_two(-16);
    } else if (strcmp(name, "embed_tokens.weight") == 0 || strcmp(name, "hidden_states") == 0 ||
               strcmp(name, "markov_head.markov_w1.weight") == 0) {
        s->scale = linear_scale(1);
    } else {
        s->scale = linear_scale(last_axis);
    }
}

/* float(lane) * scale and the addition of 1 are exact: at most 19 significant bits. So adding an
 * offset of 0 changes nothing either (a lane of 0 gives +0). */
static inline uint16_t lane_value(int16_t lane, float scale, float offset)
{
    uint32_t u = dspark__f32_bits((float)lane * scale + offset);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline int16_t word_lane(uint64_t word, unsigned i)
{
    return (int16_t)(uint16_t)(word >> (16 * i));
}

void dspark__synth_fill(const dspark__synth_stream *s, uint64_t first, size_t n, uint16_t *out)
{
    int16_t lanes[GROUP];
    const float scale = s->scale, offset = s->offset;
    const uint64_t key = s->key;
    uint64_t block;
    size_t i = 0;

    for (; i < n && (first + i) % 4 != 0; i++)
        out[i] = lane_value(word_lane(stream_word(key, (first + i) / 4), (first + i) % 4), scale,
                            offset);
    block = (first + i) / 4;
    for (; n - i >= GROUP; i += GROUP, block += GROUP / 4) {
        /* Two plain loops instead of one: each is a shape that compilers vectorise. */
        for (size_t b = 0; b < GROUP / 4; b++) {
            uint64_t word = stream_word(key, block + b);
            lanes[4 * b] = word_lane(word, 0);
            lanes[4 * b + 1] = word_lane(word, 1);
            lanes[4 * b + 2] = word_lane(word, 2);
            lanes[4 * b + 3] = word_lane(word, 3);
        }
        for (size_t j = 0; j < GROUP; j++) out[i + j] = lane_value(lanes[j], scale, offset);
    }
    for (; i < n; i++)
        out[i] = lane_value(word_lane(stream_word(key, (first + i) / 4), (first + i) % 4), scale,
                            offset);
}

uint32_t dspark__synth_token(const dspark__synth_stream *s, uint64_t i, uint32_t vocab)
{
    return (uint32_t)(((stream_word(s->key, i) >> 32) * vocab) >> 32);
}
