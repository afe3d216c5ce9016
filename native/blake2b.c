/* blake2b.c: RFC 7693, sections 2 and 3. A key takes the first block; integers are little-endian. */
#pragma GCC visibility push(default)
#include "blake2b.h"
#pragma GCC visibility pop

#include <errno.h>
#include <stdbool.h>
#include <string.h>

enum { BLOCK = 128, ROUNDS = 12 };

static const uint64_t START[8] = {        /* the fractions of the square roots of the first eight primes */
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const uint8_t ORDER[10][16] = {    /* of a block's words, in each round; rounds 10 and 11 are as 0 and 1 */
    { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 },
    { 14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3 },
    { 11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4 },
    { 7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8 },
    { 9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13 },
    { 2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9 },
    { 12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11 },
    { 13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10 },
    { 6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5 },
    { 10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0 },
};

static uint64_t rotated(uint64_t word, int bits)
{
    return word >> bits | word << (64 - bits);
}

static uint64_t word_at(const uint8_t *bytes)
{
    uint64_t word = 0;
    for (int i = 7; i >= 0; i--)
        word = word << 8 | bytes[i];
    return word;
}

static void mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y)
{
    v[a] += v[b] + x;
    v[d] = rotated(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = rotated(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 63);
}

/* `count`: bytes up to the end of this block, padding left out. */
static void compress(uint64_t *state, const uint8_t *block, uint64_t count, bool is_last)
{
    uint64_t v[16], m[16];
    memcpy(v, state, 8 * sizeof *v);
    memcpy(v + 8, START, sizeof START);
    v[12] ^= count;
    v[14] ^= is_last ? UINT64_MAX : 0;
    for (int i = 0; i < 16; i++)
        m[i] = word_at(block + 8 * i);
    for (int round = 0; round < ROUNDS; round++) {
        const uint8_t *at = ORDER[round % 10];
        for (int i = 0; i < 4; i++)
            mix(v, i, 4 + i, 8 + i, 12 + i, m[at[2 * i]], m[at[2 * i + 1]]);
        for (int i = 0; i < 4; i++)
            mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[at[8 + 2 * i]], m[at[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; i++)
        state[i] ^= v[i] ^ v[8 + i];
    explicit_bzero(m, sizeof m);
    explicit_bzero(v, sizeof v);
}

int blake2b_seal(const uint8_t *key, uint64_t key_size, const uint8_t *data, uint64_t size, uint8_t *seal)
{
    if (key_size > BLAKE2B_MAX_KEY)
        return -EINVAL;
    uint8_t block[BLOCK] = { 0 };
    uint64_t state[8], count = 0;
    memcpy(state, START, sizeof state);
    state[0] ^= 0x01010000 ^ key_size << 8 ^ BLAKE2B_SEAL;
    if (key_size) {
        memcpy(block, key, key_size);
        count = BLOCK;
        compress(state, block, count, size == 0);
    }
    while (size > BLOCK) {
        count += BLOCK;
        compress(state, data, count, false);
        data += BLOCK;
        size -= BLOCK;
    }
    if (size || !key_size) {
        memset(block, 0, sizeof block);
        if (size)
            memcpy(block, data, size);
        compress(state, block, count + size, true);
    }
    for (int i = 0; i < BLAKE2B_SEAL; i++)
        seal[i] = (uint8_t)(state[i / 8] >> (8 * (i % 8)));
    explicit_bzero(block, sizeof block);  /* may hold the key */
    explicit_bzero(state, sizeof state);
    return 0;
}
