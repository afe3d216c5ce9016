/* vmm.c: virtual memory management: addresses, physical memory, and putting one behind the other.
 *
 *   aclrtReserveMemAddress -> aclrtMallocPhysical -> aclrtMapMem -> use -> aclrtUnmapMem -> aclrtFreePhysical
 *   -> aclrtReleaseMemAddress.  Undoing things in another order is refused.                                          */
#include "runtime.h"
#include <stdlib.h>
#include <unistd.h>

#define GRANULARITY SOFT_HUGE_PAGE

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static soft_sorted reservations;                            /* value: how many mappings are inside, as a number */

static aclError check_size(size_t size)
{
    if (!size || size % GRANULARITY)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "size %zu: want a multiple of %llu", size, (unsigned long long)GRANULARITY);
    return ACL_SUCCESS;
}

static aclError check_zero(const char *name, uint64_t value)
{
    if (value)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%s is %llu: must be 0", name, (unsigned long long)value);
    return ACL_SUCCESS;
}

/* ---- addresses ---- */

aclError aclrtReserveMemAddress(void **virPtr, size_t size, size_t alignment, void *expectPtr, uint64_t flags)
{
    (void)expectPtr;                                        /* a wish, and addresses are ours to choose */
    void *addr;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!virPtr)
        return soft_null("virPtr");
    SOFT_TRY(check_size(size));
    SOFT_TRY(check_zero("alignment", alignment));
    SOFT_TRY(check_zero("flags", flags));
    SOFT_TRY(soft_context_need());
    SOFT_TRY(soft_arena_take(size, GRANULARITY, &addr));
    pthread_mutex_lock(&lock);
    bool known = soft_sorted_insert(&reservations, (soft_entry){ (uintptr_t)addr, size, NULL });
    pthread_mutex_unlock(&lock);
    if (!known) {
        soft_arena_give(addr);
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a reservation");
    }
    *virPtr = addr;
    return ACL_SUCCESS;
}

static soft_entry *reservation_of(const void *addr, uint64_t size)        /* locked */
{
    size_t after = soft_sorted_after(&reservations, (uintptr_t)addr);
    soft_entry *entry = after ? &reservations.entries[after - 1] : NULL;
    if (!entry || (uintptr_t)addr - entry->base >= entry->size || size > entry->size - ((uintptr_t)addr - entry->base))
        return NULL;
    return entry;
}

static void count_maps(const void *addr, intptr_t change)                 /* locked; the reservation exists */
{
    soft_entry *entry = reservation_of(addr, 1);
    entry->value = (void *)((intptr_t)entry->value + change);
}

static aclError release(const void *virPtr)                 /* locked */
{
    soft_entry *entry = reservation_of(virPtr, 1);
    if (!entry || entry->base != (uintptr_t)virPtr)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%p is not what aclrtReserveMemAddress returned, or was released", virPtr);
    if (entry->value)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%p: memory is still mapped there, unmap it first", virPtr);
    soft_sorted_remove(&reservations, (size_t)(entry - reservations.entries));
    return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void *virPtr)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!virPtr)
        return soft_null("virPtr");
    SOFT_TRY(soft_context_need());
    pthread_mutex_lock(&lock);
    aclError code = release(virPtr);
    pthread_mutex_unlock(&lock);
    if (code == ACL_SUCCESS)
        soft_arena_give(virPtr);
    return code;
}

/* ---- physical memory ---- */

static void destroy(soft_object *object)
{
    soft_physical *physical = (soft_physical *)object;      /* its first member */
    close(physical->fd);
    if (physical->imported) {
        SOFT_COUNT(imported, -1);
    } else if (physical->placement == 1) {
        soft_device_unreserve(physical->device, physical->size);
        SOFT_COUNT(device_bytes, -physical->size);
        SOFT_COUNT(allocations, -1);
    } else {
        SOFT_COUNT(pinned_bytes, -physical->size);
        SOFT_COUNT(allocations, -1);
    }
    pthread_mutex_destroy(&physical->lock);
    free(physical);
}

static void count(const soft_physical *physical)
{
    if (physical->imported) {
        SOFT_COUNT(imported, 1);
        return;
    }
    SOFT_COUNT(allocations, 1);
    if (physical->placement == 1)
        SOFT_COUNT(device_bytes, physical->size);
    else
        SOFT_COUNT(pinned_bytes, physical->size);
}

aclError soft_physical_new(soft_physical value, aclrtDrvMemHandle *handle)
{
    soft_physical *physical = malloc(sizeof *physical);
    if (!physical)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a handle");
    *physical = value;
    physical->object = (soft_object){ .refs = 1, .destroy = destroy };
    pthread_mutex_init(&physical->lock, NULL);
    void *made = soft_handle_new(SOFT_PHYSICAL, &physical->object);
    if (!made) {
        pthread_mutex_destroy(&physical->lock);
        free(physical);
        return soft_error(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "no handle left for physical memory");
    }
    count(physical);
    *handle = made;
    return ACL_SUCCESS;
}

static aclError check_prop(const aclrtPhysicalMemProp *prop)
{
    if (!prop)
        return soft_null("prop");
    if (prop->handleType != ACL_MEM_HANDLE_TYPE_NONE || prop->allocationType != ACL_MEM_ALLOCATION_TYPE_PINNED || prop->reserve)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "prop: handleType, allocationType and reserve must be 0");
    if (prop->memAttr < ACL_DDR_MEM || prop->memAttr > ACL_HBM_MEM_P2P_NORMAL)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "prop: memAttr %d: want 0 to 9", (int)prop->memAttr);
    if (prop->location.type == ACL_MEM_LOCATION_TYPE_HOST)
        return ACL_SUCCESS;
    if (prop->location.type != ACL_MEM_LOCATION_TYPE_DEVICE)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "prop: location type %d: want 0 (host) or 1 (device)", (int)prop->location.type);
    return soft_device_check(prop->location.id);
}

static aclError malloc_physical(soft_physical value, aclrtDrvMemHandle *handle)
{
    if (value.placement == 1)
        SOFT_TRY(soft_device_reserve(value.device, value.size));
    aclError code = soft_backing_new(value.size, &value.fd);
    if (code)
        goto unreserve;
    code = soft_physical_new(value, handle);
    if (code == ACL_SUCCESS)
        return ACL_SUCCESS;
    close(value.fd);
unreserve:
    if (value.placement == 1)
        soft_device_unreserve(value.device, value.size);
    return code;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *prop, uint64_t flags)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!handle)
        return soft_null("handle");
    SOFT_TRY(check_size(size));
    SOFT_TRY(check_zero("flags", flags));
    SOFT_TRY(check_prop(prop));
    SOFT_TRY(soft_context_need());
    bool device = prop->location.type == ACL_MEM_LOCATION_TYPE_DEVICE;
    return malloc_physical((soft_physical){ .device = device ? (int)prop->location.id : 0, .placement = device, .size = size }, handle);
}

soft_physical *soft_physical_get(aclrtDrvMemHandle handle, aclError *code)
{
    soft_physical *physical = handle ? soft_handle_get(SOFT_PHYSICAL, handle) : NULL;
    *code = physical ? ACL_SUCCESS : handle ? soft_bad_handle("handle of physical memory", handle) : soft_null("handle");
    return physical;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle)
{
    aclError code;
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(soft_context_need());
    soft_physical *found = soft_physical_get(handle, &code);
    if (!found)
        return code;
    pthread_mutex_lock(&found->lock);
    uint64_t key = found->key;
    if (found->maps)
        code = soft_error(ACL_ERROR_RT_PARAM_INVALID, "this memory is still mapped, unmap it first");
    else if (soft_handle_remove(SOFT_PHYSICAL, handle))
        soft_unref(&found->object);                         /* the table's */
    pthread_mutex_unlock(&found->lock);
    if (code == ACL_SUCCESS && key)
        soft_share_withdraw(key);
    soft_unref(&found->object);
    return code;
}

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *prop, aclrtMemGranularityOptions option, size_t *granularity)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!granularity)
        return soft_null("granularity");
    SOFT_TRY(check_prop(prop));
    if (option != ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM && option != ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "option %d: want 0 (minimum) or 1 (recommended)", (int)option);
    *granularity = GRANULARITY;
    return ACL_SUCCESS;
}

/* ---- one behind the other ---- */

static aclError map(void *virPtr, size_t size, soft_physical *physical)   /* both locks held */
{
    if (!reservation_of(virPtr, size))
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "[%p, +%zu) is not reserved", virPtr, size);
    soft_range range = {
        .span = { (uintptr_t)virPtr, size, physical->placement, physical->device, physical->imported ? -1 : physical->fd, 0 },
        .origin = SOFT_MAPPED, .object = physical,
    };
    SOFT_TRY(soft_map_add(&range));                         /* first: it refuses what is mapped already */
    void *addr;
    aclError code = soft_backing_map(physical->fd, 0, size, virPtr, &addr);
    if (code == ACL_SUCCESS && physical->imported)
        code = soft_populate(addr, size);
    if (code) {
        soft_map_take(virPtr, SOFT_MAPPED, &range);
        soft_arena_close(virPtr, size);
        return code;
    }
    physical->maps++;
    soft_ref(&physical->object);
    count_maps(virPtr, 1);
    return ACL_SUCCESS;
}

aclError aclrtMapMem(void *virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags)
{
    aclError code;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!virPtr)
        return soft_null("virPtr");
    SOFT_TRY(check_zero("offset", offset));
    SOFT_TRY(check_zero("flags", flags));
    if ((uintptr_t)virPtr % GRANULARITY)
        return soft_error(ACL_ERROR_RT_ADDR_UNALIGNED, "%p does not start on a multiple of %llu", virPtr, (unsigned long long)GRANULARITY);
    SOFT_TRY(soft_context_need());
    soft_physical *found = soft_physical_get(handle, &code);
    if (!found)
        return code;
    pthread_mutex_lock(&lock);
    pthread_mutex_lock(&found->lock);
    code = size == found->size ? map(virPtr, size, found)
        : soft_error(ACL_ERROR_RT_PARAM_INVALID, "size %zu: must be that of the physical memory, %llu", size, (unsigned long long)found->size);
    pthread_mutex_unlock(&found->lock);
    pthread_mutex_unlock(&lock);
    soft_unref(&found->object);
    return code;
}

aclError aclrtUnmapMem(void *virPtr)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!virPtr)
        return soft_null("virPtr");
    SOFT_TRY(soft_context_need());
    soft_range range;
    pthread_mutex_lock(&lock);
    bool mapped = soft_map_take(virPtr, SOFT_MAPPED, &range);
    soft_physical *physical = mapped ? range.object : NULL;
    if (mapped) {
        soft_arena_close(virPtr, range.span.size);
        count_maps(virPtr, -1);
        pthread_mutex_lock(&physical->lock);
        physical->maps--;
        pthread_mutex_unlock(&physical->lock);
    }
    pthread_mutex_unlock(&lock);
    if (!mapped)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "nothing is mapped from %p on", virPtr);
    soft_unref(&physical->object);
    return ACL_SUCCESS;
}
