/* mapped.c: asks the kernel, which knows every mapping of this process. */
#include "mapped.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

static uint64_t page_size(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

bool memory_is_mapped(uint64_t address, uint64_t bytes)
{
    uint64_t page = page_size(), first = address / page * page, end;
    if (__builtin_add_overflow(address, bytes, &end) || end > UINT64_MAX - page)
        return false;
    /* Since Linux 2.6.19 this flag starts nothing: what is left is the check that no page of the range is missing. */
    return msync((void *)first, end - first, MS_ASYNC) == 0;
}

/* Has the kernel copy the byte at this address, which takes any mapping, also a driver's; and back, which changes nothing. */
static bool copies(uint64_t address, bool back)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
        return true;                      /* the kernel does not say */
    bool done = write(ends[1], (void *)address, 1) == 1 && (!back || read(ends[0], (void *)address, 1) == 1);
    close(ends[0]);
    close(ends[1]);
    return done;
}

/* Has the kernel touch the page at this address as a load or a store would. */
static bool touch(uint64_t address, bool writes)
{
    uint64_t page = page_size();
    if (madvise((void *)(address / page * page), page, writes ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0)
        return true;
    return errno == EINVAL && copies(address, writes);      /* not allowed; or a driver's memory, or a kernel before 5.14 */
}

bool memory_is_usable(uint64_t address, uint64_t bytes, bool writes)
{
    if (!bytes)
        return true;
    return memory_is_mapped(address, bytes) && touch(address, writes) && touch(address + bytes - 1, writes);
}
