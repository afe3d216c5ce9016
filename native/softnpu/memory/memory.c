/* memory.c: device memory and pinned host memory, one memfd per allocation. */
#include "care.h"
#include "runtime.h"
#include <sys/mman.h>
#include <unistd.h>

static aclError check_request(void **out, const char *name, size_t size)
{
    if (!out)
        return soft_null(name);
    if (!size)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "size is 0: an allocation has at least one byte");
    return ACL_SUCCESS;
}

static aclError new_device_memory(int device, uint64_t size, soft_range *range)
{
    uint64_t total = soft_round_up(size, soft_page_size());
    void *addr;
    int fd;
    aclError code = soft_arena_take(total, soft_backing_align(size), &addr);
    if (code)
        return code;
    code = soft_backing_new(total, &fd);
    if (code)
        goto give_addresses;
    code = soft_backing_map(fd, 0, total, addr, &addr);
    if (code)
        goto close_fd;
    *range = (soft_range){ .span = { (uintptr_t)addr, size, 1, device, fd, 0 }, .origin = SOFT_MALLOC };
    code = soft_map_add(range);
    if (code == ACL_SUCCESS)
        return ACL_SUCCESS;
close_fd:
    close(fd);
give_addresses:
    soft_arena_give(addr);
    return code;
}

static aclError malloc_device(void **devPtr, size_t size, aclrtMemMallocPolicy policy)
{
    SOFT_TRY(check_request(devPtr, "devPtr", size));
    if (policy < ACL_MEM_MALLOC_HUGE_FIRST || policy > ACL_MEM_MALLOC_NORMAL_ONLY_P2P)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "policy %d: want 0 to 5", (int)policy);
    soft_device *device;
    SOFT_TRY(soft_device_current(&device));
    SOFT_TRY(soft_device_reserve(device->id, size));
    soft_range range;
    aclError code = new_device_memory(device->id, size, &range);
    if (code) {
        soft_device_unreserve(device->id, size);
        return code;
    }
    SOFT_COUNT(device_bytes, size);
    SOFT_COUNT(allocations, 1);
    *devPtr = (void *)range.span.base;
    return ACL_SUCCESS;
}

aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return malloc_device(devPtr, size, policy);
}

aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy policy)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return malloc_device(devPtr, size, policy);
}

aclError aclrtFree(void *devPtr)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!devPtr)
        return soft_null("devPtr");
    SOFT_TRY(soft_context_need());
    soft_range range;
    if (!soft_map_take(devPtr, SOFT_MALLOC, &range))
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%p is not what aclrtMalloc returned, or was freed already", devPtr);
    soft_care_end(SOFT_POPULATE, range.span.base);
    soft_arena_give(devPtr);
    close(range.span.fd);
    soft_device_unreserve(range.span.device, range.span.size);
    SOFT_COUNT(device_bytes, -range.span.size);
    SOFT_COUNT(allocations, -1);
    return ACL_SUCCESS;
}

static aclError new_host_memory(int device, uint64_t size, soft_range *range)
{
    uint64_t total = soft_round_up(size, soft_page_size());
    void *addr;
    int fd;
    if (total < size || total > INT64_MAX / 2)
        return soft_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "%llu bytes of host memory: no address space is that large",
                          (unsigned long long)size);
    SOFT_TRY(soft_backing_new(total, &fd));
    aclError code = soft_backing_map(fd, 0, total, NULL, &addr);
    if (code)
        goto close_fd;
    *range = (soft_range){ .span = { (uintptr_t)addr, size, 0, device, fd, 0 }, .origin = SOFT_MALLOC_HOST };
    code = soft_map_add(range);
    if (code == ACL_SUCCESS)
        return ACL_SUCCESS;
    munmap(addr, total);
close_fd:
    close(fd);
    return code;
}

aclError aclrtMallocHost(void **hostPtr, size_t size)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(check_request(hostPtr, "hostPtr", size));
    soft_device *device;
    soft_range range;
    SOFT_TRY(soft_device_current(&device));
    SOFT_TRY(new_host_memory(device->id, size, &range));
    SOFT_COUNT(pinned_bytes, size);
    SOFT_COUNT(allocations, 1);
    *hostPtr = (void *)range.span.base;
    return ACL_SUCCESS;
}

aclError aclrtFreeHost(void *hostPtr)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!hostPtr)
        return soft_null("hostPtr");
    SOFT_TRY(soft_context_need());
    soft_range range;
    if (!soft_map_take(hostPtr, SOFT_MALLOC_HOST, &range))
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%p is not what aclrtMallocHost returned, or was freed already", hostPtr);
    soft_care_end(SOFT_POPULATE, range.span.base);
    munmap(hostPtr, soft_round_up(range.span.size, soft_page_size()));
    close(range.span.fd);
    SOFT_COUNT(pinned_bytes, -range.span.size);
    SOFT_COUNT(allocations, -1);
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (attr < ACL_DDR_MEM || attr > ACL_HBM_MEM_P2P_NORMAL)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "memory attribute %d: want 0 to 9", (int)attr);
    if (!free || !total)
        return soft_null(free ? "total" : "free");
    soft_device *device;
    SOFT_TRY(soft_device_current(&device));
    uint64_t limit = atomic_load(&soft_setting.device_memory), used = atomic_load(&device->used);
    *total = limit;
    *free = used < limit ? limit - used : 0;
    return ACL_SUCCESS;
}

/* Small pages are of small allocations. Device memory from elsewhere (adopted, or mapped) has large ones, as virtual memory of
 * the vendor's has.                                                                                                     */
static uint32_t page_of(const void *ptr, const soft_span *span)
{
    soft_range range;
    bool allocated = span->placement != 1 || (soft_map_find(ptr, &range) && range.origin == SOFT_MALLOC);
    return allocated && span->size < SOFT_HUGE_PAGE ? 4096 : SOFT_HUGE_PAGE;
}

aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!ptr || !attributes)
        return soft_null(ptr ? "attributes" : "ptr");
    soft_span span;
    *attributes = (aclrtPtrAttributes){ .location = { .id = 0, .type = (aclrtMemLocationType)2 } };   /* 2: unregistered */
    if (soft_map_is_ordinary(ptr))                          /* the vendor's driver knows nothing of it */
        return ACL_SUCCESS;
    if (soft_span_of(ptr, 1, &span)) {
        attributes->location.id = (uint32_t)span.device;
        attributes->location.type = span.placement == 1 ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_HOST;
        attributes->pageSize = page_of(ptr, &span);
    } else if (soft_arena_has(ptr)) {                       /* freed: a copy says so */
        attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    }
    return ACL_SUCCESS;
}

aclError aclrtMemGetAddressRange(void *ptr, void **pbase, size_t *psize)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!ptr)
        return soft_null("ptr");
    soft_span span;
    if (!soft_span_of(ptr, 1, &span) || span.placement != 1)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%p is not in device memory", (void *)ptr);
    if (pbase)
        *pbase = (void *)span.base;
    if (psize)
        *psize = span.size;
    return ACL_SUCCESS;
}
