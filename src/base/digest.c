/* XXH3 digests. The only file that sees xxhash, which is compiled in whole: no run-time library. */
#include "base/digest.h"

#include <stdio.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

_Static_assert(sizeof(XXH3_state_t) <= DSPARK__DIGEST_STATE_BYTES, "opaque state is too small");
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

uint64_t dspark__hash64(const void *data, size_t n, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, n, seed);
}
