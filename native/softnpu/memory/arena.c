/* arena.c: the addresses that device pointers are made of.
 *
 * One reservation per process, inaccessible until something is mapped into it. It takes addresses, not memory. Because
 * device pointers come from nowhere else, a stale one is recognised, and following one on the host by mistake traps.
 * Addresses are handed out upwards and taken again only after the end was reached, so that a pointer to freed memory
 * stays wrong for long instead of meaning the next allocation.                                                      */
#include "runtime.h"
#include <sys/mman.h>
#include <unistd.h>

#define MOST  (16ull << 40)
#define LEAST (64ull << 30)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uintptr_t start;                             /* 0: not reserved yet; never changes afterwards */
static _Atomic uint64_t length;
static soft_sorted taken;
static uintptr_t cursor;

uint64_t soft_round_up(uint64_t value, uint64_t step)
{
    return (value + step - 1) / step * step;
}

uint64_t soft_page_size(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

static bool reserve(void)                                   /* less address space where there is a limit on it */
{
    for (uint64_t size = MOST; size >= LEAST; size /= 2) {
        void *got = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (got == MAP_FAILED)
            continue;
        madvise(got, size, MADV_DONTDUMP);
        cursor = (uintptr_t)got;
        atomic_store(&length, size);
        /* last, with release: a thread that sees the start sees the length, too */
        atomic_store_explicit(&start, (uintptr_t)got, memory_order_release);
        return true;
    }
    return false;
}

bool soft_arena_has(const void *addr)
{
    uintptr_t first = atomic_load_explicit(&start, memory_order_acquire);
    return first && (uintptr_t)addr >= first && (uintptr_t)addr - first < atomic_load(&length);
}

/* The first gap from `from` on, or 0. */
static uintptr_t gap(uintptr_t from, uint64_t size, uint64_t align)
{
    uintptr_t end = start + length, at = from;
    size_t next = soft_sorted_after(&taken, from);
    if (next > 0 && taken.entries[next - 1].base + taken.entries[next - 1].size > at)
        at = taken.entries[next - 1].base + taken.entries[next - 1].size;
    for (;; next++) {
        at = soft_round_up(at, align);
        uintptr_t limit = next < taken.count ? taken.entries[next].base : end;
        if (at < limit && limit - at >= size)
            return at;
        if (next >= taken.count)
            return 0;
        at = taken.entries[next].base + taken.entries[next].size;
    }
}

aclError soft_arena_take(uint64_t size, uint64_t align, void **addr)
{
    uintptr_t found = 0;
    uint64_t with_guard = soft_round_up(size, SOFT_PAGE) + SOFT_PAGE;  /* running off the end traps */
    pthread_mutex_lock(&lock);
    if (start || reserve()) {
        found = with_guard > size ? gap(cursor, with_guard, align) : 0;
        if (!found && with_guard > size)
            found = gap(start, with_guard, align);
        if (found && !soft_sorted_insert(&taken, (soft_entry){ found, with_guard, NULL }))
            found = 0;
        if (found)
            cursor = found + with_guard;
    }
    pthread_mutex_unlock(&lock);
    *addr = (void *)found;
    if (!found)
        return soft_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "no %llu bytes of address space left for device pointers (%llu reserved; "
                          "RLIMIT_AS may limit it)", (unsigned long long)size, (unsigned long long)length);
    return ACL_SUCCESS;
}

void soft_arena_close(void *addr, uint64_t size)
{
    /* One call, so that no other thread's mapping can slip into the hole. Advised as the reservation was, so that the kernel
     * merges the two again: else every piece ever taken costs a mapping, of which a process has vm.max_map_count.       */
    uint64_t whole = soft_round_up(size, SOFT_PAGE);
    if (mmap(addr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED)
        madvise(addr, whole, MADV_DONTDUMP);
}

void soft_arena_give(void *addr)
{
    pthread_mutex_lock(&lock);
    size_t at = soft_sorted_after(&taken, (uintptr_t)addr);
    if (at > 0 && taken.entries[at - 1].base == (uintptr_t)addr) {
        soft_arena_close(addr, taken.entries[at - 1].size);
        soft_sorted_remove(&taken, at - 1);
    }
    pthread_mutex_unlock(&lock);
}
