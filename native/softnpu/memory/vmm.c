/* vmm.c: virtual memory management: addresses, and putting physical memory (physical.c) behind them.
 *
 *   aclrtReserveMemAddress -> aclrtMallocPhysical -> aclrtMapMem -> use -> aclrtUnmapMem -> aclrtFreePhysical
 *   -> aclrtReleaseMemAddress.  Undoing things in another order is refused.                                          */
#include "runtime.h"
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static soft_sorted reservations;                            /* value: how many mappings are inside, as a number */

/* ---- addresses ---- */

aclError aclrtReserveMemAddress(void **virPtr, size_t size, size_t alignment, void *expectPtr, uint64_t flags)
{
    (void)expectPtr;                                        /* a wish, and addresses are ours to choose */
    void *addr;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!virPtr)
        return soft_null("virPtr");
    SOFT_TRY(soft_vmm_size(size));
    SOFT_TRY(soft_vmm_zero("alignment", alignment));
    SOFT_TRY(soft_vmm_zero("flags", flags));
    SOFT_TRY(soft_context_need());
    SOFT_TRY(soft_arena_take(size, SOFT_GRANULARITY, &addr));
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
    SOFT_TRY(soft_vmm_zero("offset", offset));
    SOFT_TRY(soft_vmm_zero("flags", flags));
    if ((uintptr_t)virPtr % SOFT_GRANULARITY)
        return soft_error(ACL_ERROR_RT_ADDR_UNALIGNED, "%p does not start on a multiple of %llu", virPtr, (unsigned long long)SOFT_GRANULARITY);
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
