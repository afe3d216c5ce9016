/* ring_copy.c: what a ring does with memory of the host: the processor copies it, and no device is asked. */
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
