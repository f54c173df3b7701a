/* Philox4x32-10 and the one way in which numbers are drawn from it. */
#include "spec/rng.h"

#define ROUNDS 10
#define MULTIPLY_0 0xd2511f53u
#define MULTIPLY_1 0xcd9e8d57u
#define WEYL_0 0x9e3779b9u
#define WEYL_1 0xbb67ae85u
/* Third word of the counter that makes a sequence's key: no purpose has this number. */
#define KEY_SCHEDULE 0x6b657973u

void dspark__philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t a = (uint64_t)MULTIPLY_0 * c0, b = (uint64_t)MULTIPLY_1 * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        c0 = n0;
        c2 = n2;
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

double dspark__uniform(const dspark_noise_key *key)
{
    const uint32_t seed[2] = {(uint32_t)key->seed, (uint32_t)(key->seed >> 32)};
    const uint32_t name[4] = {(uint32_t)key->sequence, (uint32_t)(key->sequence >> 32), KEY_SCHEDULE,
                              (uint32_t)(key->block >> 32)};
    const uint32_t place[4] = {(uint32_t)key->position, (uint32_t)(key->position >> 32),
                               (uint32_t)key->purpose, (uint32_t)key->block};
    uint32_t own[4], bits[4];
    dspark__philox(name, seed, own);
    dspark__philox(place, own, bits);
    /* 53 bits: exact in a double, never 1. */
    return ((double)(bits[0] >> 5) * 67108864.0 + (double)(bits[1] >> 6)) * 0x1p-53;
}
