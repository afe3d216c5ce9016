/* SOFTNPU_STRICT: an item moves at least one byte, from or to memory that is bound to the communicator or registered for the
 * peer. HCCL looks local addresses up in its own table of registered buffers, as it does remote ones, and finds no range of
 * 0 bytes. [src hcomm hccl_one_sided_conn.cc BatchWrite, BatchRead; transport_ipc_mem.cc, transport_roce_mem.cc] */
#include "hccl_soft.h"

static bool covers(const hccl_regions *regions, uintptr_t local, uint64_t bytes)
{
    for (size_t i = 0; i < regions->count; i++) {
        const CommMem *mem = &regions->item[i]->mem;
        uint64_t offset = local - (uintptr_t)mem->addr;
        if (local >= (uintptr_t)mem->addr && offset < mem->size && bytes <= mem->size - offset)
            return true;
    }
    return false;
}

/* Under the communicator's lock. */
HcclResult hccl_strict_item(const char *function, const hccl_regions *bound, const hccl_regions *offered, uint32_t number,
                            const void *local, uint64_t bytes)
{
    if (!bytes)
        return soft_hccl_error(HCCL_E_PARA, "%s: item %u has 0 bytes", function, number);
    if (covers(bound, (uintptr_t)local, bytes) || covers(offered, (uintptr_t)local, bytes))
        return HCCL_SUCCESS;
    return soft_hccl_error(HCCL_E_INTERNAL, "%s: item %u: %llu bytes at %p are not within one region of this process that is "
                           "registered and bound", function, number, (unsigned long long)bytes, local);
}
