/* The value generator of synthetic checkpoints and dumps: which number stands where.
 *
 * Counter-based: value i of a tensor depends on (seed, name, i) alone, so a tensor can be made from
 * any index on, in any order, and twice the same. Everything is integer arithmetic up to the last
 * step, and that step is exact in fp32 before its one rounding to bf16, so any language gives the
 * same bits (tools/oracle has a second implementation). Opens no file, allocates nothing.
 *
 *   mix(z)   z ^= z >> 30; z *= 0xbf58476d1ce4e5b9; z ^= z >> 27; z *= 0x94d049bb133111eb;
 *            z ^= z >> 31                                       (splitmix64's finaliser)
 *   fnv(s)   h = 0xcbf29ce484222325; for each byte: h ^= byte, h *= 0x100000001b3
 *   G        0x9e3779b97f4a7c15
 *   key      mix(fnv(name) ^ mix(seed + G))
 *   word(b)  mix(key + (b + 1) * G)
 *   lane(i)  bits 16*(i % 4) .. 16*(i % 4) + 15 of word(i / 4), as a signed 16-bit integer
 *   value(i) bf16(float(lane(i)) * scale + offset), rounded to nearest even
 *
 * All modulo 2^64. The scale and offset of a tensor follow from its name and the length f of its
 * last axis; with k = floor(log2(f)) they make a linear's outputs about as large as its inputs:
 *
 *   ...norm.weight, fc_norm.N.weight            scale 2^-18, offset 1: from 0.875 to 1.125
 *   ...bias                                     scale 2^-16: from -0.5 to 0.5
 *   embed_tokens.weight, markov_head.markov_w1.weight, hidden_states: scale 1.75 * 2^-15
 *   everything else                             scale 1.75 * 2^(-15 - k/2) for an even k,
 *                                               1.25 * 2^(-15 - (k-1)/2) for an odd one
 *
 * Token ids are drawn from the tensor name "token_ids", one word each: (word(i) >> 32) * vocab >> 32.
 */
#ifndef DSPARK_CKPT_SYNTH_VALUES_H
#define DSPARK_CKPT_SYNTH_VALUES_H

#include <stddef.h>
#include <stdint.h>

typedef struct dspark__synth_stream {
    uint64_t key;
    float scale;
    float offset;
} dspark__synth_stream;

/* The stream of tensor `name`, whose last axis has `last_axis` elements. */
void dspark__synth_stream_init(dspark__synth_stream *s, const char *name, uint64_t last_axis,
                               uint64_t seed);

/* Values first .. first + n - 1 as bf16. */
void dspark__synth_fill(const dspark__synth_stream *s, uint64_t first, size_t n, uint16_t *out);

/* Token i of a stream made for "token_ids": 0 .. vocab - 1 (0 when vocab is 0). */
uint32_t dspark__synth_token(const dspark__synth_stream *s, uint64_t i, uint32_t vocab);

#endif
