/* host.c: ordinary memory of this process that the device may use: adopted (softnpu.h) or registered (aclrtHostRegister). */
#include "mapped.h"
#include "runtime.h"

#define MAPPED_OR_PINNED ((uint32_t)(ACL_HOST_REG_MAPPED | ACL_HOST_REG_PINNED))

static aclError check_ordinary(const void *addr, uint64_t size)
{
    if (!addr)
        return soft_null("addr");
    if (!size || (uintptr_t)addr + size < size)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "[%p, +%llu) is no address range", addr, (unsigned long long)size);
    if (soft_arena_has(addr) || !memory_is_mapped((uintptr_t)addr, size))
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "[%p, +%llu) is not ordinary memory of this process", addr,
                          (unsigned long long)size);
    return ACL_SUCCESS;
}

int soft_mem_adopt(void *addr, uint64_t size, int placement)
{
    SOFT_TRY(check_ordinary(addr, size));
    if (placement != 0 && placement != 1)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "placement %d: want 0 (pinned host) or 1 (device)", placement);
    int device = soft_current_device();
    soft_range range = {
        .span = { (uintptr_t)addr, size, placement, device < 0 ? 0 : device, -1, 0 }, .origin = SOFT_ADOPTED, .refs = 1,
    };
    return soft_map_retain(&range);
}

int soft_mem_release(void *addr, uint64_t size)
{
    return soft_map_release(addr, size);
}

int softnpu_adopt(void *addr, uint64_t size, int placement)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return soft_mem_adopt(addr, size, placement);
}

int softnpu_is_private(void *addr, uint64_t size)
{
    soft_span span;
    return !soft_span_of(addr, size, &span) || span.fd < 0;
}

int softnpu_release(void *addr, uint64_t size)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return soft_mem_release(addr, size);
}

/* Only a pinned registration makes copies asynchronous. One that merely maps gives kernels an address; to copies the
 * memory stays pageable, hence hidden. */
static aclError host_register(void *ptr, uint64_t size, uint32_t flags)
{
    SOFT_TRY(check_ordinary(ptr, size));
    if ((uintptr_t)ptr % 4096)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%p does not start on a page of 4096 bytes", ptr);
    soft_device *device;
    SOFT_TRY(soft_device_current(&device));
    soft_range range = {
        .span = { (uintptr_t)ptr, size, 0, device->id, -1, 0 },
        .origin = SOFT_REGISTERED, .hidden = !(flags & ACL_HOST_REG_PINNED),
    };
    /* There are no kernels to use the device's address; it exists so that giving it to a copy is refused, as it must be. */
    if (flags & ACL_HOST_REG_MAPPED)
        SOFT_TRY(soft_arena_take(size, SOFT_PAGE, &range.address));
    aclError code = soft_map_add(&range);
    if (code && range.address)
        soft_arena_give(range.address);
    return code;
}

static aclError device_address(const void *ptr, void **out)
{
    soft_range range;
    if (!soft_map_find(ptr, &range) || range.origin != SOFT_REGISTERED || !range.address)
        return soft_error(SOFT_HOST_NOT_REGISTERED, "%p is not in host memory registered with ACL_HOST_REG_MAPPED", ptr);
    *out = (char *)range.address + ((uintptr_t)ptr - range.span.base);
    return ACL_SUCCESS;
}

aclError aclrtHostRegister(void *ptr, uint64_t size, aclrtHostRegisterType type, void **devPtr)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!devPtr)
        return soft_null("devPtr");
    if (type != ACL_HOST_REGISTER_MAPPED)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "register type %d: only ACL_HOST_REGISTER_MAPPED (0) exists", (int)type);
    SOFT_TRY(host_register(ptr, size, ACL_HOST_REG_MAPPED));
    return device_address(ptr, devPtr);
}

aclError aclrtHostRegisterV2(void *ptr, uint64_t size, uint32_t flag)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!flag || flag & ~MAPPED_OR_PINNED)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "flag %#x: want ACL_HOST_REG_MAPPED (0x2), ACL_HOST_REG_PINNED "
                          "(0x10000000) or both", flag);
    return host_register(ptr, size, flag);
}

aclError aclrtHostGetDevicePointer(void *pHost, void **pDevice, uint32_t flag)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!pHost || !pDevice)
        return soft_null(pHost ? "pDevice" : "pHost");
    if (flag)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "flag %#x: must be 0", flag);
    return device_address(pHost, pDevice);
}

aclError aclrtHostUnregister(void *ptr)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!ptr)
        return soft_null("ptr");
    soft_range range;
    if (!soft_map_take(ptr, SOFT_REGISTERED, &range))
        return soft_error(SOFT_HOST_NOT_REGISTERED, "no registered host memory starts at %p", ptr);
    if (range.address)
        soft_arena_give(range.address);
    return ACL_SUCCESS;
}
