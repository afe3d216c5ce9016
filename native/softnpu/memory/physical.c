/* physical.c: physical memory, which vmm.c puts behind addresses. Memory of this process counts against the device's limit. */
#include "runtime.h"
#include <stdlib.h>
#include <unistd.h>

aclError soft_vmm_size(size_t size)
{
    if (!size || size % SOFT_GRANULARITY)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "size %zu: want a multiple of %llu", size, (unsigned long long)SOFT_GRANULARITY);
    return ACL_SUCCESS;
}

aclError soft_vmm_zero(const char *name, uint64_t value)
{
    if (value)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%s is %llu: must be 0", name, (unsigned long long)value);
    return ACL_SUCCESS;
}

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
    SOFT_TRY(soft_vmm_size(size));
    SOFT_TRY(soft_vmm_zero("flags", flags));
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
    *granularity = SOFT_GRANULARITY;
    return ACL_SUCCESS;
}
