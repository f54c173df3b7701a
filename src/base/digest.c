/* XXH3 digests. The only file that sees xxhash, which is compiled in whole: no run-time library. */
#include "base/digest.h"

#include <stdio.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

_Static_assert(sizeof(XXH3_state_t) <= DSPARK__DIGEST_STATE_BYTES, "opaque state is too small");
_Static_assert(sizeof XXH3_kSecret == DSPARK__DIGEST_SECRET_BYTES && XXH_STRIPE_LEN == 64 &&
                   XXH_SECRET_CONSUME_RATE == 8 && XXH3_MIDSIZE_MAX == DSPARK__DIGEST_LONG - 1 &&
                   DSPARK__DIGEST_SECRET_BYTES - 64 - XXH_SECRET_LASTACC_START == DSPARK__DIGEST_LAST,
               "digest.h tells kernels another hash");
_Static_assert(_Alignof(XXH3_state_t) <= _Alignof(dspark__digest), "opaque state is misaligned");

void dspark__digest_init(dspark__digest *d)
{
    XXH3_128bits_reset((XXH3_state_t *)(void *)d->state);
}

void dspark__digest_update(dspark__digest *d, const void *data, size_t n)
{
    if (n > 0) XXH3_128bits_update((XXH3_state_t *)(void *)d->state, data, n);
}

void dspark__digest_hex(const dspark__digest *d, char hex[33])
{
    XXH128_hash_t h = XXH3_128bits_digest((const XXH3_state_t *)(const void *)d->state);
    snprintf(hex, 33, "%016llx%016llx", (unsigned long long)h.high64, (unsigned long long)h.low64);
}

static void put_canonical(unsigned char out[16], XXH128_hash_t h)
{
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, h);
    memcpy(out, c.digest, 16);
}

void dspark__digest_bytes(const void *data, size_t n, unsigned char out[16])
{
    put_canonical(out, XXH3_128bits(data, n));
}

const unsigned char *dspark__digest_secret(void)
{
    return XXH3_kSecret;
}

void dspark__digest_lanes_begin(uint64_t lanes[8])
{
    static const uint64_t first[8] = XXH3_INIT_ACC;
    memcpy(lanes, first, sizeof first);
}

void dspark__digest_lanes_end(const uint64_t lanes[8], size_t n, unsigned char out[16])
{
    XXH_ALIGN(XXH_ACC_ALIGN) xxh_u64 acc[8];
    XXH128_hash_t h;
    memcpy(acc, lanes, sizeof acc);
    h.low64 = XXH3_mergeAccs(acc, XXH3_kSecret + XXH_SECRET_MERGEACCS_START, (xxh_u64)n * XXH_PRIME64_1);
    h.high64 = XXH3_mergeAccs(acc, XXH3_kSecret + sizeof XXH3_kSecret - sizeof acc - XXH_SECRET_MERGEACCS_START,
                              ~((xxh_u64)n * XXH_PRIME64_2));
    put_canonical(out, h);
}

uint64_t dspark__hash64(const void *data, size_t n, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, n, seed);
}
