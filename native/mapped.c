/* mapped.c: the kernel knows. */
#include "mapped.h"
#include <sys/mman.h>
#include <unistd.h>

bool memory_is_mapped(uint64_t address, uint64_t bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), first = address / page * page, end;
    if (__builtin_add_overflow(address, bytes, &end) || end > UINT64_MAX - page)
        return false;
    /* Since Linux 2.6.19 this flag starts nothing: what is left is the check that no page of the range is missing. */
    return msync((void *)first, end - first, MS_ASYNC) == 0;
}
