/* ring_copy.c: work that needs no device: copies in memory of the host, and lists of numbers. */
#include "ring_internal.h"

#include "big_copy.h"
#include "mapped.h"
#include <string.h>

void ring_copy(const HcclOneSideOpDesc *ranges, uint32_t count, uint64_t total)
{
    for (uint32_t i = 0; i < count; i++) {
        const HcclOneSideOpDesc *r = &ranges[i];
        if (total < BIG_COPY_WORTH)
            memmove(r->localAddr, r->remoteAddr, r->count);
        else
            big_copy(r->localAddr, r->remoteAddr, r->count, i + 1 < count ? ranges[i + 1].remoteAddr : NULL);
    }
    big_copy_fence();
}

uint32_t ring_first_unusable(const uint64_t *addresses, const uint64_t *bytes, uint32_t count, int writes)
{
    uint32_t i = 0;
    while (i < count && memory_is_usable(addresses[i], bytes[i], writes))
        i++;
    return i;
}

uint32_t ring_first_outside(const uint64_t *values, uint32_t count, uint64_t limit)
{
    uint32_t i = 0;
    while (i < count && values[i] < limit)
        i++;
    return i;
}

/* A peer may have chosen the values, so the hash has a multiplier that no peer can foresee. */
uint32_t ring_first_repeated(const uint64_t *values, uint32_t count, uint32_t *table)
{
    uint32_t i = 1;
    while (i < count && values[i] > values[i - 1])
        i++;
    if (i >= count)
        return count;
    uint32_t bits = 33 - (uint32_t)__builtin_clz(count);            /* at least twice as many slots as values */
    uint64_t last = (1ull << bits) - 1;                             /* 64 bits: 2**30 values have 2**32 slots */
    uint64_t multiplier = ((uint64_t)ring_now_ns() * 0x9e3779b97f4a7c15u) | 1;
    memset(table, 0, (last + 1) * sizeof *table);
    for (i = 0; i < count; i++) {
        uint64_t at = values[i] * multiplier >> (64 - bits);
        while (table[at] && values[table[at] - 1] != values[i])
            at = (at + 1) & last;
        if (table[at])
            return i;
        table[at] = i + 1;
    }
    return count;
}

void ring_number_parts(uint64_t *parts, uint32_t count, const uint64_t *blocks, uint64_t each)
{
    for (uint32_t i = 0; i < count; i++)
        parts[i] = blocks[parts[i] / each] * each + parts[i] % each;
}

static uint64_t units_of(uint64_t tokens, uint64_t each)
{
    return each == 1 ? tokens : tokens / each;              /* a division takes longer than all the rest */
}

void ring_number_units(uint64_t *numbers, const ring_units *units, const uint64_t *offsets, uint32_t count)
{
    uint64_t left = units->tokens, block = 0, within = units->first_token;
    while (left > 0) {
        if (within >= units->block_tokens) {
            block += within / units->block_tokens;
            within %= units->block_tokens;
        }
        uint64_t tokens = left < units->stretch ? left : units->stretch;
        uint64_t first = block * units->block_units + units_of(within, units->unit_tokens) * units->step;
        uint64_t length = units_of(tokens + units->unit_tokens - 1, units->unit_tokens);
        for (uint32_t i = 0; i < count; i++)
            for (uint64_t at = 0; at < length; at++)
                *numbers++ = first + offsets[i] + at * units->step;
        within += tokens;
        left -= tokens;
    }
}
