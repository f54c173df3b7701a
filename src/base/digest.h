/* XXH3 128-bit digests: fingerprints of checkpoints, digests of stages. */
#ifndef DSPARK_BASE_DIGEST_H
#define DSPARK_BASE_DIGEST_H

#include <stddef.h>
#include <stdint.h>

#define DSPARK__DIGEST_STATE_BYTES 640

/* A running digest. Opaque storage, so that users do not see xxhash. */
typedef struct dspark__digest {
    _Alignas(64) unsigned char state[DSPARK__DIGEST_STATE_BYTES];
} dspark__digest;

void dspark__digest_init(dspark__digest *d);
void dspark__digest_update(dspark__digest *d, const void *data, size_t n);
/* 32 lower-case hex digits, high half first, and a terminating zero. */
void dspark__digest_hex(const dspark__digest *d, char hex[33]);

/* 64-bit hash for tables that live in memory only. */
uint64_t dspark__hash64(const void *data, size_t n, uint64_t seed);

#endif
