/* import.c: a peer's memory, mapped into this process. No page of it is touched while the peer waits: mapping the pages that exist
 * costs 0.08 s of processor per GiB. A thread does that later, if it is many MiB, and makes none that the peer has not made. What it
 * has not come to, a transfer maps page by page.                                                                        */
#include "care.h"
#include "runtime.h"
#include <sys/mman.h>

#define MANY_PAGES ((uint64_t)32 << 20)                     /* less is mapped by its first transfer in some milliseconds */

static aclError map_import(int fd, uint64_t from, uint64_t size, bool device, bool writable, void **at)
{
    if (device)
        SOFT_TRY(soft_arena_take(size, soft_backing_align(size), at));
    void *place = device ? *at : NULL;
    aclError code = soft_backing_map_as(fd, from, size, place, writable, at);
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

int soft_mem_import(int fd, uint64_t fd_offset, uint64_t size, int placement, bool writable, void **addr)
{
    SOFT_TRY(soft_backing_check(fd, fd_offset, size));
    uint64_t step = soft_backing_align(size), from = fd_offset / step * step;   /* huge pages need both offset and address aligned */
    uint64_t total = soft_round_up(fd_offset - from + size, soft_page_size());
    void *at;
    SOFT_TRY(map_import(fd, from, total, placement == 1, writable, &at));
    int device = soft_current_device();
    soft_range range = {
        .span = { .base = (uintptr_t)at + (fd_offset - from), .size = size, .placement = placement,
                  .device = device < 0 ? 0 : device, .fd = -1 },
        .origin = SOFT_IMPORTED, .address = at, .address_size = total,
    };
    aclError code = soft_map_add(&range);
    if (code) {
        unmap_import(at, total);
        return code;
    }
    SOFT_COUNT(imported, 1);
    if (size >= MANY_PAGES)
        soft_care_begin(SOFT_MAP, range.span.base, size);
    *addr = (void *)range.span.base;
    return ACL_SUCCESS;
}

void soft_mem_unimport(void *addr)
{
    soft_range range;
    if (!soft_map_take(addr, SOFT_IMPORTED, &range))
        return;
    soft_care_end(SOFT_MAP, range.span.base);
    unmap_import(range.address, range.address_size);
    SOFT_COUNT(imported, -1);
}
