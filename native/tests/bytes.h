/* bytes.h: bytes that know where they belong.
 *
 * A sanitizer makes a loop over bytes 20 times as long. So these are made in memory that only the test sees, without a sanitizer,
 * and reach the memory that is tested by memcpy and memcmp, which every sanitizer checks in whole ranges.                       */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { PIECE = 4096 };

static inline uint8_t pattern(uint32_t seed, uint64_t at)
{
    uint64_t mixed = (at + seed * 0x9e3779b9u + 1) * 0x9e3779b97f4a7c15u;
    return (uint8_t)(mixed >> 56);
}

/* The bytes of a pattern from `first` on, at most PIECE of them. Returns how many. */
__attribute__((noinline, no_sanitize("address", "thread"))) static uint64_t make_piece(uint8_t *piece, uint64_t size, uint32_t seed,
                                                                                     uint64_t first)
{
    uint64_t count = size < PIECE ? size : PIECE, mixed = (first + seed * 0x9e3779b9u + 1) * 0x9e3779b97f4a7c15u;
    for (uint64_t i = 0; i < count; i++, mixed += 0x9e3779b97f4a7c15u)
        piece[i] = (uint8_t)(mixed >> 56);
    return count;
}

static inline void fill(void *bytes, uint64_t size, uint32_t seed)
{
    uint8_t piece[PIECE];
    for (uint64_t at = 0, count; at < size; at += count) {
        count = make_piece(piece, size - at, seed, at);
        memcpy((uint8_t *)bytes + at, piece, count);
    }
}

/* Whether these are the bytes of a pattern from `first` on. */
static inline bool holds_from(const void *bytes, uint64_t size, uint32_t seed, uint64_t first)
{
    uint8_t piece[PIECE];
    bool same = true;
    for (uint64_t at = 0, count; same && at < size; at += count) {
        count = make_piece(piece, size - at, seed, first + at);
        same = !memcmp((const uint8_t *)bytes + at, piece, count);
    }
    return same;
}

static inline bool holds(const void *bytes, uint64_t size, uint32_t seed)
{
    return holds_from(bytes, size, seed, 0);
}

static inline bool all_are(const void *bytes, uint64_t size, uint8_t value)
{
    const uint8_t *first = bytes;
    return !size || (*first == value && !memcmp(first, first + 1, size - 1));
}
