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

/* The digest of n bytes at once: the bytes that its hex digits spell. */
void dspark__digest_bytes(const void *data, size_t n, unsigned char out[16]);

/* For kernels that hash while they do something else. Of n >= DSPARK__DIGEST_LONG bytes, XXH3 takes stripes of
 * 64 into eight lanes: stripe i with the secret from byte 8 * (i % 16) on; behind every 16th stripe, as long as
 * bytes follow, the lanes are scrambled with the secret's last 64; the last 64 bytes, whether they are in a
 * stripe or not, go in with the secret from byte DSPARK__DIGEST_LAST on. */
#define DSPARK__DIGEST_LONG 241
#define DSPARK__DIGEST_SECRET_BYTES 192
#define DSPARK__DIGEST_LAST 121
const unsigned char *dspark__digest_secret(void);
void dspark__digest_lanes_begin(uint64_t lanes[8]);
void dspark__digest_lanes_end(const uint64_t lanes[8], size_t n, unsigned char out[16]);

/* 64-bit hash for tables that live in memory only. */
uint64_t dspark__hash64(const void *data, size_t n, uint64_t seed);

#endif
