/* SOFTNPU_STRICT=hccs: what memory a peer on the same server can be shown.
 *
 * HOST memory may be bound, but its descriptor is not told, so a peer's access to it is one to unknown memory: HCCL_E_INTERNAL.
 * [src hccl_one_sided_service.cc RegisterBoundMems: only DEVICE memory goes into localMemIpcDescs_]
 *
 * DEVICE memory is exported to the peer by the address at which it was registered, unaligned and without an offset, and the
 * driver exports from the start of a page: of 2 MiB, or within an aclrtMalloc allocation, whose pages the driver knows, of what
 * aclrtPointerGetAttributes says. Elsewhere HcclCommPrepare gives HCCL_E_RUNTIME (15), the code of aclrtIpcMemGetExportKey's
 * failure; the peer only sees that this rank does not go on. Registering and binding say nothing, they keep a record only.
 * [src local_ipc_rma_buffer_impl.cc Init, mem_name_repository.cc SetIpcMem with 4 arguments, adapter_rts hrtIpcSetMemoryName;
 * doc hixl: register_cache, and its question about HCCS links whose HcclCommPrepare ends with 15]                      */
#include "hccl_soft.h"
#include "runtime.h"

bool hccl_strict_hides(const hccl_region *region)
{
    return soft_is_hccs() && region->mem.type == COMM_MEM_TYPE_HOST;
}

static uint64_t page_at(const void *addr)
{
    aclrtPtrAttributes attributes;
    soft_range range;
    if (!soft_map_find(addr, &range) || range.origin != SOFT_MALLOC || aclrtPointerGetAttributes(addr, &attributes))
        return SOFT_HUGE_PAGE;
    return attributes.pageSize;
}

/* HOST memory is mapped for the device at Prepare, over HCCS, too, although no peer is told of it; the vendor's manual wants it
 * from aclrtMallocHost. What the driver answers for ordinary memory over RoCE is not known, so there it is taken.
 * [src local_ipc_rma_buffer_impl.cc:62, hccl_one_sided_service.cc:878-905; doc hixl CacheManager] */
HcclResult hccl_strict_pinned(const char *function, const hccl_regions *bound)
{
    for (size_t i = 0; soft_is_hccs() && i < bound->count; i++) {
        const hccl_region *region = bound->item[i];
        if (region->mem.type == COMM_MEM_TYPE_HOST && soft_map_is_ordinary(region->mem.addr))
            return soft_hccl_error(HCCL_E_RUNTIME, "%s: the registered %llu bytes of HOST memory at %p are not pinned: they are not "
                                   "from aclrtMallocHost", function, (unsigned long long)region->mem.size, region->mem.addr);
    }
    return HCCL_SUCCESS;
}

HcclResult hccl_strict_pages(const char *function, const hccl_regions *bound)
{
    for (size_t i = 0; soft_is_hccs() && i < bound->count; i++) {
        const CommMem *mem = &bound->item[i]->mem;
        uint64_t page = mem->type == COMM_MEM_TYPE_DEVICE ? page_at(mem->addr) : 1;
        if ((uintptr_t)mem->addr % page)
            return soft_hccl_error(HCCL_E_RUNTIME, "%s: the registered %llu bytes at %p do not start on a page: over HCCS, device "
                                   "memory starts at a multiple of %llu", function, (unsigned long long)mem->size, mem->addr,
                                   (unsigned long long)page);
    }
    return HCCL_SUCCESS;
}
