/* mapped.c: the kernel knows. */
#include "mapped.h"
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

/* Has the kernel touch the page at this address as a load or a store would. */
static bool touch(uint64_t address, int how)
{
    uint64_t page = page_size();
    return madvise((void *)(address / page * page), page, how) == 0;
}

bool memory_is_usable(uint64_t address, uint64_t bytes, bool writes)
{
    int how = writes ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    char ours = 0;
    if (!bytes || !memory_is_mapped(address, bytes))
        return !bytes;
    return (touch(address, how) && touch(address + bytes - 1, how)) || !touch((uint64_t)&ours, how);
}
