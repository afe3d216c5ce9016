#pragma GCC visibility push(default)
#include "plain_copy.h"
#pragma GCC visibility pop

#include <string.h>

void plain_copy(const uint64_t *targets, const uint64_t *sources, size_t count, size_t bytes, size_t rounds)
{
    for (size_t round = 0; round < rounds; round++)
        for (size_t i = 0; i < count; i++)
            memcpy((void *)(uintptr_t)targets[i], (const void *)(uintptr_t)sources[i], bytes);
}
