/* pointer_kind.c: finds the kind of memory that a pointer names, and whether it may be used at all. */
#include "mapped.h"
#include "runtime.h"

static aclError not_usable(const char *name, const void *addr, uint64_t bytes, const char *why)
{
    return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%s [%p, +%llu): %s", name, addr, (unsigned long long)bytes, why);
}

static aclError outside(const char *name, const void *addr, uint64_t bytes, const soft_span *span)
{
    return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%s [%p, +%llu) crosses the edge of the %s memory [%#lx, +%llu)", name, addr,
                      (unsigned long long)bytes, span->placement == 1 ? "device" : "pinned host", (unsigned long)span->base,
                      (unsigned long long)span->size);
}

aclError soft_place_of(const char *name, const void *addr, uint64_t bytes, soft_spot *spot)
{
    soft_span span;
    if (!addr)
        return soft_null(name);
    if ((uintptr_t)addr + bytes < bytes)
        return not_usable(name, addr, bytes, "no address space is that large");
    switch (soft_map_where(addr, bytes, &span)) {
    case SOFT_INSIDE:
        *spot = (soft_spot){ span.placement == 1 ? SOFT_DEVICE : SOFT_PINNED, span.device };
        return ACL_SUCCESS;
    case SOFT_OUTSIDE:
        return outside(name, addr, bytes, &span);
    case SOFT_UNKNOWN:
        break;
    }
    if (soft_arena_has(addr))
        return not_usable(name, addr, bytes, "a device address with nothing behind it: freed, or from aclrtHostRegister");
    if (!memory_is_mapped((uintptr_t)addr, bytes))
        return not_usable(name, addr, bytes, "not memory of this process");
    *spot = (soft_spot){ SOFT_PAGEABLE, -1 };
    return ACL_SUCCESS;
}
