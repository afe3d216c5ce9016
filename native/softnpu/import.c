/* import.c: a peer's memory, mapped into this process. */
#include "runtime.h"
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE                                 /* Linux 5.14; older C libraries do not name it */
#define MADV_POPULATE_WRITE 23
#endif

#define POPULATE_MAX ((uint64_t)2 << 30)                     /* a larger pool is touched as it is used: not all of it may ever be */

/* Fault all pages in now rather than one by one on the data path. After the huge-page advice, which MAP_POPULATE would
 * have come before. A kernel that does not know the advice populates by use. */
aclError soft_populate(void *addr, uint64_t size)
{
    uintptr_t from = (uintptr_t)addr / soft_page_size() * soft_page_size();
    if (size > POPULATE_MAX || madvise((void *)from, (uintptr_t)addr + size - from, MADV_POPULATE_WRITE) == 0 || errno == EINVAL)
        return ACL_SUCCESS;
    return soft_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "making %llu bytes at %p resident: %s", (unsigned long long)size, addr,
                      strerror(errno));
}

static aclError map_import(int fd, uint64_t from, uint64_t size, bool device, void **at)
{
    if (device)
        SOFT_TRY(soft_arena_take(size, soft_backing_align(size), at));
    void *place = device ? *at : NULL;
    aclError code = soft_backing_map(fd, from, size, place, at);
    if (code && device)
        soft_arena_give(place);
    return code;
}

static void unmap_import(void *at, uint64_t size)
{
    if (soft_arena_has(at))
        soft_arena_give(at);
    else
        munmap(at, size);
}

int soft_mem_import(int fd, uint64_t fd_offset, uint64_t size, int placement, void **addr)
{
    SOFT_TRY(soft_backing_check(fd, fd_offset, size));
    uint64_t step = soft_backing_align(size), from = fd_offset / step * step;   /* huge pages need both offset and address aligned */
    uint64_t total = soft_round_up(fd_offset - from + size, soft_page_size());
    void *at;
    SOFT_TRY(map_import(fd, from, total, placement == 1, &at));
    aclError code = soft_populate(at, total);
    int device = soft_current_device();
    soft_range range = {
        .span = { .base = (uintptr_t)at + (fd_offset - from), .size = size, .placement = placement,
                  .device = device < 0 ? 0 : device, .fd = -1 },
        .origin = SOFT_IMPORTED, .address = at, .address_size = total,
    };
    if (!code)
        code = soft_map_add(&range);
    if (code) {
        unmap_import(at, total);
        return code;
    }
    SOFT_COUNT(imported, 1);
    *addr = (void *)range.span.base;
    return ACL_SUCCESS;
}

void soft_mem_unimport(void *addr)
{
    soft_range range;
    if (!soft_map_take(addr, SOFT_IMPORTED, &range))
        return;
    unmap_import(range.address, range.address_size);
    SOFT_COUNT(imported, -1);
}
