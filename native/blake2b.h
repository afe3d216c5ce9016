/* blake2b.h: seals of short messages by keyed BLAKE2b, as RFC 7693 defines it, with 16 bytes of result.
 *
 * `hashlib.blake2b(data, key=key, digest_size=16)` is the same in Python. It is here because heartbeats are sealed by a thread that
 * needs no interpreter.                                                                                                            */
#pragma once
#include <stdint.h>

enum { BLAKE2B_SEAL = 16, BLAKE2B_MAX_KEY = 64 };

/* Returns 0, or -EINVAL if the key has more than BLAKE2B_MAX_KEY bytes. Any thread may call it. */
int blake2b_seal(const uint8_t *key, uint64_t key_size, const uint8_t *data, uint64_t size, uint8_t *seal);
